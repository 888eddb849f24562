/* moe_cuda.cu - the table of operations (struct ops of moe.c) for NVIDIA GPUs.
 *
 * One rank's engine: its copy of the weights, its cache, its activations, and a kernel or a few for every operation.
 *
 *   decode, 1..16 tokens: weights stream once, 4 bits become halves in registers, m16n8k16 sums in F32 (W4A16); one CUDA graph
 *                         per number of tokens, because positions and tokens lie in device memory
 *   prefill, more tokens: tokens sorted by expert, grouped products in tiles of K = 64; on SM120 optionally in FP4 (W4A4)
 *   attention:            over an FP8 or BF16 cache; decode splits the context over the whole GPU and merges exactly
 *
 * The same source compiles with g++ against tests/cuda_emu.h, which runs every kernel on a CPU, thread by thread.
 *
 * Numbers: activations between products are halves, clamped, never infinite; sums, norms, router, softmax and the residual
 * stream are F32. Nothing is added up with atomics: results do not change from run to run.
 * Every kernel's shared memory stays within the 101,376 bytes of SM120.
 *
 * Contents:
 *   Instructions
 *   Weights on the device
 *   Upload: from the file's blocks to tiles
 *   Sums over ranks
 *   Embedding, norms, sums
 *   Products for few tokens
 *   Router
 *   Products for more than 16 tokens
 *   Rotation and the cache
 *   Attention over the cache
 *   Choosing a token
 *   The engine of a rank
 *   Operations
 *   Start and end
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stb/stb_ds.h>
#include <type_traits>

#include "gguf_nvfp4.h"

#ifdef CUEMU
#include "tests/cuda_emu.h"
#define DEVICE           static inline
#define DEVICE_MEMBER    inline
#define HAVE_FP4_MMA     1
#define HAVE_NCCL        1
#define MOE_CUDA_TARGETS "emulated"
#else
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#ifdef HAVE_NCCL
#include <nccl.h>
#endif
#endif

#define MOE_TYPES_ONLY
#include "moe.c"

/* ============================================================================================================
 * Instructions
 *
 * One function per PTX instruction, with the same names as in tests/cuda_emu.h, and the launch macro.
 * ============================================================================================================ */

#ifndef CUEMU

#define DEVICE        static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define UNROLL        _Pragma("unroll")
#define UNROLL_BY(n)  UNROLL_BY_(unroll n)
#define UNROLL_BY_(x) _Pragma(#x)

DEVICE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* 16 bytes from global to shared memory, asynchronously; zeros, and no read, where !valid. */
DEVICE void cp_async16(void *smem, const void *gmem, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)), "l"(gmem),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four 8x8 matrices of halves; lane l gives the address of row l % 8 of matrix l / 8. */
#define LDMATRIX_X4(name, how)                                                              \
    DEVICE void name(uint32_t r[4], const void *row) {                                      \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                       \
                     : "r"(shared_address(row))                                             \
                     : "memory");                                                           \
    }
LDMATRIX_X4(ldmatrix_x4, "")
LDMATRIX_X4(ldmatrix_x4_trans, ".trans")

/* d (16,8) += a (16,16) b (16,8), F32 sums. With g = lane / 4, t = lane % 4: a0 (g; 2t,2t+1), a1 (g+8; ..), a2 (g; 2t+8..),
 * a3 (g+8; 2t+8..); b0 (2t,2t+1; g), b1 (2t+8..; g); d0,d1 (g; 2t,2t+1), d2,d3 (g+8; ..). */
DEVICE void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#define HAVE_FP4_MMA 1
/* d (16,8) += a (16,64) b (64,8) in E2M1 with a UE4M3 scale per 16 (PTX ISA, mma.m16n8k64 with block scaling). */
DEVICE void mma_nvfp4(float d[4], const uint32_t a[4], const uint32_t b[2], uint32_t sfa, uint32_t sfb) {
    asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0,0}, %11, {0,0};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sfa), "r"(sfb));
}
#endif

/* Functions of one instruction, of one operand and of two, of which `lo` is %1. */
#define ONE_INSTRUCTION(R, r, name, A, a, code) \
    DEVICE R name(A x) {                        \
        R y;                                    \
        asm(code : r(y) : a(x));                \
        return y;                               \
    }
#define ONE_INSTRUCTION2(R, r, name, A, a, code) \
    DEVICE R name(A lo, A hi) {                  \
        R y;                                     \
        asm(code : r(y) : a(lo), a(hi));         \
        return y;                                \
    }
/* Pairs: element 0 is the low half. Subnormals are kept. */
ONE_INSTRUCTION2(uint32_t, "=r", f16x2_mul, uint32_t, "r", "mul.rn.f16x2 %0, %1, %2;")
ONE_INSTRUCTION2(uint32_t, "=r", f16x2_add, uint32_t, "r", "add.rn.f16x2 %0, %1, %2;")
ONE_INSTRUCTION2(uint32_t, "=r", f32_to_f16x2, float, "f", "cvt.rn.f16x2.f32 %0, %2, %1;")
ONE_INSTRUCTION2(uint32_t, "=r", f32_to_bf16x2, float, "f", "cvt.rn.bf16x2.f32 %0, %2, %1;")
/* Beyond the largest half it is that one: an overflow may cost accuracy, never make an infinity. */
ONE_INSTRUCTION2(uint32_t, "=r", clamped_f16x2, float, "f", "cvt.rn.satfinite.f16x2.f32 %0, %2, %1;")
ONE_INSTRUCTION(float, "=f", exp2_fast, float, "f", "ex2.approx.ftz.f32 %0, %1;") /* below 2^-126: 0 */
ONE_INSTRUCTION(float, "=f", half_to_f32, uint16_t, "h", "cvt.f32.f16 %0, %1;")
ONE_INSTRUCTION(uint16_t, "=h", f32_to_f16, float, "f", "cvt.rn.f16.f32 %0, %1;")
DEVICE float bf16_value(uint16_t b) { return __uint_as_float((uint32_t)b << 16); }

/* E4M3. The image for chips before 9.0 has no instructions for it, and attention reads it all the time. */
DEVICE uint16_t f32_to_e4m3x2(float lo, float hi) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
}
DEVICE uint32_t e4m3x2_to_f16x2(uint16_t x) {
#if __CUDA_ARCH__ >= 890
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(x, __NV_E4M3);
    return *(const uint32_t *)&h;
#else
    uint32_t v = (x & 0xFFu) | (uint32_t)(x >> 8) << 16; /* s eeee mmm: as f16 it is 2^-8 of the value */
    return f16x2_mul((v & 0x00800080) << 8 | (v & 0x007F007F) << 7, 0x5C005C00);
#endif
}

/* Written by another block of the same kernel: not from the first cache, which is not coherent. */
DEVICE float load_l2(const float *p) { return __ldcg(p); }

/* 16 bytes that are read once: past the first cache. */
DEVICE uint4 ldg_stream(const void *p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}

/* What was written before, here and by those who added before, is visible after. Returns the old value. */
DEVICE uint32_t atom_add_acq_rel(uint32_t *p, uint32_t v) {
    uint32_t r;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(v) : "memory");
    return r;
}

/* Memory that other GPUs see: 16 bytes to them, 16 bytes that came from them, and flags. A release makes what the block wrote before
 * a barrier visible to whoever sees the flag by an acquire. */
DEVICE void st_sys16(void *p, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE uint4 ld_sys16(const void *p) {
    uint4 r;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p)
                 : "memory");
    return r;
}
DEVICE void st_release_sys(uint32_t *p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE uint32_t ld_acquire_sys(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE uint64_t global_timer() { /* nanoseconds */
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* Programmatic dependent launch: `wait` returns when the kernels before have ended and their writes are visible; `launch` lets the
 * next kernel's blocks start, which then wait themselves. */
#if __CUDA_ARCH__ >= 900
DEVICE void grid_dependency_wait() { cudaGridDependencySynchronize(); }
DEVICE void grid_dependency_launch() { cudaTriggerProgrammaticLaunchCompletion(); }
#else
DEVICE void grid_dependency_wait() {}
DEVICE void grid_dependency_launch() {}
#endif

#define DYN_SMEM(T, name)                                 \
    extern __shared__ __align__(1024) uint8_t dyn_smem[]; \
    T *name = (T *)dyn_smem
#define SHARED(T, name, count) __shared__ __align__(16) T name[count]

/* Launches with programmatic dependence on the kernel before. Errors are collected by cudaGetLastError. */
template <class... P, class... A>
static void launch_pdl(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, cudaStream_t stream, A... args) {
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = smem, config.stream = stream;
    config.attrs = &attr, config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, P(args)...);
}
#define LAUNCH_NAMED(kernel, name, ...) launch_pdl(kernel, __VA_ARGS__)
#else
#undef LAUNCH_PDL
#define LAUNCH_NAMED(kernel, name, ...) cuemu::enqueue_kernel(kernel, name, true, __VA_ARGS__)
#endif

static thread_local cudaEvent_t *profile_event; /* two of each launch, while a thread profiles its rank */

/* Before a launch its name as the source spells it, after it NULL. */
static void profile_mark(const char *kernel, cudaStream_t stream) {
    const int i = profile_launch(kernel);
    if (i >= 0) cudaEventCreate(&profile_event[i]), cudaEventRecord(profile_event[i], stream);
}

#define LAUNCH_PDL(kernel, grid, block, smem, stream, ...)                     \
    do {                                                                       \
        profile_mark(#kernel, stream);                                         \
        LAUNCH_NAMED(kernel, #kernel, grid, block, smem, stream, __VA_ARGS__); \
        profile_mark(NULL, stream);                                            \
    } while (0)

/* ============================================================================================================
 * Weights on the device
 *
 * A matrix is cut into tiles of 16 rows x 64 columns, each stored as the A fragments of m16n8k16 (and m16n8k64), so that a
 * warp's load of a tile is one 16-byte load per lane and 512 consecutive bytes. Lane 4g + t owns rows g and g + 8 and the
 * columns 8t..8t+7 and 32+8t..32+8t+7. The k16-step s of a tile covers, in the MMA's order of k, for lane t the columns
 * c = 32 (s / 2) + 8t + 4 (s % 2): c, c+1 (a0, a1, b0) and c+2, c+3 (a2, a3, b1). So 16 bytes of a token's halves at column
 * 32h + 8t are the B operand of steps 2h and 2h + 1. The order of k inside a product is free as long as both operands share it.
 * ============================================================================================================ */

/* FMT_FP4: UE4M3 scales, row-major, 4 a row, rows in the order 0 8 1 9 ..; FMT_Q8: codes + 128, F16 scales, 2 a row. */

/* (n_expert, n_out, n_in) matrices. Rows and columns that only fill up tiles are zero. */
struct device_matrix {
    uint8_t *codes;     /* (n_expert, n_rt, n_kt) tiles */
    uint8_t *scales;    /* likewise; NULL: the format has none */
    const float *scale; /* (n_expert) factors of the sums; NULL: factor `unit` alone */
    const float *bias;  /* (n_out) or NULL */
    float unit;         /* of the format: what the expansion to halves leaves out */
    int n_out, n_in, n_rt, n_kt, n_expert, fmt;
};

/* Index of a matrix' first tile in row of tiles rt of expert e. */
DEVICE size_t tile_index(const struct device_matrix &w, int e, int rt) {
    return ((size_t)e * (size_t)w.n_rt + (size_t)rt) * (size_t)w.n_kt;
}

DEVICE float device_matrix_scale(const struct device_matrix &w, int e) {
    return w.scale ? w.unit * w.scale[e] : w.unit;
}

/* Eight E2M1 codes to pairs of halves, times 2^-14: column i of the eight sits in nibble (i / 2) + 4 (i % 2), so that a pair
 * is 16 bits apart and its exponent and mantissa bits fall into a half's places by shifts. Subnormals come out right. */
DEVICE uint32_t fp4_pair(uint32_t codes, int pair) {
    uint32_t v = codes << (12 - 4 * pair);
    return (v & 0x80008000u) | (v >> 3 & 0x0E000E00u);
}

/* The scale byte at bit `shift` as a pair of halves: UE4M3 moved to a half's place is 2^-8 of its value; times 2^15. With
 * fp4_pair's 2^-14 a product is 2^-7 of the weight (exact: six significant bits); device_matrix.unit brings it back. */
DEVICE uint32_t fp4_scale(uint32_t scales, int shift) {
    uint32_t b = (scales >> shift & 0xFFu) << 7;
    return f16x2_mul(b | b << 16, 0x78007800u);
}

/* The A fragment of k16-step `step` (a constant after unrolling) from a lane's part of a tile. */
template <int FMT>
DEVICE void expand(const uint4 *c, uint2 s, int t, int step, uint32_t a[4]) {
    int h = step >> 1, q = 2 * (step & 1);
    if (FMT == FMT_FP4) {
        int shift = 8 * (2 * h + (t >> 1));
        uint32_t lo = h ? c[0].z : c[0].x, hi = h ? c[0].w : c[0].y;
        uint32_t s0 = fp4_scale(s.x, shift), s1 = fp4_scale(s.y, shift);
        a[0] = f16x2_mul(fp4_pair(lo, q), s0), a[2] = f16x2_mul(fp4_pair(lo, q + 1), s0);
        a[1] = f16x2_mul(fp4_pair(hi, q), s1), a[3] = f16x2_mul(fp4_pair(hi, q + 1), s1);
    } else if (FMT == FMT_Q8) { /* a byte below 0x64 is the half 1024 + byte */
        uint32_t lo = q ? c[h].y : c[h].x, hi = q ? c[h].w : c[h].z;
        const uint32_t bias = 0xE480E480u; /* -1152 = -(1024 + 128) */
        a[0] = f16x2_add(__byte_perm(lo, 0x64646464u, 0x4140), bias);
        a[2] = f16x2_add(__byte_perm(lo, 0x64646464u, 0x4342), bias);
        a[1] = f16x2_add(__byte_perm(hi, 0x64646464u, 0x4140), bias);
        a[3] = f16x2_add(__byte_perm(hi, 0x64646464u, 0x4342), bias);
    } else {
        a[0] = c[step].x, a[1] = c[step].y, a[2] = c[step].z, a[3] = c[step].w;
    }
}

/* One weight of expert 0, scale and all: for gathering rows of the embedding. */
DEVICE float device_matrix_value(const struct device_matrix &w, int row, int col) {
    size_t tile = tile_index(w, 0, row / TILE_ROWS) + (size_t)(col / TILE_COLS);
    int g = row & 7, hi = row >> 3 & 1, h = col >> 5 & 1, lane = 4 * g + (col >> 3 & 3), i = col & 7;
    const uint8_t *c = w.codes + tile * (size_t)TILE_BYTES(w.fmt);
    const uint8_t *s = w.scales + tile * TILE_SCALES + 8 * g + 4 * hi;
    float v;
    if (w.fmt == FMT_FP4) {
        uint32_t word = ((const uint32_t *)c)[4 * lane + hi + 2 * h];
        uint32_t half = fp4_pair(word, i >> 1) >> 16 * (i & 1), scale = (uint32_t)s[2 * h + (lane >> 1 & 1)] << 7;
        v = half_to_f32((uint16_t)half) * half_to_f32((uint16_t)scale) * 32768.0f;
    } else if (w.fmt == FMT_Q8) {
        v = (float)(c[512 * h + 16 * lane + 8 * hi + i] - 128) * half_to_f32(((const uint16_t *)s)[h]);
    } else {
        v = half_to_f32(
            ((const uint16_t *)c)[(512 * (2 * h + (i >> 2)) + 16 * lane) / 2 + 2 * (hi + (i & 2)) + (i & 1)]);
    }
    return v * device_matrix_scale(w, 0);
}

/* ============================================================================================================
 * Upload: from the file's blocks to tiles
 *
 * The host sends rows as the file has them (moe.c, gpu_upload_rows); k_repack permutes them into tiles on the GPU.
 * ============================================================================================================ */

/* A weight of an F32, F16 or BF16 row. */
DEVICE float raw_float(const struct repack &r, const uint8_t *row, int col) {
    if (r.type == GGUF_F32) return ((const float *)row)[col];
    uint16_t h = ((const uint16_t *)row)[col];
    return r.type == GGUF_BF16 ? bf16_value(h) : half_to_f32(h);
}

/* Eight codes at columns col.. (a multiple of 8) of a row, in the order of fp4_pair. */
DEVICE uint32_t raw_fp4(const struct repack &r, const uint8_t *row, int col) {
    const bool nv = r.type == GGUF_NVFP4;
    const uint8_t *q = row + (nv ? col / 64 * 36 + 4 + col % 64 / 16 * 8 : col / 32 * 17 + 1 + (col & 8));
    const int shift = col & (nv ? 8 : 16) ? 4 : 0;
    uint32_t out = 0;
    for (int i = 0; i < 8; i++) out |= (q[i] >> shift & 15u) << 4 * ((i >> 1) + 4 * (i & 1));
    return out;
}

/* Rows of the file to tiles. range, where the format's values may not all fit: F16: bits of the largest |weight|; MXFP4: the largest
 * exponent, 255 - the smallest. Grid: tiles / 8, block 256, a warp a tile. Reads and writes the matrix once; the bus is slower. */
__global__ void __launch_bounds__(256)
    k_repack(struct repack r, const uint8_t *raw, struct device_matrix w, uint32_t *range) {
    grid_dependency_wait();
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    size_t n = (size_t)blockIdx.x * 8 + (threadIdx.x >> 5), per = (size_t)r.n_rt * (size_t)w.n_kt;
    if (n >= per * (size_t)r.n_e) return;
    int e = (int)(n / per), rt = (int)(n % per) / w.n_kt, kt = (int)(n % per) % w.n_kt;
    int rows = min(r.n_rt * TILE_ROWS, w.n_out - r.rt0 * TILE_ROWS);
    size_t tile = tile_index(w, r.e0 + e, r.rt0 + rt) + (size_t)kt;
    uint32_t *codes = (uint32_t *)(w.codes + tile * (size_t)TILE_BYTES(w.fmt));
    uint8_t *scales = w.scales + tile * TILE_SCALES + 8 * g;
    uint32_t top = 0, low = 0;
    for (int i = 0; i < 4; i++) {
        const int hi = i >> 1, h = i & 1;
        const int row = rt * TILE_ROWS + g + 8 * hi, col = kt * TILE_COLS + 32 * h + 8 * t;
        const uint8_t *src = raw + ((size_t)e * (size_t)rows + (size_t)row) * r.row_bytes;
        const bool in = row < rows && col < w.n_in;
        uint32_t *to = codes + 4 * lane + hi;
        if (w.fmt == FMT_FP4) {
            to[2 * h] = in ? raw_fp4(r, src, col) : 0;
            if (t & 1) continue; /* one lane per block of 16 columns writes its scale */
            uint8_t s = 0;
            if (in && r.type == GGUF_NVFP4) {
                s = src[col / 64 * 36 + col % 64 / 16];
                if (s == 0x7F) s = 0; /* as the other readers of this format do */
            } else if (in) {
                int exponent = src[col / 32 * 17], x = exponent - r.shift; /* -9..8 fits */
                s = (uint8_t)(x > 8 ? 0x78 : x >= -6 ? (x + 7) << 3 : x >= -9 ? 1 << (x + 9) : 0);
                if ((raw_fp4(r, src, col) | raw_fp4(r, src, col + 8)) & 0x77777777u)
                    top = max(top, (uint32_t)exponent), low = max(low, 255u - (uint32_t)exponent);
            }
            scales[4 * hi + 2 * h + (t >> 1)] = s;
        } else if (w.fmt == FMT_Q8) {
            const uint8_t *b = src + col / 32 * 34;
            uint32_t q[2] = {0x80808080u, 0x80808080u};
            for (int k = 0; in && k < 8; k++) q[k >> 2] ^= (uint32_t)b[2 + col % 32 + k] << 8 * (k & 3);
            to[128 * h + hi] = q[0], to[128 * h + hi + 1] = q[1];
            if (!t) ((uint16_t *)(scales + 4 * hi))[h] = in ? (uint16_t)(b[0] | b[1] << 8) : 0;
        } else {
            for (int k = 0; k < 8; k += 2) { /* steps 2h and 2h + 1, registers hi and hi + 2 */
                float x = in ? raw_float(r, src, col + k) : 0, y = in ? raw_float(r, src, col + k + 1) : 0;
                top = max(top, __float_as_uint(fmaxf(fabsf(x), fabsf(y))));
                to[128 * (2 * h + (k >> 2)) + (k & 2)] = f32_to_f16x2(x * r.factor, y * r.factor);
            }
        }
    }
    if (r.type == GGUF_NVFP4 || w.fmt == FMT_Q8) return;
    atomicMax(range, top);
    atomicMax(range + 1, low);
}

/* ============================================================================================================
 * Sums over ranks
 *
 * Ranks push: 16-byte stores into an area of the other's, then a flag. Stores cross PCIe once, loads would twice. The area is memory of
 * the receiver's GPU, or of the host where GPUs cannot reach each other. Flags only ever count up, the counts are in device memory, so that
 * a recorded graph goes on counting. A kernel that waits says for whom, and goes on until the host, which knows whether the program was
 * merely suspended, tells it to give up; after that nothing waits.
 * ============================================================================================================ */

struct tp_peer {
    int rank, n_rank; /* of the stage */
    struct sequence *sequence;
    struct heartbeat *heartbeat;
};

/* Until *flag has come to `want`. One thread. */
DEVICE void flag_await(const uint32_t *flag, uint32_t want, const struct tp_peer &p, uint32_t code) {
    enum { LONG = 10000000 /* nanoseconds between looks at the host */ };
    uint64_t t = global_timer();
    while ((int32_t)(ld_acquire_sys(flag) - want) < 0 && !*(volatile uint32_t *)&p.sequence->aborted) {
        if (global_timer() - t < LONG) continue;
        t = global_timer();
        *(volatile uint32_t *)&p.heartbeat->waiting = code;
        if (*(volatile uint32_t *)&p.heartbeat->abort) *(volatile uint32_t *)&p.sequence->aborted = 1;
    }
}

/* All blocks of a kernel come here when they have done what it is for. True in the last one's first thread. */
DEVICE bool channel_end(const struct tp_peer &p, int ch) {
    __syncthreads();
    if (threadIdx.x || atom_add_acq_rel(&p.sequence->arrived[ch], 1) != gridDim.x - 1) return false;
    p.sequence->arrived[ch] = 0;
    p.sequence->done[ch]++;
    return true;
}

/* Rows for another rank, or from one. */
struct send_args {
    struct tp_peer p;
    int channel;
    const uint32_t *flag; /* (n_flag) of those that hand over, but for p.rank's own of several; or room of who takes */
    int n_flag;
    const float *src; /* n_row rows of n_col floats, a multiple of 4, src_stride apart */
    float *dst;
    size_t src_stride, dst_stride;
    int n_row, n_col;
    uint32_t *tell; /* the other's flag or room; NULL: it need not know */
};

/* Grid <= ALLREDUCE_BLOCKS, block 256. To a receiver n_row * n_col * 4 bytes at the bandwidth of the link; from a sender its latency, then 8
 * bytes per value. */
__global__ void __launch_bounds__(256) k_send_rows(struct send_args a) {
    grid_dependency_wait();
    const uint32_t e = a.p.sequence->done[a.channel] + 1;
    const int t = threadIdx.x;
    if (t < a.n_flag && (a.n_flag == 1 || t != a.p.rank)) /* room: the rows before these have been taken */
        flag_await(a.flag + t, a.channel == CH_SEND ? e - 1 : e, a.p, WAIT_CODE(a.n_flag == 1 ? 0 : t, a.channel, 0));
    __syncthreads();
    const size_t vecs = (size_t)a.n_col / 4, n = vecs * (size_t)a.n_row;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (size_t)gridDim.x * 256) {
        const size_t row = i / vecs, col = i % vecs * 4;
        st_sys16(a.dst + row * a.dst_stride + col, ld_sys16(a.src + row * a.src_stride + col));
    }
    if (channel_end(a.p, a.channel) && a.tell) st_release_sys(a.tell, e);
    grid_dependency_launch();
}

/* y = x in BF16. Grid n / 1024, block 256, n a multiple of 4. 6 bytes per value. */
__global__ void __launch_bounds__(256) k_to_bf16(const float *x, uint16_t *y, size_t n) {
    grid_dependency_launch();
    grid_dependency_wait();
    const size_t i = 4 * ((size_t)blockIdx.x * 256 + threadIdx.x);
    if (i >= n) return;
    const float4 v = *(const float4 *)(x + i);
    *(uint2 *)(y + i) = make_uint2(f32_to_bf16x2(v.x, v.y), f32_to_bf16x2(v.z, v.w));
}

/* ============================================================================================================
 * Embedding, residual add, norm
 *
 * k_add_norm also does the all-reduce: it adds what attention or the feed-forward of all ranks computed.
 * ============================================================================================================ */

/* The tokens of one forward, in device memory; the host writes it before each. */
struct batch {
    int32_t pos, n_tok; /* positions pos .. pos + n_tok - 1 */
};

enum { WARP = 32, ROW_THREADS = 256 };

DEVICE float warp_sum(float x) {
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    return x;
}
DEVICE float warp_max(float x) {
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, o));
    return x;
}

/* The sum over a block of up to 1024 threads, the same bits in every thread. Once per kernel: a second sum would overwrite the
 * parts of the first while they are read. */
DEVICE float block_sum(float x) {
    SHARED(float, part, 32);
    x = warp_sum(x);
    if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = x;
    __syncthreads();
    float s = 0;
    for (int i = 0; i < (int)(blockDim.x >> 5); i++) s += part[i];
    return s;
}

/* One half, clamped like clamped_f16x2's. */
DEVICE uint16_t clamped_f16(float x) { return f32_to_f16(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

/* x (n_tok, n_embd) F32 = rows of the embedding, unless that is empty; cs, sn (n_tok, n_half): cos and sin of the positions, times
 * `factor`. Grid n_tok, block 256. Gathers n_embd weights per token out of tiles: 4 to 8 bytes of every 16; a few KB, latency
 * only. */
__global__ void __launch_bounds__(ROW_THREADS)
    k_embed(struct device_matrix w, const int32_t *tokens, const struct batch *b, const float *freq, int n_half,
            float factor, float *x, float *cs, float *sn) {
    grid_dependency_launch();
    grid_dependency_wait();
    int t = blockIdx.x;
    for (int i = threadIdx.x; i < w.n_in; i += ROW_THREADS)
        x[(size_t)t * w.n_in + i] = device_matrix_value(w, tokens[t], i);
    for (int i = threadIdx.x; i < n_half; i += ROW_THREADS) {
        float angle = (float)(b->pos + t) * freq[i];
        cs[t * n_half + i] = cosf(angle) * factor, sn[t * n_half + i] = sinf(angle) * factor;
    }
}

enum { NORM_THREADS = 512, NORM_VECS = NORM_MAX / (4 * NORM_THREADS) };

/* Where what is added comes from. */
enum delta_source {
    DELTA_OWN,    /* this rank's alone, or nothing */
    DELTA_PUSHED, /* all ranks', pushed by this kernel */
    DELTA_PARTS,  /* all ranks', side by side */
    DELTA_BF16    /* their sum */
};

struct norm_args {
    float *x;            /* (n_tok, n), n <= NORM_MAX, a multiple of 4 */
    const void *delta;   /* (n_tok, n) floats; parts: (n_rank, n_tok, n); BF16: halves of those bytes; NULL: nothing */
    const float *weight; /* (n); NULL: only the sum is wanted */
    float eps;
    int n, n_tok;
    uint16_t *h16; /* (n_tok, n) */
    float *h32;    /* likewise, or NULL */
    struct tp_peer p;
    float *slot[MAX_RANKS];    /* pushed: of each rank, (2, n_rank, ALLREDUCE_SLOT) */
    uint32_t *flag[MAX_RANKS]; /* likewise (n_rank, ALLREDUCE_BLOCKS) */
    int place;                 /* which sum of the forward this is */
};

/* Pushes the block's rows to the other ranks and waits for theirs. Slots alternate: a rank that is one sum ahead writes to the other half,
 * and it cannot be two ahead of one that still reads, whose flag of the sum between it would lack. */
DEVICE void rows_push(const struct norm_args &a, uint32_t e) {
    const int tid = threadIdx.x;
    const size_t n = (size_t)a.n, half = (size_t)(e & 1) * (size_t)a.p.n_rank * ALLREDUCE_SLOT;
    for (int t = blockIdx.x; t < a.n_tok; t += (int)gridDim.x)
        for (int i = 4 * tid; i < a.n; i += 4 * NORM_THREADS) {
            const uint4 v = *(const uint4 *)((const float *)a.delta + (size_t)t * n + i);
            for (int k = 0; k < a.p.n_rank; k++)
                if (k != a.p.rank)
                    st_sys16(a.slot[k] + half + (size_t)a.p.rank * ALLREDUCE_SLOT + (size_t)t * n + i, v);
        }
    __syncthreads();
    if (tid < a.p.n_rank && tid != a.p.rank) {
        st_release_sys(a.flag[tid] + a.p.rank * ALLREDUCE_BLOCKS + blockIdx.x, e);
        flag_await(a.flag[a.p.rank] + tid * ALLREDUCE_BLOCKS + blockIdx.x, e, a.p,
                   WAIT_CODE(tid, CH_ALLREDUCE, a.place));
    }
    __syncthreads();
}

/* Four values of what is added to row t at column i. */
template <int SOURCE>
DEVICE float4 delta_at(const struct norm_args &a, uint32_t e, int t, int i) {
    const size_t n = (size_t)a.n, at = (size_t)t * n + (size_t)i;
    if (SOURCE == DELTA_OWN) return *(const float4 *)((const float *)a.delta + at);
    if (SOURCE == DELTA_BF16) {
        const uint2 v = *(const uint2 *)((const uint16_t *)a.delta + at);
        return make_float4(bf16_value((uint16_t)v.x), bf16_value((uint16_t)(v.x >> 16)), bf16_value((uint16_t)v.y),
                           bf16_value((uint16_t)(v.y >> 16)));
    }
    float4 sum = make_float4(0, 0, 0, 0);
    for (int k = 0; k < a.p.n_rank; k++) { /* in their order, so that all ranks have the same bits */
        uint4 u;
        if (SOURCE == DELTA_PARTS) u = *(const uint4 *)((const float *)a.delta + (size_t)k * (size_t)a.n_tok * n + at);
        else if (k == a.p.rank) u = *(const uint4 *)((const float *)a.delta + at);
        else u = ld_sys16(a.slot[a.p.rank] + ((size_t)(e & 1) * (size_t)a.p.n_rank + (size_t)k) * ALLREDUCE_SLOT + at);
        const float4 v =
            make_float4(__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w));
        if (!k) sum = v;
        else sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
}

/* x += what is to be added; then, unless weight is NULL, h16 and h32 = RMS norm of x times weight. Grid n_tok, pushed: at most ALLREDUCE_BLOCKS,
 * which all must be resident while they wait; block 512. Every value is read once and then held: 2 latencies, about 2 us for one token,
 * pushed 5 us more; 3 to 5 F32 passes over the rows for many. No __restrict__ here: it would let loads move above
 * grid_dependency_wait. */
template <int SOURCE>
__global__ void __launch_bounds__(NORM_THREADS) k_add_norm(struct norm_args a) {
    const int i0 = 4 * (int)threadIdx.x, n = a.n;
    uint32_t e = 0;
    float4 v[NORM_VECS], w[NORM_VECS], d;
    if (SOURCE != DELTA_PUSHED) grid_dependency_launch();
    UNROLL for (int u = 0; u < NORM_VECS; u++) {
        const int i = i0 + 4 * NORM_THREADS * u;
        if (a.weight && i < n) w[u] = *(const float4 *)(a.weight + i);
    }
    grid_dependency_wait();
    if (SOURCE == DELTA_PUSHED) {
        e = a.p.sequence->done[CH_ALLREDUCE] + 1;
        rows_push(a, e);
        grid_dependency_launch(); /* not before: the next kernel's blocks would take the places of a rank on the same GPU */
    }
    for (int t = blockIdx.x; t < a.n_tok; t += (int)gridDim.x) {
        float *x = a.x + (size_t)t * (size_t)n;
        UNROLL for (int u = 0; u < NORM_VECS; u++) {
            const int i = i0 + 4 * NORM_THREADS * u;
            v[u] = i < n ? *(const float4 *)(x + i) : make_float4(0, 0, 0, 0);
            if (!a.delta || i >= n) continue;
            d = delta_at<SOURCE>(a, e, t, i);
            v[u].x += d.x, v[u].y += d.y, v[u].z += d.z, v[u].w += d.w;
        }
        float ss = 0;
        UNROLL for (int u = 0; u < NORM_VECS; u++) {
            const int i = i0 + 4 * NORM_THREADS * u;
            if (a.delta && i < n) *(float4 *)(x + i) = v[u];
            ss += v[u].x * v[u].x + v[u].y * v[u].y + v[u].z * v[u].z + v[u].w * v[u].w;
        }
        if (a.weight) {
            const float f = rsqrtf(block_sum(ss) / (float)n + a.eps);
            UNROLL for (int u = 0; u < NORM_VECS; u++) {
                const int i = i0 + 4 * NORM_THREADS * u;
                if (i >= n) continue;
                const float4 y =
                    make_float4(v[u].x * f * w[u].x, v[u].y * f * w[u].y, v[u].z * f * w[u].z, v[u].w * f * w[u].w);
                const size_t at = (size_t)t * (size_t)n + (size_t)i;
                *(uint2 *)(a.h16 + at) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
                if (a.h32) *(float4 *)(a.h32 + at) = y;
            }
        }
        if (t + (int)gridDim.x < a.n_tok) __syncthreads(); /* the next row's sum overwrites the parts of this one's */
    }
    if (SOURCE != DELTA_OWN &&
        channel_end(a.p, CH_ALLREDUCE)) { /* a sign of life crosses the bus: not with each short sum */
        const uint32_t sums = a.p.sequence->done[CH_ALLREDUCE];
        if (a.n_tok > 16 || (sums & 15) == 1) *(volatile uint32_t *)&a.p.heartbeat->sums = sums;
    }
}

/* ============================================================================================================
 * Products for few tokens
 *
 * Y^T = W X^T with the weights as the 16 rows of the MMA and the tokens as its 8 columns: 1..16 tokens cost the same reading of
 * W, which is all that counts. A block owns 16 rows of the result; its 8 warps share out the tiles of K (and of all experts) and
 * add up through shared memory in a fixed order.
 * ============================================================================================================ */

enum { GEMV_WARPS = 8, GEMV_THREADS = GEMV_WARPS * WARP };

/* FP4 tiles of a warp that are on their way at once. Four hide HBM's latency; GDDR7 needs less, and SM120's code more registers. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
enum { GEMV_AHEAD = 2 };
#else
enum { GEMV_AHEAD = 4 };
#endif

/* Some tiles of a row of tiles: a lane's part of each. */
template <int FMT, int N>
struct gemv_group {
    enum { VEC = TILE_BYTES(FMT) / 512 };
    uint4 c[N][VEC];
    uint2 s[N];
    /* Tiles i0 .. i0+N-1 of n; past the end the last one again, which is not used. */
    DEVICE_MEMBER void load(const uint8_t *codes, const uint8_t *scales, int i0, int n) {
        UNROLL for (int u = 0; u < N; u++) {
            const int i = min(i0 + u, n - 1);
            UNROLL for (int v = 0; v < VEC; v++) c[u][v] = ldg_stream(codes + (size_t)i * TILE_BYTES(FMT) + v * 512);
            s[u] = FMT == FMT_F16 ? make_uint2(0, 0) : *(const uint2 *)(scales + (size_t)i * TILE_SCALES);
        }
    }
};

/* acc (16, 8 * NT) += tiles tile .. tile+n-1 times columns 0 .. 64n-1 of x (rows x_stride halves apart, n_tok of them). Sums lack
 * device_matrix_scale. A group of tiles is on its way while another is multiplied. Columns that no matrix has meet weights of 0 and whatever
 * finite number follows in x; rows of tokens that are not there repeat the last, and nobody reads their sums. wait: x is what the
 * kernel before computes, and only the weights may be read before that is done. */
template <int FMT, int NT>
DEVICE void gemv_tiles(const struct device_matrix &w, size_t tile, int n, const uint16_t *x, size_t x_stride, int n_tok,
                       float acc[NT][4], bool wait) {
    constexpr int N = FMT == FMT_FP4 ? GEMV_AHEAD / NT : 1;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint8_t *codes = w.codes + tile * (size_t)TILE_BYTES(FMT) + (size_t)lane * 16;
    const uint8_t *scales = w.scales + tile * TILE_SCALES + (size_t)g * 8;
    const uint16_t *row[NT];
    UNROLL for (int k = 0; k < NT; k++) row[k] = x + (size_t)min(g + 8 * k, n_tok - 1) * x_stride + 8 * t;
    struct gemv_group<FMT, N> now, next;
    now.load(codes, scales, 0, n);
    if (wait) grid_dependency_wait();
    UNROLL_BY(1) for (int i0 = 0; i0 < n; i0 += N) {
        if (i0 + N < n) next.load(codes, scales, i0 + N, n);
        UNROLL for (int u = 0; u < N; u++) {
            if (i0 + u >= n) break;
            UNROLL for (int h = 0; h < 2; h++) {
                uint4 b[NT];
                UNROLL for (int k = 0; k < NT; k++) b[k] = *(const uint4 *)(row[k] + (i0 + u) * TILE_COLS + 32 * h);
                float part[NT][4] = {}, (*sum)[4] = FMT == FMT_Q8 ? part : acc;
                UNROLL for (int q = 0; q < 2; q++) {
                    uint32_t a[4];
                    expand<FMT>(now.c[u], now.s[u], t, 2 * h + q, a);
                    UNROLL for (int k = 0; k < NT; k++) {
                        uint32_t bb[2] = {q ? b[k].z : b[k].x, q ? b[k].w : b[k].y};
                        mma_f16(sum[k], a, bb);
                    }
                }
                if (FMT != FMT_Q8) continue;
                /* the block's scale belongs to rows g and g + 8 */
                const float d0 = half_to_f32((uint16_t)(now.s[u].x >> 16 * h)),
                            d1 = half_to_f32((uint16_t)(now.s[u].y >> 16 * h));
                UNROLL for (int i = 0; i < 4 * NT; i++) acc[i >> 2][i & 3] += (i & 2 ? d1 : d0) * part[i >> 2][i & 3];
            }
        }
        now = next;
    }
}

/* f with the format of a matrix as a constant. */
template <class F>
DEVICE void with_format(int fmt, F f) {
    if (fmt == FMT_FP4) f(std::integral_constant<int, FMT_FP4>());
    else if (fmt == FMT_Q8) f(std::integral_constant<int, FMT_Q8>());
    else f(std::integral_constant<int, FMT_F16>());
}

/* Experts, heads or one plain matrix, each with rows of x of its own. */
struct gemv_batch {
    struct device_matrix w;
    const uint16_t *x; /* of job j: x + j * x_job, rows x_stride halves apart */
    size_t x_stride, x_job;
    const int32_t *expert; /* (jobs) or NULL: job j is expert j */
    const float *weight;   /* (jobs, DECODE_MAX_TOKENS) factors of a job's result for a token; NULL: 1 */
    const int32_t *n_jobs; /* in device memory; NULL: max_jobs */
    int max_jobs;
};

/* The sum of all warps' acc for element i of the block's (16, 8 * NT) result, i < 128 * NT: register i / 32 % 4 of lane i % 32 of
 * n-tile i / 128, as the MMA lays them out. `red` (warps, 128 * NT). */
template <int NT>
DEVICE float *gemv_slot(float *red) { /* register r of n-tile k stands at WARP * (4 * k + r) */
    return red + (threadIdx.x >> 5) * (128 * NT) + (threadIdx.x & 31);
}
template <int NT>
DEVICE float gemv_sum(const float *red, int i, int first, int n) {
    float s = 0;
    for (int w = first; w < first + n; w++) s += red[w * (128 * NT) + i];
    return s;
}
DEVICE int gemv_row(int i) { return (i >> 2 & 7) + 8 * (i >> 6 & 1); }
DEVICE int gemv_token(int i) { return 8 * (i >> 7) + 2 * (i & 3) + (i >> 5 & 1); }

struct gemv_args {
    struct gemv_batch part[3];
    int n_part, n_tok;
    bool separate; /* part i makes result i, from one x; otherwise the parts are summed up */
    int batch;     /* independent results: job b of part 0 alone makes result b; 0: one result */
    uint16_t *y16; /* result b: (n_tok, n_out) at y + b * y_batch, rows y_stride apart: halves, */
    float *y32[3]; /* or, when not NULL, floats */
    size_t y_stride[3], y_batch;
};

DEVICE int gemv_jobs(const struct gemv_args &p, int i) {
    return p.batch ? 1 : p.part[i].n_jobs ? *p.part[i].n_jobs : p.part[i].max_jobs;
}

/* sum (gemv_slot) += weight * W x for the tiles at .. end-1 of row rt, counted through all jobs of a part. */
template <int FMT, int NT>
DEVICE void gemv_list(const struct gemv_args &p, const struct gemv_batch &q, int rt, int at, int end, float *sum,
                      bool early) {
    const int n_kt = q.w.n_kt, t = threadIdx.x & 3;
    while (at < end) {
        const int j = at / n_kt, k0 = at - j * n_kt, n = min(n_kt - k0, end - at);
        const int job = p.batch ? (int)blockIdx.y : j, e = q.expert ? q.expert[job] : job;
        float acc[NT][4] = {};
        gemv_tiles<FMT, NT>(q.w, tile_index(q.w, e, rt) + (size_t)k0, n, q.x + (size_t)job * q.x_job + k0 * TILE_COLS,
                            q.x_stride, p.n_tok, acc, early);
        const float scale = device_matrix_scale(q.w, e);
        UNROLL for (int k = 0; k < NT; k++) UNROLL for (int r = 0; r < 4; r++) {
            const size_t col = (size_t)job * DECODE_MAX_TOKENS + 8 * k + 2 * t + (r & 1);
            sum[WARP * (4 * k + r)] += (q.weight ? q.weight[col] * scale : scale) * acc[k][r];
        }
        at += n;
    }
}

/* y = sum over parts and jobs of weight * (W x + bias). Grid (tiles of rows, max(1, batch)), block 256. Bytes: every tile of the jobs
 * once, plus n_tok rows of x per block from L2. Memory-bound: 18 KB per block in flight, 2 blocks per SM; aim 80 % of copy bandwidth
 * for matrices of 8 MB and more (H200: its instruction rate allows 3 of 4.8 TB/s). The tiles of all jobs are dealt out to the warps
 * as one list; where no router chose them, the first are read before the kernel before has ended. */
template <int NT>
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_gemv_sum(const __grid_constant__ struct gemv_args p) {
    SHARED(float, red, GEMV_WARPS * 128 * NT);
    grid_dependency_launch();
    const int warp = threadIdx.x >> 5, b = blockIdx.y;
    int rt = blockIdx.x, first = 0, last = p.n_part, total = 0;
    if (p.separate) {
        while (rt >= p.part[first].w.n_rt) rt -= p.part[first++].w.n_rt;
        last = first + 1;
    }
    const bool early = !p.part[first].n_jobs;
    if (!early) grid_dependency_wait();
    for (int i = first; i < last; i++) total += gemv_jobs(p, i) * p.part[i].w.n_kt;
    /* this warp's share, counted from the first tile of part i */
    int from = total * warp / GEMV_WARPS, to = total * (warp + 1) / GEMV_WARPS;
    float *sum = gemv_slot<NT>(red); /* registers are short here */
    UNROLL for (int i = 0; i < 4 * NT; i++) sum[WARP * i] = 0;
    UNROLL_BY(1) for (int i = first; i < last; i++) {
        const struct gemv_batch &q = p.part[i];
        const int tiles = gemv_jobs(p, i) * q.w.n_kt, begin = max(from, 0), end = min(to, tiles);
        with_format(q.w.fmt, [&](auto fmt) { gemv_list<fmt.value, NT>(p, q, rt, begin, end, sum, early); });
        from -= tiles, to -= tiles;
    }
    __syncthreads(); /* some warp has had tiles, and waited: y is free */
    const float *bias = p.part[first].w.bias;
    for (int i = threadIdx.x; i < 128 * NT; i += GEMV_THREADS) {
        int row = rt * TILE_ROWS + gemv_row(i), tok = gemv_token(i);
        if (row >= p.part[first].w.n_out || tok >= p.n_tok) continue;
        float v = gemv_sum<NT>(red, i, 0, GEMV_WARPS) + (bias ? bias[row] : 0.0f);
        size_t at = (size_t)b * p.y_batch + (size_t)tok * p.y_stride[first] + (size_t)row;
        if (p.y32[first]) p.y32[first][at] = v;
        else p.y16[at] = clamped_f16(v);
    }
}

/* Hidden values are stored divided by this: SwiGLU's outliers are the largest numbers of a forward pass. Exact, a power of two. */
#define HIDDEN_SCALE 16.0f

DEVICE float silu_mul(float g, float u) { return g / (1.0f + __expf(-g)) * u; }

/* The first half of a feed-forward: y (job, DECODE_MAX_TOKENS, n_ff) = silu(gate x) * (up x) / HIDDEN_SCALE, for every token and every job's
 * expert: tokens that did not choose the expert cost nothing and get the weight 0 later. Part 0: routed experts, part 1: the shared
 * one. Grid (tiles of rows, jobs of part 0 at most + jobs of part 1), block 256: four warps for gate, four for up. Bytes and aim as
 * k_gemv_sum. */
struct gemv_glu_args {
    struct gemv_batch gate[2];
    struct device_matrix up[2];
    uint16_t *y[2];
    size_t y_stride[2];
    int n_part, n_tok;
};

template <int NT>
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_gemv_glu(const __grid_constant__ struct gemv_glu_args p) {
    SHARED(float, red, GEMV_WARPS * 128 * NT);
    grid_dependency_launch();
    int part = (int)blockIdx.y >= p.gate[0].max_jobs, job = part ? 0 : blockIdx.y, rt = blockIdx.x;
    const struct gemv_batch &q = p.gate[part];
    const int warp = threadIdx.x >> 5, half = GEMV_WARPS / 2;
    const bool early = !q.n_jobs && rt < q.w.n_rt;
    if (!early) grid_dependency_wait();
    if (rt >= q.w.n_rt || (q.n_jobs && job >= *q.n_jobs)) return;
    const struct device_matrix &w = warp < half ? q.w : p.up[part];
    int e = q.expert ? q.expert[job] : 0, k0 = w.n_kt * (warp % half) / half, k1 = w.n_kt * (warp % half + 1) / half;
    float acc[NT][4] = {};
    with_format(w.fmt, [&](auto fmt) {
        if (k0 < k1)
            gemv_tiles<fmt.value, NT>(w, tile_index(w, e, rt) + (size_t)k0, k1 - k0, q.x + k0 * TILE_COLS, q.x_stride,
                                      p.n_tok, acc, early);
    });
    UNROLL for (int i = 0; i < 4 * NT; i++) gemv_slot<NT>(red)[WARP * i] = acc[i >> 2][i & 3];
    __syncthreads();
    float gate_scale = device_matrix_scale(q.w, e), up_scale = device_matrix_scale(p.up[part], e);
    for (int i = threadIdx.x; i < 128 * NT; i += GEMV_THREADS) {
        int row = rt * TILE_ROWS + gemv_row(i), tok = gemv_token(i);
        if (row >= q.w.n_out || tok >= p.n_tok) continue;
        float g = gemv_sum<NT>(red, i, 0, half) * gate_scale, u = gemv_sum<NT>(red, i, half, half) * up_scale;
        p.y[part][((size_t)job * DECODE_MAX_TOKENS + (size_t)tok) * p.y_stride[part] + (size_t)row] =
            clamped_f16(silu_mul(g, u) / HIDDEN_SCALE);
    }
}

static void gemv_sum_launch(const struct gemv_args *p, cudaStream_t s) {
    int n_rt = p->part[0].w.n_rt;
    for (int i = 1; p->separate && i < p->n_part; i++) n_rt += p->part[i].w.n_rt;
    dim3 grid = dim3(n_rt, p->batch ? p->batch : 1);
    if (p->n_tok <= 8) LAUNCH_PDL(k_gemv_sum<1>, grid, GEMV_THREADS, 0, s, *p);
    else LAUNCH_PDL(k_gemv_sum<2>, grid, GEMV_THREADS, 0, s, *p);
}

static void gemv_glu_launch(const struct gemv_glu_args *p, cudaStream_t s) {
    int n_rt = p->gate[0].w.n_rt;
    if (p->n_part > 1 && p->gate[1].w.n_rt > n_rt) n_rt = p->gate[1].w.n_rt;
    dim3 grid = dim3(n_rt, p->gate[0].max_jobs + p->n_part - 1);
    if (p->n_tok <= 8) LAUNCH_PDL(k_gemv_glu<1>, grid, GEMV_THREADS, 0, s, *p);
    else LAUNCH_PDL(k_gemv_glu<2>, grid, GEMV_THREADS, 0, s, *p);
}

/* ============================================================================================================
 * Router
 *
 * Chooses the experts of each token. Decode has one kernel for logits, choice and job list; prefill has k_route_logits
 * and k_route_prefill in the next section.
 * ============================================================================================================ */

struct route_args {
    const uint16_t *w16; /* (n_expert, n_embd) BF16, */
    const float *w32;    /* or F32 */
    const float *bias;   /* (n_expert) added for the choice only; NULL: none */
    const float *x;      /* (n_tok, n_embd) */
    float *logits;       /* (n_tok, n_expert) */
    int32_t *id;         /* (n_tok, k) the chosen experts, best first */
    float *weight;       /* (n_tok, k) */
    int n_tok, n_embd, n_expert, k, n_group, n_group_used, softmax, norm;
    float factor;
    /* for few tokens: the distinct experts as jobs of k_gemv_glu and k_gemv_sum */
    uint32_t *arrived; /* 0 between launches */
    int32_t *n_jobs, *job_expert;
    float *job_weight; /* (jobs, DECODE_MAX_TOKENS) */
};

/* Orders floats as unsigned numbers; NaN counts as the smallest. Never 0. */
DEVICE uint32_t float_key(float v) {
    uint32_t u = __float_as_uint(v == v ? v : -INFINITY);
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}
DEVICE float key_float(uint32_t u) { return __uint_as_float(u >> 31 ? u ^ 0x80000000u : ~u); }

/* One warp chooses the experts of token t. room (warps, 2 n_expert) words, shared: scores and what is picked from. The rule is
 * route_token's in moe.c: DeepSeek-V3 (arXiv 2412.19437, 2.1.2), ties to the lower id, NaN last. */
DEVICE void route_warp(const struct route_args &p, int t, float *room) {
    const int lane = threadIdx.x & 31, n = p.n_expert, per = n / p.n_group;
    const float *logits = p.logits + (size_t)t * (size_t)n;
    float *score = room + (threadIdx.x >> 5) * 2 * n;
    uint32_t *pick = (uint32_t *)score + n;
    float top = -INFINITY, sum = 0;
    for (int e = lane; e < n; e += WARP) top = fmaxf(top, load_l2(logits + e));
    top = warp_max(top);
    for (int e = lane; e < n; e += WARP) {
        float l = load_l2(logits + e), v = p.softmax ? expf(l - top) : 1.0f / (1.0f + expf(-l));
        score[e] = v, sum += v;
    }
    sum = p.softmax ? warp_sum(sum) : 1.0f;
    for (int e = lane; e < n; e += WARP)
        score[e] /= sum, pick[e] = float_key(score[e] + (p.bias ? p.bias[e] : 0.0f) + 0.0f);
    __syncwarp();
    if (p.n_group > 1) { /* lane g: group g by the sum of its two best; all but the best groups are out */
        const int e0 = lane * per, e1 = lane < p.n_group ? e0 + per : e0;
        float a = -INFINITY, b = -INFINITY;
        for (int e = e0; e < e1; e++) {
            float v = key_float(pick[e]);
            b = fmaxf(b, fminf(a, v)), a = fmaxf(a, v);
        }
        const float mine = per > 1 ? a + b : a;
        int better = 0;
        for (int g = 0; g < p.n_group; g++) {
            float o = __shfl_sync(0xFFFFFFFFu, mine, g);
            better += o > mine || (o == mine && g < lane);
        }
        for (int e = e0; e < e1 && better >= p.n_group_used; e++) pick[e] = float_key(-INFINITY);
        __syncwarp();
    }
    float chosen = 0, my_weight = 0; /* the sum of the weights, in the order of choice */
    int my_id = 0;
    for (int i = 0; i < p.k; i++) {
        uint32_t best = 0;
        int id = n;
        for (int e = lane; e < n; e += WARP) /* 0 marks the taken ones */
            if (pick[e] > best) best = pick[e], id = e;
        const uint32_t top_key = __reduce_max_sync(0xFFFFFFFFu, best);
        id = (int)__reduce_min_sync(0xFFFFFFFFu, best == top_key ? (uint32_t)id : ~0u);
        chosen += score[id];
        if (lane == i) my_id = id, my_weight = score[id];
        if (lane == (id & 31)) pick[id] = 0; /* only this lane reads it */
    }
    float f = p.norm ? p.factor / (p.softmax ? chosen : chosen + 1e-20f) : p.factor;
    const size_t at = (size_t)t * (size_t)p.k + (size_t)lane;
    if (lane < p.k) p.id[at] = my_id, p.weight[at] = my_weight * f;
    __syncwarp(); /* score has been read: the next token's goes there */
}

enum { ROUTE_WARPS = 4, ROUTE_ROWS = GEMV_WARPS / ROUTE_WARPS }; /* warps of an expert's row, rows of a block */
enum { ROUTE_AHEAD = 4, ROUTE_STEP = 4 * WARP * ROUTE_WARPS };   /* reads at once, columns of each */

/* Four columns of an expert's row; zeros where there are none. */
DEVICE float4 route_weights(const struct route_args &p, int e, int col) {
    const size_t at = (size_t)e * (size_t)p.n_embd + (size_t)col;
    if (e >= p.n_expert || col >= p.n_embd) return make_float4(0, 0, 0, 0);
    if (p.w32) return *(const float4 *)(p.w32 + at);
    const uint2 b = *(const uint2 *)(p.w16 + at);
    return make_float4(__uint_as_float(b.x << 16), __uint_as_float(b.x & 0xFFFF0000u), __uint_as_float(b.y << 16),
                       __uint_as_float(b.y & 0xFFFF0000u));
}

/* Whether the grid's other blocks have all been here: then what they wrote before is visible. *arrived is 0 before a launch. */
DEVICE bool last_block(uint32_t *arrived) {
    __threadfence();
    __syncthreads(); /* all threads wrote, the first tells */
    return __syncthreads_or(!threadIdx.x && atom_add_acq_rel(arrived, 1) == gridDim.x - 1);
}

/* Router of 1..16 tokens: logits, choice and jobs. Grid ceil(n_expert / 2), block 256: four warps an expert's row, whose first 2048
 * columns are read before the kernel before has ended; the block that ends last chooses. Bytes: the router's weights once (1 to
 * 8 MB); mostly the latency of two passes, about 4 us. */
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_route_decode(const __grid_constant__ struct route_args p) {
    SHARED(float, sums, GEMV_WARPS *DECODE_MAX_TOKENS);
    DYN_SMEM(float, room); /* 2 n_expert words per warp */
    grid_dependency_launch();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int e0 = blockIdx.x * ROUTE_ROWS, e = e0 + warp / ROUTE_WARPS;
    int col = 4 * (lane + WARP * (warp % ROUTE_WARPS));
    float acc[DECODE_MAX_TOKENS] = {};
    float4 w[ROUTE_AHEAD];
    UNROLL for (int u = 0; u < ROUTE_AHEAD; u++) w[u] = route_weights(p, e, col + ROUTE_STEP * u);
    grid_dependency_wait();
    for (; col < p.n_embd; col += ROUTE_STEP * ROUTE_AHEAD) {
        UNROLL for (int t = 0; t < DECODE_MAX_TOKENS; t++) UNROLL for (int u = 0; u < ROUTE_AHEAD; u++) {
            const int i = col + ROUTE_STEP * u;
            if (t >= p.n_tok || i >= p.n_embd) continue;
            const float4 x = *(const float4 *)(p.x + (size_t)t * (size_t)p.n_embd + i);
            acc[t] += w[u].x * x.x + w[u].y * x.y + w[u].z * x.z + w[u].w * x.w;
        }
        UNROLL for (int u = 0; u < ROUTE_AHEAD; u++) w[u] = route_weights(p, e, col + ROUTE_STEP * (ROUTE_AHEAD + u));
    }
    UNROLL for (int t = 0; t < DECODE_MAX_TOKENS; t++) {
        const float v = warp_sum(acc[t]);
        if (!lane) sums[warp * DECODE_MAX_TOKENS + t] = v;
    }
    __syncthreads();
    if (threadIdx.x < ROUTE_ROWS * DECODE_MAX_TOKENS) {
        const int t = threadIdx.x % DECODE_MAX_TOKENS, r = threadIdx.x / DECODE_MAX_TOKENS;
        float v = 0;
        for (int k = 0; k < ROUTE_WARPS; k++) v += sums[(r * ROUTE_WARPS + k) * DECODE_MAX_TOKENS + t];
        if (t < p.n_tok && e0 + r < p.n_expert) p.logits[(size_t)t * (size_t)p.n_expert + e0 + r] = v;
    }
    if (!last_block(p.arrived)) return;
    for (int t = warp; t < p.n_tok; t += GEMV_WARPS) route_warp(p, t, room);
    __threadfence_block();
    __syncthreads();
    int *job_of = (int *)room; /* (n_expert): 0 or 1, then the job */
    for (int i = threadIdx.x; i < p.n_expert; i += GEMV_THREADS) job_of[i] = 0;
    __syncthreads();
    const int n_slots = p.n_tok * p.k;
    for (int i = threadIdx.x; i < n_slots; i += GEMV_THREADS) job_of[p.id[i]] = 1;
    __syncthreads();
    if (!warp) {
        int n = 0;
        for (int i0 = 0; i0 < p.n_expert; i0 += WARP) {
            bool used = i0 + lane < p.n_expert && job_of[i0 + lane];
            uint32_t all = __ballot_sync(0xFFFFFFFFu, used);
            int job = n + __popc(all & ((1u << lane) - 1));
            if (used) job_of[i0 + lane] = job, p.job_expert[job] = i0 + lane;
            n += __popc(all);
        }
        if (!lane) *p.n_jobs = n, *p.arrived = 0;
    }
    /* at most n_slots jobs */
    for (int i = threadIdx.x; i < n_slots * DECODE_MAX_TOKENS; i += GEMV_THREADS) p.job_weight[i] = 0;
    __syncthreads(); /* jobs have numbers, and the weights are zeros */
    for (int i = threadIdx.x; i < n_slots; i += GEMV_THREADS)
        p.job_weight[job_of[p.id[i]] * DECODE_MAX_TOKENS + i / p.k] = p.weight[i];
}

static void route_decode_launch(const struct route_args *p, cudaStream_t s) {
    int room = GEMV_WARPS * 2 * p->n_expert * (int)sizeof(float);
    if (room > 32 << 10) /* above 48 KB with the static arrays */
        cudaFuncSetAttribute(k_route_decode, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
    unsigned blocks = (unsigned)((p->n_expert + ROUTE_ROWS - 1) / ROUTE_ROWS);
    LAUNCH_PDL(k_route_decode, blocks, GEMV_THREADS, (size_t)room, s, *p);
}

/* ============================================================================================================
 * Products for more than 16 tokens
 *
 * Y^T = W X^T: weights are the M side of the MMA, tokens the N side. One kernel template for all formats, dense, grouped by
 * expert and batched. Weights and tokens go through shared memory in tiles of 64 columns; nothing here depends on the order in
 * which blocks run.
 * ============================================================================================================ */

enum { TN = LIST_TILE };
enum { FMT_A4 = 3 }; /* not a storage: the kernel that multiplies FMT_FP4 weights by FP4 tokens */

/* Tokens in FP4, by quantize_fp4: value = e2m1 * ue4m3 * scale. Nibbles lie as in FMT_FP4 inside each 8 columns; columns from n_in
 * to the row's end are zeros. */
struct fp4_rows {
    uint8_t *codes;  /* (row, n_kt * 32 bytes): columns 64c + 8j.. at 32 c + 4 j */
    uint8_t *scales; /* (row, FP4_SCALE_BYTES(n_in)): columns 16b.. at b */
    float *scale;    /* (row) */
};

struct gemm_args {
    struct device_matrix w, w2; /* w2: the `up` matrix of a gated product */
    const uint16_t *x;          /* F16 tokens, x_stride halves (a multiple of 8) from row to row; 16-byte aligned */
    size_t x_stride;
    struct fp4_rows xq;  /* instead of x unless its pointers are NULL */
    const int32_t *rows; /* row of x at a sorted position; NULL: the position itself */
    /* Grouped: tile i has the positions tile_first[i].. (tile_count[i] <= TN of them) of expert tile_expert[i], i < *n_tiles <=
     * max_tiles; the lists lie on the device. NULL: dense, positions 0..n_tok-1. */
    const int32_t *tile_expert, *tile_first, *tile_count, *n_tiles;
    int max_tiles, n_tok;
    void *y; /* (position, y_stride >= n_out elements) F16, or F32 with y_f32; 16-byte aligned */
    size_t y_stride;
    int y_f32;
    int batch; /* > 1, dense only: matrix z of w meets x + z * x_batch and y + z * y_batch (elements; x_batch % 8 == 0) */
    size_t x_batch, y_batch;
};

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
enum { SM_SHARED = 102400 };
#else
enum { SM_SHARED = 233472 };
#endif

/* Sizes of one instance. A stage is KT k64-tiles: codes (2 WM, CODE), scales (2 WM, SCALE), tokens (N, X). */
template <int F, int GLU, int WM, int WN, int STAGES, int KT = 1>
struct gemm_shape {
    static constexpr int ROWS = (GLU ? 16 : 32) * WM, N = 64 * WN, THREADS = 32 * WM * WN;
    static constexpr int CODE = TILE_BYTES(F == FMT_A4 ? (int)FMT_FP4 : F);
    static constexpr int SCALE = F == FMT_F16 ? 0 : (int)TILE_SCALES, X = F == FMT_A4 ? 32 : 128;
    static constexpr int SCALE_AT = 2 * WM * CODE, X_AT = SCALE_AT + 2 * WM * SCALE, SLOT = X_AT + N * X;
    /* A4: behind the ring token scales of 4 k64-tiles each (16 bytes a token), two of them: see `load` */
    static constexpr int RING = STAGES * KT * SLOT, BYTES = RING + (F == FMT_A4 ? 2 * N * 16 : 0);
    /* Blocks of an SM: as many as shared memory holds, up to 16 warps; 128 registers a thread, or more where fewer fit. */
    static constexpr int FIT = SM_SHARED / (BYTES + 1024), BLOCKS = FIT * WM * WN < 16 ? FIT : 16 / (WM * WN);
    static_assert(BYTES <= 101376, "shared memory of SM120");
    static_assert(F != FMT_A4 || (STAGES - 1) * KT <= 4, "the two buffers of token scales");

    static dim3 grid(const struct gemm_args *g) {
        int tiles = g->tile_expert ? g->max_tiles * (TN / N) : (g->n_tok + N - 1) / N;
        return dim3((g->w.n_out + ROWS - 1) / ROWS, tiles, max(g->batch, 1));
    }
};

/* Results row..row+3 of a position, as far as they exist; `whole`: all do, and lie at a multiple of 4 elements. */
DEVICE void store_quad(const struct gemm_args &p, int position, int row, bool whole, float4 v) {
    const size_t at = blockIdx.z * p.y_batch + (size_t)position * p.y_stride + row;
    float *f = (float *)p.y + at;
    uint16_t *h = (uint16_t *)p.y + at;
    if (whole && p.y_f32) *(float4 *)f = v;
    else if (whole) *(uint2 *)h = make_uint2(clamped_f16x2(v.x, v.y), clamped_f16x2(v.z, v.w));
    else UNROLL for (int i = 0; i < 4 && row + i < p.w.n_out; i++) {
            if (p.y_f32) f[i] = (&v.x)[i];
            else h[i] = (uint16_t)clamped_f16x2((&v.x)[i], 0);
        }
}

/* x, of which the compiler knows nothing more: it is kept in a register instead of being computed again in a loop. */
DEVICE uint32_t keep(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* y (position, n_out) = x w^T, or silu(x w^T) * (x w2^T) / HIDDEN_SCALE with GLU. A warp computes 32 rows (with GLU 16 of each
 * matrix, so that a lane has both factors) x 64 tokens, a block 32 WM rows x 64 WN tokens, of which `count` exist. The warps beside
 * each other share them evenly, and of its 8 n8-tiles a warp computes those that it needs, in pairs (Q8: singly). Grid (row
 * blocks, token tiles, batch), block 32 WM WN.
 * Bytes of a k64-tile from L2: 32 WM * (36 FP4, 68 Q8, 128 F16) + 64 WN * 128 (A4: 36), for 32 WM * 64 WN * 64 products. Limit:
 * the rate of mma.sync (sm_90: 1024 products a clock and SM). A warp's k64-tile is 64 MMAs, 512 clocks of a quarter SM, beside 350
 * other instructions for FP4 (180 of them the expansion), 190 for F16, 18 to 24 loads from shared memory that take 70 clocks of the
 * SM: 50 to 60 % are to be expected. Groups of up to 16 tokens: the expansion, or the weights' bandwidth.
 * A4: 16 MMAs of 16 clocks (SM120), 150 other instructions, 36 bytes a row or token: the rate of L2, then that of the MMA. */
template <int F, int GLU, int WM, int WN, int STAGES, int KT>
__global__ void __launch_bounds__(32 * WM * WN, (gemm_shape<F, GLU, WM, WN, STAGES, KT>::BLOCKS))
    gemm_kernel(const __grid_constant__ struct gemm_args p) {
    using S = gemm_shape<F, GLU, WM, WN, STAGES, KT>;
    constexpr int NT = 8;
    DYN_SMEM(uint8_t, smem);
    grid_dependency_launch();
    grid_dependency_wait();
    constexpr int PER = TN / S::N; /* blocks of a tile of the list */
    const int n_kt = p.w.n_kt;
    if (p.tile_expert && (int)blockIdx.y / PER >= *p.n_tiles) return;
    int e, first, count; /* the expert, and its positions; count may be negative */
    auto place = [&] {
        e = blockIdx.z, first = blockIdx.y * S::N, count = p.n_tok - first;
        if (p.tile_expert) {
            const int i = blockIdx.y / PER, skip = blockIdx.y % PER * S::N;
            e = p.tile_expert[i], first = p.tile_first[i] + skip, count = p.tile_count[i] - skip;
        }
        count = min(count, S::N);
    };
    place();
    if (count <= 0) return;
    auto x_row = [&](int token) -> size_t {
        const int at = first + min(token, count - 1); /* those behind the last repeat it */
        return p.rows ? p.rows[at] : at;
    };
    /* Row tiles in shared memory: 2 WM consecutive ones, or with GLU WM of w and then WM of w2. Offsets count 16 bytes: 32 bits
     * reach 64 GB. What depends on the thread only is computed again for every tile: registers are scarce in the loop. */
    const int rt0 = blockIdx.x * (S::ROWS / 16);
    const uint32_t tile0 = keep(tile_index(p.w, e, rt0));
    const uint32_t tile_end = keep(tile_index(p.w, e, p.w.n_rt));
    constexpr int CH = S::CODE / 16, A_ITER = 2 * WM * CH / S::THREADS, A_STEP = S::THREADS / CH;
    static_assert(A_ITER == 1 || WM % A_STEP == 0, "the halves of a gated block");
    /* Tokens: a thread copies 16 bytes of every X_STEP-th one; those beyond the group are left as they are, for columns that
     * nobody keeps. */
    constexpr int XC = S::X / 16, X_ITER = S::N * XC / S::THREADS, X_STEP = S::THREADS / XC;
    static_assert(X_ITER * S::THREADS == S::N * XC, "all threads copy tokens");
    uint32_t x_at[X_ITER], xs_at = 0;
    UNROLL for (int i = 0; i < X_ITER; i++) {
        size_t row = x_row((int)threadIdx.x / XC + i * X_STEP);
        size_t at = F == FMT_A4 ? row * n_kt * 2 : (row * p.x_stride + blockIdx.z * p.x_batch) / 8;
        x_at[i] = keep(at + threadIdx.x % XC);
    }
    if (F == FMT_A4) xs_at = keep(x_row(threadIdx.x) * ((n_kt + 3) / 4));

    auto load = [&](uint8_t *to, int c_in) {
        if (c_in >= n_kt) return;
        const int tid = keep(threadIdx.x);
        UNROLL for (int i = 0; i < A_ITER; i++) { /* codes: of every A_STEP-th tile */
            const int tile = tid / CH + i * A_STEP;
            const bool up = GLU && (A_ITER > 1 ? i >= A_ITER / 2 : tile >= WM);
            const uint32_t at = tile0 + (tile - (up ? WM : 0)) * n_kt;
            cp_async16(to + tid * 16 + i * S::THREADS * 16,
                       (up ? p.w2 : p.w).codes + (size_t)((at + c_in) * CH + tid % CH) * 16, at < tile_end);
        }
        if (S::SCALE > 0 && tid < 8 * WM) { /* scales: 16 of a tile's 64 bytes */
            const bool up = GLU && tid / 4 >= WM;
            const uint32_t at = tile0 + (tid / 4 - (up ? WM : 0)) * n_kt;
            cp_async16(to + S::SCALE_AT + tid * 16, (up ? p.w2 : p.w).scales + (size_t)((at + c_in) * 4 + tid % 4) * 16,
                       at < tile_end);
        }
        /* The swizzle keeps the 16-byte reads of a quarter warp (two tokens, four chunks; ldmatrix: eight tokens, one chunk)
         * off each other's banks. */
        const int xc = tid % XC, token = tid / XC;
        const int chunk = F == FMT_A4 ? xc ^ (token >> 2 & 1) : xc ^ (token & 1) << 2;
        const uint8_t *x = F == FMT_A4 ? p.xq.codes : (const uint8_t *)p.x;
        const bool in = F == FMT_A4 || c_in * 64 + xc * 8 < p.w.n_in;
        UNROLL for (int i = 0, t = token; i < X_ITER; i++, t += X_STEP) if (t < count)
            cp_async16(to + S::X_AT + t * S::X + chunk * 16, x + (size_t)(x_at[i] + c_in * XC) * 16, in);
        /* Scales of tiles c_in..c_in+3. The buffer's last reader was tile c_in-5; at most 4 tiles are loaded ahead of the one in
         * work, so all warps have passed a barrier since. */
        if (F == FMT_A4 && !(c_in & 3) && tid < count)
            cp_async16(smem + S::RING + ((c_in >> 2 & 1) * S::N + tid) * 16,
                       p.xq.scales + (size_t)(xs_at + (c_in >> 2)) * 16);
    };

    float acc[2][NT][4] = {};
    const int n_live = keep((count + 8 * WN - 1) / (8 * WN)); /* n8-tiles a warp */
    constexpr int m_step = GLU ? WM : 1;                      /* from a warp's first row tile to its second */

    auto work = [&](const uint8_t *s, int c) {
        constexpr int VEC = S::CODE / 512;
        const int tid = keep(threadIdx.x), lane = tid & 31, g = lane >> 2, t = lane & 3;
        const int m0 = (tid >> 5) % WM * (GLU ? 1 : 2), n0 = (tid >> 5) / WM * n_live * 8;
        const uint8_t *code = s + m0 * S::CODE + lane * 16, *scale = s + S::SCALE_AT + m0 * S::SCALE + g * 8;
        if constexpr (F == FMT_A4) {
#ifdef HAVE_FP4_MMA
            __align__(16) uint32_t a[2][4];
            uint32_t sfa[2];
            UNROLL for (int m = 0; m < 2; m++) {
                *(uint4 *)a[m] = *(const uint4 *)(code + m * m_step * S::CODE);
                /* lanes of t 0 supply row g, of t 1 row g + 8 */
                sfa[m] = *(const uint32_t *)(scale + m * m_step * S::SCALE + (t & 1) * 4);
            }
            const uint8_t *b_row = s + S::X_AT + (n0 + (lane >> 4) * 8 + (lane & 7)) * 32;
            const uint8_t *sfb = smem + S::RING + ((c >> 2 & 1) * S::N + n0 + g) * 16 + (c & 3) * 4;
            UNROLL for (int n = 0; n < NT; n += 2) {
                if (n >= n_live) break;
                uint32_t b[4];
                ldmatrix_x4(b, b_row + n * 256 + ((lane >> 3 & 1) ^ (lane >> 2 & 1)) * 16);
                UNROLL for (int i = 0; i < 2; i++) UNROLL for (int m = 0; m < 2; m++)
                    mma_nvfp4(acc[m][n + i], a[m], b + 2 * i, sfa[m], *(const uint32_t *)(sfb + (n + i) * 128));
            }
#endif
        } else {
            const uint8_t *xb = s + S::X_AT + (n0 + g) * 128 + t * 16;
            uint4 v[2][VEC];
            uint2 sc[2];
            UNROLL for (int m = 0; m < 2; m++) sc[m] =
                S::SCALE > 0 ? *(const uint2 *)(scale + m * m_step * S::SCALE) : make_uint2(0, 0);
            UNROLL for (int h = 0; h < 2; h++) { /* 32 columns each */
                uint32_t a[2][2][4];             /* row tile, k16-step, fragment */
                UNROLL for (int m = 0; m < 2; m++) {
                    UNROLL for (int i = VEC * h / 2; i < (VEC * (h + 1)) / 2 + (VEC == 1 && !h); i++) v[m][i] =
                        *(const uint4 *)(code + m * m_step * S::CODE + i * 512);
                    UNROLL for (int k = 0; k < 2; k++) expand<F>(v[m], sc[m], t, 2 * h + k, a[m][k]);
                }
                UNROLL for (int n = 0; n < NT; n++) {
                    if ((F == FMT_Q8 || !(n & 1)) && n >= n_live) break;
                    uint4 q = *(const uint4 *)(xb + n * 1024 + ((h ^ (g & 1)) << 6));
                    uint32_t b[2][2] = {{q.x, q.y}, {q.z, q.w}};
                    if (F == FMT_Q8) { /* the scale meets the F32 sum of its 32 columns: exact products */
                        float d[2][4] = {};
                        UNROLL for (int k = 0; k < 2; k++) UNROLL for (int m = 0; m < 2; m++)
                            mma_f16(d[m], a[m][k], b[k]);
                        UNROLL for (int i = 0; i < 8; i++) {
                            uint32_t f = i & 2 ? sc[i >> 2].y : sc[i >> 2].x;
                            acc[i >> 2][n][i & 3] += d[i >> 2][i & 3] * half_to_f32((uint16_t)(f >> 16 * h));
                        }
                    } else
                        UNROLL for (int k = 0; k < 2; k++) UNROLL for (int m = 0; m < 2; m++)
                            mma_f16(acc[m][n], a[m][k], b[k]);
                }
            }
        }
    };

    for (int c = 0; c < (STAGES - 1) * KT; c++) {
        load(smem + c * S::SLOT, c);
        if (c % KT == KT - 1) cp_async_commit();
    }
    for (int c = 0, slot = 0; c < n_kt; c += KT) {
        cp_async_wait<STAGES - 2>();
        __syncthreads(); /* all threads' copies of this stage have landed; all warps are done with the one before, now refilled */
        for (int k = 0; k < KT; k++)
            load(smem + (slot ? slot : S::RING) + (k - KT) * S::SLOT, c + (STAGES - 1) * KT + k);
        cp_async_commit();
        for (int k = 0; k < KT && c + k < n_kt; k++) work(smem + slot + k * S::SLOT, c + k);
        slot = slot + KT * S::SLOT == S::RING ? 0 : slot + KT * S::SLOT;
    }

    /* Out through shared memory, for whole sectors: (N tokens, 16 WM rows) F32 at a time, one of every warp's row tiles.
     * acc[m][n][q]: row tile m, row g + 8 (q >> 1), token 8n + 2t + (q & 1). */
    constexpr int PITCH = 16 * WM + 4, QUADS = 4 * WM; /* + 4: lanes of different t meet different banks */
    static_assert(S::N * PITCH * 4 <= S::RING, "the results' tile");
    place(); /* again, rather than kept through the loop */
    const int tid = threadIdx.x, g = tid >> 2 & 7, t = tid & 3, wm = (tid >> 5) % WM, m0 = GLU ? wm : 2 * wm;
    const int n0 = (tid >> 5) / WM * n_live * 8;
    const float undo = F == FMT_A4 ? 1.0f / 128.0f : 1.0f; /* device_matrix.unit is for fp4_pair and fp4_scale */
    const float f0 = undo * device_matrix_scale(p.w, e), f1 = GLU ? undo * device_matrix_scale(p.w2, e) : f0;
    const bool whole = !((p.w.n_out | p.y_stride | p.y_batch) & 3);
    float *tile = (float *)smem;
    UNROLL for (int m = 0; m < (GLU ? 1 : 2); m++) {
        __syncthreads(); /* the ring, then the tile before, has been read */
        UNROLL for (int half = 0; half < 2; half++) {
            size_t row = (rt0 + m0 + m) * 16 + g + 8 * half, at = (size_t)e * p.w.n_out + row;
            bool in = row < (size_t)p.w.n_out;
            float b0 = p.w.bias && in ? p.w.bias[at] : 0.0f, b1 = GLU && p.w2.bias && in ? p.w2.bias[at] : 0.0f;
            UNROLL for (int i = 0; i < 2 * NT; i++) {
                if (i >= 2 * n_live) break; /* what follows is the next warp's */
                const int token = n0 + (i >> 1) * 8 + 2 * t + (i & 1), q = 2 * half + (i & 1);
                const float fx = F == FMT_A4 ? p.xq.scale[x_row(token)] : 1.0f;
                float v = acc[m][i >> 1][q] * (f0 * fx) + b0;
                if (GLU) v = silu_mul(v, acc[1][i >> 1][q] * (f1 * fx) + b1) / HIDDEN_SCALE;
                tile[token * PITCH + wm * 16 + g + 8 * half] = v;
            }
        }
        __syncthreads(); /* the tile is written */
        const int quad = tid % QUADS, row = (rt0 + (GLU ? quad / 4 : quad / 4 * 2 + m)) * 16 + quad % 4 * 4;
        for (int token = tid / QUADS; token < count && row < p.w.n_out; token += S::THREADS / QUADS)
            store_quad(p, first + token, row, whole, *(const float4 *)(tile + token * PITCH + quad * 4));
    }
}

template <int F, int GLU, int WM, int WN, int STAGES, int KT = 1>
static void gemm_launch(const struct gemm_args *g, cudaStream_t s) {
    using S = gemm_shape<F, GLU, WM, WN, STAGES, KT>;
    cudaFuncSetAttribute(gemm_kernel<F, GLU, WM, WN, STAGES, KT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         S::BYTES);
    const dim3 grid = S::grid(g);
    if (grid.y) LAUNCH_PDL((gemm_kernel<F, GLU, WM, WN, STAGES, KT>), grid, dim3(S::THREADS), S::BYTES, s, *g);
}

/* The big block (8 warps, 256 x 64 or 128 x 128) where it fills the device, else 128 rows x 64 tokens by 4 warps. FP4 weights are
 * 3.5 times thinner than tokens, so the fewest bytes are those of a tall block; the others are square. */
template <int F, int WM, int WN, int STAGES, int SMALL_STAGES>
static void gemm_choose(const struct gemm_args *g, int glu, cudaStream_t s) {
    int device = 0, n_sm = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device);
    const dim3 b = (glu ? gemm_shape<F, 1, WM, WN, STAGES>::grid : gemm_shape<F, 0, WM, WN, STAGES>::grid)(g);
    const bool big = g->tile_expert || b.x * b.y * b.z >= 2u * n_sm;
    if (glu) (big ? gemm_launch<F, 1, WM, WN, STAGES> : gemm_launch<F, 1, 4, 1, SMALL_STAGES>)(g, s);
    else (big ? gemm_launch<F, 0, WM, WN, STAGES> : gemm_launch<F, 0, 4, 1, SMALL_STAGES>)(g, s);
}

/* Products: y = w x, or silu(w x) * (w2 x) / HIDDEN_SCALE with `glu` (w2 of w's shape and format). Tokens are halves or, for FP4
 * weights and not batched, FP4: SM120 only, elsewhere the kernel leaves zero sums. */
static void gemm_prefill(const struct gemm_args *g, int glu, cudaStream_t s) {
    /* stages: SM120 has 100 KB an SM (one block of the big kind, two of the small), sm_90 228 KB (two and four) */
    if (g->xq.codes) gemm_choose<FMT_A4, 4, 2, 5, 5>(g, glu, s);
    else if (g->w.fmt == FMT_FP4) gemm_choose<FMT_FP4, 8, 1, 4, 3>(g, glu, s);
    else if (g->w.fmt == FMT_Q8) gemm_choose<FMT_Q8, 4, 2, 4, 2>(g, glu, s);
    else gemm_choose<FMT_F16, 4, 2, 3, 2>(g, glu, s);
}

/* x (n_row, n_in) F16 to FP4 with the row's scale amax / (448 * 6), a UE4M3 scale amax16 / 6 / row scale per 16 columns, and the
 * nearest E2M1 of x / (both scales), ties to even. grid (n_row), block 256: 16 columns a thread and turn. Bytes: 2 n_in read twice
 * (once from L1 or L2), 0.56 n_in written; ~20 instructions an element: 60 % of L2's rate. */
__global__ void __launch_bounds__(256)
    quantize_fp4_kernel(const uint16_t *x, size_t x_stride, int n_in, struct fp4_rows q) {
    SHARED(float, part, 8);
    grid_dependency_launch();
    grid_dependency_wait();
    const uint16_t *row = x + blockIdx.x * x_stride;
    const int tid = threadIdx.x, n_kt = (n_in + 63) / 64, n_scales = FP4_SCALE_BYTES(n_in);
    uint8_t *codes = q.codes + (size_t)blockIdx.x * n_kt * 32, *scales = q.scales + (size_t)blockIdx.x * n_scales;
    auto read16 = [&](int col, float v[16]) {
        __align__(16) uint32_t w[8] = {};
        if (col < n_in) *(uint4 *)w = *(const uint4 *)(row + col);
        if (col + 8 < n_in) *(uint4 *)(w + 4) = *(const uint4 *)(row + col + 8);
        float top = 0;
        UNROLL for (int i = 0; i < 16; i++) {
            v[i] = half_to_f32((uint16_t)(w[i >> 1] >> 16 * (i & 1)));
            top = fmaxf(top, fabsf(v[i]));
        }
        return top;
    };
    float amax = 0, v[16];
    for (int b = tid; b < n_scales; b += 256) amax = fmaxf(amax, read16(b * 16, v));
    amax = warp_max(amax);
    if (!(tid & 31)) part[tid >> 5] = amax;
    __syncthreads(); /* all parts are written */
    for (int i = 0; i < 8; i++) amax = fmaxf(amax, part[i]);
    const float row_scale = amax / (448.0f * 6.0f);
    if (!tid) q.scale[blockIdx.x] = row_scale;
    for (int b = tid; b < n_scales; b += 256) {
        const float m = read16(b * 16, v);
        uint16_t code = m > 0 ? f32_to_e4m3x2(m / 6.0f / row_scale, 0) & 0xFF : 0;
        scales[b] = (uint8_t)code;
        if (b >= n_kt * 4) continue; /* the row of scales is longer than that of codes */
        float scale = half_to_f32((uint16_t)e4m3x2_to_f16x2(code)) * row_scale;
        uint32_t out[2] = {0, 0};
        for (int i = 0; i < 16 && scale > 0; i++) {
            float a = fabsf(v[i]) / scale;
            uint32_t c = __float_as_uint(v[i]) >> 31 << 3;
            c += (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
            out[i >> 3] |= c << 4 * ((i >> 1 & 3) + 4 * (i & 1));
        }
        *(uint2 *)(codes + b * 8) = make_uint2(out[0], out[1]);
    }
}

static void quantize_fp4(const uint16_t *x, size_t x_stride, int n_row, int n_in, struct fp4_rows q, cudaStream_t s) {
    if (n_row) LAUNCH_PDL(quantize_fp4_kernel, dim3(n_row), dim3(256), 0, s, x, x_stride, n_in, q);
}

/* Router logits of many tokens: (n_tok, n_expert) = x w^T in F32. Grid (experts / 64, tokens / 64), block 256: 4 x 4 results a thread
 * out of 64 x 64 x 16 tiles, the next of which is on its way while one is multiplied. Compute: 2 n_tok n_expert n_embd operations
 * outside the tensor cores, 2 to 4 % of a layer. */
__global__ void __launch_bounds__(256) k_route_logits(struct route_args p) {
    enum { SIDE = 64, DEPTH = 16, PITCH = SIDE + 4 };
    SHARED(float, a, DEPTH *PITCH); /* [k][token] */
    SHARED(float, b, DEPTH *PITCH); /* [k][expert] */
    grid_dependency_launch();
    grid_dependency_wait();
    const int e0 = blockIdx.x * SIDE, t0 = blockIdx.y * SIDE, tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const int r = threadIdx.x >> 2, k4 = 4 * (threadIdx.x & 3); /* what this thread loads: row, columns */
    const float *row = p.x + (size_t)(t0 + r) * (size_t)p.n_embd;
    float acc[4][4] = {};
    float4 x, w;
    auto load = [&](int col) {
        x = t0 + r < p.n_tok && col < p.n_embd ? *(const float4 *)(row + col) : make_float4(0, 0, 0, 0);
        w = route_weights(p, e0 + r, col);
    };
    load(k4);
    for (int k0 = 0; k0 < p.n_embd; k0 += DEPTH) {
        UNROLL for (int i = 0; i < 4; i++) {
            a[(k4 + i) * PITCH + r] = (&x.x)[i];
            b[(k4 + i) * PITCH + r] = (&w.x)[i];
        }
        __syncthreads();
        load(k0 + DEPTH + k4);
        UNROLL for (int k = 0; k < DEPTH; k++) {
            const float4 u = *(const float4 *)(a + k * PITCH + 4 * ty), v = *(const float4 *)(b + k * PITCH + 4 * tx);
            UNROLL for (int i = 0; i < 16; i++) acc[i >> 2][i & 3] += (&u.x)[i >> 2] * (&v.x)[i & 3];
        }
        __syncthreads();
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
        int t = t0 + 4 * ty + i, e = e0 + 4 * tx + j;
        if (t < p.n_tok && e < p.n_expert) p.logits[(size_t)t * (size_t)p.n_expert + e] = acc[i][j];
    }
}

/* The choice of experts for many tokens: grid n_tok / 4, block 128, a warp a token. Latency of the top-k, n_expert floats read. */
__global__ void __launch_bounds__(128) k_route_prefill(struct route_args p) {
    DYN_SMEM(float, room); /* 2 n_expert words per warp */
    grid_dependency_launch();
    grid_dependency_wait();
    const int t = blockIdx.x * 4 + (threadIdx.x >> 5);
    if (t < p.n_tok) route_warp(p, t, room);
}

/* Tokens by expert: the n_slots = n_tok k choices sorted by (expert, token), and the list of token tiles for the grouped products. */
struct sort_args {
    const int32_t *id; /* (n_slots) */
    int n_slots, k, n_expert;
    int32_t *row;     /* (n_slots) sorted position -> token */
    int32_t *inverse; /* (n_slots) choice -> sorted position */
    int32_t *first;   /* (n_expert + 1) first sorted position of an expert */
    int32_t *tile_expert, *tile_first, *tile_count, *n_tiles;
};

/* Eight choices of experts from i on, a multiple of 8; -1 behind the end. */
DEVICE void sort_load(const struct sort_args &p, int i, int id[8]) {
    const int4 *from = (const int4 *)(p.id + i);
    if (i + 8 <= p.n_slots) *(int4 *)id = from[0], *(int4 *)(id + 4) = from[1];
    else UNROLL for (int k = 0; k < 8; k++) id[k] = i + k < p.n_slots ? p.id[i + k] : -1;
}

/* The sum of the x of this lane and those below it. */
DEVICE int warp_scan(int x) {
    UNROLL for (int o = 1; o < WARP; o <<= 1) {
        const int v = __shfl_up_sync(0xFFFFFFFFu, x, o);
        if ((int)(threadIdx.x & 31) >= o) x += v;
    }
    return x;
}

/* Grid n_expert, block 256: block e counts the choices of smaller experts and lists its own in order. Reads n_slots ids twice per
 * block from L2, 2,048 at a time: 10 us for 32,768 choices of 128 experts. */
__global__ void __launch_bounds__(256) k_sort(struct sort_args p) {
    SHARED(int, count, 8);
    grid_dependency_launch();
    grid_dependency_wait();
    const int e = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __align__(16) int id[8];
    int less = 0, at = 0;
    for (int i = 8 * threadIdx.x; i < p.n_slots; i += 8 * 256) {
        sort_load(p, i, id);
        UNROLL for (int k = 0; k < 8; k++) less += id[k] >= 0 && id[k] < e;
    }
    less = __reduce_add_sync(0xFFFFFFFFu, less);
    if (!lane) count[warp] = less;
    __syncthreads();
    for (int w = 0; w < 8; w++) at += count[w];
    if (!threadIdx.x) p.first[e] = at;
    for (int i0 = 0; i0 < p.n_slots; i0 += 8 * 256) {
        const int i = i0 + 8 * threadIdx.x;
        int mine = 0;
        sort_load(p, i, id);
        UNROLL for (int k = 0; k < 8; k++) mine += id[k] == e;
        const int upto = warp_scan(mine);
        __syncthreads(); /* the counts before may still be read */
        if (lane == WARP - 1) count[warp] = upto;
        __syncthreads();
        int place = at + upto - mine;
        for (int w = 0; w < 8; w++) place += w < warp ? count[w] : 0, at += count[w];
        UNROLL for (int k = 0; k < 8; k++) {
            if (id[k] == e) p.row[place] = (i + k) / p.k, p.inverse[i + k] = place++;
        }
    }
    if (e == p.n_expert - 1 && !threadIdx.x) p.first[p.n_expert] = at;
}

/* The tiles of at most `tile` tokens, in order of the experts. One block of 1024 threads; latency. */
__global__ void __launch_bounds__(1024) k_tiles(struct sort_args p, int tile) {
    SHARED(int, sums, 33);
    grid_dependency_launch();
    grid_dependency_wait();
    const int e = threadIdx.x, lane = e & 31, warp = e >> 5;
    int first = e < p.n_expert ? p.first[e] : 0, count = e < p.n_expert ? p.first[e + 1] - first : 0;
    int n = (count + tile - 1) / tile, upto = warp_scan(n);
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    int at = upto - n;
    for (int w = 0; w < warp; w++) at += sums[w];
    for (int i = 0; i < n; i++) {
        p.tile_expert[at + i] = e, p.tile_first[at + i] = first + i * tile;
        p.tile_count[at + i] = min(tile, count - i * tile);
    }
    if (e == 1023) *p.n_tiles = at + n;
}

/* out (n_tok, n) = (out, when `add`) + sum_j weight[t][j] y[inverse[t][j]]. Grid n_tok, block 256. Bytes: (k + 2) n F32 per token. */
__global__ void __launch_bounds__(ROW_THREADS)
    k_combine(const float *y, const int32_t *inverse, const float *weight, int k, int n, int add, float *out) {
    grid_dependency_launch();
    grid_dependency_wait();
    inverse += (size_t)blockIdx.x * k, weight += (size_t)blockIdx.x * k, out += (size_t)blockIdx.x * n;
    for (int i = threadIdx.x; i < n; i += ROW_THREADS) {
        float s = 0;
        for (int j = 0; j < k; j++) s += weight[j] * y[(size_t)inverse[j] * n + i];
        out[i] = add ? out[i] + s : s;
    }
}

struct stats_args {
    const float *y; /* (n_slots, n) results of the experts before they are weighed, by expert */
    int n, k;
    const int32_t *first, *row, *id; /* of struct sort_args */
    const float *weight;             /* (n_tok, k) */
    double *stats;                   /* (n_expert, STATS) */
};

/* Adds to an expert's stats what it gave its tokens. Grid n_expert, block 256: the rows of an expert one after the other, so that the
 * sums do not change from run to run. Bytes: the results once; latency of a row, about 2 us, times the rows of the busiest expert. */
__global__ void __launch_bounds__(256) k_stats(struct stats_args p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int e = blockIdx.x;
    double *s = p.stats + (size_t)e * STATS;
    for (int at = p.first[e]; at < p.first[e + 1]; at++) {
        const float *y = p.y + (size_t)at * (size_t)p.n;
        float sum = 0, g = 0, all = 0;
        for (int i = threadIdx.x; i < p.n; i += 256) sum += y[i] * y[i];
        const double norm = sqrt((double)block_sum(sum));
        const size_t token = (size_t)p.row[at] * (size_t)p.k;
        for (int j = 0; j < p.k && !threadIdx.x; j++) {
            all += p.weight[token + j];
            if (p.id[token + j] == e) g = p.weight[token + j];
        }
        if (!threadIdx.x) {
            const double share = all > 0 ? (double)g / (double)all : 0;
            s[STAT_TOKENS]++, s[STAT_WEIGHTED] += share * norm, s[STAT_NORM] += norm, s[STAT_GATE] += share;
            if (share * norm > s[STAT_WEIGHTED_MAX]) s[STAT_WEIGHTED_MAX] = share * norm;
        }
        __syncthreads(); /* the next row's sum overwrites the parts of this one's */
    }
}

/* sums (n_expert, n) += unit * squares of the columns of the rows of x that an expert reads: rows[first[e] .. first[e + 1] - 1], or all
 * n_tok. Grid (n / 256, n_expert), block 256. Bytes: 2 per value. */
__global__ void __launch_bounds__(256) k_in_sum2(const uint16_t *x, size_t x_stride, const int32_t *first,
                                                 const int32_t *rows, int n_tok, int n, float unit, float *sums) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int c = blockIdx.x * 256 + threadIdx.x, e = blockIdx.y;
    const int begin = first ? first[e] : 0, end = first ? first[e + 1] : n_tok;
    float sum = 0;
    if (c >= n) return;
    for (int at = begin; at < end; at++) {
        const float v = half_to_f32(x[(size_t)(rows ? rows[at] : at) * x_stride + c]);
        sum += v * v;
    }
    sums[(size_t)e * n + c] += unit * sum;
}

/* ============================================================================================================
 * RoPE and the KV cache
 *
 * One kernel per kind of attention: head norms, rotation, and the new rows of the cache.
 * ============================================================================================================ */

/* One warp stores a group of n values that it holds, value i in x[i / 32] of lane i % 32, at element `at` of row `pos`. FP8: the scale
 * is amax / 448. */
template <int PER>
DEVICE void plane_store(const struct kv_plane &p, size_t pos, int at, int group, int n, const float x[PER]) {
    const int lane = threadIdx.x & 31;
    uint8_t *row = p.data + pos * p.row_bytes;
    float amax = 0;
    UNROLL for (int i = 0; i < PER; i++) if (lane + 32 * i < n) amax = fmaxf(amax, fabsf(x[i]));
    amax = warp_max(amax);
    float scale = amax > 0x1p-100f ? amax / 448.0f : 1.0f, inv = 1.0f / scale;
    const bool fp8 = p.type == KV_FP8;
    if (fp8 && !lane) p.scale[pos * (size_t)p.n_group + (size_t)group] = scale;
    UNROLL for (int i = 0; i < PER; i++) {
        int k = lane + 32 * i;
        if (k >= n) continue;
        if (fp8) row[at + k] = (uint8_t)f32_to_e4m3x2(x[i] * inv, 0);
        else ((uint16_t *)row)[at + k] = (uint16_t)f32_to_bf16x2(x[i], 0);
    }
}

struct rope_args {
    const struct batch *batch;
    const float *cs, *sn; /* (n_tok, rope / 2) */
    const float *q, *k,
        *v; /* (n_tok, n_head * d), (n_tok, n_head_kv * d), (n_tok, n_head_kv * dv); MLA: k (n_tok, latent + rope) */
    const float *q_norm, *k_norm; /* (d); MLA: k_norm (latent) */
    uint16_t *q16;    /* (n_tok, n_head, d): what attention reads; MLA: the part without rotation, for wk_b */
    uint16_t *q_rope; /* MLA: (n_tok, n_head, latent + rope), of which the last `rope` are written here */
    struct kv_plane kp, vp;
    int n_head, n_head_kv, d, dv, rope, latent, nope;
    float eps;
};

enum { HEAD_PER = HEAD_MAX / 32 };

/* Grouped-query attention: norm and rotation of the heads of q and k, k and v to the cache. Halves are rotated against each other (Qwen).
 * Grid (heads of q, k and v / 4, n_tok), block 128: a warp a head of at most 256. Bytes: q, k, v once; latency for few tokens. */
__global__ void __launch_bounds__(128) k_rope_gqa(struct rope_args p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = threadIdx.x & 31, h = blockIdx.x * 4 + (threadIdx.x >> 5), t = blockIdx.y;
    const int kind = h < p.n_head ? 0 : h < p.n_head + p.n_head_kv ? 1 : 2; /* q, k, v */
    const int i = kind == 0 ? h : kind == 1 ? h - p.n_head : h - p.n_head - p.n_head_kv, n = kind == 2 ? p.dv : p.d;
    if (i >= p.n_head_kv && kind == 2) return;
    const float *heads = kind == 2 ? p.v : kind ? p.k : p.q;
    const float *src = heads + ((size_t)t * (kind ? p.n_head_kv : p.n_head) + i) * n;
    float x[HEAD_PER], ss = 0;
    UNROLL for (int j = 0; j < HEAD_PER; j++) {
        x[j] = lane + 32 * j < n ? src[lane + 32 * j] : 0;
        ss += x[j] * x[j];
    }
    if (kind == 2) {
        plane_store<HEAD_PER>(p.vp, (size_t)(p.batch->pos + t), i * n, i, n, x);
        return;
    }
    const float f = rsqrtf(warp_sum(ss) / (float)n + p.eps);
    const float *w = kind ? p.k_norm : p.q_norm, *cs = p.cs + (size_t)t * (p.rope / 2),
                *sn = p.sn + (size_t)t * (p.rope / 2);
    UNROLL for (int j = 0; j < HEAD_PER; j++) {
        int c = lane + 32 * j, half = p.rope / 2;
        if (c >= n) continue;
        float v = x[j] * f * w[c];
        if (c < p.rope) { /* the other half's value is read again: cheaper than moving it between lanes */
            int o = c < half ? c + half : c - half, r = c < half ? c : o;
            float u = src[o] * f * w[o];
            v = c < half ? v * cs[r] - u * sn[r] : u * sn[r] + v * cs[r];
        }
        x[j] = v;
        if (!kind) p.q16[((size_t)t * p.n_head + i) * n + c] = clamped_f16(v);
    }
    if (kind) plane_store<HEAD_PER>(p.kp, (size_t)(p.batch->pos + t), i * n, i, n, x);
}

/* Latent attention: the latents' norm and the shared key's rotation to the cache, and the heads of q split into the part for wk_b and the
 * rotated part. Neighbours are rotated against each other (DeepSeek). Grid (1 + heads / 4, n_tok), block 128; bytes and latency as above. */
__global__ void __launch_bounds__(128) k_rope_mla(struct rope_args p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = blockIdx.y;
    const float *cs = p.cs + (size_t)t * (p.rope / 2), *sn = p.sn + (size_t)t * (p.rope / 2);
    if (blockIdx.x) {
        int h = (blockIdx.x - 1) * 4 + warp;
        if (h >= p.n_head) return;
        const float *q = p.q + ((size_t)t * p.n_head + h) * p.d;
        uint16_t *plain = p.q16 + ((size_t)t * p.n_head + h) * p.d;
        uint16_t *rot = p.q_rope + ((size_t)t * p.n_head + h) * (p.latent + p.rope) + p.latent;
        for (int i = lane; i < p.nope; i += WARP) plain[i] = clamped_f16(q[i]);
        for (int i = lane; i < p.rope / 2; i += WARP) {
            float a = q[p.nope + 2 * i], b = q[p.nope + 2 * i + 1];
            rot[2 * i] = clamped_f16(a * cs[i] - b * sn[i]), rot[2 * i + 1] = clamped_f16(a * sn[i] + b * cs[i]);
        }
        return;
    }
    const float *k = p.k + (size_t)t * (p.latent + p.rope);
    size_t pos = (size_t)(p.batch->pos + t);
    float ss = 0;
    for (int i = threadIdx.x; i < p.latent; i += 128) ss += k[i] * k[i];
    float f = rsqrtf(block_sum(ss) / (float)p.latent + p.eps);
    for (int g = warp; g * LATENT_GROUP < p.latent; g += 4) {
        float x[LATENT_GROUP / 32];
        int n = min((int)LATENT_GROUP, p.latent - g * LATENT_GROUP);
        UNROLL for (int j = 0; j < LATENT_GROUP / 32; j++) {
            int c = g * LATENT_GROUP + lane + 32 * j;
            x[j] = lane + 32 * j < n ? k[c] * f * p.k_norm[c] : 0;
        }
        plane_store<LATENT_GROUP / 32>(p.kp, pos, g * LATENT_GROUP, g, n, x);
    }
    uint16_t *rot = (uint16_t *)(p.vp.data + pos * p.vp.row_bytes);
    for (int i = threadIdx.x; i < p.rope / 2; i += 128) {
        float a = k[p.latent + 2 * i], b = k[p.latent + 2 * i + 1];
        ((uint32_t *)rot)[i] = f32_to_bf16x2(a * cs[i] - b * sn[i], a * sn[i] + b * cs[i]);
    }
}

/* ============================================================================================================
 * Attention over the cache
 *
 * Query rows that share keys are computed together: row = token * group + head, where `group` heads read one KV head (MLA: all
 * heads read the one latent). Keys come in tiles; each tile updates the running maximum m, denominator l and weighted sum of
 * values of every row (online softmax, base 2). A range of keys ("split") leaves (sums, m, l) in `part`; attn_merge joins them.
 * Query token i sees keys 0 .. pos + i. Keys behind the newest are never read: they arrive as zeros.
 *
 * MMA operands (g = lane / 4, t = lane % 4): the order of the elements within a product's inner dimension is free if both operands
 * have it, and so is the order of the output columns. Decode chooses them so that a lane reads consecutive bytes of a cache row
 * and converts them in registers; prefill has more rows per key and converts each tile once, to f16 in shared memory.
 * ============================================================================================================ */

struct attn_args {
    const uint16_t *q;                    /* f16 (n_tok, n_head, dk), q_stride halves from token to token */
    uint16_t *out;                        /* f16 (n_tok, n_head, dv), out_stride */
    float *partials;                      /* (max_splits, min(n_tok, DECODE_MAX_TOKENS), n_head, dv + 2) */
    struct kv_plane k, v;                 /* MLA: latents, rotated part */
    const struct batch *batch;            /* its n_tok may be less than ours: rows behind it are left alone */
    int n_tok, n_head, n_head_kv, dk, dv; /* MLA: n_head_kv = 1, dk = latents + rotated part, dv = latents */
    size_t q_stride, out_stride;
    float scale;    /* of q.k before the softmax */
    int max_splits; /* ranges of the context, at most */
};

enum {
    ATTN_SPLIT_KEYS = 64, /* a split has a multiple of so many keys */
    ATTN_GROUP = 128,     /* latents under one FP8 scale */
    ATTN_SMEM = 48 << 10  /* two blocks in an SM's 100 KB */
};
#define ATTN_NO_KEY (-1e30f) /* maximum of a row without a key: finite, so that differences are numbers */
#define ATTN_P      256.0f   /* factor of the weights as f16, which V's FP8 scale makes small */

/* N values that are read or written at once. */
template <int N, class T = uint32_t>
struct alignas(N * sizeof(T)) pack {
    T x[N];
};
using floats4 = pack<4, float>;

/* What a block does: rows row0.. of KV head kvh over keys begin..end-1. */
struct attn_work {
    int kvh, group, row0, n_row; /* n_row: of the KV head */
    int pos, len, seen;          /* len: keys in the cache; seen: those that all rows of the tile see */
    int split, n_split, begin, end;
    float factor; /* of q.k, for a softmax of base 2 */
};

/* Waits for the kernels before. Grid (splits, row tiles * KV heads). False: nothing to do. Rows that see the most keys start first. */
DEVICE bool attn_begin(struct attn_work *w, const struct attn_args &a, int tile_rows) {
    grid_dependency_launch();
    grid_dependency_wait();
    int y = (int)(gridDim.y - 1 - blockIdx.y), n_tok = min(a.batch->n_tok, a.n_tok);
    w->pos = a.batch->pos, w->len = w->pos + n_tok;
    w->group = a.n_head / a.n_head_kv, w->n_row = w->group * n_tok;
    w->kvh = y % a.n_head_kv, w->row0 = y / a.n_head_kv * tile_rows;
    int tiles = (w->len + ATTN_SPLIT_KEYS - 1) / ATTN_SPLIT_KEYS;
    int per_split = (tiles + a.max_splits - 1) / a.max_splits;
    w->split = (int)blockIdx.x, w->n_split = (tiles + per_split - 1) / per_split;
    int last = min(w->row0 + tile_rows, w->n_row) - 1;
    w->seen = w->pos + w->row0 / w->group + 1;
    w->begin = w->split * per_split * ATTN_SPLIT_KEYS;
    w->end = min(w->begin + per_split * ATTN_SPLIT_KEYS, w->pos + last / w->group + 1);
    w->factor = a.scale * 1.44269504f; /* log2 e */
    return w->split < w->n_split && w->row0 < w->n_row;
}

/* Token and head of row r of the block's tile; token -1: there is no such row. */
DEVICE int2 attn_row(const struct attn_work &w, int r) {
    int row = w.row0 + r;
    return row < w.n_row ? make_int2(row / w.group, w.kvh * w.group + row % w.group) : make_int2(-1, 0);
}

/* This lane's rows r and r + 8: their queries (NULL: there is no such row), and how many keys they see. */
DEVICE void attn_rows(const uint16_t *q[2], int limit[2], const struct attn_args &a, const struct attn_work &w, int r) {
    UNROLL for (int h = 0; h < 2; h++) {
        int2 th = attn_row(w, r + 8 * h);
        q[h] = th.x < 0 ? NULL : a.q + th.x * a.q_stride + (size_t)th.y * a.dk;
        limit[h] = th.x < 0 ? 0 : w.pos + th.x + 1;
    }
}

/* A operand of one step of 16: of the two rows this lane holds elements at..at+3. */
DEVICE pack<4> attn_q(const uint16_t *const q[2], int at) {
    pack<4> f = {};
    UNROLL for (int h = 0; h < 2; h++) {
        if (!q[h]) continue;
        pack<2> x = *(const pack<2> *)(q[h] + at);
        f.x[h] = x.x[0], f.x[h + 2] = x.x[1];
    }
    return f;
}

/* Steps of Q as A operands: REG in registers, those that do not fit in shared memory. */
template <int REG>
struct attn_steps {
    pack<4> reg[REG];
    uint8_t *rest; /* this lane's part of step REG; 512 bytes from step to step */
    DEVICE_MEMBER pack<4> &at(int s) { return s < REG ? reg[s] : *(pack<4> *)(rest + (s - REG) * 512); }
};

/* A word of the cache as pairs of f16: two of FP8, one of BF16. */
template <int FP8>
DEVICE void kv_word(uint32_t *h, uint32_t w) {
    if constexpr (FP8) h[0] = e4m3x2_to_f16x2((uint16_t)w), h[1] = e4m3x2_to_f16x2((uint16_t)(w >> 16));
    else h[0] = clamped_f16x2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
}

/* N consecutive cache values. */
template <int FP8, int N>
DEVICE pack<N / 2> kv_values(const uint8_t *p) {
    constexpr int W = FP8 ? N / 4 : N / 2;
    pack<W> w = *(const pack<W> *)p;
    pack<N / 2> h;
    UNROLL for (int i = 0; i < W; i++) kv_word<FP8>(h.x + i * (N / 2 / W), w.x[i]);
    return h;
}

/* Four consecutive values of two cache rows, interleaved: h[j] = (p[j], q[j]). */
template <int FP8>
DEVICE void kv_pairs(uint32_t h[4], const uint8_t *p, const uint8_t *q) {
    constexpr int W = FP8 ? 1 : 2;
    pack<W> x = *(const pack<W> *)p, y = *(const pack<W> *)q;
    UNROLL for (int i = 0; i < W; i++) {
        kv_word<FP8>(h + 2 * i, __byte_perm(x.x[i], y.x[i], FP8 ? 0x5140 : 0x5410));
        kv_word<FP8>(h + 2 * i + 1 + FP8, __byte_perm(x.x[i], y.x[i], FP8 ? 0x7362 : 0x7632));
    }
}

/* Values that a lane reads at once as part of an inner dimension of `width`: 16 bytes if possible. 4 lanes make a chunk. */
__host__ __device__ constexpr int kv_run(int fp8, int width) {
    return fp8 && width % 64 == 0 ? 16 : width % 32 == 0 ? 8 : 4;
}

/* Where byte `at` of cache row `row` lies in a tile of rows of ROW bytes. The 16-byte pieces are permuted such that neither 8
 * lanes that read 64 bytes of two neighbouring rows (keys), nor 4 x 8 that read 32 bytes of every other row (values), meet in a bank. */
template <int ROW>
DEVICE int kv_at(int row, int at) {
    constexpr int mask = ROW % 128 == 0 ? 7 : ROW == 64 ? 3 : 0;
    return row * ROW + (at ^ (((row & 6) ^ (row & 1) << 2) & mask) << 4);
}

/* Starts copying N rows of ROW bytes (at byte `first` of the plane's rows) of keys key..; zeros from `len` on. For LANES lanes. */
template <int ROW, int N, int LANES>
DEVICE void kv_copy(uint8_t *to, const struct kv_plane &p, int first, int key, int len, int lane) {
    constexpr int PIECES = ROW / 16, STEP = LANES / PIECES, PASSES = (N + STEP - 1) / STEP;
    int row = lane / PIECES, at = lane % PIECES * 16;
    const uint8_t *from = p.data + (size_t)(key + row) * p.row_bytes + first + at;
    UNROLL_BY(PASSES > 8 ? 1 : 4)
    for (int i = 0; i < PASSES; i++, row += STEP, from += STEP * p.row_bytes)
        if (N % STEP == 0 || row < N) cp_async16(to + kv_at<ROW>(row, at), from, key + row < len);
}

DEVICE float kv_scale(const struct kv_plane &p, int key, int group, int len) {
    return key < len ? p.scale[(size_t)key * p.n_group + group] : 0.0f;
}

/* Factors of a key's scores and, so that they fit f16, of its weights; scale: of the cache. */
DEVICE float attn_v_factor(float scale) { return fminf(ATTN_P * scale, 65504.0f); }
template <int FP8>
DEVICE float attn_factor(const struct attn_args &a, const struct attn_work &w, bool v, int key) {
    float scale = FP8 ? kv_scale(v ? a.v : a.k, key, w.kvh, w.len) : 1.0f;
    return v ? attn_v_factor(scale) : w.factor * scale;
}

/* Scores s of the keys key and key + 1 times their factors, base 2; -inf where the row does not see the key (all: they all do). */
DEVICE void attn_mask(float s[4], int key, float f0, float f1, const int limit[2], bool all) {
    UNROLL for (int e = 0; e < 4; e++) s[e] *= e & 1 ? f1 : f0;
    if (!all) UNROLL for (int e = 0; e < 4; e++) s[e] = key + (e & 1) < limit[e >> 1] ? s[e] : -INFINITY;
}

/* One step of the online softmax for a warp's 16 rows: scores s (16, 8 NT) become weights, acc (16, 8 NA) follows the maximum.
 * l holds the sum over this lane's columns only. */
template <int NT, int NA>
DEVICE void attn_softmax(float (&s)[NT][4], float m[2], float l[2], float (&acc)[NA][4]) {
    float top[2] = {m[0], m[1]};
    UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int n = 0; n < NT; n++) top[h] = fmaxf(fmaxf(top[h], s[n][2 * h]), s[n][2 * h + 1]);
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 2));
    }
    if (__any_sync(0xFFFFFFFFu, top[0] > m[0] || top[1] > m[1])) {
        float f[2] = {exp2_fast(m[0] - top[0]), exp2_fast(m[1] - top[1])};
        UNROLL for (int h = 0; h < 2; h++) l[h] *= f[h], m[h] = top[h];
        UNROLL for (int n = 0; n < NA; n++) UNROLL for (int e = 0; e < 4; e++) acc[n][e] *= f[e >> 1];
    }
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int e = 0; e < 4; e++) {
        s[n][e] = exp2_fast(s[n][e] - m[e >> 1]), l[e >> 1] += s[n][e];
    }
}

/* Weights of 16 keys (two n8 tiles), at most 1, times the factors of this lane's 4 keys, as A operand. */
DEVICE void attn_weights(uint32_t p[4], const float s0[4], const float s1[4], const float f[4]) {
    p[0] = f32_to_f16x2(s0[0] * f[0], s0[1] * f[1]), p[1] = f32_to_f16x2(s0[2] * f[0], s0[3] * f[1]);
    p[2] = f32_to_f16x2(s1[0] * f[2], s1[1] * f[3]), p[3] = f32_to_f16x2(s1[2] * f[2], s1[3] * f[3]);
}

/* acc (16,32) += weights of 16 keys times 32 columns of their values. rows: the keys' first; at: byte of this lane's first of
 * 4 columns. Column g of n8 tile j is column 4 g + j, so that lane t ends up with columns 8t .. 8t+7. */
template <int FP8, int ROW, int MT, int NA>
DEVICE void attn_values(float (&acc)[MT][NA][4], int n0, const uint32_t (*p)[4], const uint8_t *tile, int key, int at,
                        int t) {
    uint32_t b0[4], b1[4];
    auto row = [&](int k) { return tile + kv_at<ROW>(key + 2 * t + k, at); };
    kv_pairs<FP8>(b0, row(0), row(1)), kv_pairs<FP8>(b1, row(8), row(9));
    UNROLL for (int j = 0; j < 4; j++) {
        uint32_t b[2] = {b0[j], b1[j]};
        UNROLL for (int i = 0; i < MT; i++) mma_f16(acc[i][n0 + j], p[i], b);
    }
}

/* The row in `part` of (token, head) th. The (m, l) of all splits and rows lie behind their sums. */
DEVICE size_t attn_part_row(const struct attn_args &a, int split, int2 th) {
    return ((size_t)split * a.n_tok + th.x) * a.n_head + th.y;
}
DEVICE float2 *attn_tops(const struct attn_args &a) {
    return (float2 *)(a.partials + attn_part_row(a, a.max_splits, make_int2(0, 0)) * a.dv);
}

/* N columns from `col` on of row r with m and l: finished if there is one split, else to `part`. */
template <int N>
DEVICE void attn_store(const struct attn_args &a, const struct attn_work &w, int r, int col, const pack<N, float> &x,
                       float m, float l) {
    int2 th = attn_row(w, r);
    if (th.x < 0) return;
    float inv = 1.0f / (ATTN_P * l);
    if (w.n_split == 1) {
        pack<N / 2> h;
        UNROLL for (int i = 0; i < N; i += 2) h.x[i / 2] = clamped_f16x2(x.x[i] * inv, x.x[i + 1] * inv);
        *(pack<N / 2> *)(a.out + th.x * a.out_stride + (size_t)th.y * a.dv + col) = h;
    } else {
        size_t row = attn_part_row(a, w.split, th);
        *(pack<N, float> *)(a.partials + row * a.dv + col) = x;
        if (col == 0) attn_tops(a)[row] = make_float2(m, l);
    }
}

DEVICE float quad_sum(float x) { /* over the 4 lanes of a row */
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

/* GQA, few tokens. out or part (16 rows, D) of one KV head and split.
 * Grid (splits, row tiles of 16 * KV heads), 4 warps. Of every 64 keys each warp takes 16 and runs a softmax of its own, with a
 * ring of its own in shared memory (slots: 16 rows of K, of V, of K, ...), so that warps meet only at the end. Reads
 * keys * D * 2 (FP8: + 8 bytes) of the cache, per row tile; limited by that: at 2 blocks per SM 64 KB are on their way per SM, enough for
 * 4.3 TB/s on 132 SMs (some 400 instructions per 4 KB). */
template <int D, int FP8>
struct attn_gqa {
    static constexpr int ROW = D * (FP8 ? 1 : 2), SLOT = 16 * ROW, FIT = ATTN_SMEM / (4 * SLOT);
    static constexpr int SLOTS = FIT < 3 ? 3 : FIT > 8 ? 8 : FIT;
    static constexpr int SMEM = 4 * SLOTS * SLOT; /* at least the 128 * D bytes of the final sum */
};
template <int D, int FP8>
__global__ void __launch_bounds__(128, 2) attn_gqa_decode(struct attn_args a) {
    using L = attn_gqa<D, FP8>;
    constexpr int ROW = L::ROW, SLOTS = L::SLOTS, ES = FP8 ? 1 : 2, RUN = kv_run(FP8, D), PER_RUN = RUN / 4;
    DYN_SMEM(uint8_t, smem);
    SHARED(float2, tops, 4 * 16);
    struct attn_work w;
    if (!attn_begin(&w, a, 16)) return;
    int tid = (int)threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int first = w.begin + 16 * warp, n = (w.end - w.begin + 63) / 64;
    uint8_t *ring = smem + warp * SLOTS * L::SLOT;

    int fill = 0, slot = 0; /* of the next copy, and of the next rows to be read */
    auto take = [&](int &at) {
        uint8_t *p = ring + at * L::SLOT;
        at = at + 1 == SLOTS ? 0 : at + 1;
        return p;
    };
    auto copy = [&](int u) {
        uint8_t *to = take(fill);
        int key = first + 64 * (u >> 1);
        if (u < 2 * n) kv_copy<ROW, 16, 32>(to, u & 1 ? a.v : a.k, w.kvh * ROW, key, w.len, lane);
        cp_async_commit();
    };
    auto arrive = [&](int u) {
        cp_async_wait<SLOTS - 2>();
        __syncwarp(); /* the other lanes' copies have landed too, and all lanes are done with the slot that is filled next */
        copy(u + SLOTS - 1);
        return take(slot);
    };
    for (int u = 0; u < SLOTS - 1; u++) copy(u);
    /* lanes 0..15 hold the factors of the 16 keys of K, 16..31 of V, one step ahead */
    auto factors = [&](int i) { return attn_factor<FP8>(a, w, lane >= 16, first + 64 * i + (lane & 15)); };
    float next = factors(0);

    const uint16_t *rows[2];
    int limit[2];
    attn_rows(rows, limit, a, w, g);
    pack<4> q[D / 16];
    UNROLL for (int s = 0; s < D / 16; s++) q[s] = attn_q(rows, (4 * (s / PER_RUN) + t) * RUN + s % PER_RUN * 4);
    float m[2] = {ATTN_NO_KEY, ATTN_NO_KEY}, l[2] = {0, 0}, acc[1][D / 8][4] = {};

    for (int i = 0; i < n; i++) {
        float factor = next, s[2][4] = {}, fk[4], fv[4];
        uint32_t p[1][4];
        const uint8_t *tile = arrive(2 * i);
        next = factors(i + 1);
        UNROLL for (int c = 0; c < D / 4 / RUN; c++) UNROLL for (int b = 0; b < 2; b++) {
            auto h = kv_values<FP8, RUN>(tile + kv_at<ROW>(8 * b + g, (4 * c + t) * RUN * ES));
            UNROLL for (int j = 0; j < PER_RUN; j++) mma_f16(s[b], q[c * PER_RUN + j].x, h.x + 2 * j);
        }
        UNROLL for (int x = 0; x < 4; x++) { /* this lane's columns: keys 2t, 2t+1, 8+2t, 8+2t+1 */
            int key = (x >> 1) * 8 + 2 * t + (x & 1);
            fk[x] = FP8 ? __shfl_sync(0xFFFFFFFFu, factor, key) : w.factor;
            fv[x] = FP8 ? __shfl_sync(0xFFFFFFFFu, factor, 16 + key) : ATTN_P;
        }
        bool all = first + 64 * i + 16 <= w.seen;
        attn_mask(s[0], first + 64 * i + 2 * t, fk[0], fk[1], limit, all);
        attn_mask(s[1], first + 64 * i + 2 * t + 8, fk[2], fk[3], limit, all);
        attn_softmax(s, m, l, acc[0]);
        attn_weights(p[0], s[0], s[1], fv);
        tile = arrive(2 * i + 1);
        UNROLL for (int c = 0; c < D / 32; c++) attn_values<FP8, ROW>(acc, 4 * c, p, tile, 0, (32 * c + 4 * g) * ES, t);
    }

    /* the warps' sums, in their order, 8 rows at a time */
    UNROLL for (int h = 0; h < 2; h++) {
        l[h] = quad_sum(l[h]);
        if (t == 0) tops[warp * 16 + g + 8 * h].x = m[h], tops[warp * 16 + g + 8 * h].y = l[h];
    }
    __syncthreads();             /* tops are written, and the rings are free */
    float *sums = (float *)smem; /* (4, 8, D) */
    auto top = [&](int r) { return fmaxf(fmaxf(tops[r].x, tops[16 + r].x), fmaxf(tops[32 + r].x, tops[48 + r].x)); };
    UNROLL for (int h = 0; h < 2; h++) {
        float f = exp2f(m[h] - top(g + 8 * h));
        if (h) __syncthreads(); /* the first 8 rows have been read */
        UNROLL for (int c = 0; c < D / 8; c += 4) UNROLL for (int e = 2 * h; e < 2 * h + 2; e++) {
            floats4 x;
            UNROLL for (int j = 0; j < 4; j++) x.x[j] = acc[0][c + j][e] * f;
            *(floats4 *)(sums + (warp * 8 + g) * D + 8 * c + 8 * t + 4 * (e & 1)) = x;
        }
        __syncthreads(); /* all four parts are there */
        for (int i = tid; i < 8 * D / 4; i += 128) {
            int r = i / (D / 4), col = i % (D / 4) * 4, row = r + 8 * h;
            floats4 x = {};
            float den = 0, mx = top(row);
            UNROLL for (int v = 0; v < 4; v++) {
                floats4 y = *(const floats4 *)(sums + (v * 8 + r) * D + col);
                UNROLL for (int j = 0; j < 4; j++) x.x[j] += y.x[j];
                den += tops[v * 16 + row].y * exp2f(tops[v * 16 + row].x - mx);
            }
            attn_store(a, w, row, col, x, mx, den);
        }
    }
}

/* MLA absorbed, few tokens and prefill. out or part (16 MT rows, LAT) of one split; keys are [latent | rotated], values the
 * latents. Grid (splits, row tiles), 8 warps, tiles of 32 or 64 keys that all warps share. For the scores a warp has half of the
 * inner dimension and 8 keys of every 32; the halves meet in shared memory. Then every warp makes the same weights for itself
 * and multiplies them with its own 1/8 of the values' columns. Reads keys * (LAT + 2 ROPE + 4 LAT / 128) bytes (FP8) per row tile.
 * 16 rows: limited by that (some 970 instructions per warp and 41 KB); 32 rows: by the MMAs, 32 * (2 LAT + ROPE) products per key. */
template <int LAT, int ROPE, int FP8, int MT>
struct attn_mla {
    static constexpr int KEYS = FP8 && MT == 1 ? 64 : 32, STAGES = FP8 && MT == 2 ? 3 : 2;
    static constexpr int ROW = LAT * (FP8 ? 1 : 2), ROPE_ROW = ROPE * 2, STAGE = KEYS * (ROW + ROPE_ROW);
    static constexpr int Q_SHARED = LAT < 512 || MT == 1 ? 0 : FP8 ? 10 : 8;
    static constexpr int GROUPS = (LAT + ATTN_GROUP - 1) / ATTN_GROUP, SCALES = FP8 ? KEYS * GROUPS : 0;
    static constexpr int PITCH = KEYS + 8, SCORES = 2 * 16 * MT * PITCH; /* no bank conflicts for pairs */
    static constexpr int SMEM = STAGES * STAGE + 4 * (SCORES + 2 * SCALES) + 2 * MT * Q_SHARED * 512;
};
template <int LAT, int ROPE, int FP8, int MT>
__global__ void __launch_bounds__(256, 1) attn_mla_kernel(struct attn_args a) {
    using L = attn_mla<LAT, ROPE, FP8, MT>;
    constexpr int KEYS = L::KEYS, STAGES = L::STAGES, ROW = L::ROW, GROUPS = L::GROUPS, PITCH = L::PITCH;
    constexpr int RUN = kv_run(FP8, LAT), CHUNKS = LAT / 4 / RUN, HALF = (CHUNKS + 1) / 2, ES = FP8 ? 1 : 2;
    constexpr int RRUN = kv_run(0, ROPE), RCHUNKS = ROPE / 4 / RRUN, RHALF = (RCHUNKS + 1) / 2;
    constexpr int STEPS = HALF * RUN / 4, RSTEPS = RHALF * RRUN / 4, Q_REG = STEPS + RSTEPS - L::Q_SHARED;
    constexpr int UNITS = LAT / 32, OWN = (UNITS + 7) / 8; /* 32 columns of the values; so many per warp */
    DYN_SMEM(uint8_t, smem);
    float *scores = (float *)(smem + STAGES * L::STAGE), *scale_tiles = scores + L::SCORES;
    uint8_t *q_shared = (uint8_t *)(scale_tiles + 2 * L::SCALES); /* (2 halves, MT, Q_SHARED, 32 lanes) */
    struct attn_work w;
    if (!attn_begin(&w, a, 16 * MT)) return;
    int tid = (int)threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int half = warp >> 2, nt = warp & 3, n = (w.end - w.begin + KEYS - 1) / KEYS;
    int unit = warp * OWN, group = unit * 32 / ATTN_GROUP;

    auto copy = [&](int i) {
        uint8_t *to = smem + i % STAGES * L::STAGE;
        int key = w.begin + i * KEYS;
        if (i < n) {
            kv_copy<ROW, KEYS, 256>(to, a.k, 0, key, w.len, tid);
            kv_copy<L::ROPE_ROW, KEYS, 256>(to + KEYS * ROW, a.v, 0, key, w.len, tid);
        }
        cp_async_commit();
    };
    auto scales = [&](int i) {
        int key = w.begin + i * KEYS + tid / GROUPS;
        return FP8 && tid < L::SCALES ? kv_scale(a.k, key, tid % GROUPS, w.len) : 0.0f;
    };
    for (int i = 0; i < STAGES - 1; i++) copy(i);
    float next = scales(0);

    /* the warp's chunks: latents half * HALF .., rotated part (1 - half) * RHALF .. (an odd last one to balance the latents') */
    attn_steps<Q_REG> q[MT];
    int limit[MT][2];
    UNROLL for (int j = 0; j < MT; j++) {
        const uint16_t *rows[2];
        attn_rows(rows, limit[j], a, w, 16 * j + g);
        q[j].rest = q_shared + ((half * MT + j) * L::Q_SHARED * 32 + lane) * 16;
        UNROLL for (int s = 0; s < STEPS + RSTEPS; s++) {
            pack<4> f = {};
            int c = half * HALF + s / (RUN / 4), rs = s - STEPS, rc = (1 - half) * RHALF + rs / (RRUN / 4);
            if (s < STEPS && c < CHUNKS) f = attn_q(rows, (4 * c + t) * RUN + s % (RUN / 4) * 4);
            if (s >= STEPS && rc < RCHUNKS) f = attn_q(rows, LAT + (4 * rc + t) * RRUN + rs % (RRUN / 4) * 4);
            if (s < Q_REG || nt == 0) q[j].at(s) = f;
        }
    }
    /* d += step s of the m16 tile j of Q times 8 keys */
    auto multiply = [&](float d[4], int j, int s, const uint32_t b[2]) {
        pack<4> f = q[j].at(s);
        mma_f16(d, f.x, b);
    };
    float m[MT][2], l[MT][2] = {}, acc[MT][4 * OWN][4] = {};
    UNROLL for (int j = 0; j < MT; j++) m[j][0] = m[j][1] = ATTN_NO_KEY;

    for (int i = 0; i < n; i++) {
        const uint8_t *tile = smem + i % STAGES * L::STAGE, *rope = tile + KEYS * ROW;
        float *scale = scale_tiles + (i & 1) * L::SCALES; /* (KEYS, GROUPS); the other is still read */
        if (FP8 && tid < L::SCALES) scale[tid] = next;    /* at most 256 */
        cp_async_wait<STAGES - 2>();
        __syncthreads(); /* tile i and its scales are there; all are done with the tile and the scores before it */
        copy(i + STAGES - 1);
        next = scales(i + 1);

        UNROLL for (int b = 8 * nt; b < KEYS; b += 32) { /* the warp's keys */
            float s[MT][4] = {};
            UNROLL for (int k = 0; k < HALF; k++) {
                int c = half * HALF + k;
                if (CHUNKS % 2 && c >= CHUNKS) continue; /* the warp of the second half has one less */
                auto h = kv_values<FP8, RUN>(tile + kv_at<ROW>(b + g, (4 * c + t) * RUN * ES));
                const float *f = scale + (b + 2 * t) * GROUPS + c * 4 * RUN / ATTN_GROUP;
                float f0 = FP8 ? f[0] : 1, f1 = FP8 ? f[GROUPS] : 1;
                UNROLL for (int j = 0; j < MT; j++) {
                    float d[4] = {};
                    UNROLL for (int x = 0; x < RUN / 4; x++) multiply(d, j, k * (RUN / 4) + x, h.x + 2 * x);
                    UNROLL for (int e = 0; e < 4; e++) s[j][e] += d[e] * (e & 1 ? f1 : f0);
                }
            }
            UNROLL for (int k = 0; k < RHALF; k++) {
                int c = (1 - half) * RHALF + k;
                if (RCHUNKS % 2 && c >= RCHUNKS) continue;
                auto h = kv_values<0, RRUN>(rope + kv_at<L::ROPE_ROW>(b + g, (4 * c + t) * RRUN * 2));
                UNROLL for (int j = 0; j < MT; j++) UNROLL for (int x = 0; x < RRUN / 4; x++)
                    multiply(s[j], j, STEPS + k * (RRUN / 4) + x, h.x + 2 * x);
            }
            UNROLL for (int j = 0; j < MT; j++) UNROLL for (int r = 0; r < 2; r++) {
                float *to = scores + (half * 16 * MT + 16 * j + 8 * r + g) * PITCH + b + 2 * t;
                *(float2 *)to = make_float2(w.factor * s[j][2 * r], w.factor * s[j][2 * r + 1]);
            }
        }
        __syncthreads(); /* both halves of all scores are there */

        bool all = w.begin + (i + 1) * KEYS <= w.seen;
        uint32_t p[KEYS / 16][MT][4];
        UNROLL for (int j = 0; j < MT; j++) {
            float x[KEYS / 8][4];
            UNROLL for (int b = 0; b < KEYS / 8; b++) {
                UNROLL for (int h = 0; h < 2; h++) {
                    const float *from = scores + (16 * j + g + 8 * h) * PITCH + 8 * b + 2 * t;
                    float2 y = *(const float2 *)from, z = *(const float2 *)(from + 16 * MT * PITCH);
                    x[b][2 * h] = y.x + z.x, x[b][2 * h + 1] = y.y + z.y;
                }
                attn_mask(x[b], w.begin + i * KEYS + 8 * b + 2 * t, 1, 1, limit[j], all);
            }
            attn_softmax(x, m[j], l[j], acc[j]);
            UNROLL for (int k = 0; k < KEYS / 16; k++) {
                float f[4];
                UNROLL for (int y = 0; y < 4; y++) {
                    int at = (16 * k + (y >> 1) * 8 + 2 * t + (y & 1)) * GROUPS + group;
                    f[y] = FP8 && unit < UNITS ? attn_v_factor(scale[at]) : ATTN_P;
                }
                attn_weights(p[k][j], x[2 * k], x[2 * k + 1], f);
            }
        }
        UNROLL for (int u = 0; u < OWN; u++) if (unit + u < UNITS) UNROLL for (int k = 0; k < KEYS / 16; k++)
            attn_values<FP8, ROW>(acc, 4 * u, p[k], tile, 16 * k, (32 * (unit + u) + 4 * g) * ES, t);
    }

    UNROLL for (int j = 0; j < MT; j++) UNROLL for (int h = 0; h < 2; h++) {
        float den = quad_sum(l[j][h]);
        UNROLL for (int u = 0; u < OWN; u++) UNROLL for (int e = 2 * h; e < 2 * h + 2; e++) {
            floats4 x;
            UNROLL for (int y = 0; y < 4; y++) x.x[y] = acc[j][4 * u + y][e];
            int col = 32 * (unit + u) + 8 * t + 4 * (e & 1);
            if (unit + u < UNITS) attn_store(a, w, 16 * j + g + 8 * h, col, x, m[j][h], den);
        }
    }
}

/* GQA prefill. out or part (64 rows, D) of one KV head and split. Grid (splits, row tiles * KV heads), 4 warps of 16 rows each.
 * A tile of keys: copied raw while the tile before is multiplied, converted to f16 once, read by ldmatrix. 128 D products per
 * key and KV head's 64 rows; every warp reads every tile, which makes shared memory the limit, at half to all of the MMA rate. */
template <int D, int FP8>
struct attn_tiled {
    static constexpr int KEYS = D > 128 ? 32 : 64, ROW = D * (FP8 ? 1 : 2), Q_SHARED = D > 128 ? 14 : 0;
    static constexpr int RAW = KEYS * ROW, TILE = KEYS * D * 2; /* of K, of V: as in the cache, as f16 */
    static constexpr int SMEM = 2 * (RAW + TILE) + 2 * KEYS * 4 + 4 * Q_SHARED * 512;
};
/* Byte of 16-byte piece c of row `row` of an f16 tile; permuted so that the 8 rows of a matrix lie in different banks. */
template <int D>
DEVICE int f16_at(int row, int c) {
    return row * D * 2 + ((D % 64 ? c : c ^ (row & 7)) << 4);
}

template <int D, int FP8>
__global__ void __launch_bounds__(128, 2) attn_gqa_prefill(struct attn_args a) {
    using L = attn_tiled<D, FP8>;
    constexpr int KEYS = L::KEYS, ROW = L::ROW, NT = KEYS / 8, PIECES = D / 8, Q_REG = D / 16 - L::Q_SHARED;
    DYN_SMEM(uint8_t, smem);
    uint8_t *tile = smem, *raw = smem + 2 * L::TILE; /* each K, then V */
    float *factor = (float *)(raw + 2 * L::RAW);     /* (2, KEYS), likewise */
    struct attn_work w;
    if (!attn_begin(&w, a, 64)) return;
    int tid = (int)threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int n = (w.end - w.begin + KEYS - 1) / KEYS;

    auto copy = [&](int i) {
        int key = w.begin + i * KEYS;
        if (i < n) {
            kv_copy<ROW, KEYS, 128>(raw, a.k, w.kvh * ROW, key, w.len, tid);
            kv_copy<ROW, KEYS, 128>(raw + L::RAW, a.v, w.kvh * ROW, key, w.len, tid);
        }
        cp_async_commit();
    };
    /* thread tid: of key tid % KEYS of K (below KEYS) or V */
    auto factors = [&](int i) { return attn_factor<FP8>(a, w, tid >= KEYS, w.begin + i * KEYS + tid % KEYS); };
    copy(0);
    float next = factors(0);

    const uint16_t *rows[2];
    int limit[2];
    attn_rows(rows, limit, a, w, 16 * warp + g);
    attn_steps<Q_REG> q;
    q.rest = (uint8_t *)(factor + 2 * KEYS) + (warp * L::Q_SHARED * 32 + lane) * 16;
    UNROLL for (int s = 0; s < D / 16; s++) {
        pack<4> f;
        UNROLL for (int e = 0; e < 4; e++) {
            const uint16_t *x = rows[e & 1];
            f.x[e] = x ? *(const uint32_t *)(x + 16 * s + 2 * t + (e >> 1) * 8) : 0;
        }
        q.at(s) = f;
    }
    float m[2] = {ATTN_NO_KEY, ATTN_NO_KEY}, l[2] = {0, 0}, acc[D / 8][4] = {};

    for (int i = 0; i < n; i++) {
        cp_async_wait<0>();
        __syncthreads(); /* the raw tile has landed; all are done with the f16 tile before it */
        UNROLL_BY(4) for (int x = tid; x < 2 * KEYS * PIECES; x += 128) { /* K's rows, then V's */
            int row = x / PIECES, c = x % PIECES;
            auto h = kv_values<FP8, 8>(raw + kv_at<ROW>(row, c * (FP8 ? 8 : 16)));
            *(pack<4> *)(tile + f16_at<D>(row, c)) = h;
        }
        if (tid < 2 * KEYS) factor[tid] = next;
        __syncthreads(); /* the f16 tile is complete, the raw one is free */
        copy(i + 1);
        next = factors(i + 1);

        float s[NT][4] = {};
        UNROLL for (int k = 0; k < D / 16; k++) {
            pack<4> f = q.at(k);
            UNROLL for (int b = 0; b < NT; b += 2) {
                uint32_t r[4]; /* matrices: keys 0-7 and 8-15 (lane / 16), of each elements 0-7 and 8-15 */
                int row = 8 * b + (lane >> 4) * 8 + (lane & 7);
                ldmatrix_x4(r, tile + f16_at<D>(row, 2 * k + (lane >> 3 & 1)));
                mma_f16(s[b], f.x, r), mma_f16(s[b + 1], f.x, r + 2);
            }
        }
        bool all = w.begin + (i + 1) * KEYS <= w.seen;
        UNROLL for (int b = 0; b < NT; b++) {
            const float *f = factor + 8 * b + 2 * t;
            attn_mask(s[b], w.begin + i * KEYS + 8 * b + 2 * t, f[0], f[1], limit, all);
        }
        attn_softmax(s, m, l, acc);
        UNROLL for (int k = 0; k < NT / 2; k++) {
            const float *y = factor + KEYS + 16 * k + 2 * t;
            float f[4] = {y[0], y[1], y[8], y[9]};
            uint32_t p[4];
            attn_weights(p, s[2 * k], s[2 * k + 1], f);
            UNROLL for (int b = 0; b < D / 8; b += 2) {
                uint32_t r[4]; /* matrices: keys 0-7 and 8-15, of columns 0-7, then 8-15 (lane / 16) */
                ldmatrix_x4_trans(r, tile + L::TILE + f16_at<D>(16 * k + (lane & 15), b + (lane >> 4)));
                mma_f16(acc[b], p, r), mma_f16(acc[b + 1], p, r + 2);
            }
        }
    }

    UNROLL for (int h = 0; h < 2; h++) {
        float den = quad_sum(l[h]);
        UNROLL for (int b = 0; b < D / 8; b++) {
            pack<2, float> x = {acc[b][2 * h], acc[b][2 * h + 1]};
            attn_store(a, w, 16 * warp + g + 8 * h, 8 * b + 2 * t, x, m[h], den);
        }
    }
}

/* out (n_tok, n_head, dv) from the splits' sums: sum 2^(m - M) sums / sum 2^(m - M) l. a.n_head_kv = 1: all heads are one group.
 * Grid n_tok * n_head, 256 threads: dv / 4 columns of 4, several groups of splits. Reads n_split * (dv + 2) * 4 bytes per row, from
 * the L2 cache; a few us. */
__global__ void __launch_bounds__(256) attn_merge(struct attn_args a) {
    SHARED(float, weight, SPLITS_MAX);
    SHARED(floats4, sums, 256);
    struct attn_work w;
    int tid = (int)threadIdx.x, row = (int)blockIdx.x;
    attn_begin(&w, a, 1);
    if (w.n_split == 1 || row >= w.n_row) return;
    auto from = [&](int split) { return attn_part_row(a, split, make_int2(0, row)); };
    const float2 *tops = attn_tops(a);
    float top = ATTN_NO_KEY, den = 0;
    for (int s = tid & 31; s < w.n_split; s += 32) top = fmaxf(top, tops[from(s)].x);
    top = warp_max(top);
    for (int s = tid; s < w.n_split; s += 256) {
        float2 ml = tops[from(s)];
        weight[s] = exp2f(ml.x - top), den += weight[s] * ml.y;
    }
    den = block_sum(den); /* its barrier is that of the weights, too */
    int cols = a.dv / 4, n = 256 / cols, part = tid / cols, col = tid % cols * 4;
    floats4 x = {};
    auto add = [&](float f, const void *p) {
        floats4 y = *(const floats4 *)p;
        UNROLL for (int j = 0; j < 4; j++) x.x[j] += f * y.x[j];
    };
    if (part < n)
        UNROLL_BY(4) for (int s = part; s < w.n_split; s += n) add(weight[s], a.partials + from(s) * a.dv + col);
    sums[tid] = x;
    __syncthreads(); /* the groups' sums are there */
    if (part) return;
    for (int i = 1; i < n; i++) add(1, &sums[tid + i * cols]);
    w.n_split = 1;
    attn_store(a, w, row, col, x, top, den);
}

/* Launches the kernel and the merge. More tiles of rows per KV head mean fewer splits: they fill the GPU as well. */
static void attn_run(const struct attn_args *args, void (*attn_kernel)(struct attn_args), int tile_rows, int threads,
                     int smem, cudaStream_t s) {
    struct attn_args a = *args;
    int group = a.n_head / a.n_head_kv, tiles = (group * a.n_tok + tile_rows - 1) / tile_rows;
    int splits = a.max_splits * ((group + 15) / 16) / tiles;
    if (a.n_tok > DECODE_MAX_TOKENS) splits = min(splits, a.max_splits * DECODE_MAX_TOKENS / a.n_tok);
    a.max_splits = max(1, min(splits, min(a.max_splits, (int)SPLITS_MAX)));
    if (smem > 32 << 10) /* above 48 KB with the static arrays */
        cudaFuncSetAttribute(attn_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    LAUNCH_PDL(attn_kernel, dim3((unsigned)a.max_splits, (unsigned)(tiles * a.n_head_kv)), dim3((unsigned)threads),
               (size_t)smem, s, a);
    a.n_head_kv = 1;
    if (a.max_splits > 1) LAUNCH_PDL(attn_merge, dim3((unsigned)(a.n_tok * a.n_head)), dim3(256), 0, s, a);
}

template <int D, int FP8>
static void attn_run_gqa(const struct attn_args *a, int prefill, cudaStream_t s) {
    if (prefill) attn_run(a, attn_gqa_prefill<D, FP8>, 64, 128, attn_tiled<D, FP8>::SMEM, s);
    else attn_run(a, attn_gqa_decode<D, FP8>, 16, 128, attn_gqa<D, FP8>::SMEM, s);
}
template <int LAT, int ROPE, int FP8>
static void attn_run_mla(const struct attn_args *a, int prefill, cudaStream_t s) {
    /* two row tiles share a reading and conversion of the cache */
    if (prefill || a->n_head * a->n_tok > 16)
        attn_run(a, attn_mla_kernel<LAT, ROPE, FP8, 2>, 32, 256, attn_mla<LAT, ROPE, FP8, 2>::SMEM, s);
    else attn_run(a, attn_mla_kernel<LAT, ROPE, FP8, 1>, 16, 256, attn_mla<LAT, ROPE, FP8, 1>::SMEM, s);
}

typedef void attn_runner(const struct attn_args *, int prefill, cudaStream_t);

/* The kernels for these widths; NULL: there are none. */
static attn_runner *attn_find(int mla, int dk, int dv, int fp8) {
    static const struct {
        int mla, dk, dv;
        attn_runner *run[2]; /* by fp8 */
    } table[] = {
        {0, 32, 32, {attn_run_gqa<32, 0>, attn_run_gqa<32, 1>}},
        {0, 64, 64, {attn_run_gqa<64, 0>, attn_run_gqa<64, 1>}},
        {0, 128, 128, {attn_run_gqa<128, 0>, attn_run_gqa<128, 1>}},
        {0, 256, 256, {attn_run_gqa<256, 0>, attn_run_gqa<256, 1>}},
        {1, 512 + 64, 512, {attn_run_mla<512, 64, 0>, attn_run_mla<512, 64, 1>}},
        {1, 128 + 64, 128, {attn_run_mla<128, 64, 0>, attn_run_mla<128, 64, 1>}},
        {1, 64 + 16, 64, {attn_run_mla<64, 16, 0>, attn_run_mla<64, 16, 1>}},
    };
    for (auto &x : table)
        if (x.mla == mla && x.dk == dk && x.dv == dv) return x.run[fp8 != 0];
    return NULL;
}
extern "C" bool cuda_attends(bool mla, int dk, int dv) { return attn_find(mla, dk, dv, 0) != NULL; }
static void attn_launch(const struct attn_args *a, bool mla, bool prefill, cudaStream_t s) {
    attn_find(mla, a->dk, a->dv, a->k.type == KV_FP8)(a, prefill, s);
}

/* ============================================================================================================
 * Choosing a token
 *
 * What sampling_choose of moe.c does, so that the host sees only the id. All ids are counted by the leading bits of their logits;
 * the best bins that fit SAMPLE_ROOM candidates are sorted. Where the choice hangs on more (a flat distribution without top-k),
 * the id is -1 and the host chooses.
 * ============================================================================================================ */

enum { SAMPLE_THREADS = 512, SAMPLE_ROOM = 2 * SAMPLE_THREADS };

struct sample_args : sample_job {
    const float *logits;  /* (n) */
    uint64_t *block_best; /* (SAMPLE_BLOCKS) keys */
    double *block_mass;   /* (SAMPLE_BLOCKS) sums of exp(logit - the block's best) */
    int *bins;            /* (SAMPLE_BINS) zero between launches */
    uint32_t *arrived;    /* likewise */
    int32_t *token;
};

/* Orders ids: the larger logit first, among equals the lower id. Never 0. v: the logit of id i. */
DEVICE uint64_t sample_key(const struct sample_args &p, int i, float v) {
    bool recent = false;
    if (p.n_recent && p.recent_mask[i >> 5 & 63] >> (i & 31) & 1)
        for (int k = 0; k < p.n_recent && !recent; k++) recent = p.recent[k] == i;
    if (recent) v = v > 0 ? v / p.repeat_penalty : v * p.repeat_penalty;
    return (uint64_t)float_key(v + 0.0f) << 32 | ~(uint32_t)i; /* -0 equals 0 */
}
DEVICE float key_logit(uint64_t key) { return key_float((uint32_t)(key >> 32)); }
DEVICE int key_bin(uint64_t key) { return (int)(key >> 52); }

/* f of the block's x, two at a time. room (SAMPLE_THREADS). */
template <class T, class F>
DEVICE T block_fold(T *room, T x, F f) {
    const int tid = (int)threadIdx.x;
    room[tid] = x;
    for (int o = SAMPLE_THREADS / 2; o; o /= 2) {
        __syncthreads();
        if (tid < o) room[tid] = f(room[tid], room[tid + o]);
    }
    __syncthreads();
    return room[0];
}

/* room (SAMPLE_ROOM) becomes its running sums; the last is returned. */
template <class T>
DEVICE T block_scan(T *room) {
    const int i = (int)threadIdx.x, k = i + SAMPLE_THREADS;
    for (int o = 1; o < SAMPLE_ROOM; o *= 2) {
        __syncthreads();
        T a = i >= o ? room[i - o] : 0, b = k >= o ? room[k - o] : 0;
        __syncthreads();
        room[i] += a, room[k] += b;
    }
    __syncthreads();
    return room[SAMPLE_ROOM - 1];
}

/* Bitonic, best first. Thread i leaves keys 2i and 2i + 1, the others' it must wait for. */
DEVICE void block_sort(uint64_t *key) {
    for (int run = 2; run <= SAMPLE_ROOM; run *= 2)
        for (int o = run / 2; o; o /= 2) {
            __syncthreads();
            const int i = 2 * ((int)threadIdx.x & ~(o - 1)) + ((int)threadIdx.x & (o - 1));
            const uint64_t a = key[i], b = key[i + o];
            if ((a < b) == !(i & run)) key[i] = b, key[i + o] = a;
        }
}

/* The lowest bin whose candidates, with those of all better bins, fit the room and are wanted. bin (SAMPLE_BINS) counts;
 * room (SAMPLE_ROOM). */
DEVICE void lowest_bin(const struct sample_args &p, const int *bin, int *room, int *lowest) {
    enum { PER = SAMPLE_BINS / SAMPLE_ROOM };
    for (int g = (int)threadIdx.x; g < SAMPLE_ROOM; g += SAMPLE_THREADS) {
        room[g] = 0;
        for (int k = 0; k < PER; k++) room[g] += bin[SAMPLE_BINS - 1 - PER * g - k];
    }
    block_scan(room);
    for (int g = (int)threadIdx.x; g < SAMPLE_ROOM; g += SAMPLE_THREADS) {
        int better = g ? room[g - 1] : 0;
        for (int k = 0; k < PER; k++) {
            const int b = SAMPLE_BINS - 1 - PER * g - k, with = better + bin[b];
            if (with <= SAMPLE_ROOM && better < p.limit) atomicMin(lowest, b);
            better = with;
        }
    }
}

/* Grid at most SAMPLE_BLOCKS, block SAMPLE_THREADS; the block that ends last chooses. Bytes: the logits twice, 1.2 MB from L2 for a
 * vocabulary of 150,000; about 15 us: 6 for the last block's reading, the rest its barriers. */
__global__ void __launch_bounds__(SAMPLE_THREADS) k_sample(const __grid_constant__ struct sample_args p) {
    SHARED(uint64_t, key, SAMPLE_ROOM);
    SHARED(double, mass, SAMPLE_ROOM);
    SHARED(int, bin, SAMPLE_BINS);
    SHARED(int, at, 3); /* the lowest bin; candidates, later the choice; candidates kept */
    const int tid = (int)threadIdx.x, step = (int)gridDim.x * SAMPLE_THREADS;
    const bool all_mass = p.limit == p.n && p.top_p < 1.0f;
    grid_dependency_launch();
    for (int i = tid; i < SAMPLE_BINS; i += SAMPLE_THREADS) bin[i] = 0;
    if (!tid) at[0] = SAMPLE_BINS, at[1] = 0, at[2] = p.limit;
    grid_dependency_wait();
    __syncthreads();
    uint64_t top = 0;
    auto larger = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    auto sum = [](double a, double b) { return a + b; };
    auto above_top = [&](uint64_t k) { return (double)(key_logit(k) - key_logit(top)); };
    for (int i = (int)blockIdx.x * SAMPLE_THREADS + tid; i < p.n; i += step) {
        const uint64_t k = sample_key(p, i, p.logits[i]);
        top = larger(top, k);
        if (!p.greedy) atomicAdd(&bin[key_bin(k)], 1);
    }
    top = block_fold(key, top, larger);
    double total = 0;
    for (int i = (int)blockIdx.x * SAMPLE_THREADS + tid; all_mass && i < p.n; i += step)
        total += exp(above_top(sample_key(p, i, p.logits[i])));
    if (all_mass) total = block_fold(mass, total, sum);
    if (!tid) p.block_best[blockIdx.x] = top, p.block_mass[blockIdx.x] = total;
    for (int i = tid; i < SAMPLE_BINS; i += SAMPLE_THREADS)
        if (bin[i]) atomicAdd(&p.bins[i], bin[i]);
    if (!last_block(p.arrived)) return;

    const uint64_t best = tid < (int)gridDim.x ? p.block_best[tid] : 0;
    top = block_fold(key, best, larger);
    if (!tid) *p.arrived = 0, *p.token = p.greedy ? (int32_t) ~(uint32_t)top : -1;
    if (p.greedy) return;
    if (all_mass) total = block_fold(mass, best ? p.block_mass[tid] * exp(above_top(best)) : 0, sum);
    for (int i = tid; i < SAMPLE_BINS; i += SAMPLE_THREADS) bin[i] = p.bins[i], p.bins[i] = 0;
    __syncthreads();
    lowest_bin(p, bin, (int *)mass, &at[0]);
    key[tid] = key[tid + SAMPLE_THREADS] = 0;
    __syncthreads();
    const int lowest = at[0];
    for (int i0 = 4 * tid; i0 < p.n; i0 += 16 * SAMPLE_THREADS) {
        float4 x[4]; /* all on their way at once */
        UNROLL for (int u = 0; u < 4; u++) if (i0 + 4 * SAMPLE_THREADS * u < p.n) x[u] =
            *(const float4 *)(p.logits + i0 + 4 * SAMPLE_THREADS * u);
        UNROLL for (int k = 0; k < 16; k++) {
            const int i = i0 + 4 * SAMPLE_THREADS * (k >> 2) + (k & 3);
            if (i >= p.n) continue;
            const uint64_t y = sample_key(p, i, (&x[k >> 2].x)[k & 3]);
            if (key_bin(y) >= lowest) key[atomicAdd(&at[1], 1)] = y;
        }
    }
    block_sort(key);
    const int n = at[1];
    for (int i = 2 * tid; i < 2 * tid + 2; i++) /* those that this thread sorted */
        mass[i] = i < n ? exp(above_top(key[i])) : 0;
    block_scan(mass);
    if (!all_mass) total = mass[p.limit < n ? p.limit - 1 : SAMPLE_ROOM - 1];
    for (int i = tid; i < n && i < p.limit; i += SAMPLE_THREADS)
        if (i && ((p.top_p < 1.0f && mass[i - 1] >= (double)p.top_p * total) ||
                  (p.min_p > 0 && exp(above_top(key[i])) < (double)p.min_p)))
            atomicMin(&at[2], i);
    __syncthreads();
    const int kept = at[2];
    if (kept > n || (n < p.limit && !all_mass && p.top_p < 1.0f)) return;
    for (int i = tid; i < SAMPLE_ROOM; i += SAMPLE_THREADS)
        mass[i] = i < kept ? exp(above_top(key[i]) / (double)p.temp) : 0;
    if (!tid) at[1] = kept - 1;
    const double want = p.uniform * block_scan(mass);
    for (int i = tid; i < kept; i += SAMPLE_THREADS)
        if (mass[i] > want) atomicMin(&at[1], i);
    __syncthreads();
    if (!tid) *p.token = (int32_t) ~(uint32_t)key[at[1]];
}

/* ============================================================================================================
 * The engine of a rank
 *
 * What a rank on a GPU holds; its errors, how it waits for its GPU, and its memory.
 * ============================================================================================================ */

/* The copy of a tensor of the model: of a matrix in tiles, of anything else as it is. */
struct device_copy {
    const void *key; /* the host's */
    struct device_matrix mat;
    void *data;
};

/* What is on its way to the GPU. */
struct staging {
    uint8_t *host, *device; /* pinned; NULL: it goes elsewhere */
    cudaEvent_t free;
};

/* Everything of a rank that lies on its GPU. Pointers are device memory unless said otherwise. */
struct cuda {
    cudaStream_t stream;
    void **pinned;              /* stb_ds: allocations in host memory, */
    size_t allocated;           /* bytes of r->owned: those on the device */
    struct device_copy *copies; /* host, stb_ds */
    struct batch *batch;        /* followed by the ids: one copy per forward, */
    struct staging
        sent[2]; /* which two take turns to carry: the one before may not have left when the next is written */
    int turn;
    int32_t *tokens;          /* (chunk) */
    float *x32[ACT_COUNT];    /* slots in F32, where something reads that */
    uint16_t *x16[ACT_COUNT]; /* slots in halves: inputs of products and of attention */
    float *cs, *sn;
    const float *freq;
    uint16_t *q_absorbed, *latent_out; /* MLA: (chunk, n_head, kv_lora + rope), (chunk, n_head, kv_lora) */
    float *partials;                   /* of attention over a split context */
    struct fp4_rows x4, hidden4;
    uint16_t *hidden, *hidden_shared; /* few: (jobs, DECODE_MAX_TOKENS, n_ff); many: (slots, n_ff), (chunk, n_ff) */
    struct route_args route;
    struct sort_args sort;
    float *expert_out; /* (chunk k, n_embd) results of the experts before they are weighed */
    float *logits; /* (LOGIT_ROWS, n_vocab) or, in one of several ranks, of the rows it has; NULL: see cuda_logits */
    size_t logits_stride; /* floats from row to row */
    float *logits_host;   /* host, pinned, likewise */
    float *gathered;      /* (n_rank, DECODE_MAX_TOKENS, n_embd), for NCCL; */
    uint16_t *sum16;      /* (chunk, n_embd) BF16 */
#ifdef HAVE_NCCL
    ncclComm_t comm;
#endif
    struct sample_args sample;
    struct sampling sampling;                     /* of the latest choice */
    int32_t *token_host;                          /* pinned */
    cudaGraphExec_t graph[DECODE_MAX_TOKENS + 1]; /* of forwards of so many tokens; NULL: not yet */
    struct staging staging[STAGING_BUFFERS];      /* while the weights are uploaded */
    uint32_t *range, range_host[2]; /* of repacking; here, as the copy may end after a failed wait for it */
    int mma_turns;                  /* of k_mma_rate that take some milliseconds; 0: not measured */
};

static bool cuda_ok(struct rank *r, cudaError_t e, const char *what) {
    if (e == cudaSuccess) return !r->failed;
    const bool image = e == cudaErrorNoKernelImageForDevice || e == cudaErrorUnsupportedPtxVersion;
    cudaGetLastError();
    return rank_fail(r, "%s: %s%s", what, cudaGetErrorString(e),
                     image ? " (the program is for other chips or a newer driver: see moe --version)" : "");
}

/* Waits for an event, or NULL: for all that was enqueued. With other ranks a GPU may wait for one that never comes: then it must not be
 * waited for blindly. */
static bool await(struct rank *r, cudaEvent_t event, const char *what) {
    struct cuda *c = r->cuda;
    struct backoff p = {};
    cudaError_t e;
    if (!r->heartbeat[0])
        return cuda_ok(r, event ? cudaEventSynchronize(event) : cudaStreamSynchronize(c->stream), what);
    while ((e = event ? cudaEventQuery(event) : cudaStreamQuery(c->stream)) == cudaErrorNotReady) {
        if (rank_keep_waiting(r, &p, what)) continue;
#ifdef HAVE_NCCL
        if (c->comm) ncclCommAbort(c->comm); /* what is enqueued must end before memory is freed */
        c->comm = NULL;
#endif
    }
    if (cudaPeekAtLastError() == cudaErrorNotReady) cudaGetLastError();
    return cuda_ok(r, e, what);
}
extern "C" bool cuda_sync(struct rank *r, const char *what) { return await(r, NULL, what); }

extern "C" bool cuda_copy(struct rank *r, void *to, const void *from, size_t bytes, const char *what) {
    return cuda_ok(r, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, r->cuda->stream), what);
}

extern "C" void *cuda_memory(struct rank *r, size_t bytes, const char *what) {
    struct cuda *c = r->cuda;
    void *p = NULL;
    if (r->failed) return NULL;
    if (cudaMalloc(&p, bytes + 256) != cudaSuccess) return cudaGetLastError(), gpu_full(r, bytes, what), nullptr;
    arrput(r->owned, p);
    c->allocated += bytes;
    cuda_ok(r, cudaMemsetAsync(p, 0, bytes + 256, c->stream), "clearing memory");
    return p;
}

extern "C" void *cuda_host_memory(struct rank *r, size_t bytes, const char *what) {
    void *p = NULL;
    if (r->failed || !cuda_ok(r, cudaHostAlloc(&p, bytes, cudaHostAllocPortable | cudaHostAllocMapped), what))
        return NULL;
    arrput(r->cuda->pinned, p);
    return memset(p, 0, bytes);
}

static struct device_matrix *device_matrix_of(struct cuda *c, const struct weight *w) {
    return &hmgetp(c->copies, w->data)->mat;
}
static void *device_vector_of(struct cuda *c, const void *key) { return hmgetp(c->copies, key)->data; }

extern "C" const void *cuda_vector(struct rank *r, const void *key, const void *from, size_t bytes, const char *what) {
    struct device_copy t = *hmgetp(r->cuda->copies, key);
    t.key = key;
    if (!key || t.data || !(t.data = cuda_memory(r, bytes, what))) return t.data;
    cuda_copy(r, t.data, from, bytes, what);
    hmputs(r->cuda->copies, t);
    return t.data;
}

extern "C" bool cuda_matrix(struct rank *r, const struct weight *w, const char *what) {
    struct device_copy t = *hmgetp(r->cuda->copies, w->data);
    struct device_matrix *d = &t.mat;
    if (d->codes || r->failed) return false;
    t.key = w->data;
    d->fmt = weight_format(w->type), d->n_out = w->n_out, d->n_in = w->n_in, d->n_expert = w->n_expert;
    d->n_rt = (w->n_out + TILE_ROWS - 1) / TILE_ROWS, d->n_kt = (w->n_in + TILE_COLS - 1) / TILE_COLS;
    d->codes = (uint8_t *)cuda_memory(r, weight_tiles(w) * TILE_BYTES(d->fmt), what);
    if (d->fmt != FMT_F16) d->scales = (uint8_t *)cuda_memory(r, weight_tiles(w) * TILE_SCALES, what);
    d->scale = (const float *)cuda_vector(r, w->scale, w->scale, (size_t)w->n_expert * sizeof(float), what);
    d->bias = (const float *)cuda_vector(r, w->bias, w->bias, (size_t)w->n_out * sizeof(float), what);
    hmputs(r->cuda->copies, t);
    return !r->failed;
}

/* A stage to be written, whose contents before have left; made at the first call. NULL after an error. */
static uint8_t *staging_take(struct rank *r, struct staging *s, size_t bytes, bool device, const char *what) {
    if (s->free) {
        await(r, s->free, what);
    } else {
        cuda_ok(r, cudaMallocHost((void **)&s->host, bytes), what);
        if (device) cuda_ok(r, cudaMalloc((void **)&s->device, bytes), what);
        cuda_ok(r, cudaEventCreateWithFlags(&s->free, cudaEventDisableTiming), what);
    }
    return r->failed ? NULL : s->host;
}

static void staging_free(struct staging *s) {
    if (s->device) cudaFree(s->device);
    if (s->host) cudaFreeHost(s->host);
    if (s->free) cudaEventDestroy(s->free);
    *s = {};
}

extern "C" uint8_t *cuda_staging(struct rank *r, int stage) {
    return staging_take(r, &r->cuda->staging[stage], STAGING_BYTES, true, "memory for the upload");
}

extern "C" void cuda_repack(struct rank *r, const struct weight *w, struct repack k, int stage, size_t bytes) {
    struct cuda *c = r->cuda;
    struct device_matrix *d = device_matrix_of(c, w);
    const struct staging *s = &c->staging[stage];
    const size_t tiles = (size_t)k.n_e * (size_t)k.n_rt * (size_t)d->n_kt;
    if (bytes) cuda_copy(r, s->device, s->host, bytes, "uploading weights");
    d->unit = k.unit;
    LAUNCH_PDL(k_repack, (unsigned)((tiles + 7) / 8), 256, 0, c->stream, k, s->device, *d, c->range);
    cuda_ok(r, cudaGetLastError(), "repacking weights");
    cuda_ok(r, cudaEventRecord(s->free, c->stream), "repacking weights");
}

extern "C" bool cuda_range(struct rank *r, uint32_t range[2]) {
    struct cuda *c = r->cuda;
    if (r->failed) return false;
    cuda_copy(r, c->range_host, c->range, sizeof c->range_host, "repacking weights");
    cuda_ok(r, cudaMemsetAsync(c->range, 0, sizeof c->range_host, c->stream), "repacking weights");
    if (cuda_ok(r, cudaStreamSynchronize(c->stream), "repacking weights"))
        memcpy(range, c->range_host, sizeof c->range_host);
    return !r->failed;
}

extern "C" void cuda_uploaded(struct rank *r) {
    cuda_ok(r, cudaStreamSynchronize(r->cuda->stream), "uploading weights");
    for (struct staging &s : r->cuda->staging) staging_free(&s);
    r->weight_bytes = r->cuda->allocated;
}

/* ============================================================================================================
 * Operations
 *
 * The functions of the table cuda_ops: what they enqueue, and what they wait for.
 * ============================================================================================================ */

static unsigned ceil_div(int n, int by) { return (unsigned)((n + by - 1) / by); }

/* Tokens and position to the device. */
static void send_batch(struct rank *r) {
    struct cuda *c = r->cuda;
    struct staging *s = &c->sent[c->turn ^= 1];
    const size_t bytes = (size_t)r->n_tok * sizeof *r->tokens;
    int32_t *out = (int32_t *)s->host;
    if (!await(r, s->free, "sending tokens")) return;
    out[0] = r->pos, out[1] = r->n_tok;
    memcpy(out + 2, r->tokens, bytes);
    cuda_copy(r, c->batch, out, bytes + sizeof *c->batch, "sending tokens");
    cuda_ok(r, cudaEventRecord(s->free, c->stream), "sending tokens");
}

/* True: the whole forward was replayed from its graph. Otherwise a forward of few tokens is recorded. */
static bool cuda_begin(struct rank *r) {
    struct cuda *c = r->cuda;
    send_batch(r);
    if (r->n_tok > DECODE_MAX_TOKENS || profiling()) return false;
    if (!c->graph[r->n_tok]) {
        cuda_ok(r, cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal), "recording a forward pass");
        return false;
    }
    cuda_ok(r, cudaGraphLaunch(c->graph[r->n_tok], c->stream), "a forward pass");
    return true;
}

static void cuda_end(struct rank *r) {
    struct cuda *c = r->cuda;
    cudaGraph_t g = NULL;
    cuda_ok(r, cudaGetLastError(), "a forward pass");
    if (r->n_tok > DECODE_MAX_TOKENS || profiling()) return;
    cuda_ok(r, cudaStreamEndCapture(c->stream, &g), "recording a forward pass");
    cuda_ok(r, cudaGraphInstantiate(&c->graph[r->n_tok], g, 0), "recording a forward pass");
    cudaGraphDestroy(g);
    rank_barrier(r); /* a kernel that waits could keep another rank on the same GPU from getting this far */
    cuda_ok(r, cudaGraphLaunch(c->graph[r->n_tok], c->stream), "a forward pass");
}

static struct tp_peer tp_peer_of(const struct rank *r) {
    return {r->m->shard.rank, r->m->shard.n_rank, r->sequence, r->heartbeat[r->index]};
}

static void send_rows(struct rank *r, struct send_args a) {
    LAUNCH_PDL(k_send_rows, a.n_row ? (unsigned)ALLREDUCE_BLOCKS : 1u, 256, 0, r->cuda->stream, a);
}

static void cuda_embed(struct rank *r, enum act out) {
    struct cuda *c = r->cuda;
    r->n_all_reduce = 0;
    LAUNCH_PDL(k_embed, (unsigned)r->n_tok, ROW_THREADS, 0, c->stream,
               r->m->embd.data ? *device_matrix_of(c, &r->m->embd) : device_matrix{}, c->tokens, c->batch, c->freq,
               r->m->rope_dim / 2, r->m->rope_factor, c->x32[out], c->cs, c->sn);
    if (!r->m->shard.stage) return;
    const struct mailbox *own = &r->mailbox[r->index], *before = own - r->m->shard.n_rank;
    const size_t n = (size_t)r->m->n_embd;
    send_rows(r, {tp_peer_of(r), CH_RECV, own->hidden_flag, 1, own->x, c->x32[out], n, n, r->n_tok, r->m->n_embd,
                  before->credit});
}

/* What k_add_norm gets for n_tok rows of n: out in halves, and in F32 too where the slot has that. */
static struct norm_args norm_of(struct rank *r, float *x, int n_tok, int n, const float *delta, const float *w,
                                enum act out) {
    struct cuda *c = r->cuda;
    struct norm_args a = {};
    a.x = x, a.delta = delta, a.weight = (const float *)device_vector_of(c, w), a.eps = r->m->rms_eps, a.n = n,
    a.n_tok = n_tok;
    a.h16 = c->x16[out], a.h32 = out == A_H ? c->x32[out] : NULL;
    return a;
}
static void cuda_rmsnorm(struct rank *r, enum act x, const float *w, enum act out) {
    struct norm_args a = norm_of(r, r->cuda->x32[x], r->n_tok, r->width[x], NULL, w, out);
    LAUNCH_PDL(k_add_norm<DELTA_OWN>, (unsigned)r->n_tok, NORM_THREADS, 0, r->cuda->stream, a);
}

#ifdef HAVE_NCCL
static bool nccl_ok(struct rank *r, ncclResult_t e, const char *what) {
    if (e == ncclSuccess) return !r->failed;
    return rank_fail(r, "%s: %s (%s)", what, ncclGetErrorString(e), ncclGetLastError(r->cuda->comm));
}

/* The sum by NCCL. For decode tokens it only carries the parts, which are then added in the order of the ranks; for many it adds, in
 * BF16: two bytes per value cross the bus instead of four, and each addition rounds to 8 bits (NMSE of about 4e-6). */
static bool all_reduce_by_nccl(struct rank *r, struct norm_args *a) {
    struct cuda *c = r->cuda;
    const size_t count = (size_t)a->n_tok * (size_t)a->n;
    const bool decode = a->n_tok <= DECODE_MAX_TOKENS;
    if (!c->comm || (decode && !r->by_nccl[a->n_tok])) return false;
    if (decode) {
        nccl_ok(r, ncclAllGather(a->delta, c->gathered, count, ncclFloat32, c->comm, c->stream), "NCCL all-gather");
        a->delta = c->gathered;
        LAUNCH_PDL(k_add_norm<DELTA_PARTS>, (unsigned)a->n_tok, NORM_THREADS, 0, c->stream, *a);
    } else {
        LAUNCH_PDL(k_to_bf16, (unsigned)((count + 1023) / 1024), 256, 0, c->stream, (const float *)a->delta, c->sum16,
                   count);
        nccl_ok(r, ncclAllReduce(c->sum16, c->sum16, count, ncclBfloat16, ncclSum, c->comm, c->stream),
                "NCCL all-reduce");
        a->delta = c->sum16;
        LAUNCH_PDL(k_add_norm<DELTA_BF16>, (unsigned)a->n_tok, NORM_THREADS, 0, c->stream, *a);
    }
    return true;
}

/* The communicator of the stage, and its buffers, which come with the first calls: before the rest of the memory is given out. */
extern "C" void cuda_nccl_init(struct rank *r) {
    enum { TRY = 1024 };
    struct cuda *c = r->cuda;
    const struct shard p = r->m->shard;
    ncclUniqueId id = {}, all[MAX_RANKS];
    float *room = (float *)cuda_memory(r, (size_t)(p.n_rank + 1) * TRY * sizeof *room, "NCCL's first sums");
    if (!p.rank) nccl_ok(r, ncclGetUniqueId(&id), "NCCL");
    rank_all_gather(r, &id, all, sizeof id);
    if (!rank_agree(r)) return;
    char *err = r->err; /* who fails here cannot tell the others, which wait inside NCCL: the program ends */
    r->err = NULL;
    nccl_ok(r, ncclCommInitRank(&c->comm, p.n_rank, all[p.stage * p.n_rank], p.rank), "NCCL");
    nccl_ok(r, ncclAllGather(room, room + TRY, TRY, ncclFloat32, c->comm, c->stream), "NCCL");
    nccl_ok(r, ncclAllReduce(room, room, TRY, ncclBfloat16, ncclSum, c->comm, c->stream), "NCCL");
    cuda_ok(r, cudaStreamSynchronize(c->stream), "NCCL");
    r->err = err;
}

extern "C" int cuda_nccl(void) {
    int version = 0;
    return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}
#else
static bool all_reduce_by_nccl(struct rank *, struct norm_args *) { return false; }
extern "C" void cuda_nccl_init(struct rank *) {}
extern "C" int cuda_nccl(void) { return 0; }
#endif

static void cuda_all_reduce_add_rmsnorm(struct rank *r, enum act x, enum act delta, const float *w, enum act out) {
    struct cuda *c = r->cuda;
    const struct shard *shard = &r->m->shard;
    const int n_tok = r->n_tok, n = r->width[x], piece = ALLREDUCE_SLOT / n; /* rows that are pushed at once */
    struct norm_args a = norm_of(r, c->x32[x], n_tok, n, c->x32[delta], w, out);
    if (shard->n_rank == 1 && !r->sizes.nccl) {
        LAUNCH_PDL(k_add_norm<DELTA_OWN>, (unsigned)n_tok, NORM_THREADS, 0, c->stream, a);
        return;
    }
    a.p = tp_peer_of(r), a.place = (int)r->n_all_reduce++;
    if (all_reduce_by_nccl(r, &a)) return;
    /* a full queue of launches could stop another rank of the same GPU, for which they wait */
    if (r->shared && n_tok > DECODE_MAX_TOKENS) cuda_sync(r, "a forward pass");
    const struct mailbox *stage = &r->mailbox[shard->stage * shard->n_rank];
    for (int k = 0; k < shard->n_rank; k++) a.slot[k] = stage[k].slot, a.flag[k] = stage[k].reduce_flag;
    const size_t step = (size_t)piece * (size_t)n;
    for (int t = 0; t < n_tok; t += piece) {
        a.n_tok = min(n_tok - t, piece);
        LAUNCH_PDL(k_add_norm<DELTA_PUSHED>, (unsigned)min(a.n_tok, (int)ALLREDUCE_BLOCKS), NORM_THREADS, 0, c->stream,
                   a);
        a.x += step, a.delta = (const float *)a.delta + step, a.h16 += step;
        if (a.h32) a.h32 += step;
    }
}

static void cuda_final_reduce(struct rank *r, enum act x, enum act delta) {
    const struct shard *shard = &r->m->shard;
    const size_t n = (size_t)r->m->n_embd;
    cuda_all_reduce_add_rmsnorm(r, x, delta, NULL, A_H);
    if (shard->stage + 1 == shard->n_stage) return;
    const struct mailbox *next = &r->mailbox[r->index + shard->n_rank];
    send_rows(r, {tp_peer_of(r), CH_SEND, r->mailbox[r->index].credit, 1, r->cuda->x32[x], next->x, n, n, r->n_tok,
                  r->m->n_embd, next->hidden_flag});
}

/* The next launch moves `count` matrices of w's shape, and `more` bytes. */
static void profile_matrices(const struct device_matrix *w, double count, double more) {
    static const char *const format[] = {"fp4", "q8", "f16"};
    profile_next(count * w->n_rt * w->n_kt * (TILE_BYTES(w->fmt) + (w->scales ? TILE_SCALES : 0)) + more,
                 "%.0f of %dx%d %s", count, w->n_out, w->n_in, format[w->fmt]);
}

/* y = W x for n_tok rows of halves. batch > 0: one matrix per head, x and y advance by x_batch and y_batch. */
static void product(struct rank *r, const struct device_matrix *w, const uint16_t *x, size_t x_stride, size_t x_batch,
                    int n_tok, int batch, uint16_t *y16, float *y32, size_t y_stride, size_t y_batch) {
    struct cuda *c = r->cuda;
    profile_matrices(w, max(batch, 1), (double)n_tok * w->n_out * max(batch, 1) * (y32 ? 4 : 2));
    if (n_tok <= DECODE_MAX_TOKENS) {
        struct gemv_args p = {};
        p.part[0].w = *w, p.part[0].x = x, p.part[0].x_stride = x_stride, p.part[0].x_job = x_batch,
        p.part[0].max_jobs = 1;
        p.n_part = 1, p.n_tok = n_tok, p.batch = batch;
        p.y16 = y16, p.y32[0] = y32, p.y_stride[0] = y_stride, p.y_batch = y_batch;
        gemv_sum_launch(&p, c->stream);
        return;
    }
    struct gemm_args g = {};
    g.w = *w, g.x = x, g.x_stride = x_stride, g.n_tok = n_tok, g.y_f32 = y32 != NULL,
    g.y = y32 ? (void *)y32 : (void *)y16;
    g.y_stride = y_stride, g.batch = batch, g.x_batch = x_batch, g.y_batch = y_batch;
    gemm_prefill(&g, 0, c->stream);
}

static void cuda_linear(struct rank *r, const struct weight *w, enum act x, enum act out) {
    struct cuda *c = r->cuda;
    product(r, device_matrix_of(c, w), c->x16[x], (size_t)r->width[x], 0, r->n_tok, 0, NULL, c->x32[out],
            (size_t)r->width[out], 0);
}

static void cuda_linear3(struct rank *r, enum act x, const struct weight *const w[3], const enum act out[3]) {
    struct cuda *c = r->cuda;
    struct gemv_args p = {};
    for (int i = 0; i < 3 && w[i]; i++) {
        if (r->n_tok > DECODE_MAX_TOKENS) {
            cuda_linear(r, w[i], x, out[i]);
            continue;
        }
        struct gemv_batch *q = &p.part[p.n_part];
        profile_matrices(device_matrix_of(c, w[i]), 1, 4.0 * r->n_tok * w[i]->n_out);
        q->w = *device_matrix_of(c, w[i]), q->x = c->x16[x], q->x_stride = (size_t)r->width[x], q->max_jobs = 1;
        p.y32[p.n_part] = c->x32[out[i]], p.y_stride[p.n_part++] = (size_t)r->width[out[i]];
    }
    if (!p.n_part) return;
    p.separate = true, p.n_tok = r->n_tok;
    gemv_sum_launch(&p, c->stream);
}

static struct rope_args rope_of(struct rank *r, int il, enum act q, enum act k) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    struct cuda *c = r->cuda;
    struct rope_args p = {};
    p.batch = c->batch, p.cs = c->cs, p.sn = c->sn, p.q = c->x32[q], p.k = c->x32[k], p.q16 = c->x16[q];
    p.kp = r->kv[il].k, p.vp = r->kv[il].v;
    p.n_head = m->n_head, p.n_head_kv = m->n_head_kv, p.d = m->head_k, p.dv = m->head_v, p.rope = m->rope_dim;
    p.latent = m->kv_lora, p.nope = m->nope, p.eps = m->rms_eps, p.q_rope = c->q_absorbed;
    p.q_norm = (const float *)device_vector_of(c, layer->q_norm),
    p.k_norm = (const float *)device_vector_of(c, m->kv_lora ? layer->kv_a_norm : layer->k_norm);
    return p;
}

static void cuda_rope_store_kv(struct rank *r, int il, enum act q, enum act k, enum act v) {
    struct rope_args p = rope_of(r, il, q, k);
    p.v = r->cuda->x32[v];
    LAUNCH_PDL(k_rope_gqa, dim3(ceil_div(p.n_head + 2 * p.n_head_kv, 4), (unsigned)r->n_tok), 128, 0, r->cuda->stream,
               p);
}

static void cuda_mla_store(struct rank *r, int il, enum act q, enum act kv) {
    struct rope_args p = rope_of(r, il, q, kv);
    LAUNCH_PDL(k_rope_mla, dim3(1 + ceil_div(p.n_head, 4), (unsigned)r->n_tok), 128, 0, r->cuda->stream, p);
}

static void attend(struct rank *r, int il, const uint16_t *q, int dk, uint16_t *out, int dv, int n_head_kv) {
    const struct model *m = r->m;
    struct cuda *c = r->cuda;
    struct attn_args a = {};
    a.q = q, a.out = out, a.partials = c->partials, a.k = r->kv[il].k, a.v = r->kv[il].v;
    a.batch = c->batch, a.n_tok = r->n_tok, a.n_head = m->n_head, a.n_head_kv = n_head_kv, a.dk = dk, a.dv = dv;
    a.q_stride = (size_t)m->n_head * (size_t)dk, a.out_stride = (size_t)m->n_head * (size_t)dv;
    a.scale = m->attn_scale, a.max_splits = r->sizes.splits;
    const double key = (double)kv_token_bytes(m, r->kv_type) / m->n_layer;
    profile_next((r->pos + r->n_tok) * key, "%d keys", r->pos + r->n_tok);
    attn_launch(&a, m->kv_lora != 0, r->n_tok > DECODE_MAX_TOKENS, c->stream);
}

static void cuda_attention(struct rank *r, int il, enum act q, enum act out) {
    attend(r, il, r->cuda->x16[q], r->m->head_k, r->cuda->x16[out], r->m->head_v, r->m->n_head_kv);
}

/* Queries go into the latent space, attention mixes latents, and these come out as values (arXiv 2405.04434, appendix C). */
static void cuda_mla_attention(struct rank *r, int il, enum act q, enum act out) {
    const struct model *m = r->m;
    struct cuda *c = r->cuda;
    size_t key = (size_t)(m->kv_lora + m->rope_dim), lat = (size_t)m->kv_lora, heads = (size_t)m->n_head;
    product(r, device_matrix_of(c, &m->layers[il].wk_b), c->x16[q], heads * (size_t)m->head_k, (size_t)m->head_k,
            r->n_tok, m->n_head, c->q_absorbed, NULL, heads * key, key);
    attend(r, il, c->q_absorbed, (int)key, c->latent_out, m->kv_lora, 1);
    product(r, device_matrix_of(c, &m->layers[il].wv_b), c->latent_out, heads * lat, lat, r->n_tok, m->n_head,
            c->x16[out], NULL, heads * (size_t)m->head_v, (size_t)m->head_v);
}

/* Collects the squares of the inputs of network `ffn` of a layer: x, and hidden rows. first, rows: as in k_in_sum2. */
static void in_sum2_add(struct rank *r, int il, int ffn, enum act x, const uint16_t *hidden, const int32_t *first,
                        const int32_t *rows) {
    struct ffn_weights ffns[2];
    layer_ffns(&r->m->layers[il], ffns);
    if (!r->in_sum2) return;
    float *sums = r->in_sum2 + in_sum2_before(r->m, il) + (ffn ? ffn_in_sum2(&ffns[0]) : 0);
    const int n_in = ffns[ffn].gate->n_in, n_ff = ffns[ffn].gate->n_out, n_e = ffns[ffn].gate->n_expert;
    LAUNCH_PDL(k_in_sum2, dim3(ceil_div(n_in, 256), (unsigned)n_e), 256, 0, r->cuda->stream, r->cuda->x16[x],
               (size_t)r->width[x], first, rows, r->n_tok, n_in, 1.0f, sums);
    LAUNCH_PDL(k_in_sum2, dim3(ceil_div(n_ff, 256), (unsigned)n_e), 256, 0, r->cuda->stream, hidden, (size_t)n_ff,
               first, (const int32_t *)NULL, r->n_tok, n_ff, HIDDEN_SCALE * HIDDEN_SCALE,
               sums + (size_t)n_e * (size_t)n_in);
}

/* out (+)= down(silu(gate x) * (up x)) of network `ffn` of a layer for many tokens. */
static void dense_ffn_prefill(struct rank *r, int il, int ffn, enum act x, enum act out) {
    struct cuda *c = r->cuda;
    struct ffn_weights ffns[2];
    layer_ffns(&r->m->layers[il], ffns);
    const struct weight *gate = ffns[ffn].gate, *up = ffns[ffn].up, *down = ffns[ffn].down;
    struct gemm_args g = {};
    g.w = *device_matrix_of(c, gate), g.w2 = *device_matrix_of(c, up), g.x = c->x16[x],
    g.x_stride = (size_t)r->width[x], g.n_tok = r->n_tok;
    g.y = c->hidden_shared, g.y_stride = (size_t)gate->n_out;
    profile_matrices(&g.w, 2, 0);
    gemm_prefill(&g, 1, c->stream);
    in_sum2_add(r, il, ffn, x, c->hidden_shared, NULL, NULL);
    struct device_matrix d = *device_matrix_of(c, down);
    d.unit *= HIDDEN_SCALE;
    product(r, &d, c->hidden_shared, (size_t)gate->n_out, 0, r->n_tok, 0, NULL, c->x32[out], (size_t)r->width[out], 0);
}

/* The networks of a layer, of which routed experts are the first, for 1..16 tokens. */
static void ffn_decode(struct rank *r, int il, bool routed, enum act x, enum act out) {
    struct cuda *c = r->cuda;
    const struct route_args *ro = &c->route;
    struct gemv_glu_args u = {};
    struct gemv_args d = {};
    struct ffn_weights ffns[2];
    const int n = layer_ffns(&r->m->layers[il], ffns);
    double jobs[2] = {1, 1}; /* matrices that are read */
    for (int i = 0; i < n; i++) {
        const bool experts = routed && !i;
        struct gemv_batch p = {};
        p.w = *device_matrix_of(c, ffns[i].gate), p.x = c->x16[x], p.x_stride = (size_t)r->width[x], p.max_jobs = 1;
        if (experts) {
            p.expert = ro->job_expert, p.n_jobs = ro->n_jobs;
            p.max_jobs = min(r->n_tok * r->m->n_expert_used, p.w.n_expert);
            jobs[i] = experts_expected(r->m, p.w.n_expert, r->n_tok);
        }
        u.gate[i] = p, u.up[i] = *device_matrix_of(c, ffns[i].up), u.y[i] = experts ? c->hidden : c->hidden_shared;
        u.y_stride[i] = (size_t)p.w.n_out;
        p.w = *device_matrix_of(c, ffns[i].down), p.w.unit *= HIDDEN_SCALE, p.x = u.y[i], p.x_stride = u.y_stride[i];
        if (experts) p.x_job = DECODE_MAX_TOKENS * p.x_stride, p.weight = ro->job_weight;
        d.part[i] = p;
    }
    u.n_part = d.n_part = n, u.n_tok = d.n_tok = r->n_tok;
    d.y32[0] = c->x32[out], d.y_stride[0] = (size_t)r->width[out];
    for (int i = 0; i < n; i++) profile_matrices(&u.gate[i].w, 2 * jobs[i], 0);
    gemv_glu_launch(&u, c->stream);
    for (int i = 0; i < n; i++) profile_matrices(&d.part[i].w, jobs[i], 0);
    gemv_sum_launch(&d, c->stream);
}

static void cuda_ffn(struct rank *r, int il, enum act x, enum act out) {
    if (r->n_tok <= DECODE_MAX_TOKENS && !r->stats) ffn_decode(r, il, false, x, out);
    else dense_ffn_prefill(r, il, 0, x, out);
}

static void cuda_moe_ffn(struct rank *r, int il, enum act x, enum act out) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    struct cuda *c = r->cuda;
    struct route_args p = c->route;
    const void *router = device_vector_of(c, layer->router.data);
    if (router_halves(&layer->router)) p.w16 = (const uint16_t *)router;
    else p.w32 = (const float *)router;
    p.bias = (const float *)device_vector_of(c, layer->router_bias), p.x = c->x32[x];
    p.n_tok = r->n_tok, p.n_expert = layer->n_expert;
    if (r->n_tok <= DECODE_MAX_TOKENS && !r->stats) { /* what is collected lies sorted by expert */
        route_decode_launch(&p, c->stream);
        ffn_decode(r, il, true, x, out);
        return;
    }
    LAUNCH_PDL(k_route_logits, dim3(ceil_div(layer->n_expert, 64), ceil_div(r->n_tok, 64)), 256, 0, c->stream, p);
    LAUNCH_PDL(k_route_prefill, ceil_div(r->n_tok, 4), 128, 4 * 2 * sizeof(float) * (size_t)layer->n_expert, c->stream,
               p);
    struct sort_args s = c->sort;
    s.n_slots = r->n_tok * s.k, s.n_expert = layer->n_expert;
    LAUNCH_PDL(k_sort, (unsigned)layer->n_expert, 256, 0, c->stream, s);
    LAUNCH_PDL(k_tiles, 1, 1024, 0, c->stream, s, (int)TN);
    if (layer->sh_gate.data) dense_ffn_prefill(r, il, 1, x, out);
    struct gemm_args g = {};
    g.w = *device_matrix_of(c, &layer->gate), g.w2 = *device_matrix_of(c, &layer->up), g.x = c->x16[x],
    g.x_stride = (size_t)r->width[x], g.rows = s.row;
    g.tile_expert = s.tile_expert, g.tile_first = s.tile_first, g.tile_count = s.tile_count, g.n_tiles = s.n_tiles;
    g.max_tiles = s.n_slots / TN + (layer->n_expert < s.n_slots ? layer->n_expert : s.n_slots);
    g.n_tok = s.n_slots, g.y = c->hidden, g.y_stride = (size_t)layer->gate.n_out;
    const bool w4a4 = r->sizes.w4a4 && g.w.fmt == FMT_FP4 && device_matrix_of(c, &layer->down)->fmt == FMT_FP4;
    auto experts = [&](int glu, int n_row, struct fp4_rows rows) {
        if (w4a4) quantize_fp4(g.x, g.x_stride, n_row, g.w.n_in, g.xq = rows, c->stream);
        profile_matrices(&g.w, (1 + glu) * experts_expected(m, layer->n_expert, r->n_tok), 0);
        gemm_prefill(&g, glu, c->stream);
    };
    experts(1, r->n_tok, c->x4);
    in_sum2_add(r, il, 0, x, c->hidden, s.first, s.row);
    g.w = *device_matrix_of(c, &layer->down), g.w.unit *= HIDDEN_SCALE, g.x = c->hidden, g.x_stride = g.y_stride,
    g.rows = NULL;
    g.y = c->expert_out, g.y_f32 = 1, g.y_stride = (size_t)r->width[out];
    experts(0, s.n_slots, c->hidden4);
    if (r->stats) {
        struct stats_args a = {
            c->expert_out, m->n_embd, s.k,      s.first,
            s.row,         s.id,      p.weight, r->stats + (size_t)il * (size_t)m->n_expert_max * STATS};
        LAUNCH_PDL(k_stats, (unsigned)layer->n_expert, 256, 0, c->stream, a);
    }
    LAUNCH_PDL(k_combine, (unsigned)r->n_tok, ROW_THREADS, 0, c->stream, c->expert_out, s.inverse, p.weight, s.k,
               r->width[out], layer->sh_gate.data != NULL, c->x32[out]);
}

static void cuda_logits(struct rank *r, int first, int n) {
    struct cuda *c = r->cuda;
    const struct shard *shard = &r->m->shard;
    const struct mailbox *head = &r->mailbox[shard->stage * shard->n_rank];
    if (!c->logits) c->logits = head->logits; /* of the first of several ranks: where the others push theirs */
    struct norm_args a =
        norm_of(r, c->x32[A_X] + (size_t)first * (size_t)r->width[A_X], n, r->width[A_X], NULL, r->m->output_norm, A_H);
    LAUNCH_PDL(k_add_norm<DELTA_OWN>, (unsigned)n, NORM_THREADS, 0, c->stream, a);
    struct device_matrix w =
        *device_matrix_of(c, &r->m->output); /* maybe the embedding, of which the first rank's rows are the first */
    w.n_out = r->m->output.n_out, w.n_rt = (w.n_out + TILE_ROWS - 1) / TILE_ROWS;
    product(r, &w, c->x16[A_H], (size_t)r->width[A_H], 0, n, 0, NULL, c->logits, c->logits_stride, 0);
    if (shard->rank) /* behind the last id there is room for three more */
        send_rows(r,
                  {tp_peer_of(r), CH_LOGITS, NULL, 0, c->logits, head->logits + r->m->first_id, c->logits_stride,
                   logits_stride(r->m->n_vocab), n, (r->m->output.n_out + 3) / 4 * 4, head->logits_flag + shard->rank});
    else if (shard->n_rank > 1)
        send_rows(r, {tp_peer_of(r), CH_LOGITS, head->logits_flag, shard->n_rank, NULL, NULL, 0, 0, 0, 0, NULL});
    cuda_ok(r, cudaGetLastError(), "the output layer");
}

static const float *cuda_read_logits(struct rank *r, int row) {
    struct cuda *c = r->cuda;
    float *out = c->logits_host + (size_t)row * (size_t)r->m->n_vocab;
    cuda_copy(r, out, c->logits + (size_t)row * c->logits_stride, (size_t)r->m->n_vocab * sizeof(float),
              "reading logits");
    cuda_sync(r, "a forward pass");
    return out;
}

static void cuda_sample(struct rank *r, const struct sampling *o, const int32_t *recent, int n_recent, double uniform) {
    struct cuda *c = r->cuda;
    struct sample_args *p = &c->sample;
    c->sampling = *o, p->logits = c->logits;
    sampling_job(p, o, r->m->n_ids, recent, n_recent, uniform);
    LAUNCH_PDL(k_sample, min(ceil_div(p->n, 4 * SAMPLE_THREADS), (unsigned)SAMPLE_BLOCKS), SAMPLE_THREADS, 0, c->stream,
               *p);
    cuda_copy(r, c->token_host, p->token, sizeof(int32_t), "choosing a token");
}

static int32_t cuda_read_token(struct rank *r) {
    struct cuda *c = r->cuda;
    const struct sample_args *p = &c->sample;
    cuda_sync(r, "a forward pass");
    if (*c->token_host >= 0) return *c->token_host;
    return sampling_choose(&c->sampling, r->work, p->n, r->ops->read_logits(r, 0), p->recent, p->n_recent, p->uniform);
}

/* Rows first..first+n-1 of a plane between the cache and host memory: data (n, row_bytes), scale (n, n_group); NULL: not this one. */
static void cuda_kv_copy(struct rank *r, const struct kv_plane *p, size_t first, size_t n, uint8_t *data, float *scale,
                         bool store) {
    const char *what = "copying the cache";
    auto move = [&](void *gpu, void *host, size_t bytes) {
        if (host) cuda_copy(r, store ? gpu : host, store ? host : gpu, bytes, what);
    };
    move(p->data + first * p->row_bytes, data, n * p->row_bytes);
    move(p->scale + first * (size_t)p->n_group, scale, n * (size_t)p->n_group * sizeof *scale);
    cuda_sync(r, what);
}

static void cuda_wait(struct rank *r) { cuda_sync(r, "a forward pass"); }

static void cuda_read_stats(struct rank *r, double *stats, float *in_sum2) {
    const size_t n = (size_t)r->m->n_layer * (size_t)r->m->n_expert_max * STATS;
    const char *what = "reading what was collected";
    cuda_copy(r, stats, r->stats, n * sizeof *stats, what);
    if (in_sum2) cuda_copy(r, in_sum2, r->in_sum2, in_sum2_before(r->m, r->m->n_layer) * sizeof *in_sum2, what);
    cuda_sync(r, what);
}

/* The rate of mma.sync: `turns` rounds of eight independent products per warp, eight warps a scheduler. Grid two blocks an SM, block
 * 512. No memory: `out` is there so that the compiler leaves no product out: sums of positive numbers are never written. */
__global__ void __launch_bounds__(512) k_mma_rate(int turns, float *out) {
    grid_dependency_wait();
    const uint32_t one = 0x3C003C00u + threadIdx.x, a[4] = {one, one, one, one}, b[2] = {one, one};
    float d[8][4], sum = 0;
    UNROLL for (int k = 0; k < 8; k++) UNROLL for (int i = 0; i < 4; i++) d[k][i] = (float)k;
    for (int i = 0; i < turns; i++) UNROLL for (int k = 0; k < 8; k++) mma_f16(d[k], a, b);
    UNROLL for (int k = 0; k < 8; k++) UNROLL for (int i = 0; i < 4; i++) sum += d[k][i];
    if (sum < 0) *out = sum;
}

/* The time between two places in a stream. */
struct stopwatch {
    cudaStream_t stream;
    cudaEvent_t e[2] = {};
    cudaError_t error = cudaSuccess; /* the first */
    bool ok(cudaError_t x) { return (error = error ? error : x) == cudaSuccess; }
    explicit stopwatch(cudaStream_t s) : stream(s) { ok(cudaEventCreate(&e[0])) && ok(cudaEventCreate(&e[1])); }
    void mark(int end) { error || ok(cudaEventRecord(e[end], stream)); }
    double seconds() { /* 0 after an error; waits */
        float ms = 0;
        return !error && ok(cudaEventSynchronize(e[1])) && ok(cudaEventElapsedTime(&ms, e[0], e[1])) ? ms * 1e-3 : 0;
    }
    ~stopwatch() {
        for (cudaEvent_t x : e)
            if (x) cudaEventDestroy(x);
    }
};

/* Seconds of a copy, of several. 0 after an error. */
static double copy_seconds(struct stopwatch *w, void *to, int to_device, const void *from, int from_device, size_t n) {
    enum { RUNS = 20 };
    for (int i = -1; i < RUNS; i++) { /* the first is not counted */
        if (!i) w->mark(0);
        cudaMemcpyPeerAsync(to, to_device, from, from_device, n, w->stream);
    }
    w->mark(1);
    return w->seconds() / RUNS;
}

static struct rates cuda_measure(struct rank *r) {
    struct cuda *c = r->cuda;
    struct rates rates = {};
    struct stopwatch watch(c->stream);
    size_t free_bytes = 0, total = 0, n = (size_t)1 << 29;
    uint8_t *p = NULL;
    double t = 0;
    cudaMemGetInfo(&free_bytes, &total);
    while (n > (size_t)1 << 20 && 2 * n > free_bytes / 2) n /= 2;
    if (cudaMalloc((void **)&p, 2 * n) == cudaSuccess) {
        if ((t = copy_seconds(&watch, p + n, r->device, p, r->device, n)) > 0) rates.bytes = 2 * (double)n / t;
        cudaFree(p);
    }
    t = 0;
    for (int turns = 1; watch.error == cudaSuccess && turns < 1 << 24 && t < 4e-3; turns *= 2) {
        watch.mark(0);
        LAUNCH_PDL(k_mma_rate, 2 * (unsigned)r->n_sm, 512, 0, c->stream, turns, c->x32[A_X]);
        watch.mark(1);
        t = watch.seconds(), c->mma_turns = turns;
    }
    if (t > 0) rates.mma = 2.0 * 16 * 8 * 16 * 8 * c->mma_turns * 16 * 2 * r->n_sm / t;
    cudaGetLastError();
    return rates;
}

static int cuda_profile(struct rank *r, void (*run)(void *), void *arg, struct profile_row *rows, int n) {
    struct cuda *c = r->cuda;
    cudaEvent_t *e = profile_event = (cudaEvent_t *)calloc(2 * (size_t)n, sizeof *e);
    if (!e) rank_fatal("out of memory");
    /* the GPU is kept busy until the host is ahead: else a kernel's time is that of its launch */
    if (c->mma_turns) LAUNCH_PDL(k_mma_rate, 2 * (unsigned)r->n_sm, 512, 0, c->stream, c->mma_turns, c->logits);
    profile_start(rows, n);
    run(arg);
    n = profile_end();
    cuda_wait(r);
    for (int i = 0; i < n; i++) {
        float ms = 0;
        cudaEventElapsedTime(&ms, e[2 * i], e[2 * i + 1]);
        rows[i].seconds = ms * 1e-3;
        cudaEventDestroy(e[2 * i]), cudaEventDestroy(e[2 * i + 1]);
    }
    free(e);
    return n;
}

/* ============================================================================================================
 * Start and end
 *
 * A rank starts in the order of cuda_rank_start: check the model, choose what the chip and the options allow, upload, see what
 * context fits beside the weights, allocate, link the ranks.
 * ============================================================================================================ */

static void cuda_close(struct rank *r) {
    struct cuda *c = r->cuda;
    if (!c) return;
    cudaSetDevice(r->device);
    if (c->stream) cudaStreamSynchronize(c->stream);
    rank_barrier(r); /* nobody writes to this rank's memory any more */
    for (int i = 0; i <= DECODE_MAX_TOKENS; i++)
        if (c->graph[i]) cudaGraphExecDestroy(c->graph[i]);
#ifdef HAVE_NCCL
    if (c->comm) ncclCommDestroy(c->comm); /* behind the graphs: it waits for those that recorded its calls */
#endif
    for (size_t i = 0; i < arrlenu(r->owned); i++) cudaFree(r->owned[i]);
    for (size_t i = 0; i < arrlenu(c->pinned); i++) cudaFreeHost(c->pinned[i]);
    for (struct staging &s : c->staging) staging_free(&s);
    for (struct staging &s : c->sent) staging_free(&s);
    if (c->stream) cudaStreamDestroy(c->stream);
    arrfree(r->owned);
    arrfree(c->pinned);
    hmfree(c->copies);
    free(c);
    free(r->work);
    free(r->kv);
    free(r->tokens);
    r->cuda = NULL;
}

static const struct ops cuda_ops = {
    cuda_begin,        cuda_end,           cuda_embed,      cuda_rmsnorm,       cuda_all_reduce_add_rmsnorm,
    cuda_final_reduce, cuda_linear,        cuda_linear3,    cuda_rope_store_kv, cuda_attention,
    cuda_mla_store,    cuda_mla_attention, cuda_ffn,        cuda_moe_ffn,       cuda_logits,
    cuda_read_logits,  cuda_sample,        cuda_read_token, cuda_kv_copy,       cuda_wait,
    cuda_read_stats,   cuda_measure,       cuda_profile,    cuda_close};

extern "C" int cuda_device_count(char *err) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaSuccess && n) return n;
    snprintf(err, ERR_MAX, "no usable GPU: %s%s", e == cudaSuccess ? "none was found" : cudaGetErrorString(e),
             e == cudaErrorInsufficientDriver ? " (a newer driver is needed)" : "");
    cudaGetLastError();
    return 0;
}

/* Sets a device for a while. */
struct device_for_now {
    int before = 0;
    cudaError_t e;
    explicit device_for_now(int device) {
        cudaGetDevice(&before);
        e = cudaSetDevice(device);
    }
    ~device_for_now() { cudaSetDevice(before); }
};

extern "C" const char *cuda_targets(void) { return MOE_CUDA_TARGETS; }

extern "C" bool cuda_peer(int from, int to) {
    int can = 0;
    if (cudaDeviceCanAccessPeer(&can, from, to) != cudaSuccess) cudaGetLastError();
    return can;
}

/* ---- the steps of a start ---- */

extern "C" void cuda_open(struct rank *r) {
    struct cuda *c = (struct cuda *)calloc(1, sizeof *c);
    if (!c) rank_fatal("out of memory");
    r->ops = &cuda_ops, r->cuda = c;
    if (r->failed) return;
    cuda_ok(r, cudaSetDevice(r->device), "selecting it");
    cuda_ok(r, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "creating a stream");
    c->range = (uint32_t *)cuda_memory(r, sizeof c->range_host, "scratch");
}

extern "C" void cuda_allocate(struct rank *r) {
    const struct model *m = r->m;
    const struct shard p = m->shard;
    const struct gpu_sizes s = r->sizes;
    struct cuda *c = r->cuda;
    struct route_args *route = &c->route;
    c->batch = (struct batch *)cuda_memory(r, ((size_t)r->chunk + 2) * sizeof(int32_t), "activations");
    c->tokens = (int32_t *)(c->batch + 1);
    for (struct staging &x : c->sent)
        staging_take(r, &x, ((size_t)r->chunk + 2) * sizeof(int32_t), false, "host memory");
    c->freq = (const float *)cuda_vector(r, m->rope_freq, m->rope_freq, (size_t)m->rope_dim / 2 * sizeof(float),
                                         "activations");
    uint8_t *cache = (uint8_t *)cuda_memory(r, rank_cache(r, NULL), "the KV cache");
    if (cache) rank_cache(r, cache);
#define BUFFER(field, type, count)                                                           \
    if (const size_t bytes = sizeof(type) * (count)) /* NULL where there is no such thing */ \
    c->field = (type *)cuda_memory(r, bytes, "activations")
    GPU_BUFFERS(BUFFER);
#undef BUFFER
    c->logits_stride = p.n_rank == 1 ? (size_t)m->n_vocab : logits_stride(p.rank ? m->output.n_out : m->n_vocab);
    const size_t logits_bytes = (LOGIT_ROWS * (size_t)m->n_vocab + 1) * sizeof(float);
    c->logits_host = (float *)cuda_host_memory(r, logits_bytes, "host memory for logits");
    c->token_host = (int32_t *)(c->logits_host + LOGIT_ROWS * (size_t)m->n_vocab);
    route->n_embd = m->n_embd, route->k = m->n_expert_used, route->n_group = m->n_group,
    route->n_group_used = m->n_group_used;
    route->softmax = m->gating == GATING_SOFTMAX, route->norm = m->norm_topk_prob,
    route->factor = m->routed_scaling_factor;
    c->sort.id = route->id, c->sort.k = route->k;
    memcpy(r->act, c->x32, sizeof r->act);
    cuda_ok(r, cudaStreamSynchronize(c->stream), "starting");
}

extern "C" void cuda_reach(struct rank *r, int device) {
    cudaError_t e = cudaDeviceEnablePeerAccess(device, 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
    else cuda_ok(r, e, "reaching another GPU");
}

extern "C" double cuda_seconds(struct rank *r, void (*run)(struct rank *, void *), void *arg, const char *what) {
    struct stopwatch watch(r->cuda->stream);
    watch.mark(0), run(r, arg), watch.mark(1);
    const double t = cuda_sync(r, what) ? watch.seconds() : 0;
    cuda_ok(r, watch.error, "timing");
    return t;
}

/* ---- for --doctor ---- */

/* One block, one thread: does the program have an image for this chip? */
__global__ void k_probe(int *out) {
    grid_dependency_wait();
    *out = 42;
}

extern "C" const char *cuda_facts(int device, struct gpu_facts *f, bool probe) {
    const struct device_for_now now(device);
    cudaDeviceProp p;
    int *answer = NULL, said = 0, khz = 0, bits = 0;
    memset(f, 0, sizeof *f);
    cudaError_t e = now.e;
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&p, device);
    if (e == cudaSuccess) e = cudaDeviceGetPCIBusId(f->bus, sizeof f->bus, device);
    if (e == cudaSuccess) e = cudaMemGetInfo(&f->free, &f->total);
    if (e == cudaSuccess) e = cudaDriverGetVersion(&f->driver);
    if (e == cudaSuccess) e = cudaRuntimeGetVersion(&f->runtime);
    if (e == cudaSuccess && probe) e = cudaMalloc((void **)&answer, sizeof *answer);
    if (e != cudaSuccess) return cudaGetLastError(), cudaGetErrorString(e);
    if (cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess)
        f->rate = 2e3 * khz * bits / 8; /* both edges of the clock */
    snprintf(f->name, sizeof f->name, "%.63s", p.name);
    f->major = p.major, f->minor = p.minor, f->block_shared = (int)p.sharedMemPerBlockOptin;
    f->n_sm = p.multiProcessorCount;
    if (probe) {
        LAUNCH_PDL(k_probe, 1, 1, 0, (cudaStream_t)0, answer);
        e = cudaGetLastError();
        if (e == cudaSuccess) e = cudaMemcpy(&said, answer, sizeof said, cudaMemcpyDeviceToHost);
        if (e != cudaSuccess || said != 42)
            snprintf(f->image, sizeof f->image, "%s",
                     e != cudaSuccess ? cudaGetErrorString(e) : "a kernel gave a wrong answer");
        cudaFree(answer);
    }
    cudaGetLastError();
    return NULL;
}

extern "C" void cuda_pair(int from, int to, double *rate, double *latency) {
    const struct device_for_now now(from);
    enum { BIG = 64 << 20, SMALL = 8 << 10 };
    uint8_t *a = NULL, *b = NULL;
    *rate = *latency = 0;
    bool ok = cudaSetDevice(to) == cudaSuccess && cudaMalloc((void **)&b, BIG) == cudaSuccess &&
              cudaSetDevice(from) == cudaSuccess && cudaMalloc((void **)&a, BIG) == cudaSuccess;
    if (from != to && cuda_peer(from, to)) cudaDeviceEnablePeerAccess(to, 0);
    struct stopwatch watch(0);
    const double big = ok ? copy_seconds(&watch, b, to, a, from, BIG) : 0;
    if (big > 0) *rate = BIG / big, *latency = copy_seconds(&watch, b, to, a, from, SMALL);
    cudaFree(a), cudaFree(b);
    cudaGetLastError();
}
