/* Times the tiled GEMM of moe_cuda.cu (prefill), one tile size after the other, with random weights and tokens of real
 * shapes, and prints a table in Markdown. All tile sizes must give the same results: on the simulator this file is part
 * of test_cuda.cu, and the test cuda/tiles compares them with tiny shapes. */
#ifndef SIMULATED
#include "../moe_cuda.cu"
#endif

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

static const struct shape {
    const char *name;
    enum weight_format fmt;
    int glu, n_expert, n_used, n_out, n_in; /* n_expert 1: dense, not grouped */
    std::vector<int> n_tok;
} shapes[] = {
#ifdef SIMULATED
    {"gate+up", FMT_FP4, 1, 3, 2, 40, 424, {70}},
    {"down", FMT_FP4, 0, 3, 2, 72, 328, {70}},
    {"dense", FMT_F16, 0, 1, 1, 136, 200, {70}},
};
enum { RUNS = 1, FLUSH = 4096, SMALL = true };
#else
    {"qwen3-30b-a3b gate+up", FMT_FP4, 1, 128, 8, 768, 2048, {512, 4096}},
    {"qwen3-30b-a3b down", FMT_FP4, 0, 128, 8, 2048, 768, {512, 4096}},
    {"qwen3-30b-a3b attn_q", FMT_F16, 0, 1, 1, 4096, 2048, {512, 4096}},
    {"deepseek-v3 0/4 gate+up", FMT_FP4, 1, 256, 8, 512, 7168, {512, 4096}},
    {"deepseek-v3 0/4 down", FMT_FP4, 0, 256, 8, 7168, 512, {512, 4096}},
};
enum { RUNS = 7, FLUSH = 256 << 20 /* bytes, more than L2 holds */, SMALL = false };
#endif

/* WM, WN, DEPTH, KT (2: K = 128) of gemm_kernel; those of gemm_prefill are among them. */
template <int... N>
using size = std::integer_sequence<int, N...>;
typedef std::tuple<size<8, 2, 5, 1>, size<8, 1, 4, 1>, size<8, 1, 3, 1>, size<8, 1, 2, 1>, size<8, 1, 2, 2>,
                   size<4, 2, 5, 1>, size<4, 2, 4, 1>, size<4, 2, 3, 1>, size<4, 2, 2, 2>, size<4, 1, 5, 1>,
                   size<4, 1, 3, 1>, size<4, 1, 2, 1>, size<4, 1, 2, 2>, size<4, 1, 3, 2>>
    all_sizes;

static void must(cudaError_t e) {
    if (e != cudaSuccess) fprintf(stderr, "bench_tiles: %s\n", cudaGetErrorString(e)), exit(1);
}

/* The shape being timed. Prints its rows of the table. */
struct bench {
    cudaStream_t stream;
    cudaEvent_t event[2];
    double mma; /* rate of m16n8k16, TFLOP/s */
    bool bad;
    std::vector<void *> owned; /* device memory of the shape */
    const struct shape *s;
    struct gemm_args g;
    uint8_t *flush;
    std::vector<float> want; /* last results of the first tile size; empty: not run yet */

    template <class T>
    T *alloc(size_t n) {
        void *p = NULL;
        must(cudaMalloc(&p, n * sizeof(T)));
        return owned.push_back(p), (T *)p;
    }
    int32_t *copy(const std::vector<int32_t> &v) {
        int32_t *p = alloc<int32_t>(v.size());
        return must(cudaMemcpy(p, v.data(), v.size() * sizeof *p, cudaMemcpyHostToDevice)), p;
    }
    /* Makes random weights of moderate size. Expert e has the rows from e on of one list. */
    struct device_matrix matrix(enum weight_format fmt, int n_expert, int n_out, int n_in, uint64_t rng) {
        static const enum gguf_type types[] = {GGUF_NVFP4, GGUF_Q8_0, GGUF_BF16};
        const int n_rt = (n_out + TILE_ROWS - 1) / TILE_ROWS, n_kt = (n_in + TILE_COLS - 1) / TILE_COLS;
        const size_t n = (size_t)n_rt * (size_t)n_kt, row = gguf_row_bytes(types[fmt], (size_t)n_kt * TILE_COLS);
        std::vector<uint8_t> list((size_t)(n_out + n_expert) * row);
        for (size_t i = 0; i < list.size(); i++) {
            rng = rng * 6364136223846793005u + 1442695040888963407u;
            const uint8_t x = (uint8_t)(rng >> 33);
            if (fmt == FMT_FP4) list[i] = i % 36 < 4 ? 0x30 | (x & 15) : x;
            else if (fmt == FMT_Q8) list[i] = i % 34 < 2 ? 0x0A : x;
            else list[i] = i & 1 ? 0x3C | (x & 0x80) : x;
        }
        uint8_t *raw = alloc<uint8_t>(list.size()), *codes = alloc<uint8_t>(n * (size_t)n_expert * TILE_BYTES(fmt));
        uint8_t *scales = alloc<uint8_t>(n * (size_t)n_expert * TILE_SCALES);
        uint32_t *range = alloc<uint32_t>(2);
        must(cudaMemcpy(raw, list.data(), list.size(), cudaMemcpyHostToDevice));
        const float unit = fmt == FMT_FP4 ? 0.2f : 0x1p-10f; /* keeps sums moderate */
        struct device_matrix w = {codes, scales, NULL, 1,        NULL, unit,     n_out,
                                  n_in,  n_rt,   n_kt, n_expert, fmt,  n_expert, 0};
        for (int e = 0; e < n_expert; e++) {
            struct repack k = {row, types[fmt], e, 1, 0, n_rt, 8, 256, unit};
            LAUNCH_PDL(k_repack, dim3((unsigned)((n + 7) / 8)), 256, 0, stream, k, raw + (size_t)e * row, w, range);
        }
        return w;
    }
    /* Sets up a shape. Every token chooses each expert with the same probability, n_used on average. */
    void prepare(const struct shape *shape, int n_tok) {
        std::vector<int32_t> row, expert, first, count;
        uint64_t rng = 1;
        for (void *p : owned) cudaFree(p);
        s = shape, g = {}, owned.clear(), flush = alloc<uint8_t>(FLUSH);
        for (int x = 0; x < s->n_expert; x++) {
            int i = (int)row.size();
            for (int t = 0; t < n_tok; t++) {
                rng = rng * 6364136223846793005u + 1442695040888963407u;
                if ((int)(rng >> 33) % s->n_expert < s->n_used) row.push_back(t);
            }
            for (; i < (int)row.size(); i += TN)
                expert.push_back(x), first.push_back(i), count.push_back(min((int)row.size() - i, (int)TN));
        }
        const int n = (int)row.size(), n_x = s->glu ? n_tok : n;
        g.w = matrix(s->fmt, s->n_expert, s->n_out, s->n_in, 1), g.w2 = g.w;
        if (s->glu) g.w2 = matrix(s->fmt, s->n_expert, s->n_out, s->n_in, 2), g.rows = copy(row);
        g.x = (const uint16_t *)matrix(FMT_F16, 1, n_x, s->n_in, 3).codes; /* random halves, in any order */
        g.x_stride = (size_t)g.w.n_kt * TILE_COLS, g.n_tok = n, g.max_tiles = (int)expert.size();
        g.n_tiles = copy({g.max_tiles}), g.tile_first = copy(first), g.tile_count = copy(count);
        if (s->n_expert > 1) g.tile_expert = copy(expert);
        g.y_f32 = s->n_expert == 1, g.y_stride = (size_t)s->n_out, g.y = alloc<float>(row.size() * g.y_stride);
        g.xq.codes = alloc<uint8_t>((size_t)n_x * (size_t)g.w.n_kt * 32), g.xq.scale = alloc<float>((size_t)n_x);
        g.xq.scales = alloc<uint8_t>((size_t)n_x * FP4_SCALE_BYTES((size_t)s->n_in));
        quantize_fp4(g.x, g.x_stride, n_x, s->n_in, g.xq, stream);
    }
    template <class Launch>
    float milliseconds(Launch launch) {
        float ms;
        must(cudaEventRecord(event[0], stream)), launch(), must(cudaGetLastError());
        must(cudaEventRecord(event[1], stream)), must(cudaEventSynchronize(event[1]));
        return must(cudaEventElapsedTime(&ms, event[0], event[1])), ms;
    }
    template <int F, int GLU, int WM, int WN, int DEPTH, int KT>
    void row(size<WM, WN, DEPTH, KT>) {
        constexpr int A4 = F == FMT_A4, N = 64 * WN, CODE = TILE_BYTES(A4 ? (int)FMT_FP4 : F);
        constexpr int SCALE = F == FMT_F16 ? 0 : (int)TILE_SCALES, X = A4 ? 32 : 128 /* bytes of a token */;
        constexpr int RING = DEPTH * KT * (2 * WM * (CODE + SCALE) + N * X), TILE = RING + A4 * 2 * N * 16;
        constexpr int BYTES = TILE + A4 * N * 4;
        /* Skip what exceeds SM120's limit or has no room for the result tile, and with FP4 tokens more k-tiles in flight
         * than two buffers of scales hold. */
        if constexpr (BYTES <= 101376 && TILE >= N * (16 * WM + 4) * 4 && (!A4 || (DEPTH - 1) * KT <= 4)) {
            const size_t n = (size_t)g.n_tok * g.y_stride, n_check = std::min(n, (size_t)1 << 20);
            const size_t size = g.y_f32 ? 4 : 2;
            std::vector<float> ms, got(n_check), raw(n_check);
            must(cudaMemsetAsync(g.y, 0xFF, n * size, stream)); /* NaNs */
            for (int i = 0; i <= RUNS; i++) {
                must(cudaMemsetAsync(flush, 0, FLUSH, stream));
                ms.push_back(milliseconds([&] { gemm_launch<F, GLU, WM, WN, DEPTH, KT>(&g, stream); }));
            }
            std::sort(ms.begin() + 1, ms.end()); /* the first run is not counted */
            const float t = ms[1 + RUNS / 2];
            uint8_t *y = (uint8_t *)g.y + (n - n_check) * size;
            must(cudaMemcpy(raw.data(), y, n_check * size, cudaMemcpyDeviceToHost));
            for (size_t i = 0; i < n_check; i++) got[i] = g.y_f32 ? raw[i] : f16_to_f32(((uint16_t *)raw.data())[i]);
            if (want.empty()) want = got;
            double num = 0, den = 0, rate = 2e-9 * g.n_tok * s->n_out * s->n_in * (GLU + 1) / t;
            for (size_t i = 0; i < n_check; i++) num += pow(got[i] - want[i], 2), den += pow(want[i], 2);
            const bool same = sqrt(num / den) <= 1e-3; /* false if all results are 0 */
            if (SMALL && same) return;
            printf("| %s | %d | %s | %d x %d | %d | %d | %d | %.1f | %.1f | %.1f |%s\n", s->name, g.n_tok,
                   A4 ? "FP4" : "F16", 32 * WM, N, DEPTH, 64 * KT, BYTES, t * 1e3, rate, 100 * rate / mma,
                   same ? "" : " OTHER RESULTS");
            bad |= !same;
        }
    }
    template <int F, int GLU, class... S>
    void rows(std::tuple<S...>) {
        want.clear(), (row<F, GLU>(S{}), ...);
    }
};

static bool bench_tiles() {
    struct bench b = {};
    char text[ERR_MAX];
    struct gpu_facts f;
    int turns = 1;
    float ms;
    if (!cuda_device_count(text)) return fprintf(stderr, "bench_tiles: %s\n", text), false;
    if (const char *why = cuda_facts(0, &f, false)) return fprintf(stderr, "bench_tiles: %s\n", why), false;
    must(cudaStreamCreate(&b.stream));
    for (cudaEvent_t &e : b.event) must(cudaEventCreate(&e));
    auto probe = [&] { LAUNCH_PDL(k_mma_rate, 2 * (unsigned)f.n_sm, 512, 0, b.stream, turns, (float *)NULL); };
    while ((ms = b.milliseconds(probe)) < 4) turns *= 2;
    b.mma = 2e-9 * 16 * 8 * 16 * 8 * turns * 16 * 2 * f.n_sm / ms;
    const char *built = cuda_targets();
    const bool a4 = f.major == 12 && (strstr(built, "sm_120f"));
    if (!SMALL)
        printf("%s, m16n8k16 at %.1f TFLOP/s\n\n| GEMM | rows | tokens in | block | depth | K | shared bytes |"
               " us | TFLOP/s | %% of m16n8k16 |\n|---|---|---|---|---|---|---|---|---|---|\n",
               f.name, b.mma);
    for (const struct shape &s : shapes)
        for (int n_tok : s.n_tok) {
            b.prepare(&s, n_tok);
            if (s.fmt == FMT_F16) b.rows<FMT_F16, 0>(all_sizes{});
            else s.glu ? b.rows<FMT_FP4, 1>(all_sizes{}) : b.rows<FMT_FP4, 0>(all_sizes{});
            if (!a4 || s.fmt == FMT_F16) continue;
            s.glu ? b.rows<FMT_A4, 1>(all_sizes{}) : b.rows<FMT_A4, 0>(all_sizes{});
        }
    for (void *p : b.owned) cudaFree(p);
    for (cudaEvent_t &e : b.event) cudaEventDestroy(e);
    cudaStreamDestroy(b.stream);
    return !b.bad;
}

#ifdef SIMULATED
extern "C" void cuda_test_tile_sizes(void) {
    begin_test(0);
    expect(bench_tiles(), "a tile size gives other results");
}
#else
int main() {
    setvbuf(stdout, NULL, _IOLBF, 0); /* what was measured is printed if it takes too long */
    return !bench_tiles();
}
#endif
