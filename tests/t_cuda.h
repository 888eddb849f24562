/* The CUDA backend against the CPU's operations: operation by operation from the same inputs, and whole models. */

void cuda_test_write(struct rank *r, enum act a, const float *x, int n_tok);
void cuda_test_read(struct rank *r, enum act a, float *x, int n_tok, bool half);
void cuda_test_batch(struct rank *r);
void cuda_test_tiles(struct rank *r, const struct weight *w, uint8_t *codes, uint8_t *scales);
void cuda_test_memory(size_t bytes);

/* ---- one table that runs every operation on both backends and compares ---- */

static struct {
    struct rank *gpu;
    const struct ops *cpu;
    const char *name;
    double worst; /* relative RMS error of an operation, at most */
    double limit;
} twin;

static float *twin_buffer(size_t n) { return xmalloc(n * sizeof(float) + 1); }

/* The slot's values of the CPU become the GPU's: every operation starts from the same numbers. */
static void twin_in(struct rank *r, enum act a) { cuda_test_write(twin.gpu, a, r->act[a], r->n_tok); }

static void twin_compare(const struct rank *r, const char *op, int il, const float *got, const float *want,
                         size_t n) {
    double e = nmse(got, want, n);
    e = n ? sqrt(e) : 0;
    CHECK(e <= twin.limit, "%s: %s of layer %d, %d tokens at %d: relative error %.2e, at most %.0e",
          twin.name, op, il, r->n_tok, r->pos, e, twin.limit);
    if (e > twin.worst) twin.worst = e;
}

static void twin_out(struct rank *r, const char *op, int il, enum act a) {
    size_t n = (size_t)r->n_tok * (size_t)r->width[a];
    float *got = twin_buffer(n);
    cuda_test_read(twin.gpu, a, got, r->n_tok, false);
    twin_compare(r, op, il, got, r->act[a], n);
    free(got);
}

/* The rows of the batch in both caches, as floats. */
static void twin_cache(struct rank *r, int il) {
    for (int i = 0; i < 2; i++) {
        const struct kv_plane *p = i ? &r->kv[il].v : &r->kv[il].k,
                              *q = i ? &twin.gpu->kv[il].v : &twin.gpu->kv[il].k;
        size_t n = (size_t)r->n_tok, width = (size_t)p->width;
        struct kv_plane g = *q;
        g.data = xmalloc(n * q->row_bytes),
        g.scale = q->scale ? xmalloc(n * (size_t)q->n_group * sizeof(float)) : NULL;
        twin.gpu->ops->kv_copy(twin.gpu, q, (size_t)r->pos, n, g.data, g.scale, false);
        float *got = twin_buffer(n * width), *want = twin_buffer(n * width);
        kv_load(&kernels_ref, &g, 0, (int)n, 0, p->width, got, p->width);
        kv_load(&kernels_ref, p, r->pos, (int)n, 0, p->width, want, p->width);
        twin_compare(r, i ? "cache of v" : "cache of k", il, got, want, n * width);
        free(g.data), free(g.scale), free(got), free(want);
    }
}

static void twin_embed(struct rank *r, enum act o) {
    twin.cpu->embed(r, o), twin.gpu->ops->embed(twin.gpu, o);
    twin_out(r, "embed", -1, o);
}
static void twin_rmsnorm(struct rank *r, enum act x, const float *w, enum act o) {
    twin_in(r, x);
    twin.cpu->rmsnorm(r, x, w, o), twin.gpu->ops->rmsnorm(twin.gpu, x, w, o);
    float *got = twin_buffer((size_t)r->n_tok * (size_t)r->width[o]);
    cuda_test_read(twin.gpu, o, got, r->n_tok, true);
    twin_compare(r, "rmsnorm", -1, got, r->act[o], (size_t)r->n_tok * (size_t)r->width[o]);
    free(got);
}
static void twin_add_rmsnorm(struct rank *r, enum act x, enum act d, const float *w, enum act o) {
    twin_in(r, x), twin_in(r, d);
    twin.cpu->add_rmsnorm(r, x, d, w, o), twin.gpu->ops->add_rmsnorm(twin.gpu, x, d, w, o);
    twin_out(r, "add_rmsnorm, sum", -1, x), twin_out(r, "add_rmsnorm", -1, o);
}
static void twin_add(struct rank *r, enum act x, enum act d) {
    twin_in(r, x), twin_in(r, d);
    twin.cpu->add(r, x, d), twin.gpu->ops->add(twin.gpu, x, d);
    twin_out(r, "add", -1, x);
}
static void twin_linear(struct rank *r, const struct weight *w, enum act x, enum act o) {
    twin_in(r, x);
    twin.cpu->linear(r, w, x, o), twin.gpu->ops->linear(twin.gpu, w, x, o);
    twin_out(r, "linear", -1, o);
}
static void twin_rope_store_kv(struct rank *r, int il, enum act q, enum act k, enum act v) {
    twin_in(r, q), twin_in(r, k), twin_in(r, v);
    twin.cpu->rope_store_kv(r, il, q, k, v), twin.gpu->ops->rope_store_kv(twin.gpu, il, q, k, v);
    twin_cache(r, il);
}
static void twin_attention(struct rank *r, int il, enum act q, enum act o) {
    twin.cpu->attention(r, il, q, o), twin.gpu->ops->attention(twin.gpu, il, q, o);
    twin_out(r, "attention", il, o);
}
static void twin_mla_store(struct rank *r, int il, enum act q, enum act kv) {
    twin_in(r, q), twin_in(r, kv);
    twin.cpu->mla_store(r, il, q, kv), twin.gpu->ops->mla_store(twin.gpu, il, q, kv);
    twin_cache(r, il);
}
static void twin_mla_attention(struct rank *r, int il, enum act q, enum act o) {
    twin.cpu->mla_attention(r, il, q, o), twin.gpu->ops->mla_attention(twin.gpu, il, q, o);
    twin_out(r, "mla_attention", il, o);
}
static void twin_ffn(struct rank *r, int il, enum act x, enum act o) {
    twin_in(r, x);
    twin.cpu->ffn(r, il, x, o), twin.gpu->ops->ffn(twin.gpu, il, x, o);
    twin_out(r, "ffn", il, o);
}
static void twin_moe_ffn(struct rank *r, int il, enum act x, enum act o) {
    twin_in(r, x);
    twin.cpu->moe_ffn(r, il, x, o), twin.gpu->ops->moe_ffn(twin.gpu, il, x, o);
    twin_out(r, "moe_ffn", il, o);
}

/* Forwards of n tokens each over one timeline, every operation compared. */
static void twin_forwards(const char *name, const struct model *m, enum kv_type kv, int n_ctx, int splits,
                          enum moe_act act, const int *n) {
    struct rank cpu, gpu;
    char err[ERR_MAX] = "";
    struct cuda_options o = {.n_ctx = n_ctx, .kv = kv, .kv_splits = splits, .moe_act = act};
    if (!CHECK(cuda_rank_init(&gpu, m, &o, err) == 0, "%s: %s", name, err)) return;
    rank_init(&cpu, m, &kernels_ref, 1, n_ctx, kv);
    cpu.chunk = gpu.chunk < cpu.chunk ? gpu.chunk : cpu.chunk;
    struct ops table = cpu_ops;
    table.embed = twin_embed, table.rmsnorm = twin_rmsnorm, table.add_rmsnorm = twin_add_rmsnorm,
    table.add = twin_add;
    table.linear = twin_linear, table.rope_store_kv = twin_rope_store_kv, table.attention = twin_attention;
    table.mla_store = twin_mla_store, table.mla_attention = twin_mla_attention, table.ffn = twin_ffn;
    table.moe_ffn = twin_moe_ffn;
    twin.gpu = &gpu, twin.cpu = &cpu_ops, twin.name = name, twin.limit = 2e-3, twin.worst = 0;
    cpu.ops = &table;
    uint64_t rng = 7;
    for (int pos = 0; *n; pos += *n++) {
        for (int i = 0; i < *n; i++)
            cpu.tokens[i] = gpu.tokens[i] = (int32_t)(rng_next(&rng) % (uint64_t)m->n_vocab);
        cpu.pos = gpu.pos = pos, cpu.n_tok = gpu.n_tok = *n;
        cuda_test_batch(&gpu);
        forward(&cpu);
        twin_in(&cpu, A_X);
        int rows = *n < LOGIT_ROWS ? *n : LOGIT_ROWS;
        cpu_ops.logits(&cpu, *n - rows, rows), gpu.ops->logits(&gpu, *n - rows, rows);
        for (int i = 0; i < rows; i++)
            twin_compare(&cpu, "logits", -1, gpu.ops->read_logits(&gpu, i), cpu_ops.read_logits(&cpu, i),
                         (size_t)m->n_vocab);
    }
    cpu_ops.close(&cpu);
    gpu.ops->close(&gpu);
}

static void test_cuda_operations(void) {
    static const char *const names[] = {
        "qwen3moe",          "qwen3moe_nvfp4",    "qwen3moe_ct",     "qwen3moe_reap",    "deepseek_v3",
        "deepseek_v3_nvfp4", "deepseek_v3_plain", "deepseek_v3_fp8", "deepseek_v3_reap", "kimi_k2"};
    static const int n[] = {1, 2, 17, 1, 9, 16, 40, 1, 0};
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        struct model m;
        if (!fixture_load(names[f], &m)) return;
        for (int kv = 0; kv < 2; kv++)
            twin_forwards(names[f], &m, kv ? KV_FP8 : KV_BF16, 128, kv ? 0 : 2, MOE_ACT_F16, n);
        model_free(&m);
    }
}

/* ---- weights that the GPU invents, --bench, --profile ---- */

/* Small relatives of the shapes of --synth, with rows and columns that fill no tile. */
static const struct synth tiny_synths[] = {
    {"tiny GQA", "qwen3moe", 2, 128, 4, 2, 32, 16, 2, 64, 200, 256, .ff_dense = 192},
    {"tiny MLA", "deepseek2", 3, 128, 4, 1, 32, 16, 2, 64, 200, 256, 72, 64, 16, 1, 192, 64, 2, 1, 2.5f}};

static bool tiny_open(struct engine *e, struct settings *set, int which) {
    char err[ERR_MAX] = "";
    struct cuda_options o = {.n_ctx = 64, .kv = KV_FP8, .kv_splits = 1};
    memset(e, 0, sizeof *e), memset(set, 0, sizeof *set);
    e->set = set;
    synth_make(&e->model, &tiny_synths[which], NULL, true);
    if (!CHECK(cuda_rank_init(&e->session.r, &e->model, &o, err) == 0, "%s", err)) return false;
    session_start(&e->session);
    return true;
}

/* One matrix on the device: FP4 scales 0x30 .. 0x3F, halves of at most 0.025 * 2^8, no two tiles alike, zeros beyond the matrix. */
static void tiny_matrix(struct engine *e, const struct weight *w, const char *what) {
    bool fp4 = w->type == GGUF_NVFP4;
    size_t n_kt = ((size_t)w->n_in + 63) / 64, n_rt = ((size_t)w->n_out + 15) / 16,
           tiles = n_kt * n_rt * (size_t)w->n_expert, each = fp4 ? 512 : 2048, zeros = 0, same = 0, bad = 0;
    uint8_t *codes = xmalloc(tiles * each), *scales = xmalloc(tiles * 64);
    cuda_test_tiles(&e->session.r, w, codes, scales);
    for (size_t i = 1; i < tiles; i++) same += !memcmp(codes + i * each, codes + (i - 1) * each, each);
    for (size_t i = 0; i < tiles * each / 2; i++) {
        uint16_t h;
        memcpy(&h, codes + 2 * i, 2);
        zeros += h == 0;
        bad += !fp4 && !(fabsf(f16_to_f32(h)) <= 6.4f);
    }
    for (size_t i = 0; fp4 && i < tiles * 64; i++) bad += scales[i] < 0x30 || scales[i] > 0x3F;
    CHECK(!same && !bad, "%s, %s: %zu tiles repeat, %zu values are out of range", e->model.name, what, same,
          bad);
    /* of the values themselves few are zero: pairs of bytes in FP4, halves elsewhere */
    size_t outside = (n_kt * n_rt * 1024 - (size_t)w->n_in * (size_t)w->n_out) * (size_t)w->n_expert;
    if (fp4) outside /= 4;
    CHECK(zeros >= outside && zeros <= outside + tiles * each / 2 / 1000 + 2, "%s, %s: %zu zeros, %zu beyond",
          e->model.name, what, zeros, outside);
    size_t filled = 0;
    for (size_t i = 0; i < w->expert_bytes * (size_t)w->n_expert; i++) filled += w->data[i] != 0;
    CHECK(!filled, "%s, %s: the host has %zu bytes of it", e->model.name, what, filled);
    free(codes), free(scales);
}

static void test_cuda_invented(void) {
    static const int n[] = {1, 3, 40};
    struct engine e;
    struct settings set;
    for (int which = 0; which < 2; which++) {
        if (!tiny_open(&e, &set, which)) return;
        struct session *s = &e.session;
        const struct layer *y = &e.model.layers[e.model.n_layer - 1];
        tiny_matrix(&e, &e.model.output, "output"), tiny_matrix(&e, &y->wo, "wo");
        tiny_matrix(&e, &y->gate, "gate"), tiny_matrix(&e, &y->down, "down");
        if (which) tiny_matrix(&e, &y->wq_b, "wq_b"), tiny_matrix(&e, &y->wv_b, "wv_b");
        for (int i = 0; i < 3; i++) {
            int32_t ids[40];
            double sum = 0, sq = 0;
            for (int k = 0; k < n[i]; k++) ids[k] = (7 * k + i) % e.model.n_vocab;
            session_forward(s, ids, n[i]);
            s->r.ops->logits(&s->r, n[i] - 1, 1);
            const float *x = s->r.ops->read_logits(&s->r, 0);
            for (int k = 0; k < e.model.n_vocab; k++) sum += x[k], sq += (double)x[k] * x[k];
            sum /= e.model.n_vocab, sq = sqrt(sq / e.model.n_vocab - sum * sum);
            CHECK(sq > 0.02 && sq < 2, "%s, %d tokens: logits deviate by %g", e.model.name, n[i], sq);
        }
        engine_close(&e);
    }
}

/* Launches of each kernel in a forward and the logits behind it. */
static void profile_check(struct engine *e, int n, const char *const *kernel, const int *calls) {
    struct session *s = &e->session;
    struct profile_row row[64];
    int32_t ids[40] = {0};
    int found = 0, heads = 0;
    struct bench_call call = {s, ids, n, 1};
    char logits[60];
    int n_row = s->r.ops->profile(&s->r, bench_call, &call, row, 64);
    for (int k = 0; kernel[k]; k++) {
        int got = 0;
        for (int i = 0; i < n_row; i++)
            if (!strncmp(row[i].name, kernel[k], strlen(kernel[k])) && row[i].name[strlen(kernel[k])] == ' ')
                got += row[i].calls, found++;
        CHECK(got == calls[k], "%s, %d tokens: %s runs %d times, not %d", e->model.name, n, kernel[k], got,
              calls[k]);
    }
    CHECK(found == n_row, "%s, %d tokens: %d of %d rows are expected", e->model.name, n, found, n_row);
    snprintf(logits, sizeof logits, "k_few_sum 1 of %dx%d f16", e->model.n_vocab, e->model.n_embd);
    for (int i = 0; i < n_row; i++) {
        for (int k = 0; k < i; k++) CHECK(strcmp(row[i].name, row[k].name), "%s twice", row[i].name);
        CHECK(row[i].seconds > 0, "%s: %g s", row[i].name, row[i].seconds);
        if (strcmp(row[i].name, logits)) continue;
        heads++;
        CHECK(row[i].calls == 1 && row[i].bytes == 13 * 2 * 2048 + 200 * 4, "%s: %d calls, %g bytes", logits,
              row[i].calls, row[i].bytes);
    }
    CHECK(heads == 1, "%s: %d rows", logits, heads);
}

static void test_cuda_profile(void) {
    static const char *const few[] = {"k_embed",    "k_add_norm",  "k_few_sum",   "k_few_glu", "k_rope_gqa",
                                      "k_rope_mla", "attn_kernel", "k_route_few", NULL},
                             *const many[] = {"k_embed",     "k_add_norm",     "k_few_sum",
                                              "gemm_kernel", "k_rope_gqa",     "k_rope_mla",
                                              "attn_kernel", "k_route_logits", "k_route_many",
                                              "k_sort",      "k_tiles",        "k_combine",
                                              NULL};
    static const int calls[2][2][12] = {{{1, 6, 11, 2, 2, 0, 2, 2}, {1, 6, 1, 12, 2, 0, 2, 2, 2, 2, 2, 2}},
                                        {{1, 11, 22, 3, 0, 3, 3, 2}, {1, 11, 1, 28, 0, 3, 3, 2, 2, 2, 2, 2}}};
    struct engine e;
    struct settings set;
    for (int which = 0; which < 2; which++) {
        if (!tiny_open(&e, &set, which)) return;
        float *before = twin_buffer((size_t)e.model.n_vocab);
        session_decode(&e.session, 5);
        memcpy(before, e.session.logits, (size_t)e.model.n_vocab * sizeof *before);
        profile_check(&e, 1, few, calls[which][0]);
        profile_check(&e, 40, many, calls[which][1]);
        e.session.n_past = 0;
        session_decode(&e.session, 5);
        CHECK(!memcmp(before, e.session.logits, (size_t)e.model.n_vocab * sizeof *before),
              "%s: other logits behind a profile", e.model.name);
        free(before);
        engine_close(&e);
    }
}

/* mode_bench with what it prints; both are stb_ds strings. */
static int bench_output(struct engine *e, char **out, char **said) {
    char path[2][128], err[ERR_MAX];
    int old[2], rc;
    fflush(stdout), fflush(stderr);
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s/bench%d", test_dir(), i);
        int fd = open(path[i], O_CREAT | O_TRUNC | O_WRONLY, 0600);
        old[i] = dup(1 + i), dup2(fd, 1 + i), close(fd);
    }
    rc = mode_bench(e);
    fflush(stdout), fflush(stderr);
    for (int i = 0; i < 2; i++) {
        dup2(old[i], 1 + i), close(old[i]);
        CHECK(read_file(path[i], i ? said : out, err) == 0, "%s", err);
    }
    return rc;
}

static int count_of(const char *text, const char *what) {
    int n = 0;
    for (; (text = strstr(text, what)); text++) n++;
    return n;
}

static void test_cuda_bench(void) {
    struct engine e;
    struct settings set;
    char *out = NULL, *said = NULL;
    int depth, n, batch;
    double x[6];
    cuda_test_memory((size_t)256 << 20);
    if (!tiny_open(&e, &set, 1)) return;
    set.profile = true;
    CHECK(bench_output(&e, &out, &said) == 0, "%s", sb_cstr(&said));
    const char *row = strchr(sb_cstr(&out), '\n');
    CHECK(row &&
              sscanf(row, "\n%d,%d,%lf,%lf,%d,%lf,%lf,%lf,%lf", &depth, &n, x, x + 1, &batch, x + 2, x + 3,
                     x + 4, x + 5) == 9 &&
              !depth && n == 64 && batch == 1 && x[1] > 0 && x[5] >= 0,
          "%s", out);
    CHECK(count_of(out, "\n") == 6 && count_of(out, "\n0,,,,") == 4, "%s", out);
    CHECK(count_of(sb_cstr(&said), " kernels per layer, ") == 6 &&
              count_of(said, "through the graph, gap") == 5 && strstr(said, "prefill of 64: ") &&
              strstr(said, "\nk_few_glu 4 of 64x128 fp4 + 2 of 64x128 fp4 "),
          "%s", said);
    arrfree(out), arrfree(said);
    interrupted = 1; /* the row that was begun is not printed */
    CHECK(bench_output(&e, &out, &said) == EXIT_INTERRUPT && count_of(sb_cstr(&out), "\n") == 1, "%s", out);
    interrupted = 0;
    arrfree(out), arrfree(said);
    engine_close(&e);
    cuda_test_memory((size_t)16 << 30);
}

#define TESTS_CUDA                                                                    \
    {"cuda/operations", test_cuda_operations}, {"cuda/invented", test_cuda_invented}, \
        {"cuda/profile", test_cuda_profile}, {"cuda/bench", test_cuda_bench},
