/* CPU kernels: every set that this machine runs against kernels_ref.
 *
 * A GEMM is compared with the reference applied to the activations as the set rounded them (unpacked again), so that
 * only F32 rounding is left to tolerate: at most one unit of 2^-24 per addition, of the sum of |w x|. What rounding the
 * activations may cost is checked apart, in pack. Weights end where their memory ends: reading on is a crash. */

/* The sets to be tested, NULL after the last. */
static const struct kernels *kt_set(size_t i) {
    for (size_t j = 0; j < sizeof kernel_sets / sizeof *kernel_sets; j++)
        if (kernels_runnable(kernel_sets[j]) && !i--) return kernel_sets[j];
    return NULL;
}

static float kt_normal(uint64_t *rng) {
    float s = 0;
    for (int i = 0; i < 4; i++) s += (float)rng_uniform(rng) - 0.5f;
    return s * 1.7f;
}

/* n bytes that end at an inaccessible page. */
static uint8_t *kt_guarded(size_t n) {
    size_t page = 4096, whole = (n + page - 1) / page * page;
    uint8_t *p = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + whole, page, PROT_NONE)) die("mmap: %s", strerror(errno));
    return p + whole - n;
}

static void kt_guarded_free(uint8_t *p, size_t n) {
    size_t page = 4096, whole = (n + page - 1) / page * page;
    munmap(p + n - whole, whole + page);
}

/* n weights, all codes and many scales. */
static void kt_weights(enum gguf_type type, uint8_t *w, size_t n, uint64_t *rng) {
    struct gguf_type_traits t = gguf_type_info(type);
    for (size_t i = 0; i < n / t.block; i++, w += t.bytes) {
        const float f = kt_normal(rng);
        uint16_t h;
        for (uint32_t j = 0; t.block > 1 && j < t.bytes; j++) w[j] = (uint8_t)rng_next(rng);
        switch (type) {
        case GGUF_F32: memcpy(w, &f, 4); break;
        case GGUF_F16: h = f16_from_f32(f), memcpy(w, &h, 2); break;
        case GGUF_BF16: h = bf16_from_f32(f), memcpy(w, &h, 2); break;
        case GGUF_Q8_0: h = f16_from_f32(0.01f * f), memcpy(w, &h, 2); break;
        case GGUF_MXFP4: w[0] = (uint8_t)(120 + w[0] % 12); break;
        case GGUF_NVFP4:
            for (int j = 0; j < 4; j++) w[j] = (uint8_t)(0x28 + w[j] % 32);
            break;
        case GGUF_FP8:
            memcpy(w, &f, 4);
            for (int j = 4; j < 132; j++) w[j] = (uint8_t)(w[j] - ((w[j] & 0x7f) == 0x7f)); /* no NaN */
        }
    }
}

/* What a packed row stands for. */
static void kt_unpack(enum act_format f, const uint8_t *x, int n, float *out) {
    const struct act_i16 *q = (const struct act_i16 *)(const void *)x;
    if (f == ACT_F32 || f == ACT_F32_PANEL) memcpy(out, x, (size_t)n * 4);
    else if (f == ACT_BF16)
        for (int i = 0; i < n; i++)
            out[i] = bf16_to_f32(((const uint16_t *)(const void *)x)[i]) +
                     bf16_to_f32(((const uint16_t *)(const void *)(x + act_plane(n)))[i]);
    else
        for (int i = 0; i < n; i++) out[i] = (float)(256 * q[i / 32].hi[i % 32] + q[i / 32].lo[i % 32]) * q[i / 32].d;
}

/* The GEMM of a whole matrix with all tokens, and how much of it rounding may take: `unit` per weight and activation.
 * */
struct kt_case {
    enum gguf_type type;
    enum act_format format;
    int n_out, n_in, n_tok;
    uint8_t *w, *x; /* x packed */
    size_t w_stride, x_stride;
    float *y, *expected, *magnitude; /* (n_tok, n_out); magnitude: sum of |w x| */
    void *scratch;
};

static void kt_case_free(struct kt_case *c) {
    kt_guarded_free(c->x, c->x_stride * (size_t)c->n_tok);
    free(c->y), free(c->expected), free(c->magnitude), free(c->scratch);
}

static struct gemm kt_gemm(const struct kt_case *c, int r0, int n_out, int t0, int n_tok, float *y) {
    return (struct gemm){.type = c->type,
                         .format = c->format,
                         .w = c->w + (size_t)r0 * c->w_stride,
                         .w_stride = c->w_stride,
                         .n_out = n_out,
                         .n_in = c->n_in,
                         .x = c->x + (size_t)t0 * c->x_stride,
                         .x_stride = c->x_stride,
                         .n_tok = n_tok,
                         .scale = 0.75f,
                         .y = y,
                         .y_stride = (size_t)n_out,
                         .scratch = c->scratch};
}

/* Packs x (n_tok, n_in), multiplies, and computes what should come out. */
static void kt_case_run(struct kt_case *c, const struct kernels *k, const float *x) {
    size_t n = (size_t)c->n_out * (size_t)c->n_tok;
    c->w_stride = gguf_row_bytes(c->type, (size_t)c->n_in);
    c->x_stride = k->act_bytes(c->format, c->n_in);
    c->x = kt_guarded(c->x_stride * (size_t)c->n_tok);
    c->y = xcalloc(n, 4), c->expected = xcalloc(n, 4), c->magnitude = xcalloc(n, 4);
    c->scratch = xaligned(KERNEL_SCRATCH);
    float *plain = xcalloc((size_t)c->n_in * (size_t)c->n_tok, 4), *row = xcalloc((size_t)c->n_in, 4);
    for (int t = 0; t < c->n_tok; t++) {
        k->act_pack(c->format, x + (ptrdiff_t)t * c->n_in, c->n_in, c->x + (size_t)t * c->x_stride);
        kt_unpack(c->format, c->x + (size_t)t * c->x_stride, c->n_in, plain + (ptrdiff_t)t * c->n_in);
    }
    struct gemm g = kt_gemm(c, 0, c->n_out, 0, c->n_tok, c->y), e = g;
    k->gemm(&g);
    e.format = ACT_F32, e.x = (uint8_t *)plain, e.x_stride = 4 * (size_t)c->n_in, e.y = c->expected;
    kernels_ref.gemm(&e);
    for (int r = 0; r < c->n_out; r++) {
        gguf_dequantize_row(c->type, c->w + (size_t)r * c->w_stride, row, (size_t)c->n_in);
        for (int t = 0; t < c->n_tok; t++) {
            const float *p = plain + (ptrdiff_t)t * c->n_in;
            float s[8] = {0};
            for (int i = 0; i < c->n_in; i++) s[i & 7] += fabsf(row[i] * p[i]);
            for (int i = 0; i < 8; i++) c->magnitude[t * c->n_out + r] += s[i];
        }
    }
    free(plain), free(row);
}

/* Longest chain of additions in a sum of n: one chain in F32 panels, else lanes of four at least. BF16 tiles split F16,
 * Q8_0 and FP8 weights into two BF16 numbers, of which the second is rounded: 2^-17 of the weight. */
static double kt_unit(const struct kt_case *c) {
    bool split = c->format == ACT_BF16 && (c->type == GGUF_F16 || c->type == GGUF_Q8_0 || c->type == GGUF_FP8);
    const int chain = c->format == ACT_F32_PANEL ? c->n_in : c->n_in / 4;
    return (chain + 16) * 0x1p-24 + (split ? 0x1p-17 : 0);
}

static bool kt_case_check(const struct kt_case *c, const char *name, const char *what) {
    double worst = 0, unit = kt_unit(c),
           least = c->format == ACT_BF16 ? c->n_in * 0x1p-118 : 0x1p-120; /* flushed to zero */
    int at = 0;
    for (int i = 0; i < c->n_out * c->n_tok; i++) {
        double e = fabs((double)c->y[i] - (double)c->expected[i]) / (0.75 * unit * (double)c->magnitude[i] + least);
        if (!(e <= worst)) worst = e, at = i;
        if (!(e <= 1)) break;
    }
    return CHECK(worst <= 1, "%s %s: %s format %d, %d x %d, %d tokens: element %d is %g, not %g (sum of magnitudes %g)",
                 name, what, gguf_type_info(c->type).name, (int)c->format, c->n_out, c->n_in, c->n_tok, at,
                 (double)c->y[at], (double)c->expected[at], (double)c->magnitude[at]);
}

/* Any cut of the GEMM into rows and tokens gives the same bits and touches nothing else, and `rows` picks tokens. */
static void kt_case_cuts(const struct kt_case *c, const struct kernels *k) {
    enum { GAP = 5 };
    static const int outs[] = {1, 3, 17, 64}, toks[] = {1, 2, 3, 4, 5, 8, 16, 17, 33};
    size_t size = (size_t)(c->n_out + GAP) * (size_t)c->n_tok * 4;
    uint8_t *gap = xmalloc(GAP * 4);
    float *y = xmalloc(size);
    int32_t rows[64];
    memset(gap, 0x55, GAP * 4);
    for (size_t i = 0; i < sizeof outs / sizeof *outs; i++)
        for (size_t j = 0; j < sizeof toks / sizeof *toks; j++) {
            int n_out = outs[i], n_tok = toks[j], r0 = c->n_out - n_out, t0 = (c->n_tok - n_tok) / 2, bad = 0;
            bool pick = (i ^ j) & 1;
            if (r0 < 0 || t0 < 0) continue;
            struct gemm g = kt_gemm(c, r0, n_out, pick ? 0 : t0, n_tok, y);
            for (int t = 0; t < n_tok; t++) rows[t] = pick ? (7 * t + 3) % c->n_tok : t0 + t;
            g.rows = pick ? rows : NULL;
            g.y_stride += GAP;
            memset(y, 0x55, size);
            k->gemm(&g);
            for (int t = 0; t < n_tok; t++) {
                const float *got = y + t * (n_out + GAP);
                bad +=
                    memcmp(got, c->y + rows[t] * c->n_out + r0, (size_t)n_out * 4) || memcmp(got + n_out, gap, GAP * 4);
            }
            CHECK(!bad, "%s: %s format %d, n_in %d: %d of %d tokens differ when cut to %d rows%s", k->name,
                  gguf_type_info(c->type).name, (int)c->format, c->n_in, bad, n_tok, n_out, pick ? ", picked" : "");
        }
    free(y), free(gap);
}

/* Every format that a set asks for, for one type. */
static int kt_formats(const struct kernels *k, enum gguf_type type, enum act_format f[2]) {
    f[0] = k->act_format(type, 1), f[1] = k->act_format(type, 512);
    return f[0] == f[1] ? 1 : 2;
}

static void kt_product(const struct kernels *k, enum gguf_type type, int n_in, int n_out, int n_tok) {
    uint64_t rng = (uint64_t)n_in * 64 + type;
    enum act_format f[2];
    uint8_t *w = kt_guarded(gguf_row_bytes(type, (size_t)n_in) * (size_t)n_out);
    float *x = xcalloc((size_t)n_in * (size_t)n_tok, 4);
    kt_weights(type, w, (size_t)n_in * (size_t)n_out, &rng);
    for (int i = 0; i < n_in * n_tok; i++) x[i] = kt_normal(&rng);
    for (int i = 0, n = kt_formats(k, type, f); i < n; i++) {
        struct kt_case c = {.type = type, .format = f[i], .n_out = n_out, .n_in = n_in, .n_tok = n_tok, .w = w};
        kt_case_run(&c, k, x);
        if (kt_case_check(&c, k->name, "gemm")) kt_case_cuts(&c, k);
        kt_case_free(&c);
    }
    kt_guarded_free(w, gguf_row_bytes(type, (size_t)n_in) * (size_t)n_out);
    free(x);
}

static void test_kernels_gemm(void) {
    static const int sizes[] = {64, 128, 192, 384, 2048, 7168};
    const struct kernels *k;
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (int i = 0; i < GGUF_FORMAT_COUNT; i++) {
            const enum gguf_type type = gguf_formats[i].type;
            for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
                if (!(sizes[j] % (int)gguf_type_info(type).block))
                    kt_product(k, type, sizes[j], sizes[j] > 2048 ? 17 : 64, 33);
            if (gguf_type_info(type).block == 32) kt_product(k, type, 96, 33, 17);
            if (gguf_type_info(type).block == 1)
                for (int n = 1; n < 80; n += 13) kt_product(k, type, n, 19, 9);
        }
    kt_product(kernels_choose(), GGUF_NVFP4, 192, 17, 700); /* more tokens than are kept at a time */
}

/* What callers rely on without asking. */
static void test_kernels_choice(void) {
    const struct kernels *k;
    CHECK(kernels_choose() == kt_set(0), "%s is not the first that runs", kernels_choose()->name);
    for (size_t s = 0; (k = kt_set(s)); s++) {
        for (int n = 1; n < 600; n += 7) {
            const enum act_format router = k->act_format(GGUF_F32, n);
            CHECK(router == ACT_F32 || router == ACT_F32_PANEL, "%s: routers are F32", k->name);
            CHECK(kernels_ref.act_format(GGUF_NVFP4, n) == ACT_F32, "the reference rounds activations");
            for (int f = 0; f < ACT_FORMATS; f++)
                CHECK(k->act_bytes((enum act_format)f, 32 * n) % 64 == 0, "%s: %d", k->name, n);
        }
    }
}

/* Which rows of BF16 are E4M3 codes times a power of two: all codes with all of them, and what no code has. */
static void test_kernels_exact_fp8(void) {
    enum { N = 64 };
    uint16_t x[N] = {0};
    uint64_t rng = 3;
    CHECK(bf16_is_fp8(x, N), "zeros are no codes");
    for (int e = -100; e <= 100; e++) {
        int at = 0;
        for (int i = 0; i < N; i++) {
            const uint8_t code = (uint8_t)rng_next(&rng), no_nan = (code & 0x7f) == 0x7f ? 0x7e : code;
            x[i] = bf16_from_f32(ldexpf(e4m3_to_f32(no_nan), e));
            if ((x[i] & 0x7fff) > (x[at] & 0x7fff)) at = i;
        }
        CHECK(bf16_is_fp8(x, N), "codes times 2^%d", e);
        x[at] ^= 1 << e % 4 * (e > 0); /* the largest gets five to eight bits */
        CHECK(!bf16_is_fp8(x, N), "times 2^%d, one of more than four bits", e);
    }
    static const struct {
        float a, b;
        bool exact;
    } pairs[] = {{448, 0x1p-9f, true},   {480, 0x1p-9f, false},        {480, 0x1p-8f, true},  {240, 0x1p-9f, true},
                 {256, 0x1p-10f, false}, {1, INFINITY, false},         {0x1p-130f, 0, false}, {0x1p-119f, 0, false},
                 {0x1p-118f, 0, true},   {0x1.8p127f, 0x1p110f, true}, {0x1p-131f, 1, false}, {1, NAN, false}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        uint16_t two[2] = {bf16_from_f32(pairs[i].a), bf16_from_f32(-pairs[i].b)};
        CHECK(bf16_is_fp8(two, 2) == pairs[i].exact, "%g and %g: exact %d", (double)pairs[i].a, (double)pairs[i].b,
              !pairs[i].exact);
    }
}

/* FP8 has the bits of its values as F32, in products of few tokens. */
static void test_kernels_widened_fp8(void) {
    enum { N_IN = 384, N_OUT = 19 };
    const struct kernels *k;
    uint64_t rng = 11;
    const size_t stride = gguf_row_bytes(GGUF_FP8, N_IN);
    uint8_t *w = kt_guarded(N_OUT * stride);
    float *wide = xcalloc(N_OUT * N_IN, 4), *x = xcalloc(SAME_BITS_TOKENS * N_IN, 4);
    kt_weights(GGUF_FP8, w, N_OUT * N_IN, &rng);
    struct block_fp8 *blocks = (struct block_fp8 *)(void *)w;
    for (size_t i = 0; i < N_OUT * stride / sizeof *blocks; i++) /* half of the vectors of 64 have no subnormal code */
        for (int j = 0; j < 64; j++) blocks[i].qs[j] |= blocks[i].qs[j] & 0x78 ? 0 : 8;
    for (int r = 0; r < N_OUT; r++)
        gguf_dequantize_row(GGUF_FP8, w + (size_t)r * stride, wide + (ptrdiff_t)r * N_IN, N_IN);
    for (int i = 0; i < SAME_BITS_TOKENS * N_IN; i++) x[i] = kt_normal(&rng);
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (int n = 1; n <= SAME_BITS_TOKENS; n++) {
            struct kt_case c[2];
            for (int f = 0; f < 2; f++) {
                const enum gguf_type type = f ? GGUF_F32 : GGUF_FP8;
                c[f] = (struct kt_case){.type = type,
                                        .format = k->act_format(type, n),
                                        .n_out = N_OUT,
                                        .n_in = N_IN,
                                        .n_tok = n,
                                        .w = f ? (uint8_t *)wide : w};
                kt_case_run(&c[f], k, x);
            }
            CHECK(!memcmp(c[0].y, c[1].y, (size_t)(n * N_OUT) * 4), "%s: %d tokens have other bits", k->name, n);
            kt_case_free(&c[0]);
            kt_case_free(&c[1]);
        }
    kt_guarded_free(w, N_OUT * stride);
    free(wide);
    free(x);
}

/* All scale bytes and all codes: with the unit matrix as activations the result is the matrix of weights. */
static void test_kernels_scales(void) {
    enum { N_IN = 128, N_OUT = 256, TYPES = 3 };
    static const enum gguf_type types[TYPES] = {GGUF_NVFP4, GGUF_MXFP4, GGUF_FP8};
    const struct kernels *k;
    float row[N_IN], *x = xcalloc(N_IN * N_IN, 4);
    for (int i = 0; i < N_IN; i++) x[i * N_IN + i] = 1;
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (int ty = 0; ty < TYPES; ty++) {
            size_t stride = gguf_row_bytes(types[ty], N_IN);
            uint8_t *w = kt_guarded(N_OUT * stride);
            uint64_t rng = 5;
            enum act_format f[2];
            for (int r = 0; r < N_OUT; r++) {
                uint8_t *p = w + (size_t)r * stride;
                kt_weights(types[ty], p, N_IN, &rng);
                for (int j = 0; ty == 0 && j < 4; j++)
                    p[j] = (uint8_t)(r + 64 * j), p[36 + j] = (uint8_t)(r + 64 * j + 32);
                for (int b = 0; ty == 1 && b < 4; b++) /* sums overflow beyond */
                    p[17 * b] = (uint8_t)(b & 1 ? 231 - p[0] : r < 232 ? r : 231);
                if (ty == 2) {
                    const float d = ldexpf(1.0f + (float)r / 256, r / 2 - 64);
                    memcpy(p, &d, sizeof d);
                    for (int j = 0; j < N_IN; j++) p[4 + j] = (uint8_t)(r & 1 ? 0x80 | j : j);
                    p[4 + 0x7f] = 0x7e;
                }
            }
            for (int i = 0, n = kt_formats(k, types[ty], f); i < n; i++) {
                struct kt_case c = {
                    .type = types[ty], .format = f[i], .n_out = N_OUT, .n_in = N_IN, .n_tok = N_IN, .w = w};
                int bad = 0;
                kt_case_run(&c, k, x);
                for (int r = 0; r < N_OUT; r++) {
                    gguf_dequantize_row(types[ty], w + (size_t)r * stride, row, N_IN);
                    for (int t = 0; t < N_IN; t++) {
                        double want = 0.75 * (double)row[t],
                               tol = fabs(want) * (f[i] == ACT_BF16 ? 0 : 0x1p-22) + 0x1p-125;
                        bad += !(fabs((double)c.y[t * N_OUT + r] - want) <= tol);
                    }
                }
                CHECK(!bad, "%s: %s format %d: %d weights differ", k->name, gguf_type_info(types[ty]).name, (int)f[i],
                      bad);
                kt_case_free(&c);
            }
            kt_guarded_free(w, N_OUT * stride);
        }
    free(x);
}

/* Zeros, very large and very small numbers, one outlier. */
static void test_kernels_extremes(void) {
    enum { N_IN = 256, N_OUT = 20, N_TOK = 8 };
    const struct kernels *k;
    float *x = xcalloc(N_IN * N_TOK, 4);
    uint64_t rng = 77;
    for (int t = 0; t < N_TOK; t++)
        for (int i = 0; i < N_IN; i++) {
            static const float size[N_TOK] = {0, 1e30f, 1e-30f, 1e-38f, 1e-42f, 1, 1e-3f, 1e15f};
            x[t * N_IN + i] = size[t] * kt_normal(&rng);
            if (t == 5 && i == 77) x[t * N_IN + i] = 1e6f;
        }
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (int i = 0; i < GGUF_FORMAT_COUNT; i++) {
            const enum gguf_type type = gguf_formats[i].type;
            enum act_format f[2];
            uint8_t *w = kt_guarded(gguf_row_bytes(type, N_IN) * N_OUT);
            kt_weights(type, w, N_IN * N_OUT, &rng);
            for (int j = 0, n = kt_formats(k, type, f); j < n; j++) {
                struct kt_case c = {.type = type, .format = f[j], .n_out = N_OUT, .n_in = N_IN, .n_tok = N_TOK, .w = w};
                kt_case_run(&c, k, x);
                kt_case_check(&c, k->name, "extremes");
                for (int r = 0; r < N_OUT; r++) CHECK(c.y[r] == 0, "%s: zeros give %g", k->name, (double)c.y[r]);
                kt_case_free(&c);
            }
            kt_guarded_free(w, gguf_row_bytes(type, N_IN) * N_OUT);
        }
    free(x);
}

/* Rounding activations costs one and a half steps of 16 bits (amax / 32512 per 32; all of what is below 2^-100) or
 * 2^-16 (two BF16), and F32 nothing. */
static void test_kernels_pack(void) {
    enum { N = 320 };
    const struct kernels *k;
    float x[N], back[N];
    uint64_t rng = 3;
    for (int i = 0; i < N; i++)
        x[i] = kt_normal(&rng) * (i / 32 == 3 ? 0.0f : i / 32 == 5 ? 1e-36f : i / 32 == 6 ? 1e36f : 1.0f);
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (int f = 0; f < ACT_FORMATS; f++) {
            size_t bytes = k->act_bytes((enum act_format)f, N);
            uint8_t *p = xaligned(bytes);
            const struct act_i16 *q = (const struct act_i16 *)(void *)p;
            k->act_pack((enum act_format)f, x, N, p);
            kt_unpack((enum act_format)f, p, N, back);
            CHECK(bytes % 64 == 0, "%zu", bytes);
            for (int i = 0; i < N; i++) {
                double amax = (double)ref_amax(x + i / 32 * 32, 32), e = fabs((double)x[i] - (double)back[i]);
                double tol = f == ACT_F32 || f == ACT_F32_PANEL ? 0
                             : f == ACT_BF16                    ? fabs((double)x[i]) * 0x1p-16 + 0x1p-130
                                                                : amax / 32512 * 1.51 + 0x1p-100;
                CHECK(e <= tol, "%s format %d: %g became %g", k->name, f, (double)x[i], (double)back[i]);
            }
            for (int b = 0; f == ACT_I16 && b < N / 16; b++) {
                int sum = 0;
                for (int i = 0; i < 16; i++) sum += 256 * q[b / 2].hi[b % 2 * 16 + i] + q[b / 2].lo[b % 2 * 16 + i];
                CHECK(q[b / 2].bias[b % 2] == -16 * sum, "%s: bias %d, sum %d", k->name, q[b / 2].bias[b % 2], sum);
            }
            free(p);
        }
}

/* Bit for bit: every E4M3 and BF16 code, and F32 patterns around every rounding boundary. */
static void test_kernels_conversions(void) {
    enum { N = 65536 + 5 };
    const struct kernels *k;
    float *x = xcalloc(N, 4), *y = xcalloc(N, 4), *want = xcalloc(N, 4);
    uint16_t *h = xcalloc(N, 2), *h2 = xcalloc(N, 2);
    uint8_t *b = xcalloc(N, 1), *b2 = xcalloc(N, 1);
    for (size_t s = 0; (k = kt_set(s)); s++) {
        for (int i = 0; i < N; i++) h[i] = (uint16_t)i, b[i] = (uint8_t)((i & 0x7f) == 0x7f ? 0 : i);
        k->from_bf16(h, y, N);
        kernels_ref.from_bf16(h, want, N);
        CHECK(!memcmp(y, want, N * 4), "%s: from_bf16", k->name);
        k->from_e4m3(b, 0.3f, y, 300);
        kernels_ref.from_e4m3(b, 0.3f, want, 300);
        CHECK(!memcmp(y, want, 300 * 4), "%s: from_e4m3", k->name);
        for (uint32_t low = 0; low < 6; low++) {
            static const uint32_t lows[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
            for (int i = 0; i < N; i++) x[i] = f32_from_bits((uint32_t)i << 16 | lows[low]);
            k->to_bf16(x, h, N), kernels_ref.to_bf16(x, h2, N);
            CHECK(!memcmp(h, h2, N * 2), "%s: to_bf16", k->name);
            for (int j = 0; j < 2; j++) {
                float scale = j ? 0.37f : 1.0f;
                k->to_e4m3(x, scale, b, N), kernels_ref.to_e4m3(x, scale, b2, N);
                CHECK(!memcmp(b, b2, N), "%s: to_e4m3, scale %g", k->name, (double)scale);
            }
        }
    }
    free(x), free(y), free(want), free(h), free(h2), free(b), free(b2);
}

/* Lengths with and without a tail. */
static void test_kernels_vectors(void) {
    enum { N = 1000 };
    static const int lengths[] = {1, 3, 8, 31, 128, 515, N};
    const struct kernels *k;
    float x[N], w[N], a[N], b[N];
    uint64_t rng = 11;
    for (int i = 0; i < N; i++) x[i] = kt_normal(&rng) * 8, w[i] = kt_normal(&rng);
    x[2] = -INFINITY, x[600] = -1000, x[601] = -87.2f;
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
            int n = lengths[j];
            memcpy(a, x, sizeof a), memcpy(b, x, sizeof b);
            double sum = (double)k->exp_sum(a, n, 30.0f), want = (double)kernels_ref.exp_sum(b, n, 30.0f);
            for (int i = 0; i < n; i++)
                CHECK(fabsf(a[i] - b[i]) <= 1e-6f * b[i] + 0x1p-125f, "%s: exp(%g) is %g", k->name, (double)x[i] - 30,
                      (double)a[i]);
            CHECK(fabs(sum - want) <= 1e-6 * want, "%s: exp_sum of %d is %g, not %g", k->name, n, sum, want);
            for (int i = 0; i < n; i++) a[i] = b[i] = i == 2 ? -200.0f : x[i];
            k->silu_mul(a, w, n), kernels_ref.silu_mul(b, w, n);
            for (int i = 0; i < n; i++)
                CHECK(fabsf(a[i] - b[i]) <= 1e-6f * fabsf(b[i]) + 1e-30f, "%s: silu(%g) is %g", k->name, (double)x[i],
                      (double)a[i]);
            for (int i = 0; i < n; i++) a[i] = b[i] = w[i];
            k->sigmoid_mul(a, x, n);
            kernels_ref.sigmoid_mul(b, x, n);
            for (int i = 0; i < n; i++)
                CHECK(fabsf(a[i] - b[i]) <= 1e-6f * fabsf(b[i]) + 1e-30f, "%s: sigmoid(%g) * %g is %g", k->name,
                      (double)x[i], (double)w[i], (double)a[i]);
            for (int i = 0; i < n; i++) a[i] = b[i] = i % 3 ? x[i] : 1e-3f * x[i];
            k->tanh(a, n);
            kernels_ref.tanh(b, n);
            for (int i = 0; i < n; i++)
                CHECK(fabsf(a[i] - b[i]) <= 2e-7f, "%s: tanh(%g) is %g", k->name, (double)x[i], (double)a[i]);
            memcpy(a, b, (size_t)n * sizeof *a);
            k->scale(a, 0.75f, a, n);
            kernels_ref.scale(b, 0.75f, b, n);
            for (int i = 0; i < n; i++) CHECK(a[i] == b[i], "%s: scale %d of %d", k->name, i, n);
            k->scale_add(w, 0.5f, a, n);
            kernels_ref.scale_add(w, 0.5f, b, n);
            for (int i = 0; i < n; i++)
                CHECK(fabsf(a[i] - b[i]) <= 2e-7f * fabsf(w[i]) + 2e-7f * fabsf(b[i]), "%s: scale_add %d of %d",
                      k->name, i, n);
            memcpy(a, b, (size_t)n * sizeof *a);
            k->relu_add(x, 0.5f, a, n);
            kernels_ref.relu_add(x, 0.5f, b, n);
            for (int i = 0; i < n; i++)
                CHECK(fabsf(a[i] - b[i]) <= 2e-7f * fabsf(x[i]) + 2e-7f * fabsf(b[i]), "%s: relu_add %d of %d", k->name,
                      i, n);
            memcpy(a, b, (size_t)n * sizeof *a);
            k->mul_add(a, w, w, n);
            kernels_ref.mul_add(b, w, w, n);
            for (int i = 0; i < n; i++)
                CHECK(fabsf(a[i] - b[i]) <= 2e-6f * (fabsf(b[i]) + w[i] * w[i]), "%s: mul_add %d of %d", k->name, i, n);
            for (int i = 0; i < 2; i++) {
                k->rmsnorm(w, i ? w : NULL, 1e-6f, a, n), kernels_ref.rmsnorm(w, i ? w : NULL, 1e-6f, b, n);
                for (int t = 0; t < n; t++)
                    CHECK(fabsf(a[t] - b[t]) <= 1e-6f * fabsf(b[t]), "%s: rmsnorm of %d", k->name, n);
            }
            k->center(w, a, n), kernels_ref.center(w, b, n);
            for (int t = 0; t < n; t++)
                CHECK(fabsf(a[t] - b[t]) <= 1e-6f * fabsf(w[t]) + 1e-6f, "%s: center of %d", k->name, n);
            const double dot = (double)k->dot(w, w, n), ref = (double)kernels_ref.dot(w, w, n);
            CHECK(fabs(dot - ref) <= 1e-6 * ref, "%s: dot of %d: %g, not %g", k->name, n, dot, ref);
            CHECK(k->amax(w, n) == kernels_ref.amax(w, n), "%s: amax of %d", k->name, n);
            CHECK(!n || k->max(w, n) == kernels_ref.max(w, n), "%s: max of %d", k->name, n);
        }
    CHECK(kernels_choose()->amax(x, 0) == 0, "amax of nothing");
}

/* A row has the same bits among others and alone. */
static void test_kernels_sgemm(void) {
    static const int shape[][3] = {{1, 64, 128}, {8, 64, 128}, {5, 63, 192}, {7, 10, 576},
                                   {33, 64, 17}, {2, 3, 1},    {64, 130, 64}};
    const struct kernels *k;
    uint64_t rng = 9;
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
            int m = shape[i][0], n = shape[i][1], p = shape[i][2], ld = (n > p ? n : p) + 3, big = n > p ? n : p;
            size_t size = (size_t)(big > m ? big : m) * (size_t)ld;
            float *a = xcalloc(size, 4), *b = xcalloc(size, 4), *c = xcalloc(size, 4), *d = xcalloc(size, 4);
            float *alone = xcalloc(size, 4);
            for (size_t j = 0; j < size; j++)
                a[j] = kt_normal(&rng), b[j] = kt_normal(&rng), c[j] = d[j] = alone[j] = kt_normal(&rng);
            double worst = 0;
            k->sgemm_add(m, n, p, a, ld, b, ld, c, ld);
            kernels_ref.sgemm_add(m, n, p, a, ld, b, ld, d, ld);
            for (size_t j = 0; j < size; j++) worst = fmax(worst, fabs((double)c[j] - (double)d[j]));
            CHECK(worst <= 1e-6 * (p + 8), "%s: sgemm_add %d x %d x %d is off by %g", k->name, m, n, p, worst);
            for (int r = 0; r < m; r++) k->sgemm_add(1, n, p, a + r * ld, ld, b, ld, alone + r * ld, ld);
            CHECK(!memcmp(c, alone, size * sizeof *c), "%s: sgemm_add %d x %d x %d has other bits row by row", k->name,
                  m, n, p);
            free(a), free(b), free(c), free(d), free(alone);
        }
}

/* Rows between guarded pages become columns, then zeros up to the next multiple of 16; nothing after them changes. */
static void test_kernels_transpose(void) {
    enum { LD = 96 };
    static const enum gguf_type types[] = {GGUF_F32, GGUF_BF16, GGUF_F16};
    static const int shape[][2] = {{1, 1}, {16, 8}, {7, 13}, {17, 64}, {32, 128}, {33, 21}, {64, 40}, {80, 9}};
    const struct kernels *k;
    uint64_t rng = 3;
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (size_t i = 0; i < sizeof types / sizeof *types; i++)
            for (size_t j = 0; j < sizeof shape / sizeof *shape; j++) {
                const int m = shape[j][0], n = shape[j][1], end = ceil_to(m, TRANSPOSE_ROWS);
                const size_t row = gguf_row_bytes(types[i], (size_t)n), stride = row + 6 - row % 2,
                             bytes = stride * (size_t)(m - 1) + row;
                uint8_t *x = kt_guarded(bytes);
                float *y = xmalloc(sizeof(float) * LD * (size_t)n), v[128];
                int bad = 0;
                for (size_t b = 0; b < bytes; b++)
                    x[b] = (uint8_t)(rng = rng * 6364136223846793005u + 1442695040888963407u, rng >> 56);
                for (int c = 0; c < LD * n; c++) y[c] = 5;
                k->transpose(types[i], x, stride, m, n, y, LD);
                for (int r = 0; r < LD; r++) {
                    memset(v, 0, sizeof v);
                    if (r < m) gguf_dequantize_row(types[i], x + (size_t)r * stride, v, (size_t)n);
                    for (int c = 0; c < n; c++) {
                        const float want = r < end ? v[c] : 5, got = y[c * LD + r];
                        bad += memcmp(&want, &got, sizeof got) && !(isnan(want) && isnan(got));
                    }
                }
                CHECK(!bad, "%s: %d x %d values of %s: %d differ", k->name, m, n, gguf_type_info(types[i]).name, bad);
                free(y);
                kt_guarded_free(x, bytes);
            }
}

/* A token of the delta rule, or of Mamba-2, over a few columns of a wider state. The others stay as they are. */
static void test_kernels_delta(void) {
    enum { DK = 40, LDS = 200 };
    static const int columns[] = {1, 7, 32, 33, 64, 130, LDS};
    const struct kernels *k;
    float S[2][DK * LDS], q[DK], key[DK], a[DK], v[LDS], o[2][LDS];
    uint64_t rng = 5;
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (size_t c = 0; c < 3 * (sizeof columns / sizeof *columns); c++) {
            const size_t j = c / 3;
            const bool mamba = c % 3 == 2;
            const int n = columns[j], first = j & 1 && n < LDS ? 3 : 0, n_a = c % 3 == 1 ? DK : 1;
            for (int i = 0; i < DK * LDS; i++) S[0][i] = S[1][i] = kt_normal(&rng);
            for (int i = 0; i < DK; i++) {
                q[i] = kt_normal(&rng);
                key[i] = kt_normal(&rng) / 6;
                a[i] = 0.5f + 0.5f * (float)rng_uniform(&rng);
            }
            for (int i = 0; i < LDS; i++) v[i] = kt_normal(&rng);
            (mamba ? k->mamba_step : k->delta_step)(S[0] + first, LDS, DK, n, q, key, v, a, n_a, 0.5f, o[0]);
            (mamba ? kernels_ref.mamba_step : kernels_ref.delta_step)(S[1] + first, LDS, DK, n, q, key, v, a, n_a, 0.5f,
                                                                      o[1]);
            const double e = nmse(S[0], S[1], DK * LDS), r = nmse(o[0], o[1], (size_t)n);
            CHECK(e < 1e-12 && r < 1e-11, "%s, %s: %d columns, %d decays: NMSE of the state %.3g, of the result %.3g",
                  k->name, mamba ? "Mamba-2" : "delta rule", n, n_a, e, r);
        }
}

#define TESTS_KERNELS                                                                                   \
    {"kernels/gemm", test_kernels_gemm}, {"kernels/choice", test_kernels_choice},                       \
        {"kernels/scales", test_kernels_scales}, {"kernels/exact-fp8", test_kernels_exact_fp8},         \
        {"kernels/widened-fp8", test_kernels_widened_fp8}, {"kernels/extremes", test_kernels_extremes}, \
        {"kernels/pack", test_kernels_pack}, {"kernels/conversions", test_kernels_conversions},         \
        {"kernels/vectors", test_kernels_vectors}, {"kernels/delta", test_kernels_delta},               \
        {"kernels/sgemm", test_kernels_sgemm}, {"kernels/transpose", test_kernels_transpose},
