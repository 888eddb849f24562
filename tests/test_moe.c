/* The tests. They include the program itself, so that its functions can be called; groups are in t_*.h.
 *
 *   build/test_moe              all tests
 *   build/test_moe vocab nvfp4  those whose names contain one of the words
 *   build/test_moe --list
 *   build/test_moe --fault NAME MODEL goes wrong on purpose: the test of faults starts it
 *   build/test_cuda --mutate    leaves out every barrier of the CUDA backend once
 *
 * Run at the top of the tree. Third-tp_peer test data are read from ../shared; without it the tests that need them are
 * skipped. The last line is "N passed, M failed, K skipped".
 */
#define MOE_NO_MAIN
#include "../moe.c"

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

#include "t_nvfp4.h"
#include "t_vocab.h"
#include "t_template.h"
#include "t_kernels.h"
#include "t_convert.h"
#include "t_model.h"
#include "t_state.h"
#include "t_quantize.h"
#include "t_reap.h"
#include "t_cli.h"
#include "t_calibrate.h"
#include "t_ranks.h"
#include "t_tables.h"
#include "t_plan.h"
#include "t_hostile.h"
#include "t_repl.h"
#include "t_doctor.h"

#ifdef MOE_CUDA /* linked with test_cuda.cu */
#include "t_cuda.h"
#else
#define TESTS_CUDA
#endif

static const struct test table[] = {
    TESTS_NVFP4 TESTS_VOCAB TESTS_TEMPLATE TESTS_KERNELS TESTS_CONVERT TESTS_MODEL TESTS_STATE TESTS_QUANTIZE TESTS_REAP
        TESTS_CLI TESTS_CALIBRATE TESTS_RANKS TESTS_TABLES TESTS_PLAN TESTS_REPL TESTS_HOSTILE TESTS_DOCTOR TESTS_CUDA};

static void test_dir_remove(void) {
    char cmd[128];
    if (!test_dir_made[0]) return;
    snprintf(cmd, sizeof cmd, "rm -rf %s", test_dir_made);
    if (system(cmd)) fprintf(stderr, "cannot remove %s\n", test_dir_made);
}

static bool test_wanted(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (strstr(name, argv[i])) return true;
    return argc < 2;
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0, skipped = 0, n = sizeof table / sizeof *table;
    bool list = argc > 1 && !strcmp(argv[1], "--list");
#ifdef CUEMU
    if (argc > 1 && !strcmp(argv[1], "--mutate")) {
        omp_set_num_threads(1); /* children of a process with threads have none of them */
        int rc = cuda_test_mutate();
        test_dir_remove();
        return rc;
    }
#endif
    if (argc == 4 && !strcmp(argv[1], "--fault")) {
        static struct settings set = {.json = true};
        static struct doctor d = {.set = &set};
        if (!strcmp(argv[2], "doctor"))
            doctor_step(&d, STEP_FORWARD), last_words.run = doctor_dies, last_words.arg = &d;
        return rank_fault(argv[2], argv[3]);
    }
    setlocale(LC_CTYPE, "C.UTF-8");
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < n; i++) {
        if (list) puts(table[i].name);
        if (list || !test_wanted(table[i].name, argc, argv)) continue;
        test_failures = 0, test_skip_reason[0] = 0;
        double t0 = now_seconds();
        table[i].fn();
        double t = now_seconds() - t0;
        bool skip = test_skip_reason[0] && !test_failures;
        if (test_failures) failed++;
        else if (skip) skipped++;
        else passed++;
        printf("%s %-40s %6.2f s%s%s\n",
               test_failures ? "FAIL"
               : skip        ? "skip"
                             : "ok  ",
               table[i].name, t, skip ? "  " : "", skip ? test_skip_reason : "");
    }
    if (list) return 0;
    test_dir_remove();
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
