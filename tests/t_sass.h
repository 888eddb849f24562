/* The machine code of the CUDA kernels, from the cubins that nvcc leaves in build/nvcc: what the hot loops cost, whether
 * kernels wait before they store, and how large the code of a decode layer is. Reads ELF itself, so it needs neither a
 * GPU nor NVIDIA's disassembler.
 *
 * An instruction of sm_90 and sm_120 has 16 bytes. Bits 0..8 are the operation, 9..11 the kinds of its operands, 12..15
 * the predicate (7: always), 105..108 the clocks until the warp's next instruction (its stall). A branch has its
 * distance from the next instruction, in words of 4 bytes, in bits 16..23 and 34..81, and its condition in 87..91 (7:
 * none). A load has its size in bits 73..75 (6: 16 bytes) and its hint for L1 in 84..86 (5: no_allocate). NVIDIA
 * documents none of this; it agrees with nvdisasm. */
#include <elf.h>
#include <glob.h>

enum operation {
    OP_MOV = 0x002,
    OP_SEL = 0x007,
    OP_FSEL = 0x008,
    OP_FMNMX = 0x009,
    OP_FSETP = 0x00b,
    OP_ISETP = 0x00c,
    OP_IADD3 = 0x010,
    OP_LEA = 0x011,
    OP_LOP3 = 0x012,
    OP_IABS = 0x013,
    OP_PRMT = 0x016,
    OP_IMNMX = 0x017,
    OP_SHF = 0x019,
    OP_PLOP3 = 0x01c,
    OP_IMAD = 0x024,
    OP_IMAD_WIDE = 0x025,
    OP_IMAD_HI = 0x027,
    OP_PREEXIT = 0x02d, /* griddepcontrol.launch_dependents */
    OP_ACQBULK = 0x02e, /* griddepcontrol.wait */
    OP_HADD2 = 0x030,
    OP_HFMA2 = 0x031,
    OP_HMUL2 = 0x032,
    OP_IADD = 0x035,  /* sm_90: HFMA2 */
    OP_VIADD = 0x036, /* sm_90 */
    OP_LDSM = 0x03b,
    OP_HMMA = 0x03c,
    OP_F2FP = 0x03e,
    OP_VIADDMNMX = 0x046, /* sm_90 */
    OP_VIMNMX = 0x048,
    OP_QMMA = 0x07a,
    OP_OMMA = 0x07f,
    OP_NOP = 0x118,
    OP_BAR = 0x11d,
    OP_BRA = 0x147,
    OP_EXIT = 0x14d,
    OP_RET = 0x150,
    OP_LDG = 0x181,
    OP_LDS = 0x184,
    OP_ST = 0x185,
    OP_STG = 0x186,
    OP_ATOM = 0x18a,
    OP_ATOM_CAS = 0x18b,
    OP_RED = 0x18e,
    OP_ATOM_HALF = 0x1a2,
    OP_ATOMG_HALF = 0x1a3,
    OP_RED_VECTOR = 0x1a6,
    OP_ATOMG = 0x1a8,
    OP_ATOMG_CAS = 0x1a9,
    OP_UTMASTG = 0x1b5, /* cp.async.bulk.tensor to global memory, and its reductions */
    OP_UTMAREDG = 0x1b6,
    OP_UBLKCP = 0x1ba, /* cp.async.bulk; bit 74: to global memory */
    OP_UBLKRED = 0x1bb
};

struct insn {
    uint64_t lo, hi;
};

struct sass_loop {
    int first, last;      /* instructions of the kernel */
    int n, stall;         /* instructions; clocks until the next one, together */
    int products;         /* of tensor cores */
    int streamed;         /* loads of 16 bytes with L1::no_allocate */
    int shared, barriers; /* loads from shared memory */
    int alu, fma;         /* clocks of two pipes; fma: of integer products and halves */
    int inner;            /* loops in it, without products or streamed loads; counted as if they ran once */
};

struct sass_kernel {
    char name[128];          /* k_gemv_glu<1> */
    const char *mangled;     /* in the file */
    const uint8_t *code;     /* in the file */
    int n;                   /* instructions */
    int symbol;              /* in the symbol table */
    int registers;           /* of a thread; 0: unknown */
    int threads;             /* of a block, at most; 0: unknown */
    struct sass_loop *loops; /* hot ones (stb) */
};

/* An ELF file of which all sections lie in the file. */
struct elf_file {
    const uint8_t *data;
    size_t size;
    Elf64_Shdr *sections;
    int n_section, names; /* names: the section with their names */
};

struct sass_image {
    struct elf_file elf;
    struct sass_kernel *kernels; /* by name (stb) */
    char release[16];            /* of the compiler; "": unknown */
    char *file;                  /* what sass_load read (stb) */
};

/* ---- budgets ---- */

/* A hot loop: an innermost loop with products of tensor cores or streamed loads. Each has a line; two loops of a kernel
 * with as many products and streamed loads have two lines, in the order of addresses. Budgets are the numbers of nvcc
 * SASS_RELEASE and 3 %. Those of registers are rounded up to 8, because an SM gives them by 8. */
struct sass_budget {
    const char *kernel;
    int products, streamed;  /* name the loop */
    int n, stall, registers; /* at most: instructions, clocks, of a thread */
    int bytes; /* of weights, or of keys and values, that a warp reads in an iteration; 0: products limit the loop */
};

#define SASS_RELEASE "13.0"

static const struct sass_budget sass_sm120[] = {
    {"attn_gqa_decode<32,32,0,0>", 8, 0, 296, 668, 96, 2048},
    {"attn_gqa_decode<32,32,1,0>", 8, 0, 270, 649, 112, 1152},
    {"attn_gqa_decode<64,64,0,0>", 16, 0, 407, 898, 128, 4096},
    {"attn_gqa_decode<64,64,0,1>", 16, 0, 450, 1038, 128, 4096},
    {"attn_gqa_decode<64,64,1,0>", 16, 0, 342, 829, 144, 2176},
    {"attn_gqa_decode<64,64,1,1>", 16, 0, 388, 998, 152, 2176},
    {"attn_gqa_decode<128,128,0,0>", 32, 0, 626, 1309, 192, 8192},
    {"attn_gqa_decode<128,128,0,1>", 32, 0, 650, 1392, 184, 8192},
    {"attn_gqa_decode<128,128,1,0>", 32, 0, 474, 1150, 200, 4224},
    {"attn_gqa_decode<128,128,1,1>", 32, 0, 519, 1363, 208, 4224},
    {"attn_gqa_decode<192,128,0,0>", 40, 0, 674, 1523, 210, 10240},
    {"attn_gqa_decode<192,128,1,0>", 40, 0, 505, 1338, 216, 5248},
    {"attn_gqa_decode<256,256,0,0>", 64, 0, 1048, 2258, 255, 16384},
    {"attn_gqa_decode<256,256,1,0>", 64, 0, 840, 2028, 255, 8320},
    {"attn_gqa_decode<32,32,0,2>", 12, 0, 520, 1094, 168, 2048},
    {"attn_gqa_decode<32,32,1,2>", 12, 0, 471, 1005, 168, 1152},
    {"attn_gqa_decode<64,64,0,2>", 20, 0, 640, 1322, 208, 4096},
    {"attn_gqa_decode<64,64,1,2>", 20, 0, 552, 1252, 208, 2176},
    {"attn_gqa_decode<128,128,0,2>", 36, 0, 862, 1809, 248, 8192},
    {"attn_gqa_decode<128,128,1,2>", 36, 0, 704, 1612, 255, 4224},
    {"attn_gqa_decode<64,64,0,3>", 16, 0, 553, 1205, 128, 4096},
    {"attn_gqa_decode<64,64,1,3>", 16, 0, 424, 1059, 144, 2176},
    {"attn_gqa_decode<128,128,0,3>", 32, 0, 766, 1566, 200, 8192},
    {"attn_gqa_decode<128,128,1,3>", 32, 0, 623, 1515, 200, 4224},
    {"attn_gqa_decode<256,256,0,3>", 64, 0, 1058, 2270, 255, 16384},
    {"attn_gqa_decode<256,256,1,3>", 64, 0, 979, 2541, 255, 8320},
    {"attn_gqa_prefill<32,32,0,0>", 32, 0, 586, 1501, 148, 0},
    {"attn_gqa_prefill<32,32,1,0>", 32, 0, 560, 1466, 160, 0},
    {"attn_gqa_prefill<64,64,0,0>", 64, 0, 725, 2154, 168, 0},
    {"attn_gqa_prefill<64,64,1,0>", 64, 0, 700, 2162, 168, 0},
    {"attn_gqa_prefill<128,128,0,0>", 128, 0, 901, 3282, 255, 0},
    {"attn_gqa_prefill<128,128,1,0>", 128, 0, 858, 3204, 255, 0},
    {"attn_gqa_prefill<192,128,0,0>", 80, 0, 755, 2487, 248, 0},
    {"attn_gqa_prefill<192,128,1,0>", 80, 0, 603, 2220, 255, 0},
    {"attn_gqa_prefill<256,256,0,0>", 128, 0, 873, 3245, 255, 0},
    {"attn_gqa_prefill<256,256,1,0>", 128, 0, 820, 3111, 250, 0},
    {"attn_gqa_prefill<32,32,0,1>", 48, 0, 1317, 3494, 232, 0},
    {"attn_gqa_prefill<32,32,1,1>", 48, 0, 1261, 3462, 232, 0},
    {"attn_gqa_prefill<64,64,0,1>", 80, 0, 1463, 4074, 255, 0},
    {"attn_gqa_prefill<64,64,1,1>", 80, 0, 1405, 4049, 255, 0},
    {"attn_gqa_prefill<128,128,0,1>", 144, 0, 1703, 5127, 255, 0},
    {"attn_gqa_prefill<128,128,1,1>", 144, 0, 1683, 5103, 255, 0},
    {"attn_mla_expanded<32,16,32>", 40, 0, 500, 1452, 160, 0},
    {"attn_mla_expanded<128,64,128>", 160, 0, 891, 3729, 255, 0},
    {"attn_mla_expanded<64,64,128>", 128, 0, 811, 3138, 255, 0},
    {"attn_mla_kernel<64,0,0,1,1>", 10, 0, 396, 990, 112, 512},
    {"attn_mla_kernel<64,0,0,1,2>", 10, 0, 424, 1101, 128, 512},
    {"attn_mla_kernel<64,0,0,2,0>", 20, 0, 621, 1429, 168, 512},
    {"attn_mla_kernel<64,0,0,2,1>", 20, 0, 629, 1471, 168, 512},
    {"attn_mla_kernel<64,0,1,1,1>", 12, 0, 431, 1179, 120, 272},
    {"attn_mla_kernel<64,0,1,1,2>", 12, 0, 484, 1432, 128, 272},
    {"attn_mla_kernel<64,0,1,2,0>", 24, 0, 676, 1665, 168, 272},
    {"attn_mla_kernel<64,0,1,2,1>", 24, 0, 711, 1747, 200, 272},
    {"attn_mla_kernel<64,16,0,1,0>", 11, 0, 419, 1011, 112, 640},
    {"attn_mla_kernel<64,16,0,1,1>", 11, 0, 427, 1077, 120, 640},
    {"attn_mla_kernel<64,16,0,2,0>", 22, 0, 662, 1549, 168, 640},
    {"attn_mla_kernel<64,16,0,2,1>", 22, 0, 670, 1587, 168, 640},
    {"attn_mla_kernel<64,16,1,1,0>", 13, 0, 421, 1085, 128, 400},
    {"attn_mla_kernel<64,16,1,1,1>", 13, 0, 450, 1286, 128, 400},
    {"attn_mla_kernel<64,16,1,2,0>", 26, 0, 700, 1796, 202, 400},
    {"attn_mla_kernel<64,16,1,2,1>", 26, 0, 744, 1898, 208, 400},
    {"attn_mla_kernel<128,0,0,1,1>", 12, 0, 429, 1018, 120, 1024},
    {"attn_mla_kernel<128,0,0,2,0>", 24, 0, 655, 1513, 168, 1024},
    {"attn_mla_kernel<128,0,0,2,1>", 24, 0, 678, 1550, 168, 1024},
    {"attn_mla_kernel<128,0,1,1,1>", 12, 0, 423, 1162, 120, 528},
    {"attn_mla_kernel<128,0,1,2,0>", 24, 0, 665, 1629, 168, 528},
    {"attn_mla_kernel<128,0,1,2,1>", 24, 0, 699, 1733, 192, 528},
    {"attn_mla_kernel<128,64,0,1,0>", 14, 0, 436, 1013, 128, 1536},
    {"attn_mla_kernel<128,64,0,1,1>", 14, 0, 460, 1056, 128, 1536},
    {"attn_mla_kernel<128,64,0,2,0>", 28, 0, 690, 1590, 204, 1536},
    {"attn_mla_kernel<128,64,0,2,1>", 28, 0, 714, 1597, 216, 1536},
    {"attn_mla_kernel<128,64,1,1,0>", 14, 0, 410, 1022, 128, 1040},
    {"attn_mla_kernel<128,64,1,1,1>", 14, 0, 429, 1183, 128, 1040},
    {"attn_mla_kernel<128,64,1,2,0>", 28, 0, 683, 1677, 208, 1040},
    {"attn_mla_kernel<128,64,1,2,1>", 28, 0, 721, 1792, 208, 1040},
    {"attn_mla_kernel<256,64,0,1,0>", 18, 0, 471, 983, 152, 2560},
    {"attn_mla_kernel<256,64,0,2,0>", 36, 0, 724, 1577, 248, 2560},
    {"attn_mla_kernel<256,64,1,1,0>", 18, 0, 420, 994, 144, 1568},
    {"attn_mla_kernel<256,64,1,2,0>", 36, 0, 668, 1634, 248, 1568},
    {"attn_mla_kernel<512,0,0,1,1>", 32, 0, 695, 1446, 200, 4096},
    {"attn_mla_kernel<512,0,0,1,2>", 32, 0, 844, 2194, 200, 4096},
    {"attn_mla_kernel<512,0,0,2,0>", 64, 0, 964, 2154, 255, 4096},
    {"attn_mla_kernel<512,0,0,2,1>", 64, 0, 1019, 2378, 255, 4096},
    {"attn_mla_kernel<512,0,0,2,2>", 64, 0, 1176, 3074, 255, 4096},
    {"attn_mla_kernel<512,0,1,1,1>", 32, 0, 586, 1505, 184, 2112},
    {"attn_mla_kernel<512,0,1,1,2>", 32, 0, 756, 2389, 200, 2112},
    {"attn_mla_kernel<512,0,1,2,0>", 64, 0, 805, 2147, 248, 2112},
    {"attn_mla_kernel<512,0,1,2,1>", 64, 0, 899, 2345, 248, 2112},
    {"attn_mla_kernel<512,0,1,2,2>", 64, 0, 1060, 3158, 255, 2112},
    {"attn_mla_kernel<512,0,0,1,3>", 32, 0, 697, 1403, 200, 8192},
    {"attn_mla_kernel<512,0,0,2,3>", 64, 0, 1025, 2340, 255, 8192},
    {"attn_mla_kernel<512,0,1,1,3>", 32, 0, 549, 1360, 192, 4128},
    {"attn_mla_kernel<512,0,1,2,3>", 64, 0, 861, 2251, 255, 4128},
    {"attn_mla_kernel<512,64,0,1,0>", 34, 0, 674, 1413, 208, 4608},
    {"attn_mla_kernel<512,64,0,1,1>", 34, 0, 709, 1516, 208, 4608},
    {"attn_mla_kernel<512,64,0,2,0>", 68, 0, 1010, 2345, 255, 4608},
    {"attn_mla_kernel<512,64,0,2,1>", 68, 0, 1036, 2379, 255, 4608},
    {"attn_mla_kernel<512,64,1,1,0>", 34, 0, 514, 1257, 200, 2624},
    {"attn_mla_kernel<512,64,1,1,1>", 34, 0, 586, 1488, 208, 2624},
    {"attn_mla_kernel<512,64,1,2,0>", 68, 0, 835, 2184, 255, 2624},
    {"attn_mla_kernel<512,64,1,2,1>", 68, 0, 895, 2363, 255, 2624},
    {"attn_mla_kernel<1024,64,0,1,0>", 50, 0, 821, 1832, 255, 4352},
    {"attn_mla_kernel<1024,64,1,1,0>", 66, 0, 1181, 2947, 248, 4736},
    {"k_index_blocks<64,0>", 16, 0, 323, 1049, 80, 4096},
    {"k_index_blocks<64,1>", 16, 0, 345, 1037, 80, 2176},
    {"k_index_blocks<128,0>", 32, 0, 370, 1322, 136, 8192},
    {"k_index_blocks<128,1>", 32, 0, 402, 1347, 112, 4224},
    {"k_index_scores<16,0,0>", 8, 0, 105, 242, 96, 512},
    {"k_index_scores<16,1,0>", 8, 0, 105, 242, 112, 320},
    {"k_index_scores<32,0,0>", 16, 0, 126, 373, 112, 1024},
    {"k_index_scores<32,0,1>", 16, 0, 126, 373, 104, 1024},
    {"k_index_scores<32,1,0>", 16, 0, 126, 373, 120, 576},
    {"k_index_scores<32,1,1>", 16, 0, 126, 386, 128, 576},
    {"k_index_scores<48,0,0>", 24, 0, 144, 498, 120, 1536},
    {"k_index_scores<48,1,0>", 24, 0, 142, 502, 128, 832},
    {"k_index_scores<64,0,0>", 32, 0, 160, 637, 128, 2048},
    {"k_index_scores<64,0,1>", 32, 0, 166, 643, 120, 2048},
    {"k_index_scores<64,1,0>", 32, 0, 164, 659, 128, 1088},
    {"k_index_scores<64,1,1>", 32, 0, 157, 637, 128, 1088},
    {"k_index_scores<80,0,0>", 40, 0, 180, 764, 128, 2560},
    {"k_index_scores<80,1,0>", 40, 0, 177, 780, 128, 1344},
    {"k_index_scores<96,0,0>", 24, 0, 107, 484, 128, 1536},
    {"k_index_scores<96,1,0>", 24, 0, 107, 483, 128, 800},
    {"k_index_scores<112,0,0>", 28, 0, 115, 548, 128, 1792},
    {"k_index_scores<112,1,0>", 28, 0, 115, 548, 128, 928},
    {"k_index_scores<128,0,0>", 32, 0, 119, 596, 136, 2048},
    {"k_index_scores<128,0,1>", 32, 0, 123, 601, 128, 2048},
    {"k_index_scores<128,1,0>", 32, 0, 121, 600, 128, 1056},
    {"k_index_scores<128,1,1>", 32, 0, 124, 613, 128, 1056},
    {"gemm_kernel<0,0,4,1,3,1>", 64, 0, 492, 1602, 168, 0},
    {"gemm_kernel<0,0,4,1,3,1>", 64, 0, 430, 1332, 168, 0},
    {"gemm_kernel<0,0,8,1,4,1>", 64, 0, 477, 1593, 160, 0},
    {"gemm_kernel<0,0,8,1,4,1>", 64, 0, 416, 1313, 160, 0},
    {"gemm_kernel<0,1,4,1,3,1>", 64, 0, 492, 1689, 160, 0},
    {"gemm_kernel<0,1,4,1,3,1>", 64, 0, 429, 1335, 160, 0},
    {"gemm_kernel<0,1,8,1,4,1>", 64, 0, 477, 1681, 160, 0},
    {"gemm_kernel<0,1,8,1,4,1>", 64, 0, 416, 1322, 160, 0},
    {"gemm_kernel<1,0,4,1,2,1>", 64, 0, 513, 1739, 248, 0},
    {"gemm_kernel<1,0,4,1,2,1>", 64, 0, 445, 1301, 248, 0},
    {"gemm_kernel<1,0,4,2,4,1>", 64, 0, 500, 1728, 248, 0},
    {"gemm_kernel<1,0,4,2,4,1>", 64, 0, 432, 1296, 248, 0},
    {"gemm_kernel<1,1,4,1,2,1>", 64, 0, 508, 1732, 248, 0},
    {"gemm_kernel<1,1,4,1,2,1>", 64, 0, 440, 1304, 248, 0},
    {"gemm_kernel<1,1,4,2,4,1>", 64, 0, 500, 1725, 248, 0},
    {"gemm_kernel<1,1,4,2,4,1>", 64, 0, 428, 1290, 248, 0},
    {"gemm_kernel<2,0,4,1,2,1>", 64, 0, 312, 1456, 152, 0},
    {"gemm_kernel<2,0,4,1,2,1>", 64, 0, 271, 1290, 152, 0},
    {"gemm_kernel<2,0,4,2,3,1>", 64, 0, 285, 1429, 152, 0},
    {"gemm_kernel<2,0,4,2,3,1>", 64, 0, 245, 1253, 152, 0},
    {"gemm_kernel<2,1,4,1,2,1>", 64, 0, 291, 1432, 152, 0},
    {"gemm_kernel<2,1,4,1,2,1>", 64, 0, 251, 1266, 152, 0},
    {"gemm_kernel<2,1,4,2,3,1>", 64, 0, 274, 1421, 152, 0},
    {"gemm_kernel<2,1,4,2,3,1>", 64, 0, 234, 1249, 152, 0},
    {"gemm_kernel<3,0,4,1,2,1>", 64, 0, 500, 1626, 152, 0},
    {"gemm_kernel<3,0,4,1,2,1>", 64, 0, 440, 1355, 152, 0},
    {"gemm_kernel<3,0,4,2,4,1>", 64, 0, 487, 1608, 152, 0},
    {"gemm_kernel<3,0,4,2,4,1>", 64, 0, 427, 1332, 152, 0},
    {"gemm_kernel<3,1,4,1,2,1>", 64, 0, 494, 1650, 152, 0},
    {"gemm_kernel<3,1,4,1,2,1>", 64, 0, 433, 1353, 152, 0},
    {"gemm_kernel<3,1,4,2,4,1>", 64, 0, 487, 1627, 144, 0},
    {"gemm_kernel<3,1,4,2,4,1>", 64, 0, 427, 1338, 144, 0},
    {"gemm_kernel<4,0,4,1,5,1>", 16, 0, 184, 615, 128, 0},
    {"gemm_kernel<4,0,4,1,5,1>", 16, 0, 148, 523, 128, 0},
    {"gemm_kernel<4,0,4,2,5,1>", 16, 0, 180, 595, 128, 0},
    {"gemm_kernel<4,0,4,2,5,1>", 16, 0, 144, 496, 128, 0},
    {"gemm_kernel<4,0,8,2,5,1>", 16, 0, 180, 590, 128, 0},
    {"gemm_kernel<4,0,8,2,5,1>", 16, 0, 144, 492, 128, 0},
    {"gemm_kernel<4,1,4,1,5,1>", 16, 0, 185, 614, 128, 0},
    {"gemm_kernel<4,1,4,1,5,1>", 16, 0, 149, 520, 128, 0},
    {"gemm_kernel<4,1,4,2,5,1>", 16, 0, 188, 605, 128, 0},
    {"gemm_kernel<4,1,4,2,5,1>", 16, 0, 152, 506, 128, 0},
    {"gemm_kernel<4,1,8,2,5,1>", 16, 0, 188, 605, 128, 0},
    {"gemm_kernel<4,1,8,2,5,1>", 16, 0, 152, 506, 128, 0},
    {"k_delta_scan<0>", 288, 0, 2534, 8073, 255, 0},
    {"k_delta_scan<1>", 288, 0, 2725, 8460, 255, 0},
    {"k_delta_scan<2>", 48, 0, 184, 882, 216, 0},
    {"k_gemv_down<1>", 16, 4, 787, 1888, 96, 2304},
    {"k_gemv_down<1>", 8, 8, 181, 782, 96, 4096},
    {"k_gemv_down<1>", 8, 4, 272, 794, 96, 2176},
    {"k_gemv_down<1>", 16, 4, 488, 815, 96, 2304},
    {"k_gemv_down<1>", 8, 8, 45, 250, 96, 4096},
    {"k_gemv_down<1>", 8, 4, 385, 970, 96, 2176},
    {"k_gemv_down<1>", 8, 4, 132, 234, 96, 2176},
    {"k_gemv_down<1>", 8, 4, 238, 439, 96, 2176},
    {"k_gemv_down<2>", 32, 4, 945, 2440, 120, 2304},
    {"k_gemv_down<2>", 16, 8, 263, 999, 120, 4096},
    {"k_gemv_down<2>", 16, 4, 371, 1092, 120, 2176},
    {"k_gemv_down<2>", 32, 4, 517, 1035, 120, 2304},
    {"k_gemv_down<2>", 16, 8, 59, 301, 120, 4096},
    {"k_gemv_down<2>", 16, 4, 461, 1260, 120, 2176},
    {"k_gemv_down<2>", 16, 4, 166, 366, 120, 2176},
    {"k_gemv_down<2>", 16, 4, 255, 476, 120, 2176},
    {"k_gemv_glu<1>", 16, 4, 488, 800, 80, 2304},
    {"k_gemv_glu<1>", 8, 8, 45, 250, 80, 4096},
    {"k_gemv_glu<1>", 8, 4, 132, 235, 80, 2176},
    {"k_gemv_glu<1>", 8, 4, 238, 385, 80, 2176},
    {"k_gemv_glu<2>", 32, 4, 525, 1035, 128, 2304},
    {"k_gemv_glu<2>", 16, 8, 59, 301, 128, 4096},
    {"k_gemv_glu<2>", 16, 4, 166, 366, 128, 2176},
    {"k_gemv_glu<2>", 16, 4, 257, 529, 120, 2176},
    {"k_gemv_linear<1,0,0>", 16, 4, 488, 763, 96, 2304},
    {"k_gemv_linear<1,0,0>", 8, 8, 45, 250, 96, 4096},
    {"k_gemv_linear<1,0,0>", 8, 4, 132, 234, 96, 2176},
    {"k_gemv_linear<1,0,0>", 8, 4, 238, 392, 96, 2176},
    {"k_gemv_linear<1,0,1>", 16, 4, 488, 763, 96, 2304},
    {"k_gemv_linear<1,0,1>", 8, 8, 45, 250, 96, 4096},
    {"k_gemv_linear<1,0,1>", 8, 4, 132, 234, 96, 2176},
    {"k_gemv_linear<1,0,1>", 8, 4, 238, 392, 96, 2176},
    {"k_gemv_linear<1,1,0>", 16, 4, 488, 801, 120, 2304},
    {"k_gemv_linear<1,1,0>", 8, 8, 45, 250, 120, 4096},
    {"k_gemv_linear<1,1,0>", 8, 4, 132, 246, 120, 2176},
    {"k_gemv_linear<1,1,0>", 8, 4, 238, 423, 120, 2176},
    {"k_gemv_linear<2,0,0>", 32, 4, 517, 974, 120, 2304},
    {"k_gemv_linear<2,0,0>", 16, 8, 59, 301, 120, 4096},
    {"k_gemv_linear<2,0,0>", 16, 4, 166, 366, 120, 2176},
    {"k_gemv_linear<2,0,0>", 16, 4, 257, 522, 120, 2176},
    {"k_gemv_linear<2,0,1>", 32, 4, 517, 948, 120, 2304},
    {"k_gemv_linear<2,0,1>", 16, 8, 59, 301, 120, 4096},
    {"k_gemv_linear<2,0,1>", 16, 4, 166, 366, 120, 2176},
    {"k_gemv_linear<2,0,1>", 16, 4, 253, 522, 120, 2176},
    {"k_gemv_linear<1,0,2>", 16, 4, 488, 839, 104, 2304},
    {"k_gemv_linear<1,0,2>", 8, 4, 132, 245, 104, 2176},
    {"k_gemv_linear<1,0,2>", 8, 4, 238, 419, 104, 2176},
    {"k_gemv_linear<1,0,2>", 8, 8, 45, 250, 104, 4096},
    {"k_gemv_linear<1,1,2>", 16, 4, 488, 785, 120, 2304},
    {"k_gemv_linear<1,1,2>", 8, 4, 132, 246, 120, 2176},
    {"k_gemv_linear<1,1,2>", 8, 4, 238, 423, 120, 2176},
    {"k_gemv_linear<1,1,2>", 8, 8, 45, 250, 120, 4096},
    {"k_gemv_linear<2,0,2>", 16, 4, 166, 366, 120, 2176},
    {"k_gemv_linear<2,0,2>", 16, 4, 257, 529, 120, 2176},
    {"k_gemv_linear<2,0,2>", 16, 8, 59, 301, 120, 4096},
    {"k_gemv_linear<2,0,2>", 32, 4, 522, 1036, 120, 2304},
    {"k_mla_query<1>", 16, 4, 488, 810, 104, 2304},
    {"k_mla_query<1>", 8, 8, 45, 250, 104, 4096},
    {"k_mla_query<1>", 8, 4, 132, 245, 104, 2176},
    {"k_mla_query<1>", 8, 4, 238, 421, 104, 2176},
    {"k_mla_query<2>", 32, 4, 521, 956, 120, 2304},
    {"k_mla_query<2>", 16, 8, 59, 301, 120, 4096},
    {"k_mla_query<2>", 16, 4, 163, 366, 120, 2176},
    {"k_mla_query<2>", 16, 4, 253, 458, 120, 2176},
    {"k_mla_value<1>", 4, 1, 955, 2836, 120, 576},
    {"k_mla_value<1>", 4, 4, 861, 2773, 120, 2048},
    {"k_mla_value<1>", 4, 2, 935, 2794, 120, 1088},
    {"k_mla_value<1>", 4, 2, 958, 2786, 104, 1088},
    {"k_mla_value<2>", 8, 1, 1023, 3006, 120, 576},
    {"k_mla_value<2>", 8, 4, 938, 2947, 120, 2048},
    {"k_mla_value<2>", 8, 2, 969, 2912, 120, 1088},
    {"k_mla_value<2>", 8, 2, 994, 2940, 120, 1088},
    {"k_mma_rate", 128, 0, 272, 2135, 48, 0},
    {"k_mma_rate", 8, 0, 25, 157, 48, 0},
    {"k_route_logits", 24, 0, 234, 831, 120, 0},
};
static const struct sass_budget sass_sm90[] = {
    {"attn_gqa_decode<32,32,0,0>", 8, 0, 334, 686, 96, 2048},
    {"attn_gqa_decode<32,32,1,0>", 8, 0, 305, 714, 96, 1152},
    {"attn_gqa_decode<64,64,0,0>", 16, 0, 497, 884, 120, 4096},
    {"attn_gqa_decode<64,64,0,1>", 16, 0, 527, 1048, 120, 4096},
    {"attn_gqa_decode<64,64,1,0>", 16, 0, 421, 912, 128, 2176},
    {"attn_gqa_decode<64,64,1,1>", 16, 0, 458, 1036, 128, 2176},
    {"attn_gqa_decode<128,128,0,0>", 32, 0, 716, 1269, 168, 8192},
    {"attn_gqa_decode<128,128,0,1>", 32, 0, 743, 1343, 162, 8192},
    {"attn_gqa_decode<128,128,1,0>", 32, 0, 610, 1257, 176, 4224},
    {"attn_gqa_decode<128,128,1,1>", 32, 0, 647, 1307, 168, 4224},
    {"attn_gqa_decode<192,128,0,0>", 40, 0, 764, 1344, 184, 10240},
    {"attn_gqa_decode<192,128,1,0>", 40, 0, 697, 1432, 184, 5248},
    {"attn_gqa_decode<256,256,0,0>", 64, 0, 1064, 2128, 255, 16384},
    {"attn_gqa_decode<256,256,1,0>", 64, 0, 916, 2176, 255, 8320},
    {"attn_gqa_decode<32,32,0,2>", 12, 0, 598, 1179, 136, 2048},
    {"attn_gqa_decode<32,32,1,2>", 12, 0, 459, 1143, 152, 1152},
    {"attn_gqa_decode<64,64,0,2>", 20, 0, 726, 1404, 168, 4096},
    {"attn_gqa_decode<64,64,1,2>", 20, 0, 674, 1405, 168, 2176},
    {"attn_gqa_decode<128,128,0,2>", 36, 0, 994, 1731, 192, 8192},
    {"attn_gqa_decode<128,128,1,2>", 36, 0, 868, 1686, 216, 4224},
    {"attn_gqa_decode<64,64,0,3>", 16, 0, 618, 1212, 128, 4096},
    {"attn_gqa_decode<64,64,1,3>", 16, 0, 479, 1108, 120, 2176},
    {"attn_gqa_decode<128,128,0,3>", 32, 0, 846, 1586, 168, 8192},
    {"attn_gqa_decode<128,128,1,3>", 32, 0, 730, 1537, 168, 4224},
    {"attn_gqa_decode<256,256,0,3>", 64, 0, 1082, 2190, 255, 16384},
    {"attn_gqa_decode<256,256,1,3>", 64, 0, 1044, 2406, 255, 8320},
    {"attn_gqa_prefill<32,32,0,0>", 32, 0, 754, 1686, 128, 0},
    {"attn_gqa_prefill<32,32,1,0>", 32, 0, 706, 1716, 128, 0},
    {"attn_gqa_prefill<64,64,0,0>", 64, 0, 879, 1906, 168, 0},
    {"attn_gqa_prefill<64,64,1,0>", 64, 0, 826, 1924, 168, 0},
    {"attn_gqa_prefill<128,128,0,0>", 128, 0, 1130, 2472, 232, 0},
    {"attn_gqa_prefill<128,128,1,0>", 128, 0, 1052, 2432, 242, 0},
    {"attn_gqa_prefill<192,128,0,0>", 80, 0, 1051, 2323, 224, 0},
    {"attn_gqa_prefill<192,128,1,0>", 80, 0, 895, 2196, 232, 0},
    {"attn_gqa_prefill<256,256,0,0>", 128, 0, 1086, 2255, 255, 0},
    {"attn_gqa_prefill<256,256,1,0>", 128, 0, 1004, 2215, 255, 0},
    {"attn_gqa_prefill<32,32,0,1>", 48, 0, 1472, 3369, 222, 0},
    {"attn_gqa_prefill<32,32,1,1>", 48, 0, 1481, 3799, 216, 0},
    {"attn_gqa_prefill<64,64,0,1>", 80, 0, 1827, 3945, 234, 0},
    {"attn_gqa_prefill<64,64,1,1>", 80, 0, 1796, 4255, 224, 0},
    {"attn_gqa_prefill<128,128,0,1>", 144, 0, 2101, 4741, 255, 0},
    {"attn_gqa_prefill<128,128,1,1>", 144, 0, 2040, 4822, 255, 0},
    {"attn_mla_expanded<32,16,32>", 40, 0, 949, 2103, 152, 0},
    {"attn_mla_expanded<128,64,128>", 160, 0, 1421, 3084, 240, 0},
    {"attn_mla_expanded<64,64,128>", 128, 0, 1426, 2911, 216, 0},
    {"attn_mla_kernel<64,0,0,1,1>", 10, 0, 440, 1023, 96, 512},
    {"attn_mla_kernel<64,0,0,1,2>", 10, 0, 426, 1154, 112, 512},
    {"attn_mla_kernel<64,0,0,2,0>", 20, 0, 634, 1404, 168, 512},
    {"attn_mla_kernel<64,0,0,2,1>", 20, 0, 646, 1463, 168, 512},
    {"attn_mla_kernel<64,0,1,1,1>", 12, 0, 518, 1343, 112, 272},
    {"attn_mla_kernel<64,0,1,1,2>", 12, 0, 512, 1519, 128, 272},
    {"attn_mla_kernel<64,0,1,2,0>", 24, 0, 749, 1669, 168, 272},
    {"attn_mla_kernel<64,0,1,2,1>", 24, 0, 787, 1866, 168, 272},
    {"attn_mla_kernel<64,16,0,1,0>", 11, 0, 459, 1074, 96, 640},
    {"attn_mla_kernel<64,16,0,1,1>", 11, 0, 467, 1135, 104, 640},
    {"attn_mla_kernel<64,16,0,2,0>", 22, 0, 692, 1552, 168, 640},
    {"attn_mla_kernel<64,16,0,2,1>", 22, 0, 700, 1608, 168, 640},
    {"attn_mla_kernel<64,16,1,1,0>", 13, 0, 525, 1250, 116, 400},
    {"attn_mla_kernel<64,16,1,1,1>", 13, 0, 559, 1494, 120, 400},
    {"attn_mla_kernel<64,16,1,2,0>", 26, 0, 785, 1821, 188, 400},
    {"attn_mla_kernel<64,16,1,2,1>", 26, 0, 829, 2028, 192, 400},
    {"attn_mla_kernel<128,0,0,1,1>", 12, 0, 490, 1090, 112, 1024},
    {"attn_mla_kernel<128,0,0,2,0>", 24, 0, 702, 1468, 168, 1024},
    {"attn_mla_kernel<128,0,0,2,1>", 24, 0, 730, 1540, 168, 1024},
    {"attn_mla_kernel<128,0,1,1,1>", 12, 0, 498, 1255, 120, 528},
    {"attn_mla_kernel<128,0,1,2,0>", 24, 0, 727, 1597, 168, 528},
    {"attn_mla_kernel<128,0,1,2,1>", 24, 0, 769, 1814, 168, 528},
    {"attn_mla_kernel<128,64,0,1,0>", 14, 0, 493, 1060, 114, 1536},
    {"attn_mla_kernel<128,64,0,1,1>", 14, 0, 510, 1126, 120, 1536},
    {"attn_mla_kernel<128,64,0,2,0>", 28, 0, 747, 1565, 200, 1536},
    {"attn_mla_kernel<128,64,0,2,1>", 28, 0, 750, 1592, 200, 1536},
    {"attn_mla_kernel<128,64,1,1,0>", 14, 0, 492, 1125, 120, 1040},
    {"attn_mla_kernel<128,64,1,1,1>", 14, 0, 514, 1297, 120, 1040},
    {"attn_mla_kernel<128,64,1,2,0>", 28, 0, 747, 1612, 194, 1040},
    {"attn_mla_kernel<128,64,1,2,1>", 28, 0, 786, 1839, 202, 1040},
    {"attn_mla_kernel<256,64,0,1,0>", 18, 0, 529, 1117, 144, 2560},
    {"attn_mla_kernel<256,64,0,2,0>", 36, 0, 824, 1732, 224, 2560},
    {"attn_mla_kernel<256,64,1,1,0>", 18, 0, 502, 1129, 152, 1568},
    {"attn_mla_kernel<256,64,1,2,0>", 36, 0, 816, 1767, 248, 1568},
    {"attn_mla_kernel<512,0,0,1,1>", 32, 0, 810, 1560, 176, 4096},
    {"attn_mla_kernel<512,0,0,1,2>", 32, 0, 944, 2244, 179, 4096},
    {"attn_mla_kernel<512,0,0,2,0>", 64, 0, 1069, 2048, 248, 4096},
    {"attn_mla_kernel<512,0,0,2,1>", 64, 0, 1125, 2310, 248, 4096},
    {"attn_mla_kernel<512,0,0,2,2>", 64, 0, 1250, 2968, 248, 4096},
    {"attn_mla_kernel<512,0,1,1,1>", 32, 0, 776, 1706, 184, 2112},
    {"attn_mla_kernel<512,0,1,1,2>", 32, 0, 936, 2499, 194, 2112},
    {"attn_mla_kernel<512,0,1,2,0>", 64, 0, 1000, 2065, 255, 2112},
    {"attn_mla_kernel<512,0,1,2,1>", 64, 0, 1098, 2374, 248, 2112},
    {"attn_mla_kernel<512,0,1,2,2>", 64, 0, 1241, 3270, 248, 2112},
    {"attn_mla_kernel<512,0,0,1,3>", 32, 0, 827, 1466, 184, 8192},
    {"attn_mla_kernel<512,0,0,2,3>", 64, 0, 1126, 2063, 248, 8192},
    {"attn_mla_kernel<512,0,1,1,3>", 32, 0, 762, 1519, 176, 4128},
    {"attn_mla_kernel<512,0,1,2,3>", 64, 0, 1072, 2212, 240, 4128},
    {"attn_mla_kernel<512,64,0,1,0>", 34, 0, 800, 1488, 192, 4608},
    {"attn_mla_kernel<512,64,0,1,1>", 34, 0, 809, 1559, 192, 4608},
    {"attn_mla_kernel<512,64,0,2,0>", 68, 0, 1106, 2281, 255, 4608},
    {"attn_mla_kernel<512,64,0,2,1>", 68, 0, 1135, 2442, 255, 4608},
    {"attn_mla_kernel<512,64,1,1,0>", 34, 0, 724, 1401, 196, 2624},
    {"attn_mla_kernel<512,64,1,1,1>", 34, 0, 787, 1729, 200, 2624},
    {"attn_mla_kernel<512,64,1,2,0>", 68, 0, 1038, 2165, 255, 2624},
    {"attn_mla_kernel<512,64,1,2,1>", 68, 0, 1115, 2421, 255, 2624},
    {"attn_mla_kernel<1024,64,0,1,0>", 50, 0, 1014, 1759, 248, 4352},
    {"attn_mla_kernel<1024,64,1,1,0>", 66, 0, 1173, 2475, 255, 4736},
    {"k_index_blocks<64,0>", 16, 0, 182, 494, 80, 4096},
    {"k_index_blocks<64,1>", 16, 0, 197, 504, 80, 2176},
    {"k_index_blocks<128,0>", 32, 0, 202, 637, 144, 8192},
    {"k_index_blocks<128,1>", 32, 0, 219, 657, 112, 4224},
    {"k_index_scores<16,0,0>", 8, 0, 119, 212, 72, 512},
    {"k_index_scores<16,1,0>", 8, 0, 119, 212, 80, 320},
    {"k_index_scores<32,0,0>", 16, 0, 129, 262, 96, 1024},
    {"k_index_scores<32,0,1>", 16, 0, 129, 283, 96, 1024},
    {"k_index_scores<32,1,0>", 16, 0, 129, 263, 96, 576},
    {"k_index_scores<32,1,1>", 16, 0, 129, 263, 96, 576},
    {"k_index_scores<48,0,0>", 24, 0, 139, 321, 104, 1536},
    {"k_index_scores<48,1,0>", 24, 0, 139, 321, 112, 832},
    {"k_index_scores<64,0,0>", 32, 0, 145, 385, 120, 2048},
    {"k_index_scores<64,0,1>", 32, 0, 150, 383, 120, 2048},
    {"k_index_scores<64,1,0>", 32, 0, 145, 385, 128, 1088},
    {"k_index_scores<64,1,1>", 32, 0, 150, 382, 120, 1088},
    {"k_index_scores<80,0,0>", 20, 0, 84, 245, 112, 1280},
    {"k_index_scores<80,1,0>", 20, 0, 84, 246, 112, 672},
    {"k_index_scores<96,0,0>", 24, 0, 89, 267, 128, 1536},
    {"k_index_scores<96,1,0>", 24, 0, 89, 268, 120, 800},
    {"k_index_scores<112,0,0>", 28, 0, 94, 295, 128, 1792},
    {"k_index_scores<112,1,0>", 28, 0, 94, 294, 128, 928},
    {"k_index_scores<128,0,0>", 32, 0, 96, 317, 128, 2048},
    {"k_index_scores<128,0,1>", 32, 0, 102, 307, 128, 2048},
    {"k_index_scores<128,1,0>", 32, 0, 96, 317, 128, 1056},
    {"k_index_scores<128,1,1>", 32, 0, 102, 307, 128, 1056},
    {"gemm_kernel<0,0,4,1,3,1>", 64, 0, 453, 1059, 120, 0},
    {"gemm_kernel<0,0,8,1,4,1>", 64, 0, 436, 1046, 120, 0},
    {"gemm_kernel<0,1,4,1,3,1>", 64, 0, 455, 1149, 120, 0},
    {"gemm_kernel<0,1,8,1,4,1>", 64, 0, 438, 1142, 120, 0},
    {"gemm_kernel<1,0,4,1,2,1>", 64, 0, 518, 1489, 120, 0},
    {"gemm_kernel<1,0,4,2,4,1>", 64, 0, 505, 1474, 120, 0},
    {"gemm_kernel<1,1,4,1,2,1>", 64, 0, 505, 1430, 120, 0},
    {"gemm_kernel<1,1,4,2,4,1>", 64, 0, 500, 1449, 128, 0},
    {"gemm_kernel<2,0,4,1,2,1>", 64, 0, 268, 896, 112, 0},
    {"gemm_kernel<2,0,4,2,3,1>", 64, 0, 245, 857, 112, 0},
    {"gemm_kernel<2,1,4,1,2,1>", 64, 0, 253, 873, 112, 0},
    {"gemm_kernel<2,1,4,2,3,1>", 64, 0, 237, 854, 112, 0},
    {"gemm_kernel<3,0,4,1,2,1>", 64, 0, 471, 1114, 120, 0},
    {"gemm_kernel<3,0,4,2,4,1>", 64, 0, 459, 1104, 120, 0},
    {"gemm_kernel<3,1,4,1,2,1>", 64, 0, 469, 1124, 120, 0},
    {"gemm_kernel<3,1,4,2,4,1>", 64, 0, 461, 1111, 120, 0},
    {"k_delta_scan<0>", 288, 0, 2462, 5539, 248, 0},
    {"k_delta_scan<1>", 288, 0, 2525, 5787, 248, 0},
    {"k_delta_scan<2>", 48, 0, 157, 405, 184, 0},
    {"k_gemv_down<1>", 8, 8, 221, 804, 104, 4096},
    {"k_gemv_down<1>", 8, 4, 455, 1060, 104, 2176},
    {"k_gemv_down<1>", 16, 4, 871, 1948, 104, 2304},
    {"k_gemv_down<1>", 8, 8, 55, 209, 104, 4096},
    {"k_gemv_down<1>", 8, 4, 322, 822, 104, 2176},
    {"k_gemv_down<1>", 8, 4, 261, 370, 104, 2176},
    {"k_gemv_down<1>", 8, 4, 136, 206, 104, 2176},
    {"k_gemv_down<1>", 16, 4, 512, 882, 104, 2304},
    {"k_gemv_down<2>", 16, 8, 325, 994, 120, 4096},
    {"k_gemv_down<2>", 16, 4, 566, 1304, 120, 2176},
    {"k_gemv_down<2>", 32, 4, 1118, 2571, 120, 2304},
    {"k_gemv_down<2>", 16, 8, 67, 221, 120, 4096},
    {"k_gemv_down<2>", 16, 4, 455, 1088, 120, 2176},
    {"k_gemv_down<2>", 16, 4, 278, 398, 120, 2176},
    {"k_gemv_down<2>", 16, 4, 178, 329, 120, 2176},
    {"k_gemv_down<2>", 32, 4, 566, 1117, 120, 2304},
    {"k_gemv_glu<1>", 8, 8, 57, 211, 80, 4096},
    {"k_gemv_glu<1>", 8, 4, 273, 501, 80, 2176},
    {"k_gemv_glu<1>", 8, 4, 149, 288, 80, 2176},
    {"k_gemv_glu<1>", 16, 4, 508, 816, 80, 2304},
    {"k_gemv_glu<2>", 16, 8, 72, 223, 128, 4096},
    {"k_gemv_glu<2>", 16, 4, 278, 396, 120, 2176},
    {"k_gemv_glu<2>", 16, 4, 178, 321, 120, 2176},
    {"k_gemv_glu<2>", 32, 4, 557, 1034, 128, 2304},
    {"k_gemv_linear<1,0,0>", 8, 8, 57, 211, 96, 4096},
    {"k_gemv_linear<1,0,0>", 8, 4, 261, 398, 96, 2176},
    {"k_gemv_linear<1,0,0>", 8, 4, 136, 206, 96, 2176},
    {"k_gemv_linear<1,0,0>", 16, 4, 500, 715, 96, 2304},
    {"k_gemv_linear<1,0,1>", 8, 8, 55, 209, 96, 4096},
    {"k_gemv_linear<1,0,1>", 8, 4, 261, 366, 96, 2176},
    {"k_gemv_linear<1,0,1>", 8, 4, 141, 237, 96, 2176},
    {"k_gemv_linear<1,0,1>", 16, 4, 525, 944, 96, 2304},
    {"k_gemv_linear<1,1,0>", 8, 8, 51, 209, 128, 4096},
    {"k_gemv_linear<1,1,0>", 8, 4, 259, 385, 120, 2176},
    {"k_gemv_linear<1,1,0>", 8, 4, 134, 198, 120, 2176},
    {"k_gemv_linear<1,1,0>", 16, 4, 508, 797, 128, 2304},
    {"k_gemv_linear<2,0,0>", 16, 8, 72, 222, 120, 4096},
    {"k_gemv_linear<2,0,0>", 16, 4, 278, 418, 120, 2176},
    {"k_gemv_linear<2,0,0>", 16, 4, 169, 234, 120, 2176},
    {"k_gemv_linear<2,0,0>", 32, 4, 533, 804, 120, 2304},
    {"k_gemv_linear<2,0,1>", 16, 8, 72, 222, 120, 4096},
    {"k_gemv_linear<2,0,1>", 16, 4, 278, 420, 120, 2176},
    {"k_gemv_linear<2,0,1>", 16, 4, 178, 324, 120, 2176},
    {"k_gemv_linear<2,0,1>", 32, 4, 566, 1028, 120, 2304},
    {"k_gemv_linear<1,0,2>", 8, 8, 55, 209, 104, 4096},
    {"k_gemv_linear<1,0,2>", 8, 4, 261, 368, 104, 2176},
    {"k_gemv_linear<1,0,2>", 8, 4, 145, 236, 104, 2176},
    {"k_gemv_linear<1,0,2>", 16, 4, 517, 833, 104, 2304},
    {"k_gemv_linear<1,1,2>", 8, 8, 51, 209, 120, 4096},
    {"k_gemv_linear<1,1,2>", 8, 4, 259, 373, 120, 2176},
    {"k_gemv_linear<1,1,2>", 8, 4, 136, 210, 120, 2176},
    {"k_gemv_linear<1,1,2>", 16, 4, 508, 792, 120, 2304},
    {"k_gemv_linear<2,0,2>", 16, 8, 67, 221, 120, 4096},
    {"k_gemv_linear<2,0,2>", 16, 4, 278, 423, 120, 2176},
    {"k_gemv_linear<2,0,2>", 16, 4, 178, 325, 120, 2176},
    {"k_gemv_linear<2,0,2>", 32, 4, 533, 847, 120, 2304},
    {"k_mla_query<1>", 8, 8, 51, 209, 96, 4096},
    {"k_mla_query<1>", 8, 4, 259, 392, 96, 2176},
    {"k_mla_query<1>", 8, 4, 134, 203, 96, 2176},
    {"k_mla_query<1>", 16, 4, 496, 723, 96, 2304},
    {"k_mla_query<2>", 16, 8, 63, 221, 120, 4096},
    {"k_mla_query<2>", 16, 4, 273, 461, 120, 2176},
    {"k_mla_query<2>", 16, 4, 165, 219, 120, 2176},
    {"k_mla_query<2>", 32, 4, 524, 823, 120, 2304},
    {"k_mla_value<1>", 4, 4, 858, 2744, 104, 2048},
    {"k_mla_value<1>", 4, 2, 940, 2800, 104, 1088},
    {"k_mla_value<1>", 4, 2, 882, 2711, 104, 1088},
    {"k_mla_value<1>", 4, 1, 958, 2764, 104, 576},
    {"k_mla_value<2>", 8, 4, 942, 2906, 112, 2048},
    {"k_mla_value<2>", 8, 2, 972, 2909, 112, 1088},
    {"k_mla_value<2>", 8, 2, 922, 2780, 112, 1088},
    {"k_mla_value<2>", 8, 1, 1022, 2937, 112, 576},
    {"k_mma_rate", 32, 0, 43, 228, 48, 0},
    {"k_mma_rate", 8, 0, 18, 84, 48, 0},
    {"k_route_logits", 24, 0, 249, 675, 112, 0},
};

/* The kernels of one layer in decode, each once, and limits to the bytes of their code: today's and 3 %. */
static const struct sass_layer {
    const char *name;
    int limit[2];            /* of sm_120f, of sm_90 */
    const char *kernels[12]; /* ended by NULL */
} sass_layers[] = {
    {"GQA",
     {281000, 312500},
     {"k_gemv_linear<1,1,0>", "attn_gqa_decode<128,128,1,0>", "k_gemv_linear<1,0,0>", "k_route_decode<1,1>",
      "k_gemv_glu<1>", "k_gemv_down<1>"}},
    {"MLA",
     {423000, 440000},
     {"k_gemv_linear<1,1,0>", "k_mla_query<1>", "attn_mla_kernel<512,64,1,1,0>", "k_mla_value<1>",
      "k_gemv_linear<1,0,0>", "k_route_decode<1,1>", "k_gemv_glu<1>", "k_gemv_down<1>"}},
    {"one KV head",
     {530500, 556500},
     {"k_hc_mix", "k_hc_norm<4>", "k_gemv_linear<1,0,0>", "k_gemv_linear<1,1,0>", "k_csa_store",
      "attn_mla_kernel<512,0,1,1,2>", "k_gemv_linear<1,0,1>", "k_route_decode<1,0>", "k_gemv_glu<1>",
      "k_gemv_down<1>"}},
    {"gated delta net",
     {246500, 282500},
     {"k_gemv_linear<1,1,0>", "k_delta_decode<0>", "k_gemv_linear<1,0,0>", "k_route_decode<1,1>", "k_gemv_glu<1>",
      "k_gemv_down<1>"}},
    {"Kimi delta attention",
     {247500, 286000},
     {"k_gemv_linear<1,1,2>", "k_delta_decode<1>", "k_gemv_linear<1,0,0>", "k_route_decode<1,1>", "k_gemv_glu<1>",
      "k_gemv_down<1>"}},
};
enum { SASS_LAYERS = sizeof sass_layers / sizeof *sass_layers };

/* The images: those of moe_cuda.o whose machine code nvcc leaves. */
static const struct sass_target {
    const char *chip, *files; /* as nvcc's log names it; a pattern: the name depends on the release */
    const struct sass_budget *budgets;
    int n_budget;
} sass_targets[] = {{"sm_120f", "build/nvcc/moe_cuda*_120f*.cubin", sass_sm120, sizeof sass_sm120 / sizeof *sass_sm120},
                    {"sm_90", "build/nvcc/moe_cuda*_90*.cubin", sass_sm90, sizeof sass_sm90 / sizeof *sass_sm90}};
enum { SASS_SM120, SASS_SM90, SASS_TARGETS };

/* ---- ELF ---- */

/* Checks the table of sections, and that their bytes are in the file. */
static int elf_open(struct elf_file *f, const uint8_t *data, size_t size, char *err) {
    Elf64_Ehdr h;
    *f = (struct elf_file){.data = data, .size = size};
    if (size < sizeof h || size > INT_MAX || memcmp(data, ELFMAG, SELFMAG) || data[EI_CLASS] != ELFCLASS64)
        return fail(err, "not a 64-bit ELF file");
    memcpy(&h, data, sizeof h);
    if (h.e_shentsize != sizeof *f->sections || h.e_shoff > size || h.e_shstrndx >= h.e_shnum ||
        h.e_shnum > (size - h.e_shoff) / sizeof *f->sections)
        return fail(err, "the table of sections is not in the file");
    f->n_section = h.e_shnum, f->names = h.e_shstrndx;
    f->sections = xcalloc(h.e_shnum, sizeof *f->sections);
    memcpy(f->sections, data + h.e_shoff, h.e_shnum * sizeof *f->sections);
    for (int i = 0; i < f->n_section; i++) {
        const Elf64_Shdr *s = &f->sections[i];
        if (s->sh_type == SHT_NOBITS) f->sections[i].sh_size = 0;
        else if (s->sh_offset > size || s->sh_size > size - s->sh_offset)
            return fail(err, "section %d is not in the file", i);
    }
    return 0;
}

/* Returns the string at byte `at` of a section, NULL if there is none. */
static const char *elf_string(const struct elf_file *f, uint32_t section, uint64_t at) {
    if (section >= (uint32_t)f->n_section || at >= f->sections[section].sh_size) return NULL;
    const uint64_t left = f->sections[section].sh_size - at;
    const char *s = (const char *)f->data + f->sections[section].sh_offset + at;
    return memchr(s, 0, left) ? s : NULL;
}

/* Returns the section of this name, its bytes and how many there are; NULL: there is none. */
static const uint8_t *elf_find(const struct elf_file *f, const char *name, size_t *n) {
    for (int i = 0; i < f->n_section; i++) {
        const char *s = elf_string(f, (uint32_t)f->names, f->sections[i].sh_name);
        if (!s || strcmp(s, name)) continue;
        *n = f->sections[i].sh_size;
        return f->data + f->sections[i].sh_offset;
    }
    return NULL;
}

/* ---- instructions ---- */

static struct insn insn_at(const struct sass_kernel *k, int i) {
    struct insn x;
    memcpy(&x, k->code + (size_t)i * sizeof x, sizeof x);
    return x;
}

static enum operation insn_operation(struct insn x) { return (enum operation)(x.lo & 0x1ff); }

static bool insn_always(struct insn x) { return (x.lo >> 12 & 15) == 7; }

/* Returns the instruction that a branch goes to; -1: it is no branch, or leaves the kernel. */
static int insn_target(const struct sass_kernel *k, int i) {
    const struct insn x = insn_at(k, i);
    if (insn_operation(x) != OP_BRA) return -1;
    const int64_t high = (int64_t)((x.lo >> 34 | x.hi << 30) << 16) >> 8; /* bits 34..81, times 256 */
    const int64_t to = 16 * (int64_t)(i + 1) + 4 * (high | (int64_t)(x.lo >> 16 & 0xff));
    return to >= 0 && to < 16 * (int64_t)k->n && to % 16 == 0 ? (int)(to / 16) : -1;
}

/* Whether the next instruction is never run after this one. */
static bool insn_ends(struct insn x) {
    const enum operation o = insn_operation(x);
    const bool leaves = o == OP_EXIT || o == OP_RET || (x.lo & 0xfff) == (OP_BRA | 4 << 9);
    return leaves && insn_always(x) && (x.hi >> 23 & 31) == 7;
}

static bool insn_product(struct insn x) {
    const enum operation o = insn_operation(x);
    return o == OP_HMMA || o == OP_QMMA || o == OP_OMMA;
}

static bool insn_streamed(struct insn x) {
    return insn_operation(x) == OP_LDG && (x.hi >> 9 & 7) == 6 && (x.hi >> 20 & 7) == 5;
}

/* Whether an instruction may change global memory: stores and atomics, also by generic address. */
static bool insn_stores(struct insn x) {
    switch (insn_operation(x)) {
    case OP_ST:
    case OP_STG:
    case OP_ATOM:
    case OP_ATOM_CAS:
    case OP_RED:
    case OP_ATOM_HALF:
    case OP_ATOMG_HALF:
    case OP_RED_VECTOR:
    case OP_ATOMG:
    case OP_ATOMG_CAS:
    case OP_UTMASTG:
    case OP_UTMAREDG:
    case OP_UBLKRED: return true;
    case OP_UBLKCP: return x.hi >> 10 & 1;
    default: return false;
    }
}

/* Whether the ALU pipe runs an instruction: logic, shifts, comparisons, sums of integers. */
static bool insn_alu(struct insn x, bool sm120) {
    switch (insn_operation(x)) {
    case OP_MOV:
    case OP_SEL:
    case OP_FSEL:
    case OP_FMNMX:
    case OP_FSETP:
    case OP_ISETP:
    case OP_IADD3:
    case OP_LEA:
    case OP_LOP3:
    case OP_IABS:
    case OP_PRMT:
    case OP_IMNMX:
    case OP_SHF:
    case OP_PLOP3:
    case OP_F2FP:
    case OP_VIMNMX: return true;
    case OP_IADD: return sm120;
    case OP_VIADD:
    case OP_VIADDMNMX: return !sm120;
    default: return false;
    }
}

/* Whether only the wide half of the FMA pipe runs an instruction: products of integers, and halves. */
static bool insn_fma(struct insn x, bool sm120) {
    switch (insn_operation(x)) {
    case OP_IMAD:
    case OP_IMAD_WIDE:
    case OP_IMAD_HI:
    case OP_HADD2:
    case OP_HFMA2:
    case OP_HMUL2: return true;
    case OP_IADD: return !sm120;
    default: return false;
    }
}

/* ---- loops ---- */

/* Whether instruction `last` can be reached from `first` without leaving the range between them. A branch back from
 * code that the compiler moved after a loop is no loop: its target does not lead to it within that range. */
static bool sass_reaches(const struct sass_kernel *k, int first, int last) {
    bool *seen = xcalloc((size_t)(last - first) + 1, sizeof *seen), more = true;
    seen[0] = true;
    while (more) {
        more = false;
        for (int i = first; i < last; i++) {
            if (!seen[i - first]) continue;
            const int to = insn_target(k, i);
            if (!insn_ends(insn_at(k, i))) seen[i + 1 - first] = true;
            if (to < first || to > last || seen[to - first]) continue;
            seen[to - first] = true;
            more |= to < i;
        }
    }
    const bool reaches = seen[last - first];
    free(seen);
    return reaches;
}

/* Appends a kernel's loops (stb): for each instruction that some later one goes back to, up to the last of them. */
static void sass_find_loops(const struct sass_kernel *k, struct sass_loop **loops) {
    for (int i = 0; i < k->n; i++) {
        const int to = insn_target(k, i);
        if (to < 0 || to > i || !sass_reaches(k, to, i)) continue;
        size_t at = 0;
        while (at < arrlenu(*loops) && (*loops)[at].first != to) at++;
        if (at == arrlenu(*loops)) arrput(*loops, ((struct sass_loop){.first = to}));
        (*loops)[at].last = i;
    }
}

/* Counts what is in a loop. The ALU and the wide half of FMA take a warp in 2 clocks. */
static void sass_count(struct sass_loop *l, const struct sass_kernel *k, bool sm120) {
    for (int i = l->first; i <= l->last; i++) {
        const struct insn x = insn_at(k, i);
        const enum operation o = insn_operation(x);
        l->n++;
        l->stall += (int)(x.hi >> 41 & 15);
        l->products += insn_product(x);
        l->streamed += insn_streamed(x);
        l->shared += o == OP_LDS || o == OP_LDSM;
        l->barriers += o == OP_BAR;
        l->alu += 2 * insn_alu(x, sm120);
        l->fma += 2 * insn_fma(x, sm120);
    }
}

static bool sass_hot(const struct sass_loop *l) { return l->products || l->streamed; }

/* Finds a kernel's hot loops: those with no hot loop in them. */
static void sass_hot_loops(struct sass_kernel *k, bool sm120) {
    struct sass_loop *all = NULL;
    sass_find_loops(k, &all);
    for (size_t i = 0; i < arrlenu(all); i++) sass_count(&all[i], k, sm120);
    for (size_t i = 0; i < arrlenu(all); i++) {
        int hot = 0;
        for (size_t j = 0; j < arrlenu(all); j++) {
            if (i == j || all[j].first < all[i].first || all[j].last > all[i].last) continue;
            if (sass_hot(&all[j])) hot++;
            else all[i].inner++;
        }
        if (sass_hot(&all[i]) && !hot) arrput(k->loops, all[i]);
    }
    arrfree(all);
}

/* ---- images ---- */

/* Writes a mangled name for people: the function, and its template arguments if all are numbers. */
static void sass_name(char *out, size_t size, const char *mangled) {
    char args[96] = "", *p = NULL;
    size_t at = 0;
    snprintf(out, size, "%s", mangled);
    const size_t n = strncmp(mangled, "_Z", 2) ? 0 : strtoul(mangled + 2, &p, 10);
    const char *function = p;
    if (!n || strlen(function) < n) return;
    for (p += n + (p[n] == 'I'); *p == 'L'; p++) { /* L, a type (a letter or a length and a name), a number, E */
        size_t type = 1;
        if (isdigit((unsigned char)p[1])) type = strtoul(p + 1, &p, 10);
        else p++;
        if (strlen(p) < type) return;
        p += type;
        const bool minus = *p == 'n';
        const long value = strtol(p + minus, &p, 10);
        if (*p != 'E' || at + 24 > sizeof args) return;
        at += (size_t)snprintf(args + at, sizeof args - at, "%s%s%ld", at ? "," : "", minus ? "-" : "", value);
    }
    if (function[n] == 'I' && *p != 'E') return;
    snprintf(out, size, at ? "%.*s<%s>" : "%.*s", (int)n, function, args);
}

/* An attribute of a kernel or of the file. */
struct sass_attribute {
    int kind;
    size_t size;
    const uint8_t *value;
};

/* Takes the next attribute off n bytes of a section .nv.info; false: there is none. In front of a value are a byte of
 * format, one of kind and two that are the value's size if the format is 4, or else the value. */
static bool sass_next(const uint8_t **p, size_t *n, struct sass_attribute *a) {
    if (*n < 4) return false;
    *a = (struct sass_attribute){.kind = (*p)[1], .value = *p + 4};
    if (**p == 4) a->size = (size_t)((*p)[2] | (*p)[3] << 8);
    if (a->size > *n - 4) return false;
    *p += 4 + a->size, *n -= 4 + a->size;
    return true;
}

/* Finds the registers of all kernels: attributes 0x2f of the file are a symbol and its registers. */
static void sass_registers(struct sass_image *m) {
    struct sass_attribute a;
    size_t n = 0;
    const uint8_t *p = elf_find(&m->elf, ".nv.info", &n);
    while (p && sass_next(&p, &n, &a)) {
        uint32_t v[2];
        if (a.kind != 0x2f || a.size != sizeof v) continue;
        memcpy(v, a.value, sizeof v);
        for (size_t i = 0; i < arrlenu(m->kernels); i++)
            if ((uint32_t)m->kernels[i].symbol == v[0]) m->kernels[i].registers = (int)(v[1] & 0xff);
    }
}

/* Finds the threads of a kernel's block: its attribute 0x05 has how many it may have in three dimensions. */
static void sass_threads(const struct sass_image *m, struct sass_kernel *k) {
    struct sass_attribute a;
    char name[256];
    size_t n = 0;
    snprintf(name, sizeof name, ".nv.info.%s", k->mangled);
    const uint8_t *p = elf_find(&m->elf, name, &n);
    while (p && sass_next(&p, &n, &a)) {
        uint32_t v[3];
        if (a.kind != 0x05 || a.size != sizeof v) continue;
        memcpy(v, a.value, sizeof v);
        const uint64_t threads = (uint64_t)(v[0] & 0xffff) * (v[1] & 0xffff) * (v[2] & 0xffff);
        if (threads <= 1024) k->threads = (int)threads;
    }
}

static int sass_by_name(const void *a, const void *b) {
    return strverscmp(((const struct sass_kernel *)a)->name, ((const struct sass_kernel *)b)->name);
}

/* Appends the kernels: functions of the symbol table with the mark of an entry. */
static void sass_find_kernels(struct sass_image *m) {
    enum { ENTRY = 0x10 }; /* STO_CUDA_ENTRY in st_other */
    const struct elf_file *f = &m->elf;
    for (int i = 0; i < f->n_section; i++) {
        const Elf64_Shdr *table = &f->sections[i];
        if (table->sh_type != SHT_SYMTAB) continue;
        for (size_t s = 0; s < table->sh_size / sizeof(Elf64_Sym); s++) {
            Elf64_Sym sym;
            memcpy(&sym, f->data + table->sh_offset + s * sizeof sym, sizeof sym);
            const char *name = elf_string(f, table->sh_link, sym.st_name);
            if (ELF64_ST_TYPE(sym.st_info) != STT_FUNC || !(sym.st_other & ENTRY) || !name) continue;
            if (sym.st_shndx >= f->n_section) continue;
            const Elf64_Shdr *text = &f->sections[sym.st_shndx];
            struct sass_kernel k = {.mangled = name, .code = f->data + text->sh_offset, .symbol = (int)s};
            k.n = (int)(text->sh_size / sizeof(struct insn));
            sass_name(k.name, sizeof k.name, name);
            arrput(m->kernels, k);
        }
    }
}

/* Copies the compiler's release, "13.0", from the note with its name and options. */
static void sass_find_release(struct sass_image *m) {
    static const char before[] = "release ";
    size_t n = 0, at = 0;
    const uint8_t *note = elf_find(&m->elf, ".note.nv.tkinfo", &n);
    for (size_t i = 0; note && i + sizeof before < n; i++) {
        if (memcmp(note + i, before, sizeof before - 1)) continue;
        for (i += sizeof before - 1; i < n && at + 1 < sizeof m->release && strchr("0123456789.", note[i]); i++)
            m->release[at++] = (char)note[i];
        return;
    }
}

static void sass_close(struct sass_image *m) {
    for (size_t i = 0; i < arrlenu(m->kernels); i++) arrfree(m->kernels[i].loops);
    arrfree(m->kernels);
    arrfree(m->file);
    free(m->elf.sections);
}

/* Reads a cubin. Its bytes must stay; sass_close is due in either case. */
static int sass_read(struct sass_image *m, const uint8_t *data, size_t size, bool sm120, char *err) {
    if (elf_open(&m->elf, data, size, err)) return -1;
    sass_find_kernels(m);
    sass_find_release(m);
    sass_registers(m);
    for (size_t i = 0; i < arrlenu(m->kernels); i++) {
        sass_threads(m, &m->kernels[i]);
        sass_hot_loops(&m->kernels[i], sm120);
    }
    if (!arrlenu(m->kernels)) return fail(err, "there are no kernels in the file");
    qsort(m->kernels, arrlenu(m->kernels), sizeof *m->kernels, sass_by_name);
    return 0;
}

/* Finds and reads the cubin of a target. 1: there is none here, and err says why. */
static int sass_load(struct sass_image *m, const struct sass_target *t, char *err) {
    char *log = NULL, chip[32];
    glob_t found = {0};
    *m = (struct sass_image){0};
    if (read_file("build/nvcc/log", &log, err)) return fail(err, "the kernels were not compiled here: no nvcc"), 1;
    snprintf(chip, sizeof chip, "'%s'", t->chip);
    const bool compiled = strstr(sb_cstr(&log), chip) != NULL;
    arrfree(log);
    if (!compiled) return fail(err, "nvcc is too old for %s", t->chip), 1;
    glob(t->files, 0, NULL, &found);
    int rc = -1;
    if (found.gl_pathc != 1) fail(err, "%zu files are %s: remove build/nvcc and make", found.gl_pathc, t->files);
    else rc = read_file(found.gl_pathv[0], &m->file, err);
    globfree(&found);
    if (rc) return -1;
    return sass_read(m, (const uint8_t *)m->file, arrlenu(m->file), t == &sass_targets[SASS_SM120], err);
}

/* ---- checks: each appends a line to *said for every failure and returns how many there are ---- */

__attribute__((format(printf, 2, 3))) static int sass_fail(char **said, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    sb_vprintf(said, fmt, ap);
    va_end(ap);
    sb_puts(said, "\n");
    return 1;
}

/* Formats of weights: bytes of scales beside 512 bytes of codes, which a warp loads at once, and bytes of 16 weights. */
static const struct sass_format {
    const char *name;
    int scales, of_16;
} sass_formats[] = {{"FP4", 64, 9}, {"Q8", 32, 17}, {"F16", 0, 32}};

/* Returns the format of the weights that a loop streams; NULL: it streams none, or the bytes fit no format. */
static const struct sass_format *sass_format_of(int streamed, int bytes) {
    for (size_t i = 0; streamed && i < sizeof sass_formats / sizeof *sass_formats; i++)
        if (bytes == streamed * (512 + sass_formats[i].scales)) return &sass_formats[i];
    return NULL;
}

/* Returns the line of a loop, the first of its kernel and numbers that is not taken; -1: there is none. */
static int sass_budget_of(const struct sass_budget *b, int n, const bool *taken, const struct sass_kernel *k,
                          const struct sass_loop *l) {
    for (int i = 0; i < n; i++)
        if (!taken[i] && !strcmp(b[i].kernel, k->name) && b[i].products == l->products && b[i].streamed == l->streamed)
            return i;
    return -1;
}

/* Returns a number with a slack of 3 %, rounded up, and registers rounded up to what a block is given. */
static int sass_slack(int n) { return (103 * n + 99) / 100; }
static int sass_register_slack(int n) { return int_min((n + 7) / 8 * 8, 255); }

/* Every hot loop has a line and is within it; every line has a loop. */
static int sass_check_loops(const struct sass_image *m, const struct sass_budget *budgets, int n, char **said) {
    bool *taken = xcalloc((size_t)n + 1, sizeof *taken);
    int failed = 0;
    for (size_t i = 0; i < arrlenu(m->kernels); i++) {
        const struct sass_kernel *k = &m->kernels[i];
        for (size_t j = 0; j < arrlenu(k->loops); j++) {
            const struct sass_loop *l = &k->loops[j];
            const int at = sass_budget_of(budgets, n, taken, k, l);
            if (at < 0) {
                failed += sass_fail(said, "%s has a loop without a budget; add {\"%s\", %d, %d, %d, %d, %d, BYTES},",
                                    k->name, k->name, l->products, l->streamed, sass_slack(l->n), sass_slack(l->stall),
                                    sass_register_slack(k->registers));
                continue;
            }
            const struct sass_budget *b = &budgets[at];
            taken[at] = true;
            if (l->n > b->n || l->stall > b->stall || k->registers > b->registers || !k->registers)
                failed += sass_fail(said,
                                    "%s, %d products, %d streamed loads: %d instructions (at most %d), %d clocks of "
                                    "stalls (at most %d), %d registers (at most %d)",
                                    k->name, l->products, l->streamed, l->n, b->n, l->stall, b->stall, k->registers,
                                    b->registers);
            if (l->streamed && !sass_format_of(l->streamed, b->bytes))
                failed += sass_fail(said, "%s: %d streamed loads and %d bytes are of no format of weights", k->name,
                                    l->streamed, b->bytes);
        }
    }
    for (int i = 0; i < n; i++)
        if (!taken[i])
            failed += sass_fail(said, "%s has no loop of %d products and %d streamed loads, but a budget for one",
                                budgets[i].kernel, budgets[i].products, budgets[i].streamed);
    free(taken);
    return failed;
}

/* Every kernel waits for those in front of it, and changes global memory only after that, in the order of addresses. */
static int sass_check_waits(const struct sass_image *m, char **said) {
    int failed = 0;
    for (size_t i = 0; i < arrlenu(m->kernels); i++) {
        const struct sass_kernel *k = &m->kernels[i];
        int wait = 0, store = 0;
        while (wait < k->n && insn_operation(insn_at(k, wait)) != OP_ACQBULK) wait++;
        while (store < wait && !insn_stores(insn_at(k, store))) store++;
        if (wait == k->n) failed += sass_fail(said, "%s never waits for the kernels in front of it", k->name);
        else if (store < wait)
            failed += sass_fail(said, "%s changes global memory at 0x%x, before it waits at 0x%x", k->name,
                                16 * (unsigned)store, 16 * (unsigned)wait);
    }
    return failed;
}

/* k_gemv_glu lets k_gemv_down start only after its own wait, in the order of addresses: k_gemv_down reads what the router
 * wrote before it waits itself. */
static int sass_check_launches(const struct sass_image *m, char **said) {
    int failed = 0, launches = 0;
    for (size_t i = 0; i < arrlenu(m->kernels); i++) {
        const struct sass_kernel *k = &m->kernels[i];
        bool waited = false;
        for (int at = 0; at < k->n && !strncmp(k->name, "k_gemv_glu", 10); at++) {
            const enum operation op = insn_operation(insn_at(k, at));
            launches += op == OP_PREEXIT;
            if (op == OP_PREEXIT && !waited)
                failed += sass_fail(said, "%s lets the next kernel start at 0x%x, before it waits", k->name,
                                    16 * (unsigned)at);
            if (op == OP_PREEXIT || op == OP_ACQBULK) waited = op == OP_ACQBULK;
        }
    }
    if (!launches) failed += sass_fail(said, "no k_gemv_glu lets the next kernel start");
    return failed;
}

/* Returns the kernel of this name, NULL if there is none. */
static const struct sass_kernel *sass_find(const struct sass_image *m, const char *name) {
    for (size_t i = 0; i < arrlenu(m->kernels); i++)
        if (!strcmp(m->kernels[i].name, name)) return &m->kernels[i];
    return NULL;
}

static int sass_code_bytes(const struct sass_kernel *k) { return k ? k->n * (int)sizeof(struct insn) : 0; }

/* No layer has more code than its limit. */
static int sass_check_layers(const struct sass_image *m, const struct sass_layer *layers, int n, int target,
                             char **said) {
    int failed = 0;
    for (int i = 0; i < n; i++) {
        int sum = 0;
        for (const char *const *name = layers[i].kernels; *name; name++) {
            const struct sass_kernel *k = sass_find(m, *name);
            if (!k) failed += sass_fail(said, "%s: there is no kernel %s", layers[i].name, *name);
            sum += sass_code_bytes(k);
        }
        if (sum > layers[i].limit[target])
            failed += sass_fail(said, "%s: %d bytes of code in a layer (at most %d)", layers[i].name, sum,
                                layers[i].limit[target]);
    }
    return failed;
}

/* Waits are checked in the code of any compiler, budgets in that of the one that they are of. */
static void test_sass_image(int target) {
    const struct sass_target *t = &sass_targets[target];
    struct sass_image m;
    char *said = NULL, err[ERR_MAX], reason[ERR_MAX] = "";
    const int rc = sass_load(&m, t, err);
    CHECK(rc >= 0, "%s: %s", t->chip, err);
    if (rc > 0) snprintf(reason, sizeof reason, "%s", err);
    if (!rc) {
        int failed = sass_check_waits(&m, &said) + sass_check_launches(&m, &said);
        if (strcmp(m.release, SASS_RELEASE)) {
            snprintf(reason, sizeof reason, "budgets are of nvcc " SASS_RELEASE ", these kernels of nvcc %s",
                     m.release[0] ? m.release : "unknown");
        } else {
            failed += sass_check_loops(&m, t->budgets, t->n_budget, &said);
            failed += sass_check_layers(&m, sass_layers, SASS_LAYERS, target, &said);
        }
        CHECK(!failed, "%s:\n%s", t->chip, sb_cstr(&said));
    }
    arrfree(said);
    sass_close(&m);
    if (reason[0]) SKIP("%s", reason);
}

static void test_sass_sm120(void) { test_sass_image(SASS_SM120); }
static void test_sass_sm90(void) { test_sass_image(SASS_SM90); }

/* ---- tables: build/test_cuda --sass ---- */

/* Returns how many blocks of a kernel the registers of an SM hold: 16,384 in each quarter, which a warp gets by 256; 0:
 * unknown. */
static int sass_blocks(const struct sass_kernel *k) {
    if (!k->registers || !k->threads) return 0;
    const int warps = 4 * (16384 / (32 * ((k->registers + 7) / 8 * 8)));
    return warps / ((k->threads + 31) / 32);
}

static void sass_cell(int n) {
    if (n) printf(" %d |", n);
    else printf(" |");
}

/* Prints the row of a loop. The last number is the bytes that an SM reads per clock if nothing but the four ports of
 * instructions and the ALU and FMA pipes limits it. */
static void sass_row(const struct sass_kernel *k, const struct sass_loop *l, int bytes) {
    const struct sass_format *f = sass_format_of(l->streamed, bytes);
    const int clocks = int_max(l->n, int_max(l->alu, l->fma));
    printf("| `%s` | %s |", k->name, f ? f->name : "");
    sass_cell(k->registers), sass_cell(sass_blocks(k));
    sass_cell(l->n), sass_cell(l->inner), sass_cell(l->stall), sass_cell(l->products), sass_cell(l->streamed);
    sass_cell(bytes);
    if (f) printf(" %.2f |", (double)(l->n * f->of_16) / bytes);
    else printf(" |");
    sass_cell(l->shared), sass_cell(l->barriers), sass_cell(l->alu), sass_cell(l->fma);
    if (bytes) printf(" %.1f |\n", 4.0 * bytes / clocks);
    else printf(" |\n");
}

static void sass_print_loops(const struct sass_image *m, const struct sass_target *t) {
    bool *taken = xcalloc((size_t)t->n_budget, sizeof *taken);
    printf("## Hot loops of %s (nvcc %s)\n\n"
           "Of a warp and an iteration; inner loops are counted as if they ran once. Stalls, ALU and FMA are clocks. "
           "Registers alone allow so many blocks. B/clk/SM is the most that instructions and pipes allow.\n\n"
           "| kernel | weights | registers | blocks/SM | instructions | inner loops | stalls | products | streamed | "
           "bytes | per 16 weights | LDS | barriers | ALU | FMA | B/clk/SM |\n"
           "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
           t->chip, m->release);
    for (size_t i = 0; i < arrlenu(m->kernels); i++) {
        const struct sass_kernel *k = &m->kernels[i];
        for (size_t j = 0; j < arrlenu(k->loops); j++) {
            const int at = sass_budget_of(t->budgets, t->n_budget, taken, k, &k->loops[j]);
            if (at >= 0) taken[at] = true;
            sass_row(k, &k->loops[j], at < 0 ? 0 : t->budgets[at].bytes);
        }
    }
    free(taken);
}

static void sass_print_layers(const struct sass_image *m, int target) {
    printf("\n## Code of a decode layer, %s\n\n| layer | kernel | bytes |\n|---|---|--:|\n", sass_targets[target].chip);
    for (const struct sass_layer *layer = sass_layers; layer < sass_layers + SASS_LAYERS; layer++) {
        int sum = 0;
        for (const char *const *name = layer->kernels; *name; name++) {
            const int bytes = sass_code_bytes(sass_find(m, *name));
            printf("| %s | `%s` | %d |\n", layer->name, *name, bytes);
            sum += bytes;
        }
        printf("| %s | all, at most %d | %d |\n", layer->name, layer->limit[target], sum);
    }
}

/* Prints what the kernels cost, in Markdown. Exit code: 1 without any cubin. */
static int sass_print(void) {
    int found = 0;
    for (int i = 0; i < SASS_TARGETS; i++) {
        struct sass_image m;
        char err[ERR_MAX];
        if (sass_load(&m, &sass_targets[i], err)) {
            fprintf(stderr, "%s: %s\n", sass_targets[i].chip, err);
        } else {
            if (found++) puts("");
            sass_print_loops(&m, &sass_targets[i]);
            sass_print_layers(&m, i);
        }
        sass_close(&m);
    }
    return !found;
}

/* ---- the checks themselves ---- */

/* Makes the line of each hot loop of an image (stb), without slack. */
static struct sass_budget *sass_exact(const struct sass_image *m) {
    struct sass_budget *b = NULL;
    for (size_t i = 0; i < arrlenu(m->kernels); i++)
        for (size_t j = 0; j < arrlenu(m->kernels[i].loops); j++) {
            const struct sass_kernel *k = &m->kernels[i];
            const struct sass_loop *l = &k->loops[j];
            arrput(b, ((struct sass_budget){k->name, l->products, l->streamed, l->n, l->stall, k->registers,
                                            512 * l->streamed}));
        }
    return b;
}

/* So many budgets fail, and `want` is said about them. */
static void gate_loops(const struct sass_image *m, const struct sass_budget *b, int n_failed, const char *want) {
    char *said = NULL;
    CHECK_INT(sass_check_loops(m, b, (int)arrlenu(b), &said), n_failed, "%s", sb_cstr(&said));
    CHECK_HAS(sb_cstr(&said), want, "loops");
    arrfree(said);
}

/* Whether no other line is for a loop with the numbers of line i. */
static bool gate_single(const struct sass_budget *b, size_t i) {
    int n = 0;
    for (size_t j = 0; j < arrlenu(b); j++)
        n += !strcmp(b[j].kernel, b[i].kernel) && b[j].products == b[i].products && b[j].streamed == b[i].streamed;
    return n == 1;
}

/* A budget that is exact holds; one that is smaller, gone, or of another kernel is an error that says what to do. */
static void gate_budgets(const struct sass_image *m) {
    struct sass_budget *b = sass_exact(m);
    char want[256];
    gate_loops(m, b, 0, "");
    for (size_t i = 0; i < arrlenu(b); i++) {
        const struct sass_budget was = b[i];
        if (!gate_single(b, i)) continue;
        b[i].n--;
        snprintf(want, sizeof want, "%s, %d products, %d streamed loads: %d instructions (at most %d), ", was.kernel,
                 was.products, was.streamed, was.n, was.n - 1);
        gate_loops(m, b, 1, want);
        b[i] = was, b[i].stall--;
        snprintf(want, sizeof want, "%d clocks of stalls (at most %d)", was.stall, was.stall - 1);
        gate_loops(m, b, 1, want);
        b[i] = was, b[i].registers--;
        snprintf(want, sizeof want, "%d registers (at most %d)\n", was.registers, was.registers - 1);
        gate_loops(m, b, 1, want);
        b[i] = was, b[i].bytes++;
        if (was.streamed) gate_loops(m, b, 1, "are of no format of weights\n");
        b[i] = was, b[i].kernel = "k_gone";
        snprintf(want, sizeof want, "add {\"%s\", %d, %d, ", was.kernel, was.products, was.streamed);
        gate_loops(m, b, 2, want);
        gate_loops(m, b, 2, "k_gone has no loop of ");
        arrdel(b, i);
        gate_loops(m, b, 1, want);
        arrins(b, i, was);
    }
    arrput(b, b[0]);
    gate_loops(m, b, 1, "but a budget for one\n");
    arrfree(b);
}

static void gate_layers(const struct sass_image *m, int target) {
    struct sass_layer layer = {"a layer", {0, 0}, {"k_probe", "k_gone"}};
    char *said = NULL;
    CHECK_INT(sass_check_layers(m, &layer, 1, target, &said), 2, "%s", sb_cstr(&said));
    CHECK_HAS(sb_cstr(&said), "a layer: there is no kernel k_gone\na layer: ", "layers");
    layer.limit[target] = sass_code_bytes(sass_find(m, "k_probe")), layer.kernels[1] = NULL;
    CHECK_INT(sass_check_layers(m, &layer, 1, target, &said), 0, "%s", sb_cstr(&said));
    arrfree(said);
}

/* Changes an instruction in the file of an image. */
static void insn_put(struct sass_image *m, const struct sass_kernel *k, int i, struct insn x) {
    memcpy(m->file + (k->code - (const uint8_t *)m->file) + (size_t)i * sizeof x, &x, sizeof x);
}

/* Reads an image again, whose file was changed. */
static void gate_reread(struct sass_image *m, int target, struct sass_image *again) {
    char err[ERR_MAX];
    *again = (struct sass_image){0};
    CHECK(sass_read(again, (const uint8_t *)m->file, arrlenu(m->file), target == SASS_SM120, err) == 0, "%s", err);
}

/* As many kernels fail as n, and `want` is said about one of them. */
static void gate_wait_fails(const struct sass_image *m, int n, const char *want) {
    char *said = NULL;
    CHECK_INT(sass_check_waits(m, &said), n, "%s", sb_cstr(&said));
    CHECK_HAS(sb_cstr(&said), want, "waits");
    arrfree(said);
}

/* A store in front of the wait is an error, and so is a kernel without a wait. */
static void gate_waits(struct sass_image *m) {
    static const enum operation stores[] = {OP_ST,        OP_STG,        OP_ATOM,   OP_ATOM_CAS,  OP_RED,
                                            OP_ATOM_HALF, OP_ATOMG_HALF, OP_ATOMG,  OP_ATOMG_CAS, OP_RED_VECTOR,
                                            OP_UTMAREDG,  OP_UTMASTG,    OP_UBLKRED};
    const char *const early = "k_add_norm<0,4> changes global memory at 0x0, before it waits at 0x";
    const struct sass_kernel *k = sass_find(m, "k_add_norm<0,4>");
    if (!CHECK(k, "there is no k_add_norm<0,4>")) return;
    const struct insn first = insn_at(k, 0);
    char *said = NULL;
    const int before = sass_check_waits(m, &said);
    int last = k->n - 1;
    for (size_t i = 0; i < sizeof stores / sizeof *stores; i++) {
        insn_put(m, k, 0, (struct insn){stores[i] | 4 << 9, 0});
        gate_wait_fails(m, before + 1, early);
    }
    insn_put(m, k, 0, (struct insn){OP_UBLKCP | 1 << 9, 1 << 10}); /* to global memory */
    gate_wait_fails(m, before + 1, early);
    insn_put(m, k, 0, (struct insn){OP_UBLKCP | 1 << 9, 1 << 9}); /* to shared memory */
    gate_wait_fails(m, before, "");
    while (last > 0 && insn_operation(insn_at(k, last)) != OP_STG) last--;
    insn_put(m, k, 0, insn_at(k, last)); /* the kernel's own last store */
    gate_wait_fails(m, before + 1, early);
    insn_put(m, k, 0, first);

    struct insn *was = xmalloc((size_t)k->n * sizeof *was);
    memcpy(was, k->code, (size_t)k->n * sizeof *was);
    for (int i = 0; i < k->n; i++)
        if (insn_operation(was[i]) == OP_ACQBULK) insn_put(m, k, i, (struct insn){OP_NOP | 4 << 9 | 7 << 12, 0});
    gate_wait_fails(m, before + 1, "k_add_norm<0,4> never waits");
    for (int i = 0; i < k->n; i++) insn_put(m, k, i, was[i]);
    free(was);
    arrfree(said);
}

/* A launch before its wait, and no launch at all, are errors. */
static void gate_launches(struct sass_image *m) {
    const struct sass_kernel *k = sass_find(m, "k_gemv_glu<1>");
    int wait = 0, launch = 0;
    char *said = NULL;
    if (!CHECK(k, "there is no k_gemv_glu<1>")) return;
    while (wait < k->n && insn_operation(insn_at(k, wait)) != OP_ACQBULK) wait++;
    while (launch < k->n && insn_operation(insn_at(k, launch)) != OP_PREEXIT) launch++;
    if (!CHECK(wait < launch && launch < k->n, "a wait at %d, a launch at %d", wait, launch)) return;
    const struct insn first = insn_at(k, wait), second = insn_at(k, launch);
    insn_put(m, k, wait, second);
    insn_put(m, k, launch, first);
    CHECK_INT(sass_check_launches(m, &said), 1, "%s", sb_cstr(&said));
    CHECK_HAS(sb_cstr(&said), "k_gemv_glu<1> lets the next kernel start at 0x", "launches");
    insn_put(m, k, wait, first);
    insn_put(m, k, launch, second);
    CHECK_INT(sass_check_launches(m, &said), 0, "%s", sb_cstr(&said));
    arrfree(said);
}

/* A longer stall, a lost hint and a lost product are errors. */
static void gate_code(struct sass_image *m, int target) {
    const struct sass_kernel *k = sass_find(m, "k_gemv_glu<1>");
    if (!CHECK(k && k->loops, "k_gemv_glu<1> has no hot loop")) return;
    struct sass_budget *b = sass_exact(m);
    const struct sass_loop *l = k->loops;
    bool stalled = false;
    for (int i = l->first; i <= l->last; i++) {
        const struct insn x = insn_at(k, i);
        struct insn y = x;
        struct sass_image again;
        const bool stall = !stalled && (x.hi >> 41 & 15) < 15 && !insn_product(x) && !insn_streamed(x);
        if (stall) y.hi += 1ull << 41;
        if (insn_streamed(x)) y.hi &= ~(7ull << 20);
        if (insn_product(x)) y.lo = (x.lo & ~0xfffull) | OP_NOP | 4 << 9;
        if (!memcmp(&x, &y, sizeof x)) continue;
        insn_put(m, k, i, y);
        gate_reread(m, target, &again);
        gate_loops(&again, b, stall ? 1 : 2, stall ? "clocks of stalls" : "k_gemv_glu<1> has a loop without a budget");
        sass_close(&again);
        insn_put(m, k, i, x);
        stalled |= stall;
    }
    CHECK(stalled, "no instruction was made longer");
    arrfree(b);
}

/* Encodes a branch from instruction i to `to`, always or by predicate 0. */
static struct insn insn_branch(int i, int to, bool always) {
    const uint64_t words = (uint64_t)(4 * (int64_t)(to - i - 1));
    return (struct insn){OP_BRA | 4 << 9 | (always ? 7 : 0) << 12 | (words & 0xff) << 16 | words >> 8 << 34,
                         (words >> 38 & 0x3ffff) | 7 << 23};
}

/* What is a hot loop, in code written by hand. */
static void gate_flow(void) {
    enum { N = 16 };
    const struct insn nop = {OP_NOP | 4 << 9 | 7 << 12, 1ull << 41}, exit = {OP_EXIT | 4 << 9 | 7 << 12, 5ull << 41},
                      product = {OP_HMMA | 1 << 9 | 7 << 12, 2ull << 41};
    struct insn code[N];
    struct sass_kernel k = {.code = (const uint8_t *)code, .n = N};
    for (int i = 0; i < N; i++) code[i] = nop;
    code[4] = product;
    code[6] = insn_branch(6, 5, false);  /* a loop without products in the hot one */
    code[7] = insn_branch(7, 3, false);  /* the hot loop goes back in two places */
    code[8] = insn_branch(8, 12, false); /* to code after the kernel's end, which goes back into the loop */
    code[9] = insn_branch(9, 3, false);
    code[10] = insn_branch(10, 0, false); /* the loop around it */
    code[11] = exit;
    code[13] = insn_branch(13, 9, true);
    code[14] = insn_branch(14, 14, true);
    for (int i = 0; i < N; i++) {
        const int to[N] = {-1, -1, -1, -1, -1, -1, 5, 3, 12, 3, 0, -1, -1, 9, 14, -1};
        CHECK_INT(insn_target(&k, i), to[i], "instruction %d", i);
    }
    sass_hot_loops(&k, true);
    const struct sass_loop *l = k.loops;
    if (CHECK_INT(arrlen(k.loops), 1, "hot loops"))
        CHECK(l->first == 3 && l->last == 9 && l->n == 7 && l->products == 1 && l->inner == 1 && l->stall == 4,
              "from %d to %d: %d instructions, %d products, %d loops, %d clocks", l->first, l->last, l->n, l->products,
              l->inner, l->stall);
    arrfree(k.loops);
}

/* Reads a file that may be damaged: an error or an image, whose checks end. */
static int gate_damaged(const uint8_t *data, size_t n, int target) {
    const struct sass_target *t = &sass_targets[target];
    struct sass_image m = {0};
    char *said = NULL, err[ERR_MAX] = "";
    const int rc = sass_read(&m, data, n, target == SASS_SM120, err);
    CHECK(rc == 0 || err[0], "no reason");
    sass_check_waits(&m, &said);
    sass_check_loops(&m, t->budgets, t->n_budget, &said);
    arrfree(said);
    sass_close(&m);
    return rc;
}

/* Files cut short do no harm. */
static void gate_cuts(const struct sass_image *m, int target) {
    enum { CUTS = 150, HEAD = 80 };
    Elf64_Ehdr h;
    memcpy(&h, m->file, sizeof h);
    const size_t n = arrlenu(m->file), end = h.e_shoff + h.e_shnum * sizeof(Elf64_Shdr);
    for (int i = 0; i < 2 * CUTS; i++) {
        size_t keep = n * (size_t)(i / 2) / CUTS; /* anywhere, */
        if (i & 1)
            keep = i < HEAD ? (size_t)i : end - 97 * (size_t)(i - HEAD); /* in the header or the sections' table */
        uint8_t *cut = xmalloc(keep + !keep);
        memcpy(cut, m->file, keep);
        CHECK(gate_damaged(cut, keep, target) < 0 || keep >= end, "cut to %zu bytes", keep);
        free(cut);
    }
}

/* Random bytes do no harm: in the header, the tables of sections, symbols and attributes, or anywhere. */
static void gate_noise(struct sass_image *m, int target) {
    enum { ROUNDS = 300, BYTES = 16 };
    uint64_t rng = 1;
    size_t n_symbols = 0, n_info = 0;
    Elf64_Ehdr h;
    memcpy(&h, m->file, sizeof h);
    const uint8_t *file = (const uint8_t *)m->file, *symbols = elf_find(&m->elf, ".symtab", &n_symbols),
                  *info = elf_find(&m->elf, ".nv.info", &n_info);
    if (!CHECK(symbols && info, "no symbols or attributes")) return;
    const struct {
        size_t at, n;
    } parts[] = {{0, sizeof h},
                 {h.e_shoff, h.e_shnum * sizeof(Elf64_Shdr)},
                 {(size_t)(symbols - file), n_symbols},
                 {(size_t)(info - file), n_info},
                 {0, arrlenu(m->file)}};
    for (int i = 0; i < ROUNDS; i++) {
        size_t at[BYTES];
        char was[BYTES];
        for (int k = 0; k < BYTES; k++) {
            at[k] = parts[i % 5].at + rng_next(&rng) % parts[i % 5].n;
            was[k] = m->file[at[k]];
            m->file[at[k]] = (char)rng_next(&rng);
        }
        gate_damaged(file, arrlenu(m->file), target);
        for (int k = BYTES; k-- > 0;) m->file[at[k]] = was[k];
    }
    CHECK_INT(gate_damaged(file, arrlenu(m->file), target), 0, "the whole file");
}

/* The checks fail where they should, on code that was changed, and damaged files do no harm. */
static void test_sass_gate(void) {
    char reason[ERR_MAX] = "";
    int found = 0;
    gate_flow();
    for (int i = 0; i < SASS_TARGETS; i++) {
        struct sass_image m;
        if (!sass_load(&m, &sass_targets[i], reason)) {
            found++;
            gate_budgets(&m);
            gate_layers(&m, i);
            gate_waits(&m);
            gate_launches(&m);
            gate_code(&m, i);
            gate_cuts(&m, i);
            gate_noise(&m, i);
        }
        sass_close(&m);
    }
    if (!found) SKIP("%s", reason);
}

#define TESTS_SASS \
    {"cuda/sass-sm_120f", test_sass_sm120}, {"cuda/sass-sm_90", test_sass_sm90}, {"cuda/sass-gate", test_sass_gate},
