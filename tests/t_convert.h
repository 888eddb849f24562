/* build/moe-convert: small Hugging Face directories written here, converted, and the GGUF read back. Truth is computed
 * from what was put into the safetensors file, with the formulas of the formats. */

/* ------------------------------------------------------------------------------------------------ a model directory */

enum hf_form { HF_BF16, HF_F16, HF_F32, HF_NVFP4, HF_CT_NVFP4, HF_FP8_TENSOR, HF_FP8_ROW, HF_FP8_BLOCK };

struct hf_tensor {
    char name[128], dtype[16], shape[48];
    uint8_t *data; /* stb_ds */
};

/* A directory in the making. Tensors stay in memory until hf_convert, so that a test can change any of them. */
struct hf {
    char dir[96];
    struct hf_tensor *t;        /* stb_ds */
    json_t *config, *tokenizer; /* written as config.json and tokenizer.json unless NULL */
    json_t *tokenizer_config, *generation;
    enum hf_form attn, experts; /* forms of the linear layers */
    int n_experts[4];           /* per layer; 0: dense */
    const char *prefix;         /* of tensor names */
    uint64_t rng;
    char *out, *err; /* of the last conversion; stb_ds */
    struct gguf g;
};

static struct hf_tensor *hf_find(struct hf *h, const char *name) {
    for (size_t i = 0; i < arrlenu(h->t); i++)
        if (!strcmp(h->t[i].name, name)) return &h->t[i];
    return NULL;
}

static void hf_put(uint8_t **data, const void *p, size_t n) { sb_put((char **)data, p, n); }

static struct hf_tensor *hf_add(struct hf *h, const char *name, const char *dtype, const char *shape, const void *p,
                                size_t n) {
    struct hf_tensor t = {.data = NULL};
    snprintf(t.name, sizeof t.name, "%s%s", h->prefix ? h->prefix : "", name);
    snprintf(t.dtype, sizeof t.dtype, "%s", dtype);
    snprintf(t.shape, sizeof t.shape, "%s", shape);
    hf_put(&t.data, p, n);
    arrput(h->t, t);
    return &arrlast(h->t);
}

static void hf_drop(struct hf *h, const char *name) {
    struct hf_tensor *t = hf_find(h, name);
    if (!CHECK(t, "no tensor %s", name)) return;
    arrfree(t->data);
    arrdel(h->t, t - h->t);
}

/* rows x cols of random values around 0.05, plain. */
static void hf_plain(struct hf *h, const char *name, const char *shape, size_t n, enum hf_form form) {
    struct hf_tensor *t = hf_add(h, name, form == HF_F32 ? "F32" : form == HF_F16 ? "F16" : "BF16", shape, NULL, 0);
    for (size_t i = 0; i < n; i++) {
        float v = (float)(rng_uniform(&h->rng) - 0.5) * 0.2f;
        uint16_t b = form == HF_F16 ? f16_from_f32(v) : bf16_from_f32(v);
        if (form == HF_F32) hf_put(&t->data, &v, 4);
        else hf_put(&t->data, &b, 2);
    }
}

static void hf_scalar(struct hf *h, const char *x, const char *side, float v) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", x, side);
    hf_add(h, name, "F32", "[]", &v, 4);
}

/* A linear layer x of any form, random. */
static void hf_linear(struct hf *h, const char *x, size_t rows, size_t cols, enum hf_form form) {
    char name[160], shape[48];
    bool fp4 = form == HF_NVFP4 || form == HF_CT_NVFP4;
    snprintf(name, sizeof name, "%s.%s", x, form == HF_CT_NVFP4 ? "weight_packed" : "weight");
    snprintf(shape, sizeof shape, "[%zu,%zu]", rows, fp4 ? cols / 2 : cols);
    if (form <= HF_F32) {
        hf_plain(h, name, shape, rows * cols, form);
        return;
    }
    struct hf_tensor *w = hf_add(h, name, fp4 ? "U8" : "F8_E4M3", shape, NULL, 0);
    for (size_t i = 0; i < rows * cols / (fp4 ? 2 : 1); i++) {
        uint8_t b = (uint8_t)rng_next(&h->rng);
        arrput(w->data, !fp4 && (b & 0x7f) == 0x7f ? 0 : b);
    }
    snprintf(name, sizeof name, "%s.%s", x, form == HF_FP8_BLOCK ? "weight_scale_inv" : "weight_scale");
    if (fp4) {
        snprintf(shape, sizeof shape, "[%zu,%zu]", rows, cols / 16);
        struct hf_tensor *s = hf_add(h, name, "F8_E4M3", shape, NULL, 0);
        for (size_t i = 0; i < rows * cols / 16; i++) arrput(s->data, (uint8_t)(rng_next(&h->rng) % 0x7f));
        float v = (float)(1e-4 + 1e-4 * rng_uniform(&h->rng));
        hf_scalar(h, x, form == HF_NVFP4 ? "weight_scale_2" : "weight_global_scale", form == HF_NVFP4 ? v : 1 / v);
        hf_scalar(h, x, form == HF_NVFP4 ? "input_scale" : "input_global_scale", form == HF_NVFP4 ? 20 * v : 0.05f / v);
        return;
    }
    size_t r = form == HF_FP8_ROW ? rows : form == HF_FP8_BLOCK ? (rows + 127) / 128 : 1;
    size_t c = form == HF_FP8_BLOCK ? (cols + 127) / 128 : 1;
    snprintf(shape, sizeof shape, form == HF_FP8_TENSOR ? "[]" : "[%zu,%zu]", r, c);
    struct hf_tensor *s = hf_add(h, name, "F32", shape, NULL, 0);
    for (size_t i = 0; i < r * c; i++) {
        float v = (float)(1e-3 + 1e-3 * rng_uniform(&h->rng));
        hf_put(&s->data, &v, 4);
    }
}

static void hf_write(struct hf *h, const char *file, const void *p, size_t n) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", h->dir, file);
    FILE *f = fopen(path, "w");
    if (CHECK(f && (!n || fwrite(p, 1, n, f) == n), "cannot write %s", path)) fclose(f);
}

static void hf_json(struct hf *h, const char *file, json_t *j) {
    char *s = j ? json_dumps(j, JSON_COMPACT) : NULL;
    if (s) hf_write(h, file, s, strlen(s));
    free(s);
}

/* Tensors first to last-1 as one safetensors file. */
static void hf_shard(struct hf *h, const char *file, size_t first, size_t last) {
    char *s = NULL;
    uint64_t at = 0;
    sb_puts(&s, "01234567{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = first; i < last; i++) {
        const struct hf_tensor *t = &h->t[i];
        sb_printf(&s, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}", t->name, t->dtype,
                  t->shape, (unsigned long long)at, (unsigned long long)(at + arrlenu(t->data)));
        at += arrlenu(t->data);
    }
    sb_puts(&s, "}");
    while (arrlenu(s) % 8) sb_puts(&s, " ");
    uint64_t n = arrlenu(s) - 8;
    memcpy(s, &n, 8);
    for (size_t i = first; i < last; i++) sb_put(&s, (char *)h->t[i].data, arrlenu(h->t[i].data));
    hf_write(h, file, s, arrlenu(s));
    arrfree(s);
}

/* Overwrites or adds the keys of a JSON text; null removes nothing but means absent. */
static void hf_set(json_t *j, const char *text) {
    json_error_t e;
    json_t *more = json_loads(text, 0, &e);
    if (CHECK(more, "%s: %s", text, e.text)) json_object_update(j, more);
    json_decref(more);
}

#define HF_VOCAB 300 /* 256 bytes, 3 merged, 3 added, the rest unused */

/* Byte b in GPT-2's alphabet. */
static const char *hf_byte(int b) {
    static char s[4];
    int cp = b < 33 ? 256 + b : b < 127 ? b : b < 161 ? 256 + 33 + b - 127 : b == 173 ? 256 + 67 : b;
    uint8_t u[4];
    int n = (int)utf8proc_encode_char(cp, u);
    memcpy(s, u, (size_t)n);
    s[n] = 0;
    return s;
}

static void hf_tokenizer(struct hf *h) {
    json_t *v = json_object();
    for (int b = 0; b < 256; b++) json_object_set_new(v, hf_byte(b), json_integer(b));
    json_object_set_new(v, "he", json_integer(256));
    json_object_set_new(v, "\xc4\xa0he", json_integer(257));
    json_object_set_new(v, "\xc4\xa0hel", json_integer(258));
    h->tokenizer = json_pack(
        "{s:{s:s,s:o,s:[s,s,s]},s:[{s:i,s:s,s:b},{s:i,s:s,s:b},{s:i,s:s,s:b}],s:{s:s},s:{s:s},"
        "s:{s:s,s:[{s:s,s:{s:s},s:s,s:b},{s:s,s:b,s:b}]}}",
        "model", "type", "BPE", "vocab", v, "merges", "h e", "\xc4\xa0 he", "\xc4\xa0he l", "added_tokens", "id", 259,
        "content", "<|endoftext|>", "special", 1, "id", 260, "content", "<|im_end|>", "special", 0, "id", 261,
        "content", "<think>", "special", 0, "normalizer", "type", "NFC", "decoder", "type", "ByteLevel",
        "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split", "pattern", "Regex",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
        "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
        "behavior", "Isolated", "invert", 0, "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0);
    CHECK(h->tokenizer, "the tokenizer does not build");
    h->tokenizer_config =
        json_pack("{s:s,s:s,s:b}", "eos_token", "<|im_end|>", "chat_template", "{{ messages }}", "add_bos_token", 0);
    h->generation =
        json_pack("{s:[i,i],s:b,s:f,s:i}", "eos_token_id", 260, 259, "do_sample", 1, "temperature", 0.5, "top_k", 7);
}

/* Starts a directory; the model is added by hf_qwen3 or hf_deepseek. */
static void hf_begin(struct hf *h, const char *name) {
    memset(h, 0, sizeof *h);
    snprintf(h->dir, sizeof h->dir, "%s/%s", test_dir(), name);
    mkdir(h->dir, 0777);
    h->rng = 42;
    h->n_experts[0] = h->n_experts[1] = 4;
    hf_tokenizer(h);
}

#define HF_EMBD 64
#define HF_FF   128 /* of dense layers and of experts */

static void hf_ffn(struct hf *h, int layer) {
    static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
    char x[96];
    int n = h->n_experts[layer];
    for (int p = 0; p < 3 && !n; p++) {
        snprintf(x, sizeof x, "model.layers.%d.mlp.%s", layer, part[p]);
        hf_linear(h, x, p < 2 ? HF_FF : HF_EMBD, p < 2 ? HF_EMBD : HF_FF, h->experts);
    }
    if (!n) return;
    snprintf(x, sizeof x, "model.layers.%d.mlp.gate", layer);
    hf_linear(h, x, (size_t)n, HF_EMBD, HF_BF16);
    for (int e = 0; e < n; e++)
        for (int p = 0; p < 3; p++) {
            snprintf(x, sizeof x, "model.layers.%d.mlp.experts.%d.%s", layer, e, part[p]);
            hf_linear(h, x, p < 2 ? HF_FF : HF_EMBD, p < 2 ? HF_EMBD : HF_FF, h->experts);
        }
}

/* Replaces the experts of a layer by tensors of rank 3 with the same values: gate_up_proj, down_proj and, at numbers and
 * scales beside the weights, their names with _weight_scale and the like. */
static void hf_fuse(struct hf *h, int layer) {
    static const char *const sides[] = {"weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale"};
    const int n = h->n_experts[layer];
    const int tensors = h->experts == HF_FP8_BLOCK ? 1 : 2; /* the 64 rows of down_proj are half a block */
    for (int k = 0; k < tensors; k++)
        for (size_t side = 0; side < sizeof sides / sizeof *sides; side++) {
            char name[128], shape[48], dtype[16];
            const int parts = k ? 1 : 2;
            int rows = 0, cols = 0;
            uint8_t *data = NULL;
            for (int i = 0; i < n * parts; i++) {
                snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.%s", layer, i / parts,
                         k       ? "down_proj"
                         : i % 2 ? "up_proj"
                                 : "gate_proj",
                         sides[side]);
                struct hf_tensor *t = hf_find(h, name);
                if (!t) continue;
                hf_put(&data, t->data, arrlenu(t->data));
                snprintf(dtype, sizeof dtype, "%s", t->dtype);
                if (sscanf(t->shape, "[%d,%d]", &rows, &cols) < 2) rows = cols = 0;
                hf_drop(h, name);
            }
            if (!data) continue;
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s%s%s", layer, k ? "down_proj" : "gate_up_proj",
                     side ? "_" : "", side ? sides[side] + (side == 2 ? strlen("weight_") : 0) : "");
            if (rows) snprintf(shape, sizeof shape, "[%d,%d,%d]", n, parts * rows, cols);
            else snprintf(shape, sizeof shape, k ? "[%d]" : "[%d,2,1]", n);
            hf_add(h, name, dtype, shape, data, arrlenu(data));
            arrfree(data);
        }
}

/* The parts that both families have: embedding, final norm, head, two norms of each layer. */
static void hf_frame(struct hf *h, int layers) {
    char name[96];
    hf_linear(h, "model.embed_tokens", HF_VOCAB, HF_EMBD, HF_BF16);
    hf_linear(h, "lm_head", HF_VOCAB, HF_EMBD, HF_BF16);
    hf_plain(h, "model.norm.weight", "[64]", HF_EMBD, HF_BF16);
    for (int l = 0; l < layers; l++)
        for (int k = 0; k < 2; k++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l,
                     k ? "post_attention_layernorm" : "input_layernorm");
            hf_plain(h, name, "[64]", HF_EMBD, HF_BF16);
        }
}

/* Two layers, 3 heads of 64 over 1 KV head, 4 experts of which 2 are used. */
static void hf_qwen3(struct hf *h) {
    static const struct {
        const char *name;
        size_t rows, cols;
    } part[] = {{"q_proj", 192, HF_EMBD}, {"k_proj", 64, HF_EMBD}, {"v_proj", 64, HF_EMBD}, {"o_proj", HF_EMBD, 192}};
    char x[96];
    h->config = json_object();
    hf_set(h->config,
           "{\"model_type\":\"qwen3_moe\",\"vocab_size\":300,\"hidden_size\":64,\"num_hidden_layers\":2,"
           "\"num_attention_heads\":3,\"num_key_value_heads\":1,\"head_dim\":64,\"intermediate_size\":128,"
           "\"moe_intermediate_size\":128,\"num_experts\":4,\"num_experts_per_tok\":2,\"norm_topk_prob\":true,"
           "\"max_position_embeddings\":4096,\"rope_theta\":1000000.0,\"rms_norm_eps\":1e-6,"
           "\"hidden_act\":\"silu\",\"eos_token_id\":260}");
    hf_frame(h, 2);
    for (int l = 0; l < 2; l++) {
        for (int k = 0; k < 4; k++) {
            snprintf(x, sizeof x, "model.layers.%d.self_attn.%s", l, part[k].name);
            hf_linear(h, x, part[k].rows, part[k].cols, h->attn);
        }
        for (int k = 0; k < 2; k++) {
            snprintf(x, sizeof x, "model.layers.%d.self_attn.%c_norm.weight", l, k ? 'k' : 'q');
            hf_plain(h, x, "[64]", 64, HF_BF16);
        }
        hf_ffn(h, l);
    }
}

/* A dense layer, a mixture layer and a layer for multi-token prediction; 2 heads of 32 + 16, values of 32. */
static void hf_deepseek(struct hf *h) {
    static const struct {
        const char *name;
        size_t rows, cols;
    } part[] = {{"self_attn.q_a_proj", 64, HF_EMBD},
                {"self_attn.q_b_proj", 96, 64},
                {"self_attn.kv_a_proj_with_mqa", 80, HF_EMBD},
                {"self_attn.kv_b_proj", 128, 64},
                {"self_attn.o_proj", HF_EMBD, 64},
                {"mlp.shared_experts.gate_proj", HF_FF, HF_EMBD},
                {"mlp.shared_experts.up_proj", HF_FF, HF_EMBD},
                {"mlp.shared_experts.down_proj", HF_EMBD, HF_FF}};
    char x[96];
    float bias[4] = {0.5f, -0.25f, 0.125f, 1.0f};
    h->config = json_object();
    hf_set(h->config, "{\"model_type\":\"deepseek_v3\",\"vocab_size\":300,\"hidden_size\":64,\"num_hidden_layers\":2,"
                      "\"num_attention_heads\":2,\"num_key_value_heads\":2,\"q_lora_rank\":64,\"kv_lora_rank\":64,"
                      "\"qk_nope_head_dim\":32,\"qk_rope_head_dim\":16,\"v_head_dim\":32,\"intermediate_size\":128,"
                      "\"moe_intermediate_size\":128,\"n_routed_experts\":4,\"num_experts_per_tok\":2,"
                      "\"n_shared_experts\":1,\"n_group\":2,\"topk_group\":1,\"norm_topk_prob\":true,"
                      "\"routed_scaling_factor\":2.5,\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\","
                      "\"first_k_dense_replace\":1,\"num_nextn_predict_layers\":1,\"max_position_embeddings\":4096,"
                      "\"rope_theta\":10000.0,\"rms_norm_eps\":1e-6,\"hidden_act\":\"silu\",\"eos_token_id\":260}");
    h->n_experts[0] = 0;
    h->n_experts[1] = h->n_experts[2] = 4;
    hf_frame(h, 3);
    for (int l = 0; l < 3; l++) {
        for (int k = 0; k < (l ? 8 : 5); k++) {
            snprintf(x, sizeof x, "model.layers.%d.%s", l, part[k].name);
            hf_linear(h, x, part[k].rows, part[k].cols, k < 5 ? h->attn : h->experts);
        }
        for (int k = 0; k < 2; k++) {
            snprintf(x, sizeof x, "model.layers.%d.self_attn.%s_a_layernorm.weight", l, k ? "kv" : "q");
            hf_plain(h, x, "[64]", 64, HF_BF16);
        }
        hf_ffn(h, l);
        snprintf(x, sizeof x, "model.layers.%d.mlp.gate.e_score_correction_bias", l);
        if (l) hf_add(h, x, "F32", "[4]", bias, sizeof bias);
    }
    static const char *const norms[] = {"enorm", "hnorm", "shared_head.norm"};
    for (int k = 0; k < 3; k++) {
        snprintf(x, sizeof x, "model.layers.2.%s.weight", norms[k]);
        hf_plain(h, x, "[64]", HF_EMBD, HF_BF16);
    }
    hf_linear(h, "model.layers.2.eh_proj", HF_EMBD, 2 * HF_EMBD, HF_BF16);
}

/* Sizes of a delta net: 2 heads of keys of 24 and 6 heads of values of 32, so that no two orders of heads agree. */
enum { HF_N_KEY = 2, HF_N_VALUE = 6, HF_KEY = HF_N_KEY * 24, HF_VALUE = HF_N_VALUE * 32 };

/* The MTP layer (number 2) of a model by hf_delta: its tensors below `mtp`, such as "mtp.". */
static void hf_delta_mtp(struct hf *h, const char *mtp) {
    static const char *const norms[] = {"pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"};
    char name[96];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s%s.weight", mtp, norms[i]);
        hf_plain(h, name, "[64]", HF_EMBD, HF_BF16);
    }
    snprintf(name, sizeof name, "%sfc", mtp);
    hf_linear(h, name, HF_EMBD, 2 * HF_EMBD, HF_BF16);
    for (size_t i = 0; i < arrlenu(h->t); i++) {
        const char *rest = h->t[i].name + strlen("model.layers.2.");
        if (strncmp(h->t[i].name, "model.layers.2.", strlen("model.layers.2."))) continue;
        snprintf(name, sizeof name, "%slayers.0.%.60s", mtp, rest);
        snprintf(h->t[i].name, sizeof h->t[i].name, "%s", name);
    }
}

/* Qwen3.5, or (next) Qwen3-Next: a layer with a delta net, a layer with gated attention, and a layer for multi-token
 * prediction with tensors below `mtp`, NULL: none. */
static void hf_delta(struct hf *h, bool next, const char *mtp) {
    static const struct {
        const char *name;
        size_t rows, cols;
        int on; /* 0: attention; 1: delta net; 2: of Qwen3.5; 3: of Qwen3-Next; 4: shared expert */
    } part[] = {{"self_attn.q_proj", 256, HF_EMBD, 0},
                {"self_attn.k_proj", 64, HF_EMBD, 0},
                {"self_attn.v_proj", 64, HF_EMBD, 0},
                {"self_attn.o_proj", HF_EMBD, 128, 0},
                {"linear_attn.out_proj", HF_EMBD, HF_VALUE, 1},
                {"linear_attn.in_proj_qkv", 2 * HF_KEY + HF_VALUE, HF_EMBD, 2},
                {"linear_attn.in_proj_z", HF_VALUE, HF_EMBD, 2},
                {"linear_attn.in_proj_b", HF_N_VALUE, HF_EMBD, 2},
                {"linear_attn.in_proj_a", HF_N_VALUE, HF_EMBD, 2},
                {"linear_attn.in_proj_qkvz", 2 * HF_KEY + 2 * HF_VALUE, HF_EMBD, 3},
                {"linear_attn.in_proj_ba", 2 * HF_N_VALUE, HF_EMBD, 3},
                {"mlp.shared_expert.gate_proj", HF_FF, HF_EMBD, 4},
                {"mlp.shared_expert.up_proj", HF_FF, HF_EMBD, 4},
                {"mlp.shared_expert.down_proj", HF_EMBD, HF_FF, 4}};
    static const struct {
        const char *name, *shape;
        size_t n;
        bool delta;
    } vector[] = {{"self_attn.q_norm.weight", "[64]", 64, false},
                  {"self_attn.k_norm.weight", "[64]", 64, false},
                  {"linear_attn.A_log", "[6]", HF_N_VALUE, true},
                  {"linear_attn.dt_bias", "[6]", HF_N_VALUE, true},
                  {"linear_attn.norm.weight", "[32]", 32, true},
                  {"linear_attn.conv1d.weight", "[288,1,4]", (size_t)(2 * HF_KEY + HF_VALUE) * 4, true}};
    const int layers = mtp ? 3 : 2;
    char x[96];
    h->config = json_object();
    hf_set(h->config, "{\"vocab_size\":300,\"hidden_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
                      "\"num_key_value_heads\":1,\"head_dim\":64,\"moe_intermediate_size\":128,\"num_experts\":4,"
                      "\"shared_expert_intermediate_size\":128,\"num_experts_per_tok\":2,\"linear_conv_kernel_dim\":4,"
                      "\"linear_key_head_dim\":24,\"linear_num_key_heads\":2,\"linear_value_head_dim\":32,"
                      "\"linear_num_value_heads\":6,\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-6,"
                      "\"hidden_act\":\"silu\",\"eos_token_id\":260}");
    hf_set(h->config, next ? "{\"model_type\":\"qwen3_next\",\"full_attention_interval\":2,\"rope_theta\":1e7,"
                             "\"partial_rotary_factor\":0.25,\"rope_scaling\":null,\"norm_topk_prob\":true,"
                             "\"mlp_only_layers\":[],\"decoder_sparse_step\":1,\"intermediate_size\":256}"
                           : "{\"model_type\":\"qwen3_5_moe_text\",\"layer_types\":[\"linear_attention\","
                             "\"full_attention\"],\"full_attention_interval\":4,\"mtp_num_hidden_layers\":1,"
                             "\"attn_output_gate\":true,\"rope_parameters\":{\"rope_theta\":1e7,\"rope_type\":"
                             "\"default\",\"mrope_section\":[3,3,2],\"mrope_interleaved\":true}}");
    h->n_experts[2] = 4;
    hf_frame(h, layers);
    for (int l = 0; l < layers; l++) {
        for (size_t k = 0; k < sizeof part / sizeof *part; k++) {
            const int on = part[k].on;
            snprintf(x, sizeof x, "model.layers.%d.%s", l, part[k].name);
            if (on == 4 ? h->n_experts[l] : l ? !on : on == 1 || on == (next ? 3 : 2))
                hf_linear(h, x, part[k].rows, part[k].cols,
                          part[k].rows < 16 ? HF_BF16
                          : on == 4         ? h->experts
                                            : h->attn);
        }
        for (size_t k = 0; k < sizeof vector / sizeof *vector; k++) {
            snprintf(x, sizeof x, "model.layers.%d.%s", l, vector[k].name);
            if (vector[k].delta == !l) hf_plain(h, x, vector[k].shape, vector[k].n, HF_BF16);
        }
        snprintf(x, sizeof x, "model.layers.%d.mlp.shared_expert_gate.weight", l);
        if (h->n_experts[l]) hf_plain(h, x, "[1,64]", HF_EMBD, HF_BF16);
        hf_ffn(h, l);
    }
    if (mtp) hf_delta_mtp(h, mtp);
}

/* Writes what is not there yet and runs the converter with `extra`; its exit code. h->out and h->err hold what it said.
 * */
static int hf_run(struct hf *h, const char *extra) {
    char cmd[512];
    hf_json(h, "config.json", h->config);
    hf_json(h, "tokenizer.json", h->tokenizer);
    hf_json(h, "tokenizer_config.json", h->tokenizer_config);
    hf_json(h, "generation_config.json", h->generation);
    arrsetlen(h->out, 0);
    arrsetlen(h->err, 0);
    snprintf(cmd, sizeof cmd, CONVERT_BIN " %s %s", h->dir, extra);
    int rc = run_command(cmd, &h->out, &h->err);
    sb_cstr(&h->out), sb_cstr(&h->err);
    return rc;
}

static int hf_convert_to(struct hf *h, const char *file) {
    char extra[256];
    hf_shard(h, "model.safetensors", 0, arrlenu(h->t));
    snprintf(extra, sizeof extra, "-o %s/%s", h->dir, file);
    return hf_run(h, extra);
}

/* Converts and opens the result. */
static bool hf_convert(struct hf *h) {
    char path[256], err[ERR_MAX];
    int rc = hf_convert_to(h, "out.gguf");
    if (!CHECK(rc == 0, "%s: exit %d: %s", h->dir, rc, h->err)) return false;
    snprintf(path, sizeof path, "%s/out.gguf", h->dir);
    gguf_close(&h->g);
    return CHECK(!gguf_open(&h->g, path, err, sizeof err), "%s", err);
}

static void hf_end(struct hf *h) {
    for (size_t i = 0; i < arrlenu(h->t); i++) arrfree(h->t[i].data);
    arrfree(h->t);
    arrfree(h->out);
    arrfree(h->err);
    json_decref(h->config);
    json_decref(h->tokenizer);
    json_decref(h->tokenizer_config);
    json_decref(h->generation);
    gguf_close(&h->g);
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf %s", h->dir);
    CHECK(!system(cmd), "%s", cmd);
}

/* ----------------------------------------------------------------------------------------------------- reading back */

static int64_t key_int(const struct gguf *g, const char *key) {
    int64_t v = INT64_MIN;
    const struct gguf_kv *kv = gguf_find(g, key);
    CHECK(kv && gguf_elem_int(kv, 0, &v), "%s is missing or no integer", key);
    return v;
}

static double key_num(const struct gguf *g, const char *key) {
    double v = NAN;
    const struct gguf_kv *kv = gguf_find(g, key);
    CHECK(kv && gguf_elem_f64(kv, 0, &v), "%s is missing or no number", key);
    return v;
}

static bool key_is(const struct gguf *g, const char *key, const char *text) {
    struct gguf_str s = {"", 0};
    gguf_get_str(g, key, &s);
    return gguf_str_eq(s, text);
}

/* String i of an array; valid until the next call. */
static const char *key_string(const struct gguf *g, const char *key, uint64_t i) {
    static char s[256];
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv || i >= kv->n) return "(none)";
    const uint8_t *p = kv->data;
    struct gguf_str v = {"", 0};
    for (uint64_t k = 0; k <= i; k++) v = gguf_next_str(&p);
    snprintf(s, sizeof s, "%.*s", (int)v.n, v.p);
    return s;
}

/* The tensor, whose type and shape are checked; NULL after a failed check. */
static const struct gguf_tensor *out_tensor(const struct gguf *g, const char *name, uint32_t type, uint64_t a,
                                            uint64_t b, uint64_t c) {
    const struct gguf_tensor *t = gguf_find_tensor(g, name);
    if (!CHECK(t, "%s is missing", name)) return NULL;
    bool ok = t->type == type && t->ne[0] == a && t->ne[1] == b && t->ne[2] == c;
    CHECK(ok, "%s: type %u, %llu x %llu x %llu", name, t->type, (unsigned long long)t->ne[0],
          (unsigned long long)t->ne[1], (unsigned long long)t->ne[2]);
    return ok ? t : NULL;
}

/* Whether an array of booleans is all false. */
static bool all_false(const struct gguf_kv *kv) {
    bool any = kv->type != GGUF_V_BOOL;
    for (uint64_t i = 0; i < kv->n; i++) any |= kv->data[i];
    return !any;
}

/* The exact value without outer scale of element (r, c) of a layer as it was put into the directory. */
static float hf_value(struct hf *h, const char *x, enum hf_form form, size_t cols, size_t r, size_t c) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", x, form == HF_CT_NVFP4 ? "weight_packed" : "weight");
    const struct hf_tensor *w = hf_find(h, name);
    snprintf(name, sizeof name, "%s.%s", x, form == HF_FP8_BLOCK ? "weight_scale_inv" : "weight_scale");
    const struct hf_tensor *s = hf_find(h, name);
    size_t i = r * cols + c;
    float v;
    uint16_t b;
    if (!CHECK(w, "no tensor of %s", x)) return 0;
    switch (form) {
    case HF_F32: memcpy(&v, w->data + 4 * i, 4); return v;
    case HF_F16: memcpy(&b, w->data + 2 * i, 2); return f16_to_f32(b);
    case HF_BF16: memcpy(&b, w->data + 2 * i, 2); return bf16_to_f32(b);
    case HF_NVFP4:
    case HF_CT_NVFP4: return e2m1_to_f32(w->data[i / 2] >> 4 * (c & 1) & 15) * e4m3_to_f32(s->data[i / 16]);
    case HF_FP8_TENSOR: return e4m3_to_f32(w->data[i]);
    default: break;
    }
    size_t at = form == HF_FP8_ROW ? r : r / 128 * ((cols + 127) / 128) + c / 128;
    memcpy(&v, s->data + 4 * at, 4);
    return bf16_to_f32(bf16_from_f32(e4m3_to_f32(w->data[i]) * v));
}

/* Compares slice e of an output with the layer x, bit by bit (0 and -0 are equal). */
static void check_slice(struct hf *h, const struct gguf_tensor *t, uint64_t e, const char *x, enum hf_form form) {
    if (!t) return;
    size_t cols = t->ne[0], rows = t->ne[1], bad = 0;
    float *row = xmalloc(cols * sizeof *row);
    for (size_t r = 0; r < rows && !bad; r++) {
        size_t stride = gguf_row_bytes(t->type, cols);
        gguf_dequantize_row(t->type, t->data + (e * rows + r) * stride, row, cols);
        for (size_t c = 0; c < cols; c++) bad += row[c] != hf_value(h, x, form, cols, r, c);
        CHECK(!bad, "%s: row %zu differs", x, r);
    }
    free(row);
}

static float hf_side(struct hf *h, const char *x, const char *side) {
    char name[128];
    float v = NAN;
    snprintf(name, sizeof name, "%s.%s", x, side);
    const struct hf_tensor *t = hf_find(h, name);
    if (CHECK(t, "no %s", name)) memcpy(&v, t->data, 4);
    return v;
}

static float out_f32(const struct gguf *g, const char *name, uint64_t n, uint64_t i) {
    const struct gguf_tensor *t = out_tensor(g, name, GGUF_F32, n, 1, 1);
    return t ? f32_from_bits(gguf_rd32(t->data + 4 * i)) : NAN;
}

/* ------------------------------------------------------------------------------------------------------------ tests */

/* Every form of linear layer: type, bits, scales. */
static void test_convert_forms(void) {
    static const struct {
        enum hf_form form;
        uint32_t type;
        const char *scale; /* that becomes .scale, or NULL */
    } f[] = {{HF_BF16, GGUF_BF16, NULL},
             {HF_F16, GGUF_F16, NULL},
             {HF_F32, GGUF_F32, NULL},
             {HF_NVFP4, GGUF_NVFP4, "weight_scale_2"},
             {HF_CT_NVFP4, GGUF_NVFP4, "weight_global_scale"},
             {HF_FP8_TENSOR, GGUF_BF16, "weight_scale"},
             {HF_FP8_ROW, GGUF_BF16, NULL},
             {HF_FP8_BLOCK, GGUF_BF16, NULL}};
    for (size_t k = 0; k < sizeof f / sizeof *f; k++) {
        struct hf h;
        bool ct = f[k].form == HF_CT_NVFP4, fp4 = ct || f[k].form == HF_NVFP4;
        hf_begin(&h, "forms");
        h.attn = h.experts = f[k].form;
        hf_qwen3(&h);
        if (hf_convert(&h)) {
            const char *q = "model.layers.1.self_attn.q_proj", *d = "model.layers.1.mlp.experts.3.down_proj";
            check_slice(&h, out_tensor(&h.g, "blk.1.attn_q.weight", f[k].type, 64, 192, 1), 0, q, f[k].form);
            check_slice(&h, out_tensor(&h.g, "blk.1.attn_output.weight", f[k].type, 192, 64, 1), 0,
                        "model.layers.1.self_attn.o_proj", f[k].form);
            check_slice(&h, out_tensor(&h.g, "blk.1.ffn_down_exps.weight", f[k].type, 128, 64, 4), 3, d, f[k].form);
            check_slice(&h, out_tensor(&h.g, "blk.0.ffn_up_exps.weight", f[k].type, 64, 128, 4), 1,
                        "model.layers.0.mlp.experts.1.up_proj", f[k].form);
            CHECK(!gguf_find_tensor(&h.g, "blk.1.attn_q.scale") == !f[k].scale, "form %d: .scale", f[k].form);
            if (f[k].scale) {
                float a = hf_side(&h, q, f[k].scale), b = hf_side(&h, d, f[k].scale);
                CHECK(same_bits(out_f32(&h.g, "blk.1.attn_q.scale", 1, 0), ct ? 1 / a : a), "form %d", f[k].form);
                CHECK(same_bits(out_f32(&h.g, "blk.1.ffn_down_exps.scale", 4, 3), ct ? 1 / b : b), "form %d",
                      f[k].form);
            }
            CHECK(!gguf_find_tensor(&h.g, "blk.1.attn_q.input_scale") == !fp4, "form %d: .input_scale", f[k].form);
            if (fp4) {
                float a = hf_side(&h, d, ct ? "input_global_scale" : "input_scale");
                CHECK(same_bits(out_f32(&h.g, "blk.1.ffn_down_exps.input_scale", 4, 3), ct ? 1 / a : a), "form %d",
                      f[k].form);
            }
        }
        hf_end(&h);
    }
}

static float hf_full(struct hf *h, const char *x, enum hf_form form, size_t cols, size_t r, size_t c);

/* Converts with more options and opens the result. */
static bool hf_convert_with(struct hf *h, const char *with, const char *file, struct gguf *g) {
    char extra[512], path[256], err[ERR_MAX];
    hf_shard(h, "model.safetensors", 0, arrlenu(h->t));
    snprintf(path, sizeof path, "%s/%s", h->dir, file);
    snprintf(extra, sizeof extra, "%s -o %s", with, path);
    const int rc = hf_run(h, extra);
    if (!CHECK(rc == 0, "%s: exit %d: %s", extra, rc, h->err)) return false;
    return CHECK(!gguf_open(g, path, err, sizeof err), "%s", err);
}

/* Logits of two files are the same bits, with every set of kernels, in one pass and token by token. */
static void check_same_logits(struct hf *h, const char *a, const char *b) {
    enum { N = 40 };
    const char *const file[2] = {a, b};
    struct model m[2];
    char path[256], err[ERR_MAX];
    int32_t ids[N];
    const struct kernels *k;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", h->dir, file[i]);
        if (!CHECK(!model_load(&m[i], path, err), "%s: %s", path, err)) return;
    }
    for (int i = 0; i < N; i++) ids[i] = (7 * i + 3) % m[0].n_vocab;
    for (size_t s = 0; (k = kt_set(s)); s++)
        for (int n = 1; n <= N; n += N - 1) {
            float *x = all_logits(&m[0], k, KV_F32, 1, ids, n), *y = all_logits(&m[1], k, KV_F32, 1, ids, n);
            CHECK(!memcmp(x, y, (size_t)n * (size_t)m[0].n_vocab * sizeof *x), "%s: %d tokens: other logits", k->name,
                  n);
            free(x), free(y);
        }
    model_free(&m[0]), model_free(&m[1]);
}

/* --backbone fp8: codes and scales are those of the source, whatever has whole blocks; the rest is as without the option.
 * Where scales are powers of two BF16 has the same weights, and logits are the same bits. */
static void test_convert_fp8(void) {
    static const enum hf_form forms[] = {HF_FP8_TENSOR, HF_FP8_ROW, HF_FP8_BLOCK};
    static const char d[] = "model.layers.1.mlp.experts.3.down_proj";
    struct gguf g;
    struct hf h;
    for (size_t k = 0; k < sizeof forms / sizeof *forms; k++) {
        float row[HF_FF];
        hf_begin(&h, "fp8");
        h.attn = h.experts = forms[k];
        hf_qwen3(&h);
        if (hf_convert_with(&h, "--backbone fp8", "fp8.gguf", &g)) {
            const struct gguf_tensor *t = out_tensor(&g, "blk.1.ffn_down_exps.weight", GGUF_FP8, HF_FF, HF_EMBD, 4);
            size_t bad = 0;
            for (size_t r = 0; r < HF_EMBD && t; r++) {
                gguf_dequantize_row(GGUF_FP8, t->data + (3 * HF_EMBD + r) * gguf_row_bytes(GGUF_FP8, HF_FF), row,
                                    HF_FF);
                for (size_t c = 0; c < HF_FF; c++)
                    bad += row[c] != (forms[k] == HF_FP8_TENSOR ? hf_value(&h, d, forms[k], HF_FF, r, c)
                                                                : hf_full(&h, d, forms[k], HF_FF, r, c));
            }
            CHECK(!bad, "form %d: %zu weights differ", (int)forms[k], bad);
            check_slice(&h, out_tensor(&g, "blk.1.attn_q.weight", GGUF_BF16, 64, 192, 1), 0,
                        "model.layers.1.self_attn.q_proj", forms[k]);
            const bool scale = gguf_find_tensor(&g, "blk.1.ffn_down_exps.scale");
            CHECK(scale == (forms[k] == HF_FP8_TENSOR), "form %d: .scale", (int)forms[k]);
            if (scale)
                CHECK(same_bits(out_f32(&g, "blk.1.ffn_down_exps.scale", 4, 3), hf_side(&h, d, "weight_scale")),
                      "scale");
            gguf_close(&g);
        }
        for (size_t i = 0; i < arrlenu(h.t); i++)
            for (size_t j = 0; strstr(h.t[i].name, "weight_scale") && j < arrlenu(h.t[i].data); j += 4) {
                const float power = ldexpf(1, -9 - (int)(j / 4 + i) % 3);
                memcpy(h.t[i].data + j, &power, 4);
            }
        if (hf_convert_with(&h, "", "bf16.gguf", &g)) gguf_close(&g);
        if (hf_convert_with(&h, "--backbone fp8", "fp8.gguf", &g)) {
            CHECK(gguf_find_tensor(&g, "blk.0.ffn_down_exps.weight")->type == GGUF_FP8, "no FP8");
            gguf_close(&g);
            check_same_logits(&h, "bf16.gguf", "fp8.gguf");
        }
        hf_end(&h);
    }
    static const struct {
        const char *options;
        uint32_t type; /* of experts */
    } c[] = {{"--backbone fp8 --quantize nvfp4", GGUF_NVFP4}, {"--backbone fp8 --keep ffn_down", GGUF_BF16}};
    for (size_t k = 0; k < 2; k++) {
        hf_begin(&h, "fp8");
        h.attn = HF_BF16, h.experts = HF_FP8_BLOCK;
        hf_qwen3(&h);
        if (hf_convert_with(&h, c[k].options, "out.gguf", &g)) {
            const struct gguf_tensor *t = gguf_find_tensor(&g, "blk.1.ffn_down_exps.weight");
            CHECK(t && t->type == c[k].type, "%s: type %u", c[k].options, t ? t->type : 0);
            gguf_close(&g);
        }
        hf_end(&h);
    }
    for (int k = 0; k < 2; k++) { /* what is no number */
        char name[128], extra[256];
        const float inf = INFINITY;
        hf_begin(&h, "fp8");
        h.experts = HF_FP8_BLOCK;
        hf_qwen3(&h);
        snprintf(name, sizeof name, "%s.%s", d, k ? "weight_scale_inv" : "weight");
        struct hf_tensor *t = hf_find(&h, name);
        if (k) memcpy(t->data, &inf, 4);
        else t->data[2 * HF_FF + 5] = 0xff;
        hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
        snprintf(extra, sizeof extra, "--backbone fp8 -o %s/out.gguf", h.dir);
        const int rc = hf_run(&h, extra);
        CHECK(rc == 1 && strstr(h.err, d) && strstr(h.err, k ? "row 0, block 0" : "row 2, block 0"), "exit %d: %s", rc,
              h.err);
        hf_end(&h);
    }
}

/* Whether moe loads a file that was written. */
static void check_loads(const char *path, const char *what) {
    struct model model;
    char err[ERR_MAX];
    if (CHECK(!model_load(&model, path, err), "%s: %s", what, err)) model_free(&model);
}

static bool ends_in(const char *s, const char *tail) {
    return strlen(s) >= strlen(tail) && !strcmp(s + strlen(s) - strlen(tail), tail);
}

/* Rounds a tensor of F32 to values that BF16 has, and stores them so. */
static void hf_narrow(struct hf_tensor *t) {
    const size_t n = arrlenu(t->data) / 4;
    for (size_t i = 0; i < n; i++) {
        float v;
        memcpy(&v, t->data + 4 * i, 4);
        const uint16_t b = bf16_from_f32(v);
        memcpy(t->data + 2 * i, &b, 2);
    }
    arrsetlen(t->data, 2 * n);
    snprintf(t->dtype, sizeof t->dtype, "BF16");
}

/* Value (r, c) of a layer as it was put into the directory, with all scales and without rounding. */
static float hf_full(struct hf *h, const char *x, enum hf_form form, size_t cols, size_t r, size_t c) {
    char name[128];
    float v;
    if (form == HF_FP8_TENSOR) return hf_value(h, x, form, cols, r, c) * hf_side(h, x, "weight_scale");
    if (form == HF_NVFP4) return hf_value(h, x, form, cols, r, c) * hf_side(h, x, "weight_scale_2");
    if (form == HF_CT_NVFP4) return hf_value(h, x, form, cols, r, c) * (1 / hf_side(h, x, "weight_global_scale"));
    if (form != HF_FP8_ROW && form != HF_FP8_BLOCK) return hf_value(h, x, form, cols, r, c);
    snprintf(name, sizeof name, "%s.%s", x, form == HF_FP8_BLOCK ? "weight_scale_inv" : "weight_scale");
    const struct hf_tensor *s = hf_find(h, name);
    const size_t at = form == HF_FP8_ROW ? r : r / 128 * ((cols + 127) / 128) + c / 128;
    uint16_t b;
    memcpy(&b, s->data + 2 * at, 2);
    if (!strcmp(s->dtype, "BF16")) v = bf16_to_f32(b);
    else memcpy(&v, s->data + 4 * at, 4);
    snprintf(name, sizeof name, "%s.weight", x);
    return e4m3_to_f32(hf_find(h, name)->data[r * cols + c]) * v;
}

/* Small matrices that quantize-everything tools write with scales: they become floats without NAME.scale, the table of
 * embeddings BF16 and what routes F32. The output matrix keeps its scale. */
static void test_convert_small(void) {
    static const enum hf_form forms[] = {HF_FP8_TENSOR, HF_FP8_ROW, HF_FP8_BLOCK, HF_NVFP4, HF_CT_NVFP4};
    static const struct {
        const char *x, *name;
        uint32_t type;
        size_t rows;
    } c[] = {{"model.embed_tokens", "token_embd", GGUF_BF16, HF_VOCAB},
             {"model.layers.0.mlp.gate", "blk.0.ffn_gate_inp", GGUF_F32, 4},
             {"model.layers.1.mlp.shared_expert_gate", "blk.1.ffn_gate_inp_shexp", GGUF_F32, 1},
             {"mtp.layers.0.mlp.gate", "blk.2.ffn_gate_inp", GGUF_F32, 4}};
    for (size_t k = 0; k < sizeof forms / sizeof *forms; k++) {
        struct hf h;
        char name[128];
        float row[HF_EMBD];
        hf_begin(&h, "small");
        hf_delta(&h, false, "mtp.");
        for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
            snprintf(name, sizeof name, "%s.weight", c[i].x);
            hf_drop(&h, name);
            hf_linear(&h, c[i].x, c[i].rows, HF_EMBD, forms[k]);
        }
        if (k % 2) /* scales of BF16 */
            for (size_t i = 0; i < arrlenu(h.t); i++)
                if (ends_in(h.t[i].name, "mlp.gate.weight_scale") && !strcmp(h.t[i].dtype, "F32")) hf_narrow(&h.t[i]);
        if (hf_convert(&h)) {
            for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
                size_t bad = 0;
                snprintf(name, sizeof name, "%s.weight", c[i].name);
                const struct gguf_tensor *t = out_tensor(&h.g, name, c[i].type, HF_EMBD, c[i].rows, 1);
                for (size_t r = 0; t && r < c[i].rows; r++) {
                    gguf_dequantize_row(t->type, t->data + r * gguf_row_bytes(t->type, HF_EMBD), row, HF_EMBD);
                    for (size_t j = 0; j < HF_EMBD; j++) {
                        const float v = hf_full(&h, c[i].x, forms[k], HF_EMBD, r, j);
                        bad += row[j] != (c[i].type == GGUF_BF16 ? bf16_to_f32(bf16_from_f32(v)) : v);
                    }
                }
                CHECK(!bad, "form %d: %zu values of %s differ", (int)forms[k], bad, name);
                snprintf(name, sizeof name, "%s.scale", c[i].name);
                CHECK(!gguf_find_tensor(&h.g, name), "%s is there", name);
            }
            snprintf(name, sizeof name, "%s/out.gguf", h.dir);
            check_loads(name, "small matrices");
        }
        hf_end(&h);
    }
    /* an MTP layer's copy of the embedding, scales included, and a scale with sizes of 1 between the others */
    for (int other = 0; other < 2; other++) {
        struct hf h;
        hf_begin(&h, "copies");
        hf_deepseek(&h);
        hf_drop(&h, "model.embed_tokens.weight");
        hf_linear(&h, "model.embed_tokens", HF_VOCAB, HF_EMBD, HF_FP8_BLOCK);
        const struct hf_tensor w = *hf_find(&h, "model.embed_tokens.weight"),
                               s = *hf_find(&h, "model.embed_tokens.weight_scale_inv");
        hf_add(&h, "model.layers.2.embed_tokens.weight", w.dtype, w.shape, w.data, arrlenu(w.data));
        hf_add(&h, "model.layers.2.embed_tokens.weight_scale_inv", s.dtype, "[3,1,1,1]", s.data, arrlenu(s.data));
        struct hf_tensor *scale = &arrlast(h.t);
        if (!other) snprintf(scale->shape, sizeof scale->shape, "%s", s.shape);
        if (hf_convert(&h)) {
            const struct gguf_tensor *t = gguf_find_tensor(&h.g, "blk.2.nextn.embed_tokens.weight");
            const bool copy = strstr(h.err, "1 copy of the model's embedding");
            CHECK(copy == !other && (t != NULL) == other, "%s", h.err);
            check_slice(&h, t, 0, "model.embed_tokens", HF_FP8_BLOCK);
        }
        hf_end(&h);
    }
}

/* Puts a matrix of an expert into another form. */
static void hf_reform(struct hf *h, const char *x, size_t rows, size_t cols, enum hf_form form) {
    const size_t n = strlen(x);
    for (size_t i = arrlenu(h->t); i-- > 0;)
        if (!strncmp(h->t[i].name, x, n) && h->t[i].name[n] == '.') arrfree(h->t[i].data), arrdel(h->t, i);
    hf_linear(h, x, rows, cols, form);
}

/* Compares a stack of layer 1 with its experts. forms: a digit for each. What has the type of the stack, and all of a
 * stack of BF16, is exact; what was quantized has a relative squared error below 2 %. */
static void check_mixed(struct hf *h, int p, const char *forms, uint32_t type) {
    static const char *const part[] = {"gate_proj", "up_proj", "down_proj"}, *const ours[] = {"gate", "up", "down"};
    const size_t cols = p < 2 ? HF_EMBD : HF_FF, rows = p < 2 ? HF_FF : HF_EMBD;
    char x[96], name[64];
    float row[HF_FF];
    snprintf(name, sizeof name, "blk.1.ffn_%s_exps.weight", ours[p]);
    const struct gguf_tensor *t = out_tensor(&h->g, name, type, cols, rows, 4);
    snprintf(name, sizeof name, "blk.1.ffn_%s_exps.scale", ours[p]);
    const struct gguf_tensor *scale = gguf_find_tensor(&h->g, name);
    CHECK(scale || (!strchr(forms, '3') && !strchr(forms, '5')), "%s is missing", name);
    for (size_t e = 0; e < 4 && t; e++) {
        const enum hf_form form = (enum hf_form)(forms[e] - '0');
        const float factor = scale ? f32_from_bits(gguf_rd32(scale->data + 4 * e)) : 1;
        const bool exact = type == GGUF_BF16 || form == HF_NVFP4;
        double error = 0, power = 0;
        snprintf(x, sizeof x, "model.layers.1.mlp.experts.%zu.%s", e, part[p]);
        for (size_t r = e; r < rows; r += 5) {
            gguf_dequantize_row(type, t->data + (e * rows + r) * gguf_row_bytes(type, cols), row, cols);
            for (size_t i = 0; i < cols; i++) {
                float v = hf_full(h, x, form, cols, r, i);
                if (exact && form >= HF_FP8_ROW) v = bf16_to_f32(bf16_from_f32(v));
                const double d = (double)(row[i] * factor) - (double)v;
                error += d * d;
                power += (double)v * (double)v;
            }
        }
        CHECK(power > 0 && error <= (exact ? 0 : 0.02) * power, "%s: error %g", x, error / power);
    }
}

/* Experts of a layer in several formats. */
static void test_convert_mixed(void) {
    static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
    static const struct {
        const char *odd; /* a digit for each expert of layer 1: enum hf_form */
        const char *parts, *options, *says;
        uint32_t type; /* of the layer's gate and up */
    } c[] = {{"3330", "012", "", "expert 3 (BF16) is quantized to NVFP4 like the other 3 (--keep", GGUF_NVFP4},
             {"7333", "012", "", "expert 0 (FP8 in blocks) is quantized to NVFP4", GGUF_NVFP4},
             {"3133", "1", "", "blk.1.ffn_up_exps: expert 1 (F16) is quantized to NVFP4", GGUF_NVFP4},
             {"3353", "2", "", "blk.1.ffn_down_exps: expert 2 (FP8 per tensor) is quantized", GGUF_NVFP4},
             {"3330", "012", "--keep exps", "expert 3 (BF16) differs, and the other 3 NVFP4: all are stored as BF16",
              GGUF_BF16},
             {"0003", "012", "", "expert 3 (NVFP4) differs, and the other 3 BF16: all are stored as BF16", GGUF_BF16},
             {"0500", "012", "", "expert 1 (FP8 per tensor) differs, and the other 3 BF16", GGUF_BF16},
             {"0606", "012", "", "experts 1 (FP8 per row), 3 (FP8 per row) differ", GGUF_BF16},
             {"3333", "", "", "", GGUF_NVFP4},
             {"0000", "0", "", "blk.1.ffn_up_exps: NVFP4 is stored as BF16, because gate and up", GGUF_BF16}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        char x[128], path[160];
        bool odd[3];
        hf_begin(&h, "mixed");
        h.experts = HF_NVFP4;
        hf_qwen3(&h);
        for (int p = 0; p < 3; p++) {
            odd[p] = strchr(c[i].parts, '0' + p);
            for (int e = 0; e < 4 && odd[p]; e++) {
                snprintf(x, sizeof x, "model.layers.1.mlp.experts.%d.%s", e, part[p]);
                if (c[i].odd[e] != '3')
                    hf_reform(&h, x, p < 2 ? HF_FF : HF_EMBD, p < 2 ? HF_EMBD : HF_FF,
                              (enum hf_form)(c[i].odd[e] - '0'));
            }
        }
        hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
        snprintf(path, sizeof path, "%s -o %s/out.gguf", c[i].options, h.dir);
        int rc = hf_run(&h, path);
        snprintf(path, sizeof path, "%s/out.gguf", h.dir);
        if (CHECK(!rc && strstr(h.err, c[i].says) && (*c[i].says || !strstr(h.err, "exps")), "case %zu: %d: %s", i, rc,
                  h.err) &&
            CHECK(!gguf_open(&h.g, path, x, sizeof x), "%s", x)) {
            for (int p = 0; p < 3; p++)
                check_mixed(&h, p, odd[p] ? c[i].odd : "3333", p < 2 ? c[i].type : odd[p] ? c[i].type : GGUF_NVFP4);
            check_loads(path, c[i].says);
        }
        hf_end(&h);
    }
}

/* Multi-head latent attention: the two halves of kv_b_proj, shared experts, router, bias, the MTP layer. */
static void test_convert_deepseek(void) {
    static const enum hf_form forms[] = {HF_BF16, HF_NVFP4, HF_FP8_TENSOR, HF_FP8_BLOCK};
    for (size_t k = 0; k < 4; k++) {
        struct hf h;
        const char *x = "model.layers.1.self_attn.kv_b_proj";
        bool fp4 = forms[k] == HF_NVFP4;
        hf_begin(&h, "deepseek");
        h.attn = h.experts = forms[k];
        hf_deepseek(&h);
        if (!hf_convert(&h)) {
            hf_end(&h);
            continue;
        }
        const struct gguf_tensor *kb = out_tensor(&h.g, "blk.1.attn_k_b.weight", GGUF_BF16, 32, 64, 2),
                                 *vb =
                                     out_tensor(&h.g, "blk.1.attn_v_b.weight", fp4 ? GGUF_NVFP4 : GGUF_BF16, 64, 32, 2);
        size_t bad = 0;
        for (size_t head = 0; head < 2 && kb && vb; head++) {
            float row[64];
            for (size_t c = 0; c < 64; c++) {
                gguf_dequantize_row(kb->type, kb->data + (head * 64 + c) * gguf_row_bytes(kb->type, 32), row, 32);
                for (size_t d = 0; d < 32; d++) bad += row[d] != hf_value(&h, x, forms[k], 64, head * 64 + d, c);
            }
            for (size_t d = 0; d < 32; d++) {
                gguf_dequantize_row(vb->type, vb->data + (head * 32 + d) * gguf_row_bytes(vb->type, 64), row, 64);
                for (size_t c = 0; c < 64; c++) bad += row[c] != hf_value(&h, x, forms[k], 64, head * 64 + 32 + d, c);
            }
        }
        CHECK(!bad, "form %d: %zu values of k_b and v_b differ", forms[k], bad);
        if (fp4) {
            float s = hf_side(&h, x, "weight_scale_2");
            CHECK(same_bits(out_f32(&h.g, "blk.1.attn_k_b.scale", 1, 0), s), "k_b.scale");
            CHECK(same_bits(out_f32(&h.g, "blk.1.attn_v_b.scale", 1, 0), s), "v_b.scale");
            CHECK(!gguf_find_tensor(&h.g, "blk.1.attn_k_b.input_scale"), "k_b has other inputs than kv_b_proj");
        }
        check_slice(&h, out_tensor(&h.g, "blk.0.ffn_gate.weight", fp4 ? GGUF_NVFP4 : GGUF_BF16, 64, 128, 1), 0,
                    "model.layers.0.mlp.gate_proj", forms[k]);
        check_slice(&h, out_tensor(&h.g, "blk.2.ffn_down_shexp.weight", fp4 ? GGUF_NVFP4 : GGUF_BF16, 128, 64, 1), 0,
                    "model.layers.2.mlp.shared_experts.down_proj", forms[k]);
        check_slice(&h, out_tensor(&h.g, "blk.2.ffn_gate_inp.weight", GGUF_F32, 64, 4, 1), 0, "model.layers.2.mlp.gate",
                    HF_BF16);
        check_slice(&h, out_tensor(&h.g, "blk.2.nextn.eh_proj.weight", GGUF_BF16, 128, 64, 1), 0,
                    "model.layers.2.eh_proj", HF_BF16);
        out_tensor(&h.g, "blk.2.nextn.shared_head_norm.weight", GGUF_F32, 64, 1, 1);
        CHECK(out_f32(&h.g, "blk.1.exp_probs_b.bias", 4, 2) == 0.125f, "bias");
        hf_end(&h);
    }
}

/* The head of values that stands in place i of tiled order: the first of each group, the second of each, ... */
static size_t tiled_source(size_t i) {
    static const size_t order[HF_N_VALUE] = {0, 3, 1, 4, 2, 5};
    return order[i];
}

/* The row of in_proj_qkv, or of the tensors with the rows of its values, for row r of the output. */
static size_t row_tiled(size_t r, size_t before, size_t head) {
    return r < before ? r : before + tiled_source((r - before) / head) * head + (r - before) % head;
}

/* The row of in_proj_qkvz for row r of attn_qkv, or (z) of attn_gate. A head of keys has 24 + 24 + 3 x 32 + 3 x 32
 * rows. */
static size_t row_fused(size_t r, bool z) {
    const size_t stride = 24 + 24 + 96 + 96;
    if (z) return r / 96 * stride + 24 + 24 + 96 + r % 96;
    if (r < 48) return r / 24 * stride + r % 24;
    if (r < 96) return (r - 48) / 24 * stride + 24 + r % 24;
    return (r - 96) / 96 * stride + 48 + (r - 96) % 96;
}

/* Which row and column of the source are element (r, c) of the output. */
enum delta_order { ROWS_QKV, ROWS_Z, ROWS_VALUES, COLUMNS, FUSED_QKV, FUSED_Z, AS_IS };

static void check_order(struct hf *h, const struct gguf_tensor *t, const char *x, enum hf_form form,
                        enum delta_order order) {
    if (!t) return;
    const size_t cols = t->ne[0], rows = t->ne[1];
    size_t bad = 0;
    float *row = xmalloc(cols * sizeof *row);
    for (size_t r = 0; r < rows; r++) {
        size_t from = r;
        if (order == ROWS_QKV) from = row_tiled(r, 2 * HF_KEY, 32);
        if (order == ROWS_Z) from = row_tiled(r, 0, 32);
        if (order == ROWS_VALUES) from = row_tiled(r, 0, 1);
        if (order == FUSED_QKV || order == FUSED_Z) from = row_fused(r, order == FUSED_Z);
        gguf_dequantize_row(t->type, t->data + r * gguf_row_bytes(t->type, cols), row, cols);
        for (size_t c = 0; c < cols; c++)
            bad += row[c] != hf_value(h, x, form, cols, from, order == COLUMNS ? row_tiled(c, 0, 32) : c);
    }
    CHECK(!bad, "%s, form %d: %zu values differ", x, form, bad);
    free(row);
}

/* Value i of a BF16 vector of the directory. */
static float hf_element(struct hf *h, const char *name, size_t i) {
    const struct hf_tensor *t = hf_find(h, name);
    uint16_t b = 0;
    if (CHECK(t, "no %s", name)) memcpy(&b, t->data + 2 * i, 2);
    return bf16_to_f32(b);
}

/* Vectors of a delta net: the heads in their order, 1 + w, -exp(w). */
static void check_delta_vectors(struct hf *h, bool next) {
    static const struct {
        const char *name, *from;
        size_t n;
    } norm[] = {{"output_norm.weight", "model.norm.weight", 64},
                {"blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", 64},
                {"blk.1.post_attention_norm.weight", "model.layers.1.post_attention_layernorm.weight", 64},
                {"blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight", 64},
                {"blk.2.attn_k_norm.weight", "mtp.layers.0.self_attn.k_norm.weight", 64},
                {"blk.2.nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", 64},
                {"blk.2.nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", 64},
                {"blk.2.nextn.shared_head_norm.weight", "mtp.norm.weight", 64}};
    for (size_t k = 0; k < sizeof norm / sizeof *norm; k++)
        for (size_t i = 0; i < norm[k].n; i += 21)
            CHECK(out_f32(&h->g, norm[k].name, norm[k].n, i) == 1.0f + hf_element(h, norm[k].from, i), "%s",
                  norm[k].name);
    for (size_t i = 0; i < HF_N_VALUE; i++) {
        const size_t from = next ? i : tiled_source(i);
        const float a = -expf(hf_element(h, "model.layers.0.linear_attn.A_log", from));
        CHECK(fabsf(out_f32(&h->g, "blk.0.ssm_a", HF_N_VALUE, i) / a - 1) < 1e-6f, "ssm_a %zu", i);
        CHECK(out_f32(&h->g, "blk.0.ssm_dt.bias", HF_N_VALUE, i) ==
                  hf_element(h, "model.layers.0.linear_attn.dt_bias", from),
              "ssm_dt %zu", i);
    }
    for (size_t i = 0; i < 32; i++)
        CHECK(out_f32(&h->g, "blk.0.ssm_norm.weight", 32, i) ==
                  hf_element(h, "model.layers.0.linear_attn.norm.weight", i),
              "ssm_norm %zu", i);
    for (size_t i = 0; i < 64; i++)
        CHECK(out_f32(&h->g, "blk.1.ffn_gate_inp_shexp.weight", 64, i) ==
                  hf_element(h, "model.layers.1.mlp.shared_expert_gate.weight", i),
              "shared gate %zu", i);
}

/* A delta net in every form of linear layer: which heads stand where, and NVFP4 without loss in rows and columns. */
static void test_convert_delta(void) {
    static const enum hf_form forms[] = {HF_BF16,     HF_F16,        HF_F32,     HF_NVFP4,
                                         HF_CT_NVFP4, HF_FP8_TENSOR, HF_FP8_ROW, HF_FP8_BLOCK};
    static const uint32_t types[] = {GGUF_BF16,  GGUF_F16,  GGUF_F32,  GGUF_NVFP4,
                                     GGUF_NVFP4, GGUF_BF16, GGUF_BF16, GGUF_BF16};
    for (size_t k = 0; k < 2 * sizeof forms / sizeof *forms; k++) {
        struct hf h;
        const bool next = k & 1;
        const enum hf_form form = forms[k / 2];
        const uint32_t type = types[k / 2];
        const char *qkvz = "model.layers.0.linear_attn.in_proj_qkvz";
        hf_begin(&h, "delta");
        h.attn = form;
        hf_delta(&h, next, "mtp.");
        if (hf_convert(&h)) {
            check_order(&h, out_tensor(&h.g, "blk.0.attn_qkv.weight", type, 64, 288, 1),
                        next ? qkvz : "model.layers.0.linear_attn.in_proj_qkv", form, next ? FUSED_QKV : ROWS_QKV);
            check_order(&h, out_tensor(&h.g, "blk.0.attn_gate.weight", type, 64, 192, 1),
                        next ? qkvz : "model.layers.0.linear_attn.in_proj_z", form, next ? FUSED_Z : ROWS_Z);
            check_order(&h, out_tensor(&h.g, "blk.0.ssm_out.weight", type, 192, 64, 1),
                        "model.layers.0.linear_attn.out_proj", form, next ? AS_IS : COLUMNS);
            check_order(&h, out_tensor(&h.g, "blk.0.ssm_conv1d.weight", GGUF_F32, 4, 288, 1),
                        "model.layers.0.linear_attn.conv1d", HF_BF16, next ? AS_IS : ROWS_QKV);
            if (next)
                check_order(&h, out_tensor(&h.g, "blk.0.ssm_ba.weight", GGUF_BF16, 64, 12, 1),
                            "model.layers.0.linear_attn.in_proj_ba", HF_BF16, AS_IS);
            for (int b = 0; b < 2 && !next; b++)
                check_order(
                    &h, out_tensor(&h.g, b ? "blk.0.ssm_beta.weight" : "blk.0.ssm_alpha.weight", GGUF_BF16, 64, 6, 1),
                    b ? "model.layers.0.linear_attn.in_proj_b" : "model.layers.0.linear_attn.in_proj_a", HF_BF16,
                    ROWS_VALUES);
            check_slice(&h, out_tensor(&h.g, "blk.1.attn_q.weight", type, 64, 256, 1), 0,
                        "model.layers.1.self_attn.q_proj", form);
            check_slice(&h, out_tensor(&h.g, "blk.2.nextn.eh_proj.weight", GGUF_BF16, 128, 64, 1), 0, "mtp.fc",
                        HF_BF16);
            check_slice(&h, out_tensor(&h.g, "blk.2.ffn_down_shexp.weight", GGUF_BF16, 128, 64, 1), 0,
                        "mtp.layers.0.mlp.shared_expert.down_proj", HF_BF16);
            check_slice(&h, out_tensor(&h.g, "blk.2.ffn_up_exps.weight", GGUF_BF16, 64, 128, 4), 3,
                        "mtp.layers.0.mlp.experts.3.up_proj", HF_BF16);
            check_delta_vectors(&h, next);
        }
        hf_end(&h);
    }
}

/* Heads that are not whole blocks of 16: their columns cannot be moved in NVFP4, so that they become BF16. */
static void test_convert_delta_narrow(void) {
    static const char *const drop[] = {"in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias", "norm.weight"};
    struct hf h;
    char x[96];
    hf_begin(&h, "delta-narrow");
    h.attn = HF_NVFP4;
    hf_delta(&h, false, NULL);
    hf_set(h.config, "{\"linear_num_value_heads\":8,\"linear_value_head_dim\":24}");
    for (int i = 0; i < 5; i++) {
        snprintf(x, sizeof x, "model.layers.0.linear_attn.%s", drop[i]);
        hf_drop(&h, x);
        hf_plain(&h, x, i < 2 ? "[8,64]" : i < 4 ? "[8]" : "[24]", i < 2 ? 512 : i < 4 ? 8 : 24, HF_BF16);
    }
    if (hf_convert(&h)) {
        const struct gguf_tensor *t = out_tensor(&h.g, "blk.0.ssm_out.weight", GGUF_BF16, 192, 64, 1);
        size_t bad = 0;
        float row[192];
        for (size_t r = 0; t && r < 64; r++) {
            gguf_dequantize_row(t->type, t->data + r * gguf_row_bytes(t->type, 192), row, 192);
            for (size_t c = 0; c < 192; c++) {
                const size_t head = c / 24, from = (head % 2 * 4 + head / 2) * 24 + c % 24;
                bad += row[c] != hf_value(&h, "model.layers.0.linear_attn.out_proj", HF_NVFP4, 192, r, from);
            }
        }
        CHECK(!bad, "%zu values differ", bad);
        CHECK(same_bits(out_f32(&h.g, "blk.0.ssm_out.scale", 1, 0),
                        hf_side(&h, "model.layers.0.linear_attn.out_proj", "weight_scale_2")),
              "scale");
    }
    hf_end(&h);
}

/* A dense layer of Qwen3-Next, which no release has. */
static void test_convert_delta_dense(void) {
    struct hf h;
    struct model m;
    char path[256], err[ERR_MAX];
    hf_begin(&h, "delta-dense");
    h.n_experts[1] = 0;
    hf_delta(&h, true, "mtp.");
    hf_set(h.config, "{\"mlp_only_layers\":[1],\"intermediate_size\":128}");
    if (hf_convert(&h)) {
        check_slice(&h, out_tensor(&h.g, "blk.1.ffn_up.weight", GGUF_BF16, 64, 128, 1), 0, "model.layers.1.mlp.up_proj",
                    HF_BF16);
        snprintf(path, sizeof path, "%s/out.gguf", h.dir);
        if (CHECK(!model_load(&m, path, err), "%s", err)) {
            CHECK(!m.layers[1].n_expert && m.layers[1].n_ff == 128 && m.layers[0].n_expert == 4, "the layers");
            model_free(&m);
        }
    }
    hf_end(&h);
}

/* The keys of both architectures, and what a config.json leaves out. */
static void test_convert_delta_keys(void) {
    static const struct {
        const char *key;
        int64_t v[2]; /* of Qwen3.5, of Qwen3-Next; -1: absent */
    } ints[] = {{"block_count", {3, 3}},
                {"attention.head_count", {2, 2}},
                {"attention.head_count_kv", {1, 1}},
                {"attention.key_length", {64, 64}},
                {"attention.value_length", {64, 64}},
                {"rope.dimension_count", {16, 16}},
                {"full_attention_interval", {4, 2}},
                {"ssm.conv_kernel", {4, 4}},
                {"ssm.state_size", {24, 24}},
                {"ssm.group_count", {2, 2}},
                {"ssm.time_step_rank", {6, 6}},
                {"ssm.inner_size", {192, 192}},
                {"expert_count", {4, 4}},
                {"expert_feed_forward_length", {128, 128}},
                {"expert_shared_feed_forward_length", {128, 128}},
                {"nextn_predict_layers", {1, 1}},
                {"feed_forward_length", {-1, 256}}};
    for (int next = 0; next < 2; next++) {
        const char *arch = next ? "qwen3next" : "qwen35moe";
        char key[96];
        struct hf h;
        hf_begin(&h, "delta-keys");
        hf_delta(&h, next, "mtp.");
        if (hf_convert(&h)) {
            CHECK(key_is(&h.g, "general.architecture", arch), "%s", arch);
            /* The tokenizer here has the expressions of qwen2, as in copies of Qwen3.5 by older software. */
            CHECK(key_is(&h.g, "tokenizer.ggml.pre", next ? "qwen2" : "qwen35") &&
                      (strstr(h.err, "qwen35 is") != NULL) != next,
                  "%s: pre-tokenizer: %s", arch, h.err);
            for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
                snprintf(key, sizeof key, "%s.%s", arch, ints[i].key);
                if (ints[i].v[next] < 0) CHECK(!gguf_find(&h.g, key), "%s", key);
                else CHECK(key_int(&h.g, key) == ints[i].v[next], "%s is %lld", key, (long long)key_int(&h.g, key));
            }
            snprintf(key, sizeof key, "%s.rope.freq_base", arch);
            CHECK(key_num(&h.g, key) == 1e7, "%s", key);
            snprintf(key, sizeof key, "%s.attention.recurrent_layers", arch);
            const struct gguf_kv *kv = gguf_find(&h.g, key);
            CHECK(kv && kv->type == GGUF_V_BOOL && kv->n == 3 && !memcmp(kv->data, "\1\0\0", 3), "%s", key);
            snprintf(key, sizeof key, "%s.rope.dimension_sections", arch);
            kv = gguf_find(&h.g, key);
            CHECK(next ? !kv : kv && (kv->n == 4 && gguf_rd32(kv->data + 8) == 2 && !gguf_rd32(kv->data + 12)), "%s",
                  key);
        }
        hf_end(&h);
    }
    struct hf h;
    hf_begin(&h, "delta-defaults");
    hf_delta(&h, false, NULL);
    hf_set(h.config, "{\"rope_parameters\":null,\"layer_types\":null,\"full_attention_interval\":2}");
    if (hf_convert(&h)) {
        const struct gguf_kv *kv = gguf_find(&h.g, "qwen35moe.rope.dimension_sections");
        CHECK(kv && kv->n == 4 && gguf_rd32(kv->data) == 11, "the usual sections");
        CHECK(key_num(&h.g, "qwen35moe.rope.freq_base") == 1e4 && key_int(&h.g, "qwen35moe.rope.dimension_count") == 16,
              "RoPE");
        CHECK(key_int(&h.g, "qwen35moe.block_count") == 2 && !gguf_find(&h.g, "qwen35moe.nextn_predict_layers") &&
                  strstr(h.err, "its tensors are missing: it is left out"),
              "an announced layer without tensors: %s", h.err);
    }
    hf_end(&h);
}

/* The forms that names have: a wrapper with a vision tower, prefixes, experts in one tensor, MTP below "model.". */
static void test_convert_delta_names(void) {
    static const struct {
        const char *body, *mtp; /* what stands for "model." and "mtp." */
    } c[] = {{"model.language_model.", "mtp."},
             {"model.language_model.", "model.mtp."},
             {"language_model.model.", "mtp."},
             {"model.language_model.model.language_model.", "model.language_model.mtp."}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        const bool prefixed = !strncmp(c[i].body, "language_model.", 15); /* the output matrix and MTP too */
        hf_begin(&h, "delta-names");
        hf_delta(&h, false, "mtp.");
        if (i == 1)
            for (int l = 0; l < 2; l++) hf_fuse(&h, l);
        for (size_t k = 0; k < arrlenu(h.t); k++) {
            char *name = h.t[k].name, rest[128];
            const bool mtp = !strncmp(name, "mtp.", 4), body = !strncmp(name, "model.", 6);
            snprintf(rest, sizeof rest, "%s", name + (mtp ? 4 : body ? 6 : 0));
            snprintf(name, sizeof h.t[k].name, "%s%s%.90s", prefixed && !body ? "language_model." : "",
                     mtp    ? c[i].mtp
                     : body ? c[i].body
                            : "",
                     rest);
        }
        hf_plain(&h, "model.visual.blocks.0.attn.qkv.weight", "[2,2]", 4, HF_BF16);
        hf_plain(&h, "model.visual.patch_embed.proj.bias", "[2]", 2, HF_BF16);
        h.config =
            json_pack("{s:s,s:o,s:b}", "model_type", "qwen3_5_moe", "text_config", h.config, "tie_word_embeddings", 0);
        if (hf_convert(&h)) {
            CHECK(strstr(h.err, "2 tensors that read pictures or sound are left out"), "%s: %s", c[i].body, h.err);
            CHECK(key_int(&h.g, "qwen35moe.block_count") == 3 && gguf_find_tensor(&h.g, "output.weight") &&
                      gguf_find_tensor(&h.g, "blk.2.nextn.eh_proj.weight"),
                  "%s", c[i].body);
            out_tensor(&h.g, "blk.1.ffn_up_exps.weight", GGUF_BF16, 64, 128, 4);
            out_tensor(&h.g, "blk.2.ffn_down_exps.weight", GGUF_BF16, 128, 64, 4);
        }
        hf_end(&h);
    }
}

/* ------------------------------------------------------------------------------------------------ MTP layers */

static const char *const release_names[] = {"model.safetensors", "model-00001-of-00002.safetensors",
                                            "model-00002-of-00002.safetensors", "mtp.safetensors"};
enum { RELEASE_FILES = sizeof release_names / sizeof *release_names };

/* The tensors of a fixture, in memory; a file that it lacks has no header. */
struct release {
    char *file[RELEASE_FILES]; /* stb_ds */
    json_t *header[RELEASE_FILES];
};

static void release_read(struct release *s, const char *name) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < RELEASE_FILES; i++) {
        char path[256], err[ERR_MAX];
        snprintf(path, sizeof path, "tests/fixtures/%s/%s", name, release_names[i]);
        if (access(path, F_OK) || !CHECK(!read_file(path, &s->file[i], err), "%s", err)) continue;
        s->header[i] = json_loadb(s->file[i] + 8, gguf_rd64((uint8_t *)s->file[i]), 0, NULL);
    }
}

static void release_free(struct release *s) {
    for (int i = 0; i < RELEASE_FILES; i++) {
        json_decref(s->header[i]);
        arrfree(s->file[i]);
    }
}

/* The data of a tensor of BF16; NULL after a failed check. */
static const uint8_t *release_data(const struct release *s, const char *name) {
    int i = 0;
    while (i + 1 < RELEASE_FILES && !json_object_get(s->header[i], name)) i++;
    const json_t *t = json_object_get(s->header[i], name), *at = json_object_get(t, "data_offsets");
    if (!CHECK(t && !strcmp(json_string_value(json_object_get(t, "dtype")), "BF16"), "%s", name)) return NULL;
    const uint8_t *file = (const uint8_t *)s->file[i];
    return file + 8 + gguf_rd64(file) + json_integer_value(json_array_get(at, 0));
}

/* How many weights the tensors have whose names begin with `below`. */
static size_t release_weights(const struct release *s, const char *below) {
    size_t sum = 0, k;
    const char *name;
    json_t *t, *d;
    for (int i = 0; i < RELEASE_FILES; i++) json_object_foreach(s->header[i], name, t) {
            size_t n = 1;
            if (strncmp(name, below, strlen(below)) || strstr(name, "_scale")) continue;
            const bool pairs = !strcmp(json_string_value(json_object_get(t, "dtype")), "U8");
            CHECK(!pairs, "%s has two weights in a byte", name);
            json_array_foreach(json_object_get(t, "shape"), k, d) n *= (size_t)json_integer_value(d);
            sum += n;
        }
    return sum;
}

/* Every tensor that a release has of its MTP layer is in the file, under llama.cpp's names. */
static void test_convert_prediction(void) {
    static const char *const ours[] = {"enorm.weight",   "hnorm.weight",        "shared_head_norm.weight",
                                       "eh_proj.weight", "embed_tokens.weight", "shared_head_head.weight"};
    static const char *const names[][6] = {
        {"enorm", "hnorm", "shared_head.norm", "eh_proj", "embed_tokens", "shared_head.head"},
        {"enorm", "hnorm", "final_layernorm", "eh_proj", NULL, NULL},
        {"enorm", "hnorm", "shared_head.norm", "eh_proj", NULL, NULL},
        {"pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc", NULL, NULL}};
    enum { DEEPSEEK, HY3, GLM, QWEN };
    static const struct {
        const char *name, *arch;
        int block, family;
    } c[] = {{"deepseek_v3_plain", "deepseek2", 2, DEEPSEEK},
             {"deepseek_v3_mtp", "deepseek2", 2, DEEPSEEK},
             {"hy_v3", "hy_v3", 3, HY3},
             {"glm4_moe", "glm4moe", 3, GLM},
             {"glm4_moe_air", "glm4moe", 3, DEEPSEEK},
             {"glm4_moe_lite", "deepseek2", 3, DEEPSEEK},
             {"deepseek_v32", "deepseek32", 3, DEEPSEEK},
             {"glm_moe_dsa", "glm-dsa", 3, GLM},
             {"qwen3_5", "qwen35", 2, QWEN},
             {"qwen3_5_nvfp4", "qwen35", 3, QWEN},
             {"qwen3_5_moe", "qwen35moe", 2, QWEN},
             {"qwen3_5_moe_nvfp4", "qwen35moe", 3, QWEN},
             {"qwen3_next", "qwen3next", 4, QWEN},
             {"qwen3_next_fp8", "qwen3next", 2, QWEN}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char cmd[512], path[256], name[128], below[64] = "mtp.", err[ERR_MAX], *said = NULL;
        size_t weights = 0;
        struct release s;
        struct gguf g;
        snprintf(path, sizeof path, "%s/out.gguf", test_dir());
        snprintf(cmd, sizeof cmd, CONVERT_BIN " tests/fixtures/%s -o %s", c[i].name, path);
        CHECK(!run_command(cmd, NULL, &said), "%s: %s", c[i].name, sb_cstr(&said));
        CHECK(!strstr(sb_cstr(&said), "left out") || strstr(said, "pictures"), "%s: %s", c[i].name, said);
        arrfree(said);
        if (!CHECK(!gguf_open(&g, path, err, sizeof err), "%s", err)) continue;
        release_read(&s, c[i].name);
        if (c[i].family != QWEN) snprintf(below, sizeof below, "model.layers.%d.", c[i].block);
        for (uint32_t k = 0; k < g.n_tensors; k++) {
            int block = -1;
            gguf_printable(g.tensors[k].name, name, sizeof name);
            if (sscanf(name, "blk.%d.", &block) != 1 || block < c[i].block) continue;
            CHECK(block == c[i].block, "%s: %s is after the last layer", c[i].name, name);
            if (!strstr(name, "scale")) weights += g.tensors[k].ne[0] * g.tensors[k].ne[1] * g.tensors[k].ne[2];
        }
        CHECK(weights == release_weights(&s, below), "%s: %zu weights of %zu", c[i].name, weights,
              release_weights(&s, below));
        for (int k = 0; k < 6; k++) {
            snprintf(name, sizeof name, "blk.%d.nextn.%s", c[i].block, ours[k]);
            const struct gguf_tensor *t = gguf_find_tensor(&g, name);
            const char *from = names[c[i].family][k];
            if (!CHECK(!t == !from, "%s: %s", c[i].name, name) || !t) continue;
            snprintf(path, sizeof path, "%s%s.weight", below, from);
            const uint8_t *data = release_data(&s, path);
            CHECK(t->type == (k < 3 ? GGUF_F32 : GGUF_BF16) && t->ne[0] == (k == 3 ? 128 : 64), "%s: %s", c[i].name,
                  name);
            size_t bad = 0, n = data ? t->ne[0] * t->ne[1] : 0;
            for (size_t j = 0; j < n && k >= 3; j++) bad += memcmp(data + 2 * j, t->data + 2 * j, 2) != 0;
            for (size_t j = 0; j < n && k < 3; j++)
                bad +=
                    f32_from_bits(gguf_rd32(t->data + 4 * j)) !=
                    bf16_to_f32((uint16_t)(data[2 * j] | data[2 * j + 1] << 8)) + (c[i].family == QWEN ? 1.0f : 0.0f);
            CHECK(!bad, "%s: %zu values of %s differ", c[i].name, bad, name);
        }
        snprintf(name, sizeof name, "%s.block_count", c[i].arch);
        CHECK(key_int(&g, name) == c[i].block + 1, "%s: block_count", c[i].name);
        snprintf(name, sizeof name, "%s.nextn_predict_layers", c[i].arch);
        CHECK(key_int(&g, name) == 1, "%s: nextn_predict_layers", c[i].name);
        snprintf(name, sizeof name, "%s.attention.recurrent_layers", c[i].arch);
        const struct gguf_kv *kv = gguf_find(&g, name);
        CHECK(!kv == (c[i].family != QWEN) && (!kv || (kv->n == (uint64_t)c[i].block + 1 && !kv->data[c[i].block])),
              "%s: the prediction layer has attention", c[i].name);
        release_free(&s);
        gguf_close(&g);
    }
}

/* An MTP layer that config.json announces and no tensor has; one with other experts than the layers before. */
static void test_convert_prediction_layers(void) {
    struct hf h;
    hf_begin(&h, "announced");
    hf_deepseek(&h);
    hf_set(h.config, "{\"num_nextn_predict_layers\":3}");
    if (hf_convert(&h)) {
        CHECK(key_int(&h.g, "deepseek2.block_count") == 3 && key_int(&h.g, "deepseek2.nextn_predict_layers") == 1,
              "the layer that is there");
        CHECK(!strstr(h.err, "layer 2 for") && strstr(h.err, "announces layer 3 for multi-token prediction, but") &&
                  strstr(h.err, "announces layer 4 for"),
              "%s", h.err);
    }
    for (size_t i = arrlenu(h.t); i-- > 0;)
        if (!strncmp(h.t[i].name, "model.layers.2.", 15)) arrfree(h.t[i].data), arrdel(h.t, i);
    if (hf_convert(&h)) {
        CHECK(key_int(&h.g, "deepseek2.block_count") == 2 && !gguf_find(&h.g, "deepseek2.nextn_predict_layers"),
              "no layer");
        CHECK(
            strstr(h.err, "announces layer 2 for multi-token prediction, but its tensors are missing: it is left out"),
            "%s", h.err);
    }
    hf_end(&h);

    static const char *const gone[] = {"gate.weight", "experts.3.gate_proj.weight", "experts.3.up_proj.weight",
                                       "experts.3.down_proj.weight"};
    hf_begin(&h, "fewer");
    hf_delta(&h, true, "mtp.");
    for (int i = 0; i < 4; i++) {
        char name[96];
        snprintf(name, sizeof name, "mtp.layers.0.mlp.%s", gone[i]);
        hf_drop(&h, name);
    }
    hf_linear(&h, "mtp.layers.0.mlp.gate", 3, HF_EMBD, HF_BF16);
    if (hf_convert(&h)) {
        const struct gguf_kv *per = gguf_find(&h.g, "qwen3next.expert_count_per_layer");
        out_tensor(&h.g, "blk.2.ffn_gate_exps.weight", GGUF_BF16, 64, 128, 3);
        out_tensor(&h.g, "blk.2.ffn_gate_inp.weight", GGUF_F32, 64, 3, 1);
        CHECK(key_int(&h.g, "qwen3next.expert_count") == 4, "the largest count");
        CHECK(per && per->n == 3 && gguf_rd32(per->data + 4) == 4 && gguf_rd32(per->data + 8) == 3, "the counts");
    }
    hf_end(&h);
}

/* An MTP layer that is not whole is left out with a line, and the file is the one that --no-mtp gives. In the
 * trunk the same is an error. */
static void test_convert_left_out(void) {
    static const struct {
        const char *drop; /* a tensor that is missing; NULL: none */
        const char *add;  /* a matrix with a row too few, in place of the tensor; NULL: none */
        const char *says; /* with "%d" for the number of the layer */
        enum hf_form form;
        bool file; /* the layer's tensors are in a file that is not there */
    } c[] = {
        {"model.layers.%d.eh_proj.weight", NULL, "eh_proj.weight' is missing", HF_BF16, false},
        {"model.layers.%d.mlp.experts.0.gate_proj.weight", NULL, "experts.0.gate_proj.weight' is missing", HF_BF16,
         false},
        {"model.layers.%d.mlp.experts.3.up_proj.weight", NULL, "experts.3.up_proj.weight' is missing", HF_BF16, false},
        {"model.layers.%d.mlp.experts.1.down_proj.weight_scale", NULL, "weight_scale' is missing", HF_NVFP4, false},
        {"model.layers.%d.mlp.experts.1.down_proj.weight_scale_2", NULL, "weight_scale_2' is missing", HF_NVFP4, false},
        {"model.layers.%d.self_attn.q_a_layernorm.weight", NULL, "q_a_layernorm.weight' is missing", HF_FP8_BLOCK,
         false},
        {"model.layers.%d.mlp.gate.weight", "model.layers.%d.mlp.gate",
         "(the layer's experts, hidden_size), found BF16 [3, 64]", HF_BF16, false},
        {"model.layers.%d.mlp.shared_experts.up_proj.weight", "model.layers.%d.mlp.shared_experts.up_proj",
         "found BF16 [3, 64]", HF_BF16, false},
        {NULL, NULL, "announces layer 2 for multi-token prediction, but its tensors are missing", HF_BF16, true}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        for (int layer = 2; layer >= 1 + !i; layer--) { /* the trunk has no eh_proj */
            char name[256], add[128], path[2][160], *file[2] = {NULL, NULL}, err[ERR_MAX];
            struct hf h;
            hf_begin(&h, "left");
            h.experts = h.attn = c[i].form;
            hf_deepseek(&h);
            for (int k = 0; k < 2; k++) snprintf(path[k], sizeof path[k], "%s/%d.gguf", h.dir, k);
            if (layer == 2) {
                hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
                snprintf(name, sizeof name, "--no-mtp -o %s", path[1]);
                CHECK(!hf_run(&h, name) && strstr(h.err, "layer 2 for multi-token prediction is left out, ") &&
                          strstr(h.err, ": --no-mtp\n"),
                      "%s", h.err);
                CHECK(!read_file(path[1], &file[1], err), "%s", err);
            }
            snprintf(name, sizeof name, c[i].drop ? c[i].drop : "%d", layer);
            snprintf(add, sizeof add, c[i].add ? c[i].add : "%d", layer);
            if (c[i].drop) hf_drop(&h, name);
            if (c[i].add) hf_linear(&h, add, 3, 64, HF_BF16);
            json_t *map = json_object();
            for (size_t k = arrlenu(h.t); k-- > 0 && c[i].file;) {
                const bool away = !strncmp(h.t[k].name, layer == 2 ? "model.layers.2." : "model.layers.1.", 15);
                json_object_set_new(map, h.t[k].name, json_string(away ? "mtp.safetensors" : "model.safetensors"));
                if (away) arrfree(h.t[k].data), arrdel(h.t, k);
            }
            json_t *index = json_pack("{s:o}", "weight_map", map);
            if (c[i].file) hf_json(&h, "model.safetensors.index.json", index);
            json_decref(index);
            const int rc = hf_convert_to(&h, "0.gguf");
            if (layer == 1) CHECK(rc == 1 && !strstr(h.err, "left out,"), "case %zu: %d: %s", i, rc, h.err);
            else if (CHECK(!rc && strstr(h.err, c[i].says) &&
                               (c[i].file || strstr(h.err, "layer 2 for multi-token prediction is left out, ")),
                           "case %zu: %d: %s", i, rc, h.err)) {
                CHECK(!read_file(path[0], &file[0], err), "%s", err);
                CHECK(arrlenu(file[0]) == arrlenu(file[1]) && !memcmp(file[0], file[1], arrlenu(file[0])),
                      "case %zu: another file than with --no-mtp", i);
                check_loads(path[0], c[i].says);
            }
            arrfree(file[0]);
            arrfree(file[1]);
            hf_end(&h);
        }
}

/* Parts of a Qwen release's MTP layer, which has names of its own, and one with more experts than the trunk. */
static void test_convert_odd_prediction(void) {
    struct hf h;
    char path[160];
    for (int k = 0; k < 3; k++) {
        static const char *const drop[] = {"mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight",
                                           "mtp.layers.0.mlp.shared_expert_gate.weight"};
        hf_begin(&h, "parts");
        hf_delta(&h, k == 1, "mtp.");
        hf_drop(&h, drop[k]);
        snprintf(path, sizeof path, "%s' is missing", drop[k]);
        if (hf_convert(&h)) {
            CHECK(strstr(h.err, "layer 2 for multi-token prediction is left out, ") && strstr(h.err, path), "%s",
                  h.err);
            CHECK(!gguf_find_tensor(&h.g, "blk.2.attn_norm.weight"), "%s", drop[k]);
        }
        hf_end(&h);
    }
    hf_begin(&h, "spared");
    h.n_experts[0] = h.n_experts[1] = 3;
    hf_delta(&h, false, "mtp.");
    hf_set(h.config, "{\"num_experts\":3}");
    if (hf_convert(&h)) {
        const struct gguf_kv *per = gguf_find(&h.g, "qwen35moe.expert_count_per_layer");
        CHECK(key_int(&h.g, "qwen35moe.expert_count") == 4, "the largest count");
        CHECK(per && per->n == 3 && gguf_rd32(per->data + 4) == 3 && gguf_rd32(per->data + 8) == 4, "the counts");
        check_slice(&h, out_tensor(&h.g, "blk.2.ffn_up_exps.weight", GGUF_BF16, 64, 128, 4), 3,
                    "mtp.layers.0.mlp.experts.3.up_proj", HF_BF16);
        snprintf(path, sizeof path, "%s/out.gguf", h.dir);
        check_loads(path, "more experts than the trunk");
    }
    hf_end(&h);
    hf_begin(&h, "none");
    hf_delta(&h, false, NULL);
    hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
    CHECK(!hf_run(&h, "--dry-run --no-mtp") && strstr(h.err, "--no-mtp: the model has no layer for"), "%s", h.err);
    hf_end(&h);
}

/* All experts of a layer in one tensor, in every form that is in use: the same file as from one tensor each. */
static void test_convert_fused(void) {
    static const enum hf_form forms[] = {HF_BF16, HF_F16, HF_F32, HF_NVFP4, HF_FP8_TENSOR, HF_FP8_BLOCK};
    for (size_t k = 0; k < sizeof forms / sizeof *forms; k++) {
        struct hf h;
        char *file[2] = {NULL, NULL}, path[256], err[ERR_MAX];
        hf_begin(&h, "fused");
        h.experts = forms[k];
        hf_delta(&h, false, NULL);
        snprintf(path, sizeof path, "%s/out.gguf", h.dir);
        for (int fused = 0; fused < 2; fused++) {
            for (int l = 0; fused && l < 2; l++) hf_fuse(&h, l);
            if (hf_convert(&h)) CHECK(!read_file(path, &file[fused], err), "%s", err);
        }
        CHECK(arrlenu(file[0]) && arrlenu(file[0]) == arrlenu(file[1]) && !memcmp(file[0], file[1], arrlenu(file[0])),
              "form %d: another file", (int)forms[k]);
        arrfree(file[0]);
        arrfree(file[1]);
        hf_end(&h);
    }
}

/* Scales of fused experts that are missing or do not fit. */
static void test_convert_fused_refusals(void) {
#define FUSED "model.layers.1.mlp.experts."
    static const struct {
        const char *message, *drop, *name, *shape;
        size_t n; /* values of F32 of a tensor that takes the place of `name` */
    } c[] = {{"'" FUSED "gate_up_proj_weight_scale_2' is missing", .drop = FUSED "gate_up_proj_weight_scale_2"},
             {"'" FUSED "down_proj_weight_scale' is missing", .drop = FUSED "down_proj_weight_scale"},
             {"expected 1, 4 or 8 numbers, found F32 [3]", NULL, FUSED "gate_up_proj_weight_scale_2", "[3]", 3},
             {"expected F8_E4M3 [4, 64, 8], one scale per 16", NULL, FUSED "down_proj_weight_scale", "[4,64,8]", 2048},
             {"expected F32 [4, 256, 64], found F32 [4, 128, 64]", NULL, FUSED "gate_up_proj", "[4,128,64]", 32768}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        hf_begin(&h, "fused-refusals");
        h.experts = HF_NVFP4;
        hf_delta(&h, false, NULL);
        hf_fuse(&h, 1);
        if (c[i].drop) hf_drop(&h, c[i].drop);
        if (c[i].name) {
            hf_drop(&h, c[i].name);
            hf_plain(&h, c[i].name, c[i].shape, c[i].n, HF_F32);
        }
        const int rc = hf_convert_to(&h, "out.gguf");
        CHECK(rc == 1 && strstr(h.err, c[i].message), "%s: exit %d: %s", c[i].message, rc, h.err);
        hf_end(&h);
    }
#undef FUSED
}

/* Matrices that a release wants with 16-bit inputs are listed: of one module, of those below it, of all. */
static void test_convert_precision(void) {
    static const struct {
        const char *config;
        uint64_t n;
        const char *first;
    } c[] = {{"{\"quant_algo\":\"NVFP4\"}", 0, NULL},
             {"{\"quant_algo\":\"W4A16_NVFP4\"}", 6, "blk.0.ffn_gate_exps.weight"},
             {"{\"quant_algo\":\"MIXED_PRECISION\",\"quantized_layers\":{\"model.layers.1.mlp\":{\"quant_algo\":"
              "\"W4A16_NVFP4\"},\"model.layers.1.mlp.experts.0.up_proj\":{\"quant_algo\":\"NVFP4\"}}}",
              2, "blk.1.ffn_gate_exps.weight"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        hf_begin(&h, "precision");
        h.experts = HF_NVFP4;
        hf_qwen3(&h);
        json_object_set_new(h.config, "quantization_config", json_loads(c[i].config, 0, NULL));
        hf_set(json_object_get(h.config, "quantization_config"), "{\"quant_method\":\"modelopt\"}");
        if (hf_convert(&h)) {
            const struct gguf_kv *names = gguf_find(&h.g, "general.tensor_extra.name"),
                                 *a4 = gguf_find(&h.g, "general.tensor_extra.prec_a4");
            CHECK(!names == !c[i].n && !a4 == !c[i].n, "case %zu", i);
            CHECK(!names || (names->n == c[i].n && a4->n == c[i].n && all_false(a4)), "case %zu", i);
            if (names) CHECK(!strcmp(key_string(&h.g, "general.tensor_extra.name", 0), c[i].first), "case %zu", i);
        }
        hf_end(&h);
    }
}

static void test_convert_keys(void) {
    struct hf h;
    hf_begin(&h, "keys");
    hf_deepseek(&h);
    hf_set(h.config, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"original_max_position_"
                     "embeddings\":64,\"beta_fast\":32,"
                     "\"beta_slow\":1,\"mscale\":1.0,\"mscale_all_dim\":1.0}}");
    if (hf_convert(&h)) {
        static const struct {
            const char *key;
            int64_t v;
        } ints[] = {{"block_count", 3},
                    {"context_length", 4096},
                    {"embedding_length", 64},
                    {"feed_forward_length", 128},
                    {"vocab_size", 300},
                    {"attention.head_count", 2},
                    {"attention.head_count_kv", 1},
                    {"attention.key_length", 80},
                    {"attention.value_length", 64},
                    {"attention.key_length_mla", 48},
                    {"attention.value_length_mla", 32},
                    {"attention.kv_lora_rank", 64},
                    {"attention.q_lora_rank", 64},
                    {"rope.dimension_count", 16},
                    {"leading_dense_block_count", 1},
                    {"expert_count", 4},
                    {"expert_used_count", 2},
                    {"expert_shared_count", 1},
                    {"expert_feed_forward_length", 128},
                    {"expert_group_count", 2},
                    {"expert_group_used_count", 1},
                    {"expert_gating_func", 2},
                    {"expert_weights_norm", 1},
                    {"nextn_predict_layers", 1},
                    {"rope.scaling.original_context_length", 64}};
        char key[96];
        for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
            snprintf(key, sizeof key, "deepseek2.%s", ints[i].key);
            CHECK(key_int(&h.g, key) == ints[i].v, "%s is %lld", key, (long long)key_int(&h.g, key));
        }
        CHECK(key_is(&h.g, "general.architecture", "deepseek2") && key_is(&h.g, "general.name", "keys"), "names");
        CHECK(key_int(&h.g, "general.file_type") == 32 && key_int(&h.g, "general.quantization_version") == 2, "types");
        CHECK(key_num(&h.g, "deepseek2.expert_weights_scale") == 2.5, "scale");
        CHECK(key_is(&h.g, "deepseek2.rope.scaling.type", "yarn"), "yarn");
        CHECK(key_num(&h.g, "deepseek2.rope.scaling.factor") == 40, "yarn factor");
        CHECK((float)key_num(&h.g, "deepseek2.rope.scaling.yarn_log_multiplier") == 0.1f, "yarn log multiplier");
        CHECK(key_num(&h.g, "general.sampling.temp") == 0.5 && key_int(&h.g, "general.sampling.top_k") == 7,
              "sampling");
        CHECK(!gguf_find(&h.g, "general.sampling.top_p") && !gguf_find(&h.g, "moe.reap.pruned"),
              "keys that nothing asks for");
    }
    hf_end(&h);
    hf_begin(&h, "keys-REAP-qwen");
    hf_qwen3(&h);
    hf_set(h.config, "{\"norm_topk_prob\":false,\"tie_word_embeddings\":true,\"rope_theta\":null,"
                     "\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":5000000,\"factor\":4.0,"
                     "\"original_max_position_embeddings\":1024}}");
    hf_drop(&h, "lm_head.weight");
    if (hf_convert(&h)) {
        CHECK(key_int(&h.g, "qwen3moe.expert_weights_norm") == 0, "norm_topk_prob");
        CHECK(key_num(&h.g, "qwen3moe.rope.freq_base") == 5e6 && key_num(&h.g, "qwen3moe.rope.scaling.factor") == 4,
              "rope");
        CHECK(key_int(&h.g, "qwen3moe.attention.key_length") == 64 &&
                  key_int(&h.g, "qwen3moe.attention.head_count_kv") == 1,
              "heads");
        CHECK(!gguf_find_tensor(&h.g, "output.weight"), "a tied head needs no tensor");
        CHECK(key_int(&h.g, "moe.reap.pruned") == 1, "the name says REAP");
    }
    hf_end(&h);
}

static void test_convert_vocabulary(void) {
    struct hf h;
    hf_begin(&h, "vocabulary");
    hf_qwen3(&h);
    for (int pairs = 0; pairs < 2; pairs++) {
        json_t *model = json_object_get(h.tokenizer, "model");
        if (pairs)
            json_object_set_new(model, "merges",
                                json_pack("[[s,s],[s,s],[s,s]]", "h", "e", "\xc4\xa0", "he", "\xc4\xa0he", "l"));
        if (!hf_convert(&h)) break;
        const struct gguf_kv *types = gguf_find(&h.g, "tokenizer.ggml.token_type");
        int64_t type[4] = {0};
        CHECK(key_is(&h.g, "tokenizer.ggml.model", "gpt2") && key_is(&h.g, "tokenizer.ggml.pre", "qwen2"), "names");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.tokens", 10), "\xc4\x8a"), "token 10 is a line feed");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.tokens", 260), "<|im_end|>"), "added tokens are literal");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.tokens", 299), "[PAD299]"), "padding");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.merges", 2), "\xc4\xa0he l"), "merges");
        if (CHECK(types && types->n == HF_VOCAB, "token types"))
            for (uint64_t i = 0; i < 4; i++) gguf_elem_int(types, i < 3 ? 258 + i + (i > 0) : 299, &type[i]);
        CHECK(type[0] == 1 && type[1] == 3 && type[2] == 4 && type[3] == 5,
              "types of merged, control, user-defined and unused tokens: %d %d %d %d", (int)type[0], (int)type[1],
              (int)type[2], (int)type[3]);
        CHECK(key_int(&h.g, "tokenizer.ggml.eos_token_id") == 260, "eos");
        CHECK(key_int(&h.g, "tokenizer.ggml.normalizer.nfc") == 1 && key_int(&h.g, "tokenizer.ggml.add_bos_token") == 0,
              "flags");
        const struct gguf_kv *stops = gguf_find(&h.g, "tokenizer.ggml.eos_token_ids");
        CHECK(stops && stops->is_array && stops->n == 2, "stop ids");
        CHECK(key_is(&h.g, "tokenizer.chat_template", "{{ messages }}"), "template");
        CHECK(!gguf_find(&h.g, "tokenizer.ggml.ignore_merges"), "ignore_merges only when true");
    }
    /* a list of templates, and a file that wins over it */
    hf_set(h.tokenizer_config, "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"T\"},{\"name\":"
                               "\"default\",\"template\":\"D\"}]}");
    if (hf_convert(&h)) CHECK(key_is(&h.g, "tokenizer.chat_template", "D"), "the template named default");
    hf_write(&h, "chat_template.jinja", "J\n", 2);
    if (hf_convert(&h)) CHECK(key_is(&h.g, "tokenizer.chat_template", "J\n"), "chat_template.jinja");
    hf_end(&h);
}

/* The expressions as the releases ship them (JSON), and the names they get. */
static void test_convert_pre_tokenizers(void) {
    static const char byte_level[] = "{\"type\":\"ByteLevel\",\"use_regex\":false,\"add_prefix_space\":false}";
    /* clang-format off */
    static const struct {
        const char *name, *extra, *expr[3];
    } c[] = {
        {"qwen35", "{}", {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"chatglm-bpe", "{}", {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"llama-bpe", "{\"ignore_merges\":true}", {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"qwen2", "{}", {"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"}},
        {"deepseek-v3", "{}", {"\\p{N}{1,3}", "[一-龥\xe3\x81\x80-\xe3\x82\x9f\xe3\x82\xa0-\xe3\x83\xbf]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"}},
        {"kimi-k2", "{}", {"[\\p{Han}]+|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"gpt-4o", "{}", {"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
        {"olmo", "{}", {NULL}}};
    /* clang-format on */
    struct hf h;
    hf_begin(&h, "splits");
    hf_qwen3(&h);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        json_t *list = json_array(), *pre = json_pack("{s:s,s:o}", "type", "Sequence", "pretokenizers", list);
        for (int k = 0; k < 3 && c[i].expr[k]; k++)
            json_array_append_new(list, json_pack("{s:s,s:{s:s},s:s}", "type", "Split", "pattern", "Regex",
                                                  c[i].expr[k], "behavior", "Isolated"));
        if (c[i].expr[0]) json_array_append_new(list, json_loads(byte_level, 0, NULL));
        else json_array_append_new(list, json_pack("{s:s,s:b}", "type", "ByteLevel", "add_prefix_space", 0));
        json_object_set_new(h.tokenizer, "pre_tokenizer", pre);
        hf_set(json_object_get(h.tokenizer, "model"), c[i].extra);
        if (hf_convert(&h)) CHECK(key_is(&h.g, "tokenizer.ggml.pre", c[i].name), "%s: another name", c[i].name);
        CHECK(!gguf_find(&h.g, "tokenizer.ggml.ignore_merges") == !strstr(c[i].extra, "true"), "%s: ignore_merges",
              c[i].name);
        hf_set(json_object_get(h.tokenizer, "model"), "{\"ignore_merges\":false}");
    }
    hf_set(h.tokenizer, "{\"normalizer\":null}"); /* the same expression without NFC */
    if (hf_convert(&h)) CHECK(key_is(&h.g, "tokenizer.ggml.pre", "gpt-2"), "gpt-2");
    hf_end(&h);
}

/* Kimi: tiktoken ranks, merges derived from them, reserved names, a wrapper with a vision tower. */
static void test_convert_kimi(void) {
    static const char *const merged[] = {"he", " he", "hel", "xyzzy"}; /* the last cannot be merged from two parts */
    struct hf h;
    char *ranks = NULL;
    hf_begin(&h, "kimi");
    h.prefix = "language_model.";
    hf_deepseek(&h);
    h.prefix = NULL;
    hf_plain(&h, "vision_tower.patch_embed.proj.weight", "[2,2]", 4, HF_BF16);
    hf_plain(&h, "mm_projector.linear.weight", "[2,2]", 4, HF_BF16);
    hf_set(h.config, "{\"model_type\":\"kimi_k2\"}");
    h.config = json_pack("{s:s,s:o}", "model_type", "kimi_k25", "text_config", h.config);
    json_decref(h.tokenizer);
    h.tokenizer = NULL;
    hf_set(h.tokenizer_config,
           "{\"tokenizer_class\":\"TikTokenTokenizer\",\"added_tokens_decoder\":{\"262\":{\"content\":"
           "\"<|im_end|>\",\"special\":true},\"263\":{\"content\":\"<think>\",\"special\":false}}}");
    for (int r = 0; r < 260; r++) {
        static const char a[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        char one[2] = {(char)r, 0};
        const uint8_t *s = (const uint8_t *)(r < 256 ? one : merged[r - 256]);
        size_t n = r < 256 ? 1 : strlen((const char *)s);
        for (size_t i = 0; i < n; i += 3) {
            uint32_t w = (uint32_t)s[i] << 16 | (i + 1 < n ? (uint32_t)s[i + 1] << 8 : 0) | (i + 2 < n ? s[i + 2] : 0);
            sb_printf(&ranks, "%c%c%c%c", a[w >> 18], a[w >> 12 & 63], i + 1 < n ? a[w >> 6 & 63] : '=',
                      i + 2 < n ? a[w & 63] : '=');
        }
        sb_printf(&ranks, " %d\n", r);
    }
    hf_write(&h, "tiktoken.model", ranks, arrlenu(ranks));
    arrfree(ranks);
    if (hf_convert(&h)) {
        const struct gguf_kv *merges = gguf_find(&h.g, "tokenizer.ggml.merges");
        CHECK(key_is(&h.g, "tokenizer.ggml.pre", "kimi-k2") && key_int(&h.g, "tokenizer.ggml.normalizer.nfc") == 0,
              "kimi-k2");
        CHECK(merges && merges->n == 3, "%d merges", merges ? (int)merges->n : -1);
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.merges", 1), "\xc4\xa0 he"), "second merge");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.merges", 2), "he l"), "third merge: he before el");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.tokens", 257), "\xc4\xa0he"), "GPT-2 alphabet");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.tokens", 261), "<|reserved_token_261|>"), "reserved");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.tokens", 263), "<think>"), "added");
        CHECK(key_int(&h.g, "tokenizer.ggml.eos_token_id") == 262, "eos");
        out_tensor(&h.g, "output.weight", GGUF_BF16, 64, 300, 1);
    }
    hf_end(&h);
}

/* Experts in tensors of rank 3 give the same file as experts one by one; a pruned release may keep different counts. */
static void test_convert_experts(void) {
    struct hf h;
    char err[ERR_MAX];
    struct gguf fused;
    hf_begin(&h, "experts");
    hf_qwen3(&h);
    if (hf_convert(&h)) {
        hf_fuse(&h, 0), hf_fuse(&h, 1);
        char path[160];
        snprintf(path, sizeof path, "%s/fused.gguf", h.dir);
        CHECK(!hf_convert_to(&h, "fused.gguf"), "%s", h.err);
        if (CHECK(!gguf_open(&fused, path, err, sizeof err), "%s", err)) {
            CHECK(fused.n_tensors == h.g.n_tensors, "tensors");
            for (uint32_t i = 0; i < h.g.n_tensors; i++) {
                char name[64];
                const struct gguf_tensor *a = &h.g.tensors[i],
                                         *b = gguf_find_tensor(&fused, gguf_printable(a->name, name, sizeof name));
                CHECK(b && a->bytes == b->bytes && !memcmp(a->data, b->data, a->bytes), "%s differs", name);
            }
            gguf_close(&fused);
        }
    }
    hf_end(&h);

    hf_begin(&h, "counts");
    h.n_experts[1] = 3;
    h.experts = HF_NVFP4;
    hf_qwen3(&h);
    hf_set(h.config, "{\"num_experts\":6,\"reap\":{\"original_experts\":6,\"kept\":[[0,1,3,5],[1,2,4]]}}");
    if (hf_convert(&h)) {
        const struct gguf_kv *per = gguf_find(&h.g, "qwen3moe.expert_count_per_layer"),
                             *kept = gguf_find(&h.g, "moe.reap.kept.1");
        int64_t a = 0, b = 0, c = 0;
        out_tensor(&h.g, "blk.1.ffn_gate_exps.weight", GGUF_NVFP4, 64, 128, 3);
        out_tensor(&h.g, "blk.1.ffn_gate_inp.weight", GGUF_F32, 64, 3, 1);
        CHECK(key_int(&h.g, "qwen3moe.expert_count") == 4, "the largest count");
        CHECK(per && per->n == 2 && gguf_elem_int(per, 0, &a) && gguf_elem_int(per, 1, &b) && a == 4 && b == 3,
              "per layer");
        CHECK(kept && kept->n == 3 && gguf_elem_int(kept, 2, &c) && c == 4, "kept ids");
        CHECK(key_int(&h.g, "moe.reap.original_expert_count") == 6 && key_int(&h.g, "moe.reap.pruned") == 1, "reap");
    }
    hf_end(&h);
}

/* The golden matrices, each as the up_proj of a dense layer of a model with just these sizes. */
static void check_golden_conversion(const struct golden_case *c) {
    char shape[48], text[160];
    struct hf h;
    if (strstr(c->name, "experts_")) return;
    hf_begin(&h, "golden");
    hf_qwen3(&h);
    hf_set(h.config, "{\"num_hidden_layers\":1,\"mlp_only_layers\":[0]}");
    snprintf(text, sizeof text, "{\"hidden_size\":%u,\"intermediate_size\":%u}", c->cols, c->rows);
    hf_set(h.config, text);
    for (size_t i = 0; i < arrlenu(h.t); i++) arrfree(h.t[i].data);
    arrsetlen(h.t, 0);
    static const struct {
        const char *x;
        unsigned rows, cols; /* 0: hidden_size; 1: intermediate_size */
    } part[] = {{"model.embed_tokens", 300, 0},
                {"lm_head", 300, 0},
                {"model.layers.0.self_attn.q_proj", 192, 0},
                {"model.layers.0.self_attn.k_proj", 64, 0},
                {"model.layers.0.self_attn.v_proj", 64, 0},
                {"model.layers.0.self_attn.o_proj", 0, 192},
                {"model.layers.0.mlp.down_proj", 0, 1}};
    static const char *const norm[] = {"self_attn.q_norm", "self_attn.k_norm", "input_layernorm",
                                       "post_attention_layernorm"};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        unsigned r = part[i].rows, k = part[i].cols;
        hf_linear(&h, part[i].x, r > 1 ? r : r ? c->rows : c->cols, k > 1 ? k : k ? c->rows : c->cols, HF_BF16);
    }
    for (int i = 0; i < 4; i++) {
        snprintf(text, sizeof text, "model.layers.0.%s.weight", norm[i]);
        snprintf(shape, sizeof shape, "[%u]", i < 2 ? 64 : c->cols);
        hf_plain(&h, text, shape, i < 2 ? 64 : c->cols, HF_BF16);
    }
    snprintf(shape, sizeof shape, "[%u]", c->cols);
    hf_plain(&h, "model.norm.weight", shape, c->cols, HF_BF16);
    bool ct = c->global_scale > 0;
    for (int i = 0; i < 2; i++) { /* gate and up, which have the same type in a file */
        const char *x = i ? "model.layers.0.mlp.up_proj" : "model.layers.0.mlp.gate_proj";
        snprintf(text, sizeof text, "%s.%s", x, ct ? "weight_packed" : "weight");
        snprintf(shape, sizeof shape, "[%u,%u]", c->rows, c->cols / 2);
        hf_add(&h, text, "U8", shape, c->weight, arrlenu(c->weight));
        snprintf(text, sizeof text, "%s.weight_scale", x);
        snprintf(shape, sizeof shape, "[%u,%u]", c->rows, c->cols / 16);
        hf_add(&h, text, "F8_E4M3", shape, c->scale, arrlenu(c->scale));
        hf_scalar(&h, x, ct ? "weight_global_scale" : "weight_scale_2", ct ? c->global_scale : c->scale2);
    }
    if (c->scale2 > 1) {
        CHECK(hf_convert_to(&h, "out.gguf") == 1 && strstr(h.err, "weight_scale_2") && strstr(h.err, "divisor"),
              "%s: %s", c->name, h.err);
    } else if (hf_convert(&h)) {
        const struct gguf_tensor *t = out_tensor(&h.g, "blk.0.ffn_up.weight", GGUF_NVFP4, c->cols, c->rows, 1);
        CHECK(t && !memcmp(t->data, c->gguf, arrlenu(c->gguf)), "%s: the blocks differ", c->name);
        CHECK(same_bits(out_f32(&h.g, "blk.0.ffn_up.scale", 1, 0), c->scale2), "%s: the scale differs", c->name);
    }
    hf_end(&h);
}

static void test_convert_golden(void) { golden_cases(check_golden_conversion); }

/* 16 but not 64 divides the width: BF16 of the exact product, with .scale. */
static void test_convert_narrow(void) {
    struct hf h;
    hf_begin(&h, "narrow");
    hf_deepseek(&h);
    hf_set(h.config, "{\"q_lora_rank\":80}");
    for (int l = 0; l < 3; l++) {
        char x[96];
        static const char *const drop[] = {"q_a_proj.weight", "q_b_proj.weight", "q_a_layernorm.weight"};
        for (int k = 0; k < 3; k++) snprintf(x, sizeof x, "model.layers.%d.self_attn.%s", l, drop[k]), hf_drop(&h, x);
        snprintf(x, sizeof x, "model.layers.%d.self_attn.q_a_proj", l);
        hf_linear(&h, x, 80, 64, HF_NVFP4);
        snprintf(x, sizeof x, "model.layers.%d.self_attn.q_b_proj", l);
        hf_linear(&h, x, 96, 80, HF_NVFP4);
        snprintf(x, sizeof x, "model.layers.%d.self_attn.q_a_layernorm.weight", l);
        hf_plain(&h, x, "[80]", 80, HF_F32);
    }
    if (hf_convert(&h)) {
        check_slice(&h, out_tensor(&h.g, "blk.1.attn_q_a.weight", GGUF_NVFP4, 64, 80, 1), 0,
                    "model.layers.1.self_attn.q_a_proj", HF_NVFP4);
        check_slice(&h, out_tensor(&h.g, "blk.1.attn_q_b.weight", GGUF_BF16, 80, 96, 1), 0,
                    "model.layers.1.self_attn.q_b_proj", HF_NVFP4);
        CHECK(same_bits(out_f32(&h.g, "blk.1.attn_q_b.scale", 1, 0),
                        hf_side(&h, "model.layers.1.self_attn.q_b_proj", "weight_scale_2")),
              "scale");
    }
    hf_end(&h);
}

/* A calibration that never reached an expert leaves its input scale out. */
static void test_convert_input_scale(void) {
    struct hf h;
    hf_begin(&h, "input");
    h.experts = HF_NVFP4;
    hf_qwen3(&h);
    hf_drop(&h, "model.layers.0.mlp.experts.2.up_proj.input_scale");
    if (hf_convert(&h)) {
        float most = 0;
        for (uint64_t e = 0; e < 4; e++) most = fmaxf(most, out_f32(&h.g, "blk.0.ffn_up_exps.input_scale", 4, e));
        CHECK(out_f32(&h.g, "blk.0.ffn_up_exps.input_scale", 4, 2) == most, "the largest of the others");
        CHECK(strstr(h.err, "1 of 4 input scales are missing"), "%s", h.err);
    }
    hf_end(&h);
}

/* What must be refused: a change to a model that converts, and a part of the message. */
struct refusal {
    const char *what, *message;
    enum { REFUSE_QWEN3, REFUSE_DEEPSEEK, REFUSE_NEXT, REFUSE_QWEN35 } model;
    const char *config; /* keys to set */
    const char *drop;   /* a tensor to leave out */
    const char *add;    /* an F32 scalar tensor to add */
    const char *tokenizer;
    const char *tokenizer_config;
};

/* clang-format off */
static const struct refusal refusals[] = {
    {"epsilon", "key 'rms_norm_eps': expected a number that makes attention.layer_norm_rms_epsilon 0 to 1, found 1.5", .config = "{\"rms_norm_eps\":1.5}"},
    {"factor of experts", "key 'routed_scaling_factor': expected a number that makes expert_weights_scale 0 to 1e+06, found -1", REFUSE_DEEPSEEK, .config = "{\"routed_scaling_factor\":-1}"},
    {"rotation", "key 'rope_theta': expected a number that makes rope.freq_base 1 to 1e+12", .config = "{\"rope_theta\":1e13}"},
    {"rotation below 1", "key 'rope_theta': expected", .config = "{\"rope_theta\":0.5}"},
    {"rotation among its parameters", "key 'rope_parameters.rope_theta': expected", .config = "{\"rope_theta\":null,\"rope_parameters\":{\"rope_theta\":1e13}}"},
    {"YaRN's slow", "key 'rope_scaling.beta_slow': expected", .config = "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2,\"beta_slow\":1e7,\"original_max_position_embeddings\":9}}"},
    {"YaRN's fast", "key 'rope_scaling.beta_fast': expected", .config = "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2,\"beta_fast\":-1,\"original_max_position_embeddings\":9}}"},
    {"YaRN's factor", "key 'rope_scaling.factor': expected", .config = "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":1e7,\"attention_factor\":2.6118095651,\"original_max_position_embeddings\":9}}"},
    {"YaRN's mscale", "key 'rope_scaling.mscale_all_dim': expected", REFUSE_DEEPSEEK, .config = "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2,\"mscale\":101,\"mscale_all_dim\":101,\"original_max_position_embeddings\":9}}"},
    {"width", "key 'moe_intermediate_size': expected an integer from 1 to 1048576", .config = "{\"moe_intermediate_size\":2097152}"},
    {"context", "key 'max_position_embeddings': expected an integer from 1 to 268435456", .config = "{\"max_position_embeddings\":0}"},
    {"family", "expected qwen3_moe, qwen3_vl_moe_text, qwen3, qwen3_5_text, qwen3_5_moe_text, qwen4_exp_text, qwen3_next, deepseek_v", .config = "{\"model_type\":\"bert\"}"},
    {"type of a key", "'hidden_size': expected an integer", .config = "{\"hidden_size\":\"64\"}"},
    {"missing key", "'max_position_embeddings': expected", .config = "{\"max_position_embeddings\":null}"},
    {"activation", "hidden_act", .config = "{\"hidden_act\":\"gelu\"}"},
    {"sliding window", "use_sliding_window", .config = "{\"use_sliding_window\":true}"},
    {"bias", "attention_bias", .config = "{\"attention_bias\":true}"},
    {"rope type", "rope_type", .config = "{\"rope_scaling\":{\"rope_type\":\"longrope\",\"factor\":2}}"},
    {"attention factor", "attention_factor", .config = "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2,\"attention_factor\":3,\"original_max_position_embeddings\":9}}"},
    {"mscale", "mscale_all_dim': expected the same number", REFUSE_DEEPSEEK, .config = "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2,\"mscale\":1,\"mscale_all_dim\":0.5,\"original_max_position_embeddings\":9}}"},
    {"half-split rope", "rope_interleave", REFUSE_DEEPSEEK, .config = "{\"rope_interleave\":false}"},
    {"scoring", "scoring_func", REFUSE_DEEPSEEK, .config = "{\"scoring_func\":\"tanh\"}"},
    {"top-k method", "topk_method", REFUSE_DEEPSEEK, .config = "{\"topk_method\":\"group_limited_greedy\"}"},
    {"sparse attention", "index_topk", REFUSE_DEEPSEEK, .config = "{\"index_topk\":2048}"},
    {"groups", "not a multiple of n_group = 3", REFUSE_DEEPSEEK, .config = "{\"n_group\":3}"},
    {"quantization method", "quant_method': expected one of modelopt modelopt_fp4 compressed-tensors fp8 mxfp4 mxfp8 nvfp4 none, found \"awq\"", .config = "{\"quantization_config\":{\"quant_method\":\"awq\"}}"},
    {"FP8 blocks", "weight_block_size", .config = "{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[64,64]}}"},
    {"announced NVFP4", "no tensor is NVFP4", .config = "{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\"}}"},
    {"shape", "expected [384, 64] (num_attention_heads x head_dim, hidden_size)", .config = "{\"head_dim\":128}"},
    {"fewer experts than used", "has 4 experts; expected from num_experts_per_tok = 5", .config = "{\"num_experts_per_tok\":5}"},
    {"reap ids", "rising ids below 9", .config = "{\"reap\":{\"original_experts\":9,\"kept\":[[0,1,1,2]]}}"},
    {"prediction layer", "layer 2 is out of range: num_hidden_layers is 2, num_nextn_predict_layers 0", REFUSE_DEEPSEEK, .config = "{\"num_nextn_predict_layers\":0}"},
    {"missing tensor", "'model.layers.1.self_attn.k_proj.weight' is missing", .drop = "model.layers.1.self_attn.k_proj.weight"},
    {"hole in the experts", "layer 1 has experts 0 to 1 and then a gap", .drop = "model.layers.1.mlp.experts.2.gate_proj.weight", .config = "{\"x\":2}"},
    {"unknown tensor", "nothing in qwen3moe uses it", .add = "model.layers.0.self_attn.sinks"},
    {"bias tensor", "nothing in qwen3moe uses it", .add = "model.layers.0.self_attn.q_proj.bias"},
    {"AWQ", "AWQ-smoothed", .add = "model.layers.0.mlp.experts.0.up_proj.pre_quant_scale"},
    {"INT4", "INT4 pack-quantized", .add = "model.layers.0.mlp.experts.0.up_proj.weight_shape"},
    {"GPTQ", "GPTQ", .add = "model.layers.0.mlp.experts.0.up_proj.qweight"},
    {"experts of gpt-oss", "nothing in qwen3moe uses it", .add = "model.layers.0.mlp.experts.gate_up_proj_blocks"},
    {"scale without codes", "nothing in qwen3moe uses it", .add = "model.layers.0.self_attn.q_proj.weight_scale_2"},
    {"heads of values", "a multiple of the 2 heads of keys", REFUSE_NEXT, .config = "{\"linear_num_value_heads\":5}"},
    {"layer types", "'layer_types': expected \"full_attention\"", REFUSE_QWEN35, .config = "{\"layer_types\":[\"sliding_attention\",\"full_attention\"]}"},
    {"too few layer types", "'layer_types': expected 2 layers", REFUSE_QWEN35, .config = "{\"layer_types\":[\"full_attention\"]}"},
    {"no gate", "attn_output_gate", REFUSE_QWEN35, .config = "{\"attn_output_gate\":false}"},
    {"weights as they are", "norm_topk_prob", REFUSE_NEXT, .config = "{\"norm_topk_prob\":false}"},
    {"two prediction layers", "mtp_num_hidden_layers", REFUSE_QWEN35, .config = "{\"mtp_num_hidden_layers\":2}"},
    {"own embeddings", "mtp_use_dedicated_embeddings", REFUSE_QWEN35, .config = "{\"mtp_use_dedicated_embeddings\":true}"},
    {"share of a head", "partial_rotary_factor", REFUSE_QWEN35, .config = "{\"partial_rotary_factor\":0.01}"},
    {"fused projection", "(2 x (linear_num_key_heads x linear_key_head_dim + ", REFUSE_NEXT, .config = "{\"linear_key_head_dim\":32}"},
    {"convolution", "expected [288, 3] (heads of queries, keys and values, linear_conv_kernel_dim), found BF16 [288, 1, 4]", REFUSE_QWEN35, .config = "{\"linear_conv_kernel_dim\":3}"},
    {"no shared gate", "shared_expert_gate.weight' is missing", REFUSE_QWEN35, .drop = "model.layers.0.mlp.shared_expert_gate.weight"},
    {"dense without a width", "intermediate_size", REFUSE_NEXT, .config = "{\"mlp_only_layers\":[0],\"intermediate_size\":null}"},
    {"tokenizer type", "expected BPE", .tokenizer = "{\"model\":{\"type\":\"Unigram\",\"vocab\":{}}}"},
    {"normalizer", "expected none, NFC or a Sequence", .tokenizer = "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Lowercase\"}]}}"},
    {"pre-tokenizer", "the pre-tokenizer is unknown: \\w+", .tokenizer = "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\w+\"},\"behavior\":\"Isolated\"}}"},
    {"two expressions", "\\w+  then  \\d", .tokenizer = "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\w+\"},\"behavior\":\"Isolated\"},{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\d\"},\"behavior\":\"Isolated\"}]}}"},
    {"merged with neighbors", "this Split is not supported", .tokenizer = "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"x\"},\"behavior\":\"MergedWithPrevious\"}}"},
    {"greedy token", "lstrip", .tokenizer = "{\"added_tokens\":[{\"id\":299,\"content\":\"x\",\"lstrip\":true}]}"},
    {"text that begins with nothing", "'bos_token': expected a token", .tokenizer_config = "{\"add_bos_token\":true}"},
    {"text with an end", "the text, or one token and the text", .tokenizer = "{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"<s>\"}}]}}"},
    {"prefix space", "add_prefix_space", .tokenizer = "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true}}"},
    {"decoder", "expected ByteLevel", .tokenizer = "{\"decoder\":{\"type\":\"Metaspace\"}}"},
    {"token id", "vocab_size is 300", .tokenizer = "{\"added_tokens\":[{\"id\":300,\"content\":\"x\"}]}"},
    {"two tokens, one id", "have the same id 5", .tokenizer = "{\"added_tokens\":[{\"id\":5,\"content\":\"<x>\"}]}"},
    {"merge", "is not in the vocabulary", .tokenizer = "{\"model\":{\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"a b\"]}}"},
    {"no merges", "the tokenizer has no merges", .tokenizer = "{\"model\":{\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}"}};

/* clang-format on */

static void test_convert_refusals(void) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const struct refusal *r = &refusals[i];
        struct hf h;
        hf_begin(&h, "refusals");
        if (r->model == REFUSE_QWEN3) hf_qwen3(&h);
        else if (r->model == REFUSE_DEEPSEEK) hf_deepseek(&h);
        else hf_delta(&h, r->model == REFUSE_NEXT, NULL);
        if (r->config) hf_set(h.config, r->config);
        if (r->tokenizer) hf_set(h.tokenizer, r->tokenizer);
        if (r->tokenizer_config) hf_set(h.tokenizer_config, r->tokenizer_config);
        if (r->drop) hf_drop(&h, r->drop);
        if (!strcmp(r->what, "hole in the experts"))
            hf_drop(&h, "model.layers.1.mlp.gate.weight"),
                hf_linear(&h, "model.layers.1.mlp.gate", 2, HF_EMBD, HF_BF16);
        float one = 1;
        if (r->add) hf_add(&h, r->add, "F32", "[]", &one, 4);
        int rc = hf_convert_to(&h, "out.gguf");
        CHECK(rc == 1 && strstr(h.err, r->message), "%s: exit %d: %s", r->what, rc, h.err);
        CHECK(!strncmp(h.err, "moe-convert: ", 13), "%s: %s", r->what, h.err);
        hf_end(&h);
    }
}

/* Keys about quantization: what changes arithmetic is refused by name, what is unknown is a line, what is not used or
 * harmless says nothing. */
static void test_convert_quantization_keys(void) {
    static const struct {
        const char *config, *hf; /* quantization_config, "quantization" of hf_quant_config.json; NULL: none */
        int rc;
        const char *says; /* "": nothing about quantization */
    } c[] = {
        {"{\"transform_config\":{\"config_groups\":{\"R\":{\"type\":\"hadamard\"}}}}", NULL, 1,
         "'quantization_config.transform_config': moe does not apply transforms"},
        {"{\"transform_config\":null,\"sparsity_config\":{},\"kv_cache_scheme\":null}", NULL, 0, ""},
        {"{\"transform_config\":{\"config_groups\":{}},\"sparsity_config\":{\"format\":\"dense\",\"global_sparsity\":0."
         "2}}",
         NULL, 0, ""},
        {"{\"sparsity_config\":{\"format\":\"sparse-24-bitmask\"}}", NULL, 1,
         "moe does not read compressed sparse weights"},
        {"{\"online_rotation\":true}", NULL, 1, "moe does not rotate the inputs"},
        {"{\"rotation_config\":{\"r1\":true}}", NULL, 1, "moe does not rotate the inputs"},
        {"{\"desc_act\":true}", NULL, 1, "'quantization_config.desc_act'"},
        {"{\"desc_act\":false,\"zero_point\":false,\"clamp_val\":null}", NULL, 0, ""},
        {"{\"smoothquant\":{\"alpha\":0.5}}", NULL, 1, "moe does not scale the inputs"},
        {"{\"lora_rank\":16}", NULL, 1, "low-rank"},
        {"{\"config_groups\":{\"g\":{\"targets\":[\"Linear\"],\"pre_quant_scale\":true}}}", NULL, 1,
         "'quantization_config.config_groups.g.pre_quant_scale'"},
        {"{\"config_groups\":{\"g\":{\"targets\":[\"Linear\"],\"format\":\"int-quantized\"}}}", NULL, 1,
         "'quantization_config.config_groups.g.format': expected one of"},
        {"{\"config_groups\":{\"g\":{\"weights\":{\"num_bits\":8,\"warp\":3}}}}", NULL, 0,
         "key 'quantization_config.config_groups.g.weights.warp' (3) is unknown here and not used"},
        {"{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"scale_fmt\":\"ue8m0\",\"activation_scheme\":\"static\",\"weight_"
         "block_size\":null,\"ignored_layers\":[\"x\"],\"modules_to_convert\":null}",
         NULL, 0, ""},
        {"{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\"}", NULL, 1, "'quantization_config.fmt': expected e4m3"},
        {"{\"quant_method\":\"fp8\",\"color\":\"blue\",\"size\":2}", NULL, 0,
         "key 'quantization_config.color' (\"blue\") is unknown here and not used; so are 1 more"},
        {NULL,
         "{\"quant_algo\":\"MIXED_PRECISION\",\"kv_cache_quant_algo\":\"FP8\",\"quantized_layers\":{\"a\":{\"quant_"
         "algo\":\"FP8_BLOCK_SCALES\",\"group_size\":128},\"b\":{\"quant_algo\":\"FP8\"}},\"exclude_modules\":[]}",
         0, ""},
        {NULL,
         "{\"quant_algo\":\"MIXED_PRECISION\",\"quantized_layers\":{\"a\":{\"quant_algo\":\"NVFP4_AWQ\",\"group_size\":"
         "16}}}",
         1, "'quantization.quantized_layers.a.quant_algo': expected one of"},
        {NULL, "{\"quant_algo\":\"MXFP8\",\"group_size\":16}", 1,
         "'quantization.group_size': expected an integer from 32 to 32"},
        {NULL, "{\"quant_algo\":\"FP8\",\"has_zero_point\":false,\"pre_quant_scale\":true}", 1,
         "'quantization.pre_quant_scale': moe does not scale"},
        {NULL, "{\"quant_algo\":\"FP8\",\"trick\":1}", 0,
         "hf_quant_config.json: key 'quantization.trick' (1) is unknown here"}};
    struct hf h;
    hf_begin(&h, "keys");
    hf_qwen3(&h);
    hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char text[1024];
        snprintf(text, sizeof text, "{\"quantization_config\":%s}", c[i].config ? c[i].config : "null");
        hf_set(h.config, text);
        snprintf(text, sizeof text, "{\"quantization\":%s}", c[i].hf ? c[i].hf : "{}");
        hf_write(&h, "hf_quant_config.json", text, strlen(text));
        const int rc = hf_run(&h, "--dry-run");
        CHECK(rc == c[i].rc && strstr(h.err, c[i].says) && (*c[i].says || !strstr(h.err, "quant")),
              "case %zu: exit %d: %s", i, rc, h.err);
    }
    hf_end(&h);
}

/* A norm that is not finite, which moe refuses. */
static void test_convert_norms(void) {
    static const char norm[] = "model.layers.1.post_attention_layernorm.weight";
    for (int i = 0; i < 4; i++) {
        const float bad = i & 1 ? INFINITY : NAN;
        const bool wide = i & 2;
        uint8_t data[HF_EMBD * 4] = {0};
        char shape[32];
        struct hf h;
        hf_begin(&h, "norms");
        hf_qwen3(&h);
        hf_drop(&h, norm);
        if (wide) memcpy(data + 4 * 7, &bad, 4);
        else memcpy(data + 2 * 7, &(uint16_t){(uint16_t)(f32_to_bits(bad) >> 16)}, 2);
        snprintf(shape, sizeof shape, "[%d]", HF_EMBD);
        hf_add(&h, norm, wide ? "F32" : "BF16", shape, data, (wide ? 4 : 2) * HF_EMBD);
        const int rc = hf_convert_to(&h, "out.gguf");
        CHECK(rc == 1 && strstr(h.err, "post_attention_layernorm.weight': row 7, column 0 is not a finite number"),
              "%g, F32 %d: exit %d: %s", (double)bad, wide, rc, h.err);
        hf_end(&h);
    }
}

/* Scales of NVFP4: the other convention under the wrong name, absent, not finite, negative block scales. */
static void test_convert_scales(void) {
    static const char *const x = "model.layers.1.mlp.experts.0.up_proj";
    static const struct {
        enum hf_form form;
        const char *side;
        float value; /* 0: drop the tensor */
        const char *message;
    } c[] = {{HF_NVFP4, "weight_scale_2", 3000, "the file seems to hold the divisor"},
             {HF_CT_NVFP4, "weight_global_scale", 3e-4f, "the file seems to hold the multiplier"},
             {HF_NVFP4, "weight_scale_2", NAN, "expected a finite number"},
             {HF_NVFP4, "weight_scale_2", -1, "expected a finite number"},
             {HF_CT_NVFP4, "weight_global_scale", INFINITY, "expected a finite number"},
             {HF_NVFP4, "weight_scale_2", 0, "weight_scale_2' is missing"},
             {HF_NVFP4, "weight_scale", 0, "weight_scale' is missing"},
             {HF_FP8_TENSOR, "weight_scale", 0, "neither"},
             {HF_FP8_TENSOR, "weight_scale", NAN, "expected a finite scale"}};
    char name[128];
    struct hf h;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        hf_begin(&h, "scales");
        h.experts = c[i].form;
        hf_qwen3(&h);
        snprintf(name, sizeof name, "%s.%s", x, c[i].side);
        if (c[i].value == 0) hf_drop(&h, name);
        else memcpy(hf_find(&h, name)->data, &c[i].value, 4);
        int rc = hf_convert_to(&h, "out.gguf");
        CHECK(rc == 1 && strstr(h.err, c[i].message) && strstr(h.err, x), "case %zu: exit %d: %s", i, rc, h.err);
        hf_end(&h);
    }
    for (int i = 0; i < 4; i++) {
        static const uint8_t byte[] = {0x81, 0x7f, 0xff, 0x80};
        hf_begin(&h, "scales");
        h.experts = HF_NVFP4;
        hf_qwen3(&h);
        snprintf(name, sizeof name, "%s.weight_scale", x);
        hf_find(&h, name)->data[9] = byte[i];
        int rc = hf_convert_to(&h, "out.gguf");
        CHECK(rc == (i < 3), "scale byte %02x: exit %d: %s", byte[i], rc, h.err);
        CHECK(i == 3 || strstr(h.err, "row 2, block 1"), "%s", h.err);
        hf_end(&h);
    }
    /* a tensor of zeros has no scale to speak of */
    hf_begin(&h, "scales");
    h.experts = HF_CT_NVFP4;
    hf_qwen3(&h);
    float inf = INFINITY;
    snprintf(name, sizeof name, "%s.weight_packed", x);
    struct hf_tensor *w = hf_find(&h, name);
    memset(w->data, 0x80, arrlenu(w->data));
    snprintf(name, sizeof name, "%s.weight_global_scale", x);
    memcpy(hf_find(&h, name)->data, &inf, 4);
    if (hf_convert(&h)) CHECK(out_f32(&h.g, "blk.1.ffn_up_exps.scale", 4, 0) == 0, "a zero scale");
    hf_end(&h);
    /* scales in the order of a GPU kernel, and powers of two for 16 weights */
    for (int i = 0; i < 2; i++) {
        hf_begin(&h, "scales");
        h.experts = HF_NVFP4;
        hf_qwen3(&h);
        snprintf(name, sizeof name, "%s.weight_scale", x);
        struct hf_tensor *s = hf_find(&h, name);
        snprintf(s->shape, sizeof s->shape, i ? "[128,4]" : "[512]");
        if (i) snprintf(s->dtype, sizeof s->dtype, "U8");
        int rc = hf_convert_to(&h, "out.gguf");
        CHECK(rc == 1 && strstr(h.err, i ? "expected U8 [128, 2], one scale per 32 weights" : "swizzled"),
              "exit %d: %s", rc, h.err);
        hf_end(&h);
    }
}

/* Containers that lie. Each case edits the header of a file that converts. */
static void test_convert_safetensors(void) {
    struct hf h;
    char path[160], cmd[320], *file = NULL, err[ERR_MAX];
    hf_begin(&h, "container");
    hf_qwen3(&h);
    hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
    snprintf(path, sizeof path, "%s/model.safetensors", h.dir);
    if (!CHECK(!read_file(path, &file, err), "%s", err)) return;
    size_t n = arrlenu(file), cut[] = {0, 7, 8, 100, n - 1, n / 2};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        hf_write(&h, "model.safetensors", file, cut[i]);
        int rc = hf_run(&h, "--dry-run");
        CHECK(rc == 1 && strstr(h.err, "model.safetensors"), "cut to %zu bytes: exit %d: %s", cut[i], rc, h.err);
    }
    arrput(file, 'x');
    hf_write(&h, "model.safetensors", file, n + 1);
    CHECK(hf_run(&h, "--dry-run") == 1 && strstr(h.err, "the tensors end at byte"), "a byte too many: %s", h.err);
    memset(file, 0xff, 8);
    hf_write(&h, "model.safetensors", file, n);
    CHECK(hf_run(&h, "--dry-run") == 1 && strstr(h.err, "a header of 18446744073709551615 bytes"), "%s", h.err);
    arrfree(file);

    /* clang-format off */
    static const struct {
        const char *header, *message;
    } lies[] = {{"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", "overlap"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", "hole"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,4]}}", "4 bytes of data for U8 [5]"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,4]}}", "overflows"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,4]}}", "of the shape is -1"},
                {"{\"a\":{\"dtype\":\"Q4\",\"shape\":[4],\"data_offsets\":[0,4]}}", "dtype 'Q4' is unknown"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,400]}}", "truncated"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]}}", "data_offsets are [4,0]"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", "data_offsets are missing"},
                {"{\"a\":3}", "dtype '(none)' is unknown"},
                {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]}}", "duplicate"},
                {"[]", "not valid JSON"},
                {"{}", "the file has"},
                {"{\"a\\u001b[2J\":{\"dtype\":\"Q\"}}", "'a?[2J'"}};
    /* clang-format on */
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        char *s = NULL;
        uint64_t len = strlen(lies[i].header);
        sb_put(&s, (char *)&len, 8);
        sb_puts(&s, lies[i].header);
        sb_put(&s, "\0\0\0\0\0", 6);
        hf_write(&h, "model.safetensors", s, arrlenu(s));
        arrfree(s);
        int rc = hf_run(&h, "--dry-run");
        CHECK(rc == 1 && strstr(h.err, lies[i].message), "%s: exit %d: %s", lies[i].header, rc, h.err);
    }
    snprintf(cmd, sizeof cmd, "rm %s/*.safetensors", h.dir);
    CHECK(!system(cmd), "%s", cmd);
    CHECK(hf_run(&h, "--dry-run") == 1 && strstr(h.err, "neither model.safetensors nor"), "%s", h.err);
    hf_end(&h);
}

/* Two shards and an index: both directions, and file names that leave the directory. */
static void test_convert_index(void) {
    struct hf h;
    hf_begin(&h, "index");
    hf_qwen3(&h);
    size_t n = arrlenu(h.t);
    hf_shard(&h, "a.safetensors", 0, n / 2);
    hf_shard(&h, "b.safetensors", n / 2, n);
    json_t *map = json_object(), *index = json_pack("{s:o}", "weight_map", map);
    for (size_t i = 0; i < n; i++)
        json_object_set_new(map, h.t[i].name, json_string(i < n / 2 ? "a.safetensors" : "b.safetensors"));
    hf_json(&h, "model.safetensors.index.json", index);
    CHECK(hf_run(&h, "--dry-run") == 0, "%s", h.err);
    static const struct {
        const char *name, *file, *message;
        int rc;
    } c[] = {
        {"model.extra", "a.safetensors", "model.extra: the index lists this tensor, but no file has it", 0},
        {"lm_head.weight", "b.safetensors", "'lm_head.weight', not in 'b.safetensors': the index names another", 0},
        {"lm_head.weight", NULL, "'lm_head.weight': the index does not list it", 0},
        {"lm_head.weight", "c.safetensors", "'c.safetensors' is missing, of 3 files", 1},
        {"lm_head.weight", "../index/a.safetensors", "a file name without a directory", 1}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        json_t *copy = json_deep_copy(index), *m2 = json_object_get(copy, "weight_map");
        if (c[i].file) json_object_set_new(m2, c[i].name, json_string(c[i].file));
        else json_object_del(m2, c[i].name);
        hf_json(&h, "model.safetensors.index.json", copy);
        json_decref(copy);
        int rc = hf_run(&h, "--dry-run");
        CHECK(rc == c[i].rc && strstr(h.err, c[i].message), "case %zu: exit %d: %s", i, rc, h.err);
    }
    json_decref(index);
    hf_end(&h);
}

/* Neither the target nor a temporary file may stay after; what was there before stays. */
static void test_convert_atomic(void) {
    struct hf h;
    char cmd[512], *listing = NULL;
    hf_begin(&h, "atomic");
    hf_qwen3(&h);
    CHECK(!hf_convert_to(&h, "out.gguf"), "%s", h.err);
    snprintf(cmd, sizeof cmd, "ulimit -f 100; " CONVERT_BIN " %s -o %s/out2.gguf", h.dir, h.dir);
    arrsetlen(h.err, 0);
    int rc = run_command(cmd, NULL, &h.err);
    CHECK(rc == 1 && strstr(sb_cstr(&h.err), "File too large"), "exit %d: %s", rc, h.err);
    snprintf(cmd, sizeof cmd, "ulimit -f 60; " CONVERT_BIN " %s -o %s/out2.gguf --quantize nvfp4", h.dir, h.dir);
    arrsetlen(h.err, 0);
    rc = run_command(cmd, NULL, &h.err);
    CHECK(rc == 1 && strstr(sb_cstr(&h.err), "File too large"), "exit %d: %s", rc, h.err);
    snprintf(cmd, sizeof cmd, CONVERT_BIN " %s -o %s", h.dir, h.dir);
    arrsetlen(h.err, 0);
    CHECK(run_command(cmd, NULL, &h.err) == 1 && strstr(sb_cstr(&h.err), "is a directory"), "%s", h.err);
    snprintf(cmd, sizeof cmd, CONVERT_BIN " %s -o %s/none/out.gguf", h.dir, h.dir);
    CHECK(run_command(cmd, NULL, NULL) == 1, "no such directory");
    snprintf(cmd, sizeof cmd, "mkfifo %s/fifo; " CONVERT_BIN " %s -o %s/fifo; rc=$?; rm %s/fifo; exit $rc", h.dir,
             h.dir, h.dir, h.dir);
    arrsetlen(h.err, 0);
    CHECK(run_command(cmd, NULL, &h.err) == 1 && strstr(sb_cstr(&h.err), "not a regular file"), "%s", h.err);
    arrsetlen(h.err, 0);
    CHECK(run_command(CONVERT_BIN " convert/demo -o ''", NULL, &h.err) == 2, "%s", h.err);
    snprintf(cmd, sizeof cmd, "cd %s; ln -s tokenizer.json link; $OLDPWD/" CONVERT_BIN " . -o link", h.dir);
    arrsetlen(h.err, 0);
    CHECK(run_command(cmd, NULL, &h.err) == 1 && strstr(sb_cstr(&h.err), "is one of the input files"), "%s", h.err);
    snprintf(cmd, sizeof cmd,
             "cd %s; touch real.gguf; ln -sf real.gguf link; $OLDPWD/" CONVERT_BIN " . -o link && "
             "[ -L link ] && cmp real.gguf out.gguf",
             h.dir);
    arrsetlen(h.err, 0);
    CHECK(run_command(cmd, NULL, &h.err) == 0, "%s", h.err);
    snprintf(cmd, sizeof cmd,
             "cd %s; rm generation_config.json; mkfifo generation_config.json; $OLDPWD/" CONVERT_BIN " . "
             "--dry-run",
             h.dir);
    arrsetlen(h.err, 0);
    CHECK(run_command(cmd, NULL, &h.err) == 1 && strstr(sb_cstr(&h.err), "not a regular file"), "%s", h.err);
    snprintf(cmd, sizeof cmd, "ls %s", h.dir);
    run_command(cmd, &listing, NULL);
    CHECK(!strstr(sb_cstr(&listing), "tmp") && !strstr(listing, "out2") && strstr(listing, "out.gguf"),
          "left behind: %s", listing);
    arrfree(listing);
    hf_end(&h);
}

/* What moe would not load is refused before a file is begun; a file that was there stays. */
static void test_convert_unloadable(void) {
    struct hf h;
    char *listing = NULL, text[320];
    hf_begin(&h, "unloadable");
    h.n_experts[0] = h.n_experts[1] = 40;
    hf_qwen3(&h);
    hf_set(h.config, "{\"num_experts\":40,\"num_experts_per_tok\":33}");
    hf_write(&h, "out.gguf", "old\n", 4);
    for (int dry = 0; dry < 2; dry++) {
        hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
        snprintf(text, sizeof text, "-o %s/out.gguf%s", h.dir, dry ? " --dry-run" : "");
        CHECK(hf_run(&h, text) == 1, "written");
        CHECK(strstr(h.err, "metadata key 'qwen3moe.expert_used_count' is 33, expected 1 to 32"), "%s", h.err);
        CHECK(!arrlen(h.out) && strchr(h.err, '\n') == h.err + strlen(h.err) - 1, "more than a line: %s", h.err);
    }
    snprintf(text, sizeof text, "cd %s; cat out.gguf; ls", h.dir);
    run_command(text, &listing, NULL);
    CHECK(!strncmp(sb_cstr(&listing), "old\n", 4) && !strstr(listing, "tmp"), "left behind: %s", listing);
    arrfree(listing);
    hf_end(&h);
}

/* SIGHUP, which is ignored, then SIGTERM in the middle: two sparse dense layers of 400 MB take long enough. */
static void test_convert_interrupt(void) {
    static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
    const long long width = 1 << 20, bytes = width * HF_EMBD * 2;
    struct hf h;
    char text[512], *s = NULL, *listing = NULL;
    hf_begin(&h, "interrupt");
    h.n_experts[0] = h.n_experts[1] = 0;
    hf_qwen3(&h);
    json_t *map = json_object(), *index = json_pack("{s:o}", "weight_map", map);
    sb_puts(&s, "01234567{");
    for (int i = 0; i < 6; i++) {
        const int p = i % 3;
        snprintf(text, sizeof text, "model.layers.%d.mlp.%s.weight", i / 3, part[p]);
        hf_drop(&h, text);
        json_object_set_new(map, text, json_string("large.safetensors"));
        sb_printf(&s, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%lld,%lld],\"data_offsets\":[%lld,%lld]}", i ? "," : "",
                  text, p < 2 ? width : HF_EMBD, p < 2 ? HF_EMBD : width, i * bytes, (i + 1) * bytes);
    }
    sb_puts(&s, "}");
    uint64_t n = arrlenu(s) - 8;
    memcpy(s, &n, 8);
    hf_write(&h, "large.safetensors", s, arrlenu(s));
    snprintf(text, sizeof text, "%s/large.safetensors", h.dir);
    CHECK(!truncate(text, (off_t)(n + 8) + 6 * bytes), "%s", text);
    for (size_t i = 0; i < arrlenu(h.t); i++) json_object_set_new(map, h.t[i].name, json_string("small.safetensors"));
    hf_shard(&h, "small.safetensors", 0, arrlenu(h.t));
    hf_json(&h, "model.safetensors.index.json", index);
    json_decref(index);
    hf_set(h.config, "{\"intermediate_size\":1048576,\"mlp_only_layers\":[0,1]}");
    CHECK(hf_run(&h, "--dry-run") == 0, "%s", h.err);
    bool room = true;
    for (int quantize = 0; quantize < 2; quantize++) {
        arrsetlen(h.err, 0);
        snprintf(text, sizeof text,
                 "trap '' HUP; " CONVERT_BIN " %s -o %s/out.gguf%s & p=$!; "
                 "until ls %s/out.gguf.tmp* || ! kill -0 $p; do sleep 0.01; done; kill -HUP $p; kill -TERM $p; wait $p",
                 h.dir, h.dir, quantize ? " --quantize nvfp4 --dense" : "", h.dir);
        int rc = run_command(text, NULL, &h.err);
        room = room && !strstr(sb_cstr(&h.err), " needed, ");
        CHECK(!room || rc == 128 + SIGTERM, "exit %d: %s", rc, h.err);
    }
    snprintf(text, sizeof text, "ls %s", h.dir);
    run_command(text, &listing, NULL);
    CHECK(!strstr(sb_cstr(&listing), "out.gguf"), "left behind: %s", listing);
    arrfree(listing);
    arrfree(s);
    hf_end(&h);
    if (!room) SKIP("less than 1.7 GB are free");
}

static void test_convert_usage(void) {
    static const struct {
        const char *args;
        int rc;
        const char *says;
    } c[] = {{"--help", 0, "moe-convert HF_DIR -o OUT.gguf"},
             {"--version", 0, "moe-convert 0."},
             {"", 2, "directory given"},
             {"convert/demo", 2, "-o OUT.gguf or --dry-run"},
             {"convert/demo -o", 2, "-o needs a value"},
             {"convert/demo --quantise", 2, "unknown option '--quantise'"},
             {"a b --dry-run", 2, "one directory"},
             {"tests/none --dry-run", 1, "cannot open 'tests/none': No such file"},
             {"tests --dry-run", 1, "'tests' has no config.json"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char cmd[160], *out = NULL;
        snprintf(cmd, sizeof cmd, CONVERT_BIN " %s 2>&1", c[i].args);
        int rc = run_command(cmd, &out, NULL);
        CHECK(rc == c[i].rc && strstr(sb_cstr(&out), c[i].says), "'%s': exit %d: %s", c[i].args, rc, out);
        arrfree(out);
    }
}

/* The demo model: every NVFP4 matrix of the release is in the GGUF, block by block. */
static void test_convert_demo(void) {
    char path[128], cmd[256], err[ERR_MAX], *out = NULL, *said = NULL;
    struct gguf g;
    snprintf(path, sizeof path, "%s/demo.gguf", test_dir());
    snprintf(cmd, sizeof cmd, CONVERT_BIN " convert/demo -o %s --name demo", path);
    if (!CHECK(!run_command(cmd, &out, &said), "%s", sb_cstr(&said)) ||
        !CHECK(!gguf_open(&g, path, err, sizeof err), "%s", err))
        return;
    CHECK(!arrlen(out), "stdout stays empty");
    CHECK(key_is(&g, "general.name", "demo") && key_int(&g, "general.file_type") == 39, "names");
    CHECK(key_is(&g, "tokenizer.ggml.pre", "qwen2") && g.n_tensors == 284, "%u tensors", g.n_tensors);
    size_t matrices = 0;
    for (int shard = 1; shard <= 2; shard++) {
        char *file = NULL;
        json_error_t e;
        snprintf(path, sizeof path, "convert/demo/model-0000%d-of-00002.safetensors", shard);
        if (!CHECK(!read_file(path, &file, err), "%s", err)) continue;
        uint64_t n = gguf_rd64((uint8_t *)file);
        const uint8_t *data = (uint8_t *)file + 8 + n;
        json_t *header = json_loadb(file + 8, n, 0, &e), *t;
        const char *name;
        json_object_foreach(header, name, t) {
            int layer, expert, at = 0;
            char side[160], part[16];
            /* routed experts are 252 of the 290 matrices and have one name each */
            if (sscanf(name, "model.layers.%d.mlp.experts.%d.%15[a-z]_proj.weight%n", &layer, &expert, part, &at) !=
                    3 ||
                name[at])
                continue;
            snprintf(side, sizeof side, "%s_scale", name);
            json_t *s = json_object_get(header, side), *b = json_object_get(t, "data_offsets");
            snprintf(side, sizeof side, "%s_scale_2", name);
            json_t *s2 = json_object_get(header, side);
            if (!at || !CHECK(s && s2, "%s: scales in another shard", name)) continue;
            const uint8_t *codes = data + json_integer_value(json_array_get(b, 0)),
                          *scales = data + json_integer_value(json_array_get(json_object_get(s, "data_offsets"), 0)),
                          *factor = data + json_integer_value(json_array_get(json_object_get(s2, "data_offsets"), 0));
            snprintf(side, sizeof side, "blk.%d.ffn_%s_exps.weight", layer, part);
            const struct gguf_tensor *w = gguf_find_tensor(&g, side);
            if (!CHECK(w && w->type == GGUF_NVFP4 && w->ne[2] == 16, "%s", side)) continue;
            size_t blocks = w->ne[0] * w->ne[1] / 64, bad = 0;
            const uint8_t *got = w->data + (size_t)expert * blocks * 36;
            for (size_t i = 0; i < blocks; i++)
                for (size_t k = 0; k < 64; k++) {
                    uint8_t code = got[36 * i + 4 + k / 16 * 8 + k % 8] >> (k / 8 & 1) * 4 & 15;
                    bad += code != (codes[32 * i + k / 2] >> (k & 1) * 4 & 15) ||
                           got[36 * i + k / 16] != scales[4 * i + k / 16];
                }
            CHECK(!bad, "%s: %zu weights differ", name, bad);
            snprintf(side, sizeof side, "blk.%d.ffn_%s_exps.scale", layer, part);
            CHECK(f32_to_bits(out_f32(&g, side, 16, (uint64_t)expert)) == gguf_rd32(factor), "%s", side);
            matrices++;
        }
        json_decref(header);
        arrfree(file);
    }
    CHECK(matrices == 6 * 16 * 3, "%zu matrices were compared", matrices);
    arrfree(out);
    arrfree(said);
    gguf_close(&g);
}

static void test_convert_dry_run(void) {
    char *out = NULL, *said = NULL;
    int rc = run_command(CONVERT_BIN " convert/demo --dry-run", &out, &said);
    sb_cstr(&out);
    CHECK(rc == 0 && !arrlen(said), "exit %d", rc);
    CHECK(out && strstr(out, "blk.6.attn_k_b.weight") && strstr(out, "BF16 of E2M1 x E4M3, exact"), "listing");
    CHECK(out && strstr(out, "\ntotal NVFP4      75 tensors"), "totals");
    arrfree(out);
    arrfree(said);
}

/* Byte at which the tensor table of a file with one image ends. */
static size_t header_table_end(const struct gguf *g) {
    const struct gguf_tensor *t = &g->tensors[g->n_tensors - 1];
    return (size_t)((const uint8_t *)t->name.p + t->name.n - g->images[0].base) + 4 + 8 * t->n_dims + 4 + 8;
}

static bool all_zeros(const uint8_t *p, uint64_t n) { return !n || (!p[0] && !memcmp(p, p + 1, n - 1)); }

/* A header without data against the file of a conversion: the same bytes, the same tensors, zeros instead of data. */
static void header_compare(const char *what, const char *path, const char *whole_path) {
    struct gguf h, g;
    char err[ERR_MAX] = "", *head = NULL, *whole = NULL;
    if (!CHECK(!read_file(path, &head, err) && !read_file(whole_path, &whole, err), "%s", err)) return;
    size_t n = arrlenu(head);
    CHECK(gguf_open(&h, path, err, sizeof err) && strstr(err, "holds only a header: use it with --plan, or convert"),
          "%s: '%s'", what, err);
    if (!CHECK(!gguf_open_header(&h, path, err, sizeof err), "%s", err)) return;
    if (!CHECK(!gguf_open_header(&g, whole_path, err, sizeof err), "%s", err)) return;
    size_t start = (header_table_end(&g) + 31) / 32 * 32;
    CHECK(n == start && n < arrlenu(whole) && !memcmp(head, whole, n), "%s: a header of %zu bytes, not %zu", what, n,
          start);
    CHECK(h.header_only && !g.header_only && h.images[0].size == arrlenu(whole), "%s: %zu bytes, not %zu", what,
          h.images[0].size, arrlenu(whole));
    CHECK(h.n_kv == g.n_kv && h.n_tensors == g.n_tensors, "%s: %u keys, %u tensors", what, h.n_kv, h.n_tensors);
    for (uint32_t i = 0; i < h.n_tensors && i < g.n_tensors; i++) {
        const struct gguf_tensor *a = &h.tensors[i], *b = &g.tensors[i];
        CHECK(!gguf_str_cmp(a->name, b->name) && a->bytes == b->bytes && a->type == b->type &&
                  a->data - h.images[0].base == b->data - g.images[0].base && all_zeros(a->data, a->bytes),
              "%s: tensor %u", what, i);
    }
    gguf_close(&h);
    gguf_close(&g);
    CHECK(!h.header_only && !h.images, "what was closed is empty");
    arrfree(head);
    arrfree(whole);
}

static void test_convert_header(void) {
    static const char *const dirs[] = {"convert/demo",
                                       "tests/fixtures/bailing_hybrid",
                                       "tests/fixtures/kimi_linear_nvfp4",
                                       "tests/fixtures/deepseek_v3_fp8",
                                       "tests/fixtures/deepseek_v3_nvfp4",
                                       "tests/fixtures/deepseek_v3_reap",
                                       "tests/fixtures/deepseek_v32_fp8",
                                       "tests/fixtures/glm4_moe_air",
                                       "tests/fixtures/glm4_moe_lite",
                                       "tests/fixtures/glm5_next",
                                       "tests/fixtures/glm5_next_nvfp4",
                                       "tests/fixtures/glm_moe_dsa_types",
                                       "tests/fixtures/gpt_oss",
                                       "tests/fixtures/gpt_oss_bf16",
                                       "tests/fixtures/kimi_k2",
                                       "tests/fixtures/mimo_v2_flash_fp8",
                                       "tests/fixtures/minimax_m3_nvfp4",
                                       "tests/fixtures/mixtral_nvfp4",
                                       "tests/fixtures/nemotron_h",
                                       "tests/fixtures/inkling2_loop",
                                       "tests/fixtures/inkling2_nvfp4",
                                       "tests/fixtures/nemotron_h_nvfp4",
                                       "tests/fixtures/step3p7",
                                       "tests/fixtures/qwen3_5_moe_nvfp4",
                                       "tests/fixtures/qwen4_exp",
                                       "tests/fixtures/qwen4_exp_nvfp4",
                                       "tests/fixtures/qwen3_next",
                                       "tests/fixtures/qwen3moe",
                                       "tests/fixtures/qwen3moe_ct"};
    char cmd[512], path[128], whole[128];
    snprintf(path, sizeof path, "%s/header.gguf", test_dir());
    snprintf(whole, sizeof whole, "%s/whole.gguf", test_dir());
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        char *list = NULL, *list_o = NULL, *said = NULL;
        snprintf(cmd, sizeof cmd, CONVERT_BIN " %s -o %s --name 'a model'", dirs[i], whole);
        if (!CHECK(!run_command(cmd, NULL, &said), "%s", sb_cstr(&said))) return;
        snprintf(cmd, sizeof cmd, CONVERT_BIN " %s --dry-run --name 'a model'", dirs[i]);
        CHECK(!run_command(cmd, &list, NULL) && arrlen(list), "%s: no listing", dirs[i]);
        snprintf(cmd, sizeof cmd, CONVERT_BIN " %s --dry-run --name 'a model' -o %s", dirs[i], path);
        arrsetlen(said, 0);
        if (!CHECK(!run_command(cmd, &list_o, &said), "%s", sb_cstr(&said))) return;
        CHECK(strstr(sb_cstr(&said), "only the header of "), "%s: %s", dirs[i], said);
        CHECK(!strcmp(sb_cstr(&list), sb_cstr(&list_o)), "%s: another listing", dirs[i]);
        header_compare(dirs[i], path, whole);
        arrfree(list), arrfree(list_o), arrfree(said);
    }
    unlink(path), unlink(whole);
}

/* What --dry-run lists and the header it writes are those of the file. skipped: tensors of the source. */
static void check_dry_run(struct hf *h, int skipped) {
    char want[128], args[320], path[256], whole[256];
    snprintf(path, sizeof path, "%s/header.gguf", h->dir);
    snprintf(whole, sizeof whole, "%s/out.gguf", h->dir);
    snprintf(args, sizeof args, "--dry-run -o %s", path);
    CHECK(!hf_run(h, args), "%s", h->err);
    snprintf(want, sizeof want, " bytes, %zu with header and padding; %d tensors of the source are skipped",
             h->g.images[0].size, skipped);
    CHECK(strstr(h->out, want), "%s in %s", want, h->out);
    snprintf(want, sizeof want, "total        %6u tensors", h->g.n_tensors);
    CHECK(strstr(h->out, want), "%s in %s", want, h->out);
    header_compare(h->dir, path, whole);
}

/* The embedding and the output matrix of an MTP layer are left out if their bytes are those of the model's. */
static void test_convert_copies(void) {
    enum { ROWS = 9375, BYTES = 2 * 64 * ROWS /* more than the converter compares at a time */ };
    static const char *const tables[] = {"model.embed_tokens.weight", "lm_head.weight"};
    static const char *const names[] = {"nextn.embed_tokens.weight", "nextn.shared_head_head.weight"};
    static const char says[] = " of the model's embedding or output matrix in layers for multi-token prediction";
    static const struct {
        const char *what;
        int of[2];    /* the tables that the two are copies of */
        bool bit[2];  /* the last byte is another */
        bool f16;     /* the same bytes with another type */
        bool tied;    /* config.json says that the output matrix is the embedding; it is so if it is a copy */
        bool same;    /* it is a copy */
        bool kept[2]; /* what is in the file */
    } c[] = {{"copies", {0, 1}, .kept = {false, false}},
             {"another embedding", {0, 1}, .bit = {true, false}, .kept = {true, false}},
             {"another head", {0, 1}, .bit = {false, true}, .kept = {false, true}},
             {"others", {0, 1}, .bit = {true, true}, .kept = {true, true}},
             {"another type", {0, 1}, .f16 = true, .kept = {true, true}},
             {"swapped", {1, 0}, .kept = {true, true}},
             {"tied", {0, 1}, .tied = true, .same = true, .kept = {false, false}},
             {"tied, with another head", {0, 1}, .tied = true, .kept = {false, false}}};
    for (size_t k = 0; k < sizeof c / sizeof *c; k++) {
        struct hf h;
        uint8_t *data[2];
        const int left_out = !c[k].kept[0] + !c[k].kept[1];
        hf_begin(&h, "copies");
        hf_deepseek(&h);
        hf_set(h.config, "{\"vocab_size\":9375}");
        if (c[k].tied) hf_set(h.config, "{\"tie_word_embeddings\":true}");
        for (int i = 0; i < 2; i++) {
            hf_drop(&h, tables[i]);
            hf_plain(&h, tables[i], "[9375,64]", BYTES / 2, HF_BF16);
        }
        if (c[k].same) memcpy(hf_find(&h, tables[1])->data, hf_find(&h, tables[0])->data, BYTES);
        for (int i = 0; i < 2; i++) {
            const struct hf_tensor of = *hf_find(&h, tables[c[k].of[i]]); /* hf_add moves the list */
            const char *name = i ? "model.layers.2.shared_head.head.weight" : "model.layers.2.embed_tokens.weight";
            data[i] = hf_add(&h, name, c[k].f16 ? "F16" : "BF16", of.shape, of.data, BYTES)->data;
            data[i][BYTES - 1] ^= c[k].bit[i];
        }
        if (hf_convert(&h)) {
            for (int i = 0; i < 2; i++) {
                char name[64];
                snprintf(name, sizeof name, "blk.2.%s", names[i]);
                const struct gguf_tensor *t = gguf_find_tensor(&h.g, name);
                CHECK(!t == !c[k].kept[i], "%s: %s", c[k].what, name);
                CHECK(!t || (t->type == (c[k].f16 ? GGUF_F16 : GGUF_BF16) && !memcmp(t->data, data[i], BYTES)),
                      "%s: %s", c[k].what, name);
            }
            const char *line = strstr(h.err, says), *number = left_out == 1 ? "1 copy" : "2 copies";
            CHECK(!line == !left_out && (!line || !strncmp(line - strlen(number), number, strlen(number))), "%s: %s",
                  c[k].what, h.err);
            CHECK(!line || !strstr(line + 1, says), "%s: more than one line: %s", c[k].what, h.err);
            CHECK(key_int(&h.g, "deepseek2.nextn_predict_layers") == 1, "%s: the layer", c[k].what);
            CHECK(!gguf_find_tensor(&h.g, "output.weight") == c[k].same, "%s: output.weight", c[k].what);
            check_dry_run(&h, left_out + c[k].same);
        }
        hf_end(&h);
    }
}

/* Every cut of a file: in the header, in the padding after it, in the data. */
static void test_convert_header_cuts(void) {
    struct gguf_writer w = {0};
    struct gguf g;
    char path[128], err[ERR_MAX], *file = NULL;
    size_t start = 0;
    gguf_put_u32(&w, "x", 1);
    gguf_add_tensor(&w, "a", GGUF_F32, 1, (uint64_t[]){3});
    gguf_add_tensor(&w, "bc", GGUF_BF16, 2, (uint64_t[]){32, 2});
    uint8_t *header = gguf_header(&w, &start);
    sb_put(&file, (char *)header, start);
    for (uint64_t i = 0; i < w.data_bytes; i++) sb_put(&file, "x", 1);
    size_t table = 24 + w.kv_len + w.info_len, end = arrlenu(file);
    CHECK(table < start && end == start + 32 + 128, "%zu, %zu, %zu", table, start, end);
    snprintf(path, sizeof path, "%s/cut.gguf", test_dir());
    for (size_t n = 0; n <= end; n++) {
        struct hf h = {.out = NULL};
        snprintf(h.dir, sizeof h.dir, "%s", test_dir());
        hf_write(&h, "cut.gguf", file, n);
        bool whole = !gguf_open(&g, path, err, sizeof err), only = n >= table && n <= start;
        CHECK(whole == (n == end), "%zu of %zu bytes: %s", n, end, whole ? "taken" : err);
        CHECK(whole || !!strstr(err, "holds only a header") == only, "%zu bytes: %s", n, err);
        gguf_close(&g);
        bool taken = !gguf_open_header(&g, path, err, sizeof err);
        CHECK(taken == (whole || only) && g.header_only == only, "%zu bytes: %s", n, taken ? "taken" : err);
        CHECK(taken || (n > start) == !!strstr(err, "end beyond the file"), "%zu bytes: %s", n, err);
        if (only && taken) {
            CHECK(g.images[0].size == end && g.n_tensors == 2 && g.tensors[1].bytes == 128, "%zu bytes", n);
            CHECK(all_zeros(g.images[0].base + start, end - start), "%zu bytes: the data are not zeros", n);
        }
        gguf_close(&g);
    }
    unlink(path);
    free(header);
    arrfree(file);
    gguf_writer_free(&w);
}

/* Headers of large files, and those that lie about them. */
static void test_convert_header_sizes(void) {
    static const struct {
        uint64_t ne[2], offset; /* of the second tensor; the first has 128 bytes */
        const char *message;    /* NULL: it is taken */
    } c[] = {{{1 << 20, 1 << 20}, 128, NULL},
             {{1ull << 44, 1}, 128, "'b': data of 70368744177664 bytes at offset 128 end beyond 70368744177664 bytes"},
             {{1ull << 58, 1}, 128, "'b': data of 1152921504606846976 bytes at offset 128 end beyond"},
             {{1ull << 60, 1}, 128, "'b': data of 4611686018427387904 bytes"},
             {{1ull << 61, 4}, 128, "the element count overflows"},
             {{32, 1}, 1ull << 46, "'b': data of 128 bytes at offset 70368744177664 end beyond"},
             {{32, 1}, 0ull - 128, "end beyond 70368744177664 bytes"},
             {{32, 1}, 4, "offset 4 is not a multiple of 32"},
             {{32, 1}, 96, "tensors 'a' and 'b' overlap"}};
    struct hf h = {.out = NULL};
    struct gguf g;
    char path[128], err[ERR_MAX];
    snprintf(h.dir, sizeof h.dir, "%s", test_dir());
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct gguf_writer w = {0};
        size_t n = 0;
        gguf_add_tensor(&w, "a", GGUF_F32, 1, (uint64_t[]){32});
        w.data_bytes = c[i].offset;
        gguf_add_tensor(&w, "b", GGUF_F32, 2, c[i].ne);
        uint8_t *header = gguf_header(&w, &n);
        hf_write(&h, "sizes.gguf", header, n);
        snprintf(path, sizeof path, "%s/sizes.gguf", test_dir());
        bool taken = !gguf_open_header(&g, path, err, sizeof err);
        CHECK(taken == !c[i].message, "case %zu: %s", i, taken ? "taken" : err);
        CHECK(taken || strstr(err, c[i].message ? c[i].message : "?"), "case %zu: %s", i, err);
        if (taken) {
            const struct gguf_tensor *t = &g.tensors[1];
            CHECK(t->bytes == 1ull << 42 && t->data + t->bytes == g.images[0].base + g.images[0].size, "the size");
            for (uint64_t at = 0; at < t->bytes; at += t->bytes / 64) CHECK(!t->data[at], "byte %zu", (size_t)at);
            CHECK(!t->data[t->bytes - 1], "the last byte");
        }
        gguf_close(&g);
        CHECK(gguf_open(&g, path, err, sizeof err), "case %zu: taken as a whole file", i);
        if (!i) { /* a part of a split file is never a header; the only part is */
            static const char *const names[] = {"s-00001-of-00001.gguf", "s-00001-of-00002.gguf"};
            for (int k = 0; k < 2; k++) {
                hf_write(&h, names[k], header, n);
                snprintf(path, sizeof path, "%s/%s", test_dir(), names[k]);
                bool ok = !gguf_open_header(&g, path, err, sizeof err);
                CHECK(ok == !k && (ok || strstr(err, "one of 2 parts, and it holds only a header")), "%s", err);
                gguf_close(&g);
                unlink(path);
            }
        }
        free(header);
        gguf_writer_free(&w);
    }
    snprintf(path, sizeof path, "%s/sizes.gguf", test_dir());
    unlink(path);
}

/* The header replaces a file as a conversion does: whole, never one of the source, and not when the disk is full. */
static void test_convert_header_target(void) {
    static const struct {
        const char *before, *target,
            *message; /* shell commands in the directory; the argument of -o; NULL: it is written */
    } c[] = {{"true", "config.json", "is one of the input files"},
             {"true", "model.safetensors", "is one of the input files"},
             {"ln -s model.safetensors link", "link", "is one of the input files"},
             {"ln model.safetensors hard", "hard", "is one of the input files"},
             {"true", ".", "is a directory"},
             {"true", "none/h.gguf", "No such file"},
             {"mkfifo fifo", "fifo", "not a regular file"},
             {"echo old >h.gguf; ulimit -f 1", "h.gguf", "File too large"},
             {"[ \"$(cat h.gguf)\" = old ]", "h.gguf", NULL},
             {"ln -s h.gguf to", "to", NULL}};
    struct hf h;
    char cmd[1024], path[256], *listing = NULL;
    hf_begin(&h, "target");
    hf_qwen3(&h);
    if (!hf_convert(&h)) return;
    snprintf(cmd, sizeof cmd, "md5sum %s/config.json %s/model.safetensors >%s/sums", h.dir, h.dir, h.dir);
    CHECK(!run_command(cmd, NULL, NULL), "%s", cmd);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char *out = NULL, *said = NULL;
        snprintf(cmd, sizeof cmd, "d=$PWD; cd %s; { %s; } && $d/" CONVERT_BIN " . --dry-run --name target -o %s", h.dir,
                 c[i].before, c[i].target);
        int rc = run_command(cmd, &out, &said);
        CHECK(rc == !!c[i].message && strstr(sb_cstr(&said), c[i].message ? c[i].message : "only the header of"),
              "case %zu: exit %d: %s", i, rc, said);
        CHECK(rc ? !arrlen(out) : arrlen(out) > 0, "case %zu: a refusal lists nothing", i);
        arrfree(out), arrfree(said);
    }
    snprintf(path, sizeof path, "%s/h.gguf", h.dir);
    snprintf(cmd, sizeof cmd, "%s/out.gguf", h.dir);
    header_compare("h.gguf", path, cmd);
    snprintf(cmd, sizeof cmd, "md5sum -c %s/sums && [ -L %s/to ] && ls %s", h.dir, h.dir, h.dir);
    CHECK(!run_command(cmd, &listing, NULL) && !strstr(sb_cstr(&listing), "tmp"), "left behind: %s", listing);
    arrfree(listing);
    hf_end(&h);
}

#define TESTS_CONVERT                                                                                             \
    {"convert/forms", test_convert_forms}, {"convert/fp8", test_convert_fp8},                                     \
        {"convert/deepseek", test_convert_deepseek}, {"convert/delta", test_convert_delta},                       \
        {"convert/delta_keys", test_convert_delta_keys}, {"convert/delta_names", test_convert_delta_names},       \
        {"convert/fused", test_convert_fused}, {"convert/fused_refusals", test_convert_fused_refusals},           \
        {"convert/delta_narrow", test_convert_delta_narrow}, {"convert/prediction", test_convert_prediction},     \
        {"convert/prediction_layers", test_convert_prediction_layers}, {"convert/small", test_convert_small},     \
        {"convert/mixed", test_convert_mixed}, {"convert/quantization_keys", test_convert_quantization_keys},     \
        {"convert/left_out", test_convert_left_out}, {"convert/odd_prediction", test_convert_odd_prediction},     \
        {"convert/delta_dense", test_convert_delta_dense}, {"convert/precision", test_convert_precision},         \
        {"convert/unloadable", test_convert_unloadable}, {"convert/keys", test_convert_keys},                     \
        {"convert/vocabulary", test_convert_vocabulary}, {"convert/pre_tokenizers", test_convert_pre_tokenizers}, \
        {"convert/kimi", test_convert_kimi}, {"convert/experts", test_convert_experts},                           \
        {"convert/golden", test_convert_golden}, {"convert/narrow", test_convert_narrow},                         \
        {"convert/input_scale", test_convert_input_scale}, {"convert/refusals", test_convert_refusals},           \
        {"convert/norms", test_convert_norms}, {"convert/scales", test_convert_scales},                           \
        {"convert/safetensors", test_convert_safetensors}, {"convert/index", test_convert_index},                 \
        {"convert/atomic", test_convert_atomic}, {"convert/interrupt", test_convert_interrupt},                   \
        {"convert/usage", test_convert_usage}, {"convert/demo", test_convert_demo},                               \
        {"convert/dry_run", test_convert_dry_run}, {"convert/copies", test_convert_copies},                       \
        {"convert/header", test_convert_header}, {"convert/header_cuts", test_convert_header_cuts},               \
        {"convert/header_sizes", test_convert_header_sizes}, {"convert/header_target", test_convert_header_target},
