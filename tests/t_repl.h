/* The line editor and the dialogue, through a pseudo-terminal.
 *
 * A child reads lines with the editor, or is ./moe itself; the test types, and looks at the bytes that come back, at the
 * screen they make on a small terminal emulator, and at the mode in which the terminal is left. Every wait is for a
 * condition and ends after PTY_SECONDS with a failure and a dead child. */
#include <dlfcn.h>
#include <limits.h>
#include <pty.h>
#include <utmp.h>

enum { PTY_SECONDS = CHILD_SECONDS, VT_ROWS = 40, VT_COLS = 200, VT_CELL = 64 };

/* ---- a terminal ---- */

/* What a terminal makes of code points; that of tests/oracle/gen_screen.py. */
struct vt_table {
    struct {
        utf8proc_int32_t key;
        int value[2]; /* columns on two terminals */
    } * widths;       /* stb_ds: of code points that have not 1 on both */
    struct {
        char *key;
        int value;
    } * clusters; /* stb_ds: several code points that a third terminal draws in one place, with its columns */
};

/* Just what the editor uses: printing with deferred wrap, BS CR LF, CSI A B C D H J, ESC 7 8, modes ignored. Cells hold a
 * cluster; the second column of a wide one holds "\1". Rows that wrapped are joined and wrapped anew when the width
 * changes. */
struct vt {
    struct vt_table *table; /* NULL: the columns of code_width */
    int terminal;           /* of the table: 0 to 2 */
    int saved_r, saved_c;   /* by ESC 7 */
    int last_width;         /* of the character that was printed last */
    int rows, cols, r, c, last_r, last_c;
    bool styled;  /* SGR other than 0 is on */
    int bleeds;   /* rows that ended with it on */
    bool joins;   /* draws a sign of several emoji as one, of two columns */
    bool pending; /* the row is full, the next character wraps */
    bool wrapped[VT_ROWS];
    char cell[VT_ROWS][VT_COLS][VT_CELL];
    char seq[64]; /* unfinished escape or UTF-8 sequence */
    int n_seq;
    bool joiner; /* the last character was a zero-width joiner */
};

static void vt_clear(struct vt *v, int r, int c) {
    for (; r < v->rows; r++, c = 0) {
        v->wrapped[r] = false;
        for (; c < VT_COLS; c++) v->cell[r][c][0] = 0;
    }
}

static void vt_line_feed(struct vt *v) {
    if (v->r < v->rows - 1) {
        v->r++;
        return;
    }
    memmove(v->cell[0], v->cell[1], sizeof v->cell[0] * (size_t)(v->rows - 1));
    memmove(v->wrapped, v->wrapped + 1, sizeof v->wrapped[0] * (size_t)(v->rows - 1));
    vt_clear(v, v->rows - 1, 0);
    v->last_r--;
}

static void vt_print(struct vt *v, const char *s, int n, int width) {
    if (!width) {
        if (v->last_r >= 0 && strlen(v->cell[v->last_r][v->last_c]) + (size_t)n < sizeof v->cell[0][0])
            strncat(v->cell[v->last_r][v->last_c], s, (size_t)n);
        return;
    }
    if (v->pending || v->c + width > v->cols) {
        v->wrapped[v->r] = true;
        vt_line_feed(v);
        v->c = 0;
    }
    v->last_r = v->r, v->last_c = v->c, v->last_width = width;
    snprintf(v->cell[v->r][v->c], sizeof v->cell[0][0], "%.*s", n, s);
    if (width == 2) strcpy(v->cell[v->r][v->c + 1], "\1");
    v->c += width;
    v->pending = v->c >= v->cols;
    if (v->pending) v->c = v->cols - 1;
}

/* Puts a code point into the place of the character before it, if the table has both as one cluster. */
static bool vt_join(struct vt *v, const char *s, int n) {
    char cluster[VT_CELL + 4];
    if (v->last_r != v->r || v->last_c + v->last_width != v->c + v->pending) return false;
    char *cell = v->cell[v->r][v->last_c];
    snprintf(cluster, sizeof cluster, "%s%.*s", cell, n, s);
    const ptrdiff_t i = shgeti(v->table->clusters, cluster);
    if (i < 0 || strlen(cluster) >= VT_CELL) return false;
    strcpy(cell, cluster);
    v->last_width = v->table->clusters[i].value;
    for (int c = v->last_c + 1; c < v->last_c + v->last_width && c < v->cols; c++) strcpy(v->cell[v->r][c], "\1");
    v->c = v->last_c + v->last_width;
    v->pending = v->c >= v->cols;
    if (v->pending) v->c = v->cols - 1;
    return true;
}

static void vt_code_point(struct vt *v, const char *s, int n) {
    utf8proc_int32_t cp;
    utf8proc_iterate((const uint8_t *)s, n, &cp);
    int width;
    if (v->table) {
        if (v->terminal == 2 && vt_join(v, s, n)) return;
        const ptrdiff_t i = hmgeti(v->table->widths, cp);
        width = i < 0 ? 1 : v->table->widths[i].value[v->terminal > 0];
    } else {
        width = code_width(cp, NULL);
        if (v->joins && (v->joiner || (cp >= 0x1f3fb && cp <= 0x1f3ff))) width = 0;
    }
    v->joiner = cp == 0x200d;
    vt_print(v, s, n, width);
}

static void vt_sequence(struct vt *v, const char *s, int n) {
    int arg = atoi(s + 2), k = arg ? arg : 1;
    char final = s[n - 1];
    if (final != 'm' && final != 'h' && final != 'l') v->pending = false;
    if (final == 'm') v->styled = arg != 0;
    if (final == 'A') v->r = v->r > k ? v->r - k : 0;
    if (final == 'B') v->r = v->r + k < v->rows ? v->r + k : v->rows - 1;
    if (final == 'C') v->c = v->c + k < v->cols ? v->c + k : v->cols - 1;
    if (final == 'D') v->c = v->c > k ? v->c - k : 0;
    if (final == 'H') v->r = v->c = 0;
    if (final == 'J') vt_clear(v, arg == 2 ? 0 : v->r, arg == 2 ? 0 : v->c);
}

static void vt_byte(struct vt *v, char ch) {
    uint8_t b = (uint8_t)ch;
    if (v->n_seq || b == 27 || b >= 0x80) {
        v->seq[v->n_seq++] = ch;
        if (v->seq[0] == 27 && v->n_seq == 2 && b == '7') {
            v->saved_r = v->r, v->saved_c = v->c;
        } else if (v->seq[0] == 27 && v->n_seq == 2 && b == '8') {
            v->r = v->saved_r, v->c = v->saved_c, v->pending = false;
        } else if (v->seq[0] == 27) {
            if (v->n_seq < 3 || b < 0x40 || b > 0x7e) {
                if (v->n_seq == sizeof v->seq - 1) v->n_seq = 0;
                return;
            }
            v->seq[v->n_seq] = 0;
            vt_sequence(v, v->seq, v->n_seq);
        } else {
            int k = utf8_sequence(v->seq, (size_t)v->n_seq);
            if (!k) return;
            if (k > 0) vt_code_point(v, v->seq, k);
        }
        v->n_seq = 0;
    } else if (b == '\r') {
        v->bleeds += v->styled;
        v->c = 0, v->pending = false;
    } else if (b == '\n') {
        vt_line_feed(v);
        v->pending = false;
    } else if (b == '\b') {
        v->c -= v->c > 0;
    } else if (b >= 32) {
        vt_code_point(v, &ch, 1);
    }
}

/* Text of a row without blanks at its end. Valid until the next but three. */
static const char *vt_row(const struct vt *v, int r) {
    static char text[4][VT_COLS * VT_CELL];
    static int turn;
    char *s = text[turn++ & 3];
    size_t n = 0;
    for (int c = 0; c < v->cols; c++) {
        const char *cell = v->cell[r][c];
        if (*cell != 1) n += (size_t)sprintf(s + n, "%s", *cell ? cell : " ");
    }
    while (n && s[n - 1] == ' ') n--;
    s[n] = 0;
    return s;
}

static void vt_resize(struct vt *v, int rows, int cols) {
    struct vt *old = xmalloc(sizeof *old);
    int r_new = -1, c_new = 0, used = 0;
    *old = *v;
    for (int r = 0; r < old->rows; r++)
        if (*vt_row(old, r) || r <= old->r) used = r + 1;
    v->rows = rows, v->cols = cols, v->r = v->c = 0, v->pending = false;
    for (int r = 0; r < VT_ROWS; r++) memset(v->cell[r], 0, sizeof v->cell[r]), v->wrapped[r] = false;
    for (int r = 0; r < used; r++) {
        int end = old->wrapped[r] ? old->cols : 0;
        for (int c = 0; c < old->cols; c++)
            if (old->cell[r][c][0] && c + 1 > end) end = c + 1;
        if (r == old->r && old->c > end) end = old->c;
        for (int c = 0; c < end; c++) {
            const char *cell = old->cell[r][c];
            if (r == old->r && c == old->c) r_new = v->pending ? v->r + 1 : v->r, c_new = v->pending ? 0 : v->c;
            if (*cell != 1)
                vt_print(v, *cell ? cell : " ", *cell ? (int)strlen(cell) : 1,
                         text_width(*cell ? cell : " ", *cell ? strlen(cell) : 1, NULL));
        }
        if (r == old->r && r_new < 0) r_new = v->pending ? v->r + 1 : v->r, c_new = v->pending ? 0 : v->c;
        if (old->wrapped[r] || r + 1 == used) continue;
        vt_line_feed(v);
        v->c = 0, v->pending = false;
    }
    v->r = r_new < rows ? r_new : rows - 1, v->c = c_new, v->pending = false;
    free(old);
}

/* ---- a child on a terminal ---- */

struct pty {
    int master, slave; /* the slave stays open: its mode is looked at when the child is gone */
    pid_t pid;
    struct vt *vt;
    char *log;     /* all output */
    size_t log_at; /* up to where pty_expect has looked */
    struct termios mode;
    int status; /* of waitpid */
    bool ended;
};

static void pty_pump(struct pty *p, int wait_ms) {
    char buf[4096];
    struct pollfd f = {.fd = p->master, .events = POLLIN};
    if (!p->ended && waitpid(p->pid, &p->status, WNOHANG) == p->pid) p->ended = true;
    if (poll(&f, 1, p->ended ? 0 : wait_ms) <= 0) return;
    ssize_t n = read(p->master, buf, sizeof buf);
    for (ssize_t i = 0; i < n; i++) {
        arrput(p->log, buf[i]);
        vt_byte(p->vt, buf[i]);
    }
}

/* Whether the child has ended and all that it wrote has been read. */
static bool pty_over(const struct pty *p) {
    struct pollfd f = {.fd = p->master, .events = POLLIN};
    return p->ended && poll(&f, 1, 0) <= 0;
}

/* fn(arg) runs in the child, or argv is executed, with the tests' directory as its home: history and saved conversations
 * go there. terminal: TERM; NULL: it is not set. */
static bool pty_start(struct pty *p, int rows, int cols, const char *terminal, void (*fn)(const char *),
                      const char *arg, char **argv) {
    struct winsize w = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    char home[PATH_MAX];
    memset(p, 0, sizeof *p);
    if (!CHECK(!openpty(&p->master, &p->slave, NULL, NULL, &w), "%s", strerror(errno))) return false;
    tcgetattr(p->slave, &p->mode);
    p->vt = xcalloc(1, sizeof *p->vt);
    p->vt->rows = rows, p->vt->cols = cols, p->vt->last_r = -1;
    fflush(NULL);
    p->pid = fork();
    if (!p->pid) {
        close(p->master);
        login_tty(p->slave);
        for (int sig = 1; sig < 32; sig++) signal(sig, SIG_DFL); /* whatever started the tests ignores */
        /* as a script's background job hands it on; at a terminal Ctrl-C works all the same */
        signal(SIGINT, SIG_IGN);
        if (terminal) setenv("TERM", terminal, 1);
        else unsetenv("TERM");
        if (argv && realpath(test_dir(), home)) {
            setenv("HOME", home, 1);
            execv(argv[0], argv);
        }
        if (fn) fn(arg);
        _exit(99);
    }
    return CHECK(p->pid > 0, "fork: %s", strerror(errno));
}

static void pty_send_n(struct pty *p, const char *s, size_t n) {
    double end = now_seconds() + PTY_SECONDS;
    while (n && !p->ended && now_seconds() < end) {
        struct pollfd f = {.fd = p->master, .events = POLLOUT};
        ssize_t k = poll(&f, 1, 0) > 0 ? write(p->master, s, n < 512 ? n : 512) : 0;
        if (k > 0) s += k, n -= (size_t)k;
        pty_pump(p, k > 0 ? 0 : 5);
    }
}

static void pty_send(struct pty *p, const char *s) { pty_send_n(p, s, strlen(s)); }

/* Waits until the output, from where the last call found something, holds text. */
static bool pty_expect(struct pty *p, const char *text) {
    size_t n = strlen(text);
    for (double end = now_seconds() + PTY_SECONDS; now_seconds() < end; pty_pump(p, 20)) {
        char *at =
            arrlenu(p->log) > p->log_at ? memmem(p->log + p->log_at, arrlenu(p->log) - p->log_at, text, n) : NULL;
        if (!at && pty_over(p)) return false;
        if (!at) continue;
        p->log_at = (size_t)(at - p->log) + n;
        return true;
    }
    return false;
}

#define EXPECT(p, text)                                                          \
    CHECK(pty_expect(p, text), "not seen: \"%s\"; after it came \"%.*s\"", text, \
          (int)(arrlen((p)->log) - (ptrdiff_t)(p)->log_at), (p)->log ? (p)->log + (p)->log_at : "")

/* Waits until rows of the screen, from `row` on, and the cursor are as given; the rows end with NULL. */
static bool pty_screen(struct pty *p, int row, const char *const *want, int cursor_r, int cursor_c) {
    const struct vt *v = p->vt;
    for (double end = now_seconds() + PTY_SECONDS; now_seconds() < end; pty_pump(p, 20)) {
        bool same = v->r == cursor_r && v->c == cursor_c && !v->pending;
        for (int i = 0; same && want[i]; i++) same = !strcmp(vt_row(v, row + i), want[i]);
        if (same) return true;
        if (pty_over(p)) break;
    }
    for (int r = 0; r < v->rows; r++) fprintf(stderr, "    |%s|\n", vt_row(v, r));
    fprintf(stderr, "    cursor %d,%d\n", v->r, v->c);
    return false;
}

#define SCREEN(p, row, cursor_r, cursor_c, ...) \
    CHECK(pty_screen(p, row, (const char *const[]){__VA_ARGS__, NULL}, cursor_r, cursor_c), "this is the screen")

static bool pty_mode_kept(const struct pty *p) {
    struct termios t;
    return !tcgetattr(p->slave, &t) && t.c_iflag == p->mode.c_iflag && t.c_oflag == p->mode.c_oflag &&
           t.c_cflag == p->mode.c_cflag && t.c_lflag == p->mode.c_lflag && !memcmp(t.c_cc, p->mode.c_cc, sizeof t.c_cc);
}

/* Waits for the child's end. Its exit code, 128 + signal, or -1 when it had to be killed. The mode must be as before.
 * */
static int pty_end(struct pty *p) {
    for (double end = now_seconds() + PTY_SECONDS; !p->ended && now_seconds() < end;) pty_pump(p, 20);
    bool ended = p->ended;
    if (!ended) {
        kill(p->pid, SIGKILL);
        waitpid(p->pid, &p->status, 0);
    } else {
        CHECK(pty_mode_kept(p), "the terminal is left in another mode");
    }
    close(p->master), close(p->slave);
    arrfree(p->log);
    free(p->vt);
    return !ended ? -1 : WIFEXITED(p->status) ? WEXITSTATUS(p->status) : 128 + WTERMSIG(p->status);
}

/* ---- the editor alone ---- */

static bool switch_waits; /* the next switch to raw mode waits until something is typed */

/* Stands in front of the C library's function, so that a test can type just before the mode changes. */
int tcsetattr(int fd, int when, const struct termios *mode) {
    static int (*next)(int, int, const struct termios *);
    if (!next) next = (int (*)(int, int, const struct termios *))dlsym(RTLD_NEXT, "tcsetattr");
    if (switch_waits && !(mode->c_lflag & ICANON)) {
        switch_waits = false;
        write_all(1, "=ready\n", 7);
        while (poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1) < 0) continue; /* Ctrl-C */
    }
    return next(fd, when, mode);
}

/* Completes the last word of a few. */
static void editor_words(const char *line, size_t cursor, char ***candidates, size_t *from) {
    static const char *const words[] = {
        "/set", "/save", "/show", "/help", "m\303\244n", "m\xc3\xbcll", "dir/sub/one", "dir/sub/two\033[2J", "path/"};
    *from = cursor;
    while (*from && line[*from - 1] != ' ') --*from;
    for (size_t i = 0; i < sizeof words / sizeof *words && cursor > *from; i++)
        if (!strncmp(words[i], line + *from, cursor - *from)) arrput(*candidates, xstrdup(words[i]));
    for (int i = 0; i < 100 && cursor > *from && line[*from] == '#'; i++) {
        char word[32];
        snprintf(word, sizeof word, "#number-%d", i);
        arrput(*candidates, xstrdup(word));
    }
}

#define SYNC "\033[?7777h"

/* Completes nothing. To say that the keys before Tab were taken, it writes a mode that no terminal knows. */
static void editor_sync(const char *line, size_t cursor, char ***candidates, size_t *from) {
    (void)line, (void)cursor, (void)candidates, (void)from;
    write_all(1, SYNC, sizeof SYNC - 1);
}

/* The child: says what it read, with control characters as \xNN, until the end of input (exit 7). */
static void editor_serve(const char *history,
                         void (*complete)(const char *line, size_t cursor, char ***candidates, size_t *from)) {
    struct editor e;
    char *line = NULL, *shown = NULL;
    term_init();
    signals_install();
    editor_init(&e, history);
    e.complete = complete;
    for (;;) {
        enum edit_result r = editor_read(&e, "> ", ". ", &line);
        arrsetlen(shown, 0);
        for (int i = 0; i < arrlen(line); i++) {
            if ((uint8_t)line[i] < 32 || line[i] == 127) sb_printf(&shown, "\\x%02x", line[i]);
            else arrput(shown, line[i]);
        }
        printf("=%s\n", r == EDIT_LINE ? sb_cstr(&shown) : r == EDIT_EOF ? "EOF" : "INT");
        fflush(stdout);
        if (r == EDIT_EOF) break;
        if (r == EDIT_LINE) editor_history_add(&e, line, arrlenu(line));
        if (arrlen(line) == 5 && !memcmp(line, "crash", 5)) raise(SIGSEGV);
        /* `sleep` waits for type-ahead, `busy` for the second Ctrl-C; `switch` cooks the terminal, as an editor does */
        if (arrlen(line) == 5 && !memcmp(line, "sleep", 5)) poll(&(struct pollfd){.fd = 0, .events = POLLIN}, 1, -1);
        if (arrlen(line) == 4 && !memcmp(line, "busy", 4)) {
            watch_begin(&e.keys);
            for (;;) pause();
        }
        switch_waits = arrlen(line) == 6 && !memcmp(line, "switch", 6);
        if (switch_waits) term_restore();
        interrupted = 0;
    }
    editor_free(&e);
    arrfree(line);
    arrfree(shown);
    exit(7);
}

static void editor_child(const char *history) { editor_serve(history, editor_words); }

static void editor_sync_child(const char *history) { editor_serve(history, editor_sync); }

#define PASTE(text) "\033[200~" text "\033[201~"

static bool editor_start(struct pty *p, int rows, int cols, const char *history) {
    return pty_start(p, rows, cols, "xterm", editor_child, history, NULL) && EXPECT(p, "\033[?25h");
}

static void editor_end(struct pty *p) {
    pty_send(p, "\4");
    EXPECT(p, "=EOF");
    CHECK(!p->vt->bleeds, "a style reaches over the end of a row");
    CHECK_INT(pty_end(p), 7, "the exit code");
}

/* Waits for the output, and until the editor reads again: what comes earlier is type-ahead. */
static bool editor_expect(struct pty *p, const char *want) { return EXPECT(p, want) && EXPECT(p, "\033[?2004h"); }

/* Types keys and Enter. */
static bool editor_line(struct pty *p, const char *keys, const char *want) {
    pty_send(p, keys);
    pty_send(p, "\r");
    return editor_expect(p, want);
}

/* Types each and compares the line that is read. */
static void editor_table(const char *const table[][2], size_t n) {
    struct pty p;
    char want[1024];
    if (!editor_start(&p, 24, 80, NULL)) return;
    for (size_t i = 0; i < n; i++) {
        snprintf(want, sizeof want, "=%s\r\n", table[i][1]);
        if (!CHECK(editor_line(&p, table[i][0], want), "entry %zu", i)) break;
    }
    editor_end(&p);
}

#define EDITOR_TABLE(t) editor_table(t, sizeof t / sizeof *t)

static void test_repl_keys(void) {
    static const char *const t[][2] = {
        {"hello", "hello"},
        {"world\1hello \5!", "hello world!"},
        {"abc\2\2X\6Y", "aXbYc"},
        {"one two three\1\033f\033fX", "one twoX three"},
        {"one two three\033b\033bX", "one Xtwo three"},
        {"one two-three\027X", "one X"},
        {"one two-three\033\177X", "one two-X"},
        {"one two\1\033dX", "X two"},
        {"abcd\2\2\13", "ab"},
        {"abcd\2\2\25", "cd"},
        {"abcd\1\4\4", "cd"},
        {"abc\10\177d", "ad"},
        {"abc\033[D\033[DX\033[C\033[CY", "aXbcY"},
        {"abc\033OD\033ODX\033OHY\033OFZ", "YaXbcZ"},
        {"abc\033[1~X\033[4~Y\033[7~Z\033[8~W\033[HV\033[FU", "VZXabcYWU"},
        {"abc\033[H\033[3~", "bc"},
        {"one two\033[1;5DX\033[1;5D\033[1;3DY\033[1;5CZ", "YoneZ Xtwo"},
        {"a\033[1;2Pb\033[99;1;2~c\033[[Ad\033[?1;2ce", "abcde"},
        {"a\033[5~\033[6~b\033[Z\033[2~c", "abc"},
        {"one\ntwo\13", "one\\x0atwo"},
        {"one\ntwo\1\10", "onetwo"},
        {"one\ntwo\033[A\13", "onetwo"},
        {"one\ntwo\033[AX\033[BY", "oneX\\x0atwoY"},
        {"one\n\ntwo\1\033[A\033[AX", "Xone\\x0a\\x0atwo"},
        {"ab\14c\21d\0", "abcd"},
    };
    EDITOR_TABLE(t);
}

static void test_repl_utf8(void) {
    static const char *const t[][2] = {
        {"gr\xc3\xbc\xc3\x9f\177e", "gr\xc3\xbc"
                                    "e"},
        {"\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e\2\2X", "\xe6\x97\xa5X\xe6\x9c\xac\xe8\xaa\x9e"},
        {"e\xcc\x81x\2\2Y", "Ye\xcc\x81x"},
        {"ae\xcc\x81\177z", "az"},
        /* a family of three, joined, is one step; so is a flag */
        {"a\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7\177z", "az"},
        {"\xf0\x9f\x87\xa9\xf0\x9f\x87\xaa\xf0\x9f\x87\xab\xf0\x9f\x87\xb7\2x",
         "\xf0\x9f\x87\xa9\xf0\x9f\x87\xaax\xf0\x9f\x87\xab\xf0\x9f\x87\xb7"},
        /* half a flag before a flag: the cursor is in the flag that both halves make, and goes to its end */
        {"\xf0\x9f\x87\xab\xf0\x9f\x87\xb7\1\xf0\x9f\x87\xa9\6x", "\xf0\x9f\x87\xa9\xf0\x9f\x87\xabx\xf0\x9f\x87\xb7"},
        {"\xf0\x9f\x87\xab\xf0\x9f\x87\xb7\1\xf0\x9f\x87\xa9\4x", "\xf0\x9f\x87\xa9x\xf0\x9f\x87\xb7"},
        {"a\xff"
         "b\xc3("
         "c\xed\xa0\x80",
         "a\xef\xbf\xbd"
         "b\xef\xbf\xbd("
         "c\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    };
    EDITOR_TABLE(t);
}

static void test_repl_newlines(void) {
    static const char *const t[][2] = {
        {"a\nb", "a\\x0ab"},
        {"a\033\rb", "a\\x0ab"},
        {"a\033[13;2ub\033[27;2;13~c", "a\\x0ab\\x0ac"},
        {"a\\\rb\\\rc", "a\\x0ab\\x0ac"},
        {"a\\\\", "a\\\\"},
        {"\"\"\"\ra\rb\r\"\"\"", "a\\x0ab"},
        {"\"\"\"a\\\rb\"\"\"  ", "a\\\\x0ab"},
        {"\"\"\"one\"\"\"", "one"},
        {"\"\"\"\"\"\"", ""},
        {"say \"\"\"", "say \"\"\""},
    };
    EDITOR_TABLE(t);
}

static void test_repl_paste(void) {
    static const char *const t[][2] = {
        {PASTE("one\rtwo\r\nthree\n") "x", "one\\x0atwo\\x0athree\\x0ax"},
        {PASTE("a\tb\033[31m\1\4\3c") "d", "a\\x09b\\x1b[31m\\x01\\x04\\x03cd"},
        {PASTE("/quit\r") "\177", "/quit"},
        {"a" PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "b", "a1\\x0a2\\x0a3\\x0a4\\x0a5\\x0a6\\x0a7\\x0a8\\x0a9b"},
        {"a" PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "\177b", "ab"},
        {"a" PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "b\2\2X\6Y\1\6\6\4", "aXYb"},
        {PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") PASTE("z\rz\rz\rz\rz\rz\rz\rz\rz\r") "\1\4x\5\177y", "xy"},
        {"\033[201~a", "a"},
    };
    EDITOR_TABLE(t);
    struct pty p;
    char *big = NULL;
    if (!editor_start(&p, 10, 60, NULL)) return;
    pty_send(&p, "see " PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9\r") " end");
    SCREEN(&p, 0, 0, 26, "> see [pasted 9 lines] end", "");
    pty_send(&p, "\2\2\2\2\2");
    SCREEN(&p, 0, 0, 6, "> see [pasted 9 lines] end", "");
    pty_send(&p, "\3x" PASTE("\1\177\xc2\x9b") "y");
    SCREEN(&p, 0, 0, 12, "> x^A^?\\x9by", "");
    /* a mebibyte goes in whole and is one unit */
    pty_send(&p, "\3\033[200~");
    for (int i = 0; i < 1 << 14; i++)
        sb_puts(&big, "0123456789abcdefghijklmnopqrstuvwxyz 0123456789 0123456789 01234\r");
    pty_send_n(&p, big, arrlenu(big));
    pty_send(&p, "\033[201~!");
    SCREEN(&p, 0, 0, 23, "> [pasted 16384 lines]!", "");
    pty_send(&p, "\2\177");
    SCREEN(&p, 0, 0, 2, "> !", "");
    pty_send(&p, "\3");
    arrfree(big);
    editor_end(&p);
}

static void test_repl_cut(void) {
    static const char *const t[][2] = {
        {"one two three\027\027\031", "one two three"}, /* keys in a row cut one piece, */
        {"one two\027x\027\031\033y", "one two"},       /* others one each */
        {"abc def\2\2\2\13\1\031", "defabc "},
        {"one two\1\033d\033d\5-\031", "-one two"},
        {"one two-three\033\177\033\177\1\031!", "two-three!one "},
        {"abcdef\2\2\2\25\13\031\031", "abcdefabcdef"},
        {"a\033yb", "ab"},
        {"1 \0272 \0273 \027\031\033y\033y.", "1 ."},
        {PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "a\25\031\177\177b", "b"}, /* a fold stays one */
        {"ab\024c", "bac"},
        {"a\024b", "ab"},
        {"xe\xcc\x81\024", "e\xcc\x81x"},
        {"a" PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "\024\177b\2\4", "1\\x0a2\\x0a3\\x0a4\\x0a5\\x0a6\\x0a7\\x0a8\\x0a9"},
    };
    EDITOR_TABLE(t);
}

static void test_repl_undo(void) {
    static const char *const t[][2] = {
        {"one two\037", "one "},
        {"one two\037\037\037x", "x"},
        {"one two\027\030\025", "one two"},
        {"one two\027\177\037\037!", "one two!"},
        {"one\1\033d\037X", "Xone"}, /* the cursor is back as well */
        {"a" PASTE("b c d") "\037", "a"},
        {"a" PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "\177\037\177b", "ab"}, /* the fold is one again */
        {"kept\3\037", "kept"},
        {"draft\033[A\037!", "draft!"},
        {"draft\033[Ax\033[B\037?\033[B", "draft"}, /* back at the entry, and on to the draft */
        {"\030x", "x"},
        {"\037", ""},
    };
    EDITOR_TABLE(t);
    struct editor e;
    editor_init(&e, NULL);
    for (int i = 0; i < 3 * STEPS_MAX; i++) {
        e.in_step = false;
        text_insert(&e, "x", 1);
    }
    CHECK(arrlen(e.steps) == STEPS_MAX, "%td states", arrlen(e.steps));
    char *big = NULL;
    for (int i = 0; i < STEPS_BYTES / 2; i++) arrput(big, 'x');
    for (int i = 0; i < 4; i++) {
        e.in_step = false;
        text_insert(&e, big, arrlenu(big));
    }
    CHECK(arrlen(e.steps) == 1, "%td states of a large text", arrlen(e.steps));
    arrfree(big);
    editor_free(&e);
}

static const char *repl_scratch(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", test_dir(), name);
    unlink(path);
    return path;
}

static void test_repl_history(void) {
    const char *path = repl_scratch("history");
    struct pty p;
    struct stat st;
    char *data = NULL, err[ERR_MAX];
    if (!editor_start(&p, 24, 80, path)) return;
    editor_line(&p, "first", "=first");
    editor_line(&p, "se\ncond", "=se\\x0acond");
    editor_line(&p, "se\ncond", "=se\\x0acond"); /* again: kept once */
    /* up through the two rows of the newest entry to the oldest, and down again to the draft with its fold */
    editor_line(&p, "draft" PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "\033[A\033[A\033[A\033[A", "=first");
    editor_line(&p, "draft" PASTE("1\r2\r3\r4\r5\r6\r7\r8\r9") "\033[A\033[B\177!", "=draft!");
    editor_end(&p);
    CHECK(!stat(path, &st) && (st.st_mode & 0777) == 0600, "mode %o", st.st_mode & 0777);
    read_file(path, &data, err);
    CHECK(!strcmp(sb_cstr(&data), "first\nse\rcond\nfirst\ndraft!\n"), "%s", data);

    /* a file of anything: too long lines and control characters, no newline at its end, more lines than are kept */
    arrsetlen(data, 0);
    for (int i = 0; i < 1500; i++) sb_printf(&data, "entry %d\n", i);
    for (int i = 0; i < HISTORY_ENTRY_MAX + 1; i++) arrput(data, 'x');
    sb_put(&data, "\n\n\xff\x00\033[2J\rend", 12);
    write_test_file(path, data, arrlenu(data));
    struct editor e;
    editor_init(&e, path);
    CHECK(arrlen(e.history) == HISTORY_MAX, "%td entries", arrlen(e.history));
    if (arrlen(e.history) == HISTORY_MAX) {
        CHECK(passage_is(&arrlast(e.history), "\xef\xbf\xbd\xef\xbf\xbd\033[2J\nend", 14), "%s",
              sb_cstr(&arrlast(e.history).text));
        CHECK(passage_is(&e.history[0], "entry 501", 9), "%s", sb_cstr(&e.history[0].text));
    }
    editor_history_add(&e, "last", 4);
    editor_free(&e);
    editor_init(&e, path); /* the file was shortened, then extended */
    CHECK(arrlen(e.history) == HISTORY_MAX && passage_is(&arrlast(e.history), "last", 4), "%td", arrlen(e.history));
    editor_free(&e);
    editor_init(&e, "/nonexistent/dir/history"); /* nothing to read or write: no matter */
    editor_history_add(&e, "x", 1);
    editor_free(&e);
    arrfree(data);
}

/* A long paste is in the history as it was pasted; the file does without it if it is too long. */
static void test_repl_history_long(void) {
    const char *path = repl_scratch("history-long");
    struct pty p;
    char *big = NULL, *data = NULL, err[ERR_MAX];
    if (!editor_start(&p, 24, 80, path)) return;
    editor_line(&p, "first", "=first");
    editor_line(&p, "1\n2\n3\n4\n5\n6\n7\n8\n9", "=1\\x0a2");
    pty_send(&p, "see \033[200~");
    for (int i = 0; i < 2000; i++) sb_puts(&big, "0123456789 0123456789 0123456789 0123456789\r");
    pty_send_n(&p, big, arrlenu(big));
    pty_send(&p, "\033[201~!\r");
    editor_expect(&p, "6789\\x0a!\r\n");
    pty_send(&p, "\14\033[A");
    SCREEN(&p, 0, 0, 26, "> see [pasted 2000 lines]!", "");
    pty_send(&p, "\033[A");
    SCREEN(&p, 0, 0, 18, "> [pasted 9 lines]", "");
    pty_send(&p, "\033[A");
    SCREEN(&p, 0, 0, 7, "> first", "");
    pty_send(&p, "\3");
    editor_end(&p);
    CHECK(!read_file(path, &data, err) && !strcmp(sb_cstr(&data), "first\n1\r2\r3\r4\r5\r6\r7\r8\r9\n"), "%s", data);
    arrfree(data);
    arrfree(big);
}

/* Two programs append at once: every line arrives whole. */
static void test_repl_history_shared(void) {
    const char *path = repl_scratch("shared");
    enum { N = 200 };
    char *data = NULL, err[ERR_MAX];
    int lines = 0, bad = 0;
    pid_t pid[2];
    for (int k = 0; k < 2; k++) {
        pid[k] = fork();
        if (pid[k]) continue;
        struct editor e;
        editor_init(&e, path);
        for (int i = 0; i < N; i++) {
            char s[8192];
            int n = 500 + i * 30;
            memset(s, 'a' + k, sizeof s);
            s[n - 1] = (char)('0' + i % 10);
            editor_history_add(&e, s, (size_t)n);
        }
        _exit(0);
    }
    for (int k = 0; k < 2; k++) waitpid(pid[k], NULL, 0);
    read_file(path, &data, err);
    for (char *s = data ? strtok((char *)(uintptr_t)sb_cstr(&data), "\n") : NULL; s; s = strtok(NULL, "\n")) {
        lines++;
        size_t n = strlen(s);
        bad += strspn(s, (char[]){*s, 0}) != n - 1 || !isdigit((uint8_t)s[n - 1]);
    }
    CHECK(lines == 2 * N && !bad, "%d lines, %d broken", lines, bad);
    arrfree(data);
}

static void test_repl_search(void) {
    struct pty p;
    if (!editor_start(&p, 24, 80, NULL)) return;
    editor_line(&p, "apple pie", "=apple pie");
    editor_line(&p, "banana", "=banana");
    editor_line(&p, "apple juice", "=apple juice");
    editor_line(&p, "gr\xc3\xbcn", "=gr\xc3\xbcn");
    pty_send(&p, "\022app");
    SCREEN(&p, 8, 8, 26, "(search 'app') apple juice", "");
    editor_line(&p, "\022", "=apple pie");
    editor_line(&p, "\022banx\177\5!", "=banana!");          /* a key that moves takes the entry */
    editor_line(&p, "keep\022app\3ed", "=keeped");           /* given up: the line is as before, */
    editor_line(&p, "keep\2\022app\7X", "=keeXp");           /* the cursor too, */
    editor_line(&p, "\033[A\033[A!\022app\3?", "=keeped!?"); /* also an entry */
    pty_send(&p, "\022\xc3\xbc");
    SCREEN(&p, 18, 18, 17, "(search '\xc3\xbc') gr\xc3\xbcn", "");
    pty_send(&p, "\3");
    editor_line(&p, "\022\xc3\xbc\xc3\xbf\177", "=gr\xc3\xbcn");
    pty_send(&p, "\14kept\022squqq");
    SCREEN(&p, 0, 0, 23, "(no match 'squqq') kept", "");
    pty_send(&p, "\r");
    SCREEN(&p, 0, 0, 6, "> kept", "");
    editor_line(&p, "\022banqq\177\177", "=banana"); /* Enter takes an entry that matches, */
    editor_line(&p, "here\022banqq\r!", "=here!");   /* but no other */
    editor_end(&p);
}

static void test_repl_screen(void) {
    struct pty p;
    if (!editor_start(&p, 6, 20, NULL)) return;
    pty_send(&p, "0123456789abcdefg");
    SCREEN(&p, 0, 0, 19, "> 0123456789abcdefg", "");
    pty_send(&p, "h"); /* the row is full: the cursor stands at the start of the next */
    SCREEN(&p, 0, 1, 0, "> 0123456789abcdefgh", "", "");
    pty_send(&p, "ij");
    SCREEN(&p, 0, 1, 2, "> 0123456789abcdefgh", "ij", "");
    pty_send(&p, "\033[A");
    SCREEN(&p, 0, 0, 2, "> 0123456789abcdefgh", "ij");
    pty_send(&p, "\5\n\xe6\x97\xa5");
    SCREEN(&p, 0, 2, 4, "> 0123456789abcdefgh", "ij", ". \xe6\x97\xa5", "");
    pty_send(&p, "\3");
    SCREEN(&p, 0, 0, 2, ">", "", "");
    /* a wide character is not cut at the edge */
    pty_send(&p, "0123456789abcdefg\xe6\x97\xa5z");
    SCREEN(&p, 0, 1, 3, "> 0123456789abcdefg", "\xe6\x97\xa5z", "");
    pty_send(&p, "\2\2");
    SCREEN(&p, 0, 1, 0, "> 0123456789abcdefg", "\xe6\x97\xa5z", "");
    pty_send(&p, "\177");
    SCREEN(&p, 0, 0, 18, "> 0123456789abcdef\xe6\x97\xa5", "z", "");
    /* a combining mark on the last column stays with its letter */
    pty_send(&p, "\3"
                 "0123456789abcdefge\xcc\x81");
    SCREEN(&p, 0, 1, 0, "> 0123456789abcdefge\xcc\x81", "", "");
    /* taller than the screen: the part around the cursor */
    pty_send(&p, "\3"
                 "1\n2\n3\n4\n5\n6\n7\n8");
    SCREEN(&p, 0, 5, 3, ". 3", ". 4", ". 5", ". 6", ". 7", ". 8");
    pty_send(&p, "\033[A\033[A\033[A\033[A\033[A\033[A\033[A");
    SCREEN(&p, 0, 0, 3, "> 1", ". 2", ". 3", ". 4", ". 5", ". 6");
    pty_send(&p, "\033[BX");
    SCREEN(&p, 0, 1, 4, "> 1", ". 2X", ". 3", ". 4", ". 5", ". 6");
    pty_send(&p, "\r");
    EXPECT(&p, "=1\\x0a2X\\x0a3");
    /* below other output it scrolls up as it grows */
    SCREEN(&p, 5, 5, 2, ">");
    pty_send(&p, "aaaaaaaaaaaaaaaaaa");
    SCREEN(&p, 4, 5, 0, "> aaaaaaaaaaaaaaaaaa", "");
    pty_send(&p, "\14");
    SCREEN(&p, 0, 1, 0, "> aaaaaaaaaaaaaaaaaa", "", "");
    pty_send(&p, "\3/s\t");
    SCREEN(&p, 0, 2, 4, "> /s", "/save  /set   /show", "> /s", "");
    editor_end((pty_send(&p, "\3"), &p));
}

#define FAMILY "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7\xe2\x80\x8d\xf0\x9f\x91\xa6"
#define THUMB  "\xf0\x9f\x91\x8d\xf0\x9f\x8f\xbd"

/* Signs that one terminal draws in two columns and another in eight: neither row nor column of the cursor drifts, and
 * what stands above stays. */
static void test_repl_clusters(void) {
    for (int joins = 0; joins < 2; joins++) {
        struct pty p;
        if (!editor_start(&p, 12, 40, NULL)) return;
        p.vt->joins = joins;
        editor_line(&p, "above", "=above");
        pty_send(&p, FAMILY " family and " THUMB " a row that is too long for it\1\033[C\033[C\033[C");
        SCREEN(&p, 1, 2, joins ? 6 : 12, "=above");
        pty_send(&p, "\033[C\033[C\033[DX");
        SCREEN(&p, 1, 2, joins ? 8 : 14, "=above");
        CHECK(strstr(vt_row(p.vt, 2), "faXmily and"), "%s", vt_row(p.vt, 2));
        pty_send(&p, "\5\177Y");
        EXPECT(&p, "Y");
        EXPECT(&p, "\033[?25h");
        CHECK(!strcmp(vt_row(p.vt, 1), "=above") && p.vt->r == 3, "row %d, above: %s", p.vt->r, vt_row(p.vt, 1));
        pty_send(&p, "\3");
        editor_end(&p);
    }
}

/* Vowel signs of a column of their own: the rows are as long as the terminal's. */
static void test_repl_vowels(void) {
    static const char hindi[] = "\xe0\xa4\xa8\xe0\xa4\xae\xe0\xa4\xb8\xe0\xa5\x8d\xe0\xa4\xa4\xe0\xa5\x87 "
                                "\xe0\xa4\xa6\xe0\xa5\x81\xe0\xa4\xa8\xe0\xa4\xbf\xe0\xa4\xaf\xe0\xa4\xbe";
    bool vague = false;
    CHECK_INT(text_width(hindi, sizeof hindi - 1, &vague), 10, "columns of two words in Devanagari");
    CHECK(vague, "terminals agree about vowel signs");
}

/* Wraps s in `cols` columns, byte by byte as a model may write it, and compares. */
static void check_wrap(int cols, const char *s, const char *want) {
    struct wrap w = {.cols = cols};
    char *out = NULL;
    for (size_t n; *s; s += n) {
        n = (size_t)utf8_sequence(s, strlen(s));
        wrap_put(&w, s, n, &out);
    }
    wrap_flush(&w, &out);
    CHECK(!strcmp(sb_cstr(&out), want), "in %d columns:\n%s\nexpected:\n%s", cols, out, want);
    arrfree(out);
    arrfree(w.word);
}

static void test_repl_wrap(void) {
    check_wrap(10, "a green feather fell", "a green\nfeather\nfell");
    check_wrap(10, "0123456789 a", "0123456789\na");
    check_wrap(10, "01234567890123 a", "01234567890123 a"); /* longer than a row: the terminal cuts it */
    check_wrap(10, "ab  0123456 c", "ab\n0123456 c");
    check_wrap(10, "- one\n  two three", "- one\n  two\nthree");
    check_wrap(10, "a\tb c", "a       b\nc");
    check_wrap(8, "x\n```c\nint a = b + c;\n```\nint a = b", "x\n```c\nint a = b + c;\n```\nint a =\nb");
    check_wrap(8, "a ``b`` ```c", "a ``b``\n```c");
    check_wrap(6, "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e\xe3\x80\x82\xe6\x97\xa5",
               "\xe6\x97\xa5\xe6\x9c\xac\n\xe8\xaa\x9e\xe3\x80\x82\xe6\x97\xa5");
    check_wrap(4,
               "ab e\xcc\x81"
               "cd",
               "ab\ne\xcc\x81"
               "cd"); /* a mark takes no column */
    check_wrap(10, "ab " FAMILY " c d", "ab\n" FAMILY " c\nd");
}

static void repl_resize(struct pty *p, int rows, int cols) {
    struct winsize w = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    vt_resize(p->vt, rows, cols);
    p->log_at = arrlenu(p->log);
    ioctl(p->master, TIOCSWINSZ, &w);
    EXPECT(p, "\033[?2004h"); /* it has noticed, and draws */
    EXPECT(p, "\033[?25h");
}

static void test_repl_resize(void) {
    struct pty p;
    if (!editor_start(&p, 10, 40, NULL)) return;
    editor_line(&p, "above", "=above");
    pty_send(&p, "0123456789 0123456789 0123456789 0123456789");
    SCREEN(&p, 1, 3, 5, "=above", "> 0123456789 0123456789 0123456789 01234", "56789", "");
    repl_resize(&p, 10, 20);
    SCREEN(&p, 1, 4, 5, "=above", "> 0123456789 0123456", "789 0123456789 01234", "56789", "");
    repl_resize(&p, 10, 60);
    SCREEN(&p, 1, 2, 45, "=above", "> 0123456789 0123456789 0123456789 0123456789", "", "");
    pty_send(&p, "!\r");
    editor_expect(&p, "=0123456789 0123456789 0123456789 0123456789!");
    editor_end(&p);
}

static void test_repl_complete(void) {
    static const char *const t[][2] = {
        {"/he\tx", "/help x"},
        {"a /sa\tx\037", "a /save "},       /* undo takes back the word that was typed, */
        {"/he\t\037", "/he"},               /* or the completion */
        {"m\t\xc3\xa4\tx", "m\xc3\xa4n x"}, /* common are whole code points */
        {"di\to\tx", "dir/sub/one x"},
        {"pa\tx", "path/x"}, /* a directory may go on */
        {"x\t\ty", "xy"},
    };
    EDITOR_TABLE(t);
    struct pty p;
    if (!editor_start(&p, 24, 20, NULL)) return;
    pty_send(&p, "dir/\t\t");
    SCREEN(&p, 0, 3, 10, "> dir/sub/", "one", "two\\x1b[2J", "> dir/sub/", "");
    pty_send(&p, "\3\14#\t\t");
    SCREEN(&p, 0, 22, 10, "> #number-", "#number-0", "#number-1", "#number-10", "#number-11");
    SCREEN(&p, 19, 22, 10, "#number-25", "#number-26", "... and 80 more", "> #number-", "");
    pty_send(&p, "\3");
    editor_end(&p);
}

/* Random keys: what stands on the screen is what a redraw of everything gives. */
static void test_repl_redraw(void) {
    static const char *const keys[] = {"a",
                                       " ",
                                       "b",
                                       "\xe6\x97\xa5",
                                       "e\xcc\x81",
                                       "\n",
                                       "\t",
                                       "\2",
                                       "\6",
                                       "\1",
                                       "\5",
                                       "\177",
                                       "\4",
                                       "\033[A",
                                       "\033[B",
                                       "\033b",
                                       "\033f",
                                       "\027",
                                       "\13",
                                       "\033[200~x\r\033y\033[201~",
                                       "\033[200~1\r2\r3\r4\r5\r6\r7\r8\r9\033[201~",
                                       "longer words here "};
    struct pty p;
    uint64_t seed = 7;
    if (!editor_start(&p, 8, 17, NULL)) return;
    for (int round = 0; round < 40; round++) {
        char *before = NULL, *after = NULL, mark[32];
        pty_send(&p, "x\3"); /* never on an empty line */
        for (int i = 0; i < 30; i++) {
            size_t k = (size_t)(rng_next(&seed) % (sizeof keys / sizeof *keys));
            if (keys[k][0] != 4) pty_send(&p, keys[k]);
            if (rng_next(&seed) % 4 == 0) pty_pump(&p, 2); /* so that it draws in between */
        }
        /* a marker that is typed shows that the keys before it were taken */
        snprintf(mark, sizeof mark, "Q%02d", round);
        pty_send(&p, mark);
        if (!CHECK(pty_expect(&p, mark) && pty_expect(&p, "\033[?25h"), "round %d: no answer", round)) break;
        const struct vt *v = p.vt;
        int first = 0, r = v->r, c = v->c;
        for (int i = 0; i < v->rows; i++) sb_printf(&before, "%s\n", vt_row(v, i));
        pty_send(&p, "\14");
        if (!CHECK(pty_expect(&p, "\033[H\033[2J") && pty_expect(&p, "\033[?25h"), "round %d: no redraw", round)) break;
        for (int i = 0; i < v->rows; i++) sb_printf(&after, "%s\n", vt_row(v, i));
        first = r - v->r;
        const char *b = sb_cstr(&before);
        for (int i = 0; i < first && strchr(b, '\n'); i++) b = strchr(b, '\n') + 1;
        size_t n = strlen(b);
        if (!CHECK(first >= 0 && c == v->c && !strncmp(b, sb_cstr(&after), n),
                   "round %d, cursor %d,%d and %d,%d:\n%s---\n%s", round, r, c, v->r, v->c, sb_cstr(&before),
                   sb_cstr(&after)))
            round = 40;
        arrfree(before);
        arrfree(after);
    }
    pty_send(&p, "x\3");
    editor_end(&p);
}

/* ---- the screens of tests/golden/screen ---- */

enum { TERMINALS = 3 };

/* A file of tests/oracle/gen_screen.py, line by line. */
struct replay {
    struct vt_table table;
    struct pty p; /* its screen is that of the first terminal, */
    struct vt *other[TERMINALS - 1];
    size_t fed; /* up to where the others have its output */
    int sequences, row;
    bool open;
};

/* Undoes \xNN in place. Returns the length. */
static size_t replay_bytes(char *s) {
    size_t n = 0;
    for (const char *from = s; *from; n++) {
        unsigned byte = (uint8_t)*from;
        if (*from == '\\') sscanf(from, "\\x%2x", &byte), from += 3;
        s[n] = (char)byte;
        from++;
    }
    s[n] = 0;
    return n;
}

static void replay_start(struct replay *t, int rows, int cols) {
    t->open = pty_start(&t->p, rows, cols, "xterm", editor_sync_child, NULL, NULL);
    t->p.vt->table = &t->table;
    t->fed = 0;
    for (int i = 0; i < TERMINALS - 1; i++) {
        *t->other[i] = *t->p.vt;
        t->other[i]->terminal = i + 1;
    }
    t->open = t->open && EXPECT(&t->p, "\033[?25h");
    t->sequences++;
}

static const struct vt *replay_screen(const struct replay *t, int i) { return i ? t->other[i - 1] : t->p.vt; }

/* Types keys, and waits until the editor has drawn what they did. */
static bool replay_keys(struct replay *t, const char *s, size_t n) {
    pty_send_n(&t->p, s, n);
    pty_send(&t->p, "\t");
    const bool done = EXPECT(&t->p, SYNC) && EXPECT(&t->p, "\033[?25h");
    for (; t->fed < arrlenu(t->p.log); t->fed++)
        for (int i = 0; i < TERMINALS - 1; i++) vt_byte(t->other[i], t->p.log[t->fed]);
    return done;
}

static bool replay_row(struct replay *t, const char *want) {
    bool same = true;
    for (int i = 0; i < TERMINALS; i++) {
        const char *got = vt_row(replay_screen(t, i), t->row);
        same = same && CHECK(!strcmp(got, want), "sequence %d, terminal %d, row %d:\n    |%s|, expected\n    |%s|",
                             t->sequences, i, t->row, got, want);
    }
    t->row++;
    return same;
}

static bool replay_cursor(struct replay *t, const int at[static TERMINALS + 1]) {
    for (int i = 0; i < TERMINALS; i++) {
        const struct vt *v = replay_screen(t, i);
        if (!CHECK(v->r == at[0] && v->c == at[i + 1] && !v->pending,
                   "sequence %d, terminal %d: the cursor is at %d,%d, expected %d,%d", t->sequences, i, v->r, v->c,
                   at[0], at[i + 1]))
            return false;
    }
    return true;
}

/* Acts on a line. Returns false if something is not as expected. */
static bool replay_line(struct replay *t, char *line) {
    char *rest = line + strcspn(line, " ");
    int at[TERMINALS + 1];
    if (*line == '|') return replay_bytes(line), replay_row(t, line + 1);
    if (*rest) *rest++ = 0;
    if (!strcmp(line, "width")) {
        unsigned cp = 0;
        sscanf(rest, "%x %d %d", &cp, &at[0], &at[1]);
        hmputs(t->table.widths, ((__typeof__(*t->table.widths)){(utf8proc_int32_t)cp, {at[0], at[1]}}));
    } else if (!strcmp(line, "cluster")) {
        char *columns = strrchr(rest, ' ');
        *columns++ = 0;
        replay_bytes(rest);
        shput(t->table.clusters, rest, atoi(columns));
    } else if (!strcmp(line, "size")) {
        sscanf(rest, "%d %d", &at[0], &at[1]);
        replay_start(t, at[0], at[1]);
        return t->open;
    } else if (!strcmp(line, "line")) {
        replay_bytes(rest);
        return editor_line(&t->p, rest, rest);
    } else if (!strcmp(line, "keys")) {
        const size_t n = replay_bytes(rest);
        return replay_keys(t, rest, n);
    } else if (!strcmp(line, "cursor")) {
        sscanf(rest, "%d %d %d %d", &at[0], &at[1], &at[2], &at[3]);
        return replay_cursor(t, at);
    } else if (!strcmp(line, "screen")) {
        t->row = 0;
    } else if (!strcmp(line, "text")) {
        char want[8192];
        for (bool same = true; t->row < t->p.vt->rows; same = replay_row(t, ""))
            if (!same) return false;
        replay_bytes(rest);
        snprintf(want, sizeof want, "=%s\r\n", rest);
        if (!editor_line(&t->p, "", want)) return false;
        editor_end(&t->p);
        t->open = false;
    } else {
        return CHECK(*line == '#' || !*line, "%s", line);
    }
    return true;
}

/* Random keys, text of all kinds: the screens that an oracle works out for three terminals, which differ in the columns
 * that they give to the same text. */
static void test_repl_screen_random(void) {
    struct replay t = {.open = false};
    char *text = NULL, err[ERR_MAX];
    if (!CHECK(!read_file("tests/golden/screen/sequences.txt", &text, err), "%s", err)) return;
    arrput(text, 0);
    sh_new_strdup(t.table.clusters);
    for (int i = 0; i < TERMINALS - 1; i++) t.other[i] = xcalloc(1, sizeof *t.other[i]);
    bool fine = true;
    for (char *line = text, *end; fine && (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        fine = replay_line(&t, line);
    }
    if (t.open) kill(t.p.pid, SIGKILL);
    CHECK(!fine || t.sequences == 200, "%d sequences", t.sequences);
    for (int i = 0; i < TERMINALS - 1; i++) free(t.other[i]);
    hmfree(t.table.widths);
    shfree(t.table.clusters);
    arrfree(text);
}

/* Random bytes, in pieces of escape sequences and UTF-8: the invariants of the text hold after every key. */
static void test_repl_fuzz(void) {
    static const char *const pieces[] = {"\033[",     "\033O",
                                         "\033[200~", "\033[201~",
                                         "\033",      ";",
                                         "~",         "A",
                                         "B",         "D",
                                         "\xe6\x97",  "\xa5",
                                         "\xcc\x81",  "\xf0\x9f\x91\xa9\xe2\x80\x8d",
                                         "\"\"\"",    "\\",
                                         "\r",        "\n",
                                         "\022",      "\t",
                                         "/s",        "123456789\r1\r2\r3\r4\r5\r6\r7\r8\r9\r"};
    enum { PIECES = sizeof pieces / sizeof *pieces };
    pid_t pid = fork();
    int status = 0;
    if (!pid) {
        int fd = open("/dev/null", O_RDWR);
        struct editor e;
        uint64_t seed = 11;
        int bad = 0;
        setsid(); /* Ctrl-Z stops nobody */
        dup2(fd, 0), dup2(fd, 1);
        editor_init(&e, NULL);
        e.complete = editor_words;
        setenv("VISUAL", "true", 1);
        e.prompt = "> ", e.continuation = ". ";
        for (int round = 0; round < 400 && !bad; round++) {
            text_set(&e, "", 0);
            e.history_at = arrlenu(e.history);
            for (int i = 0; i < 100; i++) {
                uint64_t r = rng_next(&seed);
                const char *piece = pieces[r / 3 % PIECES];
                if (r % 3) sb_puts(&e.keys.in, piece);
                else arrput(e.keys.in, (char)(r / 3));
            }
            for (int key; (key = key_read(&e.keys)) != KEY_EOF && !bad;) {
                enum edit_result r = editor_key(&e, key);
                size_t n = arrlenu(e.text);
                if (r == EDIT_LINE) editor_history_add(&e, e.text, n);
                bad |=
                    e.cursor > n || !utf8_valid(e.text, n) || (n && (memchr(e.text, 0, n) || memchr(e.text, '\r', n)));
                for (int i = 0; i < arrlen(e.folds); i++) {
                    const struct fold *f = &e.folds[i];
                    bad |= f->at + f->len > n || (e.cursor > f->at && e.cursor < f->at + f->len) || !f->len;
                }
                editor_refresh(&e);
            }
        }
        editor_free(&e);
        _exit(bad);
    }
    CHECK(waitpid(pid, &status, 0) == pid && !status, "status %x", status);
}

static void test_repl_interrupt(void) {
    struct pty p;
    if (!editor_start(&p, 24, 80, NULL)) return;
    editor_line(&p, "gone\3kept", "=kept");
    pty_send(&p, "\3");
    editor_expect(&p, "=INT");
    editor_line(&p, "/he\t", "=/help "); /* one word: completed, with a blank */
    editor_line(&p, "/x\t\ty", "=/xy");
    pty_send(&p, "\033"); /* ESC alone, then silence, is no key */
    for (int left = 1; left && !p.ended; pty_pump(&p, 1)) ioctl(p.slave, FIONREAD, &left);
    poll(NULL, 0, 10 * ESCAPE_WAIT_MS); /* since the editor has read it */
    editor_line(&p, "[A", "=[A");
    kill(p.pid, SIGINT); /* a signal from elsewhere is a Ctrl-C */
    editor_expect(&p, "=INT");
    /* typed while nobody reads: Enter is Enter then too */
    pty_send(&p, "sleep\r");
    EXPECT(&p, "=sleep");
    pty_send(&p, "ahead\rpart");
    EXPECT(&p, "=ahead");
    pty_send(&p, "ial\r");
    editor_expect(&p, "=partial");
    editor_end(&p);
}

/* Types a line, then keys between the editor's look for type-ahead and its switch to raw mode. */
static void repl_late(struct pty *p, const char *keys) {
    pty_send(p, "switch\r");
    EXPECT(p, "=ready");
    pty_send(p, keys);
}

/* No key that is typed while the terminal's mode changes gets lost. */
static void test_repl_switch(void) {
    struct pty p;
    if (!editor_start(&p, 24, 80, NULL)) return;
    repl_late(&p, "one\rtwo\r");
    EXPECT(&p, "=one\r\n");
    editor_expect(&p, "=two\r\n");
    repl_late(&p, "gone\3kept\r"); /* Ctrl-C drops what is in front of it alone */
    EXPECT(&p, "=INT");
    editor_expect(&p, "=kept\r\n");
    repl_late(&p, "\4");
    EXPECT(&p, "=EOF");
    CHECK_INT(pty_end(&p), 7, "the exit code");
}

/* Whatever ends or stops the program, the terminal is cooked again; when it goes on, raw. */
static void test_repl_restore(void) {
    static const struct {
        int sig, rc;
    } t[] = {{SIGTERM, 128 + SIGTERM},
             {SIGHUP, 128 + SIGHUP},
             {SIGSEGV, 128 + SIGSEGV},
             {SIGABRT, 128 + SIGABRT},
             {SIGBUS, 1},
             {SIGFPE, 128 + SIGFPE},
             {SIGQUIT, 128 + SIGQUIT},
             {SIGUSR1, 128 + SIGUSR1},
             {SIGUSR2, 128 + SIGUSR2},
             {SIGALRM, 128 + SIGALRM},
             {SIGXCPU, 128 + SIGXCPU}};
    struct pty p;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        if (!editor_start(&p, 24, 80, NULL)) return;
        CHECK(!pty_mode_kept(&p), "not raw while it reads");
        kill(p.pid, t[i].sig);
        EXPECT(&p, "\033[?2004l");
        CHECK_INT(pty_end(&p), t[i].rc, "the exit code after signal %d", t[i].sig);
    }
    if (!editor_start(&p, 24, 80, NULL)) return;
    pty_send(&p, "crash\r");
    EXPECT(&p, "internal error: SIGSEGV");
    CHECK_INT(pty_end(&p), 128 + SIGSEGV, "the exit code");

    if (!editor_start(&p, 24, 80, NULL)) return;
    pty_send(&p, "busy\r");
    EXPECT(&p, "=busy");
    for (int i = 0; i < 40 && !p.ended; i++) { /* the first asks, the second ends */
        pty_send(&p, "\3");
        for (int k = 0; k < 5; k++) pty_pump(&p, 20);
    }
    CHECK_INT(pty_end(&p), EXIT_INTERRUPT, "the exit code");

    if (!editor_start(&p, 24, 80, NULL)) return;
    pty_send(&p, "half");
    EXPECT(&p, "half\r\033[6C\033[?25h");
    kill(p.pid, SIGSTOP); /* someone else changes the mode meanwhile */
    waitpid(p.pid, NULL, WUNTRACED);
    tcsetattr(p.slave, TCSANOW, &p.mode);
    kill(p.pid, SIGCONT);
    EXPECT(&p, "half\r\033[6C\033[?25h");
    CHECK(!pty_mode_kept(&p), "not raw again");
    pty_send(&p, "\r");
    editor_expect(&p, "=half");
    pty_send(&p, "\32more\r"); /* Ctrl-Z; here the child leads an orphaned group, so nothing stops */
    editor_expect(&p, "=more");
    editor_end(&p);
}

/* ---- terminals without an editor ---- */

static void editor_simple_child(const char *history) {
    setenv("NO_COLOR", "1", 1);
    term.simple = true;
    editor_serve(history, editor_words);
}

static const struct {
    const char *name, *terminal;
    void (*child)(const char *history);
} plain_terminals[] = {{"TERM=dumb", "dumb", editor_child},
                       {"without TERM", NULL, editor_child},
                       {"TERM empty", "", editor_child},
                       {"--simple-io", "xterm", editor_simple_child}};

enum { PLAIN_TERMINALS = sizeof plain_terminals / sizeof *plain_terminals };

static bool plain_start(struct pty *p, int i) {
    return pty_start(p, 24, 80, plain_terminals[i].terminal, plain_terminals[i].child, NULL, NULL) && EXPECT(p, "> ");
}

/* Ends the editor: nothing that it wrote is an escape sequence. */
static void plain_end(struct pty *p, int i) {
    pty_send(p, "\4");
    EXPECT(p, "=EOF");
    CHECK(!memchr(p->log, 27, arrlenu(p->log)), "%s: an escape sequence", plain_terminals[i].name);
    CHECK_INT(pty_end(p), 7, "the exit code");
}

static void test_repl_dumb(void) {
    for (int i = 0; i < PLAIN_TERMINALS; i++) {
        struct pty p;
        if (!plain_start(&p, i)) return;
        pty_send(&p, "plain \xc3\xbc\xff\n");
        EXPECT(&p, "plain \xc3\xbc\xef\xbf\xbd\r\n=plain \xc3\xbc\xef\xbf\xbd\r\n"); /* the echo, and what was read */
        pty_send(&p, "one\\\n");
        EXPECT(&p, ". ");
        pty_send(&p, "two\n");
        EXPECT(&p, "=one\\x0atwo");
        pty_send(&p, "\"\"\"\na\\\n\nb\"\"\"\n");
        EXPECT(&p, "=a\\\\x0a\\x0ab");
        EXPECT(&p, "> ");
        pty_send(&p, "half\3");
        EXPECT(&p, "half^C\r\n=INT");
        EXPECT(&p, "> "); /* a signal between two lines is nobody's */
        kill(p.pid, SIGINT);
        EXPECT(&p, "=INT");
        pty_send(&p, "\32more\r"); /* Ctrl-Z; the child leads an orphaned group, so nothing stops */
        EXPECT(&p, "=more");
        plain_end(&p, i);
    }
}

/* Lines that are longer than a terminal's own, of bytes and of characters that lie across its limit, come whole, whoever
 * ends them with what. */
static void test_repl_dumb_long(void) {
    static const struct {
        const char *unit;
        int n;
    } t[] = {{"x", 1000},
             {"x", 4093},
             {"x", 4096},
             {"ab", 2100},
             {"\xc3\xa9", 2100},
             {"\xe6\x97\xa5", 1400},
             {"0123456 \xf0\x9f\x91\x8d", 5834}};
    static const char *const ends[] = {"\r", "\n", "\r\n"};
    for (int i = 0; i < PLAIN_TERMINALS; i++) {
        struct pty p;
        if (!plain_start(&p, i)) return;
        for (size_t k = 0; k < sizeof t / sizeof *t; k++) {
            char *line = NULL, *want = NULL;
            sb_puts(&line, k & 1 ? "a" : "");
            for (int j = 0; j < t[k].n; j++) sb_puts(&line, t[k].unit);
            sb_printf(&want, "=%sEND\r\n", sb_cstr(&line));
            sb_puts(&line, "END");
            sb_puts(&line, ends[k % 3]);
            pty_send_n(&p, line, arrlenu(line));
            CHECK(pty_expect(&p, sb_cstr(&want)), "%s: a line of %td bytes is not whole", plain_terminals[i].name,
                  arrlen(line));
            arrfree(line);
            arrfree(want);
        }
        plain_end(&p, i);
    }
}

/* Who types may read nothing before all is typed, and the next lines wait. */
static void test_repl_dumb_blind(void) {
    struct pty p;
    char *line = NULL;
    if (!plain_start(&p, 0)) return;
    for (int i = 0; i < 30000; i++) sb_puts(&line, "0123456789");
    sb_puts(&line, "END\rnext\rlast\r");
    fcntl(p.master, F_SETFL, O_NONBLOCK);
    const double end = now_seconds() + PTY_SECONDS;
    for (size_t at = 0; at < arrlenu(line);) {
        struct pollfd f = {.fd = p.master, .events = POLLOUT};
        const ssize_t n = poll(&f, 1, 100) > 0 ? write(p.master, line + at, arrlenu(line) - at) : 0;
        if (n > 0) at += (size_t)n;
        if (!CHECK(now_seconds() < end, "only %zu of %zu bytes are taken", at, arrlenu(line))) break;
    }
    EXPECT(&p, "789END\r\n=0123456789");
    EXPECT(&p, "789END\r\n");
    EXPECT(&p, "next\r\n=next");
    EXPECT(&p, "last\r\n=last");
    plain_end(&p, 0);
    arrfree(line);
}

/* The control characters that work where a terminal edits its lines itself. */
static void test_repl_dumb_keys(void) {
    static const char *const t[][2] = {
        {"abc\177d", "abd"},
        {"abc\10\10\10\10d", "d"},
        {"gr\xc3\xbc\xc3\x9f\177\177x", "grx"}, /* whole characters, with the marks on them */
        {"\xe6\x97\xa5\xe6\x9c\xac\177!", "\xe6\x97\xa5!"},
        {"ae\xcc\x81\177z", "az"},
        {"a\xff\xc3\177\177b", "ab"},
        {"one two  \027three", "one three"},
        {"gone\025kept", "kept"},
        {"\001\t\033[A", "\\x01\\x09\\x1b[A"}, /* others are text */
        {"cut\4 by\4 an old Emacs", "cut by an old Emacs"},
        {"twice\4\4", "twice"}, /* nothing was typed in between: the text ends, without Enter */
    };
    enum { N = sizeof t / sizeof *t };
    struct pty p;
    char want[128];
    if (!plain_start(&p, 0)) return;
    for (size_t i = 0; i < N; i++) {
        snprintf(want, sizeof want, "=%s\r\n", t[i][1]);
        pty_send(&p, t[i][0]);
        if (i + 1 < N) pty_send(&p, "\r");
        EXPECT(&p, want);
    }
    pty_send(&p, "x\r");
    EXPECT(&p, "=x");
    SCREEN(&p, p.vt->r, p.vt->r, 2, ">");
    pty_send(&p, "\14ab \xe6\x97\xa5\t\1\xc3\xbc|");
    EXPECT(&p, "|");
    pty_send(&p, "\177\177\177\177\177");
    SCREEN(&p, p.vt->r, p.vt->r, 7, "> ^Lab"); /* what is erased is gone from the screen */
    pty_send(&p, "\025\3");
    EXPECT(&p, "^U\r\n> ^C\r\n=INT");
    EXPECT(&p, "> ");
    CHECK(!pty_mode_kept(&p), "the terminal edits its lines itself");
    plain_end(&p, 0);
}

/* A terminal as Emacs makes it: no echo, no character that erases. */
static void emacs_mode(struct termios *t) {
    t->c_lflag &= ~(tcflag_t)ECHO;
    t->c_oflag &= ~(tcflag_t)ONLCR;
    t->c_cc[VERASE] = t->c_cc[VKILL] = _POSIX_VDISABLE;
}

static void editor_emacs_child(const char *history) {
    struct termios t;
    tcgetattr(0, &t);
    emacs_mode(&t);
    tcsetattr(0, TCSANOW, &t);
    editor_child(history);
}

static void test_repl_dumb_emacs(void) {
    struct pty p;
    if (!pty_start(&p, 24, 80, "dumb", editor_emacs_child, NULL, NULL) || !EXPECT(&p, "> ")) return;
    emacs_mode(&p.mode);
    const size_t from = p.log_at;
    pty_send(&p, "a\177b\025c\n");
    EXPECT(&p, "=a\\x7fb\\x15c\n> ");
    CHECK(p.log_at - from == strlen("=a\\x7fb\\x15c\n> "), "something is echoed: %.*s", (int)(p.log_at - from),
          p.log + from);
    plain_end(&p, 0);
}

/* The child: reads only when the terminal has all the bytes that it holds. */
static void editor_held_child(const char *history) {
    int n = 0;
    term_init();
    term_hold();
    write_all(1, "=held\n", 6);
    while (n < 4000 && !ioctl(0, FIONREAD, &n)) poll(NULL, 0, 1);
    kill(0, SIGTSTP); /* nothing stops: the group is orphaned. The terminal is held all the same */
    editor_child(history);
}

/* What is typed before the chat opens is not cut off, and Enter is Enter. */
static void test_repl_held(void) {
    static const char *const terminals[] = {"dumb", "xterm"};
    for (int i = 0; i < 2; i++) {
        struct pty p;
        char *line = NULL, *want = NULL;
        if (!pty_start(&p, 24, 80, terminals[i], editor_held_child, NULL, NULL) || !EXPECT(&p, "=held")) return;
        for (int k = 0; k < 600; k++) sb_puts(&line, "0123456789");
        sb_printf(&want, "=%sEND\r\n", sb_cstr(&line));
        sb_puts(&line, "END\rnext\r");
        pty_send_n(&p, line, arrlenu(line));
        CHECK(pty_expect(&p, sb_cstr(&want)), "%s: the line is not whole", terminals[i]);
        EXPECT(&p, "=next");
        arrfree(line);
        arrfree(want);
        pty_send(&p, "\4");
        EXPECT(&p, "=EOF");
        CHECK_INT(pty_end(&p), 7, "the exit code");
    }
}

/* ---- the whole program ---- */

static char *moe_argv[] = {MOE_BIN, "-m", "build/demo.gguf", "--greedy", NULL};

#define NEED_MOE() \
    if (access(MOE_BIN, X_OK) || access("build/demo.gguf", R_OK)) SKIP("no " MOE_BIN " or build/demo.gguf")

enum { WIDE = VT_COLS }; /* in so many columns messages with a path do not wrap */

/* Opens the chat on a terminal and waits for its prompt. */
static bool moe_start_in(struct pty *p, int cols, const char *terminal, char **argv) {
    return pty_start(p, 24, cols, terminal, NULL, NULL, argv) &&
           EXPECT(p, strcmp(terminal, "dumb") ? "\033[?2004h" : "> ");
}

static bool moe_start(struct pty *p, const char *terminal, char **argv) { return moe_start_in(p, 80, terminal, argv); }

static void moe_ask(struct pty *p, const char *line, const char *answer) {
    pty_send(p, line);
    pty_send(p, "\r");
    EXPECT(p, "\033[?25h\r\r\n"); /* the editor leaves the line */
    EXPECT(p, answer);
    EXPECT(p, "\033[?2004h"); /* the editor reads again */
}

static void moe_end(struct pty *p) {
    pty_send(p, "\4");
    CHECK_INT(pty_end(p), 0, "the exit code");
}

/* /stats where not all experts are in memory. */
static void test_moe_experts(void) {
    NEED_MOE();
    struct pty p;
    char *argv[] = {MOE_BIN, "--cpu", "-m", "build/demo.gguf", "--greedy", "--expert-memory", "5", NULL};
    if (!moe_start(&p, "xterm", argv)) return;
    moe_ask(&p, "/stats", "no turn yet");
    moe_ask(&p, "What is 7 squared? One word.", "49");
    moe_ask(&p, "/stats", "a token were read");
    moe_ask(&p, "/stats", "missed most since the start: ");
    moe_end(&p);
}

static void test_moe_dialogue(void) {
    NEED_MOE();
    struct pty p;
    if (!moe_start(&p, "xterm", moe_argv)) return;
    moe_ask(&p, "What is 7 squared? One word.", "49");
    moe_ask(&p, "/regen", "49");
    moe_ask(&p, "/undo", "removed");
    moe_ask(&p, "/ctx", "] 0 of");
    moe_ask(&p, "/undo", "");
    moe_ask(&p, "/regen", "");
    moe_ask(&p, "/help", "/quit");
    moe_ask(&p, "/help re", "is ambiguous: /read, /regen");
    moe_ask(&p, "/sq", "unknown command /sq");
    moe_ask(&p, "/hlep", "unknown command /hlep: did you mean /help?");
    moe_ask(&p, "/new", "unknown command /new: did you mean /clear?");
    moe_ask(&p, "/SET seed", "seed");
    moe_ask(&p, "/set temperature=0.5", "temp             0.5");
    moe_ask(&p, "/set n 7", "predict          7");
    moe_ask(&p, "/set sed 1", "unknown option 'sed': did you mean seed?");
    moe_ask(&p, "/set predict -1", "predict          -1");
    size_t from = p.log_at;
    moe_ask(&p, "//sq what is this?", "");
    CHECK(!memmem(p.log + from, arrlenu(p.log) - from, "unknown command", 15), "// does not send a slash");
    moe_ask(&p, "/undo", "removed");
    moe_ask(&p, "/s", "is ambiguous: /set, /show, /system, /save, /stats");
    moe_ask(&p, "/save", "usage: /save NAME");
    moe_ask(&p, "/clear now", "/clear takes no argument");
    moe_ask(&p, "/set", "temp");
    moe_ask(&p, "/set no-such-option 1", "unknown option 'no-such-option'");
    moe_ask(&p, "/set no-such-option", "unknown option 'no-such-option'");
    moe_ask(&p, "/set kv bf16", "can only be set on the command line");
    moe_ask(&p, "/set system x", "/system changes the message");
    moe_ask(&p, "/set top-k 7", "top-k            7       sample from the K most likely tokens\r");
    moe_ask(&p, "/show perhaps", "perhaps");
    moe_ask(&p, "/show", "[no messages]");
    moe_ask(&p, "/system Be brief.", "system message set");
    moe_ask(&p, "/system", "Be brief.");
    moe_ask(&p, "/system \"\"", "removed");
    moe_ask(&p, "/system", "no system message");
    moe_ask(&p, "/ctx", "");
    moe_ask(&p, "/st", "");
    pty_send(&p, "\3");
    EXPECT(&p, "Ctrl-D or /quit to exit");
    pty_send(&p, "/q\r");
    CHECK_INT(pty_end(&p), 0, "the exit code");
}

static void test_moe_complete(void) {
    NEED_MOE();
    struct pty p;
    char path[512];
    static const char *const names[] = {"tab.txt",
                                        "two words 1.txt",
                                        "two words 2.txt",
                                        "a dir/leaf.txt",
                                        ".moe/story.jsonl",
                                        ".moe/a tale.jsonl",
                                        ".moe/story.kv",
                                        "esc\033[2J.txt",
                                        "q1",
                                        "q2"};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", test_dir(), i ? ".moe" : "a dir");
        mkdir(path, 0700);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", test_dir(), names[i]);
        write_test_file(path, "{\"moe\":1}\n", 10);
    }
    static const char *const t[][2] = {
        {"/read ~/ta\t", "/read ~/tab.txt "},
        {"/rea ~/two\t", "/rea \"~/two words "}, /* a beginning of a command's name will do */
        {"/read \"~/two words 1\t", "/read \"~/two words 1.txt\" "},
        {"/read ~/a\tle\t", "/read \"~/a dir/leaf.txt\" "},
        {"/read ~/es\t", "/read ~/es"},
        {"/read ~/tab.txt ta\t", "/read ~/tab.txt ta"},
        {"/load st\t", "/load story "},
        {"/save a\t", "/save a tale "},
        {"/set show\ton\t", "/set show-think on "},
        {"/set gr\tof\t", "/set greedy off "},
        {"/set kv\t", "/set kv"},
        {"/think me\t", "/think medium "},
        {"/delete st\t", "/delete story "},
        {"/help und\t", "/help undo "},
        {"//he\t", "//he"},
        {"he\t", "he"},
        {"/cl\t", "/clear "},
    };
    if (!moe_start(&p, "xterm", moe_argv)) return;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char row[128], typed[128];
        snprintf(row, sizeof row, "> %s|", t[i][1]);
        snprintf(typed, sizeof typed, "x\3\14%s|", t[i][0]);
        pty_send(&p, typed);
        if (!SCREEN(&p, 0, 0, (int)strlen(row), row, "")) break;
    }
    pty_send(&p, "x\3\14/read ~/q\t");
    SCREEN(&p, 0, 2, 11, "> /read ~/q", "q1  q2", "> /read ~/q", "");
    pty_send(&p, "\3");
    moe_end(&p);
}

/* The user's editor: in the line, and for a message. */
static void test_moe_editor(void) {
    NEED_MOE();
    struct pty p;
    char script[400], path[512], *data = NULL, err[ERR_MAX];
    static const char code[] = "#!/bin/sh\ngrep -q fail $1 && echo ' more' >> $1 && exit 3\n"
                               "grep -q quit $1 && exit 1\necho 'One word.' >> $1\n";
    snprintf(script, sizeof script, "%s/editor.sh", test_dir());
    write_test_file(script, code, sizeof code - 1);
    snprintf(path, sizeof path, "sh %s", script);
    setenv("VISUAL", path, 1);
    setenv("EDITOR", "false", 1);
    bool started = moe_start(&p, "xterm", moe_argv);
    unsetenv("VISUAL");
    unsetenv("EDITOR");
    if (!started) return;
    pty_send(&p, "\14What is 7 squared? \030\005");
    SCREEN(&p, 0, 1, 30, "> What is 7 squared?", "> What is 7 squared? One word.");
    pty_send(&p, "\037|");
    SCREEN(&p, 0, 1, 22, "> What is 7 squared?", "> What is 7 squared? |"); /* a step of undo */
    pty_send(&p, "\3\14one quit\2\030\005");
    EXPECT(&p, "failed with status 1\033");
    pty_send(&p, "|");
    EXPECT(&p, "> \033[0mone qui|t");
    pty_send(&p, "\3");
    moe_ask(&p, "/edit What is 7 squared?", "> What is 7 squared?One word.\r\n");
    EXPECT(&p, "49");
    moe_ask(&p, "/edit! x", "/edit! takes no argument");
    moe_ask(&p, "/edit!", "> What is 7 squared?One word.One word.\r\n");
    moe_ask(&p, "/ctx", "assistant");
    moe_ask(&p, "/undo", "[last turn removed]");
    moe_ask(&p, "/edit!", "there is no message to edit"); /* the question had been replaced */
    pty_send(&p, "/edit this must fail\r");
    EXPECT(&p, "the text is kept in /tmp/moe-");
    EXPECT(&p, ".md: ");
    snprintf(path, sizeof path, "/tmp/moe-%.6s.md", p.log + p.log_at - 11);
    EXPECT(&p, "failed with status 3");
    EXPECT(&p, "\033[?2004h");
    CHECK(!read_file(path, &data, err) && !strcmp(sb_cstr(&data), "this must fail more\n"), "%s: %s", path, data);
    unlink(path);
    arrfree(data);
    moe_end(&p);
}

static void test_moe_files(void) {
    NEED_MOE();
    struct pty p;
    char line[512], good[300], bad[300];
    snprintf(good, sizeof good, "%s", repl_scratch("question.txt"));
    write_test_file(good, "What is 7 squared? One word.\n", 29);
    snprintf(bad, sizeof bad, "%s", repl_scratch("latin1.txt"));
    write_test_file(bad, "caf\xe9\n", 5);
    unsetenv("VISUAL");
    setenv("EDITOR", "sh -c 'stty raw -echo; printf \"What is 7 squared?\\r\\nOne word.\\r\\n\" > \"$0\"'", 1);
    bool started = moe_start_in(&p, WIDE, "xterm", moe_argv);
    unsetenv("EDITOR");
    if (!started) return;
    snprintf(line, sizeof line, "/read %s", bad);
    moe_ask(&p, line, "is not UTF-8 at byte 3");
    moe_ask(&p, "/read /nonexistent", "cannot open '/nonexistent'");
    moe_ask(&p, "/read /tmp", "not a regular file");
    snprintf(line, sizeof line, "/read %s Answer the question in the file.", good);
    moe_ask(&p, line, "29 bytes");
    moe_ask(&p, "/clear", "conversation cleared");
    moe_ask(&p, "/edit", "49");
    moe_ask(&p, "/save kept", "[saved ");
    moe_ask(&p, "/clear", "conversation cleared");
    moe_ask(&p, "/ctx", "] 0 of");
    moe_ask(&p, "/save empty", "[saved ");
    moe_ask(&p, "/regen", "");
    moe_ask(&p, "/load kept", "[loaded 2 messages]");
    moe_ask(&p, "/regen", "49");
    moe_ask(&p, "/list", "kept");
    moe_ask(&p, "/load no-such-session", "no-such-session");
    moe_ask(&p, "/save ~/home.jsonl", "[saved ");
    moe_ask(&p, "/load home.jsonl", "there is no conversation 'home.jsonl'");
    moe_ask(&p, "/load ~/home", "[loaded 2 messages]");
    struct stat st;
    char *data = NULL, err[ERR_MAX];
    static const char asked[] = "{\"moe\":1}\n{\"role\":\"user\",\"content\":\"What is 7 squared? One word.\"}\n";
    snprintf(line, sizeof line, "%s/.moe/asked.jsonl", test_dir());
    write_test_file(line, asked, sizeof asked - 1);
    moe_ask(&p, "/load asked.jsonl", "[loaded 1 message; /regen answers the last]");
    moe_ask(&p, "/regen", "49");
    snprintf(line, sizeof line, "%s/.moe/pipe.jsonl", test_dir());
    CHECK(!mkfifo(line, 0600), "%s", strerror(errno));
    moe_ask(&p, "/load pipe", "is not a regular file");
    moe_end(&p);
    snprintf(line, sizeof line, "%s/.moe/empty.kv", test_dir());
    const size_t cache = 2 * 7; /* of the demo model's layers: without tokens they have no rows */
    CHECK(!stat(line, &st) && (size_t)st.st_size == sizeof(struct kv_header) + cache * sizeof(struct kv_tensor),
          "%lld bytes", (long long)st.st_size);
    snprintf(line, sizeof line, "%s/.moe_history", test_dir());
    CHECK(!read_file(line, &data, err) && strstr(sb_cstr(&data), "\nWhat is 7 squared?\rOne word.\n"), "%s", data);
    arrfree(data);
}

/* A temperature at which every token is as likely as the end, so that an answer takes its time. */
#define ENDLESS "--temp", "50", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "1", "-n", "20000"

/* The same seed gives the same answer, once more in the same run. */
static void test_moe_seed(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN, "-m", "build/demo.gguf", "--temp", "5", "--top-k", "0", "-n", "12", "-v", NULL};
    struct pty p;
    char *hash[3] = {NULL};
    if (!moe_start(&p, "xterm", argv)) return;
    for (int i = 0; i < 3; i++) {
        if (i != 1) moe_ask(&p, "/set seed 7", "");
        size_t from = p.log_at;
        moe_ask(&p, i ? "/regen" : "Tell me a story.", "logits #");
        char *at = memmem(p.log + from, arrlenu(p.log) - from, "logits #", 8);
        hash[i] = at ? xstrndup(at, 16) : xstrdup("");
    }
    CHECK(!strcmp(hash[0], hash[2]) && strcmp(hash[0], hash[1]), "%s, %s, %s", hash[0], hash[1], hash[2]);
    for (int i = 0; i < 3; i++) free(hash[i]);
    moe_end(&p);
}

/* Ctrl-C keeps the program: in an answer what there is of it, in the prompt nothing of the turn; then it answers again.
 * */
static void test_moe_interrupt(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN, "-m", "build/demo.gguf", ENDLESS, NULL};
    struct pty p;
    if (!moe_start(&p, "xterm", argv)) return;
    pty_send(&p, "Tell me a story.\r");
    EXPECT(&p, "\033[?25h\r\r\n");
    EXPECT(&p, "\033[2m"); /* it thinks */
    pty_send(&p, "\3");
    EXPECT(&p, "[stopped");
    EXPECT(&p, "\033[?2004h");
    moe_ask(&p, "/undo", "removed");
    pty_send(&p, "\033[200~");
    for (int i = 0; i < 4000; i++) pty_send(&p, "All work and no play makes Jack a dull boy.\r");
    pty_send(&p, "\033[201~\r");
    EXPECT(&p, "[pasted 4000 lines]");
    EXPECT(&p, "\033[?25h\r\r\n");
    pty_send(&p, "\3");
    EXPECT(&p, "message was removed");
    EXPECT(&p, "\033[?2004h");
    moe_ask(&p, "/undo", "");
    moe_ask(&p, "/set temp 0", "");
    moe_ask(&p, "What is 7 squared? One word.", "49");
    CHECK(!memmem(p.log, arrlenu(p.log), "/quit to exit", 13), "the Ctrl-C reached the prompt as well");
    moe_end(&p);
}

/* What is typed and pasted during an answer is not echoed into it: it waits, a paste as one message. Ctrl-C is a key, of
 * which no other program hears. */
static void test_moe_typeahead(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN, "-m", "build/demo.gguf", ENDLESS, NULL};
    struct pty p;
    if (!moe_start(&p, "xterm", argv)) return;
    pty_send(&p, "Tell me a story.\r");
    EXPECT(&p, "\033[?25h\r\r\n");
    EXPECT(&p, "\033[2m"); /* it thinks */
    CHECK(!pty_mode_kept(&p), "the terminal is not raw during an answer");
    pty_send(&p, PASTE("line one\rline \3two\rline three"));
    pty_send(&p, " typed\3");
    size_t from = p.log_at;
    EXPECT(&p, "[stopped");
    CHECK(!memmem(p.log + from, p.log_at - from, "line one", 8), "the paste is echoed into the answer");
    EXPECT(&p, "\033[?2004h");
    EXPECT(&p, "line one\r\r\n");
    EXPECT(&p, "line three typed");
    pty_send(&p, "\3"); /* drops the text */
    EXPECT(&p, "> \033[0m");
    moe_end(&p);
}

/* /ctx: up, down, too small, too large, and no number; the conversation stays in the cache. */
static void test_moe_context(void) {
    NEED_MOE();
    struct pty p;
    if (!moe_start(&p, "xterm", moe_argv)) return;
    moe_ask(&p, "/ctx 64", "[context 64 tokens, cache 0.");
    moe_ask(&p, "What is 7 squared? One word.", "49");
    moe_ask(&p, "/ctx 20", "a context of 20 tokens is too small: the conversation takes ");
    moe_ask(&p, "What is the capital of France, and which river flows through it?", "/ctx N for more tokens");
    moe_ask(&p, "/ctx 4096", "; the conversation is still in it]");
    moe_ask(&p, "And 8 squared?", "prompt ");
    moe_ask(&p, "/regen", "prompt 1 at");
    moe_ask(&p, "/ctx 200000000", "a context of 200,000,000 tokens does not fit, and that of 4,096 stays: ");
    moe_ask(&p, "/ctx much", "much");
    moe_ask(&p, "/ctx -1", "-1");
    moe_ask(&p, "/set ctx 70000", "is beyond the 65536 that the model was trained for");
    moe_ask(&p, "/set ctx", "70000");
    moe_ask(&p, "/ctx 0", "[context 65,536 tokens");
    moe_ask(&p, "/ctx", " of 65,536 tokens");
    moe_ask(&p, "/clear", "cleared");
    moe_ask(&p, "What is 7 squared? One word.", "49");
    moe_end(&p);
}

/* Notes on a terminal are broken between words. */
static void test_note_rows(void) {
    static const struct {
        const char *text, *want;
    } t[] = {{"", ""},
             {"one two", "one two"},
             {"one two three", "one two\nthree"},
             {"  indented by two", "  indented\nby two"},
             {"a longer-than-ten word", "a\nlonger-than-ten\nword"},
             {"exactly te n", "exactly te\nn"},
             {"\303\251\303\251\303\251\303\251\303\251 \303\251\303\251\303\251\303\251 x",
              "\303\251\303\251\303\251\303\251\303\251 \303\251\303\251\303\251\303\251\nx"},
             {"first\nsecond line of it\n\n", "first\nsecond\nline of it\n\n"}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char *got = NULL;
        rows_put(&got, t[i].text, 10);
        CHECK_STR(sb_cstr(&got), t[i].want, "'%s'", t[i].text);
        arrfree(got);
    }
}

/* Ctrl-T ends the thinking of an answer, on any terminal, and is no key of the next prompt. */
static void test_moe_answer_now(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN, "-m", "build/demo.gguf", ENDLESS, "--show-think", "off", NULL};
    for (int i = 0; i < 4; i++) {
        const bool dumb = i & 1, ahead = i & 2; /* the key comes with the line that begins the turn */
        struct pty p;
        if (!moe_start(&p, dumb ? "dumb" : "xterm", argv)) return;
        pty_send(&p, ahead ? "Tell me a story.\r/system ab\24c" : "Tell me a story.\r");
        if (dumb) EXPECT(&p, "Tell me a story.\r\n");
        else if (!ahead) EXPECT(&p, "  Ctrl-T: answer");
        if (!ahead) {
            pty_send(&p, "/system ab\24");
            if (!dumb) EXPECT(&p, "\r\033[K"); /* the line of progress is gone */
            pty_send(&p, "\24c");
        }
        EXPECT(&p, "u"); /* of the answer: the line of progress has none */
        pty_send(&p, "\3");
        EXPECT(&p, "[thinking ended after ");
        EXPECT(&p, "(Ctrl-T)]");
        EXPECT(&p, "/system abc");
        pty_send(&p, "\25/system abc\r"); /* an answer that had ended by itself left Ctrl-C to the line */
        EXPECT(&p, "[system message set]");
        EXPECT(&p, dumb ? "> " : "\033[?2004h");
        moe_end(&p);
    }
}

/* Names of conversations, what is shown of them, and what a slash means. */
static void test_moe_conversations(void) {
    NEED_MOE();
    struct pty p;
    char path[PATH_MAX], *data = NULL, err[ERR_MAX];
    if (!moe_start_in(&p, WIDE, "xterm", moe_argv)) return;
    moe_ask(&p, "What is 7 squared? One word.", "49");
    moe_ask(&p, "/continue", "no answer was stopped");
    moe_ask(&p, "/ctx", "of them from the cache");
    CHECK(memmem(p.log, arrlenu(p.log), "assistant ", 10), "no tokens of the answer");
    moe_ask(&p, "/save one", "[saved 2 messages to ");
    moe_ask(&p, "/save one", "[saved 2 messages to ");
    moe_ask(&p, "/clear", "conversation cleared");
    moe_ask(&p, "/usr/bin/ld: cannot find -lfoo", " | context");
    moe_ask(&p, PASTE("// main.c\rint x;"), " | context");
    moe_ask(&p, "/save one", "'one' is another conversation: /save! one replaces it");
    moe_ask(&p, "/save! one", "[saved 4 messages to ");
    moe_ask(&p, "/set! temp 1", "there is no /set!, only /set");
    moe_ask(&p, "/rename two", "[renamed one to two]");
    moe_ask(&p, "/show 2", "// main.c");
    snprintf(path, sizeof path, "%s/.moe/two.jsonl", test_dir());
    CHECK(!read_file(path, &data, err) && strstr(sb_cstr(&data), "\"// main.c\\nint x;\""), "%s", sb_cstr(&data));
    CHECK(strstr(sb_cstr(&data), "\"/usr/bin/ld: cannot"), "%s", sb_cstr(&data));
    arrfree(data);
    snprintf(path, sizeof path, "/export %s/two.md", test_dir());
    moe_ask(&p, path, "[wrote 4 messages to ");
    moe_ask(&p, path, "exists: /export! replaces it");
    CHECK(!read_file(path + strlen("/export "), &data, err) && strstr(sb_cstr(&data), "## User\n\n// main.c\nint x;\n"),
          "%s", sb_cstr(&data));
    arrfree(data);
    moe_ask(&p, "/copy", "\033]52;c;");
    moe_ask(&p, "/delete two", "[deleted two]");
    moe_ask(&p, "/load two", "there is no conversation 'two'");
    moe_ask(&p, "exit", "type /exit for the command");
    pty_send(&p, "/exit\r");
    CHECK_INT(pty_end(&p), 0, "the exit code");
}

/* What a killed program answered is there again, and its state, too. An answer that -n cut goes on. */
static void test_moe_resume(void) {
    NEED_MOE();
    static char *again[] = {MOE_BIN, "-m", "build/demo.gguf", "--greedy", "--continue", NULL};
    static char *named[] = {MOE_BIN, "-m", "build/demo.gguf", "--load", "no-such-name", NULL};
    struct pty p;
    if (!moe_start(&p, "xterm", moe_argv)) return;
    for (int i = 0; i < 9; i++) moe_ask(&p, "What is 7 squared? One word.", " tok/s");
    moe_ask(&p, "/set temp 50", "");
    moe_ask(&p, "/set top-k 0", "");
    moe_ask(&p, "/set top-p 1", "");
    pty_send(&p, "Tell me a story.\r");
    EXPECT(&p, "\033[?25h\r\r\n");
    EXPECT(&p, "\033[2m"); /* it thinks */
    kill(p.pid, SIGKILL);
    tcsetattr(p.slave, TCSANOW, &p.mode); /* it could not do that */
    pty_end(&p);
    if (!moe_start(&p, "xterm", again)) return;
    CHECK(memmem(p.log, arrlenu(p.log), "[loaded 18 messages]", 20), "%.*s", (int)arrlen(p.log), p.log);
    CHECK(!memmem(p.log, arrlenu(p.log), "processes the conversation again", 32), "the state is not there");
    moe_ask(&p, "/set predict 5", "");
    moe_ask(&p, "What is 7 squared? One word.", "[stopped after 5 tokens (-n)");
    const char *line = memmem(p.log, arrlenu(p.log), "prompt ", 7);
    CHECK(line && atoi(line + 7) < 60, "the state is not used: %.20s", line ? line : "");
    moe_ask(&p, "/set predict 20", "");
    moe_ask(&p, "/continue", " tok/s");
    moe_ask(&p, "/clear", "conversation cleared"); /* which leaves the last one as it is */
    moe_end(&p);
    if (!moe_start(&p, "xterm", again)) return;
    CHECK(memmem(p.log, arrlenu(p.log), "[loaded 20 messages]", 20), "%.*s", (int)arrlen(p.log), p.log);
    moe_end(&p);
    if (pty_start(&p, 24, 80, "xterm", NULL, NULL, named)) CHECK_INT(pty_end(&p), 1, "the exit code");
}

static void test_moe_terminate(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN, "-m", "build/demo.gguf", ENDLESS, NULL};
    struct pty p;
    for (int answering = 0; answering < 2; answering++) {
        if (!moe_start(&p, "xterm", argv)) return;
        if (answering) {
            pty_send(&p, "Tell me a story.\r");
            EXPECT(&p, "\033[?25h\r\r\n");
            EXPECT(&p, "\033[2m"); /* it thinks */
        }
        kill(p.pid, SIGTERM);
        CHECK_INT(pty_end(&p), 128 + SIGTERM, "the exit code");
    }
}

/* Ctrl-C ends the answers to lines, and then the program. */
static void test_moe_lines(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN,        "-m", "build/demo.gguf", "--lines", "--parallel", "3",
                           "--show-think", "on", ENDLESS,           NULL};
    struct pty p;
    if (!pty_start(&p, 24, 80, "xterm", NULL, NULL, argv)) return;
    EXPECT(&p, "3 prompts at a time");
    for (int i = 0; i < 3; i++) pty_send(&p, "Tell me a story.\n");
    for (int i = 0; i < 3; i++) EXPECT(&p, "Tell me a story."); /* the terminal's echo */
    EXPECT(&p, "\033[2m");                                      /* it thinks */
    pty_send(&p, "\3");
    EXPECT(&p, "[stopped");
    CHECK_INT(pty_end(&p), 130, "the exit code");
}

/* stdout is a file, the rest a terminal: the file holds the answer and nothing else. */
static void test_moe_redirected(void) {
    NEED_MOE();
    struct pty p;
    const char *path = repl_scratch("answer");
    char command[512], *data = NULL, err[ERR_MAX];
    char *argv[] = {"/bin/sh", "-c", command, NULL};
    snprintf(command, sizeof command, "exec " MOE_BIN " -m build/demo.gguf --greedy > %s", path);
    if (!pty_start(&p, 24, 80, "xterm", NULL, NULL, argv)) return;
    EXPECT(&p, "> ");
    pty_send(&p, "/help\n");
    EXPECT(&p, "/quit");
    EXPECT(&p, "\n> ");
    pty_send(&p, "What is 7 squared? One word.\n");
    EXPECT(&p, "\n> ");
    moe_end(&p);
    read_file(path, &data, err);
    CHECK(arrlen(data) && strstr(sb_cstr(&data), "49") && arrlen(data) < 16 && !memchr(data, 27, arrlenu(data)),
          "\"%s\"", sb_cstr(&data));
    arrfree(data);
}

/* Answers that cannot be written: said once, in the dialogue. */
static void test_moe_full(void) {
    NEED_MOE();
    if (access("/dev/full", W_OK)) SKIP("there is no /dev/full");
    struct pty p;
    char *argv[] = {"/bin/sh", "-c", "exec " MOE_BIN " -m build/demo.gguf --greedy -n 4 >/dev/full", NULL};
    if (!pty_start(&p, 24, 80, "xterm", NULL, NULL, argv)) return;
    EXPECT(&p, "> ");
    pty_send(&p, "Hello\n");
    EXPECT(&p, "cannot write to stdout: No space left on device; the answers are lost");
    EXPECT(&p, "\n> ");
    size_t from = p.log_at;
    pty_send(&p, "Hello\n");
    EXPECT(&p, "\n> ");
    CHECK(!memmem(p.log + from, arrlenu(p.log) - from, "are lost", 8), "said twice");
    pty_send(&p, "\4");
    CHECK_INT(pty_end(&p), 1, "the exit code");
}

/* A line that is rewritten never reaches the terminal's last column. */
static void test_moe_narrow(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN, "-m", "build/demo.gguf", "--greedy", "--show-think", "off", NULL};
    struct pty p;
    if (!pty_start(&p, 24, 16, "xterm", NULL, NULL, argv)) return;
    EXPECT(&p, "\033[?2004h");
    pty_send(&p, "What is 7 squared?\r");
    EXPECT(&p, "\rthinking... ");
    size_t from = p.log_at;
    EXPECT(&p, "\033[K");
    CHECK(p.log_at - from == 3 + 3, "%.*s", (int)(p.log_at - from), p.log + from);
    EXPECT(&p, "\033[?2004h");
    moe_end(&p);
}

/* An answer on a terminal of few columns breaks no word: each row that the program ends could not take the next one. */
static void test_moe_words(void) {
    NEED_MOE();
    static const int size[2][2] = {{24, 80}, {10, 40}};
    for (int k = 0; k < 2; k++) {
        struct pty p;
        if (!pty_start(&p, size[k][0], size[k][1], "xterm", NULL, NULL, moe_argv)) return;
        EXPECT(&p, "\033[?2004h");
        pty_send(&p, "Tell me a story about a bear.\r");
        EXPECT(&p, "\033[?25h\r\r\n");
        const size_t from = p.log_at;
        EXPECT(&p, "\033[2m# ");
        int col = 0, rows = 0;
        for (size_t i = from; i < p.log_at - 6; i++) {
            if (p.log[i] == 27)
                while (p.log[i] != 'm' && p.log[i] != 'K' && p.log[i] != 'h') i++;
            else if (p.log[i] == '\n') rows++, col = 0;
            else if (p.log[i] == '\r') col = 0;
            else col++;
            if (!CHECK(col <= size[k][1], "a row of more than %d columns", size[k][1])) break;
        }
        CHECK(rows > 2, "%d rows", rows);
        EXPECT(&p, "\033[?2004h");
        moe_end(&p);
    }
}

static void test_moe_color(void) {
    NEED_MOE();
    static char *hidden[] = {MOE_BIN, "-m", "build/demo.gguf", "--greedy", "--show-think", "off", NULL};
    struct pty p;
    if (!moe_start(&p, "dumb", hidden)) return;
    pty_send(&p, "What is 7 squared? One word.\n");
    EXPECT(&p, "\n");
    EXPECT(&p, "49");
    EXPECT(&p, "> ");
    CHECK(!memchr(p.log, 27, arrlenu(p.log)), "an escape sequence on a dumb terminal");
    moe_end(&p);
    setenv("NO_COLOR", "1", 1);
    if (moe_start(&p, "xterm", moe_argv)) {
        moe_ask(&p, "What is 7 squared? One word.", "49");
        for (size_t i = 0; i + 2 < arrlenu(p.log); i++) {
            if (p.log[i] != 27 || p.log[i + 1] != '[') continue;
            size_t k = i + 2;
            while (k < arrlenu(p.log) && (isdigit((uint8_t)p.log[k]) || p.log[k] == ';')) k++;
            if (!CHECK(k == arrlenu(p.log) || p.log[k] != 'm' || p.log[i + 2] == '0', "a color: %.*s", (int)(k - i),
                       p.log + i + 1))
                break;
        }
        moe_end(&p);
    }
    unsetenv("NO_COLOR");
}

/* ---- chats on terminals without an editor ---- */

/* Whether the conversation that was saved last holds `text`. */
static bool plain_saved(const char *text) {
    char path[300], *data = NULL, err[ERR_MAX];
    snprintf(path, sizeof path, "%s/.moe/last.jsonl", test_dir());
    const bool has = !read_file(path, &data, err) && strstr(sb_cstr(&data), text);
    unlink(path);
    arrfree(data);
    return has;
}

/* A chat is saved, and resumed, wherever there is no line editor. */
static void test_moe_plain(void) {
    NEED_MOE();
    static char *simple[] = {MOE_BIN, "-m", "build/demo.gguf", "--greedy", "--simple-io", NULL};
    static char *again[] = {MOE_BIN, "-m", "build/demo.gguf", "--greedy", "--simple-io", "--continue", NULL};
    struct pty p;
    for (int dumb = 0; dumb < 2; dumb++) {
        char *line = NULL;
        if (!pty_start(&p, 24, 80, dumb ? "dumb" : "xterm", NULL, NULL, dumb ? moe_argv : simple)) return;
        EXPECT(&p, "\n> ");
        sb_puts(&line, "/system ");
        for (int i = 0; i < 7000; i++) sb_puts(&line, "0123456789");
        sb_puts(&line, "END\r/system\r");
        pty_send_n(&p, line, arrlenu(line));
        EXPECT(&p, "[more lines wait: each is a message of its own");
        EXPECT(&p, "[system message set]");
        line[arrlenu(line) - strlen("\r/system\r")] = 0;
        CHECK(pty_expect(&p, line + strlen("/system ")), "the line is not whole");
        pty_send(&p, "/system \"\"\r");
        EXPECT(&p, "removed");
        pty_send(&p, "What is 7 squared? One word.\r");
        EXPECT(&p, "49\r\n# ");
        EXPECT(&p, "> ");
        CHECK(!memchr(p.log, 27, arrlenu(p.log)), "an escape sequence");
        moe_end(&p);
        arrfree(line);
        if (dumb) CHECK(plain_saved("7 squared"), "the conversation is not saved");
        else if (pty_start(&p, 24, 80, "xterm", NULL, NULL, again)) {
            EXPECT(&p, "[loaded 2 messages]");
            EXPECT(&p, "\n> ");
            pty_send(&p, "/regen\r");
            EXPECT(&p, "49\r\n# ");
            moe_end(&p);
            CHECK(plain_saved("7 squared"), "the conversation is not saved");
        }
    }
}

/* What is typed during an answer waits, and Ctrl-C stops it. */
static void test_moe_plain_ahead(void) {
    NEED_MOE();
    static char *argv[] = {MOE_BIN, "-m", "build/demo.gguf", ENDLESS, NULL};
    struct pty p;
    if (!moe_start(&p, "dumb", argv)) return;
    pty_send(&p, "Tell me a story.\r");
    EXPECT(&p, "[thinking]\r\n");
    pty_send(&p, "/syst\3");
    size_t from = p.log_at;
    EXPECT(&p, "[stopped");
    CHECK(!memmem(p.log + from, p.log_at - from, "/syst", 5), "what is typed is echoed into the answer");
    EXPECT(&p, "> /syst");
    pty_send(&p, "em kept\r");
    EXPECT(&p, "[system message set]");
    EXPECT(&p, "> ");
    moe_end(&p);
    CHECK(plain_saved("Tell me a story."), "the conversation is not saved");
}

/* A chat whose stdin is a pipe: lines of any length, blocks, commands; stdout has the answers alone. */
static void test_moe_interactive(void) {
    NEED_MOE();
    char home[PATH_MAX], command[PATH_MAX + 256], *out = NULL, *said = NULL;
    if (!CHECK(realpath(test_dir(), home), "%s", strerror(errno))) return;
    snprintf(command, sizeof command,
             "{ printf '/system %%070000d\n/system\n/system \"\"\nWhat is 7 squared? \\\\\nOne word.'; } | "
             "HOME='%s' exec " MOE_BIN " -m build/demo.gguf --greedy -i",
             home);
    CHECK_INT(run_command(command, &out, &said), 0, "%s", sb_cstr(&said));
    CHECK(strstr(sb_cstr(&out), "49") && arrlen(out) < 24, "the answer is '%s'", sb_cstr(&out));
    CHECK(strspn(strstr(sb_cstr(&said), "[system message set]\n") + 21, "0") == 70000, "the line is not whole");
    CHECK(plain_saved("What is 7 squared? \\nOne word."), "the conversation is not saved");
    arrfree(out);
    arrfree(said);
    out = said = NULL;
    snprintf(command, sizeof command,
             "printf '/regen\n/undo\n/undo\n' | HOME='%s' exec " MOE_BIN " -m build/demo.gguf --greedy -i -q --load "
             "last -p 'What is 7 squared? One word.'",
             home);
    CHECK_INT(run_command(command, &out, &said), 1, "it was deleted");
    arrfree(said);
    command[strlen(command) - strlen("--load last -p 'What is 7 squared? One word.'")] = 0;
    strcat(command, "-p 'What is 7 squared? One word.'");
    CHECK_INT(run_command(command, &out, &said), 0, "%s", sb_cstr(&said));
    CHECK_STR(sb_cstr(&out), "49\n49\n", "a first message, and /regen");
    CHECK_HAS(sb_cstr(&said), "[last turn removed]\nthere is nothing to undo\n", "commands");
    arrfree(out);
    arrfree(said);
}

#define TESTS_REPL                                                                                                   \
    {"repl/keys", test_repl_keys}, {"repl/utf8", test_repl_utf8}, {"repl/newlines", test_repl_newlines},             \
        {"repl/paste", test_repl_paste}, {"repl/cut", test_repl_cut}, {"repl/undo", test_repl_undo},                 \
        {"repl/history-long", test_repl_history_long}, {"repl/history", test_repl_history},                          \
        {"repl/history-shared", test_repl_history_shared}, {"repl/search", test_repl_search},                        \
        {"repl/screen", test_repl_screen}, {"repl/screen-random", test_repl_screen_random},                          \
        {"repl/clusters", test_repl_clusters}, {"repl/vowels", test_repl_vowels}, {"repl/wrap", test_repl_wrap},     \
        {"repl/words", test_moe_words}, {"repl/resize", test_repl_resize}, {"repl/redraw", test_repl_redraw},        \
        {"repl/fuzz", test_repl_fuzz}, {"repl/interrupt", test_repl_interrupt}, {"repl/switch", test_repl_switch},   \
        {"repl/restore", test_repl_restore}, {"repl/dumb", test_repl_dumb}, {"repl/dumb-long", test_repl_dumb_long}, \
        {"repl/dumb-blind", test_repl_dumb_blind}, {"repl/dumb-keys", test_repl_dumb_keys},                          \
        {"repl/dumb-emacs", test_repl_dumb_emacs}, {"repl/held", test_repl_held}, {"repl/plain", test_moe_plain},    \
        {"repl/plain-ahead", test_moe_plain_ahead}, {"repl/interactive", test_moe_interactive},                      \
        {"repl/rows", test_note_rows}, {"repl/ctrl-t", test_moe_answer_now}, {"repl/ctx", test_moe_context},         \
        {"repl/dialogue", test_moe_dialogue}, {"repl/experts", test_moe_experts},                                    \
        {"repl/complete", test_repl_complete}, {"repl/complete-names", test_moe_complete},                           \
        {"repl/editor", test_moe_editor}, {"repl/files", test_moe_files}, {"repl/seed", test_moe_seed},              \
        {"repl/ctrl-c", test_moe_interrupt}, {"repl/typeahead", test_moe_typeahead},                                 \
        {"repl/conversations", test_moe_conversations}, {"repl/resume", test_moe_resume},                            \
        {"repl/terminate", test_moe_terminate}, {"repl/redirected", test_moe_redirected},                            \
        {"repl/lines", test_moe_lines}, {"repl/full", test_moe_full}, {"repl/narrow", test_moe_narrow},              \
        {"repl/color", test_moe_color},
