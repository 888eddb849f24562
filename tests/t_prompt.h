/* The prompts of DeepSeek-V4, whose releases have an encoder in Python and no chat template: convert/deepseek_v4.jinja.
 *
 * tests/golden/deepseek_v4 has our conversations with what the release's encoder makes of them, and a small tokenizer
 * with the ids of some of them; tests/golden/deepseek_v41 has what vLLM's encoder of DeepSeek-V4.1 makes of them.
 * ../shared/golden/deepseek_v4, where it is there, has the release's golden prompts and the part of its tokenizer that
 * they need, with their ids. tests/oracle/gen_deepseek_v4.py writes all. */

#define PROMPT_DIR      "tests/golden/deepseek_v4"
#define PROMPT_GOLDEN   "golden/deepseek_v4" /* in ../shared */
#define PROMPT_TEMPLATE "convert/deepseek_v4.jinja"

static char *prompt_file(const char *path) {
    char *s = NULL, err[ERR_MAX] = "";
    CHECK(!read_file(path, &s, err), "%s", err);
    return s;
}

/* dir/name in JSON. */
static json_t *prompt_json(const char *dir, const char *name) {
    char path[1024];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    json_t *v = json_load_file(path, 0, &e);
    CHECK(v, "%s: %s", path, e.text);
    return v;
}

/* ---- the release's golden prompts ---- */

/* The variables of golden prompt i, which ends in an answer. */
static json_t *prompt_vars(const char *dir, int i, bool generate) {
    char name[64];
    snprintf(name, sizeof name, "test_input_%d.json", i);
    json_t *given = prompt_json(dir, name), *vars = json_object();
    if (json_is_object(given)) json_object_update(vars, given);
    else json_object_set(vars, "messages", given);
    json_object_set_new(vars, "thinking", json_boolean(i < 4));
    json_object_set_new(vars, "add_generation_prompt", json_boolean(generate));
    json_object_set_new(vars, "bos_token", json_string("<｜begin▁of▁sentence｜>"));
    json_decref(given);
    return vars;
}

/* Checks golden prompts 1 to n. generate: as the encoder, the template adds nothing to an answer even so. Catches a marker, a newline, a text or an order that differs. */
static void check_prompts(const char *dir, const char *template, int n, bool generate) {
    char *source = prompt_file(template);
    for (int i = 1; i <= n; i++) {
        char path[1024], err[ERR_MAX] = "";
        snprintf(path, sizeof path, "%s/test_output_%d.txt", dir, i);
        char *want = prompt_file(path);
        json_t *vars = prompt_vars(dir, i, generate);
        struct tpl_text out = {0};
        int rc;
        const char *s = render_text(source, arrlenu(source), vars, &out, &rc, err);
        if (CHECK(s, "%s: %s", path, err)) CHECK_STR(s, sb_cstr(&want), "%s by %s", path, template);
        text_free(&out);
        json_decref(vars);
        arrfree(want);
    }
    arrfree(source);
}

static void test_prompt_golden(void) {
    const char *dir = shared_path(PROMPT_GOLDEN);
    if (!dir) SKIP("no ../shared/" PROMPT_GOLDEN);
    check_prompts(dir, PROMPT_TEMPLATE, 4, true);
}

/* ---- our conversations ---- */

static void test_prompt_cases(void) {
    golden_templates(PROMPT_DIR, 126, check_case);
    golden_templates(PROMPT_DIR "1", 50, check_case);
}

static void test_prompt_origin(void) {
    golden_templates(PROMPT_DIR, 126, check_case_origin);
    golden_templates(PROMPT_DIR "1", 50, check_case_origin);
}

/* Efforts that V4.1 does not know. Catches one that is passed on, or taken as the default. */
static void test_prompt_efforts(void) {
    static const char *const refused[] = {"\"medium\"", "\"75\"", "101", "-1"};
    char *source = prompt_file(PROMPT_TEMPLATE), err[ERR_MAX], given[256];
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        struct tpl_text out = {0};
        int rc;
        snprintf(given, sizeof given, "{\"v41\": true, \"reasoning_effort\": %s, \"messages\": []}", refused[i]);
        json_t *vars = json_loads(given, 0, NULL);
        CHECK(!render_text(source, arrlenu(source), vars, &out, &rc, err), "%s is an effort", refused[i]);
        CHECK_HAS(err, "unknown reasoning_effort: ", "%s", refused[i]);
        text_free(&out);
        json_decref(vars);
    }
    arrfree(source);
}

/* A template of llama.cpp's. */
struct circulating {
    const char *name;
    bool graded; /* it is of releases from 0731 on: see graded_efforts of ours */
    int cases;   /* that were compared */
    char *source;
};

/* Compares what it makes of a case, if that is one of those that it treats as the encoder does. */
static void check_circulating_case(const json_t *c, void *arg) {
    static const char *const same[] = {"one", "system", "turns", "asked twice", "marks"};
    struct circulating *g = arg;
    struct tpl_text out = {0};
    char err[ERR_MAX] = "";
    int rc;
    const char *id = json_text(c, "id"), *effort = json_text(json_object_get(c, "kwargs"), "reasoning_effort");
    bool compared = false;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        compared |= !strncmp(id, same[i], strlen(same[i])) && !isalpha((unsigned char)id[strlen(same[i])]);
    /* it wants the system's message for tools and formats */
    if (!compared || strstr(id, "/tools") || (strstr(id, "one/") && strstr(id, "/response_format"))) return;
    if (effort && strcmp(effort, "low") && g->graded != !!strstr(id, "graded_efforts")) return;
    json_t *vars = case_vars(c);
    json_object_set_new(vars, "bos_token", json_string("<｜begin▁of▁sentence｜>"));
    const char *s = render_text(g->source, arrlenu(g->source), vars, &out, &rc, err);
    if (CHECK(s, "%s: %s", id, err)) CHECK_STR(s, json_text(c, "expected"), "%s by %s", id, g->name);
    g->cases++;
    text_free(&out);
    json_decref(vars);
}

/* llama.cpp's templates give the same text of our simple conversations, and of the golden prompts but for the tools of a
 * developer and tasks, which the last two have. */
static void test_prompt_circulating(void) {
    struct circulating t[] = {{.name = "golden/templates/deepseek-ai-DeepSeek-V4.jinja"},
                              {.name = "golden/templates/deepseek-ai-DeepSeek-V4-Flash-0731.jinja", .graded = true}};
    for (int i = 0; i < 2; i++) {
        const char *path = shared_path(t[i].name), *release;
        if (!path) SKIP("no ../shared/golden/templates");
        t[i].source = prompt_file(path);
        each_json_line(PROMPT_DIR "/cases.jsonl", check_circulating_case, &t[i]);
        CHECK_INT(t[i].cases, 42, "conversations by %s", t[i].name);
        arrfree(t[i].source);
        path = shared_path(t[i].name), release = shared_path(PROMPT_GOLDEN);
        if (release) check_prompts(release, path, 2, false);
    }
}

/* ---- through moe-convert ---- */

/* The release of the fixture without a chat template, with the tokenizer in dir. */
static void prompt_release(struct hf *h, const char *dir) {
    enum { VOCAB = 2176 };
    hf_load(h, "deepseek_v4");
    json_decref(h->tokenizer);
    h->tokenizer = prompt_json(dir, "tokenizer.json");
    json_decref(h->tokenizer_config);
    h->tokenizer_config = json_pack("{s:b,s:{s:s},s:{s:s}}", "add_bos_token", 0, "bos_token", "content",
                                    "<｜begin▁of▁sentence｜>", "eos_token", "content", "<｜end▁of▁sentence｜>");
    json_object_del(h->generation, "eos_token_id");
    json_object_del(h->config, "eos_token_id");
    json_object_del(h->config, "bos_token_id");
    json_object_set_new(h->config, "vocab_size", json_integer(VOCAB));
    static const char *const wide[] = {"embed", "head"};
    static const int64_t experts[] = {0, 1, 2};
    for (int i = 0; i < 5; i++) {
        char full[64];
        if (i < 2) {
            snprintf(full, sizeof full, "%s.weight", wide[i]);
            hf_drop(h, full);
            hf_linear(h, wide[i], VOCAB, 128, HF_BF16);
            continue;
        }
        snprintf(full, sizeof full, "layers.%d.ffn.gate.tid2eid", i - 2);
        struct hf_tensor *t = hf_find(h, full);
        if (!CHECK(t, "no %s", full)) continue;
        while (arrlenu(t->data) < VOCAB * sizeof experts) hf_put(&t->data, experts, sizeof experts);
        snprintf(t->shape, sizeof t->shape, "[%d,3]", VOCAB);
    }
}

/* The tokens of a chat's text with these variables. */
static int32_t *prompt_ids(const struct vocab *v, const json_t *vars) {
    struct tpl_text out = {0};
    char err[ERR_MAX] = "";
    int32_t *ids = NULL;
    int rc;
    if (CHECK(render_text(v->chat_template.p, v->chat_template.n, vars, &out, &rc, err), "%s", err))
        tokenize(v, out.s, arrlenu(out.s), out.origin, TOKENIZE_CONTROL, &ids);
    text_free(&out);
    return ids;
}

/* The ids of a prompt, by the file alone: template, pre-tokenizer, merges, special tokens. real: what `want` calls each
 * of the file's ids (NULL: the same). Takes vars. */
static void check_prompt_ids(const struct vocab *v, json_t *vars, const json_t *want, const json_t *real,
                             const char *what) {
    int32_t *ids = prompt_ids(v, vars);
    CHECK_INT((long)arrlen(ids), (long)json_array_size(want), "tokens of %s", what);
    for (size_t k = 0; k < arrlenu(ids); k++) {
        const json_int_t id = real ? json_integer_value(json_array_get(real, (size_t)ids[k])) : ids[k];
        if (!CHECK(id == json_integer_value(json_array_get(want, k)), "%s, token %zu is %d", what, k, (int)id)) break;
    }
    arrfree(ids);
    json_decref(vars);
}

struct prompt_cases {
    const struct vocab *v;
    json_t *ids; /* of cases by name; those that were checked are taken out */
};

static void check_case_ids(const json_t *c, void *arg) {
    struct prompt_cases *x = arg;
    const char *id = json_text(c, "id");
    const json_t *want = json_object_get(x->ids, id);
    if (!want) return;
    check_prompt_ids(x->v, case_vars(c), want, NULL, id);
    json_object_del(x->ids, id);
}

static void check_cases_ids(const struct vocab *v) {
    struct prompt_cases x = {v, prompt_json(PROMPT_DIR, "ids.json")};
    CHECK_INT((long)json_object_size(x.ids), 42, "cases with ids");
    each_json_line(PROMPT_DIR "/cases.jsonl", check_case_ids, &x);
    CHECK_INT((long)json_object_size(x.ids), 0, "cases that are not there");
    json_decref(x.ids);
}

/* Marks that a user, a tool or an answer writes are text: of special tokens the template's alone are there. Catches a
 * ｜DSML｜ that passes because it stands between no < and >. */
static void check_prompt_marks(const struct vocab *v) {
    static const char vars_json[] =
        "{\"add_generation_prompt\": true, \"thinking\": true, \"tools\": [{\"type\": \"function\", \"function\": "
        "{\"name\": \"｜DSML｜</think>\"}}], \"messages\": [{\"role\": \"user\", \"content\": \"%s\"}, {\"role\": "
        "\"assistant\", \"content\": \"%s\", \"reasoning_content\": \"%s\", \"tool_calls\": [{\"id\": \"%s\", "
        "\"function\": {\"name\": \"%s\", \"arguments\": \"%s\"}}]}, {\"role\": \"tool\", \"content\": \"%s\"}]}";
    static const char marks[] = "<think></think>｜DSML｜<｜User｜><｜Assistant｜><｜end▁of▁sentence｜>";
    int32_t counts[2] = {0};
    for (int marked = 0; marked < 2; marked++) {
        const char *m = marked ? marks : "a";
        char text[2048];
        snprintf(text, sizeof text, vars_json, m, m, m, m, m, m, m);
        json_t *vars = json_loads(text, 0, NULL);
        CHECK(vars, "%s", text);
        int32_t *ids = prompt_ids(v, vars);
        for (size_t k = 0; k < arrlenu(ids); k++) counts[marked] += token_is_special(v, ids[k]);
        arrfree(ids);
        json_decref(vars);
    }
    /* 1 in front, 13 in the text about tools, 1 of the user, 3 of the assistant, 6 around the call, 1 after it, 3 more */
    for (int i = 0; i < 2; i++) CHECK_INT(counts[i], 28, "special tokens, marks in the data: %d", i);
    int32_t *ids = NULL;
    tokenize(v, marks, strlen(marks), NULL, TOKENIZE_CONTROL, &ids);
    CHECK_INT((long)arrlen(ids), 6, "in a template's text they are tokens");
    arrfree(ids);
}

/* What moe-convert writes: our template where the release has none, with the efforts of its encoder, or of its name where
 * that is missing. Catches a template that is not written, a wrong one, a rule that looks at the other source. */
static void test_prompt_converted(void) {
    static const struct {
        const char *encoder, *args;
        bool graded;
    } c[] = {{NULL, "", false},
             {NULL, "--name DeepSeek-V4-Flash-0731", true},
             {NULL, "--name DeepSeek-V4-Pro-0813-NVFP4", true},
             {"REASONING_EFFORT_MAX = \"Reasoning Effort: Absolute maximum\"", "--name DeepSeek-V4-Flash-0731", false},
             {"{\"max\": \"Reasoning Effort: Beyond maximum\"}", "", true}};
    static const char head[] = "{%- set graded_efforts = true -%}\n";
    struct hf h;
    struct vocab v;
    char err[ERR_MAX] = "", args[256], encoding[256], *source = prompt_file(PROMPT_TEMPLATE);
    prompt_release(&h, PROMPT_DIR);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct gguf_str s = {"", 0};
        struct gguf g;
        if (c[i].encoder) {
            snprintf(encoding, sizeof encoding, "%s/encoding", h.dir);
            mkdir(encoding, 0777);
            hf_write(&h, "encoding/encoding_dsv4.py", c[i].encoder, strlen(c[i].encoder));
        }
        snprintf(args, sizeof args, "-o %s/out.gguf %s", h.dir, c[i].args);
        if (!i) hf_shard(&h, "model.safetensors", 0, arrlenu(h.t));
        CHECK(!hf_run(&h, args), "%s", h.err);
        CHECK_HAS(h.err,
                  c[i].graded ? "taking moe's, with the reasoning efforts high and max" : "the reasoning effort max",
                  "remark %zu", i);
        snprintf(args, sizeof args, "%s/out.gguf", h.dir);
        if (!CHECK(!gguf_open(&g, args, err, sizeof err), "%s", err)) break;
        CHECK(gguf_get_str(&g, "tokenizer.chat_template", &s), "no template");
        const size_t n = c[i].graded ? strlen(head) : 0;
        CHECK(s.n == n + arrlenu(source) && !memcmp(s.p, head, n) && !memcmp(s.p + n, source, arrlenu(source)),
              "case %zu: another template: %.50s", i, s.p);
        if (!i && CHECK(!vocab_load(&v, &g, err), "%s", err)) {
            CHECK(key_is(&g, "tokenizer.ggml.pre", "deepseek-v3"), "the pre-tokenizer");
            check_cases_ids(&v);
            check_prompt_marks(&v);
            vocab_free(&v);
        }
        gguf_close(&g);
    }
    hf_set(h.tokenizer_config, "{\"chat_template\": \"T\"}");
    snprintf(args, sizeof args, "-o %s/out.gguf", h.dir);
    CHECK(!hf_run(&h, args) && !strstr(h.err, "chat template"), "%s", h.err);
    arrfree(source);
    hf_end(&h);
}

/* So it is with V4.1. */
static void test_prompt_converted_v41(void) {
    static const char head[] = "{%- set v41 = true -%}\n";
    struct gguf_str s = {"", 0};
    struct hf h;
    char *source = prompt_file(PROMPT_TEMPLATE);
    hf_load(&h, "deepseek_v41");
    json_object_del(h.tokenizer_config, "chat_template");
    if (hf_convert(&h) && CHECK(gguf_get_str(&h.g, "tokenizer.chat_template", &s), "no template"))
        CHECK(s.n == strlen(head) + arrlenu(source) && !memcmp(s.p, head, strlen(head)) &&
                  !memcmp(s.p + strlen(head), source, arrlenu(source)),
              "another template: %.50s", s.p);
    CHECK_HAS(h.err, "taking moe's, with the reasoning efforts low, high and max", "the remark");
    arrfree(source);
    hf_end(&h);
}

/* The release's golden prompts with a part of its tokenizer, whose ids.json has the ids of the whole one. */
static void test_prompt_ids(void) {
    const char *dir = shared_path(PROMPT_GOLDEN);
    if (!dir) SKIP("no ../shared/" PROMPT_GOLDEN);
    struct hf h;
    struct vocab v;
    char err[ERR_MAX] = "", what[32];
    prompt_release(&h, dir);
    if (hf_convert(&h) && CHECK(!vocab_load(&v, &h.g, err), "%s", err)) {
        json_t *file = prompt_json(dir, "ids.json");
        const json_t *prompts = json_object_get(file, "prompts"), *real = json_object_get(file, "tokens");
        for (int i = 1; i <= 4; i++) {
            snprintf(what, sizeof what, "golden prompt %d", i);
            check_prompt_ids(&v, prompt_vars(dir, i, true), json_array_get(prompts, (size_t)i - 1), real, what);
        }
        json_decref(file);
        vocab_free(&v);
    }
    hf_end(&h);
}

/* ---- in a chat ---- */

/* Checks what the template makes of the messages. */
static void check_chat_prompt(struct script_chat *x, bool answer, const char *want, const char *what) {
    struct tpl_text text = {0};
    char err[ERR_MAX] = "";
    CHECK(!chat_render(&x->c, answer, &text, err), "%s", err);
    CHECK_STR(sb_cstr(&text.s), want, "%s", what);
    text_free(&text);
}

/* Turns of a chat: the thinking goes beside the answer, neither loses its newlines, and what the next prompts have of
 * them is what the encoder makes of the same messages. Catches newlines that are cut off, thinking that stays in content
 * or stays for later turns, an answer about tags that is taken for thinking, efforts that do not arrive. */
static void check_prompt_chat(const char *template, const char *bos) {
    struct script_chat x;
    char want[2048], *source = prompt_file(template);
    if (!script_open(&x, template)) return;
    x.set.think = THINK_ON;
    chat_set_system(&x.c, "Be brief.");
    script_turn(&x, "q", "\nHm. </thin\n\n</think>\n\nA </think>\n" RETURN, -1);
    CHECK_STR(x.said[0], "A </think>\n", "hidden thinking");
    json_t *o = json_object();
    response_answer(&x.c, o);
    CHECK_STR(json_text(o, "text"), "\n\nA </think>\n", "text");
    CHECK_STR(json_text(o, "reasoning"), "\nHm. </thin\n\n", "reasoning");
    json_decref(o);
    snprintf(want, sizeof want,
             "%sBe brief.<｜User｜>q<｜Assistant｜><think>\nHm. </thin\n\n</think>\n\nA </think>\n%s", bos,
             "<｜end▁of▁sentence｜>");
    check_chat_prompt(&x, false, want, "the last answer has its thinking");
    chat_push(&x.c, "user", "r", 1);
    snprintf(
        want, sizeof want,
        "%sBe brief.<｜User｜>q<｜Assistant｜></think>\n\nA </think>\n<｜end▁of▁sentence｜><｜User｜>r<｜Assistant｜>",
        bos);
    const size_t n = strlen(want);
    strcat(want, "<think>");
    check_chat_prompt(&x, true, want, "with thinking");
    want[n] = 0;
    strcat(want, "</think>");
    x.set.think = THINK_OFF;
    check_chat_prompt(&x, true, want, "without thinking");
    x.set.think = THINK_AUTO;
    check_chat_prompt(&x, true, want, "left to the template");
    chat_pop(&x.c);
    x.set.think = THINK_OFF;
    script_turn(&x, "r", "Write <think>x</think> so." RETURN, -1);
    chat_push(&x.c, "user", "s", 1);
    strcat(want, "Write <think>x</think> so.<｜end▁of▁sentence｜><｜User｜>s<｜Assistant｜></think>");
    check_chat_prompt(&x, true, want, "an answer about tags");
    x.set.think = THINK_MAX;
    char *effort = strstr(source, "Reasoning Effort: "), *rest = strstr(want, "Be brief.");
    struct tpl_text text = {0};
    char err[ERR_MAX] = "";
    CHECK(!chat_render(&x.c, true, &text, err), "%s", err);
    (void)sb_cstr(&text.s);
    rest[strlen(rest) - strlen("</think>")] = 0;
    CHECK(effort && !strncmp(text.s + strlen(bos), effort, 40), "the effort of '%.100s'", text.s);
    CHECK_HAS(text.s, "\n\nBe brief.", "the system's message after it");
    snprintf(err, sizeof err, "%.200s<think>", rest + strlen(rest) - 60);
    CHECK(strlen(text.s) > strlen(err) && !strcmp(text.s + strlen(text.s) - strlen(err), err), "the end: %s", text.s);
    text_free(&text);
    arrfree(source);
    script_close(&x);
}

static void test_prompt_chat(void) {
    const char *circulating = shared_path("golden/templates/deepseek-ai-DeepSeek-V4.jinja");
    check_prompt_chat(PROMPT_TEMPLATE, "<｜begin▁of▁sentence｜>");
    if (circulating) check_prompt_chat(circulating, ""); /* the vocabulary has none */
}

#define TESTS_PROMPT                                                                        \
    {"prompt/golden", test_prompt_golden}, {"prompt/circulating", test_prompt_circulating}, \
        {"prompt/cases", test_prompt_cases}, {"prompt/origin", test_prompt_origin},         \
        {"prompt/converted", test_prompt_converted}, {"prompt/ids", test_prompt_ids},       \
        {"prompt/chat", test_prompt_chat}, {"prompt/efforts", test_prompt_efforts},         \
        {"prompt/converted of V4.1", test_prompt_converted_v41},
