/* The kernels of moe_cuda.cu that work on rows, at the widest that they take: norms and sums over ranks, rotations, the
 * indexer of sparse attention, statistics, quantization. Included by test_cuda.cu after t_cuda_kernels.h. */

/* ---- norms ---- */

/* Sums and norms of two rows of n values by a rank of several. What the others push is there already. base: there is an x;
 * partial, norm: the kernel adds, and norms; centers: it takes off the mean, and in more than one block adds biases. */
template <int SOURCE>
static void run_add_norm(int n, int ranks, int rank, bool base, bool partial, bool norm, int blocks,
                         bool centers = false) {
    enum { TOKENS = 2 };
    const bool pushed = SOURCE == PARTIAL_PUSHED;
    const size_t count = TOKENS * (size_t)n, slots = pushed ? 2 * (size_t)ranks * ALLREDUCE_SLOT : 0;
    const size_t step = pushed ? (size_t)ALLREDUCE_SLOT : count; /* from a rank's partial to the next one's */
    const size_t first = slots / 2;                              /* of slots: the first sequence is odd */
    const bool apart = blocks == 1;                              /* norms in F32 have weights of their own */
    std::vector<float> x = random_floats((int)count, 1);
    const std::vector<float> w = random_floats(n, 1), w32 = apart ? random_floats(n, 1) : w,
                             bias = random_floats(centers && !apart ? n : 0, 1);
    for (float &f : x) f += centers ? 3.0f : 0.0f;
    std::vector<float> own = random_floats((int)count, 1), all(first + (size_t)ranks * step + count);
    for (size_t k = 0; k < (size_t)ranks; k++)
        for (size_t i = 0; i < count; i++) all[first + k * step + i] = (float)normal();
    std::vector<uint16_t> bf16;
    for (float &f : own) {
        bf16.push_back(bf16_from_f32(f));
        if (SOURCE == PARTIAL_BF16) f = bf16_to_f32(bf16.back());
    }
    gpu_array<float> x_d(x), w_d(w), w32_d(w32), bias_d(bias), own_d(own), all_d(all), sent(slots + count), sum(x),
        h32(count);
    gpu_array<uint16_t> bf16_d(bf16), h16(count);
    const size_t words = sizeof(struct sequence) / 4, flags = (size_t)ranks * ALLREDUCE_BLOCKS;
    gpu_array<uint32_t> state(std::vector<uint32_t>(words, 0u)), heartbeat(std::vector<uint32_t>(3));
    gpu_array<uint32_t> came(std::vector<uint32_t>(flags, 1u)), went(std::vector<uint32_t>(flags, 0u));
    struct norm_args a = {};
    a.x = base ? x_d.p : NULL, a.sum = sum, a.weight = norm ? w_d.p : NULL, a.eps = 1e-6f, a.n = n, a.n_tok = TOKENS;
    a.centers = centers, a.h16 = h16, a.h32 = n % 16 ? h32.p : NULL, a.weight32 = apart ? w32_d.p : NULL;
    if (bias.size()) a.bias = bias_d;
    a.p = {rank, ranks, ALLREDUCE_SLOT, (struct sequence *)state.p, (struct heartbeat *)heartbeat.p};
    for (int k = 0; k < ranks && pushed; k++) a.slot[k] = k == rank ? all_d : sent, a.flag[k] = k == rank ? came : went;
    if (partial) a.partial = SOURCE == PARTIAL_BF16 ? (void *)bf16_d.p : SOURCE == PARTIAL_GATHERED ? all_d.p : own_d.p;
    own_d.arrive(), bf16_d.arrive(), x_d.arrive();
    add_norm<SOURCE>(&a, (unsigned)blocks, test_stream);
    finish("sums and norms");
    std::vector<float> want(count);
    for (size_t i = 0; i < count; i++) {
        float d = own[i];
        for (int k = 0; k < ranks && (pushed || SOURCE == PARTIAL_GATHERED); k++) {
            const float one = pushed && k == rank ? own[i] : all[first + (size_t)k * step + i];
            d = k ? d + one : one;
        }
        want[i] = (base ? x[i] : 0) + (partial ? d : 0);
    }
    error_sum e;
    int bad = 0;
    const std::vector<float> got = sum.get(), normed = h32.get(), there = sent.get();
    const std::vector<uint16_t> halves = h16.get();
    for (size_t i = 0; i < count; i++) {
        bad += got[i] != (partial ? want[i] : x[i]);
        if (pushed && ranks > 1) bad += there[first + (size_t)rank * step + i] != own[i];
    }
    for (size_t t = 0; t < TOKENS && norm; t++) {
        double mean = 0;
        for (size_t i = t * (size_t)n; i < (t + 1) * (size_t)n && centers; i++) mean += (double)want[i] / n;
        for (size_t i = t * (size_t)n; i < (t + 1) * (size_t)n; i++) want[i] = (float)((double)want[i] - mean);
        const double f = rms_factor(&want[t * (size_t)n], n);
        for (size_t i = t * (size_t)n; i < (t + 1) * (size_t)n; i++) {
            const double unit = (double)want[i] * f, more = bias.size() ? (double)bias[i % (size_t)n] : 0;
            const double y = unit * (double)w[i % (size_t)n] + more;
            if (a.h32) e.add((double)normed[i], unit * (double)w32[i % (size_t)n] + more);
            bad += !(fabs((double)f16_to_f32(halves[i]) - y) <= 6e-4 * fabs(y) + (centers ? 1e-6 : 1e-7));
        }
    }
    if (SOURCE != PARTIAL_OWN) bad += state.get()[CH_ALLREDUCE] != 1;
    expect(e.nmse() < 1e-12 && !bad,
           "sums of kind %d, %d values, rank %d of %d, x %d, partial %d, norm %d: NMSE %.1e, %d wrong", SOURCE, n, rank,
           ranks, base, partial, norm, e.nmse(), bad);
}

/* Hidden states of wide models in the first ring or that of timeline 1, a part of them in both, and the inputs of MTP
 * layers, of which a rank has columns from..to-1; whole: the streams are normed as one row. */
static void run_keep_hidden(int n, int streams, bool norm, int from, int to, bool own, bool both, bool next,
                            bool whole) {
    enum { FIRST = 5, OWN = 4, ROWS = FIRST + 2 * OWN, TOKENS = 2, POS = 7 };
    const size_t wide = (size_t)n, per = (size_t)streams * wide, gap = wide + 4, stride = (size_t)(to - from) + 8;
    const std::vector<float> x = random_floats((int)(TOKENS * per), 2),
                             w[2] = {random_floats(n, 1), random_floats(whole ? (int)per : n, 1)},
                             e = random_floats((int)(TOKENS * gap), 1), before = random_floats((int)(ROWS * per), 3);
    gpu_array<float> x_d(x), w0(w[0]), w1(w[1]), rings(before), e_d(e);
    gpu_batch b(POS, TOKENS, POS, 1);
    gpu_array<uint16_t> out(std::vector<uint16_t>(TOKENS * (size_t)streams * stride, 0xABCD));
    const struct mtp_ring ring[] = {{rings, FIRST, streams, n, 0, b}, {rings + FIRST * per, OWN, streams, n, OWN, b}};
    const struct mtp_input_args a = {e_d, gap, ring[own], {w0, w1}, 1e-6f, from, to, out, stride, whole};
    e_d.arrive(), rings.arrive();
    LAUNCH_PDL(k_mtp_input, dim3(TOKENS, 1 + (unsigned)streams), NORM_THREADS, 0, test_stream, a);
    x_d.arrive();
    const struct keep_hidden_args keep = {x_d,       norm ? w0.p : NULL, 1e-6f, next, both ? 1 : TOKENS,
                                          ring[own], ring[!own]};
    LAUNCH_PDL(k_keep_hidden, dim3(TOKENS, (unsigned)streams), NORM_THREADS, 0, test_stream, keep);
    finish("hidden states");
    error_sum sum;
    int bad = 0;
    int new_row[ROWS]; /* the token whose state it becomes; -1: none */
    const std::vector<float> kept = rings.get(), left = e_d.get();
    const std::vector<uint16_t> got = out.get();
    std::fill(new_row, new_row + ROWS, -1);
    for (int t = next; t < TOKENS; t++) {
        const int at[] = {(POS + t + next) % FIRST, FIRST + OWN + (POS + t + next) % OWN};
        new_row[at[own]] = t;
        if (t >= keep.also_from) new_row[at[!own]] = t;
    }
    for (size_t r = 0; r < ROWS * (size_t)streams; r++) {
        const int t = new_row[r / (size_t)streams];
        const float *state = &x[(size_t)(t < 0 ? 0 : t) * per + r % (size_t)streams * wide];
        const double f = rms_factor(state, n);
        for (size_t i = 0, at = r * wide; i < wide; i++, at++) {
            if (t < 0) bad += kept[at] != before[at];
            else if (norm) sum.add((double)kept[at], (double)state[i] * f * (double)w[0][i]);
            else bad += kept[at] != state[i];
        }
    }
    for (size_t r = 0; r < TOKENS * (size_t)streams; r++) {
        const size_t t = r / (size_t)streams;
        const size_t row = own ? FIRST + OWN + (POS + t) % OWN : (POS + t) % FIRST;
        const size_t stream = r % (size_t)streams;
        const float *half[2] = {&e[t * gap], &before[(row * (size_t)streams + stream) * wide]};
        const double f[2] = {rms_factor(half[0], n),
                             whole ? rms_factor(&before[row * per], (int)per) : rms_factor(half[1], n)};
        for (size_t i = 0; i < stride; i++) {
            const size_t c = ((size_t)from + i) % wide, k = ((size_t)from + i) / wide;
            const size_t weight = c + (whole && k ? stream * wide : 0);
            const uint16_t h = got[r * stride + i];
            if (i + 8 >= stride) bad += h != 0xABCD;
            else sum.add((double)f16_to_f32(h), (double)half[k][c] * f[k] * (double)w[k][weight]);
        }
    }
    for (size_t i = 0; i < left.size(); i++) bad += left[i] != (i % gap < wide ? 0 : e[i]);
    expect(
        sum.nmse() < 1e-6 && !bad,
        "hidden states, %d streams of %d, norm %d, columns %d - %d, own %d, both %d, next %d, whole %d: NMSE %.1e, %d "
        "wrong",
        streams, n, norm, from, to, own, both, next, whole, sum.nmse(), bad);
}

/* Coefficients of sums that `parts` blocks left, the streams' weighted sum, and its norm; last: of the end of a model;
 * parts 0: the streams' mean; lags: they are read as the half before says; mixes: they are mixed. */
template <int VECS>
static void run_hc_norm(int n, int parts, bool last, bool lags = false, bool mixes = true) {
    enum { TOKENS = 2, S = GPU_HC };
    const size_t wide = (size_t)n, stride = lags ? HC_ROWS + 8 : HC_ROWS + 1, at_lag = HC_ROWS + 4;
    const std::vector<float> x = random_floats(TOKENS * S * n, 1), w = random_floats(n, 1),
                             before = random_floats((int)(TOKENS * stride), 1), base = random_floats(HC_ROWS, 1),
                             scale = random_floats(3, 1);
    std::vector<float> sums = random_floats(TOKENS * max(parts, 1) * HC_SUMS, 0.1);
    for (size_t i = HC_ROWS; i < sums.size(); i += HC_SUMS) sums[i] = S * (float)n / (float)parts; /* squares */
    gpu_array<float> x_d(x), w_d(w), base_d(base), scale_d(scale), sums_d(sums);
    gpu_array<float> mix(before), h32(TOKENS * wide), y(TOKENS * wide);
    gpu_array<uint16_t> h16(TOKENS * wide);
    struct hc_args a = {};
    a.streams = x_d, a.mix = mix, a.mix_stride = stride, a.lag = lags ? mix.p + at_lag : NULL, a.base = base_d;
    a.scale = scale_d, a.sums = sums_d, a.mean = !parts;
    const double eps = mixes ? 1e-6 : 0.05, most = mixes ? 2 : 1.5;
    a.n_row = !parts ? 0 : last ? (int)S : mixes ? (int)HC_ROWS : 2 * (int)S;
    a.n = n, a.n_tok = TOKENS, a.n_sinkhorn = mixes ? 20 : 0, a.eps = 1e-6f, a.hc_eps = (float)eps;
    a.hc_write = (float)most, a.weight = last ? NULL : w_d.p;
    a.h16 = h16, a.h32 = h32, a.x = y;
    sums_d.arrive(), x_d.arrive();
    LAUNCH_PDL(k_hc_norm<VECS>, TOKENS, NORM_THREADS, 0, test_stream, a, parts);
    finish("coefficients of streams");
    const std::vector<float> got = last ? y.get() : h32.get(), m = mix.get();
    const std::vector<uint16_t> halves = h16.get();
    error_sum e;
    int bad = 0;
    for (size_t t = 0; t < TOKENS; t++) {
        double row[HC_ROWS], squares = 0;
        std::vector<float> want(wide);
        for (size_t k = 0; k <= HC_ROWS; k++) {
            double s = 0;
            for (size_t p = 0; p < (size_t)parts; p++) s += (double)sums[(t * (size_t)parts + p) * HC_SUMS + k];
            if (k < HC_ROWS) row[k] = s;
            else squares = s;
        }
        const double factor = 1 / sqrt(squares / (S * n) + 1e-6);
        for (size_t k = 0; k < 2 * S; k++)
            row[k] = (k < S ? 1 : most) / (1 + exp(-(row[k] * factor * (double)scale[k / S] + (double)base[k]))) +
                     (k < S || !mixes ? eps : 0);
        if (!parts) std::fill(row, row + S, 1.0 / S);
        for (size_t i = 0; i < wide; i++)
            for (size_t j = 0; j < S; j++)
                want[i] += (lags ? before[t * stride + at_lag + j] : (float)row[j]) * x[(t * S + j) * wide + i];
        const double f = rms_factor(want.data(), n);
        for (size_t i = 0; i < wide; i++) {
            const double v = (double)want[i] * (last ? 1 : f * (double)w[i]);
            e.add((double)got[t * wide + i], v);
            bad += !last && !(fabs((double)f16_to_f32(halves[t * wide + i]) - v) <= 7e-4 * fabs(v) + 1e-6);
        }
        const float *c = &m[t * stride];
        for (size_t k = 0; k < S && lags; k++) bad += !(fabs((double)c[at_lag + k] - row[k]) <= 1e-5);
        for (size_t k = 0; k < 2 * S && !last; k++) bad += !(fabs((double)c[k] - row[k]) <= 1e-5);
        double *mixed = row + 2 * S; /* rows, then columns come to sums of 1 */
        for (size_t k = 0; k < S * S; k++)
            mixed[k] = exp(mixed[k] * factor * (double)scale[2] + (double)base[2 * S + k]);
        for (int turn = 0; turn < 20; turn++)
            for (size_t step : {(size_t)1, (size_t)S})
                for (size_t k = 0; k < S; k++) {
                    double *at = mixed + k * (step > 1 ? 1 : S), total = 0;
                    for (size_t i = 0; i < S; i++) total += at[i * step];
                    for (size_t i = 0; i < S; i++) at[i * step] /= total;
                }
        for (size_t k = 0; k < S * S && !mixes; k++) mixed[k] = k % (S + 1) == 0;
        for (size_t k = 2 * S; k < HC_ROWS && !last; k++) bad += !(fabs((double)c[k] - row[k]) <= 1e-4);
    }
    expect(e.nmse() < 1e-10 && !bad, "streams of %d, sums of %d blocks, last %d, lag %d, mixed %d: NMSE %.1e, %d wrong",
           n, parts, last, lags, mixes, e.nmse(), bad);
}

/* Streams of a low rank that a result is written to, or that joined ones replace, and their norms. */
template <int VECS>
static void run_streams_norm(int n, bool partial, bool joined, bool norm) {
    enum { TOKENS = 2, S = 3 };
    const size_t wide = (size_t)n;
    const std::vector<float> x = random_floats(TOKENS * S * n, 1), y = random_floats(TOKENS * n, 1),
                             other = random_floats(TOKENS * S * n, 1), w = random_floats(S * n, 1),
                             mix = random_floats(TOKENS * S, 3);
    gpu_array<float> x_d(x), y_d(y), other_d(other), w_d(w), mix_d(mix);
    gpu_array<uint16_t> norms(std::vector<uint16_t>(TOKENS * S * wide, 0xABCD));
    struct stream_args a = {};
    a.streams = x_d, a.partial = partial ? y_d.p : NULL, a.joined = joined ? other_d.p : NULL, a.mix = mix_d;
    a.weight = norm ? w_d.p : NULL, a.norms = norms, a.n = n, a.n_hc = S, a.eps = 1e-6f;
    x_d.arrive(), y_d.arrive(), other_d.arrive(), mix_d.arrive();
    LAUNCH_PDL(k_streams_norm<VECS>, dim3(S, TOKENS), NORM_THREADS, 0, test_stream, a);
    finish("norms of streams");
    const std::vector<float> now = x_d.get();
    const std::vector<uint16_t> got = norms.get();
    error_sum sums, normed;
    int bad = 0;
    for (size_t r = 0; r < TOKENS * S; r++) {
        const double part = 2 / (1 + exp(-(double)mix[r] / S)), f = rms_factor(&now[r * wide], n);
        for (size_t i = 0, at = r * wide; i < wide; i++, at++) {
            const double was = (double)(joined ? other : x)[at];
            sums.add((double)now[at], was + (partial ? part * (double)y[r / S * wide + i] : 0));
            if (norm) normed.add((double)f16_to_f32(got[at]), (double)now[at] * f * (double)w[r % S * wide + i]);
            else bad += got[at] != 0xABCD;
        }
    }
    expect(sums.nmse() < 1e-12 && normed.nmse() < 1e-6 && !bad,
           "streams of %d, partial %d, joined %d, norm %d: NMSE %.1e, of norms %.1e, %d wrong", n, partial, joined,
           norm, sums.nmse(), normed.nmse(), bad);
}

/* Readings of many blocks, as in "CPU operations: blocks of layers" of moe.c, and their norms. plain: rows are weighed,
 * not their norms, and a result comes to the last row without a convolution: it is added, or with an odd number of rows
 * it is that row. */
template <int VECS>
static void run_blocks(int n, int n_row, int n_read, bool plain = false) {
    enum { TOKENS = 2 };
    const size_t wide = (size_t)n, rows = (size_t)n_row, reads = (size_t)n_read;
    std::vector<float> x = random_floats(TOKENS * n_row * n, 1);
    const std::vector<float> query = random_floats(n_read * n, plain ? 0.05 : 1), w = random_floats(n_read * n, 1),
                             result = random_floats(TOKENS * n, 1);
    const double row_eps = plain ? 0.3 : 1e-6, score_by = plain ? 1 : sqrt(n);
    gpu_array<float> x_d(x), query_d(query), w_d(w), result_d(result), h32(TOKENS * wide);
    gpu_array<uint16_t> out(reads * TOKENS * wide);
    gpu_batch b(9, TOKENS, 9);
    struct block_args a = {};
    a.batch = b, a.rows = x_d, a.n_res = a.n_row = n_row, a.n = n, a.n_tok = TOKENS, a.n_read = a.n_out = n_read;
    a.query = query_d, a.h32 = h32, a.eps = 1e-6f;
    a.plain = plain, a.row_eps = (float)row_eps, a.score_by = (float)score_by;
    if (plain) a.conv.x = result_d, a.conv.stride = wide, a.to = n_row - 1, a.begins = n_row % 2;
    for (size_t q = 0; q < reads; q++) a.norm[q] = w_d + q * wide, a.out[q] = out + q * TOKENS * wide;
    x_d.arrive(), result_d.arrive();
    LAUNCH_PDL(k_blocks<VECS>, TOKENS, NORM_THREADS, 0, test_stream, a);
    finish("blocks of layers");
    for (size_t i = 0; i < TOKENS * wide && plain; i++) {
        float *to = &x[(i / wide * rows + rows - 1) * wide + i % wide];
        *to = result[i] + (a.begins ? 0.0f : *to);
    }
    const std::vector<uint16_t> halves = out.get();
    const std::vector<float> first = h32.get();
    error_sum e;
    int bad = 0;
    for (size_t t = 0; t < TOKENS; t++)
        for (size_t q = 0; q < reads; q++) {
            std::vector<double> score, norm;
            std::vector<float> want(wide);
            double den = 0;
            for (size_t j = 0; j < rows; j++) {
                const float *row = &x[(t * rows + j) * wide];
                double dot = 0, squares = 0;
                for (size_t i = 0; i < wide; i++) dot += (double)row[i] * (double)query[q * wide + i];
                for (size_t i = 0; i < wide; i++) squares += (double)row[i] * (double)row[i];
                norm.push_back(1 / sqrt(squares / n + row_eps));
                score.push_back(exp(dot * norm.back() / score_by)), den += score.back();
            }
            for (size_t i = 0; i < wide; i++) {
                double sum = 0;
                for (size_t j = 0; j < rows; j++)
                    sum += score[j] / den * (plain ? 1 : norm[j]) * (double)x[(t * rows + j) * wide + i];
                want[i] = (float)sum;
            }
            const double f = rms_factor(want.data(), n);
            for (size_t i = 0; i < wide; i++) {
                const double y = (double)want[i] * f * (double)w[q * wide + i];
                if (!q) e.add((double)first[t * wide + i], y);
                bad += !(fabs((double)f16_to_f32(halves[(q * TOKENS + t) * wide + i]) - y) <= 7e-4 * fabs(y) + 1e-5);
            }
        }
    expect(e.nmse() < 1e-10 && !bad && (!plain || x_d.get() == x),
           "%d readings of %d blocks of %d, plain %d: NMSE %.1e, %d wrong", n_read, n_row, n, plain, e.nmse(), bad);
}

/* A result that is normed before it is added, and the norm of the sum. parts: the result is the sum of the norms of two
 * parts, and the residual is scaled after that. */
template <int VECS>
static void run_add_result(int n, bool norm, bool parts) {
    enum { TOKENS = 2 };
    const size_t wide = (size_t)n;
    const std::vector<float> x = random_floats(TOKENS * n, 1), y = random_floats(TOKENS * n, 1),
                             z = random_floats(TOKENS * n, 3), scale = {0.75f},
                             w[4] = {random_floats(n, 1), random_floats(n, 1), random_floats(n, 1),
                                     random_floats(n, 1)};
    gpu_array<float> x_d(x), y_d(y), z_d(z), scale_d(scale), w0(w[0]), w1(w[1]), w2(w[2]), w3(w[3]), h32(TOKENS * wide);
    gpu_array<uint16_t> h16(TOKENS * wide);
    struct result_args a = {};
    a.x = x_d, a.partial = y_d, a.result = w0, a.weight = norm ? w1.p : NULL, a.h16 = h16, a.h32 = h32;
    if (parts) a.more = z_d, a.part[0] = w2, a.part[1] = w3, a.scale = scale_d;
    a.eps = 1e-6f, a.n = n;
    x_d.arrive(), y_d.arrive(), z_d.arrive();
    LAUNCH_PDL(k_add_result<VECS>, TOKENS, NORM_THREADS, 0, test_stream, a);
    finish("normed results");
    const std::vector<float> now = x_d.get(), h = h32.get();
    const std::vector<uint16_t> halves = h16.get();
    error_sum sums, normed;
    int bad = 0;
    for (size_t t = 0; t < TOKENS; t++) {
        const double f = rms_factor(&y[t * wide], n), fz = rms_factor(&z[t * wide], n),
                     g = rms_factor(&now[t * wide], n);
        std::vector<float> result(wide);
        for (size_t i = 0, at = t * wide; i < wide; i++, at++)
            result[i] =
                parts ? (float)((double)y[at] * f * (double)w[2][i] + (double)z[at] * fz * (double)w[3][i]) : y[at];
        const double of = rms_factor(result.data(), n), by = parts ? (double)scale[0] : 1;
        for (size_t i = 0, at = t * wide; i < wide; i++, at++) {
            const double v = (double)now[at] * g * (double)w[1][i];
            sums.add((double)now[at], ((double)x[at] + (double)result[i] * of * (double)w[0][i]) * by);
            if (!norm) continue;
            normed.add((double)h[at], v);
            bad += !(fabs((double)f16_to_f32(halves[at]) - v) <= 6e-4 * fabs(v) + 1e-7);
        }
    }
    expect(sums.nmse() < 1e-12 && normed.nmse() < 1e-12 && !bad,
           "a result of %d, norm %d, parts %d: NMSE %.1e, of the norm %.1e, %d wrong", n, norm, parts, sums.nmse(),
           normed.nmse(), bad);
}

/* Limits of queries, keys and values of two tokens. */
static void run_clip(int q, int kv) {
    enum { TOKENS = 2, GAP = 4 };
    const int n[3] = {q, kv, kv};
    std::vector<std::vector<float>> x;
    std::vector<gpu_array<float> *> owned;
    struct clip_args a = {};
    for (int i = 0; i < 3; i++) {
        x.push_back(random_floats(TOKENS * (n[i] + GAP), 1));
        owned.push_back(new gpu_array<float>(x[(size_t)i]));
        a.x[i] = owned[(size_t)i]->p, a.n[i] = n[i], a.stride[i] = (size_t)(n[i] + GAP);
    }
    a.most = 0.75f;
    owned[0]->arrive();
    LAUNCH_PDL(k_clip, dim3(ceil_div(q, 1024), TOKENS, 3), 256, 0, test_stream, a);
    finish("limits");
    int bad = 0;
    for (size_t i = 0; i < 3; i++) {
        const std::vector<float> got = owned[i]->get();
        for (size_t k = 0; k < got.size(); k++) {
            const bool within = k % a.stride[i] < (size_t)n[i];
            bad += got[k] != (within ? fminf(fmaxf(x[i][k], -a.most), a.most) : x[i][k]);
        }
        delete owned[i];
    }
    expect(!bad, "limits of %d and %d values: %d are others", q, kv, bad);
}

extern "C" void cuda_test_norms(void) {
    begin_test(21);
    run_clip(1028, 64), run_clip(48, 16);
    static const int widths[] = {4088, 8184, 16376}; /* of each instance the most, less two threads' values */
    for (int n : widths) {
        for (int k = 0; k < 4; k++) run_add_norm<PARTIAL_OWN>(n, 1, 0, true, k & 1, k < 3, 2);
        run_add_norm<PARTIAL_OWN>(n, 1, 0, true, true, true, 1);
        for (int k = 0; k < 2; k++) run_add_norm<PARTIAL_OWN>(n, 1, 0, true, k, true, 1 + k, true);
        run_add_norm<PARTIAL_BF16>(n, 2, 0, true, true, true, 2, true);
        run_add_norm<PARTIAL_GATHERED>(n, 2, 1, true, true, true, 2, true);
        run_add_norm<PARTIAL_PUSHED>(n, 2, 1, true, true, true, 2, true);
        for (int k = 1; k < 4; k++) run_add_norm<PARTIAL_BF16>(n, 2, 0, k & 1, true, k & 2, k == 2 ? 1 : k);
        for (int ranks : {1, 2, 3, 15})
            run_add_norm<PARTIAL_GATHERED>(n, ranks, ranks / 2, ranks & 1, true, ranks & 2, 1 + ranks % 2);
        for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
            for (int rank = 0; rank < ranks; rank++)
                run_add_norm<PARTIAL_PUSHED>(n, ranks, rank, rank & 1, true, ranks % 3 || rank, 1 + rank % 2);
        }
    }
    run_add_norm<PARTIAL_OWN>(48, 1, 0, true, true, true, 1); /* no norm in F32 */
    run_add_norm<PARTIAL_PUSHED>(48, 3, 1, true, true, true, 1);
    for (int n : {16376, 40})
        for (int streams : {1, 4})
            for (int rings = 0; rings < 4; rings++)
                for (int next = 0; next < 2; next++)
                    if (n < 64 || rings == 1 + next)
                        run_keep_hidden(n, streams, streams == 1, streams == 1 ? n / 8 * 4 : 0, 2 * n - 4 * (n < 64),
                                        rings & 1, rings & 2, next, streams > 1 && next);
    run_hc_norm<4>(4088, 45, false), run_hc_norm<4>(4088, 16, true), run_hc_norm<4>(4088, 0, true);
    run_hc_norm<8>(8184, 45, false), run_hc_norm<8>(8184, 32, true), run_hc_norm<8>(8184, 0, true);
    run_hc_norm<4>(4088, 45, false, true), run_hc_norm<4>(4088, 0, true, true);
    run_hc_norm<8>(8184, 45, false, true), run_hc_norm<8>(8184, 0, true, true);
    run_hc_norm<4>(2816, 11, false, false, false), run_hc_norm<8>(8184, 45, false, false, false);
    run_hc_norm<4>(2816, 11, true, false, false);
    for (int kind = 0; kind < 4; kind++) { /* a result, joined streams, neither; a result without norms */
        run_streams_norm<4>(4088, kind % 3 == 0, kind == 1, kind < 3);
        run_streams_norm<8>(8184, kind % 3 == 0, kind == 1, kind < 3);
    }
    run_blocks<4>(132, GPU_BLOCKS, BLOCKS_READ), run_blocks<8>(8184, 33, 1);
    run_blocks<4>(132, GPU_BLOCKS, 1, true), run_blocks<8>(8184, 33, 1, true);
    for (int kind = 0; kind < 4; kind++) {
        run_add_result<4>(4088, kind & 1, kind & 2);
        run_add_result<8>(8184, kind & 1, kind & 2);
        run_add_result<16>(16376, kind & 1, kind & 2);
    }
}

/* ---- rotations, and the new rows of the cache ---- */

struct rope_case {
    int d, dv, q_head, rope;
    bool pairs, fp8, norm;
    int ring; /* rows; 0: none */
    bool v_norm = false;
    bool grows = false; /* queries do with the position */
};

/* Grouped-query attention in prefill. */
static void run_rope_gqa(const struct rope_case &c) {
    enum { TOKENS = 3, HEADS = 3, KV = 2, POS = 70 };
    test_cache k(POS + TOKENS, KV * c.d, c.d, c.fp8, c.ring), v(POS + TOKENS, KV * c.dv, c.dv, c.fp8, c.ring);
    test_heads q32(TOKENS, HEADS, c.q_head, c.d, 3), k32(TOKENS, KV, c.d, c.d, 0.5), v32(TOKENS, KV, c.dv, c.dv, 1);
    const int n_norm = c.norm ? c.d : 0, angles = TOKENS * c.rope / 2;
    const std::vector<float> q_norm = random_floats(n_norm, 1), k_norm = random_floats(n_norm, 1),
                             cs = random_floats(angles, 0.7), sn = random_floats(angles, 0.7);
    gpu_array<float> q_norm_d(q_norm), k_norm_d(k_norm), cs_d(cs), sn_d(sn);
    gpu_array<uint16_t> q16((size_t)(TOKENS * HEADS * c.d));
    gpu_batch b(POS, TOKENS, POS);
    struct rope_args r = {};
    r.batch = b, r.cs = cs_d, r.sn = sn_d, r.pairs = c.pairs, r.q = q32.d, r.k = k32.d, r.v = v32.d, r.q16 = q16;
    if (c.norm) r.q_norm = q_norm_d, r.k_norm = k_norm_d;
    r.q_stride = (size_t)q32.stride, r.k_stride = (size_t)k32.stride, r.v_stride = (size_t)v32.stride;
    r.kp = k.p, r.vp = v.p, r.n_head = HEADS, r.n_head_kv = KV, r.d = c.d, r.q_head = c.q_head, r.dv = c.dv;
    r.rope = c.rope, r.eps = 1e-6f, r.v_norm = c.v_norm, r.temp_scale = c.grows ? 0.1f : 0, r.temp_length = 9;
    k.forget(POS, TOKENS), v.forget(POS, TOKENS);
    q32.d.arrive(), k32.d.arrive(), v32.d.arrive();
    const dim3 grid(ceil_div(HEADS + 2 * KV, 4), TOKENS);
    if (c.d > HEAD_MAX) LAUNCH_PDL(k_rope_gqa<WIDE_PER>, grid, 128, 0, test_stream, r);
    else LAUNCH_PDL(k_rope_gqa<HEAD_PER>, grid, 128, 0, test_stream, r);
    finish("rotations");
    k.read(POS, TOKENS), v.read(POS, TOKENS);
    const std::vector<uint16_t> got = q16.get();
    error_sum sum;
    int bad = 0;
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HEADS; h++) {
            const std::vector<double> want = q32.roped(t, h, q_norm, cs, sn, c.rope, c.pairs);
            const double growth = c.grows ? 1 + 0.1 * log1p((POS + t) / r.temp_length) : 1;
            for (int i = 0; i < c.d; i++)
                sum.add((double)f16_to_f32(got[(size_t)((t * HEADS + h) * c.d + i)]), growth * want[(size_t)i]);
        }
        for (int h = 0; h < KV; h++) {
            const size_t at = (size_t)((POS + t) * KV + h);
            const std::vector<float> ones((size_t)(c.v_norm ? c.dv : 0), 1);
            bad += !row_near(k.p, &k.value[at * (size_t)c.d], k32.roped(t, h, k_norm, cs, sn, c.rope, c.pairs));
            bad += !row_near(v.p, &v.value[at * (size_t)c.dv], v32.roped(t, h, ones, cs, sn, 0));
        }
    }
    expect(sum.nmse() < 1e-6 && !bad,
           "heads of %d and %d, %d rotated, pairs %d, fp8 %d, norm %d, growth %d: NMSE %.1e, %d wrong rows", c.d, c.dv,
           c.rope, c.pairs, c.fp8, c.norm, c.grows, sum.nmse(), bad);
}

/* Latent attention in prefill. grows: queries do with the position, and the batch is one of several runs. */
static void run_rope_mla(bool fp8, int nope, int latent, int rope, bool grows, bool shared = false, int ring = 0) {
    enum { TOKENS = 2, HEADS = 5, POS = 5 };
    const int d = nope + rope, key = latent + rope;
    mla_rows rows(POS, TOKENS, latent, rope, fp8, shared, ring);
    test_heads q(TOKENS, HEADS, d, d, 1);
    gpu_array<uint16_t> q16((size_t)(TOKENS * HEADS * d)), y((size_t)(TOKENS * HEADS * key));
    gpu_batch b(POS, TOKENS, POS);
    struct rope_args r = {};
    rows.ask(&r);
    r.batch = b, r.q = q.d, r.q16 = q16, r.q_rope = y, r.q_stride = (size_t)q.stride;
    r.n_head = HEADS, r.d = d, r.nope = nope;
    r.batch.several = grows, r.temp_scale = grows ? 0.1f : 0, r.temp_length = 3;
    q.d.arrive();
    LAUNCH_PDL(k_rope_mla, dim3(1 + ceil_div(HEADS, 4), TOKENS), 128, 0, test_stream, r);
    finish("rotations of MLA");
    const std::vector<uint16_t> own = q16.get(), rotated = y.get();
    error_sum sum;
    int bad = rows.wrong();
    for (int t = 0; t < TOKENS; t++) {
        const double growth = grows ? 1 + 0.1 * log1p((POS + t) / r.temp_length) : 1;
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < d; i++) {
                const size_t row = (size_t)(t * HEADS + h);
                const float *x = q.row(t, h);
                const uint16_t plain = own[row * (size_t)d + (size_t)i];
                if (i < nope && !grows) bad += plain != f16_from_f32(x[i]);
                else if (i < nope) sum.add((double)f16_to_f32(plain), growth * (double)x[i]);
                else
                    sum.add((double)f16_to_f32(rotated[row * (size_t)key + (size_t)(latent + i - nope)]),
                            growth * mla_turned(x + nope, rows.cs, rows.sn, rope, t, i - nope));
            }
    }
    expect(sum.nmse() < 1e-6 && !bad,
           "fp8 %d, %d + %d of %d latents, growth %d, shared key normed %d, ring %d: NMSE %.1e, %d wrong", fp8, nope,
           rope, latent, grows, shared, ring, sum.nmse(), bad);
}

/* Queries, keys and compressed keys of attention with one KV head of d values, of which any number is rotated, far into a
 * long text: keys of COMPRESS_RATIO tokens are means over POOLED, of which the ring has some. POOLED is COMPRESS_RATIO: of
 * an indexer, these keys alone, without a norm. */
template <int POOLED>
static void run_csa_store(int d, int rope, int pos) {
    enum { TOKENS = 8, HEADS = 2, COMPRESS_RATIO = 3, RING = 39 };
    constexpr bool POOLS = POOLED == COMPRESS_RATIO;
    const int wide = POOLED / COMPRESS_RATIO * d, pairs = rope / 2, first = pos - POOLED;
    const size_t width = (size_t)wide, heads = (size_t)d;
    test_cache window(RING, d, ATTN_GROUP, false, RING),
        blocks((pos + TOKENS) / COMPRESS_RATIO - pos / COMPRESS_RATIO, d, ATTN_GROUP, false);
    test_heads q(TOKENS, HEADS, d, d, 2), k(TOKENS, 1, d, d, 2);
    const std::vector<float> k_norm = random_floats(d, 1), norm = random_floats(d, 1),
                             ape = random_floats(COMPRESS_RATIO * wide, 1), cs = random_floats(TOKENS * pairs, 0.7),
                             sn = random_floats(TOKENS * pairs, 0.7),
                             value = random_floats((POOLED + TOKENS) * wide, 1),
                             gate = random_floats((POOLED + TOKENS) * wide, 1);
    std::vector<float> freq, rows(RING * 2 * width, NAN);
    for (int i = 0; i < pairs; i++) freq.push_back(powf(0.97f, (float)i));
    for (size_t i = 0; i < POOLED; i++) { /* of the tokens before the batch */
        const size_t row = ((size_t)first + i) % RING * 2 * width;
        std::copy_n(&value[i * width], width, &rows[row]), std::copy_n(&gate[i * width], width, &rows[row + width]);
    }
    gpu_array<float> k_norm_d(k_norm), norm_d(norm), ape_d(ape), cs_d(cs), sn_d(sn), freq_d(freq), rows_d(rows),
        value_d(value), gate_d(gate);
    gpu_array<uint16_t> q16((size_t)(TOKENS * HEADS * d));
    gpu_batch b(pos, TOKENS, pos);
    struct csa_args a = {};
    struct rope_args &r = a.rope;
    r.batch = b, r.cs = cs_d, r.sn = sn_d, r.q = q.d, r.k = k.d, r.q_stride = (size_t)q.stride,
    r.k_stride = (size_t)k.stride;
    r.k_norm = k_norm_d, r.q16 = q16, r.kp = window.p, r.n_head = HEADS, r.n_head_kv = 1, r.d = d, r.rope = rope;
    r.eps = 1e-6f;
    struct compress_args &c = a.with[0];
    c.ring = cache_make(KV_F32, 2 * wide, 1), c.ring.kind = ROWS_RING, c.ring.n_row = RING,
    c.ring.data = (uint8_t *)rows_d.p;
    c.keys = blocks.p, c.keys.data -= (size_t)(pos / COMPRESS_RATIO) * c.keys.row_bytes; /* rows of the batch alone */
    c.value = value_d + POOLED * width, c.gate = gate_d + POOLED * width, c.stride = width, c.ape = ape_d,
    c.norm = POOLS ? NULL : norm_d.p, c.d = d, c.index = POOLS;
    a.table = {freq_d, pairs, 1.5f, NULL, NULL}, a.n_with = 1, a.compress_ratio = COMPRESS_RATIO, a.pooled = POOLED,
    a.n_tok = TOKENS;
    q.d.arrive(), k.d.arrive(), value_d.arrive();
    csa_store(&a, !POOLS, test_stream);
    finish("attention with one KV head: rows");
    const std::vector<uint16_t> got = q16.get();
    const std::vector<float> kept = rows_d.get();
    error_sum sum;
    int bad = 0;
    auto turn = [&](std::vector<double> x, const std::vector<float> &w, bool own,
                    auto angle) { /* normed, and rotated */
                                  double ss = 0;
                                  for (double v : x) ss += v * v;
                                  for (size_t i = 0; i < heads && !POOLS; i++)
                                      x[i] *= (own ? (double)w[i] : 1) / sqrt(ss / d + 1e-6);
                                  for (int i = 0; i < pairs; i++) {
                                      double &u = x[(size_t)(d - rope + 2 * i)], &v = x[(size_t)(d - rope + 2 * i + 1)];
                                      const auto [co, si] = angle(i);
                                      const double old = u;
                                      u = old * co - v * si, v = old * si + v * co;
                                  }
                                  return x;
    };
    window.read(pos % RING, 1); /* sizes the values */
    for (int t = 0; t < TOKENS; t++) {
        auto angle = [&](int i) {
            return std::pair<double, double>(cs[(size_t)(t * pairs + i)], sn[(size_t)(t * pairs + i)]);
        };
        for (int h = 0; h < HEADS && !POOLS; h++) {
            const float *x = q.row(t, h);
            const std::vector<double> want = turn(std::vector<double>(x, x + d), norm, false, angle);
            for (size_t i = 0; i < heads; i++)
                sum.add((double)f16_to_f32(got[(size_t)(t * HEADS + h) * heads + i]), want[i]);
        }
        const float *x = k.row(t, 0);
        const int row = (pos + t) % RING;
        window.read(row, 1);
        bad += !POOLS && !row_near(window.p, &window.value[(size_t)row * heads],
                                   turn(std::vector<double>(x, x + d), k_norm, true, angle));
        bad += memcmp(&kept[(size_t)row * 2 * width], &value[(size_t)(POOLED + t) * width], width * sizeof(float)) != 0;
    }
    blocks.read(0, (pos + TOKENS) / COMPRESS_RATIO - pos / COMPRESS_RATIO);
    for (int key = pos / COMPRESS_RATIO; key < (pos + TOKENS) / COMPRESS_RATIO; key++) {
        std::vector<double> mean;
        for (int i = 0; i < d; i++) {
            double top = -INFINITY, den = 0, x = 0;
            for (int pass = 0; pass < 2; pass++)
                for (int p = (key + 1) * COMPRESS_RATIO - POOLED; p < (key + 1) * COMPRESS_RATIO; p++) {
                    const size_t column = (size_t)((p < key * COMPRESS_RATIO ? 0 : wide - d) + i);
                    const size_t at = (size_t)(p - first) * width + column;
                    const double g = (double)gate[at] + (double)ape[(size_t)(p % COMPRESS_RATIO) * width + column];
                    if (!pass) top = fmax(top, g);
                    else den += exp(g - top), x += exp(g - top) * (double)value[at];
                }
            mean.push_back(x / den);
        }
        auto angle = [&](int i) {
            const double at = (double)((float)(key * COMPRESS_RATIO) * freq[(size_t)i]);
            return std::pair<double, double>(1.5 * cos(at), 1.5 * sin(at));
        };
        bad += !row_near(blocks.p, &blocks.value[(size_t)(key - pos / COMPRESS_RATIO) * heads],
                         turn(mean, norm, true, angle));
    }
    expect((POOLS || sum.nmse() < 1e-6) && !bad, "rows of one KV head of %d, %d rotated, at %d: NMSE %.1e, %d wrong", d,
           rope, pos, POOLS ? 0 : sum.nmse(), bad);
}

extern "C" void cuda_test_rotations(void) {
    begin_test(22);
    run_csa_store<6>(512, 512, 400004), run_csa_store<6>(320, 64, 36), run_csa_store<3>(128, 0, 400);
    for (bool fp8 : {false, true}) {
        run_rope_gqa({256, 256, 512, 256, false, fp8, true, 0}),
            run_rope_gqa({256, 256, 256, 256, true, fp8, false, 64});
        run_rope_gqa({192, 128, 192, 64, fp8, fp8, fp8, 0});
        run_rope_gqa({512, 512, 512, 512, false, fp8, true, 64, true});
        run_rope_gqa({512, 512, 512, 512, true, fp8, !fp8, 0, false, true});
        run_rope_gqa({256, 256, 256, 256, false, fp8, true, 64, true});
        for (bool grows : {false, true}) run_rope_mla(fp8, 128, 512, 64, grows);
        for (int ring : {0, 4}) run_rope_mla(fp8, 200, 4000, 1000 + 1024 * !!ring, false, ring, ring);
    }
}

/* ---- the indexer ---- */

/* Norms and rotations of queries and keys; bias: of a LayerNorm of the keys; pools: keys go to the rows that they come
 * from, not to the cache. */
static void run_index_store(int width, int rope, bool fp8, bool pairs, bool bias, bool pools = false) {
    enum { TOKENS = 2, HEADS = 4, POS = 9 };
    test_cache k(POS + TOKENS, width, width, fp8);
    test_heads q(TOKENS, HEADS, width, width, 2), k32(TOKENS, 1, width, width, 1);
    const std::vector<float> q_norm = random_floats(bias ? 0 : width, 1), k_norm = random_floats(width, 1),
                             more = random_floats(width, 1), cs = random_floats(TOKENS * rope / 2, 0.7),
                             sn = random_floats(TOKENS * rope / 2, 0.7);
    gpu_array<float> q_norm_d(q_norm), k_norm_d(k_norm), more_d(more), cs_d(cs), sn_d(sn);
    gpu_array<uint16_t> q16((size_t)(TOKENS * HEADS * width));
    gpu_batch b(POS, TOKENS, POS);
    struct index_args a = {};
    struct rope_args &r = a.rope;
    r.batch = b, r.cs = cs_d, r.sn = sn_d, r.pairs = pairs, r.q = q.d, r.k = k32.d, r.q_norm = bias ? NULL : q_norm_d.p;
    r.k_norm = k_norm_d, r.q16 = q16, r.q_stride = (size_t)q.stride, r.k_stride = (size_t)k32.stride, r.kp = k.p;
    r.n_head = HEADS, r.n_head_kv = 1, r.d = width, r.rope = rope, r.eps = 1e-6f, a.bias = bias ? more_d.p : NULL;
    a.pooled = pools ? k32.d.p : NULL;
    k.forget(POS, TOKENS);
    q.d.arrive(), k32.d.arrive();
    LAUNCH_PDL(k_index_store, dim3(ceil_div(HEADS + 1, 4), TOKENS), 128, 0, test_stream, a);
    finish("the indexer's rows");
    k.read(POS, TOKENS);
    for (int t = 0; t < TOKENS && bias; t++) { /* what the rotation finds */
        float *x = &k32.x[(size_t)(t * k32.stride)];
        double mean = 0, square = 0;
        for (int i = 0; i < width; i++) mean += (double)x[i] / width;
        for (int i = 0; i < width; i++) square += pow((double)x[i] - mean, 2);
        for (int i = 0; i < width; i++)
            x[i] = (float)(((double)x[i] - mean) / sqrt(square / width + 1e-6) * (double)k_norm[(size_t)i] +
                           (double)more[(size_t)i]);
    }
    const std::vector<uint16_t> got = q16.get();
    const std::vector<float> written = k32.d.get();
    error_sum sum;
    int bad = 0;
    for (int t = 0; t < TOKENS; t++) {
        const std::vector<double> key = k32.roped(t, 0, bias ? std::vector<float>() : k_norm, cs, sn, rope, pairs);
        for (int i = 0; i < width && pools; i++)
            bad += !(fabs((double)written[(size_t)(t * k32.stride + i)] - key[(size_t)i]) <= 1e-5);
        bad += !pools && !row_near(k.p, &k.value[(size_t)((POS + t) * width)], key);
        for (int h = 0; h < HEADS; h++) {
            const std::vector<double> want = q.roped(t, h, q_norm, cs, sn, rope, pairs);
            for (int i = 0; i < width; i++)
                sum.add((double)f16_to_f32(got[(size_t)((t * HEADS + h) * width + i)]), want[(size_t)i]);
        }
    }
    expect(sum.nmse() < 1e-6 && !bad,
           "an indexer's %d values, %d rotated, fp8 %d, pairs %d, bias %d, pools %d: NMSE %.1e, %d wrong", width, rope,
           fp8, pairs, bias, pools, sum.nmse(), bad);
}

/* Keys that are means of `together` tokens' keys, far into a long text, some of which the ring has. */
static void run_index_means(int width, int rope, bool fp8, bool pairs, int together, int pos) {
    enum { TOKENS = 8, HEADS = 3, RING = 19 };
    const int first = pos / together, n_key = (pos + TOKENS) / together - first, before = pos - first * together;
    const size_t wide = (size_t)width;
    test_cache k(n_key, width, width, fp8);
    test_heads q(TOKENS, HEADS, width, width, 2), k32(TOKENS, 1, width, width, 1), means(n_key, 1, width, width, 1);
    const std::vector<float> q_norm = random_floats(width, 1), k_norm = random_floats(width, 1),
                             cs = random_floats(TOKENS * rope / 2, 0.7), sn = random_floats(TOKENS * rope / 2, 0.7),
                             old = random_floats(before * width, 1);
    std::vector<float> freq, rows(RING * wide, NAN), key_cs, key_sn;
    for (int i = 0; i < rope / 2; i++) freq.push_back(powf(0.97f, (float)i));
    for (int i = 0; i < before; i++) /* of the tokens before the batch */
        std::copy_n(&old[(size_t)i * wide], wide, &rows[(size_t)((pos - before + i) % RING) * wide]);
    gpu_array<float> q_norm_d(q_norm), k_norm_d(k_norm), cs_d(cs), sn_d(sn), freq_d(freq), rows_d(rows);
    gpu_array<uint16_t> q16((size_t)(TOKENS * HEADS * width));
    gpu_batch b(pos, TOKENS, pos);
    struct index_args a = {};
    struct rope_args &r = a.rope;
    r.batch = b, r.cs = cs_d, r.sn = sn_d, r.pairs = pairs, r.q = q.d, r.k = k32.d, r.q_norm = q_norm_d;
    r.k_norm = k_norm_d, r.q16 = q16, r.q_stride = (size_t)q.stride, r.k_stride = (size_t)k32.stride, r.kp = k.p;
    r.kp.data -= (size_t)first * r.kp.row_bytes; /* rows of the batch alone */
    if (fp8) r.kp.scale -= (size_t)first * (size_t)r.kp.n_scale;
    r.n_head = HEADS, r.n_head_kv = 1, r.d = width, r.rope = rope, r.eps = 1e-6f;
    a.means = a.keep = true, a.together = divisor_of(together), a.table = {freq_d, rope / 2, 1.5f, NULL, NULL};
    a.ring = cache_make(KV_F32, width, 1), a.ring.kind = ROWS_RING, a.ring.n_row = RING,
    a.ring.data = (uint8_t *)rows_d.p;
    k.forget(0, n_key);
    q.d.arrive(), k32.d.arrive();
    LAUNCH_PDL(k_index_store, dim3(ceil_div(HEADS + 1, 4), TOKENS), 128, 0, test_stream, a);
    finish("means of the indexer's keys");
    k.read(0, n_key);
    const std::vector<uint16_t> got = q16.get();
    const std::vector<float> kept = rows_d.get();
    error_sum sum;
    int bad = 0;
    for (int i = 0; i < n_key; i++) {
        float *mean = &means.x[(size_t)(i * means.stride)];
        for (size_t c = 0; c < wide; c++) {
            double s = 0;
            for (int t = 0; t < together; t++) {
                const int at = i * together + t - before; /* of the batch */
                s += (double)(at < 0 ? old[(size_t)(before + at) * wide + c] : k32.row(at, 0)[c]);
            }
            mean[c] = (float)(s / together);
        }
        for (int p = 0; p < rope / 2; p++) {
            const double angle = (double)((float)((first + i) * together) * freq[(size_t)p]);
            key_cs.push_back((float)(1.5 * cos(angle))), key_sn.push_back((float)(1.5 * sin(angle)));
        }
    }
    for (int i = 0; i < n_key; i++)
        bad += !row_near(k.p, &k.value[(size_t)i * wide], means.roped(i, 0, k_norm, key_cs, key_sn, rope, pairs));
    for (int t = 0; t < TOKENS; t++) {
        bad += memcmp(&kept[(size_t)((pos + t) % RING) * wide], k32.row(t, 0), wide * sizeof(float)) != 0;
        for (int h = 0; h < HEADS; h++) {
            const std::vector<double> want = q.roped(t, h, q_norm, cs, sn, rope, pairs);
            for (size_t i = 0; i < wide; i++)
                sum.add((double)f16_to_f32(got[(size_t)(t * HEADS + h) * wide + i]), want[i]);
        }
    }
    expect(sum.nmse() < 1e-6 && n_key > 1 && !bad,
           "an indexer's means of %d keys of %d, %d rotated, fp8 %d, pairs %d, at %d: NMSE %.1e, %d of %d wrong",
           together, width, rope, fp8, pairs, pos, sum.nmse(), bad, n_key);
}

/* Divides numbers by n, of which the lanes of a block have one each: quotients, and what is left. */
__global__ void k_divide(struct divisor n, const int *x, int2 *out) {
    out[threadIdx.x] = make_int2(n.of(x[threadIdx.x]), n.rest(x[threadIdx.x]));
}
static void run_divide(int n) {
    enum { NUMBERS = 256 };
    std::vector<int> x;
    while (x.size() < NUMBERS) { /* most around multiples of n, small ones and large ones */
        const int64_t bound = (int64_t)1 << (1 + rnd() % 31), at = (int64_t)(rnd() % (uint32_t)(bound / n + 1)) * n;
        x.push_back((int)std::max<int64_t>(0, std::min<int64_t>(at + (int)(rnd() % 3) - 1, INT_MAX)));
    }
    x[0] = 0, x[1] = INT_MAX, x[2] = INT_MAX / n * n, x[3] = max(x[2] - 1, 0);
    gpu_array<int> x_d(x);
    gpu_array<int2> out(x.size());
    k_divide<<<1, NUMBERS, 0, test_stream>>>(divisor_of(n), x_d, out);
    finish("quotients");
    const std::vector<int2> got = out.get();
    for (size_t i = 0; i < x.size(); i++)
        if (!expect(got[i].x == x[i] / n && got[i].y == x[i] % n, "%d / %d: %d, rest %d", x[i], n, got[i].x, got[i].y))
            break;
}

/* Scores of keys, each of so many tokens, or with a block those of parts of blocks, for tokens that see `len` keys and
 * more. among: keys of a candidate, of which a token has some; 0: there are none. */
static void run_index_scores(int width, bool fp8, int n_index, int block, int n_tok, int len, int together = 1,
                             int among = 0) {
    enum { CANDIDATES = 9 };
    const bool weighed = together == 1; /* means are not */
    auto seen = [&](int t) { return (len * together + t) / together; };
    const int keys = seen(n_tok - 1), per_score = block ? index_part(block) : 1,
              n_scores = (keys + per_score - 1) / per_score;
    const int n_list = block ? n_index : 1, per = block ? INDEX_ROWS / n_list : among ? 1 : (int)INDEX_TOKENS;
    test_cache k(keys, width, width, fp8);
    const int w_stride = n_index + 3;
    std::vector<uint16_t> q;
    for (int i = 0; i < n_tok * n_index * width; i++) q.push_back(f16_from_f32((float)normal()));
    const std::vector<float> w = random_floats(n_tok * w_stride, 1);
    gpu_array<uint16_t> q_d(q);
    gpu_array<float> w_d(w), scores(std::vector<float>((size_t)(n_tok * n_list * n_scores), NAN));
    gpu_batch b(len * together - 1, n_tok, len * together - 1);
    std::vector<int32_t> list; /* of a token: block 0, others, its latest one */
    for (int t = 0; t < n_tok; t++)
        for (int i = 0; i < CANDIDATES; i++) list.push_back(among ? i * ((seen(t) - 1) / among) / (CANDIDATES - 1) : 0);
    gpu_array<int32_t> list_d(list);
    struct index_args a = {};
    a.together = divisor_of(together);
    if (among) a.candidates = list_d, a.n_candidate = CANDIDATES, a.candidate_block = divisor_of(among);
    a.rope.batch = b, a.rope.q16 = q_d, a.rope.n_head = n_index, a.rope.d = width, a.rope.kp = k.p;
    a.w = weighed ? w_d.p : NULL;
    a.w_stride = (size_t)w_stride, a.score_scale = 0.125f, a.scores = scores, a.n_tok = n_tok, a.top_k = len / 2;
    a.n_list = n_list, a.n_scores = n_scores, a.block = block, a.block_tokens = per;
    const int tokens = min(n_tok, per);
    const size_t smem = block ? index_queries(tokens * n_index, width, 1) : index_queries(n_index, width, tokens);
    index_kernel *const kernel = index_find(width, fp8, block ? INDEX_BLOCK : among ? INDEX_CANDIDATE : INDEX_KEY);
    if (smem > 48 << 10)
        must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem), "smem");
    q_d.arrive(), w_d.arrive();
    LAUNCH_PDL(kernel, dim3(1, ceil_div(n_tok, per)), INDEX_THREADS, smem, test_stream, a);
    finish("scores");
    const std::vector<float> got = scores.get();
    error_sum sum;
    for (int t = 0; t < n_tok; t++)
        for (int l = 0; l < n_list; l++)
            for (int s = 0; s < n_scores; s++) {
                double want = block ? -INFINITY : 0;
                int first = s * per_score; /* of the keys that the score is of */
                if (among)
                    first =
                        s / among < CANDIDATES ? list[(size_t)(t * CANDIDATES + s / among)] * among + s % among : keys;
                if (first >= seen(t)) continue; /* the token does not see it */
                for (int x = first; x < min(first + per_score, block ? keys : seen(t)); x++)
                    for (int h = block ? l : 0; h < (block ? l + 1 : n_index); h++) {
                        double dot = 0;
                        for (int i = 0; i < width; i++)
                            dot += (double)f16_to_f32(q[(size_t)((t * n_index + h) * width + i)]) *
                                   k.value[(size_t)(x * width + i)];
                        if (block) want = fmax(want, dot);
                        else want += 0.125 * (weighed ? (double)w[(size_t)(t * w_stride + h)] : 1) * fmax(dot, 0);
                    }
                sum.add((double)got[(size_t)((t * n_list + l) * n_scores + s)], want);
            }
    expect(
        sum.nmse() < 1e-9,
        "scores by %d heads of %d, fp8 %d, blocks of %d, candidates of %d, %d tokens, %d keys of %d tokens: NMSE %.1e",
        n_index, width, fp8, block, among, n_tok, len, together, sum.nmse());
}

/* Choices of `n_topk` among n keys, or blocks of so many keys, the last `local` of which are chosen whatever their scores;
 * pools: of so many keys, and the unfinished one follows. */
static void run_index_choose(int n, int n_topk, int block, int local, int levels, int pools = 0) {
    const int n_list = 2, parts = block ? index_parts(block) : 1, n_scores = n * parts, block_keys = block ? block : 1;
    std::vector<float> score = random_floats(n_list * n_scores, 1);
    for (float &f : score) f = roundf(f * (float)levels) / (float)levels; /* many are equal, also 0 and -0 */
    gpu_array<float> score_d(score);
    const int n_all = n_topk + (pools > 0), together = max(pools, 1);
    gpu_array<int32_t> chosen((size_t)(n_list * n_all));
    gpu_batch b(n * block_keys * together - 2, 1, 0);
    struct index_args a = {};
    a.together = divisor_of(together);
    a.rope.batch = b, a.scores = score_d, a.chosen = chosen, a.n_tok = 1, a.top_k = n_topk * block_keys,
    a.n_list = n_list;
    a.n_topk = n_all, a.n_chosen = n_topk, a.n_scores = n_scores, a.block = block, a.local = local, a.parts = parts;
    score_d.arrive();
    LAUNCH_PDL((block ? k_index_choose<true> : k_index_choose<false>), (unsigned)n_list, CHOOSE_THREADS, 0, test_stream,
               a);
    finish("choices");
    const std::vector<int32_t> got = chosen.get();
    const int last = (n * block_keys - 1 + block_keys - 1) / block_keys; /* blocks that the token sees */
    for (int l = 0; l < n_list; l++) {
        std::vector<float> best;
        std::vector<int32_t> want;
        for (int i = 0; i < last; i++) {
            const float *s = &score[(size_t)(l * n_scores + i * parts)];
            best.push_back(i >= last - local && block ? INFINITY : *std::max_element(s, s + parts));
            want.push_back(i);
        }
        std::stable_sort(want.begin(), want.end(), [&](int x, int y) { return best[(size_t)x] > best[(size_t)y]; });
        want.resize((size_t)n_topk);
        std::sort(want.begin(), want.end());
        if (pools) want.push_back(last);
        expect(std::equal(want.begin(), want.end(), got.begin() + l * n_all),
               "%d of %d blocks of %d keys are not those with the largest scores, list %d, pools %d", n_topk, n, block,
               l, pools);
    }
}

extern "C" void cuda_test_indexer(void) {
    begin_test(23);
    for (bool fp8 : {false, true}) {
        for (bool bias : {false, true})
            run_index_store(128, 128, fp8, fp8 != bias, bias), run_index_store(64, 32, fp8, bias, bias);
        run_index_store(128, 0, fp8, fp8, true, true);
        run_index_means(128, 128, fp8, fp8, 3, 1000004), run_index_means(96, 32, fp8, !fp8, 6, 11);
        for (int width : {32, 64, 128}) run_index_scores(width, fp8, 36, 0, 3, 300, 1, width == 64 ? 3 : 8);
        for (int width : {64, 128})
            for (int block : {16, 64}) run_index_scores(width, fp8, 3, block, 23, 300);
        run_index_scores(16, fp8, 68, 0, 3, 90), run_index_scores(32, fp8, 68, 0, 3, 300, 1, 8);
        for (int width = 16; width <= INDEX_WIDTH; width += 16)
            run_index_scores(width, fp8, 20, 0, 5, 100, 3), run_index_scores(width, fp8, 36, 0, 3, 300);
    }
    run_index_choose(9001, 2048, 0, 0, 8), run_index_choose(70, 33, 0, 0, 1), run_index_choose(9001, 700, 0, 0, 100000);
    run_index_choose(7100, 2100, 0, 0, 8), run_index_choose(9001, 40, 16, 2, 8),
        run_index_choose(8300, 16, 32 * 31, 1, 100);
    run_index_choose(7100, 16, 32 * 31, 1, 100), run_index_choose(20, 4, 64, 1, 2);
    run_index_choose(7100, 40, 16, 2, 8);
    run_index_choose(9001, 512, 0, 0, 8, 1), run_index_choose(70, 33, 0, 0, 1, 4), run_index_choose(70, 33, 0, 0, 8, 3);
}

extern "C" void cuda_test_divisor(void) {
    begin_test(29);
    for (int n : {1, 2, 3, 4, 5, 7, 48, 127, 128, 641, 4096, 65535, 1000003, 1 << 28, INT_MAX}) run_divide(n);
}

/* ---- statistics, FP4 ---- */

/* What experts gave their tokens: n values for each of n_tok tokens, which chose k experts. */
static void run_stats(int n, int n_tok, int k, int n_expert) {
    const size_t choices = (size_t)(n_tok * k), wide = (size_t)n;
    std::vector<int32_t> id, row, first;
    for (int t = 0; t < n_tok; t++)
        for (int j = 0; j < k; j++) id.push_back((3 * t + j) % n_expert);
    for (int e = 0; e < n_expert; e++) {
        first.push_back((int)row.size());
        for (size_t i = 0; i < choices; i++)
            if (id[i] == e) row.push_back((int)i / k);
    }
    first.push_back((int)row.size());
    std::vector<uint16_t> y;
    for (size_t i = 0; i < choices * wide; i++) y.push_back(f16_from_f32((float)normal()));
    std::vector<float> weight = random_floats((int)choices, 1);
    for (float &f : weight) f = fabsf(f);
    gpu_array<uint16_t> y_d(y);
    gpu_array<int32_t> id_d(id), row_d(row), first_d(first);
    gpu_array<float> weight_d(weight);
    gpu_array<double> stats(std::vector<double>((size_t)(n_expert * STATS), 0.0));
    y_d.arrive(), first_d.arrive();
    const struct stats_args a = {y_d, n, k, first_d, row_d, id_d, weight_d, stats};
    LAUNCH_PDL(k_stats, (unsigned)n_expert, 256, 0, test_stream, a);
    finish("statistics");
    const std::vector<double> got = stats.get();
    double worst = 0;
    for (size_t e = 0; e < (size_t)n_expert; e++) {
        double want[STATS] = {};
        for (int32_t at = first[e]; at < first[e + 1]; at++) {
            double ss = 0, all = 0, mine = 0;
            for (size_t i = 0; i < wide; i++) {
                const double v = (double)HIDDEN_SCALE * (double)f16_to_f32(y[(size_t)at * wide + i]);
                ss += v * v;
            }
            for (int j = 0; j < k; j++) {
                const size_t c = (size_t)(row[(size_t)at] * k + j);
                all += (double)weight[c];
                if (id[c] == (int)e) mine = (double)weight[c];
            }
            const double gave = mine / all * sqrt(ss);
            want[STAT_TOKENS]++, want[STAT_WEIGHTED] += gave, want[STAT_NORM] += sqrt(ss),
                want[STAT_GATE] += mine / all;
            want[STAT_WEIGHTED_MAX] = fmax(want[STAT_WEIGHTED_MAX], gave);
        }
        for (size_t i = 0; i < STATS; i++) worst = fmax(worst, fabs(got[e * STATS + i] - want[i]) / (want[i] + 1e-300));
    }
    expect(worst < 1e-5, "statistics of %d values, %d of %d experts: off by %.1e", n, k, n_expert, worst);
}

/* Rows in FP4, of more blocks than a block of the kernel takes in four turns. */
static void run_quantize(int n_row, int n_in) {
    tokens x(n_row, n_in);
    const size_t code_bytes = (size_t)((n_in + 63) / 64) * 32, scale_bytes = FP4_SCALE_BYTES(n_in),
                 rows = (size_t)n_row;
    gpu_array<uint16_t> x_d(x.half);
    gpu_array<uint8_t> codes(rows * code_bytes), scales(rows * scale_bytes);
    gpu_array<float> row_scale(rows);
    x_d.arrive();
    quantize_fp4(x_d, x.stride, n_row, n_in, {codes, scales, row_scale}, test_stream);
    finish("FP4");
    const std::vector<uint8_t> c = codes.get(), s = scales.get();
    int bad = 0;
    for (size_t i = 0; i < rows; i++)
        bad += check_quantized(&x.value[i * (size_t)n_in], n_in, &c[i * code_bytes], &s[i * scale_bytes],
                               row_scale.get()[i]);
    expect(!bad, "%d rows of %d values in FP4: %d codes and scales are wrong", n_row, n_in, bad);
}

/* Rows of a table of n-grams in a format, which tokens choose, with ids before the batch in the ring. Two texts end, one
 * of them within an n-gram of the batch. GGUF_I8: rows are E4M3 with scales, tokens are hashed by other ids, and n-grams
 * go beyond the end of a text. */
static void run_ngram_rows(int type, int n) {
    enum { FIRST = 1, TOKENS = 7, HEADS = 4, ROWS = 37, EOS = 5, RING = 9, WIDE = 4, IDS = 16 };
    static const int32_t ids[FIRST + TOKENS] = {7, EOS, 9, 4, EOS, 11, 12, 4};
    static const int64_t multiplier[] = {23703573157769, 20109073645365, 8052911324071};
    const bool plain = type != GGUF_I8;
    const size_t n_scale = (size_t)n / NGRAM_SCALE,
                 bytes = plain ? gguf_row_bytes((enum gguf_type)type, (size_t)n) : (size_t)n;
    const float scale = plain ? 0.75f : 1.0f;
    std::vector<uint8_t> rows(HEADS * ROWS * bytes), scales(HEADS * ROWS * n_scale);
    std::vector<int32_t> map(IDS);
    uint64_t rng = 3;
    auto next = [&] { return (uint32_t)((rng = rng * 6364136223846793005u + 1442695040888963407u) >> 33); };
    synth_fill(rows.data(), rows.size(), plain ? (enum gguf_type)type : GGUF_F16, false, &rng);
    for (size_t i = 0; i < rows.size() && !plain; i++) { /* every code but NaN */
        const uint8_t code = (uint8_t)next();
        rows[i] = (code & 0x7F) == 0x7F ? 0 : code;
    }
    for (uint8_t &x : scales) x = (uint8_t)(110 + next() % 30); /* some values are beyond halves */
    scales[0] = 0;
    for (int i = 0; i < IDS; i++) map[(size_t)i] = plain ? i : (7 * i + 3) % IDS;
    std::vector<float> kept(RING * 2 * WIDE);
    for (int p = 0; p < FIRST; p++) kept[(size_t)(p * 2 * WIDE + WIDE)] = (float)ids[p];
    gpu_array<uint8_t> rows_d(rows), scales_d(scales);
    gpu_array<float> kept_d(kept);
    gpu_array<int32_t> ids_d(std::vector<int32_t>(ids + FIRST, ids + FIRST + TOKENS)), map_d(map);
    gpu_array<uint16_t> out((size_t)(TOKENS * HEADS * n));
    gpu_batch b(FIRST, TOKENS, FIRST);
    struct ngram_args a = {};
    a.batch = b, a.tokens = ids_d, a.rows = out, a.scale = scale, a.n_kept = WIDE;
    a.table.per_size = 2, a.table.n_head = HEADS, a.table.row = n, a.table.eos = EOS, a.table.ends = plain;
    if (!plain) a.table.id = map_d;
    memcpy(a.table.multiplier, multiplier, sizeof multiplier);
    for (int h = 0; h < HEADS; h++) a.table.offset[h] = h * ROWS, a.table.n_row[h] = ROWS - h;
    ngram_divide(&a);
    a.table.table.data = rows_d, a.table.table.type = (enum gguf_type)type, a.table.table.row_bytes = bytes;
    if (!plain) a.table.scales.data = scales_d, a.table.scales.row_bytes = n_scale;
    a.ring.kind = ROWS_RING, a.ring.n_row = RING, a.ring.row_bytes = 2 * WIDE * sizeof(float);
    a.ring.data = (uint8_t *)kept_d.p;
    ids_d.arrive(), kept_d.arrive();
    LAUNCH_PDL(k_ngram_rows, dim3(1, TOKENS), 128, 0, test_stream, a);
    finish("rows of n-grams");
    const std::vector<uint16_t> got = out.get();
    std::vector<float> row((size_t)n);
    int bad = 0;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++) {
            int64_t z = 0;
            for (int s = 0, end = FIRST + t; s < 2 + h / 2; s++) {
                z ^= multiplier[s] * map[(size_t)(s > end ? EOS : ids[FIRST + t - s])];
                if (plain && s && s <= end && ids[FIRST + t - s] == EOS) end = 0; /* those before it count as the end */
            }
            const size_t at = (size_t)(h * ROWS + z % (ROWS - h));
            if (plain) gguf_dequantize_row((enum gguf_type)type, &rows[at * bytes], row.data(), (size_t)n);
            for (int i = 0; i < n && !plain; i++)
                row[(size_t)i] = e4m3_to_f32(rows[at * bytes + (size_t)i]) *
                                 e8m0_to_f32(scales[at * n_scale + (size_t)(i / NGRAM_SCALE)]);
            for (int i = 0; i < n; i++)
                bad += got[(size_t)((t * HEADS + h) * n + i)] !=
                       f16_from_f32(fminf(fmaxf(row[(size_t)i] * scale, -65504.0f), 65504.0f));
        }
    expect(!bad, "rows of n-grams in %s: %d of %d values are wrong", gguf_type_info((uint32_t)type).name, bad,
           TOKENS * HEADS * n);
}

/* Gates and sums of a table of n-grams without a convolution, in batches that fit into the ring and that do not. two: the
 * last tokens are those of another timeline. */
static void run_ngram_plain(int n, int n_hc, int n_tok, int two) {
    enum { FIRST = 3, RING = 19 };
    const size_t wide = (size_t)(n * n_hc), all = wide * (size_t)n_tok;
    const float eps = 1e-6f;
    std::vector<uint16_t> norms, keys;
    for (size_t i = 0; i < all; i++)
        norms.push_back(f16_from_f32((float)normal())), keys.push_back(f16_from_f32((float)normal()));
    const std::vector<float> value = random_floats(n * n_tok, 1), weight = random_floats((int)wide, 1),
                             streams = random_floats((int)all, 1);
    std::vector<int32_t> ids;
    for (int t = 0; t < n_tok; t++) ids.push_back(100 + t);
    gpu_array<uint16_t> norms_d(norms), keys_d(keys);
    gpu_array<float> value_d(value), weight_d(weight), streams_d(streams), gates_d((size_t)(2 * n_hc * n_tok)),
        kept_d(std::vector<float>(2 * RING, -1));
    gpu_array<int32_t> ids_d(ids);
    struct batch batch = {
        n_tok, 1 + (two > 0), {{0, 0, n_tok - two, FIRST, FIRST, 0}, {1, n_tok - two, two, 0, 0, 0}}, {}};
    for (int t = n_tok - two; t < n_tok && two; t++) batch.run_of[t] = 1;
    gpu_array<struct batch> b(std::vector<struct batch>{batch});
    struct ngram_args a = {};
    a.batch = {b.p, two > 0}, a.tokens = ids_d, a.norms = norms_d, a.keys = keys_d, a.value = value_d,
    a.key_norm = weight_d;
    a.streams = streams_d, a.gates = gates_d, a.n = n, a.n_hc = n_hc, a.eps = eps;
    a.ring.kind = ROWS_RING, a.ring.n_row = RING, a.ring.row_bytes = sizeof(float), a.ring.data = (uint8_t *)kept_d.p;
    a.ring.timeline_rows = RING;
    norms_d.arrive(), keys_d.arrive(), value_d.arrive(), streams_d.arrive(), ids_d.arrive();
    LAUNCH_PDL(k_ngram_gate, dim3((unsigned)n_hc, (unsigned)n_tok), NORM_THREADS, 0, test_stream, a);
    ngram_add(&a, n_tok, test_stream);
    finish("n-grams without a convolution");
    const std::vector<float> got = streams_d.get(), kept = kept_d.get();
    double worst = 0, most = 0;
    for (int t = 0; t < n_tok; t++)
        for (int j = 0; j < n_hc; j++) {
            const size_t at = (size_t)t * wide + (size_t)(j * n);
            double squares = 0, product = 0;
            for (size_t i = 0; i < (size_t)n; i++) {
                const double k = (double)f16_to_f32(keys[at + i]);
                squares += k * k;
                product += k * (double)weight[(size_t)(j * n) + i] * (double)f16_to_f32(norms[at + i]);
            }
            product /= sqrt(squares / n + (double)eps) * sqrt(n);
            const double root = sqrt(fmax(fabs(product), 1e-6)), gate = 1 / (1 + exp(product > 0 ? -root : root));
            for (size_t i = 0; i < (size_t)n; i++) {
                const double want = (double)streams[at + i] + gate * (double)value[(size_t)(t * n) + i];
                worst = fmax(worst, fabs((double)got[at + i] - want)), most = fmax(most, fabs(want));
            }
        }
    expect(worst < 1e-5 * most, "n-grams of %d streams of %d, %d tokens: off by %.1e of %.1e", n_hc, n, n_tok, worst,
           most);
    std::vector<float> want(2 * RING, -1);
    for (int t = 0; t < n_tok; t++)
        want[(size_t)(t < n_tok - two ? (FIRST + t) % RING : RING + t - (n_tok - two))] = (float)ids[(size_t)t];
    int bad = 0;
    for (size_t i = 0; i < 2 * RING; i++) bad += kept[i] != want[i];
    expect(!bad, "the ring of n-grams, %d tokens: %d of %d ids are wrong", n_tok, bad, 2 * RING);
}

extern "C" void cuda_test_rows(void) {
    const bool fp4 = cuda_test_begin(24);
    run_stats(3900, 5, 5, 7), run_stats(40, 17, 2, 3);
    if (fp4) run_quantize(2, 16424);
    for (int type : {GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0, GGUF_MXFP4, GGUF_NVFP4}) run_ngram_rows(type, 192);
    run_ngram_rows(GGUF_FP8, 256);
    run_ngram_rows(GGUF_I8, 32), run_ngram_rows(GGUF_I8, 256);
    run_ngram_plain(1028, 3, 2, 0), run_ngram_plain(36, 4, 16, 5), run_ngram_plain(36, 4, 23, 0);
    gpu_array<float> rate(std::vector<float>{7});
    LAUNCH_PDL(k_mma_rate, 1, 512, 0, test_stream, 31, rate.p);
    finish("the rate of products");
    expect(rate.get()[0] == 7, "products of 1 have a sum below 0");
}
