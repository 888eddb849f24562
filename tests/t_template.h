/* The chat template: renderings of jinja2, the origin of every byte, errors and limits.
 *
 * tests/golden/templates has the template of the demo model and five that have in them what those of released families
 * need: channels, tags that are put together, tools as elements, turns that alternate, messages of typed parts.
 * cases.jsonl has conversations with what jinja2 3.1.6 makes of them (tests/oracle/gen_templates.py), snippets.jsonl
 * small templates, the variables in its first line. language.jsonl has the names of jinja2's filters, tests, globals,
 * loop variables and statements and of the methods of Python's types, and a template for each; refused_names has those
 * that are refused. */

/* Renders src; the text, or NULL with a message. *rc is that of template_render, or -3 if the source was refused. */
static char *render_text(const char *src, size_t n, const json_t *vars, struct tpl_text *out, int *rc, char *err) {
    struct template *t = template_parse(src, n, err);
    *rc = t ? template_render(t, vars, out, err) : -3;
    template_free(t);
    return *rc ? NULL : (char *)sb_cstr(&out->s);
}

/* The same with variables in JSON (NULL: none), for messages of tests; the caller frees. */
static char *render_string(const char *src, const char *vars_json, int *rc, char *err) {
    json_t *vars = vars_json ? json_loads(vars_json, 0, NULL) : json_object();
    struct tpl_text out = {0};
    char *s = render_text(src, strlen(src), vars, &out, rc, err);
    s = s ? xstrdup(s) : NULL;
    json_decref(vars);
    text_free(&out);
    return s;
}

/* Calls fn for every line of a file of JSON lines; the number of lines. */
static int each_json_line(const char *path, void (*fn)(const json_t *line, void *arg), void *arg) {
    char *file = NULL, err[ERR_MAX];
    int lines = 0;
    if (!CHECK(!read_file(path, &file, err), "%s", err)) return 0;
    for (const char *p = sb_cstr(&file); *p; lines++) {
        size_t n = strcspn(p, "\n");
        json_error_t e;
        json_t *line = json_loadb(p, n, JSON_ALLOW_NUL, &e);
        if (CHECK(line, "%s:%d: %s", path, lines + 1, e.text)) fn(line, arg);
        json_decref(line);
        p += n + (p[n] == '\n');
    }
    arrfree(file);
    return lines;
}

static const char *json_text(const json_t *o, const char *key) { return json_string_value(json_object_get(o, key)); }

/* The variables of a golden case. */
static json_t *case_vars(const json_t *c) {
    static const char *const copied[] = {"messages", "add_generation_prompt", "bos_token", "eos_token", "now"};
    json_t *vars = json_deep_copy(json_object_get(c, "kwargs"));
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++) {
        json_t *v = json_object_get(c, copied[i]);
        if (v && !json_is_null(v)) json_object_set_new(vars, copied[i], json_deep_copy(v));
    }
    return vars;
}

struct golden_templates {
    const char *dir;
    char *source; /* of the template `name`, kept for the next case */
    char name[128];
};

/* The template's source in g->source, without a NUL. */
static bool case_source(struct golden_templates *g, const json_t *c) {
    char path[1024], err[ERR_MAX];
    if (!strcmp(g->name, json_text(c, "template"))) return true;
    snprintf(g->name, sizeof g->name, "%s", json_text(c, "template"));
    snprintf(path, sizeof path, "%s/%s", g->dir, g->name);
    arrsetlen(g->source, 0);
    return CHECK(!read_file(path, &g->source, err), "%s", err);
}

static void check_case(const json_t *c, void *arg) {
    struct golden_templates *g = arg;
    struct tpl_text out = {0};
    char err[ERR_MAX] = "";
    const char *id = json_text(c, "id"), *expected = json_text(c, "expected"), *error = json_text(c, "expected_error");
    int rc;
    if (!case_source(g, c)) return;
    json_t *vars = case_vars(c);
    render_text(g->source, arrlenu(g->source), vars, &out, &rc, err);
    if (error) {
        CHECK(rc == -2 && !strcmp(err, error), "%s: rc %d, '%s'", id, rc, err);
    } else if (CHECK(!rc, "%s: rc %d, %s", id, rc, err)) {
        size_t n = json_string_length(json_object_get(c, "expected"));
        bool same = arrlenu(out.s) == n && !memcmp(out.s, expected, n);
        CHECK(same, "%s:\nexpected %s\nfound    %.*s", id, expected, (int)arrlen(out.s), out.s);
    }
    text_free(&out);
    json_decref(vars);
}

/* ---- origin ---- */

/* Texts that are special tokens of one of the models, to be typed by a user. */
static const char *const special_texts[] = {"<|im_start|>", "<|im_end|>",      "<|endoftext|>",
                                            "<｜User｜>",   "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
                                            "<|user|>",     "<|assistant|>",   "<|observation|>",
                                            "[gMASK]<sop>", "]~b]ai",          "[e~[",
                                            "<|im_user|>",  "<|im_middle|>",   "<|start|>",
                                            "<|message|>",  "<|end|>",         "<|return|>",
                                            "<|call|>",     "<tool_call>",     "{{ x }}",
                                            "{% if %}",     "<|channel|>",     "<|constrain|>",
                                            "[INST]",       "[/INST]",         "</s>",
                                            "[TOOL_CALLS]", "<assistant>",     "<think>"};

#define MARK_OPEN  "\ue000"
#define MARK_CLOSE "\ue001"

/* A content of special texts, each between private characters that no template has. */
static json_t *marked_content(void) {
    char *s = NULL;
    for (size_t i = 0; i < sizeof special_texts / sizeof *special_texts; i++)
        sb_printf(&s, "%s" MARK_OPEN "%s" MARK_CLOSE, i % 3 ? " " : "\n", special_texts[i]);
    json_t *v = json_stringn(s, arrlenu(s));
    arrfree(s);
    return v;
}

static void mark_message(json_t *m) {
    static const char *const thinking[] = {"thinking", "reasoning_content"};
    json_t *content = json_object_get(m, "content"), *part;
    size_t i;
    for (i = 0; i < 2; i++)
        if (json_object_get(m, thinking[i])) json_object_set_new(m, thinking[i], marked_content());
    if (json_is_string(content)) json_object_set_new(m, "content", marked_content());
    json_array_foreach(content, i, part) if (json_object_get(part, "text"))
        json_object_set_new(part, "text", marked_content());
}

/* Every byte between the marks is data; data outside of them is the blank before a mark, or a role. */
static void check_origins(const char *id, const struct tpl_text *out) {
    static const char *const roles[] = {"user", "system", "assistant"};
    size_t n = arrlenu(out->s);
    bool inside = false;
    if (!CHECK(arrlenu(out->origin) == n, "%s: %zu origins for %zu bytes", id, arrlenu(out->origin), n)) return;
    for (size_t i = 0; i < n; i++) {
        const char *p = out->s + i;
        bool open = n - i >= 3 && !memcmp(p, MARK_OPEN, 3), close = n - i >= 3 && !memcmp(p, MARK_CLOSE, 3);
        inside |= open;
        if (inside) {
            if (!CHECK(out->origin[i] == ORIGIN_DATA, "%s: typed text at byte %zu passes for the template's", id, i))
                return;
            if (!close) continue;
            for (size_t k = 1; k < 3; k++) CHECK(out->origin[i + k] == ORIGIN_DATA, "%s: byte %zu", id, i + k);
            inside = false, i += 2;
        } else if (out->origin[i] == ORIGIN_DATA && *p != ' ' && *p != '\n') {
            size_t run = 0, role = 0;
            while (i + run < n && out->origin[i + run] == ORIGIN_DATA) run++;
            while (role < 3 && !(run >= strlen(roles[role]) && !memcmp(p, roles[role], strlen(roles[role])))) role++;
            if (!CHECK(role < 3, "%s: '%.*s' passes for typed text", id, (int)run, p)) return;
            i += strlen(roles[role]) - 1;
        }
    }
}

static void check_case_origin(const json_t *c, void *arg) {
    struct golden_templates *g = arg;
    json_t *vars = case_vars(c), *m;
    struct tpl_text out = {0};
    char err[ERR_MAX] = "";
    size_t i;
    int rc;
    if (!case_source(g, c)) return;
    bool tools = json_object_get(vars, "tools") || json_object_get(vars, "response_format"); /* data without marks */
    json_array_foreach(json_object_get(vars, "messages"), i, m) {
        tools |=
            json_object_get(m, "tool_calls") || json_object_get(m, "tools") || json_object_get(m, "response_format");
        mark_message(m);
    }
    if (tools) {
        json_decref(vars);
        return;
    }
    if (render_text(g->source, arrlenu(g->source), vars, &out, &rc, err)) check_origins(json_text(c, "id"), &out);
    else CHECK(rc == -2 && json_text(c, "expected_error"), "%s: rc %d, %s", json_text(c, "id"), rc, err);
    text_free(&out);
    json_decref(vars);
}

static void golden_templates(const char *dir, int cases, void (*check)(const json_t *c, void *arg)) {
    struct golden_templates g = {.dir = dir};
    char path[1024];
    snprintf(path, sizeof path, "%s/cases.jsonl", dir);
    int n = each_json_line(path, check, &g);
    CHECK(n == cases, "%s: %d cases instead of %d", path, n, cases);
    arrfree(g.source);
}

static void test_template_demo(void) { golden_templates("tests/golden/templates", 156, check_case); }

static void test_template_demo_origin(void) { golden_templates("tests/golden/templates", 156, check_case_origin); }

static void test_template_official(void) {
    const char *dir = shared_path("golden/templates");
    if (!dir) SKIP("no ../shared/golden/templates");
    golden_templates(dir, 338, check_case);
}

static void test_template_official_origin(void) {
    const char *dir = shared_path("golden/templates");
    if (!dir) SKIP("no ../shared/golden/templates");
    golden_templates(dir, 338, check_case_origin);
}

/* Operations on u, a user's text "aB <|x|>", and t, template text: the result, and its origins (d data, t template). */
static void test_template_operations(void) {
    static const struct {
        const char *expr, *text, *origin;
    } op[] = {
        {"'<' + u[3:6] + '>'", "<<|x>", "tdddt"},
        {"'a' ~ u[0] ~ 1", "aa1", "tdt"},
        {"u|trim('a>')", "B <|x|", "dddddd"},
        {"u.split(' ')|join('_')", "aB_<|x|>", "ddtddddd"},
        {"u.rsplit(' ', 1)[-1]", "<|x|>", "ddddd"},
        {"u.replace('x', 'im_end')", "aB <|im_end|>", "dddddttttttdd"},
        {"'-x-'.replace('x', u[:2])", "-aB-", "tddt"},
        {"u|upper ~ u|lower ~ u|title", "AB <|X|>ab <|x|>Ab <|x|>", "dddddddddddddddddddddddd"},
        {"u[::-1]", ">|x|< Ba", "dddddddd"},
        {"u * 2", "aB <|x|>aB <|x|>", "dddddddddddddddd"},
        {"'[%s]' % u", "[aB <|x|>]", "tddddddddt"},
        {"'<{}>'.format(u[:2])", "<aB>", "tddt"},
        {"'{1}{{{0}}}{n}'.format(u[:1], 'x', n=messages[0].n)", "x{a}7", "ttdtd"},
        {"'{:>3}{:.1}{:02d}{:03d}'.format(u[:1], u, messages[0].n, 5)", "  aa07005", "ddddddttt"},
        {"(u[3:5] ~ '{}{:2}').format('x', 1)", "<|x 1", "ddttt"},
        {"(lines[:0] ~ fmt).format('x', 1)", "-x 1", "dtdd"},
        {"u[:2]|tojson", "\"aB\"", "dddd"},
        {"{'k': u[:1]}|tojson", "{\"k\": \"a\"}", "ttttttdddt"},
        {"messages[0]|tojson", "{\"u\": \"aB <|x|>\", \"n\": 7}", "ddddddddddddddddddddddddd"},
        {"messages[0].n ~ 7", "77", "dt"},
        {"messages[0].n + 1", "8", "d"},
        {"[u[:1]]", "['a']", "tdddt"},
        {"messages[0]|list|first", "u", "d"},
        {"messages[0].items()|map('first')|join", "un", "dd"},
        {"u|default('x')", "aB <|x|>", "dddddddd"},
        {"u[3:]|e", "&lt;|x|&gt;", "ddddddddddd"},
        {"(u[:1] ~ '\\n' ~ u[1:2])|indent(1)", "a\n B", "dttd"},
        {"[u, 'x']|map('upper')|list|last", "X", "t"},
        {"u|list|reverse|join", ">|x|< Ba", "dddddddd"},
        {"u.splitlines()[0][:1]", "a", "d"},
        {"('{\"k\": \"' ~ u[:1] ~ '\"}')|from_json|tojson", "{\"k\": \"a\"}", "dddddddddd"},
        {"strftime_now('%Y') ~ strftime_now(u[:1])", "2026a", "ttttd"},
        {"bos_token ~ u[:1]", "<s>a", "tttd"},
        {"m(u[:1])", "(a)", "tdt"},
        {"('1' ~ digit)|int ~ digit|float ~ digit|int|abs ~ digit|int|round ~ -7|abs", "177.0777", "dddddddt"},
        {"'x'|int ~ '7'|int ~ u|int(5)", "075", "ttt"},
        {"'%d' % digit|float", "7", "d"},
        {"lines|indent(1)", "a\n b", "ddtd"},
        {"[1, 2]|tojson(separators=(u[3:], ': '))", "[1<|x|>2]", "ttdddddtt"},
        {"{'k': 1}|tojson(separators=(',', u[:1]))", "{\"k\"a1}", "ttttdtt"},
        {"[1]|tojson(indent=u[:2])", "[\naB1\n]", "ttddttt"},
        {"(u[:1] ~ 'x') ~ u[1:2] ~ 'y'", "axBy", "dtdt"},
        {"ns.v ~ s", "aB <|x|>[aB <|x|>]", "ddddddddtddddddddt"},
        {"u[:2]|center(4) ~ u[:1].rjust(2, u[1:2]) ~ u[:1].zfill(2)", " aB Ba0a", "tddtddtd"},
        {"u|truncate(5, true, '.', 0) ~ u[2:5]|urlencode ~ {u[:1]: 1}|urlencode", "aB <.%20%3C%7Ca=1",
         "ddddtddddddddddtt"},
        {"u.partition(' ')|join ~ [u[:1]]|batch(2, 'x')|first|join", "aB <|x|>ax", "dddddddddt"},
        {"{u[:1]: u[3:4]}|xmlattr ~ messages[1]|groupby(0)|map(attribute='grouper')|first", " a=\"&lt;\"d",
         "tdttddddtd"},
        {"u[:1].center(3, '*') ~ u[:1].ljust(3) ~ u[:1].rjust(3, u[1:2])", "*a*a  BBa", "tdtdttddd"},
        {"u.rpartition('|')|join('_')", "aB <|x_|_>", "ddddddtdtd"},
        {"messages[0].n|filesizeformat ~ 7|filesizeformat", "7 Bytes7 Bytes", "dddddddttttttt"},
        {"[u[:1], 'x', u[1:2]]|slice(2, 'y')|map('join')|join", "axBy", "dtdt"},
        {"[u[:1], 'x', u[1:2]]|batch(2, 'y')|map('join')|join", "axBy", "dtdt"},
        {"ns|attr('v') ~ cycler(u[:2], 'x').next() ~ cycler('x').next()", "aB <|x|>aBx", "ddddddddddt"},
        {"jo() ~ jo() ~ joiner('x')()", "aB", "dd"},
        {"k('x', a=u[:1]) ~ self.b()", "ax<a>", "dttdt"},
        {"(u ~ ' yy')|wordwrap(5) ~ 'x y'|wordwrap(1, true, u[:1])", "aB\n<|x|>\nyyxay", "ddtdddddttttdt"},
        {"('<b>' ~ u[:1] ~ '</b>  x&lt;&' ~ messages[1].lt)|striptags ~ u|striptags", "a x<<aB", "dtttddd"},
        {"'%3s|%d|%03d|%c|%r' % (u[:1], messages[0].n, 5, messages[0].n + 58, u[:1])", "  a|7|005|A|'a'",
         "dddtdtttttdtddd"},
        {"'%*d' % (messages[0].n, 5) ~ (digit ~ '%d') % 5", "      575", "ddddddddt"},
        {"'%(a)s' % {'a': u[:1]} ~ '%s%s'|format(u[1:2], 'x')", "aBx", "ddt"},
        {"('<%s'|safe) % u[3:4] ~ ('-'|safe).join([u[3:4], 1])", "<&lt;&lt;-1", "tddddddddtt"},
        {"'{:+d}|{:,}|{!r:>4}|{:{}}'.format(messages[0].n, 1234, u[:1], 'x', 3)", "+7|1,234| 'a'|x  ",
         "ddttttttt"
         "ddddtttt"},
        {"'{:{}}'.format('x', messages[0].n) ~ '{m[0].u}'.format(m=messages)", "x      aB <|x|>", "tdddddddddddddd"},
        {"'{a}-'.format_map({'a': u[:1]}) ~ messages[1].tab.expandtabs(3) ~ 'x\\ty'.expandtabs(2)", "a-a  bx y",
         "dtddddttt"},
        {"u[:2]|capitalize ~ u[:2].swapcase() ~ u[:2].casefold() ~ ('ß' ~ u[:1])|upper", "AbAbabSSA", "ddddddttd"},
        {"u[:2].translate({97: 'x', 66: 98}) ~ 'ab'.translate({97: u[:2], 98: messages[0].n + 58})", "xbaBA", "tdddd"},
        {"'ab'.translate(''.maketrans('a', u[1:2])) ~ u[3:4]|e|forceescape", "Bb&amp;lt;", "dtdddddddd"},
        {"[u[:1], 'x']|pprint ~ ('0x' ~ digit)|int(0, 16)", "['a', 'x']7", "tdddttttttd"},
        {"{'k': u[:1] * 40, 'l': 'y' * 40}|pprint",
         "{'k': 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',\n 'l': 'yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy'}",
         "ttttttdddddddddddddddddddddddddddddddddddddddddd"
         "ttttttttttttttttttttttttttttttttttttttttttttttttttt"},
        {"messages[0].n.bit_length() ~ messages[0].n.real ~ messages[0].n.as_integer_ratio()", "37(7, 1)", "ddtdttdt"},
        {"u if true else 'x'", "aB <|x|>", "dddddddd"},
        {"'x' and u or 'y'", "aB <|x|>", "dddddddd"},
    };
    static const char head[] = "{%- set u = messages[0].u -%}{%- set digit = messages[1].digit -%}"
                               "{%- set lines = messages[1].lines -%}{%- set fmt = messages[1].fmt -%}{%- macro m(a) "
                               "-%}({{ a }}){%- endmacro -%}"
                               "{%- macro k() -%}{{ kwargs.a }}{{ varargs[0] }}{%- endmacro -%}"
                               "{%- set jo = joiner(u[:2]) -%}{%- if false -%}{%- block b -%}<{{ messages[0].u[:1] }}>"
                               "{%- endblock -%}{%- endif -%}"
                               "{%- set ns = namespace(v=u) -%}{%- set s -%}[{{ u }}]{%- endset -%}";
    json_t *vars = json_loads("{\"messages\": [{\"u\": \"aB <|x|>\", \"n\": 7}, {\"digit\": \"7\", "
                              "\"lines\": \"a\\nb\", \"fmt\": \"-{}{:2}\", \"lt\": \"lt;\", \"tab\": \"a\\tb\"}], "
                              "\"bos_token\": \"<s>\", \"now\": \"2026-11-20\"}",
                              0, NULL);
    for (size_t i = 0; i < sizeof op / sizeof *op; i++) {
        struct tpl_text out = {0};
        char *src = NULL, err[ERR_MAX] = "";
        int rc;
        sb_printf(&src, "%s{{ %s }}", head, op[i].expr);
        const char *s = render_text(src, arrlenu(src), vars, &out, &rc, err);
        if (CHECK(s, "%s: %s", op[i].expr, err) && CHECK(!strcmp(s, op[i].text), "%s: '%s'", op[i].expr, s)) {
            CHECK(strlen(op[i].origin) == arrlenu(out.s), "%s: %zu bytes", op[i].expr, arrlenu(out.s));
            for (size_t k = 0; op[i].origin[k] && k < arrlenu(out.s); k++)
                CHECK(out.origin[k] == (op[i].origin[k] == 'd'), "%s: the origin of byte %zu", op[i].expr, k);
        }
        arrfree(src);
        text_free(&out);
    }
    json_decref(vars);
}

/* ---- the language ---- */

struct snippets {
    json_t *vars;
    int n;
};

static void check_snippet(const json_t *c, void *arg) {
    struct snippets *s = arg;
    if (!s->vars) {
        s->vars = json_incref(json_object_get(c, "vars"));
        return;
    }
    const json_t *source = json_object_get(c, "template"), *expected = json_object_get(c, "expected");
    struct tpl_text out = {0};
    char err[ERR_MAX] = "";
    int rc;
    render_text(json_string_value(source), json_string_length(source), s->vars, &out, &rc, err);
    if (CHECK(!rc, "%s: %s", json_string_value(source), err)) {
        size_t n = json_string_length(expected);
        bool same = arrlenu(out.s) == n && (!n || !memcmp(out.s, json_string_value(expected), n));
        CHECK(same, "%s:\nexpected %s\nfound    %.*s", json_string_value(source), json_string_value(expected),
              (int)arrlen(out.s), out.s);
    }
    text_free(&out);
    s->n++;
}

static void test_template_snippets(void) {
    struct snippets s = {0};
    each_json_line("tests/golden/templates/snippets.jsonl", check_snippet, &s);
    CHECK(s.n >= 200, "%d snippets", s.n);
    json_decref(s.vars);
}

/* What jinja2 and Python have and templates of moe do not: the names of language.jsonl that are refused there, a template
 * that uses each, and the message. The message has the reason, or is jinja2's own: its sandbox refuses the methods that
 * change lists and dictionaries. */
static const struct {
    const char *name, *source, *message;
} refused_names[] = {
    {"filter random", "{{ [1]|random }}",
     "random is not supported: its result is random, and a prompt is the same text whenever it is rendered"},
    {"filter urlize", "{{ 'a'|urlize }}", "urlize is not supported: it makes links for web pages"},
    {"global lipsum", "{{ lipsum() }}",
     "lipsum is not supported: its result is random, and a prompt is the same text whenever it is rendered"},
    {"statement extends", "{% extends 'x' %}",
     "the statement 'extends' is not supported: a template cannot read other files"},
    {"statement from", "{% from 'x' import y %}",
     "the statement 'from' is not supported: a template cannot read other files"},
    {"statement import", "{% import 'x' as y %}",
     "the statement 'import' is not supported: a template cannot read other files"},
    {"statement include", "{% include 'x' %}",
     "the statement 'include' is not supported: a template cannot read other files"},
    {"str encode", "{{ 'a'.encode() }}", "encode is not supported: a template has no values of the type bytes"},
    {"int from_bytes", "{{ (1).from_bytes('a') }}",
     "from_bytes is not supported: a template has no values of the type bytes"},
    {"int to_bytes", "{{ (1).to_bytes(1) }}", "to_bytes is not supported: a template has no values of the type bytes"},
    {"float fromhex", "{{ (1.0).fromhex('a') }}",
     "fromhex is not supported: it makes a number of a text, for which there is the filter float"},
    {"list append", "{{ [].append(1) }}", "access to attribute 'append' of 'list' object is unsafe."},
    {"list clear", "{{ [].clear() }}", "access to attribute 'clear' of 'list' object is unsafe."},
    {"list extend", "{{ [].extend([]) }}", "access to attribute 'extend' of 'list' object is unsafe."},
    {"list insert", "{{ [].insert(0, 1) }}", "access to attribute 'insert' of 'list' object is unsafe."},
    {"list pop", "{{ [1].pop() }}", "access to attribute 'pop' of 'list' object is unsafe."},
    {"list remove", "{{ [1].remove(1) }}", "access to attribute 'remove' of 'list' object is unsafe."},
    {"list reverse", "{{ [1].reverse() }}", "access to attribute 'reverse' of 'list' object is unsafe."},
    {"list sort", "{{ [1].sort() }}", "access to attribute 'sort' of 'list' object is unsafe."},
    {"dict clear", "{{ {}.clear() }}", "access to attribute 'clear' of 'dict' object is unsafe."},
    {"dict pop", "{{ {}.pop('a') }}", "access to attribute 'pop' of 'dict' object is unsafe."},
    {"dict popitem", "{{ {}.popitem() }}", "access to attribute 'popitem' of 'dict' object is unsafe."},
    {"dict setdefault", "{{ {}.setdefault('a') }}", "access to attribute 'setdefault' of 'dict' object is unsafe."},
    {"dict update", "{{ {}.update(a=1) }}", "access to attribute 'update' of 'dict' object is unsafe."},
};

struct language {
    struct snippets snippets;
    json_t *names; /* of jinja2 and Python, by group */
    json_t *rows;  /* "group name" of every row so far */
};

static void check_language(const json_t *c, void *arg) {
    struct language *l = arg;
    if (!l->names) l->names = json_incref(json_object_get(c, "names"));
    else if (CHECK(!json_object_get(l->rows, json_text(c, "name")), "%s has two rows", json_text(c, "name")))
        json_object_set_new(l->rows, json_text(c, "name"), json_true());
    check_snippet(c, &l->snippets);
}

/* Every name of jinja2 and of the types of Python renders as jinja2 does, or is refused with a reason. */
static void test_template_language(void) {
    struct language l = {.rows = json_object()};
    const char *group;
    json_t *listed, *name;
    size_t i, n = 0;
    each_json_line("tests/golden/templates/language.jsonl", check_language, &l);
    for (i = 0; i < sizeof refused_names / sizeof *refused_names; i++) {
        char err[ERR_MAX] = "", message[ERR_MAX];
        int rc;
        snprintf(message, sizeof message, "line 1: %s", refused_names[i].message);
        char *s = render_string(refused_names[i].source, NULL, &rc, err);
        CHECK(!s && !strcmp(err, message), "%s: '%s'", refused_names[i].name, s ? s : err);
        CHECK(!json_object_get(l.rows, refused_names[i].name), "%s is rendered and refused", refused_names[i].name);
        json_object_set_new(l.rows, refused_names[i].name, json_true());
        free(s);
    }
    json_object_foreach(l.names, group, listed) json_array_foreach(listed, i, name) {
        char row[64];
        snprintf(row, sizeof row, "%s %s", group, json_string_value(name));
        CHECK(json_object_get(l.rows, row), "no row for %s", row);
        n++;
    }
    CHECK(n > 200 && json_object_size(l.rows) == n, "%zu names, %zu rows", n, json_object_size(l.rows));
    json_decref(l.snippets.vars);
    json_decref(l.names);
    json_decref(l.rows);
}

/* test_moe --render-lines: reads JSON lines from stdin, {"vars": variables} and then {"template": source} .., and prints
 * {"text": rendering} or {"error": message} for each. tests/oracle/gen_templates.py --fuzz compares these with jinja2. */
static int template_render_lines(void) {
    json_t *vars = NULL, *line;
    for (json_error_t e; (line = json_loadf(stdin, JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, &e)); json_decref(line)) {
        const json_t *source = json_object_get(line, "template");
        if (!source) {
            json_decref(vars);
            vars = json_incref(json_object_get(line, "vars"));
            continue;
        }
        struct tpl_text out = {0};
        char err[ERR_MAX] = "";
        int rc;
        const char *s = render_text(json_string_value(source), json_string_length(source), vars, &out, &rc, err);
        json_t *reply = s ? json_pack("{s:s%}", "text", s, arrlenu(out.s)) : json_pack("{s:s}", "error", err);
        if (!reply) reply = json_pack("{s:s}", "error", "the text is not UTF-8");
        json_dumpf(reply, stdout, JSON_COMPACT);
        putchar('\n');
        fflush(stdout);
        json_decref(reply);
        text_free(&out);
    }
    json_decref(vars);
    return 0;
}

/* ---- errors and limits ---- */

/* Templates that end in an error. */
static const struct {
    const char *source;
    int rc; /* -3: refused, -1: failed, -2: raise_exception */
    const char *message;
} template_errors[] = {
    {"a\n\n{% include 'x' %}", -3,
     "line 3: the statement 'include' is not supported: a template cannot read other files"},
    {"{% import 'x' as y %}", -3,
     "line 1: the statement 'import' is not supported: a template cannot read other files"},
    {"{% extends 'x' %}", -3, "line 1: the statement 'extends' is not supported: a template cannot read other files"},
    {"{% if 1 %}{% endfor %}", -3, "line 1: the statement 'endfor' is unknown, not supported or out of place"},
    {"{% autoescape true %}{% endautoescape %}", -1,
     "line 1: autoescape is not supported: the text of a prompt is not HTML"},
    {"{% for x in [1] %}{{ loop([]) }}{% endfor %}", -1,
     "line 1: The loop must have the 'recursive' marker to be called recursively."},
    {"{{ [1]|slice(0)|list }}", -1, "line 1: slice: the number of slices must not be 0"},
    {"{{ range(3)|tojson }}", -1, "line 1: Object of type range is not JSON serializable"},
    {"{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", -1, "line 1: the macro takes not more than 1 argument(s)"},
    {"{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", -1,
     "line 1: the macro has no parameter 'b' and does not use kwargs"},
    {"\n{{ x|nofilter }}", -3, "line 2: No filter or test named 'nofilter'."},
    {"\n{{ x is notest }}", -3, "line 2: No filter or test named 'notest'."},
    {"{% if true %}\n{{ 1|nofilter }}{% endif %}", -1, "line 2: No filter named 'nofilter'."},
    {"{% if x %}\n", -3, "line 1: expected elif else endif, found the end of the template"},
    {"{{ 'abc }}", -3, "line 1: a string without its closing '"},
    {"{# x", -3, "line 1: missing end of comment"},
    {"{% raw %} x", -3, "line 1: missing end of raw block"},
    {"{{ (1] }}", -3, "line 1: unexpected ']'"},
    {"{{ 1 +", -3, "line 1: the template ends inside a tag"},
    {"{{ }}", -3, "line 1: expected an expression, found '}}'"},
    {"{% break %}", -3, "line 1: 'break' outside of a loop"},
    {"{% for i in [1] %}{% set loop = 1 %}{% endfor %}", -3, "line 1: Can't assign to special loop variable"},
    {"{% set 1 = 2 %}", -3, "line 1: expected a name to assign to, found '='"},
    {"\n{{ x.y }}", -1, "line 2: 'x' is undefined"},
    {"{{ messages[0].nope.x }}", -1, "line 1: 'dict object' has no attribute 'nope'"},
    {"{{ messages[7].role }}", -1, "line 1: list object has no element 7"},
    {"{{ none.a.b }}", -1, "line 1: 'None' has no attribute 'a'"},
    {"{{ 'a' + 1 }}", -1, "line 1: unsupported operand type(s) for +: 'str' and 'int'"},
    {"{{ 'a' + x }}", -1, "line 1: 'x' is undefined"},
    {"{{ 1 / 0 }}", -1, "line 1: division by zero"},
    {"{{ nofunction(1) }}", -1, "line 1: 'nofunction' is undefined"},
    {"{{ 5() }}", -1, "line 1: 'int' object is not callable"},
    {"{{ [].append(1) }}", -1, "line 1: access to attribute 'append' of 'list' object is unsafe."},
    {"{{ {}.update(a=1) }}", -1, "line 1: access to attribute 'update' of 'dict' object is unsafe."},
    {"{% set x = [] %}{% set x.y = 1 %}", -1, "line 1: cannot assign attribute on non-namespace object"},
    {"{% for a, b in [[1]] %}{% endfor %}", -1, "line 1: not enough values to unpack (expected 2, got 1)"},
    {"{{ x|tojson }}", -1, "line 1: Object of type Undefined is not JSON serializable"},
    {"{{ 'a'.split(1, 2, 3) }}", -1, "line 1: split() takes at most 2 arguments, not 3"},
    {"{{ 'a'.strip(x=1) }}", -1, "line 1: strip() got a keyword twice, or one that is not a parameter (chars?)"},
    {"{{ {[]: 1} }}", -1, "line 1: unhashable type: 'list'"},
    {"{{ dict(**[1]) }}", -1, "line 1: the argument after ** is not a mapping, but 'list'"},
    {"{{ range(*5) }}", -1, "line 1: 'int' object is not iterable"},
    {"{{ range(*[1], 2) }}", -3, "line 1: positional argument follows keyword argument"},
    {"{% macro f(*a) %}{% endmacro %}", -3, "line 1: expected a name, found '*'"},
    {"{{ 1.5|round(400, 'ceil') }}", -1, "line 1: round: the number or the precision is out of range"},
    {"{{ 1.7e308|round(-308) }}", -1, "line 1: the rounded value is too large"},
    {"{{ 9223372036854775807|round(-1) }}", -1, "line 1: integer overflow in round()"},
    {"{{ '%d' % 1e300 }}", -1, "line 1: integer overflow in %d"},
    {"{{ '%d' % ('nan'|float) }}", -1, "line 1: integer overflow in %d"},
    {"{{ 1e300|int }}", -1, "line 1: integer overflow in int()"},
    {"{{ '{'.format(1) }}", -1, "line 1: Single '{' encountered in format string"},
    {"{{ 'a}'.format(1) }}", -1, "line 1: Single '}' encountered in format string"},
    {"{{ '{0'.format(1) }}", -1, "line 1: expected '}' before end of string"},
    {"{{ '{}{}'.format(1) }}", -1, "line 1: format() has no argument for the field '{}'"},
    {"{{ '{1}'.format(1) }}", -1, "line 1: format() has no argument for the field '{1}'"},
    {"{{ '{x}'.format(1) }}", -1, "line 1: format() has no argument for the field '{x}'"},
    {"{{ '{}{0}'.format(1) }}", -1,
     "line 1: cannot switch between automatic field numbering and manual field specification"},
    {"{{ '{0}{}'.format(1) }}", -1,
     "line 1: cannot switch between automatic field numbering and manual field specification"},
    {"{{ '{!x}'.format(1) }}", -1, "line 1: Unknown conversion specifier x"},
    {"{{ '{!r'.format(1) }}", -1, "line 1: unmatched '{' in format spec"},
    {"{{ '{!'.format(1) }}", -1, "line 1: end of string while looking for conversion specifier"},
    {"{{ '{!rx}'.format(1) }}", -1, "line 1: expected ':' after conversion specifier"},
    {"{{ '{:{}'.format(1, 2) }}", -1, "line 1: unmatched '{' in format spec"},
    {"{{ '{a{}'.format(1, 2) }}", -1, "line 1: unexpected '{' in field name"},
    {"{{ '{:{:{:{}}}}'.format(1, 2, 3, 4) }}", -1, "line 1: Max string recursion exceeded"},
    {"{{ '{0.}'.format(1) }}", -1, "line 1: Empty attribute in format string"},
    {"{{ '{0[}'.format(1) }}", -1, "line 1: expected '}' before end of string"},
    {"{{ '{0[a]b}'.format(1) }}", -1, "line 1: Only '.' or '[' may follow ']' in format field specifier"},
    {"{{ '{0.a.b}'.format(1) }}", -1, "line 1: 'int object' has no attribute 'a'"},
    {"{{ '{.real}'.format(1) }}", -1, "line 1: format() has no argument for the field '{.real}'"},
    {"{{ '{0._a}'.format(namespace(_a=1)) + 1 }}", -1, "line 1: unsupported operand type(s) for +: 'str' and 'int'"},
    {"{{ '{0._a.b}'.format(namespace(_a=1)) }}", -1,
     "line 1: access to attribute '_a' of 'Namespace' object is unsafe."},
    {"{{ '{a}'.format_map(1) }}", -1, "line 1: format_map() wants a mapping"},
    {"{{ '{a}'.format_map({}, 1) }}", -1, "line 1: format_map() takes exactly one argument"},
    {"{{ '{:,_}'.format(1) }}", -1, "line 1: the format ',_' has two signs for groups"},
    {"{{ '{:,x}'.format(1) }}", -1, "line 1: the format ',x' is not supported for an object of type 'int'"},
    {"{{ '{:.2d}'.format(1) }}", -1, "line 1: the format '.2d' is not supported for an object of type 'int'"},
    {"{{ '{:zd}'.format(1) }}", -1, "line 1: the format 'zd' is not supported for an object of type 'int'"},
    {"{{ '{:+c}'.format(1) }}", -1, "line 1: the format '+c' is not supported for an object of type 'int'"},
    {"{{ '{:x}'.format(1.5) }}", -1, "line 1: the format 'x' is not supported for an object of type 'float'"},
    {"{{ '{:y}'.format(1) }}", -1, "line 1: the format 'y' is not supported for an object of type 'int'"},
    {"{{ '{:5 }'.format(1) }}", -1, "line 1: the format '5 ' is not supported for an object of type 'int'"},
    {"{{ '{:5dd}'.format(1) }}", -1, "line 1: invalid format '5dd'"},
    {"{{ '{:c}'.format(1114112) }}", -1, "line 1: %c arg not in range(0x110000)"},
    {"{{ '%c' % 55296 }}", -1, "line 1: the code point 55296 is half of a character"},
    {"{{ '{:.}'.format(1) }}", -1, "line 1: the format '.' has no precision after the point"},
    {"{{ '{:d}'.format('a') }}", -1, "line 1: the format 'd' is not supported for an object of type 'str'"},
    {"{{ '{:=4}'.format('a') }}", -1, "line 1: the format '=4' is not supported for an object of type 'str'"},
    {"{{ '{:+}'.format('a') }}", -1, "line 1: the format '+' is not supported for an object of type 'str'"},
    {"{{ '{:s}'.format(1) }}", -1, "line 1: the format 's' is not supported for an object of type 'int'"},
    {"{{ '%d' % 'a' }}", -1, "line 1: %d format: a number is required, not str"},
    {"{{ '%x' % 1.5 }}", -1, "line 1: %x format: an integer is required, not float"},
    {"{{ '%f' % none }}", -1, "line 1: %f format: a number is required, not NoneType"},
    {"{{ '%d' % x }}", -1, "line 1: 'x' is undefined"},
    {"{{ '%c' % 'ab' }}", -1, "line 1: %c requires int or char"},
    {"{{ '%d %d' % 1 }}", -1, "line 1: not enough arguments for format string"},
    {"{{ '%d' % (1, 2) }}", -1, "line 1: not all arguments converted during string formatting"},
    {"{{ '%*d' % ('a', 1) }}", -1, "line 1: * wants int"},
    {"{{ '%y' % 1 }}", -1, "line 1: unsupported format character in '%y'"},
    {"{{ '%5%' % () }}", -1, "line 1: unsupported format character in '%5%'"},
    {"{{ '%5' % 1 }}", -1, "line 1: incomplete format"},
    {"{{ '%(a' % {'a': 1} }}", -1, "line 1: incomplete format key"},
    {"{{ '%(a)s' % 1 }}", -1, "line 1: format requires a mapping"},
    {"{{ '%(a)s' % {} }}", -1, "line 1: the mapping has no key 'a'"},
    {"{{ '%s'|format(1, a=2) }}", -1, "line 1: can't handle positional and keyword arguments at the same time"},
    {"{{ 'a'|wordwrap(0) }}", -1, "line 1: wordwrap: invalid width 0 (must be > 0)"},
    {"{{ 5|wordwrap }}", -1, "line 1: wordwrap: 'int' is not a string"},
    {"{{ '&rarr;'|striptags }}", -1, "line 1: striptags: the character reference '&rarr;' is not supported"},
    {"{{ {x: 1, 2: 3}|pprint }}", -1, "line 1: 'x' is undefined"},
    {"{{ {range: 1, 2: 3}|pprint }}", -1, "line 1: pprint: keys of the type function cannot be sorted"},
    {"{{ 'a'.translate({97: 1.5}) }}", -1, "line 1: character mapping must return integer, None or str"},
    {"{{ ''.maketrans('ab', 'c') }}", -1, "line 1: the first two maketrans arguments must have equal length"},
    {"{{ ''.maketrans({'ab': 1}) }}", -1, "line 1: maketrans: expected one character"},
    {"{{ [{}].index({'a': 1}) }}", -1, "line 1: the value is not in the list"},
    {"{{ {([],): 1} }}", -1, "line 1: unhashable type: 'tuple'"},
    {"{{ ('inf'|float).as_integer_ratio() }}", -1, "line 1: cannot convert Infinity to integer ratio"},
    {"{{ (1e300).as_integer_ratio() }}", -1, "line 1: integer overflow in as_integer_ratio()"},
    {"{{ ('9' * 70)|int }}", -1, "line 1: a number in a string is longer than 63 bytes"},
    {"{{ 9223372036854775808 }}", -3, "line 1: the number '9223372036854775808' is too large"},
    {"{{ 0x8000000000000000 }}", -3, "line 1: integer overflow in int()"},
    {"{{ 1__0 }}", -3, "line 1: expected the end of the tag, found '__0'"},
    {"{{ 0x }}", -3, "line 1: expected the end of the tag, found 'x'"},
    {"{{ 007 }}", -3, "line 1: expected the end of the tag, found '7'"},
    {"{{ {'a': 1}.keys() - [] }}", -1,
     "line 1: the difference of views is not supported: a template has no values of the type set"},
    {"{% block a %}{% endblock %}{% block a %}{% endblock %}", -3, "line 1: block 'a' defined twice"},
    {"{% block a %}{% endblock b %}", -3, "line 1: expected the end of the tag, found 'b'"},
    {"{% block a required %} {# x #}{% endblock %}", -1, "line 1: Required block 'a' not found"},
    {"{% block a required %}x{% endblock %}", -3, "line 1: Required blocks can only contain comments or whitespace"},
    {"{% block a %}{{ super() }}{% endblock %}", -1, "line 1: there is no parent block called 'a'."},
    {"{% for i in [1] %}{% block a %}{% break %}{% endblock %}{% endfor %}", -3, "line 1: 'break' outside of a loop"},
    {"{{ ['a']|map('upper') }}", -1,
     "line 1: the text of a generator is not supported: in Python it has an address of memory"},
    {"{{ [range] }}", -1, "line 1: the text of a function is not supported: in Python it has an address of memory"},
    {"{{ self.a() }}", -1, "line 1: 'TemplateReference object' has no attribute 'a'"},
    {"{{ ('{:4}'|safe).format('a'|e) }}", -1, "line 1: the format '4' is not supported for markup in markup"},
    {"{{ '{:4}'.format(none) }}", -1, "line 1: unsupported format string passed to NoneType.__format__"},
    {"{{ '{:4}'.format(x) }}", -1, "line 1: unsupported format string passed to Undefined.__format__"},
    {"{{ '{:999999999999}'.format(1) }}", -1, "line 1: a number in the format '999999999999' is larger than 134217728"},
    {"{{ 'abc'.index('', 4) }}", -1, "line 1: substring not found"},
    {"{{ strftime_now('%Y' * 256) }}", -1, "line 1: strftime_now: the format is too long"},
    {"{{ strftime_now('%9999d') }}", -1, "line 1: strftime_now: the text is longer than 4094 bytes"},
    {"{% set now = '-999-01-01' %}{{ strftime_now('%Y') }}", -1,
     "line 1: now: expected YYYY-MM-DDTHH:MM:SS, found '-999-01-01'"},
    {"{% set now = '2147483647-01-01' %}{{ strftime_now('%Y') }}", -1,
     "line 1: now: expected YYYY-MM-DDTHH:MM:SS, found '2147483647-01-01'"},
    {"{{ raise_exception('No: ' ~ messages[0].role) }}", -2, "No: user"},
    {"{{ x\x01y }}", -3, "line 1: unexpected character 0x01"},
    {"{{ a.b\xff.c }}", -1, "line 1: 'a' is undefined"},
};

static void test_template_errors(void) {
    for (size_t i = 0; i < sizeof template_errors / sizeof *template_errors; i++) {
        char err[ERR_MAX] = "";
        int rc;
        char *s = render_string(template_errors[i].source, "{\"messages\": [{\"role\": \"user\"}]}", &rc, err);
        CHECK(rc == template_errors[i].rc && !strcmp(err, template_errors[i].message), "%s: rc %d, '%s'",
              template_errors[i].source, rc, err);
        free(s);
    }
    char err[ERR_MAX] = "";
    struct template *t = template_parse("x", 1, err);
    struct tpl_text out = {0};
    CHECK(template_render(t, NULL, &out, err) == -1 && !strcmp(err, "template variables: expected a JSON object"),
          "'%s'", err);
    template_free(t);
    text_free(&out);
}

/* Templates that want too much; each ends with an error that names the limit, and soon. */
static void test_template_limits(void) {
    static const struct {
        const char *head, *unit; /* the unit is repeated */
        int times;
        const char *tail, *message;
    } bomb[] = {
        {"{{ ", "(", 100000, "", "brackets inside each other"},
        {"{{ ", "not ", 100000, "1 }}", "operators or blocks inside each other"},
        {"{{ ", "-", 100000, "1 }}", "operators or blocks inside each other"},
        {"{{ 1", "+1", 100000, " }}", "operators or blocks inside each other"},
        {"{{ 1", "|abs", 100000, " }}", "operators or blocks inside each other"},
        {"{{ a", ".a", 100000, " }}", "operators or blocks inside each other"},
        {"{{ ", "1 if 1 else ", 100000, "1 }}", "operators or blocks inside each other"},
        {"", "{% if 1 %}", 100000, "", "operators or blocks inside each other"},
        {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "", 0, "", "recursion deeper than 1000 levels"},
        {"{% set n = namespace() %}{% set n.n = n %}{{ n }}", "", 0, "", "recursion deeper than 1000 levels"},
        {"{% set r = range(100000) %}{% for i in r %}{% for k in r %}{% endfor %}{% endfor %}", "", 0, "",
         "takes more than 50000000 steps"},
        {"{{ range(100001)|length }}", "", 0, "", "Range too big."},
        {"{{ 'x' * 1000000000000 }}", "", 0, "", "the template takes more than"},
        {"{{ '{:134217728}'.format(1) }}", "", 0, "", "the template takes more than"},
        {"{% set n = namespace(s='aaaaaaaaaaaaaaaa') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% "
         "endfor %}",
         "", 0, "", "MiB"},
        {"{{ ['x'] * 1000000000000 }}", "", 0, "", "the template needs more than 512 MiB"},
        {"{{ [1]|batch(999999999, 'x')|list|length }}", "", 0, "", "the template needs more than 512 MiB"},
        {"{{ [1]|slice(999999999, 'x')|list|length }}", "", 0, "", "the template needs more than 512 MiB"},
        {"{{ {}.fromkeys(range(100000))|length }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "", 0, "", "recursion deeper than 1000 levels"},
        {"{% block a %}{{ self.a() }}{% endblock %}", "", 0, "", "recursion deeper than 1000 levels"},
        {"{{ 'a'|center(9223372036854775807) }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ 'a'.ljust(999999999999) }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ 'a'.rjust(999999999999, 'é') }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ '\\t'.expandtabs(9223372036854775807) }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ '%999999999d' % 1 }}", "", 0, "", "a number in the format '%999999999d' is larger than 134217728"},
        {"{{ '%*d' % (999999999, 1) }}", "", 0, "", "a number for the format '%*d' is larger than 134217728"},
        {"{{ '%.*f' % (999999999, 1) }}", "", 0, "", "a number for the format '%.*f' is larger than 134217728"},
        {"{{ '%134217728d' % 1 }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ '%.134217728d' % 1 }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ '%.65537f' % 1 }}", "", 0, "", "the precision 65537 of a float is larger than 65536"},
        {"{{ '{:999999999}'.format(1) }}", "", 0, "", "a number in the format '999999999' is larger than 134217728"},
        {"{{ '{:{}}'.format(1, 999999999) }}", "", 0, "", "a number in the format '999999999' is larger"},
        {"{{ '{:.65537}'.format(1.5) }}", "", 0, "", "the precision 65537 of a float is larger than 65536"},
        {"{{ '{:0134217728,}'.format(1) }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ ('a ' * 60000000)|wordwrap(1) }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ ('a ' * 6000000)|wordwrap(1, true, 'x' * 1000) }}", "", 0, "", "MiB"},
        {"{{ ('&' * 60000000)|striptags }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ ('\\u03a3' * 1000000)|title|length }}", "", 0, "", "the template takes more than 50000000 steps"},
        {"{{ 9223372036854775807 + 1 }}", "", 0, "", "integer overflow in +"},
        {"{{ 'a'|map(", "'map',", 15000, "'upper')|list }}", "recursion deeper than 1000 levels"},
        {"{{ ('[' ~ '{},' * 2200000 ~ '1]')|from_json }}", "", 0, "", "the template needs more than 512 MiB"},
    };
    for (size_t i = 0; i < sizeof bomb / sizeof *bomb; i++) {
        char *src = NULL, err[ERR_MAX] = "";
        int rc;
        sb_puts(&src, bomb[i].head);
        for (int k = 0; k < bomb[i].times; k++) sb_puts(&src, bomb[i].unit);
        sb_puts(&src, bomb[i].tail);
        double t0 = cpu_seconds();
        char *s = render_string(sb_cstr(&src), NULL, &rc, err);
        CHECK(rc && strstr(err, bomb[i].message), "%s: rc %d, '%s'", bomb[i].head, rc, err);
        CHECK(cpu_seconds() - t0 < (SANITIZED ? 60 : 15), "%s: %.1f s", bomb[i].head, cpu_seconds() - t0);
        free(s);
        arrfree(src);
    }
}

/* A message of 1 MB and 2000 messages: time and memory are proportional to the text, printed or accumulated. */
static void test_template_size(void) {
    static const char src[] =
        "{% set ns = namespace(all='') %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + "
        "m.content.split('</think>')[-1]|trim + '<|im_end|>\\n' }}{% set ns.all = ns.all ~ '<' ~ m.content + "
        "'>' %}"
        "{% endfor %}{{ ns.all|length }}{{ (numbers|tojson)|length }}";
    json_t *vars = json_object(), *messages = json_array();
    char *big = NULL, err[ERR_MAX] = "";
    struct tpl_text out = {0};
    int rc;
    while (arrlenu(big) < 1000000) sb_puts(&big, "Hé llo <think> ");
    for (int i = 0; i < 2000; i++)
        json_array_append_new(messages, json_pack("{s:s, s:o}", "role", "user", "content",
                                                  i ? json_string("hello") : json_stringn(big, arrlenu(big))));
    json_object_set_new(vars, "messages", messages);
    json_t *numbers = json_object();
    for (int i = 0; i < 100000; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        json_object_set_new(numbers, key, json_integer(i));
    }
    json_object_set_new(vars, "numbers", numbers);
    double t0 = cpu_seconds();
    render_text(src, sizeof src - 1, vars, &out, &rc, err);
    CHECK(!rc && arrlenu(out.s) > 1000000, "rc %d, %zu bytes, %s", rc, arrlenu(out.s), err);
    CHECK(cpu_seconds() - t0 < (SANITIZED ? 10 : 2), "%.2f s", cpu_seconds() - t0);
    arrfree(big);
    text_free(&out);
    json_decref(vars);
}

/* Bytes that are not UTF-8 and NUL pass through; source and output are of any length. */
static void test_template_bytes(void) {
    static const char src[] =
        "a\0b\xff{{ '\xc3' ~ 'x\0y'|length }}{{ '\xe2\x82'[0]|length }}{{ '\xf0\x9f\x98\x80'|length }}\x80";
    static const char expected[] = "a\0b\xff\xc3"
                                   "311\x80";
    json_t *vars = json_object();
    struct tpl_text out = {0};
    char err[ERR_MAX] = "";
    int rc;
    render_text(src, sizeof src - 1, vars, &out, &rc, err);
    CHECK(!rc && arrlenu(out.s) == sizeof expected - 1 && !memcmp(out.s, expected, sizeof expected - 1), "rc %d, %s",
          rc, err);
    text_free(&out);
    CHECK(!render_text("", 0, vars, &out, &rc, err) || !arrlen(out.s), "an empty template");
    text_free(&out);
    json_decref(vars);
}

#define TESTS_TEMPLATE                                                                                              \
    {"template/demo", test_template_demo}, {"template/demo_origin", test_template_demo_origin},                     \
        {"template/official", test_template_official}, {"template/official_origin", test_template_official_origin}, \
        {"template/operations", test_template_operations}, {"template/snippets", test_template_snippets},           \
        {"template/language", test_template_language}, {"template/errors", test_template_errors},                   \
        {"template/limits", test_template_limits}, {"template/size", test_template_size},                           \
        {"template/bytes", test_template_bytes},
