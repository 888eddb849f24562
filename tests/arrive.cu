/* The kernel that tests run before the one under test (t_cuda_kernels.h). In a file of its own because nvcc compiles it
 * for every target. */
#include <stdint.h>

__global__ void k_arrive(uint32_t *to, const uint32_t *from, size_t words) {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
#endif
    for (size_t i = blockIdx.x * 256 + threadIdx.x; i < words; i += 4 * 256) to[i] = from[i];
}
