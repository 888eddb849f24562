/* The part of tests/compare_trees.sh that runs inside the engine. It includes the moe.c of the tree that is compared:
 * the include path says which one it is.
 *
 *   compare_trees moe ARGUMENTS..      the program itself
 *   compare_trees logits MODEL [quick] a line for every way to compute the logits of a prompt on a CPU:
 *                                      PATH RANKS CACHE MODE HASH NORM
 *
 * PATH is "ref", or the name of a set of vector kernels that this machine can run. MODE: "prefill" computes the prompt
 * at once, "decode" token by token, "pieces" in pieces of different sizes, "long" more tokens than one forward takes
 * and then single ones, which partition the context. HASH is of the bits of the logits, of every position where they
 * are to be had; NORM tells how much they differ when the hashes do.
 *
 * With -DMOE_CUDA it has the CUDA backend on the PTX simulator. Then the kernels that are launched are written to FILE:
 * thread by thread, in order, one a line.
 */
#ifdef MOE_CUDA
#define _GNU_SOURCE /* as moe.c, which comes after this header */
#include "ptxsim/ptxsim.h"
#endif
#define main engine_main
#include "moe.c"
#undef main

/* ---- all that this file knows of moe.c: whatever else it uses is defined in it ---- */

#ifdef COMPARE_BASE                        /* the names of the base: stay as they are */
#define X_ERROR                    ERR_MAX /* bytes of a message */
#define X_MODEL                    struct model
#define X_MODEL_LOAD(m, path, err) model_load(m, path, err) /* 0: done */
#define X_MODEL_FREE(m)            model_free(m)
#define X_VOCAB(m)                 ((m)->n_vocab)
#define X_KERNELS                  struct kernels
#define X_KERNELS_REF              (&kernels_ref)
#define X_KERNEL_SETS              kernel_sets /* an array of pointers, the best set first */
#define X_KERNELS_RUNNABLE(k)      kernels_runnable(k)
#define X_KERNELS_NAME(k)          ((k)->name)
#define X_KV_F32                   KV_F32
#define X_KV_BF16                  KV_BF16
#define X_KV_FP8                   KV_FP8
#define X_SESSION                  struct session
#define X_SESSION_INIT(s, m, tp, pp, k, threads, ctx, kv) \
    session_init(s, m, tp, pp, (struct cpu_options){.k = k, .n_threads = threads, .n_ctx = ctx, .kv = kv})
#define X_SESSION_FREE(s)                  session_free(s)
#define X_SCORE(s, ids, n, each, arg, err) session_score(s, ids, n, each, arg, err) /* 0: done */
#define X_SYNC(s, ids, n, err)             (session_sync(s, ids, n, err) == SYNC_DONE)
#define X_LOGITS(s)                        session_logits(s)
#else /* the names of today: change them with moe.c's */
#define X_ERROR                    ERR_MAX
#define X_MODEL                    struct model
#define X_MODEL_LOAD(m, path, err) model_load(m, path, err)
#define X_MODEL_FREE(m)            model_free(m)
#define X_VOCAB(m)                 ((m)->n_vocab)
#define X_KERNELS                  struct kernels
#define X_KERNELS_REF              (&kernels_ref)
#define X_KERNEL_SETS              kernel_sets
#define X_KERNELS_RUNNABLE(k)      kernels_runnable(k)
#define X_KERNELS_NAME(k)          ((k)->name)
#define X_KV_F32                   KV_F32
#define X_KV_BF16                  KV_BF16
#define X_KV_FP8                   KV_FP8
#define X_SESSION                  struct session
#define X_SESSION_INIT(s, m, tp, pp, k, threads, ctx, kv) \
    session_open_cpu(s, m, tp, pp, (struct cpu_options){.k = k, .n_threads = threads, .n_ctx = ctx, .kv = kv})
#define X_SESSION_FREE(s)                  session_free(s)
#define X_SCORE(s, ids, n, each, arg, err) session_score(s, ids, n, each, arg, err)
#define X_SYNC(s, ids, n, err)             (session_sync(s, ids, n, 0, err) == SYNC_DONE)
#define X_LOGITS(s)                        session_logits(s)
#endif

/* ---- the launches of kernels ---- */

#ifdef MOE_CUDA
enum { LOG_THREADS = 64, LOG_MAX = 1 << 16 };

struct launch_log {
    char *kernel[LOG_MAX];
    int first[LOG_MAX]; /* where this kernel appeared first */
    int n;
};

static struct launch_log *launch_logs[LOG_THREADS];
static int n_launch_logs;
static _Thread_local struct launch_log *launch_log;

static void log_launch(const char *kernel, void *argument) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    (void)argument;
    if (!launch_log) {
        launch_log = calloc(1, sizeof *launch_log);
        pthread_mutex_lock(&lock);
        if (!launch_log || n_launch_logs == LOG_THREADS) abort();
        launch_logs[n_launch_logs++] = launch_log;
        pthread_mutex_unlock(&lock);
    }
    const int n = launch_log->n++;
    if (n == LOG_MAX) abort();
    launch_log->kernel[n] = strdup(kernel);
    int *at = &launch_log->first[n];
    while (strcmp(launch_log->kernel[*at], launch_log->kernel[n])) ++*at;
}

/* Threads begin in any order: by what they launched, then, but not by its name. */
static int compare_launches(const void *x, const void *y) {
    const struct launch_log *a = *(struct launch_log *const *)x, *b = *(struct launch_log *const *)y;
    if (a->n != b->n) return a->n - b->n;
    for (int i = 0; i < a->n; i++)
        if (a->first[i] != b->first[i]) return a->first[i] - b->first[i];
    return 0;
}

static const char *launches_path; /* NULL: they are not wanted */

static void launches_write(void) {
    FILE *f = launches_path ? fopen(launches_path, "w") : NULL;
    if (!f) return;
    qsort(launch_logs, (size_t)n_launch_logs, sizeof *launch_logs, compare_launches);
    for (int i = 0; i < n_launch_logs; i++) {
        if (i) fprintf(f, "-\n");
        for (int k = 0; k < launch_logs[i]->n; k++) fprintf(f, "%s\n", launch_logs[i]->kernel[k]);
    }
    fclose(f);
}
#endif

/* ---- logits ---- */

enum {
    PROMPT = 70,       /* tokens */
    LONG_PROMPT = 530, /* more than a forward takes at once */
    LONG_STEPS = 3,    /* single tokens after it */
    LARGE_STEPS = 12,  /* single tokens of a large model */
    THREADS = 2        /* of the prompt at once; of what else is computed: 1, or they wait for each other */
};

struct digest {
    uint64_t hash;
    double squares;
    int n, n_rows; /* values of a row; rows */
};

static struct digest digest_begin(int n) { return (struct digest){14695981039346656037u, 0, n, 0}; }

static void digest_row(void *arg, int pos, const float *x) {
    struct digest *d = arg;
    (void)pos;
    for (int i = 0; i < d->n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        for (int k = 0; k < 32; k += 8) d->hash = (d->hash ^ (bits >> k & 255)) * 1099511628211u;
        d->squares += (double)x[i] * (double)x[i];
    }
    d->n_rows++;
}

static void must(bool ok, const char *what, const char *err) {
    if (ok) return;
    fprintf(stderr, "compare_trees: %s: %s\n", what, err);
    exit(1);
}

/* The first of the ids, up to each of the numbers in `upto`, which ends with 0: the logits after each piece. */
static struct digest by_pieces(X_SESSION *s, int n_vocab, const int32_t *ids, const int *upto) {
    struct digest d = digest_begin(n_vocab);
    char err[X_ERROR] = "";
    for (; *upto; upto++) {
        must(X_SYNC(s, ids, *upto, err), "a piece of the prompt", err);
        digest_row(&d, *upto, X_LOGITS(s));
    }
    return d;
}

enum { MODE_PREFILL, MODE_DECODE, MODE_PIECES, MODE_LONG, MODES };

/* What is left out where it would take long: `exact` kernels and those that are not for a certain processor are slow,
 * which tells with a `large` model. */
static bool worth(int mode, int division, int cache, bool exact, bool slow, bool large) {
    if (exact && cache && (large || division > 1 || mode == MODE_DECODE || mode == MODE_LONG)) return false;
    if (mode == MODE_PIECES) return !(slow && large) || division < 2;
    if (mode == MODE_LONG) return !(slow && large) && (division < 2 || (!slow && !large && division == 5));
    return true;
}

static void by_path(X_MODEL *m, const X_KERNELS *k, const char *path, bool quick, bool exact, bool slow) {
    static const int division[][2] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {1, 2}, {2, 2}}; /* --tp, --pp */
    static const int pieces[] = {1, 3, 6, 10, 15, 22, 31, 47, PROMPT, 0};
    static const char *const caches[] = {"f32", "bf16", "fp8"}, *const modes[MODES] = {"prefill", "decode", "pieces",
                                                                                       "long"};
    int each[PROMPT + 1] = {0}, far[LONG_STEPS + 2] = {0};
    int32_t ids[LONG_PROMPT + LONG_STEPS];
    const int n_vocab = X_VOCAB(m);
    const bool large = n_vocab > 1024;
    for (int i = 0; i < (large ? LARGE_STEPS : PROMPT); i++) each[i] = i + 1;
    for (int i = 0; i <= LONG_STEPS; i++) far[i] = LONG_PROMPT + i;
    for (int i = 0; i < LONG_PROMPT + LONG_STEPS; i++) ids[i] = (i * 7919 + i / 7 * 131 + 17) % n_vocab;
    for (int d = 0; d < (quick ? 2 : 6); d++)
        for (int c = 0; c < 3; c++)
            for (int mode = 0; mode < (quick ? MODE_LONG : MODES); mode++) {
                X_SESSION s;
                struct digest digest = digest_begin(n_vocab);
                char err[X_ERROR] = "";
                if (!worth(mode, d, c, exact, slow, large)) continue;
                X_SESSION_INIT(&s, m, division[d][0], division[d][1], k, mode ? 1 : THREADS,
                               mode == MODE_LONG ? LONG_PROMPT + LONG_STEPS : PROMPT,
                               ((const int[]){X_KV_F32, X_KV_BF16, X_KV_FP8})[c]);
                if (mode == MODE_PREFILL) must(!X_SCORE(&s, ids, PROMPT, digest_row, &digest, err), "the prompt", err);
                else
                    digest = by_pieces(&s, n_vocab, ids,
                                       mode == MODE_DECODE   ? each
                                       : mode == MODE_PIECES ? pieces
                                                             : far);
                X_SESSION_FREE(&s);
                printf("%s tp%d,pp%d %s %s %016llx %.9g\n", path, division[d][0], division[d][1], caches[c],
                       modes[mode], (unsigned long long)digest.hash, sqrt(digest.squares / digest.n_rows));
            }
}

static void by_all(const char *model, bool quick) {
    const size_t n = sizeof X_KERNEL_SETS / sizeof *X_KERNEL_SETS;
    X_MODEL m;
    char err[X_ERROR] = "";
    bool best = true;
    must(!X_MODEL_LOAD(&m, model, err), model, err);
    if (!quick) by_path(&m, X_KERNELS_REF, "ref", quick, true, true);
    for (size_t i = 0; i < n; i++) {
        const X_KERNELS *k = X_KERNEL_SETS[i];
        const bool last = i + 1 == n; /* the one for any processor */
        char name[64];
        if (!X_KERNELS_RUNNABLE(k)) continue;
        snprintf(name, sizeof name, "%s", X_KERNELS_NAME(k));
        for (char *p = name; *p; p++)
            if (*p == ' ') *p = '+';
        if (best || last || !quick) by_path(&m, k, name, quick, false, last);
        best = false;
    }
    X_MODEL_FREE(&m);
}

int main(int argc, char **argv) {
#ifdef MOE_CUDA
    atexit(launches_write);
    sim_change_arguments(log_launch);
    if (argc > 3 && !strcmp(argv[1], "launches")) { /* then as if without these two */
        launches_path = argv[2];
        argv += 2;
        argc -= 2;
    }
#endif
    if (argc > 1 && !strcmp(argv[1], "moe")) return engine_main(argc - 1, argv + 1);
    if (argc < 3 || strcmp(argv[1], "logits")) {
        fprintf(stderr, "usage: compare_trees [launches FILE] moe ARGUMENTS.. | logits MODEL [quick]\n");
        return 2;
    }
    by_all(argv[2], argc > 3 && !strcmp(argv[3], "quick"));
    return 0;
}
