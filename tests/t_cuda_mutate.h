/* Mutants of the CUDA backend, on the simulator: one instruction of the PTX that synchronizes is left out, or something
 * in it is changed, or the host makes a mistake. A test must fail, or the simulator notice. Included by test_cuda.cu. */
#include <ctime>
#include <regex>
#include <string>
#include <sys/wait.h>

extern "C" void cuda_test_forward(void); /* t_cuda.h */
extern "C" void cuda_test_operations(void);
extern "C" void cuda_test_sample(void);
extern "C" void cuda_test_synthetic(void);
extern "C" void cuda_test_stats(void);
extern "C" void cuda_test_all_reduce(void);
extern "C" void cuda_test_feed_forwards(void);
extern "C" void cuda_test_sparse(void);
extern "C" void cuda_test_parallel(void);
extern "C" void cuda_test_streams(void);
extern "C" void cuda_test_lagging(void);
extern "C" void cuda_test_expanded(void);
extern "C" void cuda_test_kda(void);
extern "C" void cuda_test_pools(void);
extern "C" void cuda_test_mamba(void);
extern "C" void cuda_test_gated_conv(void);
extern "C" void cuda_test_early_router(void);
extern "C" void cuda_test_relative(void);
extern "C" void cuda_test_results(void);
extern "C" void cuda_test_parts(void);
extern "C" void cuda_test_ngrams(void);
extern "C" void cuda_test_cached(void); /* t_cuda_experts.h */
extern "C" void cuda_test_slot_rule(void);
extern "C" void cuda_test_by_cpu(void);
extern "C" void cuda_test_from_disk(void);
extern "C" void cuda_test_read_rows(void);
extern "C" int cuda_test_failures(void);
extern "C" void cuda_test_end_at_failure(void);
extern "C" bool cuda_test_sums;

enum { LOOK_SECONDS = 60, MUTANT_SECONDS = 3600 /* of processor time */, CHANGED_NOTHING = 3 /* exit code */ };
static const struct {
    const char *name;
    void (*fn)();
} mutant_tests[] = {{"upload", cuda_test_upload},
                    {"router", cuda_test_router},
                    {"sort", cuda_test_sort},
                    {"links", cuda_test_links},
                    {"rows", cuda_test_rows},
                    {"norms", cuda_test_norms},
                    {"rotations", cuda_test_rotations},
                    {"indexer", cuda_test_indexer},
                    {"delta_net", cuda_test_delta_net},
                    {"gemv", cuda_test_gemv},
                    {"sample", cuda_test_sample},
                    {"stats", cuda_test_stats},
                    {"synthetic", cuda_test_synthetic},
                    {"slots", cuda_test_slot_rule},
                    {"cached", cuda_test_cached},
                    {"by-cpu", cuda_test_by_cpu},
                    {"from-disk", cuda_test_from_disk},
                    {"read-rows", cuda_test_read_rows},
                    {"forward", cuda_test_forward},
                    {"all-reduce", cuda_test_all_reduce},
                    {"gemm", cuda_test_gemm},
                    {"attention", cuda_test_attention},
                    {"windows", cuda_test_windows},
                    {"expanded", cuda_test_expanded},
                    {"kda", cuda_test_kda},
                    {"pools", cuda_test_pools},
                    {"mamba", cuda_test_mamba},
                    {"gated-conv", cuda_test_gated_conv},
                    {"early-router", cuda_test_early_router},
                    {"relative", cuda_test_relative},
                    {"results", cuda_test_results},
                    {"parts", cuda_test_parts},
                    {"ngrams", cuda_test_ngrams},
                    {"feed-forwards", cuda_test_feed_forwards},
                    {"sparse", cuda_test_sparse},
                    {"parallel", cuda_test_parallel},
                    {"streams", cuda_test_streams},
                    {"lagging", cuda_test_lagging},
                    {"operations", cuda_test_operations}};
enum { MUTANT_TESTS = sizeof mutant_tests / sizeof *mutant_tests };

/* ---- mistakes of the host ---- */

static int changes_made; /* kernels or launches that the mutant changed */

/* Calls f with the arguments of a launch if its kernel's name begins with `kernel`. */
template <class ARGS, class F>
static void change_if(const char *launch, const char *kernel, void *args, F f) {
    if (strncmp(launch, kernel, strlen(kernel))) return;
    f(*(ARGS *)args);
    changes_made++;
}
template <class F>
static void change_route(const char *launch, void *args, F f) {
    change_if<struct route_args>(launch, "k_route_decode", args, f);
    change_if<struct route_args>(launch, "k_route_prefill", args, f);
}
static void limit_before_silu(const char *launch, void *args) {
    auto wrong = [](struct glu &l) { l.gate_max = l.up_max; };
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [&](auto &a) { wrong(a.glu[0]), wrong(a.glu[1]); });
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [&](auto &a) { wrong(a.glu); });
}
static void limit_behind_silu(const char *launch, void *args) {
    auto wrong = [](struct glu &l) {
        l.gate_max = l.gate_max == l.up_max ? glu_silu_clamp(l.up_max).gate_max : l.gate_max;
    };
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [&](auto &a) { wrong(a.glu[0]), wrong(a.glu[1]); });
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [&](auto &a) { wrong(a.glu); });
}
static void bias_in_weights(const char *launch, void *args) {
    change_route(launch, args, [](auto &a) {
        if (a.bias) a.logit_bias = a.bias, a.bias = NULL;
    });
}
static void mixer_is_softmax(const char *launch, void *args) {
    change_route(launch, args, [](auto &a) { a.gating = a.gating == GATING_SPARSEMIXER ? GATING_SOFTMAX : a.gating; });
}
static void scales_of_half(const char *launch, void *args) {
    change_if<struct repack>(launch, "k_repack", args, [](auto &a) { a.factor *= a.type == GGUF_FP8 ? 0.5f : 1; });
}
static void softmax_over_all(const char *launch, void *args) {
    change_route(launch, args, [](auto &a) {
        if (a.gating == GATING_CHOSEN) a.gating = GATING_SOFTMAX, a.norm = false;
    });
}

template <class F>
static void change_attention(const char *launch, void *args, F f) {
    for (const char *kernel : {"attn_gqa_", "attn_mla_kernel", "attn_merge"})
        change_if<struct attn_args>(launch, kernel, args, f);
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
/* n floats that kernels can read, of a mutant: never freed. */
static float *changed_floats(size_t n) {
    float *p = NULL;
    must(cudaMallocHost((void **)&p, n * sizeof *p), "memory of a mutant");
    return p;
}
template <class F>
static void change_sinks(const char *launch, void *args, F sink) {
    change_attention(launch, args, [&](auto &a) {
        if (!a.sinks) return;
        float *changed = changed_floats((size_t)a.n_head);
        for (int h = 0; h < a.n_head; h++) changed[h] = sink(a, a.sinks[h]);
        a.sinks = changed, a.sink_stride = 0;
    });
}
static void sinks_by_split(const char *launch, void *args) { /* as many are one of an exponential times that */
    change_sinks(launch, args, [](const attn_args &a, float x) { return x + logf((float)a.max_splits); });
}
static void scaled_sinks(const char *launch, void *args) {
    change_sinks(launch, args, [](const attn_args &a, float x) { return x * a.scale; });
}
static void rings_read_on(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.k.kind = a.v.kind = ROWS_TOKENS; });
}
static void rings_written_on(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.rope.kp.kind = a.rope.vp.kind = ROWS_TOKENS; });
}
static void other_halves(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.rope.pairs = !a.rope.pairs; });
}
static void decode_level(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.rope.temp_scale = 0; });
}
static void prefill_level(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_", args, [](auto &a) { a.temp_scale = 0; });
}
static void latents_level(const char *launch, void *args) {
    change_if<struct mla_query_args>(launch, "k_mla_query", args, [](auto &a) { a.rope.temp_scale = 0; });
}
static void grown_early(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.rope.temp_length = max(1, a.rope.temp_length - 1); });
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
    change_if<struct index_args>(launch, "k_index_", args, f);
}
static void other_pairs(const char *launch, void *args) {
    change_index(launch, args, [](index_args &a) { a.rope.pairs = !a.rope.pairs; });
}
static void head_dropped(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_scores", args, [](auto &a) { a.rope.n_head--; });
}
static void choice_off_by_one(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.chosen += a.top_k > 0; });
}

static void other_list(const char *launch, void *args) {
    change_attention(launch, args, [](auto &a) { a.chosen += a.top_k && a.n_head_kv > 1 ? a.n_topk : 0; });
}
static void local_dropped(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_choose", args, [](auto &a) { a.local = 0; });
}
static void queries_not_normed(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_store", args, [](auto &a) { a.rope.q_norm = NULL; });
}

template <class F>
static void change_hc(const char *launch, void *args, F f) {
    change_if<struct hc_args>(launch, "k_hc_mix", args, f);
}
template <class F>
static void change_csa(const char *launch, void *args, F f) {
    change_attention(launch, args, [&](auto &a) {
        if (a.one_kv) f(a);
    });
}
static void streams_exchanged(const char *launch, void *args) {
    change_hc(launch, args, [](auto &a) {
        const size_t n = (size_t)a.n, rows = (size_t)a.n_row * GPU_HC;
        if (!a.fn) return;
        float *fn = changed_floats(rows * n);
        for (size_t i = 0; i < rows; i++) memcpy(&fn[i * n], a.fn + (i < 2 ? i ^ 1 : i) * n, n * sizeof(float));
        a.fn = fn;
    });
}
static void next_coefficients(const char *launch, void *args) {
    change_hc(launch, args, [](auto &a) { a.mix += a.partial != NULL; });
}
static void shared_window_longer(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.window++; });
}
static void shared_window_shorter(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.window--; });
}
static void shared_sinks_missing(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.sinks = NULL; });
}
static void not_rotated_back(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.rope.rope = 0; });
}
static void key_seen_early(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.compress_ratio -= a.compress_ratio == 128; });
}
static void shared_choice_off_by_one(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.chosen += a.top_k > 0; });
}
static void change_compressors(const char *launch, void *args, void (*f)(struct compress_args &c)) {
    change_if<struct csa_args>(launch, "k_csa_store", args, [&](auto &a) {
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
    change_if<struct csa_args>(launch, "k_csa_store", args, [](auto &a) { a.round = ROUNDS_NOTHING; });
}
static void table_of_another_layer(const char *launch, void *args) {
    static const int32_t *last;
    change_route(launch, args, [](auto &a) {
        const int32_t *own = a.given;
        if (own && last) a.given = last;
        if (own) last = own;
    });
}

/* Mistakes about experts in host memory. */
static void counts_halve_later(const char *launch, void *args) {
    change_if<struct route_args>(launch, "k_route_decode", args, [](auto &a) { a.cache.shift += a.cache.n_slot > 0; });
}
static void slots_overlook_one(const char *launch, void *args) {
    change_if<struct route_args>(launch, "k_route_decode", args, [](auto &a) { a.cache.n_slot -= a.cache.n_slot > 0; });
}
static void fetches_all_but_one(const char *launch, void *args) {
    change_if<struct fetch_args>(launch, "k_fetch", args, [](auto &a) { a.most--; });
}
static void fetches_other_columns(const char *launch, void *args) {
    change_if<struct fetch_args>(launch, "k_fetch", args, [](auto &a) { a.m[0].home += a.m[0].part_bytes / 2; });
}
static void fetches_without_down(const char *launch, void *args) {
    change_if<struct fetch_args>(launch, "k_fetch", args, [](auto &a) { a.n_matrix = min(a.n_matrix, 2); });
}
static void wants_one_less(const char *launch, void *args) {
    change_if<struct want_args>(launch, "k_want_experts", args, [](auto &a) { a.most -= a.most > 1; });
}
static void wants_of_first_wave(const char *launch, void *args) {
    change_if<struct want_args>(launch, "k_want_experts", args, [](auto &a) { a.first = 0; });
}
static void wants_down_first(const char *launch, void *args) {
    change_if<struct want_args>(launch, "k_want_experts", args, [](auto &a) {
        if (a.n_matrix == 1) a.matrix = FFN_GATE;
    });
}
static void fetches_as_from_memory(const char *launch, void *args) {
    change_if<struct fetch_args>(launch, "k_fetch", args, [](auto &a) { a.brought += a.n_matrix; });
}
static void waves_in_one_place(const char *launch, void *args) {
    change_if<struct wave_args>(launch, "k_wave_list", args, [](auto &a) { a.n_ring++; });
}
static void waves_one_short(const char *launch, void *args) {
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [](auto &a) { a.n_place -= a.place != NULL; });
}

static void copies_without_waiting(const char *launch, void *args) {
    change_if<struct wave_args>(launch, "k_wave_list", args, [](auto &) { sim_lose_waits(); });
}
static void asks_for_other_tokens(const char *launch, void *args) {
    change_if<struct ask_args>(launch, "k_ask_experts", args, [](auto &a) { a.from += 8; });
}
static void asks_of_other_layer(const char *launch, void *args) {
    change_if<struct ask_args>(launch, "k_ask_experts", args, [](auto &a) { a.layer ^= 1; });
}
static void answer_in_place_of_shared(const char *launch, void *args) {
    change_if<struct ask_args>(launch, "k_add_experts", args, [](auto &a) { a.first = true; });
}
static void answer_of_one_token(const char *launch, void *args) {
    change_if<struct ask_args>(launch, "k_add_experts", args, [](auto &a) { a.y -= a.n_tok > 1 ? a.n_embd : 0; });
}

/* Mistakes about several timelines: a cache tensor has the rows of the first one, or the batch is one run. */
template <class F>
static void change_several(const char *launch, void *args, F f) {
    change_attention(launch, args, [&](auto &a) {
        if (a.batch.several) f(a);
    });
}
static void keys_of_first(const char *launch, void *args) {
    change_several(launch, args, [](auto &a) { a.k.timeline_rows = 0; });
}
static void values_of_first(const char *launch, void *args) {
    change_several(launch, args, [](auto &a) { a.v.timeline_rows = 0; });
}
static void keys_to_first(const char *launch, void *args) {
    change_several(launch, args, [](auto &a) { a.rope.kp.timeline_rows = 0; });
}
static void values_to_first(const char *launch, void *args) {
    change_several(launch, args, [](auto &a) { a.rope.vp.timeline_rows = 0; });
}
static void compressed_of_first(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.v.timeline_rows = 0; });
}
static void window_of_first(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.k.timeline_rows = 0; });
}
static void window_to_first(const char *launch, void *args) {
    change_if<struct csa_args>(launch, "k_csa_store", args, [](auto &a) { a.rope.kp.timeline_rows = 0; });
}
static void latents_to_first(const char *launch, void *args) {
    change_if<struct mla_query_args>(launch, "k_mla_query", args, [](auto &a) { a.rope.kp.timeline_rows = 0; });
}
static void compressors_of_first(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) { c.ring.timeline_rows = 0; });
}
static void compressed_to_first(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) { c.keys.timeline_rows = 0; });
}
static void indexer_of_first(const char *launch, void *args) {
    for (const char *kernel : {"k_index_scores", "k_index_blocks"})
        change_if<struct index_args>(launch, kernel, args, [](auto &a) { a.rope.kp.timeline_rows = 0; });
}
static void indexer_to_first(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_store", args, [](auto &a) { a.rope.kp.timeline_rows = 0; });
}
static void choice_of_first(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_choose", args, [](auto &a) { a.rope.batch.several = false; });
}
static void rings_of_first(const char *launch, void *args) {
    change_if<struct delta_args>(launch, "k_delta_decode", args, [](auto &a) { a.ring_rows = 0; });
}
static void states_of_first(const char *launch, void *args) {
    change_if<struct delta_args>(launch, "k_delta_decode", args, [](auto &a) { a.state_stride = 0; });
}
static void blocks_tap_of_next(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.taps = a.taps ? a.taps + 1 : NULL; });
}
static void blocks_added_before(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.to -= a.conv.x && a.to > 1; });
}
static void blocks_never_begin(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.begins = false; });
}
static void blocks_begin_always(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.begins |= a.conv.x != NULL; });
}
static void blocks_not_moved(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.moved = 0; });
}
static void blocks_read_one_fewer(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.n_row -= a.n_row > 1; });
}
static void blocks_read_by_first(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.n_read = min(a.n_read, 1); });
}
static void blocks_ring_not_kept(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.keep = false; });
}
static void blocks_ring_of_first(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.conv.ring.n_row -= a.conv.x ? 1 : 0; });
}
static void blocks_message_query(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args,
                                 [](auto &a) { a.message_query = a.messages && a.query ? a.query : a.message_query; });
}
static void blocks_fewer_messages(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.n_message -= a.n_message > 1; });
}
static void blocks_fewer_taps(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.conv.n_conv -= a.conv.n_conv > 1; });
}
static void blocks_norm_of_first(const char *launch, void *args) {
    change_if<struct block_args>(launch, "k_blocks", args, [](auto &a) { a.norm[1] = a.norm[2] = a.norm[0]; });
}
template <class F>
static void change_plain(const char *launch, void *args, F f) {
    change_if<struct block_args>(launch, "k_blocks", args, [&](auto &a) {
        if (a.plain) f(a);
    });
}
static void blocks_read_normed(const char *launch, void *args) {
    change_plain(launch, args, [](auto &a) { a.plain = false; });
}
static void blocks_fixed_eps(const char *launch, void *args) {
    change_plain(launch, args, [](auto &a) { a.row_eps = 1e-6f; });
}
static void blocks_small_scores(const char *launch, void *args) {
    change_plain(launch, args, [](auto &a) { a.score_by = sqrtf((float)a.n); });
}
static void blocks_without_results(const char *launch, void *args) {
    change_plain(launch, args, [](auto &a) { a.conv.x = NULL; });
}
/* Mistakes about the norm of a sum of experts in a latent space, which has 64 values in kimi_k3. */
static void latent_weights_of_next(const char *launch, void *args) {
    change_if<struct norm_args>(launch, "k_add_norm", args, [](auto &a) { a.weight += a.weight && a.n == 64; });
}
static void latent_norm_of_one_less(const char *launch, void *args) {
    change_if<struct norm_args>(launch, "k_add_norm", args, [](auto &a) { a.n_tok -= a.n == 64 && a.n_tok > 1; });
}
static void latent_other_eps(const char *launch, void *args) {
    change_if<struct norm_args>(launch, "k_add_norm", args, [](auto &a) { a.eps *= a.n == 64 ? 1e4f : 1; });
}
static void latent_rows_shorter(const char *launch, void *args) {
    change_if<struct down_args>(launch, "k_gemv_down", args, [](auto &a) { a.hidden_stride -= a.jobs.weight ? 0 : 8; });
}
static void message_swapped(const char *launch, void *args) {
    change_if<struct message_args>(launch, "k_mix_message", args, [](auto &a) { std::swap(a.forget, a.gain); });
}
static void message_factors(const char *launch, void *args) {
    change_if<struct message_args>(launch, "k_mix_message", args, [](auto &a) { a.factors++; });
}
static void message_other(const char *launch, void *args) {
    change_if<struct message_args>(launch, "k_mix_message", args, [](auto &a) { a.pair += a.n / 2; });
}
static void wrong_growth(struct rope_args &a) { a.temp_length += a.temp_length / 2 + 1; }
static void decode_other_growth(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_decode", args, [](auto &a) { wrong_growth(a.rope); });
}
static void prefill_other_growth(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_gqa", args, wrong_growth);
}
static void latent_decode_other_growth(const char *launch, void *args) {
    change_if<struct mla_query_args>(launch, "k_mla_query", args, [](auto &a) { wrong_growth(a.rope); });
}
static void latent_prefill_other_growth(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_mla", args, wrong_growth);
}
static void decode_late_growth(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_decode", args, [](auto &a) { a.rope.temp_early = 0; });
}
static void prefill_late_growth(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_gqa", args, [](auto &a) { a.temp_early = 0; });
}
static void decode_without_chunks(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_decode", args, [](auto &a) { a.chunked = false; });
}
static void prefill_without_chunks(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_prefill", args, [](auto &a) { a.chunked = false; });
}
static void inputs_not_weighted(const char *launch, void *args) {
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [](auto &a) { a.weighs_input = false; });
}
static void identity_is_mixed(const char *launch, void *args) {
    change_if<struct hc_args>(launch, "k_hc_norm", args, [](auto &a) { a.n_sinkhorn += !a.n_sinkhorn; });
}
static void results_written_twofold(const char *launch, void *args) {
    change_if<struct hc_args>(launch, "k_hc_norm", args, [](auto &a) { a.hc_write = 2; });
}
static void index_rotates_first(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_store", args, [](auto &a) { a.turned = 0; });
}
static void latents_without_sinks_in_decode(const char *launch, void *args) {
    change_if<struct mla_value_args>(launch, "k_mla_value", args, [](auto &a) { a.attn.sinks = NULL; });
}
static void latents_without_sinks(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_mla_kernel", args, [](auto &a) { a.sinks = NULL; });
    change_if<struct attn_args>(launch, "attn_merge", args, [](auto &a) { a.sinks = NULL; });
}
static void raw_shared_key_in_decode(const char *launch, void *args) {
    change_if<struct mla_query_args>(launch, "k_mla_query", args, [](auto &a) { a.rope.shared_norm = NULL; });
}
static void raw_shared_key(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_mla", args, [](auto &a) { a.shared_norm = NULL; });
}
static void longer_latent_window(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_mla_kernel", args, [](auto &a) { a.window += a.window > 0; });
}
static void windows_joined_as_contexts(const char *launch, void *args) {
    change_if<struct mla_value_args>(launch, "k_mla_value", args, [](auto &a) { a.attn.window = 0; });
}
static void norms_without_biases(const char *launch, void *args) {
    change_if<struct norm_args>(launch, "k_add_norm", args, [](auto &a) { a.bias = NULL; });
}
static void rel_no_temperature(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args, [](auto &a) { a.shape.temp_scale = 0; });
}
static void rel_clip_swapped(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args,
                               [](auto &a) { std::swap(a.shape.qk_clip, a.shape.rel_clip); });
}
static void rel_values_as_keys(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args, [](auto &a) { a.taps[1] = a.taps[0]; });
}
static void rel_own_of_keys(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args, [](auto &a) { a.own[1] = a.own[0]; });
}
static void rel_own_of_next(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args, [](auto &a) { a.own[0] += a.shape.window ? 0 : 1; });
}
static void rel_ring_not_kept(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args, [](auto &a) { a.keep = false; });
}
static void rel_ring_shorter(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args, [](auto &a) { a.conv[0].ring.n_row--; });
}
static void rel_window_taps(const char *launch, void *args) {
    change_if<struct rel_args>(launch, "k_rel_prepare", args,
                               [](auto &a) { a.conv[0].n_conv -= a.conv[0].n_conv > 1; });
}
static void keep_one_fewer(const char *launch, void *args) {
    change_if<struct keep_conv_args>(launch, "k_keep_conv", args, [](auto &a) { a.first++; });
}
static void bias_shorter(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_", args, [](auto &a) { a.extent -= a.rel ? 1 : 0; });
}
static void bias_of_next(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_", args, [](auto &a) { a.bank += a.rel ? 1 : 0; });
}
static void bias_of_fewer(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_", args, [](auto &a) { a.n_rel -= a.rel ? 2 : 0; });
}
static void bias_sinks_of_first(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_", args, [](auto &a) { a.sink_stride = 0; });
}

template <class F>
static void change_result(const char *launch, void *args, F f) {
    change_if<struct result_args>(launch, "k_add_result", args, f);
}
static void result_weights_of_next(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.result += 4; });
}
static void result_weights_of_read(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.result = a.weight ? a.weight : a.result; });
}
static void result_of_half_before(const char *launch, void *args) {
    static const float *last;
    change_result(launch, args, [](auto &a) {
        const float *own = a.result;
        if (last) a.result = last;
        last = own;
    });
}
static void result_read_by_its_weights(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.weight = a.weight ? a.result : NULL; });
}
static void result_not_read(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.weight = NULL; });
}
static void result_other_eps(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.eps *= 0.5f; });
}
static void result_shorter(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.n -= 4; });
}
static void result_replaces(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.x = (float *)a.partial; });
}
static void result_of_residual(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.partial = a.x; });
}
static void result_norm_in_one_format(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.h32 = a.x; });
}

/* Mistakes about feed-forwards in parts, and about the heads of such models. */
static void parts_weights_exchanged(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) {
        if (a.more) std::swap(a.part[0], a.part[1]);
    });
}
static void parts_dense_alone(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.more = NULL; });
}
static void parts_experts_alone(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) {
        if (a.more) a.partial = a.more, a.more = NULL;
    });
}
static void parts_dense_twice(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.more = a.more ? a.partial : NULL; });
}
static void layer_not_scaled(const char *launch, void *args) {
    change_result(launch, args, [](auto &a) { a.scale = NULL; });
}
static void router_reads_as_experts(const char *launch, void *args) {
    change_if<struct norm_args>(launch, "k_add_norm", args, [](auto &a) { a.weight32 = NULL; });
}
static void router_norms_as_experts(const char *launch, void *args) {
    change_if<struct route_args>(launch, "k_route_decode", args, [](auto &a) {
        a.input.weight = a.input.weight16 ? a.input.weight16 : a.input.weight;
    });
}
static void experts_read_as_router(const char *launch, void *args) {
    change_if<struct route_args>(launch, "k_route_decode", args, [](auto &a) { a.input.weight16 = NULL; });
}
static void experts_not_scaled(const char *launch, void *args) {
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [](auto &a) { a.down_scale = NULL; });
}
static void decode_by_silu(const char *launch, void *args) {
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [](auto &a) { a.glu[0].gelu = false; });
}
static void prefill_by_silu(const char *launch, void *args) {
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [](auto &a) { a.glu.gelu = false; });
}
static void decode_values_not_normed(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_decode", args, [](auto &a) { a.rope.v_norm = false; });
}
static void prefill_values_not_normed(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_gqa", args, [](auto &a) { a.v_norm = false; });
}
static void values_of_another_slot(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_gqa", args, [](auto &a) { a.v = a.d > HEAD_MAX ? a.q : a.v; });
}
static void wide_keys_as_values(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_mla_kernel", args, [](auto &a) { a.v = a.k; });
}
static void wide_scores_divided(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_mla_kernel", args, [](auto &a) { a.scale = 1 / sqrtf((float)a.dk); });
}
static void wide_splits_not_joined(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_mla_kernel", args, [](auto &a) { a.arrived = NULL; });
}

template <class F>
static void change_streams(const char *launch, void *args, F f) {
    change_if<struct stream_args>(launch, "k_streams_norm", args, f);
}
static void streams_of_next(const char *launch, void *args) {
    change_streams(launch, args, [](auto &a) { a.mix += a.partial ? 1 : 0; });
}
static void streams_without_result(const char *launch, void *args) {
    change_streams(launch, args, [](auto &a) { a.partial = NULL; });
}
static void streams_not_joined(const char *launch, void *args) {
    change_streams(launch, args, [](auto &a) { a.joined = NULL; });
}
static void streams_weights_shifted(const char *launch, void *args) {
    change_streams(launch, args, [](auto &a) { a.weight += a.weight ? 4 : 0; });
}
static void streams_counted_twice(const char *launch, void *args) {
    change_if<struct halves_args>(launch, "k_to_halves", args, [](auto &a) { a.factor = a.factor != 0 ? 1 : 0; });
}
static void streams_not_squashed(const char *launch, void *args) {
    change_if<struct halves_args>(launch, "k_to_halves", args, [](auto &a) { a.factor = 0; });
}
static void streams_one_fewer(const char *launch, void *args) {
    change_if<struct read_args>(launch, "k_streams_read", args, [](auto &a) { a.n_hc--; });
}
static void streams_by_norms(const char *launch, void *args) {
    change_if<struct read_args>(launch, "k_streams_read", args, [](auto &a) { a.up = a.norms; });
}
template <class F>
static void change_ngrams(const char *launch, const char *kernel, void *args, F f) {
    change_if<struct ngram_args>(launch, kernel, args, f);
}
static void ngrams_never_end(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.table.eos++; });
}
static void ngrams_multiplied_alike(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.table.multiplier[1] = a.table.multiplier[0]; });
}
static void ngrams_of_more(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.table.per_size++; });
}
static void ngrams_of_first_head(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) {
        for (int i = 1; i < a.table.n_head; i++) a.table.offset[i] = 0;
    });
}
static void ngrams_divided_alike(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) {
        for (int i = 1; i < a.table.n_head; i++) a.table.n_row[i] = a.table.n_row[0];
        ngram_divide(&a);
    });
}
static void ngrams_of_next_token(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.tokens++; });
}
static void ngrams_ids_of_other_row(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.ring.n_row--; });
}
static void ngrams_scaled(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.scale *= 2; });
}
static void ngrams_key_weights(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_gate", args, [](auto &a) { a.key_norm = a.conv_norm; });
}
static void ngrams_gates_of_norms(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_gate", args, [](auto &a) { a.keys = a.norms; });
}
static void ngrams_gates_of_values(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_gate", args, [](auto &a) { a.value += 4; });
}
static void ngrams_of_neighbors(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.table.size--; });
}
static void ngrams_fewer_taps(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.table.n_conv -= a.table.n_conv > 1; });
}
static void ngrams_other_factors(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.gates += a.n_hc; });
}
static void ngrams_conv_weights(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.conv_norm = a.key_norm; });
}
static void ngrams_ring_not_kept(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.keep = a.add ? INT_MAX : a.keep; });
}
static void ngrams_ring_one_fewer(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.keep += !a.add; });
}
static void ngrams_ring_shorter(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.ring.n_row--; });
}
static void ngrams_of_tokens_themselves(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.table.id = NULL; });
}
static void ngrams_always_end(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.table.ends = true; });
}
static void ngrams_padded_otherwise(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.table.eos += a.table.id != NULL; });
}
static void ngrams_scales_of_next(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) {
        if (a.table.scales.data) a.table.scales.data += a.table.scales.row_bytes;
    });
}
static void plain_ring_not_kept(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.keep = INT_MAX; });
}
static void plain_ring_one_fewer(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.keep++; });
}
static void plain_ring_shorter(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.ring.n_row--; });
}
static void plain_other_factors(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.gates += a.n_hc; });
}
static void plain_ids_of_next(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_add", args, [](auto &a) { a.tokens++; });
}
static void want_rows_of_next_token(const char *launch, void *args) {
    change_ngrams(launch, "k_want_rows", args, [](auto &a) { a.tokens++; });
}
static void want_rows_shifted(const char *launch, void *args) {
    change_ngrams(launch, "k_want_rows", args, [](auto &a) { a.asked++; });
}
static void want_no_rows(const char *launch, void *args) {
    change_ngrams(launch, "k_want_rows", args, [](auto &a) { a.n_asked = a.asked + 1; });
}
static void rows_by_their_numbers(const char *launch, void *args) {
    change_ngrams(launch, "k_ngram_rows", args, [](auto &a) { a.question = NULL; });
}
template <class F>
static void change_means(const char *launch, void *args, F f) {
    change_if<struct index_args>(launch, "k_index_store", args, f);
}
static void means_not_kept(const char *launch, void *args) {
    change_means(launch, args, [](auto &a) { a.keep = false; });
}
static void means_ring_shorter(const char *launch, void *args) {
    change_means(launch, args, [](auto &a) { a.ring.n_row--; });
}
static void means_of_fewer(const char *launch, void *args) {
    change_means(launch, args, [](auto &a) { a.together = divisor_of(a.together.n - 1); });
}
static void means_rotated_longer(const char *launch, void *args) {
    change_means(launch, args, [](auto &a) { a.table.factor *= 2; });
}
static void means_without_norm(const char *launch, void *args) {
    change_means(launch, args, [](auto &a) { a.rope.k_norm = NULL; });
}
static void means_weighed(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_scores", args, [](auto &a) { a.rope.n_head--; });
}
static void means_one_fewer(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_choose", args, [](auto &a) { a.n_chosen--; });
}
static void means_chosen_early(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_choose", args,
                                 [](auto &a) { a.together = divisor_of(a.together.n - 1); });
}
static void means_divided_lower(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_", args, [](auto &a) { a.together.inverse--; });
}
static void blocks_divided_lower(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_", args, [](auto &a) { a.block.inverse--; });
}
static void blocks_shorter(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_", args, [](auto &a) {
        if (a.top_k) a.block = divisor_of(a.block.n - 1);
    });
}
static void means_by_next_token(const char *launch, void *args) {
    change_if<struct attn_args>(launch, "attn_gqa_", args, [](auto &a) { a.chosen += a.chosen ? a.n_topk : 0; });
}

/* Kernels believe that a convolution has taps of the model where it has zeros. */
static void taps_of(const char *launch, const char *kernel, void *args) {
    change_if<struct delta_args>(launch, kernel, args, [](auto &a) { a.shape.n_conv = DELTA_TAPS; });
}
static void taps_before_decode(const char *launch, void *args) { taps_of(launch, "k_delta_decode", args); }
static void taps_before_prefill(const char *launch, void *args) { taps_of(launch, "k_delta_mix", args); }
static void taps_before_scan(const char *launch, void *args) { taps_of(launch, "k_mamba_scan", args); }
static void taps_one_fewer(const char *launch, void *args) {
    change_if<struct delta_args>(launch, "k_delta_", args, [](auto &a) { a.shape.n_conv--; });
}

static void decode_without_relu(const char *launch, void *args) {
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [](auto &a) { a.glu[0].relu = false; });
}
static void prefill_without_relu(const char *launch, void *args) {
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [](auto &a) { a.glu.relu = false; });
}

template <class F>
static void change_gated(const char *launch, void *args, F f) {
    change_if<struct gated_conv_args>(launch, "k_gated_conv", args, f);
}
static void gated_taps_of_next(const char *launch, void *args) {
    change_gated(launch, args, [](auto &a) { a.taps += DELTA_TAPS; });
}
static void gated_tap_fewer(const char *launch, void *args) {
    change_gated(launch, args, [](auto &a) { a.conv.n_conv--; });
}
static void gates_exchanged(const char *launch, void *args) {
    change_gated(launch, args, [](auto &a) { std::swap(a.before, a.after); });
}
static void gated_not_kept(const char *launch, void *args) {
    change_gated(launch, args, [](auto &a) { a.keep = a.convolves ? INT_MAX : a.keep; });
}
static void gated_kept_fewer(const char *launch, void *args) {
    change_gated(launch, args, [](auto &a) { a.keep += !a.convolves; });
}
static void gated_ring_shorter(const char *launch, void *args) {
    change_gated(launch, args, [](auto &a) { a.conv.ring.n_row--; });
}
static void gated_rings_of_first(const char *launch, void *args) {
    change_gated(launch, args, [](auto &a) { a.conv.ring.timeline_rows = 0; });
}

template <class F>
static void change_mamba(const char *launch, void *args, F f) {
    change_if<struct delta_args>(launch, "k_mamba_scan", args, f);
}
static void mamba_rings_of_first(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.ring_rows = 0; });
}
static void mamba_rings_to_first(const char *launch, void *args) {
    change_if<struct delta_args>(launch, "k_mamba_finish", args, [](auto &a) { a.ring_rows = 0; });
}
static void mamba_states_of_first(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.state_stride = 0; });
}
static void taps_exchanged(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { std::swap(a.before[0], a.before[1]); });
}
static void convolution_without_bias(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) {
        const size_t n = (size_t)(a.before[0] + a.shape.whole_key * a.shape.head_k);
        float *none = changed_floats(n);
        memset(none, 0, n * sizeof *none);
        a.conv_bias = none;
    });
}
static void skip_is_decay(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.skip = a.decay; });
}
static void biases_are_skips(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.dt_bias = a.skip; });
}
static void decays_are_biases(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.decay = a.dt_bias; });
}
static void mamba_ring_shorter(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.n_ring--; });
}
static void heads_in_turn(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.shape.tiled = true; });
}
static void gates_of_next(const char *launch, void *args) {
    change_mamba(launch, args, [](auto &a) { a.z++; });
}
static void other_eps(const char *launch, void *args) {
    change_if<struct delta_args>(launch, "k_mamba_finish", args, [](auto &a) { a.eps = 1; });
}
static void norm_of_next(const char *launch, void *args) {
    change_if<struct delta_args>(launch, "k_mamba_finish", args, [](auto &a) { a.norm++; });
}

/* Mistakes about the tiles of a prefill. */
template <class F>
static void change_tiles(const char *launch, const char *kernel, void *args, F f) {
    change_if<struct delta_args>(launch, kernel, args, f);
}
static void mix_taps_exchanged(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { std::swap(a.before[0], a.before[1]); });
}
static void mix_other_biases(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { a.conv_bias++; });
}
static void mix_other_steps(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { a.dt_bias = a.skip; });
}
static void mix_decays_of_biases(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { a.decay = a.dt_bias; });
}
static void mix_row_short(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { a.n_row -= a.n_row > 1; });
}
static void mix_first_segment(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { a.first = 0; });
}
static void mix_ring_shorter(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { a.n_ring--; });
}
static void mix_betas_of_next(const char *launch, void *args) {
    change_tiles(launch, "k_delta_mix", args, [](auto &a) { a.beta++; });
}
static void prepare_all_taken(const char *launch, void *args) {
    for (const char *kernel : {"k_kda_prepare", "k_mamba_prepare"})
        change_tiles(launch, kernel, args, [](auto &a) { a.n_row_all++; });
}
static void prepare_scales_of_next(const char *launch, void *args) {
    change_tiles(launch, "k_mamba_prepare", args, [](auto &a) { a.t.gates++; });
}
static void scan_groups_in_turn(const char *launch, void *args) {
    change_tiles(launch, "k_delta_scan", args, [](auto &a) { a.shape.tiled = true; });
}
static void scan_other_skip(const char *launch, void *args) {
    change_tiles(launch, "k_delta_scan", args, [](auto &a) { a.skip = a.decay; });
}
static void scan_gates_of_first(const char *launch, void *args) {
    change_tiles(launch, "k_delta_scan", args, [](auto &a) { a.z -= a.first * (int)a.z_stride; });
}
static void scan_one_tile(const char *launch, void *args) {
    change_tiles(launch, "k_delta_scan", args, [](auto &a) { a.n_row = min(a.n_row, (int)DELTA_TILE); });
}
static void scan_factors_of_next(const char *launch, void *args) {
    change_tiles(launch, "k_delta_scan", args, [](auto &a) { a.t.fades++; });
}
static void scan_keys_of_next(const char *launch, void *args) {
    change_tiles(launch, "k_delta_scan", args, [](auto &a) { a.t.qk += 8; });
}
static void lag_with_own_rows(const char *launch, void *args) {
    change_tiles(launch, "k_mamba_scan", args, [](auto &a) { a.n_own += !a.n_own; });
}
static void lag_left_out(const char *launch, void *args) {
    for (const char *kernel : {"k_delta_decode", "k_mamba_scan"})
        change_tiles(launch, kernel, args, [](auto &a) {
            if (a.n_own > 1) return;
            float *none = changed_floats((size_t)(a.shape.n_value * a.shape.head_k * a.shape.head_v));
            a.state = none; /* another state gets the rows */
        });
}
static void prepare_bound(const char *launch, void *args) {
    change_tiles(launch, "k_kda_prepare", args, [](auto &a) { a.shape.bound = a.shape.bound < 0 ? 0 : -5; });
}
static void prepare_decays_of_next_row(const char *launch, void *args) {
    change_tiles(launch, "k_kda_prepare", args, [](auto &a) { a.alpha++; });
}
static void prepare_offsets_of_next_row(const char *launch, void *args) {
    change_tiles(launch, "k_kda_prepare", args, [](auto &a) { a.dt_bias++; });
}
static void prepare_rates_of_next_head(const char *launch, void *args) {
    change_tiles(launch, "k_kda_prepare", args, [](auto &a) { a.decay++; });
}
static void prepare_first_segment(const char *launch, void *args) {
    change_tiles(launch, "k_kda_prepare", args, [](auto &a) { a.alpha -= a.first * (int)a.alpha_stride; });
}
static void prepare_row_short(const char *launch, void *args) {
    for (const char *kernel : {"k_kda_prepare", "k_mamba_prepare"})
        change_tiles(launch, kernel, args, [](auto &a) { a.n_row--; });
}
static void finish_gates_of_next(const char *launch, void *args) {
    change_tiles(launch, "k_delta_finish", args, [](auto &a) { a.z++; });
}
static void finish_ring_shorter(const char *launch, void *args) {
    change_tiles(launch, "k_delta_finish", args, [](auto &a) { a.n_ring--; });
}
static void not_squared(const char *launch, void *args) {
    change_if<struct gemm_args>(launch, "gemm_kernel", args, [](auto &a) { a.square = 0; });
}
static void gated_by_itself(const char *launch, void *args) {
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [](auto &a) {
        for (int i = 0; i < a.n_entry; i++) a.gate[i] = a.up[i];
    });
}
static void one_more_zero(const char *launch, void *args) {
    change_route(launch, args, [](auto &a) { a.n_zero += a.n_zero > 0; });
}
static void latents_not_read(const char *launch, void *args) {
    change_if<struct glu_args>(launch, "k_gemv_glu", args, [](auto &a) {
        if (a.n_entry > 1) a.x[0] = a.x[1], a.x_stride[0] = a.x_stride[1];
    });
}
static void latents_of_one_less(const char *launch, void *args) {
    change_if<struct down_args>(launch, "k_gemv_down", args, [](auto &a) { a.jobs.job -= !a.jobs.weight; });
}
static void hidden_of_first(const char *launch, void *args) {
    change_if<struct mtp_input_args>(launch, "k_mtp_input", args, [](auto &a) { a.ring.timeline_rows = 0; });
}
static void hidden_normed_by_stream(const char *launch, void *args) {
    change_if<struct mtp_input_args>(launch, "k_mtp_input", args, [](auto &a) { a.whole = false; });
}
static void hidden_to_first(const char *launch, void *args) {
    change_if<struct keep_hidden_args>(launch, "k_keep_hidden", args, [](auto &a) { a.ring.timeline_rows = 0; });
}
static void hidden_lost(const char *launch, void *args) {
    change_if<struct keep_hidden_args>(launch, "k_keep_hidden", args, [](auto &a) { a.also_from = INT_MAX; });
}
static void stem_longer(const char *launch, void *args) {
    change_several(launch, args, [](auto &a) {
        if (!a.one_kv) a.k.stem_rows += a.k.stem_rows > 0;
    });
}
static void compressed_stem_longer(const char *launch, void *args) {
    change_csa(launch, args, [](auto &a) { a.v.stem_rows += a.v.stem_rows > 0; });
}
static void indexer_without_stem(const char *launch, void *args) {
    for (const char *kernel : {"k_index_scores", "k_index_blocks"})
        change_if<struct index_args>(launch, kernel, args, [](auto &a) {
            a.rope.kp.timeline_rows += a.rope.kp.stem_rows;
            a.rope.kp.stem_rows = 0;
        });
}
static void joins_of_first(const char *launch, void *args) {
    change_if<struct mla_value_args>(launch, "k_mla_value", args, [](auto &a) { a.attn.batch.several = false; });
}

/* Mistakes about Kimi delta attention. */
static void change_kda(const char *launch, void *args, void (*f)(struct delta_args &a)) {
    change_if<struct delta_args>(launch, "k_delta_decode", args, f);
}
static void decays_without_bound(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.shape.bound = 0; });
}
static void decays_with_bound(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.shape.bound = a.shape.bound < 0 ? a.shape.bound : -5; });
}
static void decays_of_next_row(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.alpha++; });
}
static void offsets_of_next_row(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.dt_bias++; });
}
static void rates_of_next_head(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.decay++; });
}
static void betas_of_next_head(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.beta++; });
}
static void kept_decays_of_next_row(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.ring_gates -= a.batch.several ? 0 : 1; });
}
static void gates_of_next_value(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.z++; });
}
static void ring_too_short(const char *launch, void *args) {
    change_kda(launch, args, [](auto &a) { a.n_ring--; });
}
static void low_ranks_exchanged(const char *launch, void *args) {
    change_if<struct linear_args>(launch, "k_gemv_linear", args, [](auto &a) {
        int low[2], n = 0;
        for (int i = 0; i < a.n_matrix && n < 2; i++)
            if (a.y_half >> i & 1) low[n++] = i;
        if (n == 2) std::swap(a.y[low[0]], a.y[low[1]]);
    });
}
static void low_ranks_in_f32(const char *launch, void *args) {
    change_if<struct linear_args>(launch, "k_gemv_linear", args, [](auto &a) { a.y_half = 0; });
}
static void gates_of_next_head(const char *launch, void *args) {
    change_if<struct gate_args>(launch, "k_head_gate", args, [](auto &a) { a.gate++; });
}
static void gate_of_first_head(const char *launch, void *args) {
    change_if<struct gate_args>(launch, "k_head_gate", args, [](auto &a) { a.n_head = 1; });
}
/* Rows of a slot are as wide as those of the layers of both kinds. */
static void packed_rows(struct rope_args &a) {
    a.q_stride = (size_t)(a.n_head * a.d);
    a.k_stride = (size_t)(a.latent + a.rope);
}
static void queries_packed(const char *launch, void *args) {
    change_if<struct mla_query_args>(launch, "k_mla_query", args, [](auto &a) { packed_rows(a.rope); });
}
static void prefill_queries_packed(const char *launch, void *args) {
    change_if<struct rope_args>(launch, "k_rope_mla", args, packed_rows);
}

/* Mistakes about pools of an indexer's keys. */
static void change_pools(const char *launch, void *args, void (*f)(struct csa_args &a)) {
    change_if<struct csa_args>(launch, "k_csa_store", args, f);
}
static void change_choice(const char *launch, void *args, void (*f)(struct index_args &a)) {
    change_if<struct index_args>(launch, "k_index_choose", args, f);
}
static void change_seen_pools(const char *launch, void *args, void (*f)(struct attn_args &a)) {
    change_attention(launch, args, [&](auto &a) {
        if (a.block_end == POOL_END) f(a);
    });
}
static void pools_without_offsets(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) {
        float *none = changed_floats(1024);
        memset(none, 0, 1024 * sizeof *none);
        c.ape = none;
    });
}
static void pools_normed(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) { c.norm = c.ape; });
}
static void pools_longer(const char *launch, void *args) {
    change_pools(launch, args, [](auto &a) { a.pooled++; });
}
static void pools_shorter(const char *launch, void *args) {
    change_pools(launch, args, [](auto &a) { a.pooled--; });
}
static void pools_of_next_value(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) { c.gate++; });
}
static void pools_ring_shorter(const char *launch, void *args) {
    change_compressors(launch, args, [](auto &c) { c.ring.n_row--; });
}
static void pools_of_raw_keys(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_store", args, [](auto &a) { a.pooled = changed_floats(1 << 20); });
}
static void keys_not_centered(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_store", args, [](auto &a) { a.bias = NULL; });
}
static void unfinished_not_listed(const char *launch, void *args) {
    change_choice(launch, args, [](auto &a) { a.n_chosen = a.n_topk; });
}
static void one_pool_fewer(const char *launch, void *args) {
    change_choice(launch, args, [](auto &a) { a.n_chosen--; });
}
static void pools_chosen_early(const char *launch, void *args) {
    change_choice(launch, args, [](auto &a) { a.together = divisor_of(a.together.n - 1); });
}
static void unfinished_not_seen(const char *launch, void *args) {
    change_seen_pools(launch, args, [](auto &a) { a.top_k -= a.block.n - 1; });
}
static void half_pools(const char *launch, void *args) {
    change_seen_pools(launch, args, [](auto &a) { a.block = divisor_of(a.block.n / 2); });
}
static void pools_one_shorter(const char *launch, void *args) {
    change_seen_pools(launch, args, [](auto &a) { a.block = divisor_of(a.block.n - 1); });
}
static void pools_divided_by_more(const char *launch, void *args) {
    change_seen_pools(launch, args, [](auto &a) { a.block.shift++; });
}
static void pools_of_next_token(const char *launch, void *args) {
    change_seen_pools(launch, args, [](auto &a) { a.chosen += a.n_topk; });
}
static void streams_weighted(const char *launch, void *args) {
    change_if<struct hc_args>(launch, "k_hc_norm", args, [](auto &a) { a.mean = false; });
}

/* Mistakes about streams whose reading lags. */
template <class F>
static void change_lag(const char *launch, void *args, F f) {
    change_if<struct hc_args>(launch, "k_hc_norm", args, f);
}
static void lag_missing(const char *launch, void *args) {
    change_lag(launch, args, [](auto &a) { a.lag = NULL; });
}
static void lag_missing_at_end(const char *launch, void *args) {
    change_lag(launch, args, [](auto &a) { a.lag = a.mean ? NULL : a.lag; });
}
static void lag_of_next_token(const char *launch, void *args) {
    change_lag(launch, args, [](auto &a) { a.lag += a.n_tok > 1 ? a.mix_stride : 0; });
}
static void lag_of_next_stream(const char *launch, void *args) {
    change_lag(launch, args, [](auto &a) { a.lag--; });
}
static void lag_of_own_coefficients(const char *launch, void *args) {
    change_lag(launch, args, [](auto &a) { a.lag = a.mix; });
}
static void lag_not_kept(const char *launch, void *args) {
    change_lag(launch, args, [](auto &a) {
        const size_t n = (size_t)a.n_tok * a.mix_stride;
        float *lag = changed_floats(n);
        memcpy(lag, a.lag, (n - (size_t)(a.lag - a.mix)) * sizeof *lag);
        a.lag = lag;
    });
}
static void lag_packed(const char *launch, void *args) {
    change_lag(launch, args, [](auto &a) { a.mix_stride = HC_ROWS + 1; });
}
static void lag_written_as_stride(const char *launch, void *args) {
    change_hc(launch, args, [](auto &a) { a.mix_stride = HC_ROWS + 1; });
}
template <class F>
static void change_sent(const char *launch, void *args, F f) {
    change_if<struct send_args>(launch, "k_send_rows", args, [&](auto &a) {
        if (a.n_more) f(a);
    });
}
static void lag_not_sent(const char *launch, void *args) {
    change_sent(launch, args, [](auto &a) { a.n_more = 0; });
}
static void lag_sent_packed(const char *launch, void *args) {
    change_sent(launch, args, [](auto &a) { a.more_src_stride -= 4; });
}
static void lag_sent_of_coefficients(const char *launch, void *args) {
    change_sent(launch, args, [](auto &a) { a.more_src -= a.channel == CH_SEND ? 4 : 0; });
}
static void lag_taken_to_coefficients(const char *launch, void *args) {
    change_sent(launch, args, [](auto &a) { a.more_dst -= a.channel == CH_RECV ? 4 : 0; });
}

/* Mistakes about compressed keys that layers share. */
template <class F>
static void change_keys(const char *launch, void *args, F f) {
    change_if<struct csa_args>(launch, "k_csa_store", args, f);
}
template <class F>
static void change_pooled(const char *launch, void *args, F f) {
    change_keys(launch, args, [&](auto &a) {
        if (a.with[0].out) f(a, a.with[0]);
    });
}
static void pooled_evenly(const char *launch, void *args) {
    change_pooled(launch, args, [](auto &, auto &c) { c.gate = NULL; });
}
static void pooled_by_values(const char *launch, void *args) {
    change_pooled(launch, args, [](auto &, auto &c) { c.gate = c.gate ? c.value : NULL; });
}
static void pooled_not_normed(const char *launch, void *args) {
    change_pooled(launch, args, [](auto &, auto &c) { c.norm = NULL; });
}
static void pooled_of_one(const char *launch, void *args) {
    change_pooled(launch, args, [](auto &a, auto &) { a.pooled = 1; });
}
static void pooled_ring_shorter(const char *launch, void *args) {
    change_pooled(launch, args, [](auto &, auto &c) { c.ring.n_row--; });
}
static void pooled_in_one_format(const char *launch, void *args) {
    change_pooled(launch, args,
                  [](auto &a, auto &c) { c.out16 = (uint16_t *)changed_floats((size_t)(a.n_tok * c.d)); });
}
template <class F>
static void change_latents(const char *launch, void *args, F f) {
    change_keys(launch, args, [&](auto &a) {
        if (a.latents) f(a);
    });
}
static void latents_not_stored(const char *launch, void *args) {
    change_latents(launch, args, [](auto &a) { a.latents = false; });
}
static void latents_not_normed(const char *launch, void *args) {
    change_latents(launch, args, [](auto &a) { a.with[1].norm = NULL; });
}
static void latents_of_other_token(const char *launch, void *args) {
    change_latents(launch, args, [](auto &a) { a.with[0].value += a.n_tok > 1 ? a.with[0].stride : 0; });
}
static void latents_rotated_longer(const char *launch, void *args) {
    change_latents(launch, args, [](auto &a) { a.table.factor *= 2; });
}
static void latents_rotated_as_windows(const char *launch, void *args) {
    static const float *window; /* of the first layer, which has no compressed keys */
    change_keys(launch, args, [](auto &a) {
        if (!a.compress_ratio) window = a.table.freq;
        else if (window) a.table.freq = window;
    });
}
static void latents_rounded_as_before(const char *launch, void *args) {
    change_keys(launch, args, [](auto &a) { a.round = a.round == ROUNDS_V41 ? ROUNDS_V4 : a.round; });
}
static void latents_not_rounded(const char *launch, void *args) {
    change_keys(launch, args, [](auto &a) { a.round = ROUNDS_NOTHING; });
}
static void queries_normed(const char *launch, void *args) {
    change_keys(launch, args, [](auto &a) { a.plain_q = false; });
}
static void keys_of_first_source(const char *launch, void *args) {
    static struct cache_tensor first;
    change_csa(launch, args, [](struct attn_args &a) {
        if (a.compress_ratio == 2) first = a.v;
        else if (a.compress_ratio && first.data) a.v = first;
    });
}
static void indexer_of_first_source(const char *launch, void *args) {
    static struct cache_tensor first;
    change_if<struct index_args>(launch, "k_index_scores", args, [](auto &a) {
        if (a.together.n > 1) first = a.rope.kp;
        else if (first.data) a.rope.kp = first;
    });
}

/* Mistakes about candidates: where they are listed, and where keys are scored and chosen among them. */
template <class F>
static void change_listed(const char *launch, void *args, F f) {
    change_if<struct index_args>(launch, "k_index_choose", args, [&](auto &a) {
        if (a.parts > 1) f(a);
    });
}
template <class F>
static void change_among(const char *launch, void *args, F f) {
    for (const char *kernel : {"k_index_scores", "k_index_choose"})
        change_if<struct index_args>(launch, kernel, args, [&](auto &a) {
            if (a.candidates) f(a);
        });
}
static void latest_not_listed(const char *launch, void *args) {
    change_listed(launch, args, [](auto &a) { a.local = 0; });
}
static void listed_by_fewer_keys(const char *launch, void *args) {
    change_listed(launch, args, [](auto &a) { a.block--; });
}
static void listed_by_first_key(const char *launch, void *args) {
    change_listed(launch, args, [](auto &a) { a.parts = 1; });
}
static void one_fewer_listed(const char *launch, void *args) {
    change_listed(launch, args, [](auto &a) { a.n_chosen--; });
}
static void listed_later(const char *launch, void *args) {
    change_listed(launch, args, [](auto &a) { a.top_k += a.block; });
}
static void three_always_listed(const char *launch, void *args) {
    change_listed(launch, args, [](auto &a) { a.local = 3; });
}
static void chosen_not_among(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_choose", args, [](auto &a) { a.candidates = NULL; });
}
static void scored_not_among(const char *launch, void *args) {
    change_if<struct index_args>(launch, "k_index_scores", args, [](auto &a) {
        if (a.candidates) a.n_candidate = 1 << 20;
    });
}
static void among_smaller_blocks(const char *launch, void *args) {
    change_among(launch, args, [](auto &a) { a.candidate_block = divisor_of(a.candidate_block.n - 1); });
}
static void among_one_fewer(const char *launch, void *args) {
    change_among(launch, args, [](auto &a) { a.n_candidate--; });
}
static void among_those_of_next(const char *launch, void *args) {
    change_among(launch, args, [](auto &a) { a.candidates += a.n_tok > 1 ? a.n_candidate : 0; });
}
static void among_from_second(const char *launch, void *args) {
    change_among(launch, args, [](auto &a) { a.candidates++; });
}

/* The mistakes, and the test that finds them. */
static const struct {
    const char *test, *what;
    void (*change)(const char *launch, void *args); /* NULL: cuda_test_sums */
} mistakes[] = {{"feed-forwards", "the biases of experts are added on every rank", NULL},
                {"slots", "counts of experts halve later", counts_halve_later},
                {"slots", "the last slot is never used", slots_overlook_one},
                {"cached", "an expert is not copied", fetches_all_but_one},
                {"cached", "an expert's columns are shifted", fetches_other_columns},
                {"cached", "down is not copied", fetches_without_down},
                {"cached", "waves have other places than the ring", waves_in_one_place},
                {"cached", "an expert of a wave is left out", waves_one_short},
                {"cached", "waves do not wait for their copies", copies_without_waiting},
                {"from-disk", "an expert is not asked for", wants_one_less},
                {"from-disk", "experts of another wave are asked for", wants_of_first_wave},
                {"from-disk", "down is asked for instead of gate", wants_down_first},
                {"from-disk", "the answer is not heeded", fetches_as_from_memory},
                {"by-cpu", "the CPU gets other values", asks_for_other_tokens},
                {"by-cpu", "the CPU computes another layer", asks_of_other_layer},
                {"by-cpu", "the CPU's answer replaces the shared expert", answer_in_place_of_shared},
                {"by-cpu", "tokens get the answer of another", answer_of_one_token},
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
                {"operations", "queries of decode do not grow", decode_level},
                {"operations", "queries of prefill do not grow", prefill_level},
                {"operations", "queries of latents do not grow", latents_level},
                {"operations", "queries grow a token early", grown_early},
                {"links", "the rows of a rank are normed by themselves", rows_of_ranks},
                {"links", "copies of KV heads are counted", copies_counted},
                {"parallel", "keys are the first timeline's", keys_of_first},
                {"parallel", "values are the first timeline's", values_of_first},
                {"parallel", "keys become the first timeline's", keys_to_first},
                {"parallel", "values become the first timeline's", values_to_first},
                {"parallel", "latents become the first timeline's", latents_to_first},
                {"parallel", "latents are joined as the first timeline's", joins_of_first},
                {"parallel", "the window's keys are the first timeline's", window_of_first},
                {"parallel", "the window's keys become the first timeline's", window_to_first},
                {"parallel", "compressed keys are the first timeline's", compressed_of_first},
                {"parallel", "compressed keys become the first timeline's", compressed_to_first},
                {"parallel", "keys are compressed from the first timeline's", compressors_of_first},
                {"parallel", "the indexer has the first timeline's keys", indexer_of_first},
                {"parallel", "the indexer's keys become the first timeline's", indexer_to_first},
                {"parallel", "keys are chosen as for the first timeline", choice_of_first},
                {"parallel", "rings are the first timeline's", rings_of_first},
                {"parallel", "states are the first timeline's", states_of_first},
                {"parallel", "rings of Mamba-2 are the first timeline's", mamba_rings_of_first},
                {"parallel", "rings of Mamba-2 become the first timeline's", mamba_rings_to_first},
                {"parallel", "states of Mamba-2 are the first timeline's", mamba_states_of_first},
                {"early-router", "decode joins gate and up by SiLU", decode_without_relu},
                {"early-router", "prefill joins gate and up by SiLU", prefill_without_relu},
                {"early-router", "experts read what the dense feed-forward does", latents_not_read},
                {"early-router", "an expert is taken for one of zero computation", one_more_zero},
                {"gated-conv", "a channel has the taps of the next", gated_taps_of_next},
                {"gated-conv", "a gated convolution has a tap fewer", gated_tap_fewer},
                {"gated-conv", "gates of the input and of the result are exchanged", gates_exchanged},
                {"gated-conv", "inputs of a gated convolution are not kept", gated_not_kept},
                {"gated-conv", "a prefill's first input is not kept", gated_kept_fewer},
                {"gated-conv", "the ring of a gated convolution is shorter by a row", gated_ring_shorter},
                {"parallel", "rings of gated convolutions are the first timeline's", gated_rings_of_first},
                {"mamba", "B has the taps of C", taps_exchanged},
                {"mamba", "the convolution has no bias", convolution_without_bias},
                {"mamba", "D is another vector", skip_is_decay},
                {"mamba", "time steps have another bias", biases_are_skips},
                {"mamba", "decays are another vector", decays_are_biases},
                {"mamba", "rings of Mamba-2 are shorter by a row", mamba_ring_shorter},
                {"mamba", "heads have the groups in turn", heads_in_turn},
                {"mamba", "gates are those of the next value", gates_of_next},
                {"mamba", "results of Mamba-2 have another eps", other_eps},
                {"mamba", "results of Mamba-2 have the next weights", norm_of_next},
                {"mamba", "a prefill's B has the taps of C", mix_taps_exchanged},
                {"mamba", "a prefill's convolution has the bias of the next channel", mix_other_biases},
                {"mamba", "a prefill's time steps have another bias", mix_other_steps},
                {"mamba", "a prefill's decays are another vector", mix_decays_of_biases},
                {"mamba", "a prefill's last row of Mamba-2 is not made", mix_row_short},
                {"mamba", "segments of Mamba-2 have the rows of the first", mix_first_segment},
                {"mamba", "a prefill of Mamba-2 has a shorter ring", mix_ring_shorter},
                {"mamba", "a prefill's last row goes into the state of Mamba-2", prepare_all_taken},
                {"mamba", "a prefill's groups have the scales of the next", prepare_scales_of_next},
                {"mamba", "a prefill's last row of Mamba-2 has no tile", prepare_row_short},
                {"mamba", "a prefill's heads have the groups in turn", scan_groups_in_turn},
                {"mamba", "a prefill's D is another vector", scan_other_skip},
                {"mamba", "segments have the gates of the first", scan_gates_of_first},
                {"mamba", "a prefill of Mamba-2 ends after a tile", scan_one_tile},
                {"mamba", "a prefill's tiles have the factors of the next row", scan_factors_of_next},
                {"mamba", "rows before a prefill make its first, too", lag_with_own_rows},
                {"mamba", "rows before a prefill go into another state of Mamba-2", lag_left_out},
                {"mamba", "hidden values are not squared", not_squared},
                {"mamba", "feed-forwards have a gate", gated_by_itself},
                {"mamba", "routed experts do not read the latents", latents_not_read},
                {"mamba", "latent sums of a token are left out", latents_of_one_less},
                {"parallel", "hidden states are the first timeline's", hidden_of_first},
                {"parallel", "hidden states become the first timeline's", hidden_to_first},
                {"parallel", "a timeline lacks the hidden states of its prompt", hidden_lost},
                {"parallel", "the stem has a key more", stem_longer},
                {"parallel", "the stem has a compressed key more", compressed_stem_longer},
                {"parallel", "the indexer finds no stem", indexer_without_stem},
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
                {"streams", "experts are those of another layer's table", table_of_another_layer},
                {"lagging", "a half reads the streams as it says itself", lag_missing},
                {"lagging", "the last row is the mean of the streams", lag_missing_at_end},
                {"lagging", "streams are read as the next token says", lag_of_next_token},
                {"lagging", "streams are read as said of the next", lag_of_next_stream},
                {"lagging", "what the half before says is overwritten", lag_of_own_coefficients},
                {"lagging", "the half after reads as this one", lag_not_kept},
                {"lagging", "coefficients are packed where they are made", lag_packed},
                {"lagging", "coefficients are packed where they are used", lag_written_as_stride},
                {"lagging", "the next stage does not learn how streams are read", lag_not_sent},
                {"lagging", "rows of coefficients are packed between stages", lag_sent_packed},
                {"lagging", "the next stage gets other coefficients", lag_sent_of_coefficients},
                {"lagging", "the next stage puts them elsewhere", lag_taken_to_coefficients},
                {"lagging", "keys of two tokens have no gates", pooled_evenly},
                {"lagging", "the gates of two tokens are their values", pooled_by_values},
                {"lagging", "compressed keys are not normed", pooled_not_normed},
                {"lagging", "a key of two tokens has the second alone", pooled_of_one},
                {"lagging", "a ring of two tokens is shorter by a row", pooled_ring_shorter},
                {"lagging", "the indexer's keys are made of others", pooled_in_one_format},
                {"lagging", "compressed keys are not stored", latents_not_stored},
                {"lagging", "the indexer's keys are not normed", latents_not_normed},
                {"lagging", "a compressed key is that of the next token", latents_of_other_token},
                {"lagging", "compressed keys are rotated with another factor", latents_rotated_longer},
                {"lagging", "compressed keys are rotated as windows", latents_rotated_as_windows},
                {"lagging", "keys are rounded as in DeepSeek-V4", latents_rounded_as_before},
                {"lagging", "keys of V4.1 are not rounded as in training", latents_not_rounded},
                {"lagging", "heads of queries are normed", queries_normed},
                {"lagging", "all layers have the compressed keys of the first", keys_of_first_source},
                {"lagging", "all indexers have the keys of the first", indexer_of_first_source},
                {"lagging", "the latest block is not always a candidate", latest_not_listed},
                {"lagging", "blocks of candidates are smaller", listed_by_fewer_keys},
                {"lagging", "a block has the score of its first keys", listed_by_first_key},
                {"lagging", "one candidate fewer is listed", one_fewer_listed},
                {"lagging", "candidates are listed a block later", listed_later},
                {"lagging", "three blocks are always candidates", three_always_listed},
                {"lagging", "chosen keys are numbered among the candidates'", chosen_not_among},
                {"lagging", "keys are scored that are no candidates'", scored_not_among},
                {"lagging", "candidates have smaller blocks", among_smaller_blocks},
                {"lagging", "one candidate fewer is scored", among_one_fewer},
                {"lagging", "tokens have the candidates of the next", among_those_of_next},
                {"lagging", "candidates begin with the second", among_from_second},
                {"kda", "decays have no bound", decays_without_bound},
                {"kda", "decays have a bound", decays_with_bound},
                {"kda", "rows have the decays of the next", decays_of_next_row},
                {"kda", "decays have the offset of the next row", offsets_of_next_row},
                {"kda", "heads decay as the next", rates_of_next_head},
                {"kda", "heads have the beta of the next", betas_of_next_head},
                {"kda", "lagging rows have the decays of the next", kept_decays_of_next_row},
                {"kda", "a prefill's queries have the taps of keys", mix_taps_exchanged},
                {"kda", "a prefill's last row is not made", mix_row_short},
                {"kda", "segments of a prefill have the rows of the first", mix_first_segment},
                {"kda", "a prefill's ring is shorter by a row", mix_ring_shorter},
                {"kda", "a prefill's heads have the beta of the next", mix_betas_of_next},
                {"kda", "a prefill's last row goes into the state", prepare_all_taken},
                {"kda", "a prefill's decays have another bound", prepare_bound},
                {"kda", "a prefill's rows have the decays of the next", prepare_decays_of_next_row},
                {"kda", "a prefill's decays have the offset of the next row", prepare_offsets_of_next_row},
                {"kda", "a prefill's heads decay as the next", prepare_rates_of_next_head},
                {"kda", "segments of a prefill have the decays of the first", prepare_first_segment},
                {"kda", "a prefill's last row has no tile", prepare_row_short},
                {"kda", "a prefill ends after a tile", scan_one_tile},
                {"kda", "rows of a state decay as the next over a tile", scan_factors_of_next},
                {"kda", "a prefill's keys are those of the next values", scan_keys_of_next},
                {"kda", "rows before a prefill go into another state", lag_left_out},
                {"kda", "a prefill's values have the gates of the next", finish_gates_of_next},
                {"kda", "a prefill fills a shorter ring", finish_ring_shorter},
                {"kda", "values have the gates of the next", gates_of_next_value},
                {"kda", "a ring is shorter by a row", ring_too_short},
                {"kda", "the low ranks are exchanged", low_ranks_exchanged},
                {"kda", "the low ranks are in F32", low_ranks_in_f32},
                {"kda", "heads have the gate of the next", gates_of_next_head},
                {"kda", "the first head alone has a gate", gate_of_first_head},
                {"kda", "norms of rows are read, not rows", blocks_read_normed},
                {"norms", "rows have the eps of blocks with norms", blocks_fixed_eps},
                {"kda", "scores of rows are divided", blocks_small_scores},
                {"kda", "results do not come to their rows", blocks_without_results},
                {"kda", "the last row is not read", blocks_read_one_fewer},
                {"kda", "a block begins with what the row had", blocks_never_begin},
                {"kda", "a latent sum has the weights of the next value", latent_weights_of_next},
                {"kda", "a token's latent sum is not normed", latent_norm_of_one_less},
                {"kda", "latent sums have another eps", latent_other_eps},
                {"kda", "rows of latents are shorter", latent_rows_shorter},
                {"kda", "rows of a decode are packed", queries_packed},
                {"kda", "rows of a prefill are packed", prefill_queries_packed},
                {"results", "a value has the weight of the next four", result_weights_of_next},
                {"results", "the norm of a result has the weights of what is read next", result_weights_of_read},
                {"results", "a result has the weights of the half before", result_of_half_before},
                {"results", "what is read has the weights of the result", result_read_by_its_weights},
                {"results", "what is read next is not made", result_not_read},
                {"results", "norms of results have another epsilon", result_other_eps},
                {"results", "rows are shorter", result_shorter},
                {"results", "a result is added to itself", result_replaces},
                {"results", "the residual is added to itself", result_of_residual},
                {"results", "what is read takes the place of the residual", result_norm_in_one_format},
                {"parts", "parts have the norms of each other", parts_weights_exchanged},
                {"parts", "the dense part alone is added", parts_dense_alone},
                {"parts", "experts alone are added", parts_experts_alone},
                {"parts", "the dense part takes the place of the experts", parts_dense_twice},
                {"parts", "layers do not scale the residual", layer_not_scaled},
                {"parts", "the router reads in prefill what experts read", router_reads_as_experts},
                {"parts", "the router reads in decode what experts read", router_norms_as_experts},
                {"parts", "experts read in decode what the router reads", experts_read_as_router},
                {"parts", "experts have no factors", experts_not_scaled},
                {"parts", "gates are joined by SiLU in decode", decode_by_silu},
                {"parts", "gates are joined by SiLU in prefill", prefill_by_silu},
                {"parts", "values are not normed in decode", decode_values_not_normed},
                {"parts", "values are not normed in prefill", prefill_values_not_normed},
                {"parts", "values of wide heads are of another slot", values_of_another_slot},
                {"parts", "wide heads have keys as values", wide_keys_as_values},
                {"parts", "scores of wide heads are divided by their width", wide_scores_divided},
                {"parts", "splits of wide heads are not joined", wide_splits_not_joined},
                {"relative", "taps of a token are those of the one before", blocks_tap_of_next},
                {"relative", "a result goes to the row before", blocks_added_before},
                {"relative", "a block begins with what the row had", blocks_never_begin},
                {"relative", "every half begins its block anew", blocks_begin_always},
                {"relative", "messages stay those of the first pass", blocks_not_moved},
                {"relative", "the last row is not read", blocks_read_one_fewer},
                {"relative", "all readings have the first query", blocks_read_by_first},
                {"relative", "rings of results do not get a token", blocks_ring_not_kept},
                {"relative", "rings of results are shorter by a row", blocks_ring_of_first},
                {"relative", "messages have the query of the input", blocks_message_query},
                {"relative", "a message lacks its last row", blocks_fewer_messages},
                {"relative", "the convolution lacks its oldest token", blocks_fewer_taps},
                {"relative", "readings have the norm of the first", blocks_norm_of_first},
                {"relative", "messages forget by their gain", message_swapped},
                {"relative", "a message has the factor of the input", message_factors},
                {"relative", "the message is the input of the next", message_other},
                {"relative", "queries do not grow", rel_no_temperature},
                {"relative", "queries have the clip of relative states", rel_clip_swapped},
                {"relative", "values have the taps of keys", rel_values_as_keys},
                {"relative", "values have the token's taps of keys", rel_own_of_keys},
                {"relative", "a token has the taps of the next", rel_own_of_next},
                {"relative", "rings of keys do not get a token", rel_ring_not_kept},
                {"relative", "rings of keys are shorter by a row", rel_ring_shorter},
                {"relative", "taps of a window are divided as without one", rel_window_taps},
                {"relative", "a prefill keeps a token fewer", keep_one_fewer},
                {"relative", "the bias ends a distance early", bias_shorter},
                {"relative", "the bias is that of the next distance", bias_of_next},
                {"relative", "a relative state lacks its last values", bias_of_fewer},
                {"relative", "tokens have the sinks of the first", bias_sinks_of_first},
                {"ngrams", "streams get the part of the next", streams_of_next},
                {"ngrams", "streams get no result", streams_without_result},
                {"ngrams", "a prediction layer reads the streams of the trunk", streams_not_joined},
                {"ngrams", "streams of a hidden state are normed one by one", hidden_normed_by_stream},
                {"ngrams", "norms of streams have other weights", streams_weights_shifted},
                {"ngrams", "the low rank counts every stream", streams_counted_twice},
                {"ngrams", "the low rank is not squashed", streams_not_squashed},
                {"ngrams", "the last stream is not read", streams_one_fewer},
                {"ngrams", "streams are read by their norms", streams_by_norms},
                {"ngrams", "n-grams go beyond the end of a text", ngrams_never_end},
                {"ngrams", "tokens of n-grams have one multiplier", ngrams_multiplied_alike},
                {"ngrams", "n-grams have other lengths", ngrams_of_more},
                {"ngrams", "all heads have the rows of the first", ngrams_of_first_head},
                {"ngrams", "all heads have as many rows as the first", ngrams_divided_alike},
                {"ngrams", "n-grams end with the next token", ngrams_of_next_token},
                {"ngrams", "ids come from other rows of the ring", ngrams_ids_of_other_row},
                {"ngrams", "rows of n-grams are doubled", ngrams_scaled},
                {"ngrams", "norms of keys have other weights", ngrams_key_weights},
                {"ngrams", "gates are of norms alone", ngrams_gates_of_norms},
                {"ngrams", "values under the convolution have another norm", ngrams_gates_of_values},
                {"ngrams", "taps are closer than n-grams are long", ngrams_of_neighbors},
                {"ngrams", "the convolution of n-grams lacks a tap", ngrams_fewer_taps},
                {"ngrams", "values have the factors of their norms", ngrams_other_factors},
                {"ngrams", "what is under the convolution has other weights", ngrams_conv_weights},
                {"ngrams", "the ring of n-grams does not get a token", ngrams_ring_not_kept},
                {"ngrams", "a prefill keeps n-grams of a token fewer", ngrams_ring_one_fewer},
                {"ngrams", "the ring of n-grams is shorter by a row", ngrams_ring_shorter},
                {"rows", "tokens of n-grams are hashed by their own ids", ngrams_of_tokens_themselves},
                {"rows", "n-grams never go beyond the end of a text", ngrams_always_end},
                {"rows", "n-grams are padded with another token", ngrams_padded_otherwise},
                {"rows", "rows of n-grams have the scales of the next", ngrams_scales_of_next},
                {"rows", "a ring of ids alone gets none", plain_ring_not_kept},
                {"rows", "a ring of ids alone gets one fewer", plain_ring_one_fewer},
                {"rows", "a ring of ids alone is shorter by a row", plain_ring_shorter},
                {"rows", "a ring of ids alone gets those of the next tokens", plain_ids_of_next},
                {"rows", "values without a convolution have the factors of norms", plain_other_factors},
                {"read-rows", "rows of the next token are asked for", want_rows_of_next_token},
                {"read-rows", "the first row that is asked for is not listed", want_rows_shifted},
                {"read-rows", "no row is asked for", want_no_rows},
                {"read-rows", "rows that were brought are found by their numbers", rows_by_their_numbers},
                {"ngrams", "the ring of keys does not get a token", means_not_kept},
                {"ngrams", "the ring of keys is shorter by a row", means_ring_shorter},
                {"ngrams", "keys are means of fewer tokens", means_of_fewer},
                {"ngrams", "means are rotated by longer vectors", means_rotated_longer},
                {"ngrams", "means are not normed", means_without_norm},
                {"ngrams", "blocks are scored by a head fewer", means_weighed},
                {"ngrams", "a block fewer is chosen", means_one_fewer},
                {"ngrams", "blocks are chosen before they end", means_chosen_early},
                {"ngrams", "keys of the indexer are numbered by smaller quotients", means_divided_lower},
                {"ngrams", "keys are divided by smaller quotients", blocks_divided_lower},
                {"ngrams", "blocks are shorter by a key", blocks_shorter},
                {"ngrams", "tokens see the blocks of the next", means_by_next_token},
                {"upload", "scales of FP8 are halved", scales_of_half},
                {"router", "sparsemixer is a softmax over all", mixer_is_softmax},
                {"delta_net", "decode reads tokens before the taps", taps_before_decode},
                {"delta_net", "prefill reads tokens before the taps", taps_before_prefill},
                {"delta_net", "Mamba-2 reads tokens before the taps", taps_before_scan},
                {"delta_net", "the oldest token under the taps is left out", taps_one_fewer},
                {"operations", "queries grow later in decode", decode_other_growth},
                {"operations", "queries grow later in prefill", prefill_other_growth},
                {"operations", "queries do not grow a token early in decode", decode_late_growth},
                {"operations", "queries do not grow a token early in prefill", prefill_late_growth},
                {"operations", "chunks are windows in decode", decode_without_chunks},
                {"operations", "chunks are windows in prefill", prefill_without_chunks},
                {"operations", "results of experts are weighted in place of inputs", inputs_not_weighted},
                {"operations", "norms have no biases", norms_without_biases},
                {"operations", "streams that are not mixed are", identity_is_mixed},
                {"operations", "results are written to streams twofold", results_written_twofold},
                {"operations", "an indexer rotates the first values", index_rotates_first},
                {"operations", "latents have no sinks in decode", latents_without_sinks_in_decode},
                {"operations", "latents have no sinks in prefill", latents_without_sinks},
                {"operations", "the shared key is not normed in decode", raw_shared_key_in_decode},
                {"operations", "the shared key is not normed in prefill", raw_shared_key},
                {"windows", "windows of latents are longer by a key", longer_latent_window},
                {"windows", "splits of a window of latents are joined as a context's", windows_joined_as_contexts},
                {"operations", "queries of latents grow later in decode", latent_decode_other_growth},
                {"operations", "queries of latents grow later in prefill", latent_prefill_other_growth},
                {"pools", "pools have no offsets", pools_without_offsets},
                {"pools", "pools have the offsets of the next token", next_offsets},
                {"pools", "keys are their own gates", other_gates_of_keys},
                {"pools", "values have the gates of the next", pools_of_next_value},
                {"pools", "pools are normed", pools_normed},
                {"pools", "pools have a key of the one before", pools_longer},
                {"pools", "pools lack their first key", pools_shorter},
                {"pools", "the ring is shorter by a row", pools_ring_shorter},
                {"pools", "pools are of keys without a norm", pools_of_raw_keys},
                {"pools", "keys are normed without their mean", keys_not_centered},
                {"pools", "the unfinished pool is not listed", unfinished_not_listed},
                {"pools", "a pool fewer is chosen", one_pool_fewer},
                {"pools", "pools are chosen before they end", pools_chosen_early},
                {"pools", "the unfinished pool is not seen", unfinished_not_seen},
                {"pools", "half of a pool is seen", half_pools},
                {"pools", "pools are shorter by a key", pools_one_shorter},
                {"pools", "keys are divided among fewer pools", pools_divided_by_more},
                {"pools", "tokens have the choice of the next", pools_of_next_token},
                {"pools", "a head of the indexer is missing", head_dropped},
                {"pools", "streams do not end in their mean", streams_weighted}};

/* ---- changes of the PTX ---- */

/* In kernels whose mangled name has `kernel` in it, each match of `pattern` (ECMAScript) becomes `by`. */
static const struct edit {
    const char *test, *what, *kernel, *pattern, *by;
} edits[] = {
    {"gemm", "FP4 MMA: scales of a and b are exchanged", "gemm_kernelILi4E",
     R"((ue4m3 \{[^}]*\}, \{[^}]*\}, \{[^}]*\}, \{[^}]*\}, )(%r\d+)(, \{0,0\}, )(%r\d+))", "$1$4$3$2"},
    {"gemm", "FP4 MMA: a1 and a2 are exchanged", "gemm_kernelILi4E", R"((ue4m3 \{[^}]*\}, \{%r\d+),(%r\d+),(%r\d+),)",
     "$1,$3,$2,"},
    {"gemm", "FP4 MMA: b0 and b1 are exchanged", "gemm_kernelILi4E",
     R"((ue4m3 \{[^}]*\}, \{[^}]*\}, \{)(%r\d+),(%r\d+))", "$1$3,$2"},
    {"gemv", "F16 MMA: a1 and a2 are exchanged", "k_gemv_linear",
     R"((f16\.f16\.f32 \{[^}]*\}, \{%r\d+),(%r\d+),(%r\d+),)", "$1,$3,$2,"},
    {"gemv", "F16 MMA: b0 and b1 are exchanged", "k_gemv_linear",
     R"((f16\.f16\.f32 \{[^}]*\}, \{[^}]*\}, \{)(%r\d+),(%r\d+))", "$1$3,$2"},
    {"attention", "ldmatrix does not transpose", "attn_gqa_prefill", R"(m8n8\.x4\.trans\.)", "m8n8.x4."},
    {"gemm", "ldmatrix transposes", "gemm_kernelILi4E", R"(m8n8\.x4\.shared)", "m8n8.x4.trans.shared"},
    {"operations", "pairs of halves are exchanged", "k_gemv_linear",
     R"((cvt\.rn\.satfinite\.f16x2\.f32 %r\d+, )(%f\d+), (%f\d+))", "$1$3, $2"},
    {"operations", "pairs of E4M3 are exchanged", "", R"((cvt\.rn\.satfinite\.e4m3x2\.f32 %rs\d+, )(%f\d+), (%f\d+))",
     "$1$3, $2"},
    {"gemm", "pairs of E2M1 are exchanged", "", R"((cvt\.rn\.satfinite\.e2m1x2\.f32 x, )(%f\d+), (%f\d+))", "$1$3, $2"},
    {"gemm", "a copy may be in flight longer", "gemm_kernel", R"(cp\.async\.wait_group 2)", "cp.async.wait_group 3"},
    {"attention", "copies may be in flight longer", "attn_gqa_decode", R"(cp\.async\.wait_group [46])",
     "cp.async.wait_group 7"},
    {"attention", "copies read beyond the keys", "attn_gqa_decode",
     R"((cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 16), %r\d+)", "$1"},
    {"operations", "a warp sums over the wrong lanes", "k_add_norm",
     R"((shfl\.sync\.bfly\.b32\s+%r\d+\|%p\d+, %r\d+, )16(, 31, -1))", "$018$2"},
    {"gemv", "an address beyond the matrix", "k_gemv_linear",
     R"((ld\.global\.nc\.L1::no_allocate\.v4\.u32 \{[^}]*\}, \[%rd\d+)\])", "$1+1073741824]"},
    {"gemv", "an address that is not aligned", "k_gemv_linear",
     R"((ld\.global\.nc\.L1::no_allocate\.v4\.u32 \{[^}]*\}, \[%rd\d+)\])", "$1+8]"},
    {"attention", "a vote has the opposite sense", "attn_", R"(vote\.sync\.any\.pred(\s+)(%p\d+), (%p\d+))",
     "vote.sync.any.pred$1$2, !$3"},
    {"sparse", "a ballot has the opposite sense", "index_choose", R"(vote\.sync\.ballot\.b32(\s+)(%r\d+), (%p\d+))",
     "vote.sync.ballot.b32$1$2, !$3"},
    {"ngrams", "chosen blocks lie a key further on", "attn_gqa_decode", R"((mul\.hi\.u32\s+(%r\d+), %r\d+, %r\d+;))",
     "$1 add.u32 $2, $2, 4;"},
    {"ngrams", "keys of the indexer lie further on", "k_index_store", R"((mul\.hi\.u32\s+(%r\d+), %r\d+, %r\d+;))",
     "$1 add.u32 $2, $2, 4;"},
    {"indexer", "keys are scored before they end", "k_index_scores", R"((mul\.hi\.u32\s+(%r\d+), %r\d+, %r\d+;))",
     "$1 add.u32 $2, $2, 4;"},
    {"indexer", "keys are chosen before they end", "k_index_choose", R"((mul\.hi\.u32\s+(%r\d+), %r\d+, %r\d+;))",
     "$1 add.u32 $2, $2, 4;"},
    {"router", "the last block is not known", "k_route_decode",
     R"(atom\.add\.acq_rel\.gpu\.global\.u32 (%r\d+), \[(%rd\d+)\], (%r\d+))", "mov.u32 $1, $3"},
    {"router", "sparsemixer leaves out fewer experts", "k_route_", R"((setp\.gt\.f32\s+%p\d+, %f\d+, )0f3CA3D70A)",
     "$010f3D23D70A"},
    {"sort", "what an expert reads has the weight of the next choice", "k_weigh_inputs",
     R"((ld\.global\.f32\s+%f\d+, \[%rd\d+)\])", "$1+4]"},
    {"links", "a flag is stored without a release", "", R"(st\.release\.sys\.global\.u32)",
     "st.relaxed.sys.global.u32"},
    {"mamba", "negative hidden values are squared", "k_gemv_glu", R"(max(\.f32\s+%f\d+, %f\d+, 0f00000000))", "min$1"},
    {"mamba", "an exponential of Mamba-2 is a logarithm", "k_mamba_scan", R"(ex2(\.approx\.f32\s+%f\d+, %f\d+))",
     "lg2$1"},
    {"gemm", "weights of E4M3 are exchanged in pairs", "gemm_kernelILi3E",
     R"((cvt\.rn\.f16x2\.e4m3x2 (%r\d+), %rs\d+;))", "$1 prmt.b32 $2, $2, $2, 0x1032;"},
    {"gemm", "rows of E4M3 have the scales of those 8 further on", "gemm_kernelILi3E",
     R"((ld\.shared\.v2\.f32\s+\{)(%f\d+), (%f\d+)\})", "$1$3, $2}"},
    {"gemm", "a tile of E4M3 has the scales of the one before", "gemm_kernelILi3E",
     R"((ld\.shared\.v2\.f32\s+\{[^}]*\}, \[%r\d+\+)(8256|8448)\])", "$018192]"},
    {"gemv", "weights of E4M3 are exchanged in decode", "k_gemv_down", R"((cvt\.rn\.f16x2\.e4m3x2 (%r\d+), %rs\d+;))",
     "$1 prmt.b32 $2, $2, $2, 0x1032;"},
    {"upload", "tiles of bytes lie as far apart as those of halves", "k_repack", R"((selp\.b64\s+%rd\d+, 11, )10)",
     "$0111"},
    {"upload", "codes of BF16 weights are exchanged in pairs", "k_repack",
     R"((cvt\.rn\.satfinite\.e4m3x2\.f32 %rs\d+, )(%f\d+), (%f\d+))", "$1$3, $2"},
    {"upload", "a largest BF16 weight of 1.875 is a code of 2^8", "k_repack",
     R"((setp\.gt\.u32\s+%p\d+, %r\d+, )6291456)", "$018323071"},
    {"upload", "blocks of FP8 lie closer together", "k_repack", R"((mul\.lo\.s32\s+%r\d+, %r\d+, )132)", "$01128"},
    {"attention", "an exponential is a logarithm", "attn_", R"(ex2(\.approx\.ftz\.f32 %f\d+, %f\d+))", "lg2$1"},
};
static const struct edit *edit_of_mutant;

static std::string edited(const char *kernel, std::string body) {
    if (!strstr(kernel, edit_of_mutant->kernel)) return body;
    const std::string changed = std::regex_replace(body, std::regex(edit_of_mutant->pattern), edit_of_mutant->by);
    changes_made += changed != body;
    return changed;
}

/* ---- running mutants ---- */

#define COUNTED   "last_block: the warp that counts the block has written all logits; its lanes run together here"
#define ONE_TOKEN "a warp takes one token: no other overwrites its scores"
#define ONE_WARP  "channel_end: the lanes of the one warp run together here"
#define SEQUENCE  "channel_end: other threads read the sequence before an earlier barrier, if at all"
/* Instructions whose absence changes nothing: kernel, text, and why. These mutants are not run. */
static const struct {
    const char *kernel, *text, *why;
} equivalents[] = {
    {"k_wave_list", "griddepcontrol.wait", "experts_in_waves launches it when what is before it has ended"},
    {"k_add_experts", "bar.sync 0 (3)", "what it counts is read when it has ended"},
    {"k_brought_experts", "bar.sync 0 (3)", "what it counts is read when it has ended"},
    {"k_route_decodeILi1ELb0E", "bar.sync 0 (3)", COUNTED},
    {"k_route_decodeILi16ELb0E", "bar.sync 0 (3)", COUNTED},
    {"k_route_decodeILi1ELb1E", "bar.sync 0 (5)", COUNTED},
    {"k_route_decodeILi4ELb0E", "bar.sync 0 (3)", COUNTED},
    {"k_route_decodeILi4ELb1E", "bar.sync 0 (5)", COUNTED},
    {"k_route_decodeILi8ELb1E", "bar.sync 0 (5)", COUNTED},
    {"k_route_decodeILi1ELb0E", "bar.warp.sync -1 (7)", ONE_TOKEN},
    {"k_route_decodeILi1ELb1E", "bar.warp.sync -1 (9)", ONE_TOKEN},
    {"k_route_decodeILi4ELb0E", "bar.warp.sync -1 (7)", ONE_TOKEN},
    {"k_route_decodeILi4ELb1E", "bar.warp.sync -1 (9)", ONE_TOKEN},
    {"k_route_decodeILi8ELb1E", "bar.warp.sync -1 (9)", ONE_TOKEN},
    {"k_route_prefill", "bar.warp.sync -1 (4)", ONE_TOKEN},
    {"k_add_normILi1E", "bar.sync 0 (8)", SEQUENCE},
    {"k_add_normILi2E", "bar.sync 0 (6)", SEQUENCE},
    {"k_add_normILi3E", "bar.sync 0 (6)", SEQUENCE},
    {"k_row_normILi7E", "bar.sync 0 (5)", SEQUENCE},
    {"k_share_token", "bar.sync 0 (2)", ONE_WARP},
    {"k_brought_rows", "bar.sync 0 (2)", ONE_WARP},
};

struct mutation {
    const char *what, *test; /* the one test that is to find it; NULL: all that reach it */
    const struct edit *edit; /* NULL: none */
    int mistake;             /* of `mistakes`; -1: none */
    struct sim_site site;    /* text NULL: none */
    int number;              /* of the site among those of its kernel, in the order of the PTX */
    bool reached[MUTANT_TESTS];
    pid_t pid;       /* 0: does not run */
    double used = 0; /* processor time at the last look, seconds */
    int idle = 0;    /* looks in a row that found no more of it */
};

/* In a child: runs the tests that reach the mutation. */
[[noreturn]] static void run_mutant(const mutation &m) {
    if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(2);
    mutant = true, test_stream = NULL, seed_offset = 1;
    sim_end_at_violation();
    cuda_test_end_at_failure();
    if (m.site.text) sim_remove_site(m.site.text);
    if (m.edit) edit_of_mutant = m.edit, sim_edit(edited);
    if (m.mistake >= 0) {
        cuda_test_sums = !mistakes[m.mistake].change;
        if (!cuda_test_sums) sim_change_arguments(mistakes[m.mistake].change);
    }
    for (int i = 0; i < MUTANT_TESTS; i++) {
        if (m.test ? strcmp(m.test, mutant_tests[i].name) : m.site.text && !m.reached[i]) continue;
        mutant_tests[i].fn();
    }
    _exit((m.edit || m.mistake >= 0) && !changes_made && !cuda_test_sums ? CHANGED_NOTHING : 0);
}

/* What a mutant leaves out. */
static std::string text_of(const mutation &m) {
    if (!m.site.text) return "";
    std::string text(m.site.text, strcspn(m.site.text, ";"));
    text.erase(std::remove(text.begin(), text.end(), '\t'), text.end()); /* of "bar.sync \t0" */
    return text + " (" + std::to_string(m.number) + ")";
}

/* Why a mutant changes nothing, or NULL. */
static const char *why_equivalent(const mutation &m) {
    const std::string text = text_of(m);
    for (auto &e : equivalents)
        if (m.site.text && strstr(m.site.kernel, e.kernel) && text.find(e.text) != std::string::npos) return e.why;
    return NULL;
}

static void print_mutant(const char *end, const mutation &m, const char *why) {
    printf("%-6s %s%s%s%s%s\n", end, m.site.text ? m.site.kernel : m.what, m.site.text ? ": " : "", text_of(m).c_str(),
           why ? ": " : "", why ? why : "");
}

/* Prints how a mutant ended. Returns whether that is a failure of the tests. */
static bool mutant_ended(const mutation &m, int status) {
    const bool none = !m.site.text && !m.edit && m.mistake < 0,
               dies = status && (!WIFEXITED(status) || WEXITSTATUS(status) != CHANGED_NOTHING);
    print_mutant(dies ? "dies" : none ? "lives" : "LIVES", m, WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : NULL);
    return dies == none;
}

/* Ends a mutant that hangs: it used no processor time between one look and the next, twice in a row, or more than all
 * tests take. A busy machine ends none. */
static void look_at(mutation &m) {
    clockid_t clock;
    struct timespec t;
    if (clock_getcpuclockid(m.pid, &clock) || clock_gettime(clock, &t)) return; /* it has ended */
    const double used = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    m.idle = used - m.used < 0.1 ? m.idle + 1 : 0, m.used = used;
    if (m.idle == 2 || used > MUTANT_SECONDS) kill(m.pid, SIGALRM);
}

/* Runs mutants, as many at a time as there are processors. Returns how many should have died and have not. */
static int run_mutants(std::vector<mutation> &all) {
    const long most = sysconf(_SC_NPROCESSORS_ONLN);
    long running = 0;
    time_t looked = time(NULL);
    int failures = 0;
    for (size_t next = 0; next < all.size() || running;) {
        if (next < all.size() && running < most) {
            mutation &m = all[next++];
            if (const char *why = why_equivalent(m)) {
                print_mutant("known", m, why);
                continue;
            }
            fflush(stdout);
            if (!(m.pid = fork())) run_mutant(m);
            if (m.pid < 0) rank_fatal("cannot start a process");
            running++;
            continue;
        }
        int status = 0;
        const pid_t pid = waitpid(-1, &status, WNOHANG);
        if (!pid) usleep(20000);
        const bool look = time(NULL) - looked >= LOOK_SECONDS;
        if (look) looked = time(NULL);
        for (mutation &m : all)
            if (m.pid && m.pid == pid) running--, m.pid = 0, failures += mutant_ended(m, status);
            else if (m.pid && look) look_at(m);
    }
    return failures;
}

/* Runs the tests, to see which of them execute which synchronizing instructions. */
static std::vector<mutation> find_sites() {
    std::vector<mutation> all;
    for (int i = 0; i < MUTANT_TESTS; i++) {
        sim_forget_runs();
        mutant_tests[i].fn();
        std::vector<struct sim_site> sites((size_t)sim_sites(NULL, 0));
        sim_sites(sites.data(), (int)sites.size());
        for (const struct sim_site &s : sites) {
            if (!s.ran) continue;
            auto m = std::find_if(all.begin(), all.end(), [&](const mutation &x) { return x.site.text == s.text; });
            if (m == all.end()) m = all.insert(m, {NULL, NULL, NULL, -1, s, 0, {}, 0});
            m->reached[i] = true;
        }
    }
    for (mutation &m : all)
        m.number = 1 + (int)std::count_if(all.begin(), all.end(), [&](const mutation &x) {
                       return !strcmp(x.site.kernel, m.site.kernel) && x.site.text < m.site.text;
                   });
    return all;
}

/* Whether a name of a mutant has `word` in it. */
static bool mutant_has(const mutation &m, const char *word) {
    for (const char *name : {m.what, m.test, m.site.kernel})
        if (name && strstr(name, word)) return true;
    return false;
}

/* Runs the mutants that have one of n words in a name, all for n = 0. Instructions of kernels are searched by running all
 * tests, unless every word is in the name of a change or a mistake. 0: all die, or are known to live. */
extern "C" int cuda_test_mutate(int n, char *const *words) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    sim_races(true);
    std::vector<mutation> first, sites;
    std::vector<bool> named((size_t)n);
    const auto add = [&](const mutation &m, std::vector<mutation> &to) {
        bool wanted = !n;
        for (int i = 0; i < n; i++)
            if (mutant_has(m, words[i])) wanted = named[(size_t)i] = true;
        if (wanted) to.push_back(m);
    };
    add({"no mutation", NULL, NULL, -1, {}, 0, {}, 0}, first);
    for (const edit &e : edits) add({e.what, e.test, &e, -1, {}, 0, {}, 0}, first);
    for (int i = 0; i < (int)(sizeof mistakes / sizeof *mistakes); i++)
        add({mistakes[i].what, mistakes[i].test, NULL, i, {}, 0, {}, 0}, first);
    int failures = run_mutants(first); /* before kernels are decoded here */
    if (!n || std::count(named.begin(), named.end(), false))
        for (const mutation &m : find_sites()) add(m, sites);
    if (cuda_test_failures() || sim_violations()) return puts("there are failures without a mutation"), 1;
    failures += run_mutants(sites);
    for (int i = 0; i < n; i++)
        if (!named[(size_t)i]) printf("no mutant has '%s' in a name\n", words[i]), failures++;
    printf("%zu changes and mistakes, %zu synchronizing instructions left out, %d failures\n", first.size(),
           sites.size(), failures);
    return failures != 0;
}
