/* The number formats of gguf_nvfp4.h against libggml's tables and vectors (tests/golden/nvfp4). */

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

/* Every value, and between two neighbours nearest with ties to even. */
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

#define TESTS_NVFP4                                                                                      \
    {"nvfp4/e2m1", test_nvfp4_e2m1}, {"nvfp4/e4m3", test_nvfp4_e4m3}, {"nvfp4/ue4m3", test_nvfp4_ue4m3}, \
        {"nvfp4/quantize_ref", test_nvfp4_quantize}, {"nvfp4/repack", test_nvfp4_repack},
