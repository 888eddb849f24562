/* Formats of thinking: what is shown, kept and sent again of answers with channels (harmony, Inkling) and with tags. */

#define START    "<|start|>"
#define CHANNEL  "<|channel|>"
#define MESSAGE  "<|message|>"
#define END      "<|end|>"
#define RETURN   "<|return|>"
#define CALL     "<|call|>"
#define ANALYSIS CHANNEL "analysis" MESSAGE
#define FINAL    CHANNEL "final" MESSAGE
#define NEXT     END START "assistant"

/* Inkling's */
#define MODEL   "<|message_model|>"
#define THOUGHT "<|content_thinking|>"
#define TEXT    "<|content_text|>"
#define INVOKE  "<|content_invoke_tool_json|>"
#define DONE    "<|end_message|>"
#define STOP    "<|content_model_end_sampling|>"

/* ---- what is printed ---- */

/* A vocabulary of bytes, the marks of channels, and some words. */
static bool think_vocab(struct test_vocab *t) {
    static const char *const marks[] = {"<|constrain|>", START, CHANNEL, MESSAGE, END, RETURN, CALL, "<|other|>"};
    static const char *const words[] = {"assistant", "analysis", "final", "commentary", " to=", "functions"};
    static const char *const named[] = {
        MODEL, THOUGHT, TEXT, INVOKE, DONE, STOP, "<|message_user|>", "<|message_system|>"};
    *t = test_vocab_begin("gpt-4o");
    test_merge(t, "x", "y");
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) test_add(t, marks[i], TOKEN_CONTROL);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char *spelt = NULL;
        test_alphabet(&spelt, words[i], strlen(words[i]));
        test_token(t, spelt, TOKEN_NORMAL);
    }
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) test_add(t, named[i], TOKEN_CONTROL);
    gguf_put_u32(&t->w, "tokenizer.ggml.eos_token_id", 263); /* <|return|> */
    return test_vocab_ready(t);
}

/* The tokens of a text whose marks are tokens. "\\|" stands for a | that belongs to no mark. words: of words, too. */
static int32_t *think_ids(const struct vocab *v, const char *text, bool words) {
    int32_t *ids = NULL;
    while (*text) {
        int32_t best = -1;
        size_t len = 0;
        for (int32_t id = 257; id < v->n_tokens; id++) {
            const struct gguf_str s = vocab_bytes(v, id);
            if (s.n > len && !strncmp(text, s.p, s.n) && (words || vocab_type(v, id) == TOKEN_CONTROL))
                best = id, len = s.n;
        }
        if (best < 0) text += *text == '\\', best = (uint8_t)*text, len = 1;
        arrput(ids, best);
        text += len;
    }
    return ids;
}

/* Prints an answer as `generate` does, from a prompt. Returns the printer, which the caller frees; *used: tokens that
 * were taken. */
static struct printer think_print(const struct chat *c, const char *prompt, const int32_t *ids, int n, int *used) {
    int32_t *before = think_ids(c->m->vocab, prompt, true);
    struct printer p = printer_answer(c, before, (int)arrlen(before), false);
    int i = 0;
    for (; i < n && !channel_stops(&p, ids[i]) && !vocab_is_stop(c->m->vocab, ids[i]) && !p.foreign; i++)
        printer_token(&p, ids[i]);
    const bool thinking = p.thinking;
    printer_end(&p);
    CHECK(p.thinking == thinking, "the end changes what is open");
    *used = i;
    arrfree(before);
    return p;
}

static const struct stream {
    const char *name, *prompt, *text; /* text: with marks */
    const char *answer, *thought;
    const char *hidden, *shown; /* what is printed, without and with the thinking; NULL: the answer and a line end */
    const char *tool;
    int left; /* tokens that are not taken */
} streams[] = {
    {"as it should be", NULL, ANALYSIS "Hm \303\251." NEXT FINAL " Hi *\303\251*\n" RETURN, " Hi *\303\251*\n",
     "Hm \303\251.", "Hi *\303\251*\n", "[thinking]\nHm \303\251.\n[answer]\nHi *\303\251*\n", NULL, 1},
    {"final alone, its end ends the turn", NULL, FINAL "A" NEXT FINAL "B", "A", "", NULL, NULL, NULL, 19},
    {"no channels", NULL, "Hello there", "Hello there", "", NULL, NULL, NULL, 0},
    {"no channels, ends", NULL, "Hello" END "x", "Hello", "", NULL, NULL, NULL, 2},
    {"an answer that begins like a recipient", NULL, " to be", " to be", "", "to be\n", "to be\n", NULL, 0},
    {"an answer that is the beginning of one", NULL, " to", " to", "", "to\n", "to\n", NULL, 0},
    {"white space alone", NULL, " \n", "", "", "\n", "\n", NULL, 0},
    {"a message without a channel", NULL, MESSAGE "Hi" END, "Hi", "", NULL, NULL, NULL, 1},
    {"two thoughts", NULL, ANALYSIS "a" NEXT ANALYSIS "b\n" NEXT FINAL "c", "c", "a\n\nb\n", "c\n",
     "[thinking]\na\n\nb\n[answer]\nc\n", NULL, 0},
    {"a preamble", NULL, CHANNEL "commentary" MESSAGE "I look." NEXT FINAL "c", "I look.\n\nc", "", NULL, NULL, NULL,
     0},
    {"thinking after a preamble", NULL, CHANNEL "commentary" MESSAGE "p" NEXT ANALYSIS "t" NEXT FINAL "c", "p\n\nc",
     "t", "p\n\nc\n", "p\n[thinking]\nt\n[answer]\nc\n", NULL, 0},
    {"final first", NULL, FINAL "A" START "assistant" ANALYSIS "t" NEXT FINAL "B", "A\n\nB", "t", "A\n\nB\n",
     "A\n[thinking]\nt\n[answer]\nB\n", NULL, 0},
    {"a header without the end before it", NULL, ANALYSIS "t" FINAL "A", "A", "t", "A\n",
     "[thinking]\nt\n[answer]\nA\n", NULL, 0},
    {"text between messages", NULL, ANALYSIS "t" END "A", "A", "t", "A\n", "[thinking]\nt\n[answer]\nA\n", NULL, 0},
    {"a blank between messages", NULL, ANALYSIS "t" END "\n" START "assistant" FINAL "A", "A", "t", "A\n",
     "[thinking]\nt\n[answer]\nA\n", NULL, 0},
    {"a call", NULL, CHANNEL "commentary to=functions.f<|constrain|>json" MESSAGE "{\"a\": 1}" CALL, "{\"a\": 1}", "",
     NULL, NULL, "functions.f", 1},
    {"a call, recipient first", NULL, " to=functions.f" CHANNEL "commentary json" MESSAGE "{}" END "x", "{}", "", NULL,
     NULL, "functions.f", 2},
    {"a call with a role", NULL, ANALYSIS "t" NEXT " to=f" CHANNEL "commentary" MESSAGE "{}" CALL, "{}", "t", "{}\n",
     "[thinking]\nt\n[answer]\n{}\n", "f", 1},
    {"a built-in tool", NULL, CHANNEL "analysis to=python code" MESSAGE "1+1" CALL, "", "1+1", "\n",
     "[thinking]\n1+1\n", "python", 1},
    {"an answer after a built-in tool", NULL, CHANNEL "analysis to=python" MESSAGE "1" NEXT FINAL "A", "A", "1", "A\n",
     "[thinking]\n1\n[answer]\nA\n", NULL, 0},
    {"a stray channel", NULL, CHANNEL "commentary to=assistant" ANALYSIS "t" NEXT FINAL "A", "A", "t", "A\n",
     "[thinking]\nt\n[answer]\nA\n", NULL, 0},
    {"a preamble to the assistant", NULL, CHANNEL "commentary to=assistant" MESSAGE "p" NEXT FINAL "A", "p\n\nA", "",
     NULL, NULL, NULL, 0},
    {"an unknown channel", NULL, CHANNEL "poetry" MESSAGE "A" END "x", "A", "", NULL, NULL, NULL, 2},
    {"someone else's turn", NULL, ANALYSIS "t" END START "user" MESSAGE "Hi", "", "t", "\n", "[thinking]\nt\n", NULL,
     2},
    {"a header that is cut off", NULL, ANALYSIS "t" NEXT CHANNEL "fin", "", "t", "\n", "[thinking]\nt\n", NULL, 0},
    {"a header that is none", NULL, CHANNEL "final\nA", " final\nA", "", "final\nA\n", "final\nA\n", NULL, 0},
    {"marks in the text", NULL, FINAL "a" MESSAGE "b<|constrain|>c<|other|>", "abc<|other|>", "", NULL, NULL, NULL, 0},
    {"marks that are spelt", NULL, FINAL "<\\|end\\|><\\|channel\\|>analysis<\\|message\\|>x",
     "<|end|><|channel|>analysis<|message|>x", "", NULL, NULL, NULL, 0},
    {"marks that are spelt in a thought", NULL, ANALYSIS "<\\|end\\|>" NEXT FINAL "</think>", "</think>", "<|end|>",
     "</think>\n", "[thinking]\n<|end|>\n[answer]\n</think>\n", NULL, 0},
    {"a character that is cut off", NULL, ANALYSIS "a\303" NEXT FINAL "\303\251\303", "\303\251\357\277\275",
     "a\357\277\275", "\303\251\357\277\275\n", "[thinking]\na\357\277\275\n[answer]\n\303\251\357\277\275\n", NULL, 0},
    {"no thought", NULL, ANALYSIS NEXT FINAL "A", "A", "", NULL, NULL, NULL, 0},
    {"nothing", NULL, "", "", "", "\n", "\n", NULL, 0},
    {"a prompt that begins the answer", START "user" MESSAGE "q" NEXT FINAL, "A" END, "A", "", NULL, NULL, NULL, 1},
    {"a prompt that begins the thinking", START "assistant" ANALYSIS "so", "t" NEXT FINAL "A", "A", "t", "A\n",
     "[thinking]\nt\n[answer]\nA\n", NULL, 0},
    {"a prompt without a role", START "user" MESSAGE "q" END, START "assistant" FINAL "A", "A", "", NULL, NULL, NULL,
     0},
    {"a prompt without marks", "Q:", "A" END, "A", "", NULL, NULL, NULL, 1},
};

static const struct stream named_streams[] = {
    {"as it should be", MODEL, THOUGHT "Hm \303\251." DONE MODEL TEXT " Hi *\303\251*\n" DONE STOP, " Hi *\303\251*\n",
     "Hm \303\251.", "Hi *\303\251*\n", "[thinking]\nHm \303\251.\n[answer]\nHi *\303\251*\n", NULL, 1},
    {"no thinking", MODEL, TEXT "A" DONE STOP "x", "A", "", NULL, NULL, NULL, 2},
    {"two thoughts", MODEL, THOUGHT "a" DONE MODEL THOUGHT "b\n" DONE MODEL TEXT "c" DONE STOP, "c", "a\n\nb\n", "c\n",
     "[thinking]\na\n\nb\n[answer]\nc\n", NULL, 1},
    {"thinking between answers", MODEL, TEXT "A" DONE MODEL THOUGHT "t" DONE MODEL TEXT "B" DONE STOP, "A\n\nB", "t",
     "A\n\nB\n", "A\n[thinking]\nt\n[answer]\nB\n", NULL, 1},
    {"messages without their ends", MODEL, THOUGHT "t" TEXT "A" MODEL TEXT "B" STOP, "A\n\nB", "t", "A\n\nB\n",
     "[thinking]\nt\n[answer]\nA\n\nB\n", NULL, 1},
    {"a prompt that begins the answer", "<|message_user|>" TEXT "q" DONE MODEL TEXT, "A" DONE STOP, "A", "", NULL, NULL,
     NULL, 1},
    {"a prompt that begins the thinking", MODEL THOUGHT "so", "t" DONE MODEL TEXT "A" STOP, "A", "t", "A\n",
     "[thinking]\nt\n[answer]\nA\n", NULL, 1},
    {"no marks", MODEL, "Hello there", "Hello there", "", NULL, NULL, NULL, 0},
    {"no thought", MODEL, THOUGHT DONE MODEL TEXT "A" STOP, "A", "", NULL, NULL, NULL, 1},
    {"someone else's turn", MODEL, TEXT "A" DONE "<|message_user|>" TEXT "x", "A", "", NULL, NULL, NULL, 3},
    {"marks of harmony and marks that are spelt", MODEL, TEXT "a" ANALYSIS "<\\|end_message\\|></think>" STOP,
     "a" ANALYSIS "<|end_message|></think>", "", NULL, NULL, NULL, 1},
    {"nothing", MODEL, "", "", "", "\n", "\n", NULL, 0},
};

/* Length of n bytes without U+FFFD and line ends at their end. */
static size_t think_trimmed(const char *s, size_t n) {
    for (;;)
        if (n && s[n - 1] == '\n') n--;
        else if (n > 2 && !memcmp(s + n - 3, "\357\277\275", 3)) n -= 3;
        else return n;
}

/* Checks a stream, and each of its beginnings: what they print is the beginning of what the whole prints. */
static void check_stream(struct chat *c, const struct stream *s, bool words) {
    const char *prompt = s->prompt ? s->prompt : START "assistant";
    int32_t *ids = think_ids(c->m->vocab, s->text, words);
    for (int shown = 0; shown < 2; shown++) {
        char *whole[2] = {NULL}, want[256];
        struct caught caught;
        int used;
        c->set->show_think = shown ? SHOW_ON : SHOW_OFF;
        snprintf(want, sizeof want, "%s\n", s->answer);
        if (shown ? s->shown != NULL : s->hidden != NULL)
            snprintf(want, sizeof want, "%s", shown ? s->shown : s->hidden);
        catch_begin(&caught);
        struct printer p = think_print(c, prompt, ids, (int)arrlen(ids), &used);
        catch_end(&caught, &whole[0], &whole[1]);
        CHECK_STR(whole[0], want, "%s, shown %d, words %d", s->name, shown, words);
        CHECK_STR(sb_cstr(&p.text), s->answer, "%s", s->name);
        CHECK_STR(sb_cstr(&p.thought), s->thought, "%s", s->name);
        CHECK_STR(sb_cstr(&p.tool), s->tool ? s->tool : "", "%s", s->name);
        CHECK(words || (int)arrlen(ids) - used == s->left, "%s: %d tokens are left, expected %d", s->name,
              (int)arrlen(ids) - used, s->left);
        CHECK(!p.think_tokens == !*s->thought, "%s: %d tokens of thinking", s->name, p.think_tokens);
        printer_free(&p);
        for (int k = 0; k < used; k++) {
            char *part[2] = {NULL};
            int n;
            catch_begin(&caught);
            p = think_print(c, prompt, ids, k, &n);
            catch_end(&caught, &part[0], &part[1]);
            size_t len = think_trimmed(part[0], arrlenu(part[0]));
            if (!strncmp(s->text, " to=", 4) && len < 3) len = 0; /* until then it may be an answer */
            CHECK(!strncmp(whole[0], part[0], len), "%s: after %d tokens '%s', of '%s'", s->name, k, part[0], whole[0]);
            printer_free(&p);
            for (int i = 0; i < 2; i++) arrfree(part[i]);
        }
        for (int i = 0; i < 2; i++) arrfree(whole[i]);
    }
    arrfree(ids);
}

static void test_think_streams(void) {
    struct test_vocab t;
    struct model m = {.vocab = &t.v};
    struct settings set = {0};
    struct chat c = {.set = &set, .m = &m, .format = think_formats};
    if (think_vocab(&t))
        for (size_t i = 0; i < sizeof streams / sizeof *streams; i++)
            for (int words = 0; words < 2; words++) check_stream(&c, &streams[i], words);
    c.format = think_format_find(MODEL, strlen(MODEL), &t.v);
    if (CHECK(!c.format->open && c.format != think_formats, "the format of Inkling"))
        for (size_t i = 0; i < sizeof named_streams / sizeof *named_streams; i++)
            for (int words = 0; words < 2; words++) check_stream(&c, &named_streams[i], words);
    test_vocab_end(&t);
}

/* What is too long is no header, nor what has lines. */
static void test_think_header(void) {
    struct channel_header spelt = {.channel = 1}, named = {.channel = SIZE_MAX, .bare = true, .named = true};
    for (int n = 1; n < 300; n++) {
        arrput(spelt.text, 'x');
        arrput(named.text, 'x');
        CHECK(header_may_be(&spelt) == (n <= 256), "a header of %d bytes", n);
        CHECK(header_may_be(&named) == (n <= 256), "a name of %d bytes", n);
    }
    arrsetlen(named.text, 0);
    sb_puts(&named.text, "x\n");
    CHECK(!header_may_be(&named), "a name of two lines");
    arrfree(spelt.text);
    arrfree(named.text);
}

/* On a terminal thinking is dim; in raw modes every byte is printed. */
static void test_think_styles(void) {
    struct test_vocab t;
    struct model m = {.vocab = &t.v};
    struct settings set = {.show_think = SHOW_AUTO};
    struct chat c = {.set = &set, .m = &m, .format = think_formats};
    const bool before[2] = {term.out_tty, term.color_out};
    static const char text[] = ANALYSIS "t" NEXT FINAL "A" END;
    int used;
    if (think_vocab(&t)) {
        int32_t *ids = think_ids(&t.v, text, true);
        char *out[2] = {NULL};
        struct caught caught;
        catch_begin(&caught);
        term.out_tty = term.color_out = true;
        struct printer p = think_print(&c, START "assistant", ids, (int)arrlen(ids), &used);
        term.out_tty = before[0];
        term.color_out = before[1];
        printer_free(&p);
        p = printer_make(&c, false, true);
        for (int i = 0; i < arrlen(ids); i++) {
            CHECK(!channel_stops(&p, ids[i]), "a raw text ends at token %d", i);
            printer_token(&p, ids[i]);
        }
        printer_end(&p);
        catch_end(&caught, &out[0], &out[1]);
        CHECK_STR(out[0], "\033[2mt\033[0m\nA\n" ANALYSIS "t" NEXT FINAL "A" END, "styles");
        CHECK_STR(sb_cstr(&p.text), text, "a raw text");
        printer_free(&p);
        for (int i = 0; i < 2; i++) arrfree(out[i]);
        arrfree(ids);
    }
    test_vocab_end(&t);
}

/* ---- which format a template has ---- */

static void test_think_formats(void) {
    static const struct {
        const char *source, *open;
        const char *mode[2]; /* thinking_mode for --think on, off */
    } known[] = {
        {"{{ '<|start|>assistant" ANALYSIS "' }}", NULL, {NULL}},
        {"{{ '" MODEL THOUGHT "' }}", NULL, {NULL}},
        {"{{ '<think{}>'.format(x) }} {{ 'no_think' }}", "<think:opensource>", {NULL}},
        {"{% set effort = 'no_think' %}<think>", "<think>", {NULL}},
        {"<seed:think></seed:think>", "<seed:think>", {NULL}},
        {"'<mm:think>'", "<mm:think>", {"enabled", "disabled"}},
        {"[THINK]{{ x }}[/THINK]", "[THINK]", {NULL}},
        {"<|channel>thought\n{{ x }}<channel|>", "<|channel>thought", {NULL}},
        {"<think>/no_think", "<think>", {NULL}},
        {"<think>｜DSML｜", "<think>", {NULL}},
        {"plain", "<think>", {NULL}},
    };
    struct test_vocab t, none = test_vocab_begin("gpt-4o");
    test_merge(&none, "x", "y");
    if (think_vocab(&t) && test_vocab_ready(&none)) {
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
            const size_t n = strlen(known[i].source);
            const struct think_format *f = think_format_find(known[i].source, n, &t.v);
            CHECK(!f->open == !known[i].open && (!f->open || !strcmp(f->open, known[i].open)), "%s", known[i].source);
            for (int k = 0; k < 3; k++) {
                const struct settings set = {.think = (enum think[]){THINK_ON, THINK_OFF, THINK_AUTO}[k]};
                const char *want = k < 2 ? known[i].mode[k] : NULL;
                json_t *vars = json_object();
                chat_common_vars(vars, NULL, &set, NULL, NULL, f);
                const char *got = json_string_value(json_object_get(vars, "thinking_mode"));
                CHECK(!got == !want && (!got || !strcmp(got, want)), "%s: mode %s", known[i].source,
                      got ? got : "none");
                json_decref(vars);
            }
        }
        CHECK_STR(think_format_find(ANALYSIS, strlen(ANALYSIS), &none.v)->open, "<think>", "without the tokens");
        CHECK_STR(think_format_find(MODEL, strlen(MODEL), &none.v)->open, "<think>", "without the tokens");
        CHECK(!think_format_find(ANALYSIS, strlen(ANALYSIS), NULL)->open, "without a vocabulary");
    }
    test_vocab_end(&t);
    test_vocab_end(&none);
    CHECK_STR(reasoning_key("m.reasoning_content or message.reasoning", 39), "reasoning_content", "the first");
    CHECK_STR(reasoning_key("message['thinking']", 19), "thinking", "in brackets");
    CHECK_STR(reasoning_key("message.reasoning", 17), "reasoning", "the last");
    CHECK(!reasoning_key("thinking, ns.thinking", 21), "a variable");
    CHECK(template_strips("c.split('</think>')[-1]", 23, "</think>"), "single quotes");
    CHECK(template_strips("c.split(\"</think>\", 1)", 22, "</think>"), "double quotes");
    CHECK(!template_strips("{{ '<think></think>' }}", 23, "</think>"), "printed alone");
}

/* The effort that a template is given for each --think: its own names, the nearest of those that it takes, or none. */
static void test_think_efforts(void) {
#define TAKES(efforts)                                                                             \
    "{% if reasoning_effort not in " efforts " %}{{ raise_exception('effort') }}{% endif %}" /* */ \
    "{{ messages[0].content }}"
    static const struct {
        const char *source;
        const char *want[7]; /* as enum think */
    } known[] = {
        {"{{ messages[0].content }}", {NULL}},
        {"{{ reasoning_effort }}{{ messages[0].content }}", {NULL, NULL, NULL, "low", "medium", "high", "max"}},
        {"{{ '" ANALYSIS "' ~ reasoning_effort ~ messages[0].content }}",
         {NULL, NULL, "low", "low", "medium", "high", "high"}},
        {TAKES("['low', 'medium', 'xhigh']"), {NULL, NULL, NULL, "low", "medium", "xhigh", "xhigh"}},
        {TAKES("('no_think', 'low', 'high')"), {NULL, "high", "no_think", "low", "high", "high", "high"}},
        {TAKES("[\"none\", \"high\"]"), {NULL, "high", "none", "high", "high", "high", "high"}},
        {TAKES("['low', 'max']"), {NULL, NULL, NULL, "low", "low", "max", "max"}},
        {TAKES("['none', 'much']"), {NULL, "high", "none", "low", "medium", "high", "max"}},
    };
#undef TAKES
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        char err[ERR_MAX] = "", *source = NULL;
        const size_t n = strlen(known[i].source);
        struct template *t = template_parse(known[i].source, n, err);
        sb_puts(&source, known[i].source);
        for (int think = THINK_AUTO; CHECK(t, "%s", err) && think <= THINK_MAX; think++) {
            const struct settings set = {.think = (enum think)think};
            json_t *vars = json_object();
            chat_common_vars(vars, NULL, &set, t, source, think_format_find(known[i].source, n, NULL));
            const char *got = json_text(vars, "reasoning_effort"), *want = known[i].want[think];
            CHECK(!got == !want && (!got || !strcmp(got, want)), "%s, --think %s: %s", known[i].source,
                  think_names[think], got ? got : "none");
            CHECK(json_is_true(json_object_get(vars, "low_effort")) == (think == THINK_LOW) &&
                      json_is_true(json_object_get(vars, "medium_effort")) == (think == THINK_MEDIUM),
                  "switches for --think %s", think_names[think]);
            CHECK(!json_object_get(vars, "enable_thinking") == !think &&
                      json_is_false(json_object_get(vars, "enable_thinking")) == (think == THINK_OFF),
                  "enable_thinking for --think %s", think_names[think]);
            json_decref(vars);
        }
        template_free(t);
        arrfree(source);
    }
}

/* An answer without thinking that begins with a closing tag, alone or after blanks; and what only looks like one. Catches
 * a tag that is printed, held back for ever, or left out inside of an answer. */
static void check_bare(struct chat *c, const struct think_format *f) {
    static const char *const begins[] = {"", "\n ", "x"};
    for (int i = 0; i < 6; i++) {
        char text[64], want[64], *out[2] = {NULL};
        struct caught caught;
        int used;
        const int n = (int)strlen(f->close) - (i >= 3);
        snprintf(text, sizeof text, "%s%.*sA %s", begins[i % 3], n, f->close, f->close);
        if (i < 2) snprintf(want, sizeof want, "A %s\n", f->close);
        else snprintf(want, sizeof want, "%s\n", text + strspn(text, " \n"));
        int32_t *ids = think_ids(c->m->vocab, text, false);
        catch_begin(&caught);
        struct printer p = think_print(c, "", ids, (int)arrlen(ids), &used);
        catch_end(&caught, &out[0], &out[1]);
        CHECK_STR(out[0], want, "'%s'", text);
        CHECK_STR(sb_cstr(&p.text), text, "as generated");
        printer_free(&p);
        arrfree(ids);
        for (int k = 0; k < 2; k++) arrfree(out[k]);
    }
}

/* Answers with other tags than <think>: cut at every byte, hidden and shown, and split again. */
static void test_think_tags(void) {
    struct test_vocab t;
    struct model m = {.vocab = &t.v};
    struct settings set = {0};
    struct chat c = {.set = &set, .m = &m};
    if (think_vocab(&t))
        for (size_t i = 0; i < sizeof think_formats / sizeof *think_formats; i++) {
            const struct think_format *f = &think_formats[i];
            char text[128], *out[2] = {NULL};
            const char *thought;
            struct caught caught;
            size_t n_thought;
            if (!f->open) continue;
            c.format = f;
            snprintf(text, sizeof text, "%s\nHm < [\n%s\n\nA %s", f->open, f->close, f->open);
            for (int shown = 0; shown < 2; shown++) {
                int used;
                int32_t *ids = think_ids(&t.v, text, false);
                set.show_think = shown ? SHOW_ON : SHOW_OFF;
                catch_begin(&caught);
                struct printer p = think_print(&c, "", ids, (int)arrlen(ids), &used);
                catch_end(&caught, &out[0], &out[1]);
                CHECK_STR(sb_cstr(&p.text), text, "as generated");
                printer_free(&p);
                arrfree(ids);
            }
            char want[256];
            snprintf(want, sizeof want, "A %s\n[thinking]\n\nHm < [\n[answer]\nA %s\n", f->open, f->open);
            CHECK_STR(out[0], want, "%s", f->open);
            const char *answer = split_answer(f, text, &thought, &n_thought), *hm = f->verbatim ? "Hm < [\n" : "Hm < [";
            CHECK_STR(answer, strrchr(text, 'A') - 2 * f->verbatim, "%s", f->open);
            CHECK(n_thought == strlen(hm) && !memcmp(thought, hm, n_thought), "%s: '%.*s'", f->open, (int)n_thought,
                  thought);
            for (int k = 0; k < 2; k++) arrfree(out[k]);
            check_bare(&c, f);
        }
    test_vocab_end(&t);
}

/* ---- a chat with a model that says what a script has ---- */

static struct {
    const struct ops *plain;
    int32_t *ids; /* stb_ds */
    int at, stop; /* Ctrl-C at the choice of this token; -1: never */
    int answer;   /* Ctrl-T at the choice of this one; 0: never */
} scripted;

static int script_read_tokens(struct rank *r, int32_t *chosen, bool *on_device) {
    const int n = scripted.plain->read_tokens(r, chosen, on_device);
    if (scripted.at == scripted.stop) interrupted = 1;
    if (scripted.answer && scripted.at == scripted.answer) watch.answer_now = true;
    if (CHECK(scripted.at < arrlen(scripted.ids), "more tokens than the script has"))
        chosen[0] = scripted.ids[scripted.at++];
    else interrupted = 1;
    return n;
}

/* The weights are the demo model's, the vocabulary and the template are not. */
struct script_chat {
    struct model m;
    struct vocab *demo;
    struct test_vocab t;
    struct settings set;
    struct session s;
    struct ops ops;
    struct chat c;
    char *said[2]; /* on stdout and stderr, of the last turn */
};

static bool script_open(struct script_chat *x, const char *template) {
    char err[ERR_MAX] = "";
    memset(x, 0, sizeof *x);
    if (!demo_load(&x->m) || !think_vocab(&x->t)) return false;
    x->demo = x->m.vocab;
    x->m.vocab = &x->t.v;
    settings_init(&x->set);
    settings_resolve(&x->set, &x->m);
    x->set.quiet = x->set.greedy = true;
    x->set.draft_min = x->set.draft_max = 0;
    x->set.template_file = xstrdup(template);
    session_cpu(&x->s, &x->m, kernels_choose(), 1, 1024, KV_BF16);
    scripted.plain = x->s.r->ops;
    x->ops = *x->s.r->ops;
    x->ops.read_tokens = script_read_tokens;
    x->s.r->ops = &x->ops;
    return CHECK(chat_init(&x->c, &x->set, &x->m, &x->s, err) == 0, "%s", err);
}

static void script_close(struct script_chat *x) {
    chat_free(&x->c);
    x->s.r->ops = scripted.plain;
    session_free(&x->s);
    x->m.vocab = x->demo;
    model_free(&x->m);
    settings_free(&x->set);
    test_vocab_end(&x->t);
    for (int i = 0; i < 2; i++) arrfree(x->said[i]);
    arrfree(scripted.ids);
}

/* Runs a turn whose answer is `text`. user NULL: /regen, "": /continue. stop: Ctrl-C at this token, or -1. */
static enum turn_result script_turn(struct script_chat *x, const char *user, const char *text, int stop) {
    char err[ERR_MAX] = "";
    struct caught caught;
    enum turn_result r = TURN_DONE;
    arrfree(scripted.ids);
    scripted.ids = think_ids(&x->t.v, text, true);
    scripted.at = 0;
    scripted.stop = stop;
    for (int i = 0; i < 2; i++) arrfree(x->said[i]);
    catch_begin(&caught);
    if (!user) CHECK(!chat_regenerate(&x->c, &r, err), "%s", err);
    else if (!*user) CHECK(!chat_continue(&x->c, err), "%s", err);
    else r = chat_turn(&x->c, user, strlen(user), err);
    catch_end(&caught, &x->said[0], &x->said[1]);
    interrupted = 0;
    CHECK(r != TURN_FAILED, "%s", err);
    return r;
}

/* The last message is an answer with this text and thinking. */
static void check_answer(const struct script_chat *x, const char *answer, const char *thought) {
    const struct message *m = &arrlast(x->c.messages);
    CHECK(chat_last_is(&x->c, "assistant"), "the last message is not an answer");
    CHECK_STR(m->content, answer, "the answer");
    CHECK_STR(m->thinking ? m->thinking : "", thought, "the thinking");
}

/* What the next answer is given, with the date of a golden case. */
static char *script_prompt(struct script_chat *x, const char *date) {
    struct tpl_text text = {0};
    char err[ERR_MAX] = "";
    CHECK(!chat_render(&x->c, true, &text, err), "%s", err);
    char *s = xstrndup(text.s, arrlenu(text.s)), *at = strstr(s, "Today: ");
    if (!at) at = strstr(s, "Current date: ");
    if (CHECK(at, "no date in '%s'", s)) memcpy(strchr(at, ':') + 2, date, 10);
    text_free(&text);
    return s;
}

#define OWN_HARMONY "tests/golden/templates/harmony.jinja"

/* Ctrl-C and -n in the thinking, /continue, /regen, /undo; what a response of --jsonl has. */
static void test_think_turns(void) {
    struct script_chat x;
    char err[ERR_MAX] = "";
    if (!script_open(&x, OWN_HARMONY)) return;
    CHECK(script_turn(&x, "q", ANALYSIS "Hm." NEXT FINAL "A" RETURN, -1) == TURN_DONE, "a turn");
    check_answer(&x, "A", "Hm.");
    CHECK_STR(x.said[0], "A\n", "hidden thinking");
    CHECK(x.c.last.why == STOP_END && scripted.at == (int)arrlen(scripted.ids), "the end");
    json_t *o = json_object();
    response_answer(&x.c, o);
    CHECK_STR(json_text(o, "text"), "A", "text");
    CHECK_STR(json_text(o, "reasoning"), "Hm.", "reasoning");
    json_decref(o);
    struct tpl_text text = {0};
    CHECK(!chat_render_next(&x.c, &text, err) && arrlen(x.c.messages) == 2, "%s", err);
    char *next = xstrndup(text.s, arrlenu(text.s)), *after = strstr(next, FINAL "A" END START "user" MESSAGE);
    CHECK(after && !after[strlen(FINAL "A" END START "user" MESSAGE)], "/ctx counts '%s'", next);
    free(next);
    text_free(&text);
    CHECK(script_turn(&x, NULL, FINAL "B" END "x", -1) == TURN_DONE && scripted.at == 5, "/regen");
    check_answer(&x, "B", "");

    x.set.show_think = SHOW_ON;
    CHECK(script_turn(&x, "r", ANALYSIS "Hm. So." NEXT FINAL "C" RETURN, 6) == TURN_STOPPED, "Ctrl-C");
    check_answer(&x, "", "Hm. ");
    CHECK_STR(x.said[0], "[thinking]\nHm. \n", "stopped");
    CHECK_HAS(x.said[1], "[stopped, still thinking]", "stopped");
    o = json_object();
    response_answer(&x.c, o);
    CHECK_STR(json_text(o, "text"), "", "text");
    CHECK_STR(json_text(o, "reasoning"), "Hm. ", "reasoning");
    json_decref(o);
    char *prompt = script_prompt(&x, "2026-03-07");
    static const char tail[] = START "user" MESSAGE "r" END START "assistant"; /* without the answer that has no text */
    const size_t at = strlen(prompt) - strlen(tail);
    CHECK_STR(prompt + at, tail, "the prompt after a stopped thought");
    free(prompt);
    CHECK(script_turn(&x, "", "So." NEXT FINAL "C", 9) == TURN_DONE, "/continue");
    check_answer(&x, "C", "Hm. So.");
    CHECK_STR(x.said[0], "[thinking]\nSo.\n[answer]\nC\n", "continued");
    x.set.n_predict = 3;
    CHECK(script_turn(&x, "", "D" NEXT, -1) == TURN_DONE && x.c.last.why == STOP_END && scripted.at == 2, "/continue");
    check_answer(&x, "CD", "Hm. So.");
    CHECK_STR(x.said[0], "D\n", "an answer that goes on");

    x.set.show_think = SHOW_OFF;
    CHECK(script_turn(&x, "s", ANALYSIS "Hm.", -1) == TURN_DONE && x.c.last.why == STOP_LENGTH, "-n in the header");
    check_answer(&x, "", "");
    CHECK_HAS(x.said[1], "[stopped after 3 tokens (-n), still thinking]", "-n");
    x.set.n_predict = -1;
    CHECK(script_turn(&x, "", "t\303", 1) == TURN_DONE, "/continue, cut inside a character");
    check_answer(&x, "", "t\357\277\275");
    CHECK(script_turn(&x, "", "\251" NEXT FINAL "E" RETURN, -1) == TURN_DONE, "/continue");
    check_answer(&x, "E", "t\303\251");
    CHECK(script_turn(&x, "t", ANALYSIS "Hm.", 0) == TURN_ROLLED_BACK && chat_last_is(&x.c, "assistant"), "at once");
    CHECK(!strstr(x.said[1], "[stopped"), "at once: '%s'", x.said[1]);
    CHECK(script_turn(&x, "t", ANALYSIS "Hm.", 2) == TURN_ROLLED_BACK && chat_last_is(&x.c, "assistant"), "header");
    CHECK(chat_continue(&x.c, err) && strstr(err, "no answer was stopped"), "/continue after a turn that is gone");
    check_answer(&x, "E", "t\303\251");
    CHECK(arrlen(x.c.messages) == 6 && !chat_undo(&x.c, err) && arrlen(x.c.messages) == 4, "/undo");
    CHECK(script_turn(&x, "u", CHANNEL "commentary to=f\033 json" MESSAGE "{}" CALL, -1) == TURN_DONE, "a call");
    CHECK_HAS(x.said[1], "[the model called 'f?', but there are no tools]", "a call");
    CHECK(script_turn(&x, "v", FINAL "A" START "user" MESSAGE, -1) == TURN_DONE && x.c.last.why == STOP_END, "foreign");
    check_answer(&x, "A", "");
    script_close(&x);
}

/* ---- thinking that is ended ---- */

/* A template with tags; BOUND stands where the answer begins. */
#define TAGS_TEMPLATE(thought, bound)                                                                        \
    "{%- for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}" thought                            \
    "{{ m.content }}{% else %}{{ m.content }}{% endif %}<|other|>{% endfor %}{% if add_generation_prompt %}" \
    "assistant:" bound "{% endif %}"

/* Qwen's form, GLM's, and two that drop what was thought: DeepSeek's old and new one. */
static const char tags_lines[] = TAGS_TEMPLATE("<think>{{ '\\n' + m.reasoning_content + '\\n' }}</think>{{ '\\n\\n' }}",
                                               "{% if enable_thinking %}<think>{{ '\\n' }}{% endif %}");
static const char tags_close[] =
    TAGS_TEMPLATE("<think>{{ m.reasoning_content }}</think>{{ '\\n' }}", "{% if enable_thinking %}<think>{% endif %}");
static const char tags_lost[] = TAGS_TEMPLATE("", "<think>{{ '\\n' }}");
static const char tags_tight[] = TAGS_TEMPLATE("", "<think>");

static const char tags_parts[] =
    "{%- for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{% if b.type == 'thinking' %}[THINK]{{ b.thinking }}[/THINK]{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif "
    "%}"
    "<|other|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

/* x: choices in whose place the end of the thinking goes. */
static const struct ended {
    const char *name, *template; /* NULL: with channels */
    enum think think;
    int budget, key;
    const char *said;    /* by the model */
    const char *content; /* of the message; of one with channels its tokens */
    int tokens;          /* of thinking; -1: it ended by itself */
} endings[] = {
    {"channels, 2", NULL, THINK_AUTO, 2, 0,
     ANALYSIS "Hmxxxxxxxxxxxxxxxxxx"
              "A" RETURN,
     ANALYSIS "Hm" NEXT FINAL "A", 2},
    {"channels, 0", NULL, THINK_AUTO, 0, 0,
     ANALYSIS "xxxxxxxxxxxxxxxxxx"
              "A" RETURN,
     ANALYSIS NEXT FINAL "A", 0},
    {"channels, 1, within a character", NULL, THINK_AUTO, 1, 0,
     ANALYSIS "\303\251xxxxxxxxxxxxxxxxxx"
              "A" RETURN,
     ANALYSIS "\303\251" NEXT FINAL "A", 2},
    {"channels, more than it thinks", NULL, THINK_AUTO, 9, 0, ANALYSIS "Hm" NEXT FINAL "A" RETURN,
     ANALYSIS "Hm" NEXT FINAL "A", -1},
    {"channels, a key", NULL, THINK_AUTO, -1, 4,
     ANALYSIS "Hxxxxxxxxxxxxxxxxxx"
              "A" RETURN,
     ANALYSIS "H" NEXT FINAL "A", 1},
    {"channels, a key before they begin", NULL, THINK_AUTO, -1, 1,
     ANALYSIS "xxxxxxxxxxxxxxxxxx"
              "A" RETURN,
     ANALYSIS NEXT FINAL "A", 0},
    {"channels, a key in the answer", NULL, THINK_AUTO, -1, 4, FINAL "Abc" RETURN, FINAL "Abc", -1},
    {"lines, 3", tags_lines, THINK_ON, 3, 0,
     "Hm."
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\nHm.\n</think>\n\nA", 3},
    {"lines, 0", tags_lines, THINK_ON, 0, 0,
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\n\n</think>\n\nA", 0},
    {"lines, 1", tags_lines, THINK_ON, 1, 0,
     "H"
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\nH\n</think>\n\nA", 1},
    {"lines, after a newline", tags_lines, THINK_ON, 2, 0,
     "H\n"
     "xxxxxxxxxx"
     "A" RETURN,
     "<think>\nH\n</think>\n\nA", 2},
    {"lines, opened by the model, 0", tags_lines, THINK_AUTO, 0, 0,
     "<think>"
     "xxxxxxxxxxxx"
     "A" RETURN,
     "<think>\n\n</think>\n\nA", 0},
    {"lines, opened by the model, 1", tags_lines, THINK_AUTO, 1, 0,
     "<think>\n"
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\n\n</think>\n\nA", 1},
    {"lines, a key", tags_lines, THINK_ON, -1, 3,
     "Hm."
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\nHm.\n</think>\n\nA", 3},
    {"lines, no thinking", tags_lines, THINK_AUTO, 0, 2, "Answer" RETURN, "Answer", -1},
    {"no newlines, 2", tags_close, THINK_ON, 2, 0,
     "Hm"
     "xxxxxxxxx"
     "A" RETURN,
     "<think>\nHm</think>\nA", 2},
    {"no newlines, 0, by the model", tags_close, THINK_AUTO, 0, 0,
     "<think>"
     "xxxxxxxxx"
     "A" RETURN,
     "<think></think>\nA", 0},
    {"dropped, 2", tags_lost, THINK_ON, 2, 0,
     "Hm"
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\nHm\n</think>\n\nA", 2},
    {"dropped, 0", tags_lost, THINK_ON, 0, 0,
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\n\n</think>\n\nA", 0},
    {"off, which the template leaves open", tags_lost, THINK_OFF, -1, 0,
     "xxxxxxxxxxx"
     "A" RETURN,
     "<think>\n\n</think>\n\nA", -1},
    {"dropped, without newlines", tags_tight, THINK_ON, 2, 0,
     "Hm"
     "xxxxxxxx"
     "A" RETURN,
     "<think>\nHm</think>A", 2},
    {"off, without newlines", tags_tight, THINK_OFF, -1, 0,
     "xxxxxxxx"
     "A" RETURN,
     "<think>\n</think>A", -1},
    {"a part of the content", tags_parts, THINK_AUTO, 1, 0,
     "[THINK]H"
     "xxxxxxxx"
     "A" RETURN,
     "[THINK]H[/THINK]A", 1},
    {"off, opened by the model", tags_close, THINK_OFF, -1, 0, "<think>Hm</think>A" RETURN, "<think>Hm</think>A", -1},
};

/* A turn whose thinking is ended: its message, what is said of it, and the tokens of the session. */
static void check_ending(struct script_chat *x, const struct ended *e) {
    char want[80];
    x->set.think = e->think;
    x->set.think_budget = e->budget;
    scripted.answer = e->key;
    chat_clear(&x->c);
    CHECK(script_turn(x, "q", e->said, -1) == TURN_DONE && x->c.last.why == STOP_END, "%s", e->name);
    CHECK_INT(x->c.last.n_generated, (int)arrlen(scripted.ids) - 1, "%s: tokens", e->name);
    snprintf(want, sizeof want, "[thinking ended after %d token%s (%s)]", e->tokens, e->tokens == 1 ? "" : "s",
             e->key ? "Ctrl-T" : "--think-budget");
    CHECK(!strstr(x->said[1], "thinking ended") == (e->tokens < 0), "%s: '%s'", e->name, x->said[1]);
    if (e->tokens >= 0) CHECK_HAS(x->said[1], want, "%s", e->name);
    if (e->template) {
        CHECK_STR(arrlast(x->c.messages).content, e->content, "%s", e->name);
        return;
    }
    char *text = NULL;
    for (int i = x->c.answer_past; i < x->s.n_past; i++) {
        const struct gguf_str b = vocab_bytes(&x->t.v, x->s.tokens[i]);
        sb_put(&text, b.p, b.n);
    }
    CHECK_STR(sb_cstr(&text), e->content, "%s: the tokens", e->name);
    arrfree(text);
}

static void test_think_ended(void) {
    struct script_chat x;
    const char *template = "";
    char path[256];
    bool open = false;
    snprintf(path, sizeof path, "%s/tags.jinja", test_dir());
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        if (endings[i].template != template) {
            if (open) script_close(&x);
            template = endings[i].template;
            if (template) write_test_file(path, template, strlen(template));
            open = script_open(&x, template ? path : OWN_HARMONY);
            if (!open) return;
            x.set.quiet = false;
        }
        check_ending(&x, &endings[i]);
    }
    script_close(&x);
    scripted.answer = 0;
}

/* The end of a thinking that -n cuts, and /continue; hidden and shown; a budget of a chat. */
static void test_think_ended_turns(void) {
    struct script_chat x;
    char err[ERR_MAX] = "";
    if (!script_open(&x, OWN_HARMONY)) return;
    x.set.show_think = SHOW_ON;
    CHECK(!chat_set(&x.c, "think-budget", "2", err), "%s", err);
    x.set.n_predict = 6; /* 3 tokens of the header, 2 of thinking */
    CHECK(script_turn(&x, "q", ANALYSIS "Hmxxx", -1) == TURN_DONE && x.c.last.why == STOP_LENGTH, "-n");
    x.set.n_predict = -1;
    CHECK(script_turn(&x, "", START "assistant" FINAL "A" RETURN, -1) == TURN_DONE, "/continue");
    check_answer(&x, "A", "Hm");
    CHECK(script_turn(&x, NULL,
                      ANALYSIS "So"
                               "xxxxxxxxxxxxxxxxxx"
                               "B" RETURN,
                      -1) == TURN_DONE,
          "/regen");
    check_answer(&x, "B", "So");
    CHECK_STR(x.said[0], "[thinking]\nSo\n[answer]\nB\n", "shown");
    CHECK(!chat_set(&x.c, "think-budget", "-1", err), "%s", err);
    CHECK(script_turn(&x, NULL, ANALYSIS "Hm. So." NEXT FINAL "C" RETURN, -1) == TURN_DONE, "without a budget");
    check_answer(&x, "C", "Hm. So.");
    script_close(&x);
}

/* What was saved has the thinking, and the same state. */
static void test_think_saved(void) {
    struct script_chat x;
    char err[ERR_MAX] = "", name[256], *before, *after;
    if (!script_open(&x, OWN_HARMONY)) return;
    snprintf(name, sizeof name, "%s/think", test_dir());
    script_turn(&x, "q", ANALYSIS "Hm." NEXT FINAL "A" RETURN, -1);
    script_turn(&x, "r", ANALYSIS "So." NEXT FINAL "B" RETURN, -1);
    before = script_prompt(&x, "2026-03-07");
    const int n_past = x.s.n_past;
    CHECK(!chat_save(&x.c, name, false, err), "%s", err);
    check_command(IN_DIR("grep -c '^{\"role\":\"assistant\",\"content\":\"B\",\"thinking\":\"So.\"}$' @/think.jsonl"),
                  0, "1\n", NULL);
    script_turn(&x, "s", FINAL "C" RETURN, -1);
    chat_clear(&x.c);
    CHECK(!chat_load(&x.c, name, err) && x.s.n_past == n_past, "%s", err);
    check_answer(&x, "B", "So.");
    after = script_prompt(&x, "2026-03-07");
    CHECK_STR(after, before, "the prompt of a loaded conversation");
    CHECK(chat_last_question(&x.c) == 3 && arrlen(x.c.messages) == 4, "messages");
    check_command(IN_DIR("printf '%s\n' '{\"moe\":1}' '{\"role\":\"user\",\"content\":\"<think>x</think>y\"}' "
                         "'{\"role\":\"assistant\",\"content\":\"<think>\\nT\\n</think>\\n\\nA\"}' >@/tags.jsonl"),
                  0, NULL, NULL);
    snprintf(name, sizeof name, "%s/tags", test_dir());
    CHECK(!chat_load(&x.c, name, err) && !strcmp(x.c.messages[0].content, "<think>x</think>y"), "%s", err);
    check_answer(&x, "A", "T");
    /* in a chat with a model with tags, the thinking goes where its template reads it */
    struct chat other = {.format = think_format_find("", 0, NULL), .reasoning_key = "reasoning_content"};
    json_t *o = chat_message_json(&other, &arrlast(x.c.messages));
    CHECK_STR(json_text(o, "content"), "A", "content");
    CHECK_STR(json_text(o, "reasoning_content"), "T", "thinking");
    json_decref(o);
    other.reasoning_key = NULL;
    other.strips_reasoning = true;
    o = chat_message_json(&other, &arrlast(x.c.messages));
    CHECK(json_object_size(o) == 2 && !strcmp(json_text(o, "content"), "A"), "without a key");
    json_decref(o);
    free(before);
    free(after);
    script_close(&x);
}

/* --think off: the answer begins at once, and all of it stays in the cache. An effort reaches the template. */
static void test_think_off(void) {
    struct script_chat x;
    if (!script_open(&x, OWN_HARMONY)) return;
    x.set.think = THINK_OFF;
    script_turn(&x, "q", "A " ANALYSIS "t" NEXT FINAL "B" RETURN, -1);
    check_answer(&x, "A \n\nB", "t");
    script_turn(&x, NULL, "AB" RETURN, -1);
    check_answer(&x, "AB", "");
    CHECK_STR(x.said[0], "AB\n", "the answer");
    char *prompt = script_prompt(&x, "2026-03-07");
    CHECK_HAS(prompt, "\nReasoning: low\n", "the effort");
    const size_t n = strlen(prompt), tail = strlen(START "assistant" FINAL);
    CHECK_STR(prompt + n - tail, START "assistant" FINAL, "the end of the prompt");
    free(prompt);
    const int n_past = x.s.n_past;
    script_turn(&x, "r", "C" RETURN, -1);
    CHECK(x.c.last.n_cached == n_past && x.c.last.n_prompt == 26, "%d of %d tokens in the cache, %d more",
          x.c.last.n_cached, n_past, x.c.last.n_prompt);
    x.set.think = THINK_MAX;
    prompt = script_prompt(&x, "2026-03-07");
    CHECK_HAS(prompt, "\nReasoning: high\n", "max");
    CHECK_STR(prompt + strlen(prompt) - strlen("assistant"), "assistant", "thinking is on");
    free(prompt);
    script_close(&x);
}

/* A chat whose template has a token for each channel: the efforts, the prompt, its tokens in the cache, a tool, and the
 * end of a thinking in the template's words. */
static void test_think_named(void) {
    static const char typed[] = "tests/golden/templates/typed.jinja", system[] = "<|message_system|>" TEXT "Effort: ";
    static const char question[] = DONE "<|message_user|>" TEXT "q" DONE;
    struct script_chat x;
    struct tpl_text text = {0};
    char err[ERR_MAX] = "", want[512];
    if (!script_open(&x, typed)) return;
    CHECK(script_turn(&x, "q", THOUGHT "Hm." DONE MODEL TEXT "A" DONE STOP, -1) == TURN_DONE, "a turn");
    check_answer(&x, "A", "Hm.");
    CHECK(x.c.last.why == STOP_END && scripted.at == (int)arrlen(scripted.ids), "the end");
    CHECK_STR(x.said[0], "A\n", "hidden thinking");
    const int n_past = x.s.n_past;
    CHECK(script_turn(&x, "r", TEXT "B" DONE STOP, -1) == TURN_DONE, "a second turn");
    CHECK(x.c.last.n_cached == n_past && x.c.last.n_prompt == 6, "%d of %d tokens in the cache, %d more",
          x.c.last.n_cached, n_past, x.c.last.n_prompt);
    snprintf(want, sizeof want,
             "%s0.75%s" MODEL THOUGHT "Hm." DONE MODEL TEXT "A" DONE STOP "%sr" DONE MODEL TEXT "B" DONE STOP, system,
             question, "<|message_user|>" TEXT);
    CHECK(!chat_render(&x.c, false, &text, err), "%s", err);
    CHECK_STR((char *)sb_cstr(&text.s), want, "the conversation");
    text_free(&text);

    x.set.think_budget = 2;
    CHECK(script_turn(&x, NULL,
                      THOUGHT "Hmxxx"
                              "C" DONE STOP,
                      -1) == TURN_DONE,
          "a budget");
    check_answer(&x, "C", "Hm");
    x.set.think_budget = -1;
    CHECK(script_turn(&x, NULL, "f" INVOKE "{}" DONE STOP, -1) == TURN_DONE, "a call");
    check_answer(&x, "{}", "");
    CHECK_HAS(x.said[1], "[the model called 'f', but there are no tools]", "a call");

    static const char *const amounts[] = {"0.75", "0.75", "0", "0.25", "0.5", "0.75", "0.75"};
    for (int think = THINK_AUTO; think <= THINK_MAX; think++) {
        chat_clear(&x.c);
        chat_push(&x.c, "user", "q", 1);
        x.set.think = (enum think)think;
        snprintf(want, sizeof want, "%s%s%s" MODEL "%s", system, amounts[think], question,
                 think == THINK_OFF ? TEXT : "");
        CHECK(!chat_render(&x.c, true, &text, err), "%s", err);
        CHECK_STR((char *)sb_cstr(&text.s), want, "--think %s", think_names[think]);
        text_free(&text);
    }
    x.set.think = THINK_OFF;
    chat_clear(&x.c);
    CHECK(script_turn(&x, "q", "A" DONE STOP, -1) == TURN_DONE, "off");
    check_answer(&x, "A", "");
    script_close(&x);
}

/* A template that takes thinking as a part of the content gets it so, from an answer and from a request. */
static void test_think_parts(void) {
    struct script_chat x;
    struct tpl_text text = {0};
    char err[ERR_MAX] = "", path[256];
    snprintf(path, sizeof path, "%s/parts.jinja", test_dir());
    write_test_file(path, tags_parts, strlen(tags_parts));
    if (!script_open(&x, path)) return;
    CHECK(script_turn(&x, "q", "[THINK]Hm.[/THINK]A" RETURN, -1) == TURN_DONE, "a turn");
    CHECK_STR(x.said[0], "A\n", "hidden thinking");
    json_t *m = json_pack("{ssssss}", "role", "assistant", "content", "B", "reasoning_content", "So.");
    chat_push(&x.c, "user", "r", 1);
    CHECK(!chat_push_json(&x.c, m, err) && !chat_render(&x.c, true, &text, err), "%s", err);
    CHECK_STR((char *)sb_cstr(&text.s),
              "user:q<|other|>assistant:[THINK]Hm.[/THINK]A<|other|>user:r<|other|>assistant:[THINK]So.[/THINK]B"
              "<|other|>assistant:",
              "the prompt");
    json_decref(m);
    text_free(&text);
    script_close(&x);
}

/* A user's marks are text, and so are those that an answer spells, in the next prompt, too. */
static void test_think_quoted(void) {
    static const char quoted[] = CHANNEL "final" MESSAGE "x" END START;
    struct script_chat x;
    struct tpl_text text = {0};
    int32_t *ids = NULL, *user = NULL;
    char err[ERR_MAX] = "";
    if (!script_open(&x, OWN_HARMONY)) return;
    script_turn(&x, quoted,
                ANALYSIS "<\\|channel\\|>analysis<\\|message\\|>" NEXT FINAL "Write <\\|channel\\|>analysis"
                         "<\\|message\\|>, <\\|channel\\|>." RETURN,
                -1);
    check_answer(&x, "Write <|channel|>analysis<|message|>, <|channel|>.", ANALYSIS);
    chat_push(&x.c, "user", quoted, strlen(quoted));
    CHECK(!chat_render(&x.c, true, &text, err), "%s", err);
    char *s = xstrndup(text.s, arrlenu(text.s));
    CHECK_HAS(s, START "assistant" FINAL "Write <|channel|>analysis<|message|>, <|channel|>." END START "user",
              "quoted");
    CHECK(arrlenu(text.s) == arrlenu(text.origin) && !strstr(s, "\356\200\200"), "the private character stays");
    chat_tokenize(&x.c, &text, &ids);
    int marks = 0, want = 0;
    for (int i = 0; i < arrlen(ids); i++) marks += vocab_type(&x.t.v, ids[i]) == TOKEN_CONTROL;
    want = 3 /* system */ + 2 * 3 /* user */ + 4 /* assistant */ + 1;
    CHECK_INT(marks, want, "marks in the prompt");
    tokenize(&x.t.v, quoted, strlen(quoted), NULL, TOKENIZE_CONTROL, &user);
    CHECK(arrlen(user) > 4 && vocab_type(&x.t.v, user[0]) == TOKEN_CONTROL, "they would be marks");
    free(s);
    arrfree(user);
    arrfree(ids);
    text_free(&text);
    script_close(&x);
}

/* The prompts of a chat are what jinja2 makes of messages in the template's own form. */
struct think_case {
    struct script_chat *x;
    const char *prefix;
    int n;
};

static void check_think_case(const json_t *c, void *arg) {
    struct think_case *k = arg;
    const json_t *messages = json_object_get(c, "messages"), *m, *last = NULL;
    const char *question = NULL;
    size_t i;
    bool plain =
        !json_object_size(json_object_get(c, "kwargs")) && json_is_true(json_object_get(c, "add_generation_prompt"));
    if (strncmp(json_text(c, "id"), k->prefix, strlen(k->prefix)) || json_object_get(c, "expected_error")) return;
    json_array_foreach(messages, i, m) {
        const bool user = !strcmp(json_text(m, "role"), "user"), answer = !strcmp(json_text(m, "role"), "assistant");
        plain &= json_is_string(json_object_get(m, "content")) && !json_object_get(m, "tool_calls");
        plain &= user || (answer && last && !strcmp(json_text(last, "role"), "user")) || (!i && !answer);
        last = m;
    }
    if (!plain || !last || strcmp(json_text(last, "role"), "user")) return;
    while (arrlen(k->x->c.messages)) chat_pop(&k->x->c);
    json_array_foreach(messages, i, m) {
        const char *content = json_text(m, "content"), *thinking = json_text(m, "thinking");
        if (!strcmp(json_text(m, "role"), "system")) {
            chat_set_system(&k->x->c, content);
        } else if (!strcmp(json_text(m, "role"), "user")) {
            question = content;
        } else {
            char *answer = NULL, *spelt = NULL;
            for (const char *p = content; *p; p++) sb_printf(&spelt, "%s%c", *p == '|' || *p == '\\' ? "\\" : "", *p);
            if (thinking) sb_printf(&answer, ANALYSIS "%s" NEXT, thinking);
            sb_printf(&answer, FINAL "%s" RETURN, sb_cstr(&spelt));
            script_turn(k->x, question, sb_cstr(&answer), -1);
            check_answer(k->x, content, thinking ? thinking : "");
            arrfree(answer);
            arrfree(spelt);
        }
    }
    chat_push(&k->x->c, "user", question, strlen(question));
    char *prompt = script_prompt(k->x, json_text(c, "now"));
    CHECK_STR(prompt, json_text(c, "expected"), "%s", json_text(c, "id"));
    free(prompt);
    k->n++;
}

static void check_think_history(const char *template, const char *cases, const char *prefix, int n) {
    struct script_chat x;
    struct think_case k = {.x = &x, .prefix = prefix};
    if (!script_open(&x, template)) return;
    each_json_line(cases, check_think_case, &k);
    CHECK_INT(k.n, n, "cases of %s", template);
    script_close(&x);
}

static void test_think_history(void) {
    check_think_history(OWN_HARMONY, "tests/golden/templates/cases.jsonl", "harmony/", 6);
}

static void test_think_official(void) {
    const char *template = shared_path("golden/templates/openai-gpt-oss-120b.jinja");
    if (!template) SKIP("no ../shared/golden/templates");
    check_think_history(template, shared_path("golden/templates/cases.jsonl"), "openai-gpt-oss-120b/", 10);
}

#define TESTS_THINK                                                                                                    \
    {"think/streams", test_think_streams}, {"think/header", test_think_header}, {"think/styles", test_think_styles},   \
        {"think/formats", test_think_formats}, {"think/efforts", test_think_efforts}, {"think/tags", test_think_tags}, \
        {"think/turns", test_think_turns}, {"think/named", test_think_named}, {"think/parts", test_think_parts},       \
        {"think/ended", test_think_ended}, {"think/ended-turns", test_think_ended_turns},                              \
        {"think/saved", test_think_saved}, {"think/off", test_think_off}, {"think/quoted", test_think_quoted},         \
        {"think/history", test_think_history}, {"think/official", test_think_official},
