/* State that is more than a row per token: a family of the tests' own adds to attention's result a sum over all tokens,
 * a sum over a window and a sum over pooled blocks of four. It is what a recurrent family will need, without its
 * arithmetic: the sum lags behind the timeline by up to 16 tokens whose rows the ring holds. */

enum { STATE_WINDOW = 5, STATE_RING = 32, STATE_BLOCK = 4, STATE_WIDTH_MAX = 4096 };

static void state_cache(const struct model *m, const struct layer *layer, struct cache_tensor *out) {
    const struct attn *a = &layer->attn;
    const int group = a->n_head / a->n_head_kv, width = a->n_head * a->head_v;
    struct cache_tensor p = cache_make(KV_F32, width, width);
    (void)m;
    p.first = a->first_head_kv * group * a->head_v;
    p.whole = a->whole_head_kv * group * a->head_v;
    out[CACHE_WINDOW] = out[CACHE_STATE] = out[CACHE_COMPRESSED] = p;
    out[CACHE_WINDOW].kind = ROWS_RING;
    out[CACHE_WINDOW].n_row = STATE_RING;
    out[CACHE_WINDOW].window = STATE_WINDOW;
    out[CACHE_STATE].kind = ROWS_STATE;
    out[CACHE_STATE].n_row = 1;
    out[CACHE_COMPRESSED].kind = ROWS_BLOCKS;
    out[CACHE_COMPRESSED].row_tokens = STATE_BLOCK;
}

static float *state_row(const struct rank *r, int il, enum cache_use use, int row) {
    const struct cache_tensor *p = &r->cache[il][use];
    return (float *)(void *)(p->data + (size_t)row * p->row_bytes);
}

/* x (n_tok, n_head * head_v), attention's result, gets the three sums on top. */
static void state_op(struct rank *r, int il, enum act a) {
    const int n = r->cache[il][CACHE_STATE].width, stride = r->width[a];
    float *sum = state_row(r, il, CACHE_STATE, 0), now[STATE_WIDTH_MAX];
    if (n > STATE_WIDTH_MAX) die("the test's state has %d values", n);
    for (int p = r->n_committed; p < r->pos; p++) /* what the state left out */
        for (int i = 0; i < n; i++) sum[i] = 0.9f * sum[i] + state_row(r, il, CACHE_WINDOW, p % STATE_RING)[i];
    memcpy(now, sum, (size_t)n * sizeof *now);
    for (int t = 0; t < r->n_tok; t++) {
        const int p = r->pos + t;
        float *x = r->act[a] + (size_t)t * (size_t)stride, *row = state_row(r, il, CACHE_WINDOW, p % STATE_RING);
        memcpy(row, x, (size_t)n * sizeof *row);
        if (p % STATE_BLOCK == STATE_BLOCK - 1) {
            float *pool = state_row(r, il, CACHE_COMPRESSED, p / STATE_BLOCK);
            memset(pool, 0, (size_t)n * sizeof *pool);
            for (int j = p - STATE_BLOCK + 1; j <= p; j++)
                for (int i = 0; i < n; i++) pool[i] += state_row(r, il, CACHE_WINDOW, j % STATE_RING)[i];
        }
        for (int i = 0; i < n; i++) now[i] = 0.9f * now[i] + row[i];
        if (r->n_tok > MAX_ROLLBACK && t == r->n_tok - 2) memcpy(sum, now, (size_t)n * sizeof *sum);
        for (int i = 0; i < n; i++) {
            float window = 0, pool = 0;
            for (int j = int_max(0, p - STATE_WINDOW + 1); j <= p; j++)
                window += state_row(r, il, CACHE_WINDOW, j % STATE_RING)[i];
            for (int b = 0; b < (p + 1) / STATE_BLOCK; b++) pool += state_row(r, il, CACHE_COMPRESSED, b)[i];
            x[i] += 0.05f * now[i] + 0.1f * window + 0.02f * pool;
        }
    }
}

static void state_attention(struct rank *r, const struct step *s) {
    cpu_attention(r, s);
    if (team_leads()) state_op(r, s->il, s->out[0]);
    team_barrier();
}

static void state_mla_attention(struct rank *r, const struct step *s) {
    cpu_mla_attention(r, s);
    if (team_leads()) state_op(r, s->il, s->out[0]);
    team_barrier();
}

static const struct family *state_base; /* the model's own */
static struct family state_family;

/* Makes the model one of the test's family. */
static void state_adopt(struct model *m) {
    state_base = m->family;
    state_family = *m->family;
    state_family.cache = state_cache;
    m->family = &state_family;
}

/* A session; that of the test's family has state_op after attention. */
static void state_open(struct session *s, const struct model *m, int tp, int pp, enum kv_type kv) {
    static struct ops ops;
    ops = cpu_ops;
    ops.attention = state_attention;
    ops.mla_attention = state_mla_attention;
    session_open_cpu(s, m, tp, pp, (struct cpu_options){&kernels_ref, 2, 200, kv, false, false, {0}});
    for (int i = 0; i < s->pg->n && m->family == &state_family; i++) s->pg->ranks[i].ops = &ops;
}

/* The logits after ids[0..n) of a session that has seen nothing else, in chunks of at most `chunk` tokens; malloc'ed.
 * */
static float *state_fresh(const struct model *m, int tp, int pp, enum kv_type kv, const int32_t *ids, int n,
                          int chunk) {
    struct session s;
    float *out = xmalloc((size_t)m->n_vocab * sizeof *out);
    state_open(&s, m, tp, pp, kv);
    for (int at = 0; at < n; at += chunk) session_forward(&s, ids + at, int_min(chunk, n - at));
    session_head(&s, s.r->n_tok - 1, 1);
    memcpy(out, session_logits(&s), (size_t)m->n_vocab * sizeof *out);
    session_free(&s);
    return out;
}

static void state_compare(struct session *s, const struct model *m, const int32_t *ids, int n, const char *what) {
    const struct shard *p = &s->r->m->shard;
    float *want = state_fresh(m, p->n_rank, p->n_stage, s->r->kv_type, ids, n, n);
    const double e = nmse(session_logits(s), want, (size_t)m->n_vocab);
    CHECK(e < 1e-9, "%s, --tp %d --pp %d: NMSE %.3g", what, p->n_rank, p->n_stage, e);
    free(want);
}

/* Syncs to ids[0..n) and compares with a session that has seen nothing else. How many tokens were computed must be
 * `computed`. */
static void state_sync(struct session *s, const struct model *m, const int32_t *ids, int n, int mark, int computed,
                       const char *what) {
    char err[ERR_MAX] = "";
    CHECK(session_sync(s, ids, n, mark, err) == SYNC_DONE, "%s: %s", what, err);
    CHECK(s->sync_tokens == computed, "%s: computed %d tokens, expected %d", what, s->sync_tokens, computed);
    state_compare(s, m, ids, n, what);
}

static const int state_layouts[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}};
enum { STATE_LAYOUTS = sizeof state_layouts / sizeof *state_layouts };

/* Models with state beyond a row per token: the test's own family, those with recurrent layers, those with rings for
 * short convolutions, and after them one whose rings make compressed keys. */
static const char *const state_models[] = {"qwen3moe",       "qwen3_5_moe",   "qwen3_next",      "kimi_linear",
                                           "bailing_hybrid", "nemotron_h",    "glm5_next_nvfp4", "qwen4_exp",
                                           "deepseek_v41",   "inkling2_loop", "inkling2_nvfp4",  "deepseek_v4"};
enum {
    STATE_MODELS = sizeof state_models / sizeof *state_models - 1, /* without that */
    STATE_RECURRENT = STATE_MODELS - 3                             /* and without rings alone */
};

static bool state_model(struct model *m, int32_t *ids, int n, int which) {
    uint64_t rng = 7;
    if (!fixture_load(state_models[which], m)) return false;
    if (!which) state_adopt(m);
    for (int i = 0; i < n; i++) ids[i] = (int32_t)(rng_next(&rng) % (uint64_t)m->n_vocab);
    return true;
}

/* One chunk, uneven chunks and single tokens are the same computation. Each layout has every second size, in turn. */
static void test_state_chunks(void) {
    static const int chunks[] = {1, 3, 16, 17, 23, 90, 50}; /* the last one is larger than rings of inputs */
    int32_t ids[90];
    for (int which = 0; which < STATE_MODELS; which++) {
        struct model m;
        if (!state_model(&m, ids, 90, which)) return;
        for (int k = 0; k < STATE_LAYOUTS; k++) {
            const int tp = state_layouts[k][0], pp = state_layouts[k][1];
            float *want = state_fresh(&m, tp, pp, KV_F32, ids, 90, 90);
            for (size_t i = (size_t)(which + k) % 2; i < sizeof chunks / sizeof *chunks; i += 2) {
                float *got = state_fresh(&m, tp, pp, KV_F32, ids, 90, chunks[i]);
                const double e = nmse(got, want, (size_t)m.n_vocab);
                CHECK(e < 1e-9, "%s, --tp %d --pp %d, chunks of %d: NMSE %.3g", state_models[which], tp, pp, chunks[i],
                      e);
                free(got);
            }
            free(want);
        }
        model_free(&m);
    }
}

/* The test's own family would be no test if its state did not change the logits. */
static void test_state_matters(void) {
    struct model m;
    int32_t ids[90];
    if (!state_model(&m, ids, 90, 0)) return;
    float *a = state_fresh(&m, 1, 1, KV_F32, ids, 90, 90);
    m.family = state_base;
    float *b = state_fresh(&m, 1, 1, KV_F32, ids, 90, 90);
    CHECK(nmse(a, b, (size_t)m.n_vocab) > 1e-3, "the state does not matter");
    free(a);
    free(b);
    model_free(&m);
}

/* Taking back tokens: those that the state has not taken in cost nothing; beyond them the nearest snapshot, or
 * everything. */
static void check_truncation(int which) {
    const int back = which < STATE_RECURRENT ? 1 : MAX_ROLLBACK; /* tokens that can be taken back at once */
    struct model m;
    int32_t ids[120], other[120];
    if (!state_model(&m, ids, 120, which)) return;
    for (int k = 0; k < STATE_LAYOUTS; k++) {
        struct session s;
        state_open(&s, &m, state_layouts[k][0], state_layouts[k][1], KV_F32);
        state_sync(&s, &m, ids, 60, 40, 60, "from nothing");
        CHECK(session_reach(&s) == 60 - back, "reach %d after a prefill", session_reach(&s));
        for (int i = 60; i < 70; i++) session_decode(&s, ids[i]);
        CHECK(session_reach(&s) == 70 - back && s.n_committed == 69, "reach %d, state at %d after decoding",
              session_reach(&s), s.n_committed);
        memcpy(other, ids, sizeof ids);
        other[69] ^= 1;
        state_sync(&s, &m, other, 72, 0, 3, "the last token changed");
        other[55] ^= 1;
        state_sync(&s, &m, other, 72, 0, 32, "a token after the snapshot changed");
        other[30] ^= 1;
        state_sync(&s, &m, other, 72, 0, 72, "a token before the snapshot changed");
        session_free(&s);
    }
    model_free(&m);
}

static void test_state_truncation(void) {
    for (int which = 0; which < STATE_MODELS; which++) check_truncation(which);
}

/* Ten marks in a session that keeps eight: the two that were used longest ago are gone. */
static void check_snapshots(int which) {
    struct model m;
    struct session s;
    char err[ERR_MAX] = "";
    int32_t ids[120], other[120];
    if (!state_model(&m, ids, 120, which)) return;
    state_open(&s, &m, 2, 1, KV_BF16);
    for (int i = 1; i <= SNAPSHOTS + 2; i++)
        CHECK(session_sync(&s, ids, 10 * i + 3, 10 * i, err) == SYNC_DONE, "%s", err);
    memcpy(other, ids, sizeof ids);
    for (int at = 100; at >= 30; at -= 10) {
        other[at] ^= 1;
        state_sync(&s, &m, other, at + 4, 0, 4, "back to a snapshot");
        other[at] ^= 1;
    }
    other[20] ^= 1;
    state_sync(&s, &m, other, 24, 0, 24, "back to before the first snapshot that is kept");
    session_free(&s);
    model_free(&m);
}

static void test_state_snapshots(void) {
    for (int which = 0; which < STATE_MODELS; which++) check_snapshots(which);
}

/* Prompts of which each has its first tokens in common with one before, and answers to them, one after the other in one
 * session: the bits of their logits are those of a session that has seen nothing else. Forwards that both have are not
 * computed again. */
static void check_alone(int which, int layout) {
    enum { N = 180, CHUNK = 48, PROMPTS = 24, NEW = 6 };
    const int tp = state_layouts[layout][0], pp = state_layouts[layout][1];
    const struct cpu_options o = {kernels_choose(), 2, 200, layout % 2 ? KV_FP8 : KV_BF16, false, false, {0}};
    struct model m;
    struct session s, fresh;
    char err[ERR_MAX] = "";
    int32_t ids[N], old[PROMPTS][N];
    int old_cut[PROMPTS], reused = 0;
    uint64_t rng = 3;
    if (!state_model(&m, ids, N, which)) return;
    session_open_cpu(&s, &m, tp, pp, o);
    s.r->chunk = CHUNK; /* of the prompts' forwards */
    for (int i = 0; i < PROMPTS; i++) {
        const int like = i ? i % 5 == 3 ? i - 1 : (int)(rng_next(&rng) % (uint64_t)i) : 0;
        const int same = i ? N / 2 + (int)(rng_next(&rng) % (N / 2)) : 0;
        const int cut = i && i % 5 ? old_cut[like] : 8 + (int)(rng_next(&rng) % 80);
        const int n = i % 5 == 2 ? cut + 1 + (int)(rng_next(&rng) % 8) : 1 + (int)(rng_next(&rng) % N);
        for (int k = 0; k < N; k++) ids[k] = k < same ? old[like][k] : (int32_t)(rng_next(&rng) % (uint64_t)m.n_vocab);
        memcpy(old[i], ids, sizeof ids);
        old_cut[i] = cut;
        session_open_cpu(&fresh, &m, tp, pp, o);
        fresh.r->chunk = CHUNK;
        for (int k = 0; k < 2; k++) {
            struct session *const one = k ? &fresh : &s;
            CHECK(!session_begin_alone(one, ids, n, cut < n ? cut : 0, err), "%s", err);
            if (!k) reused += one->n_past;
            sync_alone(one, ids, n, cut < n ? cut : 0);
        }
        for (int k = 0; k <= NEW; k++) {
            if (!CHECK(!memcmp(session_logits(&s), session_logits(&fresh), (size_t)m.n_vocab * sizeof(float)),
                       "%s, --tp %d --pp %d, prompt %d, token %d: other bits", state_models[which], tp, pp, i, k))
                break;
            for (int j = 0; j < 2 && k < NEW && i % 4; j++) session_decode(j ? &fresh : &s, ids[k]);
        }
        session_free(&fresh);
    }
    CHECK(reused > 2 * CHUNK, "%s: %d tokens were reused", state_models[which], reused);
    session_free(&s);
    model_free(&m);
}

static void test_state_alone(void) {
    for (int which = 1; which <= STATE_MODELS; which++) check_alone(which, which % STATE_LAYOUTS);
}

/* A state that is saved goes on in another session, with other ranks too, also where it had been longer before. */
static void check_file(int which) {
    /* these make more of a bit that other ranks round otherwise than is allowed here: in a cache of BF16, and those
     * whose layers run three times in any */
    const bool rings = which >= STATE_RECURRENT && which < STATE_MODELS;
    const bool loop = !strcmp(state_models[which], "inkling2_loop");
    const enum kv_type kv = rings ? KV_F32 : KV_BF16;
    struct model m;
    char err[ERR_MAX] = "", path[256];
    int32_t ids[120];
    if (!state_model(&m, ids, 120, which)) return;
    snprintf(path, sizeof path, "%s/state.kv", test_dir());
    for (int k = 0; k < STATE_LAYOUTS; k++)
        for (int decoded = 0; decoded < 8; decoded += 7) {
            struct session s;
            state_open(&s, &m, state_layouts[k][0], state_layouts[k][1], kv);
            CHECK(session_sync(&s, ids, 50, 30, err) == SYNC_DONE, "%s", err);
            for (int i = 0; i < decoded; i++) session_decode(&s, ids[50 + i]);
            const int n = k % 2 ? session_truncate(&s, 35) : s.n_past;
            CHECK(state_save(&s, path, err) == 0, "%s", err);
            session_free(&s);
            const int *to = state_layouts[(k + !loop) % STATE_LAYOUTS];
            state_open(&s, &m, to[0], to[1], kv);
            CHECK(session_sync(&s, ids + 7, 100, 90, err) == SYNC_DONE, "%s", err); /* nothing of it may remain */
            CHECK(session_load(&s, path, err) == 0 && s.n_past == n, "%s", err);
            state_sync(&s, &m, ids, n + 10, 0, 10, "after a state from a file");
            session_free(&s);
        }
    struct session s;
    state_open(&s, &m, 1, 1, KV_BF16);
    FILE *f = fopen(path, "r+b");
    CHECK(f && fwrite("MOEKV002", 8, 1, f) == 1 && !fclose(f), "%s", strerror(errno));
    CHECK(session_load(&s, path, err) && strstr(err, "MOEKV002") && strstr(err, "MOEKV003") && !s.n_past,
          "an old file: %s", err);
    session_free(&s);
    model_free(&m);
}

static void test_state_file(void) {
    for (int which = 0; which <= STATE_MODELS; which++) check_file(which);
}

/* ---- another context ---- */

/* The last rank has no room for 333 tokens. */
static bool narrow_resize(struct rank *r, int n_ctx, char *err) {
    if (n_ctx == 333 && r->index == r->pg->n - 1) return fail(err, "narrow"), false;
    return cpu_resize(r, n_ctx, err);
}

/* The state moves to a larger context and to one that it fills, and goes on; without room everything is as it was. */
static void check_resize(struct model *m, const int32_t *ids, int which, enum kv_type kv) {
    const int *const layout = state_layouts[which % STATE_LAYOUTS];
    struct session s;
    struct ops ops[MAX_RANKS];
    char err[ERR_MAX] = "";
    int32_t other[120];
    state_open(&s, m, layout[0], layout[1], kv);
    for (int i = 0; i < s.pg->n; i++) {
        ops[i] = *s.pg->ranks[i].ops;
        ops[i].resize = narrow_resize;
        s.pg->ranks[i].ops = &ops[i];
    }
    const uint64_t before = session_kv_bytes(&s);
    state_sync(&s, m, ids, 60, 40, 60, "from nothing");
    for (int i = 60; i < 65; i++) session_decode(&s, ids[i]);
    CHECK(!session_resize(&s, 400, err) && s.n_ctx == 400 && s.n_past == 65, "%s", err);
    CHECK(session_kv_bytes(&s) > before, "the cache does not grow");
    state_sync(&s, m, ids, 75, 0, 10, "in a larger context");
    CHECK(session_resize(&s, 333, err) && !strcmp(err, "narrow") && s.n_ctx == 400, "'%s'", err);
    state_sync(&s, m, ids, 78, 0, 3, "without room");
    CHECK(session_resize(&s, 1 << 28, err) && strstr(err, "GiB") && s.n_ctx == 400, "'%s'", err);
    CHECK(!session_resize(&s, 80, err) && s.n_ctx == 80 && session_kv_bytes(&s) < before, "%s", err);
    state_sync(&s, m, ids, 80, 0, 2, "in a context that is full");
    CHECK(session_sync(&s, ids, 81, 0, err) == SYNC_FAILED && strstr(err, "holds 80"), "'%s'", err);
    memcpy(other, ids, sizeof other);
    other[55] ^= 1;
    if (which < STATE_MODELS) state_sync(&s, m, other, 80, 0, 40, "from a snapshot");
    CHECK(!session_resize(&s, 200, err), "%s", err);
    session_truncate(&s, 0);
    CHECK(!session_resize(&s, 100, err), "%s", err);
    state_sync(&s, m, other, 90, 0, 90, "from nothing");
    session_free(&s);
}

static void test_state_resize(void) {
    static const char *const others[] = {"deepseek_v32", "deepseek_v3"};
    struct model m;
    int32_t ids[120];
    for (int which = 0; which <= STATE_MODELS; which++) {
        if (!state_model(&m, ids, 120, which)) return;
        check_resize(&m, ids, which, KV_F32);
        model_free(&m);
    }
    for (int i = 0; i < 2; i++) {
        if (!fixture_load(others[i], &m)) return;
        for (int k = 0; k < 120; k++) ids[k] %= m.n_vocab;
        check_resize(&m, ids, STATE_MODELS + i, i ? KV_FP8 : KV_BF16);
        model_free(&m);
    }
}

/* ---- windows: rings of rows ---- */

enum { WINDOW_TOKENS = 9000 /* more than two rounds of a ring */ };

/* A layer that sees all tokens, one with a window, sinks. */
/* clang-format off */
static const struct synth window_shape = {"window", "gpt-oss", .keys =
    "block_count=2 embedding_length=64 attention.head_count=4 attention.head_count_kv=2 attention.key_length=16 "
    "attention.sliding_window=300 attention.sliding_window_pattern=1,0 expert_count=8 expert_used_count=2 "
    "expert_feed_forward_length=64 vocab_size=96 context_length=65536", .qkv_bias = true};

/* Layers of DeepSeek-V4: two with a window alone, one with compressed keys beside it. */
static const struct synth compressed_shape = {"window, compressed keys", "deepseek4", .keys =
    "block_count=3 embedding_length=64 attention.head_count=4 attention.head_count_kv=1 attention.key_length=16 "
    "attention.q_lora_rank=32 rope.dimension_count=8 attention.sliding_window=300 attention.indexer.head_count=2 "
    "attention.indexer.key_length=16 attention.indexer.top_k=8 attention.compress_ratios=0,0,4:128* "
    "attention.output_group_count=2 attention.output_lora_rank=32 hyper_connection.count=2 hash_layer_count=1 "
    "expert_count=8 expert_used_count=2 expert_feed_forward_length=64 expert_shared_count=1 expert_weights_scale=1.5 "
    "vocab_size=96 context_length=65536" STREAM_KEYS};
/* clang-format on */

/* Keeps a row for every token. */
static void window_cache_kept(const struct model *m, const struct layer *layer, struct cache_tensor *out) {
    (void)m, (void)layer;
    for (int u = CACHE_K; u <= CACHE_V; u++) {
        out[u].kind = ROWS_TOKENS;
        out[u].n_row = out[u].window = 0;
    }
}

static void window_open(struct session *s, const struct model *m, int tp, enum kv_type kv) {
    session_open_cpu(s, m, tp, 1, (struct cpu_options){kernels_choose(), 2, WINDOW_TOKENS + 50, kv, false, false, {0}});
}

/* The logits after ids[0..n) in chunks of `chunk` tokens; malloc'ed. */
static float *window_logits(const struct model *m, int tp, enum kv_type kv, const int32_t *ids, int n, int chunk) {
    struct session s;
    float *out = xmalloc((size_t)m->n_vocab * sizeof *out);
    window_open(&s, m, tp, kv);
    for (int at = 0; at < n; at += chunk) session_forward(&s, ids + at, int_min(chunk, n - at));
    session_head(&s, s.r->n_tok - 1, 1);
    memcpy(out, session_logits(&s), (size_t)m->n_vocab * sizeof *out);
    session_free(&s);
    return out;
}

static void window_model(struct model *m, const struct synth *shape, int32_t ids[WINDOW_TOKENS]) {
    uint64_t rng = 3;
    memset(m, 0, sizeof *m);
    synth_make(m, shape, NULL, false);
    for (int i = 0; i < WINDOW_TOKENS; i++) ids[i] = (int32_t)(rng_next(&rng) % (uint64_t)m->n_vocab);
}

/* A ring gives the bits that a row for every token gives, and less memory; what is in the window matters. */
static void test_state_ring(void) {
    static int32_t ids[WINDOW_TOKENS];
    struct model m;
    struct cache_tensor cache[CACHE_USES];
    window_model(&m, &window_shape, ids);
    const size_t bytes = (size_t)m.n_vocab * sizeof(float);
    struct family keeps = *m.family;
    const struct family *family = m.family;
    keeps.cache = window_cache_kept;
    layer_cache(&m, &m.layers[0], KV_BF16, cache);
    CHECK(cache[CACHE_K].kind == ROWS_RING && 2 * cache[CACHE_K].n_row < WINDOW_TOKENS, "a ring of %d rows",
          cache[CACHE_K].n_row);
    layer_cache(&m, &m.layers[1], KV_BF16, cache);
    CHECK(cache[CACHE_K].kind == ROWS_TOKENS, "a layer without a window has a ring");
    for (int window = 1; window < 1000; window++) {
        struct cache_tensor p = {.kind = ROWS_TOKENS};
        window_cache(&p, window, 1 << 20);
        CHECK(p.kind == ROWS_RING && p.n_row >= p.window + FORWARD_MAX + DECODE_MAX_TOKENS && p.window == window - 1,
              "window %d: %d rows for %d before a forward", window, p.n_row, p.window);
    }
    for (int kv = KV_BF16; kv <= KV_F32; kv++) {
        const int chunk = kv == KV_BF16 ? 512 : kv == KV_FP8 ? 200 : 77;
        float *ring = window_logits(&m, 1, (enum kv_type)kv, ids, WINDOW_TOKENS, chunk);
        m.family = &keeps;
        float *all = window_logits(&m, 1, (enum kv_type)kv, ids, WINDOW_TOKENS, chunk);
        m.family = family;
        CHECK(!memcmp(ring, all, bytes), "cache type %d: other logits, NMSE %.3g", kv, nmse(ring, all, bytes / 4));
        float *two = window_logits(&m, 2, (enum kv_type)kv, ids, WINDOW_TOKENS, 512);
        CHECK(nmse(two, ring, bytes / 4) < 1e-6, "cache type %d, two ranks: NMSE %.3g", kv, nmse(two, ring, bytes / 4));
        free(two);
        free(ring);
        free(all);
    }
    model_free(&m);
}

/* The same of keys that are values. The last token's window goes around the end of the ring. */
static void test_state_ring_csa(void) {
    static int32_t ids[WINDOW_TOKENS];
    struct model m;
    struct cache_tensor cache[CACHE_USES];
    window_model(&m, &compressed_shape, ids);
    struct family keeps = *m.family;
    layer_cache(&m, &m.layers[2], KV_BF16, cache);
    const int n_row = cache[CACHE_K].n_row, n = 2 * n_row + 40;
    CHECK(cache[CACHE_K].kind == ROWS_RING && cache[CACHE_COMPRESSED].width && n <= WINDOW_TOKENS, "a ring of %d rows",
          n_row);
    float *ring = window_logits(&m, 1, KV_BF16, ids, n, 333);
    keeps.cache = window_cache_kept;
    m.family = &keeps;
    float *all = window_logits(&m, 1, KV_BF16, ids, n, 333);
    CHECK(!memcmp(ring, all, (size_t)m.n_vocab * sizeof *all), "other logits, NMSE %.3g",
          nmse(ring, all, (size_t)m.n_vocab));
    free(ring), free(all);
    model_free(&m);
}

/* Large sinks count once, however many partitions a context has: in prefill it is one. */
static void test_state_sinks(void) {
    static const float sinks[] = {6, 5, 4, 6.5f};
    static int32_t ids[WINDOW_TOKENS];
    for (int shared = 0; shared < 2; shared++) {
        struct model m;
        window_model(&m, shared ? &compressed_shape : &window_shape, ids);
        for (int il = 0; il < m.n_layer; il++) m.layers[il].sinks = sinks;
        float *split = window_logits(&m, 1, KV_F32, ids, 513, 512),
              *whole = window_logits(&m, 1, KV_F32, ids, 513, 300);
        const double e = nmse(split, whole, (size_t)m.n_vocab);
        CHECK(e < (shared ? 1e-8 : 1e-10), "%s: NMSE %.3g", shared ? "keys are values" : "grouped queries", e);
        free(split);
        free(whole);
        model_free(&m);
    }
}

/* Syncs to n of the ids with token `at` changed, of which `computed` have to be computed. Logits near `at` tell which
 * keys it saw. */
static void window_back(struct session *s, const struct model *m, int32_t *ids, int at, int n, int computed) {
    char err[ERR_MAX] = "";
    ids[at] ^= 1;
    CHECK(session_sync(s, ids, n, 0, err) == SYNC_DONE, "%s", err);
    CHECK(s->sync_tokens == computed, "token %d changed: computed %d tokens, expected %d", at, s->sync_tokens,
          computed);
    float *want = window_logits(m, s->pg->n, s->r->kv_type, ids, n, 512);
    const double e = nmse(session_logits(s), want, (size_t)m->n_vocab);
    CHECK(e < (m->n_hc ? 1e-8 : 1e-9), "token %d of %d changed: NMSE %.3g", at, n, e);
    free(want);
}

/* Going back: within what a ring holds nothing else is computed; beyond it from the nearest snapshot, or everything. A
 * state that is saved goes on with other ranks. */
static void test_state_ring_back(void) {
    static int32_t ids[WINDOW_TOKENS];
    struct model m;
    struct session s;
    char err[ERR_MAX] = "", path[256];
    window_model(&m, &window_shape, ids);
    snprintf(path, sizeof path, "%s/window.kv", test_dir());
    window_open(&s, &m, 2, KV_FP8);
    CHECK(session_sync(&s, ids, 3900, 3900, err) == SYNC_DONE, "%s", err);
    CHECK(session_sync(&s, ids, WINDOW_TOKENS, 0, err) == SYNC_DONE, "%s", err);
    const int reach = session_reach(&s);
    CHECK(reach > 4000 && reach < WINDOW_TOKENS - 4000, "reach %d", reach);
    window_back(&s, &m, ids, WINDOW_TOKENS - 10, WINDOW_TOKENS, 10);
    window_back(&s, &m, ids, reach, WINDOW_TOKENS, WINDOW_TOKENS - reach);
    window_back(&s, &m, ids, reach - 1, WINDOW_TOKENS, WINDOW_TOKENS - 3900);
    window_back(&s, &m, ids, 3000, WINDOW_TOKENS, WINDOW_TOKENS);
    CHECK(state_save(&s, path, err) == 0, "%s", err);
    session_free(&s);
    window_open(&s, &m, 1, KV_FP8);
    CHECK(session_load(&s, path, err) == 0 && s.n_past == WINDOW_TOKENS, "%s", err);
    window_back(&s, &m, ids, WINDOW_TOKENS - 5, WINDOW_TOKENS, 5);
    session_free(&s);
    model_free(&m);
}

/* Going back to the first length that a ring allows, whose window drafts have come near, and going back again from where
 * that ended. Catches a length that forgets the window, the drafts or what the timeline was before it was cut. */
static void check_ring_twice(const struct synth *shape) {
    static int32_t ids[WINDOW_TOKENS];
    struct model m;
    struct session s, loaded;
    char err[ERR_MAX] = "", path[256];
    window_model(&m, shape, ids);
    snprintf(path, sizeof path, "%s/window.kv", test_dir());
    window_open(&s, &m, 1, KV_BF16);
    CHECK(session_sync(&s, ids, 3900, 3900, err) == SYNC_DONE, "%s", err);
    CHECK(session_sync(&s, ids, WINDOW_TOKENS, 4600, err) == SYNC_DONE, "%s", err);
    window_back(&s, &m, ids, 8000, 8010, 10);
    CHECK(state_save(&s, path, err) == 0, "%s", err);
    window_open(&loaded, &m, 1, KV_BF16);
    CHECK(session_load(&loaded, path, err) == 0, "%s", err);
    window_back(&loaded, &m, ids, 4655, 4660, 4660);
    session_free(&loaded);
    window_back(&s, &m, ids, 4602, 4604, 4);  /* of a snapshot whose rows go around the end of the ring */
    window_back(&s, &m, ids, 4590, 4600, 10); /* where the snapshot has the keys of its window */
    window_back(&s, &m, ids, 3902, 3904, 4);  /* short enough for a ring, but the rows were overwritten before */
    window_back(&s, &m, ids, 3500, 3510, 3510);
    CHECK(session_sync(&s, ids, WINDOW_TOKENS - DECODE_MAX_TOKENS, 0, err) == SYNC_DONE, "%s", err);
    session_forward(&s, ids, DECODE_MAX_TOKENS);
    s.n_past -= DECODE_MAX_TOKENS; /* as session_decode takes drafts back */
    struct cache_tensor cache[CACHE_USES];
    layer_cache(&m, &m.layers[0], KV_BF16, cache);
    const int reach = session_reach(&s), oldest = WINDOW_TOKENS - cache[CACHE_K].n_row;
    CHECK(reach - (synth_int(shape, "attention.sliding_window") - 1) == oldest,
          "reach %d, but the oldest row is that of token %d", reach, oldest);
    window_back(&s, &m, ids, reach, reach + 10, 10);
    session_free(&s);
    model_free(&m);
}

static void test_state_ring_twice(void) {
    struct synth shared = compressed_shape;
    synth_set_layers(&shared, 2);
    check_ring_twice(&window_shape);
    check_ring_twice(&shared);
}

/* A token of the delta rule in the state S (d, d) of a value head, in double precision. */
static void recall_exact(double *S, int d, const float *k, const float *v, const float *a, int n_a, float beta) {
    for (int c = 0; c < d; c++) {
        double old = 0;
        for (int i = 0; i < d; i++) old += (S[i * d + c] *= (double)a[n_a > 1 ? i : 0]) * (double)k[i];
        for (int i = 0; i < d; i++) S[i * d + c] += (double)beta * ((double)v[c] - old) * (double)k[i];
    }
}

/* 30,000 tokens of a value head, by the reference and by vectors: the state is that of double precision. The decays, of
 * the head or of each row, are at least 1 - forgets. Without decay, the value of a key that is seen once at the start
 * has to be found at the end. */
static void check_recall(int n_a, double forgets) {
    enum { TOKENS = 30000, DK = 64, DV = 64, EARLY = 5 };
    const struct kernels *kernels[2] = {&kernels_ref, kernels_choose()};
    float S[2][DK * DV] = {{0}}, o[2][DV], q[DK], k[DK], v[DV], a[DK], first[DV] = {0};
    double exact[DK * DV] = {0};
    struct cpu cpu = {.k = &kernels_ref};
    const struct rank r = {.cpu = &cpu};
    uint64_t rng = 11;
    for (int t = 0; t < TOKENS; t++) {
        for (int c = 0; c < DV; c++) {
            q[c] = (float)(rng_uniform(&rng) - 0.5);
            k[c] = (float)(rng_uniform(&rng) - 0.5);
            v[c] = (float)(rng_uniform(&rng) - 0.5);
        }
        k[0] = t == EARLY; /* no other key has a part in this direction */
        for (int c = 1; c < DK && t == EARLY; c++) k[c] = 0;
        for (int c = 0; c < DK && t == TOKENS - 1; c++) q[c] = !c;
        delta_unit(&r, q, DK, 1);
        delta_unit(&r, k, DK, 1);
        if (t == EARLY) memcpy(first, v, sizeof first);
        for (int i = 0; i < DK; i++) a[i] = (float)(1 - forgets * rng_uniform(&rng));
        const float beta = t == EARLY ? 1 : (float)rng_uniform(&rng);
        for (int i = 0; i < 2; i++) kernels[i]->delta_step(S[i], DV, DK, DV, q, k, v, a, n_a, beta, o[i]);
        recall_exact(exact, DK, k, v, a, n_a, beta);
    }
    for (int i = 0; i < 2; i++) {
        double wrong = 0, all = 0;
        for (int c = 0; c < DK * DV; c++) {
            wrong += ((double)S[i][c] - exact[c]) * ((double)S[i][c] - exact[c]);
            all += exact[c] * exact[c];
        }
        CHECK(sqrt(wrong / all) < 1e-4, "%s, %d decays down to 1 - %g: the state after %d tokens: relative error %.3g",
              kernels[i]->name, n_a, forgets, TOKENS, sqrt(wrong / all));
    }
    const double found = nmse(o[1], first, DV);
    CHECK(forgets > 0 || found < 1e-6, "the value of token %d was not found: NMSE %.3g", EARLY, found);
}

/* 30,000 tokens of a head of Mamba-2 that forgets hardly anything, by a set of kernels, against the same in double
 * precision. */
static void check_mamba_recall(const struct kernels *kernels, float forgets) {
    enum { TOKENS = 30000, DK = 48, DV = 40 };
    static float S[DK * DV];
    static double exact[DK * DV];
    float o[DV], q[DK], k[DK], v[DV];
    double want[DV], s2 = 0, s_error = 0, o2 = 0, o_error = 0;
    uint64_t rng = 13;
    memset(S, 0, sizeof S);
    memset(exact, 0, sizeof exact);
    for (int t = 0; t < TOKENS; t++) {
        const float dt = (float)rng_uniform(&rng), a = expf(-forgets * dt);
        for (int i = 0; i < DK; i++) q[i] = (float)rng_uniform(&rng) - 0.3f, k[i] = (float)rng_uniform(&rng) - 0.3f;
        for (int c = 0; c < DV; c++) v[c] = (float)rng_uniform(&rng) - 0.3f;
        kernels->mamba_step(S, DV, DK, DV, q, k, v, &a, 1, dt, o);
        memset(want, 0, sizeof want);
        for (int i = 0; i < DK; i++)
            for (int c = 0; c < DV; c++) {
                double *x = &exact[i * DV + c];
                *x = (double)a * *x + (double)k[i] * (double)dt * (double)v[c];
                want[c] += *x * (double)q[i];
            }
    }
    for (int i = 0; i < DK * DV; i++) s2 += exact[i] * exact[i], s_error += pow((double)S[i] - exact[i], 2);
    for (int c = 0; c < DV; c++) o2 += want[c] * want[c], o_error += pow((double)o[c] - want[c], 2);
    CHECK(sqrt(s_error / s2) <= 1e-4 && sqrt(o_error / o2) <= 1e-4,
          "%s, forgetting %g: relative errors of the state %.3g, of the result %.3g", kernels->name, (double)forgets,
          sqrt(s_error / s2), sqrt(o_error / o2));
    CHECK(sqrt(s2) > 1e3, "the state holds what has come: %g", sqrt(s2));
}

static void test_state_recall(void) {
    check_recall(1, 0);
    check_recall(1, 0.1);
    check_recall(64, 0);
    check_recall(64, 1e-5);
    for (int i = 0; i < 2; i++) {
        check_mamba_recall(i ? kernels_choose() : &kernels_ref, 0);
        check_mamba_recall(i ? kernels_choose() : &kernels_ref, 1e-6f);
    }
}

/* A chat: the next turn goes back to the end of the user's message where the template drops thinking; /undo and /regen
 * compute what a fresh chat would. */
static void test_state_chat(void) {
    static const char *const turns[] = {"What is 7 squared? One word.", "And 8 squared?"};
    struct model m;
    struct session s;
    struct chat c, d;
    char err[ERR_MAX] = "";
    if (!demo_load(&m)) return;
    state_adopt(&m);
    struct settings set;
    settings_init(&set);
    set.greedy = true;
    set.n_predict = 5;
    set.mute = true;
    session_open_cpu(&s, &m, 1, 1, (struct cpu_options){&kernels_ref, 2, 512, KV_F32, false, false, {0}});
    if (!CHECK(chat_init(&c, &set, &m, &s, err) == 0, "%s", err)) return;
    enum turn_result r = TURN_DONE;
    fflush(stdout); /* answers are not for the list of tests */
    const int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    for (int i = 0; i < 2; i++) {
        struct session fresh;
        CHECK(chat_turn(&c, turns[i], strlen(turns[i]), err) == TURN_DONE, "%s", err);
        if (i == 1) {
            CHECK(chat_undo(&c, err) == 0 && chat_turn(&c, turns[i], strlen(turns[i]), err) == TURN_DONE, "%s", err);
            CHECK(chat_regenerate(&c, &r, err) == 0 && r == TURN_DONE, "%s", err);
        }
        session_open_cpu(&fresh, &m, 1, 1, (struct cpu_options){&kernels_ref, 2, 512, KV_F32, false, false, {0}});
        if (!CHECK(chat_init(&d, &set, &m, &fresh, err) == 0, "%s", err)) break;
        const struct message *answer = &arrlast(c.messages);
        for (size_t k = 0; k + 1 < arrlenu(c.messages); k++)
            chat_push(&d, c.messages[k].role, c.messages[k].content, strlen(c.messages[k].content));
        CHECK(chat_answer(&d, err) == TURN_DONE, "%s", err);
        CHECK(!strcmp(arrlast(d.messages).content, answer->content), "turn %d: '%s', a fresh chat says '%s'", i + 1,
              answer->content, arrlast(d.messages).content);
        chat_free(&d);
        session_free(&fresh);
    }
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out);
    close(null);
    chat_free(&c);
    settings_free(&set);
    session_free(&s);
    model_free(&m);
}

/* A template as the family's releases have: the thinking of earlier turns is dropped. */
static const char dialogue_template[] =
    "{%- for m in messages %}{%- set c = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in c %}{%- set c = c.split('</think>')[-1] %}{%- endif %}"
    "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

/* Opens a session and a chat on it. */
static bool dialogue_open(struct chat *c, struct session *s, struct settings *set, const struct model *m) {
    char err[ERR_MAX];
    session_open_cpu(s, m, 1, 1, (struct cpu_options){&kernels_ref, 1, 2048, KV_F32, false, false, {0}});
    return CHECK(chat_init(c, set, m, s, err) == 0, "%s", err);
}

/* The last answer is the one that a fresh chat without drafts gives to the same messages. */
static void check_dialogue(const struct chat *c, int turn) {
    struct settings plain = *c->set;
    struct session s;
    struct chat fresh;
    char err[ERR_MAX] = "";
    const struct message *answer = &arrlast(c->messages);
    plain.draft_min = plain.draft_max = 0;
    if (!dialogue_open(&fresh, &s, &plain, c->m)) return;
    for (size_t k = 0; k + 1 < arrlenu(c->messages); k++)
        chat_push(&fresh, c->messages[k].role, c->messages[k].content, strlen(c->messages[k].content));
    CHECK(chat_answer(&fresh, err) == TURN_DONE, "%s", err);
    CHECK(!strcmp(arrlast(fresh.messages).content, answer->content), "turn %d: '%s', a fresh chat says '%s'", turn,
          answer->content, arrlast(fresh.messages).content);
    chat_free(&fresh);
    session_free(&s);
}

/* Twenty turns, the first a long one, thinking dropped by the template, with /undo, /regen, /save and /load, and with
 * drafts. */
static void run_dialogue(const struct model *m, struct settings *set) {
    struct session s;
    struct chat c;
    char err[ERR_MAX] = "", name[256], text[400];
    enum turn_result r = TURN_DONE;
    int computed = 0, total = 0; /* tokens of prompts that were computed; tokens of all prompts */
    int first = 0;               /* tokens of the first prompt */
    snprintf(name, sizeof name, "%s/dialogue", test_dir());
    if (!dialogue_open(&c, &s, set, m)) return;
    for (int i = 0; i < 20; i++) {
        int n = snprintf(text, sizeof text, "Turn %d: what is %d and %d?", i, 7 * i, i * i);
        while (!i && n < (int)sizeof text - 20) n += snprintf(text + n, sizeof text - (size_t)n, " And %d?", n);
        CHECK(chat_turn(&c, text, strlen(text), err) == TURN_DONE, "%s", err);
        computed += s.sync_tokens;
        if (!i) first = s.sync_tokens;
        CHECK(i != 1 || (first > 250 && s.sync_tokens < 80), "turn 2 computes %d tokens after a prompt of %d",
              s.sync_tokens, first);
        total += s.n_past;
        if (i % 6 == 4) {
            CHECK(chat_undo(&c, err) == 0 && chat_turn(&c, text, strlen(text), err) == TURN_DONE, "%s", err);
            CHECK(chat_regenerate(&c, &r, err) == 0 && r == TURN_DONE, "%s", err);
        }
        if (i % 7 == 6) {
            CHECK(chat_save(&c, name, true, err) == 0, "%s", err);
            chat_free(&c);
            session_free(&s);
            if (!dialogue_open(&c, &s, set, m)) return;
            CHECK(chat_load(&c, name, err) == 0, "%s", err);
        }
        if (i % 3 == 1 || i == 19) check_dialogue(&c, i + 1);
    }
    CHECK(computed < total / 4, "%d of %d tokens of prompts were computed", computed, total);
    chat_free(&c);
    session_free(&s);
}

static void test_state_dialogue(void) {
    char path[256];
    snprintf(path, sizeof path, "%s/think.jinja", test_dir());
    FILE *f = fopen(path, "w");
    CHECK(f && fputs(dialogue_template, f) >= 0 && !fclose(f), "%s", strerror(errno));
    fflush(stdout); /* answers are not for the list of tests */
    const int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    for (int which = 1; which < STATE_MODELS; which++) {
        struct model m;
        struct settings set;
        if (!fixture_load(state_models[which], &m)) break;
        settings_init(&set);
        set.greedy = true;
        set.n_predict = 12;
        set.mute = true;
        set.draft_min = which; /* drafts in every round */
        set.template_file = xstrdup(path);
        dup2(null, STDOUT_FILENO);
        run_dialogue(&m, &set);
        fflush(stdout);
        dup2(out, STDOUT_FILENO);
        settings_free(&set);
        model_free(&m);
    }
    close(out);
    close(null);
}

/* A turn of 18 tokens of which the budget ends the thinking. Whatever is drafted, the answer is the one to a prompt that holds
 * the same thinking; *text: the message, which the caller frees. */
static void run_ended(const struct model *m, struct settings *set, char **text) {
    struct session s, fresh;
    struct chat c;
    char err[ERR_MAX] = "";
    const struct sampling o = settings_sampling(set);
    uint64_t rng = 1;
    static const char question[] = "What is 7 squared?", end[] = "\n</think>\n\n";
    if (!dialogue_open(&c, &s, set, m)) return;
    CHECK(chat_turn(&c, question, strlen(question), err) == TURN_DONE, "%s", err);
    *text = xstrdup(arrlast(c.messages).content);
    const int beyond = c.last.think_tokens - set->think_budget; /* thinking ends with a whole character */
    CHECK(c.last.think_end == THINK_END_BUDGET && beyond >= 0 && beyond < 4 && strstr(*text, end),
          "after %d tokens of %d: '%s'", c.last.think_tokens, set->think_budget, *text);
    int32_t *ids = NULL;
    tokenize(m->vocab, end, strlen(end), NULL, TOKENIZE_CONTROL | TOKENIZE_WITHIN, &ids);
    int n = c.answer_past + c.last.think_tokens;
    const int n_end = (int)arrlen(ids);
    CHECK(n + n_end < s.n_past && !memcmp(s.tokens + n, ids, (size_t)n_end * sizeof *ids), "its end in tokens");
    n += n_end;
    session_open_cpu(&fresh, m, 1, 1, (struct cpu_options){&kernels_ref, 2, 2048, KV_F32, false, false, {0}});
    CHECK(n < s.n_past && session_sync(&fresh, s.tokens, n, 0, err) == SYNC_DONE, "%d of %d: %s", n, s.n_past, err);
    for (; n < s.n_past; n++) {
        const int32_t id = session_sample(&fresh, &o, &rng);
        if (!CHECK(id == s.tokens[n], "token %d is %d, after such a prompt %d", n, s.tokens[n], id)) break;
        session_decode(&fresh, id);
    }
    arrfree(ids);
    chat_free(&c);
    session_free(&fresh);
    session_free(&s);
}

static void test_state_ended(void) {
    char path[256];
    snprintf(path, sizeof path, "%s/think.jinja", test_dir());
    write_test_file(path, dialogue_template, strlen(dialogue_template));
    for (int which = 1; which < STATE_RECURRENT; which++) { /* those after them end their thinking by themselves */
        struct model m;
        struct settings set;
        if (!fixture_load(state_models[which], &m)) break;
        settings_init(&set);
        set.greedy = set.mute = true;
        set.n_predict = 18;
        set.template_file = xstrdup(path);
        for (set.think_budget = 0; set.think_budget < 6; set.think_budget += 4) {
            char *text[2] = {NULL};
            for (int k = 0; k < 2; k++) {
                set.draft_min = set.draft_max = 3 * k;
                run_ended(&m, &set, &text[k]);
            }
            CHECK_STR(text[1], text[0], "with drafts");
            for (int k = 0; k < 2; k++) free(text[k]);
        }
        settings_free(&set);
        model_free(&m);
    }
}

/* The same keys are chosen whatever the chunks, also where a chunk begins before top_k tokens and ends after them, and
 * after a truncation. Each layout has every second size of chunks, in turn. Catches keys of an indexer that are not written where all are seen, and choices of another token
 * of the batch. */
static void test_state_chosen(void) {
    static const char *const names[] = {"deepseek_v32", "glm_moe_dsa_types", "minimax_m3", "glm5_next_nvfp4"};
    static const int chunks[] = {1, 3, 10, 15, 16, 17, 23, 90};
    int32_t ids[96];
    for (int f = 0; f < 4; f++) {
        struct model m;
        struct session s;
        char err[ERR_MAX] = "";
        if (!fixture_load(names[f], &m)) return;
        some_ids(ids, 96, m.n_vocab);
        for (int k = 0; k < STATE_LAYOUTS; k++) {
            const int tp = state_layouts[k][0], pp = state_layouts[k][1];
            float *want = state_fresh(&m, tp, pp, KV_F32, ids, 96, 96);
            for (size_t i = (size_t)(f + k) % 2; i < sizeof chunks / sizeof *chunks; i += 2) {
                float *got = state_fresh(&m, tp, pp, KV_F32, ids, 96, chunks[i]);
                const double e = nmse(got, want, (size_t)m.n_vocab);
                CHECK(e < 1e-9, "%s, --tp %d --pp %d, chunks of %d: NMSE %.3g", names[f], tp, pp, chunks[i], e);
                free(got);
            }
            session_open_cpu(&s, &m, tp, pp, (struct cpu_options){&kernels_ref, 2, 128, KV_F32, false, false, {0}});
            CHECK(session_sync(&s, ids, 70, 0, err) == SYNC_DONE, "%s", err);
            session_decode(&s, 3);
            session_truncate(&s, 70);
            CHECK(session_sync(&s, ids, 96, 0, err) == SYNC_DONE, "%s", err);
            const double e = nmse(session_logits(&s), want, (size_t)m.n_vocab);
            CHECK(e < 1e-9, "%s, --tp %d --pp %d, after a truncation: NMSE %.3g", names[f], tp, pp, e);
            session_free(&s);
            free(want);
        }
        model_free(&m);
    }
}

/* A session in chunks: the first of `first` tokens, then the rest. Compares the logits after both with those of one
 * forward over all, `want` (n, n_vocab). */
static void check_edge(const char *name, const struct model *m, int tp, int pp, const int32_t *ids, int n, int first,
                       const float *want) {
    struct session s;
    const size_t row = (size_t)m->n_vocab;
    session_open_cpu(&s, m, tp, pp, (struct cpu_options){&kernels_ref, 1, n, KV_F32, false, false, {0}});
    for (int at = 0, some = first; at < n; at += some, some = n - at) {
        session_forward(&s, ids + at, some);
        session_head(&s, some - 1, 1);
        const double e = nmse(session_logits(&s), want + (size_t)(at + some - 1) * row, row);
        CHECK(e < 1e-9, "%s, --tp %d --pp %d, an edge at %d, after %d tokens: NMSE %.3g", name, tp, pp, first,
              at + some, e);
    }
    session_free(&s);
}

/* A session of n tokens that goes back to `back`, where it has read `wrong` other tokens. */
static void check_cut(const char *name, const struct model *m, const int32_t *ids, int n, int back, int wrong,
                      const float *want) {
    struct session s;
    char err[ERR_MAX] = "";
    const size_t row = (size_t)m->n_vocab;
    session_open_cpu(&s, m, 1, 1, (struct cpu_options){&kernels_ref, 1, n + 16, KV_F32, false, false, {0}});
    CHECK(session_sync(&s, ids, back, 0, err) == SYNC_DONE, "%s", err);
    for (int i = 0; i < wrong; i++) session_decode(&s, (ids[back + i] + 7) % m->n_vocab);
    session_truncate(&s, back);
    CHECK(session_sync(&s, ids, n, 0, err) == SYNC_DONE, "%s", err);
    const double e = nmse(session_logits(&s), want + (size_t)(n - 1) * row, row);
    CHECK(e < 1e-9, "%s, %d wrong tokens after %d: NMSE %.3g", name, wrong, back, e);
    session_free(&s);
}

/* Compressed keys of DeepSeek-V4 are the same wherever chunks end: at every place in a key of 4 tokens, around the ends
 * of those of 128, token by token; and after a truncation into a key that is not whole yet. Catches keys made of the
 * wrong rows, a key that a truncation keeps, and halves of the key before that are lost between chunks. */
static void test_state_compressed(void) {
    static const char *const names[] = {"deepseek_v4", "deepseek_v4_pro", "deepseek_v41"};
    static const int edges[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 125, 126, 127, 128, 129, 130, 131, 132, 255, 256, 257};
    static const int backs[][2] = {{5, 6}, {8, 1}, {126, 4}, {127, 16}, {128, 3}, {129, 9}, {130, 1}, {250, 8}};
    enum { LESS = 140, N = 264 }; /* tokens: with one and with two keys of 128 */
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        struct model m;
        int32_t *ids;
        float *ref;
        if (!fixture_load(names[f], &m)) return;
        const int most = int_min(N, fixture_logits(names[f], &m, &ids, &ref));
        float *want = all_logits(&m, &kernels_ref, KV_F32, 1, ids, most);
        for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
            const int n = edges[i] < LESS - 4 ? LESS : N;
            if ((f && i % 2) || n > most) continue;
            check_edge(names[f], &m, 1, 1, ids, n, edges[i], want);
            if (edges[i] % 3 == 2) check_edge(names[f], &m, 2, 2, ids, n, edges[i], want);
        }
        for (size_t i = 0; i < sizeof backs / sizeof *backs; i++) {
            const int n = backs[i][0] < LESS - 4 ? LESS : N;
            if (n <= most) check_cut(names[f], &m, ids, n, backs[i][0], backs[i][1], want);
        }
        float *one = state_fresh(&m, 1, 1, KV_F32, ids, 140, 1);
        const double e = nmse(one, want + 139 * (size_t)m.n_vocab, (size_t)m.n_vocab);
        CHECK(e < 1e-9, "%s, token by token: NMSE %.3g", names[f], e);
        free(one), free(want);
        arrfree(ids), arrfree(ref);
        model_free(&m);
    }
}

/* Going back where drafts have overwritten all rows of the rings that compressed keys are made of that they may: to the
 * first length that these allow, at every place in a key; one token before that from a snapshot, and from there as far as
 * its own rows reach. Catches a length that forgets tokens that a key is made of, rings with a row less than that takes,
 * and snapshots and files without some of the rings. */
static void check_compressed_back(const struct model *m, const int32_t ids[160]) {
    enum { MARK = 60, NEW = 20 };
    static const int before[] = {0, 1, MAX_ROLLBACK}; /* the snapshot; 0: the first length that rings allow */
    int32_t other[160];
    char err[ERR_MAX] = "";
    for (int i = 0; i < (SANITIZED ? 2 : 4); i++) {
        const int mark = MARK + i, n = 110 + i, *const layout = state_layouts[i % STATE_LAYOUTS];
        for (int back = 0; back < 3; back++) {
            struct session s;
            state_open(&s, m, layout[0], layout[1], KV_F32);
            CHECK(session_sync(&s, ids, n, mark, err) == SYNC_DONE, "%s", err);
            session_forward(&s, ids, DECODE_MAX_TOKENS);
            s.n_past -= DECODE_MAX_TOKENS; /* as session_decode takes drafts back */
            const int reach = session_reach(&s), at = back ? mark - before[back] : reach;
            CHECK(reach == n - DECODE_MAX_TOKENS, "%s: reach %d of %d", m->name, reach, n);
            if (back) CHECK(session_truncate(&s, reach - 1) == mark, "%s: no snapshot after %d tokens", m->name, mark);
            memcpy(other, ids, sizeof other);
            other[at] ^= 1;
            state_sync(&s, m, other, n + NEW, 0, n + NEW - at, back ? "after a snapshot" : "within rings");
            session_free(&s);
        }
    }
}

/* DeepSeek-V4, and layers of Qwen3.8-Flash-Next without recurrent ones, which could not go back. */
static void test_state_compressed_back(void) {
    /* clang-format off */
    static const struct synth means = {"means of keys", "qwen4exp", .keys =
        "block_count=2 embedding_length=64 attention.head_count=4 attention.head_count_kv=2 attention.key_length=16 "
        "rope.dimension_count=8 ssm.conv_kernel=4 ssm.group_count=2 ssm.time_step_rank=4 ssm.state_size=32 "
        "ssm.inner_size=128 full_attention_interval=1 hyper_connection.count=2 hyper_connection.low_rank=32 "
        "attention.indexer.head_count=3 attention.indexer.key_length=16 attention.indexer.top_k=60 "
        "attention.compress_ratios=5,3 expert_count=8 expert_used_count=2 expert_feed_forward_length=64 "
        "expert_shared_count=1 vocab_size=96 context_length=256 rope.freq_base=1e7"};
    /* clang-format on */
    int32_t ids[160];
    struct model m;
    if (!state_model(&m, ids, 160, STATE_MODELS)) return;
    check_compressed_back(&m, ids);
    model_free(&m);
    memset(&m, 0, sizeof m);
    synth_make(&m, &means, NULL, false);
    for (int i = 0; i < 160; i++) ids[i] %= m.n_vocab;
    check_compressed_back(&m, ids);
    model_free(&m);
}

#define TESTS_STATE                                                                                                    \
    {"state/chunks", test_state_chunks}, {"state/matters", test_state_matters},                                        \
        {"state/truncation", test_state_truncation}, {"state/recall", test_state_recall},                              \
        {"state/snapshots", test_state_snapshots}, {"state/alone", test_state_alone}, {"state/file", test_state_file}, \
        {"state/resize", test_state_resize}, {"state/chat", test_state_chat}, {"state/dialogue", test_state_dialogue}, \
        {"state/ended", test_state_ended}, {"state/ring", test_state_ring}, {"state/ring-back", test_state_ring_back}, \
        {"state/ring-twice", test_state_ring_twice}, {"state/ring-shared", test_state_ring_csa},                       \
        {"state/sinks", test_state_sinks}, {"state/chosen", test_state_chosen},                                        \
        {"state/compressed", test_state_compressed}, {"state/compressed-back", test_state_compressed_back},
