/* What others may hand to a user: temporary names in a shared directory, links in a downloaded directory, text that a
 * terminal would obey. And what may happen while a file is read or written: a full disk, a file that shrinks. */

static int fixed_numbers; /* the next so many numbers of getrandom are zero */

/* Stands in front of the C library's function, so that a test can plant the next temporary name. */
ssize_t getrandom(void *buf, size_t n, unsigned flags) {
    static ssize_t (*next)(void *, size_t, unsigned);
    if (!next) next = (ssize_t(*)(void *, size_t, unsigned))dlsym(RTLD_NEXT, "getrandom");
    if (!fixed_numbers) return next(buf, n, flags);
    fixed_numbers--;
    memset(buf, 0, n);
    return (ssize_t)n;
}

/* Lists the test directory without what run_command keeps there. */
#define TRUST_LS "ls @ | grep -v '^err[0-9]*$\\|^out[0-9][0-9]*$'"

/* ---- output files ---- */

/* The id of a process that has ended. */
static pid_t dead_pid(void) {
    const pid_t pid = fork();
    if (!pid) _exit(0);
    waitpid(pid, NULL, 0);
    return pid;
}

/* A file of the test directory; valid for three more calls. */
static const char *trust_path(const char *name) {
    static char path[4][256];
    static int turn;
    char *p = path[turn++ & 3];
    snprintf(p, sizeof path[0], "%s/%s", test_dir(), name);
    return p;
}

static void trust_write(const char *name, const char *text) { write_test_file(trust_path(name), text, strlen(text)); }

/* Checks what a file holds; NULL: it is not there. */
static void trust_holds(const char *name, const char *text) {
    char *got = NULL, err[ERR_MAX];
    const bool there = !read_file(trust_path(name), &got, err);
    CHECK(there == !!text, "%s: %s", name, there ? "is there" : err);
    if (there && text) CHECK_STR(sb_cstr(&got), text, "%s", name);
    arrfree(got);
}

/* Replaces `out` by a text. */
static void trust_replace(const char *text) {
    char err[ERR_MAX] = "";
    FILE *f = temp_create(trust_path("out"), 0600, err);
    if (!CHECK(f, "%s", err)) return;
    fputs(text, f);
    CHECK(!temp_finish(f, trust_path("out"), false, err), "%s", err);
}

/* A planted link is not followed, and its owner's file stays; another name is taken. */
static void test_trust_planted(void) {
    char name[64], err[ERR_MAX] = "";
    struct stat st;
    snprintf(name, sizeof name, "out.tmp-%d-00000000", (int)getpid());
    trust_write("victim", "mine");
    CHECK(!symlink("victim", trust_path(name)), "%s", strerror(errno));
    fixed_numbers = 3;
    trust_replace("new");
    CHECK(!fixed_numbers, "%d names were not tried", fixed_numbers);
    trust_holds("victim", "mine");
    trust_holds("out", "new");
    CHECK(!lstat(trust_path("out"), &st) && S_ISREG(st.st_mode), "the output is no file");
    CHECK(!lstat(trust_path(name), &st) && S_ISLNK(st.st_mode), "the link of a process that runs is gone");
    fixed_numbers = 1000;
    CHECK(!temp_create(trust_path("out"), 0600, err) && strstr(err, "File exists") && !n_temps, "'%s'", err);
    fixed_numbers = 0;
}

/* Names that a process left behind go when the same target is written again, no others. */
static void test_trust_stale(void) {
    static const struct {
        const char *format;
        bool dead, gone;
    } t[] = {{"out.tmp-%d-0123abcd", true, true},   {"out.tmp-%d-00000000", true, true},
             {"out.tmp-%d-0123abcd", false, false}, {"out.tmp-%d", true, false},
             {"out.tmp-%d-0123abc", true, false},   {"out.tmp-%d-0123abcde", true, false},
             {"out.tmp-%d-0123ABCD", true, false},  {"out.tmp--%d-0123abcd", true, false},
             {"out2.tmp-%d-0123abcd", true, false}, {"an-out.tmp-%d-0123abcd", true, false}};
    const int n = sizeof t / sizeof *t, dead = dead_pid();
    char name[64], out[64];
    struct stat st;
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof name, t[i].format, t[i].dead ? dead : (int)getpid());
        trust_write(name, "rest");
    }
    trust_replace("new");
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof name, t[i].format, t[i].dead ? dead : (int)getpid());
        CHECK(stat(trust_path(name), &st) ? t[i].gone : !t[i].gone, "%s", name);
    }
    /* a link of that name goes, the file behind it stays; a directory is none of ours */
    snprintf(name, sizeof name, "out.tmp-%d-00000001", dead);
    snprintf(out, sizeof out, "out.tmp-%d-00000002", dead);
    CHECK(!symlink("out2", trust_path(name)) && !mkdir(trust_path(out), 0700), "%s", strerror(errno));
    trust_write("out2", "kept");
    trust_replace("newer");
    CHECK(lstat(trust_path(name), &st) && !lstat(trust_path(out), &st), "a link stays, or a directory goes");
    trust_holds("out2", "kept");
}

/* Two files that belong together: both get their names, or neither. */
static void test_trust_together(void) {
    char err[ERR_MAX] = "";
    trust_write("a", "old");
    trust_write("b", "old");
    for (int fails = 2; fails >= 0; fails--) {
        for (int i = 0; i < 2; i++) {
            const char *path = trust_path(i ? "b" : "a");
            FILE *f = temp_create(path, 0600, err);
            if (!CHECK(f, "%s", err)) return;
            fputs("new", f);
            if (temp_close(f, path, fails == i + 1, err)) break;
        }
        CHECK(n_temps == (fails ? 0 : 2), "%d temporary files", (int)n_temps);
        trust_holds("a", "old");
    }
    CHECK(!temp_commit(err) && !n_temps, "%s", err);
    trust_holds("a", "new");
    trust_holds("b", "new");
    check_command(IN_DIR(TRUST_LS), 0, "a\nb\n", NULL);
}

/* /save on a disk that is full for the larger of its files: both files stay as they are. */
static void test_trust_save(void) {
    struct rlimit full = {.rlim_cur = 2048}, before;
    struct model m;
    struct settings set;
    struct session s;
    struct chat c;
    char err[ERR_MAX] = "", name[256];
    snprintf(name, sizeof name, "%s/talk", test_dir());
    settings_init(&set);
    set.quiet = true;
    set.n_predict = 4;
    if (!demo_load(&m) || !dialogue_open(&c, &s, &set, &m)) return;
    CHECK(chat_turn(&c, "What is 7 squared?", 18, err) == TURN_DONE && !chat_save(&c, name, true, err), "%s", err);
    check_command(IN_DIR("cp @/talk.jsonl @/old.jsonl && cp @/talk.kv @/old.kv && [ $(wc -c <@/talk.kv) -gt 2048 ]"), 0,
                  NULL, NULL);
    chat_push(&c, "assistant", "Bye", 3);
    getrlimit(RLIMIT_FSIZE, &before);
    full.rlim_max = before.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &full);
    const int rc = chat_save(&c, name, true, err);
    setrlimit(RLIMIT_FSIZE, &before);
    CHECK(rc && strstr(err, "talk.kv': File too large"), "%d: %s", rc, err);
    check_command(IN_DIR("cmp @/talk.jsonl @/old.jsonl && cmp @/talk.kv @/old.kv && " TRUST_LS), 0,
                  "old.jsonl\nold.kv\ntalk.jsonl\ntalk.kv\n", NULL);
    CHECK(!chat_save(&c, name, true, err), "%s", err);
    check_command(IN_DIR("cmp -s @/talk.jsonl @/old.jsonl"), 1, NULL, NULL);
    chat_free(&c);
    session_free(&s);
    settings_free(&set);
    model_free(&m);
}

/* ---- what a terminal shows ---- */

#define BIDI "\330\234\342\200\216\342\200\217\342\200\252\342\200\256\342\201\246\342\201\251"

static void test_trust_escape(void) {
    char *out = NULL, line[] = "a\033]0;x\007\302\233" BIDI "\342\200\252\377\342\200\213z";
    term_escape(&out, line, sizeof line - 1);
    CHECK_STR(sb_cstr(&out),
              "a\\x1b]0;x\\x07\\x9b\\u061c\\u200e\\u200f\\u202a\\u202e\\u2066\\u2069\\u202a\357\277\275\342\200\213z",
              "on a terminal");
    message_sanitize(line);
    CHECK_STR(line,
              "a?]0;x???????????"
              "????????????????\342\200\213z",
              "in a message");
    arrfree(out);
    for (utf8proc_int32_t cp = 0; cp < 0x2100; cp++) {
        const bool bidi =
            cp == 0x61c || cp == 0x200e || cp == 0x200f || (cp > 0x2029 && cp < 0x202f) || (cp > 0x2065 && cp < 0x206a);
        CHECK(is_control(cp) == (cp < 32 || (cp > 126 && cp < 160) || bidi), "U+%04x", (unsigned)cp);
    }
}

/* Runs a shell command on a terminal: its exit code. All that it prints must be text with tabs and line ends, and
 * `moves`: sequences that erase a line and set colors. It must hold `part`. */
static void trust_shown(const char *command, bool moves, const char *part) {
    char *argv[] = {"/bin/sh", "-c", (char *)(uintptr_t)command, NULL};
    struct pty p;
    size_t bad = 0;
    if (!pty_start(&p, 24, 200, moves ? "xterm" : "dumb", NULL, NULL, argv)) return;
    while (!pty_over(&p)) pty_pump(&p, 20);
    (void)sb_cstr(&p.log);
    for (size_t i = 0; i < arrlenu(p.log) && !bad; i++) {
        const char *s = p.log + i;
        if (moves && s[0] == 27 && s[1] == '[') i += strspn(s + 2, "0123456789;") + 2;
        else if ((uint8_t)*s < 32 && !strchr("\r\n\t", *s)) bad = i + 1;
        else if (!strncmp(s, "\302\233", 2) || !strncmp(s, "\342\200\256", 3)) bad = i + 1;
    }
    CHECK(!bad, "`%s` printed byte %02x at %zu of '%s'", command, (uint8_t)p.log[bad - !!bad], bad, p.log);
    CHECK_HAS(p.log, part, "`%s`", command);
    CHECK_INT(pty_end(&p), 0, "`%s`", command);
}

#define TRUST_MODEL "tests/corpus/gguf/valid-controls.gguf"
#define TRUST_NAME  "n\033]0;t\007\302\233\342\200\256"

static void test_trust_terminal(void) {
    NEED_MOE();
    char cmd[2048];
    const char *d = test_dir();
    trust_shown("echo '{\"x\": \"y\\u202e\\u009bz\"}' | exec " MOE_BIN " --render -m " TRUST_MODEL, false,
                "a\\x1b]0;owned\\x07\\x1b[31m\\x7f\\x9b2J\\u061c\\u200e\\u200f\\u202a\\u202e\\u2066\\u2069z\r\n"
                "y\\u202e\\x9bz");
    trust_shown("exec " MOE_BIN " --info -m " TRUST_MODEL, false, "a?]0;owned??[31m?");
    trust_shown("echo ab | exec " MOE_BIN " --tokenize -m " TRUST_MODEL, false, "2");
    snprintf(cmd, sizeof cmd,
             "cp " TRUST_MODEL " '%s/" TRUST_NAME ".gguf'; echo 'ab ab c ab ab c' >'%s/" TRUST_NAME ".txt'", d, d);
    check_command(cmd, 0, NULL, NULL);
    static const char shown[] = "/n\\x1b]0;t\\x07\\x9b\\u202e.gguf";
    snprintf(cmd, sizeof cmd,
             "cd %s; exec $OLDPWD/" MOE_BIN " --compare ./'" TRUST_NAME "'.gguf ./'" TRUST_NAME "'.gguf ./'" TRUST_NAME
             "'"
             ".txt -c 8",
             d);
    trust_shown(cmd, true, shown);
    for (int again = 0; again < 2; again++) {
        snprintf(cmd, sizeof cmd,
                 "cd %s; exec $OLDPWD/" MOE_BIN " -m ./'" TRUST_NAME "'.gguf --calibrate ./'" TRUST_NAME "'"
                 ".txt -o ./'" TRUST_NAME "'.json -c 4",
                 d);
        trust_shown(cmd, true, again ? "'./n\\x1b]0;t\\x07\\x9b\\u202e.txt' is already in" : "tokens");
    }
    /* the progress of a run shows the name that the scores have */
    snprintf(cmd, sizeof cmd,
             "cd %s; sed -e 's/\"name\": \"[^\"]*txt\"/\"name\": \"e\\\\u001b]0;f\\\\u0007\\\\u202e\"/' -e "
             "'s/\"done\": true/\"done\": false/' -e 's/\"unit\": [0-9]*/\"unit\": 1/' ./'" TRUST_NAME "'"
             ".json >s.json && "
             "exec $OLDPWD/" MOE_BIN " -m ./'" TRUST_NAME "'.gguf --calibrate ./'" TRUST_NAME "'.txt -o s.json -c 4",
             d);
    trust_shown(cmd, true, "e?]0;f????: ");
}

/* ---- scores ---- */

/* Scores that could not be written again are refused when they are read. */
static void test_trust_scores(void) {
    static const struct {
        const char *script, *message;
    } t[] = {
        {"s/\"tokens\": \\[/&1e19, /;s/1e19,[^,]*,/1e19,/",
         "tokens of expert 0 is not an integer from 0 to 9.0072e+15"},
        {"s/^ \"tokens\": [0-9]*/ \"tokens\": 1e19/", "tokens is not an integer from 0 to 9.0072e+15"},
        {"s/^ \"tokens\": [0-9]*/ \"tokens\": 9223372036854775807/", "tokens is not an integer from 0 to 9.0072e+15"},
        {"s/^   \"tokens\": [0-9][0-9]*/   \"tokens\": 9223372036854775807/", "source 0 is incomplete"}};
    check_command(
        IN_DIR("echo 'ab ab c ab ab c' >@/t.txt; " MOE_BIN " -m " TRUST_MODEL " --calibrate @/t.txt -o @/s.json -c 4"),
        0, NULL, NULL);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[1024];
        snprintf(cmd, sizeof cmd,
                 "tr '\\n' '\\1' <@/s.json | sed 's/\\[\\x01 */[/g' | tr '\\1' '\\n' | sed '%s' >@/x.json; ! cmp -s "
                 "@/s.json @/x.json && cp @/x.json @/y.json && " MOE_BIN " -m " TRUST_MODEL
                 " --calibrate @/t.txt -o @/x.json -c 4",
                 t[i].script);
        check_command(IN_DIR(cmd), 1, "", t[i].message);
        check_command(IN_DIR("cmp @/x.json @/y.json"), 0, NULL, NULL);
    }
}

/* ---- moe-reap ---- */

/* Links out of the directory are not followed; those in it and to the blobs of a cache are, and modes stay. */
static void test_trust_links(void) {
    fixture_copy("qwen3moe_nvfp4", "dir");
    shell("mkdir -p hub/snapshots hub/blobs other; mv dir hub/snapshots/rev; echo secret >secret; chmod 600 secret; "
          "echo blob >hub/blobs/b1; chmod 440 hub/blobs/b1; echo own >hub/snapshots/rev/own.txt; "
          "chmod 640 hub/snapshots/rev/own.txt; cd hub/snapshots/rev; ln -s ../../../secret NOTICE; "
          "ln -s $PWD/../../../secret absolute; ln -s ../../blobs/b1 blob.txt; ln -s own.txt inside; "
          "ln -s NOTICE twice; ln -s ../../blobs/../../secret through; ln -s nothing broken");
    umask(022);
    if (!CHECK(!reap_run("hub/snapshots/rev -o cut --keep 5 --criterion random"), "%s", reap_err)) return;
    static const char *const outside[] = {"NOTICE", "absolute", "twice", "through"};
    for (size_t i = 0; i < 4; i++) {
        char line[128];
        snprintf(line, sizeof line, "rev/%s' is a link to a file elsewhere: not copied", outside[i]);
        CHECK_HAS(reap_err, line, "%s", outside[i]);
    }
    CHECK_HAS(reap_err, "rev/broken' is not a regular file: not copied", "broken");
    shell("! ls cut/NOTICE cut/absolute cut/twice cut/through cut/broken 2>/dev/null; ! grep -r secret cut; "
          "[ \"$(cat cut/blob.txt cut/own.txt cut/inside)\" = \"$(echo blob; echo own; echo own)\" ]; "
          "[ $(stat -c %a cut/blob.txt) = 440 ]; [ $(stat -c %a cut/own.txt) = 640 ]; "
          "[ $(stat -c %a cut/inside) = 640 ]; [ ! -L cut/blob.txt ]");
    /* a directory that a killed run left behind goes with the next */
    char cmd[256];
    snprintf(cmd, sizeof cmd, "rm -rf cut; d=cut.tmp-%d-01234567; mkdir $d; echo x >$d/config.json", (int)dead_pid());
    shell(cmd);
    CHECK(!reap_run("hub/snapshots/rev -o cut --keep 5 --criterion random"), "%s", reap_err);
    shell("! ls -d cut.tmp-* 2>/dev/null");
}

/* A page of the mapped file cannot be read: moe-reap is held by a full pipe while it has the file mapped. */
static void test_trust_bus(void) {
    static const char zeros[4096], last[] = "moe-reap: the model file was truncated or its disk failed while in use\n";
    char cmd[512], maps[64], *said = NULL, err[ERR_MAX];
    struct child p;
    const char *fifo = trust_path("fifo");
    CHECK(!mkfifo(fifo, 0600), "%s", strerror(errno));
    const int fd = open(fifo, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    while (write(fd, zeros, sizeof zeros) > 0) continue;
    snprintf(cmd, sizeof cmd, "exec " REAP_BIN " build/demo.gguf -o %s/no --keep 4 --criterion random >%s", test_dir(),
             fifo);
    if (!child_start(&p, cmd)) return;
    snprintf(maps, sizeof maps, "/proc/%d/maps", (int)p.pid);
    for (bool mapped = false; !mapped && !child_ended(&p, false); poll(NULL, 0, 1)) {
        char *text = NULL;
        if (!read_file(maps, &text, err)) mapped = strstr(sb_cstr(&text), "demo.gguf") != NULL;
        arrfree(text);
    }
    kill(p.pid, SIGBUS);
    const int rc = child_end(&p, NULL, &said);
    CHECK(rc == 1 && !strcmp(sb_cstr(&said), last), "exit %d: %s", rc, sb_cstr(&said));
    close(fd);
    unlink(fifo);
    check_command(IN_DIR(TRUST_LS), 1, "", NULL);
    arrfree(said);
}

/* ---- files of models ---- */

/* Names and tokens that other programs take for more than text. */
static void test_trust_names(void) {
    struct model m;
    char err[ERR_MAX] = "", *text = NULL;
    struct detok d = {0};
    if (CHECK(!model_load(&m, TRUST_MODEL, err), "%s", err)) {
        for (const char *s = m.name; *s; s++) CHECK(*s >= 32 && *s < 127, "the name '%s'", m.name);
        model_free(&m);
    }
    if (!CHECK(!model_load(&m, "tests/corpus/gguf/valid-byte-tokens.gguf", err), "%s", err)) return;
    for (int i = 0; i < m.n_vocab; i++) detok_put(m.vocab, &d, i, &text);
    detok_end(&d, &text);
    CHECK_STR(sb_cstr(&text), "<0x-1><0xFFF><0x><0xG0><0x00></s><0xff><0x 1>", "the tokens as text");
    arrfree(text);
    model_free(&m);
}

/* Recursion of a template ends in a message on a small stack, too. */
static void test_trust_stack(void) {
    static const char *const t[][2] = {
        {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"},
        {"{% set n = namespace() %}{% set n.n = n %}{{ n }}", "recursion"},
    };
    if (SANITIZED) SKIP("the frames of sanitizers need more stack");
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        for (int kib = 128; kib <= 16384; kib *= 2) {
            char command[300];
            trust_write("deep.jinja", t[i][0]);
            snprintf(command, sizeof command,
                     "ulimit -s %d; echo '{}' | " MOE_BIN " --render --chat-template-file @/deep.jinja", kib);
            check_command(IN_DIR(command), 1, "", t[i][1]);
        }
}

#define TESTS_TRUST                                                                                                    \
    {"trust/planted", test_trust_planted}, {"trust/stale", test_trust_stale}, {"trust/together", test_trust_together}, \
        {"trust/save", test_trust_save}, {"trust/escape", test_trust_escape}, {"trust/terminal", test_trust_terminal}, \
        {"trust/scores", test_trust_scores}, {"trust/links", test_trust_links}, {"trust/bus", test_trust_bus},         \
        {"trust/names", test_trust_names}, {"trust/stack", test_trust_stack},
