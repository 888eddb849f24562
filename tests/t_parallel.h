/* Several timelines at once: what each gives has the bits that it has alone. */

/* What the timelines of a test are. */
struct parallel_case {
    const char *name; /* of a fixture */
    const struct kernels *k;
    int tp, pp;
    enum kv_type kv;
    int n;       /* timelines at work */
    int n_token; /* of a timeline at most; 0: 70 */
    /* opens timelines; NULL: on the CPU */
    bool (*open)(struct session *s, const struct model *m, const struct parallel_case *c, struct timelines t);
    int n_stem;         /* tokens of the stem, with which most prompts begin; 0: there is none */
    bool all_with_stem; /* all prompts begin with it */
    int n_draft;        /* drafts after each token, by n-grams of texts that repeat themselves, or by MTP layers */
};

enum {
    PARALLEL_TOKENS = 600, /* of a timeline at most, */
    PARALLEL_ROUNDS = 10,  /* and rounds of decoding, in each of which a timeline takes part or not */
    PARALLEL_CHUNK = 24    /* tokens of a prompt's forward */
};

/* A timeline's tokens, and its logits after the prompt and after each token that follows. */
struct parallel_line {
    int32_t ids[PARALLEL_TOKENS];
    int n_prompt, n, cut; /* tokens; see session_begin_alone */
    float *logits;        /* (1 + PARALLEL_ROUNDS, n_vocab) */
    /* drafts of the MTP layer after each token, and how many */
    int32_t draft[1 + PARALLEL_ROUNDS][DRAFTS_MAX];
    int n_draft[1 + PARALLEL_ROUNDS];
};

static void parallel_keep(struct parallel_line *l, struct session *s) {
    const size_t v = (size_t)s->m->n_vocab;
    memcpy(l->logits + (size_t)(l->n - l->n_prompt) * v, session_logits(s), v * sizeof(float));
}

static int parallel_tokens(const struct parallel_case *c) { return c->n_token ? c->n_token : 70; }

static bool parallel_open(struct session *s, const struct model *m, const struct parallel_case *c, struct timelines t) {
    if (c->open && !c->open(s, m, c, t)) return false;
    if (!c->open)
        session_open_cpu(s, m, c->tp, c->pp, (struct cpu_options){c->k, 2, parallel_tokens(c), c->kv, false, false, t});
    s->r->chunk = PARALLEL_CHUNK;
    return true;
}

/* Takes the next tokens of a line as far as they were drafted, and returns how many. */
static int parallel_take(struct parallel_line *l, struct session *s) {
    const int before = l->n;
    while (l->n < l->n_prompt + PARALLEL_ROUNDS && session_take_draft(s, l->ids[l->n])) {
        l->n++;
        parallel_keep(l, s);
    }
    return l->n - before;
}

/* Notes the drafts of a round. */
static void parallel_drafts(struct parallel_line *l, const struct session *s) {
    const int at = l->n - l->n_prompt;
    l->n_draft[at] = s->drafts->kind == DRAFT_BY_MTP ? s->n_draft : 0;
    memcpy(l->draft[at], s->tokens + s->n_past, (size_t)l->n_draft[at] * sizeof **l->draft);
}

/* Counts those that the timeline alone has before its next token, and all. */
static void parallel_drafts_alone(const struct parallel_line *l, struct session *alone, int32_t next, int *same,
                                  int *all) {
    const int at = alone->n_past + 1 - l->n_prompt, n = l->n_draft[at];
    alone->tokens[alone->n_past] = next;
    sessions_draft(&alone, &n, 1);
    for (int i = 0; i < n; i++) *same += alone->tokens[alone->n_past + 1 + i] == l->draft[at][i];
    *all += n;
}

/* Makes the tokens of a line from `from` on repeat themselves, but for some of them. */
static void parallel_repeat(struct parallel_line *l, int from, uint64_t *rng) {
    for (int k = from + 3; k < PARALLEL_TOKENS; k++)
        if (rng_next(rng) % 20) l->ids[k] = l->ids[k - 3];
}

/* Compares the logits of timelines side by side with those of each alone, without drafts. Returns how many drafts the
 * timelines took. */
static int check_parallel(const struct parallel_case *c) {
    const int n_timeline = c->n + 1; /* one is never used */
    struct model m;
    struct session s[DECODE_MAX_TOKENS + 2]; /* the last one is the stem */
    int32_t stem[PARALLEL_TOKENS];
    char err[ERR_MAX];
    static struct parallel_line line[DECODE_MAX_TOKENS];
    int order[DECODE_MAX_TOKENS];
    uint64_t rng = 5;
    int taken = 0, drafted = 0, drafted_alone = 0;
    if (!fixture_load(c->name, &m)) return 0;
    if (!parallel_open(&s[0], &m, c, (struct timelines){n_timeline, c->n_stem, c->all_with_stem})) return 0;
    for (int i = 1; i < n_timeline + (c->n_stem > 0); i++) session_attach(&s[i], &s[0], i);
    for (int i = 0; i < c->n_stem; i++) stem[i] = (int32_t)(rng_next(&rng) % (uint64_t)m.n_vocab);
    if (c->n_stem && !CHECK(stem_make(&s[n_timeline], stem, c->n_stem, err) == SYNC_DONE, "%s", err)) return 0;
    const bool only_mtp = c->n_draft == 1 && s[0].r->m->n_mtp; /* from the first round after a prompt on */
    drafts_limit(s[0].drafts, s[0].r->m->n_mtp ? c->n_draft : 0, c->n_draft, c->n_draft);
    drafting_limit(&s[0].drafts->ngrams, c->n_draft, c->n_draft);
    for (int i = 0; i < n_timeline && c->n_stem; i++) s[i].stem = &s[n_timeline];
    for (int i = 0; i < c->n; i++) {
        struct parallel_line *l = &line[i];
        l->n = l->n_prompt = i < 3 ? 1 + i + 19 * (c->n_draft > 0)
                                   : 1 + (int)(rng_next(&rng) % (uint64_t)(parallel_tokens(c) - PARALLEL_ROUNDS));
        l->cut = i % 2 && l->n > 9 ? l->n / 2 : 0;
        memset(l->n_draft, 0, sizeof l->n_draft);
        l->logits = xmalloc((1 + PARALLEL_ROUNDS) * (size_t)m.n_vocab * sizeof *l->logits);
        for (int k = 0; k < PARALLEL_TOKENS; k++) l->ids[k] = (int32_t)(rng_next(&rng) % (uint64_t)m.n_vocab);
        if (c->n_stem && (c->all_with_stem || i % 4 != 3)) {
            const int own = parallel_tokens(c) - PARALLEL_ROUNDS - c->n_stem;
            memcpy(l->ids, stem, (size_t)c->n_stem * sizeof *stem);
            l->n = l->n_prompt = c->n_stem + (i < 3 ? 1 + i : 1 + (int)(rng_next(&rng) % (uint64_t)own));
            l->cut = c->n_stem;
        }
        if (i % 4 && !only_mtp) parallel_repeat(l, l->cut, &rng);
        s[i ? i + 1 : 0].sampling.repeat_penalty = 1;
        order[i] = i;
    }
    for (int round = -1; round < PARALLEL_ROUNDS; round++) {
        struct session *at[DECODE_MAX_TOKENS];
        struct parallel_line *of[DECODE_MAX_TOKENS];
        int32_t ids[DECODE_MAX_TOKENS];
        int n = 0;
        for (int i = c->n - 1; i > 0; i--) { /* in any order */
            const int j = (int)(rng_next(&rng) % (uint64_t)(i + 1)), other = order[j];
            order[j] = order[i];
            order[i] = other;
        }
        for (int k = 0; k < c->n; k++) {
            const int i = order[k], timeline = i ? i + 1 : 0; /* that of number 1 is left out */
            struct parallel_line *l = &line[i];
            if (round < 0 ? i % 3 == 2 : i % 3 == 2 && round == 1) { /* a prompt among the answers of others */
                if (round < 0) continue;
                sync_alone(&s[timeline], l->ids, l->n_prompt, l->cut);
                parallel_keep(l, &s[timeline]);
                continue;
            }
            if (round < 0) {
                sync_alone(&s[timeline], l->ids, l->n_prompt, l->cut);
                parallel_keep(l, &s[timeline]);
                continue;
            }
            if ((i % 3 == 2 && round < 1) || rng_next(&rng) % 4 == 0) continue;
            if (l->n == l->n_prompt + PARALLEL_ROUNDS) continue;
            at[n] = &s[timeline];
            of[n] = l;
            ids[n++] = l->ids[l->n];
        }
        if (!n) continue;
        sessions_decode(at, ids, n);
        for (int i = 0; i < n; i++) {
            of[i]->n++;
            parallel_keep(of[i], at[i]);
            parallel_drafts(of[i], at[i]);
            taken += parallel_take(of[i], at[i]);
        }
    }
    for (int i = 0; i < c->n; i++) {
        const struct parallel_line *l = &line[i];
        struct session alone;
        if (!parallel_open(&alone, &m, c, (struct timelines){.n = 1})) return 0;
        alone.sampling.repeat_penalty = 1;
        sync_alone(&alone, l->ids, l->n_prompt, l->cut);
        for (int k = l->n_prompt; k <= l->n; k++) {
            const float *got = l->logits + (size_t)(k - l->n_prompt) * (size_t)m.n_vocab;
            if (!CHECK(!memcmp(got, session_logits(&alone), (size_t)m.n_vocab * sizeof *got),
                       "%s, %s, --tp %d --pp %d, %d at once, %d drafts: number %d of %d tokens has other bits after "
                       "%d more",
                       c->name, c->open ? "GPU" : c->k->name, c->tp, c->pp, c->n, c->n_draft, i, l->n_prompt,
                       k - l->n_prompt))
                break;
            if (k == l->n) break;
            if (c->n_draft && !c->n_stem) parallel_drafts_alone(l, &alone, l->ids[k], &drafted_alone, &drafted);
            session_decode(&alone, l->ids[k]);
        }
        session_free(&alone);
        free(l->logits);
    }
    CHECK(20 * (drafted - drafted_alone) <= drafted, "%s: %d of %d drafts are those of timelines alone", c->name,
          drafted_alone, drafted);
    for (int i = 0; i < c->n && c->n_stem; i++)
        CHECK(s[i ? i + 1 : 0].with_stem == (c->all_with_stem || i % 4 != 3), "%s: number %d and the stem", c->name, i);
    for (int i = n_timeline - 1 + (c->n_stem > 0); i >= 0; i--) session_free(&s[i]);
    model_free(&m);
    return taken;
}

/* Every fixture; layouts, caches and numbers of timelines in turn. */
static void test_parallel_fixtures(void) {
    static const int layouts[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}, {3, 1}}, n[] = {3, 8, 16};
    for (int f = 0; f < RANK_FIXTURES; f++) {
        const int *const layout = layouts[f % (int)(sizeof layouts / sizeof *layouts)];
        check_parallel(&(struct parallel_case){rank_fixtures[f], kernels_choose(), layout[0], layout[1],
                                               (enum kv_type)(f % 3), n[f / 3 % 3], 0, NULL, 0, false, 0});
    }
}

/* The same with drafts. */
static void test_parallel_drafts(void) {
    static const int layouts[][2] = {{1, 1}, {2, 1}, {1, 2}};
    int taken = 0;
    for (int f = 0; f < RANK_FIXTURES; f++) {
        const int *const layout = layouts[f % (int)(sizeof layouts / sizeof *layouts)];
        taken += check_parallel(&(struct parallel_case){.name = rank_fixtures[f],
                                                        .k = kernels_choose(),
                                                        .tp = layout[0],
                                                        .pp = layout[1],
                                                        .kv = (enum kv_type)(f % 3),
                                                        .n = 2 + f % 5,
                                                        .n_draft = 1 + f % 3});
    }
    CHECK(taken > 3 * RANK_FIXTURES, "%d drafts were taken", taken);
}

/* Tokens of a stem: cut_step of the fixture's model. */
static int parallel_stem(const char *name) {
    struct model m;
    const int n = fixture_load(name, &m) ? cut_step(&m) : 0;
    if (n) model_free(&m);
    return n;
}

/* With a stem: every fixture (one of four under sanitizers), and all prompts begin with it or most of them. */
static void test_parallel_stem(void) {
    static const int layouts[][2] = {{1, 1}, {2, 1}, {1, 2}};
    for (int f = 0; f < RANK_FIXTURES; f += SANITIZED ? 4 : 1) {
        const int *const layout = layouts[f % (int)(sizeof layouts / sizeof *layouts)];
        const int n_stem = parallel_stem(rank_fixtures[f]);
        check_parallel(&(struct parallel_case){.name = rank_fixtures[f],
                                               .k = kernels_choose(),
                                               .tp = layout[0],
                                               .pp = layout[1],
                                               .kv = (enum kv_type)(f % 3),
                                               .n = 5,
                                               .n_token = n_stem + 64,
                                               .n_stem = n_stem,
                                               .all_with_stem = f / 2 % 2,
                                               .n_draft = f % 3});
    }
}

/* Every set of kernels, for one model of each mixer (one of six under sanitizers). */
static void test_parallel_kernels(void) {
    static const char *const names[] = {"qwen3moe_nvfp4",
                                        "deepseek_v3_nvfp4",
                                        "deepseek_v4",
                                        "qwen3_5_moe_nvfp4",
                                        "glm_moe_dsa",
                                        "minimax_m3",
                                        "kimi_linear",
                                        "bailing_hybrid",
                                        "nemotron_h",
                                        "inkling2_loop",
                                        "glm5_next",
                                        "qwen4_exp",
                                        "glm4",
                                        "gemma4",
                                        "deepseek_v41",
                                        "dots3_note",
                                        "kimi_k3",
                                        "hy_v4",
                                        "hunyuan_v1_moe",
                                        "afmoe_nvfp4",
                                        "granitemoeshared_nvfp4",
                                        "granitemoehybrid",
                                        "cohere2_moe",
                                        "dbrx",
                                        "phimoe",
                                        "lfm2_moe",
                                        "smallthinker",
                                        "arctic",
                                        "longcat_flash",
                                        "llama4"};
    for (size_t k = 0; k < sizeof kernel_sets / sizeof *kernel_sets; k++)
        for (size_t f = 0; f < sizeof names / sizeof *names && kernels_runnable(kernel_sets[k]); f += SANITIZED ? 6 : 1)
            check_parallel(&(struct parallel_case){names[f], kernel_sets[k], 1, 1, (enum kv_type)((k + f) % 3), 5, 0,
                                                   NULL, 0, false, 0});
}

/* ---- the program ---- */

/* Appends a request: of any length, with sampling, stops, a limit, a system message or an earlier turn of its own. */
static void parallel_request(int id, uint64_t *rng, char **out) {
    static const char *const asks[] = {"What is 7 squared? One word.", "Tell me a story.", "hi", "What is 12 times 3?"};
#define PICK(n) (rng_next(rng) % (n))
    const bool system = !PICK(3), turns = !PICK(5), text = !system && !turns && PICK(2);
    sb_printf(out, "{\"id\":%d,\"%s", id, text ? "prompt\":\"" : "messages\":[");
    if (system) {
        sb_puts(out, "{\"role\":\"system\",\"content\":\"");
        for (uint64_t i = 1 + 40 * PICK(3); i; i--) sb_puts(out, "Be brief. ");
        sb_puts(out, "\"},");
    }
    if (turns) sb_puts(out, "{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"Hello.\"},");
    if (!text) sb_puts(out, "{\"role\":\"user\",\"content\":\"");
    for (uint64_t i = PICK(4) ? 1 : 1 + PICK(60); i; i--) sb_printf(out, "%s ", asks[PICK(4)]);
    sb_printf(out, "\"%s,\"max_tokens\":%d,\"temperature\":%s,\"seed\":%d", text ? "" : "}]",
              (int)(PICK(4) ? PICK(30) : PICK(2)), PICK(2) ? "0.9" : "0", (int)PICK(1000));
    if (!PICK(4)) sb_puts(out, ",\"stop\":[\"the\",\"9\"]");
    if (!PICK(5)) sb_puts(out, ",\"repeat_penalty\":1.3");
    if (id % 10 == 3) sb_puts(out, ",\"nonsense\":1");
    sb_puts(out, "}\n");
#undef PICK
}

/* The answers as a list of lines without what depends on other requests; malloc'ed lines. */
static char **parallel_answers(const char *given, const char *file) {
    char *out = NULL, command[400], **lines = NULL;
    snprintf(command, sizeof command, MOE "--jsonl -c 2048 %s <%s", given, file);
    CHECK_INT(run_command(command, &out, NULL), 1, "some requests are wrong");
    for (const char *line = sb_cstr(&out); *line; line += strcspn(line, "\n") + 1) {
        json_t *o = json_loadb(line, strcspn(line, "\n"), 0, NULL);
        if (!CHECK(o && strchr(line, '\n'), "not an answer: '%.80s'", line)) break;
        json_object_del(json_object_get(o, "usage"), "cached_tokens");
        arrput(lines, json_dumps(o, JSON_COMPACT));
        json_decref(o);
    }
    arrfree(out);
    return lines;
}

static int parallel_order(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Answers do not depend on how many there are at a time, nor on their order; with --unordered they come in another. */
static void test_parallel_requests(void) {
    enum { N = SANITIZED ? 6 : 30, RUNS = SANITIZED ? 2 : 5 }; /* under sanitizers the first runs */
    static const struct {
        const char *options, *both; /* also of the answers one at a time */
        bool shuffled, sorted;      /* the requests; the answers, before they are compared */
    } runs[5] = {{"--parallel 3", "", false, false},
                 {"--parallel 8 --unordered", "", false, true},
                 {"--parallel 16", "--kv fp8", false, false},
                 {"--parallel 6", "--system-file @/system", false, false},
                 {"--parallel 5", "--tp 2", true, true}};
    char *requests[N] = {NULL}, path[300], shuffled[300], *all = NULL, **want = NULL;
    uint64_t rng = 11;
    snprintf(path, sizeof path, "%s/requests.jsonl", test_dir());
    snprintf(shuffled, sizeof shuffled, "%s/shuffled.jsonl", test_dir());
    for (int i = 0; i < N; i++) {
        parallel_request(i, &rng, &requests[i]);
        sb_put(&all, requests[i], arrlenu(requests[i]));
    }
    write_test_file(path, all, arrlenu(all));
    arrsetlen(all, 0);
    for (int i = 0; i < 100; i++) sb_puts(&all, "Be brief, and kind. ");
    write_test_file(IN_DIR("@/system"), all, arrlenu(all));
    arrsetlen(all, 0);
    for (int i = 0; i < N; i++) sb_put(&all, requests[i * 7 % N], arrlenu(requests[i * 7 % N]));
    static_assert(N % 7, "the other order has every request");
    write_test_file(shuffled, all, arrlenu(all));
    for (size_t r = 0; r < RUNS; r++) {
        char args[300];
        snprintf(args, sizeof args, "%s %s", IN_DIR(runs[r].both), runs[r].options);
        if (!r || strcmp(runs[r].both, runs[r - 1].both)) want = parallel_answers(IN_DIR(runs[r].both), path);
        char **got = parallel_answers(args, runs[r].shuffled ? shuffled : path);
        CHECK(arrlen(got) == N && arrlen(want) == N, "%s: %td and %td answers", runs[r].options, arrlen(got),
              arrlen(want));
        if (runs[r].sorted) {
            qsort(got, arrlenu(got), sizeof *got, parallel_order);
            qsort(want, arrlenu(want), sizeof *want, parallel_order);
        }
        for (size_t i = 0; i < arrlenu(want) && i < arrlenu(got); i++)
            CHECK_STR(got[i], want[i], "%s", runs[r].options);
        for (size_t i = 0; i < arrlenu(got); i++) free(got[i]);
        arrfree(got);
        if (r + 1 < RUNS && !strcmp(runs[r].both, runs[r + 1].both)) continue;
        for (size_t i = 0; i < arrlenu(want); i++) free(want[i]);
        arrfree(want);
    }
    for (int i = 0; i < N; i++) arrfree(requests[i]);
    arrfree(all);
}

/* Texts of --lines, errors among them, what may be combined; a program that waits for an answer before it asks again. */
static void test_parallel_pipes(void) {
    static const struct {
        const char *cmd;
        int code;
        const char *out, *said;
    } t[] = {
        {"printf 'hi\nWhat is 7 squared? One word.\n\n\377\nhi' >@/l; " MOE "--greedy --lines <@/l >@/1; " MOE
         "--greedy --lines --parallel 4 <@/l >@/4; cmp @/1 @/4 && wc -l <@/4",
         0, "3\n", "line 4: the message is not UTF-8"},
        {"for i in $(seq 90); do printf 'Be brief. '; done >@/s; for n in 1 3; do printf 'hi\nWhat is 7 "
         "squared?\nhi\nA story\n' | " MOE
         "--greedy -n 20 -c 700 --lines --system-file @/s -np $n >@/n$n; done; cmp @/n1 @/n3 && wc -l <@/n3",
         0, "4\n", "tokens with which they begin are computed and kept once"},
        {MOE "--needle 300 -np 3 -c 512 --quiet", 0,
         "The secret code is 33602.\nThe secret code is 94193.\nThe secret code is 23915.\n", NULL},
        {MOE "--needle 300 -np 2 -c 512", 0, NULL, "in 300 tokens, depth 100 %, --kv bf16: found"},
        {MOE "--smoke -np 4 -c 1024 2>&1 >@/squares | grep -c ' ok '; sort -u @/squares | head -n 1", 0, "3\n49\n",
         NULL},
        {"printf 'Once upon a\nOnce upon a\n' | " MOE "--raw --lines -np 2 --greedy -n 1", 0, " time\n time\n",
         "2 prompts at a time, a context of"},
        {"mkfifo @/f; " MOE "--jsonl --parallel 4 <@/f >@/o & exec 3>@/f; for i in 1 2 3; do "
         "echo '{\"id\":'$i',\"prompt\":\"hi\",\"max_tokens\":1}' >&3; "
         "until [ \"$(wc -l <@/o)\" -ge $i ]; do sleep 0.01; done; done; exec 3>&-; wait; cut -d, -f1 @/o",
         0, "{\"id\":1\n{\"id\":2\n{\"id\":3\n", NULL},
        {"printf '{\"prompt\":\"hi\"}' | " MOE "--jsonl --parallel 2 >/dev/full", 1, "", "cannot write to stdout"},
        {MOE "--parallel 2 -p hi", 2, "",
         "--parallel works only with --lines or --jsonl or --bench or --plan or --needle or --smoke"},
        {MOE "--parallel 17 --lines", 2, "", "--parallel"},
        {MOE "--unordered --lines", 2, "", "--unordered works only with --jsonl"},
        {MOE "--lines --parallel 16 -c 100000000 </dev/null", 1, "",
         "16 prompts of 100,000,000 tokens need a cache of"},
        {MOE "--bench --cpu --parallel 3 -c 64 -d 5 2>/dev/null | sed -n '/^at_once/,$p' | cut -d, -f1,2", 0,
         "at_once,ctx_tokens\n1,5\n2,5\n3,5\n", NULL},
        {MOE "--lines -np 1 -cb </dev/null", 0, "", "--parallel N says how many"},
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) check_command(IN_DIR(t[i].cmd), t[i].code, t[i].out, t[i].said);
}

#define TESTS_PARALLEL                                                                        \
    {"parallel/fixtures", test_parallel_fixtures}, {"parallel/drafts", test_parallel_drafts}, \
        {"parallel/stem", test_parallel_stem}, {"parallel/kernels", test_parallel_kernels},   \
        {"parallel/requests", test_parallel_requests}, {"parallel/pipes", test_parallel_pipes},
