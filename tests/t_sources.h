/* build/moe-convert and build/moe-reap on directories as people have them: JSON as Python and editors write it, chat
 * templates in every place, weights with no index or another one, folders of the Hugging Face cache. */

/* A fixture with a change. The change is made by a shell in a copy of it, which can use:
 *   put FILE MEMBER..  writes a member of the outermost object, such as '"x": 1', in place of the one of that name
 *   inner MEMBER..     the same of text_config in config.json
 *   text FILE TEXT     writes a file as printf does
 *   mark FILE..        puts the byte-order mark of UTF-8 before a text */
struct source_case {
    const char *what, *fixture, *change;
    const char *says;   /* a part of stderr; NULL: nothing but the last line, of the file that was written */
    const char *key;    /* of the GGUF file; NULL: the directory is refused */
    const char *value;  /* of the key as key_text gives it; NULL: the file does not have the key */
    const char *source; /* the argument of the converter; NULL: the copy */
};

#define UTF8_MARK "\\357\\273\\277" /* of UTF-8, for printf */

static const char source_shell[] =
    "put() { f=$1; shift; for i; do k=${i%%:*}; sed -i -e \"/^ *$k:/d\" -e \"1s|^{|{ $i,|\" $f; done;\n"
    "  sed -i -z 's/,\\n}/\\n}/' $f; }\n"
    "inner() { for i; do k=${i%%:*}; sed -i \"/^    $k:/d; s|\\\"text_config\\\": {|&  $i,|\" config.json; done; }\n"
    "mark() { for i; do { printf '" UTF8_MARK "'; cat $i; } >m; mv m $i; done; }\n"
    "text() { printf \"$2\" >$1; }\n";

/* Converts the header of every source. */
static void sources_check(const struct source_case *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char cmd[2048], path[256], err[ERR_MAX], *said = NULL;
        struct gguf g = {0};
        snprintf(path, sizeof path, "%s/s.gguf", test_dir());
        snprintf(cmd, sizeof cmd,
                 "%sd=$PWD; f=tests/fixtures/%s; rm -rf %s/s; mkdir %s/s; cp $f/*.json $f/*.safetensors %s/s; cd %s/s\n"
                 "%s\ncd ..; HOME=$PWD exec $d/" CONVERT_BIN " %s --dry-run -o s.gguf",
                 source_shell, s[i].fixture, test_dir(), test_dir(), test_dir(), test_dir(), s[i].change,
                 s[i].source ? s[i].source : "s");
        const int rc = run_command(cmd, NULL, &said);
        sb_cstr(&said);
        const char *last = strstr(said, "moe-convert: 's.gguf'");
        CHECK(rc == !s[i].key, "%s: exit %d: %s", s[i].what, rc, said);
        CHECK(s[i].says ? strstr(said, s[i].says) != NULL : said == last, "%s: expected '%s': %s", s[i].what,
              s[i].says ? s[i].says : "", said);
        if (s[i].key && !rc && CHECK(!gguf_open_header(&g, path, err, sizeof err), "%s", err)) {
            CHECK(!gguf_find(&g, s[i].key) == !s[i].value, "%s: %s", s[i].what, s[i].key);
            if (s[i].value) CHECK_STR(key_text(&g, s[i].key), s[i].value, "%s: %s", s[i].what, s[i].key);
            gguf_close(&g);
        }
        unlink(path);
        arrfree(said);
    }
}

#define CHECK_SOURCES(...)                                     \
    do {                                                       \
        static const struct source_case all[] = {__VA_ARGS__}; \
        sources_check(all, sizeof all / sizeof *all);          \
    } while (0)

#define SOURCE_CONTEXT .key = "qwen3moe.context_length", .value = "4096"

/* The only line besides the last of the fixture with two files. */
#define SOURCE_ONLY                                                                                                   \
    "moe-convert: 4 tensors such as 'model.layers.0.self_attn.k_proj.k_scale' are left out: the cache of keys and "   \
    "values has scales of its own\nmoe-convert: 8 tensors such as 'model.layers.0.self_attn.q_proj.input_scale' are " \
    "left out: inputs of FP8 matrices are not rounded to FP8\nmoe-convert: 's.gguf'"

/* clang-format off */

/* What Python's json module reads, and what editors make of files. */
static void test_sources_json(void) {
    CHECK_SOURCES(
        {"no limit of transformers", "qwen3moe", "put tokenizer_config.json '\"model_max_length\": 1000000000000000019884624838656'", SOURCE_CONTEXT},
        {"large numbers", "qwen3moe", "put config.json '\"a\": -99999999999999999999' '\"b\": [9223372036854775808, 18446744073709551615]'", SOURCE_CONTEXT},
        {"large real number", "qwen3moe", "put config.json '\"a\": 1e400'", .says = "'config.json': line 1: 1e400 is read as 9e307", SOURCE_CONTEXT},
        {"negative infinity", "qwen3moe", "put config.json '\"a\": -Infinity' '\"b\": [NaN, NaN]'", .says = "line 1: NaN is read as null, and 2 more", SOURCE_CONTEXT},
        {"a number that is used", "qwen3moe", "put config.json '\"hidden_size\": 100000000000000000000'", .says = "'hidden_size': expected an integer from 1 to 2147483647, found 1e20"},
        {"infinity that is used", "qwen3moe", "put config.json '\"rms_norm_eps\": Infinity'", .says = "found Infinity"},
        {"NaN that is used", "qwen3moe", "put config.json '\"hidden_size\": NaN'", .says = "'hidden_size': expected an integer from 1 to 2147483647, found none"},
        {"words in a text", "qwen3moe", "put config.json '\"NaN\": \"NaN -Infinity 1e999 \\\\\"NaN\"'", SOURCE_CONTEXT},
        {"half of a pair", "qwen3moe", "put config.json '\"a\": \"\\\\ud83d\"'", .says = "\\ud83d is read as \\ufffd", SOURCE_CONTEXT},
        {"a pair", "qwen3moe", "put config.json '\"a\": \"\\\\ud83d\\\\ude00 \\\\\\\\ud83d\"'", SOURCE_CONTEXT},
        {"zero", "qwen3moe", "put config.json '\"a\": \"\\\\u0000\"'", .says = "\\u0000 is read as \\ufffd", SOURCE_CONTEXT},
        {"place of an error", "qwen3moe", "text config.json '{\\n\"a\": NaN, \"b\": 99999999999999999999,\\n\"c\": }'", .says = "unexpected token near '}' (line 3, column 6)"},
        {"whole numbers as reals", "qwen3moe", "put config.json '\"hidden_size\": 64.0' '\"num_experts\": 8.0' '\"vocab_size\": 5.12e2' '\"max_position_embeddings\": 4096.0'", SOURCE_CONTEXT},
        {"no whole number", "qwen3moe", "put config.json '\"hidden_size\": 64.5'", .says = "'hidden_size': expected an integer from 1 to 2147483647, found 64.5"},
        {"whole numbers in lists", "mimo_v2_flash", "sed -i -E '/hybrid_layer_pattern|moe_layer_freq/,/]/s/([01])(,?)$/\\1.0\\2/' config.json; grep -q '1.0,' config.json", .key = "mimo2.attention.sliding_window_pattern", .value = "0,1"},
        {"a list for a text", "step3p5", "sed -i -E 's/(\"moe_layers_enum\": )\"([0-9,]+)\"/\\1[\\2]/' config.json; grep -q '\\[1,' config.json", .key = "step35.leading_dense_block_count", .value = "1"},
        {"no limit of the context", "qwen3moe", "put config.json '\"max_position_embeddings\": 1e30'", .says = "'max_position_embeddings': 1e30 is read as 268435456", .key = "qwen3moe.context_length", .value = "2.684355e+08"},
        {"null", "qwen3moe", "put config.json '\"rms_norm_eps\": null' '\"tie_word_embeddings\": null' '\"decoder_sparse_step\": null' '\"hidden_act\": null' '\"rope_scaling\": null' '\"quantization_config\": null'", .key = "qwen3moe.attention.layer_norm_rms_epsilon", .value = "1e-06"},
        {"null for as many as heads", "olmoe", "put config.json '\"num_key_value_heads\": null'", .key = "olmoe.attention.head_count_kv", .value = "2"},
        {"0 and 1 for false and true", "qwen3moe", "put config.json '\"tie_word_embeddings\": 0' '\"norm_topk_prob\": 1' '\"use_sliding_window\": 0.0'", .key = "qwen3moe.expert_weights_norm", .value = "1"},
        {"window off", "mixtral", "put config.json '\"sliding_window\": -1'", .key = "llama.context_length", .value = "4096"},
        {"window off by 0", "mixtral", "put config.json '\"sliding_window\": 0'", .key = "llama.context_length", .value = "4096"},
        {"window off by false", "mixtral", "put config.json '\"sliding_window\": false'", .key = "llama.context_length", .value = "4096"},
        {"window of no limit", "mixtral", "put config.json '\"sliding_window\": 1e30'", .key = "llama.context_length", .value = "4096"},
        {"key that stands twice", "qwen3moe", "sed -i '1s/{/{\"a\": 1, \"a\": 2,/' config.json", .says = "line 1: duplicate object key near '\"a\"': the last one counts", SOURCE_CONTEXT},
        {"mark in config.json", "qwen3moe", "mark config.json", SOURCE_CONTEXT},
        {"mark in tokenizer.json", "qwen3moe", "mark tokenizer.json", SOURCE_CONTEXT},
        {"mark in tokenizer_config.json", "qwen3moe", "mark tokenizer_config.json", .key = "tokenizer.ggml.eos_token_id", .value = "509"},
        {"mark in the index", "qwen3moe_nvfp4", "mark model.safetensors.index.json hf_quant_config.json generation_config.json", .says = SOURCE_ONLY, SOURCE_CONTEXT},
        {"UTF-16", "qwen3moe", "text config.json '\\377\\376{\\0'", .says = "config.json' is UTF-16: save it as UTF-8"},
        {"UTF-16, the high byte first", "qwen3moe", "text tokenizer.json '\\376\\377\\0{'", .says = "tokenizer.json' is UTF-16"},
        {"UTF-16 without a mark", "qwen3moe", "text config.json '{\\0}\\0'", .says = "config.json' is UTF-16"},
        {"UTF-16 of defaults", "qwen3moe", "text generation_config.json '{\\0}\\0'", .says = "generation_config.json' is UTF-16: save it as UTF-8: it is not used", SOURCE_CONTEXT},
        {"empty config.json", "qwen3moe", ">config.json", .says = "config.json' is empty"},
        {"only a mark", "qwen3moe", "text config.json '" UTF8_MARK "'", .says = "config.json' is empty"},
        {"a list", "qwen3moe", "text config.json '[1]'", .says = "config.json': expected a JSON object, found [1]"},
        {"empty defaults", "qwen3moe", ">generation_config.json", .says = "generation_config.json' is empty: it is not used", .key = "tokenizer.ggml.eos_token_ids", .value = "509"},
        {"broken defaults", "qwen3moe", "text generation_config.json '{\"do_sample\": true,'", .says = "near end of file (line 1, column 19): it is not used", .key = "general.sampling.temp"},
        {"defaults that are a list", "qwen3moe", "text generation_config.json '[]'", .says = "expected a JSON object, found []: it is not used", SOURCE_CONTEXT},
        {"defaults that are null", "qwen3moe", "text generation_config.json null", .says = "it is not used", SOURCE_CONTEXT},
        {"broken tokenizer_config.json", "qwen3moe", "text tokenizer_config.json '{'", .says = "tokenizer_config.json': string or '}' expected near end of file (line 1, column 1): it is not used", .key = "tokenizer.ggml.eos_token_ids", .value = "509,507"},
        {"empty tokenizer_config.json", "qwen3moe", ">tokenizer_config.json", .says = "has no chat template", .key = "tokenizer.chat_template"},
        {"default of a wrong type", "qwen3moe", "put tokenizer_config.json '\"add_bos_token\": \"no\"'", .says = "'add_bos_token': expected true or false, found \"no\": it is not used", .key = "tokenizer.ggml.add_bos_token", .value = "0"},
        {"name of a wrong type", "qwen3moe", "put config.json '\"_name_or_path\": 7'", .key = "general.name", .value = "s"});
}

#define SOURCE_TEMPLATE "tokenizer.chat_template"
#define SOURCE_BARE     "sed -i '/\"chat_template\":/d' tokenizer_config.json; put tokenizer_config.json '\"x\": 0'; "

/* Where chat templates stand, and which one counts. */
static void test_sources_templates(void) {
    CHECK_SOURCES(
        {"chat_template.json", "qwen3moe", SOURCE_BARE "text chat_template.json '{\"chat_template\": \"J\"}'", .key = SOURCE_TEMPLATE, .value = "J"},
        {"its dictionary", "qwen3moe", SOURCE_BARE "text chat_template.json '{\"chat_template\": {\"default\": \"J\"}}'", .key = SOURCE_TEMPLATE, .value = "J"},
        {"processor_config.json", "qwen3moe", SOURCE_BARE "text processor_config.json '{\"chat_template\": \"P\"}'", .key = SOURCE_TEMPLATE, .value = "P"},
        {"chat_template.jinja", "qwen3moe", SOURCE_BARE "text chat_template.jinja 'X\\n'", .key = SOURCE_TEMPLATE, .value = "X\n"},
        {"a mark and Windows' ends of lines", "qwen3moe", SOURCE_BARE "text chat_template.jinja '" UTF8_MARK "a\\r\\nb\\rc\\n'", .key = SOURCE_TEMPLATE, .value = "a\nb\nc\n"},
        {"UTF-16", "qwen3moe", SOURCE_BARE "text chat_template.jinja '\\377\\376a\\0'", .says = "chat_template.jinja' is UTF-16: save it as UTF-8"},
        {"Latin-1", "qwen3moe", SOURCE_BARE "text chat_template.jinja 'caf\\351'", .says = "chat_template.jinja' is not UTF-8"},
        {"an empty file", "qwen3moe", "put tokenizer_config.json '\"chat_template\": \"T\"'; >chat_template.jinja", .key = SOURCE_TEMPLATE, .value = "T"},
        {"a dictionary", "qwen3moe", "put tokenizer_config.json '\"chat_template\": {\"default\": \"D\"}'", .key = SOURCE_TEMPLATE, .value = "D"},
        {"two in a dictionary", "qwen3moe", "put tokenizer_config.json '\"chat_template\": {\"tool_use\": \"U\", \"default\": \"D\"}'", .says = "tokenizer_config.json: left out: chat template 'tool_use'", .key = SOURCE_TEMPLATE, .value = "D"},
        {"three in a list", "qwen3moe", "put tokenizer_config.json '\"chat_template\": [{\"name\": \"rag\", \"template\": \"R\"}, {\"name\": \"tool_use\", \"template\": \"U\"}, {\"name\": \"default\", \"template\": \"D\"}]'", .says = "left out: chat templates 'rag', 'tool_use'", .key = SOURCE_TEMPLATE, .value = "D"},
        {"one with another name", "qwen3moe", "put tokenizer_config.json '\"chat_template\": [{\"name\": \"chat\", \"template\": \"C\"}]'", .key = SOURCE_TEMPLATE, .value = "C"},
        {"none is the default", "qwen3moe", "put tokenizer_config.json '\"chat_template\": {\"a\": \"A\", \"b\": \"B\"}'", .says = "left out: chat templates 'a', 'b' (none is named 'default')", .key = SOURCE_TEMPLATE},
        {"a number", "qwen3moe", "put tokenizer_config.json '\"chat_template\": 7'", .says = "'chat_template': expected a text, or texts with names, found 7: it is not used", .key = SOURCE_TEMPLATE},
        {"a number with a name", "qwen3moe", "put tokenizer_config.json '\"chat_template\": {\"default\": 7}'", .says = "'chat_template': expected a text as template", .key = SOURCE_TEMPLATE},
        {"null", "qwen3moe", "put tokenizer_config.json '\"chat_template\": null'; text chat_template.json '{\"chat_template\": \"J\"}'", .key = SOURCE_TEMPLATE, .value = "J"},
        {"an empty text", "qwen3moe", "put tokenizer_config.json '\"chat_template\": \"\"'; text chat_template.json '{\"chat_template\": \"J\"}'", .key = SOURCE_TEMPLATE, .value = "J"},
        {"the file counts", "qwen3moe", "put tokenizer_config.json '\"chat_template\": \"T\"'; text chat_template.jinja F", .says = "tokenizer_config.json has another chat template than chat_template.jinja, which is taken", .key = SOURCE_TEMPLATE, .value = "F"},
        {"then tokenizer_config.json", "qwen3moe", "put tokenizer_config.json '\"chat_template\": \"T\"'; text chat_template.json '{\"chat_template\": \"J\"}'", .says = "chat_template.json has another chat template than tokenizer_config.json, which is taken", .key = SOURCE_TEMPLATE, .value = "T"},
        {"the same twice", "qwen3moe", "put tokenizer_config.json '\"chat_template\": \"T\"'; text chat_template.json '{\"chat_template\": \"T\"}'", .key = SOURCE_TEMPLATE, .value = "T"},
        {"a broken one", "qwen3moe", "put tokenizer_config.json '\"chat_template\": \"T\"'; text chat_template.json '{'", .says = "chat_template.json': string or '}' expected near end of file (line 1, column 1): it is not used", .key = SOURCE_TEMPLATE, .value = "T"},
        {"additional ones", "qwen3moe", SOURCE_BARE "mkdir additional_chat_templates; text additional_chat_templates/tool_use.jinja U; text chat_template.jinja F", .says = "left out: chat template 'additional_chat_templates/tool_use.jinja'", .key = SOURCE_TEMPLATE, .value = "F"},
        {"an additional default", "qwen3moe", SOURCE_BARE "mkdir additional_chat_templates; text additional_chat_templates/default.jinja D; text chat_template.jinja F", .key = SOURCE_TEMPLATE, .value = "D"});
}

#define SOURCE_YARN(keys) "put config.json '\"rope_scaling\": {\"rope_type\": \"yarn\", " keys "}'"
#define SOURCE_ORIGINAL "qwen3moe.rope.scaling.original_context_length"
#define SOURCE_FACTOR   "qwen3moe.rope.scaling.factor"
#define SOURCE_BASE     "qwen3moe.rope.freq_base"

/* RoPE parameters in all forms that transformers' modeling_rope_utils.py takes. */
static void test_sources_rope(void) {
    CHECK_SOURCES(
        {"no original context", "qwen3moe", SOURCE_YARN("\"factor\": 4.0"), .key = SOURCE_ORIGINAL, .value = "4096"},
        {"a null", "qwen3moe", SOURCE_YARN("\"factor\": 4.0, \"original_max_position_embeddings\": null"), .key = SOURCE_ORIGINAL, .value = "4096"},
        {"its own", "qwen3moe", SOURCE_YARN("\"factor\": 4.0, \"original_max_position_embeddings\": 1024.0"), .key = SOURCE_ORIGINAL, .value = "1024"},
        {"that of config.json", "qwen3moe", SOURCE_YARN("\"factor\": 4.0, \"original_max_position_embeddings\": 1024") " '\"original_max_position_embeddings\": 2048'", .key = SOURCE_ORIGINAL, .value = "2048"},
        {"no factor", "qwen3moe", SOURCE_YARN("\"factor\": null, \"original_max_position_embeddings\": 1024"), .key = SOURCE_FACTOR, .value = "4"},
        {"the older name of the type", "qwen3moe", "put config.json '\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2}'", .key = SOURCE_FACTOR, .value = "2"},
        {"both names", "qwen3moe", "put config.json '\"rope_scaling\": {\"type\": \"dynamic\", \"rope_type\": \"yarn\", \"factor\": 2}'", .key = SOURCE_FACTOR, .value = "2"},
        {"the newer object", "qwen3moe", "put config.json '\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 5e6, \"factor\": 2}'", .key = SOURCE_BASE, .value = "5000000"},
        {"the older object counts", "qwen3moe", SOURCE_YARN("\"factor\": 4") " '\"rope_parameters\": {\"rope_type\": \"default\"}'", .says = "'rope_parameters' is not used: there is rope_scaling", .key = SOURCE_FACTOR, .value = "4"},
        {"unless it is empty", "qwen3moe", "put config.json '\"rope_scaling\": {}' '\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 8}'", .key = SOURCE_FACTOR, .value = "8"},
        {"null", "qwen3moe", "put config.json '\"rope_scaling\": null' '\"rope_parameters\": null'", .key = SOURCE_FACTOR},
        {"an unknown parameter", "qwen3moe", SOURCE_YARN("\"factor\": 4, \"finetuned\": true"), .says = "key 'rope_scaling.finetuned' is not used: it is not a parameter of 'yarn'", .key = SOURCE_FACTOR, .value = "4"},
        {"one of another type", "qwen3moe", "put config.json '\"rope_scaling\": {\"rope_type\": \"default\", \"mrope_section\": [1]}'", .says = "'rope_scaling.mrope_section' is not used: it is not a parameter of 'default'", .key = SOURCE_FACTOR},
        {"one that is null", "qwen3moe", SOURCE_YARN("\"factor\": 4, \"long_factor\": null"), .key = SOURCE_FACTOR, .value = "4"},
        {"all layers with full attention", "step3p5", "sed -i '/\"yarn_only_types\"/,/]/d' config.json; put config.json '\"yarn_only_types\": null'", .key = "step35.context_length", .value = "128"},
        {"without that key", "step3p5", "sed -i '/\"yarn_only_types\"/,/]/d' config.json", .key = "step35.context_length", .value = "128"},
        {"Llama 3 without an original context", "step3p5", "sed -i '/\"original_max_position_embeddings\"/d; s/\"high_freq_factor\": \\([0-9.]*\\),/\"high_freq_factor\": \\1/' config.json", .key = "step35.context_length", .value = "128"});
}

#define SOURCE_TOP_K "general.sampling.top_k"
#define SOURCE_TEMP  "general.sampling.temp"
#define SOURCE_STOPS "tokenizer.ggml.eos_token_ids"
#define SOURCE_SAMPLED "put generation_config.json '\"do_sample\": true' "

/* Defaults of sampling, and ids of tokens. */
static void test_sources_sampling(void) {
    CHECK_SOURCES(
        {"top-k off", "qwen3moe", SOURCE_SAMPLED "'\"temperature\": 0.7' '\"top_k\": -1'", .key = SOURCE_TOP_K, .value = "0"},
        {"top-k off by 0", "qwen3moe", SOURCE_SAMPLED "'\"top_k\": 0'", .key = SOURCE_TOP_K, .value = "0"},
        {"top-k off by false", "qwen3moe", SOURCE_SAMPLED "'\"top_k\": false'", .key = SOURCE_TOP_K, .value = "0"},
        {"top-k without a limit", "qwen3moe", SOURCE_SAMPLED "'\"top_k\": 1e30'", .key = SOURCE_TOP_K, .value = "2.147484e+09"},
        {"top-k as a real", "qwen3moe", SOURCE_SAMPLED "'\"top_k\": 20.0'", .key = SOURCE_TOP_K, .value = "20"},
        {"top-k of the default", "qwen3moe", SOURCE_SAMPLED "'\"top_k\": null'", .key = SOURCE_TOP_K},
        {"top-k of a wrong type", "qwen3moe", SOURCE_SAMPLED "'\"top_k\": \"all\"'", .says = "'top_k': expected an integer from 1 to 2147483647, found \"all\": it is not used", .key = SOURCE_TOP_K, .value = "0"},
        {"greedy", "qwen3moe", SOURCE_SAMPLED "'\"temperature\": 0'", .key = SOURCE_TEMP, .value = "0"},
        {"temperature below 0", "qwen3moe", SOURCE_SAMPLED "'\"temperature\": -1'", .says = "'temperature': expected a number from 0 to 100, found -1: it is not used", .key = SOURCE_TEMP},
        {"temperature that is infinite", "qwen3moe", SOURCE_SAMPLED "'\"temperature\": Infinity'", .says = "found Infinity: it is not used", .key = SOURCE_TEMP},
        {"temperature that is a text", "qwen3moe", SOURCE_SAMPLED "'\"temperature\": \"0.7\"'", .says = "found \"0.7\": it is not used", .key = SOURCE_TEMP},
        {"top-p above 1", "qwen3moe", SOURCE_SAMPLED "'\"top_p\": 1.5' '\"temperature\": 1'", .says = "'top_p': expected a number from 0 to 1, found 1.5: it is not used", .key = SOURCE_TEMP, .value = "1"},
        {"no sampling", "qwen3moe", "put generation_config.json '\"do_sample\": false' '\"temperature\": 0.5' '\"top_k\": 5'", .says = "key 'temperature' and 1 more are not used: do_sample is not true", .key = SOURCE_TEMP},
        {"nothing said of sampling", "qwen3moe", "put generation_config.json '\"top_k\": -1'", .says = "key 'top_k' is not used: do_sample is not true", .key = SOURCE_TOP_K},
        {"a wrong type of sampling", "qwen3moe", "put generation_config.json '\"do_sample\": \"yes\"'", .says = "'do_sample': expected true or false, found \"yes\": it is not used", .key = SOURCE_TEMP},
        {"what moe does not have", "qwen3moe", SOURCE_SAMPLED "'\"no_repeat_ngram_size\": 3' '\"num_beams\": 1' '\"typical_p\": 1.0' '\"suppress_tokens\": null'", .says = "key 'no_repeat_ngram_size' is not used\nmoe-convert: 's.gguf'", .key = SOURCE_TEMP},
        {"no padding", "qwen3moe", "put config.json '\"pad_token_id\": -1'; put tokenizer_config.json '\"pad_token\": null'", .key = "tokenizer.ggml.padding_token_id"},
        {"an end that is a real", "qwen3moe", "rm generation_config.json; put config.json '\"eos_token_id\": [508.0, null, -1]'", .key = SOURCE_STOPS, .value = "508,509"},
        {"an end beyond the vocabulary", "qwen3moe", "put config.json '\"eos_token_id\": 151645'", .says = "'eos_token_id': expected token ids below 512, found 151645: not used", .key = SOURCE_STOPS, .value = "509,507"},
        {"an end without a token", "qwen3moe", "put tokenizer_config.json '\"eos_token\": \"<none>\"'", .says = "'eos_token': expected a token of the vocabulary, found \"<none>\": not used", .key = SOURCE_STOPS, .value = "509,507"},
        {"a token of a wrong type", "qwen3moe", "put tokenizer_config.json '\"pad_token\": 5'", .says = "'pad_token': expected a token of the vocabulary, found 5: not used", .key = "tokenizer.ggml.padding_token_id", .value = "507"});
}

#define SOURCE_COMMIT "0123456789012345678901234567890123456789"
#define SOURCE_OTHER  "9876543210987654321098765432109876543210"
#define SOURCE_CACHE  "cd ..; rm -rf hub; r=hub/models--Org--Tiny-8x1B; mkdir -p $r/refs $r/snapshots $r/blobs; mv s $r/snapshots/" SOURCE_COMMIT "; printf " SOURCE_COMMIT " >$r/refs/main; mkdir s; cd s; "
#define SOURCE_ROOT   "hub/models--Org--Tiny-8x1B"
#define SOURCE_NAME .key = "general.name", .value = "Tiny-8x1B"

/* What is given in place of the directory. */
static void test_sources_places(void) {
    CHECK_SOURCES(
        {"a snapshot", "qwen3moe", SOURCE_CACHE, SOURCE_NAME, .source = SOURCE_ROOT "/snapshots/" SOURCE_COMMIT},
        {"the folder of a model", "qwen3moe", SOURCE_CACHE, .says = "'" SOURCE_ROOT "': taking the snapshot " SOURCE_COMMIT ", which refs/main names", SOURCE_NAME, .source = SOURCE_ROOT},
        {"with a slash", "qwen3moe", SOURCE_CACHE, .says = "taking the snapshot", SOURCE_NAME, .source = SOURCE_ROOT "/"},
        {"all snapshots", "qwen3moe", SOURCE_CACHE, .says = "taking the snapshot", SOURCE_NAME, .source = SOURCE_ROOT "/snapshots"},
        {"a file of the snapshot", "qwen3moe", SOURCE_CACHE, .says = "config.json' is a file: reading the directory '" SOURCE_ROOT "/snapshots/" SOURCE_COMMIT "'", SOURCE_NAME, .source = SOURCE_ROOT "/snapshots/" SOURCE_COMMIT "/config.json"},
        {"the weights", "qwen3moe", "true", .says = "'s/model.safetensors' is a file: reading the directory 's'", .key = "general.name", .value = "s", .source = "s/model.safetensors"},
        {"refs/main", "qwen3moe", SOURCE_CACHE, .says = "taking the snapshot", SOURCE_NAME, .source = SOURCE_ROOT "/refs/main"},
        {"the only snapshot", "qwen3moe", SOURCE_CACHE "rm -r ../" SOURCE_ROOT "/refs", .says = "taking the snapshot " SOURCE_COMMIT "\n", SOURCE_NAME, .source = SOURCE_ROOT},
        {"an end of a line", "qwen3moe", SOURCE_CACHE "printf '" SOURCE_COMMIT "\\n' >../" SOURCE_ROOT "/refs/main; mkdir ../" SOURCE_ROOT "/snapshots/" SOURCE_OTHER "; text ../" SOURCE_ROOT "/snapshots/" SOURCE_OTHER "/config.json '{}'", .says = "taking the snapshot " SOURCE_COMMIT, SOURCE_NAME, .source = SOURCE_ROOT},
        {"two snapshots", "qwen3moe", SOURCE_CACHE "rm ../" SOURCE_ROOT "/refs/main; mkdir ../" SOURCE_ROOT "/snapshots/" SOURCE_OTHER "; text ../" SOURCE_ROOT "/snapshots/" SOURCE_OTHER "/config.json '{}'", .says = "has 2 snapshots, and refs/main names none of them: type " SOURCE_ROOT "/snapshots/" SOURCE_OTHER " or another", .source = SOURCE_ROOT},
        {"no snapshot", "qwen3moe", SOURCE_CACHE "rm ../" SOURCE_ROOT "/snapshots/*/config.json", .says = "has no snapshot with a config.json: complete it with: hf download Org/Tiny-8x1B", .source = SOURCE_ROOT},
        {"the cache", "qwen3moe", SOURCE_CACHE, .says = "'hub' is the cache of Hugging Face: type hub/models--Org--Tiny-8x1B\n", .source = "hub"},
        {"the folder above it", "qwen3moe", SOURCE_CACHE "mkdir ../hub/models--Org--Other", .says = "type ./hub/models--Org--Other or another", .source = "."},
        {"the name of a model", "qwen3moe", "true", .says = "'Org/Tiny' is not a directory; download the model with: hf download Org/Tiny --local-dir Tiny", .source = "Org/Tiny"},
        {"the name of a model that the cache has", "qwen3moe", SOURCE_CACHE "mkdir -p ../.cache/huggingface; cp -r ../hub ../.cache/huggingface", .says = ".cache/huggingface/hub/models--Org--Tiny-8x1B\n", .source = "Org/Tiny-8x1B"},
        {"the directory above", "qwen3moe", "rm -rf ../hub; mkdir m; mv *.json *.safetensors m", .says = "'s' has no config.json; type: s/m\n", .source = "s"},
        {"GGUF files", "qwen3moe", "rm *; text m.gguf GGUF", .says = "its GGUF files need no conversion: moe -m s/m.gguf", .source = "s"},
        {"a GGUF file", "qwen3moe", "text m.gguf GGUF", .says = "'s/m.gguf' is a GGUF file already: moe -m s/m.gguf", .source = "s/m.gguf"},
        {"nothing", "qwen3moe", "true", .says = "cannot open 'nothing': No such file or directory", .source = "nothing"});
}

/* Which files of weights are read. */
static void test_sources_files(void) {
    CHECK_SOURCES(
        {"shards without an index", "qwen3moe_nvfp4", "rm *.index.json", .says = SOURCE_ONLY, SOURCE_CONTEXT},
        {"other names without an index", "qwen3moe_nvfp4", "rm *.index.json; mv model-00001-of-00002.safetensors a.safetensors; mv model-00002-of-00002.safetensors b.safetensors", .says = SOURCE_ONLY, SOURCE_CONTEXT},
        {"files that are counted with more digits", "qwen3moe_nvfp4", "rm *.index.json; mv model-00001-of-00002.safetensors model-00001-of-000002.safetensors; mv model-00002-of-00002.safetensors model-00002-of-000002.safetensors", .says = SOURCE_ONLY, SOURCE_CONTEXT},
        {"a set without one of its files", "qwen3moe_nvfp4", "rm *.index.json model-00001-of-00002.safetensors", .says = "'model-00001-of-00002.safetensors' is missing, of 2 files: the download of 's' is incomplete"},
        {"Mistral's files beside them", "qwen3moe_nvfp4", "rm *.index.json; cp model-00001-of-00002.safetensors consolidated-00001-of-00001.safetensors", .says = "'consolidated-00001-of-00001.safetensors' is not read: names of Mistral's own", SOURCE_CONTEXT},
        {"Mistral's files beside an index", "qwen3moe_nvfp4", "cp model-00001-of-00002.safetensors consolidated.safetensors", .says = "'consolidated.safetensors' is not read: the index does not name it", SOURCE_CONTEXT},
        {"an adapter beside them", "qwen3moe", "mv model.safetensors weights.safetensors; cp weights.safetensors adapter_model.safetensors", .says = "'adapter_model.safetensors' is not read: a LoRA adapter, which is not merged", SOURCE_CONTEXT},
        {"an index of files that are gone", "qwen3moe_nvfp4", "mv model-00001-of-00002.safetensors model-1-of-2.safetensors; mv model-00002-of-00002.safetensors model-2-of-2.safetensors", .says = "names 'model-00001-of-00002.safetensors' and other files that 's' does not have: it is not used", SOURCE_CONTEXT},
        {"an index of PyTorch's files", "qwen3moe", "mv model.safetensors weights.safetensors; text model.safetensors.index.json '{\"weight_map\": {\"a\": \"pytorch_model.bin\"}}'", .says = "it is not used", SOURCE_CONTEXT},
        {"one file and an index of others", "qwen3moe", "text model.safetensors.index.json '{\"weight_map\": {\"a\": \"model-00001-of-00002.safetensors\"}}'", .says = "model.safetensors.index.json names other files than 'model.safetensors': it is not used", SOURCE_CONTEXT},
        {"one file and others", "qwen3moe", "cp model.safetensors model-00001-of-00002.safetensors", .says = "'model-00001-of-00002.safetensors' is not read: 'model.safetensors' is there", SOURCE_CONTEXT},
        {"a file of the index is missing", "qwen3moe_nvfp4", "rm model-00002-of-00002.safetensors", .says = "'model-00002-of-00002.safetensors' is missing, of 2 files that model.safetensors.index.json names: the download of 's' is incomplete"},
        {"a link to nothing", "qwen3moe", "rm model.safetensors; ln -s none model.safetensors", .says = "'s/model.safetensors' is a link to a file that is missing: the download is incomplete"},
        {"only Mistral's files", "qwen3moe", "mv model.safetensors consolidated.safetensors", .says = "another safetensors file of a whole model with transformers' names"},
        {"a broken index", "qwen3moe_nvfp4", "text model.safetensors.index.json '{\"weight_map\": {'", .says = "model.safetensors.index.json': string or '}' expected near end of file (line 1, column 16): it is not used", SOURCE_CONTEXT},
        {"an index without a map", "qwen3moe_nvfp4", "text model.safetensors.index.json '{\"metadata\": {}}'", .says = "model.safetensors.index.json has no weight_map: it is not used", SOURCE_CONTEXT},
        {"an index that is a list", "qwen3moe_nvfp4", "text model.safetensors.index.json '{\"weight_map\": []}'", .says = "'weight_map': expected an object, found []: it is not used", SOURCE_CONTEXT},
        {"Git's pointer", "qwen3moe_nvfp4", "text model-00001-of-00002.safetensors 'version https://git-lfs.github.com/spec/v1\\noid sha256:1\\nsize 3\\n'", .says = "is a Git LFS pointer: run git lfs pull"},
        {"PyTorch's file", "qwen3moe", "rm model.safetensors; text pytorch_model.bin x", .says = "'s' has pytorch_model.bin and no safetensors file: save the model as safetensors first"},
        {"a GGUF file", "qwen3moe", "rm model.safetensors; text a.gguf x", .says = "'s' has GGUF files and no safetensors file: moe -m s/a.gguf"},
        {"a file that is not whole", "qwen3moe", "mv model.safetensors model.safetensors.incomplete", .says = "the download of 'model.safetensors.incomplete' is incomplete"},
        {"no file", "qwen3moe", "rm model.safetensors", .says = "'s' has neither model.safetensors nor another safetensors file"});
}

/* clang-format on */

/* Writes the tensors of h as two files, and an index. */
static void sources_shards(struct hf *h) {
    const size_t n = arrlenu(h->t), half = n / 2;
    json_t *map = json_object(), *index = json_pack("{s:o}", "weight_map", map);
    for (size_t i = 0; i < n; i++)
        json_object_set_new(map, h->t[i].name, json_string(i < half ? "a.safetensors" : "b.safetensors"));
    hf_shard(h, "a.safetensors", 0, half);
    hf_shard(h, "b.safetensors", half, n);
    hf_json(h, "model.safetensors.index.json", index);
    json_decref(index);
}

/* Tensors that are not where the index says, or more than once, and those that nothing needs. */
static void test_sources_tensors(void) {
    static const struct {
        const char *what, *first, *second; /* a tensor at the beginning of the first file, at the end of the second */
        bool listed, another;              /* the index names them; the second has another value */
        const char *says[2];
        int rc;
    } c[] = {{"twice",
              "model.norm.weight",
              "model.norm.weight",
              true,
              false,
              {"1 tensor is there twice with the same bytes"},
              0},
             {"twice, unlisted",
              "model.norm.weight",
              NULL,
              false,
              false,
              {"'model.norm.weight' in 'a.safetensors' and 'b.safe"},
              0},
             {"twice, different",
              "model.norm.weight",
              "model.norm.weight",
              true,
              true,
              {"tensor 'model.norm.weight': also in '"},
              1},
             {"frequencies",
              "model.layers.0.self_attn.rotary_emb.inv_freq",
              NULL,
              false,
              false,
              {"'model.layers.0.self_attn.rotary_emb.inv_freq': the index does not list it",
               "'model.layers.0.self_attn.rotary_emb.inv_freq' is left out: frequencies follow from config.json"},
              0},
             {"frequencies in both",
              "model.layers.0.self_attn.rotary_emb.inv_freq",
              "model.layers.1.self_attn.rotary_emb.inv_freq",
              true,
              false,
              {"2 tensors such as 'model.layers.0.self_attn.rotary_emb.inv_freq' are left out"},
              0},
             {"scales of the cache",
              "model.layers.0.self_attn.k_scale",
              "model.layers.0.self_attn.v_proj.output_scale",
              true,
              false,
              {"2 tensors such as 'model.layers.0.self_attn.k_scale' are left out: the cache of keys and values has"},
              0},
             {"unlisted and needed by nothing",
              NULL,
              "model.layers.0.self_attn.sinks",
              false,
              false,
              {"nothing in qwen3moe uses it"},
              1}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        hf_begin(&h, "tensors");
        hf_qwen3(&h);
        const struct hf_tensor norm = *hf_find(&h, "model.norm.weight");
        if (c[i].first && !strcmp(c[i].first, norm.name)) hf_drop(&h, norm.name);
        const uint8_t data[2 * HF_EMBD] = {0}, other[2 * HF_EMBD] = {1};
        if (!c[i].listed) {
            if (c[i].first && !strcmp(c[i].first, norm.name)) hf_add(&h, norm.name, "BF16", "[64]", data, sizeof data);
            sources_shards(&h);
        }
        if (c[i].first) hf_add(&h, c[i].first, "BF16", "[64]", data, sizeof data);
        for (size_t k = arrlenu(h.t) - 1; c[i].first && k; k--) {
            const struct hf_tensor t = h.t[k];
            h.t[k] = h.t[k - 1];
            h.t[k - 1] = t;
        }
        if (c[i].second) hf_add(&h, c[i].second, "BF16", "[64]", c[i].another ? other : data, sizeof data);
        if (c[i].listed) sources_shards(&h);
        else {
            hf_shard(&h, "a.safetensors", 0, arrlenu(h.t) / 2);
            hf_shard(&h, "b.safetensors", arrlenu(h.t) / 2, arrlenu(h.t));
        }
        const int rc = hf_run(&h, "--dry-run");
        CHECK(rc == c[i].rc, "%s: exit %d: %s", c[i].what, rc, h.err);
        for (int k = 0; k < 2 && c[i].says[k]; k++) CHECK_HAS(h.err, c[i].says[k], "%s", c[i].what);
        hf_end(&h);
    }
}

/* The output matrix: config.json says that it is the embedding, in either object, or not; it is there, or not. */
static void test_sources_head(void) {
    static const char tied[] =
        "'lm_head.weight' is missing: it is the embedding, as 'tie_word_embeddings' of text_config";
    static const char missing[] = "tensor 'lm_head.weight' is missing, and config.json does not say that it is the "
                                  "embedding: key 'tie_word_embeddings': ";
    static const struct {
        const char *outer, *inner; /* values of tie_word_embeddings; NULL: none */
        enum { OWN, COPY, NONE, ALONE /* there is no embedding */ } head;
        bool kept; /* in the GGUF file */
        const char *says;
    } c[] = {{NULL, NULL, OWN, true, NULL},
             {"false", "false", OWN, true, NULL},
             {"false", "true", OWN, true, "'lm_head.weight' is used: it is not the embedding"},
             {"true", "false", OWN, true, "'lm_head.weight' is used: it is not the embedding"},
             {"true", NULL, OWN, true, "'lm_head.weight' is used: it is not the embedding"},
             {NULL, "true", OWN, true, "'lm_head.weight' is used: it is not the embedding"},
             {"null", "null", OWN, true, NULL},
             {"false", "false", COPY, true, NULL},
             {"true", "true", COPY, false, "'lm_head.weight' is left out: it is a copy of the embedding"},
             {"true", "false", COPY, false, "'lm_head.weight' is left out: it is a copy of the embedding"},
             {"false", "true", COPY, false, "'lm_head.weight' is left out: it is a copy of the embedding"},
             {"true", "true", NONE, false, NULL},
             {"true", NULL, NONE, false, NULL},
             {NULL, "true", NONE, false, NULL},
             {"false", "true", NONE, false, tied},
             {"true", "false", ALONE, false, "has no embedding: it is 'lm_head.weight', as 'tie_word"},
             {"false", "true", ALONE, false, "has no embedding: it is 'lm_head.weight', as 'tie_word"},
             {"false", "false", NONE, false, missing},
             {NULL, NULL, NONE, false, missing}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct hf h;
        hf_load(&h, "qwen3_5_moe");
        json_t *at[] = {h.config, json_object_get(h.config, "text_config")};
        const char *const says[] = {c[i].outer, c[i].inner};
        for (int k = 0; k < 2; k++) {
            json_object_del(at[k], "tie_word_embeddings");
            if (says[k]) json_object_set_new(at[k], "tie_word_embeddings", json_loads(says[k], JSON_DECODE_ANY, NULL));
        }
        struct hf_tensor *head = hf_find(&h, "lm_head.weight");
        const struct hf_tensor *embd = hf_find(&h, "model.language_model.embed_tokens.weight");
        if (!CHECK(head && embd && arrlen(head->data) == arrlen(embd->data), "the fixture")) return;
        if (c[i].head == COPY) memcpy(head->data, embd->data, arrlenu(embd->data));
        if (c[i].head == NONE) hf_drop(&h, "lm_head.weight");
        if (c[i].head == ALONE) hf_drop(&h, "model.language_model.embed_tokens.weight");
        if (c[i].says == missing) {
            const int rc = hf_convert_to(&h, "out.gguf");
            CHECK(rc == 1 && strstr(h.err, missing), "row %zu: exit %d: %s", i, rc, h.err);
        } else if (hf_convert(&h)) {
            CHECK(!gguf_find_tensor(&h.g, "output.weight") == !c[i].kept, "row %zu", i);
            const struct gguf_tensor *t = gguf_find_tensor(&h.g, "token_embd.weight");
            const struct hf_tensor *of =
                hf_find(&h, c[i].head == ALONE ? "lm_head.weight" : "model.language_model.embed_tokens.weight");
            CHECK(t && of && t->bytes == arrlenu(of->data) && !memcmp(t->data, of->data, t->bytes), "row %zu", i);
            CHECK(c[i].says ? strstr(h.err, c[i].says) != NULL : !strstr(h.err, "lm_head"), "row %zu: %s", i, h.err);
        }
        hf_end(&h);
    }
}

/* moe-reap reads the same forms; what it writes is whole, with an index of what is there. */
static void test_sources_reap(void) {
    static const struct {
        const char *what, *change, *says;
        bool index; /* the output has one */
    } c[] = {{"no index", "rm s/*.index.json", NULL, true},
             {"other files", "rm s/*.index.json; cp s/model-00001-of-00002.safetensors s/consolidated.safetensors",
              "consolidated.safetensors' is not read: not copied", true},
             {"a wrong index", "sed -i '0,/model-00001/s//model-00002/' s/*.index.json", "the index names another file",
              true},
             {"a mark and large numbers",
              "sed -i '1s/^{/\\xef\\xbb\\xbf{\"a\": 1000000000000000019884624838656,/' s/config.json", NULL, true},
             {"a file of it", "true", NULL, true}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char cmd[1024], *said = NULL, *listed = NULL;
        snprintf(cmd, sizeof cmd,
                 "d=$PWD; cd %s && rm -rf s o && mkdir s && cp $d/tests/fixtures/qwen3moe_nvfp4/*.json "
                 "$d/tests/fixtures/qwen3moe_nvfp4/*.safetensors s && { %s; } && "
                 "$d/" REAP_BIN " s%s -o o --criterion random --keep 5 && $d/" CONVERT_BIN " o --dry-run >/dev/null && "
                 "ls o >list",
                 test_dir(), c[i].change, i == 4 ? "/config.json" : "");
        const int rc = run_command(cmd, NULL, &said);
        CHECK(!rc && (!c[i].says || strstr(sb_cstr(&said), c[i].says)), "%s: exit %d: %s", c[i].what, rc,
              sb_cstr(&said));
        snprintf(cmd, sizeof cmd, "cat %s/list; rm -rf %s/s %s/o %s/list", test_dir(), test_dir(), test_dir(),
                 test_dir());
        run_command(cmd, &listed, NULL);
        CHECK(!strstr(sb_cstr(&listed), "index.json") == !c[i].index && !strstr(listed, "consolidated"), "%s: %s",
              c[i].what, listed);
        arrfree(said), arrfree(listed);
    }
}

#define TESTS_SOURCES                                                                     \
    {"sources/json", test_sources_json}, {"sources/templates", test_sources_templates},   \
        {"sources/rope", test_sources_rope}, {"sources/sampling", test_sources_sampling}, \
        {"sources/places", test_sources_places}, {"sources/files", test_sources_files},   \
        {"sources/tensors", test_sources_tensors}, {"sources/head", test_sources_head},   \
        {"sources/reap", test_sources_reap},
