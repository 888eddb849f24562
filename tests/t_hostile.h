/* Files that nobody vouches for: the corpus (one file per check of the readers, tests/oracle/gen_hostile.py), a
 * converted fixture cut and flipped, a file that shrinks while it is mapped, and broken directories for the converter.
 * A refusal is one line and exit code 1; nothing crashes, hangs, or prints what a terminal would obey. */
#define FUZZ_REPLAY
#include "fuzz.c"

#define HOSTILE_CORPUS "tests/corpus/"

/* The bytes of a file of the repository or the test directory, stb_ds. */
static char *hostile_read(const char *path) {
    char *sb = NULL, err[ERR_MAX];
    CHECK(read_file(path, &sb, err) == 0, "%s", err);
    return sb;
}

/* Calls fn for every line of expected.txt in a folder of the corpus: the path, and what the message must contain ("-":
 * the file is valid). Returns the number of lines. */
static int hostile_each(const char *folder, void (*fn)(const char *path, const char *expect)) {
    char path[512], *list;
    int lines = 0;
    snprintf(path, sizeof path, HOSTILE_CORPUS "%s/expected.txt", folder);
    list = hostile_read(path);
    (void)sb_cstr(&list);
    for (char *line = strtok(list, "\n"); line; line = strtok(NULL, "\n"), lines++) {
        char *tab = strchr(line, '\t');
        if (!CHECK(tab, "no tab in '%s'", line)) break;
        *tab = 0;
        snprintf(path, sizeof path, HOSTILE_CORPUS "%s/%s", folder, line);
        size_t at = (size_t)(tab + 1 - list);
        fn(path, list + at);
    }
    arrfree(list);
    return lines;
}

/* ---- in process ---- */

static void hostile_load(const char *path, const char *expect) {
    struct model m;
    char err[ERR_MAX] = "";
    int rc = model_load(&m, path, err);
    if (strcmp(expect, "-")) {
        CHECK(rc && strstr(err, expect), "%s: rc %d, '%s', expected '%s'", path, rc, err, expect);
        CHECK(!rc || !strncmp(err, "'" HOSTILE_CORPUS, strlen(HOSTILE_CORPUS) + 1),
              "the message does not begin with the path: %s", err);
        if (rc) fuzz_message(err);
    } else if (CHECK(!rc, "%s", err)) {
        for (int kv = KV_BF16; kv <= KV_F32; kv++) {
            fuzz_forward(&m, &kernels_ref, (enum kv_type)kv);
            fuzz_forward(&m, kernels_choose(), (enum kv_type)kv);
        }
    }
    if (!rc) model_free(&m);
}

static void test_hostile_corpus(void) {
    int n = hostile_each("gguf", hostile_load), files = 0;
    DIR *d = opendir(HOSTILE_CORPUS "gguf");
    if (!CHECK(d, "no corpus")) return;
    for (struct dirent *e; (e = readdir(d));) files += strstr(e->d_name, ".gguf") != NULL;
    closedir(d);
    CHECK(n == files && n > 60, "%d files, %d expectations", files, n);
}

/* A saved state or conversation is taken or refused as the corpus says. */
static void hostile_saved(const char *path, const char *expect) {
    char err[ERR_MAX] = "";
    int rc;
    if (strstr(path, ".kv")) {
        struct model m;
        struct session s;
        if (!CHECK(!model_load(&m, HOSTILE_CORPUS "gguf/valid-qwen3moe.gguf", err), "%s", err)) return;
        m.hash = 0;
        session_open_cpu(&s, &m, 1, 1, (struct cpu_options){&kernels_ref, 1, FUZZ_CONTEXT, KV_F32, false, false, {0}});
        rc = session_load(&s, path, err);
        CHECK(!rc || !s.n_past, "%s: %d tokens of a refused state", path, s.n_past);
        session_free(&s);
        model_free(&m);
    } else {
        char *text = hostile_read(path);
        struct message *messages = NULL;
        rc = chat_parse(text, arrlenu(text), &messages, err);
        while (arrlen(messages)) message_free(&arrlast(messages)), (void)arrpop(messages);
        arrfree(messages);
        arrfree(text);
    }
    const bool valid = !strcmp(expect, "-");
    CHECK(!rc == valid && (valid || strstr(err, expect)), "%s: rc %d, '%s', expected '%s'", path, rc, err, expect);
}

static void test_hostile_saved(void) { CHECK(hostile_each("session", hostile_saved) > 20, "no corpus"); }

/* Names that do not fit a message, or that a terminal would obey. */
static void test_hostile_names(void) {
    char *model = hostile_read(HOSTILE_CORPUS "gguf/valid-qwen3moe.gguf"), *bad = NULL, err[ERR_MAX] = "", path[1024];
    struct model m;
    char *arch = memmem(model, arrlenu(model), "qwen3moe", 8);
    if (!CHECK(arch, "no architecture")) return;
    sb_put(&bad, model, arrlenu(model));
    bad[arch - model] = 'Q';
    int n = snprintf(path, sizeof path, "%s", test_dir());
    for (int i = 0; i < 3; i++) {
        n += snprintf(path + n, sizeof path - (size_t)n, "/%0200d", i);
        CHECK(mkdir(path, 0700) == 0, "cannot make %s", path);
    }
    snprintf(path + n, sizeof path - (size_t)n, "/m.gguf");
    write_test_file(path, bad, arrlenu(bad));
    CHECK(model_load(&m, path, err) && strstr(err, "'Qwen3moe' is not supported"), "'%s'", err);
    snprintf(path, sizeof path, "%s/a\033[31mb\377.gguf", test_dir());
    write_test_file(path, model, arrlenu(model));
    if (CHECK(!model_load(&m, path, err), "%s", err)) {
        CHECK(!strcmp(m.name, "a?[31mb?.gguf"), "the name '%s'", m.name);
        model_free(&m);
    }
    arrfree(model), arrfree(bad);
}

/* Every seed of the fuzzers through its function. */
static void test_hostile_seeds(void) {
    for (size_t i = 0; i < sizeof fuzz_targets / sizeof *fuzz_targets; i++) {
        char path[512];
        struct dirent **names = NULL;
        snprintf(path, sizeof path, HOSTILE_CORPUS "%s", fuzz_targets[i].name);
        int n = scandir(path, &names, NULL, alphasort), before = test_failures;
        CHECK(n > 10, "%d seeds in %s", n, path);
        for (int k = 0; k < n; k++) {
            snprintf(path, sizeof path, HOSTILE_CORPUS "%s/%s", fuzz_targets[i].name, names[k]->d_name);
            if (names[k]->d_name[0] != '.') {
                char *sb = hostile_read(path);
                fuzz_targets[i].fn((const uint8_t *)sb, arrlenu(sb));
                arrfree(sb);
            }
            if (test_failures > before) fprintf(stderr, "  in %s\n", path), before = test_failures;
            free(names[k]);
        }
        free(names);
    }
    CHECK(fuzz_taken > 20, "%d directories and scores were taken", fuzz_taken);
}

/* Converted fixtures, which have keys and tensors of every mixer. */
static const char *const hostile_models[] = {"deepseek_v3_nvfp4", "qwen3_5_moe", "nemotron_h", "kimi_linear",
                                             "inkling2_loop",     "glm5_next",   "qwen4_exp",  "gemma4",
                                             "deepseek_v4",       "minimax_m3",  "gpt_oss",    "deepseek_v41"};

enum { HOSTILE_MODELS = sizeof hostile_models / sizeof *hostile_models };

/* A converted fixture, stb_ds; begin: of its tensor data, end: of the last tensor. */
static char *hostile_fixture(const char *name, size_t **edges, size_t *begin, size_t *end) {
    char path[256];
    struct model m;
    *begin = SIZE_MAX, *end = 0;
    if (!fixture_load(name, &m)) return NULL;
    const struct gguf *g = &m.gguf;
    const uint8_t *base = g->images[0].base;
    for (uint32_t i = 0; i < g->n_kv; i++) {
        arrput(*edges, (size_t)((const uint8_t *)g->kv[i].key.p - base));
        arrput(*edges, (size_t)(g->kv[i].data - base));
    }
    for (uint32_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        size_t at = (size_t)(t->data - base), last = at + t->bytes;
        arrput(*edges, (size_t)((const uint8_t *)t->name.p - base));
        arrput(*edges, at);
        *begin = at < *begin ? at : *begin, *end = last > *end ? last : *end;
    }
    model_free(&m);
    snprintf(path, sizeof path, FIXTURES "%s.gguf", name);
    return hostile_read(path);
}

/* No head of a file is a file. */
static void test_hostile_cuts(void) {
    size_t *edges = NULL, begin, end;
    char *sb = hostile_fixture(*hostile_models, &edges, &begin, &end);
    for (size_t cut = 0; cut < 24; cut++) arrput(edges, cut);
    for (size_t cut = 24; cut < end; cut += 997) arrput(edges, cut);
    arrput(edges, end - 1);
    for (size_t i = 0; sb && i < arrlenu(edges); i++)
        CHECK(!fuzz_bind((const uint8_t *)sb, edges[i], false), "the first %zu of %zu bytes were taken", edges[i],
              arrlenu(sb));
    arrfree(edges);
    arrfree(sb);
}

/* One to three flipped bits, mostly in the header; what still loads is run now and then. */
static void test_hostile_flips(void) {
    uint64_t rng = 11;
    const int n = SANITIZED ? 100 : 1000;
    for (int f = 0; f < HOSTILE_MODELS; f++) {
        size_t *edges = NULL, begin, end;
        char *sb = hostile_fixture(hostile_models[f], &edges, &begin, &end);
        int bound = 0;
        for (int i = 0; sb && i < n; i++) {
            size_t at[3], k = 1 + rng_next(&rng) % 3;
            int bit[3];
            for (size_t j = 0; j < k; j++) {
                at[j] = rng_next(&rng) % (rng_next(&rng) % 4 ? begin : end), bit[j] = (int)(rng_next(&rng) % 8);
                sb[at[j]] = (char)(sb[at[j]] ^ 1 << bit[j]);
            }
            bound += fuzz_bind((const uint8_t *)sb, arrlenu(sb), i % 50 == 0);
            for (size_t j = 0; j < k; j++) sb[at[j]] = (char)(sb[at[j]] ^ 1 << bit[j]);
        }
        CHECK(bound > 0 && bound < n, "%s: %d of %d files were taken", hostile_models[f], bound, n);
        arrfree(edges);
        arrfree(sb);
    }
}

/* The ids by which n-grams of tokens are hashed: each is in the table, and there is one for every token. */
static void test_hostile_token_ids(void) {
    static const char key[] = "deepseek41.engram.token_map";
    size_t *edges = NULL, begin, end;
    char *sb = hostile_fixture("deepseek_v41", &edges, &begin, &end);
    arrfree(edges);
    for (int which = 0; sb && which < 2; which++) {
        struct model m = {0};
        struct gguf g;
        char err[ERR_MAX] = "", want[ERR_MAX];
        if (!CHECK(!gguf_parse(&g, (uint8_t *)sb, arrlenu(sb), err, sizeof err), "%s", err)) break;
        const struct gguf_kv *kv = gguf_find(&g, key), *most = gguf_find(&g, "deepseek41.engram.compressed_vocab_size");
        int64_t n = 0;
        if (!CHECK(kv && kv->type == GGUF_V_I32 && most && gguf_elem_int(most, 0, &n), "keys")) break;
        char *const last = sb + (kv->data - (const uint8_t *)sb) + 4 * (kv->n - 1);
        char *const letter = sb + ((const uint8_t *)kv->key.p - (const uint8_t *)sb) + sizeof key - 2;
        if (which) {
            *letter = 'q';
            snprintf(want, sizeof want, "'%s' is missing, and 'deepseek41.engram.compressed_vocab_size' is %lld, fewer",
                     key, (long long)n);
        } else {
            memcpy(last, &(int32_t){(int32_t)n}, 4);
            snprintf(want, sizeof want, "'%s' has no whole number from 0 to %lld at index %llu", key, (long long)n - 1,
                     (unsigned long long)(kv->n - 1));
        }
        gguf_close(&g);
        CHECK(!gguf_parse(&m.gguf, (uint8_t *)sb, arrlenu(sb), err, sizeof err) && model_bind(&m, err), "taken");
        CHECK_HAS(err, want, "case %d", which);
        memcpy(last, &(int32_t){0}, 4);
    }
    arrfree(sb);
}

/* Whether gguf_open_header took the file. It takes what gguf_open takes, and besides only headers, whose data are
 * zeros. */
static bool hostile_header(const char *path) {
    struct gguf g;
    char err[ERR_MAX] = "", refusal[ERR_MAX] = "";
    bool whole = !gguf_open(&g, path, refusal, sizeof refusal);
    if (!whole) fuzz_message(refusal);
    gguf_close(&g);
    bool ok = !gguf_open_header(&g, path, err, sizeof err), only = !!strstr(refusal, "holds only a header");
    CHECK(whole ? ok && !g.header_only : !ok || (only && g.header_only), "%s: '%s', '%s'", path, refusal, err);
    if (!ok) fuzz_message(err);
    for (uint32_t i = 0; ok && i < g.n_tensors; i++) {
        const struct gguf_tensor *t = &g.tensors[i];
        int ends = t->data[0] | t->data[t->bytes - 1];
        CHECK(!g.header_only || !ends, "%s: tensor %u is not zero", path, i);
    }
    gguf_close(&g);
    return ok;
}

static void hostile_header_expected(const char *path, const char *expect) {
    CHECK(!strcmp(expect, "the file holds only a header") ? hostile_header(path)
                                                          : hostile_header(path) || strcmp(expect, "-"),
          "%s: refused", path);
}

/* The corpus and flipped headers without data. */
static void test_hostile_headers(void) {
    size_t *edges = NULL, begin, end;
    char path[256], *sb = hostile_fixture(*hostile_models, &edges, &begin, &end);
    uint64_t rng = 15;
    int n = SANITIZED ? 300 : 1000, taken = 0;
    hostile_each("gguf", hostile_header_expected);
    snprintf(path, sizeof path, "%s/flipped.gguf", test_dir());
    for (int i = 0; sb && i < n; i++) {
        /* half of the flips in the tensor table, which is what the sizes come from */
        size_t at = begin - 1 - rng_next(&rng) % (i & 1 ? begin : begin / 4);
        int bit = (int)(rng_next(&rng) % 8);
        sb[at] = (char)(sb[at] ^ 1 << bit);
        write_test_file(path, sb, begin);
        taken += hostile_header(path);
        sb[at] = (char)(sb[at] ^ 1 << bit);
    }
    CHECK(taken > n / 10 && taken < n, "%d of %d headers were taken", taken, n);
    unlink(path);
    arrfree(edges);
    arrfree(sb);
}

/* Weights of a router are not looked at when they are loaded. Scratch memory has room for distinct experts only. */
static void test_hostile_router(void) {
    float bias[8] = {0, 0, 0, NAN, INFINITY, -INFINITY, 0, 0};
    uint64_t rng = 14;
    for (int i = 0; i < 2000; i++) {
        struct model m = {.n_group = 1 << i % 4,
                          .gating = i & 8 ? GATING_SOFTMAX : GATING_SIGMOID,
                          .routed_scaling_factor = 1,
                          .norm_topk_prob = i & 1};
        struct layer y = {.n_expert = 8, .n_expert_used = 1 + i % 8, .router_bias = i & 16 ? bias : NULL};
        float logits[8], weights[8];
        int32_t ids[8];
        unsigned seen = 0;
        m.n_group_used = 1 + i % m.n_group;
        for (int e = 0; e < 8; e++) logits[e] = (float[]){NAN, INFINITY, -INFINITY, 1, -2}[rng_next(&rng) % 5];
        route_token(&m, &y, NULL, logits, ids, weights);
        for (int k = 0; k < y.n_expert_used; k++) {
            CHECK(ids[k] >= 0 && ids[k] < 8 && !(seen >> ids[k] & 1), "case %d: expert %d, of %d", i, ids[k],
                  y.n_expert_used);
            seen |= 1u << (ids[k] & 31);
        }
    }
}

/* ---- through the programs ---- */

/* Runs a command that ends by refusing: code 1, nothing on stdout, lines of `program` on stderr (`lines` of them), all
 * plain text. With may_succeed code 0 is as good. Whether it refused. */
static bool hostile_run(const char *cmd, const char *program, bool may_succeed) {
    char *out = NULL, *said = NULL;
    int rc = run_command(cmd, &out, &said);
    size_t n = arrlenu(said), prefix = strlen(program);
    (void)sb_cstr(&said);
    if (!may_succeed || rc) {
        CHECK(rc == 1, "`%s` gave %d: %.300s", cmd, rc, said);
        CHECK(!arrlenu(out), "`%s` printed %zu bytes", cmd, arrlenu(out));
        CHECK(n > prefix && said[n - 1] == '\n', "`%s` said '%.300s'", cmd, said);
        for (char *line = said, *end; n && line < said + n; line = end + 1) {
            end = line + strcspn(line, "\n");
            CHECK(!strncmp(line, program, prefix), "`%s` said '%.300s'", cmd, line);
            *end = 0;
            fuzz_message(line);
        }
    }
    arrfree(out);
    arrfree(said);
    return rc != 0;
}

#define HOSTILE_SECONDS "600" /* until a program that hangs is ended: long, for busy machines */
#define HOSTILE_RUN     "timeout " HOSTILE_SECONDS " " MOE_BIN " -m %s --raw -p 'ab c' -n 2 -c 16 -t 1 </dev/null"

static void hostile_program(const char *path, const char *expect) {
    char cmd[1024];
    if (!strcmp(expect, "-")) return;
    snprintf(cmd, sizeof cmd, HOSTILE_RUN, path);
    hostile_run(cmd, "moe: ", false);
}

static void test_hostile_program(void) {
    static const char *const valid[] = {"valid-qwen3moe", "valid-deepseek2", "valid-odd-widths",
                                        "valid-strange-vocabulary"};
    char path[512], cmd[1024];
    uint64_t rng = 12;
    int refused = 0, n = SANITIZED ? 20 : 100;
    hostile_each("gguf", hostile_program);
    snprintf(path, sizeof path, "%s/pipe.gguf", test_dir());
    CHECK(!mkfifo(path, 0600), "cannot make %s", path);
    snprintf(cmd, sizeof cmd, HOSTILE_RUN, path);
    hostile_run(cmd, "moe: ", false);
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof path, HOSTILE_CORPUS "gguf/%s.gguf", valid[i % 4]);
        char *sb = hostile_read(path);
        if (!arrlenu(sb)) break;
        for (int k = 0; k < 3; k++) sb[rng_next(&rng) % arrlenu(sb)] ^= (char)(1 << rng_next(&rng) % 8);
        snprintf(path, sizeof path, "%s/mutant.gguf", test_dir());
        write_test_file(path, sb, arrlenu(sb));
        arrfree(sb);
        snprintf(cmd, sizeof cmd, HOSTILE_RUN, path);
        refused += hostile_run(cmd, "moe: ", true);
    }
    CHECK(refused > n / 10, "%d of %d mutants were refused", refused, n);
}

/* The file loses its end after it was mapped, before its weights are read. */
static void test_hostile_shrinks(void) {
    size_t *edges = NULL, begin, end;
    char path[256], cmd[2048], *said = NULL, *sb = hostile_fixture(*hostile_models, &edges, &begin, &end);
    arrfree(edges);
    if (!sb) return;
    snprintf(path, sizeof path, "%s/shrinks.gguf", test_dir());
    write_test_file(path, sb, arrlenu(sb));
    arrfree(sb);
    struct child p;
    snprintf(cmd, sizeof cmd, "exec " MOE_BIN " --verbose -m %s --raw -n 4 -c 64 -t 2", path);
    if (!child_start(&p, cmd)) return;
    if (child_expect(&p, "loaded in") && CHECK(!truncate(path, 4096), "%s", strerror(errno)))
        child_write(&p, "ab\n", 3);
    int rc = child_end(&p, NULL, &said);
    static const char last[] = "moe: the model file was truncated or its disk failed while in use\n";
    size_t n = arrlenu(said), k = sizeof last - 1;
    CHECK(rc == 1 && n >= k && !memcmp(said + n - k, last, k), "exit %d: %s", rc, sb_cstr(&said));
    arrfree(said);
}

static size_t hostile_header_bytes(const char *safetensors) {
    return 8 + (size_t)gguf_rd64((const uint8_t *)safetensors);
}

/* The converter on directories of which one file is cut or flipped. What it writes all the same is loaded. */
static void test_hostile_convert(void) {
    static const char *const files[] = {"model.safetensors", "config.json", "tokenizer.json", "hf_quant_config.json",
                                        "tokenizer_config.json"};
    char dir[128], path[256], out[256], cmd[1024], err[ERR_MAX];
    uint64_t rng = 13;
    int refused = 0, n = SANITIZED ? 25 : 100;
    snprintf(dir, sizeof dir, "%s/hf", test_dir());
    snprintf(out, sizeof out, "%s/hf.gguf", test_dir());
    snprintf(cmd, sizeof cmd, "cp -r tests/fixtures/deepseek_v3_nvfp4 %s && chmod -R u+w %s", dir, dir);
    if (!CHECK(!run_command(cmd, NULL, NULL), "cannot copy the fixture")) return;
    for (int i = 0; i < n; i++) {
        const char *file = files[i % 5];
        snprintf(path, sizeof path, "%s/%s", dir, file);
        char *whole = hostile_read(path), *sb = NULL;
        if (!arrlenu(whole)) break;
        sb_put(&sb, whole, arrlenu(whole));
        size_t reach = i % 5 ? arrlenu(sb) : hostile_header_bytes(sb);
        bool cut = rng_next(&rng) % 4 == 0;
        if (cut) arrsetlen(sb, rng_next(&rng) % (i % 2 ? reach : arrlenu(sb)));
        for (int k = 0; !cut && k < 2; k++) sb[rng_next(&rng) % reach] ^= (char)(1 << rng_next(&rng) % 8);
        write_test_file(path, sb, arrlenu(sb));
        snprintf(cmd, sizeof cmd, "timeout " HOSTILE_SECONDS " " CONVERT_BIN " %s -o %s", dir, out);
        bool no = hostile_run(cmd, "moe-convert: ", !cut || !strcmp(file, "tokenizer_config.json"));
        struct model m;
        if (no) {
            snprintf(cmd, sizeof cmd, "ls %s*", out);
            CHECK(run_command(cmd, NULL, NULL), "a file is left behind a refusal: %s", path);
        } else if (model_load(&m, out, err)) {
            fuzz_message(err);
        } else {
            model_free(&m);
        }
        refused += no;
        unlink(out);
        write_test_file(path, whole, arrlenu(whole));
        arrfree(whole);
        arrfree(sb);
    }
    CHECK(refused > n / 2, "%d of %d directories were refused", refused, n);
}

#define TESTS_HOSTILE                                                                           \
    {"hostile/corpus", test_hostile_corpus}, {"hostile/saved", test_hostile_saved},             \
        {"hostile/names", test_hostile_names}, {"hostile/seeds", test_hostile_seeds},           \
        {"hostile/cuts", test_hostile_cuts}, {"hostile/flips", test_hostile_flips},             \
        {"hostile/token-ids", test_hostile_token_ids}, {"hostile/router", test_hostile_router}, \
        {"hostile/program", test_hostile_program}, {"hostile/shrinks", test_hostile_shrinks},   \
        {"hostile/convert", test_hostile_convert}, {"hostile/headers", test_hostile_headers},
