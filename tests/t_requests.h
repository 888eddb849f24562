/* What moe takes of texts, messages and requests that other programs write: forms of messages and what becomes of them in
 * a template, keys of --jsonl, lines of --calibrate, byte-order marks. */

/* Templates that differ in what they take. */
#define FORM_TEXT "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{{ '=' + m.name if m.name }};{% endfor %}"
#define FORM_PARTS                                                                                                \
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"                  \
    "{% for p in m.content %}{{ '[' + p.type + ']' if p.type != 'text' }}{{ p.text }}{% endfor %}{% endif %};{% " \
    "endfor %}"
#define FORM_OBJECTS                                                                                          \
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ '#' + m.tool_call_id if m.tool_call_id }}" \
    "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}=" \
    "{{ v }}{% endfor %}){% endfor %};{% endfor %}"
#define FORM_STRINGS                                                                                               \
    "{% for m in messages %}<{{ m.role }}>{% if m['content'] is none %}{% for c in m.tool_calls %}"                \
    "{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}{% else %}{{ m['content'] }}{% endif %};" \
    "{% endfor %}"
#define FORM_TURNS                                                                                             \
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') " \
    "}}{% endif %}<{{ m.role }}>{{ m.content }};{% endfor %}"
#define FORM_SILENT \
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }};{% endif %}{% endfor %}"
#define FORM_DEVELOPER                                                                                            \
    "{% for m in messages %}{% if m.role == 'developer' %}<D>{% else %}<{{ m.role }}>{% endif %}{{ m.content }};" \
    "{% endfor %}"
#define FORM_WORD \
    "{% for m in messages %}{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }};{% endif %}{% endfor %}"
#define FORM_THINKING                                                                                                \
    "{% for m in messages %}<{{ m.role }}>{{ '{' + m.reasoning_content + '}' if m.reasoning_content }}{{ m.content " \
    "}};{% endfor %}"

/* One of turns that the demo model can answer, for printf. */
#define TURNS_TEMPLATE                                                                                             \
    "{%% for m in messages %%}{%% if (m.role == \"user\") != (loop.index0 %% 2 == 0) %%}{{ "                       \
    "raise_exception(\"turns\") "                                                                                  \
    "}}{%% endif %%}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{%% endfor %%}<|im_start|>assistant\\n" \
    "<think>\\n\\n</think>\\n\\n"

#define SAYS(role, text) "{\"role\":\"" role "\",\"content\":" text "}"
#define PART(text)       "{\"type\":\"text\",\"text\":\"" text "\"}"
#define CALLS(arguments) \
    "{\"id\":\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":" arguments "}}"

#define TOOLS(name) "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"" name "\"}}]"

/* Opens a chat with a template and the messages of a request, without a model. */
static bool form_open(struct chat *c, struct settings *set, const char *source, const char *messages, char *err) {
    char path[128];
    snprintf(path, sizeof path, "%s/form.jinja", test_dir());
    write_test_file(path, source, strlen(source));
    settings_init(set);
    set->template_file = xstrdup(path);
    json_t *list = json_loads(messages, 0, NULL);
    CHECK(list, "the test's messages: %s", messages);
    const bool ok = !chat_init(c, set, NULL, NULL, err) && !chat_push_list(c, "messages", list, err);
    json_decref(list);
    return ok;
}

static void test_requests_forms(void) {
    static const struct {
        const char *source, *messages, *want; /* the text, or after ! the error */
    } t[] = {
        /* content */
        {FORM_TEXT, SAYS("user", "\"a\""), "<user>a;"},
        {FORM_TEXT, SAYS("user", "[" PART("a") "]"), "<user>a;"},
        {FORM_TEXT, SAYS("user", "[" PART("a") "," PART("b") "]"), "<user>a\nb;"},
        {FORM_TEXT, SAYS("user", "[{\"type\":\"input_text\",\"text\":\"a\"},\"b\",{\"text\":\"c\"}]"),
         "<user>a\nb\nc;"},
        {FORM_TEXT, SAYS("assistant", "[{\"type\":\"refusal\",\"refusal\":\"no\"}]"), "<assistant>no;"},
        {FORM_TEXT, "{\"role\":\"assistant\",\"content\":null,\"refusal\":\"no\"}", "<assistant>no;"},
        {FORM_PARTS, SAYS("user", "[" PART("a") "," PART("b") "]"), "<user>ab;"},
        {FORM_PARTS, SAYS("user", "[{\"type\":\"output_text\",\"text\":\"a\"}," PART("b") "]"), "<user>ab;"},
        {FORM_PARTS, SAYS("user", "[" PART("a") ",{\"type\":\"image_url\"}]"),
         "!messages[0]: a part of type \"image_url\""},
        {FORM_TEXT, SAYS("user", "[{\"type\":\"input_audio\"}]"), "!a part of type \"input_audio\" cannot be read"},
        {FORM_TEXT, SAYS("user", "[{\"type\":\"text\"}]"), "!a part of type \"text\": its text is missing"},
        {FORM_TEXT, SAYS("user", "[" PART("a") ",{\"type\":\"input_text\",\"text\":null}]"),
         "!a part of type \"input_text\": its text is null"},
        {FORM_TEXT, SAYS("user", "[{\"a\":1}]"), "!a part of \"content\" is an object without a type"},
        {FORM_TEXT, SAYS("user", "null"), "!\"content\" is null, expected text or a list of parts"},
        {FORM_TEXT, SAYS("assistant", "5"), "!\"content\" is a number"},
        {FORM_TEXT, "{\"role\":\"user\"}", "!messages[0]: \"content\" is missing"},
        {FORM_TEXT, "3", "!messages[0]: a message is a number, expected an object"},
        /* tool calls */
        {FORM_TEXT, "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[]}", "<assistant>;"},
        {FORM_TEXT, "{\"role\":\"assistant\",\"tool_calls\":[]}", "<assistant>;"},
        {FORM_TEXT, "{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":null}", "<assistant>a;"},
        {FORM_TEXT, "{\"role\":\"assistant\",\"tool_calls\":[" CALLS("\"{}\"") "]}", "!does not take \"tool_calls\""},
        {FORM_OBJECTS, "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[" CALLS("\"{\\\"x\\\":1}\"") "]}",
         "<assistant>f(x=1);"},
        {FORM_OBJECTS, "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[" CALLS("{\"x\":1}") "]}",
         "<assistant>f(x=1);"},
        {FORM_OBJECTS, "{\"role\":\"assistant\",\"tool_calls\":[" CALLS("\"\"") "]}", "<assistant>f();"},
        {FORM_OBJECTS,
         "{\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"g\",\"arguments\":\"{}\"}}",
         "<assistant>g();"},
        {FORM_STRINGS, "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[" CALLS("\"{\\\"x\\\":1}\"") "]}",
         "<assistant>f({\"x\":1});"},
        {FORM_STRINGS, "{\"role\":\"assistant\",\"tool_calls\":[" CALLS("{\"x\":1}") "]}", "<assistant>f({\"x\": 1});"},
        {FORM_OBJECTS, "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\"}]}", "!tool_calls[0] names no function"},
        {FORM_OBJECTS, "{\"role\":\"assistant\",\"tool_calls\":{}}", "!\"tool_calls\" is an object, expected a list"},
        {FORM_OBJECTS, "{\"role\":\"tool\",\"content\":\"7\",\"tool_call_id\":\"1\"}", "<tool>7#1;"},
        {FORM_OBJECTS, "{\"role\":\"function\",\"name\":\"f\",\"content\":[" PART("7") "]}", "<tool>7;"},
        /* roles, names, thinking */
        {FORM_TEXT, "{\"role\":\"user\",\"content\":\"a\",\"name\":\"kim\"}", "<user>a=kim;"},
        {FORM_TEXT, SAYS("developer", "\"a\"") "," SAYS("user", "\"b\""), "<system>a;<user>b;"},
        {FORM_DEVELOPER, SAYS("developer", "\"a\"") "," SAYS("user", "\"b\""), "<D>a;<user>b;"},
        {FORM_WORD, SAYS("developer", "\"a\"") "," SAYS("user", "\"b\""), "<system>a;<user>b;"},
        {FORM_TURNS, SAYS("developer", "[" PART("a") "]") "," SAYS("user", "\"b\""), "<user>a\n\nb;"},
        {FORM_TEXT, "{\"from\":\"human\",\"value\":\"a\"},{\"from\":\"gpt\",\"value\":\"b\"}", "<user>a;<assistant>b;"},
        {FORM_TEXT, SAYS("<|im_start|>", "\"a\""), "!assistant or tool, found <|im_start|>"},
        {FORM_TEXT, "{\"content\":\"a\"}", "!assistant or tool, found missing"},
        {FORM_THINKING, "{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"t\"}", "<assistant>{t}a;"},
        {FORM_THINKING, "{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"t\",\"reasoning_content\":null}",
         "<assistant>{t}a;"},
        {FORM_THINKING, SAYS("assistant", "\"<think>t</think>a\""), "<assistant>{t}a;"},
        {FORM_TEXT, "{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"t\"}", "<assistant>a;"},
        /* system messages of templates that have none */
        {FORM_TURNS, SAYS("system", "\"s\"") "," SAYS("user", "\"a\""), "<user>s\n\na;"},
        {FORM_SILENT, SAYS("system", "\"s\"") "," SAYS("user", "\"a\""), "<user>s\n\na;"},
        {FORM_TURNS, SAYS("system", "\"s\"") "," SAYS("system", "\"t\"") "," SAYS("user", "[" PART("a") "]"),
         "<user>s\n\nt\n\na;"},
        {FORM_TURNS,
         SAYS("user", "\"a\"") "," SAYS("assistant", "\"b\"") "," SAYS("system", "\"s\"") "," SAYS("user", "\"c\""),
         "<user>a;<assistant>b;<user>s\n\nc;"},
        {FORM_TURNS, SAYS("system", "\"s\"") "," SAYS("assistant", "\"b\""), "<user>s;<assistant>b;"},
        {FORM_TURNS, SAYS("system", "\"s\""), "<user>s;"},
        {FORM_SILENT, SAYS("system", "\"\"") "," SAYS("user", "\"a\""), "<user>a;"},
        {FORM_TEXT, SAYS("system", "\"s\"") "," SAYS("user", "\"a\""), "<system>s;<user>a;"},
        {FORM_TURNS, SAYS("user", "\"a\"") "," SAYS("user", "\"b\""), "!turns (the chat template got user, user)"},
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct chat c;
        struct settings set;
        struct tpl_text out = {0};
        char err[ERR_MAX] = "", messages[1024];
        const bool fails = *t[i].want == '!';
        snprintf(messages, sizeof messages, "[%s]", t[i].messages);
        const bool ok = form_open(&c, &set, t[i].source, messages, err) && !chat_render(&c, false, &out, err);
        CHECK(ok != fails, "case %zu: %s: %s", i, messages, err);
        if (fails) CHECK_HAS(err, t[i].want + 1, "case %zu: %s", i, messages);
        else CHECK_STR(sb_cstr(&out.s), t[i].want, "case %zu: %s", i, messages);
        text_free(&out);
        chat_free(&c);
        settings_free(&set);
    }
}

/* No text of a request is the template's: not a system message that moves, nor parts, nor variables of a request. */
static void test_requests_origin(void) {
    static const struct {
        const char *source, *messages, *vars, *want;
    } t[] = {
        {"{{ '<b>' }}" FORM_TURNS, "[" SAYS("system", "\"<b>s\"") "," SAYS("user", "\"<b>u\"") "]", "{}",
         "<b><user><b>s\n\n<b>u;"},
        {"{{ '<b>' }}" FORM_PARTS, "[" SAYS("user", "[" PART("<b>p") "," PART("<b>q") "]") "]", "{}",
         "<b><user><b>p<b>q;"},
        {"<b>{{ effort }}{{ list[0].a }}" FORM_TEXT, "[" SAYS("user", "\"u\"") "]",
         "{\"effort\":\"<b>\",\"list\":[{\"a\":\"<b>\"}]}", "<b><b><b><user>u;"},
        {"<b>{{ tools[0].function.name }}" FORM_TEXT, "[" SAYS("user", "\"u\"") "]",
         "{\"tools\":[{\"function\":{\"name\":\"<b>\"}}]}", "<b><b><user>u;"},
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        struct chat c;
        struct settings set;
        struct tpl_text out = {0};
        char err[ERR_MAX] = "";
        if (!CHECK(form_open(&c, &set, t[i].source, t[i].messages, err), "case %zu: %s", i, err)) continue;
        c.vars = json_loads(t[i].vars, 0, NULL);
        CHECK(!chat_render(&c, false, &out, err), "case %zu: %s", i, err);
        CHECK_STR(sb_cstr(&out.s), t[i].want, "case %zu", i);
        for (const char *p = out.s; (p = strstr(p, "<b>")); p++) {
            const uint8_t want = p == out.s ? ORIGIN_TEMPLATE : ORIGIN_DATA;
            for (int k = 0; k < 3; k++)
                CHECK_INT(out.origin[p - out.s + k], want, "case %zu, byte %td", i, p - out.s + k);
        }
        text_free(&out);
        chat_free(&c);
        settings_free(&set);
    }
}

/* A byte-order mark is dropped wherever a text begins, with CR LF at its end; that of UTF-16 is refused by name. */
static void test_requests_marks(void) {
    static const struct {
        const char *cmd;
        int code;
        const char *out, *said;
    } t[] = {
        {MOE "--greedy --think off -f @/m.txt </dev/null", 0, "49\n", NULL},
        {MOE "--greedy --think off <@/m.txt", 0, "49\n", NULL},
        {"printf '\r\n \t\r\n' | cat @/m.txt - | " MOE "--greedy --think off --lines", 0, "49\n", NULL},
        {MOE "--greedy --think off -p - --chat-template-file @/m.jinja --system-file @/s.txt </dev/null", 0, "49\n",
         NULL},
        {"printf '\357\273\277 \r\n\n{\"prompt\":\"Hi\",\"max_tokens\":0}\r\n' | " MOE "--jsonl", 0,
         "{\"id\":3,\"text\":\"\",\"finish\":\"length\",\"usage\":{\"prompt_tokens\":11,\"cached_tokens\":0,"
         "\"completion_tokens\":0}}\n",
         NULL},
        {"[ \"$(printf '\357\273\277a b' | " MOE "--tokenize)\" = \"$(printf 'a b' | " MOE "--tokenize)\" ]", 0, "",
         NULL},
        {"printf '\357\273\277{\"messages\":[]}' | " MOE "--render", 0, "", NULL},
        {"printf '\357\273\277a b' >@/p.txt; [ \"$(" MOE
         "--perplexity @/p.txt | cut -d, -f1)\" = \"$(printf 'a b' | " MOE "--perplexity - | cut -d, -f1)\" ]",
         0, "", NULL},
        {MOE "-f @/u.txt </dev/null", 1, "", "u.txt' is UTF-16 text, expected UTF-8: convert it with iconv -f UTF-16"},
        {MOE "--lines <@/u.txt", 1, "", "stdin is UTF-16 text"},
        {"printf '\376\377\\0h' | " MOE "-p x", 1, "", "stdin is UTF-16 text"},
        {"printf '\377\376\\0\\0h\\0\\0\\0' | " MOE "--tokenize", 1, "", "stdin is UTF-32 text"},
        {"printf '\357\273\277' | " MOE "-n 1", 2, "", "stdin is empty"},
    };
    run_command(IN_DIR("printf '\357\273\277What is 7 squared? One word.\r\n' >@/m.txt;"
                       "printf '\357\273\277Be brief.\r\n' >@/s.txt; printf '\377\376h\\0i\\0' >@/u.txt;"
                       "printf '\357\273\277<|im_start|>user\nWhat is 7 squared? One word.<|im_end|>\n<|im_start|>"
                       "assistant\n<think>\n\n</think>\n\n{%% if messages[0].content != \"Be brief.\" %%}"
                       "{{ raise_exception(\"mark\") }}{%% endif %%}' >@/m.jinja"),
                NULL, NULL);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) check_command(IN_DIR(t[i].cmd), t[i].code, t[i].out, t[i].said);
}

/* Keys of requests: obeyed, ignored with a note, refused by name. One process answers all. */
static void test_requests_keys(void) {
#define HI "\"messages\":[" SAYS("user", "\"Hi\"") "]"
    static const struct {
        const char *request;
        int tokens;       /* of the prompt; 0: an error */
        const char *want; /* a part of the answer */
    } t[] = {
        {"{" HI ",\"model\":\"x\",\"user\":\"u\",\"metadata\":{},\"stream\":false,\"n\":1}", 11, "\"length\""},
        {"{" HI ",\"model\":\"y\",\"logprobs\":false,\"logit_bias\":{},\"tools\":[],\"tool_choice\":\"none\"}", 11, ""},
        {"{" HI ",\"presence_penalty\":0.0,\"n\":1.0,\"response_format\":{\"type\":\"text\"},\"stop\":null}", 11, ""},
        {"{" HI ",\"max_tokens\":1.0,\"top_p\":0.9,\"top_k\":-1,\"min_p\":0,\"temperature\":0}", 11,
         "\"completion_tokens\":1}"},
        {"{" HI ",\"max_completion_tokens\":1,\"repetition_penalty\":1.1}", 11, "\"completion_tokens\":1}"},
        {"{" HI ",\"n_predict\":1,\"repeat_penalty\":1,\"seed\":5,\"stop\":[\"x\"]}", 11, "\"completion_tokens\":1}"},
        {"{" HI ",\"reasoning_effort\":\"none\"}", 13, ""},
        {"{" HI ",\"reasoning_effort\":\"minimal\"}", 11, ""},
        {"{" HI ",\"chat_template_kwargs\":{\"enable_thinking\":false,\"other\":1}}", 13, ""},
        {"{" HI ",\"enable_thinking\":false}", 13, ""},
        {"{" HI ",\"thinking\":{\"type\":\"disabled\"}}", 13, ""},
        {"{" HI ",\"thinking_budget_tokens\":5,\"thinking_token_budget\":-1}", 11, ""},
        {"{" HI ",\"thinking_token_budget\":-2}", 0, "\\\"thinking_token_budget\\\": expected a whole number"},
        {"{" HI ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":\"5 m\"}}", 0,
         "\\\"budget_tokens\\\": expected a whole number"},
        {"{\"prompt\":[" SAYS("user", "[" PART("Hi") "]") "]}", 11, ""},
        {"{\"prompt\":\"Hi\"}", 11, ""},
        {"{\"messages\":[" SAYS("user", "\"Hi\"") "," SAYS("tool", "\"Hi\"") "]}", 18, ""},
        {"{\"custom_id\":\"r\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{" HI "}}", 11,
         "{\"id\":\"r\","},
        {"{\"custom_id\":\"r\",\"url\":\"/v1/embeddings\",\"body\":{" HI "}}", 0,
         "\"url\\\": /v1/embeddings is not supported"},
        {"{\"custom_id\":\"r\",\"body\":{" HI "},\"n\":1}", 0, "unknown key \\\"n\\\" besides \\\"body\\\""},
        {"{\"body\":3}", 0, "\\\"body\\\" is a number, expected an object"},
        {"{" HI ",\"stream\":true}", 0, "\\\"stream\\\": true is not supported: an answer is one line"},
        {"{" HI ",\"response_format\":{\"type\":\"json_object\"}}", 0, "grammars are not supported"},
        {"{" HI ",\"guided_json\":{}}", 0, "\\\"guided_json\\\": {} is not supported: grammars"},
        {"{" HI ",\"logit_bias\":{\"1\":-100}}", 0, "\\\"logit_bias\\\": {\\\"1\\\":-100} is not supported"},
        {"{" HI ",\"frequency_penalty\":0.5}", 0, "\\\"frequency_penalty\\\": 0.5 is not supported"},
        {"{" HI ",\"tool_choice\":\"required\"}", 0, "\\\"tool_choice\\\": \\\"required\\\" is not supported"},
        {"{" HI ",\"tools\":[{}]}", 0, "the chat template does not take \\\"tools\\\""},
        {"{" HI ",\"functions\":3}", 0, "\\\"functions\\\" is a number, expected a list"},
        {"{" HI ",\"max_tokens\":5.5}", 0, "\\\"max_tokens\\\": expected a whole number"},
        {"{" HI ",\"reasoning_effort\":\"huge\"}", 0, "\\\"reasoning_effort\\\": expected"},
        {"{" HI ",\"chat_template_kwargs\":{\"messages\":[]}}", 0,
         "\\\"chat_template_kwargs\\\" cannot set \\\"messages\\\""},
        {"{" HI ",\"temperatur\":1}", 0, "unknown key \\\"temperatur\\\"; moe --jsonl --help"},
        {"{" HI ",\"max\":1}", 0, "unknown key \\\"max\\\""},
        {"{\"prompt\":[1,2]}", 0, "\\\"prompt\\\" is not a string and not a list of messages"},
        {"{\"messages\":[" SAYS("assistant", "\"Hi\"") "]}", 0,
         "the last message must be the user's, or a tool's result"},
    };
    enum { N = sizeof t / sizeof *t };
    char path[128], *in = NULL, *out = NULL, *said = NULL;
    for (int i = 0; i < N; i++) sb_printf(&in, "%s\n", t[i].request);
    snprintf(path, sizeof path, "%s/keys.jsonl", test_dir());
    write_test_file(path, in, arrlenu(in));
    run_command(IN_DIR(MOE "--jsonl -n 0 <@/keys.jsonl"), &out, &said);
    const char *line = sb_cstr(&out);
    for (int i = 0; i < N && *line; i++, line += strcspn(line, "\n") + (*line != 0)) {
        char *answer = xstrndup(line, strcspn(line, "\n"));
        json_t *o = json_loads(answer, 0, NULL);
        const json_t *tokens = json_object_get(json_object_get(o, "usage"), "prompt_tokens");
        CHECK(!tokens == !!json_object_get(o, "error"), "%s: %s", t[i].request, answer);
        CHECK_INT(json_integer_value(tokens), t[i].tokens, "%s: %s", t[i].request, answer);
        CHECK_HAS(answer, t[i].want, "%s", t[i].request);
        json_decref(o);
        free(answer);
    }
    CHECK(!*line && out && arrlen(out), "lines of stdout: %s", line);
    CHECK_STR(sb_cstr(&said),
              "\"model\" of a request is ignored: -m gives the model\n"
              "\"user\" of a request is ignored: moe is not a service\n"
              "\"metadata\" of a request is ignored: moe is not a service\n"
              "\"other\" of chat_template_kwargs has no effect: the chat template does not read it\n",
              "every note once");
    arrfree(in);
    arrfree(out);
    arrfree(said);
#undef HI
}

/* A request that limits its thinking gets the answer of --think-budget, and does not limit that of the next. --raw has
 * no thinking to limit. */
static void test_requests_budget(void) {
#define CUT " | sed 's/\"prompt_tokens.*\"completion/\"completion/'" /* what a cache changes */
#define ASK "\"prompt\":\"What is 7 squared?\""
    static const struct {
        const char *request, *options; /* that give the same answer */
    } t[] = {
        {"{" ASK ",\"thinking_budget\":0}", "--think-budget 0"},
        {"{" ASK ",\"reasoning_budget_tokens\":3.0}", "--think-budget 3"},
        {"{" ASK "}", ""},
        {"{" ASK ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":2}}", "--think-budget 2"},
        {"{" ASK ",\"thinking\":{\"type\":\"disabled\",\"budget_tokens\":2}}", "--think off"},
    };
    char *in = NULL, *out = NULL;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[512], *want = NULL;
        snprintf(cmd, sizeof cmd, "echo '{\"id\":%zu," ASK "}' | " MOE "--jsonl --greedy %s" CUT, i + 1, t[i].options);
        CHECK_INT(run_command(cmd, &want, NULL), 0, "%s", cmd);
        sb_printf(&in, "%s\n", t[i].request);
        sb_put(&out, want, arrlenu(want));
        arrfree(want);
    }
    char path[128];
    snprintf(path, sizeof path, "%s/budget.jsonl", test_dir());
    write_test_file(path, in, arrlenu(in));
    check_command(IN_DIR(MOE "--jsonl --greedy <@/budget.jsonl" CUT), 0, sb_cstr(&out), "");
    check_command(
        "echo '{" ASK ",\"thinking_budget\":0}' | " MOE "--jsonl --raw", 1,
        "{\"id\":1,\"error\":\"--raw and \\\"thinking_budget\\\" cannot be combined: there is no template\"}\n", "");
    arrfree(in);
    arrfree(out);
#undef ASK
#undef CUT
}

/* A request that chooses no tool gets none, whatever the order of its keys. */
static void test_requests_choice(void) {
    static const struct {
        const char *keys, *names; /* of the tools that the template gets */
    } t[] = {
        {TOOLS("f"), "f"},
        {TOOLS("f") ",\"tool_choice\":\"auto\"", "f"},
        {TOOLS("f") ",\"tool_choice\":\"none\"", ""},
        {"\"tool_choice\":\"none\"," TOOLS("f"), ""},
        {"\"functions\":[{\"name\":\"f\"}],\"function_call\":\"none\"", ""},
        {"\"tool_choice\":\"none\"", ""},
    };
    struct chat c;
    struct settings set;
    char err[ERR_MAX] = "";
    const bool ok = form_open(&c, &set, "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}",
                              "[" SAYS("user", "\"a\"") "]", err);
    CHECK(ok, "%s", err);
    for (size_t i = 0; ok && i < sizeof t / sizeof *t; i++) {
        struct tpl_text out = {0};
        char line[256];
        snprintf(line, sizeof line, "{\"prompt\":\"a\",%s}", t[i].keys);
        json_t *request = json_loads(line, 0, NULL);
        CHECK(!request_read(&c, request, err) && !chat_render(&c, false, &out, err), "%s: %s", line, err);
        CHECK_STR(sb_cstr(&out.s), t[i].names, "%s", line);
        json_decref(request);
        json_decref(c.vars);
        c.vars = NULL;
        text_free(&out);
    }
    chat_free(&c);
    settings_free(&set);
}

/* --help lists what is obeyed; no key stands twice in the table. */
static void test_requests_table(void) {
    char *names = NULL; /* so far, separated by blanks */
    for (size_t i = 0; i < sizeof request_keys / sizeof *request_keys; i++) {
        const struct request_key *k = &request_keys[i];
        CHECK(!k->option || option_find(k->option), "--%s", k->option);
        CHECK((k->option || k->read) == !k->why, "%s: what becomes of other values", k->names);
        for (const char *p = k->names; *p; p += strspn(p, " ")) {
            char name[64];
            snprintf(name, sizeof name, "%.*s", (int)strcspn(p, " "), p);
            p += strlen(name);
            CHECK(!word_find(sb_cstr(&names), name, NULL, NULL), "%s stands twice", name);
            if (k->option || k->read) CHECK_HAS(jsonl_details, name, "--help");
            sb_printf(&names, " %s", name);
        }
    }
    arrfree(names);
}

/* A system message of a template that has none counts as the beginning of the first user message. */
static void test_requests_system(void) {
#define TURNS MOE "--chat-template-file @/turns.jinja --greedy -n 3 "
    static const char note[] = "the chat template has no system message: it is put before the first user message\n";
    char *want = NULL, *got = NULL, *said = NULL;
    static const char *const cmd[] = {
        TURNS "-sys 'Be short.' -p hello", "echo hello | " TURNS "--lines --system-file @/s.txt",
        "echo '{\"messages\":[" SAYS("developer", "\"Be short.\"") "," SAYS(
            "user", "\"hello\"") "]}' | " TURNS "--jsonl -q --think off | sed 's/.*\"text\":\"//; s/\".*//'"};
    run_command(IN_DIR("printf '" TURNS_TEMPLATE "' >@/turns.jinja; printf 'Be short.\\n' >@/s.txt"), NULL, NULL);
    run_command(IN_DIR(TURNS "-p \"$(printf 'Be short.\\n\\nhello')\""), &want, NULL);
    CHECK(arrlen(want) > 1, "an answer");
    for (int i = 0; i < 3; i++) {
        CHECK_INT(run_command(IN_DIR(cmd[i]), &got, &said), 0, "%s: %s", cmd[i], sb_cstr(&said));
        CHECK_STR(sb_cstr(&got), sb_cstr(&want), "%s", cmd[i]);
        if (i < 2) CHECK_HAS(sb_cstr(&said), note, "%s", cmd[i]);
        arrsetlen(got, 0);
        arrsetlen(said, 0);
    }
    arrfree(want);
    arrfree(got);
    arrfree(said);
#undef TURNS
}

/* --render is jinja2; it joins parts for a template of text, and names a system message as the cause of an error. */
static void test_requests_render(void) {
    static const struct {
        const char *source, *vars;
        int code;
        const char *out, *said;
    } t[] = {
        {FORM_TEXT, SAYS("user", "[" PART("a") "," PART("b") "]"), 0, "<user>a\nb;",
         "the text of \"content\" is joined"},
        {FORM_PARTS, SAYS("user", "[" PART("a") "," PART("b") "]"), 0, "<user>ab;", NULL},
        {FORM_PARTS, SAYS("user", "[" PART("a") ",{\"type\":\"image\",\"text\":\"i\"}]"), 0, "<user>a[image]i;", NULL},
        {FORM_TEXT, SAYS("user", "[{\"type\":\"image\"}]"), 1, "", "messages[0]: a part of type \"image\""},
        {FORM_TURNS, SAYS("system", "\"s\"") "," SAYS("user", "\"a\""), 1, "",
         "moe: turns (the chat template takes no system message)\n"},
        {FORM_TURNS, SAYS("user", "\"s\"") "," SAYS("user", "\"a\""), 1, "", "moe: turns\n"},
        {FORM_SILENT, SAYS("system", "\"s\"") "," SAYS("user", "\"a\""), 0, "<user>a;",
         "leaves out the system message"},
        {FORM_TEXT, SAYS("developer", "\"s\""), 0, "<developer>s;", NULL},
    };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char path[2][128], vars[512];
        for (int k = 0; k < 2; k++) snprintf(path[k], sizeof path[k], "%s/render.%d", test_dir(), k);
        snprintf(vars, sizeof vars, "{\"messages\":[%s]}", t[i].vars);
        write_test_file(path[0], t[i].source, strlen(t[i].source));
        write_test_file(path[1], vars, strlen(vars));
        check_command(IN_DIR(MOE_BIN " --render --chat-template-file @/render.0 <@/render.1"), t[i].code, t[i].out,
                      t[i].said ? t[i].said : "");
    }
}

/* Lines of --calibrate: the chat that a template gets, or texts as they are. */
static void test_requests_lines(void) {
    static const struct {
        const char *line, *want; /* chats in the form of FORM_TEXT; texts between |; errors after ! */
    } t[] = {
        {"{\"messages\":[" SAYS("user", "[" PART("a") "]") "," SAYS("assistant", "\"b\"") "]}",
         "<user>a;<assistant>b;"},
        {"{\"messages\":[" SAYS("user", "\"a\"") "],\"prompt\":\"x\",\"source\":\"y\"}", "<user>a;"},
        {"{\"conversations\":[{\"from\":\"human\",\"value\":\"a\"},{\"from\":\"gpt\",\"value\":\"b\"}]}",
         "<user>a;<assistant>b;"},
        {"{\"conversations\":[{\"from\":\"system\",\"value\":\"s\"},{\"from\":\"human\",\"value\":\"a\"}],\"id\":"
         "\"1\"}",
         "<system>s;<user>a;"},
        {"{\"conversations\":[{\"from\":\"human\",\"value\":\"a\"}],\"system\":\"s\",\"tools\":\"[]\"}",
         "<system>s;<user>a;"},
        {"{\"conversation\":[" SAYS("user", "\"a\"") "," SAYS("model", "\"b\"") "]}", "<user>a;<assistant>b;"},
        {"{\"prompt\":[" SAYS("user", "\"a\"") "],\"completion\":[" SAYS("assistant", "\"b\"") "]}",
         "<user>a;<assistant>b;"},
        {"{\"prompt\":[" SAYS("user", "\"a\"") "]}", "<user>a;"},
        {"{\"instruction\":\"a\",\"input\":\"\",\"output\":\"b\"}", "<user>a;<assistant>b;"},
        {"{\"instruction\":\"a\",\"input\":\"i\",\"output\":\"b\",\"system\":\"s\"}",
         "<system>s;<user>a\n\ni;<assistant>b;"},
        {"{\"question\":\"a\",\"answer\":\"b\"}", "<user>a;<assistant>b;"},
        {"{\"prompt\":\"a\",\"response\":\"b\"}", "<user>a;<assistant>b;"},
        {"{\"prompt\":\"a\",\"completion\":\"b\"}", "|a|b|"},
        {"{\"completion\":\"b\"}", "||b|"},
        {"{\"text\":\"a\",\"meta\":{}}", "|a||"},
        {"{\"texts\":\"a\",\"b\":1}", "!\"instruction\" and \"output\"; found \"texts\", \"b\""},
        {"{}", "!found no keys"},
        {"[1]", "!the line is a list, expected an object"},
        {"{\"text\":[\"a\"]}", "!\"text\" is a list, expected text"},
        {"{\"prompt\":\"a\",\"completion\":[" SAYS("assistant", "\"b\"") "]}", "!\"prompt\" is not a list of messages"},
        {"{\"prompt\":[\"a\"]}", "!prompt[0]: a message is text, expected an object"},
        {"{\"messages\":[]}", "!\"messages\" is not a list of messages"},
        {"{\"messages\":[" SAYS("user", "[{\"type\":\"image_url\"}]") "]}",
         "!messages[0]: a part of type \"image_url\""},
        {"{\"conversations\":[{\"from\":\"robot\",\"value\":\"a\"}]}", "!found robot"},
        {"{\"instruction\":\"a\",\"output\":3}", "!a question and its answer must be text"},
        {"{\"messages\":[" SAYS("user", "\"a\"") "],\"tools\":[{}]}", "!does not take \"tools\""},
    };
    struct calibration c = {0};
    struct settings set;
    char err[ERR_MAX] = "";
    if (!CHECK(form_open(&c.chat, &set, FORM_TEXT, "[" SAYS("user", "\"a\"") "]", err), "%s", err)) return;
    chat_pop(&c.chat);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        const char *texts[2];
        const bool fails = *t[i].want == '!';
        char *got = NULL;
        struct tpl_text out = {0};
        json_t *line;
        int rc = line_read(&c, "x.jsonl", t[i].line, strlen(t[i].line), &line, texts, err);
        if (!rc && arrlen(c.chat.messages)) rc = chat_render(&c.chat, false, &out, err);
        else if (!rc) sb_printf(&got, "|%s|%s|", texts[0] ? texts[0] : "", texts[1] ? texts[1] : "");
        sb_put(&got, out.s ? out.s : "", arrlenu(out.s));
        CHECK(fails == (rc != 0), "%s: %s", t[i].line, rc ? err : sb_cstr(&got));
        if (fails) CHECK_HAS(err, t[i].want + 1, "%s", t[i].line);
        else CHECK_STR(sb_cstr(&got), t[i].want, "%s", t[i].line);
        line_free(&c, line);
        text_free(&out);
        arrfree(got);
    }
    chat_free(&c.chat);
    settings_free(&set);
}

/* The end of a file's name says whether --calibrate takes lines or text, in capitals too. */
static void test_requests_suffix(void) {
    static const struct {
        const char *name;
        bool lines, notes; /* that it is text */
    } t[] = {{"a.jsonl", true, false}, {"A.JSONL", true, false}, {"a.json", false, true}, {"a.txt", false, false}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[512], *out = NULL;
        snprintf(cmd, sizeof cmd,
                 "printf '{\"text\":\"a\"}\\n' >@/%s; " MOE "--calibrate @/%s -o @/suffix%zu.json 2>&1", t[i].name,
                 t[i].name, i);
        CHECK_INT(run_command(IN_DIR(cmd), &out, NULL), 0, "%s", sb_cstr(&out));
        CHECK_INT(strstr(sb_cstr(&out), "counts as plain text") != NULL, t[i].notes, "%s", sb_cstr(&out));
        CHECK_INT(strstr(sb_cstr(&out), "\n1 tokens;") != NULL, t[i].lines, "%s", sb_cstr(&out));
        arrfree(out);
    }
}

#define TESTS_REQUESTS                                                                        \
    {"requests/forms", test_requests_forms}, {"requests/origin", test_requests_origin},       \
        {"requests/marks", test_requests_marks}, {"requests/keys", test_requests_keys},       \
        {"requests/budget", test_requests_budget}, {"requests/choice", test_requests_choice}, \
        {"requests/table", test_requests_table}, {"requests/system", test_requests_system},   \
        {"requests/render", test_requests_render}, {"requests/lines", test_requests_lines},   \
        {"requests/suffix", test_requests_suffix},
