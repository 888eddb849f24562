/* build/moe-convert on the families whose releases name, lay out and describe tensors each in their own way: the tiny
 * releases of tests/fixtures as they are, and with changes. Truth is computed from the bytes of their safetensors files
 * with the formulas of the formats. */

/* Reads JSON as Python writes it: jansson does not know Infinity. */
static json_t *hf_load_json(const char *path) {
    char *text = NULL, err[ERR_MAX];
    if (!CHECK(!read_file(path, &text, err), "%s", err)) return NULL;
    sb_cstr(&text);
    for (char *p = text; (p = strstr(p, "Infinity"));) memcpy(p, "9e307   ", strlen("Infinity"));
    json_t *j = json_loadb(text, strlen(text), 0, NULL);
    arrfree(text);
    return j;
}

/* Reads a fixture as a directory in the making. */
static void hf_load(struct hf *h, const char *name) {
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json",
                                        "generation_config.json"};
    json_t **const to[] = {&h->config, &h->tokenizer, &h->tokenizer_config, &h->generation};
    struct release s;
    const char *key;
    json_t *t;
    hf_begin(h, name);
    for (int i = 0; i < 4; i++) {
        char path[256];
        snprintf(path, sizeof path, "tests/fixtures/%s/%s", name, files[i]);
        json_decref(*to[i]);
        CHECK((*to[i] = hf_load_json(path)), "%s", path);
    }
    release_read(&s, name);
    for (int i = 0; i < RELEASE_FILES; i++) json_object_foreach(s.header[i], key, t) {
            const json_t *at = json_object_get(t, "data_offsets");
            if (!at) continue; /* __metadata__ */
            const size_t begin = (size_t)json_integer_value(json_array_get(at, 0));
            const uint8_t *file = (const uint8_t *)s.file[i];
            char *shape = json_dumps(json_object_get(t, "shape"), JSON_COMPACT);
            hf_add(h, key, json_string_value(json_object_get(t, "dtype")), shape, file + 8 + gguf_rd64(file) + begin,
                   (size_t)json_integer_value(json_array_get(at, 1)) - begin);
            free(shape);
        }
    release_free(&s);
}

/* Value i of a tensor of BF16, F16 or F32. */
static float hf_float(struct hf *h, const char *name, size_t i) {
    const struct hf_tensor *t = hf_find(h, name);
    const size_t bytes = t && !strcmp(t->dtype, "F32") ? 4 : 2;
    uint16_t b = 0;
    float v = 0;
    if (!CHECK(t && (i + 1) * bytes <= arrlenu(t->data), "no %s, or no value %zu", name, i)) return NAN;
    memcpy(bytes == 4 ? (void *)&v : &b, t->data + bytes * i, bytes);
    return bytes == 4 ? v : !strcmp(t->dtype, "F16") ? f16_to_f32(b) : bf16_to_f32(b);
}

/* All values of an output, without its .scale; malloc'ed. NULL after a failed check. */
static float *out_values(const struct gguf *g, const char *name, uint32_t type, uint64_t a, uint64_t b, uint64_t c) {
    const struct gguf_tensor *t = out_tensor(g, name, type, a, b, c);
    if (!t) return NULL;
    float *v = xmalloc((size_t)(a * b * c) * sizeof *v);
    gguf_dequantize_row(t->type, t->data, v, (size_t)(a * b * c));
    return v;
}

/* The value of a key: numbers, of an array with commas between them, or a string. "": there is none. */
static const char *key_text(const struct gguf *g, const char *key) {
    static char text[512];
    const struct gguf_kv *kv = gguf_find(g, key);
    struct gguf_str s;
    double v;
    int64_t n;
    text[0] = 0;
    if (gguf_get_str(g, key, &s)) snprintf(text, sizeof text, "%.*s", (int)s.n, s.p);
    for (uint64_t i = 0; kv && kv->type != GGUF_V_STR && i < kv->n; i++) {
        if (gguf_elem_int(kv, i, &n)) v = (double)n;
        else if (!gguf_elem_f64(kv, i, &v)) return "?";
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%.7g", i ? "," : "", v);
    }
    return text;
}

/* Converts a directory as test_dir()/file, with `args`. */
static bool fixture_gguf(const char *name, const char *args, const char *file, struct gguf *g) {
    char cmd[512], path[256], err[ERR_MAX], *said = NULL;
    snprintf(path, sizeof path, "%s/%s", test_dir(), file);
    snprintf(cmd, sizeof cmd, CONVERT_BIN " tests/fixtures/%s -o %s %s", name, path, args);
    const bool ok = CHECK(!run_command(cmd, NULL, &said), "%s: %s", name, sb_cstr(&said)) &&
                    CHECK(!gguf_open(g, path, err, sizeof err), "%s", err);
    arrfree(said);
    return ok;
}

/* Keys of GGUF files that fixtures become. */
static const struct {
    const char *fixture, *key, *value;
} family_keys[] = {
    {"gpt_oss", "gpt-oss.attention.sliding_window", "8"},
    {"gpt_oss", "gpt-oss.attention.sliding_window_pattern", "1,0,1"},
    {"gpt_oss", "gpt-oss.expert_gating_func", "3"},
    {"gpt_oss", "gpt-oss.expert_feed_forward_length", "64"},
    {"gpt_oss", "gpt-oss.rope.freq_base", "150000"},
    {"gpt_oss", "gpt-oss.rope.freq_base_swa", ""},
    {"gpt_oss", "gpt-oss.rope.dimension_count", ""},
    {"gpt_oss", "gpt-oss.rope.scaling.type", "yarn"},
    {"gpt_oss", "gpt-oss.rope.scaling.factor", "32"},
    {"gpt_oss", "gpt-oss.rope.scaling.original_context_length", "1024"},
    {"gpt_oss", "gpt-oss.rope.scaling.yarn_beta_fast", "32"},
    {"gpt_oss", "gpt-oss.attention.layer_norm_rms_epsilon", "1e-05"},
    {"minimax_m2", "minimax-m2.rope.dimension_count", "32"},
    {"minimax_m2", "minimax-m2.expert_gating_func", "2"},
    {"minimax_m2", "minimax-m2.expert_weights_norm", "1"},
    {"minimax_m2", "minimax-m2.expert_feed_forward_length", "64"},
    {"minimax_m2", "minimax-m2.expert_weights_scale", ""},
    {"minimax_m3", "general.architecture", "minimax-m3"},
    {"minimax_m3", "minimax-m3.attention.indexer.head_count", "2"},
    {"minimax_m3", "minimax-m3.attention.indexer.key_length", "64"},
    {"minimax_m3", "minimax-m3.attention.indexer.top_k", "3"},
    {"minimax_m3", "minimax-m3.attention.indexer.block_size", "16"},
    {"minimax_m3", "minimax-m3.attention.indexer.local_blocks", "1"},
    {"minimax_m3", "minimax-m3.attention.indexer.types", ""},
    {"minimax_m3", "minimax-m3.leading_dense_block_count", "1"},
    {"minimax_m3", "minimax-m3.feed_forward_length", "128"},
    {"minimax_m3", "minimax-m3.expert_feed_forward_length", "64"},
    {"minimax_m3", "minimax-m3.expert_shared_count", "1"},
    {"minimax_m3", "minimax-m3.expert_shared_feed_forward_length", ""},
    {"minimax_m3", "minimax-m3.expert_gating_func", "2"},
    {"minimax_m3", "minimax-m3.expert_weights_norm", "1"},
    {"minimax_m3", "minimax-m3.expert_weights_scale", "2"},
    {"minimax_m3", "minimax-m3.rope.dimension_count", "32"},
    {"minimax_m3", "minimax-m3.rope.freq_base", "5000000"},
    {"minimax_m3", "minimax-m3.attention.key_length", "64"},
    {"minimax_m3", "minimax-m3.block_count", "3"},
    {"minimax_m3", "minimax-m3.nextn_predict_layers", ""},
    {"minimax_m3_nvfp4", "minimax-m3.attention.indexer.head_count", "3"},
    {"minimax_m3_nvfp4", "minimax-m3.attention.indexer.key_length", "128"},
    {"minimax_m3_nvfp4", "minimax-m3.attention.indexer.block_size", "32"},
    {"minimax_m3_nvfp4", "minimax-m3.attention.indexer.local_blocks", "2"},
    {"minimax_m3_nvfp4", "minimax-m3.feed_forward_length", "192"},
    {"minimax_m3_nvfp4", "minimax-m3.expert_shared_feed_forward_length", "64"},
    {"minimax_m3_nvfp4", "minimax-m3.rope.dimension_count", "16"},
    {"mixtral", "general.architecture", "llama"},
    {"mixtral", "llama.rope.dimension_count", "64"},
    {"mixtral", "llama.feed_forward_length", "64"},
    {"mixtral", "llama.expert_weights_norm", "1"},
    {"mixtral_nvfp4", "llama.attention.key_length", "64"},
    {"olmoe", "olmoe.expert_weights_norm", "0"},
    {"olmoe_norm", "olmoe.expert_weights_norm", "1"},
    {"qwen2_moe", "qwen2moe.expert_weights_norm", "0"},
    {"qwen2_moe_dense", "qwen2moe.expert_weights_norm", "1"},
    {"qwen2_moe_dense", "qwen2moe.expert_shared_feed_forward_length", "192"},
    {"qwen2_moe_dense", "qwen2moe.expert_feed_forward_length", "64"},
    {"qwen3", "general.architecture", "qwen3"},
    {"qwen3", "qwen3.feed_forward_length", "192"},
    {"qwen3", "qwen3.expert_count", ""},
    {"qwen3", "qwen3.expert_gating_func", ""},
    {"qwen3_5", "general.architecture", "qwen35"},
    {"qwen3_5", "qwen35.nextn_predict_layers", "1"},
    {"qwen3_5", "qwen35.ssm.time_step_rank", "6"},
    {"qwen3_5", "qwen35.expert_shared_count", ""},
    {"llama", "general.architecture", "llama"},
    {"llama", "llama.rope.dimension_count", "64"},
    {"mistral", "general.architecture", "llama"},
    {"mistral", "llama.attention.key_length", "64"},
    {"qwen2", "general.architecture", "qwen2"},
    {"glm4", "general.architecture", "glm4"},
    {"glm4", "glm4.rope.dimension_count", "32"},
    {"glm4", "glm4.attention.layer_norm_rms_epsilon", "1e-05"},
    {"glm4_nvfp4", "glm4.rope.dimension_count", "64"},
    {"glm4_nvfp4", "glm4.feed_forward_length", "128"},
    {"gemma4", "general.architecture", "gemma4"},
    {"gemma4", "gemma4.attention.head_count", "4"},
    {"gemma4", "gemma4.attention.head_count_kv", "2,2,1"},
    {"gemma4", "gemma4.attention.key_length", "128"},
    {"gemma4", "gemma4.attention.key_length_swa", "64"},
    {"gemma4", "gemma4.attention.value_length_swa", "64"},
    {"gemma4", "gemma4.attention.sliding_window", "8"},
    {"gemma4", "gemma4.attention.sliding_window_pattern", "1,1,0"},
    {"gemma4", "gemma4.attention.shared_kv_layers", "0"},
    {"gemma4", "gemma4.embedding_length_per_layer_input", "0"},
    {"gemma4", "gemma4.rope.dimension_count", "128"},
    {"gemma4", "gemma4.rope.dimension_count_swa", "64"},
    {"gemma4", "gemma4.rope.freq_base", "1000000"},
    {"gemma4", "gemma4.rope.freq_base_swa", "10000"},
    {"gemma4", "gemma4.final_logit_softcapping", "6"},
    {"gemma4", "gemma4.expert_count", "6"},
    {"gemma4", "gemma4.feed_forward_length", "192"},
    {"gemma4", "gemma4.expert_feed_forward_length", "64"},
    {"gemma4", "gemma4.expert_shared_count", ""},
    {"gemma4_nvfp4", "gemma4.attention.head_count_kv", "3,2"},
    {"gemma4_nvfp4", "gemma4.attention.key_length", "128"},
    {"gemma4_nvfp4", "gemma4.final_logit_softcapping", "0"},
    {"gemma4_dense", "gemma4.expert_count", ""},
    {"gemma4_dense", "gemma4.attention.head_count_kv", "2,2,2,2"},
    {"ministral3", "mistral3.attention.temperature_length", "8"},
    {"ministral3", "mistral3.rope.scaling.yarn_log_multiplier", "1"},
    {"mistral4", "mistral4.attention.temperature_scale", "0.1"},
    {"mistral4", "mistral4.rope.scaling.yarn_log_multiplier", "0.1"},
    {"mistral4", "mistral4.rope.dimension_count", "16"},
    {"dots1", "dots1.attention.head_count_kv", "4"},
    {"dots1", "dots1.leading_dense_block_count", "1"},
    {"dots1", "dots1.expert_shared_count", "2"},
    {"dots1", "dots1.expert_gating_func", "2"},
    {"dots1", "dots1.expert_weights_norm", "1"},
    {"dots1", "dots1.expert_weights_scale", "2.5"},
    {"dots1", "dots1.expert_group_count", "1"},
    {"dots1_nvfp4", "dots1.expert_weights_norm", "0"},
    {"dots1_nvfp4", "dots1.expert_group_count", "4"},
    {"dots1_nvfp4", "dots1.expert_group_used_count", "2"},
    {"dots1_nvfp4", "dots1.attention.sliding_window", ""},
    {"inkling2_loop", "general.architecture", "inkling2"},
    {"inkling2_loop", "inkling2.block_count", "7"},
    {"inkling2_loop", "inkling2.attention.head_count", "4"},
    {"inkling2_loop", "inkling2.attention.head_count_kv", "2"},
    {"inkling2_loop", "inkling2.attention.key_length", "32"},
    {"inkling2_loop", "inkling2.attention.value_length", "32"},
    {"inkling2_loop", "inkling2.attention.sliding_window", "16"},
    {"inkling2_loop", "inkling2.attention.sliding_window_pattern", "1,0,1,0,1,1,0"},
    {"inkling2_loop", "inkling2.attention.conv_kernel", "4"},
    {"inkling2_loop", "inkling2.attention.relative.head_length", "16"},
    {"inkling2_loop", "inkling2.attention.relative.extent", "24"},
    {"inkling2_loop", "inkling2.attention.relative.clip", "4"},
    {"inkling2_loop", "inkling2.attention.clip", "5.5"},
    {"inkling2_loop", "inkling2.attention.temperature_scale", "0.1"},
    {"inkling2_loop", "inkling2.attention.temperature_length", "24"},
    {"inkling2_loop", "inkling2.attn_res.block_size", "2"},
    {"inkling2_loop", "inkling2.ffn_gate_softcap", "2"},
    {"inkling2_loop", "inkling2.ffn_up_softcap", "3"},
    {"inkling2_loop", "inkling2.final_logit_softcapping", "12"},
    {"inkling2_loop", "inkling2.loop.first_layer", "2"},
    {"inkling2_loop", "inkling2.loop.layer_count", "4"},
    {"inkling2_loop", "inkling2.loop.pass_count", "3"},
    {"inkling2_loop", "inkling2.loop.gate_rank", "24"},
    {"inkling2_loop", "inkling2.expert_count", "6"},
    {"inkling2_loop", "inkling2.expert_used_count", "2"},
    {"inkling2_loop", "inkling2.expert_weights_scale", "2"},
    {"inkling2_loop", "inkling2.expert_weights_norm", "1"},
    {"inkling2_loop", "inkling2.expert_gating_func", "2"},
    {"inkling2_loop", "inkling2.rope.freq_base", ""},
    {"inkling2_loop", "inkling2.rope.dimension_count", ""},
    {"inkling2_nvfp4", "inkling2.loop.layer_count", ""},
    {"inkling2_nvfp4", "inkling2.attention.conv_kernel", "3"},
    {"inkling2_nvfp4", "inkling2.attention.relative.extent", "32"},
    {"nemotron_h", "general.architecture", "nemotron_h_moe"},
    {"nemotron_h", "nemotron_h_moe.block_count", "7"},
    {"nemotron_h", "nemotron_h_moe.nextn_predict_layers", "1"},
    {"nemotron_h", "nemotron_h_moe.attention.head_count", "4"},
    {"nemotron_h", "nemotron_h_moe.attention.head_count_kv", "0,0,2,0,0,0,2"},
    {"nemotron_h", "nemotron_h_moe.feed_forward_length", "0,64,0,192,0,64,64"},
    {"nemotron_h", "nemotron_h_moe.expert_feed_forward_length", "64"},
    {"nemotron_h", "nemotron_h_moe.expert_shared_feed_forward_length", "128"},
    {"nemotron_h", "nemotron_h_moe.expert_group_count", "2"},
    {"nemotron_h", "nemotron_h_moe.expert_group_used_count", "1"},
    {"nemotron_h", "nemotron_h_moe.expert_weights_norm", "1"},
    {"nemotron_h", "nemotron_h_moe.expert_weights_scale", "2.5"},
    {"nemotron_h", "nemotron_h_moe.moe_latent_size", "32"},
    {"nemotron_h", "nemotron_h_moe.ssm.conv_kernel", "4"},
    {"nemotron_h", "nemotron_h_moe.ssm.state_size", "32"},
    {"nemotron_h", "nemotron_h_moe.ssm.group_count", "2"},
    {"nemotron_h", "nemotron_h_moe.ssm.time_step_rank", "8"},
    {"nemotron_h", "nemotron_h_moe.ssm.inner_size", "128"},
    {"nemotron_h", "nemotron_h_moe.attention.layer_norm_epsilon", "1e-05"},
    {"nemotron_h", "nemotron_h_moe.attention.layer_norm_rms_epsilon", "1e-05"},
    {"nemotron_h_nvfp4", "nemotron_h_moe.moe_latent_size", ""},
    {"nemotron_h_nvfp4", "nemotron_h_moe.attention.head_count_kv", "0,0,0,1,0"},
    {"nemotron_h_dense", "general.architecture", "nemotron_h"},
    {"nemotron_h_dense", "nemotron_h.feed_forward_length", "0,128,0,0,128"},
    {"nemotron_h_dense", "nemotron_h.expert_count", ""},
    {"ernie4_5_moe", "ernie4_5-moe.interleave_moe_layer_step", "2"},
    {"ernie4_5_moe", "ernie4_5-moe.leading_dense_block_count", "1"},
    {"ernie4_5_moe", "ernie4_5-moe.expert_used_count", "2"},
    {"ernie4_5_moe_each", "ernie4_5-moe.expert_shared_count", "2"},
    {"ernie4_5_moe_each", "ernie4_5-moe.expert_shared_feed_forward_length", "128"},
    {"step3p5", "step35.attention.head_count", "2,4,2"},
    {"step3p5", "step35.attention.head_count_kv", "2,2,2"},
    {"step3p5", "step35.attention.sliding_window", "4"},
    {"step3p5", "step35.attention.sliding_window_pattern", "0,1,0"},
    {"step3p5", "step35.leading_dense_block_count", "1"},
    {"step3p5", "step35.moe_every_n_layers", "1"},
    {"step3p5", "step35.swiglu_clamp_exp", "0,0.75,0.5"},
    {"step3p5", "step35.swiglu_clamp_shexp", "0,0,1.25"},
    {"step3p5", "step35.expert_weights_scale", "3"},
    {"step3p5", "step35.expert_weights_norm", "1"},
    {"step3p5", "step35.rope.freq_base", "5000000"},
    {"step3p5", "step35.rope.freq_base_swa", "10000"},
    {"step3p5", "step35.rope.dimension_count", ""},
    {"step3p5", "step35.rope.scaling.type", ""},
    {"step3p5", "step35.nextn_predict_layers", ""},
    {"step3p7", "step35.block_count", "4"},
    {"step3p7", "step35.nextn_predict_layers", "2"},
    {"step3p7", "step35.attention.sliding_window_pattern", "0,1,1,1"},
    {"step3p7", "step35.attention.head_count", "4,6,6,6"},
    {"step3p7", "step35.swiglu_clamp_exp", "0,0.5,0,0"},
    {"laguna", "laguna.attention.head_count", "2,4,4"},
    {"laguna", "laguna.attention.head_count_kv", "2"},
    {"laguna", "laguna.attention.sliding_window_pattern", "0,1,1"},
    {"laguna", "laguna.rope.dimension_count", "32"},
    {"laguna", "laguna.rope.dimension_count_swa", "64"},
    {"laguna", "laguna.rope.freq_base_swa", "10000"},
    {"laguna", "laguna.rope.scaling.yarn_beta_fast", "64"},
    {"laguna", "laguna.rope.scaling.yarn_attn_factor", "1.346574"},
    {"laguna", "laguna.expert_weights_scale", "2.5"},
    {"laguna", "laguna.expert_weights_norm", "1"},
    {"laguna", "laguna.leading_dense_block_count", "1"},
    {"laguna_element", "laguna.attention.sliding_window", ""},
    {"laguna_element", "laguna.attention.sliding_window_pattern", ""},
    {"laguna_element", "laguna.rope.freq_base_swa", ""},
    {"laguna_element", "laguna.expert_shared_feed_forward_length", "128"},
    {"deepseek_v4", "general.architecture", "deepseek4"},
    {"deepseek_v4", "deepseek4.block_count", "6"},
    {"deepseek_v4", "deepseek4.nextn_predict_layers", "1"},
    {"deepseek_v4_pro", "deepseek4.block_count", "5"},
    {"deepseek_v4_pro", "deepseek4.nextn_predict_layers", ""},
    {"deepseek_v4", "deepseek4.feed_forward_length", ""},
    {"deepseek_v4", "deepseek4.embedding_length_out", "512"},
    {"deepseek_v4", "deepseek4.attention.head_count_kv", "1"},
    {"deepseek_v4", "deepseek4.attention.key_length", "64"},
    {"deepseek_v4", "deepseek4.attention.value_length", "64"},
    {"deepseek_v4", "deepseek4.attention.q_lora_rank", "96"},
    {"deepseek_v4", "deepseek4.attention.sliding_window", "16"},
    {"deepseek_v4", "deepseek4.attention.sliding_window_pattern", ""},
    {"deepseek_v4", "deepseek4.attention.output_group_count", "2"},
    {"deepseek_v4", "deepseek4.attention.output_lora_rank", "64"},
    {"deepseek_v4", "deepseek4.attention.compress_ratios", "0,0,4,128,4,0"},
    {"deepseek_v4", "deepseek4.attention.compress_rope_freq_base", "160000"},
    {"deepseek_v4", "deepseek4.attention.indexer.head_count", "16"},
    {"deepseek_v4", "deepseek4.attention.indexer.key_length", "64"},
    {"deepseek_v4", "deepseek4.attention.indexer.top_k", "8"},
    {"deepseek_v4", "deepseek4.attention.indexer.types", ""},
    {"deepseek_v4", "deepseek4.rope.dimension_count", "16"},
    {"deepseek_v4", "deepseek4.rope.freq_base", "10000"},
    {"deepseek_v4", "deepseek4.rope.scaling.type", "yarn"},
    {"deepseek_v4", "deepseek4.rope.scaling.factor", "16"},
    {"deepseek_v4", "deepseek4.rope.scaling.original_context_length", "128"},
    {"deepseek_v4", "deepseek4.rope.scaling.yarn_beta_fast", "32"},
    {"deepseek_v4", "deepseek4.rope.scaling.yarn_beta_slow", "1"},
    {"deepseek_v4", "deepseek4.rope.scaling.yarn_attn_factor", ""},
    {"deepseek_v4", "deepseek4.expert_gating_func", "4"},
    {"deepseek_v4", "deepseek4.expert_weights_norm", "1"},
    {"deepseek_v4", "deepseek4.expert_weights_scale", "1.5"},
    {"deepseek_v4", "deepseek4.expert_shared_count", "1"},
    {"deepseek_v4", "deepseek4.expert_used_count", "3"},
    {"deepseek_v4", "deepseek4.expert_feed_forward_length", "64"},
    {"deepseek_v4", "deepseek4.expert_group_count", ""},
    {"deepseek_v4", "deepseek4.swiglu_clamp_exp", "1.5,1.5,1.5,1.5,1.5,1.5"},
    {"deepseek_v4", "deepseek4.swiglu_clamp_shexp", "1.5,1.5,1.5,1.5,1.5,1.5"},
    {"deepseek_v4", "deepseek4.hyper_connection.count", "4"},
    {"deepseek_v4", "deepseek4.hyper_connection.sinkhorn_iterations", "20"},
    {"deepseek_v4", "deepseek4.hyper_connection.epsilon", "1e-06"},
    {"deepseek_v4", "deepseek4.hash_layer_count", "3"},
    {"deepseek_v4_pro", "deepseek4.attention.compress_ratios", "128,128,4,128,4"},
    {"deepseek_v4_pro", "deepseek4.attention.output_group_count", "4"},
    {"deepseek_v4_pro", "deepseek4.attention.output_lora_rank", "32"},
    {"deepseek_v4_pro", "deepseek4.rope.dimension_count", "16"},
    {"deepseek_v4_pro", "deepseek4.rope.scaling.factor", "16"},
    {"deepseek_v4_pro", "deepseek4.attention.compress_rope_freq_base", "160000"},
    {"deepseek_v4_pro", "deepseek4.hash_layer_count", "1"},
    {"deepseek_v4_pro", "deepseek4.hyper_connection.sinkhorn_iterations", "3"},
    {"deepseek_v4_pro", "deepseek4.hyper_connection.epsilon", "0.02"},
    {"deepseek_v4_pro", "deepseek4.attention.layer_norm_rms_epsilon", "0.01"},
    {"deepseek_v41", "general.architecture", "deepseek41"},
    {"deepseek_v41", "deepseek41.block_count", "7"},
    {"deepseek_v41", "deepseek41.nextn_predict_layers", ""},
    {"deepseek_v41", "deepseek41.hash_layer_count", ""},
    {"deepseek_v41", "deepseek41.attention.head_count_kv", "1"},
    {"deepseek_v41", "deepseek41.attention.key_length", "64"},
    {"deepseek_v41", "deepseek41.attention.layer_norm_rms_epsilon", "1e-20"},
    {"deepseek_v41", "deepseek41.attention.q_lora_rank", "80"},
    {"deepseek_v41", "deepseek41.attention.sliding_window", "16"},
    {"deepseek_v41", "deepseek41.attention.output_group_count", "2"},
    {"deepseek_v41", "deepseek41.attention.output_lora_rank", "32"},
    {"deepseek_v41", "deepseek41.attention.compress_ratios", "0,2,2,2,1,1,1"},
    {"deepseek_v41", "deepseek41.attention.compress_rope_freq_base", "160000"},
    {"deepseek_v41", "deepseek41.attention.kv_source_layers", "1,4"},
    {"deepseek_v41", "deepseek41.attention.index_source_layers", "1,3,4,6"},
    {"deepseek_v41", "deepseek41.attention.indexer.head_count", "16"},
    {"deepseek_v41", "deepseek41.attention.indexer.key_length", "32"},
    {"deepseek_v41", "deepseek41.attention.indexer.top_k", "8"},
    {"deepseek_v41", "deepseek41.attention.indexer.candidate_source_layer", "4"},
    {"deepseek_v41", "deepseek41.attention.indexer.candidate_topk_blocks", "6"},
    {"deepseek_v41", "deepseek41.attention.indexer.candidate_block_size", "4"},
    {"deepseek_v41", "deepseek41.rope.dimension_count", "16"},
    {"deepseek_v41", "deepseek41.rope.scaling.type", "yarn"},
    {"deepseek_v41", "deepseek41.rope.scaling.factor", "16"},
    {"deepseek_v41", "deepseek41.rope.scaling.original_context_length", "128"},
    {"deepseek_v41", "deepseek41.expert_gating_func", "4"},
    {"deepseek_v41", "deepseek41.expert_weights_norm", "1"},
    {"deepseek_v41", "deepseek41.expert_weights_scale", "1.5"},
    {"deepseek_v41", "deepseek41.expert_shared_count", "1"},
    {"deepseek_v41", "deepseek41.hyper_connection.count", "4"},
    {"deepseek_v41", "deepseek41.hyper_connection.sinkhorn_iterations", "20"},
    {"deepseek_v41", "deepseek41.engram.layers", "1,4"},
    {"deepseek_v41", "deepseek41.engram.ngram_size", "4"},
    {"deepseek_v41", "deepseek41.engram.head_count", "2"},
    {"deepseek_v41", "deepseek41.engram.head_dim", "32"},
    {"deepseek_v41", "deepseek41.engram.embedding_counts", "660,864"},
    {"deepseek_v41", "deepseek41.engram.head_bucket_sizes", "101,103,107,109,113,127,131,137,139,149,151,157"},
    {"deepseek_v41", "deepseek41.engram.head_offsets", "0,101,204,311,420,533,0,131,268,407,556,707"},
    {"deepseek_v41", "deepseek41.engram.compressed_vocab_size", "414"},
    {"deepseek_v41", "deepseek41.engram.pad_token_id", "2"},
    {"deepseek_v41_nvfp4", "deepseek41.attention.compress_ratios", "2,2,0,1,1,1"},
    {"deepseek_v41_nvfp4", "deepseek41.attention.kv_source_layers", "0,3"},
    {"deepseek_v41_nvfp4", "deepseek41.attention.index_source_layers", "0,3,5"},
    {"deepseek_v41_nvfp4", "deepseek41.attention.indexer.candidate_source_layer", "3"},
    {"deepseek_v41_nvfp4", "deepseek41.attention.indexer.candidate_topk_blocks", "9"},
    {"deepseek_v41_nvfp4", "deepseek41.hyper_connection.count", "2"},
    {"deepseek_v41_nvfp4", "deepseek41.engram.layers", "0,5"},
    {"deepseek_v41_nvfp4", "deepseek41.engram.ngram_size", "3"},
    {"deepseek_v41_nvfp4", "deepseek41.engram.pad_token_id", "11"},
    {"mimo_v2_flash", "mimo2.attention.head_count", "4"},
    {"mimo_v2_flash", "mimo2.attention.head_count_kv", "1,2"},
    {"mimo_v2_flash", "mimo2.attention.key_length", "192"},
    {"mimo_v2_flash", "mimo2.attention.value_length", "128"},
    {"mimo_v2_flash", "mimo2.attention.sliding_window", "4"},
    {"mimo_v2_flash", "mimo2.attention.value_scale", "0.707"},
    {"kimi_k3", "general.architecture", "kimi-k3"},
    {"kimi_k3", "kimi-k3.attention.head_count_kv", "0,0,1,0,0"},
    {"kimi_k3", "kimi-k3.attention.key_length_mla", "48"},
    {"kimi_k3", "kimi-k3.attention.q_lora_rank", "96"},
    {"kimi_k3", "kimi-k3.rope.dimension_count", "16"},
    {"kimi_k3", "kimi-k3.kda.head_dim", "32"},
    {"kimi_k3", "kimi-k3.kda.gate_lower_bound", "-5"},
    {"kimi_k3", "kimi-k3.ssm.conv_kernel", "4"},
    {"kimi_k3", "kimi-k3.activation.situ_beta", "4"},
    {"kimi_k3", "kimi-k3.activation.situ_linear_beta", "3"},
    {"kimi_k3", "kimi-k3.expert_latent_length", "64"},
    {"kimi_k3", "kimi-k3.attn_res.block_size", "2"},
    {"kimi_k3", "kimi-k3.expert_group_count", ""},
    {"kimi_k3", "kimi-k3.expert_weights_scale", "2.446"},
    {"kimi_k3", "kimi-k3.leading_dense_block_count", "1"},
    {"kimi_k3_nvfp4", "kimi-k3.attn_res.block_size", "3"},
    {"dots3_note", "general.architecture", "dots3note"},
    {"dots3_note", "dots3note.block_count", "4"},
    {"dots3_note", "dots3note.nextn_predict_layers", ""},
    {"dots3_note", "dots3note.attention.head_count", "4,4,2,4"},
    {"dots3_note", "dots3note.attention.head_count_kv", "1"},
    {"dots3_note", "dots3note.attention.key_length", "192"},
    {"dots3_note", "dots3note.attention.key_length_mla", "96"},
    {"dots3_note", "dots3note.attention.value_length_mla", "32"},
    {"dots3_note", "dots3note.attention.key_length_swa", "1088"},
    {"dots3_note", "dots3note.attention.value_length_swa", "1024"},
    {"dots3_note", "dots3note.attention.kv_lora_rank_swa", "1024"},
    {"dots3_note", "dots3note.attention.key_length_mla_swa", "112"},
    {"dots3_note", "dots3note.attention.value_length_mla_swa", "48"},
    {"dots3_note", "dots3note.attention.sliding_window", "16"},
    {"dots3_note", "dots3note.attention.sliding_window_pattern", "0,0,1,0"},
    {"dots3_note", "dots3note.attention.indexer.types", "1,1,0,1"},
    {"dots3_note", "dots3note.attention.indexer.top_k", "32"},
    {"dots3_note", "dots3note.rope.dimension_count", "64"},
    {"dots3_note", "dots3note.rope.freq_base", "8e+07"},
    {"dots3_note", "dots3note.rope.freq_base_swa", "50000"},
    {"dots3_note", "dots3note.rope.dimension_count_swa", ""},
    {"dots3_note", "dots3note.leading_dense_block_count", "1"},
    {"dots3_note", "dots3note.expert_gating_func", "2"},
    {"dots3_note", "dots3note.expert_weights_scale", "1"},
    {"dots3_note", "dots3note.expert_group_count", "1"},
    {"dots3_note_nvfp4", "dots3note.expert_shared_count", "2"},
    {"hy_v4", "general.architecture", "hy_v4"},
    {"hy_v4", "hy_v4.block_count", "5"},
    {"hy_v4", "hy_v4.nextn_predict_layers", "1"},
    {"hy_v4", "hy_v4.attention.head_count_kv", "1"},
    {"hy_v4", "hy_v4.attention.key_length", "80"},
    {"hy_v4", "hy_v4.attention.key_length_mla", "48"},
    {"hy_v4", "hy_v4.attention.value_length_mla", "48"},
    {"hy_v4", "hy_v4.attention.q_lora_rank", "96"},
    {"hy_v4", "hy_v4.rope.dimension_count", "16"},
    {"hy_v4", "hy_v4.rope.freq_base", "1e+07"},
    {"hy_v4", "hy_v4.attention.indexer.head_count", "16"},
    {"hy_v4", "hy_v4.attention.indexer.key_length", "64"},
    {"hy_v4", "hy_v4.attention.indexer.top_k", "32"},
    {"hy_v4", "hy_v4.attention.indexer.types", "1,0,1,0"},
    {"hy_v4", "hy_v4.hyper_connection.count", "4"},
    {"hy_v4", "hy_v4.hyper_connection.epsilon", "1e-06"},
    {"hy_v4", "hy_v4.hyper_connection.magnitude", "2"},
    {"hy_v4", "hy_v4.swiglu_clamp_exp", "1.5,1.5,1.5,1.5,1.5"},
    {"hy_v4", "hy_v4.swiglu_clamp_shexp", ""},
    {"hy_v4", "hy_v4.leading_dense_block_count", "1"},
    {"hy_v4", "hy_v4.expert_gating_func", "2"},
    {"hy_v4", "hy_v4.expert_group_count", ""},
    {"hy_v4", "hy_v4.expert_weights_norm", "1"},
    {"hy_v4", "hy_v4.expert_weights_scale", "2.827"},
    {"hy_v4_nvfp4", "hy_v4.hyper_connection.magnitude", "1.5"},
    {"hy_v4_nvfp4", "hy_v4.expert_shared_count", "2"},
    {"hunyuan_v1_moe", "general.architecture", "hunyuan-moe"},
    {"hunyuan_v1_moe", "hunyuan-moe.context_length", "262144"},
    {"hunyuan_v1_moe", "hunyuan-moe.expert_used_count", "3"},
    {"hunyuan_v1_moe", "hunyuan-moe.expert_feed_forward_length", "64"},
    {"hunyuan_v1_moe", "hunyuan-moe.expert_shared_feed_forward_length", "64"},
    {"hunyuan_v1_moe", "hunyuan-moe.expert_weights_norm", "1"},
    {"hunyuan_v1_moe", "hunyuan-moe.expert_weights_scale", ""},
    {"hunyuan_v1_moe", "hunyuan-moe.rope.freq_base", "1.249609e+07"},
    {"hunyuan_v1_moe", "hunyuan-moe.rope.scaling.type", ""},
    {"hunyuan_v1_moe_nvfp4", "hunyuan-moe.context_length", "4096"},
    {"hunyuan_v1_moe_nvfp4", "hunyuan-moe.rope.freq_base", "532032.1"},
    {"qwen3_vl_moe", "general.architecture", "qwen3vlmoe"},
    {"qwen3_vl_moe", "qwen3vlmoe.rope.dimension_sections", "12,10,10,0"},
    {"qwen3_vl_moe", "qwen3vlmoe.rope.freq_base", "5000000"},
    {"qwen3_vl_moe", "qwen3vlmoe.n_deepstack_layers", "1"},
    {"qwen3_vl_moe", "qwen3vlmoe.expert_weights_norm", "1"},
    {"qwen3_vl_moe_nvfp4", "qwen3vlmoe.rope.dimension_sections", "24,20,20,0"},
    {"mellum", "general.architecture", "mellum"},
    {"mellum", "mellum.attention.sliding_window", "8"},
    {"mellum", "mellum.attention.sliding_window_pattern", "1,1,1,0"},
    {"mellum", "mellum.rope.freq_base", "500000"},
    {"mellum", "mellum.rope.freq_base_swa", "10000"},
    {"mellum", "mellum.rope.scaling.type", "yarn"},
    {"mellum", "mellum.rope.scaling.factor", "16"},
    {"mellum", "mellum.expert_weights_norm", "1"},
    {"mellum_nvfp4", "mellum.attention.sliding_window_pattern", "0,1"},
    {"mellum_nvfp4", "mellum.rope.scaling.type", ""},
    {"deepseek_v2", "general.architecture", "deepseek2"},
    {"deepseek_v2", "deepseek2.expert_gating_func", "1"},
    {"deepseek_v2", "deepseek2.expert_group_count", "4"},
    {"deepseek_v2", "deepseek2.expert_group_used_count", "2"},
    {"deepseek_v2", "deepseek2.expert_weights_norm", "0"},
    {"deepseek_v2", "deepseek2.expert_weights_scale", "4"},
    {"deepseek_v2", "deepseek2.attention.q_lora_rank", "64"},
    {"deepseek_v2", "deepseek2.rope.scaling.yarn_log_multiplier", "0.0707"},
    {"deepseek_v2_nvfp4", "deepseek2.attention.q_lora_rank", ""},
    {"deepseek_v2_nvfp4", "deepseek2.expert_group_count", ""},
    {"deepseek_v2_nvfp4", "deepseek2.expert_shared_count", "2"},
    {"deepseek_moe", "general.architecture", "deepseek"},
    {"deepseek_moe", "deepseek.leading_dense_block_count", "1"},
    {"deepseek_moe", "deepseek.expert_shared_count", "2"},
    {"deepseek_moe", "deepseek.expert_weights_norm", "0"},
    {"deepseek_moe", "deepseek.rope.dimension_count", "64"},
    {"bailing_moe", "general.architecture", "bailingmoe"},
    {"bailing_moe", "bailingmoe.rope.dimension_count", "64"},
    {"bailing_moe", "bailingmoe.leading_dense_block_count", "0"},
    {"bailing_moe", "bailingmoe.expert_gating_func", "1"},
    {"bailing_moe", "bailingmoe.expert_weights_norm", "1"},
    {"bailing_moe", "bailingmoe.expert_shared_count", "2"},
    {"bailing_moe_nvfp4", "bailingmoe.expert_weights_norm", "0"},
    {"bailing_moe_nvfp4", "bailingmoe.leading_dense_block_count", "1"},
    {"solar_open", "general.architecture", "glm4moe"},
    {"solar_open", "glm4moe.rope.scaling.type", "yarn"},
    {"solar_open", "glm4moe.leading_dense_block_count", "0"},
    {"solar_open", "glm4moe.expert_gating_func", "2"},
    {"solar_open_nvfp4", "glm4moe.rope.freq_base", "500000"},
    {"solar_open_nvfp4", "glm4moe.expert_weights_scale", "1.5"},
    {"granitemoe_swa", "general.architecture", "granite_swa"},
    {"granitemoe_swa", "granite_swa.attention.rope_pattern", "0,1,0"},
    {"granitemoe_swa", "granite_swa.attention.sliding_window", "8"},
    {"granitemoe_swa", "granite_swa.attention.sliding_window_pattern", "0,1,1"},
    {"granitemoe_swa", "granite_swa.rope.freq_base", "1500000"},
    {"granitemoe_swa", "granite_swa.logit_scale", "1.5"},
    {"granitemoe_swa_nvfp4", "granite_swa.attention.sliding_window_pattern", "1,0"},
    {"granitemoe_swa_nvfp4", "granite_swa.attention.rope_pattern", "0,1"},
    {"granitemoe", "granitemoe.attention.scale", "0.09375"},
    {"granitemoe", "granitemoe.embedding_scale", "1.25"},
    {"granitemoe", "granitemoe.residual_scale", "1.5"},
    {"granitemoe", "granitemoe.logit_scale", "1.5"},
    {"granitemoe", "granitemoe.rope.dimension_count", "64"},
    {"granitemoe", "granitemoe.expert_gating_func", "1"},
    {"granitemoe", "granitemoe.expert_shared_count", ""},
    {"granitemoeshared_nvfp4", "general.architecture", "granitemoe"},
    {"granitemoeshared_nvfp4", "granitemoe.logit_scale", "0.75"},
    {"granitemoeshared_nvfp4", "granitemoe.expert_shared_feed_forward_length", "128"},
    {"granitemoehybrid", "general.architecture", "granitehybrid"},
    {"granitemoehybrid", "granitehybrid.context_length", "1048576"},
    {"granitemoehybrid", "granitehybrid.attention.head_count_kv", "0,1,0"},
    {"granitemoehybrid", "granitehybrid.feed_forward_length", "64"},
    {"granitemoehybrid", "granitehybrid.expert_shared_feed_forward_length", "128"},
    {"granitemoehybrid", "granitehybrid.attention.scale", "0.09375"},
    {"granitemoehybrid", "granitehybrid.rope.scaling.finetuned", "0"},
    {"granitemoehybrid", "granitehybrid.ssm.conv_kernel", "4"},
    {"granitemoehybrid", "granitehybrid.ssm.state_size", "32"},
    {"granitemoehybrid", "granitehybrid.ssm.group_count", "1"},
    {"granitemoehybrid", "granitehybrid.ssm.time_step_rank", "8"},
    {"granitemoehybrid", "granitehybrid.ssm.inner_size", "128"},
    {"granitemoehybrid_nvfp4", "granitehybrid.attention.head_count_kv", "3,0,0"},
    {"granitemoehybrid_nvfp4", "granitehybrid.ssm.inner_size", "256"},
    {"granitemoehybrid_dense", "general.architecture", "granitehybrid"},
    {"granitemoehybrid_dense", "granitehybrid.feed_forward_length", "128"},
    {"granitemoehybrid_dense", "granitehybrid.expert_count", ""},
    {"granitemoehybrid_rope", "general.architecture", "granite"},
    {"granitemoehybrid_rope", "granite.context_length", "4096"},
    {"granitemoehybrid_rope", "granite.rope.scaling.finetuned", "1"},
    {"granitemoehybrid_rope", "granite.rope.freq_base", "1000000"},
    {"granitemoehybrid_rope", "granite.ssm.inner_size", ""},
    {"bailing_moe_v2", "general.architecture", "bailingmoe2"},
    {"bailing_moe_v2", "bailingmoe2.block_count", "4"},
    {"bailing_moe_v2", "bailingmoe2.nextn_predict_layers", "1"},
    {"bailing_moe_v2", "bailingmoe2.rope.dimension_count", "16"},
    {"bailing_moe_v2", "bailingmoe2.leading_dense_block_count", "1"},
    {"bailing_moe_v2", "bailingmoe2.expert_group_count", "4"},
    {"bailing_moe_v2", "bailingmoe2.expert_group_used_count", "2"},
    {"bailing_moe_v2", "bailingmoe2.expert_gating_func", "2"},
    {"bailing_moe_v2", "bailingmoe2.expert_weights_scale", "2.5"},
    {"bailing_moe_v2", "bailingmoe2.expert_shared_count", "1"},
    {"sarvam_moe_nvfp4", "general.architecture", "bailingmoe2"},
    {"sarvam_moe_nvfp4", "bailingmoe2.rope.dimension_count", "64"},
    {"sarvam_moe_nvfp4", "bailingmoe2.rope.freq_base", "8000000"},
    {"sarvam_moe_nvfp4", "bailingmoe2.expert_weights_norm", "0"},
    {"sarvam_moe_nvfp4", "bailingmoe2.expert_shared_feed_forward_length", "128"},
    {"llama4", "general.architecture", "llama4"},
    {"llama4", "llama4.interleave_moe_layer_step", "1"},
    {"llama4", "llama4.attention.sliding_window", "16"},
    {"llama4", "llama4.attention.sliding_window_pattern", "1,1,1,0,1"},
    {"llama4", "llama4.attention.use_qk_norm", "1"},
    {"llama4", "llama4.attention.temperature_length", "8"},
    {"llama4", "llama4.feed_forward_length", "192"},
    {"llama4", "llama4.expert_feed_forward_length", "64"},
    {"llama4", "llama4.expert_gating_func", "2"},
    {"llama4_nvfp4", "llama4.interleave_moe_layer_step", "2"},
    {"llama4_nvfp4", "llama4.attention.use_qk_norm", "0"},
    {"longcat_flash", "general.architecture", "longcat-flash"},
    {"longcat_flash", "longcat-flash.block_count", "4"},
    {"longcat_flash", "longcat-flash.nextn_predict_layers", ""},
    {"longcat_flash", "longcat-flash.leading_dense_block_count", ""},
    {"longcat_flash", "longcat-flash.feed_forward_length", "192"},
    {"longcat_flash", "longcat-flash.expert_feed_forward_length", "64"},
    {"longcat_flash", "longcat-flash.expert_shared_count", ""},
    {"longcat_flash", "longcat-flash.expert_count", "8"},
    {"longcat_flash", "longcat-flash.expert_zero_count", "4"},
    {"longcat_flash", "longcat-flash.expert_used_count", "4"},
    {"longcat_flash", "longcat-flash.expert_gating_func", "1"},
    {"longcat_flash", "longcat-flash.expert_weights_norm", "0"},
    {"longcat_flash", "longcat-flash.expert_weights_scale", "3"},
    {"longcat_flash", "longcat-flash.attention.head_count_kv", "1"},
    {"longcat_flash", "longcat-flash.attention.key_length_mla", "48"},
    {"longcat_flash", "longcat-flash.rope.freq_base", "1e+07"},
    {"longcat_flash_nvfp4", "longcat-flash.expert_zero_count", "3"},
    {"longcat_flash_nvfp4", "longcat-flash.attention.kv_lora_rank", "128"},
    {"arctic", "general.architecture", "arctic"},
    {"arctic", "arctic.feed_forward_length", "64"},
    {"arctic", "arctic.expert_shared_count", ""},
    {"arctic", "arctic.attention.layer_norm_rms_epsilon", "1e-05"},
    {"arctic_nvfp4", "arctic.rope.dimension_count", "64"},
    {"maple", "general.architecture", "maple"},
    {"maple", "maple.attention.sliding_window", "8"},
    {"maple", "maple.attention.sliding_window_pattern", "1,1,1,0"},
    {"maple", "maple.rope.dimension_count", "32"},
    {"maple", "maple.swiglu_clamp_exp", "7,7,7,7"},
    {"maple", "maple.expert_feed_forward_length", "64"},
    {"maple_nvfp4", "maple.rope.dimension_count", "64"},
    {"maple_nvfp4", "maple.swiglu_clamp_exp", "7,7"},
    {"smallthinker", "general.architecture", "smallthinker"},
    {"smallthinker", "smallthinker.attention.sliding_window", "8"},
    {"smallthinker", "smallthinker.attention.sliding_window_pattern", "0,1,1,1,0"},
    {"smallthinker", "smallthinker.expert_gating_func", "2"},
    {"smallthinker", "smallthinker.expert_used_count", "3"},
    {"smallthinker", "smallthinker.expert_feed_forward_length", "64"},
    {"smallthinker", "smallthinker.rope.freq_base", "1500000"},
    {"smallthinker_nvfp4", "smallthinker.attention.sliding_window", ""},
    {"smallthinker_nvfp4", "smallthinker.expert_gating_func", "1"},
    {"lfm2_moe", "general.architecture", "lfm2moe"},
    {"lfm2_moe", "lfm2moe.attention.head_count_kv", "0,1,0"},
    {"lfm2_moe", "lfm2moe.shortconv.l_cache", "3"},
    {"lfm2_moe", "lfm2moe.leading_dense_block_count", "1"},
    {"lfm2_moe", "lfm2moe.expert_gating_func", "2"},
    {"lfm2_moe", "lfm2moe.expert_weights_scale", "1"},
    {"lfm2_moe_nvfp4", "lfm2moe.shortconv.l_cache", "4"},
    {"lfm2_moe_nvfp4", "lfm2moe.expert_weights_norm", "0"},
    {"lfm2_moe_nvfp4", "lfm2moe.expert_weights_scale", "1.5"},
    {"exaone_moe", "general.architecture", "exaone-moe"},
    {"exaone_moe", "exaone-moe.attention.sliding_window", "8"},
    {"exaone_moe", "exaone-moe.attention.sliding_window_pattern", "1,1,0"},
    {"exaone_moe", "exaone-moe.rope.freq_base", "1000000"},
    {"exaone_moe", "exaone-moe.rope.freq_base_swa", ""},
    {"exaone_moe", "exaone-moe.leading_dense_block_count", "1"},
    {"exaone_moe", "exaone-moe.expert_group_count", "1"},
    {"exaone_moe_nvfp4", "exaone-moe.attention.sliding_window_pattern", "0,1,1"},
    {"exaone_moe_nvfp4", "exaone-moe.expert_group_used_count", "2"},
    {"exaone_moe_nvfp4", "exaone-moe.expert_weights_norm", "0"},
    {"exaone_moe_nvfp4", "exaone-moe.expert_shared_feed_forward_length", "128"},
    {"cohere2_moe", "general.architecture", "cohere2moe"},
    {"cohere2_moe", "cohere2moe.attention.layer_norm_epsilon", "1e-05"},
    {"cohere2_moe", "cohere2moe.attention.layer_norm_rms_epsilon", ""},
    {"cohere2_moe", "cohere2moe.attention.sliding_window", "8"},
    {"cohere2_moe", "cohere2moe.attention.sliding_window_pattern", "0,1,0"},
    {"cohere2_moe", "cohere2moe.logit_scale", "4.5"},
    {"cohere2_moe", "cohere2moe.feed_forward_length", "192"},
    {"cohere2_moe", "cohere2moe.leading_dense_block_count", "1"},
    {"cohere2_moe", "cohere2moe.expert_gating_func", "2"},
    {"cohere2_moe", "cohere2moe.expert_weights_norm", "1"},
    {"cohere2_moe", "cohere2moe.expert_shared_feed_forward_length", "64"},
    {"cohere2_moe_nvfp4", "cohere2moe.attention.layer_norm_epsilon", ""},
    {"cohere2_moe_nvfp4", "cohere2moe.attention.layer_norm_rms_epsilon", "1e-06"},
    {"cohere2_moe_nvfp4", "cohere2moe.expert_gating_func", "1"},
    {"cohere2_moe_nvfp4", "cohere2moe.expert_weights_norm", "1"},
    {"cohere2_moe_nvfp4", "cohere2moe.expert_shared_feed_forward_length", "128"},
    {"cohere2_moe_nvfp4", "cohere2moe.rope.freq_base", "10000"},
    {"phimoe", "general.architecture", "phimoe"},
    {"phimoe", "phimoe.attention.layer_norm_rms_epsilon", "1e-05"},
    {"phimoe", "phimoe.expert_gating_func", ""},
    {"phimoe", "phimoe.expert_weights_norm", "0"},
    {"phimoe", "phimoe.rope.scaling.attn_factor", "1.25"},
    {"phimoe", "phimoe.rope.scaling.original_context_length", "16"},
    {"phimoe_nvfp4", "phimoe.rope.scaling.original_context_length", "4096"},
    {"dbrx", "general.architecture", "dbrx"},
    {"dbrx", "dbrx.block_count", "2"},
    {"dbrx", "dbrx.context_length", "4096"},
    {"dbrx", "dbrx.attention.head_count_kv", "2"},
    {"dbrx", "dbrx.attention.clamp_kqv", "1.5"},
    {"dbrx", "dbrx.attention.layer_norm_epsilon", "1e-05"},
    {"dbrx", "dbrx.rope.freq_base", "500000"},
    {"dbrx", "dbrx.expert_used_count", "3"},
    {"dbrx", "dbrx.feed_forward_length", "64"},
    {"dbrx_nvfp4", "dbrx.attention.clamp_kqv", "1.25"},
    {"dbrx_nvfp4", "dbrx.rope.freq_base", "10000"},
    {"afmoe", "general.architecture", "afmoe"},
    {"afmoe", "afmoe.attention.sliding_window", "8"},
    {"afmoe", "afmoe.attention.sliding_window_pattern", "1,1,1,0"},
    {"afmoe", "afmoe.expert_gating_func", "2"},
    {"afmoe", "afmoe.expert_weights_norm", "1"},
    {"afmoe", "afmoe.expert_weights_scale", "2.826"},
    {"afmoe", "afmoe.leading_dense_block_count", "1"},
    {"afmoe_nvfp4", "afmoe.leading_dense_block_count", "0"},
    {"afmoe_nvfp4", "afmoe.expert_shared_count", "2"},
    {"afmoe_nvfp4", "afmoe.rope.freq_base", "10000"},
    {"mimo_v2_flash", "mimo2.rope.dimension_count", "64"},
    {"mimo_v2_flash", "mimo2.rope.freq_base", "5000000"},
    {"mimo_v2_flash", "mimo2.rope.freq_base_swa", "10000"},
    {"mimo_v2_flash", "mimo2.attention.layer_norm_rms_epsilon", "1e-05"},
    {"mimo_v2_flash", "mimo2.leading_dense_block_count", ""},
    {"mimo_v2_flash", "mimo2.nextn_predict_layers", ""},
    {"mimo_v2_flash_fp8", "mimo2.nextn_predict_layers", "3"},
    {"mimo_v2_flash_fp8", "mimo2.attention.sliding_window_pattern", "0,1,0,1,1,1"},
    {"mimo_v2_flash_fp8", "mimo2.attention.head_count_kv", "1,2,1,2,2,2"},
    {"deepseek_v32", "general.architecture", "deepseek32"},
    {"deepseek_v32", "deepseek32.attention.indexer.head_count", "4"},
    {"deepseek_v32", "deepseek32.attention.indexer.key_length", "64"},
    {"deepseek_v32", "deepseek32.attention.indexer.top_k", "16"},
    {"deepseek_v32", "deepseek32.attention.indexer.types", ""},
    {"deepseek_v32", "deepseek32.attention.head_count_kv", "1"},
    {"deepseek_v32", "deepseek32.attention.key_length", "80"},
    {"deepseek_v32", "deepseek32.attention.value_length_mla", "32"},
    {"deepseek_v32", "deepseek32.expert_gating_func", "2"},
    {"deepseek_v32", "deepseek32.rope.scaling.yarn_log_multiplier", "0.1"},
    {"deepseek_v32", "deepseek32.nextn_predict_layers", "1"},
    {"glm_moe_dsa", "glm-dsa.attention.indexer.top_k", "32"},
    {"glm_moe_dsa", "glm-dsa.attention.indexer.types", "1,1,1"},
    {"glm_moe_dsa", "glm-dsa.attention.key_length_mla", "64"},
    {"glm_moe_dsa", "glm-dsa.attention.q_lora_rank", "96"},
    {"glm_moe_dsa", "glm-dsa.rope.freq_base", "1000000"},
    {"glm_moe_dsa", "glm-dsa.rope.scaling.type", ""},
    {"glm_moe_dsa_types", "glm-dsa.attention.indexer.types", "1,0,0,1,0"},
    {"glm_moe_dsa_types", "glm-dsa.attention.indexer.head_count", "6"},
    {"glm_moe_dsa_types", "glm-dsa.block_count", "6"},
    {"glm_moe_dsa_types", "glm-dsa.expert_group_count", "1"},
    {"glm_moe_dsa_types", "glm-dsa.leading_dense_block_count", "1"},
    {"kimi_linear", "general.architecture", "kimi-linear"},
    {"kimi_linear", "kimi-linear.context_length", "4096"},
    {"kimi_linear", "kimi-linear.attention.head_count", "4"},
    {"kimi_linear", "kimi-linear.attention.head_count_kv", "0,0,1,0"},
    {"kimi_linear", "kimi-linear.attention.key_length", "80"},
    {"kimi_linear", "kimi-linear.attention.key_length_mla", "48"},
    {"kimi_linear", "kimi-linear.attention.q_lora_rank", ""},
    {"kimi_linear", "kimi-linear.rope.dimension_count", "16"},
    {"kimi_linear", "kimi-linear.kda.head_dim", "32"},
    {"kimi_linear", "kimi-linear.kda.gate_lower_bound", ""},
    {"kimi_linear", "kimi-linear.ssm.conv_kernel", "4"},
    {"kimi_linear", "kimi-linear.leading_dense_block_count", "1"},
    {"kimi_linear", "kimi-linear.expert_used_count", "3"},
    {"kimi_linear", "kimi-linear.expert_shared_count", "1"},
    {"kimi_linear", "kimi-linear.expert_gating_func", "2"},
    {"kimi_linear", "kimi-linear.expert_weights_norm", "1"},
    {"kimi_linear", "kimi-linear.expert_weights_scale", "2.446"},
    {"kimi_linear", "kimi-linear.nextn_predict_layers", ""},
    {"kimi_linear_nvfp4", "kimi-linear.attention.head_count_kv", "0,1,0"},
    {"kimi_linear_nvfp4", "kimi-linear.attention.q_lora_rank", "96"},
    {"kimi_linear_nvfp4", "kimi-linear.kda.head_dim", "64"},
    {"kimi_linear_nvfp4", "kimi-linear.expert_group_count", "2"},
    {"kimi_linear_nvfp4", "kimi-linear.expert_group_used_count", "1"},
    {"kimi_linear_nvfp4", "kimi-linear.expert_shared_count", "2"},
    {"bailing_hybrid", "general.architecture", "bailingmoe3"},
    {"bailing_hybrid", "bailingmoe3.attention.head_count_kv", "0,1,0,1,1"},
    {"bailing_hybrid", "bailingmoe3.block_count", "5"},
    {"bailing_hybrid", "bailingmoe3.nextn_predict_layers", "1"},
    {"bailing_hybrid", "bailingmoe3.kda.head_dim", "64"},
    {"bailing_hybrid", "bailingmoe3.kda.safe_gate", "1"},
    {"bailing_hybrid", "bailingmoe3.kda.gate_lower_bound", "-5"},
    {"bailing_hybrid", "bailingmoe3.ssm.conv_kernel", "4"},
    {"bailing_hybrid", "bailingmoe3.rope.freq_base", "6000000"},
    {"bailing_hybrid", "bailingmoe3.rope.dimension_count", "16"},
    {"bailing_hybrid", "bailingmoe3.expert_group_count", "4"},
    {"bailing_hybrid", "bailingmoe3.expert_group_used_count", "2"},
    {"bailing_hybrid", "bailingmoe3.expert_shared_feed_forward_length", "64"},
    {"bailing_hybrid", "bailingmoe3.swiglu_clamp_exp", ""},
    {"bailing_hybrid_ct", "bailingmoe3.attention.head_count_kv", "0,0,1"},
    {"bailing_hybrid_ct", "bailingmoe3.kda.gate_lower_bound", "-3"},
    {"bailing_hybrid_ct", "bailingmoe3.attention.q_lora_rank", "96"},
    {"bailing_hybrid_ct", "bailingmoe3.expert_shared_feed_forward_length", "256"},
    {"bailing_hybrid_ct", "bailingmoe3.swiglu_clamp_exp", "0,0,0"},
    {"bailing_hybrid_ct", "bailingmoe3.swiglu_clamp_shexp", "0,0,0"},
    {"glm5_next", "general.architecture", "glm5-next"},
    {"glm5_next", "glm5-next.context_length", "4096"},
    {"glm5_next", "glm5-next.block_count", "5"},
    {"glm5_next", "glm5-next.nextn_predict_layers", "1"},
    {"glm5_next", "glm5-next.attention.head_count_kv", "0,1,0,1,1"},
    {"glm5_next", "glm5-next.attention.key_length", "64"},
    {"glm5_next", "glm5-next.attention.value_length", "64"},
    {"glm5_next", "glm5-next.attention.key_length_mla", "48"},
    {"glm5_next", "glm5-next.attention.value_length_mla", "32"},
    {"glm5_next", "glm5-next.attention.q_lora_rank", "64"},
    {"glm5_next", "glm5-next.attention.kv_lora_rank", "64"},
    {"glm5_next", "glm5-next.rope.dimension_count", "0"},
    {"glm5_next", "glm5-next.rope.freq_base", ""},
    {"glm5_next", "glm5-next.kda.head_dim", "32"},
    {"glm5_next", "glm5-next.kda.gate_lower_bound", "-5"},
    {"glm5_next", "glm5-next.kda.safe_gate", ""},
    {"glm5_next", "glm5-next.ssm.conv_kernel", "4"},
    {"glm5_next", "glm5-next.attention.indexer.head_count", "16"},
    {"glm5_next", "glm5-next.attention.indexer.key_length", "64"},
    {"glm5_next", "glm5-next.attention.indexer.top_k", "32"},
    {"glm5_next", "glm5-next.attention.indexer.kpool", "4"},
    {"glm5_next", "glm5-next.attention.indexer.kpool_select_tail", "1"},
    {"glm5_next", "glm5-next.attention.indexer.types", "1,1,1,1"},
    {"glm5_next", "glm5-next.hyper_connection.count", "4"},
    {"glm5_next", "glm5-next.hyper_connection.sinkhorn_iterations", "20"},
    {"glm5_next", "glm5-next.hyper_connection.epsilon", "1e-06"},
    {"glm5_next", "glm5-next.swiglu_clamp_exp", "1.5,1.5,1.5,1.5,1.5"},
    {"glm5_next", "glm5-next.swiglu_clamp_shexp", "1.5,1.5,1.5,1.5,1.5"},
    {"glm5_next", "glm5-next.leading_dense_block_count", "3"},
    {"glm5_next", "glm5-next.expert_gating_func", "2"},
    {"glm5_next", "glm5-next.expert_weights_norm", "1"},
    {"glm5_next", "glm5-next.expert_weights_scale", "2.5"},
    {"glm5_next", "glm5-next.expert_shared_count", "1"},
    {"glm5_next", "glm5-next.attention.layer_norm_rms_epsilon", "1e-05"},
    {"glm5_next_nvfp4", "glm5-next.attention.head_count_kv", "1,1,0"},
    {"glm5_next_nvfp4", "glm5-next.attention.indexer.types", "1,0,1"},
    {"glm5_next_nvfp4", "glm5-next.attention.indexer.kpool", "8"},
    {"glm5_next_nvfp4", "glm5-next.kda.head_dim", "64"},
    {"glm5_next_nvfp4", "glm5-next.kda.gate_lower_bound", "-3"},
    {"glm5_next_nvfp4", "glm5-next.nextn_predict_layers", ""},
    {"glm5_next_nvfp4", "glm5-next.leading_dense_block_count", "1"},
    {"glm5_next_nvfp4", "glm5-next.expert_shared_count", "2"},
    {"qwen4_exp", "general.architecture", "qwen4exp"},
    {"qwen4_exp", "tokenizer.ggml.pre", "qwen35"},
    {"qwen4_exp", "qwen4exp.block_count", "4"},
    {"qwen4_exp", "qwen4exp.nextn_predict_layers", "1"},
    {"qwen4_exp", "qwen4exp.attention.recurrent_layers", "1,1,0,0"},
    {"qwen4_exp", "qwen4exp.attention.compress_ratios", "0,0,4,4"},
    {"qwen4_exp", "qwen4exp.attention.indexer.head_count", "16"},
    {"qwen4_exp", "qwen4exp.attention.indexer.key_length", "32"},
    {"qwen4_exp", "qwen4exp.attention.indexer.top_k", "32"},
    {"qwen4_exp", "qwen4exp.hyper_connection.count", "4"},
    {"qwen4_exp", "qwen4exp.hyper_connection.low_rank", "32"},
    {"qwen4_exp", "qwen4exp.expert_weights_norm", "1"},
    {"qwen4_exp", "qwen4exp.expert_shared_feed_forward_length", "64"},
    {"qwen4_exp", "qwen4exp.ssm.conv_kernel", "4"},
    {"qwen4_exp", "qwen4exp.rope.dimension_sections", "3,3,2,0"},
    {"qwen4_exp", "qwen4exp.ple.layers", "1"},
    {"qwen4_exp", "qwen4exp.ple.ngram_size", "3"},
    {"qwen4_exp", "qwen4exp.ple.heads_per_ngram", "4"},
    {"qwen4_exp", "qwen4exp.ple.conv_kernel", "4"},
    {"qwen4_exp", "qwen4exp.ple.eos_token_id", "507"},
    {"qwen4_exp", "qwen4exp.ple.image_token_id", "248056"},
    {"qwen4_exp", "qwen4exp.ple.head_offsets", "0,101,204,311,420,533,660,791"},
    {"qwen4_exp", "qwen4exp.ple.head_vocab_sizes", "101,103,107,109,113,127,131,137"},
    {"qwen4_exp", "qwen4exp.embedding_length_per_layer_input", "8"},
    {"qwen4_exp_nvfp4", "qwen4exp.attention.compress_ratios", "0,3,3"},
    {"qwen4_exp_nvfp4", "qwen4exp.attention.indexer.top_k", "18"},
    {"qwen4_exp_nvfp4", "qwen4exp.expert_weights_norm", "0"},
    {"qwen4_exp_nvfp4", "qwen4exp.ple.layers", "0"},
    {"qwen4_exp_nvfp4", "qwen4exp.ple.eos_token_id", "509"},
    {"qwen4_exp_nvfp4", "qwen4exp.ple.image_token_id", ""},
    {"qwen4_exp_nvfp4", "qwen4exp.embedding_length_per_layer_input", "16"}};

/* What config.json becomes, under the names of llama.cpp's converter. Every row catches that its key is lost, has
 * another name or another value. */
static void test_families_keys(void) {
    struct gguf g = {0};
    for (size_t i = 0; i < sizeof family_keys / sizeof *family_keys; i++) {
        if (!i || strcmp(family_keys[i].fixture, family_keys[i - 1].fixture)) {
            gguf_close(&g);
            if (!fixture_gguf(family_keys[i].fixture, "", "keys.gguf", &g)) return;
        }
        CHECK(!strcmp(key_text(&g, family_keys[i].key), family_keys[i].value), "%s: %s is '%s', expected '%s'",
              family_keys[i].fixture, family_keys[i].key, key_text(&g, family_keys[i].key), family_keys[i].value);
    }
    gguf_close(&g);
}

/* ---------------------------------------------------------------------------------------------------------- gpt-oss */

/* Weight (row, column) of an expert in x_blocks and x_scales. */
static float mxfp4_value(struct hf *h, const char *x, size_t row, size_t cols, size_t column) {
    char name[128];
    snprintf(name, sizeof name, "%s_blocks", x);
    const struct hf_tensor *w = hf_find(h, name);
    snprintf(name, sizeof name, "%s_scales", x);
    const struct hf_tensor *s = hf_find(h, name);
    if (!CHECK(w && s, "no %s", name)) return NAN;
    const size_t block = row * (cols / 32) + column / 32, byte = block * 16 + column % 32 / 2;
    return ldexpf(e2m1_to_f32(w->data[byte] >> 4 * (column & 1) & 15), s->data[block] - 127);
}

/* The experts of gpt-oss: MXFP4 as it is in blocks of GGUF, or columns of BF16; every other row or column is gate's.
 * Catches a swap of gate and up, of nibbles, a shifted scale, a matrix that is not transposed, and biases that are not
 * taken apart. */
static void check_gpt_oss(const char *fixture, size_t n_ff, size_t n_expert, bool mx) {
    static const char *const part[] = {"gate", "up", "down"};
    enum { LAYER = 1, EMBD = 64 };
    struct hf h;
    hf_load(&h, fixture);
    if (!hf_convert(&h)) return;
    for (size_t p = 0; p < 3; p++) {
        char x[96], name[96];
        const size_t rows = p < 2 ? n_ff : EMBD, cols = p < 2 ? EMBD : n_ff, all = p < 2 ? 2 * rows : rows;
        size_t bad = 0;
        snprintf(x, sizeof x, "model.layers.%d.mlp.experts.%s_proj", LAYER, p < 2 ? "gate_up" : "down");
        snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight", LAYER, part[p]);
        float *v = out_values(&h.g, name, mx ? GGUF_MXFP4 : GGUF_BF16, cols, rows, n_expert);
        for (size_t e = 0; e < n_expert && v; e++)
            for (size_t r = 0; r < rows; r++)
                for (size_t c = 0; c < cols; c++) {
                    const size_t from = p < 2 ? 2 * r + p : r;
                    const float want =
                        mx ? mxfp4_value(&h, x, e * all + from, cols, c) : hf_float(&h, x, (e * cols + c) * all + from);
                    bad += v[(e * rows + r) * cols + c] != want;
                }
        CHECK(!bad, "%s: %zu values of %s differ", fixture, bad, name);
        free(v);
        snprintf(x, sizeof x, "model.layers.%d.mlp.experts.%s_proj_bias", LAYER, p < 2 ? "gate_up" : "down");
        snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.bias", LAYER, part[p]);
        v = out_values(&h.g, name, GGUF_F32, rows, n_expert, 1);
        for (size_t i = 0; i < rows * n_expert && v; i++)
            CHECK(v[i] == hf_float(&h, x, i / rows * all + (p < 2 ? 2 * (i % rows) + p : i % rows)), "%s: value %zu",
                  name, i);
        free(v);
    }
    static const char *const vectors[][2] = {{"attn_sinks.weight", "self_attn.sinks"},
                                             {"attn_output.bias", "self_attn.o_proj.bias"},
                                             {"attn_k.bias", "self_attn.k_proj.bias"},
                                             {"ffn_gate_inp.bias", "mlp.router.bias"},
                                             {"post_attention_norm.weight", "post_attention_layernorm.weight"}};
    for (size_t k = 0; k < sizeof vectors / sizeof *vectors; k++) {
        char x[96], name[96];
        snprintf(x, sizeof x, "model.layers.%d.%s", LAYER, vectors[k][1]);
        snprintf(name, sizeof name, "blk.%d.%s", LAYER, vectors[k][0]);
        const struct hf_tensor *t = hf_find(&h, x);
        const size_t n = t ? arrlenu(t->data) / (strcmp(t->dtype, "F32") ? 2 : 4) : 0;
        for (size_t i = 0; i < n; i++) CHECK(out_f32(&h.g, name, n, i) == hf_float(&h, x, i), "%s %zu", name, i);
        CHECK(n, "no %s", x);
    }
    hf_end(&h);
}

/* Columns of matrices that are read in more than one part. Catches a part that lands in another's place. */
static void check_wide_columns(void) {
    enum { FF = 40000, EMBD = 64, N = 2 };
    static const struct {
        const char *name, *shape;
        size_t n;
    } c[] = {{"mlp.router.weight", "[2,64]", N * EMBD},
             {"mlp.router.bias", "[2]", N},
             {"mlp.experts.gate_up_proj", "[2,64,80000]", (size_t)N * EMBD * 2 * FF},
             {"mlp.experts.gate_up_proj_bias", "[2,80000]", N * 2 * FF},
             {"mlp.experts.down_proj", "[2,40000,64]", (size_t)N * FF * EMBD},
             {"mlp.experts.down_proj_bias", "[2,64]", N * EMBD}};
    static const char up[] = "model.layers.0.mlp.experts.gate_up_proj", down[] = "model.layers.0.mlp.experts.down_proj";
    struct hf h;
    hf_load(&h, "gpt_oss_bf16");
    hf_set(h.config, "{\"num_hidden_layers\":1,\"layer_types\":[\"full_attention\"],\"intermediate_size\":40000,"
                     "\"num_local_experts\":2,\"num_experts_per_tok\":2}");
    for (size_t i = arrlenu(h.t); i-- > 0;) {
        if (strncmp(h.t[i].name, "model.layers.1.", 15) && !strstr(h.t[i].name, ".mlp.")) continue;
        arrfree(h.t[i].data);
        arrdel(h.t, i);
    }
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.0.%s", c[i].name);
        hf_plain(&h, name, c[i].shape, c[i].n, HF_BF16);
    }
    if (hf_convert(&h)) {
        float *u = out_values(&h.g, "blk.0.ffn_up_exps.weight", GGUF_BF16, EMBD, FF, N);
        float *d = out_values(&h.g, "blk.0.ffn_down_exps.weight", GGUF_BF16, FF, EMBD, N);
        size_t bad = 0;
        for (size_t i = 0; i < (size_t)N * FF * EMBD && u && d; i += 37) {
            const size_t e = i / (FF * EMBD), r = i / EMBD % FF, k = i % EMBD;
            bad += u[(e * FF + r) * EMBD + k] != hf_float(&h, up, (e * EMBD + k) * 2 * FF + 2 * r + 1);
            bad += d[(e * EMBD + k) * FF + r] != hf_float(&h, down, (e * FF + r) * EMBD + k);
        }
        CHECK(!bad, "%zu values differ", bad);
        free(u);
        free(d);
    }
    hf_end(&h);
}

static void test_families_gpt_oss(void) {
    check_wide_columns();
    check_gpt_oss("gpt_oss", 64, 8, true);
    check_gpt_oss("gpt_oss_bf16", 128, 4, false);
}

/* ------------------------------------------------------------------------------------------------------------- rows */

/* Replaces a linear layer by a random one. */
static void hf_replace(struct hf *h, const char *x, size_t rows, size_t cols, enum hf_form form) {
    char name[128];
    snprintf(name, sizeof name, "%s.weight", x);
    hf_drop(h, name);
    hf_linear(h, x, rows, cols, form);
}

/* Rows 2i and 2i + 1 of a head of llama are rows i and i + half of Mixtral's, with their scales. Catches rows that
 * stay, go the other way or leave their scales behind, and heads of another size. */
static void test_families_pairs(void) {
    static const struct {
        enum hf_form form;
        uint32_t type;
    } f[] = {{HF_BF16, GGUF_BF16},      {HF_F16, GGUF_F16},         {HF_F32, GGUF_F32},      {HF_NVFP4, GGUF_NVFP4},
             {HF_CT_NVFP4, GGUF_NVFP4}, {HF_FP8_TENSOR, GGUF_BF16}, {HF_FP8_ROW, GGUF_BF16}, {HF_FP8_BLOCK, GGUF_BF16}};
    enum { HEAD = 64, EMBD = 128 };
    for (size_t k = 0; k < sizeof f / sizeof *f; k++) {
        struct hf h;
        hf_load(&h, "mixtral");
        hf_set(h.config, "{\"num_attention_heads\":6,\"num_key_value_heads\":3,\"head_dim\":64}");
        for (int l = 0; l < 2; l++) {
            static const struct {
                const char *name;
                size_t rows, cols;
            } part[] = {{"q_proj", 384, EMBD}, {"k_proj", 192, EMBD}, {"v_proj", 192, EMBD}, {"o_proj", EMBD, 384}};
            for (int p = 0; p < 4; p++) {
                char x[96];
                snprintf(x, sizeof x, "model.layers.%d.self_attn.%s", l, part[p].name);
                hf_replace(&h, x, part[p].rows, part[p].cols, f[k].form);
            }
        }
        if (hf_convert(&h))
            for (int p = 0; p < 3; p++) {
                static const char *const from[] = {"q_proj", "k_proj", "v_proj"};
                static const char *const to[] = {"attn_q", "attn_k", "attn_v"};
                const size_t rows = p ? 192 : 384;
                char x[96], name[96];
                size_t bad = 0;
                snprintf(x, sizeof x, "model.layers.1.self_attn.%s", from[p]);
                snprintf(name, sizeof name, "blk.1.%s.weight", to[p]);
                float *v = out_values(&h.g, name, f[k].type, EMBD, rows, 1);
                for (size_t r = 0; r < rows && v; r++) {
                    const size_t i = r % HEAD, row = p == 2 ? r : r - i + i % 2 * (HEAD / 2) + i / 2;
                    for (size_t c = 0; c < EMBD; c++)
                        bad += v[r * EMBD + c] != hf_value(&h, x, f[k].form, EMBD, row, c);
                }
                CHECK(!bad, "form %d: %zu values of %s differ", f[k].form, bad, name);
                free(v);
            }
        hf_end(&h);
    }
}

/* MiMo-V2.5's queries, keys and values in one tensor of as many parts as there are KV heads in layers without a window.
 * Catches a tensor that is taken for [Q | K | V], parts by another number, and FP8 blocks that go on from one part to
 * the next: a part of 704 rows ends in half a block. */
static void test_families_qkv(void) {
    static const enum hf_form forms[] = {HF_BF16, HF_FP8_BLOCK, HF_NVFP4};
    enum { PARTS = 2, EMBD = 64, Q = 4 * 192, CHUNK_FULL = (Q + 2 * 192 + 2 * 128) / PARTS };
    static_assert(CHUNK_FULL % 128, "the blocks of a part are whole");
    for (size_t k = 0; k < sizeof forms / sizeof *forms; k++) {
        struct hf h;
        hf_load(&h, "mimo_v2_flash");
        hf_set(h.config, "{\"num_key_value_heads\":2,\"swa_num_key_value_heads\":4,\"model_type\":\"mimo_v2\"}");
        for (int l = 0; l < 2; l++) {
            static const char *const gone[] = {"q_proj.weight", "k_proj.weight", "v_proj.weight"};
            const size_t kv = l ? 4 : 2, rows = Q + kv * 192 + kv * 128, part = rows / PARTS;
            const size_t blocks = (part + 127) / 128;
            char name[128], x[96], shape[48];
            for (int i = 0; i < 3; i++) {
                snprintf(name, sizeof name, "model.layers.%d.self_attn.%s", l, gone[i]);
                hf_drop(&h, name);
            }
            snprintf(x, sizeof x, "model.layers.%d.self_attn.qkv_proj", l);
            hf_linear(&h, x, rows, EMBD, forms[k]);
            if (forms[k] != HF_FP8_BLOCK) continue;
            snprintf(name, sizeof name, "%s.weight_scale_inv", x);
            hf_drop(&h, name);
            snprintf(shape, sizeof shape, "[%zu,1]", PARTS * blocks);
            hf_plain(&h, name, shape, PARTS * blocks, HF_F32);
        }
        if (!hf_convert(&h)) continue;
        for (int l = 0; l < 2; l++) {
            const size_t kv = l ? 4 : 2, of[] = {Q, kv * 192, kv * 128}, rows = of[0] + of[1] + of[2];
            const size_t part = rows / PARTS;
            char name[128], x[96];
            size_t bad = 0, r = 0;
            snprintf(x, sizeof x, "model.layers.%d.self_attn.qkv_proj", l);
            snprintf(name, sizeof name, "blk.%d.attn_qkv.weight", l);
            float *v = out_values(&h.g, name, forms[k] == HF_NVFP4 ? GGUF_NVFP4 : GGUF_BF16, EMBD, rows, 1);
            for (size_t i = 0, before = 0; i < 3; before += of[i++] / PARTS)
                for (size_t j = 0; j < of[i]; j++, r++) {
                    const size_t in = before + j % (of[i] / PARTS), c = j / (of[i] / PARTS), row = c * part + in;
                    for (size_t d = 0; d < EMBD && v; d++) {
                        float want = hf_value(&h, x, forms[k] == HF_FP8_BLOCK ? HF_FP8_TENSOR : forms[k], EMBD, row, d);
                        char scale[128];
                        snprintf(scale, sizeof scale, "%s.weight_scale_inv", x);
                        if (forms[k] == HF_FP8_BLOCK)
                            want = bf16_to_f32(
                                bf16_from_f32(want * hf_float(&h, scale, c * ((part + 127) / 128) + in / 128)));
                        bad += v[r * EMBD + d] != want;
                    }
                }
            CHECK(!bad, "form %d: %zu values of %s differ", forms[k], bad, name);
            free(v);
        }
        hf_end(&h);
    }
}

/* Puts the experts of a layer of Step-3.5, named moe.experts.E.X, together as moe.X with their scales. */
static void hf_stack(struct hf *h, int layer, int n) {
    static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
    static const char *const sides[] = {"weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale"};
    for (int p = 0; p < 3; p++)
        for (size_t side = 0; side < sizeof sides / sizeof *sides; side++) {
            char name[128], shape[48] = "", dtype[16] = "";
            uint8_t *data = NULL;
            for (int e = 0; e < n; e++) {
                snprintf(name, sizeof name, "model.layers.%d.moe.experts.%d.%s.%s", layer, e, part[p], sides[side]);
                struct hf_tensor *t = hf_find(h, name);
                if (!t) continue;
                hf_put(&data, t->data, arrlenu(t->data));
                snprintf(dtype, sizeof dtype, "%s", t->dtype);
                snprintf(shape, sizeof shape, "[%d%s%.30s", n, t->shape[1] == ']' ? "" : ",", t->shape + 1);
                hf_drop(h, name);
            }
            snprintf(name, sizeof name, "model.layers.%d.moe.%s.%s", layer, part[p], sides[side]);
            if (data) hf_add(h, name, dtype, shape, data, arrlenu(data));
            arrfree(data);
        }
}

/* Whether two files have the same bytes. */
static bool same_bytes(const char *a, const char *b) {
    char cmd[512];
    snprintf(cmd, sizeof cmd, "cmp -s %s %s", a, b);
    return !system(cmd);
}

/* Step-3.5's experts one by one and stacked give the same file, in every form. Catches scales of another expert, and
 * FP8 blocks that go on from one expert to the next: an expert of 192 rows ends in half a block. */
static void test_families_stacks(void) {
    static const enum hf_form forms[] = {HF_BF16, HF_F32, HF_NVFP4, HF_FP8_TENSOR, HF_FP8_BLOCK};
    enum { EXPERTS_ = 4, EMBD = 64, FF = 192 };
    for (size_t k = 0; k < sizeof forms / sizeof *forms; k++) {
        struct hf h;
        char a[160], b[160];
        hf_load(&h, "step3p5");
        hf_set(h.config, "{\"moe_intermediate_size\":192}");
        for (int l = 1; l < 3; l++)
            for (int p = 0; p < 3; p++) {
                static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
                char name[128];
                snprintf(name, sizeof name, "model.layers.%d.moe.%s.weight", l, part[p]);
                hf_drop(&h, name);
                for (int e = 0; e < EXPERTS_; e++) {
                    snprintf(name, sizeof name, "model.layers.%d.moe.experts.%d.%s", l, e, part[p]);
                    hf_linear(&h, name, p < 2 ? FF : EMBD, p < 2 ? EMBD : FF, forms[k]);
                }
            }
        CHECK(!hf_convert_to(&h, "each.gguf"), "form %d: %s", forms[k], h.err);
        for (int l = 1; l < 3; l++) hf_stack(&h, l, EXPERTS_);
        CHECK(!hf_convert_to(&h, "stacked.gguf"), "form %d: %s", forms[k], h.err);
        snprintf(a, sizeof a, "%s/each.gguf", h.dir);
        snprintf(b, sizeof b, "%s/stacked.gguf", h.dir);
        CHECK(same_bytes(a, b), "form %d: the files differ", forms[k]);
        hf_end(&h);
    }
}

/* MXFP4 as compressed-tensors and MiMo-V2.5 store it, in single experts and in stacks: powers of two for 32 weights, as
 * U8 or F8_E8M0. Catches scales for 16 weights, a swap of nibbles, and --quantize that rounds it again. */
static void test_families_mxfp4(void) {
    for (int form = 0; form < 4; form++) {
        static const char *const x = "model.layers.1.mlp.experts.2.up_proj";
        const bool packed = form & 1, powers = form & 2;
        struct hf h;
        hf_load(&h, "mimo_v2_flash");
        for (int e = 0; e < 4; e++)
            for (int p = 0; p < 3; p++) {
                static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
                char base[96], name[128];
                snprintf(base, sizeof base, "model.layers.1.mlp.experts.%d.%s", e, part[p]);
                hf_replace(&h, base, 64, 64, HF_NVFP4);
                static const char *const gone[] = {"weight_scale", "weight_scale_2", "input_scale"};
                for (int i = 0; i < 3; i++) {
                    snprintf(name, sizeof name, "%s.%s", base, gone[i]);
                    hf_drop(&h, name);
                }
                snprintf(name, sizeof name, "%s.weight", base);
                struct hf_tensor *w = hf_find(&h, name);
                if (packed) snprintf(w->name, sizeof w->name, "%s.weight_packed", base);
                snprintf(name, sizeof name, "%s.weight_scale", base);
                struct hf_tensor *s = hf_add(&h, name, powers ? "F8_E8M0" : "U8", "[64,2]", NULL, 0);
                for (int i = 0; i < 128; i++) arrput(s->data, (uint8_t)(110 + rng_next(&h.rng) % 12));
            }
        char extra[256], name[128];
        hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
        snprintf(extra, sizeof extra, "-o %s/out.gguf --quantize nvfp4", h.dir);
        if (!CHECK(!hf_run(&h, extra), "form %d: %s", form, h.err) || !hf_convert(&h)) continue;
        snprintf(name, sizeof name, "%s.weight%s", x, packed ? "_packed" : "");
        const struct hf_tensor *w = hf_find(&h, name);
        snprintf(name, sizeof name, "%s.weight_scale", x);
        const struct hf_tensor *s = hf_find(&h, name);
        float *v = out_values(&h.g, "blk.1.ffn_up_exps.weight", GGUF_MXFP4, 64, 64, 4);
        size_t bad = 0;
        for (size_t i = 0; i < 64 * 64 && v && w && s; i++)
            bad += v[2 * 64 * 64 + i] != ldexpf(e2m1_to_f32(w->data[i / 2] >> 4 * (i & 1) & 15), s->data[i / 32] - 127);
        CHECK(!bad, "form %d: %zu values differ", form, bad);
        CHECK(!gguf_find_tensor(&h.g, "blk.1.ffn_up_exps.scale"), "form %d: a scale for what has none", form);
        free(v);
        hf_end(&h);
    }
}

/* ---------------------------------------------------------------------------------------------- norms and rotations */

#define M3 "language_model.model."

#define Q4 "model.language_model."
#define G4 Q4

/* Vectors and small matrices of releases, and `more` by which the converted ones exceed them: Step-3.5's and
 * MiniMax-M3's norms are stored less 1. */
static const struct converted_tensor {
    const char *fixture, *to, *from;
    float more;
} converted_tensors[] = {
    {"glm4", "blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight", 0},
    {"glm4", "blk.1.post_attention_norm.weight", "model.layers.1.post_self_attn_layernorm.weight", 0},
    {"glm4", "blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight", 0},
    {"glm4", "blk.1.post_ffw_norm.weight", "model.layers.1.post_mlp_layernorm.weight", 0},
    {"glm4", "blk.2.ffn_up.weight", "model.layers.2.mlp.gate_up_proj.weight", 0},
    {"glm4", "blk.2.attn_k.bias", "model.layers.2.self_attn.k_proj.bias", 0},
    {"gemma4", "blk.1.post_attention_norm.weight", G4 "layers.1.post_attention_layernorm.weight", 0},
    {"gemma4", "blk.1.ffn_norm.weight", G4 "layers.1.pre_feedforward_layernorm.weight", 0},
    {"gemma4", "blk.1.post_ffw_norm.weight", G4 "layers.1.post_feedforward_layernorm.weight", 0},
    {"gemma4", "blk.1.post_ffw_norm_1.weight", G4 "layers.1.post_feedforward_layernorm_1.weight", 0},
    {"gemma4", "blk.2.post_ffw_norm_2.weight", G4 "layers.2.post_feedforward_layernorm_2.weight", 0},
    {"gemma4", "blk.2.pre_ffw_norm_2.weight", G4 "layers.2.pre_feedforward_layernorm_2.weight", 0},
    {"gemma4", "blk.0.ffn_gate_inp.scale", G4 "layers.0.router.scale", 0},
    {"gemma4", "blk.0.ffn_gate_inp.weight", G4 "layers.0.router.proj.weight", 0},
    {"gemma4", "blk.0.ffn_down_exps.scale", G4 "layers.0.router.per_expert_scale", 0},
    {"gemma4", "blk.0.layer_output_scale.weight", G4 "layers.0.layer_scalar", 0},
    {"gemma4", "blk.2.attn_k.weight", G4 "layers.2.self_attn.k_proj.weight", 0},
    {"gemma4", "blk.2.ffn_up.weight", G4 "layers.2.mlp.up_proj.weight", 0},
    {"deepseek_v4", "token_embd.weight", "embed.weight", 0},
    {"deepseek_v4", "output.weight", "head.weight", 0},
    {"deepseek_v4", "output_norm.weight", "norm.weight", 0},
    {"deepseek_v4", "output_hc_fn.weight", "hc_head_fn", 0},
    {"deepseek_v4", "output_hc_base.weight", "hc_head_base", 0},
    {"deepseek_v4", "output_hc_scale.weight", "hc_head_scale", 0},
    {"deepseek_v4", "blk.0.hc_attn_fn.weight", "layers.0.hc_attn_fn", 0},
    {"deepseek_v4", "blk.1.hc_ffn_base.weight", "layers.1.hc_ffn_base", 0},
    {"deepseek_v4", "blk.4.hc_ffn_scale.weight", "layers.4.hc_ffn_scale", 0},
    {"deepseek_v4", "blk.2.attn_norm.weight", "layers.2.attn_norm.weight", 0},
    {"deepseek_v4", "blk.2.ffn_norm.weight", "layers.2.ffn_norm.weight", 0},
    {"deepseek_v4", "blk.0.attn_sinks.weight", "layers.0.attn.attn_sink", 0},
    {"deepseek_v4", "blk.1.attn_q_a_norm.weight", "layers.1.attn.q_norm.weight", 0},
    {"deepseek_v4", "blk.1.attn_kv_a_norm.weight", "layers.1.attn.kv_norm.weight", 0},
    {"deepseek_v4", "blk.2.attn_compressor_kv.weight", "layers.2.attn.compressor.wkv.weight", 0},
    {"deepseek_v4", "blk.3.attn_compressor_gate.weight", "layers.3.attn.compressor.wgate.weight", 0},
    {"deepseek_v4", "blk.3.attn_compressor_ape.weight", "layers.3.attn.compressor.ape", 0},
    {"deepseek_v4", "blk.2.attn_compressor_norm.weight", "layers.2.attn.compressor.norm.weight", 0},
    {"deepseek_v4", "blk.4.indexer.proj.weight", "layers.4.attn.indexer.weights_proj.weight", 0},
    {"deepseek_v4", "blk.4.indexer_compressor_kv.weight", "layers.4.attn.indexer.compressor.wkv.weight", 0},
    {"deepseek_v4", "blk.2.indexer_compressor_gate.weight", "layers.2.attn.indexer.compressor.wgate.weight", 0},
    {"deepseek_v4", "blk.2.indexer_compressor_ape.weight", "layers.2.attn.indexer.compressor.ape", 0},
    {"deepseek_v4", "blk.4.indexer_compressor_norm.weight", "layers.4.attn.indexer.compressor.norm.weight", 0},
    {"deepseek_v4", "blk.0.ffn_gate_inp.weight", "layers.0.ffn.gate.weight", 0},
    {"deepseek_v4", "blk.3.exp_probs_b.bias", "layers.3.ffn.gate.bias", 0},
    {"deepseek_v4", "blk.5.nextn.enorm.weight", "mtp.0.enorm.weight", 0},
    {"deepseek_v4", "blk.5.nextn.hnorm.weight", "mtp.0.hnorm.weight", 0},
    {"deepseek_v4", "blk.5.nextn.shared_head_norm.weight", "mtp.0.norm.weight", 0},
    {"deepseek_v4", "blk.5.nextn.hc_head_fn.weight", "mtp.0.hc_head_fn", 0},
    {"deepseek_v4", "blk.5.nextn.hc_head_base.weight", "mtp.0.hc_head_base", 0},
    {"deepseek_v4", "blk.5.nextn.hc_head_scale.weight", "mtp.0.hc_head_scale", 0},
    {"deepseek_v4", "blk.5.hc_attn_fn.weight", "mtp.0.hc_attn_fn", 0},
    {"deepseek_v4", "blk.5.attn_kv_a_norm.weight", "mtp.0.attn.kv_norm.weight", 0},
    {"deepseek_v4", "blk.5.exp_probs_b.bias", "mtp.0.ffn.gate.bias", 0},
    {"deepseek_v4_pro", "token_embd.weight", "model.embed_tokens.weight", 0},
    {"deepseek_v4_pro", "output_norm.weight", "model.norm.weight", 0},
    {"deepseek_v4_pro", "output_hc_scale.weight", "model.hc_head.hc_scale", 0},
    {"deepseek_v4_pro", "blk.0.attn_kv_a_norm.weight", "model.layers.0.attn.norm.weight", 0},
    {"deepseek_v4_pro", "blk.1.attn_output_a.weight", "model.layers.1.attn.wo_a.weight", 0},
    {"deepseek_v4_pro", "blk.2.indexer.attn_q_b.weight", "model.layers.2.attn.indexer.wq_b.weight", 0},
    {"deepseek_v41", "blk.0.hc_attn_fn.weight", "layers.0.hc_attn_fn", 0},
    {"deepseek_v41", "blk.6.hc_ffn_scale.weight", "layers.6.hc_ffn_scale", 0},
    {"deepseek_v41", "blk.0.attn_sinks.weight", "layers.0.attn.attn_sink", 0},
    {"deepseek_v41", "blk.1.attn_compressor_norm.weight", "layers.1.attn.compressor.norm.weight", 0},
    {"deepseek_v41", "blk.1.indexer.k_norm.weight", "layers.1.attn.indexer.k_norm.weight", 0},
    {"deepseek_v41", "blk.1.engram_k_weight.weight", "layers.1.engram.k_weight", 0},
    {"deepseek_v41", "blk.4.engram_q_weight.weight", "layers.4.engram.q_weight", 0},
    {"deepseek_v41", "blk.3.exp_probs_b.bias", "layers.3.ffn.gate.bias", 0},
    {"deepseek_v41", "blk.1.attn_compressor_kv.weight", "layers.1.attn.compressor.wkv.weight", 0},
    {"deepseek_v41", "blk.1.attn_compressor_gate.weight", "layers.1.attn.compressor.wgate.weight", 0},
    {"deepseek_v41", "blk.4.indexer.attn_k.weight", "layers.4.attn.indexer.wk.weight", 0},
    {"deepseek_v41", "blk.6.indexer.proj.weight", "layers.6.attn.indexer.weights_proj.weight", 0},
    {"step3p7", "output_norm.weight", "model.norm.weight", 1},
    {"step3p7", "blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", 1},
    {"step3p7", "blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight", 1},
    {"step3p7", "blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight", 1},
    {"step3p7", "blk.2.nextn.enorm.weight", "model.layers.2.enorm.weight", 1},
    {"step3p7", "blk.3.nextn.hnorm.weight", "model.layers.3.hnorm.weight", 1},
    {"step3p7", "blk.3.nextn.shared_head_norm.weight", "model.layers.3.transformer.shared_head.norm.weight", 1},
    {"step3p7", "blk.3.nextn.shared_head_head.weight", "model.layers.3.transformer.shared_head.output.weight", 0},
    {"step3p7", "blk.2.nextn.eh_proj.weight", "model.layers.2.eh_proj.weight", 0},
    {"step3p7", "blk.2.ffn_up.weight", "model.layers.2.mlp.up_proj.weight", 0},
    {"step3p7", "blk.3.attn_gate.weight", "model.layers.3.self_attn.g_proj.weight", 0},
    {"step3p7", "blk.1.exp_probs_b.bias", "model.layers.1.moe.router_bias", 0},
    {"mimo_v2_flash_fp8", "output_norm.weight", "model.norm.weight", 0},
    {"mimo_v2_flash_fp8", "blk.3.nextn.enorm.weight", "model.mtp.layers.0.enorm.weight", 0},
    {"mimo_v2_flash_fp8", "blk.5.ffn_norm.weight", "model.mtp.layers.2.pre_mlp_layernorm.weight", 0},
    {"mimo_v2_flash_fp8", "blk.4.layer_output_norm.weight", "model.mtp.layers.1.final_layernorm.weight", 0},
    {"mimo_v2_flash_fp8", "blk.4.attn_output.weight", "model.mtp.layers.1.self_attn.o_proj.weight", 0},
    {"mimo_v2_flash_fp8", "blk.5.attn_sinks.weight", "model.mtp.layers.2.self_attn.attention_sink_bias", 0},
    {"mimo_v2_flash_fp8", "blk.1.attn_sinks.weight", "model.layers.1.self_attn.attention_sink_bias", 0},
    {"laguna", "blk.1.exp_probs_b.bias", "model.layers.1.mlp.experts.e_score_correction_bias", 0},
    {"laguna", "blk.1.attn_gate.weight", "model.layers.1.self_attn.g_proj.weight", 0},
    {"ernie4_5_moe", "blk.1.exp_probs_b.bias", "model.layers.1.mlp.moe_statics.e_score_correction_bias", 0},
    {"minimax_m2", "blk.0.exp_probs_b.bias", "model.layers.0.block_sparse_moe.e_score_correction_bias", 0},
    {"minimax_m2", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight", 0},
    {"minimax_m3", "output_norm.weight", M3 "norm.weight", 1},
    {"minimax_m3", "blk.0.attn_norm.weight", M3 "layers.0.input_layernorm.weight", 1},
    {"minimax_m3", "blk.2.ffn_norm.weight", M3 "layers.2.post_attention_layernorm.weight", 1},
    {"minimax_m3", "blk.0.attn_q_norm.weight", M3 "layers.0.self_attn.q_norm.weight", 1},
    {"minimax_m3", "blk.2.attn_k_norm.weight", M3 "layers.2.self_attn.k_norm.weight", 1},
    {"minimax_m3", "blk.1.indexer.q_norm.weight", M3 "layers.1.self_attn.index_q_norm.weight", 1},
    {"minimax_m3", "blk.2.indexer.k_norm.weight", M3 "layers.2.self_attn.index_k_norm.weight", 1},
    {"minimax_m3", "blk.2.indexer.q_proj.weight", M3 "layers.2.self_attn.index_q_proj.weight", 0},
    {"minimax_m3", "blk.1.indexer.k_proj.weight", M3 "layers.1.self_attn.index_k_proj.weight", 0},
    {"minimax_m3", "blk.0.ffn_gate.weight", M3 "layers.0.mlp.gate_proj.weight", 0},
    {"minimax_m3", "blk.1.ffn_up_shexp.weight", M3 "layers.1.block_sparse_moe.shared_experts.up_proj.weight", 0},
    {"minimax_m3", "blk.1.ffn_gate_inp.weight", M3 "layers.1.block_sparse_moe.gate.weight", 0},
    {"minimax_m3", "blk.2.exp_probs_b.bias", M3 "layers.2.block_sparse_moe.e_score_correction_bias", 0},
    {"minimax_m3", "output.weight", "language_model.lm_head.weight", 0},
    {"deepseek_v32", "blk.3.indexer.attn_q_b.weight", "model.layers.3.self_attn.indexer.wq_b.weight", 0},
    {"deepseek_v32", "blk.3.nextn.embed_tokens.weight", "model.layers.3.embed_tokens.weight", 0},
    {"deepseek_v32_fp8", "blk.1.indexer.k_norm.weight", "model.layers.1.self_attn.indexer.k_norm.weight", 0},
    {"glm_moe_dsa_types", "blk.0.indexer.attn_k.weight", "model.layers.0.self_attn.indexer.wk.weight", 0},
    {"glm_moe_dsa_types", "blk.3.indexer.k_norm.weight", "model.layers.3.self_attn.indexer.k_norm.weight", 0},
    {"glm_moe_dsa_types", "blk.3.indexer.k_norm.bias", "model.layers.3.self_attn.indexer.k_norm.bias", 0},
    {"glm_moe_dsa_types", "blk.5.indexer.proj.weight", "model.layers.5.self_attn.indexer.weights_proj.weight", 0},
    {"glm_moe_dsa_types", "blk.5.nextn.shared_head_norm.weight", "model.layers.5.shared_head.norm.weight", 0},
    {"inkling2_loop", "blk.0.attn_norm.weight", "model.llm.layers.0.attn_norm.weight", 0},
    {"inkling2_loop", "blk.1.attn_norm.weight", "model.llm.layers.1.q_input_norm.weight", 0},
    {"inkling2_loop", "blk.1.attn_norm_k.weight", "model.llm.layers.1.k_input_norm.weight", 0},
    {"inkling2_loop", "blk.3.attn_norm_v.weight", "model.llm.layers.3.v_input_norm.weight", 0},
    {"inkling2_loop", "blk.0.attn_q.weight", "model.llm.layers.0.attn.wq_du.weight", 0},
    {"inkling2_loop", "blk.1.attn_k.weight", "model.llm.layers.1.attn.wk_dv.weight", 0},
    {"inkling2_loop", "blk.2.attn_v.weight", "model.llm.layers.2.attn.wv_dv.weight", 0},
    {"inkling2_loop", "blk.4.attn_gate.weight", "model.llm.layers.4.attn.gate_attn.weight", 0},
    {"inkling2_loop", "blk.4.attn_output.weight", "model.llm.layers.4.attn.wo_ud.weight", 0},
    {"inkling2_loop", "blk.5.attn_rel.weight", "model.llm.layers.5.attn.wr_du.weight", 0},
    {"inkling2_loop", "blk.5.attn_sink.weight", "model.llm.layers.5.attn.attn_sink_proj.weight", 0},
    {"inkling2_loop", "blk.6.attn_q_scale.weight", "model.llm.layers.6.attn.q_l2_clip.scale", 0},
    {"inkling2_loop", "blk.6.attn_rel_scale.weight", "model.llm.layers.6.attn.rel_l2_clip.scale", 0},
    {"inkling2_loop", "blk.6.attn_rel_bias.weight", "model.llm.layers.6.attn.rel_logits_proj.proj", 0},
    {"inkling2_loop", "blk.0.attn_k_conv.weight", "model.llm.layers.0.attn.k_sconv.weight", 0},
    {"inkling2_loop", "blk.4.attn_v_conv.weight", "model.llm.layers.4.attn.v_sconv.weight", 0},
    {"inkling2_loop", "blk.1.attn_k_taps.weight", "model.llm.layers.1.attn.k_sconv.static_w", 0},
    {"inkling2_loop", "blk.3.attn_v_taps.weight", "model.llm.layers.3.attn.v_sconv.static_w", 0},
    {"inkling2_loop", "blk.3.attn_k_tap.weight", "model.llm.layers.3.attn.k_sconv.weight_proj", 0},
    {"inkling2_loop", "blk.6.attn_v_tap.weight", "model.llm.layers.6.attn.v_sconv.weight_proj", 0},
    {"inkling2_loop", "blk.2.attn_conv.weight", "model.llm.layers.2.attn_sconv.weight", 0},
    {"inkling2_loop", "blk.2.ffn_conv.weight", "model.llm.layers.2.mlp_sconv.weight", 0},
    {"inkling2_loop", "blk.1.attn_res.weight", "model.llm.attn_res.attn_queries.0", 0},
    {"inkling2_loop", "blk.6.attn_res.weight", "model.llm.attn_res.attn_queries.5", 0},
    {"inkling2_loop", "blk.0.ffn_res.weight", "model.llm.attn_res.mlp_queries.0", 0},
    {"inkling2_loop", "blk.6.ffn_res.weight", "model.llm.attn_res.mlp_queries.6", 0},
    {"inkling2_loop", "output_res.weight", "model.llm.attn_res.output_query", 0},
    {"inkling2_loop", "token_embd.weight", "model.llm.embed.weight", 0},
    {"inkling2_loop", "token_embd_norm.weight", "model.llm.embed_norm.weight", 0},
    {"inkling2_loop", "output.weight", "model.llm.unembed.weight", 0},
    {"inkling2_loop", "output_norm.weight", "model.llm.norm.weight", 0},
    {"inkling2_loop", "blk.2.loop_q_down.weight", "model.llm.layers.2.controllers.attn.down_weight", 0},
    {"inkling2_loop", "blk.3.loop_k_forget.weight", "model.llm.layers.3.controllers.k.forget_weight", 0},
    {"inkling2_loop", "blk.4.loop_v_gain.weight", "model.llm.layers.4.controllers.v.gain_weight", 0},
    {"inkling2_loop", "blk.5.loop_ffn_down.weight", "model.llm.layers.5.controllers.mlp.down_weight", 0},
    {"inkling2_loop", "blk.5.ffn_norm.weight", "model.llm.layers.5.mlp_norm.weight", 0},
    {"inkling2_loop", "blk.5.ffn_gate_inp.weight", "model.llm.layers.5.mlp.gate.weight", 0},
    {"inkling2_loop", "blk.5.exp_probs_b.bias", "model.llm.layers.5.mlp.gate.bias", 0},
    {"inkling2_loop", "blk.5.ffn_down_exps.weight", "model.llm.layers.5.mlp.experts.w2_weight", 0},
    {"kimi_linear", "blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", 0},
    {"kimi_linear", "blk.1.ssm_f_a.weight", "model.layers.1.self_attn.f_a_proj.weight", 0},
    {"kimi_linear", "blk.1.ssm_f_b.weight", "model.layers.1.self_attn.f_b_proj.weight", 0},
    {"kimi_linear", "blk.3.ssm_g_a.weight", "model.layers.3.self_attn.g_a_proj.weight", 0},
    {"kimi_linear", "blk.3.ssm_g_b.weight", "model.layers.3.self_attn.g_b_proj.weight", 0},
    {"kimi_linear", "blk.0.ssm_beta.weight", "model.layers.0.self_attn.b_proj.weight", 0},
    {"kimi_linear", "blk.0.ssm_dt.bias", "model.layers.0.self_attn.dt_bias", 0},
    {"kimi_linear", "blk.0.ssm_norm.weight", "model.layers.0.self_attn.o_norm.weight", 0},
    {"kimi_linear", "blk.0.ssm_conv1d_k.weight", "model.layers.0.self_attn.k_conv1d.weight", 0},
    {"kimi_linear", "blk.1.exp_probs_b.bias", "model.layers.1.block_sparse_moe.gate.e_score_correction_bias", 0},
    {"kimi_linear", "blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", 0},
    {"kimi_linear", "blk.1.ffn_up_shexp.weight", "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", 0},
    {"kimi_linear_nvfp4", "blk.2.ssm_conv1d_v.weight", "model.layers.2.self_attn.v_conv1d.weight", 0},
    {"kimi_k3", "blk.0.ssm_g.weight", "language_model.model.layers.0.self_attn.g_proj.weight", 0},
    {"kimi_k3", "blk.2.attn_gate.weight", "language_model.model.layers.2.self_attn.g_proj.weight", 0},
    {"kimi_k3", "blk.1.ffn_routed_norm.weight",
     "language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight", 0},
    {"kimi_k3", "blk.1.ffn_routed_down.weight",
     "language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight", 0},
    {"dots3_note", "blk.2.attn_k_norm.weight", "model.layers.2.self_attn.k_rope_only_layernorm.weight", 0},
    {"dots3_note", "blk.2.attn_gate.weight", "model.layers.2.self_attn.g_proj.weight", 0},
    {"dots3_note", "blk.3.indexer.proj.weight", "model.layers.3.self_attn.indexer.weights_proj.weight", 0},
    {"hy_v4", "blk.0.attn_sinks.weight", "model.layers.0.self_attn.learnable_sink_param", 0},
    {"hy_v4", "blk.1.attn_gate.weight", "model.layers.1.self_attn.linear_gate.weight", 0},
    {"hy_v4", "blk.1.hc_attn_fn.weight", "model.layers.1.hc_attn_layer.hc_pre.hc_fn", 0},
    {"hy_v4", "blk.2.hc_ffn_scale.weight", "model.layers.2.hc_mlp_layer.hc_pre.hc_scale", 0},
    {"hy_v4", "output_hc_base.weight", "model.hc_head.hc_head_base", 0},
    {"hy_v4", "blk.2.indexer.k_norm.bias", "model.layers.2.self_attn.indexer.k_norm.bias", 0},
    {"hy_v4", "blk.4.attn_sinks.weight", "model.mtp_layers.0.self_attn.learnable_sink_param", 0},
    {"hy_v4", "blk.4.nextn.eh_proj.weight", "model.mtp_layers.0.eh_proj.weight", 0},
    {"hy_v4", "blk.4.nextn.shared_head_norm.weight", "model.mtp_layers.0.final_layernorm.weight", 0},
    {"hunyuan_v1_moe", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.query_layernorm.weight", 0},
    {"hunyuan_v1_moe", "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.wg.weight", 0},
    {"hunyuan_v1_moe", "blk.1.ffn_up_shexp.weight", "model.layers.1.mlp.shared_mlp.up_proj.weight", 0},
    {"qwen3_vl_moe", "blk.0.attn_k_norm.weight", "model.language_model.layers.0.self_attn.k_norm.weight", 0},
    {"qwen3_vl_moe_nvfp4", "blk.0.ffn_up.weight", "model.language_model.layers.0.mlp.up_proj.weight", 0},
    {"mellum", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight", 0},
    {"mellum_nvfp4", "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", 0},
    {"deepseek_v2", "blk.0.attn_q_a.weight", "model.layers.0.self_attn.q_a_proj.weight", 0},
    {"deepseek_v2_nvfp4", "blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", 0},
    {"deepseek_v2", "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight", 0},
    {"deepseek_moe", "blk.1.ffn_up_shexp.weight", "model.layers.1.mlp.shared_experts.up_proj.weight", 0},
    {"deepseek_moe", "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", 0},
    {"bailing_moe", "output.weight", "lm_head.weight", 0},
    {"bailing_moe", "blk.0.attn_output.weight", "model.layers.0.attention.dense.weight", 0},
    {"bailing_moe", "blk.1.ffn_gate_shexp.weight", "model.layers.1.mlp.shared_experts.gate_proj.weight", 0},
    {"bailing_moe_nvfp4", "output_norm.weight", "model.norm.weight", 0},
    {"solar_open", "blk.0.post_attention_norm.weight", "model.layers.0.post_attention_layernorm.weight", 0},
    {"solar_open", "blk.1.exp_probs_b.bias", "model.layers.1.mlp.gate.e_score_correction_bias", 0},
    {"granitemoe_swa", "blk.0.attn_sinks.weight", "model.layers.0.self_attn.sinks", 0},
    {"granitemoe_swa", "blk.1.ffn_gate_inp.weight", "model.layers.1.block_sparse_moe.router.weight", 0},
    {"granitemoe_swa", "blk.1.ffn_down_exps.weight", "model.layers.1.block_sparse_moe.experts.down_proj", 0},
    {"granitemoe", "blk.0.ffn_gate_inp.weight", "model.layers.0.block_sparse_moe.router.layer.weight", 0},
    {"granitemoe", "blk.1.ffn_down_exps.weight", "model.layers.1.block_sparse_moe.output_linear.weight", 0},
    {"granitemoehybrid", "blk.0.ssm_in.weight", "model.layers.0.mamba.in_proj.weight", 0},
    {"granitemoehybrid", "blk.2.ssm_dt.bias", "model.layers.2.mamba.dt_bias", 0},
    {"granitemoehybrid", "blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight", 0},
    {"granitemoehybrid", "blk.2.ffn_down_shexp.weight", "model.layers.2.shared_mlp.output_linear.weight", 0},
    {"granitemoehybrid_dense", "blk.0.ffn_down.weight", "model.layers.0.shared_mlp.output_linear.weight", 0},
    {"bailing_moe_v2", "token_embd.weight", "model.word_embeddings.weight", 0},
    {"bailing_moe_v2", "blk.0.attn_qkv.weight", "model.layers.0.attention.query_key_value.weight", 0},
    {"bailing_moe_v2", "blk.1.attn_k_norm.weight", "model.layers.1.attention.key_layernorm.weight", 0},
    {"bailing_moe_v2", "blk.1.attn_output.weight", "model.layers.1.attention.dense.weight", 0},
    {"bailing_moe_v2", "blk.2.exp_probs_b.bias", "model.layers.2.mlp.gate.expert_bias", 0},
    {"bailing_moe_v2", "blk.3.layer_output_norm.weight", "model.layers.3.final_layernorm.weight", 0},
    {"longcat_flash", "blk.1.attn_norm.weight", "model.layers.0.input_layernorm.1.weight", 0},
    {"longcat_flash", "blk.2.ffn_norm.weight", "model.layers.1.post_attention_layernorm.0.weight", 0},
    {"longcat_flash", "blk.2.attn_output.weight", "model.layers.1.self_attn.0.o_proj.weight", 0},
    {"longcat_flash", "blk.0.ffn_down.weight", "model.layers.0.mlps.0.down_proj.weight", 0},
    {"longcat_flash", "blk.3.ffn_gate.weight", "model.layers.1.mlps.1.gate_proj.weight", 0},
    {"longcat_flash", "blk.3.ffn_gate_inp.weight", "model.layers.1.mlp.router.classifier.weight", 0},
    {"longcat_flash", "blk.1.exp_probs_b.bias", "model.layers.0.mlp.router.e_score_correction_bias", 0},
    {"arctic", "blk.0.ffn_norm_exps.weight", "model.layers.0.post_attention_layernorm.weight", 0},
    {"arctic", "blk.1.ffn_norm.weight", "model.layers.1.residual_layernorm.weight", 0},
    {"arctic_nvfp4", "blk.1.ffn_up.weight", "model.layers.1.residual_mlp.w3.weight", 0},
    {"maple", "token_embd.weight", "model.word_embeddings.weight", 0},
    {"smallthinker", "blk.0.ffn_gate_inp.weight", "model.layers.0.block_sparse_moe.primary_router.weight", 0},
    {"llama4", "blk.0.ffn_gate_inp.weight", "model.layers.0.feed_forward.router.weight", 0},
    {"llama4_nvfp4", "blk.1.ffn_up_shexp.weight", "model.layers.1.feed_forward.shared_expert.up_proj.weight", 0},
    {"lfm2_moe", "token_embd_norm.weight", "model.embedding_norm.weight", 0},
    {"lfm2_moe", "blk.0.shortconv.in_proj.weight", "model.layers.0.conv.in_proj.weight", 0},
    {"lfm2_moe", "blk.0.shortconv.conv.weight", "model.layers.0.conv.conv.weight", 0},
    {"lfm2_moe", "blk.2.shortconv.out_proj.weight", "model.layers.2.conv.out_proj.weight", 0},
    {"lfm2_moe", "blk.0.ffn_down.weight", "model.layers.0.feed_forward.w2.weight", 0},
    {"lfm2_moe", "blk.1.exp_probs_b.bias", "model.layers.1.feed_forward.expert_bias", 0},
    {"exaone_moe", "blk.1.exp_probs_b.bias", "model.layers.1.mlp.e_score_correction_bias", 0},
    {"cohere2_moe", "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", 0},
    {"cohere2_moe", "blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight", 0},
    {"cohere2_moe", "blk.2.attn_q.weight", "model.layers.2.self_attn.q_proj.weight", 0},
    {"cohere2_moe", "blk.2.ffn_down_shexp.weight", "model.layers.2.mlp.shared_experts.down_proj.weight", 0},
    {"phimoe", "output.bias", "lm_head.bias", 0},
    {"phimoe", "output_norm.bias", "model.norm.bias", 0},
    {"phimoe", "blk.0.attn_norm.bias", "model.layers.0.input_layernorm.bias", 0},
    {"phimoe", "blk.0.ffn_norm.bias", "model.layers.0.post_attention_layernorm.bias", 0},
    {"phimoe", "blk.1.attn_output.bias", "model.layers.1.self_attn.o_proj.bias", 0},
    {"phimoe", "blk.1.ffn_gate_inp.weight", "model.layers.1.block_sparse_moe.gate.weight", 0},
    {"dbrx", "token_embd.weight", "transformer.wte.weight", 0},
    {"dbrx", "output_norm.weight", "transformer.norm_f.weight", 0},
    {"dbrx", "blk.0.attn_norm.weight", "transformer.blocks.0.norm_attn_norm.norm_1.weight", 0},
    {"dbrx", "blk.0.attn_qkv.weight", "transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", 0},
    {"dbrx", "blk.1.attn_output.weight", "transformer.blocks.1.norm_attn_norm.attn.out_proj.weight", 0},
    {"dbrx", "blk.1.attn_output_norm.weight", "transformer.blocks.1.norm_attn_norm.norm_2.weight", 0},
    {"dbrx", "blk.1.ffn_gate_inp.weight", "transformer.blocks.1.ffn.router.layer.weight", 0},
    {"dbrx", "blk.1.ffn_up_exps.weight", "transformer.blocks.1.ffn.experts.mlp.v1", 0},
    {"afmoe", "blk.0.ffn_norm.weight", "model.layers.0.pre_mlp_layernorm.weight", 0},
    {"afmoe", "blk.1.post_attention_norm.weight", "model.layers.1.post_attention_layernorm.weight", 0},
    {"afmoe", "blk.1.post_ffw_norm.weight", "model.layers.1.post_mlp_layernorm.weight", 0},
    {"afmoe", "blk.2.attn_gate.weight", "model.layers.2.self_attn.gate_proj.weight", 0},
    {"afmoe", "blk.2.ffn_gate_inp.weight", "model.layers.2.mlp.router.gate.weight", 0},
    {"afmoe", "blk.3.exp_probs_b.bias", "model.layers.3.mlp.expert_bias", 0},
    {"bailing_hybrid", "token_embd.weight", "model.word_embeddings.weight", 0},
    {"bailing_hybrid", "blk.0.ssm_f_a.weight", "model.layers.0.attention.f_proj.weight", 0},
    {"bailing_hybrid", "blk.0.ssm_g_a.weight", "model.layers.0.attention.g_proj.weight", 0},
    {"bailing_hybrid", "blk.1.attn_gate.weight", "model.layers.1.attention.g_proj.weight", 0},
    {"bailing_hybrid", "blk.1.attn_output.weight", "model.layers.1.attention.dense.weight", 0},
    {"bailing_hybrid", "blk.1.exp_probs_b.bias", "model.layers.1.mlp.gate.expert_bias", 0},
    {"bailing_hybrid", "blk.4.attn_gate.weight", "model.layers.4.attention.g_proj.weight", 0},
    {"bailing_hybrid", "blk.4.layer_output_norm.weight", "model.layers.4.final_layernorm.weight", 0},
    {"glm5_next", "blk.0.ssm_f_a.weight", "model.language_model.layers.0.self_attn.f_a_proj.weight", 0},
    {"glm5_next", "blk.2.ssm_dt.bias", "model.language_model.layers.2.self_attn.dt_bias", 0},
    {"glm5_next", "blk.0.hc_attn_fn.weight", "model.language_model.layers.0.hc_attn_fn", 0},
    {"glm5_next", "blk.1.hc_ffn_base.weight", "model.language_model.layers.1.hc_ffn_base", 0},
    {"glm5_next", "blk.3.hc_ffn_scale.weight", "model.language_model.layers.3.hc_ffn_scale", 0},
    {"glm5_next", "blk.1.indexer_compressor_gate.weight",
     "model.language_model.layers.1.self_attn.indexer.index_kpool_compress_gate", 0},
    {"glm5_next", "blk.3.indexer_compressor_ape.weight",
     "model.language_model.layers.3.self_attn.indexer.index_kpool_compress_ape", 0},
    {"glm5_next", "blk.3.indexer.attn_q_b.weight", "model.language_model.layers.3.self_attn.indexer.wq_b.weight", 0},
    {"glm5_next", "blk.3.exp_probs_b.bias", "model.language_model.layers.3.mlp.gate.e_score_correction_bias", 0},
    {"glm5_next", "blk.4.nextn.eh_proj.weight", "model.language_model.layers.4.eh_proj.weight", 0},
    {"glm5_next", "blk.4.nextn.shared_head_norm.weight", "model.language_model.layers.4.shared_head.norm.weight", 0},
    {"glm5_next", "blk.4.indexer_compressor_ape.weight",
     "model.language_model.layers.4.self_attn.indexer.index_kpool_compress_ape", 0},
    {"nemotron_h", "token_embd.weight", "backbone.embeddings.weight", 0},
    {"nemotron_h", "output_norm.weight", "backbone.norm_f.weight", 0},
    {"nemotron_h", "blk.1.attn_norm.weight", "backbone.layers.1.norm.weight", 0},
    {"nemotron_h", "blk.0.ssm_in.weight", "backbone.layers.0.mixer.in_proj.weight", 0},
    {"nemotron_h", "blk.0.ssm_conv1d.weight", "backbone.layers.0.mixer.conv1d.weight", 0},
    {"nemotron_h", "blk.4.ssm_conv1d.bias", "backbone.layers.4.mixer.conv1d.bias", 0},
    {"nemotron_h", "blk.4.ssm_d", "backbone.layers.4.mixer.D", 0},
    {"nemotron_h", "blk.0.ssm_dt.bias", "backbone.layers.0.mixer.dt_bias", 0},
    {"nemotron_h", "blk.0.ssm_norm.weight", "backbone.layers.0.mixer.norm.weight", 0},
    {"nemotron_h", "blk.0.ssm_out.weight", "backbone.layers.0.mixer.out_proj.weight", 0},
    {"nemotron_h", "blk.3.ffn_up.weight", "backbone.layers.3.mixer.up_proj.weight", 0},
    {"nemotron_h", "blk.5.ffn_latent_down.weight", "backbone.layers.5.mixer.fc1_latent_proj.weight", 0},
    {"nemotron_h", "blk.5.ffn_latent_up.weight", "backbone.layers.5.mixer.fc2_latent_proj.weight", 0},
    {"nemotron_h", "blk.1.exp_probs_b.bias", "backbone.layers.1.mixer.gate.e_score_correction_bias", 0},
    {"nemotron_h", "blk.6.nextn.enorm.weight", "mtp.layers.0.enorm.weight", 0},
    {"nemotron_h", "blk.6.nextn.eh_proj.weight", "mtp.layers.0.eh_proj.weight", 0},
    {"nemotron_h", "blk.6.attn_norm.weight", "mtp.layers.0.norm.weight", 0},
    {"nemotron_h", "blk.6.attn_output.weight", "mtp.layers.0.mixer.o_proj.weight", 0},
    {"nemotron_h", "blk.6.post_attention_norm.weight", "mtp.layers.1.norm.weight", 0},
    {"nemotron_h", "blk.6.ffn_down_shexp.weight", "mtp.layers.1.mixer.shared_experts.down_proj.weight", 0},
    {"nemotron_h", "blk.6.ffn_gate_inp.weight", "mtp.layers.1.mixer.gate.weight", 0},
    {"nemotron_h", "blk.6.nextn.shared_head_norm.weight", "mtp.layers.1.final_layernorm.weight", 0},
    {"qwen4_exp", "output_hc_norm.weight", Q4 "hyper_connection_mixer.hc_norm.weight", 1},
    {"qwen4_exp", "output_hc_down.weight", Q4 "hyper_connection_mixer.input_mix_weight_down.weight", 0},
    {"qwen4_exp", "output_hc_up.weight", Q4 "hyper_connection_mixer.input_mix_weight_up.weight", 0},
    {"qwen4_exp", "blk.0.hc_attn_norm.weight", Q4 "layers.0.attn_hyper_connection.hc_norm.weight", 1},
    {"qwen4_exp", "blk.0.hc_attn_down.weight", Q4 "layers.0.attn_hyper_connection.input_mix_weight_down.weight", 0},
    {"qwen4_exp", "blk.2.hc_attn_up.weight", Q4 "layers.2.attn_hyper_connection.input_mix_weight_up.weight", 0},
    {"qwen4_exp", "blk.1.hc_attn_inject.weight", Q4 "layers.1.attn_hyper_connection.block_inject_weight.weight", 0},
    {"qwen4_exp", "blk.1.hc_ffn_norm.weight", Q4 "layers.1.mlp_hyper_connection.hc_norm.weight", 1},
    {"qwen4_exp", "blk.2.hc_ffn_inject.weight", Q4 "layers.2.mlp_hyper_connection.block_inject_weight.weight", 0},
    {"qwen4_exp", "blk.1.ple_key.weight", Q4 "layers.1.ple.key_proj.weight", 0},
    {"qwen4_exp", "blk.1.ple_value.weight", Q4 "layers.1.ple.value_proj.weight", 0},
    {"qwen4_exp", "blk.1.ple_norm_key.weight", Q4 "layers.1.ple.norm_key.weight", 1},
    {"qwen4_exp", "blk.1.ple_norm_query.weight", Q4 "layers.1.ple.norm_query.weight", 1},
    {"qwen4_exp", "blk.1.ple_norm_conv.weight", Q4 "layers.1.ple.norm_conv.weight", 1},
    {"qwen4_exp", "blk.1.ple_conv1d.weight", Q4 "layers.1.ple.conv1d.weight", 0},
    {"qwen4_exp", "blk.2.indexer.q_norm.weight", Q4 "layers.2.self_attn.indexer.q_layernorm.weight", 1},
    {"qwen4_exp", "blk.2.indexer.k_norm.weight", Q4 "layers.2.self_attn.indexer.k_layernorm.weight", 1},
    {"qwen4_exp", "blk.2.indexer.q_proj.weight", Q4 "layers.2.self_attn.indexer.index_qk_proj.weight", 0},
    {"qwen4_exp", "blk.0.ssm_norm.weight", Q4 "layers.0.linear_attn.norm.weight", 0},
    {"qwen4_exp", "blk.0.ffn_up_shexp.weight", Q4 "layers.0.mlp.shared_expert.up_proj.weight", 0},
    {"qwen4_exp", "blk.3.nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", 1},
    {"qwen4_exp", "blk.3.nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", 1},
    {"qwen4_exp", "blk.3.nextn.hc_head_norm.weight", "mtp.hyper_connection_mixer.hc_norm.weight", 1},
    {"qwen4_exp", "blk.3.nextn.hc_head_down.weight", "mtp.hyper_connection_mixer.input_mix_weight_down.weight", 0},
    {"qwen4_exp", "blk.3.nextn.hc_head_up.weight", "mtp.hyper_connection_mixer.input_mix_weight_up.weight", 0},
    {"qwen4_exp", "blk.3.hc_ffn_inject.weight", "mtp.layers.0.mlp_hyper_connection.block_inject_weight.weight", 0},
    {"qwen4_exp", "blk.3.indexer.q_norm.weight", "mtp.layers.0.self_attn.indexer.q_layernorm.weight", 1},
    {"qwen4_exp", "blk.3.attn_output.weight", "mtp.layers.0.self_attn.o_proj.weight", 0},
    {"qwen4_exp", "blk.3.ffn_gate_inp.weight", "mtp.layers.0.mlp.gate.weight", 0}};
#undef Q4

/* Catches a norm that is left as it is, and a layer or a name that is lost. */
static void test_families_prediction(void) {
    const struct converted_tensor *const c = converted_tensors;
    struct hf h = {0};
    for (size_t i = 0; i < sizeof converted_tensors / sizeof *converted_tensors; i++) {
        if (!i || strcmp(c[i].fixture, c[i - 1].fixture)) {
            if (i) hf_end(&h);
            hf_load(&h, c[i].fixture);
            if (!hf_convert(&h)) return;
        }
        const struct gguf_tensor *t = gguf_find_tensor(&h.g, c[i].to);
        if (!CHECK(t, "%s: no %s", c[i].fixture, c[i].to)) continue;
        const size_t n = t->ne[0] * t->ne[1] * t->ne[2];
        float *v = xmalloc(n * sizeof *v);
        size_t bad = 0;
        gguf_dequantize_row(t->type, t->data, v, n);
        for (size_t k = 0; k < n; k++) bad += v[k] != hf_float(&h, c[i].from, k) + c[i].more;
        CHECK(!bad, "%s: %zu values of %s differ", c[i].fixture, bad, c[i].to);
        free(v);
    }
    hf_end(&h);
}

/* The numbers that frequencies are divided by, as transformers divides them: wavelengths above L / low by `factor`,
 * those below L / high not at all, those between by something between. They are for the rotated half of a head, and 1
 * after. */
static void check_rope_freqs(const char *fixture, const char *config, double theta, size_t n, size_t head,
                             double factor, double low, double high, double original) {
    size_t count[3] = {0};
    struct hf h;
    hf_load(&h, fixture);
    hf_set(h.config, config);
    if (!hf_convert(&h)) return;
    for (size_t i = 0; i < head / 2; i++) {
        const double length = 2 * M_PI / pow(theta, -2.0 * (double)i / (double)n);
        double want = 1;
        int kind = 0;
        if (i < n / 2 && length > original / low) want = factor, kind = 1;
        else if (i < n / 2 && length >= original / high) {
            const double s = (original / length - low) / (high - low), f = (1 - s) / length / factor + s / length;
            want = 1 / length / f;
            kind = 2;
        }
        if (i < n / 2) count[kind]++;
        CHECK(fabs((double)out_f32(&h.g, "rope_freqs.weight", head / 2, i) / want - 1) < 1e-6, "%s: %zu", fixture, i);
    }
    CHECK(count[0] && count[1] && count[2], "%s: not all kinds: %zu %zu %zu", fixture, count[0], count[1], count[2]);
    hf_end(&h);
}

static void test_families_rope_freqs(void) {
    check_rope_freqs("step3p5",
                     "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":2.0,\"low_freq_factor\":1.0,"
                     "\"high_freq_factor\":32.0,\"original_max_position_embeddings\":512}}",
                     5e6, 32, 64, 2, 1, 32, 512);
    check_rope_freqs("mixtral",
                     "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
                     "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192}}",
                     1e6, 64, 64, 8, 1, 4, 8192);
}

/* Changes of a configuration that say the same in other words. */
static const struct {
    const char *fixture, *config;
} same_words[] = {
    {"step3p5",
     "{\"rope_theta\":null,\"partial_rotary_factors\":null,\"rope_scaling\":null,\"rope_parameters\":{"
     "\"full_attention\":{\"rope_type\":\"llama3\",\"rope_theta\":5e6,\"partial_rotary_factor\":0.5,"
     "\"factor\":2.0,\"low_freq_factor\":1.0,\"high_freq_factor\":32.0,\"original_max_position_embeddings\":64},"
     "\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":1e4,\"partial_rotary_factor\":1.0}}}"},
    {"minimax_m2",
     "{\"rope_theta\":null,\"rotary_dim\":null,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":"
     "5000000,\"partial_rotary_factor\":0.5}}"},
    {"minimax_m3", "{\"model_type\":\"minimax_m3\",\"hidden_act\":\"silu\",\"rotary_dim\":null}"},
    {"minimax_m3", "{\"partial_rotary_factor\":null,\"num_nextn_predict_layers\":0,\"swiglu_beta\":1.0}"},
    {"minimax_m3",
     "{\"model_type\":\"minimax_m3_vl_text\",\"partial_rotary_factor\":null,\"rope_theta\":null,\"rope_"
     "parameters\":{"
     "\"rope_type\":\"default\",\"rope_theta\":5000000,\"partial_rotary_factor\":0.5},\"moe_layer_freq\":null,"
     "\"mlp_layer_types\":[\"dense\",\"sparse\",\"sparse\"],\"sparse_attention_config\":null,\"layer_types\":["
     "\"full_attention\",\"minimax_m3_sparse\",\"minimax_m3_sparse\"],\"index_n_heads\":2,\"index_head_dim\":64,"
     "\"index_block_size\":16,\"index_topk_blocks\":3,\"index_local_blocks\":1}"},
    {"laguna", "{\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":500000.0,\"factor\":32.0,"
               "\"original_max_position_embeddings\":4096,\"beta_slow\":1.0,\"beta_fast\":64.0,\"attention_factor\":"
               "1.3465735902799727,\"partial_rotary_factor\":0.5},\"swa_rope_parameters\":{\"rope_type\":\"default\","
               "\"rope_theta\":10000.0,\"partial_rotary_factor\":1.0}}"},
    {"deepseek_v4", "{\"qk_rope_head_dim\":null,\"partial_rotary_factor\":0.25,\"topk_method\":null}"},
    {"deepseek_v4",
     "{\"num_hash_layers\":null,\"mlp_layer_types\":[\"hash_moe\",\"hash_moe\",\"hash_moe\",\"moe\",\"moe\"]}"},
    {"deepseek_v4",
     "{\"rope_scaling\":null,\"rope_theta\":null,\"compress_rope_theta\":null,\"rope_parameters\":{\"main\":{"
     "\"rope_type\":\"default\",\"rope_theta\":10000},\"compress\":{\"rope_type\":\"yarn\",\"type\":\"yarn\","
     "\"rope_theta\":160000,\"attention_factor\":1.0,\"factor\":16,\"original_max_position_embeddings\":128}}}"},
    {"deepseek_v4",
     "{\"layer_types\":[\"sliding_attention\",\"sliding_attention\",\"compressed_sparse_attention\","
     "\"heavily_compressed_attention\",\"compressed_sparse_attention\"],\"num_nextn_predict_layers\":1}"},
    {"deepseek_v4",
     "{\"compress_ratios\":null,\"layer_types\":[\"sliding_attention\",\"sliding_attention\","
     "\"compressed_sparse_attention\",\"heavily_compressed_attention\",\"compressed_sparse_attention\"]}"},
    {"deepseek_v4_pro",
     "{\"layer_types\":null,\"compress_rates\":null,\"compress_ratios\":[128,128,4,128,4],\"mlp_layer_types\":"
     "null,\"num_hash_layers\":1,\"partial_rotary_factor\":null,\"qk_rope_head_dim\":16}"},
    {"deepseek_v4_pro", "{\"rope_parameters\":null,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":16,\"beta_fast\":32,"
                        "\"beta_slow\":1,\"original_max_position_embeddings\":128}}"},
    {"nemotron_h",
     "{\"hybrid_override_pattern\":null,\"num_hidden_layers\":null,\"layers_block_type\":[\"mamba\",\"moe\","
     "\"attention\",\"mlp\",\"mamba\",\"moe\"],\"time_step_limit\":null,\"mtp_hybrid_override_pattern\":null,"
     "\"mtp_layers_block_type\":[\"attention\",\"moe\"]}"},
    {"nemotron_h",
     "{\"hybrid_override_pattern\":\"M\",\"layer_types\":[\"linear_attention\",\"moe\",\"full_attention\","
     "\"mlp\",\"linear_attention\",\"moe\"],\"mtp_layers_block_type\":[\"full_attention\",\"moe\"],"
     "\"rope_theta\":null,\"expand\":7}"},
    {"nemotron_h_nvfp4", "{\"layers_block_type\":null,\"hybrid_override_pattern\":\"MEM*E\","
                         "\"time_step_min\":1.0,\"time_step_limit\":[0.5,1]}"},
    {"qwen4_exp", "{\"layer_types\":[\"linear_attention\",\"linear_attention\",\"indexed_attention\"]}"},
    {"qwen4_exp", "{\"hc_count\":null,\"ngram_size\":null,\"ple_embed_dim\":null,\"ple_conv_kernel_size\":null,"
                  "\"norm_topk_prob\":null}"},
    {"laguna", "{\"mlp_layer_types\":null}"},
    {"laguna", "{\"mlp_layer_types\":null,\"mlp_only_layers\":null,\"gating\":\"per-head\"}"},
    {"gpt_oss", "{\"layer_types\":null,\"swiglu_limit\":null}"},
    {"gpt_oss", "{\"rope_theta\":null,\"rope_scaling\":null,\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":"
                "150000,\"factor\":32.0,\"original_max_position_embeddings\":1024,\"beta_fast\":32.0,\"beta_slow\":1.0,"
                "\"truncate\":false}}"},
    {"ernie4_5_moe", "{\"tie_word_embeddings\":null,\"moe_layer_end_index\":3}"},
    {"dots1", "{\"scoring_func\":\"sigmoid\",\"n_group\":1,\"topk_group\":1,\"sliding_window\":4096,\"max_window_"
              "layers\":3}"},
    {"dots1_nvfp4", "{\"routed_scaling_factor\":1.25,\"norm_topk_prob\":null,\"layer_types\":null}"},
    {"qwen2_moe", "{\"qkv_bias\":true}"},
    {"dots3_note", "{\"sliding_window_size\":null,\"sliding_window\":16,\"n_group\":null,\"topk_group\":null,"
                   "\"apply_mla_qkv_lora_rescale\":null,\"first_k_dense_replace\":null}"},
    {"hy_v4", "{\"n_group\":null,\"topk_group\":null,\"first_k_dense_replace\":null,\"mlp_layer_types\":null,"
              "\"norm_topk_prob\":null}"},
    {"hunyuan_v1_moe", "{\"moe_topk\":3,\"moe_intermediate_size\":null,\"num_shared_expert\":null,\"norm_topk_prob\":"
                       "null,\"max_position_embeddings\":32768,\"rope_theta\":null}"},
    {"hunyuan_v1_moe_nvfp4", "{\"moe_topk\":[2,2],\"num_shared_expert\":[1,1],\"moe_intermediate_size\":[128,128]}"},
    {"mellum", "{\"mlp_layer_types\":null,\"num_nextn_predict_layers\":0,\"num_mtp_layers\":null,\"use_sliding_"
               "window\":true}"},
    {"mellum", "{\"num_local_experts\":5,\"num_experts\":null}"},
    {"deepseek_v2_nvfp4", "{\"topk_method\":null,\"n_group\":null,\"topk_group\":null,\"scoring_func\":null,\"moe_"
                          "layer_freq\":null,\"norm_topk_prob\":null}"},
    {"deepseek_moe", "{\"scoring_func\":null,\"norm_topk_prob\":null,\"moe_layer_freq\":null,\"rope_theta\":null}"},
    {"bailing_moe", "{\"multi_gate\":null,\"norm_softmax\":null,\"first_k_dense_replace\":null,\"use_bias\":null}"},
    {"solar_open", "{\"first_k_dense_replace\":null,\"use_qk_norm\":null,\"partial_rotary_factor\":null}"},
    {"granitemoe_swa", "{\"layer_rope_theta\":null,\"no_rope_layers\":[0,1,0]}"},
    {"granitemoe", "{\"num_experts\":6,\"num_local_experts\":null,\"head_dim\":64}"},
    {"granitemoe", "{\"model_type\":\"granitemoeshared\",\"shared_intermediate_size\":0}"},
    {"granitemoehybrid", "{\"position_embedding_type\":null,\"mamba_d_head\":\"auto\",\"mamba_expand\":null,\"mamba_n_"
                         "groups\":null,\"mamba_d_conv\":null}"},
    {"granitemoehybrid_dense", "{\"num_local_experts\":null}"},
    {"bailing_moe_v2", "{\"model_type\":\"bailing_moe\",\"partial_rotary_factor\":null,\"score_function\":null,"
                       "\"moe_shared_expert_intermediate_size\":64,\"first_k_dense_replace\":null}"},
    {"sarvam_moe_nvfp4", "{\"rope_theta\":null,\"partial_rotary_factor\":1}"},
    {"llama4", "{\"attn_temperature_tuning\":4,\"attn_scale\":null,\"no_rope_layers\":[1,1,1,0,1],"
               "\"moe_layers\":[0,1,2,3,4]}"},
    {"lfm2_moe",
     "{\"tie_word_embeddings\":null,\"tie_embedding\":true,\"rope_parameters\":null,\"rope_theta\":1000000.0}"},
    {"lfm2_moe",
     "{\"tie_word_embeddings\":null,\"rope_parameters\":null,\"conv_L_cache\":null,\"num_dense_layers\":1}"},
    {"exaone_moe", "{\"is_moe_layer\":null,\"n_group\":null,\"topk_group\":null,\"first_k_dense_replace\":null,"
                   "\"sliding_window_pattern\":null,\"num_nextn_predict_layers\":1}"},
    {"exaone_moe_nvfp4", "{\"mlp_layer_types\":null}"},
    {"cohere2_moe", "{\"first_k_dense_replace\":null,\"mlp_layer_types\":[\"dense\",\"sparse\",\"sparse\"],"
                    "\"tie_word_embeddings\":null,\"norm_topk_prob\":null,\"layer_norm_eps\":null}"},
    {"cohere2_moe_nvfp4", "{\"num_key_value_heads\":1,\"expert_selection_fn\":null,\"norm_topk_prob\":false}"},
    {"phimoe_nvfp4", "{\"sliding_window\":4096,\"router_jitter_noise\":null,\"num_key_value_heads\":1}"},
    {"dbrx", "{\"num_hidden_layers\":2,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":500000}}"},
    {"afmoe", "{\"num_dense_layers\":null,\"route_norm\":null,\"score_func\":null,\"n_group\":null,\"global_attn_"
              "every_n_layers\":null}"},
    {"mimo_v2_flash", "{\"model_type\":\"mimo_v2\",\"sliding_window_size\":null,\"routed_scaling_factor\":null}"},
    {"olmoe", "{\"num_key_value_heads\":null}"},
    {"deepseek_v32",
     "{\"indexer_rope_interleave\":false,\"rope_interleave\":true,\"index_topk_freq\":1,\"head_dim\":7}"},
    {"glm_moe_dsa", "{\"indexer_types\":[\"full\",\"full\",\"full\"],\"index_topk_freq\":2}"},
    {"glm_moe_dsa", "{\"index_topk_freq\":0,\"head_dim\":192,\"indexer_rope_interleave\":null}"},
    {"glm_moe_dsa_types", "{\"indexer_types\":null}"},
    {"glm_moe_dsa_types", "{\"indexer_types\":null,\"index_topk_pattern\":\"FSSFS\",\"index_topk_freq\":1}"},
    {"glm_moe_dsa_types",
     "{\"indexer_types\":null,\"index_topk_pattern\":[\"full\",\"shared\",\"shared\",\"full\",\"shared\"]}"},
    {"glm_moe_dsa_types", "{\"index_topk_pattern\":\"FFFFF\",\"mlp_layer_types\":null}"},
    {"kimi_linear",
     "{\"linear_attn_config\":null,\"linear_head_dim\":32,\"linear_num_heads\":4,\"layer_types\":[\"linear_"
     "attention\",\"linear_attention\",\"full_attention\",\"linear_attention\"]}"},
    {"kimi_linear", "{\"first_k_dense_replace\":null,\"rope_theta\":null,\"model_max_length\":null,\"max_position_"
                    "embeddings\":4096}"},
    {"bailing_hybrid", "{\"layer_group_size\":null,\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_"
                       "attention\",\"full_attention\"],\"moe_shared_expert_intermediate_size\":null}"},
    {"bailing_hybrid", "{\"kda_lower_bound\":null,\"kda_safe_gate\":null,\"partial_rotary_factor\":null,\"rope_"
                       "parameters\":null,\"short_conv_kernel_size\":null}"},
    /* as transformers 5.24 saves it */
    {"bailing_hybrid",
     "{\"architectures\":[\"BailingHybridForCausalLM\"],\"attention_bias\":false,\"bos_token_id\":null,\"head_"
     "dim\":16,"
     "\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_attention\",\"full_attention\"],"
     "\"linear_conv_kernel_dim\":4,\"linear_head_dim\":64,\"linear_num_heads\":4,\"mlp_layer_types\":[\"dense\","
     "\"sparse\",\"sparse\",\"sparse\"],\"model_max_length\":4096,\"max_position_embeddings\":null,"
     "\"moe_renormalize\":true,\"norm_topk_prob\":null,\"num_expert_group\":4,\"n_group\":null,"
     "\"num_experts_per_token\":3,\"num_experts_per_tok\":null,\"partial_rotary_factor\":null,"
     "\"short_conv_kernel_size\":null}"},
    {"glm5_next", "{\"linear_attn_config\":{\"head_dim\":32,\"num_heads\":4}}"},
    {"glm5_next", "{\"linear_attn_config\":{\"head_dim\":32,\"num_heads\":4,\"gate_lower_bound\":null}}"},
    {"glm5_next", "{\"linear_attn_config\":null,\"linear_head_dim\":32,\"linear_num_heads\":4,\"layer_types\":["
                  "\"linear_attention\",\"full_attention\",\"linear_attention\",\"indexed_attention\"]}"},
    {"glm5_next", "{\"indexer_types\":null,\"mlp_layer_types\":[\"dense\",\"dense\",\"dense\",\"sparse\"]}"},
    {"glm5_next_nvfp4", "{\"indexer_types\":null,\"index_topk_pattern\":\"FSF\"}"}};

/* Configurations in other words that mean the same: files without a difference. Catches a form that is not read. */
static void test_families_words(void) {
    for (size_t i = 0; i < sizeof same_words / sizeof *same_words; i++) {
        struct hf h;
        char a[160], b[160];
        hf_load(&h, same_words[i].fixture);
        CHECK(!hf_convert_to(&h, "a.gguf"), "%s: %s", same_words[i].fixture, h.err);
        json_t *text = json_object_get(h.config, "text_config");
        hf_set(text ? text : h.config, same_words[i].config);
        CHECK(!hf_convert_to(&h, "b.gguf"), "%s: %s: %s", same_words[i].fixture, same_words[i].config, h.err);
        snprintf(a, sizeof a, "%s/a.gguf", h.dir);
        snprintf(b, sizeof b, "%s/b.gguf", h.dir);
        CHECK(same_bytes(a, b), "%s: %s: another file", same_words[i].fixture, same_words[i].config);
        hf_end(&h);
    }
}

/* --------------------------------------------------------------------------------------------------------- indexers */

/* The type of an output; a type that no file has where there is none. */
static uint32_t type_of(const struct gguf *g, const char *name) {
    const struct gguf_tensor *t = gguf_find_tensor(g, name);
    return t ? t->type : GGUF_TYPE_COUNT;
}

/* Which blocks have an indexer, and the types of its tensors. Catches an indexer that --backbone leaves out, or whose
 * weights of heads it quantizes. */
static void check_indexers(const char *args, uint32_t backbone) {
    static const struct {
        const char *name;
        bool matrix; /* of the backbone */
    } c[] = {{"attn_q_b.weight", true},
             {"attn_k.weight", true},
             {"proj.weight", false},
             {"k_norm.weight", false},
             {"k_norm.bias", false}};
    struct gguf g;
    if (!fixture_gguf("glm_moe_dsa_types", args, "indexers.gguf", &g)) return;
    for (int l = 0; l < 6; l++)
        for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
            char name[64];
            const bool full = l == 0 || l == 3 || l == 5;
            const uint32_t want = !full ? GGUF_TYPE_COUNT : c[i].matrix ? backbone : GGUF_F32;
            snprintf(name, sizeof name, "blk.%d.indexer.%s", l, c[i].name);
            CHECK(type_of(&g, name) == want, "%s: %s has type %u, expected %u", args, name, type_of(&g, name), want);
        }
    gguf_close(&g);
}

/* How often a layer has an indexer, where config.json says no more: every second one, but all before the offset, which
 * is 2 by default. Catches an offset by one. */
static void check_index_frequency(const char *config, const char *types) {
    static const char *const names[] = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias",
                                        "weights_proj.weight"};
    struct hf h;
    hf_load(&h, "glm_moe_dsa");
    hf_set(h.config, config);
    for (int l = 0; l < 3; l++)
        for (size_t i = 0; types[2 * l] == '0' && i < sizeof names / sizeof *names; i++) {
            char name[96];
            snprintf(name, sizeof name, "model.layers.%d.self_attn.indexer.%s", l, names[i]);
            hf_drop(&h, name);
        }
    if (!hf_convert(&h)) return;
    CHECK(!strcmp(key_text(&h.g, "glm-dsa.attention.indexer.types"), types), "%s: %s", config,
          key_text(&h.g, "glm-dsa.attention.indexer.types"));
    hf_end(&h);
}

/* The weights of an indexer's heads in forms that packs of the community have. Catches a scale that is lost. */
static void check_index_weights(enum hf_form form, uint32_t type, bool scale) {
    struct hf h;
    hf_load(&h, "deepseek_v32");
    hf_replace(&h, "model.layers.1.self_attn.indexer.weights_proj", 4, 64, form);
    if (!hf_convert(&h)) return;
    CHECK(type_of(&h.g, "blk.1.indexer.proj.weight") == type, "form %d: type %u", form,
          type_of(&h.g, "blk.1.indexer.proj.weight"));
    CHECK(!gguf_find_tensor(&h.g, "blk.1.indexer.proj.scale") == !scale, "form %d: scale", form);
    hf_end(&h);
}

/* FP8 blocks with the names of compressed-tensors, of attention and indexer alone, beside NVFP4 experts: the blocks give
 * the same file. Catches scales of blocks that only weight_scale_inv may hold, and a format that is taken from the list
 * of a release. */
static void check_index_mixed(void) {
    static const char config[] = "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
                                 "\"mixed-precision\",\"ignore\":[\"re:.*self_attn.*\",\"lm_head\"]}}";
    static const char inv[] = ".weight_scale_inv";
    char a[160], b[160], x[96];
    struct hf h;
    hf_load(&h, "deepseek_v32_fp8");
    CHECK(!hf_convert_to(&h, "a.gguf"), "%s", h.err);
    hf_set(h.config, config);
    for (size_t i = 0; i < arrlenu(h.t); i++) {
        char *end = h.t[i].name + strlen(h.t[i].name) - strlen(inv);
        if (end > h.t[i].name && !strcmp(end, inv)) end[strlen(".weight_scale")] = 0;
    }
    CHECK(!hf_convert_to(&h, "b.gguf"), "%s", h.err);
    snprintf(a, sizeof a, "%s/a.gguf", h.dir);
    snprintf(b, sizeof b, "%s/b.gguf", h.dir);
    CHECK(same_bytes(a, b), "another file");
    for (int e = 0; e < 6; e++)
        for (int p = 0; p < 3; p++) {
            static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
            snprintf(x, sizeof x, "model.layers.1.mlp.experts.%d.%s", e, part[p]);
            snprintf(a, sizeof a, "%s.weight_scale", x);
            hf_drop(&h, a);
            hf_replace(&h, x, p < 2 ? 128 : 192, p < 2 ? 192 : 128, HF_CT_NVFP4);
        }
    if (!hf_convert(&h)) return;
    CHECK(type_of(&h.g, "blk.1.ffn_up_exps.weight") == GGUF_NVFP4 &&
              type_of(&h.g, "blk.2.ffn_up_exps.weight") == GGUF_BF16 &&
              type_of(&h.g, "blk.1.indexer.attn_k.weight") == GGUF_BF16 &&
              type_of(&h.g, "blk.1.indexer.proj.weight") == GGUF_F32,
          "types of layer 1");
    hf_end(&h);
}

/* MXFP8 as ModelOpt writes it, and with MiniMax's names and declaration: E4M3 times a power of two for each 32 weights of
 * a row. Catches scales of columns, of other blocks or with another bias. */
static void test_families_mxfp8(void) {
    static const char x[] = "language_model.model.layers.1.self_attn.index_q_proj";
    enum { ROWS = 384, COLS = 128 };
    char a[160], b[160], name[128];
    struct hf h;
    hf_load(&h, "minimax_m3_nvfp4");
    if (!hf_convert(&h)) return;
    snprintf(name, sizeof name, "%s.weight", x);
    const struct hf_tensor *w = hf_find(&h, name);
    snprintf(name, sizeof name, "%s.weight_scale", x);
    const struct hf_tensor *s = hf_find(&h, name);
    float *v = out_values(&h.g, "blk.1.indexer.q_proj.weight", GGUF_BF16, COLS, ROWS, 1);
    size_t bad = 0;
    for (size_t i = 0; i < ROWS * COLS && v && CHECK(w && s, "no %s", x); i++)
        bad += v[i] != ldexpf(e4m3_to_f32(w->data[i]), s->data[i / 32] - 127);
    CHECK(v && !bad, "%zu values differ", bad);
    free(v);
    CHECK(!hf_convert_to(&h, "a.gguf"), "%s", h.err);
    for (size_t i = 0; i < arrlenu(h.t); i++) {
        char *end = strstr(h.t[i].name, ".weight_scale");
        if (!end || end[13] || strcmp(h.t[i].dtype, "U8")) continue;
        strcpy(end, ".weight_scale_inv");
        if (i % 2) strcpy(h.t[i].dtype, "F8_E8M0");
    }
    hf_set(h.config, "{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"weight_block_size\":[1,32]}}");
    CHECK(!hf_convert_to(&h, "b.gguf"), "%s", h.err);
    snprintf(a, sizeof a, "%s/a.gguf", h.dir);
    snprintf(b, sizeof b, "%s/b.gguf", h.dir);
    CHECK(same_bytes(a, b), "another file");
    hf_set(h.config, "{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"weight_block_size\":[128,128]}}");
    CHECK(hf_convert_to(&h, "b.gguf") == 1 && strstr(h.err, "weight_block_size': expected [1, 32]"), "%s", h.err);
    hf_end(&h);
}

/* A text model alone: MiniMax-M3's text_config as a whole config.json. */
static void test_families_flat(void) {
    char a[160], b[160];
    struct hf h;
    hf_load(&h, "minimax_m3");
    CHECK(!hf_convert_to(&h, "a.gguf"), "%s", h.err);
    json_t *text = json_incref(json_object_get(h.config, "text_config"));
    json_decref(h.config);
    h.config = text;
    hf_set(text, "{\"model_type\":\"minimax_m3\"}");
    for (size_t i = arrlenu(h.t); i-- > 0;)
        if (strncmp(h.t[i].name, "language_model.", 15)) arrfree(h.t[i].data), arrdel(h.t, i);
    CHECK(!hf_convert_to(&h, "b.gguf"), "%s", h.err);
    snprintf(a, sizeof a, "%s/a.gguf", h.dir);
    snprintf(b, sizeof b, "%s/b.gguf", h.dir);
    CHECK(same_bytes(a, b), "another file");
    hf_end(&h);
}

/* ------------------------------------------------------------------------------------------------------ DeepSeek-V4 */

/* MXFP4 of I8 with scales of E8M0, FP8 in blocks with such scales, and tables of ids. Catches nibbles in another order,
 * scales of other blocks, and ids that are cut or shifted. */
static void check_v4_formats(struct hf *h) {
    enum { ROWS = 256, COLS = 96 };
    const struct hf_tensor *w = hf_find(h, "layers.3.ffn.experts.5.w2.weight"),
                           *s = hf_find(h, "layers.3.ffn.experts.5.w2.scale"),
                           *ids = hf_find(h, "layers.1.ffn.gate.tid2eid");
    size_t bad = 0;
    float *v = out_values(&h->g, "blk.3.ffn_down_exps.weight", GGUF_MXFP4, 64, 128, 8);
    for (size_t i = 0; i < 128 * 64 && v && CHECK(w && s, "no experts"); i++)
        bad += v[5 * 128 * 64 + i] != ldexpf(e2m1_to_f32(w->data[i / 2] >> 4 * (i & 1) & 15), s->data[i / 32] - 127);
    CHECK(v && !bad, "MXFP4: %zu values differ", bad);
    free(v);
    w = hf_find(h, "layers.2.attn.wq_b.weight"), s = hf_find(h, "layers.2.attn.wq_b.scale");
    v = out_values(&h->g, "blk.2.attn_q_b.weight", GGUF_BF16, COLS, ROWS, 1);
    bad = 0;
    for (size_t i = 0; i < ROWS * COLS && v && CHECK(w && s, "no queries"); i++)
        bad += v[i] != ldexpf(e4m3_to_f32(w->data[i]), s->data[i / COLS / 128] - 127);
    CHECK(v && !bad, "FP8: %zu values differ", bad);
    free(v);
    const struct gguf_tensor *t = out_tensor(&h->g, "blk.1.ffn_gate_tid2eid.weight", GGUF_I32, 3, 512, 1);
    bad = 0;
    for (size_t i = 0; i < 3 * 512 && t && CHECK(ids, "no table"); i++)
        bad += gguf_rd32(t->data + 4 * i) != gguf_rd64(ids->data + 8 * i);
    CHECK(t && !bad, "%zu ids differ", bad);
}

/* e_proj and h_proj of the MTP layer, FP8 in one block each, side by side. Catches another order, rows after rows,
 * and the scale of one for both. */
static void check_v4_joined(struct hf *h, const char *args, uint32_t type) {
    enum { N = 128 };
    double off = 0, all = 0;
    char extra[320], path[256], err[ERR_MAX];
    snprintf(path, sizeof path, "%s/out.gguf", h->dir);
    snprintf(extra, sizeof extra, "-o %s %s", path, args);
    hf_shard(h, "model.safetensors", 0, arrlenu(h->t));
    gguf_close(&h->g);
    if (!CHECK(!hf_run(h, extra), "%s: %s", args, h->err)) return;
    if (!CHECK(!gguf_open(&h->g, path, err, sizeof err), "%s", err)) return;
    float *v = out_values(&h->g, "blk.5.nextn.eh_proj.weight", type, 2 * N, N, 1);
    for (int k = 0; k < 2; k++) {
        const struct hf_tensor *w = hf_find(h, k ? "mtp.0.h_proj.weight" : "mtp.0.e_proj.weight"),
                               *s = hf_find(h, k ? "mtp.0.h_proj.scale" : "mtp.0.e_proj.scale");
        for (int i = 0; i < N * N && v && CHECK(w && s, "no %d", k); i++) {
            const double want = ldexpf(e4m3_to_f32(w->data[i]), s->data[0] - 127);
            const double d = (double)v[i / N * 2 * N + k * N + i % N] - want;
            off += d * d;
            all += want * want;
        }
    }
    CHECK(v && off <= (type == GGUF_BF16 ? 0 : 1e-4) * all, "%s: squares of differences %g of %g", args, off, all);
    free(v);
}

/* fc_embedding and fc_hidden of Qwen3.8-Flash-Next's MTP layer, side by side. */
static void test_families_qwen4_joined(void) {
    enum { N = 64 };
    struct hf h;
    size_t bad = 0;
    hf_load(&h, "qwen4_exp");
    if (!hf_convert(&h)) return;
    float *v = out_values(&h.g, "blk.3.nextn.eh_proj.weight", GGUF_BF16, 2 * N, N, 1);
    for (size_t i = 0; i < 2 * N * N && v; i++) {
        const size_t row = i / (2 * N), col = i % (2 * N);
        bad += v[i] != hf_float(&h, col < N ? "mtp.fc_embedding.weight" : "mtp.fc_hidden.weight", row * N + col % N);
    }
    CHECK(v && !bad, "%zu values differ", bad);
    free(v);
    hf_end(&h);
}

/* A DSpark module in the place of the MTP layer is left out with all of its tensors, whatever the list of ratios
 * says after the last layer: the file is that of a release without either. */
static void check_v4_dspark(void) {
    static const char *const parts[] = {"mtp.0.main_proj.weight", "mtp.2.markov_head.weight",
                                        "mtp.1.confidence_head.w"};
    for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) {
        char a[160], b[160], want[96];
        struct hf h;
        int n = 1;
        hf_load(&h, "deepseek_v4");
        hf_set(h.config, "{\"compress_ratios\":[0,0,4,128,4,4]}");
        hf_plain(&h, parts[k], "[4]", 4, HF_BF16);
        for (size_t i = 0; i < arrlenu(h.t); i++)
            n += !strncmp(h.t[i].name, "mtp.", 4) && strcmp(h.t[i].name, parts[k]);
        snprintf(want, sizeof want, "%d tensors of a DSpark module are left out", n);
        CHECK(!hf_convert_to(&h, "a.gguf") && strstr(h.err, want), "%s: %s", parts[k], h.err);
        for (size_t i = arrlenu(h.t); i-- > 0;)
            if (!strncmp(h.t[i].name, "mtp.", 4)) hf_drop(&h, h.t[i].name);
        CHECK(!hf_convert_to(&h, "b.gguf") && strstr(h.err, "layer 5 for multi-token prediction, but its tensors are"),
              "%s", h.err);
        snprintf(a, sizeof a, "%s/a.gguf", h.dir);
        snprintf(b, sizeof b, "%s/b.gguf", h.dir);
        CHECK(same_bytes(a, b), "%s: another file", parts[k]);
        hf_end(&h);
    }
}

/* Makes F32 of the scales of FP8 matrices, as V4-Flash-Base has them. */
static void v4_widen_scales(struct hf *h) {
    int n = 0;
    for (size_t i = 0; i < arrlenu(h->t); i++) {
        struct hf_tensor *s = &h->t[i];
        char weight[sizeof s->name];
        const size_t stem = strlen(s->name) > 6 ? strlen(s->name) - 6 : 0;
        if (strcmp(s->name + stem, ".scale")) continue;
        snprintf(weight, sizeof weight, "%.*s.weight", (int)stem, s->name);
        const struct hf_tensor *w = hf_find(h, weight);
        if (!w || strcmp(w->dtype, "F8_E4M3")) continue;
        uint8_t *wide = NULL;
        for (size_t k = 0; k < arrlenu(s->data); k++) {
            const float v = ldexpf(1, s->data[k] - 127);
            hf_put(&wide, &v, sizeof v);
        }
        arrfree(s->data);
        s->data = wide;
        strcpy(s->dtype, "F32");
        n++;
    }
    CHECK(n > 30, "only %d scales of FP8 matrices", n);
}

/* Gives the tensors of the releases the names that transformers saves. */
static void v4_save_names(struct hf *h) {
    static const char *const names[][2] = {{"embed.weight", "model.embed_tokens.weight"},
                                           {"norm.weight", "model.norm.weight"},
                                           {"hc_head_fn", "model.hc_head.hc_fn"},
                                           {"hc_head_base", "model.hc_head.hc_base"},
                                           {"hc_head_scale", "model.hc_head.hc_scale"}};
    for (size_t i = 0; i < arrlenu(h->t); i++) {
        char was[sizeof h->t[i].name], *norm;
        snprintf(was, sizeof was, "%s", h->t[i].name);
        if (!strncmp(was, "layers.", 7)) snprintf(h->t[i].name, sizeof was, "model.%.100s", was);
        if ((norm = strstr(h->t[i].name, ".attn.kv_norm."))) strcpy(norm, ".attn.norm.weight");
        for (size_t k = 0; k < sizeof names / sizeof *names; k++)
            if (!strcmp(was, names[k][0])) strcpy(h->t[i].name, names[k][1]);
    }
}

/* The releases' names and those of transformers, tables of I64 and of I32, and layers with a table that have a bias all
 * the same, which nothing reads: one file. */
static void test_families_v4(void) {
    char a[160], b[160];
    struct hf h;
    check_v4_dspark();
    hf_load(&h, "deepseek_v4");
    struct hf_tensor *t = hf_find(&h, "layers.2.attn.wq_b.scale");
    if (!CHECK(t, "no scale")) return;
    t->data[1] = (uint8_t)(t->data[0] + 1); /* blocks that differ */
    if (!hf_convert(&h)) return;
    check_v4_formats(&h);
    t = hf_find(&h, "mtp.0.h_proj.scale");
    if (!CHECK(t, "no h_proj")) return;
    t->data[0]++;
    check_v4_joined(&h, "", GGUF_BF16);
    check_v4_joined(&h, "--backbone q8_0", GGUF_Q8_0);
    CHECK(!hf_convert_to(&h, "a.gguf"), "%s", h.err);
    snprintf(a, sizeof a, "%s/a.gguf", h.dir);
    snprintf(b, sizeof b, "%s/b.gguf", h.dir);
    v4_widen_scales(&h);
    CHECK(!hf_convert_to(&h, "b.gguf"), "%s", h.err);
    CHECK(same_bytes(a, b), "another file of scales in F32");
    v4_save_names(&h);
    hf_plain(&h, "model.layers.0.ffn.gate.bias", "[8]", 8, HF_F32);
    for (size_t i = 0; i < arrlenu(h.t); i++) {
        if (!strstr(h.t[i].name, "tid2eid")) continue;
        const size_t n = arrlenu(h.t[i].data) / 8;
        for (size_t k = 0; k < n; k++) memmove(h.t[i].data + 4 * k, h.t[i].data + 8 * k, 4);
        arrsetlen(h.t[i].data, 4 * n);
        strcpy(h.t[i].dtype, "I32");
    }
    CHECK(!hf_convert_to(&h, "b.gguf"), "%s", h.err);
    CHECK(same_bytes(a, b), "another file");
    t = hf_find(&h, "model.layers.2.ffn.gate.tid2eid");
    if (!CHECK(t, "no table")) return;
    memcpy(t->data + 16, t->data + 12, 4);
    const int rc = hf_convert_to(&h, "b.gguf");
    CHECK(rc == 1 && strstr(h.err, "token 1 has expert ") && strstr(h.err, " twice"), "exit %d: %s", rc, h.err);
    memcpy(t->data + 16, &(int32_t){-1}, 4);
    CHECK(hf_convert_to(&h, "b.gguf") == 1 && strstr(h.err, "token 1 has expert -1;"), "%s", h.err);
    hf_end(&h);
}

static void test_families_indexer(void) {
    check_index_mixed();
    check_indexers("", GGUF_BF16);
    check_indexers("--backbone q8_0", GGUF_Q8_0);
    check_indexers("--quantize nvfp4", GGUF_BF16);
    check_index_frequency("{\"index_topk_freq\":2}", "1,1,0");
    check_index_frequency("{\"index_topk_freq\":2,\"index_skip_topk_offset\":1}", "1,0,1");
    check_index_frequency("{\"index_topk_freq\":3,\"index_skip_topk_offset\":1}", "1,0,0");
    check_index_frequency("{\"index_topk_freq\":4,\"index_skip_topk_offset\":3}", "1,1,1");
    check_index_weights(HF_F32, GGUF_F32, false);
    check_index_weights(HF_NVFP4, GGUF_NVFP4, true);
    check_index_weights(HF_FP8_TENSOR, GGUF_BF16, true);
    check_index_weights(HF_FP8_BLOCK, GGUF_BF16, false);
}

/* Parts of releases that are left out on purpose: what reads pictures and sound, and ERNIE's layers for multi-token
 * prediction. Catches that they are taken for unknown tensors, or left out without a word. */
static void test_families_left_out(void) {
    static const struct {
        const char *fixture, *config, *tensor, *message;
    } c[] = {
        {"ernie4_5_moe", "{}", "model.mtp_block.0.mlp.up_proj.weight", "1 tensors for multi-token prediction"},
        {"ernie4_5_moe", "{}", "model.mtp_linear_proj.0.weight", "1 tensors for multi-token prediction"},
        {"deepseek_v4", "{}", "mtp.0.emb.tok_emb.weight", "1 copy of the model's embedding or output matrix in layers"},
        {"deepseek_v4", "{}", "mtp.0.head.weight", "1 copy of the model's embedding or output matrix in layers"},
        {"minimax_m3", "{}", "language_model.mtp.layers.0.eh_proj.weight", "1 tensors for multi-token prediction"},
        {"minimax_m3", "{}", "language_model.model.mtp.0.norm.weight", "1 tensors for multi-token prediction"},
        {"minimax_m3", "{}", "patch_merge_mlp.linear_3.weight", "20 tensors that read pictures or sound"},
        {"mimo_v2_flash", "{\"vision_config\":{}}", "visual.blocks.0.norm1.weight",
         "1 tensors that read pictures or sound"},
        {"nemotron_h", "{\"mtp_hybrid_override_pattern\":\"**E\"}", "mtp.layers.2.norm.weight",
         "layer 6 for multi-token prediction is left out, 33 tensors: moe runs such layers of attention, then experts"},
        {"nemotron_h", "{\"mtp_layers_block_type\":[\"moe\"]}", "mtp.x.weight",
         "layer 6 for multi-token prediction is left out, 33 tensors: moe runs such layers of attention, then experts"},
        {"nemotron_h", "{\"num_nextn_predict_layers\":2}", "backbone.layers.0.mixer.x.k_scale",
         "config.json announces layer 7 for multi-token prediction, but its tensors are missing: it is left out"},
        {"dots3_note", "{\"vision_config\":{}}", "vision_encoder.x.weight", "1 tensors that read pictures or sound"},
        {"dots3_note", "{}", "model.layers.4.mlp.up_proj.weight",
         "layer 4 for multi-token prediction is left out, 2 tensors: moe has no reference for it"},
        {"longcat_flash", "{}", "model.mtp.norm.weight",
         "layer 4 for multi-token prediction is left out, 3 tensors: moe has no reference for it"},
        {"mimo_v2_flash", "{\"audio_config\":{}}", "audio_encoder.x.weight", "1 tensors that read pictures or sound"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        hf_load(&h, c[i].fixture);
        hf_set(h.config, c[i].config);
        hf_plain(&h, c[i].tensor, "[4]", 4, HF_BF16);
        CHECK(!hf_convert_to(&h, "out.gguf") && strstr(h.err, c[i].message), "%s: %s", c[i].tensor, h.err);
        hf_end(&h);
    }
}

/* --------------------------------------------------------------------------------------------------- pruned models */

/* Numbers of experts that differ between layers, in each form that pruned releases say them. */
static void test_families_counts(void) {
    static const struct {
        const char *config, *message; /* message NULL: it converts */
    } c[] = {
        {"{\"num_experts\":6}", NULL},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"dense\",\"config_groups\":"
         "{},\"moe_sparsity_config\":{\"method\":\"prune\",\"num_experts\":[4,3]}}}",
         NULL},
        {"{\"per_layer_num_experts\":[4,3]}", NULL},
        {"{\"num_experts\":[4,3]}", NULL},
        {"{\"quantization_config\":{\"moe_sparsity_config\":{\"method\":\"novice\",\"num_experts\":[4,3]}}}",
         "key 'moe_sparsity_config.method': expected \"prune\", found \"novice\""},
        {"{\"quantization_config\":{\"moe_sparsity_config\":{\"method\":\"prune\",\"num_experts\":[4,4]}}}",
         "key 'moe_sparsity_config.num_experts': expected 3 experts for layer 1, as its tensors have, found 4"},
        {"{\"quantization_config\":{\"moe_sparsity_config\":{\"method\":\"prune\",\"num_experts\":[4,null]}}}",
         "expected 3 experts for layer 1, as its tensors have, found null"},
        {"{\"per_layer_num_experts\":[4]}",
         "key 'per_layer_num_experts': expected 3 experts for layer 1, as its tensors have, found the end"},
        {"{\"num_experts\":[3,3]}", "layer 0 has 4 experts; expected from num_experts_per_tok = 2 to the 3"},
        {"{\"num_experts\":[4,\"3\"]}", "key 'num_experts': expected numbers up to"},
        {"{\"num_experts\":[]}", "key 'num_experts': expected an integer from 1 to"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        hf_begin(&h, "counts");
        h.n_experts[1] = 3;
        hf_qwen3(&h);
        hf_set(h.config, c[i].config);
        const int rc = hf_convert_to(&h, "out.gguf");
        if (c[i].message) CHECK(rc == 1 && strstr(h.err, c[i].message), "%s: %s", c[i].config, h.err);
        else if (hf_convert(&h)) {
            CHECK(!strcmp(key_text(&h.g, "qwen3moe.expert_count_per_layer"), "4,3"), "%s", c[i].config);
            CHECK(!strcmp(key_text(&h.g, "moe.reap.pruned"), "1"), "%s: not marked as pruned", c[i].config);
            CHECK(key_int(&h.g, "qwen3moe.expert_count") == 4, "%s", c[i].config);
        }
        hf_end(&h);
    }
}

/* A model whose layers have lost as many experts each is pruned, too. */
static void test_families_even_counts(void) {
    static const char *const config[] = {"{\"quantization_config\":{\"moe_sparsity_config\":{\"num_experts\":[4,4]}}}",
                                         "{\"per_layer_num_experts\":[4,4]}", "{\"num_experts\":[4,4]}", "{}"};
    for (int i = 0; i < 4; i++) {
        struct hf h;
        hf_begin(&h, "even");
        hf_qwen3(&h);
        hf_set(h.config, config[i]);
        if (hf_convert(&h)) CHECK(!strcmp(key_text(&h.g, "moe.reap.pruned"), i < 3 ? "1" : ""), "%s", config[i]);
        hf_end(&h);
    }
}

/* --------------------------------------------------------------------------------------------------------- refusals */

/* What cannot be converted faithfully: one line that names it. `tensor` is dropped, gets another `shape` or, with a
 * `byte` above 0, that as its third byte; where the release lacks it, it is added. */
static const struct family_refusal {
    const char *fixture, *message, *config, *tensor, *shape;
    int byte;
} family_refusals[] = {
    {"deepseek_v4", "key 'compress_ratios': expected 0, 4 or 128 for each of 5 layers",
     "{\"compress_ratios\":[0,0,4,8,4]}", NULL, NULL, 0},
    {"deepseek_v4", "key 'compress_ratios': expected 0, 4 or 128 for each of 5 layers",
     "{\"compress_ratios\":[0,0,4,128]}", NULL, NULL, 0},
    {"deepseek_v4", "key 'compress_ratios': expected 0, 4 or 128 for each of 5 layers",
     "{\"compress_ratios\":[0,0,4,128,\"4\"]}", NULL, NULL, 0},
    {"deepseek_v4", "key 'compress_ratios': expected 0, 4 or 128 for each of 5 layers, found none",
     "{\"compress_ratios\":null}", NULL, NULL, 0},
    {"deepseek_v4", "key 'layer_types': expected what compress_ratios says",
     "{\"layer_types\":[\"sliding_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\","
     "\"sliding_attention\"]}",
     NULL, NULL, 0},
    {"deepseek_v4_pro", "key 'layer_types': expected \"sliding_attention\", \"compressed_sparse_attention\" or",
     "{\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\"]"
     "}",
     NULL, NULL, 0},
    {"deepseek_v4_pro",
     "key 'compress_rates.compressed_sparse_attention': expected 4 (GGUF files have no other number), found 8",
     "{\"compress_rates\":{\"compressed_sparse_attention\":8}}", NULL, NULL, 0},
    {"deepseek_v4_pro", "key 'compress_rates.heavily_compressed_attention': expected 128",
     "{\"compress_rates\":{\"heavily_compressed_attention\":64}}", NULL, NULL, 0},
    {"deepseek_v4_pro", "key 'mlp_layer_types': expected \"hash_moe\" layers, then \"moe\" ones",
     "{\"mlp_layer_types\":[\"moe\",\"hash_moe\",\"moe\",\"moe\",\"moe\"]}", NULL, NULL, 0},
    {"deepseek_v4_pro", "key 'mlp_layer_types': expected 5 layers", "{\"mlp_layer_types\":[\"hash_moe\"]}", NULL, NULL,
     0},
    {"deepseek_v4_pro", "key 'num_hash_layers': expected 1 as in mlp_layer_types, found 2", "{\"num_hash_layers\":2}",
     NULL, NULL, 0},
    {"deepseek_v4", "key 'num_hash_layers': expected an integer from 0 to 5", "{\"num_hash_layers\":6}", NULL, NULL, 0},
    {"deepseek_v4", "key 'num_hash_layers': expected an integer from 0 to 5", "{\"num_hash_layers\":null}", NULL, NULL,
     0},
    {"deepseek_v4", "key 'o_groups': expected a divisor of the 4 heads, found 3", "{\"o_groups\":3}", NULL, NULL, 0},
    {"deepseek_v4", "key 'num_key_value_heads': expected 1, found 2", "{\"num_key_value_heads\":2}", NULL, NULL, 0},
    {"deepseek_v4", "key 'hc_mult': expected an integer from 1 to 8", "{\"hc_mult\":9}", NULL, NULL, 0},
    {"deepseek_v4", "key 'hc_sinkhorn_iters': expected an integer from 1", "{\"hc_sinkhorn_iters\":0}", NULL, NULL, 0},
    {"deepseek_v4", "key 'hc_eps': expected", "{\"hc_eps\":null}", NULL, NULL, 0},
    {"deepseek_v4", "key 'swiglu_limit': expected a number", "{\"swiglu_limit\":null}", NULL, NULL, 0},
    {"deepseek_v4", "key 'scoring_func': expected \"sqrtsoftplus\"", "{\"scoring_func\":\"sigmoid\"}", NULL, NULL, 0},
    {"deepseek_v4", "key 'topk_method': expected \"noaux_tc\"", "{\"topk_method\":\"greedy\"}", NULL, NULL, 0},
    {"deepseek_v4", "key 'norm_topk_prob': expected true", "{\"norm_topk_prob\":false}", NULL, NULL, 0},
    {"deepseek_v4", "key 'n_shared_experts': expected 1, found 2", "{\"n_shared_experts\":2}", NULL, NULL, 0},
    {"deepseek_v4", "key 'tie_word_embeddings': expected false", "{\"tie_word_embeddings\":true}", NULL, NULL, 0},
    {"deepseek_v4", "key 'index_head_dim': expected at least the 16 rotated values of a head", "{\"index_head_dim\":8}",
     NULL, NULL, 0},
    {"deepseek_v4", "key 'rope_scaling.attention_factor': expected 1",
     "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":16,\"original_max_position_embeddings\":128,\"attention_factor\":"
     "1.2}}",
     NULL, NULL, 0},
    {"deepseek_v4", "key 'rope_scaling.mscale': expected none",
     "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":16,\"original_max_position_embeddings\":128,\"mscale\":1}}", NULL,
     NULL, 0},
    {"deepseek_v4", "key 'rope_scaling.type': expected \"default\" or \"yarn\"",
     "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":16}}", NULL, NULL, 0},
    {"deepseek_v4", "key 'qk_rope_head_dim': expected head_dim x partial_rotary_factor",
     "{\"partial_rotary_factor\":0.5}", NULL, NULL, 0},
    {"deepseek_v4", "key 'compress_rope_theta': expected", "{\"compress_rope_theta\":null}", NULL, NULL, 0},
    {"deepseek_v4_pro", "rope_type': expected \"default\"",
     "{\"rope_parameters\":{\"main\":{\"rope_type\":\"yarn\",\"rope_theta\":10000},\"compress\":{\"rope_type\":"
     "\"default\",\"rope_theta\":160000}}}",
     NULL, NULL, 0},
    {"deepseek_v4", "tid2eid': expected [512, 3] (vocab_size, num_experts_per_tok), found I64 [3, 512]", NULL,
     "layers.0.ffn.gate.tid2eid", "[3,512]", 0},
    {"deepseek_v4", "; the layer has experts 0 to 7", NULL, "layers.1.ffn.gate.tid2eid", NULL, 0xff},
    {"deepseek_v4", "tensor 'layers.2.ffn.gate.tid2eid' is missing", NULL, "layers.2.ffn.gate.tid2eid", NULL, 0},
    {"deepseek_v4", "tensor 'layers.3.ffn.gate.tid2eid': BF16 [4]: nothing in deepseek4 uses it", NULL,
     "layers.3.ffn.gate.tid2eid", NULL, 0},
    {"deepseek_v4", "tensor 'layers.3.ffn.gate.bias' is missing", NULL, "layers.3.ffn.gate.bias", NULL, 0},
    {"deepseek_v4", "FP8 weights, but neither 'layers.1.attn.wq_a.weight_scale_inv'", NULL, "layers.1.attn.wq_a.scale",
     NULL, 0},
    {"deepseek_v4", "weights of the form I8 [64, 64] are not supported", NULL, "layers.0.ffn.experts.2.w1.scale", NULL,
     0},
    {"deepseek_v4", "indexer.wq_b.scale': block 2: the scale byte ff is not a number", NULL,
     "layers.2.attn.indexer.wq_b.scale", NULL, 0xff},
    {"deepseek_v4", "w3.scale': row 0, block 2: the scale byte ff is not a number", NULL,
     "layers.4.ffn.experts.7.w3.scale", NULL, 0xff},
    {"deepseek_v4", "wq_a.weight': expected [96, 128] (q_lora_rank, hidden_size), found F8_E4M3 [128, 96]", NULL,
     "layers.0.attn.wq_a.weight", "[128,96]", 0},
    {"deepseek_v4", "tensor 'layers.3.attn.compressor.ape' is missing", NULL, "layers.3.attn.compressor.ape", NULL, 0},
    {"deepseek_v4", "compressor.ape': expected [4, 128] (tokens of a compressed key, 2 head_dim), found F32 [128, 4]",
     NULL, "layers.2.attn.compressor.ape", "[128,4]", 0},
    {"deepseek_v4", "tensor 'layers.3.attn.indexer.wq_b.weight': BF16 [4]: nothing in deepseek4 uses it", NULL,
     "layers.3.attn.indexer.wq_b.weight", NULL, 0},
    {"deepseek_v4",
     "hc_attn_fn': expected [24, 512] ((2 + hc_mult) hc_mult, hc_mult x hidden_size), found F32 [512, 24]", NULL,
     "layers.0.hc_attn_fn", "[512,24]", 0},
    {"deepseek_v4", "tensor 'hc_head_scale' is missing", NULL, "hc_head_scale", NULL, 0},
    {"deepseek_v4", "tensor 'mtp.0.h_proj.weight' is missing", NULL, "mtp.0.h_proj.weight", NULL, 0},
    {"deepseek_v4", "tensor 'mtp.0.hc_head_base' is missing", NULL, "mtp.0.hc_head_base", NULL, 0},
    {"deepseek_v4", "tensor 'mtp.0.enorm.weight' is missing", NULL, "mtp.0.enorm.weight", NULL, 0},
    {"deepseek_v4", "tensor 'mtp.0.norm.weight' is missing", NULL, "mtp.0.norm.weight", NULL, 0},
    {"deepseek_v4", "tensor 'layers.4.ffn.gate.bias' is missing", NULL, "layers.4.ffn.gate.bias", NULL, 0},
    {"deepseek_v4", "hc_head_fn': expected [4, 512] (hc_mult, hc_mult x hidden_size), found F32 [512, 4]", NULL,
     "hc_head_fn", "[512,4]", 0},
    {"deepseek_v4", "tensor 'mtp.0.ffn.gate.tid2eid': BF16 [4]: nothing in deepseek4 uses it", NULL,
     "mtp.0.ffn.gate.tid2eid", NULL, 0},
    {"deepseek_v4", "is out of range: num_hidden_layers is 5, num_nextn_predict_layers 0",
     "{\"num_nextn_predict_layers\":0}", NULL, NULL, 0},
    {"deepseek_v4", "layer 6 is out of range: num_hidden_layers is 5, num_nextn_predict_layers 1", NULL,
     "mtp.1.enorm.weight", NULL, 0},
    {"deepseek_v4", "key 'compress_ratios': expected 0 for layer 5, which is for multi-token prediction",
     "{\"compress_ratios\":[0,0,4,128,4,4]}", NULL, NULL, 0},
    {"deepseek_v4_pro", "tensor 'model.hc_head.hc_base' is missing", NULL, "model.hc_head.hc_base", NULL, 0},
    {"gpt_oss", "key 'swiglu_limit': expected 7, found 6", "{\"swiglu_limit\":6}", NULL, NULL, 0},
    {"gpt_oss", "key 'swiglu_alpha': expected 1.702, found 1", "{\"swiglu_alpha\":1}", NULL, NULL, 0},
    {"gpt_oss", "key 'attention_bias': expected true", "{\"attention_bias\":false}", NULL, NULL, 0},
    {"gpt_oss", "key 'rope_scaling.truncate': expected false, found none",
     "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":32,\"original_max_position_embeddings\":1024}}", NULL, NULL,
     0},
    {"gpt_oss", "key 'layer_types': expected 3 layers", "{\"layer_types\":[\"full_attention\"]}", NULL, NULL, 0},
    {"gpt_oss", "key 'layer_types': expected \"full_attention\" and \"sliding_attention\"",
     "{\"layer_types\":[\"full_attention\",\"linear_attention\",\"full_attention\"]}", NULL, NULL, 0},
    {"gpt_oss", "key 'sliding_window': expected a number above 0, found none", "{\"sliding_window\":null}", NULL, NULL,
     0},
    {"gpt_oss", "key 'sliding_window': expected a number above 0", "{\"sliding_window\":0}", NULL, NULL, 0},
    {"gpt_oss", "MXFP4 codes, but 'model.layers.0.mlp.experts.gate_up_proj_scales' is missing", NULL,
     "model.layers.0.mlp.experts.gate_up_proj_scales", NULL, 0},
    {"gpt_oss", "tensor 'model.layers.1.mlp.experts.down_proj_bias' is missing", NULL,
     "model.layers.1.mlp.experts.down_proj_bias", NULL, 0},
    {"gpt_oss", "tensor 'model.layers.1.self_attn.sinks' is missing", NULL, "model.layers.1.self_attn.sinks", NULL, 0},
    {"gpt_oss", "tensor 'model.layers.1.mlp.router.bias' is missing", NULL, "model.layers.1.mlp.router.bias", NULL, 0},
    {"gpt_oss", "gate_up_proj_blocks': expected U8 [8, 128, 2, 16], found U8 [8, 64, 4, 16]", NULL,
     "model.layers.0.mlp.experts.gate_up_proj_blocks", "[8,64,4,16]", 0},
    {"gpt_oss", "gate_up_proj_blocks': expected U8 [8, 128, 2, 16], found U8 [8, 128, 32]", NULL,
     "model.layers.0.mlp.experts.gate_up_proj_blocks", "[8,128,32]", 0},
    {"gpt_oss", "down_proj_scales': expected U8 [8, 64, 2], one scale per 32 weights, found U8 [8, 2, 64]", NULL,
     "model.layers.0.mlp.experts.down_proj_scales", "[8,2,64]", 0},
    {"gpt_oss", "down_proj_scales': row 1, block 0: the scale byte ff is not a number", NULL,
     "model.layers.0.mlp.experts.down_proj_scales", NULL, 0xff},
    {"gpt_oss", "gate_up_proj_bias': expected [8, 128] (the layer's experts, 2 intermediate_size), found BF16 [4, 256]",
     NULL, "model.layers.2.mlp.experts.gate_up_proj_bias", "[4,256]", 0},
    {"gpt_oss", "expected U8 [8, 96, 2, 16], found U8 [8, 128, 2, 16]", "{\"intermediate_size\":48}", NULL, NULL, 0},
    {"gpt_oss_bf16", "gate_up_proj': expected BF16 [4, 64, 256], found BF16 [4, 256, 64]", NULL,
     "model.layers.0.mlp.experts.gate_up_proj", "[4,256,64]", 0},
    {"minimax_m2", "key 'use_qk_norm': expected true", "{\"use_qk_norm\":false}", NULL, NULL, 0},
    {"minimax_m2", "key 'qk_norm_type': expected \"per_layer\"", "{\"qk_norm_type\":\"per_head\"}", NULL, NULL, 0},
    {"minimax_m2", "key 'attn_type_list': expected 1 for every layer", "{\"attn_type_list\":[1,0]}", NULL, NULL, 0},
    {"minimax_m2", "key 'scoring_func': expected \"sigmoid\"", "{\"scoring_func\":\"softmax\"}", NULL, NULL, 0},
    {"minimax_m2", "key 'use_routing_bias': expected true", "{\"use_routing_bias\":false}", NULL, NULL, 0},
    {"minimax_m2", "key 'shared_intermediate_size': expected 0", "{\"shared_intermediate_size\":64}", NULL, NULL, 0},
    {"minimax_m2", "key 'rotary_dim': expected an integer from 2 to 64", "{\"rotary_dim\":128}", NULL, NULL, 0},
    {"minimax_m2", "a share of head_dim that is an even number", "{\"rotary_dim\":3}", NULL, NULL, 0},
    {"minimax_m2", "q_norm.weight': expected [256] (num_attention_heads x head_dim), found BF16 [64, 4]", NULL,
     "model.layers.0.self_attn.q_norm.weight", "[64,4]", 0},
    {"minimax_m3", "key 'text_config.use_gemma_norm': expected true", "{\"use_gemma_norm\":false}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.qk_norm_type': expected \"per_head\"", "{\"qk_norm_type\":\"per_layer\"}", NULL,
     NULL, 0},
    {"minimax_m3", "key 'text_config.use_qk_norm': expected true", "{\"use_qk_norm\":false}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.attention_output_gate': expected false", "{\"attention_output_gate\":true}", NULL,
     NULL, 0},
    {"minimax_m3", "key 'text_config.use_routing_bias': expected true", "{\"use_routing_bias\":false}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.scoring_func': expected \"sigmoid\"", "{\"scoring_func\":\"softmax\"}", NULL, NULL,
     0},
    {"minimax_m3", "key 'text_config.hidden_act': expected \"silu\" or \"swigluoai\"", "{\"hidden_act\":\"gelu\"}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.swiglu_limit': expected 7", "{\"swiglu_limit\":10}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.swiglu_alpha': expected 1.702", "{\"swiglu_alpha\":1}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.swiglu_beta': expected 1", "{\"swiglu_beta\":0}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.n_shared_experts': expected 1, found 2", "{\"n_shared_experts\":2}", NULL, NULL,
     0},
    {"minimax_m3", "key 'text_config.rotary_dim': expected head_dim x partial_rotary_factor", "{\"rotary_dim\":16}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.moe_layer_freq': expected 0 or 1 for each of 3 layers",
     "{\"moe_layer_freq\":[0,1]}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.mlp_layer_types': expected 3 times \"dense\" or \"sparse\"",
     "{\"mlp_layer_types\":[\"dense\",\"sparse\"]}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.layer_types': expected 3 times \"full_attention\" or \"minimax_m3_sparse\"",
     "{\"layer_types\":[\"full_attention\",\"sparse\",\"sparse\"]}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.model_type': expected ", "{\"model_type\":\"minimax_m2\"}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.dense_intermediate_size': expected an integer",
     "{\"dense_intermediate_size\":null}", NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.index_n_heads': expected an integer from 1", "{\"sparse_attention_config\":null}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'text_config.num_key_value_heads': expected 2, as the indexer has heads",
     "{\"num_key_value_heads\":1}", NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.sparse_score_type': expected \"max\"",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":1,\"sparse_score_type\":"
     "\"sum\"}}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.use_sparse_attention': expected true",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":1,\"use_sparse_attention\":"
     "false}}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.sparse_init_block': expected 0",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":1,\"sparse_init_block\":1}}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.sparse_local_block': expected an integer from 1 to 3",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":4}}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.sparse_local_block': expected an integer from 1 to 3",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":0}}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.sparse_attention_freq': expected 0 or 1 for each of 3 layers",
     "{\"sparse_attention_config\":{\"sparse_num_index_heads\":2,\"sparse_index_dim\":64,\"sparse_block_size\":16,"
     "\"sparse_topk_blocks\":3,\"sparse_local_block\":1}}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.sparse_disable_index_value': expected 1 for layer 2",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":1,\"sparse_disable_index_"
     "value\":[0,1,0]}}",
     NULL, NULL, 0},
    {"minimax_m3", "key 'sparse_attention_config.sparse_block_size': expected a power of two",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":24,\"sparse_topk_blocks\":3,\"sparse_local_block\":1}}",
     NULL, NULL, 0},
    {"minimax_m3",
     "index_q_proj.weight': expected [64, 64] (heads x width of the indexer, hidden_size), found BF16 [128, 64]",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,1,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":32,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":1}}",
     NULL, NULL, 0},
    {"minimax_m3", "index_k_norm.weight': BF16 [64]: nothing in minimax-m3 uses it",
     "{\"sparse_attention_config\":{\"sparse_attention_freq\":[0,0,1],\"sparse_num_index_heads\":2,\"sparse_index_"
     "dim\":64,\"sparse_block_size\":16,\"sparse_topk_blocks\":3,\"sparse_local_block\":1}}",
     NULL, NULL, 0},
    {"minimax_m3", "tensor 'language_model.model.layers.1.self_attn.index_q_norm.weight' is missing", NULL,
     "language_model.model.layers.1.self_attn.index_q_norm.weight", NULL, 0},
    {"minimax_m3_nvfp4",
     "q_proj.weight_scale': expected U8 [384, 4], one scale per 32 weights in row order, found U8 [4, 384]", NULL,
     "language_model.model.layers.0.self_attn.q_proj.weight_scale", "[4,384]", 0},
    {"minimax_m3_nvfp4", "q_proj.weight_scale': row 0, block 2: the scale byte ff is not a number", NULL,
     "language_model.model.layers.0.self_attn.q_proj.weight_scale", NULL, 0xff},
    {"minimax_m3_nvfp4",
     "FP8 weights, but neither 'language_model.model.layers.1.self_attn.index_k_proj.weight_scale_inv'", NULL,
     "language_model.model.layers.1.self_attn.index_k_proj.weight_scale", NULL, 0},
    {"minimax_m2_fp8", "one per 128 x 128 block [2, 1], found F32 [1, 2]", NULL,
     "model.layers.0.self_attn.k_proj.weight_scale_inv", "[1,2]", 0},
    {"mixtral",
     "key 'sliding_window': expected none or the whole context (GGUF files of llama cannot have windows), found 64",
     "{\"sliding_window\":64}", NULL, NULL, 0},
    {"mixtral", "key 'head_dim': expected an even number", "{\"head_dim\":63}", NULL, NULL, 0},
    {"mixtral", "layer 0 has 1 experts; expected from num_experts_per_tok = 2", NULL,
     "model.layers.0.block_sparse_moe.experts.1.w1.weight", NULL, 0},
    {"mixtral", "tensor 'model.layers.1.block_sparse_moe.experts.3.w3.weight' is missing", NULL,
     "model.layers.1.block_sparse_moe.experts.3.w3.weight", NULL, 0},
    {"mixtral", "low_freq_factor': expected a number above 0, at most high_freq_factor",
     "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":1,"
     "\"original_max_position_embeddings\":64}}",
     NULL, NULL, 0},
    {"mixtral_nvfp4", "'model.layers.0.block_sparse_moe.experts.1.w2.weight_scale_2' is missing", NULL,
     "model.layers.0.block_sparse_moe.experts.1.w2.weight_scale_2", NULL, 0},
    {"olmoe", "key 'clip_qkv': expected none, found 8", "{\"clip_qkv\":8}", NULL, NULL, 0},
    {"olmoe", "key 'rope_scaling.rope_type': expected \"default\" or \"yarn\"",
     "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}}", NULL, NULL, 0},
    {"qwen2_moe", "key 'use_sliding_window': expected false", "{\"use_sliding_window\":true}", NULL, NULL, 0},
    {"qwen2_moe", "nothing in qwen2moe uses it", "{\"qkv_bias\":false}", NULL, NULL, 0},
    {"qwen2_moe", "shared_expert_gate.weight' is missing", NULL, "model.layers.0.mlp.shared_expert_gate.weight", NULL,
     0},
    {"dots1", "key 'scoring_func': expected noaux_tc or sigmoid, found \"softmax\"", "{\"scoring_func\":\"softmax\"}",
     NULL, NULL, 0},
    {"dots1", "key 'layer_types': expected \"full_attention\" throughout",
     "{\"layer_types\":[\"full_attention\",\"full_attention\",\"sliding_attention\"]}", NULL, NULL, 0},
    {"dots1", "key 'max_window_layers': expected at least 3 (GGUF files of dots1 cannot have windows), found 2",
     "{\"sliding_window\":16,\"max_window_layers\":2}", NULL, NULL, 0},
    {"dots1", "key 'attention_bias': expected false, found true", "{\"attention_bias\":true}", NULL, NULL, 0},
    {"dots1", "mlp.gate.e_score_correction_bias' is missing", NULL, "model.layers.1.mlp.gate.e_score_correction_bias",
     NULL, 0},
    {"dots1", "self_attn.k_norm.weight' is missing", NULL, "model.layers.2.self_attn.k_norm.weight", NULL, 0},
    {"kimi_k3", "key 'text_config.hidden_act': expected \"situ\"", "{\"hidden_act\":\"silu\"}", NULL, NULL, 0},
    {"kimi_k3", "key 'text_config.activation_situ_beta': expected a number", "{\"activation_situ_beta\":null}", NULL,
     NULL, 0},
    {"kimi_k3", "mlp_res_proj.weight' is missing", NULL, "language_model.model.layers.1.mlp_res_proj.weight", NULL, 0},
    {"kimi_k3", "output_attn_res_norm.weight' is missing", NULL, "language_model.model.output_attn_res_norm.weight",
     NULL, 0},
    {"dots3_note", "key 'apply_mla_qkv_lora_rescale': expected true", "{\"apply_mla_qkv_lora_rescale\":false}", NULL,
     NULL, 0},
    {"dots3_note", "key 'swa_q_lora_rank': expected 96 as q_lora_rank", "{\"swa_q_lora_rank\":64}", NULL, NULL, 0},
    {"dots3_note", "key 'layer_types': expected layers with a window, and none in layer 0",
     "{\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\",\"full_attention\"]}", NULL,
     NULL, 0},
    {"dots3_note", "k_rope_only_layernorm.weight' is missing", NULL,
     "model.layers.2.self_attn.k_rope_only_layernorm.weight", NULL, 0},
    {"hy_v4", "key 'indexer_types': expected a list", "{\"indexer_types\":null}", NULL, NULL, 0},
    {"hy_v4", "key 'indexer_types': expected an indexer in layer 0",
     "{\"indexer_types\":[\"shared\",\"shared\",\"full\",\"shared\"]}", NULL, NULL, 0},
    {"hy_v4", "key 'hc_magnitude': expected a number", "{\"hc_magnitude\":null}", NULL, NULL, 0},
    {"hy_v4", "key 'n_group': expected 1", "{\"n_group\":2}", NULL, NULL, 0},
    {"hy_v4", "learnable_sink_param' is missing", NULL, "model.layers.1.self_attn.learnable_sink_param", NULL, 0},
    {"hunyuan_v1_moe", "key 'use_cla': expected false", "{\"use_cla\":true}", NULL, NULL, 0},
    {"hunyuan_v1_moe", "key 'moe_topk': expected the same whole number for all layers", "{\"moe_topk\":[3,2]}", NULL,
     NULL, 0},
    {"hunyuan_v1_moe", "key 'moe_topk': expected 2 numbers, found [3]", "{\"moe_topk\":[3]}", NULL, NULL, 0},
    {"hunyuan_v1_moe", "key 'rope_scaling.type': expected \"default\" or \"yarn\", found \"dynamic\"",
     "{\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}", NULL, NULL, 0},
    {"hunyuan_v1_moe", "key 'rope_scaling.alpha': expected a number above 0",
     "{\"rope_scaling\":{\"type\":\"dynamic\",\"alpha\":-1}}", NULL, NULL, 0},
    {"hunyuan_v1_moe", "'hunyuan-moe.rope.scaling.*' scale cos and sin by 1.13863, expected 1",
     "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}}", NULL, NULL, 0},
    {"hunyuan_v1_moe", "self_attn.query_layernorm.weight' is missing", NULL,
     "model.layers.1.self_attn.query_layernorm.weight", NULL, 0},
    {"mellum", "key 'use_sliding_window': expected true", "{\"use_sliding_window\":false}", NULL, NULL, 0},
    {"deepseek_v2", "key 'topk_method': expected \"greedy\" or \"group_limited_greedy\"",
     "{\"topk_method\":\"noaux_tc\"}", NULL, NULL, 0},
    {"deepseek_v2", "key 'norm_topk_prob': expected false", "{\"norm_topk_prob\":true}", NULL, NULL, 0},
    {"deepseek_v2", "key 'scoring_func': expected \"softmax\"", "{\"scoring_func\":\"sigmoid\"}", NULL, NULL, 0},
    {"deepseek_moe", "key 'norm_topk_prob': expected false", "{\"norm_topk_prob\":true}", NULL, NULL, 0},
    {"deepseek_moe", "key 'moe_layer_freq': expected 1", "{\"moe_layer_freq\":2}", NULL, NULL, 0},
    {"bailing_moe", "key 'norm_softmax': expected false", "{\"norm_softmax\":true}", NULL, NULL, 0},
    {"bailing_moe", "key 'use_qkv_bias': expected false", "{\"use_qkv_bias\":true}", NULL, NULL, 0},
    {"bailing_moe", "key 'norm_head': expected false, because of tie_word_embeddings", "{\"tie_word_embeddings\":true}",
     NULL, NULL, 0},
    {"bailing_moe", "query_key_value.weight': expected [256, 64]",
     "{\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32}", NULL, NULL, 0},
    {"solar_open", "key 'use_qk_norm': expected false", "{\"use_qk_norm\":true}", NULL, NULL, 0},
    {"solar_open", "key 'partial_rotary_factor'", "{\"partial_rotary_factor\":0.5}", NULL, NULL, 0},
    {"granitemoe_swa", "key 'layer_rope_theta': expected 0 or rope_theta, 1.5e+06, for each layer",
     "{\"layer_rope_theta\":[0,10000,0]}", NULL, NULL, 0},
    {"granitemoe_swa", "key 'shared_intermediate_size': expected 0: shared experts are not supported",
     "{\"shared_intermediate_size\":64}", NULL, NULL, 0},
    {"granitemoe_swa", "key 'layer_types': expected a list of all layers", "{\"layer_types\":null}", NULL, NULL, 0},
    {"granitemoe", "key 'logits_scaling': expected a number above 0, found 0", "{\"logits_scaling\":0}", NULL, NULL, 0},
    {"granitemoe", "key 'logits_scaling': expected a number that makes logit_scale 1e-06 to 1e+06",
     "{\"logits_scaling\":1e9}", NULL, NULL, 0},
    {"granitemoe", "key 'attention_bias': expected false, found true", "{\"attention_bias\":true}", NULL, NULL, 0},
    {"granitemoe", "block_sparse_moe.router.layer.weight' is missing", NULL,
     "model.layers.1.block_sparse_moe.router.layer.weight", NULL, 0},
    {"granitemoehybrid", "key 'layer_types': expected \"mamba\" or \"attention\" for each layer",
     "{\"layer_types\":[\"mamba\",\"attention\",\"mlp\"]}", NULL, NULL, 0},
    {"granitemoehybrid", "key 'layer_types': expected \"mamba\" or \"attention\" for each layer",
     "{\"layer_types\":[\"mamba\",\"attention\"]}", NULL, NULL, 0},
    {"granitemoehybrid", "key 'mamba_n_heads': expected a multiple of the 1 of mamba_n_groups that divides",
     "{\"mamba_n_heads\":7}", NULL, NULL, 0},
    {"granitemoehybrid", "key 'mamba_d_head': expected 16, as mamba_n_heads gives, found 32", "{\"mamba_d_head\":32}",
     NULL, NULL, 0},
    {"granitemoehybrid", "key 'mamba_proj_bias': expected false", "{\"mamba_proj_bias\":true}", NULL, NULL, 0},
    {"granitemoehybrid", "key 'time_step_limit': expected no limit", "{\"time_step_limit\":[0.0,0.1]}", NULL, NULL, 0},
    {"granitemoehybrid_dense", "shared_mlp.input_linear.weight': expected [128, 64]",
     "{\"shared_intermediate_size\":64}", NULL, NULL, 0},
    {"granitemoeshared_nvfp4", "expected [128, 128] (2 shared_intermediate_size, hidden_size)",
     "{\"shared_intermediate_size\":64}", NULL, NULL, 0},
    {"bailing_moe_v2",
     "key 'architectures': expected BailingMoeV2ForCausalLM or BailingMoeForCausalLM, found [\"BailingForCausalLM\"]",
     "{\"model_type\":\"bailing_moe\",\"architectures\":[\"BailingForCausalLM\"]}", NULL, NULL, 0},
    {"bailing_moe_v2", "key 'norm_head': expected false", "{\"norm_head\":true}", NULL, NULL, 0},
    {"bailing_moe_v2", "key 'use_qkv_bias': expected false", "{\"use_qkv_bias\":true}", NULL, NULL, 0},
    {"bailing_moe_v2", "key 'score_function': expected \"sigmoid\"", "{\"score_function\":\"softmax\"}", NULL, NULL, 0},
    {"bailing_moe_v2", "attention.query_layernorm.weight' is missing", NULL,
     "model.layers.0.attention.query_layernorm.weight", NULL, 0},
    {"longcat_flash", "key 'zero_expert_type': expected \"identity\"", "{\"zero_expert_type\":\"copy\"}", NULL, NULL,
     0},
    {"longcat_flash", "key 'mla_scale_q_lora': expected true", "{\"mla_scale_q_lora\":false}", NULL, NULL, 0},
    {"longcat_flash", "key 'ngram_vocab_size_ratio': expected none", "{\"ngram_vocab_size_ratio\":2}", NULL, NULL, 0},
    {"longcat_flash", "key 'num_layers': expected a value", "{\"num_layers\":null}", NULL, NULL, 0},
    {"longcat_flash", "expected [10, 128] (the layer's experts and zero_expert_num, hidden_size), found",
     "{\"zero_expert_num\":2}", NULL, NULL, 0},
    {"longcat_flash", "mlps.1.up_proj.weight' is missing", NULL, "model.layers.1.mlps.1.up_proj.weight", NULL, 0},
    {"longcat_flash", "router.e_score_correction_bias' is missing", NULL,
     "model.layers.0.mlp.router.e_score_correction_bias", NULL, 0},
    {"arctic", "key 'moe_layer_frequency': expected 1", "{\"moe_layer_frequency\":2}", NULL, NULL, 0},
    {"arctic", "key 'parallel_attn_mlp_res': expected true", "{\"parallel_attn_mlp_res\":false}", NULL, NULL, 0},
    {"arctic", "residual_mlp.w2.weight' is missing", NULL, "model.layers.0.residual_mlp.w2.weight", NULL, 0},
    {"maple", "key 'nope_on_global_attention': expected true", "{\"nope_on_global_attention\":false}", NULL, NULL, 0},
    {"maple", "key 'num_shared_experts': expected 0", "{\"num_shared_experts\":1}", NULL, NULL, 0},
    {"maple", "word_embeddings.weight' is missing", NULL, "model.word_embeddings.weight", NULL, 0},
    {"smallthinker", "key 'sliding_window_layout': expected 0 for the first of each four layers and 1 for the others",
     "{\"sliding_window_layout\":[1,1,1,1,0]}", NULL, NULL, 0},
    {"smallthinker", "key 'rope_layout': expected the same as sliding_window_layout", "{\"rope_layout\":[1,1,1,1,1]}",
     NULL, NULL, 0},
    {"smallthinker_nvfp4", "key 'rope_layout': expected 1 for each layer", "{\"rope_layout\":[0,1]}", NULL, NULL, 0},
    {"smallthinker", "key 'use_qk_norm': expected false", "{\"use_qk_norm\":true}", NULL, NULL, 0},
    {"smallthinker", "primary_router.weight' is missing", NULL, "model.layers.1.block_sparse_moe.primary_router.weight",
     NULL, 0},
    {"llama4", "key 'no_rope_layers': expected 0 for each fourth layer", "{\"no_rope_layers\":[1,1,0,1,1]}", NULL, NULL,
     0},
    {"llama4", "key 'moe_layers': expected the layers that interleave_moe_layer_step says",
     "{\"moe_layers\":[0,1,2,3,5]}", NULL, NULL, 0},
    {"llama4", "feed_forward.router.weight' is missing", NULL, "model.layers.1.feed_forward.router.weight", NULL, 0},
    {"lfm2_moe", "key 'layer_types': expected \"conv\" or \"full_attention\" for each of 3 layers",
     "{\"layer_types\":[\"conv\",\"full_attention\"]}", NULL, NULL, 0},
    {"lfm2_moe", "key 'conv_bias': expected false", "{\"conv_bias\":true}", NULL, NULL, 0},
    {"lfm2_moe", "key 'use_expert_bias': expected true", "{\"use_expert_bias\":false}", NULL, NULL, 0},
    {"lfm2_moe", "conv.conv.weight': expected [128, 4] (hidden_size, conv_L_cache)", "{\"conv_L_cache\":4}", NULL, NULL,
     0},
    {"lfm2_moe", "conv.out_proj.weight' is missing", NULL, "model.layers.0.conv.out_proj.weight", NULL, 0},
    {"exaone_moe", "key 'layer_types': expected the kinds of all layers", "{\"layer_types\":null}", NULL, NULL, 0},
    {"exaone_moe", "key 'layer_types': expected layers with a window",
     "{\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]}", NULL, NULL, 0},
    {"exaone_moe", "key 'is_moe_layer': expected 1 dense layers, then mixtures",
     "{\"is_moe_layer\":[false,true,false]}", NULL, NULL, 0},
    {"exaone_moe", "mlp.e_score_correction_bias' is missing", NULL, "model.layers.1.mlp.e_score_correction_bias", NULL,
     0},
    {"cohere2_moe", "key 'layer_types': expected the kinds of all layers", "{\"layer_types\":null}", NULL, NULL, 0},
    {"cohere2_moe", "key 'expert_selection_fn': expected softmax or sigmoid, found \"tanh\"",
     "{\"expert_selection_fn\":\"tanh\"}", NULL, NULL, 0},
    {"cohere2_moe", "key 'shared_expert_combination_strategy': expected average",
     "{\"shared_expert_combination_strategy\":\"sum\"}", NULL, NULL, 0},
    {"cohere2_moe", "key 'prefix_dense_sliding_window_pattern': expected 1",
     "{\"prefix_dense_sliding_window_pattern\":4}", NULL, NULL, 0},
    {"cohere2_moe", "key 'logit_scale': expected a number above 0, found 0", "{\"logit_scale\":0}", NULL, NULL, 0},
    {"cohere2_moe", "key 'attention_bias': expected false, found true", "{\"attention_bias\":true}", NULL, NULL, 0},
    {"phimoe", "key 'attention_bias': expected true, found false", "{\"attention_bias\":false}", NULL, NULL, 0},
    {"phimoe", "key 'lm_head_bias': expected true, found false", "{\"lm_head_bias\":false}", NULL, NULL, 0},
    {"phimoe", "key 'router_jitter_noise': expected 0.01, found 0.1", "{\"router_jitter_noise\":0.1}", NULL, NULL, 0},
    {"phimoe", "key 'num_experts_per_tok': expected 2, found 3", "{\"num_experts_per_tok\":3}", NULL, NULL, 0},
    {"phimoe", "key 'sliding_window': expected none or the whole context, found 16", "{\"sliding_window\":16}", NULL,
     NULL, 0},
    {"phimoe", "lm_head.bias' is missing", NULL, "lm_head.bias", NULL, 0},
    {"phimoe", "input_layernorm.bias' is missing", NULL, "model.layers.1.input_layernorm.bias", NULL, 0},
    {"dbrx", "key 'n_layers': expected", "{\"n_layers\":null}", NULL, NULL, 0},
    {"dbrx", "key 'ffn_config.moe_normalize_expert_weights': expected 1, found 2",
     "{\"ffn_config\":{\"ffn_hidden_size\":64,\"moe_num_experts\":8,\"moe_top_k\":3,"
     "\"moe_normalize_expert_weights\":2}}",
     NULL, NULL, 0},
    {"dbrx", "key 'ffn_act_fn.name': expected \"silu\", found \"gelu\"",
     "{\"ffn_config\":{\"ffn_hidden_size\":64,\"moe_num_experts\":8,\"moe_top_k\":3,\"ffn_act_fn\":"
     "{\"name\":\"gelu\"}}}",
     NULL, NULL, 0},
    {"dbrx", "norm_attn_norm.norm_2.weight' is missing", NULL, "transformer.blocks.1.norm_attn_norm.norm_2.weight",
     NULL, 0},
    {"afmoe", "key 'mup_enabled': expected true (GGUF files of afmoe scale embeddings)", "{\"mup_enabled\":null}", NULL,
     NULL, 0},
    {"afmoe", "key 'route_norm': expected true", "{\"route_norm\":false}", NULL, NULL, 0},
    {"afmoe", "key 'score_func': expected \"sigmoid\"", "{\"score_func\":\"softmax\"}", NULL, NULL, 0},
    {"afmoe", "self_attn.gate_proj.weight' is missing", NULL, "model.layers.3.self_attn.gate_proj.weight", NULL, 0},
    {"ernie4_5_moe", "key 'use_bias': expected false", "{\"use_bias\":true}", NULL, NULL, 0},
    {"ernie4_5_moe", "moe_statics.e_score_correction_bias' is missing", NULL,
     "model.layers.1.mlp.moe_statics.e_score_correction_bias", NULL, 0},
    {"ernie4_5_moe", "nothing in ernie4_5-moe uses it", "{\"moe_use_aux_free\":false}", NULL, NULL, 0},
    {"ernie4_5_moe", "'model.layers.3.mlp.gate_proj.weight' is missing", "{\"moe_layer_end_index\":1}", NULL, NULL, 0},
    {"step3p5", "key 'sink': expected false", "{\"sink\":true}", NULL, NULL, 0},
    {"step3p5", "key 'use_rope_layers': expected none", "{\"use_rope_layers\":[0]}", NULL, NULL, 0},
    {"step3p5", "key 'partial_rotary_factors': expected 0.5 for layers without a window",
     "{\"partial_rotary_factors\":[1,1,1]}", NULL, NULL, 0},
    {"step3p5", "key 'partial_rotary_factors': expected 1 for layers with a window",
     "{\"partial_rotary_factors\":[0.5,0.5,0.5]}", NULL, NULL, 0},
    {"step3p5", "key 'rope_theta': expected the same number for all layers of a kind", "{\"rope_theta\":[5e6,1e4,1e6]}",
     NULL, NULL, 0},
    {"step3p5", "key 'yarn_only_types': expected [\"full_attention\"], found []", "{\"yarn_only_types\":[]}", NULL,
     NULL, 0},
    {"step3p5", "key 'moe_layers_enum': expected numbers with commas between them", "{\"moe_layers_enum\":\"1;2\"}",
     NULL, NULL, 0},
    {"step3p5", "key 'moe_layers_enum': expected numbers of layers", "{\"moe_layers_enum\":[1,\"2\"]}", NULL, NULL, 0},
    {"step3p5", "'model.layers.1.mlp.gate_proj.weight' is missing", "{\"moe_layers_enum\":null}", NULL, NULL, 0},
    {"step3p5", "key 'attention_other_setting.head_dim': expected 64 as in the other layers",
     "{\"attention_other_setting\":{\"num_attention_heads\":4,\"num_attention_groups\":2,\"head_dim\":32}}", NULL, NULL,
     0},
    {"step3p5", "key 'moe_router_activation': expected \"sigmoid\"", "{\"moe_router_activation\":\"softmax\"}", NULL,
     NULL, 0},
    {"step3p5", "key 'swiglu_limits': expected null or numbers from 0", "{\"swiglu_limits\":[-1,0,0]}", NULL, NULL, 0},
    {"step3p5", "key 'swiglu_limits': expected a value for each of 3 layers, found [0,0]", "{\"swiglu_limits\":[0,0]}",
     NULL, NULL, 0},
    {"step3p5", "key 'rope_theta': expected a value for each of 3 layers", "{\"rope_theta\":[5e6,1e4]}", NULL, NULL, 0},
    {"step3p5", "moe.up_proj.weight': expected BF16 [4, 64, 64], found BF16 [4, 32, 128]", NULL,
     "model.layers.1.moe.up_proj.weight", "[4,32,128]", 0},
    {"step3p5", "tensor 'model.layers.1.moe.router_bias' is missing", NULL, "model.layers.1.moe.router_bias", NULL, 0},
    {"step3p7", "down_proj_weight_scale_2' is missing", NULL, "model.layers.1.moe.down_proj.weight_scale_2", NULL, 0},
    {"step3p7", "expected F8_E4M3 [6, 64, 4], one scale per 16 weights", NULL,
     "model.layers.1.moe.down_proj.weight_scale", "[6,4,64]", 0},
    {"step3p7", "layer_types': expected 2 or 4 layers",
     "{\"layer_types\":[\"full_attention\",\"sliding_attention\",\"sliding_attention\"]}", NULL, NULL, 0},
    {"step3p7", "key 'layer_types': expected 4 layers, found 2",
     "{\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", NULL, NULL, 0},
    {"gemma4_dense",
     "key 'hidden_size_per_layer_input': expected 0 (inputs of each layer, as E2B and E4B have, are not",
     "{\"hidden_size_per_layer_input\":64}", NULL, NULL, 0},
    {"gemma4_dense", "key 'hidden_size_per_layer_input': expected 0 (inputs of each layer",
     "{\"hidden_size_per_layer_input\":null}", NULL, NULL, 0},
    {"gemma4_dense", "key 'num_kv_shared_layers': expected 0 (layers that share keys and values are not supported)",
     "{\"num_kv_shared_layers\":2}", NULL, NULL, 0},
    {"gemma4_dense", "key 'use_bidirectional_attention': expected none or \"vision\", found \"all\"",
     "{\"use_bidirectional_attention\":\"all\"}", NULL, NULL, 0},
    {"gemma4_dense", "key 'hidden_activation': expected \"gelu_pytorch_tanh\", found \"silu\"",
     "{\"hidden_activation\":\"silu\"}", NULL, NULL, 0},
    {"gemma4_dense", "key 'layer_types': expected layers with a window, and a last one without",
     "{\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\",\"sliding_attention\"]}", NULL,
     NULL, 0},
    {"gemma4_dense", "key 'layer_types': expected the kinds of 4 layers", "{\"layer_types\":null}", NULL, NULL, 0},
    {"gemma4_dense", "key 'full_attention.rope_type': expected \"proportional\", found \"default\"",
     "{\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\",\"rope_theta\":1e6},\"sliding_attention\":{"
     "\"rope_type\":\"default\",\"rope_theta\":1e4}}}",
     NULL, NULL, 0},
    {"gemma4_dense", "key 'full_attention.factor': expected 1, found 8",
     "{\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"proportional\",\"rope_theta\":1e6,\"factor\":8},"
     "\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":1e4}}}",
     NULL, NULL, 0},
    {"gemma4_dense", "tensor 'model.layers.1.self_attn.v_proj.weight': BF16 [128, 128]: nothing in gemma4 uses it",
     "{\"attention_k_eq_v\":true,\"num_global_key_value_heads\":2}", NULL, NULL, 0},
    {"gemma4_dense", "head_dim': expected 64 in layer 3, found 32",
     "{\"per_layer_config\":{\"1\":{\"head_dim\":64},\"3\":{\"head_dim\":32}}}", NULL, NULL, 0},
    {"gemma4_dense", "head_dim': expected 32 in layer 2, found 64",
     "{\"per_layer_config\":{\"1\":{\"head_dim\":64},\"2\":{\"head_dim\":64},\"3\":{\"head_dim\":64}}}", NULL, NULL, 0},
    {"nemotron_h", "key 'hybrid_override_pattern': expected a text of M, *, E and -, or layers_block_type, found",
     "{\"hybrid_override_pattern\":\"MA*-ME\"}", NULL, NULL, 0},
    {"nemotron_h", "key 'hybrid_override_pattern': expected a text of M, *, E and -, or layers_block_type, found none",
     "{\"hybrid_override_pattern\":null}", NULL, NULL, 0},
    {"nemotron_h", "key 'layers_block_type': expected \"mamba\", \"attention\", \"moe\" or \"mlp\" for each layer",
     "{\"layers_block_type\":[\"mamba\",\"sparse\"]}", NULL, NULL, 0},
    {"nemotron_h", "key 'num_hidden_layers': expected 5, as kinds of layers are listed, found 6",
     "{\"hybrid_override_pattern\":\"ME*-M\"}", NULL, NULL, 0},
    {"nemotron_h", "key 'mlp_hidden_act': expected \"relu2\"", "{\"mlp_hidden_act\":\"silu\"}", NULL, NULL, 0},
    {"nemotron_h", "key 'block_configs': expected none", "{\"block_configs\":[1]}", NULL, NULL, 0},
    {"nemotron_h", "key 'mamba_num_heads': expected a multiple of the 3 of n_groups", "{\"n_groups\":3}", NULL, NULL,
     0},
    {"nemotron_h",
     "in_proj.weight': expected [392, 64] (2 mamba_num_heads x mamba_head_dim + 2 n_groups x ssm_state_size + "
     "mamba_num_heads, hidden_size), found BF16 [64, 392]",
     NULL, "backbone.layers.0.mixer.in_proj.weight", "[64,392]", 0},
    {"nemotron_h", "fc1_latent_proj.weight': expected [32, 64] (moe_latent_size, hidden_size), found BF16 [64, 32]",
     NULL, "backbone.layers.1.mixer.fc1_latent_proj.weight", "[64,32]", 0},
    {"nemotron_h",
     "experts.0.up_proj.weight': expected [64, 64] (moe_intermediate_size, hidden_size), found BF16 [64, 32]",
     "{\"moe_latent_size\":null}", NULL, NULL, 0},
    {"nemotron_h", "tensor 'backbone.layers.4.mixer.D' is missing", NULL, "backbone.layers.4.mixer.D", NULL, 0},
    {"qwen4_exp",
     "key 'text_config.output_gate_type': expected \"sigmoid\" (GGUF files can say no other), found \"silu\"",
     "{\"output_gate_type\":\"silu\"}", NULL, NULL, 0},
    {"qwen4_exp", "key 'text_config.output_gate_type': expected \"sigmoid\" (GGUF files can say no other)",
     "{\"output_gate_type\":null}", NULL, NULL, 0},
    {"qwen4_exp", "key 'text_config.ple_layer_ids': expected at most one layer", "{\"ple_layer_ids\":[1,2]}", NULL,
     NULL, 0},
    {"qwen4_exp", "key 'text_config.ple_layer_ids': expected a number from 1 to 3", "{\"ple_layer_ids\":[0]}", NULL,
     NULL, 0},
    {"qwen4_exp", "layers.2.ple.ple_embedding.layer_multipliers' is missing", "{\"ple_layer_ids\":[3]}", NULL, NULL, 0},
    {"qwen4_exp", "key 'text_config.indexer_kv_heads': expected 1", "{\"indexer_kv_heads\":2}", NULL, NULL, 0},
    {"qwen4_exp", "'qwen4exp.attention.compress_ratios' has 5 for layer 2, expected a divisor of",
     "{\"indexer_compress_ratio\":5}", NULL, NULL, 0},
    {"qwen4_exp", "key 'text_config.ple_embed_dim': expected a multiple of the 8 heads of n-grams",
     "{\"ple_embed_dim\":60}", NULL, NULL, 0},
    {"qwen4_exp", "key 'text_config.eos_token_id': expected a token id", "{\"eos_token_id\":null}", NULL, NULL, 0},
    {"qwen4_exp", "ngram_embedding.shard_16.weight' is missing", "{\"split_ngram_parts\":17}", NULL, NULL, 0},
    {"qwen4_exp", "ngram_embedding.shard_11.weight' is missing", NULL,
     "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_11.weight", NULL, 0},
    {"qwen4_exp", "ngram_embedding.shard_3.weight': expected rows of 8 values", NULL,
     "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight", "[128,4]", 0},
    {"qwen4_exp", "layer_multipliers': expected 3 numbers of I64, found I64 [1, 3]", NULL,
     "model.language_model.layers.1.ple.ple_embedding.layer_multipliers", "[1,3]", 0},
    {"qwen4_exp", "ngram_heads_offsets' is missing", NULL,
     "model.language_model.layers.1.ple.ple_embedding.ngram_heads_offsets", NULL, 0},
    {"qwen4_exp",
     "index_qk_proj.weight': expected [544, 64] ((indexer_n_heads + 1) x indexer_head_dim, hidden_size), found BF16 "
     "[64, "
     "544]",
     NULL, "model.language_model.layers.2.self_attn.indexer.index_qk_proj.weight", "[64,544]", 0},
    {"qwen4_exp",
     "input_mix_weight_up.weight': expected [256, 32] (hc_count x hidden_size, hc_lowrank), found BF16 [32, 256]", NULL,
     "model.language_model.layers.0.mlp_hyper_connection.input_mix_weight_up.weight", "[32,256]", 0},
    {"qwen4_exp", "tensor 'model.language_model.hyper_connection_mixer.input_mix_weight_up.weight' is missing", NULL,
     "model.language_model.hyper_connection_mixer.input_mix_weight_up.weight", NULL, 0},
    {"qwen4_exp_nvfp4",
     "shard_0.weight': expected a matrix of BF16, F16, F32 or, with "
     "'model.layers.0.ple.ple_embedding.ngram_embedding.weight_scale', F8_E4M3",
     NULL, "model.layers.0.ple.ple_embedding.ngram_embedding.weight_scale", NULL, 0},
    {"laguna", "key 'moe_router_logit_softcapping': expected 0", "{\"moe_router_logit_softcapping\":30}", NULL, NULL,
     0},
    {"laguna", "key 'moe_apply_router_weight_on_input': expected false", "{\"moe_apply_router_weight_on_input\":true}",
     NULL, NULL, 0},
    {"laguna", "key 'gating': expected \"per-head\" or \"per-element\"", "{\"gating\":\"per-token\"}", NULL, NULL, 0},
    {"laguna", "key 'gating': expected \"per-head\" or \"per-element\"", "{\"gating\":false}", NULL, NULL, 0},
    {"laguna", "g_proj.weight': expected [128, 64] (num_attention_heads x head_dim, hidden_size), found BF16 [2, 64]",
     "{\"gating\":\"per-element\"}", NULL, NULL, 0},
    {"laguna", "key 'num_attention_heads_per_layer': expected 3 numbers", "{\"num_attention_heads_per_layer\":[2,4]}",
     NULL, NULL, 0},
    {"laguna", "key 'num_attention_heads_per_layer': expected numbers from 1",
     "{\"num_attention_heads_per_layer\":[2,4,0]}", NULL, NULL, 0},
    {"laguna", "key 'mlp_layer_types': expected 3 times", "{\"mlp_layer_types\":[\"dense\"]}", NULL, NULL, 0},
    {"laguna", "key 'swa_attention_sink_enabled': expected false", "{\"swa_attention_sink_enabled\":true}", NULL, NULL,
     0},
    {"laguna", "key 'norm_topk_prob': expected true", "{\"norm_topk_prob\":false}", NULL, NULL, 0},
    {"laguna", "key 'moe_router_score_func': expected \"sigmoid\"", "{\"moe_router_score_func\":\"sqrtsoftplus\"}",
     NULL, NULL, 0},
    {"laguna", "key 'full_attention.attention_factor': expected",
     "{\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"yarn\",\"rope_theta\":5e5,\"factor\":32,"
     "\"attention_factor\":1.0,\"original_max_position_embeddings\":64,\"partial_rotary_factor\":0.5},"
     "\"sliding_attention\":{\"rope_theta\":1e4}}}",
     NULL, NULL, 0},
    {"mimo_v2_flash", "key 'hybrid_layer_pattern': expected 0 or 1 for each of 2 layers",
     "{\"hybrid_layer_pattern\":[0]}", NULL, NULL, 0},
    {"mimo_v2_flash", "key 'moe_layer_freq': expected 0 or 1 for each of 2 layers", "{\"moe_layer_freq\":[0,2]}", NULL,
     NULL, 0},
    {"mimo_v2_flash", "key 'sliding_window_size': expected 4 as sliding_window", "{\"sliding_window_size\":5}", NULL,
     NULL, 0},
    {"mimo_v2_flash", "key 'swa_head_dim': expected 192 as head_dim", "{\"swa_head_dim\":128}", NULL, NULL, 0},
    {"mimo_v2_flash", "key 'topk_method': expected \"noaux_tc\"", "{\"topk_method\":\"greedy\"}", NULL, NULL, 0},
    {"mimo_v2_flash", "key 'n_shared_experts': expected 0", "{\"n_shared_experts\":1}", NULL, NULL, 0},
    {"mimo_v2_flash", "'model.layers.0.self_attn.attention_sink_bias' is missing",
     "{\"add_full_attention_sink_bias\":true}", NULL, NULL, 0},
    {"mimo_v2_flash", "nothing in mimo2 uses it", "{\"add_swa_attention_sink_bias\":false}", NULL, NULL, 0},
    {"mimo_v2_flash", "'visual.x': BF16 [4]: nothing in mimo2 uses it", NULL, "visual.x", NULL, 0},
    {"mimo_v2_flash_fp8", "[3, 1], found F32 [1, 3]", NULL, "model.layers.1.self_attn.k_proj.weight_scale_inv", "[1,3]",
     0},
    {"deepseek_v32", "key 'index_topk': expected an integer from 1", "{\"index_topk\":0}", NULL, NULL, 0},
    {"deepseek_v32", "key 'index_topk': expected an integer from 1", "{\"index_topk\":null}", NULL, NULL, 0},
    {"deepseek_v32", "key 'indexer_rope_interleave': expected false", "{\"indexer_rope_interleave\":true}", NULL, NULL,
     0},
    {"deepseek_v32", "key 'rope_interleave': expected true", "{\"rope_interleave\":false}", NULL, NULL, 0},
    {"deepseek_v32", "key 'indexer_types': expected none (every layer has an indexer)",
     "{\"indexer_types\":[\"full\",\"shared\",\"full\"]}", NULL, NULL, 0},
    {"deepseek_v32", "key 'index_topk_freq': expected 1", "{\"index_topk_freq\":4}", NULL, NULL, 0},
    {"deepseek_v32", "key 'q_lora_rank': expected a number above 0, because of the indexer", "{\"q_lora_rank\":null}",
     NULL, NULL, 0},
    {"deepseek_v32", "key 'index_head_dim': expected at least the 16 of qk_rope_head_dim", "{\"index_head_dim\":8}",
     NULL, NULL, 0},
    {"deepseek_v32",
     "indexer.wq_b.weight': expected [320, 64] (index_n_heads x index_head_dim, q_lora_rank), found BF16 [256, 64]",
     "{\"index_n_heads\":5}", NULL, NULL, 0},
    {"deepseek_v32", "k_norm.bias': expected [64] (index_head_dim), found BF16 [8, 8]", NULL,
     "model.layers.0.self_attn.indexer.k_norm.bias", "[8,8]", 0},
    {"deepseek_v32", "weights_proj.weight': expected [4, 64] (index_n_heads, hidden_size), found BF16 [64, 4]", NULL,
     "model.layers.2.self_attn.indexer.weights_proj.weight", "[64,4]", 0},
    {"deepseek_v32_fp8", "FP8 weights, but neither 'model.layers.0.self_attn.indexer.wk.weight_scale_inv'", NULL,
     "model.layers.0.self_attn.indexer.wk.weight_scale_inv", NULL, 0},
    {"glm_moe_dsa", "key 'indexer_rope_interleave': expected true", "{\"indexer_rope_interleave\":false}", NULL, NULL,
     0},
    {"glm_moe_dsa", "key 'indexer_types': expected \"full\" or \"shared\" for each of 3 layers",
     "{\"indexer_types\":[\"full\",\"full\"]}", NULL, NULL, 0},
    {"glm_moe_dsa", "key 'indexer_types': expected \"full\" or \"shared\" for each of 3 layers",
     "{\"indexer_types\":[\"full\",\"full\",\"half\"]}", NULL, NULL, 0},
    {"glm_moe_dsa", "key 'indexer_types': expected an indexer in layer 0",
     "{\"indexer_types\":[\"shared\",\"full\",\"full\"]}", NULL, NULL, 0},
    {"glm_moe_dsa", "key 'index_topk_pattern': expected F or S for each of 3 layers", "{\"index_topk_pattern\":\"FF\"}",
     NULL, NULL, 0},
    {"glm_moe_dsa", "key 'index_topk_pattern': expected F or S for each of 3 layers",
     "{\"index_topk_pattern\":\"FfF\"}", NULL, NULL, 0},
    {"glm_moe_dsa_types", "key 'index_topk_freq': expected an indexer in layer 0",
     "{\"indexer_types\":null,\"index_skip_topk_offset\":0}", NULL, NULL, 0},
    {"glm_moe_dsa_types", "tensor 'model.layers.1.self_attn.indexer.wq_b.weight' is missing",
     "{\"indexer_types\":null,\"index_topk_freq\":null}", NULL, NULL, 0},
    {"glm_moe_dsa_types", "tensor 'model.layers.3.self_attn.indexer.wk.weight' is missing", NULL,
     "model.layers.3.self_attn.indexer.wk.weight", NULL, 0},
    {"glm_moe_dsa_types", "tensor 'model.layers.3.self_attn.indexer.k_norm.bias' is missing", NULL,
     "model.layers.3.self_attn.indexer.k_norm.bias", NULL, 0},
    {"glm_moe_dsa_types", "'model.layers.1.self_attn.indexer.wk.weight': BF16 [4]: nothing in glm-dsa uses it", NULL,
     "model.layers.1.self_attn.indexer.wk.weight", NULL, 0},
    {"kimi_linear", "key 'linear_attn_config.kda_layers': expected layer 2, counted from 1, either in this list or in",
     "{\"linear_attn_config\":{\"full_attn_layers\":[2,3],\"kda_layers\":[1,2,4],\"head_dim\":32,\"num_heads\":4}}",
     NULL, NULL, 0},
    {"kimi_linear", "key 'linear_attn_config.kda_layers': expected layer 4, counted from 1, either in this list or in",
     "{\"linear_attn_config\":{\"full_attn_layers\":[3],\"kda_layers\":[1,2],\"head_dim\":32,\"num_heads\":4}}", NULL,
     NULL, 0},
    {"kimi_linear", "key 'linear_attn_config.num_heads': expected 4 as num_attention_heads",
     "{\"linear_attn_config\":{\"full_attn_layers\":[3],\"kda_layers\":[1,2,4],\"head_dim\":32,\"num_heads\":2}}", NULL,
     NULL, 0},
    {"kimi_linear", "key 'layer_types': expected a list, because there is no linear_attn_config",
     "{\"linear_attn_config\":null,\"linear_head_dim\":32,\"linear_num_heads\":4}", NULL, NULL, 0},
    {"kimi_linear", "key 'mla_use_nope': expected true", "{\"mla_use_nope\":false}", NULL, NULL, 0},
    {"kimi_linear", "key 'model_max_length': expected an integer from 1", "{\"model_max_length\":0}", NULL, NULL, 0},
    {"kimi_linear",
     "f_b_proj.weight': expected [128, 32] (num_attention_heads x head_dim of linear attention, head_dim of linear "
     "attention), found BF16 [32, 128]",
     NULL, "model.layers.1.self_attn.f_b_proj.weight", "[32,128]", 0},
    {"kimi_linear",
     "v_conv1d.weight': expected [128, 4] (num_attention_heads x head_dim of linear attention, taps of a convolution), "
     "found F32 [4, 128]",
     NULL, "model.layers.1.self_attn.v_conv1d.weight", "[4,128]", 0},
    {"kimi_linear", "A_log': expected [4] (num_attention_heads), found F32 [2, 2]", NULL,
     "model.layers.3.self_attn.A_log", "[2,2]", 0},
    {"kimi_linear", "tensor 'model.layers.0.self_attn.g_a_proj.weight' is missing", NULL,
     "model.layers.0.self_attn.g_a_proj.weight", NULL, 0},
    {"bailing_hybrid",
     "key 'architectures': expected BailingMoeV3ForCausalLM (moe does not compute the lightning attention of "
     "BailingMoeV2_5ForCausalLM), found [\"BailingMoeV2_5ForCausalLM\"]",
     "{\"architectures\":[\"BailingMoeV2_5ForCausalLM\"]}", NULL, NULL, 0},
    {"bailing_hybrid", "key 'architectures': expected BailingMoeV3ForCausalLM", "{\"architectures\":null}", NULL, NULL,
     0},
    {"bailing_hybrid", "key 'layer_group_size': expected a divisor of 4 layers", "{\"layer_group_size\":3}", NULL, NULL,
     0},
    {"bailing_hybrid", "key 'kda_safe_gate': expected true", "{\"kda_safe_gate\":false}", NULL, NULL, 0},
    {"bailing_hybrid", "key 'no_kda_lora': expected true", "{\"no_kda_lora\":false}", NULL, NULL, 0},
    {"bailing_hybrid", "key 'kda_lower_bound': expected a number that makes kda.gate_lower_bound -1000 to -0.001",
     "{\"kda_lower_bound\":0}", NULL, NULL, 0},
    {"bailing_hybrid", "key 'gated_attention_proj_granularity_type': expected \"head_wise\"",
     "{\"gated_attention_proj_granularity_type\":\"element_wise\"}", NULL, NULL, 0},
    {"bailing_hybrid", "key 'rope_parameters.partial_rotary_factor': expected 1, or the share of qk_rope_head_dim",
     "{\"rope_parameters\":{\"rope_theta\":6e6,\"partial_rotary_factor\":0.5}}", NULL, NULL, 0},
    {"bailing_hybrid", "tensor 'model.layers.0.attention.f_proj.weight' is missing", NULL,
     "model.layers.0.attention.f_proj.weight", NULL, 0},
    {"glm5_next", "key 'text_config.layer_types': expected \"linear_attention\" or \"indexed_attention\" for each of 4",
     "{\"layer_types\":null}", NULL, NULL, 0},
    {"glm5_next", "key 'text_config.layer_types': expected \"linear_attention\" or \"indexed_attention\" for each of 4",
     "{\"layer_types\":[\"linear_attention\",\"mamba\",\"linear_attention\",\"mamba\"]}", NULL, NULL, 0},
    {"glm5_next", "key 'linear_attn_config.num_heads': expected 4 as num_attention_heads",
     "{\"linear_attn_config\":{\"head_dim\":32,\"num_heads\":2}}", NULL, NULL, 0},
    {"glm5_next", "key 'text_config.index_topk': expected a multiple of index_kpool", "{\"index_topk\":30}", NULL, NULL,
     0},
    {"glm5_next", "key 'text_config.index_kpool': expected", "{\"index_kpool\":null}", NULL, NULL, 0},
    {"glm5_next", "key 'text_config.index_kpool_always_select_tail': expected true",
     "{\"index_kpool_always_select_tail\":false}", NULL, NULL, 0},
    {"glm5_next", "key 'text_config.qk_rope_head_dim': expected", "{\"qk_rope_head_dim\":16}", NULL, NULL, 0},
    {"glm5_next", "key 'text_config.swiglu_limit': expected a number, found none", "{\"swiglu_limit\":null}", NULL,
     NULL, 0},
    {"glm5_next", "key 'text_config.mhc': expected true", "{\"mhc\":false}", NULL, NULL, 0},
    {"glm5_next", "key 'text_config.indexer_types': expected an indexer in layer 1, the first of latent attention",
     "{\"indexer_types\":[\"full\",\"shared\",\"full\",\"full\"]}", NULL, NULL, 0},
    {"glm5_next", "index_kpool_compress_ape': expected [4, 64] (index_kpool, index_head_dim), found F32 [64, 4]", NULL,
     "model.language_model.layers.1.self_attn.indexer.index_kpool_compress_ape", "[64,4]", 0},
    {"glm5_next", "index_kpool_compress_gate.weight' is missing", NULL,
     "model.language_model.layers.3.self_attn.indexer.index_kpool_compress_gate", NULL, 0}};

static void test_families_refusals(void) {
    for (size_t i = 0; i < sizeof family_refusals / sizeof *family_refusals; i++) {
        const struct family_refusal *r = &family_refusals[i];
        struct hf h;
        hf_load(&h, r->fixture);
        json_t *text = json_object_get(h.config, "text_config");
        if (r->config) hf_set(text ? text : h.config, r->config);
        struct hf_tensor *t = r->tensor ? hf_find(&h, r->tensor) : NULL;
        if (r->tensor && !t) hf_plain(&h, r->tensor, "[4]", 4, HF_BF16);
        else if (r->byte) t->data[2] = (uint8_t)r->byte;
        else if (r->shape) snprintf(t->shape, sizeof t->shape, "%s", r->shape);
        else if (t) hf_drop(&h, r->tensor);
        const int rc = hf_convert_to(&h, "out.gguf");
        /* an MTP layer that is not whole is left out */
        const bool left = strstr(r->message, "tensor 'mtp.0.") && ends_in(r->message, "is missing");
        CHECK(rc == !left && strstr(h.err, r->message) && (!left || strstr(h.err, "is left out,")),
              "%s, expected '%s': exit %d: %s", r->fixture, r->message, rc, h.err);
        const char *nl = strrchr(h.err, '\n');
        const bool last = nl && !nl[1] && !strncmp(h.err, "moe-convert: ", 13);
        CHECK(last, "%s: %s", r->fixture, h.err);
        hf_end(&h);
    }
}

/* Numbers of tokens for the n-grams of DeepSeek-V4.1: what an added token's text has in common with other tokens', as
 * the library tokenizers normalizes it. The tokenizer has "the", "fi" not, and a blank. */
static void test_families_numbers(void) {
    static const struct {
        const char *text;
        int numbers; /* 414 where the token has one of its own */
    } c[] = {{"xyz123", 414},
             {" THE\n", 413},
             {"T\xca\xb0\x65", 413},                        /* a raised h */
             {"\xef\xbd\x94\xef\xbd\x88\xef\xbd\x85", 413}, /* wide letters */
             {"t\xcc\x88he\xcc\x81", 413},                  /* accents */
             {"t\xe0\xa2\x98he", 414},                      /* a mark that came after Unicode 9 */
             {"\xe2\x80\xa8the\xc2\x85", 413},              /* U+2028, U+0085 */
             {"\n\n \t", 413},                              /* becomes a blank */
             {"\xc2\xa0", 413},                             /* likewise */
             {"\xee\x80\x80", 413},                         /* likewise: U+E000 */
             {"q\xee\x80\x80", 414},                        /* "q " */
             {"\xef\xac\x82", 414},                         /* fl */
             {"\xc4\xb0", 413},                             /* I with a dot */
             {"\xef\xbf\xbd", 414},                         /* U+FFFD has its own name */
             {"\xcc\x81", 414}};                            /* nothing is left: the accent itself */
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        char want[64];
        hf_load(&h, "deepseek_v41");
        hf_set(json_object_get(h.config, "text_config"), "{\"engram_compressed_vocab_size\":400}");
        json_object_set_new(json_array_get(json_object_get(h.tokenizer, "added_tokens"), 3), "content",
                            json_string(c[i].text));
        json_object_set_new(json_object_get(json_object_get(h.tokenizer_config, "added_tokens_decoder"), "510"),
                            "content", json_string(c[i].text));
        snprintf(want, sizeof want, "expected %d, the tokens", c[i].numbers);
        CHECK(hf_convert_to(&h, "out.gguf") == 1 && strstr(h.err, want), "%s: %s: %s", c[i].text, want, h.err);
        hf_end(&h);
    }
}

/* Limits of Step-3.5's feed-forwards: a dense one has that of the shared experts. */
static void test_families_limits(void) {
    static const float want[3][2] = {{1.5f, 1.5f}, {0.75f, 0}, {0.5f, 1.25f}}; /* of the experts or dense; shared */
    struct hf h;
    struct model m;
    char path[256], err[ERR_MAX];
    hf_load(&h, "step3p5");
    hf_set(h.config, "{\"swiglu_limits\":[0.25,0.75,0.5],\"swiglu_limits_shared\":[1.5,0,1.25]}");
    snprintf(path, sizeof path, "%s/out.gguf", h.dir);
    if (hf_convert(&h) && CHECK(!model_load(&m, path, err), "%s", err)) {
        for (int il = 0; il < 3; il++)
            for (int k = 0; k < 2; k++) {
                const struct glu *glu = k ? &m.layers[il].sh_glu : &m.layers[il].glu;
                const float limit = want[il][k];
                CHECK(glu->up_max == limit && (limit == 0 || glu->gate_max > limit), "layer %d, %d: limits %g, %g", il,
                      k, (double)glu->up_max, (double)glu->gate_max);
            }
        model_free(&m);
    }
    hf_end(&h);
}

/* One scale in two dimensions is that of one block, not of a matrix of two. */
static void test_families_one_scale(void) {
    struct hf h;
    hf_load(&h, "mimo_v2_flash_fp8");
    struct hf_tensor *t = hf_find(&h, "model.layers.0.self_attn.k_proj.weight_scale_inv");
    if (!CHECK(t, "the fixture has no such scale")) return;
    snprintf(t->shape, sizeof t->shape, "[1,1]");
    arrsetlen(t->data, 4);
    const int rc = hf_convert_to(&h, "out.gguf");
    CHECK(rc == 1 && strstr(h.err, "per 128 x 128 block [2, 1], found F32 [1, 1]"), "exit %d: %s", rc, h.err);
    hf_end(&h);
}

/* The table of n-grams of a release: its rows in the order of the shards' numbers, of which shard_10 comes after shard_9;
 * FP8 as BF16 with the one factor; multipliers of more than 32 bits as they are. */
static void check_ngrams(const char *fixture, const char *path, size_t n_shard, size_t width, size_t n_multiplier) {
    struct hf h;
    char name[160];
    hf_load(&h, fixture);
    if (!hf_convert(&h)) return;
    const struct gguf_tensor *t = gguf_find_tensor(&h.g, "per_layer_token_embd.weight");
    const struct gguf_tensor *scale = gguf_find_tensor(&h.g, "per_layer_token_embd.scale");
    snprintf(name, sizeof name, "%s.ngram_embedding.weight_scale", path);
    const bool fp8 = hf_find(&h, name) != NULL;
    if (!CHECK(t && t->type == GGUF_BF16 && t->ne[0] == width && t->ne[1] % n_shard == 0, "%s: no table", fixture))
        return;
    CHECK(fp8 ? scale && f32_from_bits(gguf_rd32(scale->data)) == hf_float(&h, name, 0) : !scale, "%s: scale", fixture);
    const size_t each = (size_t)t->ne[1] / n_shard * width;
    size_t bad = 0;
    for (size_t i = 0; i < n_shard; i++) {
        snprintf(name, sizeof name, "%s.ngram_embedding.shard_%zu.weight", path, i);
        const struct hf_tensor *shard = hf_find(&h, name);
        for (size_t k = 0; k < each && CHECK(shard, "no %s", name); k++) {
            uint16_t bits;
            memcpy(&bits, t->data + 2 * (i * each + k), 2);
            bad += bf16_to_f32(bits) != (fp8 ? e4m3_to_f32(shard->data[k]) : hf_float(&h, name, k));
        }
    }
    CHECK(!bad, "%s: %zu values of the table differ", fixture, bad);
    snprintf(name, sizeof name, "%s.layer_multipliers", path);
    const struct hf_tensor *m = hf_find(&h, name);
    const struct gguf_kv *kv = gguf_find(&h.g, "qwen4exp.ple.layer_multipliers");
    CHECK(kv && kv->type == GGUF_V_U64 && kv->n == n_multiplier && m && arrlenu(m->data) == 8 * n_multiplier &&
              !memcmp(kv->data, m->data, 8 * n_multiplier),
          "%s: multipliers", fixture);
    hf_end(&h);
}

static void test_families_ngrams(void) {
    check_ngrams("qwen4_exp", "model.language_model.layers.1.ple.ple_embedding", 16, 8, 3);
    check_ngrams("qwen4_exp_nvfp4", "model.layers.0.ple.ple_embedding", 12, 16, 4);
}

#define TESTS_FAMILIES                                                                                        \
    {"families/keys", test_families_keys}, {"families/gpt_oss", test_families_gpt_oss},                       \
        {"families/pairs", test_families_pairs}, {"families/qkv", test_families_qkv},                         \
        {"families/stacks", test_families_stacks}, {"families/mxfp4", test_families_mxfp4},                   \
        {"families/prediction", test_families_prediction}, {"families/rope_freqs", test_families_rope_freqs}, \
        {"families/words", test_families_words}, {"families/left_out", test_families_left_out},               \
        {"families/counts", test_families_counts}, {"families/even_counts", test_families_even_counts},       \
        {"families/refusals", test_families_refusals}, {"families/limits", test_families_limits},             \
        {"families/numbers", test_families_numbers}, {"families/one_scale", test_families_one_scale},         \
        {"families/indexer", test_families_indexer}, {"families/mxfp8", test_families_mxfp8},                 \
        {"families/flat", test_families_flat}, {"families/v4", test_families_v4},                             \
        {"families/ngrams", test_families_ngrams}, {"families/joined", test_families_qwen4_joined},
