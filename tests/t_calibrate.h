/* --calibrate against sums over plainly dequantized weights, its files, and --compare. */

/* Ids that stay in the vocabulary of the fixtures. */
static void some_ids(int32_t *ids, int n, int n_vocab) {
    for (int i = 0; i < n; i++) ids[i] = (int32_t)((uint32_t)i * 2654435761u >> 8) % n_vocab;
}

/* What should have been collected, by a norm_ffn that computes it all again in double from the norm. */
static struct {
    const struct ops *plain;
    double *stats, *in_sum2;
} spy;

/* y (n_out) = the product of matrix e of w and x (n_in). */
static void spy_product(const struct weight *w, int e, const double *x, double *y) {
    float *row = malloc((size_t)w->n_in * sizeof *row);
    for (int o = 0; o < w->n_out; o++) {
        gguf_dequantize_row(w->type, w->data + (size_t)e * w->expert_bytes + (size_t)o * w->row_bytes, row,
                            (size_t)w->n_in);
        y[o] = 0;
        for (int i = 0; i < w->n_in; i++) y[o] += (double)row[i] * x[i];
        y[o] *= w->scale ? (double)w->scale[e] : 1;
        if (w->bias) y[o] += (double)w->bias[(ptrdiff_t)e * w->bias_stride + o];
    }
    free(row);
}

/* Returns the norm of the output of expert e of a feed-forward for x; adds the squares of both inputs to the sums. */
static double spy_expert(const struct model *m, int il, int ffn, int e, const float *input) {
    const struct layer *layer = &m->layers[il];
    struct ffn_weights ffns[2];
    layer_ffns(layer, ffns);
    const struct ffn_weights *n = &ffns[ffn];
    const size_t n_in = (size_t)n->up->n_in, ff = (size_t)n->up->n_out, n_out = (size_t)n->down->n_out;
    double *x = malloc((n_in + 2 * ff + n_out) * sizeof *x), *g = x + n_in, *u = g + ff, *y = u + ff;
    double *sums = spy.in_sum2 + in_sum2_before(m, layer_of_block(m, layer->block)) + (ffn ? ffn_in_sum2(&ffns[0]) : 0),
           norm = 0;
    for (size_t i = 0; i < n_in; i++) x[i] = (double)input[i], sums[(size_t)e * n_in + i] += x[i] * x[i];
    if (n->gate->data) spy_product(n->gate, e, x, g);
    spy_product(n->up, e, x, u);
    sums += (size_t)n->up->n_expert * n_in + (size_t)e * ff;
    const struct glu *glu = ffn ? &layer->sh_glu : &layer->glu;
    const double limit = (double)glu->up_max;
    for (size_t i = 0; i < ff; i++) {
        if (limit > 0) g[i] = (double)glu->alpha * fmin(g[i], (double)glu->gate_max);
        if (limit > 0) u[i] = fmax(-limit, fmin(u[i], limit)) * (double)glu->factor + (double)glu->offset;
        if (glu->gelu) {
            g[i] *= (1 + tanh(sqrt(2 / M_PI) * (g[i] + 0.044715 * g[i] * g[i] * g[i]))) / 2 * u[i];
        } else if (glu->gate_cap > 0) {
            g[i] = (double)glu->gate_cap * tanh(g[i] / (double)glu->gate_cap) / (1 + exp(-g[i]));
            g[i] *= (double)glu->up_cap * tanh(u[i] / (double)glu->up_cap);
        } else if (n->gate->data) g[i] *= u[i] / (1 + exp(-g[i]));
        else g[i] = fmax(u[i], 0) * fmax(u[i], 0);
        sums[i] += g[i] * g[i];
    }
    spy_product(n->down, e, g, y);
    for (size_t i = 0; i < n_out; i++) norm += y[i] * y[i];
    free(x);
    return sqrt(norm);
}

static void spy_norm_ffn(struct rank *r, const struct step *step) {
    const struct model *m = r->m;
    const int il = step->il;
    const struct layer *layer = &m->layers[il];
    const int k = layer->n_expert_used;
    spy.plain->norm_ffn(r, step);
    for (int t = 0; t < r->n_tok && team_leads(); t++) {
        double all = 0;
        if (!layer->n_expert) spy_expert(m, il, 0, 0, act_row(r, A_H, t));
        for (int j = 0; j < k && layer->n_expert && !step->dense; j++) all += (double)r->cpu->route_w[t * k + j];
        for (int j = 0; j < k && layer->n_expert && !step->dense; j++) {
            const int e = r->cpu->route_id[t * k + j];
            const double norm = spy_expert(m, il, 0, e, act_row(r, layer->n_latent ? A_LATENT : A_H, t)),
                         g = (double)r->cpu->route_w[t * k + j] / all;
            double *s = stats_of(m, spy.stats, layer_of_block(m, layer->block), e);
            s[STAT_TOKENS]++, s[STAT_WEIGHTED] += g * norm, s[STAT_NORM] += norm, s[STAT_GATE] += g;
            s[STAT_WEIGHTED_MAX] = fmax(s[STAT_WEIGHTED_MAX], g * norm);
        }
        if (layer->n_expert && layer->sh_up.data && step->dense == layer_parts(m, layer))
            spy_expert(m, il, 1, 0, act_row(r, A_H, t));
    }
    team_barrier();
}

/* Largest difference of two lists, relative to the larger of a value and a thousandth of the largest. */
static double worst_difference(const double *a, const double *b, size_t n, size_t step) {
    double worst = 0, top = 0;
    for (size_t i = 0; i < n; i += step) top = fmax(top, fabs(a[i]));
    for (size_t i = 0; i < n; i += step)
        worst = fmax(worst, fabs(a[i] - b[i]) / fmax(fmax(fabs(a[i]), top * 1e-3), 1e-300));
    return worst;
}

static double *in_sum2_as_double(const float *x, size_t n) {
    double *y = xmalloc(n * sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

static void test_calibrate_sums(void) {
    static const char *const names[] = {"deepseek_v3",
                                        "qwen3moe_nvfp4",
                                        "qwen3_next",
                                        "deepseek_v3_plain",
                                        "qwen3_5_moe_nvfp4",
                                        "qwen3moe_reap",
                                        "gpt_oss",
                                        "step3p5",
                                        "glm_moe_dsa_types",
                                        "minimax_m3",
                                        "deepseek_v4",
                                        "kimi_linear_nvfp4",
                                        "nemotron_h",
                                        "inkling2_loop",
                                        "glm5_next",
                                        "qwen4_exp",
                                        "gemma4",
                                        "deepseek_v41"};
    for (int f = 0; f < (SANITIZED ? 3 : 18); f++) {
        struct model m;
        if (!fixture_load(names[f], &m)) return;
        const size_t n_stats = (size_t)model_blocks(&m) * (size_t)m.n_expert_max * STATS;
        const size_t n_in_sum2 = in_sum2_before(&m, model_blocks(&m));
        double *got = xcalloc(n_stats, sizeof *got);
        float *in_sum2 = xcalloc(n_in_sum2, sizeof *in_sum2);
        for (int fast = 0; fast < 2; fast++) {
            const struct kernels *k = fast ? kernels_choose() : &kernels_ref;
            const double limit = fast ? 2e-3 : 2e-5;
            struct session s;
            int32_t ids[40];
            spy.stats = xcalloc(n_stats, sizeof *spy.stats), spy.in_sum2 = xcalloc(n_in_sum2, sizeof *spy.in_sum2);
            session_open_cpu(&s, &m, 1, 1, (struct cpu_options){k, 2, 64, KV_F32, true, true, {0}});
            struct ops ops = *s.r->ops;
            spy.plain = s.r->ops, ops.norm_ffn = spy_norm_ffn, s.r->ops = &ops;
            some_ids(ids, 40, m.n_vocab);
            session_forward(&s, ids, 23);
            session_forward(&s, ids + 23, 1);
            session_truncate(&s, 0);
            session_forward(&s, ids + 24, 16);
            session_catch_up(&s, 15, PASS_MTP);
            session_stats(&s, got, in_sum2);
            double *sq = in_sum2_as_double(in_sum2, n_in_sum2);
            for (int i = 0; i < STATS; i++) {
                const double e = worst_difference(spy.stats + i, got + i, n_stats - (size_t)i, STATS);
                CHECK(e <= (i == STAT_TOKENS ? 0 : limit), "%s, %s: %s differs by %.2e", names[f], k->name,
                      stat_names[i], e);
            }
            const double e = worst_difference(spy.in_sum2, sq, n_in_sum2, 1);
            CHECK(e <= 20 * limit, "%s, %s: squares differ by %.2e", names[f], k->name, e);
            s.r->ops = spy.plain;
            session_free(&s);
            free(spy.stats), free(spy.in_sum2), free(sq);
        }
        free(got), free(in_sum2);
        model_free(&m);
    }
}

/* ---- the files ---- */

static json_t *scores_read(const char *name) {
    char path[256];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s", test_dir(), name);
    json_t *j = json_load_file(path, 0, &e);
    CHECK(j != NULL, "%s: %s", name, e.text);
    return j;
}

/* Largest relative difference of the sums of two score files; the counts must be equal. The second one may lack so many
 * layers, for prediction. */
static double scores_differ(const json_t *a, const json_t *b, size_t lacks) {
    double worst = 0;
    const json_t *la = json_object_get(a, "layers"), *lb = json_object_get(b, "layers");
    CHECK(json_array_size(la) == json_array_size(lb) + lacks && json_array_size(la) > 0, "layers");
    for (size_t il = 0; il < json_array_size(lb); il++)
        for (int k = 0; k < STATS; k++) {
            const json_t *x = json_object_get(json_array_get(la, il), stat_names[k]);
            const json_t *y = json_object_get(json_array_get(lb, il), stat_names[k]);
            CHECK(json_array_size(x) == json_array_size(y), "layer %zu", il);
            for (size_t e = 0; e < json_array_size(x); e++) {
                const double u = json_number_value(json_array_get(x, e)), v = json_number_value(json_array_get(y, e));
                if (k == STAT_TOKENS) CHECK(u == v, "layer %zu, expert %zu: %g and %g tokens", il, e, u, v);
                else worst = fmax(worst, fabs(u - v) / fmax(u, 1e-9));
            }
        }
    return worst;
}

/* A short text and chats in files. */
static void calibration_texts(void) {
    run_command(IN_DIR("head -c 6000 prompts/haystack.txt >@/a.txt; tail -c 5000 prompts/haystack.txt >@/b.txt; "
                       "printf '%s\\n\\n%s\\n%s\\n' "
                       "'{\"messages\": [{\"role\": \"user\", \"content\": \"What is 7 squared?\"}, "
                       "{\"role\": \"assistant\", \"content\": \"49\"}]}' "
                       "'{\"text\": \"Once upon a time\"}' "
                       "'{\"prompt\": \"One word: \", \"completion\": \"yes\"}' >@/c.jsonl"),
                NULL, NULL);
}

static void test_calibrate_files(void) {
    calibration_texts();
    check_command(IN_DIR(MOE "--calibrate @/a.txt @/b.txt @/c.jsonl -o @/all.json -c 512"), 0, NULL, NULL);
    /* the same in three runs, of which the last finds two files done; by two stages; by another number of threads */
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/sum.json -c 512"), 0, NULL, NULL);
    check_command(IN_DIR(MOE "--calibrate @/b.txt --output @/sum.json -c 512"), 0, NULL, "resuming");
    check_command(IN_DIR(MOE "--calibrate @/a.txt @/c.jsonl @/b.txt -o @/sum.json -c 512"), 0, NULL, "already");
    check_command(IN_DIR(MOE "--calibrate @/a.txt @/b.txt @/c.jsonl -o @/pp.json -c 512 --cpu --pp 2 -t 2"), 0, NULL,
                  NULL);
    json_t *all = scores_read("all.json"), *sum = scores_read("sum.json"), *pp = scores_read("pp.json");
    if (!all || !sum || !pp) return;
    double e = scores_differ(all, sum, 0);
    CHECK(e < 1e-9, "in several runs: %g", e);
    e = scores_differ(all, pp, 1);
    CHECK(e < 1e-6, "by two stages: %g", e);
    const json_int_t tokens = json_integer_value(json_object_get(all, "tokens"));
    const json_t *layers = json_object_get(all, "layers");
    CHECK(json_is_null(json_array_get(layers, 0)), "the first layer of the demo has no experts");
    for (size_t il = 1; il < json_array_size(layers); il++) {
        /* in a text or window the last token has no next one, which the MTP layer would need */
        const double per = il < 6 ? 0 : 9, want = (double)tokens - per;
        double n = 0, gates = 0;
        const json_t *y = json_array_get(layers, il);
        for (size_t x = 0; x < 16; x++) {
            n += json_number_value(json_array_get(json_object_get(y, "tokens"), x));
            gates += json_number_value(json_array_get(json_object_get(y, "gate_sum"), x));
        }
        CHECK(n == 2.0 * want, "layer %zu: %g choices of %g tokens", il, n, want);
        CHECK(fabs(gates - want) < 1e-3 * want, "layer %zu: gates add up to %g", il, gates);
    }
    json_decref(all), json_decref(sum), json_decref(pp);
}

static struct {
    const struct ops *plain;
    int left; /* forwards until the interrupt */
} interruption;

static void interrupt_embed(struct rank *r, const struct step *s) {
    if (!--interruption.left) raise(SIGINT);
    interruption.plain->embed(r, s);
}

/* build/test_moe --interrupt N OPTIONS: `moe OPTIONS` with --calibrate on the CPU, which gets a SIGINT in its Nth
 * forward. */
static int calibrate_interrupted(int n, int argc, char **argv) {
    struct settings set;
    struct engine e;
    char err[ERR_MAX];
    settings_init(&set);
    if (options_parse(&set, argc, argv, err)) die_usage("%s", err);
    signals_install();
    engine_open(&e, &set);
    struct ops ops = *e.session.r->ops;
    interruption.plain = e.session.r->ops;
    interruption.left = n;
    ops.embed = interrupt_embed;
    e.session.r->ops = &ops;
    const int code = mode_calibrate(&e);
    engine_close(&e);
    settings_free(&set);
    return code;
}

/* Largest NMSE between the tensors of two files with the same names and shapes; 1 with a remark if they differ in
 * these. */
static double tensors_differ(const char *name_a, const char *name_b) {
    struct gguf a, b;
    char path[256], err[ERR_MAX];
    double worst = 0;
    snprintf(path, sizeof path, "%s/%s", test_dir(), name_a);
    if (!CHECK(gguf_open(&a, path, err, sizeof err) == 0, "%s", err)) return 1;
    snprintf(path, sizeof path, "%s/%s", test_dir(), name_b);
    if (!CHECK(gguf_open(&b, path, err, sizeof err) == 0, "%s", err)) return 1;
    CHECK(a.n_tensors > 10, "%u tensors", a.n_tensors);
    CHECK_INT(b.n_tensors, a.n_tensors, "tensors of %s", name_b);
    for (uint32_t i = 0; i < a.n_tensors; i++) {
        const struct gguf_tensor *x = &a.tensors[i];
        char name[GGUF_MAX_NAME];
        snprintf(name, sizeof name, "%.*s", (int)x->name.n, x->name.p);
        const struct gguf_tensor *y = gguf_find_tensor(&b, name);
        if (!CHECK(y && y->bytes == x->bytes, "%s of %s", name, name_b)) continue;
        worst =
            fmax(worst, nmse((const float *)(const void *)y->data, (const float *)(const void *)x->data, x->bytes / 4));
    }
    gguf_close(&a);
    gguf_close(&b);
    return worst;
}

/* Interrupted in several places and continued, a run has the tokens and the sums of one that was not: windows of 512
 * tokens are cut between two of them. */
static void test_calibrate_resumes(void) {
    static const int forwards[] = {1, 3, 2};
    char self[512], cmd[2048];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (!CHECK(n > 0, "no path of the program")) return;
    self[n] = 0;
    run_command(IN_DIR("head -c 12000 prompts/haystack.txt >@/part.txt; echo '{\"text\": \"a b c\"}' >@/part.jsonl; "
                       "head -c 5000 prompts/haystack.txt | tr '\\n\"' '  ' | "
                       "sed 's/.*/{\"text\": \"&\"}/' >>@/part.jsonl"),
                NULL, NULL);
    for (int i = 0; i < 3; i++) {
        snprintf(cmd, sizeof cmd,
                 "%s --interrupt %d -m build/demo.gguf --cpu --calibrate @/part.jsonl @/part.txt -o @/resumed.json "
                 "--activations @/resumed.gguf -t 1 -c 512",
                 self, forwards[i]);
        check_command(IN_DIR(cmd), EXIT_INTERRUPT, NULL, "interrupted; repeat the command");
    }
    check_command(IN_DIR(MOE "--cpu --calibrate @/part.jsonl @/part.txt -o @/resumed.json --activations @/resumed.gguf "
                             "-c 512"),
                  0, NULL, "resuming");
    check_command(IN_DIR(MOE "--cpu --calibrate @/part.jsonl @/part.txt -o @/whole.json --activations @/whole.gguf "
                             "-c 512"),
                  0, NULL, NULL);
    json_t *resumed = scores_read("resumed.json"), *whole = scores_read("whole.json");
    if (!resumed || !whole) return;
    CHECK_INT(json_integer_value(json_object_get(resumed, "tokens")),
              json_integer_value(json_object_get(whole, "tokens")), "tokens");
    const double e = scores_differ(whole, resumed, 0), sums = tensors_differ("whole.gguf", "resumed.gguf");
    CHECK(e < 1e-12, "the scores differ by %g", e);
    CHECK(sums < 1e-10, "the squares of the activations differ by %g", sums);
    json_decref(resumed);
    json_decref(whole);
}

static void test_calibrate_activations(void) {
    struct gguf g;
    struct gguf_str type;
    char path[256], err[ERR_MAX];
    calibration_texts();
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/x.json --activations @/x.gguf -c 512"), 0, NULL, NULL);
    check_command(IN_DIR(MOE "--calibrate @/b.txt -o @/x.json --activations @/x.gguf -c 512"), 0, NULL, "resuming");
    check_command(IN_DIR(MOE "--calibrate @/a.txt @/b.txt -o @/y.json --activations @/y.gguf -c 512"), 0, NULL, NULL);
    check_command(IN_DIR(MOE "--calibrate @/c.jsonl -o @/x.json -c 512; cp @/x.json @/z.json; " MOE
                             "--calibrate @/b.txt -o @/z.json --activations @/x.gguf -c 512"),
                  1, NULL, "does not belong to");
    /* ended between the two files: the newer activations are there under another name */
    check_command(IN_DIR("cp @/y.gguf @/y.gguf.next; cp @/x.gguf @/y.gguf; " MOE
                         "--calibrate @/b.txt -o @/y.json --activations @/y.gguf -c 512"),
                  0, NULL, "already");
    struct gguf other;
    snprintf(path, sizeof path, "%s/x.gguf", test_dir());
    if (!CHECK(gguf_open(&g, path, err, sizeof err) == 0, "%s", err)) return;
    snprintf(path, sizeof path, "%s/y.gguf", test_dir());
    if (!CHECK(gguf_open(&other, path, err, sizeof err) == 0, "%s", err)) return;
    CHECK(gguf_get_str(&g, "general.type", &type) && gguf_str_eq(type, "imatrix"), "the file's type");
    const struct gguf_tensor *sums = gguf_find_tensor(&g, "blk.1.ffn_down_exps.weight.in_sum2");
    const struct gguf_tensor *counts = gguf_find_tensor(&g, "blk.1.ffn_down_exps.weight.counts");
    const struct gguf_tensor *same = gguf_find_tensor(&other, "blk.1.ffn_down_exps.weight.in_sum2");
    CHECK(sums && counts && same && sums->ne[0] == 256 && sums->ne[1] == 16 && counts->ne[0] == 1 &&
              counts->ne[1] == 16,
          "shapes");
    CHECK(gguf_find_tensor(&g, "blk.0.ffn_gate.weight.in_sum2") &&
              gguf_find_tensor(&g, "blk.5.ffn_up_shexp.weight.counts"),
          "dense and shared feed-forwards");
    if (sums && same) {
        const double e = nmse((const float *)(const void *)sums->data, (const float *)(const void *)same->data, 4096);
        CHECK(e < 1e-10, "added up in two runs: %g", e);
    }
    gguf_close(&g), gguf_close(&other);
}

/* GPUs that are listed become stages: every rank has whole experts. */
static void test_calibrate_stages(void) {
    static char gpus[] = "1,0", text[] = "a.txt";
    struct settings set = {.gpus = gpus};
    struct layer layers[2] = {0};
    struct model m = {.n_layer = 2, .layers = layers};
    int device[MAX_RANKS] = {0};
    arrput(set.calibrate, text);
    settings_ranks(&set, &m, device);
    CHECK(set.pp == 2 && set.tp == 1 && device[0] == 1 && !device[1], "%d stages of %d ranks", set.pp, set.tp);
    arrfree(set.calibrate);
    set.pp = set.tp = 0;
    settings_ranks(&set, &m, device);
    CHECK(set.pp == 1 && set.tp == 2, "%d stages of %d ranks", set.pp, set.tp);
}

static void test_calibrate_refuses(void) {
    calibration_texts();
    run_command(
        IN_DIR("echo '{\"format\": \"moe-scores\", \"version\": 1, \"model\": {\"routers\": \"1\"}}' >@/o.json;"
               "echo '[1' >@/bad.json; echo '{\"a\": 1}' >@/none.json; printf '' >@/empty.txt;"
               "printf '\\377\\377' >@/latin.txt; printf '{\"text\": \"a b c\"}\\n{\"texts\": 1}\\n' >@/k.jsonl;"
               "printf '{\"messages\": [{\"role\": \"user\"}]}' >@/r.jsonl; rm -f @/n.json"),
        NULL, NULL);
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/o.json"), 1, "", "another model: routers 1, here 66974426");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/bad.json"), 1, "", "bad.json");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/none.json"), 1, "", "not a score file");
    check_command(IN_DIR(MOE "--calibrate @/empty.txt -o @/n.json"), 1, "", "is empty");
    check_command(IN_DIR(MOE "--calibrate @/latin.txt -o @/n.json"), 1, "", "not valid UTF-8");
    check_command(IN_DIR(MOE "--calibrate @/nowhere.txt -o @/n.json"), 1, "", "cannot open");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/none/n.json"), 1, "", "cannot write");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o /dev/full"), 1, "", "not a regular file");
    check_command(IN_DIR("ulimit -f 40; " MOE "--calibrate @/a.txt -o @/e.json --activations @/e.gguf"), 1, "",
                  "e.gguf.next': File too large");
    check_command(IN_DIR("ls @ | grep -c '^e.*tmp'"), 1, "0\n", NULL);
    check_command(IN_DIR("cp build/demo.gguf @/m.gguf; " MOE_BIN " -m @/m.gguf --calibrate @/a.txt -o @/m.gguf"), 1, "",
                  "is also an input or the other output");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/n.json --activations @/a.txt"), 1, "",
                  "is also an input or the other output");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/n.json --activations @/n.json"), 1, "",
                  "is also an input or the other output");
    check_command(IN_DIR("cp " FIXTURES "deepseek_v3.gguf @/other.gguf; " MOE
                         "--calibrate @/a.txt -o @/n.json --activations @/other.gguf"),
                  1, "", "was not written by --activations");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/n.json --activations @/none/n.gguf"), 1, "", "cannot write");
    check_command(IN_DIR(MOE "--calibrate @/k.jsonl -o @/n.json"), 1, "", "k.jsonl', line 2: expected \"messages\"");
    check_command(IN_DIR("[ ! -e @/n.json ]"), 0, NULL, NULL); /* nothing was counted */
    /* a run that stopped after its first window of 512 tokens, and one that stopped within it */
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/u.json -c 512; sed 's/\"done\": true/\"done\": false/; "
                             "s/\"unit\": [0-9]*/\"unit\": 1/' @/u.json >@/v.json; " MOE
                             "--calibrate @/a.txt -o @/v.json -c 256"),
                  1, NULL, "a.txt' in windows of 512 tokens, not 256: continue with -c 512");
    check_command(IN_DIR("sed 's/\"window\": 512/\"offset\": 9/' @/v.json >@/s.json; " MOE
                         "--calibrate @/a.txt -o @/s.json -c 512"),
                  1, "", "stopped within a line or window of");
    /* blank lines, other ends of lines, and a name that is no UTF-8 are no hindrance */
    check_command(
        IN_DIR("printf '{\"text\": \"a b c\"}\\r\\n \\t\\r\\n{\"text\": \"d\"}' >@/\351.jsonl; for i in 1 2; do " MOE
               "--calibrate @/\351.jsonl -o @/w.json | tail -1; done | uniq | wc -l"),
        0, "1\n", NULL);
    check_command(IN_DIR(MOE "--calibrate @/r.jsonl -o @/r.json"), 1, "",
                  "line 1: messages[0]: \"content\" is missing");
    check_command(IN_DIR(MOE_BIN " -m " FIXTURES "deepseek_v3.gguf --calibrate @/a.txt -o @/w.json"), 1, "",
                  "another model");
    check_command(IN_DIR(REAP_BIN " build/demo.gguf @/w.json @/w.json --keep 12 --dry-run"), 1, "",
                  "would count twice");
    check_command(IN_DIR(MOE "--calibrate @/a.txt"), 2, "", "--calibrate needs -o FILE");
    check_command(IN_DIR(MOE "-o @/n.json -p hello"), 2, "", "--output works only with --calibrate");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/n.json --tp 2 --cpu"), 2, "", "--pp instead of --tp");
    check_command(IN_DIR(MOE "--calibrate @/a.txt -o @/n.json --bench"), 2, "", "cannot be combined");
    check_command(IN_DIR(MOE "--activations @/n.gguf -p hello"), 2, "", "--activations works only with --calibrate");
}

/* ---- --compare ---- */

static void test_compare(void) {
    struct model m[2];
    char *said = NULL;
    double kl = 0, nll[2] = {0}, mean, a, b;
    int n = 0, same = 0;
    check_command(
        IN_DIR("head -c 3000 prompts/haystack.txt >@/t.txt; " MOE_BIN
               " --compare build/demo.gguf build/demo.gguf @/t.txt | grep -c -e 'mean 0.000000' -e '100.00 %'"),
        0, "2\n", NULL);
    if (!fixture_load("deepseek_v3", &m[0]) || !fixture_load("deepseek_v3_plain", &m[1])) return;
    int32_t *ids = NULL;
    char *text = NULL, err[ERR_MAX];
    const char *path = in_dir("@/t.txt", test_dir());
    if (!CHECK(m[0].vocab->n_tokens > 0 && !read_file(path, &text, err), "fixtures with vocabularies")) return;
    tokenize_all(m[0].vocab, text, arrlenu(text), false, &ids);
    n = int_min((int)arrlen(ids), 96);
    const int vocab = m[0].n_vocab;
    float *x[2];
    for (int i = 0; i < 2; i++) x[i] = all_logits(&m[i], &kernels_ref, KV_F32, 2, ids, n);
    for (int t = 0; t < n; t++) {
        const float *row[2] = {x[0] + (size_t)t * (size_t)vocab, x[1] + (size_t)t * (size_t)vocab};
        double total[2] = {0};
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < vocab; k++) total[i] += exp((double)row[i][k]);
        for (int k = 0; k < vocab; k++)
            kl += exp((double)row[0][k]) / total[0] *
                  ((double)row[0][k] - log(total[0]) - (double)row[1][k] + log(total[1]));
        same += argmax(row[0], vocab) == argmax(row[1], vocab);
        for (int i = 0; i < 2 && t + 1 < n; i++) nll[i] += log(total[i]) - (double)row[i][ids[t + 1]];
    }
    /* one window of n tokens: a text that has no more */
    size_t bytes = 0;
    for (int i = 0; i < n; i++) bytes += vocab_bytes(m[0].vocab, ids[i]).n;
    char cmd[1024];
    snprintf(cmd, sizeof cmd,
             "head -c %zu %s/t.txt >%s/u.txt; " MOE_BIN " --cpu-ref --kv f32 --compare " FIXTURES
             "deepseek_v3.gguf " FIXTURES "deepseek_v3_plain.gguf %s/u.txt",
             bytes, test_dir(), test_dir(), test_dir());
    CHECK(run_command(cmd, &said, NULL) == 0, "%s", sb_cstr(&said));
    const char *p = strstr(sb_cstr(&said), "mean ");
    CHECK(p && sscanf(p, "mean %lf", &mean) == 1 && fabs(mean - kl / n) < 1e-5, "KL %.7f in '%s'", kl / n, said);
    p = strstr(said, "best token ");
    CHECK(p && sscanf(p, "best token %lf", &mean) == 1 && fabs(mean - 100.0 * same / n) < 0.01, "%d of %d in '%s'",
          same, n, said);
    p = strstr(said, "perplexity B");
    CHECK(sscanf(said, "perplexity A %lf", &a) == 1 && p && sscanf(p, "perplexity B %lf", &b) == 1 &&
              fabs(a / exp(nll[0] / (n - 1)) - 1) < 1e-4 && fabs(b / exp(nll[1] / (n - 1)) - 1) < 1e-4,
          "perplexities %.4f and %.4f in '%s'", exp(nll[0] / (n - 1)), exp(nll[1] / (n - 1)), said);
    check_command(IN_DIR(MOE_BIN " --compare build/demo.gguf " FIXTURES "deepseek_v3.gguf @/t.txt"), 1, "",
                  "different");
    check_command(MOE_BIN " --compare build/demo.gguf build/demo.gguf", 2, "", "A.gguf B.gguf TEXT");
    check_command(IN_DIR(MOE "--compare build/demo.gguf build/demo.gguf @/t.txt"), 2, "", "cannot be combined with -m");
    check_command(IN_DIR(MOE_BIN " --compare build/demo.gguf @/nothing.gguf README.md"), 1, "", "nothing.gguf");
    /* weights that are no numbers */
    char *file = NULL;
    struct gguf g;
    if (CHECK(!read_file(FIXTURES "deepseek_v3.gguf", &file, err) &&
                  !gguf_parse(&g, (uint8_t *)file, arrlenu(file), err, sizeof err),
              "%s", err)) {
        const struct gguf_tensor *head = gguf_find_tensor(&g, "output.weight");
        memset((uint8_t *)file + (head->data - (const uint8_t *)file), 0xFF, head->bytes);
        FILE *f = fopen(in_dir("@/nan.gguf", test_dir()), "wb");
        CHECK(f && fwrite(file, arrlenu(file), 1, f) == 1 && !fclose(f), "@/nan.gguf");
        gguf_close(&g);
        check_command(IN_DIR(MOE_BIN " --compare " FIXTURES "deepseek_v3.gguf @/nan.gguf @/t.txt"), 1, "",
                      "model B gives logits that are not finite");
        check_command(IN_DIR(MOE_BIN " --compare @/nan.gguf " FIXTURES "deepseek_v3.gguf @/t.txt"), 1, "",
                      "model A gives logits that are not finite");
    }
    arrfree(said), arrfree(ids), arrfree(text), arrfree(file);
    for (int i = 0; i < 2; i++) free(x[i]), model_free(&m[i]);
}

#define TESTS_CALIBRATE                                                                                       \
    {"calibrate/sums", test_calibrate_sums}, {"calibrate/files", test_calibrate_files},                       \
        {"calibrate/resumes", test_calibrate_resumes}, {"calibrate/activations", test_calibrate_activations}, \
        {"calibrate/stages", test_calibrate_stages}, {"calibrate/refuses", test_calibrate_refuses},           \
        {"calibrate/compare", test_compare},
