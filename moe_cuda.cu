/* moe_cuda.cu - the GPU backend: the operations of moe.c (struct ops) as CUDA kernels
 *
 * One rank is one struct cuda: its weights, KV cache and activations on one GPU. A forward pass of moe.c calls
 * operations such as cuda_linear and cuda_attention; each enqueues one kernel or a few on the rank's stream. The host
 * waits only for a token, for logits or for statistics, and enqueues the next forward before it reads the token.
 *
 * Start here: the sections "Operations: .." show which kernels a step of a layer launches. Then read one kernel, for
 * example k_gemv_linear, with the tile format of "Weights on the device" beside it.
 *
 *   step                  decode (1 to 16 tokens)                    prefill (more tokens)
 *   embedding             k_embed                                    k_embed
 *   residual add, norm    in the kernel that reads it; several       k_add_norm, after k_to_bf16 and ncclAllReduce
 *     and all-reduce        ranks, long rows, LayerNorm or parallel    or with the push
 *                           feed-forwards: k_add_norm, which also
 *                           pushes and adds partial sums, or
 *                           ncclAllGather
 *   norms of results      k_add_result, of parts of a feed-forward   the same; several ranks: k_add_norm before each
 *                           too
 *   hyper-connections     in place of these two k_hc_mix and k_hc_norm; several ranks: k_add_norm before
 *     of a low rank         k_streams_norm, k_gemv_linear or gemm_kernel, k_to_halves, the same again, k_streams_read
 *   n-grams               k_streams_norm, k_ngram_rows, k_gemv_linear or gemm_kernel, k_ngram_gate, k_ngram_add; among
 *                           hyper-connections that are not of a low rank after k_hc_mix
 *     in the file alone     before them k_want_rows for each table, k_brought_rows
 *   linear                k_gemv_linear                              gemm_kernel
 *   limits of q, k, v     k_clip                                     k_clip
 *   norms of whole rows   k_row_norm, which also exchanges sums      k_row_norm; several ranks: k_add_norm between two
 *   RoPE, KV cache        in attention; MLA: k_mla_query, which      k_rope_gqa or k_rope_mla
 *                           also has the queries' products
 *   attention, its gates  attn_gqa_decode, or attn_mla_kernel and    attn_gqa_prefill, or attn_mla_kernel or
 *                           k_mla_value                                attn_mla_expanded; attn_merge; k_head_gate
 *     of wide heads         k_rope_gqa, attn_mla_kernel                the same, attn_merge
 *   sparse attention      before it k_index_store, k_index_scores or k_index_blocks, k_index_choose, which also lists
 *                           candidates; then the kernels of decode, grouped-query attention after k_rope_gqa
 *   one KV head           k_csa_store, the indexer's choice, attn_mla_kernel; groups of heads by k_gemv_linear or
 *                           gemm_kernel; keys of the indexer that are made of compressed keys by k_csa_store and
 *                           k_gemv_linear or gemm_kernel before these
 *   gated delta net       k_delta_decode                             k_delta_mix, k_delta_prepare, k_delta_scan,
 *                                                                      k_delta_finish
 *   Kimi delta attention  k_delta_decode                             k_delta_mix, k_kda_prepare, k_delta_scan,
 *                                                                      k_delta_finish
 *   Mamba-2               k_mamba_scan, k_mamba_finish               k_delta_mix, k_mamba_prepare, k_delta_scan,
 *                                                                      k_mamba_finish
 *   gated convolution     k_gated_conv                               the same twice
 *   router                k_route_decode                             k_route_logits, k_route_prefill, k_sort, k_tiles
 *   experts, dense FFN    k_gemv_glu (gate, up), k_gemv_down or      gemm_kernel twice, k_combine for experts; before
 *                           k_gemv_linear (down)                       them k_weigh_inputs where inputs are weighted
 *     of zero computation   k_add_inputs                               k_add_inputs
 *   experts in host       before k_gemv_glu k_fetch                  for each wave of experts k_fetch and gemm_kernel,
 *     memory                                                           after k_wave_list
 *   output layer          k_add_norm, k_gemv_linear, for up to 16 rows
 *   MTP layer             k_mtp_input; k_keep_hidden, also after a forward
 *   sampling              k_sample; k_share_token where there are several ranks
 *
 * Decode is memory-bound: a layer has 6 kernels, 7 with norms of rows, 9 with MLA, 12 with its indexer, 10 with that of
 * grouped-query attention, 13 with hyper-connections and compressed keys, 15 with an indexer of these, and 17 where its
 * keys are made of them. Each reads its weights once, dequantizes them to halves in registers and multiplies by
 * m16n8k16 with F32 sums (W4A16). What a token gives does not depend on the other tokens of a decode forward. While
 * attention, router, norms or sums of ranks leave the memory idle, kernels request weights of the next dense products
 * into L2 (struct l2_prefetch).
 * Positions and tokens lie in device memory, so that one CUDA graph per number of tokens replays every forward pass.
 * Prefill is compute-bound: tokens are sorted by expert, and a grouped GEMM works in tiles of K = 64. On SM120 the
 * experts may also run with FP4 activations (W4A4).
 *
 * Numbers: activations between GEMMs are halves, clamped to the largest half, never infinite. Sums, norms, router,
 * softmax and the residual stream are F32. No floating-point sum uses atomics: the same input gives the same bits.
 * Limits: no kernel uses more than the 101,376 bytes of shared memory of SM120.
 * Tests: the PTX that nvcc makes of it runs on a CPU, on the simulator of tests/ptxsim.
 *
 * What its copies of weights and its buffers take is in moe.c, "State: sizes on a GPU". First come the kernels, each
 * with the host function that launches it. From "The GPU state of a rank" on stands the host's side: how a rank starts,
 * and the table of operations.
 *
 * Contents:
 *   Instructions                                  PTX wrappers, launches
 *   Weights on the device                         the tile format, dequantization
 *   Upload: from the file's blocks to tiles
 *   All-reduce and send between ranks             flags, k_send_rows; the all-reduce itself is in k_add_norm
 *   Embedding, residual add, norm
 *   Hyper-connections                             residual streams
 *   Hyper-connections of a low rank, n-grams      k_streams_norm, k_streams_read, k_ngram_rows, k_want_rows
 *   Blocks of layers, short convolutions          k_blocks, k_mix_message, k_gated_conv
 *   Decode: skinny GEMM (1 to 16 tokens)          k_gemv_linear
 *   Decode: feed-forwards                         k_gemv_glu, k_gemv_down
 *   Experts in host memory                        slots, k_want_experts, k_brought_experts, k_fetch
 *   Router
 *   Experts that the CPU computes                 k_ask_experts, k_add_experts
 *   Prefill: tiled GEMM                           gemm_kernel, FP4 activations
 *   Prefill: router, lists of experts, statistics k_route_prefill, k_sort, k_tiles
 *   RoPE and the KV cache
 *   Attention over the KV cache                   splits of a context, which keys a row sees
 *   Attention: reading the cache                  rows to fragments
 *   Attention: grouped queries                    attn_gqa_decode
 *   Attention: latents, wide heads                attn_mla_kernel
 *   Attention: prefill, merge, gates              attn_gqa_prefill, attn_merge, k_mla_value
 *   Attention: choice and launch                  which kernel a shape of heads has
 *   Attention: expanded latents                   attn_mla_expanded
 *   Sparse attention: the indexer                 the keys that a query sees
 *   Attention of one KV head: what it reads       compressed keys
 *   Gated delta net                               k_delta_decode
 *   Gated delta net: tiles                        k_delta_mix, k_delta_prepare
 *   Gated delta net: tiles of other rules         k_kda_prepare, k_mamba_prepare
 *   Gated delta net: scan                         k_delta_scan, k_delta_finish
 *   Mamba-2                                       k_mamba_scan, k_mamba_finish
 *   Sampling
 *   The GPU state of a rank
 *   Operations: forwards                          graphs. START HERE
 *   Operations: norms and sums over ranks
 *   Operations: matrices                          and L2 prefetch
 *   Operations: attention
 *   Operations: feed-forward
 *   Operations: logits and results
 *   Upload
 *   Several GPUs
 *   Start and end
 *   Facts about GPUs
 */
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <omp.h>
#include <stb/stb_ds.h>
#include <sys/mman.h>
#include <type_traits>
#include <unistd.h>

#include "gguf_nvfp4.h"

#include <cuda_fp8.h>
#include <cuda_runtime.h>
#ifdef HAVE_NCCL
#include <nccl.h>
#endif

#define MOE_TYPES_ONLY
#include "moe.c"

/* ============================================================================================================
 * Instructions
 *
 * One function per PTX instruction, division by what a launch knows, and the launch macro.
 * ============================================================================================================ */

/* Whether kernels that this thread launches may start before those in front of them have ended (programmatic dependent
 * launch): on chips from 9.0 on, unless it failed (cuda_forward). */
static thread_local bool launches_overlap;

#define DEVICE        static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define UNROLL        _Pragma("unroll")
#define UNROLL_BY(n)  UNROLL_BY_(unroll n)
#define UNROLL_BY_(x) _Pragma(#x)

/* Return the address within shared memory, and within global memory, that PTX instructions take. */
DEVICE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEVICE size_t global_address(const void *p) { return __cvta_generic_to_global(p); }

/* Copies 16 bytes from global to shared memory asynchronously. !valid: writes zeros and reads nothing. */
DEVICE void cp_async16(void *smem, const void *gmem, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)), "l"(global_address(gmem)),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
/* Closes a group of copies. The wait below ends when at most the N latest groups of this thread are in flight. */
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Loads four 8x8 matrices of halves. Lane l passes the address of row l % 8 of matrix l / 8. */
#define LDMATRIX_X4(name, how)                                                              \
    DEVICE void name(uint32_t r[4], const void *row) {                                      \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                       \
                     : "r"(shared_address(row))                                             \
                     : "memory");                                                           \
    }
LDMATRIX_X4(ldmatrix_x4, "")
LDMATRIX_X4(ldmatrix_x4_trans, ".trans")

/* d (16,8) += a (16,16) b (16,8): halves, F32 sums. With g = lane / 4 and t = lane % 4 a lane holds
 *   a0 (row g, k 2t, 2t+1)    a1 (row g+8, same k)    a2 (row g, k 2t+8, 2t+9)    a3 (row g+8, same k)
 *   b0 (k 2t, 2t+1, column g) b1 (k 2t+8, 2t+9, column g)
 *   d0, d1 (row g, columns 2t, 2t+1)    d2, d3 (row g+8, same columns) */
DEVICE void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
/* d (16,8) += a (16,64) b (64,8) in E2M1, with a UE4M3 scale per 16 values of k (PTX ISA, mma.m16n8k64, block
 * scaling). */
DEVICE void mma_nvfp4(float d[4], const uint32_t a[4], const uint32_t b[2], uint32_t sfa, uint32_t sfb) {
    asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0,0}, %11, {0,0};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sfa), "r"(sfb));
}
/* Converts two floats to E2M1, in the low and the high nibble of a byte: to the nearest, ties to even, at most 6. */
DEVICE uint32_t f32_to_e2m1x2(float lo, float hi) {
    uint32_t y;
    asm("{ .reg .b8 x; cvt.rn.satfinite.e2m1x2.f32 x, %2, %1; cvt.u32.u8 %0, x; }" : "=r"(y) : "f"(lo), "f"(hi));
    return y;
}
#else
/* Leaves the sums as they are. */
DEVICE void mma_nvfp4(float *, const uint32_t *, const uint32_t *, uint32_t, uint32_t) {}
DEVICE uint32_t f32_to_e2m1x2(float lo, float hi) {
    auto one = [](float x) {
        const float a = fabsf(x);
        const uint32_t c =
            (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
        return c | __float_as_uint(x) >> 31 << 3;
    };
    return one(lo) | one(hi) << 4;
}
#endif

/* Define functions of one instruction, with one operand or with two. Of two, `lo` is %1. */
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
/* Pairs of 16-bit values: element 0 is the low half of the word. Subnormals are kept. */
ONE_INSTRUCTION2(uint32_t, "=r", f16x2_mul, uint32_t, "r", "mul.rn.f16x2 %0, %1, %2;")
ONE_INSTRUCTION2(uint32_t, "=r", f16x2_add, uint32_t, "r", "add.rn.f16x2 %0, %1, %2;")
ONE_INSTRUCTION2(uint32_t, "=r", f32_to_f16x2, float, "f", "cvt.rn.f16x2.f32 %0, %2, %1;")
ONE_INSTRUCTION2(uint32_t, "=r", f32_to_bf16x2, float, "f", "cvt.rn.bf16x2.f32 %0, %2, %1;")
/* Clamp to the largest half: an overflow may cost accuracy, but never makes an infinity. NaN stays NaN (0x7FFF), so
 * that a fault in what a kernel reads is seen in the logits. */
ONE_INSTRUCTION2(uint32_t, "=r", clamped_f16x2, float, "f", "cvt.rn.satfinite.f16x2.f32 %0, %2, %1;")
ONE_INSTRUCTION(uint16_t, "=h", clamped_f16, float, "f", "cvt.rn.satfinite.f16.f32 %0, %1;")
ONE_INSTRUCTION(float, "=f", exp2_fast, float, "f", "ex2.approx.ftz.f32 %0, %1;") /* results below 2^-126 are 0 */
ONE_INSTRUCTION(float, "=f", half_to_f32, uint16_t, "h", "cvt.f32.f16 %0, %1;")
ONE_INSTRUCTION(uint16_t, "=h", f32_to_f16, float, "f", "cvt.rn.f16.f32 %0, %1;")
DEVICE float bf16_value(uint16_t b) { return __uint_as_float((uint32_t)b << 16); }

/* Conversions of E4M3. The image for chips before 9.0 (compute_80) has no instruction for the second, which attention
 * runs all the time. */
DEVICE uint16_t f32_to_e4m3x2(float lo, float hi) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
}
DEVICE uint32_t e4m3x2_to_f16x2(uint16_t x) {
#if __CUDA_ARCH__ >= 890
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(x, __NV_E4M3);
    return *(const uint32_t *)&h;
#else
    const uint32_t v = __byte_perm(x, 0, 0x1404); /* bits s eeee mmm: read as f16 they are 2^-8 of the value */
    return f16x2_mul((v & 0x80008000u) | (v >> 1 & 0x3F803F80u), 0x5C005C00);
#endif
}

/* Loads from L2 what another block of the same kernel wrote, or a kernel that this one need not have waited for: L1 is
 * not coherent. */
template <class T>
DEVICE T load_l2(const T *p) {
    return __ldcg(p);
}

/* Loads 16 bytes that are read once: they take no place in L1. */
DEVICE uint4 ldg_stream(const void *p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(global_address(p)));
    return r;
}

/* Divides 0 <= x < 2^31 by n >= 1. With 2^shift the least power of two from n on, and inverse = ceil(2^(31 + shift) / n),
 * which is less than 2^32,
 *
 *   x / n <= x inverse / 2^(31 + shift) <= x / n + x / 2^(31 + shift) < x / n + 1 / n
 *
 * and of the numbers from x / n up to x / n + 1 / n only the first may be whole: all round down to the same. */
struct divisor {
    int n, shift;
    uint32_t inverse;
    DEVICE_MEMBER int of(int x) const { return (int)(__umulhi((uint32_t)x << 1, inverse) >> shift); }
    DEVICE_MEMBER int rest(int x) const { return x - of(x) * n; }
};
static struct divisor divisor_of(int n) {
    struct divisor d = {n, 0, 0};
    while (1LL << d.shift < n) d.shift++;
    d.inverse = (uint32_t)(((1ULL << (31 + d.shift)) + (uint64_t)n - 1) / (uint64_t)n);
    return d;
}

/* Requests n bytes into L2. p and n are multiples of 16. Changes no memory, so that loads may move over it. */
DEVICE void prefetch_l2(const void *p, uint32_t n) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global_address(p)), "r"(n));
#endif
}

/* Adds v and returns the old value. Writes before it, of this thread and of those that added earlier, are visible after
 * it. */
DEVICE uint32_t atom_add_acq_rel(uint32_t *p, uint32_t v) {
    uint32_t r;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(r) : "l"(global_address(p)), "r"(v) : "memory");
    return r;
}

/* Memory that other GPUs write or read: 16-byte stores, 16-byte loads, and flags. A release store of a flag publishes
 * what the whole block wrote before a barrier; an acquire load that sees the flag sees these writes. */
DEVICE void st_sys16(void *p, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(global_address(p)), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE uint4 ld_sys16(const void *p) {
    uint4 r;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(global_address(p))
                 : "memory");
    return r;
}
DEVICE void st_release_sys(uint32_t *p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(global_address(p)), "r"(v) : "memory");
}
DEVICE uint32_t ld_acquire_sys(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(global_address(p)) : "memory");
    return v;
}
DEVICE uint64_t global_timer() { /* nanoseconds */
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* Programmatic dependent launch. grid_dependency_wait returns when the kernels before have ended and their writes are
 * visible. grid_dependency_launch lets the blocks of the next kernel start; they wait themselves. */
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

/* Launches a kernel, which may start before the one in front of it has ended if launches overlap. The same carve-out
 * for all: an SM has to drain before it changes, so that kernels of different ones cannot overlap. Errors stay for
 * cudaGetLastError, see launch_note. */
template <class... P, class... A>
static void launch_pdl(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, cudaStream_t stream, A... args) {
    cudaLaunchAttribute attr[2] = {};
    cudaLaunchConfig_t config = {};
    if (launches_overlap) {
        attr[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attr[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
#if CUDART_VERSION >= 12090
    attr[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attr[config.numAttrs++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
#endif
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = attr;
    cudaLaunchKernelEx(&config, kernel, P(args)...);
}

/* The launches of a forward, while a thread profiles its rank. */
static thread_local struct {
    struct profile_row *row; /* (cap); NULL: nothing is recorded */
    cudaEvent_t *event;      /* (2 cap) before and after each launch */
    int n, cap;
    char what[64]; /* what the next launch works on, */
    double bytes;  /* and how many bytes it moves */
} profile;

/* The thread's next launch moves so many bytes; `fmt` says of what. May be called several times for one launch. */
__attribute__((format(printf, 2, 3))) static void profile_next(double bytes, const char *fmt, ...) {
    if (!profile.row) return;
    if (profile.what[0]) strncat(profile.what, " + ", sizeof profile.what - 1 - strlen(profile.what));
    const size_t at = strlen(profile.what);
    va_list v;
    va_start(v, fmt);
    vsnprintf(profile.what + at, sizeof profile.what - at, fmt, v);
    va_end(v);
    profile.bytes += bytes;
}

/* Before a launch: begins its row, under the kernel's name as the source spells it. */
static void profile_begin(const char *kernel, cudaStream_t stream) {
    if (!profile.row || profile.n == profile.cap) return;
    struct profile_row *row = &profile.row[profile.n];
    kernel += *kernel == '('; /* without the arguments of a template */
    snprintf(row->name, sizeof row->name, "%.*s %s", (int)strcspn(kernel, "<"), kernel, profile.what);
    row->calls = 1;
    row->bytes = profile.bytes;
    profile.bytes = 0;
    profile.what[0] = 0;
    cudaEventCreate(&profile.event[2 * profile.n]);
    cudaEventRecord(profile.event[2 * profile.n], stream);
}

/* After the launch. */
static void profile_end(cudaStream_t stream) {
    if (!profile.row || profile.n == profile.cap) return;
    cudaEventCreate(&profile.event[2 * profile.n + 1]);
    cudaEventRecord(profile.event[2 * profile.n + 1], stream);
    profile.n++;
}

/* For messages: the kernel, or recording of kernels, that the thread launched last, and the first one whose launch
 * failed since errors were cleared. */
static thread_local const char *kernel_last, *kernel_failed;

/* After the launch of a kernel. */
static void launch_note(const char *kernel) {
    kernel_last = kernel;
    if (!kernel_failed && cudaPeekAtLastError() != cudaSuccess) kernel_failed = kernel;
}

/* Clears the thread's CUDA error, which does not matter or has been reported. */
static void errors_clear() {
    cudaGetLastError();
    kernel_failed = NULL;
}

#define LAUNCH_PDL(kernel, grid, block, smem, stream, ...)          \
    do {                                                            \
        profile_begin(#kernel, stream);                             \
        launch_pdl(kernel, grid, block, smem, stream, __VA_ARGS__); \
        launch_note(#kernel);                                       \
        profile_end(stream);                                        \
    } while (0)

/* ============================================================================================================
 * Weights on the device
 *
 * A matrix (n_out rows, n_in columns) is cut into tiles of 16 rows x 64 columns. A tile is stored as MMA A fragments: a
 * lane loads 16 bytes at a time, exactly the weights that it passes to the MMA, and a warp loads 512 consecutive bytes.
 * Lane 4g + t owns 8 columns in each half of rows g and g + 8:
 *
 *   columns    0..7     8..15    16..23   24..31 | 32..39   40..47   48..55   56..63
 *   row 0     lane 0   lane 1   lane 2   lane 3  | lane 0   lane 1   lane 2   lane 3
 *   row 1     lane 4   lane 5   lane 6   lane 7  | lane 4   lane 5   lane 6   lane 7
 *   ..
 *   row 7     lane 28  lane 29  lane 30  lane 31 | lane 28  lane 29  lane 30  lane 31
 *   row 8     lane 0   lane 1   lane 2   lane 3  | ..       rows 8..15 belong to the lanes of rows 0..7
 *              half h = 0                          half h = 1
 *
 *   FMT_FP4,  512 bytes   lane 0 .. lane 31, 16 bytes each: [row g, h 0] [row g+8, h 0] [row g, h 1] [row g+8, h 1],
 *                         4 bytes each; fp4_pair tells which nibble holds which of the 8 columns
 *   FMT_Q8,  1024 bytes   h 0, then h 1; in each lane 0 .. lane 31, 16 bytes each: [row g] [row g+8], 8 codes (+ 128)
 *   FMT_F16, 2048 bytes   k16-steps 0 .. 3; in each lane 0 .. lane 31, 16 bytes each: registers a0 a1 a2 a3 of mma_f16
 *   FMT_F8,  1024 bytes   as FMT_Q8, E4M3 codes
 *   scales,    64 bytes   4 bytes a row, rows in the order 0 8 1 9 .. 7 15. FP4: 4 UE4M3, one per 16 columns;
 *                         Q8: 2 F16, one per 32 columns; F8: an F32; F16 has none
 *
 * One m16n8k64 takes a whole FP4 tile. m16n8k16 takes it in four k16-steps s. The order of k inside a product is free
 * as long as both operands use it, so step s uses the columns c = 32 (s / 2) + 8t + 4 (s % 2) of lane t: c, c+1 (a0,
 * a1, b0) and c+2, c+3 (a2, a3, b1). Hence 16 bytes of a token's halves, from column 32h + 8t on, are the B operands of
 * steps 2h and 2h + 1.
 * ============================================================================================================ */

/* n_expert matrices (n_out, n_in), of which n_held are there. Rows and columns that only fill up tiles are zero. */
struct device_matrix {
    uint8_t *codes;     /* (n_held, n_rt, n_kt) tiles: n_rt rows of tiles, n_kt tiles along k */
    uint8_t *scales;    /* (n_held, n_rt, n_kt, TILE_SCALES); NULL: FMT_F16 */
    const float *scale; /* (n_expert) output scale of each expert, times `decode_scale`; NULL: 1 */
    float scale_max;    /* the largest of their absolute values, not 0 */
    const float *bias;  /* (n_expert, 16 n_rt) added to the results, zero where a tile has no row; NULL: nothing is */
    float decode_scale; /* factor that undoes the power of two of fragment_dequantize */
    int n_out, n_in, n_rt, n_kt, n_expert;
    enum weight_format fmt;
    int n_held; /* n_expert; or the slots of a layer's experts, see "Experts in host memory" */
    int shift;  /* of struct repack */
};

/* Returns the index of the first tile in row of tiles rt of the matrix at `place`: an expert's number, or its slot. */
DEVICE size_t tile_index(const struct device_matrix &w, int place, int rt) {
    return ((size_t)place * (size_t)w.n_rt + (size_t)rt) * (size_t)w.n_kt;
}

/* Returns the index in `bias` of the first row of the same tiles. */
DEVICE size_t bias_index(const struct device_matrix &w, int e, int rt) {
    return ((size_t)e * (size_t)w.n_rt + (size_t)rt) * TILE_ROWS;
}

/* Returns the factor of the results of expert e. */
DEVICE float device_matrix_scale(const struct device_matrix &w, int e) {
    return w.scale ? w.decode_scale * w.scale[e] : w.decode_scale;
}

/* Converts 2 of 8 E2M1 codes to halves times 2^-14. Column i of the 8 sits in nibble (i / 2) + 4 (i % 2): the two
 * nibbles of a pair are 16 bits apart, and shifts move their bits to the places of a half's exponent and mantissa.
 * Subnormals come out right. */
DEVICE uint32_t fp4_pair(uint32_t codes, int pair) {
    uint32_t v = codes << (12 - 4 * pair);
    return (v & 0x80008000u) | (v >> 3 & 0x0E000E00u);
}

/* Converts the UE4M3 scale at bit `shift` to a pair of equal halves times 2^7: its bits at a half's place are 2^-8 of
 * the value, the product adds 2^15. With fp4_pair's 2^-14 a dequantized weight is 2^-7 of its value, exactly (six
 * significant bits). device_matrix.decode_scale restores the factor. */
DEVICE uint32_t fp4_scale(uint32_t scales, int shift) {
    uint32_t b = (scales >> shift & 0xFFu) << 7;
    return f16x2_mul(b | b << 16, 0x78007800u);
}

/* Converts 2 E4M3 codes to halves times the F32 scale: the same halves as F16 has of these weights. */
DEVICE uint32_t fp8_pair(uint16_t codes, float scale) {
    const uint32_t v = e4m3x2_to_f16x2(codes);
    return f32_to_f16x2(half_to_f32((uint16_t)v) * scale, half_to_f32((uint16_t)(v >> 16)) * scale);
}

/* Makes the A fragment of one k16-step (a constant after unrolling). c: the lane's 16 bytes, for Q8 and F8 two of them,
 * for F16 four; s: the scales of rows g and g + 8; t = lane % 4. */
template <int FMT>
DEVICE void fragment_dequantize(const uint4 *c, uint2 s, int t, int step, uint32_t a[4]) {
    int h = step >> 1, q = 2 * (step & 1);
    if constexpr (FMT == FMT_FP4) {
        int shift = 8 * (2 * h + (t >> 1));
        uint32_t lo = h ? c[0].z : c[0].x;
        uint32_t hi = h ? c[0].w : c[0].y;
        uint32_t s0 = fp4_scale(s.x, shift), s1 = fp4_scale(s.y, shift);
        a[0] = f16x2_mul(fp4_pair(lo, q), s0);
        a[2] = f16x2_mul(fp4_pair(lo, q + 1), s0);
        a[1] = f16x2_mul(fp4_pair(hi, q), s1);
        a[3] = f16x2_mul(fp4_pair(hi, q + 1), s1);
    } else if constexpr (FMT == FMT_Q8) { /* the half 0x6400 | byte is 1024 + byte */
        uint32_t lo = q ? c[h].y : c[h].x;
        uint32_t hi = q ? c[h].w : c[h].z;
        const uint32_t bias = 0xE480E480u; /* -1152 = -(1024 + 128) */
        a[0] = f16x2_add(__byte_perm(lo, 0x64646464u, 0x4140), bias);
        a[2] = f16x2_add(__byte_perm(lo, 0x64646464u, 0x4342), bias);
        a[1] = f16x2_add(__byte_perm(hi, 0x64646464u, 0x4140), bias);
        a[3] = f16x2_add(__byte_perm(hi, 0x64646464u, 0x4342), bias);
    } else if constexpr (FMT == FMT_F8) {
        const uint32_t lo = q ? c[h].y : c[h].x, hi = q ? c[h].w : c[h].z;
        const float s0 = __uint_as_float(s.x), s1 = __uint_as_float(s.y);
        a[0] = fp8_pair((uint16_t)lo, s0);
        a[2] = fp8_pair((uint16_t)(lo >> 16), s0);
        a[1] = fp8_pair((uint16_t)hi, s1);
        a[3] = fp8_pair((uint16_t)(hi >> 16), s1);
    } else {
        static_assert(FMT == FMT_F16, "no other format");
        a[0] = c[step].x;
        a[1] = c[step].y;
        a[2] = c[step].z;
        a[3] = c[step].w;
    }
}

/* Returns one weight of expert 0, all scales applied: for single rows of the embedding. */
DEVICE float device_matrix_value(const struct device_matrix &w, int row, int col) {
    static_assert(FMT_COUNT == 4, "device_matrix_value reads every format");
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
    } else if (w.fmt == FMT_F8) {
        v = half_to_f32((uint16_t)fp8_pair(c[512 * h + 16 * lane + 8 * hi + i], *(const float *)s));
    } else {
        v = half_to_f32(
            ((const uint16_t *)c)[(512 * (2 * h + (i >> 2)) + 16 * lane) / 2 + 2 * (hi + (i & 2)) + (i & 1)]);
    }
    return v * device_matrix_scale(w, 0);
}

/* ============================================================================================================
 * Upload: from the file's blocks to tiles
 *
 * The host sends rows as the file has them (section "Upload"); k_repack permutes them into tiles on the GPU.
 * ============================================================================================================ */

/* Rows of a file that k_repack makes tiles of: of experts e0 .. e0 + n_e - 1, 16 n_rt rows from row 16 rt0 on, as far
 * as there are. */
struct repack {
    size_t row_bytes;
    enum gguf_type type;
    int e0, n_e, rt0, n_rt;
    int shift; /* F16, F8: halves are weight * 2^shift; MXFP4: a block of exponent byte e gets the scale 2^(e - shift) */
    float factor;       /* 2^shift */
    float decode_scale; /* of the format: what the expansion to halves leaves out */
};

/* The value of the E4M3 code in the low byte. */
DEVICE float e4m3_value(uint32_t code) { return half_to_f32((uint16_t)e4m3x2_to_f16x2((uint16_t)(code & 0xFFu))); }

/* The block of column col of an FP8 row. */
DEVICE const uint8_t *raw_fp8(const uint8_t *row, int col) {
    return row + col / FP8_BLOCK * (int)sizeof(struct block_fp8);
}

/* The bits of the power of two that makes E4M3 codes of BF16 values, see bf16_is_fp8; top: bits of the largest. */
DEVICE uint32_t fp8_unit(uint32_t top) { return top ? ((top >> 7) - ((top & 0x7Fu) > 0x60u ? 7 : 8)) << 23 : 0; }

/* The codes of 4 BF16 values that are such codes times the power of two of these bits. */
DEVICE uint32_t bf16_codes(const uint16_t *x, uint32_t unit) {
    const float f = unit ? __uint_as_float((254u << 23) - unit) : 0; /* 1 / unit */
    return f32_to_e4m3x2(bf16_value(x[0]) * f, bf16_value(x[1]) * f) |
           (uint32_t)f32_to_e4m3x2(bf16_value(x[2]) * f, bf16_value(x[3]) * f) << 16;
}

/* Reads a weight of an F32, F16 or BF16 row. */
DEVICE float raw_float(enum gguf_type type, const uint8_t *row, int col) {
    if (type == GGUF_F32) return ((const float *)row)[col];
    uint16_t h = ((const uint16_t *)row)[col];
    return type == GGUF_BF16 ? bf16_value(h) : half_to_f32(h);
}

/* Reads the 8 E2M1 codes of columns col..col+7 (col % 8 == 0) in fp4_pair's order. NVFP4: 36 bytes per 64 columns,
 * MXFP4: 17 per 32. */
DEVICE uint32_t raw_fp4(bool nv, const uint8_t *row, int col) {
    const uint8_t *q = row + (nv ? col / 64 * 36 + 4 + col % 64 / 16 * 8 : col / 32 * 17 + 1 + (col & 8));
    const int half = nv ? 8 : 16; /* columns between a byte's low nibble and its high one */
    const int shift = col & half ? 4 : 0;
    uint32_t out = 0;
    for (int i = 0; i < 8; i++) out |= (q[i] >> shift & 15u) << 4 * ((i >> 1) + 4 * (i & 1));
    return out;
}

/* 2^(code - 127). */
DEVICE float e8m0_value(uint32_t code) { return __uint_as_float(code ? code << 23 : 0x00400000u); }

/* Reads a weight of a row of any format. */
DEVICE float raw_value(enum gguf_type type, const uint8_t *row, int col) {
    static_assert(GGUF_FORMAT_COUNT == 7, "raw_value reads every format");
    auto e2m1 = [](uint32_t code) { return half_to_f32((uint16_t)fp4_pair(code, 0)); }; /* times 2^-14 */
    if (type == GGUF_Q8_0) {
        const uint8_t *b = row + col / 32 * 34;
        return half_to_f32(*(const uint16_t *)b) * (float)(int8_t)b[2 + col % 32];
    }
    if (type == GGUF_NVFP4) {
        const uint8_t *b = row + col / 64 * 36;
        const int sub = col % 64 / 16;
        const uint32_t d = b[sub] == 0x7F ? 0 : b[sub]; /* NaN, as in repack_tile */
        return e2m1(b[4 + 8 * sub + col % 8] >> (col & 8 ? 4 : 0) & 15u) * half_to_f32((uint16_t)(d << 7)) * 0x1p22f;
    }
    if (type == GGUF_MXFP4) {
        const uint8_t *b = row + col / 32 * 17;
        return e2m1(b[1 + col % 16] >> (col & 16 ? 4 : 0) & 15u) * 0x1p14f * e8m0_value(b[0]);
    }
    if (type == GGUF_FP8) {
        const uint8_t *b = raw_fp8(row, col);
        return e4m3_value(b[4 + col % FP8_BLOCK]) * *(const float *)b;
    }
    return raw_float(type, row, col);
}

/* Divides 8 E2M1 codes by 2^n, n <= 5, to the nearest, ties to even. */
DEVICE uint32_t fp4_divide(uint32_t codes, int n) {
    uint32_t out = codes & 0x88888888u;
    for (int i = 0; i < 32; i += 4) {
        const uint32_t x = 0xC8643210u >> 4 * (codes >> i & 7u) & 15u; /* in halves; the quotients but 6 are codes */
        const uint32_t y = (x + (1u << n >> 1) - 1 + (x >> n & 1u)) >> n;
        out |= (y == 6 ? 5 : y) << i;
    }
    return out;
}

/* Makes a tile of columns 64 kt.. of 16 rows of the file, of which the first n_row exist; row_of(i) is where the first
 * column of row i is. One warp. top, low: of this lane's weights what k_repack finds
 * of all. */
template <class ROW_OF>
DEVICE void repack_tile(const struct repack &r, ROW_OF row_of, int n_row, int kt, const struct device_matrix &w,
                        size_t tile, uint32_t &top, uint32_t &low) {
    static_assert(GGUF_FORMAT_COUNT == 7 && FMT_COUNT == 4, "repack_tile reads and writes every format");
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    uint32_t *codes = (uint32_t *)(w.codes + tile * (size_t)TILE_BYTES(w.fmt));
    uint8_t *scales = w.scales + tile * TILE_SCALES + 8 * g;
    /* the largest |value| of a row of BF16, which its four lanes find */
    auto largest = [&](int row, const uint16_t *src) {
        float x = 0;
        for (int col = kt * TILE_COLS + 16 * t, k = 0; k < 16 && row < n_row && col < w.n_in; k++, col++)
            x = fmaxf(x, fabsf(bf16_value(src[col])));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    };
    top = low = 0;
    for (int i = 0; i < 4; i++) {
        const int hi = i >> 1, h = i & 1;
        const int row = g + 8 * hi, col = kt * TILE_COLS + 32 * h + 8 * t;
        const uint8_t *src = row_of(row);
        const bool in = row < n_row && col < w.n_in;
        uint32_t *to = codes + 4 * lane + hi;
        if (w.fmt == FMT_FP4) {
            const bool nv = r.type == GGUF_NVFP4;
            const uint32_t read = in ? raw_fp4(nv, src, col) : 0;
            const int x = in && !nv ? src[col / 32 * 17] - r.shift : 0;
            to[2 * h] = x < -9 ? fp4_divide(read, min(-9 - x, 5)) : read;
            if (t & 1) continue; /* one lane per 16 columns writes the scale */
            uint8_t s = 0;
            if (in && nv) {
                s = src[col / 64 * 36 + col % 64 / 16];
                if (s == 0x7F) s = 0; /* NaN: other readers of this format read 0, too */
            } else if (in) {
                /* 2^x is exact in UE4M3 for -9 <= x <= 8; above 8 is what is zero, or repacked with another shift */
                s = (uint8_t)(x > 8 ? 0x78 : x >= -6 ? (x + 7) << 3 : 1 << (max(x, -9) + 9));
                if ((read | raw_fp4(false, src, col + 8)) & 0x77777777u) {
                    top = max(top, (uint32_t)(x + r.shift));
                    low = max(low, 255u - (uint32_t)(x + r.shift));
                }
            }
            scales[4 * hi + 2 * h + (t >> 1)] = s;
        } else if (w.fmt == FMT_Q8) {
            const uint8_t *b = src + col / 32 * 34;
            uint32_t q[2] = {0x80808080u, 0x80808080u};
            UNROLL for (int k = 0; k < 8; k++) q[k >> 2] ^= in ? (uint32_t)b[2 + col % 32 + k] << 8 * (k & 3) : 0;
            to[128 * h + hi] = q[0];
            to[128 * h + hi + 1] = q[1];
            if (!t) ((uint16_t *)(scales + 4 * hi))[h] = in ? (uint16_t)(b[0] | b[1] << 8) : 0;
        } else if (w.fmt == FMT_F8) {
            const uint32_t scale = r.type == GGUF_BF16
                                       ? fp8_unit(__float_as_uint(largest(row, (const uint16_t *)src)) >> 16)
                                   : in ? *(const uint32_t *)raw_fp8(src, col)
                                        : 0;
            for (int k = 0; k < 2; k++) {
                const uint32_t q = !in ? 0
                                   : r.type == GGUF_BF16
                                       ? bf16_codes((const uint16_t *)src + col + 4 * k, scale)
                                       : *(const uint32_t *)(raw_fp8(src, col) + 4 + col % FP8_BLOCK + 4 * k);
                to[128 * h + hi + k] = q;
                for (int i = 0; i < 4; i++)
                    top = max(top, __float_as_uint(fabsf(e4m3_value(q >> 8 * i) * __uint_as_float(scale))));
            }
            if (!t && !h) *(float *)(scales + 4 * hi) = __uint_as_float(scale) * r.factor;
        } else {
            for (int k = 0; k < 8; k += 2) { /* k16-steps 2h and 2h + 1, registers hi and hi + 2 */
                float x = in ? raw_float(r.type, src, col + k) : 0;
                float y = in ? raw_float(r.type, src, col + k + 1) : 0;
                top = max(top, __float_as_uint(fmaxf(fabsf(x), fabsf(y))));
                to[128 * (2 * h + (k >> 2)) + (k & 2)] = f32_to_f16x2(x * r.factor, y * r.factor);
            }
        }
    }
}

/* Makes tiles of rows of the file, of experts that have different places in w: expert e that of e % n_held. For formats
 * that may not represent all values it maximizes range[0..1]: F16, F8: [0] bits of the largest |weight|; MXFP4: [0] the
 * largest exponent, [1] 255 - the smallest.
 * Grid: tiles / 8, block: 256, one warp per tile. Reads and writes each matrix once; the PCIe upload is slower. */
__global__ void __launch_bounds__(256)
    k_repack(struct repack r, const uint8_t *raw, struct device_matrix w, uint32_t *range) {
    grid_dependency_wait();
    size_t n = (size_t)blockIdx.x * 8 + (threadIdx.x >> 5), per = (size_t)r.n_rt * (size_t)w.n_kt;
    if (n >= per * (size_t)r.n_e) return;
    int e = (int)(n / per), rt = (int)(n % per) / w.n_kt, kt = (int)(n % per) % w.n_kt;
    int rows = min(r.n_rt * TILE_ROWS, w.n_out - r.rt0 * TILE_ROWS);
    const uint8_t *from = raw + ((size_t)e * (size_t)rows + (size_t)(rt * TILE_ROWS)) * r.row_bytes;
    uint32_t top, low;
    repack_tile(
        r, [&](int i) { return from + (size_t)i * r.row_bytes; }, rows - rt * TILE_ROWS, kt, w,
        tile_index(w, (r.e0 + e) % w.n_held, r.rt0 + rt) + (size_t)kt, top, low);
    if (r.type == GGUF_NVFP4 || w.fmt == FMT_Q8) return;
    atomicMax(range, top);
    atomicMax(range + 1, low);
}

/* ============================================================================================================
 * All-reduce and send between ranks
 *
 * Ranks push: a rank writes 16-byte stores into the mailbox of another, then a flag. A store crosses PCIe once, a load
 * would cross it twice. The mailbox is memory of the receiver's GPU, or of the host where GPUs cannot reach each other
 * (struct mailbox). Flags only count up, and the counters are in device memory: a recorded graph continues to
 * count.
 * A kernel that waits long tells the host for whom (WAIT_CODE). It waits on until the host tells it to abort: only the
 * host knows whether the program was merely suspended. After an abort no kernel waits any more.
 * The all-reduce itself: k_add_norm (below) pushes and adds; all_reduce_add_norm and all_reduce_by_nccl (in
 * "Operations") call it or NCCL, as all_reduce_choose (in "Several GPUs") found faster.
 * ============================================================================================================ */

/* What a kernel does with other ranks. Each has counts of its own. */
enum channel {
    CH_ALLREDUCE,
    CH_SEND,
    CH_RECV,
    CH_LOGITS,
    CH_TOKEN,
    CH_ASK, /* the CPU to compute experts, */
    CH_ANSWER,
    CH_WANT, /* and the store to bring some */
    CH_BROUGHT,
    CH_WANT_ROWS, /* of n-grams, from the host */
    CH_BROUGHT_ROWS,
    CHANNELS
};
enum { WAIT_ROW_NORM = CHANNELS }; /* for WAIT_CODE: a row norm, which is counted as an all-reduce */

/* In host memory: how a rank's GPU and its thread tell each other that they are alive. */
struct heartbeat {
    uint32_t all_reduces; /* that the GPU has done; */
    uint32_t waiting;     /* for whom a kernel has waited long last, see WAIT_CODE */
    uint32_t abort;       /* the thread wants kernels to stop waiting */
};

/* On the rank's GPU: what its kernels count. */
struct sequence {
    uint32_t done[CHANNELS];    /* kernels that have ended; */
    uint32_t arrived[CHANNELS]; /* blocks of the one that runs */
    uint32_t aborted;           /* nothing waits any more */
};

/* A rank of the stage, a channel, and which all-reduce of the forward it is, or the layer of a row norm or of experts or
 * rows from the host. */
#define WAIT_CODE(rank, channel, ordinal) ((uint32_t)(1 + (rank) + 16 * (channel) + 256 * (ordinal)))

/* This rank, as its kernels need it to talk to the others: its place in the stage, its counters on the GPU, and what
 * it tells the host. */
struct tp_rank {
    int rank, n_rank; /* in the pipeline stage */
    int slot_floats;  /* that a rank pushes at once: ALLREDUCE_SLOT */
    struct sequence *sequence;
    struct heartbeat *heartbeat;
};

/* Waits until *flag has reached `want`, or for an abort. Called by one thread. */
DEVICE void flag_wait(const uint32_t *flag, uint32_t want, const struct tp_rank &p, uint32_t code) {
    /* Nanoseconds between looks at the host's flag. Much longer than a step of %globaltimer, which the ISA leaves open:
     * 1 us is usual, 1 ms has been seen. */
    enum { LOOK_NS = 10000000 };
    uint64_t t = global_timer();
    while ((int32_t)(ld_acquire_sys(flag) - want) < 0 && !*(volatile uint32_t *)&p.sequence->aborted) {
        if (global_timer() - t < LOOK_NS) continue;
        t = global_timer();
        *(volatile uint32_t *)&p.heartbeat->waiting = code;
        if (*(volatile uint32_t *)&p.heartbeat->abort) *(volatile uint32_t *)&p.sequence->aborted = 1;
    }
}

/* Counts the blocks that have done a kernel's work on channel ch. Returns true in thread 0 of the last block; every
 * block calls it. */
DEVICE bool channel_end(const struct tp_rank &p, int ch) {
    __syncthreads(); /* all threads have done their part before the block is counted */
    if (threadIdx.x || atom_add_acq_rel(&p.sequence->arrived[ch], 1) != gridDim.x - 1) return false;
    p.sequence->arrived[ch] = 0;
    p.sequence->done[ch]++;
    return true;
}

/* One transfer of n_row rows (k_send_rows). CH_SEND: to the next stage, waits for its credit. CH_RECV: from the stage
 * before, waits for its flag. CH_LOGITS: other ranks send to the root rank without waiting; the root waits for the
 * flags of all ranks but its own. */
struct send_args {
    struct tp_rank p;
    int channel;
    const uint32_t *wait_flag; /* (n_wait) flags to wait for */
    int n_wait;
    const float *src; /* (n_row, n_col) floats, n_col % 4 == 0, rows src_stride floats apart */
    float *dst;
    size_t src_stride, dst_stride;
    int n_row, n_col;
    uint32_t *signal; /* flag of the other rank to set at the end; NULL: none */
    /* n_more more columns of each row, n_more % 4 == 0, from and to places of their own */
    const float *more_src;
    float *more_dst;
    size_t more_src_stride, more_dst_stride;
    int n_more;
};

/* Copies rows to another rank, or out of this rank's mailbox, and signals it.
 * Grid: at most ALLREDUCE_BLOCKS, block: 256. Sends n_row * (n_col + n_more) * 4 bytes at the link's bandwidth;
 * receiving costs the latency of a flag and 8 bytes per value. */
__global__ void __launch_bounds__(256) k_send_rows(struct send_args a) {
    grid_dependency_wait();
    const uint32_t seq = a.p.sequence->done[a.channel] + 1;
    const int t = threadIdx.x;
    /* CH_SEND waits until the receiver has read the previous rows, the others until their data have come. */
    if (t < a.n_wait && (a.n_wait == 1 || t != a.p.rank))
        flag_wait(a.wait_flag + t, a.channel == CH_SEND ? seq - 1 : seq, a.p,
                  WAIT_CODE(a.n_wait == 1 ? 0 : t, a.channel, 0));
    __syncthreads(); /* thread 0..n_wait-1 have seen the flags: all threads may go on */
    const size_t n_col = (size_t)a.n_col, vecs = (n_col + (size_t)a.n_more) / 4, n = vecs * (size_t)a.n_row;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (size_t)gridDim.x * 256) {
        const size_t row = i / vecs, col = i % vecs * 4;
        if (col < n_col) st_sys16(a.dst + row * a.dst_stride + col, ld_sys16(a.src + row * a.src_stride + col));
        else
            st_sys16(a.more_dst + row * a.more_dst_stride + (col - n_col),
                     ld_sys16(a.more_src + row * a.more_src_stride + (col - n_col)));
    }
    if (channel_end(a.p, a.channel) && a.signal) st_release_sys(a.signal, seq);
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

/* What k_share_token hands on: the id of the token that the root chose. A mailbox has room for one: the root cannot
 * choose the next token before all ranks have run their part of this one's forward. */
struct token_args {
    struct tp_rank p;
    int32_t *id;        /* of the batch: read by the root, written by the others */
    struct mailbox own; /* not of the root */
    int n_other;        /* the root: ranks that it sends the id to, */
    struct mailbox other[MAX_RANKS - 1];
};

/* Sends the id from the root to the other ranks. Grid: 1, block: a warp. Costs the latency of a flag. */
__global__ void __launch_bounds__(32) k_share_token(const __grid_constant__ struct token_args a) {
    grid_dependency_wait();
    const uint32_t seq = a.p.sequence->done[CH_TOKEN] + 1;
    const int t = threadIdx.x;
    if (t < a.n_other) {
        st_sys16(a.other[t].token, make_uint4((uint32_t)*a.id, 0, 0, 0));
        st_release_sys(a.other[t].token_flag, seq);
    }
    if (!a.n_other && !t) {
        flag_wait(a.own.token_flag, seq, a.p, WAIT_CODE(0, CH_TOKEN, 0));
        *a.id = (int32_t)ld_sys16(a.own.token).x;
    }
    channel_end(a.p, CH_TOKEN);
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

/* y (n) BF16 = x (n) F32, n % 4 == 0. Grid: n / 1024, block: 256, moves 6 bytes per value. */
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

/* The batch of a forward pass, in device memory. The host writes it before each pass. */
struct batch {
    int32_t n_tok, n_run;              /* tokens of all runs */
    struct run run[DECODE_MAX_TOKENS]; /* (n_run) in the order of their rows */
    int32_t run_of[DECODE_MAX_TOKENS]; /* (n_tok) the run of each row, where there are several */
};

/* The batch as a kernel gets it. A launch is for one run or for several, so that a recorded one replays for any
 * timelines. */
struct batch_ref {
    const struct batch *at;
    bool several;
    /* The run of row t. */
    DEVICE_MEMBER const struct run &run(int t) const { return at->run[several ? at->run_of[t] : 0]; }
};

/* The position that row 0 of the batch would have in the run u. */
DEVICE int run_base(const struct run &u) { return u.pos - u.first; }
/* Where a run finds the rows of a cache tensor: row i of the timeline is row i of the tensor if it is before `stem`,
 * otherwise row i + shift. No step over keys goes beyond the stem. */
struct run_rows {
    int stem, shift;
    DEVICE_MEMBER int at(int i) const { return i < stem ? i : i + shift; }
};
DEVICE struct run_rows run_rows_of(const struct run &u, const struct cache_tensor &p) {
    const int stem = u.with_stem ? p.stem_rows : 0;
    return {stem, u.timeline * p.timeline_rows + p.stem_rows - stem};
}
/* The row of position pos of a ring. */
DEVICE int ring_row(const struct run &u, const struct cache_tensor &p, int pos) {
    return pos % p.n_row + run_rows_of(u, p).shift;
}
/* The row of position pos, or of compressed key pos. */
DEVICE int run_row(const struct run &u, const struct cache_tensor &p, int pos) {
    return p.kind == ROWS_RING ? ring_row(u, p, pos) : run_rows_of(u, p).at(pos);
}
/* Where position pos of a ring of F32 is. */
DEVICE float *ring_at(const struct run &u, const struct cache_tensor &p, int pos) {
    return (float *)(p.data + (size_t)ring_row(u, p, pos) * p.row_bytes);
}

enum { WARP = 32, ROW_THREADS = 256 };

/* Sum and maximum over the 32 lanes of a warp; every lane gets them. */
DEVICE float warp_sum(float x) {
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    return x;
}
DEVICE float warp_max(float x) {
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, o));
    return x;
}

/* Sums x over a block of THREADS; every thread gets the same bits. There is one `partial` per kernel: put a barrier
 * before the next call, or it overwrites sums that are still read. */
template <int THREADS>
DEVICE float block_sum(float x) {
    SHARED(float, partial, THREADS / WARP);
    x = warp_sum(x);
    if (!(threadIdx.x & 31)) partial[threadIdx.x >> 5] = x;
    __syncthreads(); /* all warps' sums are written */
    float s = 0;
    for (int i = 0; i < THREADS / WARP; i++) s += partial[i];
    return s;
}

/* Counts the block in *arrived, which was 0 before the launch. Returns true in the last of n blocks: it then sees
 * what all of them wrote. */
DEVICE bool last_block(uint32_t *arrived, uint32_t n) {
    __syncthreads(); /* all threads have written before the first counts the block: its release is for all of them */
    return __syncthreads_or(!threadIdx.x && atom_add_acq_rel(arrived, 1) == n - 1);
}

/* Cosines and sines of a rotation's angles for the tokens of a forward. */
struct rope_table {
    const float *freq; /* (n) radians per position */
    int n;             /* pairs of values that are rotated */
    float factor;      /* of all cosines and sines */
    float *cs, *sn;    /* (n_tok, n) */
};
struct rope_tables {
    struct rope_table table[MAX_ROPES];
    int n;
};

/* x (n_tok, n_embd) F32, `copies` times for each token and tokens x_stride apart = rows of the embedding times `factor`,
 * times the weights `norm` (n_embd) of an RMS norm, NULL: there is none; skipped if w is empty. An id of -1, where the
 * host has to choose, counts as 0: the forward is thrown away. Fills in the tables of the model's rotations. lag
 * (n_tok, GPU_HC), tokens lag_stride apart: the first half reads stream 0; NULL: reading does not lag.
 * Grid: n_tok, block: 256. Gathers n_embd weights per token out of tiles, 4 to 8 of every 16 bytes: a few KB, bound by
 * latency. */
__global__ void __launch_bounds__(ROW_THREADS)
    k_embed(struct device_matrix w, const int32_t *tokens, struct batch_ref batch, float *x, size_t x_stride,
            int copies, float factor, const float *norm, float eps, const __grid_constant__ struct rope_tables ropes,
            float *lag, size_t lag_stride) {
    grid_dependency_launch();
    grid_dependency_wait();
    __builtin_assume(copies > 0);
    int t = blockIdx.x;
    float ss = 0;
    if (lag && threadIdx.x < GPU_HC) lag[(size_t)t * lag_stride + threadIdx.x] = threadIdx.x ? 0.0f : 1.0f;
    for (int i = threadIdx.x; i < w.n_in; i += ROW_THREADS) {
        const float v = factor * device_matrix_value(w, max(tokens[t], 0), i);
        ss = fmaf(v, v, ss);
        UNROLL_BY(1) for (int k = 0; k < copies; k++) x[(size_t)t * x_stride + (size_t)k * w.n_in + i] = v;
    }
    if (norm) {
        const float f = rsqrtf(block_sum<ROW_THREADS>(ss) / (float)w.n_in + eps);
        for (int i = threadIdx.x; i < w.n_in; i += ROW_THREADS) x[(size_t)t * x_stride + i] *= f * norm[i];
    }
    UNROLL_BY(1) for (int k = 0; k < ropes.n; k++) {
        const struct rope_table &r = ropes.table[k];
        for (int i = threadIdx.x; i < r.n; i += ROW_THREADS) {
            float angle = (float)(run_base(batch.run(t)) + t) * r.freq[i];
            r.cs[t * r.n + i] = cosf(angle) * r.factor;
            r.sn[t * r.n + i] = sinf(angle) * r.factor;
        }
    }
}

/* Weights of the next dense products. Kernels that leave the memory idle request them into L2. */
enum { PREFETCH_RANGES = 2 * LINEAR_MAX, PREFETCH_PIECE = 8192 /* bytes of one request */ };
struct l2_prefetch {
    const uint8_t *at[PREFETCH_RANGES];
    uint32_t n[PREFETCH_RANGES]; /* bytes, a multiple of 16 */
    int count;
};

/* Requests the thread's share. Call it when the kernel in front reads little, or after grid_dependency_wait. */
DEVICE void prefetch_request(const struct l2_prefetch &a) {
    const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
    const uint32_t first = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) + threadIdx.x * blocks;
    for (int i = 0; i < a.count; i++)
        for (uint32_t k = first; k < (a.n[i] + PREFETCH_PIECE - 1) / PREFETCH_PIECE; k += blocks * blockDim.x)
            prefetch_l2(a.at[i] + (size_t)k * PREFETCH_PIECE,
                        min(a.n[i] - k * PREFETCH_PIECE, (uint32_t)PREFETCH_PIECE));
}

/* v = a thread's values of a row x (n), n <= VECS * 4 * NORM_THREADS: four, then those 4 * NORM_THREADS further on, and
 * so on; zeros beyond the row. */
template <int VECS>
DEVICE void norm_load(float4 (&v)[VECS], const float *x, int n) {
    UNROLL for (int u = 0; u < VECS; u++) {
        const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
        v[u] = i < n ? *(const float4 *)(x + i) : make_float4(0, 0, 0, 0);
    }
}
DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

DEVICE float add_squares(float4 v, float sum) {
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

/* Returns the factor that gives the row in v an RMS of 1. Its bits do not depend on VECS. */
template <int VECS>
DEVICE float norm_factor(const float4 (&v)[VECS], int n, float eps) {
    float ss = 0;
    UNROLL for (int u = 0; u < VECS; u++) ss = add_squares(v[u], ss);
    return rsqrtf(block_sum<NORM_THREADS>(ss) / (float)n + eps);
}
/* Takes the mean off the row in v. Its bits do not depend on VECS. */
template <int VECS>
DEVICE void norm_center(float4 (&v)[VECS], int n) {
    float sum = 0;
    UNROLL for (int u = 0; u < VECS; u++) sum += (v[u].x + v[u].y) + (v[u].z + v[u].w);
    const float mean = block_sum<NORM_THREADS>(sum) / (float)n;
    UNROLL for (int u = 0; u < VECS; u++) if (4 * ((int)threadIdx.x + NORM_THREADS * u) < n) v[u] =
        make_float4(v[u].x - mean, v[u].y - mean, v[u].z - mean, v[u].w - mean);
    __syncthreads(); /* the sum is read; the next block_sum overwrites it */
}
DEVICE float4 norm_value(float4 v, float f, float4 w) {
    return make_float4(v.x * f * w.x, v.y * f * w.y, v.z * f * w.z, v.w * f * w.w);
}

/* The norm that a decode kernel makes of its input itself: every block norms all rows, so that it need not wait for a
 * kernel that does it once. n <= FUSED_NORM_MAX, n_tok * n <= FUSED_NORM_VALUES. */
struct norm_input {
    const float *x, *partial; /* (n_tok, n); partial NULL: none */
    const float *weight;      /* (n) */
    float eps;
    int n;
    float *sum;    /* (n_tok, n) where the first block stores x + partial: not x, which other blocks still read */
    uint16_t *h16; /* (n_tok, n) where it stores the norm; NULL: nowhere */
    const float *weight16; /* (n) weights of the norm in h16; NULL: the same */
};

/* Calls store(t, i, y) for values i..i+3 of the norm of every row t. w: the weights, by norm_load. Ends with a
 * barrier. */
template <class STORE>
DEVICE void norm_rows(const struct norm_input &p, int n_tok, const float4 (&w)[FUSED_NORM_VECS], STORE store) {
    UNROLL_BY(1) for (int t = 0; t < n_tok; t++) {
        float4 v[FUSED_NORM_VECS], d[FUSED_NORM_VECS];
        const size_t row = (size_t)t * (size_t)p.n;
        norm_load(v, p.x + row, p.n);
        if (p.partial) norm_load(d, p.partial + row, p.n);
        UNROLL for (int u = 0; u < FUSED_NORM_VECS; u++) if (p.partial) v[u] = add4(v[u], d[u]);
        const float f = norm_factor(v, p.n, p.eps);
        UNROLL for (int u = 0; u < FUSED_NORM_VECS; u++) {
            const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
            if (i >= p.n) continue;
            const float4 y = norm_value(v[u], f, w[u]);
            store(t, i, y);
            if (blockIdx.x) continue;
            if (p.partial) *(float4 *)(p.sum + row + i) = v[u];
            const float4 h = p.weight16 ? norm_value(v[u], f, *(const float4 *)(p.weight16 + i)) : y;
            if (p.h16) *(uint2 *)(p.h16 + row + i) = make_uint2(clamped_f16x2(h.x, h.y), clamped_f16x2(h.z, h.w));
        }
        __syncthreads(); /* the row is stored; the next row's block_sum overwrites this one's */
    }
}

/* Where k_add_norm finds the partial sums that it adds to x. */
enum partial_source {
    PARTIAL_OWN,      /* this rank's alone, or none */
    PARTIAL_PUSHED,   /* of all ranks: this kernel pushes and adds */
    PARTIAL_GATHERED, /* of all ranks, side by side (NCCL all-gather) */
    PARTIAL_BF16      /* their sum in BF16 (NCCL all-reduce) */
};

struct norm_args {
    const float *x; /* (n_tok, n) residual stream; n <= NORM_MAX, n % 4 == 0; not PARTIAL_OWN: NULL stands for zeros */
    float *sum;     /* (n_tok, n) x + partial; may be x */
    const void *partial; /* (n_tok, n) F32; gathered: (n_rank, n_tok, n) F32; BF16: (n_tok, n) BF16; NULL: none */
    const float *weight; /* (n); NULL: add only */
    const float *bias;   /* (n), added to the norm; NULL: none */
    bool centers;        /* the mean is taken off before the RMS norm: LayerNorm */
    float eps;
    int n, n_tok;
    uint16_t *h16;         /* (n_tok, n) result in halves */
    float *h32;            /* (n_tok, n) result in F32, or NULL */
    const float *weight32; /* (n) weights of the norm in h32; NULL: the same */
    struct tp_rank p;
    float *slot[MAX_RANKS];    /* by rank, for PARTIAL_PUSHED: (2, n_rank, p.slot_floats) */
    uint32_t *flag[MAX_RANKS]; /* by rank, for PARTIAL_PUSHED: (n_rank, ALLREDUCE_BLOCKS) */
    uint32_t code;             /* WAIT_CODE of rank 0 */
    bool sharing;              /* other ranks are on the same GPU */
};

/* Pushes the block's rows to the other ranks and waits for theirs. Slots alternate between two halves, by the parity of
 * seq: a rank that is one all-reduce ahead writes to the other half. It cannot be two ahead of a rank that still reads:
 * the flag of the all-reduce between would be missing. */
DEVICE void rows_push(const struct norm_args &a, uint32_t seq) {
    const int tid = threadIdx.x;
    const size_t n = (size_t)a.n, per_rank = (size_t)a.p.slot_floats,
                 parity = (size_t)(seq & 1) * (size_t)a.p.n_rank * per_rank;
    for (int t = blockIdx.x; t < a.n_tok; t += (int)gridDim.x)
        for (int i = 4 * tid; i < a.n; i += 4 * NORM_THREADS) {
            const uint4 v = *(const uint4 *)((const float *)a.partial + (size_t)t * n + i);
            for (int k = 0; k < a.p.n_rank; k++)
                if (k != a.p.rank) st_sys16(a.slot[k] + parity + (size_t)a.p.rank * per_rank + (size_t)t * n + i, v);
        }
    __syncthreads(); /* all threads have stored before the releases publish the rows */
    if (tid < a.p.n_rank && tid != a.p.rank) {
        st_release_sys(a.flag[tid] + a.p.rank * ALLREDUCE_BLOCKS + blockIdx.x, seq);
        flag_wait(a.flag[a.p.rank] + tid * ALLREDUCE_BLOCKS + blockIdx.x, seq, a.p, a.code + (uint32_t)tid);
    }
    __syncthreads(); /* the rows of all ranks have come */
}

/* Returns four partial sums of row t, from column i on. */
template <int SOURCE>
DEVICE float4 partial_at(const struct norm_args &a, uint32_t seq, int t, int i) {
    const size_t n = (size_t)a.n, at = (size_t)t * n + (size_t)i;
    if (SOURCE == PARTIAL_OWN) return *(const float4 *)((const float *)a.partial + at);
    if (SOURCE == PARTIAL_BF16) {
        const uint2 v = *(const uint2 *)((const uint16_t *)a.partial + at);
        return make_float4(bf16_value((uint16_t)v.x), bf16_value((uint16_t)(v.x >> 16)), bf16_value((uint16_t)v.y),
                           bf16_value((uint16_t)(v.y >> 16)));
    }
    float4 sum = make_float4(0, 0, 0, 0);
    for (int k = 0; k < a.p.n_rank; k++) { /* in the order of the ranks: all ranks get the same bits */
        uint4 u;
        if (SOURCE == PARTIAL_GATHERED)
            u = *(const uint4 *)((const float *)a.partial + (size_t)k * (size_t)a.n_tok * n + at);
        else if (k == a.p.rank) u = *(const uint4 *)((const float *)a.partial + at);
        else
            u = ld_sys16(a.slot[a.p.rank] +
                         ((size_t)(seq & 1) * (size_t)a.p.n_rank + (size_t)k) * (size_t)a.p.slot_floats + at);
        const float4 v =
            make_float4(__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w));
        const float4 more = add4(sum, v);
        sum = k ? more : v;
    }
    return sum;
}

/* Ends an all-reduce of so many tokens; every block calls it. Shows the host that the rank makes progress: a write over
 * the bus, so not after each short all-reduce. */
DEVICE void all_reduce_end(const struct tp_rank &p, int n_tok) {
    if (!channel_end(p, CH_ALLREDUCE)) return;
    const uint32_t done = p.sequence->done[CH_ALLREDUCE];
    if (n_tok > 16 || (done & 15) == 1) *(volatile uint32_t *)&p.heartbeat->all_reduces = done;
}

/* sum = x + partial; then, unless weight is NULL, h16 and h32 = RMS norm of the sum (centers: of its distance from the
 * mean) times weight, plus bias.
 * Grid: n_tok; PARTIAL_PUSHED: at most cuda.reduce_blocks: all blocks of all ranks on a GPU must be resident while they
 * wait, and an SM may hold only one. Block: 256. Each value is read once and held in registers; rows have up to 1024
 * VECS values. One token: 2 to 4 latencies of L2, about 2 us, pushed 5 us more. Many tokens: 3 to 5 F32 passes over the
 * rows. No __restrict__ here: it would let loads move above grid_dependency_wait. */
template <int SOURCE, int VECS>
__global__ void __launch_bounds__(NORM_THREADS, 1) k_add_norm(struct norm_args a) {
    const int n = a.n;
    uint32_t seq = 0;
    float4 v[VECS], w[VECS], d[VECS];
    if (SOURCE != PARTIAL_PUSHED || !a.sharing) grid_dependency_launch();
    const bool hold = VECS <= 8; /* the weights: registers do not suffice for longer rows */
    if (a.weight && hold) norm_load(w, a.weight, n);
    grid_dependency_wait();
    if (SOURCE == PARTIAL_PUSHED) {
        seq = a.p.sequence->done[CH_ALLREDUCE] + 1;
        rows_push(a, seq);
        /* Not before the wait: blocks of the next kernel would take the SMs of another rank on the same GPU. */
        if (a.sharing) grid_dependency_launch();
    }
    for (int t = blockIdx.x; t < a.n_tok; t += (int)gridDim.x) {
        const size_t row = (size_t)t * (size_t)n;
        norm_load(v, a.x + row, SOURCE == PARTIAL_OWN || a.x ? n : 0);
        UNROLL for (int u = 0; u < VECS; u++) {
            const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
            if (a.partial && i < n) d[u] = partial_at<SOURCE>(a, seq, t, i);
        }
        UNROLL for (int u = 0; u < VECS; u++) {
            const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
            if (!a.partial || i >= n) continue;
            v[u] = add4(v[u], d[u]);
            *(float4 *)(a.sum + row + i) = v[u];
        }
        if (a.weight) {
            if (a.centers) norm_center(v, n);
            const float f = norm_factor(v, n, a.eps);
            UNROLL for (int u = 0; u < VECS; u++) {
                const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
                if (i >= n) continue;
                float4 y = norm_value(v[u], f, hold ? w[u] : *(const float4 *)(a.weight + i));
                if (a.bias) y = add4(y, *(const float4 *)(a.bias + i));
                *(uint2 *)(a.h16 + row + i) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
                if (a.h32)
                    *(float4 *)(a.h32 + row + i) =
                        a.weight32 ? norm_value(v[u], f, *(const float4 *)(a.weight32 + i)) : y;
            }
        }
        if (t + (int)gridDim.x < a.n_tok) __syncthreads(); /* the next row's block_sum overwrites this one's */
    }
    if (SOURCE != PARTIAL_OWN) all_reduce_end(a.p, a.n_tok);
}

/* Launches k_add_norm. */
template <int SOURCE>
static void add_norm(const struct norm_args *a, unsigned blocks, cudaStream_t s) {
    if (a->n <= 4 * 4 * NORM_THREADS) LAUNCH_PDL((k_add_norm<SOURCE, 4>), blocks, NORM_THREADS, 0, s, *a);
    else if (a->n <= 8 * 4 * NORM_THREADS) LAUNCH_PDL((k_add_norm<SOURCE, 8>), blocks, NORM_THREADS, 0, s, *a);
    else LAUNCH_PDL((k_add_norm<SOURCE, 16>), blocks, NORM_THREADS, 0, s, *a);
}

/* What a half of a layer gives, where its norm is added. */
struct result_args {
    float *x;             /* (n_tok, n) the residual; n <= NORM_MAX, n % 4 == 0 */
    const float *partial; /* (n_tok, n) the sums over the ranks */
    const float *more;    /* (n_tok, n) those of a second part of the feed-forward; NULL: there is none */
    const float *part[2]; /* with it (n) weights of the norms of both, whose sum stands for `partial` */
    const float *result;  /* (n) weights of their norm */
    const float *scale;   /* (1) factor of x after that; NULL: 1 */
    const float *weight;  /* (n) of the norm of x; NULL: it is not made */
    uint16_t *h16;        /* (n_tok, n) that norm in halves */
    float *h32;           /* (n_tok, n) the same in F32 */
    float eps;
    int n;
};

/* x = (x + norm(partial) * result) * scale, then h = norm(x) * weight. With `more`, norm(partial) * part[0] + norm(more) *
 * part[1] takes the place of partial. Grid: n_tok, block: NORM_THREADS. Some KB a token: latency. */
template <int VECS>
__global__ void __launch_bounds__(NORM_THREADS, 1) k_add_result(const __grid_constant__ struct result_args a) {
    const int n = a.n;
    const size_t row = (size_t)blockIdx.x * (size_t)n;
    float4 v[VECS], x[VECS];
    grid_dependency_launch();
    grid_dependency_wait();
    norm_load(v, a.partial + row, n);
    if (a.more) {
        norm_load(x, a.more + row, n);
        auto weigh = [&](float f, const float *w, float4 y, int u) {
            const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
            return i < n ? norm_value(y, f, *(const float4 *)(w + i)) : y;
        };
        const float f = norm_factor(v, n, a.eps);
        UNROLL for (int u = 0; u < VECS; u++) v[u] = weigh(f, a.part[0], v[u], u);
        __syncthreads(); /* the second block_sum overwrites the first one's */
        const float g = norm_factor(x, n, a.eps);
        UNROLL for (int u = 0; u < VECS; u++) v[u] = add4(v[u], weigh(g, a.part[1], x[u], u));
        __syncthreads(); /* the third one overwrites that */
    }
    norm_load(x, a.x + row, n);
    const float f = norm_factor(v, n, a.eps), scale = a.scale ? *a.scale : 1.0f;
    UNROLL for (int u = 0; u < VECS; u++) {
        const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
        if (i >= n) continue;
        const float4 y = add4(x[u], norm_value(v[u], f, *(const float4 *)(a.result + i)));
        x[u] = make_float4(y.x * scale, y.y * scale, y.z * scale, y.w * scale);
        *(float4 *)(a.x + row + i) = x[u];
    }
    if (!a.weight) return;
    __syncthreads(); /* the second block_sum overwrites the first one's */
    const float g = norm_factor(x, n, a.eps);
    UNROLL for (int u = 0; u < VECS; u++) {
        const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
        if (i >= n) continue;
        const float4 y = norm_value(x[u], g, *(const float4 *)(a.weight + i));
        *(uint2 *)(a.h16 + row + i) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
        *(float4 *)(a.h32 + row + i) = y;
    }
}

/* A ring of hidden states for the positions of a batch, see struct rank. */
struct mtp_ring {
    float *at; /* (timelines, n_row, n_hc, n) */
    int n_row, n_hc, n;
    int timeline_rows; /* n_row; 0: the timelines have one ring */
    struct batch_ref batch;
    /* The row of the position `shift` after that of row t. */
    DEVICE_MEMBER float *row(int t, int shift, int stream) const {
        const struct run &u = batch.run(t);
        const int i = u.timeline * timeline_rows + (run_base(u) + t + shift) % n_row;
        return at + ((size_t)i * (size_t)n_hc + (size_t)stream) * (size_t)n;
    }
};
enum { LONG_NORM_VECS = NORM_MAX / (4 * NORM_THREADS) };

/* The norm of x becomes the hidden states of the batch's positions; from row `also_from` on in a second ring too. */
struct keep_hidden_args {
    const float *x;      /* (n_tok, n_hc, n) */
    const float *weight; /* (n) of the norm; NULL: x itself is kept */
    float eps;
    int next; /* of each run the last row alone, as that of the position after it */
    int also_from;
    struct mtp_ring ring, also;
};

/* Grid: (n_tok, n_hc), block: NORM_THREADS. Some KB, bound by latency: 2 us. */
__global__ void __launch_bounds__(NORM_THREADS) k_keep_hidden(const __grid_constant__ struct keep_hidden_args a) {
    float4 v[LONG_NORM_VECS];
    const int t = (int)blockIdx.x, stream = (int)blockIdx.y, n = a.ring.n;
    grid_dependency_launch();
    grid_dependency_wait();
    const struct run &u = a.ring.batch.run(t);
    if (a.next && t + 1 < u.first + u.n) return;
    norm_load(v, a.x + ((size_t)t * (size_t)a.ring.n_hc + (size_t)stream) * (size_t)n, n);
    const float f = norm_factor(v, n, a.eps);
    float *to = a.ring.row(t, a.next, stream), *second = t >= a.also_from ? a.also.row(t, a.next, stream) : NULL;
    UNROLL for (int k = 0; k < LONG_NORM_VECS; k++) {
        const int i = 4 * ((int)threadIdx.x + NORM_THREADS * k);
        if (i >= n) continue;
        const float4 y = a.weight ? norm_value(v[k], f, *(const float4 *)(a.weight + i)) : v[k];
        *(float4 *)(to + i) = y;
        if (second) *(float4 *)(second + i) = y;
    }
}

/* The input of an MTP layer. */
struct mtp_input_args {
    float *x; /* (n_tok, n) embeddings, x_stride apart; becomes 0 */
    size_t x_stride;
    struct mtp_ring ring;
    const float *norm[2]; /* (n) of the embedding, of the hidden state */
    float eps;
    int from, to;  /* columns of both, side by side, that the rank has; multiples of 4 */
    uint16_t *out; /* (n_tok, n_hc, to - from), streams out_stride halves apart */
    size_t out_stride;
    bool whole; /* the streams of a hidden state are normed as one row, by norm[1] (n_hc, n) */
};

/* out = [norm(x) * norm[0], norm(hidden state) * norm[1]] for each stream of the hidden state, then x = 0. Grid:
 * (n_tok, 1 + n_hc), block: NORM_THREADS. Of a whole row every block of a token adds up the squares, some 40 KB. */
__global__ void __launch_bounds__(NORM_THREADS) k_mtp_input(const __grid_constant__ struct mtp_input_args a) {
    float4 v[LONG_NORM_VECS];
    const int t = (int)blockIdx.x, half = blockIdx.y > 0, n = a.ring.n;
    float *x = a.x + (size_t)t * a.x_stride;
    grid_dependency_launch();
    grid_dependency_wait();
    const int first = half ? (int)blockIdx.y - 1 : 0, end = half ? first + 1 : a.ring.n_hc; /* streams that it writes */
    norm_load(v, half ? a.ring.row(t, 0, first) : x, n);
    const float *weight = a.norm[half];
    float f;
    if (half && a.whole) {
        const float *row = a.ring.row(t, 0, 0);
        const int all = a.ring.n_hc * n;
        float ss = 0;
        for (int i = 4 * (int)threadIdx.x; i < all; i += 4 * NORM_THREADS)
            ss = add_squares(*(const float4 *)(row + i), ss);
        f = rsqrtf(block_sum<NORM_THREADS>(ss) / (float)all + a.eps);
        weight += (size_t)first * (size_t)n;
    } else {
        f = norm_factor(v, n, a.eps);
    }
    UNROLL for (int u = 0; u < LONG_NORM_VECS; u++) {
        const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u), column = half * n + i;
        if (i >= n) continue;
        if (!half) *(float4 *)(x + i) = make_float4(0, 0, 0, 0);
        if (column < a.from || column >= a.to) continue;
        const float4 y = norm_value(v[u], f, *(const float4 *)(weight + i));
        UNROLL_BY(1)
        for (int j = first; j < end; j++)
            *(uint2 *)(a.out + (size_t)(t * a.ring.n_hc + j) * a.out_stride + (size_t)(column - a.from)) =
                make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
    }
}

/* ============================================================================================================
 * Hyper-connections
 *
 * Hyper-connections (DeepSeek-V4, Hunyuan 4), see hc_mix of moe.c. k_hc_mix takes the result of a half of a layer into
 * the streams, and multiplies them by the rows of `fn`; k_hc_norm makes coefficients of the products, and the
 * next half's input, which in DeepSeek-V4.1 the coefficients of the half before read. The residual stays in F32.
 * ============================================================================================================ */

enum { HC_ROWS = (2 + GPU_HC) * GPU_HC, HC_TOKENS = 16 /* of a block of k_hc_mix at most */ };

struct hc_args {
    float *streams;       /* (n_tok, GPU_HC, n) */
    const float *partial; /* (n_tok, n); NULL: none */
    const float *joined;  /* (n_tok, GPU_HC, n) in place of the streams; NULL: none */
    float *mix;           /* (n_tok, HC_ROWS) coefficients, which k_hc_norm makes for the next mix, */
    size_t mix_stride;    /* tokens so many floats apart */
    float *lag;           /* (n_tok, GPU_HC) of mix: how this half reads the streams, and then the next; NULL: no lag */
    const float *fn;      /* (n_row, GPU_HC * n); NULL: nothing is multiplied */
    const float *base, *scale; /* as in struct hyper */
    float *sums;               /* (n_tok, blocks, HC_SUMS): products with the rows, 0, .., squares at HC_ROWS */
    int n_row, n, n_tok;
    int n_sinkhorn; /* 0: streams are not mixed */
    float eps, hc_eps, hc_write;
    bool mean;           /* the streams are read by their mean, and n_row is 0 */
    const float *weight; /* (n) of the norm; NULL: the streams' sum is stored without one, to x */
    uint16_t *h16;       /* (n_tok, n) the norm, */
    float *h32;          /* in F32, too */
    float *x;
};

/* Adds v[i] over the lanes of a warp: lane i gets the sum of v[i]. STEP: lanes that exchange their halves of the
 * values. */
template <int STEP>
DEVICE float warp_sums(float (&v)[32]) {
    const bool high = threadIdx.x & STEP;
    UNROLL for (int i = 0; i < STEP; i++) {
        const float sent = high ? v[i] : v[i + STEP], kept = high ? v[i + STEP] : v[i];
        v[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, STEP);
    }
    if constexpr (STEP > 1) return warp_sums<STEP / 2>(v);
    else return v[0];
}

/* streams = post * partial + mix^T streams, and the sums of their products with fn.
 * Grid: (ceil(n / HC_COLUMNS), ceil(n_tok / HC_TOKENS)), block: HC_COLUMNS, a thread per column, with its
 * column of fn in registers. Moves 36 bytes per column and token, and reads fn once per block row, before the kernel in
 * front has ended. */
__global__ void __launch_bounds__(HC_COLUMNS) k_hc_mix(const __grid_constant__ struct hc_args a) {
    SHARED(float, part, HC_TOKENS *(HC_COLUMNS / WARP) * HC_SUMS);
    grid_dependency_launch();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, col = (int)blockIdx.x * HC_COLUMNS + tid;
    const bool in = col < a.n;
    float w[HC_ROWS][GPU_HC];
    UNROLL for (int i = 0; i < HC_ROWS; i++) UNROLL for (int j = 0; j < GPU_HC; j++) w[i][j] =
        in && i < a.n_row ? a.fn[(size_t)(i * GPU_HC + j) * (size_t)a.n + (size_t)col] : 0.0f;
    grid_dependency_wait();
    const int first = (int)blockIdx.y * HC_TOKENS, some = min(a.n_tok - first, (int)HC_TOKENS);
    UNROLL_BY(1) for (int t = 0; t < some; t++) {
        float *row = a.streams + (size_t)(first + t) * (size_t)(GPU_HC * a.n) + col, x[GPU_HC], v[32] = {};
        const float *from = a.joined ? a.joined + (row - a.streams) : row;
        UNROLL for (int j = 0; j < GPU_HC; j++) x[j] = in ? from[(size_t)j * (size_t)a.n] : 0.0f;
        if (a.joined && in) UNROLL for (int j = 0; j < GPU_HC; j++) row[(size_t)j * (size_t)a.n] = x[j];
        if (a.partial) {
            const float y = in ? a.partial[(size_t)(first + t) * (size_t)a.n + col] : 0.0f;
            const float *post = a.mix + (size_t)(first + t) * a.mix_stride + GPU_HC;
            const float *mix = post + GPU_HC;
            float to[GPU_HC];
            UNROLL for (int k = 0; k < GPU_HC; k++) {
                to[k] = post[k] * y;
                UNROLL for (int j = 0; j < GPU_HC; j++) to[k] = fmaf(mix[j * GPU_HC + k], x[j], to[k]);
            }
            UNROLL for (int k = 0; k < GPU_HC; k++) {
                x[k] = to[k];
                if (in) row[(size_t)k * (size_t)a.n] = to[k];
            }
        }
        UNROLL for (int j = 0; j < GPU_HC; j++) {
            UNROLL for (int i = 0; i < HC_ROWS; i++) v[i] = fmaf(w[i][j], x[j], v[i]);
            v[HC_ROWS] = fmaf(x[j], x[j], v[HC_ROWS]);
        }
        part[(t * (HC_COLUMNS / WARP) + warp) * HC_SUMS + lane] = warp_sums<16>(v);
    }
    __syncthreads(); /* the sums of all warps are written */
    for (int i = tid; i < some * HC_SUMS && a.n_row; i += HC_COLUMNS) {
        const int t = i / HC_SUMS;
        float s = 0;
        for (int k = 0; k < HC_COLUMNS / WARP; k++) s += part[(t * (HC_COLUMNS / WARP) + k) * HC_SUMS + i % HC_SUMS];
        a.sums[((size_t)(first + t) * gridDim.x + blockIdx.x) * HC_SUMS + i % HC_SUMS] = s;
    }
}

/* Makes the mix, a row after the other, doubly stochastic. */
DEVICE void sinkhorn(float (&m)[GPU_HC * GPU_HC], int n_sinkhorn, float eps) {
    UNROLL for (int j = 0; j < GPU_HC; j++) {
        float *row = m + j * GPU_HC, top = row[0], sum = 0;
        UNROLL for (int k = 1; k < GPU_HC; k++) top = fmaxf(top, row[k]);
        UNROLL for (int k = 0; k < GPU_HC; k++) sum += row[k] = expf(row[k] - top);
        UNROLL for (int k = 0; k < GPU_HC; k++) row[k] = row[k] / sum + eps;
    }
    /* rows begin GPU_HC apart and have values 1 apart, columns the other way round */
    auto divide_by_sums = [&](int apart, int step) {
        UNROLL for (int j = 0; j < GPU_HC; j++) {
            float *line = m + j * apart, sum = eps;
            UNROLL for (int k = 0; k < GPU_HC; k++) sum += line[k * step];
            const float f = __fdividef(1.0f, sum);
            UNROLL for (int k = 0; k < GPU_HC; k++) line[k * step] *= f;
        }
    };
    divide_by_sums(1, GPU_HC);
    UNROLL_BY(1) for (int i = 1; i < n_sinkhorn; i++) {
        divide_by_sums(GPU_HC, 1);
        divide_by_sums(1, GPU_HC);
    }
}

/* Coefficients of the sums of n_part blocks; then the streams' weighted sum, and its norm.
 * Grid: n_tok, block: NORM_THREADS. One token: some 4 us, half of them for the coefficients. Many: reads 16 bytes per
 * column. */
template <int VECS>
__global__ void __launch_bounds__(NORM_THREADS, 1) k_hc_norm(const __grid_constant__ struct hc_args a, int n_part) {
    SHARED(float, part, NORM_THREADS / WARP * HC_SUMS);
    SHARED(float, row, HC_SUMS);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, t = blockIdx.x, n = a.n;
    float4 w[VECS], v[VECS];
    grid_dependency_launch();
    if (a.weight) norm_load(w, a.weight, n);
    const float base = lane < a.n_row ? a.base[lane] : 0.0f;
    const float scale = lane < a.n_row ? a.scale[lane < GPU_HC ? 0 : lane < 2 * GPU_HC ? 1 : 2] : 0.0f;
    grid_dependency_wait();
    float s = 0;
    UNROLL_BY(4)
    for (int i = warp; i < n_part; i += NORM_THREADS / WARP)
        s += a.sums[((size_t)t * (size_t)n_part + (size_t)i) * HC_SUMS + lane];
    part[warp * HC_SUMS + lane] = s;
    __syncthreads(); /* the sums of all warps are written */
    if (!warp) {
        s = 0;
        for (int k = 0; k < NORM_THREADS / WARP; k++) s += part[k * HC_SUMS + lane];
        const float square = __shfl_sync(0xFFFFFFFFu, s, HC_ROWS);
        s = fmaf(s * rsqrtf(square / (float)(GPU_HC * n) + a.eps), scale, base);
        if (lane < GPU_HC) s = 1.0f / (1.0f + expf(-s)) + a.hc_eps;
        else if (lane < 2 * GPU_HC) s = a.hc_write / (1.0f + expf(-s)) + (a.n_sinkhorn ? 0.0f : a.hc_eps);
        else if (!a.n_sinkhorn) s = (lane - 2 * GPU_HC) % (GPU_HC + 1) ? 0.0f : 1.0f; /* the identity */
        const float read = a.mean ? 1.0f / GPU_HC : s;
        row[lane] = read;
        if (a.lag && lane < GPU_HC) {
            float *lag = a.lag + (size_t)t * a.mix_stride + lane;
            row[lane] = *lag;
            *lag = read;
        }
        __syncwarp(); /* the row is written */
        if (a.n_row == HC_ROWS) {
            float m[GPU_HC * GPU_HC];
            UNROLL for (int i = 0; i < GPU_HC * GPU_HC; i++) m[i] = row[2 * GPU_HC + i];
            sinkhorn(m, a.n_sinkhorn, a.hc_eps);
            UNROLL for (int i = 0; i < GPU_HC * GPU_HC; i++) if (lane == 2 * GPU_HC + i) s = m[i];
        }
        if (a.n_row > GPU_HC && lane < HC_ROWS) a.mix[(size_t)t * a.mix_stride + lane] = s;
    }
    __syncthreads(); /* the row is complete */
    const float *streams = a.streams + (size_t)t * (size_t)(GPU_HC * n);
    UNROLL for (int u = 0; u < VECS; u++) v[u] = make_float4(0, 0, 0, 0);
    UNROLL_BY(VECS <= 4 ? GPU_HC : 1) for (int j = 0; j < GPU_HC; j++) {
        const float f = row[j];
        UNROLL for (int u = 0; u < VECS; u++) {
            const int i = 4 * (tid + NORM_THREADS * u);
            if (i >= n) continue;
            const float4 x = *(const float4 *)(streams + (size_t)j * (size_t)n + i);
            v[u] = make_float4(fmaf(f, x.x, v[u].x), fmaf(f, x.y, v[u].y), fmaf(f, x.z, v[u].z), fmaf(f, x.w, v[u].w));
        }
    }
    const float f = a.weight ? norm_factor(v, n, a.eps) : 1.0f;
    UNROLL for (int u = 0; u < VECS; u++) {
        const int i = 4 * (tid + NORM_THREADS * u);
        const size_t at = (size_t)t * (size_t)n + (size_t)i;
        if (i >= n) continue;
        if (!a.weight) {
            *(float4 *)(a.x + at) = v[u];
            continue;
        }
        const float4 y = norm_value(v[u], f, w[u]);
        *(uint2 *)(a.h16 + at) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
        *(float4 *)(a.h32 + at) = y;
    }
}

/* Launches both, the second where there is something to multiply. */
static void hc_launch(const struct hc_args *a, cudaStream_t s) {
    const unsigned blocks = (unsigned)((a->n + HC_COLUMNS - 1) / HC_COLUMNS);
    const unsigned rows = (unsigned)((a->n_tok + HC_TOKENS - 1) / HC_TOKENS);
    LAUNCH_PDL(k_hc_mix, dim3(blocks, rows), HC_COLUMNS, 0, s, *a);
    if (!a->n_row && !a->mean) return;
    const int parts = a->mean ? 0 : (int)blocks;
    if (a->n <= 4 * 4 * NORM_THREADS) LAUNCH_PDL(k_hc_norm<4>, (unsigned)a->n_tok, NORM_THREADS, 0, s, *a, parts);
    else LAUNCH_PDL(k_hc_norm<8>, (unsigned)a->n_tok, NORM_THREADS, 0, s, *a, parts);
}

/* ============================================================================================================
 * Hyper-connections of a low rank, n-grams
 *
 * See "Families: the forward" and "Families: n-grams" of moe.c. k_streams_norm takes the result of a half of a layer
 * into the streams and norms each; k_streams_read makes the next half's input of the norms, after products with two
 * matrices. k_ngram_rows reads rows of a table, k_ngram_gate and k_ngram_add add to the streams what products with two
 * matrices make of them.
 *
 * Where the host's memory has no room for the tables, k_want_rows writes the numbers of a forward's rows there, which
 * the host then reads from the file, and k_brought_rows waits until they are in memory.
 * ============================================================================================================ */

struct stream_args {
    float *streams;       /* (n_tok, n_hc, n) */
    const float *partial; /* (n_tok, n) what is written to them; NULL: nothing */
    const float *joined;  /* (n_tok, n_hc, n) in place of the streams; NULL: none */
    const float *mix;     /* (n_tok, n_hc) to which part partial is written, before the sigmoid */
    const float *weight;  /* (n_hc, n) of the norms; NULL: there are none */
    uint16_t *norms;      /* (n_tok, n_hc, n) */
    int n, n_hc;
    float eps;
    struct l2_prefetch prefetch;
};

/* streams += 2 sigmoid(mix / n_hc) * partial, or streams = joined; then norms = RMS norm of each stream times weight.
 * Grid: (n_hc, n_tok), block: NORM_THREADS. A stream is read once and held in registers. One token: 2 to 4 latencies of
 * L2, some 2 us. Many: moves 14 bytes per value. */
template <int VECS>
__global__ void __launch_bounds__(NORM_THREADS, 1) k_streams_norm(const __grid_constant__ struct stream_args a) {
    const int j = (int)blockIdx.x, t = (int)blockIdx.y, n = a.n;
    const size_t row = (size_t)t * (size_t)a.n_hc + (size_t)j;
    float4 v[VECS], w[VECS], d[VECS];
    grid_dependency_launch();
    if (a.weight) norm_load(w, a.weight + (size_t)j * (size_t)n, n);
    grid_dependency_wait();
    prefetch_request(a.prefetch);
    norm_load(v, (a.joined ? a.joined : a.streams) + row * (size_t)n, n);
    if (a.joined) {
        UNROLL for (int u = 0; u < VECS; u++) {
            const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
            if (i < n) *(float4 *)(a.streams + row * (size_t)n + i) = v[u];
        }
    }
    if (a.partial) {
        norm_load(d, a.partial + (size_t)t * (size_t)n, n);
        const float f = 2.0f / (1.0f + expf(-a.mix[row] / (float)a.n_hc));
        UNROLL for (int u = 0; u < VECS; u++) {
            const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
            v[u] = make_float4(fmaf(f, d[u].x, v[u].x), fmaf(f, d[u].y, v[u].y), fmaf(f, d[u].z, v[u].z),
                               fmaf(f, d[u].w, v[u].w));
            if (i < n) *(float4 *)(a.streams + row * (size_t)n + i) = v[u];
        }
    }
    if (!a.weight) return;
    const float f = norm_factor(v, n, a.eps);
    UNROLL for (int u = 0; u < VECS; u++) {
        const int i = 4 * ((int)threadIdx.x + NORM_THREADS * u);
        if (i >= n) continue;
        const float4 y = norm_value(v[u], f, w[u]);
        *(uint2 *)(a.norms + row * (size_t)n + i) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
    }
}

/* Four halves as floats. */
DEVICE float4 halves4(const uint16_t *p) {
    const uint2 h = *(const uint2 *)p;
    return make_float4(half_to_f32((uint16_t)h.x), half_to_f32((uint16_t)(h.x >> 16)), half_to_f32((uint16_t)h.y),
                       half_to_f32((uint16_t)(h.y >> 16)));
}
DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

/* y (n_tok, n) in halves = x (n_tok, n), n % 4 == 0; factor not 0: SiLU(factor x). */
struct halves_args {
    const float *x;
    uint16_t *y;
    int n;
    float factor;
};

/* Grid: (ceil(n / 1024), n_tok), block: 256. Moves 6 bytes a value. */
__global__ void __launch_bounds__(256) k_to_halves(struct halves_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = 4 * (int)(blockIdx.x * 256 + threadIdx.x);
    const size_t at = (size_t)blockIdx.y * (size_t)a.n + (size_t)i;
    if (i >= a.n) return;
    const float4 v = *(const float4 *)(a.x + at);
    auto value = [&](float x) { return a.factor == 0 ? x : a.factor * x * logistic(a.factor * x); };
    *(uint2 *)(a.y + at) = make_uint2(clamped_f16x2(value(v.x), value(v.y)), clamped_f16x2(value(v.z), value(v.w)));
}
static void to_halves(const float *x, uint16_t *y, int n, int n_tok, float factor, cudaStream_t s) {
    const struct halves_args a = {x, y, n, factor};
    LAUNCH_PDL(k_to_halves, dim3((unsigned)((n + 1023) / 1024), (unsigned)n_tok), 256, 0, s, a);
}

/* out = the mean over the streams of sigmoid(up) * norms. */
struct read_args {
    const uint16_t *norms, *up; /* (n_tok, n_hc, n) */
    uint16_t *h16;              /* (n_tok, n), NULL: not in halves */
    float *h32;                 /* (n_tok, n) */
    int n, n_hc;
};

/* Grid: (ceil(n / 1024), n_tok), block: 256, four columns a thread. Reads 4 bytes a value of the streams: latency. */
__global__ void __launch_bounds__(256) k_streams_read(const __grid_constant__ struct read_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = 4 * (int)(blockIdx.x * 256 + threadIdx.x), n = a.n;
    const size_t t = blockIdx.y, at = t * (size_t)n + (size_t)i;
    const float each = 1.0f / (float)a.n_hc;
    float4 y = make_float4(0, 0, 0, 0);
    if (i >= n) return;
    UNROLL_BY(4) for (int j = 0; j < a.n_hc; j++) {
        const size_t from = (t * (size_t)a.n_hc + (size_t)j) * (size_t)n + (size_t)i;
        const float4 x = halves4(a.norms + from), up = halves4(a.up + from);
        y = make_float4(fmaf(logistic(up.x), x.x, y.x), fmaf(logistic(up.y), x.y, y.y), fmaf(logistic(up.z), x.z, y.z),
                        fmaf(logistic(up.w), x.w, y.w));
    }
    y = make_float4(y.x * each, y.y * each, y.z * each, y.w * each);
    *(float4 *)(a.h32 + at) = y;
    if (a.h16) *(uint2 *)(a.h16 + at) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
}

/* Rows of a table of n-grams, and what they add to the streams. A token's ring row has for every stream what is under
 * the convolution, if there is one, then the token's id. */
struct ngram_args {
    struct batch_ref batch;
    const int32_t *tokens;
    struct ngram
        table; /* its rows and their scales are in pinned memory of the host, as in the file; its ids on the GPU */
    uint64_t inverse[NGRAM_HEADS]; /* floor((2^64 - 1) / n_row) of a head, see ngram_divide */
    float scale;                   /* of the table's values */
    uint16_t *rows;                /* (n_tok, n_head * table.row) */
    struct cache_tensor ring;
    int n_kept; /* values of its rows before the token's id */

    struct tp_rank p;
    struct row_question
        *question;            /* for the rows of tokens, which the table then has, one after the other; NULL: it has
                                    * all its rows */
    int32_t *asked, *n_asked; /* its list of the table, by addresses of the GPU */

    float *streams;                    /* (n_tok, n_hc, n) */
    const uint16_t *norms, *keys;      /* (n_tok, n_hc, n) */
    const float *value;                /* (n_tok, n) */
    const float *key_norm, *conv_norm; /* (n_hc, n) */
    const float *taps;                 /* (n_hc * n, table.n_conv), the last one a token's own */
    float *gates; /* (n_tok, 2, n_hc) factors of the values in the streams, and in their norms under the convolution */
    int n, n_hc;
    float eps;
    int first, keep; /* tokens of the batch: the launch begins with; the ring gets them from there on */
    bool add;        /* it adds to the streams */
};

/* The ring's row of position p, which is before the batch or one of those that it keeps. */
DEVICE float *ngram_kept(const struct ngram_args &a, const struct run &u, int p) {
    return (float *)(a.ring.data + (size_t)(p % a.ring.n_row + run_rows_of(u, a.ring).shift) * a.ring.row_bytes);
}

/* The id of row t of the batch. One of -1, where the host has to choose, counts as 0: the forward is thrown away. */
DEVICE int32_t ngram_id(const struct ngram_args &a, int t) { return max(a.tokens[t], 0); }

/* The table's row that a head chooses for token t: ngrams_choose of moe.c. */
DEVICE size_t ngram_row(const struct ngram_args &a, int t, int head) {
    const struct ngram &g = a.table;
    const struct run &u = a.batch.run(t);
    const int pos = run_base(u) + t, n = 2 + head / g.per_size;
    int64_t mixed = 0;
    bool ended = false;
    UNROLL_BY(1) for (int s = 0; s < n; s++) {
        int32_t id = g.eos;
        if (!ended && s <= pos)
            id = pos - s < u.pos ? (int32_t)ngram_kept(a, u, pos - s)[a.n_kept] : ngram_id(a, t - s);
        ended |= g.ends && s && id == g.eos;
        mixed ^= (g.id ? g.id[id] : id) * g.multiplier[s];
    }
    /* mixed < 2^63: the quotient is exact or one too small */
    const uint64_t n_row = (uint64_t)g.n_row[head], quotient = __umul64hi((uint64_t)mixed, a.inverse[head]);
    const uint64_t rest = (uint64_t)mixed - quotient * n_row;
    return (size_t)g.offset[head] + (size_t)(rest >= n_row ? rest - n_row : rest);
}

/* Asks the host for the rows that tokens choose.
 * Grid: ceil(n_tok n_head / 256), block: 256, a thread for each row. The latencies of the bus and of divisions. */
__global__ void __launch_bounds__(256) k_want_rows(const __grid_constant__ struct ngram_args a) {
    grid_dependency_wait();
    const int n = a.batch.at->n_tok * a.table.n_head, i = (int)(blockIdx.x * 256 + threadIdx.x);
    const uint32_t seq = a.p.sequence->done[CH_WANT_ROWS] + 1;
    if (i < n) *(volatile int32_t *)(a.asked + i) = (int32_t)ngram_row(a, i / a.table.n_head, i % a.table.n_head);
    if (!i) *(volatile int32_t *)a.n_asked = n;
    if (channel_end(a.p, CH_WANT_ROWS)) st_release_sys(&a.question->asked, seq);
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

/* Waits until the rows are in memory. Grid: 1, block: 32; the latency of the disk. */
__global__ void __launch_bounds__(32) k_brought_rows(const __grid_constant__ struct ngram_args a, int layer) {
    grid_dependency_wait();
    if (!threadIdx.x)
        flag_wait(&a.question->answered, a.p.sequence->done[CH_BROUGHT_ROWS] + 1, a.p,
                  WAIT_CODE(0, CH_BROUGHT_ROWS, layer));
    channel_end(a.p, CH_BROUGHT_ROWS);
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

/* Prepares the divisions of hashes. */
static void ngram_divide(struct ngram_args *a) {
    for (int i = 0; i < a->table.n_head; i++) a->inverse[i] = ~(uint64_t)0 / (uint64_t)a->table.n_row[i];
}

/* Grid: (ceil(n_head / 4), n_tok), block: 128, a warp for each row. Reads the host's memory over the bus: a latency of
 * that, which all rows of a token share, and few bytes. */
__global__ void __launch_bounds__(128, 1) k_ngram_rows(const __grid_constant__ struct ngram_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const struct ngram &g = a.table;
    const int head = (int)(blockIdx.x * 4 + threadIdx.x / WARP), t = (int)blockIdx.y;
    if (head >= g.n_head || t >= a.batch.at->n_tok) return;
    const size_t n = a.question ? (size_t)t * (size_t)g.n_head + (size_t)head : ngram_row(a, t, head);
    const uint8_t *row = g.table.data + n * g.table.row_bytes, *scales = g.scales.data + n * g.scales.row_bytes;
    uint16_t *to = a.rows + ((size_t)t * (size_t)g.n_head + (size_t)head) * (size_t)g.row;
    const int lane = (int)threadIdx.x % WARP;
    if (!g.scales.data) {
        UNROLL_BY(4)
        for (int i = lane; i < g.row; i += WARP) to[i] = clamped_f16(raw_value(g.table.type, row, i) * a.scale);
        return;
    }
    UNROLL_BY(2) for (int i = 4 * lane; i < g.row; i += 4 * WARP) {
        const uint32_t codes = *(const uint32_t *)(row + i);
        const float scale = e8m0_value(scales[i / NGRAM_SCALE]);
        const uint32_t lo = e4m3x2_to_f16x2((uint16_t)codes), hi = e4m3x2_to_f16x2((uint16_t)(codes >> 16));
        auto pair = [&](uint32_t v) {
            return clamped_f16x2(half_to_f32((uint16_t)v) * scale, half_to_f32((uint16_t)(v >> 16)) * scale);
        };
        *(uint2 *)(to + i) = make_uint2(pair(lo), pair(hi));
    }
}

/* The gates of a token and stream: of the product of the stream's norm with the norm of its key.
 * Grid: (n_hc, n_tok), block: NORM_THREADS. Moves 16 bytes per value: latency. */
__global__ void __launch_bounds__(NORM_THREADS) k_ngram_gate(const __grid_constant__ struct ngram_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int j = (int)blockIdx.x, n = a.n;
    const size_t t = blockIdx.y, row = (t * (size_t)a.n_hc + (size_t)j) * (size_t)n;
    float squares = 0, product = 0, values = 0;
    UNROLL_BY(2) for (int i = 4 * (int)threadIdx.x; i < n; i += 4 * NORM_THREADS) {
        const float4 k = halves4(a.keys + row + i), q = halves4(a.norms + row + i);
        const float4 w = *(const float4 *)(a.key_norm + (size_t)j * (size_t)n + i);
        const float4 v = *(const float4 *)(a.value + t * (size_t)n + i);
        squares += k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w;
        product += k.x * w.x * q.x + k.y * w.y * q.y + k.z * w.z * q.z + k.w * w.w * q.w;
        values += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    squares = block_sum<NORM_THREADS>(squares);
    __syncthreads(); /* the next sum overwrites this one's */
    product = block_sum<NORM_THREADS>(product);
    __syncthreads(); /* likewise */
    values = block_sum<NORM_THREADS>(values);
    if (threadIdx.x) return;
    product *= rsqrtf(squares / (float)n + a.eps) / sqrtf((float)n);
    const float root = sqrtf(fmaxf(fabsf(product), 1e-6f));
    const float gate = logistic(product > 0 ? root : product < 0 ? -root : 0.0f);
    float *to = a.gates + t * 2 * (size_t)a.n_hc + j;
    to[0] = gate;
    to[a.n_hc] = gate * rsqrtf(gate * gate * values / (float)n + a.eps);
}

/* Adds the values, and with CONV their convolution, to the streams; what is under the convolution and the ids go to the
 * ring. In prefill, where that overwrites rows that a convolution reads, in a launch of its own.
 * Grid: (ceil(n / 1024), n_hc, tokens from `first` on), block: 256, four columns a thread. Reads 4 n_conv bytes of values
 * and of taps per column, from L2: latency. */
template <bool CONV>
__global__ void __launch_bounds__(256) k_ngram_add(const __grid_constant__ struct ngram_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const struct ngram &g = a.table;
    const int i = 4 * (int)(blockIdx.x * 256 + threadIdx.x), j = (int)blockIdx.y, t = a.first + (int)blockIdx.z;
    const int n = a.n;
    if (i >= n || t >= a.batch.at->n_tok) return;
    const struct run &u = a.batch.run(t);
    const int pos = run_base(u) + t;
    const size_t column = (size_t)j * (size_t)n + (size_t)i;
    float4 *to = (float4 *)(a.streams + (size_t)t * (size_t)(a.n_hc * n) + column);
    float *kept = ngram_kept(a, u, pos);
    if (t >= a.keep && !i && !j) kept[a.n_kept] = (float)ngram_id(a, t);
    const float4 v = *(const float4 *)(a.value + (size_t)t * (size_t)n + i);
    const float gate = a.gates[(size_t)(2 * t) * (size_t)a.n_hc + j];
    if constexpr (!CONV) {
        const float4 x = *to;
        *to = make_float4(fmaf(gate, v.x, x.x), fmaf(gate, v.y, x.y), fmaf(gate, v.z, x.z), fmaf(gate, v.w, x.w));
    } else {
        const float4 w = *(const float4 *)(a.conv_norm + column);
        auto normed = [&](int row) { /* of the batch */
                                     return norm_value(*(const float4 *)(a.value + (size_t)row * (size_t)n + i),
                                                       a.gates[(size_t)(2 * row + 1) * (size_t)a.n_hc + j], w);
        };
        if (a.add) {
            float4 y = make_float4(0, 0, 0, 0);
            auto convolve = [&](const float *tap, const float4 &x) {
                y.x = fmaf(tap[0], x.x, y.x);
                y.y = fmaf(tap[g.n_conv], x.y, y.y);
                y.z = fmaf(tap[2 * g.n_conv], x.z, y.z);
                y.w = fmaf(tap[3 * g.n_conv], x.w, y.w);
            };
            UNROLL_BY(1) for (int c = 0; c < g.n_conv - 1; c++) {
                const int p = pos - (g.n_conv - 1 - c) * g.size;
                const float *tap = a.taps + column * (size_t)g.n_conv + c;
                if (p < 0) continue;
                convolve(tap, p < u.pos ? *(const float4 *)(ngram_kept(a, u, p) + column) : normed(t - (pos - p)));
            }
            convolve(a.taps + column * (size_t)g.n_conv + g.n_conv - 1, normed(t));
            const float4 x = *to;
            auto sum = [&](float was, float value, float c) { return fmaf(gate, value, was) + c * logistic(c); };
            *to = make_float4(sum(x.x, v.x, y.x), sum(x.y, v.y, y.y), sum(x.z, v.z, y.z), sum(x.w, v.w, y.w));
        }
        if (t >= a.keep) *(float4 *)(kept + column) = normed(t);
    }
}

/* Launches it for n_tok tokens, of which the last come into the ring. */
static void ngram_add(struct ngram_args *a, int n_tok, cudaStream_t s) {
    const int kept = max(0, n_tok - a->ring.n_row);
    const unsigned blocks = (unsigned)(a->n + 1023) / 1024, streams = (unsigned)a->n_hc;
    const bool conv = a->table.n_conv > 0, later = conv && n_tok > DECODE_MAX_TOKENS;
    a->add = true;
    a->first = 0;
    a->keep = later ? n_tok : kept; /* what few tokens read and keep fits into the ring together */
    if (conv) LAUNCH_PDL(k_ngram_add<true>, dim3(blocks, streams, (unsigned)n_tok), 256, 0, s, *a);
    else LAUNCH_PDL(k_ngram_add<false>, dim3(blocks, streams, (unsigned)n_tok), 256, 0, s, *a);
    if (!later) return;
    a->add = false;
    a->first = a->keep = kept;
    LAUNCH_PDL(k_ngram_add<true>, dim3(blocks, streams, (unsigned)(n_tok - kept)), 256, 0, s, *a);
}

/* ============================================================================================================
 * Blocks of layers, short convolutions
 *
 * Blocks of layers as the residual, see "CPU operations: blocks of layers" of moe.c. k_blocks takes the result of a half
 * of a layer into its block, after a short convolution, and reads the blocks; k_mix_message mixes a message into what
 * is read. k_gated_conv is a short convolution between two gates, see "Families: short convolutions".
 * ============================================================================================================ */

/* tanh, off by 1e-7, which counts only where it is small itself. */
DEVICE float tanh_of(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }

/* A short convolution of rows (n_tok, n), tokens `stride` apart; those before the batch are in a ring. */
struct short_conv {
    const float *x;
    size_t stride;
    struct cache_tensor ring; /* F32 */
    int n_conv;
};

/* Where the inputs at position p of a run are; pos: of row t. */
DEVICE const float *conv_row(const struct short_conv &c, const struct run &u, int t, int pos, int p) {
    if (p >= u.pos) return c.x + (size_t)(t - (pos - p)) * c.stride;
    return ring_at(u, c.ring, p);
}

/* The inputs of a batch's last tokens go to the ring, in prefill: a decode forward's own kernel does it, whose tokens
 * and those before them that it reads fit in the ring together.
 * Grid: (tokens, convolutions), block: 256. Some KB a token. */
struct keep_conv_args {
    struct short_conv conv[2];
    int n[2], first; /* values of a row; the first token that is kept */
    struct batch_ref batch;
};
__global__ void __launch_bounds__(256) k_keep_conv(const __grid_constant__ struct keep_conv_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int t = a.first + (int)blockIdx.x;
    const struct short_conv &c = a.conv[blockIdx.y];
    const struct run &u = a.batch.at->run[0];
    float *to = ring_at(u, c.ring, run_base(u) + t);
    for (int i = (int)threadIdx.x; i < a.n[blockIdx.y]; i += 256) to[i] = c.x[(size_t)t * c.stride + i];
}

struct gated_conv_args {
    struct batch_ref batch;
    struct short_conv conv;      /* what the first gate multiplies */
    const float *before, *after; /* gates of the input and of the result, tokens gate_stride apart */
    size_t before_stride, after_stride;
    const float *taps; /* of taps_upload: of the rank's first channel */
    uint16_t *out;     /* (n_tok, n), out_stride apart */
    size_t out_stride;
    int n;           /* channels */
    int first, keep; /* the first token; the first one whose input goes to the ring */
    bool convolves;  /* there is a result */
    struct l2_prefetch prefetch;
};

/* A gated convolution. In prefill the inputs go to the ring in a launch of its own, because that overwrites rows that
 * others read.
 * Grid: (ceil(n / 1024), tokens from `first` on), block: 256, four channels a thread. Reads 4 (2 n_conv + 5) bytes a
 * channel, most of them from L2: latency. */
__global__ void __launch_bounds__(256) k_gated_conv(const __grid_constant__ struct gated_conv_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    prefetch_request(a.prefetch);
    const int i = 4 * (int)(blockIdx.x * 256 + threadIdx.x), t = a.first + (int)blockIdx.y;
    if (i >= a.n || t >= a.batch.at->n_tok) return;
    const struct run &u = a.batch.run(t);
    const int pos = run_base(u) + t;
    auto gated = [&](int row) {
        const float4 v = *(const float4 *)(a.conv.x + (size_t)row * a.conv.stride + i);
        const float4 g = *(const float4 *)(a.before + (size_t)row * a.before_stride + i);
        return make_float4(g.x * v.x, g.y * v.y, g.z * v.z, g.w * v.w);
    };
    auto input = [&](int lag) {
        if (pos - lag >= u.pos) return gated(t - lag);
        return *(const float4 *)(ring_at(u, a.conv.ring, pos - lag) + i);
    };
    const float4 own = gated(t);
    if (a.convolves) {
        const float *taps = a.taps + (size_t)i * DELTA_TAPS + DELTA_TAPS - 1; /* a token's own */
        float4 y = make_float4(0, 0, 0, 0);
        UNROLL for (int j = 0; j < DELTA_TAPS; j++) {
            if (j >= a.conv.n_conv || j > pos) continue;
            const float4 v = j ? input(j) : own;
            y.x = fmaf(taps[-j], v.x, y.x);
            y.y = fmaf(taps[DELTA_TAPS - j], v.y, y.y);
            y.z = fmaf(taps[2 * DELTA_TAPS - j], v.z, y.z);
            y.w = fmaf(taps[3 * DELTA_TAPS - j], v.w, y.w);
        }
        const float4 g = *(const float4 *)(a.after + (size_t)t * a.after_stride + i);
        *(uint2 *)(a.out + (size_t)t * a.out_stride + i) =
            make_uint2(clamped_f16x2(g.x * y.x, g.y * y.y), clamped_f16x2(g.z * y.z, g.w * y.w));
    }
    if (t >= a.keep) *(float4 *)(ring_at(u, a.conv.ring, pos) + i) = own;
}

/* Launches it for n_tok tokens, of which the last come into the ring. */
static void gated_conv(struct gated_conv_args *a, int n_tok, cudaStream_t s) {
    const bool later = n_tok > DECODE_MAX_TOKENS;
    const int kept = max(0, n_tok - a->conv.ring.n_row);
    const unsigned blocks = (unsigned)(a->n + 1023) / 1024;
    a->convolves = true;
    a->first = 0;
    a->keep = later ? n_tok : 0; /* what few tokens read and keep fits into the ring together */
    LAUNCH_PDL(k_gated_conv, dim3(blocks, (unsigned)n_tok), 256, 0, s, *a);
    if (!later) return;
    a->convolves = false;
    a->first = a->keep = kept;
    LAUNCH_PDL(k_gated_conv, dim3(blocks, (unsigned)(n_tok - kept)), 256, 0, s, *a);
}

enum { BLOCKS_READ = READ_FFN /* readings of a step, and messages, at most */ };

struct block_args {
    struct batch_ref batch;
    float *rows; /* (n_tok, n_res, n) */
    int n_res, n, n_tok;
    /* what is added to row `to` before the reading, or is that row (begins) */
    struct short_conv conv; /* x NULL: nothing; n_conv 0: x is added as it is */
    const float *taps;      /* (n, n_conv), the last one a token's own */
    int to;
    bool begins;
    bool keep;                     /* the ring gets conv.x */
    int message, n_message, moved; /* rows of messages; moved > 0: they become rows moved.. */
    /* readings of rows 0 .. n_row - 1; n_read 0: of row 0 as it is */
    int n_row, n_read;
    const float *query; /* (n_read, n) */
    bool plain;         /* a reading weighs rows, not their norms */
    float row_eps;      /* of the norms of rows; */
    float score_by;     /* products of these with queries are divided by it */
    /* norms of the readings, with `messages` without weights and each before the norm of a message */
    int n_out;
    bool messages;
    const float *message_query;     /* (n_out, n) */
    const float *norm[BLOCKS_READ]; /* (n) weights; NULL in the first: a reading without a norm goes to x */
    uint16_t *out[BLOCKS_READ];     /* (n_tok, n), with messages (n_tok, 2 n) */
    float *h32;                     /* (n_tok, n) the first, or NULL */
    float *x;                       /* (n_tok, n) */
    float *factors;
    size_t mix_width; /* (n_tok, n_out, 2) of the norms with messages, tokens mix_width apart */
    float eps;
    struct l2_prefetch prefetch;
};

/* Grid: n_tok, block: NORM_THREADS. Reads the rows twice, the second time from L1 or L2: one token of 12 rows of 2048 some 5 us. */
template <int VECS>
__global__ void __launch_bounds__(NORM_THREADS, 1) k_blocks(const __grid_constant__ struct block_args a) {
    enum { WARPS = NORM_THREADS / WARP, SUMS = 1 + BLOCKS_READ };
    SHARED(float, sums, GPU_BLOCKS *WARPS *SUMS);
    SHARED(float, weight, 2 * BLOCKS_READ * GPU_BLOCKS);
    const int tid = (int)threadIdx.x, lane = tid & 31, warp = tid >> 5, t = (int)blockIdx.x, n = a.n;
    float *rows = a.rows + (size_t)t * (size_t)a.n_res * (size_t)n;
    auto row_at = [&](int j, int i) { return (float4 *)(rows + (size_t)j * (size_t)n + i); };
    grid_dependency_launch();
    grid_dependency_wait();
    prefetch_request(a.prefetch);
    if (t >= a.batch.at->n_tok) return;
    if (a.conv.x) {
        const struct run &u = a.batch.run(t);
        const int pos = run_base(u) + t, n_conv = a.conv.n_conv;
        const float f = 1.0f / sqrtf((float)(n_conv + 1));
        UNROLL_BY(1) for (int i = 4 * tid; i < n; i += 4 * NORM_THREADS) {
            float4 y = make_float4(0, 0, 0, 0);
            if (!n_conv) y = *(const float4 *)(conv_row(a.conv, u, t, pos, pos) + i);
            UNROLL_BY(1) for (int j = 0; j < n_conv && j <= pos; j++) {
                const float4 v = *(const float4 *)(conv_row(a.conv, u, t, pos, pos - j) + i);
                const float *tap = a.taps + (size_t)i * n_conv + (n_conv - 1 - j);
                const float own = j ? 0.0f : 1.0f;
                y.x = fmaf(own + tap[0], v.x, y.x);
                y.y = fmaf(own + tap[n_conv], v.y, y.y);
                y.z = fmaf(own + tap[2 * n_conv], v.z, y.z);
                y.w = fmaf(own + tap[3 * n_conv], v.w, y.w);
                if (!j && a.keep) *(float4 *)(ring_at(u, a.conv.ring, pos) + i) = v;
            }
            const float4 before = a.begins ? make_float4(0, 0, 0, 0) : *row_at(a.to, i);
            *row_at(a.to, i) = make_float4(fmaf(f, y.x, before.x), fmaf(f, y.y, before.y), fmaf(f, y.z, before.z),
                                           fmaf(f, y.w, before.w));
        }
    }
    /* a thread reads the columns that it has written: no barrier is needed */
    if (a.moved) UNROLL_BY(1) for (int i = 4 * tid; i < n; i += 4 * NORM_THREADS) {
            UNROLL_BY(1) for (int j = 0; j < a.n_message; j++) * row_at(a.message + j, i) = *row_at(a.moved + j, i);
        }
    if (!a.n_out) return;
    const int n_all = !a.n_read ? 0 : a.n_row + (a.messages ? a.n_message : 0);
    UNROLL_BY(1) for (int j = 0; j < n_all; j++) {
        const bool message = j >= a.n_row;
        const float *query = message ? a.message_query : a.query;
        const int n_query = message ? a.n_out : a.n_read, row = message ? a.message + j - a.n_row : j;
        float v[SUMS] = {};
        UNROLL for (int k = 0; k < VECS; k++) {
            const int i = 4 * (tid + NORM_THREADS * k);
            if (i >= n) continue;
            const float4 x = *row_at(row, i);
            v[0] += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
            UNROLL for (int q = 0; q < BLOCKS_READ; q++) {
                if (q >= n_query) continue;
                const float4 w = *(const float4 *)(query + (size_t)q * (size_t)n + i);
                v[1 + q] += x.x * w.x + x.y * w.y + x.z * w.z + x.w * w.w;
            }
        }
        UNROLL for (int q = 0; q < SUMS; q++) {
            const float sum = warp_sum(v[q]);
            if (!lane) sums[(j * WARPS + warp) * SUMS + q] = sum;
        }
    }
    __syncthreads(); /* the sums of all warps are written */
    const int n_reading = a.n_read + (a.messages ? a.n_out : 0);
    if (warp < n_reading) {
        const bool message = warp >= a.n_read;
        const int first = message ? a.n_row : 0, some = message ? a.n_message : a.n_row;
        const int q = message ? warp - a.n_read : warp;
        float score[GPU_BLOCKS / WARP], norm[GPU_BLOCKS / WARP], top = -INFINITY, den = 0;
        UNROLL for (int k = 0; k < GPU_BLOCKS / WARP; k++) {
            const int j = lane + WARP * k;
            float square = 0, dot = 0;
            score[k] = -INFINITY;
            if (j >= some) continue;
            UNROLL_BY(1) for (int w = 0; w < WARPS; w++) {
                const float *sum = sums + ((first + j) * WARPS + w) * SUMS;
                square += sum[0];
                dot += sum[1 + q];
            }
            norm[k] = 1.0f / sqrtf(square / (float)n + a.row_eps);
            score[k] = dot * norm[k] / a.score_by;
            top = fmaxf(top, score[k]);
        }
        top = warp_max(top);
        UNROLL for (int k = 0; k < GPU_BLOCKS / WARP; k++) den += score[k] = expf(score[k] - top);
        den = warp_sum(den);
        UNROLL for (int k = 0; k < GPU_BLOCKS / WARP; k++) if (lane + WARP * k < some)
            weight[warp * GPU_BLOCKS + lane + WARP * k] = score[k] / den * (a.plain ? 1.0f : norm[k]);
    }
    __syncthreads(); /* the weights of all readings are written */
    float4 v[VECS];
    /* v = reading q of rows first..first+some-1; without weights row 0 */
    auto read = [&](int q, int first, int some) {
        UNROLL for (int k = 0; k < VECS; k++) v[k] = make_float4(0, 0, 0, 0);
        UNROLL_BY(1) for (int j = 0; j < some; j++) {
            const float f = a.n_read ? weight[q * GPU_BLOCKS + j] : 1.0f;
            UNROLL for (int k = 0; k < VECS; k++) {
                const int i = 4 * (tid + NORM_THREADS * k);
                if (i >= n) continue;
                const float4 x = *row_at(first + j, i);
                v[k] =
                    make_float4(fmaf(f, x.x, v[k].x), fmaf(f, x.y, v[k].y), fmaf(f, x.z, v[k].z), fmaf(f, x.w, v[k].w));
            }
        }
    };
    const size_t width = a.messages ? 2 * (size_t)n : (size_t)n;
    /* out = the norm of v, with weights w or without, from column `at` on; returns the factor */
    auto store = [&](int o, const float *w, int at, float *h32) {
        const float f = norm_factor(v, n, a.eps);
        UNROLL for (int k = 0; k < VECS; k++) {
            const int i = 4 * (tid + NORM_THREADS * k);
            if (i >= n) continue;
            const float4 y = norm_value(v[k], f, w ? *(const float4 *)(w + i) : make_float4(1, 1, 1, 1));
            *(uint2 *)(a.out[o] + (size_t)t * width + (size_t)(at + i)) =
                make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
            if (h32) *(float4 *)(h32 + (size_t)t * (size_t)n + i) = y;
        }
        __syncthreads(); /* the next block_sum overwrites this one's */
        return f;
    };
    UNROLL_BY(1) for (int o = 0; o < a.n_out; o++) {
        read(min(o, max(a.n_read - 1, 0)), 0, a.n_read ? a.n_row : 1);
        if (a.messages) {
            float *factor = a.factors + (size_t)t * a.mix_width + 2 * (size_t)o;
            const float own = store(o, NULL, 0, NULL);
            read(a.n_read + o, a.message, a.n_message);
            const float other = store(o, NULL, n, NULL);
            if (!tid) factor[0] = own, factor[1] = other;
        } else if (a.norm[o]) {
            store(o, a.norm[o], 0, o ? NULL : a.h32);
        } else {
            UNROLL for (int k = 0; k < VECS; k++) {
                const int i = 4 * (tid + NORM_THREADS * k);
                if (i < n) *(float4 *)(a.x + (size_t)t * (size_t)n + i) = v[k];
            }
        }
    }
}

/* What is read, with a message: out = norm((1 - tanh(forget)) * own + tanh(gain) * message). */
struct message_args {
    const uint16_t *pair; /* (n_tok, 2 n) own, message, each normed */
    const float *factors; /* of the norms of both, tokens mix_width apart */
    size_t mix_width;
    const float *forget, *gain; /* (n_tok, n) */
    const float *norm;          /* (n) weights */
    uint16_t *out;              /* (n_tok, n) */
    float *h32;                 /* in F32, too, or NULL */
    int n;
    float eps;
};

/* Grid: n_tok, block: NORM_THREADS. Reads 12 bytes a value: latency. */
template <int VECS>
__global__ void __launch_bounds__(NORM_THREADS, 1) k_mix_message(const __grid_constant__ struct message_args a) {
    const int tid = (int)threadIdx.x, t = (int)blockIdx.x, n = a.n;
    grid_dependency_launch();
    grid_dependency_wait();
    const float own = 1.0f / a.factors[(size_t)t * a.mix_width], other = 1.0f / a.factors[(size_t)t * a.mix_width + 1];
    const uint16_t *pair = a.pair + (size_t)t * 2 * (size_t)n;
    const size_t row = (size_t)t * (size_t)n;
    float4 v[VECS];
    UNROLL for (int k = 0; k < VECS; k++) {
        const int i = 4 * (tid + NORM_THREADS * k);
        v[k] = make_float4(0, 0, 0, 0);
        if (i >= n) continue;
        const float4 forget = *(const float4 *)(a.forget + row + i), gain = *(const float4 *)(a.gain + row + i);
        const uint2 x = *(const uint2 *)(pair + i), m = *(const uint2 *)(pair + n + i);
        auto mixed = [&](uint32_t x, uint32_t m, float forget, float gain) {
            return (1.0f - tanh_of(forget)) * (own * half_to_f32((uint16_t)x)) +
                   tanh_of(gain) * (other * half_to_f32((uint16_t)m));
        };
        v[k] = make_float4(mixed(x.x, m.x, forget.x, gain.x), mixed(x.x >> 16, m.x >> 16, forget.y, gain.y),
                           mixed(x.y, m.y, forget.z, gain.z), mixed(x.y >> 16, m.y >> 16, forget.w, gain.w));
    }
    const float f = norm_factor(v, n, a.eps);
    UNROLL for (int k = 0; k < VECS; k++) {
        const int i = 4 * (tid + NORM_THREADS * k);
        if (i >= n) continue;
        const float4 y = norm_value(v[k], f, *(const float4 *)(a.norm + i));
        *(uint2 *)(a.out + row + i) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
        if (a.h32) *(float4 *)(a.h32 + row + i) = y;
    }
}

/* x (n_row, n), rows `stride` apart, becomes cap * tanh(x / cap). Grid: (ceil(n / 256), n_row), block: 256. */
__global__ void __launch_bounds__(256) k_soft_cap(float *x, size_t stride, int n, float cap) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = (int)(blockIdx.x * 256 + threadIdx.x);
    if (i < n) x[blockIdx.y * stride + i] = cap * tanh_of(x[blockIdx.y * stride + i] / cap);
}

/* ============================================================================================================
 * Decode: skinny GEMM (1 to 16 tokens)
 *
 * Y^T = W X^T: the weights are the 16 rows of the MMA, the tokens its 8 columns. 1 to 8 tokens cost one n-tile, 9 to 16
 * two (NT); the weights are read once in either case, and that is what takes the time. A block owns 16 rows of the
 * result. Its warps share the tiles along k and add their sums through shared memory in a fixed order.
 * A token's results do not depend on the other tokens of the forward: a warp's share of a row of tiles depends on the
 * width of the matrix alone, and every token adds its experts in the order of their numbers.
 * ============================================================================================================ */

enum { GEMV_WARPS = 8, GEMV_THREADS = GEMV_WARPS * WARP };

/* A lane's part of a tile, in registers. */
template <int FMT>
struct gemv_tile {
    enum { VEC = TILE_BYTES(FMT) / 512 };
    uint4 c[VEC]; /* codes */
    uint2 s;      /* scales of rows g and g + 8 */
    DEVICE_MEMBER void load(const uint8_t *codes, const uint8_t *scales) {
        UNROLL for (int v = 0; v < VEC; v++) c[v] = ldg_stream(codes + v * 512);
        s = FMT == FMT_F16 ? make_uint2(0, 0) : *(const uint2 *)scales;
    }
};

/* acc (16, 8 NT) += a tile times 64 columns of x. b[k][h]: columns 32h + 8t .. 32h + 8t + 7 of token g + 8k. */
template <int FMT, int NT>
DEVICE void gemv_multiply(const struct gemv_tile<FMT> &w, const uint4 (&b)[NT][2], int t, float (&acc)[NT][4]) {
    UNROLL for (int h = 0; h < 2; h++) {
        float block_acc[NT][4] = {};
        float(*sum)[4] = FMT == FMT_Q8 ? block_acc : acc;
        UNROLL for (int q = 0; q < 2; q++) {
            uint32_t a[4];
            fragment_dequantize<FMT>(w.c, w.s, t, 2 * h + q, a);
            UNROLL for (int k = 0; k < NT; k++) {
                uint32_t bb[2] = {b[k][h].x, b[k][h].y};
                if (q) {
                    bb[0] = b[k][h].z;
                    bb[1] = b[k][h].w;
                }
                mma_f16(sum[k], a, bb);
            }
        }
        if (FMT != FMT_Q8) continue;
        /* the scales of this block of 32 columns, of rows g and g + 8 */
        const float d0 = half_to_f32((uint16_t)(w.s.x >> 16 * h)), d1 = half_to_f32((uint16_t)(w.s.y >> 16 * h));
        UNROLL for (int i = 0; i < 4 * NT; i++) acc[i >> 2][i & 3] =
            fmaf(i & 2 ? d1 : d0, block_acc[i >> 2][i & 3], acc[i >> 2][i & 3]);
    }
}

/* acc (16, 8 NT) += tiles k0..k1-1 of a row of tiles times x, added up over a list of jobs, without
 * device_matrix_scale. One warp takes them as one list of tiles, of which DEPTH are in flight. Columns beyond n_in have
 * weights of 0; x may hold any finite number there.
 *   jobs.n            jobs
 *   jobs.tile(j)      the first tile of the row of tiles that job j multiplies, see tile_index
 *   jobs.x(j, t)      the row of x for token t; of a token that does not count any row, or, where the job is MASKED,
 *                     NULL, which stands for zeros
 *   JOBS::SINGLE      there is one tile at most
 * ready() is called once, after the first weights have been requested: jobs.x is called after it. */
template <int FMT, int NT, class JOBS, class READY>
DEVICE void gemv_stream(const struct device_matrix &w, int k0, int k1, const JOBS &jobs, READY ready,
                        float (&acc)[NT][4]) {
    constexpr int DEPTH = FMT == FMT_FP4 ? 4 : 2; /* 2 to 4 KB a warp */
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, n = k1 - k0;
    struct gemv_tile<FMT> ring[DEPTH];
    const uint8_t *codes = NULL, *scales = NULL; /* of the tile that is requested next */
    int to_request = n * jobs.n, next_job = 0, job_end = to_request - n;
    auto seek = [&](int job) {
        const size_t tile = jobs.tile(job) + (size_t)k0;
        codes = w.codes + tile * (size_t)TILE_BYTES(FMT) + (size_t)lane * 16;
        scales = w.scales + tile * TILE_SCALES + (size_t)g * 8;
    };
    auto request = [&](struct gemv_tile<FMT> &to) {
        if (to_request <= 0) return;
        to.load(codes, scales);
        codes += TILE_BYTES(FMT);
        scales += TILE_SCALES;
        if (--to_request != job_end || !JOBS::LIST || !to_request) return;
        job_end -= n;
        seek(++next_job);
    };
    if (to_request > 0) seek(0);
    UNROLL for (int u = 0; u < DEPTH; u++) request(ring[u]);
    ready();
    int left = n * jobs.n, x_job = 0, x_end = left - n;
    if (left <= 0) return;
    uint4 b[2][NT][2]; /* x of this tile and of the next */
    const uint16_t *row[NT];
    auto x_seek = [&](int job) {
        UNROLL for (int k = 0; k < NT; k++) {
            row[k] = jobs.x(job, g + 8 * k);
            if (!JOBS::MASKED || row[k]) row[k] += k0 * TILE_COLS + 8 * t;
        }
    };
    auto x_load = [&](uint4(&to)[NT][2]) {
        UNROLL for (int k = 0; k < NT; k++) {
            UNROLL for (int h = 0; h < 2; h++) {
                to[k][h] = make_uint4(0, 0, 0, 0);
                if (!JOBS::MASKED || row[k]) to[k][h] = *(const uint4 *)(row[k] + 32 * h);
            }
            if (!JOBS::MASKED || row[k]) row[k] += TILE_COLS;
        }
    };
    x_seek(0);
    x_load(b[0]);
    for (;;) {
        UNROLL for (int u = 0; u < DEPTH; u++) {
            if (left > 1) {
                if (JOBS::LIST && left - 1 == x_end) {
                    x_end -= n;
                    x_seek(++x_job);
                }
                x_load(b[(u + 1) & 1]);
            }
            gemv_multiply<FMT, NT>(ring[u], b[u & 1], t, acc);
            request(ring[u]);
            if (JOBS::SINGLE || --left == 0) return;
        }
    }
}

/* Calls f with the format of a matrix as a compile-time constant. */
template <class F>
DEVICE void with_format(enum weight_format fmt, F f) {
    static_assert(FMT_COUNT == 4, "with_format calls f with every format");
    if (fmt == FMT_FP4) f(std::integral_constant<int, FMT_FP4>());
    else if (fmt == FMT_Q8) f(std::integral_constant<int, FMT_Q8>());
    else if (fmt == FMT_F8) f(std::integral_constant<int, FMT_F8>());
    else f(std::integral_constant<int, FMT_F16>());
}

/* The warps' sums in shared memory: (warps, 8 NT tokens, SUM_PITCH), 16 rows of each token. The pitch keeps the lanes
 * of an MMA's result in different banks. */
enum { SUM_PITCH = TILE_ROWS + 4 };
template <int NT>
DEVICE float *gemv_warp_sums(float *red) {
    return red + (threadIdx.x >> 5) * (8 * NT * SUM_PITCH);
}
/* Adds the sums of element i (token i / 16, row i % 16) of n warps, in their order. */
template <int NT>
DEVICE float gemv_sum(const float *red, int i, int first, int n) {
    float s = 0;
    for (int w = first; w < first + n; w++) s += red[(w * 8 * NT + i / TILE_ROWS) * SUM_PITCH + i % TILE_ROWS];
    return s;
}

/* sums (of gemv_warp_sums) = f * acc, or with `add` += f * acc. */
template <int NT>
DEVICE void gemv_store(float *sums, const float (&acc)[NT][4], float f, bool add) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    UNROLL for (int i = 0; i < 4 * NT; i++) {
        float *to = sums + (8 * (i >> 2) + 2 * t + (i & 1)) * SUM_PITCH + g + 8 * (i >> 1 & 1);
        *to = add ? fmaf(f, acc[i >> 2][i & 3], *to) : f * acc[i >> 2][i & 3];
    }
}

/* All tokens of a forward times one matrix. */
struct gemv_one {
    static constexpr bool LIST = false, MASKED = false, SINGLE = false;
    static constexpr int n = 1;
    size_t first;         /* tile */
    const uint16_t *rows; /* (n_tok, stride) */
    size_t stride;
    int n_tok;
    DEVICE_MEMBER size_t tile(int) const { return first; }
    DEVICE_MEMBER const uint16_t *x(int, int t) const { return rows + (size_t)min(t, n_tok - 1) * stride; }
};

/* The same where that is a tile. */
struct gemv_single : gemv_one {
    static constexpr bool SINGLE = true;
};

struct linear_args {
    struct device_matrix w[LINEAR_MAX]; /* of one n_in */
    float *y[LINEAR_MAX];               /* (n_tok, n_out), rows y_stride apart; halves where y_half has the bit */
    size_t y_stride[LINEAR_MAX];
    uint32_t y_half;
    int n_matrix, n_tok;
    const uint16_t *x; /* (n_tok, n_in) halves, rows x_stride apart; not used with NORM */
    size_t x_stride;
    struct norm_input norm;      /* with NORM: what x is */
    struct l2_prefetch prefetch; /* without NORM */
    /* with GROUPS there is one matrix for each group of x; the results, y16 (n_tok, n_out_group * n_out), have the stride
     * y_stride[0] */
    uint16_t *y16;
};

/* Halves from row to row of the norm in shared memory: whole tiles, and neighboring rows half a set of banks apart. */
__host__ __device__ inline int linear_stride(const struct linear_args &p) { return p.w[0].n_kt * TILE_COLS + 32; }

/* What k_gemv_linear writes: floats; y16; floats, or halves where y_half has the matrix. */
enum linear_out { LINEAR_FLOATS, LINEAR_GROUPS, LINEAR_MIXED };

/* y[i] = w[i] x + bias for each of up to LINEAR_MAX matrices. NORM: x is first normed, for up to 8 tokens. OUT: of enum
 * linear_out; LINEAR_GROUPS: y16 = the products of the groups of x, n_in values each, with the w[0] of each group.
 * Grid: (rows of tiles of all matrices, groups), block: 256. Reads every tile once, and per block n_tok rows of x
 * from L2. Memory-bound: a block has 18 KB of weights in flight, 2 blocks per SM. Aim: 80 % of copy bandwidth for
 * matrices of 8 MB and more; on H200 the instruction rate allows 3 of 4.8 TB/s for FP4. A warp requests its first
 * tiles before the kernel in front has ended. */
template <int NT, bool NORM, int OUT>
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_gemv_linear(const __grid_constant__ struct linear_args p) {
    SHARED(float, red, GEMV_WARPS * 8 * NT * SUM_PITCH);
    DYN_SMEM(uint16_t, normed); /* NORM: (n_tok, linear_stride) */
    constexpr bool GROUPS = OUT == LINEAR_GROUPS;
    grid_dependency_launch();
    const int warp = threadIdx.x >> 5, o_group = GROUPS ? (int)blockIdx.y : 0;
    int rt = blockIdx.x, m = 0;
    while (!GROUPS && rt >= p.w[m].n_rt) rt -= p.w[m++].n_rt;
    const struct device_matrix &w = p.w[m];
    const int k0 = w.n_kt * warp / GEMV_WARPS, k1 = w.n_kt * (warp + 1) / GEMV_WARPS;
    const int stride = linear_stride(p);
    const uint16_t *x = NORM ? normed : GROUPS ? p.x + (size_t)o_group * (size_t)w.n_in : p.x;
    const struct gemv_one one = {tile_index(w, o_group, rt), x, NORM ? (size_t)stride : p.x_stride, p.n_tok};
    float acc[NT][4] = {};
    with_format(w.fmt, [&](auto fmt) {
        gemv_stream<fmt.value, NT>(
            w, k0, k1, one,
            [&] {
                if (!NORM) {
                    prefetch_request(p.prefetch); /* the norm in front reads little, and may wait for other ranks */
                    grid_dependency_wait();
                    return;
                }
                float4 weight[FUSED_NORM_VECS];
                norm_load(weight, p.norm.weight, p.norm.n);
                static_assert(FUSED_NORM_TOKENS * 16 <= GEMV_THREADS, "a thread has four columns");
                const int beyond = w.n_kt * TILE_COLS - 4 * ((int)threadIdx.x % 16 + 1), row = (int)threadIdx.x / 16;
                if (row < p.n_tok && beyond >= p.norm.n) *(uint2 *)(normed + row * stride + beyond) = make_uint2(0, 0);
                grid_dependency_wait();
                norm_rows(p.norm, p.n_tok, weight, [&](int t, int c, float4 y) {
                    *(uint2 *)(normed + t * stride + c) = make_uint2(clamped_f16x2(y.x, y.y), clamped_f16x2(y.z, y.w));
                });
            },
            acc);
    });
    gemv_store<NT>(gemv_warp_sums<NT>(red), acc, 1, false);
    __syncthreads(); /* the sums of all warps are written */
    const int tok = threadIdx.x / TILE_ROWS, row = rt * TILE_ROWS + (int)threadIdx.x % TILE_ROWS;
    if (tok >= p.n_tok || row >= w.n_out) return;
    const float sum = gemv_sum<NT>(red, threadIdx.x, 0, GEMV_WARPS);
    if (GROUPS) {
        p.y16[(size_t)tok * p.y_stride[0] + (size_t)(o_group * w.n_out + row)] =
            clamped_f16(sum * device_matrix_scale(w, o_group));
        return;
    }
    const float y = fmaf(sum, device_matrix_scale(w, 0), w.bias ? w.bias[row] : 0.0f);
    const size_t at = (size_t)tok * p.y_stride[m] + (size_t)row;
    if (OUT == LINEAR_MIXED && p.y_half >> m & 1) ((uint16_t *)p.y[m])[at] = clamped_f16(y);
    else p.y[m][at] = y;
}

/* Launches k_gemv_linear with one n-tile for up to 8 tokens, with two for up to 16. */
static void gemv_linear(const struct linear_args *p, cudaStream_t s) {
    int n_rt = 0;
    for (int i = 0; i < p->n_matrix; i++) n_rt += p->w[i].n_rt;
    const size_t smem = (size_t)(p->n_tok * linear_stride(*p)) * sizeof(uint16_t);
    auto launch = [&](auto out) {
        constexpr int OUT = out.value;
        if (p->norm.x) LAUNCH_PDL((k_gemv_linear<1, true, OUT>), (unsigned)n_rt, GEMV_THREADS, smem, s, *p);
        else if (p->n_tok <= 8) LAUNCH_PDL((k_gemv_linear<1, false, OUT>), (unsigned)n_rt, GEMV_THREADS, 0, s, *p);
        else LAUNCH_PDL((k_gemv_linear<2, false, OUT>), (unsigned)n_rt, GEMV_THREADS, 0, s, *p);
    };
    if (p->y_half) launch(std::integral_constant<int, LINEAR_MIXED>());
    else launch(std::integral_constant<int, LINEAR_FLOATS>());
}

/* Launches it for groups, of which w[0] has one expert each. */
static void gemv_groups(const struct linear_args *p, cudaStream_t s) {
    const dim3 grid((unsigned)p->w[0].n_rt, (unsigned)p->w[0].n_expert);
    if (p->n_tok <= 8) LAUNCH_PDL((k_gemv_linear<1, false, LINEAR_GROUPS>), grid, GEMV_THREADS, 0, s, *p);
    else LAUNCH_PDL((k_gemv_linear<2, false, LINEAR_GROUPS>), grid, GEMV_THREADS, 0, s, *p);
}

/* SwiGLU results are stored divided by this: their outliers are the largest numbers of a forward pass. A power of two:
 * exact. */
#define HIDDEN_SCALE 16.0f

/* ============================================================================================================
 * Decode: feed-forwards
 *
 * Gate and up joined, and down with the weighted sum of experts, for 1 to 16 tokens.
 * ============================================================================================================ */

/* SwiGLU: silu(g) * u. */
DEVICE float silu_mul(float g, float u) { return __fdividef(g, 1.0f + __expf(-g)) * u; }

/* GELU of g, by the approximation of struct glu, times u: x (1 + tanh(z)) / 2 = x sigmoid(2 z). */
DEVICE float gelu_mul(float g, float u) {
    const float z = 1.5957691f * g * fmaf(0.044715f * g, g, 1.0f);
    return __fdividef(g, 1.0f + __expf(-z)) * u;
}

/* max(0, x)^2 */
DEVICE float relu_square(float x) {
    x = fmaxf(x, 0);
    return x * x;
}

/* Makes g of gate and u of up, see struct glu. NaN becomes the limit, as on a CPU. */
DEVICE void glu_clamp(const struct glu &l, float &g, float &u) {
    g = l.alpha * fminf(g, l.gate_max);
    u = fmaf(fmaxf(-l.up_max, fminf(u, l.up_max)), l.factor, l.offset);
}

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

/* Joins g of gate and u of up where both are capped, see struct glu. */
DEVICE float glu_capped(const struct glu &l, float g, float u) {
    return sigmoid(g) * (l.gate_cap * tanh_of(g / l.gate_cap)) * (l.up_cap * tanh_of(u / l.up_cap));
}

/* The routed experts of a decode forward. */
struct job_list {
    const struct expert_job *job; /* (*n) in the order of the experts; NULL: there is no router */
    const float *weight;          /* (*n, DECODE_MAX_TOKENS) router weights of the job's tokens */
    const int32_t *n;
    int max; /* *n is at most that */
};

DEVICE struct expert_job job_load(const struct expert_job *job) {
    static_assert(sizeof *job == sizeof(uint4), "one load brings it");
    const uint4 v = load_l2((const uint4 *)job);
    return {(int32_t)v.x, v.y, (int32_t)v.z, 0};
}

/* A matrix times the tokens of one job. */
struct glu_job : gemv_one {
    uint32_t tokens;
    DEVICE_MEMBER const uint16_t *x(int, int t) const {
        return rows + (size_t)(tokens >> t & 1 ? t : __ffs((int)tokens) - 1) * stride;
    }
};

/* The first half of a feed-forward: y = silu(gate x) * (up x) / HIDDEN_SCALE, in halves, or what struct glu says in
 * place of SiLU; of gate x and up x with their biases and within their limits. Without a gate (no codes) y = max(0,
 * up x)^2 / HIDDEN_SCALE. Entry 0: routed experts, times the router's weight and the expert's scale of the down
 * matrix, y (job, DECODE_MAX_TOKENS, n_ff); without jobs a dense layer, y (n_tok, n_ff). Entry 1: the shared expert,
 * times its weight, y (n_tok, n_ff). weighs_input: the router's weight is a factor of x, not of y. */
struct glu_args {
    struct device_matrix gate[2], up[2];
    struct glu glu[2];
    uint16_t *y[2];
    struct job_list jobs; /* of entry 0 */
    const float *down_scale;
    float down_scale_max;       /* down_scale (n_expert) is divided by it; NULL: 1 */
    const float *shared_weight; /* (DECODE_MAX_TOKENS) of entry 1; NULL: 1 */
    int n_entry, n_tok;
    bool weighs_input;
    const uint16_t *x[2]; /* (n_tok, n_in) halves of an entry, rows x_stride apart */
    size_t x_stride[2];
};

/* Grid: (rows of tiles, jobs.max or 1, and 1 for entry 1), block: 256: four warps for gate, four for up, or all. Bytes
 * and aim as for k_gemv_linear. The next kernel, k_gemv_down, reads the router's jobs and weights before its own wait.
 * So it may start only when the router's writes are visible: the launch stands after the wait, and the order of these
 * two calls is a contract. */
template <int NT>
__global__ void __launch_bounds__(GEMV_THREADS, NT == 1 ? 3 : 2) k_gemv_glu(const __grid_constant__ struct glu_args p) {
    SHARED(float, red, GEMV_WARPS * 8 * NT * SUM_PITCH);
    SHARED(float, bias, 2 * TILE_ROWS); /* of gate, of up */
    static_assert(DECODE_MAX_TOKENS * TILE_ROWS <= GEMV_THREADS, "a thread has one result");
    const int entry = (int)blockIdx.y >= (p.jobs.job ? p.jobs.max : 1), job = entry ? 0 : (int)blockIdx.y;
    const int rt = blockIdx.x, warp = threadIdx.x >> 5, tok = threadIdx.x / TILE_ROWS;
    const bool routed = !entry && p.jobs.job, gated = p.gate[entry].codes != NULL;
    const struct device_matrix &gate = p.gate[entry], &up = p.up[entry],
                               &w = gated && warp < GEMV_WARPS / 2 ? gate : up;
    const int shares = gated ? GEMV_WARPS / 2 : GEMV_WARPS; /* of a matrix's width: one a warp */
    float factor = 1.0f / HIDDEN_SCALE;                     /* of this thread's result */
    auto wait = [&] {
        grid_dependency_wait();
        grid_dependency_launch();
        if (entry && p.shared_weight) factor *= p.shared_weight[tok];
    };
    if (routed || rt >= up.n_rt) wait();
    if (rt >= up.n_rt) return;
    struct glu_job one = {{0, p.x[entry], p.x_stride[entry], p.n_tok}, (1u << p.n_tok) - 1};
    int e = 0, place = 0;
    if (routed) {
        const struct expert_job chose = job_load(p.jobs.job + job);
        if (!p.weighs_input) factor *= p.jobs.weight[job * DECODE_MAX_TOKENS + tok];
        if (job >= load_l2(p.jobs.n)) return;
        e = chose.expert;
        place = chose.place;
        one.tokens = chose.tokens;
        if (p.down_scale) factor *= p.down_scale[e] / p.down_scale_max;
    }
    one.first = tile_index(w, place, rt);
    if (threadIdx.x < TILE_ROWS / 2) {
        const float *from = threadIdx.x < TILE_ROWS / 4 ? gate.bias : up.bias;
        if (from) from += bias_index(up, e, rt) + 4 * (threadIdx.x % 4);
        cp_async16(bias + 4 * threadIdx.x, from, from != NULL);
    }
    cp_async_commit();
    const int share = warp & (shares - 1), k0 = w.n_kt * share / shares, k1 = w.n_kt * (share + 1) / shares;
    const float gate_scale = device_matrix_scale(gate, e), up_scale = device_matrix_scale(up, e);
    float acc[NT][4] = {};
    with_format(w.fmt, [&](auto fmt) {
        auto ready = [&] {
            if (!routed) wait();
        };
        gemv_stream<fmt.value, NT>(w, k0, k1, one, ready, acc);
    });
    gemv_store<NT>(gemv_warp_sums<NT>(red), acc, 1, false);
    cp_async_wait<0>(); /* this thread's copy of the biases */
    __syncthreads();    /* the sums of all warps are written, and the biases */
    const int r = (int)threadIdx.x % TILE_ROWS, row = rt * TILE_ROWS + r;
    if (!(one.tokens >> tok & 1) || row >= up.n_out) return;
    float y;
    if (gated) {
        float g = fmaf(gemv_sum<NT>(red, threadIdx.x, 0, GEMV_WARPS / 2), gate_scale, bias[r]);
        float u = fmaf(gemv_sum<NT>(red, threadIdx.x, GEMV_WARPS / 2, GEMV_WARPS / 2), up_scale, bias[TILE_ROWS + r]);
        if (routed && p.weighs_input) {
            const float input = p.jobs.weight[job * DECODE_MAX_TOKENS + tok];
            g *= input;
            u *= input;
        }
        if (p.glu[entry].up_max > 0) glu_clamp(p.glu[entry], g, u);
        y = p.glu[entry].gate_cap > 0 ? glu_capped(p.glu[entry], g, u)
            : p.glu[entry].gelu       ? gelu_mul(g, u)
            : p.glu[entry].relu       ? fmaxf(g, 0) * u
                                      : silu_mul(g, u);
    } else {
        y = relu_square(fmaf(gemv_sum<NT>(red, threadIdx.x, 0, GEMV_WARPS), up_scale, bias[TILE_ROWS + r]));
    }
    p.y[entry][((size_t)job * DECODE_MAX_TOKENS + (size_t)tok) * (size_t)up.n_out + (size_t)row] =
        clamped_f16(y * factor);
}

/* Launches k_gemv_glu. The grid covers the larger of both entries; surplus blocks return at once. */
static void gemv_glu(const struct glu_args *p, cudaStream_t s) {
    int n_rt = p->up[0].n_rt;
    if (p->n_entry > 1 && p->up[1].n_rt > n_rt) n_rt = p->up[1].n_rt;
    const dim3 grid((unsigned)n_rt, (unsigned)((p->jobs.job ? p->jobs.max : 1) + p->n_entry - 1));
    if (p->n_tok <= 8) LAUNCH_PDL(k_gemv_glu<1>, grid, GEMV_THREADS, 0, s, *p);
    else LAUNCH_PDL(k_gemv_glu<2>, grid, GEMV_THREADS, 0, s, *p);
}

/* The second half of a feed-forward with routed experts: y = sum of W hidden over the jobs and the shared expert, and
 * of the router's weight times the bias over the jobs. */
struct down_args {
    struct device_matrix w, shared; /* shared.n_expert 0: there is no shared expert */
    const uint16_t *hidden; /* (job, DECODE_MAX_TOKENS, w.n_in), rows hidden_stride apart, see struct glu_args */
    size_t hidden_stride;
    const uint16_t *hidden_shared; /* (n_tok, shared.n_in) */
    struct job_list jobs;
    int n_tok;
    float *y;      /* (n_tok, n_out), rows y_stride apart; NULL: */
    uint16_t *y16; /* they are halves */
    size_t y_stride;
};

/* A job of k_gemv_down: its first tile, and its tokens as bits. */
struct down_job {
    alignas(16) size_t tile;
    uint32_t tokens;
};

/* What the biases of a job add: those of a row of tiles, and the weights of the tokens. */
struct down_bias {
    float bias[TILE_ROWS], weight[DECODE_MAX_TOKENS];
};

/* The routed experts, each for its tokens. */
struct down_jobs {
    static constexpr bool LIST = true, MASKED = true, SINGLE = false;
    int n;
    const struct down_job *job; /* (n) in shared memory */
    const uint16_t *hidden;
    size_t stride; /* from a row to the next */
    DEVICE_MEMBER size_t tile(int j) const { return job[j].tile; }
    DEVICE_MEMBER const uint16_t *x(int j, int t) const {
        return job[j].tokens >> t & 1 ? hidden + (size_t)(j * DECODE_MAX_TOKENS + t) * stride : NULL;
    }
};

/* Grid: rows of tiles, block: 256. A warp has the same share of the width of every job, and reads its shares of all
 * jobs as one list. Tokens that did not choose a job's expert have zeros there. The jobs and the first weights are
 * requested before the kernel in front has ended: see k_gemv_glu. Bytes and aim as for k_gemv_linear. */
template <int NT>
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_gemv_down(const __grid_constant__ struct down_args p) {
    SHARED(float, red, GEMV_WARPS * 8 * NT * SUM_PITCH);
    DYN_SMEM(struct down_job, jobs); /* (jobs.max), and where there are biases struct down_bias (jobs.max) */
    grid_dependency_launch();
    const int tid = threadIdx.x, warp = tid >> 5, rt = blockIdx.x;
    const struct down_jobs list = {load_l2(p.jobs.n), jobs, p.hidden, p.hidden_stride};
    struct down_bias *biases = (struct down_bias *)(jobs + p.jobs.max);
    UNROLL_BY(1) for (int i = tid; i < p.jobs.max; i += GEMV_THREADS) {
        const struct expert_job chose = job_load(p.jobs.job + i);
        jobs[i] = {tile_index(p.w, chose.place, rt), chose.tokens};
        if (p.w.bias && i < list.n) {
            UNROLL for (int k = 0; k < TILE_ROWS; k += 4) {
                cp_async16(biases[i].bias + k, p.w.bias + bias_index(p.w, chose.expert, rt) + k);
                cp_async16(biases[i].weight + k, p.jobs.weight + i * DECODE_MAX_TOKENS + k);
            }
        }
    }
    cp_async_commit();
    __syncthreads(); /* the jobs have come */
    const int k0 = p.w.n_kt * warp / GEMV_WARPS, k1 = p.w.n_kt * (warp + 1) / GEMV_WARPS;
    float acc[NT][4] = {}, *sums = gemv_warp_sums<NT>(red);
    with_format(p.w.fmt, [&](auto fmt) {
        gemv_stream<fmt.value, NT>(
            p.w, k0, k1, list, [] { grid_dependency_wait(); }, acc);
    });
    gemv_store<NT>(sums, acc, p.w.decode_scale * p.w.scale_max, false);
    if (p.shared.n_expert) {
        const struct device_matrix &w = p.shared;
        const int s0 = w.n_kt * warp / GEMV_WARPS, s1 = w.n_kt * (warp + 1) / GEMV_WARPS;
        const struct gemv_one one = {tile_index(w, 0, rt), p.hidden_shared, (size_t)w.n_in, p.n_tok};
        UNROLL for (int i = 0; i < 4 * NT; i++) acc[i >> 2][i & 3] = 0;
        with_format(w.fmt, [&](auto fmt) {
            gemv_stream<fmt.value, NT>(
                w, s0, s1, one, [] {}, acc);
        });
        gemv_store<NT>(sums, acc, device_matrix_scale(w, 0), true);
    }
    cp_async_wait<0>(); /* this thread's copies of the biases */
    __syncthreads();    /* the sums of all warps are written, and the biases */
    const int tok = tid / TILE_ROWS, row = rt * TILE_ROWS + tid % TILE_ROWS;
    if (tok >= p.n_tok || row >= p.w.n_out) return;
    float sum = gemv_sum<NT>(red, tid, 0, GEMV_WARPS);
    /* read and computed again: else the loops above would have fewer registers */
    const int n = p.w.bias ? load_l2(p.jobs.n) : 0;
    const struct down_bias *add = (const struct down_bias *)(jobs + p.jobs.max);
    UNROLL_BY(1) for (int j = 0; j < n; j++) {
        if (jobs[j].tokens >> tok & 1) sum = fmaf(add[j].weight[tok], add[j].bias[row % TILE_ROWS], sum);
    }
    const size_t at = (size_t)tok * p.y_stride + (size_t)row;
    if (p.y) p.y[at] = sum;
    else p.y16[at] = clamped_f16(sum);
}

/* Launches k_gemv_down. */
static void gemv_down(const struct down_args *p, cudaStream_t s) {
    const size_t smem = (size_t)p->jobs.max * (sizeof(struct down_job) + (p->w.bias ? sizeof(struct down_bias) : 0));
    if (smem > 32 << 10) /* more than the default 48 KB, static arrays included */
        cudaFuncSetAttribute(p->n_tok <= 8 ? k_gemv_down<1> : k_gemv_down<2>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (p->n_tok <= 8) LAUNCH_PDL(k_gemv_down<1>, (unsigned)p->w.n_rt, GEMV_THREADS, smem, s, *p);
    else LAUNCH_PDL(k_gemv_down<2>, (unsigned)p->w.n_rt, GEMV_THREADS, smem, s, *p);
}

/* ============================================================================================================
 * Experts in host memory
 *
 * Where not all experts fit on the GPU, the host's memory has them as the file does, and the GPU as many of each layer
 * as it has slots for. In decode the router's last block gives every expert that was chosen a slot (cache_resolve), and
 * k_fetch copies those that had none, before k_gemv_glu. A prefill leaves the slots as they are: experts that it uses
 * and that have none pass through a ring, in waves (k_wave_list, k_fetch, gemm_kernel). An expert's tiles are the same
 * wherever they are, and jobs keep the order of the experts' numbers: results do not depend on what is on the GPU.
 *
 * Where the host's memory has not all of them either, k_want_experts asks the store for what k_fetch will copy, and
 * k_brought_experts waits until that is in memory.
 * ============================================================================================================ */

/* The experts of a layer that are on the GPU. Invariant: slot_of[e] = s if and only if expert_of[s] = e. */
struct expert_cache {
    int32_t *slot_of;          /* (n_expert + 1) -1: it has none; of the last nobody reads it */
    int32_t *expert_of;        /* (n_slot) of an empty slot the number of experts */
    uint32_t *heat;            /* (n_expert + 1) decayed counts of use, also of experts without a slot; the last is 0 */
    unsigned long long *count; /* (2) uses of experts that had a slot, and that had none; NULL: not counted */
    struct fetch_item *missing; /* (n_expert) what k_fetch copies next, in the order of the experts */
    int32_t *n_missing;
    int n_slot; /* 0: there is no cache, all experts are on the GPU */
    int shift;  /* a forward takes heat >> shift from a count */
};

enum {
    EXPERTS_MAX = 1024, /* of a layer: each has a thread of k_tiles */
    SLOT_BITS = 10      /* of the number of a slot */
};

/* Gives each of n jobs of a decode forward a slot, and lists the experts that had none. They take the slots of experts
 * that no job uses and whose counts are the smallest, of equal ones the lowest slot. One block, which has passed a
 * barrier since the jobs were written; busy (n_slot) words of shared memory. There are at least n slots. About 1 us, and
 * 0.4 us for each that is missing. */
DEVICE void cache_resolve(const struct expert_cache &c, int n_expert, struct expert_job *jobs, int n, uint32_t *busy) {
    SHARED(uint32_t, coldest, GEMV_WARPS);
    const int tid = threadIdx.x;
    int n_missing = 0;
    UNROLL_BY(1) for (int e = tid; e < n_expert; e += GEMV_THREADS) c.heat[e] -= c.heat[e] >> c.shift;
    UNROLL_BY(1) for (int s = tid; s < c.n_slot; s += GEMV_THREADS) busy[s] = 0;
    __syncthreads(); /* counts have decayed, and no slot is busy */
    UNROLL_BY(1) for (int i = tid; i < n; i += GEMV_THREADS) {
        const int e = jobs[i].expert, slot = c.slot_of[e];
        c.heat[e] += HEAT;
        jobs[i].place = slot;
        if (slot >= 0) busy[slot] = 1;
    }
    __syncthreads(); /* slots of experts that are there are busy, and counts are written */
    UNROLL_BY(1) for (int i = 0; i < n; i++) {
        if (jobs[i].place >= 0) continue;
        uint32_t key = ~0u;
        UNROLL_BY(1) for (int s = tid; s < c.n_slot; s += GEMV_THREADS) {
            if (!busy[s]) key = min(key, c.heat[c.expert_of[s]] << SLOT_BITS | (uint32_t)s);
        }
        key = __reduce_min_sync(0xFFFFFFFFu, key);
        if (!(tid & 31)) coldest[tid >> 5] = key;
        __syncthreads(); /* the coldest slots of all warps are written, and this job's place is read */
        UNROLL for (int w = 0; w < GEMV_WARPS; w++) key = min(key, coldest[w]);
        if (!tid) {
            const int slot = (int)(key & ((1u << SLOT_BITS) - 1)), e = jobs[i].expert;
            c.slot_of[c.expert_of[slot]] = -1;
            c.expert_of[slot] = e;
            c.slot_of[e] = slot;
            jobs[i].place = slot;
            busy[slot] = 1;
            c.missing[n_missing] = {e, slot};
        }
        n_missing++;
        __syncthreads(); /* the slot is taken */
    }
    if (tid) return;
    *c.n_missing = n_missing;
    c.count[0] += (unsigned long long)(n - n_missing);
    c.count[1] += (unsigned long long)n_missing;
}

/* What k_wave_list lists. */
struct wave_args {
    struct expert_cache cache;
    const int32_t *first; /* (n_expert + 1) of struct sort_args */
    int n_expert, n_ring; /* n_ring: experts that the ring has room for */
    int32_t *place;       /* (n_expert) number in the list; -1: not in it */
};

/* Lists the experts that a prefill uses and that have no slot. Wave w is the items w n_ring .. of the list. Grid: 1,
 * block: EXPERTS_MAX; bound by latency. */
__global__ void __launch_bounds__(EXPERTS_MAX) k_wave_list(const __grid_constant__ struct wave_args p) {
    SHARED(int, warp_total, EXPERTS_MAX / WARP);
    SHARED(int, warp_used, EXPERTS_MAX / WARP);
    grid_dependency_launch();
    grid_dependency_wait();
    const int e = threadIdx.x, lane = e & 31, warp = e >> 5;
    const bool used = e < p.n_expert && p.first[e + 1] > p.first[e], absent = used && p.cache.slot_of[e] < 0;
    const uint32_t all = __ballot_sync(0xFFFFFFFFu, used), some = __ballot_sync(0xFFFFFFFFu, absent);
    if (!lane) {
        warp_total[warp] = __popc(some);
        warp_used[warp] = __popc(all);
    }
    __syncthreads(); /* all warps' numbers are written */
    int at = __popc(some & ((1u << lane) - 1));
    UNROLL_BY(1) for (int w = 0; w < warp; w++) at += warp_total[w];
    if (e < p.n_expert) p.place[e] = absent ? at : -1;
    if (absent) p.cache.missing[at] = {e, at % p.n_ring};
    if (e) return;
    int n = 0, n_used = 0;
    UNROLL_BY(1) for (int w = 0; w < EXPERTS_MAX / WARP; w++) {
        n += warp_total[w];
        n_used += warp_used[w];
    }
    *p.cache.n_missing = n;
    if (!p.cache.count) return;
    p.cache.count[0] += (unsigned long long)(n_used - n);
    p.cache.count[1] += (unsigned long long)n;
}

/* A question to the store, for experts first .. first + most - 1 of a list, as far as there are. */
struct want_args {
    struct tp_rank p;
    struct store_question *question; /* in host memory; */
    int32_t *expert;                 /* its lists, by addresses of the GPU */
    const uint64_t *at;
    const struct fetch_item *item;
    const int32_t *n;
    int first, most;
    int layer, matrix, n_matrix; /* as in struct store_question */
    uint64_t *brought;           /* (most, n_matrix) the answer */
};

/* Asks for experts that the store may have to read. Grid: 1, block: 256; the latency of the bus. */
__global__ void __launch_bounds__(256) k_want_experts(const __grid_constant__ struct want_args a) {
    grid_dependency_wait();
    const int n = min(max(load_l2(a.n) - a.first, 0), a.most);
    if (n) {
        UNROLL_BY(1) for (int i = threadIdx.x; i < n; i += 256) {
            *(volatile int32_t *)(a.expert + i) = (int32_t)load_l2((const uint2 *)(a.item + a.first + i)).x;
        }
        if (!threadIdx.x) {
            *(volatile int32_t *)&a.question->layer = a.layer;
            *(volatile int32_t *)&a.question->matrix = a.matrix;
            *(volatile int32_t *)&a.question->n_matrix = a.n_matrix;
            *(volatile int32_t *)&a.question->n = n;
        }
        const uint32_t seq = a.p.sequence->done[CH_WANT] + 1;
        if (channel_end(a.p, CH_WANT)) st_release_sys(&a.question->asked, seq);
    }
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

/* Waits until these experts are in memory, and takes over where. Grid: 1, block: 256; the latency of the disk. */
__global__ void __launch_bounds__(256) k_brought_experts(const __grid_constant__ struct want_args a) {
    grid_dependency_wait();
    const int n = min(max(load_l2(a.n) - a.first, 0), a.most) * a.n_matrix;
    if (n) {
        if (!threadIdx.x)
            flag_wait(&a.question->answered, a.p.sequence->done[CH_BROUGHT] + 1, a.p,
                      WAIT_CODE(0, CH_BROUGHT, a.layer));
        __syncthreads(); /* thread 0 has seen the flag: all threads may go on */
        UNROLL_BY(1) for (int i = 2 * (int)threadIdx.x; i < n; i += 2 * 256) {
            *(uint4 *)(a.brought + i) = ld_sys16(a.at + i);
        }
        channel_end(a.p, CH_BROUGHT);
    }
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

enum {
    FETCH_BLOCKS = 64,      /* of k_fetch in decode, */
    FETCH_BESIDE = 16,      /* and beside a GEMM, which does without the SMs that they take */
    FETCH_SHARED = 64 << 10 /* bytes of rows that a block packs at once, at most */
};

/* A matrix of the experts of a layer, from the host's memory to tiles. */
struct fetch_matrix {
    struct device_matrix w;
    struct repack how;
    const uint8_t
        *home; /* (n_expert, n_out) rows of the file in the host's memory, as the GPU sees it; with a store the
                          * first row of an expert that the store's memory begins with */
    size_t expert_bytes, row_stride;
    int n_part;     /* parts of a row that are packed at once */
    int part_tiles; /* tiles of a part, in whole blocks of the file; the last part may have fewer */
    int part_bytes; /* of part_tiles tiles of a row of the file */
    int pitch;      /* bytes of a row's part in shared memory, a multiple of 16 */
};

struct fetch_args {
    struct fetch_matrix m[FFN_MATRICES];
    int n_matrix;
    const struct fetch_item *item; /* items first .. first + most - 1 of the list, as far as there are */
    const int32_t *n;
    int first, most;
    const uint64_t *brought; /* (most, n_matrix) bytes from a home to an expert; NULL: they are expert_bytes apart */
};

/* Copies experts from the host's memory and packs them into their places. Grid: any, block: 256; dynamic shared memory:
 * 16 rows of the largest pitch. A block takes 16 rows, or parts of them, at a time: 16-byte copies from the boundary
 * before each row on. Limit: PCIe, as long as enough blocks have copies under way. The next kernel starts when this one
 * has ended: it reads weights by ld.global.nc, which wants memory that nobody writes while a kernel runs. */
__global__ void __launch_bounds__(256) k_fetch(const __grid_constant__ struct fetch_args p) {
    DYN_SMEM(uint8_t, rows);
    grid_dependency_wait();
    const int n = min(max(load_l2(p.n) - p.first, 0), p.most);
    int per = 0; /* strips of an expert */
    UNROLL_BY(1) for (int m = 0; m < p.n_matrix; m++) per += p.m[m].w.n_rt * p.m[m].n_part;
    UNROLL_BY(1) for (int i = blockIdx.x; i < n * per; i += gridDim.x) {
        int strip = i % per, m = 0;
        while (strip >= p.m[m].w.n_rt * p.m[m].n_part) strip -= p.m[m].w.n_rt * p.m[m].n_part, m++;
        const struct fetch_matrix &a = p.m[m];
        const uint2 item = load_l2((const uint2 *)(p.item + p.first + i / per));
        const int rt = strip / a.n_part, part = strip % a.n_part, kt0 = part * a.part_tiles;
        const int kt1 = min(kt0 + a.part_tiles, a.w.n_kt), n_row = min(a.w.n_out - rt * TILE_ROWS, (int)TILE_ROWS);
        const int skip = part * a.part_bytes;
        const int bytes = min(a.part_bytes, (int)a.how.row_bytes - skip);
        const size_t expert = p.brought ? load_l2(p.brought + i / per * p.n_matrix + m) : item.x * a.expert_bytes;
        const uint8_t *from = a.home + expert + (size_t)(rt * TILE_ROWS) * a.row_stride + skip;
        const int chunks = a.pitch / 16;
        UNROLL_BY(1) for (int c = threadIdx.x; c < n_row * chunks; c += 256) {
            const uint8_t *row = from + (size_t)(c / chunks) * a.row_stride;
            const int before = (int)((uintptr_t)row & 15), at = c % chunks * 16;
            if (at < before + bytes) cp_async16(rows + c * 16, row - before + at);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads(); /* all threads' copies have landed */
        auto row_of = [&](int row) {
            return rows + row * a.pitch + (int)((uintptr_t)(from + (size_t)row * a.row_stride) & 15) - skip;
        };
        UNROLL_BY(1) for (int kt = kt0 + (threadIdx.x >> 5); kt < kt1; kt += 8) {
            uint32_t top, low;
            repack_tile(a.how, row_of, n_row, kt, a.w, tile_index(a.w, (int)item.y, rt) + (size_t)kt, top, low);
        }
        __syncthreads(); /* the rows have been read */
    }
}

/* ============================================================================================================
 * Router
 *
 * Chooses the experts of each token. Decode has one kernel for logits, choice and job list; prefill has k_route_logits
 * and k_route_prefill in the next section.
 * ============================================================================================================ */

enum { ROUTE_MAX_GROUPS = 32 /* groups of experts at most: each has a lane */ };

struct route_args {
    /* n_expert counts the outputs, of which the last n_zero are zero-computation experts: none with NORM */
    const uint16_t *w16;     /* (n_expert, n_embd) BF16, used if w32 is NULL */
    const float *w32;        /* (n_expert, n_embd) F32, or NULL */
    const float *logit_bias; /* (n_expert) added to the logits; NULL: none */
    const float *bias;       /* (n_expert) added for the choice only; NULL: none */
    const float *x;          /* (n_tok, n_embd) */
    float *logits;           /* (n_tok, n_expert) without their bias */
    int32_t *id, *inverse; /* prefill: (n_tok, k) chosen experts, best first; -1 in both for one of zero computation */
    float *weight;         /* prefill: (n_tok, k) their weights */
    const float *shared;   /* (n_embd) gate of the shared expert; NULL: none */
    const int32_t *given;  /* (n_vocab, k) experts of a token id; NULL: they are chosen */
    const int32_t *tokens; /* (n_tok) ids */
    int n_tok, n_embd, n_expert, n_zero, k, n_group, n_group_used, norm;
    enum gating gating;
    float factor;
    float *zero_weight; /* (n_tok) weights of the zero-computation experts together */
    /* decode */
    uint32_t *arrived;       /* counts blocks; 0 between launches */
    struct expert_job *jobs; /* (n_jobs) for k_gemv_glu and k_gemv_down: see struct job_list */
    float *job_weight;
    int32_t *n_jobs;
    float *shared_weight;        /* (DECODE_MAX_TOKENS) sigmoid of `shared` times a token; not if shared is NULL */
    struct expert_cache cache;   /* of the layer */
    struct norm_input input;     /* with NORM: what x is */
    struct l2_prefetch prefetch; /* after the feed-forward */
};

/* Maps floats to unsigned numbers of the same order. NaN counts as -infinity. Never 0. */
DEVICE uint32_t float_key(float v) {
    uint32_t u = __float_as_uint(v == v ? v : -INFINITY);
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}
/* Undoes float_key. */
DEVICE float key_float(uint32_t u) { return __uint_as_float(u >> 31 ? u ^ 0x80000000u : ~u); }

/* sparsemixer_weight of moe.c, with one warp. pick (n): 0 where an expert is not left. */
DEVICE float sparsemixer_warp(const float *score, const uint32_t *pick, int n, float best) {
    float sum = 0;
    UNROLL_BY(1) for (int e = threadIdx.x & 31; e < n; e += WARP) {
        const bool far = (best - score[e]) / fmaxf(fabsf(score[e]), best) > 2 * SPARSEMIXER_JITTER;
        if (pick[e] && !far) sum += expf(score[e] - best);
    }
    return 1.0f / warp_sum(sum);
}

/* Chooses the experts of token t, with one warp: lane i < p.k returns the i-th best one and its weight. scratch (warps,
 * 2 n_expert) words of shared memory: scores, then the keys to pick from. The rule is that of route_token in moe.c. Ties
 * go to the lower id, NaN comes last. */
DEVICE int route_warp(const struct route_args &p, int t, float *scratch, float *weight) {
    const int lane = threadIdx.x & 31, n = p.n_expert, per = n / p.n_group;
    const float *logits = p.logits + (size_t)t * (size_t)n;
    float *score = scratch + (threadIdx.x >> 5) * 2 * n;
    uint32_t *pick = (uint32_t *)score + n;
    float top = -INFINITY, sum = 0;
    UNROLL_BY(4) for (int e = lane; e < n; e += WARP) {
        score[e] = load_l2(logits + e) + (p.logit_bias ? p.logit_bias[e] : 0.0f);
        top = fmaxf(top, score[e]);
    }
    top = warp_max(top);
    auto rate = [&](auto score_of) {
        UNROLL_BY(4) for (int e = lane; e < n; e += WARP) {
            const float v = score_of(score[e]);
            score[e] = v;
            sum += v;
        }
    };
    if (p.gating == GATING_SOFTMAX) rate([&](float l) { return expf(l - top); });
    else if (p.gating == GATING_SIGMOID) rate([](float l) { return 1.0f / (1.0f + expf(-l)); });
    else if (p.gating == GATING_SQRT_SOFTPLUS)
        rate([](float l) { return sqrtf(fmaxf(l, 0.0f) + log1pf(expf(-fabsf(l)))); });
    sum = p.gating == GATING_SOFTMAX ? warp_sum(sum) : 1.0f;
    UNROLL_BY(4) for (int e = lane; e < n; e += WARP) {
        score[e] /= sum;
        pick[e] = float_key(score[e] + (p.bias ? p.bias[e] : 0.0f) + 0.0f);
    }
    __syncwarp(); /* the scores and keys of all lanes are written */
    /* Lane g rates group g by the sum of its two best scores, or by its best. All but the best n_group_used groups are
     * out. */
    if (p.n_group > 1) {
        const int e0 = lane * per, e1 = lane < p.n_group ? e0 + per : e0;
        float a = -INFINITY, b = -INFINITY;
        UNROLL_BY(8) for (int e = e0; e < e1; e++) {
            float v = key_float(pick[e]);
            b = fmaxf(b, fminf(a, v));
            a = fmaxf(a, v);
        }
        const float mine = per > 1 && p.gating != GATING_SOFTMAX ? a + b : a;
        int better = 0;
        UNROLL_BY(1) for (int g = 0; g < p.n_group; g++) {
            float o = __shfl_sync(0xFFFFFFFFu, mine, g);
            better += o > mine || (o == mine && g < lane);
        }
        UNROLL_BY(1) for (int e = e0; e < e1 && better >= p.n_group_used; e++) pick[e] = float_key(-INFINITY);
        __syncwarp(); /* the groups that are out have lost their keys */
    }
    float chosen = 0, my_weight = 0; /* chosen: sum of the chosen scores, added in the order of choice */
    int my_id = 0;
    const int32_t *given = p.given ? p.given + (size_t)max(p.tokens[t], 0) * (size_t)p.k : NULL;
    UNROLL_BY(1) for (int i = 0; i < p.k; i++) {
        uint32_t best = 0;
        int id = n;
        UNROLL_BY(8) for (int e = lane; e < n && !given; e += WARP) {
            const uint32_t key = pick[e];
            const bool better = key > best; /* taken experts have key 0 */
            best = better ? key : best;
            id = better ? e : id;
        }
        const uint32_t top_key = __reduce_max_sync(0xFFFFFFFFu, best);
        id = given ? given[i] : (int)__reduce_min_sync(0xFFFFFFFFu, best == top_key ? (uint32_t)id : ~0u);
        float mine = score[id];
        if (p.gating == GATING_SPARSEMIXER) mine = sparsemixer_warp(score, pick, n, mine);
        chosen += mine;
        if (lane == i) {
            my_id = id;
            my_weight = mine;
        }
        if (lane == (id & 31)) pick[id] = 0; /* no other lane reads this key */
    }
    if (p.gating == GATING_CHOSEN) { /* the scores are logits, the best one is lane 0's */
        const float best = __shfl_sync(0xFFFFFFFFu, my_weight, 0);
        my_weight = lane < p.k ? expf(my_weight - best) : 0.0f;
        chosen = warp_sum(my_weight);
    }
    float f = p.factor;
    const bool sigmoid = p.gating == GATING_SIGMOID || p.gating == GATING_SQRT_SOFTPLUS;
    if (p.norm || p.gating == GATING_CHOSEN) f /= sigmoid ? chosen + 1e-20f : chosen;
    *weight = my_weight * f;
    __syncwarp(); /* all lanes have read score: the next token overwrites it */
    return my_id;
}

/* Whether a lane's choice for token t is a zero-computation expert. The warp sums up the weights of these. */
DEVICE bool route_zero(const struct route_args &p, int t, int id, float weight) {
    if (!p.n_zero) return false;
    const bool zero = id >= p.n_expert - p.n_zero;
    const float sum = warp_sum(zero ? weight : 0.0f);
    if (!(threadIdx.x & 31)) p.zero_weight[t] = sum;
    return zero;
}

enum { ROUTE_WARPS = 4, ROUTE_ROWS = GEMV_WARPS / ROUTE_WARPS };   /* warps per expert row, expert rows per block */
enum { ROUTE_IN_FLIGHT = 8, ROUTE_STEP = 4 * WARP * ROUTE_WARPS }; /* loads in flight, columns from one to the next */

/* Returns the rows of the router with the shared expert's gate, which is the last one. */
__host__ __device__ inline int route_rows(const struct route_args &p) { return p.n_expert + (p.shared != NULL); }

/* Loads four columns of a row; zeros outside. */
DEVICE float4 route_weights(const struct route_args &p, int e, int col) {
    const size_t at = (size_t)e * (size_t)p.n_embd + (size_t)col;
    if (e >= route_rows(p) || col >= p.n_embd) return make_float4(0, 0, 0, 0);
    if (e == p.n_expert) return *(const float4 *)(p.shared + col);
    if (p.w32) return *(const float4 *)(p.w32 + at);
    const uint2 b = *(const uint2 *)(p.w16 + at);
    return make_float4(__uint_as_float(b.x << 16), __uint_as_float(b.x & 0xFFFF0000u), __uint_as_float(b.y << 16),
                       __uint_as_float(b.y & 0xFFFF0000u));
}

/* Lists the jobs of all tokens, with one block. id and weight (n_tok, WARP): the choices, -1: none; mask (2 n_expert)
 * words of shared memory. */
DEVICE void route_jobs(const struct route_args &p, const int *id, const float *weight, uint32_t *mask) {
    uint32_t *job_of = mask + p.n_expert;
    const int lane = threadIdx.x & 31, n = p.n_tok * WARP;
    UNROLL_BY(1) for (int i = threadIdx.x; i < p.n_expert; i += GEMV_THREADS) mask[i] = 0;
    __syncthreads(); /* mask is zero */
    UNROLL_BY(1)
    for (int i = threadIdx.x; i < n; i += GEMV_THREADS)
        if (id[i] >= 0) atomicOr(&mask[id[i]], 1u << i / WARP);
    __syncthreads(); /* mask has the tokens of every expert, as bits */
    if (threadIdx.x < WARP) {
        int at = 0;
        UNROLL_BY(1) for (int e0 = 0; e0 < p.n_expert; e0 += WARP) {
            const int e = e0 + lane;
            const uint32_t tokens = e < p.n_expert ? mask[e] : 0, used = __ballot_sync(0xFFFFFFFFu, tokens != 0);
            if (tokens) {
                job_of[e] = (uint32_t)(at + __popc(used & ((1u << lane) - 1)));
                p.jobs[job_of[e]] = {e, tokens, e, 0};
            }
            at += __popc(used);
        }
        if (!lane) {
            *p.n_jobs = at;
            *p.arrived = 0;
        }
    }
    __syncthreads(); /* jobs are numbered */
    UNROLL_BY(1)
    for (int i = threadIdx.x; i < n; i += GEMV_THREADS)
        if (id[i] >= 0) p.job_weight[job_of[id[i]] * DECODE_MAX_TOKENS + (uint32_t)(i / WARP)] = weight[i];
}

/* The router for 1 to T tokens: logits, choice and job list; the shared expert's gate is one more row. NORM: x is first
 * normed. Grid: ceil(rows / 2), block: 256: four warps per row of the router, of which the first 4096 columns are
 * requested before the kernel in front has ended. The block that ends last chooses. Reads the router's weights once (1
 * to 8 MB); mostly the latency of two passes, about 3 us. */
template <int T, bool NORM>
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_route_decode(const __grid_constant__ struct route_args p) {
    SHARED(float, partial, GEMV_WARPS *T); /* (warps, T) */
    SHARED(int, id, T *WARP);              /* choices: see route_jobs */
    SHARED(float, weight, T *WARP);
    DYN_SMEM(float, scratch); /* NORM: (n_tok, n_embd) the norm; then (warps, 2 n_expert) */
    grid_dependency_launch();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int e0 = blockIdx.x * ROUTE_ROWS, e = e0 + warp / ROUTE_WARPS;
    int col = 4 * (lane + WARP * (warp % ROUTE_WARPS));
    float acc[T] = {};
    float4 w[ROUTE_IN_FLIGHT];
    UNROLL for (int u = 0; u < ROUTE_IN_FLIGHT; u++) w[u] = route_weights(p, e, col + ROUTE_STEP * u);
    if (NORM) {
        float4 norm_weight[FUSED_NORM_VECS];
        norm_load(norm_weight, p.input.weight, p.n_embd);
        grid_dependency_wait();
        prefetch_request(p.prefetch);
        norm_rows(p.input, p.n_tok, norm_weight,
                  [&](int t, int c, float4 y) { *(float4 *)(scratch + t * p.n_embd + c) = y; });
    } else {
        prefetch_request(p.prefetch); /* see k_gemv_linear */
        grid_dependency_wait();
    }
    const float *x = NORM ? scratch : p.x;
    static_assert(FUSED_NORM_MAX <= ROUTE_STEP * ROUTE_IN_FLIGHT, "NORM: all columns are in flight");
    for (; col < p.n_embd; col += ROUTE_STEP * ROUTE_IN_FLIGHT) {
        UNROLL for (int u = 0; u < ROUTE_IN_FLIGHT; u++) {
            const int i = col + ROUTE_STEP * u;
            UNROLL for (int t = 0; t < T; t++) {
                if (t >= p.n_tok || i >= p.n_embd) continue;
                const float4 y = *(const float4 *)(x + (size_t)t * (size_t)p.n_embd + i);
                acc[t] = fmaf(w[u].x, y.x, acc[t]);
                acc[t] = fmaf(w[u].y, y.y, acc[t]);
                acc[t] = fmaf(w[u].z, y.z, acc[t]);
                acc[t] = fmaf(w[u].w, y.w, acc[t]);
            }
            if (!NORM) w[u] = route_weights(p, e, i + ROUTE_STEP * ROUTE_IN_FLIGHT);
        }
    }
    UNROLL for (int t = 0; t < T; t++) {
        const float v = warp_sum(acc[t]);
        if (!lane) partial[warp * T + t] = v;
    }
    __syncthreads(); /* the partial sums of all warps are written */
    if (threadIdx.x < ROUTE_ROWS * T) {
        const int t = threadIdx.x % T, r = threadIdx.x / T;
        float v = 0;
        for (int k = 0; k < ROUTE_WARPS; k++) v += partial[(r * ROUTE_WARPS + k) * T + t];
        if (t < p.n_tok && e0 + r < p.n_expert) p.logits[(size_t)t * (size_t)p.n_expert + e0 + r] = v;
        if (t < p.n_tok && e0 + r == p.n_expert && p.shared) p.shared_weight[t] = sigmoid(v);
    }
    if (!last_block(p.arrived, gridDim.x)) return;
    UNROLL_BY(1) for (int t = warp; t < p.n_tok; t += GEMV_WARPS) {
        const int chosen = route_warp(p, t, scratch, &weight[t * WARP + lane]);
        const bool zero = !NORM && route_zero(p, t, chosen, weight[t * WARP + lane]);
        id[t * WARP + lane] = lane < p.k && !zero ? chosen : -1;
    }
    __syncthreads(); /* the choices of all tokens are written, and scratch is free */
    route_jobs(p, id, weight, (uint32_t *)scratch);
    if (!p.cache.n_slot) return;
    cache_resolve(p.cache, p.n_expert - p.n_zero, p.jobs, load_l2(p.n_jobs), (uint32_t *)scratch);
}

/* Launches one instance of k_route_decode. */
template <int T, bool NORM>
static void route_launch(const struct route_args *p, cudaStream_t s) {
    const size_t choice = GEMV_WARPS * 2 * (size_t)p->n_expert, rows = NORM ? (size_t)(p->n_tok * p->n_embd) : 0;
    const int smem = (int)((choice > rows ? choice : rows) * sizeof(float));
    if (smem > 32 << 10) /* more than the default 48 KB, static arrays included */
        cudaFuncSetAttribute(k_route_decode<T, NORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    const unsigned blocks = (unsigned)((route_rows(*p) + ROUTE_ROWS - 1) / ROUTE_ROWS);
    LAUNCH_PDL((k_route_decode<T, NORM>), blocks, GEMV_THREADS, (size_t)smem, s, *p);
}

/* Launches k_route_decode for the number of tokens. */
static void route_decode(const struct route_args *p, cudaStream_t s) {
    const bool norm = p->input.x != NULL;
    if (p->n_tok == 1) (norm ? route_launch<1, true> : route_launch<1, false>)(p, s);
    else if (p->n_tok <= 4) (norm ? route_launch<4, true> : route_launch<4, false>)(p, s);
    else (norm ? route_launch<FUSED_NORM_TOKENS, true> : route_launch<DECODE_MAX_TOKENS, false>)(p, s);
}

/* ============================================================================================================
 * Experts that the CPU computes
 *
 * In decode, of the first layers with --n-cpu-moe: k_ask_experts writes a question, and while the CPU computes, the
 * shared expert runs here. k_add_experts waits for the answer. Both are part of the recorded forward.
 * ============================================================================================================ */

struct ask_args {
    struct tp_rank p;
    struct expert_question *question; /* in host memory; */
    struct expert_job *job;           /* its lists, by addresses of the GPU */
    float *weight;
    uint16_t *x;
    float *y;
    int layer, n_tok, n_embd;
    const struct expert_job *jobs; /* what the router made, see struct route_args */
    const float *job_weight;
    const int32_t *n_jobs;
    const uint16_t *from; /* (n_tok, n_embd) halves, rows from_stride apart; n_embd % 8 == 0 */
    size_t from_stride;
    float *to; /* (n_tok, n_embd), rows to_stride apart */
    size_t to_stride;
    bool first; /* nothing has been written to `to` */
};

/* Sends the tokens and the router's choice to the CPU. Grid: n_tok, block: 256. Writes 2 n_embd bytes a token and 80 a
 * job over the bus; mostly its latency. */
__global__ void __launch_bounds__(256) k_ask_experts(const __grid_constant__ struct ask_args a) {
    grid_dependency_wait();
    const int t = blockIdx.x, n = load_l2(a.n_jobs);
    const uint32_t seq = a.p.sequence->done[CH_ASK] + 1;
    UNROLL_BY(1)
    for (int i = 8 * (int)threadIdx.x; i < a.n_embd; i += 8 * 256)
        st_sys16(a.x + (size_t)t * (size_t)a.n_embd + i, *(const uint4 *)(a.from + (size_t)t * a.from_stride + i));
    UNROLL_BY(1)
    for (int i = t * 256 + (int)threadIdx.x; i < n; i += (int)gridDim.x * 256)
        st_sys16(a.job + i, *(const uint4 *)(a.jobs + i));
    UNROLL_BY(1)
    for (int i = t * 256 + (int)threadIdx.x; i < n * DECODE_MAX_TOKENS / 4; i += (int)gridDim.x * 256)
        st_sys16(a.weight + 4 * i, *(const uint4 *)(a.job_weight + 4 * i));
    if (!t && !threadIdx.x) {
        *(volatile int32_t *)&a.question->layer = a.layer;
        *(volatile int32_t *)&a.question->n_tok = a.n_tok;
        *(volatile int32_t *)&a.question->n_job = n;
    }
    if (channel_end(a.p, CH_ASK)) st_release_sys(&a.question->asked, seq);
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

/* Adds the answer. Grid: n_tok, block: 256. Reads 4 n_embd bytes a token over the bus, once the CPU is done. question
 * NULL: another rank asks, and `to` becomes zero. */
__global__ void __launch_bounds__(256) k_add_experts(const __grid_constant__ struct ask_args a) {
    grid_dependency_wait();
    const int t = blockIdx.x;
    if (a.question && !threadIdx.x)
        flag_wait(&a.question->answered, a.p.sequence->done[CH_ANSWER] + 1, a.p, WAIT_CODE(0, CH_ANSWER, a.layer));
    __syncthreads(); /* thread 0 has seen the flag: all threads may go on */
    UNROLL_BY(1) for (int i = 4 * (int)threadIdx.x; i < a.n_embd; i += 4 * 256) {
        float4 *to = (float4 *)(a.to + (size_t)t * a.to_stride + i);
        float4 sum = a.first ? make_float4(0, 0, 0, 0) : *to;
        if (a.question) {
            const uint4 y = ld_sys16(a.y + (size_t)t * (size_t)a.n_embd + i);
            sum.x += __uint_as_float(y.x);
            sum.y += __uint_as_float(y.y);
            sum.z += __uint_as_float(y.z);
            sum.w += __uint_as_float(y.w);
        }
        *to = sum;
    }
    if (a.question) channel_end(a.p, CH_ANSWER);
    grid_dependency_launch(); /* not earlier, for the reason given in k_add_norm */
}

/* ============================================================================================================
 * Prefill: tiled GEMM
 *
 * Y^T = W X^T: the weights are the M side of the MMA, the tokens the N side. One kernel template serves all formats,
 * dense, grouped by expert and batched. Weights and tokens pass through shared memory in k-tiles of 64 columns: a ring
 * of DEPTH slots that cp.async fills ahead of the MMAs. No result depends on the order in which blocks run.
 * The section also has the kernels around the expert GEMMs: activations to FP4, router, sort by expert, weighted sum.
 * ============================================================================================================ */

enum { TN = LIST_TILE }; /* tokens of a token tile of the grouped GEMM */
/* No storage format: the kernel variant that multiplies FMT_FP4 weights by FP4 tokens (W4A4). */
enum { FMT_A4 = FMT_COUNT };

/* Tokens in FP4, made by quantize_fp4: value = e2m1 * ue4m3 * scale. The nibbles of 8 columns have fp4_pair's order.
 * Columns from n_in to the row's end are zeros. */
struct fp4_rows {
    uint8_t *codes;  /* (row, n_kt * 32 bytes): columns 64c + 8j.. at byte 32c + 4j */
    uint8_t *scales; /* (row, FP4_SCALE_BYTES(n_in)): columns 16b.. at byte b */
    float *scale;    /* (row) F32 */
};

struct gemm_args {
    struct device_matrix w, w2; /* w2: the `up` matrix with GLU */
    struct glu glu;             /* with GLU */
    int square;                 /* without GLU: the results are max(0, y)^2 / HIDDEN_SCALE */
    const uint16_t *x;          /* (row, x_stride) halves, x_stride % 8 == 0, 16-byte aligned */
    size_t x_stride;
    struct fp4_rows xq;  /* used instead of x where its pointers are not NULL */
    const int32_t *rows; /* row of x for a sorted position; NULL: the position is the row */
    /* Grouped: token tile i < *n_tiles <= max_tiles is the positions tile_first[i].. of expert tile_expert[i],
     * tile_count[i] <= TN of them. The lists are in device memory. NULL: dense, positions 0..n_tok-1. */
    const int32_t *tile_expert, *tile_first, *tile_count, *n_tiles;
    /* Of an expert e the matrices are at place[e] - place_first of w and w2, if that is one of n_place places; otherwise
     * its tiles are left out. NULL: at e. */
    const int32_t *place;
    int place_first, n_place;
    int max_tiles, n_tok;
    void *y; /* (position, y_stride) F16, with y_f32 F32; y_stride >= n_out; 16-byte aligned */
    size_t y_stride;
    int y_f32;
    float bias_factor; /* of w's bias, where x and y are divided by something; 0: 1 */
    /* > 1 (dense only): matrix z of w meets x + z * x_batch and writes y + z * y_batch (in elements, x_batch % 8 ==
     * 0). */
    int batch;
    size_t x_batch, y_batch;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
enum { SM_SHARED = 233472 }; /* bytes of shared memory of an SM */
#else
enum { SM_SHARED = 102400 };
#endif

/* Sizes of one instance. A block has WM x WN warps. A ring slot holds one k-tile: codes (2 WM tiles, CODE bytes),
 * scales (2 WM tiles, SCALE bytes), tokens (N, X bytes). The ring has DEPTH * KT slots: cp.async fills them in groups
 * of KT, DEPTH - 1 groups ahead. */
template <int F, int GLU, int WM, int WN, int DEPTH, int KT = 1>
struct gemm_shape {
    static constexpr int ROWS = (GLU ? 16 : 32) * WM, N = 64 * WN, THREADS = 32 * WM * WN;
    static constexpr int CODE = TILE_BYTES(F == FMT_A4 ? (int)FMT_FP4 : F);
    static constexpr int SCALE = F == FMT_F16 ? 0 : (int)TILE_SCALES;
    static constexpr int X = F == FMT_A4 ? 32 : 128;
    static constexpr int SCALE_AT = 2 * WM * CODE, X_AT = SCALE_AT + 2 * WM * SCALE, SLOT = X_AT + N * X;
    /* A4: after the ring two buffers of token scales, each for 4 k-tiles (16 bytes a token), see `load`; then the F32
     * scales of the tokens. */
    static constexpr int RING = DEPTH * KT * SLOT, X_SCALE_AT = RING + 2 * N * 16;
    static constexpr int BYTES = F == FMT_A4 ? X_SCALE_AT + N * 4 : RING;
    /* Blocks per SM: as many as shared memory holds, up to 16 warps. That leaves 128 registers a thread, or more where
     * fewer fit. */
    static constexpr int FIT = SM_SHARED / (BYTES + 1024), BLOCKS = FIT * WM * WN < 16 ? FIT : 16 / (WM * WN);
    /* Whether there are registers for a second loop over k-tiles, for warps that have tokens in all n8-tiles. */
    static constexpr bool FULL_LOOP = F == FMT_A4 || BLOCKS * WM * WN < 16;
    static_assert(BYTES <= 101376, "shared memory of SM120");
    static_assert(F != FMT_A4 || (DEPTH - 1) * KT <= 4, "the two buffers of token scales");

    static dim3 grid(const struct gemm_args *g) {
        int tiles = g->tile_expert ? g->max_tiles * (TN / N) : (g->n_tok + N - 1) / N;
        return dim3((g->w.n_out + ROWS - 1) / ROWS, tiles, max(g->batch, 1));
    }
};

/* Stores results row..row+3 of a position, as far as the rows exist. whole: all four do, and y is aligned to 4
 * elements. */
DEVICE void store_quad(const struct gemm_args &p, int position, int row, bool whole, float4 v) {
    const size_t at = blockIdx.z * p.y_batch + (size_t)position * p.y_stride + row;
    float *f = (float *)p.y + at;
    uint16_t *h = (uint16_t *)p.y + at;
    if (whole && p.y_f32) {
        *(float4 *)f = v;
    } else if (whole) {
        *(uint2 *)h = make_uint2(clamped_f16x2(v.x, v.y), clamped_f16x2(v.z, v.w));
    } else {
        UNROLL for (int i = 0; i < 4 && row + i < p.w.n_out; i++) {
            if (p.y_f32) f[i] = (&v.x)[i];
            else h[i] = (uint16_t)clamped_f16x2((&v.x)[i], 0);
        }
    }
}

/* Hides how x was computed from the compiler: it keeps x in a register instead of computing it again in a loop. */
DEVICE uint32_t keep(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* y (position, n_out) = x w^T, or with GLU silu(x w^T) * (x w2^T) / HIDDEN_SCALE, or what struct glu says in place
 * of SiLU; with biases, and GLU within its limits. A warp computes 32 rows x 64 tokens; with GLU 16 rows of each
 * matrix, so that a lane has both factors. A block computes 32 WM rows x 64 WN tokens, of which `count` exist. The
 * WN warps side by side share the tokens evenly, and a warp computes only the n8-tiles that it needs, in pairs (Q8:
 * singly). Grid: (row blocks, token tiles, batch), block: 32 WM WN. Bytes of a k-tile from L2: 32 WM * (36 FP4, 68
 * Q8, 128 F16) + 64 WN * (128, A4 36), for 32 WM * 64 WN * 64 multiplications. Limit: the rate of mma.sync (sm_90:
 * 1024 multiplications per clock and SM). A warp's k-tile is 64 MMAs, 512 clocks of a quarter SM. Beside them: 340
 * other instructions for FP4 (180 of them dequantize), 170 for F16, and 18 to 24 loads from shared memory that take
 * 70 clocks of the SM; 60 more where the tile is not full. Expect 50 to 60 % of the MMA rate. With up to 16 tokens
 * an expert the limit is dequantization or the bandwidth of the weights. A4: 16 MMAs of 16 clocks (SM120), 125 other
 * instructions, 36 bytes a row or token. Limit: the rate of L2, then that of the MMA. */
template <int F, int GLU, int WM, int WN, int DEPTH, int KT>
__global__ void __launch_bounds__(32 * WM * WN, (gemm_shape<F, GLU, WM, WN, DEPTH, KT>::BLOCKS))
    gemm_kernel(const __grid_constant__ struct gemm_args p) {
    using S = gemm_shape<F, GLU, WM, WN, DEPTH, KT>;
    constexpr int NT = 8;
    DYN_SMEM(uint8_t, smem);
    grid_dependency_launch();
    grid_dependency_wait();
    constexpr int PER = TN / S::N; /* blocks that share a token tile of the list */
    const int n_kt = p.w.n_kt;
    if (p.tile_expert && (int)blockIdx.y / PER >= *p.n_tiles) return;
    int e, first, count; /* expert, first position, number of positions (0 or less: none) */
    auto locate = [&] {
        e = blockIdx.z;
        first = blockIdx.y * S::N;
        count = p.n_tok - first;
        if (p.tile_expert) {
            const int i = blockIdx.y / PER, skip = blockIdx.y % PER * S::N;
            e = p.tile_expert[i];
            first = p.tile_first[i] + skip;
            count = p.tile_count[i] - skip;
        }
        count = min(count, S::N);
    };
    locate();
    if (count <= 0) return;
    auto x_row = [&](int token) -> size_t {
        const int at = first + min(token, count - 1); /* tokens past the last repeat it */
        return p.rows ? p.rows[at] : at;
    };
    /* Row tiles in shared memory: 2 WM consecutive ones; with GLU WM of w, then WM of w2. Offsets count 16 bytes, so
     * that 32 bits reach 64 GB. What depends on the thread alone is computed again for every k-tile: registers are
     * scarce in the loop. CH: 16-byte chunks of a tile's codes; a thread copies one of every A_STEP-th tile, A_ITER in
     * all. */
    const int rt0 = blockIdx.x * (S::ROWS / 16);
    const int place = p.place ? p.place[e] - p.place_first : e;
    if (p.place && (unsigned)place >= (unsigned)p.n_place) return;
    const uint32_t tile0 = keep(tile_index(p.w, place, rt0));
    const uint32_t tile_end = keep(tile_index(p.w, place, p.w.n_rt));
    constexpr int CH = S::CODE / 16, A_ITER = 2 * WM * CH / S::THREADS, A_STEP = S::THREADS / CH;
    static_assert(A_ITER == 1 || WM % A_STEP == 0, "the halves of a gated block");
    /* Tokens: XC chunks of 16 bytes each; a thread copies one of every X_STEP-th token. Rows beyond `count` are not
     * written: they make columns that nobody stores. */
    constexpr int XC = S::X / 16, X_STEP = S::THREADS / XC, X_ITER = (S::N + X_STEP - 1) / X_STEP;
    static_assert(S::N % X_STEP == 0 || X_ITER == 1, "a thread copies whole tokens, or none");
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
        UNROLL for (int i = 0; i < A_ITER; i++) { /* codes of every A_STEP-th tile */
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
        /* The swizzle spreads the 16-byte reads of a quarter warp over different banks (two tokens, four chunks;
         * ldmatrix: eight tokens, one chunk). */
        const int xc = tid % XC, token = tid / XC;
        const int chunk = F == FMT_A4 ? xc ^ (token >> 2 & 1) : xc ^ (token & 1) << 2;
        const uint8_t *x = F == FMT_A4 ? p.xq.codes : (const uint8_t *)p.x;
        const bool in = F == FMT_A4 || c_in * 64 + xc * 8 < p.w.n_in;
        UNROLL for (int i = 0, t = token; i < X_ITER; i++, t += X_STEP) if (t < count)
            cp_async16(to + S::X_AT + t * S::X + chunk * 16, x + (size_t)(x_at[i] + c_in * XC) * 16, in);
        /* Token scales of k-tiles c_in..c_in+3. The buffer was last read for k-tile c_in-5. At most 4 k-tiles are
         * loaded ahead of the one being multiplied, so all warps have passed a barrier since. */
        if (F == FMT_A4 && !(c_in & 3) && tid < count)
            cp_async16(smem + S::RING + ((c_in >> 2 & 1) * S::N + tid) * 16,
                       p.xq.scales + (size_t)(xs_at + (c_in >> 2)) * 16);
    };

    float acc[2][NT][4] = {};
    const int n_live = keep((count + 8 * WN - 1) / (8 * WN)); /* n8-tiles of a warp that have tokens */
    constexpr int m_step = GLU ? WM : 1;                      /* row tiles from a warp's first to its second */

    /* Multiplies k-tile c in slot s. full: the warp has tokens in all n8-tiles. A test of n_live would cost 28 clocks:
     * MMAs end before a branch. */
    auto multiply = [&](const uint8_t *s, int c, auto full) {
        const int tid = keep(threadIdx.x), lane = tid & 31, g = lane >> 2, t = lane & 3;
        const int m0 = (tid >> 5) % WM * (GLU ? 1 : 2), n0 = (tid >> 5) / WM * (full.value ? NT : n_live) * 8;
        const uint8_t *code = s + m0 * S::CODE + lane * 16, *scale = s + S::SCALE_AT + m0 * S::SCALE + g * 8;
        if constexpr (F == FMT_A4) {
            __align__(16) uint32_t a[2][4];
            uint32_t sfa[2];
            UNROLL for (int m = 0; m < 2; m++) {
                *(uint4 *)a[m] = *(const uint4 *)(code + m * m_step * S::CODE);
                /* lanes with t = 0 supply the scales of row g, with t = 1 those of row g + 8 */
                sfa[m] = *(const uint32_t *)(scale + m * m_step * S::SCALE + (t & 1) * 4);
            }
            const uint8_t *b_row = s + S::X_AT + (n0 + (lane >> 4) * 8 + (lane & 7)) * 32;
            const uint8_t *sfb = smem + S::RING + ((c >> 2 & 1) * S::N + n0 + g) * 16 + (c & 3) * 4;
            UNROLL for (int n = 0; n < NT; n += 2) {
                if (!full.value && n >= n_live) break;
                uint32_t b[4];
                ldmatrix_x4(b, b_row + n * 256 + ((lane >> 3 & 1) ^ (lane >> 2 & 1)) * 16);
                UNROLL for (int i = 0; i < 2; i++) {
                    const uint32_t sb = *(const uint32_t *)(sfb + (n + i) * 128);
                    UNROLL for (int m = 0; m < 2; m++) mma_nvfp4(acc[m][n + i], a[m], b + 2 * i, sfa[m], sb);
                }
            }
        } else {
            constexpr int VEC = S::CODE / 512;
            const uint8_t *xb = s + S::X_AT + (n0 + g) * 128 + t * 16;
            uint4 v[2][VEC];
            uint2 sc[2];
            UNROLL for (int m = 0; m < 2; m++) {
                sc[m] = S::SCALE > 0 ? *(const uint2 *)(scale + m * m_step * S::SCALE) : make_uint2(0, 0);
            }
            UNROLL for (int h = 0; h < 2; h++) { /* 32 columns each */
                uint32_t a[2][2][4];             /* row tile, k16-step, register */
                UNROLL for (int m = 0; m < 2; m++) {
                    UNROLL for (int i = VEC * h / 2; i < (VEC * (h + 1)) / 2 + (VEC == 1 && !h); i++) {
                        v[m][i] = *(const uint4 *)(code + m * m_step * S::CODE + i * 512);
                    }
                    UNROLL for (int k = 0; k < 2; k++) fragment_dequantize<F>(v[m], sc[m], t, 2 * h + k, a[m][k]);
                }
                UNROLL for (int n = 0; n < NT; n++) {
                    if (!full.value && (F == FMT_Q8 || !(n & 1)) && n >= n_live) break;
                    uint4 q = *(const uint4 *)(xb + n * 1024 + ((h ^ (g & 1)) << 6));
                    uint32_t b[2][2] = {{q.x, q.y}, {q.z, q.w}};
                    if (F == FMT_Q8) { /* exact: the scale is applied to the F32 sum of its 32 columns */
                        float d[2][4] = {};
                        UNROLL for (int k = 0; k < 2; k++) UNROLL for (int m = 0; m < 2; m++)
                            mma_f16(d[m], a[m][k], b[k]);
                        UNROLL for (int i = 0; i < 8; i++) {
                            uint32_t f = i & 2 ? sc[i >> 2].y : sc[i >> 2].x;
                            acc[i >> 2][n][i & 3] += d[i >> 2][i & 3] * half_to_f32((uint16_t)(f >> 16 * h));
                        }
                    } else {
                        UNROLL for (int k = 0; k < 2; k++) UNROLL for (int m = 0; m < 2; m++)
                            mma_f16(acc[m][n], a[m][k], b[k]);
                    }
                }
            }
        }
    };

    for (int c = 0; c < (DEPTH - 1) * KT; c++) {
        load(smem + c * S::SLOT, c);
        if (c % KT == KT - 1) cp_async_commit();
    }
    float *x_scale = (float *)(smem + S::X_SCALE_AT);
    if (F == FMT_A4 && threadIdx.x < S::N) x_scale[threadIdx.x] = p.xq.scale[x_row(threadIdx.x)];
    auto multiply_all = [&](auto full) {
        for (int c = 0, slot = 0; c < n_kt; c += KT) {
            cp_async_wait<DEPTH - 2>();
            /* All threads' copies of these KT slots have landed. All warps have finished the KT slots before, which are
             * refilled now. */
            __syncthreads();
            for (int k = 0; k < KT; k++)
                load(smem + (slot ? slot : S::RING) + (k - KT) * S::SLOT, c + (DEPTH - 1) * KT + k);
            cp_async_commit();
            for (int k = 0; k < KT && c + k < n_kt; k++) multiply(smem + slot + k * S::SLOT, c + k, full);
            slot = slot + KT * S::SLOT == S::RING ? 0 : slot + KT * S::SLOT;
        }
    };
    if (S::FULL_LOOP && n_live == NT) multiply_all(std::integral_constant<bool, S::FULL_LOOP>());
    else multiply_all(std::false_type());

    /* Results go through shared memory, so that whole sectors are stored: an F32 tile (N tokens, 16 WM rows) at a time,
     * with one row tile of every warp. acc[m][n][q] is row tile m, row g + 8 (q >> 1), token 8n + 2t + (q & 1). */
    constexpr int PITCH = 16 * WM + 4, QUADS = 4 * WM; /* + 4: lanes with different t use different banks */
    static_assert(S::N * PITCH * 4 <= (F == FMT_A4 ? S::X_SCALE_AT : S::RING), "the results' tile");
    locate(); /* computed again: registers are scarce in the loop */
    const int tid = threadIdx.x, g = tid >> 2 & 7, t = tid & 3, wm = (tid >> 5) % WM, m0 = GLU ? wm : 2 * wm;
    const int n0 = (tid >> 5) / WM * n_live * 8;
    /* device_matrix.decode_scale undoes fp4_pair and fp4_scale, which A4 does not use. */
    const float undo = F == FMT_A4 ? 1.0f / 128.0f : 1.0f;
    const float f0 = undo * device_matrix_scale(p.w, e), f1 = GLU ? undo * device_matrix_scale(p.w2, e) : f0;
    const bool whole = !((p.w.n_out | p.y_stride | p.y_batch) & 3);
    float *tile = (float *)smem;
    UNROLL for (int m = 0; m < (GLU ? 1 : 2); m++) {
        float b0[2], b1[2]; /* biases of rows g and g + 8: of w, of w2 */
        UNROLL for (int half = 0; half < 2; half++) {
            const int rt = rt0 + m0 + m;
            const size_t at = bias_index(p.w, e, rt) + g + 8 * half;
            b0[half] = p.w.bias && rt < p.w.n_rt ? p.w.bias[at] : 0.0f;
            b1[half] = GLU && p.w2.bias && rt < p.w.n_rt ? p.w2.bias[at] : 0.0f;
            if (!GLU && p.bias_factor > 0) b0[half] *= p.bias_factor;
        }
        __syncthreads(); /* the ring, or the result tile before, has been read */
        UNROLL for (int n = 0; n < NT; n++) {
            if (n >= n_live) break; /* the next warp's tokens follow */
            float v[4], u[4];
            UNROLL for (int q = 0; q < 4; q++) {
                const float fx = F == FMT_A4 ? x_scale[n0 + 8 * n + 2 * t + (q & 1)] : 1.0f;
                v[q] = acc[m][n][q] * (f0 * fx) + b0[q >> 1];
                if (GLU) u[q] = acc[1][n][q] * (f1 * fx) + b1[q >> 1];
            }
            /* keep: else the compiler makes two copies of the whole loop, one without limits */
            if (GLU && keep(__float_as_uint(p.glu.up_max))) {
                UNROLL for (int q = 0; q < 4; q++) glu_clamp(p.glu, v[q], u[q]);
            }
            if (!GLU && keep((uint32_t)p.square)) {
                UNROLL for (int q = 0; q < 4; q++) v[q] = relu_square(v[q]) / HIDDEN_SCALE;
            }
            if (GLU && keep(__float_as_uint(p.glu.gate_cap))) {
                UNROLL for (int q = 0; q < 4; q++) v[q] = glu_capped(p.glu, v[q], u[q]) / HIDDEN_SCALE;
            } else if (GLU && keep((uint32_t)p.glu.gelu)) {
                UNROLL for (int q = 0; q < 4; q++) v[q] = gelu_mul(v[q], u[q]) / HIDDEN_SCALE;
            } else if (GLU && keep((uint32_t)p.glu.relu)) {
                UNROLL for (int q = 0; q < 4; q++) v[q] = fmaxf(v[q], 0) * u[q] / HIDDEN_SCALE;
            } else if (GLU) {
                UNROLL for (int q = 0; q < 4; q++) v[q] = silu_mul(v[q], u[q]) / HIDDEN_SCALE;
            }
            UNROLL for (int q = 0; q < 4; q++) {
                tile[(n0 + 8 * n + 2 * t + (q & 1)) * PITCH + wm * 16 + g + 8 * (q >> 1)] = v[q];
            }
        }
        __syncthreads(); /* the result tile is written */
        const int quad = tid % QUADS, row = (rt0 + (GLU ? quad / 4 : quad / 4 * 2 + m)) * 16 + quad % 4 * 4;
        for (int token = tid / QUADS; token < count && row < p.w.n_out; token += S::THREADS / QUADS)
            store_quad(p, first + token, row, whole, *(const float4 *)(tile + token * PITCH + quad * 4));
    }
}

/* Launches one instance of gemm_kernel. */
template <int F, int GLU, int WM, int WN, int DEPTH, int KT = 1>
static void gemm_launch(const struct gemm_args *g, cudaStream_t s) {
    using S = gemm_shape<F, GLU, WM, WN, DEPTH, KT>;
    cudaFuncSetAttribute(gemm_kernel<F, GLU, WM, WN, DEPTH, KT>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES);
    const dim3 grid = S::grid(g);
    if (grid.y) LAUNCH_PDL((gemm_kernel<F, GLU, WM, WN, DEPTH, KT>), grid, dim3(S::THREADS), S::BYTES, s, *g);
}

/* Uses the big block (256 x 64 or 128 x 128 rows x tokens by 8 warps, 256 x 128 by 16) where that fills the GPU, else
 * 128 x 64 by 4 warps. FP4 weights are 3.5 times thinner than tokens, so a tall block reads the fewest bytes; the other
 * formats use a square one. */
template <int F, int WM, int WN, int DEPTH, int SMALL_DEPTH>
static void gemm_choose(const struct gemm_args *g, int glu, cudaStream_t s) {
    int device = 0, n_sm = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device);
    const dim3 b = (glu ? gemm_shape<F, 1, WM, WN, DEPTH>::grid : gemm_shape<F, 0, WM, WN, DEPTH>::grid)(g);
    const bool big = g->tile_expert || b.x * b.y * b.z >= 2u * n_sm;
    if (glu) (big ? gemm_launch<F, 1, WM, WN, DEPTH> : gemm_launch<F, 1, 4, 1, SMALL_DEPTH>)(g, s);
    else (big ? gemm_launch<F, 0, WM, WN, DEPTH> : gemm_launch<F, 0, 4, 1, SMALL_DEPTH>)(g, s);
}

/* Runs y = w x, or with `glu` silu(w x) * (w2 x) / HIDDEN_SCALE (w2 has w's shape and format). Tokens are halves, or
 * FP4 for FP4 weights without batch. FP4 tokens need SM120: elsewhere the kernel leaves sums of zero. */
static void gemm_prefill(const struct gemm_args *g, int glu, cudaStream_t s) {
    /* Depths: an SM of SM120 has 100 KB (one big block or two small ones), of sm_90 228 KB (two or four). */
    /* A4, operations per byte from L2: 228 in a block of 128 x 128, 303 in one of 256 x 128. At 2 PFLOP/s (RTX PRO
     * 6000) that is 8.8 and 6.6 TB/s, of 8.7 that L2 has at best. But only one block of 256 x 128 fits an SM, and
     * nothing runs beside its epilogue, which takes as long as four k-tiles. From 64 k-tiles on that is less than
     * what L2 saves. */
    if (g->xq.codes) {
        (g->w.n_kt >= 64 ? gemm_choose<FMT_A4, 8, 2, 5, 5> : gemm_choose<FMT_A4, 4, 2, 5, 5>)(g, glu, s);
        return;
    }
    switch (g->w.fmt) {
    case FMT_FP4: gemm_choose<FMT_FP4, 8, 1, 4, 3>(g, glu, s); break;
    case FMT_Q8: gemm_choose<FMT_Q8, 4, 2, 4, 2>(g, glu, s); break;
    case FMT_F16: gemm_choose<FMT_F16, 4, 2, 3, 2>(g, glu, s); break;
    case FMT_F8: gemm_choose<FMT_F8, 4, 2, 4, 2>(g, glu, s); break;
    }
}

/* Quantizes x (n_row, n_in) F16 to FP4: a row scale amax / (448 * 6), a UE4M3 scale amax16 / 6 / row scale per 16
 * columns, and the nearest E2M1 of x / (both scales), ties to even.
 * Grid: n_row, block: 256, 16 columns per thread and turn. Reads 2 n_in bytes twice (once from L1 or L2), writes 0.56
 * n_in; on SM120 about 12 instructions per element. Limit: the rate of L2. */
__global__ void __launch_bounds__(256)
    quantize_fp4_kernel(const uint16_t *x, size_t x_stride, int n_in, struct fp4_rows q) {
    SHARED(float, warp_amax, 8);
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
    if (!(tid & 31)) warp_amax[tid >> 5] = amax;
    __syncthreads(); /* all warps' max_dims are written */
    for (int i = 0; i < 8; i++) amax = fmaxf(amax, warp_amax[i]);
    const float row_scale = amax / (448.0f * 6.0f);
    if (!tid) q.scale[blockIdx.x] = row_scale;
    for (int b = tid; b < n_scales; b += 256) {
        const float m = read16(b * 16, v);
        uint16_t code = m > 0 ? f32_to_e4m3x2(m / 6.0f / row_scale, 0) & 0xFF : 0;
        scales[b] = (uint8_t)code;
        if (b >= n_kt * 4) continue; /* the row of scales is longer than that of codes */
        const float scale = e4m3_value(code) * row_scale;
        const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
        /* Correctly rounded quotients from the correctly rounded reciprocal: a product, its error, a correction. */
        UNROLL for (int i = 0; i < 16; i++) {
            const float a = v[i] * inverse;
            v[i] = __fmaf_rn(__fmaf_rn(-a, scale, v[i]), inverse, a);
        }
        uint32_t out[2];
        UNROLL for (int h = 0; h < 2; h++) { /* bytes hold columns 0 and 2, 4 and 6, 1 and 3, 5 and 7 */
            const float *a = v + 8 * h;
            out[h] = f32_to_e2m1x2(a[0], a[2]) | f32_to_e2m1x2(a[4], a[6]) << 8 | f32_to_e2m1x2(a[1], a[3]) << 16 |
                     f32_to_e2m1x2(a[5], a[7]) << 24;
        }
        *(uint2 *)(codes + b * 8) = make_uint2(out[0], out[1]);
    }
}

/* Launches quantize_fp4_kernel for n_row rows. */
static void quantize_fp4(const uint16_t *x, size_t x_stride, int n_row, int n_in, struct fp4_rows q, cudaStream_t s) {
    if (n_row) LAUNCH_PDL(quantize_fp4_kernel, dim3(n_row), dim3(256), 0, s, x, x_stride, n_in, q);
}

/* ============================================================================================================
 * Prefill: router, lists of experts, statistics
 *
 * The router for many tokens, the sort of (token, expert) pairs by expert, and what --calibrate sums up.
 * ============================================================================================================ */

/* Splits each of four floats into two halves, x = hi + lo / 2^11: 22 bits of it, or 2^-36 where that is more. */
DEVICE void split_halves(float4 x, uint2 *hi, uint2 *lo) {
    *hi = make_uint2(clamped_f16x2(x.x, x.y), clamped_f16x2(x.z, x.w));
    float rest[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const uint32_t h = i & 2 ? hi->y : hi->x;
        rest[i] = 2048.0f * ((&x.x)[i] - half_to_f32((uint16_t)(h >> 16 * (i & 1))));
    }
    *lo = make_uint2(clamped_f16x2(rest[0], rest[1]), clamped_f16x2(rest[2], rest[3]));
}

/* Router logits for prefill: (n_tok, n_expert) = x w^T, as exact as sums in F32. x and w are split into two halves. The
 * products of high halves are added up anew for each step of 32 columns, because MMAs truncate their sums, and the
 * steps in F32. High halves times low ones have sums of their own; low halves times each other are left out: 2^-22.
 * Rows of BF16 are halves as they are, down to 2^-17: where a step of 64 rows has no low halves, nothing multiplies
 * them.
 * Grid: (n_expert / 64, n_tok / 64), block: 256. A block makes 64 x 64 results, a warp 16 tokens x 32 experts. The next
 * step's columns are converted into the other half of shared memory, and those of the one after it are on their way,
 * while one is multiplied. Reads 256 bytes of x and of w (BF16: 128) per column from L2, for 64 * 64 multiplications,
 * two or three times each. Limit: the MMA rate. */
__global__ void __launch_bounds__(256, 2) k_route_logits(struct route_args p) {
    enum { SIDE = 64, K_STEP = 32, PITCH = 2 * K_STEP + 16, PART = SIDE * PITCH, HALF = 4 * PART };
    enum { X_HI = 0, X_LO = PART, W_HI = 2 * PART, W_LO = 3 * PART };
    SHARED(uint8_t, smem, 2 * HALF); /* (half, part, row, PITCH) */
    grid_dependency_launch();
    grid_dependency_wait();
    const int e0 = blockIdx.x * SIDE, t0 = blockIdx.y * SIDE, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    /* This thread loads 4 columns of rows r and r + 32. The two rows of 16 lanes are 4 apart: no bank conflicts. */
    const int r8 = threadIdx.x >> 3, r = (r8 & ~7) | (r8 & 1) << 2 | (r8 >> 1 & 3), k4 = 4 * (threadIdx.x & 7);
    float4 x[2], w[2];
    auto load = [&](int col) {
        UNROLL for (int i = 0; i < 2; i++) {
            const int t = t0 + r + 32 * i;
            const bool in = t < p.n_tok && col + k4 < p.n_embd;
            x[i] = in ? *(const float4 *)(p.x + (size_t)t * (size_t)p.n_embd + col + k4) : make_float4(0, 0, 0, 0);
            w[i] = route_weights(p, e0 + r + 32 * i, col + k4);
        }
    };
    auto store = [&](uint8_t *to) { /* returns whether w has low halves, but for signs */
                                    uint32_t any = 0;
                                    UNROLL for (int i = 0; i < 2; i++) {
                                        uint8_t *at = to + (r + 32 * i) * PITCH + 2 * k4;
                                        uint2 hi, lo;
                                        split_halves(x[i], &hi, &lo);
                                        *(uint2 *)(at + X_HI) = hi;
                                        *(uint2 *)(at + X_LO) = lo;
                                        split_halves(w[i], &hi, &lo);
                                        *(uint2 *)(at + W_HI) = hi;
                                        *(uint2 *)(at + W_LO) = lo;
                                        any |= (lo.x | lo.y) & 0x7FFF7FFFu;
                                    }
                                    return any;
    };
    const int t16 = 16 * (warp & 3), e32 = 32 * (warp >> 2); /* the warp's first token and expert */
    const int xt = (t16 + (lane & 15)) * PITCH + (lane >> 4) * 16;
    const int we = (e32 + (lane >> 4) * 8 + (lane & 7)) * PITCH + (lane >> 3 & 1) * 16;
    float acc[4][4] = {}, low[4][4] = {};
    load(0);
    uint32_t rest = store(smem);
    load(K_STEP);
    for (int col = 0, half = 0; col < p.n_embd; col += K_STEP, half ^= 1) {
        const uint8_t *from = smem + half * HALF;
        /* This step's columns are stored, and all warps are done with the step before. */
        const bool w_low = __syncthreads_or(rest != 0);
        rest = store(smem + (half ^ 1) * HALF);
        load(col + 2 * K_STEP);
        float high[4][4] = {};
        UNROLL for (int k = 0; k < K_STEP / 16; k++) {
            uint32_t xh[4], xl[4], wh[4];
            ldmatrix_x4(xh, from + xt + 32 * k + X_HI);
            ldmatrix_x4(xl, from + xt + 32 * k + X_LO);
            UNROLL for (int n = 0; n < 4; n += 2) { /* experts 8n..8n+15 of the warp */
                ldmatrix_x4(wh, from + we + 32 * k + 8 * n * PITCH + W_HI);
                UNROLL for (int i = 0; i < 2; i++) {
                    mma_f16(high[n + i], xh, wh + 2 * i);
                    mma_f16(low[n + i], xl, wh + 2 * i);
                }
            }
        }
        if (w_low) UNROLL for (int k = 0; k < K_STEP / 16; k++) {
                uint32_t xh[4], wl[4];
                ldmatrix_x4(xh, from + xt + 32 * k + X_HI);
                UNROLL for (int n = 0; n < 4; n += 2) {
                    ldmatrix_x4(wl, from + we + 32 * k + 8 * n * PITCH + W_LO);
                    UNROLL for (int i = 0; i < 2; i++) mma_f16(low[n + i], xh, wl + 2 * i);
                }
            }
        UNROLL for (int i = 0; i < 16; i++) acc[i >> 2][i & 3] += high[i >> 2][i & 3];
    }
    UNROLL for (int i = 0; i < 16; i++) {
        const int t = t0 + t16 + (lane >> 2) + 8 * (i >> 1 & 1), e = e0 + e32 + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
        const float v = acc[i >> 2][i & 3] + low[i >> 2][i & 3] / 2048.0f;
        if (t < p.n_tok && e < p.n_expert) p.logits[(size_t)t * (size_t)p.n_expert + e] = v;
    }
}

/* Chooses the experts for prefill. Grid: n_tok / 4, block: 128, one warp per token. Reads n_expert floats per token;
 * bound by the latency of the top-k. */
__global__ void __launch_bounds__(128) k_route_prefill(struct route_args p) {
    DYN_SMEM(float, scratch); /* (warps, 2 n_expert) */
    grid_dependency_launch();
    grid_dependency_wait();
    const int t = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (t >= p.n_tok) return;
    float weight;
    const int id = route_warp(p, t, scratch, &weight);
    const bool zero = route_zero(p, t, id, weight);
    if (lane >= p.k) return;
    const size_t choice = (size_t)t * (size_t)p.k + (size_t)lane;
    p.id[choice] = zero ? -1 : id;
    p.weight[choice] = weight;
    if (zero) p.inverse[choice] = -1;
}

/* Sorts the router's n_choices = n_tok * k choices (a token and one of its experts) by (expert, token), and lists token
 * tiles for the grouped GEMM. */
struct sort_args {
    const int32_t *id; /* (n_choices) expert of choice token * k + j; -1: none that is listed */
    int n_choices, k, n_expert;
    int32_t *row;     /* (n_choices) sorted position -> token */
    int32_t *inverse; /* (n_choices) choice -> sorted position; stays as it is where there is none */
    int32_t *first;   /* (n_expert + 1) first sorted position of an expert */
    int32_t *tile_expert, *tile_first, *tile_count, *n_tiles;
};

/* Loads the experts of choices i..i+7 (i % 8 == 0); -1 past the end. */
DEVICE void sort_load(const struct sort_args &p, int i, int id[8]) {
    const int4 *from = (const int4 *)(p.id + i);
    if (i + 8 <= p.n_choices) {
        *(int4 *)id = from[0];
        *(int4 *)(id + 4) = from[1];
    } else {
        UNROLL for (int k = 0; k < 8; k++) id[k] = i + k < p.n_choices ? p.id[i + k] : -1;
    }
}

/* Returns the sum of x over this lane and the lanes below it. */
DEVICE int warp_scan(int x) {
    UNROLL for (int o = 1; o < WARP; o <<= 1) {
        const int v = __shfl_up_sync(0xFFFFFFFFu, x, o);
        if ((int)(threadIdx.x & 31) >= o) x += v;
    }
    return x;
}

/* Sorts by expert: block e counts the choices of smaller experts, then lists its own in order.
 * Grid: n_expert, block: 256. A block reads n_choices ids twice from L2, 2,048 at a time: 10 us for 32,768 choices of
 * 128 experts. */
__global__ void __launch_bounds__(256) k_sort(struct sort_args p) {
    SHARED(int, count, 8);
    grid_dependency_launch();
    grid_dependency_wait();
    const int e = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __align__(16) int id[8];
    int less = 0, at = 0;
    for (int i = 8 * threadIdx.x; i < p.n_choices; i += 8 * 256) {
        sort_load(p, i, id);
        UNROLL for (int k = 0; k < 8; k++) less += id[k] >= 0 && id[k] < e;
    }
    less = __reduce_add_sync(0xFFFFFFFFu, less);
    if (!lane) count[warp] = less;
    __syncthreads(); /* all warps' counts are written */
    for (int w = 0; w < 8; w++) at += count[w];
    if (!threadIdx.x) p.first[e] = at;
    for (int i0 = 0; i0 < p.n_choices; i0 += 8 * 256) {
        const int i = i0 + 8 * threadIdx.x;
        int mine = 0;
        sort_load(p, i, id);
        UNROLL for (int k = 0; k < 8; k++) mine += id[k] == e;
        const int upto = warp_scan(mine);
        __syncthreads(); /* all threads have read the counts of the turn before */
        if (lane == WARP - 1) count[warp] = upto;
        __syncthreads(); /* all warps' counts of this turn are written */
        int position = at + upto - mine;
        for (int w = 0; w < 8; w++) {
            position += w < warp ? count[w] : 0;
            at += count[w];
        }
        UNROLL for (int k = 0; k < 8; k++) {
            if (id[k] != e) continue;
            p.row[position] = (i + k) / p.k;
            p.inverse[i + k] = position++;
        }
    }
    if (e == p.n_expert - 1 && !threadIdx.x) p.first[p.n_expert] = at;
}

/* Lists the token tiles, of at most `tile` tokens each, in the order of the experts. Grid: 1, block: EXPERTS_MAX;
 * bound by latency. */
__global__ void __launch_bounds__(EXPERTS_MAX) k_tiles(struct sort_args p, int tile) {
    SHARED(int, warp_total, 33);
    grid_dependency_launch();
    grid_dependency_wait();
    const int e = threadIdx.x, lane = e & 31, warp = e >> 5;
    int first = e < p.n_expert ? p.first[e] : 0;
    int count = e < p.n_expert ? p.first[e + 1] - first : 0;
    int n = (count + tile - 1) / tile, upto = warp_scan(n);
    if (lane == 31) warp_total[warp] = upto;
    __syncthreads(); /* all warps' totals are written */
    int at = upto - n;
    for (int w = 0; w < warp; w++) at += warp_total[w];
    for (int i = 0; i < n; i++) {
        p.tile_expert[at + i] = e;
        p.tile_first[at + i] = first + i * tile;
        p.tile_count[at + i] = min(tile, count - i * tile);
    }
    if (e == EXPERTS_MAX - 1) *p.n_tiles = at + n;
}

/* to[inverse[t][j]] = weight[t][j] * x[t], rows of n halves, n % 8 == 0: what an expert reads whose input is weighted.
 * Grid: n_tok * k, block: 256, 4 columns per thread and turn. Moves 4 n bytes a block, mostly to and from L2. */
__global__ void __launch_bounds__(ROW_THREADS)
    k_weigh_inputs(const uint16_t *x, size_t x_stride, const int32_t *inverse, const float *weight, int k, int n,
                   uint16_t *to) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int choice = (int)blockIdx.x;
    const float w = weight[choice];
    x += (size_t)(choice / k) * x_stride;
    to += (size_t)inverse[choice] * (size_t)n;
    UNROLL_BY(1) for (int i = 4 * threadIdx.x; i < n; i += 4 * ROW_THREADS) {
        const uint2 v = *(const uint2 *)(x + i);
        auto weighed = [&](uint32_t pair) {
            return clamped_f16x2(w * half_to_f32((uint16_t)pair), w * half_to_f32((uint16_t)(pair >> 16)));
        };
        *(uint2 *)(to + i) = make_uint2(weighed(v.x), weighed(v.y));
    }
}

/* out (n_tok, n) = (with `add`: out) + HIDDEN_SCALE * sum over j of weight[t][j] * y[inverse[t][j]], y halves, n % 8 ==
 * 0; weight NULL: 1. inverse[t][j] -1: nothing. With `gate` (n) out is first multiplied by sigmoid(gate x), x (n_tok,
 * n). inverse NULL: y[t] is added. out NULL: out16 gets the sum over j, in halves.
 * Grid: n_tok, block: 256, 4 columns per thread and turn. Moves k * n halves and n F32 per token (with `add` 2 n), with
 * a gate n F32 more; the limit is the bandwidth of L2, or of memory where y exceeds it. */
__global__ void __launch_bounds__(ROW_THREADS)
    k_combine(const uint16_t *y, const int32_t *inverse, const float *weight, int k, int n, int add, const float *gate,
              const float *x, float *out, uint16_t *out16) {
    grid_dependency_launch();
    grid_dependency_wait();
    __builtin_assume(k > 0);
    float f = 1, dot = 0;
    if (gate) {
        for (int i = threadIdx.x; i < n; i += ROW_THREADS) dot += gate[i] * x[(size_t)blockIdx.x * n + i];
        f = sigmoid(block_sum<ROW_THREADS>(dot));
    }
    if (inverse) inverse += (size_t)blockIdx.x * k;
    if (weight) weight += (size_t)blockIdx.x * k;
    const uint32_t weighs = keep(weight != NULL); /* else the compiler makes two copies of the loop */
    const size_t first = (size_t)blockIdx.x * n;
    UNROLL_BY(1) for (int i = 4 * threadIdx.x; i < n; i += 4 * ROW_THREADS) {
        float s[4] = {};
        auto sum = [&](const uint16_t *row, float w) {
            const uint2 v = *(const uint2 *)(row + i);
            UNROLL for (int c = 0; c < 4; c++) s[c] += w * half_to_f32((uint16_t)((&v.x)[c >> 1] >> 16 * (c & 1)));
        };
        if (!inverse) sum(y + first, 1);
        else UNROLL_BY(8)
        for (int j = 0; j < k; j++)
            if (inverse[j] >= 0) sum(y + (size_t)inverse[j] * n, weighs ? weight[j] : 1);
        if (!out) {
            *(uint2 *)(out16 + first + i) = make_uint2(clamped_f16x2(s[0], s[1]), clamped_f16x2(s[2], s[3]));
            continue;
        }
        float4 *to = (float4 *)(out + first + i);
        const float4 v = add ? *to : make_float4(0, 0, 0, 0);
        *to = make_float4(f * v.x + HIDDEN_SCALE * s[0], f * v.y + HIDDEN_SCALE * s[1], f * v.z + HIDDEN_SCALE * s[2],
                          f * v.w + HIDDEN_SCALE * s[3]);
    }
}

/* y (n_tok, n) += weight[t] * x (n_tok, n), n % 4 == 0: what zero-computation experts give. Grid: n_tok, block: 256.
 * Moves 12 n bytes a token: latency, or the bandwidth of L2. */
__global__ void __launch_bounds__(ROW_THREADS) k_add_inputs(const float *x, const float *weight, int n, float *y) {
    grid_dependency_launch();
    grid_dependency_wait();
    const float w = weight[blockIdx.x];
    const size_t first = (size_t)blockIdx.x * n;
    UNROLL_BY(1) for (int i = 4 * threadIdx.x; i < n; i += 4 * ROW_THREADS) {
        const float4 from = *(const float4 *)(x + first + i);
        float4 *to = (float4 *)(y + first + i);
        const float4 v = *to;
        *to = make_float4(fmaf(w, from.x, v.x), fmaf(w, from.y, v.y), fmaf(w, from.z, v.z), fmaf(w, from.w, v.w));
    }
}

struct stats_args {
    const uint16_t *y; /* (n_choices, n) expert outputs / HIDDEN_SCALE before weighting, in sorted order */
    int n, k;
    const int32_t *first, *row, *id; /* as in struct sort_args */
    const float *weight;             /* (n_tok, k) */
    double *stats;                   /* (n_expert, STATS) */
};

/* Adds to each expert's statistics what it gave its tokens (REAP).
 * Grid: n_expert, block: 256. A block walks the expert's rows one after the other, so that sums do not change from run
 * to run. Reads the outputs once; about 2 us of latency per row of the busiest expert. */
__global__ void __launch_bounds__(256) k_stats(struct stats_args p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int e = blockIdx.x;
    double *s = p.stats + (size_t)e * STATS;
    for (int at = p.first[e]; at < p.first[e + 1]; at++) {
        const uint16_t *y = p.y + (size_t)at * (size_t)p.n;
        float sum = 0, g = 0, all = 0;
        for (int i = threadIdx.x; i < p.n; i += 256) {
            const float v = HIDDEN_SCALE * half_to_f32(y[i]);
            sum += v * v;
        }
        const double norm = sqrt((double)block_sum<256>(sum));
        const size_t token = (size_t)p.row[at] * (size_t)p.k;
        for (int j = 0; j < p.k && !threadIdx.x; j++) {
            all += p.weight[token + j];
            if (p.id[token + j] == e) g = p.weight[token + j];
        }
        if (!threadIdx.x) {
            const double share = all > 0 ? (double)g / (double)all : 0;
            s[STAT_TOKENS]++;
            s[STAT_WEIGHTED] += share * norm;
            s[STAT_NORM] += norm;
            s[STAT_GATE] += share;
            if (share * norm > s[STAT_WEIGHTED_MAX]) s[STAT_WEIGHTED_MAX] = share * norm;
        }
        __syncthreads(); /* the next row's block_sum overwrites this one's */
    }
}

/* sums (n_expert, n) += factor * the squares of the columns of x, over the rows that an expert reads:
 * rows[first[e]..first[e + 1] - 1]; first NULL: all n_tok.
 * Grid: (n / 256, n_expert), block: 256. Reads 2 bytes per value. */
__global__ void __launch_bounds__(256) k_in_sum2(const uint16_t *x, size_t x_stride, const int32_t *first,
                                                 const int32_t *rows, int n_tok, int n, float factor, float *sums) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int c = blockIdx.x * 256 + threadIdx.x, e = blockIdx.y;
    const int begin = first ? first[e] : 0;
    const int end = first ? first[e + 1] : n_tok;
    float sum = 0;
    if (c >= n) return;
    for (int at = begin; at < end; at++) {
        const float v = half_to_f32(x[(size_t)(rows ? rows[at] : at) * x_stride + c]);
        sum += v * v;
    }
    sums[(size_t)e * n + c] += factor * sum;
}

/* ============================================================================================================
 * RoPE and the KV cache
 *
 * Norms of whole rows of queries and keys; then one kernel per kind of attention: head norms, rotation, and the new
 * rows of the cache.
 * ============================================================================================================ */

/* Returns the least power of two that is not below x. */
DEVICE float ceil_pow2(float x) {
    const uint32_t u = __float_as_uint(x);
    return __uint_as_float(((u >> 23) + ((u & 0x7FFFFF) != 0)) << 23);
}

/* Returns x less the nearest value of E4M3, where that is in range. */
DEVICE float e4m3_error(float x) {
    const uint32_t power = max(__float_as_uint(x) & 0x7F800000u, 0x3C800000u); /* of x, at least 2^-6 */
    const float round = __uint_as_float(power + (20u << 23)), a = fabsf(x);    /* its ulp is the step of E4M3 */
    return a - ((a + round) - round);
}

/* Returns the scale of a group of an FP8 row, as fp8_scale of moe.c. With one warp: value i is x[i / 32] of lane i %
 * 32. */
template <int PER, bool POW2>
DEVICE float fp8_scale(int n, const float x[PER]) {
    const int lane = threadIdx.x & 31;
    float amax = 0;
    UNROLL for (int i = 0; i < PER; i++) if (lane + 32 * i < n) amax = fmaxf(amax, fabsf(x[i]));
    amax = warp_max(amax);
    if (!(amax > 0x1p-100f)) return 1.0f;
    if constexpr (POW2) {
        return ceil_pow2(amax * (1.0f / FP8_TOP));
    } else {
        float best = FP8_TOP, least = INFINITY;
        UNROLL_BY(1) for (int c = 0; c < FP8_TOPS; c++) { /* unrolled, it adds a tenth to the code of a layer */
            const float top = FP8_TOP - FP8_TOP_STEP * c, inv = top * (1.0f / amax);
            float error = 0;
            UNROLL for (int i = 0; i < PER; i++) {
                const float e = lane + 32 * i < n ? e4m3_error(x[i] * inv) : 0.0f;
                error = fmaf(e, e, error);
            }
            error = warp_sum(error) * (1.0f / (top * top));
            if (error < least) least = error, best = top;
        }
        return amax / best;
    }
}

/* What a kernel knows of a cache tensor. */
enum cache_form { ROWS_BF16, ROWS_FP8, ROWS_ANY, ROWS_POW2 /* FP8 has pow2 */ };

/* Stores a group of n values into a row of a cache tensor, from element `at` on, with one warp: value i is x[i / 32]
 * of lane i % 32. */
template <int PER, int FORM = ROWS_ANY>
DEVICE void cache_store(const struct cache_tensor &p, size_t at_row, int at, int scale_index, int n,
                        const float x[PER]) {
    const int lane = threadIdx.x & 31;
    uint8_t *row = p.data + at_row * p.row_bytes;
    const bool fp8 = FORM >= ROWS_ANY ? p.type == KV_FP8 : FORM == ROWS_FP8;
    const float scale = fp8 ? fp8_scale<PER, FORM == ROWS_POW2>(n, x) : 1.0f, inv = 1.0f / scale;
    if (fp8 && !lane) p.scale[at_row * (size_t)p.n_scale + (size_t)scale_index] = scale;
    UNROLL for (int i = 0; i < PER; i++) {
        int k = lane + 32 * i;
        if (k >= n) continue;
        if (fp8) row[at + k] = (uint8_t)f32_to_e4m3x2(x[i] * inv, 0);
        else ((uint16_t *)row)[at + k] = (uint16_t)f32_to_bf16x2(x[i], 0);
    }
}

/* Rows of queries, keys and values (0 to 2), whose values are limited. */
struct clip_args {
    float *x[3];      /* (n_tok, n) each */
    size_t stride[3]; /* floats from row to row */
    int n[3];         /* n % 4 == 0 */
    float most;
};

/* x = clamp(x, -most, most). Grid: (ceil(largest n / 1024), n_tok, 3), block: 256. Some KB: latency. */
__global__ void __launch_bounds__(256) k_clip(const __grid_constant__ struct clip_args a) {
    const int which = (int)blockIdx.z, i = 4 * (int)(blockIdx.x * blockDim.x + threadIdx.x);
    grid_dependency_launch();
    grid_dependency_wait();
    if (i >= a.n[which]) return;
    float4 *const at = (float4 *)(a.x[which] + (size_t)blockIdx.y * a.stride[which] + i);
    auto clip = [&](float x) { return fminf(fmaxf(x, -a.most), a.most); };
    const float4 v = *at;
    *at = make_float4(clip(v.x), clip(v.y), clip(v.z), clip(v.w));
}

/* What k_row_norm does, bits. */
enum { ROW_SQUARES = 1, ROW_EXCHANGE = 2, ROW_SCALE = 4 };

/* Rows of queries (0) and of keys (1) that are normed as a whole, over the heads of all ranks. */
struct row_norm_args {
    float *x[2]; /* (n_tok, n) the rank's part of the rows, tokens stride floats apart */
    size_t stride[2];
    const float *weight[2]; /* (n) */
    int n[2];               /* multiples of 4 */
    int whole[2];           /* values of the whole rows */
    bool counted[2];        /* whether the squares of the rank's part count: a rank before it may have the same heads */
    float eps;
    int n_tok;
    float *own, *all; /* (n_tok, 2) without ROW_EXCHANGE: sums of squares, the rank's and those of all ranks */
    /* ROW_EXCHANGE, as in struct norm_args */
    struct tp_rank p;
    float *slot[MAX_RANKS];
    uint32_t *flag[MAX_RANKS];
    uint32_t code;
    bool sharing;
};

/* Returns the sum of squares of row i: of queries where i is even, of keys where it is odd. */
DEVICE float row_squares(const struct row_norm_args &a, int i) {
    const float *x = a.x[i & 1] + (size_t)(i >> 1) * a.stride[i & 1];
    float ss = 0;
    for (int k = 4 * (int)threadIdx.x; k < a.n[i & 1]; k += 4 * NORM_THREADS) {
        const float4 v = *(const float4 *)(x + k);
        ss = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ss))));
    }
    ss = block_sum<NORM_THREADS>(ss);
    return a.counted[i & 1] ? ss : 0;
}

/* Norms row i, of whose squares this is the sum. */
DEVICE void row_scale(const struct row_norm_args &a, int i, float sum) {
    float *x = a.x[i & 1] + (size_t)(i >> 1) * a.stride[i & 1];
    const float f = rsqrtf(sum / (float)a.whole[i & 1] + a.eps);
    for (int k = 4 * (int)threadIdx.x; k < a.n[i & 1]; k += 4 * NORM_THREADS)
        *(float4 *)(x + k) = norm_value(*(const float4 *)(x + k), f, *(const float4 *)(a.weight[i & 1] + k));
}

/* x = x / rms(x) * weight, for queries and keys. One rank does all at once. Several push their sums to each other, as
 * k_add_norm does, and add them in the order of the ranks; for many tokens sums and scaling are launches of their own
 * beside an all-reduce.
 * Grid: 2 n_tok; ROW_EXCHANGE: at most cuda.reduce_blocks. Block: 256. Reads a row once or twice, writes it once; one
 * token is bound by latency, 2 us, exchanged 5 us more. */
template <int PARTS>
__global__ void __launch_bounds__(NORM_THREADS) k_row_norm(const __grid_constant__ struct row_norm_args a) {
    constexpr bool EXCHANGE = PARTS & ROW_EXCHANGE, SCALE = PARTS & ROW_SCALE, ALONE = SCALE && !EXCHANGE;
    const int tid = (int)threadIdx.x, n = 2 * a.n_tok, n_rank = a.p.n_rank;
    uint32_t seq = 0;
    if (!EXCHANGE || !a.sharing) grid_dependency_launch();
    grid_dependency_wait();
    if (EXCHANGE) seq = a.p.sequence->done[CH_ALLREDUCE] + 1;
    /* 16 bytes for a sum */
    auto slot = [&](int to, int from, int i) {
        return a.slot[to] + ((size_t)(seq & 1) * (size_t)n_rank + (size_t)from) * (size_t)a.p.slot_floats + 4 * i;
    };
    for (int i = blockIdx.x; i < n; i += (int)gridDim.x) {
        const float sum = PARTS & ROW_SQUARES ? row_squares(a, i) : a.all[i];
        if (EXCHANGE && tid < n_rank) st_sys16(slot(tid, a.p.rank, i), make_uint4(__float_as_uint(sum), 0, 0, 0));
        if (ALONE) row_scale(a, i, sum);
        if (!SCALE && !tid) a.own[i] = sum, a.all[i] = 0;
        if (PARTS & ROW_SQUARES) __syncthreads(); /* the next row's block_sum overwrites this one's */
    }
    if (!EXCHANGE) return;
    if (tid < n_rank && tid != a.p.rank) {
        st_release_sys(a.flag[tid] + a.p.rank * ALLREDUCE_BLOCKS + blockIdx.x, seq);
        flag_wait(a.flag[a.p.rank] + tid * ALLREDUCE_BLOCKS + blockIdx.x, seq, a.p, a.code + (uint32_t)tid);
    }
    __syncthreads(); /* the sums of all ranks have come */
    if (a.sharing) grid_dependency_launch();
    for (int i = blockIdx.x; i < n; i += (int)gridDim.x) {
        float sum = 0;
        for (int k = 0; k < n_rank; k++) sum += __uint_as_float(ld_sys16(slot(a.p.rank, k, i)).x);
        row_scale(a, i, sum);
    }
    all_reduce_end(a.p, a.n_tok);
}

struct rope_args {
    struct batch_ref batch;
    const float *cs, *sn;                /* (n_tok, rope / 2) */
    bool pairs;                          /* GQA: value 2i is rotated against 2i + 1, otherwise i against i + rope / 2 */
    const float *q;                      /* (n_tok, n_head * q_head), of a head's q_head values the first d */
    const float *k;                      /* (n_tok, n_head_kv * d); MLA: (n_tok, latent + rope) */
    const float *v;                      /* (n_tok, n_head_kv * dv) */
    size_t q_stride, k_stride, v_stride; /* floats from token to token */
    const float *q_norm, *k_norm;        /* (d), NULL: none; MLA: k_norm (latent) */
    const float *shared_norm;            /* MLA: (rope) of the shared key; NULL: none */
    uint16_t *q16;    /* (n_tok, n_head, d) queries for attention; MLA: the part without rotation, input of wk_b */
    uint16_t *q_rope; /* MLA: (n_tok, n_head, latent + rope), of which this kernel writes the last `rope` */
    struct cache_tensor kp, vp;
    int n_head, n_head_kv, d, q_head, dv, rope, latent, nope;
    float eps;
    bool v_norm;      /* a head's values are divided by their root mean square */
    bool norm_last;   /* of struct attn */
    float temp_scale; /* of struct attn */
    int temp_length, temp_early;
};

/* The factor of token t's queries: attn_temperature. */
DEVICE float query_factor(const struct rope_args &p, int t) {
    if (p.temp_scale == 0) return 1;
    const int pos = run_base(p.batch.run(t)) + t;
    return 1 + p.temp_scale * log1pf((float)((pos + p.temp_early) / p.temp_length));
}

enum {
    HEAD_MAX = GPU_HEAD, /* values of a head of grouped-query attention, */
    WIDE_MAX = 512,      /* of one that is wide, */
    REL_MAX = 128,       /* of one with a bias by distance */
    HEAD_PER = HEAD_MAX / 32,
    WIDE_PER = WIDE_MAX / 32,
    REL_PER = REL_MAX / 32
};
#define ATTN_LOG2_E 1.44269504f

/* x = a head (n values at src), normed and rotated from value `first` on, with one warp: x[i] is value lane + 32 i. w (n):
 * the norm's weights, NULL: no norm. cosine(i), sine(i): of pair i. A rotation leaves the mean square as it is, and with
 * norm_last the weights act after it. */
template <int PER, class COSINE, class SINE>
DEVICE void rope_head_by(const struct rope_args &p, const float *src, const float *w, int n, COSINE cosine, SINE sine,
                         float x[PER], int first = 0) {
    const int lane = threadIdx.x & 31, half = p.rope / 2;
    float ss = 0;
    UNROLL for (int j = 0; j < PER; j++) {
        x[j] = lane + 32 * j < n ? src[lane + 32 * j] : 0;
        ss = fmaf(x[j], x[j], ss);
    }
    const float f = rsqrtf(warp_sum(ss) / (float)n + p.eps);
    const bool last = w && p.norm_last;
    auto factor = [&](int c) { return !w ? 1.0f : last ? f : f * w[c]; };
    UNROLL for (int j = 0; j < PER; j++) {
        const int c = lane + 32 * j, i = c - first;
        if (c >= n) continue;
        x[j] *= factor(c);
        if (i >= 0 && i < p.rope) {
            const bool low = p.pairs ? !(i & 1) : i < half; /* it comes first of the two */
            const int apart = p.pairs ? 1 : half, o = low ? c + apart : c - apart;
            const int r = p.pairs ? i >> 1 : low ? i : i - half;
            const float u = src[o] * factor(o); /* read again: cheaper than moving it between lanes */
            x[j] = low ? x[j] * cosine(r) - u * sine(r) : u * sine(r) + x[j] * cosine(r);
        }
        if (last) x[j] *= w[c];
    }
}

/* The same for token t of the batch. */
template <int PER>
DEVICE void rope_head(const struct rope_args &p, const float *src, const float *w, int n, int t, float x[PER],
                      int first = 0) {
    const float *cs = p.cs + (size_t)t * (p.rope / 2), *sn = p.sn + (size_t)t * (p.rope / 2);
    rope_head_by<PER>(
        p, src, w, n, [&](int i) { return cs[i]; }, [&](int i) { return sn[i]; }, x, first);
}

/* Writes the key (v false) or the value of token t and KV head i to the cache, with one warp. */
template <int PER, int FORM = ROWS_ANY>
DEVICE void gqa_store(const struct rope_args &p, int t, int i, bool v) {
    const int lane = threadIdx.x & 31, n = v ? p.dv : p.d;
    const struct cache_tensor &to = v ? p.vp : p.kp;
    const struct run &u = p.batch.run(t);
    const int row = run_row(u, to, run_base(u) + t);
    const float *src = v ? p.v + (size_t)t * p.v_stride : p.k + (size_t)t * p.k_stride;
    float x[PER];
    src += (size_t)i * n;
    if (v) {
        float ss = 0;
        UNROLL for (int j = 0; j < PER; j++) {
            x[j] = lane + 32 * j < n ? src[lane + 32 * j] : 0;
            ss = fmaf(x[j], x[j], ss);
        }
        const float f = p.v_norm ? rsqrtf(warp_sum(ss) / (float)n + p.eps) : 1.0f;
        UNROLL for (int j = 0; j < PER; j++) x[j] *= f;
    } else {
        rope_head<PER>(p, src, p.k_norm, n, t, x);
    }
    cache_store<PER, FORM>(to, (size_t)row, i * n, i, n, x);
}

/* GQA in prefill: norm and rotation of the heads of q and k, norm of v; k and v go to the cache. In decode attention does
 * it, unless heads are wide or keys are chosen.
 * Grid: (ceil((heads of q, k and v) / 4), n_tok), block: 128, one warp per head of at most 32 PER. Reads q, k, v once. */
template <int PER>
__global__ void __launch_bounds__(128) k_rope_gqa(struct rope_args p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = threadIdx.x & 31, h = blockIdx.x * 4 + (threadIdx.x >> 5), t = blockIdx.y;
    if (h >= p.n_head + 2 * p.n_head_kv) return;
    if (h >= p.n_head) {
        gqa_store<PER>(p, t, (h - p.n_head) % p.n_head_kv, h >= p.n_head + p.n_head_kv);
        return;
    }
    float x[PER];
    rope_head<PER>(p, p.q + (size_t)t * p.q_stride + (size_t)h * p.q_head, p.q_norm, p.d, t, x);
    const float f = query_factor(p, t);
    UNROLL for (int j = 0; j < PER; j++) if (lane + 32 * j < p.d)
        p.q16[((size_t)t * p.n_head + h) * p.d + lane + 32 * j] = clamped_f16(x[j] * f);
}

/* Attention with a bias by distance: what it reads is made first, see "Families: Inkling 2" of moe.c. */
struct rel_args {
    struct batch_ref batch;
    struct attn shape;
    const float *q, *rel; /* (n_tok, n_head, head_k), (n_tok, n_head, n_rel), tokens q_stride, rel_stride apart */
    size_t q_stride, rel_stride;
    const float *q_scale, *rel_scale; /* (n_head, head_k), (n_head, n_rel) */
    uint16_t *q16, *rel16;            /* (n_tok, n_head, head_k), (n_tok, n_head, n_rel) */
    struct short_conv conv[2];        /* of keys, of values: (n_tok, n_head_kv * head) */
    const float
        *taps[2];        /* with a window (values, n_conv), otherwise (n_conv, values of the whole model) by distance */
    const float *own[2]; /* without one (n_tok, n_head_kv, n_conv) taps of a token, tokens own_stride apart */
    size_t own_stride;
    struct cache_tensor to[2];
    bool keep; /* the rings get the tokens */
    float eps;
};

/* Queries and relative states of a head are scaled and clipped; keys and values are convolved, clipped or normed, and go
 * to the cache.
 * Grid: (ceil((2 n_head + 2 n_head_kv) / 4), n_tok), block: 128, one warp per head of at most REL_MAX. Reads its inputs
 * once, those under a convolution n_conv times. */
__global__ void __launch_bounds__(128) k_rel_prepare(const __grid_constant__ struct rel_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const struct attn &d = a.shape;
    const int lane = threadIdx.x & 31, item = (int)blockIdx.x * 4 + (threadIdx.x >> 5), t = (int)blockIdx.y;
    if (item >= 2 * (d.n_head + d.n_head_kv) || t >= a.batch.at->n_tok) return;
    const struct run &u = a.batch.run(t);
    const int pos = run_base(u) + t;
    float x[REL_PER], ss = 0;
    if (item < 2 * d.n_head) {
        const bool rel = item >= d.n_head;
        const int h = rel ? item - d.n_head : item, n = rel ? d.n_rel : d.head_k;
        const float *from = (rel ? a.rel + (size_t)t * a.rel_stride : a.q + (size_t)t * a.q_stride) + (size_t)h * n;
        const float *scale = (rel ? a.rel_scale : a.q_scale) + (size_t)h * n;
        uint16_t *to = (rel ? a.rel16 : a.q16) + ((size_t)t * d.n_head + h) * n;
        UNROLL for (int j = 0; j < REL_PER; j++) {
            x[j] = lane + 32 * j < n ? from[lane + 32 * j] * scale[lane + 32 * j] : 0;
            ss = fmaf(x[j], x[j], ss);
        }
        float f = fminf(1.0f, (rel ? d.rel_clip : d.qk_clip) / (sqrtf(warp_sum(ss)) + 1e-6f));
        if (d.temp_scale != 0) f *= 1 + d.temp_scale * logf(fmaxf((float)(pos + 1) / (float)d.temp_length, 1.0f));
        if (rel) f *= ATTN_LOG2_E;
        UNROLL for (int j = 0; j < REL_PER; j++) if (lane + 32 * j < n) to[lane + 32 * j] = clamped_f16(x[j] * f);
        return;
    }
    const int kv = item - 2 * d.n_head, v = kv >= d.n_head_kv, h = v ? kv - d.n_head_kv : kv,
              n = v ? d.head_v : d.head_k;
    const struct short_conv &c = a.conv[v];
    const bool full = !d.window;
    const size_t whole = (size_t)d.whole_head_kv * n, first = (size_t)d.first_head_kv * n;
    const float f = 1.0f / sqrtf((float)((full ? 2 : 1) * c.n_conv + 1));
    UNROLL for (int j = 0; j < REL_PER; j++) x[j] = 0;
    UNROLL_BY(1) for (int k = 0; k < c.n_conv && k <= pos; k++) {
        const float *from = conv_row(c, u, t, pos, pos - k) + (size_t)h * n;
        const float base = (k ? 0.0f : 1.0f) + (full ? a.own[v][(size_t)t * a.own_stride + h * c.n_conv + k] : 0.0f);
        float *kept = !k && a.keep ? ring_at(u, c.ring, pos) + (size_t)h * n : NULL;
        UNROLL for (int j = 0; j < REL_PER; j++) {
            const int i = lane + 32 * j;
            if (i >= n) continue;
            const float tap = full ? a.taps[v][k * whole + first + (size_t)(h * n + i)]
                                   : a.taps[v][(size_t)(h * n + i) * c.n_conv + (c.n_conv - 1 - k)];
            x[j] = fmaf(base + tap, from[i], x[j]);
            if (kept) kept[i] = from[i];
        }
    }
    UNROLL for (int j = 0; j < REL_PER; j++) {
        x[j] *= f;
        ss = fmaf(x[j], x[j], ss);
    }
    ss = warp_sum(ss);
    const float unit = v ? rsqrtf(ss / (float)n + a.eps) : fminf(1.0f, d.qk_clip / (sqrtf(ss) + 1e-6f));
    UNROLL for (int j = 0; j < REL_PER; j++) x[j] *= unit;
    cache_store<REL_PER>(a.to[v], (size_t)run_row(u, a.to[v], pos), h * n, h, n, x);
}

/* Rotates neighbors 2i and 2i + 1 of a head, v, against each other (DeepSeek). */
DEVICE float2 rope_pair(const struct rope_args &p, float2 v, int t, int i) {
    const float c = p.cs[(size_t)t * (p.rope / 2) + i], s = p.sn[(size_t)t * (p.rope / 2) + i];
    return make_float2(v.x * c - v.y * s, v.x * s + v.y * c);
}

/* The rotated part of head h's query of token t, to q_rope, with threads i0, i0 + step, .. */
DEVICE void mla_rotate(const struct rope_args &p, int t, int h, int i0, int step) {
    const float *q = p.q + (size_t)t * p.q_stride + (size_t)h * p.d + p.nope;
    uint16_t *to = p.q_rope + ((size_t)t * p.n_head + h) * (p.latent + p.rope) + p.latent;
    const float f = query_factor(p, t);
    for (int i = i0; i < p.rope / 2; i += step) {
        const float2 y = rope_pair(p, ((const float2 *)q)[i], t, i);
        ((uint32_t *)to)[i] = clamped_f16x2(y.x * f, y.y * f);
    }
}

/* Norm of the latents, and norm and rotation of the shared key of token t, both to the cache, with one block of
 * THREADS. */
template <int THREADS>
DEVICE void mla_store(const struct rope_args &p, int t) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float *k = p.k + (size_t)t * p.k_stride;
    const struct run &u = p.batch.run(t);
    const size_t row = (size_t)run_row(u, p.kp, run_base(u) + t);
    float ss = 0;
    for (int i = threadIdx.x; i < p.latent; i += THREADS) ss = fmaf(k[i], k[i], ss);
    const float f = rsqrtf(block_sum<THREADS>(ss) / (float)p.latent + p.eps);
    for (int g = warp; g * LATENT_GROUP < p.latent; g += THREADS / WARP) {
        float x[LATENT_GROUP / 32];
        const int n = min((int)LATENT_GROUP, p.latent - g * LATENT_GROUP);
        UNROLL for (int j = 0; j < LATENT_GROUP / 32; j++) {
            const int c = g * LATENT_GROUP + lane + 32 * j;
            x[j] = lane + 32 * j < n ? k[c] * f * p.k_norm[c] : 0;
        }
        cache_store<LATENT_GROUP / 32>(p.kp, row, g * LATENT_GROUP, g, n, x);
    }
    const float *shared = k + p.latent;
    float square = 0;
    for (int i = lane; i < p.rope && p.shared_norm; i += WARP) square = fmaf(shared[i], shared[i], square);
    const float by = p.shared_norm ? rsqrtf(warp_sum(square) / (float)p.rope + p.eps) : 1.0f;
    for (int i = threadIdx.x; i < p.rope / 2; i += THREADS) {
        float2 v = ((const float2 *)shared)[i];
        if (p.shared_norm) {
            const float2 weight = ((const float2 *)p.shared_norm)[i];
            v = make_float2(v.x * by * weight.x, v.y * by * weight.y);
        }
        const float2 y = rope_pair(p, v, t, i);
        ((uint32_t *)(p.vp.data + row * p.vp.row_bytes))[i] = f32_to_bf16x2(y.x, y.y);
    }
}

/* MLA in prefill: latents and shared key to the cache (block x = 0); the heads of q are split into the part for wk_b
 * and the rotated part.
 * Grid: (1 + ceil(n_head / 4), n_tok), block: 128. Reads q and k once. */
__global__ void __launch_bounds__(128) k_rope_mla(struct rope_args p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = threadIdx.x & 31, t = blockIdx.y, h = ((int)blockIdx.x - 1) * 4 + (int)(threadIdx.x >> 5);
    if (!blockIdx.x) {
        mla_store<128>(p, t);
        return;
    }
    if (h >= p.n_head) return;
    const float *q = p.q + (size_t)t * p.q_stride + (size_t)h * p.d;
    uint16_t *to = p.q16 + ((size_t)t * p.n_head + h) * p.d;
    const float f = query_factor(p, t);
    for (int i = lane; i < p.nope; i += WARP) to[i] = clamped_f16(q[i] * f);
    mla_rotate(p, t, h, lane, WARP);
}

struct mla_query_args {
    struct rope_args rope;
    struct device_matrix w; /* wk_b: for each head (latent, nope) */
    int n_tok;
};

/* Returns how many of a block's warps share a row of n_kt tiles. */
__host__ __device__ inline int mla_query_warps(int n_kt) { return n_kt >= 8 ? 8 : n_kt >= 4 ? 4 : n_kt >= 2 ? 2 : 1; }

/* MLA in decode: every head's query in the latent space and its rotated part, to q_rope; and the new rows of the cache,
 * by the blocks after the last head.
 * Grid: (rows of tiles / (8 / mla_query_warps), n_head + 1), block: 256. Bytes and aim as for k_gemv_linear. */
template <int NT>
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_mla_query(const __grid_constant__ struct mla_query_args p) {
    SHARED(float, red, GEMV_WARPS * 8 * NT * SUM_PITCH);
    DYN_SMEM(uint16_t, x); /* (n_tok, stride) the head's queries without the rotated part */
    grid_dependency_launch();
    const struct rope_args &r = p.rope;
    const int tid = threadIdx.x, warp = tid >> 5, h = blockIdx.y;
    if (h == r.n_head) {
        grid_dependency_wait();
        for (int t = blockIdx.x; t < p.n_tok; t += (int)gridDim.x) {
            mla_store<GEMV_THREADS>(r, t);
            __syncthreads(); /* the next row's block_sum overwrites this one's */
        }
        return;
    }
    const int part = mla_query_warps(p.w.n_kt), tiles = GEMV_WARPS / part, rt0 = blockIdx.x * tiles;
    const int k0 = p.w.n_kt * (warp % part) / part, k1 = p.w.n_kt * (warp % part + 1) / part;
    const int rt = min(rt0 + warp / part, p.w.n_rt - 1), stride = p.w.n_kt * TILE_COLS + 32;
    const struct gemv_one one = {tile_index(p.w, h, rt), x, (size_t)stride, p.n_tok};
    float acc[NT][4] = {};
    with_format(p.w.fmt, [&](auto fmt) {
        auto ready = [&] {
            grid_dependency_wait();
            for (int i = tid; i < p.n_tok * stride; i += GEMV_THREADS) {
                const int t = i / stride, c = i % stride;
                x[i] = c < r.nope ? clamped_f16(r.q[(size_t)t * r.q_stride + h * r.d + c]) : (uint16_t)0;
            }
            for (int t = blockIdx.x; t < p.n_tok; t += (int)gridDim.x) mla_rotate(r, t, h, tid, GEMV_THREADS);
            __syncthreads(); /* the head's queries have come */
        };
        gemv_stream<fmt.value, NT>(p.w, k0, k1, one, ready, acc);
    });
    gemv_store<NT>(gemv_warp_sums<NT>(red), acc, device_matrix_scale(p.w, h), false);
    __syncthreads(); /* the sums of all warps are written */
    for (int i = tid; i < p.n_tok * tiles * TILE_ROWS; i += GEMV_THREADS) {
        const int t = i / (tiles * TILE_ROWS), j = i % (tiles * TILE_ROWS), row = rt0 * TILE_ROWS + j;
        if (row < p.w.n_out)
            r.q_rope[((size_t)t * r.n_head + h) * (r.latent + r.rope) + row] = clamped_f16(
                gemv_sum<NT>(red, t * TILE_ROWS + j % TILE_ROWS, j / TILE_ROWS * part, part) * query_factor(r, t));
    }
}

/* Launches k_mla_query. */
static void mla_query(const struct mla_query_args *p, cudaStream_t s) {
    const int tiles = GEMV_WARPS / mla_query_warps(p->w.n_kt);
    const size_t smem = (size_t)(p->n_tok * (p->w.n_kt * TILE_COLS + 32)) * sizeof(uint16_t);
    const dim3 grid((unsigned)((p->w.n_rt + tiles - 1) / tiles), (unsigned)p->rope.n_head + 1);
    if (p->n_tok <= 8) LAUNCH_PDL(k_mla_query<1>, grid, GEMV_THREADS, smem, s, *p);
    else LAUNCH_PDL(k_mla_query<2>, grid, GEMV_THREADS, smem, s, *p);
}

/* ============================================================================================================
 * Attention over the KV cache
 *
 * Query rows that share keys are computed together: row = token * group_heads + head, where `group_heads` heads read
 * one KV head (MLA: all heads read the one latent). Keys come in tiles. Each tile updates the running maximum m, the
 * denominator l and the weighted sum of values of every row (online softmax, base 2). The context is cut into splits,
 * so that the blocks fill the GPU: each split leaves (sums, m, l) in `partials`, and attn_merge joins them. Query token
 * i sees keys 0 .. pos + i, or with a window the last of these. Keys after the newest are never read: they arrive as
 * zeros. Keys before a window are masked as far as the step of 64 keys that it begins in. Decode does not read those
 * that no row of a tile sees: in a ring other blocks of the launch may be writing their rows. In a ring a step of keys
 * is consecutive rows: rings have a multiple of 64 rows. A head's sink joins the denominator of its result.
 *
 * MMA operands (g = lane / 4, t = lane % 4): the order of the inner dimension is free as long as both operands use it,
 * and so is the order of the output columns. Decode chooses both so that a lane reads consecutive bytes of a cache row
 * and converts them in registers. Prefill has more rows per key: it converts each tile once, to f16 in shared memory.
 * ============================================================================================================ */

struct attn_args {
    const uint16_t *q;        /* (n_tok, n_head, dk) f16, tokens q_stride halves apart */
    uint16_t *out;            /* (n_tok, n_head, dv) f16, tokens out_stride halves apart; NULL: only partials */
    float *partials;          /* (max_splits, min(n_tok, DECODE_MAX_TOKENS), n_head, dv + 2): sums, then all (m, l) */
    struct cache_tensor k, v; /* MLA: latents, rotated keys */
    struct batch_ref batch;   /* its n_tok may be less than n_tok below: later rows are left alone */
    int n_tok, n_head, n_head_kv, dk, dv; /* MLA: n_head_kv = 1, dk = latents + rotated part, dv = latents */
    size_t q_stride, out_stride;
    float scale;        /* of q.k before the softmax */
    int window;         /* keys that a token sees, its own and those before it; 0: all */
    int window_shift;   /* window: a split has the keys between multiples of 2^window_shift; 0: there is one split */
    const float *sinks; /* (n_head) logits in the softmax that no value belongs to, those of tokens sink_stride apart;
                         * NULL: none */
    size_t sink_stride;
    int max_splits;    /* at most */
    const float *gate; /* of head h of token t, at gate + t * gate_stride + h * gate_head: (dv), or one; NULL: none */
    size_t gate_stride;
    int gate_head;
    bool gate_one, softplus; /* gates of decode alone: there is one for a head; it is not a sigmoid's */
    bool chunked;            /* of struct attn; window % GPU_CHUNK == 0 */
    /* decode of GQA */
    struct rope_args rope;       /* what q is made of, and the new rows of the cache */
    uint32_t *arrived;           /* (rows of blocks, ATTN_COUNTERS) count blocks; 0 between launches: see attn_join */
    struct l2_prefetch prefetch; /* decode */
    /* chosen keys */
    int top_k;             /* that a token sees at most; 0: all */
    const int32_t *chosen; /* (n_tok, n_head_kv, n_topk) blocks of block.n keys, of tokens with more than top_k */
    int n_topk, block_end; /* BLOCK_END or POOL_END */
    struct divisor block;
    /* attention of one KV head: v has the compressed keys; the last rope.rope values of a result are rotated back by
     * rope.cs and rope.sn */
    bool one_kv;
    int compress_ratio; /* tokens of a compressed key, 0: there are none */
    /* attention with a bias by distance */
    const uint16_t *rel; /* (n_tok, n_head, n_rel) relative states, times log2 e, in halves; NULL: there is no bias */
    const float *bank;   /* (n_rel, extent) what they make a bias of */
    int n_rel, extent;
};

enum {
    ATTN_SPLIT_KEYS = 64, /* a split has a multiple of this many keys */
    ATTN_GROUP = 128,     /* latents under one FP8 scale */
    ATTN_JOIN = 16,       /* splits that a block joins at once */
    MLA_WINDOW_ROWS = 16, /* rows of a tile of latent attention with a window */
    ATTN_SMEM = 48 << 10  /* two blocks fit the 100 KB of an SM of SM120 */
};
static_assert(GPU_CHUNK % ATTN_SPLIT_KEYS == 0, "a chunk begins with a step, and a tile of rows is of two at most");
#define ATTN_NO_KEY (-1e30f) /* maximum of a row without a key: finite, so that differences are never NaN */
#define ATTN_P      256.0f   /* factor of the softmax weights before they become f16: V's FP8 scale makes them small */

/* N values that are loaded or stored at once. */
template <int N, class T = uint32_t>
struct alignas(N * sizeof(T)) pack {
    T x[N];
};
using floats4 = pack<4, float>;

/* The work of one block: rows of a tile of KV head kvh, over keys begin..end-1. */
struct attn_work {
    int kvh, group_heads, row0; /* group_heads: query heads per KV head; row0: the tile's first row */
    uint32_t rows;              /* the tile's rows that count: from row rows % 65536 on, as far as row rows / 65536 */
    int pos, from, seen;        /* pos: of row 0 of the batch; all rows of the tile see keys from..seen-1 */
    int fresh;                  /* position of the run's first token: keys from it on are this forward's */
    struct run_rows k, v;       /* of a.k, of a.v */
    int low;                    /* no row of the tile sees a key before it */
    int split, n_split, begin, end;
    /* keys from `wrap` on, in a ring those of the next turn, otherwise those after the stem, lie `late` rows before the
     * row of their number, and keys before it `early` rows */
    int wrap, early, late;
    const int32_t
        *chosen; /* blocks of block.n rows of the cache tensor, of which keys begin..end-1 are meant; NULL: keys are
                              rows */
    struct divisor block;
    int window, first; /* attention of one KV head: the first so many keys are those of positions from `first` on */
    float factor;      /* scale * log2 e, for a softmax of base 2 */
};

/* Returns the keys of a split for a row that sees `len` keys. In decode it depends on nothing else, so that the row's
 * bits do not depend on the other rows. */
DEVICE int attn_split_keys(const struct attn_args &a, int len) {
    const int tiles = (len + ATTN_SPLIT_KEYS - 1) / ATTN_SPLIT_KEYS;
    return (tiles + a.max_splits - 1) / a.max_splits * ATTN_SPLIT_KEYS;
}

/* Returns the first token of a decode forward that has more keys a split than the first token has; n_tok: none has. */
DEVICE int attn_longer(const struct attn_args &a, int pos, int n_tok) {
    if (a.max_splits == 1 || a.n_tok > DECODE_MAX_TOKENS) return n_tok;
    return min(n_tok, attn_split_keys(a, pos + 1) * a.max_splits - pos);
}

/* Returns the first token from t on that is in another chunk than t; n_tok: there is none. */
DEVICE int attn_next_chunk(const struct attn_args &a, int pos, int t, int n_tok) {
    return a.chunked ? min(n_tok, t + a.window - (pos + t) % a.window) : n_tok;
}

/* Finds the keys of a block's split where there is a window. end: after the last key that a row of the tile sees.
 * Splits lie between fixed positions, so that a row's bits do not depend on the other rows. The rows of a block are of
 * one chunk, which begins with a step: no other key is in the steps that they see. */
DEVICE void attn_window(struct attn_work *w, const struct attn_args &a, int end) {
    w->low = a.chunked ? (w->seen - 1) / a.window * a.window : max(w->seen - a.window, 0);
    const int begin = w->low / ATTN_SPLIT_KEYS * ATTN_SPLIT_KEYS;
    const int shift = a.window_shift ? a.window_shift : 31, first = begin >> shift, split = first + w->split;
    w->from = end - a.window;
    w->n_split = ((end - 1) >> shift) + 1 - first;
    w->begin = w->split ? split << shift : begin;
    w->end = w->split + 1 < w->n_split ? (split + 1) << shift : end;
}

/* Sets where the tile of a run finds its keys. */
DEVICE void attn_run_of(struct attn_work *w, const struct attn_args &a, const struct run &u) {
    w->pos = run_base(u);
    w->fresh = u.pos;
    w->k = run_rows_of(u, a.k);
    w->v = run_rows_of(u, a.v);
}

/* Sets wrap, early and late of a block whose keys are not chosen. */
DEVICE void attn_rows_of(struct attn_work *w, const struct attn_args &a, bool ring) {
    const int turn = ring ? w->begin / a.k.n_row * a.k.n_row : 0;
    w->wrap = ring ? turn + a.k.n_row : w->k.stem;
    w->early = ring ? turn - w->k.shift : 0;
    w->late = ring ? w->wrap - w->k.shift : -w->k.shift;
}

/* Returns the position of key `key` of a list of blocks of block.n keys. */
DEVICE int key_of_blocks(const int32_t *list, const struct divisor &block, int key) {
    const int at = block.of(key);
    return key + (list[at] - at) * block.n;
}

/* The same of a list of one key each or (BLOCKS) of blocks of w.block.n. */
template <bool BLOCKS>
DEVICE int attn_chosen(const struct attn_work &w, int key) {
    return BLOCKS ? key_of_blocks(w.chosen, w.block, key) : w.chosen[key];
}

/* Returns by how many rows key `key`, the first of a step, lies before row `key` of its cache tensor. CHOSEN: there
 * are no rings, and a step is 16 keys of one block. */
template <bool CHOSEN>
DEVICE int attn_back(const struct attn_work &w, int key) {
    if (!CHOSEN) return key < w.wrap ? w.early : w.late;
    return key - w.k.at(w.chosen && key < w.end ? attn_chosen<true>(w, key) : key);
}

/* Waits for the kernels before and finds the block's work. Grid: (splits, row tiles * KV heads, 2; of one token or
 * several runs 1, of prefill or a window 1 unless it is chunked): z = 0 has the rows of the tokens before attn_longer or
 * attn_next_chunk, z = 1 the others. Of several runs a tile has rows of one token, which are split as if the token were
 * alone. Returns false if there is no work. Rows that see the most keys start first. FORMS: there may be a window or a
 * ring. DECODE: it may be decode. */
template <bool FORMS, bool DECODE>
DEVICE bool attn_begin(struct attn_work *w, const struct attn_args &a, int tile_rows) {
    grid_dependency_launch();
    grid_dependency_wait();
    const bool rest = (DECODE || FORMS) && blockIdx.z, window = FORMS && a.window;
    const bool ring = FORMS && a.k.kind == ROWS_RING;
    const int y = (int)(gridDim.y - 1 - blockIdx.y), n_tok = min(a.batch.at->n_tok, a.n_tok);
    const int group_heads = a.n_head / a.n_head_kv;
    int first_row = 0, last_tok;
    w->group_heads = group_heads;
    w->kvh = y % a.n_head_kv;
    if (DECODE && a.batch.several) {
        const int tiles = (group_heads + tile_rows - 1) / tile_rows, t = y / a.n_head_kv / tiles;
        attn_run_of(w, a, a.batch.run(min(t, n_tok - 1)));
        w->row0 = t * group_heads + y / a.n_head_kv % tiles * tile_rows;
        last_tok = t < n_tok ? t + 1 : 0;
    } else {
        attn_run_of(w, a, a.batch.at->run[0]);
        w->row0 = y / a.n_head_kv * tile_rows;
        const int longer = window   ? attn_next_chunk(a, w->pos, w->row0 / group_heads, n_tok)
                           : DECODE ? attn_longer(a, w->pos, n_tok)
                                    : n_tok;
        last_tok = rest ? n_tok : longer;
        first_row = rest ? longer * group_heads : 0;
    }
    first_row = max(first_row, w->row0);
    const int end_row = min(w->row0 + tile_rows, last_tok * group_heads),
              end = w->pos + (end_row - 1) / group_heads + 1;
    w->rows = (uint32_t)(first_row - w->row0) | (uint32_t)max(end_row - w->row0, 0) << 16;
    w->split = (int)blockIdx.x;
    w->seen = w->pos + first_row / group_heads + 1;
    w->factor = a.scale * ATTN_LOG2_E;
    if (window) {
        attn_window(w, a, end);
    } else {
        const int keys = attn_split_keys(a, w->pos + last_tok);
        w->n_split = (w->pos + last_tok + keys - 1) / keys;
        w->from = w->low = 0;
        w->begin = w->split * keys;
        w->end = min(w->begin + keys, end);
    }
    attn_rows_of(w, a, ring);
    return w->split < w->n_split && first_row < end_row;
}

/* Returns how many keys the token at `pos` sees where keys are chosen. end: BLOCK_END, its own block ends with it;
 * POOL_END, the unfinished pool, which follows the chosen ones, has the keys after the last complete pool. */
enum { BLOCK_END = 0, POOL_END = 1 };
DEVICE int attn_seen(const struct attn_args &a, int pos, int end) {
    return min(pos + 1, a.top_k + 1 - a.block.n + a.block.rest(pos + end));
}

/* The same for attention with one KV head: keys of its window, then compressed keys, of which *compressed is the number
 * that there are. */
DEVICE int attn_csa_keys(const struct attn_args &a, int pos, int *compressed) {
    *compressed = a.compress_ratio ? (pos + 1) / a.compress_ratio : 0;
    return min(pos + 1, a.window) + (a.top_k ? min(*compressed, a.top_k) : *compressed);
}

/* Returns how many keys count for the split of the context of row t of the batch, of n_tok rows. ONE_KV: there may be
 * one KV head. */
template <bool ONE_KV>
DEVICE int attn_keys(const struct attn_args &a, int t, int n_tok) {
    const int pos = run_base(a.batch.run(t));
    int compressed;
    if (ONE_KV && a.one_kv) return attn_csa_keys(a, pos + t, &compressed);
    if (a.top_k) return attn_seen(a, pos + t, a.block_end);
    if (a.batch.several) return pos + t + 1;
    const int longer = attn_longer(a, pos, n_tok);
    return pos + (t < longer ? longer : n_tok);
}

/* The same as attn_begin where tokens see keys of a list, each its own: a tile has rows of one token and KV head.
 * ONE_KV: the list is that of attn_csa_keys. END: see attn_seen.
 * Grid: (splits, n_tok * row tiles of a token and KV head * KV heads). */
template <bool ONE_KV, int END>
DEVICE bool attn_begin_topk(struct attn_work *w, const struct attn_args &a, int tile_rows) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int group_heads = a.n_head / a.n_head_kv, tiles = (group_heads + tile_rows - 1) / tile_rows;
    const int y = (int)(gridDim.y - 1 - blockIdx.y), kvh = y % a.n_head_kv, t = y / a.n_head_kv / tiles;
    const int n_tok = min(a.batch.at->n_tok, a.n_tok), head = y / a.n_head_kv % tiles * tile_rows;
    attn_run_of(w, a, a.batch.run(min(t, n_tok - 1)));
    const int pos = w->pos;
    int compressed = 0;
    const int keys = ONE_KV ? attn_csa_keys(a, pos + t, &compressed) : attn_seen(a, pos + t, END);
    const int per_split = attn_split_keys(a, keys);
    w->group_heads = group_heads;
    w->kvh = kvh;
    w->row0 = t * group_heads + head;
    w->rows = (uint32_t)min(tile_rows, group_heads - head) << 16;
    w->pos = keys - 1 - t; /* so that token t sees the whole list */
    w->seen = keys;
    w->from = 0;
    w->split = (int)blockIdx.x;
    w->n_split = (keys + per_split - 1) / per_split;
    w->begin = w->split * per_split;
    w->end = min(w->begin + per_split, keys);
    w->factor = a.scale * ATTN_LOG2_E;
    const bool list = ONE_KV ? a.top_k && compressed > a.top_k : pos + t >= a.top_k;
    const int of = END == POOL_END ? t : t * a.n_head_kv + kvh; /* with pools all KV heads have one list */
    w->chosen = list ? a.chosen + (size_t)of * a.n_topk : NULL;
    w->block = a.block;
    w->window = min(pos + t + 1, a.window);
    w->first = pos + t + 1 - w->window;
    return w->split < w->n_split && t < n_tok;
}

/* Returns token and head of row r of the block's tile; token -1: there is no such row. */
DEVICE int2 attn_row(const struct attn_work &w, int r) {
    if (r < (int)(w.rows & 0xFFFF) || r >= (int)(w.rows >> 16)) return make_int2(-1, 0);
    return make_int2((w.row0 + r) / w.group_heads, w.kvh * w.group_heads + (w.row0 + r) % w.group_heads);
}

/* Finds, for this lane's rows r and r + 8, their queries (NULL: no such row) and the number of keys that they see. */
DEVICE void attn_rows(const uint16_t *q[2], int limit[2], const struct attn_args &a, const struct attn_work &w, int r) {
    UNROLL for (int h = 0; h < 2; h++) {
        int2 th = attn_row(w, r + 8 * h);
        q[h] = th.x < 0 ? NULL : a.q + th.x * a.q_stride + (size_t)th.y * a.dk;
        limit[h] = th.x < 0 ? 0 : w.pos + th.x + 1;
    }
}

/* Loads the A operands of a chunk, those of RUN / 4 k16-steps: elements at..at+RUN-1 of this lane's two rows.
 * permuted: the rows' 16-byte pieces are, by the exclusive or with it. */
template <int RUN>
DEVICE void attn_chunk(pack<4> f[RUN / 4], const uint16_t *const q[2], int at, int permuted = 0) {
    constexpr int N = RUN < 8 ? RUN : 8;
    UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < RUN; i += N) {
        pack<N / 2> x = {};
        if (q[h]) x = *(const pack<N / 2> *)(q[h] + ((at + i) ^ permuted * 8));
        UNROLL for (int k = 0; k < N / 4; k++) {
            f[i / 4 + k].x[h] = x.x[2 * k];
            f[i / 4 + k].x[h + 2] = x.x[2 * k + 1];
        }
    }
}

/* The k16-steps of Q as A operands: the first REG in registers, the others in shared memory. */
template <int REG>
struct attn_steps {
    pack<4> reg[REG];
    uint8_t *rest; /* this lane's 16 bytes of step REG; steps are 512 bytes apart */
    DEVICE_MEMBER pack<4> &at(int s) { return s < REG ? reg[s] : *(pack<4> *)(rest + (s - REG) * 512); }
};

/* Converts a word of the cache to f16: FP8 to two words, BF16 to one. */
template <int FP8>

/* ============================================================================================================
 * Attention: reading the cache
 *
 * Rows of the cache become fragments of MMAs, and scores become weights.
 * ============================================================================================================ */

DEVICE void kv_word(uint32_t *h, uint32_t w) {
    if constexpr (FP8) {
        h[0] = e4m3x2_to_f16x2((uint16_t)w);
        h[1] = e4m3x2_to_f16x2((uint16_t)(w >> 16));
    } else {
        h[0] = clamped_f16x2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
    }
}

/* Loads N consecutive values of the cache as f16. */
template <int FP8, int N>
DEVICE pack<N / 2> kv_values(const uint8_t *p) {
    constexpr int W = FP8 ? N / 4 : N / 2;
    pack<W> w = *(const pack<W> *)p;
    pack<N / 2> h;
    UNROLL for (int i = 0; i < W; i++) kv_word<FP8>(h.x + i * (N / 2 / W), w.x[i]);
    return h;
}

/* Loads four consecutive values of two cache rows, interleaved: h[j] = (p[j], q[j]). */
template <int FP8>
DEVICE void kv_pairs(uint32_t h[4], const uint8_t *p, const uint8_t *q) {
    constexpr int W = FP8 ? 1 : 2;
    pack<W> x = *(const pack<W> *)p, y = *(const pack<W> *)q;
    UNROLL for (int i = 0; i < W; i++) {
        kv_word<FP8>(h + 2 * i, __byte_perm(x.x[i], y.x[i], FP8 ? 0x5140 : 0x5410));
        kv_word<FP8>(h + 2 * i + 1 + FP8, __byte_perm(x.x[i], y.x[i], FP8 ? 0x7362 : 0x7632));
    }
}

/* Values that a lane loads at once along an inner dimension of `width`: 16 bytes where possible. Four lanes make a
 * chunk. */
__host__ __device__ constexpr int kv_run(int fp8, int width) {
    if (fp8 && width % 64 == 0) return 16;
    return width % 32 == 0 ? 8 : 4;
}

/* Returns where byte `at` of row `row` lies in a tile with rows of ROW bytes. Its 16-byte pieces are permuted: neither
 * 8 lanes that read 64 bytes of two neighboring rows (keys), nor 4 x 8 lanes that read 32 bytes of every other row
 * (values), meet in a bank. */
template <int ROW>
DEVICE int kv_at(int row, int at) {
    constexpr int short_mask = ROW == 64 ? 3 : 0, mask = ROW % 128 == 0 ? 7 : short_mask;
    return row * ROW + (at ^ (((row & 6) ^ (row & 1) << 2) & mask) << 4);
}

/* Starts to copy the rows of keys key..key+N-1, which are rows key - back.. of the cache tensor: ROW bytes each, from
 * byte `first` of a row; zeros before key `low` and from key `len` > low on. With LANES threads, of which this is
 * `lane`. */
template <int ROW, int N, int LANES>
DEVICE void kv_copy(uint8_t *to, const struct cache_tensor &p, int first, int key, int back, int low, int len,
                    int lane) {
    constexpr int PIECES = ROW / 16, STEP = LANES / PIECES, PASSES = (N + STEP - 1) / STEP;
    int row = lane / PIECES, at = lane % PIECES * 16;
    const uint8_t *from = p.data + (size_t)(key - back + row) * p.row_bytes + first + at;
    UNROLL_BY(PASSES > 8 ? 1 : 4)
    for (int i = 0; i < PASSES; i++, row += STEP, from += STEP * p.row_bytes)
        if ((N % STEP == 0 || row < N) && (LANES % PIECES == 0 || lane < STEP * PIECES))
            cp_async16(to + kv_at<ROW>(row, at), from, (uint32_t)(key + row - low) < (uint32_t)(len - low));
}

/* The same for chosen keys, blocks of one or (POOLS) of w.block.n; first: the byte of a row. */
template <int ROW, int N, int LANES, bool POOLS>
DEVICE void kv_gather(uint8_t *to, const struct cache_tensor &p, int first, const struct attn_work &w, int key,
                      int lane) {
    constexpr int PIECES = ROW / 16, STEP = LANES / PIECES, PASSES = (N + STEP - 1) / STEP;
    int row = lane / PIECES, at = lane % PIECES * 16;
    UNROLL_BY(PASSES > 8 ? 1 : 4)
    for (int i = 0; i < PASSES; i++, row += STEP)
        if ((N % STEP == 0 || row < N) && (LANES % PIECES == 0 || lane < STEP * PIECES)) {
            const bool in = key + row < w.end;
            const int from = w.k.at(in && w.chosen ? attn_chosen<POOLS>(w, key + row) : key + row);
            cp_async16(to + kv_at<ROW>(row, at), p.data + (size_t)from * p.row_bytes + first + at, in);
        }
}

/* Returns the row of a key of attention with one KV head, and its cache tensor. */
DEVICE int csa_row(const struct attn_args &a, const struct attn_work &w, int key, const struct cache_tensor **p) {
    const bool window = key < w.window;
    *p = window ? &a.k : &a.v;
    if (window) return a.k.kind == ROWS_RING ? w.k.shift + (w.first + key) % a.k.n_row : w.k.at(w.first + key);
    return w.v.at(w.chosen ? w.chosen[key - w.window] : key - w.window);
}

/* The same as kv_gather for its keys. */
template <int ROW, int N, int LANES>
DEVICE void kv_gather_csa(uint8_t *to, const struct attn_args &a, const struct attn_work &w, int key, int lane) {
    constexpr int PIECES = ROW / 16, STEP = LANES / PIECES, PASSES = (N + STEP - 1) / STEP;
    int row = lane / PIECES, at = lane % PIECES * 16;
    UNROLL_BY(PASSES > 8 ? 1 : 4)
    for (int i = 0; i < PASSES; i++, row += STEP)
        if ((N % STEP == 0 || row < N) && (LANES % PIECES == 0 || lane < STEP * PIECES)) {
            const bool in = key + row < w.end;
            const struct cache_tensor *p;
            const int from = csa_row(a, w, in ? key + row : 0, &p);
            cp_async16(to + kv_at<ROW>(row, at), p->data + (size_t)from * p->row_bytes + at, in);
        }
}

/* Returns FP8 scale number scale_index of a key, in row key - back; 0 before key `low` and from key `len` > low on. */
DEVICE float kv_scale(const struct cache_tensor &p, int key, int back, int scale_index, int low, int len) {
    return (uint32_t)(key - low) < (uint32_t)(len - low) ? p.scale[(size_t)(key - back) * p.n_scale + scale_index]
                                                         : 0.0f;
}

/* Factors of a key, which is in row key - back: of its scores (v false), and of its softmax weights (v true), clamped
 * to fit f16. scale: of the FP8 cache. */
DEVICE float attn_v_factor(float scale) { return fminf(ATTN_P * scale, 65504.0f); }
template <int FP8>
DEVICE float attn_factor(const struct attn_args &a, const struct attn_work &w, bool v, int key, int back, int low) {
    float scale = 1.0f;
    if (FP8) scale = kv_scale(v ? a.v : a.k, key, back, w.kvh, low, w.end);
    return v ? attn_v_factor(scale) : w.factor * scale;
}

/* Multiplies the scores s of keys key and key + 1 by their factors (base 2), and makes them -inf where the row does not
 * see the key: of the keys before limit it sees the last `window`, or all where WINDOW is false. all: every row sees
 * both. */
template <bool WINDOW>
DEVICE void attn_mask(float s[4], int key, float f0, float f1, const int limit[2], int window, bool all) {
    UNROLL for (int e = 0; e < 4; e++) s[e] *= e & 1 ? f1 : f0;
    if (!all) UNROLL for (int e = 0; e < 4; e++) {
            const int k = key + (e & 1), end = limit[e >> 1];
            const bool sees = WINDOW ? (uint32_t)(end - 1 - k) < (uint32_t)window : k < end;
            s[e] = sees ? s[e] : -INFINITY;
        }
}
/* The window of a mask. */
DEVICE int attn_span(const struct attn_args &a) { return a.window ? a.window : INT_MAX; }

/* One step of the online softmax for a warp's 16 rows: scores s (16, 8 NT) become weights 2^(s - m), and acc (16, 8 NA)
 * follows the new maximum. l sums over this lane's columns only. */
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
        UNROLL for (int h = 0; h < 2; h++) {
            l[h] *= f[h];
            m[h] = top[h];
        }
        UNROLL for (int n = 0; n < NA; n++) UNROLL for (int e = 0; e < 4; e++) acc[n][e] *= f[e >> 1];
    }
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int e = 0; e < 4; e++) {
        s[n][e] = exp2_fast(s[n][e] - m[e >> 1]);
        l[e >> 1] += s[n][e];
    }
}

/* Makes the A operand of P V: the weights of 16 keys (two n8-tiles, at most 1) times the factors f of this lane's 4
 * keys. */
DEVICE void attn_weights(uint32_t p[4], const float s0[4], const float s1[4], const float f[4]) {
    p[0] = f32_to_f16x2(s0[0] * f[0], s0[1] * f[1]);
    p[1] = f32_to_f16x2(s0[2] * f[0], s0[3] * f[1]);
    p[2] = f32_to_f16x2(s1[0] * f[2], s1[1] * f[3]);
    p[3] = f32_to_f16x2(s1[2] * f[2], s1[3] * f[3]);
}

/* 32 columns of values are those of four n8-tiles: column n of each tile is one of four neighbors. Returns which
 * four. In this order lanes 2t and 2t + 1 of a row store 32 neighboring bytes at once, a whole sector. */
DEVICE int attn_four(int n) { return (n & 4) | (n & 1) << 1 | (n >> 1 & 1); }

/* acc (16 MT, 32) += weights p of 16 keys times 32 columns of their values. key: first row in the tile; at: byte of
 * this lane's four columns, number attn_four(g) of the 32. Lane t ends up with fours attn_four(2t) and attn_four(2t +
 * 1). */
template <int FP8, int ROW, int MT, int NA>
DEVICE void attn_values(float (&acc)[MT][NA][4], int n0, const uint32_t (*p)[4], const uint8_t *tile, int key, int at,
                        int t) {
    uint32_t b0[4], b1[4];
    auto row = [&](int k) { return tile + kv_at<ROW>(key + 2 * t + k, at); };
    kv_pairs<FP8>(b0, row(0), row(1));
    kv_pairs<FP8>(b1, row(8), row(9));
    UNROLL for (int j = 0; j < 4; j++) {
        uint32_t b[2] = {b0[j], b1[j]};
        UNROLL for (int i = 0; i < MT; i++) mma_f16(acc[i][n0 + j], p[i], b);
    }
}

/* Index of (split, token, head) in `partials`. The (m, l) of all rows follow the sums, those of a row's splits in
 * turn. */
DEVICE size_t attn_partial_row(const struct attn_args &a, int split, int2 th) {
    return ((size_t)split * a.n_tok + th.x) * a.n_head + th.y;
}
DEVICE float2 *attn_max_den(const struct attn_args &a, int2 th) {
    float2 *const all = (float2 *)(a.partials + attn_partial_row(a, a.max_splits, make_int2(0, 0)) * a.dv);
    return all + ((size_t)th.x * a.n_head + th.y) * a.max_splits;
}

/* Returns the factor that a gate g stands for. ANY: it may be a softplus; log(1 + e) is computed so that small e
 * count. */
template <bool ANY>
DEVICE float gate_factor(float g, bool softplus) {
    if (!ANY || !softplus) return sigmoid(g);
    const float e = __expf(-fabsf(g)), y = 1.0f + e;
    return fmaxf(g, 0.0f) + __logf(y) + __fdividef(e - (y - 1.0f), y);
}

/* ============================================================================================================
 * Attention: grouped queries
 *
 * attn_gqa_decode, and how the splits of a context are joined.
 * ============================================================================================================ */

/* Where a row's columns go, which are sums of weighted values. */
struct attn_place {
    uint8_t *at; /* (dv) the result in halves, or the sums in `partials` */
    int token;
    bool whole;        /* it is the result */
    const float *gate; /* of the result; NULL: none */
    float inverse;     /* factor of the result */

    /* For row r with maximum m and denominator l, both of which go to `partials` too (first: by this thread). The
     * result's denominator has the sink. Returns false if there is no such row. FORMS: there may be gates. RESULT: it is
     * the result. */
    template <bool FORMS, bool RESULT = false>
    DEVICE_MEMBER bool find(const struct attn_args &a, const struct attn_work &w, int r, bool first, float m, float l) {
        const int2 th = attn_row(w, r);
        if (th.x < 0) return false;
        token = th.x;
        whole = RESULT || (w.n_split == 1 && a.out);
        if (whole) {
            if (a.sinks) l += exp2f(a.sinks[th.x * a.sink_stride + th.y] * ATTN_LOG2_E - m);
            at = (uint8_t *)(a.out + th.x * a.out_stride + (size_t)th.y * a.dv);
            gate = FORMS && a.gate ? a.gate + (size_t)th.x * a.gate_stride + (size_t)th.y * a.gate_head : NULL;
            inverse = 1.0f / (ATTN_P * l);
            return true;
        }
        at = (uint8_t *)(a.partials + attn_partial_row(a, w.split, th) * a.dv);
        if (first) attn_max_den(a, th)[w.split] = make_float2(m, l);
        return true;
    }
    /* Stores N columns from `col` on. FORMS: there may be gates; DECODE: of any kind. BACK: a result may be rotated
     * back. */
    template <bool FORMS, bool DECODE, bool BACK, int N>
    DEVICE_MEMBER void store(const struct attn_args &a, int col, const pack<N, float> &x) const {
        if (!whole) {
            *(pack<N, float> *)((float *)at + col) = x;
            return;
        }
        pack<N / 2> h;
        float f[N];
        UNROLL for (int i = 0; i < N; i++) f[i] = inverse * x.x[i];
        if (FORMS && gate)
            UNROLL for (int i = 0; i < N; i++) f[i] *=
                gate_factor<DECODE>(gate[DECODE && a.gate_one ? 0 : col + i], a.softplus);
        const int rotated = BACK && a.one_kv ? col - (a.dv - a.rope.rope) : -1;
        if (rotated >= 0) UNROLL for (int i = 0; i < N; i += 2) {
                const size_t pair = (size_t)(token * (a.rope.rope / 2) + (rotated + i) / 2);
                const float c = a.rope.cs[pair], s = a.rope.sn[pair], u = f[i], v = f[i + 1];
                f[i] = u * c + v * s;
                f[i + 1] = v * c - u * s;
            }
        UNROLL for (int i = 0; i < N; i += 2) h.x[i / 2] = clamped_f16x2(f[i], f[i + 1]);
        *(pack<N / 2> *)((uint16_t *)at + col) = h;
    }
};

/* Stores N columns of row r, from `col` on, as above. */
template <bool FORMS, bool DECODE, bool BACK, int N>
DEVICE void attn_store(const struct attn_args &a, const struct attn_work &w, int r, int col, const pack<N, float> &x,
                       float m, float l) {
    struct attn_place place;
    if (place.find<FORMS>(a, w, r, col == 0, m, l)) place.store<FORMS, DECODE, BACK>(a, col, x);
}

DEVICE float quad_sum(float x) { /* over the 4 lanes of a row */
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

/* Joins the splits of a row tile, by the block that comes last: of ATTN_JOIN neighboring splits to the place of the
 * first, of ATTN_JOIN such groups likewise, and so on; the last writes the result. A split that has no key of a row
 * adds zeros: the row's bits depend on its own splits alone. Block: 8 threads a row of the tile. smem: (ROWS,
 * ATTN_JOIN) floats and 2 ROWS more, which warps may still read when others begin. */
template <int D, int ROWS, bool BACK>
DEVICE void attn_join(const struct attn_args &a, const struct attn_work &w, float *smem) {
    uint32_t *arrived = a.arrived + (blockIdx.z * gridDim.y + blockIdx.y) * ATTN_COUNTERS;
    float *top = smem + ROWS * ATTN_JOIN, *den = top + ROWS;
    const int tid = (int)threadIdx.x;
    struct attn_work to = w;
    UNROLL_BY(1) for (int n = w.n_split, i = w.split, step = 1; n > 1; step *= ATTN_JOIN) {
        const int first = i / ATTN_JOIN * ATTN_JOIN, count = min(n - first, (int)ATTN_JOIN);
        i /= ATTN_JOIN;
        n = (n + ATTN_JOIN - 1) / ATTN_JOIN;
        if (count > 1) {
            if (!last_block(arrived + i, (uint32_t)count)) return;
            if (!tid) arrived[i] = 0;
            /* thread (row, j): splits j and j + 8 */
            const int2 mine = attn_row(w, tid / 8);
            float2 ml[2];
            float m = ATTN_NO_KEY, l = 0;
            UNROLL for (int k = 0; k < 2; k++) {
                const int split = tid % 8 + 8 * k;
                const bool in = split < count && mine.x >= 0;
                ml[k] = in ? load_l2(attn_max_den(a, mine) + (first + split) * step) : make_float2(ATTN_NO_KEY, 0);
                m = fmaxf(m, ml[k].x);
            }
            for (int o = 1; o < 8; o *= 2) m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, o));
            UNROLL for (int k = 0; k < 2; k++) {
                const float f = exp2f(ml[k].x - m);
                smem[tid / 8 * ATTN_JOIN + tid % 8 + 8 * k] = f;
                l = fmaf(f, ml[k].y, l);
            }
            for (int o = 1; o < 8; o *= 2) l += __shfl_xor_sync(0xFFFFFFFFu, l, o);
            if (!(tid % 8)) {
                top[tid / 8] = m;
                den[tid / 8] = l;
            }
            __syncthreads(); /* the weights of all splits are written */
            to.split = first * step;
            to.n_split = n;
            UNROLL_BY(1) for (int k = tid; k < ROWS * D / 4; k += 8 * ROWS) {
                const int r = k / (D / 4), col = k % (D / 4) * 4;
                const int2 th = attn_row(w, r);
                if (th.x < 0) continue;
                floats4 x = {};
                UNROLL_BY(8) for (int split = 0; split < count; split++) {
                    const float4 y =
                        load_l2((const float4 *)(a.partials +
                                                 attn_partial_row(a, (first + split) * step, th) * (size_t)D + col));
                    const float f = smem[r * ATTN_JOIN + split];
                    x.x[0] = fmaf(f, y.x, x.x[0]);
                    x.x[1] = fmaf(f, y.y, x.x[1]);
                    x.x[2] = fmaf(f, y.z, x.x[2]);
                    x.x[3] = fmaf(f, y.w, x.x[3]);
                }
                attn_store<true, true, BACK>(a, to, r, col, x, top[r], den[r]);
            }
        }
        arrived += n;
    }
}

/* The bias by distance of a warp's 16 rows. Of 16 keys there are at most 31 distances to the rows, which are
 * consecutive tokens' in rising order: products of the relative states with 32 columns of the bank have all of them. A
 * lane then gets those of its keys from the lane of its row that has the column. */
struct attn_bias {
    pack<4> rel; /* relative states as an A operand */
    int own[2];  /* positions of this lane's rows g and g + 8, of absent rows any that may be */
    int first;   /* the least position of the warp's rows */

    /* row: the first of the warp's rows in the tile. limit: of attn_rows. */
    DEVICE_MEMBER void load(const struct attn_args &a, const struct attn_work &w, int row, const int limit[2]) {
        const int lane = threadIdx.x & 31, t = lane & 3;
        first = w.pos + (w.row0 + max(row, (int)(w.rows & 0xFFFF))) / w.group_heads;
        UNROLL for (int h = 0; h < 2; h++) {
            const int2 th = attn_row(w, row + (lane >> 2) + 8 * h);
            const uint16_t *from = a.rel + ((size_t)max(th.x, 0) * a.n_head + th.y) * a.n_rel;
            own[h] = th.x < 0 ? first : limit[h] - 1;
            UNROLL for (int k = 0; k < 2; k++) rel.x[h + 2 * k] =
                th.x >= 0 && 8 * k + 2 * t < a.n_rel ? *(const uint32_t *)(from + 8 * k + 2 * t) : 0;
        }
    }
    /* Adds the bias of keys key..key+15 to their scores: s0 of the first eight, s1 of the others. */
    DEVICE_MEMBER void add(const struct attn_args &a, int key, float (&s0)[4], float (&s1)[4]) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, nearest = first - key - 15;
        float column[4][4] = {}; /* of distances nearest + 8b + 2t and the next: rows g and g + 8 */
        if (nearest >= a.extent) return;
        UNROLL for (int b = 0; b < 4; b++) {
            const int d = nearest + 8 * b + g;
            auto bank = [&](int i) {
                return i < a.n_rel && (uint32_t)d < (uint32_t)a.extent ? a.bank[i * a.extent + d] : 0.0f;
            };
            const uint32_t f[2] = {f32_to_f16x2(bank(2 * t), bank(2 * t + 1)),
                                   f32_to_f16x2(bank(2 * t + 8), bank(2 * t + 9))};
            mma_f16(column[b], rel.x, f);
        }
        UNROLL for (int n = 0; n < 2; n++) UNROLL for (int c = 0; c < 4; c++) {
            /* key 8n + 2t + e needs column 2 (half - t) + odd, where half and odd are the same for a row's lanes */
            const int h = c >> 1, x = own[h] - first + 15 - 8 * n - (c & 1), half = x >> 1;
            const int from = (half - t) & 3,
                      block = (half - from) >> 2; /* `from` is also the lane that asks this one */
            float mine[4];
            UNROLL for (int b = 0; b < 4; b++) mine[b] = x & 1 ? column[b][2 * h + 1] : column[b][2 * h];
            const float sent = block & 2 ? (block & 1 ? mine[3] : mine[2]) : (block & 1 ? mine[1] : mine[0]);
            (n ? s1 : s0)[c] += __shfl_sync(0xFFFFFFFFu, sent, (lane & ~3) | from);
        }
    }
};

/* What a kernel of grouped-query attention is for. */
enum gqa_form {
    GQA_PLAIN,
    GQA_CHOSEN, /* tokens see chosen blocks of keys, of which a step has one */
    GQA_BIASED, /* scores have a bias by distance */
    GQA_MEANS   /* tokens see chosen blocks, of which a step has several, and after them the incomplete one */
};

/* GQA decode: rotation of the queries, new rows of the cache, and the result of 16 rows of one KV head. A block
 * stores the new rows that it reads itself.
 * Grid: (splits, row tiles of 16 * KV heads), block: 128. Of every 64 keys each of the 4 warps takes 16, with a softmax
 * and a ring in shared memory of its own (slots: 16 rows of K, of V, of K, ..); warps meet only at the end. Reads
 * keys * (K + V) values of the cache per row tile (FP8: + 8 bytes per key), and that is the limit: with 2 blocks per SM
 * 64 KB are in flight per SM, enough for 4.3 TB/s on 132 SMs (some 400 instructions per 4 KB).
 * GQA_CHOSEN, GQA_MEANS: in prefill too; k_rope_gqa has made queries and new rows. GQA_BIASED: k_rel_prepare has. */
template <int K, int V, int FP8>
struct attn_gqa {
    static constexpr int ES = FP8 ? 1 : 2, SLOT = 16 * (K > V ? K : V) * ES, FIT = ATTN_SMEM / (4 * SLOT);
    static constexpr int AT_MOST_8 = FIT > 8 ? 8 : FIT;
    static constexpr int DEPTH = FIT < 3 ? 3 : AT_MOST_8;
    static constexpr int SMEM = 4 * DEPTH * SLOT;
    static constexpr int PITCH = V + 8; /* floats of a row of the final sum: no bank conflicts */
    static_assert(4 * 8 * PITCH * 4 <= SMEM, "the final sum fits");
};
template <int K, int V, int FP8, int FORM>
__global__ void __launch_bounds__(128, 2) attn_gqa_decode(struct attn_args a) {
    using L = attn_gqa<K, V, FP8>;
    constexpr bool MEANS = FORM == GQA_MEANS, CHOSEN = FORM == GQA_CHOSEN || MEANS, MADE = FORM != GQA_PLAIN;
    /* ES: bytes of a cache value. RUN: values of a key that a lane loads at once. PER_RUN: k16-steps that they feed. */
    constexpr int ES = L::ES, K_ROW = K * ES, V_ROW = V * ES, DEPTH = L::DEPTH, RUN = kv_run(FP8, K), PER_RUN = RUN / 4;
    constexpr int STORE = (K > V ? K : V) / 32;
    DYN_SMEM(uint8_t, smem);
    SHARED(float2, max_den, 4 * 16);
    struct attn_work w;
    constexpr int END = MEANS ? POOL_END : BLOCK_END;
    const bool work = CHOSEN ? attn_begin_topk<false, END>(&w, a, 16) : attn_begin<true, true>(&w, a, 16);
    prefetch_request(a.prefetch);
    if (!work) return;
    int tid = (int)threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int first = w.begin + 16 * warp, n = (w.end - w.begin + 63) / 64;
    const int low = CHOSEN ? 0 : w.low;
    uint8_t *ring = smem + warp * DEPTH * L::SLOT;
    /* Queries, on their way from a warp per row to fragments: four rows in the slot of each warp's ring that is
     * filled last.
     */
    auto q_row = [&](int r) {
        return (uint16_t *)(smem + (r / 4 * DEPTH + DEPTH - 1) * L::SLOT + r % 4 * (2 * K + 16));
    };
    static_assert(4 * (2 * K + 16) <= L::SLOT, "four queries in a slot");

    int write_slot = 0, read_slot = 0; /* next slot to fill, next slot to read */
    auto next_slot = [&](int &at) {
        uint8_t *p = ring + at * L::SLOT;
        at = at + 1 == DEPTH ? 0 : at + 1;
        return p;
    };
    auto copy = [&](int u) {
        uint8_t *to = next_slot(write_slot);
        int key = first + 64 * (u >> 1);
        if (MEANS) {
            if (u < 2 * n) kv_gather<K_ROW, 16, 32, true>(to, u & 1 ? a.v : a.k, w.kvh * K_ROW, w, key, lane);
        } else if (u < 2 * n && K == V) {
            kv_copy<K_ROW, 16, 32>(to, u & 1 ? a.v : a.k, w.kvh * K_ROW, key, attn_back<CHOSEN>(w, key), low, w.end,
                                   lane);
        } else if (u < 2 * n) {
            if (u & 1) kv_copy<V_ROW, 16, 32>(to, a.v, w.kvh * V_ROW, key, attn_back<CHOSEN>(w, key), low, w.end, lane);
            else kv_copy<K_ROW, 16, 32>(to, a.k, w.kvh * K_ROW, key, attn_back<CHOSEN>(w, key), low, w.end, lane);
        }
        cp_async_commit();
    };
    auto arrive = [&](int u) {
        cp_async_wait<DEPTH - 2>();
        /* The other lanes' copies have landed, too, and all lanes are done with the slot that is filled next. */
        __syncwarp();
        copy(u + DEPTH - 1);
        return next_slot(read_slot);
    };
    auto copies = [&] {
        for (int u = 0; u < DEPTH - 1; u++) copy(u);
    };
    const int new_row = max(w.fresh, w.begin), n_new = MADE ? 0 : max(w.end - new_row, 0);
    if (MADE) {
        UNROLL for (int i = tid; i < 16 * K / 8; i += 128) {
            const int r = i / (K / 8), at = i % (K / 8) * 8;
            const int2 th = attn_row(w, r);
            cp_async16(q_row(r) + at, a.q + th.x * a.q_stride + (size_t)th.y * K + at, th.x >= 0);
        }
        cp_async_commit();
    }
    if (!n_new) copies();
    UNROLL_BY(1)
    for (int i = warp; i < 2 * n_new; i += 4)
        gqa_store<STORE, FP8 ? ROWS_FP8 : ROWS_BF16>(a.rope, new_row + i / 2 - w.pos, w.kvh, i & 1);
    UNROLL_BY(1) for (int r = warp; r < 16 && !MADE; r += 4) {
        const int2 th = attn_row(w, r);
        float x[K / 32];
        if (th.x < 0) continue;
        rope_head<K / 32>(a.rope, a.rope.q + (size_t)th.x * a.rope.q_stride + (size_t)th.y * a.rope.q_head,
                          a.rope.q_norm, K, th.x, x);
        const float f = query_factor(a.rope, th.x);
        UNROLL for (int j = 0; j < K / 32; j++) q_row(r)[lane + 32 * j] = clamped_f16(x[j] * f);
    }
    if (MADE) cp_async_wait<DEPTH - 1>(); /* the queries have landed */
    __syncthreads();                      /* the new rows and the queries are written */
    if (n_new) copies();
    /* Lanes 0..15 hold the factors of the 16 keys of K, lanes 16..31 those of V, one turn ahead. */
    auto factors = [&](int i) {
        const int key = first + 64 * i, mine = key + (lane & 15);
        return attn_factor<FP8>(a, w, lane >= 16, mine, FP8 || !MEANS ? attn_back<CHOSEN>(w, MEANS ? mine : key) : 0,
                                low);
    };
    float next = factors(0);

    const uint16_t *rows[2];
    int limit[2];
    attn_rows(rows, limit, a, w, g);
    UNROLL for (int h = 0; h < 2; h++) if (limit[h]) rows[h] = q_row(g + 8 * h);
    pack<4> q[K / 16];
    UNROLL for (int c = 0; c < K / 4 / RUN; c++) attn_chunk<RUN>(q + c * PER_RUN, rows, (4 * c + t) * RUN);
    __syncthreads(); /* all warps have read the queries: their slots may be filled */
    float m[2] = {ATTN_NO_KEY, ATTN_NO_KEY}, l[2] = {0, 0}, acc[1][V / 8][4] = {};
    const int window = attn_span(a);
    struct attn_bias bias;
    if (FORM == GQA_BIASED) bias.load(a, w, 0, limit);

    for (int i = 0; i < n; i++) {
        float factor = next, s[2][4] = {}, fk[4], fv[4];
        uint32_t p[1][4];
        const uint8_t *tile = arrive(2 * i);
        next = factors(i + 1);
        UNROLL for (int c = 0; c < K / 4 / RUN; c++) UNROLL for (int b = 0; b < 2; b++) {
            auto h = kv_values<FP8, RUN>(tile + kv_at<K_ROW>(8 * b + g, (4 * c + t) * RUN * ES));
            UNROLL for (int j = 0; j < PER_RUN; j++) mma_f16(s[b], q[c * PER_RUN + j].x, h.x + 2 * j);
        }
        UNROLL for (int x = 0; x < 4; x++) { /* this lane's columns: keys 2t, 2t+1, 8+2t, 8+2t+1 */
            int key = (x >> 1) * 8 + 2 * t + (x & 1);
            fk[x] = FP8 ? __shfl_sync(0xFFFFFFFFu, factor, key) : w.factor;
            fv[x] = FP8 ? __shfl_sync(0xFFFFFFFFu, factor, 16 + key) : ATTN_P;
        }
        bool all = first + 64 * i >= w.from && first + 64 * i + 16 <= w.seen;
        attn_mask<true>(s[0], first + 64 * i + 2 * t, fk[0], fk[1], limit, window, all);
        attn_mask<true>(s[1], first + 64 * i + 2 * t + 8, fk[2], fk[3], limit, window, all);
        if (FORM == GQA_BIASED) bias.add(a, first + 64 * i, s[0], s[1]);
        attn_softmax(s, m, l, acc[0]);
        attn_weights(p[0], s[0], s[1], fv);
        tile = arrive(2 * i + 1);
        UNROLL for (int c = 0; c < V / 32; c++)
            attn_values<FP8, V_ROW>(acc, 4 * c, p, tile, 0, (32 * c + 4 * attn_four(g)) * ES, t);
    }

    /* Add the warps' sums, in the order of the warps, 8 rows at a time. */
    UNROLL for (int h = 0; h < 2; h++) {
        l[h] = quad_sum(l[h]);
        if (t == 0) max_den[warp * 16 + g + 8 * h] = make_float2(m[h], l[h]);
    }
    __syncthreads();               /* max_den is written, and all warps are done with their rings */
    float *merged = (float *)smem; /* (4 warps, 8 rows, PITCH) */
    auto top = [&](int r) {
        return fmaxf(fmaxf(max_den[r].x, max_den[16 + r].x), fmaxf(max_den[32 + r].x, max_den[48 + r].x));
    };
    UNROLL_BY(1) for (int h = 0; h < 2; h++) {
        float f = exp2f((h ? m[1] : m[0]) - top(g + 8 * h));
        if (h) {
            __syncthreads(); /* the first 8 rows have been read */
        }
        UNROLL for (int c = 0; c < V / 8; c += 4) UNROLL for (int e = 0; e < 2; e++) {
            float4 x;
            UNROLL for (int j = 0; j < 4; j++)(&x.x)[j] = (h ? acc[0][c + j][2 + e] : acc[0][c + j][e]) * f;
            *(float4 *)(merged + (warp * 8 + g) * L::PITCH + 8 * c + 4 * attn_four(2 * t + e)) = x;
        }
        __syncthreads(); /* the sums of all 4 warps are written */
        UNROLL_BY(1) for (int i = tid; i < 8 * V / 4; i += 128) {
            int r = i / (V / 4), col = i % (V / 4) * 4, row = r + 8 * h;
            floats4 x = {};
            float den = 0, mx = top(row);
            UNROLL for (int v = 0; v < 4; v++) {
                floats4 y = *(const floats4 *)(merged + (v * 8 + r) * L::PITCH + col);
                UNROLL for (int j = 0; j < 4; j++) x.x[j] += y.x[j];
                den += max_den[v * 16 + row].y * exp2f(max_den[v * 16 + row].x - mx);
            }
            attn_store<true, true, false>(a, w, row, col, x, mx, den);
        }
    }
    if (w.n_split > 1 && a.arrived) attn_join<V, 16, false>(a, w, merged);
}

/* ============================================================================================================
 * Attention: latents, wide heads
 *
 * attn_mla_kernel: absorbed latent attention, attention of one KV head, and of grouped queries with wide heads.
 * ============================================================================================================ */

/* MLA with absorbed wk_b, for decode and prefill: `out` or `partials` (16 MT rows, LAT) of one split. Keys are
 * [latent | rotated], values are the latents. ROPE 0: keys are values, and a list of chosen keys has pools. KEYS_ALL of
 * latents wider than 512: there may be a window. KEYS_ONE_KV: attention of one KV head, with ROPE 0. KEYS_APART: grouped-query attention of wide heads, with ROPE 0.
 * Grid: (splits, row tiles), block: 256. All 8 warps share tiles of 32 keys, of 16 where rows have 2048 bytes. Scores: a
 * warp takes half of the inner dimension and 8 keys of a tile; the halves are added in shared memory. Then every warp computes all softmax
 * weights itself and multiplies them by its own 1/8 of the value columns.
 * Reads keys * (LAT + 2 ROPE + 4 LAT / 128) bytes (FP8) per row tile. 16 rows: limited by that (some 970 instructions
 * per warp and 41 KB). 32 rows: limited by the MMAs, 32 * (2 LAT + ROPE) multiplications per key.
 * KEYS_APART, heads of 512: attn_gqa_decode would need 384 registers a thread for a warp's queries and sums; here a warp
 * has half of the queries and an eighth of the sums, 96. Tiles of keys and of values take turns in the slots. A tile is
 * 16 KB in FP8 and 32 KB in BF16: 4 slots or 2 fit the 99 KB of a block on SM120 beside 31 KB of scores and queries. So
 * 48 or 32 KB are in flight per SM, enough for 4 TB/s on 132 SMs. Reads keys * (K + V) values per row tile. 32 rows:
 * limited by L2, 32 multiplications a byte (FP8; BF16: 16). */
template <int LAT, int ROPE, int FP8, int MT, bool APART = false>
struct attn_mla {
    static constexpr bool WIDE = LAT > 512;
    static constexpr int ROW = LAT * (FP8 ? 1 : 2), KEYS = ROW > 1024 ? 16 : 32;
    /* DEPTH: the same for both MT: so are a row's bits */
    static constexpr int DEPTH = (FP8 && !WIDE ? 3 : 2) + (FP8 && APART);
    static constexpr int ROPE_ROW = ROPE * 2, SLOT = KEYS * (ROW + ROPE_ROW);
    static constexpr bool Q_FITS = LAT * MT <= 512; /* Q fits in registers */
    static constexpr int Q_SHARED = Q_FITS ? 0 : WIDE ? 18 : 8 + 2 * FP8;
    /* scales of a key: of each group of latents; APART: of the key and, KEYS further on, of its values */
    static constexpr int GROUPS = APART ? 1 : (LAT + ATTN_GROUP - 1) / ATTN_GROUP;
    static constexpr int SCALES = FP8 ? KEYS * GROUPS * (1 + APART) : 0;
    static constexpr int PITCH = KEYS + 8, SCORES = 2 * 16 * MT * PITCH; /* no bank conflicts for pairs */
    /* Q comes through the last Q_SLOTS slots, where a row is a multiple of 128 bytes. */
    static constexpr int Q_SLOTS = (16 * MT * (LAT + ROPE) * 2 + SLOT - 1) / SLOT;
    static constexpr bool Q_STAGED = (LAT + ROPE) % 64 == 0 && Q_SLOTS < DEPTH;
    static constexpr int SMEM = DEPTH * SLOT + 4 * (SCORES + 2 * SCALES) + 2 * MT * Q_SHARED * 512;
    static_assert(SMEM <= 101376, "shared memory of SM120");
};
/* KEYS_OF: those of a split, a list's, a window and compressed ones, those of a split apart from their values */
enum { KEYS_ALL, KEYS_CHOSEN, KEYS_ONE_KV, KEYS_APART };
template <int LAT, int ROPE, int FP8, int MT, int KEYS_OF>
__global__ void __launch_bounds__(256, 1) attn_mla_kernel(struct attn_args a) {
    constexpr bool APART = KEYS_OF == KEYS_APART;
    constexpr int TILES = 1 + APART; /* of a step: keys and values */
    using L = attn_mla<LAT, ROPE, FP8, MT, APART>;
    constexpr int KEYS = L::KEYS, DEPTH = L::DEPTH, ROW = L::ROW, GROUPS = L::GROUPS, PITCH = L::PITCH;
    /* A chunk is what 4 lanes load at once: 4 RUN latents, or 4 RRUN values of the rotated part. A warp takes HALF of
     * the CHUNKS and RHALF of the RCHUNKS, which are STEPS and RSTEPS k16-steps. ES: bytes of a latent. */
    constexpr int RUN = kv_run(FP8, LAT), CHUNKS = LAT / 4 / RUN, HALF = (CHUNKS + 1) / 2, ES = FP8 ? 1 : 2;
    constexpr bool CHOSEN = KEYS_OF == KEYS_CHOSEN, ONE_KV = KEYS_OF == KEYS_ONE_KV, POOLS = ROPE == 0;
    constexpr bool WINDOW = KEYS_OF == KEYS_ALL && L::WIDE;
    constexpr int RRUN = kv_run(0, ROPE), RCHUNKS = ROPE / 4 / RRUN, RHALF = (RCHUNKS + 1) / 2;
    constexpr int STEPS = HALF * RUN / 4, RSTEPS = RHALF * RRUN / 4, Q_REG = STEPS + RSTEPS - L::Q_SHARED;
    constexpr int SLICES = LAT / 32, PER_WARP = (SLICES + 7) / 8; /* slices of 32 value columns; so many per warp */
    DYN_SMEM(uint8_t, smem);
    float *scores = (float *)(smem + DEPTH * L::SLOT), *scale_tiles = scores + L::SCORES;
    uint8_t *q_shared = (uint8_t *)(scale_tiles + 2 * L::SCALES); /* (2 halves, MT, Q_SHARED, 32 lanes) */
    struct attn_work w;
    constexpr int END = POOLS ? POOL_END : BLOCK_END;
    constexpr bool DECODE = APART || !POOLS; /* among pools decode always chooses */
    const bool work =
        CHOSEN || ONE_KV ? attn_begin_topk<ONE_KV, END>(&w, a, 16 * MT) : attn_begin<WINDOW, DECODE>(&w, a, 16 * MT);
    prefetch_request(a.prefetch);
    if (!work) return;
    int tid = (int)threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int half = warp >> 2, nt = warp & 3, n = (w.end - w.begin + KEYS - 1) / KEYS;
    int slice = warp * PER_WARP, group = APART ? 0 : slice * 32 / ATTN_GROUP;
    const int low = WINDOW ? w.low : 0;

    auto copy = [&](int i) {
        uint8_t *to = smem + i % DEPTH * L::SLOT;
        int key = w.begin + i / TILES * KEYS;
        if constexpr (APART) {
            if (i < 2 * n)
                kv_copy<ROW, KEYS, 256>(to, i & 1 ? a.v : a.k, w.kvh * ROW, key, attn_back<false>(w, key), 0, w.end,
                                        tid);
        } else if constexpr (ONE_KV) {
            if (i < n) kv_gather_csa<ROW, KEYS, 256>(to, a, w, key, tid);
        } else if (i < n && CHOSEN) {
            kv_gather<ROW, KEYS, 256, POOLS>(to, a.k, 0, w, key, tid);
            if constexpr (ROPE > 0) kv_gather<L::ROPE_ROW, KEYS, 256, POOLS>(to + KEYS * ROW, a.v, 0, w, key, tid);
        } else if (i < n) {
            kv_copy<ROW, KEYS, 256>(to, a.k, 0, key, attn_back<false>(w, key), low, w.end, tid);
            if constexpr (ROPE > 0)
                kv_copy<L::ROPE_ROW, KEYS, 256>(to + KEYS * ROW, a.v, 0, key, attn_back<false>(w, key), low, w.end,
                                                tid);
        }
        cp_async_commit();
    };
    auto scales = [&](int i) {
        int key = w.begin + i * KEYS + tid / GROUPS;
        if (ONE_KV && FP8) {
            const struct cache_tensor *p;
            if (tid >= L::SCALES || key >= w.end) return 0.0f;
            key = csa_row(a, w, key, &p);
            return p->scale[(size_t)key * p->n_scale + tid % GROUPS];
        }
        if (CHOSEN && FP8 && w.chosen && tid < L::SCALES && key < w.end)
            return kv_scale(a.k, w.k.at(attn_chosen<POOLS>(w, key)), 0, tid % GROUPS, 0, INT_MAX);
        const int first = w.begin + i * KEYS, back = CHOSEN ? first - w.k.at(first) : attn_back<false>(w, first);
        if (APART)
            return FP8 && tid < L::SCALES ? kv_scale(tid < KEYS ? a.k : a.v, first + tid % KEYS, back, w.kvh, 0, w.end)
                                          : 0.0f;
        return FP8 && tid < L::SCALES ? kv_scale(a.k, key, back, tid % GROUPS, low, w.end) : 0.0f;
    };
    /* Q in shared memory: rows of WIDTH halves, whose pieces are permuted so that 8 lanes meet in no bank. */
    constexpr int WIDTH = LAT + ROPE, FIRST = L::Q_STAGED ? DEPTH - L::Q_SLOTS : DEPTH - 1; /* tiles beside it */
    uint16_t *const q_rows = (uint16_t *)(smem + FIRST * L::SLOT);
    auto permuted = [](int r) { return RUN == 16 ? r & 7 : (r & 1) << 2; };
    if (L::Q_STAGED) {
        UNROLL_BY(1) for (int i = tid; i < 16 * MT * WIDTH / 8; i += 256) {
            const int r = i / (WIDTH / 8), piece = i % (WIDTH / 8);
            const int2 th = attn_row(w, r);
            cp_async16(q_rows + r * WIDTH + 8 * (piece ^ permuted(r)),
                       a.q + th.x * a.q_stride + (size_t)th.y * WIDTH + 8 * piece, th.x >= 0);
        }
        cp_async_commit();
    }
    for (int i = 0; i < FIRST; i++) copy(i);
    float next = scales(0);
    if (L::Q_STAGED) {
        cp_async_wait<FIRST>();
        __syncthreads(); /* the queries have landed */
    }

    /* The warp's chunks: latents from half * HALF on, rotated part from (1 - half) * RHALF on. An odd chunk of the
     * latents and an odd one of the rotated part so go to different halves. */
    attn_steps<Q_REG> q[MT];
    int limit[MT][2];
    UNROLL for (int j = 0; j < MT; j++) {
        const uint16_t *rows[2];
        attn_rows(rows, limit[j], a, w, 16 * j + g);
        UNROLL for (int h = 0; h < 2 && L::Q_STAGED; h++) if (limit[j][h]) rows[h] =
            q_rows + (16 * j + g + 8 * h) * WIDTH;
        const int by = L::Q_STAGED ? permuted(g) : 0;
        q[j].rest = q_shared + ((half * MT + j) * L::Q_SHARED * 32 + lane) * 16;
        auto keep = [&](int s, const pack<4> &f) {
            if (s < Q_REG || nt == 0) q[j].at(s) = f;
        };
        UNROLL for (int k = 0; k < HALF; k++) {
            pack<4> f[RUN / 4] = {};
            const int c = half * HALF + k;
            if (c < CHUNKS) attn_chunk<RUN>(f, rows, (4 * c + t) * RUN, by);
            UNROLL for (int x = 0; x < RUN / 4; x++) keep(k * (RUN / 4) + x, f[x]);
        }
        UNROLL for (int k = 0; k < RHALF; k++) {
            pack<4> f[RRUN / 4] = {};
            const int c = (1 - half) * RHALF + k;
            if (c < RCHUNKS) attn_chunk<RRUN>(f, rows, LAT + (4 * c + t) * RRUN, by);
            UNROLL for (int x = 0; x < RRUN / 4; x++) keep(STEPS + k * (RRUN / 4) + x, f[x]);
        }
    }
    if (FIRST < DEPTH - 1) {
        __syncthreads(); /* all warps have read the queries: their slots may be filled */
        for (int i = FIRST; i < DEPTH - 1; i++) copy(i);
    }
    /* d (16, 8) += k16-step s of m16-tile j of Q times 8 keys */
    auto multiply = [&](float d[4], int j, int s, const uint32_t b[2]) {
        pack<4> f = q[j].at(s);
        mma_f16(d, f.x, b);
    };
    float m[MT][2], l[MT][2] = {}, acc[MT][4 * PER_WARP][4] = {};
    const int span = WINDOW ? attn_span(a) : 0;
    UNROLL for (int j = 0; j < MT; j++) m[j][0] = m[j][1] = ATTN_NO_KEY;

    for (int i = 0; i < n; i++) {
        const uint8_t *tile = smem + TILES * i % DEPTH * L::SLOT, *rope = tile + KEYS * ROW;
        /* (KEYS, GROUPS) or (2, KEYS), double-buffered: slower warps may still read the other one. */
        float *scale = scale_tiles + (i & 1) * L::SCALES;
        if (FP8 && tid < L::SCALES) scale[tid] = next; /* SCALES <= 256 */
        cp_async_wait<DEPTH - 2>();
        __syncthreads(); /* tile i and its scales have landed; all warps are done with the tile and the scores before */
        copy(TILES * i + DEPTH - 1);
        next = scales(i + 1);

        UNROLL for (int b = 8 * nt; b < KEYS; b += 32) { /* the warp's keys */
            float s[MT][4] = {};
            UNROLL for (int k = 0; k < HALF; k++) {
                int c = half * HALF + k;
                if (CHUNKS % 2 && c >= CHUNKS) continue; /* the second half has one chunk less */
                auto h = kv_values<FP8, RUN>(tile + kv_at<ROW>(b + g, (4 * c + t) * RUN * ES));
                const float *f = scale + (b + 2 * t) * GROUPS + (APART ? 0 : c * 4 * RUN / ATTN_GROUP);
                float f0 = FP8 ? f[0] : 1;
                float f1 = FP8 ? f[GROUPS] : 1;
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
        if (APART) cp_async_wait<DEPTH - 2>();
        __syncthreads(); /* the scores of both halves are written; APART: the values have landed, the keys are read */
        if (APART) {
            copy(TILES * i + DEPTH);
            tile = smem + (TILES * i + 1) % DEPTH * L::SLOT;
        }

        bool all = w.begin + (i + 1) * KEYS <= w.seen && (!WINDOW || w.begin + i * KEYS >= w.from);
        uint32_t p[KEYS / 16][MT][4];
        UNROLL for (int j = 0; j < MT; j++) {
            float x[KEYS / 8][4];
            UNROLL for (int b = 0; b < KEYS / 8; b++) {
                UNROLL for (int h = 0; h < 2; h++) {
                    const float *from = scores + (16 * j + g + 8 * h) * PITCH + 8 * b + 2 * t;
                    float2 y = *(const float2 *)from, z = *(const float2 *)(from + 16 * MT * PITCH);
                    x[b][2 * h] = y.x + z.x;
                    x[b][2 * h + 1] = y.y + z.y;
                }
                attn_mask<WINDOW>(x[b], w.begin + i * KEYS + 8 * b + 2 * t, 1, 1, limit[j], span, all);
            }
            attn_softmax(x, m[j], l[j], acc[j]);
            UNROLL for (int k = 0; k < KEYS / 16; k++) {
                float f[4];
                UNROLL for (int y = 0; y < 4; y++) {
                    int at = (16 * k + (y >> 1) * 8 + 2 * t + (y & 1) + (APART ? KEYS : 0)) * GROUPS + group;
                    f[y] = FP8 && slice < SLICES ? attn_v_factor(scale[at]) : ATTN_P;
                }
                attn_weights(p[k][j], x[2 * k], x[2 * k + 1], f);
            }
        }
        UNROLL for (int u = 0; u < PER_WARP; u++) if (slice + u < SLICES) UNROLL for (int k = 0; k < KEYS / 16; k++)
            attn_values<FP8, ROW>(acc, 4 * u, p[k], tile, 16 * k, (32 * (slice + u) + 4 * attn_four(g)) * ES, t);
    }

    UNROLL for (int j = 0; j < MT; j++) UNROLL for (int h = 0; h < 2; h++) {
        const float den = quad_sum(l[j][h]);
        UNROLL for (int u = 0; u < PER_WARP; u++) UNROLL for (int e = 2 * h; e < 2 * h + 2; e++) {
            floats4 x;
            UNROLL for (int y = 0; y < 4; y++) x.x[y] = acc[j][4 * u + y][e];
            const int col = 32 * (slice + u) + 4 * attn_four(2 * t + (e & 1));
            if (slice + u < SLICES)
                attn_store<ONE_KV || APART, APART, ONE_KV>(a, w, 16 * j + g + 8 * h, col, x, m[j][h], den);
        }
    }
    if ((ONE_KV || APART) && w.n_split > 1 && a.arrived) attn_join<LAT, 32, ONE_KV>(a, w, (float *)smem);
}

/* Returns the byte of 16-byte piece c of row `row` in an f16 tile, permuted so that the 8 rows of a matrix use
 * different banks. */
template <int D>
DEVICE int f16_at(int row, int c) {
    return row * D * 2 + ((D % 64 ? c : c ^ (row & 7)) << 4);
}

/* Converts ROWS rows of D values as they are in the cache to an f16 tile, with 128 threads. */
template <int D, int ROWS, int FP8>
DEVICE void f16_expand(uint8_t *to, const uint8_t *raw, int tid) {
    constexpr int PIECES = D / 8;
    UNROLL_BY(4) for (int x = tid; x < ROWS * PIECES; x += 128) {
        int row = x / PIECES, c = x % PIECES;
        auto h = kv_values<FP8, 8>(raw + kv_at<D *(FP8 ? 1 : 2)>(row, c * (FP8 ? 8 : 16)));
        *(pack<4> *)(to + f16_at<D>(row, c)) = h;
    }
}

/* acc (16, D) += weights p of 16 keys, the first of them `key`, times their values. */
template <int D>
DEVICE void attn_values_f16(float (*acc)[4], const uint32_t *p, const uint8_t *values, int key, int lane) {
    UNROLL for (int b = 0; b < D / 8; b += 2) {
        /* Matrices: keys 0-7 and 8-15 of columns 0-7, then of columns 8-15. */
        uint32_t r[4];
        ldmatrix_x4_trans(r, values + f16_at<D>(key + (lane & 15), b + (lane >> 4)));
        mma_f16(acc[b], p, r);
        mma_f16(acc[b + 1], p, r + 2);
    }
}

/* ============================================================================================================
 * Attention: prefill, merge, gates
 *
 * attn_gqa_prefill, the merge of splits, values of latents, and gates of heads.
 * ============================================================================================================ */

/* GQA prefill: `out` or `partials` (64 rows, V) of one KV head and split. Grid: (splits, row tiles * KV heads), block:
 * 128, 4 warps of 16 rows each. A tile of keys is copied raw while the tile before is multiplied, then converted to f16
 * once and read by ldmatrix. 64 (K + V) multiplications per key for the 64 rows of a KV head. Every warp reads every
 * tile: the limit is shared memory, at half to all of the MMA rate. */
template <int K, int V, int FP8>
struct attn_tiled {
    static constexpr int KEYS = K > 128 ? 32 : 64;
    static constexpr int K_ROW = K * (FP8 ? 1 : 2), V_ROW = V * (FP8 ? 1 : 2);
    static constexpr int Q_SHARED = K > 192 ? 14 : 0;
    static constexpr int V_RAW = KEYS * K_ROW,
                         RAW = V_RAW + KEYS * V_ROW; /* (K, V) as in the cache: V's place, bytes */
    static constexpr int V_TILE = KEYS * K * 2, TILE = V_TILE + KEYS * V * 2; /* as f16 */
    static constexpr int SMEM = RAW + TILE + 2 * KEYS * 4 + 4 * Q_SHARED * 512;
};

template <int K, int V, int FP8, bool BIASED>
__global__ void __launch_bounds__(128, 2) attn_gqa_prefill(struct attn_args a) {
    using L = attn_tiled<K, V, FP8>;
    constexpr int KEYS = L::KEYS, NT = KEYS / 8, Q_REG = K / 16 - L::Q_SHARED;
    DYN_SMEM(uint8_t, smem);
    uint8_t *tile = smem, *raw = smem + L::TILE; /* (K, V) f16; (K, V) as in the cache */
    float *factor = (float *)(raw + L::RAW);     /* (2, KEYS): of K, of V */
    struct attn_work w;
    if (!attn_begin<true, false>(&w, a, 64)) return;
    int tid = (int)threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int n = (w.end - w.begin + KEYS - 1) / KEYS;

    /* Starts to copy step i. Thread tid gets the factor of key tid % KEYS: of K if tid < KEYS, else of V. */
    auto copy = [&](int i) {
        const int key = w.begin + i * KEYS;
        const int back = a.k.kind == ROWS_RING ? key / a.k.n_row * a.k.n_row - w.k.shift : key - w.k.at(key);
        if (i < n) {
            kv_copy<L::K_ROW, KEYS, 128>(raw, a.k, w.kvh * L::K_ROW, key, back, 0, w.end, tid);
            kv_copy<L::V_ROW, KEYS, 128>(raw + L::V_RAW, a.v, w.kvh * L::V_ROW, key, back, 0, w.end, tid);
        }
        cp_async_commit();
        return attn_factor<FP8>(a, w, tid >= KEYS, key + tid % KEYS, back, 0);
    };
    float next = copy(0);

    const uint16_t *rows[2];
    int limit[2];
    attn_rows(rows, limit, a, w, 16 * warp + g);
    attn_steps<Q_REG> q;
    q.rest = (uint8_t *)(factor + 2 * KEYS) + (warp * L::Q_SHARED * 32 + lane) * 16;
    UNROLL for (int s = 0; s < K / 16; s++) {
        pack<4> f;
        UNROLL for (int e = 0; e < 4; e++) {
            const uint16_t *x = rows[e & 1];
            f.x[e] = x ? *(const uint32_t *)(x + 16 * s + 2 * t + (e >> 1) * 8) : 0;
        }
        q.at(s) = f;
    }
    float m[2] = {ATTN_NO_KEY, ATTN_NO_KEY}, l[2] = {0, 0}, acc[V / 8][4] = {};
    const int window = attn_span(a);
    struct attn_bias bias;
    if (BIASED) bias.load(a, w, 16 * warp, limit);

    for (int i = 0; i < n; i++) {
        cp_async_wait<0>();
        __syncthreads(); /* the raw tile has landed; all warps are done with the f16 tile before */
        if (K == V) {    /* rows of K, then of V */
            f16_expand<K, 2 * KEYS, FP8>(tile, raw, tid);
        } else {
            f16_expand<K, KEYS, FP8>(tile, raw, tid);
            f16_expand<V, KEYS, FP8>(tile + L::V_TILE, raw + L::V_RAW, tid);
        }
        if (tid < 2 * KEYS) factor[tid] = next;
        __syncthreads(); /* the f16 tile is complete, the raw one may be refilled */
        next = copy(i + 1);

        float s[NT][4] = {};
        UNROLL for (int k = 0; k < K / 16; k++) {
            pack<4> f = q.at(k);
            UNROLL for (int b = 0; b < NT; b += 2) {
                /* Matrices: elements 0-7 and 8-15 of keys 0-7, then of keys 8-15. */
                uint32_t r[4];
                int row = 8 * b + (lane >> 4) * 8 + (lane & 7);
                ldmatrix_x4(r, tile + f16_at<K>(row, 2 * k + (lane >> 3 & 1)));
                mma_f16(s[b], f.x, r);
                mma_f16(s[b + 1], f.x, r + 2);
            }
        }
        const int key = w.begin + i * KEYS;
        const bool all = key + KEYS <= w.seen && (!a.window || key >= w.end - a.window); /* there is one split */
        UNROLL for (int b = 0; b < NT; b++) {
            const float *f = factor + 8 * b + 2 * t;
            attn_mask<true>(s[b], key + 8 * b + 2 * t, f[0], f[1], limit, window, all);
        }
        if (BIASED) UNROLL for (int b = 0; b < NT; b += 2) bias.add(a, key + 8 * b, s[b], s[b + 1]);
        attn_softmax(s, m, l, acc);
        UNROLL for (int k = 0; k < NT / 2; k++) {
            const float *y = factor + KEYS + 16 * k + 2 * t;
            float f[4] = {y[0], y[1], y[8], y[9]};
            uint32_t p[4];
            attn_weights(p, s[2 * k], s[2 * k + 1], f);
            attn_values_f16<V>(acc, p, tile + L::V_TILE, 16 * k, lane);
        }
    }

    UNROLL for (int h = 0; h < 2; h++) {
        struct attn_place place;
        const float den = quad_sum(l[h]);
        if (!place.find<true>(a, w, 16 * warp + g + 8 * h, !t, m[h], den)) continue;
        UNROLL for (int b = 0; b < V / 8; b++) {
            const pack<2, float> x = {acc[b][2 * h], acc[b][2 * h + 1]};
            place.store<true, false, false>(a, 8 * b + 2 * t, x);
        }
    }
}

/* Joins the splits: out (n_tok, n_head, dv) = sum of 2^(m - M) * sums / sum of 2^(m - M) * l, M the largest m. Call it
 * with a.n_head_kv = 1: all heads are one group.
 * Grid: n_tok * n_head, block: 256: dv / 4 threads with 4 columns each, and as many groups of splits as fit. Reads
 * n_split * (dv + 2) * 4 bytes per row from L2; a few us. */
__global__ void __launch_bounds__(256) attn_merge(struct attn_args a) {
    SHARED(float, weight, SPLITS_MAX);
    SHARED(floats4, partial, 256);
    struct attn_work w;
    int tid = (int)threadIdx.x, row = (int)blockIdx.x;
    grid_dependency_launch();
    grid_dependency_wait();
    const int n_tok = min(a.batch.at->n_tok, a.n_tok), tok = row / a.n_head;
    if (tok >= n_tok) return;
    const int len = attn_keys<true>(a, tok, n_tok), keys = attn_split_keys(a, len), n_split = (len + keys - 1) / keys;
    if (n_split == 1) return;
    auto from = [&](int split) { return attn_partial_row(a, split, make_int2(0, row)); };
    const float2 *max_den = attn_max_den(a, make_int2(0, row));
    float top = ATTN_NO_KEY, den = 0;
    UNROLL_BY(4) for (int s = tid & 31; s < n_split; s += 32) top = fmaxf(top, max_den[s].x);
    top = warp_max(top);
    UNROLL_BY(1) for (int s = tid; s < n_split; s += 256) {
        float2 ml = max_den[s];
        weight[s] = exp2f(ml.x - top);
        den += weight[s] * ml.y;
    }
    den = block_sum<256>(den); /* its barrier also publishes the weights */
    int cols = a.dv / 4, n = 256 / cols, group = tid / cols, col = tid % cols * 4;
    floats4 x = {};
    auto add = [&](float f, const void *p) {
        floats4 y = *(const floats4 *)p;
        UNROLL for (int j = 0; j < 4; j++) x.x[j] += f * y.x[j];
    };
    if (group < n) {
        UNROLL_BY(4) for (int s = group; s < n_split; s += n) add(weight[s], a.partials + from(s) * a.dv + col);
    }
    partial[tid] = x;
    __syncthreads(); /* the sums of all groups are written */
    if (group) return;
    for (int i = 1; i < n; i++) add(1, &partial[tid + i * cols]);
    w.kvh = 0;
    w.row0 = row;
    w.group_heads = a.n_head;
    w.rows = 1u << 16;
    struct attn_place place;
    place.find<true, true>(a, w, 0, false, top, den);
    place.store<true, false, true>(a, col, x);
}

struct mla_value_args {
    struct attn_args attn;  /* whose partials there are */
    struct device_matrix w; /* wv_b: for each head (values, latent) */
    float *parts;           /* (n_kt, n_tok, n_head, n_out) sums over 64 latents each */
    uint32_t *arrived;      /* (n_head) count blocks; 0 between launches */
    uint16_t *out;          /* (n_tok, n_head, n_out), tokens out_stride apart */
    size_t out_stride;
};

/* Returns the splits of the context of head h of token t in decode. With a window they are those of its row's tile, which
 * has 16 rows. */
DEVICE int mla_splits(const struct attn_args &a, int t, int h) {
    if (!a.window) {
        const int len = attn_keys<false>(a, t, a.n_tok), keys = attn_split_keys(a, len);
        return (len + keys - 1) / keys;
    }
    struct attn_work w = {};
    const int row0 = (t * a.n_head + h) / MLA_WINDOW_ROWS * MLA_WINDOW_ROWS;
    const int last = min(row0 + MLA_WINDOW_ROWS, a.n_tok * a.n_head) - 1;
    const int pos = run_base(a.batch.run(t));
    w.seen = pos + (a.batch.several ? t : row0 / a.n_head) + 1;
    attn_window(&w, a, pos + (a.batch.several ? t : last / a.n_head) + 1);
    return w.n_split;
}

/* Joins the splits of latents 64c .. 64c + 63 of head h, with one block: to (n_tok, stride) halves. smem: (n_tok, 8
 * warps, 64) floats, then n_tok. Ends with a barrier. */
DEVICE void mla_join(const struct attn_args &a, int c, int h, float *smem, uint16_t *x, int stride) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, col = 4 * (lane & 15);
    float *den = smem + a.n_tok * GEMV_WARPS * TILE_COLS;
    UNROLL_BY(1) for (int t = 0; t < a.n_tok; t++) {
        const int n_split = mla_splits(a, t, h);
        const float2 *max_den = attn_max_den(a, make_int2(t, h));
        float m = ATTN_NO_KEY, l = 0; /* of this lane's splits */
        UNROLL_BY(4) for (int s = lane; s < n_split; s += WARP) {
            const float2 ml = max_den[s];
            const float larger = fmaxf(m, ml.x);
            l = fmaf(exp2f(ml.x - larger), ml.y, exp2f(m - larger) * l);
            m = larger;
        }
        const float top = warp_max(m);
        l = warp_sum(exp2f(m - top) * l);
        if (a.sinks) l += exp2f(a.sinks[h] * ATTN_LOG2_E - top);
        float4 x4 = make_float4(0, 0, 0, 0);
        UNROLL_BY(4) for (int s = 2 * warp + (lane >> 4); s < n_split; s += 2 * GEMV_WARPS) {
            const size_t row = attn_partial_row(a, s, make_int2(t, h));
            const float f = exp2f(max_den[s].x - top);
            const float4 y = *(const float4 *)(a.partials + row * (size_t)a.dv + c * TILE_COLS + col);
            x4 = make_float4(fmaf(f, y.x, x4.x), fmaf(f, y.y, x4.y), fmaf(f, y.z, x4.z), fmaf(f, y.w, x4.w));
        }
        UNROLL for (int i = 0; i < 4; i++)(&x4.x)[i] += __shfl_xor_sync(0xFFFFFFFFu, (&x4.x)[i], 16);
        if (lane < 16) *(float4 *)(smem + (t * GEMV_WARPS + warp) * TILE_COLS + col) = x4;
        if (!tid) den[t] = l;
    }
    __syncthreads(); /* the sums of all warps are written */
    UNROLL_BY(1) for (int i = tid; i < a.n_tok * TILE_COLS; i += GEMV_THREADS) {
        const int t = i / TILE_COLS, k = i % TILE_COLS;
        float v = 0;
        for (int w = 0; w < GEMV_WARPS; w++) v += smem[(t * GEMV_WARPS + w) * TILE_COLS + k];
        x[t * stride + k] = clamped_f16(v / (ATTN_P * den[t]));
    }
    __syncthreads(); /* the latents are written */
}

/* MLA in decode: joins the splits, and makes values of every head's latents. A block has 64 latents of a head; the one
 * that ends last for a head adds up what all of them made.
 * Grid: (tiles of 64 latents, n_head), block: 256. Reads n_split * 260 bytes a token from L2, and wv_b once. */
template <int NT>
__global__ void __launch_bounds__(GEMV_THREADS, 2) k_mla_value(const __grid_constant__ struct mla_value_args p) {
    enum { STRIDE = TILE_COLS + 32 };
    SHARED(uint16_t, x, DECODE_MAX_TOKENS * STRIDE);
    DYN_SMEM(float, smem); /* see mla_join */
    grid_dependency_launch();
    const struct attn_args &a = p.attn;
    const int tid = threadIdx.x, warp = tid >> 5, g = tid >> 2 & 7, t4 = tid & 3, c = blockIdx.x, h = blockIdx.y;
    const int n_out = p.w.n_out;
    const float scale = device_matrix_scale(p.w, h);
    with_format(p.w.fmt, [&](auto fmt) {
        /* warps without a row of tiles take part in the join */
        for (int rt = warp; rt == warp || rt < p.w.n_rt; rt += GEMV_WARPS) {
            const bool is = rt < p.w.n_rt;
            const struct gemv_single one = {{tile_index(p.w, h, is ? rt : 0) + (size_t)c, x, STRIDE, a.n_tok}};
            float acc[NT][4] = {};
            auto ready = [&] {
                if (rt != warp) return;
                grid_dependency_wait();
                mla_join(a, c, h, smem, x, STRIDE);
            };
            gemv_stream<fmt.value, NT>(p.w, 0, is, one, ready, acc);
            UNROLL for (int i = 0; i < 4 * NT; i++) {
                const int tok = 8 * (i >> 2) + 2 * t4 + (i & 1), row = rt * TILE_ROWS + g + 8 * (i >> 1 & 1);
                if (tok < a.n_tok && row < n_out)
                    p.parts[(((size_t)c * a.n_tok + tok) * a.n_head + h) * n_out + row] = acc[i >> 2][i & 3] * scale;
            }
        }
    });
    if (!last_block(p.arrived + h, gridDim.x)) return;
    if (!tid) p.arrived[h] = 0;
    for (int i = tid; i < a.n_tok * n_out; i += GEMV_THREADS) {
        const int tok = i / n_out, row = i % n_out;
        float v = 0;
        UNROLL_BY(8)
        for (int k = 0; k < (int)gridDim.x; k++)
            v += load_l2(p.parts + (((size_t)k * a.n_tok + tok) * a.n_head + h) * n_out + row);
        p.out[(size_t)tok * p.out_stride + (size_t)h * n_out + row] = clamped_f16(v);
    }
}

/* Gates of the heads' results in prefill. */
struct gate_args {
    uint16_t *x; /* (n_tok, n_head * head_v) halves, tokens x_stride apart, a multiple of 8 */
    size_t x_stride;
    const float *gate; /* (n_tok, n_head) or, with `each`, (n_tok, n_head * head_v), tokens gate_stride apart */
    size_t gate_stride;
    int n_head, head_v;
    bool each, softplus;
};

/* x *= the gates. Grid: (ceil(n_head * head_v / 1024), n_tok), block: 128, 8 values a thread. Moves 4 bytes per value
 * and the gates. */
__global__ void __launch_bounds__(128) k_head_gate(struct gate_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = 8 * (int)(blockIdx.x * 128 + threadIdx.x);
    if (i >= a.n_head * a.head_v) return;
    uint16_t *x = a.x + blockIdx.y * a.x_stride + i;
    const float *gate = a.gate + blockIdx.y * a.gate_stride + (a.each ? i : i / a.head_v);
    pack<4> h = *(const pack<4> *)x;
    UNROLL for (int j = 0; j < 4; j++) {
        const float lo = gate_factor<true>(gate[a.each ? 2 * j : 0], a.softplus);
        const float hi = gate_factor<true>(gate[a.each ? 2 * j + 1 : 0], a.softplus);
        h.x[j] = clamped_f16x2(lo * half_to_f32((uint16_t)h.x[j]), hi * half_to_f32((uint16_t)(h.x[j] >> 16)));
    }
    *(pack<4> *)x = h;
}

/* ============================================================================================================
 * Attention: choice and launch
 *
 * The kernel for a shape of heads and a type of cache.
 * ============================================================================================================ */

/* Divides the keys of a window among splits: in decode, at most max_splits, of which a block joins all at once. Up to
 * 16 tokens see `keys` different keys; where these are few, they are one split. */
static void attn_window_splits(struct attn_args *a) {
    const int keys = a->window + DECODE_MAX_TOKENS - 1, most = min(a->max_splits, (int)ATTN_JOIN);
    auto splits = [&](int shift) { return ((keys - 2) >> shift) + 2; }; /* the first keys may be the last of a split */
    a->window_shift = 0;
    a->max_splits = 1;
    if (a->n_tok > DECODE_MAX_TOKENS || keys <= 4 * ATTN_SPLIT_KEYS || most < 2) return;
    for (a->window_shift = 7; splits(a->window_shift) > most;) a->window_shift++;
    a->max_splits = splits(a->window_shift);
}

/* Launches k_mla_value, after attention of p->attn. */
static void mla_value(const struct mla_value_args *p, cudaStream_t s) {
    struct mla_value_args v = *p;
    const size_t smem = (size_t)v.attn.n_tok * (GEMV_WARPS * TILE_COLS + 1) * sizeof(float);
    const dim3 grid((unsigned)v.w.n_kt, (unsigned)v.attn.n_head);
    if (v.attn.window) attn_window_splits(&v.attn); /* as attn_run has done */
    if (v.attn.n_tok <= 8) LAUNCH_PDL(k_mla_value<1>, grid, GEMV_THREADS, smem, s, v);
    else LAUNCH_PDL(k_mla_value<2>, grid, GEMV_THREADS, smem, s, v);
}

/* Launches an attention kernel and, if the context is split and the kernel leaves that, the merge. In prefill more row
 * tiles per KV head mean fewer splits: they fill the GPU, too. */
typedef void attn_kernel_fn(struct attn_args);
static void attn_run(const struct attn_args *args, attn_kernel_fn *attn_kernel, int tile_rows, int threads, int smem,
                     cudaStream_t s) {
    struct attn_args a = *args;
    int group_heads = a.n_head / a.n_head_kv, tiles = (group_heads * a.n_tok + tile_rows - 1) / tile_rows,
        splits = a.max_splits;
    const bool by_token = a.top_k || a.one_kv || a.batch.several; /* a tile has rows of one token */
    if (by_token) tiles = a.n_tok * ((group_heads + tile_rows - 1) / tile_rows);
    if (a.n_tok > DECODE_MAX_TOKENS)
        splits = min(splits * ((group_heads + 15) / 16) / tiles, splits * DECODE_MAX_TOKENS / a.n_tok);
    a.max_splits = max(1, min(splits, (int)SPLITS_MAX));
    if (a.window && !a.one_kv) attn_window_splits(&a);
    if (smem > 32 << 10) /* more than the default 48 KB, static arrays included */
        cudaFuncSetAttribute(attn_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    const bool halves = a.chunked || (a.n_tok <= DECODE_MAX_TOKENS && !a.window); /* see attn_begin */
    const dim3 grid((unsigned)a.max_splits, (unsigned)(tiles * a.n_head_kv), 1 + (a.n_tok > 1 && halves && !by_token));
    LAUNCH_PDL(attn_kernel, grid, dim3((unsigned)threads), (size_t)smem, s, a);
    if (a.max_splits == 1 || a.arrived || !a.out) return; /* the kernel joins the splits itself, or k_mla_value does */
    a.n_head_kv = 1;
    LAUNCH_PDL(attn_merge, dim3((unsigned)(a.n_tok * a.n_head)), dim3(256), 0, s, a);
}

/* Whether there are kernels of grouped-query attention over chosen keys for these head widths. */
__host__ __device__ constexpr bool attn_chooses(int dk, int dv) { return dk == dv && (dk == 64 || dk == 128); }

/* The same over blocks of a few keys. */
__host__ __device__ constexpr bool attn_chooses_few(int dk, int dv) { return dk == dv && dk >= 64 && dk <= HEAD_MAX; }

/* Whether there are kernels of latent attention over chosen keys for latents of this width. */
__host__ __device__ constexpr bool attn_chooses_latents(int latents) { return latents != 256 && latents <= 512; }

/* The same with a window. */
__host__ __device__ constexpr bool attn_windows_latents(int latents) { return latents > 512; }

/* Whether there are kernels of grouped-query attention with a bias by distance for these head widths. */
__host__ __device__ constexpr bool attn_biased(int dk, int dv) { return dk == dv && dk <= REL_MAX; }

/* Launch the kernels of one head width: tiles of 16 query rows for decode, 64 for prefill; MLA 16 or 32. */
template <int K, int V, int FP8>
static void attn_run_gqa(const struct attn_args *a, int prefill, cudaStream_t s) {
    attn_kernel_fn *decode = attn_gqa_decode<K, V, FP8, GQA_PLAIN>, *many = attn_gqa_prefill<K, V, FP8, false>;
    if constexpr (attn_chooses(K, V))
        if (a->top_k) decode = attn_gqa_decode<K, V, FP8, GQA_CHOSEN>;
    if constexpr (attn_chooses_few(K, V))
        if (a->top_k && a->block_end == POOL_END) decode = attn_gqa_decode<K, V, FP8, GQA_MEANS>;
    if constexpr (attn_biased(K, V))
        if (a->rel) decode = attn_gqa_decode<K, V, FP8, GQA_BIASED>, many = attn_gqa_prefill<K, V, FP8, true>;
    if (prefill && !a->top_k) attn_run(a, many, 64, 128, attn_tiled<K, V, FP8>::SMEM, s);
    else attn_run(a, decode, 16, 128, attn_gqa<K, V, FP8>::SMEM, s);
}
template <int LAT, int ROPE, int FP8>
static void attn_run_mla(const struct attn_args *a, int prefill, cudaStream_t s) {
    const int rows = a->top_k || a->batch.several ? a->n_head : a->n_head * a->n_tok; /* that share keys */
    constexpr int FEW = ROPE ? KEYS_ALL : KEYS_CHOSEN; /* among pools decode always chooses */
    constexpr int MOST = LAT > 512 ? 1 : 2;            /* row tiles whose queries fit */
    attn_kernel_fn *two = attn_mla_kernel<LAT, ROPE, FP8, MOST, KEYS_ALL>,
                   *one = attn_mla_kernel<LAT, ROPE, FP8, 1, FEW>;
    if constexpr (attn_chooses_latents(LAT))
        if (a->top_k) {
            two = attn_mla_kernel<LAT, ROPE, FP8, 2, KEYS_CHOSEN>;
            one = attn_mla_kernel<LAT, ROPE, FP8, 1, KEYS_CHOSEN>;
        }
    /* Two row tiles share one reading and conversion of the cache. */
    if ((prefill && !a->top_k) || rows > 16) attn_run(a, two, 16 * MOST, 256, attn_mla<LAT, ROPE, FP8, MOST>::SMEM, s);
    else attn_run(a, one, 16, 256, attn_mla<LAT, ROPE, FP8, 1>::SMEM, s);
}

/* Grouped-query attention of wide heads, for which k_rope_gqa has made queries and new rows. */
template <int D, int FP8>
static void attn_run_wide(const struct attn_args *a, int prefill, cudaStream_t s) {
    const int rows = a->n_head / a->n_head_kv * (a->batch.several ? 1 : a->n_tok); /* that share keys */
    if (prefill || rows > 16)
        attn_run(a, attn_mla_kernel<D, 0, FP8, 2, KEYS_APART>, 32, 256, attn_mla<D, 0, FP8, 2, true>::SMEM, s);
    else attn_run(a, attn_mla_kernel<D, 0, FP8, 1, KEYS_APART>, 16, 256, attn_mla<D, 0, FP8, 1, true>::SMEM, s);
}

template <int D, int FP8>
static void attn_run_csa(const struct attn_args *a, int, cudaStream_t s) {
    if constexpr (D > 64) {
        if (a->n_head > 16 && a->n_tok > 2) {
            attn_run(a, attn_mla_kernel<D, 0, FP8, 2, KEYS_ONE_KV>, 32, 256, attn_mla<D, 0, FP8, 2>::SMEM, s);
            return;
        }
    }
    attn_run(a, attn_mla_kernel<D, 0, FP8, 1, KEYS_ONE_KV>, 16, 256, attn_mla<D, 0, FP8, 1>::SMEM, s);
}

typedef void attn_runner(const struct attn_args *, int prefill, cudaStream_t);
enum attn_kind { ATTN_GQA, ATTN_MLA, ATTN_CSA };

/* Returns the launcher for these head widths; NULL: there are no kernels for them. */
static attn_runner *attn_find(enum attn_kind kind, int dk, int dv, int fp8) {
    static const struct {
        enum attn_kind kind;
        int dk, dv;
        attn_runner *run[2]; /* BF16, FP8 */
    } table[] = {
        {ATTN_GQA, 32, 32, {attn_run_gqa<32, 32, 0>, attn_run_gqa<32, 32, 1>}},
        {ATTN_GQA, 64, 64, {attn_run_gqa<64, 64, 0>, attn_run_gqa<64, 64, 1>}},
        {ATTN_GQA, 128, 128, {attn_run_gqa<128, 128, 0>, attn_run_gqa<128, 128, 1>}},
        {ATTN_GQA, 192, 128, {attn_run_gqa<192, 128, 0>, attn_run_gqa<192, 128, 1>}},
        {ATTN_GQA, 256, 256, {attn_run_gqa<256, 256, 0>, attn_run_gqa<256, 256, 1>}},
        {ATTN_GQA, 512, 512, {attn_run_wide<512, 0>, attn_run_wide<512, 1>}},
        {ATTN_MLA, 1024 + 64, 1024, {attn_run_mla<1024, 64, 0>, attn_run_mla<1024, 64, 1>}},
        {ATTN_MLA, 512 + 64, 512, {attn_run_mla<512, 64, 0>, attn_run_mla<512, 64, 1>}},
        {ATTN_MLA, 512, 512, {attn_run_mla<512, 0, 0>, attn_run_mla<512, 0, 1>}},
        {ATTN_MLA, 128, 128, {attn_run_mla<128, 0, 0>, attn_run_mla<128, 0, 1>}},
        {ATTN_MLA, 64, 64, {attn_run_mla<64, 0, 0>, attn_run_mla<64, 0, 1>}},
        {ATTN_MLA, 256 + 64, 256, {attn_run_mla<256, 64, 0>, attn_run_mla<256, 64, 1>}},
        {ATTN_MLA, 128 + 64, 128, {attn_run_mla<128, 64, 0>, attn_run_mla<128, 64, 1>}},
        {ATTN_MLA, 64 + 16, 64, {attn_run_mla<64, 16, 0>, attn_run_mla<64, 16, 1>}},
        {ATTN_CSA, 512, 512, {attn_run_csa<512, 0>, attn_run_csa<512, 1>}},
        {ATTN_CSA, 64, 64, {attn_run_csa<64, 0>, attn_run_csa<64, 1>}},
    };
    for (auto &x : table)
        if (x.kind == kind && x.dk == dk && x.dv == dv) return x.run[fp8 != 0];
    return NULL;
}
/* Runs attention over the cache, with the kernels for these head widths and this type of cache. */
static void attn_launch(const struct attn_args *a, enum attn_kind kind, bool prefill, cudaStream_t s) {
    attn_find(kind, a->dk, a->dv, a->k.type == KV_FP8)(a, prefill, s);
}

/* ============================================================================================================
 * Attention: expanded latents
 *
 * Prefill expands keys and values from the latents, see mla_expands_on_gpu.
 * ============================================================================================================ */

/* For a segment of a layer's keys. */
struct mla_buffers {
    int segment;       /* keys at most: MLA_SEGMENT */
    uint16_t *latents; /* (segment, kv_lora + rope_dim) rows of the cache in halves */
    uint16_t *keys;    /* (n_head, segment, nope) */
    uint16_t *values;  /* (n_head, segment, head_v) */
    float *max_den;    /* (chunk, n_head, 2) maximum and denominator of a row over the segments so far */
    uint8_t *wk_b;     /* (n_head, nope, kv_lora) FMT_F16: the layer's wk_b, transposed */
};

/* to (n_expert, n_out, n_in), FMT_F16, = the transposed matrices of `from` (n_expert, n_in, n_out). Both have the same
 * factors of results. Exact but for Q8_0 and FP8, whose weights are rounded to halves.
 * Grid: tiles of `to`, block: 256, 4 weights a thread. Bound by the latency of single reads: 5 to 10 us. */
__global__ void __launch_bounds__(256) k_transpose(struct device_matrix from, struct device_matrix to) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int tile = (int)blockIdx.x, e = tile / (to.n_rt * to.n_kt), rt = tile / to.n_kt % to.n_rt;
    const int step = (int)threadIdx.x >> 6, lane = (int)threadIdx.x >> 1 & 31, half = (int)threadIdx.x & 1;
    const int row = rt * TILE_ROWS + (lane >> 2);
    const int col = tile % to.n_kt * TILE_COLS + 32 * (step >> 1) + 8 * (lane & 3) + 4 * (step & 1) + 2 * half;
    const size_t before = tile_index(from, e, 0);
    from.codes += before * (size_t)TILE_BYTES(from.fmt);
    if (from.scales) from.scales += before * TILE_SCALES;
    from.scale = NULL;
    from.decode_scale = 1;
    auto value = [&](int r, int c) { return r < to.n_out && c < to.n_in ? device_matrix_value(from, c, r) : 0.0f; };
    uint2 a; /* registers a0 and a1 of the lane in this step, or a2 and a3 */
    a.x = clamped_f16x2(value(row, col), value(row, col + 1));
    a.y = clamped_f16x2(value(row + 8, col), value(row + 8, col + 1));
    *(uint2 *)(to.codes + (size_t)tile * TILE_BYTES(FMT_F16) + step * 512 + lane * 16 + 8 * half) = a;
}

/* x (n_key, latent + rope) = rows first.. of the cache in halves: latents k, then rotated values.
 * Grid: ceil(n_key * (latent + rope) / 2048), block: 256, 8 values a thread. Moves 3 or 4 bytes per value. */
template <int FP8>
__global__ void __launch_bounds__(256)
    k_mla_latents(struct batch_ref batch, struct cache_tensor k, struct cache_tensor rotated, int latent, int rope,
                  int first, int n_key, uint16_t *x) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = (int)(blockIdx.x * 256 + threadIdx.x), pieces = (latent + rope) / 8, at = i % pieces * 8;
    const size_t row = (size_t)run_rows_of(batch.run(0), k).at(first + i / pieces);
    if (i / pieces >= n_key) return;
    pack<4> h;
    if (at < latent) {
        h = kv_values<FP8, 8>(k.data + row * k.row_bytes + at * (FP8 ? 1 : 2));
        const float scale = FP8 ? k.scale[row * k.n_scale + at / ATTN_GROUP] : 1.0f;
        UNROLL for (int j = 0; FP8 && j < 4; j++) {
            const float lo = half_to_f32((uint16_t)h.x[j]), hi = half_to_f32((uint16_t)(h.x[j] >> 16));
            h.x[j] = clamped_f16x2(lo * scale, hi * scale);
        }
    } else {
        h = kv_values<0, 8>(rotated.data + row * rotated.row_bytes + (at - latent) * 2);
    }
    *(pack<4> *)(x + (size_t)i * 8) = h;
}

struct mla_args {
    const uint16_t *q;      /* (n_tok, n_head, nope + rope) f16; the rotated values lie elsewhere: */
    const uint16_t *q_rope; /* (n_tok, n_head, latent + rope) f16: after the latents */
    uint16_t *out;          /* (n_tok, n_head, v) f16, tokens out_stride halves apart */
    size_t out_stride;
    struct mla_buffers buffer; /* with the segment's latents, keys and values */
    float *sums;               /* (n_tok, n_head, v) weighted sums over the segments so far */
    int n_tok, n_head, latent;
    int pos, first, n_key; /* position of token 0; keys first..first+n_key-1 are the segment */
    float factor;          /* of q.k: scale * log2 e, for a softmax of base 2 */
};

/* Starts to copy KEYS rows of D halves, `stride` halves apart, to an f16 tile, with THREADS threads. From row n on the
 * tile gets zeros. */
template <int D, int KEYS, int THREADS>
DEVICE void f16_copy(uint8_t *to, const uint16_t *from, size_t stride, int n) {
    constexpr int PIECES = D / 8;
    UNROLL for (int x = (int)threadIdx.x; x < KEYS * PIECES; x += THREADS) {
        const int row = x / PIECES, c = x % PIECES;
        cp_async16(to + f16_at<D>(row, c), from + (size_t)row * stride + c * 8, row < n);
    }
}

template <int NOPE, int ROPE, int V>
struct mla_tile {
    static constexpr int KEYS = 64, ROWS = 128;
    static constexpr int ROPE_AT = KEYS * NOPE * 2, V_AT = ROPE_AT + KEYS * ROPE * 2, BYTES = V_AT + KEYS * V * 2;
    static constexpr int SMEM = 2 * BYTES;
};

/* Latent attention over the expanded keys and values of a segment, with an online softmax whose state goes from segment
 * to segment through `sums` and max_den. `out` is written with the last segment that a block's tokens see.
 * Grid: (n_head, ceil(n_tok / 128)), block: 256, 8 warps of 16 tokens each. Tokens that see the most keys start
 * first. A tile of 64 keys is copied while the one before is multiplied: 320 multiplications per key, token and head,
 * 160 MMAs of a warp beside 80 ldmatrix. Reads 640 bytes per key for 128 tokens from L2, and 1,040 bytes of state per
 * token, head and segment. Limit: the MMA rate. */
template <int NOPE, int ROPE, int V>
__global__ void __launch_bounds__(256, 1) attn_mla_expanded(const __grid_constant__ struct mla_args a) {
    using L = mla_tile<NOPE, ROPE, V>;
    constexpr int KEYS = L::KEYS, NT = KEYS / 8, STEPS = (NOPE + ROPE) / 16;
    DYN_SMEM(uint8_t, smem);
    grid_dependency_launch();
    grid_dependency_wait();
    const int tid = (int)threadIdx.x, lane = tid & 31, g = lane >> 2, t = lane & 3, head = (int)blockIdx.x;
    const int tile0 = (int)(gridDim.y - 1 - blockIdx.y) * L::ROWS, row0 = tile0 + (tid >> 5) * 16;
    const int base = a.pos + 1 - a.first; /* token i sees keys 0 .. base + i - 1 of the segment */
    const int seen = base + min(tile0 + L::ROWS, a.n_tok) - 1, n = (min(seen, a.n_key) + KEYS - 1) / KEYS;
    if (seen <= 0) return; /* an earlier segment was the last */

    auto copy = [&](int i) {
        uint8_t *to = smem + (i & 1) * L::BYTES;
        const size_t key = (size_t)i * KEYS, at = (size_t)head * (size_t)a.buffer.segment + key;
        const int left = a.n_key - (int)key;
        if (i < n) {
            f16_copy<NOPE, KEYS, 256>(to, a.buffer.keys + at * NOPE, NOPE, left);
            f16_copy<ROPE, KEYS, 256>(to + L::ROPE_AT, a.buffer.latents + key * (a.latent + ROPE) + a.latent,
                                      a.latent + ROPE, left);
            f16_copy<V, KEYS, 256>(to + L::V_AT, a.buffer.values + at * V, V, left);
        }
        cp_async_commit();
    };
    copy(0);

    size_t row[2]; /* of this lane: token * n_head + head */
    bool in[2];    /* whether there is such a token */
    int limit[2];
    UNROLL for (int h = 0; h < 2; h++) {
        const int token = row0 + g + 8 * h;
        in[h] = token < a.n_tok;
        row[h] = (size_t)token * a.n_head + head;
        limit[h] = in[h] ? base + token : 0;
    }
    pack<4> q[STEPS]; /* A operands of the k16-steps */
    UNROLL for (int s = 0; s < STEPS; s++) UNROLL for (int e = 0; e < 4; e++) {
        const int h = e & 1, col = 16 * s + 2 * t + (e >> 1) * 8;
        const uint16_t *x = a.q + row[h] * (NOPE + ROPE) + col;
        if (16 * s >= NOPE) x = a.q_rope + row[h] * (a.latent + ROPE) + a.latent + col - NOPE;
        q[s].x[e] = in[h] ? *(const uint32_t *)x : 0;
    }
    float m[2] = {ATTN_NO_KEY, ATTN_NO_KEY}, l[2] = {0, 0}, acc[V / 8][4] = {};
    UNROLL for (int h = 0; h < 2; h++) {
        if (!a.first || !in[h]) continue;
        m[h] = a.buffer.max_den[2 * row[h]];
        l[h] = t ? 0.0f : a.buffer.max_den[2 * row[h] + 1];
        UNROLL for (int b = 0; b < V / 8; b++) {
            const float2 x = *(const float2 *)(a.sums + row[h] * V + 8 * b + 2 * t);
            acc[b][2 * h] = x.x;
            acc[b][2 * h + 1] = x.y;
        }
    }

    for (int i = 0; i < n; i++) {
        const uint8_t *tile = smem + (i & 1) * L::BYTES;
        cp_async_wait<0>();
        __syncthreads(); /* the tile has landed; all warps are done with the one before, which the next overwrites */
        copy(i + 1);
        if (i * KEYS >= base + row0 + 15) continue; /* no token of the warp sees the tile */
        float s[NT][4] = {};
        UNROLL for (int k = 0; k < STEPS; k++) UNROLL for (int b = 0; b < NT; b += 2) {
            /* Matrices: elements 0-7 and 8-15 of keys 0-7, then of keys 8-15. */
            uint32_t r[4];
            const int key = 8 * b + (lane >> 4) * 8 + (lane & 7), c = 2 * k + (lane >> 3 & 1);
            ldmatrix_x4(r, 16 * k < NOPE ? tile + f16_at<NOPE>(key, c)
                                         : tile + L::ROPE_AT + f16_at<ROPE>(key, c - NOPE / 8));
            mma_f16(s[b], q[k].x, r);
            mma_f16(s[b + 1], q[k].x, r + 2);
        }
        const bool all = (i + 1) * KEYS <= base + row0;
        UNROLL for (int b = 0; b < NT; b++)
            attn_mask<false>(s[b], i * KEYS + 8 * b + 2 * t, a.factor, a.factor, limit, 0, all);
        attn_softmax(s, m, l, acc);
        UNROLL for (int k = 0; k < NT / 2; k++) {
            const float f[4] = {ATTN_P, ATTN_P, ATTN_P, ATTN_P};
            uint32_t p[4];
            attn_weights(p, s[2 * k], s[2 * k + 1], f);
            attn_values_f16<V>(acc, p, tile + L::V_AT, 16 * k, lane);
        }
    }

    UNROLL for (int h = 0; h < 2; h++) {
        const float den = quad_sum(l[h]), inverse = 1.0f / (ATTN_P * den);
        if (!in[h]) continue;
        uint16_t *out = a.out + (size_t)(row0 + g + 8 * h) * a.out_stride + head * V + 2 * t;
        UNROLL for (int b = 0; b < V / 8; b++) {
            const float2 x = make_float2(acc[b][2 * h], acc[b][2 * h + 1]);
            if (seen <= a.n_key) *(uint32_t *)(out + 8 * b) = clamped_f16x2(x.x * inverse, x.y * inverse);
            else *(float2 *)(a.sums + row[h] * V + 8 * b + 2 * t) = x;
        }
        if (seen > a.n_key && !t) *(float2 *)(a.buffer.max_den + 2 * row[h]) = make_float2(m[h], den);
    }
}

/* Launches attn_mla_expanded for one of MLA_EXPANDED_SHAPES. */
static void mla_launch(const struct mla_args *a, int nope, int rope, int v, cudaStream_t s) {
    const dim3 grid((unsigned)a->n_head, (unsigned)(a->n_tok + 127) / 128);
#define LAUNCH_SHAPE(x, y, z)                                                                                   \
    if (nope == x && rope == y && v == z) {                                                                     \
        using L = mla_tile<x, y, z>;                                                                            \
        static_assert(L::SMEM <= 101376, "shared memory of SM120");                                             \
        cudaFuncSetAttribute(attn_mla_expanded<x, y, z>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::SMEM); \
        LAUNCH_PDL((attn_mla_expanded<x, y, z>), grid, dim3(256), L::SMEM, s, *a);                              \
    }
    MLA_EXPANDED_SHAPES(LAUNCH_SHAPE)
#undef LAUNCH_SHAPE
}

/* ============================================================================================================
 * Sparse attention: the indexer
 *
 * Chooses the keys that a query sees. k_index_store norms and rotates the indexer's keys and queries. For latent
 * attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1) k_index_scores adds up, over the indexer's heads, weight *
 * max(0, q.k), and where a block of keys has one key, the mean of theirs (Qwen3.8-Flash-Next), the same without
 * weights. For grouped-query attention (MiniMax-M3) k_index_blocks finds the largest q.k of parts of every block
 * of keys, for each head, whose KV head has a list of its own. k_index_choose finds the last score of a query that is
 * among the largest, by radix selection, and lists the blocks from it on. A query whose context has at most top_k
 * keys sees all of them, and has no list. In DeepSeek-V4.1 one layer also lists the candidates of a query, blocks of keys
 * with the largest scores, and indexers of later layers score and choose keys of these blocks alone.
 * ============================================================================================================ */

enum {
    INDEX_WIDTH = 128,     /* values of a head at most */
    INDEX_TOKENS = 2,      /* tokens of a block of k_index_scores */
    INDEX_ROWS = 64,       /* queries of a block of k_index_blocks: as many tokens as fit */
    INDEX_KEYS = 32,       /* keys of a warp's step */
    INDEX_THREADS = 256,   /* of k_index_scores and k_index_blocks */
    CHOOSE_THREADS = 1024, /* of k_index_choose */
    CHOOSE_WARPS = CHOOSE_THREADS / 32,
    CHOOSE_BINS = 2 * CHOOSE_THREADS
};

struct index_args {
    struct rope_args rope; /* of queries and keys: q, k, their norms, q16 and kp; d is the width of a head */
    const float *bias;     /* (width) of the LayerNorm of keys; NULL: they have an RMSNorm */
    float bias_eps;        /* epsilon of the LayerNorm */
    int turned;            /* the first value of a head that is rotated */
    const float *w;        /* latent attention: (n_tok, n_index) weights of the heads, w_stride apart; NULL: 1 */
    size_t w_stride;
    float score_scale; /* factor of the scores */
    float *scores;     /* (n_tok, n_list, n_scores) of keys, or of parts of blocks */
    int32_t *chosen;   /* (n_tok, n_list, n_topk) ascending blocks; with pools the last is the unfinished one */
    float *pooled; /* (n_tok, width) gets the normed keys, which pools are made of, k_stride apart; NULL: the cache */
    int n_tok, first; /* tokens of this launch, from token `first` of the batch on, whose q16, w and chosen these are */
    int block_tokens; /* tokens of a block of k_index_scores or k_index_blocks, of one run */
    int top_k, n_list, n_topk, n_chosen, n_scores; /* n_chosen: of n_topk those that scores choose */
    int block, local;        /* keys of a block; blocks that a query always sees, its own and those before it */
    int parts;               /* scores of a block */
    struct divisor together; /* a key has together.n tokens, and is seen from the last of them on */
    /* (n_tok, n_candidate) ascending blocks of candidate_block.n keys, of queries with more blocks, of which the last is
     * one: what keys are scored and chosen among, and numbered in the order of these. NULL: all keys */
    const int32_t *candidates;
    int n_candidate;
    struct divisor candidate_block;
    /* means: a key is made of the mean of its tokens' keys, of which the ring has those before the batch */
    bool means, keep; /* keep: the ring gets those of the batch */
    struct cache_tensor ring;
    struct rope_table table; /* of the rotation: a key is rotated as the first of its tokens */
};

/* The keys that are scored for a token: `n`, of which key i is key at(i) of the context. */
struct index_keys {
    const int32_t *list; /* candidates; NULL: the keys are those of the context */
    struct divisor block;
    int n;
    DEVICE_MEMBER int at(int i) const { return list ? key_of_blocks(list, block, i) : i; }
};
/* Those of token `row` of the launch, which sees so many keys. */
DEVICE struct index_keys index_keys_of(const struct index_args &a, int row, int seen) {
    const struct divisor &block = a.candidate_block;
    if (!a.candidates) return {NULL, block, seen};
    const int more = block.of(seen + block.n - 1) - a.n_candidate; /* blocks than candidates */
    if (more <= 0) return {NULL, block, seen};
    return {a.candidates + (size_t)row * a.n_candidate, block, seen - more * block.n};
}

/* The key of the block that ends with row t, with one warp: the mean of its tokens' keys, normed and rotated, goes to the
 * cache. mean: (d) memory of the warp. */
template <int PER>
DEVICE void index_mean_store(const struct index_args &a, const struct run &u, int t, float *mean) {
    const struct rope_args &p = a.rope;
    const int lane = threadIdx.x & 31, pos = run_base(u) + t, from = pos + 1 - a.together.n;
    const float each = 1.0f / (float)a.together.n;
    float x[PER] = {};
    UNROLL_BY(4) for (int q = from; q <= pos; q++) {
        const float *key = q < u.pos ? ring_at(u, a.ring, q) : p.k + (size_t)(t - (pos - q)) * p.k_stride;
        UNROLL for (int j = 0; j < PER; j++) if (lane + 32 * j < p.d) x[j] = fmaf(each, key[lane + 32 * j], x[j]);
    }
    UNROLL for (int j = 0; j < PER; j++) if (lane + 32 * j < p.d) mean[lane + 32 * j] = x[j];
    __syncwarp(); /* the mean is complete */
    auto angle = [&](int i) { return (float)from * a.table.freq[i]; };
    rope_head_by<PER>(
        p, mean, p.k_norm, p.d, [&](int i) { return cosf(angle(i)) * a.table.factor; },
        [&](int i) { return sinf(angle(i)) * a.table.factor; }, x);
    cache_store<PER>(p.kp, (size_t)run_rows_of(u, p.kp).at(a.together.of(pos)), 0, 0, p.d, x);
}

/* Norm and rotation of the indexer's queries, and of its key of a token, which goes to the cache; with means of the key
 * of the block that ends with the token.
 * Grid: (ceil((n_index + 1) / 4), n_tok), block: 128, one warp per row. Reads q and k once. */
__global__ void __launch_bounds__(128) k_index_store(const __grid_constant__ struct index_args a) {
    enum { PER = INDEX_WIDTH / 32 };
    SHARED(float, row, INDEX_WIDTH);
    grid_dependency_launch();
    grid_dependency_wait();
    const struct rope_args &p = a.rope;
    const int lane = threadIdx.x & 31, h = blockIdx.x * 4 + (threadIdx.x >> 5), t = blockIdx.y, n = p.d;
    float x[PER];
    if (h > p.n_head) return;
    if (h < p.n_head) {
        rope_head<PER>(p, p.q + (size_t)t * p.q_stride + (size_t)h * n, p.q_norm, n, t, x, a.turned);
        UNROLL for (int j = 0; j < PER; j++) if (lane + 32 * j < n)
            p.q16[((size_t)t * p.n_head + h) * n + lane + 32 * j] = clamped_f16(x[j]);
        return;
    }
    const float *key = p.k + (size_t)t * p.k_stride;
    if (a.means) {
        const struct run &u = p.batch.run(t);
        const int pos = run_base(u) + t;
        float *kept = ring_at(u, a.ring, pos);
        for (int i = lane; i < n && a.keep; i += 32) kept[i] = key[i];
        if (t < p.batch.at->n_tok && !a.together.rest(pos + 1)) index_mean_store<PER>(a, u, t, row);
        return;
    }
    if (a.bias) {
        float sum = 0, square = 0;
        UNROLL for (int j = 0; j < PER; j++) {
            x[j] = lane + 32 * j < n ? key[lane + 32 * j] : 0;
            sum += x[j];
        }
        const float mean = warp_sum(sum) / (float)n;
        UNROLL for (int j = 0; j < PER; j++) if (lane + 32 * j < n) square = fmaf(x[j] - mean, x[j] - mean, square);
        const float f = rsqrtf(warp_sum(square) / (float)n + a.bias_eps);
        UNROLL for (int j = 0; j < PER; j++) {
            const int c = lane + 32 * j;
            if (c < n) row[c] = (x[j] - mean) * f * p.k_norm[c] + a.bias[c];
        }
        __syncwarp(); /* the row is normed */
        key = row;
    }
    rope_head<PER>(p, key, a.bias ? NULL : p.k_norm, n, t, x, a.turned);
    if (a.pooled) {
        UNROLL for (int j = 0; j < PER; j++) if (lane + 32 * j < n) a.pooled[(size_t)t * p.k_stride + lane + 32 * j] =
            x[j];
        return;
    }
    const struct run &u = p.batch.run(t);
    cache_store<PER>(p.kp, (size_t)run_rows_of(u, p.kp).at(run_base(u) + t), 0, 0, n, x);
}

/* Bytes of the queries of `tokens` tokens as MMA A operands, each token in tiles of its own. */
static size_t index_queries(int n_index, int width, int tokens) {
    return (size_t)tokens * (size_t)((n_index + 15) / 16) * (size_t)(width / 16) * 512;
}

/* Keys of a part of a block, which has a score of its own, and parts of a block. */
__host__ __device__ constexpr int index_part(int block) { return block < INDEX_KEYS ? block : (int)INDEX_KEYS; }
__host__ __device__ constexpr int index_parts(int block) { return block / index_part(block); }

/* Scores of a list in a context of n_ctx tokens: of keys, which may be compressed, or of parts of blocks. */
static int index_scores_of(const struct layer *layer, int n_ctx) {
    const struct attn *a = &layer->attn;
    const int part = a->index_means              ? a->index_block
                     : layer->mixer == MIXER_GQA ? index_part(a->index_block)
                     : a->compress_ratio         ? a->compress_ratio
                                                 : 1;
    return (n_ctx + part - 1) / part;
}

/* Products of 16 queries and INDEX_KEYS keys of `width` values by one warp. */
template <int WIDTH, int FP8>
struct index_tile {
    static constexpr int RUN = kv_run(FP8, WIDTH), CHUNKS = WIDTH / 4 / RUN, STEPS = WIDTH / 16, ES = FP8 ? 1 : 2;
    static constexpr int GROUPS = INDEX_KEYS / 8;
    typedef float products[GROUPS][4];
    pack<RUN / 2> b[GROUPS][CHUNKS]; /* keys as B operands */

    /* Makes A operands of tiles of queries: (tiles, STEPS, 32 lanes). row(tile, r): query r of the tile; NULL: none.
     * Ends with a barrier. */
    template <class F>
    static DEVICE_MEMBER void queries(pack<4> *q, int tiles, F row) {
        constexpr int PIECES = WIDTH / 8;
        UNROLL_BY(2) for (int i = (int)threadIdx.x; i < tiles * 16 * PIECES; i += INDEX_THREADS) {
            const int tile = i / (16 * PIECES), r = i / PIECES & 15, at = i % PIECES * 8;
            const uint16_t *from = row(tile, r);
            pack<4> x = {};
            if (from) x = *(const pack<4> *)(from + at);
            UNROLL for (int k = 0; k < 2; k++) { /* four values of a lane and step each */
                const int e = at + 4 * k, s = e / (4 * RUN) * (RUN / 4) + e % RUN / 4, lane = (r & 7) * 4 + e / RUN % 4;
                pack<4> &to = q[(tile * STEPS + s) * 32 + lane];
                to.x[r >> 3] = x.x[2 * k];
                to.x[(r >> 3) + 2] = x.x[2 * k + 1];
            }
        }
        __syncthreads(); /* the queries have come */
    }
    /* Loads INDEX_KEYS keys. row_of(i): the row of key i of these. */
    template <class F>
    DEVICE_MEMBER void load(const struct cache_tensor &keys, int lane, F row_of) {
        UNROLL for (int i = 0; i < GROUPS; i++) {
            const uint8_t *row = keys.data + (size_t)row_of(8 * i + (lane >> 2)) * keys.row_bytes;
            UNROLL for (int c = 0; c < CHUNKS; c++) b[i][c] =
                kv_values<FP8, RUN>(row + (4 * c + (lane & 3)) * RUN * ES);
        }
    }
    /* acc[i][e] = query lane / 4 + 8 (e / 2) of the tile q times key 8 i + 2 (lane % 4) + e % 2. */
    DEVICE_MEMBER void multiply(products &acc, const pack<4> *q, int lane) const {
        UNROLL for (int s = 0; s < STEPS; s++) {
            const pack<4> f = q[s * 32 + lane];
            UNROLL for (int i = 0; i < GROUPS; i++) mma_f16(acc[i], f.x, b[i][s / (RUN / 4)].x + 2 * (s % (RUN / 4)));
        }
    }
};

/* scores (n_tok, n_scores) of the keys that a token sees, for tokens with more than top_k; AMONG: of candidates, and a
 * block has one token. The heads are the rows of the MMA, the keys its columns.
 * Grid: (any, ceil(n_tok / INDEX_TOKENS)), block: 256. A warp takes 32 keys at a time, which it reads once for
 * INDEX_TOKENS tokens. Reads keys * width values of the cache per block row. Decode is limited by that and, with 64
 * heads of 128, by the MMAs, 8192 multiplications per key and token. */
template <int WIDTH, int FP8, bool AMONG>
__global__ void __launch_bounds__(INDEX_THREADS, 2) k_index_scores(const __grid_constant__ struct index_args a) {
    using L = index_tile<WIDTH, FP8>;
    DYN_SMEM(pack<4>, q); /* (INDEX_TOKENS, m_tiles, STEPS, 32 lanes) */
    grid_dependency_launch();
    grid_dependency_wait();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int t0 = (int)blockIdx.y * a.block_tokens, n = min(a.n_tok - t0, a.block_tokens), n_index = a.rope.n_head;
    const struct run &u = a.rope.batch.run(a.first + t0);
    const int pos = run_base(u) + a.first + t0, len = a.together.of(pos + n), m_tiles = (n_index + 15) / 16;
    const struct run_rows where = run_rows_of(u, a.rope.kp);
    if (len <= a.top_k) return;
    const struct index_keys among = AMONG ? index_keys_of(a, t0, len) : index_keys{NULL, a.candidate_block, len};
    L::queries(q, n * m_tiles, [&](int tile, int r) -> const uint16_t * {
        const int head = tile % m_tiles * 16 + r;
        return head < n_index ? a.rope.q16 + ((size_t)(t0 + tile / m_tiles) * n_index + head) * WIDTH : NULL;
    });
    const int stride = (int)gridDim.x * (INDEX_THREADS / 32) * INDEX_KEYS;
    for (int base = ((int)blockIdx.x * (INDEX_THREADS / 32) + warp) * INDEX_KEYS; base < among.n; base += stride) {
        L keys;
        const int off = base < where.stem ? 0 : where.shift;
        auto row_of = [&](int i) { return AMONG ? where.at(among.at(i)) : off + i; };
        keys.load(a.rope.kp, lane, [&](int i) { return row_of(min(base + i, among.n - 1)); });
        for (int tok = 0; tok < n; tok++) {
            const float *w = a.w + (size_t)(t0 + tok) * a.w_stride;
            const int seen = a.together.of(pos + tok + 1);
            float sum[L::GROUPS][2] = {};
            for (int m = 0; m < m_tiles; m++) {
                typename L::products acc = {};
                keys.multiply(acc, q + (tok * m_tiles + m) * L::STEPS * 32, lane);
                const int h = 16 * m + g;
                auto weight = [&](int i) { return i >= n_index ? 0.0f : a.w ? w[i] : 1.0f; };
                const float w0 = weight(h), w1 = weight(h + 8);
                UNROLL for (int i = 0; i < L::GROUPS; i++) UNROLL for (int e = 0; e < 2; e++) sum[i][e] =
                    fmaf(w1, fmaxf(acc[i][e + 2], 0), fmaf(w0, fmaxf(acc[i][e], 0), sum[i][e]));
            }
            UNROLL for (int i = 0; i < L::GROUPS; i++) UNROLL for (int e = 0; e < 2; e++) {
                UNROLL for (int x = 4; x < 32; x *= 2) sum[i][e] += __shfl_xor_sync(0xFFFFFFFFu, sum[i][e], x);
                const int key = base + 8 * i + 2 * t + e;
                if (g || key >= (AMONG ? among.n : seen)) continue;
                const float scale = FP8 ? a.rope.kp.scale[row_of(key)] : 1.0f;
                a.scores[(size_t)(t0 + tok) * a.n_scores + key] = a.score_scale * scale * sum[i][e];
            }
        }
    }
}

/* scores (n_tok, n_index, n_scores): for each head the largest q.k of every part of a block, for tokens with more than
 * top_k keys. The queries of consecutive tokens and heads are the rows of the MMA, the keys its columns. Keys that a
 * token does not see count too: they lie in its own block, which it sees whatever the score, or after that.
 * Grid: (any, ceil(n_tok / tokens of INDEX_ROWS rows)), block: 256. A warp takes 32 keys at a time, one or two parts.
 * Reads keys * width values of the cache per block row, and is limited by that. */
template <int WIDTH, int FP8>
__global__ void __launch_bounds__(INDEX_THREADS) k_index_blocks(const __grid_constant__ struct index_args a) {
    using L = index_tile<WIDTH, FP8>;
    DYN_SMEM(pack<4>, q); /* (tiles, STEPS, 32 lanes) */
    grid_dependency_launch();
    grid_dependency_wait();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int t0 = (int)blockIdx.y * a.block_tokens, n = min(a.n_tok - t0, a.block_tokens), rows = n * a.n_list;
    const struct run &u = a.rope.batch.run(a.first + t0);
    const struct run_rows where = run_rows_of(u, a.rope.kp);
    const int len = run_base(u) + a.first + t0 + n;
    const int tiles = (rows + 15) / 16, part = index_part(a.block);
    if (len <= a.top_k) return;
    const size_t row0 = (size_t)t0 * a.n_list;
    L::queries(q, tiles, [&](int tile, int r) -> const uint16_t * {
        return tile * 16 + r < rows ? a.rope.q16 + (row0 + tile * 16 + r) * WIDTH : NULL;
    });
    const int stride = (int)gridDim.x * (INDEX_THREADS / 32) * INDEX_KEYS;
    for (int base = ((int)blockIdx.x * (INDEX_THREADS / 32) + warp) * INDEX_KEYS; base < len; base += stride) {
        L keys;
        float scale[L::GROUPS][2];
        const int off = base < where.stem ? 0 : where.shift;
        keys.load(a.rope.kp, lane, [&](int i) { return off + min(base + i, len - 1); });
        UNROLL for (int i = 0; i < L::GROUPS; i++) UNROLL for (int e = 0; e < 2; e++) scale[i][e] =
            FP8 ? a.rope.kp.scale[off + min(base + 8 * i + 2 * t + e, len - 1)] : 1.0f;
        for (int m = 0; m < tiles; m++) {
            typename L::products acc = {};
            keys.multiply(acc, q + m * L::STEPS * 32, lane);
            UNROLL for (int h = 0; h < 2; h++) {
                float top[L::GROUPS]; /* of 8 keys; then of the part that begins with them */
                UNROLL for (int i = 0; i < L::GROUPS; i++) {
                    top[i] = fmaxf(acc[i][2 * h] * scale[i][0], acc[i][2 * h + 1] * scale[i][1]);
                    top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], 1));
                    top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], 2));
                }
                top[0] = fmaxf(top[0], top[1]);
                top[2] = fmaxf(top[2], top[3]);
                if (part == INDEX_KEYS) top[0] = fmaxf(top[0], top[2]);
                const int row = 16 * m + g + 8 * h;
                if (t || row >= rows) continue;
                float *to = a.scores + (row0 + row) * a.n_scores + base / part;
                to[0] = top[0];
                if (part < INDEX_KEYS && base + part < len) to[1] = top[2];
            }
        }
    }
}

/* An integer of the same order as x; that of -0 is that of 0. */
DEVICE uint32_t index_order(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* chosen (n_tok, n_list, n_topk): ascending numbers of the blocks with the largest scores, for each token with more than
 * top_k keys; the last `local` blocks of a token are among them. Of equal scores those of lower positions are larger.
 * BLOCKS: a block has several keys and its score is the largest of its parts, otherwise it is a key, or one of the
 * candidates' keys.
 * Grid: n_tok * n_list, block: 1024. Reads the scores five times, from L2, with some 32 KB in flight: 1 us for 50,000
 * keys, each time. */
template <bool BLOCKS>
__global__ void __launch_bounds__(CHOOSE_THREADS, 1) k_index_choose(const __grid_constant__ struct index_args a) {
    SHARED(int, bins, CHOOSE_BINS);
    SHARED(int, found, 2); /* the digit, and how many of its bin are wanted */
    SHARED(int, more_than,
           CHOOSE_WARPS);             /* of a warp's bins: scores; then of its keys: scores above the k-th largest, */
    SHARED(int, equal, CHOOSE_WARPS); /* and equal to it */
    grid_dependency_launch();
    grid_dependency_wait();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, parts = BLOCKS ? a.parts : 1;
    const int tok = a.first + (int)blockIdx.x / a.n_list,
              seen = a.together.of(run_base(a.rope.batch.run(tok)) + tok + 1);
    const struct index_keys among = BLOCKS ? index_keys{} : index_keys_of(a, (int)blockIdx.x / a.n_list, seen);
    const int n = BLOCKS ? (seen + a.block - 1) / a.block : among.n; /* blocks that the token sees */
    if (seen <= a.top_k) return;
    if (!tid && a.n_chosen < a.n_topk) a.chosen[(size_t)blockIdx.x * a.n_topk + a.n_chosen] = n;
    const float *score = a.scores + (size_t)blockIdx.x * a.n_scores;
    auto order = [&](int i) {
        if (BLOCKS && i >= n - a.local) return ~0u; /* parts of the last one may have no score */
        float x = score[i * parts];
        if constexpr (BLOCKS)
            for (int p = 1; p < parts; p++) x = fmaxf(x, score[i * parts + p]);
        return index_order(x);
    };
    auto sum_to = [&](int x) { /* over the lanes up to this one */
                               UNROLL for (int i = 1; i < 32; i *= 2) {
                                   const int y = __shfl_up_sync(0xFFFFFFFFu, x, i);
                                   x += lane >= i ? y : 0;
                               }
                               return x;
    };
    uint32_t prefix = 0, mask = 0;
    int wanted = a.n_chosen;                                          /* of those with the prefix */
    for (int shift = 21; mask != ~0u; shift = shift == 21 ? 10 : 0) { /* digits of 11 bits, the last two overlap */
        for (int i = tid; i < CHOOSE_BINS; i += CHOOSE_THREADS) bins[i] = 0;
        __syncthreads(); /* the bins are empty */
        UNROLL_BY(8) for (int i = tid; i < n; i += CHOOSE_THREADS) {
            const uint32_t x = order(i);
            if (!((x ^ prefix) & mask)) atomicAdd(&bins[x >> shift & (CHOOSE_BINS - 1)], 1);
        }
        __syncthreads();                                                                   /* all are counted */
        const int first = CHOOSE_BINS - 2 - 2 * tid, mine = bins[first] + bins[first + 1]; /* larger digits first */
        const int to = sum_to(mine);
        if (lane == 31) more_than[warp] = to;
        __syncthreads(); /* the sums of all warps are there */
        const int warps = sum_to(more_than[lane]), before = __shfl_sync(0xFFFFFFFFu, warps, max(warp - 1, 0));
        const int above = to - mine + (warp ? before : 0); /* scores with larger digits than this thread's */
        if (above < wanted && above + mine >= wanted) {
            const int upper = bins[first + 1], low = above + upper < wanted;
            found[0] = first + 1 - low;
            found[1] = wanted - above - (low ? upper : 0);
        }
        __syncthreads(); /* the digit is found */
        prefix = (prefix & mask) | ((uint32_t)found[0] << shift & ~mask);
        mask = ~0u << shift;
        wanted = found[1];
    }
    /* each warp lists its own keys, which follow one another */
    const int per = (n + CHOOSE_THREADS - 1) / CHOOSE_THREADS * 32, begin = warp * per, end = min(begin + per, n);
    auto kinds = [&](int i, uint32_t *above, uint32_t *same) {
        const uint32_t x = i + lane < end ? order(i + lane) : 0;
        *above = __ballot_sync(0xFFFFFFFFu, i + lane < end && x > prefix);
        *same = __ballot_sync(0xFFFFFFFFu, i + lane < end && x == prefix);
    };
    int n_above = 0, n_same = 0;
    uint32_t above, same;
    for (int i = begin; i < end; i += 32) {
        kinds(i, &above, &same);
        n_above += __popc(above);
        n_same += __popc(same);
    }
    if (!lane) more_than[warp] = n_above, equal[warp] = n_same;
    __syncthreads();        /* all warps have counted */
    int at = 0, before = 0; /* listed; equal ones */
    for (int i = 0; i < warp; i++) at += more_than[i], before += equal[i];
    at += min(before, wanted);
    const uint32_t lower = (1u << lane) - 1;
    for (int i = begin; i < end; i += 32) {
        kinds(i, &above, &same);
        const bool take = (same >> lane & 1) && before + __popc(same & lower) < wanted;
        const uint32_t taken = __ballot_sync(0xFFFFFFFFu, take) | above;
        if (taken >> lane & 1)
            a.chosen[(size_t)blockIdx.x * a.n_topk + at + __popc(taken & lower)] =
                BLOCKS ? i + lane : among.at(i + lane);
        at += __popc(taken);
        before += __popc(same);
    }
}

typedef void index_kernel(const struct index_args);

enum index_of { INDEX_KEY, INDEX_CANDIDATE, INDEX_BLOCK, INDEX_OF };

/* Returns the kernel that scores keys, those of candidates, or blocks of keys, by heads of `width` values; NULL: there is
 * none. */
static index_kernel *index_find(int width, bool fp8, enum index_of of) {
#define INDEX_SCORES_OF(width, among) \
    { k_index_scores<width, 0, among>, k_index_scores<width, 1, among> }
#define INDEX_BLOCKS_OF(width) \
    { k_index_blocks<width, 0>, k_index_blocks<width, 1> }
    static const struct {
        int width;
        index_kernel *kernel[INDEX_OF][2]; /* BF16, FP8 */
    } table[] = {
        {16, {INDEX_SCORES_OF(16, false), {}, {}}},
        {32, {INDEX_SCORES_OF(32, false), INDEX_SCORES_OF(32, true), {}}},
        {48, {INDEX_SCORES_OF(48, false), {}, {}}},
        {64, {INDEX_SCORES_OF(64, false), INDEX_SCORES_OF(64, true), INDEX_BLOCKS_OF(64)}},
        {80, {INDEX_SCORES_OF(80, false), {}, {}}},
        {96, {INDEX_SCORES_OF(96, false), {}, {}}},
        {112, {INDEX_SCORES_OF(112, false), {}, {}}},
        {128, {INDEX_SCORES_OF(128, false), INDEX_SCORES_OF(128, true), INDEX_BLOCKS_OF(128)}},
    };
#undef INDEX_SCORES_OF
#undef INDEX_BLOCKS_OF
    for (auto &x : table)
        if (x.width == width) return x.kernel[of][fp8];
    return NULL;
}

/* ============================================================================================================
 * Attention of one KV head: what it reads
 *
 * DeepSeek-V4, see "CPU operations: compressed keys" of moe.c. k_csa_store makes queries, the key of each token,
 * and the compressed keys that the batch completes; attn_mla_kernel attends. In DeepSeek-V4.1 k_csa_store runs twice in a
 * layer with compressed keys of its own: between the two launches a product makes keys of the indexer of them.
 * ============================================================================================================ */

enum {
    SHARED_HEAD = 512, /* values of a head at most, */
    CSA_PER = SHARED_HEAD / 32,
    INDEX_HEAD = 128, /* and of one of the indexer */
    INDEX_PER = INDEX_HEAD / 32
};

/* A compressor: its cache tensors, and the batch's values and gates. */
struct compress_args {
    struct cache_tensor ring, keys; /* a ring without rows: keys are made of one token */
    const float *value, *gate; /* (n_tok, ring.width / 2), tokens stride floats apart; gate NULL: those are the keys */
    size_t stride;
    const float *ape;  /* (compress_ratio, ring.width / 2); NULL: zeros */
    const float *norm; /* (d); NULL: keys are not normed */
    int d;             /* values of a key, at most SHARED_HEAD */
    bool index;        /* it makes keys of the indexer */
    /* (n_tok, d) in place of the cache: the key that a token completes, zeros where it completes none */
    float *out;
    uint16_t *out16; /* the same in halves */
};

struct csa_args {
    struct rope_args rope; /* q, k, their norms, q16 and kp of the attention */
    struct rope_table table;
    const float *index_q; /* (n_tok, n_index * index_k) queries of the indexer, index_stride apart, */
    uint16_t *index_q16;  /* and rotated (n_tok, n_index, index_k) */
    size_t index_stride;
    int n_index, index_k;
    struct compress_args with[2]; /* the attention's, the indexer's */
    int n_with, compress_ratio, pooled, n_tok;
    bool latents;        /* `with` has keys that need but norm and rotation, in the rows of the last of their tokens */
    bool plain_q;        /* heads of queries are not normed */
    enum rounding round; /* of keys and the indexer, as in training */
    int head_blocks, key_blocks; /* blocks of heads for each token; of each compressor's keys; the others write rings */
};

/* x = a head of n values at src, with one warp, as in rope_head, but the last p.rope values are rotated, in pairs.
 * normed: it is normed, with the weights w (NULL: ones). angle(i, &c, &s): cosine and sine of pair i. */
template <int PER, class ANGLE>
DEVICE void rope_last(const float *src, bool normed, const float *w, int n, int rope, float eps, ANGLE angle,
                      float x[PER]) {
    const int lane = threadIdx.x & 31;
    float ss = 0;
    UNROLL for (int j = 0; j < PER; j++) {
        x[j] = lane + 32 * j < n ? src[lane + 32 * j] : 0;
        ss = fmaf(x[j], x[j], ss);
    }
    const float f = normed ? rsqrtf(warp_sum(ss) / (float)n + eps) : 1.0f;
    auto factor = [&](int c) { return w ? f * w[c] : f; };
    UNROLL for (int j = 0; j < PER; j++) {
        const int c = lane + 32 * j, at = c - (n - rope);
        if (c >= n) continue;
        x[j] *= factor(c);
        if (at < 0) continue;
        float cs, sn;
        angle(at >> 1, &cs, &sn);
        const float u = src[c ^ 1] * factor(c ^ 1);
        x[j] = c & 1 ? u * sn + x[j] * cs : x[j] * cs - u * sn;
    }
}

/* Roundings as in "CPU operations: compressed keys" of moe.c, with one warp: value lane + 32 j is x[j]. */
DEVICE void round_key(float x[CSA_PER], int n, bool wide) { /* wide: blocks of QAT_KEY values, not of QAT_KEY_V41 */
    const int lane = threadIdx.x & 31;
    float top[CSA_PER];
    static_assert(QAT_KEY == 2 * WARP && QAT_KEY_V41 == WARP, "a block is one value of each lane, or two");
    UNROLL for (int j = 0; j < CSA_PER; j++) top[j] = warp_max(lane + 32 * j < n ? fabsf(x[j]) : 0.0f);
    UNROLL for (int j = 0; j < CSA_PER; j++) if (lane + 32 * j < n) {
        const float most = wide ? fmaxf(top[j], top[j ^ 1]) : top[j];
        const float scale = ceil_pow2(fmaxf(most, 1e-4f) * (1.0f / 448.0f)), inverse = 1.0f / scale;
        const uint32_t half = e4m3x2_to_f16x2(f32_to_e4m3x2(x[j] * inverse, 0));
        x[j] = half_to_f32((uint16_t)half) * scale;
    }
}
DEVICE float round_e2m1(float x) {
    const float a = fminf(fabsf(x), 6.0f), step = a < 2 ? 0.5f : a < 4 ? 1.0f : 2.0f;
    return copysignf(rintf(a * (1.0f / step)) * step, x);
}
DEVICE void hadamard(float x[INDEX_PER], int n) {
    const int lane = threadIdx.x & 31;
    UNROLL for (int half = 1; half < WARP; half *= 2) UNROLL for (int j = 0; j < INDEX_PER; j++) {
        const float other = __shfl_xor_sync(~0u, x[j], half);
        x[j] = lane & half ? other - x[j] : x[j] + other;
    }
    UNROLL for (int half = 1; half < INDEX_PER; half *= 2) UNROLL for (int j = 0; j < INDEX_PER; j++) {
        const float a = x[j], b = x[j ^ half];
        if (32 * half >= n || j & half) continue;
        x[j] = a + b;
        x[j ^ half] = a - b;
    }
    UNROLL for (int j = 0; j < INDEX_PER; j++) x[j] *= 1.0f / sqrtf((float)n);
}
DEVICE void round_compressed(float x[CSA_PER], int n) {
    const int lane = threadIdx.x & 31;
    UNROLL for (int j = 0; j < CSA_PER; j++) {
        float top = lane + 32 * j < n ? fabsf(x[j]) : 0;
        UNROLL for (int o = QAT_COMPRESSED / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
        const uint32_t half = e4m3x2_to_f16x2(f32_to_e4m3x2(fmaxf(top * (1.0f / 6.0f), 0x1p-9f), 0));
        const float scale = half_to_f32((uint16_t)half), inverse = __fdividef(1.0f, scale), near = x[j] * inverse;
        const float quotient = fmaf(fmaf(-near, scale, x[j]), inverse, near); /* ties stay ties */
        x[j] = round_e2m1(quotient) * scale;
    }
}
DEVICE void round_index(float x[INDEX_PER], int n, enum rounding how) {
    if (how == ROUNDS_V4) hadamard(x, n);
    UNROLL for (int j = 0; j < INDEX_PER; j++) {
        if (32 * j >= n) continue;
        const float scale = ceil_pow2(fmaxf(warp_max(fabsf(x[j])), 6 * 0x1p-126f) * (1.0f / 6.0f));
        x[j] = round_e2m1(x[j] * (1.0f / scale)) * scale;
    }
}

/* Stores a key of n values, x[j] being value lane + 32 j, to row `row` of a cache tensor, with one warp. */
DEVICE void csa_key_store(const struct cache_tensor &p, int row, int n, const float x[CSA_PER]) {
    enum { PER = LATENT_GROUP / 32 };
    UNROLL for (int g = 0; g < CSA_PER / PER; g++) if (g * LATENT_GROUP < n) cache_store<PER, ROWS_POW2>(
        p, (size_t)row, g * LATENT_GROUP, g, min((int)LATENT_GROUP, n - g * LATENT_GROUP), x + g * PER);
}

/* turn = cosines and sines of the rotation at position pos, with one block of 256; a barrier is due. */
DEVICE void turn_at(const struct csa_args &a, int pos, float2 *turn) {
    for (int i = threadIdx.x; i < a.table.n; i += 256) {
        const float at = (float)pos * a.table.freq[i];
        turn[i] = make_float2(cosf(at) * a.table.factor, sinf(at) * a.table.factor);
    }
}

/* A head of the queries, of the indexer's queries, the key of token t, or with latents the compressed key that it
 * completes and the indexer's, with one warp: h counts them in this order. completes: it does, and turn rotates these. */
DEVICE void shared_head(const struct csa_args &a, int t, int h, bool completes, const float2 *turn) {
    const struct rope_args &p = a.rope;
    const int lane = threadIdx.x & 31, latent = h - (p.n_head + a.n_index + 1);
    const bool index = h >= p.n_head && h < p.n_head + a.n_index, key = latent == -1, pooled = latent >= 0;
    const struct compress_args &c = a.with[latent == 1];
    if (pooled && (!completes || latent > 1)) return;
    const int n = pooled ? c.d : index ? a.index_k : p.d;
    const float *src = p.q + (size_t)t * p.q_stride + (size_t)h * n;
    if (index) src = a.index_q + (size_t)t * a.index_stride + (size_t)(h - p.n_head) * n;
    if (key) src = p.k + (size_t)t * p.k_stride;
    if (pooled) src = c.value + (size_t)t * c.stride;
    const float *norm = pooled ? c.norm : key ? p.k_norm : NULL;
    float x[CSA_PER];
    auto angle = [&](int i, float *co, float *si) {
        *co = pooled ? turn[i].x : p.cs[(size_t)t * (p.rope / 2) + i];
        *si = pooled ? turn[i].y : p.sn[(size_t)t * (p.rope / 2) + i];
    };
    rope_last<CSA_PER>(src, norm || !(pooled || index || a.plain_q), norm, n, p.rope, p.eps, angle, x);
    if (a.round != ROUNDS_NOTHING) {
        if (index || latent == 1) round_index(x, n, a.round);
        else if (pooled) round_compressed(x, n);
        else if (key) round_key(x, a.round == ROUNDS_V4 ? n - p.rope : n, a.round == ROUNDS_V4);
    }
    if (key || pooled) {
        const struct run &u = p.batch.run(t);
        const struct cache_tensor &to = pooled ? c.keys : p.kp;
        const int pos = run_base(u) + t;
        csa_key_store(to, run_row(u, to, pooled ? pos / a.compress_ratio : pos), n, x);
        return;
    }
    uint16_t *to =
        index ? a.index_q16 + ((size_t)t * a.n_index + (h - p.n_head)) * n : p.q16 + ((size_t)t * p.n_head + h) * n;
    UNROLL for (int j = 0; j < CSA_PER; j++) if (lane + 32 * j < n) to[lane + 32 * j] = clamped_f16(x[j]);
}

/* Key `key` of a compressor for the run u, with one block of 256. See compress_pool of moe.c. */
DEVICE void compress_key(const struct csa_args &a, const struct compress_args &c, const struct run &u, int key,
                         float *row, float2 *turn) {
    enum { COLUMNS = SHARED_HEAD / 256 };
    const int tid = threadIdx.x, base = run_base(u), fresh = u.pos, off = run_rows_of(u, c.ring).shift;
    const int first = (key + 1) * a.compress_ratio - a.pooled;
    const int wide = c.ring.width ? c.ring.width / 2 : c.d;
    turn_at(a, key * a.compress_ratio, turn);
    float sum[COLUMNS] = {}, den[COLUMNS] = {}, top[COLUMNS];
    UNROLL for (int k = 0; k < COLUMNS; k++) top[k] = -INFINITY;
    UNROLL_BY(4) for (int pos = max(first, 0); pos < first + a.pooled; pos++) {
        const float *value = c.value + (size_t)(pos - base) * c.stride,
                    *gate = c.gate + (size_t)(pos - base) * c.stride;
        if (pos < fresh) {
            value = (const float *)(c.ring.data + (size_t)(off + pos % c.ring.n_row) * c.ring.row_bytes);
            gate = value + wide;
        }
        const int from =
            pos < key * a.compress_ratio ? 0 : wide - c.d; /* tokens before the key's own have other columns */
        const float *ape = c.ape ? c.ape + (size_t)(pos % a.compress_ratio) * wide : NULL;
        UNROLL for (int k = 0; k < COLUMNS; k++) {
            const int i = from + tid + 256 * k;
            if (tid + 256 * k >= c.d) continue;
            const float g = (c.gate ? gate[i] : 0.0f) + (ape ? ape[i] : 0.0f), most = fmaxf(top[k], g);
            const float was = expf(top[k] - most), w = expf(g - most);
            sum[k] = fmaf(w, value[i], sum[k] * was);
            den[k] = fmaf(den[k], was, w);
            top[k] = most;
        }
    }
    UNROLL for (int k = 0; k < COLUMNS; k++) if (tid + 256 * k < c.d) row[tid + 256 * k] = sum[k] / den[k];
    __syncthreads(); /* the mean is complete, and cosines and sines */
    if (tid >= WARP) return;
    float x[CSA_PER];
    auto angle = [&](int i, float *cs, float *sn) { *cs = turn[i].x, *sn = turn[i].y; };
    rope_last<CSA_PER>(row, c.norm != NULL, c.norm, c.d, a.rope.rope, a.rope.eps, angle, x);
    if (c.out) {
        const size_t at = (size_t)((key + 1) * a.compress_ratio - 1 - base) * (size_t)c.d;
        UNROLL for (int j = 0; j < CSA_PER; j++) if (tid + 32 * j < c.d) {
            c.out[at + tid + 32 * j] = x[j];
            c.out16[at + tid + 32 * j] = clamped_f16(x[j]);
        }
        return;
    }
    if (a.round != ROUNDS_NOTHING && c.index) round_index(x, c.d, ROUNDS_V4);
    else if (a.round != ROUNDS_NOTHING) round_key(x, c.d - a.rope.rope, true);
    csa_key_store(c.keys, run_rows_of(u, c.keys).at(key), c.d, x);
}

/* Queries, keys, compressed keys and rows of the rings; of compressed keys to rows these and the rings; or in prefill, in a launch of its own because the keys are
 * made of rows that it overwrites, the rings alone (head_blocks and key_blocks 0).
 * Grid: n_tok * head_blocks + n_with * (key_blocks + rows), block: 256. Limited by latency: a key of 128 tokens is a
 * block that reads 512 KB, once in 128 tokens. */
__global__ void __launch_bounds__(256, 2) k_csa_store(const __grid_constant__ struct csa_args a) {
    SHARED(float, row, SHARED_HEAD);
    SHARED(float2, turn, SHARED_HEAD / 2); /* cosines and sines */
    grid_dependency_launch();
    grid_dependency_wait();
    int b = (int)blockIdx.x;
    const struct batch_ref &batch = a.rope.batch;
    const int n_tok = min(a.n_tok, batch.at->n_tok);
    if (b < a.n_tok * a.head_blocks) {
        const int t = b / a.head_blocks;
        if (t >= n_tok) return;
        const int end = a.latents ? run_base(batch.run(t)) + t + 1 : 1;
        const bool completes = a.latents && end % a.compress_ratio == 0;
        if (completes) turn_at(a, end - a.compress_ratio, turn);
        if (a.latents) __syncthreads(); /* cosines and sines are there */
        shared_head(a, t, b % a.head_blocks * 8 + (int)(threadIdx.x >> 5), completes, turn);
        return;
    }
    b -= a.n_tok * a.head_blocks;
    const struct compress_args &c = a.with[b % a.n_with];
    b /= a.n_with;
    if (b <
        a.key_blocks) { /* of one run key b that it completes; of several, or to rows, the key that token b completes */
        const struct run &u = batch.run(min(b, n_tok - 1));
        const bool by_token = batch.several || c.out;
        const int pos = u.pos, end = by_token ? run_base(u) + b + 1 : pos + n_tok;
        const int key = by_token ? end / a.compress_ratio - 1 : pos / a.compress_ratio + b;
        const bool completed = by_token ? b < n_tok && end % a.compress_ratio == 0 : key < end / a.compress_ratio;
        if (completed) compress_key(a, c, u, key, row, turn);
        else if (c.out && b < n_tok)
            UNROLL_BY(1) for (int i = threadIdx.x; i < c.d; i += 256) c.out[b * c.d + i] = 0, c.out16[b * c.d + i] = 0;
        return;
    }
    const int t = b - a.key_blocks, wide = c.ring.width / 2;
    if (t >= n_tok || t + c.ring.n_row < n_tok) return; /* a later token has the row */
    const struct run &u = batch.run(t);
    float *to = ring_at(u, c.ring, run_base(u) + t);
    for (int i = threadIdx.x; i < wide; i += 256) {
        to[i] = c.value[(size_t)t * c.stride + i];
        to[wide + i] = c.gate[(size_t)t * c.stride + i];
    }
}

/* Launches it. with_heads: with queries and keys, otherwise with the keys of compressors alone. */
static void csa_store(const struct csa_args *args, bool with_heads, cudaStream_t s) {
    struct csa_args a = *args;
    const bool decode = a.n_tok <= DECODE_MAX_TOKENS; /* rings have room for such a batch after what keys are made of */
    const bool keeps = a.n_with && a.with[0].ring.width;
    a.head_blocks = with_heads ? (a.rope.n_head + a.n_index + 1 + 2 * a.latents + 7) / 8 : 0;
    if (a.n_with) a.key_blocks = a.rope.batch.several || a.with[0].out ? a.n_tok : a.n_tok / a.compress_ratio + 1;
    const int heads = a.n_tok * a.head_blocks, rings = decode && keeps ? a.n_tok : 0;
    LAUNCH_PDL(k_csa_store, (unsigned)(heads + a.n_with * (a.key_blocks + rings)), 256, 0, s, a);
    if (decode || !keeps) return;
    a.head_blocks = a.key_blocks = 0;
    LAUNCH_PDL(k_csa_store, (unsigned)(a.n_with * a.n_tok), 256, 0, s, a);
}

/* ============================================================================================================
 * Gated delta net
 *
 * Linear attention with a state S (head_k, head_v) per value head; moe.c has the rules, in "CPU operations: recurrent
 * states". Rows are the n_uncommitted tokens that the state lacks, whose inputs are in the rings, and then the
 * forward's own. Decode is one kernel. Prefill lets it take the lagging rows into the state one by one, so that what
 * follows does not depend on how many there are, and has four for every DELTA_SEGMENT of its own rows: k_delta_mix
 * makes queries, keys and values, k_delta_prepare what a tile of DELTA_TILE rows needs besides the state, k_delta_scan
 * goes from tile to tile with the state, and k_delta_finish norms the results. Kimi delta attention and Mamba-2 have
 * tiles by the same kernels, but for what a tile needs besides the state (enum delta_rule).
 *
 * Floors of prefill, for a layer of Kimi Linear (32 heads of 128 with a decay for each channel) and one row: 90 KB of
 * inputs, gates and results, 50 ns at 1.8 TB/s, and 280 KB that the kernels write and read between them, most of which
 * L2 holds; 5 M multiplications by MMA, 30 ns, and 0.1 M others within blocks of 16 rows. The scan is a chain of tiles:
 * 8,500 cycles for 64 rows are 55 ns a row at 2.4 GHz, where there are no more blocks (128) than SMs.
 *
 * In prefill with tiles the factors of the state are pairs of F16 numbers, the rounded number and the rest: the state's
 * relative error is 1e-6, against 3e-4 to 1e-3 with one F16 number each. Products that only the result needs have one.
 * ============================================================================================================ */

enum {
    DELTA_HEAD = 128,                      /* values of a head's key, and of its value, at most */
    DELTA_PARTS = 4,                       /* k_delta_decode: threads that share a column of the state, */
    DELTA_ROWS = DELTA_HEAD / DELTA_PARTS, /* its values that each of them has, */
    DELTA_THREADS = DELTA_HEAD * DELTA_PARTS,
    DELTA_STEP = 8, /* and rows whose inputs are made at once; k_delta_mix: rows of a warp */
    DELTA_COLS = 32 /* k_delta_scan: columns of the state of a block */
};

/* What prefill makes for a segment: the buffers of a rank. */
struct delta_tiles {
    uint16_t *qk;    /* (rows, delta_planes, n_key * head_k) queries and keys, see enum delta_plane */
    float *v;        /* (rows, n_value * head_v) values, then results, but of Mamba-2 */
    float *gates;    /* (rows, 2 (n_value + n_key)) logarithms of the decay; beta or time steps; of Mamba-2 the factors
                      * that undo the scales of queries and of keys */
    uint16_t *tiles; /* (tiles, n_value, 3, 64, 64) T, P and the rest of T as A fragments, see k_delta_prepare */
    float *fades;    /* (tiles, n_value, DELTA_FADES), see enum delta_fade */
};

/* The rule by which a kernel of tiles updates the state: that of the gated delta net, with a decay for a value head; of
 * Kimi delta attention, with one for each row of the state; of Mamba-2. */
enum delta_rule { RULE_NET, RULE_KDA, RULE_MAMBA };

/* Queries and keys of a segment: the rounded numbers, and of keys the rest. KDA multiplies them by their decays: queries
 * and keys by those from the tile's first row to their own; the keys that go into the state by those from the row after
 * theirs to the last that goes into it. */
enum delta_plane { DELTA_Q, DELTA_K, DELTA_K_REST, DELTA_INTO, DELTA_INTO_REST };
static_assert((int)DELTA_K_REST + 1 == (int)DELTA_PLANES && (int)DELTA_INTO_REST + 1 == (int)KDA_PLANES, "planes");
static constexpr __host__ __device__ int delta_planes(int rule) { return rule == RULE_KDA ? KDA_PLANES : DELTA_PLANES; }

/* Where the factors of a tile stand, DELTA_TILE of each: of the state in a row's result; of what a row adds to the
 * state; of Mamba-2's values; of what they give in its results. Then that of the state. KDA has the factors of the
 * state's rows in place of all these. */
enum delta_fade { FADE_STATE = 0, FADE_ADDED = 1, FADE_VALUE = 2, FADE_RESULT = 3, FADE_LAST = 4 };
static_assert((int)FADE_LAST * (int)DELTA_TILE < (int)DELTA_FADES && (int)DELTA_HEAD <= (int)DELTA_FADES,
              "the factors of a tile fit");

struct delta_args {
    struct batch_ref batch;
    struct delta shape;
    const float *q, *k, *v;    /* the forward's own rows before the convolution */
    float *z;                  /* and their gates; Mamba-2 multiplies them by its results */
    const float *alpha, *beta; /* inputs of decays and of beta; Mamba-2 has no beta */
    size_t q_stride, k_stride, v_stride, z_stride, alpha_stride, beta_stride;
    float *ring_qk, *ring_v, *ring_gates; /* (n_ring, ..): q and k, v, alpha and beta of earlier positions */
    size_t ring_qk_stride, ring_v_stride, ring_gates_stride;
    int n_ring, ring_rows; /* rows of a ring; of a timeline's part of each */
    float *state;          /* (n_value, head_k, head_v) of each timeline, state_stride floats apart */
    size_t state_stride;
    const float *conv;                                      /* of taps_upload, */
    const float *conv_bias, *decay, *dt_bias, *skip, *norm; /* and of struct layer: of the whole model */
    int before[3];                                          /* see delta_before */
    float eps;
    uint16_t *out; /* (n_tok, n_value * head_v), out_stride apart */
    size_t out_stride;
    struct l2_prefetch prefetch; /* decode */
    int n_own;                   /* k_delta_decode, k_mamba_scan: own rows at most */
    /* prefill: own rows first..first+n_row-1, of which there are n_row_all */
    struct delta_tiles t;
    int first, n_row, n_row_all;
};

/* Returns the whole model's value head of a rank's value head j, and the rank's key head that it uses. */
template <bool MAMBA>
DEVICE int delta_value_head(const struct delta &d, int j) {
    if (!MAMBA && d.tiled) return j / d.n_key * d.whole_key + d.first_key + j % d.n_key;
    return d.first_key * (d.n_value / d.n_key) + j;
}
DEVICE int delta_key_head(const struct delta &d, int j) { return d.tiled ? j % d.n_key : j / (d.n_value / d.n_key); }

/* The channels of one head of a run under the convolution: of its query, key or value (kind 0, 1, 2). head: of n_key; of
 * n_value for values. */
struct delta_channels {
    const float *own, *ring, *taps, *bias; /* at the head's first channel; bias: of Mamba-2 */
    size_t own_stride, ring_stride;
    int n, n_ring;
    int low; /* the first position under a tap of the model: earlier ones, which the ring may lack, have taps of 0 */
};
template <bool MAMBA>
DEVICE struct delta_channels delta_channels_of(const struct delta_args &a, const struct run &u, int kind, int head) {
    const struct delta &d = a.shape;
    const int dk = d.head_k, key = d.n_key * dk;
    const size_t row = (size_t)u.first, ring_row = (size_t)(u.timeline * a.ring_rows);
    struct delta_channels c;
    c.n = dk;
    c.n_ring = a.n_ring;
    c.low = max(u.n_committed - d.n_conv + 1, 0);
    if (kind == 2) {
        c.n = d.head_v;
        c.own = a.v + row * a.v_stride + head * d.head_v;
        c.own_stride = a.v_stride;
        c.ring = a.ring_v + ring_row * a.ring_v_stride + head * d.head_v;
        c.ring_stride = a.ring_v_stride;
        const int at = a.before[2] + delta_value_head<MAMBA>(d, head) * d.head_v;
        c.taps = a.conv + (size_t)at * DELTA_TAPS;
        c.bias = a.conv_bias + at;
        return c;
    }
    c.own_stride = kind ? a.k_stride : a.q_stride;
    c.own = (kind ? a.k : a.q) + row * c.own_stride + head * dk;
    c.ring = a.ring_qk + ring_row * a.ring_qk_stride + kind * key + head * dk;
    c.ring_stride = a.ring_qk_stride;
    const int at = a.before[kind] + (d.first_key + head) * dk;
    c.taps = a.conv + (size_t)at * DELTA_TAPS;
    c.bias = a.conv_bias + at;
    return c;
}

/* Returns channel i at position p, before the convolution; pos: the run's first. */
DEVICE float delta_input(const struct delta_channels &c, int pos, int p, int i) {
    if (p < c.low || i >= c.n) return 0;
    return p >= pos ? c.own[(size_t)(p - pos) * c.own_stride + i] : c.ring[(size_t)(p % c.n_ring) * c.ring_stride + i];
}

/* Returns the sum of the squares of x over a warp's lanes, each of which has four, as a factor that makes it 1. */
DEVICE float delta_unit(const float x[4]) {
    return rsqrtf(warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]) + 1e-6f);
}

/* Returns the logarithm of the decay (x), and beta or Mamba-2's time step (y), of value head j at position p of a run,
 * whose first is pos. */
template <bool MAMBA>
DEVICE float2 delta_gates(const struct delta_args &a, const struct run &u, int pos, int p, int j) {
    const float *kept = a.ring_gates + (size_t)(u.timeline * a.ring_rows + p % a.n_ring) * a.ring_gates_stride + j;
    const size_t own = (size_t)(u.first + p - pos);
    const int head = delta_value_head<MAMBA>(a.shape, j);
    const float x = (p < pos ? kept[0] : a.alpha[own * a.alpha_stride + (size_t)j]) + a.dt_bias[head];
    const float step = x > 20.0f ? x : log1pf(expf(x));
    if (MAMBA) return make_float2(a.decay[head] * step, step);
    const float b = p < pos ? kept[a.shape.n_value] : a.beta[own * a.beta_stride + (size_t)j];
    return make_float2(a.decay[head] * step, sigmoid(b));
}

/* Kimi delta attention: returns the logarithm of the decay of row i of head j's state at position p of a run. */
DEVICE float delta_row_decay(const struct delta_args &a, const struct run &u, int pos, int p, int j, int i) {
    const struct delta &d = a.shape;
    const int dk = d.head_k, head = d.first_key + j;
    const float *kept = a.ring_gates + (size_t)(u.timeline * a.ring_rows + p % a.n_ring) * a.ring_gates_stride;
    const size_t own = (size_t)(u.first + p - pos);
    float x = p < pos ? kept[j * (dk + 1) + i] : a.alpha[own * a.alpha_stride + (size_t)(j * dk + i)];
    x += a.dt_bias[head * dk + i];
    const float decay = a.decay[head];
    return d.bound < 0 ? d.bound * sigmoid(decay * x) : decay * (x > 20.0f ? x : log1pf(expf(x)));
}

/* Kimi delta attention: returns beta of head j at position p of a run. */
DEVICE float delta_beta(const struct delta_args &a, const struct run &u, int pos, int p, int j) {
    const int dk = a.shape.head_k;
    const float *kept = a.ring_gates + (size_t)(u.timeline * a.ring_rows + p % a.n_ring) * a.ring_gates_stride;
    return sigmoid(p < pos ? kept[j * (dk + 1) + dk] : a.beta[(size_t)(u.first + p - pos) * a.beta_stride + (size_t)j]);
}

/* Norms and gates a head's result o of a token, with one warp, and stores it. o (head_v), z: the head's gates, out: its
 * place. KDA: the gates are sigmoids, otherwise SiLU or these. */
template <bool KDA>
DEVICE void delta_finish(const struct delta_args &a, const float *o, const float *z, uint16_t *out) {
    const int lane = threadIdx.x & 31, dv = a.shape.head_v;
    float x[4], ss = 0;
    UNROLL for (int u = 0; u < 4; u++) {
        x[u] = lane + 32 * u < dv ? o[lane + 32 * u] : 0;
        ss += x[u] * x[u];
    }
    const float f = rsqrtf(warp_sum(ss) / (float)dv + a.eps);
    UNROLL for (int u = 0; u < 4; u++) {
        const int c = lane + 32 * u;
        if (c >= dv) continue;
        const float y = x[u] * f * a.norm[c];
        out[c] = clamped_f16(KDA || a.shape.sigmoid_gate ? sigmoid(z[c]) * y : silu_mul(z[c], y));
    }
}

/* Keeps the inputs of a run's token i in the rings: those of value head j, and of key head j where there is one. The
 * block's threads, DELTA_HEAD or more, divide the channels. pos: the run's first position. */
template <int RULE>
DEVICE void delta_keep(const struct delta_args &a, const struct run &u, int pos, int i, int j) {
    constexpr bool KDA = RULE == RULE_KDA;
    const struct delta &d = a.shape;
    const int dk = d.head_k, dv = d.head_v, key = d.n_key * dk;
    const size_t row = (size_t)(u.timeline * a.ring_rows + (pos + i) % a.n_ring), t = (size_t)(u.first + i);
    const int tid = threadIdx.x;
    if (tid < dv) a.ring_v[row * a.ring_v_stride + j * dv + tid] = a.v[t * a.v_stride + j * dv + tid];
    for (int k = tid; k < 2 * dk && j < d.n_key; k += (int)blockDim.x) {
        const int c = j * dk + k % dk;
        a.ring_qk[row * a.ring_qk_stride + k / dk * key + c] =
            k < dk ? a.q[t * a.q_stride + c] : a.k[t * a.k_stride + c];
    }
    float *gates = a.ring_gates + row * a.ring_gates_stride;
    if (KDA && tid < dk) gates[j * (dk + 1) + tid] = a.alpha[t * a.alpha_stride + j * dk + tid];
    if (tid) return;
    if (!KDA) gates[j] = a.alpha[t * a.alpha_stride + j];
    if (RULE != RULE_MAMBA) gates[KDA ? j * (dk + 1) + dk : d.n_value + j] = a.beta[t * a.beta_stride + j];
}

/* A gated delta net for 1 to 16 tokens: convolution, gates, up to 16 lagging rows into the state, the own rows on a
 * copy in registers, norm and gate of the result, and the rings. Grid: (n_value, runs), block: 512: thread (part, column) has
 * 32 rows of its column of S; a head's 64 KB are in registers. A row costs one pass over them and one barrier: S^T k
 * and S^T q are summed together, because the result is a S^T q + (q.k) u. Reads and writes each state once: 128 KB a
 * head. An SM has one head, so that the limit is what one SM moves, not the memory: expect 3 us for 1 token, of which 1
 * us is latency, and 10 us for 16 after 16 that lag. KDA: Kimi delta attention. There the rows of S are multiplied by
 * their decays first. */
template <bool KDA>
__global__ void __launch_bounds__(DELTA_THREADS, 1) k_delta_decode(const __grid_constant__ struct delta_args a) {
    SHARED(float, qs, DELTA_STEP *DELTA_HEAD);
    SHARED(float, ks, DELTA_STEP *DELTA_HEAD);
    SHARED(float, vs, DELTA_STEP *DELTA_HEAD);
    SHARED(float, os, DELTA_STEP *DELTA_HEAD);
    SHARED(float, ds, KDA ? DELTA_STEP *DELTA_HEAD : 1); /* decays of the rows */
    SHARED(float4, gates, DELTA_STEP);                   /* decay, beta */
    SHARED(float, qk, DELTA_STEP);                       /* q.k */
    SHARED(float2, sums, 2 * DELTA_PARTS * DELTA_HEAD);
    grid_dependency_launch();
    grid_dependency_wait();
    prefetch_request(a.prefetch);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, c = tid % DELTA_HEAD, part = tid / DELTA_HEAD;
    const int dk = a.shape.head_k, dv = a.shape.head_v, j = blockIdx.x, kh = delta_key_head(a.shape, j);
    if ((int)blockIdx.y >= a.batch.at->n_run) return;
    const struct run &u = a.batch.at->run[blockIdx.y];
    const int pos = u.pos, first = u.n_committed, n_uncommitted = pos - first;
    const int own = min(u.n, a.n_own), n = n_uncommitted + own;
    float *state =
        a.state + (size_t)u.timeline * a.state_stride + (size_t)(j * dk * dv) + (size_t)(part * DELTA_ROWS * dv + c);
    const int n_mine = c < dv ? dk - part * DELTA_ROWS : 0; /* of the thread's values that exist */
    float S[DELTA_ROWS];
    UNROLL for (int i = 0; i < DELTA_ROWS; i++) S[i] = i < n_mine ? state[(size_t)i * dv] : 0;
    int turn = 0;
    UNROLL_BY(1) for (int i0 = 0; i0 < n; i0 += DELTA_STEP) {
        const int rows = min(n - i0, (int)DELTA_STEP);
        constexpr int KINDS = KDA ? 4 : 3;
        for (int i = warp; i < KINDS * rows; i += DELTA_THREADS / WARP) { /* a warp: q, k, v or decays of a row */
            const int row = i / KINDS, kind = i % KINDS, p = first + i0 + row;
            if (KDA && kind == 3) {
                UNROLL_BY(1) for (int v = 0; v < 4; v++) {
                    const int h = lane + 32 * v;
                    ds[row * DELTA_HEAD + h] = h < dk ? expf(delta_row_decay(a, u, pos, p, j, h)) : 0;
                }
                continue;
            }
            const struct delta_channels ch = delta_channels_of<false>(a, u, kind, kind == 2 ? j : kh);
            float x[4] = {};
            UNROLL for (int v = 0; v < 4; v++) {
                const int i = lane + 32 * v;
                if (i >= ch.n) continue;
                const float4 w = *(const float4 *)(ch.taps + (size_t)i * DELTA_TAPS);
                x[v] = w.x * delta_input(ch, pos, p - 3, i);
                x[v] += w.y * delta_input(ch, pos, p - 2, i);
                x[v] += w.z * delta_input(ch, pos, p - 1, i);
                x[v] += w.w * delta_input(ch, pos, p, i);
                x[v] *= sigmoid(x[v]);
            }
            float f = kind == 2 ? 1.0f : delta_unit(x);
            if (!kind) f *= rsqrtf((float)dk);
            float *to = (kind == 2 ? vs : kind ? ks : qs) + row * DELTA_HEAD;
            UNROLL for (int v = 0; v < 4; v++) to[lane + 32 * v] = x[v] * f;
        }
        if (KDA && tid < rows) gates[tid].y = delta_beta(a, u, pos, first + i0 + tid, j);
        if (!KDA && tid < rows) {
            const float2 g = delta_gates<false>(a, u, pos, first + i0 + tid, j);
            gates[tid] = make_float4(expf(g.x), g.y, 0, 0);
        }
        __syncthreads(); /* the inputs of these rows are written */
        if (warp < rows) {
            float dot = 0;
            UNROLL for (int v = 0; v < 4; v++) {
                const int i = warp * DELTA_HEAD + lane + 32 * v;
                dot += qs[i] * ks[i];
            }
            dot = warp_sum(dot);
            if (!lane) qk[warp] = dot;
        }
        UNROLL_BY(1) for (int row = 0; row < rows; row++) {
            if (i0 + row == n_uncommitted && n_uncommitted) { /* the state has the rows before the forward */
                float *to = state;
                UNROLL for (int i = 0; i < DELTA_ROWS; i++, to += dv) if (i < n_mine) *to = S[i];
            }
            const float4 *k4 = (const float4 *)(ks + row * DELTA_HEAD + part * DELTA_ROWS);
            const float4 *q4 = (const float4 *)(qs + row * DELTA_HEAD + part * DELTA_ROWS);
            const float4 *d4 = (const float4 *)(ds + (KDA ? row * DELTA_HEAD + part * DELTA_ROWS : 0));
            float2 sum = make_float2(0, 0);
            UNROLL for (int i = 0; i < DELTA_ROWS && KDA; i += 4) {
                const float4 d = d4[i / 4];
                S[i] *= d.x;
                S[i + 1] *= d.y;
                S[i + 2] *= d.z;
                S[i + 3] *= d.w;
            }
            UNROLL for (int i = 0; i < DELTA_ROWS; i += 4) {
                const float4 k = k4[i / 4], q = q4[i / 4];
                sum.x += k.x * S[i] + k.y * S[i + 1] + k.z * S[i + 2] + k.w * S[i + 3];
                sum.y += q.x * S[i] + q.y * S[i + 1] + q.z * S[i + 2] + q.w * S[i + 3];
            }
            float2 *all = sums + turn * DELTA_PARTS * DELTA_HEAD;
            turn ^= 1;
            all[part * DELTA_HEAD + c] = sum;
            __syncthreads(); /* the sums of all parts are written, and q.k; the other half may still be read */
            sum = make_float2(0, 0);
            UNROLL for (int v = 0; v < DELTA_PARTS; v++) {
                sum.x += all[v * DELTA_HEAD + c].x;
                sum.y += all[v * DELTA_HEAD + c].y;
            }
            const float f = KDA ? 1 : gates[row].x; /* a decay that S does not have yet */
            const float u = gates[row].y * (vs[row * DELTA_HEAD + c] - f * sum.x);
            UNROLL for (int i = 0; i < DELTA_ROWS; i += 4) {
                const float4 k = k4[i / 4];
                S[i] = f * S[i] + k.x * u;
                S[i + 1] = f * S[i + 1] + k.y * u;
                S[i + 2] = f * S[i + 2] + k.z * u;
                S[i + 3] = f * S[i + 3] + k.w * u;
            }
            if (!part) os[row * DELTA_HEAD + c] = f * sum.y + qk[row] * u;
        }
        __syncthreads(); /* the results of these rows are written, and nobody needs their inputs any more */
        const int t = i0 + warp - n_uncommitted;
        if (warp < rows && t >= 0)
            delta_finish<KDA>(a, os + warp * DELTA_HEAD, a.z + (size_t)(u.first + t) * a.z_stride + j * dv,
                              a.out + (size_t)(u.first + t) * a.out_stride + j * dv);
    }
    for (int t = 0; t < own; t++)
        delta_keep<KDA ? RULE_KDA : RULE_NET>(a, u, pos, t, j); /* no row that another block reads */
}

/* ============================================================================================================
 * Gated delta net: tiles
 *
 * Prefill prepares tiles of DELTA_TILE tokens: the convolution, and what of a tile does not depend on the state.
 * ============================================================================================================ */

/* Returns what rounding x to a half takes from it, as a half. */
DEVICE uint16_t half_rest(float x) { return f32_to_f16(x - half_to_f32(f32_to_f16(x))); }
DEVICE uint32_t half_rest2(float x, float y) { return (uint32_t)half_rest(x) | (uint32_t)half_rest(y) << 16; }

/* A power of two that makes the largest of a warp's numbers 2^UP to 2^(UP+1) (x), and its inverse (y). */
template <int UP>
DEVICE float2 delta_scale(float largest) {
    const int e = min(max((int)(__float_as_uint(warp_max(largest)) >> 23), 27), 227); /* 2^-100 to 2^100 */
    return make_float2(__uint_as_float((uint32_t)(254 + UP - e) << 23), __uint_as_float((uint32_t)(e - UP) << 23));
}

/* Returns a row of the segment's gates. */
DEVICE float *delta_gates_row(const struct delta_args &a, int row) {
    return a.t.gates + (size_t)row * 2 * (size_t)(a.shape.n_value + a.shape.n_key);
}

/* Fills qk, v and gates of rows first..first+n_row-1: convolution, SiLU, norm, gates. Queries and keys of Mamba-2 have
 * no norm, but in each row a scale that makes the largest value 1 to 2. KDA: k_kda_prepare makes the decays.
 * Grid: (ceil(n_row / 8), ceil((2 n_key + n_value + 1) / 4)), block: 128, one warp per head and 8 rows. Reads the
 * inputs 1.4 times and writes queries and keys as F16: some 10 bytes per value, at the rate of memory. */
template <int RULE>
__global__ void __launch_bounds__(128) k_delta_mix(const __grid_constant__ struct delta_args a) {
    constexpr bool KDA = RULE == RULE_KDA, MAMBA = RULE == RULE_MAMBA;
    grid_dependency_launch();
    grid_dependency_wait();
    const struct delta &d = a.shape;
    const int lane = threadIdx.x & 31, item = blockIdx.y * 4 + (threadIdx.x >> 5), row0 = blockIdx.x * DELTA_STEP;
    const struct run &run = a.batch.at->run[0];
    const int pos = run.pos, p0 = pos + a.first + row0;
    const int rows = min(a.n_row - row0, (int)DELTA_STEP), n_head = 2 * d.n_key + d.n_value;
    if (item == n_head) {
        UNROLL_BY(1) for (int i = lane; i < rows * d.n_value; i += WARP) {
            const int row = i / d.n_value, j = i % d.n_value;
            __builtin_assume(p0 + row >= pos);
            float *to = delta_gates_row(a, row0 + row) + j;
            if (KDA) {
                to[d.n_value] = delta_beta(a, run, pos, p0 + row, j);
                continue;
            }
            const float2 g = delta_gates<MAMBA>(a, run, pos, p0 + row, j);
            to[0] = g.x;
            to[d.n_value] = g.y;
        }
    }
    if (item >= n_head) return;
    const int kind = min(item / d.n_key, 2), head = item - kind * d.n_key;
    const struct delta_channels ch = delta_channels_of<MAMBA>(a, run, kind, head);
    float4 w[4];
    float bias[4], x[4][DELTA_TAPS]; /* x: the values under the convolution */
    UNROLL for (int v = 0; v < 4; v++) {
        const int i = lane + 32 * v;
        w[v] = i < ch.n ? *(const float4 *)(ch.taps + (size_t)i * DELTA_TAPS) : make_float4(0, 0, 0, 0);
        bias[v] = MAMBA && i < ch.n ? ch.bias[i] : 0;
        UNROLL for (int u = 0; u < DELTA_TAPS - 1; u++) x[v][u + 1] = delta_input(ch, pos, p0 - 3 + u, i);
    }
    UNROLL_BY(1) for (int row = 0; row < rows; row++) {
        float y[4];
        UNROLL for (int v = 0; v < 4; v++) {
            UNROLL for (int u = 0; u < DELTA_TAPS - 1; u++) x[v][u] = x[v][u + 1];
            __builtin_assume(p0 + row >= pos && pos >= 0);
            x[v][3] = delta_input(ch, pos, p0 + row, lane + 32 * v);
            y[v] = w[v].x * x[v][0] + w[v].y * x[v][1] + w[v].z * x[v][2] + w[v].w * x[v][3];
            if (MAMBA) y[v] += bias[v];
            y[v] *= sigmoid(y[v]);
        }
        const size_t at = (size_t)(row0 + row);
        float f = 1.0f;
        if (!MAMBA && kind < 2) f = delta_unit(y);
        if (MAMBA && kind < 2) {
            const float2 s = delta_scale<0>(fmaxf(fmaxf(fabsf(y[0]), fabsf(y[1])), fmaxf(fabsf(y[2]), fabsf(y[3]))));
            f = s.x;
            if (!lane) delta_gates_row(a, row0 + row)[2 * d.n_value + item] = s.y;
        }
        float *v32 = a.t.v + at * (size_t)(d.n_value * d.head_v) + head * d.head_v;
        uint16_t *v16 = a.t.qk + at * (size_t)(delta_planes(RULE) * d.n_key * d.head_k) + (size_t)item * d.head_k;
        UNROLL for (int v = 0; v < 4; v++) {
            const int i = lane + 32 * v;
            if (i >= ch.n) continue;
            if (kind == 2) v32[i] = y[v];
            else v16[i] = f32_to_f16(y[v] * f);
            if (kind == 1) v16[d.n_key * d.head_k + i] = half_rest(y[v] * f);
        }
    }
}

/* Starts to copy the queries or keys of key head kh, of 64 rows from row `row` of the segment on, to a tile that
 * f16_at<DELTA_HEAD> describes; zeros where there are none. With 128 threads; a warp copies rows 16w..16w+15. */
template <int RULE>
DEVICE void delta_copy(uint8_t *to, const struct delta_args &a, enum delta_plane plane, int kh, int row) {
    const struct delta &d = a.shape;
    const uint16_t *from = a.t.qk + (size_t)(((int)plane * d.n_key + kh) * d.head_k);
    const int lane = threadIdx.x & 31, first = 16 * (threadIdx.x >> 5);
    UNROLL_BY(4) for (int i = lane; i < 16 * DELTA_HEAD / 8; i += WARP) {
        const int r = first + i / (DELTA_HEAD / 8), c = i % (DELTA_HEAD / 8);
        const bool in = row + r < a.n_row && 8 * c < d.head_k;
        const size_t at =
            in ? (size_t)(row + r) * (size_t)(delta_planes(RULE) * d.n_key * d.head_k) + (size_t)(8 * c) : 0;
        cp_async16(to + f16_at<DELTA_HEAD>(r, c), from + at, in);
    }
}

/* Loads values 16 s..16 s + 15 of the warp's rows of a tile of queries or keys, as an A operand. */
DEVICE void delta_rows(uint32_t r[4], const uint8_t *tile, int s) {
    const int lane = threadIdx.x & 31;
    ldmatrix_x4(r, tile + f16_at<DELTA_HEAD>(16 * (threadIdx.x >> 5) + (lane & 15), 2 * s + (lane >> 4)));
}

/* k_delta_prepare: floats of a row of A and T; bytes of both, or of the keys, their rest and the queries. */
enum {
    DELTA_PITCH = DELTA_TILE + 4,
    DELTA_QK_BYTES = DELTA_TILE * DELTA_HEAD * 2, /* of a tile of queries or keys */
    DELTA_PREPARE_SMEM = 3 * DELTA_QK_BYTES
};
static_assert(2 * DELTA_TILE * DELTA_PITCH * 4 <= DELTA_PREPARE_SMEM, "A and T fit");

/* Numbers in two floats, the rounded number and what that leaves: their sum. */
DEVICE float2 exact_sum(float2 a, float2 b) {
    const float x = a.x + b.x, part = x - a.x, rest = (a.x - (x - part)) + (b.x - part) + (a.y + b.y);
    return make_float2(x + rest, rest - (x + rest - x));
}

/* With one warp: sums[t] = the sum of the logarithms of value head j's decays over rows `row`..row + t of the segment,
 * in two floats, because differences of large sums have to be as exact as small ones; second[t] = beta or the time step.
 * Rows that do not exist have 0. */
DEVICE void delta_sums(const struct delta_args &a, int row, int j, float2 *sums, float *second) {
    const int lane = threadIdx.x & 31; /* lane i has rows 2i and 2i + 1 */
    float2 x[2];
    UNROLL for (int u = 0; u < 2; u++) {
        const int r = row + 2 * lane + u;
        const float *gates = delta_gates_row(a, r) + j;
        x[u] = make_float2(r < a.n_row ? gates[0] : 0, 0);
        second[2 * lane + u] = r < a.n_row ? gates[a.shape.n_value] : 0;
    }
    float2 upto = exact_sum(x[0], x[1]), other;
    auto earlier = [&](int o) {
        return make_float2(__shfl_up_sync(0xFFFFFFFFu, upto.x, o), __shfl_up_sync(0xFFFFFFFFu, upto.y, o));
    };
    UNROLL for (int o = 1; o < WARP; o <<= 1) {
        other = earlier(o);
        if (lane >= o) upto = exact_sum(upto, other);
    }
    other = earlier(1);
    sums[2 * lane] = lane ? exact_sum(other, x[0]) : x[0];
    sums[2 * lane + 1] = upto;
}

/* Returns the logarithm of the decays of the rows after s up to t. */
DEVICE float delta_between(const float2 *sums, int s, int t) {
    return (sums[t].x - sums[s].x) + (sums[t].y - sums[s].y);
}

/* Rows of the tile that begins with row `row` of the segment that go into the state: all but the forward's last. */
DEVICE int delta_taken(const struct delta_args &a, int row) {
    return min(a.n_row_all - 1 - a.first - row, (int)DELTA_TILE);
}

/* Writes row t's factors of the state, which are multiplied by f, and of what it adds to the state: sums as above,
 * `taken` rows go into it. */
DEVICE void delta_fades(float *fades, const float2 *sums, int taken, int t, float f) {
    fades[FADE_STATE * DELTA_TILE + t] = f * expf(sums[t].x);
    fades[FADE_ADDED * DELTA_TILE + t] = t < taken ? expf(delta_between(sums, t, taken - 1)) : 0;
    if (!t) fades[FADE_LAST * DELTA_TILE] = taken > 0 ? expf(sums[taken - 1].x) : 1;
}

/* Stores a 16 x 16 part of P, two n8-tiles of products x and y, as an A fragment. */
DEVICE void delta_store_part(uint16_t *to, const float x[4], const float y[4]) {
    *(uint4 *)to = make_uint4(f32_to_f16x2(x[0], x[1]), f32_to_f16x2(x[2], x[3]), f32_to_f16x2(y[0], y[1]),
                              f32_to_f16x2(y[2], y[3]));
}

/* Stores T = (I + A)^-1 diag(beta) and its rest as A fragments, `to` being the lane's place in the first of its warp.
 * A (64, DELTA_PITCH): below the diagonal; what is above it is overwritten. T (64, DELTA_PITCH): for the inverse. With
 * 128 threads: two 32 x 32 blocks with a thread per column, then the block below. */
DEVICE void delta_inverse(float *A, float *T, const float *beta, uint16_t *to) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    if (tid < DELTA_TILE) {
        const int at = (tid & 32) * (DELTA_PITCH + 1), col = tid & 31; /* the block of 32 x 32, its column */
        float x[32];
        UNROLL for (int r = 0; r < 32; r++) {
            x[r] = r == col;
            UNROLL for (int i = 0; i < r; i++) x[r] -= A[at + r * DELTA_PITCH + i] * x[i];
            T[at + r * DELTA_PITCH + col] = x[r];
        }
    }
    __syncthreads();                            /* both blocks are inverted */
    const int r = tid >> 2, c0 = 8 * (tid & 3); /* the block below: -T22 A21 T11; A21 T11 goes to the right of A11 */
    float x[8] = {};
    for (int i = 0; i < 32; i++)
        UNROLL for (int c = 0; c < 8; c++) x[c] += A[(32 + r) * DELTA_PITCH + i] * T[i * DELTA_PITCH + c0 + c];
    UNROLL for (int c = 0; c < 8; c++) A[r * DELTA_PITCH + 32 + c0 + c] = x[c];
    __syncthreads(); /* A21 T11 is written */
    UNROLL for (int c = 0; c < 8; c++) x[c] = 0;
    for (int i = 0; i < 32; i++)
        UNROLL for (int c = 0; c < 8; c++) x[c] -=
            T[(32 + r) * DELTA_PITCH + 32 + i] * A[i * DELTA_PITCH + 32 + c0 + c];
    UNROLL for (int c = 0; c < 8; c++) T[(32 + r) * DELTA_PITCH + c0 + c] = x[c];
    __syncthreads(); /* T is whole */
    UNROLL for (int s = 0; s < 4; s++) {
        if (s > warp) continue;
        uint32_t h[4], rest[4];
        UNROLL for (int e = 0; e < 4; e++) {
            const int col = 16 * s + 2 * t + 8 * (e >> 1);
            const float *from = T + (16 * warp + g + 8 * (e & 1)) * DELTA_PITCH + col;
            h[e] = f32_to_f16x2(from[0] * beta[col], from[1] * beta[col + 1]);
            rest[e] = half_rest2(from[0] * beta[col], from[1] * beta[col + 1]);
        }
        *(uint4 *)(to + s * WARP * 8) = make_uint4(h[0], h[1], h[2], h[3]);
        *(uint4 *)(to + 2 * DELTA_TILE * DELTA_TILE + s * WARP * 8) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
}

/* Adds to kk and qk, two n8-tiles each, a k16-step of the products of 16 rows of keys, ka and `rest`, and of queries, qa,
 * with the 16 keys at `keys` and their rest at `rests`: the lane's rows of four 8 x 8 matrices. */
DEVICE void delta_products(float kk[2][4], float qk[2][4], const uint32_t ka[4], const uint32_t rest[4],
                           const uint32_t qa[4], const uint8_t *keys, const uint8_t *rests) {
    uint32_t r[4];
    ldmatrix_x4(r, rests);
    UNROLL for (int i = 0; i < 2; i++) mma_f16(kk[i], ka, r + 2 * i);
    ldmatrix_x4(r, keys);
    UNROLL for (int i = 0; i < 2; i++) mma_f16(kk[i], rest, r + 2 * i);
    UNROLL for (int i = 0; i < 2; i++) mma_f16(kk[i], ka, r + 2 * i);
    UNROLL for (int i = 0; i < 2; i++) mma_f16(qk[i], qa, r + 2 * i);
}

/* The lane's place in the first fragment of its warp in the matrices of a tile of a value head. */
DEVICE uint16_t *delta_fragments(const struct delta_args &a, size_t tile) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return a.t.tiles + tile * 3 * DELTA_TILE * DELTA_TILE + (size_t)(4 * warp * WARP + lane) * 8;
}

/* What a tile of 64 rows of a value head needs besides the state. With G the running sum of the decays' logarithms:
 *   A[t][s] = beta_t e^(G_t - G_s) k_t.k_s, s < t;  T = (I + A)^-1 diag(beta);
 *   P[t][s] = e^(G_t - G_s) q_t.k_s, s <= t.
 * fades: e^(G_t), e^(G_m - G_t), e^(G_m), where m is the last row that goes into the state; rows after it get 0. T and P
 * are stored in halves as A fragments: m16-tile w and k16-step s at ((4 w + s) * 32 + lane) * 16 bytes; only s <= w are
 * written.
 * Grid: (tiles, n_value), block: 128, a warp per 16 rows. 2 M multiplications by MMA, 50,000 for the inverse. Reads 48
 * KB, writes 15 KB; the inverse takes most of the time, some 3,000 cycles of latency, with 2 blocks on an SM of SM120, 5
 * on others. */
__global__ void __launch_bounds__(128, 2) k_delta_prepare(const __grid_constant__ struct delta_args a) {
    DYN_SMEM(uint8_t, smem);
    SHARED(float2, G, DELTA_TILE);
    SHARED(float, beta, DELTA_TILE);
    uint8_t *k_tile = smem, *k_rest = k_tile + DELTA_QK_BYTES, *q_tile = k_rest + DELTA_QK_BYTES;
    float *A = (float *)smem, *T = A + DELTA_TILE * DELTA_PITCH; /* (64, 64) over both, when they are done with */
    grid_dependency_launch();
    grid_dependency_wait();
    const struct delta &d = a.shape;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int j = blockIdx.y, row = blockIdx.x * DELTA_TILE, kh = delta_key_head(d, j);
    const size_t tile = (size_t)blockIdx.x * (size_t)d.n_value + (size_t)j;
    delta_copy<RULE_NET>(k_tile, a, DELTA_K, kh, row);
    delta_copy<RULE_NET>(k_rest, a, DELTA_K_REST, kh, row);
    delta_copy<RULE_NET>(q_tile, a, DELTA_Q, kh, row);
    cp_async_commit();
    if (!warp) delta_sums(a, row, j, G, beta);
    cp_async_wait<0>();
    __syncthreads(); /* all queries and keys have landed; G and beta are written */
    if (tid < DELTA_TILE) delta_fades(a.t.fades + tile * DELTA_FADES, G, delta_taken(a, row), tid, 1);
    float kk[8][4] = {}, qk[8][4] = {};
    UNROLL for (int s = 0; s < DELTA_HEAD / 16; s++) {
        uint32_t ka[4], rest[4], qa[4];
        delta_rows(ka, k_tile, s);
        delta_rows(rest, k_rest, s);
        delta_rows(qa, q_tile, s);
        UNROLL for (int b = 0; b < 8; b += 2) {
            if (b > 2 * warp) continue; /* rows s of other 16s come later */
            const int at = f16_at<DELTA_HEAD>(8 * b + (lane >> 4) * 8 + (lane & 7), 2 * s + (lane >> 3 & 1));
            delta_products(kk + b, qk + b, ka, rest, qa, k_tile + at, k_rest + at);
        }
    }
    __syncthreads(); /* all warps are done with the queries and keys: A takes their place */
    uint16_t *to = delta_fragments(a, tile);
    UNROLL for (int b = 0; b < 8; b++) {
        UNROLL for (int e = 0; e < 4; e++) {
            const int r = 16 * warp + g + 8 * (e >> 1), s = 8 * b + 2 * t + (e & 1);
            const float fade = s <= r ? expf(delta_between(G, s, r)) : 0;
            A[r * DELTA_PITCH + s] = s < r ? beta[r] * fade * kk[b][e] : 0;
            qk[b][e] *= fade;
        }
    }
    UNROLL for (int s = 0; s < 4; s++) {
        if (s > warp) continue;
        delta_store_part(to + DELTA_TILE * DELTA_TILE + s * WARP * 8, qk[2 * s], qk[2 * s + 1]);
    }
    __syncthreads(); /* A is written */
    delta_inverse(A, T, beta, to);
}

/* ============================================================================================================
 * Gated delta net: tiles of other rules
 *
 * What a tile of Kimi delta attention and of Mamba-2 needs besides the state.
 * ============================================================================================================ */

/* k_kda_prepare: rows of a block whose products have their decays one by one; bytes of a row in shared memory; parts. */
enum {
    KDA_ROWS = 16,
    KDA_ROW_BYTES = DELTA_HEAD * 4,
    KDA_PART_BYTES = DELTA_TILE * KDA_ROW_BYTES, /* of queries, keys or decays */
    KDA_PREPARE_SMEM = 3 * KDA_PART_BYTES,
    KDA_PITCH = KDA_ROWS + 4 /* floats of a row of P's blocks on the diagonal */
};
static_assert(2 * DELTA_TILE * DELTA_PITCH * 4 + DELTA_TILE * KDA_PITCH * 4 <= KDA_PREPARE_SMEM,
              "A, T and the blocks of P fit");

/* Byte of the half of channel c, or with `rest` of what it leaves, in row r of a part that has both in place of floats:
 * as ldmatrix reads pieces of 16 bytes without bank conflicts. */
DEVICE int kda_half_at(int r, int c, bool rest) {
    return f16_at<2 * DELTA_HEAD>(r, c / 8 + (rest ? DELTA_HEAD / 8 : 0)) + 2 * (c % 8);
}

/* Multiplies an A fragment, or with its rest the numbers that both are, by the factors of its columns, those of the
 * lane's first. */
DEVICE void kda_fade(uint32_t x[4], uint32_t *rest, const float *fade) {
    UNROLL for (int e = 0; e < 4; e++) {
        const float2 f = *(const float2 *)(fade + 8 * (e >> 1));
        float lo = half_to_f32((uint16_t)x[e]), hi = half_to_f32((uint16_t)(x[e] >> 16));
        if (rest) lo += half_to_f32((uint16_t)rest[e]), hi += half_to_f32((uint16_t)(rest[e] >> 16));
        x[e] = f32_to_f16x2(lo * f.x, hi * f.y);
        if (rest) rest[e] = half_rest2(lo * f.x, hi * f.y);
    }
}

/* The products of 16 rows of a tile, the warp's, with each other: kk[t] of key t, and qk[t] of query t, with key `lane
 * % 16`; both have the decays of the rows after the key up to t, and nothing before it. Each half of the warp adds up
 * half of the channels. */
DEVICE void kda_diagonal(const float *k, const float *q, const float *decay, int dk, float kk[KDA_ROWS],
                         float qk[KDA_ROWS]) {
    const int lane = threadIdx.x & 31, s = lane % KDA_ROWS;
    UNROLL_BY(1) for (int c = 4 * (lane / KDA_ROWS); c < dk; c += 8) {
        float4 x = make_float4(0, 0, 0, 0); /* key s with the decays */
        UNROLL for (int t = 0; t < KDA_ROWS; t++) {
            const float4 y = *(const float4 *)(k + t * DELTA_HEAD + c), z = *(const float4 *)(q + t * DELTA_HEAD + c),
                         f = *(const float4 *)(decay + t * DELTA_HEAD + c);
            x.x = t == s ? y.x : x.x * f.x;
            x.y = t == s ? y.y : x.y * f.y;
            x.z = t == s ? y.z : x.z * f.z;
            x.w = t == s ? y.w : x.w * f.w;
            kk[t] += y.x * x.x + y.y * x.y + y.z * x.z + y.w * x.w;
            qk[t] += z.x * x.x + z.y * x.y + z.z * x.z + z.w * x.w;
        }
    }
    UNROLL for (int t = 0; t < KDA_ROWS; t++) {
        kk[t] += __shfl_xor_sync(0xFFFFFFFFu, kk[t], KDA_ROWS);
        qk[t] += __shfl_xor_sync(0xFFFFFFFFu, qk[t], KDA_ROWS);
    }
}

/* Multiplies channel c of a tile by its decays, with a thread per channel. Blocks of 16 rows get queries and keys times
 * the decays from the block's first row to theirs, and, in place of the decays, keys times the decays from the row after
 * theirs to the block's last: exponentials of sums, none of which is positive. fade (4, 128): the product of a block's
 * decays. The planes get the same over the tile, see enum delta_plane. Rows from `taken` on do not go into the state. */
DEVICE void kda_fold(const struct delta_args &a, uint8_t *k, uint8_t *q, uint8_t *decay, float *fade, int j, int row,
                     int taken) {
    const struct delta &d = a.shape;
    const struct run &run = a.batch.at->run[0];
    const int c = threadIdx.x, plane = d.n_key * d.head_k, pos = run.pos;
    uint16_t *out = a.t.qk + (size_t)row * (size_t)(delta_planes(RULE_KDA) * plane) + j * d.head_k + c;
    const bool in = c < d.head_k;
    auto log_decay = [&](int r) {
        const int p = a.first + row + r;
        __builtin_assume(p >= 0);
        return in && row + r < a.n_row ? delta_row_decay(a, run, pos, pos + p, j, c) : 0;
    };
    float of[4], before = 0; /* sums of logarithms: of each block, of what goes into the state; of those before */
    UNROLL for (int b = 0; b < 4; b++) {
        of[b] = 0;
        UNROLL_BY(4) for (int t = KDA_ROWS * b; t < KDA_ROWS * (b + 1); t++) if (t < taken) of[b] += log_decay(t);
        fade[b * DELTA_HEAD + c] = expf(of[b]);
    }
    UNROLL_BY(1) for (int b = 0; b < 4; b++) {
        float x[KDA_ROWS], y[KDA_ROWS], g[KDA_ROWS]; /* keys, queries, logarithms of decays */
        UNROLL for (int t = 0; t < KDA_ROWS; t++) {
            const int at = (KDA_ROWS * b + t) * KDA_ROW_BYTES + 4 * c;
            x[t] = *(const float *)(k + at);
            y[t] = *(const float *)(q + at);
            g[t] = log_decay(KDA_ROWS * b + t);
        }
        __syncthreads(); /* all have read these rows, kda_diagonal too: halves take the place of floats */
        auto keep = [&](uint8_t *part, int t, float v, int to, float over, bool rest) {
            const int r = KDA_ROWS * b + t;
            *(uint16_t *)(part + kda_half_at(r, c, false)) = f32_to_f16(v);
            if (rest) *(uint16_t *)(part + kda_half_at(r, c, true)) = half_rest(v);
            if (row + r >= a.n_row || !in) return;
            uint16_t *at = out + (size_t)r * (size_t)(delta_planes(RULE_KDA) * plane) + to * plane;
            at[0] = f32_to_f16(v * over);
            if (rest) at[plane] = half_rest(v * over);
        };
        float after = 0, sum = 0;
        UNROLL for (int i = 1; i < 4; i++) if (i > b) after += of[i];
        const float over = expf(before), under = expf(after);
        UNROLL for (int t = 0; t < KDA_ROWS; t++) {
            sum += g[t];
            const float f = expf(sum);
            keep(k, t, x[t] * f, DELTA_K, over, true);
            keep(q, t, y[t] * f, DELTA_Q, over, false);
        }
        sum = 0;
        UNROLL for (int t = KDA_ROWS - 1; t >= 0; t--) {
            const bool into = KDA_ROWS * b + t < taken;
            keep(decay, t, into ? x[t] * expf(sum) : 0, DELTA_INTO, under, true);
            sum += into ? g[t] : 0;
        }
        UNROLL for (int i = 0; i < 4; i++) if (i == b) before += of[i];
    }
    a.t.fades[((size_t)(row / DELTA_TILE) * (size_t)d.n_value + (size_t)j) * DELTA_FADES + c] = expf(before);
}

/* What a tile of 64 rows of a head of Kimi delta attention needs besides the state: T and P as in k_delta_prepare, with
 * e^(G_t - G_s) for each channel inside the products k_t.k_s and q_t.k_s. No exponent is ever positive: within 16 rows
 * a key is multiplied by decay after decay; of other blocks of 16 the earlier rows have the decays to the end of theirs,
 * the later ones those from the start of theirs, and those of the blocks between. The planes of queries and keys get
 * their decays over the tile, and fades those of the state's rows.
 * Grid: (tiles, n_value), block: 128, a warp per 16 rows. 1 M multiplications by MMA, and 200,000 of decays within 16
 * rows, which take most of the time: some 5,000 cycles. Reads 80 KB, writes 95 KB, with one block on an SM of SM120, 2
 * on others. */
__global__ void __launch_bounds__(128, 1) k_kda_prepare(const __grid_constant__ struct delta_args a) {
    DYN_SMEM(uint8_t, k_part);
    SHARED(float, beta, DELTA_TILE);
    SHARED(float, fade, 4 * DELTA_HEAD);
    uint8_t *q_part = k_part + KDA_PART_BYTES, *decays = q_part + KDA_PART_BYTES; /* (64, 128) floats, then halves */
    float *A = (float *)k_part, *T = A + DELTA_TILE * DELTA_PITCH, *P = T + DELTA_TILE * DELTA_PITCH;
    grid_dependency_launch();
    grid_dependency_wait();
    const struct delta &d = a.shape;
    const struct run &run = a.batch.at->run[0];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int j = blockIdx.y, row = blockIdx.x * DELTA_TILE, plane = d.n_key * d.head_k, pos = run.pos;
    const size_t tile = (size_t)blockIdx.x * (size_t)d.n_value + (size_t)j;
    if (tid < DELTA_TILE) beta[tid] = row + tid < a.n_row ? delta_gates_row(a, row + tid)[d.n_value + j] : 0;
    UNROLL_BY(8) for (int r = 0; r < DELTA_TILE; r++) { /* a thread per channel */
        const bool in = row + r < a.n_row && tid < d.head_k;
        const uint16_t *from =
            a.t.qk + (size_t)(row + r) * (size_t)(delta_planes(RULE_KDA) * plane) + j * d.head_k + tid;
        const int at = r * KDA_ROW_BYTES + 4 * tid;
        __builtin_assume(a.first + row + r >= 0);
        *(float *)(q_part + at) = in ? half_to_f32(from[DELTA_Q * plane]) : 0;
        *(float *)(k_part + at) = in ? half_to_f32(from[DELTA_K * plane]) + half_to_f32(from[DELTA_K_REST * plane]) : 0;
        *(float *)(decays + at) = in ? expf(delta_row_decay(a, run, pos, pos + a.first + row + r, j, tid)) : 1;
    }
    __syncthreads(); /* keys, queries, decays and betas are written */
    float kk0[KDA_ROWS] = {}, qk0[KDA_ROWS] = {};
    const int part = warp * KDA_ROWS * KDA_ROW_BYTES;
    kda_diagonal((const float *)(k_part + part), (const float *)(q_part + part), (const float *)(decays + part),
                 d.head_k, kk0, qk0);
    kda_fold(a, k_part, q_part, decays, fade, j, row, delta_taken(a, row));
    __syncthreads(); /* queries and keys have their decays, in halves */
    float kk[6][4] = {}, qk[6][4] = {};
    UNROLL for (int s = 0; s < DELTA_HEAD / 16; s++) {
        uint32_t ka[4], rest[4], qa[4];
        const int at = f16_at<2 * DELTA_HEAD>(16 * warp + (lane & 15), 2 * s + (lane >> 4));
        ldmatrix_x4(ka, k_part + at);
        ldmatrix_x4(rest, k_part + at + DELTA_HEAD * 2);
        ldmatrix_x4(qa, q_part + at);
        UNROLL for (int b = 4; b >= 0; b -= 2) { /* blocks of keys from the latest on */
            if (b >= 2 * warp) continue;
            const uint8_t *from =
                decays + f16_at<2 * DELTA_HEAD>(8 * b + (lane >> 4) * 8 + (lane & 7), 2 * s + (lane >> 3 & 1));
            delta_products(kk + b, qk + b, ka, rest, qa, from, from + DELTA_HEAD * 2);
            const float *between = fade + b / 2 * DELTA_HEAD + 16 * s + 2 * t; /* this block is between those before */
            if (b) kda_fade(ka, rest, between), kda_fade(qa, NULL, between);
        }
    }
    __syncthreads(); /* all warps are done with the queries and keys: A takes their place */
    UNROLL for (int b = 0; b < 6; b++) UNROLL for (int e = 0; e < 4; e++) {
        const int r = 16 * warp + g + 8 * (e >> 1), s = 8 * b + 2 * t + (e & 1);
        if (b < 2 * warp) A[r * DELTA_PITCH + s] = beta[r] * kk[b][e];
    }
    UNROLL for (int i = 0; i < KDA_ROWS; i++) {
        const int r = 16 * warp + i, s = lane % KDA_ROWS;
        if (lane < KDA_ROWS) A[r * DELTA_PITCH + 16 * warp + s] = beta[r] * kk0[i];
        else P[r * KDA_PITCH + s] = qk0[i];
    }
    __syncthreads(); /* A and the blocks of P are written */
    uint16_t *to = delta_fragments(a, tile);
    UNROLL for (int s = 0; s < 3; s++) if (s < warp)
        delta_store_part(to + DELTA_TILE * DELTA_TILE + s * WARP * 8, qk[2 * s], qk[2 * s + 1]);
    float x[2][4];
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int e = 0; e < 4; e++) x[n][e] =
        P[(16 * warp + g + 8 * (e >> 1)) * KDA_PITCH + 8 * n + 2 * t + (e & 1)];
    delta_store_part(to + DELTA_TILE * DELTA_TILE + warp * WARP * 8, x[0], x[1]);
    delta_inverse(A, T, beta, to);
}

/* What a tile of 64 rows of a group of Mamba-2 needs besides the state, for each of its heads (arXiv 2405.21060,
 * section 6). With G as in k_delta_prepare, and C and B scaled as k_delta_mix stores them:
 *   P[t][s] = e^(G_t - G_s) C_t.B_s, s <= t.
 * fades: as in k_delta_prepare, those of results times what undoes the scale of C; time steps times what undoes the
 * scale of B; what undoes the scale of C.
 * Grid: (tiles, n_key), block: 128, a warp per 16 rows. 0.5 M multiplications by MMA for the group, and 2,100
 * exponentials a head. Reads 32 KB, writes 6 KB a head: with 8 heads expect 3,000 cycles. */
__global__ void __launch_bounds__(128, 2) k_mamba_prepare(const __grid_constant__ struct delta_args a) {
    SHARED(uint8_t, b_tile, DELTA_QK_BYTES);
    SHARED(uint8_t, c_tile, DELTA_QK_BYTES);
    SHARED(float2, G, 4 * DELTA_TILE); /* of a head for each warp */
    SHARED(float, step, 4 * DELTA_TILE);
    grid_dependency_launch();
    grid_dependency_wait();
    const struct delta &d = a.shape;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int row = blockIdx.x * DELTA_TILE, kh = blockIdx.y, per_key = d.n_value / d.n_key;
    delta_copy<RULE_MAMBA>(b_tile, a, DELTA_K, kh, row);
    delta_copy<RULE_MAMBA>(c_tile, a, DELTA_Q, kh, row);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads(); /* all rows of B and C have landed */
    float cb[8][4] = {};
    UNROLL for (int s = 0; s < DELTA_HEAD / 16; s++) {
        uint32_t c[4];
        delta_rows(c, c_tile, s);
        UNROLL for (int b = 0; b < 8; b += 2) {
            if (b > 2 * warp) continue; /* rows s of other 16s come later */
            uint32_t r[4];
            ldmatrix_x4(r, b_tile + f16_at<DELTA_HEAD>(8 * b + (lane >> 4) * 8 + (lane & 7), 2 * s + (lane >> 3 & 1)));
            mma_f16(cb[b], c, r);
            mma_f16(cb[b + 1], c, r + 2);
        }
    }
    UNROLL_BY(1) for (int i0 = 0; i0 < per_key; i0 += 4) {
        const int mine = kh * per_key + i0 + warp; /* a head of the warp: its factors */
        const size_t tile0 = (size_t)blockIdx.x * (size_t)d.n_value;
        if (i0 + warp < per_key) {
            float *fades = a.t.fades + (tile0 + (size_t)mine) * DELTA_FADES;
            float2 *sums = G + warp * DELTA_TILE;
            delta_sums(a, row, mine, sums, step + warp * DELTA_TILE);
            __syncwarp(); /* sums and time steps are written */
            UNROLL for (int r = lane; r < DELTA_TILE; r += WARP) {
                const bool in = row + r < a.n_row;
                const float *scales = delta_gates_row(a, row + r) + 2 * d.n_value + kh;
                const float result = in ? scales[0] : 0;
                delta_fades(fades, sums, delta_taken(a, row), r, result);
                fades[FADE_VALUE * DELTA_TILE + r] = in ? step[warp * DELTA_TILE + r] * scales[d.n_key] : 0;
                fades[FADE_RESULT * DELTA_TILE + r] = result;
            }
        }
        __syncthreads(); /* the sums of four heads are written */
        UNROLL_BY(1) for (int i = 0; i < min(per_key - i0, 4); i++) {
            const float2 *sums = G + i * DELTA_TILE;
            uint16_t *to = delta_fragments(a, tile0 + (size_t)(kh * per_key + i0 + i)) + DELTA_TILE * DELTA_TILE;
            UNROLL for (int s = 0; s < 4; s++) {
                if (s > warp) continue;
                float x[2][4];
                UNROLL for (int n = 0; n < 2; n++) UNROLL for (int e = 0; e < 4; e++) {
                    const int r = 16 * warp + g + 8 * (e >> 1), c = 16 * s + 8 * n + 2 * t + (e & 1);
                    x[n][e] = c <= r ? expf(delta_between(sums, c, r)) * cb[2 * s + n][e] : 0;
                }
                delta_store_part(to + s * WARP * 8, x[0], x[1]);
            }
        }
        __syncthreads(); /* and are done with */
    }
}

/* ============================================================================================================
 * Gated delta net: scan
 *
 * The state goes through the tiles one after the other.
 * ============================================================================================================ */

/* Of k_delta_scan's shared memory. */
enum {
    DELTA_S_PITCH = (DELTA_COLS + 8) * 2, /* bytes of a row of S, R and U: no bank conflicts */
    DELTA_S_BYTES = DELTA_HEAD * DELTA_S_PITCH,
    DELTA_U_BYTES = DELTA_TILE * DELTA_S_PITCH,
    DELTA_SCAN_SMEM = 4 * DELTA_QK_BYTES + 2 * DELTA_S_BYTES + 2 * DELTA_U_BYTES
};
static_assert(3 * DELTA_U_BYTES <= DELTA_QK_BYTES, "U takes the place of the queries");

/* Loads rows 16 s..16 s + 15 of a matrix in halves (rows DELTA_S_PITCH apart) as B operands of four n8-tiles. */
DEVICE void delta_operand(uint32_t b[4][2], const uint8_t *from, int s) {
    const int lane = threadIdx.x & 31;
    UNROLL for (int n = 0; n < 4; n += 2)
        ldmatrix_x4_trans(b[n], from + (16 * s + (lane & 15)) * DELTA_S_PITCH + (n + (lane >> 4)) * 16);
}

/* Stores rows r and r + 8 (16, 32) of x * f in halves, and with REST to `rest` what this leaves. */
template <bool REST>
DEVICE void delta_store(uint8_t *to, uint8_t *rest, int r, const float x[4][4], float f0, float f1) {
    const int t = threadIdx.x & 3;
    UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 2; e++) {
        const int at = (r + 8 * e) * DELTA_S_PITCH + (8 * n + 2 * t) * 2;
        const float f = e ? f1 : f0, a = x[n][2 * e] * f, b = x[n][2 * e + 1] * f;
        *(uint32_t *)(to + at) = clamped_f16x2(a, b);
        if (REST) *(uint32_t *)(rest + at) = half_rest2(a, b);
    }
}

/* Returns the largest |x| of the lane. */
DEVICE float delta_largest(const float x[4][4]) {
    float m = 0;
    UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 4; e++) m = fmaxf(m, fabsf(x[n][e]));
    return m;
}

/* x (16, 32) += a b */
DEVICE void delta_multiply(float x[4][4], const uint32_t a[4], const uint32_t b[4][2]) {
    UNROLL for (int n = 0; n < 4; n++) mma_f16(x[n], a, b[n]);
}

/* The same with the fragment at a. */
DEVICE void delta_multiply(float x[4][4], const uint4 *a, const uint32_t b[4][2]) {
    const uint32_t r[4] = {a->x, a->y, a->z, a->w};
    delta_multiply(x, r, b);
}

/* y (16, 32) += x * f */
DEVICE void delta_add(float y[4][4], const float x[4][4], float f) {
    UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 4; e++) y[n][e] += x[n][e] * f;
}

/* Loads values 8 * piece.. of tokens 16 s..16 s + 15 of a tile of keys, as an A operand whose rows are the values. */
DEVICE void delta_columns(uint32_t r[4], const uint8_t *tile, int piece, int s) {
    /* matrices: (tokens 0-7, rows 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15) */
    const int lane = threadIdx.x & 31, token = 16 * s + (lane >> 4) * 8 + (lane & 7);
    ldmatrix_x4_trans(r, tile + f16_at<DELTA_HEAD>(token, piece + (lane >> 3 & 1)));
}

/* Goes through the tiles of a segment with 32 columns of a value head's state, V being those of the values:
 *   X = K S;  R = V - e^G X;  U = T R;  result = (e^G Q S + P U) / sqrt(head_k);  S = e^(G_m) S + K^T e^(G_m - G) U.
 * KDA: the queries and both forms of the keys have these factors, and the rows of S their own. Mamba-2: U = dt V, and
 * the result, with D V added, multiplies the silu of the gate.
 * S is F32 in registers. As operands S, R and U are F16, with a power of two for every warp's rows. In products that go
 * into the state each factor is the sum of the rounded number x and the rest x': x y + x' y + x y' is added up.
 * Grid: (ceil(head_v / 32), n_value), block: 128. Warp w has rows 16w.. of a tile and 32w.. of the state. The next
 * tile's keys come while this one is multiplied; a warp copies its own rows of the queries and of the keys' rest, and
 * multiplies S by the keys meanwhile. 2.2 M multiplications and 74 KB from L2 per tile (KDA: 106 KB), three barriers:
 * expect 8,000 cycles, 240 us for 4,096 tokens where there are no more blocks than SMs. Mamba-2: 1.1 M, 64 KB, two
 * barriers: expect 4,000 cycles. */
template <int RULE>
__global__ void __launch_bounds__(128, 1) k_delta_scan(const __grid_constant__ struct delta_args a) {
    constexpr bool KDA = RULE == RULE_KDA, MAMBA = RULE == RULE_MAMBA;
    DYN_SMEM(uint8_t, smem);
    SHARED(float, scale, 3 * 4); /* by warp: what undoes the scale of its rows of S, R and U */
    uint8_t *k_rest = smem + 2 * DELTA_QK_BYTES, *q_tile = k_rest + DELTA_QK_BYTES, *s16 = q_tile + DELTA_QK_BYTES,
            *s_rest = s16 + DELTA_S_BYTES, *r16 = s_rest + DELTA_S_BYTES, *r_rest = r16 + DELTA_U_BYTES;
    uint8_t *u16 = MAMBA ? s_rest : q_tile, *faded = u16 + DELTA_U_BYTES, /* U, e^(G_m - G) U */
                                                *faded_rest = faded + DELTA_U_BYTES;
    grid_dependency_launch();
    grid_dependency_wait();
    const struct delta &d = a.shape;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int dk = d.head_k, dv = d.head_v, j = blockIdx.y, kh = delta_key_head(d, j);
    const int col = blockIdx.x * DELTA_COLS + 2 * t; /* the lane's columns: col + 8 n, and the next */
    const int n_tile = (a.n_row + DELTA_TILE - 1) / DELTA_TILE, row = 16 * warp + g; /* and row + 8 */
    const float q_scale = rsqrtf((float)dk), skip = MAMBA ? a.skip[delta_value_head<MAMBA>(d, j)] : 0;
    auto copy_keys = [&](int i) {
        if (i < n_tile) {
            delta_copy<RULE>(smem + (i & 1) * DELTA_QK_BYTES, a, DELTA_K, kh, i * DELTA_TILE);
            if (MAMBA) delta_copy<RULE>(q_tile, a, DELTA_Q, kh, i * DELTA_TILE);
        }
        cp_async_commit();
    };
    copy_keys(0);
    /* S[i]: rows 32 warp + 16 i + g and 8 more */
    float S[2][4][4] = {};
    float *const states = a.state + (size_t)a.batch.at->run[0].timeline * a.state_stride;
    auto state = [&](int i, int n, int e) {
        const int r = 32 * warp + 16 * i + g + 8 * e;
        const bool in = r < dk && col + 8 * n < dv;
        return in ? (float2 *)(states + ((size_t)j * dk + r) * dv + col + 8 * n) : (float2 *)NULL;
    };
    /* S in halves, for all warps */
    auto keep = [&]() {
        const float2 f = delta_scale<4>(fmaxf(delta_largest(S[0]), delta_largest(S[1])));
        UNROLL for (int i = 0; i < 2; i++) delta_store<!MAMBA>(s16, s_rest, 32 * warp + 16 * i + g, S[i], f.x, f.x);
        if (!lane) scale[warp] = f.y;
    };
    UNROLL for (int i = 0; i < 2; i++) UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 2; e++) {
        const float2 *from = state(i, n, e);
        const float2 v = from ? *from : make_float2(0, 0);
        S[i][n][2 * e] = v.x;
        S[i][n][2 * e + 1] = v.y;
    }
    keep();
    UNROLL_BY(1) for (int at = 0; at < n_tile; at++) {
        uint8_t *k_tile = smem + (at & 1) * DELTA_QK_BYTES;
        const size_t tile = (size_t)at * (size_t)d.n_value + (size_t)j;
        const uint4 *T = (const uint4 *)(a.t.tiles + tile * 3 * DELTA_TILE * DELTA_TILE) + 4 * warp * WARP + lane;
        const uint4 *P = T + DELTA_TILE * DELTA_TILE / 8, *T_rest = P + DELTA_TILE * DELTA_TILE / 8;
        const float *fades = a.t.fades + tile * DELTA_FADES;
        float *v = a.t.v + (size_t)(at * DELTA_TILE + row) * (size_t)(d.n_value * dv) + j * dv + col;
        float *gate = a.z + (size_t)(a.first + at * DELTA_TILE + row) * a.z_stride + j * dv + col;
        const size_t below = (size_t)8 * (size_t)(d.n_value * dv); /* floats from row to row + 8 */
        const bool in[2] = {at * DELTA_TILE + row < a.n_row, at * DELTA_TILE + row + 8 < a.n_row};
        auto fade = [&](enum delta_fade which, int r) { return fades[which * DELTA_TILE + r]; };
        const float f[2] = {KDA ? 1 : fade(FADE_STATE, row), KDA ? 1 : fade(FADE_STATE, row + 8)};
        float R[4][4], U[4][4] = {}, Y[4][4] = {}, X[4][4] = {};
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 2; e++) {
            const bool is = in[e] && col + 8 * n < dv;
            const float2 x = is ? *(const float2 *)(v + e * below + 8 * n) : make_float2(0, 0);
            R[n][2 * e] = x.x;
            R[n][2 * e + 1] = x.y;
        }
        cp_async_wait<0>();
        __syncthreads(); /* the keys have landed; all warps' rows of S are written, and all are done with U */
        delta_copy<RULE>(k_rest, a, DELTA_K_REST, kh, at * DELTA_TILE);
        if (!MAMBA) delta_copy<RULE>(q_tile, a, DELTA_Q, kh, at * DELTA_TILE);
        cp_async_commit();
        UNROLL for (int s = 0; s < DELTA_HEAD / 16; s++) {
            if (MAMBA || 16 * s >= dk) continue;
            uint32_t k[4], b[4][2];
            float x[4][4] = {};
            delta_rows(k, k_tile, s);
            delta_operand(b, s_rest, s);
            delta_multiply(x, k, b);
            delta_operand(b, s16, s);
            delta_multiply(x, k, b);
            delta_add(X, x, scale[s / 2]);
        }
        if (!MAMBA) {
            cp_async_wait<0>();
            __syncwarp(); /* the warp's rows of the queries and of the keys' rest have landed */
        }
        UNROLL for (int s = 0; s < DELTA_HEAD / 16; s++) {
            if (16 * s >= dk) continue;
            uint32_t rest[4], q[4], b[4][2];
            float x[4][4] = {}, y[4][4] = {};
            delta_operand(b, s16, s);
            delta_rows(q, q_tile, s);
            delta_multiply(y, q, b);
            delta_add(Y, y, scale[s / 2]);
            if (MAMBA) continue;
            delta_rows(rest, k_rest, s);
            delta_multiply(x, rest, b);
            delta_add(X, x, scale[s / 2]);
        }
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 4; e++) {
            Y[n][e] *= f[e >> 1];
            if (!MAMBA) R[n][e] -= f[e >> 1] * X[n][e];
            else {
                Y[n][e] += skip * R[n][e];
                U[n][e] = R[n][e] * fade(FADE_VALUE, row + 8 * (e >> 1));
            }
        }
        if (!MAMBA) {
            const float2 fr = delta_scale<4>(delta_largest(R));
            delta_store<true>(r16, r_rest, row, R, fr.x, fr.x);
            if (!lane) scale[4 + warp] = fr.y;
            __syncthreads(); /* R is written; all warps are done with the queries, the state and the keys */
            if (KDA) {       /* the other form of the keys takes their place */
                delta_copy<RULE>(k_tile, a, DELTA_INTO, kh, at * DELTA_TILE);
                delta_copy<RULE>(k_rest, a, DELTA_INTO_REST, kh, at * DELTA_TILE);
                cp_async_commit();
            }
            copy_keys(at + 1);
        }
        UNROLL for (int s = 0; s < 4; s++) {
            if (MAMBA || s > warp) continue;
            uint32_t b[4][2];
            float x[4][4] = {};
            delta_operand(b, r_rest, s);
            delta_multiply(x, T + s * WARP, b);
            delta_operand(b, r16, s);
            delta_multiply(x, T_rest + s * WARP, b);
            delta_multiply(x, T + s * WARP, b);
            delta_add(U, x, scale[4 + s]);
        }
        const float2 fu = delta_scale<4>(delta_largest(U));
        if (!KDA) delta_store<false>(u16, NULL, row, U, fu.x, fu.x);
        delta_store<true>(faded, faded_rest, row, U, KDA ? fu.x : fu.x * fade(FADE_ADDED, row),
                          KDA ? fu.x : fu.x * fade(FADE_ADDED, row + 8));
        if (!lane) scale[8 + warp] = fu.y;
        if (MAMBA) cp_async_wait<0>();
        if (KDA) cp_async_wait<1>();
        __syncthreads(); /* U is written in both forms; of KDA and Mamba-2 the keys for the state have landed */
        if (MAMBA) copy_keys(at + 1); /* all warps are done with the queries */
        UNROLL for (int s = 0; s < 4; s++) {
            if (s > warp) continue;
            uint32_t b[4][2];
            float x[4][4] = {};
            delta_operand(b, KDA ? faded : u16, s);
            delta_multiply(x, P + s * WARP, b);
            delta_add(MAMBA ? X : Y, x, scale[8 + s]);
        }
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 2; e++) {
            if (!in[e] || col + 8 * n >= dv) continue;
            const float x = Y[n][2 * e], y = Y[n][2 * e + 1];
            if (MAMBA) {
                const float q = fade(FADE_RESULT, row + 8 * e);
                float2 *z = (float2 *)(gate + (size_t)(8 * e) * a.z_stride + 8 * n);
                *z = make_float2(silu_mul(z->x, x + q * X[n][2 * e]), silu_mul(z->y, y + q * X[n][2 * e + 1]));
            } else *(float2 *)(v + e * below + 8 * n) = make_float2(x * q_scale, y * q_scale);
        }
        UNROLL for (int i = 0; i < 2; i++) UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 4; e++)
            S[i][n][e] *= KDA ? fades[32 * warp + 16 * i + g + 8 * (e >> 1)] : fades[FADE_LAST * DELTA_TILE];
        UNROLL_BY(MAMBA ? 2 : 4) for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < 2; i++) {
            uint32_t k[4], rest[4], b[4][2];
            float x[4][4] = {};
            delta_columns(k, k_tile, 4 * warp + 2 * i, s);
            delta_columns(rest, k_rest, 4 * warp + 2 * i, s);
            delta_operand(b, faded_rest, s);
            delta_multiply(x, k, b);
            delta_operand(b, faded, s);
            delta_multiply(x, rest, b);
            delta_multiply(x, k, b);
            delta_add(S[i], x, scale[8 + s]);
        }
        keep();
    }
    UNROLL for (int i = 0; i < 2; i++) UNROLL for (int n = 0; n < 4; n++) UNROLL for (int e = 0; e < 2; e++) {
        float2 *to = state(i, n, e);
        if (to) *to = make_float2(S[i][n][2 * e], S[i][n][2 * e + 1]);
    }
}

/* Norms and gates the results of a segment's own rows, and keeps the inputs of the forward's last tokens in the rings.
 * Grid: (n_row, ceil(n_value / 4)), block: 128, a warp per head. Moves 10 bytes per value, at the rate of memory. */
template <bool KDA>
__global__ void __launch_bounds__(128) k_delta_finish(const __grid_constant__ struct delta_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int n_value = a.shape.n_value, dv = a.shape.head_v, n_tok = a.batch.at->n_tok;
    const struct run &run = a.batch.at->run[0];
    const int t = a.first + (int)blockIdx.x, j0 = 4 * blockIdx.y;
    const int j = j0 + (int)(threadIdx.x >> 5);
    if (j < n_value)
        delta_finish<KDA>(a, a.t.v + ((size_t)blockIdx.x * n_value + j) * dv, a.z + (size_t)t * a.z_stride + j * dv,
                          a.out + (size_t)t * a.out_stride + j * dv);
    for (int k = j0; k < min(j0 + 4, n_value) && t >= n_tok - a.n_ring; k++)
        delta_keep<KDA ? RULE_KDA : RULE_NET>(a, run, run.pos, t, k);
}

/* Enqueues the tiles of n_tok own rows, whose states have all rows before. */
template <int RULE>
static void delta_tiles_launch(const struct delta_args *args, int n_tok, cudaStream_t s) {
    constexpr bool KDA = RULE == RULE_KDA, MAMBA = RULE == RULE_MAMBA;
    struct delta_args a = *args;
    const unsigned heads = (unsigned)a.shape.n_value, groups = (unsigned)a.shape.n_key;
    const double keys = a.shape.n_key * a.shape.head_k, values = a.shape.n_value * a.shape.head_v;
    const double planes = delta_planes(RULE) * 2 * keys, state = 2 * 4 * values * a.shape.head_k; /* bytes */
    const double matrices = (MAMBA ? 2.0 : 6.0) * DELTA_TILE * DELTA_TILE; /* bytes of a tile of a head */
    const int units = 2 * a.shape.n_key + a.shape.n_value + 1;
    cudaFuncSetAttribute(k_delta_prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, DELTA_PREPARE_SMEM);
    cudaFuncSetAttribute(k_kda_prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, KDA_PREPARE_SMEM);
    cudaFuncSetAttribute(k_delta_scan<RULE>, cudaFuncAttributeMaxDynamicSharedMemorySize, DELTA_SCAN_SMEM);
    a.n_row_all = n_tok;
    for (; a.first < a.n_row_all; a.first += DELTA_SEGMENT) {
        a.n_row = min(a.n_row_all - a.first, (int)DELTA_SEGMENT);
        const unsigned tiles = (unsigned)(a.n_row + DELTA_TILE - 1) / DELTA_TILE;
        profile_next(a.n_row * (14 * keys + 8 * values), "%u heads", heads);
        LAUNCH_PDL(k_delta_mix<RULE>,
                   dim3((unsigned)(a.n_row + DELTA_STEP - 1) / DELTA_STEP, (unsigned)(units + 3) / 4), 128, 0, s, a);
        profile_next(tiles * heads * matrices + a.n_row * (KDA ? 20 : MAMBA ? 4 : 6) * keys, "%u heads", heads);
        if (KDA) LAUNCH_PDL(k_kda_prepare, dim3(tiles, heads), 128, KDA_PREPARE_SMEM, s, a);
        else if (MAMBA) LAUNCH_PDL(k_mamba_prepare, dim3(tiles, groups), 128, 0, s, a);
        else LAUNCH_PDL(k_delta_prepare, dim3(tiles, heads), 128, DELTA_PREPARE_SMEM, s, a);
        profile_next(tiles * heads * matrices + a.n_row * (planes + (MAMBA ? 12 : 8) * values) + state, "%u heads",
                     heads);
        LAUNCH_PDL(k_delta_scan<RULE>, dim3((unsigned)(a.shape.head_v + DELTA_COLS - 1) / DELTA_COLS, heads), 128,
                   DELTA_SCAN_SMEM, s, a);
        if (MAMBA) continue;
        profile_next(a.n_row * 10 * values, "%u heads", heads);
        LAUNCH_PDL(k_delta_finish<KDA>, dim3((unsigned)a.n_row, (heads + 3) / 4), 128, 0, s, a);
    }
}

/* Enqueues a gated delta net or Kimi delta attention: for n_tok own rows after n_uncommitted earlier ones. */
static void delta_launch(const struct delta_args *args, int n_tok, int n_uncommitted, cudaStream_t s) {
    struct delta_args a = *args;
    const unsigned heads = (unsigned)a.shape.n_value;
    const bool decode = n_tok <= DECODE_MAX_TOKENS, kda = a.shape.n_decay > 1;
    const dim3 grid(heads, (unsigned)(a.batch.several ? n_tok : 1));
    a.n_own = decode ? DECODE_MAX_TOKENS : 1; /* prefill makes its first row again */
    if (decode || n_uncommitted) {
        profile_next(2 * 4.0 * a.shape.n_value * a.shape.head_v * a.shape.head_k, "%u heads", heads);
        if (kda) LAUNCH_PDL(k_delta_decode<true>, grid, DELTA_THREADS, 0, s, a);
        else LAUNCH_PDL(k_delta_decode<false>, grid, DELTA_THREADS, 0, s, a);
    }
    if (decode) return;
    if (kda) delta_tiles_launch<RULE_KDA>(&a, n_tok, s);
    else delta_tiles_launch<RULE_NET>(&a, n_tok, s);
}

/* ============================================================================================================
 * Mamba-2
 *
 * A state S (head_k, head_v) per head; moe.c has the rule, in "CPU operations: recurrent states". Rows, rings and what
 * the state lacks are as in the gated delta net, with C as the query, B as the key, x as the value and the time step as
 * alpha. What a row adds to S does not depend on S, so that the warps of a block, each with some rows of S, meet once
 * in 16 rows. Decode has two kernels: k_mamba_scan goes through the rows one by one, and k_mamba_finish norms the
 * results of a group's heads. Prefill lets k_mamba_scan take the lagging rows into the state, and has tiles of its own
 * rows (see "Gated delta net") before k_mamba_finish.
 *
 * Floors of prefill, for a layer of Nemotron-3 Nano (64 heads of 64, 8 groups of 128) and one row: 49 KB of inputs,
 * gates and results, 27 ns at 1.8 TB/s, and 100 KB that the kernels write and read between them, most of which L2
 * holds; 2.4 M multiplications by MMA, 15 ns. The scan is a chain of tiles: 4,000 cycles for 64 rows are 26 ns a row at
 * 2.4 GHz, where there are no more blocks (128) than SMs.
 * ============================================================================================================ */

enum {
    MAMBA_COLS = WARP,                        /* columns of a state of a block: one a lane */
    MAMBA_PARTS = 8,                          /* warps that share its rows, */
    MAMBA_ROWS = DELTA_HEAD / MAMBA_PARTS,    /* of which each has so many */
    MAMBA_THREADS = (MAMBA_PARTS + 1) * WARP, /* and one for values and gates */
    MAMBA_STEP = 16,                          /* tokens whose inputs are made at once */
    MAMBA_FINISH = 256                        /* threads of k_mamba_finish */
};
static_assert(2 * DELTA_HEAD == MAMBA_PARTS * WARP, "a lane makes a channel of B or C");

/* The inputs of up to 16 rows, in shared memory. */
struct mamba_rows {
    float b[MAMBA_STEP * DELTA_HEAD], c[MAMBA_STEP * DELTA_HEAD], x[MAMBA_STEP * MAMBA_COLS];
    float2 gates[MAMBA_STEP]; /* decay, time step */
};

/* Makes the inputs of `rows` positions from p on, of head j and its columns from `col` on. A thread has a channel. pos:
 * the run's first position. */
DEVICE void mamba_inputs(const struct delta_args &a, const struct run &u, int pos, int p, int rows, int j, int col,
                         struct mamba_rows &to) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, half = MAMBA_PARTS / 2;
    const int kind = warp == MAMBA_PARTS ? 2 : warp < half ? 1 : 0, place = warp % half * WARP + lane;
    const struct delta_channels ch = delta_channels_of<true>(a, u, kind, kind == 2 ? j : delta_key_head(a.shape, j));
    const int i = kind == 2 ? col + lane : place;
    const bool in = i < ch.n;
    const float4 w = in ? *(const float4 *)(ch.taps + (size_t)i * DELTA_TAPS) : make_float4(0, 0, 0, 0);
    const float bias = in ? ch.bias[i] : 0;
    float x[MAMBA_STEP + DELTA_TAPS - 1]; /* the values under the convolution */
    UNROLL for (int r = 0; r < MAMBA_STEP + DELTA_TAPS - 1; r++) x[r] =
        r < rows + DELTA_TAPS - 1 ? delta_input(ch, pos, p - DELTA_TAPS + 1 + r, i) : 0;
    float *values = kind == 2 ? to.x + lane : (kind ? to.b : to.c) + place;
    UNROLL for (int r = 0; r < MAMBA_STEP; r++) {
        const float y = bias + w.x * x[r] + w.y * x[r + 1] + w.z * x[r + 2] + w.w * x[r + 3];
        values[r * (kind == 2 ? MAMBA_COLS : DELTA_HEAD)] = y * sigmoid(y);
    }
    if (kind != 2 || lane >= rows) return;
    const float2 g = delta_gates<true>(a, u, pos, p + lane, j);
    to.gates[lane] = make_float2(expf(g.x), g.y);
}

/* Mamba-2's rows of a run, of its own n_own at most: convolution, time step, S = decay S + B (dt x)^T, y = S^T C + D x;
 * z becomes y * silu(z). The state gets the rows before the forward.
 * Grid: (ceil(head_v / 32), n_value, runs), block: 288: warp w < 8 has rows 16w.. of 32 columns of S in registers. Two
 * barriers for 16 rows. Reads and writes each state once. A row is 16 x 3 operations of a thread, 130 cycles with the
 * other warps of a scheduler: expect 2 us for a token, mostly latency. */
__global__ void __launch_bounds__(MAMBA_THREADS, 1) k_mamba_scan(const __grid_constant__ struct delta_args a) {
    SHARED(struct mamba_rows, in, 1);
    SHARED(float, sums, MAMBA_STEP *MAMBA_PARTS *MAMBA_COLS);
    grid_dependency_launch();
    grid_dependency_wait();
    prefetch_request(a.prefetch);
    if ((int)blockIdx.z >= a.batch.at->n_run) return;
    const struct run &u = a.batch.at->run[blockIdx.z];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, dk = a.shape.head_k, dv = a.shape.head_v;
    const int j = blockIdx.y, col = blockIdx.x * MAMBA_COLS, c = col + lane;
    const int pos = u.pos, first = u.n_committed, n_uncommitted = pos - first, n = n_uncommitted + min(u.n, a.n_own);
    float *state =
        a.state + (size_t)u.timeline * a.state_stride + (size_t)(j * dk * dv) + (size_t)(warp * MAMBA_ROWS * dv + c);
    const int n_mine = c < dv ? dk - warp * MAMBA_ROWS : 0; /* of the thread's values that exist */
    const float skip = a.skip[delta_value_head<true>(a.shape, j)];
    float S[MAMBA_ROWS];
    UNROLL for (int i = 0; i < MAMBA_ROWS; i++) S[i] = i < n_mine ? state[(size_t)i * dv] : 0;
    UNROLL_BY(1) for (int i0 = 0; i0 < n; i0 += MAMBA_STEP) {
        const int rows = min(n - i0, (int)MAMBA_STEP);
        mamba_inputs(a, u, pos, first + i0, rows, j, col, in[0]);
        __syncthreads(); /* the inputs of these rows are written, and the sums of those before are read */
        UNROLL_BY(1) for (int row = 0; row < rows && warp < MAMBA_PARTS; row++) {
            const float4 *b4 = (const float4 *)(in[0].b + row * DELTA_HEAD + warp * MAMBA_ROWS);
            const float4 *c4 = (const float4 *)(in[0].c + row * DELTA_HEAD + warp * MAMBA_ROWS);
            const float x = in[0].x[row * MAMBA_COLS + lane], f = in[0].gates[row].x, v = in[0].gates[row].y * x;
            float sum = warp ? 0 : skip * x;
            UNROLL for (int i = 0; i < MAMBA_ROWS; i += 4) {
                const float4 b = b4[i / 4], q = c4[i / 4];
                S[i] = f * S[i] + b.x * v;
                S[i + 1] = f * S[i + 1] + b.y * v;
                S[i + 2] = f * S[i + 2] + b.z * v;
                S[i + 3] = f * S[i + 3] + b.w * v;
                sum += q.x * S[i] + q.y * S[i + 1] + q.z * S[i + 2] + q.w * S[i + 3];
            }
            sums[(row * MAMBA_PARTS + warp) * MAMBA_COLS + lane] = sum;
            if (i0 + row + 1 != n_uncommitted) continue; /* the state has the rows before the forward */
            UNROLL for (int i = 0; i < MAMBA_ROWS; i++) if (i < n_mine) state[(size_t)i * dv] = S[i];
        }
        __syncthreads(); /* the sums are written, and nobody needs the inputs any more */
        for (int row = warp; row < rows; row += MAMBA_PARTS + 1) {
            const int t = i0 + row - n_uncommitted;
            if (t < 0 || c >= dv) continue;
            float y = 0;
            UNROLL for (int w = 0; w < MAMBA_PARTS; w++) y += sums[(row * MAMBA_PARTS + w) * MAMBA_COLS + lane];
            float *z = a.z + (size_t)(u.first + t) * a.z_stride + j * dv + c;
            *z = silu_mul(*z, y);
        }
    }
}

/* Norms a group's results of a token, and keeps the inputs of a run's last tokens in the rings. Grid: (n_tok, n_key),
 * block: 256. Moves 6 bytes per value and, to keep them, 8 per input: at the rate of memory. */
__global__ void __launch_bounds__(MAMBA_FINISH) k_mamba_finish(const __grid_constant__ struct delta_args a) {
    grid_dependency_launch();
    grid_dependency_wait();
    const struct delta &d = a.shape;
    const int t = blockIdx.x, g = blockIdx.y, per_key = d.n_value / d.n_key, n = per_key * d.head_v;
    const struct run &u = a.batch.run(t);
    const float *z = a.z + (size_t)t * a.z_stride + g * n, *norm = a.norm + (size_t)(d.first_key + g) * n;
    uint16_t *out = a.out + (size_t)t * a.out_stride + g * n;
    float ss = 0;
    UNROLL_BY(4) for (int i = threadIdx.x; i < n; i += MAMBA_FINISH) ss += z[i] * z[i];
    const float f = rsqrtf(block_sum<MAMBA_FINISH>(ss) / (float)n + a.eps);
    UNROLL_BY(1) for (int i = threadIdx.x; i < n; i += MAMBA_FINISH) out[i] = clamped_f16(z[i] * f * norm[i]);
    if (t - u.first < u.n - a.n_ring) return;
    for (int j = g * per_key; j < (g + 1) * per_key; j++) delta_keep<RULE_MAMBA>(a, u, u.pos, t - u.first, j);
}

/* Enqueues Mamba-2: for n_tok own rows after n_uncommitted earlier ones. */
static void mamba_launch(const struct delta_args *args, int n_tok, int n_uncommitted, cudaStream_t s) {
    struct delta_args a = *args;
    const struct delta &d = a.shape;
    const unsigned heads = (unsigned)d.n_value, runs = (unsigned)(a.batch.several ? n_tok : 1);
    const double values = d.n_value * d.head_v, mix = 2 * d.n_key * d.head_k + values;
    const bool decode = n_tok <= DECODE_MAX_TOKENS;
    a.n_own = decode ? DECODE_MAX_TOKENS : 0;
    if (decode || n_uncommitted) {
        profile_next(8 * (values * d.head_k + DELTA_TAPS * mix + 3 * d.n_value), "%u heads", heads);
        LAUNCH_PDL(k_mamba_scan, dim3((unsigned)(d.head_v + MAMBA_COLS - 1) / MAMBA_COLS, heads, runs), MAMBA_THREADS,
                   0, s, a);
    }
    if (!decode) delta_tiles_launch<RULE_MAMBA>(&a, n_tok, s);
    profile_next(4 * values, "%u heads", heads);
    LAUNCH_PDL(k_mamba_finish, dim3((unsigned)n_tok, (unsigned)d.n_key), MAMBA_FINISH, 0, s, a);
}

/* ============================================================================================================
 * Sampling
 *
 * Does what sampling_choose of moe.c does, so that the host sees only the id. Blocks count all ids by the leading bits
 * of their logits (bins). The last block sorts the best bins, as many as fit SAMPLE_CANDIDATES ids. If the choice
 * depends on more ids (a flat distribution without top-k), the token is -1 and the host chooses.
 * ============================================================================================================ */

enum { SAMPLE_THREADS = 512, SAMPLE_CANDIDATES = 2 * SAMPLE_THREADS };

/* Choices of tokens by consecutive rows of logits. Buffers that every row has stand one after the other. */
struct sample_args {
    int n, limit; /* ids; how many of the best top-k leaves, n: all */
    bool greedy, penalise;
    float repeat_penalty, temp, top_p, min_p;
    double uniform[LOGIT_ROWS];
    int n_recent;                                /* ids in front of row 0; row i looks at the PENALTY_WINDOW latest */
    int32_t recent[PENALTY_WINDOW + LOGIT_ROWS]; /* in front of its own, which are the first n_recent + i */
    uint32_t recent_mask[64];                    /* bit id % 2048 of those of all rows: most ids need no look */
    const float *logits;                         /* rows of n, */
    size_t stride;                               /* floats apart, a multiple of 4 */
    uint64_t *block_best;                        /* (SAMPLE_BLOCKS) keys (sample_key) */
    double *block_mass;                          /* (SAMPLE_BLOCKS) sums of exp(logit - the block's best logit) */
    int *bins;                                   /* (SAMPLE_BINS) ids per bin; 0 between launches */
    uint32_t *arrived;                           /* counts blocks; 0 between launches */
    int32_t *token; /* (1) of row 0 where the batch has its first id; -1: the host has to choose */
};

/* Maps id i with logit v to a key: larger logits have larger keys, of equal logits the lower id. Applies the repeat
 * penalty. Never 0. */
DEVICE uint64_t sample_key(const struct sample_args &p, int i, float v) {
    const int end = p.n_recent + (int)blockIdx.y;
    bool recent = false;
    if (p.penalise && p.recent_mask[i >> 5 & 63] >> (i & 31) & 1)
        for (int k = max(0, end - (int)PENALTY_WINDOW); k < end && !recent; k++) recent = p.recent[k] == i;
    if (recent) v = v > 0 ? v / p.repeat_penalty : v * p.repeat_penalty;
    return (uint64_t)float_key(v + 0.0f) << 32 | ~(uint32_t)i; /* + 0.0f: -0 equals 0 */
}
/* Logit and bin (the leading 12 bits) of a key. */
DEVICE float key_logit(uint64_t key) { return key_float((uint32_t)(key >> 32)); }
DEVICE int key_bin(uint64_t key) { return (int)(key >> 52); }

/* Folds the block's x by f, in the fixed order of a tree. buffer (SAMPLE_THREADS). */
template <class T, class F>
DEVICE T block_fold(T *buffer, T x, F f) {
    const int tid = (int)threadIdx.x;
    buffer[tid] = x;
    for (int o = SAMPLE_THREADS / 2; o; o /= 2) {
        __syncthreads(); /* the round before is written */
        if (tid < o) buffer[tid] = f(buffer[tid], buffer[tid + o]);
    }
    __syncthreads(); /* buffer[0] is the result */
    return buffer[0];
}

/* Replaces buffer (SAMPLE_CANDIDATES) by its running sums and returns the last. */
template <class T>
DEVICE T block_scan(T *buffer) {
    const int i = (int)threadIdx.x, k = i + SAMPLE_THREADS;
    static_assert(SAMPLE_CANDIDATES == 2 * SAMPLE_THREADS, "a thread has two sums");
    for (int o = 1; o < SAMPLE_THREADS; o *= 2) {
        __syncthreads(); /* the round before, or the caller, has written */
        T a = i >= o ? buffer[i - o] : 0;
        T b = buffer[k - o];
        __syncthreads(); /* and has been read by all threads */
        buffer[i] += a;
        buffer[k] += b;
    }
    buffer[k] += buffer[i]; /* the last round: this thread wrote both */
    __syncthreads();        /* the running sums are complete */
    return buffer[SAMPLE_CANDIDATES - 1];
}

/* Swaps a and b unless a is the larger one, or with `rising` the smaller one. */
DEVICE void key_order(uint64_t &a, uint64_t &b, bool rising) {
    if ((a < b) == rising) return;
    const uint64_t t = a;
    a = b;
    b = t;
}

/* Sorts keys (bitonic), best first. A warp keeps 64 of them in registers, lane l numbers l and l + 32, for rounds that
 * compare keys less than 64 apart, and leaves them in its part of `key`: before reading others' it needs a barrier. */
DEVICE void block_sort(uint64_t *key) {
    const int lane = (int)threadIdx.x & 31, first = 2 * ((int)threadIdx.x - lane) + lane;
    uint64_t x[2];
    __syncthreads(); /* the caller has written */
    UNROLL for (int u = 0; u < 2; u++) x[u] = key[first + 32 * u];
    UNROLL_BY(1) for (int run = 2; run <= SAMPLE_CANDIDATES; run *= 2) {
        if (run > 64) {
            UNROLL for (int u = 0; u < 2; u++) key[first + 32 * u] = x[u];
            UNROLL_BY(1) for (int o = run / 2; o >= 64; o /= 2) {
                __syncthreads(); /* the round before is written */
                const int i = 2 * ((int)threadIdx.x & ~(o - 1)) + ((int)threadIdx.x & (o - 1));
                key_order(key[i], key[i + o], i & run);
            }
            __syncthreads(); /* the last of them is written */
            UNROLL for (int u = 0; u < 2; u++) x[u] = key[first + 32 * u];
        }
        if (run > 32) key_order(x[0], x[1], first & run);
        UNROLL_BY(1) for (int o = min(run / 2, 16); o; o /= 2) UNROLL for (int u = 0; u < 2; u++) {
            const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, x[u], o);
            const bool larger = !((first + 32 * u) & run) == !(lane & o); /* this lane keeps the larger one */
            x[u] = larger == (x[u] < other) ? other : x[u];
        }
    }
    UNROLL for (int u = 0; u < 2; u++) key[first + 32 * u] = x[u];
}

/* Finds the lowest wanted bin: its ids and those of all better bins fit SAMPLE_CANDIDATES, and the better bins do not
 * have p.limit ids yet. bin (SAMPLE_BINS) counts; buffer (SAMPLE_CANDIDATES). */
DEVICE void lowest_bin(const struct sample_args &p, const int *bin, int *buffer, int *lowest) {
    enum { PER = SAMPLE_BINS / SAMPLE_CANDIDATES };
    static_assert(PER == 4, "a thread's bins are an int4");
    auto bins = [&](int g) { return *(const int4 *)(bin + SAMPLE_BINS - PER * (g + 1)); };
    for (int g = (int)threadIdx.x; g < SAMPLE_CANDIDATES; g += SAMPLE_THREADS) {
        const int4 b = bins(g);
        buffer[g] = b.x + b.y + b.z + b.w;
    }
    block_scan(buffer);
    int own = SAMPLE_BINS;
    for (int g = (int)threadIdx.x; g < SAMPLE_CANDIDATES; g += SAMPLE_THREADS) {
        const int4 b = bins(g);
        int better = g ? buffer[g - 1] : 0;
        UNROLL for (int k = 0; k < PER; k++) {
            const int with = better + (&b.x)[PER - 1 - k];
            if (with <= SAMPLE_CANDIDATES && better < p.limit) own = min(own, SAMPLE_BINS - 1 - PER * g - k);
            better = with;
        }
    }
    own = __reduce_min_sync(0xFFFFFFFFu, own);
    if (!(threadIdx.x & 31)) atomicMin(lowest, own);
}

/* Chooses tokens. Grid: (at most SAMPLE_BLOCKS, rows), block: SAMPLE_THREADS; a row's block that ends last chooses.
 * Reads the logits twice, 1.2 MB from L2 for a vocabulary of 150,000. About 15 us: 6 for the last block's reading,
 * the rest its barriers. */
__global__ void __launch_bounds__(SAMPLE_THREADS, 1) k_sample(const __grid_constant__ struct sample_args p) {
    SHARED(uint64_t, key, SAMPLE_CANDIDATES);
    SHARED(double, mass, SAMPLE_CANDIDATES);
    SHARED(int, bin, SAMPLE_BINS);
    /* counter[CANDIDATES] counts the ids in key; at the end it becomes the index of the chosen one. */
    enum { LOWEST_BIN, CANDIDATES, KEPT, CHOICE = CANDIDATES, COUNTERS = 3 };
    SHARED(int, counter, COUNTERS);
    const int tid = (int)threadIdx.x, step = (int)gridDim.x * SAMPLE_THREADS;
    const int r = (int)blockIdx.y; /* row */
    const float *logits = p.logits + (size_t)r * p.stride;
    uint64_t *block_best = p.block_best + r * SAMPLE_BLOCKS;
    double *block_mass = p.block_mass + r * SAMPLE_BLOCKS;
    int *bins = p.bins + r * SAMPLE_BINS;
    const bool all_mass = p.limit == p.n && p.top_p < 1.0f;
    grid_dependency_launch();
    for (int i = tid; i < SAMPLE_BINS; i += SAMPLE_THREADS) bin[i] = 0;
    if (!tid) {
        counter[LOWEST_BIN] = SAMPLE_BINS;
        counter[CANDIDATES] = 0;
        counter[KEPT] = p.limit;
    }
    grid_dependency_wait();
    __syncthreads(); /* bin and counter are initialized */
    uint64_t top = 0;
    auto larger = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    auto sum = [](double a, double b) { return a + b; };
    auto above_top = [&](uint64_t k) { return (double)(key_logit(k) - key_logit(top)); };
    for (int i = (int)blockIdx.x * SAMPLE_THREADS + tid; i < p.n; i += step) {
        const uint64_t k = sample_key(p, i, logits[i]);
        top = larger(top, k);
        if (!p.greedy) atomicAdd(&bin[key_bin(k)], 1);
    }
    top = block_fold(key, top, larger);
    double total = 0;
    for (int i = (int)blockIdx.x * SAMPLE_THREADS + tid; all_mass && i < p.n; i += step)
        total += exp(above_top(sample_key(p, i, logits[i])));
    if (all_mass) total = block_fold(mass, total, sum);
    if (!tid) {
        block_best[blockIdx.x] = top;
        block_mass[blockIdx.x] = total;
    }
    for (int i = tid; i < SAMPLE_BINS; i += SAMPLE_THREADS)
        if (bin[i]) atomicAdd(&bins[i], bin[i]);
    if (!last_block(p.arrived + r, gridDim.x)) return;

    const uint64_t best = tid < (int)gridDim.x ? block_best[tid] : 0;
    top = block_fold(key, best, larger);
    if (!tid) {
        p.arrived[r] = 0;
        p.token[r] = p.greedy ? (int32_t) ~(uint32_t)top : -1;
    }
    if (p.greedy) return;
    if (all_mass) total = block_fold(mass, best ? block_mass[tid] * exp(above_top(best)) : 0, sum);
    for (int i = tid; i < SAMPLE_BINS; i += SAMPLE_THREADS) {
        bin[i] = bins[i];
        bins[i] = 0;
    }
    __syncthreads(); /* bin has the counts of all blocks */
    lowest_bin(p, bin, (int *)mass, &counter[LOWEST_BIN]);
    key[tid] = key[tid + SAMPLE_THREADS] = 0;
    __syncthreads(); /* LOWEST_BIN is final, and key is empty */
    const int lowest = counter[LOWEST_BIN];
    for (int i0 = 4 * tid; i0 < p.n; i0 += 16 * SAMPLE_THREADS) {
        float4 x[4]; /* four loads in flight */
        UNROLL for (int u = 0; u < 4; u++) {
            if (i0 + 4 * SAMPLE_THREADS * u >= p.n) continue;
            x[u] = *(const float4 *)(logits + i0 + 4 * SAMPLE_THREADS * u);
        }
        UNROLL for (int k = 0; k < 16; k++) {
            const int i = i0 + 4 * SAMPLE_THREADS * (k >> 2) + (k & 3);
            if (i >= p.n) continue;
            const uint64_t y = sample_key(p, i, (&x[k >> 2].x)[k & 3]);
            if (key_bin(y) >= lowest) key[atomicAdd(&counter[CANDIDATES], 1)] = y;
        }
    }
    block_sort(key);
    const int n = counter[CANDIDATES];
    for (int u = 0; u < 2; u++) { /* the keys that this thread sorted */
        const int i = 2 * (tid & ~31) + (tid & 31) + 32 * u;
        mass[i] = i < n ? exp(above_top(key[i])) : 0;
    }
    block_scan(mass);
    if (!all_mass) total = mass[p.limit < n ? p.limit - 1 : SAMPLE_CANDIDATES - 1];
    UNROLL_BY(1)
    for (int i = tid; i < n && i < p.limit; i += SAMPLE_THREADS)
        if (i && ((p.top_p < 1.0f && mass[i - 1] >= (double)p.top_p * total) ||
                  (p.min_p > 0 && exp(above_top(key[i])) < (double)p.min_p)))
            atomicMin(&counter[KEPT], i);
    __syncthreads(); /* KEPT is final */
    const int kept = counter[KEPT];
    if (kept > n || (n < p.limit && !all_mass && p.top_p < 1.0f)) return;
    for (int i = tid; i < SAMPLE_CANDIDATES; i += SAMPLE_THREADS)
        mass[i] = i < kept ? exp(above_top(key[i]) / (double)p.temp) : 0;
    if (!tid) counter[CHOICE] = kept - 1;
    const double want = p.uniform[r] * block_scan(mass);
    UNROLL_BY(1)
    for (int i = tid; i < kept; i += SAMPLE_THREADS)
        if (mass[i] > want) atomicMin(&counter[CHOICE], i);
    __syncthreads(); /* CHOICE is final */
    if (!tid) p.token[r] = (int32_t) ~(uint32_t)key[counter[CHOICE]];
}

/* ============================================================================================================
 * The GPU state of a rank
 *
 * What a rank on a GPU holds; its errors, how it waits for its GPU, and its memory.
 * ============================================================================================================ */

/* A pinned buffer on the host, its copy on the GPU, and an event after which it may be written again. */
struct staging {
    uint8_t *host, *device; /* device NULL: the contents go elsewhere */
    cudaEvent_t free;
};

/* Buffers for the upload: two take turns, or each holds synthetic rows of one format. */
enum {
    STAGING_BUFFERS = GGUF_FORMAT_COUNT,
    STAGING_BYTES = 32 << 20 /* of each */
};

/* How decode forwards are launched; each way is taken if the one before it fails. */
enum launching {
    LAUNCHES_OVERLAP,  /* recorded, and with overlapping launches where the chip has them */
    LAUNCHES_RECORDED, /* recorded */
    LAUNCHES_EAGER     /* kernel by kernel */
};

/* Everything of a rank that lies on its GPU, and the state of its thread. Pointers are device memory unless said
 * otherwise. */
struct cuda {
    bool integrated;   /* its memory is the host's */
    int l2_bytes;      /* of its second-level cache */
    int device, n_sm;  /* number of the GPU; its multiprocessors */
    int sharers;       /* ranks on the same GPU */
    size_t reserve;    /* bytes to leave free, of this rank's part of it */
    int reduce_blocks; /* blocks of an all-reduce by our own kernel at most, the same for all ranks */
    bool fuses_norms;  /* kernels make the norms that they read; bench_decode.cu switches it off */
    enum launching launching;
    struct gpu_sizes sizes; /* what the options and the chip ask for */
    char *err;              /* host: (ERR_MAX) the first error of the start; NULL later: an error ends the program */
    bool failed;            /* there was an error */

    /* the weights */
    const struct model *shard;     /* host: the rank's shard with the host's pointers */
    struct model model;            /* host: r->m, the same with the GPU's pointers, see weights_upload */
    struct device_matrix **copies; /* host, stb_ds: what `copy` of its matrices points to */

    /* memory and the batch */
    cudaStream_t stream;
    void **pinned;          /* stb_ds: allocations in host memory */
    size_t allocated;       /* bytes of r->owned: allocations on the device */
    struct batch *batch;    /* followed by the token ids, so that one copy per forward brings both */
    int32_t *tokens;        /* (chunk) these ids */
    struct staging sent[2]; /* two pinned copies of the batch, used in turn: the previous copy may be in flight */
    int turn;               /* index of the one used last */

    /* activations, see GPU_BUFFERS; a pair is a token and an expert that it uses */
    float *x32[ACT_COUNT]; /* activation slots in F32, where something reads that */
    float *x_first;        /* what x32[A_X] is when a forward begins and when it has ended */
    float *x_second; /* (DECODE_MAX_TOKENS, n_embd) second buffer of A_X: a fused norm writes the sum there, because
                               * other blocks still read the old one */
    uint16_t *x16[ACT_COUNT]; /* activation slots in halves: inputs of GEMMs and of attention */
    float *cs, *sn;           /* (n_rope, chunk, rope_dim / 2) cosines and sines of the batch's positions */
    float *row_sums;          /* (2, chunk * 2 in whole rows of ROW_SUMS) sums of squares: the rank's, all ranks' */
    float *hc_sums;           /* sums of the streams, see struct hc_args */
    float *ngram_gates;       /* see struct ngram_args */
    float *index_scores;      /* (INDEX_SCORES) scores by the indexer, as in struct index_args, */
    int32_t *topk_blocks;     /* and the blocks that it chose, as in struct attn_args; */
    int32_t *candidates;      /* (chunk, candidates) blocks that later choices are limited to */
    uint16_t *q_absorbed;     /* MLA: (chunk, n_head, kv_lora + rope_dim) queries in the latent space */
    uint16_t *latent_out;     /* MLA: (chunk, n_head, kv_lora) attention's outputs there, or F32 sums, see mla_args */
    float *mla_parts;         /* MLA: see struct mla_value_args */
    uint32_t *mla_arrived;
    struct mla_buffers mla;  /* expanded keys and values of a prefill's latent attention */
    float *partials;         /* partial outputs of attention over a split context */
    uint32_t *attn_arrived;  /* see struct attn_args */
    struct fp4_rows x4;      /* (gpu_dims.n4, n_embd) inputs of routed experts in FP4 */
    struct fp4_rows hidden4; /* (pairs, n_ff) their hidden rows */
    uint16_t *hidden;        /* hidden rows of routed experts: (pairs, n_ff), decode (jobs, DECODE_MAX_TOKENS, n_ff) */
    uint16_t *hidden_shared; /* (chunk, n_ff) hidden rows of the dense or shared feed-forward */
    struct route_args route; /* buffers of the router */
    struct expert_cache cache; /* of all layers: those of layer il from il times a layer's on */
    bool slots_emptied;        /* slots may be empty: experts could not be read */
    int32_t *place;            /* of struct wave_args */
    uint64_t *brought;         /* of struct want_args */
    uint8_t *ring;             /* (expert_ring_bytes) experts that a prefill copies as it goes, in RING_PARTS parts */
    cudaStream_t side;         /* copies them */
    cudaEvent_t listed, copied[RING_PARTS], multiplied[RING_PARTS]; /* see experts_in_waves */
    int32_t *no_jobs;                                               /* 0: of a layer whose experts the CPU computes */
    struct expert_job *one_job; /* (DECODE_MAX_TOKENS + 1) the job of so many tokens; of the first `expert` is 1, the
                                 * number of jobs */
    struct sort_args sort;      /* buffers of the sort by expert */
    struct delta_tiles delta;   /* buffers of a gated delta net's prefill */
    uint16_t *expert_out;       /* (pairs, n_embd) results of the experts / HIDDEN_SCALE before they are weighted */
    float *gathered;            /* (n_rank, DECODE_MAX_TOKENS, n_embd) partial sums that NCCL gathers */
    uint16_t *sum16;            /* (chunk, n_embd) BF16 for NCCL's all-reduce */
    float *mtp_hidden;          /* struct rank's */

    /* logits and tokens */
    float *logits;              /* (LOGIT_ROWS, logits_stride) of the rank's rows of the head; see cuda_logits */
    size_t logits_stride;       /* floats from row to row */
    float *logits_host;         /* host, pinned: (LOGIT_ROWS, n_vocab) */
    struct sample_args sample;  /* the latest choices of tokens, */
    struct sampling sampling;   /* the options they were made with, */
    int sample_first, n_sample; /* and the rows of logits */
    int32_t *token_host;        /* host, pinned: (LOGIT_ROWS) the tokens chosen, */
    cudaEvent_t token_ready;    /* once they are there */

    /* recorded passes of so many tokens; NULL: not yet */
    cudaGraphExec_t graph[PASSES][2][DECODE_MAX_TOKENS + 1]; /* of one run, of several */

    /* upload and measurements */
    struct staging staging[STAGING_BUFFERS];
    int staging_next;              /* the buffer to be used next */
    unsigned staging_filled;       /* bits: the buffers that hold synthetic rows */
    uint32_t *range;               /* (2) what k_repack finds, */
    uint32_t range_host[2];        /* and its copy: here, because the copy may end after a failed wait for it */
    const struct host_range *home; /* host: (n_home) of struct cuda_options */
    int n_home;
    int mma_turns; /* turns of k_mma_rate that take some milliseconds; 0: not measured */

    /* all-reduces */
#ifdef HAVE_NCCL
    ncclComm_t comm;  /* of the stage; NULL: NCCL is not used */
    ncclComm_t whole; /* of all stages, where there are several processes; otherwise NULL */
#endif
    bool remote[MAX_RANKS];              /* ranks of other processes: NCCL alone reaches them */
    bool spread;                         /* the stage has such ranks */
    bool processes;                      /* a stage has */
    bool by_nccl[DECODE_MAX_TOKENS + 1]; /* NCCL does those of so many tokens */
    /* of all ranks of all stages, as this GPU and thread reach them; NULL: this rank is alone, or they are remote */
    struct mailbox mailbox[MAX_RANKS];
    struct heartbeat *heartbeat[MAX_RANKS]; /* host; of remote ranks this rank's own */
    struct sequence *sequence;              /* this rank's own */
};

/* ---- errors ---- */

/* Keeps the first error of a start, as a message for its caller, and lets the other ranks know. Later an error ends the
 * program. Always false. */
__attribute__((format(printf, 2, 3))) static bool rank_fail(struct rank *r, const char *fmt, ...) {
    struct cuda *c = r->cuda;
    char text[ERR_MAX - 32], line[ERR_MAX];
    va_list v;
    va_start(v, fmt);
    vsnprintf(text, sizeof text, fmt, v);
    va_end(v);
    snprintf(line, sizeof line, "GPU %d: %s", c->device, text);
    if (!c->err) rank_fatal(line);
    if (!c->failed) memcpy(c->err, line, strlen(line) + 1);
    c->failed = true;
    rank_heartbeat(r, true);
    return false;
}

/* Fails unless e is cudaSuccess. The message says what was being done, and what failed: the kernel where its launch
 * did, otherwise the call that e came from. running: an error of a kernel that was launched before shows only now, so
 * the last one is named, too. */
static bool cuda_check(struct rank *r, cudaError_t e, const char *what, const char *call, int line, bool running) {
    if (e == cudaSuccess) return !r->cuda->failed;
    const bool image = e == cudaErrorNoKernelImageForDevice || e == cudaErrorUnsupportedPtxVersion;
    const char *hint = image ? " (the program is for other chips or a newer driver: see moe --version)" : "";
    const char *failed = kernel_failed;
    errors_clear();
    if (failed) return rank_fail(r, "%s: kernel %s: %s%s", what, failed, cudaGetErrorString(e), hint);
    return rank_fail(r, "%s: %s (moe_cuda.cu:%d)%s%s: %s%s", what, call, line,
                     running && kernel_last ? ", the last kernel was " : "", running && kernel_last ? kernel_last : "",
                     cudaGetErrorString(e), hint);
}
#define CUDA_OK(r, call, what) cuda_check(r, call, what, #call, __LINE__, false)

/* Zeroed memory of the host. */
static void *host_memory(size_t n, size_t size) {
    void *p = calloc(n + !n, size);
    if (!p) rank_fatal("out of memory");
    return p;
}

/* Waits for all ranks, and gives each the smallest context, chunk and number of blocks of an all-reduce of any.
 * False: a rank has failed. */
static bool rank_agree(struct rank *r) {
    struct cuda *c = r->cuda;
    const int mine[4] = {c->failed, r->n_ctx, r->chunk, c->reduce_blocks};
    int all[MAX_RANKS][4];
    rank_all_gather(r, mine, all, sizeof mine);
    for (int i = 0; i < r->m->shard.n_rank * r->m->shard.n_stage; i++) {
        c->failed |= all[i][0] != 0;
        r->n_ctx = min(r->n_ctx, all[i][1]);
        r->chunk = min(r->chunk, all[i][2]);
        c->reduce_blocks = min(c->reduce_blocks, all[i][3]);
    }
    return !c->failed;
}

/* Waits for all ranks of all stages. */
static void rank_barrier(struct rank *r) {
    const char mine = 0;
    char all[MAX_RANKS];
    rank_all_gather(r, &mine, all, 1);
}

/* ---- waiting ---- */

/* How long a rank has waited for its GPU. */
struct backoff {
    uint64_t turns; /* polls so far */
    double idle;    /* seconds without progress of any rank, while the CPU computed nothing for one; those in which the
                     * program is suspended do not count */
    double last;    /* time of the latest poll */
    uint32_t seen;  /* the progress of all ranks at that time: the number of all-reduces */
};

/* Fails with a message that names the ranks that kernels have reported to wait for. */
static void rank_stalled(struct rank *r, const char *what, int seconds) {
    const struct shard shard = r->m->shard;
    char who[256] = "";
    for (int i = 0; i < shard.n_rank * shard.n_stage; i++) {
        const uint32_t code = *(volatile uint32_t *)&r->cuda->heartbeat[i]->waiting;
        const int rank = (int)((code - 1) & 15), channel = (int)((code - 1) >> 4 & 15), ordinal = (int)(code >> 8);
        const size_t at = strlen(who), left = sizeof who - at;
        const struct model *m = (r - r->index + i)->m;
        int il;
        if (r->cuda->remote[i]) continue;
        if (code && channel == CH_ALLREDUCE) {
            const char *half = all_reduce_after(m, (unsigned)ordinal, &il);
            snprintf(who + at, left, "; rank %d waited for rank %d in the all-reduce after the %s of layer %d", i,
                     i / shard.n_rank * shard.n_rank + rank, half, m->first_layer + il);
        } else if (code && channel == WAIT_ROW_NORM)
            snprintf(who + at, left, "; rank %d waited for rank %d in the norm of queries and keys of layer %d", i,
                     i / shard.n_rank * shard.n_rank + rank, (r - r->index + i)->m->first_layer + ordinal);
        else if (code && channel == CH_BROUGHT_ROWS)
            snprintf(who + at, left, "; rank %d waited for the disk's rows of n-grams of layer %d", i,
                     (r - r->index + i)->m->first_layer + ordinal);
        else if (code && (channel == CH_ANSWER || channel == CH_BROUGHT))
            snprintf(who + at, left, "; rank %d waited for %s experts of layer %d", i,
                     channel == CH_ANSWER ? "the CPU's" : "the disk's", (r - r->index + i)->m->first_layer + ordinal);
        else if (code)
            snprintf(who + at, left, "; rank %d waited for %s", i,
                     channel == CH_LOGITS  ? "a shard of the logits"
                     : channel == CH_TOKEN ? "the chosen token"
                                           : "another stage");
    }
    rank_fail(r,
              "%s: no progress for %d s%s. Has a GPU stopped? At start-up: are writes between GPUs or NCCL broken here "
              "(IOMMU; NCCL_P2P_DISABLE=1 goes through the host)?",
              what, seconds, who);
}

/* Seconds without an all-reduce after which the ranks have stalled: with one stage, and with several, because another
 * stage may compute for long. Elapsed time is the measure: a GPU does not slow down on a busy host, and between two
 * all-reduces the host only launches some kernels, microseconds of work that wait for a processor much less than
 * that. */
static int stall_seconds[2] = {7, 60};

/* Call between two polls of a busy GPU. Sleeps after a while, and fails when no rank makes progress. False: a rank has
 * failed, stop waiting. */
static bool rank_keep_waiting(struct rank *r, struct backoff *p, const char *what) {
    enum {
        SPINS = 20000, /* polls before it sleeps between them */
        NAP = 50000    /* nanoseconds of a sleep */
    };
    struct cuda *c = r->cuda;
    const struct timespec nap = {0, NAP};
    const struct shard *shard = &r->m->shard;
    const double now = now_seconds();
    uint32_t done = 0;
    for (int i = 0; i < shard->n_rank * shard->n_stage; i++)
        done += *(volatile uint32_t *)&c->heartbeat[i]->all_reduces;
    p->idle = done != p->seen || !p->turns || rank_asks(r) ? 0 : p->idle + fmin(now - p->last, 0.5);
    p->seen = done;
    p->last = now;
    if (rank_heartbeat(r, false)) c->failed = true;
    if (p->idle > stall_seconds[shard->n_stage > 1] && !c->failed) rank_stalled(r, what, (int)p->idle);
    if (c->failed) *(volatile uint32_t *)&c->heartbeat[r->index]->abort = 1;
    if (p->turns++ > SPINS || c->failed) nanosleep(&nap, NULL);
    return !c->failed;
}

/* Waits for an event, or with NULL for the whole stream. With other ranks it polls, because a kernel may wait for a
 * rank that has failed. False after an error. */
static bool wait_for_event(struct rank *r, cudaEvent_t event, const char *what) {
    struct cuda *c = r->cuda;
    struct backoff p = {};
    cudaError_t e;
    if (!c->heartbeat[0] || r->m->shard.n_rank * r->m->shard.n_stage == 1) { /* nobody, or nobody yet, to wait for */
        e = event ? cudaEventSynchronize(event) : cudaStreamSynchronize(c->stream);
        return cuda_check(r, e, what, event ? "cudaEventSynchronize(event)" : "cudaStreamSynchronize(c->stream)",
                          __LINE__, true);
    }
    while ((e = event ? cudaEventQuery(event) : cudaStreamQuery(c->stream)) == cudaErrorNotReady) {
        if (rank_keep_waiting(r, &p, what)) continue;
#ifdef HAVE_NCCL
        for (ncclComm_t *comm : {&c->comm, &c->whole}) {
            if (*comm) ncclCommAbort(*comm); /* what is enqueued must end before memory is freed */
            *comm = NULL;
        }
#endif
    }
    if (cudaPeekAtLastError() == cudaErrorNotReady) cudaGetLastError();
    return cuda_check(r, e, what, event ? "cudaEventQuery(event)" : "cudaStreamQuery(c->stream)", __LINE__, true);
}

/* Waits for all that was enqueued. False after an error. */
static bool cuda_sync(struct rank *r, const char *what) { return wait_for_event(r, NULL, what); }

/* ---- memory ---- */

/* Enqueues a copy between the host's memory and the GPU's. False after an error. */
static bool cuda_copy(struct rank *r, void *to, const void *from, size_t bytes, const char *what) {
    return CUDA_OK(r, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, r->cuda->stream), what);
}

/* What the rank's GPU says of itself now; an error of the rank if it does not answer. */
static struct gpu_facts rank_facts(struct rank *r) {
    struct gpu_facts f;
    const char *why = cuda_facts(r->cuda->device, &f, false);
    if (why) rank_fail(r, "cannot read its chip and memory: %s", why);
    return f;
}

/* Fails: there is no room for so many bytes. */
static void gpu_full(struct rank *r, size_t bytes, const char *what) {
    struct gpu_facts f;
    cuda_facts(r->cuda->device, &f, false);
    rank_fail(r,
              "out of memory: %.2f GiB needed for %s, %.2f of %.2f GiB are free; try a smaller -c, --kv fp8, a pruned "
              "model or --cpu",
              (double)bytes / 0x1p30, what, (double)f.free / 0x1p30, (double)f.total / 0x1p30);
}

/* Zeroed memory on the GPU, which the rank holds until it ends. NULL after an error. */
static void *cuda_memory(struct rank *r, size_t bytes, const char *what) {
    struct cuda *c = r->cuda;
    void *p = NULL;
    if (c->failed) return NULL;
    if (cudaMalloc(&p, bytes + 256) != cudaSuccess) {
        errors_clear();
        gpu_full(r, bytes, what);
        return NULL;
    }
    arrput(r->owned, p);
    c->allocated += bytes;
    CUDA_OK(r, cudaMemsetAsync(p, 0, bytes + 256, c->stream), "clearing memory");
    return p;
}

/* Returns zeroed, pinned host memory that all GPUs can access; freed with the rank. NULL after an error. */
static void *cuda_host_memory(struct rank *r, size_t bytes, const char *what) {
    struct cuda *c = r->cuda;
    void *p = NULL;
    if (c->failed || !CUDA_OK(r, cudaHostAlloc(&p, bytes, cudaHostAllocPortable | cudaHostAllocMapped), what))
        return NULL;
    arrput(c->pinned, p);
    return memset(p, 0, bytes);
}

/* Waits until a staging buffer may be written, and makes it at the first call; device: with a copy on the GPU. Returns
 * its memory on the host, or NULL after an error. */
static uint8_t *staging_take(struct rank *r, struct staging *s, size_t bytes, bool device, const char *what) {
    if (s->free) {
        wait_for_event(r, s->free, what);
    } else {
        CUDA_OK(r, cudaMallocHost((void **)&s->host, bytes), what);
        if (device) CUDA_OK(r, cudaMalloc((void **)&s->device, bytes), what);
        CUDA_OK(r, cudaEventCreateWithFlags(&s->free, cudaEventDisableTiming), what);
    }
    return r->cuda->failed ? NULL : s->host;
}

/* Frees a staging buffer, also one that was never used. */
static void staging_free(struct staging *s) {
    if (s->device) cudaFree(s->device);
    if (s->host) cudaFreeHost(s->host);
    if (s->free) cudaEventDestroy(s->free);
    *s = {};
}

/* Returns a copy on the GPU of bytes of the host. NULL: `from` is NULL, or after an error. */
static void *cuda_vector(struct rank *r, const void *from, size_t bytes, const char *what) {
    void *to = from ? cuda_memory(r, bytes, what) : NULL;
    if (to) cuda_copy(r, to, from, bytes, what);
    return to;
}

/* ============================================================================================================
 * Operations: forwards
 *
 * Recording and replaying a forward, and its first operation. Every operation of struct ops is a function cuda_NAME.
 * ============================================================================================================ */

static unsigned ceil_div(int n, int by) { return (unsigned)((n + by - 1) / by); }

/* The batch as kernels get it. */
static struct batch_ref batch_of(const struct rank *r) { return {r->cuda->batch, r->n_run > 1}; }

/* Copies runs and tokens of the batch to the device. */
static void send_batch(struct rank *r) {
    struct cuda *c = r->cuda;
    struct staging *s = &c->sent[c->turn ^= 1];
    const size_t bytes = r->tokens[0] == TOKEN_CHOSEN ? 0 : (size_t)r->n_tok * sizeof *r->tokens;
    struct batch *out = (struct batch *)s->host;
    if (!wait_for_event(r, s->free, "sending tokens")) return;
    out->n_tok = r->n_tok;
    out->n_run = r->n_run;
    memcpy(out->run, r->run, (size_t)r->n_run * sizeof *r->run);
    for (int i = 0; i < r->n_run && r->n_run > 1; i++)
        for (int t = 0; t < r->run[i].n; t++) out->run_of[r->run[i].first + t] = i;
    memcpy(out + 1, r->tokens, bytes);
    cuda_copy(r, c->batch, out, sizeof *out + bytes, "sending tokens");
    CUDA_OK(r, cudaEventRecord(s->free, c->stream), "sending tokens");
}

/* Records r->pass as a CUDA graph. */
static cudaError_t forward_record(struct rank *r, cudaGraphExec_t *graph) {
    struct cuda *c = r->cuda;
    cudaGraph_t g = NULL;
    cudaError_t e = cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal);
    if (e == cudaSuccess) {
        rank_pass(r);
        e = cudaGetLastError();
        const cudaError_t end = cudaStreamEndCapture(c->stream, &g);
        if (e == cudaSuccess) e = end;
    }
    if (e == cudaSuccess) e = cudaGraphInstantiate(graph, g, 0);
    if (g) cudaGraphDestroy(g);
    return e;
}

/* Records r->pass of r->n_tok tokens. If that fails on any rank, records it without overlapping launches; if that
 * fails too, forwards are launched kernel by kernel from now on. */
static void forward_prepare(struct rank *r, cudaGraphExec_t *graph) {
    struct cuda *c = r->cuda;
    while (!*graph && c->launching != LAUNCHES_EAGER) {
        const cudaError_t e = forward_record(r, graph);
        const int mine = e != cudaSuccess;
        int all[MAX_RANKS], failed = 0;
        /* A barrier, too: a kernel that waits could keep another rank on the same GPU from getting this far. */
        rank_all_gather(r, &mine, all, sizeof mine);
        for (int i = 0; i < r->m->shard.n_rank * r->m->shard.n_stage; i++) failed += all[i];
        if (!failed) return;
        errors_clear();
        if (*graph) cudaGraphExecDestroy(*graph);
        *graph = NULL;
        c->launching = c->launching == LAUNCHES_OVERLAP ? LAUNCHES_RECORDED : LAUNCHES_EAGER;
        launches_overlap = false;
        /* two forwards, kernel by kernel, could fill the launch queue that the ranks on a GPU share */
        if (c->launching == LAUNCHES_EAGER && c->sharers > 1) r->async_decode = false;
        if (!mine) continue;
        char line[ERR_MAX];
        snprintf(line, sizeof line, "GPU %d: recording a forward failed (%s); trying %s, which is slower", c->device,
                 cudaGetErrorString(e),
                 c->launching == LAUNCHES_EAGER ? "to launch each kernel by itself" : "without overlapping launches");
        rank_note(line);
    }
}

/* Makes the driver submit what was enqueued: other ranks wait for it, and on Windows the driver may hold launches back
 * until their state is queried. */
static void stream_flush(struct rank *r) {
    if (r->m->shard.n_rank * r->m->shard.n_stage == 1) return;
    const cudaError_t e = cudaStreamQuery(r->cuda->stream);
    if (e != cudaErrorNotReady) CUDA_OK(r, e, "a forward pass");
    else if (cudaPeekAtLastError() == cudaErrorNotReady) cudaGetLastError();
}

/* What a kernel must know to wait for other ranks. */
static struct tp_rank tp_rank_of(const struct rank *r) {
    return {r->m->shard.rank, r->m->shard.n_rank, ALLREDUCE_SLOT, r->cuda->sequence, r->cuda->heartbeat[r->index]};
}

#ifdef HAVE_NCCL
/* Fails unless e is ncclSuccess; the message names the call that it came from. */
static bool nccl_check(struct rank *r, ncclResult_t e, const char *call, int line) {
    if (e == ncclSuccess) return !r->cuda->failed;
    return rank_fail(r, "NCCL: %s (moe_cuda.cu:%d): %s (%s)", call, line, ncclGetErrorString(e),
                     ncclGetLastError(r->cuda->comm));
}
#define NCCL_OK(r, call) nccl_check(r, call, #call, __LINE__)

/* Rows of n floats, stride floats apart, from a rank or to it (send), by a communicator. */
static void nccl_rows(struct rank *r, ncclComm_t comm, bool send, float *x, size_t stride, size_t n, int rows,
                      int peer) {
    if (!n) return;
    NCCL_OK(r, ncclGroupStart());
    for (int i = 0; i < rows; i++, x += stride) {
        if (send) NCCL_OK(r, ncclSend(x, n, ncclFloat32, peer, comm, r->cuda->stream));
        else NCCL_OK(r, ncclRecv(x, n, ncclFloat32, peer, comm, r->cuda->stream));
    }
    NCCL_OK(r, ncclGroupEnd());
}

/* The id that the root chose becomes that of all ranks. */
static void token_by_nccl(struct rank *r, int root) {
    NCCL_OK(r, ncclBroadcast(r->cuda->tokens, r->cuda->tokens, 1, ncclInt32, root, r->cuda->whole, r->cuda->stream));
}

/* The residual of the batch, to the rank of the same number in the next stage or from that of the stage before. */
static void residual_by_nccl(struct rank *r, float *x, bool send) {
    const struct cuda *c = r->cuda;
    const int peer = r->index + (send ? r->m->shard.n_rank : -r->m->shard.n_rank);
    const size_t n = (size_t)r->n_tok * (size_t)residual_width(r->m), mix = (size_t)r->n_tok * (size_t)r->width[A_MIX];
    nccl_rows(r, c->whole, send, x, n, n, 1, peer);
    if (lag_width(r->m)) nccl_rows(r, c->whole, send, c->x32[A_MIX], mix, mix, 1, peer);
}

/* n rows of logits, from the stage's other ranks to the root's. */
static void logits_by_nccl(struct rank *r, const struct weight *head, int n) {
    const struct cuda *c = r->cuda;
    const struct shard *shard = &r->m->shard;
    if (shard->rank) nccl_rows(r, c->comm, true, c->logits, c->logits_stride, (size_t)head->n_out, n, 0);
    for (int k = 1; k < shard->n_rank && !shard->rank; k++) {
        const struct model *peer = (r + k)->m;
        nccl_rows(r, c->comm, false, c->logits + peer->first_id, c->logits_stride,
                  (size_t)peer_head_rows(r, head, peer), n, k);
    }
}
#else
static void token_by_nccl(struct rank *, int) {}
static void residual_by_nccl(struct rank *, float *, bool) {}
static void logits_by_nccl(struct rank *, const struct weight *, int) {}
#endif

/* Hands the token that the root chose to the other ranks. */
static void share_token(struct rank *r) {
    struct cuda *c = r->cuda;
    const struct shard *shard = &r->m->shard;
    const int n = shard->n_rank * shard->n_stage, root = n - shard->n_rank;
    struct token_args a = {};
    if (n == 1) return;
    if (c->processes) {
        token_by_nccl(r, root);
        return;
    }
    a.p = tp_rank_of(r);
    a.id = c->tokens;
    a.own = c->mailbox[r->index];
    for (int i = 0; i < n && r->index == root; i++)
        if (i != root) a.other[a.n_other++] = c->mailbox[i];
    LAUNCH_PDL(k_share_token, 1, WARP, 0, c->stream, a);
}

/* Sends the batch, and enqueues the pass. One of few tokens is recorded the first time as a CUDA graph, and replayed
 * from then on. Prefill is enqueued kernel by kernel, and so is a pass that is being profiled. */
static void cuda_forward(struct rank *r) {
    struct cuda *c = r->cuda;
    const bool decode = r->n_tok <= DECODE_MAX_TOKENS;
    cudaGraphExec_t *graph = decode && !profile.row ? &c->graph[r->pass][r->n_run > 1][r->n_tok] : NULL;
    r->cache = r->caches;                 /* kernels find those of each timeline by the run */
    if (graph) forward_prepare(r, graph); /* before share_token, whose kernel waits */
    send_batch(r);
    if (r->tokens[0] == TOKEN_CHOSEN) share_token(r);
    if (graph && *graph) {
        CUDA_OK(r, cudaGraphLaunch(*graph, c->stream), "a forward pass");
        kernel_last = "of a recorded forward";
    } else {
        rank_pass(r);
        CUDA_OK(r, cudaGetLastError(), "a forward pass");
    }
    stream_flush(r);
}

/* Arguments of a transfer that waits for n_wait flags and, without send_matrix, moves nothing. */
static struct send_args send_of(const struct rank *r, enum channel channel, const uint32_t *wait_flag, int n_wait) {
    struct send_args a = {};
    a.p = tp_rank_of(r);
    a.channel = channel;
    a.wait_flag = wait_flag;
    a.n_wait = n_wait;
    return a;
}

/* Adds n_row rows of n_col floats to a transfer, and the flag that tells the other rank of their arrival. */
static void send_matrix(struct send_args *a, const float *src, size_t src_stride, float *dst, size_t dst_stride,
                        int n_row, int n_col, uint32_t *signal) {
    a->src = src;
    a->src_stride = src_stride;
    a->dst = dst;
    a->dst_stride = dst_stride;
    a->n_row = n_row;
    a->n_col = n_col;
    a->signal = signal;
}

/* Where A_MIX says how the streams of tokens are read; NULL: reading does not lag. */
static float *lag_of(const struct rank *r) { return lag_width(r->m) ? r->cuda->x32[A_MIX] + hc_lag_at(r->m) : NULL; }

/* Adds the rows of the residual to a transfer, from a pipeline stage or to it: `own` are the rank's, and `mailbox` a
 * mailbox's. */
static void send_residual(const struct rank *r, struct send_args *a, float *own, float *mailbox, bool from,
                          uint32_t *signal) {
    const size_t n = (size_t)residual_width(r->m), all = (size_t)hidden_width(r->m), mix = (size_t)r->width[A_MIX];
    float *const lag = lag_of(r), *const more = mailbox + n;
    if (from) send_matrix(a, mailbox, all, own, n, r->n_tok, (int)n, signal);
    else send_matrix(a, own, n, mailbox, all, r->n_tok, (int)n, signal);
    if (!lag) return;
    a->n_more = lag_width(r->m);
    a->more_src = from ? more : lag;
    a->more_src_stride = from ? all : mix;
    a->more_dst = from ? lag : more;
    a->more_dst_stride = from ? mix : all;
}

/* Enqueues a transfer. */
static void send_rows(struct rank *r, struct send_args a) {
    LAUNCH_PDL(k_send_rows, a.n_row ? (unsigned)ALLREDUCE_BLOCKS : 1u, 256, 0, r->cuda->stream, a);
}

/* The cosines and sines of a rotation. */
static struct rope_table rope_table_of(const struct rank *r, int rope) {
    const struct cuda *c = r->cuda;
    const size_t at = (size_t)rope * (size_t)c->sizes.chunk * (size_t)r->m->max.rope_dim / 2;
    const struct rope *p = &r->m->ropes[rope];
    return {p->freq, p->dim / 2, p->factor, c->cs + at, c->sn + at};
}

/* Embeddings, cosines and sines of the batch; a later stage then waits for the hidden states of the one before. */
static void cuda_embed(struct rank *r, const struct step *s) {
    const struct weight *w = s->w[0];
    const enum act out = s->out[0];
    struct cuda *c = r->cuda;
    r->n_all_reduce = 0;
    struct rope_tables ropes = {};
    for (; ropes.n < r->m->n_rope; ropes.n++) ropes.table[ropes.n] = rope_table_of(r, ropes.n);
    const int streams = r->pass == PASS_FORWARD ? r->m->n_hc : layer_streams(r->m, &r->m->layers[r->m->n_layer]);
    const enum act to = streams || r->m->n_res ? A_HC : out;
    float *x = c->x32[to];
    LAUNCH_PDL(k_embed, (unsigned)r->n_tok, ROW_THREADS, 0, c->stream, w->copy ? *w->copy : device_matrix{}, c->tokens,
               batch_of(r), x, (size_t)r->width[to], max(streams, 1), r->m->embd_scale > 0 ? r->m->embd_scale : 1.0f,
               s->norm, r->m->rms_eps, ropes, lag_of(r), (size_t)r->width[A_MIX]);
    if (!r->m->shard.stage) return;
    if (c->remote[r->index - r->m->shard.n_rank]) {
        residual_by_nccl(r, x, false);
        return;
    }
    const struct mailbox *own = &r->cuda->mailbox[r->index], *before = own - r->m->shard.n_rank;
    struct send_args a = send_of(r, CH_RECV, own->hidden_flag, 1);
    send_residual(r, &a, x, own->x, true, before->credit);
    send_rows(r, a);
}

/* ============================================================================================================
 * Operations: norms and sums over ranks
 *
 * Residual adds, norms and all-reduces, and what MTP layers read and leave.
 * ============================================================================================================ */

/* Arguments of k_add_norm for n_tok rows of n values: out is written in halves, what routers read in F32, too. */
static struct norm_args norm_of(struct rank *r, float *x, int n_tok, int n, const float *partial, const float *w,
                                enum act out) {
    struct cuda *c = r->cuda;
    struct norm_args a = {};
    a.x = a.sum = x;
    a.partial = partial;
    a.weight = w;
    a.centers = r->m->norm != NORM_RMS;
    a.bias = w && r->m->norm == NORM_BIAS ? w + n : NULL;
    a.eps = r->m->rms_eps;
    a.n = n;
    a.n_tok = n_tok;
    a.h16 = c->x16[out];
    a.h32 = out == A_H || out == A_ROUTED ? c->x32[out] : NULL;
    return a;
}
static void norm_slot(struct rank *r, enum act x, const float *w, enum act out) {
    struct norm_args a = norm_of(r, r->cuda->x32[x], r->n_tok, r->width[x], NULL, w, out);
    add_norm<PARTIAL_OWN>(&a, (unsigned)r->n_tok, r->cuda->stream);
}

#ifdef HAVE_NCCL
/* All-reduces by NCCL. False: our own kernel is to do it. In decode NCCL gathers the partial sums in F32, and our
 * kernel adds them in the order of the ranks. In prefill NCCL adds them in BF16: two bytes per value cross the bus
 * instead of four, and each addition rounds to 8 bits (NMSE of about 4e-6). */
static bool all_reduce_by_nccl(struct rank *r, struct norm_args *a) {
    struct cuda *c = r->cuda;
    const size_t count = (size_t)a->n_tok * (size_t)a->n;
    const bool decode = a->n_tok <= DECODE_MAX_TOKENS;
    if (!c->comm || (decode && !r->cuda->by_nccl[a->n_tok])) return false;
    if (decode) {
        NCCL_OK(r, ncclAllGather(a->partial, c->gathered, count, ncclFloat32, c->comm, c->stream));
        a->partial = c->gathered;
        add_norm<PARTIAL_GATHERED>(a, (unsigned)a->n_tok, c->stream);
    } else {
        LAUNCH_PDL(k_to_bf16, (unsigned)((count + 1023) / 1024), 256, 0, c->stream, (const float *)a->partial, c->sum16,
                   count);
        NCCL_OK(r, ncclAllReduce(c->sum16, c->sum16, count, ncclBfloat16, ncclSum, c->comm, c->stream));
        a->partial = c->sum16;
        add_norm<PARTIAL_BF16>(a, (unsigned)a->n_tok, c->stream);
    }
    return true;
}

#else
static bool all_reduce_by_nccl(struct rank *, struct norm_args *) { return false; }
#endif

/* Waits for the forward's kernels where ranks share a GPU: they must not fill its launch queue with many tokens'
 * kernels, of which a waiting one could block the one it waits for. */
static void sharers_sync(struct rank *r) {
    if (r->cuda->sharers > 1 && r->n_tok > DECODE_MAX_TOKENS) cuda_sync(r, "a forward pass");
}

/* The slots and flags of the stage's ranks. */
static void stage_slots(const struct rank *r, float *slot[MAX_RANKS], uint32_t *flag[MAX_RANKS]) {
    const struct shard *shard = &r->m->shard;
    const struct mailbox *stage = &r->cuda->mailbox[shard->stage * shard->n_rank];
    for (int k = 0; k < shard->n_rank; k++) slot[k] = stage[k].slot, flag[k] = stage[k].reduce_flag;
}

/* An all-reduce by our own kernel, which pushes as many rows at a time as a slot holds. */
static void all_reduce_push(struct rank *r, struct norm_args a) {
    struct cuda *c = r->cuda;
    const int n_tok = a.n_tok, piece = ALLREDUCE_SLOT / a.n; /* rows that are pushed at once */
    const size_t step = (size_t)piece * (size_t)a.n;
    sharers_sync(r);
    a.sharing = c->sharers > 1;
    stage_slots(r, a.slot, a.flag);
    for (int t = 0; t < n_tok; t += piece) {
        a.n_tok = min(n_tok - t, piece);
        add_norm<PARTIAL_PUSHED>(&a, (unsigned)min(a.n_tok, c->reduce_blocks), c->stream);
        if (a.x) a.x += step;
        a.sum += step;
        a.partial = (const float *)a.partial + step;
        if (a.h16) a.h16 += step;
        if (a.h32) a.h32 += step;
    }
}

/* The sums of a row norm, a row at a time: NCCL's buffers have room for one, and BF16 is not exact enough. */
static void row_sums_by_nccl(struct rank *r, struct norm_args a) {
    const int rows = a.n_tok;
    a.n_tok = 1;
    for (int t = 0; t < rows; t++, a.x += a.n, a.sum += a.n) {
        struct norm_args row = a;
        row.partial = (const float *)a.partial + (size_t)t * (size_t)a.n;
        all_reduce_by_nccl(r, &row);
    }
}

/* Whether a rank need not add up the partial sums of several. */
static bool rank_alone(const struct rank *r) { return r->m->shard.n_rank == 1 && !r->cuda->sizes.nccl; }

/* The all-reduce of `a`, by NCCL where it was chosen and the call allows it, or else by our own kernel. */
static void all_reduce(struct rank *r, struct norm_args a, bool may_nccl) {
    a.p = tp_rank_of(r);
    a.code = WAIT_CODE(0, CH_ALLREDUCE, r->n_all_reduce++);
    if (!may_nccl || !all_reduce_by_nccl(r, &a)) all_reduce_push(r, a);
}

/* Adds the partial sums of all ranks to x, which gives `sum`, and norms that. A single rank adds its own. */
static void all_reduce_add_norm(struct rank *r, enum act x, enum act partial, const float *w, enum act out,
                                float *sum) {
    struct cuda *c = r->cuda;
    struct norm_args a = norm_of(r, c->x32[x], r->n_tok, r->width[x], c->x32[partial], w, out);
    a.sum = sum;
    if (rank_alone(r)) {
        add_norm<PARTIAL_OWN>(&a, (unsigned)a.n_tok, c->stream);
        return;
    }
    all_reduce(r, a, true);
}

/* The partial sums of all ranks become this rank's, of `rows` rows of n_embd values for each token. */
static void partials_sum(struct rank *r, enum act partial, int rows) {
    float *x = r->cuda->x32[partial];
    const int pieces = r->cuda->spread ? rows : 1;
    if (rank_alone(r)) return;
    for (int i = 0; i < pieces; i++, x += (size_t)r->n_tok * (size_t)r->m->n_embd) {
        struct norm_args sum = norm_of(r, NULL, rows / pieces * r->n_tok, r->m->n_embd, x, NULL, A_H);
        sum.sum = x;
        all_reduce(r, sum, rows == pieces); /* NCCL's buffers have room for one row of a token */
    }
}

static void cuda_add_result(struct rank *r, const struct step *s) {
    struct cuda *c = r->cuda;
    struct result_args a = {};
    partials_sum(r, s->in[0], 1);
    a.x = c->x32[s->x];
    a.partial = c->x32[s->in[0]];
    if (s->in[1] != ACT_COUNT) {
        const struct layer *layer = &r->m->layers[s->il];
        partials_sum(r, s->in[1], 1);
        a.more = c->x32[s->in[1]];
        a.part[0] = layer->post_ffw_norm_1;
        a.part[1] = layer->post_ffw_norm_2;
    }
    a.result = s->result;
    a.scale = s->scale;
    a.weight = s->norm;
    a.h16 = c->x16[A_H];
    a.h32 = c->x32[A_H];
    a.eps = r->m->rms_eps;
    a.n = r->width[s->x];
    profile_next(4.0 * ((a.more ? 3 : 1) * a.n + (a.scale != NULL)), "%d values", a.n); /* the weights */
    if (a.n <= 4 * 4 * NORM_THREADS) LAUNCH_PDL(k_add_result<4>, (unsigned)r->n_tok, NORM_THREADS, 0, c->stream, a);
    else if (a.n <= 8 * 4 * NORM_THREADS)
        LAUNCH_PDL(k_add_result<8>, (unsigned)r->n_tok, NORM_THREADS, 0, c->stream, a);
    else LAUNCH_PDL(k_add_result<16>, (unsigned)r->n_tok, NORM_THREADS, 0, c->stream, a);
}

/* Takes the partial sums of all ranks into the streams (ACT_COUNT: there are none; A_JOINED: they replace them). Then
 * h = norm(what hc reads of them) * w; w NULL: x is that without a norm; hc NULL: neither. */
static void hc_mix(struct rank *r, enum act x, enum act partial, const struct hyper *hc, const float *w, enum act h) {
    const struct model *m = r->m;
    struct cuda *c = r->cuda;
    if (partial != ACT_COUNT) partials_sum(r, partial, partial == A_JOINED ? (int)GPU_HC : 1);
    struct hc_args a = {};
    a.streams = c->x32[A_HC];
    a.partial = partial == ACT_COUNT || partial == A_JOINED ? NULL : c->x32[partial];
    a.joined = partial == A_JOINED ? c->x32[partial] : NULL;
    a.mix = c->x32[A_MIX];
    a.mix_stride = (size_t)r->width[A_MIX];
    a.lag = lag_of(r);
    a.sums = c->hc_sums;
    a.n = m->n_embd;
    a.n_tok = r->n_tok;
    a.n_sinkhorn = m->n_sinkhorn;
    a.eps = m->rms_eps;
    a.hc_eps = m->hc_eps;
    a.hc_write = m->hc_write;
    a.mean = hc && !hc->fn;
    if (hc && hc->fn) {
        a.fn = hc->fn;
        a.base = hc->base;
        a.scale = hc->scale;
        a.n_row = w ? hc_rows(m) : (int)GPU_HC;
    }
    a.weight = w;
    a.h16 = c->x16[h];
    a.h32 = c->x32[h];
    a.x = c->x32[x];
    profile_next((double)a.n_row * GPU_HC * a.n * sizeof(float), "%dx%d f32", a.n_row, GPU_HC * a.n);
    hc_launch(&a, c->stream);
}

/* Takes the partial sums of all ranks into the streams of a low rank (ACT_COUNT: there are none; A_JOINED: they replace
 * them). Then A_NORMS = the norms of these; w NULL: nothing more. */
static void streams_norm(struct rank *r, enum act partial, const float *w, const struct l2_prefetch &prefetch) {
    struct cuda *c = r->cuda;
    struct stream_args a = {};
    if (partial != ACT_COUNT) partials_sum(r, partial, partial == A_JOINED ? r->m->n_hc : 1);
    a.streams = c->x32[A_HC];
    a.partial = partial == ACT_COUNT || partial == A_JOINED ? NULL : c->x32[partial];
    a.joined = partial == A_JOINED ? c->x32[partial] : NULL;
    a.mix = c->x32[A_MIX];
    a.weight = w;
    a.norms = c->x16[A_NORMS];
    a.n = r->m->n_embd;
    a.n_hc = r->m->n_hc;
    a.eps = r->m->rms_eps;
    a.prefetch = prefetch;
    const dim3 grid((unsigned)a.n_hc, (unsigned)r->n_tok);
    profile_next(w ? 4.0 * a.n_hc * a.n : 0, "%d streams of %d", a.n_hc, a.n);
    if (a.n <= 4 * 4 * NORM_THREADS) LAUNCH_PDL(k_streams_norm<4>, grid, NORM_THREADS, 0, c->stream, a);
    else LAUNCH_PDL(k_streams_norm<8>, grid, NORM_THREADS, 0, c->stream, a);
}

/* A short convolution of slot x by the ring of a layer. */
static struct short_conv short_conv_of(const struct rank *r, int il, enum cache_use use, enum act x) {
    return {r->cuda->x32[x], (size_t)r->width[x], r->cache[il][use], r->m->layers[il].attn.n_conv};
}

/* Keeps the inputs of up to two convolutions in prefill. */
static void keep_conv(struct rank *r, const struct short_conv *conv, int n_conv) {
    struct keep_conv_args a = {};
    const int kept = min(r->n_tok, conv->ring.n_row);
    a.batch = batch_of(r);
    a.first = r->n_tok - kept;
    for (int i = 0; i < n_conv; i++) a.conv[i] = conv[i], a.n[i] = conv[i].ring.width;
    LAUNCH_PDL(k_keep_conv, dim3((unsigned)kept, (unsigned)n_conv), 256, 0, r->cuda->stream, a);
}

/* What k_blocks does with what half `ffn` of layer il has given, in `partial`: it adds it, and reads nothing. ACT_COUNT:
 * it has given nothing. The sums of several ranks are added up first. */
static struct block_args blocks_of(struct rank *r, enum act partial, int il, bool ffn) {
    const struct model *m = r->m;
    struct cuda *c = r->cuda;
    struct block_args a = {};
    a.batch = batch_of(r);
    a.rows = c->x32[A_HC];
    a.n_res = m->n_res;
    a.n = m->n_embd;
    a.n_tok = r->n_tok;
    a.eps = m->rms_eps;
    a.plain = m->family->plain_blocks;
    a.row_eps = blocks_eps(m);
    a.score_by = blocks_score_by(m);
    a.message = message_row(m);
    a.n_message = message_rows(m);
    a.factors = c->x32[A_MIX];
    a.mix_width = (size_t)r->width[A_MIX];
    if (partial == ACT_COUNT) return a;
    partials_sum(r, partial, 1);
    const struct layer *layer = &m->layers[il];
    a.conv = short_conv_of(r, il, ffn ? CACHE_CONV_FFN : CACHE_CONV_ATTN, partial);
    a.taps = ffn ? layer->conv_ffn : layer->conv_attn;
    a.to = residual_row(m, layer);
    a.begins = !ffn && begins_row(m, layer);
    a.keep = r->n_tok <= DECODE_MAX_TOKENS;
    return a;
}

/* norms: weights of norms that it reads, rows of them. */
static void blocks_launch(struct rank *r, const struct block_args &a, int norms) {
    struct cuda *c = r->cuda;
    const int taps = a.conv.x ? a.conv.n_conv : 0;
    profile_next(4.0 * a.n * (a.n_read + (a.messages ? a.n_out : 0) + taps + norms), "%d rows of %d", a.n_row, a.n);
    if (a.n <= 4 * 4 * NORM_THREADS) LAUNCH_PDL(k_blocks<4>, (unsigned)a.n_tok, NORM_THREADS, 0, c->stream, a);
    else LAUNCH_PDL(k_blocks<8>, (unsigned)a.n_tok, NORM_THREADS, 0, c->stream, a);
    if (taps && !a.keep) keep_conv(r, &a.conv, 1);
}

/* Adds the partial sums as above, without a norm, and sends the rows to the next stage when that has read the previous
 * ones. */
static void cuda_last_reduce(struct rank *r, const struct step *s) {
    const struct shard *shard = &r->m->shard;
    const bool last = shard->stage + 1 == shard->n_stage;
    float *first = r->cuda->x_first;
    const enum act x = s->x;
    if (r->m->n_res) {
        struct block_args a = blocks_of(r, s->partial, r->m->n_layer - 1, true);
        if (last) {
            a.n_row = message_row(r->m);
            a.n_read = a.n_out = 1;
            a.query = r->m->read_end;
            a.x = r->cuda->x32[x];
        }
        blocks_launch(r, a, 0);
    } else if (r->m->hc_low) {
        streams_norm(r, s->partial, NULL, l2_prefetch{});
    } else if (s->hc) {
        hc_mix(r, x, s->partial, last ? s->hc : NULL, NULL, A_H);
    } else if (s->partial != ACT_COUNT) {
        all_reduce_add_norm(r, x, s->partial, NULL, A_H, first);
        if (r->cuda->x32[x] != first) r->cuda->x_second = r->cuda->x32[x], r->cuda->x32[x] = first;
    }
    if (last) return;
    float *residual = r->cuda->x32[r->m->n_hc || r->m->n_res ? A_HC : x];
    if (r->cuda->remote[r->index + shard->n_rank]) {
        residual_by_nccl(r, residual, true);
        return;
    }
    const struct mailbox *next = &r->cuda->mailbox[r->index + shard->n_rank];
    struct send_args a = send_of(r, CH_SEND, r->cuda->mailbox[r->index].credit, 1);
    send_residual(r, &a, residual, next->x, false, next->hidden_flag);
    send_rows(r, a);
}

/* The first ring of hidden states, and those of the timelines. */
static struct mtp_ring mtp_first_ring(const struct rank *r) {
    return {r->mtp_hidden, r->n_mtp_hidden, mtp_streams(r->m), r->m->n_embd, 0, batch_of(r)};
}
static struct mtp_ring mtp_own_rings(const struct rank *r) {
    struct mtp_ring ring = mtp_first_ring(r);
    ring.at += (size_t)r->n_mtp_hidden * (size_t)(ring.n_hc * ring.n);
    ring.n_row = ring.timeline_rows = r->n_mtp_own;
    return ring;
}

/* The ring that has all hidden states of the batch. */
static struct mtp_ring mtp_ring_of(const struct rank *r) {
    return r->n_mtp_own && r->n_tok <= DECODE_MAX_TOKENS ? mtp_own_rings(r) : mtp_first_ring(r);
}

static void cuda_keep_hidden(struct rank *r, const struct step *s) {
    struct cuda *c = r->cuda;
    struct keep_hidden_args a = {};
    a.x = c->x32[s->x];
    a.weight = s->norm;
    a.eps = r->m->rms_eps;
    a.next = s->next;
    a.ring = mtp_ring_of(r);
    a.also = mtp_own_rings(r);
    a.also_from = r->n_mtp_own && r->n_tok > DECODE_MAX_TOKENS ? r->n_tok - r->n_mtp_own : r->n_tok;
    LAUNCH_PDL(k_keep_hidden, dim3((unsigned)r->n_tok, (unsigned)a.ring.n_hc), NORM_THREADS, 0, c->stream, a);
}

static void cuda_mtp_input(struct rank *r, const struct step *s) {
    const struct layer *layer = &r->m->layers[s->il];
    struct cuda *c = r->cuda;
    struct mtp_input_args a = {};
    a.ring = mtp_ring_of(r);
    a.x = c->x32[layer_streams(r->m, layer) ? A_HC : s->x]; /* k_embed has written it to every stream */
    a.x_stride = (size_t)(a.ring.n_hc * a.ring.n);
    a.norm[0] = layer->e_norm;
    a.norm[1] = layer->h_norm;
    a.eps = r->m->rms_eps;
    a.from = layer->first_eh;
    a.to = a.from + layer->eh_proj.n_in;
    a.out = c->x16[s->out[0]];
    a.out_stride = (size_t)r->width[s->out[0]] / (size_t)a.ring.n_hc;
    a.whole = r->m->hc_low > 0;
    LAUNCH_PDL(k_mtp_input, dim3((unsigned)r->n_tok, 1 + (unsigned)a.ring.n_hc), NORM_THREADS, 0, c->stream, a);
}

/* ============================================================================================================
 * Operations: matrices
 *
 * Products with matrices; weights that are requested ahead; norms inside of products.
 * ============================================================================================================ */

/* Tells the profile that the next launch reads `count` matrices of w's shape, and moves `more` bytes. */
static void profile_matrices(const struct device_matrix *w, double count, double more) {
    static const char *const format[] = {"fp4", "q8", "f16", "f8"};
    static_assert(sizeof format / sizeof *format == FMT_COUNT, "every format has a name");
    profile_next(count * w->n_rt * w->n_kt * (TILE_BYTES(w->fmt) + (w->scales ? TILE_SCALES : 0)) + more,
                 "%.0f of %dx%d %s", count, w->n_out, w->n_in, format[w->fmt]);
}

/* y = W x for n_tok rows of halves. batch > 0: one matrix per head, x and y advance by x_batch and y_batch. */
static void matmul(struct rank *r, const struct device_matrix *w, const uint16_t *x, size_t x_stride, size_t x_batch,
                   int n_tok, int batch, uint16_t *y16, float *y32, size_t y_stride, size_t y_batch) {
    struct cuda *c = r->cuda;
    profile_matrices(w, max(batch, 1), (double)n_tok * w->n_out * max(batch, 1) * (y32 ? 4 : 2));
    if (n_tok <= DECODE_MAX_TOKENS && !batch) {
        struct linear_args p = {};
        p.w[0] = *w;
        p.y[0] = y32 ? y32 : (float *)y16;
        p.y_half = !y32;
        p.y_stride[0] = y_stride;
        p.n_matrix = 1;
        p.n_tok = n_tok;
        p.x = x;
        p.x_stride = x_stride;
        gemv_linear(&p, c->stream);
        return;
    }
    struct gemm_args g = {};
    g.w = *w;
    g.x = x;
    g.x_stride = x_stride;
    g.n_tok = n_tok;
    g.y_f32 = y32 != NULL;
    g.y = y32 ? (void *)y32 : (void *)y16;
    g.y_stride = y_stride;
    g.batch = batch;
    g.x_batch = x_batch;
    g.y_batch = y_batch;
    gemm_prefill(&g, 0, c->stream);
}

/* In decode the streams of up to 16 tokens are taken 16 at a time. */
static void cuda_hc_linear(struct rank *r, const struct step *s) {
    const struct weight *w = s->w[0];
    const enum act x = s->in[0], out = s->out[0];
    struct cuda *c = r->cuda;
    const int n = r->n_tok * r->m->n_hc, step = r->n_tok <= DECODE_MAX_TOKENS ? (int)DECODE_MAX_TOKENS : n;
    for (int i = 0; i < n; i += step)
        matmul(r, w->copy, c->x16[x] + (size_t)i * (size_t)w->n_in, (size_t)w->n_in, 0, min(n - i, step), 0, NULL,
               c->x32[out] + (size_t)i * (size_t)w->n_out, (size_t)w->n_out, 0);
}

/* Bytes of all experts of a matrix: codes, scales. */
static void device_matrix_bytes(const struct device_matrix *d, size_t n[2]) {
    const size_t tiles = (size_t)d->n_expert * (size_t)d->n_rt * (size_t)d->n_kt;
    n[0] = tiles * TILE_BYTES(d->fmt);
    n[1] = d->scales ? tiles * TILE_SCALES : 0;
}

/* Adds a matrix to what a kernel requests ahead of its use, within its share of L2 and as far as there are ranges. */
static void prefetch_add(struct rank *r, struct l2_prefetch *a, const struct weight *w) {
    const struct device_matrix *d = w->copy;
    if (!d || r->n_tok > DECODE_MAX_TOKENS) return;
    size_t room = (size_t)r->cuda->l2_bytes / PREFETCH_SHARE / (size_t)r->cuda->sharers;
    for (int i = 0; i < a->count; i++) room -= a->n[i];
    const uint8_t *at[2] = {d->codes, d->scales};
    size_t n[2];
    device_matrix_bytes(d, n);
    for (int i = 0; i < 2; i++) {
        const size_t take = n[i] < room ? n[i] : room / 16 * 16;
        if (!take || a->count == PREFETCH_RANGES) continue;
        a->at[a->count] = at[i];
        a->n[a->count++] = (uint32_t)take;
        room -= take;
    }
}

/* What is read after the feed-forward of step s: the first products of the next layer, or the head. */
static struct l2_prefetch prefetch_of_ffn(struct rank *r, const struct step *s) {
    struct l2_prefetch a = {};
    const struct model *m = r->m;
    const struct step *next = s + 1;
    while (next->op == OP_add_result) next++;
    if (next->op == OP_linear)
        for (int i = 0; next->w[i]; i++) prefetch_add(r, &a, next->w[i]);
    else if (next->il != s->il + 1 && m->shard.stage + 1 == m->shard.n_stage && !m->hc_low)
        prefetch_add(r, &a, s->il < m->n_layer ? &m->output : mtp_head(m, &m->layers[s->il]));
    return a;
}

/* What is read after step s in its layer, up to the feed-forward. first: of its own matrices those from this one on
 * are, too. */
static struct l2_prefetch prefetch_of_mixer(struct rank *r, const struct step *s, int first) {
    struct l2_prefetch a = {};
    for (const int il = s->il; s->il == il && s->op != OP_norm_ffn; s++, first = 0)
        for (int i = first; s->w[i]; i++) prefetch_add(r, &a, s->w[i]);
    return a;
}

/* Whether the kernels that read the norm of x + partial make it themselves. */
static bool norm_fuses(const struct rank *r, enum act x, enum act partial) {
    return r->cuda->fuses_norms && gpu_norm_fuses(r->m, r->n_tok, r->width[x], rank_alone(r) || partial == ACT_COUNT);
}

/* The norm of x + partial, as such kernels take it. The sum becomes the slot's memory. */
static struct norm_input norm_input_of(struct rank *r, enum act x, enum act partial, const float *w) {
    struct cuda *c = r->cuda;
    struct norm_input p = {};
    p.x = c->x32[x];
    p.weight = w;
    p.eps = r->m->rms_eps;
    p.n = r->width[x];
    if (partial == ACT_COUNT) return p;
    p.partial = c->x32[partial];
    p.sum = c->x_second;
    c->x_second = c->x32[x];
    c->x32[x] = p.sum;
    return p;
}

/* x += partial, then h = norm(x) * w; partial ACT_COUNT: nothing is added; w NULL: nothing more. */
static void norm_rows_of(struct rank *r, enum act x, enum act partial, const float *w, enum act h) {
    if (partial == ACT_COUNT) norm_slot(r, x, w, h);
    else all_reduce_add_norm(r, x, partial, w, h, r->cuda->x32[x]);
}

/* The product of a matrix with the rows of a slot, in F32. */
static void linear_rows(struct rank *r, const struct weight *w, enum act x, enum act out) {
    struct cuda *c = r->cuda;
    uint16_t *y16 = c->x32[out] ? NULL : c->x16[out];
    matmul(r, w->copy, c->x16[x], (size_t)r->width[x], 0, r->n_tok, 0, y16, c->x32[out], (size_t)r->width[out], 0);
}

/* In decode one kernel does all products, so that small matrices fill the GPU together. */
static void cuda_linear(struct rank *r, const struct step *s) {
    struct cuda *c = r->cuda;
    struct linear_args p = {};
    const enum act x = s->in[0];
    if (s->norm && !s->hc && norm_fuses(r, s->x, s->partial)) {
        p.norm = norm_input_of(r, s->x, s->partial, s->norm);
    } else if (s->norm) {
        if (s->hc) hc_mix(r, s->x, s->partial, s->hc, s->norm, x);
        else norm_rows_of(r, s->x, s->partial, s->norm, x);
        if (s->x == A_X) p.prefetch = prefetch_of_mixer(r, s + 1, 0);
    }
    if (r->n_tok > DECODE_MAX_TOKENS) {
        for (int i = 0; s->w[i]; i++) linear_rows(r, s->w[i], x, s->out[i]);
        return;
    }
    for (int i = 0; s->w[i]; i++) {
        const struct device_matrix *d = s->w[i]->copy;
        profile_matrices(d, 1, 4.0 * r->n_tok * d->n_out);
        p.w[p.n_matrix] = *d;
        p.y[p.n_matrix] = c->x32[s->out[i]] ? c->x32[s->out[i]] : (float *)c->x16[s->out[i]];
        p.y_half |= (uint32_t)!c->x32[s->out[i]] << p.n_matrix;
        p.y_stride[p.n_matrix++] = (size_t)r->width[s->out[i]];
    }
    p.n_tok = r->n_tok;
    p.x = c->x16[x];
    p.x_stride = (size_t)r->width[x];
    gemv_linear(&p, c->stream);
}

/* Requests what the two products after it read, how streams are read and written, and after the last ones the head. */
static void cuda_streams_norm(struct rank *r, const struct step *s) {
    const struct layer *layer = s->il < 0 ? NULL : &r->m->layers[s->il];
    struct l2_prefetch a = {};
    for (const struct step *next = s + 1; next < s + 3; next++)
        for (int i = 0; next->w[i] && s[1].op == OP_linear; i++) prefetch_add(r, &a, next->w[i]);
    if (!layer) prefetch_add(r, &a, &r->m->output);
    else if (layer->mtp && s->norm == layer->hc_head.norm) prefetch_add(r, &a, mtp_head(r->m, layer));
    const bool mixed = !r->m->hc_low && s->partial != ACT_COUNT; /* streams that are mixed with one another */
    if (mixed) hc_mix(r, s->x, s->partial, NULL, NULL, A_H);
    streams_norm(r, mixed ? ACT_COUNT : s->partial, s->norm, a);
}

static void cuda_streams_read(struct rank *r, const struct step *s) {
    const struct model *m = r->m;
    const enum act low = s->in[0], out = s->out[0];
    struct cuda *c = r->cuda;
    struct read_args a = {};
    to_halves(c->x32[low], c->x16[low], m->hc_low, r->n_tok, 1.0f / (float)m->n_hc, c->stream);
    linear_rows(r, s->w[0], low, A_MIX_UP);
    a.norms = c->x16[s->in[1]];
    a.up = c->x16[A_MIX_UP];
    a.h16 = c->x16[out];
    a.h32 = c->x32[out];
    a.n = m->n_embd;
    a.n_hc = m->n_hc;
    LAUNCH_PDL(k_streams_read, dim3(ceil_div(a.n, 1024), (unsigned)r->n_tok), 256, 0, c->stream, a);
}

/* The arguments of kernels for the table of n-grams, before layer il. */
static struct ngram_args ngram_args_of(const struct rank *r, int il) {
    const struct layer *layer = &r->m->layers[il];
    struct cuda *c = r->cuda;
    struct ngram_args a = {};
    a.batch = batch_of(r);
    a.tokens = c->tokens;
    a.table = *layer_ngram(r->m, layer);
    a.scale = a.table.table.scale ? a.table.table.scale[0] : 1.0f;
    a.ring = r->cache[il][CACHE_NGRAM];
    a.n_kept = ngram_kept_values(r->m);
    if (r->rows) {
        a.p = tp_rank_of(r);
        a.question = r->rows;
        struct row_list *list = r->rows->list;
        while (list->table != layer->ngrams - 1) list++;
        a.asked = list->row;
        a.n_asked = &list->n;
    }
    a.streams = c->x32[A_HC];
    a.key_norm = layer->ngram_key_norm;
    a.conv_norm = layer->ngram_conv_norm;
    a.taps = layer->ngram_conv;
    a.gates = c->ngram_gates;
    a.n = r->m->n_embd;
    a.n_hc = r->m->n_hc;
    a.eps = r->m->rms_eps;
    return a;
}

/* Asks for the rows of all tables of a forward, before the first of them: those of later layers are read meanwhile. */
static void want_rows(struct rank *r) {
    for (int il = 0; il < r->m->n_layer; il++) {
        if (!r->m->layers[il].ngrams) continue;
        struct ngram_args a = ngram_args_of(r, il);
        ngram_divide(&a);
        LAUNCH_PDL(k_want_rows, ceil_div(r->n_tok * a.table.n_head, 256), 256, 0, r->cuda->stream, a);
    }
}

static void cuda_ngrams(struct rank *r, const struct step *s) {
    struct ngram_args a = ngram_args_of(r, s->il);
    a.rows = r->cuda->x16[s->out[0]];
    ngram_divide(&a);
    if (r->rows && r->rows->list->table == r->m->layers[s->il].ngrams - 1) want_rows(r);
    if (r->rows) LAUNCH_PDL(k_brought_rows, 1, 32, 0, r->cuda->stream, a, s->il);
    profile_next(ngram_reads(&a.table), "%d rows of %d", a.table.n_head, a.table.row);
    LAUNCH_PDL(k_ngram_rows, dim3(ceil_div(a.table.n_head, 4), (unsigned)r->n_tok), 128, 0, r->cuda->stream, a);
}

static void cuda_ngrams_add(struct rank *r, const struct step *s) {
    struct cuda *c = r->cuda;
    struct ngram_args a = ngram_args_of(r, s->il);
    a.norms = c->x16[s->in[0]];
    a.keys = c->x16[s->in[1]];
    a.value = c->x32[s->in[2]];
    const double values = (double)a.n_hc * a.n * sizeof(float);
    profile_next(values, "%d streams of %d", a.n_hc, a.n);
    LAUNCH_PDL(k_ngram_gate, dim3((unsigned)a.n_hc, (unsigned)r->n_tok), NORM_THREADS, 0, c->stream, a);
    profile_next((1 + a.table.n_conv) * values + layer_reads(r->m, &r->m->layers[s->il], r->kv_type,
                                                             (size_t)(r->pos + r->n_tok), CACHE_NGRAM, CACHE_NGRAM),
                 "%d streams of %d", a.n_hc, a.n);
    ngram_add(&a, r->n_tok, c->stream);
}

static void cuda_read_blocks(struct rank *r, const struct step *s) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[s->il];
    struct cuda *c = r->cuda;
    struct block_args a = blocks_of(r, s->partial, s->ffn ? s->il : s->il - 1, !s->ffn);
    const int row = residual_row(m, layer);
    const float *norm[] = {s->ffn ? layer->ffn_norm : layer->attn_norm, layer->attn_norm_k, layer->attn_norm_v};
    if (layer->visit && layer->block == m->loop_first && !s->ffn) a.moved = row; /* what the pass before has left */
    a.n_row = !s->ffn && begins_row(m, layer) ? row : row + 1;                   /* its block may have no sum yet */
    a.n_read = s->ffn ? 1 : layer->n_read;
    a.query = s->ffn ? layer->read_ffn : layer->read_attn;
    a.messages = layer->visit > 0;
    a.message_query = layer->read_messages + (s->ffn ? READ_FFN * m->n_embd : 0);
    for (; s->out[a.n_out] != ACT_COUNT; a.n_out++) {
        a.norm[a.n_out] = norm[a.n_out] ? norm[a.n_out] : norm[0];
        a.out[a.n_out] = c->x16[s->out[a.n_out]];
    }
    if (s->out[0] == A_H) a.h32 = c->x32[A_H];
    if (r->n_tok <= DECODE_MAX_TOKENS) a.prefetch = prefetch_of_mixer(r, s, 0);
    int norms = 0;
    for (int i = 0; i < BLOCKS_READ && !s->ffn; i++) norms += norm[i] != NULL;
    blocks_launch(r, a, norms);
}

static void cuda_mix_message(struct rank *r, const struct step *s) {
    struct cuda *c = r->cuda;
    struct message_args a = {};
    a.pair = c->x16[s->in[0]];
    a.factors = c->x32[A_MIX] + 2 * ((int)s->in[0] - A_PAIR_Q);
    a.mix_width = (size_t)r->width[A_MIX];
    a.forget = c->x32[s->in[1]];
    a.gain = c->x32[s->in[2]];
    a.norm = s->norm;
    a.out = c->x16[s->out[0]];
    a.h32 = s->out[0] == A_H ? c->x32[A_H] : NULL;
    a.n = r->m->n_embd;
    a.eps = r->m->rms_eps;
    if (a.n <= 4 * 4 * NORM_THREADS) LAUNCH_PDL(k_mix_message<4>, (unsigned)r->n_tok, NORM_THREADS, 0, c->stream, a);
    else LAUNCH_PDL(k_mix_message<8>, (unsigned)r->n_tok, NORM_THREADS, 0, c->stream, a);
}

/* ============================================================================================================
 * Operations: attention
 *
 * All kinds of attention, the indexer and the gated delta net.
 * ============================================================================================================ */

/* Arguments of k_rope_gqa and k_rope_mla, but for v. */
static struct rope_args rope_of(struct rank *r, int il, enum act q, enum act k) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    const struct attn shape = layer->attn;
    struct cuda *c = r->cuda;
    const struct rope_table table = rope_table_of(r, shape.rope);
    struct rope_args p = {};
    p.batch = batch_of(r);
    p.cs = table.cs;
    p.sn = table.sn;
    p.pairs = m->ropes[shape.rope].pairs;
    p.q = c->x32[q];
    p.k = c->x32[k];
    p.q16 = c->x16[q];
    p.kp = r->cache[il][CACHE_K];
    p.vp = r->cache[il][CACHE_V];
    p.n_head = shape.n_head;
    p.n_head_kv = shape.n_head_kv;
    p.d = shape.head_k;
    p.q_head = layer->attn.q_gate ? 2 * shape.head_k : shape.head_k;
    p.q_stride = (size_t)r->width[q];
    p.k_stride = (size_t)r->width[k];
    p.dv = shape.head_v;
    p.rope = layer_rope_dim(m, layer);
    p.nope = layer_nope(m, layer);
    p.latent = shape.kv_lora;
    p.eps = m->rms_eps;
    p.v_norm = shape.v_norm;
    p.norm_last = shape.norm_last;
    p.temp_scale = shape.temp_scale;
    p.temp_length = shape.temp_length;
    p.temp_early = shape.temp_early;
    p.q_rope = c->q_absorbed;
    if (layer->qk_norm == QK_NORM_HEADS) {
        p.q_norm = layer->q_norm;
        p.k_norm = layer->k_norm;
    }
    if (layer->kv_a_norm) p.k_norm = layer->kv_a_norm;
    if (shape.shared_norm) p.shared_norm = layer->k_norm;
    return p;
}

/* The cache tensors that have the compressed keys of a layer, and the keys of its indexer. */
static const struct cache_tensor *csa_keys(const struct rank *r, int il) {
    return r->cache[il - r->m->layers[il].attn.kv_back];
}

/* Attention of queries (n_tok, n_head, dk) over the cache of layer il; outputs (n_tok, n_head, dv), out_stride halves
 * from token to token. a: what else there is. Returns the arguments that it launched. */
static struct attn_args attend(struct rank *r, int il, const uint16_t *q, int dk, uint16_t *out, size_t out_stride,
                               int dv, int n_head_kv, struct attn_args a) {
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    const bool shared = layer->mixer == MIXER_CSA;
    const struct cache_tensor *k = &r->cache[il][CACHE_K],
                              *v = shared ? &csa_keys(r, il)[CACHE_COMPRESSED] : &r->cache[il][CACHE_V];
    struct cuda *c = r->cuda;
    a.q = q;
    a.out = out;
    a.partials = c->partials;
    a.k = *k;
    a.v = *v;
    a.batch = batch_of(r);
    a.n_tok = r->n_tok;
    a.n_head = shape.n_head;
    a.n_head_kv = n_head_kv;
    a.dk = dk;
    a.dv = dv;
    a.q_stride = (size_t)shape.n_head * (size_t)dk;
    a.out_stride = out_stride;
    a.scale = shape.scale;
    a.window = shape.window;
    a.chunked = shape.chunked;
    if (!a.sinks) a.sinks = layer->sinks;
    a.max_splits = r->cuda->sizes.splits;
    const double key = (double)(k->row_bytes + cache_scale_bytes(k)),
                 value = (double)(v->row_bytes + cache_scale_bytes(v));
    const int len = r->pos + r->n_tok;
    const int keys = shape.window ? min(len, attn_reach(&shape, r->pos) + r->n_tok - 1)
                     : a.top_k    ? min(len, shape.top_k)
                                  : len;
    const int compressed = !shared || !shape.compress_ratio ? 0
                           : a.top_k                        ? min(len / shape.compress_ratio, a.top_k)
                                                            : len / shape.compress_ratio;
    profile_next(shared ? keys * key + compressed * value : keys * (key + value), "%d keys", keys + compressed);
    attn_launch(&a, shared ? ATTN_CSA : shape.kv_lora ? ATTN_MLA : ATTN_GQA, r->n_tok > DECODE_MAX_TOKENS, c->stream);
    return a;
}

static void cuda_clip(struct rank *r, const struct step *s) {
    const struct layer *layer = &r->m->layers[s->il];
    const struct weight *const w[3] = {&layer->wq, &layer->wk, &layer->wv};
    struct clip_args a = {};
    int most = 0;
    for (int i = 0; i < 3; i++) {
        a.x[i] = r->cuda->x32[s->in[i]];
        a.stride[i] = (size_t)r->width[s->in[i]];
        a.n[i] = w[i]->n_out;
        most = max(most, a.n[i]);
    }
    a.most = layer->attn.clip;
    profile_next(0, "%d values", a.n[0] + a.n[1] + a.n[2]); /* rows come from L2 */
    LAUNCH_PDL(k_clip, dim3(ceil_div(most, 1024), (unsigned)r->n_tok, 3), 256, 0, r->cuda->stream, a);
}

/* Norms q and k as whole rows. With several ranks a decode forward needs one kernel, and more tokens an all-reduce
 * between two. */
static void cuda_qk_norm_rows(struct rank *r, const struct step *s) {
    const int il = s->il;
    const enum act q = s->in[0], k = s->in[1];
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    struct cuda *c = r->cuda;
    struct row_norm_args a = {};
    a.eps = r->m->rms_eps;
    a.n_tok = r->n_tok;
    for (int i = 0; i < 2; i++) {
        a.x[i] = c->x32[i ? k : q];
        a.stride[i] = (size_t)r->width[i ? k : q];
        a.weight[i] = i ? layer->k_norm : layer->q_norm;
        a.n[i] = (i ? shape.n_head_kv : shape.n_head) * shape.head_k;
        a.whole[i] = (i ? shape.whole_head_kv : shape.whole_head) * shape.head_k;
        a.counted[i] = !i || !shape.kv_replica;
    }
    const unsigned rows = 2 * (unsigned)r->n_tok;
    profile_next(4.0 * (a.n[0] + a.n[1]), "%d values", a.n[0] + a.n[1]); /* the weights: rows come from L2 */
    if (r->m->shard.n_rank == 1) {
        LAUNCH_PDL((k_row_norm<ROW_SQUARES | ROW_SCALE>), rows, NORM_THREADS, 0, c->stream, a);
        return;
    }
    a.p = tp_rank_of(r);
    a.code = WAIT_CODE(0, WAIT_ROW_NORM, il);
    if (r->n_tok <= DECODE_MAX_TOKENS && !c->spread) {
        a.sharing = c->sharers > 1;
        stage_slots(r, a.slot, a.flag);
        LAUNCH_PDL((k_row_norm<ROW_SQUARES | ROW_EXCHANGE | ROW_SCALE>), min(rows, (unsigned)c->reduce_blocks),
                   NORM_THREADS, 0, c->stream, a);
        return;
    }
    struct norm_args sums = {};
    sums.n = ROW_SUMS;
    sums.n_tok = (int)ceil_div(2 * r->n_tok, ROW_SUMS);
    sums.partial = a.own = c->row_sums;
    sums.x = sums.sum = a.all = c->row_sums + sums.n_tok * ROW_SUMS;
    sums.p = a.p;
    sums.code = a.code;
    LAUNCH_PDL((k_row_norm<ROW_SQUARES>), rows, NORM_THREADS, 0, c->stream, a);
    if (c->spread) row_sums_by_nccl(r, sums);
    else all_reduce_push(r, sums);
    LAUNCH_PDL((k_row_norm<ROW_SCALE>), rows, NORM_THREADS, 0, c->stream, a);
}

/* Makes attention run over chosen keys, where there is a choice; in prefill where a token does not see all. */
static void choose_keys(const struct rank *r, const struct attn &shape, struct attn_args *a) {
    const int most = attn_topk_most(&shape);
    if (!shape.top_k || (r->n_tok > DECODE_MAX_TOKENS && r->pos + r->n_tok <= most)) return;
    a->top_k = most;
    a->chosen = r->cuda->topk_blocks;
    a->n_topk = attn_topk_blocks(&shape);
    a->block = divisor_of(shape.index_block);
    a->block_end = index_by_block(&shape) ? POOL_END : BLOCK_END;
}

/* The heads' results in slot x times their gates. */
static void head_gates(struct rank *r, const struct layer *layer, enum act x) {
    const struct attn *a = &layer->attn;
    struct cuda *c = r->cuda;
    const struct gate_args g = {c->x16[x], (size_t)r->width[x], c->x32[A_GATE], (size_t)r->width[A_GATE],
                                a->n_head, a->head_v,           a->n_gate > 1,  layer->head_gate == GATE_SOFTPLUS};
    profile_next(4.0 * r->n_tok * (a->n_head * a->head_v + a->n_head * a->n_gate), "%d heads", a->n_head);
    LAUNCH_PDL(k_head_gate, dim3(ceil_div(a->n_head * a->head_v, 1024), (unsigned)r->n_tok), 128, 0, c->stream, g);
}

static void cuda_attention(struct rank *r, const struct step *s) {
    const int il = s->il;
    const enum act q = s->in[0], k = s->in[1], v = s->in[2], out = s->out[0];
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    const bool decode = r->n_tok <= DECODE_MAX_TOKENS, gates = shape.n_gate > 0;
    struct cuda *c = r->cuda;
    struct attn_args a = {};
    a.rope = rope_of(r, il, q, k);
    a.rope.v = c->x32[shape.v_is_k ? k : v];
    a.rope.v_stride = (size_t)r->width[shape.v_is_k ? k : v];
    a.softplus = layer->head_gate == GATE_SOFTPLUS;
    if (layer->attn.q_gate) {
        a.gate = c->x32[q] + shape.head_k; /* after each head's query */
        a.gate_stride = (size_t)r->width[q];
        a.gate_head = 2 * shape.head_k;
    } else if (gates && decode) {
        a.gate = c->x32[A_GATE];
        a.gate_stride = (size_t)r->width[A_GATE];
        a.gate_head = shape.n_gate;
        a.gate_one = shape.n_gate == 1;
    }
    choose_keys(r, shape, &a);
    if (decode) a.arrived = c->attn_arrived;
    if (!decode || a.top_k || gpu_wide(&shape)) {
        if (layer->qk_norm == QK_NORM_HEADS)
            profile_next(8.0 * shape.head_k, "%d heads of %d", shape.n_head, shape.head_k);
        const dim3 grid(ceil_div(shape.n_head + 2 * shape.n_head_kv, 4), (unsigned)r->n_tok);
        if (gpu_wide(&shape)) LAUNCH_PDL(k_rope_gqa<WIDE_PER>, grid, 128, 0, c->stream, a.rope);
        else LAUNCH_PDL(k_rope_gqa<HEAD_PER>, grid, 128, 0, c->stream, a.rope);
    }
    a.prefetch = prefetch_of_mixer(r, s, 1);
    attend(r, il, c->x16[q], shape.head_k, c->x16[out], (size_t)r->width[out], shape.head_v, shape.n_head_kv, a);
    if (gates && !decode) head_gates(r, layer, out);
}

/* Attention with a bias by distance. */
static void cuda_rel_attention(struct rank *r, const struct step *s) {
    const int il = s->il;
    const enum act q = s->in[0], out = s->out[0];
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    const bool decode = r->n_tok <= DECODE_MAX_TOKENS;
    struct cuda *c = r->cuda;
    struct rel_args p = {};
    p.batch = batch_of(r);
    p.shape = shape;
    p.q = c->x32[q];
    p.q_stride = (size_t)r->width[q];
    p.rel = c->x32[A_REL];
    p.rel_stride = (size_t)r->width[A_REL];
    p.q_scale = layer->q_scale;
    p.rel_scale = layer->rel_scale;
    p.q16 = c->x16[q];
    p.rel16 = c->x16[A_REL];
    for (int v = 0; v < 2; v++) {
        p.conv[v] = short_conv_of(r, il, v ? CACHE_CONV_V : CACHE_CONV_K, s->in[1 + v]);
        p.taps[v] = v ? layer->conv_v : layer->conv_k;
        p.own[v] = c->x32[s->in[6 + v]];
        p.to[v] = r->cache[il][v ? CACHE_V : CACHE_K];
    }
    p.own_stride = (size_t)r->width[A_TAP_K];
    p.keep = decode;
    p.eps = r->m->rms_eps;
    const int taps = shape.n_head_kv * (shape.head_k + shape.head_v) * shape.n_conv;
    const int scales = shape.n_head * (shape.head_k + shape.n_rel) + shape.n_rel * shape.extent; /* and the bank */
    profile_next(layer_recent_reads(r->m, layer, r->kv_type, (size_t)(r->pos + r->n_tok)) + 4.0 * (taps + scales),
                 "%d heads of %d", shape.n_head, shape.head_k);
    LAUNCH_PDL(k_rel_prepare, dim3(ceil_div(2 * (shape.n_head + shape.n_head_kv), 4), (unsigned)r->n_tok), 128, 0,
               c->stream, p);
    if (!decode) keep_conv(r, p.conv, 2);
    struct attn_args a = {};
    a.rel = p.rel16;
    a.bank = layer->rel_bias;
    a.n_rel = shape.n_rel;
    a.extent = shape.extent;
    a.sinks = c->x32[A_SINK];
    a.sink_stride = (size_t)r->width[A_SINK];
    if (decode) {
        a.arrived = c->attn_arrived;
        a.gate = c->x32[A_GATE];
        a.gate_stride = (size_t)r->width[A_GATE];
        a.gate_head = shape.n_gate;
        a.prefetch = prefetch_of_mixer(r, s, 1);
    }
    attend(r, il, c->x16[q], shape.head_k, c->x16[out], (size_t)r->width[out], shape.head_v, shape.n_head_kv, a);
    if (!decode) head_gates(r, layer, out);
}

/* The operands of a layer's gated delta net or Mamba-2. */
static struct delta_args delta_args_of(struct rank *r, const struct step *s) {
    const int il = s->il;
    const enum act out = s->out[0];
    const struct layer *layer = &r->m->layers[il];
    const struct cache_tensor *cache = r->cache[il];
    struct cuda *c = r->cuda;
    struct delta_args a = {};
    a.batch = batch_of(r);
    a.shape = layer->delta;
    a.q = c->x32[A_Q];
    a.q_stride = (size_t)r->width[A_Q];
    a.k = c->x32[A_K];
    a.k_stride = (size_t)r->width[A_K];
    a.v = c->x32[A_V];
    a.v_stride = (size_t)r->width[A_V];
    a.z = c->x32[A_Z];
    a.z_stride = (size_t)r->width[A_Z];
    a.alpha = c->x32[A_ALPHA];
    if (layer->mixer == MIXER_DELTA) a.beta = c->x32[A_BETA];
    a.alpha_stride = (size_t)r->width[A_ALPHA];
    a.beta_stride = (size_t)r->width[A_BETA];
    a.ring_qk = (float *)cache[CACHE_K].data;
    a.ring_qk_stride = cache[CACHE_K].row_bytes / sizeof(float);
    a.ring_v = (float *)cache[CACHE_V].data;
    a.ring_v_stride = cache[CACHE_V].row_bytes / sizeof(float);
    a.ring_gates = (float *)cache[CACHE_WINDOW].data;
    a.ring_gates_stride = cache[CACHE_WINDOW].row_bytes / sizeof(float);
    a.n_ring = cache[CACHE_K].n_row;
    a.ring_rows = cache[CACHE_K].timeline_rows;
    a.state = (float *)cache[CACHE_STATE].data;
    a.state_stride = (size_t)cache[CACHE_STATE].timeline_rows * cache[CACHE_STATE].row_bytes / sizeof(float);
    delta_before(layer, a.before);
    a.conv = layer->conv;
    a.conv_bias = layer->conv_bias;
    a.decay = layer->decay;
    a.dt_bias = layer->dt_bias;
    a.skip = layer->skip;
    a.norm = layer->delta_norm;
    a.eps = r->m->rms_eps;
    a.out = c->x16[out];
    a.out_stride = (size_t)r->width[out];
    a.prefetch = prefetch_of_mixer(r, s, 1);
    a.t = c->delta;
    return a;
}

static void cuda_delta_net(struct rank *r, const struct step *s) {
    const struct delta_args a = delta_args_of(r, s);
    delta_launch(&a, r->n_tok, r->pos - r->n_committed, r->cuda->stream);
}

static void cuda_mamba(struct rank *r, const struct step *s) {
    const struct delta_args a = delta_args_of(r, s);
    mamba_launch(&a, r->n_tok, r->pos - r->n_committed, r->cuda->stream);
}

static void cuda_gated_conv(struct rank *r, const struct step *s) {
    const struct layer *layer = &r->m->layers[s->il];
    const struct delta &d = layer->delta;
    struct cuda *c = r->cuda;
    struct gated_conv_args a = {};
    a.batch = batch_of(r);
    a.conv = {c->x32[s->in[1]], (size_t)r->width[s->in[1]], r->cache[s->il][CACHE_V], d.n_conv};
    a.before = c->x32[s->in[0]];
    a.before_stride = (size_t)r->width[s->in[0]];
    a.after = c->x32[s->in[2]];
    a.after_stride = (size_t)r->width[s->in[2]];
    a.taps = layer->conv + (size_t)(d.first_key * d.head_v) * DELTA_TAPS;
    a.out = c->x16[s->out[0]];
    a.out_stride = (size_t)r->width[s->out[0]];
    a.n = d.n_value * d.head_v;
    a.prefetch = prefetch_of_mixer(r, s, 1);
    profile_next(4.0 * a.n * (2 * d.n_conv - 1), "%d channels", a.n);
    gated_conv(&a, r->n_tok, c->stream);
}

/* Adds a compressor to what k_csa_store does: keys of d values from slots `value` and `gate`. Returns the bytes that it
 * reads for a token. */
static double add_compressor(struct rank *r, int il, struct csa_args *a, const struct compressor &with,
                             enum cache_use ring, enum cache_use keys, enum act value, enum act gate, int d) {
    const struct attn shape = r->m->layers[il].attn;
    struct compress_args *to = &a->with[a->n_with++];
    to->ring = r->cache[il][ring];
    to->keys = r->cache[il][keys];
    to->value = r->cuda->x32[value];
    to->gate = gate == ACT_COUNT ? NULL : r->cuda->x32[gate];
    to->stride = (size_t)r->width[value];
    to->ape = with.ape;
    to->norm = with.norm;
    to->d = d;
    to->index = keys == CACHE_INDEX;
    return (double)((with.ape ? shape.compress_ratio * to->ring.width / 2 : 0) + (with.norm ? d : 0)) * sizeof(float) +
           (double)to->ring.row_bytes * shape.pooled / shape.compress_ratio;
}

/* Compressed keys before their rotation, which k_csa_store stores after a product has made the indexer's of them. */
static void cuda_pool_keys(struct rank *r, const struct step *s) {
    const struct layer *layer = &r->m->layers[s->il];
    const enum act out = s->out[0];
    struct csa_args a = {};
    a.rope.batch = batch_of(r);
    a.rope.eps = r->m->rms_eps;
    a.n_tok = r->n_tok;
    a.compress_ratio = layer->attn.compress_ratio;
    a.pooled = layer->attn.pooled;
    const double bytes = add_compressor(r, s->il, &a, layer->compressor, CACHE_WINDOW, CACHE_COMPRESSED, s->in[0],
                                        s->in[1], layer->attn.head_k);
    a.with[0].out = r->cuda->x32[out];
    a.with[0].out16 = r->cuda->x16[out];
    profile_next(bytes, "keys of %d", layer->attn.head_k);
    csa_store(&a, false, r->cuda->stream);
}

/* Makes the indexer's keys of the pools that the batch completes, of the normed keys in A_IK. */
static void pools_store(struct rank *r, int il) {
    const struct layer *layer = &r->m->layers[il];
    struct csa_args a = {};
    a.rope.batch = batch_of(r);
    a.n_tok = r->n_tok;
    a.compress_ratio = layer->attn.compress_ratio;
    a.pooled = layer->attn.pooled;
    const double bytes = add_compressor(r, il, &a, layer->index_compressor, CACHE_INDEX_WINDOW, CACHE_INDEX, A_IK,
                                        A_ICG, layer->attn.index_k);
    profile_next(bytes, "pools of %d keys", a.compress_ratio);
    csa_store(&a, false, r->cuda->stream);
}

/* Keys of all candidates of a query. */
static int candidate_keys(const struct attn &shape) {
    return (int)min((int64_t)shape.candidates * shape.candidate_block, (int64_t)INT_MAX);
}

/* Lists the candidates of queries whose keys have scores, see struct index_args. */
static void list_candidates(struct rank *r, const struct attn &shape, struct index_args a, int32_t *candidates) {
    a.chosen = candidates;
    a.n_topk = a.n_chosen = shape.candidates;
    a.top_k = candidate_keys(shape);
    a.block = a.parts = shape.candidate_block;
    a.local = 1;
    index_kernel *const index_choose = k_index_choose<true>;
    LAUNCH_PDL(index_choose, (unsigned)a.n_tok, CHOOSE_THREADS, 0, r->cuda->stream, a);
}

/* The indexer's keys go to the cache, then the keys of queries that do not see all are chosen. In prefill the host
 * knows which these are. */
static void cuda_select_keys(struct rank *r, const struct step *s) {
    const int il = s->il;
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    const bool blocks = layer->mixer == MIXER_GQA && !shape.index_means, prefill = r->n_tok > DECODE_MAX_TOKENS;
    const bool pools = attn_pools(&shape);
    const int n_index = shape.n_index, width = shape.index_k;
    struct cuda *c = r->cuda;
    struct index_args a = {};
    a.rope = rope_of(r, il, A_IQ, A_IK);
    a.rope.pairs = shape.index_pairs;
    a.rope.kp = csa_keys(r, il)[CACHE_INDEX];
    a.rope.q_norm = layer->index_q_norm;
    a.rope.k_norm = layer->index_norm;
    a.rope.n_head = n_index;
    a.rope.d = width;
    a.bias = layer->index_norm_bias;
    a.bias_eps = shape.index_eps;
    a.turned = shape.index_last ? width - a.rope.rope : 0;
    a.w_stride = (size_t)r->width[A_IW];
    a.score_scale = shape.index_means ? 1.0f : 1.0f / sqrtf((float)(n_index * width));
    a.scores = c->index_scores;
    a.top_k = index_by_block(&shape) ? attn_topk_chosen(&shape) : shape.top_k;
    a.n_list = attn_topk_lists(&shape);
    a.n_topk = attn_topk_blocks(&shape);
    a.n_chosen = attn_topk_chosen(&shape);
    a.block = shape.index_block;
    a.local = shape.index_local;
    a.parts = blocks ? index_parts(a.block) : 1;
    a.n_scores = index_scores_of(layer, r->n_ctx);
    a.together = divisor_of(shape.index_means ? shape.index_block : max(shape.compress_ratio, 1));
    a.n_candidate = shape.candidates;
    a.candidate_block = divisor_of(max(shape.candidate_block, 1));
    const int limit = candidate_keys(shape);
    if (shape.candidate_back) a.n_scores = min(a.n_scores, limit);
    if (shape.index_means) {
        a.means = true;
        a.keep = !prefill; /* the ring has room for such a batch after what a key is made of */
        a.ring = r->cache[il][CACHE_INDEX_WINDOW];
        a.table = rope_table_of(r, shape.rope);
    }
    if (layer->mixer != MIXER_CSA) { /* csa_store has made keys and queries */
        const double ring = a.means ? layer_recent_reads(r->m, layer, r->kv_type, (size_t)(r->pos + r->n_tok)) : 0;
        profile_next(8.0 * width + ring, "%d heads of %d", n_index, width); /* the norms: rows come from L2 */
        if (pools) a.pooled = c->x32[A_IK];
        LAUNCH_PDL(k_index_store, dim3(ceil_div(n_index + 1, 4), (unsigned)r->n_tok), 128, 0, c->stream, a);
    }
    if (pools) pools_store(r, il);
    if (a.means && prefill) {
        const struct short_conv keys = {c->x32[A_IK], (size_t)r->width[A_IK], a.ring, 0};
        keep_conv(r, &keys, 1);
    }
    index_kernel *const index_choose = blocks ? k_index_choose<true> : k_index_choose<false>;
    const int most = INDEX_SCORES / (a.n_list * a.n_scores), rows = blocks ? INDEX_ROWS / a.n_list : (int)INDEX_TOKENS;
    const bool fp8 = a.rope.kp.type == KV_FP8;
    /* the first token that does not see all keys has those of top_k + 1 keys before it, and itself */
    const int dense = prefill ? max(0, min(r->n_tok, (a.top_k + 1) * a.together.n - 1 - r->pos)) : 0,
              step = max(1, min(blocks ? 512 : 64, most));
    for (a.first = dense; a.first < r->n_tok; a.first += step) {
        a.n_tok = min(r->n_tok - a.first, step);
        a.rope.q16 = c->x16[A_IQ] + (size_t)a.first * (size_t)(n_index * width);
        if (!shape.index_means) a.w = c->x32[A_IW] + (size_t)a.first * a.w_stride;
        a.chosen = c->topk_blocks + (size_t)a.first * (size_t)(a.n_list * a.n_topk);
        const int seen = (r->pos + a.first + a.n_tok) / a.together.n;
        const bool among = shape.candidate_back && !(prefill && seen <= limit);
        const int keys = among ? min(seen, limit) : seen, most_keys = among ? a.n_scores : r->n_ctx / a.together.n;
        index_kernel *const index_scores = index_find(width, fp8,
                                                      blocks  ? INDEX_BLOCK
                                                      : among ? INDEX_CANDIDATE
                                                              : INDEX_KEY);
        int32_t *const candidates = c->candidates + (size_t)a.first * (size_t)shape.candidates;
        a.candidates = among ? candidates : NULL;
        a.block_tokens = a.rope.batch.several || among ? 1 : rows;
        const int tokens = min(a.n_tok, a.block_tokens);
        const size_t smem = blocks ? index_queries(tokens * n_index, width, 1) : index_queries(n_index, width, tokens);
        const int tiles = ceil_div(prefill ? keys : most_keys, INDEX_THREADS / 32 * INDEX_KEYS);
        const dim3 grid((unsigned)max(1, min(tiles, 2 * c->n_sm)), ceil_div(a.n_tok, a.block_tokens));
        if (smem > 48 << 10) cudaFuncSetAttribute(index_scores, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
        profile_next((double)keys * (double)(a.rope.kp.row_bytes + cache_scale_bytes(&a.rope.kp)), "%d keys", keys);
        LAUNCH_PDL(index_scores, grid, INDEX_THREADS, smem, c->stream, a);
        LAUNCH_PDL(index_choose, (unsigned)(a.n_tok * a.n_list), CHOOSE_THREADS, 0, c->stream, a);
        if (shape.candidates && !shape.candidate_back) list_candidates(r, shape, a, candidates);
    }
}

/* Latent attention of a long prefill: wk_b and wv_b make keys and values of the context's latents, a segment at a time,
 * and attention runs over these. */
static void mla_attend_expanded(struct rank *r, int il, enum act q, enum act out) {
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    const struct cache_tensor *cache = r->cache[il];
    struct cuda *c = r->cuda;
    const int latent = shape.kv_lora, rope = layer_rope_dim(r->m, layer), nope = layer_nope(r->m, layer);
    const int width = latent + rope, v = shape.head_v, heads = shape.n_head, len = r->pos + r->n_tok;
    const bool fp8 = cache[CACHE_K].type == KV_FP8;
    const struct device_matrix *wk_b = layer->wk_b.copy;
    struct device_matrix w = *wk_b;
    w.codes = c->mla.wk_b;
    w.scales = NULL;
    w.n_out = nope;
    w.n_in = latent;
    w.n_rt = (int)ceil_div(nope, TILE_ROWS);
    w.n_kt = (int)ceil_div(latent, TILE_COLS);
    w.fmt = FMT_F16;
    LAUNCH_PDL(k_transpose, (unsigned)(heads * w.n_rt * w.n_kt), 256, 0, c->stream, *wk_b, w);
    struct mla_args a = {};
    a.q = c->x16[q];
    a.q_rope = c->q_absorbed;
    a.out = c->x16[out];
    a.out_stride = (size_t)r->width[out];
    a.buffer = c->mla;
    a.buffer.segment = MLA_SEGMENT;
    a.sums = (float *)c->latent_out;
    a.n_tok = r->n_tok;
    a.n_head = heads;
    a.latent = latent;
    a.pos = r->pos;
    a.factor = shape.scale * 1.44269504f; /* log2 e */
    for (a.first = 0; a.first < len; a.first += MLA_SEGMENT) {
        a.n_key = min(len - a.first, (int)MLA_SEGMENT);
        LAUNCH_PDL((fp8 ? k_mla_latents<1> : k_mla_latents<0>), ceil_div(a.n_key * width, 2048), 256, 0, c->stream,
                   batch_of(r), cache[CACHE_K], cache[CACHE_V], latent, rope, a.first, a.n_key, c->mla.latents);
        matmul(r, &w, c->mla.latents, (size_t)width, 0, a.n_key, heads, c->mla.keys, NULL, (size_t)nope,
               (size_t)a.buffer.segment * (size_t)nope);
        matmul(r, layer->wv_b.copy, c->mla.latents, (size_t)width, 0, a.n_key, heads, c->mla.values, NULL, (size_t)v,
               (size_t)a.buffer.segment * (size_t)v);
        profile_next((double)a.n_key * heads * (nope + v) * 2, "%d keys", a.n_key);
        mla_launch(&a, nope, rope, v, c->stream);
    }
}

/* Latent attention of a decode forward: queries into the latent space, attention there, and values out of it. */
static void mla_attend_decode(struct rank *r, const struct step *s, struct rope_args rope) {
    const int il = s->il;
    const enum act out = s->out[0];
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    struct cuda *c = r->cuda;
    const struct mla_query_args query = {rope, *layer->wk_b.copy, r->n_tok};
    profile_matrices(&query.w, shape.n_head, 0);
    mla_query(&query, c->stream);
    struct mla_value_args value = {};
    struct attn_args a = {};
    a.prefetch = prefetch_of_mixer(r, s, 1);
    choose_keys(r, shape, &a);
    value.attn = attend(r, il, c->q_absorbed, rope.latent + rope.rope, NULL, 0, rope.latent, 1, a);
    value.w = *layer->wv_b.copy;
    value.parts = c->mla_parts;
    value.arrived = c->mla_arrived;
    value.out = c->x16[out];
    value.out_stride = (size_t)r->width[out];
    profile_matrices(&value.w, shape.n_head, 0);
    mla_value(&value, c->stream);
}

/* The same of a prefill. */
static void mla_attend_prefill(struct rank *r, const struct step *s, struct rope_args p) {
    const int il = s->il;
    const enum act q = s->in[0], out = s->out[0];
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    struct cuda *c = r->cuda;
    LAUNCH_PDL(k_rope_mla, dim3(1 + ceil_div(p.n_head, 4), (unsigned)r->n_tok), 128, 0, c->stream, p);
    struct attn_args a = {};
    choose_keys(r, shape, &a);
    if (!a.top_k && mla_expands_on_gpu(r->m, layer, r->n_tok)) {
        mla_attend_expanded(r, il, q, out);
        return;
    }
    const size_t key = (size_t)(shape.kv_lora + layer_rope_dim(r->m, layer)), lat = (size_t)shape.kv_lora;
    const size_t heads = (size_t)shape.n_head, head_k = (size_t)shape.head_k;
    matmul(r, layer->wk_b.copy, c->x16[q], heads * head_k, head_k, r->n_tok, shape.n_head, c->q_absorbed, NULL,
           heads * key, key);
    attend(r, il, c->q_absorbed, (int)key, c->latent_out, heads * lat, shape.kv_lora, 1, a);
    matmul(r, layer->wv_b.copy, c->latent_out, heads * lat, lat, r->n_tok, shape.n_head, c->x16[out], NULL,
           (size_t)r->width[out], (size_t)shape.head_v);
}

/* Queries go into the latent space, attention mixes latents, and these come out as values (arXiv 2405.04434, appendix
 * C). Not so for many tokens, see mla_expands_on_gpu. Then the heads' gates, where there are some. */
static void cuda_mla_attention(struct rank *r, const struct step *s) {
    const struct layer *layer = &r->m->layers[s->il];
    const struct rope_args p = rope_of(r, s->il, s->in[0], s->in[1]);
    if (r->n_tok <= DECODE_MAX_TOKENS) mla_attend_decode(r, s, p);
    else mla_attend_prefill(r, s, p);
    if (layer->attn.n_gate) head_gates(r, layer, s->out[0]);
}

static void cuda_csa_store(struct rank *r, const struct step *s) {
    const int il = s->il;
    const enum act q = s->in[0], kv = s->in[1];
    const struct layer *layer = &r->m->layers[il];
    const struct attn shape = layer->attn;
    struct cuda *c = r->cuda;
    struct csa_args a = {};
    a.rope = rope_of(r, il, q, kv);
    a.table = rope_table_of(r, shape.rope);
    a.n_tok = r->n_tok;
    a.compress_ratio = shape.compress_ratio;
    a.pooled = shape.pooled;
    a.plain_q = shape.plain_q;
    a.round = r->m->qat ? r->m->family->qat : ROUNDS_NOTHING;
    if (layer->attn.n_index) {
        a.index_q = c->x32[A_IQ];
        a.index_q16 = c->x16[A_IQ];
        a.index_stride = (size_t)r->width[A_IQ];
        a.n_index = shape.n_index;
        a.index_k = shape.index_k;
    }
    double bytes = 4.0 * shape.head_k; /* norms; what compressed keys are made of; queries come from L2 */
    const bool makes = csa_makes_keys(layer);
    if (makes && shape.latent_index) {
        struct compressor index = {};
        index.norm = layer->index_norm;
        add_compressor(r, il, &a, compressor{}, CACHE_WINDOW, CACHE_COMPRESSED, s->in[2], ACT_COUNT, shape.head_k);
        add_compressor(r, il, &a, index, CACHE_WINDOW, CACHE_INDEX, s->in[4], ACT_COUNT, shape.index_k);
        bytes += 4.0 * shape.index_k;
        a.latents = true;
        a.n_with = 0; /* it makes none of several tokens */
    } else if (makes) {
        bytes += add_compressor(r, il, &a, layer->compressor, CACHE_WINDOW, CACHE_COMPRESSED, A_CK, A_CG, shape.head_k);
    }
    if (makes && layer->attn.n_index && !shape.latent_index)
        bytes += add_compressor(r, il, &a, layer->index_compressor, CACHE_INDEX_WINDOW, CACHE_INDEX, A_ICK, A_ICG,
                                shape.index_k);
    profile_next(bytes, "%d heads of %d", shape.n_head + 1, shape.head_k);
    csa_store(&a, true, c->stream);
}

static void cuda_csa_attention(struct rank *r, const struct step *s) {
    const int il = s->il;
    const enum act q = s->in[0], out = s->out[0];
    const struct attn shape = r->m->layers[il].attn;
    const struct rope_table table = rope_table_of(r, shape.rope);
    struct cuda *c = r->cuda;
    struct attn_args a = {};
    if (shape.top_k) {
        a.top_k = shape.top_k;
        a.chosen = c->topk_blocks;
        a.n_topk = attn_topk_blocks(&shape);
    }
    a.one_kv = true;
    a.compress_ratio = shape.compress_ratio;
    a.rope.cs = table.cs;
    a.rope.sn = table.sn;
    a.rope.rope = 2 * table.n;
    if (r->n_tok <= DECODE_MAX_TOKENS) a.arrived = c->attn_arrived;
    a.prefetch = prefetch_of_mixer(r, s, 1);
    attend(r, il, c->x16[q], shape.head_k, c->x16[out], (size_t)r->width[out], shape.head_v, 1, a);
}

static void cuda_group_linear(struct rank *r, const struct step *s) {
    const struct weight *w = s->w[0];
    const enum act x = s->in[0], out = s->out[0];
    const struct device_matrix *d = w->copy;
    struct cuda *c = r->cuda;
    if (r->n_tok > DECODE_MAX_TOKENS) {
        matmul(r, d, c->x16[x], (size_t)r->width[x], (size_t)w->n_in, r->n_tok, w->n_expert, c->x16[out], NULL,
               (size_t)r->width[out], (size_t)w->n_out);
        return;
    }
    struct linear_args p = {};
    p.w[0] = *d;
    p.y16 = c->x16[out];
    p.y_stride[0] = (size_t)r->width[out];
    p.n_tok = r->n_tok;
    p.x = c->x16[x];
    p.x_stride = (size_t)r->width[x];
    profile_matrices(d, d->n_expert, 0);
    gemv_groups(&p, c->stream);
}

/* ============================================================================================================
 * Operations: feed-forward
 *
 * Dense feed-forwards, and router and experts, in decode and in prefill.
 * ============================================================================================================ */

/* Adds the squared inputs of feed-forward `ffn` of a layer, x and hidden rows, to in_sum2. first, rows: as in
 * k_in_sum2. */
static void in_sum2_add(struct rank *r, int il, int ffn, enum act x, const uint16_t *hidden, const int32_t *first,
                        const int32_t *rows) {
    struct ffn_weights ffns[2];
    layer_ffns(&r->m->layers[il], ffns);
    if (!r->in_sum2) return;
    float *out = r->in_sum2 + in_sum2_before(r->m, il) + (ffn ? ffn_in_sum2(&ffns[0]) : 0);
    const int n_in = ffns[ffn].up->n_in, n_ff = ffns[ffn].up->n_out, n_e = ffns[ffn].up->n_expert;
    LAUNCH_PDL(k_in_sum2, dim3(ceil_div(n_in, 256), (unsigned)n_e), 256, 0, r->cuda->stream, r->cuda->x16[x],
               (size_t)r->width[x], first, rows, r->n_tok, n_in, 1.0f, out);
    LAUNCH_PDL(k_in_sum2, dim3(ceil_div(n_ff, 256), (unsigned)n_e), 256, 0, r->cuda->stream, hidden, (size_t)n_ff,
               first, (const int32_t *)NULL, r->n_tok, n_ff, HIDDEN_SCALE * HIDDEN_SCALE,
               out + (size_t)n_e * (size_t)n_in);
}

/* The feed-forwards that a step runs: those of its layer, or where they are parts the dense one or the experts. Returns
 * how many. */
static int step_ffns(const struct rank *r, int il, bool dense, struct ffn_weights out[2]) {
    const int n = layer_ffns(&r->m->layers[il], out);
    if (!layer_parts(r->m, &r->m->layers[il])) return n;
    if (dense) out[0] = out[1];
    return 1;
}

/* How the feed-forward of a layer whose first matrix is `gate` joins gate and up. */
static struct glu ffn_glu(const struct layer *layer, const struct weight *gate) {
    return gate == &layer->gate ? layer->glu : layer->sh_glu;
}

/* The first products of a feed-forward, in g: gate and up joined, or up alone. Returns whether there is a gate. */
static bool ffn_products(const struct layer *layer, const struct ffn_weights *ffn, struct gemm_args *g) {
    g->square = layer->ungated;
    g->w = layer->ungated ? *ffn->up->copy : *ffn->gate->copy;
    if (!layer->ungated) g->w2 = *ffn->up->copy;
    g->glu = ffn_glu(layer, ffn->gate);
    return !layer->ungated;
}

/* out (+)= down(silu(gate x) * (up x)) of feed-forward `ffn` of a layer in prefill. */
static void dense_ffn_prefill(struct rank *r, int il, int ffn, enum act x, enum act out) {
    struct cuda *c = r->cuda;
    struct ffn_weights ffns[2];
    layer_ffns(&r->m->layers[il], ffns);
    const struct weight *up = ffns[ffn].up, *down = ffns[ffn].down;
    struct gemm_args g = {};
    const bool gated = ffn_products(&r->m->layers[il], &ffns[ffn], &g);
    g.x = c->x16[x];
    g.x_stride = (size_t)r->width[x];
    g.n_tok = r->n_tok;
    g.y = c->hidden_shared;
    g.y_stride = (size_t)up->n_out;
    profile_matrices(&g.w, 1 + gated, 0);
    gemm_prefill(&g, gated, c->stream);
    in_sum2_add(r, il, ffn, x, c->hidden_shared, NULL, NULL);
    struct device_matrix d = *down->copy;
    d.decode_scale *= HIDDEN_SCALE;
    matmul(r, &d, c->hidden_shared, (size_t)up->n_out, 0, r->n_tok, 0, NULL, c->x32[out], (size_t)r->width[out], 0);
}

/* The cache of a layer's experts; n_slot 0: all of them are on the GPU, or none. */
static struct expert_cache expert_cache_of(const struct rank *r, int visit) {
    const int il = layer_of_block(r->m, r->m->layers[visit].block); /* visits of a layer have its slots */
    const struct layer *layer = &r->m->layers[il];
    struct expert_cache a = r->cuda->cache;
    const struct offload o = r->cuda->sizes.offload;
    const int held = layer_held(r->m, il, o), n_expert = r->m->n_expert_max;
    if (held == layer->n_expert) return a;
    a.n_slot = held;
    a.slot_of += (size_t)il * (size_t)(n_expert + 1);
    a.heat += (size_t)il * (size_t)(n_expert + 1);
    a.expert_of += (size_t)il * (size_t)o.n_slot;
    a.count += 2 * il;
    a.shift = heat_shift(held, layer->n_expert_used);
    return a;
}

/* What k_fetch needs of a matrix whose rows are in the host's memory. */
static struct fetch_matrix fetch_matrix_of(const struct weight *w) {
    struct fetch_matrix a = {};
    a.w = *w->copy;
    a.how.type = w->type;
    a.how.row_bytes = gguf_row_bytes(w->type, (size_t)w->n_in);
    a.how.shift = a.w.shift;
    a.how.factor = ldexpf(1, a.w.shift);
    a.home = w->data;
    a.expert_bytes = w->expert_bytes;
    a.row_stride = w->row_bytes;
    const int step = max(1, (int)gguf_type_info(w->type).block / TILE_COLS); /* tiles of the shortest part */
    const int step_bytes = (int)gguf_row_bytes(w->type, (size_t)step * TILE_COLS),
              n_step = (int)ceil_div(a.w.n_kt, step);
    const int most = (FETCH_SHARED / TILE_ROWS - 32) / step_bytes;
    const int steps = (int)ceil_div(n_step, (int)ceil_div(n_step, most)); /* of a part */
    a.part_tiles = steps * step;
    a.part_bytes = steps * step_bytes;
    a.n_part = (int)ceil_div(a.w.n_kt, a.part_tiles);
    a.pitch = (a.part_bytes + 15 + 15) / 16 * 16;
    return a;
}

/* Launches k_fetch with n blocks. */
static void fetch(const struct fetch_args *p, int n, cudaStream_t s) {
    int pitch = 0;
    for (int i = 0; i < p->n_matrix; i++) pitch = max(pitch, p->m[i].pitch);
    cudaFuncSetAttribute(k_fetch, cudaFuncAttributeMaxDynamicSharedMemorySize, FETCH_SHARED);
    LAUNCH_PDL(k_fetch, (unsigned)n, 256, (size_t)(TILE_ROWS * pitch), s, *p);
}

/* The question for what `a` will copy of layer il, from the matrix `first` on; without a store none, and the experts are
 * there. */
static struct want_args want_of(const struct rank *r, int il, const struct fetch_args *a, int first) {
    struct want_args w = {};
    if (!(w.question = r->wanted)) return w;
    w.p = tp_rank_of(r);
    w.expert = w.question->expert;
    w.at = w.question->at;
    w.item = a->item;
    w.n = a->n;
    w.first = a->first;
    w.most = a->most;
    w.layer = il;
    w.matrix = first;
    w.n_matrix = a->n_matrix;
    w.brought = r->cuda->brought;
    return w;
}

static void want(const struct want_args *a, cudaStream_t s) {
    if (a->question) LAUNCH_PDL(k_want_experts, 1, 256, 0, s, *a);
}

/* Waits for the latest question. */
static void take_brought(const struct want_args *a, cudaStream_t s) {
    if (a->question) LAUNCH_PDL(k_brought_experts, 1, 256, 0, s, *a);
}

/* Copies the experts that a decode forward misses into their slots. */
static void fetch_missing(struct rank *r, int il, const struct expert_cache *cache) {
    const struct layer *layer = &r->m->layers[il];
    const struct weight *const w[] = {&layer->gate, &layer->up, &layer->down};
    struct fetch_args a = {};
    for (const struct weight *x : w)
        if (x->data) a.m[a.n_matrix++] = fetch_matrix_of(x);
    a.item = cache->missing;
    a.n = cache->n_missing;
    a.most = cache->n_slot;
    const struct want_args q = want_of(r, il, &a, layer->ungated ? FFN_UP : FFN_GATE);
    a.brought = q.brought;
    want(&q, r->cuda->stream);
    take_brought(&q, r->cuda->stream);
    fetch(&a, FETCH_BLOCKS, r->cuda->stream);
}

/* Tokens of which a decode forward's routed experts are computed at once: all, or as many as have a slot for each of
 * their experts, and as the store can be asked for. */
static int decode_group(const struct rank *r, int il) {
    const struct layer *layer = &r->m->layers[il];
    const struct offload o = r->cuda->sizes.offload;
    const int held = layer_held(r->m, il, o), most = o.n_ask ? min(held, o.n_ask) : held;
    return held && held < layer->n_expert ? min(r->n_tok, most / layer->n_expert_used) : r->n_tok;
}

/* y (n_tok, n_out) = w x in halves, of a latent matrix. decode: at most DECODE_MAX_TOKENS tokens. */
static void latent_rows(struct rank *r, const struct device_matrix *w, const uint16_t *x, size_t x_stride, int n_tok,
                        uint16_t *y, bool decode) {
    if (decode) {
        struct linear_args p = {};
        p.w[0] = *w;
        p.y16 = y;
        p.y_stride[0] = (size_t)w->n_out;
        p.n_tok = n_tok;
        p.x = x;
        p.x_stride = x_stride;
        profile_matrices(w, 1, 0);
        gemv_groups(&p, r->cuda->stream); /* a matrix with one group */
        return;
    }
    struct gemm_args g = {};
    g.w = *w;
    g.x = x;
    g.x_stride = x_stride;
    g.n_tok = n_tok;
    g.y = y;
    g.y_stride = (size_t)w->n_out;
    profile_matrices(w, 1, 0);
    gemm_prefill(&g, 0, r->cuda->stream);
}

/* The rows that latent_up multiplies, of n_tok tokens: A_LATENT_SUM, or the norm of its sum over the ranks, from the
 * rank's columns on. */
static const uint16_t *latent_norm(struct rank *r, const struct layer *layer, int n_tok) {
    struct cuda *c = r->cuda;
    float *sum = c->x32[A_LATENT_SUM];
    if (!layer->latent_norm) return c->x16[A_LATENT_SUM];
    struct norm_args a = norm_of(r, sum, n_tok, layer->n_latent, NULL, layer->latent_norm, A_LATENT_SUM);
    if (rank_alone(r)) {
        add_norm<PARTIAL_OWN>(&a, (unsigned)n_tok, c->stream);
        return c->x16[A_LATENT_SUM];
    }
    a.x = NULL;
    a.partial = sum;
    all_reduce(r, a, layer->n_latent <= r->m->n_embd); /* NCCL's buffers have room for a row of n_embd values */
    return c->x16[A_LATENT_SUM] + layer->first_latent;
}

/* What the routed experts of a step that reads x read, or are made a latent of. */
static enum act experts_read(const struct rank *r, enum act x) { return r->m->family->early_experts ? A_ROUTED : x; }

/* The feed-forwards of a step in decode, of tokens first .. first + n - 1, at most 16. routed: the first of them is the
 * routed experts, of which `held` are on the GPU; 0: the CPU computes them. */
static void ffn_decode(struct rank *r, int il, bool routed, int held, int first, int n, enum act x, enum act out) {
    struct cuda *c = r->cuda;
    float *y = c->x32[out] + (size_t)first * (size_t)r->width[out];
    const struct layer *layer = &r->m->layers[il];
    const bool latent = layer->n_latent && held;
    struct ffn_weights ffns[2];
    struct glu_args u = {};
    u.n_entry = step_ffns(r, il, !routed, ffns);
    u.n_tok = n;
    for (int i = 0; i < u.n_entry; i++) {
        const enum act from = i || !routed ? x : latent ? A_LATENT : experts_read(r, x);
        u.x[i] = c->x16[from] + (size_t)first * (size_t)r->width[from];
        u.x_stride[i] = (size_t)r->width[from];
    }
    if (latent) latent_rows(r, layer->latent_down.copy, u.x[1], u.x_stride[1], n, (uint16_t *)u.x[0], true);
    if (routed)
        u.jobs = {c->route.jobs, c->route.job_weight, held ? c->route.n_jobs : c->no_jobs,
                  held ? min(n * layer->n_expert_used, layer->n_expert) : 0};
    u.shared_weight = routed && layer->sh_weight ? c->route.shared_weight : NULL;
    const double jobs[2] = {!routed ? 1 : held ? experts_expected(layer, n) : 0, 1}; /* matrices that are read */
    struct device_matrix down[2] = {};
    for (int i = 0; i < u.n_entry; i++) {
        if (!layer->ungated) u.gate[i] = *ffns[i].gate->copy;
        u.up[i] = *ffns[i].up->copy;
        u.glu[i] = ffn_glu(layer, ffns[i].gate);
        u.y[i] = routed && !i ? c->hidden : c->hidden_shared;
        down[i] = *ffns[i].down->copy;
        down[i].decode_scale *= HIDDEN_SCALE;
        profile_matrices(&u.up[i], (2 - layer->ungated) * jobs[i], 0);
    }
    u.weighs_input = layer->weighs_input;
    u.down_scale = down[0].scale;
    u.down_scale_max = down[0].scale_max;
    gemv_glu(&u, c->stream);
    if (!routed) {
        matmul(r, &down[0], u.y[0], (size_t)down[0].n_in, 0, n, 0, NULL, y, (size_t)r->width[out], 0);
        return;
    }
    struct down_args d = {};
    d.w = down[0];
    d.hidden = c->hidden;
    d.hidden_stride = (size_t)down[0].n_in;
    d.jobs = u.jobs;
    d.n_tok = n;
    if (latent) { /* their sum is the input of a job for all tokens; without a norm it stays divided by HIDDEN_SCALE */
        if (!layer->latent_norm) d.w.decode_scale /= HIDDEN_SCALE;
        d.y = c->x32[A_LATENT_SUM];
        d.y16 = c->x16[A_LATENT_SUM];
        d.y_stride = (size_t)layer->n_latent;
        profile_matrices(&down[0], jobs[0], 0);
        gemv_down(&d, c->stream);
        d.hidden = latent_norm(r, layer, n);
        d.hidden_stride = d.y_stride;
        d.jobs = {c->one_job + n, NULL, &c->one_job->expert, 1};
    }
    if (layer->n_latent) {
        d.w = down[0] = *layer->latent_up.copy;
        if (!layer->latent_norm) d.w.decode_scale *= HIDDEN_SCALE;
    }
    d.shared = down[1];
    d.hidden_shared = c->hidden_shared;
    d.y = y;
    d.y_stride = (size_t)r->width[out];
    for (int i = 0; i < u.n_entry; i++) profile_matrices(&down[i], latent ? 1 : jobs[i], 0);
    gemv_down(&d, c->stream);
}

/* A layer's routed experts in decode by the CPU, and the shared one. Ranks of a stage but the first add nothing. */
static void experts_by_cpu(struct rank *r, int il, enum act x, enum act out) {
    struct cuda *c = r->cuda;
    struct ffn_weights ffns[2];
    const bool shared = step_ffns(r, il, false, ffns) > 1;
    struct ask_args a = {};
    if (r->question) {
        a.p = tp_rank_of(r);
        a.question = r->question;
        a.job = a.question->job;
        a.weight = a.question->weight;
        a.x = a.question->x;
        a.y = a.question->y;
    }
    a.layer = il;
    a.n_tok = r->n_tok;
    a.n_embd = r->m->n_embd;
    a.jobs = c->route.jobs;
    a.job_weight = c->route.job_weight;
    a.n_jobs = c->route.n_jobs;
    a.from = c->x16[experts_read(r, x)];
    a.from_stride = (size_t)r->width[x];
    a.to = c->x32[out];
    a.to_stride = (size_t)r->width[out];
    a.first = !shared;
    if (r->question) LAUNCH_PDL(k_ask_experts, (unsigned)a.n_tok, 256, 0, c->stream, a);
    if (shared) ffn_decode(r, il, true, 0, 0, r->n_tok, x, out);
    if (r->question || !shared) LAUNCH_PDL(k_add_experts, (unsigned)a.n_tok, 256, 0, c->stream, a);
}

/* Lets g, of the matrices from `from` on, gate and up joined (glu) or one of up and down, multiply the experts that
 * have a slot, and then the others: waves of them pass through the ring. A stream of its own copies a wave while the
 * one before is multiplied. */
static void experts_in_waves(struct rank *r, int il, const struct expert_cache *cache, const struct sort_args *s,
                             struct gemm_args g, int glu, enum ffn_matrix from) {
    struct cuda *c = r->cuda;
    const struct layer *layer = &r->m->layers[il];
    static const char what[] = "copying experts";
    const struct weight *const all[] = {&layer->gate, &layer->up, &layer->down}, *const *const w = all + from;
    struct fetch_matrix m[RING_PARTS][FFN_MATRICES] = {};
    struct fetch_args a = {};
    uint8_t *at = c->ring;
    size_t bytes = 0; /* of an expert */
    for (int i = 0; i < 1 + glu; i++) bytes += experts_gpu_bytes(w[i], 1);
    const int absent = layer->n_expert - (c->slots_emptied ? 0 : cache->n_slot);
    const int most = min(absent, s->n_choices); /* experts of the list */
    const int n_ask = c->sizes.offload.n_ask, ask = n_ask ? min(n_ask, most) : most;
    const int n_ring = (int)min(expert_ring_bytes(c->shard) / RING_PARTS / bytes, (size_t)ask); /* of a part */
    for (int part = 0; part < RING_PARTS; part++)
        for (int i = 0; i < 1 + glu; i++) {
            struct device_matrix &d = (m[part][i] = fetch_matrix_of(w[i])).w;
            const size_t tiles = (size_t)n_ring * (size_t)d.n_rt * (size_t)d.n_kt;
            d.n_held = n_ring;
            d.codes = at;
            at += tiles * TILE_BYTES(d.fmt);
            if (d.scales) d.scales = at, at += tiles * TILE_SCALES;
        }
    /* A kernel that loads weights before the one in front has ended must not do so before they are copied. */
    const bool overlap = launches_overlap;
    launches_overlap = false;
    struct wave_args list = {*cache, s->first, layer->n_expert, n_ring, c->place};
    if (from == FFN_DOWN) list.cache.count = NULL; /* the same experts as for gate and up */
    LAUNCH_PDL(k_wave_list, 1, EXPERTS_MAX, 0, c->stream, list);
    a.n_matrix = 1 + glu;
    a.item = cache->missing;
    a.n = cache->n_missing;
    a.most = n_ring;
    /* A profile times one launch after the other; short forwards with statistics are recorded. */
    const bool beside = !profile.row && r->n_tok > DECODE_MAX_TOKENS;
    const cudaStream_t copies = beside ? c->side : c->stream;
    auto record = [&](cudaEvent_t e, cudaStream_t on) { beside &&CUDA_OK(r, cudaEventRecord(e, on), what); };
    auto wait = [&](cudaStream_t on, cudaEvent_t e) { beside &&CUDA_OK(r, cudaStreamWaitEvent(on, e, 0), what); };
    struct gemm_args ready = g;
    ready.place = cache->slot_of;
    ready.n_place = cache->n_slot;
    record(c->listed, c->stream);
    wait(copies, c->listed);
    g.place = c->place;
    g.n_place = n_ring;
    struct want_args q = want_of(r, il, &a, from);
    a.brought = q.brought;
    want(&q, copies);
    for (int wave = 0; wave * n_ring < most; wave++) {
        const int part = wave % RING_PARTS;
        memcpy(a.m, m[part], sizeof m[part]);
        a.first = g.place_first = q.first = wave * n_ring;
        take_brought(&q, copies);
        q.first += n_ring;
        if (q.first < most) want(&q, copies); /* is read while this wave is copied */
        if (wave >= RING_PARTS) wait(copies, c->multiplied[part]);
        fetch(&a, beside ? FETCH_BESIDE : FETCH_BLOCKS, copies);
        record(c->copied[part], copies);
        if (!wave && cache->n_slot) gemm_prefill(&ready, glu, c->stream);
        for (int i = 0; i < 1 + glu; i++) {
            (i ? g.w2 : g.w).codes = m[part][i].w.codes;
            (i ? g.w2 : g.w).scales = m[part][i].w.scales;
        }
        wait(c->stream, c->copied[part]);
        gemm_prefill(&g, glu, c->stream);
        record(c->multiplied[part], c->stream);
    }
    launches_overlap = overlap;
}

/* to = from, n vectors. Grid: ceil(n / 256), block: 256. Moves 32 bytes a vector: latency. */
__global__ void __launch_bounds__(256) k_keep_input(const float4 *from, float4 *to, size_t n) {
    grid_dependency_launch();
    grid_dependency_wait();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) to[i] = from[i];
}

/* The router, the experts and the shared one. norm: what x is where the router makes it, for norm_fuses; otherwise x
 * holds it.
 * Decode: the router makes jobs of the experts that are used, and the GEMV kernels run them, or the CPU; where these
 * experts may need more than the slots, a group of tokens after the other. Prefill, and any forward whose statistics are
 * collected: tokens are sorted by expert, and grouped GEMMs run over the list; the results are weighted and added at the
 * end. */
static void routed_ffn(struct rank *r, const struct step *step, struct norm_input norm) {
    const int il = step->il;
    const enum act x = step->in[0], out = step->out[0];
    const enum act reads = r->m->family->routes_input ? step->in[1] : x; /* of the router */
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    struct cuda *c = r->cuda;
    const struct expert_cache cache = expert_cache_of(r, il);
    const int held = layer_held(m, il, c->sizes.offload);
    const bool partly = held < layer->n_expert;
    struct route_args p = c->route;
    if (router_halves(&layer->router)) p.w16 = (const uint16_t *)layer->router.data;
    else p.w32 = (const float *)layer->router.data;
    p.logit_bias = layer->router.bias;
    p.bias = layer->router_bias;
    p.shared = layer->sh_weight;
    p.given = layer->expert_ids;
    p.tokens = c->tokens;
    p.x = c->x32[reads];
    p.n_tok = r->n_tok;
    p.n_expert = layer_routes(layer);
    p.n_zero = layer->n_zero;
    p.k = layer->n_expert_used;
    if (r->n_tok <= DECODE_MAX_TOKENS && !r->stats) { /* statistics need rows sorted by expert */
        const int group = decode_group(r, il);
        p.input = norm;
        p.input.h16 = c->x16[x];
        p.prefetch = prefetch_of_ffn(r, step);
        p.cache = cache;
        for (int first = 0; first < r->n_tok; first += group) {
            p.n_tok = min(group, r->n_tok - first);
            p.x = c->x32[reads] + (size_t)first * (size_t)r->width[x];
            p.tokens = c->tokens + first;
            if (layer->n_zero) p.zero_weight = c->route.zero_weight + first;
            profile_next((p.n_expert * (p.w16 ? 2.0 : 4.0) + (p.shared ? 4 : 0)) * m->n_embd, "%dx%d %s", p.n_expert,
                         m->n_embd, p.w16 ? "bf16" : "f32");
            route_decode(&p, c->stream);
            if (cache.n_slot) fetch_missing(r, il, &cache);
            if (held) ffn_decode(r, il, true, held, first, p.n_tok, x, out);
            else experts_by_cpu(r, il, x, out);
        }
        return;
    }
    LAUNCH_PDL(k_route_logits, dim3(ceil_div(p.n_expert, 64), ceil_div(r->n_tok, 64)), 256, 0, c->stream, p);
    LAUNCH_PDL(k_route_prefill, ceil_div(r->n_tok, 4), 128, 4 * 2 * sizeof(float) * (size_t)p.n_expert, c->stream, p);
    struct sort_args s = c->sort;
    s.k = p.k;
    s.n_choices = r->n_tok * s.k;
    s.n_expert = layer->n_expert;
    LAUNCH_PDL(k_sort, (unsigned)layer->n_expert, 256, 0, c->stream, s);
    LAUNCH_PDL(k_tiles, 1, EXPERTS_MAX, 0, c->stream, s, (int)TN);
    const enum act in = layer->n_latent ? A_LATENT : experts_read(r, x); /* what routed experts read */
    const int n = layer->n_latent ? layer->n_latent : r->width[out];
    struct ffn_weights ffns[2];
    const bool shared = step_ffns(r, il, false, ffns) > 1;
    if (shared) dense_ffn_prefill(r, il, 1, x, out);
    if (layer->n_latent)
        latent_rows(r, layer->latent_down.copy, c->x16[x], (size_t)r->width[x], r->n_tok, c->x16[in], false);
    struct gemm_args g = {};
    const bool gated = ffn_products(layer, &ffns[0], &g);
    g.x = c->x16[in];
    g.x_stride = (size_t)r->width[in];
    g.rows = s.row;
    g.tile_expert = s.tile_expert;
    g.tile_first = s.tile_first;
    g.tile_count = s.tile_count;
    g.n_tiles = s.n_tiles;
    g.max_tiles = s.n_choices / TN + (layer->n_expert < s.n_choices ? layer->n_expert : s.n_choices);
    g.n_tok = s.n_choices;
    g.y = c->hidden;
    g.y_stride = (size_t)layer->up.n_out;
    if (layer->weighs_input) {
        profile_next(0, "%d rows", s.n_choices); /* from L2 */
        LAUNCH_PDL(k_weigh_inputs, (unsigned)s.n_choices, ROW_THREADS, 0, c->stream, g.x, g.x_stride, s.inverse,
                   p.weight, s.k, n, c->expert_out);
        g.x = c->expert_out; /* has nothing else yet */
        g.x_stride = (size_t)n;
        g.rows = NULL;
    }
    const bool w4a4 = r->cuda->sizes.w4a4 && g.w.fmt == FMT_FP4 && layer->down.copy->fmt == FMT_FP4;
    auto experts = [&](int glu, enum ffn_matrix from, int n_row, struct fp4_rows rows) {
        if (w4a4) quantize_fp4(g.x, g.x_stride, n_row, g.w.n_in, g.xq = rows, c->stream);
        profile_matrices(&g.w, (1 + glu) * experts_expected(layer, r->n_tok), 0);
        if (partly) experts_in_waves(r, il, &cache, &s, g, glu, from);
        else gemm_prefill(&g, glu, c->stream);
    };
    experts(gated, gated ? FFN_GATE : FFN_UP, layer->weighs_input ? s.n_choices : r->n_tok, c->x4);
    in_sum2_add(r, il, 0, in, c->hidden, s.first, s.row);
    g.w = *layer->down.copy;
    g.square = 0;
    g.bias_factor = 1 / HIDDEN_SCALE;
    g.x = c->hidden; /* divided by HIDDEN_SCALE, and so is expert_out */
    g.x_stride = g.y_stride;
    g.rows = NULL;
    g.y = c->expert_out;
    g.y_stride = (size_t)n;
    experts(0, FFN_DOWN, s.n_choices, c->hidden4);
    if (r->stats) {
        struct stats_args a = {c->expert_out, n,    s.k,      s.first,
                               s.row,         s.id, p.weight, r->stats + (size_t)il * (size_t)m->n_expert_max * STATS};
        LAUNCH_PDL(k_stats, (unsigned)layer->n_expert, 256, 0, c->stream, a);
    }
    auto combine = [&](const int32_t *inverse, int k, bool whole) {
        LAUNCH_PDL(k_combine, (unsigned)r->n_tok, ROW_THREADS, 0, c->stream, c->expert_out, inverse,
                   layer->weighs_input ? NULL : p.weight, k, whole ? r->width[out] : n, whole && shared,
                   whole ? p.shared : NULL, c->x32[x], c->x32[whole ? out : A_LATENT_SUM], c->x16[A_LATENT_SUM]);
    };
    combine(s.inverse, s.k, !layer->n_latent);
    if (!layer->n_latent) return;
    struct device_matrix up = *layer->latent_up.copy;
    if (layer->latent_norm) up.decode_scale /= HIDDEN_SCALE;
    latent_rows(r, &up, latent_norm(r, layer, r->n_tok), (size_t)n, r->n_tok, c->expert_out, false);
    combine(NULL, 1, true); /* expert_out is divided by HIDDEN_SCALE, as the sum was where it has no norm */
}

/* The feed-forward with experts, of which those of zero computation add what they read. */
static void moe_ffn(struct rank *r, const struct step *s, struct norm_input norm) {
    const struct layer *layer = &r->m->layers[s->il];
    const struct cuda *c = r->cuda;
    routed_ffn(r, s, norm);
    if (!layer->n_zero || r->m->shard.rank) return;
    LAUNCH_PDL(k_add_inputs, (unsigned)r->n_tok, ROW_THREADS, 0, c->stream, c->x32[s->in[1]], c->route.zero_weight,
               r->width[s->out[0]], c->x32[s->out[0]]);
}

/* What the experts of a feed-forward in parts read, in halves, and what their router reads, in F32: both in the slot
 * in[0], so that in[1] has no memory here. */
static void parts_norm(struct rank *r, const struct step *s, const float *router) {
    struct norm_args a = norm_of(r, r->cuda->x32[s->x], r->n_tok, r->width[s->x], NULL, s->norm, s->in[0]);
    a.weight32 = router;
    add_norm<PARTIAL_OWN>(&a, (unsigned)r->n_tok, r->cuda->stream);
}

static void cuda_keep_input(struct rank *r, const struct step *s) {
    if (s->norm) {
        norm_slot(r, s->x, s->norm, s->out[0]);
        return;
    }
    const size_t n = (size_t)r->n_tok * (size_t)r->width[s->x] / 4;
    LAUNCH_PDL(k_keep_input, (unsigned)((n + 255) / 256), 256, 0, r->cuda->stream, (const float4 *)r->cuda->x32[s->x],
               (float4 *)r->cuda->x32[s->out[0]], n);
}

static void cuda_norm_ffn(struct rank *r, const struct step *s) {
    const struct layer *layer = &r->m->layers[s->il];
    const bool decode = r->n_tok <= DECODE_MAX_TOKENS && !r->stats, routed = layer->n_expert && !s->dense;
    const bool early = r->m->family->routes_input; /* the router does not read what it norms */
    struct norm_input norm = {};
    if (s->hc) hc_mix(r, s->x, s->partial, s->hc, s->norm, s->in[0]);
    else if (s->norm && decode && routed && !early && norm_fuses(r, s->x, s->partial) &&
             decode_group(r, s->il) == r->n_tok)
        norm = norm_input_of(r, s->x, s->partial, s->norm);
    else if (s->in[1] != ACT_COUNT && !early) parts_norm(r, s, layer->router_norm);
    else if (s->norm || s->partial != ACT_COUNT) norm_rows_of(r, s->x, s->partial, s->norm, s->in[0]);
    if (norm.x && s->in[1] != ACT_COUNT) norm.weight = layer->router_norm, norm.weight16 = s->norm;
    if (routed) moe_ffn(r, s, norm);
    else if (decode) ffn_decode(r, s->il, false, 0, 0, r->n_tok, s->in[0], s->out[0]);
    else dense_ffn_prefill(r, s->il, s->dense, s->in[0], s->out[0]);
}

/* ============================================================================================================
 * Operations: logits and results
 *
 * Logits, the choice of tokens, and the operations that wait or measure.
 * ============================================================================================================ */

/* Each rank of the last stage computes its rows of the head; all but the root send theirs to the root's mailbox. */
static void cuda_logits(struct rank *r, const float *norm, const struct weight *head, int first, int n) {
    struct cuda *c = r->cuda;
    const struct shard *shard = &r->m->shard;
    const struct mailbox *root = &r->cuda->mailbox[shard->stage * shard->n_rank];
    if (!c->logits) c->logits = root->logits; /* the root of several ranks: where the others push theirs */
    float *x = c->x32[A_X] + (size_t)first * (size_t)r->width[A_X];
    struct norm_args a = norm_of(r, x, n, r->width[A_X], NULL, norm, A_H);
    if (norm) add_norm<PARTIAL_OWN>(&a, (unsigned)n, c->stream);
    else to_halves(x, a.h16, a.n, n, 0, c->stream);
    /* With tied embeddings this is the whole embedding; the first rows are the first rank's. */
    struct device_matrix w = *head->copy;
    w.n_out = head->n_out;
    w.n_rt = (w.n_out + TILE_ROWS - 1) / TILE_ROWS;
    if (w.n_out) matmul(r, &w, c->x16[A_H], (size_t)r->width[A_H], 0, n, 0, NULL, c->logits, c->logits_stride, 0);
    if (w.n_out && r->m->logit_cap > 0)
        LAUNCH_PDL(k_soft_cap, dim3(ceil_div(w.n_out, 256), (unsigned)n), 256, 0, c->stream, c->logits,
                   c->logits_stride, w.n_out, r->m->logit_cap);
    if (c->spread) {
        logits_by_nccl(r, head, n);
    } else if (shard->n_rank > 1) {
        struct send_args s =
            send_of(r, CH_LOGITS, shard->rank ? NULL : root->logits_flag, shard->rank ? 0 : shard->n_rank);
        if (shard->rank) /* rows are padded to a multiple of four logits */
            send_matrix(&s, c->logits, c->logits_stride, root->logits + r->m->first_id, logits_stride(r->m->n_vocab), n,
                        (head->n_out + 3) / 4 * 4, root->logits_flag + shard->rank);
        send_rows(r, s);
    }
    CUDA_OK(r, cudaGetLastError(), "the output layer");
    stream_flush(r);
}

/* Copies a row to pinned memory, of which there is one per row of logits. */
static const float *cuda_read_logits(struct rank *r, int row) {
    struct cuda *c = r->cuda;
    float *out = c->logits_host + (size_t)row * (size_t)r->m->n_vocab;
    cuda_copy(r, out, c->logits + (size_t)row * c->logits_stride, (size_t)r->m->n_vocab * sizeof(float),
              "reading logits");
    cuda_sync(r, "a forward pass");
    return out;
}

/* Enqueues k_sample, and the copy of the ids that it chooses. */
static void cuda_sample(struct rank *r, const struct sampling *o, const int32_t *tokens, int n_past, int first, int n,
                        const double *uniform) {
    struct cuda *c = r->cuda;
    struct sample_args *p = &c->sample;
    c->sampling = *o;
    c->sample_first = first;
    c->n_sample = n;
    p->logits = c->logits + (size_t)first * c->logits_stride;
    p->stride = c->logits_stride;
    p->n = sampling_ids(o, r->m);
    p->limit = o->top_k > 0 && o->top_k < p->n ? o->top_k : p->n;
    p->greedy = o->greedy || o->temp <= 0;
    p->penalise = o->repeat_penalty != 1.0f;
    p->n_recent = min(n_past, (int)PENALTY_WINDOW);
    memset(p->recent_mask, 0, sizeof p->recent_mask);
    for (int i = 0; i < p->n_recent + n - 1; i++) {
        const int32_t id = tokens[n_past - p->n_recent + i];
        p->recent[i] = id;
        p->recent_mask[id >> 5 & 63] |= 1u << (id & 31);
    }
    p->repeat_penalty = o->repeat_penalty;
    p->temp = o->temp;
    p->top_p = o->top_p;
    p->min_p = o->min_p;
    memcpy(p->uniform, uniform, (size_t)n * sizeof *uniform);
    const unsigned blocks = min(ceil_div(p->n, 4 * SAMPLE_THREADS), (unsigned)SAMPLE_BLOCKS);
    LAUNCH_PDL(k_sample, dim3(blocks, (unsigned)n), SAMPLE_THREADS, 0, c->stream, *p);
    cuda_copy(r, c->token_host, p->token, (size_t)n * sizeof(int32_t), "choosing a token");
    CUDA_OK(r, cudaEventRecord(c->token_ready, c->stream), "choosing a token");
}

/* The ids that k_sample chose; where it left the choice to the host (-1), the host makes it from the same draw. */
static int cuda_read_tokens(struct rank *r, int32_t *chosen, bool *on_device) {
    struct cuda *c = r->cuda;
    const struct sample_args *p = &c->sample;
    wait_for_event(r, c->token_ready, "a forward pass");
    *on_device = c->token_host[0] >= 0;
    for (int i = 0; i < c->n_sample; i++) {
        const int end = p->n_recent + i, n_recent = min(end, (int)PENALTY_WINDOW);
        chosen[i] = c->token_host[i];
        if (chosen[i] < 0)
            chosen[i] = sampling_choose(&c->sampling, r->work, p->n, r->ops->read_logits(r, c->sample_first + i),
                                        p->recent + end - n_recent, n_recent, p->uniform[i]);
        if (i + 1 < c->n_sample && chosen[i] != p->recent[end]) return i + 1;
    }
    return c->n_sample;
}

/* Rows first..first+n-1 of a cache tensor between the cache and host memory: data (n, row_bytes), scale (n, n_scale);
 * NULL: not this one. */
static void cuda_cache_copy(struct rank *r, const struct cache_tensor *p, size_t first, size_t n, uint8_t *data,
                            float *scale, bool store) {
    const char *what = "copying the cache";
    auto move = [&](void *gpu, void *host, size_t bytes) {
        if (host) cuda_copy(r, store ? gpu : host, store ? host : gpu, bytes, what);
    };
    move(p->data + first * p->row_bytes, data, n * p->row_bytes);
    move(p->scale + first * (size_t)p->n_scale, scale, n * (size_t)p->n_scale * sizeof *scale);
    cuda_sync(r, what);
}

static void cuda_wait(struct rank *r) { cuda_sync(r, "a forward pass"); }

/* Frees the recordings of passes: they have addresses of the cache. */
static void graphs_free(struct cuda *c) {
    for (auto &of_pass : c->graph)
        for (auto &of_runs : of_pass)
            for (cudaGraphExec_t &graph : of_runs) {
                if (graph) cudaGraphExecDestroy(graph);
                graph = NULL;
            }
}

/* Sets what the slots of every layer hold: the first experts, which the upload put there, or nothing (there: false). */
static void slots_fill(struct rank *r, bool there) {
    static const char what[] = "slots of experts";
    const struct expert_cache *c = &r->cuda->cache;
    const struct offload o = r->cuda->sizes.offload;
    const int n_block = model_blocks(r->m), stride = r->m->n_expert_max + 1;
    if (!c->slot_of || r->cuda->failed) return;
    int32_t *slot_of = (int32_t *)host_memory((size_t)(n_block * stride), sizeof *slot_of);
    int32_t *expert_of = (int32_t *)host_memory((size_t)(n_block * o.n_slot) + 1, sizeof *expert_of);
    for (int il = 0; il < n_block; il++) {
        const int held = there ? layer_held(r->m, il, o) : 0;
        for (int e = 0; e < stride; e++) slot_of[il * stride + e] = e < held ? e : -1;
        for (int i = 0; i < o.n_slot; i++) expert_of[il * o.n_slot + i] = there ? i : r->m->layers[il].n_expert;
    }
    cuda_copy(r, c->slot_of, slot_of, (size_t)(n_block * stride) * sizeof *slot_of, what);
    cuda_copy(r, c->expert_of, expert_of, (size_t)(n_block * o.n_slot) * sizeof *expert_of, what);
    cuda_sync(r, what);
    free(slot_of);
    free(expert_of);
}

static void cuda_empty_slots(struct rank *r) {
    r->cuda->slots_emptied = true;
    graphs_free(r->cuda); /* they may have as many waves as there were */
    slots_fill(r, false);
}

static void cuda_read_counts(struct rank *r, struct expert_counts *counts) {
    static_assert(sizeof *counts == 2 * sizeof *r->cuda->cache.count, "the GPU counts in the same form");
    if (!r->cuda->cache.count) return;
    cuda_copy(r, counts, r->cuda->cache.count, (size_t)model_blocks(r->m) * sizeof *counts, "reading counts");
    cuda_sync(r, "reading counts");
}

static void cuda_read_stats(struct rank *r, double *stats, float *in_sum2) {
    const size_t n = (size_t)model_blocks(r->m) * (size_t)r->m->n_expert_max * STATS;
    const char *what = "reading the statistics";
    cuda_copy(r, stats, r->stats, n * sizeof *stats, what);
    if (in_sum2) cuda_copy(r, in_sum2, r->in_sum2, in_sum2_before(r->m, model_blocks(r->m)) * sizeof *in_sum2, what);
    cuda_sync(r, what);
}

/* Runs `turns` rounds of eight independent mma.sync per warp, to measure their rate. Grid: two blocks an SM, block:
 * 512. Reads no memory and writes none: the condition on `out` is never true, but keeps the compiler from dropping the
 * MMAs. */
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

/* Times a copy within the memory that is free, and m16n8k16 by doubling its turns until they take 4 ms. */
static struct rates cuda_measure(struct rank *r) {
    struct cuda *c = r->cuda;
    struct rates rates = {};
    rates.nominal = rank_facts(r).rate;
    struct stopwatch watch(c->stream);
    size_t free_bytes = 0, total = 0, n = (size_t)1 << 29;
    uint8_t *p = NULL;
    double t = 0;
    cudaMemGetInfo(&free_bytes, &total);
    while (n > (size_t)1 << 20 && 2 * n > free_bytes / 2) n /= 2;
    if (cudaMalloc((void **)&p, 2 * n) == cudaSuccess) {
        if ((t = copy_seconds(&watch, p + n, r->cuda->device, p, r->cuda->device, n)) > 0)
            rates.bytes = 2 * (double)n / t;
        cudaFree(p);
    }
    t = 0;
    for (int turns = 1; watch.error == cudaSuccess && turns < 1 << 24 && t < 4e-3; turns *= 2) {
        watch.mark(0);
        LAUNCH_PDL(k_mma_rate, 2 * (unsigned)r->cuda->n_sm, 512, 0, c->stream, turns, c->x32[A_X]);
        watch.mark(1);
        t = watch.seconds();
        c->mma_turns = turns;
    }
    if (t > 0) rates.mma = 2.0 * 16 * 8 * 16 * 8 * c->mma_turns * 16 * 2 * r->cuda->n_sm / t;
    errors_clear();
    return rates;
}

/* Enqueues all-reduces of the batch's tokens. */
static void all_reduces_run(struct rank *r, int runs) {
    for (int i = 0; i < runs && !r->cuda->failed; i++)
        all_reduce_add_norm(r, A_X, A_OUT, r->m->output_norm, A_H, r->cuda->x32[A_X]);
}

/* Returns the seconds of an all-reduce of n_tok tokens, by NCCL (nccl) or by our own kernel. 0: it cannot be
 * measured. The ranks of a stage call it together. */
static double cuda_time_all_reduce(struct rank *r, int n_tok, bool nccl) {
    enum { WARM = 3, RUNS = 20 };
    struct cuda *c = r->cuda;
    bool *by_nccl = &c->by_nccl[n_tok <= DECODE_MAX_TOKENS ? n_tok : 0], before = *by_nccl;
    if (n_tok > r->chunk) return 0;
    if (nccl ? !c->sizes.nccl : c->spread || (n_tok > DECODE_MAX_TOKENS && c->sizes.nccl)) return 0;
    *by_nccl = nccl;
    r->n_tok = n_tok;
    all_reduces_run(r, WARM);
    struct stopwatch watch(c->stream);
    watch.mark(0);
    all_reduces_run(r, RUNS);
    watch.mark(1);
    const double t = cuda_sync(r, "timing the all-reduce") ? watch.seconds() : 0;
    cuda_check(r, watch.error, "timing the all-reduce", "an event", __LINE__, true);
    *by_nccl = before;
    return t / RUNS;
}

/* Puts an event before and after every launch of the forward, which is not recorded, and reads them at the end. */
static int cuda_profile(struct rank *r, void (*body)(void *), void *arg, struct profile_row *rows, int n) {
    struct cuda *c = r->cuda;
    cudaEvent_t *e = (cudaEvent_t *)host_memory(2 * (size_t)n, sizeof *e);
    /* the GPU is kept busy until the host is ahead: else a kernel's time is that of its launch */
    if (c->mma_turns) LAUNCH_PDL(k_mma_rate, 2 * (unsigned)c->n_sm, 512, 0, c->stream, c->mma_turns, c->logits);
    profile = {};
    profile.row = rows;
    profile.event = e;
    profile.cap = n;
    body(arg);
    profile.row = NULL;
    n = profile.n;
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
 * Upload
 *
 * Brings the weights to the GPU: rows of the file go through pinned staging buffers, and k_repack makes tiles of them
 * there.
 * ============================================================================================================ */

/* The copy of a matrix's biases, in whole tiles. NULL: it has none, or after an error. */
static const float *bias_upload(struct rank *r, const struct weight *w, const char *what) {
    const size_t rows = ceil_div(w->n_out, TILE_ROWS) * TILE_ROWS, n = (size_t)w->n_expert * rows;
    if (!w->bias) return NULL;
    float *tiles = (float *)host_memory(n + 1, sizeof *tiles);
    for (int e = 0; e < w->n_expert; e++)
        memcpy(tiles + (size_t)e * rows, w->bias + (ptrdiff_t)e * w->bias_stride, (size_t)w->n_out * sizeof *tiles);
    const float *bias = (const float *)cuda_vector(r, tiles, n * sizeof *tiles, what);
    cuda_sync(r, what);
    free(tiles);
    return bias;
}

/* The copy of a matrix's factors, which the matrices of a layer share that are parts of one tensor. layer NULL: it is
 * of none. NULL: it has none, or after an error. */
static const float *factors_upload(struct rank *r, const struct layer *layer, const struct weight *w,
                                   const char *what) {
    for (const struct tensor_rule *rule = layer ? rule_next(NULL, layer) : NULL; rule; rule = rule_next(rule, layer)) {
        const struct weight *other = rule_is_weight(rule) ? rule_weight(rule, layer) : NULL;
        if (other && other->copy && other->scale == w->scale) return other->copy->scale;
    }
    return (const float *)cuda_vector(r, w->scale, (size_t)w->n_expert * sizeof *w->scale, what);
}

/* Experts of a matrix that are on the GPU; of one without routed experts all. layer NULL: it is of none. */
static int matrix_held(const struct cuda *c, const struct layer *layer, const struct weight *w) {
    const bool routed = layer && layer->n_expert && (w == &layer->gate || w == &layer->up || w == &layer->down);
    return routed ? layer_held(&c->model, (int)(layer - c->model.layers), c->sizes.offload) : w->n_expert;
}

/* Bytes that a matrix takes on the GPU, as the driver allocates them. */
static size_t held_bytes(const struct cuda *c, const struct layer *layer, const struct weight *w) {
    struct weight held = *w;
    held.n_expert = matrix_held(c, layer, w);
    return weight_gpu_bytes(&held, true);
}

/* Allocates the copy of a matrix, and copies its factors and biases. NULL after an error. */
static struct device_matrix *matrix_allocate(struct rank *r, const struct layer *layer, const struct weight *w,
                                             const char *what) {
    struct cuda *c = r->cuda;
    struct device_matrix *d = (struct device_matrix *)host_memory(1, sizeof *d);
    arrput(c->copies, d);
    d->fmt = weight_format(w);
    d->n_out = w->n_out;
    d->n_in = w->n_in;
    d->n_expert = w->n_expert;
    d->n_rt = (w->n_out + TILE_ROWS - 1) / TILE_ROWS;
    d->n_kt = (w->n_in + TILE_COLS - 1) / TILE_COLS;
    d->n_held = matrix_held(c, layer, w);
    const size_t tiles = weight_tiles(w) / (size_t)w->n_expert * (size_t)d->n_held;
    d->codes = (uint8_t *)cuda_memory(r, tiles * TILE_BYTES(d->fmt), what);
    if (d->fmt != FMT_F16) d->scales = (uint8_t *)cuda_memory(r, tiles * TILE_SCALES, what);
    d->scale = factors_upload(r, layer, w, what);
    for (int e = 0; w->scale && e < w->n_expert; e++) d->scale_max = fmaxf(d->scale_max, fabsf(w->scale[e]));
    if (!(d->scale_max > 0)) d->scale_max = 1;
    d->bias = bias_upload(r, w, what);
    return c->failed ? NULL : d;
}

/* Sends `bytes` of a staging buffer to the GPU, 0: they are there already, and makes tiles of the rows that k names. */
static void matrix_repack(struct rank *r, struct device_matrix *d, struct repack k, struct staging *s, size_t bytes) {
    struct cuda *c = r->cuda;
    const size_t tiles = (size_t)k.n_e * (size_t)k.n_rt * (size_t)d->n_kt;
    if (bytes) cuda_copy(r, s->device, s->host, bytes, "uploading weights");
    d->decode_scale = k.decode_scale;
    LAUNCH_PDL(k_repack, (unsigned)((tiles + 7) / 8), 256, 0, c->stream, k, s->device, *d, c->range);
    CUDA_OK(r, cudaGetLastError(), "repacking weights");
    CUDA_OK(r, cudaEventRecord(s->free, c->stream), "repacking weights");
}

/* Reads what k_repack found of the matrix that was repacked, and clears it. F16, F8: range[0] is the bits of the largest
 * |weight|; MXFP4: the largest exponent byte, and 255 - the smallest. False after an error. */
static bool matrix_range(struct rank *r, uint32_t range[2]) {
    struct cuda *c = r->cuda;
    if (c->failed) return false;
    cuda_copy(r, c->range_host, c->range, sizeof c->range_host, "repacking weights");
    CUDA_OK(r, cudaMemsetAsync(c->range, 0, sizeof c->range_host, c->stream), "repacking weights");
    if (CUDA_OK(r, cudaStreamSynchronize(c->stream), "repacking weights"))
        memcpy(range, c->range_host, sizeof c->range_host);
    return !c->failed;
}

/* Copies n rows of an expert, from row `first` of those at `in` on. Rows and columns may come in runs. */
static void rows_copy(const struct weight *w, const uint8_t *in, int first, int n, uint8_t *out, size_t row_bytes) {
    if (!w->row_run && row_bytes == w->row_bytes) {
        memcpy(out, in + (size_t)first * w->row_bytes, (size_t)n * row_bytes);
        return;
    }
    const size_t n_run = w->col_run ? (size_t)(w->n_in / w->col_run) : 1, run = row_bytes / n_run;
    for (int i = first; i < first + n; i++) {
        const size_t at = w->row_run
                              ? (size_t)(i / w->row_run) * w->row_run_bytes + (size_t)(i % w->row_run) * w->row_bytes
                              : (size_t)i * w->row_bytes;
        for (size_t k = 0; k < n_run; k++, out += run) memcpy(out, in + at + k * w->col_run_bytes, run);
    }
}

/* Copies `rows` rows of each of k.n_e experts to a staging buffer, by all threads. */
static void staging_rows(const struct weight *w, const struct repack *k, int rows, uint8_t *out) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < k->n_e * 16; i++) { /* sixteenths of an expert, so that one alone is shared out too */
        const int from = rows * (i % 16) / 16, to = rows * (i % 16 + 1) / 16;
        uint8_t *row = out + ((size_t)(i / 16) * (size_t)rows + (size_t)from) * k->row_bytes;
        rows_copy(w, w->data + (size_t)(k->e0 + i / 16) * w->expert_bytes, k->rt0 * TILE_ROWS + from, to - from, row,
                  k->row_bytes);
    }
}

/* Uploads the rows of a matrix's first n experts; k says how they are stored. Of more than d holds the last ones come
 * first, and the others take their places. Synthetic rows are made once per format and repacked again and again. */
static void matrix_upload_rows(struct rank *r, const struct weight *w, int n, struct device_matrix *d,
                               struct repack k) {
    struct cuda *c = r->cuda;
    const size_t expert = (size_t)w->n_out * k.row_bytes;
    const bool whole = expert <= STAGING_BYTES, synthetic = r->m->synthetic;
    const int n_rt = (w->n_out + TILE_ROWS - 1) / TILE_ROWS;
    const int n_e = whole ? (int)min(STAGING_BYTES / expert, (size_t)d->n_held) : 1;
    const int step = whole ? n_rt : (int)(STAGING_BYTES / (k.row_bytes * TILE_ROWS));
    for (k.e0 = (n - 1) / n_e * n_e; k.e0 >= 0; k.e0 -= n_e)
        for (k.rt0 = 0; k.rt0 < n_rt && !c->failed; k.rt0 += step) {
            const int rows = min(step * TILE_ROWS, w->n_out - k.rt0 * TILE_ROWS);
            const int buffer = synthetic ? (int)(gguf_format(w->type) - gguf_formats) : c->staging_next++ % 2;
            size_t bytes = 0; /* that are new in the buffer */
            k.n_e = min(n - k.e0, n_e);
            k.n_rt = min(n_rt - k.rt0, step);
            if (!synthetic || !(c->staging_filled >> buffer & 1)) {
                uint8_t *out = staging_take(r, &c->staging[buffer], STAGING_BYTES, true, "memory for the upload");
                uint64_t rng = 42;
                if (!out) return;
                bytes = synthetic ? (size_t)STAGING_BYTES : (size_t)k.n_e * (size_t)rows * k.row_bytes;
                if (synthetic) synth_fill(out, bytes, w->type, false, &rng);
                else staging_rows(w, &k, rows, out);
                c->staging_filled |= 1u << buffer;
            }
            matrix_repack(r, d, k, &c->staging[buffer], bytes);
        }
#ifdef MADV_PAGEOUT
    /* The file's pages need not stay beside their copy in the same memory; where they may not be dropped, they are the
     * first that the system takes. */
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = ((uintptr_t)w->data + page - 1) / page * page;
    const uintptr_t to = ((uintptr_t)w->data + w->expert_bytes * (size_t)w->n_expert) / page * page;
    if (c->integrated && !synthetic && to > from) madvise((void *)from, to - from, MADV_PAGEOUT);
#endif
}

/* Packs a matrix into d. exact: tiles represent all values of the format; otherwise the power of two that they are
 * multiplied by is chosen by all experts, also by those that d does not hold. Halves hold 2^8 times the weight, so that whatever BF16 has
 * above 2^-33 is exact; a matrix with weights beyond 255 gets another power of two. MXFP4's scales become UE4M3,
 * which has 18 octaves: exact where the matrix has no more. Otherwise its largest 18 are, and a weight below them is
 * off by at most 2^-19 of the largest scale. */
static void matrix_pack(struct rank *r, const struct weight *w, struct device_matrix *d, struct repack k, bool exact,
                        const char *what) {
    const bool mx = w->type == GGUF_MXFP4;
    for (int tries = 0; !r->cuda->failed; tries++) {
        uint32_t range[2];
        float top;
        k.factor = ldexpf(1, k.shift);
        if (!exact) k.decode_scale = mx ? ldexpf(128, k.shift - 127) : 1 / k.factor;
        d->shift = k.shift;
        matrix_upload_rows(r, w, exact ? d->n_held : w->n_expert, d, k);
        if (exact || !matrix_range(r, range)) return;
        const int low = 255 - (int)range[1], high = (int)range[0];
        memcpy(&top, range, sizeof top);
        if (mx ? tries || !high || (high - k.shift <= 8 && low - k.shift >= -9) : ldexpf(top, k.shift) <= 65504) return;
        if (tries) rank_fail(r, "%s: a weight is %g, only finite ones are supported", what, (double)top);
        k.shift = mx ? high - 8 : 14 - ilogbf(top);
    }
}

/* Makes the copy of a matrix in tiles, if there is one. */
static void matrix_upload(struct rank *r, const struct layer *layer, struct weight *w, const char *what) {
    struct repack k = {};
    bool exact = false;
    k.type = w->type;
    k.row_bytes = gguf_row_bytes(w->type, (size_t)w->n_in);
    switch (w->type) {
    case GGUF_FP8:
    case GGUF_FLOATS: k.shift = 8; break;
    case GGUF_Q8_0: exact = true, k.decode_scale = 1; break;
    case GGUF_MXFP4: k.shift = 116; break;
    case GGUF_NVFP4: exact = true, k.decode_scale = 128; break;
    }
    struct device_matrix *d = w->data ? matrix_allocate(r, layer, w, what) : NULL;
    if (!d) return;
    w->copy = d;
    w->bias = d->bias;
    d->decode_scale = k.decode_scale;
    if (d->n_held) {
        matrix_pack(r, w, d, k, exact, what);
    } else if (!exact) { /* all experts pass through the place of one, which nobody reads */
        const size_t tiles = (size_t)d->n_rt * (size_t)d->n_kt;
        struct device_matrix one = *d;
        one.n_held = 1;
        CUDA_OK(r, cudaMalloc((void **)&one.codes, tiles * (TILE_BYTES(d->fmt) + TILE_SCALES)), what);
        if (one.scales) one.scales = one.codes + tiles * TILE_BYTES(d->fmt);
        matrix_pack(r, w, &one, k, exact, what);
        CUDA_OK(r, cudaFree(one.codes), what); /* waits for the kernels */
        d->decode_scale = one.decode_scale;
        d->shift = one.shift;
    }
}

/* Where the GPU sees an address of the host's memory for experts, or with a store this part of an expert that the store's
 * memory begins with. NULL after an error. */
static const uint8_t *home_of(struct rank *r, const uint8_t *p) {
    const struct cuda *c = r->cuda;
    const struct gguf *g = &r->m->gguf;
    void *seen = NULL;
    for (int i = 0; i < c->n_home; i++) {
        const struct host_range *h = &c->home[i];
        if (!c->sizes.offload.n_ask && (p < h->base || p >= h->base + h->bytes)) continue;
        if (!CUDA_OK(r, cudaHostGetDevicePointer(&seen, h->base, 0), "memory for experts")) return NULL;
        if (!c->sizes.offload.n_ask) return (const uint8_t *)seen + (p - h->base);
        for (uint32_t t = 0; t < g->n_tensors; t++)
            if (p >= g->tensors[t].data && p < g->tensors[t].data + g->tensors[t].bytes)
                return (const uint8_t *)seen + (p - g->tensors[t].data);
    }
    rank_fail(r, "an expert is not in the memory for experts, which is a mistake in the program");
    return NULL;
}

/* Copies a router's rows in BF16, or in F32 with its factor applied. */
static void router_upload(struct rank *r, struct weight *w) {
    const size_t n_in = (size_t)w->n_in, n = (size_t)w->n_out * n_in;
    float *rows = NULL;
    if (!router_halves(w)) rows = (float *)host_memory(n + 1, sizeof *rows);
    for (int i = 0; i < w->n_out && rows; i++)
        gguf_dequantize_row(w->type, w->data + (size_t)i * w->row_bytes, rows + (size_t)i * n_in, n_in);
    for (size_t i = 0; w->scale && i < n; i++) rows[i] *= w->scale[0];
    const void *from = rows ? (const void *)rows : w->data;
    w->data = (const uint8_t *)cuda_vector(r, from, n * (rows ? sizeof *rows : 2), "routers");
    if (!rows) return;
    cuda_sync(r, "routers");
    free(rows);
}

/* Makes *x, a vector of n values or NULL, the copy of it. */
template <class T>
static void vector_upload(struct rank *r, const T **x, size_t n, const char *what) {
    *x = (const T *)cuda_vector(r, *x, n * sizeof **x, what);
}

/* Makes the taps of a layer's convolution the copy of them: (channels, DELTA_TAPS), zeros before the model's n_conv. */
static void taps_upload(struct rank *r, struct layer *layer, size_t channels) {
    const size_t n = (size_t)layer->delta.n_conv, first = DELTA_TAPS - n;
    float *taps = (float *)host_memory(channels * DELTA_TAPS, sizeof *taps);
    for (size_t i = 0; i < channels; i++) memcpy(taps + i * DELTA_TAPS + first, layer->conv + i * n, n * sizeof *taps);
    layer->conv = (const float *)cuda_vector(r, taps, channels * DELTA_TAPS * sizeof *taps, "norms");
    cuda_sync(r, "norms");
    free(taps);
}

/* Copies every tensor that a forward uses, and lets r->m point to the copies: to a matrix by `copy` and `bias`, to a
 * vector and to the rows of a router by the pointer that was the host's. Tells `progress` the bytes that are done. */
static void weights_upload(struct rank *r, void (*progress)(double done, double total)) {
    const struct gpu_facts f = rank_facts(r);
    struct cuda *c = r->cuda;
    struct model *m = &c->model;
    char what[64];
    const bool tied = m->output.data == m->embd.data; /* one matrix is both */
    struct weight *const whole[] = {&m->embd, &m->output, &m->hc_head.down, &m->hc_head.up};
    static const char *const names[] = {"token_embd", "output", "output_hc_down", "output_hc_up"};
    double total = 0;
    for (struct weight *w : whole)
        if (!tied || w != &m->output) total += (double)held_bytes(c, NULL, w);
    double done = 0;
    for (int il = 0; il < model_blocks(m); il++)
        for (const struct tensor_rule *rule = rule_next(NULL, &m->layers[il]); rule;
             rule = rule_next(rule, &m->layers[il]))
            if (rule_is_weight(rule) && rule->kind != TENSOR_ROUTER && layer_of_block(m, m->layers[il].block) == il)
                total += (double)held_bytes(c, &m->layers[il], rule_weight(rule, &m->layers[il]));
    if (!c->failed &&
        total > (double)f.free) /* another rank on this GPU may have uploaded already: its bytes are not free */
        rank_fail(r, "the weights take %.2f GiB, %.2f of %.2f GiB are free: prune experts, or use %s--cpu",
                  total / 0x1p30, (double)f.free / 0x1p30, (double)f.total / 0x1p30,
                  m->n_mtp ? "--spec-type none or " : "");
    for (int i = 0; i < 4; i++)
        if (!tied || whole[i] != &m->output) matrix_upload(r, NULL, whole[i], names[i]);
    if (tied) m->output.copy = m->embd.copy;
    vector_upload(r, &m->output_norm, (m->norm == NORM_BIAS ? 2 : 1) * (size_t)m->n_embd, "norms");
    vector_upload(r, &m->hc_head.fn, (size_t)(m->n_hc * m->n_hc) * (size_t)m->n_embd, "norms");
    vector_upload(r, &m->hc_head.base, (size_t)m->n_hc, "norms");
    vector_upload(r, &m->hc_head.scale, 1, "norms");
    vector_upload(r, &m->hc_head.norm, (size_t)(m->n_hc * m->n_embd), "norms");
    vector_upload(r, &m->embd_norm, (size_t)m->n_embd, "norms");
    vector_upload(r, &m->read_end, (size_t)m->n_embd, "norms");
    vector_upload(r, &m->ngram->id, (size_t)m->n_vocab, "ids of n-grams");
    for (int i = 1; i < m->n_ngram; i++) m->ngram[i].id = m->ngram->id;
    for (int il = 0; il < model_blocks(m) && !c->failed; il++) {
        struct layer *layer = &m->layers[il];
        const struct layer *first = &m->layers[layer_of_block(m, layer->block)];
        snprintf(what, sizeof what, "layer %d", il);
        for (const struct tensor_rule *rule = rule_next(NULL, layer); rule; rule = rule_next(rule, layer)) {
            if (rule->field == NOT_BOUND) continue;
            if (layer != first) { /* a visit has the copies of the layer's first */
                if (rule_is_weight(rule)) *rule_weight(rule, layer) = *rule_weight(rule, first);
                else if (rule->kind == TENSOR_VECTOR) *rule_vector(rule, layer) = *rule_vector(rule, first);
                else layer->expert_ids = first->expert_ids;
                continue;
            }
            if (rule->kind == TENSOR_VECTOR) { /* biases of matrices have come with these, which stand before them */
                const float **v = rule_vector(rule, layer);
                const size_t n = rule_floats(rule, m, layer);
                if (*v != *rule_vector(rule, &c->shard->layers[il])) continue;
                if (v == &layer->conv) taps_upload(r, layer, n / (size_t)layer->delta.n_conv);
                else vector_upload(r, v, n, "norms");
                continue;
            }
            if (rule->kind == TENSOR_IDS) {
                vector_upload(r, &layer->expert_ids, (size_t)m->n_vocab * (size_t)layer->n_expert_used, "routers");
                continue;
            }
            struct weight *w = rule_weight(rule, layer);
            if (rule->kind == TENSOR_ROUTER) {
                router_upload(r, w);
                continue;
            }
            matrix_upload(r, layer, w, what);
            if (w->copy && w->copy->n_held < w->n_expert) w->data = home_of(r, w->data);
            done += (double)held_bytes(c, layer, w);
            if (progress) progress(done, total);
        }
    }
    if (progress) progress(total, total);
    if (c->failed) return;
    CUDA_OK(r, cudaStreamSynchronize(c->stream), "uploading weights");
    for (struct staging &s : c->staging) staging_free(&s);
    r->weight_bytes = c->allocated;
}

/* Whether a layer of the shard reads table i of n-grams. */
static bool shard_ngrams(const struct model *m, int i) {
    for (int il = 0; il < model_blocks(m); il++)
        if (m->layers[il].ngrams == i + 1) return true;
    return false;
}

/* Copies a matrix of a table of n-grams to pinned memory of the host. NULL: it has no data, or after an error. */
static void *ngrams_pin(struct rank *r, const struct weight *w) {
    const size_t bytes = (size_t)w->n_out * w->row_bytes, piece = STAGING_BYTES;
    void *to = NULL;
    uint64_t rng = 42;
    char what[96];
    if (!w->data || r->cuda->failed) return NULL;
    snprintf(what, sizeof what, "%.2f GiB of host memory for the table of n-grams", (double)bytes / 0x1p30);
    if (!CUDA_OK(r, cudaHostAlloc(&to, bytes, cudaHostAllocPortable | cudaHostAllocMapped), what)) return NULL;
    arrput(r->cuda->pinned, to);
    if (r->m->synthetic) {
        synth_fill((uint8_t *)to, bytes, w->type, false, &rng);
        return to;
    }
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)w->data / page * page;
    madvise((void *)from, (uintptr_t)w->data + bytes - from, MADV_SEQUENTIAL); /* not as a CPU reads it */
#pragma omp parallel for schedule(dynamic)
    for (size_t at = 0; at < bytes; at += piece)
        memcpy((uint8_t *)to + at, w->data + at, bytes - at < piece ? bytes - at : piece);
    return to;
}

/* Copies the tables of n-grams to pinned memory of the host, unless their rows are read as they are used, once for the
 * ranks of a stage in a process: a token reads a few rows, of up to 200 GB. All ranks call it. */
static void ngrams_upload(struct rank *r) {
    struct model *m = &r->cuda->model;
    const struct shard shard = m->shard;
    void *mine[NGRAM_TABLES][2] = {}, *all[MAX_RANKS][NGRAM_TABLES][2];
    int first = shard.stage * shard.n_rank; /* of the stage's ranks in this process */
    while (r->cuda->remote[first]) first++;
    static_assert(sizeof mine <= ALL_GATHER_MAX, "all ranks hear of all tables");
    for (int i = 0; i < m->n_ngram; i++) {
        if (r->index != first || r->offload.read_rows || !shard_ngrams(m, i)) continue;
        mine[i][0] = ngrams_pin(r, &m->ngram[i].table);
        mine[i][1] = ngrams_pin(r, &m->ngram[i].scales);
    }
    rank_all_gather(r, mine, all, sizeof mine);
    for (int i = 0; i < m->n_ngram; i++) {
        if (r->offload.read_rows || !shard_ngrams(m, i)) continue;
        m->ngram[i].table.data = (const uint8_t *)all[first][i][0];
        m->ngram[i].scales.data = (const uint8_t *)all[first][i][1];
    }
}

/* Whether there is such a tensor but no copy of it. own: of r->m; host: of the shard. */
static bool matrix_missing(const struct weight *own) { return own->data && !own->copy; }
static bool vector_missing(const void *own, const void *host) { return host && own == host; }

/* Fails if a tensor of the shard has no copy on the GPU, with the tensor's name. */
static void upload_check(struct rank *r) {
    const struct model *m = r->m, *shard = r->cuda->shard;
    const struct {
        const char *name;
        bool missing;
    } whole[] = {{"token_embd.weight", matrix_missing(&m->embd)},
                 {"output.weight", matrix_missing(&m->output)},
                 {"output_norm.weight", vector_missing(m->output_norm, shard->output_norm)},
                 {"output_hc_fn.weight", vector_missing(m->hc_head.fn, shard->hc_head.fn)},
                 {"output_hc_base.weight", vector_missing(m->hc_head.base, shard->hc_head.base)},
                 {"output_hc_scale.weight", vector_missing(m->hc_head.scale, shard->hc_head.scale)},
                 {"output_hc_norm.weight", vector_missing(m->hc_head.norm, shard->hc_head.norm)},
                 {"output_hc_down.weight", matrix_missing(&m->hc_head.down)},
                 {"output_hc_up.weight", matrix_missing(&m->hc_head.up)},
                 {"token_embd_norm.weight", vector_missing(m->embd_norm, shard->embd_norm)},
                 {m->family->plain_blocks ? "output_res_score.weight" : "output_res.weight",
                  vector_missing(m->read_end, shard->read_end)}};
    static const char why[] = "was not copied to the GPU, which is a mistake in the program";
    for (const auto &x : whole)
        if (x.missing) rank_fail(r, "tensor '%s' %s", x.name, why);
    for (int i = 0; i < m->n_ngram; i++) {
        const struct ngram *own = &m->ngram[i], *host = &shard->ngram[i];
        char name[64] = "per_layer_token_embd";
        if (!own->ends) snprintf(name, sizeof name, "blk.%d.engram_embd", own->layer);
        if (!shard_ngrams(m, i)) continue;
        if (vector_missing(own->id, host->id)) rank_fail(r, "engram.token_map %s", why);
        if (r->offload.read_rows) continue;
        if (vector_missing(own->table.data, host->table.data)) rank_fail(r, "tensor '%s.weight' %s", name, why);
        if (vector_missing(own->scales.data, host->scales.data)) rank_fail(r, "tensor '%s_scale.weight' %s", name, why);
    }
    for (int il = 0; il < model_blocks(m); il++) {
        const struct layer *own = &m->layers[il], *host = &shard->layers[il];
        const char *name = ""; /* of the row, or of the row that it is a part of */
        for (const struct tensor_rule *rule = rule_next(NULL, own); rule; rule = rule_next(rule, own)) {
            if (rule->name) name = rule->name;
            if (rule->field == NOT_BOUND) continue;
            bool missing = false;
            switch (rule->kind) {
            case TENSOR_MATRIX: missing = matrix_missing(rule_weight(rule, own)); break;
            case TENSOR_ROUTER:
                missing = vector_missing(rule_weight(rule, own)->data, rule_weight(rule, host)->data);
                break;
            case TENSOR_VECTOR: missing = vector_missing(*rule_vector(rule, own), *rule_vector(rule, host)); break;
            case TENSOR_IDS: missing = vector_missing(own->expert_ids, host->expert_ids); break;
            }
            if (missing)
                rank_fail(r, "tensor 'blk.%d.%s%s' %s", m->first_layer + il, name,
                          rule_is_weight(rule) ? ".weight" : "", why);
        }
    }
}

/* ============================================================================================================
 * Several GPUs
 *
 * Links the ranks at the start: mailboxes that the others can write to, NCCL where it is wanted, a first all-reduce
 * that is checked, and the choice between NCCL and our own kernel by the time that they take. All ranks go through the
 * same steps; rank_agree makes all of them hear of a failure.
 * ============================================================================================================ */

/* Whether NCCL can and shall be used; what was asked for and cannot be is an error. A single rank uses it when that is
 * asked for, which tries it out. */
static bool nccl_wanted(struct rank *r, const struct cuda_options *o) {
    const struct shard shard = r->m->shard;
    const char *multi = getenv("NCCL_MULTI_RANK_GPU_ENABLE"), *lacks = NULL;
    const int version = cuda_nccl_version();
    bool twice = false;
    for (int i = 0; i < shard.n_rank * shard.n_stage; i++) /* all stages do the same */
        for (int k = 0; k < i; k++) twice |= o->device[i] == o->device[k] && o->host[i] == o->host[k];
    if (r->cuda->spread && o->allreduce == ALLREDUCE_ONESHOT)
        rank_fail(r, "--allreduce oneshot does not reach the GPUs of other processes: NCCL does");
    if (r->cuda->processes && !version)
        rank_fail(r, "GPUs of several processes need NCCL, and this program was built without it");
    if (o->allreduce == ALLREDUCE_ONESHOT || (shard.n_rank == 1 && o->allreduce == ALLREDUCE_AUTO)) return false;
    if (!version) lacks = "this program was built without NCCL";
    else if (twice && (version < 23000 || !multi || strcmp(multi, "1") != 0))
        lacks = "NCCL does not run two ranks on one GPU";
    if (lacks && o->allreduce == ALLREDUCE_NCCL) rank_fail(r, "--allreduce nccl: %s", lacks);
    if (lacks && r->cuda->spread) rank_fail(r, "GPUs of several processes need NCCL, and %s", lacks);
    return !lacks;
}

#ifdef HAVE_NCCL
/* Makes a communicator of n ranks, of which the first is rank `first` of all. All ranks call it. */
static void nccl_join(struct rank *r, ncclComm_t *comm, int first, int n) {
    ncclUniqueId id = {}, all[MAX_RANKS];
    if (r->index == first) NCCL_OK(r, ncclGetUniqueId(&id));
    rank_all_gather(r, &id, all, sizeof id);
    if (!rank_agree(r)) return;
    char *err =
        r->cuda->err; /* without it a failure ends the program: the other ranks wait inside NCCL and could not be
                               * told */
    r->cuda->err = NULL;
    NCCL_OK(r, ncclCommInitRank(comm, n, all[first], r->index - first));
    r->cuda->err = err;
}

/* Makes the communicators, and NCCL's buffers, which come with the first calls: before the rest of the memory is given
 * out. */
static void nccl_init(struct rank *r) {
    enum { TRY = 1024 };
    struct cuda *c = r->cuda;
    const struct shard p = r->m->shard;
    float *buffer = (float *)cuda_memory(r, (size_t)(p.n_rank + 1) * TRY * sizeof *buffer, "NCCL's first calls");
    if (c->sizes.nccl) nccl_join(r, &c->comm, p.stage * p.n_rank, p.n_rank);
    if (c->processes && !c->failed) nccl_join(r, &c->whole, 0, p.n_rank * p.n_stage);
    if (c->failed) return;
    char *err = c->err;
    c->err = NULL;
    if (c->comm) {
        NCCL_OK(r, ncclAllGather(buffer, buffer + TRY, TRY, ncclFloat32, c->comm, c->stream));
        NCCL_OK(r, ncclAllReduce(buffer, buffer, TRY, ncclBfloat16, ncclSum, c->comm, c->stream));
    }
    if (c->whole) NCCL_OK(r, ncclBroadcast(buffer, buffer, 1, ncclInt32, 0, c->whole, c->stream));
    CUDA_OK(r, cudaStreamSynchronize(c->stream), "NCCL");
    c->err = err;
}

int cuda_nccl_version(void) {
    int version = 0;
    return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}
#else
static void nccl_init(struct rank *) {}
int cuda_nccl_version(void) { return 0; }
#endif

/* Whether one GPU can write to another's memory. */
static bool gpu_reaches(int from, int to) {
    int can = 0;
    if (cudaDeviceCanAccessPeer(&can, from, to) != cudaSuccess) cudaGetLastError();
    return can;
}

bool cuda_peers(const int *device, int n) {
    const char *off = getenv("NCCL_P2P_DISABLE");
    bool all = !off || !*off || !strcmp(off, "0");
    for (int i = 0; i < n * n && all; i++)
        all = device[i / n] == device[i % n] || gpu_reaches(device[i / n], device[i % n]);
    return all;
}

/* Lets the rank's kernels write to the memory of another GPU, a peer's. */
static void peer_enable(struct rank *r, int device) {
    cudaError_t e = cudaDeviceEnablePeerAccess(device, 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
    else cuda_check(r, e, "reaching another GPU", "cudaDeviceEnablePeerAccess(device, 0)", __LINE__, false);
}

/* Whether the GPUs of this process can write to each other's memory. */
static bool ranks_reach(const struct rank *r, const struct cuda_options *o) {
    int device[MAX_RANKS], n = 0;
    for (int i = 0; i < r->m->shard.n_rank * r->m->shard.n_stage; i++)
        if (!r->cuda->remote[i]) device[n++] = o->device[i];
    return cuda_peers(device, n);
}

/* Gives the rank a mailbox and a heartbeat, and tells it where the others' are. */
static void ranks_link(struct rank *r, const int *device, bool peers) {
    static const char what[] = "what other ranks send";
    const struct shard shard = r->m->shard;
    const int n = shard.n_rank * shard.n_stage;
    struct cuda *c = r->cuda;
    struct {
        uint8_t *mailbox;
        struct heartbeat *heartbeat;
    } mine, all[MAX_RANKS];
    for (int i = 0; i < n && peers && !c->failed; i++)
        if (device[i] != c->device && !c->remote[i]) peer_enable(r, device[i]);
    const size_t bytes = mailbox_layout(&c->mailbox[r->index], NULL, r->m, shard, c->sizes);
    mine.mailbox = (uint8_t *)(peers ? cuda_memory(r, bytes, what) : cuda_host_memory(r, bytes, "host memory"));
    mine.heartbeat = (struct heartbeat *)cuda_host_memory(r, sizeof *mine.heartbeat, "host memory");
    c->sequence = (struct sequence *)cuda_memory(r, sizeof *c->sequence, what);
    cuda_sync(r, "starting"); /* the flags are 0 before anybody knows where they are */
    rank_all_gather(r, &mine, all, sizeof mine);
    if (!rank_agree(r)) return;
    for (int i = 0; i < n; i++) {
        const struct shard other = {i % shard.n_rank, shard.n_rank, i / shard.n_rank, shard.n_stage};
        if (!c->remote[i]) mailbox_layout(&c->mailbox[i], all[i].mailbox, r->m, other, c->sizes);
        c->heartbeat[i] = c->remote[i] ? mine.heartbeat : all[i].heartbeat;
    }
}

/* Lets kernels of the rank wait for the host. */
static void waits_make(struct rank *r, const char *what) {
    struct cuda *c = r->cuda;
    if (c->sequence) return;
    c->heartbeat[r->index] = (struct heartbeat *)cuda_host_memory(r, sizeof *c->heartbeat[0], what);
    c->sequence = (struct sequence *)cuda_memory(r, sizeof *c->sequence, what);
}

/* Gives the rank a question to the store, if there is one. */
static void wanted_make(struct rank *r) {
    static const char what[] = "what the disk has";
    struct cuda *c = r->cuda;
    const size_t n = (size_t)r->m->n_expert_max;
    struct store_question *q;
    if (!c->sizes.offload.n_ask || !r->m->max.n_expert_used) return;
    waits_make(r, what);
    q = (struct store_question *)cuda_host_memory(
        r, sizeof *q + (FFN_MATRICES * n + 1) * sizeof *q->at + n * sizeof *q->expert, what);
    if (c->failed) return;
    q->at = (uint64_t *)(q + 1);
    q->expert = (int32_t *)(q->at + FFN_MATRICES * n + 1);
    r->wanted = q;
    r->async_decode = false; /* the experts of a token that is not used would be read for nothing */
}

/* Gives the rank a question for the rows of its tables of n-grams, where these are not in the host's memory: the tables
 * are then what the answers bring. */
static void rows_make(struct rank *r) {
    static const char what[] = "host memory for rows of n-grams";
    struct model *m = &r->cuda->model;
    struct row_question *q = NULL;
    for (int i = 0; i < m->n_ngram && r->offload.read_rows; i++) {
        struct ngram *g = &m->ngram[i];
        const size_t n = (size_t)r->chunk * (size_t)g->n_head;
        if (!shard_ngrams(m, i)) continue;
        if (!q) {
            waits_make(r, what);
            q = (struct row_question *)cuda_host_memory(r, sizeof *q, what);
        }
        if (!q) return;
        struct row_list *list = &q->list[q->n_table++];
        list->table = i;
        list->row = (int32_t *)cuda_host_memory(r, n * sizeof *list->row, what);
        g->table.data = list->rows = (uint8_t *)cuda_host_memory(r, n * g->table.row_bytes, what);
        if (g->scales.data)
            g->scales.data = list->scales = (uint8_t *)cuda_host_memory(r, n * g->scales.row_bytes, what);
    }
    if (!r->cuda->failed) r->rows = q;
}

/* Gives the rank a question to the CPU, if it is the one that asks for its stage. */
static void question_make(struct rank *r) {
    static const char what[] = "what the CPU computes";
    struct cuda *c = r->cuda;
    const struct model *m = r->m;
    const size_t jobs = gpu_dims_of(m, c->sizes).jobs, weights = jobs * DECODE_MAX_TOKENS;
    const size_t values = DECODE_MAX_TOKENS * (size_t)m->n_embd;
    bool asks = false;
    for (int il = 0; il < model_blocks(m); il++) asks |= m->layers[il].n_expert && !layer_held(m, il, c->sizes.offload);
    if (!asks || m->shard.rank) return;
    uint8_t *p = (uint8_t *)cuda_host_memory(
        r, sizeof *r->question + jobs * sizeof(struct expert_job) + 4 * weights + 6 * values, what);
    waits_make(r, what);
    if (c->failed) return;
    struct expert_question *q = (struct expert_question *)p;
    q->job = (struct expert_job *)(q + 1);
    q->weight = (float *)(q->job + jobs);
    q->y = q->weight + weights;
    q->x = (uint16_t *)(q->y + values);
    r->question = q;
}

/* Checks that what ranks push arrives. Some machines allow writes between GPUs and lose them. */
static void all_reduce_check(struct rank *r) {
    static const char what[] = "a first all-reduce";
    const int n = r->m->n_embd, n_rank = r->m->shard.n_rank;
    const size_t bytes = (size_t)n * sizeof(float);
    float *x = (float *)host_memory((size_t)n, sizeof *x), *partial = (float *)host_memory((size_t)n, sizeof *partial);
    for (int turn = 0; turn < 2 && !r->cuda->failed; turn++) { /* both halves of the slots */
        int wrong = 0;
        for (int i = 0; i < n; i++) x[i] = 0, partial[i] = (float)((r->m->shard.rank + 1) * (1 + i % 97 + turn));
        r->n_tok = 1;
        cuda_copy(r, r->act[A_X], x, bytes, what);
        cuda_copy(r, r->act[A_OUT], partial, bytes, what);
        all_reduce_add_norm(r, A_X, A_OUT, NULL, A_H, r->cuda->x32[A_X]);
        cuda_copy(r, x, r->act[A_X], bytes, what);
        if (!cuda_sync(r, what)) break;
        for (int i = 0; i < n; i++) wrong += x[i] != (float)(n_rank * (n_rank + 1) / 2 * (1 + i % 97 + turn));
        if (wrong)
            rank_fail(r,
                      "%d of %d numbers from other GPUs arrived wrong: writes between GPUs are broken here (IOMMU?); "
                      "NCCL_P2P_DISABLE=1 goes through the host",
                      wrong, n);
    }
    free(x);
    free(partial);
}

/* Chooses NCCL or our own kernel for each number of tokens of a decode forward: the one that is faster on the slowest
 * rank. Both give the same bits. Describes the choice in r->link. */
static void all_reduce_choose(struct rank *r, const struct cuda_options *o, bool peers) {
    enum { SIZES = 5 };
    static const int size[SIZES] = {1, 2, 4, 8, DECODE_MAX_TOKENS};
    const struct shard shard = r->m->shard;
    struct cuda *c = r->cuda;
    const char *way = peers ? "GPU memory" : "host memory (the GPUs cannot reach each other)";
    const bool wanted = c->sizes.nccl, both = wanted && o->allreduce == ALLREDUCE_AUTO && !c->spread;
    const int version = cuda_nccl_version();
    float us[SIZES][2] = {}, all[MAX_RANKS][SIZES][2];
    char list[96] = "";
    for (int i = 0; i < SIZES && (shard.n_rank > 1 || wanted); i++)
        for (int k = 0; k < 2; k++)
            if (both || (k == (int)wanted && i % (SIZES - 1) == 0))
                us[i][k] = (float)(1e6 * r->ops->time_all_reduce(r, min(size[i], r->chunk), k));
    rank_all_gather(r, us, all, sizeof us);
    for (int i = 0, n = 1; i < SIZES; i++) {
        float worst[2] = {};
        for (int k = 0; k < shard.n_rank * shard.n_stage; k++)
            for (int w = 0; w < 2; w++) worst[w] = fmaxf(worst[w], all[k][i][w]);
        const bool nccl = both ? worst[1] < worst[0] : wanted;
        for (; n <= size[i]; n++) c->by_nccl[n] = nccl;
        if (i % (SIZES - 1) == 0)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d token%s: %s %.1f us", i ? ", " : "",
                     size[i], size[i] == 1 ? "" : "s", nccl ? "NCCL" : "own kernel", (double)worst[nccl]);
    }
    if (shard.n_rank == 1 && c->processes)
        snprintf(r->link, sizeof r->link, "stages send by NCCL %d.%d", version / 10000, version / 100 % 100);
    else if (shard.n_rank == 1 && !wanted) snprintf(r->link, sizeof r->link, "stages send through %s", way);
    else if (!wanted) snprintf(r->link, sizeof r->link, "all-reduce through %s (%s)", way, list);
    else if (c->spread)
        snprintf(r->link, sizeof r->link, "all-reduce between processes: NCCL %d.%d (%s)", version / 10000,
                 version / 100 % 100, list);
    else
        snprintf(r->link, sizeof r->link, "all-reduce: NCCL %d.%d in prefill, in decode %s (%s); through %s",
                 version / 10000, version / 100 % 100, both ? "the faster one" : "as requested", list, way);
}

/* ============================================================================================================
 * Start and end
 *
 * A rank starts in the order of cuda_rank_start: check the model, choose what the chip and the options allow, upload
 * and check that every tensor came, see what context fits beside the weights, allocate, link the ranks.
 * ============================================================================================================ */

/* Waits for the GPU and for the other ranks, and frees everything; also what a start that failed has left. */
static void cuda_close(struct rank *r) {
    struct cuda *c = r->cuda;
    if (!c) return;
    cudaSetDevice(r->cuda->device);
    if (c->stream) cudaStreamSynchronize(c->stream);
    rank_barrier(r); /* nobody writes to this rank's memory any more */
    graphs_free(c);
    programs_free(r);
#ifdef HAVE_NCCL
    for (ncclComm_t comm : {c->comm, c->whole})
        if (comm) ncclCommDestroy(comm); /* after the graphs: it waits for those that recorded its calls */
#endif
    for (size_t i = 0; i < arrlenu(r->owned); i++) cudaFree(r->owned[i]);
    for (size_t i = 0; i < arrlenu(r->owned_state); i++) cudaFree(r->owned_state[i]);
    for (size_t i = 0; i < arrlenu(c->pinned); i++) cudaFreeHost(c->pinned[i]);
    for (struct staging &s : c->staging) staging_free(&s);
    for (struct staging &s : c->sent) staging_free(&s);
    for (cudaEvent_t e : {c->token_ready, c->listed, c->copied[0], c->copied[1], c->multiplied[0], c->multiplied[1]})
        if (e) cudaEventDestroy(e);
    if (c->side) cudaStreamDestroy(c->side);
    if (c->stream) cudaStreamDestroy(c->stream);
    arrfree(r->owned);
    arrfree(r->owned_state);
    arrfree(c->pinned);
    for (size_t i = 0; i < arrlenu(c->copies); i++) free(c->copies[i]);
    arrfree(c->copies);
    free(c->model.layers);
    r->m = c->shard;
    free(c);
    free(r->work);
    free(r->caches);
    free(r->tokens);
    r->cuda = NULL;
}

static bool cuda_resize(struct rank *r, int n_ctx, char *err);

#define CUDA_OP(type, name, params, args) cuda_##name,
static const struct ops cuda_ops = {OPS(CUDA_OP)};

/* Writes to why, unless that says something already, why the upload cannot handle a matrix. */
static void matrix_check(const struct weight *w, char *why) {
    if (why[0] || !w->data) return;
    if (w->row_bytes > STAGING_BYTES / TILE_ROWS)
        snprintf(why, ERR_MAX, "a matrix with rows of %zu bytes (more than %d) is not supported on a GPU; use --cpu",
                 w->row_bytes, STAGING_BYTES / TILE_ROWS);
    else if (w->n_in % 8)
        snprintf(why, ERR_MAX,
                 "a matrix with rows of %d weights (not a multiple of 8) is not supported on a GPU; use --cpu",
                 w->n_in);
}

/* The shape of the first attention that sees all keys, or else of the first with a window; zeros where there is
 * none. */
static struct attn attn_of(const struct model *m) {
    struct attn found = {};
    for (int il = 0; il < model_blocks(m); il++) {
        const struct layer *layer = &m->layers[il];
        if (layer->attn.head_k && (!found.head_k || (found.window && !layer->attn.window))) found = layer->attn;
    }
    return found;
}

/* Writes to why, unless that says something already, why the kernels cannot run the attention of layer il. */
static void attn_check(const struct model *m, const struct layer *layer, int il, char *why) {
    const struct attn *a = &layer->attn;
    const bool mla = layer->mixer == MIXER_MLA, shared = layer->mixer == MIXER_CSA;
    const enum attn_kind kind = mla ? ATTN_MLA : shared ? ATTN_CSA : ATTN_GQA;
    const int rope = layer_rope_dim(m, layer), dk = mla ? a->kv_lora + rope : a->head_k;
    const int dv = mla ? a->kv_lora : a->head_v;
    if (why[0] || !a->n_head) return;
    const int most = kind == ATTN_GQA ? (int)WIDE_MAX : (int)HEAD_MAX;
    if (!attn_find(kind, dk, dv, 0) || (!shared && (a->head_k > most || a->head_v > most)))
        snprintf(why, ERR_MAX,
                 "attention with keys of %d and values of %d (layer %d) is not supported on a GPU; use --cpu", dk, dv,
                 il);
    else if (mla && a->window && !attn_windows_latents(dv))
        snprintf(why, ERR_MAX,
                 "latent attention with a window and latents of %d (layer %d) is not supported on a GPU; use --cpu", dv,
                 il);
    else if (a->top_k && !index_find(a->index_k, false,
                                     kind == ATTN_GQA && !a->index_means ? INDEX_BLOCK
                                     : a->candidate_back                 ? INDEX_CANDIDATE
                                                                         : INDEX_KEY))
        snprintf(why, ERR_MAX, "an indexer with keys of %d (layer %d) is not supported on a GPU; use --cpu", a->index_k,
                 il);
    else if (a->top_k &&
             (kind == ATTN_GQA && !a->index_means ? a->n_index > INDEX_ROWS
                                                  : index_queries(a->n_index, a->index_k, INDEX_TOKENS) > 96 << 10))
        snprintf(why, ERR_MAX, "an indexer with %d heads (layer %d) is not supported on a GPU; use --cpu", a->n_index,
                 il);
    else if (mla && a->top_k && !attn_chooses_latents(dv))
        snprintf(why, ERR_MAX,
                 "attention over chosen keys with latents of %d (layer %d) is not supported on a GPU; use --cpu", dv,
                 il);
    else if (a->top_k && kind == ATTN_GQA &&
             (a->window ||
              !(a->index_means ? attn_chooses_few(dk, dv) : a->index_block % 16 == 0 && attn_chooses(dk, dv))))
        snprintf(
            why, ERR_MAX,
            "attention over chosen blocks of %d keys with heads of %d and %d (layer %d) is not supported on a GPU; "
            "use --cpu",
            a->index_block, dk, dv, il);
    else if (kind == ATTN_GQA && gpu_wide(a) && a->window)
        snprintf(why, ERR_MAX, "a window with heads of %d (layer %d) is not supported on a GPU; use --cpu", dk, il);
    else if (layer->mixer == MIXER_REL && !attn_biased(dk, dv))
        snprintf(why, ERR_MAX,
                 "a bias by distance with heads of %d and %d (layer %d) is not supported on a GPU; use --cpu", dk, dv,
                 il);
    else if (a->q_gate && a->n_gate)
        snprintf(why, ERR_MAX, "two kinds of gates in attention (layer %d) are not supported on a GPU; use --cpu", il);
}

/* Writes to why, unless that says something already, why the kernels cannot run a layer's recurrent mixer. */
static void delta_check(const struct layer *layer, char *why) {
    const struct delta *d = &layer->delta;
    if (why[0]) return;
    if (layer->mixer == MIXER_CONV && (d->head_v % 4 || d->n_conv > DELTA_TAPS))
        snprintf(why, ERR_MAX, "a gated convolution of %d taps over %d channels is not supported on a GPU; use --cpu",
                 d->n_conv, d->n_value * d->head_v);
    if (layer_recurrent(layer) &&
        (d->head_k > DELTA_HEAD || d->head_v > DELTA_HEAD || d->head_k % 8 || d->head_v % 8 || d->n_conv > DELTA_TAPS))
        snprintf(why, ERR_MAX,
                 "%s with keys of %d, values of %d and a convolution of %d is not supported on a GPU; use --cpu",
                 layer->mixer == MIXER_DELTA ? "a gated delta net" : "Mamba-2", d->head_k, d->head_v, d->n_conv);
}

/* Writes to why (ERR_MAX) why the kernels cannot run this shard with such a cache; nothing if they can. */
static void shard_check(const struct model *m, enum kv_type kv, char *why) {
    const int row = max(m->n_embd, m->max.q_lora);
    int il;
    if (kv == KV_F32) snprintf(why, ERR_MAX, "--kv f32 works only on the CPU; on a GPU use fp8 or bf16");
    else if (row > NORM_MAX)
        snprintf(why, ERR_MAX, "rows of %d values are not supported on a GPU (at most %d); use --cpu", row,
                 (int)NORM_MAX);
    else if (m->n_expert_max > EXPERTS_MAX)
        snprintf(why, ERR_MAX, "%d experts in a layer are not supported on a GPU (at most %d); use --cpu",
                 m->n_expert_max, (int)EXPERTS_MAX);
    else if (m->n_group > ROUTE_MAX_GROUPS)
        snprintf(why, ERR_MAX, "%d routing groups are not supported on a GPU; use --cpu", m->n_group);
    else if (gpu_lacks(m)) snprintf(why, ERR_MAX, "%s are not supported on a GPU; use --cpu", gpu_lacks(m));
    else if (m->family->cache)
        snprintf(why, ERR_MAX, "the state of %s is not supported on a GPU; use --cpu", m->family->arch);
    else if (shard_gap(m, &il))
        snprintf(why, ERR_MAX,
                 "%d ranks are too many for this model on GPUs: rank %d would have no shard of %s %d; use a smaller "
                 "--tp",
                 m->shard.n_rank, m->shard.rank, il < 0 ? "the output after layer" : "layer",
                 m->first_layer + (il < 0 ? m->n_layer - 1 : il));
    for (const struct weight *w : {&m->embd, &m->output, &m->hc_head.down, &m->hc_head.up}) matrix_check(w, why);
    for (il = 0; il < model_blocks(m); il++) {
        const struct layer *layer = &m->layers[il];
        if (!layer_convolves(layer)) attn_check(m, layer, m->first_layer + il, why);
        delta_check(layer, why);
        for (const struct tensor_rule *rule = rule_next(NULL, layer); rule; rule = rule_next(rule, layer))
            if (rule_is_weight(rule)) matrix_check(rule_weight(rule, layer), why);
    }
}

/* Gives the rank its struct cuda, with which it can fail, and a copy of the shard, and opens its GPU. */
static void rank_open(struct rank *r, const struct model *m, const struct cuda_options *o, char *err) {
    struct cuda *c = (struct cuda *)host_memory(1, sizeof *c);
    const int found = cuda_device_count(err);
    c->shard = m;
    c->model = *m;
    c->model.layers = (struct layer *)host_memory((size_t)model_blocks(m), sizeof *m->layers);
    memcpy(c->model.layers, m->layers, (size_t)model_blocks(m) * sizeof *m->layers);
    r->m = &c->model;
    r->ops = &cuda_ops;
    r->cuda = c;
    r->kv_type = o->kv;
    r->timelines = timelines_for(o->timelines, o->n_ctx ? o->n_ctx : INT_MAX);
    act_widths(m, r->width);
    c->device = o->device[r->index];
    for (int i = 0; i < m->shard.n_rank * m->shard.n_stage; i++) {
        c->remote[i] = o->process[i] != o->process[r->index];
        c->processes |= c->remote[i];
        c->spread |= c->remote[i] && i / m->shard.n_rank == m->shard.stage;
    }
    c->err = err;
    if (found) err[0] = 0;
    if (found && c->device >= found)
        snprintf(err, ERR_MAX, "there is no GPU %d; this machine has %d, numbered from 0", c->device, found);
    if (!err[0]) shard_check(m, o->kv, err);
    c->failed = err[0] != 0;
    c->reduce_blocks = ALLREDUCE_BLOCKS;
    c->fuses_norms = true;
    if (c->failed) return;
    const struct gpu_facts f = rank_facts(r);
    launches_overlap = f.major >= 9;
    c->integrated = f.integrated;
    c->l2_bytes = f.l2;
    CUDA_OK(r, cudaSetDevice(c->device), "selecting it");
    CUDA_OK(r, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "creating a stream");
    CUDA_OK(r, cudaEventCreateWithFlags(&c->token_ready, cudaEventDisableTiming), "creating an event");
    if (o->offload.n_slot || o->offload.n_cpu) {
        CUDA_OK(r, cudaStreamCreateWithFlags(&c->side, cudaStreamNonBlocking), "creating a stream");
        for (cudaEvent_t *e : {&c->listed, c->copied, c->copied + 1, c->multiplied, c->multiplied + 1})
            CUDA_OK(r, cudaEventCreateWithFlags(e, cudaEventDisableTiming), "creating an event");
    }
    c->range = (uint32_t *)cuda_memory(r, sizeof c->range_host, "scratch");
}

/* Returns the splits of a context in decode that give every multiprocessor two blocks. n_head_blocks: KV heads, or
 * groups of 16 heads of MLA. */
static int attn_splits(int n_sm, int n_head_blocks) {
    const int n = 2 * n_sm / n_head_blocks;
    return n < 1 ? 1 : n > SPLITS_MAX ? SPLITS_MAX : n;
}

/* Which of the program's images a chip of capability major.minor runs. */
static const char *gpu_image(int major, int minor) {
    const char *built = MOE_CUDA_TARGETS;
    if (major == 12 && strstr(built, "sm_120f")) return "sm_120f";
    if (major == 9 && !minor && strstr(built, "sm_90")) return "sm_90";
    return major >= 9 ? "PTX for compute_90" : "PTX for compute_80";
}

/* Decides what the chip and the options make of a rank. */
static void rank_choose(struct rank *r, const struct cuda_options *o) {
    const struct model *m = r->m;
    const struct attn shape = attn_of(m);
    const struct gpu_facts f = rank_facts(r);
    struct gpu_sizes *s = &r->cuda->sizes;
    bool declared = false;
    snprintf(r->name, sizeof r->name, "%s", f.label);
    r->cuda->n_sm = f.n_sm;
    for (int il = 0; il < model_blocks(m); il++)
        declared |= m->layers[il].n_expert && m->layers[il].gate.has_input_scale;
    /* PTX that the driver compiles for such a chip has no FP4 MMAs */
    const bool can4 = f.major == 12 && gpu_image(f.major, f.minor)[0] != 'P';
    if (o->moe_act == MOE_ACT_FP4 && !can4)
        rank_fail(r,
                  "--moe-act fp4 needs a chip with FP4 tensor cores (compute capability 12) and a program that was "
                  "built for it; the chip has %d, the program is for: %s",
                  f.major, MOE_CUDA_TARGETS);
    s->w4a4 = can4 && (o->moe_act == MOE_ACT_FP4 || (o->moe_act == MOE_ACT_AUTO && declared));
    if (s->w4a4) snprintf(r->name + strlen(r->name), sizeof r->name - strlen(r->name), ", experts' prefill in FP4");
    const int n_head_blocks = shape.kv_lora || shape.n_out_group ? (shape.n_head + 15) / 16 : max(1, shape.n_head_kv);
    s->splits = o->kv_splits ? min(o->kv_splits, (int)SPLITS_MAX) : attn_splits(f.n_sm, n_head_blocks);
    s->n_timeline = r->timelines.n;
    s->nccl = nccl_wanted(r, o);
    s->stats = o->stats;
    s->offload = r->offload = o->offload;
    r->cuda->home = o->home;
    r->cuda->n_home = o->n_home;
}

/* Whether the indexers can choose among the keys of such a context; if not, why says so. */
static bool index_fits(const struct model *m, int n_ctx, char *why) {
    for (int il = 0; il < model_blocks(m); il++) {
        const struct layer *layer = &m->layers[il];
        const int n_list = attn_topk_lists(&layer->attn);
        if (!layer->attn.n_index || index_scores_of(layer, n_ctx) <= INDEX_SCORES / n_list) continue;
        snprintf(why, ERR_MAX,
                 "a context of %d tokens: an indexer on a GPU chooses among %d scores at most, for each of %d lists",
                 n_ctx, INDEX_SCORES / n_list, n_list);
        return false;
    }
    return true;
}

/* Tokens of a forward and of the context that fit beside the weights, the same for all ranks. */
static void rank_fit(struct rank *r, const struct cuda_options *o) {
    const struct model *m = r->m;
    struct cuda *c = r->cuda;
    size_t sharers = 0;
    if (!rank_agree(r)) return; /* all weights are there */
    if (c->sizes.nccl || c->processes) nccl_init(r);
    const struct gpu_facts f = rank_facts(r);
    for (int i = 0; i < m->shard.n_rank * m->shard.n_stage; i++)
        sharers += o->device[i] == c->device && o->host[i] == o->host[r->index];
    const int want = o->n_ctx ? o->n_ctx : m->n_ctx_train;
    c->sharers = (int)sharers;
    c->reduce_blocks = max(1, min((int)ALLREDUCE_BLOCKS, f.n_sm / c->sharers));
    r->n_ctx = want;
    r->chunk = gpu_chunk(m, want, f.total / sharers, o->stats);
    r->bytes = gpu_bytes(m, r->chunk, o->stats, r->timelines.n, o->offload);
    const size_t free = f.free / sharers, needed = r->bytes + o->reserve / sharers + gpu_rounding(m);
    const size_t each = (free > needed ? free - needed : 0) / (size_t)r->timelines.n;
    if (!o->n_ctx) r->n_ctx = context_fit(m, r->kv_type, each, want);
    if (!c->failed && r->n_ctx < 256 && r->n_ctx < want)
        rank_fail(r,
                  "no room for a context: %.2f GiB are free after the weights, activations take %.2f GiB, and "
                  "--vram-reserve keeps %.2f GiB%s",
                  (double)free / 0x1p30, (double)r->bytes / 0x1p30, (double)(o->reserve / sharers) / 0x1p30,
                  m->n_mtp ? "; --spec-type none leaves out the prediction layer" : "");
    char why[ERR_MAX];
    if (!c->failed && !index_fits(m, r->n_ctx, why)) rank_fail(r, "%s; use a smaller -c", why);
    c->reserve = o->reserve / sharers;
    rank_agree(r);
    c->sizes.chunk = r->chunk;
    r->timelines = timelines_for(r->timelines, r->n_ctx);
    r->kv_bytes = timelines_bytes(m, r->kv_type, &r->timelines, (size_t)r->n_ctx);
}

/* Lays out the cache at base, unless that is NULL, each cache tensor aligned to 256 bytes: the rows of all timelines one
 * after the other. Returns its bytes. */
static size_t cache_layout(struct rank *r, uint8_t *base) {
    size_t bytes = 0;
    for (int il = 0; il < model_blocks(r->m); il++) {
        struct cache_tensor cache[CACHE_USES];
        layer_cache(r->m, &r->m->layers[il], r->kv_type, cache);
        for (struct cache_tensor &p : cache) {
            const size_t rows = cache_rows_divide(&p, &r->timelines, (size_t)r->n_ctx);
            p.data = base && rows ? base + bytes : NULL;
            bytes += (rows * p.row_bytes + 255) / 256 * 256;
            if (p.type == KV_FP8) {
                p.scale = base && rows ? (float *)(base + bytes) : NULL;
                bytes += (rows * cache_scale_bytes(&p) + 255) / 256 * 256;
            }
            if (base) caches_place(r, il, (int)(&p - cache), &p);
        }
    }
    return bytes;
}

/* A buffer of activations; NULL where it has no bytes, or after an error. */
static void *activations(struct rank *r, size_t bytes) { return bytes ? cuda_memory(r, bytes, "activations") : NULL; }

/* Allocates the cache, the activations, and what the host keeps of them. */
static void rank_allocate(struct rank *r) {
    const struct model *m = r->m;
    const struct shard p = m->shard;
    struct cuda *c = r->cuda;
    const struct gpu_sizes s = c->sizes;
    const struct gpu_dims d = gpu_dims_of(m, s);
    struct route_args *route = &c->route;
    const size_t batch_bytes = sizeof *c->batch + (size_t)r->chunk * sizeof(int32_t);
    r->n_run = 1;
    r->caches = (struct cache_tensor(*)[CACHE_USES])host_memory(
        2 * (size_t)(timelines_all(&r->timelines) * model_blocks(m)), sizeof *r->caches);
    r->cache = r->caches;
    r->work = (struct candidate *)host_memory((size_t)m->n_ids, sizeof *r->work);
    r->tokens = (int32_t *)host_memory((size_t)r->chunk, sizeof *r->tokens);
    c->batch = (struct batch *)cuda_memory(r, batch_bytes, "activations");
    c->tokens = (int32_t *)(c->batch + 1);
    c->sample.token = c->tokens;
    r->async_decode = true;
    for (struct staging &x : c->sent) staging_take(r, &x, batch_bytes, false, "host memory");
    for (int i = 0; i < m->n_rope; i++)
        vector_upload(r, &c->model.ropes[i].freq, (size_t)m->ropes[i].dim / 2, "activations");
    uint8_t *cache = (uint8_t *)cuda_memory(r, cache_layout(r, NULL), "the KV cache");
    if (cache) {
        cache_layout(r, cache);
        arrput(r->owned_state, arrpop(r->owned));
    }
#define ALLOCATE(field, type, count) c->field = (type *)activations(r, sizeof(type) * (count));
    GPU_BUFFERS(ALLOCATE)
#undef ALLOCATE
    struct expert_job one_job[DECODE_MAX_TOKENS + 1] = {{1, 0, 0, 0}};
    for (int n = 1; n <= DECODE_MAX_TOKENS; n++) one_job[n].tokens = (1u << n) - 1;
    if (c->one_job) cuda_copy(r, c->one_job, one_job, sizeof one_job, "activations");
    c->logits_stride = logits_stride(p.rank ? m->output.n_out : m->n_vocab);
    const size_t logits_bytes = LOGIT_ROWS * ((size_t)m->n_vocab + 1) * sizeof(float);
    c->logits_host = (float *)cuda_host_memory(r, logits_bytes, "host memory for logits");
    c->token_host = (int32_t *)(c->logits_host + LOGIT_ROWS * (size_t)m->n_vocab);
    route->n_embd = m->n_embd;
    route->k = m->max.n_expert_used;
    route->n_group = m->n_group;
    route->n_group_used = m->n_group_used;
    route->gating = m->gating;
    route->norm = m->norm_topk_prob;
    route->factor = m->routed_scaling_factor;
    c->sort.id = route->id;
    route->inverse = c->sort.inverse;
    c->sort.k = route->k;
    r->mtp_hidden = c->mtp_hidden;
    r->n_mtp_hidden = (int)d.mtp_hidden;
    r->n_mtp_own = (int)d.mtp_own;
    memcpy(r->act, c->x32, sizeof r->act);
    c->x_first = c->x32[A_X];
    slots_fill(r, true);
    CUDA_OK(r, cudaStreamSynchronize(c->stream), "starting");
}

static bool cuda_resize(struct rank *r, int n_ctx, char *err) {
    struct cuda *c = r->cuda;
    const int before = r->n_ctx;
    const size_t had = cache_layout(r, NULL);
    void *cache = NULL;
    if (n_ctx == before) return true;
    if (!index_fits(r->m, n_ctx, err)) return false;
    cuda_sync(r, "a forward pass");
    r->n_ctx = n_ctx;
    size_t bytes = cache_layout(r, NULL);
    const size_t room = rank_facts(r).free / (size_t)c->sharers + had;
    bool done = room >= bytes + c->reserve;
    if (done) {
        graphs_free(c);
        cudaFree(r->owned_state[0]);
        done = cudaMalloc(&cache, bytes + 256) == cudaSuccess;
        if (!done) errors_clear();
        if (!done && cudaMalloc(&cache, had + 256) != cudaSuccess)
            rank_fatal("the memory of the KV cache is lost: another program took it");
        r->owned_state[0] = cache;
    }
    if (!done) {
        snprintf(err, ERR_MAX, "%s: the cache takes %.2f GiB, and there is room for %.2f GiB", r->name,
                 (double)bytes / 0x1p30, (double)(room > c->reserve ? room - c->reserve : 0) / 0x1p30);
        r->n_ctx = before;
        bytes = had;
    }
    if (cache) {
        CUDA_OK(r, cudaMemsetAsync(cache, 0, bytes + 256, c->stream), "clearing memory");
        cache_layout(r, (uint8_t *)cache);
        cuda_sync(r, "clearing memory");
    }
    r->kv_bytes = timelines_bytes(r->m, r->kv_type, &r->timelines, (size_t)r->n_ctx);
    return done;
}

/* The steps of a start. 0, or -1 with a message and nothing held. */
static int rank_begin(struct rank *r, const struct model *m, const struct cuda_options *o, char *err) {
    const int n = m->shard.n_rank * m->shard.n_stage;
    rank_open(r, m, o, err);
    struct cuda *c = r->cuda;
    if (!c->failed) rank_choose(r, o);
    if (!c->failed) weights_upload(r, r->index ? NULL : o->progress);
    ngrams_upload(r);
    if (!c->failed) upload_check(r);
    if (!c->failed) programs_make(r);
    if (o->stats)
        r->stats = (double *)cuda_memory(
            r, (size_t)model_blocks(m) * (size_t)m->n_expert_max * STATS * sizeof *r->stats, "scores");
    if (o->in_sum2)
        r->in_sum2 =
            (float *)cuda_memory(r, in_sum2_before(m, model_blocks(m)) * sizeof *r->in_sum2, "sums of squared inputs");
    rank_fit(r, o);
    if (!c->failed) {
        rank_allocate(r);
        if (n > 1 || o->allreduce == ALLREDUCE_NCCL) {
            const bool peers = ranks_reach(r, o);
            ranks_link(r, o->device, peers);
            for (int i = 0; i <= DECODE_MAX_TOKENS && c->spread; i++) c->by_nccl[i] = true;
            if (!c->failed && m->shard.n_rank > 1) all_reduce_check(r);
            if (rank_agree(r)) all_reduce_choose(r, o, peers);
        }
        if (!c->failed) question_make(r);
        if (!c->failed) wanted_make(r);
        if (!c->failed) rows_make(r);
        r->free_bytes = rank_facts(r).free;
    }
    if (rank_agree(r)) {
        c->err = NULL;
        return 0;
    }
    r->ops->close(r);
    return -1;
}

/* Runs the start with a share of the host's threads: all ranks repack rows of the file at once. */
int cuda_rank_start(struct rank *r, const struct model *shard, const void *opts, char *err) {
    const int n = shard->shard.n_rank * shard->shard.n_stage, procs = omp_get_num_procs();
    const int threads = omp_get_max_threads();
    if (n > 1) omp_set_num_threads(procs > n ? procs / n : 1); /* of this thread: all ranks upload at once */
    const int rc = rank_begin(r, shard, (const struct cuda_options *)opts, err);
    omp_set_num_threads(threads);
    return rc;
}

/* ============================================================================================================
 * Facts about GPUs
 *
 * For --plan, --doctor and --version.
 * ============================================================================================================ */

int cuda_device_count(char *err) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaSuccess && n) return n;
    int driver = 0, needed = 0; /* 1000 major + 10 minor versions of CUDA; driver 0: none is installed */
    if (e == cudaErrorInsufficientDriver) cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&needed);
    if (driver)
        snprintf(err, ERR_MAX, "no usable GPU: the NVIDIA driver has CUDA %d.%d, a driver with CUDA %d.%d is needed",
                 driver / 1000, driver % 1000 / 10, needed / 1000, needed % 1000 / 10);
    else if (e == cudaErrorInsufficientDriver) snprintf(err, ERR_MAX, "no usable GPU: no NVIDIA driver is installed");
    else snprintf(err, ERR_MAX, "no usable GPU: %s", e == cudaSuccess ? "none was found" : cudaGetErrorString(e));
    cudaGetLastError();
    return 0;
}

/* Sets a device until the end of the scope. */
struct device_for_now {
    int before = 0;
    cudaError_t e;
    explicit device_for_now(int device) {
        cudaGetDevice(&before);
        e = cudaSetDevice(device);
    }
    ~device_for_now() { cudaSetDevice(before); }
};

const char *cuda_targets(void) { return MOE_CUDA_TARGETS; }

const char *cuda_pin(struct host_range h) {
    const cudaError_t e = cudaHostRegister(h.base, h.bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (e == cudaSuccess) return NULL;
    errors_clear();
    return cudaGetErrorString(e);
}

void cuda_unpin(struct host_range h) {
    if (cudaHostUnregister(h.base) != cudaSuccess) errors_clear();
}

/* One block, one thread: does the program have an image for this chip? */
__global__ void k_probe(int *out) {
    grid_dependency_wait();
    *out = 42;
}

const char *cuda_facts(int device, struct gpu_facts *f, bool probe) {
    const struct device_for_now now(device);
    cudaDeviceProp p;
    int *answer = NULL, got = 0, khz = 0, bits = 0;
    memset(f, 0, sizeof *f);
    cudaError_t e = now.e;
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&p, device);
    if (e == cudaSuccess) e = cudaDeviceGetPCIBusId(f->bus, sizeof f->bus, device);
    if (e == cudaSuccess) e = cudaMemGetInfo(&f->free, &f->total);
    if (e == cudaSuccess) e = cudaDriverGetVersion(&f->driver);
    if (e == cudaSuccess) e = cudaRuntimeGetVersion(&f->runtime);
    if (e == cudaSuccess && probe) e = cudaMalloc((void **)&answer, sizeof *answer);
    if (e != cudaSuccess) {
        errors_clear();
        return cudaGetErrorString(e);
    }
    if (cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess)
        f->rate = 2e3 * khz * bits / 8; /* both edges of the clock */
    f->l2 = p.l2CacheSize;
    snprintf(f->name, sizeof f->name, "%.63s", p.name);
    snprintf(f->label, sizeof f->label, "GPU %d %.63s (sm_%d%d, %.0f GiB)", device, f->name, p.major, p.minor,
             (double)f->total / 0x1p30);
    f->major = p.major;
    f->minor = p.minor;
    f->integrated = p.integrated != 0;
    /* the driver counts pages of files as used, those of the model's among them */
    if (f->integrated) f->free = max(f->free, min(f->total, (size_t)rank_host_memory()));
    f->block_shared = (int)p.sharedMemPerBlockOptin;
    f->n_sm = p.multiProcessorCount;
    f->image = gpu_image(p.major, p.minor);
    if (probe) {
        LAUNCH_PDL(k_probe, 1, 1, 0, (cudaStream_t)0, answer);
        e = cudaGetLastError();
        if (e == cudaSuccess) e = cudaMemcpy(&got, answer, sizeof got, cudaMemcpyDeviceToHost);
        if (e != cudaSuccess || got != 42)
            snprintf(f->kernel_error, sizeof f->kernel_error, "%s",
                     e != cudaSuccess ? cudaGetErrorString(e) : "a kernel gave a wrong answer");
        cudaFree(answer);
    }
    errors_clear();
    return NULL;
}

/* Reads n 16-byte words and writes nothing: the condition on `out` keeps the compiler from dropping the loads. Grid: any,
 * block: 256. */
__global__ void __launch_bounds__(256) k_read_host(const uint4 *p, size_t n, uint32_t *out) {
    enum { IN_FLIGHT = 8 };
    grid_dependency_wait();
    uint32_t any = 0;
    const size_t step = (size_t)gridDim.x * 256;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n; i += IN_FLIGHT * step) {
        uint4 v[IN_FLIGHT];
        UNROLL for (int u = 0; u < IN_FLIGHT; u++) v[u] =
            ld_sys16(p + (i + (size_t)u * step < n ? i + (size_t)u * step : i));
        UNROLL for (int u = 0; u < IN_FLIGHT; u++) any |= v[u].x | v[u].y | v[u].z | v[u].w;
    }
    if (any) *out = any; /* the memory is zero */
}

#ifndef HOST_PROBE_BYTES
enum { HOST_PROBE_BYTES = 64 << 20 };
#endif

void cuda_host(int device, double *copies, double *loads) {
    enum { RUNS = 10 };
    const struct device_for_now now(device);
    uint8_t *host = NULL, *a = NULL;
    *copies = *loads = 0;
    const bool ok = now.e == cudaSuccess && cudaMalloc((void **)&a, HOST_PROBE_BYTES) == cudaSuccess &&
                    cudaHostAlloc((void **)&host, HOST_PROBE_BYTES, cudaHostAllocMapped) == cudaSuccess;
    if (ok) memset(host, 0, HOST_PROBE_BYTES);
    for (int way = 0; way < 2 && ok; way++) {
        struct stopwatch watch(0);
        for (int i = -1; i < RUNS; i++) { /* the first is not counted */
            if (!i) watch.mark(0);
            if (way)
                LAUNCH_PDL(k_read_host, FETCH_BLOCKS, 256, 0, (cudaStream_t)0, (const uint4 *)host,
                           (size_t)HOST_PROBE_BYTES / 16, (uint32_t *)a);
            else cudaMemcpyAsync(a, host, HOST_PROBE_BYTES, cudaMemcpyHostToDevice, 0);
        }
        watch.mark(1);
        const double seconds = watch.seconds();
        if (seconds > 0) *(way ? loads : copies) = (double)HOST_PROBE_BYTES * RUNS / seconds;
    }
    cudaFree(a), cudaFreeHost(host);
    cudaGetLastError();
}

void cuda_pair(int from, int to, double *rate, double *latency) {
    const struct device_for_now now(from);
    enum { BIG = 64 << 20, SMALL = 8 << 10 };
    uint8_t *a = NULL, *b = NULL;
    *rate = *latency = 0;
    bool ok = cudaSetDevice(to) == cudaSuccess && cudaMalloc((void **)&b, BIG) == cudaSuccess &&
              cudaSetDevice(from) == cudaSuccess && cudaMalloc((void **)&a, BIG) == cudaSuccess;
    if (from != to && gpu_reaches(from, to)) cudaDeviceEnablePeerAccess(to, 0);
    struct stopwatch watch(0);
    const double big = ok ? copy_seconds(&watch, b, to, a, from, BIG) : 0;
    if (big > 0) *rate = BIG / big, *latency = copy_seconds(&watch, b, to, a, from, SMALL);
    cudaFree(a), cudaFree(b);
    cudaGetLastError();
}
