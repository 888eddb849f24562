/* The kernels of moe_cuda.cu one by one, with the shapes and edges that the fixtures' operations (t_cuda.h) do not
 * have, against plain sums in double precision. Included by test_cuda.cu after moe_cuda.cu; compiles for the simulator
 * and for a device. The tests are extern "C" functions without arguments, called from t_cuda.h. */
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <vector>

#include <unistd.h>

extern "C" void cuda_test_check(bool ok, const char *what); /* t_cuda.h: CHECK */

/* ---- checks, random numbers, device memory ---- */

static bool mutant; /* a barrier is left out in this process: the first failure is the answer */

/* CHECK for this side of the tests. Evaluates to the condition. */
__attribute__((format(printf, 2, 3))) static bool expect(bool ok, const char *fmt, ...) {
    char line[512];
    va_list ap;
    if (ok) return true;
    if (mutant) _exit(1);
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    cuda_test_check(false, line);
    return false;
}

static void must(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return;
    if (mutant) _exit(1);
    rank_fatal(what);
}

static uint64_t random_state;
static uint32_t rnd() {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}
static float uniform() { return (float)(rnd() & 0xFFFFFF) / 8388608.0f - 1; } /* -1..1 */
static double normal() {
    double a = (rnd() + 1.0) / 4294967297.0, b = rnd() / 4294967296.0;
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}
static std::vector<float> random_floats(int count, double size) {
    std::vector<float> v;
    for (int i = 0; i < count; i++) v.push_back((float)(normal() * size));
    return v;
}

static cudaStream_t test_stream; /* of all tests */
static uint64_t seed_offset;     /* not 0: tests run in a random order of warps and blocks */

extern "C" void cuda_test_seed(uint64_t seed) { seed_offset = seed; }

#ifdef SIMULATED
static bool sums_cut; /* tensor cores cut sums off */
extern "C" void cuda_test_truncate(int products) {
    sim_truncate_sums(products);
    sums_cut = products > 0;
}
#else
static const bool sums_cut = true;
#endif
extern "C" bool cuda_test_sums_cut(void) { return sums_cut; }

/* Begins a test: its numbers, and on the simulator its schedules, are the same every time. */
static void begin_test(uint64_t seed) {
    random_state = seed * 0x9E3779B97F4A7C15u | 1;
    if (!test_stream) must(cudaStreamCreate(&test_stream), "a stream for the tests");
    launches_overlap = true;
#ifdef SIMULATED
    sim_seed(seed_offset ? seed + seed_offset : 0);
#endif
}

/* For the tests in C. True: the device multiplies FP4 by FP4. */
extern "C" bool cuda_test_begin(int seed) {
    int major = 0;
    begin_test((uint64_t)seed);
    must(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "the chip");
    return major == 12;
}

/* words of `to` = those of `from` (arrive.cu). Whoever runs after this and does not wait for it finds what was there
 * before. Grid: 4, block: 256. */
__global__ void k_arrive(uint32_t *to, const uint32_t *from, size_t words);

/* n values on the device, freed with the object. */
template <class T>
struct gpu_array {
    T *p = nullptr, *later = nullptr;
    size_t n;
    explicit gpu_array(size_t count) : n(count) { must(cudaMalloc((void **)&p, bytes() + !n), "memory for a test"); }
    explicit gpu_array(const std::vector<T> &v) : gpu_array(v.size()) {
        must(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice), "copying to the device");
    }
    gpu_array(const gpu_array &) = delete;
    ~gpu_array() {
        cudaFree(p);
        if (later) cudaFree(later);
    }
    operator T *() const { return p; }
    size_t bytes() const { return (n * sizeof(T) + 3) / 4 * 4; } /* whole words */
    std::vector<T> get() const {
        std::vector<T> v(n);
        must(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost), "copying from the device");
        return v;
    }
    /* Has the values written anew by a kernel in front of the one under test; until then they are all ones. */
    void arrive() {
        if (!later) must(cudaMalloc((void **)&later, bytes()), "memory for a test");
        must(cudaMemcpyAsync(later, p, bytes(), cudaMemcpyDeviceToDevice, test_stream), "copying on the device");
        must(cudaMemsetAsync(p, 0xFF, bytes(), test_stream), "clearing on the device");
        LAUNCH_PDL(k_arrive, 4, 256, 0, test_stream, (uint32_t *)p, (const uint32_t *)later, bytes() / 4);
    }
};

/* A batch of one run. */
struct gpu_batch : gpu_array<struct batch> {
    gpu_batch(int pos, int n_tok, int n_committed, int timeline = 0)
        : gpu_array(std::vector<struct batch>{{n_tok, 1, {{timeline, 0, n_tok, pos, n_committed, 0}}, {}}}) {}
    operator batch_ref() const { return {p, false}; }
};

/* Waits for the kernels of a case. */
static void finish(const char *what) {
    must(cudaGetLastError(), what);
    must(cudaStreamSynchronize(test_stream), what);
}

/* Errors of results, squared and summed. */
struct error_sum {
    double num = 0, den = 0;
    void add(double got, double want) {
        num += (got - want) * (got - want), den += want * want;
        if (!(fabs(got) < 1e30)) num = INFINITY; /* a NaN, too */
    }
    double nmse() const { return num / (den + 1e-300); }
};

/* ---- matrices ---- */

/* Weights that random_row makes at a time. */
static int type_block(enum gguf_type type) { return std::max(8, (int)gguf_type_info(type).block); }

static const struct {
    enum gguf_type type;
    const char *name;
} matrix_types[] = {{GGUF_NVFP4, "NVFP4"}, {GGUF_MXFP4, "MXFP4"}, {GGUF_Q8_0, "Q8_0"}, {GGUF_BF16, "BF16"},
                    {GGUF_F16, "F16"},     {GGUF_F32, "F32"},     {GGUF_FP8, "FP8"}};
static_assert(sizeof matrix_types / sizeof *matrix_types == GGUF_FORMAT_COUNT, "the tests multiply every format");

/* One for each format that a GPU has. */
static const enum gguf_type format_types[] = {GGUF_NVFP4, GGUF_Q8_0, GGUF_BF16, GGUF_FP8};
static_assert(sizeof format_types / sizeof *format_types == FMT_COUNT, "the tests multiply every format of a GPU");

static enum weight_format type_format(enum gguf_type type) {
    struct weight w = {};
    w.type = type;
    return weight_format(&w);
}

/* n weights of a row, as in a file. The exponents of MXFP4 are 108 + octaves and up to `span` - 1 more; `size`: of the largest of the plain
 * formats. */
static void random_row(uint8_t *row, enum gguf_type type, int n, int octaves, float size, int span) {
    for (int i = 0; i < n; i += type_block(type)) {
        switch (type) {
        case GGUF_NVFP4:
            for (int k = 0; k < 36; k++)
                *row++ = (uint8_t)(k >= 4 ? rnd() : rnd() % 16 ? 0x28 + rnd() % 32 : rnd() % 0x80);
            break;
        case GGUF_MXFP4: {
            bool zero = rnd() % 16 == 0; /* whose exponent means nothing */
            *row++ = (uint8_t)(zero ? rnd() % 250 : 108 + octaves + (int)(rnd() % (uint32_t)span));
            for (int k = 0; k < 16; k++) *row++ = zero ? 0x80 : (uint8_t)rnd();
            break;
        }
        case GGUF_Q8_0: {
            uint16_t d = f16_from_f32(0.01f * (1.1f + uniform()));
            memcpy(row, &d, 2), row += 2;
            for (int k = 0; k < 32; k++) *row++ = (uint8_t)rnd();
            break;
        }
        case GGUF_FP8: {
            const float d = size / 448 * (1.1f + uniform());
            memcpy(row, &d, 4), row += 4;
            for (int k = 0; k < FP8_BLOCK; k++, row++) {
                *row = (uint8_t)rnd();
                *row = (uint8_t)(*row - ((*row & 0x7f) == 0x7f)); /* no NaN */
            }
            break;
        }
        case GGUF_FLOATS:
            for (int k = 0; k < 8; k++) {
                float x = uniform() * size * (rnd() % 8 ? 1 : 1e-3f);
                uint16_t h = type == GGUF_F16 ? f16_from_f32(x) : bf16_from_f32(x);
                if (type == GGUF_F32) memcpy(row, &x, 4), row += 4;
                else memcpy(row, &h, 2), row += 2;
            }
        }
    }
}

/* n BF16 weights of a row that are E4M3 codes times a power of two, one for TILE_COLS columns; their size. The mantissa
 * of the largest is 1.75 or, where codes of 2^8 have no such, 1.875. */
static void random_codes(uint16_t *row, int n, float size) {
    uint32_t codes = 0;
    float unit = 0;
    for (int i = 0; i < n; i++) {
        if (i % TILE_COLS == 0) {
            codes = rnd() % 2 ? 0x7F : 0x78;
            unit = rnd() % 16 ? ldexpf(1, ilogbf(size) - 8 - (int)(rnd() % 4)) : 0;
        }
        row[i] = bf16_from_f32(e4m3_to_f32((uint8_t)(rnd() % codes | rnd() % 2 << 7)) * unit);
    }
}

/* What matrix_upload works with. */
static struct rank *uploader() {
    static struct cuda c;
    static char err[ERR_MAX];
    static struct rank alone;
    static struct model none;
    alone.cuda = &c, alone.m = &none, c.err = err, c.failed = false, err[0] = 0;
    c.stream = test_stream;
    if (!c.range) c.range = (uint32_t *)cuda_memory(&alone, sizeof c.range_host, "scratch");
    return &alone;
}

/* n_expert random matrices: as in a file, on the device by the program's own upload, and the values that it has there.
 * FP8 whose rows are not whole blocks is BF16 that a GPU keeps as E4M3. Freed in the reverse order of construction. */
struct matrix {
    std::vector<uint8_t> raw;
    std::vector<float> scale, bias;
    std::vector<double> v; /* (n_expert, n_out, n_in), factors and all */
    struct weight w = {};
    struct device_matrix d = {};
    struct rank *r = uploader();
    struct cuda *c = r->cuda;
    size_t mark = arrlenu(r->owned);

    matrix(enum gguf_type type, int n_expert, int n_out, int n_in, bool with_bias = false, int octaves = 0,
           float size = 1, int span = 16)
        : scale((size_t)n_expert) {
        if (type == GGUF_FP8 && n_in % FP8_BLOCK) type = GGUF_BF16, w.exact_fp8 = true;
        n_in = (n_in + type_block(type) - 1) / type_block(type) * type_block(type);
        w.type = type, w.n_in = n_in, w.n_out = n_out, w.n_expert = n_expert;
        w.row_bytes = gguf_row_bytes(type, (size_t)n_in), w.expert_bytes = w.row_bytes * (size_t)n_out;
        raw.resize(w.expert_bytes * (size_t)n_expert);
        for (int i = 0; i < n_expert * n_out; i++) {
            uint8_t *row = &raw[(size_t)i * w.row_bytes];
            if (w.exact_fp8) random_codes((uint16_t *)row, n_in, size);
            else random_row(row, type, n_in, octaves, size, span);
        }
        for (float &f : scale) f = (type == GGUF_NVFP4 || type == GGUF_Q8_0 ? 0.01f : 1.0f) * (1.5f + uniform());
        w.bias_stride = n_out + 5; /* as in a shard: rows of biases lie farther apart than they are long */
        for (int i = 0; with_bias && i < n_expert * w.bias_stride; i++) bias.push_back(uniform());
        w.data = raw.data(), w.scale = scale.data(), w.bias = with_bias ? bias.data() : NULL;
        matrix_upload(r, NULL, &w, "a test's matrix");
        must(cudaStreamSynchronize(test_stream), "uploading");
        d = *w.copy;
        std::vector<float> row((size_t)n_in);
        for (int i = 0; i < n_expert * n_out; i++) {
            gguf_dequantize_row(type, &raw[(size_t)i * w.row_bytes], row.data(), (size_t)n_in);
            for (float x : row) {
                if (d.fmt == FMT_F16 || d.fmt == FMT_F8)
                    x = f16_to_f32(f16_from_f32(x / d.decode_scale)) * d.decode_scale;
                v.push_back((double)x * (double)scale[(size_t)(i / n_out)]);
            }
        }
    }
    matrix(const matrix &) = delete;
    ~matrix() {
        while (arrlenu(r->owned) > mark) cudaFree(arrpop(r->owned));
        free(arrpop(c->copies));
    }
    double bias_of(int e, int row) const { return bias.empty() ? 0 : (double)bias[(size_t)(e * w.bias_stride + row)]; }
    double dot(int e, int row, const float *x) const {
        const double *a = &v[((size_t)e * (size_t)w.n_out + (size_t)row) * (size_t)w.n_in];
        double s = bias_of(e, row);
        for (int k = 0; k < w.n_in; k++) s += a[k] * (double)x[k];
        return s;
    }
};

/* How gate and up are joined. */
struct glu_kind {
    struct glu (*make)(float limit) = NULL; /* NULL: without limits */
    double limit = 0;
    bool gelu = false, relu = false;
    double gate_cap = 0, up_cap = 0;
};
static double glu(const struct glu_kind &k, double g, double u) {
    const double clamped = fmax(-k.limit, fmin(u, k.limit));
    double y = g / (1 + exp(-g)) * u;
    if (k.make == glu_oai) g = fmin(g, k.limit), y = g / (1 + exp(-1.702 * g)) * (clamped + 1);
    if (k.make == glu_silu_clamp) y = fmin(g / (1 + exp(-g)), k.limit) * clamped;
    if (k.gate_cap > 0) y = k.gate_cap * tanh(g / k.gate_cap) / (1 + exp(-g)) * (k.up_cap * tanh(u / k.up_cap));
    if (k.gelu) y = g / 2 * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
    if (k.relu) y = fmax(g, 0) * u;
    return y / (double)HIDDEN_SCALE;
}
static const char *glu_name(const struct glu_kind &k) {
    if (k.gelu || k.relu) return k.relu ? "ReLU" : "GELU";
    if (k.gate_cap > 0) return "capped";
    return k.make == glu_oai ? "OAI" : k.make == glu_silu_clamp ? "clamped SiLU" : k.make ? "clamped" : "SiLU";
}
static struct glu glu_of(const struct glu_kind &k) {
    struct glu none = {};
    none.gelu = k.gelu, none.relu = k.relu, none.gate_cap = (float)k.gate_cap, none.up_cap = (float)k.up_cap;
    return k.make ? k.make((float)k.limit) : none;
}

/* Rows of tokens in halves, `stride` apart: what lies after n_in is NaN and must not be read. */
struct tokens {
    size_t stride;
    int n_in;
    std::vector<uint16_t> half;
    std::vector<float> value; /* (n, n_in) */
    /* gap: what lies between the rows, NaN or, where it may be read and multiplied by 0, the largest number */
    tokens(int n, int width, uint16_t gap = 0x7E00)
        : stride((size_t)width + 16), n_in(width), half((size_t)n * stride + TILE_COLS, gap) {
        for (int i = 0; i < n; i++) {
            float outlier = rnd() % 4 ? 1 : 30, all = i % 7 == 3 && n > 8 ? 0 : 1; /* rows of zeros, too */
            for (int k = 0; k < width; k++) {
                uint16_t h = f16_from_f32(uniform() * (rnd() % 64 ? 1 : outlier) * all);
                half[(size_t)i * stride + (size_t)k] = h, value.push_back(f16_to_f32(h));
            }
        }
    }
    const float *row(int i) const { return &value[(size_t)i * (size_t)n_in]; }
};

/* Results in floats or halves, in a buffer whose gaps must stay as they are. */
struct results {
    bool f32;
    gpu_array<uint32_t> y;
    std::vector<uint32_t> got;
    results(size_t n, bool floats) : f32(floats), y(std::vector<uint32_t>(n, 0xA5A5A5A5)) {}
    double at(size_t i) const {
        float f;
        if (!f32) return (double)f16_to_f32(((const uint16_t *)got.data())[i]);
        return memcpy(&f, &got[i], 4), (double)f;
    }
    bool untouched(size_t i) const { return f32 ? got[i] == 0xA5A5A5A5 : ((const uint16_t *)got.data())[i] == 0xA5A5; }
};

/* ---- GEMM: more than 16 tokens ---- */

enum gemm_mode { DENSE, LIST, BATCH };

struct gemm_case {
    const char *name;
    enum gguf_type type;
    bool fp4, gated;
    enum gemm_mode mode;
    int n_expert, n_out, n_in;
    std::vector<int> counts; /* tokens of each expert */
    bool f32, bias, gather;
    struct glu_kind glu = {};
    float bias_factor = 0;
    bool square = false; /* the results are max(0, y)^2 / HIDDEN_SCALE */
};

/* How the quantizer is defined, in plain code: `value` becomes what the codes mean. Returns the number of codes and
 * scales that should be others. */
static int check_quantized(float *value, int n_in, const uint8_t *codes, const uint8_t *scales, float row_scale) {
    int bad = 0, n_block = (n_in + 63) / 64 * 4;
    float amax = 0;
    for (int k = 0; k < n_in; k++) amax = fmaxf(amax, fabsf(value[k]));
    bad += row_scale != amax / 2688.0f;
    for (int b = 0; b < n_block; b++) {
        float m = 0, least = 1e30f;
        int best = 0;
        for (int k = b * 16; k < b * 16 + 16 && k < n_in; k++) m = fmaxf(m, fabsf(value[k]));
        float want = m > 0 ? m / 6.0f / row_scale : 0;
        for (int c = 0; c < 0x7F; c++) { /* the nearest, ties to even */
            float e = fabsf(ue4m3_to_f32((uint8_t)c) - want);
            if (e < least || (e == least && !(c & 1))) least = e, best = c;
        }
        bad += scales[b] != best;
        float s = ue4m3_to_f32(scales[b]) * row_scale;
        for (int k = b * 16; k < b * 16 + 16; k++) {
            int nibble = (k >> 1 & 3) + 4 * (k & 1), near = 0;
            uint8_t code = codes[k / 8 * 4 + nibble / 2] >> 4 * (nibble & 1) & 15;
            if (k >= n_in) {
                bad += (code & 7) != 0;
                continue;
            }
            float q = s > 0 ? fabsf(value[k] / s) : 0;
            least = 1e30f;
            for (int c = 0; c < 8; c++) {
                float e = fabsf(q - e2m1_to_f32((uint8_t)c));
                if (e < least || (e == least && !(c & 1))) least = e, near = c;
            }
            bad += (code & 7) != near || (near && (code >> 3) != (value[k] < 0));
            value[k] = e2m1_to_f32(code) * s;
        }
    }
    return bad;
}

/* The sorted positions, and the list of tiles; beyond its end it is garbage. */
struct tile_list {
    std::vector<int32_t> expert, of_tile, first, count;
    int n_tiles;
    explicit tile_list(const std::vector<int> &counts) {
        for (int e = 0; e < (int)counts.size(); e++) {
            for (int i = 0; i < counts[(size_t)e]; i += TN) {
                of_tile.push_back(e), first.push_back((int)expert.size() + i);
                count.push_back(min(counts[(size_t)e] - i, (int)TN));
            }
            expert.insert(expert.end(), (size_t)counts[(size_t)e], e);
        }
        n_tiles = (int)of_tile.size();
        for (int i = 0; i < 3; i++) of_tile.push_back(1 << 20), first.push_back(1 << 20), count.push_back(77);
    }
};

/* The NMSE that F32 sums of n_in products may have. Tensor cores cut a sum off, where the simulator rounds: all errors
 * have one sign, so they grow with the number of sums, of 16 products each. A sum is cut off by 2^-24 of itself on
 * average; twice that is allowed. */
static double sum_limit(int n_in) { return sums_cut ? fmax(1e-11, pow(2 * ldexp(n_in / 16, -24), 2)) : 1e-11; }

static void run_gemm(const struct gemm_case &t) {
    const int n_matrix = t.mode == BATCH ? t.n_expert : 1;
    matrix w(t.type, t.n_expert, t.n_out, t.n_in, t.bias);
    matrix w2(t.type, t.gated ? t.n_expert : 1, t.gated ? t.n_out : 1, t.gated ? t.n_in : 8, t.bias && t.gated);
    tile_list list(t.counts);
    const int n_in = w.w.n_in, n_pos = (int)list.expert.size(), n_x = t.gather ? n_pos / 2 + 1 : n_pos;
    std::vector<int32_t> rows;
    for (int i = 0; i < n_pos; i++) rows.push_back(t.gather ? (int)(rnd() % (uint32_t)n_x) : i);
    tokens x(n_x * n_matrix, n_in);
    gpu_array<uint16_t> xd(x.half);
    gpu_array<int32_t> rows_d(rows), expert_d(list.of_tile), first_d(list.first), count_d(list.count),
        n_d(std::vector<int32_t>{list.n_tiles});
    size_t stride = (size_t)t.n_out + (t.n_out % 4 ? 3 : 4), batch = stride * (size_t)n_pos + 4;
    results y(batch * (size_t)n_matrix, t.f32);
    struct gemm_args g = {};
    g.w = w.d, g.w2 = w2.d, g.x = xd, g.x_stride = x.stride, g.n_tok = n_pos, g.y = y.y.p, g.y_stride = stride,
    g.y_f32 = t.f32, g.glu = glu_of(t.glu), g.bias_factor = t.bias_factor, g.square = t.square;
    if (t.gather) g.rows = rows_d;
    if (t.mode == LIST)
        g.tile_expert = expert_d, g.tile_first = first_d, g.tile_count = count_d, g.n_tiles = n_d,
        g.max_tiles = list.n_tiles + 3;
    if (t.mode == BATCH) g.batch = n_matrix, g.x_batch = x.stride * (size_t)n_x, g.y_batch = batch;
    size_t code_bytes = (size_t)w.d.n_kt * 32, scale_bytes = FP4_SCALE_BYTES(n_in);
    gpu_array<uint8_t> codes((size_t)n_x * code_bytes), scales((size_t)n_x * scale_bytes);
    gpu_array<float> row_scale((size_t)n_x);
    const struct fp4_rows xq = {codes, scales, row_scale};
    xd.arrive();
    if (t.fp4) quantize_fp4(xd, x.stride, n_x, n_in, g.xq = xq, test_stream);
    gemm_prefill(&g, t.gated, test_stream);
    finish(t.name);
    int bad_codes = 0;
    if (t.fp4) {
        std::vector<uint8_t> c = codes.get(), s = scales.get();
        std::vector<float> r = row_scale.get();
        for (int i = 0; i < n_x; i++)
            bad_codes += check_quantized(&x.value[(size_t)i * (size_t)n_in], n_in, &c[(size_t)i * code_bytes],
                                         &s[(size_t)i * scale_bytes], r[(size_t)i]);
    }
    y.got = y.y.get();
    error_sum sum;
    long gaps = 0;
    for (int z = 0; z < n_matrix; z++)
        for (int i = 0; i < n_pos; i++)
            for (int r = 0; r < (int)stride; r++) {
                size_t at = (size_t)z * batch + (size_t)i * stride + (size_t)r;
                if (r >= t.n_out) {
                    gaps += !y.untouched(at);
                    continue;
                }
                int e = t.mode == LIST ? list.expert[(size_t)i] : z;
                const float *row = x.row(z * n_x + rows[(size_t)i]);
                double a = w.dot(e, r, row);
                if (t.bias_factor > 0) a += ((double)t.bias_factor - 1) * w.bias_of(e, r);
                if (t.square) a = pow(fmax(a, 0), 2) / (double)HIDDEN_SCALE;
                sum.add(y.at(at), t.gated ? glu(t.glu, a, w2.dot(e, r, row)) : a);
            }
    const double limit = !t.f32 ? 1e-6 : fmax(t.fp4 ? 1e-10 : 0, sum_limit(n_in));
    expect(sum.nmse() <= limit && !gaps && !bad_codes,
           "%s, type %u%s%s, %s, mode %d, %d experts (%d, %d), %d tokens: NMSE %.1e, %ld gaps written, %d wrong "
           "codes",
           t.name, t.type, t.fp4 ? " x FP4" : "",
           t.gated    ? " gated"
           : t.square ? " squared"
                      : "",
           glu_name(t.glu), t.mode, t.n_expert, t.n_out, n_in, n_pos, sum.nmse(), gaps, bad_codes);
}

/* Results of both types, in rows that are and are not whole quads, of blocks of both sizes; tiles of tokens in which all but
 * one n8-tile of a warp have some. */
static void run_gemm_quads(enum gguf_type type, bool fp4, bool gated, int n_in) {
    for (int n_out : {130, 136})
        for (bool f32 : {false, true}) {
            run_gemm({"quads",
                      type,
                      fp4,
                      gated,
                      DENSE,
                      1,
                      n_out,
                      n_in,
                      {50},
                      f32,
                      n_out % 4 == 0,
                      f32,
                      {},
                      f32 && !gated ? 0.5f : 0});
            run_gemm({"quads", type, fp4, gated, LIST, 3, n_out, n_in, {105, 0, TN - 14}, f32, n_out % 4 > 0, true});
        }
}

extern "C" void cuda_test_gemm(void) {
    const bool fp4 = cuda_test_begin(1);
    static const struct glu_kind oai = {glu_oai, 7}, low = {glu_oai, 0.75}, clamp = {glu_silu_clamp, 0.75},
                                 gelu = {NULL, 0, true}, relu = {NULL, 0, false, true},
                                 capped = {NULL, 0, false, false, 2, 3};
    for (auto &type : matrix_types)
        for (int i = 0; i < 2; i++) {
            const bool gated = i;
            run_gemm({"few rows", type.type, 0, gated, DENSE, 1, 130, 72, {17}, !gated, true, false});
            run_gemm({"few rows", type.type, 0, gated, DENSE, 1, 24, 192, {65}, gated, false, true});
            run_gemm({"big blocks",
                      type.type,
                      0,
                      gated,
                      DENSE,
                      1,
                      gated ? 200 : 520,
                      192,
                      {gated ? 300 : 280},
                      true,
                      true,
                      false});
            run_gemm({"list", type.type, 0, gated, LIST, 7, 200, 72, {0, 1, 17, TN, 0, TN + 1, 40}, true, false, true});
            run_gemm(
                {"one expert takes all", type.type, 0, gated, LIST, 3, 16, 192, {0, TN + 17, 0}, false, false, true});
            run_gemm({"heads", type.type, 0, gated, BATCH, 3, 16, 64, {20}, false, false, false});
            run_gemm({"long rows", type.type, 0, gated, i ? LIST : DENSE, 1, 40, 2112, {70}, true, false, false});
        }
    for (enum gguf_type type : format_types)
        for (bool gated : {false, true}) run_gemm_quads(type, false, gated, 328);
    for (enum gguf_type type : {GGUF_NVFP4, GGUF_MXFP4})
        for (int i = 0; fp4 && i < 2; i++) {
            const bool gated = i;
            run_gemm({"few rows", type, true, gated, DENSE, 1, 130, 72, {17}, true, true, false});
            run_gemm({"big blocks",
                      type,
                      true,
                      gated,
                      DENSE,
                      1,
                      gated ? 200 : 520,
                      192,
                      {gated ? 300 : 280},
                      true,
                      false,
                      false});
            run_gemm({"list", type, true, gated, LIST, 7, 200, 72, {0, 1, 17, TN, 0, TN + 1, 40}, true, false, true});
            run_gemm({"long rows", type, true, gated, LIST, 2, 24, 1088, {TN - 1, 3}, false, false, true});
            run_gemm({"long rows", type, true, gated, DENSE, 1, 130, 2112, {70}, true, false, false});
            run_gemm({"longest rows", type, true, gated, LIST, 2, 270, 4096, {9, TN + 1}, true, false, true});
        }
    for (int i = 0; fp4 && i < 2; i++) {
        run_gemm_quads(GGUF_NVFP4, true, i, 328);
        for (bool f32 : {false, true}) {
            run_gemm({"longest rows", GGUF_NVFP4, true, i > 0, LIST, 1, 130, 4096, {105}, f32, true, true, low});
            run_gemm({"longest rows", GGUF_NVFP4, true, i > 0, LIST, 1, 136, 4096, {TN}, f32, false, false});
        }
    }
    /* the experts of gpt-oss and Step-3.5: limits that clip about half of what there is, biases that matter, rows of 45
     * tiles, as many rows as a rank of four has */
    for (auto &type : matrix_types)
        for (int a4 = 0; a4 <= (fp4 && type_format(type.type) == FMT_FP4); a4++) {
            run_gemm(
                {"OAI", type.type, a4 > 0, true, LIST, 5, 200, 72, {0, 1, 17, TN + 1, 40}, false, true, true, low});
            run_gemm({"clamped", type.type, a4 > 0, true, LIST, 3, 176, 136, {70, 0, 3}, false, true, true, clamp});
            run_gemm({"clamped, dense", type.type, a4 > 0, true, DENSE, 1, 40, 72, {300}, false, false, false, clamp});
            run_gemm({"GELU", type.type, a4 > 0, true, LIST, 3, 176, 136, {70, 0, 3}, false, false, true, gelu});
            run_gemm({"ReLU", type.type, a4 > 0, true, LIST, 3, 176, 136, {70, 0, 3}, false, false, true, relu});
            run_gemm({"GELU, dense", type.type, a4 > 0, true, DENSE, 1, 40, 72, {70}, true, false, false, gelu});
            run_gemm({"ReLU, dense", type.type, a4 > 0, true, DENSE, 1, 40, 72, {70}, true, false, false, relu});
            run_gemm({"weighted later",
                      type.type,
                      a4 > 0,
                      false,
                      LIST,
                      3,
                      72,
                      176,
                      {33, 0, 5},
                      false,
                      true,
                      false,
                      {},
                      1 / HIDDEN_SCALE});
        }
    /* the feed-forwards of Inkling 2 and of Nemotron-H, in every instance */
    for (enum gguf_type type : format_types)
        for (int a4 = 0; a4 <= (fp4 && type == GGUF_NVFP4); a4++)
            for (enum gemm_mode mode : {DENSE, LIST}) {
                const bool dense = mode == DENSE;
                const int n = dense ? 64 : (int)TN;
                run_gemm({"capped", type, a4 > 0, true, mode, 1, 24, 72, {n}, false, dense, !dense, capped});
                run_gemm({"squared", type, a4 > 0, false, mode, 1, 40, 72, {n}, true, dense, !dense, {}, 0, true});
                if (!dense) run_gemm({"GELU", type, a4 > 0, true, mode, 1, 24, 72, {n}, false, false, true, gelu});
                if (!a4 || dense) continue;
                run_gemm({"capped", type, true, true, mode, 1, 24, 4096, {n}, true, false, false, capped});
                run_gemm({"GELU", type, true, true, mode, 1, 24, 4096, {n}, true, false, false, gelu});
                run_gemm({"ReLU", type, true, true, mode, 1, 24, 4096, {n}, true, false, false, relu});
                run_gemm({"squared", type, true, false, mode, 1, 40, 4096, {n}, true, false, false, {}, 0, true});
            }
    run_gemm({"gpt-oss", GGUF_MXFP4, false, true, LIST, 2, 176, 2880, {20, 3}, false, true, true, oai});
    if (fp4) run_gemm({"gpt-oss", GGUF_MXFP4, true, true, LIST, 2, 176, 2880, {20, 3}, false, true, true, oai});
}

/* ---- upload ---- */

/* Every weight of every format through k_embed, and matrices whose numbers need another factor, or have none. */
extern "C" void cuda_test_upload(void) {
    begin_test(2);
    static const struct {
        int n_out, n_in, octaves;
        float size;
    } shapes[] = {{1, 8, 0, 1},    {130, 72, 0, 1},      {33, 200, -40, 1e4f}, {40, 328, 60, 3e30f},
                  {2, 1032, 0, 1}, {17, 256, -40, 1e4f}, {24, 384, 60, 3e30f}};
    for (auto &type : matrix_types)
        for (auto &s : shapes) {
            if (type.type == GGUF_F16 && s.size > 6e4f) continue;
            matrix w(type.type, 1, s.n_out, s.n_in, false, s.octaves, s.size);
            /* some models have four residual streams; some rotate all of a long head, at positions whose angles are large */
            const bool wide = s.n_out == 2;
            const int n_in = w.w.n_in, n_half = wide ? 600 : 5, copies = wide ? 7 : 1, pos = wide ? 1000000 : 1000;
            std::vector<int32_t> ids;
            std::vector<float> freq;
            for (int i = 0; i < s.n_out; i++) ids.push_back(s.n_out - 1 - i);
            for (int i = 0; i < n_half; i++) freq.push_back(wide ? powf(0.99f, (float)i) : 1.0f / (float)(1 << i));
            gpu_array<int32_t> ids_d(ids);
            /* and some norm it, as the first of several rows of a token */
            const bool normed = &s == &shapes[0];
            const int stride = copies * n_in + (normed ? 8 : 0);
            std::vector<float> norm;
            for (int i = 0; i < n_in; i++) norm.push_back(0.5f + (float)(i % 7));
            gpu_array<float> norm_d(norm), freq_d(freq), x((size_t)(s.n_out * stride)), cs((size_t)s.n_out * n_half),
                sn((size_t)s.n_out * n_half), cs_2((size_t)s.n_out * 3), sn_2((size_t)s.n_out * 3);
            gpu_batch b(pos, s.n_out, pos);
            ids_d.arrive();
            struct device_matrix d = w.d; /* some have no factors of their own */
            if (wide) d.scale = NULL;
            const double factor = wide ? 1 / (double)w.scale[0] : 1;
            const float times = wide ? 1.0f : 53.0659966f; /* of every value: sqrt(2816) */
            const struct rope_tables ropes = {{{freq_d, n_half, 1.5f, cs, sn}, {freq_d + 1, 3, 0.5f, cs_2, sn_2}}, 2};
            LAUNCH_PDL(k_embed, dim3((unsigned)s.n_out), dim3(ROW_THREADS), 0, test_stream, d, ids_d.p, batch_ref(b),
                       x.p, (size_t)stride, copies, times, normed ? norm_d.p : NULL, 1e-6f, ropes, (float *)NULL,
                       (size_t)0);
            finish("embedding");
            std::vector<float> got = x.get(), c = cs.get(), n = sn.get(), c2 = cs_2.get(), n2 = sn_2.get();
            error_sum sum, angles;
            for (int i = 0; i < s.n_out; i++) {
                const double *row = &w.v[(size_t)(ids[(size_t)i] * n_in)];
                double squares = 0;
                for (int k = 0; k < n_in; k++) squares += row[k] * row[k];
                for (int k = 0; k < copies * n_in; k++) {
                    const double to = normed ? norm[(size_t)k] / sqrt(squares / n_in + 1e-6 / (times * times))
                                             : factor * (double)times / s.size;
                    sum.add((double)got[(size_t)(i * stride + k)] / (normed ? 1 : s.size), row[k % n_in] * to);
                }
                for (int k = 0; k < n_half; k++) {
                    const double a = (double)((float)(pos + i) * freq[(size_t)k]);
                    angles.add((double)c[(size_t)(i * n_half + k)], 1.5 * cos(a));
                    angles.add((double)n[(size_t)(i * n_half + k)], 1.5 * sin(a));
                    if (!k || k > 3) continue; /* the second rotation */
                    angles.add((double)c2[(size_t)(i * 3 + k - 1)], 0.5 * cos(a));
                    angles.add((double)n2[(size_t)(i * 3 + k - 1)], 0.5 * sin(a));
                }
            }
            expect(!w.c->failed && sum.nmse() <= 1e-13 && angles.nmse() <= 1e-10,
                   "%s (%d, %d) of size %g: NMSE %.1e, of angles %.1e %s", type.name, s.n_out, n_in, (double)s.size,
                   sum.nmse(), angles.nmse(), w.c->err);
        }
    {
        matrix w(GGUF_F32, 1, 16, 64, false, 0, INFINITY);
        expect(w.c->failed && strstr(w.c->err, "only finite ones"), "an infinite weight: %s", w.c->err);
    }
    matrix apart(GGUF_MXFP4, 2, 130, 200, false, 0, 1, 32);
    gpu_array<float> x((size_t)130 * 224);
    std::vector<int32_t> ids;
    for (int i = 0; i < 130; i++) ids.push_back(i);
    gpu_array<int32_t> ids_d(ids);
    gpu_batch b(0, 130, 0);
    ids_d.arrive();
    LAUNCH_PDL(k_embed, dim3(130), dim3(ROW_THREADS), 0, test_stream, apart.d, ids_d.p, batch_ref(b), x.p, (size_t)224,
               1, 1.0f, (const float *)NULL, 0.0f, rope_tables{}, (float *)NULL, (size_t)0);
    finish("embedding");
    const std::vector<float> got = x.get();
    double worst = 0, largest = 0;
    for (size_t i = 0; i < got.size(); i++) {
        worst = fmax(worst, fabs((double)got[i] - apart.v[i]));
        largest = fmax(largest, fabs(apart.v[i]));
    }
    expect(!apart.c->failed && worst > 0 && worst <= ldexp(largest, -21), "MXFP4 of 32 octaves: off by %.3e of %.3e %s",
           worst, largest, apart.c->err);
}

/* ---- GEMV: up to 16 tokens ---- */

/* y = W x + bias for 1..16 tokens; norm: of the norm of x + partial, for few short rows; halves: y has, and the norm in
 * halves has weights of its own. */
static void run_gemv(enum gguf_type type, int n_tok, int n_out, int n_in, bool norm, bool halves = false) {
    matrix w(type, 1, n_out, n_in, true);
    const int n = w.w.n_in, stride = n_out + 3;
    tokens x(n_tok, n, 0x7BFF);
    gpu_array<uint16_t> xd(x.half), half((size_t)(n_tok * n));
    results y((size_t)(stride * n_tok), !halves);
    std::vector<float> base, partial, weight, sums;
    for (int i = 0; i < n_tok * n; i++) base.push_back((float)normal()), partial.push_back((float)normal());
    for (int i = 0; i < n; i++) weight.push_back(1 + uniform() / 2);
    const std::vector<float> weight16 = halves ? random_floats(n, 1) : weight;
    gpu_array<float> base_d(base), delta_d(partial), weight_d(weight), weight16_d(weight16), sum_d(base.size());
    struct linear_args p = {};
    p.w[0] = w.d, p.y[0] = (float *)y.y.p, p.y_stride[0] = (size_t)stride, p.n_matrix = 1, p.n_tok = n_tok;
    p.x = xd, p.x_stride = x.stride, p.y_half = halves;
    p.prefetch.count = 1, p.prefetch.at[0] = w.d.codes, p.prefetch.n[0] = 1024;
    if (norm) p.norm = {base_d, delta_d, weight_d, 1e-6f, n, sum_d, half, halves ? weight16_d.p : NULL}, p.x = NULL;
    for (int t = 0; t < n_tok && norm; t++) {
        double ss = 0;
        for (int i = t * n; i < (t + 1) * n; i++) sums.push_back(base[(size_t)i] + partial[(size_t)i]);
        for (int i = t * n; i < (t + 1) * n; i++) ss += (double)sums[(size_t)i] * (double)sums[(size_t)i];
        const double f = 1 / sqrt(ss / n + 1e-6);
        for (int i = 0; i < n; i++)
            x.value[(size_t)(t * n + i)] = (float)((double)sums[(size_t)(t * n + i)] * f * (double)weight[(size_t)i]);
    }
    xd.arrive(), delta_d.arrive();
    gemv_linear(&p, test_stream);
    finish("GEMV");
    y.got = y.y.get();
    error_sum sum;
    long gaps = 0;
    for (int t = 0; t < n_tok; t++)
        for (int r = 0; r < stride; r++) {
            if (r >= n_out) gaps += !y.untouched((size_t)(t * stride + r));
            else sum.add(y.at((size_t)(t * stride + r)), w.dot(0, r, x.row(t)));
        }
    if (norm) { /* by the first block */
        const std::vector<uint16_t> h16 = half.get();
        gaps += memcmp(sum_d.get().data(), sums.data(), sums.size() * sizeof(float)) != 0;
        for (size_t i = 0; i < h16.size(); i++) {
            const float want = x.value[i] / weight[i % (size_t)n] * weight16[i % (size_t)n];
            gaps += !(fabsf(f16_to_f32(h16[i]) - want) <= 6e-4f * fabsf(want) + 1e-7f);
        }
    }
    expect(sum.nmse() <= (norm || halves ? 1e-6 : sum_limit(n / GEMV_WARPS)) && !gaps,
           "type %u, %d tokens, (%d, %d), norm %d, halves %d: NMSE %.1e, %ld gaps written", type, n_tok, n_out, n, norm,
           halves, sum.nmse(), gaps);
}

/* The groups of n_in values of each token times a matrix each. */
static void run_gemv_groups(enum gguf_type type, int n_tok, int groups, int n_out, int n_in) {
    matrix w(type, groups, n_out, n_in);
    const int n = w.w.n_in, stride = groups * n_out + 8;
    tokens x(n_tok, groups * n, 0x7BFF);
    gpu_array<uint16_t> xd(x.half);
    results y((size_t)(stride * n_tok), false);
    struct linear_args p = {};
    p.w[0] = w.d, p.y16 = (uint16_t *)y.y.p, p.y_stride[0] = (size_t)stride, p.n_tok = n_tok, p.x = xd,
    p.x_stride = x.stride;
    p.prefetch.count = 1, p.prefetch.at[0] = w.d.codes, p.prefetch.n[0] = 1024;
    xd.arrive();
    gemv_groups(&p, test_stream);
    finish("GEMV in groups");
    y.got = y.y.get();
    error_sum sum;
    long gaps = 0;
    for (int t = 0; t < n_tok; t++)
        for (int r = 0; r < stride; r++) {
            const size_t at = (size_t)(t * stride + r);
            if (r >= groups * n_out) gaps += !y.untouched(at);
            else sum.add(y.at(at), w.dot(r / n_out, r % n_out, x.row(t) + r / n_out * n));
        }
    expect(sum.nmse() <= 1e-6 && !gaps, "type %u, %d tokens, %d groups (%d, %d): NMSE %.1e, %ld gaps written", type,
           n_tok, groups, n_out, n, sum.nmse(), gaps);
}

/* Jobs of n_tok tokens that choose each of `used` experts at random, and their weights. */
static std::vector<struct expert_job> random_jobs(int n_tok, int n_expert, int used, std::vector<float> &weight) {
    std::vector<struct expert_job> jobs;
    for (int i = 0; i < used; i++) {
        const int e = i * n_expert / used;
        struct expert_job job = {e, 0, e, 0};
        for (int t = 0; t < DECODE_MAX_TOKENS; t++) {
            if (t < n_tok && (rnd() % 3 || (t + 1 == n_tok && !job.tokens))) job.tokens |= 1u << t;
            weight.push_back(job.tokens >> t & 1 ? uniform() : NAN);
        }
        jobs.push_back(job);
    }
    return jobs;
}

/* The two halves of a feed-forward: routed experts, `used` of which are chosen and which may have biases, and the shared
 * one. kind, sh_kind: of both. weighs_input: the weights of routed experts are factors of what they read. */
static void run_gemv_ffn(enum gguf_type type, enum gguf_type shared_type, int n_tok, int n_expert, int used, int n_embd,
                         int n_ff, int n_ff_shared, bool bias = false, struct glu_kind kind = {},
                         struct glu_kind sh_kind = {}, bool weighs_input = false) {
    matrix gate(type, n_expert, n_ff, n_embd, bias), up(type, n_expert, n_ff, n_embd, bias),
        down(type, n_expert, n_embd, n_ff, bias);
    matrix sh_gate(shared_type, 1, n_ff_shared, n_embd), sh_up(shared_type, 1, n_ff_shared, n_embd),
        sh_down(shared_type, 1, n_embd, n_ff_shared);
    tokens x(n_tok, n_embd);
    std::vector<float> weight;
    std::vector<struct expert_job> jobs = random_jobs(n_tok, n_expert, used, weight);
    const int max_jobs = used + 1;
    jobs.push_back({1 << 20, 0xFFFF, 1 << 20, 0});
    weight.resize((size_t)max_jobs * DECODE_MAX_TOKENS, NAN);
    std::vector<uint16_t> nans((size_t)(max_jobs * DECODE_MAX_TOKENS * n_ff), 0x7E00);
    gpu_array<uint16_t> xd(x.half), hidden(nans), hidden_shared((size_t)(DECODE_MAX_TOKENS * n_ff_shared));
    gpu_array<struct expert_job> jobs_d(jobs);
    gpu_array<int32_t> n_d(std::vector<int32_t>{used});
    std::vector<float> shared_weight(DECODE_MAX_TOKENS, 1.0f);
    for (int t = 0; t < n_tok && n_tok > 1; t++) shared_weight[(size_t)t] = uniform();
    gpu_array<float> weight_d(weight), shared_d(shared_weight), y((size_t)(n_tok * n_embd));
    struct glu_args u = {};
    struct down_args d = {};
    u.gate[0] = gate.d, u.up[0] = up.d, u.y[0] = hidden, u.gate[1] = sh_gate.d, u.up[1] = sh_up.d,
    u.y[1] = hidden_shared, u.glu[0] = glu_of(kind), u.glu[1] = glu_of(sh_kind);
    u.jobs = {jobs_d, weight_d, n_d, max_jobs}, u.down_scale = down.d.scale, u.down_scale_max = down.d.scale_max;
    u.shared_weight = n_tok > 1 ? shared_d.p : NULL, u.n_entry = 2, u.n_tok = n_tok;
    u.weighs_input = weighs_input;
    for (int i = 0; i < 2; i++) u.x[i] = xd, u.x_stride[i] = x.stride;
    d.w = down.d, d.w.decode_scale *= HIDDEN_SCALE, d.shared = sh_down.d, d.shared.decode_scale *= HIDDEN_SCALE;
    d.hidden = hidden, d.hidden_stride = (size_t)n_ff, d.hidden_shared = hidden_shared;
    d.jobs = u.jobs, d.n_tok = n_tok, d.y = y, d.y_stride = (size_t)n_embd;
    xd.arrive();
    gemv_glu(&u, test_stream), gemv_down(&d, test_stream);
    finish("the feed-forward in decode");
    std::vector<float> got = y.get();
    error_sum sum;
    std::vector<float> h((size_t)max(n_ff, n_ff_shared));
    for (int t = 0; t < n_tok; t++) {
        std::vector<double> want((size_t)n_embd);
        for (int j = 0; j <= used; j++) { /* the last: the shared one */
            const bool shared = j == used;
            const int e = shared ? 0 : jobs[(size_t)j].expert;
            if (!shared && !(jobs[(size_t)j].tokens >> t & 1)) continue;
            const double f = (double)(shared ? shared_weight[(size_t)t] : weight[(size_t)(j * DECODE_MAX_TOKENS + t)]);
            const matrix &g = shared ? sh_gate : gate, &v = shared ? sh_up : up, &o = shared ? sh_down : down;
            const double in = weighs_input && !shared ? f : 1;
            for (int k = 0; k < g.w.n_out; k++)
                h[(size_t)k] = (float)((double)HIDDEN_SCALE * glu(shared ? sh_kind : kind, in * g.dot(e, k, x.row(t)),
                                                                  in * v.dot(e, k, x.row(t))));
            for (int k = 0; k < n_embd; k++) want[(size_t)k] += f / in * o.dot(e, k, h.data());
        }
        for (int k = 0; k < n_embd; k++) sum.add((double)got[(size_t)(t * n_embd + k)], want[(size_t)k]);
    }
    expect(sum.nmse() <= 1e-6, "types %u, %u, %s, %s, bias %d, %d tokens, %d of %d experts: NMSE %.1e", type,
           shared_type, glu_name(kind), glu_name(sh_kind), bias, n_tok, used, n_expert, sum.nmse());
}

/* What a rank's columns of a matrix make of rows that all ranks have whole, in one job for all tokens. */
static void run_gemv_part(enum gguf_type type, int n_tok, int n_out, int first, int n_in) {
    matrix w(type, 1, n_out, n_in);
    tokens x(n_tok, first + w.w.n_in, 0x7BFF);
    gpu_array<uint16_t> xd(x.half);
    gpu_array<struct expert_job> job(std::vector<struct expert_job>{{0, (1u << n_tok) - 1, 0, 0}});
    gpu_array<int32_t> one(std::vector<int32_t>{1});
    gpu_array<float> y((size_t)(n_tok * n_out));
    struct down_args d = {};
    d.w = w.d, d.hidden = xd + first, d.hidden_stride = x.stride, d.jobs = {job, NULL, one, 1};
    d.n_tok = n_tok, d.y = y, d.y_stride = (size_t)n_out;
    xd.arrive();
    gemv_down(&d, test_stream);
    finish("GEMV of a rank's columns");
    const std::vector<float> got = y.get();
    error_sum sum;
    for (int t = 0; t < n_tok; t++)
        for (int r = 0; r < n_out; r++) sum.add((double)got[(size_t)(t * n_out + r)], w.dot(0, r, x.row(t) + first));
    expect(sum.nmse() <= 1e-6, "type %u, %d tokens, columns from %d on of (%d, %d): NMSE %.1e", type, n_tok, first,
           n_out, n_in, sum.nmse());
}

extern "C" void cuda_test_gemv(void) {
    begin_test(3);
    static const int n_tok[] = {1, 2, 8, 9, 16};
    for (auto &type : matrix_types)
        for (int n : n_tok) {
            run_gemv(type.type, n, 130, 72, n <= 8);
            run_gemv(type.type, n, 24, 1088, false);
        }
    run_gemv(GGUF_NVFP4, 8, 40, 1024, true);
    for (enum gguf_type type : format_types) { /* more tiles than a warp has in flight */
        run_gemv(type, 2, 24, 4096, true), run_gemv(type, 2, 24, 4096, true, true);
        for (int n : {2, 9}) {
            run_gemv(type, n, 24, 4096, false), run_gemv(type, n, 24, 4096, false, true),
                run_gemv_groups(type, n, 2, 24, 4096), run_gemv_groups(type, n, 3, 40, 72);
            run_gemv_ffn(type, type, n, 3, 2, 2112, 64, 64), run_gemv_ffn(type, type, n, 3, 3, 64, 2624, 2624);
        }
    }
    for (auto &type : matrix_types) {
        const enum gguf_type shared = type.type == GGUF_NVFP4 ? GGUF_BF16 : type.type;
        const int w = std::max(64, type_block(type.type)); /* widths are whole blocks */
        run_gemv_ffn(type.type, shared, 1, 5, 2, 3 * w, w, 2 * w);
        run_gemv_ffn(type.type, shared, 16, 9, 9, w, 3 * w, w);
        run_gemv_ffn(type.type, shared, 9, 4, 0, 2 * w, w, 3 * w);
        for (int n : {1, 3, 16}) {
            run_gemv_ffn(type.type, shared, n, 7, 4, 3 * w, 3 * w, w, true, {glu_oai, 0.75}, {glu_silu_clamp, 0.5});
            run_gemv_ffn(type.type, shared, n, 5, 3, w, w, 2 * w, false, {glu_silu_clamp, 0.75}, {});
            run_gemv_ffn(type.type, shared, n, 5, 3, w, w, 2 * w, false, {NULL, 0, true}, {});
            run_gemv_ffn(type.type, shared, n, 5, 3, w, w, 2 * w, false, {}, {NULL, 0, true});
            run_gemv_ffn(type.type, shared, n, 5, 3, w, w, 2 * w, false, {}, {}, true);
        }
        run_gemv_ffn(type.type, shared, 9, 4, 0, 2 * w, w, 3 * w, true, {glu_oai, 7}, {});
    }
    run_gemv_ffn(GGUF_MXFP4, GGUF_BF16, 3, 4, 3, 2880, 64, 64, true, {glu_oai, 7},
                 {}); /* of gpt-oss: rows of 45 tiles, */
    run_gemv_ffn(GGUF_MXFP4, GGUF_BF16, 2, 4, 3, 64, 704, 64, true, {glu_oai, 7}, {}); /* of 11 tiles */
    run_gemv_ffn(GGUF_MXFP4, GGUF_BF16, 16, 340, 330, 64, 64, 64, true, {glu_oai, 7},
                 {}); /* more than 48 KB of biases */
    for (auto &type : matrix_types) {
        const int w = std::max(64, type_block(type.type));
        run_gemv_part(type.type, 1, 3 * w, 0, 2 * w), run_gemv_part(type.type, 11, 40, 192, w);
    }
}

/* ---- router ---- */

struct route_case {
    int n_tok, n_expert, k, n_group, n_group_used;
    enum gating gating;
    bool norm, bias, bf16, ties;
    bool logit_bias, not_finite; /* some of the logits */
    int n_embd = 72;
    bool input = false; /* x is the norm of a sum, which the kernel makes itself */
};

/* The choice for one token, one step after the other: pick (n_expert), `score` (n_expert) from its logits. */
static void route_plain(const struct route_case &c, const double *logits, const std::vector<float> &bias,
                        std::vector<float> &score, std::vector<float> &pick) {
    float top = -INFINITY, sum = 0;
    for (int e = 0; e < c.n_expert; e++) top = fmaxf(top, (float)logits[e]);
    for (int e = 0; e < c.n_expert; e++) {
        float l = (float)logits[e];
        score[(size_t)e] = c.gating == GATING_SOFTMAX         ? expf(l - top)
                           : c.gating == GATING_SIGMOID       ? 1.0f / (1.0f + expf(-l))
                           : c.gating == GATING_SQRT_SOFTPLUS ? sqrtf(fmaxf(l, 0) + log1pf(expf(-fabsf(l))))
                                                              : l;
        sum += score[(size_t)e];
    }
    for (int e = 0; e < c.n_expert; e++) {
        if (c.gating == GATING_SOFTMAX) score[(size_t)e] /= sum;
        pick[(size_t)e] = score[(size_t)e] + (c.bias ? bias[(size_t)e] : 0.0f);
        if (pick[(size_t)e] != pick[(size_t)e]) pick[(size_t)e] = -INFINITY;
    }
    if (c.n_group == 1) return;
    int per = c.n_expert / c.n_group;
    std::vector<float> group;
    for (int g = 0; g < c.n_group; g++) {
        std::vector<float> p(pick.begin() + g * per, pick.begin() + (g + 1) * per);
        std::sort(p.begin(), p.end());
        group.push_back(p.back() + (per > 1 && c.gating != GATING_SOFTMAX ? p[(size_t)per - 2] : 0));
    }
    for (int g = 0; g < c.n_group; g++) {
        int better = 0;
        for (int o = 0; o < c.n_group; o++)
            better += group[(size_t)o] > group[(size_t)g] || (group[(size_t)o] == group[(size_t)g] && o < g);
        for (int e = g * per; better >= c.n_group_used && e < (g + 1) * per; e++) pick[(size_t)e] = -INFINITY;
    }
}

/* What the choice of token t should be. A pick that is as good but for rounding is right as well; equal ones are not.
 * */
static int check_route(const struct route_case &c, const double *logits, const std::vector<float> &bias,
                       const int32_t *id, const float *weight, float factor) {
    std::vector<float> score((size_t)c.n_expert), pick((size_t)c.n_expert);
    std::vector<float> mixed; /* weights */
    int bad = 0;
    float sum = 0;
    route_plain(c, logits, bias, score, pick);
    for (int i = 0; i < c.k; i++) {
        int best = -1;
        for (int e = 0; e < c.n_expert; e++)
            if (pick[(size_t)e] == pick[(size_t)e] && (best < 0 || pick[(size_t)e] > pick[(size_t)best])) best = e;
        int got = id[i];
        if (got < 0 || got >= c.n_expert) return c.k;
        float gap = pick[(size_t)best] - pick[(size_t)got];
        if (got != best && !(gap > 0 && gap < 1e-6f)) bad++;
        if (c.gating == GATING_SPARSEMIXER) { /* its share of those that are left and not far below it */
            const float top = score[(size_t)got];
            double total = 0;
            for (size_t e = 0; e < score.size(); e++) {
                const bool far = (top - score[e]) / fmaxf(fabsf(score[e]), top) > 2 * SPARSEMIXER_JITTER;
                if (pick[e] == pick[e] && !far) total += exp((double)(score[e] - top));
            }
            mixed.push_back((float)(1 / total));
        }
        pick[(size_t)got] = NAN;
    }
    for (size_t i = 0; i < mixed.size(); i++) score[(size_t)id[i]] = mixed[i];
    const float best_logit = score[(size_t)id[0]];
    for (int i = 0; i < c.k && c.gating == GATING_CHOSEN; i++)
        score[(size_t)id[i]] = expf(score[(size_t)id[i]] - best_logit);
    for (int i = 0; i < c.k; i++) sum += score[(size_t)id[i]];
    for (int i = 0; i < c.k; i++) {
        float want = score[(size_t)id[i]] * (c.norm || c.gating == GATING_CHOSEN ? factor / sum : factor);
        bad += want == want ? !(fabsf(weight[i] - want) <= 1e-5f * want) : weight[i] == weight[i];
    }
    return bad;
}

/* The choices of token t, best first, from the jobs of a decode forward; false: the jobs are not as they should be. */
static bool job_choices(const struct route_case &c, int t, const double *logits, const std::vector<float> &bias,
                        int n_jobs, const std::vector<struct expert_job> &jobs, const std::vector<float> &job_weight,
                        int32_t *id, float *weight) {
    std::vector<float> score((size_t)c.n_expert), pick((size_t)c.n_expert);
    std::vector<std::pair<int32_t, float>> found;
    bool ok = n_jobs >= 1 && n_jobs <= (int)jobs.size();
    for (int j = 0; ok && j < n_jobs; j++) {
        const struct expert_job &job = jobs[(size_t)j];
        ok = job.tokens && !(job.tokens >> c.n_tok) && job.expert < c.n_expert &&
             job.expert > (j ? jobs[(size_t)(j - 1)].expert : -1);
        if (job.tokens >> t & 1) found.push_back({job.expert, job_weight[(size_t)(j * DECODE_MAX_TOKENS + t)]});
    }
    if (!ok || (int)found.size() != c.k) return false;
    route_plain(c, logits, bias, score, pick);
    std::stable_sort(found.begin(), found.end(),
                     [&](const auto &a, const auto &b) { return pick[(size_t)a.first] > pick[(size_t)b.first]; });
    for (int i = 0; i < c.k; i++) id[i] = found[(size_t)i].first, weight[i] = found[(size_t)i].second;
    return true;
}

static void run_route(const struct route_case &c) {
    const size_t n_embd = (size_t)c.n_embd;
    const float small = c.n_embd > 72 ? 8 / sqrtf((float)n_embd) : 1; /* of weights */
    const size_t n = (size_t)c.n_tok, n_expert = (size_t)c.n_expert, k = (size_t)c.k;
    std::vector<float> x(n * n_embd), bias(n_expert), logit_bias(n_expert), shared(n_embd), w32;
    std::vector<uint16_t> w16;
    /* whole numbers make sums exact, hence equal ones equal everywhere */
    for (float &v : x) v = c.ties ? (float)(int)(rnd() % 5) - 2 : uniform();
    for (float &v : bias) v = c.ties ? (float)(rnd() % 3) / 8 : uniform() / 4;
    for (float &v : shared) v = uniform() * small;
    const std::vector<float> base = x, partial = random_floats((int)x.size(), 1), norm = random_floats((int)n_embd, 1),
                             norm16 = c.bf16 ? random_floats((int)n_embd, 1) : norm;
    std::vector<double> want16; /* of the norm in halves */
    for (size_t t = 0; t < n && c.input; t++) {
        double ss = 0;
        for (size_t i = t * n_embd; i < (t + 1) * n_embd; i++)
            x[i] = base[i] + partial[i], ss += (double)x[i] * (double)x[i];
        for (size_t i = 0; i < n_embd; i++) {
            const double unit = (double)x[t * n_embd + i] / sqrt(ss / (double)n_embd + 1e-6);
            x[t * n_embd + i] = (float)(unit * (double)norm[i]);
            want16.push_back(unit * (double)norm16[i]);
        }
    }
    for (size_t e = 0; e < n_expert && c.logit_bias; e++) {
        logit_bias[e] = c.ties ? (float)(rnd() % 3) / 8 : 2 * uniform();
        if (c.not_finite && e % 5 > 2) logit_bias[e] = e % 5 == 3 ? NAN : -INFINITY;
    }
    for (size_t i = 0; i < n_expert * n_embd; i++) {
        float v = c.ties ? (i / n_embd % 3 == 1 ? f32_from_bits(f32_to_bits(w32[i - n_embd]))
                                                : (float)(int)(rnd() % 3) / 16 - 0.0625f)
                         : bf16_to_f32(bf16_from_f32(uniform() * small));
        w32.push_back(v), w16.push_back(bf16_from_f32(v));
    }
    gpu_array<float> xd(x), bias_d(bias), logit_bias_d(logit_bias), w32_d(w32), logits(n * n_expert), weight(n * k),
        shared_d(shared), shared_weight(DECODE_MAX_TOKENS);
    gpu_array<uint16_t> w16_d(w16);
    const bool decode = c.n_tok <= DECODE_MAX_TOKENS;
    const size_t max_jobs = min(n * k, n_expert);
    gpu_array<struct expert_job> jobs(max_jobs);
    gpu_array<float> job_weight(max_jobs * DECODE_MAX_TOKENS);
    gpu_array<int32_t> id(n * k), n_jobs(std::vector<int32_t>{-1});
    gpu_array<uint32_t> arrived(std::vector<uint32_t>{0});
    struct route_args p = {};
    (c.bf16 ? (const void *&)p.w16 : (const void *&)p.w32) = c.bf16 ? (const void *)w16_d.p : (const void *)w32_d.p;
    p.bias = c.bias ? bias_d.p : NULL, p.logit_bias = c.logit_bias ? logit_bias_d.p : NULL, p.x = xd, p.logits = logits,
    p.id = id, p.weight = weight;
    gpu_array<float> base_d(base), delta_d(partial), norm_d(norm), norm16_d(norm16), sum_d(x.size());
    gpu_array<uint16_t> half(x.size());
    if (c.input)
        p.input = {base_d, delta_d, norm_d, 1e-6f, c.n_embd, sum_d, half, c.bf16 ? norm16_d.p : NULL}, p.x = NULL;
    p.prefetch.count = 1, p.prefetch.at[0] = (const uint8_t *)w32_d.p, p.prefetch.n[0] = 256;
    p.n_tok = c.n_tok, p.n_embd = c.n_embd, p.n_expert = c.n_expert, p.k = c.k, p.n_group = c.n_group;
    p.n_group_used = c.n_group_used, p.gating = c.gating, p.norm = c.norm, p.factor = 2.5f;
    p.arrived = arrived, p.n_jobs = n_jobs, p.jobs = jobs, p.job_weight = job_weight;
    p.shared = c.norm ? shared_d.p : NULL, p.shared_weight = shared_weight;
    for (int turn = 0; turn < 2; turn++) { /* the second finds what the first left */
        xd.arrive(), delta_d.arrive();
        if (decode) {
            route_decode(&p, test_stream);
        } else {
            LAUNCH_PDL(k_route_logits, dim3(ceil_div(c.n_expert, 64), ceil_div(c.n_tok, 64)), 256, 0, test_stream, p);
            LAUNCH_PDL(k_route_prefill, ceil_div(c.n_tok, 4), 128, 4 * 2 * sizeof(float) * n_expert, test_stream, p);
        }
        finish("the router");
        std::vector<int32_t> ids = id.get();
        std::vector<float> weights = weight.get();
        std::vector<double> want(n_expert);
        int bad = 0;
        for (size_t t = 0; t < n; t++) {
            for (size_t e = 0; e < n_expert; e++) {
                want[e] = (double)logit_bias[e];
                for (size_t i = 0; i < n_embd; i++) want[e] += (double)w32[e * n_embd + i] * (double)x[t * n_embd + i];
            }
            const bool listed = !decode || job_choices(c, (int)t, want.data(), bias, n_jobs.get()[0], jobs.get(),
                                                       job_weight.get(), &ids[t * k], &weights[t * k]);
            bad += listed ? check_route(c, want.data(), bias, &ids[t * k], &weights[t * k], 2.5f) : c.k;
        }
        if (decode) bad += arrived.get()[0] != 0;
        const std::vector<uint16_t> h16 = half.get();
        for (size_t i = 0; i < want16.size(); i++)
            bad += !(fabs((double)f16_to_f32(h16[i]) - want16[i]) <= 6e-4 * fabs(want16[i]) + 1e-7);
        std::vector<float> gates = shared_weight.get();
        for (size_t t = 0; t < n && p.shared && decode; t++) {
            double dot = 0;
            for (size_t i = 0; i < n_embd; i++) dot += (double)shared[i] * (double)x[t * n_embd + i];
            bad += !(fabs((double)gates[t] - 1 / (1 + exp(-dot))) <= 1e-5);
        }
        expect(
            !bad,
            "%d tokens of %d, input %d, %d of %d experts, %d of %d groups, gating %d norm %d biases %d %d bf16 %d ties "
            "%d: %d wrong",
            c.n_tok, c.n_embd, c.input, c.k, c.n_expert, c.n_group_used, c.n_group, c.gating, c.norm, c.bias,
            c.logit_bias, c.bf16, c.ties, bad);
    }
}

/* Logits of prefill against sums in double precision: rows of BF16, and of F32 that halves do not hold. Columns have
 * scales from 1e-4 to 1e3, and some weights are below the range of halves. */
static void run_logits(int n_tok, int n_expert, int n_embd, bool bf16) {
    const size_t n = (size_t)n_tok, experts = (size_t)n_expert, cols = (size_t)n_embd;
    std::vector<float> x(n * cols), w32(experts * cols);
    std::vector<uint16_t> w16;
    for (size_t i = 0; i < x.size(); i++) x[i] = (float)normal() * (float)pow(10, (double)(i % cols % 8) - 4);
    for (float &v : w32) {
        v = uniform() * (rnd() % 16 ? 0.1f : 1e-7f);
        if (bf16) v = bf16_to_f32(bf16_from_f32(v));
        w16.push_back(bf16_from_f32(v));
    }
    gpu_array<float> xd(x), w32_d(w32), logits(n * experts);
    gpu_array<uint16_t> w16_d(w16);
    struct route_args p = {};
    (bf16 ? (const void *&)p.w16 : (const void *&)p.w32) = bf16 ? (const void *)w16_d.p : (const void *)w32_d.p;
    p.x = xd, p.logits = logits, p.n_tok = n_tok, p.n_embd = n_embd, p.n_expert = n_expert;
    xd.arrive();
    LAUNCH_PDL(k_route_logits, dim3(ceil_div(n_expert, 64), ceil_div(n_tok, 64)), 256, 0, test_stream, p);
    finish("the router's logits");
    std::vector<float> got = logits.get();
    double worst = 0, plain = 0; /* errors, as parts of the sum of the products' sizes; plain: of a sum in floats */
    for (size_t i = 0; i < got.size(); i++) {
        double want = 0, size = 0;
        float sum = 0;
        for (size_t k = 0; k < cols; k++) {
            const double a = (double)x[i / experts * cols + k] * (double)w32[i % experts * cols + k];
            want += a, size += fabs(a);
            sum += x[i / experts * cols + k] * w32[i % experts * cols + k];
        }
        worst = fmax(worst, !(fabsf(got[i]) < 1e30f) ? 1 : fabs((double)got[i] - want) / size);
        plain = fmax(plain, fabs((double)sum - want) / size);
    }
    expect(worst <= 1e-6, "%d tokens, %d experts, %d columns, bf16 %d: error %.1e, that of floats %.1e", n_tok,
           n_expert, n_embd, bf16, worst, plain);
}

/* The last n_zero outputs of a router are zero-computation experts: they are in no list, and the weights of the others
 * are as if they were experts. */
static void run_route_zero(int n_tok, int n_expert, int n_zero, int k) {
    enum { EMBD = 72 };
    const size_t n = (size_t)n_tok, outputs = (size_t)n_expert, most = n * (size_t)k;
    const bool decode = n_tok <= DECODE_MAX_TOKENS;
    gpu_array<float> x(random_floats(n_tok * EMBD, 1)), w(random_floats(n_expert * EMBD, 0.5)),
        bias(random_floats(n_expert, 0.02)), logits(n * outputs), weight(most), job_weight(most * DECODE_MAX_TOKENS),
        zero_weight(n);
    gpu_array<int32_t> id(most), inverse(std::vector<int32_t>(most, 7)), n_jobs(std::vector<int32_t>{-1});
    gpu_array<struct expert_job> jobs(most);
    gpu_array<uint32_t> arrived(std::vector<uint32_t>{0});
    struct route_args p = {};
    p.w32 = w, p.bias = bias, p.x = x, p.logits = logits, p.id = id, p.inverse = inverse, p.weight = weight;
    p.n_tok = n_tok, p.n_embd = EMBD, p.n_expert = n_expert, p.k = k, p.n_group = p.n_group_used = 1;
    p.gating = GATING_SOFTMAX, p.factor = 6, p.zero_weight = zero_weight;
    p.arrived = arrived, p.n_jobs = n_jobs, p.jobs = jobs, p.job_weight = job_weight;
    std::vector<int32_t> ids[2];
    std::vector<float> weights[2], of_jobs[2];
    std::vector<struct expert_job> list[2];
    for (int turn = 0; turn < 2; turn++) { /* all are experts, then the last are not */
        p.n_zero = turn ? n_zero : 0;
        x.arrive();
        if (decode) route_decode(&p, test_stream);
        else {
            LAUNCH_PDL(k_route_logits, dim3(ceil_div(n_expert, 64), ceil_div(n_tok, 64)), 256, 0, test_stream, p);
            LAUNCH_PDL(k_route_prefill, ceil_div(n_tok, 4), 128, 4 * 2 * sizeof(float) * outputs, test_stream, p);
        }
        finish("the router");
        ids[turn] = id.get(), weights[turn] = weight.get(), of_jobs[turn] = job_weight.get(), list[turn] = jobs.get();
        list[turn].resize(decode ? (size_t)n_jobs.get()[0] : 0);
    }
    const int stored = n_expert - n_zero;
    const std::vector<float> sums = zero_weight.get();
    const std::vector<int32_t> at = inverse.get();
    std::vector<double> want(n);
    int bad = 0, zeros = 0;
    size_t kept = 0;
    for (size_t i = 0; i < most && !decode; i++) {
        const bool zero = ids[0][i] >= stored;
        bad += ids[1][i] != (zero ? -1 : ids[0][i]) || at[i] != (zero ? -1 : 7) || weights[1][i] != weights[0][i];
        if (zero) want[i / (size_t)k] += (double)weights[0][i], zeros++;
    }
    for (size_t j = 0; j < list[0].size(); j++) {
        const struct expert_job &job = list[0][j];
        if (job.expert < stored)
            bad += ++kept > list[1].size() || list[1][j].expert != job.expert || list[1][j].tokens != job.tokens;
        for (size_t t = 0; t < n; t++) {
            const size_t own = j * DECODE_MAX_TOKENS + t;
            if (!(job.tokens >> t & 1)) continue;
            if (job.expert < stored) bad += of_jobs[1][own] != of_jobs[0][own];
            else want[t] += (double)of_jobs[0][own], zeros++;
        }
    }
    for (size_t t = 0; t < n; t++) bad += !(fabs((double)sums[t] - want[t]) <= 1e-6 * (want[t] + 1));
    expect(!bad && zeros && kept == list[1].size(),
           "%d tokens, %d outputs, %d without computation: %d wrong, %d of these", n_tok, n_expert, n_zero, bad, zeros);
}

extern "C" void cuda_test_router(void) {
    begin_test(4);
    for (int n : {1, 3, 8, 16, 67}) run_route_zero(n, 40, 13, 7), run_route_zero(n, 768, 256, 12);
    static const struct {
        int n_expert, k, n_group, n_group_used;
    } shapes[] = {{1, 1, 1, 1},    {8, 8, 1, 1},   {33, 5, 1, 1},   {64, 6, 8, 3},
                  {160, 8, 32, 4}, {32, 3, 32, 5}, {1024, 32, 1, 1}};
    static const int n_tok[] = {1, 3, 7, 16, 17, 67};
    int i = 0;
    for (auto &s : shapes)
        for (int n : n_tok) {
            i += 5; /* all combinations of the flags in turn */
            struct route_case c = {n,
                                   s.n_expert,
                                   s.k,
                                   s.n_group,
                                   s.n_group_used,
                                   i & 1 ? GATING_SOFTMAX : GATING_SIGMOID,
                                   (i & 2) != 0,
                                   (i & 4) != 0,
                                   (i & 8) != 0,
                                   i % 3 == 0,
                                   false,
                                   false};
            run_route(c);
            c.ties = false, c.input = true; /* of norms none are equal */
            if (n <= 8) run_route(c);
        }
    for (int n : n_tok) {
        run_route({n, 128, 4, 1, 1, GATING_CHOSEN, false, false, true, false, true, false}); /* gpt-oss */
        run_route({n, 33, 5, 1, 1, GATING_CHOSEN, true, false, true, true, true, false});
        run_route({n, 64, 6, 8, 3, GATING_CHOSEN, false, false, false, false, true, true});
        run_route({n, 5, 4, 1, 1, GATING_CHOSEN, false, false, false, false, true, true});
        run_route({n, 64, 6, 1, 1, GATING_SOFTMAX, true, true, false, false, false, false}); /* ERNIE 4.5 */
        run_route({n, 40, 7, 1, 1, GATING_SOFTMAX, false, true, false, false, true, n > 1});
        run_route({n, 40, 7, 1, 1, GATING_SIGMOID, true, true, true, false, true, true});
    }
    for (bool bf16 : {false, true}) {
        run_logits(17, 70, 2056, bf16), run_logits(70, 8, 40, bf16);
        struct route_case c = {1, 20, 5, 1, 1, GATING_SIGMOID, true, true, bf16, false, true, false, 8200};
        for (int n : {1, 4, 16}) c.n_tok = n, run_route(c);
        c.input = true, c.n_embd = 4096;
        for (int n : {1, 4, 5}) c.n_tok = n, run_route(c);
        c.n_embd = 2600, c.n_tok = 8, run_route(c);
        for (int n : {1, 3, 7, 16, 17})
            for (enum gating gating :
                 {GATING_SOFTMAX, GATING_SIGMOID, GATING_SQRT_SOFTPLUS, GATING_CHOSEN, GATING_SPARSEMIXER})
                for (int input = 0; input <= (n < 8); input++)
                    run_route({n, bf16 ? 1024 : 112, 7, 8, 2, gating, bf16 && gating != GATING_SPARSEMIXER, bf16, bf16,
                               false, bf16, false, 72, input > 0});
    }
}

/* The sort of tokens by expert, the tiles of the grouped GEMM, and the weighted sums of expert outputs. */
static void run_sort(int n_tok, int k, int n_expert, int only, int width = 72) {
    const size_t n = (size_t)(n_tok * k);
    std::vector<int32_t> id, want_row, want_inverse(n), want_first;
    for (int t = 0; t < n_tok; t++) /* an expert in three has nothing, unless one has all */
        for (int j = 0; j < k; j++)
            id.push_back(only >= 0 ? only : (int)(rnd() % (uint32_t)n_expert) / 3 * 3 % n_expert);
    std::vector<int> counts;
    for (int e = 0; e < n_expert; e++) {
        want_first.push_back((int)want_row.size());
        for (size_t i = 0; i < n; i++)
            if (id[i] == e) want_inverse[i] = (int)want_row.size(), want_row.push_back((int)i / k);
        counts.push_back((int)want_row.size() - want_first.back());
    }
    want_first.push_back((int)n);
    tile_list want(counts);
    gpu_array<int32_t> id_d(id), row(n), inverse(n), first((size_t)n_expert + 1), tile_expert(want.first.size()),
        tile_first(want.first.size()), tile_count(want.first.size()), n_tiles(1);
    struct sort_args p = {id_d, (int)n, k, n_expert, row, inverse, first, tile_expert, tile_first, tile_count, n_tiles};
    std::vector<uint16_t> y(n * (size_t)width);
    std::vector<float> weight(n), out((size_t)(n_tok * width)), x((size_t)(n_tok * width)), gate(width);
    for (uint16_t &v : y) v = f16_from_f32(uniform());
    for (float &v : weight) v = uniform();
    for (float &v : out) v = uniform();
    for (float &v : x) v = uniform();
    for (float &v : gate) v = uniform();
    gpu_array<uint16_t> y_d(y);
    gpu_array<float> weight_d(weight), out_d(out), x_d(x), gate_d(gate);
    id_d.arrive();
    LAUNCH_PDL(k_sort, (unsigned)n_expert, 256, 0, test_stream, p);
    LAUNCH_PDL(k_tiles, 1, 1024, 0, test_stream, p, (int)TN);
    finish("sorting");
    std::vector<int32_t> e = tile_expert.get(), f = tile_first.get(), c = tile_count.get();
    bool tiles = n_tiles.get()[0] == want.n_tiles;
    for (size_t i = 0; i < (size_t)want.n_tiles; i++)
        tiles = tiles && e[i] == want.of_tile[i] && f[i] == want.first[i] && c[i] == want.count[i];
    error_sum sum[3], halves;
    gpu_array<uint16_t> half_d(out.size());
    y_d.arrive();
    LAUNCH_PDL(k_combine, (unsigned)n_tok, ROW_THREADS, 0, test_stream, y_d.p, inverse.p, weight_d.p, k, width, 0,
               (const float *)NULL, (const float *)NULL, (float *)NULL, half_d.p);
    finish("weighted sums in halves");
    const std::vector<uint16_t> h16 = half_d.get();
    for (int way = 0; way < 3; way++) { /* alone, added, added to gated rows */
        y_d.arrive(), x_d.arrive();
        LAUNCH_PDL(k_combine, (unsigned)n_tok, ROW_THREADS, 0, test_stream, y_d.p, inverse.p, weight_d.p, k, width,
                   (int)(way > 0), way > 1 ? gate_d.p : NULL, x_d.p, out_d.p, (uint16_t *)NULL);
        finish("weighted sums");
        std::vector<float> got = out_d.get();
        for (size_t i = 0; i < got.size(); i++) {
            double s = way ? (double)out[i] : 0, dot = 0;
            const size_t wide = (size_t)width;
            for (size_t g = 0; g < wide && way > 1; g++) dot += (double)gate[g] * (double)x[i / wide * wide + g];
            if (way > 1) s /= 1 + exp(-dot);
            for (size_t t = i / wide, j = t * (size_t)k; j < (t + 1) * (size_t)k; j++)
                s += (double)HIDDEN_SCALE * (double)weight[j] *
                     (double)f16_to_f32(y[(size_t)want_inverse[j] * wide + i % wide]);
            sum[way].add((double)got[i], s);
            if (!way) halves.add((double)f16_to_f32(h16[i]), s / (double)HIDDEN_SCALE);
        }
        out = got;
    }
    LAUNCH_PDL(k_combine, (unsigned)n_tok, ROW_THREADS, 0, test_stream, y_d.p, (const int32_t *)NULL, weight_d.p, 1,
               width, 0, (const float *)NULL, (const float *)NULL, out_d.p, (uint16_t *)NULL);
    finish("rows of results");
    int other = 0;
    const std::vector<float> plain = out_d.get();
    for (size_t i = 0; i < plain.size(); i++) other += plain[i] != HIDDEN_SCALE * f16_to_f32(y[i]);
    expect(!other, "%d rows of %d: %d values of a result are others", n_tok, width, other);
    LAUNCH_PDL(k_combine, (unsigned)n_tok, ROW_THREADS, 0, test_stream, y_d.p, inverse.p, (const float *)NULL, k, width,
               0, (const float *)NULL, (const float *)NULL, out_d.p, (uint16_t *)NULL);
    gpu_array<uint16_t> weighed_d(y.size());
    LAUNCH_PDL(k_weigh_inputs, (unsigned)n, ROW_THREADS, 0, test_stream, y_d.p, (size_t)width, inverse.p, weight_d.p, k,
               width, weighed_d.p);
    finish("weighted inputs");
    const std::vector<float> sums = out_d.get();
    const std::vector<uint16_t> weighed = weighed_d.get();
    error_sum unweighted;
    for (size_t i = 0; i < n * (size_t)width; i++) {
        const size_t wide = (size_t)width, choice = i / wide, col = i % wide, to = (size_t)want_inverse[choice] * wide;
        other += weighed[to + col] != f16_from_f32(weight[choice] * f16_to_f32(y[choice / (size_t)k * wide + col]));
        if (choice % (size_t)k) continue;
        double s = 0;
        for (size_t j = choice; j < choice + (size_t)k; j++)
            s += (double)HIDDEN_SCALE * (double)f16_to_f32(y[(size_t)want_inverse[j] * wide + col]);
        unweighted.add((double)sums[choice / (size_t)k * wide + col], s);
    }
    expect(!other && unweighted.nmse() <= 1e-12, "%d rows of %d: %d weighted inputs are others, sums %.1e", n_tok,
           width, other, unweighted.nmse());
    expect(row.get() == want_row && inverse.get() == want_inverse && first.get() == want_first && tiles &&
               sum[0].nmse() <= 1e-12 && sum[1].nmse() <= 1e-12 && sum[2].nmse() <= 1e-12 && halves.nmse() <= 1e-6,
           "%d tokens, %d of %d experts, all to %d: rows %d inverse %d firsts %d tiles %d sums %.1e %.1e %.1e %.1e",
           n_tok, k, n_expert, only, row.get() == want_row, inverse.get() == want_inverse, first.get() == want_first,
           tiles, sum[0].nmse(), sum[1].nmse(), sum[2].nmse(), halves.nmse());
}

/* The sort and the sums where choices are zero-computation experts, and what these add. Rows that no expert has are not
 * numbers. */
static void run_sort_zero(int n_tok, int k, int n_expert, int width) {
    const size_t n = (size_t)(n_tok * k), wide = (size_t)width;
    std::vector<int32_t> id, none;
    for (size_t i = 0; i < n; i++)
        id.push_back(rnd() % 3 && i >= (size_t)k ? (int)(rnd() % (uint32_t)n_expert) : -1), none.push_back(-1);
    gpu_array<int32_t> id_d(id), row(n), inverse(none), first((size_t)n_expert + 1);
    const std::vector<float> weight = random_floats((int)n, 1), zero = random_floats(n_tok, 1),
                             x = random_floats(n_tok * width, 1);
    gpu_array<float> weight_d(weight), zero_d(zero), x_d(x), out_d(n_tok * wide);
    struct sort_args p = {};
    p.id = id_d, p.n_choices = (int)n, p.k = k, p.n_expert = n_expert;
    p.row = row, p.inverse = inverse, p.first = first;
    id_d.arrive();
    LAUNCH_PDL(k_sort, (unsigned)n_expert, 256, 0, test_stream, p);
    finish("sorting");
    const std::vector<int32_t> at = inverse.get();
    const int listed = first.get()[(size_t)n_expert];
    std::vector<uint16_t> y(n * wide, 0x7E00);
    for (size_t i = 0; i < (size_t)listed * wide; i++) y[i] = f16_from_f32(uniform());
    gpu_array<uint16_t> y_d(y);
    int bad = 0, want = 0;
    for (size_t i = 0; i < n; i++) bad += (at[i] < 0) != (id[i] < 0) || at[i] >= listed, want += id[i] >= 0;
    y_d.arrive();
    LAUNCH_PDL(k_combine, (unsigned)n_tok, ROW_THREADS, 0, test_stream, y_d.p, inverse.p, weight_d.p, k, width, 0,
               (const float *)NULL, (const float *)NULL, out_d.p, (uint16_t *)NULL);
    LAUNCH_PDL(k_add_inputs, (unsigned)n_tok, ROW_THREADS, 0, test_stream, x_d.p, zero_d.p, width, out_d.p);
    finish("sums and inputs");
    const std::vector<float> got = out_d.get();
    error_sum sum;
    for (size_t i = 0; i < got.size() && !bad; i++) {
        const size_t t = i / wide;
        double s = (double)zero[t] * (double)x[i];
        for (size_t j = t * (size_t)k; j < (t + 1) * (size_t)k; j++)
            if (at[j] >= 0)
                s += (double)HIDDEN_SCALE * (double)weight[j] * (double)f16_to_f32(y[(size_t)at[j] * wide + i % wide]);
        sum.add((double)got[i], s);
    }
    expect(!bad && listed == want && sum.nmse() <= 1e-12, "%d tokens, %d of %d experts or none: %d wrong, sums %.1e",
           n_tok, k, n_expert, bad, sum.nmse());
}

extern "C" void cuda_test_sort(void) {
    begin_test(5);
    run_sort_zero(17, 3, 7, 72), run_sort_zero(130, 12, 33, 40), run_sort_zero(2, 7, 9, 3960);
    run_sort(17, 1, 1, -1), run_sort(17, 2, 7, -1), run_sort(130, 8, 33, -1), run_sort(300, 1, 160, 3);
    run_sort(40, 6, 1024, -1), run_sort(257, 1, 1024, 1023), run_sort(1009, 2, 5, -1);
    run_sort(2, 7, 9, -1, 3960);
}

/* ---- between ranks ---- */

/* Batches that one stream hands to another faster than that takes them, each from and to the same place. */
static void run_send_recv(int n_row, int n_col) {
    enum { TURNS = 5 };
    const size_t n = (size_t)n_row * (size_t)n_col;
    cudaStream_t receiver;
    must(cudaStreamCreate(&receiver), "a stream");
    std::vector<float> v(n * TURNS);
    for (float &x : v) x = uniform();
    gpu_array<float> data(v), src(n), landing(n), dst(n), out(n * TURNS);
    gpu_array<uint32_t> flags(std::vector<uint32_t>(2)), state(std::vector<uint32_t>(2 * sizeof(struct sequence) / 4)),
        heartbeat(std::vector<uint32_t>(sizeof(struct heartbeat) / 4));
    const size_t words = sizeof(struct sequence) / 4;
    for (int t = 0; t < TURNS; t++) {
        const struct tp_rank from = {0, 1, ALLREDUCE_SLOT, (struct sequence *)state.p, (struct heartbeat *)heartbeat.p};
        const struct tp_rank to = {0, 1, ALLREDUCE_SLOT, (struct sequence *)(state.p + words),
                                   (struct heartbeat *)heartbeat.p};
        const size_t at = n * (size_t)t, stride = (size_t)n_col;
        LAUNCH_PDL(k_arrive, 4, 256, 0, test_stream, (uint32_t *)src.p, (const uint32_t *)(data.p + at), n);
        struct send_args h = {}, k = {};
        h.p = from, h.channel = CH_SEND, h.wait_flag = flags.p, h.n_wait = 1, h.src = src, h.dst = landing;
        h.src_stride = h.dst_stride = stride, h.n_row = n_row, h.n_col = n_col, h.signal = flags.p + 1;
        LAUNCH_PDL(k_send_rows, ALLREDUCE_BLOCKS / 4, 256, 0, test_stream, h);
        k = h, k.p = to, k.channel = CH_RECV, k.wait_flag = flags.p + 1, k.src = landing, k.dst = dst,
        k.signal = flags.p;
        LAUNCH_PDL(k_send_rows, ALLREDUCE_BLOCKS / 4, 256, 0, receiver, k);
        LAUNCH_PDL(k_arrive, 4, 256, 0, receiver, (uint32_t *)(out.p + at), (const uint32_t *)dst.p, n);
    }
    finish("handing over");
    must(cudaStreamSynchronize(receiver), "taking over");
    const std::vector<float> got = out.get();
    for (int t = 0; t < TURNS; t++)
        expect(!memcmp(&got[n * (size_t)t], &v[n * (size_t)t], n * sizeof(float)), "%d x %d: batch %d came otherwise",
               n_row, n_col, t);
    /* as kernels of a slow GPU do, and of one that others use */
    if (heartbeat.get()[1]) fprintf(stderr, "  note: a kernel waited for another stream for over 10 ms\n");
    must(cudaStreamDestroy(receiver), "a stream");
}

/* Ids that the root hands to two other ranks, each from and to the same place. */
static void run_share_token() {
    enum { TURNS = 4, RANKS = 3 };
    std::vector<float> v(TURNS);
    for (int i = 0; i < TURNS; i++) {
        const int32_t id = 7 + 1000 * i;
        memcpy(&v[i], &id, sizeof id);
    }
    gpu_array<float> data(v), id(RANKS), out(TURNS * RANKS);
    gpu_array<int32_t> slot(4 * RANKS);
    gpu_array<uint32_t> flags(std::vector<uint32_t>(RANKS, 0u)), heartbeat(std::vector<uint32_t>(3));
    const size_t words = sizeof(struct sequence) / 4;
    gpu_array<uint32_t> state(std::vector<uint32_t>(RANKS * words, 0u));
    cudaStream_t stream[RANKS] = {test_stream};
    for (int i = 1; i < RANKS; i++) must(cudaStreamCreate(&stream[i]), "a stream");
    for (int t = 0; t < TURNS; t++) {
        LAUNCH_PDL(k_arrive, 1, 256, 0, test_stream, (uint32_t *)id.p, (const uint32_t *)(data.p + t), (size_t)1);
        for (int i = 0; i < RANKS; i++) {
            struct token_args a = {};
            a.p = {i, RANKS, ALLREDUCE_SLOT, (struct sequence *)(state.p + (size_t)i * words),
                   (struct heartbeat *)heartbeat.p};
            a.id = (int32_t *)(id.p + i);
            a.own.token = slot.p + 4 * i, a.own.token_flag = flags.p + i;
            for (int k = 1; k < RANKS && !i; k++, a.n_other++)
                a.other[a.n_other].token = slot.p + 4 * k, a.other[a.n_other].token_flag = flags.p + k;
            LAUNCH_PDL(k_share_token, 1, WARP, 0, stream[i], a);
            LAUNCH_PDL(k_arrive, 1, 256, 0, stream[i], (uint32_t *)(out.p + t * RANKS + i),
                       (const uint32_t *)(id.p + i), (size_t)1);
        }
        finish("sharing an id");
        for (int i = 1; i < RANKS; i++) must(cudaStreamSynchronize(stream[i]), "an id");
    }
    const std::vector<float> got = out.get();
    for (int i = 0; i < TURNS * RANKS; i++)
        expect(!memcmp(&got[(size_t)i], &v[(size_t)(i / RANKS)], sizeof(float)), "turn %d: rank %d has another id",
               i / RANKS, i % RANKS);
    for (int i = 1; i < RANKS; i++) must(cudaStreamDestroy(stream[i]), "a stream");
}

/* Returns the factor that gives a row an RMS of 1. */
static double rms_factor(const float *x, int n) {
    double ss = 0;
    for (int i = 0; i < n; i++) ss += (double)x[i] * (double)x[i];
    return 1 / sqrt(ss / n + 1e-6);
}

/* The all-reduce kernel over one or two ranks, several times after each other. Its blocks have several rows, whose norms
 * must not mix. */
static void run_all_reduce(int ranks, int n_tok, int n, int blocks) {
    enum { TURNS = 2 };
    const size_t count = (size_t)n_tok * (size_t)n, words = sizeof(struct sequence) / 4;
    gpu_array<uint32_t> state(std::vector<uint32_t>((size_t)ranks * words, 0u)),
        flags(std::vector<uint32_t>((size_t)(ranks * ranks * ALLREDUCE_BLOCKS), 0u)),
        heartbeat(std::vector<uint32_t>(3));
    const size_t slots_of = 2 * (size_t)ranks * ALLREDUCE_SLOT + count; /* what one rank receives may exceed a slot */
    gpu_array<float> slots(ranks > 1 ? (size_t)ranks * slots_of : 1);
    std::vector<cudaStream_t> stream((size_t)ranks, test_stream);
    for (int k = 1; k < ranks; k++) must(cudaStreamCreate(&stream[(size_t)k]), "a stream");
    for (int turn = 0; turn < TURNS; turn++) {
        std::vector<float> x(count), w((size_t)n), sum(count, 0.0f);
        std::vector<gpu_array<float> *> owned;
        std::vector<struct norm_args> args((size_t)ranks);
        for (size_t i = 0; i < count; i++) x[i] = (float)normal() * (float)(1 + i / (size_t)n % 7);
        for (float &f : w) f = 1 + uniform() / 2;
        gpu_array<float> gw(w);
        gpu_array<uint16_t> g16((size_t)ranks * count);
        auto keep = [&](auto from) { return owned.emplace_back(new gpu_array<float>(from))->p; };
        for (int k = 0; k < ranks; k++) {
            struct norm_args &a = args[(size_t)k];
            const std::vector<float> d = random_floats((int)count, 1);
            for (size_t i = 0; i < count; i++) sum[i] = k ? sum[i] + d[i] : d[i];
            a = {};
            a.x = a.sum = keep(x), a.partial = keep(d), a.h32 = keep(count), a.h16 = g16 + (size_t)k * count;
            a.weight = gw, a.eps = 1e-6f, a.n = n, a.n_tok = n_tok;
            a.p = {k, ranks, ALLREDUCE_SLOT, (struct sequence *)(state.p + (size_t)k * words),
                   (struct heartbeat *)heartbeat.p};
            for (int to = 0; to < ranks && ranks > 1; to++) {
                a.slot[to] = slots + (size_t)to * slots_of;
                a.flag[to] = flags + to * ranks * ALLREDUCE_BLOCKS;
            }
        }
        for (size_t i = 0; i < count; i++) sum[i] += x[i];
        owned[1]->arrive();
        for (int k = 0; k < ranks; k++) add_norm<PARTIAL_PUSHED>(&args[(size_t)k], (unsigned)blocks, stream[(size_t)k]);
        finish("a sum");
        for (int k = 1; k < ranks; k++) must(cudaStreamSynchronize(stream[(size_t)k]), "a sum");
        struct error_sum e;
        bool exact = true;
        for (int k = 0; k < ranks; k++) {
            const std::vector<float> got = owned[(size_t)(3 * k)]->get(), norm = owned[(size_t)(3 * k + 2)]->get();
            exact &= got == sum;
            for (size_t t = 0; t < (size_t)n_tok; t++) {
                const double f = rms_factor(&sum[t * (size_t)n], n);
                for (size_t i = 0; i < (size_t)n; i++)
                    e.add((double)norm[t * (size_t)n + i], (double)sum[t * (size_t)n + i] * f * (double)w[i]);
            }
        }
        expect(exact && e.nmse() < 1e-10, "sum of %d x %d over %d ranks in %d blocks: NMSE %.2e, sums %s", n_tok, n,
               ranks, blocks, e.nmse(), exact ? "right" : "wrong");
        for (gpu_array<float> *p : owned) delete p;
    }
    for (int k = 0; k < ranks; k++)
        expect(state.get()[(size_t)k * words + CH_ALLREDUCE] == TURNS, "the all-reduce was not counted");
    expect(heartbeat.get()[0] == (n_tok > 16 ? TURNS : 1), "the all-reduce has another heartbeat");
    for (int k = 1; k < ranks; k++) must(cudaStreamDestroy(stream[(size_t)k]), "a stream");
}

/* Norms of whole rows over `ranks` ranks, of which the last has a copy of the keys of the one before; several after each
 * other. */
static void run_row_norm(int ranks, int blocks, int head = 36) {
    enum { TURNS = 3 };
    const int n_tok[TURNS] = {head > 36 ? 2 : 16, 1, head > 36 ? 1 : 5};
    const size_t words = sizeof(struct sequence) / 4;
    gpu_array<uint32_t> state(std::vector<uint32_t>((size_t)ranks * words, 0u)),
        flags(std::vector<uint32_t>((size_t)(ranks * ranks * ALLREDUCE_BLOCKS), 0u)),
        heartbeat(std::vector<uint32_t>(3));
    gpu_array<float> slots((size_t)(ranks * 2 * ranks * ALLREDUCE_SLOT)), sums(2 * 2 * DECODE_MAX_TOKENS);
    std::vector<cudaStream_t> stream((size_t)ranks, test_stream);
    for (int k = 1; k < ranks; k++) must(cudaStreamCreate(&stream[(size_t)k]), "a stream");
    for (int turn = 0; turn < TURNS; turn++) {
        std::vector<std::vector<float>> x[2], weight[2];
        std::vector<gpu_array<float> *> owned;
        std::vector<struct row_norm_args> args((size_t)ranks);
        int whole[2] = {0, 0};
        for (int k = 0; k < ranks; k++) {
            const bool copy = ranks > 1 && k == ranks - 1;
            struct row_norm_args &a = args[(size_t)k];
            a = {};
            for (int i = 0; i < 2; i++) {
                const int n = i && copy ? (int)weight[1].back().size() : head * (i ? 1 + k % 2 : 40 - 7 * (k % 5));
                const int stride = n + 4;
                std::vector<float> rows = random_floats(n_tok[turn] * stride, 1 + k);
                if (i && copy) rows = x[1].back();
                x[i].push_back(rows);
                weight[i].push_back(i && copy ? weight[i].back() : random_floats(n, 1));
                whole[i] += i && copy ? 0 : n;
                a.n[i] = n, a.stride[i] = (size_t)stride, a.counted[i] = !(i && copy);
                owned.push_back(new gpu_array<float>(rows)), a.x[i] = owned.back()->p;
                owned.push_back(new gpu_array<float>(weight[i].back())), a.weight[i] = owned.back()->p;
            }
            a.eps = 1e-6f, a.n_tok = n_tok[turn], a.sharing = turn & 1;
            a.p = {k, ranks, ALLREDUCE_SLOT, (struct sequence *)(state.p + (size_t)k * words),
                   (struct heartbeat *)heartbeat.p};
            for (int to = 0; to < ranks; to++) {
                a.slot[to] = slots + to * 2 * ranks * ALLREDUCE_SLOT;
                a.flag[to] = flags + to * ranks * ALLREDUCE_BLOCKS;
            }
        }
        for (int k = 0; k < ranks; k++) {
            struct row_norm_args &a = args[(size_t)k];
            for (int i = 0; i < 2; i++) a.whole[i] = whole[i];
            const int rows = 2 * n_tok[turn];
            if (!k) owned[0]->arrive();
            if (ranks == 1 && turn & 1) { /* with an all-reduce between the two */
                a.own = sums, a.all = sums + rows;
                LAUNCH_PDL((k_row_norm<ROW_SQUARES>), (unsigned)(rows + 1) / 2, NORM_THREADS, 0, test_stream, a);
                LAUNCH_PDL(k_arrive, 4, 256, 0, test_stream, (uint32_t *)a.all, (const uint32_t *)a.own, (size_t)rows);
                LAUNCH_PDL((k_row_norm<ROW_SCALE>), (unsigned)rows, NORM_THREADS, 0, test_stream, a);
            } else if (ranks == 1)
                LAUNCH_PDL((k_row_norm<ROW_SQUARES | ROW_SCALE>), (unsigned)(rows + 1) / 2, NORM_THREADS, 0,
                           test_stream, a);
            else
                LAUNCH_PDL((k_row_norm<ROW_SQUARES | ROW_EXCHANGE | ROW_SCALE>), (unsigned)min(rows, blocks),
                           NORM_THREADS, 0, stream[(size_t)k], a);
        }
        finish("norms of rows");
        for (int k = 1; k < ranks; k++) must(cudaStreamSynchronize(stream[(size_t)k]), "norms of rows");
        error_sum sum;
        int gaps = 0;
        std::vector<float> last;
        for (int k = 0; k < ranks; k++)
            for (int i = 0; i < 2; i++) {
                const struct row_norm_args &a = args[(size_t)k];
                const std::vector<float> got = owned[(size_t)(4 * k + 2 * i)]->get();
                for (size_t t = 0; t < (size_t)n_tok[turn]; t++) {
                    double ss = 0;
                    for (size_t p = 0; p < (size_t)ranks; p++)
                        for (size_t c = 0; c < (size_t)args[p].n[i] && args[p].counted[i]; c++)
                            ss += pow((double)x[i][p][t * args[p].stride[i] + c], 2);
                    for (size_t c = 0; c < a.stride[i]; c++) {
                        const size_t at = t * a.stride[i] + c;
                        const float from = x[i][(size_t)k][at];
                        if (c >= (size_t)a.n[i]) gaps += got[at] != from;
                        else
                            sum.add((double)got[at],
                                    (double)from / sqrt(ss / whole[i] + 1e-6) * (double)weight[i][(size_t)k][c]);
                    }
                }
                if (i && !a.counted[1]) gaps += memcmp(got.data(), last.data(), got.size() * sizeof(float)) != 0;
                if (i) last = got;
            }
        expect(sum.nmse() <= 1e-12 && !gaps, "norms of %d rows, %d ranks, %d blocks: NMSE %.1e, %d values differ",
               2 * n_tok[turn], ranks, blocks, sum.nmse(), gaps);
        for (gpu_array<float> *p : owned) delete p;
    }
    if (ranks > 1) expect(state.get()[CH_ALLREDUCE] == TURNS, "norms of rows were not counted");
    for (int k = 1; k < ranks; k++) must(cudaStreamDestroy(stream[(size_t)k]), "a stream");
}

/* Kernels whose flags do not come end when the host tells them to. */
static void run_abort() {
    const size_t words = sizeof(struct sequence) / 4, flags = 2 * ALLREDUCE_BLOCKS;
    for (int kind = 0; kind < 4; kind++) {
        gpu_array<uint32_t> state(std::vector<uint32_t>(words, 0u)), heartbeat(std::vector<uint32_t>{0, 0, 1});
        gpu_array<uint32_t> flag(std::vector<uint32_t>(flags, 0u)), sent(std::vector<uint32_t>(flags, 0u));
        gpu_array<float> x(std::vector<float>(64, 1.0f)), slots(std::vector<float>(4 * ALLREDUCE_SLOT, 0.0f)), y(64);
        gpu_array<uint16_t> half(64);
        const struct tp_rank p = {0, 2, ALLREDUCE_SLOT, (struct sequence *)state.p, (struct heartbeat *)heartbeat.p};
        if (kind == 0) {
            struct send_args s = {};
            s.p = p, s.channel = CH_RECV, s.wait_flag = flag, s.n_wait = 1, s.src = x, s.dst = y;
            s.src_stride = s.dst_stride = 64, s.n_row = 1, s.n_col = 64;
            LAUNCH_PDL(k_send_rows, 1, 256, 0, test_stream, s);
        } else if (kind == 1) {
            struct token_args t = {};
            t.p = p, t.id = (int32_t *)y.p, t.own.token = (int32_t *)x.p, t.own.token_flag = flag;
            LAUNCH_PDL(k_share_token, 1, WARP, 0, test_stream, t);
        } else if (kind == 2) {
            struct row_norm_args r = {};
            for (int i = 0; i < 2; i++) {
                r.x[i] = x + 32 * i, r.weight[i] = x, r.n[i] = r.whole[i] = 32, r.counted[i] = true;
                r.slot[i] = slots, r.flag[i] = i ? sent : flag;
            }
            r.n_tok = 1, r.p = p;
            LAUNCH_PDL((k_row_norm<ROW_SQUARES | ROW_EXCHANGE | ROW_SCALE>), 1, NORM_THREADS, 0, test_stream, r);
        } else {
            struct norm_args n = {};
            n.x = x, n.sum = y, n.partial = x, n.n = 64, n.n_tok = 1, n.h16 = half, n.p = p;
            for (int i = 0; i < 2; i++) n.slot[i] = slots, n.flag[i] = i ? sent : flag;
            add_norm<PARTIAL_PUSHED>(&n, 1, test_stream);
        }
        finish("an abort");
        expect(((struct sequence *)state.get().data())->aborted == 1 && heartbeat.get()[1], "kernel %d does not say so",
               kind);
    }
}

extern "C" void cuda_test_links(void) {
    begin_test(8);
    run_abort();
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) run_row_norm(ranks, 3 * ranks);
    run_row_norm(1, 3, 396), run_row_norm(2, 2, 396);
    run_send_recv(1, 4), run_send_recv(5, 1000), run_send_recv(40, 260), run_share_token();
    run_all_reduce(1, 1, 64, 1), run_all_reduce(1, 40, 1000, 3), run_all_reduce(1, 50, 2052, 2);
    for (int n : {64, 5000, 9000}) run_all_reduce(2, 3, n, 2);
}

/* ---- attention ---- */

enum test_gates { NO_GATES, Q_GATES, SIGMOID_HEADS, SOFTPLUS_HEADS, SOFTPLUS_VALUES };

struct attn_case {
    bool mla, prefill, fp8;
    int dk, dv, n_kv, group, n_tok, absent; /* absent: tokens of n_tok that the batch does not have */
    int pos, splits;
    double size;              /* of q: large ones make scores of some hundreds */
    int window, ring;         /* keys that a token sees, rows of the cache tensors; 0: all, as many as there are keys */
    bool sinks, pairs, plain; /* plain: heads are not normed */
    enum test_gates gates;
    int top_k, block; /* tokens see so many keys, in chosen blocks of a power of two; 0: all */
    bool latents;     /* MLA in decode: its results themselves */
    bool pools;       /* top_k is of complete blocks, which all KV heads share; the keys after them are seen, too */
    bool several;     /* as a batch of several runs */
    int extent;       /* distances that have a bias; 0: there is none */
    bool grows;       /* GQA in decode: queries grow with the position, and values are normed */
    bool chunked;     /* the window begins anew after every `window` tokens */
    int block_size() const { return max(block, 1); }
    int most() const { return top_k + (pools ? block - 1 : 0); } /* keys that a token sees at most */
};

/* A cache tensor with random rows 0..len-1 of `width` values, and NaN after; a ring of so many rows has the latest. */
struct test_cache {
    std::vector<double> value; /* (len, width) */
    int ring;
    gpu_array<uint8_t> data;
    gpu_array<float> scale;
    struct cache_tensor p = {};
    test_cache(int len, int width, int group, bool fp8, int ring_rows = 0)
        : ring(ring_rows), data((size_t)(ring ? ring : len + 70) * row_bytes(width, fp8)),
          scale((size_t)(ring ? ring : len + 70) * (size_t)((width + group - 1) / group)) {
        const size_t bytes = row_bytes(width, fp8), n_scale = (size_t)((width + group - 1) / group);
        std::vector<uint8_t> rows(data.n, 0xFF);
        std::vector<float> scales(scale.n, NAN), x((size_t)width);
        value.resize((size_t)len * (size_t)width);
        for (size_t i = 0; i < (size_t)len; i++)
            for (int g = 0; g < (int)n_scale; g++) {
                double size = 0.5 * exp(0.5 * normal()); /* groups differ */
                float amax = 0;
                int begin = g * group, end = min(begin + group, width);
                for (int j = begin; j < end; j++)
                    x[(size_t)j] = (float)(normal() * size * (1 + j % 5)), amax = fmaxf(amax, fabsf(x[(size_t)j]));
                float s = fp8 ? amax / 448 : 1;
                if (fp8) scales[row(i) * n_scale + (size_t)g] = s;
                for (int j = begin; j < end; j++) {
                    uint8_t *to = &rows[row(i) * bytes + (size_t)(fp8 ? j : 2 * j)];
                    uint16_t h = bf16_from_f32(x[(size_t)j]);
                    if (fp8) *to = e4m3_from_f32(x[(size_t)j] / s);
                    else memcpy(to, &h, 2);
                    value[i * (size_t)width + (size_t)j] =
                        fp8 ? (double)e4m3_to_f32(*to) * (double)s : (double)bf16_to_f32(h);
                }
            }
        must(cudaMemcpy(data, rows.data(), rows.size(), cudaMemcpyHostToDevice), "a cache");
        must(cudaMemcpy(scale, scales.data(), scales.size() * sizeof(float), cudaMemcpyHostToDevice), "a cache");
        p = cache_make(fp8 ? KV_FP8 : KV_BF16, width, group);
        p.data = data;
        p.scale = scale;
        p.row_bytes = bytes;
        if (ring) p.kind = ROWS_RING, p.n_row = ring;
    }
    size_t row(size_t pos) const { return ring ? pos % (size_t)ring : pos; }
    static size_t row_bytes(int width, bool fp8) { return ((size_t)width * (fp8 ? 1 : 2) + 15) / 16 * 16 + 16; }
    /* Rows first..first+n-1 are what a kernel is about to write: in a ring they are still older ones, */
    void forget(int first, int n) {
        if (!ring) must(cudaMemset(data + (size_t)first * p.row_bytes, 0xFF, (size_t)n * p.row_bytes), "a cache");
    }
    /* and has written. */
    void read(int first, int n) {
        const std::vector<uint8_t> rows = data.get();
        const std::vector<float> scales = scale.get();
        for (int i = first; i < first + n; i++)
            for (int j = 0; j < p.width; j++) {
                const size_t at = row((size_t)i);
                const uint8_t *from = &rows[at * p.row_bytes + (size_t)(p.type == KV_FP8 ? j : 2 * j)];
                uint16_t h;
                memcpy(&h, from, p.type == KV_FP8 ? 1 : 2);
                value[(size_t)(i * p.width + j)] =
                    p.type == KV_FP8 ? (double)e4m3_to_f32(*from) *
                                           (double)scales[at * (size_t)p.n_scale + (size_t)(j / p.scale_block)]
                                     : (double)bf16_to_f32(h);
            }
    }
};

/* What a decode kernel makes queries and new rows of: (n_tok, heads * head) floats, of a head the first d. */
struct test_heads {
    enum { PAD = 8 }; /* values of a slot that layers of another kind have */
    std::vector<float> x;
    gpu_array<float> d;
    int stride, head, n;
    test_heads(int n_tok, int heads, int head_, int n_, double size)
        : x(random_floats(n_tok * (heads * head_ + PAD), size)), d(x), stride(heads * head_ + PAD), head(head_), n(n_) {
    }
    const float *row(int t, int h) const { return &x[(size_t)(t * stride + h * head)]; }
    /* Head h of token t, normed unless w is empty, and rotated. cs, sn: (n_tok, rope / 2) */
    std::vector<double> roped(int t, int h, const std::vector<float> &w, const std::vector<float> &cs,
                              const std::vector<float> &sn, int rope, bool pairs = false) const {
        std::vector<double> y;
        double ss = 0;
        const float *from = row(t, h);
        for (int i = 0; i < n; i++) ss += (double)from[i] * (double)from[i];
        for (int i = 0; i < n; i++)
            y.push_back((double)from[i] * (w.empty() ? 1 : (double)w[(size_t)i] / sqrt(ss / n + 1e-6)));
        for (int i = 0; i < rope / 2; i++) {
            const size_t first = (size_t)(pairs ? 2 * i : i), second = (size_t)(pairs ? 2 * i + 1 : i + rope / 2);
            const double a = y[first], b = y[second];
            const double c = (double)cs[(size_t)(t * rope / 2 + i)], s = (double)sn[(size_t)(t * rope / 2 + i)];
            y[first] = a * c - b * s;
            y[second] = a * s + b * c;
        }
        return y;
    }
};

/* The keys that a token at `pos` sees: all, the last of a window, or blocks of a list. */
static std::vector<int> attn_visible(const struct attn_case &c, int pos, const int32_t *list) {
    std::vector<int> keys;
    const bool chosen = c.top_k && pos >= c.most();
    const int first = c.chunked ? pos / c.window * c.window : c.window ? max(pos + 1 - c.window, 0) : 0;
    for (int x = first; x <= pos && !chosen; x++) keys.push_back(x);
    for (int x = (pos + 1) / c.block_size() * c.block_size(); x <= pos && chosen && c.pools; x++) keys.push_back(x);
    for (int i = 0; chosen && i < c.top_k / c.block; i++)
        for (int x = list[i] * c.block; x < (list[i] + 1) * c.block && x <= pos; x++) keys.push_back(x);
    return keys;
}

/* out (dv): attention of one query q (dk) at position pos of head h over those keys. sinks (heads); bias: of each
 * distance, of those beyond its end 0. */
static void attn_plain(const struct attn_case &c, const test_cache &k, const test_cache &v, const uint16_t *q, int h,
                       const std::vector<int> &keys, const std::vector<float> &sinks, int pos,
                       const std::vector<double> &bias, std::vector<double> &out) {
    const int kv = h / c.group, lat = c.mla ? c.dv : c.dk, width = c.mla ? c.dv : c.n_kv * c.dk, rest = c.dk - lat;
    double top = c.sinks ? (double)sinks[(size_t)h] : -INFINITY, den = 0;
    std::vector<double> s;
    std::vector<float> qf;
    for (int j = 0; j < c.dk; j++) qf.push_back(f16_to_f32(q[j]));
    for (int x : keys) {
        const double *key = &k.value[(size_t)(x * width + kv * c.dk * !c.mla)];
        double d = 0;
        for (int j = 0; j < lat; j++) d += (double)qf[(size_t)j] * key[j];
        for (int j = 0; j < rest; j++) d += (double)qf[(size_t)(lat + j)] * v.value[(size_t)(x * rest + j)];
        const size_t back = (size_t)(pos - x);
        s.push_back(d / sqrt(c.dk) + (back < bias.size() ? bias[back] : 0)), top = fmax(top, s.back());
    }
    for (double &o : out) o = 0;
    if (c.sinks) den = exp((double)sinks[(size_t)h] - top);
    for (size_t i = 0; i < keys.size(); i++) {
        const double f = exp(s[i] - top);
        const int x = keys[i];
        const double *val = c.mla ? &k.value[(size_t)(x * width)] : &v.value[(size_t)((x * c.n_kv + kv) * c.dv)];
        den += f;
        for (int j = 0; f > 1e-12 && j < c.dv; j++) out[(size_t)j] += f * val[j];
    }
    for (double &o : out) o /= den;
}

/* The squared error of x (n) in E4M3 with that scale: steps of 2^-3 of a power of two, and of 2^-9 below 2^-6. */
static double e4m3_squares(const double *x, size_t n, double scale) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        const double v = fabs(x[i]) / scale, step = exp2(floor(log2(fmax(v, 0x1p-6))) - 3);
        const double e = (v - rint(v / step) * step) * scale;
        sum += e * e;
    }
    return sum;
}

/* Whether a new row of a cache tensor holds what it should, but for rounding. BF16 keeps 8 bits; the squared error of a group in
 * FP8 is the least of four scales. */
static bool row_near(const struct cache_tensor &p, const double *got, const std::vector<double> &want) {
    const size_t n = want.size(), group = p.type == KV_FP8 ? (size_t)p.scale_block : n;
    for (size_t at = 0; at < n; at += group) {
        const size_t here = min(group, n - at);
        double top = 0, worst = 0, sum = 0, least = INFINITY;
        for (size_t i = at; i < at + here; i++) {
            const double e = fabs(got[i] - want[i]);
            top = fmax(top, fabs(want[i])), sum += e * e;
            worst = fmax(worst, e - fabs(want[i]) * 0x1p-8 * 1.01);
        }
        for (int i = 448; i >= 256; i -= 64) least = fmin(least, e4m3_squares(&want[at], here, top / i));
        if (p.type == KV_FP8 ? fabs(sum - least) > 1e-3 * least : worst > top * 0x1p-9) return false;
    }
    return true;
}

static void run_attention(const struct attn_case &c) {
    const int n_head = c.n_kv * c.group, here = c.n_tok - c.absent, len = c.pos + here;
    const bool wide = !c.mla && c.dk > HEAD_MAX;
    const bool fused = !c.mla && !c.prefill && !c.top_k && !wide && !c.extent, q_gates = c.gates == Q_GATES,
               values_gate = c.gates == SOFTPLUS_VALUES;
    test_cache k(len, c.mla ? c.dv : c.n_kv * c.dk, c.mla ? (int)ATTN_GROUP : c.dk, c.fp8, c.ring);
    test_cache v(len, c.mla ? c.dk - c.dv : c.n_kv * c.dv, c.mla ? max(c.dk - c.dv, 1) : c.dv, !c.mla && c.fp8, c.ring);
    const size_t qs = (size_t)(n_head * c.dk) + 24, os = (size_t)(n_head * c.dv) + 8;
    /* the queries before norm and rotation, with gates; keys and values */
    const int rope = c.pos % 3 ? c.dk : c.dk / 2, tables = c.n_tok * rope / 2;
    test_heads q32(c.n_tok, n_head, q_gates ? 2 * c.dk : c.dk, c.dk, 3), k32(c.n_tok, c.n_kv, c.dk, c.dk, 0.5);
    test_heads v32(c.n_tok, c.n_kv, c.dv, c.dv, 1);
    const int norm = c.plain ? 0 : c.dk, n_gate = values_gate ? c.dv : 1;
    const std::vector<float> q_norm = random_floats(norm, c.size), k_norm = random_floats(norm, 1),
                             cs = random_floats(tables, 0.7), sn = random_floats(tables, 0.7),
                             sinks = random_floats(n_head, 2),
                             gates = random_floats(c.n_tok * (n_head * n_gate + 3), 3);
    gpu_array<float> q_norm_d(q_norm), k_norm_d(k_norm), cs_d(cs), sn_d(sn), sinks_d(sinks), gates_d(gates);
    std::vector<uint16_t> q(qs * (size_t)c.n_tok, 0x7E00);
    for (int i = 0; i < here; i++)
        for (int h = 0; h < n_head; h++) {
            std::vector<double> y(fused ? q32.roped(i, h, q_norm, cs, sn, rope, c.pairs) : std::vector<double>());
            const double growth = c.grows ? 1 + 0.1 * log1p((c.pos + i + c.chunked) / 50) : 1;
            for (int j = 0; j < c.dk; j++)
                q[(size_t)i * qs + (size_t)(h * c.dk + j)] =
                    f16_from_f32((float)(fused ? y[(size_t)j] * growth : normal() * c.size));
        }
    gpu_array<uint16_t> q_d(q), out(std::vector<uint16_t>(os * (size_t)c.n_tok, 0xABCD));
    const int n_lists = c.pools ? 1 : c.n_kv; /* of a token */
    const size_t n_topk = c.top_k ? (size_t)(c.most() / c.block + c.pools) : 0, n_list = (size_t)(c.n_tok * n_lists);
    std::vector<int32_t> chosen(n_list * n_topk + 1);
    for (size_t l = 0; l < n_list && n_topk;
         l++) { /* a token's own block, or the incomplete one, and others before it */
        const int own = (c.pos + (int)l / n_lists + c.pools) / c.block;
        std::vector<int32_t> blocks;
        for (int b = 0; b < own; b++) blocks.push_back(b);
        for (size_t i = 0; i + 1 < blocks.size(); i++) std::swap(blocks[i], blocks[i + rnd() % (blocks.size() - i)]);
        blocks.resize(n_topk, 0), blocks[n_topk - 1] = own;
        std::sort(blocks.begin(), blocks.end());
        std::copy(blocks.begin(), blocks.end(), chosen.begin() + (long)(l * n_topk));
    }
    gpu_array<int32_t> chosen_d(chosen);
    const size_t counters = (size_t)(2 * n_head * (c.top_k || c.several ? c.n_tok : 1) * ATTN_COUNTERS);
    gpu_array<uint32_t> arrived(std::vector<uint32_t>(counters, 0));
    gpu_array<float> part(
        std::vector<float>((size_t)(c.splits * min(c.n_tok, (int)DECODE_MAX_TOKENS) * n_head * (c.dv + 2)), NAN));
    gpu_batch b(c.pos, here, c.pos);
    enum { REL = 10 };
    const std::vector<float> bank = random_floats(REL * c.extent, 0.5);
    std::vector<uint16_t> rel;
    for (int i = 0; i < c.n_tok * n_head * REL && c.extent; i++) rel.push_back(f16_from_f32((float)normal()));
    gpu_array<float> bank_d(bank);
    gpu_array<uint16_t> rel_d(rel);
    struct attn_args a = {};
    if (c.extent) a.rel = rel_d, a.bank = bank_d, a.n_rel = REL, a.extent = c.extent;
    a.q = q_d, a.out = out, a.partials = part, a.batch = b, a.k = k.p, a.v = v.p, a.n_tok = c.n_tok, a.n_head = n_head;
    a.batch.several = c.several, a.n_head_kv = c.n_kv, a.dk = c.dk, a.dv = c.dv, a.q_stride = qs, a.out_stride = os,
    a.max_splits = c.splits;
    a.scale = (float)(1 / sqrt(c.dk));
    /* MLA in decode ends with the values that wv_b makes of the latents */
    const bool values = c.mla && !c.prefill && !c.latents;
    const int n_value = c.pos % 2 ? 40 : 144, n_part = (c.dv + 63) / 64;
    matrix wv(format_types[(c.pos + c.n_tok) % FMT_COUNT], values ? n_head : 1, values ? n_value : 1,
              values ? c.dv : 8);
    gpu_array<float> parts((size_t)(n_part * c.n_tok * n_head * n_value));
    gpu_array<uint16_t> value_out((size_t)(c.n_tok * n_head * n_value));
    if (values) a.out = NULL;
    a.prefetch.count = 1, a.prefetch.at[0] = (const uint8_t *)q_d.p, a.prefetch.n[0] = 16;
    a.window = c.window, a.chunked = c.chunked, a.sinks = c.sinks ? sinks_d.p : NULL;
    if (c.top_k) {
        a.top_k = c.most(), a.chosen = chosen_d, a.n_topk = (int)n_topk;
        a.block = divisor_of(c.block), a.block_end = c.pools ? POOL_END : BLOCK_END;
    }
    if (!c.mla && !c.prefill) a.arrived = arrived;
    if (q_gates) {
        a.gate = q32.d + c.dk, a.gate_stride = (size_t)q32.stride, a.gate_head = 2 * c.dk;
    } else if (c.gates) {
        a.gate = gates_d, a.gate_stride = (size_t)(n_head * n_gate + 3), a.gate_head = n_gate;
        a.gate_one = !values_gate, a.softplus = c.gates != SIGMOID_HEADS;
    }
    if (fused) {
        struct rope_args &r = a.rope;
        r.batch = a.batch, r.cs = cs_d, r.sn = sn_d, r.pairs = c.pairs, r.q = q32.d, r.k = k32.d, r.v = v32.d;
        if (!c.plain) r.q_norm = q_norm_d, r.k_norm = k_norm_d;
        r.q_stride = (size_t)q32.stride, r.k_stride = (size_t)k32.stride, r.v_stride = (size_t)v32.stride;
        r.kp = k.p, r.vp = v.p, r.n_head = n_head, r.n_head_kv = c.n_kv, r.d = c.dk, r.q_head = q32.head, r.dv = c.dv;
        r.rope = rope, r.eps = 1e-6f;
        if (c.grows) r.temp_scale = 0.1f, r.temp_length = 50, r.v_norm = true;
        r.temp_early = c.chunked;
        k.forget(c.pos, here), v.forget(c.pos, here);
    }
    q_d.arrive(), q32.d.arrive();
    attn_launch(&a, c.mla ? ATTN_MLA : ATTN_GQA, c.prefill, test_stream);
    if (values) {
        const struct mla_value_args value = {a, wv.d, parts, arrived, value_out, (size_t)(n_head * n_value)};
        mla_value(&value, test_stream);
    }
    finish("attention");
    std::vector<uint16_t> got = out.get(), halves = value_out.get();
    std::vector<double> want((size_t)c.dv);
    error_sum sum;
    int bad = 0, rows = 0;
    if (fused) k.read(c.pos, here), v.read(c.pos, here);
    for (int i = 0; fused && i < here; i++)
        for (int h = 0; h < c.n_kv; h++) {
            const size_t at = (size_t)((c.pos + i) * c.n_kv + h);
            const std::vector<float> ones((size_t)(c.grows ? c.dv : 0), 1);
            rows += !row_near(k.p, &k.value[at * (size_t)c.dk], k32.roped(i, h, k_norm, cs, sn, rope, c.pairs));
            rows += !row_near(v.p, &v.value[at * (size_t)c.dv], v32.roped(i, h, ones, cs, sn, 0));
        }
    for (uint32_t x : arrived.get()) rows += x != 0;
    for (int i = 0; i < here; i++)
        for (int h = 0; h < n_head; h++) {
            const int32_t *list = &chosen[(size_t)(i * n_lists + h / c.group % n_lists) * n_topk];
            std::vector<double> bias((size_t)c.extent);
            for (size_t at = 0; at < REL * bias.size(); at++) /* in halves, and the states times log2 e */
                bias[at % bias.size()] += (double)f16_to_f32(rel[(size_t)((i * n_head + h) * REL) + at / bias.size()]) *
                                          (double)f16_to_f32(f16_from_f32(bank[at])) * M_LN2;
            attn_plain(c, k, v, &q[(size_t)i * qs + (size_t)(h * c.dk)], h, attn_visible(c, c.pos + i, list), sinks,
                       c.pos + i, bias, want);
            const std::vector<float> latent(want.begin(), want.end());
            for (int j = 0; j < n_value && values; j++)
                sum.add((double)f16_to_f32(halves[(size_t)((i * n_head + h) * n_value + j)]),
                        wv.dot(h, j, latent.data()));
            for (int j = 0; j < c.dv && !values; j++) {
                double f = 1;
                if (c.gates) {
                    const float *own = &gates[(size_t)(i * (n_head * n_gate + 3) + h * n_gate)];
                    const double g = (double)(q_gates ? q32.row(i, h)[c.dk + j] : own[values_gate ? j : 0]);
                    f = c.gates >= SOFTPLUS_HEADS ? log1p(exp(g)) : 1 / (1 + exp(-g));
                }
                sum.add((double)f16_to_f32(got[(size_t)i * os + (size_t)(h * c.dv + j)]), want[(size_t)j] * f);
            }
        }
    for (size_t i = 0; i < got.size(); i++) /* what is no result stays as it was */
        bad += ((int)(i / os) >= here || i % os >= os - 8) && got[i] != 0xABCD;
    double error = sqrt(sum.nmse()), limit = c.size > 2 ? 4e-3 : 2e-3;
    expect(error <= limit && !bad && !rows,
           "%s %s %s %d/%d, %d kv heads of %d, tokens %d - %d at %d, %d splits, size %g, window %d of %d rows, chunked "
           "%d, sinks "
           "%d, "
           "pairs %d, plain %d, gates %d, top-k %d in blocks of %d, pools %d, several %d, biases %d, growth %d: error "
           "%.1e, %d gaps "
           "written, %d rows or counters are wrong",
           c.mla ? "mla" : "gqa", c.prefill ? "prefill" : "decode", c.fp8 ? "fp8" : "bf16", c.dk, c.dv, c.n_kv, c.group,
           c.n_tok, c.absent, c.pos, c.splits, c.size, c.window, c.ring, c.chunked, c.sinks, c.pairs, c.plain,
           (int)c.gates, c.top_k, c.block, c.pools, c.several, c.extent, c.grows, error, bad, rows);
}

/* Expanded keys and values of a released shape, segment after segment. */
template <int NOPE>
static void run_mla_expanded(int n_tok, int pos, int n_head, double size) {
    enum { ROPE = 64, V = 128, LATENT = 16, WIDTH = LATENT + ROPE };
    const size_t segment = n_head > 1 ? 64 : 160; /* of one tile, of several */
    const size_t len = (size_t)(pos + n_tok), heads = (size_t)n_head, rows = (size_t)n_tok * heads, stride = heads * V;
    auto halves = [](size_t n, double scale) {
        std::vector<uint16_t> v(n);
        for (uint16_t &h : v) h = f16_from_f32((float)(normal() * scale));
        return v;
    };
    std::vector<uint16_t> q = halves(rows * (NOPE + ROPE), size), rot = halves(rows * WIDTH, size),
                          k = halves(heads * len * NOPE, 1), v = halves(heads * len * V, 1),
                          latents = halves(len * WIDTH, 1);
    gpu_array<uint16_t> q_d(q), rot_d(rot), out(std::vector<uint16_t>((size_t)n_tok * (stride + 8), 0xABCD)),
        k_d(heads * segment * NOPE), v_d(heads * segment * V), latents_d(segment * WIDTH);
    gpu_array<float> sums(std::vector<float>(rows * V, NAN)), max_den(std::vector<float>(rows * 2, NAN));
    struct mla_args a = {};
    a.q = q_d, a.q_rope = rot_d, a.out = out, a.out_stride = stride + 8, a.sums = sums, a.n_tok = n_tok;
    a.n_head = n_head, a.latent = LATENT, a.pos = pos, a.factor = (float)(1.44269504 / sqrt(NOPE + ROPE));
    a.buffer.segment = (int)segment, a.buffer.latents = latents_d, a.buffer.keys = k_d, a.buffer.values = v_d,
    a.buffer.max_den = max_den;
    for (size_t first = 0; first < len; first += segment) {
        const size_t n = std::min(len - first, segment);
        std::vector<uint16_t> ks(k_d.n, 0x7E00), vs(v_d.n, 0x7E00), ls(latents_d.n, 0x7E00); /* NaN after the end */
        for (size_t h = 0; h < heads; h++) {
            std::copy_n(&k[(h * len + first) * NOPE], n * NOPE, &ks[h * segment * NOPE]);
            std::copy_n(&v[(h * len + first) * V], n * V, &vs[h * segment * V]);
        }
        std::copy_n(&latents[first * WIDTH], n * WIDTH, &ls[0]);
        must(cudaMemcpy(k_d, ks.data(), k_d.bytes(), cudaMemcpyHostToDevice), "keys");
        must(cudaMemcpy(v_d, vs.data(), v_d.bytes(), cudaMemcpyHostToDevice), "values");
        must(cudaMemcpy(latents_d, ls.data(), latents_d.bytes(), cudaMemcpyHostToDevice), "latents");
        k_d.arrive(), v_d.arrive(), latents_d.arrive();
        a.first = (int)first, a.n_key = (int)n;
        mla_launch(&a, NOPE, ROPE, V, test_stream);
        finish("expanded attention");
    }
    std::vector<uint16_t> got = out.get();
    error_sum sum;
    int bad = 0;
    for (size_t i = 0; i < rows; i++) {
        const size_t h = i % heads, n = (size_t)pos + i / heads + 1;
        std::vector<double> s(n), want(V);
        double top = -INFINITY, den = 0;
        for (size_t x = 0; x < n; x++) {
            double d = 0;
            for (size_t j = 0; j < NOPE; j++)
                d += (double)f16_to_f32(q[i * (NOPE + ROPE) + j]) * (double)f16_to_f32(k[(h * len + x) * NOPE + j]);
            for (size_t j = LATENT; j < WIDTH; j++)
                d += (double)f16_to_f32(rot[i * WIDTH + j]) * (double)f16_to_f32(latents[x * WIDTH + j]);
            s[x] = d / sqrt(NOPE + ROPE), top = fmax(top, s[x]);
        }
        for (size_t x = 0; x < n; x++) {
            const double f = exp(s[x] - top);
            den += f;
            for (size_t j = 0; j < V; j++) want[j] += f * (double)f16_to_f32(v[(h * len + x) * V + j]);
        }
        for (size_t j = 0; j < V; j++)
            sum.add((double)f16_to_f32(got[i / heads * (stride + 8) + h * V + j]), want[j] / den);
    }
    for (size_t i = 0; i < got.size(); i++) bad += i % (stride + 8) >= stride && got[i] != 0xABCD;
    expect(sqrt(sum.nmse()) <= 2e-3 && !bad,
           "expanded latent attention of %d, %d tokens at %d, %d heads, size %g: error %.1e, %d gaps written", NOPE,
           n_tok, pos, n_head, size, sqrt(sum.nmse()), bad);
}

/* Transposed matrices of heads, by what the GEMM makes of them. */
static void run_transpose(enum gguf_type type) {
    enum { HEADS = 3, LATENT = 72, TOKENS = 20 };
    matrix w(type, HEADS, LATENT, 40);
    const int n_out = w.w.n_in;
    struct device_matrix to = w.d;
    to.n_out = n_out, to.n_in = LATENT, to.n_rt = (n_out + 15) / 16, to.n_kt = (LATENT + 63) / 64;
    gpu_array<uint8_t> codes((size_t)(HEADS * to.n_rt * to.n_kt * TILE_BYTES(FMT_F16)));
    to.codes = codes, to.scales = NULL, to.fmt = FMT_F16;
    tokens x(TOKENS, LATENT);
    gpu_array<uint16_t> xd(x.half);
    const size_t stride = (size_t)n_out, batch = stride * TOKENS;
    gpu_array<float> y(batch * HEADS);
    codes.arrive();
    LAUNCH_PDL(k_transpose, (unsigned)(HEADS * to.n_rt * to.n_kt), 256, 0, test_stream, w.d, to);
    struct gemm_args g = {};
    g.w = to, g.x = xd, g.x_stride = x.stride, g.n_tok = TOKENS, g.y = y, g.y_stride = stride, g.y_f32 = 1;
    g.batch = HEADS, g.y_batch = batch;
    gemm_prefill(&g, 0, test_stream);
    finish("transposed matrices");
    std::vector<float> got = y.get();
    error_sum sum;
    for (size_t i = 0; i < got.size(); i++) {
        const size_t h = i / batch, t = i % batch / stride, r = i % stride;
        double want = 0;
        for (size_t c = 0; c < LATENT; c++) want += w.v[(h * LATENT + c) * stride + r] * (double)x.row((int)t)[c];
        sum.add((double)got[i], want);
    }
    expect(sum.nmse() <= (type == GGUF_Q8_0 ? 1e-7 : 1e-11), "transposed, type %u: NMSE %.1e", type, sum.nmse());
}

/* Rows of a cache of latents in halves. */
static void run_latents(bool fp8) {
    enum { LATENT = 256, ROPE = 64, WIDTH = LATENT + ROPE, LEN = 70, FIRST = 5, N = 60 };
    test_cache k(LEN, LATENT, ATTN_GROUP, fp8), rotated(LEN, ROPE, ROPE, false);
    gpu_array<uint16_t> x((size_t)N * WIDTH);
    gpu_batch b(FIRST + N, 1, FIRST + N);
    x.arrive();
    LAUNCH_PDL((fp8 ? k_mla_latents<1> : k_mla_latents<0>), ceil_div(N * WIDTH, 2048), 256, 0, test_stream,
               batch_ref(b), k.p, rotated.p, (int)LATENT, (int)ROPE, (int)FIRST, (int)N, x.p);
    finish("latents");
    std::vector<uint16_t> got = x.get();
    int bad = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const size_t row = FIRST + i / WIDTH, c = i % WIDTH;
        const double want = c < LATENT ? k.value[row * LATENT + c] : rotated.value[row * ROPE + c - LATENT];
        bad += !(fabs((double)f16_to_f32(got[i]) - want) <= fabs(want) / 2048 + 1e-7);
    }
    expect(!bad, "latents, fp8 %d: %d are wrong", fp8, bad);
}

/* Value i of a rotated part x of token t: of `rope` values, neighbors are rotated against each other. */
static double mla_turned(const float *x, const std::vector<float> &cs, const std::vector<float> &sn, int rope, int t,
                         int i) {
    const double c = (double)cs[(size_t)(t * rope / 2 + i / 2)], s = (double)sn[(size_t)(t * rope / 2 + i / 2)];
    return i & 1 ? (double)x[i - 1] * s + (double)x[i] * c : (double)x[i] * c - (double)x[i + 1] * s;
}

/* Tokens of latent attention whose new rows are checked: latents and shared key, which shared_norm norms if it is not
 * empty. */
struct mla_rows {
    int pos, n_tok, latent, rope;
    bool fp8;
    int ring; /* rows of the cache tensors; 0: as many as there are tokens */
    std::vector<float> norm, shared_norm, cs, sn;
    test_cache k, v;
    test_heads kv;
    gpu_array<float> norm_d, shared_d, cs_d, sn_d;
    mla_rows(int at, int n, int n_latent, int n_rope, bool is_fp8, bool shared, int ring_rows)
        : pos(at), n_tok(n), latent(n_latent), rope(n_rope), fp8(is_fp8), ring(ring_rows),
          norm(random_floats(latent, 1)), shared_norm(random_floats(shared ? rope : 0, 1)),
          cs(random_floats(n_tok * rope / 2, 0.7)), sn(random_floats(n_tok * rope / 2, 0.7)),
          k(pos + n_tok, latent, ATTN_GROUP, fp8, ring), v(pos + n_tok, rope, rope, false, ring),
          kv(n_tok, 1, latent + rope, latent, 0.5), norm_d(norm), shared_d(shared_norm), cs_d(cs), sn_d(sn) {}
    /* Gives the kernel its arguments. Before it runs the rows have no values. */
    void ask(struct rope_args *r) {
        r->cs = cs_d, r->sn = sn_d, r->k = kv.d, r->k_norm = norm_d, r->kp = k.p, r->vp = v.p;
        r->shared_norm = shared_norm.empty() ? NULL : shared_d.p, r->k_stride = (size_t)kv.stride;
        r->n_head_kv = 1, r->rope = rope, r->latent = latent, r->eps = 1e-6f;
        k.forget(pos, n_tok), v.forget(pos, n_tok);
        kv.d.arrive();
    }
    /* Returns how many rows are wrong. */
    int wrong() {
        int rows = 0;
        k.read(pos, n_tok), v.read(pos, n_tok);
        for (int t = 0; t < n_tok; t++) {
            std::vector<float> from(kv.row(t, 0) + latent, kv.row(t, 0) + latent + rope);
            std::vector<double> want;
            const double unit = rms_factor(from.data(), rope);
            for (size_t i = 0; i < shared_norm.size(); i++) from[i] *= (float)(unit * (double)shared_norm[i]);
            for (int i = 0; i < rope; i++) want.push_back(mla_turned(from.data(), cs, sn, rope, t, i));
            rows += !row_near(k.p, &k.value[(size_t)((pos + t) * latent)], kv.roped(t, 0, norm, cs, sn, 0));
            rows += !row_near(v.p, &v.value[(size_t)((pos + t) * rope)], want);
        }
        return rows;
    }
};

/* Queries into the latent space, and the new rows of the cache. */
static void run_mla_query(enum gguf_type type, bool fp8, int n_tok, int n_head, int nope, int latent, int rope,
                          float temperature = 0, bool shared = false, int ring = 0) {
    matrix wk(type, n_head, latent, nope);
    const int pos = 5, d = nope + rope, key = latent + rope;
    mla_rows rows(pos, n_tok, latent, rope, fp8, shared, ring);
    test_heads q(n_tok, n_head, d, d, 1);
    gpu_array<uint16_t> y((size_t)(n_tok * n_head * key));
    gpu_batch b(pos, n_tok, pos);
    struct mla_query_args p = {};
    struct rope_args &r = p.rope;
    rows.ask(&r);
    r.batch = b, r.q = q.d, r.q_rope = y, r.q_stride = (size_t)q.stride, r.n_head = n_head, r.d = d, r.nope = nope;
    r.temp_scale = temperature, r.temp_length = 3;
    p.w = wk.d, p.n_tok = n_tok;
    q.d.arrive();
    mla_query(&p, test_stream);
    finish("queries of MLA");
    const std::vector<uint16_t> got = y.get();
    error_sum sum;
    for (int t = 0; t < n_tok; t++) {
        const double f = 1 + (double)temperature * log1p((pos + t) / r.temp_length);
        for (int h = 0; h < n_head; h++)
            for (int i = 0; i < key; i++)
                sum.add((double)f16_to_f32(got[(size_t)((t * n_head + h) * key + i)]),
                        f * (i < latent ? wk.dot(h, i, q.row(t, h))
                                        : mla_turned(q.row(t, h) + nope, rows.cs, rows.sn, rope, t, i - latent)));
    }
    const int wrong = rows.wrong();
    expect(sum.nmse() <= 1e-6 && !wrong,
           "type %u, %d tokens, %d heads, %d + %d to %d, shared key normed %d, ring %d: NMSE %.1e, %d rows are wrong",
           type, n_tok, n_head, nope, rope, latent, shared, ring, sum.nmse(), wrong);
}

/* One split and several, without sinks and with. */
static void run_attention_splits(struct attn_case c) {
    for (int i = 0; i < 4; i++) {
        c.splits = i / 2 ? 64 : 1, c.sinks = i % 2;
        run_attention(c);
    }
}

/* Chosen keys: latents of DeepSeek-V3.2, of one and of two row tiles; blocks of MiniMax-M3. Some tokens see all keys. */
static void run_attention_chosen() {
    static const int widths[][3] = {{1, 576, 512}, {1, 192, 128}, {1, 80, 64}, {0, 64, 64}, {0, 128, 128}};
    for (auto &w : widths)
        for (int kind = 0; kind < 8; kind++) {
            const bool two = kind & 4;
            struct attn_case c = {};
            c.mla = w[0], c.dk = w[1], c.dv = w[2], c.fp8 = kind & 1, c.prefill = kind & 2, c.n_kv = 1, c.size = 1;
            c.group = two ? 30 : 12, c.block = c.mla ? 1 : two ? 64 : 16, c.top_k = c.mla ? 133 : c.prefill ? 128 : 512;
            c.n_tok = c.prefill ? 17 : 2, c.pos = c.top_k - 1, c.sinks = two;
            c.gates = c.mla ? NO_GATES : c.prefill ? Q_GATES : two ? SIGMOID_HEADS : SOFTPLUS_VALUES;
            run_attention_splits(c);
            c.splits = 64, c.top_k = c.prefill ? c.top_k : two ? 960 : 944, c.latents = true;
            c.pos = (c.top_k + 300) / 64 * 64 + 5; /* of a token's own block few keys count */
            c.n_tok = c.prefill ? 17 : 1;
            run_attention(c);
        }
}

/* Contexts of so many splits that loops over them go round several times; all kinds of gates of every width. */
static void run_attention_long() {
    static const int widths[][2] = {{32, 32}, {64, 64}, {128, 128}, {192, 128}, {256, 256}},
                     mla[][2] = {{576, 512}, {192, 128}, {80, 64}};
    for (auto &w : widths)
        for (int kind = 0; kind < 4; kind++) {
            struct attn_case c = {};
            c.dk = w[0], c.dv = w[1], c.fp8 = kind & 1, c.n_kv = 1, c.group = 12, c.size = 1, c.pos = 1470 - kind;
            c.splits = 64, c.n_tok = 1, c.gates = kind & 2 ? SOFTPLUS_VALUES : SIGMOID_HEADS, c.sinks = kind & 2;
            run_attention(c);
            c.prefill = true, c.gates = Q_GATES, c.group = 3, c.n_tok = 18, c.pos = 80, c.splits = kind & 2 ? 64 : 1;
            run_attention(c);
        }
    struct attn_case c = {};
    c.mla = true, c.n_kv = c.group = 1, c.size = 1, c.splits = SPLITS_MAX, c.dk = 80, c.dv = 64, c.block = 1;
    for (int kind = 0; kind < 2 * FMT_COUNT; kind++) { /* wv_b of all formats, for up to 8 tokens and for more */
        c.fp8 = kind & 1, c.n_tok = kind & 1 ? 16 : 1, c.top_k = 0, c.several = false;
        c.group = kind & 1 ? 1 : 8; /* a single head's largest value may have cancelled */
        c.pos = 15300 + (kind / 2 - c.n_tok) % FMT_COUNT;
        run_attention(c);
        c.top_k = 300, c.pos = 400 + c.pos % FMT_COUNT;
        run_attention(c);
        c.top_k = 0, c.several = true;
        run_attention(c);
    }
    c.several = false;
    for (int kind = 0; kind < 6; kind++) {
        c.dk = mla[kind / 2][0], c.dv = mla[kind / 2][1], c.fp8 = kind & 1, c.n_tok = 1, c.group = 12;
        c.pos = 130, c.top_k = 0, c.latents = true;
        run_attention_splits(c);
    }
    c = {};
    c.prefill = true, c.dk = c.dv = 32, c.n_kv = c.group = 1, c.n_tok = 17, c.pos = 14300, c.splits = SPLITS_MAX,
    c.size = 1;
    run_attention(c);
}

/* What few models have, for every width: pools of latents without a rotated part, blocks of a few keys, biases by
 * distance, latents of 256, sinks and gates of wide heads. Batches of several runs. */
static void run_attention_forms() {
    static const int pooled[] = {512, 128, 64}, few[] = {64, 128, 256}, biased[] = {32, 64, 128},
                     plain[][2] = {{32, 32}, {64, 64}, {128, 128}, {192, 128}, {256, 256}};
    for (int kind = 0; kind < 4; kind++) {
        const bool fp8 = kind & 1, two = kind & 2;
        struct attn_case c = {};
        c.mla = c.latents = c.pools = true, c.fp8 = fp8, c.n_kv = 1, c.group = two ? 30 : 12, c.size = 1;
        for (int d : pooled) {
            c.dk = c.dv = d, c.block = 4, c.top_k = 160, c.n_tok = 3, c.prefill = false, c.several = two;
            for (int pos : {161, 300}) { /* two of the tokens see all keys, or none does */
                c.pos = pos;
                run_attention_splits(c);
            }
            c.several = false, c.n_tok = 17, c.prefill = true, c.top_k = two ? 160 : 0;
            run_attention_splits(c);
            if (two) continue;
            c.pos = 0, c.n_tok = 70;
            run_attention_splits(c);
        }
        c = {};
        c.fp8 = fp8, c.pools = true, c.n_kv = 2, c.size = 1;
        for (int d : few) {
            c.dk = c.dv = d, c.group = two ? 12 : 5, c.block = 4, c.top_k = two ? 720 : 1600, c.splits = two ? 6 : 1;
            c.n_tok = two ? 1 : 2, c.pos = 1700, c.sinks = true, c.several = !two;
            c.gates = two ? SIGMOID_HEADS : SOFTPLUS_VALUES, c.prefill = false;
            run_attention(c);
            c.gates = two ? SOFTPLUS_VALUES : Q_GATES, c.sinks = false, c.splits = 64, c.several = false;
            run_attention(c);
            c.n_tok = 17, c.pos = 900, c.top_k = 160, c.prefill = true, c.splits = 1;
            c.gates = two ? NO_GATES : Q_GATES;
            run_attention(c);
        }
        c = {};
        c.fp8 = fp8, c.n_kv = 2, c.size = 1;
        for (int d : biased) {
            c.dk = c.dv = d, c.group = two ? 5 : 12, c.extent = two ? 70 : 200, c.n_tok = 3, c.pos = 700;
            c.splits = two ? 1 : 7, c.sinks = true, c.gates = two ? SOFTPLUS_HEADS : SOFTPLUS_VALUES;
            c.window = two ? 120 : 0, c.ring = two ? 192 : 0, c.several = !two, c.prefill = false;
            run_attention(c);
            c.n_tok = 1, c.pos = 1300, c.gates = two ? Q_GATES : NO_GATES, c.sinks = two, c.several = false;
            c.splits = two ? 1 : 64, c.window = c.ring = 0;
            run_attention(c);
            c.n_tok = 70, c.pos = 200, c.prefill = true, c.window = two ? 90 : 0, c.ring = two ? 192 : 0;
            c.gates = two ? Q_GATES : NO_GATES, c.group = 3, c.splits = two ? 1 : 64;
            run_attention(c);
            if (!two) continue;
            c.chunked = true, c.window = 128;
            run_attention(c);
            c.chunked = false;
        }
        c = {};
        c.mla = true, c.fp8 = fp8, c.n_kv = 1, c.dk = 320, c.dv = 256, c.group = two ? 20 : 12, c.size = 1;
        c.n_tok = two ? 3 : 1, c.pos = 500, c.splits = 64, c.latents = two;
        run_attention(c);
        c.several = true, c.latents = true, c.pos = 130;
        run_attention_splits(c);
        c.several = false, c.n_tok = 17, c.prefill = true;
        run_attention_splits(c);
        c = {};
        c.fp8 = fp8, c.dk = c.dv = 512, c.n_kv = 1, c.group = two ? 30 : 12, c.n_tok = 1, c.pos = 150, c.size = 1;
        for (enum test_gates gates : {Q_GATES, SIGMOID_HEADS, SOFTPLUS_HEADS, SOFTPLUS_VALUES})
            for (int splits : {1, 2}) {
                c.gates = gates, c.splits = splits, c.sinks = true, c.several = splits == 1;
                run_attention(c);
            }
        c = {};
        c.fp8 = fp8, c.n_kv = 2, c.group = two ? 3 : 20, c.n_tok = two ? 7 : 2, c.pos = 250, c.size = 1;
        c.splits = two ? 2 : 1, c.several = c.grows = true;
        for (auto &w : plain) {
            c.dk = w[0], c.dv = w[1];
            run_attention(c);
        }
    }
}

/* Attention with one KV head: `window` keys of a ring, and keys of `ratio` tokens each, of which top_k are chosen. */
static void run_attention_csa(int d, bool fp8, int n_head, int n_tok, int pos, int ratio, int top_k, int splits,
                              bool gates, bool sink = true) {
    enum { WINDOW = 40, RING = 128, ROPE = 64 };
    const int len = pos + n_tok, n_block = ratio ? len / ratio : 0, n_topk = max(top_k, 1);
    const size_t width = (size_t)(n_head * d), out_stride = width + 8;
    test_cache k(len, d, ATTN_GROUP, fp8, RING), v(max(n_block, 1), d, ATTN_GROUP, fp8);
    std::vector<uint16_t> q;
    for (size_t i = 0; i < width * (size_t)n_tok; i++) q.push_back(f16_from_f32((float)normal()));
    const std::vector<float> sinks = random_floats(n_head, 2), cs = random_floats(n_tok * ROPE / 2, 0.7),
                             sn = random_floats(n_tok * ROPE / 2, 0.7), gate = random_floats(n_tok * (int)width, 2);
    std::vector<int32_t> chosen;
    for (int t = 0; t < n_tok; t++) {
        const int n = ratio ? (pos + t + 1) / ratio : 0; /* every other one, from the first or the second on */
        for (int i = 0; i < n_topk; i++) chosen.push_back(n > 2 * n_topk ? 2 * i + t % 2 : i);
    }
    gpu_array<uint16_t> q_d(q), out(std::vector<uint16_t>(out_stride * (size_t)n_tok, 0xABCD));
    gpu_array<float> sinks_d(sinks), cs_d(cs), sn_d(sn), gate_d(gate);
    gpu_array<int32_t> chosen_d(chosen);
    gpu_array<uint32_t> arrived(std::vector<uint32_t>((size_t)(n_head * n_tok * ATTN_COUNTERS), 0));
    gpu_array<float> part(
        std::vector<float>((size_t)(splits * min(n_tok, (int)DECODE_MAX_TOKENS) * n_head * (d + 2)), NAN));
    gpu_batch b(pos, n_tok, pos);
    struct attn_args a = {};
    a.q = q_d, a.out = out, a.partials = part, a.batch = b, a.k = k.p, a.v = v.p, a.n_tok = n_tok, a.n_head = n_head;
    a.n_head_kv = 1, a.dk = a.dv = d, a.q_stride = width, a.out_stride = out_stride, a.scale = (float)(1 / sqrt(d));
    a.max_splits = splits, a.window = WINDOW, a.sinks = sink ? sinks_d.p : NULL, a.softplus = !sink, a.one_kv = true,
    a.compress_ratio = ratio, a.top_k = top_k;
    a.chosen = chosen_d, a.n_topk = n_topk, a.rope.cs = cs_d, a.rope.sn = sn_d, a.rope.rope = ROPE;
    if (gates) a.gate = gate_d, a.gate_stride = width, a.gate_head = d;
    if (n_tok <= DECODE_MAX_TOKENS) a.arrived = arrived;
    a.prefetch.count = 1, a.prefetch.at[0] = (const uint8_t *)q_d.p, a.prefetch.n[0] = 16;
    q_d.arrive();
    attn_launch(&a, ATTN_CSA, n_tok > DECODE_MAX_TOKENS, test_stream);
    finish("attention with one KV head");
    const std::vector<uint16_t> got = out.get();
    error_sum sum;
    int bad = 0;
    for (uint32_t x : arrived.get()) bad += x != 0;
    for (int t = 0; t < n_tok; t++) {
        const int at = pos + t, n = ratio ? (at + 1) / ratio : 0;
        std::vector<const double *> keys;
        for (int x = max(at + 1 - WINDOW, 0); x <= at; x++) keys.push_back(&k.value[(size_t)(x * d)]);
        for (int i = 0; i < (top_k ? min(n, top_k) : n); i++)
            keys.push_back(&v.value[(size_t)((top_k && n > top_k ? chosen[(size_t)(t * n_topk + i)] : i) * d)]);
        for (int h = 0; h < n_head; h++) {
            const size_t row = (size_t)t * width + (size_t)(h * d);
            double top = sink ? (double)sinks[(size_t)h] : -INFINITY, den = 0;
            std::vector<double> s, want((size_t)d);
            for (const double *key : keys) {
                double dot = 0;
                for (int i = 0; i < d; i++) dot += (double)f16_to_f32(q[row + (size_t)i]) * key[i];
                s.push_back(dot / sqrt(d)), top = fmax(top, s.back());
            }
            if (sink) den = exp((double)sinks[(size_t)h] - top);
            for (size_t x = 0; x < keys.size(); x++) {
                const double f = exp(s[x] - top);
                den += f;
                for (int i = 0; i < d; i++) want[(size_t)i] += f * keys[x][i];
            }
            const bool joined = splits > 1 && n_tok <= DECODE_MAX_TOKENS; /* gates of any kind */
            for (size_t i = 0; i < (size_t)d; i++) {
                const double g = (double)gate[row + i];
                want[i] *= (!gates ? 1 : joined && !sink ? log1p(exp(g)) : 1 / (1 + exp(-g))) / den;
            }
            for (size_t i = 0; i < ROPE / 2; i++) { /* rotated back */
                double &u = want[(size_t)(d - ROPE) + 2 * i], &w = want[(size_t)(d - ROPE) + 2 * i + 1];
                const double c = (double)cs[(size_t)t * ROPE / 2 + i], si = (double)sn[(size_t)t * ROPE / 2 + i],
                             old = u;
                u = old * c + w * si, w = w * c - old * si;
            }
            for (size_t i = 0; i < (size_t)d; i++)
                sum.add((double)f16_to_f32(got[(size_t)t * out_stride + (size_t)(h * d) + i]), want[i]);
        }
    }
    for (size_t i = 0; i < got.size(); i++) bad += i % out_stride >= width && got[i] != 0xABCD;
    expect(
        sqrt(sum.nmse()) <= 2e-3 && !bad,
        "one KV head of %d, fp8 %d, %d heads, %d tokens at %d, keys of %d tokens, top-k %d, %d splits, gates %d: error "
        "%.1e, %d wrong",
        d, fp8, n_head, n_tok, pos, ratio, top_k, splits, gates, sqrt(sum.nmse()), bad);
}

extern "C" void cuda_test_attention(void) {
    begin_test(6);
    for (int i = 0; i < FMT_COUNT; i++) {
        run_mla_query(format_types[i], i & 1, 1 + 5 * i, 2, 128, 512, 64);
        run_mla_query(format_types[i], !(i & 1), 16 - 3 * i, 3, 64 << i % 2, 72, 16);
    }
    for (enum gguf_type type : format_types) /* loops that go round several times */
        for (int n : {1, 9}) run_mla_query(type, n > 1, n, 1, n > 1 ? 2048 : 2112, type == GGUF_BF16 ? 7936 : 24, 3584);
    for (enum gguf_type type : format_types)
        for (int n : {3, 12}) run_mla_query(type, true, n, 2, 64, 256, 64, 0.1f);
    for (bool fp8 : {false, true}) /* windows, whose shared key is normed */
        for (int n : {3, 12}) run_mla_query(fp8 ? GGUF_Q8_0 : GGUF_BF16, fp8, n, 1, 64, 2112, 3584, 0, true, n + 1);
    run_mla_expanded<128>(150, 0, 2, 1), run_mla_expanded<128>(40, 300, 1, 8);
    for (auto &type : matrix_types) run_transpose(type.type);
    run_latents(false), run_latents(true);
    expect(attn_find(ATTN_MLA, 576, 512, 0) && !attn_find(ATTN_GQA, 128, 64, 0), "supported widths");
    expect(attn_splits(132, 4) == 66 && attn_splits(4, 64) == 1 && attn_splits(188, 1) == 376 &&
               attn_splits(999, 1) == 384,
           "numbers of splits");
    static const int lens[] = {1, 17, 64, 65, 127, 257, 1009}, decode_toks[] = {1, 2, 3, 5, 16},
                     prefill_toks[] = {17, 33, 70, 130};
    static const int splits[] = {1, 2, 64}, groups[] = {1, 2, 4, 5, 8, 16};
    static const int widths[][3] = {{0, 32, 32},   {0, 64, 64},   {0, 128, 128}, {0, 256, 256},  {0, 512, 512},
                                    {1, 576, 512}, {1, 192, 128}, {1, 80, 64},   {1, 1088, 1024}};
    run_attention_chosen();
    run_attention_long();
    for (int kind = 0; kind < 4; kind++)
        for (int n_kv : {2, 4}) /* heads of Gemma 4: of layers that see all keys, */
            for (int n_tok : {1, 3, 16, 33}) {
                struct attn_case c = {};
                c.prefill = n_tok > DECODE_MAX_TOKENS, c.fp8 = kind & 1, c.dk = c.dv = 512, c.n_kv = n_kv, c.group = 8;
                c.n_tok = n_tok, c.pos = n_tok == 1 ? 900 : 150, c.splits = kind & 2 ? 64 : 3, c.size = 1;
                c.sinks = n_tok == 3;
                if (n_kv == 2 || n_tok < 16) run_attention(c);
            }
    for (bool fp8 : {false, true}) { /* and of those with a window */
        struct attn_case c = {};
        c.fp8 = fp8, c.dk = c.dv = 256, c.n_kv = 8, c.group = 2, c.n_tok = 2, c.pos = 1500, c.splits = 64, c.size = 1;
        c.window = 1024, c.ring = 1088;
        run_attention(c);
    }
    for (int kind = 0; kind < 8; kind++) {
        const int d = kind & 1 ? 64 : 512, n_head = kind & 4 ? 28 : 12;
        const bool fp8 = kind & 2;
        for (bool sink : {false, true}) {
            run_attention_csa(d, fp8, n_head, 3, 300, 4, 0, 1, false, sink);
            run_attention_csa(d, fp8, n_head, 3, 70, 4, 8, 1, true, sink);
            run_attention_csa(d, fp8, n_head, 3, 200, 1, 0, 64, true, sink);
        }
        run_attention_csa(d, fp8, n_head, 3, 3900, 4, 880, 64, false),
            run_attention_csa(d, fp8, n_head, 17, 400, 4, 64, 64, true);
        run_attention_csa(d, fp8, n_head, 3, 1440, 1, 0, 64, false),
            run_attention_csa(d, fp8, n_head, 3, 20, 0, 0, 1, true);
    }
    /* every kernel with every number of splits, lengths in turn; the rest at random */
    int turn = 0;
    for (auto &w : widths)
        for (int kind = 0; kind < 4; kind++)
            for (int n_split : splits)
                for (int again = 0; again < 4; again++) {
                    struct attn_case c = {};
                    int len = lens[turn++ % 7];
                    c.mla = w[0], c.dk = w[1], c.dv = w[2], c.prefill = kind & 1, c.fp8 = kind >> 1, c.splits = n_split;
                    c.n_kv = c.mla ? 1 : 1 + (int)(rnd() % 3), c.group = groups[rnd() % 6];
                    c.n_tok = c.prefill ? prefill_toks[rnd() % 4] : decode_toks[rnd() % 5];
                    if (len == 1 && !c.prefill) c.n_tok = 1;
                    c.absent = rnd() % 4 || (c.mla && !c.prefill) ? 0 : (int)(rnd() % (uint32_t)c.n_tok);
                    c.size = rnd() % 5 ? 1 : 60;
                    /* bounds the time: heads, then keys, become fewer */
                    auto work = [&] { return 1.0 * c.n_tok * c.n_kv * c.group * len * (c.dk + c.dv); };
                    while (work() > 6e6 && c.n_kv * c.group > 1) c.n_kv = 1, c.group = (c.group + 1) / 2;
                    while (work() > 24e6) len = len / 2 + 1;
                    int here = c.n_tok - c.absent;
                    c.pos = len > here && rnd() % 4 ? len - here : 0;
                    c.gates = !c.mla && (c.pos ^ c.n_tok) & 1 ? Q_GATES : NO_GATES;
                    c.sinks = c.mla && turn % 2;
                    run_attention(c);
                }
    run_mla_expanded<64>(150, 0, 2, 1), run_mla_expanded<64>(40, 300, 1, 8);
    run_attention_forms();
}

/* 16 tokens with a window, one at a time and in other batches: a token's bits are the same. Ends of steps and of splits lie
 * among the tokens. */
static void run_window_batches(int dk, int dv, bool fp8, int group, int window, int n_split, int pos, int n_row) {
    enum { TOKENS = 16 };
    const int n_kv = 2, n_head = n_kv * group, rope = dk / 2;
    const size_t out_row = (size_t)(n_head * dv);
    test_heads q(TOKENS, n_head, dk, dk, 1), k(TOKENS, n_kv, dk, dk, 0.5), v(TOKENS, n_kv, dv, dv, 1);
    const std::vector<float> cs = random_floats(TOKENS * rope / 2, 0.7), sn = random_floats(TOKENS * rope / 2, 0.7),
                             sinks = random_floats(n_head, 2);
    gpu_array<float> cs_d(cs), sn_d(sn), sinks_d(sinks);
    gpu_array<uint32_t> arrived(std::vector<uint32_t>((size_t)(2 * n_head * ATTN_COUNTERS), 0));
    gpu_array<float> part((size_t)(n_split * DECODE_MAX_TOKENS * n_head * (dv + 2)));
    test_cache keys(pos + TOKENS, n_kv * dk, dk, fp8, n_row), values(pos + TOKENS, n_kv * dv, dv, fp8, n_row);
    std::vector<uint16_t> want;
    static const int batches[][TOKENS] = {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {16}, {3, 9, 4}, {7, 8, 1}};
    for (auto &sizes : batches) {
        std::vector<uint16_t> got;
        for (int b = 0, first = 0; b < TOKENS && sizes[b]; first += sizes[b++]) {
            const int n = sizes[b], at = pos + first;
            gpu_batch place(at, n, at);
            gpu_array<uint16_t> out(out_row * (size_t)n);
            struct attn_args a = {};
            a.out = out, a.partials = part, a.batch = place, a.k = keys.p, a.v = values.p, a.n_tok = n;
            a.n_head = n_head, a.n_head_kv = n_kv, a.dk = dk, a.dv = dv, a.out_stride = out_row;
            a.max_splits = n_split, a.scale = (float)(1 / sqrt(dk)), a.window = window, a.sinks = sinks_d;
            a.arrived = arrived;
            struct rope_args &r = a.rope;
            r.batch = place, r.cs = cs_d + first * rope / 2, r.sn = sn_d + first * rope / 2;
            r.q = q.d + first * q.stride, r.k = k.d + first * k.stride, r.v = v.d + first * v.stride;
            r.q_stride = (size_t)q.stride, r.k_stride = (size_t)k.stride, r.v_stride = (size_t)v.stride;
            r.kp = keys.p, r.vp = values.p, r.n_head = n_head, r.n_head_kv = n_kv, r.d = r.q_head = dk, r.dv = dv;
            r.rope = rope, r.eps = 1e-6f;
            attn_launch(&a, ATTN_GQA, false, test_stream);
            finish("attention in batches");
            const std::vector<uint16_t> rows = out.get();
            got.insert(got.end(), rows.begin(), rows.end());
        }
        if (want.empty()) want = got;
        int bad = 0;
        for (size_t t = 0; t < TOKENS; t++)
            bad += memcmp(&got[t * out_row], &want[t * out_row], out_row * sizeof want[0]) != 0;
        expect(
            !bad,
            "%d/%d, fp8 %d, groups of %d, window %d of %d rows, %d splits, at %d, batches of %d and so on: %d tokens "
            "have other bits",
            dk, dv, fp8, group, window, n_row, n_split, pos, sizes[0], bad);
    }
}

static void run_window_bits() {
    static const int groups[] = {1, 6, 8, 9, 12, 16}, splits[] = {64, 5, 2, 1};
    int turn = 0;
    for (int window : {1, 60, 130, 300, 700})
        for (int edge : {64, 512, 1024}) { /* which the last key crosses, or the first one */
            const int pos = turn & 1 ? edge + window - 8 : edge - 5;
            const bool ring = turn % 3 > 0, wide = turn % 4 == 2;
            run_window_batches(wide ? 192 : 64, wide ? 128 : 64, turn % 5 < 2, groups[turn % 6], window,
                               splits[turn % 4], pos, ring ? (window + 14 + 64) / 64 * 64 : 0);
            turn++;
        }
}

/* Gates of prefill: one for a head, or one for every value. */
static void run_head_gate(bool each, bool softplus) {
    enum { TOKENS = 5, HEADS = 9, HEAD = 40, WIDTH = HEADS * HEAD, STRIDE = WIDTH + 8 };
    const size_t n_gate = each ? WIDTH : HEADS, gate_stride = n_gate + 3;
    std::vector<uint16_t> x((size_t)TOKENS * STRIDE);
    std::vector<float> gate(TOKENS * gate_stride);
    for (uint16_t &h : x) h = f16_from_f32((float)normal());
    for (float &g : gate) g = (float)normal() * (rnd() % 8 ? 2 : 12);
    gpu_array<uint16_t> x_d(x);
    gpu_array<float> gate_d(gate);
    const struct gate_args a = {x_d, STRIDE, gate_d, gate_stride, HEADS, HEAD, each, softplus};
    gate_d.arrive();
    LAUNCH_PDL(k_head_gate, dim3(ceil_div(WIDTH, 1024), TOKENS), 128, 0, test_stream, a);
    finish("gates of heads");
    const std::vector<uint16_t> got = x_d.get();
    int bad = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const size_t t = i / STRIDE, c = i % STRIDE;
        const double g = c < WIDTH ? (double)gate[t * gate_stride + (each ? c : c / HEAD)] : 0;
        const double f = softplus ? log1p(exp(g)) : 1 / (1 + exp(-g)), want = f * (double)f16_to_f32(x[i]);
        const double error = fabs((double)f16_to_f32(got[i]) - want);
        bad += c < WIDTH ? !(error <= fabs(want) * 6e-4 + 6e-8) : got[i] != x[i];
    }
    expect(!bad, "gates of heads, each %d, softplus %d: %d values are wrong", each, softplus, bad);
}

/* Windows that begin anew: no token is in the next chunk, one is, half of them or all are. */
static void run_chunks() {
    static const int widths[][2] = {{32, 32}, {64, 64}, {128, 128}, {192, 128}, {256, 256}},
                     toks[][5] = {{2, 7, 16, 1, 12}, {17, 64, 70, 33, 65}}, chunks[] = {64, 128, 576, 1024},
                     splits[] = {64, 1, 3, 64, 2};
    int turn = 0;
    for (auto &w : widths)
        for (int kind = 0; kind < 4; kind++)
            for (int chunk : chunks) {
                struct attn_case c = {};
                c.dk = w[0], c.dv = w[1], c.prefill = kind & 1, c.fp8 = kind >> 1, c.window = chunk, c.chunked = true;
                c.n_kv = 1 + turn % 2, c.group = 1 + turn % 4, c.splits = splits[turn % 5], c.size = 1;
                c.n_tok = toks[c.prefill][turn % 5], c.several = !c.prefill && turn % 7 == 0;
                const int before[] = {c.n_tok, c.n_tok - 1, c.n_tok / 2, 0}; /* tokens before the boundary */
                c.pos = (1 + turn % 2) * chunk - before[(turn + kind) % 4];
                if (c.pos < 0) c.pos += chunk;
                if (turn % 3) c.ring = (chunk - 1 + c.n_tok + 63) / 64 * 64;
                c.grows = !c.prefill && turn % 2;
                turn++;
                run_attention(c);
            }
}

/* Windows of latents: one split and several, which k_mla_value joins; tiles of rows of several tokens and of one. */
static void run_latent_windows() {
    static const int windows[] = {1, 60, 64, 65, 300, 520}, toks[][3] = {{1, 3, 16}, {17, 33, 70}},
                     groups[] = {1, 5, 20};
    int turn = 0;
    for (int kind = 0; kind < 4; kind++)
        for (int window : windows)
            for (int splits : {1, 3, 64}) {
                struct attn_case c = {};
                c.mla = true, c.dk = 1088, c.dv = 1024, c.n_kv = 1, c.size = 1, c.window = window, c.splits = splits;
                c.prefill = kind & 1, c.fp8 = kind >> 1, c.n_tok = toks[c.prefill][turn % 3];
                c.group = groups[(turn / 3 + turn) % 3];
                while (c.n_tok * c.group > 100) c.group = (c.group + 1) / 2;
                c.pos = turn % 4 ? (window + (int)(rnd() % 700)) / 64 * 64 - (int)(rnd() % 3) + turn % 2 : 0;
                c.pos = max(c.pos, 0), c.sinks = turn % 5 > 2, c.several = !c.prefill && turn / 3 % 2;
                if (turn++ % 2) c.ring = (window - 1 + c.n_tok + 63) / 64 * 64;
                run_attention(c);
            }
    struct attn_case c = {};
    c.mla = true, c.dk = 1088, c.dv = 1024, c.n_kv = c.group = 1, c.size = 1, c.window = 300, c.splits = 3;
    for (int i = 0; i < 2 * FMT_COUNT; i++) { /* wv_b of all formats, for up to 8 tokens and for more */
        c.n_tok = i % 2 ? 16 : 1, c.pos = 600 + i / 2, c.several = i % 4 == 1;
        run_attention(c);
    }
}

/* Windows of one key, around the steps of 64 keys, and of several splits; contexts shorter and much longer; rings as
 * short as they may be; sinks, rotations of neighbors, heads that are not normed, gates. */
extern "C" void cuda_test_windows(void) {
    begin_test(14);
    run_chunks();
    run_latent_windows();
    run_window_bits();
    for (bool each : {false, true}) run_head_gate(each, !each), run_head_gate(each, each);
    static const int windows[] = {1, 5, 63, 64, 65, 129, 200, 300, 520},
                     toks[][5] = {{1, 2, 7, 16, 12}, {17, 33, 70, 20, 65}};
    static const int splits[] = {1, 2, 3, 64}, groups[] = {1, 6, 8, 9, 12, 16};
    static const int widths[][2] = {{32, 32}, {64, 64}, {128, 128}, {192, 128}, {256, 256}};
    int turn = 0;
    for (auto &w : widths)
        for (int kind = 0; kind < 4; kind++)
            for (int window : windows) {
                struct attn_case c = {};
                c.dk = w[0], c.dv = w[1], c.prefill = kind & 1, c.fp8 = kind >> 1, c.window = window;
                c.splits = splits[turn % 4], c.n_tok = toks[c.prefill][turn++ % 5];
                c.n_kv = 1 + (int)(rnd() % 2), c.group = groups[rnd() % 6], c.size = rnd() % 5 ? 1 : 60;
                while (c.n_tok * c.n_kv * c.group > 200) c.n_kv = 1, c.group = (c.group + 1) / 2;
                /* from an empty context to ten windows; more often where a step begins or ends */
                c.pos = (int)(rnd() % 8) ? (int)(rnd() % (uint32_t)min(10 * window + 70, 1500)) : 0;
                if (rnd() % 2) c.pos = max((c.pos + window) / 64 * 64 - 1 - (int)(rnd() % 3), 0);
                if (rnd() % 2) c.ring = (window - 1 + c.n_tok + 63) / 64 * 64;
                c.sinks = rnd() % 2, c.pairs = rnd() % 2, c.plain = rnd() % 2;
                if (!c.prefill) c.gates = (enum test_gates)(rnd() % 5);
                else if (c.dk == c.dv) c.gates = (enum test_gates)(rnd() % 2);
                if (c.dk != c.dv && c.gates == Q_GATES) c.gates = NO_GATES;
                run_attention(c);
                c.window = c.ring = 0, c.sinks = true, c.pos = min(c.pos, 300); /* sinks where all keys are seen */
                if (turn % 3 == 0) run_attention(c);
            }
}

/* ---- gated delta net, Kimi delta attention, Mamba-2 ---- */

struct delta_case {
    int n_key, group, dk, dv;
    bool tiled;
    int before, after; /* the model's key heads before and after the rank's */
    int pos, n_uncommitted, n_tok;
    float size;  /* of the values */
    float decay; /* of alpha */
    bool alike;  /* keys hardly differ, and little is forgotten */
    enum delta_rule rule = RULE_NET;
    float bound = 0;       /* as of struct delta */
    float forgets = 0.01f; /* scale of the decays of such */
    int taps = DELTA_TAPS; /* of the model; those before them are 0 */
    bool sigmoid = false;  /* a delta net's gates are sigmoids, as those of Kimi delta attention */
    bool kda() const { return rule == RULE_KDA; }
    bool mamba() const { return rule == RULE_MAMBA; }
    int n_decay() const { return kda() ? dk : 1; }
    /* floats of a row of the ring of alpha and beta, and where those of a value head stand */
    int gates() const { return n_key * group * (n_decay() + !mamba()); }
    int alpha_at(int j) const { return kda() ? j * (dk + 1) : j; }
    int beta_at(int j) const { return kda() ? j * (dk + 1) + dk : n_key * group + j; }
};

/* Numbers for the case, as the model has them: rows of the positions first - 3 .. pos + n_tok - 1. */
struct delta_numbers {
    std::vector<float> q, k, v, alpha, beta, z, conv, bias, decay, dt_bias, skip, norm, state;
    explicit delta_numbers(const delta_case &c) {
        const size_t rows = (size_t)(c.n_uncommitted + c.n_tok + 3), n_key = (size_t)c.n_key,
                     n_value = n_key * (size_t)c.group;
        const size_t whole = (size_t)(c.before + c.n_key + c.after), dk = (size_t)c.dk, dv = (size_t)c.dv;
        auto fill = [](std::vector<float> &x, size_t n, float size) {
            for (size_t i = 0; i < n; i++) x.push_back(size * (float)normal());
        };
        fill(q, rows * n_key * dk, 1), fill(k, rows * n_key * dk, 1), fill(v, rows * n_value * dv, c.size);
        const size_t each = (size_t)c.n_decay();
        fill(alpha, rows * n_value * each, c.decay), fill(beta, rows * n_value, c.alike ? 0.1f : 1);
        fill(z, (size_t)c.n_tok * n_value * dv, 1), fill(conv, (2 * whole * dk + whole * (size_t)c.group * dv) * 4, 1);
        fill(decay, whole * (size_t)c.group, 1), fill(dt_bias, whole * (size_t)c.group * each, 1);
        fill(bias, c.mamba() ? conv.size() / 4 : 0, 0.3f), fill(skip, c.mamba() ? decay.size() : 0, 1);
        fill(norm, c.mamba() ? whole * (size_t)c.group * dv : dv, 1);
        fill(state, n_value * dk * dv, c.size);
        for (size_t i = 0; i < conv.size(); i++)
            if ((int)(i % DELTA_TAPS) < DELTA_TAPS - c.taps) conv[i] = 0;
        for (float &x : decay) x = (c.bound < 0 ? 1 : -1) * fabsf(x) * (c.alike ? c.forgets : 1);
        if (!c.alike) return;
        for (float &x : beta) x += 4; /* of almost 1 */
        for (size_t i = 0; i < k.size(); i++) k[i] = (float)sin(1 + (double)(i % (n_key * dk))) + 0.2f * k[i];
    }
};

/* The results (n_tok, n_value * dv) and the state after `taken` rows, in double precision. */
static void delta_plain(const delta_case &c, const delta_numbers &x, int taken, std::vector<double> &out,
                        std::vector<double> &state) {
    const int n_value = c.n_key * c.group, whole = c.before + c.n_key + c.after, dk = c.dk, dv = c.dv;
    const int first = c.pos - c.n_uncommitted;
    auto conv = [&](const std::vector<float> &from, int width, int col, size_t channel, int row) {
        double y = c.mamba() ? (double)x.bias[channel] : 0;
        for (int t = 0; t < 4; t++)
            if (first + row - 3 + t >= 0)
                y += (double)x.conv[channel * 4 + (size_t)t] * (double)from[(size_t)((row + t) * width + col)];
        return y / (1 + exp(-y));
    };
    auto unit = [](std::vector<double> &y) {
        double ss = 1e-6;
        for (double e : y) ss += e * e;
        for (double &e : y) e /= sqrt(ss);
    };
    out.assign((size_t)(c.n_tok * n_value * dv), 0);
    state.assign(x.state.begin(), x.state.end());
    for (int j = 0; j < n_value; j++) {
        const int kh = c.tiled ? j % c.n_key : j / c.group;
        const int head = c.tiled ? j / c.n_key * whole + c.before + kh : c.before * c.group + j;
        std::vector<double> S(state.begin() + j * dk * dv, state.begin() + (j + 1) * dk * dv);
        for (int i = 0; i < c.n_uncommitted + c.n_tok; i++) {
            if (i == taken) std::copy(S.begin(), S.end(), state.begin() + j * dk * dv);
            std::vector<double> q((size_t)dk), k((size_t)dk), o((size_t)dv);
            for (int h = 0; h < dk; h++) {
                const size_t at = (size_t)((c.before + kh) * dk + h);
                q[(size_t)h] = conv(x.q, c.n_key * dk, kh * dk + h, at, i);
                k[(size_t)h] = conv(x.k, c.n_key * dk, kh * dk + h, at + (size_t)(whole * dk), i);
            }
            if (!c.mamba()) unit(q), unit(k);
            const double beta = 1 / (1 + exp(-(double)x.beta[(size_t)((i + 3) * n_value + j)]));
            const double decay = (double)x.decay[(size_t)head];
            std::vector<double> f((size_t)dk);
            double step = 0;
            for (int h = 0; h < dk; h++) {
                const int n = c.n_decay(), e = c.kda() ? h : 0;
                const double a = (double)x.alpha[(size_t)(((i + 3) * n_value + j) * n + e)] +
                                 (double)x.dt_bias[(size_t)(head * n + e)];
                step = log1p(exp(a));
                f[(size_t)h] = exp(c.bound < 0 ? (double)c.bound / (1 + exp(-decay * a)) : decay * step);
            }
            double ss = 0;
            for (int e = 0; e < dv; e++) {
                const double v = conv(x.v, n_value * dv, j * dv + e, (size_t)(2 * whole * dk + head * dv + e), i);
                double u = v;
                for (int h = 0; h < dk && !c.mamba(); h++) u -= f[(size_t)h] * k[(size_t)h] * S[(size_t)(h * dv + e)];
                for (int h = 0; h < dk; h++) {
                    double &s = S[(size_t)(h * dv + e)];
                    s = f[(size_t)h] * s + k[(size_t)h] * (c.mamba() ? step : beta) * u;
                    o[(size_t)e] += q[(size_t)h] * s / (c.mamba() ? 1 : sqrt(dk));
                }
                if (c.mamba()) o[(size_t)e] += (double)x.skip[(size_t)head] * v;
                ss += o[(size_t)e] * o[(size_t)e];
            }
            for (int e = 0; e < dv && i >= c.n_uncommitted; e++) {
                const size_t at = (size_t)((i - c.n_uncommitted) * n_value * dv + j * dv + e);
                const double z = (double)x.z[at], gate = (c.kda() || c.sigmoid ? 1 : z) / (1 + exp(-z));
                out[at] = o[(size_t)e] * gate;
                if (!c.mamba()) out[at] *= (double)x.norm[(size_t)e] / sqrt(ss / dv + 1e-6);
            }
        }
    }
    const int n = c.group * dv; /* values of a group, which Mamba-2 norms together */
    for (size_t at = 0; c.mamba() && at < out.size(); at += (size_t)n) {
        const float *norm = &x.norm[((size_t)c.before + at / (size_t)n % (size_t)c.n_key) * (size_t)n];
        double ss = 0;
        for (int e = 0; e < n; e++) ss += out[at + (size_t)e] * out[at + (size_t)e];
        for (int e = 0; e < n; e++) out[at + (size_t)e] *= (double)norm[e] / sqrt(ss / n + 1e-6);
    }
}

static void run_delta(const struct delta_case &c) {
    enum { PAD = 8 };
    const delta_numbers x(c);
    const int window = c.taps - 1, n_ring = window + 2 * MAX_ROLLBACK;
    const int n_value = c.n_key * c.group, keys = c.n_key * c.dk, values = n_value * c.dv,
              first = c.pos - c.n_uncommitted;
    const int rows = c.n_uncommitted + c.n_tok, taken = c.n_tok > MAX_ROLLBACK ? rows - 1 : c.n_uncommitted;
    auto own = [&](const std::vector<float> &from,
                   int width) { /* the forward's rows, PAD columns wider */
                                std::vector<float> to((size_t)(c.n_tok * (width + PAD)), NAN);
                                for (int t = 0; t < c.n_tok; t++)
                                    std::copy_n(from.begin() + (t + c.n_uncommitted + 3) * width, width,
                                                to.begin() + t * (width + PAD));
                                return to;
    };
    auto ring = [&](const std::vector<float> &a, const std::vector<float> &b, int width, int from, int to) {
        std::vector<float> r((size_t)(n_ring * 2 * width), NAN); /* (a | b) of positions from..to-1 */
        for (int p = max(from, 0); p < to; p++)
            for (int i = 0; i < 2 * width; i++)
                r[(size_t)(p % n_ring * 2 * width + i)] =
                    (i < width ? a : b)[(size_t)((p - first + 3) * width + i % width)];
        return r;
    };
    auto ring_of_gates = [&](int from, int to) {
        std::vector<float> r((size_t)(n_ring * c.gates()), NAN); /* alpha and beta of positions from..to-1 */
        const int n = c.n_decay();
        for (int p = max(from, 0); p < to; p++)
            for (int j = 0; j < n_value; j++) {
                float *row = &r[(size_t)(p % n_ring * c.gates())];
                const int at = (p - first + 3) * n_value + j;
                std::copy_n(x.alpha.begin() + at * n, n, row + c.alpha_at(j));
                if (!c.mamba()) row[c.beta_at(j)] = x.beta[(size_t)at];
            }
        return r;
    };
    std::vector<float> z((size_t)(c.n_tok * (values + PAD)), NAN);
    for (int t = 0; t < c.n_tok; t++) std::copy_n(x.z.begin() + t * values, values, z.begin() + t * (values + PAD));
    gpu_array<float> q(own(x.q, keys)), k(own(x.k, keys)), v(own(x.v, values)), z_d(z),
        alpha(own(x.alpha, n_value * c.n_decay())), beta(own(x.beta, n_value));
    gpu_array<float> ring_qk(ring(x.q, x.k, keys, first - window, c.pos)),
        ring_v(ring(x.v, x.v, values, first - window, c.pos)), ring_gates(ring_of_gates(first - window, c.pos));
    gpu_array<float> state(x.state), conv(x.conv), decay(x.decay), dt_bias(x.dt_bias), norm(x.norm);
    gpu_array<float> bias(c.mamba() ? x.bias : x.norm), skip(c.mamba() ? x.skip : x.norm);
    gpu_array<uint16_t> out(std::vector<uint16_t>((size_t)(c.n_tok * (values + PAD)), 0xABCD));
    gpu_batch b(c.pos, c.n_tok, first);
    const size_t most = DELTA_SEGMENT, tiles = most / DELTA_TILE * (size_t)n_value;
    gpu_array<uint16_t> qk16(std::vector<uint16_t>(most * (size_t)(delta_planes(c.rule) * keys), 0x7E00)),
        tiles_d(std::vector<uint16_t>(tiles * 3 * DELTA_TILE * DELTA_TILE, 0x7E00));
    gpu_array<float> mixed(std::vector<float>(most * (size_t)values, NAN)),
        gates(std::vector<float>(most * 4 * (size_t)n_value, NAN)), fades(std::vector<float>(tiles * DELTA_FADES, NAN));
    struct delta_args a = {};
    a.batch = b;
    const int whole = c.before + c.n_key + c.after;
    a.shape.n_key = c.n_key, a.shape.n_value = n_value, a.shape.head_k = c.dk, a.shape.head_v = c.dv;
    a.shape.n_conv = c.taps, a.shape.n_decay = c.n_decay(), a.shape.bound = c.bound;
    a.shape.sigmoid_gate = c.kda() || c.sigmoid, a.shape.tiled = c.tiled, a.shape.first_key = c.before,
    a.shape.whole_key = whole;
    a.q = q, a.k = k, a.v = v, a.z = z_d, a.alpha = alpha;
    if (c.mamba()) a.conv_bias = bias, a.skip = skip;
    else a.beta = beta;
    a.q_stride = a.k_stride = (size_t)(keys + PAD), a.v_stride = a.z_stride = a.out_stride = (size_t)(values + PAD);
    a.alpha_stride = (size_t)(n_value * c.n_decay() + PAD), a.beta_stride = (size_t)(n_value + PAD);
    a.ring_qk = ring_qk, a.ring_v = ring_v, a.ring_gates = ring_gates, a.n_ring = n_ring;
    a.ring_qk_stride = (size_t)(2 * keys), a.ring_v_stride = (size_t)(2 * values);
    a.ring_gates_stride = (size_t)c.gates();
    a.state = state, a.conv = conv, a.decay = decay, a.dt_bias = dt_bias, a.norm = norm, a.eps = 1e-6f, a.out = out;
    for (int i = 0; i < 3; i++) a.before[i] = i * a.shape.whole_key * c.dk;
    a.t = {qk16, mixed, gates, tiles_d, fades};
    q.arrive();
    (c.mamba() ? mamba_launch : delta_launch)(&a, c.n_tok, c.n_uncommitted, test_stream);
    finish("a recurrent layer");
    std::vector<double> want, want_state;
    delta_plain(c, x, taken, want, want_state);
    std::vector<uint16_t> got = out.get();
    std::vector<float> got_state = state.get();
    error_sum sum, states;
    int bad = 0;
    for (int t = 0; t < c.n_tok; t++)
        for (int i = 0; i < values + PAD; i++) {
            const uint16_t h = got[(size_t)(t * (values + PAD) + i)];
            if (i < values) sum.add((double)f16_to_f32(h), want[(size_t)(t * values + i)]);
            else bad += h != 0xABCD;
        }
    for (size_t i = 0; i < got_state.size(); i++) states.add((double)got_state[i], want_state[i]);
    /* the latest positions that the ring holds */
    const int end = c.pos + c.n_tok, from = max(first - window, end - n_ring);
    std::vector<float> w = ring(x.q, x.k, keys, from, end), g = ring_qk.get();
    for (size_t i = 0; i < w.size(); i++) bad += w[i] == w[i] && w[i] != g[i];
    w = ring(x.v, x.v, values, from, end), g = ring_v.get();
    for (size_t i = 0; i < w.size(); i++) bad += (int)i % (2 * values) < values && w[i] == w[i] && w[i] != g[i];
    w = ring_of_gates(from, end), g = ring_gates.get();
    for (size_t i = 0; i < w.size(); i++) bad += w[i] == w[i] && w[i] != g[i];
    const double limit = c.alike ? 1e-5 : 1e-6; /* of results in halves */
    expect(sum.nmse() <= limit && states.nmse() <= 1e-10 && !bad,
           "%d keys of %d, %d values of %d, %s, %d taps, from %d, %d tokens after %d at %d, size %g, decay %g%s: NMSE "
           "%.1e, state %.1e, %d wrong in rings and gaps",
           c.n_key, c.dk, n_value, c.dv,
           c.kda()     ? "decays of rows"
           : c.mamba() ? "Mamba-2"
           : c.tiled   ? "tiled"
                       : "grouped",
           c.taps, c.before, c.n_tok, c.n_uncommitted, c.pos, c.size, c.decay, c.alike ? ", alike" : "", sum.nmse(),
           states.nmse(), bad);
}

extern "C" void cuda_test_delta_net(void) {
    begin_test(12);
    static const struct delta_case cases[] = {
        /* decode */
        {1, 2, 128, 128, false, 0, 0, 0, 0, 1, 1, 1, false},
        {2, 2, 128, 128, true, 2, 1, 40, 1, 1, 1, 1, false},
        {3, 1, 40, 24, true, 0, 0, 2, 2, 7, 1e-4f, 1, false},
        {1, 3, 64, 128, false, 1, 0, 100, 16, 16, 1e4f, 3, false},
        {1, 1, 128, 64, true, 0, 1, 19, 9, 16, 1, 0.1f, true},
        /* prefill: tiles that are begun, full, one beyond; all rows of a tile but none, or one, in the state */
        {1, 2, 128, 128, false, 0, 0, 0, 0, 17, 1, 1, false},
        {2, 2, 64, 40, true, 1, 1, 5, 5, 59, 1e-4f, 1, false},
        {1, 1, 128, 128, true, 0, 0, 3, 1, 64, 1, 1, true},
        {1, 1, 24, 32, true, 0, 0, 70, 16, 49, 1e4f, 4, false},
        {1, 1, 128, 72, false, 2, 0, 16, 16, 700, 1, 0.1f, true},
        {1, 2, 128, 128, true, 0, 2, 60, 3, 254, 1, 1, false},
        {1, 2, 128, 64, false, 0, 0, 16, 16, 80, 1, 40, false}, /* decays of e^-100, and of 1 */
        /* Kimi delta attention: decode, prefill */
        {2, 1, 128, 128, false, 0, 0, 0, 0, 1, 1, 1, false, RULE_KDA},
        {1, 1, 40, 40, false, 2, 1, 40, 3, 5, 1, 1, false, RULE_KDA},
        {1, 1, 64, 64, false, 1, 0, 100, 16, 16, 1e4f, 3, false, RULE_KDA, -5},
        {1, 1, 128, 128, false, 0, 1, 19, 9, 16, 1, 0.1f, true, RULE_KDA, -0.1f},
        {2, 1, 32, 32, false, 0, 1, 0, 0, 17, 1, 1, false, RULE_KDA},
        {1, 1, 128, 128, false, 3, 0, 60, 7, 41, 1, 2, false, RULE_KDA, -5},
        {1, 1, 24, 24, false, 0, 0, 16, 16, 700, 1, 0.1f, true, RULE_KDA},
        {2, 1, 128, 128, false, 1, 2, 5, 5, 63, 1e-4f, 1, false, RULE_KDA},
        {1, 1, 72, 72, false, 0, 0, 70, 16, 64, 1e4f, 4, false, RULE_KDA, -5},
        {1, 1, 128, 128, false, 0, 0, 2, 2, 65, 1, 40, false, RULE_KDA}, /* decays of e^-100, and of 1 */
        {3, 1, 40, 40, false, 0, 1, 16, 16, 129, 1, 10, false, RULE_KDA, -5},
        {1, 1, 128, 128, false, 0, 0, 0, 0, 81, 1, 1, true, RULE_KDA, -1e-4f},
        /* Mamba-2: decode, prefill */
        {1, 2, 128, 64, false, 0, 0, 0, 0, 1, 1, 1, false, RULE_MAMBA},
        {2, 3, 72, 40, false, 1, 1, 40, 16, 16, 1e4f, 3, false, RULE_MAMBA},
        {1, 8, 128, 64, false, 1, 0, 0, 0, 17, 1, 1, false, RULE_MAMBA},
        {2, 1, 128, 64, false, 0, 1, 5, 5, 63, 1e-4f, 1, false, RULE_MAMBA},
        {1, 2, 72, 40, false, 2, 0, 70, 16, 64, 1e4f, 4, false, RULE_MAMBA},
        {2, 5, 24, 32, false, 0, 2, 3, 1, 65, 1, 1, true, RULE_MAMBA},
        {1, 1, 128, 128, false, 0, 0, 16, 16, 80, 1, 40, false, RULE_MAMBA}, /* decays of e^-100, and of 1 */
        {1, 2, 128, 64, false, 0, 0, 60, 3, 254, 1, 0.1f, true, RULE_MAMBA},
        {1, 1, 40, 72, false, 0, 0, 16, 16, 700, 1, 1, false, RULE_MAMBA},
        /* fewer taps: the ring lacks the first token under the kernel's, or has a later token in its row */
        {1, 3, 64, 64, false, 0, 0, 100, 16, 16, 1, 1, false, RULE_NET, 0, 1, 3},
        {1, 1, 40, 24, true, 0, 0, 2, 1, 3, 1, 1, false, RULE_NET, 0, 1, 1},
        {1, 1, 64, 40, true, 1, 1, 40, 0, 70, 1, 1, false, RULE_NET, 0, 1, 2},
        {1, 1, 40, 40, false, 0, 0, 50, 16, 16, 1, 1, false, RULE_KDA, -5, 1, 2},
        {1, 1, 64, 64, false, 0, 0, 40, 0, 65, 1, 1, false, RULE_KDA, 0, 1, 3},
        {1, 2, 72, 40, false, 0, 0, 100, 16, 16, 1, 1, false, RULE_MAMBA, 0, 1, 3},
        {1, 1, 24, 32, false, 0, 0, 40, 9, 66, 1, 1, false, RULE_MAMBA, 0, 1, 1},
        {1, 1, 24, 32, false, 0, 0, 40, 0, 66, 1, 1, false, RULE_MAMBA, 0, 1, 2},
        /* the gates of Qwen3.8-Flash-Next, and groups of many heads */
        {1, 1, 64, 128, false, 0, 0, 3, 0, 1, 1, 1, false, RULE_NET, 0, 1, 4, true},
        {1, 1, 64, 128, false, 0, 0, 3, 0, 17, 1, 1, false, RULE_NET, 0, 1, 4, true},
        {1, 13, 16, 128, false, 0, 0, 3, 0, 1, 1, 1, false, RULE_MAMBA},
    };
    for (auto &c : cases) run_delta(c);
}

/* After 30,000 tokens of prefill, of which hardly any is forgotten, the state is that of the recurrent form. */
extern "C" void cuda_test_delta_recall(void) {
    begin_test(13);
    run_delta({1, 1, 128, 32, false, 0, 0, 0, 0, 30000, 1, 0.001f, true});
    run_delta({1, 1, 128, 32, false, 0, 0, 0, 0, 30000, 1, 0.001f, true, RULE_KDA, -1e-6f});
    run_delta({1, 1, 128, 32, false, 0, 0, 0, 0, 30000, 1, 0.001f, true, RULE_MAMBA, 0, 1e-7f});
}
