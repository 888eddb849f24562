/* Times decode: what it costs to hand over from kernel to kernel, forwards with each part of the engine that can be
 * switched on and off, and batches of up to 16 tokens. Prints tables in Markdown. All switches must give the same bits:
 * on the simulator this file is part of test_cuda.cu, and the test cuda/decode-bench compares them with tiny shapes. */
#ifndef SIMULATED
#include "../moe_cuda.cu"
#endif

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

extern "C" {
/* The other half, in C: bench_decode.c, on the simulator t_cuda.h. */

/* Makes shape number `shape` of those that are timed, with n_layer layers at most. Returns how many the whole shape
 * has; 0: there is no such shape. */
int bench_decode_model(struct model *m, int shape, int n_layer, char name[64]);
void bench_decode_free(struct model *m);
}

namespace bench_decode {

/* What is switched. The first one is how the engine runs. */
static const struct setting {
    const char *name;
    enum launching launching;
    bool overlap, fused,
        prefetch; /* launches overlap; norms are made by their consumers; weights are requested into L2 */
} settings[] = {{"all on", LAUNCHES_OVERLAP, true, true, true},
                {"launches do not overlap", LAUNCHES_RECORDED, false, true, true},
                {"not recorded", LAUNCHES_EAGER, true, true, true},
                {"neither recorded nor overlapping", LAUNCHES_EAGER, false, true, true},
                {"norms in kernels of their own", LAUNCHES_OVERLAP, true, false, true},
                {"no requests into L2", LAUNCHES_OVERLAP, true, true, false},
                {"norms of their own, no requests", LAUNCHES_OVERLAP, true, false, false},
                {"all off", LAUNCHES_EAGER, false, false, false}};
enum { SETTINGS = sizeof settings / sizeof *settings };

static const int batches[] = {1, 2, 4, 8, DECODE_MAX_TOKENS}; /* tokens of a forward */
#ifdef SIMULATED
enum { CHAIN = 6, ROUNDS = 1, WARM = 0, RUNS = 1, DEPTH = 40, BUSY_TURNS = 1, BUSY_MS = 0, HOLD_TURNS = 1 };
static const int switched[] = {2};
#else
enum {
    CHAIN = 256,   /* kernels of a chain behind the first */
    ROUNDS = 5,    /* of all settings, one after the other, so that a drift of the clocks meets all of them, */
    WARM = 2,      /* with so many forwards that are not counted */
    RUNS = 10,     /* and so many that are */
    DEPTH = 32768, /* tokens of a long context */
    BUSY_TURNS = 1 << 14,
    BUSY_MS = 500,   /* of work before the first measurement, so that the clocks are up */
    HOLD_TURNS = 512 /* of work in front of a forward, about 0.2 ms */
};
static const int switched[] = {1, 4}; /* tokens of a forward with switches */
#endif
/* Tokens before those of a forward. Not zero: a recurrent state always has as many to absorb as a forward has. */
static const int contexts[] = {DECODE_MAX_TOKENS, DEPTH};

static void demand(cudaError_t e) {
    if (e != cudaSuccess) rank_fatal(cudaGetErrorString(e));
}

/* A quartile of x: 2 is the median. */
static double quartile(std::vector<double> x, int q) {
    std::sort(x.begin(), x.end());
    return x[(size_t)q * (x.size() - 1) / 4];
}

/* ---- the cost of handing over ---- */

/* Each block counts, after the block of the kernel in front that did. */
__global__ void k_chain(int *count) {
    grid_dependency_launch();
    grid_dependency_wait();
    if (!threadIdx.x) count[blockIdx.x]++;
}

/* Chains of kernels on a stream. */
struct chains {
    cudaStream_t stream = NULL;
    int *count = NULL; /* by block */
    bool bad = false;

    /* Median microseconds of n kernels; NAN: the driver refuses them. */
    double us(unsigned blocks, int n, bool recorded) {
        struct stopwatch watch(stream);
        cudaGraph_t g = NULL;
        cudaGraphExec_t graph = NULL;
        std::vector<double> t;
        std::vector<int> counted(blocks);
        auto launch = [&] {
            for (int i = 0; i < n; i++) LAUNCH_PDL(k_chain, blocks, 256, 0, stream, count);
            watch.ok(cudaGetLastError());
        };
        demand(cudaMemsetAsync(count, 0, blocks * sizeof *count, stream));
        if (recorded && watch.ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal))) {
            launch();
            watch.ok(cudaStreamEndCapture(stream, &g));
            if (!watch.error) watch.ok(cudaGraphInstantiate(&graph, g, 0));
            if (g) cudaGraphDestroy(g);
        }
        for (int i = -WARM; i < ROUNDS * RUNS && !watch.error; i++) {
            watch.mark(0);
            if (graph) watch.ok(cudaGraphLaunch(graph, stream));
            else launch();
            watch.mark(1);
            const double seconds = watch.seconds();
            if (i >= 0) t.push_back(seconds * 1e6);
        }
        if (graph) cudaGraphExecDestroy(graph);
        if (watch.error) return bad = true, errors_clear(), NAN;
        demand(cudaMemcpy(counted.data(), count, blocks * sizeof *count, cudaMemcpyDeviceToHost));
        for (int x : counted) bad |= x != n * (WARM + ROUNDS * RUNS);
        return quartile(t, 2);
    }
};

/* Prints what the first kernel of a chain takes, from the call of its launch on, and each further one. True: every
 * kernel saw what the one in front of it wrote. */
static bool hand_over(FILE *out, const struct gpu_facts &f) {
    const unsigned grids[] = {1, 2 * (unsigned)f.n_sm};
    const bool overlaps = f.major >= 9;
    bool good = true;
    struct chains c;
    demand(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking));
    demand(cudaMalloc((void **)&c.count, grids[1] * sizeof *c.count));
    const double from = now_seconds();
    do {
        LAUNCH_PDL(k_mma_rate, grids[1], 512, 0, c.stream, (int)BUSY_TURNS, (float *)NULL);
        LAUNCH_PDL(k_chain, 1, 256, 0, c.stream, c.count); /* is loaded before it is recorded */
        demand(cudaStreamSynchronize(c.stream));
    } while (now_seconds() - from < 1e-3 * BUSY_MS);
    fprintf(out,
            "### Handing over from kernel to kernel\n\nKernels of 256 threads a block that do nothing but count.\n\n"
            "| launches | first, 1 block, us | each further, us | first, %u blocks, us | each further, us | order |\n"
            "|---|---|---|---|---|---|\n",
            grids[1]);
    for (int way = 0; way < 4; way++) {
        const bool overlap = !(way & 1), recorded = way < 2;
        double t[4];
        if (overlap && !overlaps) continue;
        launches_overlap = overlap;
        c.bad = false;
        for (int i = 0; i < 4; i++) t[i] = c.us(grids[i / 2], i & 1 ? 1 + CHAIN : 1, recorded);
        fprintf(out, "| %s%s | %.2f | %.2f | %.2f | %.2f | %s |\n", recorded ? "recorded" : "kernel by kernel",
                overlap ? ", overlapping" : "", t[0], (t[1] - t[0]) / CHAIN, t[2], (t[3] - t[2]) / CHAIN,
                c.bad ? "WRONG" : "right");
        good &= !c.bad;
    }
    fprintf(out, "\n");
    cudaFree(c.count);
    cudaStreamDestroy(c.stream);
    return good;
}

/* ---- decode ---- */

struct times {
    std::vector<double> layers, head; /* microseconds of each forward: of the layers, and of the logits behind them */
    double spread() const { return 100 * (quartile(layers, 3) - quartile(layers, 1)) / quartile(layers, 2); }
};

/* A shape on the GPU. */
struct decoder {
    FILE *out;
    bool overlaps;
    char name[64] = "";
    int n_whole = 0; /* layers of the whole shape */
    bool bad = false;
    struct model m = {};
    struct rank r = {};
    int l2_bytes = 0;
    uint32_t random = 1;
    cudaEvent_t event[3] = {};

    decoder(FILE *f, bool o) : out(f), overlaps(o) {
        for (cudaEvent_t &e : event) demand(cudaEventCreate(&e));
    }
    ~decoder() {
        for (cudaEvent_t &e : event) cudaEventDestroy(e);
        if (!r.cuda) return;
        r.ops->close(&r);
        bench_decode_free(&m);
    }

    /* Opens a shape, with as many of eight layers as fit. False: there is no such shape, or even one layer does not
     * fit, which is bad. */
    bool open(int shape) {
        char err[ERR_MAX] = "";
        struct cuda_options o = {};
        o.n_ctx = DEPTH + DECODE_MAX_TOKENS;
        o.kv = KV_FP8;
        for (int n_layer = 8; n_layer; n_layer /= 2) {
            m = {}, r = {};
            if (!(n_whole = bench_decode_model(&m, shape, n_layer, name))) return false;
            if (!cuda_rank_start(&r, &m, &o, err)) return l2_bytes = r.cuda->l2_bytes, true;
            bench_decode_free(&m);
        }
        fprintf(out, "### %s\n\nFAILED: %s\n\n", name, err);
        return bad = true, r.cuda = NULL, false;
    }

    /* Switches. Forwards are recorded anew. */
    void set(const struct setting &s) {
        struct cuda *c = r.cuda;
        r.ops->wait(&r);
        for (cudaGraphExec_t &g : c->graph[PASS_FORWARD][0]) {
            if (g) demand(cudaGraphExecDestroy(g));
            g = NULL;
        }
        c->launching = s.launching;
        c->fuses_norms = s.fused;
        c->l2_bytes = s.prefetch ? l2_bytes : 0;
        launches_overlap = s.overlap && overlaps;
    }

    /* Enqueues a forward of n random tokens behind `context` others, of which recurrent states lack `lag`. */
    void forward(int context, int n, int lag) {
        for (int i = 0; i < n; i++) {
            random = random * 1664525 + 1013904223;
            r.tokens[i] = (int32_t)((random >> 8) % (uint32_t)m.n_vocab);
        }
        const struct run run = {0, 0, n, context, context - lag, 0};
        rank_batch(&r, &run, 1);
        r.ops->forward(&r);
    }

    /* Logits of n tokens behind others that the cache holds and n that are computed before. */
    std::vector<float> logits(int context, int n) {
        std::vector<float> all;
        for (int k = 0; k < CACHE_USES * m.n_layer; k++) {
            const struct cache_tensor &p = r.cache[k / CACHE_USES][k % CACHE_USES];
            if (cache_is_snapshot(&p))
                demand(cudaMemsetAsync(p.data, 0, (size_t)p.n_row * p.row_bytes, r.cuda->stream));
        }
        random = 2;
        forward(context - n, n, 0);
        forward(context, n, n);
        r.ops->logits(&r, r.m->output_norm, &r.m->output, 0, n);
        for (int i = 0; i < n; i++) {
            const float *row = r.ops->read_logits(&r, i);
            all.insert(all.end(), row, row + m.n_vocab);
        }
        return all;
    }

    /* Adds the times of some forwards. Each begins when the one before it and its logits have ended. */
    void time(int context, int n, struct times &t) {
        random = 1;
        for (int i = -WARM; i < RUNS; i++) {
            float ms[2];
            /* The forward is launched while this runs, as in a chat, where the next forward is enqueued early. */
            LAUNCH_PDL(k_mma_rate, 2 * r.cuda->n_sm, 512, 0, r.cuda->stream, (int)HOLD_TURNS, (float *)NULL);
            demand(cudaEventRecord(event[0], r.cuda->stream));
            forward(context, n, n);
            demand(cudaEventRecord(event[1], r.cuda->stream));
            r.ops->logits(&r, r.m->output_norm, &r.m->output, 0, n);
            demand(cudaEventRecord(event[2], r.cuda->stream));
            r.ops->wait(&r);
            for (int k = 0; k < 2; k++) demand(cudaEventElapsedTime(&ms[k], event[k], event[k + 1]));
            if (i < 0) continue;
            t.layers.push_back(ms[0] * 1e3);
            t.head.push_back(ms[1] * 1e3);
        }
    }

    /* Returns the kernels of a forward. *bytes: what they move. */
    int kernels(int context, int n, double *bytes) {
        struct call {
            struct decoder *d;
            int context, n;
        } call = {this, context, n};
        auto body = [](void *arg) {
            const struct call *c = (const struct call *)arg;
            c->d->forward(c->context, c->n, c->n);
        };
        std::vector<struct profile_row> rows(64 * (size_t)(m.n_layer + 1));
        const int n_row = r.ops->profile(&r, body, &call, rows.data(), (int)rows.size());
        *bytes = 0;
        for (int i = 0; i < n_row; i++) *bytes += rows[(size_t)i].bytes;
        return n_row;
    }

    void switches() {
        fprintf(out, "| context | tokens | switches | layers, us | spread, %% | a layer, us | against all on, %% |"
                     " kernels | head, us | logits |\n|---|---|---|---|---|---|---|---|---|---|\n");
        for (int context : contexts)
            for (int n : switched) {
                struct times t[SETTINGS];
                std::vector<float> want;
                const char *same[SETTINGS];
                int n_kernel[SETTINGS];
                for (int round = 0; round < ROUNDS; round++)
                    for (int i = 0; i < SETTINGS; i++) {
                        double bytes;
                        set(settings[i]);
                        if (!round) { /* recorded here, before it is timed */
                            const std::vector<float> got = logits(context, n);
                            if (!i) want = got;
                            const bool equal = !memcmp(got.data(), want.data(), got.size() * sizeof(float));
                            same[i] = r.cuda->launching != settings[i].launching ? "NOT RECORDED"
                                      : equal                                    ? "same bits"
                                                                                 : "OTHER BITS";
                            bad |= !equal || r.cuda->launching != settings[i].launching;
                            n_kernel[i] = kernels(context, n, &bytes);
                        }
                        time(context, n, t[i]);
                    }
                const double all_on = quartile(t[0].layers, 2);
                for (int i = 0; i < SETTINGS; i++) {
                    const double us = quartile(t[i].layers, 2);
                    fprintf(out, "| %d | %d | %s | %.1f | %.1f | %.2f | %+.1f | %d | %.1f | %s |\n", context, n,
                            settings[i].name, us, t[i].spread(), us / m.n_layer, 100 * us / all_on - 100, n_kernel[i],
                            quartile(t[i].head, 2), same[i]);
                }
            }
        fprintf(out, "\n");
        set(settings[0]);
    }

    void batch_sizes() {
        const double rate = r.ops->measure(&r).bytes;
        fprintf(out,
                "Batches, all on; copies within the memory: %.1f GB/s.\n\n"
                "| context | tokens | layers, us | spread, %% | a layer, us | a kernel, us | a token, us | MB | GB/s |"
                " %% of copies | head, us |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
                rate * 1e-9);
        for (int context : contexts)
            for (int n : batches) {
                struct times t;
                double bytes;
                const int n_kernel = kernels(context, n, &bytes);
                for (int round = 0; round < ROUNDS; round++) time(context, n, t);
                const double us = quartile(t.layers, 2), head = quartile(t.head, 2);
                fprintf(out, "| %d | %d | %.1f | %.1f | %.2f | %.2f | %.1f | %.1f | %.1f | %.1f | %.1f |\n", context, n,
                        us, t.spread(), us / m.n_layer, us / n_kernel, us / n, bytes * 1e-6, bytes / us * 1e-3,
                        100 * bytes / us * 1e6 / rate, head);
            }
        fprintf(out, "\n");
    }
};

/* Prints all tables. False: something differs that must not, or cannot be measured. */
static bool run(FILE *out) {
    char err[ERR_MAX];
    struct gpu_facts f;
    if (!cuda_device_count(err)) return fprintf(stderr, "bench_decode: %s\n", err), false;
    if (const char *why = cuda_facts(0, &f, false)) return fprintf(stderr, "bench_decode: %s\n", why), false;
    fprintf(out, "%s, %d multiprocessors, %s\n\n", f.label, f.n_sm, f.image);
    bool good = hand_over(out, f);
    for (int shape = 0;; shape++) {
        struct decoder d(out, f.major >= 9);
        const bool open = d.open(shape);
        good &= !d.bad;
        if (!d.n_whole) return good;
        if (!open) continue;
        fprintf(out, "### %s: %d of %d layers\n\n%.2f GiB of weights, cache FP8, L2 %.0f MiB\n\n", d.name, d.m.n_layer,
                d.n_whole, (double)d.r.weight_bytes / 0x1p30, d.l2_bytes / 0x1p20);
        d.switches();
        d.batch_sizes();
        good &= !d.bad;
    }
}

} // namespace bench_decode

#ifdef SIMULATED
/* Checks that each switch does what it says. */
static void check_settings() {
    double bytes;
    int fused = 0;
    bench_decode::decoder d(stdout, true);
    if (!expect(d.open(0), "the shape does not open")) return;
    for (const bench_decode::setting &s : bench_decode::settings) {
        bool any = false, overlap = true;
        d.set(s);
        sim_log_prefetches(true);
        d.forward(16, 1, 1);
        d.r.ops->wait(&d.r);
        any = sim_prefetches() > 0;
        sim_log_prefetches(false);
        expect(any == s.prefetch, "%s: weights are%s requested", s.name, any ? "" : " not");
        const cudaGraphExec_t graph = d.r.cuda->graph[PASS_FORWARD][0][1];
        expect((graph != NULL) == (s.launching != LAUNCHES_EAGER), "%s: recorded or not", s.name);
        if (graph) {
            int overlapping, launches = sim_graph_launches(graph, &overlapping);
            overlap = overlapping == launches;
        }
        expect(!graph || overlap == s.overlap, "%s: launches overlap or not", s.name);
        const int n = d.kernels(16, 1, &bytes);
        if (!fused) fused = n;
        expect(s.fused ? n == fused : n > fused, "%s: %d kernels, all on %d", s.name, n, fused);
    }
}

extern "C" void cuda_test_decode_bench(void) {
    char *text = NULL;
    size_t size = 0;
    begin_test(0);
    check_settings();
    FILE *f = open_memstream(&text, &size);
    const bool good = bench_decode::run(f);
    fclose(f);
    auto lines = [&](const std::string &part) {
        int n = 0;
        for (const char *p = text; (p = strstr(p, part.c_str())) != NULL; p += part.size()) n++;
        return n;
    };
    expect(good && !lines("OTHER BITS") && !lines("NOT RECORDED") && !lines("WRONG"), "the results differ:\n%s", text);
    const int n_shape = lines(" layers\n"), all = 2 * n_shape;
    expect(n_shape == 3, "%d shapes", n_shape);
    for (const char *way :
         {"| recorded, overlapping |", "| recorded |", "| kernel by kernel, overlapping |", "| kernel by kernel |"})
        expect(lines(way) == 1, "rows of '%s': %d", way, lines(way));
    for (const bench_decode::setting &s : bench_decode::settings) {
        const std::string row = std::string("| ") + s.name + " |";
        expect(lines(row) == all, "rows of '%s': %d of %d", s.name, lines(row), all);
    }
    for (int n : bench_decode::batches) {
        const std::string row = "\n| 40 | " + std::to_string(n) + " | ";
        const int want = n_shape * (n == bench_decode::switched[0] ? 1 + bench_decode::SETTINGS : 1);
        expect(lines(row) == want, "rows of %d tokens: %d of %d", n, lines(row), want);
    }
    expect(!lines("nan") && !lines("inf"), "the tables lack numbers:\n%s", text);
    free(text);
}
#else
int main() {
    setvbuf(stdout, NULL, _IOLBF, 0); /* what was measured is printed if it takes too long */
    return !bench_decode::run(stdout);
}
#endif
