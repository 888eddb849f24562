/* build/moe-reap: files of random bytes in which every expert can be told from the others, scores that are known, and
 * what is left compared slice by slice; then whole models, whose pruned form must compute what the whole one does
 * without those experts. */

/* ------------------------------------------------------------------------------------------------- files of our own */

enum { TOY_BLOCKS = 6, TOY_EXPERTS = 16 };

/* Blocks from 0; those after blocks - mtp are for multi-token prediction. */
struct toy {
    int blocks, mtp, n_group, n_group_used, top_k, hashed; /* hashed: the block that is routed by id; 0: none */
    uint32_t type;                                         /* of the experts' gate */
    int n[TOY_BLOCKS];                                     /* experts; 0: dense */
    const char *name;
    void (*more)(struct gguf_writer *w); /* further keys */
};

struct toy_file {
    struct gguf_writer w;
    uint8_t *data; /* stb_ds */
    uint64_t rng;
};

static void toy_tensor(struct toy_file *f, int block, const char *what, uint32_t type, uint32_t n_dims, uint64_t a,
                       uint64_t b, uint64_t c) {
    char name[96];
    if (block < 0) snprintf(name, sizeof name, "%s", what);
    else snprintf(name, sizeof name, "blk.%d.%s", block, what);
    uint64_t n = gguf_add_tensor(&f->w, name, type, n_dims, (uint64_t[]){a, b, c});
    for (uint64_t i = 0; i < gguf_pad(n); i++) arrput(f->data, i < n ? (uint8_t)rng_next(&f->rng) : 0);
}

static void toy_u32(struct toy_file *f, const char *key, int v) {
    char full[64];
    snprintf(full, sizeof full, "toy.%s", key);
    gguf_put_u32(&f->w, full, (uint32_t)v);
}

/* Writes the model as test_dir()/file; `extra` adds a tensor of its own to the last block. */
static void toy_write(const struct toy *t, const char *file, void (*extra)(struct toy_file *f)) {
    struct toy_file f = {.rng = 77};
    size_t n = 0;
    gguf_put_str(&f.w, "general.architecture", "toy", 3);
    if (t->name) gguf_put_str(&f.w, "general.name", t->name, strlen(t->name));
    gguf_put_u32(&f.w, "split.count", 1);
    toy_u32(&f, "block_count", t->blocks);
    if (t->mtp) toy_u32(&f, "nextn_predict_layers", t->mtp);
    toy_u32(&f, "expert_count", TOY_EXPERTS);
    toy_u32(&f, "expert_used_count", t->top_k);
    if (t->n_group > 1) toy_u32(&f, "expert_group_count", t->n_group);
    if (t->n_group > 1) toy_u32(&f, "expert_group_used_count", t->n_group_used);
    gguf_put_array(&f.w, "toy.strings", GGUF_V_STR, 2, NULL);
    gguf_put_bytes(&f.w, "one", 3), gguf_put_bytes(&f.w, "", 0);
    gguf_put_array(&f.w, "toy.per_layer", GGUF_V_I32, (uint64_t)t->blocks, t->n);
    if (t->more) t->more(&f.w);
    toy_tensor(&f, -1, "token_embd.weight", GGUF_BF16, 2, 8, 5, 1);
    for (int b = 0; b < t->blocks; b++) {
        uint64_t e = (uint64_t)t->n[b];
        toy_tensor(&f, b, "attn_norm.weight", GGUF_F32, 1, 7, 1, 1);
        if (!e) continue;
        if (b == t->hashed && b) toy_tensor(&f, b, "ffn_gate_tid2eid.weight", GGUF_I32, 2, 2, 5, 1);
        toy_tensor(&f, b, "ffn_gate_inp.weight", b % 2 ? GGUF_F32 : GGUF_BF16, 2, 8, e, 1);
        toy_tensor(&f, b, "ffn_gate_inp.bias", GGUF_F32, 1, e, 1, 1);
        toy_tensor(&f, b, b % 2 ? "exp_probs_b.bias" : "exp_probs_b", GGUF_F32, 1, e, 1, 1);
        toy_tensor(&f, b, "ffn_gate_exps.weight", t->type, 3, 64, 3, e);
        toy_tensor(&f, b, "ffn_gate_exps.scale", GGUF_F32, 1, e, 1, 1);
        toy_tensor(&f, b, "ffn_gate_exps.input_scale", GGUF_F32, 1, e, 1, 1);
        toy_tensor(&f, b, "ffn_gate_up_exps.weight", GGUF_Q8_0, 3, 64, 2, e);
        toy_tensor(&f, b, "ffn_gate_up_exps.scale", GGUF_F32, 1, 1, 1, 1);
        toy_tensor(&f, b, "ffn_down_exps.weight", GGUF_MXFP4, 3, 32, 5, e);
        toy_tensor(&f, b, "ffn_down_exps.bias", GGUF_F16, 2, 3, e, 1);
        toy_tensor(&f, b, "ffn_gate_shexp.weight", GGUF_BF16, 2, 8, e, 1);
        toy_tensor(&f, b, "ffn_gate_inp_shexp.weight", GGUF_F32, 1, e, 1, 1);
    }
    if (extra) extra(&f);
    uint8_t *header = gguf_header(&f.w, &n);
    struct hf h = {.out = NULL};
    char *all = NULL;
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    sb_put(&all, (char *)header, n);
    sb_put(&all, (char *)f.data, arrlenu(f.data));
    hf_write(&h, file, all, arrlenu(all));
    arrfree(all);
    arrfree(f.data);
    free(header);
    gguf_writer_free(&f.w);
}

static bool reap_open(struct gguf *g, const char *file) {
    char path[256], err[ERR_MAX];
    snprintf(path, sizeof path, "%s/%s", test_dir(), file);
    return CHECK(!gguf_open(g, path, err, sizeof err), "%s", err);
}

/* ----------------------------------------------------------------------------------------------------------- scores */

struct toy_score {
    int64_t tokens;
    double weighted, most, norm;
};

/* FNV-1a of the routers of blocks 0..n-1 as float32. */
static uint64_t toy_routers(const struct gguf *g, int n) {
    uint64_t h = HASH_START;
    for (int b = 0; b < n; b++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", b);
        const struct gguf_tensor *t = gguf_find_tensor(g, name);
        if (!t) continue;
        size_t count = (size_t)(t->ne[0] * t->ne[1]);
        float *v = xmalloc(count * sizeof *v);
        gguf_dequantize_row(t->type, t->data, v, count);
        h = hash_bytes(h, v, count * sizeof *v);
        free(v);
    }
    return h;
}

/* Scores of a file, with those of `mtp` MTP layers; score(block, expert) says which. */
static json_t *scores_make(const struct gguf *g, int trunk, int mtp, struct toy_score (*score)(int block, int e)) {
    static const char *const keys[] = {"tokens", "weighted_sum", "weighted_max", "norm_sum", "gate_sum"};
    char hash[17];
    json_t *layers = json_array();
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)toy_routers(g, trunk));
    for (int b = 0; b < trunk + mtp; b++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", b);
        const struct gguf_tensor *t = gguf_find_tensor(g, name);
        json_t *layer = t ? json_object() : json_null();
        for (int k = 0; t && k < 5; k++) json_object_set_new(layer, keys[k], json_array());
        for (int e = 0; t && e < (int)t->ne[1]; e++) {
            struct toy_score s = score(b, e);
            double v[] = {0, s.weighted, s.most, s.norm, 0};
            for (int k = 0; k < 5; k++)
                json_array_append_new(json_object_get(layer, keys[k]), k ? json_real(v[k]) : json_integer(s.tokens));
        }
        json_array_append_new(layers, layer);
    }
    return json_pack("{s:s,s:i,s:{s:s,s:s},s:I,s:[],s:o}", "format", "moe-scores", "version", 1, "model", "name", "toy",
                     "routers", hash, "tokens", (json_int_t)1000, "sources", "layers", layers);
}

static void scores_write(json_t *j, const char *file) {
    struct hf h = {.out = NULL};
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    hf_json(&h, file, j);
}

static void scores_put_mtp(const char *model, const char *file, int trunk, int mtp,
                           struct toy_score (*score)(int block, int e)) {
    struct gguf g;
    if (!reap_open(&g, model)) return;
    json_t *j = scores_make(&g, trunk, mtp, score);
    scores_write(j, file);
    json_decref(j);
    gguf_close(&g);
}

static void scores_put(const char *model, const char *file, int trunk, struct toy_score (*score)(int block, int e)) {
    scores_put_mtp(model, file, trunk, 0, score);
}

/* Runs moe-reap in the test directory; the exit code. What it says is valid until the next call. */
static const char *reap_out, *reap_err;
static int reap_run(const char *args) {
    static char *out, *err;
    char cmd[2048];
    arrsetlen(out, 0);
    arrsetlen(err, 0);
    snprintf(cmd, sizeof cmd, "d=$PWD; cd %s && $d/" REAP_BIN " %s", test_dir(), args);
    int rc = run_command(cmd, &out, &err);
    reap_out = sb_cstr(&out), reap_err = sb_cstr(&err);
    return rc;
}

/* In the test directory. */
static void shell(const char *what) {
    char cmd[1024];
    snprintf(cmd, sizeof cmd, "cd %s && { set -e; %s; }", test_dir(), what);
    CHECK(!run_command(cmd, NULL, NULL), "%s", what);
}

static json_t *json_in(const char *file) {
    char path[256];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s", test_dir(), file);
    json_t *j = json_load_file(path, 0, &e);
    CHECK(j, "%s: %s", file, e.text);
    return j;
}

/* The kept list of a block as text, or "-". */
static const char *kept_text(const struct gguf *g, int block) {
    static char text[4][512];
    static int turn;
    char *s = text[turn++ & 3], key[64];
    int64_t v;
    snprintf(key, sizeof key, "moe.reap.kept.%d", block);
    const struct gguf_kv *kv = gguf_find(g, key);
    snprintf(s, sizeof text[0], "-");
    for (uint64_t i = 0; kv && i < kv->n; i++)
        if (gguf_elem_int(kv, i, &v))
            snprintf(i ? s + strlen(s) : s, i ? sizeof text[0] - strlen(s) : sizeof text[0], i ? " %d" : "%d", (int)v);
    return s;
}

/* Whether a tensor has a slice per expert, by the rules of the formats. */
static bool toy_sliced(const char *name, const struct gguf_tensor *t) {
    static const char *const words[] = {"ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias",
                                        "exp_probs_b",         "_exps.weight",      "_exps.bias",
                                        "_exps.scale",         "_exps.input_scale"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strlen(name) >= strlen(words[i]) && !strcmp(name + strlen(name) - strlen(words[i]), words[i]))
            return t->ne[0] * t->ne[1] * t->ne[2] > 1;
    return false;
}

/* Every tensor of `b` is that of `a` or its slices ids[block][0..n[block]-1], in a's order; n[block] < 0: left out. */
static void compare_cut(const struct gguf *a, const struct gguf *b, const int ids[][TOY_EXPERTS], const int *n,
                        int blocks) {
    uint32_t k = 0;
    for (uint32_t i = 0; i < a->n_tensors; i++) {
        const struct gguf_tensor *x = &a->tensors[i], *y = &b->tensors[k];
        char name[96];
        int block = -1;
        gguf_printable(x->name, name, sizeof name);
        sscanf(name, "blk.%d.", &block);
        if (block >= 0 && block < blocks && n[block] < 0) continue;
        if (!CHECK(k < b->n_tensors && !gguf_str_cmp(x->name, y->name) && x->type == y->type && x->n_dims == y->n_dims,
                   "%s is not the next tensor", name))
            return;
        k++;
        bool cut = block >= 0 && block < blocks && n[block] && toy_sliced(name, x);
        uint64_t all = x->ne[x->n_dims - 1], kept = cut ? (uint64_t)n[block] : all, bytes = x->bytes / all;
        bool same = y->bytes == bytes * kept && y->ne[x->n_dims - 1] == kept;
        for (uint64_t s = 0; same && s < kept; s++)
            same = !memcmp(y->data + s * bytes, x->data + (cut ? (uint64_t)ids[block][s] : s) * bytes, bytes);
        CHECK(same, "%s: other bytes than those of the experts that stay", name);
    }
    CHECK(k == b->n_tensors, "%u tensors, expected %u", b->n_tensors, k);
}

/* compare_cut by the kept lists that b holds; blocks without one are whole. */
static void compare_listed(const struct gguf *a, const struct gguf *b, int blocks) {
    static int ids[16][TOY_EXPERTS];
    int n[16] = {0};
    for (int block = 0; block < blocks; block++) {
        char key[64];
        int64_t v = 0;
        snprintf(key, sizeof key, "moe.reap.kept.%d", block);
        const struct gguf_kv *kv = gguf_find(b, key);
        for (uint64_t i = 0; kv && i < kv->n && gguf_elem_int(kv, i, &v); i++) ids[block][n[block]++] = (int)v;
    }
    compare_cut(a, b, (const int(*)[TOY_EXPERTS])ids, n, blocks);
}

/* -------------------------------------------------------------------------------------------------------- selection */

/* One dense block, two mixtures of 8. */
static const struct toy toy_plain = {.blocks = 3, .top_k = 2, .type = GGUF_NVFP4, .n = {0, 8, 8}, .name = "toy"};

/* Means of weighted output: block 1: 5 1 5 3 2 5 0 4 (expert 6 was never seen); block 2: 10 1 1 1 1 1 1 1.
 * Tokens order the experts otherwise, and so do the norms. */
static struct toy_score score_plain(int block, int e) {
    static const double mean[2][8] = {{5, 1, 5, 3, 2, 5, 0, 4}, {10, 1, 1, 1, 1, 1, 1, 1}};
    static const int tokens[2][8] = {{10, 100, 31, 40, 50, 60, 0, 70}, {40, 40, 40, 40, 50, 60, 70, 80}};
    int64_t t = tokens[block - 1][e];
    double most = block == 1 && e == 3 ? 1000 : e + 1;
    return (struct toy_score){t, mean[block - 1][e] * (double)t, most, (double)(t * (8 - e))};
}

/* The same with the one outlier in the last quarter of the layers. */
static struct toy_score score_late(int block, int e) {
    struct toy_score s = score_plain(block, e);
    s.most = block == 2 && e == 7 ? 1000 : e + 1;
    return s;
}

/* Two blocks of 8 in groups of 4; a third block for prediction. */
static const struct toy toy_groups = {.blocks = 4,
                                      .mtp = 1,
                                      .n_group = 2,
                                      .n_group_used = 1,
                                      .top_k = 2,
                                      .type = GGUF_BF16,
                                      .n = {0, 8, 8, 8},
                                      .name = "toy-REAP-8of16"};

/* Means: block 1: 9 8 7 6, 4 3 2 1; block 2: 1 1 1 30, 2 2 9 2. */
static struct toy_score score_groups(int block, int e) {
    static const double mean[2][8] = {{9, 8, 7, 6, 4, 3, 2, 1}, {1, 1, 1, 30, 2, 2, 9, 2}};
    return (struct toy_score){100, 100 * mean[block - 1][e], 1, 100};
}

static void test_reap_selection(void) {
    static const struct {
        const char *options, *kept[2]; /* of blocks 1 and 2 */
        const char *name;
    } c[] = {{"plain --keep 4", {"0 2 5 7", "0 1 2 3"}, "toy-REAP-4of8"},
             {"plain --keep 2", {"0 2", "0 1"}, "toy-REAP-2of8"},
             {"plain --keep 7", {"0 1 2 3 4 5 7", "0 1 2 3 4 5 6"}, "toy-REAP-7of8"},
             {"plain --ratio 0.5", {"0 2 5 7", "0 1 2 3"}, "toy-REAP-4of8"},
             {"plain --ratio 0.49", {"0 2 3 5 7", "0 1 2 3 4"}, "toy-REAP-5of8"}, /* int(3.92) go */
             {"plain --ratio 0.75", {"0 2", "0 1"}, "toy-REAP-2of8"},
             {"plain --ratio 0", {"-", "-"}, "toy"},
             {"plain --keep 3 --criterion frequency", {"1 5 7", "5 6 7"}, "toy-REAP-3of8"},
             {"plain --keep 3 --criterion norm", {"0 1 2", "0 1 2"}, "toy-REAP-3of8"},
             {"plain --keep 2 --protect-outliers", {"0 3", "0 1"}, "toy-REAP-2of8"},
             {"late --keep 2 --protect-outliers", {"0 2", "0 1"}, "toy-REAP-2of8"},
             {"plain --keep 4 --per-layer", {"0 2 3 4 5 7", "0 1"}, "toy-REAP"},
             {"plain --keep 4 --per-layer --floor 3", {"0 2 3 5 7", "0 1 2"}, "toy-REAP"},
             {"plain --keep 4 --per-layer --floor 4", {"0 2 5 7", "0 1 2 3"}, "toy-REAP-4of8"},
             {"plain --counts counts --name other", {"0 2 5", "0 1 2 3 4 5 6"}, "other"},
             {"groups --keep 6", {"0 1 2 4 5 6", "0 1 3 4 5 6"}, "toy-REAP-6of8"},
             {"groups --keep 4", {"0 1 4 5", "0 3 4 6"}, "toy-REAP-4of8"},
             {"groups --ratio 0.3", {"0 1 2 4 5 6", "0 1 3 4 5 6"}, "toy-REAP-6of8"},
             {"groups --ratio 0.4", {"0 1 2 4 5 6", "0 1 3 4 5 6"}, "toy-REAP-6of8"},
             {"groups --ratio 0.5", {"0 1 4 5", "0 3 4 6"}, "toy-REAP-4of8"},
             {"groups --keep 6 --per-layer --floor 4", {"-", "0 3 4 6"}, "toy-REAP"}};
    toy_write(&toy_plain, "plain.gguf", NULL);
    toy_write(&toy_groups, "groups.gguf", NULL);
    scores_put("plain.gguf", "plain.json", 3, score_plain);
    toy_write(&toy_plain, "late.gguf", NULL);
    scores_put("groups.gguf", "groups.json", 3, score_groups);
    scores_put("late.gguf", "late.json", 3, score_late);
    struct hf h = {.out = NULL};
    static const char counts[] = "# layer count\n\n 1 3\n2\t7 # the last\n";
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    hf_write(&h, "counts", counts, strlen(counts));
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char args[256], model[32], file[64];
        struct gguf a, b;
        sscanf(c[i].options, "%31s", model);
        snprintf(file, sizeof file, "%s.gguf", model);
        snprintf(args, sizeof args, "%s.gguf %s.json -o out.gguf%s", model, model, c[i].options + strlen(model));
        if (!CHECK(!reap_run(args), "%s: %s", args, reap_err) || !reap_open(&a, file)) continue;
        if (reap_open(&b, "out.gguf")) {
            for (int k = 0; k < 2; k++)
                CHECK(!strcmp(kept_text(&b, 1 + k), c[i].kept[k]), "%s: block %d keeps %s, expected %s", args, 1 + k,
                      kept_text(&b, 1 + k), c[i].kept[k]);
            CHECK(key_is(&b, "general.name", c[i].name), "%s: the name", args);
            compare_listed(&a, &b, model[0] == 'g' ? 4 : 3);
            if (model[0] == 'g') CHECK(!strcmp(kept_text(&b, 3), kept_text(&b, 2)), "%s: MTP", args);
        }
        gguf_close(&a);
        gguf_close(&b);
    }
}

static void test_reap_random(void) {
    struct gguf g;
    char first[2][64] = {"", ""};
    toy_write(&toy_plain, "plain.gguf", NULL);
    static const char *const seeds[] = {"", " --seed 0", " --seed 1"};
    for (int i = 0; i < 3; i++) {
        char args[128];
        snprintf(args, sizeof args, "plain.gguf -o out.gguf --keep 4 --criterion random%s", seeds[i]);
        if (!CHECK(!reap_run(args), "%s", reap_err) || !reap_open(&g, "out.gguf")) return;
        bool same = !strcmp(first[0], kept_text(&g, 1)) && !strcmp(first[1], kept_text(&g, 2));
        CHECK(i == 0 || same == (i == 1), "%s: %s, %s", args, kept_text(&g, 1), kept_text(&g, 2));
        for (int k = 0; k < 2 && !i; k++) snprintf(first[k], sizeof first[k], "%s", kept_text(&g, 1 + k));
        CHECK(!gguf_find(&g, "moe.reap.calibration.tokens"), "tokens without scores");
        gguf_close(&g);
    }
}

/* Above the 99.5th percentile and a tenth of the largest, both: of 64 values one is, of 1024 two. */
static struct toy_score score_decode(int block, int e) {
    double most = block || e > 3 ? 1 : 1000 - 10 * e;
    return (struct toy_score){100, 100.0 * e, most, 100};
}

static struct toy_score score_prefill(int block, int e) {
    double most = block || e > 3 ? 1 : e == 1 ? 1000 : e == 2 ? 90 : 500;
    return (struct toy_score){100, 100.0 * e, most, 100};
}

static void test_reap_outliers(void) {
    for (int many = 0; many < 2; many++) {
        struct toy t = {.blocks = 4, .top_k = 2, .type = GGUF_BF16};
        struct gguf g;
        for (int b = 0; b < 4; b++) t.n[b] = many ? 256 : 16;
        toy_write(&t, "many.gguf", NULL);
        scores_put("many.gguf", "many.json", 4, many ? score_prefill : score_decode);
        const char *args = "many.gguf many.json -o out.gguf --keep 4 --protect-outliers";
        if (!CHECK(!reap_run(args), "%s", reap_err) || !reap_open(&g, "out.gguf")) return;
        CHECK(!strcmp(kept_text(&g, 0), many ? "0 1 3 255" : "0 13 14 15"), "%s", kept_text(&g, 0));
        CHECK(!strcmp(kept_text(&g, 3), many ? "252 253 254 255" : "12 13 14 15"), "%s", kept_text(&g, 3));
        gguf_close(&g);
    }
}

/* Every format of experts, groups of slices at both ends and in the middle; blocks routed by hash stay whole. */
static void test_reap_slices(void) {
    static const uint32_t types[] = {GGUF_NVFP4, GGUF_BF16, GGUF_F16, GGUF_F32, GGUF_Q8_0, GGUF_MXFP4};
    static const char counts[] = "1 3\n2 7\n4 16";
    struct toy t = {.blocks = 5, .top_k = 2, .hashed = 4, .n = {0, 8, 8, 0, 16}};
    struct hf h = {.out = NULL};
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    hf_write(&h, "counts", counts, strlen(counts));
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct gguf a, b;
        t.type = types[i];
        toy_write(&t, "in.gguf", NULL);
        if (!reap_open(&a, "in.gguf")) return;
        if (!CHECK(!reap_run("in.gguf -o out.gguf --counts counts --criterion random"), "%s", reap_err)) return;
        CHECK(strstr(reap_out, "routed by hash"), "%s", reap_out);
        if (!reap_open(&b, "out.gguf")) return;
        compare_listed(&a, &b, 5);
        CHECK(!strcmp(kept_text(&b, 4), "-") && key_int(&b, "toy.expert_count") == 16, "the block routed by hash");
        const struct gguf_kv *kv = gguf_find(&b, "toy.expert_count_per_layer");
        static const int want_counts[] = {0, 3, 7, 0, 16};
        CHECK(kv && kv->n == 5 && !memcmp(kv->data, want_counts, sizeof want_counts), "expert_count_per_layer");
        gguf_close(&a);
        gguf_close(&b);
    }
}

/* Keys and data stay as they are; what is said about pruning is right. */
static void test_reap_nothing(void) {
    struct gguf a, b;
    char hash[17];
    toy_write(&toy_plain, "plain.gguf", NULL);
    scores_put("plain.gguf", "plain.json", 3, score_plain);
    if (!CHECK(!reap_run("plain.gguf plain.json -o out.gguf --keep 8"), "%s", reap_err)) return;
    if (!reap_open(&a, "plain.gguf") || !reap_open(&b, "out.gguf")) return;
    uint32_t k = 0;
    for (uint32_t i = 0; i < a.n_kv; i++) {
        const struct gguf_kv *x = &a.kv[i], *y = &b.kv[k];
        char key[64];
        gguf_printable(x->key, key, sizeof key);
        if (!strcmp(key, "split.count")) continue;
        k++;
        CHECK(!gguf_str_cmp(x->key, y->key) && x->type == y->type && x->is_array == y->is_array && x->n == y->n,
              "key %s", key);
        if (i + 1 == a.n_kv || !strcmp(key, "toy.expert_count")) continue;
        CHECK(!memcmp(x->data, y->data, (size_t)(x[1].key.p - 8 - (const char *)x->data)), "key %s", key);
    }
    CHECK(key_int(&b, "toy.expert_count") == 8 && key_int(&b, "moe.reap.pruned") == 0, "counts");
    CHECK(key_int(&b, "moe.reap.original_expert_count") == 8 && key_is(&b, "moe.reap.criterion", "reap"), "keys");
    CHECK(key_int(&b, "moe.reap.calibration.tokens") == 1000, "tokens");
    CHECK(fabs(key_num(&b, "moe.reap.calibration.coverage") - 13.0 / 16) < 1e-6, "coverage");
    uint64_t h = hash_bytes(HASH_START, a.images[0].base, (size_t)(a.tensors[0].data - a.images[0].base));
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)h);
    CHECK(key_is(&b, "moe.reap.source_hash", hash), "the hash of the source");
    int none[3] = {0};
    compare_cut(&a, &b, NULL, none, 3);
    size_t first = (size_t)(a.tensors[0].data - a.images[0].base), at = (size_t)(b.tensors[0].data - b.images[0].base);
    CHECK(a.images[0].size - first == b.images[0].size - at &&
              !memcmp(a.tensors[0].data, b.tensors[0].data, a.images[0].size - first),
          "the data differ");
    gguf_close(&a);
    gguf_close(&b);
}

/* The largest count that fits to the byte, and the smallest file in the refusal. */
static void test_reap_budget(void) {
    long long size[9] = {0};
    char args[256], path[128], text[64];
    struct stat st;
    struct gguf g;
    toy_write(&toy_plain, "plain.gguf", NULL);
    scores_put("plain.gguf", "plain.json", 3, score_plain);
    snprintf(path, sizeof path, "%s/out.gguf", test_dir());
    for (int n = 2; n <= 8; n++) {
        snprintf(args, sizeof args, "plain.gguf plain.json -o out.gguf --keep %d", n);
        CHECK(!reap_run(args) && !stat(path, &st), "%s", reap_err);
        size[n] = (long long)st.st_size;
    }
    for (int n = 2; n <= 8; n++)
        for (int less = 0; less < 2; less++) {
            snprintf(args, sizeof args, "plain.gguf plain.json -o out.gguf --budget %.17g",
                     (double)(size[n] - less) / 0x1p30);
            int rc = reap_run(args), keep = n - less;
            snprintf(text, sizeof text, "with 2 experts a layer, has %lld bytes", size[2]);
            CHECK(rc == (keep < 2), "%s: %s", args, reap_err);
            CHECK(!rc || strstr(reap_err, text), "%s", reap_err);
            if (rc || !reap_open(&g, "out.gguf")) continue;
            CHECK(key_int(&g, "toy.expert_count") == keep && (long long)g.images[0].size == size[keep],
                  "%s: %d experts, %zu bytes", args, (int)key_int(&g, "toy.expert_count"), g.images[0].size);
            gguf_close(&g);
        }
    snprintf(args, sizeof args, "plain.gguf plain.json -o out.gguf --per-layer --budget %.17g",
             (double)size[5] / 0x1p30);
    CHECK(!reap_run(args) && !stat(path, &st) && st.st_size <= size[5] && st.st_size > size[3], "%s", reap_err);
    snprintf(args, sizeof args, "plain.gguf plain.json -o out.gguf --per-layer --floor 6 --budget %.17g",
             (double)size[5] / 0x1p30); /* a floor is kept, whatever the budget */
    CHECK(reap_run(args) == 1 && strstr(reap_err, "with 6 experts a layer"), "%s", reap_err);
}

/* Two files add up: neither alone gives this choice. Means of output by gate weight, then of output:
 * expert 0: 10 of 10 tokens and 100 / 90 of 90, together 2; 1 and 0.1, together 0.2
 *        1: 3 and 3; 1 and 1
 *        2: none and 5; none and 1
 *        3: 1 and 1; 10 and 1, together 5.5
 *   others: 1 and 1 */
static struct toy_score score_half(int block, int e) {
    static const struct toy_score s[4] = {{10, 100, 1, 10}, {10, 30, 1, 10}, {0, 0, 0, 0}, {50, 50, 1, 500}};
    (void)block;
    return e < 4 ? s[e] : (struct toy_score){50, 50, 1, 50};
}

static struct toy_score score_other_half(int block, int e) {
    static const struct toy_score s[4] = {{90, 100, 1, 10}, {10, 30, 1, 10}, {10, 50, 0, 10}, {50, 50, 1, 50}};
    (void)block;
    return e < 4 ? s[e] : (struct toy_score){50, 50, 1, 50};
}

static void test_reap_sums(void) {
    static const char *const c[][2] = {{"a.json --keep 2", "0 1"},
                                       {"b.json --keep 2", "1 2"},
                                       {"a.json b.json --keep 3", "0 1 2"},
                                       {"a.json b.json --keep 2 --criterion norm", "1 3"}};
    struct gguf g;
    toy_write(&toy_plain, "plain.gguf", NULL);
    scores_put("plain.gguf", "a.json", 3, score_half);
    scores_put("plain.gguf", "b.json", 3, score_other_half);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char args[128];
        snprintf(args, sizeof args, "plain.gguf %s -o out.gguf", c[i][0]);
        if (!CHECK(!reap_run(args), "%s", reap_err) || !reap_open(&g, "out.gguf")) return;
        CHECK(!strcmp(kept_text(&g, 1), c[i][1]), "%s: %s", args, kept_text(&g, 1));
        CHECK(key_int(&g, "moe.reap.calibration.tokens") == (i < 2 ? 1000 : 2000), "tokens");
        gguf_close(&g);
    }
}

/* A pruned file pruned again: ids are still those of the first file. */
static void test_reap_twice(void) {
    struct gguf a, b;
    toy_write(&toy_plain, "plain.gguf", NULL);
    scores_put("plain.gguf", "plain.json", 3, score_plain);
    if (!CHECK(!reap_run("plain.gguf plain.json -o once.gguf --keep 5"), "%s", reap_err)) return;
    CHECK(reap_run("once.gguf plain.json -o out.gguf --keep 4") == 1 && strstr(reap_err, "scores of another model"),
          "%s", reap_err);
    scores_put("once.gguf", "once.json", 3, score_plain); /* of its 0 2 3 5 7: means 5 1 5 3 2 */
    if (!CHECK(!reap_run("once.gguf once.json -o out.gguf --keep 3"), "%s", reap_err)) return;
    if (!reap_open(&a, "plain.gguf") || !reap_open(&b, "out.gguf")) return;
    CHECK(!strcmp(kept_text(&b, 1), "0 3 5") && !strcmp(kept_text(&b, 2), "0 1 2"), "%s, %s", kept_text(&b, 1),
          kept_text(&b, 2));
    CHECK(key_is(&b, "general.name", "toy-REAP-3of8") && key_int(&b, "moe.reap.original_expert_count") == 8, "name");
    compare_listed(&a, &b, 3);
    gguf_close(&b);
    if (CHECK(!reap_run("once.gguf once.json -o out.gguf --keep 5"), "%s", reap_err) && reap_open(&b, "out.gguf")) {
        CHECK(!strcmp(kept_text(&b, 1), "0 2 3 5 7") && key_int(&b, "moe.reap.pruned") == 1, "nothing more to prune");
        compare_listed(&a, &b, 3);
        gguf_close(&b);
    }
    gguf_close(&a);
}

/* Parts of a split file give what the whole one gives. */
static void toy_split(const char *file) {
    struct gguf g;
    if (!reap_open(&g, file)) return;
    for (int part = 0; part < 2; part++) {
        struct gguf_writer w = {0};
        char *all = NULL, name[64];
        size_t n = 0;
        const uint8_t *keys = g.images[0].base + 24, *end = (const uint8_t *)g.tensors[0].name.p - 8;
        if (!part) gguf_put(&w, keys, (size_t)(end - keys)), w.n_kv = g.n_kv;
        uint32_t from = part ? g.n_tensors / 2 : 0, to = part ? g.n_tensors : g.n_tensors / 2;
        for (uint32_t i = from; i < to; i++) {
            gguf_printable(g.tensors[i].name, name, sizeof name);
            gguf_add_tensor(&w, name, g.tensors[i].type, g.tensors[i].n_dims, g.tensors[i].ne);
        }
        uint8_t *header = gguf_header(&w, &n);
        sb_put(&all, (char *)header, n);
        for (uint32_t i = from; i < to; i++) {
            sb_put(&all, (const char *)g.tensors[i].data, g.tensors[i].bytes);
            while (arrlenu(all) % 32) arrput(all, 0);
        }
        struct hf h = {.out = NULL};
        snprintf(h.dir, sizeof h.dir, "%s", test_dir());
        snprintf(name, sizeof name, "split-0000%d-of-00002.gguf", part + 1);
        hf_write(&h, name, all, arrlenu(all));
        arrfree(all);
        free(header);
        gguf_writer_free(&w);
    }
    gguf_close(&g);
}

static void align_to_8(struct gguf_writer *w) { gguf_put_u32(w, "general.alignment", 8); }

static void test_reap_split(void) {
    struct toy t = toy_plain;
    struct gguf a, b;
    t.more = align_to_8;
    toy_write(&t, "plain.gguf", NULL);
    if (!CHECK(!reap_run("plain.gguf -o out.gguf --keep 3 --criterion random"), "%s", reap_err)) return;
    if (!reap_open(&a, "plain.gguf") || !reap_open(&b, "out.gguf")) return;
    CHECK(key_int(&b, "general.alignment") == 32, "the alignment of what is written");
    compare_listed(&a, &b, 3);
    gguf_close(&a);
    gguf_close(&b);
    toy_write(&toy_plain, "plain.gguf", NULL);
    scores_put("plain.gguf", "plain.json", 3, score_plain);
    toy_split("plain.gguf");
    static const char *const parts[] = {"split-00001-of-00002.gguf", "split-00002-of-00002.gguf"};
    for (int i = 0; i < 2; i++) {
        char args[128];
        snprintf(args, sizeof args, "%s plain.json -o out.gguf --keep 3", parts[i]);
        if (!CHECK(!reap_run(args), "%s", reap_err) || !reap_open(&a, "plain.gguf")) return;
        if (reap_open(&b, "out.gguf")) compare_listed(&a, &b, 3);
        CHECK(!gguf_find(&b, "split.count"), "a whole file has no split.count");
        gguf_close(&a);
        gguf_close(&b);
        snprintf(args, sizeof args, "%s plain.json -o %s --keep 3", parts[i], parts[1 - i]);
        CHECK(reap_run(args) == 1 && strstr(reap_err, "one of the input files"), "%s", reap_err);
    }
}

/* ------------------------------------------------------------------------------------------------------ whole models
 * */

/* Layers of a model without those for multi-token prediction. */
static int trunk_layers(const struct gguf *g) {
    struct gguf_str arch = {"", 0};
    char key[96];
    int64_t mtp = 0;
    gguf_get_str(g, "general.architecture", &arch);
    snprintf(key, sizeof key, "%.*s.nextn_predict_layers", (int)arch.n, arch.p);
    const struct gguf_kv *kv = gguf_find(g, key);
    if (kv) gguf_elem_int(kv, 0, &mtp);
    snprintf(key, sizeof key, "%.*s.block_count", (int)arch.n, arch.p);
    return (int)(key_int(g, key) - mtp);
}

/* Converts a fixture as test_dir()/file. */
static bool fixture_convert(const char *name, const char *file) {
    char cmd[512], *said = NULL;
    snprintf(cmd, sizeof cmd, CONVERT_BIN " tests/fixtures/%s -o %s/%s --name %s", name, test_dir(), file, name);
    bool ok = CHECK(!run_command(cmd, NULL, &said), "%s: %s", name, sb_cstr(&said));
    arrfree(said);
    return ok;
}

static bool reap_load(struct model *m, const char *file) {
    char path[256], err[ERR_MAX];
    snprintf(path, sizeof path, "%s/%s", test_dir(), file);
    return CHECK(!model_load(m, path, err), "%s", err);
}

/* Every expert its own score; the best ones are spread. */
static struct toy_score score_spread(int block, int e) {
    double v = 1 + (e * 7 + block * 3) % 16;
    return (struct toy_score){100, 100 * v, v, 100};
}

/* The pruned model computes what the whole one does when biases keep the others out: of the choice, and where a softmax
 * goes before it, of that. Catches biases, scales and matrices of other experts than those that stay. */
static void check_reap_model(const char *name, int keep) {
    struct model all, cut;
    char path[256], args[128];
    size_t n_ids = 0;
    if (!fixture_convert(name, "in.gguf")) return;
    snprintf(args, sizeof args, "in.gguf -o out.gguf --keep %d --criterion random --seed 5", keep);
    if (!CHECK(!reap_run(args), "%s: %s", name, reap_err)) return;
    if (!reap_load(&all, "in.gguf") || !reap_load(&cut, "out.gguf")) return;
    const int most = all.layers[0].expert_ids ? all.n_expert_max : keep; /* a layer with a table keeps all */
    CHECK(cut.pruned && cut.n_expert_original == all.n_expert_max && cut.n_expert_max == most, "%s: the model", name);
    for (int il = 0; il < all.n_layer; il++) {
        struct layer *layer = &all.layers[il];
        const struct layer *less = &cut.layers[il];
        const float **const bias[2] = {&layer->router.bias, &layer->router_bias};
        if (layer->expert_ids) CHECK(less->n_expert == layer->n_expert, "%s: layer %d has lost experts", name, il);
        if (!layer->n_expert || layer->expert_ids || !CHECK(less->retained, "%s: layer %d", name, il)) continue;
        for (int i = 0; i < 2; i++) {
            if (i ? !*bias[i] : all.gating == GATING_SIGMOID && layer->router_bias) continue;
            float *b = xmalloc((size_t)layer_routes(layer) * sizeof *b);
            for (int e = 0, k = 0; e < layer_routes(layer); e++) {
                const bool stored = e < layer->n_expert, kept = k < less->n_expert && less->retained[k] == e;
                b[e] = stored && !kept ? -1e4f : *bias[i] ? (*bias[i])[e] : 0.0f;
                k += kept;
            }
            *bias[i] = b;
            arrput(all.owned, b);
        }
    }
    snprintf(path, sizeof path, "tests/fixtures/%s/ids.i32", name);
    int32_t *ids = slurp(path, &n_ids);
    const int n = (int)(n_ids / 4);
    const size_t count = (size_t)n * (size_t)all.n_vocab;
    float *x = all_logits(&all, &kernels_ref, KV_F32, 1, ids, n),
          *z = all_logits(&cut, &kernels_ref, KV_F32, 1, ids, n);
    CHECK(!memcmp(x, z, count * sizeof *x), "%s: other logits: NMSE %.3g", name, nmse(z, x, count));
    free(x), free(z);
    arrfree(ids);
    model_free(&all);
    model_free(&cut);
}

static void test_reap_model(void) {
    struct model m;
    static const struct {
        const char *name;
        int keep;
    } c[] = {{"deepseek_v3_plain", 2},
             {"gpt_oss", 5},
             {"gpt_oss_bf16", 3},
             {"minimax_m2_fp8", 3},
             {"minimax_m3", 5},
             {"minimax_m3_nvfp4", 4},
             {"mixtral", 3},
             {"olmoe", 3},
             {"olmoe_norm", 5},
             {"qwen2_moe", 3},
             {"ernie4_5_moe", 4},
             {"ernie4_5_moe_each", 3},
             {"step3p5", 3},
             {"step3p7", 4},
             {"laguna", 3},
             {"laguna_element", 4},
             {"mimo_v2_flash", 3},
             {"mimo_v2_flash_fp8", 4},
             {"deepseek_v32_fp8", 4},
             {"glm_moe_dsa_types", 3},
             {"deepseek_v4", 5},
             {"deepseek_v4_pro", 3},
             {"deepseek_v41", 4},
             {"dots1", 5},
             {"dots1_nvfp4", 8},
             {"kimi_k3", 5},
             {"kimi_k3_nvfp4", 4},
             {"dots3_note", 4},
             {"dots3_note_nvfp4", 3},
             {"hy_v4", 4},
             {"hy_v4_nvfp4", 3},
             {"hunyuan_v1_moe", 4},
             {"hunyuan_v1_moe_nvfp4", 3},
             {"qwen3_vl_moe", 5},
             {"qwen3_vl_moe_nvfp4", 4},
             {"mellum", 4},
             {"mellum_nvfp4", 4},
             {"deepseek_v2_nvfp4", 4},
             {"deepseek_moe", 4},
             {"deepseek_moe_nvfp4", 3},
             {"bailing_moe", 4},
             {"bailing_moe_nvfp4", 4},
             {"solar_open", 5},
             {"solar_open_nvfp4", 4},
             {"granitemoe_swa", 4},
             {"granitemoe_swa_nvfp4", 3},
             {"granitemoe", 4},
             {"lfm2_moe", 5},
             {"arctic", 5},
             {"longcat_flash", 5},
             {"longcat_flash_nvfp4", 4},
             {"maple", 5},
             {"smallthinker", 5},
             {"llama4", 4},
             {"llama4_nvfp4", 3},
             {"granitemoeshared_nvfp4", 3},
             {"granitemoehybrid", 4},
             {"granitemoehybrid_nvfp4", 3},
             {"sarvam_moe_nvfp4", 4},
             {"exaone_moe", 5},
             {"afmoe", 5},
             {"afmoe_nvfp4", 4},
             {"cohere2_moe", 5},
             {"cohere2_moe_nvfp4", 4},
             {"dbrx", 5},
             {"phimoe", 5},
             {"kimi_linear", 5},
             {"kimi_linear_nvfp4", 4},
             {"bailing_hybrid_ct", 4},
             {"nemotron_h", 6},
             {"nemotron_h_nvfp4", 4},
             {"inkling2_loop", 4},
             {"inkling2_nvfp4", 3},
             {"gemma4", 4},
             {"gemma4_nvfp4", 3},
             {"glm5_next", 5},
             {"glm5_next_nvfp4", 4},
             {"qwen4_exp", 3},
             {"qwen4_exp_nvfp4", 4}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) check_reap_model(c[i].name, c[i].keep);
    if (!fixture_convert("deepseek_v3_plain", "in.gguf")) return;
    scores_put("in.gguf", "in.json", 2, score_spread); /* of 4 experts in block 1: 4 11 2 9 */
    if (!CHECK(!reap_run("in.gguf in.json -o out.gguf --keep 2"), "%s", reap_err) || !reap_load(&m, "out.gguf")) return;
    const struct layer *layer = &m.layers[1];
    CHECK(layer->n_expert == 2 && layer->retained && layer->retained[0] == 1 && layer->retained[1] == 3,
          "the list of the layer");
    CHECK(m.n_mtp == 1 && !strcmp(m.name, "deepseek_v3_plain-REAP-2of4"), "%s", m.name);
    model_free(&m);
}

/* Files of moe-convert: NVFP4 with scales, BF16, groups, pruned before with other counts in every layer. */
static void test_reap_fixtures(void) {
    static const struct {
        const char *name, *options;
        int experts[5];
    } c[] = {{"qwen3moe_nvfp4", "--keep 5", {5, 5}},
             {"qwen3moe_ct", "--ratio 0.5", {2, 2}},
             {"qwen3moe", "--keep 6", {0}},
             {"deepseek_v3_reap", "--keep 8", {0, 8, 8}},
             {"qwen3moe_reap", "--keep 5", {5, 5, 5}},
             {"qwen3_5_moe_nvfp4", "--keep 4 --mtp drop", {4, 4, 4}},
             {"qwen3_next", "--keep 3 --mtp drop", {3, 3, 3, 3}},
             {"gpt_oss", "--keep 5", {5, 5, 5}},
             {"gpt_oss_bf16", "--keep 3", {3, 3}},
             {"minimax_m2_fp8", "--keep 3", {3, 3}},
             {"minimax_m3", "--keep 6", {0, 6, 6}},
             {"minimax_m3_nvfp4", "--keep 4", {0, 4, 4}},
             {"mixtral_nvfp4", "--keep 5", {5, 5, 5}},
             {"olmoe_norm", "--keep 4", {4, 4}},
             {"qwen2_moe_dense", "--keep 4", {0}},
             {"ernie4_5_moe", "--keep 4", {0, 4, 0, 4}},
             {"step3p5", "--keep 3", {0, 3, 3}},
             {"step3p7", "--keep 4", {0, 4}},
             {"step3p7", "--keep 3 --mtp drop", {0, 3}},
             {"laguna_element", "--keep 5", {0, 5, 5}},
             {"mimo_v2_flash_fp8", "--keep 4", {0, 4, 4}},
             {"mimo_v2_flash_fp8", "--keep 3 --mtp drop", {0, 3, 3}},
             {"deepseek_v32_fp8", "--keep 4 --mtp drop", {0, 4}},
             {"glm_moe_dsa_types", "--keep 4 --mtp drop", {0, 4, 4, 4, 4}},
             {"deepseek_v4", "--keep 4 --mtp drop", {8, 8, 8, 4, 4}},
             {"deepseek_v4_pro", "--keep 4", {6, 4, 4, 4, 4}},
             {"kimi_linear_nvfp4", "--keep 6", {0, 6, 6}},
             {"bailing_hybrid_ct", "--keep 4", {0, 4, 4}},
             {"nemotron_h_nvfp4", "--keep 4", {0, 4, 0, 0, 4}},
             {"glm5_next", "--keep 5 --mtp drop", {0, 0, 0, 5}},
             {"glm5_next_nvfp4", "--keep 4", {0, 4, 4}},
             {"qwen4_exp", "--keep 3 --mtp drop", {3, 3, 3}},
             {"qwen4_exp_nvfp4", "--keep 4 --mtp drop", {4, 4}},
             {"qwen3moe_reap", "--keep 5 --per-layer", {0}}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct model m;
        struct gguf a;
        char args[128];
        if (!fixture_convert(c[i].name, "in.gguf") || !reap_open(&a, "in.gguf")) return;
        scores_put("in.gguf", "in.json", trunk_layers(&a), score_spread);
        snprintf(args, sizeof args, "in.gguf in.json -o out.gguf %s", c[i].options);
        if (!CHECK(!reap_run(args), "%s: %s", c[i].name, reap_err) || !reap_load(&m, "out.gguf")) continue;
        static int ids[16][TOY_EXPERTS];
        int n[16] = {0};
        for (int l = 0; l < m.n_layer; l++) {
            const struct layer *layer = &m.layers[l];
            CHECK(!c[i].experts[m.n_layer - 1] || layer->n_expert == c[i].experts[l], "%s: layer %d has %d experts",
                  c[i].name, l, layer->n_expert);
            if (!layer->n_expert || layer->expert_ids) continue;
            if (!CHECK(layer->retained, "%s: layer %d has no list", c[i].name, l)) continue;
            char key[64];
            snprintf(key, sizeof key, "moe.reap.kept.%d", l);
            const struct gguf_kv *was = gguf_find(&a, key); /* ids in the source, by those of the original */
            for (int e = 0; e < layer->n_expert; e++) {
                int64_t v = e, k = layer->retained[e];
                for (uint64_t s = 0; was && s < was->n; s++)
                    if (gguf_elem_int(was, s, &v) && v == layer->retained[e]) k = (int64_t)s;
                ids[l][n[l]++] = (int)k;
            }
        }
        const bool drop = strstr(c[i].options, "drop");
        for (int l = m.n_layer; l < 16; l++) n[l] = drop ? -1 : 0; /* layers for multi-token prediction */
        compare_cut(&a, &m.gguf, (const int(*)[TOY_EXPERTS])ids, n, drop ? 16 : m.n_layer);
        const struct gguf_kv *sections = gguf_find(&m.gguf, "qwen35moe.rope.dimension_sections");
        CHECK(!sections || sections->n == 4, "%s: %d sections", c[i].name, (int)sections->n);
        gguf_close(&a);
        model_free(&m);
    }
}

static void test_reap_mtp(void) {
    struct model m;
    struct gguf a;
    if (!fixture_convert("deepseek_v3_plain", "in.gguf") || !reap_open(&a, "in.gguf")) return;
    scores_put("in.gguf", "in.json", 2, score_spread);
    static const int ids[3][TOY_EXPERTS] = {{0}, {0, 1, 3}, {0, 1, 3}};
    for (int drop = 0; drop < 2; drop++) {
        int n[3] = {0, 3, drop ? -1 : 3};
        char args[128];
        snprintf(args, sizeof args, "in.gguf in.json -o out.gguf --keep 3%s", drop ? " --mtp drop" : "");
        if (!CHECK(!reap_run(args), "%s", reap_err) || !reap_load(&m, "out.gguf")) return;
        CHECK(m.n_layer == 2 && m.n_mtp == !drop, "%d layers, %d for prediction", m.n_layer, m.n_mtp);
        CHECK(key_int(&m.gguf, "deepseek2.block_count") == 3 - drop, "block_count");
        CHECK(key_int(&m.gguf, "deepseek2.nextn_predict_layers") == 1 - drop, "nextn_predict_layers");
        CHECK(!strcmp(kept_text(&m.gguf, 2), drop ? "-" : "0 1 3"), "%s", kept_text(&m.gguf, 2));
        compare_cut(&a, &m.gguf, ids, n, 3);
        model_free(&m);
    }
    gguf_close(&a);
    struct toy t = toy_groups; /* a file whose MTP layer has other experts than the last */
    t.n[3] = 16;
    toy_write(&t, "mtp.gguf", NULL);
    CHECK(reap_run("mtp.gguf -o out.gguf --keep 6 --criterion random") == 1 && strstr(reap_err, "--mtp drop"), "%s",
          reap_err);
    if (!CHECK(!reap_run("mtp.gguf -o out.gguf --keep 6 --criterion random --mtp drop"), "%s", reap_err)) return;
    struct gguf b;
    if (!reap_open(&b, "out.gguf")) return;
    const struct gguf_kv *per = gguf_find(&b, "toy.per_layer");
    CHECK(per && per->n == 3 && key_int(&b, "toy.expert_count") == 6, "a list with one value for each layer");
    gguf_close(&b);
}

/* toy_plain with an MTP layer. */
static const struct toy toy_mtp = {
    .blocks = 4, .mtp = 1, .top_k = 2, .type = GGUF_NVFP4, .n = {0, 8, 8, 8}, .name = "toy"};

/* Those of score_plain; in the MTP layer means of 1 to 8, more tokens for lower ids, and one huge output. */
static struct toy_score score_mtp(int block, int e) {
    const int64_t tokens = 200 - 10 * e;
    if (block < 3) return score_plain(block, e);
    return (struct toy_score){tokens, (double)tokens * (e + 1), e ? 1 : 1e6, 100};
}

static struct toy_score score_mtp_unseen(int block, int e) {
    return block < 3 ? score_plain(block, e) : (struct toy_score){0, 0, 0, 0};
}

/* Writes the model as mtp.gguf, with n experts in its MTP layer, and files of scores: with that layer, without
 * it, with null in its place, without a token in it. */
static void toy_mtp_write(int n) {
    struct toy t = toy_mtp;
    struct gguf g;
    t.n[3] = n;
    toy_write(&t, "mtp.gguf", NULL);
    scores_put_mtp("mtp.gguf", "mtp.json", 3, 1, score_mtp);
    scores_put("mtp.gguf", "trunk.json", 3, score_mtp);
    scores_put_mtp("mtp.gguf", "unseen.json", 3, 1, score_mtp_unseen);
    if (!reap_open(&g, "mtp.gguf")) return;
    json_t *j = scores_make(&g, 3, 0, score_mtp);
    json_array_append_new(json_object_get(j, "layers"), json_null());
    scores_write(j, "null.json");
    json_decref(j);
    gguf_close(&g);
}

static const char no_scores[] =
    "moe-reap: layer 3, for multi-token prediction, has no scores: it retains the same experts "
    "as the last layer before it\n";

/* An MTP layer is pruned by its own scores. Where no file has them it retains the ids of the layer before. */
static void test_reap_mtp_scores(void) {
    static const struct {
        const char *options, *kept[3]; /* of blocks 1 to 3 */
        bool without;                  /* the line that says so is there */
    } c[] = {{"mtp.json --keep 4", {"0 2 5 7", "0 1 2 3", "4 5 6 7"}, false},
             {"trunk.json --keep 4", {"0 2 5 7", "0 1 2 3", "0 1 2 3"}, true},
             {"null.json --keep 4", {"0 2 5 7", "0 1 2 3", "0 1 2 3"}, true},
             {"unseen.json --keep 4", {"0 2 5 7", "0 1 2 3", "0 1 2 3"}, true},
             {"trunk.json mtp.json --keep 4", {"0 2 5 7", "0 1 2 3", "4 5 6 7"}, false},
             {"mtp.json null.json --ratio 0.5", {"0 2 5 7", "0 1 2 3", "4 5 6 7"}, false},
             {"mtp.json --ratio 0.7", {"0 2 5", "0 1 2", "5 6 7"}, false},
             {"mtp.json --keep 3 --criterion frequency", {"1 5 7", "5 6 7", "0 1 2"}, false},
             {"mtp.json --keep 2 --protect-outliers", {"0 3", "0 1", "6 7"}, false},
             {"mtp.json --keep 4 --per-layer", {"0 2 3 5 7", "0 1", "3 4 5 6 7"}, false},
             {"trunk.json --keep 4 --per-layer", {"0 2 3 4 5 7", "0 1", "0 1"}, true},
             {"mtp.json --counts counts", {"0 2 5", "0 1 2 3 4 5 6", "6 7"}, false},
             {"trunk.json --counts trunk", {"0 2 5", "0 1 2 3 4 5 6", "0 1 2 3 4 5 6"}, true},
             {"mtp.json --keep 4 --mtp drop", {"0 2 5 7", "0 1 2 3", "-"}, false},
             {"trunk.json --keep 4 --mtp drop", {"0 2 5 7", "0 1 2 3", "-"}, false}};
    toy_mtp_write(8);
    shell("printf '1 3\n2 7\n' >trunk; printf '1 3\n2 7\n3 2\n' >counts");
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char args[128];
        struct gguf a, b;
        const bool drop = strstr(c[i].options, "drop");
        snprintf(args, sizeof args, "mtp.gguf %s -o out.gguf", c[i].options);
        if (!CHECK(!reap_run(args), "%s: %s", args, reap_err) || !reap_open(&a, "mtp.gguf")) continue;
        CHECK(!strncmp(reap_err, no_scores, strlen(no_scores)) == c[i].without, "%s: %s", args, reap_err);
        CHECK(strstr(reap_out, drop           ? "(multi-token prediction: removed)\n"
                               : c[i].without ? "(multi-token prediction: as the last layer before)\n"
                                              : "(multi-token prediction) "),
              "%s: %s", args, reap_out);
        if (reap_open(&b, "out.gguf")) {
            for (int k = 0; k < 3; k++)
                CHECK(!strcmp(kept_text(&b, 1 + k), c[i].kept[k]), "%s: block %d keeps %s, expected %s", args, 1 + k,
                      kept_text(&b, 1 + k), c[i].kept[k]);
            if (!drop) compare_listed(&a, &b, 4);
            CHECK(key_int(&b, "toy.block_count") == 4 - drop, "%s: block_count", args);
            /* of the trunk 13 experts of 16 are covered, of the MTP layer all 8 */
            const double covered = key_num(&b, "moe.reap.calibration.coverage");
            CHECK(key_int(&b, "moe.reap.calibration.tokens") > 1000 ||
                      fabs(covered - (drop || c[i].without ? 13.0 / 16 : 21.0 / 24)) < 1e-6,
                  "%s: coverage %g", args, covered);
            gguf_close(&b);
        }
        gguf_close(&a);
    }
    CHECK(!reap_run("mtp.gguf -o out.gguf --keep 4 --criterion random") && !strstr(reap_err, "has no scores"), "%s",
          reap_err);
}

/* An MTP layer with more experts than the layers before; without scores it cannot do as they do. */
static void test_reap_mtp_counts(void) {
    static const struct {
        const char *options, *kept;
        int counts[4], largest; /* counts: as expert_count_per_layer has them */
    } c[] = {{"--keep 6", "10 11 12 13 14 15", {0}, 6},
             {"--keep 12", "4 5 6 7 8 9 10 11 12 13 14 15", {0, 8, 8, 12}, 12},
             {"--ratio 0.5", "8 9 10 11 12 13 14 15", {0, 4, 4, 8}, 8},
             {"--keep 6 --mtp drop", "-", {0}, 6}};
    toy_mtp_write(16);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char args[128];
        struct gguf a, b;
        snprintf(args, sizeof args, "mtp.gguf mtp.json -o out.gguf %s", c[i].options);
        if (!CHECK(!reap_run(args), "%s: %s", args, reap_err) || !reap_open(&a, "mtp.gguf")) continue;
        if (reap_open(&b, "out.gguf")) {
            const struct gguf_kv *per = gguf_find(&b, "toy.expert_count_per_layer");
            CHECK(!strcmp(kept_text(&b, 3), c[i].kept), "%s: %s", args, kept_text(&b, 3));
            CHECK(key_int(&b, "toy.expert_count") == c[i].largest, "%s: expert_count", args);
            CHECK(!per == !c[i].counts[3] && (!per || (per->n == 4 && !memcmp(per->data, c[i].counts, 16))),
                  "%s: expert_count_per_layer", args);
            if (c[i].kept[0] != '-') compare_listed(&a, &b, 4);
            gguf_close(&b);
        }
        gguf_close(&a);
    }
    CHECK(!reap_run("mtp.gguf trunk.json -o out.gguf --keep 6 --mtp drop"), "%s", reap_err);
    CHECK(reap_run("mtp.gguf trunk.json -o no.gguf --keep 6") == 1 &&
              strstr(reap_err, "layer 3, for multi-token prediction, has 16 experts without scores, and the last layer "
                               "before it 8: --mtp drop removes it"),
          "%s", reap_err);
}

/* Rises with the ids in odd blocks and falls in even ones. */
static struct toy_score score_alternate(int block, int e) {
    const double v = block % 2 ? 1 + e : 50 - e;
    return (struct toy_score){100, 100 * v, v, 100};
}

/* Models that moe-convert writes, with the scores of all layers: moe loads them, and the MTP layer has lost
 * others than the last layer before it. */
static void test_reap_mtp_fixtures(void) {
    static const struct {
        const char *name;
        int keep;
    } c[] = {{"deepseek_v3_plain", 3},
             {"hy_v3", 5},
             {"glm4_moe_air", 6},
             {"glm4_moe_lite", 5},
             {"qwen3_5_moe", 3},
             {"qwen3_5_moe_nvfp4", 4},
             {"qwen3_next", 3},
             {"deepseek_v32_fp8", 4},
             {"glm_moe_dsa_types", 4},
             {"deepseek_v4", 5},
             {"nemotron_h", 6},
             {"glm5_next", 5},
             {"hy_v4", 4},
             {"qwen4_exp", 3},
             {"qwen4_exp_nvfp4", 4}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct model m;
        struct gguf a;
        char args[128];
        if (!fixture_convert(c[i].name, "in.gguf") || !reap_open(&a, "in.gguf")) return;
        const int trunk = trunk_layers(&a);
        scores_put_mtp("in.gguf", "in.json", trunk, 1, score_alternate);
        snprintf(args, sizeof args, "in.gguf in.json -o out.gguf --keep %d", c[i].keep);
        if (CHECK(!reap_run(args), "%s: %s", c[i].name, reap_err) && reap_load(&m, "out.gguf")) {
            const struct layer *layer = &m.layers[m.n_layer];
            CHECK(m.n_mtp == 1 && layer->n_expert == c[i].keep, "%s: %d experts", c[i].name, layer->n_expert);
            CHECK(strcmp(kept_text(&m.gguf, trunk), kept_text(&m.gguf, trunk - 1)) &&
                      strlen(kept_text(&m.gguf, trunk)) == (size_t)(2 * c[i].keep - 1),
                  "%s: %s", c[i].name, kept_text(&m.gguf, trunk));
            compare_listed(&a, &m.gguf, trunk + 1);
            model_free(&m);
        }
        gguf_close(&a);
    }
}

/* With the scores of a text the demo loses little at half of its experts; with chance it is lost. */
static void test_reap_calibrated(void) {
    enum { HEAD = SANITIZED ? 6000 : 20000, TAIL = 8000 /* bytes */, WINDOW = 512 /* tokens */ };
    static const char *const names[] = {"build/demo.gguf", "cut.gguf", "chance.gguf"};
    double ppl[3] = {0};
    char *text = NULL, err[ERR_MAX], path[256];
    int32_t *ids = NULL;
    struct hf h = {.out = NULL};
    if (!CHECK(!read_file("prompts/haystack.txt", &text, err), "%s", err)) return;
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    hf_write(&h, "head.txt", text, HEAD);
    shell("$OLDPWD/" MOE_BIN " -m $OLDPWD/build/demo.gguf --calibrate head.txt -o s.json -c 512 </dev/null");
    if (!CHECK(!reap_run("$d/build/demo.gguf s.json -o cut.gguf --keep 8"), "%s", reap_err)) return;
    CHECK(strstr(reap_out, "tokens in 1 file\n"), "%s", reap_out);
    if (!CHECK(!reap_run("$d/build/demo.gguf s.json -o chance.gguf --keep 8 --criterion random"), "%s", reap_err))
        return;
    for (int i = 0; i < 3; i++) {
        struct model m;
        snprintf(path, sizeof path, i ? "%s/%s" : "%.0s%s", test_dir(), names[i]);
        if (!CHECK(!model_load(&m, path, err), "%s", err)) return;
        arrsetlen(ids, 0);
        tokenize(m.vocab, text + arrlen(text) - TAIL, TAIL, NULL, 0, &ids);
        if (CHECK(arrlen(ids) >= WINDOW, "only %td tokens", arrlen(ids)))
            ppl[i] = perplexity(&m, kernels_choose(), KV_BF16, ids, WINDOW * (SANITIZED ? 1 : 2), WINDOW);
        model_free(&m);
    }
    CHECK(ppl[0] > 1 && ppl[1] < 1.6 * ppl[0] && ppl[2] > 2 * ppl[1], "perplexity %.3f, pruned %.3f, by chance %.3f",
          ppl[0], ppl[1], ppl[2]);
    shell("$OLDPWD/" MOE_BIN
          " -m $OLDPWD/build/fixtures/longcat_flash.gguf --calibrate head.txt -o z.json -c 512 </dev/null");
    CHECK(!reap_run("$d/build/fixtures/longcat_flash.gguf z.json -o zero.gguf --keep 5"), "%s", reap_err);
    json_t *j = json_in("s.json"); /* as an interrupted run leaves it */
    json_object_set_new(json_array_get(json_object_get(j, "sources"), 0), "done", json_false());
    scores_write(j, "s.json");
    json_decref(j);
    CHECK(!reap_run("$d/build/demo.gguf s.json --dry-run --keep 8") && strstr(reap_out, "not finished"), "%s",
          reap_out);
    arrfree(ids);
    arrfree(text);
}

/* Other counts in every layer: the ranks divide them as one rank has them. */
static void test_reap_ranks(void) {
    static const char counts[] = "1 4\n2 16\n3 8\n4 12\n5 8";
    struct hf h = {.out = NULL};
    char cmd[512], *one = NULL, *two = NULL, *said = NULL;
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    hf_write(&h, "counts", counts, strlen(counts));
    snprintf(cmd, sizeof cmd, REAP_BIN " build/demo.gguf -o %s/out.gguf --counts %s/counts --criterion random",
             test_dir(), test_dir());
    if (!CHECK(!run_command(cmd, NULL, &said), "%s", sb_cstr(&said))) return;
    for (int tp = 1; tp <= 2; tp++) {
        snprintf(cmd, sizeof cmd,
                 MOE_BIN " -m %s/out.gguf --cpu --tp %d --greedy -n 12 -p 'What is 7 squared?' </dev/null", test_dir(),
                 tp);
        arrsetlen(said, 0);
        CHECK(!run_command(cmd, tp == 1 ? &one : &two, &said), "%s: %s", cmd, sb_cstr(&said));
    }
    CHECK(arrlen(one) > 1 && !strcmp(sb_cstr(&one), sb_cstr(&two)), "'%s' and '%s'", one, two);
    arrfree(one), arrfree(two), arrfree(said);
}

/* ---------------------------------------------------------------------------------------------------------- refusals
 * */

/* Nothing but what was there: no output, no temporary file. */
static void nothing_left(const char *what) {
    char cmd[128], *listing = NULL;
    snprintf(cmd, sizeof cmd, "ls -d %s/no* %s/*tmp-* 2>/dev/null", test_dir(), test_dir());
    run_command(cmd, &listing, NULL);
    CHECK(!arrlen(listing), "%s: left behind: %s", what, sb_cstr(&listing));
    arrfree(listing);
}

static void test_reap_usage(void) {
    static const struct {
        const char *args, *message;
    } c[] = {{"", "no model given"},
             {"plain.gguf plain.json --keep 4", "give -o OUT or --dry-run"},
             {"plain.gguf plain.json -o no.gguf", "give one of --keep, --ratio, --budget and --counts"},
             {"plain.gguf plain.json -o no.gguf --keep 4 --ratio 0.5", "cannot be combined"},
             {"plain.gguf -o no.gguf --keep 4", "no scores given"},
             {"plain.gguf -o no.gguf --keep 4 --criterion random --protect-outliers", "needs scores"},
             {"plain.gguf plain.json -o no.gguf --keep 0", "expected a whole number from 1"},
             {"plain.gguf plain.json -o no.gguf --keep 4x", "expected a whole number from 1"},
             {"plain.gguf plain.json -o no.gguf --keep 4.5", "expected a whole number from 1"},
             {"plain.gguf plain.json -o no.gguf --ratio 1", "would leave no expert"},
             {"plain.gguf plain.json -o no.gguf --ratio -0.1", "expected a number from 0 to 1"},
             {"plain.gguf plain.json -o no.gguf --ratio nan", "expected a number from 0 to 1"},
             {"plain.gguf plain.json -o no.gguf --budget", "--budget needs a value"},
             {"plain.gguf plain.json -o no.gguf --keep 4 --floor 2", "--floor works only with --per-layer"},
             {"plain.gguf plain.json -o no.gguf --counts c --per-layer", "--per-layer works only with"},
             {"plain.gguf plain.json -o no.gguf --keep 4 --seed 1", "--seed works only with"},
             {"plain.gguf plain.json -o no.gguf --keep 4 --criterion best", "expected reap|frequency"},
             {"plain.gguf plain.json -o no.gguf --keep 4 --mtp keep", "expected prune|drop"},
             {"plain.gguf plain.json -o no.gguf --keep 4 --quick", "unknown option '--quick'"},
             {"plain.gguf plain.json -o no.gguf '-o --keep' 4", "unknown option"},
             {"plain.gguf plain.json -o '' --keep 4", "--output needs the name of a file"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        int rc = reap_run(c[i].args);
        CHECK(rc == 2 && strstr(reap_err, c[i].message) && !*reap_out, "%s: exit %d: %s", c[i].args, rc, reap_err);
    }
    CHECK(!reap_run("--help") && strstr(reap_out, "--per-layer"), "%s", reap_out);
    CHECK(!reap_run("--version") && !strcmp(reap_out, "moe-reap 0.1.0\n"), "%s", reap_out);
    nothing_left("usage");
}

/* Exit 1 with one line that says what is wrong. */
static void reap_refused(const char *args, const char *message) {
    int rc = reap_run(args);
    const char *nl = strchr(reap_err, '\n');
    CHECK(rc == 1 && strstr(reap_err, message) && nl && !nl[1] && !*reap_out, "%s: exit %d: %s (expected: %s)", args,
          rc, reap_err, message);
}

static void test_reap_counts(void) {
    static const struct {
        const char *text, *message;
    } c[] = {{"1 4\n2", "line 2: expected LAYER COUNT, found '2'"},
             {"1 4\n2 4 5\n", "line 2: expected LAYER COUNT, found '2 4 5'"},
             {"1 4\n2 4x\n", "line 2: expected LAYER COUNT"},
             {"1 4\n", "layer 2 is missing"},
             {"1 4\n2 4\n1 4\n", "line 3: layer 1 appears twice"},
             {"0 4\n", "line 1: layer 0 has no routed experts"},
             {"99999999999 4\n", "line 1: "},
             {"-1 4\n", "layer -1 has no routed experts"},
             {"1 9\n", "layer 1: 9 experts are more than the 8"},
             {"1 1\n", "layer 1: 1 expert is too few: 2 per token need 2"}};
    struct hf h = {.out = NULL};
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    toy_write(&toy_plain, "plain.gguf", NULL);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        hf_write(&h, "counts", c[i].text, strlen(c[i].text));
        reap_refused("plain.gguf -o no.gguf --criterion random --counts counts", c[i].message);
    }
    reap_refused("plain.gguf -o no.gguf --criterion random --counts nowhere", "cannot open 'nowhere'");
    toy_mtp_write(8);
    shell("printf '1 4\\n2 4\\n' >trunk; printf '1 4\\n2 4\\n3 4\\n' >counts");
    reap_refused("mtp.gguf mtp.json -o no.gguf --counts trunk", "'trunk': layer 3 is missing");
    reap_refused("mtp.gguf trunk.json -o no.gguf --counts counts",
                 "line 3: layer 3 has no scores and keeps the experts of the last layer before it");
    reap_refused("mtp.gguf mtp.json -o no.gguf --mtp drop --counts counts", "line 3: layer 3 is removed by --mtp drop");
    nothing_left("counts");
}

static void test_reap_amounts(void) {
    toy_write(&toy_plain, "plain.gguf", NULL);
    toy_write(&toy_groups, "groups.gguf", NULL);
    scores_put("plain.gguf", "plain.json", 3, score_plain);
    scores_put("groups.gguf", "groups.json", 3, score_groups);
    reap_refused("plain.gguf plain.json -o no.gguf --keep 1", "1 expert is too few: 2 per token need 2");
    reap_refused("plain.gguf plain.json -o no.gguf --keep 9", "9 experts are more than the 8 of the model");
    reap_refused("plain.gguf plain.json -o no.gguf --ratio 0.9", "1 expert is too few");
    reap_refused("groups.gguf groups.json -o no.gguf --keep 5",
                 "5 experts are not a multiple of the 2 groups; 4 and 6 are");
    reap_refused("groups.gguf groups.json -o no.gguf --keep 2",
                 "2 experts are too few: 2 per token from 1 of 2 groups need 4");
    reap_refused("plain.gguf plain.json -o no.gguf --keep 4 --per-layer --floor 5", "--floor 5: ");
    reap_refused("plain.gguf plain.json -o no.gguf --keep 4 --per-layer --floor 1", "--floor: 1 expert is too few");
    nothing_left("amounts");
}

/* One change to a file of scores that is right. `text` replaces the value of the key of layer 1, or (top) of the file.
 * */
static void test_reap_scores(void) {
    static const struct {
        bool top;
        const char *key, *text, *message;
    } c[] = {
        {true, "format", "\"other\"", "expected \"moe-scores\", found \"other\""},
        {true, "format", "7", "expected a string, found 7"},
        {true, "version", "2", "key 'version': expected an integer from 1 to 1, found 2"},
        {true, "model", "{\"routers\":\"0123456789abcdef\"}", "its routers have the hash 0123456789abcdef, those of"},
        {true, "model", "{}", "scores of another model: its routers have the hash (none)"},
        {true, "tokens", "-1", "key 'tokens': expected an integer"},
        {true, "tokens", "0", "layer 1 was never calibrated"},
        {true, "layers", "[null]", "expected scores of 3 layers as in 'plain.gguf', found 1"},
        {true, "layers", "7", "expected a list"},
        {true, "layers", "[null,null,null]", "layer 1 has no scores"},
        {true, "layers", "[{},null,null]", "layer 0 has scores, but no routed experts"},
        {true, "layers", "[null,3,null]", "layer 1: expected an object, found 3"},
        {false, "tokens", "[1,2,3]", "'tokens' has 3 numbers, the model's layer has 8 experts"},
        {false, "tokens", "[1,2,3,4,5,6,7,8.5]", "'tokens': expert 7 has 8.5"},
        {false, "tokens", "[1,2,3,4,5,6,7,-8]", "'tokens': expert 7 has -8"},
        {false, "tokens", "[0,0,0,0,0,0,0,0]", "layer 1 was never calibrated"},
        {false, "weighted_sum", "[1,2,3,4,5,6,7,-1e-9]", "'weighted_sum': expert 7 has -1"},
        {false, "weighted_sum", "[1,2,3,4,5,6,7,\"8\"]", "'weighted_sum': expert 7 has \"8\""},
        {false, "weighted_sum", "null", "'weighted_sum' has 0 numbers"},
        {false, "weighted_sum", "[1e308,2,3,4,5,6,7,8]", "the sums of expert 0 overflow"},
        {false, "weighted_max", "[1,2,3,4,5,6,7,null]", "'weighted_max': expert 7 has null"},
        {false, "norm_sum", "[1,2,3,4,5,6,7]", "'norm_sum' has 7 numbers"}};
    static const char *const texts[] = {"{\"format\":\"moe-scores\",\"version\":1,\"tokens\":NaN}",
                                        "{\"tokens\":1e999}", "[]", "", "{\"tokens\":1,\"tokens\":1}"};
    struct hf h = {.out = NULL};
    struct gguf g;
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    toy_write(&toy_plain, "plain.gguf", NULL);
    if (!reap_open(&g, "plain.gguf")) return;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        json_t *j = scores_make(&g, 3, 0, score_plain), *v = json_loads(c[i].text, JSON_DECODE_ANY, NULL);
        json_t *layer = json_array_get(json_object_get(j, "layers"), 1);
        CHECK(v && !json_object_set_new(c[i].top ? j : layer, c[i].key, v), "%s", c[i].text);
        if (strstr(c[i].text, "1e308")) /* which two files add up to too much */
            json_object_set_new(layer, "norm_sum", json_loads("[1e308,2,3,4,5,6,7,8]", 0, NULL));
        scores_write(j, "bad.json");
        reap_refused("plain.gguf bad.json -o no.gguf --keep 4", c[i].message);
        json_decref(j);
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        hf_write(&h, "bad.json", texts[i], strlen(texts[i]));
        reap_refused("plain.gguf bad.json -o no.gguf --keep 4", "bad.json");
    }
    reap_refused("plain.gguf none.json -o no.gguf --keep 4", "cannot open 'none.json'");
    gguf_close(&g);
    toy_mtp_write(8); /* layers that are not there, and a wrong one for prediction */
    for (int i = 0; i < 3; i++) {
        json_t *j = json_in("mtp.json"), *layers = json_object_get(j, "layers");
        if (i < 2) json_array_append_new(layers, json_null());
        if (i == 0) json_array_remove(layers, 0), json_array_remove(layers, 0), json_array_remove(layers, 0);
        if (i == 2) json_array_remove(json_object_get(json_array_get(layers, 3), "tokens"), 0);
        scores_write(j, "bad.json");
        json_decref(j);
        reap_refused("mtp.gguf bad.json -o no.gguf --keep 4",
                     i == 2   ? "'bad.json': layer 3: 'tokens' has 7 numbers, the model's layer has 8 experts"
                     : i == 1 ? "expected scores of 3 or 4 layers as in 'mtp.gguf', found 5"
                              : "expected scores of 3 or 4 layers as in 'mtp.gguf', found 2");
    }
    nothing_left("scores");
}

static void add_lying(struct toy_file *f) { toy_tensor(f, 2, "ffn_x_exps.weight", GGUF_BF16, 3, 8, 8, 7); }
static void add_quantized(struct toy_file *f) { toy_tensor(f, 1, "ffn_y_exps.scale", GGUF_Q8_0, 1, 32, 1, 1); }
static void add_orphan(struct toy_file *f) { toy_tensor(f, 0, "ffn_up_exps.weight", GGUF_BF16, 3, 8, 8, 8); }
static void kept_short(struct gguf_writer *w) { gguf_put_array(w, "moe.reap.kept.1", GGUF_V_I32, 2, (int[]){1, 2}); }
static void kept_falling(struct gguf_writer *w) {
    gguf_put_array(w, "moe.reap.kept.1", GGUF_V_I32, 8, (int[]){0, 1, 2, 3, 4, 6, 5, 7});
}
static void kept_beyond(struct gguf_writer *w) {
    gguf_put_u32(w, "moe.reap.original_expert_count", 9);
    gguf_put_array(w, "moe.reap.kept.1", GGUF_V_I32, 8, (int[]){0, 1, 2, 3, 4, 5, 6, 9});
}
static void original_less(struct gguf_writer *w) { gguf_put_u32(w, "moe.reap.original_expert_count", 7); }

static void test_reap_headers(void) {
    static const struct {
        void (*more)(struct gguf_writer *w);
        void (*extra)(struct toy_file *f);
        int n, top_k, n_group;
        const char *message;
    } c[] = {{NULL, add_lying, 8, 2, 1, "'blk.2.ffn_x_exps.weight' ends in a dimension of 7, the layer has 8 experts"},
             {NULL, add_quantized, 32, 2, 1, "'blk.1.ffn_y_exps.scale' has the type Q8_0, which cannot be cut"},
             {NULL, add_orphan, 8, 2, 1, "'blk.0.ffn_up_exps.weight' without 'blk.0.ffn_gate_inp.weight'"},
             {NULL, NULL, 8, 9, 1, "routes to 8 experts, expected 9 to 1024"},
             {NULL, NULL, 8, 2, 3, "routes to 8 experts, expected 2 to 1024, a multiple of the 3 groups"},
             {NULL, NULL, 0, 2, 1, "no layer has routed experts that could be pruned"},
             {kept_short, NULL, 8, 2, 1, "'moe.reap.kept.1' lists 2 experts, the layer has 8"},
             {kept_falling, NULL, 8, 2, 1, "'moe.reap.kept.1' is not an ascending list"},
             {kept_beyond, NULL, 8, 2, 1, "'moe.reap.kept.1' is not an ascending list"},
             {original_less, NULL, 8, 2, 1, "a layer has 8 experts, the model had 7 before pruning"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct toy t = {
            .blocks = 3, .top_k = c[i].top_k, .n_group = c[i].n_group, .n_group_used = 1, .type = GGUF_BF16};
        t.n[1] = t.n[2] = c[i].n;
        t.more = c[i].more;
        toy_write(&t, "bad.gguf", c[i].extra);
        reap_refused("bad.gguf -o no.gguf --keep 4 --criterion random", c[i].message);
    }
    reap_refused("bad.gguf -o bad.gguf --ratio 0 --criterion random", "the model had 7");
    reap_refused("none.gguf -o no.gguf --keep 4 --criterion random", "none.gguf");
    nothing_left("headers");
}

/* What was there before stays, and nothing else. */
static void test_reap_target(void) {
    char cmd[1024], *err = NULL;
    toy_write(&toy_plain, "plain.gguf", NULL);
    reap_refused("plain.gguf -o plain.gguf --keep 4 --criterion random", "it is one of the input files");
    reap_refused("plain.gguf -o . --keep 4 --criterion random", "is a directory");
    reap_refused("plain.gguf -o none/no.gguf --keep 4 --criterion random", "No such file");
    CHECK(!reap_run("plain.gguf --keep 4 --criterion random --dry-run -o no.gguf") && strstr(reap_out, "total"), "%s",
          reap_err);
    snprintf(cmd, sizeof cmd,
             "cd %s; d=$OLDPWD; ulimit -f 1; $d/" REAP_BIN " plain.gguf -o no.gguf --keep 4 --criterion random",
             test_dir());
    CHECK(run_command(cmd, NULL, &err) == 1 && strstr(sb_cstr(&err), "File too large"), "%s", sb_cstr(&err));
    arrfree(err);
    nothing_left("target");
}

/* --------------------------------------------------------------------------------------------------- directories */

/* Converts test_dir()/dir as test_dir()/file. */
static bool dir_convert(const char *dir, const char *file) {
    char cmd[512], *said = NULL;
    snprintf(cmd, sizeof cmd, "cd %s && $OLDPWD/" CONVERT_BIN " %s -o %s --name x", test_dir(), dir, file);
    bool ok = CHECK(!run_command(cmd, NULL, &said), "%s: %s", dir, sb_cstr(&said));
    arrfree(said);
    return ok;
}

/* A pruned directory, converted, has the tensors and lists of the converted directory, pruned by the same scores. */
static void compare_ways_by(const char *dir, const char *how) {
    struct gguf a, b;
    char args[256];
    shell("rm -rf cut");
    snprintf(args, sizeof args, "%s in.json -o cut %s", dir, how);
    if (!CHECK(!reap_run(args), "%s: %s", args, reap_err)) return;
    snprintf(args, sizeof args, "in.gguf in.json -o a.gguf %s", how);
    if (!CHECK(!reap_run(args), "%s: %s", args, reap_err) || !dir_convert("cut", "b.gguf")) return;
    if (!reap_open(&a, "a.gguf") || !reap_open(&b, "b.gguf")) return;
    int none[1] = {0};
    compare_cut(&a, &b, NULL, none, 0);
    for (int l = 0; l < 8; l++)
        CHECK(!strcmp(kept_text(&a, l), kept_text(&b, l)), "%s: layer %d: %s and %s", dir, l, kept_text(&a, l),
              kept_text(&b, l));
    CHECK(key_int(&b, "moe.reap.pruned") == 1, "%s: not marked", dir);
    CHECK(key_int(&a, "moe.reap.original_expert_count") == key_int(&b, "moe.reap.original_expert_count"), "%s", dir);
    gguf_close(&a);
    gguf_close(&b);
}

/* Both ways, by the scores of the trunk and by those of all layers, as --calibrate writes them. A count of prediction
 * layers that leaves out those without experts fails. */
static void compare_ways(const char *dir, const char *how) {
    struct gguf in;
    if (!dir_convert(dir, "in.gguf") || !reap_open(&in, "in.gguf")) return;
    const int trunk = trunk_layers(&in);
    int mtp = -1;
    char predict[64];
    do snprintf(predict, sizeof predict, "blk.%d.nextn.eh_proj.weight", trunk + ++mtp);
    while (gguf_find_tensor(&in, predict));
    gguf_close(&in);
    scores_put("in.gguf", "in.json", trunk, score_spread);
    compare_ways_by(dir, how);
    if (!mtp) return;
    scores_put_mtp("in.gguf", "in.json", trunk, mtp, score_alternate);
    compare_ways_by(dir, how);
}

static void fixture_copy(const char *name, const char *dir) {
    char cmd[512];
    snprintf(cmd, sizeof cmd, "rm -rf %s/%s && cp -r tests/fixtures/%s %s/%s && chmod -R u+w %s/%s", test_dir(), dir,
             name, test_dir(), dir, test_dir(), dir);
    CHECK(!run_command(cmd, NULL, NULL), "%s", cmd);
}

static void test_reap_directory(void) {
    static const char *const c[][2] = {{"qwen3moe_nvfp4", "--keep 5"},
                                       {"qwen3moe_nvfp4", "--ratio 0.7"},
                                       {"qwen3moe_ct", "--keep 3"},
                                       {"qwen3moe", "--keep 2 --criterion norm"},
                                       {"deepseek_v3_plain", "--keep 3"},
                                       {"deepseek_v3_plain", "--keep 2 --mtp drop"},
                                       {"deepseek_v3_reap", "--keep 8"},
                                       {"qwen3moe_reap", "--keep 4 --per-layer --floor 4"},
                                       {"qwen3_5_moe", "--keep 3"},
                                       {"qwen3_5_moe", "--keep 2 --mtp drop"},
                                       {"qwen3_5_moe_text", "--keep 2"},
                                       {"qwen3_5_moe_nvfp4", "--keep 4"},
                                       {"qwen3_5_moe_nvfp4", "--ratio 0.5 --mtp drop"},
                                       {"qwen3_next", "--keep 3 --mtp drop"},
                                       {"qwen3_next_fp8", "--keep 4"},
                                       {"glm4_moe", "--keep 5"},
                                       {"glm4_moe_air", "--keep 6"},
                                       {"glm4_moe_lite", "--keep 6 --mtp drop"},
                                       {"hy_v3", "--keep 5"},
                                       {"dots1", "--keep 5"},
                                       {"kimi_k3", "--keep 5"},
                                       {"dots3_note", "--keep 4"},
                                       {"hy_v4", "--keep 4"},
                                       {"hy_v4", "--keep 4 --mtp drop"},
                                       {"hunyuan_v1_moe", "--keep 4"},
                                       {"qwen3_vl_moe", "--keep 5"},
                                       {"qwen3_vl_moe_nvfp4", "--keep 4"},
                                       {"mellum", "--keep 4"},
                                       {"deepseek_v2_nvfp4", "--keep 4"},
                                       {"deepseek_moe", "--keep 4"},
                                       {"bailing_moe", "--keep 4"},
                                       {"bailing_moe_nvfp4", "--keep 4"},
                                       {"solar_open", "--keep 5"},
                                       {"granitemoe_swa", "--keep 4"},
                                       {"granitemoe", "--keep 4"},
                                       {"lfm2_moe", "--keep 5"},
                                       {"lfm2_moe_nvfp4", "--keep 4"},
                                       {"arctic", "--keep 5"},
                                       {"arctic_nvfp4", "--keep 4"},
                                       {"maple", "--keep 5"},
                                       {"maple_nvfp4", "--keep 4"},
                                       {"smallthinker", "--keep 5"},
                                       {"smallthinker_nvfp4", "--keep 4"},
                                       {"llama4", "--keep 4"},
                                       {"llama4_nvfp4", "--keep 3"},
                                       {"granitemoeshared_nvfp4", "--keep 3"},
                                       {"granitemoehybrid", "--keep 4"},
                                       {"granitemoehybrid_nvfp4", "--keep 3"},
                                       {"sarvam_moe_nvfp4", "--keep 4"},
                                       {"exaone_moe", "--keep 5"},
                                       {"afmoe_nvfp4", "--keep 4"},
                                       {"cohere2_moe", "--keep 5"},
                                       {"cohere2_moe_nvfp4", "--keep 4"},
                                       {"phimoe", "--keep 5"},
                                       {"phimoe_nvfp4", "--keep 4"},
                                       {"gpt_oss", "--keep 5"},
                                       {"gpt_oss_bf16", "--keep 3"},
                                       {"minimax_m2_fp8", "--keep 3"},
                                       {"minimax_m3", "--keep 5"},
                                       {"minimax_m3_nvfp4", "--keep 4"},
                                       {"mixtral_nvfp4", "--keep 5"},
                                       {"olmoe_norm", "--keep 4"},
                                       {"qwen2_moe_dense", "--keep 4"},
                                       {"ernie4_5_moe", "--keep 4"},
                                       {"step3p5", "--keep 3"},
                                       {"step3p7", "--keep 4"},
                                       {"step3p7", "--keep 3 --mtp drop"},
                                       {"laguna_element", "--keep 5"},
                                       {"mimo_v2_flash_fp8", "--keep 4"},
                                       {"mimo_v2_flash_fp8", "--keep 3 --mtp drop"},
                                       {"deepseek_v32_fp8", "--keep 4"},
                                       {"glm_moe_dsa", "--keep 5"},
                                       {"glm_moe_dsa_types", "--keep 4 --mtp drop"},
                                       {"deepseek_v4", "--keep 5"},
                                       {"deepseek_v4", "--keep 4 --mtp drop"},
                                       {"deepseek_v4_pro", "--keep 4"},
                                       {"deepseek_v41_nvfp4", "--keep 4"},
                                       {"kimi_linear", "--keep 5"},
                                       {"kimi_linear_nvfp4", "--keep 6"},
                                       {"bailing_hybrid_ct", "--keep 4"},
                                       {"nemotron_h", "--keep 6"},
                                       {"nemotron_h", "--keep 6 --mtp drop"},
                                       {"nemotron_h_nvfp4", "--keep 4"},
                                       {"glm5_next", "--keep 5"},
                                       {"glm5_next", "--keep 5 --mtp drop"},
                                       {"glm5_next_nvfp4", "--keep 4"},
                                       {"qwen4_exp", "--keep 3"},
                                       {"qwen4_exp", "--keep 3 --mtp drop"},
                                       {"qwen4_exp_nvfp4", "--keep 4"},
                                       {"gemma4", "--keep 4"},
                                       {"gemma4_nvfp4", "--keep 3"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        fixture_copy(c[i][0], "dir");
        compare_ways("dir", c[i][1]);
    }
}

/* Returns the list of an object as text: "4,3,-", where - is null. */
static const char *list_text(const json_t *o, const char *key) {
    static char text[256];
    json_t *v;
    size_t i;
    text[0] = 0;
    json_array_foreach(json_object_get(o, key), i, v) {
        snprintf(text + strlen(text), sizeof text - strlen(text), i ? "," : "");
        if (json_is_integer(v)) snprintf(text + strlen(text), 16, "%d", (int)json_integer_value(v));
        else snprintf(text + strlen(text), 16, json_is_null(v) ? "-" : "?");
    }
    return text;
}

/* Layers of a directory that keep different numbers of experts: config.json says so as compressed-tensors 0.20 does, in
 * the quantization_config that is there or in one of its own, and moe-convert and moe-reap read it. Catches a list that
 * is not written, counts layers for multi-token prediction, lacks dense layers, or stays when experts go. */
static void test_reap_directory_uneven(void) {
    static const struct {
        const char *name, *counts, *list, *method; /* method: quant_method of the output */
    } c[] = {{"qwen3moe_nonorm", "0 3\n1 2\n", "3,2", "compressed-tensors"},
             {"qwen3moe_nvfp4", "0 5\n1 3\n", "5,3", "modelopt"},
             {"glm4_moe", "1 5\n2 4\n", "-,5,4", "compressed-tensors"},
             {"laguna_element", "1 3\n2 5\n", "-,3,5", "compressed-tensors"},
             {"minimax_m3_nvfp4", "1 3\n2 5\n", "-,3,5", "modelopt"},
             {"qwen3_5_moe", "0 2\n1 4\n", "2,4", "compressed-tensors"},
             {"gpt_oss", "0 4\n1 8\n2 6\n", "4,8,6", "mxfp4"},
             {"mimo_v2_flash_fp8", "1 6\n2 3\n", "-,6,3", "fp8"},
             {"deepseek_v4", "0 8\n1 8\n2 8\n3 4\n4 6\n", "8,8,8,4,6", "fp8"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/counts", test_dir());
        FILE *f = fopen(path, "w");
        if (!CHECK(f, "%s", path)) return;
        fputs(c[i].counts, f);
        fclose(f);
        fixture_copy(c[i].name, "dir");
        if (!dir_convert("dir", "in.gguf")) continue;
        struct gguf in;
        if (!reap_open(&in, "in.gguf")) continue;
        scores_put("in.gguf", "in.json", trunk_layers(&in), score_spread);
        gguf_close(&in);
        compare_ways_by("dir", "--counts counts");
        json_t *j = json_in("cut/config.json"), *text = json_object_get(j, "text_config");
        json_t *q = json_object_get(text, "quantization_config");
        if (!q) q = json_object_get(j, "quantization_config");
        json_t *s = json_object_get(q, "moe_sparsity_config");
        const char *method = json_string_value(json_object_get(s, "method")),
                   *quant = json_string_value(json_object_get(q, "quant_method"));
        CHECK(method && !strcmp(method, "prune"), "%s: no method", c[i].name);
        CHECK(quant && !strcmp(quant, c[i].method), "%s: quant_method %s", c[i].name, quant ? quant : "(none)");
        CHECK(!strcmp(list_text(s, "num_experts"), c[i].list), "%s: %s", c[i].name, list_text(s, "num_experts"));
        json_decref(j);
    }
}

/* Lists of the source follow what is pruned, in each of their forms; an even result is listed where the source was. */
static void test_reap_directory_lists(void) {
    json_t *j, *s;
    fixture_copy("qwen3moe_nvfp4", "dir");
    shell("printf '0 5\\n1 4\\n' >counts; rm -rf cut cut2 cut3");
    if (!CHECK(!reap_run("dir -o cut --counts counts --criterion random"), "%s", reap_err)) return;
    shell("sed -i 's/\"num_experts\": 5/\"num_experts\": [5,4], \"per_layer_num_experts\": [5,4]/' cut/config.json");
    if (!CHECK(!reap_run("cut -o cut2 --keep 3 --criterion random"), "%s", reap_err)) return;
    j = json_in("cut2/config.json");
    s = json_object_get(json_object_get(j, "quantization_config"), "moe_sparsity_config");
    CHECK(!strcmp(list_text(s, "num_experts"), "3,3"), "%s", list_text(s, "num_experts"));
    CHECK(!strcmp(list_text(j, "num_experts"), "3,3"), "%s", list_text(j, "num_experts"));
    CHECK(!strcmp(list_text(j, "per_layer_num_experts"), "3,3"), "%s", list_text(j, "per_layer_num_experts"));
    json_decref(j);
    dir_convert("cut2", "b.gguf");
    if (!CHECK(!reap_run("dir -o cut3 --keep 3 --criterion random"), "%s", reap_err)) return;
    shell("! grep -q moe_sparsity_config cut3/config.json");
}

/* Lists of all layers end with them when the layers for multi-token prediction go. */
static void test_reap_directory_drop(void) {
    fixture_copy("step3p7", "dir");
    shell("rm -rf cut");
    if (!CHECK(!reap_run("dir -o cut --keep 4 --criterion random --mtp drop"), "%s", reap_err)) return;
    json_t *j = json_in("cut/config.json"), *text = json_object_get(j, "text_config");
    static const char *const lists[] = {"layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits"};
    for (size_t k = 0; k < sizeof lists / sizeof *lists; k++)
        CHECK(json_array_size(json_object_get(text, lists[k])) == 2, "%s", lists[k]);
    CHECK(json_array_size(json_object_get(text, "eos_token_id")) == 2, "eos_token_id");
    CHECK(json_integer_value(json_object_get(text, "num_nextn_predict_layers")) == 0, "num_nextn_predict_layers");
    json_decref(j);
}

/* An MTP layer whose file is absent may go, but not stay. */
static void test_reap_directory_absent(void) {
    fixture_copy("glm4_moe", "dir");
    shell("rm -rf cut dir/mtp.safetensors");
    reap_refused("dir -o cut --keep 5 --criterion random", "mtp.safetensors");
    if (!CHECK(!reap_run("dir -o cut --keep 5 --criterion random --mtp drop"), "%s", reap_err)) return;
    CHECK_HAS(reap_err, "'mtp.safetensors' is missing; it has only tensors for multi-token prediction", "its note");
    shell("! grep -q mtp cut/model.safetensors.index.json");
    dir_convert("cut", "b.gguf");
}

/* An MTP layer in a file that the index lacks. */
static void test_reap_directory_unlisted(void) {
    struct gguf g;
    fixture_copy("glm4_moe", "dir");
    shell("sed -i -z 's/,[^,]*: \"mtp.safetensors\"//g' dir/model.safetensors.index.json");
    compare_ways("dir", "--keep 5");
    if (!dir_convert("cut", "b.gguf") || !reap_open(&g, "b.gguf")) return;
    CHECK(gguf_find_tensor(&g, "blk.3.nextn.eh_proj.weight"), "the prediction layer is lost");
    gguf_close(&g);
}

/* Experts in one tensor, names with a prefix and sizes in text_config. */
static void test_reap_directory_forms(void) {
    for (int form = 0; form < 2; form++) {
        struct hf h;
        hf_begin(&h, "forms");
        if (form) h.prefix = "language_model.";
        if (form) hf_deepseek(&h);
        else hf_qwen3(&h);
        if (form) hf_set(h.config, "{\"n_group\":1,\"topk_group\":1}");
        if (form) h.config = json_pack("{s:s,s:o,s:i}", "model_type", "kimi_k25", "text_config", h.config, "last", 1);
        else hf_fuse(&h, 0);
        h.prefix = NULL;
        if (form) hf_plain(&h, "vision_tower.layers.9.mlp.fc1.weight", "[4,2]", 8, HF_BF16);
        hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
        CHECK(!hf_run(&h, "--dry-run"), "%s", h.err);
        compare_ways("forms", "--keep 3");
        compare_ways("forms", "--keep 3 --mtp drop");
        if (form) shell("grep -q vision_tower.layers.9.mlp.fc1.weight cut/model.safetensors");
        hf_end(&h);
    }
}

/* What transformers computes for a directory that was pruned, by tests/oracle/gen_pruned.py: so do the directory,
 * converted, and the converted file, pruned. */
static void test_reap_transformers(void) {
    static const struct {
        const char *name;
        int keep;
    } c[] = {{"qwen3moe", 5}, {"deepseek_v3_plain", 3}, {"qwen3_5_moe", 3}};
    for (int i = 0; i < 3; i++) {
        char path[256], args[128];
        size_t n_ids = 0, n_ref = 0;
        snprintf(path, sizeof path, "tests/fixtures/%s/ids.i32", c[i].name);
        int32_t *ids = slurp(path, &n_ids);
        snprintf(path, sizeof path, "tests/fixtures/%s/pruned.f32", c[i].name);
        float *ref = slurp(path, &n_ref);
        fixture_copy(c[i].name, "dir");
        shell("rm -rf cut");
        snprintf(args, sizeof args, "dir -o cut --keep %d --criterion random --seed 3", c[i].keep);
        if (!CHECK(!reap_run(args), "%s", reap_err) || !dir_convert("cut", "b.gguf") || !dir_convert("dir", "in.gguf"))
            return;
        snprintf(args, sizeof args, "in.gguf -o a.gguf --keep %d --criterion random --seed 3", c[i].keep);
        if (!CHECK(!reap_run(args), "%s", reap_err)) return;
        for (int way = 0; way < 2; way++) {
            struct model m;
            if (!reap_load(&m, way ? "a.gguf" : "b.gguf")) return;
            size_t n = n_ids / 4 * (size_t)m.n_vocab;
            CHECK(n_ref == 4 * n && n, "%s: the fixture is incomplete", c[i].name);
            float *x = all_logits(&m, &kernels_ref, KV_F32, 1, ids, (int)(n_ids / 4));
            double e = nmse(x, ref, n);
            CHECK(e <= 1e-6, "%s, way %d: NMSE %.3g against transformers", c[i].name, way, e);
            free(x);
            model_free(&m);
        }
        arrfree(ids);
        arrfree(ref);
    }
}

/* Layers of "mtp." and layers that are routed by hash. */
static void test_reap_directory_layers(void) {
    char x[96];
    struct hf h;
    hf_begin(&h, "layers");
    hf_qwen3(&h);
    hf_linear(&h, "mtp.layers.0.mlp.gate", 4, HF_EMBD, HF_BF16);
    hf_linear(&h, "mtp.fc", 8, 8, HF_BF16);
    for (int e = 0; e < 4; e++) {
        snprintf(x, sizeof x, "mtp.layers.0.mlp.experts.%d.up_proj", e);
        hf_linear(&h, x, 8, 8, HF_BF16);
    }
    hf_set(h.config, "{\"mtp_num_hidden_layers\":1}");
    hf_json(&h, "config.json", h.config);
    hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
    shell("rm -rf cut");
    CHECK(!reap_run("layers -o cut --keep 3 --criterion random"), "%s", reap_err);
    shell("grep -q mtp.layers.0.mlp.experts.2 cut/model.safetensors; if grep -q experts.3 cut/model.safetensors; then "
          "exit 1; fi; "
          "grep -q '\"mtp_num_hidden_layers\": *1' cut/config.json; grep -q mtp.fc cut/model.safetensors; rm -r cut");
    CHECK(!reap_run("layers -o cut --keep 3 --criterion random --mtp drop"), "%s", reap_err);
    shell("if grep -q mtp cut/model.safetensors; then exit 1; fi; grep -q '\"mtp_num_hidden_layers\": *0' "
          "cut/config.json; rm -r cut");
    hf_plain(&h, "model.layers.0.mlp.gate.tid2eid", "[2,2]", 4, HF_BF16);
    hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
    CHECK(!reap_run("layers -o cut --keep 3 --criterion random"), "%s", reap_err);
    json_t *j = json_in("cut/config.json");
    json_t *s = json_object_get(json_object_get(j, "quantization_config"), "moe_sparsity_config");
    CHECK(!strcmp(list_text(s, "num_experts"), "4,3"), "%s", list_text(s, "num_experts"));
    json_decref(j);
    shell("rm -r cut");
    CHECK(!reap_run("layers -o cut --keep 4 --criterion random") && strstr(reap_out, "routed by hash"), "%s", reap_err);
    hf_end(&h);
}

/* Puts a note of n bytes into the metadata of a safetensors file. */
static void shard_note(const char *file, size_t n) {
    char *text = NULL, *note = xmalloc(n + 1), err[ERR_MAX], path[256];
    uint64_t len = 0;
    snprintf(path, sizeof path, "%s/%s", test_dir(), file);
    memset(note, 'x', n), note[n] = 0;
    if (!CHECK(!read_file(path, &text, err), "%s", err)) return;
    memcpy(&len, text, 8);
    json_t *header = json_loadb(text + 8, len, 0, NULL);
    json_object_set_new(json_object_get(header, "__metadata__"), "note", json_string(note));
    char *longer = json_dumps(header, JSON_COMPACT | JSON_PRESERVE_ORDER);
    const uint64_t used = strlen(longer), padded = (used + 7) / 8 * 8;
    FILE *f = fopen(path, "wb");
    if (CHECK(f != NULL, "%s", path)) {
        fwrite(&padded, 8, 1, f), fprintf(f, "%s%*s", longer, (int)(padded - used), "");
        fwrite(text + 8 + len, 1, arrlenu(text) - 8 - len, f);
        CHECK(!fclose(f), "%s", path);
    }
    json_decref(header), free(longer), free(note);
    arrfree(text);
}

/* What is not tensors: order of keys, values as they were, lists of modules, the index, copies, total size. */
static void test_reap_directory_files(void) {
    enum { NOTE = 20000 };
    fixture_copy("qwen3moe_nvfp4", "dir");
    shell("mkdir dir/sub; ln -s ids.i32 dir/link; rm -rf cut; sed -i "
          "'s/\"mlp_only_layers\"/\"quantization_config\": {\"ignore\": [\"lm_head\", "
          "\"model.layers.0.mlp.experts.1.up_proj\", \"model.layers.0.mlp.experts.2\", "
          "\"model.layers.1.mlp.experts.7.*\", \"*.experts.*.x\", \"model.layers.9.mlp.experts.0.up_proj\"]}, "
          "\"third\": 0.1, \"mlp_only_layers\"/' dir/config.json");
    shell("sed -i 's/\"metadata\": {/&\"total_parameters\": 7, /' dir/model.safetensors.index.json");
    shard_note("dir/model-00001-of-00002.safetensors", NOTE);
    if (!dir_convert("dir", "in.gguf")) return;
    scores_put("in.gguf", "in.json", 2, score_spread); /* block 0: 1 8 15 6 13 4 11 2, block 1: 4 11 2 9 16 7 14 5 */
    if (!CHECK(!reap_run("dir in.json -o cut/ --keep 5"), "%s", reap_err)) return;
    CHECK(strstr(reap_err, "'dir/sub' is not a regular file: not copied"), "%s", reap_err);
    json_t *a = json_in("dir/config.json"), *b = json_in("cut/config.json"), *v;
    const char *key;
    void *it = json_object_iter(b);
    json_object_foreach(a, key, v) {
        if (!CHECK(it && !strcmp(json_object_iter_key(it), key), "the key after %s", key)) break;
        bool changed = !strcmp(key, "num_experts") || !strcmp(key, "quantization_config");
        CHECK(changed || json_equal(v, json_object_iter_value(it)), "the value of %s", key);
        it = json_object_iter_next(b, it);
    }
    CHECK(it && !strcmp(json_object_iter_key(it), "reap") && !json_object_iter_next(b, it), "what is after it");
    CHECK(json_integer_value(json_object_get(b, "num_experts")) == 5, "num_experts");
    json_t *list = json_object_get(json_object_get(b, "quantization_config"), "ignore");
    static const char *const ignored[] = {"lm_head", "model.layers.0.mlp.experts.0.up_proj",
                                          "model.layers.0.mlp.experts.1", "*.experts.*.x",
                                          "model.layers.9.mlp.experts.0.up_proj"};
    CHECK(json_array_size(list) == 5, "%zu modules in the list", json_array_size(list));
    for (size_t i = 0; i < 5; i++)
        CHECK(!strcmp(ignored[i], json_string_value(json_array_get(list, i))), "module %zu", i);
    json_decref(a), json_decref(b);

    int per[2][8] = {{0}}, l, e;
    a = json_in("cut/hf_quant_config.json");
    json_object_foreach(json_object_get(json_object_get(a, "quantization"), "quantized_layers"), key, v) {
        if (sscanf(key, "model.layers.%1d.mlp.experts.%1d.", &l, &e) == 2) per[l][e]++;
    }
    for (l = 0; l < 2; l++)
        for (e = 0; e < 8; e++) CHECK(per[l][e] == (e < 5 ? 3 : 0), "layer %d, expert %d: %d modules", l, e, per[l][e]);
    json_decref(a);

    a = json_in("cut/model.safetensors.index.json");
    long long total = json_integer_value(json_object_get(json_object_get(a, "metadata"), "total_size")), data = 0;
    static const char *const shards[] = {"cut/model-00001-of-00002.safetensors",
                                         "cut/model-00002-of-00002.safetensors"};
    for (int i = 0; i < 2; i++) {
        char path[256], *text = NULL, err[ERR_MAX];
        uint64_t n = 0;
        snprintf(path, sizeof path, "%s/%s", test_dir(), shards[i]);
        if (!CHECK(!read_file(path, &text, err), "%s", err)) return;
        memcpy(&n, text, 8);
        data += (long long)(arrlenu(text) - 8 - n);
        json_t *header = json_loadb(text + 8, n, 0, NULL);
        json_t *note = json_object_get(json_object_get(header, "__metadata__"), "note");
        CHECK(n % 8 == 0 && json_object_get(header, "__metadata__"), "%s: the header", path);
        CHECK(json_string_length(note) == (i ? 0 : NOTE), "%s: a note of %zu bytes", path, json_string_length(note));
        json_decref(header);
        arrfree(text);
    }
    CHECK(!json_object_get(json_object_get(a, "metadata"), "total_parameters"), "a number that is no longer true");
    CHECK(total == data && total > 0, "total_size %lld, the shards hold %lld", total, data);
    json_decref(a);
    shell("for f in tokenizer.json tokenizer_config.json ids.i32 logits.f32 greedy.json generation_config.json; "
          "do cmp dir/$f cut/$f; done; cmp cut/link dir/ids.i32; [ ! -L cut/link ]; [ ! -e cut/sub ]");
    /* nothing pruned: the same files but for headers in another order */
    shell("rm -rf cut");
    CHECK(!reap_run("dir in.json -o cut --keep 8"), "%s", reap_err);
    shell("cmp dir/config.json cut/config.json && cmp dir/hf_quant_config.json cut/hf_quant_config.json && "
          "cmp dir/model.safetensors.index.json cut/model.safetensors.index.json");
    if (dir_convert("cut", "b.gguf")) shell("cmp in.gguf b.gguf");
}

/* Pruned in two steps, with the budget of the second to the byte. */
static void test_reap_directory_twice(void) {
    struct gguf g;
    char args[256], *out = NULL, cmd[256];
    fixture_copy("qwen3moe_nvfp4", "dir");
    shell("rm -rf once cut cut2");
    if (!dir_convert("dir", "in.gguf")) return;
    scores_put("in.gguf", "in.json", 2, score_spread);
    if (!CHECK(!reap_run("dir in.json -o once --keep 5"), "%s", reap_err)) return; /* 1 2 4 6 + 3, 1 3 4 6 + 5 */
    CHECK(reap_run("once in.json -o cut --keep 3") == 1 && strstr(reap_err, "scores of another model"), "%s", reap_err);
    if (!dir_convert("once", "once.gguf")) return;
    scores_put("once.gguf", "once.json", 2, score_spread); /* block 0: 1 8 15 6 13, block 1: 4 11 2 9 16 */
    if (!CHECK(!reap_run("once once.json -o cut --keep 3"), "%s", reap_err) || !dir_convert("cut", "b.gguf")) return;
    if (!reap_open(&g, "b.gguf")) return;
    CHECK(!strcmp(kept_text(&g, 0), "2 3 6") && !strcmp(kept_text(&g, 1), "3 5 6"), "%s, %s", kept_text(&g, 0),
          kept_text(&g, 1));
    CHECK(key_int(&g, "moe.reap.original_expert_count") == 8, "original");
    gguf_close(&g);
    snprintf(cmd, sizeof cmd, "cat %s/cut/* | wc -c", test_dir());
    run_command(cmd, &out, NULL);
    double bytes = atof(sb_cstr(&out));
    arrfree(out);
    snprintf(args, sizeof args, "once once.json -o cut2 --budget %.17g", bytes / 0x1p30);
    CHECK(!reap_run(args), "%s", reap_err);
    shell("diff -r cut cut2; rm -rf cut2");
    snprintf(args, sizeof args, "once once.json -o cut2 --budget %.17g", (bytes - 1) / 0x1p30);
    CHECK(!reap_run(args), "%s", reap_err);
    json_t *j = json_in("cut2/config.json");
    CHECK(json_integer_value(json_object_get(j, "num_experts")) == 2, "a byte less");
    json_decref(j);
}

static void test_reap_directory_refusals(void) {
    static const struct {
        const char *before, *args, *message; /* before: a shell command that spoils dir */
    } c[] = {{"true", "--keep 5 --name x", "--name works only with a GGUF file"},
             {"mkdir no", "--keep 5", "'no' exists"},
             {"sed -i 's/\"vocab_size\"/\"per_layer_num_experts\": [8,7], \"vocab_size\"/' dir/config.json", "--keep 5",
              "key 'per_layer_num_experts': expected 8 for layer 1, as its router has,"},
             {"sed -i 's/\"num_experts\": 8/\"num_experts\": [8]/' dir/config.json", "--keep 5",
              "key 'num_experts': expected 8 for layer 1, as its router has,"},
             {"sed -i 's/\"vocab_size\"/\"quantization_config\": {\"moe_sparsity_config\": {\"method\": \"novice\", "
              "\"num_experts\": [8,8]}}, \"vocab_size\"/' dir/config.json",
              "--keep 5", "key 'moe_sparsity_config.method': expected \"prune\""},
             {"rm dir/config.json", "--keep 5", "no config.json"},
             {"sed -i s/num_experts\\\"/experts\\\"/ dir/config.json", "--keep 5", "none of num_experts"},
             {"sed -i s/num_experts_per_tok/x/ dir/config.json", "--keep 5",
              "key 'num_experts_per_tok': expected an integer"},
             {"sed -i s/mlp.experts.7.down_proj/mlp.xxperts.7.down_proj/g dir/model-*.safetensors dir/*.index.json",
              "--keep 5", "expert 7 has"},
             {"sed -i 's/\"lm_head\"/\"lm_head\", \"model.layers.*.mlp.experts.3.up_proj\"/;s/\"vocab_size\"/"
              "\"quantization_config\": {\"ignore\": [\"re:.*experts.3.*\"]}, \"vocab_size\"/' dir/config.json",
              "--keep 5", "contains an expert number, which pruning changes"},
             {"sed -i 's/\"vocab_size\"/\"reap\": {\"original_experts\": 9, \"kept\": [[1,2]]}, \"vocab_size\"/' "
              "dir/config.json",
              "--keep 5", "key 'reap.kept': expected 8 ids for layer 0"},
             {"sed -i 's/\"vocab_size\"/\"reap\": {\"original_experts\": 9, \"kept\": [null,[1,2,3,4,5,6,7,9]]}, "
              "\"vocab_size\"/' dir/config.json",
              "--keep 5", "key 'reap.kept': expected rising ids below 9 for layer 1"},
             {"truncate -s -1 dir/model-00002-of-00002.safetensors", "--keep 5", "the file is truncated"},
             {"rm dir/model-00002-of-00002.safetensors", "--keep 5", "is missing, of 2 files"},
             {"true", "--keep 1", "1 expert is too few"},
             {"true", "--budget 1e-6", "the smallest output, with 2 experts a layer"},
             {"ulimit -f 100", "--keep 5", "File too large"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char cmd[1200], *err = NULL, *out = NULL;
        fixture_copy("qwen3moe_nvfp4", "dir");
        snprintf(cmd, sizeof cmd, "d=$PWD; cd %s; { %s; } && $d/" REAP_BIN " dir -o no --criterion random %s",
                 test_dir(), c[i].before, c[i].args);
        int rc = run_command(cmd, &out, &err);
        CHECK(rc == (i ? 1 : 2) && strstr(sb_cstr(&err), c[i].message), "%s; %s: exit %d: %s", c[i].before, c[i].args,
              rc, err);
        const char *nl = strchr(err, '\n');
        CHECK(nl && !nl[1], "more than a line: %s", err);
        arrfree(err), arrfree(out);
        if (i == 1) shell("rmdir no");
        nothing_left(c[i].before);
    }
    CHECK(reap_run("dir -o dir --keep 5 --criterion random") == 1 && strstr(reap_err, "'dir' exists"), "%s", reap_err);
}

/* SIGINT while test_dir()/in, whose tensors are sparse and 1.5 GB, is pruned; false: there is no room for that. */
static bool interrupted_at(const char *in) {
    char cmd[1024], *err = NULL;
    snprintf(cmd, sizeof cmd,
             "cd %s; env --default-signal=INT $OLDPWD/" REAP_BIN " %s -o no --keep 4 --criterion random & "
             "p=$!; until ls -d no.tmp-* || ! kill -0 $p; do sleep 0.01; done; kill -INT $p; wait $p",
             test_dir(), in);
    int rc = run_command(cmd, NULL, &err);
    bool room = !strstr(sb_cstr(&err), " needed, ");
    CHECK(!room || (rc == 128 + SIGINT && strstr(err, "interrupted; nothing was written")), "exit %d: %s", rc, err);
    nothing_left("interrupted");
    arrfree(err);
    return room;
}

static void test_reap_interrupt(void) {
    static const char config[] = "{\"num_hidden_layers\":1,\"num_experts\":8,\"num_experts_per_tok\":2}";
    enum { ROWS = 384 << 10, ROUTER = 256 /* bytes */ };
    struct gguf_writer w = {0};
    struct hf h = {.out = NULL};
    char path[256], *s = NULL;
    size_t n = 0;
    gguf_put_str(&w, "general.architecture", "toy", 3);
    gguf_put_u32(&w, "toy.block_count", 1);
    gguf_put_u32(&w, "toy.expert_count", 8);
    gguf_put_u32(&w, "toy.expert_used_count", 2);
    gguf_add_tensor(&w, "blk.0.ffn_gate_inp.weight", GGUF_F32, 2, (uint64_t[]){8, 8});
    gguf_add_tensor(&w, "token_embd.weight", GGUF_F32, 2, (uint64_t[]){1 << 10, ROWS});
    uint8_t *header = gguf_header(&w, &n);
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    hf_write(&h, "large.gguf", header, n);
    snprintf(path, sizeof path, "%s/large.gguf", test_dir());
    CHECK(!truncate(path, (off_t)(n + w.data_bytes)), "%s", path);
    bool room = interrupted_at("large.gguf");
    unlink(path);
    snprintf(h.dir, sizeof h.dir, "%s/large", test_dir());
    mkdir(h.dir, 0777);
    hf_write(&h, "config.json", config, strlen(config));
    sb_printf(&s,
              "01234567{\"model.layers.0.mlp.gate.weight\":{\"dtype\":\"F32\",\"shape\":[8,8],\"data_offsets\":[0,%d]},"
              "\"a\":{\"dtype\":\"F32\",\"shape\":[1024,%d],\"data_offsets\":[%d,%lld]}}",
              ROUTER, ROWS, ROUTER, ROUTER + 4096LL * ROWS);
    uint64_t size = arrlenu(s) - 8;
    memcpy(s, &size, 8);
    hf_write(&h, "model.safetensors", s, arrlenu(s));
    snprintf(path, sizeof path, "%s/large/model.safetensors", test_dir());
    CHECK(!truncate(path, (off_t)arrlenu(s) + ROUTER + 4096LL * ROWS), "%s", path);
    room &= interrupted_at("large");
    unlink(path);
    arrfree(s);
    free(header);
    gguf_writer_free(&w);
    if (!room) SKIP("less than 1.7 GB are free");
}

#define TESTS_REAP                                                                                                     \
    {"reap/selection", test_reap_selection}, {"reap/random", test_reap_random}, {"reap/outliers", test_reap_outliers}, \
        {"reap/slices", test_reap_slices}, {"reap/nothing", test_reap_nothing}, {"reap/budget", test_reap_budget},     \
        {"reap/sums", test_reap_sums}, {"reap/twice", test_reap_twice}, {"reap/split", test_reap_split},               \
        {"reap/model", test_reap_model}, {"reap/fixtures", test_reap_fixtures}, {"reap/mtp", test_reap_mtp},           \
        {"reap/mtp_scores", test_reap_mtp_scores}, {"reap/mtp_counts", test_reap_mtp_counts},                          \
        {"reap/mtp_fixtures", test_reap_mtp_fixtures}, {"reap/calibrated", test_reap_calibrated},                      \
        {"reap/ranks", test_reap_ranks}, {"reap/usage", test_reap_usage}, {"reap/counts", test_reap_counts},           \
        {"reap/amounts", test_reap_amounts}, {"reap/scores", test_reap_scores}, {"reap/headers", test_reap_headers},   \
        {"reap/target", test_reap_target}, {"reap/directory", test_reap_directory},                                    \
        {"reap/directory_forms", test_reap_directory_forms}, {"reap/directory_uneven", test_reap_directory_uneven},    \
        {"reap/directory_lists", test_reap_directory_lists}, {"reap/directory_drop", test_reap_directory_drop},        \
        {"reap/directory_absent", test_reap_directory_absent},                                                         \
        {"reap/directory_unlisted", test_reap_directory_unlisted}, {"reap/transformers", test_reap_transformers},      \
        {"reap/directory_layers", test_reap_directory_layers}, {"reap/directory_files", test_reap_directory_files},    \
        {"reap/directory_twice", test_reap_directory_twice},                                                           \
        {"reap/directory_refusals", test_reap_directory_refusals}, {"reap/interrupt", test_reap_interrupt},
