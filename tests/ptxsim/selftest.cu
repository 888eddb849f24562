/* Self-test of the PTX simulator: what each instruction computes, against truths from elsewhere.
 *
 * nvcc compiles this file to PTX, uncompressed; it is linked with the simulator in place of libcudart. A kernel
 * executes one instruction by inline assembler, so that it is certain which one runs, over arrays of operands. Host
 * code checks the results. Truths: the processor's arithmetic and libm; the codecs of gguf_nvfp4.h, cuda_fp16.h,
 * cuda_bf16.h, cuda_fp8.h and cuda_fp4.h; the tables of the PTX ISA for layouts and for errors of approximations.
 *
 *   selftest [NAME..]               runs the tests whose names contain one of these words, or all
 *   selftest --list                 names the tests
 *   selftest --instructions FILE..  lists the instructions of PTX files that no inline assembler here has; exit 1 if
 *                                   there are any
 *
 * Contents: tests, arithmetic (selftest_arithmetic.h), loads and stores, atomics, lanes, matrices, control, counters,
 * violations, instructions, main. */
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <cuda_fp4.h>
#pragma GCC diagnostic pop
#include <cuda_fp8.h>

#include <algorithm>
#include <cerrno>
#include <cfenv>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "../../gguf_nvfp4.h"
#include "ptxsim.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
/* Registers by the letters of inline assembler. */
typedef u16 t_h;
typedef u32 t_r;
typedef u64 t_l;

enum { LANES = 32 };
#define ALL_LANES 0xFFFFFFFFu

/* Code for images of a compute capability and above. */
#define FROM_80(...) __VA_ARGS__
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
#define FROM_89(...) __VA_ARGS__
#else
#define FROM_89(...)
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FROM_90(...) __VA_ARGS__
#else
#define FROM_90(...)
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#define FROM_120(...) __VA_ARGS__
#else
#define FROM_120(...)
#endif

/* ---- Tests ------------------------------------------------------------------------------------------------------- */

enum Outcome { PASSED, FAILED, SKIPPED };
struct Test {
    std::string name;
    int capability; /* of the image, at least */
    std::function<Outcome()> run;
};
static std::vector<Test> tests;

static std::string failure;
static const char *running = ""; /* name of a test */
__attribute__((format(printf, 1, 2))) static Outcome fail(const char *format, ...) {
    char s[512];
    va_list v;
    va_start(v, format);
    vsnprintf(s, sizeof s, format, v);
    va_end(v);
    failure = s;
    return FAILED;
}

#define CUDA(call)                                                                                      \
    do {                                                                                                \
        const cudaError_t error_ = (call);                                                              \
        if (error_ != cudaSuccess)                                                                      \
            printf("%-8s %s: %s: %s\n", "FAILED", running, #call, cudaGetErrorString(error_)), exit(1); \
    } while (0)

/* An array on the device, filled from one of the host, and back. */
template <class T>
struct Array {
    T *p = NULL;
    size_t n;
    explicit Array(size_t count) : n(count) {
        CUDA(cudaMalloc((void **)&p, n * sizeof(T)));
        CUDA(cudaMemset(p, 0xAA, n * sizeof(T)));
    }
    explicit Array(const std::vector<T> &v) : Array(v.size()) { put(v); }
    ~Array() { cudaFree(p); }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    void put(const std::vector<T> &v) { CUDA(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice)); }
    std::vector<T> get() const {
        std::vector<T> v(n);
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

__global__ void k_capability(int *to) {
    FROM_80(*to = 80;)
    FROM_89(*to = 89;)
    FROM_90(*to = 90;)
    FROM_120(*to = 120;)
}

#include "selftest_arithmetic.h"

/* ---- Loads and stores -------------------------------------------------------------------------------------------- */

/* Each lane has ROW bytes of memory and accesses byte AT of them: the register holds AT - 16, the instruction adds 16.
 * Generic addresses are tried in global and in shared memory. */
enum { ROW = 64, AT = 32 };

/* L(name, instruction, space, vector, register, bits, signed) */
/* clang-format off */
#define LOADS(L)                                                                                                       \
    L(ld_f32, "ld.f32", generic, 1, r, 32, 0) L(ld_v2_f32, "ld.v2.f32", generic, 2, r, 32, 0)                          \
    L(ld_v2_u32, "ld.v2.u32", generic, 2, r, 32, 0) L(ld_v4_f32, "ld.v4.f32", generic, 4, r, 32, 0)                    \
    L(ld_v4_u32, "ld.v4.u32", generic, 4, r, 32, 0)                                                                    \
    L(ld_s8, "ld.s8", generic, 1, r, 8, 1) L(ld_u64, "ld.u64", generic, 1, l, 64, 0)                                   \
    L(ldg_u8, "ld.global.u8", global, 1, r, 8, 0) L(ldg_u8_16, "ld.global.u8", global, 1, h, 8, 0)                     \
    L(ldg_u8_64, "ld.global.u8", global, 1, l, 8, 0) L(ldg_s8, "ld.global.s8", global, 1, r, 8, 1)                     \
    L(ldg_s8_16, "ld.global.s8", global, 1, h, 8, 1) L(ldg_s8_64, "ld.global.s8", global, 1, l, 8, 1)                  \
    L(ldg_u16, "ld.global.u16", global, 1, h, 16, 0) L(ldg_u16_32, "ld.global.u16", global, 1, r, 16, 0)               \
    L(ldg_s16, "ld.global.s16", global, 1, r, 16, 1) L(ldg_s16_64, "ld.global.s16", global, 1, l, 16, 1)               \
    L(ldg_u32, "ld.global.u32", global, 1, r, 32, 0) L(ldg_u32_64, "ld.global.u32", global, 1, l, 32, 0)               \
    L(ldg_s32, "ld.global.s32", global, 1, r, 32, 1) L(ldg_s32_64, "ld.global.s32", global, 1, l, 32, 1)               \
    L(ldg_f32, "ld.global.f32", global, 1, r, 32, 0) L(ldg_u64, "ld.global.u64", global, 1, l, 64, 0)                  \
    L(ldg_f64, "ld.global.f64", global, 1, l, 64, 0) L(ldg_v2_f32, "ld.global.v2.f32", global, 2, r, 32, 0)            \
    L(ldg_v2_u32, "ld.global.v2.u32", global, 2, r, 32, 0) L(ldg_v4_f32, "ld.global.v4.f32", global, 4, r, 32, 0)      \
    L(ldg_v4_u32, "ld.global.v4.u32", global, 4, r, 32, 0) L(ldg_v4_u16, "ld.global.v4.u16", global, 4, h, 16, 0)      \
    L(ldg_v4_u8, "ld.global.v4.u8", global, 4, h, 8, 0) L(ldg_v2_u64, "ld.global.v2.u64", global, 2, l, 64, 0)         \
    L(ldg_cg_f32, "ld.global.cg.f32", global, 1, r, 32, 0) L(ldg_cg_s32, "ld.global.cg.s32", global, 1, r, 32, 1)      \
    L(ldg_cg_u64, "ld.global.cg.u64", global, 1, l, 64, 0)                                                             \
    L(ldg_cg_v2_f32, "ld.global.cg.v2.f32", global, 2, r, 32, 0)                                                       \
    L(ldg_cg_v2_u32, "ld.global.cg.v2.u32", global, 2, r, 32, 0)                                                       \
    L(ldg_cg_v4_f32, "ld.global.cg.v4.f32", global, 4, r, 32, 0)                                                       \
    L(ldg_cg_v4_u32, "ld.global.cg.v4.u32", global, 4, r, 32, 0)                                                       \
    L(ldg_nc_u32, "ld.global.nc.u32", global, 1, r, 32, 0)                                                             \
    L(ldg_nc_v4_u32, "ld.global.nc.L1::no_allocate.v4.u32", global, 4, r, 32, 0)                                       \
    L(ldg_volatile, "ld.volatile.global.u32", global, 1, r, 32, 0)                                                     \
    L(ldg_acquire, "ld.acquire.sys.global.u32", global, 1, r, 32, 0)                                                   \
    L(ldg_relaxed, "ld.relaxed.sys.global.v4.u32", global, 4, r, 32, 0)                                                \
    L(lds_u8, "ld.shared.u8", shared, 1, r, 8, 0) L(lds_s8, "ld.shared.s8", shared, 1, r, 8, 1)                        \
    L(lds_u16, "ld.shared.u16", shared, 1, h, 16, 0) L(lds_s16, "ld.shared.s16", shared, 1, r, 16, 1)                  \
    L(lds_u32, "ld.shared.u32", shared, 1, r, 32, 0) L(lds_f32, "ld.shared.f32", shared, 1, r, 32, 0)                  \
    L(lds_u64, "ld.shared.u64", shared, 1, l, 64, 0) L(lds_f64, "ld.shared.f64", shared, 1, l, 64, 0)                  \
    L(lds_v2_f32, "ld.shared.v2.f32", shared, 2, r, 32, 0) L(lds_v2_u32, "ld.shared.v2.u32", shared, 2, r, 32, 0)      \
    L(lds_v2_u64, "ld.shared.v2.u64", shared, 2, l, 64, 0) L(lds_v4_f32, "ld.shared.v4.f32", shared, 4, r, 32, 0)      \
    L(lds_v4_u16, "ld.shared.v4.u16", shared, 4, h, 16, 0) L(lds_v4_u32, "ld.shared.v4.u32", shared, 4, r, 32, 0)

#define STORES(L)                                                                                                      \
    L(st_f32, "st.f32", generic, 1, r, 32, 0) L(st_v2_f32, "st.v2.f32", generic, 2, r, 32, 0)                          \
    L(st_v4_f32, "st.v4.f32", generic, 4, r, 32, 0)                                                                    \
    L(stg_u8, "st.global.u8", global, 1, r, 8, 0) L(stg_u8_16, "st.global.u8", global, 1, h, 8, 0)                     \
    L(stg_u16, "st.global.u16", global, 1, h, 16, 0) L(stg_u16_32, "st.global.u16", global, 1, r, 16, 0)               \
    L(stg_u32, "st.global.u32", global, 1, r, 32, 0) L(stg_u32_64, "st.global.u32", global, 1, l, 32, 0)               \
    L(stg_f32, "st.global.f32", global, 1, r, 32, 0) L(stg_u64, "st.global.u64", global, 1, l, 64, 0)                  \
    L(stg_f64, "st.global.f64", global, 1, l, 64, 0) L(stg_v2_f32, "st.global.v2.f32", global, 2, r, 32, 0)            \
    L(stg_v2_u32, "st.global.v2.u32", global, 2, r, 32, 0) L(stg_v4_f32, "st.global.v4.f32", global, 4, r, 32, 0)      \
    L(stg_v4_u32, "st.global.v4.u32", global, 4, r, 32, 0) L(stg_v4_u8, "st.global.v4.u8", global, 4, h, 8, 0)         \
    L(stg_volatile, "st.volatile.global.u32", global, 1, r, 32, 0)                                                     \
    L(stg_release, "st.release.sys.global.u32", global, 1, r, 32, 0)                                                   \
    L(stg_relaxed, "st.relaxed.sys.global.v4.u32", global, 4, r, 32, 0)                                                \
    L(sts_u8, "st.shared.u8", shared, 1, r, 8, 0) L(sts_u16, "st.shared.u16", shared, 1, h, 16, 0)                     \
    L(sts_u32, "st.shared.u32", shared, 1, r, 32, 0) L(sts_f32, "st.shared.f32", shared, 1, r, 32, 0)                  \
    L(sts_u64, "st.shared.u64", shared, 1, l, 64, 0) L(sts_f64, "st.shared.f64", shared, 1, l, 64, 0)                  \
    L(sts_v2_f32, "st.shared.v2.f32", shared, 2, r, 32, 0) L(sts_v2_u32, "st.shared.v2.u32", shared, 2, r, 32, 0)      \
    L(sts_v2_u64, "st.shared.v2.u64", shared, 2, l, 64, 0) L(sts_v4_f32, "st.shared.v4.f32", shared, 4, r, 32, 0)      \
    L(sts_v4_u32, "st.shared.v4.u32", shared, 4, r, 32, 0)
/* clang-format on */

#define ADDRESS_global(p)  "l"(__cvta_generic_to_global(p))
#define ADDRESS_shared(p)  "r"((u32)__cvta_generic_to_shared(p))
#define ADDRESS_generic(p) "l"(p)

/* clang-format off */
#define LOAD_1(text, to, address) asm volatile("{ " text " %0, [%1+16]; }" : to(v[0]) : address : "memory")
#define LOAD_2(text, to, address)                                                                                      \
    asm volatile("{ " text " {%0, %1}, [%2+16]; }" : to(v[0]), to(v[1]) : address : "memory")
#define LOAD_4(text, to, address)                                                                                      \
    asm volatile("{ " text " {%0, %1, %2, %3}, [%4+16]; }"                                                             \
                 : to(v[0]), to(v[1]), to(v[2]), to(v[3]) : address : "memory")
#define STORE_1(text, of, address) asm volatile("{ " text " [%1+16], %0; }" :: of(x[0]), address : "memory")
#define STORE_2(text, of, address)                                                                                     \
    asm volatile("{ " text " [%2+16], {%0, %1}; }" :: of(x[0]), of(x[1]), address : "memory")
#define STORE_4(text, of, address)                                                                                     \
    asm volatile("{ " text " [%4+16], {%0, %1, %2, %3}; }"                                                             \
                 :: of(x[0]), of(x[1]), of(x[2]), of(x[3]), address : "memory")
/* clang-format on */

enum { IN_global = 1, IN_shared = 2, IN_generic = 3 };
/* in_shared: where a generic address points to. */
#define LOAD_KERNEL(name, text, space, n, R, bits, is_signed)                                                         \
    __global__ void k_##name(u64 *out, const u8 *data, int in_shared) {                                               \
        __shared__ __align__(16) u8 s[LANES * ROW];                                                                   \
        const int l = (int)threadIdx.x;                                                                               \
        for (int j = 0; j < ROW; j++) s[l * ROW + j] = data[l * ROW + j];                                             \
        __syncthreads();                                                                                              \
        const u8 *p = (IN_##space == IN_shared || (IN_##space == IN_generic && in_shared) ? s : data) + l * ROW + 16; \
        t_##R v[4] = {0, 0, 0, 0};                                                                                    \
        LOAD_##n(text, "=" #R, ADDRESS_##space(p));                                                                   \
        for (int j = 0; j < 4; j++) out[l * 4 + j] = v[j];                                                            \
    }
#define STORE_KERNEL(name, text, space, n, R, bits, is_signed)                                  \
    __global__ void k_##name(u8 *out, const u64 *v, int in_shared) {                            \
        __shared__ __align__(16) u8 s[LANES * ROW];                                             \
        const int l = (int)threadIdx.x;                                                         \
        const bool shared = IN_##space == IN_shared || (IN_##space == IN_generic && in_shared); \
        for (int j = 0; j < ROW; j++) s[l * ROW + j] = 0xAA;                                    \
        __syncthreads();                                                                        \
        u8 *p = (shared ? s : out) + l * ROW + 16;                                              \
        t_##R x[4];                                                                             \
        for (int j = 0; j < 4; j++) x[j] = (t_##R)v[l * 4 + j];                                 \
        STORE_##n(text, #R, ADDRESS_##space(p));                                                \
        __syncthreads();                                                                        \
        for (int j = 0; shared && j < ROW; j++) out[l * ROW + j] = s[l * ROW + j];              \
    }
LOADS(LOAD_KERNEL)
STORES(STORE_KERNEL)

static const struct Access {
    const char *name, *text;
    int space, n, register_bits, bits, is_signed;
    const void *kernel;
} loads[] =
    {
#define ACCESS_ENTRY(name, text, space, n, R, bits, is_signed) \
    {#name, text, IN_##space, n, 8 * (int)sizeof(t_##R), bits, is_signed, (const void *)k_##name},
        LOADS(ACCESS_ENTRY)},
  stores[] = {STORES(ACCESS_ENTRY)};

static u64 low_bits(u64 x, int bits) { return bits == 64 ? x : x & ((1ull << bits) - 1); }

static void run_access(const Access &t, const void *to, const void *from, int in_shared) {
    void *args[] = {(void *)&to, (void *)&from, &in_shared};
    CUDA(cudaLaunchKernel(t.kernel, dim3(1), dim3(LANES), args, 0, 0));
    CUDA(cudaDeviceSynchronize());
}
static Outcome run_load(const Access &t) {
    std::vector<u8> data(LANES * ROW);
    for (u8 &x : data) x = (u8)random_bits();
    for (int in_shared = 0; in_shared < (t.space == IN_generic ? 2 : 1); in_shared++) {
        const Array<u8> from(data);
        const Array<u64> to(LANES * 4);
        run_access(t, to.p, from.p, in_shared);
        const std::vector<u64> got = to.get();
        for (int i = 0; i < LANES * 4; i++) {
            u64 want = 0;
            if (i % 4 < t.n) memcpy(&want, &data[(size_t)(i / 4 * ROW + AT + i % 4 * t.bits / 8)], (size_t)t.bits / 8);
            if (t.is_signed && want >> (t.bits - 1)) want |= low_bits(~0ull << (t.bits - 1) << 1, 64);
            want = low_bits(want, t.register_bits);
            if (got[(size_t)i] != want)
                return fail("%s: lane %d, element %d is %#llx instead of %#llx", t.text, i / 4, i % 4,
                            (unsigned long long)got[(size_t)i], (unsigned long long)want);
        }
    }
    return PASSED;
}
static Outcome run_store(const Access &t) {
    std::vector<u64> values(LANES * 4);
    for (u64 &x : values) x = random_bits();
    for (int in_shared = 0; in_shared < (t.space == IN_generic ? 2 : 1); in_shared++) {
        std::vector<u8> want(LANES * ROW, 0xAA);
        for (int i = 0; i < LANES * 4; i++)
            if (i % 4 < t.n)
                memcpy(&want[(size_t)(i / 4 * ROW + AT + i % 4 * t.bits / 8)], &values[(size_t)i], (size_t)t.bits / 8);
        const Array<u64> from(values);
        const Array<u8> to(LANES * ROW);
        run_access(t, to.p, from.p, in_shared);
        const std::vector<u8> got = to.get();
        for (int i = 0; i < LANES * ROW; i++)
            if (got[(size_t)i] != want[(size_t)i])
                return fail("%s: lane %d, byte %d is %#x instead of %#x", t.text, i / ROW, i % ROW - AT, got[(size_t)i],
                            want[(size_t)i]);
    }
    return PASSED;
}

/* Parameters of each width, through their names in the PTX and through an address. */
struct Parameters {
    u8 bytes[32];
};
extern "C" __global__ void k_parameters(const __grid_constant__ Parameters p, u64 *out) {
    u64 v[32] = {0};
    u32 x[4];
#define PARAM_1(to, type, letter, at) \
    asm volatile("{ ld.param." type " %0, [k_parameters_param_0+" #at "]; }" : "=" letter(to))
#define PARAM_2(type, at) \
    asm volatile("{ ld.param.v2." type " {%0, %1}, [k_parameters_param_0+" #at "]; }" : "=r"(x[0]), "=r"(x[1]))
    PARAM_1(x[0], "f32", "r", 4);
    PARAM_1(v[1], "f64", "l", 8);
    PARAM_1(x[2], "s32", "r", 12);
    PARAM_1(x[3], "u32", "r", 16);
    v[0] = x[0], v[2] = x[2], v[3] = x[3];
    PARAM_1(v[4], "u64", "l", 24);
    PARAM_1(x[0], "u8", "r", 3);
    v[5] = x[0];
    PARAM_2("f32", 8);
    v[6] = x[0], v[7] = x[1];
    PARAM_2("u32", 24);
    v[8] = x[0], v[9] = x[1];
    PARAM_2("u8", 30);
    v[10] = x[0], v[11] = x[1];
    asm volatile("{ ld.param.v4.u8 {%0, %1, %2, %3}, [k_parameters_param_0+20]; }"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]));
    for (int i = 0; i < 4; i++) v[12 + i] = x[i];
    asm volatile("{ .reg .b64 a; mov.b64 a, k_parameters_param_0; ld.param.v2.u8 {%0, %1}, [a+6]; }"
                 : "=r"(x[0]), "=r"(x[1]));
    v[16] = x[0], v[17] = x[1];
    PARAM_1(x[0], "s8", "r", 2);
    v[18] = x[0];
    for (int i = 0; i < 19; i++) out[i] = v[i];
}
static Outcome test_parameters() {
    Parameters p;
    for (int i = 0; i < 32; i++) p.bytes[i] = (u8)(17 * i + 129);
    enum { N = 19 }; /* the last one is signed */
    static const int at[N] = {4, 8, 12, 16, 24, 3, 8, 12, 24, 28, 30, 31, 20, 21, 22, 23, 6, 7, 2};
    static const int size[N] = {4, 8, 4, 4, 8, 1, 4, 4, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const Array<u64> out(N);
    k_parameters<<<1, 1>>>(p, out.p);
    const std::vector<u64> got = out.get();
    for (int i = 0; i < N; i++) {
        u64 want = 0;
        memcpy(&want, p.bytes + at[i], (size_t)size[i]);
        if (i == N - 1) want = (u32)(int8_t)want;
        if (got[(size_t)i] != want)
            return fail("%d bytes at %d are %#llx instead of %#llx", size[i], at[i], (unsigned long long)got[(size_t)i],
                        (unsigned long long)want);
    }
    return PASSED;
}

/* A lane's local memory is its own: each lane stores, and reads when all have stored. */
__global__ void k_local(u32 *out, const u32 *v) {
    const u32 l = threadIdx.x;
    u32 a, b, c, d;
    asm volatile(
        "{ .local .align 8 .b8 buffer[64]; .reg .b64 p, g; .reg .b32 x; mov.u64 p, buffer;"
        "  st.local.u32 [buffer+4], %4; st.local.v2.u32 [p+16], {%5, %4}; bar.warp.sync -1;"
        "  ld.local.u32 %0, [p+4]; ld.local.v2.u32 {%1, %2}, [buffer+16];"
        "  add.u64 p, p, 24; cvta.local.u64 g, p; ld.u32 x, [g+-4]; cvta.to.local.u64 p, g; ld.local.u32 %3, [p+-8];"
        "  xor.b32 %3, %3, x; }"
        : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
        : "r"(v[l]), "r"(v[l + LANES])
        : "memory");
    out[4 * l] = a, out[4 * l + 1] = b, out[4 * l + 2] = c, out[4 * l + 3] = d;
}
static Outcome test_local() {
    const std::vector<u32> v = random_words(2 * LANES);
    const Array<u32> in(v), out(4 * LANES);
    k_local<<<1, LANES>>>(out.p, in.p);
    const std::vector<u32> got = out.get();
    for (u32 l = 0; l < LANES; l++) {
        const u32 x = v[l], y = v[l + LANES], want[4] = {x, y, x, y ^ x};
        for (u32 k = 0; k < 4; k++)
            if (got[4 * l + k] != want[k])
                return fail("lane %u, load %u: %#x instead of %#x", l, k, got[4 * l + k], want[k]);
    }
    return PASSED;
}

/* Addresses of shared and global memory as generic ones, and back. */
__global__ void k_addresses(u32 *out, const u32 *in) {
    __shared__ u32 s[LANES];
    const u32 l = threadIdx.x;
    s[l] = in[l];
    __syncthreads();
    u32 a, b;
    asm volatile("{ .reg .b64 x, y; mov.u64 x, %2; cvta.shared.u64 y, x; ld.u32 %0, [y]; cvta.to.shared.u64 x, y;"
                 "  .reg .b32 z; cvt.u32.u64 z, x; ld.shared.u32 x, [z]; cvt.u32.u64 z, x; xor.b32 %0, %0, z;"
                 "  cvta.to.global.u64 x, %3; ld.global.u32 %1, [x]; }"
                 : "=r"(a), "=r"(b)
                 : "l"((u64)__cvta_generic_to_shared(&s[l ^ 5])), "l"(in + (l ^ 9))
                 : "memory");
    out[2 * l] = a, out[2 * l + 1] = b;
}
static Outcome test_addresses() {
    const std::vector<u32> v = random_words(LANES);
    const Array<u32> in(v), out(2 * LANES);
    k_addresses<<<1, LANES>>>(out.p, in.p);
    const std::vector<u32> got = out.get();
    for (u32 l = 0; l < LANES; l++)
        if (got[2 * l] != 0 || got[2 * l + 1] != v[l ^ 9]) return fail("lane %u", l);
    return PASSED;
}

/* Two groups of copies: 16 bytes a lane of which bytes[lane] come from memory, the others are 0. Then copies of 4 bytes
 * and of 8 bytes, with 4 between them. */
__global__ void k_copies(u32 *out, const u8 *from, const u32 *bytes) {
    __shared__ __align__(16) u32 s[3 * LANES * 4];
    const u32 l = threadIdx.x, at = (u32)__cvta_generic_to_shared(s + 4 * l);
    for (int j = 0; j < 4; j++) s[4 * (2 * LANES + l) + j] = 0xAAAAAAAA;
    asm volatile(
        "{ cp.async.cg.shared.global [%0], [%1], 16, %2; cp.async.commit_group;"
        " cp.async.cg.shared.global [%0+512], [%1+512], 16; cp.async.commit_group; cp.async.wait_group 1; }" ::"r"(at),
        "l"(__cvta_generic_to_global(from + 16 * (l ^ 3))), "r"(bytes[l])
        : "memory");
    __syncwarp();
    for (int j = 0; j < 4; j++) out[4 * l + j] = s[4 * (l ^ 1) + j];
    asm volatile("{ cp.async.wait_group 0; }" ::: "memory");
    __syncwarp();
    for (int j = 0; j < 4; j++) out[4 * (LANES + l) + j] = s[4 * (LANES + (l ^ 1)) + j];
    asm volatile("{ cp.async.ca.shared.global [%0+1024], [%1], 4; cp.async.ca.shared.global [%0+1032], [%1+8], 8, %2;"
                 " cp.async.wait_all; }" ::"r"(at),
                 "l"(__cvta_generic_to_global(from + 16 * l)), "r"(l % 9)
                 : "memory");
    for (int j = 0; j < 4; j++) out[4 * (2 * LANES + l) + j] = s[4 * (2 * LANES + l) + j];
    FROM_90(
        asm volatile("{ cp.async.bulk.prefetch.L2.global [%0], %1; }" ::"l"(__cvta_generic_to_global(from)), "r"(64u));)
}
static Outcome test_copies() {
    std::vector<u8> from(2 * LANES * 16);
    std::vector<u32> bytes(LANES);
    for (u8 &x : from) x = (u8)(random_bits() | 1);
    for (u32 l = 0; l < LANES; l++) bytes[l] = l % 17;
    const Array<u8> in(from);
    const Array<u32> sizes(bytes), out(3 * LANES * 4);
    k_copies<<<1, LANES>>>(out.p, in.p, sizes.p);
    const std::vector<u32> got = out.get();
    for (u32 i = 0; i < 3 * LANES * 16; i++) {
        const u32 group = i / 16 / LANES, l = i / 16 % LANES, k = i % 16, source = l ^ 1 ^ 3;
        u8 want = 0;
        if (group == 0 && k < bytes[l ^ 1]) want = from[source * 16 + k];
        if (group == 1) want = from[(LANES + source) * 16 + k];
        if (group == 2) want = k < 4 ? from[l * 16 + k] : k < 8 ? 0xAA : k - 8 < l % 9 ? from[l * 16 + k] : 0;
        if (((const u8 *)got.data())[i] != want) return fail("group %u, lane %u, byte %u", group, l, k);
    }
    return PASSED;
}

/* ---- Atomics ----------------------------------------------------------------------------------------------------- */

/* A(name, instruction, operands, space, value before, value after of x before and operands v, w) */
/* clang-format off */
#define ATOMICS(A)                                                                                                     \
    A(atom_add, "atom.global.add.u32", " %0, [%1], %2;", global, 7, x + v)                                             \
    A(atom_add_acq_rel, "atom.add.acq_rel.gpu.global.u32", " %0, [%1], %2;", global, 7, x + v)                         \
    A(atom_max, "atom.global.max.u32", " %0, [%1], %2;", global, 0x40000000, x > v ? x : v)                            \
    A(atom_exch, "atom.global.exch.b32", " %0, [%1], %2;", global, 7, v)                                               \
    A(atom_cas, "atom.global.cas.b32", " %0, [%1], %3, %2;", global, 7, x == w ? v : x)                                \
    A(atom_inc, "atom.global.inc.u32", " %0, [%1], %3;", global, 5, x >= w ? 0 : x + 1)                                \
    A(atom_and, "atom.global.and.b32", " %0, [%1], %2;", global, 0xFFFFFFFF, x & v)                                    \
    A(atom_xor, "atom.global.xor.b32", " %0, [%1], %2;", global, 7, x ^ v)                                             \
    A(atom_shared_add, "atom.shared.add.u32", " %0, [%1], %2;", shared, 7, x + v)                                      \
    A(atom_shared_min, "atom.shared.min.s32", " %0, [%1], %2;", shared, 0x40000000, (int)x < (int)v ? x : v)           \
    A(atom_shared_or, "atom.shared.or.b32", " %0, [%1], %2;", shared, 0, x | v)                                        \
    A(red_add, "red.global.add.u32", " [%1], %2; mov.b32 %0, 0;", global, 7, x + v)                                    \
    A(red_shared_max, "red.shared.max.s32", " [%1], %2; mov.b32 %0, 0;", shared, 0x40000000, (int)x > (int)v ? x : v)
/* clang-format on */

enum { THREADS = 128 };
/* Each thread changes its own cell, then all change the last one. */
#define ATOMIC_KERNEL(name, text, form, space, before, after)                                                       \
    __global__ void k_##name(u32 *cells, const u32 *v, u32 *old) {                                                  \
        __shared__ u32 s[THREADS + 1];                                                                              \
        const u32 i = threadIdx.x, w = i & 1 ? before : i;                                                          \
        s[i] = before;                                                                                              \
        if (!i) s[THREADS] = before;                                                                                \
        __syncthreads();                                                                                            \
        u32 *base = IN_##space == IN_shared ? s : cells;                                                            \
        asm volatile("{ " text form " }" : "=r"(old[i]) : ADDRESS_##space(base + i), "r"(v[i]), "r"(w) : "memory"); \
        asm volatile("{ " text form " }"                                                                            \
                     : "=r"(old[THREADS + i])                                                                       \
                     : ADDRESS_##space(base + THREADS), "r"(v[i]), "r"(w)                                           \
                     : "memory");                                                                                   \
        __syncthreads();                                                                                            \
        if (IN_##space == IN_shared) cells[i] = s[i], cells[THREADS] = s[THREADS];                                  \
    }                                                                                                               \
    static u32 after_##name(u32 x, u32 v, u32 w) { return (void)x, (void)v, (void)w, (u32)(after); }
ATOMICS(ATOMIC_KERNEL)

static const struct Atomic {
    const char *name, *text;
    u32 before;
    const void *kernel;
    u32 (*after)(u32 x, u32 v, u32 w);
} atomics[] = {
#define ATOMIC_ENTRY(name, text, form, space, before, after) \
    {#name, text, (u32)(before), (const void *)k_##name, after_##name},
    ATOMICS(ATOMIC_ENTRY)};

static Outcome run_atomic(const Atomic &t) {
    const std::vector<u32> v = random_words(THREADS);
    const Array<u32> in(v), cells(std::vector<u32>(THREADS + 1, t.before)), old(2 * THREADS);
    void *args[] = {(void *)&cells.p, (void *)&in.p, (void *)&old.p};
    CUDA(cudaLaunchKernel(t.kernel, dim3(1), dim3(THREADS), args, 0, 0));
    const std::vector<u32> now = cells.get(), was = old.get();
    const bool returns = strncmp(t.text, "red", 3) != 0;
    auto changed = [&](u32 x, u32 i) { return t.after(x, v[i], i & 1 ? t.before : i); };
    for (u32 i = 0; i < THREADS; i++)
        if (now[i] != changed(t.before, i) || (returns && was[i] != t.before))
            return fail("%s: thread %u alone: %#x, %#x before", t.text, i, now[i], was[i]);
    u32 x = t.before; /* some order of the threads has to explain what each of them saw */
    std::vector<bool> done(THREADS, false);
    for (u32 n = 0; n < THREADS; n++) {
        u32 next = THREADS;
        for (u32 i = 0; i < THREADS; i++)
            if (!done[i] && (!returns || was[THREADS + i] == x) && (next == THREADS || changed(x, i) == x)) next = i;
        if (next == THREADS) return fail("%s: no thread saw %#x, the value after %u changes", t.text, x, n);
        done[next] = true, x = changed(x, next);
    }
    return now[THREADS] == x ? PASSED : fail("%s: %#x at the end instead of %#x", t.text, now[THREADS], x);
}

/* The last block, by a counter behind a fence, adds what all blocks have stored. */
__global__ void k_fence(u32 *sums, u32 *counter, u32 *total) {
    sums[blockIdx.x] = blockIdx.x * blockIdx.x + 1;
    u32 before, sum = 0;
    asm volatile("{ membar.gl; atom.global.add.u32 %0, [%1], 1; membar.gl; }"
                 : "=r"(before)
                 : ADDRESS_global(counter)
                 : "memory");
    if (before != gridDim.x - 1) return;
    for (u32 i = 0; i < gridDim.x; i++) {
        u32 x;
        asm volatile("{ ld.global.cg.s32 %0, [%1]; }" : "=r"(x) : ADDRESS_global(sums + i) : "memory");
        sum += x;
    }
    *total = sum;
}
static Outcome test_fence() {
    const Array<u32> sums(64), counter(std::vector<u32>(1, 0)), total(1);
    k_fence<<<64, 1>>>(sums.p, counter.p, total.p);
    u32 want = 0;
    for (u32 i = 0; i < 64; i++) want += i * i + 1;
    return total.get()[0] == want ? PASSED : fail("%u instead of %u", total.get()[0], want);
}

/* ---- Lanes ------------------------------------------------------------------------------------------------------- */

static const u32 member_masks[] = {ALL_LANES, 0x0000FFFF, 0xF0F0F0F0, 0x80000001, 0x00000100};

#define SHUFFLE_KERNEL(mode)                                                                                 \
    __global__ void k_shfl_##mode(u32 *d, u32 *p, const u32 *a, const u32 *b, u32 c, u32 members) {          \
        const u32 l = threadIdx.x;                                                                           \
        if (!(members >> l & 1)) return;                                                                     \
        asm volatile("{ .reg .pred p; shfl.sync." #mode ".b32 %0|p, %2, %3, %4, %5; selp.u32 %1, 1, 0, p; }" \
                     : "=r"(d[l]), "=r"(p[l])                                                                \
                     : "r"(a[l]), "r"(b[l]), "r"(c), "r"(members));                                          \
    }
SHUFFLE_KERNEL(up)
SHUFFLE_KERNEL(down)
SHUFFLE_KERNEL(bfly)
SHUFFLE_KERNEL(idx)

/* The lane that shfl reads, and whether it is in range: the pseudocode of the ISA. */
static u32 shuffle_source(int mode, u32 lane, u32 b, u32 c, bool *in_range) {
    const u32 bval = b & 0x1F, cval = c & 0x1F, segmask = c >> 8 & 0x1F;
    const u32 max_lane = (lane & segmask) | (cval & ~segmask), min_lane = lane & segmask;
    int j = 0;
    switch (mode) {
    case 0: j = (int)lane - (int)bval, *in_range = j >= (int)max_lane; break;
    case 1: j = (int)(lane + bval), *in_range = j <= (int)max_lane; break;
    case 2: j = (int)(lane ^ bval), *in_range = j <= (int)max_lane; break;
    default: j = (int)(min_lane | (bval & ~segmask)), *in_range = j <= (int)max_lane; break;
    }
    return *in_range ? (u32)j : lane;
}
static Outcome run_shuffle(int mode) {
    typedef void (*Kernel)(u32 *, u32 *, const u32 *, const u32 *, u32, u32);
    static const Kernel kernels[4] = {k_shfl_up, k_shfl_down, k_shfl_bfly, k_shfl_idx};
    static const u32 clamps[] = {0x001F, 0x0000, 0x181F, 0x1800, 0x1C1F, 0x1E03, 0x000F};
    const std::vector<u32> v = random_words(LANES);
    const Array<u32> a(v);
    Array<u32> b(LANES), d(LANES), p(LANES);
    for (u32 c : clamps)
        for (u32 members : member_masks)
            for (u32 by = 0; by < 40; by += members == ALL_LANES ? 1 : 7) {
                std::vector<u32> each(LANES);
                for (u32 l = 0; l < LANES; l++) each[l] = by < 36 ? by : (u32)random_bits(); /* or one for each lane */
                b.put(each);
                kernels[mode]<<<1, LANES>>>(d.p, p.p, a.p, b.p, c, members);
                const std::vector<u32> got = d.get(), valid = p.get();
                for (u32 l = 0; l < LANES; l++) {
                    bool in_range = false;
                    const u32 from = shuffle_source(mode, l, each[l], c, &in_range);
                    if (!(members >> l & 1)) continue;
                    if (mode == 2 && c == 0x1F && by < 36 && members == ALL_LANES && got[l] == got[l ^ 1])
                        return fail("lanes %u and %u exchanged: the same", l, l ^ 1);
                    if (valid[l] != in_range || (members >> from & 1 && got[l] != v[from]))
                        return fail("lane %u by %u, clamp %#x, members %#x: not lane %u's", l, each[l], c, members,
                                    from);
                }
            }
    return PASSED;
}

static u32 folded(const u32 *a, u32 members, u32 (*f)(u32, u32)) {
    u32 r = 0;
    bool any = false;
    for (u32 l = 0; l < LANES; l++)
        if (members >> l & 1) r = any ? f(r, a[l]) : a[l], any = true;
    return r;
}
#define FOLD(e) folded(a, members, [](u32 x, u32 y) { return (u32)(e); })
/* W(name, instructions with %1 = a, p = its lowest bit, %2 = members, result; votes: lanes whose p holds) */
/* clang-format off */
#define WARP_OPS(W)                                                                                                    \
    W(vote_any, "vote.sync.any.pred p, p, %2;" SHOW, votes != 0)                                                       \
    W(vote_any_not, "vote.sync.any.pred p, !p, %2;" SHOW, votes != members)                                            \
    W(vote_all, "vote.sync.all.pred p, p, %2;" SHOW, votes == members)                                                 \
    W(vote_uni, "vote.sync.uni.pred p, p, %2;" SHOW, votes == members || votes == 0)                                   \
    W(vote_ballot, "vote.sync.ballot.b32 %0, p, %2;", votes)                                                           \
    W(redux_add, "redux.sync.add.s32 %0, %1, %2;", FOLD(x + y))                                                        \
    W(redux_min_u32, "redux.sync.min.u32 %0, %1, %2;", FOLD(x < y ? x : y))                                            \
    W(redux_max_u32, "redux.sync.max.u32 %0, %1, %2;", FOLD(x > y ? x : y))                                            \
    W(redux_min_s32, "redux.sync.min.s32 %0, %1, %2;", FOLD((int)x < (int)y ? x : y))                                  \
    W(redux_max_s32, "redux.sync.max.s32 %0, %1, %2;", FOLD((int)x > (int)y ? x : y))                                  \
    W(redux_and, "redux.sync.and.b32 %0, %1, %2;", FOLD(x & y))                                                        \
    W(redux_or, "redux.sync.or.b32 %0, %1, %2;", FOLD(x | y))                                                          \
    W(redux_xor, "redux.sync.xor.b32 %0, %1, %2;", FOLD(x ^ y))
/* clang-format on */
#define WARP_KERNEL(name, text, result)                                                                            \
    __global__ void k_##name(u32 *d, const u32 *a, u32 members) {                                                  \
        const u32 l = threadIdx.x;                                                                                 \
        if (members >> l & 1) asm volatile("{ " PREDICATE("%1") text " }" : "=r"(d[l]) : "r"(a[l]), "r"(members)); \
    }                                                                                                              \
    static u32 result_##name(const u32 *a, u32 members, u32 votes) {                                               \
        return (void)a, (void)members, (void)votes, result;                                                        \
    }
WARP_OPS(WARP_KERNEL)

static const struct WarpOp {
    const char *name;
    void (*kernel)(u32 *d, const u32 *a, u32 members);
    u32 (*result)(const u32 *a, u32 members, u32 votes);
} warp_ops[] = {
#define WARP_ENTRY(name, text, result) {#name, k_##name, result_##name},
    WARP_OPS(WARP_ENTRY)};

static Outcome run_warp_op(const WarpOp &t) {
    for (u32 members : member_masks)
        for (int kind = 0; kind < 6; kind++) {
            std::vector<u32> v = random_words(LANES);
            u32 votes = 0;
            for (u32 l = 0; l < LANES; l++) {
                if (kind < 4) v[l] = (v[l] & ~1u) | (kind == 0 || (kind == 2 && l != 8) || (kind == 3 && l == 8));
                votes |= (v[l] & members >> l & 1) << l;
            }
            const Array<u32> a(v), d(LANES);
            t.kernel<<<1, LANES>>>(d.p, a.p, members);
            const std::vector<u32> got = d.get();
            const u32 want = t.result(v.data(), members, votes);
            for (u32 l = 0; l < LANES; l++)
                if (got[l] != (members >> l & 1 ? want : 0xAAAAAAAA))
                    return fail("lane %u of members %#x: %#x instead of %#x", l, members, got[l], want);
        }
    return PASSED;
}

/* Two halves of a warp in one instruction, each with itself for members. */
__global__ void k_halves(u32 *out, const u32 *a) {
    const u32 l = threadIdx.x, members = l < 16 ? 0x0000FFFF : 0xFFFF0000;
    u32 ballot, all, sum, other;
    asm volatile(
        "{ " PREDICATE("%4") "vote.sync.ballot.b32 %0, p, %5; vote.sync.all.pred p, p, %5; selp.u32 %1, 1, 0, p;"
                             " redux.sync.add.s32 %2, %4, %5; shfl.sync.bfly.b32 %3, %4, 5, 31, %5; }"
        : "=r"(ballot), "=r"(all), "=r"(sum), "=r"(other)
        : "r"(a[l]), "r"(members));
    out[4 * l] = ballot, out[4 * l + 1] = all, out[4 * l + 2] = sum, out[4 * l + 3] = other;
}
static Outcome test_halves() {
    std::vector<u32> v = random_words(LANES);
    u32 votes[2] = {0, 0}, sum[2] = {0, 0};
    for (u32 l = 0; l < LANES; l++) {
        if (l >= 16) v[l] |= 1;
        votes[l / 16] |= (v[l] & 1) << l, sum[l / 16] += v[l];
    }
    const Array<u32> a(v), out(4 * LANES);
    k_halves<<<1, LANES>>>(out.p, a.p);
    const std::vector<u32> got = out.get();
    for (u32 l = 0; l < LANES; l++)
        if (got[4 * l] != votes[l / 16] || got[4 * l + 1] != l / 16 || got[4 * l + 2] != sum[l / 16] ||
            got[4 * l + 3] != v[l ^ 5])
            return fail("lane %u: ballot %#x, all %u, sum %#x", l, got[4 * l], got[4 * l + 1], got[4 * l + 2]);
    return PASSED;
}

/* ---- Matrices ---------------------------------------------------------------------------------------------------- */

/* Fragments, from the tables of the PTX ISA: the place of the i-th element of a lane. */
struct Place {
    int row, column;
};
static Place place_f16_a(int lane, int i) { /* m16n8k16, A */
    const int group = lane >> 2, t = lane % 4;
    return {(0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8, t * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
static Place place_f16_b(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8), lane >> 2}; }
static Place place_c(int lane, int i) { /* C and D of m16n8k16 and of m16n8k64 */
    return {i < 2 ? lane >> 2 : (lane >> 2) + 8, lane % 4 * 2 + (i & 1)};
}
static Place place_fp4_a(int lane, int i) { /* m16n8k64, A */
    const int group = lane >> 2;
    return {i < 8 || (16 <= i && i < 24) ? group : group + 8, lane % 4 * 8 + (i & 7) + (i < 16 ? 0 : 32)};
}
static Place place_fp4_b(int lane, int i) { return {lane % 4 * 8 + (i & 7) + (i < 8 ? 0 : 32), lane >> 2}; }
/* Scales, scale_vec::4X: byte j of a lane's register scales the j-th 16 of K. Thread-id-a names two lanes of four, for
 * the row of the group and the one 8 below; thread-id-b names one, for the column of the group. */
static int scale_lane_a(int row, int thread_id) { return row % 8 * 4 + thread_id * 2 + row / 8; }
static int scale_lane_b(int column, int thread_id) { return column * 4 + thread_id; }

/* The operands of one mma, as registers of lanes. The host can expect lanes x and y of one operand to be exchanged. */
enum Operand { OF_A, OF_B, OF_C, OF_D, OF_SCALE_A, OF_SCALE_B, OF_NONE };
struct Fragments {
    u32 a[4][LANES], b[2][LANES], c[4][LANES], scale_a[LANES], scale_b[LANES], d[4][LANES];
};
struct Exchange {
    Operand of;
    int x, y;
    int lane(Operand operand, int l) const { return operand != of ? l : l == x ? y : l == y ? x : l; }
};
struct Product {
    double value[16][8], magnitude[16][8]; /* and the sum of its terms' absolute values */
};

static Product product_f16(const Fragments &f, Exchange e) {
    double A[16][16], B[16][8];
    Product p;
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 8; i++) {
            const Place at = place_f16_a(l, i);
            A[at.row][at.column] = half_value(f.a[i / 2][e.lane(OF_A, l)] >> 16 * (i & 1));
        }
        for (int i = 0; i < 4; i++) {
            const Place b = place_f16_b(l, i), c = place_c(l, i);
            B[b.row][b.column] = half_value(f.b[i / 2][e.lane(OF_B, l)] >> 16 * (i & 1));
            p.value[c.row][c.column] = F(f.c[i][e.lane(OF_C, l)]);
        }
    }
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            double sum = 0, size = fabs(p.value[r][c]);
            for (int k = 0; k < 16; k++) sum += A[r][k] * B[k][c], size += fabs(A[r][k] * B[k][c]);
            p.value[r][c] += sum, p.magnitude[r][c] = size;
        }
    return p;
}
static double scale_value(u32 code) { /* UE4M3; its NaN is zero in GGUF */
    return (code & 255) == 0x7F ? NAN : (double)ue4m3_to_f32((u8)code);
}
static Product product_fp4(const Fragments &f, Exchange e, int thread_a, int thread_b) {
    double A[16][64], B[64][8];
    Product p;
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 32; i++) {
            const Place at = place_fp4_a(l, i);
            const u32 scale = f.scale_a[e.lane(OF_SCALE_A, scale_lane_a(at.row, thread_a))];
            A[at.row][at.column] = e2m1_to_f32((u8)(f.a[i / 8][e.lane(OF_A, l)] >> 4 * (i & 7) & 15)) *
                                   scale_value(scale >> 8 * (at.column / 16) & 255);
        }
        for (int i = 0; i < 16; i++) {
            const Place at = place_fp4_b(l, i);
            const u32 scale = f.scale_b[e.lane(OF_SCALE_B, scale_lane_b(at.column, thread_b))];
            B[at.row][at.column] = e2m1_to_f32((u8)(f.b[i / 8][e.lane(OF_B, l)] >> 4 * (i & 7) & 15)) *
                                   scale_value(scale >> 8 * (at.row / 16) & 255);
        }
        for (int i = 0; i < 4; i++) {
            const Place at = place_c(l, i);
            p.value[at.row][at.column] = F(f.c[i][e.lane(OF_C, l)]);
        }
    }
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            double sum = 0, size = fabs(p.value[r][c]);
            for (int k = 0; k < 64; k++) sum += A[r][k] * B[k][c], size += fabs(A[r][k] * B[k][c]);
            p.value[r][c] += sum, p.magnitude[r][c] = size;
        }
    return p;
}
/* Whether D holds the product; share: of the magnitude, how much an element may be off. 0: the sums are exact. */
static bool holds(const Fragments &f, const Product &p, Exchange e, double share) {
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < 4; i++) {
            const Place at = place_c(e.lane(OF_D, l), i);
            if (!within(f.d[i][l], p.value[at.row][at.column], share * p.magnitude[at.row][at.column])) return false;
        }
    return true;
}

__global__ void k_mma_f16(Fragments *f) {
    const u32 l = threadIdx.x;
    asm volatile("{ mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
                 " {%10, %11, %12, %13}; }"
                 : "=r"(f->d[0][l]), "=r"(f->d[1][l]), "=r"(f->d[2][l]), "=r"(f->d[3][l])
                 : "r"(f->a[0][l]), "r"(f->a[1][l]), "r"(f->a[2][l]), "r"(f->a[3][l]), "r"(f->b[0][l]), "r"(f->b[1][l]),
                   "r"(f->c[0][l]), "r"(f->c[1][l]), "r"(f->c[2][l]), "r"(f->c[3][l]));
}
template <int THREAD_A, int THREAD_B>
__global__ void k_mma_fp4(Fragments *f) {
    FROM_120(const u32 l = threadIdx.x; asm volatile(
                 "{ mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, %14, {0, %16}, %15, {0, %17}; }"
                 : "=r"(f->d[0][l]), "=r"(f->d[1][l]), "=r"(f->d[2][l]), "=r"(f->d[3][l])
                 : "r"(f->a[0][l]), "r"(f->a[1][l]), "r"(f->a[2][l]), "r"(f->a[3][l]), "r"(f->b[0][l]), "r"(f->b[1][l]),
                   "r"(f->c[0][l]), "r"(f->c[1][l]), "r"(f->c[2][l]), "r"(f->c[3][l]), "r"(f->scale_a[l]),
                   "r"(f->scale_b[l]), "n"(THREAD_A), "n"(THREAD_B));)
}
typedef void (*MmaKernel)(Fragments *);
static void multiply(MmaKernel kernel, Fragments &f) {
    static Array<Fragments> device(1);
    device.put({f});
    kernel<<<1, LANES>>>(device.p);
    f = device.get()[0];
}

/* An exchange of two lanes of any operand has to give another product: lanes x and y for each x and these distances. */
template <class Expect>
static Outcome exchanges_differ(const Fragments &f, std::initializer_list<Operand> operands, Expect expect,
                                double share) {
    for (Operand of : operands)
        for (int x = 0; x < LANES; x++)
            for (int by : {1, 2, 4, 8, 16, 31}) {
                const Exchange e = {of, x, x ^ by};
                const bool scale = of == OF_SCALE_A || of == OF_SCALE_B;
                if (!expect.used(of, x) && !(scale && expect.used(of, e.y))) continue;
                if (holds(f, expect(e), e, share))
                    return fail("operand %d: lanes %d and %d exchanged: the same", of, x, x ^ by);
            }
    return PASSED;
}

struct ExpectF16 {
    const Fragments &f;
    Product operator()(Exchange e) const { return product_f16(f, e); }
    bool used(Operand, int) const { return true; }
};
struct ExpectFp4 {
    const Fragments &f;
    int thread_a, thread_b;
    Product operator()(Exchange e) const { return product_fp4(f, e, thread_a, thread_b); }
    bool used(Operand of, int lane) const { /* other lanes' scales are not read */
        return of == OF_SCALE_A ? lane % 4 / 2 == thread_a : of == OF_SCALE_B ? lane % 4 == thread_b : true;
    }
};
static const Exchange as_is = {OF_NONE, 0, 0};

/* Distinct integers in each element, whose sums F32 holds exactly. */
static Outcome test_mma_f16_layout() {
    Fragments f = {};
    int order[256], next = 0;
    for (int i = 0; i < 256; i++) order[i] = i + 1;
    for (int i = 255; i > 0; i--) std::swap(order[i], order[random_bits() % (u64)(i + 1)]);
    auto half = [&] { return f16_from_f32((float)(random_bits() & 1 ? -order[next++ % 256] : order[next++ % 256])); };
    for (int l = 0; l < LANES; l++) {
        for (auto &r : f.a) r[l] = half(), r[l] |= (u32)half() << 16;
        for (auto &r : f.c) r[l] = B((float)(1000 * (4 * l + (&r - f.c)) + 17));
    }
    for (int l = 0; l < LANES; l++)
        for (auto &r : f.b) r[l] = half(), r[l] |= (u32)half() << 16;
    multiply(k_mma_f16, f);
    if (!holds(f, product_f16(f, as_is), as_is, 0)) return fail("not the product");
    return exchanges_differ(f, {OF_A, OF_B, OF_C, OF_D}, ExpectF16{f}, 0);
}
/* Every finite value of F16 goes through A, and through B, times 1 at one k; and sums of numbers of all sizes. */
static Outcome test_mma_f16_values() {
    for (u32 first = 0; first < 65536; first += 256) {
        Fragments f = {};
        for (int l = 0; l < LANES; l++)
            for (int i = 0; i < 8; i++) {
                u32 h = first + (u32)(8 * l + i);
                if ((h & 0x7C00) == 0x7C00) h = 0;
                f.a[i / 2][l] |= h << 16 * (i & 1);
                const Place at = place_f16_b(l, i & 3);
                if (at.row == (int)(first >> 8) % 16 && i < 4) f.b[i / 2][l] |= 0x3C00u << 16 * (i & 1);
            }
        multiply(k_mma_f16, f);
        if (!holds(f, product_f16(f, as_is), as_is, 0)) return fail("values %#x and following of A", first);
        Fragments g = {};
        for (int l = 0; l < LANES; l++)
            for (int i = 0; i < 8; i++) {
                u32 h = first + (u32)(4 * l + (i & 3));
                if ((h & 0x7C00) == 0x7C00) h = 0;
                if (i < 4) g.b[i / 2][l] |= h << 16 * (i & 1);
                if (place_f16_a(l, i).column == (int)(first >> 8) % 16) g.a[i / 2][l] |= 0x3C00u << 16 * (i & 1);
            }
        multiply(k_mma_f16, g);
        if (!holds(g, product_f16(g, as_is), as_is, 0)) return fail("values %#x and following of B", first);
        for (int l = 0; l < LANES; l++) { /* below 2, subnormals among them */
            for (auto &r : f.a) r[l] = (u32)random_bits() & 0xBFFFBFFF;
            for (auto &r : f.b) r[l] = (u32)random_bits() & 0xBFFFBFFF;
            for (auto &r : f.c) r[l] = B((float)(int)random_bits() * 0x1p-40f);
        }
        multiply(k_mma_f16, f);
        if (!holds(f, product_f16(f, as_is), as_is, 0x1p-20)) return fail("a sum of random products is off");
    }
    return PASSED;
}
/* An infinity or a NaN in one element changes its row or column alone. */
static Outcome test_mma_f16_infinite() {
    for (u32 special : {0x7C00u, 0xFC00u, 0x7E00u})
        for (int where = 0; where < 3 * LANES; where++) {
            Fragments f = {};
            for (int l = 0; l < LANES; l++) {
                for (auto &r : f.a) r[l] = 0x3C003C00 | (u32)random_bits() % 1024;
                for (auto &r : f.b) r[l] = 0x3C003C00 | (u32)random_bits() % 1024;
            }
            const int l = where % LANES;
            if (where / LANES == 0) f.a[l % 4][l] = (f.a[l % 4][l] & 0xFFFF) | special << 16;
            else if (where / LANES == 1) f.b[l % 2][l] = (f.b[l % 2][l] & 0xFFFF0000) | special;
            else f.c[l % 4][l] = B(f16_to_f32((u16)special));
            multiply(k_mma_f16, f);
            if (!holds(f, product_f16(f, as_is), as_is, 0x1p-20))
                return fail("%#x in operand %d", special, where / LANES);
        }
    return PASSED;
}

static const MmaKernel mma_fp4[2][4] = {{k_mma_fp4<0, 0>, k_mma_fp4<0, 1>, k_mma_fp4<0, 2>, k_mma_fp4<0, 3>},
                                        {k_mma_fp4<1, 0>, k_mma_fp4<1, 1>, k_mma_fp4<1, 2>, k_mma_fp4<1, 3>}};
/* Random codes and distinct scales in all lanes, for each pair of thread-ids. */
static Outcome test_mma_fp4_layout() {
    for (int p = 0; p < 2; p++)
        for (int q = 0; q < 4; q++) {
            Fragments f = {};
            for (int l = 0; l < LANES; l++) {
                for (auto &r : f.a) r[l] = (u32)random_bits();
                for (auto &r : f.b) r[l] = (u32)random_bits();
                for (auto &r : f.c) r[l] = B((float)(int)(random_bits() % 2001) - 1000);
                for (u32 j = 0; j < 4; j++) { /* 120 codes: no lane's four are another's */
                    f.scale_a[l] |= (u32)(4 * l + j * 31 + 3) % 120 << 8 * j;
                    f.scale_b[l] |= (u32)(4 * l + j * 37 + 50) % 120 << 8 * j;
                }
            }
            multiply(mma_fp4[p][q], f);
            if (!holds(f, product_fp4(f, as_is, p, q), as_is, 0x1p-20))
                return fail("thread-ids %d, %d: not the product", p, q);
            const Outcome o =
                exchanges_differ(f, {OF_A, OF_B, OF_C, OF_D, OF_SCALE_A, OF_SCALE_B}, ExpectFp4{f, p, q}, 0x1p-20);
            if (o != PASSED) return o;
            if (holds(f, product_fp4(f, as_is, 1 - p, q), as_is, 0x1p-20) ||
                holds(f, product_fp4(f, as_is, p, q ^ 1), as_is, 0x1p-20))
                return fail("other thread-ids give the same");
        }
    return PASSED;
}
/* Every scale, and codes of E2M1 in every place, through A and through B. Sums of one product are exact. */
static Outcome test_mma_fp4_values() {
    for (int k = 0; k < 64; k++)
        for (int of_a = 0; of_a < 2; of_a++) {
            Fragments f = {};
            for (int l = 0; l < LANES; l++) {
                u32 *many = of_a ? f.scale_a : f.scale_b, *one = of_a ? f.scale_b : f.scale_a;
                one[l] = 0x38383838;
                for (u32 j = 0; j < 4; j++) many[l] |= ((u32)(4 * l + 29 * k) + j) % 128 << 8 * j;
                for (int i = 0; i < 32; i++) {
                    const u32 any = (u32)random_bits() & 15, at_a = place_fp4_a(l, i).column == k ? 2 : 0;
                    f.a[i / 8][l] |= (of_a ? any : at_a) << 4 * (i & 7);
                    if (i < 16) f.b[i / 8][l] |= (of_a ? (place_fp4_b(l, i).row == k ? 2 : 0) : any) << 4 * (i & 7);
                }
            }
            multiply(mma_fp4[0][0], f);
            if (!holds(f, product_fp4(f, as_is, 0, 0), as_is, 0))
                return fail("k %d, scales of %s", k, of_a ? "A" : "B");
        }
    return PASSED;
}

/* Matrices of 8 rows of 16 bytes: lane 8i + j has the address of row j of matrix i. */
#define LDMATRIX_KERNEL(name, text, to)                                                 \
    __global__ void k_ldmatrix_##name(u32 *out, const u32 *memory, const u32 *offset) { \
        __shared__ __align__(16) u32 s[256];                                            \
        const u32 l = threadIdx.x;                                                      \
        for (u32 i = l; i < 256; i += LANES) s[i] = memory[i];                          \
        __syncthreads();                                                                \
        u32 r[4] = {0, 0, 0, 0};                                                        \
        asm volatile("{ ldmatrix.sync.aligned.m8n8." text ".shared.b16 " to ", [%4]; }" \
                     : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])                   \
                     : "r"((u32)__cvta_generic_to_shared(s) + offset[l])                \
                     : "memory");                                                       \
        for (int i = 0; i < 4; i++) out[i * LANES + l] = r[i];                          \
    }
LDMATRIX_KERNEL(1, "x1", "{%0}")
LDMATRIX_KERNEL(2, "x2", "{%0, %1}")
LDMATRIX_KERNEL(4, "x4", "{%0, %1, %2, %3}")
LDMATRIX_KERNEL(1t, "x1.trans", "{%0}")
LDMATRIX_KERNEL(2t, "x2.trans", "{%0, %1}")
LDMATRIX_KERNEL(4t, "x4.trans", "{%0, %1, %2, %3}")

static Outcome run_ldmatrix(int n, bool trans, void (*kernel)(u32 *, const u32 *, const u32 *)) {
    std::vector<u32> memory(256), offset(LANES, 0);
    for (u32 i = 0; i < 256; i++) memory[i] = (2 * i + 1) << 16 | 2 * i; /* distinct numbers of 16 bits */
    for (u32 l = 0; l < LANES; l++) /* lanes that no row belongs to have no valid address */
        offset[l] = l < 8 * (u32)n ? (l * 11 + 5) % 64 * 16 : 0x01234567;
    const Array<u32> in(memory), at(offset), out(4 * LANES);
    kernel<<<1, LANES>>>(out.p, in.p, at.p);
    const std::vector<u32> got = out.get();
    auto expected =
        [&](bool of_address, u32 x,
            u32 y) { /* two lanes exchanged, of the addresses or of the results */
                     auto swapped = [&](bool now, u32 l) { return !now ? l : l == x ? y : l == y ? x : l; };
                     std::vector<u32> want(4 * LANES, 0);
                     for (u32 i = 0; i < (u32)n; i++)
                         for (u32 lane = 0; lane < LANES; lane++)
                             for (u32 e = 0; e < 2; e++) {
                                 const u32 l = swapped(!of_address, lane), row = trans ? l % 4 * 2 + e : l / 4;
                                 const u32 column = trans ? l / 4 : l % 4 * 2 + e;
                                 const u32 from = offset[swapped(of_address, 8 * i + row)] / 2 + column;
                                 want[i * LANES + lane] |= (memory[from / 2] >> 16 * (from & 1) & 0xFFFF) << 16 * e;
                             }
                     return want;
        };
    if (got != expected(false, 0, 0)) return fail("not the elements of the table");
    for (u32 x = 0; x < LANES; x++)
        for (u32 by : {1, 4, 7, 16, 31}) {
            if (got == expected(false, x, x ^ by))
                return fail("results of lanes %u and %u exchanged: the same", x, x ^ by);
            if (std::max(x, x ^ by) < 8 * (u32)n && got == expected(true, x, x ^ by))
                return fail("addresses %u and %u exchanged: the same", x, x ^ by);
        }
    return PASSED;
}

/* ---- Control ----------------------------------------------------------------------------------------------------- */

/* Four warps pass values round by barrier 0; its reductions; pairs of warps by barriers 1 and 2, at their own pace. */
__global__ void k_barriers(u32 *out, const u32 *in) {
    __shared__ u32 s[THREADS];
    const u32 i = threadIdx.x;
    u32 x = in[i];
    for (int round = 0; round < 5; round++) {
        s[i] = x;
        asm volatile("{ bar.sync 0; }" ::: "memory");
        x = s[(i + 37) % THREADS] * 3 + 1;
        asm volatile("{ bar.sync 0; }" ::: "memory");
    }
    out[i] = x;
    for (u32 votes = 0; votes < 4; votes++) { /* of all threads, of one, of none, of all but one of each warp */
        u32 any, all;
        const u32 p = votes == 0 || (votes == 1 && i == 77) || (votes == 3 && i % 32 != 5);
        asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %2, 0; bar.red.or.pred q, 0, p; selp.u32 %0, 1, 0, q;"
                     "  bar.red.and.pred q, 0, p; selp.u32 %1, 1, 0, q; }"
                     : "=r"(any), "=r"(all)
                     : "r"(p)
                     : "memory");
        out[THREADS * (1 + votes) + i] = 2 * any + all;
    }
    x = in[i];
    const u32 pair = i / 64;
    for (u32 round = 0; round < 3 + 4 * pair; round++) {
        s[i] = x;
        if (pair) asm volatile("{ bar.sync 2, 64; }" ::: "memory");
        else asm volatile("{ bar.sync 1, 64; }" ::: "memory");
        x = s[pair * 64 + (i + 33) % 64] * 5 + 1;
        if (pair) asm volatile("{ bar.sync 2, 64; }" ::: "memory");
        else asm volatile("{ bar.sync 1, 64; }" ::: "memory");
    }
    out[THREADS * 5 + i] = x;
}
static Outcome test_barriers() {
    const std::vector<u32> v = random_words(THREADS);
    const Array<u32> in(v), out(6 * THREADS);
    k_barriers<<<1, THREADS>>>(out.p, in.p);
    const std::vector<u32> got = out.get();
    std::vector<u32> x = v, y = v, before;
    for (int round = 0; round < 5; round++) {
        before = x;
        for (u32 i = 0; i < THREADS; i++) x[i] = before[(i + 37) % THREADS] * 3 + 1;
    }
    for (u32 round = 0; round < 7; round++) {
        before = y;
        for (u32 i = 0; i < THREADS; i++)
            if (round < 3 + 4 * (i / 64)) y[i] = before[i / 64 * 64 + (i + 33) % 64] * 5 + 1;
    }
    static const u32 votes[4] = {3, 2, 0, 2};
    for (u32 i = 0; i < THREADS; i++) {
        if (got[i] != x[i]) return fail("bar.sync 0, thread %u", i);
        for (u32 k = 0; k < 4; k++)
            if (got[THREADS * (1 + k) + i] != votes[k]) return fail("bar.red, thread %u, case %u", i, k);
        if (got[THREADS * 5 + i] != y[i]) return fail("bar.sync %u, 64, thread %u", 1 + i / 64, i);
    }
    return PASSED;
}

/* Lanes that diverge: loops of different lengths, early ends, branches, and what they do together afterwards. */
__host__ __device__ static u32 steps_to_one(u32 x, u32 seed) {
    u32 hash = seed;
    for (u32 n = 0; n < 60; n++) {
        if (x == 1) break;
        if (x % 7 == 3) {
            x = x * 5 + 2, hash ^= n;
            continue;
        }
        for (u32 k = 0; k < x % 4; k++) hash = hash * 31 + k;
        x = x & 1 ? 3 * x + 1 : x / 2;
        switch (x % 5) {
        case 0: hash += 17; break;
        case 1: hash ^= x; break;
        case 2: hash -= n; break;
        default: hash *= 3;
        }
    }
    return hash;
}
/* Twice, with labels and registers of the same names in two scopes. */
#define BRANCHES(d, a)                                                                                            \
    asm volatile("{ .reg .pred p, q; .reg .b32 i, s, t; mov.u32 i, %1; mov.u32 s, 0;"                             \
                 "  LOOP: setp.eq.u32 p, i, 0; @p bra DONE; and.b32 t, i, 1; setp.ne.u32 q, t, 0; @!q bra EVEN;"  \
                 "  mad.lo.s32 s, s, 3, i; bra.uni NEXT; EVEN: xor.b32 s, s, i; NEXT: sub.s32 i, i, 1; bra LOOP;" \
                 "  DONE: mov.u32 %0, s; }"                                                                       \
                 : "=r"(d)                                                                                        \
                 : "r"(a))
__global__ void k_divergence(u32 *out, const u32 *in, u32 *stored) {
    __shared__ u32 s[LANES];
    const u32 l = threadIdx.x, x = in[l];
    out[l] = steps_to_one(x, l);
    u32 a, b, together;
    BRANCHES(a, x % 23);
    BRANCHES(b, x % 11);
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, %1; vote.sync.ballot.b32 %0, p, -1; }" : "=r"(together) : "r"(l));
    out[LANES + l] = a, out[2 * LANES + l] = b, out[3 * LANES + l] = together;
    if (l & 1) { /* odd lanes store among themselves, then all wait for all */
        s[l] = a;
        asm volatile("{ bar.warp.sync 0xAAAAAAAA; }" ::: "memory");
        b += s[l ^ 2];
    } else {
        s[l] = b * 7;
    }
    asm volatile("{ bar.warp.sync -1; }" ::: "memory");
    out[4 * LANES + l] = s[l ^ 1] + b;
    stored[l] = 0;
    asm volatile("{ .reg .pred p; setp.gt.u32 p, %0, 19; @p ret; st.global.u32 [%1], %0; }" ::"r"(l),
                 ADDRESS_global(stored + l)
                 : "memory");
    if (l > 4) asm volatile("{ ret; }");
    stored[l] = l + 100;
}
static Outcome test_divergence() {
    const std::vector<u32> v = random_words(LANES);
    const Array<u32> in(v), out(5 * LANES), stored(LANES);
    k_divergence<<<1, LANES>>>(out.p, in.p, stored.p);
    const std::vector<u32> got = out.get(), kept = stored.get();
    auto branches = [](u32 i) {
        u32 s = 0;
        for (; i; i--) s = i & 1 ? 3 * s + i : s ^ i;
        return s;
    };
    auto b_of = [&](u32 l) { return branches(v[l] % 11) + (l & 1 ? branches(v[l ^ 2] % 23) : 0); };
    for (u32 l = 0; l < LANES; l++) {
        if (got[l] != steps_to_one(v[l], l)) return fail("loops, lane %u", l);
        if (got[LANES + l] != branches(v[l] % 23) || got[2 * LANES + l] != branches(v[l] % 11))
            return fail("branches, lane %u", l);
        if (got[3 * LANES + l] != ALL_LANES) return fail("lanes %#x meet", got[3 * LANES + l]);
        const u32 other = l & 1 ? branches(v[l ^ 1] % 11) * 7 : branches(v[l ^ 1] % 23);
        if (got[4 * LANES + l] != other + b_of(l)) return fail("bar.warp.sync, lane %u", l);
        if (kept[l] != (l <= 4 ? l + 100 : l <= 19 ? l : 0)) return fail("ret, lane %u: %u", l, kept[l]);
    }
    return PASSED;
}

/* S(register, what it holds) */
#define SPECIAL(S)                \
    S("%%tid.x", t % 4)           \
    S("%%tid.y", t / 4 % 3)       \
    S("%%tid.z", t / 12)          \
    S("%%ntid.x", 4)              \
    S("%%ntid.y", 3)              \
    S("%%ntid.z", 5)              \
    S("%%ctaid.x", block % 3)     \
    S("%%ctaid.y", block / 3 % 2) \
    S("%%ctaid.z", block / 6)     \
    S("%%nctaid.x", 3)            \
    S("%%nctaid.y", 2) S("%%nctaid.z", 2) S("%%laneid", t % 32) S("%%lanemask_lt", (1u << t % 32) - 1)
enum { SPECIALS = 14, BLOCK = 4 * 3 * 5, BLOCKS = 3 * 2 * 2 };
__global__ void k_special(u32 *out, u64 *time) {
    const u32 t = threadIdx.x + 4 * (threadIdx.y + 3 * threadIdx.z);
    const u32 block = blockIdx.x + 3 * (blockIdx.y + 2 * blockIdx.z);
    u32 *to = out + (block * BLOCK + t) * SPECIALS, x;
    u64 begin, end;
    asm volatile("{ mov.u64 %0, %%globaltimer; }" : "=l"(begin));
#define READ_SPECIAL(name, value)                        \
    asm volatile("{ mov.u32 %0, " name "; }" : "=r"(x)); \
    *to++ = x;
    SPECIAL(READ_SPECIAL)
    asm volatile("{ mov.u64 %0, %%globaltimer; }" : "=l"(end));
    time[2 * (block * BLOCK + t)] = begin, time[2 * (block * BLOCK + t) + 1] = end;
}
static Outcome test_special() {
    const Array<u32> out(BLOCKS * BLOCK * SPECIALS);
    const Array<u64> time(2 * BLOCKS * BLOCK);
    k_special<<<dim3(3, 2, 2), dim3(4, 3, 5)>>>(out.p, time.p);
    const std::vector<u32> got = out.get();
    const std::vector<u64> when = time.get();
    for (u32 block = 0; block < BLOCKS; block++)
        for (u32 t = 0; t < BLOCK; t++) {
            const u32 at = block * BLOCK + t;
            u32 k = 0;
#define CHECK_SPECIAL(name, value)           \
    if (got[at * SPECIALS + k++] != (value)) \
        return fail("%s of thread %u, block %u: %u", name + 1, t, block, got[at * SPECIALS + k - 1]);
            SPECIAL(CHECK_SPECIAL)
            if (when[2 * at + 1] < when[2 * at]) return fail("%%globaltimer runs backwards");
        }
    return PASSED;
}

/* A launch that waits for the one before. */
__global__ void k_dependent(u32 *x) {
    FROM_90(asm volatile("{ griddepcontrol.wait; }" ::: "memory");)
    *x = *x * 3 + 1;
    FROM_90(asm volatile("{ griddepcontrol.launch_dependents; }" ::: "memory");)
}
static Outcome test_dependents() {
    const Array<u32> x(std::vector<u32>(1, 5));
    for (int i = 0; i < 3; i++) k_dependent<<<1, 1>>>(x.p);
    return x.get()[0] == 148 ? PASSED : fail("%u instead of 148", x.get()[0]);
}

/* ---- Counters ---------------------------------------------------------------------------------------------------- */

/* An access of the first lanes of a warp at byte step * lane + first of global memory (%1) or of shared memory (%2). */
/* A(name, instruction) */
/* clang-format off */
#define COUNTED(A)                                                                                                     \
    A(load_1, "ld.global.u8 %0, [%1];")                                                                                \
    A(load_4, "ld.global.u32 %0, [%1];")                                                                               \
    A(load_16, "ld.global.v4.u32 {%0, _, _, _}, [%1];")                                                                \
    A(store_4, "st.global.u32 [%1], %0;")                                                                              \
    A(update_4, "red.global.add.u32 [%1], %0;")                                                                        \
    A(generic_4, "{ .reg .b64 a; cvt.u64.u32 a, %2; cvta.shared.u64 a, a; ld.u32 %0, [a]; }")                          \
    A(shared_1, "ld.shared.u8 %0, [%2];")                                                                              \
    A(shared_4, "ld.shared.u32 %0, [%2];")                                                                             \
    A(shared_8, "ld.shared.v2.u32 {%0, _}, [%2];")                                                                     \
    A(shared_16, "ld.shared.v4.u32 {%0, _, _, _}, [%2];")                                                              \
    A(shared_store, "st.shared.u32 [%2], %0;")                                                                         \
    A(shared_update, "atom.shared.add.u32 %0, [%2], 1;")                                                               \
    A(matrix_1, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%2];")                                                \
    A(matrix_4, "{ .reg .b32 r<3>; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, r0, r1, r2}, [%2]; }")                \
    A(copy_16, "cp.async.cg.shared.global [%2], [%1], 16; cp.async.wait_all;")                                         \
    A(copy_zeros, "cp.async.cg.shared.global [%2], [%1], 16, 0; cp.async.wait_all;")
/* clang-format on */
enum { COUNTED_BYTES = 32 * 144 };
#define COUNTED_KERNEL(name, text)                                                                    \
    __global__ void counts_##name(u8 *memory, u32 step, u32 first, u32 lanes) {                       \
        __shared__ __align__(128) u8 s[COUNTED_BYTES];                                                \
        const u32 at = step * threadIdx.x + first, a = (u32)__cvta_generic_to_shared(s) + at;         \
        u32 x = 0;                                                                                    \
        if (threadIdx.x >= lanes) return;                                                             \
        asm volatile(text : "+r"(x) : "l"(__cvta_generic_to_global(memory + at)), "r"(a) : "memory"); \
    }
COUNTED(COUNTED_KERNEL)

static const struct Counted {
    const char *name;
    void (*kernel)(u8 *, u32, u32, u32);
    u32 step, first, lanes;
    u64 sectors, bytes, wavefronts, conflicts; /* expected */
} counted[] = {
    /* requests of global memory */
    {"floats side by side", counts_load_4, 4, 0, 32, 4, 128, 0, 0},
    {"floats beside sectors", counts_load_4, 4, 4, 32, 5, 128, 0, 0},
    {"every second float", counts_load_4, 8, 0, 32, 8, 128, 0, 0},
    {"every 32nd float", counts_load_4, 128, 0, 32, 32, 128, 0, 0},
    {"one float for all", counts_load_4, 0, 0, 32, 1, 4, 0, 0},
    {"a float of one lane", counts_load_4, 4, 0, 1, 1, 4, 0, 0},
    {"bytes", counts_load_1, 1, 0, 32, 1, 32, 0, 0},
    {"vectors side by side", counts_load_16, 16, 0, 32, 16, 512, 0, 0},
    {"every second vector", counts_load_16, 32, 0, 32, 32, 512, 0, 0},
    {"stored floats", counts_store_4, 8, 0, 32, 8, 128, 0, 0},
    {"atomics", counts_update_4, 4, 0, 32, 4, 128, 0, 0},
    /* banks */
    {"words", counts_shared_4, 4, 0, 32, 0, 0, 1, 0},
    {"words by generic addresses", counts_generic_4, 4, 0, 32, 0, 0, 1, 0},
    {"every second word", counts_shared_4, 8, 0, 32, 0, 0, 2, 1},
    {"a column of 32 words", counts_shared_4, 128, 0, 32, 0, 0, 32, 31},
    {"a column of padded rows", counts_shared_4, 132, 0, 32, 0, 0, 1, 0},
    {"one word for all", counts_shared_4, 0, 0, 32, 0, 0, 1, 0},
    {"bytes of words", counts_shared_1, 1, 0, 32, 0, 0, 1, 0},
    {"a column of bytes", counts_shared_1, 128, 3, 32, 0, 0, 32, 31},
    {"pairs", counts_shared_8, 8, 0, 32, 0, 0, 2, 0},
    {"every second pair", counts_shared_8, 16, 0, 32, 0, 0, 4, 2},
    {"pairs of a half of the warp", counts_shared_8, 16, 0, 16, 0, 0, 2, 1},
    {"quads", counts_shared_16, 16, 0, 32, 0, 0, 4, 0},
    {"every second quad", counts_shared_16, 32, 0, 32, 0, 0, 8, 4},
    {"a column of quads", counts_shared_16, 128, 0, 32, 0, 0, 32, 28},
    {"stored words", counts_shared_store, 8, 0, 32, 0, 0, 2, 1},
    {"atomics of one word", counts_shared_update, 0, 0, 32, 0, 0, 32, 31},
    {"atomics of words", counts_shared_update, 4, 0, 32, 0, 0, 1, 0},
    {"a matrix of rows of 128 bytes", counts_matrix_1, 128, 0, 32, 0, 0, 8, 7},
    {"matrices of rows of 128 bytes", counts_matrix_4, 128, 0, 32, 0, 0, 32, 28},
    {"matrices of rows of 144 bytes", counts_matrix_4, 144, 0, 32, 0, 0, 4, 0},
    /* cp.async, of both */
    {"copies", counts_copy_16, 16, 0, 32, 16, 512, 4, 0},
    {"a column of copies", counts_copy_16, 128, 0, 32, 32, 512, 32, 28},
    {"copies of zeros", counts_copy_zeros, 16, 0, 32, 0, 0, 4, 0}};

/* What the only kernel that was launched has done; with no launches if it is not the only one. */
static sim_counts counted_kernel() {
    sim_counts c = {};
    CUDA(cudaDeviceSynchronize());
    sim_count(false);
    if (sim_counted(&c, 1) != 1) c.launches = 0;
    return c;
}
/* Whether the sites of the kernel add up to what it has done, and are in a loop as long as the kernel. */
static bool counted_sites(const sim_counts &c) {
    std::vector<sim_site_counts> sites((size_t)sim_counted_sites(NULL, 0));
    sim_counted_sites(sites.data(), (int)sites.size());
    u64 sectors = 0, conflicts = 0;
    bool whole = true;
    for (auto &s : sites) {
        sectors += s.traffic.sectors, conflicts += s.conflicts;
        whole &= s.loop == c.instructions && s.loop_conflicts == c.conflicts && !strcmp(s.kernel, c.kernel);
    }
    return whole && sectors == c.loads.sectors + c.stores.sectors + c.atomics.sectors && conflicts == c.conflicts;
}
static Outcome run_counted(const Counted &t) {
    const Array<u8> memory(COUNTED_BYTES);
    sim_count(true);
    t.kernel<<<1, LANES>>>(memory.p, t.step, t.first, t.lanes);
    const sim_counts c = counted_kernel();
    const u64 sectors = c.loads.sectors + c.stores.sectors + c.atomics.sectors,
              bytes = c.loads.bytes + c.stores.bytes + c.atomics.bytes,
              requests = c.loads.requests + c.stores.requests + c.atomics.requests;
    if (c.launches != 1 || c.warps != 1 || c.instructions < 5 || !counted_sites(c))
        return fail("%llu launches, %llu warps, %llu instructions", (unsigned long long)c.launches,
                    (unsigned long long)c.warps, (unsigned long long)c.instructions);
    if (sectors == t.sectors && bytes == t.bytes && requests == (t.sectors > 0) && c.wavefronts == t.wavefronts &&
        c.conflicts == t.conflicts)
        return PASSED;
    return fail("%llu sectors, %llu bytes, %llu wavefronts, %llu of them conflicts", (unsigned long long)sectors,
                (unsigned long long)bytes, (unsigned long long)c.wavefronts, (unsigned long long)c.conflicts);
}

/* Each warp of two blocks of two reads the same 128 bytes in a loop, and the block's own 64; in another launch, too. */
__global__ void counts_repeated(const u8 *memory, u32 times) {
    u32 x = 0;
    for (u32 i = 0; i < times; i++) {
        asm volatile("ld.global.u32 %0, [%1];" : "+r"(x) : "l"(memory + 4 * (threadIdx.x % LANES)));
        if (i == 1 && threadIdx.x < 16)
            asm volatile("ld.global.u32 %0, [%1];" : "+r"(x) : "l"(memory + 128 + 64 * blockIdx.x + 4 * threadIdx.x));
    }
}
static Outcome test_distinct() {
    const Array<u8> memory(256);
    sim_count(true);
    for (int i = 0; i < 2; i++) counts_repeated<<<2, 2 * LANES>>>(memory.p, 3);
    const sim_counts c = counted_kernel();
    const sim_traffic &l = c.loads;
    if (c.launches != 2 || c.warps != 8 || l.requests != 2 * 14 || l.sectors != 2 * (12 * 4 + 4) ||
        l.distinct_sectors != 2 * 8 || l.distinct_bytes != 2 * 256)
        return fail("%llu requests, %llu sectors, %llu distinct", (unsigned long long)l.requests,
                    (unsigned long long)l.sectors, (unsigned long long)l.distinct_sectors);
    sim_site_counts s[8];
    const int n = sim_counted_sites(s, 8);
    for (int i = 0; i < n; i++)
        if (s[i].traffic.requests == 24) return s[i].loop < c.instructions ? PASSED : fail("no loop");
    return fail("%d sites", n);
}

/* Asks for 256 bytes ahead, twice if `again`; reads so many words of them. */
__global__ void counts_ahead(const u8 *memory, u32 again, u32 words) {
    u32 x = 0;
    FROM_90(for (u32 i = 0; i <= again; i++) if (!threadIdx.x) asm volatile(
                "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(memory), "r"(256u));)
    if (threadIdx.x < words) asm volatile("ld.global.u32 %0, [%1];" : "+r"(x) : "l"(memory + 4 * threadIdx.x));
}
static Outcome test_ahead() {
    static const struct {
        u32 again, words, later; /* later: words that the next launch reads */
        u64 prefetched, unread;
    } cases[] = {
        {0, 0, 0, 256, 256}, {0, 64, 0, 256, 0}, {0, 9, 0, 256, 192}, {0, 0, 64, 256, 0}, {1, 64, 0, 512, 256}};
    const Array<u8> memory(256);
    for (auto &t : cases) {
        sim_count(true);
        counts_ahead<<<1, 64>>>(memory.p, t.again, t.words);
        if (t.later)
            counts_load_4<<<2, LANES>>>(memory.p, 4, 0, LANES), counts_load_4<<<1, LANES>>>(memory.p, 4, 128, LANES);
        CUDA(cudaDeviceSynchronize());
        sim_count(false);
        sim_counts c[2] = {};
        const int n = sim_counted(c, 2), i = c[0].prefetched ? 0 : 1;
        if (n != 1 + (t.later > 0) || c[i].prefetched != t.prefetched || c[i].unread != t.unread)
            return fail("%u words: %llu of %llu bytes are not read", t.words, (unsigned long long)c[i].unread,
                        (unsigned long long)c[i].prefetched);
    }
    return PASSED;
}

/* ---- Order of stores -------------------------------------------------------------------------------------------- */

__device__ void wait_for(const u32 *flag) {
    u32 x;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
    while (!x);
}
/* Block 0 writes p[0] and then the flag p[1]; block 1 waits for the flag and copies p[0] to p[2]. */
__global__ void flag_kernel(u32 *p, bool release) {
    if (!blockIdx.x) {
        asm volatile("st.relaxed.sys.global.u32 [%0], 1;" ::"l"(p) : "memory");
        if (release) asm volatile("st.release.sys.global.u32 [%0], 1;" ::"l"(p + 1) : "memory");
        else asm volatile("st.relaxed.sys.global.u32 [%0], 1;" ::"l"(p + 1) : "memory");
        wait_for(p + 3);
    } else {
        u32 x;
        wait_for(p + 1);
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
        p[2] = x;
        asm volatile("st.release.sys.global.u32 [%0], 1;" ::"l"(p + 3) : "memory");
    }
}
/* A flag that is stored without a release may be seen before what was stored before it. */
static Outcome test_flags() {
    for (int release = 0; release < 2; release++) {
        const Array<u32> p(4);
        u32 got[4];
        CUDA(cudaMemset(p.p, 0, sizeof got));
        flag_kernel<<<2, 1>>>(p.p, release);
        CUDA(cudaMemcpy(got, p.p, sizeof got, cudaMemcpyDefault));
        if (got[0] != 1 || got[1] != 1 || got[2] != (u32)release)
            return fail("%s release: %u, %u, %u", release ? "with" : "without", got[0], got[1], got[2]);
    }
    return PASSED;
}

/* ---- Violations -------------------------------------------------------------------------------------------------- */

/* V(name, threads, the instruction that a message has to name, code): each ends in an error that stays. p: 64 words. */
/* clang-format off */
#define VIOLATIONS(V)                                                                                                  \
    V(read_beyond, 32, "ld.global.u32", asm volatile("ld.global.u32 %0, [%1+256];" : "=r"(x) : "l"(p + l)))            \
    V(read_before, 32, "ld.global.v2.u32", asm volatile("ld.global.v2.u32 {%0, %0}, [%1+-8];" : "=r"(x) : "l"(p)))     \
    V(read_freed, 32, "ld.global.f32", asm volatile("ld.global.f32 %0, [%1];" : "=r"(x) : "l"(p + l)))                 \
    V(write_null, 1, "st.global.u32", asm volatile("st.global.u32 [%0], %1;" ::"l"((u64)0), "r"(l) : "memory"))        \
    V(atomic_beyond, 1, "atom.global.add.u32", asm volatile("atom.global.add.u32 %0, [%1+256], 1;" : "=r"(x) : "l"(p)))\
    V(misaligned, 32, "ld.global.u64", asm volatile("ld.global.u64 %0, [%1];" : "=l"(y) : "l"(p + l)))                 \
    V(shared_beyond, 32, "ld.shared.u32", asm volatile("ld.shared.u32 %0, [%1+8192];" : "=r"(x) : "r"(4 * l)))         \
    V(shared_misaligned, 32, "st.shared.v4.u32",                                                                       \
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(8u), "r"(l) : "memory"))                           \
    V(local_beyond, 1, "ld.local.u32",                                                                                 \
      asm volatile("{ .local .b32 v[2]; .reg .b64 a; mov.u64 a, v; ld.local.u32 %0, [a+4096]; }" : "=r"(x)))           \
    V(copy_beyond, 1, "cp.async.cg.shared.global",                                                                     \
      asm volatile("cp.async.cg.shared.global [%0], [%1+256], 16;" ::"r"(0u), "l"(p) : "memory"))                      \
    V(half_ldmatrix, 32, "ldmatrix.sync.aligned.m8n8.x1.shared.b16", if (l < 16)                                       \
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(16 * (l & 7))))              \
    V(part_of_warp, 48, "ldmatrix.sync.aligned.m8n8.x1.shared.b16",                                                    \
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(16 * (l & 7))))              \
    V(not_a_member, 32, "shfl.sync.idx.b32",                                                                           \
      asm volatile("shfl.sync.idx.b32 %0, %1, 0, 31, 0x0000FFFF;" : "=r"(x) : "r"(l)))                                 \
    V(deadlock, 64, "bar.sync", if (l < 32) asm volatile("bar.sync 1, 64;" ::: "memory");                              \
      else asm volatile("bar.sync 2, 64;" ::: "memory"))                                                               \
    V(deadlock_in_warp, 32, "bar.", if (l < 16) asm volatile("bar.warp.sync -1;" ::: "memory");                \
      else asm volatile("bar.sync 0;" ::: "memory"))                                                                   \
    V(unknown_video, 1, "vadd.u32.u32.u32.sat", asm volatile("vadd.u32.u32.u32.sat %0, %1, %1;" : "=r"(x) : "r"(l)))   \
    V(unknown_f16, 1, "add.f16", asm volatile("{ .reg .b16 h; add.f16 h, h, h; cvt.u32.u16 %0, h; }" : "=r"(x)))       \
    V(unknown_bf16x2, 1, "add.rn.bf16x2", FROM_90(asm volatile("add.rn.bf16x2 %0, %1, %1;" : "=r"(x) : "r"(l));))      \
    V(unknown_neg, 1, "neg.f16x2", asm volatile("neg.f16x2 %0, %1;" : "=r"(x) : "r"(l)))                               \
    V(unknown_nan, 1, "min.NaN.f32", asm volatile("min.NaN.f32 %0, %1, %1;" : "=r"(x) : "r"(l)))                       \
    V(unknown_ftz, 1, "setp.lt.ftz.f32",                                                                               \
      asm volatile("{ .reg .pred p; setp.lt.ftz.f32 p, %1, 0f00000000; selp.u32 %0, 1, 0, p; }" : "=r"(x) : "r"(l)))   \
    V(unknown_relu, 1, "cvt.rn.relu.f16x2.f32", asm volatile("cvt.rn.relu.f16x2.f32 %0, %1, %1;" : "=r"(x) : "r"(l)))  \
    V(unknown_rounding, 1, "sqrt.rz.f32", asm volatile("sqrt.rz.f32 %0, %1;" : "=r"(x) : "r"(l)))                      \
    V(unknown_arrive, 32, "bar.arrive", asm volatile("bar.arrive 3, 64;" ::: "memory"))                                \
    V(unknown_atomic, 1, "atom.global.add.noftz.f16x2",                                                                \
      asm volatile("atom.global.add.noftz.f16x2 %0, [%1], %2;" : "=r"(x) : "l"(p), "r"(l) : "memory"))
/* clang-format on */
#define VIOLATION_KERNEL(name, threads, instruction, ...) \
    extern "C" __global__ void violates_##name(u32 *p) {  \
        __shared__ __align__(16) u32 s[256];              \
        const u32 l = threadIdx.x;                        \
        u32 x = l;                                        \
        u64 y = 0;                                        \
        s[l] = l;                                         \
        __VA_ARGS__;                                      \
        p[l % 64] = x + (u32)y + s[l ^ 1];                \
    }
VIOLATIONS(VIOLATION_KERNEL)
static const struct Violation {
    const char *name, *instruction;
    int threads;
    void (*kernel)(u32 *);
} violations[] = {
#define VIOLATION_ENTRY(name, threads, instruction, ...) {#name, instruction, threads, violates_##name},
    VIOLATIONS(VIOLATION_ENTRY)};

/* In a process of its own: 0 if the error is reported and stays. */
static int violate(const Violation &v) {
    u32 *p, *q;
    CUDA(cudaMalloc((void **)&p, 256));
    CUDA(cudaMalloc((void **)&q, 256));
    if (!strcmp(v.name, "read_freed")) CUDA(cudaFree(p));
    v.kernel<<<1, v.threads>>>(p);
    if (cudaDeviceSynchronize() == cudaSuccess) return 1;
    if (cudaGetLastError() == cudaSuccess) return 2;
    k_dependent<<<1, 1>>>(q);
    if (cudaGetLastError() == cudaSuccess || cudaDeviceSynchronize() == cudaSuccess) return 3;
    return cudaMemset(q, 0, 256) != cudaSuccess || cudaMemcpy(p, q, 4, cudaMemcpyDefault) != cudaSuccess ? 0 : 4;
}
static Outcome run_violation(const Violation &v) {
    int channel[2], status = 0;
    if (pipe(channel)) return fail("pipe: %s", strerror(errno));
    const pid_t child = fork();
    if (child == 0) {
        dup2(channel[1], 1), dup2(channel[1], 2);
        execl("/proc/self/exe", "selftest", "--violate", v.name, (char *)NULL);
        _exit(127);
    }
    close(channel[1]);
    std::string said;
    char s[4096];
    for (ssize_t n; (n = read(channel[0], s, sizeof s)) > 0;) said.append(s, (size_t)n);
    close(channel[0]);
    waitpid(child, &status, 0);
    for (char &c : said)
        if (c == '\n') c = ' ';
    const std::string kernel = std::string("violates_") + v.name;
    if (said.find(kernel) == std::string::npos || said.find(v.instruction) == std::string::npos)
        return fail("wants a message with %s and %s: %.300s", kernel.c_str(), v.instruction, said.c_str());
    const bool unknown = !strncmp(v.name, "unknown", 7); /* may end the program */
    if (WIFEXITED(status) ? WEXITSTATUS(status) == 0 : unknown) return PASSED;
    return fail("ended with status %#x: %.300s", status, said.c_str());
}

/* ---- Instructions ------------------------------------------------------------------------------------------------ */

/* The name of a statement's instruction with its modifiers; of mov, also the special register, or where it packs (end
 * is '{'). Empty if the statement is none. */
static std::string instruction_of(const std::string &statement, char end) {
    size_t at = 0;
    if (statement[0] == '@') at = std::min(statement.find(' '), statement.size() - 1) + 1; /* a guard */
    std::string op = statement.substr(at, statement.find(' ', at) - at);
    if (op.empty() || !islower((u8)op[0]) || op.find_first_of(",[]()%$") != std::string::npos) return "";
    if (op.compare(0, 4, "mov.")) return op;
    if (end == '{') return op + (statement.find(',') == std::string::npos ? " {},a" : " d,{}");
    const size_t source = statement.rfind('%');
    if (source == std::string::npos || statement.find(',', source) != std::string::npos) return op;
    return isdigit((u8)statement.back()) ? op : op + " " + statement.substr(source);
}
/* Adds the instructions of PTX. asm_only: those of inline assembler, which is in braces here, in kernels that are no
 * violations. */
static void add_instructions(const char *text, bool asm_only, std::set<std::string> &to) {
    int depth = 0; /* 1: in a kernel, 2: in braces of it */
    bool skipped = false, vector = false;
    std::string statement;
    auto add = [&](char end) {
        const std::string op = depth ? instruction_of(statement, end) : "";
        if (!op.empty() && (!asm_only || (depth > 1 && !skipped))) to.insert(op);
    };
    for (const char *p = text; *p; p++) {
        if (p[0] == '/' && p[1] == '/') {
            while (p[1] && p[1] != '\n') p++;
        } else if (*p == '{' && (statement.empty() || !depth)) {
            const size_t entry = statement.find(".entry ");
            if (!depth) skipped = entry != std::string::npos && !statement.compare(entry + 7, 9, "violates_");
            depth++, statement.clear();
        } else if (*p == '{') {
            add('{'), vector = true, statement = ",";
        } else if (*p == '}') {
            if (!vector) depth--, statement.clear();
            vector = false;
        } else if (*p == ';') {
            add(';'), statement.clear();
        } else if (*p == ':' && p[1] != ':' && p[-1] != ':') { /* a label */
            statement.clear();
        } else if (!isspace((u8)*p)) {
            statement += *p;
        } else if (!statement.empty() && statement.back() != ' ') {
            statement += ' ';
        }
    }
}
static std::string contents(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) printf("%s: %s\n", path, strerror(errno)), exit(1);
    std::string s;
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, f)) > 0;) s.append(buffer, n);
    fclose(f);
    return s;
}
static int list_instructions(char **files) {
    const std::string program = contents("/proc/self/exe"); /* its PTX is in it, each image ended by a NUL */
    std::set<std::string> own, theirs;
    static const char begin[] = "\n.version ";
    for (size_t at = 0; (at = program.find(begin, at)) != std::string::npos; at++)
        add_instructions(program.c_str() + at, true, own);
    for (; *files; files++) add_instructions(contents(*files).c_str(), false, theirs);
    size_t missing = 0;
    for (const std::string &s : theirs)
        if (!own.count(s)) printf("%s\n", s.c_str()), missing++;
    printf("%zu instructions, %zu of them without a test\n", theirs.size(), missing);
    return missing != 0 || theirs.empty();
}

/* ---- Main -------------------------------------------------------------------------------------------------------- */

static void add(const char *group, const char *name, std::function<Outcome()> run, int capability = 80) {
    tests.push_back({std::string(group) + "/" + name, capability, run});
}
static void add_tests() {
    for (const Arithmetic &t : arithmetic)
        add(
            "arithmetic", t.name, [&t] { return run_arithmetic(t); }, t.capability);
    for (const Access &t : loads) add("load", t.name, [&t] { return run_load(t); });
    for (const Access &t : stores) add("store", t.name, [&t] { return run_store(t); });
    add("memory", "parameters", test_parameters);
    add("memory", "local", test_local);
    add("memory", "addresses", test_addresses);
    add("memory", "copies", test_copies);
    for (const Atomic &t : atomics) add("atomic", t.name, [&t] { return run_atomic(t); });
    add("atomic", "fence", test_fence);
    static const char *const modes[4] = {"shfl_up", "shfl_down", "shfl_bfly", "shfl_idx"};
    for (int mode = 0; mode < 4; mode++) add("lanes", modes[mode], [mode] { return run_shuffle(mode); });
    for (const WarpOp &t : warp_ops) add("lanes", t.name, [&t] { return run_warp_op(t); });
    add("lanes", "halves", test_halves);
    add("matrix", "mma_f16_layout", test_mma_f16_layout);
    add("matrix", "mma_f16_values", test_mma_f16_values);
    add("matrix", "mma_f16_infinite", test_mma_f16_infinite);
    add("matrix", "mma_fp4_layout", test_mma_fp4_layout, 120);
    add("matrix", "mma_fp4_values", test_mma_fp4_values, 120);
    add("matrix", "ldmatrix_x1", [] { return run_ldmatrix(1, false, k_ldmatrix_1); });
    add("matrix", "ldmatrix_x2", [] { return run_ldmatrix(2, false, k_ldmatrix_2); });
    add("matrix", "ldmatrix_x4", [] { return run_ldmatrix(4, false, k_ldmatrix_4); });
    add("matrix", "ldmatrix_x1_trans", [] { return run_ldmatrix(1, true, k_ldmatrix_1t); });
    add("matrix", "ldmatrix_x2_trans", [] { return run_ldmatrix(2, true, k_ldmatrix_2t); });
    add("matrix", "ldmatrix_x4_trans", [] { return run_ldmatrix(4, true, k_ldmatrix_4t); });
    add("control", "barriers", test_barriers);
    add("control", "divergence", test_divergence);
    add("control", "special_registers", test_special);
    add("control", "dependents", test_dependents);
    for (const Counted &t : counted) add("counters", t.name, [&t] { return run_counted(t); });
    add("counters", "distinct sectors", test_distinct);
    add("counters", "prefetches", test_ahead, 90);
    add("stores", "flags", test_flags);
    for (const Violation &v : violations)
        add(
            "violation", v.name, [&v] { return run_violation(v); }, strcmp(v.name, "unknown_bf16x2") ? 80 : 90);
}

/* A kernel that never ends is an error too. */
static void too_long(int) {
    static const char said[] = "FAILED: it does not end: ";
    if (write(1, said, sizeof said - 1) < 0 || write(1, running, strlen(running)) < 0 || write(1, "\n", 1) < 0)
        _exit(2);
    _exit(1);
}

int main(int argc, char **argv) {
    signal(SIGALRM, too_long);
    setvbuf(stdout, NULL, _IOLBF, 0);
    add_tests();
    if (argc > 2 && !strcmp(argv[1], "--instructions")) return list_instructions(argv + 2);
    if (argc == 3 && !strcmp(argv[1], "--violate")) {
        for (const Violation &v : violations)
            if (!strcmp(v.name, argv[2])) return violate(v);
        return 127;
    }
    if (argc == 2 && !strcmp(argv[1], "--list")) {
        for (const Test &t : tests) puts(t.name.c_str());
        return 0;
    }
    const Array<int> capability(1);
    k_capability<<<1, 1>>>(capability.p);
    const int image = capability.get()[0];
    int count[3] = {0, 0, 0};
    for (const Test &t : tests) {
        bool chosen = argc == 1;
        for (int i = 1; i < argc; i++) chosen |= t.name.find(argv[i]) != std::string::npos;
        if (!chosen) continue;
        failure.clear(), running = t.name.c_str(), alarm(60);
        const Outcome o = t.capability > image ? SKIPPED : t.run();
        count[o]++;
        static const char *const word[3] = {"ok", "FAILED", "skipped"};
        printf("%-8s %s%s%s\n", word[o], t.name.c_str(), failure.empty() ? "" : ": ", failure.c_str());
    }
    printf("%d passed, %d failed", count[PASSED], count[FAILED]);
    if (count[SKIPPED]) printf(", %d not in the image of compute_%d", count[SKIPPED], image);
    printf("\n");
    return count[FAILED] != 0 || !count[PASSED];
}
