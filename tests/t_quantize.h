/* moe-convert --quantize, --backbone, --keep and --importance. Truth is the file that the same source gives without
 * args, and the scalar quantizer on its weights. */

/* Runs the converter; its exit code. *out and *said (stb_ds, NULL at first) get what it printed. */
static int quantize_run(const char *dir, const char *args, const char *file, char **out, char **said) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd, CONVERT_BIN " %s -o %s/%s --name q %s", dir, test_dir(), file, args);
    int rc = run_command(cmd, out, said);
    sb_cstr(out), sb_cstr(said);
    return rc;
}

static bool quantize_open(const char *dir, const char *args, const char *file, struct gguf *g, char **out) {
    char path[256], err[ERR_MAX], *said = NULL, *listing = NULL;
    int rc = quantize_run(dir, args, file, out ? out : &listing, &said);
    bool ok = CHECK(rc == 0, "%s %s: exit %d: %s", dir, args, rc, said);
    snprintf(path, sizeof path, "%s/%s", test_dir(), file);
    ok = ok && CHECK(!gguf_open(g, path, err, sizeof err), "%s", err);
    arrfree(said);
    arrfree(listing);
    return ok;
}

/* What the columns of matrix e count, as an importance file says; NULL: nothing. */
static float *quantize_columns(const struct gguf *imatrix, const char *name, size_t n_in, size_t e) {
    char key[128];
    double sum = 0;
    snprintf(key, sizeof key, "%s.in_sum2", name);
    const struct gguf_tensor *t = imatrix ? gguf_find_tensor(imatrix, key) : NULL;
    if (!t) return NULL;
    float *w = xmalloc(n_in * sizeof *w);
    memcpy(w, t->data + e * n_in * sizeof *w, n_in * sizeof *w);
    for (size_t c = 0; c < n_in; c++) sum += (double)w[c];
    for (size_t c = 0; c < n_in; c++) w[c] = (float)((double)w[c] * (double)n_in / sum);
    if (sum > 0) return w;
    free(w);
    return NULL;
}

struct quantize_case {
    const char *what;
    const struct gguf *plain, *got, *imatrix; /* imatrix NULL: none */
    bool amax;
    int nvfp4, q8_0, bf16; /* tensors that are expected to get another type */
};

/* One stack of matrices that became NVFP4. */
static void quantize_check_nvfp4(const struct quantize_case *k, const char *name, const struct gguf_tensor *from,
                                 const struct gguf_tensor *t) {
    size_t n = t->ne[0] * t->ne[1], bytes = gguf_row_bytes(GGUF_NVFP4, n);
    float *x = xmalloc(n * sizeof *x);
    uint8_t *want = xmalloc(bytes);
    char scale[96];
    snprintf(scale, sizeof scale, "%.*s.scale", (int)(strlen(name) - strlen(".weight")), name);
    const struct gguf_tensor *outer = gguf_find_tensor(k->plain, scale); /* of FP8 */
    for (uint64_t e = 0; e < t->ne[2]; e++) {
        gguf_dequantize_row(from->type, from->data + e * gguf_row_bytes(from->type, n), x, n);
        float *weight = quantize_columns(k->imatrix, name, t->ne[0], e);
        struct nvfp4_rule r = {nvfp4_scale2(largest(x, n)), !k->amax, t->ne[0], weight};
        quantize_nvfp4_scalar(x, n, &r, (struct block_nvfp4 *)want);
        CHECK(!memcmp(want, t->data + e * bytes, bytes), "%s: %s: other blocks in matrix %d", k->what, name, (int)e);
        float factor = outer ? f32_from_bits(gguf_rd32(outer->data + 4 * e)) : 1;
        CHECK(same_bits(out_f32(k->got, scale, t->ne[2], e), r.scale2 * factor), "%s: %s", k->what, scale);
        free(weight);
    }
    free(x);
    free(want);
}

/* Whether a tensor is the scale of a matrix that became NVFP4. */
static bool quantize_new_scale(const struct quantize_case *k, const char *name) {
    char matrix[96];
    const char *dot = strrchr(name, '.');
    snprintf(matrix, sizeof matrix, "%.*s.weight", (int)(dot - name), name);
    const struct gguf_tensor *was = gguf_find_tensor(k->plain, matrix), *is = gguf_find_tensor(k->got, matrix);
    return !strcmp(dot, ".scale") && was && is && is->type == GGUF_NVFP4 && was->type != GGUF_NVFP4;
}

/* Every tensor is what it was, or what the scalar quantizer makes of it. */
static void quantize_check(const struct quantize_case *k) {
    int nvfp4 = 0, q8_0 = 0, bf16 = 0;
    for (uint32_t i = 0; i < k->got->n_tensors; i++) {
        char name[96];
        const struct gguf_tensor *t = &k->got->tensors[i];
        const struct gguf_tensor *from = gguf_find_tensor(k->plain, gguf_printable(t->name, name, sizeof name));
        size_t n = t->ne[0] * t->ne[1] * t->ne[2];
        if (quantize_new_scale(k, name)) continue; /* it is looked at with its matrix */
        if (!CHECK(from, "%s: %s is new", k->what, name)) continue;
        float *x = xmalloc(n * sizeof *x);
        uint8_t *want = xmalloc(t->bytes);
        gguf_dequantize_row(from->type, from->data, x, n);
        if (t->type == from->type) {
            CHECK(t->bytes == from->bytes && !memcmp(t->data, from->data, t->bytes), "%s: %s differs", k->what, name);
        } else if (t->type == GGUF_NVFP4) {
            quantize_check_nvfp4(k, name, from, t);
            nvfp4++;
        } else if (t->type == GGUF_Q8_0) {
            quantize_q8_0(x, n, (struct block_q8_0 *)want);
            CHECK(!memcmp(want, t->data, t->bytes), "%s: %s: other blocks", k->what, name);
            q8_0++;
        } else if (CHECK(t->type == GGUF_BF16, "%s: %s has the type %u", k->what, name, t->type)) {
            for (size_t j = 0; j < n; j++) x[j] -= bf16_to_f32((uint16_t)(t->data[2 * j] | t->data[2 * j + 1] << 8));
            CHECK(largest(x, n) < 1e-3f, "%s: %s: rounded by up to %g", k->what, name, (double)largest(x, n));
            bf16++;
        }
        free(x);
        free(want);
    }
    CHECK(nvfp4 == k->nvfp4 && q8_0 == k->q8_0 && bf16 == k->bf16, "%s: %d tensors NVFP4, %d Q8_0, %d BF16", k->what,
          nvfp4, q8_0, bf16);
}

/* Converts with and without options and compares. */
static void quantize_compare(const char *dir, const char *args, struct quantize_case k) {
    struct gguf plain = {0}, got = {0};
    char what[256];
    snprintf(what, sizeof what, "%s %s", dir, args);
    k.what = what, k.plain = &plain, k.got = &got;
    if (quantize_open(dir, "", "plain.gguf", &plain, NULL) && quantize_open(dir, args, "quant.gguf", &got, NULL))
        quantize_check(&k);
    gguf_close(&plain);
    gguf_close(&got);
}

/* Directories of every form: experts, dense layers, backbone. */
static void test_quantize_forms(void) {
    static const enum hf_form forms[] = {HF_BF16, HF_F16, HF_F32, HF_FP8_TENSOR};
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        struct hf h;
        char dir[96];
        int other = forms[f] == HF_F16 || forms[f] == HF_F32;
        hf_begin(&h, "quantize");
        h.attn = h.experts = forms[f];
        hf_deepseek(&h);
        CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
        snprintf(dir, sizeof dir, "%s", h.dir);
        quantize_compare(dir, "--quantize nvfp4", (struct quantize_case){.nvfp4 = 6});
        quantize_compare(dir, "--quantize nvfp4 --dense --search amax",
                         (struct quantize_case){.nvfp4 = 9, .amax = true});
        /* 3 x 6 attention matrices, 3 dense, 2 x 3 shared, head and embedding, eh_proj */
        quantize_compare(dir, "--backbone q8_0", (struct quantize_case){.q8_0 = 30});
        quantize_compare(dir, "--backbone q8_0 --quantize nvfp4 --dense --search sweep",
                         (struct quantize_case){.nvfp4 = 9, .q8_0 = 27});
        quantize_compare(dir, "--backbone bf16 --quantize nvfp4",
                         (struct quantize_case){.nvfp4 = 6, .bf16 = 27 * other});
        hf_end(&h);
    }
}

/* The types of an MTP layer are those of the layers before: of its experts, of its other matrices, and of its
 * embedding and output matrix those of the model's. */
static void test_quantize_prediction(void) {
    static const struct {
        const char *name, *of; /* of: a tensor of the rest of the model that must have the same type */
        bool own;              /* DeepSeek-V3 alone has it */
    } t[] = {{"ffn_gate_exps", "blk.1.ffn_gate_exps", false}, {"ffn_up_exps", "blk.1.ffn_up_exps", false},
             {"ffn_down_exps", "blk.1.ffn_down_exps", false}, {"ffn_down_shexp", "blk.1.ffn_down_shexp", false},
             {"attn_output", "blk.1.attn_output", false},     {"ffn_gate_inp", "blk.1.ffn_gate_inp", false},
             {"nextn.eh_proj", "blk.1.attn_output", false},   {"nextn.enorm", "output_norm", false},
             {"nextn.embed_tokens", "token_embd", true},      {"nextn.shared_head_head", "output", true}};
    static const char *const args[] = {"", "--quantize nvfp4", "--backbone q8_0", "--quantize nvfp4 --backbone q8_0"};
    for (int family = 0; family < 3; family++) {
        struct hf h;
        hf_begin(&h, "predict");
        if (family) hf_delta(&h, family == 1, "mtp.");
        else hf_deepseek(&h);
        for (int i = 0; i < 2 && !family; i++)
            hf_linear(&h, i ? "model.layers.2.embed_tokens" : "model.layers.2.shared_head.head", HF_VOCAB, HF_EMBD,
                      HF_BF16);
        CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
        for (int k = 0; k < 4; k++) {
            struct gguf g;
            char name[96];
            if (!quantize_open(h.dir, args[k], "q.gguf", &g, NULL)) continue;
            for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
                const uint32_t want = i < 3              ? k & 1 ? GGUF_NVFP4 : GGUF_BF16
                                      : i == 5 || i == 7 ? GGUF_F32
                                      : k & 2            ? GGUF_Q8_0
                                                         : GGUF_BF16;
                if (t[i].own && family) continue;
                snprintf(name, sizeof name, "blk.2.%s.weight", t[i].name);
                const struct gguf_tensor *a = gguf_find_tensor(&g, name);
                snprintf(name, sizeof name, "%s.weight", t[i].of);
                const struct gguf_tensor *b = gguf_find_tensor(&g, name);
                CHECK(a && b && a->type == want && b->type == want, "family %d, '%s': %s and %s", family, args[k],
                      t[i].name, name);
                snprintf(name, sizeof name, "blk.2.%s.scale", t[i].name);
                const struct gguf_tensor *scale = gguf_find_tensor(&g, name);
                CHECK(!scale == (want != GGUF_NVFP4) && (!scale || scale->ne[0] == 4), "family %d, '%s': %s", family,
                      args[k], name);
            }
            gguf_close(&g);
        }
        /* 3 x 6 attention matrices, 3 dense, 2 x 3 shared, 2 heads, 2 embeddings, eh_proj */
        if (!family) quantize_compare(h.dir, args[3], (struct quantize_case){.nvfp4 = 6, .q8_0 = 32});
        hf_end(&h);
    }
}

/* The relative squared error of a stack of experts against a file of the same source, outer scales included. */
static double quantize_distance(const struct gguf *a, const struct gguf *b, const char *base) {
    char name[96];
    double error = 0, power = 0;
    const struct gguf *const g[2] = {a, b};
    const struct gguf_tensor *t[2], *scale[2];
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s.weight", base);
        t[i] = gguf_find_tensor(g[i], name);
        snprintf(name, sizeof name, "%s.scale", base);
        scale[i] = gguf_find_tensor(g[i], name);
        if (!CHECK(t[i], "%s is missing", base)) return INFINITY;
    }
    size_t n = t[0]->ne[0] * t[0]->ne[1];
    float *x[2] = {xmalloc(n * sizeof(float)), xmalloc(n * sizeof(float))}, factor[2];
    for (uint64_t e = 0; e < t[0]->ne[2]; e++) {
        for (int i = 0; i < 2; i++) {
            gguf_dequantize_row(t[i]->type, t[i]->data + e * gguf_row_bytes(t[i]->type, n), x[i], n);
            factor[i] = scale[i] ? f32_from_bits(gguf_rd32(scale[i]->data + 4 * e)) : 1;
        }
        for (size_t i = 0; i < n; i++) {
            double u = x[0][i] * factor[0], v = x[1][i] * factor[1];
            error += (u - v) * (u - v), power += u * u;
        }
    }
    free(x[0]);
    free(x[1]);
    return error / power;
}

/* FP8 with many scales has no exact BF16, so errors are compared; what is NVFP4 stays. */
static void test_quantize_sources(void) {
    static const enum hf_form forms[] = {HF_NVFP4, HF_CT_NVFP4, HF_FP8_ROW};
    static const char *const parts[] = {"blk.1.ffn_gate_exps", "blk.1.ffn_up_exps", "blk.1.ffn_down_exps"};
    for (size_t f = 0; f <= sizeof forms / sizeof *forms; f++) { /* and one with several blocks of 128 x 128 */
        struct hf h;
        struct gguf plain = {0}, g = {0};
        hf_begin(&h, "sources");
        h.experts = f < 3 ? forms[f] : HF_BF16;
        hf_qwen3(&h);
        const char *dir = f < 3 ? h.dir : "tests/fixtures/deepseek_v3_fp8";
        CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
        if (f < 2) quantize_compare(dir, "--quantize nvfp4 --backbone bf16", (struct quantize_case){0});
        else if (quantize_open(dir, "", "plain.gguf", &plain, NULL) &&
                 quantize_open(dir, "--quantize nvfp4", "quant.gguf", &g, NULL))
            for (int i = 0; i < 3; i++) {
                const struct gguf_tensor *t = gguf_find_tensor(&g, "blk.1.ffn_gate_exps.weight");
                double e = sqrt(quantize_distance(&plain, &g, parts[i]));
                CHECK(t && t->type == GGUF_NVFP4 && e > 0.01 && e < 0.1, "%s: %s: relative error %g", dir, parts[i], e);
            }
        gguf_close(&plain);
        gguf_close(&g);
        hf_end(&h);
    }
}

/* Families whose experts lie otherwise in their releases: stacks, columns, MXFP4, which stays. */
static void test_quantize_families(void) {
    static const struct {
        const char *name;
        int nvfp4, q8_0;
    } c[] = {{"gpt_oss", 0, 14},         {"gpt_oss_bf16", 6, 10},
             {"mixtral", 6, 10},         {"step3p5", 6, 26},
             {"step3p7", 0, 38},         {"mimo_v2_flash", 3, 13},
             {"laguna", 6, 26},          {"ernie4_5_moe_each", 3, 15},
             {"deepseek_v32", 9, 49},    {"glm_moe_dsa_types", 3, 63},
             {"minimax_m3", 6, 27},      {"kimi_linear", 9, 46},
             {"bailing_hybrid", 12, 50}, {"nemotron_h", 3, 29},
             {"inkling2_loop", 21, 73},  {"glm5_next", 6, 60},
             {"qwen4_exp", 12, 67},      {"gemma4", 9, 21}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char dir[96];
        snprintf(dir, sizeof dir, "tests/fixtures/%s", c[i].name);
        quantize_compare(dir, "--quantize nvfp4 --backbone q8_0",
                         (struct quantize_case){.nvfp4 = c[i].nvfp4, .q8_0 = c[i].q8_0});
        quantize_compare(dir, "--quantize nvfp4 --search amax",
                         (struct quantize_case){.nvfp4 = c[i].nvfp4, .amax = true});
    }
}

/* A type that one expression leaves out, and rows that are no blocks. */
static void test_quantize_keep(void) {
    struct hf h;
    char *out = NULL, *said = NULL;
    hf_begin(&h, "keep");
    hf_deepseek(&h);
    if (!CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err)) return;
    quantize_compare(h.dir, "--quantize nvfp4 --keep '\\.1\\.ffn_(up|gate)_exps'", (struct quantize_case){.nvfp4 = 4});
    quantize_compare(h.dir, "--quantize nvfp4 --backbone q8_0 --keep '^(output|token_embd)\\.weight$|_exps'",
                     (struct quantize_case){.q8_0 = 28});
    quantize_compare(h.dir, "--quantize nvfp4 --backbone q8_0 --keep .", (struct quantize_case){0});
    hf_end(&h);

    /* q_b_proj has rows of 80, the experts of layer 1 are 96 wide */
    hf_begin(&h, "uneven");
    hf_deepseek(&h);
    hf_set(h.config, "{\"q_lora_rank\":80,\"moe_intermediate_size\":96}");
    for (size_t i = arrlenu(h.t); i-- > 0;) {
        const char *name = h.t[i].name;
        bool experts = strstr(name, "mlp.experts") || strstr(name, "shared_experts");
        bool narrow = strstr(name, "self_attn.q_a") || strstr(name, "self_attn.q_b");
        if (experts || narrow) arrfree(h.t[i].data), arrdel(h.t, i);
    }
    for (int l = 0; l < 3; l++) {
        static const char *const part[] = {"gate", "up", "down"};
        char x[96];
        snprintf(x, sizeof x, "model.layers.%d.self_attn.q_a_proj", l);
        hf_linear(&h, x, 80, 64, HF_BF16);
        snprintf(x, sizeof x, "model.layers.%d.self_attn.q_b_proj", l);
        hf_linear(&h, x, 96, 80, HF_BF16);
        snprintf(x, sizeof x, "model.layers.%d.self_attn.q_a_layernorm.weight", l);
        hf_plain(&h, x, "[80]", 80, HF_BF16);
        for (int k = 0; k < 15 && l; k++) {
            if (k < 12) snprintf(x, sizeof x, "model.layers.%d.mlp.experts.%d.%s_proj", l, k / 3, part[k % 3]);
            else snprintf(x, sizeof x, "model.layers.%d.mlp.shared_experts.%s_proj", l, part[k % 3]);
            hf_linear(&h, x, k % 3 < 2 ? 96 : 64, k % 3 < 2 ? 64 : 96, HF_BF16);
        }
    }
    if (CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err)) {
        quantize_compare(h.dir, "--quantize nvfp4 --backbone q8_0", (struct quantize_case){.nvfp4 = 4, .q8_0 = 27});
        CHECK(!quantize_run(h.dir, "--quantize nvfp4 --backbone q8_0", "q.gguf", &out, &said), "%s", said);
        CHECK(
            strstr(said, "blk.0.attn_q_b.weight: rows of 80 weights are not a multiple of 32: the tensor stays BF16") &&
                strstr(said, "5 tensors keep their type because of the length of their rows"),
            "%s", said);
    }
    arrfree(out);
    arrfree(said);
    hf_end(&h);
}

/* The report, and a tensor that NVFP4 does not suit. */
static void test_quantize_report(void) {
    struct hf h;
    char *out = NULL, *said = NULL;
    hf_begin(&h, "report");
    hf_qwen3(&h);
    struct hf_tensor *t = hf_find(&h, "model.layers.1.mlp.experts.0.down_proj.weight");
    for (size_t i = 0; i + 1 < arrlenu(t->data); i += 2) { /* half way between the codes of 4 and 6 */
        uint16_t b = bf16_from_f32(i / 2 % 16 ? 5.0f : 6.0f);
        memcpy(t->data + i, &b, 2);
    }
    t = hf_find(&h, "model.layers.0.mlp.experts.0.up_proj.weight");
    for (int e = 0; e < 4; e++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.up_proj.weight", e);
        t = hf_find(&h, name);
        memset(t->data, 0, arrlenu(t->data));
    }
    CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
    int rc = quantize_run(h.dir, "--quantize nvfp4 --search amax --backbone q8_0", "q.gguf", &out, &said);
    CHECK(rc == 0 &&
              strstr(said, "blk.1.ffn_down_exps.weight: its weights do not suit NVFP4: signal to noise is below 18 dB"),
          "exit %d: %s", rc, said);
    CHECK(strstr(out, "blk.0.ffn_up_exps.weight             NVFP4         32768 weights    exact\n"), "%s", out);
    CHECK(strstr(out, "\ntotal NVFP4       6 tensors                       196608 weights  "), "%s", out);
    CHECK(strstr(out, "\ntotal Q8_0       10 tensors"), "%s", out);
    const char *line = strstr(out, "blk.0.ffn_gate_exps.weight");
    double percent = 0, db = 0;
    CHECK(line && sscanf(line, "%*s NVFP4 32768 weights %lf %% %lf dB", &percent, &db) == 2, "%s", out);
    CHECK(fabs(-20 * log10(percent / 100) - db) < 0.01 && db > 19 && db < 23, "%g %% are not %g dB", percent, db);
    arrsetlen(out, 0), arrsetlen(said, 0);
    char cmd[256];
    snprintf(cmd, sizeof cmd, CONVERT_BIN " %s --dry-run --quantize nvfp4 --backbone q8_0", h.dir);
    CHECK(!run_command(cmd, &out, &said) && strstr(sb_cstr(&out), "\ntotal NVFP4       6 tensors") &&
              strstr(out, "\ntotal Q8_0       10 tensors") && strstr(out, "quantized"),
          "%s", out);
    arrfree(out);
    arrfree(said);
    hf_end(&h);
}

/* A copy of a file in which every matrix is F32. */
static void quantize_expand(const char *from, const char *to) {
    struct gguf g;
    struct gguf_writer w = {0};
    char err[ERR_MAX], *data = NULL;
    size_t n = 0;
    if (!CHECK(!gguf_open(&g, from, err, sizeof err), "%s", err)) return;
    const uint8_t *keys = g.images[0].base + 24;
    w.n_kv = g.n_kv;
    gguf_put(&w, keys, (size_t)((const uint8_t *)g.tensors[0].name.p - 8 - keys));
    for (uint32_t i = 0; i < g.n_tensors; i++) {
        char name[96];
        const struct gguf_tensor *t = &g.tensors[i];
        size_t count = t->ne[0] * t->ne[1] * t->ne[2];
        gguf_add_tensor(&w, gguf_printable(t->name, name, sizeof name), GGUF_F32, t->n_dims, t->ne);
        float *v = xmalloc(count * sizeof *v);
        gguf_dequantize_row(t->type, t->data, v, count);
        sb_put(&data, (char *)v, 4 * count);
        free(v);
        while (arrlenu(data) % 32) sb_put(&data, "", 1);
    }
    uint8_t *header = gguf_header(&w, &n);
    FILE *f = fopen(to, "w");
    if (CHECK(f && fwrite(header, 1, n, f) == n && fwrite(data, 1, arrlenu(data), f) == arrlenu(data),
              "cannot write %s", to))
        fclose(f);
    free(header);
    arrfree(data);
    gguf_writer_free(&w);
    gguf_close(&g);
}

/* Fixtures that are quantized load, and say what their weights say as F32: Q8_0 in every place, and NVFP4 experts. */
static void test_quantize_fixtures(void) {
    static const struct {
        const char *name, *args;
        int nvfp4, q8_0;
    } c[] = {{"qwen3moe", "--backbone q8_0", 0, 13},
             {"qwen3moe_nonorm", "--backbone q8_0", 0, 9},
             {"qwen3moe", "--quantize nvfp4 --dense --backbone q8_0", 6, 10},
             {"deepseek_v3", "--backbone q8_0", 0, 29},
             {"deepseek_v3", "--quantize nvfp4 --backbone q8_0", 6, 29},
             {"deepseek_v3_plain", "--quantize nvfp4 --dense --backbone q8_0", 9, 26},
             {"qwen3_5_moe", "--quantize nvfp4 --backbone q8_0", 9, 25},
             {"qwen3_next", "--quantize nvfp4 --backbone q8_0", 15, 38}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct model m, same;
        char dir[96], path[256], expanded[256], err[ERR_MAX];
        size_t n_ids = 0, n_logits = 0;
        snprintf(dir, sizeof dir, "tests/fixtures/%s", c[i].name);
        quantize_compare(dir, c[i].args, (struct quantize_case){.nvfp4 = c[i].nvfp4, .q8_0 = c[i].q8_0});
        snprintf(path, sizeof path, "%s/quant.gguf", test_dir());
        snprintf(expanded, sizeof expanded, "%s/expanded.gguf", test_dir());
        quantize_expand(path, expanded);
        if (!CHECK(!model_load(&m, path, err), "%s", err)) continue;
        if (!CHECK(!model_load(&same, expanded, err), "%s", err)) continue;
        snprintf(path, sizeof path, "%s/ids.i32", dir);
        int32_t *ids = slurp(path, &n_ids);
        snprintf(path, sizeof path, "%s/logits.f32", dir);
        float *hf = slurp(path, &n_logits);
        int n = (int)(n_ids / 4);
        float *ref = all_logits(&same, &kernels_ref, KV_F32, 2, ids, n),
              *x = all_logits(&m, &kernels_ref, KV_F32, 2, ids, n),
              *fast = all_logits(&m, kernels_choose(), KV_F32, 2, ids, n);
        double e[3] = {nmse(x, ref, n_logits / 4), nmse(fast, x, n_logits / 4), nmse(x, hf, n_logits / 4)};
        CHECK(e[0] < 1e-9, "%s %s: NMSE %.3g against the same weights in F32", c[i].name, c[i].args, e[0]);
        CHECK(e[1] < 1e-2, "%s %s: NMSE %.3g of the fast kernels", c[i].name, c[i].args, e[1]);
        CHECK(e[2] > 1e-6 && e[2] < 0.1, "%s %s: NMSE %.3g against Hugging Face", c[i].name, c[i].args, e[2]);
        free(ref);
        free(x);
        free(fast);
        arrfree(ids);
        arrfree(hf);
        model_free(&m);
        model_free(&same);
    }
}

static void test_quantize_usage(void) {
    static const struct {
        const char *args, *says;
    } c[] = {{"--quantize", "--quantize needs a value"},
             {"--quantize q4_0", "--quantize q4_0: expected nvfp4"},
             {"--quantize nvfp4 --search all", "--search all: expected sweep|amax"},
             {"--backbone nvfp4", "--backbone nvfp4: expected bf16|q8_0"},
             {"--search amax", "--search needs --quantize nvfp4"},
             {"--backbone q8_0 --dense", "--dense needs --quantize nvfp4"},
             {"--importance x.gguf", "--importance needs --quantize nvfp4"},
             {"--quantize nvfp4 --search amax --importance x.gguf", "--importance works only with --search sweep"},
             {"--backbone q8_0 --keep 'a('", "--keep 'a(': missing closing parenthesis at character 3"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char *out = NULL, *said = NULL;
        int rc = quantize_run("convert/demo", c[i].args, "none.gguf", &out, &said);
        CHECK(rc == 2 && strstr(said, c[i].says) && strchr(said, '\n') == said + strlen(said) - 1, "%s: exit %d: %s",
              c[i].args, rc, said);
        arrfree(out);
        arrfree(said);
    }
}

/* Weights that are no numbers, or too large for the format: a line that names the tensor, and no file. */
static void test_quantize_bad_weights(void) {
    static const struct {
        const char *tensor, *args;
        float v;
        const char *says; /* NULL: it converts */
    } c[] = {{"model.layers.1.mlp.experts.3.up_proj", "--quantize nvfp4", NAN,
              "up_proj.weight': row 1, column 3 is not a finite number"},
             {"model.layers.0.mlp.experts.0.down_proj", "--quantize nvfp4", -INFINITY, "is not a finite number"},
             {"model.layers.0.self_attn.q_proj", "--backbone q8_0", INFINITY, "q_proj.weight': row 1, column 3 is not"},
             {"model.layers.0.self_attn.q_proj", "--backbone q8_0", 1e7f, "weights up to 1e+07 are too large for Q8_0"},
             {"model.layers.1.mlp.experts.3.up_proj", "--quantize nvfp4 --keep _up_", NAN, NULL},
             {"model.layers.1.mlp.experts.3.up_proj", "--quantize nvfp4", 1e30f, NULL}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        char name[128], path[256], *out = NULL, *said = NULL;
        hf_begin(&h, "bad");
        h.attn = h.experts = HF_F32;
        hf_qwen3(&h);
        snprintf(name, sizeof name, "%s.weight", c[i].tensor);
        struct hf_tensor *t = hf_find(&h, name);
        if (CHECK(t, "no %s", name)) memcpy(t->data + 4 * 67, &c[i].v, 4);
        CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
        int rc = quantize_run(h.dir, c[i].args, "bad.gguf", &out, &said);
        CHECK(rc == !!c[i].says && strstr(said, c[i].says ? c[i].says : "tensors"), "%s: exit %d: %s", name, rc, said);
        snprintf(path, sizeof path, "%s/bad.gguf", test_dir());
        CHECK(!access(path, F_OK) == !c[i].says, "%s: %s", name, path);
        unlink(path);
        arrfree(out);
        arrfree(said);
        hf_end(&h);
    }
    char *listing = NULL, cmd[128];
    snprintf(cmd, sizeof cmd, "ls %s", test_dir());
    run_command(cmd, &listing, NULL);
    CHECK(!strstr(sb_cstr(&listing), "tmp"), "left behind: %s", listing);
    arrfree(listing);
}

/* ------------------------------------------------------------------------------------------------------- importance */

/* An importance matrix in the making. */
struct imatrix {
    struct gguf_writer w;
    char *data; /* stb_ds */
    uint64_t rng;
};

/* in_sum2 and counts of n matrices with n_in columns; those of matrix 1 were never reached, matrix 2 saw only zeros. */
static void imatrix_add(struct imatrix *im, const char *name, size_t n_in, size_t n) {
    char key[128];
    snprintf(key, sizeof key, "%s.in_sum2", name);
    gguf_add_tensor(&im->w, key, GGUF_F32, n > 1 ? 2 : 1, (uint64_t[]){n_in, n});
    snprintf(key, sizeof key, "%s.counts", name);
    gguf_add_tensor(&im->w, key, GGUF_F32, n > 1 ? 2 : 1, (uint64_t[]){1, n});
    for (size_t i = 0; i < n_in * n; i++) {
        float v = i / n_in == 1 || i / n_in == 2 ? 0.0f : (float)exp(3 * normal(&im->rng));
        sb_put(&im->data, (char *)&v, 4);
    }
    while (arrlenu(im->data) % 32) sb_put(&im->data, "", 1);
    for (size_t i = 0; i < n; i++) {
        float v = i == 1 ? 0.0f : 100.0f;
        sb_put(&im->data, (char *)&v, 4);
    }
    while (arrlenu(im->data) % 32) sb_put(&im->data, "", 1);
}

static void imatrix_write(struct imatrix *im, const char *path) {
    size_t n = 0;
    uint8_t *header = gguf_header(&im->w, &n);
    FILE *f = fopen(path, "w");
    if (CHECK(f && fwrite(header, 1, n, f) == n && fwrite(im->data, 1, arrlenu(im->data), f) == arrlenu(im->data),
              "cannot write %s", path))
        fclose(f);
    free(header);
}

static void imatrix_free(struct imatrix *im) {
    gguf_writer_free(&im->w);
    arrfree(im->data);
}

/* The weights of columns are those of the file; what it does not name or never saw counts alike. */
static void test_quantize_importance(void) {
    struct imatrix im = {.rng = 5};
    struct gguf g = {0};
    struct hf h;
    char path[256], args[1024], err[ERR_MAX], *out = NULL, *said = NULL;
    hf_begin(&h, "importance");
    hf_deepseek(&h);
    CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
    snprintf(path, sizeof path, "%s/imatrix.gguf", h.dir);
    gguf_put_str(&im.w, "general.type", "imatrix", 7);
    imatrix_add(&im, "blk.0.ffn_down.weight", 128, 1);
    imatrix_add(&im, "blk.1.attn_q_a.weight", 64, 1);
    imatrix_add(&im, "blk.1.ffn_gate_exps.weight", 64, 4);
    imatrix_add(&im, "blk.1.ffn_down_exps.weight", 128, 4);
    imatrix_add(&im, "blk.2.ffn_up_exps.weight", 64, 4);
    imatrix_write(&im, path);
    if (CHECK(!gguf_open(&g, path, err, sizeof err), "%s", err)) {
        snprintf(args, sizeof args, "--quantize nvfp4 --dense --importance %s", path);
        quantize_compare(h.dir, args, (struct quantize_case){.nvfp4 = 9, .imatrix = &g});
        CHECK(!quantize_run(h.dir, args, "q.gguf", &out, &said) &&
                  strstr(out, "\nimportance        4 tensors are weighted, 5 are not in '"),
              "%s", out);
        snprintf(args, sizeof args, CONVERT_BIN " %s --quantize nvfp4 --importance %s -o %s", h.dir, path, path);
        arrsetlen(said, 0);
        CHECK(run_command(args, NULL, &said) == 1 && strstr(sb_cstr(&said), "is one of the input files"), "%s", said);
    }
    gguf_close(&g);
    imatrix_free(&im);
    arrfree(out);
    arrfree(said);
    hf_end(&h);
}

/* What --calibrate --activations writes names every feed-forward. */
static void test_quantize_calibrated(void) {
    static const char dir[] = "tests/fixtures/deepseek_v3";
    struct gguf plain = {0}, g = {0};
    char cmd[1024], path[256], args[512], err[ERR_MAX], *said = NULL, *out = NULL;
    if (!quantize_open(dir, "", "plain.gguf", &plain, NULL)) return;
    gguf_close(&plain);
    snprintf(path, sizeof path, "%s/activations.gguf", test_dir());
    snprintf(cmd, sizeof cmd,
             "head -c 3000 prompts/haystack.txt >%s/some.txt; " MOE_BIN
             " --cpu -m %s/plain.gguf --calibrate %s/some.txt -o %s/scores.json --activations %s -c 256",
             test_dir(), test_dir(), test_dir(), test_dir(), path);
    int rc = run_command(cmd, NULL, &said);
    snprintf(args, sizeof args, "--quantize nvfp4 --dense --importance %s", path);
    if (CHECK(rc == 0, "%s", sb_cstr(&said)) && CHECK(!gguf_open(&g, path, err, sizeof err), "%s", err)) {
        quantize_compare(dir, args, (struct quantize_case){.nvfp4 = 9, .imatrix = &g});
        CHECK(!quantize_run(dir, args, "q.gguf", &out, &said) && strstr(out, "9 tensors are weighted, 0 are not"), "%s",
              out);
    }
    gguf_close(&g);
    arrfree(said);
    arrfree(out);
}

/* Files that are no importance matrix of this model: one line, and no output. */
static void test_quantize_importance_bad(void) {
    static const struct {
        const char *says;
        const char *type;
        size_t n_in, n;
        size_t at; /* of a value that is replaced by v */
        float v;
    } c[] = {{"expected an importance matrix (general.type imatrix), found model", "model", 64, 4, 0, 1},
             {"expected an importance matrix (general.type imatrix), found none", NULL, 64, 4, 0, 1},
             {"ffn_up_exps.weight.in_sum2': expected F32 64 x 4, found F32 128 x 4 x 1", "imatrix", 128, 4, 0, 1},
             {"ffn_up_exps.weight.in_sum2': expected F32 64 x 4, found F32 64 x 3 x 1", "imatrix", 64, 3, 0, 1},
             {"ffn_up_exps.weight.in_sum2': value 7 is nan; expected a finite number", "imatrix", 64, 4, 7, NAN},
             {"ffn_up_exps.weight.in_sum2': value 255 is -1; expected", "imatrix", 64, 4, 255, -1},
             {"ffn_up_exps.weight.in_sum2': value 9 is inf; expected", "imatrix", 64, 4, 9, INFINITY},
             {"ffn_up_exps.weight.counts': value 3 is -2; expected", "imatrix", 64, 4, 256 + 3, -2},
             {"in_sum2' exists, but 'blk.1.ffn_up_exps.weight.counts' does not", "imatrix", 0, 4, 0, 0},
             {"not a GGUF file", "text", 0, 0, 0, 0},
             {"cannot open", NULL, 0, 0, 0, 0}};
    struct hf h;
    char path[256], args[512];
    hf_begin(&h, "bad_importance");
    hf_qwen3(&h);
    CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
    snprintf(path, sizeof path, "%s/imatrix.gguf", h.dir);
    snprintf(args, sizeof args, "--quantize nvfp4 --importance %s", path);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct imatrix im = {.rng = 5};
        char *out = NULL, *said = NULL;
        if (c[i].type) gguf_put_str(&im.w, "general.type", c[i].type, strlen(c[i].type));
        if (c[i].n_in) {
            imatrix_add(&im, "blk.1.ffn_up_exps.weight", c[i].n_in, c[i].n);
            memcpy(im.data + 4 * c[i].at, &c[i].v, 4);
            imatrix_write(&im, path);
        } else if (c[i].n) {
            gguf_add_tensor(&im.w, "blk.1.ffn_up_exps.weight.in_sum2", GGUF_F32, 2, (uint64_t[]){64, 4});
            for (int k = 0; k < 1024; k++) sb_put(&im.data, "", 1);
            imatrix_write(&im, path);
        } else if (c[i].type) hf_write(&h, "imatrix.gguf", "no GGUF, but a text of more than a few bytes", 44);
        else unlink(path);
        int rc = quantize_run(h.dir, args, "none.gguf", &out, &said);
        CHECK(rc == 1 && strstr(said, c[i].says) && strchr(said, '\n') == said + strlen(said) - 1, "%s: exit %d: %s",
              c[i].says, rc, said);
        arrfree(out);
        arrfree(said);
        imatrix_free(&im);
    }
    snprintf(path, sizeof path, "%s/none.gguf", test_dir());
    CHECK(access(path, F_OK), "%s is there", path);
    hf_end(&h);
}

/* -------------------------------------------------------------------------------------------------------- perplexity
 * */

/* The tensors of one part of the demo model, routed experts as BF16 of what their NVFP4 stands for. */
static void demo_expand(struct hf *h, const char *path) {
    char *file = NULL, err[ERR_MAX];
    json_t *t;
    const char *name;
    if (!CHECK(!read_file(path, &file, err), "%s", err)) return;
    uint64_t n = gguf_rd64((uint8_t *)file);
    const uint8_t *data = (uint8_t *)file + 8 + n;
    json_t *header = json_loadb(file + 8, n, 0, NULL);
    json_object_foreach(header, name, t) {
        char other[160];
        const uint8_t *part[3];
        const json_t *at = json_object_get(t, "data_offsets"), *shape = json_object_get(t, "shape");
        size_t first = (size_t)json_integer_value(json_array_get(at, 0)),
               bytes = (size_t)json_integer_value(json_array_get(at, 1)) - first;
        const char *dtype = json_string_value(json_object_get(t, "dtype"));
        bool expert = strstr(name, ".mlp.experts.") != NULL, weight = expert && !strcmp(strrchr(name, '.'), ".weight");
        if (!strcmp(name, "__metadata__") || (expert && !weight)) continue;
        char *text = json_dumps(shape, JSON_COMPACT);
        if (!weight) {
            hf_add(h, name, dtype, text, data + first, bytes);
            free(text);
            continue;
        }
        free(text);
        for (int i = 0; i < 3; i++) {
            snprintf(other, sizeof other, "%s%s", name, i == 0 ? "" : i == 1 ? "_scale" : "_scale_2");
            at = json_object_get(json_object_get(header, other), "data_offsets");
            if (CHECK(at, "%s is in another part", other)) part[i] = data + json_integer_value(json_array_get(at, 0));
        }
        snprintf(other, sizeof other, "[%d,%d]", (int)json_integer_value(json_array_get(shape, 0)),
                 2 * (int)json_integer_value(json_array_get(shape, 1)));
        struct hf_tensor *to = hf_add(h, name, "BF16", other, NULL, 0);
        float scale2 = f32_from_bits(gguf_rd32(part[2]));
        for (size_t i = 0; i < 2 * bytes; i++) {
            float v = e2m1_to_f32(part[0][i / 2] >> 4 * (i & 1) & 15) * e4m3_to_f32(part[1][i / 16]) * scale2;
            uint16_t b = bf16_from_f32(v);
            hf_put(&to->data, &b, 2);
        }
    }
    json_decref(header);
    arrfree(file);
}

/* The demo model loses less than 1 % of perplexity when its dequantized experts are quantized once more. */
static void test_quantize_perplexity(void) {
    enum { TOKENS = 4096, WINDOW = 512 };
    struct hf h = {.rng = 1};
    struct model m;
    char cmd[512], path[256], err[ERR_MAX], *text = NULL, *out = NULL, *said = NULL;
    int32_t *ids = NULL;
    double p[2];
    snprintf(h.dir, sizeof h.dir, "%s/expanded", test_dir());
    mkdir(h.dir, 0777);
    demo_expand(&h, "convert/demo/model-00001-of-00002.safetensors");
    demo_expand(&h, "convert/demo/model-00002-of-00002.safetensors");
    hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
    snprintf(cmd, sizeof cmd, "cp convert/demo/config.json convert/demo/generation_config.json convert/demo/tok* %s",
             h.dir);
    CHECK(!run_command(cmd, NULL, NULL), "%s", cmd);
    CHECK(!quantize_run(h.dir, "--quantize nvfp4 --backbone bf16", "again.gguf", &out, &said), "%s", said);
    CHECK(strstr(out, "\ntotal NVFP4      18 tensors"), "%s", out);
    CHECK(!read_file("prompts/haystack.txt", &text, err), "%s", err);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/again.gguf", test_dir());
        if (!CHECK(!model_load(&m, i ? path : "build/demo.gguf", err), "%s", err)) break;
        if (!i) tokenize(m.vocab, text, 40000, NULL, 0, &ids);
        if (CHECK(arrlen(ids) >= TOKENS, "%td tokens", arrlen(ids)))
            p[i] = perplexity(&m, kernels_choose(), KV_BF16, ids, TOKENS, WINDOW);
        model_free(&m);
    }
    CHECK(p[1] < 1.01 * p[0] && p[1] > 0.95 * p[0], "perplexity %.4f, once more quantized %.4f", p[0], p[1]);
    unlink(path);
    arrfree(ids);
    arrfree(text);
    arrfree(out);
    arrfree(said);
    hf_end(&h);
}

#define TESTS_QUANTIZE                                                                                                \
    {"quantize/forms", test_quantize_forms}, {"quantize/prediction", test_quantize_prediction},                       \
        {"quantize/sources", test_quantize_sources}, {"quantize/families", test_quantize_families},                   \
        {"quantize/keep", test_quantize_keep}, {"quantize/report", test_quantize_report},                             \
        {"quantize/fixtures", test_quantize_fixtures}, {"quantize/usage", test_quantize_usage},                       \
        {"quantize/bad_weights", test_quantize_bad_weights}, {"quantize/importance", test_quantize_importance},       \
        {"quantize/importance_bad", test_quantize_importance_bad}, {"quantize/calibrated", test_quantize_calibrated}, \
        {"quantize/perplexity", test_quantize_perplexity},
