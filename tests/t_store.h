/* Experts that are read from disk: the bits of a model in memory, an independent simulation of the slots, faults. */

/* Opens a store with n_slot slots a layer, as far as these have so many experts, for stages whose rings have room for
 * `least` experts. NULL after a failed check. */
static struct store *store_of(const struct model *m, int n_slot, int n_stage, int least, struct offload beside) {
    char err[ERR_MAX];
    size_t all = 0, room[FFN_MATRICES];
    const uint64_t slab = (uint64_t)n_stage * ring_slab(m, room);
    for (int il = 0; il < model_blocks(m); il++)
        if (store_keeps(m, il, beside)) all += slab_bytes(&m->layers[il]);
    uint64_t bytes = (uint64_t)n_slot * all + (uint64_t)least * slab;
    while (bytes > RING_SHARE * (uint64_t)least * slab &&
           (bytes - bytes / RING_SHARE / slab / 2 * 2 * slab) / all < (uint64_t)n_slot)
        bytes += slab;
    struct store *s = store_open(m, (struct store_options){bytes, n_stage, least, beside, false}, err);
    CHECK(s, "%s", err);
    return s;
}

/* Opens a session on one rank whose experts are in a store with n_slot slots a layer, as far as these have so many. */
static bool store_session(struct session *s, const struct model *m, int n_slot, int threads, int n_ctx) {
    char err[ERR_MAX];
    if (!CHECK(!part_read(m, PART_REST, ALL_LAYERS, err), "%s", err)) return false;
    session_cpu(s, m, kernels_choose(), threads, n_ctx, KV_F32);
    s->r->cpu->store = store_of(m, n_slot, 1, 2, (struct offload){0});
    if (s->r->cpu->store) return true;
    session_free(s);
    return false;
}

/* Logits of n ids in one session: the first `at_once` in one forward, the rest by forwards of 1 to `most` tokens. */
static float *store_logits(struct session *s, const int32_t *ids, int n, int at_once, int most) {
    const size_t v = (size_t)s->m->n_vocab;
    float *out = xmalloc((size_t)n * v * sizeof *out);
    session_truncate(s, 0);
    for (int at = 0, some = at_once; at < n; at += some, some = 1 + at % most) {
        some = int_min(some, n - at);
        session_forward(s, ids + at, some);
        for (int i = 0; i < some; i += LOGIT_ROWS) {
            const int rows = int_min(some - i, LOGIT_ROWS);
            session_head(s, i, rows);
            for (int k = 0; k < rows; k++)
                memcpy(out + (size_t)(at + i + k) * v, s->r->ops->read_logits(s->r, k), v * sizeof *out);
        }
    }
    return out;
}

/* Every tensor belongs to one part, and an embedding that is not the head as well is not in memory. */
static void store_parts(const char *name, const struct model *m) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < m->gguf.n_tensors; i++) {
        const struct gguf_tensor *t = &m->gguf.tensors[i];
        int parts = 0;
        for (int k = PART_EXPERTS; k <= PART_UNUSED; k++) parts += tensor_in(m, t, (enum tensor_part)k, ALL_LAYERS);
        CHECK_INT(parts, 1, "%s: parts of tensor %u", name, i);
        all += t->bytes;
    }
    CHECK_INT(tensor_in(m, gguf_find_tensor(&m->gguf, "token_embd.weight"), PART_TABLES, ALL_LAYERS),
              gguf_find_tensor(&m->gguf, "output.weight") != NULL, "%s: a table", name);
    CHECK_INT(model_bytes(m), all - part_bytes(m, PART_UNUSED, ALL_LAYERS), "%s: bytes", name);
}

static void test_store_bits(void) {
    static const char *const names[] = {"qwen3moe",
                                        "qwen3moe_nvfp4",
                                        "deepseek_v3",
                                        "deepseek_v3_fp8",
                                        "gpt_oss",
                                        "qwen3_5_moe",
                                        "qwen3_next",
                                        "glm_moe_dsa",
                                        "minimax_m3_nvfp4",
                                        "deepseek_v4",
                                        "step3p7",
                                        "qwen3moe_reap",
                                        "dots1",
                                        "mixtral",
                                        "dots3_note",
                                        "kimi_k3_nvfp4",
                                        "hy_v4",
                                        "hunyuan_v1_moe",
                                        "granitemoe",
                                        "afmoe_nvfp4",
                                        "cohere2_moe",
                                        "dbrx_nvfp4",
                                        "lfm2_moe",
                                        "arctic_nvfp4",
                                        "longcat_flash_nvfp4",
                                        "maple_nvfp4",
                                        "smallthinker_nvfp4",
                                        "llama4_nvfp4",
                                        "phimoe",
                                        "kimi_linear_nvfp4",
                                        "bailing_hybrid_ct",
                                        "nemotron_h",
                                        "nemotron_h_nvfp4",
                                        "inkling2_loop",
                                        "inkling2_nvfp4",
                                        "glm5_next",
                                        "qwen4_exp",
                                        "qwen4_exp_nvfp4",
                                        "gemma4",
                                        "gemma4_nvfp4",
                                        "deepseek_v41",
                                        "deepseek_v41_nvfp4"};
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        struct model m, own;
        int32_t *ids = NULL;
        float *ref = NULL;
        if (!fixture_load(names[f], &m)) return;
        store_parts(names[f], &m);
        const int n = int_min(fixture_logits(names[f], &m, &ids, &ref), 64), half = n / 2;
        const size_t bytes = (size_t)n * (size_t)m.n_vocab * sizeof(float);
        struct session plain;
        session_cpu(&plain, &m, kernels_choose(), 2, n, KV_F32);
        float *want = store_logits(&plain, ids, n, half, 3);
        session_free(&plain);
        const int slots[] = {1, m.max.n_expert_used, m.n_expert_max / 2, m.n_expert_max};
        for (int k = 0; k < 4; k++) {
            struct session s;
            if (!fixture_load(names[f], &own)) return;
            if (store_session(&s, &own, slots[k], 1 + k % 3, n)) {
                float *got = store_logits(&s, ids, n, half, 3);
                CHECK(!memcmp(got, want, bytes), "%s with %d slots: other logits", names[f], slots[k]);
                float *again = store_logits(&s, ids, n, half, 3);
                CHECK(!memcmp(again, want, bytes), "%s with %d slots: other logits the second time", names[f],
                      slots[k]);
                const struct expert_counts c = session_experts(&s, NULL).count;
                CHECK(slots[k] == m.n_expert_max ? !c.misses && c.hits : c.misses && (c.hits || slots[k] < 2),
                      "%s with %d slots: %llu hits, %llu misses", names[f], slots[k], (unsigned long long)c.hits,
                      (unsigned long long)c.misses);
                free(got);
                free(again);
                session_free(&s);
            }
            model_free(&own);
        }
        free(want);
        arrfree(ids);
        arrfree(ref);
        model_free(&m);
    }
}

/* The rule of the slots, step by step, as the comment of its section says it. */
static void test_store_slots(void) {
    struct model m;
    struct session s;
    if (!fixture_load("deepseek_v3_reap", &m)) return;
    int il = m.n_layer - 2; /* 12 experts, 3 a token */
    if (!store_session(&s, &m, 5, 1, 32)) return;
    struct layer_store *y = &s.r->cpu->store->layer[il];
    const int n_expert = m.layers[il].n_expert;
    long long heat[MAX_EXPERTS] = {0};
    int in[MAX_EXPERTS], hits = 0, misses = 0;
    uint64_t rng = 7;
    CHECK(y->n_slot == 5 && y->shift == 2, "%d slots, shift %d", y->n_slot, y->shift);
    for (int i = 0; i < 5; i++) in[i] = i;
    for (int t = 0; t < 2000; t++) {
        struct ffn_job jobs[MAX_EXPERTS];
        bool used[MAX_EXPERTS] = {false};
        int n = 0;
        for (int i = 0; i < 3 + t % 3; i++) /* some experts more often than others */
            used[(int)((double)n_expert * rng_uniform(&rng) * rng_uniform(&rng))] = true;
        for (int e = 0; e < n_expert; e++)
            if (used[e]) jobs[n++] = (struct ffn_job){.expert = e};
        for (int e = 0; e < n_expert; e++) heat[e] = heat[e] - heat[e] / 4 + (used[e] ? 4096 : 0);
        for (int e = 0; e < n_expert; e++) {
            if (!used[e]) continue;
            int at = -1;
            for (int i = 0; i < 5; i++)
                if (in[i] == e) at = i;
            if (at >= 0) hits++;
            else misses++;
        }
        for (int e = 0; e < n_expert; e++) {
            int at = -1, worst = -1;
            for (int i = 0; i < 5; i++)
                if (in[i] == e) at = i;
            if (!used[e] || at >= 0) continue;
            for (int i = 0; i < 5; i++)
                if (!used[in[i]] && (worst < 0 || heat[in[i]] < heat[in[worst]])) worst = i;
            in[worst] = e;
        }
        store_begin(s.r->cpu->store, il, 1, jobs, n);
        for (int i = 0; i < n; i++)
            for (int k = 0; k < FFN_MATRICES; k++) {
                const struct weight *w = y->w[k];
                reader_wait(&s.r->cpu->store->reader, &jobs[i].slab->left[k]);
                CHECK(!memcmp(jobs[i].slab->at[k], w->data + (size_t)jobs[i].expert * w->expert_bytes, w->expert_bytes),
                      "forward %d: expert %d has other bytes", t, jobs[i].expert);
            }
        for (int i = 0; i < 5; i++)
            if (!CHECK(y->expert_of[i] == in[i], "forward %d: slot %d has expert %d, expected %d", t, i,
                       y->expert_of[i], in[i]))
                t = 2000;
    }
    CHECK(y->count.hits == (uint64_t)hits && y->count.misses == (uint64_t)misses && hits > 2000 && misses > 500,
          "%llu hits and %llu misses, expected %d and %d", (unsigned long long)y->count.hits,
          (unsigned long long)y->count.misses, hits, misses);
    session_free(&s);
    model_free(&m);
}

/* Reads that fail, in place of pread. */
enum { FAULT_EIO, FAULT_EINTR, FAULT_SHORT, FAULT_END, FAULT_CTRL_C };
static struct {
    _Atomic int reads;
    int from, to; /* reads from..to-1 fail */
    int kind;
} faulty;

static ssize_t faulty_read(int fd, void *to, size_t n, off_t offset) {
    const int i = atomic_fetch_add(&faulty.reads, 1);
    const bool now = i >= faulty.from && i < faulty.to;
    if (now && faulty.kind == FAULT_EIO) return errno = EIO, -1;
    if (now && faulty.kind == FAULT_EINTR) return errno = EINTR, -1;
    if (now && faulty.kind == FAULT_END) return 0;
    if (now && faulty.kind == FAULT_CTRL_C) interrupted = 1;
    return pread(fd, to, now && faulty.kind == FAULT_SHORT && n > 4096 ? 4096 : n, offset);
}

static void fault_set(int kind, int from, int n) {
    atomic_store(&faulty.reads, 0);
    faulty.from = from;
    faulty.to = from + n;
    faulty.kind = kind;
    read_at = faulty_read;
}

static void test_store_faults(void) {
    static const struct {
        int kind, from, n;
        const char *says; /* NULL: the read is made whole */
    } c[] = {{FAULT_EIO, 0, 1, "reading the model: Input/output error"},
             {FAULT_EIO, 9, 1000000, "reading the model: Input/output error"},
             {FAULT_END, 5, 1, "reading the model: the file ends at byte"},
             {FAULT_EINTR, 0, 40, NULL},
             {FAULT_SHORT, 0, 1000000, NULL}};
    struct model m;
    struct session s;
    int32_t *ids = NULL;
    float *ref = NULL;
    char err[ERR_MAX] = "";
    if (!fixture_load("qwen3moe", &m)) return;
    const int n = fixture_logits("qwen3moe", &m, &ids, &ref);
    const size_t row = (size_t)m.n_vocab * sizeof(float);
    if (!store_session(&s, &m, 2, 2, n + 8)) return;
    CHECK(session_sync(&s, ids, n, 0, err) == SYNC_DONE, "%s", err);
    float *want = memcpy(xmalloc(row), session_logits(&s), row);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        session_truncate(&s, 0);
        store_empty(s.r->cpu->store);
        fault_set(c[i].kind, c[i].from, c[i].n);
        enum sync_result r = session_sync(&s, ids, n, 0, err);
        read_at = pread;
        CHECK(r == (c[i].says ? SYNC_FAILED : SYNC_DONE), "case %zu: result %d", i, r);
        if (c[i].says) CHECK(strstr(err, c[i].says) && !s.n_past, "case %zu: %s, %d tokens", i, err, s.n_past);
        if (c[i].says) CHECK(session_sync(&s, ids, n, 0, err) == SYNC_DONE, "case %zu: %s", i, err);
        CHECK(!memcmp(want, session_logits(&s), row), "case %zu: other logits", i);
    }
    free(want);
    arrfree(ids);
    arrfree(ref);
    session_free(&s);
    model_free(&m);
}

/* Ctrl-C within a forward ends its reads. What was there before stays, and the same prompt goes on from there. */
static void test_store_interrupt(void) {
    static const struct {
        const char *name;
        int kept; /* tokens of FIRST; states that cannot go back begin anew */
    } c[] = {{"qwen3moe", 20}, {"deepseek_v3", 20}, {"qwen3_5_moe", 0}};
    enum { FIRST = 20 };
    for (size_t f = 0; f < sizeof c / sizeof *c; f++) {
        struct model m;
        struct session s;
        int32_t *ids = NULL;
        float *ref = NULL;
        char err[ERR_MAX] = "";
        if (!fixture_load(c[f].name, &m)) return;
        const int n = fixture_logits(c[f].name, &m, &ids, &ref);
        const size_t row = (size_t)m.n_vocab * sizeof(float);
        if (!store_session(&s, &m, 2, 2, n + 8)) return;
        struct reader *d = &s.r->cpu->store->reader;
        CHECK(n >= FIRST + SAME_BITS_TOKENS + 1, "%s: %d tokens", c[f].name, n);
        CHECK(session_sync(&s, ids, FIRST, 0, err) == SYNC_DONE, "%s", err);
        session_truncate(&s, c[f].kept); /* chunks begin at the same tokens later */
        uint64_t bytes = reader_bytes(d);
        CHECK(session_sync(&s, ids, n, 0, err) == SYNC_DONE, "%s", err);
        bytes = reader_bytes(d) - bytes;
        float *want = memcpy(xmalloc(row), session_logits(&s), row);
        for (int at = 0; at < 3; at++) {
            session_truncate(&s, 0);
            CHECK(session_sync(&s, ids, FIRST, 0, err) == SYNC_DONE, "%s", err);
            const uint64_t before = reader_bytes(d);
            fault_set(FAULT_CTRL_C, at, 1);
            CHECK_INT(session_sync(&s, ids, n, 0, err), SYNC_INTERRUPTED, "%s at read %d", c[f].name, at);
            CHECK(interrupted == 1, "%s: read %d did not come", c[f].name, at);
            interrupted = 0;
            read_at = pread;
            CHECK_INT(s.n_past, c[f].kept, "%s at read %d", c[f].name, at);
            CHECK(reader_bytes(d) - before < bytes / 2, "%s: read on", c[f].name);
            CHECK(session_sync(&s, ids, n, 0, err) == SYNC_DONE, "%s", err);
            CHECK(!memcmp(want, session_logits(&s), row), "%s at read %d: other logits", c[f].name, at);
        }
        free(want);
        arrfree(ids);
        arrfree(ref);
        session_free(&s);
        model_free(&m);
    }
}

/* A file that cannot be read, that has no room, and Ctrl-C while the slots are filled. */
static void test_store_open(void) {
    struct model m;
    struct session s;
    char err[ERR_MAX] = "";
    if (!fixture_load("qwen3moe", &m)) return;
    struct store_options o = {.bytes = 1000, .n_stage = 1, .least = 2};
    CHECK(!store_open(&m, o, err) && strstr(err, "of memory at least"), "%s", err);
    fault_set(FAULT_EIO, 0, 1);
    o.bytes = 1 << 24;
    CHECK(!store_open(&m, o, err) && strstr(err, "Input/output error"), "%s", err);
    read_at = pread;
    interrupted = 1;
    if (store_session(&s, &m, 4, 1, 32)) {
        for (int i = 0; i < 4; i++) CHECK(s.r->cpu->store->layer[0].expert_of[i] < 0, "slot %d is filled", i);
        session_free(&s);
    }
    interrupted = 0;
    model_free(&m);
}

/* The program: the same text, one line, and what it refuses. */
static void test_store_cli(void) {
    char *out[3] = {NULL}, *said[3] = {NULL};
    static const char *const more[] = {"", "--expert-memory 8 --verbose", "--expert-memory 3 --verbose"};
    for (int i = 0; i < 3; i++) {
        char cmd[256];
        snprintf(cmd, sizeof cmd, "./moe --cpu -m build/demo.gguf -t 2 -n 40 --seed 5 -p 'A story about a dog' %s",
                 more[i]);
        CHECK(!run_command(cmd, &out[i], &said[i]), "%s: %s", cmd, sb_cstr(&said[i]));
        if (i) CHECK_STR(sb_cstr(&out[i]), sb_cstr(&out[0]), "%s", more[i]);
        if (i)
            CHECK(strstr(sb_cstr(&said[i]), "experts: ") && strstr(said[i], "is read from disk") &&
                      strstr(said[i], " % in memory | context"),
                  "%s", said[i]);
    }
    for (int i = 0; i < 3; i++) {
        arrfree(out[i]);
        arrfree(said[i]);
    }
    char *no = NULL;
    CHECK(run_command("./moe --cpu -m build/demo.gguf -p x --expert-memory 1", NULL, &no) == EXIT_RUN &&
              strstr(sb_cstr(&no), "the experts need"),
          "%s", sb_cstr(&no));
    arrfree(no);
}

#define TESTS_STORE                                                                                          \
    {"store/bits", test_store_bits}, {"store/slots", test_store_slots}, {"store/faults", test_store_faults}, \
        {"store/interrupt", test_store_interrupt}, {"store/open", test_store_open}, {"store/cli", test_store_cli},
