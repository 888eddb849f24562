/* The number formats of gguf_nvfp4.h against libggml's tables and vectors (tests/golden/nvfp4), and the quantizer of
 * the converter. */
#include "../convert/quantize.h"

/* Calls fn for every line of a golden file that is not a comment. */
static void golden_lines(const char *file, void (*fn)(char *line)) {
    char path[256], *line = NULL;
    size_t cap = 0, n = 0;
    snprintf(path, sizeof path, "tests/golden/nvfp4/%s", file);
    FILE *f = fopen(path, "r");
    if (!CHECK(f, "cannot open %s", path)) return;
    while (getline(&line, &cap, f) > 0) {
        line[strcspn(line, "\n")] = 0;
        if (*line && *line != '#') fn(line), n++;
    }
    CHECK(n > 0, "%s is empty", path);
    free(line);
    fclose(f);
}

/* n bytes from hexadecimal; advances *s over them and over one space. */
static bool hex_bytes(char **s, uint8_t *out, size_t n) {
    for (size_t i = 0; i < n; i++, *s += 2) {
        unsigned b;
        if (sscanf(*s, "%2x", &b) != 1) return false;
        out[i] = (uint8_t)b;
    }
    *s += **s == ' ';
    return true;
}

static bool hex_floats(char **s, float *out, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint8_t b[4];
        if (!hex_bytes(s, b, 4)) return false;
        out[i] = f32_from_bits((uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3]);
    }
    return true;
}

static bool same_bits(float a, float b) { return f32_to_bits(a) == f32_to_bits(b); }

static void check_e2m1_line(char *line) {
    unsigned code, bits;
    if (!CHECK(sscanf(line, "%x %*s %*s %x", &code, &bits) == 2 && code < 16, "%s", line)) return;
    CHECK(f32_to_bits(e2m1_to_f32((uint8_t)code)) == bits, "code %u", code);
    CHECK(e2m1_doubled[code] == (int)(2 * f32_from_bits(bits)), "code %u", code);
}

static void test_nvfp4_e2m1(void) { golden_lines("e2m1.txt", check_e2m1_line); }

static void check_e4m3_line(char *line) {
    unsigned byte, bits;
    if (!CHECK(sscanf(line, "%x %*s %x", &byte, &bits) == 2 && byte < 256, "%s", line)) return;
    float v = e4m3_to_f32((uint8_t)byte);
    if ((byte & 0x7f) == 0x7f) {
        CHECK(isnan(v), "byte %02x", byte);
        return;
    }
    CHECK(f32_to_bits(v) == bits, "byte %02x: %g", byte, (double)v);
    CHECK(e4m3_from_f32(v) == byte, "byte %02x does not come back: %02x", byte, e4m3_from_f32(v));
    CHECK(same_bits(bf16_to_f32(bf16_from_f32(v)), v), "byte %02x is not exact in BF16", byte);
}

/* Every value, and between two neighbors nearest with ties to even. */
static void test_nvfp4_e4m3(void) {
    golden_lines("e4m3.txt", check_e4m3_line);
    for (int b = 0; b < 0x7e; b++) {
        float lo = e4m3_to_f32((uint8_t)b), hi = e4m3_to_f32((uint8_t)(b + 1)), mid = (lo + hi) / 2;
        CHECK(e4m3_from_f32(mid) == b + (b & 1), "tie above %02x: %02x", b, e4m3_from_f32(mid));
        CHECK(e4m3_from_f32(nextafterf(mid, lo)) == b, "below the tie above %02x", b);
        CHECK(e4m3_from_f32(nextafterf(mid, hi)) == b + 1, "above the tie above %02x", b);
        CHECK(e4m3_from_f32(-hi) == (0x80 | (b + 1)), "minus %g", (double)hi);
    }
    CHECK(e4m3_from_f32(1e9f) == 0x7e && e4m3_from_f32(-INFINITY) == 0xfe, "saturation");
    CHECK(e4m3_from_f32(NAN) == 0x7f && e4m3_from_f32(-NAN) == 0xff, "not a number");
}

static void check_ue4m3_line(char *line) {
    unsigned byte, scale, one, six;
    struct block_nvfp4 b = {{0}, {0}};
    float v[64];
    if (!CHECK(sscanf(line, "%x %*s %x %x %x", &byte, &scale, &one, &six) == 4, "%s", line)) return;
    memset(b.d, (int)byte, 4);
    b.qs[0] = 0x72;
    nvfp4_decode_block(&b, v);
    CHECK(f32_to_bits(ue4m3_to_f32((uint8_t)byte)) == scale, "byte %02x", byte);
    CHECK(f32_to_bits(v[0]) == one && f32_to_bits(v[8]) == six, "byte %02x: %g %g", byte, (double)v[0], (double)v[8]);
}

static void test_nvfp4_ue4m3(void) { golden_lines("ue4m3.txt", check_ue4m3_line); }

static void check_quantize_line(char *line) {
    float x[64], want[64], got[64];
    struct block_nvfp4 b, golden;
    char *s = strchr(line, ' ');
    if (!CHECK(s, "%s", line)) return;
    *s++ = 0;
    if (!CHECK(hex_floats(&s, x, 64) && hex_bytes(&s, (uint8_t *)&golden, 36) && hex_floats(&s, want, 64),
               "%s: too short", line))
        return;
    nvfp4_encode_block_ref(x, &b);
    CHECK(!memcmp(&b, &golden, sizeof b), "%s: another block than libggml's", line);
    nvfp4_decode_block(&golden, got);
    for (int i = 0; i < 64; i++) CHECK(got[i] == want[i], "%s: element %d", line, i);
}

static void test_nvfp4_quantize(void) { golden_lines("quantize_ref.txt", check_quantize_line); }

/* A matrix in Hugging Face's layout, its GGUF bytes and exact values. The arrays are stb_ds. */
struct golden_case {
    char name[64];
    unsigned rows, cols;
    float scale2, global_scale; /* global_scale 0: ModelOpt */
    uint8_t *weight, *scale, *gguf;
    float *dequant;
};

static struct golden_case golden;
static void (*golden_case_fn)(const struct golden_case *c);

/* Collects the lines of one record of modelopt_repack.txt and calls golden_case_fn at its end. */
static void golden_case_line(char *line) {
    struct golden_case *c = &golden;
    unsigned bits;
    char *s = strchr(line, ' ');
    if (sscanf(line, "case %63s", c->name) == 1) return;
    if (sscanf(line, "rows %u cols %u", &c->rows, &c->cols) == 2) return;
    if (sscanf(line, "weight_scale_2 %x", &bits) == 1) c->scale2 = f32_from_bits(bits);
    else if (sscanf(line, "weight_global_scale %x", &bits) == 1) c->global_scale = f32_from_bits(bits);
    else if (!strcmp(line, "end")) {
        size_t n = (size_t)c->rows * c->cols;
        if (CHECK(n && arrlenu(c->weight) == n / 2 && arrlenu(c->scale) == n / 16 && arrlenu(c->gguf) == n / 64 * 36 &&
                      arrlenu(c->dequant) == n,
                  "%s: incomplete", c->name))
            golden_case_fn(c);
        arrfree(c->weight);
        arrfree(c->scale);
        arrfree(c->gguf);
        arrfree(c->dequant);
        memset(c, 0, sizeof *c);
    } else if (s++) {
        size_t codes = c->cols / 2, scales = c->cols / 16, blocks = c->cols / 64, bytes = 36 * blocks;
        if (!strncmp(line, "weight ", 7)) hex_bytes(&s, arraddnptr(c->weight, codes), codes);
        if (!strncmp(line, "weight_scale ", 13)) hex_bytes(&s, arraddnptr(c->scale, scales), scales);
        if (!strncmp(line, "gguf ", 5)) hex_bytes(&s, arraddnptr(c->gguf, bytes), bytes);
        if (!strncmp(line, "dequant ", 8)) hex_floats(&s, arraddnptr(c->dequant, c->cols), c->cols);
    }
}

static void golden_cases(void (*fn)(const struct golden_case *c)) {
    golden_case_fn = fn;
    golden_lines("modelopt_repack.txt", golden_case_line);
}

static void check_repack(const struct golden_case *c) {
    size_t blocks = (size_t)c->rows * c->cols / 64;
    for (size_t i = 0; i < blocks; i++) {
        struct block_nvfp4 b;
        float v[64];
        nvfp4_repack_block(c->weight + 32 * i, c->scale + 4 * i, &b);
        if (!CHECK(!memcmp(&b, c->gguf + 36 * i, 36), "%s: block %zu", c->name, i)) return;
        nvfp4_decode_block(&b, v);
        for (size_t j = 0; j < 64; j++)
            CHECK(v[j] * c->scale2 == c->dequant[64 * i + j], "%s: block %zu, element %zu", c->name, i, j);
    }
    if (c->global_scale > 0) CHECK(same_bits(1.0f / c->global_scale, c->scale2), "%s: reciprocal", c->name);
}

static void test_nvfp4_repack(void) { golden_cases(check_repack); }

/* A sub-block of 16 weights: where its largest code is 6, its scale is what amax gives; one of zeros gets 1.0. */
static void check_amax_block(const struct golden_case *c, size_t at, const struct block_nvfp4 *got) {
    const struct block_nvfp4 *want = (const struct block_nvfp4 *)c->gguf + at / 64;
    size_t s = at / 16 % 4;
    bool zeros = true, six = false;
    for (size_t i = 0; i < 16; i++) {
        uint8_t code = want->qs[8 * s + i % 8] >> i / 8 * 4 & 7;
        zeros &= c->dequant[at + i] == 0.0f, six |= code == 7;
    }
    if (zeros || !six) {
        CHECK(!zeros || got->d[s] == 0x38, "%s: weight %zu: zeros have the scale %02x", c->name, at, got->d[s]);
        return;
    }
    CHECK(got->d[s] == want->d[s], "%s: weight %zu: scale %02x, not %02x", c->name, at, got->d[s], want->d[s]);
    for (size_t i = 0; i < 16; i++) {
        uint8_t a = got->qs[8 * s + i % 8] >> i / 8 * 4 & 15, b = want->qs[8 * s + i % 8] >> i / 8 * 4 & 15;
        CHECK(a == (b == 8 ? 0 : b), "%s: weight %zu: code %u, not %u", c->name, at + i, a, b);
    }
}

/* What ModelOpt's amax rule makes of a dequantized matrix is that matrix again. */
static void check_amax(const struct golden_case *c) {
    size_t n = (size_t)c->rows * c->cols;
    float amax = 0;
    if (c->scale2 < 0x1p-117f) return; /* the products have lost bits */
    struct block_nvfp4 *out = xmalloc(n / 64 * sizeof *out);
    struct nvfp4_rule r = {.scale2 = c->scale2, .n_in = c->cols};
    quantize_nvfp4_scalar(c->dequant, n, &r, out);
    for (size_t at = 0; at < n; at += 16) check_amax_block(c, at, &out[at / 64]);
    for (size_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf(c->dequant[i]));
    if (strstr(c->name, "realistic")) {
        CHECK(same_bits(nvfp4_scale2(amax), c->scale2), "%s: scale %g, not %g", c->name, (double)nvfp4_scale2(amax),
              (double)c->scale2);
        size_t other = 0;
        for (size_t i = 0; i < n / 64 * sizeof *out; i++) {
            uint8_t b = c->gguf[i]; /* the codes of -0 become those of 0 */
            if (i % 36 >= 4) b = (uint8_t)(((b & 15) == 8 ? 0 : b & 15) | (b >> 4 == 8 ? 0 : b & 0xf0));
            other += ((uint8_t *)out)[i] != b;
        }
        CHECK(!other, "%s: %zu other bytes", c->name, other);
        struct nvfp4_rule sweep = {.scale2 = c->scale2, .n_in = c->cols, .sweep = true};
        struct quantize_sums s = quantize_nvfp4_scalar(c->dequant, n, &sweep, out);
        CHECK(s.error < 1e-12 * s.power, "%s: a search loses what fits: %g", c->name, s.error / s.power);
    }
    free(out);
}

static void test_nvfp4_amax(void) {
    struct block_nvfp4 b;
    float x[64] = {0.0f, -0.0f, 1e-30f, -1e-30f};
    golden_cases(check_amax);
    /* ties go to the even code; a block of tiny weights gets the least scale, and signs of zeros are dropped */
    static const float ties[16] = {0.25f,  0.75f,  1.25f,  1.75f,  2.5f,  3.5f,  5.0f,  6.0f,
                                   -0.25f, -0.75f, -1.25f, -1.75f, -2.5f, -3.5f, -5.0f, -6.0f};
    static const uint8_t codes[8] = {0x80, 0xa2, 0xa2, 0xc4, 0xc4, 0xe6, 0xe6, 0xf7};
    memcpy(x + 16, ties, sizeof ties);
    struct nvfp4_rule r = {.scale2 = 1.0f, .n_in = 64};
    quantize_nvfp4_scalar(x, 64, &r, &b);
    CHECK(b.d[1] == 0x38 && !memcmp(b.qs + 8, codes, 8), "ties");
    CHECK(b.d[0] == 0x01 && b.qs[0] == 0 && b.qs[1] == 0 && b.qs[2] == 0 && b.qs[3] == 8, "tiny weights");
    CHECK(b.d[2] == 0x38 && !b.qs[16], "zeros");
    for (uint8_t c = 1; c <= 0x7e; c++) /* every scale */
        for (int i = 0; i < 16; i++) {
            float v = e4m3_to_f32(c) * 6, s = e4m3_to_f32(c) * (1 + (float)i / 1024);
            CHECK(nvfp4_amax_code(v, 1.0f) == c && nvfp4_amax_code(s * 6, 1.0f) == e4m3_from_f32(s), "scale %02x", c);
        }
}

static double normal(uint64_t *rng) { return sqrt(-2 * log(1 - rng_uniform(rng))) * cos(2 * M_PI * rng_uniform(rng)); }

/* Weights of one kind. */
static const struct quantize_kind {
    const char *name;
    double sigma;
    int kind;     /* 0 Gaussian, 1 Student's t of 5 degrees of freedom, 2 Laplace */
    double least; /* part of the squared error that the search has to save */
} quantize_kinds[] = {
    {"gauss .02", .02, 0, .25}, {"gauss .004", .004, 0, .25}, {"student-t5", .02, 1, .18}, {"laplace", .02, 2, .18}};

static float quantize_weight(const struct quantize_kind *k, uint64_t *rng) {
    double v = normal(rng), chi = 0;
    for (int i = 0; i < 5 && k->kind == 1; i++) {
        double z = normal(rng);
        chi += z * z;
    }
    if (k->kind == 1) v /= sqrt(chi / 5);
    if (k->kind == 2) v = -log(1 - rng_uniform(rng)) * (v < 0 ? -1 : 1);
    return (float)(k->sigma * v);
}

static float largest(const float *x, size_t n) {
    float amax = 0;
    for (size_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf(x[i]));
    return amax;
}

/* The squared error of blocks against what they stand for, with the weights of the columns, and its part of the power.
 * */
static double quantize_error(const float *x, size_t n, const struct nvfp4_rule *r, const struct block_nvfp4 *b,
                             const float *weight) {
    double error = 0, power = 0;
    for (size_t i = 0; i < n; i++) {
        float v[64];
        if (i % 64 == 0) nvfp4_decode_block(&b[i / 64], v);
        double e = (double)x[i] - (double)(v[i % 64] * r->scale2), w = weight ? (double)weight[i % r->n_in] : 1;
        error += w * e * e, power += w * x[i] * x[i];
    }
    return error / power;
}

/* How much the search of scales saves, on 2^19 weights of every kind. */
static void test_nvfp4_search(void) {
    enum { N = 1 << 19, COLS = 512 };
    float *x = xmalloc(N * sizeof *x), weight[COLS];
    struct block_nvfp4 *b = xmalloc(N / 64 * sizeof *b);
    char table[1024] = "\n  weights       amax dB   sweep dB   saved   weighted\n";
    bool ok = true;
    for (size_t k = 0; k < sizeof quantize_kinds / sizeof *quantize_kinds; k++) {
        const struct quantize_kind *kind = &quantize_kinds[k];
        uint64_t rng = 7;
        for (size_t i = 0; i < N; i++) x[i] = quantize_weight(kind, &rng);
        for (size_t c = 0; c < COLS; c++) weight[c] = (float)exp(1.5 * normal(&rng));
        struct nvfp4_rule r[3] = {
            {.n_in = COLS}, {.n_in = COLS, .sweep = true}, {.n_in = COLS, .sweep = true, .weight = weight}};
        double error[3], weighted[3];
        for (int m = 0; m < 3; m++) {
            r[m].scale2 = nvfp4_scale2(largest(x, N));
            struct quantize_sums s = nvfp4_fastest()(x, N, &r[m], b);
            error[m] = quantize_error(x, N, &r[m], b, NULL);
            weighted[m] = quantize_error(x, N, &r[m], b, weight);
            CHECK(fabs(s.error / s.power / error[m] - 1) < 1e-4, "%s: %g is reported, not %g", kind->name,
                  s.error / s.power, error[m]);
        }
        double saved = 1 - error[1] / error[0], less = 1 - weighted[2] / weighted[1];
        ok &= saved >= kind->least && less > 0.05 && error[2] > error[1];
        size_t at = strlen(table);
        snprintf(table + at, sizeof table - at, "  %-12s %8.2f %10.2f %6.1f %% %7.1f %%\n", kind->name,
                 -10 * log10(error[0]), -10 * log10(error[1]), 100 * saved, 100 * less);
    }
    CHECK(ok, "%s", table);
    free(x);
    free(b);
}

/* Inputs of n weights on which lanes could differ from the scalar loop; returns what they are called. */
static const char *lanes_input(int which, float *x, size_t n, uint64_t *rng) {
    static const char *const names[] = {"random", "any exponent", "subnormal", "huge",     "zeros",
                                        "ties",   "one large",    "tiny",      "negatives"};
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)(rng_next(rng) >> 32);
        float v = (float)normal(rng), u = (float)rng_uniform(rng);
        switch (which) {
        case 0: x[i] = 0.02f * v; break;
        case 1: x[i] = f32_from_bits((bits & 0x7f800000) == 0x7f800000 ? bits & 0x80ffffff : bits); break;
        case 2: x[i] = f32_from_bits(bits & 0x807fffff); break;
        case 3: x[i] = (bits & 1 ? -1.0f : 1.0f) * FLT_MAX * u; break;
        case 4: x[i] = bits & 1 ? 0.0f : -0.0f; break;
        case 5: x[i] = (float)(int)(bits % 49 - 24) / 4; break;
        case 6: x[i] = i == n / 3 ? 1000.0f : 1e-3f * v; break;
        case 7: x[i] = 1e-38f * v; break;
        default: x[i] = -fabsf(v); break;
        }
    }
    if (which == 3) x[n / 2] = FLT_MAX;
    return names[which];
}

/* Every version gives the blocks and the sums of the scalar one, also where lanes are left over. */
static void test_nvfp4_lanes(void) {
#if defined(__x86_64__)
    enum { N = 64 * 61 };
    nvfp4_quantizer *const fast[] = {quantize_nvfp4_lanes8, quantize_nvfp4_lanes16};
    const bool have[] = {__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
                         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512dq")};
    struct block_nvfp4 want[N / 64], got[N / 64];
    float x[N], weight[N];
    uint64_t rng = 11;
    if (!have[0]) SKIP("no AVX2");
    for (int which = 0; which < 9; which++)
        for (int mode = 0; mode < 8; mode++) {
            const char *name = lanes_input(which, x, N, &rng);
            size_t n = 64 * (size_t)(mode < 3 ? 61 : mode * 3 - 8);
            for (size_t i = 0; i < n; i++) weight[i] = (float)(mode & 4 ? rng_uniform(&rng) : i % 3);
            struct nvfp4_rule r = {nvfp4_scale2(largest(x, n)), mode > 0, mode & 4 ? 64 : n, mode & 2 ? weight : NULL};
            struct quantize_sums a = quantize_nvfp4_scalar(x, n, &r, want);
            CHECK(isfinite(a.error) && isfinite(a.power), "%s: the sums are %g and %g", name, a.error, a.power);
            for (int k = 0; k < 2 && have[k]; k++) {
                struct quantize_sums b = fast[k](x, n, &r, got);
                CHECK(!memcmp(want, got, n / 64 * sizeof *got), "%s, mode %d, %d lanes: other blocks", name, mode,
                      8 << k);
                CHECK(a.error == b.error && a.power == b.power, "%s, mode %d, %d lanes: %g %g, not %g %g", name, mode,
                      8 << k, b.error, b.power, a.error, a.power);
            }
        }
#else
    SKIP("no lanes here");
#endif
}

/* As ggml: the scale is amax / 127 rounded to F16, codes are those of the scale before rounding, half away from zero.
 * */
static void test_nvfp4_q8_0(void) {
    struct block_q8_0 b[2];
    float x[64] = {127.0f, -0.5f, 0.5f, 1.5f, -2.5f, 126.49f, -127.0f}, v[64];
    uint64_t rng = 3;
    for (int i = 32; i < 64; i++) x[i] = 0.02f * (float)normal(&rng);
    struct quantize_sums s = quantize_q8_0(x, 64, b);
    static const int8_t codes[8] = {127, -1, 1, 2, -3, 126, -127, 0};
    CHECK(b[0].d[0] == 0 && b[0].d[1] == 0x3c && !memcmp(b[0].qs, codes, 8), "codes");
    gguf_dequantize_row(GGUF_Q8_0, b, v, 64);
    double error = 0, power = 0, second = 0;
    for (int i = 0; i < 64; i++) {
        double e = (double)x[i] - (double)v[i];
        error += e * e, power += (double)x[i] * (double)x[i], second += i < 32 ? 0 : e * e / (4e-4 * 32);
    }
    CHECK(fabs(s.error / error - 1) < 1e-5 && fabs(s.power / power - 1) < 1e-5, "%g %g", s.error, s.power);
    CHECK(second < 1e-4, "relative error %g", second);
    memset(x, 0, sizeof x);
    quantize_q8_0(x, 64, b);
    for (size_t i = 0; i < sizeof b; i++) CHECK(!((uint8_t *)b)[i], "zeros: byte %zu", i);
}

/* x (n) as a row of a type. */
static void formats_encode(enum gguf_type type, const float *x, size_t n, uint8_t *row) {
    const struct nvfp4_rule rule = {.scale2 = 1, .sweep = true, .n_in = n};
    switch (type) {
    case GGUF_F32: memcpy(row, x, n * sizeof *x); return;
    case GGUF_F16:
    case GGUF_BF16:
        for (size_t i = 0; i < n; i++) {
            const uint16_t h = type == GGUF_F16 ? f16_from_f32(x[i]) : bf16_from_f32(x[i]);
            memcpy(row + 2 * i, &h, 2);
        }
        return;
    case GGUF_FP8: /* as a release does */
        for (size_t b = 0; b < n / 128; b++, x += 128, row += sizeof(struct block_fp8)) {
            float amax = 0;
            for (int i = 0; i < 128; i++) amax = fmaxf(amax, fabsf(x[i]));
            amax /= 448;
            memcpy(row, &amax, sizeof amax);
            for (int i = 0; i < 128; i++) row[4 + i] = e4m3_from_f32(x[i] / amax);
        }
        return;
    case GGUF_INTEGERS: quantize_blocks(type, x, n, &rule, row);
    }
}

/* The error of a type: of floats the largest relative one, of blocks the relative root mean square. */
static double formats_error(enum gguf_type type) {
    switch (type) {
    case GGUF_F32: return 0;
    case GGUF_F16: return 0x1p-11;
    case GGUF_BF16: return 0x1p-8;
    case GGUF_Q8_0: return 0.01;
    case GGUF_MXFP4: return 0.13;
    case GGUF_NVFP4: return 0.1;
    case GGUF_FP8: return 0.04;
    }
    return NAN;
}

/* A row of the table of formats takes the bytes that it says, and decoding gives back what was encoded. Each is found by
 * its number, has a name of its own, and is among the floats or the blocks as its block says. */
static void test_nvfp4_formats(void) {
    enum { N = 512, MARK = 0x5a };
    float x[N], y[N + 1];
    uint64_t rng = 5;
    for (int i = 0; i < N; i++) x[i] = (float)normal(&rng);
    for (int i = 0; i < GGUF_FORMAT_COUNT; i++) {
        const struct gguf_format *f = &gguf_formats[i];
        const struct gguf_type_traits t = gguf_type_info(f->type);
        const size_t bytes = gguf_row_bytes(f->type, N);
        uint8_t *row = xmalloc(bytes + 64);
        double error = 0, power = 0, largest = 0;
        memset(row, MARK, bytes + 64);
        y[N] = MARK;
        formats_encode(f->type, x, N, row);
        for (size_t k = bytes; k < bytes + 64; k++) CHECK(row[k] == MARK, "%s: byte %zu is written", t.name, k);
        gguf_dequantize_row(f->type, row, y, N);
        CHECK(y[N] == MARK, "%s: a weight too many", t.name);
        for (int k = 0; k < N; k++) {
            const double e = fabs((double)y[k] - (double)x[k]);
            error += e * e, power += (double)x[k] * (double)x[k], largest = fmax(largest, e / fabs((double)x[k]));
        }
        const double got = t.block == 1 ? largest : sqrt(error / power), most = formats_error(f->type);
        CHECK(got <= most && got >= 0.4 * most, "%s: error %g, not up to %g", t.name, got, most);
        CHECK(N % t.block == 0 && bytes == N / t.block * t.bytes, "%s: %zu bytes", t.name, bytes);
        CHECK(gguf_format(f->type) == f && gguf_is_float(f->type) == (t.block == 1), "%s is not found", t.name);
        switch (f->type) {
        case GGUF_FLOATS: CHECK(t.block == 1, "%s: floats in blocks of %u", t.name, t.block); break;
        case GGUF_BLOCKS: CHECK(t.block % 32 == 0, "%s: blocks of %u", t.name, t.block); break;
        }
        free(row);
    }
}

/* Every number of a type has a name of its own; numbers beyond have none, and are no format. */
static void test_nvfp4_type_names(void) {
    for (uint32_t i = 0; i < GGUF_TYPE_SLOTS; i++) {
        const uint32_t t = gguf_slot_type(i);
        const char *name = gguf_type_info(t).name;
        CHECK(gguf_type_slot(t) == i, "type %u has place %u, not %u", t, gguf_type_slot(t), i);
        CHECK(strcmp(name, "unknown"), "type %u has no name", t);
        for (uint32_t k = 0; k < i; k++)
            CHECK(strcmp(name, gguf_type_info(gguf_slot_type(k)).name), "%u and %u are %s", gguf_slot_type(k), t, name);
    }
    static const uint32_t none[] = {GGUF_I32,     GGUF_F64,     GGUF_Q4_0, GGUF_TYPE_COUNT,
                                    GGUF_OWN - 1, GGUF_OWN_END, UINT32_MAX};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        CHECK(!gguf_find_format(none[i]) && !gguf_is_float(none[i]), "%u is a format", none[i]);
    CHECK_STR(gguf_type_info(GGUF_TYPE_COUNT).name, "unknown", "the number after the last");
    CHECK_STR(gguf_type_info(GGUF_OWN_END).name, "unknown", "the number after the last of moe");
}

#define TESTS_NVFP4                                                                                              \
    {"nvfp4/e2m1", test_nvfp4_e2m1}, {"nvfp4/e4m3", test_nvfp4_e4m3}, {"nvfp4/ue4m3", test_nvfp4_ue4m3},         \
        {"nvfp4/quantize_ref", test_nvfp4_quantize}, {"nvfp4/repack", test_nvfp4_repack},                        \
        {"nvfp4/amax", test_nvfp4_amax}, {"nvfp4/lanes", test_nvfp4_lanes}, {"nvfp4/search", test_nvfp4_search}, \
        {"nvfp4/q8_0", test_nvfp4_q8_0}, {"nvfp4/formats", test_nvfp4_formats},                                  \
        {"nvfp4/type-names", test_nvfp4_type_names},
