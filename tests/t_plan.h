/* --plan: what it counts against arithmetic by hand, its verdicts, where the model may come from. */

/* The JSON of a plan; the caller decrefs it. NULL after a failed check. Without --host no experts are in host memory,
 * whatever this machine has. */
static json_t *plan_of(const char *args, int code) {
    char cmd[512], *out = NULL, *err = NULL;
    snprintf(cmd, sizeof cmd, MOE_BIN " --plan --json %s%s </dev/null", args,
             strstr(args, "--host") ? "" : " -fit off");
    int rc = run_command(cmd, &out, &err);
    json_t *o = json_loads(sb_cstr(&out), JSON_REJECT_DUPLICATES, NULL);
    CHECK(rc == code && o && !arrlen(err), "`%s` gave %d, expected %d: %.200s%.200s", cmd, rc, code, sb_cstr(&err),
          o ? "" : sb_cstr(&out));
    arrfree(out);
    arrfree(err);
    return o;
}

static int64_t plan_int(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    CHECK(json_is_integer(v), "'%s' is not an integer", key);
    return json_integer_value(v);
}

static double plan_real_of(const json_t *o, const char *key) { return json_real_value(json_object_get(o, key)); }

static bool plan_says(const json_t *o, const char *key, const char *value) {
    const char *s = json_string_value(json_object_get(o, key));
    return CHECK(s && !strcmp(s, value), "'%s' is '%s', expected '%s'", key, s ? s : "none", value);
}

static const json_t *plan_rank_of(const json_t *o, size_t i) {
    const json_t *r = json_array_get(json_object_get(o, "ranks"), i);
    CHECK(r != NULL, "there is no rank %zu", i);
    return r;
}

/* The published shapes (config.json of the releases); MLA where there is a latent. */
struct published {
    const char *name;
    int layers, hidden, heads, kv_heads, experts, used, width, vocab, context;
    int dense_layers, dense_width, q_rank; /* MLA: 64 rotary dimensions, latents of 512, one shared expert */
    int nope, value;                       /* MLA: dimensions of a head's key that are not rotated, of its value */
    int index_heads, top_k; /* an indexer in every layer: its heads and its one key have 128 dimensions */
};

static const struct published published[] = {
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 8, 768, 151936, 40960, 0, 0, 0, 0, 0, 0, 0},
    {"qwen3-235b-a22b", 94, 4096, 64, 4, 128, 8, 1536, 151936, 40960, 0, 0, 0, 0, 0, 0, 0},
    {"deepseek-v3", 61, 7168, 128, 128, 256, 8, 2048, 129280, 163840, 3, 18432, 1536, 128, 128, 0, 0},
    {"kimi-k2", 61, 7168, 64, 64, 384, 8, 2048, 163840, 131072, 1, 18432, 1536, 128, 128, 0, 0},
    {"deepseek-v3.2", 61, 7168, 128, 128, 256, 8, 2048, 129280, 163840, 3, 18432, 1536, 128, 128, 64, 2048},
    {"glm-5", 78, 6144, 64, 64, 256, 8, 2048, 154880, 202752, 3, 12288, 2048, 192, 256, 32, 2048},
};

/* Of n things that are dealt out in units, the larger shares first, those of rank r of n_rank. */
static int64_t dealt(int64_t n, int64_t unit, int64_t n_rank, int64_t r) {
    return (n / unit / n_rank + (r < n / unit % n_rank)) * unit;
}

struct by_hand {
    int64_t weights, copied; /* bytes of a GPU; of what every GPU of its stage has alike */
    int64_t experts, head;   /* bytes of it that a token reads */
    int64_t cache;           /* bytes per token of context */
    int64_t prediction;      /* of the weights, those of an MTP layer */
    int64_t rounding;        /* bytes that the driver adds to allocations of more than 1 MiB, in pieces of 2 MiB */
};

static int64_t rounding_by_hand(int64_t bytes) { return bytes > 1 << 20 ? -bytes & ((2 << 20) - 1) : 0; }

/* Bytes of n weights of 4, 8 or 16 bits. NVFP4 has 4 bytes of scales for 64 weights and Q8_0 2 for 32, in an allocation
 * of their own; BF16 has none. */
static int64_t matrix_by_hand(struct by_hand *h, int bits, int64_t n) {
    const int64_t codes = n * bits / 8, scales = bits < 16 ? n / 16 : 0;
    h->rounding += rounding_by_hand(codes) + rounding_by_hand(scales);
    return codes + scales;
}

/* Bytes of an indexer's key in the cache: in FP8 with a scale, or in BF16. */
static int64_t index_key_by_hand(const struct published *p, bool fp8) {
    return !p->index_heads ? 0 : fp8 ? 128 + 4 : 2 * 128;
}

/* Bytes of a token in the cache of a layer with latent attention without an indexer's key: in FP8 latents, a scale for
 * each 128 of them and rotary keys in BF16; or all of it in BF16. */
static int64_t latent_by_hand(bool fp8) { return fp8 ? 512 + 4 * 4 + 64 * 2 : 2 * (512 + 64); }

/* Rank r of tp in a stage of layers first..first+n-1; predicts: and of the MTP layer, which has experts. */
static struct by_hand count_by_hand(const struct published *p, bool q8, bool fp8, int64_t experts, int64_t tp,
                                    int64_t r, int64_t first, int64_t n, bool predicts) {
    struct by_hand h = {0};
    const int bits = q8 ? 8 : 16;
    int64_t d = p->hidden, width = dealt(p->width, 64, tp, r), dense = dealt(p->dense_width, 64, tp, r);
    int64_t heads = dealt(p->kv_heads, 1, tp, r) * (p->heads / p->kv_heads), kv = dealt(p->kv_heads, 1, tp, r);
    int64_t last = first + n == p->layers;
    for (int64_t il = first; il < first + n + predicts; il++) {
        const int64_t before = h.weights + h.copied;
        if (p->q_rank) {
            h.weights += matrix_by_hand(&h, bits, p->q_rank * heads * (p->nope + 64));
            h.weights += matrix_by_hand(&h, bits, heads * 512 * p->nope);
            h.weights += matrix_by_hand(&h, bits, heads * 512 * p->value);
            h.weights += matrix_by_hand(&h, bits, heads * p->value * d);
            h.copied += matrix_by_hand(&h, bits, d * p->q_rank) + matrix_by_hand(&h, bits, d * (512 + 64));
            h.copied += 4 * (2 * d + p->q_rank + 512);
            h.cache += latent_by_hand(fp8) + index_key_by_hand(p, fp8);
        } else {
            h.weights += matrix_by_hand(&h, bits, d * heads * 128) + matrix_by_hand(&h, bits, heads * 128 * d);
            h.weights += matrix_by_hand(&h, bits, d * kv * 128) + matrix_by_hand(&h, bits, d * kv * 128);
            h.copied += 4 * (2 * d + 2 * 128);
            h.cache += 2 * kv * (fp8 ? 128 + 4 : 2 * 128);
        }
        if (p->index_heads) { /* queries, a key with a norm and a bias; weights of the heads, which a GPU has as halves */
            h.copied += matrix_by_hand(&h, bits, p->q_rank * p->index_heads * 128) + matrix_by_hand(&h, bits, d * 128);
            h.copied += matrix_by_hand(&h, 16, d * p->index_heads) + 4 * 2 * 128;
        }
        if (il < p->dense_layers) { /* three matrices, a factor for each */
            for (int k = 0; k < 3; k++) h.weights += matrix_by_hand(&h, 4, d * dense);
            h.copied += 3 * 4;
            continue;
        }
        for (int k = 0; k < 3; k++) h.weights += matrix_by_hand(&h, 4, experts * d * width);
        h.copied += 3 * experts * 4 + d * experts * 4; /* factors, the router in F32 */
        h.rounding += rounding_by_hand(d * experts * 4);
        if (il < p->layers) h.experts += p->used * 3 * (d * width * 36 / 64 + 4);
        if (!p->q_rank) continue;
        for (int k = 0; k < 3; k++) h.weights += matrix_by_hand(&h, 4, d * width); /* the shared one */
        h.copied += 3 * 4 + experts * 4;
        if (il < p->layers) continue;
        h.weights += matrix_by_hand(&h, bits, 2 * d * d / tp); /* of both its inputs, and their norms */
        h.copied += 4 * 2 * d;
        h.prediction = h.weights + h.copied - before;
    }
    if (!first) h.copied += matrix_by_hand(&h, bits, d * p->vocab);
    if (last) h.head = matrix_by_hand(&h, bits, d * dealt(p->vocab, 64, tp, r));
    h.copied += 4 * d + 4 * (p->q_rank ? 64 : 128) / 2; /* the last norm, rotary frequencies */
    h.weights += h.head + h.copied;
    h.rounding +=
        (64ll << 21) + (n + predicts) * 1024; /* of the other allocations, and of cache tensors of the cache */
    return h;
}

/* Every rank of a plan against the hand; the sum of what they do not have alike. */
static int64_t check_by_hand(const json_t *o, const struct published *p, bool q8, bool fp8) {
    int64_t tp = plan_int(o, "tp"), pp = plan_int(o, "pp"), ctx = plan_int(o, "context"), at = 0, sum = 0;
    CHECK(json_array_size(json_object_get(o, "ranks")) == (size_t)(tp * pp), "%d ranks", (int)(tp * pp));
    for (int64_t i = 0; i < tp * pp; i++) {
        const json_t *r = plan_rank_of(o, (size_t)i), *reads = json_object_get(r, "reads");
        int64_t first = plan_int(r, "first_layer"), n = plan_int(r, "layers");
        const bool predicts = plan_int(r, "prediction") > 0;
        struct by_hand h = count_by_hand(p, q8, fp8, plan_int(o, "keep_experts"), tp, i % tp, first, n, predicts);
        const int64_t index = ctx * index_key_by_hand(p, fp8); /* of a layer */
        int64_t cache_reads = h.cache * ctx;
        if (p->index_heads)
            cache_reads = n * (latent_by_hand(fp8) * int_min((int)ctx, p->top_k) + (ctx > p->top_k ? index : 0));
        CHECK(first == at, "%s: rank %d begins with layer %d", p->name, (int)i, (int)first);
        if (i % tp == tp - 1) at += n;
        CHECK(plan_int(r, "weights") == h.weights, "%s: rank %d has %lld bytes of weights, by hand %lld", p->name,
              (int)i, (long long)plan_int(r, "weights"), (long long)h.weights);
        CHECK_INT(plan_int(r, "rounding"), h.rounding, "%s: rank %d", p->name, (int)i);
        CHECK(plan_int(r, "prediction") == h.prediction, "%s: rank %d has %lld bytes of predictions, by hand %lld",
              p->name, (int)i, (long long)plan_int(r, "prediction"), (long long)h.prediction);
        CHECK(plan_int(r, "cache") == h.cache * ctx && plan_int(reads, "cache") == cache_reads,
              "%s: rank %d has a cache of %lld bytes and reads %lld, by hand %lld, %lld", p->name, (int)i,
              (long long)plan_int(r, "cache"), (long long)plan_int(reads, "cache"), (long long)(h.cache * ctx),
              (long long)cache_reads);
        CHECK(plan_int(r, "index_keys") == (n + predicts) * index &&
                  plan_int(reads, "index_keys") == (ctx > p->top_k ? n * index : 0),
              "%s: rank %d has %lld bytes of keys of indexers and reads %lld, by hand %lld for a layer", p->name,
              (int)i, (long long)plan_int(r, "index_keys"), (long long)plan_int(reads, "index_keys"), (long long)index);
        CHECK(plan_int(reads, "experts") == h.experts && plan_int(reads, "head") == h.head,
              "%s: rank %d reads %lld of experts, %lld of the head, by hand %lld, %lld", p->name, (int)i,
              (long long)plan_int(reads, "experts"), (long long)plan_int(reads, "head"), (long long)h.experts,
              (long long)h.head);
        CHECK(plan_int(r, "sum") == plan_int(r, "weights") + plan_int(r, "cache") + plan_int(r, "scratch_about") +
                                        plan_int(r, "rounding") &&
                  plan_int(r, "free") == plan_int(r, "usable") - plan_int(r, "sum"),
              "%s: the sums of rank %d", p->name, (int)i);
        sum += h.weights - h.copied;
    }
    CHECK(at == p->layers, "%s: the stages have %d layers", p->name, (int)at);
    return sum;
}

/* qwen3.5-397b-a17b by hand: 45 layers with a gated delta net and 15 with attention, whose heads `tp` ranks divide. */
static void check_delta_by_hand(const json_t *o, int64_t tp) {
    const int64_t d = 4096, experts = 512, ff = 1024 / tp, kv = tp > 2 ? 1 : 2 / tp, ctx = plan_int(o, "context");
    const int64_t heads = 32 / tp, keys = 16 / tp, values = 64 / tp, rows = 3 + 2 * 16; /* of a ring */
    for (int64_t i = 0; i < tp; i++) {
        const json_t *r = plan_rank_of(o, (size_t)i);
        int64_t weights =
            2 * d * 248320 + 2 * d * (248320 / tp) + 4 * d + 4 * 32; /* embedding, output, norm, rotation */
        int64_t cache = 0;
        for (int il = 0; il < 60; il++) {
            weights += 4 * 2 * d + 4 * d * experts + 4 * d;            /* norms, router, shared gate */
            weights += (experts + 1) * (3 * d * ff * 36 / 64 + 3 * 4); /* NVFP4 and its factors */
            if (il % 4 == 3) {
                weights += 2 * d * (heads * 2 * 256 + 2 * kv * 256 + heads * 256) + 4 * 2 * 256;
                cache += 2 * kv * (256 + 4) * ctx;
                continue;
            }
            weights += 2 * d * (2 * keys * 128 + 3 * values * 128 + 2 * values); /* q, k; v, z, out; alpha, beta */
            weights += 4 * (4 * (2 * 16 + 64) * 128 + 2 * 64 + 128);             /* whole: taps, A, dt, norm */
            cache += 4 * rows * (2 * keys * 128 + values * 128 + 2 * values) + 4 * values * 128 * 128;
        }
        CHECK(plan_int(r, "weights") == weights, "rank %d has %lld bytes of weights, by hand %lld", (int)i,
              (long long)plan_int(r, "weights"), (long long)weights);
        CHECK(plan_int(r, "cache") == cache, "rank %d has %lld bytes of state, by hand %lld", (int)i,
              (long long)plan_int(r, "cache"), (long long)cache);
    }
}

static void test_plan_delta(void) {
    json_t *o = plan_of("--gpus 4x96 --spec-type none --synth qwen3.5-397b-a17b", 0);
    plan_says(o, "verdict", "fits");
    CHECK(plan_int(o, "tp") == 4 && plan_int(o, "context") == 262144, "--tp 4, the whole context");
    check_delta_by_hand(o, 4);
    json_decref(o);
    o = plan_of("--gpus 2x160@1792 -c 32768 --spec-type none --synth qwen3.5-397b-a17b", 0);
    CHECK(plan_int(o, "tp") == 2, "--tp 2");
    check_delta_by_hand(o, 2);
    json_decref(o);
}

/* Four GPUs of 96 GiB, with as many experts as fit; then all experts on larger ones, whose parts are together the
 * whole. */
static void test_plan_published(void) {
    for (size_t i = 0; i < sizeof published / sizeof *published; i++)
        for (int q8 = 0; q8 < 2; q8++) {
            const struct published *p = &published[i];
            char args[160];
            snprintf(args, sizeof args, "--gpus 4x96 --spec-type none --synth %s:backbone=%s", p->name,
                     q8 ? "q8_0" : "bf16");
            json_t *o = plan_of(args, i < 2 ? 0 : 1);
            check_by_hand(o, p, q8, true);
            CHECK(plan_int(plan_rank_of(o, 0), "usable") == (int64_t)(96 * 0x1p30 * 0.97) - (450 + 256) * 1048576ll,
                  "of 96 GiB");
            if (i < 2) plan_says(o, "verdict", "fits"), CHECK(plan_int(o, "context") == p->context, "%s", args);
            json_decref(o);
            snprintf(args, sizeof args, "--gpus 4x160@1792 --spec-type none --synth %s:backbone=%s%s", p->name,
                     q8 ? "q8_0" : "bf16", q8 ? "" : " --kv bf16");
            o = plan_of(args, 0);
            CHECK(plan_int(o, "tp") == 4 && plan_int(o, "keep_experts") == p->experts, "%s", args);
            int64_t parts = check_by_hand(o, p, q8, q8);
            json_decref(o);
            snprintf(args, sizeof args, "--gpus 1x640@1792 --spec-type none --synth %s:backbone=%s", p->name,
                     q8 ? "q8_0" : "bf16");
            o = plan_of(args, 0);
            CHECK(parts == check_by_hand(o, p, q8, true), "%s: four parts do not make the whole", p->name);
            json_decref(o);
        }
}

/* What the MTP layer of deepseek-v3 takes, by hand: a layer with experts, eh_proj, and norms of its two inputs.
 * Ranks divide eh_proj by its columns. */
static void test_plan_prediction(void) {
    for (int64_t tp = 1; tp <= 4; tp *= 2) {
        const int64_t d = 7168, width = 2048 / tp, heads = 128 / tp, experts = 256, expert = 3 * d * width * 36 / 64;
        const int64_t own = 1536 * heads * 192 + heads * 512 * 128 + heads * 128 * 512 + heads * 128 * d;
        const int64_t alike = d * 1536 + d * (512 + 64), norms = 4 * (2 * d + 1536 + 512);
        const int64_t want = 2 * (own + alike + 2 * d * d / tp) + norms + 4 * 2 * d + (experts + 1) * (expert + 3 * 4) +
                             4 * (d * experts + experts);
        char args[128];
        snprintf(args, sizeof args, "--gpus %dx640@1792 -c 4096 --kv bf16 --synth deepseek-v3", (int)tp);
        json_t *with = plan_of(args, 0);
        snprintf(args, sizeof args, "--gpus %dx640@1792 -c 4096 --kv bf16 --spec-type none --synth deepseek-v3",
                 (int)tp);
        json_t *without = plan_of(args, 0);
        const json_t *a = plan_rank_of(with, 0), *b = plan_rank_of(without, 0),
                     *f = json_object_get(with, "forecast_drafts");
        CHECK(plan_int(a, "prediction") == want && !plan_int(b, "prediction"), "%d ranks: %lld bytes, by hand %lld",
              (int)tp, (long long)plan_int(a, "prediction"), (long long)want);
        CHECK(plan_int(a, "weights") - plan_int(b, "weights") == want, "%d ranks: the weights", (int)tp);
        CHECK(plan_int(a, "cache") - plan_int(b, "cache") == 4096 * 2 * (512 + 64), "%d ranks: the cache", (int)tp);
        CHECK(!json_object_get(without, "forecast_drafts"), "drafts without a layer for them");
        const double tokens = json_real_value(json_object_get(f, "tokens")),
                     steps = json_real_value(json_object_get(f, "round_steps")),
                     rate = json_real_value(json_object_get(f, "tokens_per_second")),
                     plain = json_real_value(json_object_get(with, "forecast"));
        const int64_t n = plan_int(f, "drafts");
        CHECK(n >= 1 && n <= 3 && fabs(tokens - (1 - pow(0.7, (double)n + 1)) / 0.3) < 1e-9, "%d drafts, %g tokens",
              (int)n, tokens);
        CHECK(steps > 1 && steps < tokens && fabs(rate / (plain * tokens / steps) - 1) < 1e-9, "%g steps, %g tok/s",
              steps, rate);
        json_decref(with), json_decref(without);
    }
}

/* DeepSeek-V3.2 and GLM-5 on four cards of 96 GiB: the experts that fit in each layout and in the best one, from what
 * was counted by hand and activations of 1.5 to 3.5 GiB, which are the program's. Catches an indexer or its keys that
 * are not counted, or twice, in the weights, in the cache or in what a token reads. */
static void test_plan_sparse(void) {
    static const struct {
        int model, ctx, step; /* groups of experts stay of equal size */
        const char *kv;
        int keep;
    } t[] = {{4, 131072, 8, "fp8", 232}, {4, 131072, 8, "bf16", 232}, {4, 4096, 8, "fp8", 232},
             {5, 131072, 1, "fp8", 210}, {5, 131072, 1, "bf16", 206}, {5, 4096, 1, "fp8", 216}};
    const int64_t usable = (int64_t)(96 * 0x1p30 * 0.97) - (450 + 256) * 1048576ll;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        const struct published *p = &published[t[i].model];
        const bool fp8 = !strcmp(t[i].kv, "fp8");
        char args[160], common[128];
        int64_t best = 0;
        snprintf(common, sizeof common, "--gpus 4x96 -c %d --kv %s --synth %s", t[i].ctx, t[i].kv, p->name);
        for (int tp = 4; tp; tp /= 2) {
            snprintf(args, sizeof args, "%s --tp %d --pp %d", common, tp, 4 / tp);
            json_t *o = plan_of(args, 1);
            int64_t fit = p->experts;
            check_by_hand(o, p, false, fp8);
            for (int64_t k = 0; k < 4; k++) {
                const json_t *r = plan_rank_of(o, (size_t)k);
                const int64_t scratch = plan_int(r, "scratch_about");
                CHECK(scratch > 3ll << 29 && scratch < 7ll << 29, "%s: rank %d has %lld bytes of activations", args,
                      (int)k, (long long)scratch);
                for (;; fit -= t[i].step) {
                    const struct by_hand h = count_by_hand(p, false, fp8, fit, tp, k % tp, plan_int(r, "first_layer"),
                                                           plan_int(r, "layers"), tp == 4);
                    if (h.weights + h.rounding + h.cache * t[i].ctx + scratch <= usable) break;
                }
            }
            CHECK_INT(plan_int(o, "keep_experts"), fit, "%s", args);
            CHECK_INT(plan_int(json_object_get(o, "reads"), "index_keys"),
                      (int64_t)tp * p->layers * t[i].ctx * index_key_by_hand(p, fp8), "%s: all GPUs", args);
            if (fit > best) best = fit;
            json_decref(o);
        }
        json_t *o = plan_of(common, 1);
        CHECK(plan_int(o, "keep_experts") == t[i].keep && best == t[i].keep, "%s: %d experts, by hand %d, expected %d",
              common, (int)plan_int(o, "keep_experts"), (int)best, t[i].keep);
        json_decref(o);
    }
    /* what people read: 17 layers and 78 with an MTP layer, 132 bytes for a key */
    char *out = NULL;
    run_command(MOE_BIN " --plan --gpus 4x96 -c 131072 --synth deepseek-v3.2 </dev/null; " MOE_BIN
                        " --plan --gpus 4x200@1792 -c 131072 --synth glm-5 </dev/null; " MOE_BIN
                        " --plan --gpus 4x200@1792 -c 2048 --synth glm-5 </dev/null",
                &out, NULL);
    CHECK_HAS(sb_cstr(&out), "\nindex keys  up to 280.5 MiB of a GPU's cache; a token reads all of them\n",
              "of a stage");
    CHECK_HAS(sb_cstr(&out), "\nindex keys  1.3 GiB of a GPU's cache; a token reads all of them\n", "of 79 layers");
    CHECK_HAS(sb_cstr(&out), "\nindex keys  20.4 MiB of a GPU's cache, not read: a token sees all keys\n", "of 2048");
    arrfree(out);
    json_t *o = plan_of("--gpus 4x200@1792 -c 2048 --synth glm-5", 0);
    check_by_hand(o, &published[5], false, true);
    json_decref(o);
}

/* ---- DeepSeek-V4 ---- */

/* Both have heads of 512 values, one of them for keys and values, windows of 128 keys, groups of heads that give 1024
 * values, indexers with 64 heads of 128 values, four streams, six experts of a token beside a shared one, and tables of
 * experts by token ids in the first three layers. Compressed keys are of first_ratio tokens in layers 0 and 1 (0:
 * there are none), in all others of 4 and 128 in turn. */
struct streamed_shape {
    const char *name;
    int64_t layers, hidden, heads, groups, q_rank, experts, width, top_k, first_ratio;
};

static const struct streamed_shape streamed_shapes[] = {{"deepseek-v4-flash", 43, 4096, 64, 8, 1024, 256, 2048, 512, 0},
                                                        {"deepseek-v4", 61, 7168, 128, 16, 1536, 384, 3072, 1024, 128}};

struct streams_hand {
    struct by_hand h;                /* its cache: at the context */
    int64_t backbone;                /* bytes that a token reads of it, */
    int64_t cache_reads;             /* and of the cache; */
    int64_t index_keys, index_reads; /* of these, keys of indexers */
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of n values in F32. */
static int64_t vector_by_hand(struct by_hand *h, int64_t n) {
    h->rounding += rounding_by_hand(4 * n);
    return 4 * n;
}

/* Bytes of a compressor of keys of `values` values; the norm of its keys, and an offset of each token of one. */
static int64_t compressor_by_hand(struct by_hand *h, int bits, int64_t d, int64_t ratio, int64_t values) {
    const int64_t wide = (ratio == 4 ? 2 : 1) * values;
    const int64_t both = matrix_by_hand(h, bits, d * wide) + matrix_by_hand(h, bits, d * wide);
    return both + vector_by_hand(h, wide * ratio) + vector_by_hand(h, values);
}

/* Adds the cache of a layer at a context. The window is a ring for a prefill of 4096 tokens and a decode of 16 after
 * 127 keys, in steps of 128. Keys of 4 tokens are made of 8. Values and gates of tokens are rings in F32, for those that
 * a key is made of but one, and 32 more; a token reads, on average, as many as there are for each token of a key. */
static void streams_cache(struct streams_hand *s, bool fp8, int64_t ratio, int64_t top_k, int64_t ctx) {
    const int64_t row = fp8 ? 512 + 4 * 4 : 2 * 512, key = fp8 ? 128 + 4 : 2 * 128, span = ratio == 4 ? 2 : 1;
    const int64_t ring = 4 * 2 * span * 512, index_ring = 4 * 2 * span * 128;
    s->h.cache += row * smaller(ctx, 4352);
    s->cache_reads += row * smaller(ctx, 127);
    if (!ratio) return;
    const int64_t rows = ctx / ratio, kept = smaller(ctx, span * ratio - 1 + 32);
    s->h.cache += row * rows + ring * kept;
    s->cache_reads += row * (ratio == 4 ? smaller(rows, top_k) : rows) + ring * span;
    if (ratio != 4) return;
    s->h.cache += key * rows + index_ring * kept;
    s->index_keys += key * rows;
    s->index_reads += rows > top_k ? key * rows : 0;
    s->cache_reads += (rows > top_k ? key * rows : 0) + index_ring * span;
}

/* Rank r of tp in a stage of layers first..first+n-1, with so many experts in layers without a table of them. */
static struct streams_hand streams_by_hand(const struct streamed_shape *p, bool q8, bool fp8, int64_t experts,
                                           int64_t tp, int64_t r, int64_t first, int64_t n, int64_t ctx) {
    struct streams_hand s = {0};
    struct by_hand *h = &s.h;
    const int bits = q8 ? 8 : 16;
    const int64_t d = p->hidden, width = dealt(p->width, 64, tp, r), groups = dealt(p->groups, 1, tp, r);
    const int64_t values = groups * (p->heads / p->groups) * 512, vocab = 129280, used = 6;
    for (int64_t il = first; il < first + n; il++) {
        const int64_t ratio = il < 2 ? p->first_ratio : il % 2 ? 128 : 4, here = il < 3 ? p->experts : experts;
        int64_t own = matrix_by_hand(h, bits, p->q_rank * values) + 4 * (values / 512); /* queries, sinks */
        int64_t alike = matrix_by_hand(h, bits, d * p->q_rank) + matrix_by_hand(h, bits, d * 512);
        own += matrix_by_hand(h, bits, values * 1024) + matrix_by_hand(h, bits, groups * 1024 * d); /* output */
        for (int k = 0; k < 3; k++) own += matrix_by_hand(h, 4, d * width);                         /* shared expert */
        alike += 4 * (2 * d + p->q_rank + 512);
        for (int k = 0; k < 2; k++) alike += vector_by_hand(h, 4 * d * 24) + 4 * (24 + 3); /* of both halves */
        if (ratio) alike += compressor_by_hand(h, bits, d, ratio, 512);
        if (ratio == 4) /* weights of the heads are halves on a GPU */
            alike += compressor_by_hand(h, bits, d, ratio, 128) + matrix_by_hand(h, bits, p->q_rank * 64 * 128) +
                     matrix_by_hand(h, 16, d * 64);
        alike += vector_by_hand(h, d * here) + (il < 3 ? 0 : 4 * here); /* router, bias */
        s.backbone += own + alike + (il < 3 ? 4 * used : 0);            /* of a table one row */
        if (il < 3) alike += vector_by_hand(h, used * vocab);
        for (int k = 0; k < 3; k++) own += matrix_by_hand(h, 4, here * d * width);
        h->experts += used * 3 * d * width * 36 / 64;
        h->weights += own + alike;
        h->copied += alike;
        streams_cache(&s, fp8, ratio, p->top_k, ctx);
    }
    const int64_t streams = 4 * (4 * 4 * d + 4 + 1);  /* of the head, which every stage has */
    int64_t alike = 4 * d + streams + 2 * 4 * 64 / 2; /* last norm, frequencies of two rotations */
    if (!first) alike += matrix_by_hand(h, bits, d * vocab);
    if (first + n == p->layers) h->head = matrix_by_hand(h, bits, d * dealt(vocab, 64, tp, r));
    h->weights += h->head + alike;
    h->copied += alike;
    if (h->head) h->head += streams;
    h->rounding += (64ll << 21) + n * 1024;
    return s;
}

/* Every rank of a plan against the hand; the sum of what they do not have alike. */
static int64_t check_streams(const json_t *o, const char *args, const struct streamed_shape *p, bool q8, bool fp8) {
    const int64_t tp = plan_int(o, "tp"), pp = plan_int(o, "pp");
    int64_t at = 0, sum = 0;
    for (int64_t i = 0; i < tp * pp; i++) {
        const json_t *r = plan_rank_of(o, (size_t)i), *reads = json_object_get(r, "reads");
        const int64_t first = plan_int(r, "first_layer"), n = plan_int(r, "layers");
        const struct streams_hand s =
            streams_by_hand(p, q8, fp8, plan_int(o, "keep_experts"), tp, i % tp, first, n, plan_int(o, "context"));
        const struct {
            const json_t *in;
            const char *key;
            int64_t want;
        } t[] = {{r, "first_layer", at},
                 {r, "weights", s.h.weights},
                 {r, "rounding", s.h.rounding},
                 {r, "cache", s.h.cache},
                 {r, "index_keys", s.index_keys},
                 {reads, "experts", s.h.experts},
                 {reads, "backbone", s.backbone},
                 {reads, "head", s.h.head},
                 {reads, "cache", s.cache_reads},
                 {reads, "index_keys", s.index_reads},
                 {reads, "sum", s.h.experts + s.backbone + s.h.head + s.cache_reads}};
        for (size_t k = 0; k < sizeof t / sizeof *t; k++)
            CHECK(plan_int(t[k].in, t[k].key) == t[k].want, "%s: rank %d has %s of %lld, by hand %lld", args, (int)i,
                  t[k].key, (long long)plan_int(t[k].in, t[k].key), (long long)t[k].want);
        if (i % tp == tp - 1) at += n;
        sum += s.h.weights - s.h.copied;
    }
    CHECK(at == p->layers, "%s: the stages have %d layers", args, (int)at);
    return sum;
}

/* The experts in layers without a table for which there is room in a plan's layout, with the activations that it says.
 * Layers with a table keep all of theirs. */
static int64_t streams_fit(const json_t *o, const struct streamed_shape *p, int64_t ctx) {
    const int64_t usable = (int64_t)(96 * 0x1p30 * 0.97) - (450 + 256) * 1048576ll, tp = plan_int(o, "tp");
    int64_t fit = p->experts;
    for (int64_t k = 0; k < tp * plan_int(o, "pp"); k++) {
        const json_t *r = plan_rank_of(o, (size_t)k);
        const int64_t scratch = plan_int(r, "scratch_about");
        CHECK(scratch > 1ll << 30 && scratch < 4ll << 30, "%lld bytes of activations", (long long)scratch);
        for (; fit > 6; fit--) {
            const struct streams_hand s = streams_by_hand(p, false, false, fit, tp, k % tp, plan_int(r, "first_layer"),
                                                          plan_int(r, "layers"), ctx);
            if (s.h.weights + s.h.rounding + s.h.cache + scratch <= usable) break;
        }
    }
    return fit;
}

/* DeepSeek-V4-Pro on two and four cards: the experts that fit in each layout, and in the best one. */
static void check_streams_pruned(int gpus, int ctx, int64_t keep) {
    const struct streamed_shape *p = &streamed_shapes[1];
    char args[160], common[128];
    int64_t best = 0;
    snprintf(common, sizeof common, "--gpus %dx96 -c %d --spec-type none --synth %s", gpus, ctx, p->name);
    for (int tp = gpus; tp; tp /= 2) {
        snprintf(args, sizeof args, "%s --tp %d --pp %d", common, tp, gpus / tp);
        json_t *o = plan_of(args, 1);
        check_streams(o, args, p, false, false);
        plan_says(o, "verdict", "needs pruning");
        const int64_t fit = streams_fit(o, p, ctx);
        CHECK_INT(plan_int(o, "keep_experts"), fit, "%s", args);
        if (fit > best) best = fit;
        json_decref(o);
    }
    json_t *o = plan_of(common, 1);
    plan_says(o, "verdict", "needs pruning");
    check_streams(o, common, p, false, false);
    CHECK(plan_int(o, "keep_experts") == keep && best == keep, "%s: %d experts, by hand %d, expected %d", common,
          (int)plan_int(o, "keep_experts"), (int)best, (int)keep);
    json_decref(o);
}

/* DeepSeek-V4 in bytes. What a check of these would catch:
 * - of weights: a hyper-connection that is counted for one half of a layer or not in the head, tables of experts that
 *   are forgotten or that a bias goes with, an output that is not divided or not by whole groups (8 groups of 3 ranks),
 *   a compressor or indexer that is divided, that is missing, or that does not overlap;
 * - of the cache: rings of another length or not in F32, keys of an indexer in layers of 128 tokens, a window that
 *   grows with the context, scales that are forgotten;
 * - of what a token reads: a whole table of experts, all compressed keys, the head's streams that are not read. */
static void test_plan_streams(void) {
    static const struct {
        const char *args, *verdict;
        int model, tp, pp, ctx, keep;
        bool q8, fp8;
    } t[] = {{"--gpus 2x96", "fits", 0, 2, 1, 1048576, 256, false, false},
             {"--gpus 4x96", "fits", 0, 4, 1, 1048576, 256, false, false},
             {"--gpus 2x96 --kv fp8", "fits", 0, 2, 1, 1048576, 256, true, true},
             {"--gpus 4x96 --kv fp8 -c 4351", "fits", 0, 4, 1, 4351, 256, true, true},
             {"--gpus 2x96 --pp 2", "fits with --pp", 0, 1, 2, 1048576, 256, false, false},
             {"--gpus 4x96 --tp 2 --pp 2 -c 4096", "fits with --pp", 0, 2, 2, 4096, 256, false, false},
             {"--gpus 4x96 --pp 4 -c 30", "fits with --pp", 0, 1, 4, 30, 256, true, false},
             {"--gpus 3x96 -c 2052", "fits", 0, 3, 1, 2052, 256, false, false},
             {"--gpus 3x400@1000 -c 100", "fits", 1, 3, 1, 100, 384, true, false},
             {"--gpus 1x96 -c 4096", "needs pruning", 0, 1, 1, 4096, 136, true, false}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        const struct streamed_shape *p = &streamed_shapes[t[i].model];
        char args[160];
        snprintf(args, sizeof args, "%s --spec-type none --synth %s%s", t[i].args, p->name,
                 t[i].q8 ? ":backbone=q8_0" : "");
        json_t *o = plan_of(args, !strcmp(t[i].verdict, "needs pruning"));
        plan_says(o, "verdict", t[i].verdict);
        CHECK(plan_int(o, "tp") == t[i].tp && plan_int(o, "pp") == t[i].pp && plan_int(o, "context") == t[i].ctx &&
                  plan_int(o, "keep_experts") == t[i].keep,
              "%s: --tp %d --pp %d, a context of %d, %d experts", args, (int)plan_int(o, "tp"), (int)plan_int(o, "pp"),
              (int)plan_int(o, "context"), (int)plan_int(o, "keep_experts"));
        check_streams(o, args, p, t[i].q8, t[i].fp8);
        json_decref(o);
    }
    for (int i = 0; i < 2; i++) { /* four parts make the whole */
        int64_t sum[2];
        for (int k = 0; k < 2; k++) {
            char args[160];
            snprintf(args, sizeof args, "--gpus %s@1792 -c 4096 --spec-type none --synth %s", k ? "1x1000" : "4x300",
                     streamed_shapes[i].name);
            json_t *o = plan_of(args, 0);
            sum[k] = check_streams(o, args, &streamed_shapes[i], false, false);
            json_decref(o);
        }
        CHECK(sum[0] == sum[1], "%s: four parts do not make the whole", streamed_shapes[i].name);
    }
    check_streams_pruned(2, 4096, 46), check_streams_pruned(4, 131072, 131);
}

/* DeepSeek-V4-Flash: the largest context by hand, and what people read. */
static void test_plan_streams_context(void) {
    const struct streamed_shape *p = &streamed_shapes[0];
    json_t *o = plan_of("--gpus 2x96 --spec-type none --synth deepseek-v4-flash", 0);
    const int64_t most = plan_int(json_array_get(json_object_get(o, "layouts"), 0), "largest_context_bf16");
    json_decref(o);
    for (int more = 0; more < 2; more++) {
        const int64_t ctx = most + 256 * more;
        char args[128];
        snprintf(args, sizeof args, "--gpus 2x96 --spec-type none --tp 2 --synth deepseek-v4-flash -c %d", (int)ctx);
        o = plan_of(args, more);
        const json_t *r = plan_rank_of(o, 0);
        const struct streams_hand s = streams_by_hand(p, false, false, 256, 2, 0, 0, 43, ctx);
        const int64_t room = plan_int(r, "usable") - plan_int(r, "scratch_about") - s.h.weights - s.h.rounding;
        CHECK((s.h.cache > room) == more, "%s: a cache of %lld bytes in %lld", args, (long long)s.h.cache,
              (long long)room);
        json_decref(o);
    }
    /* of a snapshot 16 tokens after the window of 43 layers, and those that the keys of 21 and 20 are made of */
    const int64_t snapshot = 43 * 143 * 1024 + 21 * 23 * 4 * 4 * (512 + 128) + 20 * 143 * 4 * 2 * 512;
    char *out = NULL, text[64];
    snprintf(text, sizeof text, "\nsnapshots   %.1f MiB of host memory for 8 snapshots",
             8 * (double)snapshot * 0x1p-20);
    run_command(MOE_BIN " --plan --gpus 2x96 --spec-type none --synth deepseek-v4-flash </dev/null; " MOE_BIN
                        " --plan --gpus 2x96 -c 2051 --spec-type none --synth deepseek-v4-flash </dev/null; " MOE_BIN
                        " --plan --gpus 4x96 --spec-type none --synth deepseek-v4 </dev/null",
                &out, NULL);
    CHECK_HAS(sb_cstr(&out), text, "of 143 tokens");
    CHECK_HAS(sb_cstr(&out), "\nindex keys  1.3 GiB of a GPU's cache; a token reads all of them\n", "of 21 layers");
    CHECK_HAS(sb_cstr(&out), "\nindex keys  2.6 MiB of a GPU's cache, not read: a token sees all keys\n",
              "of 512 keys");
    CHECK_HAS(sb_cstr(&out),
              "(moe-reap --keep 131)\n            with all experts: short by 129.5 GiB on a GPU\n"
              "            3 layers with experts by token ids keep all\n",
              "of four cards");
    arrfree(out);
}

/* Three ranks: 43, 43 and 42 heads, 11, 11 and 10 units of the experts; two and one KV heads; stages. */
static void test_plan_uneven(void) {
    static const struct {
        int model;
        const char *args;
    } t[] = {{2, "--gpus 3x200@1000 --tp 3"},
             {0, "--gpus 3x96"},
             {3, "--gpus 4x200@1000 --pp 2"},
             {1, "--gpus 3x96 --pp 3"}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char args[160];
        snprintf(args, sizeof args, "%s --spec-type none --synth %s", t[i].args, published[t[i].model].name);
        json_t *o = plan_of(args, 0);
        check_by_hand(o, &published[t[i].model], false, true);
        json_decref(o);
    }
}

/* The layers of 4 stages, in JSON and in text. glm-5.2 has indexers in layers 0, 1, 2, 6, 10 and so on: 20 layers and
 * the output would be more than 20 without it. Catches a plan of other stages than those that are run. */
static void test_plan_stages(void) {
    static const struct {
        const char *args;
        int layers[4];
    } t[] = {{"glm-5.2", {22, 20, 20, 16}}, {"glm-5:backbone=q8_0", {21, 19, 19, 19}}, {"kimi-k2", {16, 15, 15, 15}}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char args[128], text[64], *out = NULL;
        snprintf(args, sizeof args, "--gpus 4x160@1792 --pp 4 --spec-type none --synth %s", t[i].args);
        json_t *o = plan_of(args, 0);
        snprintf(args, sizeof args, MOE_BIN " --plan --gpus 4x160@1792 --pp 4 --spec-type none --synth %s </dev/null",
                 t[i].args);
        CHECK_INT(run_command(args, &out, NULL), 0, "%s", args);
        for (int s = 0, at = 0; s < 4; at += t[i].layers[s++]) {
            const json_t *r = plan_rank_of(o, (size_t)s);
            CHECK(plan_int(r, "first_layer") == at && plan_int(r, "layers") == t[i].layers[s],
                  "%s: stage %d has layers %d+%d, expected %d+%d", t[i].args, s, (int)plan_int(r, "first_layer"),
                  (int)plan_int(r, "layers"), at, t[i].layers[s]);
            snprintf(text, sizeof text, "\nGPU %d %d-%d ", s, at, at + t[i].layers[s] - 1);
            CHECK_HAS(sb_cstr(&out), text, "%s", args);
        }
        json_decref(o);
        arrfree(out);
    }
}

/* Times from what is read: the slowest rank of every stage, one stage after the other, two all-reduces a layer. */
static void test_plan_limit(void) {
    static const char *const args[] = {"--gpus 4x96 -c 4096 --synth qwen3-30b-a3b",
                                       "--gpus 4x200@500 --pp 2 -c 4096 --spec-type none --synth deepseek-v3",
                                       "--gpus 2x48@960 --pp 2 --synth qwen3-30b-a3b"};
    for (size_t i = 0; i < sizeof args / sizeof *args; i++) {
        json_t *o = plan_of(args[i], 0);
        const json_t *ways = json_object_get(o, "layouts");
        int tp = (int)plan_int(o, "tp"), pp = (int)plan_int(o, "pp");
        double seconds = 0, sum = 0;
        for (int s = 0; s < pp; s++) {
            double slowest = 0;
            for (int r = 0; r < tp; r++) {
                const json_t *rank = plan_rank_of(o, (size_t)(s * tp + r)), *reads = json_object_get(rank, "reads");
                double bytes = (double)(plan_int(reads, "experts") + plan_int(reads, "backbone") +
                                        plan_int(reads, "cache") + plan_int(reads, "head"));
                CHECK(plan_int(reads, "backbone") > 0 && (double)plan_int(reads, "sum") == bytes,
                      "%s: the sum of reads", args[i]);
                slowest = fmax(slowest, bytes / plan_real_of(rank, "bytes_per_second")), sum += bytes;
            }
            seconds += slowest;
        }
        CHECK((double)plan_int(json_object_get(o, "reads"), "sum") == sum, "%s: reads of all", args[i]);
        for (size_t k = 0; k < json_array_size(ways); k++) {
            const json_t *w = json_array_get(ways, k);
            if (plan_int(w, "tp") != tp || plan_int(w, "pp") != pp) continue;
            double reduces = tp > 1 ? 2.0 * (double)plan_int(o, "layers") : 0, one = 1 / (seconds + reduces * 5.5e-6),
                   nccl = 1 / (seconds + reduces * 12e-6);
            CHECK(fabs(plan_real_of(w, "limit_oneshot") / one - 1) < 1e-6 &&
                      fabs(plan_real_of(w, "limit_nccl") / nccl - 1) < 1e-6,
                  "%s: %g and %g tok/s, expected %g and %g", args[i], plan_real_of(w, "limit_oneshot"),
                  plan_real_of(w, "limit_nccl"), one, nccl);
            CHECK(plan_real_of(w, "forecast") > 0.5 * one && plan_real_of(w, "forecast") < one,
                  "%s: a forecast of %g tok/s, at most %g", args[i], plan_real_of(w, "forecast"), one);
        }
        json_decref(o);
    }
}

/* ---- the forecast by hand ---- */

/* A token on cards that read 1792 GB/s and request up to 32 MiB ahead: microseconds besides reading, bytes, and those of
 * them that came while others did not read. */
struct hand {
    double us, bytes, hidden;
};

/* Microseconds of a launch besides reading. */
static double hand_us(enum decode_kernel k) { return forecast_handover + decode_costs[k].us; }

/* Bytes of at most `bytes` that come in so many microseconds. */
static double hand_hidden(double us, double bytes) {
    return fmin(fmin(us * 1e-6 * forecast_rate * 1792e9, bytes), 32 << 20);
}

/* Tokens per second, with what stands before and after the layers: an embedding, two norms, the head, the choice. */
static double hand_rate(struct hand h, double head, double reduce) {
    h.us += hand_us(DECODE_EMBED) + 2 * hand_us(DECODE_ADD_NORM) + reduce + hand_us(DECODE_LINEAR);
    h.us += hand_us(DECODE_SAMPLE) + (reduce > 0 ? hand_us(DECODE_SEND) + hand_us(DECODE_SHARE) : 0);
    return 1 / (h.us * 1e-6 + (h.bytes + head - h.hidden) / (forecast_rate * 1792e9));
}

/* qwen3-30b-a3b on one card: every norm is in the kernel that needs it. */
static double hand_gqa(double ctx) {
    const double d = 2048, projections = 2 * d * (32 + 2 * 4) * 128, wo = 2 * d * 32 * 128, head = 2 * d * 151936;
    const double router = hand_us(DECODE_ROUTER) + forecast_norm, expert = 3 * (d * 768 * 36 / 64 + 4);
    struct hand h = {0};
    for (int il = 0; il < 48; il++) {
        h.us += hand_us(DECODE_LINEAR) + forecast_norm + hand_us(DECODE_ATTENTION) + hand_us(DECODE_LINEAR);
        h.us += router + hand_us(DECODE_GLU) + hand_us(DECODE_DOWN);
        h.bytes += 4 * 2 * d + projections + 4 * 2 * 128 + 2 * 4 * (128 + 4) * ctx + wo;
        h.bytes += 4 * 128 * d + 8 * expert;
        h.hidden += hand_hidden(hand_us(DECODE_ATTENTION), wo) + hand_hidden(router, il < 47 ? projections : head);
    }
    return hand_rate(h, head, 0);
}

/* A rank of qwen3.5-397b-a17b on four cards: norms are in the all-reduces, but for the first. */
static double hand_delta(double ctx) {
    const double d = 4096, expert = 3 * (d * 256 * 36 / 64 + 4), reduce = plan_reduce[0] * 1e6, head = 2 * d * 62080;
    const double delta = 2 * d * (2 * 4 * 128 + 2 * 16 * 128 + 2 * 16), gqa = 2 * d * (8 * 2 * 256 + 2 * 256);
    const double wo = 2 * d * 2048, norm = hand_us(DECODE_ADD_NORM) + reduce;
    struct hand h = {0};
    for (int il = 0; il < 60; il++) {
        const bool full = il % 4 == 3, next = (il + 1) % 4 == 3;
        const double first = hand_us(DECODE_LINEAR), mix = hand_us(full ? DECODE_ATTENTION : DECODE_DELTA);
        const double early = il ? hand_hidden(norm + first, wo) : 0;
        h.us += first + (il ? norm : forecast_norm) + mix + hand_us(DECODE_LINEAR);
        h.us += norm + hand_us(DECODE_ROUTER) + hand_us(DECODE_GLU) + hand_us(DECODE_DOWN);
        h.bytes += 4 * 2 * d + (full ? gqa : delta) + wo + 4 * 512 * d + 4 * d + 11 * expert;
        if (full) h.bytes += 4 * 2 * 256 + 2 * (256 + 4) * ctx;
        else
            h.bytes +=
                4 * (4 * 96 * 128 + 2 * 64 + 128) + 4 * 3 * (2 * 4 * 128 + 16 * 128 + 2 * 16) + 2 * 4 * 16 * 16384;
        h.hidden += early + hand_hidden(mix, wo - early);
        h.hidden += hand_hidden(norm + hand_us(DECODE_ROUTER), il == 59 ? head : next ? gqa : delta);
    }
    return hand_rate(h, head, reduce);
}

/* A rank of deepseek-v3 on four cards: rows are too long for the kernels that need their norm, but for the query's. */
static double hand_mla(double ctx) {
    const double d = 7168, heads = 32, expert = 3 * (d * 512 * 36 / 64 + 4), reduce = plan_reduce[0] * 1e6;
    const double first = 2 * d * (1536 + 512 + 64), query = 2 * 1536 * heads * 192, wk_b = 2 * heads * 512 * 128;
    const double wv_b = wk_b, wo = 2 * heads * 128 * d, head = 2 * d * 32320;
    struct hand h = {0};
    for (int il = 0; il < 61; il++) {
        const double norm = hand_us(DECODE_ADD_NORM), ffn = norm + reduce, window = norm + (il ? reduce : 0);
        const double early = hand_hidden(window + hand_us(DECODE_LINEAR), query + wk_b + wv_b + wo);
        h.us += window + hand_us(DECODE_LINEAR) + hand_us(DECODE_LINEAR) + forecast_norm;
        h.us += hand_us(DECODE_MLA_QUERY) + hand_us(DECODE_MLA_ATTENTION) + hand_us(DECODE_MLA_VALUE);
        h.us += hand_us(DECODE_LINEAR) + ffn + hand_us(DECODE_GLU);
        h.bytes += 4 * (2 * d + 1536 + 512) + first + query + wk_b + wv_b + wo + (512 + 16 + 128) * ctx;
        h.hidden += early + hand_hidden(hand_us(DECODE_MLA_ATTENTION), wv_b + wo - fmax(0, early - query - wk_b));
        if (il < 3) {
            h.us += hand_us(DECODE_LINEAR);
            h.bytes += 3 * (d * 18432 / 4 * 36 / 64 + 4);
            continue;
        }
        h.us += hand_us(DECODE_ROUTER) + hand_us(DECODE_DOWN);
        h.bytes += 4 * 256 * d + 4 * 256 + 9 * expert;
        h.hidden += hand_hidden(ffn + hand_us(DECODE_ROUTER), il < 60 ? first : head);
    }
    return hand_rate(h, head, reduce);
}

/* A rank of deepseek-v4-flash on two cards: norms wait for the streams, but for the query's. Keys of 4 tokens are
 * chosen. Catches streams or a step of attention that are not in the forecast, and a norm that is there twice. */
static double hand_streams(double ctx) {
    const struct streams_hand s = streams_by_hand(&streamed_shapes[0], false, false, 256, 2, 0, 0, 43, (int64_t)ctx);
    const double query = 2.0 * 1024 * 32 * 512, output = 2.0 * 1024 * (32 * 512 + 4 * 4096),
                 reduce = plan_reduce[0] * 1e6;
    const double mix = hand_us(DECODE_HC_MIX) + hand_us(DECODE_HC_NORM), sum = hand_us(DECODE_ADD_NORM) + reduce;
    struct hand h = {.us = mix, .bytes = (double)(s.h.experts + s.backbone + s.cache_reads)};
    for (int il = 0; il < 43; il++) {
        h.us += 2 * mix + (il ? 2 : 1) * sum + hand_us(DECODE_LINEAR) + hand_us(DECODE_LINEAR) + forecast_norm;
        h.us += hand_us(DECODE_CSA_STORE) + hand_us(DECODE_CSA_ATTENTION) + hand_us(DECODE_LINEAR);
        h.us += hand_us(DECODE_LINEAR) + hand_us(DECODE_ROUTER) + hand_us(DECODE_GLU) + hand_us(DECODE_DOWN);
        if (il >= 2 && il % 2 == 0) h.us += hand_us(DECODE_INDEX_SCORES) + hand_us(DECODE_INDEX_BLOCKS);
        h.hidden += hand_hidden(hand_us(DECODE_LINEAR), query);
        h.hidden += hand_hidden(hand_us(DECODE_CSA_ATTENTION), output);
        h.hidden += hand_hidden(hand_us(DECODE_ROUTER), 2.0 * 4096 * (1024 + 512)); /* at least that is next */
    }
    return hand_rate(h, (double)s.h.head, reduce);
}

/* The forecast of four models against arithmetic by hand. */
static void test_plan_forecast(void) {
    static const struct {
        const char *args;
        int tp;
        double (*by_hand)(double ctx);
    } t[] = {{"--gpus 1x96 -c 1024 --synth qwen3-30b-a3b", 1, hand_gqa},
             {"--gpus 1x96 --synth qwen3-30b-a3b", 1, hand_gqa},
             {"--gpus 4x96 -c 4096 --spec-type none --synth qwen3.5-397b-a17b", 4, hand_delta},
             {"--gpus 4x200@1792 -c 4096 --spec-type none --synth deepseek-v3", 4, hand_mla},
             {"--gpus 2x96 --spec-type none --synth deepseek-v4-flash", 2, hand_streams}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        json_t *o = plan_of(t[i].args, 0);
        const double got = plan_real_of(o, "forecast"), want = t[i].by_hand((double)plan_int(o, "context"));
        const json_t *way = json_array_get(json_object_get(o, "layouts"), 0);
        CHECK(plan_int(o, "tp") == t[i].tp && fabs(got / want - 1) < 1e-6, "%s: %.6f tok/s, by hand %.6f", t[i].args,
              got, want);
        CHECK(plan_real_of(way, "forecast") == got, "%s: the layout has another forecast", t[i].args);
        plan_says(o, "forecast_source", "timing model, no card was measured");
        json_decref(o);
    }
}

/* The launches of every shape read what the plan counts. */
static void test_plan_launches(void) {
    static const int tp[] = {1, 4, 2, 1}, pp[] = {1, 1, 2, 4};
    for (size_t i = 0; i < sizeof synths / sizeof *synths; i++) {
        struct synth y = synths[i];
        struct model m = {0};
        y.sizes = true;
        synth_make(&m, &y, NULL, true);
        if (gpu_lacks(&m)) {
            model_free(&m);
            continue;
        }
        struct plan *p = xcalloc(1, sizeof *p);
        p->m = &m;
        p->kv = KV_FP8;
        for (int k = 0; k < 4 && !gpu_lacks(&m); k++)
            for (int r = 0; r < tp[k] * pp[k]; r++) {
                struct plan_rank *rank = &p->layout[0].rank[r];
                plan_rank(rank, p, &m, (struct shard){r % tp[k], tp[k], r / tp[k], pp[k]});
                struct launch *list =
                    decode_launches(&rank->m, (struct offload){0}, PASS_FORWARD, &rank->m.output, KV_FP8, 5000);
                const int64_t *reads = rank->bytes_per_token;
                double want = state_reads(&rank->m, KV_FP8, 5000), sum = 0;
                want += (double)(reads[READ_EXPERTS] + reads[READ_BACKBONE] + reads[READ_HEAD]);
                for (int l = 0; l < (int)arrlen(list); l++) {
                    sum += list[l].bytes;
                    CHECK(list[l].dense <= list[l].bytes && (!list[l].prefetch || list[l].prefetch > l), "launch %d",
                          l);
                }
                CHECK(sum == want, "%s, rank %d of %dx%d: launches read %.0f bytes, the plan says %.0f", y.name, r,
                      tp[k], pp[k], sum, want);
                arrfree(list);
            }
        plan_free(p);
        model_free(&m);
    }
}

/* Qwen3.8-Flash-Next on a CPU and on a GPU, against arithmetic by hand: what a token reads, the table of n-grams among it,
 * of which a token reads 16 rows of 160 BF16 values. It is in the host's memory: a GPU needs none for it. */
static void test_plan_ngrams(void) {
    const int64_t d = 2560, streams = 4 * d, expert = 3 * (d * 640 * 36 / 64 + 4);
    const int64_t mix = 4 * streams + 2 * 2 * streams * 320; /* a norm and two matrices of a low rank */
    const int64_t delta = 2 * d * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) + 2 * 48 * 128 * d /* in, out */
                          + 4 * (4 * (2 * 16 * 128 + 48 * 128) + 2 * 48 + 128);         /* convolution, A, dt, norm */
    const int64_t attn = 2 * d * (24 * 2 * 256 + 2 * 2 * 256 + 24 * 256) + 4 * 2 * 256  /* with the gate */
                         + 2 * d * (4 * 128 + 128) + 4 * 2 * 128;                       /* the indexer */
    const int64_t half = mix + 2 * 4 * streams, experts = 4 * d * 512 + expert + 4 * d; /* router, shared, its gate */
    const int64_t ngrams = 2 * d * (streams + d) + 4 * 3 * streams + 4 * 4 * streams;
    json_t *o = plan_of("--cpu --synth qwen3.8-flash-next", 1);
    const json_t *reads = json_object_get(o, "reads"), *table = json_object_get(o, "ngrams");
    CHECK_INT(plan_int(table, "bytes"), 320001446ll * 160 * 2, "the table");
    CHECK_INT(plan_int(table, "token_bytes"), 16 * 160 * 2, "a token's rows");
    CHECK_INT(plan_int(reads, "experts"), 48 * 10 * expert, "experts");
    CHECK_INT(plan_int(reads, "backbone"),
              48 * (2 * half + experts) + 36 * delta + 12 * attn + ngrams + plan_int(table, "token_bytes"), "backbone");
    CHECK_INT(plan_int(reads, "head"), 2 * d * 248320 + mix, "head");
    CHECK_INT(plan_int(reads, "index_keys"), 12 * plan_int(o, "context") / 4 * 128 * 2, "means of keys");
    json_decref(o);

    /* tiles have 16 rows, of which the matrix that says how streams are written fills 4 */
    const int64_t tiled = half + 2 * 12 * streams, rows = 16 * 160 * 2;
    o = plan_of("--gpus 1x96 --host 128 --synth qwen3.8-flash-next", 0);
    reads = json_object_get(o, "reads"), table = json_object_get(o, "ngrams");
    CHECK_INT(plan_int(table, "bytes"), 320001446ll * 160 * 2, "the table");
    CHECK_INT(plan_int(reads, "backbone"), 48 * (2 * tiled + experts) + 36 * delta + 12 * attn + ngrams + rows,
              "backbone on a GPU");
    CHECK_INT(plan_int(reads, "head"), 2 * d * 248320 + mix, "head on a GPU");
    CHECK_INT(plan_int(json_array_get(json_object_get(o, "ranks"), 0), "weights"),
              49 * (2 * tiled + experts + 512 * expert) + 36 * delta + 13 * attn + ngrams + 2 * 2 * d * 248320 +
                  2 * mix + 2 * d * 2 * d + 4 * (d + streams) + /* eh_proj of the MTP layer, its norms */
                  4 * 32,                                       /* all experts, both embeddings, the rotation */
              "weights of a GPU");
    json_decref(o);

    /* with a host that has no room for the table: 16 rows, up to 32 reads at a time of 100 us */
    json_t *pinned = plan_of("--gpus 1x96 --host 128 --synth qwen3.8-flash-next", 0);
    json_t *file = plan_of("--gpus 1x96 --host 96 --synth qwen3.8-flash-next", 0);
    table = json_object_get(pinned, "ngrams");
    CHECK(json_is_true(json_object_get(table, "pinned")) && !plan_int(table, "token_reads"), "the table is pinned");
    table = json_object_get(file, "ngrams");
    CHECK(json_is_false(json_object_get(table, "pinned")), "the table is not pinned");
    CHECK_INT(plan_int(table, "token_reads"), 16, "reads");
    CHECK_INT(plan_int(json_array_get(json_object_get(file, "ranks"), 0), "weights"),
              plan_int(json_array_get(json_object_get(pinned, "ranks"), 0), "weights"), "weights");
    const double more = 1 / json_real_value(json_object_get(file, "forecast")) -
                        1 / json_real_value(json_object_get(pinned, "forecast"));
    CHECK(more > 1e-4 && more < 1.1e-4, "a token takes %g s more", more); /* the reads, and two kernels */
    json_decref(pinned), json_decref(file);

    static const char *const hosts[] = {"", " --host 128", " --host 96"},
                             *const says[] = {
                                 "\nn-grams     95.4 GiB of host memory, pinned, not of a GPU's;\n"
                                 "            a token reads 16 rows of them, 5.0 KiB, over the bus\n\n",
                                 "pinned, not of a GPU's;",
                                 "\nn-grams     95.4 GiB in the file: host memory has no room for them;\n"
                                 "            a token reads 16 rows of them, 5.0 KiB, by 16 reads of the disk:\n"
                                 "            about 0.1 ms (assumed: 100 us a read, 32 at once)\n\n"};
    for (int i = 0; i < 3; i++) {
        char cmd[256], *out = NULL, *err = NULL;
        snprintf(cmd, sizeof cmd, "%s --plan --gpus 1x96%s --synth qwen3.8-flash-next </dev/null", MOE_BIN, hosts[i]);
        const int rc = run_command(cmd, &out, &err);
        CHECK(!rc && strstr(sb_cstr(&out), says[i]), "%s: %d: %s%s", hosts[i], rc, sb_cstr(&out), sb_cstr(&err));
        arrfree(out), arrfree(err);
    }
}

/* DeepSeek-V4.1-Flash in bytes: four layers make compressed keys, eight choose among them, two have tables of n-grams. */
static void test_plan_shared_keys(void) {
    const int64_t d = 5120, hc = 2 * 4 * (24 * 4 * d + 24 + 3), ff = 3 * d * 2304 * 17 / 32;
    const int64_t attn = 2 * (1280 * d + 64 * 512 * 1280 + 512 * d + 8 * 1024 * 4096 + 8 * 1024 * d) +
                         4 * (1280 + 512 + 64); /* norms, sinks */
    const int64_t layer = attn + hc + 2 * 4 * d + 4 * 384 * (d + 1) + ff;
    const int64_t makes = 2 * 512 * d + 4 * 512 + 2 * 128 * 512 + 4 * 128, gates = 3 * 2 * 512 * d;
    const int64_t chooses = 2 * 32 * 128 * 1280 + 4 * 32 * d, ngrams = 2 * 24 * 256 * 5 * d + 2 * 4 * 4 * d + 24 * 264;
    json_t *o = plan_of("--cpu --synth deepseek-v4.1-flash", 1);
    const json_t *reads = json_object_get(o, "reads"), *table = json_object_get(o, "ngrams");
    CHECK_INT(plan_int(table, "bytes"), (384006168ll + 384016682ll) * 264, "the tables");
    CHECK_INT(plan_int(table, "token_bytes"), 2 * 24 * 264, "a token's rows");
    CHECK_INT(plan_int(reads, "experts"), 40 * 6 * ff, "experts");
    CHECK_INT(plan_int(reads, "backbone"), 40 * layer + 4 * makes + gates + 8 * chooses + 2 * ngrams, "backbone");
    CHECK_INT(plan_int(reads, "index_keys"), (3 * 2048 + 5 * 4096) * 128 * 2, "keys of the indexer");
    json_decref(o);

    /* on four GPUs: 9 kernels of attention and 6 of a feed-forward, of which the first adds nothing; 2 more where keys are
     * made, where they are chosen, and one where candidates are listed; 6 where rows of a table are added */
    char *out = NULL, *err = NULL;
    const int n = 2 + 40 * (9 + 6) - 1 + 4 * 2 + 8 * 2 + 1 + 2 * 6 + 7;
    const int rc =
        run_command(MOE_BIN " --plan --gpus 4x96 --host 256 --synth deepseek-v4.1-flash </dev/null", &out, &err);
    char want[32];
    snprintf(want, sizeof want, ": %d kernels,", n);
    CHECK(rc == 0 && strstr(sb_cstr(&out), want), "%d: no '%s' in %s%s", rc, want, sb_cstr(&out), sb_cstr(&err));
    arrfree(out), arrfree(err);
    o = plan_of("--gpus 4x96 --host 256 --tp 4 --synth deepseek-v4.1-flash", 0);
    const json_t *ranks = json_object_get(o, "ranks");
    const int64_t whole = 40 * (layer + 384 * ff) + 4 * makes + gates + 8 * chooses + 2 * (ngrams - 24 * 264) +
                          2 * 2 * d * 129280; /* embedding and head */
    int64_t sum = 0;
    for (size_t r = 0; r < 4; r++) sum += plan_int(json_array_get(ranks, r), "weights");
    CHECK(sum > whole && sum < whole + whole / 10, "%lld bytes on four GPUs, %lld in all", (long long)sum,
          (long long)whole);
    json_decref(o);
}

/* Kimi-K3 by hand: gates of every value, experts in a latent space, blocks of layers as the residual. */
static void test_plan_kimi_k3(void) {
    const int64_t d = 7168, h = 96 * 128, latent = 3584;
    const int64_t kda = 2 * (5 * d * h + 128 * (d + h) + 96 * d) + 4 * (3 * 4 * h + h + 96 + 128);
    const int64_t mla = 2 * (1536 * d + 96 * 192 * 1536 + 576 * d + 2 * h * 512 + 2 * d * h) + 4 * (1536 + 512);
    const int64_t ffn = 4 * 896 * (d + 1) + 2 * 2 * latent * d + 4 * latent + 3 * d * 2 * 3072 * 17 / 32;
    json_t *o = plan_of("--cpu --synth kimi-k3", 1);
    const json_t *reads = json_object_get(o, "reads");
    CHECK_INT(plan_int(reads, "experts"), 92 * 16 * (3 * 3072 * latent * 17 / 32), "experts");
    CHECK_INT(plan_int(reads, "backbone"),
              69 * kda + 24 * mla + 93 * 4 * 4 * d + 92 * ffn + 3 * d * 33792 * 17 / 32 /* the dense one */,
              "backbone");
    json_decref(o);

    /* on four GPUs: before each half the sum over the ranks, of which the first lacks it, and the blocks; 4 kernels of
     * Kimi delta attention or 7 of latent attention; 2 of the dense feed-forward, 7 of one with experts, which are
     * copied */
    char *out = NULL, *err = NULL, want[64];
    const int n = 2 + 93 * 2 * 2 - 1 + 69 * 4 + 24 * 7 + 2 + 92 * 7 + 2 + 4;
    const int rc = run_command(MOE_BIN " --plan --gpus 4x96 --host 2000 --tp 4 --synth kimi-k3 </dev/null", &out, &err);
    snprintf(want, sizeof want, ": %d kernels,", n);
    CHECK(rc == 0 && strstr(sb_cstr(&out), want) && strstr(out, "and 278 all-reduces"), "%d: no '%s' in %s%s", rc, want,
          sb_cstr(&out), sb_cstr(&err));
    arrfree(out), arrfree(err);
}

/* Several prompts at a time: their caches, the contexts for which there is room, and the speed. */
static void test_plan_at_once(void) {
    static const int prompts[] = {1, 2, 4, 8, 16}, context[] = {40960, 40960, 40960, 30464, 15104};
    json_t *one = plan_of("--gpus 1x32 --synth qwen3-30b-a3b", 0), *all = json_object_get(one, "at_once");
    json_t *eight = plan_of("--gpus 1x32 --synth qwen3-30b-a3b --parallel 8 -c 30464", 0);
    json_t *more = plan_of("--gpus 1x32 --synth qwen3-30b-a3b --parallel 8 -c 30720", 1);
    json_t *few = plan_of("--gpus 1x32 --synth qwen3-30b-a3b -c 4096", 0);
    json_t *none = plan_of("--gpus 1x16@1000 --synth qwen3-30b-a3b -c 100000", 1);
    const double alone = json_real_value(json_object_get(few, "forecast"));
    double before = 0;
    CHECK_INT(json_array_size(all), 5, "rows");
    for (size_t i = 0; i < 5; i++) {
        const json_t *row = json_array_get(all, i);
        const double tps = json_real_value(json_object_get(row, "forecast")), n = (double)plan_int(row, "prompts");
        CHECK_INT(plan_int(row, "prompts"), prompts[i], "row %zu", i);
        CHECK_INT(plan_int(row, "context"), context[i], "%.0f prompts", n);
        CHECK(i ? tps > before && tps < n * alone : fabs(tps - alone) < 1e-9 * alone, "%.0f prompts: %.1f tok/s", n,
              tps);
        CHECK(fabs(n * json_real_value(json_object_get(row, "forecast_each")) - tps) < 1e-9 * tps, "%.0f prompts", n);
        before = tps;
    }
    /* 48 layers, keys and values of 4 heads of 128 bytes with a factor of 4 bytes each, for 8 contexts */
    CHECK_INT(plan_int(plan_rank_of(eight, 0), "cache"), 8LL * 30464 * 48 * 2 * 4 * (128 + 4), "the cache");
    plan_says(more, "verdict", "needs pruning");
    CHECK(!json_array_size(json_object_get(none, "at_once")), "a table of what does not fit");
    json_decref(one), json_decref(eight), json_decref(more), json_decref(few), json_decref(none);
}

/* The four verdicts, and that what is said to fit is the most. */
static void test_plan_verdicts(void) {
    static const struct {
        const char *args, *verdict;
        int rc, tp, pp, keep;
    } t[] = {{"--gpus 1x32 --synth qwen3-30b-a3b", "fits", 0, 1, 1, 128},
             {"--gpus 4x148@1792 --synth kimi-k2", "fits", 0, 4, 1, 384},
             {"--gpus 4x147@1792 --synth kimi-k2", "fits with --pp", 0, 2, 2, 384},
             {"--gpus 4x147@1792 --tp 4 --synth kimi-k2", "needs pruning", 1, 4, 1, 380},
             {"--gpus 4x147@1792 --tp 4 --synth kimi-k2:experts=380", "fits", 0, 4, 1, 380},
             {"--gpus 4x147@1792 --tp 4 --synth kimi-k2:experts=381", "needs pruning", 1, 4, 1, 380},
             {"--gpus 1x16@1000 --synth qwen3-30b-a3b -c 100000", "needs pruning", 1, 1, 1, 53},
             {"--gpus 4x96 --spec-type none --synth deepseek-v3:backbone=q8_0", "needs pruning", 1, 4, 1, 248},
             {"--gpus 1x32 --spec-type none --synth deepseek-v3", "does not fit", 1, 1, 1, 256},
             {"--gpus 2x8@500 --vram-reserve 1048576 --synth qwen3-30b-a3b", "does not fit", 1, 1, 2, 128}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        json_t *o = plan_of(t[i].args, t[i].rc);
        bool fits = t[i].rc == 0;
        plan_says(o, "verdict", t[i].verdict);
        CHECK(plan_int(o, "tp") == t[i].tp && plan_int(o, "pp") == t[i].pp && plan_int(o, "keep_experts") == t[i].keep,
              "%s: --tp %d --pp %d, %d experts", t[i].args, (int)plan_int(o, "tp"), (int)plan_int(o, "pp"),
              (int)plan_int(o, "keep_experts"));
        CHECK((plan_int(o, "missing") > 0) == !fits &&
                  (plan_int(o, "missing_fewest_experts") > 0) == !strcmp(t[i].verdict, "does not fit"),
              "%s: what is missing", t[i].args);
        int64_t worst = INT64_MAX;
        for (int r = 0; r < t[i].tp * t[i].pp; r++) {
            int64_t f = plan_int(plan_rank_of(o, (size_t)r), "free");
            if (f < worst) worst = f;
        }
        CHECK((worst < 0) == !strcmp(t[i].verdict, "does not fit"), "%s: %lld bytes are left", t[i].args,
              (long long)worst);
        json_decref(o);
    }
    /* the largest context fits, 256 tokens more do not */
    json_t *o = plan_of("--gpus 1x32 --synth qwen3-30b-a3b", 0);
    int64_t most = plan_int(json_array_get(json_object_get(o, "layouts"), 0), "largest_context_fp8");
    for (int more = 0; more < 2; more++) {
        char args[128];
        snprintf(args, sizeof args, "--gpus 1x32 --synth qwen3-30b-a3b -c %d", (int)most + 256 * more);
        json_t *at = plan_of(args, more);
        CHECK(most % 256 == 0 && plan_int(at, "context") == most + 256 * more, "%s", args);
        plan_says(at, "verdict", more ? "needs pruning" : "fits");
        json_decref(at);
    }
    json_decref(o);
    /* what people read */
    char *out = NULL;
    run_command(MOE_BIN " --plan --gpus 4x96 --spec-type none --synth deepseek-v3:backbone=q8_0 </dev/null; " MOE_BIN
                        " --plan --gpus 1x32 -c 50000 --spec-type none --synth deepseek-v3 </dev/null; " MOE_BIN
                        " --plan --gpus 1x32 -c 2000000 --synth qwen3-30b-a3b </dev/null",
                &out, NULL);
    static const char *const lines[] = {
        "\nverdict     needs pruning to 248 of 256 experts per layer (moe-reap --keep 248)\n",
        "\nverdict     does not fit: short by ",
        " on a GPU\n            with 16 experts per layer: still short by ",
        "GiB usable (3.57 reserved), reads 1792 GB/s (assumed)\n",
        "\nGPU 3 ",
        "\nall GPUs ",
        "\n--tp 2 --pp 2 ",
        "  <-\n",
        "\nroofline    ",
        "(real speed is lower)\nforecast    about ",
        " ms besides reading (source: timing model, no card was measured)\n",
        " bf16 cache   roofline   forecast\n",
        "\n            with all experts: fits with -c "};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        CHECK(strstr(sb_cstr(&out), lines[i]), "'%s' is not in: %s", lines[i], sb_cstr(&out));
    for (const char *p = sb_cstr(&out); *p; p += strcspn(p, "\n") + 1)
        CHECK(strcspn(p, "\n") <= 80, "%.*s", (int)strcspn(p, "\n"), p);
    for (size_t i = 0; i < arrlenu(out); i++)
        CHECK(out[i] == '\n' || (out[i] >= 32 && out[i] < 127), "a byte of %d", out[i]);
    arrfree(out);
}

/* Checks that two models have the same plan to the byte. */
static void plan_same(const char *a, const char *b) {
    char cmd[512], *out[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        snprintf(cmd, sizeof cmd, MOE_BIN " --plan --json --gpus 2x8@100 -m %s </dev/null", i ? b : a);
        int rc = run_command(cmd, &out[i], NULL);
        CHECK(rc == 0 && arrlen(out[i]) > 1000, "`%s` gave %d", cmd, rc);
    }
    CHECK(!strcmp(sb_cstr(&out[0]), sb_cstr(&out[1])), "%s has another plan than %s", b, a);
    arrfree(out[0]);
    arrfree(out[1]);
}

/* The header that moe-convert --dry-run writes is as good as the file, but for BF16 that a GPU keeps as FP8. */
static void test_plan_header(void) {
    static const char *const dirs[] = {"convert/demo", "tests/fixtures/qwen3moe_nvfp4",
                                       "tests/fixtures/deepseek_v3_reap",
                                       "tests/fixtures/deepseek_v4", /* tables of experts, of which zeros are none */
                                       "tests/fixtures/step3p7"};    /* factors of frequencies, likewise */
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        char cmd[512], file[2][128];
        for (int dry = 0; dry < 2; dry++) {
            snprintf(file[dry], sizeof file[0], "%s/plan%d.gguf", test_dir(), dry);
            snprintf(cmd, sizeof cmd, CONVERT_BIN " %s --name same --backbone q8_0 -o %s%s", dirs[i], file[dry],
                     dry ? " --dry-run" : "");
            CHECK(run_command(cmd, NULL, NULL) == 0, "%s", cmd);
        }
        plan_same(file[0], file[1]);
        unlink(file[0]), unlink(file[1]);
    }
}

/* A file of nothing but holes after a header. */
static void plan_write(const char *path, const uint8_t *header, size_t n, uint64_t data) {
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(header, 1, n, f) == n;
    ok = f && !fclose(f) && ok && !truncate(path, (off_t)(n + data));
    CHECK(ok, "cannot write %s", path);
}

/* One file, its header, two parts. */
static void test_plan_split(void) {
    /* clang-format off */
    const struct synth y = {"tiny", "qwen3moe", .keys =
        "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 attention.key_length=32 "
        "expert_count=16 expert_used_count=2 expert_feed_forward_length=128 vocab_size=256 context_length=256", .backbone = GGUF_Q8_0};
    /* clang-format on */
    struct synth_tensor *t = synth_tensors(&y), *head = NULL;
    struct gguf_writer w = {0};
    char path[4][128];
    size_t n, half = arrlenu(t) / 2;
    uint64_t data;
    for (int i = 0; i < 4; i++)
        snprintf(path[i], sizeof path[0], i < 2 ? "%s/one%d.gguf" : "%s/plan-%05d-of-00002.gguf", test_dir(),
                 i < 2 ? i : i - 1);
    uint8_t *h = synth_header(&y, t, &n, &data);
    plan_write(path[0], h, n, data), plan_write(path[1], h, n, 0);
    free(h);
    for (size_t i = 0; i < half; i++) arrput(head, t[i]);
    h = synth_header(&y, head, &n, &data);
    plan_write(path[2], h, n, data);
    free(h);
    for (size_t i = half; i < arrlenu(t); i++) gguf_add_tensor(&w, t[i].name, t[i].type, t[i].n_dims, t[i].ne);
    data = w.data_bytes, h = gguf_header(&w, &n);
    plan_write(path[3], h, n, data);
    free(h);
    gguf_writer_free(&w);
    arrfree(t);
    arrfree(head);
    plan_same(path[0], path[1]), plan_same(path[0], path[2]), plan_same(path[0], path[3]);
    for (int i = 0; i < 4; i++) unlink(path[i]);
}

/* Without a GPU: the file, the cache and the activations in the memory that is there. */
static void test_plan_cpu(void) {
    json_t *o = plan_of("--cpu -t 1 -m build/demo.gguf -c 1000", 0);
    const json_t *r = plan_rank_of(o, 0);
    struct stat st;
    char *out = NULL;
    plan_says(o, "machine", "cpu"), plan_says(o, "verdict", "fits"), plan_says(o, "kv", "bf16");
    CHECK(!json_object_get(o, "forecast"), "a forecast for a CPU");
    CHECK(!stat("build/demo.gguf", &st) && plan_int(r, "weights") == st.st_size, "the file has %lld bytes",
          (long long)st.st_size);
    int rc =
        run_command(MOE_BIN " --cpu -t 1 -c 1000 -n 1 --verbose -m build/demo.gguf -p x 2>&1 >/dev/null", &out, NULL);
    const char *cache = strstr(sb_cstr(&out), "; cache "), *activations = strstr(sb_cstr(&out), "activations ");
    double mib[2] = {0, 0};
    if (CHECK(rc == 0 && cache && activations, "%s", sb_cstr(&out)))
        mib[0] = atof(cache + 8), mib[1] = atof(activations + 12);
    CHECK(fabs((double)plan_int(r, "cache") / 0x1p20 - mib[0]) < 0.06 &&
              fabs((double)plan_int(r, "scratch_about") / 0x1p20 - mib[1]) < 0.06,
          "cache %lld, activations %lld; the engine has %g and %g MiB", (long long)plan_int(r, "cache"),
          (long long)plan_int(r, "scratch_about"), mib[0], mib[1]);
    CHECK(plan_real_of(r, "bytes_per_second") > 1e8 && plan_int(r, "usable") > 1 << 20, "the machine");
    json_decref(o);
    arrfree(out);
    json_decref(plan_of("--cpu -t 1 --synth kimi-k2:backbone=q8_0", 1));
}

/* Where stages keep more experts than tensor parallelism, which is faster, the plan names both. */
static void test_plan_layouts(void) {
    char *text = NULL, want[96];
    json_t *o = plan_of("--gpus 2x96 --tp 2 --synth glm-4.7", 1), *most = plan_of("--gpus 2x96 --synth glm-4.7", 1);
    const int64_t first = plan_int(o, "keep_experts"), n = plan_int(most, "keep_experts");
    CHECK(first > 0 && first < n && plan_int(most, "pp") == 2, "%lld and %lld experts", (long long)first, (long long)n);
    snprintf(want, sizeof want, "\n            --tp 2 --pp 1 is faster and has room for %lld experts per layer\n",
             (long long)first);
    run_command(MOE_BIN " --plan --gpus 2x96 --synth glm-4.7 </dev/null", &text, NULL);
    CHECK_HAS(text, want, "%s", sb_cstr(&text));
    arrsetlen(text, 0);
    run_command(MOE_BIN " --plan --gpus 4x96 --synth glm-4.7 </dev/null", &text, NULL);
    CHECK(!strstr(sb_cstr(&text), "is faster"), "%s", sb_cstr(&text));
    arrfree(text);
    json_decref(o);
    json_decref(most);
}

static void test_plan_usage(void) {
    static const struct {
        const char *args, *said;
        int rc;
    } t[] = {
        {"--plan --gpus 1x96,1x32 --synth kimi-k2", "--gpus 1x96,1x32: GPUs of different sizes cannot be planned", 2},
        {"--plan --gpus 96 --synth kimi-k2", "or, for --plan, a machine such as 2x96", 2},
        {"--plan --gpus 2x96GBx --synth kimi-k2", "expected NxGIB or NxGIB@GBPS", 2},
        {"--plan --gpus 1x20 --synth kimi-k2", "known are GPUs of 96, 32, 128,", 2},
        {"--plan --gpus 2x96", "--synth NAME for a known shape", 2},
        {"--plan glm-4.7", "--synth for a shape", 2},
        {"--plan --gpus 4x --synth kimi-k2", "--gpus 4x: expected NxGIB or NxGIB@GBPS with N from 1 to 4", 2},
        {"--plan --gpus 5x96 --synth kimi-k2", "with N from 1 to 4", 2},
        {"--plan --gpus 4x96@ --synth kimi-k2", "with N from 1 to 4", 2},
        {"--plan --gpus 4x96@0 --synth kimi-k2", "with N from 1 to 4", 2},
        {"--plan --gpus 4x96,0 --synth kimi-k2", "GPUs of different sizes cannot be planned", 2},
        {"--plan --gpus 4x1e9 --synth kimi-k2", "with N from 1 to 4", 2},
        {"--plan --gpus 4x97 --synth kimi-k2", "of 97 GiB is unknown: give it in GB/s, --gpus 4x97@GBPS", 2},
        {"--gpus 4x96 -m build/demo.gguf -p hi", "--gpus 4x96 describes a machine, which only --plan takes", 2},
        {"--plan --gpus 4x96 --tp 3 --synth kimi-k2", "4 GPUs cannot share this model as --tp and --pp ask", 2},
        {"--plan --gpus 4x96 --pp 4 --synth kimi-k2:layers=3", "each --pp stage needs one of the 3 layers", 2},
        {"--plan --gpus 4x96 --tp 4 -m $d/narrow.gguf", "4 GPUs cannot share this model as", 2},
        {"--plan --gpus 4x96 --cpu --synth kimi-k2", "--cpu and --gpus cannot be combined", 2},
        {"--plan --cpu --tp 2 --synth kimi-k2", "--tp and --pp need GPUs: describe them, such as --gpus 4x96", 2},
        {"--plan --gpus 4x96 --kv f32 --synth kimi-k2", "--kv f32 works only on the CPU", 2},
        {"--plan --gpus 4x96", "no model", 2},
        {"--plan --info -m build/demo.gguf", "--info and --plan cannot be combined", 2},
        {"--plan -p hi -m build/demo.gguf", "--plan and -p cannot be combined", 2},
        {"--plan --synth kimi-k2 -m new.gguf", "--plan needs -m or --synth, not both", 2},
        {"--json -m build/demo.gguf", "--json works only with --plan", 2},
        {"--plan --gpus 4x96 --synth kimi-k2:backbone=q4", "backbone=bf16, q8_0 or fp8", 2},
        {"--plan --gpus 4x96 -m $d/nothing.gguf", "No such file", 1},
        {"--plan --gpus 4x96 -m Makefile", "not a GGUF file", 1}};
    json_decref(plan_of("--gpus 2X96GB --synth gpt-oss-120b", 0));
    json_decref(plan_of("--gpus '2 x 96 GiB @ 1792 GB/s' --synth OpenAI/GPT-OSS-120B", 0));
    /* widths of one unit of 64 */
    /* clang-format off */
    const struct synth narrow = {"narrow", "qwen3moe", .keys =
        "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 attention.key_length=32 "
        "expert_count=16 expert_used_count=2 expert_feed_forward_length=64 vocab_size=512 context_length=256"};
    /* clang-format on */
    struct synth_tensor *tensors = synth_tensors(&narrow);
    size_t n;
    uint64_t data;
    uint8_t *h = synth_header(&narrow, tensors, &n, &data);
    char path[128], args[160];
    snprintf(path, sizeof path, "%s/narrow.gguf", test_dir());
    snprintf(args, sizeof args, "--gpus 2x96 -m %s", path);
    plan_write(path, h, n, 0);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char cmd[256];
        snprintf(cmd, sizeof cmd, "d=%s; unset MOE_MODEL; " MOE_BIN " %s </dev/null", test_dir(), t[i].args);
        check_command(cmd, t[i].rc, "", t[i].said);
    }
    json_t *o = plan_of(args, 0); /* only by layers */
    plan_says(o, "verdict", "fits with --pp");
    json_decref(o);
    free(h);
    arrfree(tensors);
}

/* A header may claim anything: the sums stay sums. */
static void test_plan_absurd(void) {
    /* clang-format off */
    const struct synth y = {"absurd", "qwen3moe", .keys =
        "block_count=2 embedding_length=131072 attention.head_count=1024 attention.head_count_kv=1024 "
        "attention.key_length=4096 expert_count=1024 expert_used_count=32 expert_feed_forward_length=16384 "
        "vocab_size=32768 context_length=268435456"};
    /* clang-format on */
    char path[128], args[160];
    size_t n;
    uint64_t data;
    struct synth_tensor *t = synth_tensors(&y);
    uint8_t *h = synth_header(&y, t, &n, &data);
    snprintf(path, sizeof path, "%s/absurd.gguf", test_dir());
    snprintf(args, sizeof args, "--gpus 4x96 -c %d -m %s", 1 << 28, path);
    plan_write(path, h, n, 0);
    json_t *o = plan_of(args, 1);
    plan_says(o, "verdict", "does not fit");
    /* two layers, two cache tensors of 1024 / 4 heads of 4096 values with a scale each */
    for (size_t i = 0; i < 4; i++)
        CHECK(plan_int(plan_rank_of(o, i), "cache") == ((int64_t)2 * 2 * 256 * (4096 + 4)) << 28, "rank %zu", i);
    CHECK(plan_int(o, "missing") > (int64_t)1 << 50 && plan_int(o, "missing_fewest_experts") > (int64_t)1 << 50,
          "what is missing");
    json_decref(o);
    unlink(path);
    free(h);
    arrfree(t);
}

#ifdef MOE_CUDA
size_t cuda_test_activations(struct rank *r);
bool cuda_test_begin(int seed); /* true: the device multiplies FP4 by FP4 */
bool cuda_test_w4a4(struct rank *r);

/* What the engine allocates is what the plan counted: its weights, with the range of a matrix and without the
 * frequencies; its cache; its activations. */
static void test_plan_engine(void) {
    /* clang-format off */
    static const struct synth tiny[] = {
        {"tiny GQA", "qwen3moe", .keys =
         "block_count=2 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 attention.key_length=32 "
         "expert_count=16 expert_used_count=2 expert_feed_forward_length=128 vocab_size=200 context_length=256"},
        {"tiny MLA", "deepseek2", .keys =
         "block_count=3 embedding_length=128 attention.head_count=4 attention.head_count_kv=1 "
         "attention.q_lora_rank=72 attention.kv_lora_rank=64 attention.key_length_mla=48 "
         "attention.value_length_mla=32 rope.dimension_count=16 leading_dense_block_count=1 feed_forward_length=192 "
         "expert_count=16 expert_used_count=2 expert_feed_forward_length=128 expert_shared_count=1 "
         "expert_group_count=2 expert_group_used_count=1 expert_gating_func=2 expert_weights_norm=true "
         "expert_weights_scale=2.5 vocab_size=200 context_length=256"},
        {"tiny delta", "qwen35moe", .keys =
         "block_count=3 embedding_length=128 attention.head_count=4 attention.head_count_kv=2 attention.key_length=64 "
         "rope.dimension_count=16 ssm.conv_kernel=4 ssm.group_count=2 ssm.time_step_rank=8 ssm.state_size=64 "
         "ssm.inner_size=512 full_attention_interval=2 expert_count=16 expert_used_count=2 "
         "expert_feed_forward_length=128 expert_shared_count=1 vocab_size=200 context_length=256 rope.freq_base=1e7"},
        {"tiny biases", "gpt-oss", .keys =
         "block_count=2 embedding_length=192 attention.head_count=4 attention.head_count_kv=2 attention.key_length=32 "
         "attention.sliding_window=20 attention.sliding_window_pattern=1,0 expert_count=16 expert_used_count=2 "
         "expert_feed_forward_length=192 vocab_size=200 context_length=256", .qkv_bias = true, .ff_type = GGUF_MXFP4}};
    /* clang-format on */
    static const struct {
        const struct synth *shape; /* NULL: the demo model */
        int tp, pp;
        struct offload offload;
    } c[] = {{NULL, 1, 1, {0}},
             {&tiny[0], 2, 1, {0}},
             {&tiny[0], 1, 2, {0}},
             {&tiny[1], 2, 2, {0}},
             {&tiny[2], 2, 1, {0}},
             {&tiny[2], 1, 1, {0}},
             {&tiny[3], 1, 1, {0}},
             {&tiny[3], 2, 1, {0}},
             {&tiny[1], 1, 2, {.n_slot = 5}},
             {&tiny[2], 2, 1, {.n_cpu = 2}},
             {&tiny[3], 1, 1, {.n_slot = 7, .n_cpu = 1}}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct model m = {0};
        struct session s;
        char err[ERR_MAX] = "";
        int tp = c[i].tp, pp = c[i].pp;
        const struct offload at = c[i].offload;
        struct home home = {0};
        struct cuda_options o = {
            .n_ctx = 256, .kv = i % 2 ? KV_FP8 : KV_BF16, .allreduce = ALLREDUCE_ONESHOT, .offload = at};
        struct plan p = {.m = &m, .kv = o.kv, .offload = at};
        o.kv_splits = SPLITS_MAX; /* as is counted */
        if (cuda_test_begin(0)) o.moe_act = MOE_ACT_FP4;
        if (c[i].shape) synth_make(&m, c[i].shape, NULL, true);
        else if (!CHECK(!model_load(&m, "build/demo.gguf", err), "%s", err)) return;
        if (at.n_slot || at.n_cpu) CHECK(!home_open(&home, &m, at.n_slot ? ALL_LAYERS : at.n_cpu, err), "%s", err);
        o.home = home.range;
        o.n_home = (int)arrlen(home.range);
        if (!CHECK(!session_open(&s, &m, tp, pp, cuda_rank_start, &o, err), "%s", err)) return;
        for (int k = 0; k < tp * pp; k++) {
            struct plan_rank *r = &p.layout[0].rank[k];
            struct rank *e = &s.pg->ranks[k];
            plan_rank(r, &p, &m, (struct shard){k % tp, tp, k / tp, pp});
            CHECK((int64_t)e->weight_bytes == r->weights - 4 * m.max.rope_dim / 2 + 8, "weights %zu, plan %lld",
                  e->weight_bytes, (long long)r->weights);
            CHECK(e->kv_bytes == state_bytes(&r->m, e->kv_type, 256), "cache %zu, plan %zu", e->kv_bytes,
                  state_bytes(&r->m, e->kv_type, 256));
            size_t batch =
                4 * ((size_t)e->chunk + 2) + DECODE_MAX_TOKENS * (4 + sizeof(struct run)) + 2 * (size_t)m.max.rope_dim;
            size_t room = cuda_test_activations(e) - batch;
            CHECK(e->bytes == gpu_bytes(&r->m, e->chunk, false, 1, at), "--tp %d --pp %d: scratch %zu", tp, pp,
                  e->bytes);
            CHECK(tp * pp == 1 && cuda_test_w4a4(e) && !at.n_cpu ? room == e->bytes : room < e->bytes + 4096,
                  "--tp %d --pp %d: %zu bytes are allocated, %zu were counted", tp, pp, room, e->bytes);
            shard_free(&r->m);
        }
        session_free(&s);
        home_close(&home);
        model_free(&m);
    }
}

/* A GPU that is there; named twice each rank has half of it. */
static void test_plan_device(void) {
    const struct settings set = {.vram_reserve = 256};
    const int twice[] = {0, 0};
    struct plan one = {0}, two = {0};
    plan_real(&one, &set, twice, 1), plan_real(&two, &set, twice, 2);
    const struct plan_device *a = &one.device[0], *b = &two.device[1];
    CHECK(one.n_device == 1 && two.n_device == 2 && a->name[0] && !strcmp(a->name, b->name), "'%s' and '%s'", a->name,
          b->name);
    CHECK(a->usable > 0 && a->usable <= a->memory - (256 << 20) && a->rate > 1e9, "%lld of %lld bytes at %g",
          (long long)a->usable, (long long)a->memory, a->rate);
    CHECK(one.copy_rate > 1e3 && !strcmp(one.copy_source, "measured"), "copies at %g", one.copy_rate);
    CHECK(b->memory == a->memory / 2 && b->rate == a->rate / 2 && b->usable < a->memory / 2,
          "the half has %lld bytes at %g", (long long)b->memory, b->rate);
}

#define TESTS_PLAN_ENGINE {"cuda/plan", test_plan_engine}, {"cuda/plan-device", test_plan_device},
#endif

/* Experts in host memory: as many slots as there is room for, each of so many bytes; what pruning would give is still
 * told; memory that is too small changes nothing. */
static void test_plan_host(void) {
    const int64_t tile = 512 + 64, slot = 36 * 3 * (int64_t)(2880 / 16) * (2880 / 64) * tile; /* all layers */
    static const char *const gpus[] = {"1x32", "1x33"};
    int64_t slots[2], weights[2];
    char args[128];
    for (int i = 0; i < 2; i++) {
        snprintf(args, sizeof args, "--gpus %s@1792 --host 128@40 --synth gpt-oss-120b", gpus[i]);
        json_t *o = plan_of(args, 0);
        const json_t *host = json_object_get(o, "host_experts"), *rank = plan_rank_of(o, 0);
        plan_says(o, "verdict", "fits with experts in host memory");
        slots[i] = plan_int(host, "slots");
        weights[i] = plan_int(rank, "weights");
        const double percent = plan_real_of(host, "hit_percent"), few = plan_real_of(host, "hit_percent_few");
        const double copied = plan_real_of(host, "copied_bytes"), all = 36 * 4 * 3 * 2880.0 * 45 * (32 + 4);
        CHECK(plan_int(rank, "free") >= 0 && plan_int(rank, "free") < slot + 36 * 6 * (2 << 20), "%s: %lld are free",
              gpus[i], (long long)plan_int(rank, "free"));
        CHECK(plan_int(o, "context") == 32768 && plan_int(o, "keep_experts") == 128, "%s", gpus[i]);
        CHECK(percent > few && few > 75 && percent < 92, "%s: hits %g to %g %%", gpus[i], few, percent);
        CHECK(fabs(copied / (all * (1 - percent / 100)) - 1) < 0.01, "%s: %g bytes are copied, of %g", gpus[i], copied,
              all);
        CHECK(1 / plan_real_of(o, "forecast") > copied / 36e9 &&
                  plan_real_of(host, "forecast_few") < plan_real_of(o, "forecast"),
              "%s: forecast %g", gpus[i], plan_real_of(o, "forecast"));
        json_t *small = NULL;
        snprintf(args, sizeof args, "--gpus %s@1792 --host 50 -fit off --synth gpt-oss-120b", gpus[i]);
        small = plan_of(args, 1);
        plan_says(small, "verdict", "needs pruning");
        CHECK(plan_int(small, "keep_experts") == plan_int(host, "keep_experts"), "%s: pruning", gpus[i]);
        json_decref(small);
        json_decref(o);
    }
    CHECK(slots[1] > slots[0] && weights[1] - weights[0] == (slots[1] - slots[0]) * slot,
          "%lld slots more take %lld bytes", (long long)(slots[1] - slots[0]), (long long)(weights[1] - weights[0]));
    json_decref(plan_of("--gpus 1x32 --host 128 --synth qwen3-30b-a3b", 0));
    json_t *two = plan_of("--gpus 2x96 --host 512 --synth deepseek-v3.2", 0);
    plan_says(two, "verdict", "fits with experts in host memory");
    CHECK(plan_int(two, "tp") == 2, "two ranks");
    json_decref(two);
}

/* Experts that have no room in the host's memory either: as many as there is room for, and what is read from disk is in
 * the forecast. */
static void test_plan_disk(void) {
    const double slab = 3 * 2880.0 * 2880 / 32 * 17; /* an expert in the file */
    json_t *all = plan_of("--gpus 1x32 --host 128@50 --synth gpt-oss-120b", 0);
    json_t *some = plan_of("--gpus 1x32 --host 20@50/70/3.5 --synth gpt-oss-120b", 0);
    const json_t *disk = json_object_get(some, "disk"), *host = json_object_get(some, "host_experts");
    plan_says(some, "verdict", "runs with experts on disk");
    const double share = 1 - 1.0 / RING_SHARE; /* of the memory that slots have */
    const double memory = 20 * 0x1p30 * 15 / 16 * share, used = (double)(plan_int(disk, "stored") * 36) * slab;
    CHECK(used < memory && used > memory - 2 * 36 * slab, "%lld experts are in memory",
          (long long)plan_int(disk, "stored"));
    const double read = plan_real_of(disk, "read_bytes"), few = plan_real_of(disk, "read_bytes_few");
    CHECK(read > 0 && few > read && few < 0.2 * 36 * 4 * slab, "%g to %g bytes are read", read, few);
    CHECK_INT((int)plan_int(host, "slots"), (int)plan_int(json_object_get(all, "host_experts"), "slots"), "slots");
    const double more = 1 / plan_real_of(some, "forecast") - 1 / plan_real_of(all, "forecast");
    CHECK(fabs(more - (read / 3.5e9 + 36 * 5e-6)) < 36 * 1e-6, "reading takes %g s, expected %g", more, read / 3.5e9);
    json_decref(all), json_decref(some);
    json_t *cpu = plan_of("--gpus 1x96 --host 8 --synth gpt-oss-120b --cpu-moe", 0);
    CHECK(fabs((double)plan_int(json_object_get(cpu, "disk"), "stored") - 7.5 * 0x1p30 * share / 36 / slab) < 1,
          "%lld experts are in memory", (long long)plan_int(json_object_get(cpu, "disk"), "stored"));
    json_decref(cpu);
    cpu = plan_of("--gpus 1x96 --host 4 --synth gpt-oss-120b --n-cpu-moe 5", 0); /* no room for other layers */
    CHECK(fabs((double)plan_int(json_object_get(cpu, "disk"), "stored") - 3.75 * 0x1p30 * share / 5 / slab) < 1.5,
          "%lld experts of 5 layers are in memory", (long long)plan_int(json_object_get(cpu, "disk"), "stored"));
    json_decref(cpu);
}

/* --n-cpu-moe: the layers' experts leave the GPU, their bytes and a question each are in the forecast, and an N that is
 * faster is named. */
static void test_plan_cpu_moe(void) {
    const int64_t experts = 128 * 3 * (int64_t)(2880 / 16) * (2880 / 64) * (512 + 64); /* of a layer of gpt-oss-120b */
    const double read = 4 * 3 * 2880.0 * 2880 / 32 * 17;                               /* by a token, in the file */
    json_t *all = plan_of("--gpus 1x96 --host 128@50/100 --synth gpt-oss-120b", 0);
    json_t *some = plan_of("--gpus 1x96 --host 128@50/100 --synth gpt-oss-120b --n-cpu-moe 5", 0);
    const int64_t a = plan_int(plan_rank_of(all, 0), "weights"), b = plan_int(plan_rank_of(some, 0), "weights");
    CHECK(a - b == 5 * experts, "the experts of 5 layers have %lld bytes, not %lld", (long long)(5 * experts),
          (long long)(a - b));
    const double more = 1 / plan_real_of(some, "forecast") - 1 / plan_real_of(all, "forecast");
    const double cpu = 5 * (read / 100e9 + 1e-5), gpu = 5 * read / (1792e9 * 0.91);
    CHECK(fabs(more - (cpu - gpu)) < 5 * 5e-6, "5 layers on the CPU take %g s more, not %g", cpu - gpu, more);
    plan_says(some, "verdict", "fits");
    CHECK_INT((int)plan_int(some, "cpu_layers"), 5, "layers");
    json_decref(all), json_decref(some);
    json_t *slow = plan_of("--gpus 1x96 --host 512@50/70 --synth glm-5", 0);
    CHECK(!json_object_get(slow, "faster"), "a CPU that reads 70 GB/s is not faster than copies");
    json_t *fast = plan_of("--gpus 1x96 --host 512@50/330 --synth glm-5", 0);
    const json_t *faster = json_object_get(fast, "faster");
    char args[128];
    if (CHECK(faster && plan_int(faster, "n_cpu_moe") > 40, "a CPU that reads 330 GB/s is")) {
        snprintf(args, sizeof args, "--gpus 1x96 --host 512@50/330 --synth glm-5 --n-cpu-moe %d",
                 (int)plan_int(faster, "n_cpu_moe"));
        json_t *then = plan_of(args, 0);
        CHECK(fabs(plan_real_of(then, "forecast") / plan_real_of(faster, "forecast") - 1) < 0.01 &&
                  plan_real_of(then, "forecast") > 2 * plan_real_of(fast, "forecast"),
              "%s: %g tok/s", args, plan_real_of(then, "forecast"));
        json_decref(then);
    }
    json_decref(slow), json_decref(fast);
    char *no = NULL;
    CHECK(run_command(MOE_BIN " --plan --gpus 1x96 --host 1 --synth glm-5 --cpu-moe", NULL, &no) == EXIT_RUN &&
              strstr(sb_cstr(&no), "(--n-cpu-moe) need more than 1.00 GiB of host memory"),
          "%s", sb_cstr(&no));
    arrfree(no);
}

/* The table of experts on disk in README.md is what --plan says. */
static void test_plan_readme_disk(void) {
    char *text = NULL, err[ERR_MAX];
    int rows = 0;
    if (!CHECK(read_file("README.md", &text, err) == 0, "%s", err)) return;
    arrput(text, 0);
    for (const char *p = strstr(text, "| in memory | from disk |"); p && (p = strchr(p, '\n'));) {
        int host, slots, experts, stored, slow, fast;
        double read, few;
        char gpu[16], model[32], args[128];
        if (sscanf(++p, "| %d GB beside %15s | `%31[^`]` | %d of %d | %d | %lf to %lf GB a token | %d to %d tok/s |",
                   &host, gpu, model, &slots, &experts, &stored, &read, &few, &slow, &fast) != 10) {
            if (*p != '|') break;
            continue;
        }
        snprintf(args, sizeof args, "--gpus %s --host %d --synth %s", gpu, host, model);
        json_t *o = plan_of(args, 0);
        const json_t *h = json_object_get(o, "host_experts"), *d = json_object_get(o, "disk");
        CHECK(plan_int(h, "slots") == slots && plan_int(o, "experts") == experts && plan_int(d, "stored") == stored,
              "%s: %d slots", args, (int)plan_int(h, "slots"));
        CHECK(fabs(plan_real_of(d, "read_bytes") * 1e-9 - read) < 0.006 &&
                  fabs(plan_real_of(d, "read_bytes_few") * 1e-9 - few) < 0.006,
              "%s: %g to %g bytes", args, plan_real_of(d, "read_bytes"), plan_real_of(d, "read_bytes_few"));
        CHECK(lround(plan_real_of(h, "forecast_few")) == slow && lround(plan_real_of(o, "forecast")) == fast,
              "%s: %g to %g tok/s", args, plan_real_of(h, "forecast_few"), plan_real_of(o, "forecast"));
        json_decref(o);
        rows++;
    }
    CHECK(rows >= 6, "%d rows", rows);
    arrfree(text);
}

/* The table of experts in host memory in README.md is what --plan says. */
static void test_plan_readme(void) {
    char *text = NULL, err[ERR_MAX];
    int rows = 0;
    if (!CHECK(read_file("README.md", &text, err) == 0, "%s", err)) return;
    arrput(text, 0);
    for (const char *p = strstr(text, "| GPU, host memory |"); p && (p = strchr(p, '\n'));) {
        int host, slots, experts, few, typical, slow, fast, gib;
        char gpu[16], model[32], args[128];
        if (sscanf(++p, "| %d GB beside %15s | `%31[^`]` | %d of %d | %d GiB | %d to %d %% | %d to %d tok/s |", &host,
                   gpu, model, &slots, &experts, &gib, &few, &typical, &slow, &fast) != 10) {
            if (*p != '|') break;
            continue;
        }
        snprintf(args, sizeof args, "--gpus %s --host %d --synth %s", gpu, host, model);
        json_t *o = plan_of(args, 0);
        const json_t *h = json_object_get(o, "host_experts");
        CHECK(plan_int(h, "slots") == slots && plan_int(o, "experts") == experts, "%s: %d slots", args,
              (int)plan_int(h, "slots"));
        CHECK(lround((double)plan_int(h, "bytes") / 0x1p30) == gib &&
                  lround(plan_real_of(h, "hit_percent_few")) == few &&
                  lround(plan_real_of(h, "hit_percent")) == typical,
              "%s: %g to %g %%", args, plan_real_of(h, "hit_percent_few"), plan_real_of(h, "hit_percent"));
        CHECK(lround(plan_real_of(h, "forecast_few")) == slow && lround(plan_real_of(o, "forecast")) == fast,
              "%s: %g to %g tok/s", args, plan_real_of(h, "forecast_few"), plan_real_of(o, "forecast"));
        json_decref(o);
        rows++;
    }
    CHECK(rows == 12, "%d rows", rows);
    arrfree(text);
}

#define TESTS_PLAN                                                                                             \
    {"plan/published", test_plan_published}, {"plan/delta", test_plan_delta},                                  \
        {"plan/prediction", test_plan_prediction}, {"plan/sparse", test_plan_sparse},                          \
        {"plan/streams", test_plan_streams}, {"plan/streams-context", test_plan_streams_context},              \
        {"plan/uneven", test_plan_uneven}, {"plan/stages", test_plan_stages}, {"plan/limit", test_plan_limit}, \
        {"plan/forecast", test_plan_forecast}, {"plan/launches", test_plan_launches},                          \
        {"plan/ngrams", test_plan_ngrams}, {"plan/shared-keys", test_plan_shared_keys},                        \
        {"plan/kimi-k3", test_plan_kimi_k3}, {"plan/verdicts", test_plan_verdicts},                            \
        {"plan/at-once", test_plan_at_once}, {"plan/host", test_plan_host}, {"plan/disk", test_plan_disk},     \
        {"plan/n-cpu-moe", test_plan_cpu_moe}, {"plan/readme-disk", test_plan_readme_disk},                    \
        {"plan/readme", test_plan_readme}, {"plan/header", test_plan_header}, {"plan/split", test_plan_split}, \
        {"plan/cpu", test_plan_cpu}, {"plan/layouts", test_plan_layouts}, {"plan/usage", test_plan_usage},     \
        {"plan/absurd", test_plan_absurd},
