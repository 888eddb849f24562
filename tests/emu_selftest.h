// Tests of cuda_emu.h. The includer defines CHECK(cond), which records a failure and continues, and calls the
// functions emu_test_*. Reports that end the process are tested in child processes.
#pragma once
#include "cuda_emu.h"
#include <sys/wait.h>

// ---- Helpers ----------------------------------------------------------------------------------------------

// Returns whether fn aborts, in a child process, after printing `text`.
template <class F>
static bool emu_aborts(const char *text, F fn) {
    int fd[2];
    if (pipe(fd)) return false;
    fflush(stdout), fflush(stderr);
    const pid_t pid = fork();
    if (!pid) {
        dup2(fd[1], 2);
        fn();
        _exit(0);
    }
    close(fd[1]);
    std::string said;
    char buf[4096];
    for (ssize_t n; (n = read(fd[0], buf, sizeof buf)) > 0;) said.append(buf, (size_t)n);
    close(fd[0]);
    int status = 0;
    waitpid(pid, &status, 0);
    const bool ok = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && said.find(text) != std::string::npos;
    if (!ok) fprintf(stderr, "expected an abort that says \"%s\", got status %x and: %s\n", text, status, said.c_str());
    return ok;
}

// ---- Threads, barriers, shared memory ---------------------------------------------------------------------

static __global__ void emu_k_index(unsigned *out) {
    const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned before = t;
    __syncthreads();
    const unsigned after = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[b * blockDim.x * blockDim.y * blockDim.z + t] = before == after ? b * 1000 + t : ~0u;
}

// Rotates x within the block through one buffer, `rounds` times.
static __global__ void emu_k_rotate(int *x, int rounds) {
    DYN_SMEM(int, buf);
    int v = x[threadIdx.x];
    for (int i = 0; i < rounds; i++) {
        buf[threadIdx.x] = v;
        __syncthreads(); // written
        v = buf[(threadIdx.x + 1) % blockDim.x];
        __syncthreads(); // read
    }
    x[threadIdx.x] = v;
}
// Returns whether the rotation is right.
static bool emu_rotates(uint64_t seed) {
    std::vector<int> x(256);
    for (int i = 0; i < 256; i++) x[(size_t)i] = i;
    gpu_array<int> d(x);
    cuemu::seed(seed);
    LAUNCH(emu_k_rotate, 1, 256, 1024, 0, d, 20);
    x = d.get();
    for (int i = 0; i < 256; i++)
        if (x[(size_t)i] != (i + 20) % 256) return false;
    return true;
}

static void emu_test_index() {
    gpu_array<unsigned> d(6 * 30);
    LAUNCH(emu_k_index, dim3(3, 1, 2), dim3(5, 3, 2), 0, 0, d);
    const std::vector<unsigned> out = d.get();
    for (unsigned i = 0; i < out.size(); i++) CHECK(out[i] == i / 30 * 1000 + i % 30);
}

// Each barrier of the rotation is needed: without it nearly all schedules give wrong results.
static void emu_test_barriers() {
    for (uint64_t s = 0; s < 5; s++) CHECK(emu_rotates(s));
    unsigned of_rotate = 0;
    for (const cuemu::barrier_site &b : cuemu::barriers()) {
        if (strcmp(b.file, __FILE__) || strcmp(b.kind, "__syncthreads") || b.count != 5 * 20 * 256) continue;
        of_rotate++;
        cuemu::skip(b.file, b.line);
        unsigned wrong = 0;
        for (uint64_t s = 0; s < 10; s++) wrong += !emu_rotates(s);
        cuemu::unskip();
        CHECK(wrong >= 9);
    }
    CHECK(of_rotate == 2);
    CHECK(emu_rotates(0));
}

template <class T>
static __global__ void emu_k_shared(T *out) {
    SHARED(T, a, 32);
    SHARED(uint8_t, b, 33);
    a[threadIdx.x] = (T)threadIdx.x;
    b[threadIdx.x] = (uint8_t)(100 + threadIdx.x);
    __syncwarp();
    out[threadIdx.x] = (T)(a[31 - threadIdx.x] + (T)b[31 - threadIdx.x]);
    if (threadIdx.x == 0) out[32] = (T)b[32];
}
static __global__ void emu_k_warp(uint32_t *out) {
    SHARED(int, box, 64);
    const int t = (int)threadIdx.x;
    box[t] = t;
    __syncwarp(); // the barrier that the test below leaves out
    out[t] = (uint32_t)box[t ^ 1];
}
static void emu_test_shared() {
    gpu_array<float> f(33);
    gpu_array<int> i(33);
    LAUNCH(emu_k_shared<float>, 1, 32, 0, 0, f);
    LAUNCH(emu_k_shared<int>, 1, 32, 0, 0, i);
    const std::vector<float> vf = f.get();
    const std::vector<int> vi = i.get();
    for (size_t l = 0; l < 32; l++) CHECK(vf[l] == (float)(100 + 2 * (31 - l)) && vi[l] == (int)(100 + 2 * (31 - l)));
    CHECK(vi[32] == 0xfd); // poison

    gpu_array<uint32_t> w(64);
    auto right = [&](uint64_t seed) {
        cuemu::seed(seed);
        LAUNCH(emu_k_warp, 1, 64, 0, 0, w);
        const std::vector<uint32_t> v = w.get();
        for (uint32_t t = 0; t < 64; t++)
            if (v[t] != (t ^ 1)) return false;
        return true;
    };
    CHECK(right(1));
    for (const cuemu::barrier_site &b : cuemu::barriers())
        if (!strcmp(b.file, __FILE__) && !strcmp(b.kind, "__syncwarp") && b.count == 64) cuemu::skip(b.file, b.line);
    CHECK(!right(1) && !right(2) && !right(3));
    cuemu::unskip();
}

static __global__ void emu_k_named(int *out) { // warps 0 and 1 produce, warps 2 and 3 consume
    SHARED(int, box, 64);
    const int t = (int)threadIdx.x;
    for (int i = 0; i < 10; i++)
        if (t < 64) {
            if (i) named_barrier(2, 128);
            box[t] = 100 * i + t;
            named_barrier(1, 128);
        } else {
            named_barrier(1, 128);
            out[i * 64 + t - 64] = box[127 - t];
            if (i < 9) named_barrier(2, 128);
        }
}
static __global__ void emu_k_votes(int *out) {
    const int t = (int)threadIdx.x;
    out[t] = __syncthreads_count(t % 3 == 0) * 100 + __syncthreads_or(t == 95) * 10 + __syncthreads_and(t < 95);
}
static void emu_test_named_barriers() {
    for (uint64_t s = 0; s < 5; s++) {
        cuemu::seed(s);
        gpu_array<int> d(640), v(96);
        LAUNCH(emu_k_named, 1, 128, 0, 0, d);
        LAUNCH(emu_k_votes, 1, 96, 0, 0, v);
        const std::vector<int> out = d.get(), votes = v.get();
        for (int i = 0; i < 640; i++) CHECK(out[(size_t)i] == i / 64 * 100 + 63 - i % 64);
        for (int x : votes) CHECK(x == 3210);
    }
}

// ---- Warp collectives -------------------------------------------------------------------------------------

static __global__ void emu_k_shuffles(int *out) {
    const int l = (int)threadIdx.x;
    int *o = out + l * 16;
    o[0] = __shfl_sync(~0u, l, 5);
    o[1] = __shfl_sync(~0u, l, 3, 8);
    o[2] = __shfl_xor_sync(~0u, l, 16);
    o[3] = __shfl_up_sync(~0u, l, 3);
    o[4] = __shfl_up_sync(~0u, l, 3, 16);
    o[5] = __shfl_down_sync(~0u, l, 30);
    o[6] = __shfl_down_sync(~0u, l, 1, 4);
    o[7] = (int)__ballot_sync(~0u, l % 3 == 0);
    o[8] = __any_sync(~0u, l == 31) * 2 + __all_sync(~0u, l < 31);
    o[9] = (int)__reduce_add_sync(~0u, (unsigned)l);
    o[10] = __reduce_max_sync(~0u, l - 100);
    if (l < 16) o[11] = __shfl_xor_sync(0xffffu, l, 1); // the halves shuffle separately
    else o[11] = __shfl_xor_sync(0xffff0000u, l, 2);
    o[12] = (int)(__shfl_xor_sync(~0u, 1.5 * l, 1) * 2); // 8 bytes
    o[13] = __shfl_xor_sync(~0u, l, 8, 8);               // source in the segment above: own value; below: that lane's
}
static void emu_test_shuffles() {
    for (uint64_t s = 0; s < 5; s++) {
        cuemu::seed(s);
        gpu_array<int> d(32 * 16);
        LAUNCH(emu_k_shuffles, 1, 32, 0, 0, d);
        const std::vector<int> out = d.get();
        for (int l = 0; l < 32; l++) {
            const int *o = &out[(size_t)l * 16];
            CHECK(o[0] == 5 && o[1] == (l & ~7) + 3 && o[2] == (l ^ 16));
            CHECK(o[3] == (l < 3 ? l : l - 3) && o[4] == (l % 16 < 3 ? l : l - 3));
            CHECK(o[5] == (l + 30 > 31 ? l : l + 30) && o[6] == (l % 4 == 3 ? l : l + 1));
            CHECK(o[7] == 0x49249249 && o[8] == 2 && o[9] == 496 && o[10] == -69);
            CHECK(o[11] == (l ^ (l < 16 ? 1 : 2)) && o[12] == 3 * (l ^ 1) && o[13] == (l & 8 ? l ^ 8 : l));
        }
    }
}

// ---- Reports ----------------------------------------------------------------------------------------------

static __global__ void emu_k_diverge(int *out, int how) {
    const int t = (int)threadIdx.x;
    DYN_SMEM(char, dynamic);
    switch (how) {
    case 0: out[t] = t < 16 ? __shfl_sync(~0u, t, 0) : __shfl_xor_sync(~0u, t, 1); break; // different calls
    case 1:                                                                               // different masks
        out[t] = __shfl_sync(t % 32 < 16 ? 0xffffu : ~0u, t, 0);
        __syncwarp();
        break;
    case 2: // a barrier in a branch
        if (t < 40) __syncthreads();
        break;
    case 3: // two different barriers
        if (t < 32) __syncthreads();
        else if (t >= 0) __syncthreads();
        break;
    case 4: // deadlock
        if (t < 32) named_barrier(1, 64);
        else named_barrier(2, 64);
        break;
    case 5: out[64] = 1; break;  // just after the end: within the slack
    case 6: out[256] = 1; break; // in the guard page
    case 7: out[-1] = 1; break;
    case 8: dynamic[512 + t] = 1; break;
    case 9: {
        SHARED(int, a, 16);
        if (t < 17) a[t] = 0;
        break;
    }
    case 10: cp_async16(dynamic + 8, out); break;
    case 11: {
        SHARED(char, big, 40000);
        SHARED(char, more, 12000);
        big[t] = more[t] = 0;
        break;
    }
    case 12: {
        float d[4] = {};
        uint32_t ab[4] = {};
        if (t != 5) mma_f16(d, ab, ab);
        break;
    }
    case 13:
        while (!ld_acquire((uint32_t *)out)) {}
        break;
    case 14: {
        volatile int *volatile nowhere = nullptr;
        *nowhere = 0;
        break;
    }
    }
}
static void emu_test_reports() {
    auto run = [](int how, const char *text) {
        return emu_aborts(text, [=] {
            gpu_array<int> d(64);
            if (how == 13) cudaMemset(d, 0, 4);
            LAUNCH(emu_k_diverge, 2, 64, 512, 0, d, how);
            cudaDeviceSynchronize();
        });
    };
    CHECK(run(0, "diverged"));
    CHECK(run(1, "diverged"));
    CHECK(run(2, "divergent barrier"));
    CHECK(run(3, "divergent barrier"));
    CHECK(run(4, "deadlock"));
    CHECK(run(4, "32 threads wait in kernel emu_k_diverge: named_barrier"));
    CHECK(run(6, "out of bounds: access at offset 1024 of an allocation of 256 bytes"));
    CHECK(run(7, "out of bounds"));
    CHECK(run(8, "the dynamic array of 512 bytes"));
    CHECK(run(9, "shared array a at"));
    CHECK(run(10, "not aligned"));
    CHECK(run(11, "limit"));
    CHECK(run(12, "mma"));
    CHECK(run(13, "deadlock"));
    CHECK(run(14, "which is not allocated"));
    CHECK(emu_aborts("out of bounds: an allocation of 200 bytes was written at offset 204", [] {
        gpu_array<int> d(50);
        LAUNCH(emu_k_rotate, 1, 52, 512, 0, d, 1);
        cudaDeviceSynchronize();
    }));
}

// ---- Copies to shared memory, fragments -------------------------------------------------------------------

// out: contents of the buffer after the copies were issued, after waiting for all groups but one, after waiting for
// all.
static __global__ void emu_k_cp_async(const int *in, int *out) {
    DYN_SMEM(int, buf);
    const int t = (int)threadIdx.x;
    int *mine = buf + t * 8;
    for (int i = 0; i < 8; i++) mine[i] = -1;
    cp_async16(mine, in + t * 8);
    cp_async_commit();
    cp_async16(mine + 4, in + t * 8 + 4, t % 2 == 0);
    cp_async_commit();
    out[t * 6] = mine[0], out[t * 6 + 1] = mine[4];
    cp_async_wait<1>();
    out[t * 6 + 2] = mine[0], out[t * 6 + 3] = mine[4];
    cp_async_wait<0>();
    out[t * 6 + 4] = mine[0], out[t * 6 + 5] = mine[4];
}
static void emu_test_cp_async() {
    std::vector<int> in(256 * 8);
    for (size_t i = 0; i < in.size(); i++) in[i] = (int)i;
    gpu_array<int> d_in(in), d_out(256 * 6);
    LAUNCH(emu_k_cp_async, 1, 256, 8192, 0, d_in, d_out);
    const std::vector<int> out = d_out.get();
    int early = 0, between = 0;
    for (int t = 0; t < 256; t++) {
        const int *o = &out[(size_t)t * 6], want = t % 2 ? 0 : t * 8 + 4;
        early += o[0] == t * 8, between += o[3] == want;
        CHECK(o[0] == -1 || o[0] == t * 8);
        CHECK(o[1] == -1 || o[1] == want);
        CHECK(o[2] == t * 8 && (o[3] == -1 || o[3] == want) && o[4] == t * 8 && o[5] == want);
    }
    CHECK(early > 50 && early < 200 && between > 50 && between < 200);
}

static __global__ void emu_k_ldmatrix(const uint16_t *in, uint32_t *out) {
    SHARED(uint16_t, m, 32 * 8);
    const unsigned l = threadIdx.x;
    for (unsigned i = 0; i < 8; i++) m[l * 8 + i] = in[l * 8 + i];
    __syncwarp();
    ldmatrix_x4(out + l * 12, m + l * 8);
    ldmatrix_x4_trans(out + l * 12 + 4, m + l * 8);
    ldmatrix_x2(out + l * 12 + 8, m + l % 16 * 8);
    ldmatrix_x2_trans(out + l * 12 + 10, m + l % 16 * 8);
}
static void emu_test_ldmatrix() {
    std::vector<uint16_t> in(256);
    for (uint16_t &x : in) x = (uint16_t)rnd();
    gpu_array<uint16_t> d_in(in);
    gpu_array<uint32_t> d_out(32 * 12);
    LAUNCH(emu_k_ldmatrix, 1, 32, 0, 0, d_in, d_out);
    const std::vector<uint32_t> out = d_out.get();
    auto at = [&](unsigned j, unsigned row, unsigned col) { return (uint32_t)in[j * 64 + row * 8 + col]; };
    for (unsigned l = 0; l < 32; l++)
        for (unsigned j = 0; j < 4; j++) {
            const unsigned g = l / 4, t = l % 4;
            const uint32_t plain = at(j, g, 2 * t) | at(j, g, 2 * t + 1) << 16;
            const uint32_t trans = at(j, 2 * t, g) | at(j, 2 * t + 1, g) << 16;
            CHECK(out[l * 12 + j] == plain && out[l * 12 + 4 + j] == trans);
            if (j < 2) CHECK(out[l * 12 + 8 + j] == plain && out[l * 12 + 10 + j] == trans);
        }
}

struct emu_operands { // operands of one lane
    uint32_t a[4], b[2], sfa, sfb;
    float d[4];
};
static __global__ void emu_k_mma(emu_operands *lanes, int kind) {
    emu_operands &x = lanes[threadIdx.x];
    switch (kind) {
    case 0: mma_f16(x.d, x.a, x.b); break;
    case 1: mma_bf16(x.d, x.a, x.b); break;
    case 2: mma_e4m3(x.d, x.a, x.b); break;
    case 3: mma_nvfp4(x.d, x.a, x.b, x.sfa, x.sfb); break;
    }
}

// Returns the value of a code, from the definition of the format.
static double emu_value(uint32_t bits, int exponent, int mantissa, int bias) {
    const uint32_t m = bits & ((1u << mantissa) - 1), e = bits >> mantissa & ((1u << exponent) - 1);
    const double magnitude = e ? ldexp(1 + ldexp(m, -mantissa), (int)e - bias) : ldexp(m, 1 - bias - mantissa);
    return bits >> (mantissa + exponent) & 1 ? -magnitude : magnitude;
}
static double emu_element(int kind, uint32_t word, unsigned i) {
    switch (kind) {
    case 0: return emu_value(word >> 16 * i & 0xffff, 5, 10, 15);
    case 1: return emu_value(word >> 16 * i & 0xffff, 8, 7, 127);
    case 2: return emu_value(word >> 8 * i & 0xff, 4, 3, 7);
    default: return emu_value(word >> 4 * i & 0xf, 2, 1, 1);
    }
}
// Returns random bits without infinities and NaN. Exponents of bf16 are near 1.
static uint32_t rnd_word(int kind) {
    uint32_t w = rnd();
    if (kind == 0)
        for (int i = 0; i < 2; i++)
            if ((w >> 16 * i & 0x7c00) == 0x7c00) w ^= 0x4000u << 16 * i;
    if (kind == 1) w = (w & 0x87ff87ff) | 0x38003800;
    if (kind == 2)
        for (int i = 0; i < 4; i++)
            if ((w >> 8 * i & 0x7f) == 0x7f) w ^= 1u << 8 * i;
    return w;
}
// Compares the products with sums in double, by the layouts of the PTX ISA, one instruction at a time.
static void emu_test_mma() {
    for (int kind = 0; kind < 4; kind++)
        for (int round = 0; round < 20; round++) {
            const unsigned K = kind < 2 ? 16 : kind == 2 ? 32 : 64;
            std::vector<emu_operands> x(32);
            for (emu_operands &o : x) {
                for (uint32_t &w : o.a) w = rnd_word(kind);
                for (uint32_t &w : o.b) w = rnd_word(kind);
                o.sfa = rnd_word(2) & 0x7f7f7f7f, o.sfb = rnd_word(2) & 0x7f7f7f7f;
                for (float &v : o.d) v = (float)(rnd() % 100);
            }
            if (kind == 0 && round == 0) // subnormals only
                for (emu_operands &o : x)
                    for (uint32_t &w : o.a) w &= 0x83ff83ff;
            double a[16][64], b[64][8];
            for (unsigned m = 0; m < 16; m++)
                for (unsigned k = 0; k < K; k++) {
                    const unsigned g = m % 8, hi = m / 8;
                    if (kind < 2) a[m][k] = emu_element(kind, x[g * 4 + k % 8 / 2].a[hi + 2 * (k / 8)], k % 2);
                    else if (kind == 2) a[m][k] = emu_element(kind, x[g * 4 + k % 16 / 4].a[hi + 2 * (k / 16)], k % 4);
                    else
                        a[m][k] = emu_element(kind, x[g * 4 + k % 32 / 8].a[hi + 2 * (k / 32)], k % 8) *
                                  emu_value(x[g * 4 + hi].sfa >> k / 16 * 8 & 127, 4, 3, 7);
                }
            for (unsigned n = 0; n < 8; n++)
                for (unsigned k = 0; k < K; k++)
                    if (kind < 2) b[k][n] = emu_element(kind, x[n * 4 + k % 8 / 2].b[k / 8], k % 2);
                    else if (kind == 2) b[k][n] = emu_element(kind, x[n * 4 + k % 16 / 4].b[k / 16], k % 4);
                    else
                        b[k][n] = emu_element(kind, x[n * 4 + k % 32 / 8].b[k / 32], k % 8) *
                                  emu_value(x[n * 4].sfb >> k / 16 * 8 & 127, 4, 3, 7);
            gpu_array<emu_operands> d(x);
            LAUNCH(emu_k_mma, 1, 32, 0, 0, d, kind);
            const std::vector<emu_operands> y = d.get();
            for (unsigned l = 0; l < 32; l++)
                for (unsigned r = 0; r < 4; r++) {
                    const unsigned m = l / 4 + 8 * (r / 2), n = l % 4 * 2 + r % 2;
                    double sum = x[l].d[r], size = fabs(sum);
                    for (unsigned k = 0; k < K; k++) sum += a[m][k] * b[k][n], size += fabs(a[m][k] * b[k][n]);
                    CHECK(fabs(y[l].d[r] - sum) <= 1e-6 * size);
                }
        }
    std::vector<emu_operands> x(32); // a NaN scale spoils its row only
    x[4 * 3 + 1].sfa = 0x7f;
    gpu_array<emu_operands> d(x);
    LAUNCH(emu_k_mma, 1, 32, 0, 0, d, 3);
    const std::vector<emu_operands> y = d.get();
    for (size_t l = 0; l < 32; l++) CHECK(!std::isnan(y[l].d[0]) && std::isnan(y[l].d[2]) == (l / 4 == 3));
}

// ---- A GEMM with all of it, and with a barrier less -------------------------------------------------------

// C = A B^T for m = 16: blocks of 32 columns, 4 warps with 8 columns each, k in tiles of 64 through two buffers.
static __global__ void __launch_bounds__(128)
    emu_k_gemm(const uint8_t *A, const uint8_t *B, const uint8_t *SA, const uint8_t *SB, float *C, int N, int K) {
    DYN_SMEM(uint8_t, smem);
    const int stage = 16 * 32 + 32 * 32, t = (int)threadIdx.x, l = t % 32, n0 = (int)blockIdx.x * 32;
    auto load = [&](int k, int buffer) {
        uint8_t *s = smem + buffer * stage;
        const int row = t < 32 ? t / 2 : t / 2 - 16;
        const uint8_t *from = t < 32 ? A + row * K / 2 : B + (n0 + row) * K / 2;
        if (t < 96) cp_async16(s + t * 16, from + k / 2 + t % 2 * 16);
        cp_async_commit();
    };
    float d[4] = {};
    load(0, 0);
    for (int k = 0; k < K; k += 64) {
        if (k + 64 < K) load(k + 64, (k / 64 + 1) % 2);
        else cp_async_commit();
        cp_async_wait<1>();
        __syncthreads(); // the tile has landed
        const uint8_t *s = smem + k / 64 % 2 * stage, *b_row = s + 512 + (t / 32 * 8 + l / 4) * 32 + l % 4 * 4;
        uint32_t a[4], b[2], sfa, sfb;
        ldmatrix_x4(a, s + l % 16 * 32 + l / 16 * 16);
        memcpy(b, b_row, 4), memcpy(b + 1, b_row + 16, 4);
        memcpy(&sfa, SA + (l / 4 + 8 * (l % 2)) * K / 16 + k / 16, 4);
        memcpy(&sfb, SB + (n0 + t / 32 * 8 + l / 4) * K / 16 + k / 16, 4);
        mma_nvfp4(d, a, b, sfa, sfb);
        __syncthreads(); // the tile may be overwritten
    }
    for (int r = 0; r < 4; r++) C[(l / 4 + 8 * (r / 2)) * N + n0 + t / 32 * 8 + l % 4 * 2 + r % 2] = d[r];
}
static void emu_test_gemm() {
    const int N = 64, K = 512;
    std::vector<uint8_t> a(16 * K / 2), b(N * K / 2), sa(16 * K / 16), sb(N * K / 16);
    for (auto *v : {&a, &b})
        for (uint8_t &x : *v) x = (uint8_t)rnd();
    for (auto *v : {&sa, &sb})
        for (uint8_t &x : *v) x = (uint8_t)(0x20 + rnd() % 48);
    std::vector<double> want(16 * N);
    auto value = [&](const std::vector<uint8_t> &v, const std::vector<uint8_t> &scales, int row, int k) {
        const size_t i = (size_t)(row * K + k);
        return emu_value(v[i / 2] >> i % 2 * 4 & 15, 2, 1, 1) * emu_value(scales[i / 16], 4, 3, 7);
    };
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) want[(size_t)(m * N + n)] += value(a, sa, m, k) * value(b, sb, n, k);
    gpu_array<uint8_t> da(a), db(b), dsa(sa), dsb(sb);
    auto right = [&](uint64_t seed) {
        cuemu::seed(seed);
        gpu_array<float> c((size_t)(16 * N));
        LAUNCH(emu_k_gemm, N / 32, 128, 3072, 0, da, db, dsa, dsb, c, N, K);
        const std::vector<float> got = c.get();
        for (size_t i = 0; i < want.size(); i++)
            if (!(fabs(got[i] - want[i]) <= 1e-3 * fmax(1, fabs(want[i])))) return false;
        return true;
    };
    for (uint64_t seed = 0; seed < 5; seed++) CHECK(right(seed));
    unsigned tried = 0;
    for (const cuemu::barrier_site &x : cuemu::barriers()) {
        if (strcmp(x.file, __FILE__) || x.count != 5 * (K / 64) * 128 * (N / 32)) continue;
        cuemu::skip(x.file, x.line, x.kind);
        unsigned wrong = 0;
        for (uint64_t seed = 0; seed < 10; seed++) wrong += !right(seed);
        cuemu::unskip();
        tried++;
        CHECK(wrong >= 9);
    }
    CHECK(tried == 3);
}

// ---- Conversions ------------------------------------------------------------------------------------------

// Finds the code nearest to x, ties to even, by bisection. `value` grows with the code, up to `last`.
template <class F>
static uint32_t emu_nearest(double x, uint32_t last, F value) {
    uint32_t lo = 0, hi = last;
    if (x >= value(last)) return last;
    while (lo + 1 < hi) {
        const uint32_t mid = (lo + hi) / 2;
        (value(mid) <= x ? lo : hi) = mid;
    }
    const double below = x - value(lo), above = value(hi) - x;
    return below < above || (below == above && lo % 2 == 0) ? lo : hi;
}
static void emu_test_conversions() {
    auto f16 = [](uint32_t c) { return emu_value(c, 5, 10, 15); }; // 0x7c00 counts as 65536, which rounds to infinity
    auto e4m3 = [](uint32_t c) { return emu_value(c, 4, 3, 7); };
    auto e2m1 = [](uint32_t c) { return emu_value(c, 2, 1, 1); };
    for (uint32_t h = 0; h < 65536; h++) {
        const float f = half_to_f32((uint16_t)h);
        if ((h & 0x7fff) > 0x7c00) CHECK(std::isnan(f) && f32_to_f16(f) == 0x7fff);
        else if ((h & 0x7fff) == 0x7c00) CHECK(std::isinf(f) && f32_to_f16(f) == h);
        else {
            CHECK(f == f16(h) && std::signbit(f) == (h >> 15) && f32_to_f16(f) == h);
            for (float x : {nextafterf(f, INFINITY), nextafterf(f, -INFINITY), f * 1.0003f, f * 1.00048828125f}) {
                const uint32_t want = emu_nearest(fabs(x), 0x7c00, f16);
                CHECK(f32_to_f16(x) == (want | (std::signbit(x) ? 0x8000u : 0)));
            }
            const float mid = (float)((f16(h) + f16(h + 1)) / 2); // ties
            CHECK(f32_to_f16(mid) == (emu_nearest(fabs(mid), 0x7c00, f16) | (h & 0x8000)));
        }
        const uint32_t halves = e4m3x2_to_f16x2((uint16_t)h);
        for (int i = 0; i < 2; i++) {
            const uint32_t code = h >> 8 * i & 255, half = halves >> 16 * i & 0xffff;
            if ((code & 127) == 127) CHECK(half == 0x7fff);
            else CHECK(f16(half) == e4m3(code) && half >> 15 == code >> 7);
        }
        CHECK(f32_to_bf16x2(bf16_value((uint16_t)h), 0) == ((h & 0x7fff) > 0x7f80 ? 0x7fff : h));
    }
    for (uint32_t i = 0; i < 200000; i++) { // all magnitudes
        const float x = __uint_as_float(rnd()), y = ldexpf((float)(int)rnd(), -(int)(rnd() % 48));
        if (std::isnan(x)) continue;
        const uint32_t got = f32_to_e4m3x2(x, y), sx = std::signbit(x), sy = std::signbit(y);
        CHECK((got & 255) == (emu_nearest(fabs(x), 126, e4m3) | sx << 7));
        CHECK(got >> 8 == (emu_nearest(fabs(y), 126, e4m3) | sy << 7));
        CHECK(f32_to_e2m1x2(x, y) ==
              (emu_nearest(fabs(x), 7, e2m1) | sx << 3 | emu_nearest(fabs(y), 7, e2m1) << 4 | sy << 7));
        CHECK(f32_to_bf16x2(1, x) >> 16 ==
              (emu_nearest(fabs(x), 0x7f80, [](uint32_t c) { return emu_value(c, 8, 7, 127); }) | sx << 15));
    }
    for (int i = 0; i < 2 * 448 * 8; i++) // ties of e4m3 and e2m1
        for (float x : {(float)i / 16, (float)i / 1024}) {
            CHECK(f32_to_e4m3x2(x, -x) == (emu_nearest(x, 126, e4m3) * 0x101 | 0x8000));
            CHECK(f32_to_e2m1x2(x, -x) == (emu_nearest(x, 7, e2m1) * 0x11 | 0x80));
        }
    for (uint32_t c = 0; c < 256; c++) {
        const uint32_t halves = e2m1x2_to_f16x2((uint8_t)c);
        CHECK(f16(halves & 0xffff) == e2m1(c & 15) && f16(halves >> 16) == e2m1(c >> 4));
        CHECK(f32_to_e2m1x2((float)e2m1(c & 15), (float)e2m1(c >> 4)) == c);
    }
    CHECK(f32_to_e4m3x2(NAN, 1e9f) == 0x7e7f && f32_to_e2m1x2(NAN, -INFINITY) == 0xf7);
    for (int i = 0; i < 200000; i++) {
        const uint32_t a = rnd_word(0), b = rnd_word(0), c = rnd_word(0);
        const uint32_t sum = f16x2_add(a, b), product = f16x2_mul(a, b), fma = f16x2_fma(a, b, c);
        for (int h = 0; h < 32; h += 16) {
            const long double x = f16(a >> h & 0xffff), y = f16(b >> h & 0xffff), z = f16(c >> h & 0xffff);
            auto check = [&](uint32_t got, long double exact) { // 64 bits of mantissa hold these values exactly
                const uint32_t want = emu_nearest((double)fabsl(exact), 0x7c00, f16);
                CHECK((got >> h & 0x7fff) == want && (!want || (got >> h & 0x8000) >> 15 == std::signbit(exact)));
            };
            check(sum, x + y), check(product, x * y), check(fma, x * y + z);
        }
    }
}

static void emu_test_intrinsics() {
    CHECK(__byte_perm(0x33221100, 0x77665544, 0x7250) == 0x77225500);
    for (unsigned sel = 0; sel < 16; sel++) {
        const unsigned x = 0x80017fff, y = 0x00ff8001;
        const unsigned byte = (sel & 7) < 4 ? x >> 8 * (sel & 7) & 255 : y >> 8 * (sel & 3) & 255;
        const unsigned want = sel & 8 ? (byte >> 7) * 255 : byte;
        CHECK(__byte_perm(x, y, sel << 4 | sel << 12) == ((want * 0x01000100u) | (x & 255) * 0x00010001u));
    }
    CHECK(__funnelshift_l(0x80000001, 0x12345678, 4) == 0x23456788 &&
          __funnelshift_r(0x80000001, 0x12345678, 4) == 0x88000000);
    CHECK(__clz(0) == 32 && __clz(1) == 31 && __ffs(0) == 0 && __ffs(8) == 4 && __popc(0xf0f0) == 8);
    CHECK(__brev(1) == 0x80000000 && __brev(0x12345678) == 0x1e6a2c48 &&
          __umulhi(0xffffffff, 0xffffffff) == 0xfffffffe);
    CHECK(__float2int_rn(2.5f) == 2 && __float2int_rn(-3.5f) == -4 && __float2int_rn(1e20f) == INT32_MAX &&
          __float2int_rn(NAN) == 0);
    CHECK(min(-1, 1u) == 1 && max(2.0f, NAN) == 2.0f && min(3ll, 4ll) == 3);
    int i = 5;
    unsigned u = 5;
    unsigned long long w = 1ull << 40;
    float f = 1;
    CHECK(atomicAdd(&i, -7) == 5 && i == -2 && atomicMax(&i, 3) == -2 && i == 3 && atomicMin(&u, 4) == 5 && u == 4);
    CHECK(atomicCAS(&u, 4, 9) == 4 && u == 9 && atomicCAS(&u, 4, 1) == 9 && u == 9 && atomicExch(&u, 2) == 9);
    CHECK(atomicOr(&u, 5) == 2 && u == 7 && atomicAnd(&u, 3) == 7 && u == 3 && atomicAdd(&w, 1) == 1ull << 40 &&
          atomicAdd(&f, 2.5f) == 1);
}

// ---- Host API ---------------------------------------------------------------------------------------------

static __global__ void emu_k_add(int *x, int n, int v) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] += v;
}

// Nothing runs before the host synchronizes, and a kernel gets the arguments as they were at the launch.
static void emu_test_queue() {
    int host[100] = {}, add = 5;
    int *d = nullptr;
    cudaStream_t s;
    CHECK(!cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CHECK(!cudaMalloc(&d, sizeof host));
    CHECK(!cudaMemcpyAsync(d, host, sizeof host, cudaMemcpyHostToDevice, s));
    host[0] = 77; // pageable memory: read when the copy's turn comes
    LAUNCH(emu_k_add, 4, 32, 0, s, d, 100, add);
    add = 9;
    CHECK(!cudaMemcpyAsync(host, d, sizeof host, cudaMemcpyDeviceToHost, s));
    CHECK(host[0] == 77 && host[99] == 0);
    CHECK(!cudaStreamSynchronize(s));
    CHECK(host[0] == 82 && host[99] == 5);
    int rows[2][3] = {{1, 2, 3}, {4, 5, 6}};
    CHECK(!cudaMemcpy2DAsync(d, 16, rows, 12, 8, 2, cudaMemcpyHostToDevice, s) && !cudaMemset(d + 50, 1, 4));
    CHECK(!cudaStreamSynchronize(s)); // the copy below is not ordered with s
    CHECK(!cudaMemcpy(host, d, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(host[0] == 1 && host[1] == 2 && host[2] == 5 && host[4] == 4 && host[5] == 5 && host[50] == 0x01010101);

    cudaEvent_t from = nullptr, to = nullptr;
    float ms = -1;
    CHECK(!cudaEventCreate(&from) && !cudaEventCreateWithFlags(&to, cudaEventDisableTiming));
    CHECK(!cudaEventRecord(from, s) && !cudaStreamWaitEvent(nullptr, from));
    LAUNCH(emu_k_add, 4, 32, 0, 0, d, 100, 1);
    CHECK(!cudaEventRecord(to) && cudaEventElapsedTime(&ms, from, to) == cudaErrorNotReady);
    while (cudaEventQuery(to) == cudaErrorNotReady) {}
    CHECK(!cudaEventSynchronize(to) && !cudaEventElapsedTime(&ms, from, to) && ms >= 0);
    CHECK(!cudaEventDestroy(from) && !cudaEventDestroy(to) && !cudaStreamDestroy(s) && cudaStreamSynchronize(s));

    CHECK(!cudaMemset(d, 0, sizeof host));
    cuemu::change_argument = [](const char *kernel, void *first) { *(int **)first += !strcmp(kernel, "emu_k_add"); };
    LAUNCH(emu_k_add, 1, 32, 0, 0, d, 1, 7);
    cuemu::change_argument = nullptr;
    CHECK(!cudaMemcpy(host, d, sizeof host, cudaMemcpyDeviceToHost) && !host[0] && host[1] == 7);

    CHECK(cudaMemcpy(host, d, sizeof host + 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(d, host, 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(rows, host, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    cudaGetLastError();
    LAUNCH(emu_k_add, 4, 1025, 0, 0, d, 100, 1);
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() && !cudaGetLastError());
    LAUNCH(emu_k_add, 0, 32, 0, 0, d, 100, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    LAUNCH(emu_k_add, dim3(1, 65536), 32, 0, 0, d, 100, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    LAUNCH(emu_k_add, 1, 32, 50000, 0, d, 100, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(!cudaFuncSetAttribute(emu_k_add, cudaFuncAttributeMaxDynamicSharedMemorySize, 101376));
    CHECK(cudaFuncSetAttribute(emu_k_add, cudaFuncAttributeMaxDynamicSharedMemorySize, 101377));
    CHECK(!strcmp(cudaGetErrorName(cudaGetLastError()), "cudaErrorInvalidValue"));
    LAUNCH(emu_k_add, 1, 32, 101376, 0, d, 100, 1);
    CHECK(!cudaGetLastError() && !cudaDeviceSynchronize() && !cudaFree(d));
    CHECK(cudaFree(d) == cudaErrorInvalidValue && cudaGetLastError());
}

static void emu_test_memory() {
    const size_t before = cuemu::allocated();
    cuemu::memory(before + 1000);
    void *a, *b, *pinned;
    CHECK(!cudaMalloc(&a, 600) && (uintptr_t)a % 256 == 0 && cuemu::allocated() == before + 600);
    CHECK(cudaMalloc(&b, 401) == cudaErrorMemoryAllocation && !b && cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(!cudaMallocHost(&pinned, 100000) && cuemu::allocated() == before + 600 && !cudaFreeHost(pinned));
    cuemu::memory((size_t)16 << 30);
    cuemu::fail_next("cudaMalloc", 2);
    CHECK(!cudaMalloc(&b, 500) && !cudaFree(b));
    CHECK(cudaMalloc(&b, 500) == cudaErrorMemoryAllocation);
    CHECK(!cudaMalloc(&b, 500) && !cudaFree(b) && !cudaFree(a) && !cudaFree(nullptr));
    cuemu::fail_next("LAUNCH", 1);
    cudaGetLastError();
    gpu_array<int> d(std::vector<int>(4));
    LAUNCH(emu_k_add, 1, 32, 0, 0, d, 4, 1);
    CHECK(cudaGetLastError() == cudaErrorUnknown && d.get()[0] == 0);
    int major = 0;
    cuemu::capability(9, 0);
    CHECK(!cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) && major == 9);
    cuemu::capability(12, 0);
}

static void emu_test_graph() {
    std::vector<int> init(100);
    gpu_array<int> d(init), copy(100);
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t nodes = 0;
    int v = 3;
    cudaStreamCreate(&s);
    CHECK(!cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    LAUNCH(emu_k_add, 4, 32, 0, s, d, 100, v);
    v = 1000;
    CHECK(!cudaMemcpyAsync(copy, d, 400, cudaMemcpyDeviceToDevice, s) && !cudaMemsetAsync(d, 0, 4, s));
    CHECK(!cudaStreamEndCapture(s, &graph) && !cudaGraphGetNodes(graph, nullptr, &nodes) && nodes == 3);
    CHECK(!cudaGraphInstantiate(&exec, graph, 0) && !cudaGraphDestroy(graph));
    CHECK(d.get()[1] == 0);
    for (int i = 0; i < 5; i++) CHECK(!cudaGraphLaunch(exec, s));
    CHECK(d.get()[1] == 15 && d.get()[0] == 0 && copy.get()[0] == 3 && copy.get()[99] == 15);
    CHECK(!cudaGraphExecDestroy(exec));
    CHECK(!cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    CHECK(cudaStreamSynchronize(s) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
    CHECK(!cudaStreamDestroy(s) && cudaGetLastError());
}

// ---- Kernels that wait for others -------------------------------------------------------------------------

// One of two ranks: adds its numbers to the other's, through mailboxes and flags.
static __global__ void emu_k_rank(int *mine, int *theirs, uint32_t *my_flag, uint32_t *their_flag, int *sum) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    mine[i] = (int)i + mine[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        st_release_sys(my_flag + blockIdx.x, 1);
        while (ld_acquire_sys(their_flag + blockIdx.x) != 1) {}
    }
    __syncthreads();
    sum[i] = mine[i] + theirs[i];
}
// Every block waits for all others.
static __global__ void emu_k_grid_barrier(uint32_t *count, int *x, int *out) {
    const unsigned n = gridDim.x;
    if (threadIdx.x == 0) {
        x[blockIdx.x] = (int)blockIdx.x;
        atom_add_acq_rel(count, 1);
        while (ld_acquire(count) < n) {}
    }
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = x[(blockIdx.x + 1) % n];
}
static void emu_test_waiting_kernels() {
    for (uint64_t seed = 0; seed < 5; seed++) {
        cuemu::seed(seed);
        gpu_array<int> a(std::vector<int>(256, 1000)), b(std::vector<int>(256, 2000)), sum_a(256), sum_b(256);
        gpu_array<uint32_t> flags(std::vector<uint32_t>(8));
        cudaStream_t s, t;
        cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking);
        LAUNCH(emu_k_rank, 4, 64, 0, s, a, b, flags, flags + 4, sum_a);
        LAUNCH(emu_k_rank, 4, 64, 0, t, b, a, flags + 4, flags, sum_b);
        cudaDeviceSynchronize(); // the copies below are not ordered with these streams
        const std::vector<int> x = sum_a.get(), y = sum_b.get();
        for (int i = 0; i < 256; i++) CHECK(x[(size_t)i] == 3000 + 2 * i && y[(size_t)i] == 3000 + 2 * i);
        cudaStreamDestroy(s), cudaStreamDestroy(t);
    }
    gpu_array<uint32_t> count(std::vector<uint32_t>(1));
    gpu_array<int> x(200), out(200);
    LAUNCH(emu_k_grid_barrier, 200, 64, 0, 0, count, x, out);
    const std::vector<int> v = out.get();
    for (int i = 0; i < 200; i++) CHECK(v[(size_t)i] == (i + 1) % 200);
    CHECK(emu_aborts("deadlock", [&] { // more blocks than can be resident
        cudaMemset(count, 0, 4);
        gpu_array<int> many(300), result(300);
        LAUNCH(emu_k_grid_barrier, 300, 32, 0, 0, count, many, result);
        cudaDeviceSynchronize();
    }));
    CHECK(emu_aborts("deadlock", [&] { // one stream: the second rank never starts
        gpu_array<uint32_t> flags(std::vector<uint32_t>(8));
        LAUNCH(emu_k_rank, 4, 50, 0, 0, x, out, flags, flags + 4, x);
        LAUNCH(emu_k_rank, 4, 50, 0, 0, out, x, flags + 4, flags, x);
        cudaDeviceSynchronize();
    }));
}

// y = x + 1. how: 0: reads x after the wait; 1: before it; 2: never waits; 3: as 0, but lets dependents go first.
static __global__ void emu_k_dependent(const int *x, int *y, int how) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int v = 0;
    if (how == 1) v = x[i];
    if (how == 3) grid_dependency_launch();
    if (how != 2) grid_dependency_wait();
    if (how != 1) v = x[i];
    grid_dependency_launch();
    y[i] = v + 1;
}
static void emu_test_pdl() {
    auto chain = [](uint64_t seed, int how) { // three kernels, each depends on the one before
        cuemu::seed(seed);
        gpu_array<int> a(std::vector<int>(256, 0)), b(std::vector<int>(256, -50)), c(std::vector<int>(256, -50));
        LAUNCH(emu_k_add, 4, 64, 0, 0, a, 256, 1);
        LAUNCH_PDL(emu_k_dependent, 4, 64, 0, 0, a, b, how);
        LAUNCH_PDL(emu_k_dependent, 4, 64, 0, 0, b, c, how);
        for (int v : c.get())
            if (v != 3) return false;
        return true;
    };
    int right = 0;
    for (uint64_t seed = 0; seed < 20; seed++) CHECK(chain(seed, 0)), CHECK(chain(seed, 3)), right += chain(seed, 1);
    CHECK(right < 12);
    CHECK(emu_aborts("LAUNCH_PDL", [&] { chain(1, 2); }));
}

// ---- Several devices --------------------------------------------------------------------------------------

static void emu_test_devices() {
    cuemu::devices(2);
    int n = 0, v = 0;
    char id[16];
    void *p0 = nullptr, *p1 = nullptr;
    cudaStream_t s0 = nullptr, s1 = nullptr;
    cudaEvent_t e1 = nullptr;
    CHECK(!cudaGetDeviceCount(&n) && n == 2 && cudaSetDevice(2) == cudaErrorInvalidDevice && !cudaGetDevice(&n) && !n);
    const size_t before = cuemu::allocated();
    cuemu::memory(1000, 1);
    CHECK(!cudaMalloc(&p0, 2000) && !cudaStreamCreate(&s0) && !cudaSetDevice(1) && !cudaStreamCreate(&s1));
    CHECK(cudaMalloc(&p1, 1001) == cudaErrorMemoryAllocation && !cudaMalloc(&p1, 1000) && !cudaEventCreate(&e1));
    size_t free_bytes, total;
    CHECK(!cudaMemGetInfo(&free_bytes, &total) && free_bytes == 0 && total == 1000 && cuemu::allocated() == 1000);
    cudaGetLastError();
    CHECK(!cudaEventRecord(e1, s1) && cudaEventRecord(e1, s0) == cudaErrorInvalidResourceHandle);
    LAUNCH(emu_k_add, 1, 32, 0, s0, (int *)p0, 32, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    CHECK(cudaMemsetAsync(p0, 0, 4, s0) == cudaErrorInvalidResourceHandle &&
          !cudaMemcpyAsync(p0, &v, 4, cudaMemcpyDefault, s0));
    CHECK(cudaMemcpyPeerAsync(p1, 0, p0, 0, 500, s1) == cudaErrorInvalidValue);
    CHECK(!cudaMemset(p1, 7, 1000) && !cudaMemcpyPeerAsync(p0, 0, p1, 1, 500, s1) && !cudaStreamSynchronize(s1));
    CHECK(!cudaMemcpy(&v, p0, 4, cudaMemcpyDefault) && v == 0x07070707);
    CHECK(!cudaFuncSetAttribute(emu_k_index, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
    cudaGetLastError();
    for (int device = 1; device >= 0; device--) { // the attribute is per device
        CHECK(!cudaSetDevice(device));
        LAUNCH(emu_k_index, 1, 32, 60000, 0, (unsigned *)(device ? p1 : p0));
        CHECK((cudaGetLastError() == cudaSuccess) == (device == 1) && !cudaDeviceSynchronize());
    }

    CHECK(!cudaDeviceCanAccessPeer(&v, 0, 1) && v && !cudaDeviceCanAccessPeer(&v, 1, 1) && !v);
    CHECK(!cudaDeviceGetP2PAttribute(&v, cudaDevP2PAttrAccessSupported, 0, 1) && v);
    CHECK(!cudaDeviceEnablePeerAccess(1, 0) && cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
    CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaErrorInvalidDevice);
    CHECK(!cudaDeviceDisablePeerAccess(1) && cudaDeviceDisablePeerAccess(1) == cudaErrorPeerAccessNotEnabled);
    cuemu::peers(false);
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessUnsupported);
    CHECK(!cudaDeviceCanAccessPeer(&v, 0, 1) && !v);
    cuemu::peers(true);
    CHECK(!cudaDeviceGetPCIBusId(id, sizeof id, 1) && !strcmp(id, "0000:02:00.0"));
    CHECK(!cudaDeviceGetAttribute(&v, cudaDevAttrPciBusId, 1) && v == 2);
    CHECK(!cudaDeviceGetAttribute(&v, cudaDevAttrIntegrated, 1) && !v);
    cuemu::capability_of(1, 8, 9);
    CHECK(!cudaDeviceGetAttribute(&v, cudaDevAttrComputeCapabilityMajor, 1) && v == 8);
    CHECK(!cudaDeviceGetAttribute(&v, cudaDevAttrComputeCapabilityMajor, 0) && v == 12);
    cuemu::capability(12, 0);

    void *host, *there;
    CHECK(!cudaHostAlloc(&host, 400, cudaHostAllocPortable | cudaHostAllocMapped) && !cudaFree(p1));
    CHECK(!cudaHostGetDevicePointer(&there, host, 0) && there == host && !cudaStreamDestroy(s0));
    CHECK(cudaHostGetDevicePointer(&p1, p0, 0) == cudaErrorInvalidValue && !cudaFree(p0) && !cudaStreamDestroy(s1));
    memset(host, 0, 400);
    LAUNCH(emu_k_add, 1, 32, 0, 0, (int *)there, 32, 5);
    CHECK(!cudaDeviceSynchronize() && ((int *)host)[31] == 5 && !cudaFreeHost(host) && !cudaEventDestroy(e1));
    CHECK(cuemu::allocated() == before);
    cuemu::memory((size_t)16 << 30);
    cuemu::devices(1);
    cudaGetLastError();
}

// ---- Ranks ------------------------------------------------------------------------------------------------

struct emu_mail {      // known to every rank: the mailboxes of all
    uint4 *slot[4];    // (2, ranks, n): even and odd rounds, by sender
    uint32_t *flag[4]; // (ranks, blocks): the latest round that this block of the sender has stored
};
static __device__ uint4 emu_sum(uint4 a, uint4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

enum { EMU_RIGHT, EMU_NO_BARRIER, EMU_NO_RELEASE, EMU_TIMEOUT };

// All-reduce of x: stores it into a slot of each rank, sets flags, waits for theirs. total (n) depends on the sums of
// all rounds, and x is new in every round. EMU_TIMEOUT: gives up after 3 s and says so in *round.
static __global__ void emu_k_push(emu_mail m, unsigned rank, unsigned ranks, uint32_t *round, uint4 *x, uint4 *total,
                                  int how) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x, t = threadIdx.x;
    const uint32_t now = *round + 1;
    const uint64_t begin = global_timer();
    uint4 sum = x[i];
    for (unsigned p = 0; p < ranks; p++)
        if (p != rank) st_sys16(m.slot[p] + ((now & 1) * ranks + rank) * n + i, sum);
    if (how != EMU_NO_BARRIER) __syncthreads();
    if (t < ranks && t != rank) {
        uint32_t *theirs = m.flag[t] + rank * gridDim.x + blockIdx.x;
        if (how == EMU_NO_RELEASE) *(volatile uint32_t *)theirs = now;
        else st_release_sys(theirs, now);
        while ((int32_t)(ld_acquire_sys(m.flag[rank] + t * gridDim.x + blockIdx.x) - now) < 0)
            if (how == EMU_TIMEOUT && global_timer() - begin > 3000000000) {
                *round = 1000;
                break;
            }
    }
    __syncthreads();
    for (unsigned p = 0; p < ranks; p++)
        if (p != rank) sum = emu_sum(sum, ld_sys16(m.slot[rank] + ((now & 1) * ranks + p) * n + i));
    total[i] = emu_sum(emu_sum(total[i], total[i]), sum);
    x[i] = emu_sum(emu_sum(x[i], x[i]), {1, rank, i, 7});
}
static __global__ void emu_k_next(uint32_t *round) { ++*round; }

constexpr unsigned EMU_BLOCKS = 2, EMU_N = 2 * 64;

struct emu_rank { // memory of one rank, on the device that is current
    gpu_array<uint4> slot, x, total;
    gpu_array<uint32_t> flag, round;
    cudaStream_t stream;
    emu_rank(unsigned rank, unsigned ranks)
        : slot(2 * ranks * EMU_N), x(std::vector<uint4>(EMU_N, uint4{rank, 2, 3, 4})), total(std::vector<uint4>(EMU_N)),
          flag(std::vector<uint32_t>(ranks * EMU_BLOCKS)), round(std::vector<uint32_t>(1)) {
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    }
    ~emu_rank() { cudaStreamDestroy(stream); }
    void post(emu_mail &m, unsigned rank) { m.slot[rank] = slot, m.flag[rank] = flag; }
    void push(const emu_mail &m, unsigned rank, unsigned ranks, int how) {
        LAUNCH(emu_k_push, EMU_BLOCKS, EMU_N / EMU_BLOCKS, 0, stream, m, rank, ranks, round, x, total, how);
        LAUNCH(emu_k_next, 1, 1, 0, stream, round);
    }
    // Returns whether total is what `rounds` rounds make it.
    bool right(unsigned ranks, int rounds) {
        cudaStreamSynchronize(stream);
        const std::vector<uint4> got = total.get();
        for (unsigned i = 0; i < EMU_N; i++) {
            uint4 want = {}, value[4];
            for (unsigned p = 0; p < ranks; p++) value[p] = {p, 2, 3, 4};
            for (int k = 0; k < rounds; k++) {
                want = emu_sum(want, want);
                for (unsigned p = 0; p < ranks; p++)
                    want = emu_sum(want, value[p]), value[p] = emu_sum(emu_sum(value[p], value[p]), {1, p, i, 7});
            }
            if (memcmp(&want, &got[i], sizeof want)) return false;
        }
        return true;
    }
};

// Two ranks in one host thread.
static bool emu_pushes(uint64_t seed, int how) {
    cuemu::seed(seed);
    emu_mail m;
    emu_rank a(0, 2), b(1, 2);
    a.post(m, 0), b.post(m, 1);
    for (int k = 0; k < 5; k++) a.push(m, 0, 2, how), b.push(m, 1, 2, how);
    return a.right(2, 5) && b.right(2, 5);
}
// Two warps store, publish the stores in one of several ways, and set a flag for each warp. *bad: some thread did not
// see what it or its warp had stored.
static __global__ void emu_k_publish(uint4 *slot, volatile uint32_t *flag, int *bad, int how) {
    const unsigned t = threadIdx.x;
    st_sys16(slot + t, {1, 1, 1, 1});
    st_sys16(slot + t, {t, how > 0, 3, 4});
    if (ld_sys16(slot + t).x != t) *bad = 1;
    if (how == 1) __threadfence_system();
    if (how <= 1) __syncwarp();
    if (how == 2) named_barrier(3, 64);
    if (how <= 2 && ld_sys16(slot + (t ^ 1)).x != (t ^ 1)) *bad = 1;
    if (how == 1 && t % 32 == 0) flag[t / 32] = 1;
    if (how != 1 && t == 0) st_release_sys((uint32_t *)flag, 1);
    if (how != 1 && t == 32) st_release_sys((uint32_t *)flag + 1, 1);
    while (!ld_acquire_sys((uint32_t *)flag + 2)) {} // the block stays until everything has been read
}
static __global__ void emu_k_subscribe(uint4 *slot, uint32_t *flag, int *bad) {
    const unsigned t = threadIdx.x;
    while (!ld_acquire_sys(flag + t / 32)) {}
    if (ld_sys16(slot + t).x != t || ld_sys16(slot + t).z != 3) *bad = 2;
    while (ld_sys16(slot + 64).x != 1) {} // polls the data, without a flag
    __syncthreads();
    if (t == 0) st_release_sys(flag + 2, 1);
}
static __global__ void emu_k_word(uint4 *slot, uint32_t *flag) { // its store lands without a release
    st_sys16(slot, {1, 0, 0, 0});
    while (!ld_acquire_sys(flag)) {}
}
// how: 0: __syncwarp, 1: __threadfence_system, 2: named_barrier, 3: nothing.
static bool emu_publishes(uint64_t seed, int how) {
    cuemu::seed(seed);
    gpu_array<uint4> slot(std::vector<uint4>(65));
    gpu_array<uint32_t> flag(std::vector<uint32_t>(3));
    gpu_array<int> bad(std::vector<int>(1));
    cudaStream_t s[3];
    for (cudaStream_t &x : s) cudaStreamCreateWithFlags(&x, cudaStreamNonBlocking);
    LAUNCH(emu_k_publish, 1, 64, 0, s[0], slot, flag, bad, how);
    LAUNCH(emu_k_subscribe, 1, 64, 0, s[1], slot, flag, bad);
    LAUNCH(emu_k_word, 1, 1, 0, s[2], slot + 64, flag + 2);
    cudaDeviceSynchronize();
    for (cudaStream_t x : s) cudaStreamDestroy(x);
    return bad.get()[0] == 0;
}
static void emu_test_stores() {
    int no_barrier = 0, no_release = 0, nothing = 0;
    for (uint64_t s = 0; s < 20; s++) {
        CHECK(emu_pushes(s, EMU_RIGHT) && emu_pushes(s, EMU_TIMEOUT));
        for (int how = 0; how < 3; how++) CHECK(emu_publishes(s, how));
        nothing += !emu_publishes(s, 3);
        no_barrier += !emu_pushes(s, EMU_NO_BARRIER), no_release += !emu_pushes(s, EMU_NO_RELEASE);
    }
    CHECK(no_barrier >= 10 && no_release >= 10 && nothing >= 10);
}

// ---- Host threads -----------------------------------------------------------------------------------------

struct emu_barrier { // barrier of host threads
    pthread_barrier_t b;
    explicit emu_barrier(unsigned n) { pthread_barrier_init(&b, nullptr, n); }
    ~emu_barrier() { pthread_barrier_destroy(&b); }
    void wait() { pthread_barrier_wait(&b); }
};
template <class F>
static void emu_threads(unsigned n, F fn) { // runs fn(i) in n threads
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < n; i++) threads.emplace_back([=] { fn(i); });
    for (std::thread &t : threads) t.join();
}

// Returns whether the pushes of all ranks are right, each rank in a thread of its own. Rank r is on device r %
// devices.
static bool emu_rank_threads(uint64_t seed, unsigned ranks, unsigned devices, int rounds, bool graph) {
    emu_barrier barrier(ranks);
    emu_mail m;
    std::atomic<unsigned> right{0};
    cuemu::devices((int)devices);
    cuemu::seed(seed);
    emu_threads(ranks, [&](unsigned rank) {
        bool ok = !cudaSetDevice((int)(rank % devices));
        for (unsigned p = 0; p < devices; p++)
            if (p != rank % devices) cudaDeviceEnablePeerAccess((int)p, 0);
        cudaGetLastError();
        emu_rank r(rank, ranks);
        cudaGraph_t recorded;
        cudaGraphExec_t exec;
        cudaEvent_t event;
        r.post(m, rank);
        barrier.wait();
        ok &= !cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal);
        r.push(m, rank, ranks, EMU_RIGHT);
        ok &= !cudaStreamEndCapture(r.stream, &recorded) && !cudaGraphInstantiate(&exec, recorded, 0);
        ok &= !cudaEventCreate(&event);
        uint64_t chance = seed * 977 + rank;
        for (int k = 0; k < rounds; k++) {
            if (graph) cudaGraphLaunch(exec, r.stream);
            else r.push(m, rank, ranks, EMU_RIGHT);
            chance = chance * 6364136223846793005u + 1;
            switch (chance >> 60) {
            case 0: ok &= !cudaStreamSynchronize(r.stream); break;
            case 1:
                cudaEventRecord(event, r.stream);
                ok &= !cudaEventSynchronize(event);
                break;
            case 2:
                while (cudaStreamQuery(r.stream) == cudaErrorNotReady) {}
                break;
            }
        }
        ok &= r.right(ranks, rounds);
        barrier.wait(); // no other rank sends to this one any more
        ok &= !cudaEventDestroy(event) && !cudaGraphDestroy(recorded) && !cudaGraphExecDestroy(exec);
        right += ok && !cudaGetLastError();
    });
    cuemu::devices(1);
    return right == ranks;
}

static void emu_test_threads() {
    for (uint64_t s = 0; s < 2; s++)
        for (unsigned ranks : {2u, 4u}) {
            CHECK(emu_rank_threads(s, ranks, 1, 200, s == 0));
            CHECK(emu_rank_threads(s, ranks, ranks, 200, s == 1));
            CHECK(emu_rank_threads(s, ranks, 2, 50, true));
        }

    // Waiting calls of other threads break a capture only in global mode. Errors belong to a thread.
    for (cudaStreamCaptureMode mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
        const bool global = mode == cudaStreamCaptureModeGlobal;
        cudaStream_t s;
        cudaGraph_t graph;
        cudaError_t other = cudaSuccess;
        CHECK(!cudaStreamCreate(&s) && !cudaStreamBeginCapture(s, mode));
        std::thread([&] { other = cudaDeviceSynchronize(); }).join();
        CHECK(other == (global ? cudaErrorStreamCaptureUnsupported : cudaSuccess) && !cudaGetLastError());
        CHECK(cudaStreamEndCapture(s, &graph) == (global ? cudaErrorStreamCaptureInvalidated : cudaSuccess));
        CHECK((!graph || !cudaGraphDestroy(graph)) && !cudaStreamDestroy(s));
        cudaGetLastError();
    }
}

static __device__ __noinline__ int emu_deep(int depth) {
    volatile int fill[64];
    fill[depth & 63] = depth;
    return depth ? emu_deep(depth - 1) + fill[depth & 63] : 0;
}
static __global__ void emu_k_deep(int *out) { *out = emu_deep(100000); }

// Waits for one stream while a kernel of another polls; then for ranks that never come.
static void emu_test_waits() {
    emu_mail m;
    emu_rank a(0, 2), b(1, 2);
    cudaStream_t s;
    cudaEvent_t e;
    int v = 0;
    gpu_array<int> x(std::vector<int>(100));
    a.post(m, 0), b.post(m, 1);
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaEventCreate(&e);
    a.push(m, 0, 2, EMU_RIGHT);
    LAUNCH(emu_k_add, 4, 32, 0, s, x, 100, 3);
    cudaMemcpyAsync(&v, x, 4, cudaMemcpyDeviceToHost, s);
    CHECK(!cudaStreamSynchronize(s) && v == 3 && !cudaEventRecord(e, s) && !cudaEventSynchronize(e));
    for (int i = 0; i < 100; i++) CHECK(cudaStreamQuery(a.stream) == cudaErrorNotReady);
    CHECK(!cudaEventRecord(e, a.stream) && cudaEventQuery(e) == cudaErrorNotReady);
    CHECK(emu_aborts("2 threads wait in kernel emu_k_push: ld_acquire_sys", [&] { cudaStreamSynchronize(a.stream); }));
    CHECK(emu_aborts("deadlock", [&] { cudaDeviceSynchronize(); }));
    b.push(m, 1, 2, EMU_RIGHT);
    while (cudaEventQuery(e) == cudaErrorNotReady) {}
    CHECK(a.right(2, 1) && b.right(2, 1) && cudaStreamQuery(a.stream) == cudaSuccess);

    cuemu::deadlock_seconds = .1;
    CHECK(emu_aborts("deadlock", [&] { // the other host thread does nothing
        a.push(m, 0, 2, EMU_RIGHT);
        std::thread([&] { cudaStreamSynchronize(a.stream); }).join();
    }));
    CHECK(emu_aborts("stack overflow", [&] {
        std::thread([&] {
            LAUNCH(emu_k_deep, 1, 1, 0, 0, x);
            cudaDeviceSynchronize();
        }).join();
    }));
    for (bool alone : {true, false}) { // the kernel gives up after 3 s, which pass at once
        a.push(m, 0, 2, EMU_TIMEOUT);
        if (alone) cudaStreamSynchronize(a.stream);
        else std::thread([&] { cudaStreamSynchronize(a.stream); }).join();
        CHECK(a.round.get()[0] == 1001);
    }
    cuemu::deadlock_seconds = 1e9;
    std::atomic<bool> ended{false};
    a.push(m, 0, 2, EMU_TIMEOUT);
    std::thread waiting([&] {
        cudaStreamSynchronize(a.stream);
        ended = true;
    });
    while (!ended) { // the first jump may come before the kernel has read when it began
        cuemu::timer_jump(4000000000);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    waiting.join();
    CHECK(a.round.get()[0] == 1001);
    cuemu::deadlock_seconds = 20;

    cuemu::devices(2);
    CHECK(emu_aborts("has no access to memory of device 1", [&] {
        cudaSetDevice(1);
        emu_rank far(1, 2);
        far.post(m, 1);
        cudaSetDevice(0);
        a.push(m, 0, 2, EMU_RIGHT);
        cudaDeviceSynchronize();
    }));
    cuemu::devices(1);
    CHECK(!cudaStreamDestroy(s) && !cudaEventDestroy(e));
}

// ---- NCCL -------------------------------------------------------------------------------------------------

// Four ranks in host threads: all-reduce in rounds, by launches or by a graph, then an all-gather in place and a
// broadcast.
static bool emu_collectives(uint64_t seed, bool graph) {
    const unsigned ranks = 4, n = 60;
    ncclUniqueId id;
    std::atomic<unsigned> right{0};
    cuemu::devices((int)ranks);
    cuemu::seed(seed);
    if (ncclGetUniqueId(&id)) return false;
    emu_threads(ranks, [&](unsigned rank) {
        bool ok = !cudaSetDevice((int)rank);
        ncclComm_t comm;
        cudaStream_t s;
        cudaGraph_t recorded;
        cudaGraphExec_t exec;
        ok &= !ncclCommInitRank(&comm, (int)ranks, id, (int)rank) && !cudaStreamCreate(&s);
        gpu_array<int> x(std::vector<int>(n, (int)rank + 1));
        gpu_array<uint8_t> all(std::vector<uint8_t>(ranks * 3, (uint8_t)(10 + rank)));
        auto round = [&] { // sums of bytes: no carry into the next one
            LAUNCH(emu_k_add, 2, 32, 0, s, x, (int)n, 1);
            ok &= !ncclAllReduce(x, x, 4 * n, ncclUint8, ncclSum, comm, s);
        };
        ok &= !cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), round();
        ok &= !cudaStreamEndCapture(s, &recorded) && !cudaGraphInstantiate(&exec, recorded, 0);
        uint32_t want[4] = {1, 2, 3, 4};
        for (int k = 0; k < 10; k++) {
            if (graph) ok &= !cudaGraphLaunch(exec, s);
            else round();
            uint32_t bytes[4] = {};
            for (uint32_t w : want)
                for (unsigned b = 0; b < 4; b++) bytes[b] += (w + 1) >> 8 * b & 255;
            for (uint32_t &w : want)
                w = (bytes[0] & 255) | (bytes[1] & 255) << 8 | (bytes[2] & 255) << 16 | (bytes[3] & 255) << 24;
            if (k % 4 == (int)rank) ok &= !cudaStreamSynchronize(s);
        }
        ok &= !ncclAllGather(all + 3 * rank, all, 3, ncclInt8, comm, s) && !cudaStreamSynchronize(s);
        for (int v : x.get()) ok &= (uint32_t)v == want[rank];
        std::vector<uint8_t> got = all.get();
        for (unsigned i = 0; i < ranks * 3; i++) ok &= got[i] == 10 + i / 3;
        ok &= !cudaMemset(all, (int)rank, 12) && !cudaDeviceSynchronize();
        ok &= !ncclBroadcast(rank == 2 ? all.p : nullptr, all, 12, ncclUint8, 2, comm, s);
        ok &= !cudaStreamSynchronize(s) && all.get()[11] == 2;
        ok &= !cudaGraphDestroy(recorded) && !cudaGraphExecDestroy(exec) && !ncclCommDestroy(comm);
        right += ok && !cudaStreamDestroy(s);
    });
    cuemu::devices(1);
    return right == ranks;
}

static void emu_test_nccl() {
    for (uint64_t s = 0; s < 4; s++) CHECK(emu_collectives(s, s % 2));

    // Three ranks in one host thread.
    cuemu::devices(3);
    ncclComm_t comm[3], other;
    int devices[3] = {0, 1, 1}, version;
    CHECK(ncclCommInitAll(comm, 3, devices) == ncclInvalidUsage && !comm[1]);
    CHECK(strstr(ncclGetLastError(nullptr), "Duplicate GPU detected : rank 1 and rank 2"));
    cuemu::nccl_same_device(true);
    CHECK(!ncclCommInitAll(comm, 3, devices) && !ncclCommDestroy(comm[0]) && !ncclCommDestroy(comm[1]));
    CHECK(!ncclCommDestroy(comm[2]) && !ncclGetVersion(&version) && version / 10000 == 2);
    cuemu::nccl_same_device(false);
    CHECK(!ncclCommInitAll(comm, 3, nullptr) && !cudaGetDevice(devices) && devices[0] == 0);
    // The sums are not made in the order of ranks: 1e8 swallows what is added before it is subtracted. BF16 rounds 257
    // to 256.
    const float value[3] = {1e8f, 1, -1e8f};
    std::unique_ptr<gpu_array<float>> f[3];
    std::unique_ptr<gpu_array<uint16_t>> h[3];
    cudaStream_t s[3];
    for (int r = 0; r < 3; r++) {
        cudaSetDevice(r), cudaStreamCreate(&s[r]);
        f[r].reset(new gpu_array<float>(std::vector<float>(30, value[r])));
        h[r].reset(new gpu_array<uint16_t>(std::vector<uint16_t>(30, r == 0 ? 0x4380 : 0x3f80))); // 256, 1, 1
    }
    auto sum = [&](int r, size_t n, ncclDataType_t type) {
        return ncclAllReduce(*f[r], *f[r], n, type, ncclSum, comm[r], s[r]);
    };
    CHECK(!ncclGroupStart());
    for (int r = 0; r < 3; r++) CHECK(!sum(r, 30, ncclFloat32));
    CHECK(cudaStreamQuery(s[0]) == cudaSuccess && !ncclGroupEnd()); // nothing was queued before ncclGroupEnd
    for (int r = 0; r < 3; r++) CHECK(!ncclAllReduce(*h[r], *h[r], 30, ncclBfloat16, ncclSum, comm[r], s[r]));
    for (int r = 0; r < 3; r++) {
        cudaSetDevice(r), cudaDeviceSynchronize();
        const std::vector<float> got = f[r]->get();
        const std::vector<uint16_t> half = h[r]->get();
        CHECK(got == f[0]->get() && half == h[0]->get());
        CHECK(std::count(got.begin(), got.end(), 0.0f) == 20 && std::count(got.begin(), got.end(), 1.0f) == 10);
        CHECK(std::count(half.begin(), half.end(), 0x4380) == 20 && std::count(half.begin(), half.end(), 0x4381) == 10);
    }

    CHECK(sum(0, 31, ncclFloat32) == ncclInvalidArgument && sum(0, 30, (ncclDataType_t)8) == ncclInvalidArgument);
    CHECK(ncclAllReduce(*f[0], *f[0], 4, ncclFloat32, ncclSum, comm[0], s[1]) == ncclInvalidUsage);
    CHECK(ncclAllReduce(*f[1], *f[0], 4, ncclFloat32, ncclSum, comm[0], s[0]) == ncclInvalidArgument);
    cuemu::fail_next("ncclAllReduce", 1);
    CHECK(sum(0, 30, ncclFloat32) == ncclSystemError &&
          !strcmp(ncclGetErrorString(ncclSystemError), "unhandled system error"));
    ncclResult_t async;
    cuemu::fail_next("ncclCommGetAsyncError", 1);
    CHECK(!ncclCommGetAsyncError(comm[0], &async) && async && !ncclCommGetAsyncError(comm[0], &async) && !async);
    CHECK(emu_aborts("mismatch: rank 0 calls ncclAllReduce with count 30", [&] {
        sum(0, 30, ncclFloat32), sum(1, 29, ncclFloat32), sum(2, 30, ncclFloat32);
        cudaStreamSynchronize(s[0]);
    }));
    CHECK(emu_aborts("rank 2 of 3 waits in ncclAllReduce", [&] {
        sum(0, 30, ncclFloat32), sum(2, 30, ncclFloat32);
        cudaStreamSynchronize(s[0]);
    }));
    ncclUniqueId id;
    CHECK(!ncclGetUniqueId(&id) &&
          emu_aborts("1 of 2 ranks have not called ncclCommInitRank", [&] { ncclCommInitRank(&other, 2, id, 0); }));
    ncclResult_t got[2];
    cuemu::fail_next("ncclCommInitRank", 1); // fails in the rank that comes first, and so in the other
    emu_threads(2, [&](unsigned rank) {
        ncclComm_t c;
        got[rank] = ncclCommInitRank(&c, 2, id, (int)rank);
    });
    CHECK(got[0] + got[1] == ncclSystemError + ncclRemoteError && got[0] != got[1]);

    CHECK(!sum(1, 30, ncclFloat32) && cudaStreamQuery(s[1]) == cudaErrorNotReady);
    CHECK(!ncclCommAbort(comm[1]) && !cudaStreamSynchronize(s[1]));
    CHECK(!ncclCommDestroy(comm[0]) && !ncclCommDestroy(comm[2]));
    for (int r = 0; r < 3; r++) CHECK(!cudaStreamDestroy(s[r]));
    cudaSetDevice(0);
    cuemu::devices(1);
}
