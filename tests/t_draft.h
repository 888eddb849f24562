/* Drafts: the text with them is the text without them, byte for byte, whatever is drafted and however much of it is
 * right. */

/* What the MTP layer says is replaced by tokens of a known text, or by others. */
enum draft_force { FORCE_NOTHING, FORCE_RIGHT, FORCE_WRONG, FORCE_HALF };

static struct {
    const struct ops *plain;
    enum draft_force how;
    const int32_t *text; /* by position */
    int n;
    uint64_t rng;
} forced;

/* The choice of a draft becomes what is wanted. The draft stands two positions after the last one of the pass. */
static int forced_read_tokens(struct rank *r, int32_t *chosen, bool *on_device) {
    const int n = forced.plain->read_tokens(r, chosen, on_device), at = r->pos + r->n_tok + 1;
    if (r->pass != PASS_DRAFT || forced.how == FORCE_NOTHING || at >= forced.n) return n;
    const bool right = forced.how == FORCE_RIGHT || (forced.how == FORCE_HALF && rng_next(&forced.rng) >> 63);
    chosen[0] = right ? forced.text[at] : (forced.text[at] + 1) % r->m->n_ids;
    return n;
}

/* Makes the session draft so. ops: memory for its table. */
static void force_drafts(struct session *s, struct ops *ops, enum draft_force how, const int32_t *text, int n) {
    forced.plain = s->r->ops;
    forced.how = how;
    forced.text = text;
    forced.n = n;
    forced.rng = 3;
    *ops = *s->r->ops;
    ops->read_tokens = forced_read_tokens;
    s->r->ops = ops;
}

/* Computes ids[0..n) in chunks of at most `chunk`, of a session that then can come back to them. */
static void draft_prompt(struct session *s, const int32_t *ids, int n, int chunk) {
    session_truncate(s, 0);
    for (int at = 0; at < n; at += chunk) session_forward(s, ids + at, int_min(chunk, n - at));
    session_keep(s);
}

/* Generates n tokens after ids[0..n_ids), with n_min to n_max drafts a round. The first `kept` ids are in the session;
 * the others are computed in chunks of at most `chunk`. */
static void draft_resume(struct session *s, const struct sampling *o, uint64_t seed, int n_min, int n_max,
                         const int32_t *ids, int n_ids, int kept, int chunk, int32_t *out, int n) {
    drafts_reset(s->drafts);
    drafts_limit(s->drafts, n_min, n_max, 0);
    memset(s->drafted, 0, sizeof s->drafted);
    CHECK_INT(session_truncate(s, kept), kept, "ids in the session");
    for (int at = kept; at < n_ids; at += chunk) session_forward(s, ids + at, int_min(chunk, n_ids - at));
    session_head(s, s->r->n_tok - 1, 1);
    for (int i = 0; i < n; i++) {
        out[i] = session_sample(s, o, &seed);
        if (i + 1 < n) session_decode(s, out[i]);
    }
}

/* The same, where none is. */
static void draft_run(struct session *s, const struct sampling *o, uint64_t seed, int n_min, int n_max,
                      const int32_t *ids, int n_ids, int chunk, int32_t *out, int n) {
    draft_resume(s, o, seed, n_min, n_max, ids, n_ids, 0, chunk, out, n);
}

static const struct sampling draft_samplings[] = {{.greedy = true, .repeat_penalty = 1},
                                                  {.greedy = true, .repeat_penalty = 1.3f},
                                                  {.temp = 0.8f, .top_k = 40, .top_p = 0.95f, .repeat_penalty = 1},
                                                  {.temp = 0.8f, .top_k = 40, .top_p = 1, .repeat_penalty = 1.1f}};
enum { DRAFT_SAMPLINGS = sizeof draft_samplings / sizeof *draft_samplings };

static const char *const draft_models[] = {
    "deepseek_v3_mtp", "deepseek_v3_plain", "qwen3_5_moe_nvfp4", "qwen3_next",     "hy_v3",          "glm4_moe",
    "step3p7",         "mimo_v2_flash_fp8", "glm_moe_dsa_types", "deepseek_v4",    "bailing_hybrid", "nemotron_h",
    "glm5_next",       "qwen4_exp",         "qwen4_exp_nvfp4",   "bailing_moe_v2", "hy_v4"};
enum { DRAFT_MODELS = sizeof draft_models / sizeof *draft_models };

/* Compares texts of sampling k with all depths, drafts chosen by the model and forced, with that of plain decoding. all:
 * with every depth, otherwise with one or two. Every sampling has the prompt in chunks of its own; the last token of it is
 * computed alone, so that all texts begin with the same state. */
static void check_same_text(const char *name, struct session *s, const char *kernels, int k, int n, bool all) {
    static const int depths[][2] = {{1, 1}, {2, 2}, {3, 3}, {DRAFTS_MAX, DRAFTS_MAX}, {0, 3}};
    static const int chunks[DRAFT_SAMPLINGS] = {36, 16, 7, 1};
    enum { PROMPT = 37, DEPTHS = sizeof depths / sizeof *depths };
    const struct sampling *o = &draft_samplings[k];
    int32_t *want = xmalloc(((size_t)PROMPT + (size_t)n) * sizeof *want), *got = xmalloc((size_t)n * sizeof *got);
    const size_t n_vocab = (size_t)s->m->n_vocab;
    float *logits = xmalloc(n_vocab * sizeof *logits);
    const struct ops *plain = s->r->ops;
    struct ops ops;
    some_ids(want, PROMPT, s->m->n_vocab);
    draft_prompt(s, want, PROMPT - 1, chunks[k]);
    draft_resume(s, o, 7, 0, 0, want, PROMPT, PROMPT - 1, 1, want + PROMPT, n);
    memcpy(logits, session_logits(s), n_vocab * sizeof *logits);
    for (int d = 0; d < DEPTHS; d++) {
        const enum draft_force how = (enum draft_force)((k + d) % 4);
        if (!all && (d + n) % DRAFT_SAMPLINGS != k) continue;
        force_drafts(s, &ops, how, want, PROMPT + n);
        s->first_ids = d % 2 ? 100 : s->m->n_ids;
        draft_resume(s, o, 7, depths[d][0], depths[d][1], want, PROMPT, PROMPT - 1, 1, got, n);
        s->r->ops = plain;
        int same = 0;
        while (same < n && got[same] == want[PROMPT + same]) same++;
        CHECK(same == n && !memcmp(session_logits(s), logits, n_vocab * sizeof *logits),
              "%s, %s, sampling %d, %d drafts (%d): token %d of %d differs", name, kernels, k, depths[d][1], how, same,
              n);
        const struct draft_stats *t = &s->drafted[DRAFT_BY_MTP];
        CHECK(how != FORCE_RIGHT || depths[d][0] == 0 || t->right[0] == t->drafted[0], "%s: right drafts were refused",
              name);
        CHECK(how != FORCE_WRONG || t->right[0] <= t->drafted[0] / 20, "%s: wrong drafts were taken", name);
    }
    free(want);
    free(got);
    free(logits);
}

/* n tokens after a prompt; is_short: of a session that has computed nothing yet, whose ring of hidden states becomes so
 * short that the MTP layer must catch up again and again. */
static void short_ring_text(struct session *s, bool is_short, int32_t *text, int n) {
    enum { PROMPT = 30, CHUNK = 4 };
    int32_t ids[PROMPT];
    some_ids(ids, PROMPT, s->m->n_vocab);
    for (int i = 0; i < s->pg->n && is_short; i++) s->pg->ranks[i].n_mtp_hidden = DECODE_MAX_TOKENS + CHUNK + 1;
    draft_run(s, &draft_samplings[3], 21, 0, 0, ids, PROMPT, CHUNK, text, n);
    CHECK(is_short == (s->n_predicted > PROMPT), "the prediction layer has made %d rows", s->n_predicted);
}

/* A turn after an answer gives the same logits whatever was drafted in the answer, also where the end of the answer is
 * taken back: rounds end with other lags of recurrent states. which: 0 to 3, the length of the answer. */
static void check_next_turn(const char *name, struct session *s, const char *kernels, int which) {
    enum { PROMPT = 40, MARK = 30, ANSWER = 21, NEW = 40, ALL = PROMPT + ANSWER + NEW };
    static const struct {
        int answer, cut; /* tokens; tokens taken back at its end */
    } cases[DRAFT_SAMPLINGS] = {{6, 0}, {ANSWER, 0}, {ANSWER, 1}, {9, 3}};
    static const int depths[] = {0, 2, 5};
    const size_t bytes = (size_t)s->m->n_vocab * sizeof(float);
    float *want = xmalloc(bytes);
    int32_t ids[ALL];
    char err[ERR_MAX];
    for (size_t d = 0; d < sizeof depths / sizeof *depths; d++) {
        const int depth = depths[d];
        uint64_t seed = 5;
        drafts_reset(s->drafts);
        drafts_limit(s->drafts, depth, depth, 0);
        session_truncate(s, 0);
        some_ids(ids, ALL, s->m->n_vocab);
        CHECK(session_sync(s, ids, PROMPT, MARK, err) == SYNC_DONE, "%s", err);
        for (int k = 0; k < cases[which].answer; k++) {
            ids[PROMPT + k] = session_sample(s, &draft_samplings[2], &seed);
            session_decode(s, ids[PROMPT + k]);
        }
        const int n = PROMPT + cases[which].answer - cases[which].cut;
        some_ids(ids + n, ALL - n, s->m->n_vocab);
        CHECK(session_sync(s, ids, n + NEW, n + NEW / 2, err) == SYNC_DONE, "%s", err);
        if (!depth) memcpy(want, session_logits(s), bytes);
        CHECK(!memcmp(want, session_logits(s), bytes),
              "%s, %s: other logits in the turn after %d tokens less %d with %d drafts", name, kernels,
              cases[which].answer, cases[which].cut, depth);
    }
    free(want);
}

/* Set of kernels number i of those that this machine runs; further numbers begin again. */
static const struct kernels *draft_kernels(int i) {
    enum { SETS = sizeof kernel_sets / sizeof *kernel_sets };
    const struct kernels *runnable[SETS];
    int n = 0;
    for (int k = 0; k < SETS; k++)
        if (kernels_runnable(kernel_sets[k])) runnable[n++] = kernel_sets[k];
    return runnable[i % n];
}

/* Kernels change from sampling to sampling, and begin with another set in the next model: each set meets every mixer. The
 * models from the fifth on take one sampling for each depth. */
static void test_draft_text(void) {
    for (int f = 0; f < DRAFT_MODELS; f++) {
        const char *const name = draft_models[f];
        struct model m;
        if (!fixture_load(name, &m)) return;
        for (int k = 0; k < DRAFT_SAMPLINGS; k++) {
            const struct kernels *const kernels = draft_kernels(f + k);
            const enum kv_type kv[] = {KV_F32, KV_BF16, KV_FP8};
            const int tp = 1 + (f + k / 2) % 2;
            struct session s;
            session_open_cpu(&s, &m, tp, 1, (struct cpu_options){kernels, tp, 512, kv[(f + k) % 3], false, false, {0}});
            check_same_text(name, &s, kernels->name, k, 24, f < 4);
            check_next_turn(name, &s, kernels->name, k);
            if (k == f % DRAFT_SAMPLINGS) {
                int32_t text[2][20];
                for (int is_short = 0; is_short < 2; is_short++) short_ring_text(&s, is_short, text[is_short], 20);
                CHECK(!memcmp(text[0], text[1], sizeof text[0]), "%s: another text with a short ring", name);
            }
            session_free(&s);
        }
        model_free(&m);
    }
}

/* The demo model's own drafts: most are right, and the texts are the same. */
static void test_draft_demo(void) {
    enum { N = 120 };
    static const int depths[][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {0, 3}};
    struct model m;
    struct session s;
    char err[ERR_MAX], *text = NULL;
    int32_t *ids = NULL, out[2][N];
    if (!demo_load(&m) || !CHECK(!read_file("prompts/haystack.txt", &text, err), "%s", err)) return;
    tokenize_all(m.vocab, text, 1200, false, &ids);
    session_cpu(&s, &m, kernels_choose(), 1, 1024, KV_BF16);
    draft_prompt(&s, ids, 199, 199);
    for (int k = 0; k < DRAFT_SAMPLINGS; k++)
        for (int d = 0; d < 5; d++) {
            draft_resume(&s, &draft_samplings[k], 11, depths[d][0], depths[d][1], ids, 200, 199, 1, out[d > 0], N);
            CHECK(!d || !memcmp(out[0], out[1], sizeof out[0]), "sampling %d: another text with %d to %d drafts", k,
                  depths[d][0], depths[d][1]);
            const struct draft_stats *t = &s.drafted[DRAFT_BY_MTP];
            CHECK(depths[d][0] != 1 || k || 2 * t->right[0] > t->drafted[0], "%ld of %ld drafts were right",
                  t->right[0], t->drafted[0]);
        }
    session_free(&s);
    arrfree(ids);
    arrfree(text);
    model_free(&m);
}

/* Drafts are the best of the first ids, and of all ids once the text has too many others. */
static void test_draft_ids(void) {
    enum { PROMPT = 24, K = 3 };
    for (int tp = 1; tp <= 2; tp++) {
        struct model m;
        struct session s;
        int32_t ids[PROMPT], drafts[3][K] = {{0}};
        if (!fixture_load("deepseek_v3_mtp", &m)) return;
        session_open_cpu(&s, &m, tp, 1, (struct cpu_options){kernels_choose(), 2, 64, KV_F32, false, false, {0}});
        CHECK(s.first_ids == m.n_ids, "drafts have %d of %d ids", s.first_ids, m.n_ids);
        some_ids(ids, PROMPT, m.n_vocab);
        for (int i = 0; i < 3; i++) { /* all ids, the first ones, all again */
            drafts_reset(s.drafts);
            s.drafts->other_ids = i == 2;
            s.first_ids = i ? drafts[0][0] : m.n_ids; /* without the best one */
            session_truncate(&s, 0);
            session_forward(&s, ids, PROMPT - 1);
            s.tokens[s.n_past] = ids[PROMPT - 1];
            sessions_draft((struct session *[]){&s}, (int[]){K}, 1);
            memcpy(drafts[i], s.tokens + s.n_past + 1, sizeof drafts[i]);
            for (int k = 0; k < K && i == 1; k++)
                CHECK(drafts[1][k] < drafts[0][0], "draft %d of the first %d ids is %d", k, drafts[0][0], drafts[1][k]);
        }
        CHECK(!memcmp(drafts[0], drafts[2], sizeof *drafts), "other drafts where most tokens have other ids");
        for (int i = 0; i < DRAFT_MEMORY; i++) drafts_token(s.drafts, false);
        CHECK(session_draft_ids(&s) == m.n_ids, "a text without other ids counts at once");
        for (int i = 0; i < 2 * DRAFT_MEMORY; i++) drafts_token(s.drafts, false);
        CHECK(session_draft_ids(&s) == drafts[0][0], "a text without other ids does not count");
        session_free(&s);
        model_free(&m);
    }
}

/* A byte of every cache tensor's rows in use, for the whole model: malloc'ed, *n of them. Rows of a ring that nothing will read
 * are left out, because drafts that were not taken lie there. */
static uint8_t *draft_cache(struct session *s, size_t *n) {
    uint8_t *all = NULL;
    for (int i = 0; i < s->pg->n; i++) {
        struct rank *r = &s->pg->ranks[i];
        for (int k = 0; k < s->m->n_layer * CACHE_USES; k++) {
            const struct cache_tensor *p = &r->cache[k / CACHE_USES][k % CACHE_USES];
            const size_t rows = cache_rows_of(p, (size_t)s->n_past), scales = cache_scale_bytes(p);
            for (size_t row = 0; row < rows; row++) {
                const int kept = s->n_past - s->n_committed + p->window;
                const size_t age = ((size_t)s->n_past - 1 + (size_t)p->n_row - row) % (size_t)int_max(p->n_row, 1);
                if (p->kind == ROWS_RING && age >= (size_t)kept) continue;
                uint8_t *at = arraddnptr(all, p->row_bytes + scales);
                r->ops->cache_copy(r, p, row, 1, at, scales ? (float *)(void *)(at + p->row_bytes) : NULL, false);
            }
        }
    }
    *n = arrlenu(all);
    return all;
}

/* Rounds whose drafts are all right, all wrong or right by chance leave the state that plain decoding leaves. One more
 * token without drafts makes recurrent states absorb the same tokens in both. */
static void check_state(const char *name, const struct model *m, int tp, enum kv_type kv) {
    enum { PROMPT = 30, CHUNK = 7, N = 40 };
    const struct sampling *o = &draft_samplings[2];
    int32_t text[PROMPT + N], got[N];
    struct session plain, s;
    struct ops ops;
    size_t n_want, n;
    const struct cpu_options opts = {kernels_choose(), tp, 128, kv, false, false, {0}};
    some_ids(text, PROMPT, m->n_vocab);
    session_open_cpu(&plain, m, tp, 1, opts);
    draft_run(&plain, o, 5, 0, 0, text, PROMPT, CHUNK, text + PROMPT, N);
    session_decode(&plain, text[PROMPT + N - 1]);
    uint8_t *want = draft_cache(&plain, &n_want);
    for (enum draft_force how = FORCE_RIGHT; how <= FORCE_HALF; how++)
        for (int k = 1; k <= DRAFTS_MAX; k += 7) {
            session_open_cpu(&s, m, tp, 1, opts);
            force_drafts(&s, &ops, how, text, PROMPT + N);
            draft_run(&s, o, 5, k, k, text, PROMPT, CHUNK, got, N);
            CHECK(!memcmp(got, text + PROMPT, sizeof got), "%s, %d drafts (%d): another text", name, k, how);
            session_truncate(&s, PROMPT + N - 1); /* the last drafts go */
            session_forward(&s, text + PROMPT + N - 1, 1);
            uint8_t *have = draft_cache(&s, &n);
            CHECK(n == n_want && !memcmp(have, want, n), "%s, --tp %d, %d drafts (%d): another state", name, tp, k,
                  how);
            arrfree(have);
            session_free(&s);
        }
    arrfree(want);
    session_free(&plain);
}

static void test_draft_state(void) {
    for (int f = 0; f < DRAFT_MODELS; f += 1 + !f) {
        struct model m;
        if (!fixture_load(draft_models[f], &m)) return;
        check_state(draft_models[f], &m, 1, KV_FP8);
        check_state(draft_models[f], &m, 2, KV_F32);
        model_free(&m);
    }
}

/* The distribution of two tokens of which the first is verified and the second drafted half of the time, against
 * probabilities computed from the logits: chi-square over the 16 pairs that top-k 4 leaves. */
static void test_draft_distribution(void) {
    enum { K = 4, DRAWS = 20000, PROMPT = 5 };
    const struct sampling o = {.temp = 1, .top_k = K, .top_p = 1, .repeat_penalty = 1};
    struct model m;
    struct session s;
    struct ops ops;
    int32_t ids[PROMPT + 2] = {0}, first[K], second[K][K];
    double p[K][K], q[K], chi = 0;
    int count[K][K] = {{0}};
    uint64_t rng = 17;
    if (!fixture_load("deepseek_v3_mtp", &m)) return;
    some_ids(ids, PROMPT, m.n_vocab);
    session_cpu(&s, &m, kernels_choose(), 1, 32, KV_F32);
    for (int a = -1; a < K; a++) { /* the best four, then the best four after each */
        struct candidate best[K] = {{0}};
        double sum = 0;
        session_truncate(&s, 0);
        session_forward(&s, ids, PROMPT - 1); /* as below: the same bits */
        session_decode(&s, ids[PROMPT - 1]);
        if (a >= 0) session_decode(&s, first[a]);
        const float *x = session_logits(&s);
        for (int i = 0; i < m.n_ids; i++) {
            struct candidate c = {x[i], i};
            for (int j = 0; j < K; j++)
                if ((!i && !j) || c.logit > best[j].logit || best[j].logit == 0) {
                    const struct candidate t = best[j];
                    best[j] = c;
                    c = t;
                }
        }
        for (int j = 0; j < K; j++) sum += exp((double)(best[j].logit - best[0].logit));
        for (int j = 0; j < K; j++) {
            const double share = exp((double)(best[j].logit - best[0].logit)) / sum;
            if (a < 0) first[j] = best[j].id, q[j] = share;
            else second[a][j] = best[j].id, p[a][j] = q[a] * share;
        }
    }
    force_drafts(&s, &ops, FORCE_HALF, ids, PROMPT + 2);
    drafts_limit(s.drafts, 1, 1, 0);
    for (int i = 0; i < DRAWS; i++) {
        session_truncate(&s, PROMPT - 1);
        ids[PROMPT] = first[i % K]; /* what is drafted half of the time */
        session_decode(&s, ids[PROMPT - 1]);
        const int32_t x = session_sample(&s, &o, &rng);
        session_decode(&s, x);
        const int32_t y = session_sample(&s, &o, &rng);
        int a = 0, b = 0;
        while (a < K && first[a] != x) a++;
        while (a < K && b < K && second[a][b] != y) b++;
        if (!CHECK(a < K && b < K, "draw %d: %d, %d are not among the best", i, x, y)) break;
        count[a][b]++;
    }
    for (int i = 0; i < K * K; i++) {
        const double want = DRAWS * p[i / K][i % K], d = count[i / K][i % K] - want;
        chi += d * d / want;
    }
    CHECK(chi < 37.7, "chi-square %.1f with 15 degrees of freedom", chi); /* exceeded with a probability of 0.001 */
    const struct draft_stats *t = &s.drafted[DRAFT_BY_MTP];
    CHECK(t->right[0] > t->drafted[0] / 20 && t->right[0] < t->drafted[0] / 2, "%ld of %ld drafts were right",
          t->right[0], t->drafted[0]);
    session_free(&s);
    model_free(&m);
}

/* The number of drafts: the best of what was measured. What may pay is tried, and tried again, at little cost. */
static void test_draft_depth(void) {
    static const struct {
        double step[4], right; /* seconds of rounds; share of right drafts */
        int want;
        double slow; /* factor of rounds with drafts for the first 50 rounds; 0: none */
    } c[] = {{{1, 1.1, 1.2, 1.3}, 0.9, 3, 0}, {{1, 1.1, 1.2, 1.3}, 0.05, 0, 0}, {{1, 1.3, 1.9, 2.6}, 0.6, 1, 0},
             {{1, 2.4, 3.1, 3.9}, 0.9, 0, 0}, {{1, 1.7, 1.9, 2.1}, 0.9, 3, 0},  {{1, 1.1, 1.2, 1.3}, 0.9, 3, 4}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct drafting d = {.n = 1, .m = 1};
        uint64_t rng = 9;
        int most = 0, used[4] = {0}, missed = 0; /* rounds that the MTP layer has not seen */
        double seconds = 0, plain = 0;
        drafting_limit(&d, 0, 3);
        for (int round = 0; round < 2000; round++) {
            const int k = d.next;
            int right = 0;
            drafting_begin(&d, k, 1 + k);
            while (right < k && rng_uniform(&rng) < c[i].right) right++;
            const double step = c[i].step[k] * (k && round < 50 && c[i].slow > 0 ? c[i].slow : 1);
            const double noisy = step * (round % 100 == 99 ? 50 : 0.95 + 0.1 * rng_uniform(&rng));
            const int late = k && missed > DECODE_MAX_TOKENS ? missed : 0;
            drafting_verified(&d, k, right);
            drafting_end(&d, noisy + 0.001 * late, late);
            missed = k ? 0 : missed + 1;
            used[k]++;
            seconds += step;
            plain += 1 + right;
        }
        for (int k = 0; k < 4; k++) {
            if (used[k] > used[most]) most = k;
            CHECK(used[k] > 5 || k > 1, "case %zu: %d drafts were tried %d times", i, k, used[k]);
        }
        CHECK(most == c[i].want && used[most] > (c[i].slow > 0 ? 1000 : 1400),
              "case %zu: %d drafts in %d rounds of 2000", i, most, used[most]);
        CHECK(seconds < 1.03 * plain, "case %zu: %.0f seconds, %.0f without drafts", i, seconds, plain);
        drafting_limit(&d, 2, 2);
        CHECK(d.next == 2, "case %zu: %d drafts where 2 were asked for", i, d.next);
    }
}

/* Answers that end within a round: by -n, a stop string or a full context. The turn is the one without drafts, and so is
 * what the session holds. */
static void test_draft_ends(void) {
    static const char question[] = "Tell me a story about a fox.";
    struct model m;
    struct settings set;
    char err[ERR_MAX] = "";
    if (!demo_load(&m)) return;
    settings_init(&set);
    settings_resolve(&set, &m);
    set.mute = true;
    set.seed = 4;
    fflush(stdout); /* answers are not for the list of tests */
    const int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    for (int end = 0; end < 3; end++)
        for (int n = 20; n < 29; n++) {
            char *want = NULL;
            int n_past = 0;
            uint32_t hash = 0;
            uint64_t rng = 0;
            for (int depth = 0; depth < 4; depth++) {
                static const char *const stops[] = {" the", "ed ", "a", " w", " and", "er", "ly", ".", "s t"};
                struct session s;
                struct chat c;
                set.n_predict = end == 0 ? n : 60;
                set.draft_min = set.draft_max = depth;
                session_cpu(&s, &m, kernels_choose(), 1, end == 2 ? n + 30 : 256, KV_BF16);
                if (!CHECK(chat_init(&c, &set, &m, &s, err) == 0, "%s", err)) break;
                if (end == 1) arrput(c.stops, stops[n - 20]);
                CHECK(chat_turn(&c, question, strlen(question), err) == TURN_DONE, "%s", err);
                const char *got = arrlast(c.messages).content;
                if (!depth) {
                    want = xstrdup(got);
                    n_past = s.n_past;
                    hash = c.last.logit_hash;
                    rng = c.rng;
                }
                CHECK(!strcmp(got, want) && s.n_past == n_past && c.last.logit_hash == hash && c.rng == rng,
                      "end %d, n %d, %d drafts: '%s' (%d tokens), expected '%s' (%d)", end, n, depth, got, s.n_past,
                      want, n_past);
                CHECK(c.last.why != STOP_LENGTH || !s.n_draft, "%d drafts after the last of %d tokens", s.n_draft, n);
                const struct draft_stats *t = &c.last.drafts;
                CHECK(t->tokens >= t->rounds, "%ld rounds gave %ld tokens", t->rounds, t->tokens);
                chat_free(&c);
                session_free(&s);
            }
            free(want);
        }
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out);
    close(null);
    settings_free(&set);
    model_free(&m);
}

/* A state is saved with the rows of the MTP layer, and loads with and without it. */
static void check_draft_file(const char *name) {
    enum { PROMPT = 40, N = 20 };
    const struct sampling *o = &draft_samplings[0];
    struct model m;
    char path[256], err[ERR_MAX] = "";
    int32_t text[PROMPT + N], got[N];
    struct session s;
    struct ops ops;
    snprintf(path, sizeof path, "%s/drafts.kv", test_dir());
    if (!fixture_load(name, &m)) return;
    some_ids(text, PROMPT, m.n_vocab);
    const int n_mtp = m.n_mtp;
    const size_t bytes = (size_t)m.n_vocab * sizeof(float);
    float *logits = xmalloc(bytes);
    for (int with = 0; with < 4; with++) { /* bit 0: saved with the layer, bit 1: loaded with it */
        m.n_mtp = with & 1 ? n_mtp : 0;
        session_cpu(&s, &m, &kernels_ref, 1, 128, KV_BF16);
        if (with & 1) force_drafts(&s, &ops, FORCE_HALF, text, PROMPT + N);
        draft_run(&s, o, 0, 0, with & 1 ? 3 : 0, text, PROMPT, PROMPT, with ? got : text + PROMPT, N);
        CHECK(!with || !memcmp(got, text + PROMPT, sizeof got), "%s: another text", name);
        CHECK(state_save(&s, path, err) == 0, "%s", err);
        session_free(&s);
        m.n_mtp = with & 2 ? n_mtp : 0;
        session_cpu(&s, &m, &kernels_ref, 1, 128, KV_BF16);
        CHECK(session_load(&s, path, err) == 0 && s.n_past == PROMPT + N - 1, "%s, saved and loaded %d: %s", name, with,
              err);
        CHECK(session_sync(&s, text, PROMPT + N, 0, err) == SYNC_DONE && s.sync_tokens == 1, "%s", err);
        if (!with) memcpy(logits, session_logits(&s), bytes);
        CHECK(!memcmp(logits, session_logits(&s), bytes), "%s, saved and loaded %d: other logits", name, with);
        session_free(&s);
    }
    free(logits);
    model_free(&m);
}

static void test_draft_file(void) {
    check_draft_file("qwen3_5_moe_nvfp4");
    check_draft_file("deepseek_v4");
}

/* The search for an earlier n-gram against a plain one, in a timeline that grows and is cut, with few different tokens. */
static void test_draft_search(void) {
    enum { N = 4000 };
    static int32_t ids[N + 1];
    struct ngrams g = {.after = xcalloc(NGRAM_ROWS, sizeof *g.after)};
    uint64_t rng = 9;
    int n = 0, found = 0, last = 0;
    for (int step = 0; step < 20000; step++) {
        if (rng_next(&rng) % 50 == 0) {
            n -= (int)(rng_next(&rng) % (uint64_t)(n < 60 ? n + 1 : 60));
            g.n = int_min(g.n, n);
        }
        if (n == N) n = g.n = 0;
        const bool copies = n > 200 && rng_next(&rng) % 8;
        ids[n] = copies ? ids[n - 200] : (int32_t)(rng_next(&rng) % 5);
        n++;
        if (rng_next(&rng) % 3) continue;
        const int at = ngrams_find(&g, ids, n);
        bool any = false;
        for (int k = NGRAM; k < n && !any; k++) any = !memcmp(ids + k - NGRAM, ids + n - NGRAM, NGRAM * sizeof *ids);
        CHECK(!at || (at < n && !memcmp(ids + at - NGRAM, ids + n - NGRAM, NGRAM * sizeof *ids)),
              "%d tokens: what stands before %d is another n-gram", n, at);
        CHECK(any || !at, "%d tokens: %d was found, and there is none", n, at);
        CHECK(g.found == (at > 0), "found");
        found += at > 0;
        last += any;
    }
    CHECK(2 * found > last && last > 2000, "%d of %d were found", found,
          last); /* of some a later, lost one stands there */
    free(g.after);
}

/* Chooses N tokens after a text that repeats itself, with n_min to n_max drafts by n-grams. */
static void ngram_run(struct session *s, const struct sampling *o, int n_min, int n_max, const int32_t *prompt,
                      int n_prompt, int32_t *out, int n) {
    uint64_t rng = 3;
    char err[ERR_MAX] = "";
    session_truncate(s, 0);
    s->drafts->ngrams = (struct drafting){.n = 1, .m = 1, .doubles = true};
    drafting_limit(&s->drafts->ngrams, n_min, n_max);
    s->drafted[DRAFT_BY_NGRAMS] = (struct draft_stats){0};
    CHECK(session_sync(s, prompt, n_prompt, 0, err) == SYNC_DONE, "%s", err);
    for (int i = 0; i < n; i++) {
        out[i] = session_sample(s, o, &rng);
        session_decode(s, out[i]);
    }
}

/* Drafts by n-grams change no token and no logit, whatever their number, alone and with those of MTP layers; where the
 * text repeats itself most are right. */
static void test_draft_ngrams(void) {
    enum { PROMPT = 60, N = 60 };
    static const struct sampling greedy = {.greedy = true, .repeat_penalty = 1};
    static const struct sampling two = {.temp = 1, .top_k = 2, .top_p = 1, .repeat_penalty = 1};
    static const int most[] = {3, 15, 0}; /* 0: chosen by time */
    long right = 0, drafted = 0;
    for (int f = 0; f < DRAFT_MODELS; f++) {
        struct model m;
        struct session s;
        int32_t prompt[PROMPT], want[N], got[N];
        if (!fixture_load(draft_models[f], &m)) return;
        some_ids(prompt, PROMPT, m.n_vocab);
        for (int i = 20; i < PROMPT; i++) prompt[i] = prompt[i - 20];
        session_open_cpu(&s, &m, 1, 1,
                         (struct cpu_options){kernels_choose(), 2, 256, f % 2 ? KV_FP8 : KV_BF16, false, false, {0}});
        float *logits = xmalloc((size_t)m.n_vocab * sizeof *logits);
        for (int k = 0; k < 2; k++) {
            const struct sampling *o = k ? &two : &greedy;
            ngram_run(&s, o, 0, 0, prompt, PROMPT, want, N);
            memcpy(logits, session_logits(&s), (size_t)m.n_vocab * sizeof *logits);
            for (size_t i = 0; i < sizeof most / sizeof *most; i++)
                for (int mtp = 0; mtp < 3; mtp += 2 + (int)(i + (size_t)f) % 2) {
                    drafting_limit(&s.drafts->mtp[1], mtp, mtp);
                    ngram_run(&s, o, most[i], most[i] ? most[i] : DRAFTS_MAX, prompt, PROMPT, got, N);
                    CHECK(!memcmp(got, want, sizeof got), "%s, %d drafts by n-grams, %d by MTP: another text",
                          draft_models[f], most[i], mtp);
                    CHECK(!memcmp(logits, session_logits(&s), (size_t)m.n_vocab * sizeof *logits),
                          "%s, %d drafts by n-grams, %d by MTP: other logits", draft_models[f], most[i], mtp);
                    const struct draft_stats *t = &s.drafted[DRAFT_BY_NGRAMS];
                    for (int d = 0; d < DRAFTS_MAX && !k; d++) drafted += t->drafted[d], right += t->right[d];
                }
            drafting_limit(&s.drafts->mtp[1], 0, 0);
        }
        free(logits);
        session_free(&s);
        model_free(&m);
    }
    CHECK(drafted > 20 && right > drafted / 2, "greedy texts: %ld of %ld drafts were right", right, drafted);
}

/* Numbers of drafts are tried as 0, 1, 3, 7, 15, as long as they pay; 0 where none does. */
static void test_draft_doubles(void) {
    for (int pays = 0; pays < 2; pays++) {
        struct drafting d = {.n = 1, .m = 1, .doubles = true};
        bool tried[DRAFTS_MAX + 1] = {false};
        int best = 0;
        drafting_limit(&d, 0, DRAFTS_MAX);
        for (int i = 0; i < 4; i++) drafting_without(&d, 1, 1);
        d.next = drafting_choose(&d);
        for (int i = 0; i < 400; i++) {
            const int k = d.next;
            tried[k] = true;
            best += k == (pays ? DRAFTS_MAX : 0);
            if (k) {
                drafting_begin(&d, k, 1 + k);
                drafting_verified(&d, k, pays ? k : 0);
                drafting_end(&d, 1 + 0.1 * k, 0);
            } else {
                drafting_skip(&d);
            }
        }
        for (int k = 0; k <= DRAFTS_MAX; k++) CHECK(!tried[k] || !(k & (k + 1)), "%d drafts were tried", k);
        CHECK(best > 350, "pays %d: %d of 400 rounds have the best number of drafts", pays, best);
        CHECK(tried[1] && tried[DRAFTS_MAX] == pays, "pays %d: what was tried", pays);
    }
}

/* Rounds of n timelines, for some of which an n-gram is found: drafts where they pay, whatever number of timelines has
 * them. */
static void test_draft_several(void) {
    static const struct {
        int n;
        double row, right;  /* seconds of a further row, those of a round without any being 1; share of right drafts */
        double least, most; /* seconds beside those without drafts */
    } c[] = {{4, 0.02, 0.9, 0.3, 0.75}, {4, 0.02, 0.1, 0.95, 1.03}, {4, 0.2, 0.9, 0.8, 1.01}, {8, 0.03, 0.9, 0.5, 0.9},
             {8, 0.2, 0.6, 0.97, 1.03}, {2, 0.02, 0.95, 0.1, 0.6},  {16, 0.02, 0.9, 1.0, 1.0}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct drafts d;
        uint64_t rng = 9;
        double seconds = 0, plain = 0;
        const int n = c[i].n;
        drafts_reset(&d);
        drafts_limit(&d, 0, 0, DRAFTS_MAX);
        for (int round = 0; round < 4000; round++) {
            const int m = (int)(rng_next(&rng) % (uint64_t)(n + 1));
            int tokens = n;
            if (m) drafting_shape(&d.ngrams, n, m);
            const int k = m ? d.ngrams.next : 0, rows = n + m * k;
            CHECK(rows <= DECODE_MAX_TOKENS && !(k & (k + 1)), "%d of %d timelines have %d drafts", m, n, k);
            const double took = 1 + c[i].row * (rows - n), noisy = took * (0.95 + 0.1 * rng_uniform(&rng));
            if (k) drafting_begin(&d.ngrams, k, rows);
            else if (m) drafting_skip(&d.ngrams);
            for (int t = 0; t < m; t++) {
                int right = 0;
                while (right < k && rng_uniform(&rng) < c[i].right) right++;
                drafting_verified(&d.ngrams, k, right);
                tokens += right;
            }
            if (k) drafting_end(&d.ngrams, noisy, 0);
            else drafting_without(&d.ngrams, n, noisy);
            seconds += took;
            plain += (double)tokens / n;
        }
        CHECK(seconds >= c[i].least * plain && seconds <= c[i].most * plain,
              "%d timelines, %g a row, %g right: %.3f of the seconds without drafts", n, c[i].row, c[i].right,
              seconds / plain);
    }
}

#define TESTS_DRAFT                                                                                      \
    {"draft/text", test_draft_text}, {"draft/demo", test_draft_demo}, {"draft/state", test_draft_state}, \
        {"draft/search", test_draft_search}, {"draft/ngrams", test_draft_ngrams},                        \
        {"draft/several", test_draft_several}, {"draft/doubles", test_draft_doubles},                    \
        {"draft/distribution", test_draft_distribution}, {"draft/depth", test_draft_depth},              \
        {"draft/ends", test_draft_ends}, {"draft/ids", test_draft_ids}, {"draft/file", test_draft_file},
