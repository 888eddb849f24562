/* What files may say in more than one way: matrices that are stored as one, metadata by layer, tensors for 16-bit
 * activations, files without MTP layers. Each is made of a fixture's file and must give the same bits of logits.
 * */

/* A file that is being rewritten: tensors as they are, or put together. */
struct rewrite {
    struct gguf from;
    struct gguf_writer w;
    char *data; /* stb_ds: of all tensors */
};

static bool rewrite_open(struct rewrite *x, const char *fixture) {
    char path[256], err[ERR_MAX];
    memset(x, 0, sizeof *x);
    snprintf(path, sizeof path, FIXTURES "%s.gguf", fixture);
    return CHECK(gguf_open(&x->from, path, err, ERR_MAX) == 0, "%s", err);
}

/* Copies the metadata but for the keys in the list `without`, see word_in_list (NULL: all of them). */
static void rewrite_keys(struct rewrite *x, const char *without) {
    for (uint32_t i = 0; i < x->from.n_kv; i++) {
        const struct gguf_kv *kv = &x->from.kv[i];
        const uint8_t *from = (const uint8_t *)kv->key.p - 8;
        const uint8_t *end = i + 1 < x->from.n_kv ? (const uint8_t *)x->from.kv[i + 1].key.p - 8
                                                  : (const uint8_t *)x->from.tensors[0].name.p - 8;
        if (without && word_in_list(kv->key, without)) continue;
        gguf_put(&x->w, from, (size_t)(end - from));
        x->w.n_kv++;
    }
}

/* A tensor of rows of `n` others, matrix by matrix of a stack; the others are not in the file by themselves. */
static void rewrite_joined(struct rewrite *x, const char *name, const char *const *parts, int n) {
    const struct gguf_tensor *t[3];
    for (int i = 0; i < n; i++) t[i] = gguf_find_tensor(&x->from, parts[i]);
    if (!CHECK(t[0], "no tensor %s", parts[0])) return;
    uint64_t ne[3] = {t[0]->ne[0], 0, t[0]->ne[2]};
    for (int i = 0; i < n; i++) ne[1] += t[i]->ne[1];
    gguf_add_tensor(&x->w, name, t[0]->type, t[0]->ne[1] * t[0]->ne[2] == 1 ? 1 : t[0]->n_dims, ne);
    for (uint64_t e = 0; e < ne[2]; e++)
        for (int i = 0; i < n; i++) {
            const size_t bytes = (size_t)(t[i]->bytes / ne[2]);
            sb_put(&x->data, (const char *)t[i]->data + e * bytes, bytes);
        }
    while (arrlenu(x->data) % 32) arrput(x->data, 0);
}

/* Copies the tensors whose names do not contain one of `without` (NULL-terminated). */
static void rewrite_tensors(struct rewrite *x, const char *const *without) {
    for (uint32_t i = 0; i < x->from.n_tensors; i++) {
        char name[GGUF_MAX_NAME + 1];
        bool skip = false;
        gguf_printable(x->from.tensors[i].name, name, sizeof name);
        for (int k = 0; without[k]; k++) skip |= strstr(name, without[k]) != NULL;
        if (!skip) rewrite_joined(x, name, (const char *const[]){name}, 1);
    }
}

/* Copies the metadata of a file of `from` as those of another architecture. */
static void rewrite_arch(struct rewrite *x, const char *from, const char *to) {
    const size_t n = strlen(from);
    gguf_put_str(&x->w, "general.architecture", to, strlen(to));
    for (uint32_t i = 0; i < x->from.n_kv; i++) {
        const struct gguf_kv *kv = &x->from.kv[i];
        const char *end = i + 1 < x->from.n_kv ? x->from.kv[i + 1].key.p - 8 : x->from.tensors[0].name.p - 8;
        char key[128];
        if (gguf_str_eq(kv->key, "general.architecture")) continue;
        gguf_printable(kv->key, key, sizeof key);
        if (!strncmp(key, from, n) && key[n] == '.') {
            char renamed[160];
            const int length = snprintf(renamed, sizeof renamed, "%s%s", to, key + n);
            gguf_put_u64_raw(&x->w, (uint64_t)length);
            gguf_put(&x->w, renamed, (size_t)length);
        } else gguf_put(&x->w, kv->key.p - 8, kv->key.n + 8);
        gguf_put(&x->w, kv->key.p + kv->key.n, (size_t)(end - kv->key.p) - kv->key.n);
        x->w.n_kv++;
    }
}

/* Writes the file and closes what it was made of; the path. */
static const char *rewrite_close(struct rewrite *x) {
    static char path[256];
    size_t n = 0;
    uint8_t *header = gguf_header(&x->w, &n);
    snprintf(path, sizeof path, "%s/rewritten.gguf", test_dir());
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(header, n, 1, f) == 1 && fwrite(x->data, arrlenu(x->data), 1, f) == 1 && !fclose(f), "%s",
          strerror(errno));
    free(header);
    arrfree(x->data);
    gguf_writer_free(&x->w);
    gguf_close(&x->from);
    return path;
}

/* The file gives the logits of the model that it was made of, bit for bit, also on two ranks. */
static void rewrite_compare(const char *path, const struct model *want) {
    struct model m;
    char err[ERR_MAX];
    int32_t ids[30];
    const int tps[] = {1, 2};
    if (!CHECK(model_load(&m, path, err) == 0, "%s", err)) return;
    for (int i = 0; i < 30; i++) ids[i] = 5 + 13 * i;
    for (int i = 0; i < 2; i++) {
        int32_t out[1];
        float *a = ranks_run(want, &kernels_ref, KV_F32, tps[i], 1, ids, 30, 30, out, 1);
        float *b = ranks_run(&m, &kernels_ref, KV_F32, tps[i], 1, ids, 30, 30, out, 1);
        CHECK(!memcmp(a, b, 30 * (size_t)m.n_vocab * sizeof *a), "%d ranks: other logits", tps[i]);
        free(a);
        free(b);
    }
    model_free(&m);
}

/* attn_qkv for attn_q, attn_k and attn_v; ffn_gate_up_exps for ffn_gate_exps and ffn_up_exps. */
static void test_tables_fused(void) {
    static const char *const parts[] = {"attn_q.", "attn_k.", "attn_v.", "ffn_gate_exps.weight", "ffn_up_exps.weight",
                                        NULL};
    struct model m;
    struct rewrite x;
    if (!fixture_load("qwen3moe", &m) || !rewrite_open(&x, "qwen3moe")) return;
    rewrite_keys(&x, NULL);
    rewrite_tensors(&x, parts);
    for (int il = 0; il < m.n_layer; il++) {
        char name[6][64];
        static const char *const what[] = {"attn_q", "attn_k", "attn_v", "ffn_gate_exps", "ffn_up_exps"};
        for (int i = 0; i < 5; i++) snprintf(name[i], sizeof name[i], "blk.%d.%s.weight", il, what[i]);
        snprintf(name[5], sizeof name[5], "blk.%d.attn_qkv.weight", il);
        rewrite_joined(&x, name[5], (const char *const[]){name[0], name[1], name[2]}, 3);
        snprintf(name[5], sizeof name[5], "blk.%d.ffn_gate_up_exps.weight", il);
        if (gguf_find_tensor(&x.from, name[3])) rewrite_joined(&x, name[5], (const char *const[]){name[3], name[4]}, 2);
    }
    rewrite_compare(rewrite_close(&x), &m);
    model_free(&m);
}

/* Numbers that may be lists with a value for each layer. */
static void test_tables_arrays(void) {
    static const char *const keys[] = {"qwen3moe.attention.head_count", "qwen3moe.attention.head_count_kv",
                                       "qwen3moe.expert_used_count"};
    static const char *const none[] = {NULL};
    struct model m;
    struct rewrite x;
    char err[ERR_MAX];
    if (!fixture_load("qwen3moe", &m)) return;
    for (int i = 0; i < 3; i++)
        for (int missing = 0; missing < 2; missing++) {
            uint32_t list[MAX_LAYERS];
            int64_t v = 0;
            if (!rewrite_open(&x, "qwen3moe")) return;
            const struct gguf_kv *kv = gguf_find(&x.from, keys[i]);
            if (!CHECK(kv && gguf_elem_int(kv, 0, &v), "no %s", keys[i])) return;
            for (int il = 0; il < m.n_layer; il++) list[il] = (uint32_t)v;
            rewrite_keys(&x, keys[i]);
            gguf_put_array(&x.w, keys[i], GGUF_V_U32, (uint64_t)(m.n_layer - missing), list);
            rewrite_tensors(&x, none);
            const char *path = rewrite_close(&x);
            struct model bad;
            if (!missing) rewrite_compare(path, &m);
            else
                CHECK(model_load(&bad, path, err) && strstr(err, keys[i]) && strstr(err, "expected one for each"),
                      "a short list: %s", err);
        }
    model_free(&m);
}

/* llama.cpp's file of a family whose MTP layer does not run: that layer is there, and lists have a value for it. */
static void test_tables_mtp_unused(void) {
    static const char *const none[] = {NULL};
    static const int32_t heads[] = {4, 4, 2, 4, 4};
    static const bool windowed[] = {false, false, true, false, false}, types[] = {true, true, false, true, true};
    struct model m;
    struct rewrite x;
    char err[ERR_MAX];
    if (!fixture_load("dots3_note", &m)) return;
    for (int more = 0; more < 2; more++) {
        if (!rewrite_open(&x, "dots3_note")) return;
        rewrite_keys(&x, "dots3note.block_count dots3note.attention.head_count dots3note.attention.indexer.types "
                         "dots3note.attention.sliding_window_pattern");
        gguf_put_u32(&x.w, "dots3note.block_count", 5);
        gguf_put_u32(&x.w, "dots3note.nextn_predict_layers", (uint32_t)(1 + more));
        gguf_put_array(&x.w, "dots3note.attention.head_count", GGUF_V_I32, 5, heads);
        gguf_put_array(&x.w, "dots3note.attention.sliding_window_pattern", GGUF_V_BOOL, (uint64_t)(5 - more), windowed);
        gguf_put_array(&x.w, "dots3note.attention.indexer.types", GGUF_V_BOOL, 5, types);
        rewrite_tensors(&x, none);
        for (uint32_t i = 0; i < x.from.n_tensors; i++) {
            char name[GGUF_MAX_NAME + 1], copy[GGUF_MAX_NAME + 16];
            gguf_printable(x.from.tensors[i].name, name, sizeof name);
            if (strncmp(name, "blk.3.", 6)) continue;
            snprintf(copy, sizeof copy, "blk.4.%s", name + 6);
            rewrite_joined(&x, copy, (const char *const[]){name}, 1);
        }
        const char *path = rewrite_close(&x);
        struct model bad;
        if (!more) rewrite_compare(path, &m);
        else
            CHECK(model_load(&bad, path, err) && strstr(err, "sliding_window_pattern") && strstr(err, "of 3 layers"),
                  "a list of 4 values for 3 layers of 5: %s", err);
    }
    model_free(&m);
}

/* Experts per token that differ by layer are what each layer uses. */
static void test_tables_experts_used(void) {
    static const char *const none[] = {NULL};
    struct model m, other;
    struct rewrite x;
    char err[ERR_MAX];
    uint32_t used[MAX_LAYERS];
    if (!fixture_load("qwen3moe_reap", &m) || !rewrite_open(&x, "qwen3moe_reap")) return;
    for (int il = 0; il < m.n_layer; il++) used[il] = (uint32_t)(3 - il);
    rewrite_keys(&x, "qwen3moe.expert_used_count");
    gguf_put_array(&x.w, "qwen3moe.expert_used_count", GGUF_V_U32, (uint64_t)m.n_layer, used);
    rewrite_tensors(&x, none);
    if (!CHECK(model_load(&other, rewrite_close(&x), err) == 0, "%s", err)) return;
    for (int il = 0; il < m.n_layer; il++) m.layers[il].n_expert_used = (int)used[il];
    model_max_dims(&m);
    int32_t ids[30], out[1];
    for (int i = 0; i < 30; i++) ids[i] = 5 + 13 * i;
    CHECK(other.max.n_expert_used == m.max.n_expert_used && m.max.n_expert_used == 3, "at most %d experts",
          other.max.n_expert_used);
    float *a = ranks_run(&m, &kernels_ref, KV_F32, 1, 1, ids, 30, 30, out, 1);
    float *b = ranks_run(&other, &kernels_ref, KV_F32, 1, 1, ids, 30, 30, out, 1);
    CHECK(!memcmp(a, b, 30 * (size_t)m.n_vocab * sizeof *a), "other logits");
    free(a);
    free(b);
    model_free(&m);
    model_free(&other);
}

/* general.tensor_extra.prec_a4 false: the tensor's activations stay at 16 bits although it has an input scale. */
static void test_tables_prec_a4(void) {
    static const char *const none[] = {NULL};
    struct model m;
    struct rewrite x;
    char err[ERR_MAX];
    if (!fixture_load("qwen3moe_nvfp4", &m)) return;
    if (!CHECK(m.layers[1].up.has_input_scale && m.layers[1].gate.has_input_scale, "the fixture has no input scales"))
        return;
    model_free(&m);
    for (int wrong = 0; wrong < 2; wrong++) {
        static const char *const names[] = {"blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight"};
        const bool a4[] = {false, true};
        char *list = NULL;
        if (!rewrite_open(&x, "qwen3moe_nvfp4")) return;
        rewrite_keys(&x, NULL);
        for (int i = 0; i < 2; i++) {
            const uint64_t n = strlen(names[i]);
            sb_put(&list, (const char *)&n, sizeof n);
            sb_put(&list, names[i], n);
        }
        gguf_put_key(&x.w, "general.tensor_extra.name", GGUF_V_ARR);
        gguf_put_u32_raw(&x.w, GGUF_V_STR);
        gguf_put_u64_raw(&x.w, 2);
        gguf_put(&x.w, list, arrlenu(list));
        gguf_put_array(&x.w, "general.tensor_extra.prec_a4", GGUF_V_BOOL, (uint64_t)(2 - wrong), a4);
        rewrite_tensors(&x, none);
        arrfree(list);
        const char *path = rewrite_close(&x);
        if (wrong) {
            CHECK(model_load(&m, path, err) && strstr(err, "prec_a4"), "lists of other lengths: %s", err);
            continue;
        }
        if (!CHECK(model_load(&m, path, err) == 0, "%s", err)) return;
        CHECK(!m.layers[1].up.has_input_scale && m.layers[1].gate.has_input_scale, "the list was not followed");
        model_free(&m);
    }
}

/* A file of an architecture that is not known is refused by the family that is nearest to it, and what that does not
 * know or does not find. */
static void test_tables_nearest(void) {
    static const struct {
        const char *fixture, *from, *without, *message;
        int keys; /* further ones */
        bool tensor;
    } c[] = {
        {"maple", "maple", "none", "the nearest is maple, which knows all of its keys and tensors", 0, false},
        {"maple", "maple", "none", "the nearest is maple, which does not know tensor 'ffn_norm_exps.weight'", 0, true},
        {"maple", "maple", "none", "which does not know key 'extra.0', key 'extra.1', tensor 'ffn_norm_exps.weight'", 2,
         true},
        {"maple", "maple", "none", "key 'extra.2', key 'extra.3' and 2 more", 6, false},
        {"maple", "maple", "output_norm.weight", "the nearest is maple, but tensor 'output_norm.weight' is missing", 0,
         false},
        {"afmoe", "afmoe", "none", "the nearest is afmoe, which", 0, false},
        {"gpt_oss", "gpt-oss", "none", "the nearest is gpt-oss, which", 0, false},
        {"deepseek_v4", "deepseek4", "none", "the nearest is deepseek4, which", 0, false},
        {"kimi_linear", "kimi-linear", "none", "the nearest is kimi-linear, which", 0, false},
        {"dbrx_nvfp4", "dbrx", "none", "the nearest is dbrx, which", 0, false}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct rewrite x;
        struct model m;
        char err[ERR_MAX] = "", key[48];
        if (!rewrite_open(&x, c[i].fixture)) return;
        rewrite_arch(&x, c[i].from, "other-moe");
        for (int k = 0; k < c[i].keys; k++) {
            snprintf(key, sizeof key, "other-moe.extra.%d", k);
            gguf_put_u32(&x.w, key, 1);
        }
        for (int il = 0; c[i].tensor && il < 2; il++) {
            snprintf(key, sizeof key, "blk.%d.ffn_norm_exps.weight", il);
            rewrite_joined(&x, key, (const char *const[]){"output_norm.weight"}, 1);
        }
        rewrite_tensors(&x, (const char *const[]){c[i].without, NULL});
        CHECK(model_load(&m, rewrite_close(&x), err), "case %zu: the file was taken", i);
        CHECK_HAS(err, "the architecture 'other-moe' is not supported; ", "case %zu", i);
        CHECK_HAS(err, c[i].message, "case %zu", i);
    }
}

/* Architectures that convert/README.md says do not run are refused by moe --info, by their names. */
static void test_readme_refused(void) {
    char *listed = readme_column("convert/README.md", "| GGUF architecture | models | why |", 0);
    for (const char *p = listed; *p == ' ';) {
        struct rewrite x;
        char arch[64], cmd[512], said[160];
        const size_t n = strcspn(++p, " ");
        snprintf(arch, sizeof arch, "%.*s", (int)n, p);
        p += n;
        if (!rewrite_open(&x, "maple")) break;
        rewrite_arch(&x, "maple", arch);
        rewrite_tensors(&x, (const char *const[]){"none", NULL});
        snprintf(cmd, sizeof cmd, MOE_BIN " --info -m %s", rewrite_close(&x));
        snprintf(said, sizeof said, "the architecture '%s' is not supported; the nearest is maple", arch);
        check_command(cmd, 1, NULL, said);
    }
    arrfree(listed);
}

/* A file may leave out its MTP layers, whose number the metadata still count; one that holds nothing else is
 * refused. */
static void test_tables_halves(void) {
    struct model m, bad;
    struct rewrite x;
    char err[ERR_MAX], block[32];
    if (!fixture_load("deepseek_v3_plain", &m)) return;
    if (!CHECK(m.n_mtp == 1, "the fixture has %d prediction layers", m.n_mtp)) return;
    snprintf(block, sizeof block, "blk.%d.", m.n_layer);
    if (!rewrite_open(&x, "deepseek_v3_plain")) return;
    rewrite_keys(&x, NULL);
    rewrite_tensors(&x, (const char *const[]){block, NULL});
    rewrite_compare(rewrite_close(&x), &m);
    if (!rewrite_open(&x, "deepseek_v3_plain")) return;
    rewrite_keys(&x, NULL);
    rewrite_tensors(&x, (const char *const[]){"blk.0.", "blk.1.", NULL});
    CHECK(model_load(&bad, rewrite_close(&x), err) && strstr(err, "only multi-token-prediction layers"), "%s", err);
    model_free(&m);
}

/* A file without one of the keys of a gated delta net is refused by that key's name. */
static void test_tables_delta_keys(void) {
    static const char *const keys[] = {"ssm.conv_kernel", "ssm.group_count", "ssm.time_step_rank",
                                       "ssm.state_size",  "ssm.inner_size",  "attention.head_count",
                                       "block_count"};
    struct model m;
    if (!fixture_load("qwen3_next", &m)) return;
    model_free(&m);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        struct rewrite x;
        char key[64], err[ERR_MAX] = "";
        snprintf(key, sizeof key, "qwen3next.%s", keys[i]);
        if (!rewrite_open(&x, "qwen3_next")) return;
        rewrite_keys(&x, key);
        rewrite_tensors(&x, (const char *const[]){NULL});
        CHECK(model_load(&m, rewrite_close(&x), err) && strstr(err, key), "without %s: %s", key, err);
    }
}

/* A file without one of the keys of Kimi delta attention, or with a value that means something else, is refused by that
 * key's name. */
static void test_tables_kda_keys(void) {
    static const struct {
        const char *fixture, *key, *message; /* key: the one that is left out or changed */
        int value; /* 0: it is left out; 1: a list of KV heads without one in the last layer; 2: false; 3: 64;
                    * 4: 30; 5: four booleans, of which the last is false */
    } c[] = {
        {"kimi_linear", "kimi-linear.kda.head_dim", "'kimi-linear.kda.head_dim' is missing", 0},
        {"kimi_linear", "kimi-linear.ssm.conv_kernel", "'kimi-linear.ssm.conv_kernel' is missing", 0},
        {"kimi_linear", "kimi-linear.attention.kv_lora_rank", "'kimi-linear.attention.kv_lora_rank' is missing", 0},
        {"bailing_hybrid", "bailingmoe3.kda.gate_lower_bound", "'bailingmoe3.kda.gate_lower_bound' is missing", 0},
        {"bailing_hybrid", "bailingmoe3.attention.head_count_kv",
         "'bailingmoe3.attention.head_count_kv' is 0 for layer 4; expected at least 1 for a layer for multi-token "
         "prediction",
         1},
        {"bailing_hybrid", "bailingmoe3.kda.safe_gate", "'bailingmoe3.kda.safe_gate' is false, expected true", 2},
        {"glm5_next", "glm5-next.attention.indexer.kpool", "'glm5-next.attention.indexer.kpool' is missing", 0},
        {"glm5_next", "glm5-next.attention.q_lora_rank", "'glm5-next.attention.q_lora_rank' is missing", 0},
        {"glm5_next", "glm5-next.hyper_connection.count", "'glm5-next.hyper_connection.count' is missing", 0},
        {"glm5_next", "glm5-next.rope.dimension_count", "'glm5-next.rope.dimension_count' is 64, expected 0 to 0", 3},
        {"glm5_next", "glm5-next.attention.indexer.top_k",
         "'glm5-next.attention.indexer.top_k' is 30, expected a multiple of the 4 tokens of a pool", 4},
        {"glm5_next", "glm5-next.attention.indexer.kpool_select_tail",
         "'glm5-next.attention.indexer.kpool_select_tail' is false, expected true", 2},
        {"glm5_next", "glm5-next.attention.indexer.types",
         "'glm5-next.attention.indexer.types' says that layer 3 has no indexer, but tensor "
         "'blk.3.indexer.attn_k.weight' is there",
         5},
        {"glm5_next", "glm5-next.attention.indexer.types",
         "'glm5-next.attention.indexer.types' has no value for each of 4 layers", 2}};
    static const int32_t heads[5] = {0, 1, 0, 1, 0};
    struct model m;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct rewrite x;
        char err[ERR_MAX] = "";
        if (!rewrite_open(&x, c[i].fixture)) return;
        rewrite_keys(&x, c[i].key);
        if (c[i].value == 1) gguf_put_array(&x.w, c[i].key, GGUF_V_I32, 5, heads);
        if (c[i].value == 2) gguf_put_bool(&x.w, c[i].key, false);
        if (c[i].value == 3) gguf_put_u32(&x.w, c[i].key, 64);
        if (c[i].value == 4) gguf_put_u32(&x.w, c[i].key, 30);
        if (c[i].value == 5) gguf_put_array(&x.w, c[i].key, GGUF_V_BOOL, 4, (const bool[]){1, 1, 1, 0});
        rewrite_tensors(&x, (const char *const[]){NULL});
        CHECK(model_load(&m, rewrite_close(&x), err) && strstr(err, c[i].message), "%s: %s", c[i].message, err);
    }
    struct rewrite x;
    char err[ERR_MAX] = "";
    if (!rewrite_open(&x, "kimi_linear")) return;
    rewrite_keys(&x, NULL);
    rewrite_tensors(&x, (const char *const[]){"blk.1.ssm_conv1d_k.weight", NULL});
    CHECK(model_load(&m, rewrite_close(&x), err) && strstr(err, "tensor 'blk.1.ssm_conv1d_k.weight' is missing"), "%s",
          err);
    if (!rewrite_open(&x, "glm5_next")) return;
    rewrite_keys(&x, "glm5-next.attention.indexer.types");
    rewrite_tensors(&x, (const char *const[]){"blk.1.indexer.attn_k.weight", NULL});
    CHECK(model_load(&m, rewrite_close(&x), err) &&
              strstr(err, "layer 1 has no indexer, expected tensor 'blk.1.indexer.attn_k.weight'"),
          "%s", err);
}

/* A key of a file, without the architecture, with which the file is refused by `message`. */
struct refused_key {
    const char *key, *message;
    uint32_t value; /* 0: it is left out */
};

/* Checks that a fixture is refused by name with each of n keys, and without each of n_lost tensors. */
static void check_refused(const char *fixture, const char *arch, const struct refused_key *c, size_t n,
                          const char *const *tensors, size_t n_lost) {
    for (size_t i = 0; i < n + n_lost; i++) {
        struct rewrite x;
        struct model m;
        char key[128], message[160], err[ERR_MAX] = "";
        const char *const lost = i < n ? NULL : tensors[i - n];
        snprintf(key, sizeof key, "%s.%s", arch, lost ? "" : c[i].key);
        snprintf(message, sizeof message, lost ? "tensor '%s' is missing" : "%s", lost ? lost : c[i].message);
        if (!rewrite_open(&x, fixture)) return;
        rewrite_keys(&x, lost ? NULL : key);
        if (!lost && c[i].value) gguf_put_u32(&x.w, key, c[i].value);
        rewrite_tensors(&x, (const char *const[]){lost, NULL});
        CHECK(model_load(&m, rewrite_close(&x), err) && strstr(err, message), "%s: %s", message, err);
    }
}

/* A file of Inkling 2 without one of its keys, with a loop that does not fit, or without one of its tensors, is refused by
 * its name. */
static void test_tables_inkling2_keys(void) {
    static const struct refused_key c[] = {
        {"attention.conv_kernel", "'inkling2.attention.conv_kernel' is missing", 0},
        {"attention.relative.head_length", "'inkling2.attention.relative.head_length' is missing", 0},
        {"attention.clip", "'inkling2.attention.clip' is missing", 0},
        {"attn_res.block_size", "'inkling2.attn_res.block_size' is missing", 0},
        {"final_logit_softcapping", "'inkling2.final_logit_softcapping' is missing", 0},
        {"loop.pass_count", "'inkling2.loop.pass_count' is missing", 0},
        {"loop.pass_count", "'inkling2.loop.pass_count' is 1, expected 2 to", 1},
        {"loop.pass_count", "'inkling2.loop.pass_count' is 400, which makes 1603 layers of 7; expected at most", 400},
        {"loop.gate_rank", "'inkling2.loop.gate_rank' is missing", 0},
        {"loop.first_layer", "'inkling2.loop.layer_count' is 4, expected 0 to 2", 5},
        {"loop.layer_count", "are 2 and 3, expected multiples of attn_res.block_size, 2, above 0", 3},
        {"attn_res.block_size", "expected multiples of attn_res.block_size, 4, above 0", 4},
        {"attention.relative.extent", "tensor 'blk.1.attn_rel_bias.weight' has the shape", 25},
        {"loop.layer_count", "tensor 'blk.4.loop_messages.weight' is not part of the architecture", 2}};
    static const char *const tensors[] = {"output_res.weight", "token_embd_norm.weight", "blk.0.ffn_res.weight",
                                          "blk.2.loop_messages.weight", "blk.6.attn_k_tap.weight"};
    check_refused("inkling2_loop", "inkling2", c, sizeof c / sizeof *c, tensors, sizeof tensors / sizeof *tensors);
}

/* The same of Gemma 4. Its larger siblings, whose layers have inputs of their own or share keys, are refused by name. */
static void test_tables_gemma4_keys(void) {
    static const struct refused_key c[] = {
        {"embedding_length_per_layer_input",
         "'gemma4.embedding_length_per_layer_input' is 256, expected 0: inputs of each layer (E2B, E4B) are not", 256},
        {"attention.shared_kv_layers",
         "'gemma4.attention.shared_kv_layers' is 1, expected 0: layers that share keys and values are not", 1},
        {"attention.sliding_window", "'gemma4.attention.sliding_window' is missing", 0},
        {"attention.key_length_swa", "'gemma4.attention.value_length_swa' is 64, expected the values of a key, 128", 0},
        {"attention.value_length", "'gemma4.attention.value_length' is 64, expected the values of a key, 128", 64},
        {"attention.key_length_swa", "'gemma4.rope.dimension_count_swa' is 64, expected 2 to 32", 32},
        {"rope.dimension_count", "'gemma4.rope.dimension_count' is 130, expected 2 to 128", 130},
        {"expert_used_count", "'gemma4.expert_used_count' is missing", 0}};
    static const char *const tensors[] = {"blk.1.post_attention_norm.weight",
                                          "blk.0.post_ffw_norm.weight",
                                          "blk.2.post_ffw_norm_1.weight",
                                          "blk.2.pre_ffw_norm_2.weight",
                                          "blk.0.post_ffw_norm_2.weight",
                                          "blk.1.ffn_gate_inp.scale",
                                          "blk.0.attn_v.weight",
                                          "blk.1.ffn_up.weight"};
    check_refused("gemma4", "gemma4", c, sizeof c / sizeof *c, tensors, sizeof tensors / sizeof *tensors);
}

/* The same of Qwen3.8-Flash-Next. A table that lacks a row that a hash may choose is refused before any is read. */
static void test_tables_qwen4_keys(void) {
    enum { ABSENT = -1 };
    static const struct {
        const char *key, *message;
        int n; /* values that take the key's place; ABSENT: none does */
        int64_t v[8];
    } c[] = {
        {"hyper_connection.low_rank", "'qwen4exp.hyper_connection.low_rank' is missing", ABSENT, {0}},
        {"hyper_connection.count", "'qwen4exp.hyper_connection.count' is 1, expected 2 to 8", 1, {1}},
        {"attention.compress_ratios", "'qwen4exp.attention.compress_ratios' is missing or has no number", ABSENT, {0}},
        {"attention.compress_ratios",
         "has 0 for layer 2, expected a divisor of attention.indexer.top_k, 32",
         4,
         {0, 0, 0, 4}},
        {"attention.compress_ratios",
         "has 5 for layer 2, expected a divisor of attention.indexer.top_k, 32",
         4,
         {0, 0, 5, 4}},
        {"attention.compress_ratios",
         "has 0 for layer 3, expected a divisor of attention.indexer.top_k, 32",
         4,
         {0, 0, 4, 0}},
        {"attention.compress_ratios",
         "'qwen4exp.attention.compress_ratios' is missing or has no number for each of 4 layers",
         3,
         {0, 0, 4}},
        {"attention.indexer.key_length", "is 8, expected at least the 16 rotated values", 1, {8}},
        {"ple.layers", "'qwen4exp.ple.layers' has 2 values, expected the number of one of 3 layers", 2, {0, 1}},
        {"ple.layers",
         "'qwen4exp.ple.layers' is missing or has no number for each of 1 layers, expected 0 to 2",
         1,
         {3}},
        {"ple.layers", "'qwen4exp.ple.layers' has 2, which is a layer of attention", 1, {2}},
        {"ple.layers", "tensor 'per_layer_token_embd.weight' is not part of the architecture", ABSENT, {0}},
        {"ple.ngram_size", "'qwen4exp.ple.ngram_size' is missing", ABSENT, {0}},
        {"ple.ngram_size", "'qwen4exp.ple.ngram_size' is 9, expected 2 to 8", 1, {9}},
        {"ple.heads_per_ngram", "'qwen4exp.ple.heads_per_ngram' is 33, expected 1 to 32", 1, {33}},
        {"ple.conv_kernel", "'qwen4exp.ple.conv_kernel' is missing", ABSENT, {0}},
        {"ple.eos_token_id", "'qwen4exp.ple.eos_token_id' is 512, expected one of 512 tokens", 1, {512}},
        {"ple.layer_multipliers", "is missing or has no number for each of 3 tokens", 2, {1, 3}},
        {"ple.layer_multipliers", "has no whole number from 1 to", 3, {1, 0, 3}},
        {"ple.layer_multipliers",
         "has 18014398509481985, expected at most 18014398509481983 with 512 tokens",
         3,
         {1, 3, (INT64_MAX / 512) + 2}},
        {"ple.head_offsets",
         "'per_layer_token_embd.weight' has 1024 rows, expected 1025 for head 7",
         8,
         {0, 101, 204, 311, 420, 533, 660, 888}},
        {"ple.head_vocab_sizes", "has no whole number from 1 to", 8, {101, 103, 107, 109, 0, 127, 131, 137}},
        {"embedding_length_per_layer_input",
         "'per_layer_token_embd.weight' has the shape {8, 1024}, expected {4, 1024}",
         1,
         {4}}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct model m;
        struct rewrite x;
        char err[ERR_MAX] = "", key[96];
        snprintf(key, sizeof key, "qwen4exp.%s", c[i].key);
        if (!rewrite_open(&x, "qwen4_exp")) return;
        const struct gguf_kv *was = gguf_find(&x.from, key);
        const bool list = was && was->is_array;
        rewrite_keys(&x, key);
        if (c[i].n != ABSENT && list) gguf_put_array(&x.w, key, GGUF_V_I64, (uint64_t)c[i].n, c[i].v);
        else if (c[i].n != ABSENT) gguf_put_u32(&x.w, key, (uint32_t)c[i].v[0]);
        rewrite_tensors(&x, (const char *const[]){NULL});
        CHECK(model_load(&m, rewrite_close(&x), err) && strstr(err, c[i].message), "%s: '%s'", c[i].message, err);
    }
}

#define TESTS_TABLES                                                                                      \
    {"model/nearest", test_tables_nearest}, {"readme/refused", test_readme_refused},                      \
        {"model/fused-tensors", test_tables_fused}, {"model/metadata-arrays", test_tables_arrays},        \
        {"model/mtp-unused", test_tables_mtp_unused}, {"model/experts-used", test_tables_experts_used},   \
        {"model/prec-a4", test_tables_prec_a4}, {"model/file-halves", test_tables_halves},                \
        {"model/delta-keys", test_tables_delta_keys}, {"model/kda-keys", test_tables_kda_keys},           \
        {"model/inkling2-keys", test_tables_inkling2_keys}, {"model/qwen4-keys", test_tables_qwen4_keys}, \
        {"model/gemma4-keys", test_tables_gemma4_keys},
