/* What the groups of tests (t_*.h) share: checks, skips, paths. Included by test_moe.c behind ../moe.c. */
#ifndef MOE_TEST_H
#define MOE_TEST_H

struct test {
    const char *name; /* group/case */
    void (*fn)(void);
};

static int test_failures;          /* of the running test */
static char test_skip_reason[256]; /* non-empty: the running test was skipped */

/* On failure prints where, and the formatted remark; the test goes on. Evaluates to the condition. */
#define CHECK(cond, ...)                                                                     \
    ((cond) ? true                                                                           \
            : (test_failures++, fprintf(stderr, "  %s:%d: %s: ", __FILE__, __LINE__, #cond), \
               fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), false))

/* Ends the running test as skipped. */
#define SKIP(...)                                                         \
    do {                                                                  \
        snprintf(test_skip_reason, sizeof test_skip_reason, __VA_ARGS__); \
        return;                                                           \
    } while (0)

/* Path of third-party test data beside the repository, NULL when that is not there. Tests run at the top of the tree. */
static const char *shared_path(const char *rel) {
    static char path[4][1024];
    static int turn;
    char *p = path[turn++ & 3];
    snprintf(p, sizeof path[0], "../shared/%s", rel);
    return access(p, R_OK) ? NULL : p;
}

/* A directory for a test's files, made at first use and removed by test_moe.c at the end. */
static char test_dir_made[64];

static const char *test_dir(void) {
    if (!test_dir_made[0]) {
        snprintf(test_dir_made, sizeof test_dir_made, "build/test-XXXXXX");
        if (!mkdtemp(test_dir_made)) die("cannot make a test directory under build/: %s", strerror(errno));
    }
    return test_dir_made;
}

/* Runs a shell command; its exit code, or 128 + signal. stdout is appended to *out, stderr to *errout (either may be NULL:
 * thrown away). */
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

#endif
