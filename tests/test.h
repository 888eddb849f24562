/* What the groups of tests (t_*.h) share: checks, skips, paths, commands. Included by test_moe.c after ../moe.c. */
#ifndef MOE_TEST_H
#define MOE_TEST_H

/* What all shapes of DeepSeek-V4 have, the end of a text of keys: see struct synth. */
#define STREAM_KEYS                                                                                \
    " hyper_connection.sinkhorn_iterations=20 hyper_connection.epsilon=1e-6 rope.freq_base=10000 " \
    "attention.compress_rope_freq_base=160000 rope.scaling.type=yarn rope.scaling.factor=16 "      \
    "rope.scaling.original_context_length=65536 swiglu_clamp_exp=10 swiglu_clamp_shexp=10"

struct test {
    const char *name; /* group/case */
    void (*fn)(void);
};

static int test_failures;          /* of the running test */
static bool test_ends_at_failure;  /* a mutant: its first failure ends the process with 1 */
static char test_skip_reason[256]; /* non-empty: the running test was skipped */

static void test_failed(void) {
    test_failures++;
    if (test_ends_at_failure) _exit(1);
}

/* On failure prints where, and the formatted remark; the test goes on. Evaluates to the condition. */
#define CHECK(cond, ...)                                                                   \
    ((cond) ? true                                                                         \
            : (test_failed(), fprintf(stderr, "  %s:%d: %s: ", __FILE__, __LINE__, #cond), \
               fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), false))

/* CHECK(got == want) of two whole numbers, and of two strings; CHECK_HAS: `part` occurs in `got`. All print what they
 * got. */
#define CHECK_INT(got, want, ...) check_int(__FILE__, __LINE__, #got, got, want, __VA_ARGS__)
#define CHECK_STR(got, want, ...) check_text(__FILE__, __LINE__, #got, got, want, true, __VA_ARGS__)
#define CHECK_HAS(got, part, ...) check_text(__FILE__, __LINE__, #got, got, part, false, __VA_ARGS__)

__attribute__((format(printf, 6, 7))) static bool check_int(const char *file, int line, const char *what, long long got,
                                                            long long want, const char *fmt, ...) {
    va_list ap;
    if (got == want) return true;
    test_failed();
    fprintf(stderr, "  %s:%d: %s is %lld, expected %lld: ", file, line, what, got, want);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return false;
}

/* whole: the strings are equal; else `want` occurs in `got`. */
__attribute__((format(printf, 7, 8))) static bool check_text(const char *file, int line, const char *what,
                                                             const char *got, const char *want, bool whole,
                                                             const char *fmt, ...) {
    va_list ap;
    if (got && (whole ? !strcmp(got, want) : strstr(got, want) != NULL)) return true;
    test_failed();
    fprintf(stderr, "  %s:%d: %s is '%.300s', expected '%.300s'%s: ", file, line, what, got ? got : "", want,
            whole ? "" : " in it");
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return false;
}

/* Ends the running test as skipped. */
#define SKIP(...)                                                         \
    do {                                                                  \
        snprintf(test_skip_reason, sizeof test_skip_reason, __VA_ARGS__); \
        return;                                                           \
    } while (0)

/* Seconds of CPU time of this process. Limits on the work of a function use them: a busy machine does not change them.
 * */
static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Path of third-party test data beside the repository, NULL when that is not there. Tests run at the top of the tree.
 * */
static const char *shared_path(const char *rel) {
    static char path[4][1024];
    static int turn;
    char *p = path[turn++ & 3];
    snprintf(p, sizeof path[0], "../shared/%s", rel);
    return access(p, R_OK) ? NULL : p;
}

/* The directory of a test's files, below build/. The runner makes it before a test runs and removes it after the last.
 * */
static char test_dir_path[32];

static const char *test_dir(void) { return test_dir_path; }

static void write_test_file(const char *path, const void *p, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!CHECK(f, "cannot write %s", path)) return;
    CHECK(fwrite(p, 1, n, f) == n, "cannot write %s", path);
    fclose(f);
}

#define IN_DIR(cmd) in_dir(cmd, test_dir())
/* A command line in which every @ stands for the tests' directory. Valid until the next call. */
static const char *in_dir(const char *cmd, const char *dir) {
    static char out[2048];
    size_t n = 0;
    for (; *cmd && n + 128 < sizeof out; cmd++) {
        if (*cmd == '@') n += (size_t)snprintf(out + n, sizeof out - n, "%s", dir);
        else out[n++] = *cmd;
    }
    out[n] = 0;
    return out;
}

/* Runs a shell command; its exit code, or 128 + signal. stdout is appended to *out, stderr to *errout (either may be
 * NULL: thrown away). */
static int run_command(const char *cmd, char **out, char **errout) {
    static int serial;
    char full[8192], o[128], e[128], err[ERR_MAX];
    snprintf(o, sizeof o, "%s/out%d", test_dir(), serial);
    snprintf(e, sizeof e, "%s/err%d", test_dir(), serial++);
    snprintf(full, sizeof full, "(%s) >%s 2>%s", cmd, o, e);
    int rc = system(full);
    if (out) read_file(o, out, err);
    if (errout) read_file(e, errout, err);
    unlink(o), unlink(e);
    return WIFEXITED(rc) ? WEXITSTATUS(rc) : 128 + WTERMSIG(rc);
}

/* ---- what this process prints ---- */

/* stdout and stderr, caught in files. A check that fails meanwhile is caught, too. */
struct caught {
    int fd[2], saved[2];
};

static void catch_begin(struct caught *c) {
    fflush(NULL);
    for (int i = 0; i < 2; i++) {
        c->fd[i] = memfd_create("caught", 0);
        c->saved[i] = dup(i + 1);
        dup2(c->fd[i], i + 1);
    }
}

/* Appends what was caught to *out and *errout (either may be NULL: thrown away). */
static void catch_end(struct caught *c, char **out, char **errout) {
    char **const text[2] = {out, errout};
    fflush(NULL);
    for (int i = 0; i < 2; i++) {
        dup2(c->saved[i], i + 1);
        close(c->saved[i]);
    }
    for (int i = 0; i < 2; i++) {
        const off_t n = lseek(c->fd[i], 0, SEEK_END);
        if (text[i] && n > 0)
            CHECK(pread(c->fd[i], arraddnptr(*text[i], (size_t)n), (size_t)n, 0) == n, "%s", strerror(errno));
        if (text[i]) (void)sb_cstr(text[i]);
        close(c->fd[i]);
    }
}

/* ---- a program that a test watches while it runs ---- */

enum {
    CHILD_SECONDS = 600, /* a program that does not do what a test waits for is ended then */
    REPEAT_SECONDS = 3   /* a SIGINT that was not noticed is sent again then */
};

/* Its stdin is a pipe, what it prints goes to two files in the tests' directory. */
struct child {
    pid_t pid;
    int in;           /* the end of the pipe to write to */
    char out[2][128]; /* paths of stdout and stderr */
    int status;       /* of wait4, once it has ended */
    struct rusage usage;
    bool ended;
};

/* Whether the program has ended. wait: waits for that. */
static bool child_ended(struct child *p, bool wait) {
    if (!p->ended) p->ended = wait4(p->pid, &p->status, wait ? 0 : WNOHANG, &p->usage) == p->pid;
    return p->ended;
}

/* Starts a shell command, which should begin with exec: signals go to its process. */
static bool child_start(struct child *p, const char *cmd) {
    static int serial;
    int in[2];
    memset(p, 0, sizeof *p);
    for (int i = 0; i < 2; i++) snprintf(p->out[i], sizeof p->out[i], "%s/program%d.%d", test_dir(), serial, i + 1);
    serial++;
    if (!CHECK(!pipe2(in, O_CLOEXEC), "%s", strerror(errno))) return false;
    fflush(NULL);
    p->pid = fork();
    if (!p->pid) {
        dup2(in[0], 0);
        for (int i = 0; i < 2; i++) dup2(open(p->out[i], O_WRONLY | O_CREAT | O_CLOEXEC, 0600), i + 1);
        for (int sig = 1; sig < 32; sig++) signal(sig, SIG_DFL); /* whatever started the tests ignores */
        execl("/bin/sh", "sh", "-c", cmd, (char *)NULL);
        _exit(99);
    }
    close(in[0]);
    p->in = in[1];
    return CHECK(p->pid > 0, "fork: %s", strerror(errno));
}

/* Whether the program has printed `text` to stdout or stderr. */
static bool child_printed(const struct child *p, const char *text) {
    bool found = false;
    for (int i = 0; i < 2 && !found; i++) {
        char *all = NULL, err[ERR_MAX];
        read_file(p->out[i], &all, err);
        found = strstr(sb_cstr(&all), text) != NULL;
        arrfree(all);
    }
    return found;
}

/* Whether it has read everything that was written to its stdin. */
static bool child_drained(const struct child *p) {
    int left = 1;
    return !ioctl(p->in, FIONREAD, &left) && !left;
}

/* Waits until the program has printed `text`; NULL: until it has read its stdin. */
static bool child_expect(struct child *p, const char *text) {
    for (double end = now_seconds() + CHILD_SECONDS;; poll(NULL, 0, 1)) {
        const bool ended = child_ended(p, false);
        if (text ? child_printed(p, text) : child_drained(p)) return true;
        if (ended) break;
        if (now_seconds() > end) kill(p->pid, SIGKILL);
    }
    return CHECK(false, "the program ended without %s%s", text ? "printing " : "reading its stdin", text ? text : "");
}

/* Writes to the program's stdin; false when it is gone. */
static bool child_write(struct child *p, const char *text, size_t n) {
    return CHECK(write(p->in, text, n) == (ssize_t)n, "the program's stdin: %s", strerror(errno));
}

/* Sends SIGINT and waits for the end; stdin stays open meanwhile. A signal just in front of a read() is noticed only by
 * the next: it is sent again to a program that sleeps, which has used no processor for REPEAT_SECONDS. */
static void child_interrupt(struct child *p) {
    double used = -1, since = 0;
    clockid_t clock;
    clock_getcpuclockid(p->pid, &clock);
    for (int sent = 0; !child_ended(p, false); poll(NULL, 0, 1)) {
        struct timespec t = {0};
        clock_gettime(clock, &t);
        const double now = now_seconds(), uses = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
        if (sent && uses > used) used = uses, since = now;
        if (sent && now - since < REPEAT_SECONDS) continue;
        kill(p->pid, ++sent < 5 ? SIGINT : SIGKILL);
        used = uses, since = now;
    }
}

/* Closes stdin and waits for the end. The exit code, or 128 + signal; stdout and stderr are appended to *out and
 * *errout unless NULL. */
static int child_end(struct child *p, char **out, char **errout) {
    char err[ERR_MAX];
    close(p->in);
    if (!child_ended(p, true)) return -1;
    if (out) read_file(p->out[0], out, err);
    if (errout) read_file(p->out[1], errout, err);
    unlink(p->out[0]);
    unlink(p->out[1]);
    return WIFEXITED(p->status) ? WEXITSTATUS(p->status) : 128 + WTERMSIG(p->status);
}

#endif
