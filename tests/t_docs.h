/* What the programs print of their tables of options, manual pages and completions, and what make installs. */

static const char *const doc_programs[] = {MOE_BIN, CONVERT_BIN, REAP_BIN};
enum { DOC_PROGRAMS = sizeof doc_programs / sizeof *doc_programs };

/* Whether a command exists. */
static bool has_command(const char *name) {
    char cmd[128];
    snprintf(cmd, sizeof cmd, "command -v %s", name);
    return !run_command(cmd, NULL, NULL);
}

/* Calls `each` with every option in the left column of a program's --help all, without its dashes. */
static int options_each(const char *program, void (*each)(const char *name, const char *text), const char *text) {
    char *help = NULL, cmd[128], name[64];
    int n = 0;
    snprintf(cmd, sizeof cmd, "%s --help%s", program, strcmp(program, MOE_BIN) ? "" : " all");
    CHECK_INT(run_command(cmd, &help, NULL), 0, "%s", cmd);
    for (const char *p = sb_cstr(&help); (p = strchr(p, '\n')); p++) {
        const char *dashes = strstr(p + 1, "--");
        const ptrdiff_t column = dashes ? dashes - p - 1 : 0;
        if (strncmp(p, "\n  ", 3) || !dashes || column > 8 || (p[3] == ' ' && column != 6) || column < 6) continue;
        snprintf(name, sizeof name, "%.*s", (int)strspn(dashes + 2, "abcdefghijklmnopqrstuvwxyz-"), dashes + 2);
        each(name, text);
        n++;
    }
    arrfree(help);
    return n;
}

static void manual_has(const char *name, const char *page) {
    char want[160];
    int n = snprintf(want, sizeof want, "\\fB\\-\\-");
    for (const char *p = name; *p; p++) n += snprintf(want + n, sizeof want - (size_t)n, *p == '-' ? "\\-" : "%c", *p);
    snprintf(want + n, sizeof want - (size_t)n, "\\fP");
    CHECK(strstr(page, want), "the manual page lacks --%s", name);
}

/* Every manual page has its sections and all options, uses known requests only, and is clean for groff or mandoc. */
static void test_docs_manual(void) {
    static const char *const requests[] = {".TH ", ".SH ", ".SS ", ".PP\n", ".TP\n", ".nf\n", ".fi\n"};
    static const char *const sections[] = {"NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS"};
    static const char *const own[] = {"MODES", "FILES", "ENVIRONMENT"}; /* of moe */
    char cmd[256], want[64];
    for (int i = 0; i < DOC_PROGRAMS; i++) {
        char *page = NULL, *said = NULL;
        snprintf(cmd, sizeof cmd, "%s --man | tee %s/page", doc_programs[i], test_dir());
        CHECK_INT(run_command(cmd, &page, NULL), 0, "%s", cmd);
        CHECK(!strncmp(sb_cstr(&page), ".TH \"moe", 8), "%.40s", page);
        for (size_t k = 0; k < sizeof sections / sizeof *sections + (i ? 0 : sizeof own / sizeof *own); k++) {
            const size_t n = sizeof sections / sizeof *sections;
            snprintf(want, sizeof want, "\n.SH %s\n", k < n ? sections[k] : own[k - n]);
            CHECK_HAS(page, want, "the manual page of %s", doc_programs[i]);
        }
        for (const char *p = page; p; p = strchr(p, '\n') ? strchr(p, '\n') + 1 : NULL) {
            bool known = *p != '.' && *p != '\'';
            for (size_t k = 0; k < sizeof requests / sizeof *requests; k++)
                known |= !strncmp(p, requests[k], strlen(requests[k]));
            CHECK(known, "%s: unknown request: %.40s", doc_programs[i], p);
        }
        CHECK(options_each(doc_programs[i], manual_has, page) > 12, "%s --help lists few options", doc_programs[i]);
        for (int k = 0; !i && k < N_OPTIONS; k++)
            if (options[k].name) manual_has(options[k].name, page);
        if (has_command("mandoc")) {
            snprintf(cmd, sizeof cmd, "mandoc -Tlint -W error %s/page", test_dir());
            CHECK_INT(run_command(cmd, &said, NULL), 0, "%s: %s", cmd, sb_cstr(&said));
        }
        if (has_command("groff")) {
            snprintf(cmd, sizeof cmd, "groff -man -ww -Tutf8 %s/page", test_dir());
            CHECK_INT(run_command(cmd, NULL, &said), 0, "%s", cmd);
            CHECK_STR(sb_cstr(&said), "", "%s", cmd);
        }
        arrfree(page);
        arrfree(said);
    }
}

static void bash_has(const char *name, const char *script) {
    char want[2][80];
    snprintf(want[0], sizeof want[0], " --%s ", name);
    snprintf(want[1], sizeof want[1], " --%s'", name);
    CHECK(strstr(script, want[0]) || strstr(script, want[1]), "no --%s in it", name);
}

static void zsh_has(const char *name, const char *script) {
    char want[2][80];
    snprintf(want[0], sizeof want[0], ")--%s[", name);
    snprintf(want[1], sizeof want[1], ")--%s=[", name);
    CHECK(strstr(script, want[0]) || strstr(script, want[1]), "no --%s in it", name);
}

/* What completion offers for the last of some words: a list, sorted and separated by blanks. A word is in quotes if it
 * is special for a shell. */
static void check_completion(const char *program, const char *words, const char *want) {
    char cmd[512], *out = NULL, *said = NULL;
    const char *base = strrchr(program, '/') + 1;
    snprintf(cmd, sizeof cmd,
             "t=$PWD; cd %s && bash --norc -c 'set -u; source <($0 --completion bash); COMP_WORDS=(%s); "
             "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); f=_%s; ${f//-/_}; "
             "[[ -z ${COMPREPLY[*]} ]] || printf \"%%s\\n\" \"${COMPREPLY[@]}\" | sort -u | tr \"\\n\" \" \"' $t/%s",
             test_dir(), words, base, program);
    CHECK_INT(run_command(cmd, &out, &said), 0, "%s", cmd);
    CHECK_STR(sb_cstr(&out), want, "completion of: %s", words);
    CHECK_STR(sb_cstr(&said), "", "completion of: %s", words);
    arrfree(out);
    arrfree(said);
}

/* The completion for bash offers options, choices, files with the right ending, and directories. */
static void test_docs_bash(void) {
    if (!has_command("bash")) SKIP("there is no bash");
    for (int i = 0; i < DOC_PROGRAMS; i++) {
        char *script = NULL, cmd[128];
        snprintf(cmd, sizeof cmd, "%s --completion bash", doc_programs[i]);
        CHECK_INT(run_command(cmd, &script, NULL), 0, "%s", cmd);
        CHECK(options_each(doc_programs[i], bash_has, sb_cstr(&script)) > 12, "%s", cmd);
        arrfree(script);
    }
    check_command(IN_DIR("cd @ && mkdir sub hf && touch a.gguf 'a b.gguf' text.txt s.json"), 0, NULL, NULL);
    check_completion(MOE_BIN, "moe --show-", "--show-think ");
    check_completion(MOE_BIN, "moe -m a.gguf --kv \"\"", "bf16 f32 fp8 ");
    check_completion(MOE_BIN, "moe --cache-type-k f", "f32 fp8 ");
    check_completion(MOE_BIN, "moe --kv = \"b\"", "bf16 ");
    check_completion(MOE_BIN, "moe --kv =", "bf16 f32 fp8 ");
    check_completion(MOE_BIN, "moe -m \"\"", "a b.gguf a.gguf hf sub ");
    check_completion(MOE_BIN, "moe a.", "a.gguf ");
    check_completion(MOE_BIN, "moe -f t", "text.txt ");
    check_completion(MOE_BIN, "moe -p t", "");
    check_completion(MOE_BIN, "moe --calibrate s.json t", "text.txt ");
    check_completion(MOE_BIN, "moe --calibrate s.json -o s", "s.json sub ");
    check_completion(MOE_BIN, "moe --completion \"\"", "bash zsh ");
    check_completion(CONVERT_BIN, "moe-convert \"\"", "hf sub ");
    check_completion(CONVERT_BIN, "moe-convert hf --search \"\"", "amax sweep ");
    check_completion(REAP_BIN, "moe-reap a.gguf s", "s.json sub ");
    check_completion(REAP_BIN, "moe-reap a.gguf --mtp d", "drop ");
}

/* The completion for zsh has a line for every option and is correct syntax. */
static void test_docs_zsh(void) {
    char cmd[128];
    for (int i = 0; i < DOC_PROGRAMS; i++) {
        char *script = NULL;
        snprintf(cmd, sizeof cmd, "%s --completion zsh | tee %s/zsh", doc_programs[i], test_dir());
        CHECK_INT(run_command(cmd, &script, NULL), 0, "%s", cmd);
        CHECK(!strncmp(sb_cstr(&script), "#compdef moe", 12), "%.20s", script);
        CHECK(options_each(doc_programs[i], zsh_has, script) > 12, "%s", cmd);
        snprintf(cmd, sizeof cmd, "zsh -n %s/zsh", test_dir());
        if (has_command("zsh")) check_command(cmd, 0, "", NULL);
        arrfree(script);
    }
    if (!has_command("zsh")) SKIP("there is no zsh: its syntax is not checked");
}

/* `make` of the tree with a goal. It builds nothing: the tests run beside it. */
#define MAKE                                                                                             \
    "env -u MAKEFLAGS -u MAKELEVEL make -s DEPS=ok NVCC= -o moe -o build/moe-convert -o build/moe-reap " \
    "-o build/demo.gguf "

/* make install copies a program that works, with its page, completions and models; make uninstall leaves nothing. make
 * deb makes a package of the same files. */
static void test_make_install(void) {
    static const char *const files[] = {"bin/moe",
                                        "bin/moe-convert",
                                        "bin/moe-reap",
                                        "share/man/man1/moe.1",
                                        "share/man/man1/moe-convert.1",
                                        "share/man/man1/moe-reap.1",
                                        "share/bash-completion/completions/moe",
                                        "share/zsh/site-functions/_moe-reap",
                                        "share/moe/prompts/haystack.txt",
                                        "share/moe/models/demo.gguf"};
    char cmd[256], *said = NULL, *out = NULL, *info = NULL;
    if (SANITIZED) SKIP("this checks the plain build");
    check_command(IN_DIR(MAKE "install PREFIX=/opt DESTDIR=@/to >&2"), 0, "", NULL);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(cmd, sizeof cmd, "test -s %s/to/opt/%s", test_dir(), files[i]);
        CHECK_INT(run_command(cmd, NULL, NULL), 0, "%s", cmd);
    }
    check_command(IN_DIR("@/to/opt/bin/moe --needle 500 -m @/to/opt/share/moe/models/demo.gguf"), 0, NULL, "found");
    CHECK_INT(run_command(IN_DIR("mkdir @/empty; cd @/empty; HOME=. ../to/opt/bin/moe </dev/null"), NULL, &said), 2,
              "moe without a model");
    CHECK_HAS(sb_cstr(&said), "/to/opt/share/moe/models/demo.gguf", "moe without a model");
    check_command(IN_DIR(MAKE "uninstall PREFIX=/opt DESTDIR=@/to >&2; find @/to ! -type d -o -path '*/share/moe*'"), 0,
                  "", NULL);
    check_command(IN_DIR(MAKE "uninstall PREFIX=/opt DESTDIR=@/to >&2"), 0, "", NULL);
    if (has_command("dpkg-deb")) {
        check_command(MAKE "deb >&2", 0, "", NULL);
        CHECK_INT(run_command("dpkg-deb --contents build/moe-chat_" MOE_VERSION "_*.deb", &out, NULL), 0, "contents");
        for (size_t i = 0; i < sizeof files / sizeof *files; i++)
            if (!strstr(files[i], "zsh")) CHECK_HAS(sb_cstr(&out), files[i], "contents of the package");
        CHECK_INT(run_command("dpkg-deb --info build/moe-chat_" MOE_VERSION "_*.deb", &info, NULL), 0, "info");
        static const char *const want[] = {"libjansson4", "libpcre2-8-0", "libutf8proc", "libgomp1", "libc6 (>= "};
        for (size_t i = 0; i < sizeof want / sizeof *want; i++) CHECK_HAS(sb_cstr(&info), want[i], "package");
    }
    arrfree(said);
    arrfree(out);
    arrfree(info);
}

/* Without the packages make deps names those that are missing and the one command to type. */
static void test_make_deps(void) {
    char cmd[512];
    static const char missing[] = "missing: libjansson-dev libutf8proc-dev; type: ";
    check_command(IN_DIR("mkdir @/bin @/pc; cp $(pkg-config --variable=pcfiledir libpcre2-8)/libpcre2-8.pc @/pc; "
                         "echo 'echo 1000' >@/bin/id; echo 'exit 1' >@/bin/dpkg; echo 'exit 0' >@/bin/apt-get; "
                         "chmod +x @/bin/*"),
                  0, NULL, NULL);
    for (int sudo = has_command("sudo"); sudo < 2; sudo++) {
        if (sudo) check_command(IN_DIR("cp @/bin/apt-get @/bin/sudo"), 0, NULL, NULL);
        const char *type = sudo ? "sudo make deps" : "su -c \"apt-get install -y libjansson-dev libutf8proc-dev\"";
        char *said = NULL;
        snprintf(cmd, sizeof cmd,
                 "PATH=$PWD/%s/bin:$PATH PKG_CONFIG_LIBDIR=%s/pc env -u MAKEFLAGS -u MAKELEVEL make NVCC= deps",
                 test_dir(), test_dir());
        CHECK_INT(run_command(cmd, NULL, &said), 2, "%s", cmd);
        CHECK_HAS(sb_cstr(&said), missing, "%s", cmd);
        CHECK_HAS(said, type, "%s", cmd);
        arrfree(said);
    }
}

#define TESTS_DOCS                                                                                 \
    {"docs/manual", test_docs_manual}, {"docs/bash", test_docs_bash}, {"docs/zsh", test_docs_zsh}, \
        {"make/install", test_make_install}, {"make/deps", test_make_deps},
