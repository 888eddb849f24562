/* The tests. They include the program itself, so that its functions can be called; groups are in t_*.h.
 *
 *   build/test_moe              runs all tests
 *   build/test_moe vocab nvfp4  runs those whose names contain one of the words
 *   build/test_moe -j2 [WORDS]  runs two tests at a time, each in a process of its own
 *   build/test_moe -j2 -vocab   leaves out those whose names contain a word after a dash
 *   build/test_moe --list       prints the names
 *   build/test_moe --fault NAME MODEL goes wrong on purpose: the tests of faults start it
 *   build/test_moe --interrupt N OPTIONS runs `moe OPTIONS` with --calibrate and interrupts it in forward N
 *   build/test_moe --editor     reads texts with the line editor, for tests/oracle/gen_screen.py
 *   build/test_moe --render-lines renders templates from stdin, for tests/oracle/gen_templates.py --fuzz
 *   build/test_cuda --mutate [WORDS]  makes mistakes in the CUDA backend, and leaves out every synchronizing instruction of
 *                               it once: some test must fail
 *   build/test_cuda [--capability 120|90|80] [--seed N] [--truncate 8|16] [--races 1] .. simulates another chip, a random
 *                               order of warps and blocks, tensor cores that cut sums off; looks for races
 *   build/test_cuda --coverage FILE .. appends which instructions of the PTX ran
 *   build/test_cuda --covered FILE [KERNEL] prints the kernels of which less than 97 % ran; a kernel's instructions
 *   build/test_cuda --ptx FILE  writes the PTX that it runs
 *   build/test_cuda --sass      prints what the loops of the CUDA kernels cost and what the kernels ask of memory, in
 *                               Markdown
 *
 * build/test_cuda (on the PTX simulator) and build/test_gpu (on a device) have the tests of the CUDA backend, cuda/..., alone.
 *
 * Run at the top of the tree. Third-party test data are read from ../shared; without it the tests that need them are
 * skipped. The last line is "N passed, M failed, K skipped".
 */
#define MOE_NO_MAIN
#include "../moe.c"
#ifdef SIMULATED
#include <omp.h>
#include "ptxsim/ptxsim.h"
#endif

#ifndef MOE_BIN
#define MOE_BIN "./moe"
#endif
#ifndef CONVERT_BIN
#define CONVERT_BIN "build/moe-convert"
#endif
#ifndef REAP_BIN
#define REAP_BIN "build/moe-reap"
#endif
#ifndef SANITIZED
#define SANITIZED 0 /* 1: everything is slow, repeat less */
#endif

#include "test.h"

#include "t_model.h"
#include "t_cli.h"
#include "t_calibrate.h"
#include "t_draft.h"
#include "t_store.h"
#include "t_ranks.h"
#include "t_processes.h"
#include "t_parallel.h"
#include "t_plan.h"
#include "t_doctor.h"

#ifdef MOE_CUDA /* build/test_cuda, build/test_gpu: the tests of the CUDA backend, linked with test_cuda.cu */
#include "t_cuda.h"
#include "t_cuda_experts.h"
#include "t_sass.h"
#ifdef SIMULATED
#include "t_cuda_counts.h"
#else
#define TESTS_COUNTS
#endif

static const struct test table[] = {TESTS_PLAN_ENGINE TESTS_CUDA TESTS_CUDA_EXPERTS TESTS_SASS TESTS_COUNTS};
static const char *const longest[] = {"cuda/parallel", "cuda/attention", "cuda/ranks",
                                      "cuda/streams",  "cuda/batches",   "cuda/fixtures"}; /* as below */
#else
#include "t_nvfp4.h"
#include "t_vocab.h"
#include "t_template.h"
#include "t_think.h"
#include "t_kernels.h"
#include "t_convert.h"
#include "t_tokens.h"
#include "t_families.h"
#include "t_sources.h"
#include "t_prompt.h"
#include "t_requests.h"
#include "t_state.h"
#include "t_qat.h"
#include "t_team.h"
#include "t_quantize.h"
#include "t_reap.h"
#include "t_synth.h"
#include "t_tables.h"
#include "t_hostile.h"
#include "t_repl.h"
#include "t_trust.h"
#include "t_docs.h"

static const struct test table[] = {
    TESTS_NVFP4 TESTS_VOCAB TESTS_TEMPLATE TESTS_THINK TESTS_KERNELS TESTS_CONVERT TESTS_TOKENS TESTS_FAMILIES
        TESTS_SOURCES TESTS_PROMPT TESTS_REQUESTS TESTS_MODEL TESTS_TEAM TESTS_STATE TESTS_QAT TESTS_DRAFT
            TESTS_PARALLEL TESTS_STORE TESTS_QUANTIZE TESTS_REAP TESTS_CLI TESTS_CALIBRATE TESTS_RANKS TESTS_PROCESSES
                TESTS_SYNTH TESTS_TABLES TESTS_PLAN TESTS_REPL TESTS_HOSTILE TESTS_TRUST TESTS_DOCTOR TESTS_DOCS};

/* What -j starts first, the longest first, so that no processor waits for one at the end. */
static const char *const longest[] = {"parallel/requests",
                                      "parallel/pipes",
                                      "state/dialogue",
                                      "state/snapshots",
                                      "parallel/stem",
                                      "model/demo-fast-path",
                                      "model/demo-perplexity",
                                      "cli/needle-long",
                                      "model/batches",
                                      "ranks/fixtures",
                                      "state/compressed",
                                      "doctor/cli",
                                      "draft/text",
                                      "template/limits",
                                      "plan/streams",
                                      "cli/needle-books",
                                      "quantize/perplexity",
                                      "calibrate/resumes",
                                      "draft/state",
                                      "draft/ends",
                                      "state/chosen",
                                      "calibrate/files",
                                      "model/decode-equals-prefill"};
#endif

/* ---- the runner ---- */

enum outcome { PASSED = 100, FAILED, SKIPPED }; /* exit codes of a test's process; others: it crashed */

enum { JOBS_MAX = 16 };

static struct {
    char dir[18]; /* holds the directories of all tests; empty: not made yet */
    int count[3]; /* tests by outcome */
    pid_t running[JOBS_MAX];
} runner;

/* A test that runs in a process of its own, or has run. */
struct test_job {
    const struct test *test;
    pid_t pid;  /* 0: not started */
    FILE *out;  /* what it printed: read when all tests before it are printed */
    int status; /* of waitpid */
    bool ended;
};

static void test_dir_remove(void) {
    char cmd[128];
    if (!runner.dir[0]) return;
    snprintf(cmd, sizeof cmd, "rm -rf %s", runner.dir);
    runner.dir[0] = 0;
    if (system(cmd)) fprintf(stderr, "cannot remove %s\n", cmd + strlen("rm -rf "));
}

/* Makes the directory of test `number` below the runner's. */
static void test_dir_make(int number) {
    if (!runner.dir[0]) {
        snprintf(runner.dir, sizeof runner.dir, "build/test-XXXXXX");
        if (!mkdtemp(runner.dir)) die("cannot make a test directory under build/: %s", strerror(errno));
    }
    snprintf(test_dir_path, sizeof test_dir_path, "%s/%d", runner.dir, number);
    if (mkdir(test_dir_path, 0777)) die("cannot make %s: %s", test_dir_path, strerror(errno));
}

static volatile sig_atomic_t runner_signal; /* 0, or what asks the runner to end */

static void runner_catch(int sig) { runner_signal = sig; }

/* Ends the tests that run, with all that they started, and then the program by the signal that it got. */
static void runner_end(void) {
    for (int i = 0; i < JOBS_MAX; i++)
        if (runner.running[i] > 0) kill(-runner.running[i], SIGKILL);
    while (wait(NULL) > 0) continue;
    test_dir_remove();
    signal(runner_signal, SIG_DFL);
    raise(runner_signal);
}

/* Seconds of CPU time of this process and of the children that it has waited for. */
static double cpu_seconds_all(void) {
    struct rusage u;
    getrusage(RUSAGE_CHILDREN, &u);
    return cpu_seconds() + (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

#ifdef SIMULATED
static const char *coverage_path; /* NULL: it is not asked for */
#endif

/* Runs a test and prints its line: outcome, name, elapsed seconds, seconds of CPU time. */
static enum outcome test_run(const struct test *t) {
    const double wall = now_seconds(), cpu = cpu_seconds_all();
    test_failures = 0, test_skip_reason[0] = 0;
    t->fn();
#ifdef SIMULATED
    CHECK(!sim_violations(), "the simulator found %d violations", sim_violations());
    if (coverage_path) CHECK(sim_append_coverage(coverage_path), "cannot write %s", coverage_path);
#endif
    const enum outcome o = test_failures ? FAILED : test_skip_reason[0] ? SKIPPED : PASSED;
    printf("%s %-40s %6.2f s %6.2f s CPU%s%s\n", (const char *[]){"ok  ", "FAIL", "skip"}[o - PASSED], t->name,
           now_seconds() - wall, cpu_seconds_all() - cpu, o == SKIPPED ? "  " : "",
           o == SKIPPED ? test_skip_reason : "");
    return o;
}

/* Starts a job in place `slot` of those that run. */
static void job_start(struct test_job *j, int slot, int no) {
    test_dir_make(no);
    j->out = tmpfile();
    if (!j->out) die("cannot make a temporary file: %s", strerror(errno));
    fflush(NULL);
    j->pid = fork();
    if (j->pid < 0) die("cannot start a process: %s", strerror(errno));
    if (!j->pid) {
        memset(runner.running, 0, sizeof runner.running);
        runner.dir[0] = 0; /* is the parent's to remove */
        setpgid(0, 0);
        for (int sig = 1; sig < 32; sig++) signal(sig, SIG_DFL);
        dup2(fileno(j->out), 1);
        dup2(fileno(j->out), 2);
        exit(test_run(j->test));
    }
    setpgid(j->pid, j->pid); /* parent and child both: neither waits for the other */
    runner.running[slot] = j->pid;
}

/* Waits until one of n jobs ends, and ends what it left running. */
static void job_await(struct test_job *jobs, int n) {
    int status, slot = 0;
    const pid_t pid = wait(&status);
    if (runner_signal) runner_end();
    if (pid < 0) die("wait: %s", strerror(errno));
    while (runner.running[slot] != pid) slot++;
    runner.running[slot] = 0;
    kill(-pid, SIGKILL);
    for (int i = 0; i < n; i++)
        if (jobs[i].pid == pid) jobs[i].status = status, jobs[i].ended = true;
}

/* Prints what a job printed and counts it. A process that ended without an outcome has failed. */
static void job_print(struct test_job *j) {
    char buf[4096];
    rewind(j->out);
    for (size_t n; (n = fread(buf, 1, sizeof buf, j->out)) > 0;) fwrite(buf, 1, n, stdout);
    fclose(j->out);
    int o = WIFEXITED(j->status) ? WEXITSTATUS(j->status) : 0;
    if (o < PASSED || o > SKIPPED) {
        if (WIFEXITED(j->status)) printf("FAIL %-40s ended with exit code %d\n", j->test->name, o);
        else printf("FAIL %-40s ended by a signal: %s\n", j->test->name, strsignal(WTERMSIG(j->status)));
        o = FAILED;
    }
    runner.count[o - PASSED]++;
}

/* The next job to start, -1 if all have been. */
static int job_next(const struct test_job *jobs, int n) {
    for (size_t k = 0; k < sizeof longest / sizeof *longest; k++)
        for (int i = 0; i < n; i++)
            if (!jobs[i].pid && !strcmp(jobs[i].test->name, longest[k])) return i;
    for (int i = 0; i < n; i++)
        if (!jobs[i].pid) return i;
    return -1;
}

/* Runs n tests, up to `most` at a time. Their lines appear in the order of the table. */
static void run_parallel(struct test_job *jobs, int n, int most) {
    int printed = 0, busy = 0;
    for (int i = 0; i < 3; i++) {
        const struct sigaction catch = {.sa_handler = runner_catch}; /* wait() returns */
        sigaction((const int[]){SIGINT, SIGTERM, SIGHUP}[i], &catch, NULL);
    }
    for (int next; (next = job_next(jobs, n)) >= 0 || busy;) {
        if (next >= 0 && busy < most) {
            int slot = 0;
            while (runner.running[slot]) slot++;
            job_start(&jobs[next], slot, next);
            busy++;
            continue;
        }
        job_await(jobs, n);
        busy--;
        for (; printed < n && jobs[printed].ended; printed++) job_print(&jobs[printed]);
        fflush(stdout);
    }
}

static bool test_wanted(const char *name, int argc, char **argv) {
    bool some = false, named = false;
    for (int i = 0; i < argc; i++) {
        const bool out = argv[i][0] == '-', match = strstr(name, argv[i] + out);
        if (out && match) return false;
        some = some || !out;
        named = named || (!out && match);
    }
    return named || !some;
}

/* Returns the first of the words that no test's name contains, as it was given; NULL: there is none. */
static const char *word_unknown(int argc, char **argv) {
    for (int i = 0; i < argc; i++) {
        size_t t = 0;
        while (t < sizeof table / sizeof *table && !strstr(table[t].name, argv[i] + (argv[i][0] == '-'))) t++;
        if (t == sizeof table / sizeof *table) return argv[i];
    }
    return NULL;
}

/* What is no run of tests: exit code, or -1 for a run. */
static int run_other(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
#ifdef SIMULATED
    if (!strcmp(what, "--ptx") && argc > 2) return !sim_write_ptx(argv[2]);
    if (!strcmp(what, "--covered") && argc == 3)
        return sim_print_coverage(argv[2], cuda_uncovered, CUDA_UNCOVERED) != 0;
    if (!strcmp(what, "--covered") && argc == 4) return !sim_print_left_out(argv[2], argv[3]);
    if (!strcmp(what, "--mutate")) {
        omp_set_num_threads(1); /* children of a process with threads have none of them */
        test_dir_make(0);
        int rc = cuda_test_mutate(argc - 2, argv + 2);
        test_dir_remove();
        return rc;
    }
#endif
#ifdef MOE_CUDA
    if (!strcmp(what, "--sass")) {
        const int rc = sass_print();
#ifdef SIMULATED
        count_print_all();
#endif
        return rc;
    }
#else
    if (!strcmp(what, "--editor")) editor_sync_child(NULL);
    if (!strcmp(what, "--render-lines")) return template_render_lines();
#endif
    if (!strcmp(what, "--interrupt") && argc > 3) return calibrate_interrupted(atoi(argv[2]), argc - 2, argv + 2);
    if (!strcmp(what, "--fault") && argc == 4) {
#ifdef SIMULATED
        cuda_test_patience(7);
#endif
        static struct settings set = {.json = true};
        static struct doctor d = {.set = &set};
        if (!strcmp(argv[2], "doctor")) doctor_step(&d, STEP_FORWARD), die_hook.run = doctor_dies, die_hook.arg = &d;
        return rank_fault(argv[2], argv[3]);
    }
    return -1;
}

#ifdef SIMULATED
/* Takes what the simulator is to be off the arguments. */
static void simulate(int *argc, char ***argv) {
    for (; *argc > 2; *argc -= 2, *argv += 2) {
        char **a = *argv;
        const int x = atoi(a[2]);
        if (!strcmp(a[1], "--capability")) sim_capability(-1, x / 10, x % 10);
        else if (!strcmp(a[1], "--seed")) cuda_test_seed((uint64_t)x);
        else if (!strcmp(a[1], "--truncate")) cuda_test_truncate(x);
        else if (!strcmp(a[1], "--races")) sim_races(x != 0);
        else if (!strcmp(a[1], "--coverage")) coverage_path = a[2];
        else break;
        a[2] = a[0];
    }
    cuda_test_patience(600); /* a simulated GPU is as slow as the processor is busy */
}
#endif

int main(int argc, char **argv) {
    const char *name = strrchr(argv[0], '/');
    if (SANITIZED && !strcmp(name ? name + 1 : argv[0], "moe")) return moe_main(argc, argv);
#ifdef SIMULATED
    simulate(&argc, &argv);
#endif
    const int n = sizeof table / sizeof *table, other = run_other(argc, argv);
    const bool list = argc > 1 && !strcmp(argv[1], "--list");
    const bool parallel = argc > 1 && !strncmp(argv[1], "-j", 2);
    const int most = parallel ? int_min(atoi(argv[1] + 2), JOBS_MAX) : 0, skip = 1 + (list || parallel);
    if (other >= 0) return other;
    const char *unknown = word_unknown(argc > skip ? argc - skip : 0, argv + skip);
    if (unknown) {
        fprintf(stderr, "%s: no option, and in no test's name: '%s' (--list prints the names)\n", argv[0], unknown);
        return 2;
    }
    setlocale(LC_CTYPE, "C.UTF-8");
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!freopen("/dev/null", "r", stdin)) die("cannot open /dev/null: %s", strerror(errno));
    struct test_job *jobs = xcalloc((size_t)n, sizeof *jobs);
    int wanted = 0;
    for (int i = 0; i < n; i++)
        if (test_wanted(table[i].name, argc - skip, argv + skip)) jobs[wanted++].test = &table[i];
    if (parallel) run_parallel(jobs, wanted, most < 1 ? 1 : most);
    for (int i = 0; i < wanted && !parallel; i++) {
        if (list) {
            puts(jobs[i].test->name);
            continue;
        }
        test_dir_make(i);
        runner.count[test_run(jobs[i].test) - PASSED]++;
    }
    free(jobs);
    if (list) return 0;
    test_dir_remove();
    printf("%d passed, %d failed, %d skipped\n", runner.count[0], runner.count[1], runner.count[2]);
    return runner.count[1] != 0;
}
