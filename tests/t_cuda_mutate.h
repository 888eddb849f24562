/* What only the emulator offers: its own tests, and mutants of moe_cuda.cu in which one barrier is left out, or whose host
 * makes a mistake. Included by test_cuda.cu after t_cuda_kernels.h. */
#include <ctime>
#include <string>
#include <sys/wait.h>

#define CHECK(cond) expect(cond, "%s:%d: %s", __FILE__, __LINE__, #cond)
#include "emu_selftest.h"

extern "C" void cuda_test_emulator(void) {
    begin_test(0);
    emu_test_index(), emu_test_barriers(), emu_test_shared(), emu_test_named_barriers(), emu_test_shuffles();
    emu_test_reports(), emu_test_cp_async(), emu_test_ldmatrix(), emu_test_mma(), emu_test_gemm();
    emu_test_conversions(), emu_test_intrinsics(), emu_test_queue(), emu_test_memory(), emu_test_graph();
    emu_test_waiting_kernels(), emu_test_pdl(), emu_test_devices(), emu_test_stores(), emu_test_threads();
    emu_test_waits(), emu_test_nccl();
}

extern "C" void cuda_test_forward(void); /* t_cuda.h */
extern "C" void cuda_test_sample(void);
extern "C" void cuda_test_synthetic(void);
extern "C" void cuda_test_stats(void);
extern "C" void cuda_test_all_reduce(void);
extern "C" void cuda_test_feed_forwards(void);
extern "C" void cuda_test_sparse(void);
extern "C" void cuda_test_streams(void);
extern "C" int cuda_test_failures(void);
extern "C" bool cuda_test_sums;

enum { MUTANT_TESTS = 17, MUTANT_ROUNDS = 3, MUTANT_SECONDS = 900 };
static const struct {
    const char *name;
    void (*fn)();
} mutant_tests[MUTANT_TESTS] = {{"sort", cuda_test_sort},
                                {"router", cuda_test_router},
                                {"upload", cuda_test_upload},
                                {"gemv", cuda_test_gemv},
                                {"gemm", cuda_test_gemm},
                                {"forward", cuda_test_forward},
                                {"attention", cuda_test_attention},
                                {"sample", cuda_test_sample},
                                {"synthetic", cuda_test_synthetic},
                                {"all-reduce", cuda_test_all_reduce},
                                {"links", cuda_test_links},
                                {"stats", cuda_test_stats},
                                {"delta_net", cuda_test_delta_net},
                                {"windows", cuda_test_windows},
                                {"feed-forwards", cuda_test_feed_forwards},
                                {"sparse", cuda_test_sparse},
                                {"streams", cuda_test_streams}};

/* Calls f with the arguments of a launch if it is one of `kernel`. */
template <class ARGS, class F>
static void change_if(const char *launch, const char *kernel, void *args, F f) {
    launch += *launch == '('; /* around the arguments of a template */
    if (!strncmp(launch, kernel, strlen(kernel))) f(*(ARGS *)args);
}
template <class F>
static void change_route(const char *launch, void *args, F f) {
    change_if<struct route_args>(launch, "k_route_decode", args, f);
    change_if<struct route_args>(launch, "k_route_prefill", args, f);
}
static void limit_before_silu(const char *launch, void *args) {
    auto wrong = [](struct glu_limit &l) { l.gate = l.up; };
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [&](auto &a) { wrong(a.limit[0]), wrong(a.limit[1]); });
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [&](auto &a) { wrong(a.limit); });
}
static void limit_behind_silu(const char *launch, void *args) {
    auto wrong = [](struct glu_limit &l) {
        l.gate = l.gate == l.up ? glu_limit_of(GLU_SILU_CLAMP, l.up).gate : l.gate;
    };
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [&](auto &a) { wrong(a.limit[0]), wrong(a.limit[1]); });
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [&](auto &a) { wrong(a.limit); });
}
static void bias_in_weights(const char *launch, void *args) {
    change_route(launch, args, [](auto &a) {
        if (a.bias) a.logit_bias = a.bias, a.bias = NULL;
    });
}
static void softmax_over_all(const char *launch, void *args) {
    change_route(launch, args, [](auto &a) {
        if (a.gating == GATING_CHOSEN) a.gating = GATING_SOFTMAX, a.norm = false;
    });
}

template <class F>
static void change_attention(const char *launch, void *args, F f) {
    change_if<struct attn_args>(launch, "attn_kernel", args, f);
}
static void window_longer(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.window += a.window > 0; });
}
static void window_shorter(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.window -= a.window > 1; });
}
static void sinks_without_splits(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.sinks = a.max_splits > 1 ? NULL : a.sinks; });
}
static float changed_sinks[256]; /* of the latest launch */
template <class F>
static void change_sinks(const char *launch, void *args, F sink) {
    change_attention(launch, args, [&](auto &a) {
        for (int h = 0; h < a.n_head && a.sinks; h++) changed_sinks[h] = sink(a, a.sinks[h]);
        if (a.sinks) a.sinks = changed_sinks;
    });
}
static void sinks_by_split(const char *launch, void *args) { /* as many are one of an exponential times that */
    change_sinks(launch, args, [](const attn_args &a, float x) { return x + logf((float)a.max_splits); });
}
static void scaled_sinks(const char *launch, void *args) {
    change_sinks(launch, args, [](const attn_args &a, float x) { return x * a.scale; });
}
static void rings_read_on(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.k.kind = a.v.kind = PLANE_TOKENS; });
}
static void rings_written_on(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.rope.kp.kind = a.rope.vp.kind = PLANE_TOKENS; });
}
static void other_halves(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.rope.pairs = !a.rope.pairs; });
}
static void other_gates(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.softplus = !a.softplus; });
    change_if<struct gate_args>(launch, "k_head_gate", args, [](auto &a) { a.softplus = !a.softplus; });
}
static void rows_of_ranks(const char *launch, void *args) {
    change_if<struct row_norm_args>(launch, "k_row_norm", args, [](auto &a) {
        for (int i = 0; i < 2; i++) a.whole[i] = a.n[i];
    });
}
static void copies_counted(const char *launch, void *args) {
    change_if<struct row_norm_args>(launch, "k_row_norm", args, [](auto &a) { a.counted[1] = true; });
}

static void change_index(const char *launch, void *args, void (*f)(struct index_args &a)) {
    for (const char *kernel : {"k_index_store", "index_scores", "index_choose"})
        change_if<struct index_args>(launch, kernel, args, f);
}
static void other_pairs(const char *launch, void *args) {
    change_index(launch, args, [](index_args &a) { a.rope.pairs = !a.rope.pairs; });
}
static void head_dropped(const char *launch, void *args) {
    change_if<struct index_args>(launch, "index_scores", args, [](auto &a) { a.rope.n_head--; });
}
static void choice_off_by_one(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.chosen += a.top_k > 0; });
}

static void other_list(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.chosen += a.top_k && a.n_head_kv > 1 ? a.listed : 0; });
}
static void local_dropped(const char *launch, void *args) {
    change_if<struct index_args>(launch, "index_choose", args, [](auto &a) { a.local = 0; });
}
static void queries_not_normed(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_store", args, [](auto &a) { a.rope.q_norm = NULL; });
}

template <class F>
static void change_streams(const char *launch, void *args, F f) {
    change_if<struct streams_args>(launch, "k_streams_mix", args, f);
}
template <class F>
static void change_shared(const char *launch, void *args, F f) {
    change_attention(launch, args, [&](auto &a) {
        if (a.one_kv) f(a);
    });
}
static void streams_exchanged(const char *launch, void *args) {
    static std::vector<float> fn;
    change_streams(launch, args, [](auto &a) {
        const size_t n = (size_t)a.n, rows = (size_t)a.n_row * GPU_STREAMS;
        if (!a.fn) return;
        fn.resize(rows * n);
        for (size_t i = 0; i < rows; i++) memcpy(&fn[i * n], a.fn + (i < 2 ? i ^ 1 : i) * n, n * sizeof(float));
        a.fn = fn.data();
    });
}
static void next_coefficients(const char *launch, void *args) {
    change_streams(launch, args, [](auto &a) { a.mix += a.delta != NULL; });
}
static void shared_window_longer(const char *launch, void *args) {
    change_shared(launch, args, [](auto &a) { a.window++; });
}
static void shared_window_shorter(const char *launch, void *args) {
    change_shared(launch, args, [](auto &a) { a.window--; });
}
static void shared_sinks_missing(const char *launch, void *args) {
    change_shared(launch, args, [](auto &a) { a.sinks = NULL; });
}
static void not_rotated_back(const char *launch, void *args) {
    change_shared(launch, args, [](auto &a) { a.rope.rope = 0; });
}
static void key_seen_early(const char *launch, void *args) {
    change_shared(launch, args, [](auto &a) { a.ratio -= a.ratio == 128; });
}
static void shared_choice_off_by_one(const char *launch, void *args) {
    change_shared(launch, args, [](auto &a) { a.chosen += a.top_k > 0; });
}
static void change_compressors(const char *launch, void *args, void (*f)(struct compress_args &c)) {
    change_if<struct shared_args>(launch, "k_shared_store", args, [&](auto &a) {
        for (int i = 0; i < a.n_with; i++) f(a.with[i]);
    });
}
static void next_offsets(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) { c.ape += c.ring.width / 2; });
}
static void other_gates_of_keys(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) { c.gate = c.value; });
}
static void keys_not_rounded(const char *launch, void *args) {
    change_if<struct shared_args>(launch, "k_shared_store", args, [](auto &a) { a.qat = false; });
}
static void table_of_another_layer(const char *launch, void *args) {
    static const int32_t *last;
    change_route(launch, args, [](auto &a) {
        const int32_t *own = a.given;
        if (own && last) a.given = last;
        if (own) last = own;
    });
}

/* Mistakes of the host, and the test that finds them. */
static const struct {
    const char *test, *what;
    void (*change)(const char *launch, void *args); /* NULL: cuda_test_sums */
} mistakes[] = {{"feed-forwards", "the biases of experts are added on every rank", NULL},
                {"feed-forwards", "gate is limited before SiLU", limit_before_silu},
                {"feed-forwards", "the router's bias is in the weights", bias_in_weights},
                {"feed-forwards", "softmax over all experts", softmax_over_all},
                {"windows", "windows are longer by a key", window_longer},
                {"windows", "windows are shorter by a key", window_shorter},
                {"windows", "sinks are missing where splits are joined", sinks_without_splits},
                {"windows", "every split adds the sink", sinks_by_split},
                {"windows", "sinks are scaled as scores are", scaled_sinks},
                {"windows", "a ring is read beyond its end", rings_read_on},
                {"windows", "a ring is written beyond its end", rings_written_on},
                {"windows", "another half of the values is rotated", other_halves},
                {"windows", "gates have the other function", other_gates},
                {"links", "the rows of a rank are normed by themselves", rows_of_ranks},
                {"links", "copies of KV heads are counted", copies_counted},
                {"sparse", "the indexer rotates other pairs", other_pairs},
                {"sparse", "a head of the indexer is missing", head_dropped},
                {"sparse", "chosen keys begin with the second", choice_off_by_one},
                {"sparse", "a KV head sees the blocks of another", other_list},
                {"sparse", "a query does not always see its own block", local_dropped},
                {"sparse", "the indexer's queries are not normed", queries_not_normed},
                {"feed-forwards", "gate is limited after SiLU", limit_behind_silu},
                {"streams", "two streams are exchanged", streams_exchanged},
                {"streams", "streams have the coefficients of the next", next_coefficients},
                {"streams", "windows are longer by a key", shared_window_longer},
                {"streams", "windows are shorter by a key", shared_window_shorter},
                {"streams", "sinks are missing", shared_sinks_missing},
                {"streams", "results are not rotated back", not_rotated_back},
                {"streams", "a compressed key is seen a token early", key_seen_early},
                {"streams", "chosen keys begin with the second", shared_choice_off_by_one},
                {"streams", "tokens of a key have the offsets of the next", next_offsets},
                {"streams", "a key's values are its gates", other_gates_of_keys},
                {"streams", "keys are not rounded as in training", keys_not_rounded},
                {"streams", "experts are those of another layer's table", table_of_another_layer}};

/* Barriers whose absence no schedule of the emulator's can show: the function, the line's text, and why they are there.
 * */
static const struct {
    const char *function, *text, *why;
} unshown[] = {
    {"k_delta_scan", "__syncwarp(); /* the warp's rows of the queries and of the keys' rest have landed */",
     "ldmatrix stands in between; it waits for all lanes, but does not order memory"},
    {"k_index_store", "__syncwarp(); /* the row is normed */",
     "a shuffle stands in between; it waits for all lanes, but does not order memory"},
    {"k_repack", "grid_dependency_wait();",
     "in front of it is always a copy, the clearing of memory or itself, which has ended when it starts"},
    {"k_mma_rate", "grid_dependency_wait();", "it reads and writes nothing"},
    {"k_probe", "grid_dependency_wait();", "it alone writes its answer, into memory that nobody else has"},
};

struct mutation {
    cuemu::barrier_site site;
    uint64_t count[MUTANT_TESTS]; /* executions by each test */
    std::string function, text;   /* without arguments of templates; the source line */
    pid_t pid;
    int mistake; /* 1: the first of `mistakes`, in place of a barrier */
};

/* In a child: runs the tests that reach the barrier, without it; or with the mistake. */
[[noreturn]] static void run_mutant(const mutation &m) {
    if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(2);
    alarm(MUTANT_SECONDS);
    mutant = true, cuemu::deadlock_seconds = 3;
    if (m.site.line) cuemu::skip(m.site.file, m.site.line, m.site.kind);
    if (m.mistake) {
        cuemu::change_argument = mistakes[m.mistake - 1].change;
        cuda_test_sums = !cuemu::change_argument;
    }
    for (int round = 0; round < MUTANT_ROUNDS; round++) {
        seed_offset = 1000 * (uint64_t)round;
        for (int i = 0; i < MUTANT_TESTS; i++) {
            if (!m.count[i]) continue;
            mutant_tests[i].fn();
            if (cuda_test_failures()) _exit(1);
        }
    }
    _exit(0);
}

/* The lines of moe_cuda.cu; the tests run at the top of the tree. */
static std::vector<std::string> source_lines() {
    std::vector<std::string> lines(1);
    FILE *f = fopen("moe_cuda.cu", "r");
    if (!f) rank_fatal("cannot read moe_cuda.cu: run at the top of the tree");
    for (int c; (c = fgetc(f)) != EOF;) {
        if (c == '\n') lines.emplace_back();
        else if (c != ' ' || !lines.back().empty()) lines.back() += (char)c;
    }
    fclose(f);
    return lines;
}

/* One run of all tests: which barriers there are, and who reaches them. The first mutation is none: it has to live. */
static std::vector<mutation> find_mutations() {
    std::vector<mutation> all = {
        {{"", 0, "", "nothing", 0, false}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, "", "", 0, 0}};
    for (int i = 0; i < (int)(sizeof mistakes / sizeof *mistakes); i++) {
        all.push_back({{"", 0, "", "mistake", 0, false}, {}, mistakes[i].test, mistakes[i].what, 0, i + 1});
        for (int k = 0; k < MUTANT_TESTS; k++) all.back().count[k] = !strcmp(mutant_tests[k].name, mistakes[i].test);
    }
    std::vector<std::string> lines = source_lines();
    for (int i = 0; i < MUTANT_TESTS; i++) {
        std::vector<cuemu::barrier_site> before = cuemu::barriers();
        timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        mutant_tests[i].fn();
        clock_gettime(CLOCK_MONOTONIC, &b);
        printf("%-10s %6.2f s\n", mutant_tests[i].name,
               (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec));
        std::vector<cuemu::barrier_site> now = cuemu::barriers();
        for (size_t k = 0; k < now.size(); k++) {
            std::string file = now[k].file;
            if (file.size() < 11 || file.compare(file.size() - 11, 11, "moe_cuda.cu")) continue;
            mutation *m = nullptr;
            for (mutation &x : all)
                if (x.site.line == now[k].line && !strcmp(x.site.kind, now[k].kind)) m = &x;
            std::string function = now[k].function;
            if (!m)
                all.push_back(
                    {now[k], {}, function.substr(0, function.find('<')), lines.at((size_t)now[k].line - 1), 0, 0}),
                    m = &all.back();
            m->count[i] = now[k].count - (k < before.size() ? before[k].count : 0);
        }
    }
    for (size_t i = 0; i < lines.size(); i++) { /* calls after the instructions' definitions */
        bool call = false, seen = false;
        for (const char *name :
             {"__syncthreads(", "__syncwarp(", "named_barrier(", "cp_async_wait<", "grid_dependency_wait("})
            call |= lines[i].find(name) != std::string::npos && lines[i].compare(0, 6, "DEVICE");
        for (const mutation &m : all) seen |= m.site.line == (int)i + 1;
        expect(!call || seen, "no test reaches line %zu: %s", i + 1, lines[i].c_str());
    }
    return all;
}

/* Runs every mutant, as many at a time as there are processors. 0: all die, or are known to live. */
extern "C" int cuda_test_mutate(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    std::vector<mutation> all = find_mutations();
    std::vector<bool> explained(sizeof unshown / sizeof *unshown);
    int known = 0, lives = 0;
    if (cuda_test_failures()) return puts("there are failures without a mutation"), 1;
    long running = 0, most = sysconf(_SC_NPROCESSORS_ONLN);
    for (size_t next = 0; next < all.size() || running;) {
        if (next < all.size() && running < most) {
            mutation &m = all[next++];
            fflush(stdout);
            if (!(m.pid = fork())) run_mutant(m);
            if (m.pid < 0) rank_fatal("cannot start a process");
            running++;
            continue;
        }
        int status = 0;
        pid_t pid = wait(&status);
        running--;
        for (mutation &m : all) {
            if (m.pid != pid) continue;
            const char *why = nullptr;
            for (size_t i = 0; i < explained.size() && !status && !m.mistake; i++)
                if (m.text == unshown[i].text && m.function == unshown[i].function)
                    why = unshown[i].why, explained[i] = true;
            if (!m.site.line && !m.mistake) {
                lives += status != 0;
                printf("%-6s with all barriers, %d schedules\n", status ? "DIES" : "lives", (int)MUTANT_ROUNDS);
                continue;
            }
            const char *end = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "wrong results";
            known += why != nullptr, lives += !status && !why;
            printf("%-6s %5d %-20s %-21s %s\n",
                   status ? "dies"
                   : why  ? "known"
                          : "LIVES",
                   m.site.line, m.function.c_str(), m.site.kind,
                   m.mistake ? m.text.c_str()
                   : status  ? end
                   : why     ? why
                             : m.text.c_str());
        }
    }
    for (size_t i = 0; i < explained.size(); i++)
        if (!explained[i]) lives++, printf("STALE  %s: %s\n", unshown[i].function, unshown[i].text);
    const size_t n_mistake = sizeof mistakes / sizeof *mistakes;
    printf("%zu barriers, %d known to be invisible, %zu mistakes, %d failures\n", all.size() - 1 - n_mistake, known,
           n_mistake, lives);
    return lives != 0;
}
