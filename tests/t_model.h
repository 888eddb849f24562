/* Whole models against Hugging Face: the tiny fixtures of every family, the demo model, the fast kernels against the
 * scalar ones, and what a session promises. */

static double nmse(const float *x, const float *ref, size_t n) {
    double e = 0, s = 0;
    for (size_t i = 0; i < n; i++)
        e += ((double)x[i] - (double)ref[i]) * ((double)x[i] - (double)ref[i]), s += (double)ref[i] * (double)ref[i];
    return e / s;
}

/* A session of one rank on the CPU. */
static void session_cpu(struct session *s, const struct model *m, const struct kernels *k, int n_threads, int n_ctx,
                        enum kv_type kv) {
    session_open_cpu(s, m, 1, 1, (struct cpu_options){k, n_threads, n_ctx, kv, false, false, {0}});
}

/* A prompt as --lines computes it: see session_begin_alone. */
static void sync_alone(struct session *s, const int32_t *ids, int n, int cut) {
    char err[ERR_MAX] = "";
    CHECK(!session_begin_alone(s, ids, n, cut, err), "%s", err);
    while (s->n_past < n) CHECK(session_chunk_alone(s, ids, n, cut, err) == SYNC_DONE, "%s", err);
    session_prompt_head(s);
}

/* Saves the state alone. 0, or -1 with a message. */
static int state_save(struct session *s, const char *path, char *err) {
    return session_save(s, path, err) || temp_commit(err) ? -1 : 0;
}

#define FIXTURES "build/fixtures/" /* of these, which make has converted: NAME.gguf */

/* Loads what tests/fixtures/NAME became. */
static bool fixture_load(const char *name, struct model *m) {
    char path[256], err[ERR_MAX];
    snprintf(path, sizeof path, FIXTURES "%s.gguf", name);
    return CHECK(model_load(m, path, err) == 0, "%s (make %s)", err, path);
}

static void *slurp(const char *path, size_t *n) {
    char *sb = NULL, err[ERR_MAX];
    if (!CHECK(read_file(path, &sb, err) == 0, "%s", err)) return NULL;
    *n = arrlenu(sb);
    return sb;
}

struct collect {
    float *out;
    int n_vocab;
};

static void collect_row(void *ctx, int pos, const float *logits) {
    struct collect *c = ctx;
    memcpy(c->out + (size_t)pos * (size_t)c->n_vocab, logits, (size_t)c->n_vocab * sizeof *logits);
}

/* Logits of all positions, (n, n_vocab), malloc'ed. */
static float *all_logits(const struct model *m, const struct kernels *k, enum kv_type kv, int threads,
                         const int32_t *ids, int n) {
    struct session s;
    char err[ERR_MAX] = "";
    struct collect c = {xmalloc((size_t)n * (size_t)m->n_vocab * sizeof(float)), m->n_vocab};
    session_cpu(&s, m, k, threads, n, kv);
    CHECK(session_score(&s, ids, n, collect_row, &c, err) == 0, "%s", err);
    session_free(&s);
    return c.out;
}

static void greedy_run(struct session *s, const int32_t *ids, int n, int32_t *out, int n_out) {
    char err[ERR_MAX] = "";
    CHECK(session_sync(s, ids, n, 0, err) == SYNC_DONE, "%s", err);
    for (int i = 0; i < n_out; i++) {
        out[i] = argmax(session_logits(s), s->m->n_vocab);
        if (i + 1 < n_out) session_decode(s, out[i]);
    }
}

/* The experts that a forward chooses: (n_layer, n, n_expert_used), in ascending order. */
static struct {
    const struct ops *plain;
    int32_t *chosen;
    int n;
} routing;

static int compare_id(const void *a, const void *b) {
    return (*(const int32_t *)a > *(const int32_t *)b) - (*(const int32_t *)a < *(const int32_t *)b);
}

static void routing_norm_ffn(struct rank *r, const struct step *s) {
    const size_t k = (size_t)r->m->max.n_expert_used;
    const int il = s->il;
    routing.plain->norm_ffn(r, s);
    for (int t = 0; t < r->n_tok && il < r->m->n_layer && r->m->layers[il].n_expert; t++) {
        int32_t *to = routing.chosen + ((size_t)il * (size_t)routing.n + (size_t)(r->pos + t)) * k;
        memcpy(to, r->cpu->route_id + (size_t)t * k, k * sizeof *to);
        qsort(to, k, sizeof *to, compare_id);
    }
}

/* all_logits of one thread, and the experts chosen (as in `routing`, malloc'ed). */
static float *routed_logits(const struct model *m, const struct kernels *k, const int32_t *ids, int n,
                            int32_t **chosen) {
    struct session s;
    char err[ERR_MAX] = "";
    struct collect c = {xmalloc((size_t)n * (size_t)m->n_vocab * sizeof(float)), m->n_vocab};
    session_cpu(&s, m, k, 1, n, KV_F32);
    struct ops ops = *s.r->ops;
    *chosen = xcalloc((size_t)m->n_layer * (size_t)n * (size_t)m->max.n_expert_used, sizeof **chosen);
    routing.plain = s.r->ops;
    routing.chosen = *chosen;
    routing.n = n;
    ops.norm_ffn = routing_norm_ffn;
    s.r->ops = &ops;
    CHECK(session_score(&s, ids, n, collect_row, &c, err) == 0, "%s", err);
    s.r->ops = routing.plain;
    session_free(&s);
    return c.out;
}

/* The kernels of a set against the scalar ones over n tokens, as far as both choose the same experts in every layer:
 * random routers leave choices so close that rounding decides them, and other experts give other logits altogether. The
 * limit is the power of ten above three times the largest error of the sets for x86-64 over all fixtures: 6.1e-8 for
 * integer activations. */
static void check_kernels(const char *name, const struct model *m, const struct kernels *fast, const int32_t *ids,
                          int n) {
    const size_t k = (size_t)m->max.n_expert_used, vocab = (size_t)m->n_vocab;
    const struct kernels *set[2] = {&kernels_ref, fast};
    int32_t *chosen[2];
    float *x[2];
    int same = 0;
    for (int i = 0; i < 2; i++) x[i] = routed_logits(m, set[i], ids, n, &chosen[i]);
    for (int t = 0; t < n; t++) {
        bool agree = true;
        for (int il = 0; agree && il < m->n_layer; il++) {
            const size_t at = ((size_t)il * (size_t)n + (size_t)t) * k;
            agree = !memcmp(chosen[0] + at, chosen[1] + at, k * sizeof **chosen);
        }
        if (!agree) continue;
        same++;
        const double e = nmse(x[1] + (size_t)t * vocab, x[0] + (size_t)t * vocab, vocab);
        CHECK(e <= 1e-6, "%s, %s: NMSE %.3g at token %d", name, fast->name, e, t);
    }
    CHECK(same >= n * 3 / 4, "%s, %s: the same experts for only %d of %d tokens", name, fast->name, same, n);
    for (int i = 0; i < 2; i++) {
        free(x[i]);
        free(chosen[i]);
    }
}

/* Reads the ids of a fixture and the logits that Hugging Face has for them; returns how many ids. Both are freed with
 * arrfree. */
static int fixture_logits(const char *name, const struct model *m, int32_t **ids, float **logits) {
    char path[256];
    size_t n_ids = 0, n_logits = 0;
    snprintf(path, sizeof path, "tests/fixtures/%s/ids.i32", name);
    *ids = slurp(path, &n_ids);
    snprintf(path, sizeof path, "tests/fixtures/%s/logits.f32", name);
    *logits = slurp(path, &n_logits);
    CHECK(n_ids > 20 * sizeof **ids && n_logits == n_ids * (size_t)m->n_vocab, "%s: the fixture is incomplete", name);
    return (int)(n_ids / sizeof **ids);
}

static void check_fixture(const char *name, const int *experts) {
    struct model m;
    char path[256];
    int32_t *ids;
    float *ref;
    if (!fixture_load(name, &m)) return;
    const int n = fixture_logits(name, &m, &ids, &ref);
    snprintf(path, sizeof path, "tests/fixtures/%s/greedy.json", name);
    json_t *greedy = json_load_file(path, 0, NULL), *list = json_object_get(greedy, "greedy_from_17");
    const int n_greedy = (int)json_array_size(list);
    CHECK(n_greedy > 8, "%s: the fixture is incomplete", name);
    float *x = all_logits(&m, &kernels_ref, KV_F32, 1, ids, n);
    double e = nmse(x, ref, (size_t)n * (size_t)m.n_vocab);
    CHECK(e <= 1e-6, "%s: NMSE %.3g against Hugging Face", name, e);
    free(x);
    for (size_t i = 0; i < sizeof kernel_sets / sizeof *kernel_sets; i++)
        if (kernels_runnable(kernel_sets[i])) check_kernels(name, &m, kernel_sets[i], ids, n);
    struct session s;
    int32_t out[64] = {0};
    session_cpu(&s, &m, &kernels_ref, 1, 64, KV_F32);
    greedy_run(&s, ids, 17, out, n_greedy);
    for (int i = 0; i < n_greedy; i++)
        CHECK(out[i] == json_integer_value(json_array_get(list, (size_t)i)), "%s: greedy token %d is %d", name, i,
              out[i]);
    session_free(&s);
    for (int il = 0; experts && il < m.n_layer; il++) {
        CHECK(m.layers[il].n_expert == experts[il], "%s: layer %d has %d experts", name, il, m.layers[il].n_expert);
        CHECK(!experts[il] || m.layers[il].retained, "%s: layer %d does not say which experts were kept", name, il);
    }
    json_decref(greedy);
    arrfree(ids);
    arrfree(ref);
    model_free(&m);
}

static void test_fixtures_qwen3moe(void) {
    check_fixture("qwen3moe", NULL);
    check_fixture("qwen3moe_nonorm", NULL);
    check_fixture("qwen3moe_nvfp4", NULL);
    check_fixture("qwen3moe_ct", NULL);
}

static void test_fixtures_deepseek(void) {
    check_fixture("deepseek_v3", NULL);
    check_fixture("deepseek_v3_plain", NULL);
    check_fixture("deepseek_v3_mtp", NULL);
    check_fixture("deepseek_v3_fp8", NULL);
    check_fixture("deepseek_v3_nvfp4", NULL);
    check_fixture("kimi_k2", NULL);
}

/* The logits of the MTP layer for all positions but the last, in uneven batches after a forward of as many;
 * malloc'ed. */
static float *prediction_logits(const struct model *m, const struct kernels *k, int tp, const int32_t *ids, int n) {
    static const int batches[] = {1, 3, 17, 2, 16, 5, 40};
    const size_t n_vocab = (size_t)m->n_vocab;
    struct session s;
    float *out = xmalloc((size_t)n * n_vocab * sizeof *out);
    session_open_cpu(&s, m, tp, 1, (struct cpu_options){k, tp, n, KV_F32, false, false, {0}});
    for (int pos = 0, b = 0; pos < n; b++) {
        const int some = int_min(n - pos, batches[b % 7]), from = int_max(pos - 1, 0), to = pos + some - 1;
        session_forward(&s, ids + pos, some);
        if (to > from) session_run(&s, PASS_MTP, ids + from + 1, to - from, from);
        for (int row = 0, rows; row < to - from; row += rows) {
            rows = int_min(to - from - row, LOGIT_ROWS);
            session_head(&s, row, rows);
            for (int i = 0; i < rows; i++)
                memcpy(out + (size_t)(from + row + i) * n_vocab, s.r->ops->read_logits(s.r, i), n_vocab * sizeof *out);
        }
        pos += some;
    }
    session_free(&s);
    return out;
}

/* The first MTP layer of a model against that of Hugging Face. The files are those of a fixture, ids.i32 and
 * predict.f32: row t from the hidden state of t and the token after it, then the rows of further layers. */
static void check_prediction(const char *name, const struct model *m, const char *ids_path, const char *want_path) {
    size_t n_ids = 0, n_want = 0;
    int32_t *ids = slurp(ids_path, &n_ids);
    float *want = slurp(want_path, &n_want);
    const int n = (int)(n_ids / sizeof *ids);
    const size_t count = (size_t)int_max(n - 1, 0) * (size_t)m->n_vocab;
    size_t all = 0;
    for (int i = 0; i < m->n_mtp; i++) all += (size_t)(n - 1 - i) * (size_t)m->n_vocab;
    CHECK(m->n_mtp, "%s: no prediction layer", name);
    if (CHECK(count && n_want == all * sizeof *want, "%s: %zu bytes", want_path, n_want) && m->n_mtp)
        for (int tp = 1; tp <= (m->n_hc ? 4 : 2); tp++) {
            float *ref = prediction_logits(m, &kernels_ref, tp, ids, n);
            float *fast = prediction_logits(m, kernels_choose(), tp, ids, n);
            const double e = nmse(ref, want, count), f = nmse(fast, want, count);
            CHECK(e <= (m->n_hc ? 1e-9 : 1e-6), "%s, --tp %d: NMSE %.3g", name, tp, e);
            CHECK(f <= 1e-3, "%s, --tp %d, fast kernels: NMSE %.3g", name, tp, f);
            free(ref);
            free(fast);
        }
    arrfree(ids);
    arrfree(want);
}

/* Chained drafts against drafts.f32, after three positions: each from the streams that the one before it left. The
 * tokens are those of the prompt. Tokens that were drafted before and taken back leave nothing. Catches rows of the
 * trunk in place of the layer's own, normed or joined ones, other positions in one of the passes, rows that stay. */
static void check_prediction_chain(const char *name) {
    enum { DRAFTS = 4, FROM = 3 };
    struct model m;
    size_t n_ids = 0, n_want = 0;
    char path[256];
    if (!fixture_load(name, &m)) return;
    snprintf(path, sizeof path, "tests/fixtures/%s/ids.i32", name);
    int32_t *ids = slurp(path, &n_ids);
    snprintf(path, sizeof path, "tests/fixtures/%s/drafts.f32", name);
    float *want = slurp(path, &n_want);
    const int from[FROM] = {5, 40, int_min(200, (int)(n_ids / sizeof *ids) - 12)};
    const size_t row = (size_t)m.n_vocab;
    float *got = xcalloc(FROM * DRAFTS * row, sizeof *got);
    if (!CHECK(n_want == FROM * DRAFTS * row * sizeof *want, "%s: %zu bytes", path, n_want)) return;
    for (int tp = 1; tp <= 4; tp++) {
        struct session s;
        session_open_cpu(&s, &m, tp, 1, (struct cpu_options){&kernels_ref, tp, 300, KV_F32, false, false, {0}});
        for (int k = 0; k < FROM; k++) {
            const int t = from[k];
            if (k) session_forward(&s, ids + s.n_past, t - 7 - s.n_past);
            else session_forward(&s, ids, 2);
            session_catch_up(&s, s.n_past - 1, PASS_MTP); /* rows of the other pass */
            for (int wrong = 2; wrong > 0; wrong--) {     /* a round that is taken back, and tokens that are */
                s.tokens[s.n_past] = wrong;
                sessions_draft((struct session *[]){&s}, (int[]){3}, 1);
                session_forward(&s, s.tokens + s.n_past, 3);
                session_truncate(&s, s.n_past - 3);
            }
            session_forward(&s, ids + s.n_past, t + 1 - s.n_past);
            s.tokens[s.n_past] = ids[t + 1];
            session_catch_up(&s, s.n_past, PASS_DRAFT);
            for (int d = 0; d < DRAFTS; d++) {
                if (d) session_run(&s, PASS_DRAFT, ids + t + 1 + d, 1, t + d);
                session_head(&s, s.r->n_tok - 1, 1);
                memcpy(got + (size_t)(k * DRAFTS + d) * row, s.r->ops->read_logits(s.r, 0), row * sizeof *got);
            }
        }
        for (int d = 0; d < FROM * DRAFTS; d++) {
            const double e = nmse(got + (size_t)d * row, want + (size_t)d * row, row);
            CHECK(e <= 1e-9, "%s, --tp %d, draft %d after %d: NMSE %.3g", name, tp, d % DRAFTS, from[d / DRAFTS], e);
        }
        session_free(&s);
    }
    free(got);
    arrfree(ids), arrfree(want);
    model_free(&m);
}

static void test_prediction_chain(void) {
    static const char *const names[] = {"deepseek_v4", "qwen4_exp", "qwen4_exp_nvfp4"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) check_prediction_chain(names[i]);
}

/* The bits of what an MTP layer gives do not depend on the other tokens of a pass of up to 16. Catches a format of
 * activations that is chosen by the number of streams. */
static void check_prediction_batches(const char *name) {
    enum { N = 16 };
    struct model m;
    if (!fixture_load(name, &m)) return;
    const size_t row = (size_t)m.n_vocab;
    float *logits[2] = {xmalloc(N * row * sizeof **logits), xmalloc(N * row * sizeof **logits)};
    int32_t ids[N + 1];
    for (int i = 0; i <= N; i++) ids[i] = (11 + 17 * i) % m.n_vocab;
    for (size_t i = 0; i <= sizeof kernel_sets / sizeof *kernel_sets; i++) {
        const struct kernels *k = i ? kernel_sets[i - 1] : &kernels_ref;
        if (i && !kernels_runnable(k)) continue;
        for (int whole = 0; whole < 2; whole++) {
            struct session s;
            const int n = whole ? N : 1;
            session_cpu(&s, &m, k, 2, 32, KV_BF16);
            session_forward(&s, ids, N + 1);
            for (int at = 0; at < N; at += n) {
                session_run(&s, PASS_MTP, ids + at + 1, n, at);
                session_head(&s, 0, n);
                for (int t = 0; t < n; t++)
                    memcpy(logits[whole] + (size_t)(at + t) * row, s.r->ops->read_logits(s.r, t),
                           row * sizeof **logits);
            }
            session_free(&s);
        }
        CHECK(!memcmp(logits[0], logits[1], N * row * sizeof **logits), "%s, %s: other bits in a batch", name, k->name);
    }
    for (int i = 0; i < 2; i++) free(logits[i]);
    model_free(&m);
}

static void test_prediction_batches(void) {
    check_prediction_batches("deepseek_v4");
    check_prediction_batches("qwen4_exp");
}

static bool demo_load(struct model *m) {
    char err[ERR_MAX];
    return CHECK(model_load(m, "build/demo.gguf", err) == 0, "%s", err);
}

static void test_prediction(void) {
    static const char *const names[] = {"deepseek_v3_plain",
                                        "deepseek_v3_mtp",
                                        "hy_v3",
                                        "qwen3_5_moe",
                                        "qwen3_5_moe_nvfp4",
                                        "qwen3_next",
                                        "qwen3_next_fp8",
                                        "glm4_moe",
                                        "glm4_moe_air",
                                        "glm4_moe_lite",
                                        "step3p7",
                                        "mimo_v2_flash_fp8",
                                        "deepseek_v32",
                                        "deepseek_v32_fp8",
                                        "glm_moe_dsa",
                                        "glm_moe_dsa_types",
                                        "deepseek_v4",
                                        "qwen3_5",
                                        "qwen3_5_nvfp4",
                                        "bailing_hybrid",
                                        "nemotron_h",
                                        "glm5_next",
                                        "qwen4_exp",
                                        "qwen4_exp_nvfp4",
                                        "bailing_moe_v2",
                                        "hy_v4"};
    struct model m;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char ids[256], want[256];
        if (!fixture_load(names[i], &m)) continue;
        snprintf(ids, sizeof ids, "tests/fixtures/%s/ids.i32", names[i]);
        snprintf(want, sizeof want, "tests/fixtures/%s/predict.f32", names[i]);
        check_prediction(names[i], &m, ids, want);
        model_free(&m);
    }
    if (!demo_load(&m)) return;
    check_prediction("demo", &m, "tests/golden/demo/predict_ids.i32", "tests/golden/demo/predict.f32");
    model_free(&m);
}

static void test_fixtures_hy3(void) {
    check_fixture("hy_v3", NULL);
    check_fixture("hy_v3_nvfp4", NULL);
}

static void test_fixtures_glm4(void) {
    check_fixture("glm4_moe", NULL);
    check_fixture("glm4_moe_air", NULL);
    check_fixture("glm4_moe_lite", NULL);
    check_fixture("glm4_moe_lite_nvfp4", NULL);
}

static void test_fixtures_dots1(void) {
    check_fixture("dots1", NULL);
    check_fixture("dots1_nvfp4", NULL);
}

static void test_fixtures_windows(void) {
    check_fixture("exaone_moe", NULL);
    check_fixture("exaone_moe_nvfp4", NULL);
    check_fixture("afmoe", NULL);
    check_fixture("afmoe_nvfp4", NULL);
}

static void test_fixtures_qwen3_vl(void) {
    check_fixture("qwen3_vl_moe", NULL);
    check_fixture("qwen3_vl_moe_nvfp4", NULL);
}

static void test_fixtures_mellum(void) {
    check_fixture("mellum", NULL);
    check_fixture("mellum_nvfp4", NULL);
}

static void test_fixtures_deepseek_v2(void) {
    check_fixture("deepseek_v2", NULL);
    check_fixture("deepseek_v2_nvfp4", NULL);
    check_fixture("deepseek_moe", NULL);
    check_fixture("deepseek_moe_nvfp4", NULL);
}

static void test_fixtures_ling1(void) {
    check_fixture("bailing_moe", NULL);
    check_fixture("bailing_moe_nvfp4", NULL);
}

static void test_fixtures_solar(void) {
    check_fixture("solar_open", NULL);
    check_fixture("solar_open_nvfp4", NULL);
}

static void test_fixtures_granite_swa(void) {
    check_fixture("granitemoe_swa", NULL);
    check_fixture("granitemoe_swa_nvfp4", NULL);
}

static void test_fixtures_factors(void) {
    check_fixture("granitemoe", NULL);
    check_fixture("granitemoeshared_nvfp4", NULL);
    check_fixture("granitemoehybrid", NULL);
    check_fixture("granitemoehybrid_nvfp4", NULL);
    check_fixture("granitemoehybrid_dense", NULL);
    check_fixture("granitemoehybrid_rope", NULL);
}

static void test_fixtures_means(void) {
    check_fixture("cohere2_moe", NULL);
    check_fixture("cohere2_moe_nvfp4", NULL);
    check_fixture("dbrx", NULL);
    check_fixture("dbrx_nvfp4", NULL);
    check_fixture("phimoe", NULL);
    check_fixture("phimoe_nvfp4", NULL);
}

static void test_fixtures_hunyuan(void) {
    check_fixture("hunyuan_v1_moe", NULL);
    check_fixture("hunyuan_v1_moe_nvfp4", NULL);
}

/* Prompts longer than the indexers' choice. */
static void test_fixtures_hy4(void) {
    check_fixture("hy_v4", NULL);
    check_fixture("hy_v4_nvfp4", NULL);
}

/* Prompts longer than the indexers' choice and than windows. */
static void test_fixtures_dots3(void) {
    check_fixture("dots3_note", NULL);
    check_fixture("dots3_note_nvfp4", NULL);
}

/* Prompts of more than a chunk; layers of blocks that are full, and one that is begun. */
static void test_fixtures_kimi_k3(void) {
    check_fixture("kimi_k3", NULL);
    check_fixture("kimi_k3_nvfp4", NULL);
}

static void test_fixtures_ling(void) {
    check_fixture("bailing_moe_v2", NULL);
    check_fixture("sarvam_moe_nvfp4", NULL);
}

/* A file that names no router, as llama.cpp's converter makes of GLM-4.7-Flash. */
static void test_unnamed_router(void) {
    static const char name[] = "expert_gating_func";
    struct model m;
    char path[256], err[ERR_MAX];
    size_t n = 0;
    char *file = slurp(FIXTURES "glm4_moe_lite.gguf", &n), *key = file ? memmem(file, n, name, strlen(name)) : NULL;
    if (!CHECK(key, "there is no '%s'", name)) return;
    key[0] = 'E';
    snprintf(path, sizeof path, "%s/unnamed.gguf", test_dir());
    write_test_file(path, file, n);
    if (CHECK(model_load(&m, path, err) == 0, "%s", err)) {
        CHECK(m.gating == GATING_SIGMOID, "router %d", m.gating);
        model_free(&m);
    }
    arrfree(file);
}

/* Whether the feed-forward is silu(min(gate, limit)) * clamp(up, -limit, limit). */
static bool glu_is_clamped(const struct glu *a, float limit) {
    return a->gate_max == limit && a->up_max == limit && a->alpha == 1 && a->factor == 1 && a->offset == 0 &&
           a->gate_cap == 0 && a->up_cap == 0 && !a->gelu;
}

/* Every layer has the limits of its own entries, the shared expert others than the experts. */
static void test_clamps(void) {
    static const char *const keys[] = {"deepseek4.swiglu_clamp_exp", "deepseek4.swiglu_clamp_shexp"};
    struct model m;
    char path[256], err[ERR_MAX];
    size_t n = 0;
    if (!fixture_load("deepseek_v4", &m)) return;
    const int blocks = model_blocks(&m);
    model_free(&m);
    char *file = slurp(FIXTURES "deepseek_v4.gguf", &n);
    for (int k = 0; k < 2; k++) {
        char *key = file ? memmem(file, n, keys[k], strlen(keys[k])) : NULL;
        if (!CHECK(key, "there is no '%s'", keys[k])) return;
        key += strlen(keys[k]) + 4 + 4 + 8; /* after the types of an array and of its numbers, and their count */
        for (int il = 0; il < blocks; il++) memcpy(key + 4 * il, &(float){(float)(2 + il + 20 * k)}, 4);
    }
    snprintf(path, sizeof path, "%s/clamps.gguf", test_dir());
    write_test_file(path, file, n);
    arrfree(file);
    if (!CHECK(model_load(&m, path, err) == 0, "%s", err)) return;
    for (int il = 0; il < blocks; il++) {
        const struct layer *y = &m.layers[il];
        CHECK(glu_is_clamped(&y->glu, (float)(2 + il)) && glu_is_clamped(&y->sh_glu, (float)(22 + il)),
              "layer %d: limits %g and %g", il, (double)y->glu.gate_max, (double)y->sh_glu.gate_max);
    }
    model_free(&m);
}

/* Matrices that a file holds as one below the other, with one scale: each has it. */
static void test_groups(void) {
    enum { IN = 4, OUT = 2, GROUPS = 3 };
    const uint64_t ne[2] = {IN, OUT * GROUPS}, one[1] = {1};
    struct gguf_writer w = {0};
    struct gguf g;
    struct model m = {0};
    struct weight x = {0};
    bool used[2] = {false};
    char err[ERR_MAX] = "";
    size_t n = 0;
    gguf_add_tensor(&w, "x.weight", GGUF_F32, 2, ne);
    gguf_add_tensor(&w, "x.scale", GGUF_F32, 1, one);
    uint8_t *h = gguf_header(&w, &n);
    h = xrealloc(h, n + 128); /* tensors begin at multiples of 32 */
    memset(h + n, 0, 128);
    memcpy(h + n + 96, &(float){0.25f}, 4);
    struct loader l = {.m = &m, .g = &g, .arch = "a", .used = used, .err = err};
    if (CHECK(gguf_parse(&g, h, n + 128, err, ERR_MAX) == 0, "%s", err)) {
        loader_groups(&l, &x, IN, OUT, GROUPS, "x");
        CHECK(!l.failed && x.n_in == IN && x.n_out == OUT && x.n_expert == GROUPS && x.expert_bytes == IN * OUT * 4,
              "%s: %d matrices (%d, %d) of %zu bytes", err, x.n_expert, x.n_out, x.n_in, x.expert_bytes);
        for (int i = 0; i < GROUPS && x.scale; i++) CHECK(x.scale[i] == 0.25f, "scale %d: %g", i, (double)x.scale[i]);
        CHECK(x.scale && used[0] && used[1], "the scale is not bound");
        model_free(&m);
        gguf_close(&g);
    }
    gguf_writer_free(&w);
    free(h);
}

static void test_fixtures_qwen35(void) {
    check_fixture("qwen3_5_moe", NULL);
    check_fixture("qwen3_5_moe_text", NULL);
    check_fixture("qwen3_5_moe_nvfp4", NULL);
}

static void test_fixtures_qwen3next(void) {
    check_fixture("qwen3_next", NULL);
    check_fixture("qwen3_next_fp8", NULL);
}

/* Prompts longer than the indexer's choice, with the end of a text inside: other n-grams, a row of the table, a tap, a
 * block of keys or a stream that is read otherwise has an NMSE of 1e-4 or more. */
static void test_fixtures_qwen4(void) {
    check_fixture("qwen4_exp", NULL);
    check_fixture("qwen4_exp_nvfp4", NULL);
}

static void test_fixtures_kda(void) {
    check_fixture("kimi_linear", NULL);
    check_fixture("kimi_linear_nvfp4", NULL);
    check_fixture("bailing_hybrid", NULL);
    check_fixture("bailing_hybrid_ct", NULL);
}

/* Prompts in which pools of keys are left out: a wrong choice has an NMSE of 2e-2 or more. */
static void test_fixtures_glm5_next(void) {
    check_fixture("glm5_next", NULL);
    check_fixture("glm5_next_nvfp4", NULL);
}

static void test_fixtures_nemotron(void) {
    check_fixture("nemotron_h", NULL);
    check_fixture("nemotron_h_nvfp4", NULL);
    check_fixture("nemotron_h_dense", NULL);
}

static void test_fixtures_lfm2(void) {
    check_fixture("lfm2_moe", NULL);
    check_fixture("lfm2_moe_nvfp4", NULL);
}

/* Experts of a layer after one with experts would read nothing that the file says. */
static void test_fixtures_longcat(void) {
    struct model m;
    char path[256], err[ERR_MAX] = "";
    size_t n;
    check_fixture("longcat_flash", NULL);
    check_fixture("longcat_flash_nvfp4", NULL);
    char *file = slurp(FIXTURES "longcat_flash.gguf", &n), *name = file;
    if (!file) return;
    while (name && memcmp(name, "blk.3.ffn_gate_inp", 18)) name = memchr(name + 1, 'b', (size_t)(file + n - name) - 19);
    if (CHECK(name, "no router in layer 3")) name[4] = '2';
    snprintf(path, sizeof path, "%s/renamed.gguf", test_dir());
    FILE *f = fopen(path, "wb");
    if (!CHECK(f && fwrite(file, 1, n, f) == n && !fclose(f), "%s", path)) return;
    CHECK(model_load(&m, path, err) && strstr(err, "layer 2 has experts, expected a layer without experts before it"),
          "%s", err);
    arrfree(file);
}

static void test_fixtures_arctic(void) {
    check_fixture("arctic", NULL);
    check_fixture("arctic_nvfp4", NULL);
}

static void test_fixtures_maple(void) {
    check_fixture("maple", NULL);
    check_fixture("maple_nvfp4", NULL);
}

static void test_fixtures_smallthinker(void) {
    check_fixture("smallthinker", NULL);
    check_fixture("smallthinker_nvfp4", NULL);
}

static void test_fixtures_llama4(void) {
    check_fixture("llama4", NULL);
    check_fixture("llama4_nvfp4", NULL);
}

static void test_fixtures_inkling2(void) {
    check_fixture("inkling2_loop", NULL);
    check_fixture("inkling2_nvfp4", NULL);
}

static void test_fixtures_gpt_oss(void) {
    check_fixture("gpt_oss", NULL);
    check_fixture("gpt_oss_bf16", NULL);
}

static void test_fixtures_minimax(void) {
    check_fixture("minimax_m2", NULL);
    check_fixture("minimax_m2_fp8", NULL);
    check_fixture("minimax_m3", NULL);
    check_fixture("minimax_m3_nvfp4", NULL);
}

static void test_fixtures_classics(void) {
    check_fixture("mixtral", NULL);
    check_fixture("mixtral_nvfp4", NULL);
    check_fixture("olmoe", NULL);
    check_fixture("olmoe_norm", NULL);
    check_fixture("qwen2_moe", NULL);
    check_fixture("qwen2_moe_dense", NULL);
    check_fixture("ernie4_5_moe", NULL);
    check_fixture("ernie4_5_moe_each", NULL);
}

static void test_fixtures_dense(void) {
    check_fixture("qwen3", NULL);
    check_fixture("qwen3_nvfp4", NULL);
    check_fixture("qwen3_5", NULL);
    check_fixture("qwen3_5_nvfp4", NULL);
    check_fixture("llama", NULL);
    check_fixture("mistral", NULL);
    check_fixture("qwen2", NULL);
    check_fixture("qwen2_nvfp4", NULL);
    check_fixture("glm4", NULL);
    check_fixture("glm4_nvfp4", NULL);
}

static void test_fixtures_gemma4(void) {
    check_fixture("gemma4", NULL);
    check_fixture("gemma4_nvfp4", NULL);
    check_fixture("gemma4_dense", NULL);
}

static void test_fixtures_mistral(void) {
    check_fixture("ministral3", NULL);
    check_fixture("ministral3_nvfp4", NULL);
    check_fixture("mistral4", NULL);
    check_fixture("mistral4_nvfp4", NULL);
}

static void test_fixtures_step3(void) {
    check_fixture("step3p5", NULL);
    check_fixture("step3p7", NULL);
}

static void test_fixtures_laguna(void) {
    check_fixture("laguna", NULL);
    check_fixture("laguna_element", NULL);
}

static void test_fixtures_mimo(void) {
    check_fixture("mimo_v2_flash", NULL);
    check_fixture("mimo_v2_flash_fp8", NULL);
}

/* The positions that an indexer's scores choose, against a sort: equal scores, also of 0 and -0, and of either sign. */
static void test_top_positions(void) {
    enum { MOST = 700 };
    static float score[MOST];
    uint64_t rng = 3;
    for (int turn = 0; turn < 600; turn++) {
        const int n = 2 + (int)(rng_next(&rng) % (MOST - 1)), k = 1 + (int)(rng_next(&rng) % (uint64_t)(n - 1));
        int32_t got[MOST + 1], want[MOST];
        int n_want = 0;
        for (int i = 0; i < n; i++) {
            const int x = (int)(rng_next(&rng) % 2000) - 1000;
            score[i] = turn % 3 == 0   ? (float)x * ldexpf(1, x % 90)
                       : turn % 3 == 1 ? (float)(x / 200)
                                       : (float)(x % 2) * -0.0f;
        }
        for (int i = 0; i < n; i++) { /* those that fewer than k are before */
            int before = 0;
            for (int j = 0; j < n; j++) before += score[j] > score[i] || (score[j] == score[i] && j < i);
            if (before < k) want[n_want++] = i;
        }
        got[k] = -7;
        top_positions(score, n, k, got);
        if (!CHECK(got[k] == -7 && !memcmp(got, want, (size_t)k * sizeof *got), "turn %d: %d of %d", turn, k, n))
            return;
    }
}

/* Keys that a query sees, counted by hand: all, of a window, chosen one by one and in blocks, and compressed ones after a
 * window. */
static void test_keys_seen(void) {
    static const struct {
        struct attn a;
        int pos, want;
    } c[] = {{{0}, 9, 10},
             {{.window = 4}, 9, 4},
             {{.window = 4}, 2, 3},
             {{.top_k = 8, .index_block = 1}, 20, 8},
             {{.top_k = 8, .index_block = 1}, 3, 4},
             {{.top_k = 32, .index_block = 16}, 99, 20}, /* a whole block, and four keys of its own */
             {{.window = 16, .compress_ratio = 4, .top_k = 8}, 300, 24},
             {{.window = 16, .compress_ratio = 4, .top_k = 8}, 3, 5},
             {{.window = 16, .compress_ratio = 4, .top_k = 8}, 22, 21},
             {{.window = 16, .compress_ratio = 128}, 300, 18},
             {{.kv_lora = 64, .compress_ratio = 4, .index_block = 4, .top_k = 8}, 2, 3},
             {{.kv_lora = 64, .compress_ratio = 4, .index_block = 4, .top_k = 8}, 10, 11},
             {{.kv_lora = 64, .compress_ratio = 4, .index_block = 4, .top_k = 8}, 11, 8},
             {{.kv_lora = 64, .compress_ratio = 4, .index_block = 4, .top_k = 8}, 12, 9},
             {{.kv_lora = 64, .compress_ratio = 4, .index_block = 4, .top_k = 8}, 1002, 11},
             {{.top_k = 32, .index_block = 4, .index_means = true}, 99, 32}, /* the last block is complete, */
             {{.top_k = 32, .index_block = 4, .index_means = true}, 97, 34}, /* or has two tokens */
             {{.top_k = 32, .index_block = 4, .index_means = true}, 34, 35},
             {{.top_k = 32, .index_block = 4, .index_means = true}, 35, 32}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) CHECK_INT(keys_seen(&c[i].a, c[i].pos), c[i].want, "case %zu", i);
}

/* Prompts longer than index_topk, so that the choice of keys decides the logits: a wrong one has an NMSE of 1e-2 or
 * more. */
static void test_fixtures_dsa(void) {
    check_fixture("deepseek_v32", NULL);
    check_fixture("deepseek_v32_fp8", NULL);
    check_fixture("glm_moe_dsa", NULL);
    check_fixture("glm_moe_dsa_types", NULL);
}

static void test_fixtures_deepseek4(void) {
    check_fixture("deepseek_v4", NULL);
    check_fixture("deepseek_v4_pro", NULL);
}

/* Prompts longer than the choice of keys and than the blocks that choices are limited to, so that both decide the
 * logits. */
static void test_fixtures_deepseek41(void) {
    check_fixture("deepseek_v41", NULL);
    check_fixture("deepseek_v41_nvfp4", NULL);
}

/* Divided over ranks and stages: heads by whole groups, so that some ranks have none where there are fewer groups than
 * ranks. Catches a rank with another's heads, sinks or columns, and streams or tokens that do not reach a later stage. */
static void test_fixtures_deepseek4_ranks(void) {
    static const char *const names[] = {"deepseek_v4", "deepseek_v4_pro", "deepseek_v41", "deepseek_v41_nvfp4"};
    static const int layouts[][2] = {{2, 1}, {3, 1}, {4, 1}, {1, 2}, {2, 2}, {1, 3}};
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        struct model m;
        int32_t *ids;
        float *ref;
        if (!fixture_load(names[f], &m)) return;
        const int n = fixture_logits(names[f], &m, &ids, &ref);
        const size_t count = (size_t)n * (size_t)m.n_vocab;
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
            struct session s;
            char err[ERR_MAX] = "";
            struct collect c = {xmalloc(count * sizeof(float)), m.n_vocab};
            session_open_cpu(&s, &m, layouts[k][0], layouts[k][1],
                             (struct cpu_options){&kernels_ref, 1, n, KV_F32, false, false, {0}});
            CHECK(session_score(&s, ids, n, collect_row, &c, err) == 0, "%s", err);
            const double e = nmse(c.out, ref, count);
            CHECK(e <= 1e-6, "%s, --tp %d --pp %d: NMSE %.3g", names[f], layouts[k][0], layouts[k][1], e);
            session_free(&s);
            free(c.out);
        }
        arrfree(ids), arrfree(ref);
        model_free(&m);
    }
}

/* Of contexts that an indexer chooses wholly, the bits are those without one. Catches attention over lists where all keys
 * are seen, or over all keys after that. */
static void test_sparse_begins(void) {
    static const struct {
        const char *name;
        int top_k, keys; /* that are chosen; the longest context of which all are seen */
    } c[] = {
        {"deepseek_v32", 16, 16}, {"glm_moe_dsa", 32, 32},     {"minimax_m3", 48, 48}, {"minimax_m3_nvfp4", 96, 96},
        {"glm5_next", 32, 35},    {"glm5_next_nvfp4", 24, 31}, {"hy_v4", 32, 32},      {"hy_v4_nvfp4", 24, 24},
        {"dots3_note", 32, 32}};
    for (size_t f = 0; f < sizeof c / sizeof *c; f++) {
        struct model m;
        char path[256];
        size_t n_ids = 0;
        if (!fixture_load(c[f].name, &m)) return;
        snprintf(path, sizeof path, "tests/fixtures/%s/ids.i32", c[f].name);
        int32_t *ids = slurp(path, &n_ids);
        const int n = (int)(n_ids / 4);
        const size_t row = (size_t)m.n_vocab;
        float *x = all_logits(&m, &kernels_ref, KV_F32, 2, ids, n);
        for (int il = 0; il < model_blocks(&m); il++) {
            struct layer *l = &m.layers[il];
            CHECK(!l->attn.top_k || l->attn.top_k == c[f].top_k, "%s: layer %d chooses %d keys", c[f].name, il,
                  l->attn.top_k);
            l->attn.n_index = l->attn.top_k = 0;
            l->wq_index = l->wk_index = l->w_index = (struct weight){0};
        }
        float *y = all_logits(&m, &kernels_ref, KV_F32, 2, ids, n);
        CHECK(!memcmp(x, y, (size_t)c[f].keys * row * sizeof *x), "%s: other bits where all keys are seen", c[f].name);
        const size_t rest = (size_t)(n - c[f].keys);
        const double e = nmse(x + (size_t)c[f].keys * row, y + (size_t)c[f].keys * row, rest * row);
        CHECK(e > 1e-2, "%s: NMSE %.3g between chosen and all keys", c[f].name, e);
        free(x), free(y);
        arrfree(ids);
        model_free(&m);
    }
}

static void test_fixtures_reap(void) {
    static const int qwen[] = {6, 5, 7}, deepseek[] = {0, 12, 8};
    check_fixture("qwen3moe_reap", qwen);
    check_fixture("deepseek_v3_reap", deepseek);
}

/* ---- the demo model ---- */

/* reference_hf.json: rendered prompt, ids, the eight largest logits, norms of all positions and the greedy
 * continuation. */
static void test_demo_reference(void) {
    struct model m;
    struct session s;
    struct settings set;
    char err[ERR_MAX] = "";
    json_t *all = json_load_file("tests/golden/demo/reference_hf.json", 0, NULL), *x, *v;
    size_t i, k;
    CHECK(json_array_size(all) == 12, "reference_hf.json has %zu prompts", json_array_size(all));
    if (!demo_load(&m)) return;
    settings_init(&set);
    session_cpu(&s, &m, &kernels_ref, 1, 512, KV_F32);
    json_array_foreach(all, i, x) {
        struct chat c;
        struct tpl_text text = {0};
        int32_t *ids = NULL, out[256];
        option_store(&set, option_find("think"), "think",
                     json_is_true(json_object_get(x, "enable_thinking")) ? "on" : "off", err);
        if (!CHECK(chat_init(&c, &set, &m, &s, err) == 0, "%s", err)) break;
        json_array_foreach(json_object_get(x, "messages"), k, v) {
            const char *content = json_string_value(json_object_get(v, "content"));
            chat_push(&c, json_string_value(json_object_get(v, "role")), content, strlen(content));
        }
        CHECK(chat_render(&c, true, &text, err) == 0, "%s", err);
        chat_tokenize(&c, &text, &ids);
        const char *prompt = json_string_value(json_object_get(x, "prompt"));
        CHECK(arrlenu(text.s) == strlen(prompt) && !memcmp(text.s, prompt, strlen(prompt)),
              "prompt %zu is rendered differently", i);
        v = json_object_get(x, "prompt_ids");
        bool same = arrlenu(ids) == json_array_size(v);
        for (k = 0; same && k < arrlenu(ids); k++) same = ids[k] == json_integer_value(json_array_get(v, k));
        CHECK(same, "prompt %zu is tokenized differently", i);
        const size_t n = arrlenu(ids);
        v = json_object_get(x, "greedy_ids"); /* the text, and what follows but for its last token */
        for (k = 0; k + 1 < json_array_size(v); k++) arrput(ids, (int32_t)json_integer_value(json_array_get(v, k)));
        float *l = xmalloc(arrlenu(ids) * (size_t)m.n_vocab * sizeof *l);
        float *last = l + (n - 1) * (size_t)m.n_vocab;
        struct collect logits = {l, m.n_vocab};
        CHECK(session_score(&s, ids, (int)arrlen(ids), collect_row, &logits, err) == 0, "%s", err);
        for (k = 0; k < 8; k++) {
            int64_t id =
                json_integer_value(json_array_get(json_object_get(json_object_get(x, "last_logits_top8"), "ids"), k));
            double want =
                json_number_value(json_array_get(json_object_get(json_object_get(x, "last_logits_top8"), "values"), k));
            int better = 0;
            for (int t = 0; t < m.n_vocab; t++) better += last[t] > last[id];
            CHECK((size_t)better == k && fabs((double)last[id] - want) <= 1e-3,
                  "prompt %zu: logit %zu (id %d) is %.5f at rank %d, expected %.5f", i, k, (int)id, last[id], better,
                  want);
        }
        for (k = 0; k < n; k++) {
            double sum = 0, want = json_number_value(json_array_get(json_object_get(x, "logits_l2_per_position"), k));
            for (int t = 0; t < m.n_vocab; t++)
                sum += (double)l[k * (size_t)m.n_vocab + (size_t)t] * (double)l[k * (size_t)m.n_vocab + (size_t)t];
            CHECK(fabs(sqrt(sum) / want - 1) < 1e-5, "prompt %zu, position %zu: norm %.4f, expected %.4f", i, k,
                  sqrt(sum), want);
        }
        for (k = 0; k < json_array_size(v); k++) out[k] = argmax(last + k * (size_t)m.n_vocab, m.n_vocab);
        if (i % 4 == 0) greedy_run(&s, ids, (int)n, out, (int)json_array_size(v)); /* decodes it */
        for (k = 0; k < json_array_size(v); k++)
            CHECK(out[k] == json_integer_value(json_array_get(v, k)), "prompt %zu: greedy token %zu is %d", i, k,
                  out[k]);
        free(l);
        arrfree(ids);
        text_free(&text);
        chat_free(&c);
    }
    json_decref(all);
    settings_free(&set);
    session_free(&s);
    model_free(&m);
}

static int compare_float_desc(const void *a, const void *b) {
    return (*(const float *)b > *(const float *)a) - (*(const float *)b < *(const float *)a);
}

/* DESIGN level 2: the fast kernels, teacher-forced over 4,096 tokens of the shipped stories, against the scalar ones.
 * */
static void test_demo_fast_path(void) {
    enum { N = 4096, WINDOW = 256 };
    struct model m;
    char *text = NULL, err[ERR_MAX];
    int32_t *ids = NULL;
    double e = 0, s = 0;
    float *per = xmalloc(N * sizeof *per);
    int wrong = 0;
    if (!demo_load(&m) || !CHECK(read_file("prompts/haystack.txt", &text, err) == 0, "%s", err)) return;
    tokenize(m.vocab, text, 40000, NULL, 0, &ids);
    if (!CHECK(arrlen(ids) >= N, "only %td tokens", arrlen(ids))) return;
    for (int at = 0; at < N; at += WINDOW) {
        float *ref = all_logits(&m, &kernels_ref, KV_F32, 1, ids + at, WINDOW),
              *x = all_logits(&m, kernels_choose(), KV_F32, 1, ids + at, WINDOW);
        for (int t = 0; t < WINDOW; t++) {
            const float *a = x + (size_t)t * (size_t)m.n_vocab;
            float *b = ref + (size_t)t * (size_t)m.n_vocab;
            double de = 0, ds = 0;
            for (int i = 0; i < m.n_vocab; i++)
                de += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]), ds += (double)b[i] * (double)b[i];
            e += de, s += ds, per[at + t] = (float)(de / ds);
            int want = argmax(b, m.n_vocab), got = argmax(a, m.n_vocab);
            if (want != got && b[want] - b[got] > 0.5f) wrong++;
        }
        free(ref);
        free(x);
    }
    qsort(per, N, sizeof *per, compare_float_desc);
    CHECK(e / s <= 1e-3, "pooled NMSE %.3g", e / s);
    CHECK(per[N / 2] <= 2e-4f, "median NMSE per position %.3g", per[N / 2]);
    CHECK(wrong == 0, "%d positions choose another token against a margin above 0.5", wrong);
    free(per);
    arrfree(ids);
    arrfree(text);
    model_free(&m);
}

/* ---- session ---- */

static void test_session_threads(void) {
    struct model m;
    int32_t ids[200];
    uint64_t rng = 3;
    if (!demo_load(&m)) return;
    for (int i = 0; i < 200; i++) ids[i] = (int32_t)(rng_next(&rng) % 8000);
    for (int kv = KV_BF16; kv <= KV_F32; kv++) {
        float *a = all_logits(&m, kernels_choose(), (enum kv_type)kv, 1, ids, 200),
              *b = all_logits(&m, kernels_choose(), (enum kv_type)kv, 3, ids, 200);
        CHECK(!memcmp(a, b, 200 * (size_t)m.n_vocab * sizeof *a), "1 and 3 threads differ (cache type %d)", kv);
        free(a), free(b);
    }
    model_free(&m);
}

/* Decoding token by token, with partitions of the context, is the same computation as one prefill. */
static void test_session_decode_equals_prefill(void) {
    struct model m;
    struct session s;
    char err[ERR_MAX] = "";
    int32_t ids[700];
    uint64_t rng = 5;
    if (!demo_load(&m)) return;
    for (int i = 0; i < 700; i++) ids[i] = (int32_t)(rng_next(&rng) % 8000);
    session_cpu(&s, &m, &kernels_ref, 1, 700, KV_F32);
    CHECK(session_sync(&s, ids, 700, 0, err) == SYNC_DONE, "%s", err);
    float *want = xmalloc((size_t)m.n_vocab * sizeof *want);
    memcpy(want, session_logits(&s), (size_t)m.n_vocab * sizeof *want);
    CHECK(session_sync(&s, ids, 690, 0, err) == SYNC_DONE && s.n_past == 690 && s.sync_tokens == 1,
          "a shorter list computed %d tokens", s.sync_tokens);
    for (int i = 690; i < 700; i++) session_decode(&s, ids[i]);
    double e = nmse(session_logits(&s), want, (size_t)m.n_vocab);
    CHECK(e < 1e-9, "NMSE %.3g", e);
    ids[650] = 17;
    CHECK(session_sync(&s, ids, 700, 0, err) == SYNC_DONE && s.sync_tokens == 50,
          "a change at 650 of 700 computed %d tokens", s.sync_tokens);
    CHECK(session_sync(&s, ids, 701, 0, err) == SYNC_FAILED && strstr(err, "the context holds 700"), "701 tokens: %s",
          err);
    ids[3] = -1;
    CHECK(session_sync(&s, ids, 10, 0, err) == SYNC_FAILED, "a negative id was taken");
    free(want);
    session_free(&s);
    model_free(&m);
}

static void test_session_file(void) {
    struct model m;
    struct session s;
    char err[ERR_MAX] = "", path[256];
    int32_t ids[40];
    if (!demo_load(&m)) return;
    for (int i = 0; i < 40; i++) ids[i] = 100 + i;
    snprintf(path, sizeof path, "%s/state.kv", test_dir());
    for (int kv = KV_BF16; kv <= KV_F32; kv++) {
        session_cpu(&s, &m, &kernels_ref, 1, 64, (enum kv_type)kv);
        CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE, "%s", err);
        CHECK(state_save(&s, path, err) == 0, "%s", err);
        session_decode(&s, 7);
        uint32_t want = logit_hash(session_logits(&s), m.n_vocab);
        session_free(&s);
        session_cpu(&s, &m, &kernels_ref, 1, 64, (enum kv_type)kv);
        CHECK(session_load(&s, path, err) == 0 && s.n_past == 40, "%s", err);
        session_decode(&s, 7);
        CHECK(logit_hash(session_logits(&s), m.n_vocab) == want, "a loaded state continues differently (cache type %d)",
              kv);
        session_free(&s);
    }
    struct model other = m;
    other.hash++;
    session_cpu(&s, &other, &kernels_ref, 1, 64, KV_F32);
    CHECK(session_load(&s, path, err) && strstr(err, "another model"), "%s", err);
    session_free(&s);
    session_cpu(&s, &m, &kernels_ref, 1, 64, KV_BF16);
    CHECK(session_load(&s, path, err) && strstr(err, "--kv"), "%s", err);
    session_free(&s);
    session_cpu(&s, &m, &kernels_ref, 1, 20, KV_F32);
    CHECK(session_load(&s, path, err) && strstr(err, "40 tokens"), "%s", err);
    session_free(&s);
    session_cpu(&s, &m, &kernels_ref, 1, 64, KV_F32);
    CHECK(session_load(&s, path, err) == 0 && s.n_past == 40, "%s", err);
    const long ids_at = (long)(sizeof(struct kv_header) + 2 * (size_t)model_blocks(&m) * sizeof(struct kv_tensor));
    for (int at = 1; at < 3; at++) { /* one bit of a token, one of the cache */
        FILE *f = fopen(path, "r+b");
        CHECK(f && !fseek(f, at > 1 ? -5 : ids_at, at > 1 ? SEEK_END : SEEK_SET) && fputc(101, f) == 101 && !fclose(f),
              "%s", strerror(errno));
        CHECK(session_load(&s, path, err) && strstr(err, "checksum") && !s.n_past, "%s", err);
    }
    CHECK(truncate(path, 1000) == 0 && session_load(&s, path, err) && s.n_past == 0, "a cut file was taken");
    CHECK(truncate(path, 3) == 0 && session_load(&s, path, err) && strstr(err, "not a saved state"), "%s", err);
    session_free(&s);
    model_free(&m);
}

/* ---- batches of up to 16 tokens: what a token gives has the bits that it gives alone ---- */

/* Models that together have every operation. For "early MLA" expanded keys and values are cheaper from 7 tokens on. */
/* clang-format off */
static const struct synth batch_shapes[] = {
    {"GQA", "qwen3moe", .keys =
     "block_count=2 embedding_length=128 attention.head_count=16 attention.head_count_kv=2 attention.key_length=8 "
     "expert_count=16 expert_used_count=4 expert_feed_forward_length=64 vocab_size=96 context_length=65536"},
    {"MLA", "deepseek2", .keys =
     "block_count=2 embedding_length=128 attention.head_count=8 attention.head_count_kv=1 attention.q_lora_rank=72 "
     "attention.kv_lora_rank=32 attention.key_length_mla=24 attention.value_length_mla=16 rope.dimension_count=8 "
     "leading_dense_block_count=1 feed_forward_length=192 expert_count=16 expert_used_count=4 "
     "expert_feed_forward_length=64 expert_shared_count=1 expert_group_count=4 expert_group_used_count=2 "
     "expert_gating_func=2 expert_weights_norm=true expert_weights_scale=2.5 vocab_size=96 context_length=65536"},
    {"early MLA", "deepseek2", .keys =
     "block_count=1 embedding_length=128 attention.head_count=3 attention.head_count_kv=1 attention.kv_lora_rank=64 "
     "attention.key_length_mla=14 attention.value_length_mla=6 rope.dimension_count=8 expert_count=8 "
     "expert_used_count=2 expert_feed_forward_length=64 expert_gating_func=2 expert_weights_norm=true vocab_size=96 "
     "context_length=65536"},
    {"tiled delta net", "qwen35moe", .keys =
     "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 attention.key_length=32 "
     "rope.dimension_count=16 ssm.conv_kernel=4 ssm.group_count=2 ssm.time_step_rank=6 ssm.state_size=40 "
     "ssm.inner_size=240 full_attention_interval=2 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 "
     "expert_shared_count=1 vocab_size=96 context_length=65536 rope.freq_base=1e7"},
    {"grouped delta net", "qwen3next", .keys =
     "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=1 attention.key_length=32 "
     "rope.dimension_count=16 ssm.conv_kernel=4 ssm.group_count=2 ssm.time_step_rank=4 ssm.state_size=32 "
     "ssm.inner_size=128 full_attention_interval=2 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 "
     "expert_shared_count=1 vocab_size=96 context_length=65536 rope.freq_base=1e7", .backbone = GGUF_Q8_0},
    {"decay of each key channel", "kimi-linear", .keys =
     "block_count=2 embedding_length=128 attention.head_count=3 attention.head_count_kv=0,1 attention.kv_lora_rank=64 "
     "attention.key_length_mla=24 attention.value_length_mla=16 rope.dimension_count=8 ssm.conv_kernel=3 "
     "kda.head_dim=40 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 expert_shared_count=1 "
     "expert_gating_func=2 vocab_size=96 context_length=65536"},
    {"decay with a bound", "bailingmoe3", .keys =
     "block_count=2 embedding_length=128 attention.head_count=2 attention.head_count_kv=0,1 attention.kv_lora_rank=64 "
     "attention.key_length_mla=40 attention.value_length_mla=16 rope.dimension_count=8 ssm.conv_kernel=4 "
     "kda.head_dim=64 kda.gate_lower_bound=-5 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 "
     "expert_shared_count=1 expert_gating_func=2 vocab_size=96 context_length=65536", .backbone = GGUF_Q8_0},
    {"chosen pools", "glm5-next", .keys =
     "block_count=3 embedding_length=128 attention.head_count=3 attention.head_count_kv=0,1,1 attention.q_lora_rank=72 "
     "attention.kv_lora_rank=64 attention.key_length_mla=24 attention.value_length_mla=16 rope.dimension_count=0 "
     "ssm.conv_kernel=4 kda.head_dim=40 kda.gate_lower_bound=-5 attention.indexer.head_count=3 "
     "attention.indexer.key_length=16 attention.indexer.top_k=210 attention.indexer.kpool=3 hyper_connection.count=3 "
     "leading_dense_block_count=1 feed_forward_length=64 expert_count=16 expert_used_count=4 "
     "expert_feed_forward_length=64 expert_shared_count=1 expert_gating_func=2 vocab_size=96 context_length=65536 "
     "hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=1e-6 swiglu_clamp_exp=10"},
    {"sinks of absorbed queries", "hy_v4", .keys =
     "block_count=2 embedding_length=128 attention.head_count=6 attention.head_count_kv=1 attention.q_lora_rank=72 "
     "attention.kv_lora_rank=64 attention.key_length_mla=40 attention.value_length_mla=16 rope.dimension_count=8 "
     "attention.indexer.head_count=3 attention.indexer.key_length=24 attention.indexer.top_k=300 "
     "hyper_connection.count=3 hyper_connection.epsilon=1e-6 hyper_connection.magnitude=2 leading_dense_block_count=1 "
     "feed_forward_length=64 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 expert_shared_count=1 "
     "expert_gating_func=2 vocab_size=96 context_length=65536 swiglu_clamp_exp=10"},
    {"windows of latents", "dots3note", .keys =
     "block_count=2 embedding_length=128 attention.head_count=6,4 attention.head_count_kv=1 attention.q_lora_rank=72 "
     "attention.kv_lora_rank=64 attention.key_length_mla=40 attention.value_length_mla=16 rope.dimension_count=8 "
     "attention.indexer.head_count=3 attention.indexer.key_length=24 attention.indexer.top_k=300 "
     "attention.kv_lora_rank_swa=96 attention.key_length_mla_swa=24 attention.value_length_mla_swa=32 "
     "attention.sliding_window=700 attention.sliding_window_pattern=0,1 leading_dense_block_count=1 "
     "feed_forward_length=64 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 expert_shared_count=1 "
     "expert_gating_func=2 vocab_size=96 context_length=65536 rope.freq_base_swa=5e4"},
    {"streams of a low rank, n-grams, means of keys", "qwen4exp", .keys =
     "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 attention.key_length=64 "
     "rope.dimension_count=16 ssm.conv_kernel=4 ssm.group_count=2 ssm.time_step_rank=4 ssm.state_size=32 "
     "ssm.inner_size=128 full_attention_interval=2 hyper_connection.count=3 hyper_connection.low_rank=32 "
     "attention.indexer.head_count=5 attention.indexer.key_length=32 attention.indexer.top_k=513 "
     "attention.compress_ratios=0,3 ple.layers=0 ple.ngram_size=3 ple.heads_per_ngram=2 ple.conv_kernel=4 "
     "ple.eos_token_id=5 ple.layer_multipliers=23703573157769,20109073645365,8052911324071 "
     "ple.head_offsets=0,101,204,311 ple.head_vocab_sizes=101,103,107,109 embedding_length_per_layer_input=32 "
     "expert_count=16 expert_used_count=4 expert_feed_forward_length=64 expert_shared_count=1 vocab_size=96 "
     "context_length=65536 rope.freq_base=1e7"},
    /* the window begins in another block of keys during the last run */
    {"window of several splits, sinks, biases", "gpt-oss", .keys =
     "block_count=2 embedding_length=128 attention.head_count=16 attention.head_count_kv=2 attention.key_length=8 "
     "attention.sliding_window=640 attention.sliding_window_pattern=1,0 expert_count=16 expert_used_count=4 "
     "expert_feed_forward_length=64 vocab_size=96 context_length=65536", .qkv_bias = true, .ff_type = GGUF_MXFP4},
    {"gates of heads", "step35", .keys =
     "block_count=3 embedding_length=128 attention.head_count=6,8,8 attention.head_count_kv=2 attention.key_length=16 "
     "attention.sliding_window=70 attention.sliding_window_pattern=0,1,1 leading_dense_block_count=1 "
     "feed_forward_length=64 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 expert_shared_count=1 "
     "expert_weights_norm=true vocab_size=96 context_length=65536", .head_norm = true, .head_gate = true},
    {"wide keys", "mimo2", .keys =
     "block_count=2 embedding_length=128 attention.head_count=8 attention.head_count_kv=1,2 attention.key_length=24 "
     "attention.value_length=16 rope.dimension_count=8 attention.sliding_window=64 "
     "attention.sliding_window_pattern=0,1 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 "
     "vocab_size=96 context_length=65536", .window_sinks = true},
    {"row norms", "minimax-m2", .keys =
     "block_count=2 embedding_length=128 attention.head_count=6 attention.head_count_kv=3 attention.key_length=16 "
     "rope.dimension_count=8 expert_count=16 expert_used_count=4 expert_feed_forward_length=64 vocab_size=96 "
     "context_length=65536"},
    {"chosen keys", "deepseek32", .keys =
     "block_count=2 embedding_length=128 attention.head_count=8 attention.head_count_kv=1 attention.q_lora_rank=72 "
     "attention.kv_lora_rank=32 attention.key_length_mla=24 attention.value_length_mla=16 rope.dimension_count=8 "
     "attention.indexer.head_count=3 attention.indexer.key_length=16 attention.indexer.top_k=200 expert_count=16 "
     "expert_used_count=4 expert_feed_forward_length=64 expert_gating_func=2 expert_weights_norm=true vocab_size=96 "
     "context_length=65536"},
    {"chosen blocks", "minimax-m3", .keys =
     "block_count=2 embedding_length=128 attention.head_count=6 attention.head_count_kv=2 attention.key_length=16 "
     "rope.dimension_count=8 attention.indexer.head_count=2 attention.indexer.key_length=32 "
     "attention.indexer.top_k=24 attention.indexer.block_size=8 attention.indexer.local_blocks=2 "
     "leading_dense_block_count=1 feed_forward_length=64 expert_count=16 expert_used_count=4 "
     "expert_feed_forward_length=64 expert_shared_count=1 vocab_size=96 context_length=65536"},
    /* a compressed key for every token in two layers; chosen keys of several splits in the third one */
    {"compressed keys", "deepseek4", .keys =
     "block_count=3 embedding_length=128 attention.head_count=16 attention.head_count_kv=1 attention.key_length=32 "
     "attention.q_lora_rank=72 rope.dimension_count=8 attention.sliding_window=4 attention.indexer.head_count=3 "
     "attention.indexer.key_length=16 attention.indexer.top_k=300 attention.compress_ratios=1,1,4 "
     "attention.output_group_count=4 attention.output_lora_rank=32 hyper_connection.count=4 hash_layer_count=1 "
     "expert_count=16 expert_used_count=4 expert_feed_forward_length=64 expert_shared_count=1 "
     "expert_weights_scale=1.5 vocab_size=96 context_length=65536" STREAM_KEYS}};
/* clang-format on */

enum {
    BATCH_SHAPES = sizeof batch_shapes / sizeof *batch_shapes,
    BATCH_TOKENS = 20 /* of a run */
};

struct batch_case {
    const char *name;
    const struct model *m;
    const struct kernels *k;
    enum kv_type kv;
    int n_rank, past; /* ranks; tokens before those of the run */
};

/* Fills rows 0..past-1 of the cache tensors with random values from -1 to 1, and makes the timeline as long. */
static void batch_fill(struct session *s, int past) {
    uint64_t rng = 5;
    uint8_t *data = NULL;
    float *scale = NULL;
    session_fake_fill(s, past);
    for (int i = 0; i < s->pg->n * s->m->n_layer * CACHE_USES; i++) {
        struct rank *r = &s->pg->ranks[i / CACHE_USES / s->m->n_layer];
        const struct cache_tensor *p = &r->cache[i / CACHE_USES % s->m->n_layer][i % CACHE_USES];
        const size_t rows = cache_rows_of(p, (size_t)past), n = rows * p->row_bytes;
        if (!p->width) continue;
        arrsetlen(data, n);
        arrsetlen(scale, rows * (size_t)p->n_scale);
        for (size_t j = 0; j < arrlenu(scale); j++) scale[j] = 1 / 448.0f;
        for (size_t j = 0; j < n; j += 4) {
            const uint64_t x = rng_next(&rng);
            const float a = (float)(int32_t)x * 0x1p-31f, b = (float)(int32_t)(x >> 32) * 0x1p-31f;
            const uint16_t two[2] = {bf16_from_f32(a), bf16_from_f32(b)};
            const uint32_t four = (uint32_t)x & 0xf7f7f7f7; /* no NaN */
            memcpy(data + j, p->type == KV_F32 ? (const void *)&a : p->type == KV_BF16 ? (const void *)two : &four, 4);
        }
        r->ops->cache_copy(r, p, 0, rows, data, p->type == KV_FP8 ? scale : NULL, true);
    }
    arrfree(data);
    arrfree(scale);
}

/* Appends the rows that a run left in the cache tensors to *out (stb_ds): those of its tokens; of rings, what a forward still
 * reads; of blocks those that it completed; states as a whole. */
static void batch_state(const struct session *s, int past, uint8_t **out) {
    for (int i = 0; i < s->pg->n * s->m->n_layer * CACHE_USES; i++) {
        struct rank *r = &s->pg->ranks[i / CACHE_USES / s->m->n_layer];
        const struct cache_tensor *p = &r->cache[i / CACHE_USES % s->m->n_layer][i % CACHE_USES];
        const int ratio = p->kind == ROWS_BLOCKS ? p->row_tokens : 1;
        const int from = p->kind == ROWS_RING ? s->n_committed - p->window : p->kind == ROWS_STATE ? 0 : past / ratio;
        const int end = p->kind == ROWS_STATE ? p->n_row : s->n_past / ratio;
        for (int row = int_max(0, from); row < end && p->width; row++) {
            const size_t at = (size_t)(p->kind == ROWS_RING ? row % p->n_row : row);
            float scale[64];
            uint8_t *to = arraddnptr(*out, p->row_bytes);
            r->ops->cache_copy(r, p, at, 1, to, p->type == KV_FP8 ? scale : NULL, false);
            if (p->type != KV_FP8) continue;
            to = arraddnptr(*out, cache_scale_bytes(p));
            memcpy(to, scale, cache_scale_bytes(p));
        }
    }
}

/* Computes BATCH_TOKENS tokens: one by one, or with seed > 0 in random batches. Some of these end in tokens that are taken
 * back, of which some are broken: their embedding is NaN. Fills logits (BATCH_TOKENS, n_vocab) and *state. */
static void batch_run(const struct batch_case *c, uint64_t seed, float *logits, uint8_t **state) {
    struct session s;
    const size_t v = (size_t)c->m->n_vocab;
    const struct cpu_options o = {
        c->k, (seed ? 2 : 1) * c->n_rank, c->past + BATCH_TOKENS + DECODE_MAX_TOKENS, c->kv, false, false, {0}};
    session_open_cpu(&s, c->m, c->n_rank, 1, o);
    batch_fill(&s, c->past);
    for (int at = 0, keep; at < BATCH_TOKENS; at += keep) {
        const int n = seed && at + 1 < BATCH_TOKENS ? 1 + (int)(rng_next(&seed) % DECODE_MAX_TOKENS) : 1;
        int32_t ids[DECODE_MAX_TOKENS];
        keep = seed && rng_next(&seed) % 2 ? 1 + (int)(rng_next(&seed) % (uint64_t)n) : n;
        if (n > 1) keep = int_min(keep, BATCH_TOKENS - 1 - at); /* the last token is alone: it absorbs what lags */
        for (int i = 0; i < n; i++)
            ids[i] = i < keep                   ? (11 + 17 * (at + i)) % ((int)v - 1)
                     : rng_next(&seed) % 4 == 0 ? (int)v - 1
                                                : (int)(rng_next(&seed) % v);
        session_forward(&s, ids, n);
        session_head(&s, 0, n);
        for (int i = 0; i < keep; i++)
            memcpy(logits + (size_t)(at + i) * v, s.r->ops->read_logits(s.r, i), v * sizeof *logits);
        s.n_past = c->past + at + keep; /* as session_decode takes drafts back */
    }
    batch_state(&s, c->past, state);
    session_free(&s);
}

/* Compares the run of one token at a time with batches. */
static void batch_check(const struct batch_case *c) {
    const size_t v = (size_t)c->m->n_vocab;
    float *logits[2];
    uint8_t *state[2] = {NULL, NULL};
    int bad = 0;
    for (int i = 0; i < 2; i++) {
        logits[i] = xcalloc(BATCH_TOKENS * v, sizeof **logits);
        batch_run(c, (uint64_t)i * (uint64_t)(c->past + c->n_rank + 3 * (int)c->kv), logits[i], &state[i]);
    }
    for (size_t i = 0; i < BATCH_TOKENS; i++)
        bad += memcmp(logits[0] + i * v, logits[1] + i * v, v * sizeof **logits) != 0;
    CHECK(isfinite(logits[0][BATCH_TOKENS * v - 1]), "%s: there is nothing to compare", c->name);
    const bool same = arrlenu(state[0]) == arrlenu(state[1]) && !memcmp(state[0], state[1], arrlenu(state[0]));
    CHECK(!bad && same,
          "%s, %s, cache type %d, %d ranks, after %d tokens: %d of %d tokens have other bits in a batch%s", c->name,
          c->k->name, (int)c->kv, c->n_rank, c->past, bad, BATCH_TOKENS, same ? "" : "; other state");
    for (int i = 0; i < 2; i++) {
        free(logits[i]);
        arrfree(state[i]);
    }
}

/* A model on every set of kernels: with every type of cache from the start and around the second split of a context; on
 * the set number `deep`, and on the one that this machine chooses, around the first context whose splits are longer.
 * deep < 0: on none. */
static void batch_model(const char *name, struct model *m, int deep) {
    static const int past[] = {0, SPLIT_KEYS - 4, CPU_SPLITS_MAX * SPLIT_KEYS - 9};
    const size_t bytes = (size_t)m->n_vocab * m->embd.row_bytes;
    uint8_t *embd = xmalloc(bytes); /* its last row is broken */
    memcpy(embd, m->embd.data, bytes);
    memset(embd + bytes - m->embd.row_bytes, 0xff, m->embd.row_bytes);
    m->embd.data = embd;
    for (size_t i = 0; i <= sizeof kernel_sets / sizeof *kernel_sets; i++) {
        const struct kernels *k = i ? kernel_sets[i - 1] : &kernels_ref;
        if (i && !kernels_runnable(k)) continue;
        const int cases = deep >= 0 && (k == kernels_choose() || (int)i == deep) ? 7 : 6;
        for (int j = 0; j < cases; j++) {
            const enum kv_type kv = (enum kv_type)((j < 6 ? j : (int)i + deep) % 3);
            batch_check(&(struct batch_case){name, m, k, kv, 1, past[j / 3]});
        }
        batch_check(&(struct batch_case){name, m, k, KV_FP8, 2, past[1]});
    }
    free(embd);
    model_free(m);
}

/* What speculative decoding relies on. */
static void test_batches(void) {
    struct model m = {0};
    for (int f = 0; f < BATCH_SHAPES; f++) {
        synth_make(&m, &batch_shapes[f], NULL, false);
        batch_model(batch_shapes[f].name, &m, f % (1 + (int)(sizeof kernel_sets / sizeof *kernel_sets)));
    }
    if (fixture_load("hy_v3", &m)) batch_model("hy_v3", &m, -1);               /* experts in BF16 */
    if (fixture_load("glm4_moe_air", &m)) batch_model("glm4_moe_air", &m, -1); /* 3 heads share keys */
}

/* Scales of matrices do not apply to biases: with scales of a sixteenth and sixteenfold scales of blocks all weights
 * stay, and so do the logits. */
static void test_scaled_biases(void) {
    enum { N = 40, BLOCK = 36, SCALES = 4, EXPONENT = 8 }; /* bytes of NVFP4; a power of two in E4M3 */
    /* clang-format off */
    static const struct synth shape = {"scales", "gpt-oss", .keys =
        "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 attention.key_length=16 "
        "attention.sliding_window=30 attention.sliding_window_pattern=1,0 expert_count=8 expert_used_count=2 "
        "expert_feed_forward_length=64 vocab_size=96 context_length=65536", .qkv_bias = true};
    /* clang-format on */
    const struct kernels *const kernels[2] = {&kernels_ref, kernels_choose()};
    struct model m = {0};
    int32_t ids[N];
    float *want[2];
    void *owned[2 * 2 * 3];
    int n_owned = 0;
    synth_make(&m, &shape, NULL, false);
    for (int i = 0; i < N; i++) ids[i] = 7 * i % m.n_vocab;
    for (int i = 0; i < 2; i++) want[i] = all_logits(&m, kernels[i], KV_F32, 2, ids, N);
    for (int il = 0; il < m.n_layer; il++) {
        struct weight *const w[3] = {&m.layers[il].gate, &m.layers[il].up, &m.layers[il].down};
        for (int k = 0; k < 3; k++) {
            const size_t bytes = (size_t)w[k]->n_expert * w[k]->expert_bytes;
            uint8_t *data = owned[n_owned++] = xmalloc(bytes);
            float *scale = owned[n_owned++] = xmalloc((size_t)w[k]->n_expert * sizeof *scale);
            memcpy(data, w[k]->data, bytes);
            for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(data[i] + (i % BLOCK < SCALES ? 4 * EXPONENT : 0));
            for (int e = 0; e < w[k]->n_expert; e++) scale[e] = w[k]->scale[e] / 16;
            CHECK(w[k]->type == GGUF_NVFP4 && w[k]->bias, "there is nothing to compare");
            w[k]->data = data;
            w[k]->scale = scale;
        }
    }
    for (int i = 0; i < 2; i++) {
        float *got = all_logits(&m, kernels[i], KV_F32, 2, ids, N);
        const double e = nmse(got, want[i], (size_t)N * (size_t)m.n_vocab);
        CHECK(e < 1e-12, "%s: NMSE %.3g", kernels[i]->name, e);
        free(got);
        free(want[i]);
    }
    model_free(&m);
    for (int i = 0; i < n_owned; i++) free(owned[i]);
}

/* ---- the contract of the operations: the same number of tokens enqueues the same list of operations ---- */

/* Every operation that is called, with its arguments, as one hash. */
static struct {
    int n;
    uint32_t hash;
    uint64_t seen; /* bits: the operations by their place in OPS, see enum log_op */
} op_log;

static const struct ops *op_real;

enum log_op {
#define OP_NUMBER(type, name, params, args) LOG_##name,
    OPS(OP_NUMBER)
#undef OP_NUMBER
        LOG_COUNT
};
static_assert(LOG_COUNT <= 64, "op_log.seen has a bit for every operation");

static void note_add(uintptr_t x) { op_log.hash = (op_log.hash ^ (uint32_t)(x ^ x >> 32)) * 0x01000193u; }

/* What an argument adds to the hash, by its type; a type that is not listed does not compile. Token ids, draws and
 * results are data, which may differ. */
static void note_rank(struct rank *r) { (void)r; }
static void note_int(int x) { note_add((uintptr_t)x); }
static void note_bool(bool x) { note_add(x); }
static void note_size(size_t x) { note_add(x); }
static void note_floats(const float *w) { note_add((uintptr_t)w); }
static void note_weight(const struct weight *w) { note_add((uintptr_t)w); }
static void note_step(const struct step *s) {
    for (size_t i = 0; i < sizeof *s; i++) note_add(((const unsigned char *)s)[i]);
}
static void note_cache(const struct cache_tensor *p) { note_add((uintptr_t)p); }
static void note_sampling(const struct sampling *o) { (void)o; }
static void note_ids(const int32_t *ids) { (void)ids; }
static void note_draws(const double *x) { (void)x; }
static void note_out(void *p) { (void)p; }
static void note_call(void (*body)(void *)) { (void)body; }
/* clang-format off */
#define LOG_NOTE(x)                              \
    _Generic((x),                                \
        struct rank *: note_rank,                \
        int: note_int,                           \
        bool: note_bool,                         \
        size_t: note_size,                       \
        const double *: note_draws,              \
        const float *: note_floats,              \
        const struct weight *: note_weight,      \
        const struct step *: note_step,          \
        const struct cache_tensor *: note_cache, \
        const struct sampling *: note_sampling,  \
        const int32_t *: note_ids,               \
        bool *: note_out,                        \
        char *: note_out,                        \
        int32_t *: note_out,                     \
        uint8_t *: note_out,                     \
        float *: note_out,                       \
        double *: note_out,                      \
        void *: note_out,                        \
        struct profile_row *: note_out,          \
        struct expert_counts *: note_out,        \
        void (*)(void *): note_call)(x)
/* clang-format on */
#define LOG_NOTE_1(a) LOG_NOTE(a)
#define LOG_NOTE_2(a, ...) \
    LOG_NOTE(a);           \
    LOG_NOTE_1(__VA_ARGS__)
#define LOG_NOTE_3(a, ...) \
    LOG_NOTE(a);           \
    LOG_NOTE_2(__VA_ARGS__)
#define LOG_NOTE_4(a, ...) \
    LOG_NOTE(a);           \
    LOG_NOTE_3(__VA_ARGS__)
#define LOG_NOTE_5(a, ...) \
    LOG_NOTE(a);           \
    LOG_NOTE_4(__VA_ARGS__)
#define LOG_NOTE_6(a, ...) \
    LOG_NOTE(a);           \
    LOG_NOTE_5(__VA_ARGS__)
#define LOG_NOTE_7(a, ...) \
    LOG_NOTE(a);           \
    LOG_NOTE_6(__VA_ARGS__)
#define LOG_NOTES(a, b, c, d, e, f, g, n, ...) LOG_NOTE_##n
#define LOG_NOTE_ALL(...)                      LOG_NOTES(__VA_ARGS__, 7, 6, 5, 4, 3, 2, 1, 0)(__VA_ARGS__)

#define OP_LOG(type, name, params, args)   \
    static type log_##name params {        \
        op_log.n++;                        \
        op_log.seen |= 1ull << LOG_##name; \
        note_add(LOG_##name);              \
        LOG_NOTE_ALL args;                 \
        return op_real->name args;         \
    }
OPS(OP_LOG)
#undef OP_LOG

static const struct ops log_ops = {
#define OP_LOGGED(type, name, params, args) .name = log_##name,
    OPS(OP_LOGGED)
#undef OP_LOGGED
};

static void test_ops_replay(void) {
    static const char *const names[] = {"qwen3moe",    "deepseek_v3", "deepseek_v3_mtp",
                                        "deepseek_v4", "qwen4_exp",   "deepseek_v41"};
    static const int buckets[] = {1, 5, 16, 40};
    enum { NAMES = sizeof names / sizeof *names };
    const uint64_t both =
        1ull << LOG_forward | 1ull << LOG_embed | 1ull << LOG_linear | 1ull << LOG_norm_ffn | 1ull << LOG_logits;
    for (int f = 0; f < NAMES; f++) {
        struct model m;
        struct session s;
        uint64_t want = both, seen = 0;
        if (!f) want |= 1ull << LOG_attention;
        if (!fixture_load(names[f], &m)) return;
        if (m.hc_low)
            want |= 1ull << LOG_streams_norm | 1ull << LOG_streams_read | 1ull << LOG_ngrams | 1ull << LOG_ngrams_add |
                    1ull << LOG_delta_net | 1ull << LOG_attention | 1ull << LOG_select_keys;
        else want |= 1ull << LOG_last_reduce;
        if (m.n_hc && !m.hc_low)
            want |=
                1ull << LOG_csa_store | 1ull << LOG_select_keys | 1ull << LOG_csa_attention | 1ull << LOG_group_linear;
        if (m.family->lagging_streams)
            want |= 1ull << LOG_pool_keys | 1ull << LOG_streams_norm | 1ull << LOG_ngrams | 1ull << LOG_ngrams_add;
        else if (f && !m.n_hc) want |= 1ull << LOG_mla_attention;
        if (m.n_mtp) want |= 1ull << LOG_mtp_input | 1ull << LOG_keep_hidden;
        if (m.n_mtp && m.n_hc) want |= 1ull << LOG_hc_linear;
        session_cpu(&s, &m, &kernels_ref, 1, 256, KV_F32);
        op_real = s.r->ops;
        s.r->ops = &log_ops;
        for (size_t b = 0; b < sizeof buckets / sizeof *buckets; b++) {
            uint32_t hash = 0;
            int n = 0;
            for (int i = 0; i < 3; i++) { /* other tokens and positions, the same bucket */
                int32_t ids[40];
                for (int k = 0; k < buckets[b]; k++) ids[k] = (7 * k + 31 * i + 1) % m.n_vocab;
                memset(&op_log, 0, sizeof op_log);
                session_forward(&s, ids, buckets[b]);
                session_head(&s, buckets[b] - 1, 1);
                for (enum pass p = PASS_MTP; m.n_mtp && p < PASSES; p++)
                    session_run(&s, p, ids, buckets[b], s.n_past - buckets[b]);
                if (!i) hash = op_log.hash, n = op_log.n;
                CHECK(op_log.hash == hash && op_log.n == n && n > 10,
                      "%s, %d tokens: replay %d of %d operations differs", names[f], buckets[b], i, n);
                seen |= op_log.seen;
            }
        }
        CHECK(seen == want, "%s: operations %#llx were called, expected %#llx", names[f], (unsigned long long)seen,
              (unsigned long long)want);
        session_free(&s);
        model_free(&m);
    }
}

/* ---- numbers of a model ---- */

/* YaRN frequencies against values computed from the paper's formulas with mpmath. */
static void test_rope_yarn(void) {
    static const struct {
        double base, factor, fast, slow, freq[8];
    } c[] = {
        {1e4, 40, 32, 1, {1, 0.1, 0.0562341325, 0.0390069266, 0.0055, 7.90569415e-4, 2.5e-5, 3.33380358e-6}},
        {5e4,
         32,
         1,
         1,
         {1, 0.0668740305, 0.0340072782, 0.024250967, 0.00447213595, 3.61404677e-5, 9.34592988e-6, 8.76441291e-7}},
        {5e4,
         64,
         1,
         1,
         {1, 0.0668740305, 0.0340072782, 0.024250967, 0.00447213595, 1.80702339e-5, 4.67296494e-6, 4.38220646e-7}}};
    static const int at[8] = {0, 8, 10, 11, 16, 20, 24, 31};
    for (int i = 0; i < 3; i++) {
        struct gguf_writer w = {0};
        struct gguf g;
        struct model m = {.n_ctx_train = 163840};
        struct attn a = {.kv_lora = 512, .head_k = 192};
        char err[ERR_MAX] = "";
        size_t n;
        gguf_put_f32(&w, "a.rope.freq_base", (float)c[i].base);
        gguf_put_str(&w, "a.rope.scaling.type", "yarn", 4);
        gguf_put_f32(&w, "a.rope.scaling.factor", (float)c[i].factor);
        gguf_put_u32(&w, "a.rope.scaling.original_context_length", 4096);
        gguf_put_f32(&w, "a.rope.scaling.yarn_beta_fast", (float)c[i].fast);
        gguf_put_f32(&w, "a.rope.scaling.yarn_beta_slow", (float)c[i].slow);
        gguf_put_f32(&w, "a.rope.scaling.yarn_log_multiplier", 0.1f);
        uint8_t *h = gguf_header(&w, &n);
        CHECK(gguf_parse(&g, h, n, err, ERR_MAX) == 0, "%s", err);
        struct loader l = {.m = &m, .g = &g, .arch = "a", .err = err};
        loader_rope(&l, "rope.freq_base", true, 64, &a);
        for (int k = 0; k < 8; k++)
            CHECK(fabs((double)m.ropes[0].freq[at[k]] / c[i].freq[k] - 1) < 1e-6,
                  "case %d: frequency %d is %.9g, expected %.9g", i, at[k], m.ropes[0].freq[at[k]], c[i].freq[k]);
        double mscale = 0.1 * log(c[i].factor) + 1;
        CHECK(fabs((double)a.scale * sqrt(192.0) / (mscale * mscale) - 1) < 1e-6, "case %d: softmax scale %g", i,
              a.scale);
        model_free(&m);
        gguf_close(&g);
        gguf_writer_free(&w);
        free(h);
    }
}

/* Whatever a saved state depends on changes the hash of its model. */
static void test_model_hash(void) {
    static const struct {
        float base;
        const char *template, *list[2];
        uint64_t ne[2];
        uint8_t last; /* byte of the data */
    } c[] = {{1e4f, "x", {"a", "bc"}, {4, 2}, 1}, {1e6f, "x", {"a", "bc"}, {4, 2}, 1},
             {1e4f, "y", {"a", "bc"}, {4, 2}, 1}, {1e4f, "x", {"ab", "c"}, {4, 2}, 1},
             {1e4f, "x", {"a", "bc"}, {2, 4}, 1}, {1e4f, "x", {"a", "bc"}, {4, 2}, 2}};
    enum { N = sizeof c / sizeof *c, FLOATS = 5000 };
    static const float many[FLOATS] = {1};
    uint64_t hash[2 * N] = {0};
    for (int i = 0; i < 2 * N; i++) { /* each twice, in other memory */
        struct gguf_writer w = {0};
        struct gguf g;
        char err[ERR_MAX] = "";
        size_t n = 0;
        gguf_put_f32(&w, "a.rope.freq_base", c[i % N].base);
        gguf_put_str(&w, "tokenizer.chat_template", c[i % N].template, 1);
        gguf_put_array(&w, "a.list", GGUF_V_STR, 2, NULL);
        for (int k = 0; k < 2; k++) gguf_put_bytes(&w, c[i % N].list[k], strlen(c[i % N].list[k]));
        gguf_put_array(&w, "a.many", GGUF_V_F32, FLOATS, many);
        gguf_add_tensor(&w, "t", GGUF_F32, 2, c[i % N].ne);
        uint8_t *h = gguf_header(&w, &n);
        h = xrealloc(h, n + 32);
        memset(h + n, c[i % N].last, 32);
        if (CHECK(gguf_parse(&g, h, n + 32, err, ERR_MAX) == 0, "%s", err)) hash[i] = model_hash(&g), gguf_close(&g);
        gguf_writer_free(&w);
        free(h);
        for (int k = 0; k < i; k++)
            CHECK((hash[k] == hash[i]) == (k == i - N), "cases %d and %d: %llx and %llx", k, i,
                  (unsigned long long)hash[k], (unsigned long long)hash[i]);
    }
}

static void test_router(void) {
    /* 8 experts in 4 groups, 2 groups kept, 2 chosen: the bias decides who, the sigmoid with what weight */
    struct model m = {.n_group = 4,
                      .n_group_used = 2,
                      .gating = GATING_SIGMOID,
                      .norm_topk_prob = true,
                      .routed_scaling_factor = 2.5f};
    float bias[8] = {0, 0, 0.5f, 0, 0, 0, 0, 0}, logits[8] = {2, -4, 0, 0, 1.5f, 1.5f, 3, -9}, w[2];
    struct layer y = {.n_expert = 8, .n_expert_used = 2, .router_bias = bias};
    int32_t ids[2];
    /* group scores: 0.881+0.018, 1.0+0.5, 2*0.818, 0.953+0.0001: groups 1 and 2 stay, although 6 and 0 score highest
     * alone */
    route_token(&m, &y, NULL, logits, ids, w);
    float a = 0.5f, b = 1 / (1 + expf(-1.5f));
    CHECK(ids[0] == 2 && ids[1] == 4, "chose %d and %d", ids[0], ids[1]);
    CHECK(fabsf(w[0] - 2.5f * a / (a + b)) < 1e-6f && fabsf(w[1] - 2.5f * b / (a + b)) < 1e-6f, "weights %g and %g",
          w[0], w[1]);
    float soft[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    m = (struct model){.n_group = 1, .n_group_used = 1, .gating = GATING_SOFTMAX, .routed_scaling_factor = 1};
    y.router_bias = NULL;
    float best[8] = {3, -9, 2, 2, 2.5f, -9, 1, 1}; /* best experts: groups 0 and 2; the two best: 0 and 1, or 1 and 2 */
    m.n_group = 4, m.n_group_used = 2;
    route_token(&m, &y, NULL, best, ids, w);
    CHECK(ids[0] == 0 && ids[1] == 4, "groups of a softmax chose %d and %d", ids[0], ids[1]);
    m.n_group = m.n_group_used = 1;
    route_token(&m, &y, NULL, soft, ids, w);
    CHECK(ids[0] == 7 && ids[1] == 6 && fabsf(w[0] / w[1] - expf(1)) < 1e-5f && w[0] + w[1] < 0.9f,
          "softmax chose %d %d with %g %g", ids[0], ids[1], w[0], w[1]);
    float plus[8] = {100, -100, 0, 1, 2, 3, 4, 5}; /* the square root of softplus; experts that a table gives */
    const int32_t given[2] = {2, 0};
    m.gating = GATING_SQRT_SOFTPLUS;
    m.routed_scaling_factor = 3;
    route_token(&m, &y, given, plus, ids, w);
    CHECK(ids[0] == 2 && ids[1] == 0 && fabsf(w[0] - 3 * sqrtf(logf(2))) < 1e-5f && fabsf(w[1] - 30) < 1e-5f,
          "a table gives %d %d with %g %g", ids[0], ids[1], w[0], w[1]);
    m.routed_scaling_factor = 1;
    float chosen[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    m.gating = GATING_CHOSEN;
    route_token(&m, &y, NULL, chosen, ids, w);
    CHECK(ids[0] == 7 && ids[1] == 6 && fabsf(w[0] / w[1] - expf(1)) < 1e-5f && fabsf(w[0] + w[1] - 1) < 1e-6f,
          "softmax over the chosen: %d %d with %g %g", ids[0], ids[1], w[0], w[1]);
    float bad[8] = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    route_token(&m, &y, NULL, bad, ids, w);
    CHECK(ids[0] >= 0 && ids[0] < 8 && ids[1] >= 0 && ids[1] < 8, "NaN logits chose %d and %d", ids[0], ids[1]);
}

/* Values of the activations of feed-forwards, of experts and of a shared expert, around their limits. Catches a clamp
 * that is missing, on the wrong side or before the SiLU, and the limit of the other. */
static void test_glu(void) {
    static const float gate[] = {-20, -0.5f, 3, 9}, up[] = {3, -9, 9, 0.25f};
    static const struct {
        struct glu (*glu)(float limit); /* NULL: without limits */
        bool shared;
        float want[4];
    } c[] = {{NULL, false, {-1.2366922e-7f, 1.698933f, 25.719501f, 2.2497224f}},
             {glu_silu_clamp, false, {-8.2446145e-8f, 0.37754067f, 4, 0.5f}},
             {glu_silu_clamp, true, {-1.2366922e-7f, 0.94385167f, 14.288612f, 1.25f}},
             {glu_clamp_silu, false, {-8.2446145e-8f, 0.37754067f, 3.5231883f, 0.44039854f}},
             {glu_clamp_silu, true, {-1.2366922e-7f, 0.94385167f, 14.288612f, 1.2416339f}},
             {glu_oai, false, {0, 0.22441735f, 8.6275484f, 3.0812673f}},
             {glu_oai, true, {0, 0.59844625f, 17.891572f, 6.2487412f}}};
    struct layer y = {.n_ff = 4};
    struct model m = {.layers = &y};
    struct cpu cpu = {.k = &kernels_ref};
    const struct rank r = {.m = &m, .cpu = &cpu};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        const struct ffn_job j = {.gate = c[i].shared ? &y.sh_gate : &y.gate, .up = c[i].shared ? &y.sh_up : &y.up};
        float g[4], u[4];
        memcpy(g, gate, sizeof g);
        memcpy(u, up, sizeof u);
        if (c[i].glu) y.glu = c[i].glu(c[i].glu == glu_oai ? 2.5f : 2), y.sh_glu = c[i].glu(5);
        ffn_glu(&r, 0, &j, 0, g, u, 4);
        for (int k = 0; k < 4; k++)
            CHECK(fabsf(g[k] - c[i].want[k]) < 1e-6f * fmaxf(1, fabsf(c[i].want[k])),
                  "case %zu: %g and %g give %.9g, expected %.9g", i, gate[k], up[k], g[k], c[i].want[k]);
    }
}

/* ---- hyper-connections ---- */

enum { HYPER_STREAMS = 3, HYPER_EMBD = 1100, HYPER_MIX = (2 + HYPER_STREAMS) * HYPER_STREAMS, HYPER_TOKENS = 2 };

/* What hc_coefficients makes of a token's streams, in double: c (HYPER_MIX), or with `head` its first part. */
static void hyper_coefficients(const struct model *m, const struct hyper *hc, bool head, const double *streams,
                               double *c) {
    enum { K = HYPER_STREAMS, N = K * HYPER_EMBD };
    double square = 0, *mix = c + 2 * K;
    for (int i = 0; i < N; i++) square += streams[i] * streams[i];
    for (int i = 0; i < (head ? K : HYPER_MIX); i++) {
        double sum = 0;
        for (int j = 0; j < N; j++) sum += (double)hc->fn[i * N + j] * streams[j];
        c[i] = sum / sqrt(square / N + (double)m->rms_eps) *
                   (double)hc->scale[i < K       ? 0
                                     : i < 2 * K ? 1
                                                 : 2] +
               (double)hc->base[i];
        if (i < 2 * K)
            c[i] = (i < K ? 1 : (double)m->hc_write) / (1 + exp(-c[i])) +
                   (i < K || !m->n_sinkhorn ? (double)m->hc_eps : 0);
        else if (!m->n_sinkhorn) c[i] = (i - 2 * K) % (K + 1) == 0;
    }
    for (int turn = 0; turn < 2 * m->n_sinkhorn && !head; turn++) /* rows at first, then columns, rows, .. */
        for (int i = 0; i < K; i++) {
            const int step = turn % 2 ? K : 1, line = turn % 2 ? i : i * K;
            double sum = turn ? (double)m->hc_eps : 0;
            for (int j = 0; j < K && !turn; j++) mix[line + j] = exp(mix[line + j]);
            for (int j = 0; j < K; j++) sum += mix[line + j * step];
            for (int j = 0; j < K; j++)
                mix[line + j * step] = mix[line + j * step] / sum + (turn ? 0 : (double)m->hc_eps);
        }
}

static void check_near(const char *what, const float *x, const double *want, int n) {
    for (int i = 0; i < n; i++)
        if (!CHECK(fabs((double)x[i] - want[i]) < 1e-4 * fmax(1, fabs(want[i])), "%s, value %d: %g, expected %g", what,
                   i, (double)x[i], want[i]))
            return;
}

/* Streams so wide that threads divide a token's columns, where one rank has the whole delta and where two have a part
 * each: against the formulas. Catches columns of another part, a rank that is left out, streams that are mixed with new
 * ones, and other ends of the iterations. */
static void test_streams(void) {
    enum { K = HYPER_STREAMS, N = HYPER_EMBD, MIX = HYPER_MIX, T = HYPER_TOKENS, PART = 512 };
    static float fn[MIX * K * N], base[MIX], w[N], x[2][T * N], h[2][T * N], out[2][T * N], joined[2][T * K * N],
        streams[2][T * K * N], mix[2][T * (MIX + 1)];
    static double now[T * K * N], sum[N], c[MIX];
    const float scale[3] = {0.03f, 0.04f, 0.05f};
    const struct hyper hc = {.fn = fn, .base = base, .scale = scale};
    uint64_t rng = 4;
    for (int i = 0; i < MIX * K * N; i++) fn[i] = (float)rng_uniform(&rng) - 0.5f;
    for (int i = 0; i < MIX; i++) base[i] = (float)rng_uniform(&rng) - 0.5f;
    for (int i = 0; i < N; i++) w[i] = 1 + (float)rng_uniform(&rng);
    for (int turn = 0; turn < 7; turn++) {
        const int n_rank = 1 + turn % 2;
        const enum act delta = turn < 2 || turn == 6 ? A_OUT : turn < 4 ? A_JOINED : ACT_COUNT;
        const bool head = turn == 5, mixed = turn < 6;
        struct model m[2];
        struct cpu cpu = {.k = &kernels_ref};
        struct rank r[2] = {{.cpu = &cpu, .n_tok = T}, {.cpu = &cpu, .n_tok = T}};
        for (int i = 0; i < 2; i++) {
            m[i] = (struct model){.family = families, .n_embd = N, .n_hc = K, .rms_eps = 0.01f};
            m[i].n_sinkhorn = mixed ? 2 : 0;
            m[i].hc_eps = 0.02f;
            m[i].hc_write = mixed ? 2 : 1.5f;
            m[i].shard = (struct shard){i, n_rank, 0, 1};
            r[i].m = &m[i];
            r[i].act[A_X] = x[i], r[i].act[A_H] = h[i], r[i].act[A_OUT] = out[i], r[i].act[A_MIX] = mix[i];
            r[i].act[A_HC] = streams[i], r[i].act[A_JOINED] = joined[i];
            r[i].width[A_X] = r[i].width[A_H] = r[i].width[A_OUT] = N;
            r[i].width[A_HC] = r[i].width[A_JOINED] = K * N;
            r[i].width[A_MIX] = MIX + 1;
            for (int j = 0; j < T * N; j++) out[i][j] = (float)rng_uniform(&rng) - 0.5f;
            for (int j = 0; j < T * K * N; j++) joined[i][j] = (float)rng_uniform(&rng) - 0.5f;
            for (int j = 0; j < T * K * N; j++) streams[i][j] = (float)rng_uniform(&rng) - 0.5f;
            for (int j = 0; j < T * (MIX + 1); j++) mix[i][j] = (float)rng_uniform(&rng);
        }
        const int last = head ? 0 : n_rank - 1; /* the rank that is looked at */
        for (int i = 0; i < T * K * N; i++) {
            const int t = i / (K * N), k = i / N % K, at = i % N;
            const float *const how = mix[last] + t * (MIX + 1), *const was = streams[last] + t * K * N;
            double d = 0;
            for (int p = 0; p < n_rank; p++)
                d += delta == A_JOINED ? (double)joined[p][i] : (double)how[K + k] * (double)out[p][t * N + at];
            for (int j = 0; j < K && delta == A_OUT; j++) d += (double)how[2 * K + j * K + k] * (double)was[j * N + at];
            now[i] = delta == ACT_COUNT ? (double)streams[last][i] : d;
        }
        for (int t = 0; t < T && n_rank > 1 && !head; t++)
            for (int from = 0; from < N; from += PART) {
                if (delta == A_OUT) hc_add(&r[1], A_OUT, t, from, int_min(PART, N - from));
                for (int j = 0; j < K && delta == A_JOINED; j++) hc_set(&r[1], t, j, from, int_min(PART, N - from));
            }
        m[0].shard.n_rank = 1; /* ranks would wait for each other */
        if (!last) hc_mix(&r[0], A_X, delta, &hc, head, w, A_H);
        check_near("streams", streams[last], now, T * K * N);
        for (int t = 0; t < T && !last; t++) {
            double square = 0;
            hyper_coefficients(&m[0], &hc, head, now + t * K * N, c);
            check_near("coefficients", mix[0] + t * (MIX + 1), c, head ? K : MIX);
            for (int i = 0; i < N; i++) sum[i] = 0;
            for (int i = 0; i < K * N; i++) sum[i % N] += c[i / N] * now[t * K * N + i];
            check_near("x", x[0] + t * N, sum, N);
            for (int i = 0; i < N; i++) square += sum[i] * sum[i];
            for (int i = 0; i < N; i++) sum[i] *= (double)w[i] / sqrt(square / N + (double)m[0].rms_eps);
            check_near("norm", h[0] + t * N, sum, N);
        }
    }
}

/* The same for streams of a low rank: what is written to them, and their norms. */
static void test_streams_low(void) {
    enum { K = HYPER_STREAMS, N = HYPER_EMBD, T = HYPER_TOKENS };
    static float w[K * N], out[T * N], streams[T * K * N], norms[T * K * N], mix[T * K];
    static double now[T * K * N], normed[T * K * N];
    uint64_t rng = 6;
    const struct model m = {.n_embd = N, .n_hc = K, .hc_low = 1, .rms_eps = 0.01f, .shard.n_rank = 1};
    struct cpu cpu = {.k = &kernels_ref};
    struct rank r = {.cpu = &cpu, .m = &m, .n_tok = T};
    r.act[A_OUT] = out, r.act[A_HC] = streams, r.act[A_NORMS] = norms, r.act[A_MIX] = mix;
    r.width[A_OUT] = N, r.width[A_HC] = r.width[A_NORMS] = K * N, r.width[A_MIX] = K;
    for (int i = 0; i < K * N; i++) w[i] = 1 + (float)rng_uniform(&rng);
    for (int i = 0; i < T * N; i++) out[i] = (float)rng_uniform(&rng) - 0.5f;
    for (int i = 0; i < T * K * N; i++) streams[i] = (float)rng_uniform(&rng) - 0.5f;
    for (int i = 0; i < T * K; i++) mix[i] = 4 * (float)rng_uniform(&rng) - 2;
    for (int turn = 0; turn < 3; turn++) { /* without sums, with them, and without norms */
        for (int s = 0; s < T * K; s++) {
            double square = 0;
            for (int i = 0; i < N; i++) {
                const int at = s * N + i;
                now[at] = (double)streams[at];
                if (turn) now[at] += 2 / (1 + exp(-(double)mix[s] / K)) * (double)out[s / K * N + i];
                square += now[at] * now[at];
            }
            for (int i = 0; i < N && turn < 2; i++)
                normed[s * N + i] = now[s * N + i] * (double)w[s % K * N + i] / sqrt(square / N + (double)m.rms_eps);
        }
        streams_add(&r, turn ? A_OUT : ACT_COUNT, turn < 2 ? w : NULL, A_NORMS);
        check_near("streams", streams, now, T * K * N);
        check_near("norms", norms, normed, T * K * N);
    }
}

/* One of the ids 0..n-1 with the next random number. */
static int32_t sample(const struct sampling *o, const float *x, int n, const int32_t *recent, int n_recent) {
    static uint64_t rng = 1;
    struct candidate work[64];
    return sampling_choose(o, work, n, x, recent, n_recent, rng_uniform(&rng));
}

static void test_sampler(void) {
    enum { N = 50, DRAWS = 20000 };
    float x[N];
    int count[N] = {0}, distinct = 0;
    int32_t recent[3] = {10, 10, 11};
    for (int i = 0; i < N; i++) x[i] = -0.1f * (float)i; /* p falls by e^-0.1 per id */
    struct sampling o = {.temp = 1, .top_p = 1, .repeat_penalty = 1};
    for (int i = 0; i < DRAWS; i++) count[sample(&o, x, N, NULL, 0)]++;
    double z = (1 - exp(-0.1 * N)) / (1 - exp(-0.1));
    for (int i = 0; i < N; i += 7) {
        double p = exp(-0.1 * i) / z, sd = sqrt(p * (1 - p) * DRAWS);
        CHECK(fabs(count[i] - p * DRAWS) < 5 * sd, "id %d drawn %d times, expected %.0f", i, count[i], p * DRAWS);
    }
    o.top_k = 3;
    for (int i = 0; i < 1000; i++) CHECK(sample(&o, x, N, NULL, 0) < 3, "top-k let another one through");
    o.top_k = 0, o.top_p = 0.2f; /* 0.0957 + 0.0866 < 0.2 <= + 0.0784 */
    memset(count, 0, sizeof count);
    for (int i = 0; i < 2000; i++) count[sample(&o, x, N, NULL, 0)]++;
    for (int i = 0; i < N; i++) distinct += count[i] > 0;
    CHECK(distinct == 3 && count[2], "top-p 0.2 kept %d ids", distinct);
    o.top_k = 10, o.top_p = 0.5f; /* of the mass of ten: 0.15 + 0.136 + 0.123 + 0.111 */
    distinct = 0, memset(count, 0, sizeof count);
    for (int i = 0; i < 2000; i++) count[sample(&o, x, N, NULL, 0)]++;
    for (int i = 0; i < N; i++) distinct += count[i] > 0;
    CHECK(distinct == 4, "top-k 10 with top-p 0.5 kept %d ids", distinct);
    o.top_k = 0, o.top_p = 1, o.min_p = 0.7f; /* e^-0.3 = 0.74, e^-0.4 = 0.67 */
    distinct = 0, memset(count, 0, sizeof count);
    for (int i = 0; i < 2000; i++) count[sample(&o, x, N, NULL, 0)]++;
    for (int i = 0; i < N; i++) distinct += count[i] > 0;
    CHECK(distinct == 4, "min-p 0.7 kept %d ids", distinct);
    o = (struct sampling){.greedy = true, .top_p = 1, .repeat_penalty = 1.5f};
    x[10] = 3, x[11] = 2.5f, x[12] = 2.2f; /* penalised once each: 2 and 1.67 */
    CHECK(sample(&o, x, N, recent, 3) == 12, "the repeat penalty chose %d", sample(&o, x, N, recent, 3));
    o.repeat_penalty = 1;
    CHECK(sample(&o, x, N, recent, 3) == 10, "greedy is not the largest");
}

/* The squared error of x (n) in E4M3 with that scale: steps of 2^-3 of a power of two, and of 2^-9 below 2^-6. */
static double e4m3_squares(const float *x, int n, double scale) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        const double v = fabs((double)x[i]) / scale, step = exp2(floor(log2(fmax(v, 0x1p-6))) - 3);
        const double e = (v - rint(v / step) * step) * scale;
        sum += e * e;
    }
    return sum;
}

/* Checks a group of an FP8 row, x (n), against what the cache gives back, y. Its largest magnitude is exact and its squared
 * error the least of four scales; pow2: its scale is a power of two. */
static void check_e4m3_group(const float *x, const float *y, int n, float scale, bool pow2) {
    double amax = 0, sum = 0, least = INFINITY;
    for (int i = 0; i < n; i++) amax = fmax(amax, fabs((double)x[i]));
    for (double top = 448; top >= 256; top -= 64) least = fmin(least, e4m3_squares(x, n, amax / top));
    if (pow2) {
        const double want = exp2(ceil(log2(amax / 448)));
        CHECK((double)scale == want, "scale %g, expected %g", scale, want);
        least = e4m3_squares(x, n, want);
    }
    for (int i = 0; i < n; i++) {
        const double e = fabs((double)y[i] - (double)x[i]), v = fabs((double)x[i]);
        const double tol = v == amax && !pow2 ? v * 1e-6 : fmax(v / 17, (double)scale * 0x1p-10) * 1.00001;
        CHECK(e <= tol, "value %d of a group up to %g: %g became %g", i, amax, x[i], y[i]);
        sum += e * e;
    }
    CHECK(fabs(sum / least - 1) < 1e-4, "a group up to %g: squared error %g, expected %g", amax, sum, least);
}

/* Every cache format gives back what was stored, at its own precision. */
static void test_kv_cache(void) {
    enum { W = 192, ROWS = 70 };
    float x[W], y[W];
    uint64_t rng = 9;
    for (int turn = 0; turn < 4; turn++) {
        const enum kv_type type = turn < 3 ? (enum kv_type)turn : KV_FP8;
        struct cache_tensor p = cache_make(type, W, 128);
        p.pow2 = turn == 3;
        p.data = xcalloc(ROWS, p.row_bytes);
        if (type == KV_FP8) p.scale = xcalloc(ROWS * (size_t)p.n_scale, sizeof(float));
        CHECK(p.row_bytes % 16 == 0, "rows of %zu bytes", p.row_bytes);
        for (int row = 0; row + 1 < ROWS; row += 3) {
            for (int i = 0; i < W; i++) x[i] = (float)(rng_uniform(&rng) - 0.5) * (i < 128 ? 1e-3f : 1e3f);
            x[5] = 0;
            kv_store(kernels_choose(), &p, row, x);
            kv_load(kernels_choose(), &p, row, 1, 0, W, y, W);
            for (int i = 0; i < W && type != KV_FP8; i++)
                CHECK(fabsf(x[i] - y[i]) <= (type == KV_F32 ? 0 : fabsf(x[i]) / 256),
                      "type %d row %d value %d: %g became %g", type, row, i, x[i], y[i]);
            for (int g = 0; g < p.n_scale && type == KV_FP8; g++)
                check_e4m3_group(x + 128 * g, y + 128 * g, g ? W - 128 : 128, p.scale[row * p.n_scale + g], p.pow2);
            float tiny[W]; /* its scale has no finite reciprocal */
            for (int i = 0; i < W; i++) tiny[i] = 1e-38f;
            kv_store(kernels_choose(), &p, row + 1, tiny);
            kv_load(kernels_choose(), &p, row + 1, 1, 0, W, y, W);
            for (int i = 0; i < W; i++) CHECK(fabsf(y[i]) <= 1.01e-38f, "type %d: 1e-38 became %g", type, y[i]);
            kv_load(kernels_choose(), &p, row, 1, 128, 64, y, W);
            CHECK(fabsf(y[3] - x[131]) <= fabsf(x[131]) / 8, "type %d: a range that starts at a group", type);
        }
        free(p.data);
        free(p.scale);
    }
}

static double perplexity(const struct model *m, const struct kernels *k, enum kv_type kv, const int32_t *ids, int n,
                         int window) {
    struct session s;
    struct nll x = {.n = window, .n_vocab = m->n_vocab};
    char err[ERR_MAX] = "";
    session_cpu(&s, m, k, 1, window, kv);
    for (int at = 0; at + window <= n; at += window) {
        x.ids = ids + at;
        CHECK(session_score(&s, x.ids, window, nll_add, &x, err) == 0, "%s", err);
    }
    session_free(&s);
    return exp(x.sum / (double)x.count);
}

/* Held-out books: what Hugging Face computes over the first 600 tokens; FP8 and BF16 caches, paired, over 6,144. */
static void test_demo_perplexity(void) {
    const char *path = shared_path("prose/perplexity.txt");
    struct model m;
    char *text = NULL, err[ERR_MAX];
    int32_t *ids = NULL;
    if (!path) SKIP("../shared/prose is absent");
    if (!demo_load(&m) || !CHECK(read_file(path, &text, err) == 0, "%s", err)) return;
    tokenize(m.vocab, text, 40000, NULL, 0, &ids);
    if (!CHECK(arrlen(ids) > 6144, "only %td tokens", arrlen(ids))) return;
    double hf = perplexity(&m, &kernels_ref, KV_F32, ids, 600, 600);
    CHECK(fabs(hf / 99.92031 - 1) < 1e-4, "perplexity %.4f, Hugging Face has 99.9203", hf);
    double bf16 = perplexity(&m, kernels_choose(), KV_BF16, ids, 6144, 1024),
           fp8 = perplexity(&m, kernels_choose(), KV_FP8, ids, 6144, 1024);
    CHECK(fabs(fp8 / bf16 - 1) < 0.005, "BF16 cache %.4f, FP8 cache %.4f", bf16, fp8);
    arrfree(ids);
    arrfree(text);
    model_free(&m);
}

/* The contents list at the top of moe.c names the sections as they stand, with about as many lines as they have. */
static void test_contents_list(void) {
    char *text = NULL, err[ERR_MAX], name[128];
    if (!CHECK(read_file("moe.c", &text, err) == 0, "%s", err)) return;
    const char *p = strstr(sb_cstr(&text), " * Contents:"), *banner = text;
    if (!CHECK(p != NULL, "there is no contents list")) return;
    for (p = strchr(p, '\n') + 1; strncmp(p, " */", 3); p = strchr(p, '\n') + 1) {
        int listed = 0, lines = 0;
        if (strncmp(p, " *   ", 5)) continue; /* a group */
        CHECK(sscanf(p + 51, "%d", &listed) == 1, "no number of lines in: %.60s", p);
        snprintf(name, sizeof name, "%.46s", p + 5);
        for (size_t n = strlen(name); n && name[n - 1] == ' ';) name[--n] = 0;
        banner = strstr(banner, "/* =======");
        banner = banner ? strchr(banner, '\n') + 1 : NULL;
        if (!CHECK(banner && !strncmp(banner + 3, name, strlen(name)) && banner[3 + strlen(name)] == '\n',
                   "section '%s' is not where the list has it", name))
            break;
        const char *end = strstr(banner, "/* =======");
        for (const char *q = banner; q && *q && (!end || q < end); q++) lines += *q == '\n';
        CHECK(abs(lines - listed) <= 10 + lines / 10, "section '%s' has %d lines, the list says %d", name, lines,
              listed);
    }
    CHECK(banner && !strstr(banner, "/* ======="), "a section is missing in the contents list");
    arrfree(text);
}

/* Under the title of every section stands what it is for: an empty comment line and at least one sentence. */
static void test_banners(void) {
    static const char *const files[] = {"moe.c", "moe_cuda.cu"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *text = NULL, err[ERR_MAX];
        int sections = 0;
        if (!CHECK(read_file(files[i], &text, err) == 0, "%s", err)) continue;
        for (const char *p = sb_cstr(&text); (p = strstr(p, "/* =======")); sections++) {
            const char *title = strchr(p, '\n') + 1, *body = strchr(title, '\n') + 1, *end = strstr(body, " * ======");
            const int n = (int)(body - title - 4);
            p = body;
            if (!CHECK(end, "%s: the banner of '%.*s' has no end", files[i], n, title + 3)) break;
            CHECK(!strncmp(body, " *\n * ", 6) && memchr(body, '.', (size_t)(end - body)),
                  "%s: no sentence under '%.*s'", files[i], n, title + 3);
        }
        CHECK(sections > 10, "%d sections in %s", sections, files[i]);
        arrfree(text);
    }
}

/* The operations of a forward, timed one by one: their times make up the whole, their bytes are those of the model, and
 * the logits are the same as before. */
static void test_cpu_profile(void) {
    static const char *const names[] = {"qwen3moe",   "deepseek_v3_nvfp4", "qwen3_5_moe", "glm_moe_dsa_types",
                                        "minimax_m3", "bailing_hybrid",    "qwen4_exp"};
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        struct model m;
        struct session s;
        struct profile_row row[512];
        int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
        if (!fixture_load(names[f], &m)) return;
        session_cpu(&s, &m, kernels_choose(), 2, 64, KV_BF16);
        session_forward(&s, ids, 9);
        session_head(&s, 8, 1);
        const uint32_t hash = logit_hash(session_logits(&s), m.n_vocab);
        for (int n = 1; n <= 9; n += 8) {
            struct bench_call call = {.s = &s, .ids = ids, .n = n, .rows = 1};
            double sum, all, bytes = 0;
            int experts = 0, moe = 0, n_row, tries = 0;
            do { /* again where another process has come between */
                const double t0 = now_seconds();
                n_row = s.r->ops->profile(s.r, bench_call, &call, row, 512);
                all = now_seconds() - t0;
                sum = 0;
                for (int i = 0; i < n_row; i++) sum += row[i].seconds;
            } while (sum <= 0.9 * all && ++tries < 1000);
            for (int i = 0; i < n_row; i++) {
                CHECK(row[i].calls == 1 && row[i].seconds >= 0, "%s: %g s", row[i].name, row[i].seconds);
                bytes += row[i].bytes;
                experts += !strcmp(row[i].name, "experts down");
            }
            for (int il = 0; il < m.n_layer; il++) moe += m.layers[il].n_expert > 0;
            CHECK(sum > 0.9 * all && sum <= all, "%s, %d tokens: %g of %g s", names[f], n, sum, all);
            CHECK_INT(experts, moe, "%s, %d tokens", names[f], n);
            const double want = session_forward_bytes(&s, n);
            CHECK(n > 1 || fabs(bytes / want - 1) < 0.03, "%s: %.0f bytes, expected %.0f", names[f], bytes, want);
        }
        CHECK(logit_hash(session_logits(&s), m.n_vocab) == hash, "%s: other logits after a profile", names[f]);
        session_free(&s);
        model_free(&m);
    }
}

#define TESTS_MODEL                                                                                                    \
    {"model/fixtures-qwen3moe", test_fixtures_qwen3moe}, {"model/fixtures-deepseek", test_fixtures_deepseek},          \
        {"model/fixtures-hy3", test_fixtures_hy3}, {"model/fixtures-glm4", test_fixtures_glm4},                        \
        {"model/fixtures-dots1", test_fixtures_dots1}, {"model/unnamed-router", test_unnamed_router},                  \
        {"model/fixtures-windows", test_fixtures_windows}, {"model/fixtures-factors", test_fixtures_factors},          \
        {"model/fixtures-mellum", test_fixtures_mellum}, {"model/fixtures-deepseek-v2", test_fixtures_deepseek_v2},    \
        {"model/fixtures-ling1", test_fixtures_ling1}, {"model/fixtures-solar", test_fixtures_solar},                  \
        {"model/fixtures-granite-swa", test_fixtures_granite_swa}, {"model/fixtures-means", test_fixtures_means},      \
        {"model/fixtures-qwen3-vl", test_fixtures_qwen3_vl}, {"model/fixtures-hunyuan", test_fixtures_hunyuan},        \
        {"model/fixtures-kimi-k3", test_fixtures_kimi_k3}, {"model/fixtures-hy4", test_fixtures_hy4},                  \
        {"model/fixtures-dots3", test_fixtures_dots3}, {"model/fixtures-ling", test_fixtures_ling},                    \
        {"model/fixtures-gpt-oss", test_fixtures_gpt_oss}, {"model/fixtures-minimax", test_fixtures_minimax},          \
        {"model/fixtures-classics", test_fixtures_classics}, {"model/fixtures-step3", test_fixtures_step3},            \
        {"model/fixtures-dense", test_fixtures_dense}, {"model/fixtures-mistral", test_fixtures_mistral},              \
        {"model/fixtures-gemma4", test_fixtures_gemma4}, {"model/fixtures-kda", test_fixtures_kda},                    \
        {"model/fixtures-laguna", test_fixtures_laguna}, {"model/fixtures-mimo", test_fixtures_mimo},                  \
        {"model/fixtures-dsa", test_fixtures_dsa}, {"model/fixtures-deepseek4", test_fixtures_deepseek4},              \
        {"model/fixtures-deepseek41", test_fixtures_deepseek41},                                                       \
        {"model/fixtures-deepseek4-ranks", test_fixtures_deepseek4_ranks},                                             \
        {"model/sparse-begins", test_sparse_begins}, {"model/keys-seen", test_keys_seen},                              \
        {"model/top-positions", test_top_positions}, {"model/prediction", test_prediction},                            \
        {"model/prediction-chain", test_prediction_chain}, {"model/prediction-batches", test_prediction_batches},      \
        {"model/clamps", test_clamps}, {"model/groups", test_groups}, {"model/fixtures-qwen35", test_fixtures_qwen35}, \
        {"model/fixtures-qwen3next", test_fixtures_qwen3next}, {"model/fixtures-nemotron", test_fixtures_nemotron},    \
        {"model/fixtures-lfm2", test_fixtures_lfm2}, {"model/fixtures-llama4", test_fixtures_llama4},                  \
        {"model/fixtures-maple", test_fixtures_maple}, {"model/fixtures-arctic", test_fixtures_arctic},                \
        {"model/fixtures-longcat", test_fixtures_longcat},                                                             \
        {"model/fixtures-smallthinker", test_fixtures_smallthinker},                                                   \
        {"model/fixtures-inkling2", test_fixtures_inkling2}, {"model/fixtures-glm5-next", test_fixtures_glm5_next},    \
        {"model/fixtures-qwen4", test_fixtures_qwen4}, {"model/fixtures-reap", test_fixtures_reap},                    \
        {"model/profile", test_cpu_profile}, {"model/demo-reference", test_demo_reference},                            \
        {"model/demo-fast-path", test_demo_fast_path}, {"model/demo-perplexity", test_demo_perplexity},                \
        {"model/threads", test_session_threads}, {"model/decode-equals-prefill", test_session_decode_equals_prefill},  \
        {"model/batches", test_batches}, {"model/scaled-biases", test_scaled_biases},                                  \
        {"model/state-file", test_session_file}, {"model/ops-replay", test_ops_replay},                                \
        {"model/rope-yarn", test_rope_yarn}, {"model/hash", test_model_hash}, {"model/router", test_router},           \
        {"model/glu", test_glu}, {"model/streams", test_streams}, {"model/streams-low", test_streams_low},             \
        {"model/sampler", test_sampler}, {"model/kv-cache", test_kv_cache},                                            \
        {"model/contents-list", test_contents_list}, {"model/banners", test_banners},
