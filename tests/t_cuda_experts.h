/* Experts in host memory: the bits of a model that fits, an independent simulation of the slots, and a start with a GPU
 * that is too small. */

/* Tokens of the forwards whose logits are compared: the first is a prefill, as is one of 17. */
static const int cached_long[] = {40, 1, 2, 1, 16, 1, 7, 1, 3, 17, 1, 14, 0};
static const int cached_short[] = {18, 1, 2, 12, 1, 0};
enum { CACHED_CTX = 128 };

static int cached_tokens(const int *forwards) {
    int n = 0;
    while (*forwards) n += *forwards++;
    return n;
}

enum { LATE = 0 };
static void answer_late(struct session *s);

/* The host's side of a session. */
struct hosted {
    struct home home;
    struct store *store;
};

static void hosted_close(struct hosted *h) {
    home_close(&h->home);
    store_close(h->store);
}

/* Brings the experts of *at into the host's memory, or n_stored of a layer into a store's, 0: there is none; sets n_ask. */
static bool hosted_open(struct hosted *h, const struct model *m, int n_stage, struct offload *at, int n_stored) {
    const int below = at->n_slot ? ALL_LAYERS : at->n_cpu;
    char err[ERR_MAX] = "";
    *h = (struct hosted){0};
    const int least = m->n_expert_max > 64 ? m->n_expert_max : 2 * m->max.n_expert_used; /* in the ring */
    if (n_stored && !(h->store = store_of(m, n_stored, n_stage, least, *at))) return false;
    if (h->store) at->n_ask = h->store->n_ring / 2;
    if (below &&
        !CHECK(!(h->store ? home_of_store(&h->home, h->store, err) : home_open(&h->home, m, below, err)), "%s", err)) {
        hosted_close(h);
        return false;
    }
    return true;
}

/* A session of a layout with experts where `at` says, n_stored of them as in hosted_open, and so many threads for those
 * of the CPU; LATE: one, see late_thread. */
static bool cached_session(struct session *s, struct hosted *h, const struct model *m, const struct layout *d,
                           enum kv_type kv, enum moe_act act, struct offload at, int n_stored, int n_threads) {
    char err[ERR_MAX] = "";
    struct cuda_options o = {
        .n_ctx = CACHED_CTX, .kv = kv, .moe_act = act, .kv_splits = 2, .allreduce = d->allreduce, .offload = at};
    memcpy(o.device, d->device, sizeof o.device);
    cuda_test_devices(4, d->peers);
    if (!hosted_open(h, m, d->pp, &o.offload, n_stored)) return false;
    o.home = h->home.range;
    o.n_home = (int)arrlen(h->home.range);
    if (!CHECK(session_open(s, m, d->tp, d->pp, cuda_rank_start, &o, err) == 0, "%s, %d slots: %s", d->name, at.n_slot,
               err)) {
        hosted_close(h);
        return false;
    }
    session_serve(s, int_max(1, n_threads), h->store);
    if (n_threads == LATE) answer_late(s);
    return true;
}

static void cached_close(struct session *s, struct hosted *h) {
    session_free(s);
    hosted_close(h);
    cuda_test_devices(1, true);
}

/* The logits of forwards of n tokens (tokens, n_vocab): of a prefill the last ones, of decode forwards of 1 to 16 tokens
 * all. NULL after a failed check. */
static float *cached_logits(const struct model *m, const struct layout *d, enum kv_type kv, enum moe_act act,
                            const int *n, struct offload o, int n_stored, int n_threads, struct expert_counts *count) {
    const int all = cached_tokens(n);
    struct session s;
    struct hosted home;
    const size_t v = (size_t)m->n_vocab;
    int32_t ids[CACHED_CTX];
    if (!cached_session(&s, &home, m, d, kv, act, o, n_stored, n_threads)) return NULL;
    for (int i = 0; i < all; i++) ids[i] = (11 + 17 * i + i * i / 7) % m->n_vocab;
    float *out = xcalloc((size_t)all * v, sizeof *out);
    for (int i = 0, at = 0; n[i]; at += n[i++]) {
        const int rows = int_min(n[i], LOGIT_ROWS);
        session_forward(&s, ids + at, n[i]);
        session_head(&s, n[i] - rows, rows);
        for (int k = 0; k < rows; k++)
            memcpy(out + (size_t)(at + n[i] - rows + k) * v, s.r->ops->read_logits(s.r, k), v * sizeof *out);
    }
    *count = session_experts(&s, NULL).count;
    cached_close(&s, &home);
    return out;
}

/* A model's logits with all experts on the GPU and with fewer: with slots for two tokens or almost all experts, and with
 * `all` also for a half and three quarters of them. */
static void cached_agrees(const char *name, const struct model *m, const struct layout *d, enum kv_type kv,
                          enum moe_act act, const int *forwards, bool all) {
    const int k = m->max.n_expert_used, e = m->n_expert_max, slots[] = {int_min(2 * k, e - 1), e / 2, e * 3 / 4};
    const size_t bytes = (size_t)cached_tokens(forwards) * (size_t)m->n_vocab * sizeof(float);
    int seen = 0;
    const size_t before = cuda_test_free_bytes();
    struct expert_counts count;
    float *want = cached_logits(m, d, kv, act, forwards, (struct offload){0}, 0, 1, &count);
    CHECK(!count.hits && !count.misses, "%s: experts are counted though all are on the GPU", name);
    for (int i = 0; i < 3 && want; i++) {
        if (slots[i] < k || slots[i] >= e || (i && slots[i] == slots[i - 1]) || (i && !all)) continue;
        float *got = cached_logits(m, d, kv, act, forwards, (struct offload){.n_slot = slots[i]}, 0, 1, &count);
        CHECK(got && !memcmp(got, want, bytes), "%s, %s, %d of %d slots: other logits", name, d->name, slots[i], e);
        CHECK(count.hits && count.misses, "%s, %d slots: %llu hits, %llu misses", name, slots[i],
              (unsigned long long)count.hits, (unsigned long long)count.misses);
        free(got);
        seen++;
    }
    CHECK(seen, "%s: %d experts, of which a token uses %d, leave no number of slots to try", name, e, k);
    CHECK(cuda_test_free_bytes() == before, "%s: memory is lost", name);
    free(want);
}

/* Statistics want forwards of any length sorted by expert, of few tokens recorded. */
static void cached_statistics(const struct model *m) {
    const struct offload at[] = {{0}, {.n_slot = 2 * m->max.n_expert_used}, {.n_cpu = 1}};
    const size_t v = (size_t)m->n_vocab;
    float *want = xcalloc(v, sizeof *want);
    for (int i = 0; i < 6; i++) {
        struct session s;
        struct hosted home;
        char err[ERR_MAX] = "";
        struct cuda_options o = {.n_ctx = CACHED_CTX, .kv_splits = 2, .stats = true, .offload = at[i % 3]};
        if (!hosted_open(&home, m, 1, &o.offload, i / 3)) break; /* the last two with a store */
        o.home = home.home.range;
        o.n_home = (int)arrlen(home.home.range);
        if (!CHECK(!session_open(&s, m, 1, 1, cuda_rank_start, &o, err), "%s", err)) break;
        session_serve(&s, 1, home.store);
        for (int t = 0; t < 3; t++) session_forward(&s, (int32_t[]){7, 8, 9, 10, 11}, 5 - t % 2);
        session_head(&s, 4, 1);
        const float *got = s.r->ops->read_logits(s.r, 0);
        if (!i) memcpy(want, got, v * sizeof *want);
        CHECK(!memcmp(want, got, v * sizeof *want), "statistics: other logits, case %d", i);
        session_free(&s);
        hosted_close(&home);
    }
    free(want);
}

#ifdef SIMULATED
static const struct layout cached_layouts[] = {{"one rank", 1, 1, {0}, ALLREDUCE_AUTO, true},
                                               {"two ranks", 2, 1, {0, 1}, ALLREDUCE_ONESHOT, true},
                                               {"three ranks", 3, 1, {0, 1, 2}, ALLREDUCE_NCCL, false},
                                               {"two stages", 1, 2, {0, 1}, ALLREDUCE_AUTO, true}};
#else /* a machine may have one GPU only */
static const struct layout cached_layouts[] = {{"one rank", 1, 1, {0}, ALLREDUCE_AUTO, true},
                                               {"two ranks on a GPU", 2, 1, {0, 0}, ALLREDUCE_AUTO, true},
                                               {"three ranks on a GPU", 3, 1, {0, 0, 0}, ALLREDUCE_AUTO, true},
                                               {"two stages on a GPU", 1, 2, {0, 0}, ALLREDUCE_AUTO, true}};
#endif

/* Every type that experts have in files. */
static void cached_types(void) {
    static const enum gguf_type types[] = {GGUF_NVFP4, GGUF_MXFP4, GGUF_Q8_0, GGUF_BF16, GGUF_F16, GGUF_FP8};
    static const char *const names[] = {"NVFP4", "MXFP4", "Q8_0", "BF16", "F16", "FP8"};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct synth shape = {
            "types", "qwen3moe",
            .keys = "block_count=2 embedding_length=256 attention.head_count=4 attention.head_count_kv=2 "
                    "attention.key_length=32 expert_count=16 expert_used_count=2 expert_feed_forward_length=128 "
                    "vocab_size=200 context_length=256",
            .ff_type = types[i]};
        struct model m = {0};
        synth_make(&m, &shape, NULL, false);
        cached_agrees(names[i], &m, &cached_layouts[0], KV_BF16, MOE_ACT_F16, cached_short, false);
        model_free(&m);
    }
}

/* Drafts change no text where experts have slots, or are on disk, too. */
static void cached_drafts(void) {
    static const struct {
        const char *name;
        int layout, n_stored;
    } c[] = {{"deepseek_v3_mtp", 1, 0}, {"qwen3_5_moe_nvfp4", 0, 2}, {"glm4_moe_air", 0, 0}};
    for (int i = 0; i < 3; i++) {
        const struct layout *d = &cached_layouts[c[i].layout];
        struct model m;
        struct session s;
        struct hosted home;
        if (!fixture_load(c[i].name, &m)) return;
        const struct offload at = {.n_slot = int_min(2 * m.max.n_expert_used, m.n_expert_max - 1)};
        if (!cached_session(&s, &home, &m, d, i % 2 ? KV_BF16 : KV_FP8, MOE_ACT_F16, at, c[i].n_stored, 1)) return;
        check_same_text(c[i].name, &s, d->name, i, 3 + i, false);
        CHECK(session_experts(&s, NULL).count.misses, "%s: nothing was missing", c[i].name);
        cached_close(&s, &home);
        model_free(&m);
    }
}

static void test_cuda_experts(void) {
    static const struct {
        const char *name;
        enum kv_type kv;
        int layout;
        enum moe_act act;
    } cases[] = {{"qwen3moe_nvfp4", KV_FP8, 0, MOE_ACT_F16},  {"qwen3moe_nvfp4", KV_BF16, 1, MOE_ACT_F16},
                 {"qwen3moe_nvfp4", KV_BF16, 0, MOE_ACT_FP4}, {"qwen3moe", KV_BF16, 3, MOE_ACT_F16},
                 {"deepseek_v3", KV_FP8, 1, MOE_ACT_F16},     {"qwen3moe_ct", KV_BF16, 2, MOE_ACT_F16}};
    const bool fp4 = cuda_test_begin(21);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model m;
        if (cases[i].act == MOE_ACT_FP4 && !fp4) continue;
        if (!fixture_load(cases[i].name, &m)) return;
        cached_agrees(cases[i].name, &m, &cached_layouts[cases[i].layout], cases[i].kv, cases[i].act, cached_long,
                      i < 2);
        if (!i) cached_statistics(&m);
        model_free(&m);
    }
    cached_types();
    cached_drafts();
    for (int f = 0; f < RANK_FIXTURES; f++) {
        struct model m;
        if (!fixture_load(rank_fixtures[f], &m)) return;
        if (m.n_expert_max && gpu_runs(&m))
            cached_agrees(rank_fixtures[f], &m, &cached_layouts[f % 2 ? 0 : 3], f % 3 ? KV_FP8 : KV_BF16, MOE_ACT_F16,
                          cached_short, false);
        model_free(&m);
    }
}

/* One model with few slots and several waves, for mutants. */
void cuda_test_cached(void) {
    struct model m;
    if (!fixture_load("qwen3moe", &m)) return;
    cached_agrees("qwen3moe", &m, &cached_layouts[0], KV_BF16, MOE_ACT_F16, cached_long, false);
    model_free(&m);
}

/* ---- experts that the CPU computes ---- */

/* Layers before n_cpu that have experts. */
static int cpu_layers(const struct model *m, int n_cpu) {
    int n = 0;
    for (int il = 0; il < m->n_layer; il++)
        n += m->layers[il].n_expert && !layer_held(m, il, (struct offload){.n_cpu = n_cpu});
    return n;
}

/* Answers so late that the kernel which waits has begun. */
static void *late_thread(void *arg) {
    struct expert_server *s = arg;
    while (!atomic_load(&s->stop)) {
        nanosleep(&(struct timespec){0, rank_asks(s->pg->ranks) ? 20000000 : 50000}, NULL);
        server_turn(s);
    }
    return NULL;
}

/* Lets late_thread take the place of the session's own. */
static void answer_late(struct session *s) {
    struct expert_server *server = s->server;
    if (!server) return;
    atomic_store(&server->stop, true);
    pthread_join(server->thread, NULL);
    atomic_store(&server->stop, false);
    CHECK(!pthread_create(&server->thread, NULL, late_thread, server), "no thread");
}

/* A model's logits with experts of the first n_cpu layers computed by the CPU: near those of the GPU, but for tokens
 * whose choice of keys another rounding turns, and the same whatever threads compute, however late, and whatever is on
 * the GPU. */
static void cpu_experts_agree(const char *name, const struct model *m, const struct layout *d, int n_cpu) {
    const size_t v = (size_t)m->n_vocab, n = (size_t)cached_tokens(cached_short), first = (size_t)cached_short[0];
    struct expert_counts count;
    const struct offload all = {0}, cpu = {.n_cpu = n_cpu};
    const struct offload both = {.n_cpu = n_cpu, .n_slot = int_min(2 * m->max.n_expert_used, m->n_expert_max - 1)};
    float *want = cached_logits(m, d, KV_BF16, MOE_ACT_F16, cached_short, all, 0, 1, &count);
    float *got = cached_logits(m, d, KV_BF16, MOE_ACT_F16, cached_short, cpu, 0, 1, &count);
    CHECK(!count.hits && count.misses, "%s: %llu hits, %llu misses", name, (unsigned long long)count.hits,
          (unsigned long long)count.misses); /* prefill copies */
    float *two = cached_logits(m, d, KV_BF16, MOE_ACT_F16, cached_short, cpu, 0, 2, &count);
    float *late = cached_logits(m, d, KV_BF16, MOE_ACT_F16, cached_short, cpu, 0, LATE, &count);
    float *slots = cached_logits(m, d, KV_BF16, MOE_ACT_F16, cached_short, both, 0, 2, &count);
    if (want && got && two && late && slots) {
        double each[CACHED_CTX];
        for (size_t i = first; i < n; i++) each[i - first] = nmse(got + i * v, want + i * v, v);
        const double e = median(each, (int)(n - first));
        CHECK(e < 1e-3 && e > 0, "%s, %s: median of the NMSEs of tokens %.2e", name, d->name, e);
        CHECK(!memcmp(got, want, first * v * sizeof *got), "%s, %s: another prefill", name, d->name);
        CHECK(!memcmp(got, two, n * v * sizeof *got), "%s, %s: two threads give other logits", name, d->name);
        CHECK(!memcmp(got, late, n * v * sizeof *got), "%s, %s: late answers give other logits", name, d->name);
        CHECK(!memcmp(got, slots, n * v * sizeof *got), "%s, %s: slots give other logits", name, d->name);
    }
    free(want), free(got), free(two), free(late), free(slots);
}

/* Rows of more values than a block adds at once. */
static void cpu_experts_wide(void) {
    static const struct synth wide = {
        "wide rows", "qwen3moe",
        .keys = "block_count=2 embedding_length=1152 attention.head_count=4 attention.head_count_kv=2 "
                "attention.key_length=32 expert_count=16 expert_used_count=2 expert_feed_forward_length=64 "
                "vocab_size=200 context_length=256"};
    struct model m = {0};
    synth_make(&m, &wide, NULL, false);
    cpu_experts_agree(wide.name, &m, &cached_layouts[0], m.n_layer);
    model_free(&m);
}

/* Wide rows, and one model with a shared expert, for mutants. */
void cuda_test_by_cpu(void) {
    struct model m;
    cpu_experts_wide();
    if (!fixture_load("deepseek_v4", &m)) return;
    cpu_experts_agree("deepseek_v4", &m, &cached_layouts[0], m.n_layer);
    model_free(&m);
}

static void test_cuda_cpu_experts(void) {
    static const struct {
        const char *name;
        int layout, n_cpu;
        bool launches; /* are those of the forecast; short contexts of windows and rare keys count otherwise */
    } cases[] = {{"qwen3moe_nvfp4", 0, 1, true}, {"qwen3moe", 3, 4, false},
                 {"deepseek_v3", 1, 2, false},   {"gpt_oss", 0, 4, false},
                 {"qwen3_5_moe", 0, 4, false},   {"deepseek_v4", 0, 4, true},
                 {"nemotron_h", 0, 6, true},     {"inkling2_loop", 0, 3, true},
                 {"qwen4_exp", 0, 2, true},      {"gemma4", 0, 3, false},
                 {"deepseek_v41", 0, 3, false},  {"arctic_nvfp4", 3, 1, false},
                 {"arctic", 0, 1, false},        {"kimi_k3", 0, 3, false},
                 {"longcat_flash", 0, 4, true},  {"longcat_flash_nvfp4", 3, 2, false}};
    const size_t before = cuda_test_free_bytes();
    cuda_test_begin(22);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model m;
        struct session s;
        struct hosted home;
        const struct layout *d = &cached_layouts[cases[i].layout];
        if (!fixture_load(cases[i].name, &m)) return;
        cpu_experts_agree(cases[i].name, &m, d, cases[i].n_cpu);
        if (!cached_session(&s, &home, &m, d, KV_FP8, MOE_ACT_F16, (struct offload){.n_cpu = cases[i].n_cpu}, 0, 2))
            return;
        uint32_t answered = 0;
        for (int t = 0; t < 5; t++) session_forward(&s, (int32_t[]){3, 4, 5}, 1 + t % 3);
        session_wait(&s);
        for (int k = 0; k < s.pg->n; k++)
            if (s.pg->ranks[k].question) answered += s.pg->ranks[k].question->answered;
        if (cases[i].launches) launches_check(cases[i].name, &s);
        CHECK_INT((int)answered, 5 * cpu_layers(&m, cases[i].n_cpu), "%s: questions", cases[i].name);
        cached_close(&s, &home);
        model_free(&m);
    }
    cpu_experts_wide();
    CHECK(cuda_test_free_bytes() == before, "memory is lost");
}

/* ---- experts that are read from disk ---- */

/* A model's logits with all experts on the GPU, and with slots for two tokens, or for half of many experts, and n_stored
 * experts of a layer in memory. */
static void disk_agrees(const char *name, const struct model *m, const struct layout *d, enum kv_type kv, int n_cpu,
                        int n_stored, int n_threads) {
    const int slots = m->n_expert_max > 64 ? m->n_expert_max / 2 : 2 * m->max.n_expert_used;
    const struct offload at = {.n_cpu = n_cpu, .n_slot = int_min(slots, m->n_expert_max - 1)};
    const size_t bytes = (size_t)cached_tokens(cached_long) * (size_t)m->n_vocab * sizeof(float);
    struct expert_counts count;
    float *want = cached_logits(m, d, kv, MOE_ACT_F16, cached_long, (struct offload){.n_cpu = n_cpu}, 0, 1, &count);
    float *got = cached_logits(m, d, kv, MOE_ACT_F16, cached_long, at, n_stored, n_threads, &count);
    CHECK(got && want && !memcmp(got, want, bytes), "%s, %s, %d of %d in memory: other logits", name, d->name, n_stored,
          m->n_expert_max);
    CHECK(count.hits && count.misses, "%s: %llu hits, %llu misses", name, (unsigned long long)count.hits,
          (unsigned long long)count.misses);
    free(want), free(got);
}

/* Loads a file of such a model. */
static bool disk_synth(struct model *m, const struct synth *y) {
    char path[64], err[ERR_MAX];
    struct model made = {0};
    snprintf(path, sizeof path, "build/synth-%d.gguf", (int)getpid());
    unlink(path);
    synth_make(&made, y, path, false);
    model_free(&made);
    const bool loaded = CHECK(!model_load(m, path, err), "%s", err);
    unlink(path);
    return loaded;
}

/* A file with layers of more experts than one warp takes over from an answer. */
static bool disk_many(struct model *m) {
    static const struct synth many = {
        "many experts", "qwen3moe",
        .keys = "block_count=2 embedding_length=64 attention.head_count=4 attention.head_count_kv=2 "
                "attention.key_length=32 expert_count=256 expert_used_count=4 expert_feed_forward_length=64 "
                "vocab_size=200 context_length=256"};
    return disk_synth(m, &many);
}

/* Reads that fail take the turn back, and leave nothing wrong in the slots. */
static void disk_fails(const struct model *m) {
    const struct offload at = {.n_slot = 2 * m->max.n_expert_used};
    const size_t row = (size_t)m->n_vocab * sizeof(float);
    struct session s;
    struct hosted home;
    int32_t ids[40];
    char err[ERR_MAX] = "";
    for (int i = 0; i < 40; i++) ids[i] = (11 + 17 * i) % m->n_vocab;
    if (!cached_session(&s, &home, m, &cached_layouts[0], KV_BF16, MOE_ACT_F16, at, 2, 1)) return;
    CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE, "%s", err);
    float *want = memcpy(xmalloc(row), session_logits(&s), row);
    for (int i = 0; i < 4; i++) { /* in a prefill, and in forwards of few tokens after a prefill */
        session_truncate(&s, 0);
        if (i % 2) CHECK(session_sync(&s, ids, 30, 0, err) == SYNC_DONE, "%s", err);
        store_empty(home.store);
        fault_set(i < 2 ? FAULT_EIO : FAULT_END, i, 1000000);
        bool failed = !(i % 2) && session_sync(&s, ids, 40, 0, err) == SYNC_FAILED;
        for (int t = 30; t < 40 && !failed && i % 2; t++) {
            session_decode(&s, ids[t]);
            failed = session_failed(&s, err);
        }
        read_at = pread;
        CHECK(failed && strstr(err, "reading the model: ") && !s.n_past, "case %d: %s, %d tokens", i, err, s.n_past);
        CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE, "case %d: %s", i, err);
        CHECK(!memcmp(want, session_logits(&s), row), "case %d: other logits", i);
    }
    launches_check("experts on disk", &s);
    free(want);
    cached_close(&s, &home);
}

static void test_cuda_disk(void) {
    static const struct {
        const char *name;
        enum kv_type kv;
        int layout, n_cpu, n_stored, n_threads;
    } cases[] = {{"qwen3moe_nvfp4", KV_FP8, 0, 0, 1, 1}, {"qwen3moe_nvfp4", KV_BF16, 1, 0, 3, 1},
                 {"deepseek_v3", KV_FP8, 2, 0, 5, 1},    {"deepseek_v3", KV_BF16, 3, 2, 2, LATE},
                 {"gpt_oss", KV_FP8, 0, 2, 1, 2},        {"qwen3_5_moe", KV_BF16, 3, 0, 4, 1},
                 {"deepseek_v4", KV_FP8, 0, 0, 2, 1},    {"step3p7", KV_BF16, 0, 0, 100, 1}};
    const size_t before = cuda_test_free_bytes();
    cuda_test_begin(23);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model m;
        if (!fixture_load(cases[i].name, &m)) return;
        disk_agrees(cases[i].name, &m, &cached_layouts[cases[i].layout], cases[i].kv, cases[i].n_cpu, cases[i].n_stored,
                    cases[i].n_threads);
        if (!i) disk_fails(&m);
        model_free(&m);
    }
    struct model m;
    if (!disk_many(&m)) return;
    disk_agrees("many experts", &m, &cached_layouts[0], KV_BF16, 0, 48, LATE);
    model_free(&m);
    CHECK(cuda_test_free_bytes() == before, "memory is lost");
}

/* One model with waves of several questions, and one with many experts, for mutants. */
void cuda_test_from_disk(void) {
    struct model m;
    if (!fixture_load("qwen3moe", &m)) return;
    disk_agrees("qwen3moe", &m, &cached_layouts[0], KV_BF16, 0, 1, LATE);
    model_free(&m);
    if (!disk_many(&m)) return;
    disk_agrees("many experts", &m, &cached_layouts[0], KV_BF16, 0, 48, LATE);
    model_free(&m);
}

/* ---- rows of n-grams that are read from the file ---- */

/* A model's logits with its tables of n-grams in the host's memory, and with rows from the file beside experts where `at`
 * says. */
static void rows_agree(const char *name, const struct model *m, const struct layout *d, enum kv_type kv,
                       struct offload at, int n_stored, int n_threads) {
    const size_t bytes = (size_t)cached_tokens(cached_long) * (size_t)m->n_vocab * sizeof(float);
    struct expert_counts count;
    float *want = cached_logits(m, d, kv, MOE_ACT_F16, cached_long, (struct offload){0}, 0, 1, &count);
    at.read_rows = true;
    float *got = cached_logits(m, d, kv, MOE_ACT_F16, cached_long, at, n_stored, n_threads, &count);
    CHECK(got && want && !memcmp(got, want, bytes), "%s, %s, rows from the file: other logits", name, d->name);
    free(want), free(got);
}

/* Opens a session whose rows of n-grams come from the file. */
static bool rows_session(struct session *s, const struct model *m, const struct layout *d, int n_threads) {
    struct hosted none;
    return cached_session(s, &none, m, d, KV_BF16, MOE_ACT_F16, (struct offload){.read_rows = true}, 0, n_threads);
}

/* Reads of rows that fail take the turn back: in a prefill, in forwards of few tokens, in one that began before its token
 * was known. */
static void rows_fail(const struct model *m) {
    const size_t row = (size_t)m->n_vocab * sizeof(float);
    const struct sampling o = {.greedy = true};
    struct session s;
    uint64_t rng = 1;
    int32_t ids[40];
    char err[ERR_MAX] = "";
    for (int i = 0; i < 40; i++) ids[i] = (11 + 17 * i) % m->n_vocab;
    if (!rows_session(&s, m, &cached_layouts[0], 1)) return;
    CHECK(s.r->rows && s.r->async_decode, "rows are not read, or nothing goes ahead");
    CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE, "%s", err);
    float *want = memcpy(xmalloc(row), session_logits(&s), row);
    for (int i = 0; i < 6; i++) {
        session_truncate(&s, 0);
        if (i > 1) CHECK(session_sync(&s, ids, 30, 0, err) == SYNC_DONE, "%s", err);
        fault_set(i % 2 ? FAULT_END : FAULT_EIO, i < 2 ? 100 : 0, 1000000);
        bool failed = i < 2 && session_sync(&s, ids, 40, 0, err) == SYNC_FAILED;
        for (int t = 30; t < 40 && !failed && i > 1; t++) {
            const int32_t id = i > 3 ? session_sample(&s, &o, &rng) : ids[t];
            failed = session_failed(&s, err);
            if (!failed) session_decode(&s, id);
        }
        read_at = pread;
        CHECK(failed && strstr(err, "reading the model: ") && !s.n_past, "case %d: %s, %d tokens", i, err, s.n_past);
        CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE, "case %d: %s", i, err);
        CHECK(!memcmp(want, session_logits(&s), row), "case %d: other logits", i);
    }
    fault_set(FAULT_SHORT, 0, 1000000); /* short reads are made whole; on Ctrl-C a prompt is as if it had not been */
    session_truncate(&s, 0);
    CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE && !memcmp(want, session_logits(&s), row), "short reads");
    fault_set(FAULT_CTRL_C, 20, 1);
    session_truncate(&s, 0);
    CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_INTERRUPTED && !s.n_past, "Ctrl-C: %d tokens", s.n_past);
    interrupted = 0;
    read_at = pread;
    CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE && !memcmp(want, session_logits(&s), row), "after Ctrl-C");
    launches_check("rows of n-grams in the file", &s);
    free(want);
    session_free(&s);
    cuda_test_devices(1, true);
}

/* Timelines side by side, with rows of n-grams from the file. */
static bool rows_parallel_open(struct session *s, const struct model *m, const struct parallel_case *c,
                               struct timelines t) {
    if (!timelines_session(s, m, c, t, (struct offload){.read_rows = true})) return false;
    session_serve(s, 1, NULL);
    return true;
}

/* Models with tables of n-grams: several layouts, late answers, beside experts on disk; drafts, prompts side by side. */
static void test_cuda_rows_read(void) {
    static const struct {
        const char *name; /* of a fixture; NULL: the model of ngram_shapes[0] */
        enum kv_type kv;
        int layout, n_stored, n_threads;
    } cases[] = {{"qwen4_exp", KV_FP8, 0, 0, LATE},     {NULL, KV_BF16, 1, 0, 1},
                 {"qwen4_exp", KV_BF16, 3, 0, 1},       {"qwen4_exp", KV_BF16, 0, 4, 1},
                 {"deepseek_v41", KV_BF16, 0, 0, LATE}, {"deepseek_v41", KV_BF16, 0, 4, 1}};
    static const struct parallel_case side[] = {
        {"qwen4_exp", NULL, 1, 1, KV_BF16, 5, 0, rows_parallel_open, 0, false, 1},
        {"qwen4_exp", NULL, 1, 2, KV_FP8, 4, 330, rows_parallel_open, 256, true, 0},
        {"deepseek_v41", NULL, 1, 1, KV_BF16, 4, 0, rows_parallel_open, 0, false, 1}};
    const size_t before = cuda_test_free_bytes();
    struct session s;
    cuda_test_begin(25);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model m;
        if (!(cases[i].name ? fixture_load(cases[i].name, &m) : disk_synth(&m, &ngram_shapes[0]))) return;
        const int n_slot = cases[i].n_stored ? int_min(2 * m.max.n_expert_used, m.n_expert_max - 1) : 0;
        rows_agree(m.name, &m, &cached_layouts[cases[i].layout], cases[i].kv, (struct offload){.n_slot = n_slot},
                   cases[i].n_stored, cases[i].n_threads);
        if (!i) rows_fail(&m);
        if (i < 2 && rows_session(&s, &m, &cached_layouts[i], 1)) {
            check_same_text(m.name, &s, "rows from the file", (int)i, 4, false);
            session_free(&s);
            cuda_test_devices(1, true);
        }
        model_free(&m);
    }
    for (size_t i = 0; i < sizeof side / sizeof *side; i++) check_parallel(&side[i]);
    cuda_test_devices(1, true);
    CHECK(cuda_test_free_bytes() == before, "memory is lost");
}

/* One model on two ranks, for mutants. */
void cuda_test_read_rows(void) {
    struct model m;
    if (!disk_synth(&m, &ngram_shapes[0])) return;
    rows_agree("two ranks", &m, &cached_layouts[1], KV_BF16, (struct offload){0}, 0, LATE);
    model_free(&m);
}

#ifdef SIMULATED
/* A host whose memory has no room for the table reads its rows from the file, and says so. */
static void test_cuda_small_host(void) {
    struct settings set;
    struct doctor *d = doctor_new(&set); /* the settings' defaults */
    const int32_t ids[] = {5, 17, 80, 3, 44, 9, 21, 60, 2, 7};
    int32_t text[2][12];
    set.vram_reserve = 0, set.n_ctx = CACHED_CTX, set.tp = set.pp = 1;
    for (int small = 0; small < 2; small++) {
        struct engine e = {.set = &set};
        struct caught c;
        char err[ERR_MAX] = "", *out = NULL, *said = NULL;
        if (!fixture_load("qwen4_exp", &e.model)) break;
        machine_begin();
        if (small) machine_put("/proc/meminfo", "MemTotal: 16 kB\nMemAvailable: 4 kB\n");
        catch_begin(&c);
        const int rc = engine_start(&e, true, err);
        catch_end(&c, &out, &said);
        machine_end();
        if (CHECK(!rc, "%s", err)) {
            CHECK(
                (e.session.r->rows != NULL) == small &&
                    strstr(sb_cstr(&said), small ? "rows are read from the file" : " of host memory, of which a token"),
                "%s", sb_cstr(&said));
            cuda_greedy(&e.session, ids, 10, text[small], 12);
            engine_close(&e);
        }
        arrfree(out), arrfree(said);
    }
    CHECK(!memcmp(text[0], text[1], sizeof text[0]), "other tokens with rows from the file");
    doctor_done(d);
}
#endif

/* ---- the rule of the slots, step by step ---- */

static const struct ops *slots_ops;
static struct {
    long long heat[MAX_EXPERTS];
    int in[MAX_EXPERTS]; /* the experts in the slots */
    struct expert_counts count;
    int n_slot;
} slots_of[8];

/* A feed-forward, after which the slots are what the rule of "Experts in host memory" makes of its jobs. */
static void slots_norm_ffn(struct rank *r, const struct step *s) {
    const struct layer *layer = &r->m->layers[s->il];
    const int E = layer->n_expert, shift = heat_shift(slots_of[s->il].n_slot, layer->n_expert_used);
    struct expert_job jobs[MAX_EXPERTS];
    int32_t slot_of[MAX_EXPERTS], expert_of[MAX_EXPERTS];
    uint32_t heat[MAX_EXPERTS];
    int n = 0;
    slots_ops->norm_ffn(r, s);
    if (!E || r->n_tok > DECODE_MAX_TOKENS) return;
    cuda_test_jobs(r, jobs, &n);
    cuda_test_slots(r, s->il, slot_of, expert_of, heat);
    bool used[MAX_EXPERTS] = {false};
    for (int i = 0; i < n; i++) used[jobs[i].expert] = true;
    for (int e = 0; e < E; e++) {
        long long *h = &slots_of[s->il].heat[e];
        *h = *h - (*h >> shift) + (used[e] ? 4096 : 0);
    }
    int *in = slots_of[s->il].in, n_slot = slots_of[s->il].n_slot;
    bool there[MAX_EXPERTS] = {false};
    for (int i = 0; i < n_slot; i++) there[in[i]] = true;
    for (int e = 0; e < E; e++) {
        int worst = -1;
        if (!used[e]) continue;
        if (there[e]) slots_of[s->il].count.hits++;
        else slots_of[s->il].count.misses++;
        if (there[e]) continue;
        for (int i = 0; i < n_slot; i++)
            if (!used[in[i]] && (worst < 0 || slots_of[s->il].heat[in[i]] < slots_of[s->il].heat[in[worst]])) worst = i;
        in[worst] = e;
    }
    for (int i = 0; i < n_slot; i++)
        CHECK(expert_of[i] == in[i] && slot_of[in[i]] == i, "layer %d: slot %d has expert %d, expected %d", s->il, i,
              expert_of[i], in[i]);
    for (int e = 0; e < E; e++)
        CHECK((long long)heat[e] == slots_of[s->il].heat[e] && (slot_of[e] < 0 || expert_of[slot_of[e]] == e),
              "layer %d: expert %d has count %u, expected %lld", s->il, e, heat[e], slots_of[s->il].heat[e]);
    for (int i = 0; i < n; i++)
        CHECK(jobs[i].place == slot_of[jobs[i].expert], "layer %d: the job of expert %d looks into slot %d", s->il,
              jobs[i].expert, jobs[i].place);
}

static void test_cuda_slots(void) {
    struct model m;
    struct session s;
    struct hosted home;
    uint64_t rng = 5;
    if (!fixture_load("deepseek_v3_reap", &m)) return;
    const int n_slot = 2 * m.max.n_expert_used;
    if (!cached_session(&s, &home, &m, &cached_layouts[0], KV_BF16, MOE_ACT_F16, (struct offload){.n_slot = n_slot}, 0,
                        1))
        return;
    struct ops table = *s.r->ops;
    slots_ops = s.r->ops;
    table.norm_ffn = slots_norm_ffn;
    table.forward = step_forward;
    s.r->ops = &table;
    memset(slots_of, 0, sizeof slots_of);
    for (int il = 0; il < model_blocks(&m); il++) {
        slots_of[il].n_slot = n_slot;
        for (int i = 0; i < n_slot; i++) slots_of[il].in[i] = i;
    }
    for (int t = 0; t < 60; t++) {
        int32_t ids[2];
        const int n = 1 + t % 2;
        for (int i = 0; i < n; i++) ids[i] = (int32_t)(rng_next(&rng) % (uint64_t)m.n_vocab);
        session_forward(&s, ids, n);
    }
    struct expert_counts want = {0};
    for (int il = 0; il < model_blocks(&m); il++)
        want.hits += slots_of[il].count.hits, want.misses += slots_of[il].count.misses;
    const struct expert_use use = session_experts(&s, NULL);
    const struct expert_counts got = use.count;
    CHECK(got.hits == want.hits && got.misses == want.misses && got.hits > 100 && got.misses > 50,
          "%llu hits and %llu misses, expected %llu and %llu", (unsigned long long)got.hits,
          (unsigned long long)got.misses, (unsigned long long)want.hits, (unsigned long long)want.misses);
    double bytes = 0;
    for (int il = 0; il < model_blocks(&m); il++)
        for (int k = 0; k < FFN_MATRICES && m.layers[il].n_expert; k++) {
            const struct weight *w = layer_matrix(&m.layers[il], (enum ffn_matrix)k);
            bytes += (double)slots_of[il].count.misses * w->n_out * (double)w->row_bytes;
        }
    CHECK(use.bytes == bytes, "%.0f bytes copied, expected %.0f", use.bytes, bytes);
    s.r->ops = slots_ops;
    cached_close(&s, &home);
    model_free(&m);
}

#ifdef SIMULATED
/* ---- GPUs that are too small ---- */

static bool many; /* instead of the fixture the model of disk_many */

/* Opens a fixture as the program does, on GPUs of so many bytes. NULL, or why that fails. */
static const char *small_open(struct engine *e, struct settings *set, size_t memory, int tp, enum fit fit) {
    static char err[ERR_MAX];
    struct caught c;
    char *out = NULL, *said = NULL;
    set->n_ctx = CACHED_CTX, set->tp = tp, set->pp = 1, set->fit = fit;
    cuda_test_devices(2, true);
    cuda_test_memory(memory);
    *e = (struct engine){.set = set};
    if (many ? !disk_many(&e->model) : !fixture_load("qwen3moe_nvfp4", &e->model)) return "no model";
    catch_begin(&c);
    const int rc = engine_start(e, true, err);
    catch_end(&c, &out, &said);
    const bool told = said && strstr(said, "a layer on the GPU");
    const int n_slot = rc ? 0 : cuda_test_n_slot(e->session.r);
    if (!rc) CHECK(told == (n_slot > 0), "%d slots: %.300s", n_slot, sb_cstr(&said));
    arrfree(out), arrfree(said);
    return rc ? err : NULL;
}

static void small_close(struct engine *e) {
    engine_close(e);
    cuda_test_devices(1, true);
}

/* The slots that the program chooses for GPUs of so many bytes; 0: all experts fit. */
static int small_slots(struct settings *set, size_t memory) {
    struct engine e = {.set = set};
    const struct cuda_options o = {
        .kv = settings_kv(set, &e.model, true), .device = {0, 1}, .offload = {.n_cpu = set->n_cpu_moe}};
    int n_ctx = CACHED_CTX;
    if (many ? !disk_many(&e.model) : !fixture_load("qwen3moe_nvfp4", &e.model)) return 0;
    cuda_test_devices(2, true);
    cuda_test_memory(memory);
    bool shared;
    char err[ERR_MAX];
    find_exact_fp8(&e.model);
    const int n = engine_slots(&e, &o, &n_ctx, &shared, err);
    model_free(&e.model);
    return n;
}

/* The most bytes into which not all experts fit. */
static size_t small_memory(struct settings *set) {
    size_t lo = 0, hi = (size_t)1 << 30;
    while (hi - lo > 4096) {
        const size_t mid = (lo + hi) / 2 / 256 * 256;
        if (small_slots(set, mid)) lo = mid;
        else hi = mid;
    }
    return lo;
}

/* A model that does not fit starts by itself, with as many slots as there is room for, and answers the same; with too
 * little room, or where that is refused, one line says so and nothing is held. */
static void test_cuda_small(void) {
    struct settings set;
    struct engine e;
    struct doctor *d = doctor_new(&set); /* the settings' defaults */
    const int32_t ids[] = {5, 17, 80, 3, 44, 9, 21, 60, 2, 7};
    int32_t want[12], got[12], cpu[12], other[12];
    const size_t before = cuda_test_free_bytes();
    const char *why;
    set.vram_reserve = 0;
    for (int tp = 1; tp <= 2; tp++) {
        if (!CHECK(!(why = small_open(&e, &set, (size_t)1 << 30, tp, FIT_ON)), "%s", why)) return;
        const int n_expert = e.model.n_expert_max, used = e.model.max.n_expert_used;
        CHECK(!cuda_test_n_slot(e.session.r), "all experts fit");
        cuda_greedy(&e.session, ids, 10, want, 12);
        small_close(&e);
        const size_t lo = small_memory(&set);
        int seen = 0;
        for (size_t memory = lo, last = (size_t)n_expert; last > (size_t)(2 * used); memory -= 2048) {
            const int planned = small_slots(&set, memory);
            if (!CHECK(planned >= 2 * used && (size_t)planned <= last, "%d slots planned for %zu bytes, %zu for more",
                       planned, memory, last))
                break;
            if ((size_t)planned == last) continue;
            why = small_open(&e, &set, memory, tp, FIT_ON);
            if (!CHECK(!why, "%d slots in %zu bytes: %s", planned, memory, why)) break;
            CHECK(cuda_test_n_slot(e.session.r) == planned, "%d slots, not %d", cuda_test_n_slot(e.session.r), planned);
            cuda_greedy(&e.session, ids, 10, got, 12);
            CHECK(!memcmp(got, want, sizeof want), "%d slots: other tokens", planned);
            small_close(&e);
            last = (size_t)planned;
            seen++;
        }
        CHECK(seen >= 2, "%d numbers of slots were tried", seen); /* the ring takes the place of some */
        set.n_cpu_moe = 1;                                        /* the text depends on it, but not on the memory */
        for (int i = 0; i < 2; i++) {
            why = small_open(&e, &set, i ? small_memory(&set) : (size_t)1 << 30, tp, FIT_ON);
            if (!CHECK(!why, "--n-cpu-moe 1: %s", why)) break;
            CHECK((cuda_test_n_slot(e.session.r) > 0) == (i > 0) && e.session.server, "--n-cpu-moe 1: %d slots",
                  cuda_test_n_slot(e.session.r));
            cuda_greedy(&e.session, ids, 10, i ? got : want, 12);
            small_close(&e);
        }
        CHECK(!memcmp(got, want, sizeof want), "--n-cpu-moe 1: other tokens in less memory");
        memcpy(cpu, got, sizeof cpu);
        set.n_cpu_moe = 0;
        for (int i = 0; i < 3; i++) { /* from disk, as if the host's memory were small, too */
            set.expert_memory = 1;
            set.n_cpu_moe = i == 2;
            why = small_open(&e, &set, i == 1 ? (size_t)1 << 30 : lo, tp, FIT_ON);
            if (!CHECK(!why, "--expert-memory: %s", why)) break;
            CHECK((e.store != NULL) == (i != 1), "case %d: %s", i, e.store ? "a store" : "no store");
            if (i == 1 || !i) cuda_greedy(&e.session, ids, 10, i ? want : got, 12);
            else cuda_greedy(&e.session, ids, 10, other, 12);
            small_close(&e);
        }
        CHECK(!memcmp(got, want, sizeof want), "--expert-memory: other tokens");
        CHECK(!memcmp(other, cpu, sizeof cpu), "--expert-memory --n-cpu-moe 1: other tokens");
        set.n_cpu_moe = set.expert_memory = 0;
        why = small_open(&e, &set, lo, tp, FIT_OFF);
        CHECK(why && strstr(why, "-fit off"), "%s", why);
        small_close(&e);
        why = small_open(&e, &set, lo / 4, tp, FIT_ON);
        CHECK(why && strstr(why, "--vram-reserve 0: ") && strstr(why, " are missing (with 4 experts a layer "), "%s",
              why);
        small_close(&e);
        set.vram_reserve = 2048;
        why = small_open(&e, &set, (size_t)1 << 30, tp, FIT_ON);
        CHECK(why && strstr(why, "--vram-reserve 2048: 1.1 GiB are missing"), "%s", why);
        small_close(&e);
        set.vram_reserve = 0;
        cuda_test_fail("cudaHostRegister", 1);
        why = small_open(&e, &set, lo, tp, FIT_ON);
        CHECK(why && strstr(why, "cannot pin"), "%s", why);
        small_close(&e);
        cuda_test_fail("cudaHostRegister", 0);
    }
    many = true; /* on a GPU whose memory is the host's a ring alone is between the disk and the slots */
    for (int i = 0; i < 2; i++) {
        cuda_test_integrated(0, i);
        size_t memory = (size_t)1 << 30;
        if (i) memory = small_memory(&set);
        for (int k = 0; k < 32 && i && small_slots(&set, memory) <= 0; k++) memory -= 128 << 10;
        why = small_open(&e, &set, memory, 1, FIT_ON);
        if (!CHECK(!why, "integrated: %s", why)) break;
        const int n_slot = cuda_test_n_slot(e.session.r);
        CHECK(i ? n_slot > 8 && n_slot < e.model.n_expert_max && e.store && !e.store->layer[0].n_slot
                : !n_slot && !e.store,
              "%d slots, %s", n_slot, e.store ? "a store" : "no store");
        cuda_greedy(&e.session, ids, 10, i ? got : want, 12);
        small_close(&e);
    }
    CHECK(!memcmp(got, want, sizeof want), "integrated: other tokens");
    cuda_test_integrated(0, false);
    many = false;
    doctor_done(d);
    cuda_test_memory((size_t)16 << 30);
    CHECK(cuda_test_free_bytes() == before, "memory is lost");
}
#endif

void cuda_test_slot_rule(void) { test_cuda_slots(); }

#define TESTS_CUDA_EXPERTS                                                                                           \
    {"cuda/experts", test_cuda_experts}, {"cuda/cpu-experts", test_cuda_cpu_experts}, {"cuda/disk", test_cuda_disk}, \
        {"cuda/slots", test_cuda_slots}, {"cuda/read-rows", test_cuda_rows_read},
