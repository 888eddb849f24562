/* What the kernels of a decode step and of a prefill ask of memory, on the simulator: see struct sim_counts in
 * ptxsim/ptxsim.h. Models of few rows and layers, whose rows are as long as those of released ones. */

/* clang-format off */
static const struct count_case {
    struct synth shape;
    enum kv_type kv;
    bool prefill; /* is counted too */
} count_cases[] = {
    {{"GQA, cache in BF16", "qwen3moe", .keys =
      "block_count=2 embedding_length=2048 attention.head_count=16 attention.head_count_kv=2 "
      "attention.key_length=128 expert_count=4 expert_used_count=2 expert_feed_forward_length=512 "
      "vocab_size=2048 context_length=8192"}, KV_BF16, true},
    {{"norms of rows, Q8_0, cache in FP8", "minimax-m2", .keys =
      "block_count=1 embedding_length=2048 attention.head_count=16 attention.head_count_kv=4 attention.key_length=128 "
      "rope.dimension_count=64 expert_count=4 expert_used_count=2 expert_feed_forward_length=512 vocab_size=2048 "
      "context_length=8192", .backbone = GGUF_Q8_0}, KV_FP8, false},
    {{"MLA, cache in FP8", "deepseek2", .keys =
      "block_count=2 embedding_length=2048 attention.head_count=32 attention.head_count_kv=1 "
      "attention.q_lora_rank=768 attention.kv_lora_rank=512 attention.key_length_mla=192 "
      "attention.value_length_mla=128 rope.dimension_count=64 leading_dense_block_count=1 feed_forward_length=1024 "
      "expert_count=4 expert_used_count=2 expert_feed_forward_length=512 expert_shared_count=1 expert_gating_func=2 "
      "expert_weights_norm=true expert_weights_scale=2.5 vocab_size=2048 context_length=8192"}, KV_FP8, true},
    {{"MLA, indexer, cache in BF16", "glm-dsa", .keys =
      "block_count=1 embedding_length=2048 attention.head_count=16 attention.head_count_kv=1 "
      "attention.q_lora_rank=768 attention.kv_lora_rank=512 attention.key_length_mla=192 "
      "attention.value_length_mla=128 rope.dimension_count=64 attention.indexer.head_count=32 "
      "attention.indexer.key_length=128 attention.indexer.top_k=2048 expert_count=4 expert_used_count=2 "
      "expert_feed_forward_length=512 expert_shared_count=1 expert_gating_func=2 expert_weights_norm=true "
      "expert_weights_scale=2.5 vocab_size=2048 context_length=8192"}, KV_BF16, false},
    {{"delta net", "qwen35moe", .keys =
      "block_count=2 embedding_length=2048 attention.head_count=8 attention.head_count_kv=2 "
      "attention.key_length=256 rope.dimension_count=64 ssm.conv_kernel=4 ssm.group_count=8 "
      "ssm.time_step_rank=16 ssm.state_size=128 ssm.inner_size=2048 full_attention_interval=2 "
      "expert_count=4 expert_used_count=2 expert_feed_forward_length=512 expert_shared_count=1 "
      "vocab_size=2048 context_length=8192 rope.freq_base=1e7"}, KV_FP8, true},
    {{"windows, sinks", "mimo2", .keys =
      "block_count=2 embedding_length=2048 attention.head_count=16 attention.head_count_kv=2 attention.key_length=192 "
      "attention.value_length=128 rope.dimension_count=64 attention.sliding_window=128 "
      "attention.sliding_window_pattern=0,1 expert_count=4 expert_used_count=2 expert_feed_forward_length=512 "
      "vocab_size=2048 context_length=8192", .window_sinks = true}, KV_BF16, false},
    {{"blocks of keys", "minimax-m3", .keys =
      "block_count=1 embedding_length=2048 attention.head_count=16 attention.head_count_kv=2 attention.key_length=128 "
      "rope.dimension_count=64 attention.indexer.head_count=2 attention.indexer.key_length=128 "
      "attention.indexer.top_k=8 attention.indexer.block_size=128 attention.indexer.local_blocks=1 expert_count=4 "
      "expert_used_count=2 expert_feed_forward_length=512 expert_shared_count=1 expert_weights_scale=2 "
      "vocab_size=2048 context_length=8192"}, KV_FP8, false},
    {{"streams, one KV head", "deepseek4", .keys =
      "block_count=3 embedding_length=2048 attention.head_count=16 attention.head_count_kv=1 attention.key_length=512 "
      "attention.q_lora_rank=512 rope.dimension_count=64 attention.sliding_window=128 attention.indexer.head_count=16 "
      "attention.indexer.key_length=128 attention.indexer.top_k=512 attention.compress_ratios=0,0,4 "
      "attention.output_group_count=2 attention.output_lora_rank=256 hyper_connection.count=4 hash_layer_count=1 "
      "expert_count=4 expert_used_count=2 expert_feed_forward_length=512 expert_shared_count=1 "
      "expert_weights_scale=1.5 vocab_size=2048 context_length=8192" STREAM_KEYS,
      .ff_type = GGUF_MXFP4}, KV_FP8, false},
    {{"lagging streams, candidates", "deepseek41", .keys =
      "block_count=3 embedding_length=2048 attention.head_count=16 attention.head_count_kv=1 attention.key_length=512 "
      "attention.q_lora_rank=512 rope.dimension_count=64 attention.sliding_window=128 attention.indexer.head_count=16 "
      "attention.indexer.key_length=128 attention.indexer.top_k=512 attention.indexer.candidate_source_layer=1 "
      "attention.indexer.candidate_topk_blocks=160 attention.indexer.candidate_block_size=8 "
      "attention.compress_ratios=2,1,1 attention.kv_source_layers=0,1 attention.index_source_layers=0,1,2 "
      "attention.output_group_count=2 attention.output_lora_rank=256 hyper_connection.count=4 expert_count=4 "
      "expert_used_count=2 expert_feed_forward_length=512 expert_shared_count=1 expert_weights_scale=1.5 "
      "vocab_size=2048 context_length=8192" STREAM_KEYS, .ff_type = GGUF_MXFP4}, KV_FP8, false},
    {{"wide heads, feed-forwards in parts", "gemma4", .keys =
      "block_count=2 embedding_length=2048 attention.head_count=16 attention.head_count_kv=8,2 "
      "attention.key_length=512 attention.value_length=512 attention.key_length_swa=256 "
      "attention.value_length_swa=256 attention.sliding_window=1024 attention.sliding_window_pattern=1,0 "
      "rope.dimension_count=512 rope.dimension_count_swa=256 rope.freq_base=1e6 rope.freq_base_swa=10000 "
      "feed_forward_length=512 expert_count=4 expert_used_count=2 expert_feed_forward_length=512 "
      "final_logit_softcapping=30 vocab_size=2048 context_length=8192"}, KV_FP8, true},
};
/* clang-format on */
enum {
    COUNT_CASES = sizeof count_cases / sizeof *count_cases,
    COUNT_DEPTH = 4000,  /* keys of a decode step */
    COUNT_SPLITS = 64,   /* as a large GPU has: the simulated one is small */
    COUNT_PREFILL = 32,  /* tokens */
    COUNT_NEEDED = 95,   /* per cent of a kernel's sectors that lanes ask for in decode, at least */
    COUNT_CONFLICTS = 5, /* per cent of the issue slots of a kernel, and of its hot loops, at most; */
    COUNT_HOT = 10       /* these have that share of its instructions, at least */
};

/* Makes up keys, values and states. */
static void count_fill(struct session *s, int n_ctx) {
    uint64_t rng = 3;
    for (int i = 0; i < model_blocks(s->m) * CACHE_USES; i++) {
        const struct cache_tensor *p = &s->r->cache[i / CACHE_USES][i % CACHE_USES];
        const size_t rows = cache_rows_of(p, (size_t)n_ctx), bytes = rows * p->row_bytes,
                     scales = rows * (size_t)p->n_scale;
        if (!p->width) continue;
        uint8_t *data = xmalloc(bytes);
        float *scale = p->type == KV_FP8 ? xmalloc(scales * sizeof *scale) : NULL;
        for (size_t k = 0; k < bytes; k += 4) {
            const uint32_t x = (uint32_t)rng_next(&rng);
            const uint32_t word = p->type == KV_FP8    ? (x & 0x8F8F8F8F) | 0x20202020
                                  : p->type == KV_BF16 ? (x & 0x80FF80FF) | 0x3D003D00
                                                       : (x & 0x807FFFFF) | 0x3D000000;
            memcpy(data + k, &word, 4);
        }
        for (size_t k = 0; scale && k < scales; k++) scale[k] = 0.25f;
        s->r->ops->cache_copy(s->r, p, 0, rows, data, scale, true);
        free(data), free(scale);
    }
}

/* Kernels that need less of their sectors in decode, and why. */
static const struct count_exception {
    const char *kernel; /* the beginning of the name */
    int needed;         /* per cent, as above */
    const char *why;
} count_exceptions[] = {
    {"k_embed", 60, "a row of the embedding is gathered out of tiles of 16 rows"},
    {"attn_gqa_decode<128,128,1,", 85,
     "FP8 scales of a KV head stand between those of the others, whose blocks read the rest"},
    {"attn_gqa_decode<256,256,1,", 91, "the same"},
    {"attn_mla_kernel<512,0,", 86, "most of its blocks only read that they have no keys"},
    {"k_index_blocks", 94, "a block reads its run, and few keys"},
    {"k_index_scores<128,1,1>", 87,
     "four lanes of a warp store a score each, and FP8 scales of candidates are gathered"},
    {"k_index_scores", 90, "four lanes of a warp store a score each"},
    {"k_index_choose<1>", 12, "a lane reads the scores of a block one after the other, which L1 holds"},
    {"k_index_choose", 20, "five readings of a few scores, which L1 holds"},
};
enum { COUNT_EXCEPTIONS = sizeof count_exceptions / sizeof *count_exceptions };

/* ---- runs ---- */

/* Makes the model of a case, with a session that has keys. Little memory means few buffers. */
static bool count_open(const struct count_case *c, struct model *m, struct session *s) {
    const struct cuda_options o = {.n_ctx = COUNT_DEPTH + COUNT_PREFILL, .kv = c->kv, .kv_splits = COUNT_SPLITS};
    char err[ERR_MAX] = "";
    *m = (struct model){0};
    synth_make(m, &c->shape, NULL, true);
    cuda_test_memory((size_t)512 << 20);
    if (!CHECK(session_open(s, m, 1, 1, cuda_rank_start, &o, err) == 0, "%s", err)) return false;
    count_fill(s, s->n_ctx);
    return true;
}

static void count_close(struct model *m, struct session *s) {
    session_free(s);
    model_free(m);
    cuda_test_memory((size_t)16 << 30);
}

static void count_prefill(struct session *s) {
    int32_t ids[COUNT_PREFILL];
    for (int i = 0; i < COUNT_PREFILL; i++) ids[i] = (7 * i + 3) % s->m->n_vocab;
    session_fake_fill(s, 8 * COUNT_PREFILL);
    sim_count(true);
    session_forward(s, ids, COUNT_PREFILL);
    session_wait(s);
    sim_count(false);
}

/* A token, and the choice of the next one. */
static void count_decode(struct session *s) {
    const struct sampling sampling = {.temp = 1, .top_k = 20, .top_p = 0.9f, .repeat_penalty = 1};
    int32_t id = 5;
    session_fake_fill(s, COUNT_DEPTH);
    sim_count(true);
    session_forward(s, &id, 1);
    session_head(s, 0, 1);
    s->r->ops->sample(s->r, &sampling, NULL, 0, 0, 1, &(double){0.5});
    s->r->ops->read_tokens(s->r, &id, &(bool){false});
    session_wait(s);
    sim_count(false);
}

/* ---- results ---- */

/* What a kernel did, and shares in per cent. */
struct count_row {
    struct sim_counts c;
    char name[128];
    double needed;    /* of the sectors of loads and stores */
    double conflicts; /* of the issue slots, */
    double loop;      /* of those of the hot loop with the most, of which */
    char site[96];    /* this instruction has the most; "": none has any */
};

static double count_needed(const struct sim_traffic *a, const struct sim_traffic *b) {
    const uint64_t sectors = a->sectors + b->sectors;
    return sectors ? 100.0 * (double)(a->bytes + b->bytes) / (32.0 * (double)sectors) : 100.0;
}

static double count_share(uint64_t part, uint64_t all) { return all ? 100.0 * (double)part / (double)all : 0; }

/* Finds the hot loop of a kernel with the largest share of conflicts. */
static void count_find_loop(struct count_row *row, const struct sim_site_counts *site, int n) {
    uint64_t most = 0;
    for (int i = 0; i < n; i++) {
        const double share = count_share(site[i].loop_conflicts, site[i].loop);
        if (strcmp(site[i].kernel, row->c.kernel) || share < row->loop || !site[i].conflicts) continue;
        if (100 * site[i].loop < COUNT_HOT * row->c.instructions) continue;
        if (share <= row->loop && site[i].conflicts <= most) continue;
        row->loop = share, most = site[i].conflicts;
        snprintf(row->site, sizeof row->site, "%.*s", (int)strcspn(site[i].text, ";"), site[i].text);
    }
}

static int count_by_name(const void *a, const void *b) {
    return strcmp(((const struct count_row *)a)->name, ((const struct count_row *)b)->name);
}

/* Returns what was counted (stb), by name. */
static struct count_row *count_rows(void) {
    const int n = sim_counted(NULL, 0), n_site = sim_counted_sites(NULL, 0);
    struct sim_counts *c = xcalloc((size_t)n + 1, sizeof *c);
    struct sim_site_counts *site = xcalloc((size_t)n_site + 1, sizeof *site);
    struct count_row *rows = NULL;
    sim_counted(c, n), sim_counted_sites(site, n_site);
    for (int i = 0; i < n; i++) {
        struct count_row row = {.c = c[i], .needed = count_needed(&c[i].loads, &c[i].stores)};
        row.conflicts = count_share(c[i].conflicts, c[i].instructions);
        sass_name(row.name, sizeof row.name, c[i].kernel);
        count_find_loop(&row, site, n_site);
        arrput(rows, row);
    }
    free(c), free(site);
    qsort(rows, arrlenu(rows), sizeof *rows, count_by_name);
    return rows;
}

/* ---- budgets ---- */

/* Returns the exception of a kernel, NULL if there is none. */
static const struct count_exception *count_exception_of(const struct count_exception *e, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (!strncmp(e[i].kernel, name, strlen(e[i].kernel))) return &e[i];
    return NULL;
}

/* Checks rows of a decode step, or of a prefill. Appends a line to *said for each failure; returns how many there are.
 * used (n): exceptions that were needed become true. */
static int count_check(const struct count_row *rows, bool decode, const struct count_exception *e, int n, bool *used,
                       char **said) {
    int failed = 0;
    for (size_t i = 0; i < arrlenu(rows); i++) {
        const struct count_row *r = &rows[i];
        const struct count_exception *x = count_exception_of(e, n, r->name);
        const int needed = x ? x->needed : COUNT_NEEDED;
        if (x && decode && r->needed < COUNT_NEEDED) used[x - e] = true;
        if (decode && r->needed < needed)
            failed += sass_fail(said, "%s: lanes ask for %.1f %% of %llu sectors (at least %d)", r->name, r->needed,
                                (unsigned long long)(r->c.loads.sectors + r->c.stores.sectors), needed);
        if (fmax(r->conflicts, r->loop) > COUNT_CONFLICTS)
            failed +=
                sass_fail(said, "%s: bank conflicts are %.1f %% of the issue slots, %.1f %% in a loop (at most %d): %s",
                          r->name, r->conflicts, r->loop, COUNT_CONFLICTS, r->site);
        if (r->c.unread)
            failed += sass_fail(said, "%s: nobody reads %llu of %llu bytes that it prefetches", r->name,
                                (unsigned long long)r->c.unread, (unsigned long long)r->c.prefetched);
    }
    return failed;
}

/* The checks fail where they should: without exceptions, and on numbers that were changed. */
static void count_gate(struct count_row *rows) {
    char *said = NULL;
    struct count_row *const r = &rows[0], was = *r;
    const int failed = count_check(rows, true, NULL, 0, NULL, &said);
    const int failed_prefill = count_check(rows, false, NULL, 0, NULL, &said);
    CHECK_HAS(sb_cstr(&said), "k_embed: lanes ask for", "without exceptions");
    r->needed = COUNT_NEEDED - 1, r->loop = COUNT_CONFLICTS + 1, r->c.unread = 64;
    CHECK_INT(count_check(rows, true, NULL, 0, NULL, &said), failed + 3, "a decode step");
    CHECK_INT(count_check(rows, false, NULL, 0, NULL, &said), failed_prefill + 2, "a prefill");
    *r = was;
    arrfree(said);
}

static void test_cuda_counts(void) {
    bool used[COUNT_EXCEPTIONS] = {false};
    /* of PTX for FP4: for other chips the assembler joins stores, and these shapes only run */
    const bool budgets = cuda_test_begin(21);
    for (int i = 0; i < COUNT_CASES; i++)
        for (int prefill = 0; prefill < 1 + !i; prefill++) {
            struct model m;
            struct session s;
            char *said = NULL;
            if (!count_open(&count_cases[i], &m, &s)) return;
            if (prefill) count_prefill(&s);
            else count_decode(&s);
            struct count_row *rows = count_rows();
            const int failed = count_check(rows, !prefill, count_exceptions, COUNT_EXCEPTIONS, used, &said);
            CHECK((!failed || !budgets) && arrlen(rows) > 5, "%s, %d kernels:\n%s", m.name, (int)arrlen(rows),
                  sb_cstr(&said));
            if (!i && !prefill && budgets) count_gate(rows);
            arrfree(said), arrfree(rows);
            count_close(&m, &s);
        }
    for (int i = 0; i < COUNT_EXCEPTIONS && budgets; i++)
        CHECK(used[i], "%s needs no exception", count_exceptions[i].kernel);
}

/* ---- tables: build/test_cuda --sass ---- */

static void count_print(const char *what, const char *model) {
    struct count_row *rows = count_rows();
    printf("\n### %s, %s\n\n"
           "| kernel | launches | instructions/warp | loads | sectors/load | needed | again | stores | sectors/store | "
           "needed | wavefronts | conflicts | in a loop | prefetched KiB | unread KiB |\n"
           "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
           model, what);
    for (size_t i = 0; i < arrlenu(rows); i++) {
        const struct sim_counts *c = &rows[i].c;
        const struct sim_traffic none = {0}, *const t[2] = {&c->loads, &c->stores};
        printf("| `%s` | %llu | %.0f |", rows[i].name, (unsigned long long)c->launches,
               (double)c->instructions / (double)c->warps);
        for (int k = 0; k < 2; k++) {
            printf(" %llu | %.1f | %.1f |", (unsigned long long)t[k]->requests,
                   0.01 * count_share(t[k]->sectors, t[k]->requests), count_needed(t[k], &none));
            if (!k) printf(" %.1f |", 0.01 * count_share(t[k]->sectors, t[k]->distinct_sectors));
        }
        printf(" %llu | %.1f | %.1f | %llu | %llu |\n", (unsigned long long)c->wavefronts, rows[i].conflicts,
               rows[i].loop, (unsigned long long)c->prefetched >> 10, (unsigned long long)c->unread >> 10);
    }
    arrfree(rows);
}

static void count_print_all(void) {
    printf("\n## Memory traffic\n\n"
           "Counted on the simulator. Needed: per cent of the sectors that lanes ask for. Again: sectors by those that "
           "differ in a launch. Conflicts: wavefronts, in per cent of the warps' instructions, of all and in the hot "
           "loop with the most. A kernel of decode needs %d %% of its sectors or more, but for\n\n",
           COUNT_NEEDED);
    for (int i = 0; i < COUNT_EXCEPTIONS; i++)
        printf("* `%s`, %d %%: %s\n", count_exceptions[i].kernel, count_exceptions[i].needed, count_exceptions[i].why);
    for (int i = 0; i < COUNT_CASES; i++) {
        struct model m;
        struct session s;
        if (!count_open(&count_cases[i], &m, &s)) return;
        count_decode(&s);
        count_print("a decode step", m.name);
        if (count_cases[i].prefill) count_prefill(&s), count_print("a prefill", m.name);
        count_close(&m, &s);
    }
}

#define TESTS_COUNTS {"cuda/counts", test_cuda_counts},
