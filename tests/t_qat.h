/* --qat: keys and the indexer of DeepSeek-V4 and V4.1, rounded as in training. Numbers worked out by hand; whole models
 * against tests/fixtures/NAME/qat.f32, which tests/oracle/gen_qat.py makes. */

/* A block of 448 and one of 449, whose scale is 2; the least scale, 2^-22; values near the largest; the last block has 16
 * values, and the one after it stays. Catches the floor of the logarithm, blocks of 128, no least scale, other ties. */
static void test_qat_key(void) {
    enum { BLOCKS = 5, N = 4 * 64 + 16 };
    static const struct {
        float x[10], want[10];
    } block[BLOCKS] = {
        {{448, 17, -19, 1.0625f, 1.1875f, 0x1p-9f, 0x1p-10f, 0x3p-10f, 0, 100},
         {448, 16, -20, 1, 1.25f, 0x1p-9f, 0, 0x1p-8f, 0, 96}},
        {{-449, 17, 19, 18, 0x1p-8f, 0x1p-9f, 0x3p-9f, 1, 104, 2}, {-448, 16, 20, 18, 0x1p-8f, 0, 0x1p-7f, 1, 104, 2}},
        {{0x1p-31f, -0x1p-31f, 0x1p-32f, 0x3p-32f, 0x1.1p-30f, 0, 0, 0, 0, 0},
         {0x1p-31f, -0x1p-31f, 0, 0x1p-30f, 0x1p-30f, 0, 0, 0, 0, 0}},
        {{3e38f, -1e38f, 1, 0, 0, 0, 0, 0, 0, 0}, {0x1.cp127f, -0x1.2p126f, 0, 0, 0, 0, 0, 0, 0, 0}},
        {{3, 2.125f, -2.625f, 0, 0, 0, 0, 0, 0, 0}, {3, 2, -2.5f, 0, 0, 0, 0, 0, 0, 0}}};
    const struct kernels *k;
    for (size_t i = 0; i < sizeof kernel_sets / sizeof *kernel_sets; i++) {
        float x[N + 1] = {0}, want[N + 1] = {0};
        k = kernel_sets[i];
        if (!kernels_runnable(k)) continue;
        for (int b = 0; b < BLOCKS; b++)
            for (int j = 0, by = b == BLOCKS - 1 ? 1 : 6; j < 10; j++) {
                x[64 * b + by * j] = block[b].x[j];
                want[64 * b + by * j] = block[b].want[j];
            }
        x[N] = want[N] = 1.01f;
        round_key(k, x, N, QAT_KEY);
        for (int j = 0; j <= N; j++)
            CHECK(x[j] == want[j], "%s: value %d of block %d is %a, expected %a", k->name, j % 64, j / 64, (double)x[j],
                  (double)want[j]);
    }
}

/* E2M1 and its ties; the matrix; blocks of 6 and of 6.25, whose scale is 2, after it; nothing but zeros. */
static void test_qat_index(void) {
    static const float e2m1[][2] = {{0, 0},       {.2f, 0},   {.25f, 0},   {.26f, .5f}, {.75f, 1},
                                    {-1.25f, -1}, {1.75f, 2}, {1.76f, 2},  {2.25f, 2},  {2.5f, 2},
                                    {-3.5f, -4},  {4.9f, 4},  {5, 4},      {5.01f, 6},  {-6, -6},
                                    {7, 6},       {3.4f, 3},  {.74f, .5f}, {-.76f, -1}, {1.74f, 1.5f}};
    static const float from[2][6] = {{6, 2.5f, -3.5f, .25f, .75f, 5}, {-6.25f, .5f, 1.5f, 2.5f, -5, 3}};
    static const float to[2][6] = {{6, 2, -4, 0, 1, 4}, {-6, 0, 2, 2, -4, 3}};
    for (size_t i = 0; i < sizeof e2m1 / sizeof *e2m1; i++)
        CHECK(round_e2m1(e2m1[i][0]) == e2m1[i][1], "%g becomes %g", (double)e2m1[i][0],
              (double)round_e2m1(e2m1[i][0]));
    for (int n = 64; n <= 128; n *= 2)
        for (int i = 0; i < n; i++) { /* column i */
            float x[128] = {0};
            x[i] = 3;
            hadamard(x, n);
            for (int j = 0; j < n; j++) {
                const float want = 3 / sqrtf((float)n) * (__builtin_parity((unsigned)(i & j)) ? -1.0f : 1.0f);
                CHECK(fabsf(x[j] - want) < 1e-6f, "%d values: row %d, column %d is %g", n, j, i, (double)x[j] / 3);
            }
        }
    for (size_t i = 0; i < sizeof kernel_sets / sizeof *kernel_sets; i++) {
        const struct kernels *k = kernel_sets[i];
        float x[64] = {0}, zero[128] = {0};
        if (!kernels_runnable(k)) continue;
        for (int j = 0; j < 12; j++) x[32 * (j / 6) + 3 * (j % 6)] = from[j / 6][j % 6];
        hadamard(x, 64); /* its own inverse */
        round_index(k, x, 64);
        for (int j = 0; j < 64; j++) {
            const float want = j % 32 % 3 || j % 32 > 15 ? 0 : to[j / 32][j % 32 / 3];
            CHECK(x[j] == want, "%s: value %d is %g, expected %g", k->name, j, (double)x[j], (double)want);
        }
        round_index(k, zero, 128);
        for (int j = 0; j < 128; j++) CHECK(zero[j] == 0, "%s: a zero becomes %g", k->name, (double)zero[j]);
    }
}

/* What is rounded as in training stays as it is in a cache in BF16 or FP8: keys but for their rotated values, and keys of
 * the indexer. Catches cache tensors of DeepSeek-V4 whose FP8 scales are no powers of two. */
static void test_qat_cache(void) {
    enum { D = 512, ROPE = 64, INDEX = 128 };
    static const enum kv_type types[] = {KV_BF16, KV_FP8};
    struct model m;
    int il = 0;
    if (!fixture_load("deepseek_v4", &m)) return;
    while (!m.layers[il].attn.n_index) il++;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (int use = CACHE_K; use < CACHE_USES; use++) {
            const bool index = use == CACHE_INDEX;
            if (!index && use != CACHE_K && use != CACHE_COMPRESSED) continue;
            const int d = index ? INDEX : D, kept = index ? INDEX : D - ROPE;
            const struct kernels *k = kernels_choose();
            struct cache_tensor cache[CACHE_USES], p = cache_make(types[i], d, index ? INDEX : LATENT_GROUP);
            layer_cache(&m, &m.layers[il], types[i], cache);
            p.pow2 = cache[use].pow2;
            float x[D], got[D], scale[D / LATENT_GROUP];
            uint8_t row[2 * D];
            uint64_t seed = 7;
            p.data = row, p.scale = scale;
            for (int turn = 0; turn < 100; turn++) {
                for (int c = 0; c < d; c++) /* blocks of other sizes */
                    x[c] = ldexpf((float)rng_uniform(&seed) + 0.25f, (turn + c / 64) % 3) * (c % 2 ? 3.3f : -0.7f);
                if (index) round_index(k, x, d);
                else round_key(k, x, kept, QAT_KEY);
                kv_store(k, &p, 0, x);
                kv_load(k, &p, 0, 1, 0, d, got, d);
                if (!CHECK(!memcmp(got, x, (size_t)kept * sizeof *x), "%s: another %s", kv_names[types[i]],
                           index ? "key of the indexer" : "key"))
                    break;
            }
        }
    model_free(&m);
}

/* Logits of every 15th position. Where rounding takes a value to another neighbor because of its last bits, the rows
 * after it differ by 1e-9 to 1e-3, so half of the rows are to agree closely, and all of them roughly. Catches rotated
 * values that are rounded, keys or queries of the indexer that are not, and other blocks of its values. */
static void check_qat(const char *name, const struct model *m, int tp, int pp, const int32_t *ids, int n) {
    enum { EVERY = 15 };
    char path[256], err[ERR_MAX] = "";
    size_t n_want = 0;
    struct session s;
    struct collect c = {xmalloc((size_t)n * (size_t)m->n_vocab * sizeof(float)), m->n_vocab};
    snprintf(path, sizeof path, "tests/fixtures/%s/qat.f32", name);
    float *want = slurp(path, &n_want);
    const int rows = (n + EVERY - 1) / EVERY;
    CHECK(n_want == (size_t)rows * (size_t)m->n_vocab * sizeof *want, "%s has %zu bytes", path, n_want);
    session_open_cpu(&s, m, tp, pp, (struct cpu_options){&kernels_ref, 1, n, KV_F32, false, false, {0}});
    CHECK(session_score(&s, ids, n, collect_row, &c, err) == 0, "%s", err);
    session_free(&s);
    int close = 0;
    for (int i = 0; i < rows; i++) {
        const size_t row = (size_t)m->n_vocab;
        const double e = nmse(c.out + (size_t)i * EVERY * row, want + (size_t)i * row, row);
        CHECK(e <= 1e-2, "%s, --tp %d --pp %d: NMSE %.1e at token %d", name, tp, pp, e, i * EVERY);
        close += e <= 1e-6;
    }
    CHECK(close >= rows / 2, "%s, --tp %d --pp %d: only %d of %d rows are close", name, tp, pp, close, rows);
    free(c.out);
    arrfree(want);
}

static void test_qat_fixtures(void) {
    static const char *const names[] = {"deepseek_v4", "deepseek_v4_pro", "deepseek_v41", "deepseek_v41_nvfp4"};
    static const int layouts[][2] = {{1, 1}, {2, 1}, {1, 2}};
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        struct model m;
        int32_t *ids;
        float *plain;
        if (!fixture_load(names[f], &m)) return;
        const int n = fixture_logits(names[f], &m, &ids, &plain);
        CHECK(!m.qat, "a model that is loaded is rounded");
        m.qat = true;
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++)
            check_qat(names[f], &m, layouts[k][0], layouts[k][1], ids, n);
        arrfree(ids), arrfree(plain);
        model_free(&m);
    }
}

/* A saved state belongs to the setting that it was computed with. */
static void test_qat_state(void) {
    char path[512], err[ERR_MAX] = "";
    struct model m;
    struct session s;
    int32_t ids[40];
    if (!fixture_load("deepseek_v4", &m)) return;
    for (int i = 0; i < 40; i++) ids[i] = 3 + i;
    snprintf(path, sizeof path, "%s/qat.kv", test_dir());
    for (int from = 0; from < 2; from++) {
        m.qat = from;
        session_cpu(&s, &m, &kernels_ref, 1, 64, KV_BF16);
        CHECK(session_sync(&s, ids, 40, 0, err) == SYNC_DONE && state_save(&s, path, err) == 0, "%s", err);
        session_free(&s);
        for (int to = 0; to < 2; to++) {
            m.qat = to;
            session_cpu(&s, &m, &kernels_ref, 1, 64, KV_BF16);
            const int rc = session_load(&s, path, err);
            if (to == from) CHECK(!rc && s.n_past == 40, "%s", err);
            else
                CHECK(rc && !s.n_past && strstr(err, from ? "saved with --qat on" : "saved with --qat off"), "%s", err);
            session_free(&s);
        }
    }
    model_free(&m);
}

/* The option: on where the family has it, also in the shards of ranks; a line where it has no effect. */
static void test_qat_option(void) {
    char path[] = FIXTURES "deepseek_v4.gguf", cmd[1024];
    for (int i = 0; i < 3; i++) {
        static const char *const value[] = {NULL, "on", "off"};
        char *argv[] = {
            "moe", "-q", "--cpu", "--tp", "2", "-c", "64", "-m", path, "--qat", (char *)(uintptr_t)value[i]};
        struct settings set;
        struct engine e;
        char err[ERR_MAX] = "";
        settings_init(&set);
        CHECK(!options_parse(&set, value[i] ? 11 : 9, argv, err), "%s", err);
        engine_open(&e, &set);
        for (int r = 0; r < 2; r++)
            CHECK(e.session.pg->ranks[r].m->qat == (i < 2), "--qat %s: rank %d", value[i] ? value[i] : "not given", r);
        engine_close(&e);
        settings_free(&set);
    }
    snprintf(cmd, sizeof cmd, MOE "--cpu --qat on --greedy --think off -p 'What is 7 squared? One word.'");
    check_command(cmd, 0, "49\n", "--qat has no effect: ");
    snprintf(cmd, sizeof cmd, MOE "--cpu --greedy --think off -p 'What is 7 squared? One word.' 2>&1 | grep -c qat");
    check_command(cmd, 1, "0\n", NULL);
}

#define TESTS_QAT                                                                            \
    {"qat/key", test_qat_key}, {"qat/index", test_qat_index}, {"qat/cache", test_qat_cache}, \
        {"qat/fixtures", test_qat_fixtures}, {"qat/state", test_qat_state}, {"qat/option", test_qat_option},
