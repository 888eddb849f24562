/* Several ranks of one model, as threads on the CPU: shares, numbers, saved states, faults. */

/* clang-format off */
static const char *const rank_fixtures[] = {
    "qwen3moe",      "qwen3moe_nonorm",     "qwen3moe_nvfp4",    "qwen3moe_ct",
    "qwen3moe_reap", "deepseek_v3",         "deepseek_v3_plain", "deepseek_v3_fp8",
    "kimi_k2",       "deepseek_v3_nvfp4",   "deepseek_v3_reap",  "hy_v3",
    "hy_v3_nvfp4",   "qwen3_5_moe",         "qwen3_5_moe_text",  "qwen3_5_moe_nvfp4",
    "qwen3_next",    "qwen3_next_fp8",      "glm4_moe",          "glm4_moe_air",
    "glm4_moe_lite", "glm4_moe_lite_nvfp4", "gpt_oss",           "gpt_oss_bf16",
    "minimax_m2",    "minimax_m2_fp8",      "mixtral",           "mixtral_nvfp4",
    "olmoe",         "olmoe_norm",          "qwen2_moe",         "qwen2_moe_dense",
    "ernie4_5_moe",  "ernie4_5_moe_each",   "step3p5",           "step3p7",
    "laguna",        "laguna_element",      "mimo_v2_flash",     "mimo_v2_flash_fp8",
    "deepseek_v32",  "deepseek_v32_fp8",    "glm_moe_dsa",       "glm_moe_dsa_types",
    "minimax_m3",    "minimax_m3_nvfp4",    "deepseek_v4",       "deepseek_v4_pro",
    "dots1",         "dots1_nvfp4",         "qwen3",             "qwen3_nvfp4",
    "qwen3_5",       "qwen3_5_nvfp4",       "llama",             "mistral",
    "glm4",          "glm4_nvfp4",          "gemma4",            "gemma4_nvfp4",      "gemma4_dense",
    "qwen2",         "qwen2_nvfp4",         "ministral3",        "ministral3_nvfp4",
    "mistral4",      "mistral4_nvfp4",      "kimi_linear",       "kimi_linear_nvfp4",
    "bailing_hybrid", "bailing_hybrid_ct", "nemotron_h",       "nemotron_h_nvfp4",
    "nemotron_h_dense", "inkling2_loop",   "inkling2_nvfp4",
    "glm5_next",     "glm5_next_nvfp4", "qwen4_exp", "qwen4_exp_nvfp4",
    "deepseek_v41",  "deepseek_v41_nvfp4",  "hunyuan_v1_moe",    "hunyuan_v1_moe_nvfp4",
    "granitemoe",    "granitemoeshared_nvfp4", "bailing_moe_v2", "sarvam_moe_nvfp4",
    "exaone_moe",    "exaone_moe_nvfp4",    "afmoe",             "afmoe_nvfp4",
    "qwen3_vl_moe",  "qwen3_vl_moe_nvfp4",  "granitemoehybrid",  "granitemoehybrid_nvfp4",
    "granitemoehybrid_dense", "granitemoehybrid_rope",
    "mellum", "mellum_nvfp4",
    "deepseek_v2", "deepseek_v2_nvfp4", "deepseek_moe", "deepseek_moe_nvfp4",
    "bailing_moe", "bailing_moe_nvfp4",
    "solar_open", "solar_open_nvfp4",
    "granitemoe_swa", "granitemoe_swa_nvfp4",
    "cohere2_moe",   "cohere2_moe_nvfp4",   "dbrx",              "dbrx_nvfp4",
    "phimoe",        "phimoe_nvfp4",
    "lfm2_moe",      "lfm2_moe_nvfp4",      "smallthinker",      "smallthinker_nvfp4",
    "llama4",        "llama4_nvfp4",        "maple",             "maple_nvfp4",
    "hy_v4",         "hy_v4_nvfp4",         "dots3_note",        "dots3_note_nvfp4",
    "arctic",        "arctic_nvfp4",        "kimi_k3",           "kimi_k3_nvfp4",
    "longcat_flash", "longcat_flash_nvfp4"};
/* clang-format on */
enum { RANK_FIXTURES = sizeof rank_fixtures / sizeof *rank_fixtures };

/* Every thing is somebody's, nobody's twice, in order, in whole units, larger shares first. */
static void test_ranks_shares(void) {
    for (int total = 0; total < 700; total += 1 + total / 9)
        for (int unit = 1; unit <= 64; unit *= 8)
            for (int n = 1; n <= MAX_RANKS; n++) {
                int at = 0, last = INT32_MAX;
                for (int i = 0; i < n; i++) {
                    struct range s = shard_range(total, unit, n, i);
                    CHECK(s.n >= 0 && s.n <= last && (!s.n || s.first == at),
                          "%d in units of %d: share %d of %d is %d+%d", total, unit, i, n, s.first, s.n);
                    CHECK(!s.n || s.first % unit == 0, "a share of %d begins at %d", total, s.first);
                    at += s.n, last = s.n;
                }
                CHECK(at == total, "%d shares of %d hold %d", n, total, at);
            }
    struct range s = shard_range(768, 64, 3, 2), t = shard_range(1408, 64, 4, 3);
    CHECK(s.first == 512 && s.n == 256 && t.first == 17 * 64 && t.n == 5 * 64, "shares of 768 and 1408");
}

/* Heads of a model without weights: n_head query heads on n_kv KV heads. */
static void test_ranks_heads(void) {
    static const int shapes[][2] = {{32, 4}, {64, 4}, {4, 2}, {6, 3}, {4, 1}, {16, 2}, {128, 128}, {12, 4}, {1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int n = 1; n <= MAX_RANKS; n++) {
            const struct attn m = {.n_head = shapes[i][0], .n_head_kv = shapes[i][1], .head_k = 64, .head_v = 64};
            int group = m.n_head / m.n_head_kv, at = 0;
            for (int k = 0; k < n; k++) {
                struct heads_range h = shard_heads(&m, 1, n, k);
                CHECK(!h.q.n || h.q.first == at, "%d heads: rank %d of %d begins at %d", m.n_head, k, n, h.q.first);
                at += h.q.n;
                if (!h.q.n) continue;
                CHECK(h.q.first / group == h.kv.first && (h.q.first + h.q.n - 1) / group == h.kv.first + h.kv.n - 1 &&
                          h.q.n % h.kv.n == 0,
                      "%d heads on %d: rank %d of %d has %d+%d and KV %d+%d", m.n_head, m.n_head_kv, k, n, h.q.first,
                      h.q.n, h.kv.first, h.kv.n);
            }
            CHECK(at == m.n_head, "%d ranks have %d of %d heads", n, at, m.n_head);
        }
}

/* Stages begin with layers that have an indexer: of five layers the first and the fourth. Catches a stage that takes a
 * choice of keys which another one made, and a --pp that is let through. */
static void test_ranks_stages(void) {
    struct model m, pruned;
    if (!fixture_load("glm_moe_dsa_types", &m)) return;
    const struct range first = stage_layers(&m, 2, 0), second = stage_layers(&m, 2, 1);
    CHECK(stage_starts(&m) == 2, "%d beginnings", stage_starts(&m));
    CHECK(first.first == 0 && first.n == 3 && second.first == 3 && second.n == 2, "stages %d+%d, %d+%d", first.first,
          first.n, second.first, second.n);
    shard_model(&pruned, &m, (struct shard){0, 1, 1, 2});
    CHECK(pruned.layers[0].attn.n_index && !pruned.layers[1].attn.n_index, "the second stage");
    shard_free(&pruned);
    model_free(&m);
    if (!fixture_load("glm5_next", &m)) return;
    CHECK(stage_starts(&m) == 4, "%d beginnings", stage_starts(&m));
    m.layers[3].attn.n_index = 0; /* layer 2 stands before it, of Kimi delta attention */
    CHECK(stage_starts(&m) == 2 && stage_can_start(&m, 1) && !stage_can_start(&m, 2), "%d beginnings before a choice",
          stage_starts(&m));
    model_free(&m);
    if (!fixture_load("longcat_flash", &m)) return;
    CHECK(stage_starts(&m) == 2 && stage_can_start(&m, 2) && !stage_can_start(&m, 3), "%d beginnings before experts",
          stage_starts(&m));
    model_free(&m);
    check_command(MOE_BIN " -m " FIXTURES "glm_moe_dsa_types.gguf --cpu --pp 3 --raw -p x </dev/null", 2, "",
                  "--pp 3: the model has only 2 layers that a stage may begin with");
}

/* The largest stage of every way to cut random models is compared with that of stage_layers. Catches a cut that is not
 * the best one, a stage that begins with a layer which takes a choice, and bytes of the embedding or the output that
 * are not counted. Of equal layers 4 stages have 2 or 3, not 3, 3, 3 and 1. */
static void test_ranks_cuts(void) {
    enum { MOST = 9 }; /* layers */
    static const uint8_t some[1];
    uint64_t rng = 5;
    for (int i = 0; i < 2000; i++) {
        struct layer layers[MOST + 1] = {0};
        const bool equal = !i;
        const int n = equal ? 10 : 2 + (int)(rng_next(&rng) % (MOST - 1));
        struct model m = {.n_layer = n, .layers = layers, .family = &families[0]};
        struct weight *const ends[2] = {&m.embd, &m.output};
        uint64_t bytes[MOST + 1] = {0};
        for (int il = 0; il < n; il++) {
            const int width = equal ? 64 : 1 + (int)(rng_next(&rng) % (i % 2 ? 1000 : 3));
            layers[il].wo = (struct weight){.data = some, .type = GGUF_F32, .n_in = width, .n_out = 1, .n_expert = 1};
            layers[il].attn.top_k = equal ? 0 : 1;
            layers[il].attn.n_index = !il || rng_next(&rng) % 3;
            layers[il].has = layer_conditions(&m, &layers[il]);
            bytes[il] = 4 * (uint64_t)width;
        }
        for (int end = 0; end < 2 && !equal; end++) {
            const int width = (int)(rng_next(&rng) % 500);
            *ends[end] = (struct weight){.data = some, .type = GGUF_F32, .n_in = width, .n_out = 1, .n_expert = 1};
            bytes[end ? n - 1 : 0] += 4 * (uint64_t)width;
        }
        for (int n_stage = 1; n_stage <= int_min(MAX_RANKS, stage_starts(&m)); n_stage++) {
            uint64_t best = UINT64_MAX, got = 0;
            for (unsigned cuts = 0; cuts < 1u << (n - 1); cuts++) { /* bit il - 1: a stage begins with layer il */
                uint64_t largest = 0, sum = 0;
                bool may = __builtin_popcount(cuts) == n_stage - 1;
                for (int il = 0; il < n; il++) {
                    const bool begins = il && cuts >> (il - 1) & 1;
                    may = may && (!begins || equal || layers[il].attn.n_index);
                    sum = begins ? bytes[il] : sum + bytes[il];
                    if (sum > largest) largest = sum;
                }
                if (may && largest < best) best = largest;
            }
            for (int s = 0, at = 0; s < n_stage; s++) {
                const struct range r = stage_layers(&m, n_stage, s);
                uint64_t sum = 0;
                CHECK(r.first == at && r.n > 0 && (equal || layers[r.first].attn.n_index),
                      "stage %d of %d has layers %d+%d, expected from %d on", s, n_stage, r.first, r.n, at);
                CHECK(!equal || n_stage < 4 || r.n == 2 + s % 2, "equal layers: %d in stage %d", r.n, s);
                for (at = r.first; at < r.first + r.n; at++) sum += bytes[at];
                if (sum > got) got = sum;
                CHECK(s < n_stage - 1 || at == n, "%d of %d layers are in %d stages", at, n, n_stage);
            }
            CHECK(got == best, "%d layers on %d stages: the largest has %llu bytes, at best %llu", n, n_stage,
                  (unsigned long long)got, (unsigned long long)best);
        }
    }
}

/* Logits of n ids, (n, n_vocab), and n_out greedy ids after the first `from`; malloc'ed logits. */
static float *ranks_run(const struct model *m, const struct kernels *k, enum kv_type kv, int tp, int pp,
                        const int32_t *ids, int n, int from, int32_t *out, int n_out) {
    struct session s;
    char err[ERR_MAX] = "";
    struct collect c = {xmalloc((size_t)n * (size_t)m->n_vocab * sizeof(float)), m->n_vocab};
    session_open_cpu(&s, m, tp, pp,
                     (struct cpu_options){k, 1, n > from + n_out ? n : from + n_out, kv, false, false, {0}});
    CHECK(session_score(&s, ids, n, collect_row, &c, err) == 0, "%s", err);
    greedy_run(&s, ids, from, out, n_out);
    session_free(&s);
    return c.out;
}

/* All layouts of a model give what one rank gives: the same text, logits within `limit` (NMSE). */
static void ranks_agree(const char *name, const struct model *m, const struct kernels *k, const int32_t *ids, int n,
                        double limit) {
    static const int layouts[][2] = {{2, 1}, {3, 1}, {4, 1}, {1, 2}, {2, 2}};
    enum { OUT = 12 };
    int32_t want[OUT], got[OUT];
    size_t count = (size_t)n * (size_t)m->n_vocab;
    float *one = ranks_run(m, k, KV_F32, 1, 1, ids, n, 17, want, OUT);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        int tp = layouts[i][0], pp = layouts[i][1];
        if (SANITIZED && i % 2) continue;
        float *x = ranks_run(m, k, KV_F32, tp, pp, ids, n, 17, got, OUT);
        double e = nmse(x, one, count);
        CHECK(e <= limit, "%s: NMSE %.3g between --tp %d --pp %d and one rank", name, e, tp, pp);
        CHECK(!memcmp(got, want, sizeof got), "%s: another text with --tp %d --pp %d", name, tp, pp);
        free(x);
    }
    free(one);
}

static void ranks_fixtures(const struct kernels *k, double limit) {
    enum { MOST = 160 }; /* tokens: more than the longest compressed key is made of */
    for (int f = 0; f < RANK_FIXTURES; f++) {
        struct model m;
        char path[256];
        size_t n_ids = 0;
        if (!fixture_load(rank_fixtures[f], &m)) return;
        snprintf(path, sizeof path, "tests/fixtures/%s/ids.i32", rank_fixtures[f]);
        int32_t *ids = slurp(path, &n_ids);
        ranks_agree(rank_fixtures[f], &m, k, ids, int_min((int)(n_ids / sizeof *ids), MOST), limit);
        arrfree(ids);
        model_free(&m);
    }
}

static void test_ranks_fixtures(void) { ranks_fixtures(&kernels_ref, 1e-9); }

/* Integer activations are rounded per 32 of them, and widths are cut in units of 64: what
 * differs is the order of sums and what it moves across a rounding. */
static void test_ranks_fast(void) { ranks_fixtures(kernels_choose(), 1e-7); }

/* A model in FP8, whose blocks are longer than the units of a feed-forward's width. */
static void test_ranks_blocks(void) {
    enum { N = 24 };
    struct synth shape = {"blocks", "qwen2moe",
                          .keys = "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 "
                                  "expert_count=4 expert_used_count=2 expert_feed_forward_length=384 "
                                  "expert_shared_count=1 vocab_size=200 context_length=256",
                          .ff_type = GGUF_FP8, .backbone = GGUF_FP8};
    struct model m = {0};
    int32_t ids[N];
    synth_make(&m, &shape, NULL, false);
    for (int i = 0; i < N; i++) ids[i] = (11 + 17 * i + i * i / 7) % m.n_vocab;
    ranks_agree("FP8", &m, &kernels_ref, ids, N, 1e-9);
    model_free(&m);
}

static void test_ranks_demo(void) {
    struct model m;
    char *text = NULL, err[ERR_MAX];
    int32_t *ids = NULL;
    if (!demo_load(&m) || !CHECK(!read_file("prompts/haystack.txt", &text, err), "%s", err)) return;
    tokenize_all(m.vocab, text, 1200, false, &ids);
    ranks_agree("demo", &m, &kernels_ref, ids, 96, 1e-9);
    arrfree(ids);
    arrfree(text);
    model_free(&m);
}

/* A saved state knows no ranks: what two ranks in two stages write, one reads, and the other way round. */
static void test_ranks_save(void) {
    static const char *const names[] = {"qwen3moe_nonorm",   "qwen3moe",   "deepseek_v3",
                                        "glm_moe_dsa_types", "minimax_m3", "glm5_next"};
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        struct model m;
        char path[256], err[ERR_MAX] = "";
        int32_t ids[60];
        if (!fixture_load(names[f], &m)) return;
        some_ids(ids, 60, m.n_vocab);
        snprintf(path, sizeof path, "%s/ranks.kv", test_dir());
        for (int i = 0; i < 6; i++) {
            enum kv_type kv = i % 3 == 0 ? KV_BF16 : i % 3 == 1 ? KV_FP8 : KV_F32;
            int tp[2] = {i < 3 ? 2 : 1, i < 3 ? 1 : 3}, pp[2] = {i < 3 ? 2 : 1, 1};
            struct session s;
            float *last[2];
            for (int k = 0; k < 2; k++) { /* k 0 computes and writes, 1 reads and goes on */
                session_open_cpu(&s, &m, tp[k], pp[k],
                                 (struct cpu_options){&kernels_ref, 1, 64, kv, false, false, {0}});
                if (!k) CHECK(session_sync(&s, ids, 60, 0, err) == SYNC_DONE && !state_save(&s, path, err), "%s", err);
                else CHECK(!session_load(&s, path, err) && s.n_past == 60, "%s", err);
                session_decode(&s, 7);
                last[k] = xmalloc((size_t)m.n_vocab * sizeof(float));
                memcpy(last[k], session_logits(&s), (size_t)m.n_vocab * sizeof(float));
                session_free(&s);
            }
            double e = nmse(last[1], last[0], (size_t)m.n_vocab);
            CHECK(e <= 1e-9, "%s: NMSE %.3g after a state went from %d x %d ranks to %d x %d", names[f], e, tp[0],
                  pp[0], tp[1], pp[1]);
            free(last[0]), free(last[1]);
        }
        model_free(&m);
    }
}

/* ---- faults: what a rank does wrong, in a process of its own ---- */

static const struct ops *fault_ops;
static int fault_turns;

static bool fault_now(const struct rank *r) {
    return r->m->shard.rank == 1 && r->m->shard.stage == 0 && ++fault_turns > 2;
}

static void fault_stuck(struct rank *r, const struct step *s) {
    while (fault_now(r)) pause();
    fault_ops->mla_attention(r, s);
}

static void fault_fails(struct rank *r, const struct step *s) {
    if (fault_now(r)) die("layer %d: an operation failed", s->il);
    fault_ops->mla_attention(r, s);
}

/* opts NULL: the rank's memory runs out. */
static int fault_start(struct rank *r, const struct model *shard, const void *opts, char *err) {
    static struct cpu_options o = {&kernels_ref, 1, 64, KV_F32, false, false, {0}};
    if (shard->shard.rank == 1 && opts) return fail(err, "no room for it");
    if (shard->shard.rank == 1) free(xmalloc((size_t)1 << 62));
    return cpu_rank_start(r, shard, &o, err);
}

#ifdef SIMULATED
static void rank_fault_gpu(const char *name, const char *path);
#endif

/* The faults, by name: build/test_moe --fault NAME MODEL. */
static int rank_fault(const char *name, const char *path) {
    struct model m;
    struct session s;
    char err[ERR_MAX];
    struct ops table = cpu_ops;
    struct cpu_options o = {&kernels_ref, 2, 64, KV_F32, false, false, {0}};
    int32_t ids[32] = {1, 2, 3, 4, 5, 6, 7, 8};
    signal(SIGALRM, SIG_DFL);
    /* A hang ends here, with another exit code. Waiting for others ends in 8 s on an idle machine. */
    alarm(CHILD_SECONDS);
#ifdef SIMULATED
    if (!strncmp(name, "gpu-", 4)) return rank_fault_gpu(name + 4, path), 0;
#endif
    if (model_load(&m, path, err)) die("%s", err);
    bool memory = !strcmp(name, "memory");
    if ((memory || !strcmp(name, "start")) && session_open(&s, &m, 2, 1, fault_start, memory ? NULL : &o, err))
        die("%s", err);
    fault_ops = &cpu_ops;
    table.mla_attention = !strcmp(name, "stuck") ? fault_stuck : fault_fails;
    session_open_cpu(&s, &m, 2, 2, o);
    for (int i = 0; i < s.pg->n; i++) s.pg->ranks[i].ops = &table;
    for (int i = 0; i < 8; i++) session_forward(&s, ids, 4);
    return 0;
}

struct fault {
    const char *name, *says[2];
};

/* Each fault ends with one line that says so, before its alarm. One after the other: beside others a simulated GPU may
 * be so slow that the ranks give up while they start. */
static void check_faults(const struct fault *f, int n) {
    char self[512], cmd[1024];
    ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    if (!CHECK(len > 0, "no path of the program")) return;
    self[len] = 0;
    for (int i = 0; i < n; i++) {
        char *said = NULL;
        size_t lines = 0;
        /* of latent attention, and small */
        snprintf(cmd, sizeof cmd, "%s --fault %s " FIXTURES "deepseek_v3.gguf", self, f[i].name);
        CHECK_INT(run_command(cmd, NULL, &said), 1, "%s: %s", f[i].name, sb_cstr(&said));
        for (const char *c = sb_cstr(&said); *c; c++) lines += *c == '\n';
        CHECK(lines == 1, "%s: not one line: '%s'", f[i].name, said);
        for (int k = 0; k < 2 && f[i].says[k]; k++) CHECK_HAS(said, f[i].says[k], "%s", f[i].name);
        arrfree(said);
    }
}

static void *spin_on_processor(void *seconds) {
    struct timespec t = {0};
    while ((double)t.tv_sec + 1e-9 * (double)t.tv_nsec < *(const double *)seconds)
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return NULL;
}

/* Threads that wait for a processor are alive: two share one, while this thread sleeps. What only sleeps is not. */
static void test_ranks_busy(void) {
    const struct activity none = {1, 1, 1};
    double seconds = 0.1;
    pthread_t threads[2];
    cpu_set_t all, one;
    int first = 0;
    if (access("/proc/self/schedstat", R_OK)) SKIP("the kernel does not count the time that threads wait");
    sched_getaffinity(0, sizeof all, &all);
    while (!CPU_ISSET(first, &all)) first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    sched_setaffinity(0, sizeof one, &one);
    const struct activity before = program_activity();
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, spin_on_processor, &seconds);
    struct activity during = before;
    for (double ran = 0; ran < seconds; ran = during.ran - before.ran) poll(NULL, 0, 1), during = program_activity();
    CHECK(during.queued - before.queued > 0.25 * seconds, "queued for %g s", during.queued - before.queued);
    CHECK(activity_moved(before, during), "ran for %g s", during.ran - before.ran);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    sched_setaffinity(0, sizeof all, &all);
    CHECK(activity_moved(none, (struct activity){1, 1.9, 1}), "a starved thread");
    CHECK(activity_moved(none, (struct activity){1, 1, 2}), "a disk");
    CHECK(!activity_moved(none, (struct activity){1.01, 1.2, 1}), "ranks that look once a second");
}

static void test_ranks_faults(void) {
    static const struct fault faults[] = {
        {"stuck", {"the all-reduce after the attention of layer ", "missing rank: 1 ("}},
        {"fails", {"rank 1 of 4: layer ", "an operation failed"}},
        {"start", {"rank 1 of 2: no room for it", NULL}},
        {"memory", {"rank 1 of 2: out of memory (4611686018427387904 bytes)", NULL}}};
    check_faults(faults, SANITIZED ? 3 : 4); /* the sanitizers' malloc ends the program itself */
}

static void test_ranks_cli(void) {
    check_command(MOE "--cpu --tp 3 --greedy --think off -p 'What is 7 squared? One word.' </dev/null", 0, "49\n",
                  NULL);
    check_command(MOE "--cpu --tp 2 --pp 2 --kv fp8 --greedy --think off -p 'What is 7 squared? One word.' </dev/null",
                  0, "49\n", NULL);
    check_command(MOE "--cpu --tp 2 --kv fp8 --needle 1000", 0, NULL, "found");
    check_command(MOE "--cpu --tp 3 --pp 2 -p x", 2, "", "makes 6 ranks; at most 4");
    check_command(MOE "--cpu --pp 5 -p x", 2, "", "expected a whole number from 1 to 4");
    check_command(MOE "--cpu --gpus 0 -p x", 2, "", "cannot be combined");
}

/* Of layers whose heads have no common divisor, one rank has all. Catches a unit of heads that overflows. */
static void test_ranks_odd_heads(void) {
    static const int heads[] = {1021, 1019, 1013, 1009, 997, 991};
    struct layer layers[6] = {0};
    struct model m = {.n_layer = 6, .layers = layers};
    for (int il = 0; il < 6; il++) {
        layers[il].attn = (struct attn){.n_head = heads[il], .n_out_group = 1, .o_lora = 32};
        layers[il].wo.type = GGUF_Q8_0;
    }
    const int multiple = heads_multiple(&m, false);
    CHECK(multiple >= 1021 && multiple < 1 << 30, "multiples of %d heads", multiple);
}

#define TESTS_RANKS                                                                                                    \
    {"ranks/stages", test_ranks_stages}, {"ranks/cuts", test_ranks_cuts}, {"ranks/shares", test_ranks_shares},         \
        {"ranks/heads", test_ranks_heads}, {"ranks/odd-heads", test_ranks_odd_heads},                                  \
        {"ranks/blocks", test_ranks_blocks}, {"ranks/fixtures", test_ranks_fixtures}, {"ranks/fast", test_ranks_fast}, \
        {"ranks/demo", test_ranks_demo}, {"ranks/save", test_ranks_save}, {"ranks/busy", test_ranks_busy},             \
        {"ranks/faults", test_ranks_faults}, {"ranks/cli", test_ranks_cli},
