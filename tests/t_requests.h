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
#define FORM_THINKING                                                                                                \
    "{% for m in messages %}<{{ m.role }}>{{ '{' + m.reasoning_content + '}' if m.reasoning_content }}{{ m.content " \
    "}};{% endfor %}"

#define SAYS(role, text) "{\"role\":\"" role "\",\"content\":" text "}"
#define PART(text)       "{\"type\":\"text\",\"text\":\"" text "\"}"
#define CALLS(arguments) \
    "{\"id\":\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":" arguments "}}"

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
        const char *source, *messages, *want; /* the text, or behind ! the error */
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
        struct text out = {0};
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
        struct text out = {0};
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

#define TESTS_REQUESTS                                                                  \
    {"requests/forms", test_requests_forms}, {"requests/origin", test_requests_origin}, \
        {"requests/marks", test_requests_marks},
