/* The table of keys, and the shapes of --synth, which are texts of these keys. */

/* ---- the table of keys ---- */

/* What the loader says of a shape; empty: nothing is wrong. asked gets the keys that were asked for. */
static void synth_says(const struct synth *y, char err[ERR_MAX], bool asked[KEY_RULES]) {
    struct model m = {0};
    struct loader l = {0};
    struct synth_sizes sizes;
    err[0] = 0;
    uint8_t *header = synth_read(y, &m, &l, &sizes, err);
    memcpy(asked, l.asked, sizeof l.asked);
    model_free(&m);
    free(header);
}

/* A call in moe.c that reads a key: its function and the key. */
struct key_call {
    const char *function; /* NULL: another one */
    enum key_kind kind;
    bool layers, dflt; /* a number for each layer; with the default of the table */
};

/* Every row is read for some shape, but for those that --synth only writes, and every key that the loader names has a
 * row of the kind that it reads. */
static void test_keys_table(void) {
    static const struct key_call calls[] = {
        {"loader_int(l, \"", KEY_INT, false, true},       {"loader_int_or(l, \"", KEY_INT, false, false},
        {"loader_int_in(l, \"", KEY_INT, false, false},   {"loader_ints(l, \"", KEY_INT, true, false},
        {"loader_ints_to(l, \"", KEY_INT, true, false},   {"loader_num(l, \"", KEY_NUM, false, true},
        {"loader_num_or(l, \"", KEY_NUM, false, false},   {"loader_nums(l, \"", KEY_NUM, true, true},
        {"loader_bool_or(l, \"", KEY_BOOL, false, false}, {"loader_text_or(l, \"", KEY_TEXT, false, false}};
    bool asked[KEY_RULES], any[KEY_RULES] = {false};
    char *text = NULL, err[ERR_MAX];
    int n = 0;
    for (size_t i = 0; i < sizeof synths / sizeof *synths; i++) {
        synth_says(&synths[i], err, asked);
        CHECK(!err[0], "%s: %s", synths[i].name, err);
        for (int k = 0; k < KEY_RULES; k++) any[k] |= asked[k];
    }
    for (int k = 0; k < KEY_RULES; k++) {
        const struct key_rule *r = &key_rules[k];
        const bool follows = r->dflt == KEY_REQUIRED || r->dflt == KEY_FOLLOWS;
        CHECK(any[k] == (strcmp(r->suffix, "rope.dimension_sections") && strcmp(r->suffix, "engram.token_map")),
              "%s is read: %d", r->suffix, any[k]);
        CHECK(key_rule_of(r->suffix) == r, "%s stands twice", r->suffix);
        CHECK(r->lo <= r->hi && (follows || (r->dflt >= r->lo && r->dflt <= r->hi)), "the range of %s", r->suffix);
    }
    if (!CHECK(read_file("moe.c", &text, err) == 0, "%s", err)) return;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (const char *p = sb_cstr(&text); (p = strstr(p, calls[i].function)); n++) {
            char key[64];
            p += strlen(calls[i].function);
            snprintf(key, sizeof key, "%.*s", (int)strcspn(p, "\""), p);
            int k = 0;
            while (k < KEY_RULES && strcmp(key_rules[k].suffix, key)) k++;
            if (!CHECK(k < KEY_RULES, "%s is not in the table", key)) continue;
            CHECK(key_rules[k].kind == calls[i].kind && (!calls[i].layers || key_rules[k].shape == KEY_LAYERS),
                  "%s%s\" reads another kind than the table has", calls[i].function, key);
            CHECK(!calls[i].dflt || key_rules[k].dflt != KEY_FOLLOWS, "%s has no default in the table", key);
        }
    CHECK(n > 60, "%d calls read keys", n);
    arrfree(text);
}

/* Beyond its range, and with a value of another kind, the loader refuses each key that a shape reads. */
static void test_keys_ranges(void) {
    static const char *const kinds[] = {"is not an integer", "is not a number", "is not a boolean", NULL};
    int n = 0;
    for (size_t i = 0; i < sizeof synths / sizeof *synths; i++) {
        bool asked[KEY_RULES], now[KEY_RULES];
        char err[ERR_MAX], want[256];
        synth_says(&synths[i], err, asked);
        for (int k = 0; k < KEY_RULES; k++) {
            const struct key_rule *r = &key_rules[k];
            if (!asked[k] || r->kind == KEY_TEXT) continue;
            for (int way = 0; way < 3; way++) {
                struct synth y = synths[i];
                const double v = way == 1 ? r->lo - 1 : r->kind == KEY_NUM ? 2 * r->hi + 1 : r->hi + 1;
                if (way && r->kind == KEY_BOOL) continue;
                if (way) synth_set(&y, r->suffix, "%.15g", v);
                else synth_set(&y, r->suffix, "word");
                synth_says(&y, err, now);
                n++;
                if (r->shape == KEY_LIST)
                    snprintf(want, sizeof want, "metadata key '%s.%s' %s for each of", y.arch, r->suffix,
                             r->kind == KEY_BOOL ? "has no value" : "is missing or has no number");
                else if (!way)
                    snprintf(want, sizeof want, "metadata key '%s.%s' %s", y.arch, r->suffix, kinds[r->kind]);
                else if (r->kind == KEY_NUM)
                    snprintf(want, sizeof want, "metadata key '%s.%s' is %g, expected %g to %g", y.arch, r->suffix, v,
                             r->lo, r->hi);
                else snprintf(want, sizeof want, "metadata key '%s.%s' is %.0f, expected ", y.arch, r->suffix, v);
                CHECK(!strncmp(err, want, strlen(want)), "%s: '%s' does not begin with '%s'", y.name, err, want);
            }
        }
    }
    CHECK(n > 1000, "%d wrong values", n);
}

/* ---- shapes ---- */

/* Lists of numbers for layers, whose repeated part is as long as the layers want it. */
static void test_synth_lists(void) {
    static const struct {
        const char *text;
        int blocks;
        const char *want;
    } t[] = {{"5,6", 9, "5 6 "},
             {"7*3,1", 4, "7 7 7 1 "},
             {"1:2*2,3", 9, "1 2 1 2 3 "},
             {"1:0*", 3, "1 0 1 "},
             {"0,0,4:128*,0", 6, "0 0 4 128 4 0 "},
             {"0,0,4:128*,0", 2, "0 0 "},
             {"0,1*,2,3", 3, "0 2 3 "},
             {"0,1*,2,3", 1, "3 "},
             {"9*", 2, "9 9 "},
             {"1,,2", 3, "1  2 "},
             {"4*x", 2, "4 x "},
             {"8*1", 4, "8 "},
             {"1:2*2,0*", 6, "1 2 1 2 0 0 "}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct gguf_str item[MAX_LAYERS + 1];
        char *out = NULL;
        const int n = synth_list(t[i].text, strlen(t[i].text), t[i].blocks, item);
        for (int k = 0; k < n; k++) sb_put(&out, item[k].p, item[k].n), sb_puts(&out, " ");
        CHECK_STR(sb_cstr(&out), t[i].want, "%s for %d layers", t[i].text, t[i].blocks);
        arrfree(out);
    }
    struct gguf_str item[MAX_LAYERS + 1];
    CHECK_INT(synth_list("1:2*9223372036854775807", 23, 4, item), MAX_LAYERS + 1, "too many numbers");
}

/* Numbers of layers follow their number: those with a window, their heads, compressed keys, experts by token ids. */
static void test_synth_layers(void) {
    static const struct {
        const char *args;
        int n_layer, blocks, n_ids, n_head[6], window[6], ratio[6];
    } t[] = {{"step-3.7-flash:layers=5", 5, 6, 0, {64, 96, 96, 96, 64, 96}, {0, 512, 512, 512, 0, 512}, {0}},
             {"step-3.7-flash:1", 1, 2, 0, {64, 96}, {0, 512}, {0}},
             {"gpt-oss-20b:block_count=3", 3, 3, 0, {64, 64, 64}, {128, 0, 128}, {0}},
             {"deepseek-v4-flash:layers=2", 2, 3, 2, {64, 64, 64}, {0}, {0, 0, 0}},
             {"deepseek-v4-flash:block_count=6", 5, 6, 3, {64, 64, 64, 64, 64, 64}, {0}, {0, 0, 4, 128, 4, 0}},
             {"deepseek-v4-flash:nextn_predict_layers=0,block_count=4,attention.compress_ratios=128*3,4",
              4,
              4,
              3,
              {64, 64, 64, 64},
              {0},
              {128, 128, 128, 4}},
             {"deepseek-v4.1-flash:layers=3", 3, 3, 0, {64, 64, 64}, {0}, {0, 0, 2}},
             {"deepseek-v4.1-flash:1", 1, 1, 0, {64}, {0}, {0}},
             {"laguna-xs:attention.head_count=48,64*,16,layers=4", 4, 4, 0, {48, 64, 64, 16}, {0, 512, 512, 512}, {0}}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct synth y = synth_parse(t[i].args);
        struct model m = {0};
        struct loader l = {0};
        struct synth_sizes sizes;
        char err[ERR_MAX];
        uint8_t *header = synth_read(&y, &m, &l, &sizes, err);
        if (!CHECK(!l.failed, "%s: %s", t[i].args, err)) return;
        CHECK(m.n_layer == t[i].n_layer && model_blocks(&m) == t[i].blocks && l.n_expert_ids == t[i].n_ids,
              "%s: %d layers of %d, %d find experts by token ids", t[i].args, m.n_layer, model_blocks(&m),
              l.n_expert_ids);
        for (int il = 0; il < t[i].blocks; il++)
            CHECK(l.n_head[il] == t[i].n_head[il] && l.window[il] == t[i].window[il] &&
                      l.compress_ratio[il] == t[i].ratio[il],
                  "%s, layer %d: %d heads, a window of %d, keys of %d tokens", t[i].args, il, l.n_head[il],
                  l.window[il], l.compress_ratio[il]);
        model_free(&m);
        free(header);
    }
}

/* A shape with the keys of another is the other: the same plan but for the name. Short forms stand for keys. */
static void test_synth_same(void) {
    static const char *const t[][2] = {
        {"qwen3-235b-a22b", "qwen3-30b-a3b:block_count=94,embedding_length=4096,attention.head_count=64,"
                            "expert_feed_forward_length=1536"},
        {"glm-4.7-flash", "deepseek-v3:context_length=202752,embedding_length=2048,block_count=48,"
                          "feed_forward_length=10240,attention.head_count=20,attention.q_lora_rank=768,"
                          "attention.key_length_mla=256,attention.value_length_mla=256,leading_dense_block_count=1,"
                          "expert_count=64,expert_used_count=4,expert_feed_forward_length=1536,expert_group_count=1,"
                          "expert_group_used_count=1,vocab_size=154880,expert_weights_scale=1.8"},
        {"deepseek-v4", "deepseek-v4-flash:block_count=62,embedding_length=7168,attention.head_count=128,"
                        "attention.q_lora_rank=1536,expert_count=384,expert_feed_forward_length=3072,"
                        "attention.indexer.top_k=1024,attention.output_group_count=16,"
                        "attention.compress_ratios=128,128,4:128*,0"},
        {"deepseek-v3:layers=4,experts=16", "deepseek-v3:block_count=5,expert_count=16"},
        {"qwen3-next-80b-a3b:layers=8", "qwen3-next-80b-a3b:nextn_predict_layers=1,block_count=9,"
                                        "full_attention_interval=4,rope.scaling.type=none,expert_weights_norm=true"}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        json_t *o[2];
        for (int k = 0; k < 2; k++) {
            char args[1024];
            snprintf(args, sizeof args, "--gpus 4x640@1792 -c 4096 --synth %s", t[i][k]);
            o[k] = plan_of(args, 0);
            json_object_del(o[k], "model");
        }
        CHECK(json_equal(o[0], o[1]), "%s is not the same as %s", t[i][0], t[i][1]);
        json_decref(o[0]), json_decref(o[1]);
    }
}

/* A model that nobody has made, by what --info finds in it; and its file is the same model. */
static void test_synth_keys(void) {
    static const char small[] = "glm-4.7:block_count=4,experts=8,embedding_length=128,attention.head_count=6,"
                                "attention.head_count_kv=2,attention.key_length=32,rope.dimension_count=16,"
                                "rope.freq_base=5e5,leading_dense_block_count=2,feed_forward_length=256,"
                                "expert_used_count=3,expert_feed_forward_length=64,expert_shared_count=2,"
                                "expert_weights_norm=false,rope.scaling.type=yarn,rope.scaling.factor=4,vocab_size=192";
    static const char *const want[] = {"layers        3 (2 dense), 1 for multi-token prediction",
                                       "hidden        128, vocabulary 192", "6 heads, 2 KV heads, key 32 (16 rotary)",
                                       "3 used per token of width 64, sigmoid router, shared width 128",
                                       "layers 0-1: dense, layer 2: 8"};
    char cmd[1024], path[128], *out = NULL;
    snprintf(cmd, sizeof cmd, MOE_BIN " --info --synth %s </dev/null", small);
    CHECK_INT(run_command(cmd, &out, NULL), 0, "--info");
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) CHECK_HAS(sb_cstr(&out), want[i], "%s", small);
    snprintf(path, sizeof path, "%s/keys.gguf", test_dir());
    struct synth y = synth_parse(small);
    struct model m = {0}, again = {0};
    char err[ERR_MAX] = "";
    synth_make(&m, &y, path, false);
    if (!CHECK(!model_load(&again, path, err), "%s", err)) return;
    CHECK(again.hash == m.hash && again.n_layer == 3 && !again.norm_topk_prob && again.layers[2].n_ff_shared == 128,
          "the file is another model");
    CHECK(again.ropes[0].factor > 1.1f && again.ropes[0].factor < 1.2f, "a factor of %g",
          (double)again.ropes[0].factor);
    model_free(&m), model_free(&again);
    arrfree(out);
}

/* Refusals are those of the loader; unknown keys, and those that the shape does not use. */
static void test_synth_refusals(void) {
    static const struct {
        const char *args, *said;
    } t[] = {
        {"glm-5:expert_count=abc", ": metadata key 'glm-dsa.expert_count' is not an integer\n"},
        {"glm-5:expert_count=", ": metadata key 'glm-dsa.expert_count' is not an integer\n"},
        {"glm-5:expert_count=-1", ": metadata key 'glm-dsa.expert_count' is -1, expected 1 to 1024\n"},
        {"glm-5:context_length=5000000000", "'glm-dsa.context_length' is 5000000000, expected 1 to 268435456\n"},
        {"glm-5:expert_used_count=8*9",
         "'glm-dsa.expert_used_count' has 9 values, expected one for each of 79 layers\n"},
        {"glm-5:attention.head_count=64*,x", "metadata key 'glm-dsa.attention.head_count' is not an integer\n"},
        {"glm-5:attention.head_count=64*513", "has 513 values, expected one for each of 79 layers\n"},
        {"glm-5:attention.q_lora_rank=8:9", "metadata key 'glm-dsa.attention.q_lora_rank' differs between layers\n"},
        {"glm-5:rope.freq_base=inf", "metadata key 'glm-dsa.rope.freq_base' is inf, expected 1 to 1e+12\n"},
        {"glm-5:rope.freq_base=1e4x", "metadata key 'glm-dsa.rope.freq_base' is not a number\n"},
        {"glm-5:expert_weights_norm=1", "metadata key 'glm-dsa.expert_weights_norm' is not a boolean\n"},
        {"glm-5:rope.scaling.type=ntk", "'glm-dsa.rope.scaling.type' is 'ntk'; known are none, linear and yarn\n"},
        {"glm-5:rope.dimension_count=256", "metadata key 'glm-dsa.rope.dimension_count' is 256, expected 2 to 255\n"},
        {"glm-5:vocab_size=0", "metadata key 'glm-dsa.vocab_size' is 0, expected 1 to 16777216\n"},
        {"glm-5:expert_shared_count=600", "expert_shared_feed_forward_length' is 1228800 by default, expected 1 to "},
        {"minimax-m2.5:leading_dense_block_count=2", "metadata key 'minimax-m2.feed_forward_length' is missing\n"},
        {"deepseek-v4:hash_layer_count=62", "metadata key 'deepseek4.hash_layer_count' is 62, expected 0 to 61\n"},
        {"deepseek-v4:attention.compress_ratios=0*,4", "has 4 for prediction layer 61, expected 0\n"},
        {"olmoe-1b-7b:attention.head_count_kv=3", ": layer 0 has 16 heads, expected a multiple of its 3 KV heads\n"},
        {"glm-5:kv_lora_rank=3", ": unknown key 'kv_lora_rank'; did you mean attention.kv_lora_rank?\n"},
        {"glm-5:expert_cuont=3", ": unknown key 'expert_cuont'; did you mean expert_count?\n"},
        {"glm-5:zzz=3", ": unknown key 'zzz'\n"},
        {"glm-5:ssm.state_size=64", ": the shape has no use for the key 'glm-dsa.ssm.state_size'\n"},
        {"glm-5:attention.key_length=64", ": the shape has no use for the key 'glm-dsa.attention.key_length'\n"},
        {"qwen3-30b-a3b:feed_forward_length=64", "no use for the key 'qwen3moe.feed_forward_length'\n"},
        {"qwen3.5-35b-a3b:rope.dimension_sections=1,2", "no use for the key 'qwen35moe.rope.dimension_sections'\n"},
        {"'glm-5:block_count=8 9'", ": expected glm-5, with layers=N from 1 to 7, experts=M from 8 to 256, backbone="},
        {"glm-5:block_count=8,layers=8", ": expected glm-5, with layers=N from 1 to 7, "},
        {"glm-5:expert_count=64,experts=65", "experts=M from 8 to 64, "},
        {"glm-5:block_count", "layers=N from 1 to 78, "},
        {"glm-5:expert_count=64,", "layers=N from 1 to 78, "},
        {"glm-5:attention.head_count=$(printf '%01000d' 1)", ": the keys after the colon have more than 999 bytes\n"}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[256];
        snprintf(cmd, sizeof cmd, MOE_BIN " --info --synth %s </dev/null", t[i].args);
        check_command(cmd, 2, "", t[i].said);
    }
    check_command(MOE_BIN " --info --synth glm-5:embedding_length=100 </dev/null", 1, "",
                  "rows of 100 elements are not whole NVFP4 blocks of 64");
}

/* What DeepSeek-V4.1 cannot be: layers that share keys of other tokens, choices of fewer keys than they have, rows of
 * n-grams that are not there, products that overflow. */
static void test_synth_sources(void) {
    static const struct {
        const char *keys;
        int rc;
        const char *said;
    } t[] = {
        {"attention.kv_source_layers=2,9,8", 2, "no number for each of 3 layers, expected 10 to 39 at index 2\n"},
        {"attention.kv_source_layers=2,8,10,14,20", 2,
         "kv_source_layers' has layer 10, which 'deepseek41.attention.index_"},
        {"attention.kv_source_layers=2,8,14", 2, "has no layer for the compressed keys of 1 tokens of layer 20\n"},
        {"attention.index_source_layers=0,2,8,14,20", 2, "has layer 0, which has no compressed keys\n"},
        {"attention.indexer.candidate_source_layer=21", 2, "is 21, expected a layer of 'deepseek41.attention.index_"},
        {"attention.indexer.candidate_source_layer=14", 2,
         ": layer 20 has compressed keys of 1 tokens, expected 2, as"},
        {"attention.indexer.candidate_topk_blocks=60", 2,
         "is 60, which leaves 473 of blocks of 8 keys, expected at le"},
        {"attention.compress_ratios=0*2,4*38", 2, "has 4 for layer 2, expected 0, 1 or 2\n"},
        {"nextn_predict_layers=1", 2, "'deepseek41.nextn_predict_layers' is 1, expected 0 to 0\n"},
        {"engram.layers=1,14,20,21,22", 2, "'deepseek41.engram.layers' has more than 4 layers\n"},
        {"engram.head_dim=48", 2, "'deepseek41.engram.head_dim' is 48, expected a multiple of 32\n"},
        {"engram.embedding_counts=384006167,384016682", 2, "384006167 for layer 1, expected at least 384006168\n"},
        {"engram.multipliers=3,5,7", 2,
         "'deepseek41.engram.multipliers' is missing or has no number for each of 8 tokens"},
        {"engram.head_count=30", 2, "'deepseek41.engram.head_count' is 30, expected 1 to 21\n"},
        {"engram.pad_token_id=200000", 1,
         "'deepseek41.engram.pad_token_id' is 200000, expected one of 129280 tokens\n"},
        {"engram.compressed_vocab_size=1000", 1, "compressed_vocab_size' is 1000, fewer than 129280 tokens\n"},
        {"engram.compressed_vocab_size=16000000", 1,
         "58737837727525, expected at most 576460752303 with 16000000 tok"}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[512];
        snprintf(cmd, sizeof cmd, MOE_BIN " --info --synth deepseek-v4.1-flash:%s </dev/null", t[i].keys);
        check_command(cmd, t[i].rc, "", t[i].said);
    }
}

#define TESTS_SYNTH                                                                                            \
    {"keys/table", test_keys_table}, {"keys/ranges", test_keys_ranges}, {"synth/lists", test_synth_lists},     \
        {"synth/layers", test_synth_layers}, {"synth/same", test_synth_same}, {"synth/keys", test_synth_keys}, \
        {"synth/refusals", test_synth_refusals}, {"synth/sources", test_synth_sources},
