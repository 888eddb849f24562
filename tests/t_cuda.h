/* The CUDA backend against the CPU's operations: operation by operation from the same inputs, and whole models. */

void cuda_test_write(struct rank *r, enum act a, const float *x, int n_tok);
void cuda_test_read(struct rank *r, enum act a, float *x, int n_tok, bool half);
void cuda_test_batch(struct rank *r);

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

#define TESTS_CUDA {"cuda/operations", test_cuda_operations},
