/* The PTX from which nvcc made build/moe_cuda.o. IMAGES: IMAGE("compute_80") and so on, of the Makefile. */
#define IMAGE(target) ".incbin \"build/nvcc/moe_cuda." target ".ptx\"\n.byte 0\n"
asm(".section .rodata\n.globl ptx_images\nptx_images:\n" IMAGES ".byte 0\n.previous");
