/* moe - chat with mixture-of-experts language models whose weights are NVFP4, on your own machine.
 *
 * This file is the whole program for a CPU; gguf_nvfp4.h holds the file format and the number formats.
 *
 * One turn of a conversation:
 *
 *   messages --template--> text with the origin of every byte --tokenize--> ids --session_sync--> logits
 *                                                                              ^                    |
 *                                                                     session_decode <-- id <-- sampler --> detokenise --> printer
 *
 * One forward pass (forward_qwen3moe, forward_deepseek2) is a straight line over the operations of `struct ops`:
 *
 *   embed, then per layer: norm, query/key/value, rotation and cache, attention, output, add + norm, router + experts; head
 *
 * Several ranks, each with its part of the model, run the same line; where it adds, they add up what all of them have.
 *
 * Two nouns: `struct model` never changes after loading; `struct session` is one timeline of tokens with its KV state.
 * Memory: the weights are the mapped file; the cache is kv_token_bytes per token of context; activations are laid out once, for
 * chunks of 512 tokens. Nothing is allocated while tokens are computed.
 *
 * Contents, in order of the sections:
 *   Model and operations
 *   Limits and errors
 *   Allocation
 *   Files, time, text
 *   Terminal
 *   Vocabulary and BPE
 *   Chat template: values
 *   Chat template: operators
 *   Chat template: filters, tests, methods, globals
 *   Chat template: from source to tree
 *   Chat template: rendering
 *   Model: metadata, tensors, binding
 *   Parts of a model
 *   Synthetic models
 *   CPU kernels
 *   CPU kernels: the oracle
 *   CPU kernels: vector functions for any instruction set
 *   CPU kernels: products with integer activations
 *   CPU kernels: AVX2
 *   CPU kernels: AVX-512 VNNI
 *   CPU kernels: AMX, BF16 tiles
 *   CPU kernels: NEON with dot products
 *   CPU kernels: choice
 *   KV cache
 *   Ranks
 *   CPU operations
 *   Ranks on GPUs
 *   Families
 *   Sampler
 *   Session
 *   Options
 *   Command line
 *   Chat
 *   Keyboard
 *   Edited text and history
 *   Line editor
 *   REPL commands
 *   Plan
 *   Engine
 *   Modes: tokenize, render, info, logits
 *   Modes: perplexity, needle, smoke
 *   Modes: calibrate, compare
 *   Modes: bench
 *   Doctor
 *   Main
 */
#ifndef MOE_TYPES_ONLY
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <jansson.h>
#include <limits.h>
#include <locale.h>
#include <omp.h>
#include <poll.h>
#include <setjmp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <utf8proc.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

#include "gguf_nvfp4.h"

/* ============================================================================================================
 * Model and operations
 *
 * The types that moe_cuda.cu shares: it includes this file with MOE_TYPES_ONLY and sees no more than this section.
 *
 * A forward pass is a straight line of coarse operations from the table `struct ops`; each backend fills in one table.
 * The contract, which graph capture, tensor-parallel ranks and the kernel emulator depend on:
 *   - an operation only enqueues work; it returns nothing, and a forward never branches on data;
 *   - activations are named slots (enum act) whose memory and number format are the backend's; only rows
 *     0..n_tok-1 of a slot mean anything;
 *   - tokens, positions and lengths live in the rank's batch, in the backend's memory;
 *   - there are no globals: everything is reached through struct rank;
 *   - only read_logits waits for results;
 *   - the same n_tok gives the same list of operations.
 * ============================================================================================================ */

enum {
    ERR_MAX = 512, /* bytes of a session error message */
    MAX_LAYERS = 512,
    MAX_EXPERTS = 1024, /* per layer */
    MAX_TOPK = 32       /* experts used per token */
};

/* One matrix in the mapping, or a stack of n_expert of them. */
struct weight {
    const uint8_t *data; /* (n_expert, n_out, n_in) blocks of `type`; NULL: the model has no such tensor */
    uint32_t type;       /* enum gguf_type */
    int n_in, n_out, n_expert;
    size_t row_bytes, expert_bytes; /* strides */
    const float *scale;             /* (n_expert) factors of the products, or NULL for 1 */
    const float *bias;              /* (n_out) added to the product of a plain matrix, or NULL */
    bool has_input_scale;           /* the file was made for 4-bit activations: it has NAME.input_scale */
};

struct layer {
    const float *attn_norm, *ffn_norm; /* (n_embd) */
    struct weight wo;                  /* (n_embd, n_head * head_v) */
    /* grouped-query attention */
    struct weight wq, wk,
        wv; /* (n_head * head_k, n_embd), (n_head_kv * head_k, n_embd), (n_head_kv * head_v, n_embd) */
    const float *q_norm, *k_norm; /* (head_k) */
    /* multi-head latent attention; wq serves models without a low-rank query */
    struct weight wq_a, wq_b;          /* (q_lora, n_embd), (n_head * (nope + rope), q_lora) */
    struct weight wkv_a;               /* (kv_lora + rope, n_embd) */
    struct weight wk_b, wv_b;          /* n_head of (kv_lora, nope); n_head of (v, kv_lora) */
    const float *q_a_norm, *kv_a_norm; /* (q_lora), (kv_lora) */
    /* feed-forward: dense when n_expert is 0 */
    int n_expert;                          /* routed experts of this layer; pruning makes it differ between layers */
    struct weight router;                  /* (n_expert, n_embd) */
    const float *router_bias;              /* (n_expert), added for the selection only; NULL: none */
    struct weight gate, up, down;          /* (n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff), each n_expert times */
    struct weight sh_gate, sh_up, sh_down; /* the shared expert */
    const int32_t *retained; /* (n_expert) ids that the experts had before pruning, ascending; NULL: not recorded */
};

enum arch { ARCH_QWEN3MOE, ARCH_DEEPSEEK2 };
enum gating { GATING_SOFTMAX = 1, GATING_SIGMOID = 2 }; /* values of the metadata key */

/* Which part of a model a rank holds: of n_rank ranks that share every layer (tensor parallelism), in one of n_stage groups that
 * have whole layers each (pipeline). */
struct shard {
    int rank, n_rank, stage, n_stage;
};

enum { MAX_RANKS = 4 /* of all stages together */, ALL_GATHER_MAX = 256 /* bytes */ };

/* The whole of a file, or a rank's part of it: then the sizes are the part's, but for n_vocab. */
struct model {
    struct shard shard;
    int first_layer, first_head_kv, first_id; /* of layers, of the KV heads, of the rows of output */
    struct gguf gguf;
    struct vocab *vocab; /* never NULL after binding; n_tokens 0: the file has none */
    enum arch arch;
    char name[128];
    int n_layer;     /* without the multi-token-prediction layers */
    int n_mtp_layer; /* present in the file, not bound */
    int n_embd, n_vocab, n_ctx_train;
    int n_ids; /* tokens that may be chosen: padding rows of the embedding are not */
    int n_head, n_head_kv;
    int head_k, head_v;                  /* of one head as attention sees it (MLA: nope + rope, v) */
    int q_lora, kv_lora, rope_dim, nope; /* kv_lora 0: no MLA; q_lora 0: wq instead of wq_a, wq_b */
    float rms_eps;
    float attn_scale;       /* factor of q.k before the softmax */
    const float *rope_freq; /* (rope_dim / 2) radians per position */
    float rope_factor;      /* of cos and sin (YaRN) */
    int n_expert_max, n_expert_used;
    int n_ff_dense, n_ff_expert, n_ff_shared; /* widths; 0 where there is no such part */
    int n_group, n_group_used;                /* routing groups; 1: no grouping */
    enum gating gating;
    bool norm_topk_prob; /* the chosen experts' weights are divided by their sum */
    float routed_scaling_factor;
    bool pruned;                /* the file says that experts were removed */
    int n_expert_original;      /* before pruning, 0 if not recorded */
    struct weight embd, output; /* (n_vocab, n_embd) */
    const float *output_norm;   /* (n_embd) */
    struct layer *layers;       /* (n_layer) */
    uint64_t file_bytes;        /* of all parts; 0 for synthetic weights */
    bool synthetic;             /* matrices are addresses without contents: a GPU repacks synthetic rows */
    uint64_t hash;              /* identifies the file to saved sessions */
    void **owned;               /* stb_ds: what model_free frees */
    double load_seconds;
};

/* How a GPU keeps a matrix: in tiles of 16 rows x 64 columns, each expert's last ones filled up. */
enum weight_format {
    FMT_FP4, /* NVFP4, MXFP4: 512 bytes of codes a tile, 64 of scales */
    FMT_Q8,  /* Q8_0: 1024 and 64 */
    FMT_F16  /* BF16, F16, F32: 2048 bytes of halves */
};
enum { TILE_ROWS = 16, TILE_COLS = 64, TILE_SCALES = 64 /* bytes */ };
#define TILE_BYTES(fmt) ((fmt) == FMT_FP4 ? 512 : (fmt) == FMT_Q8 ? 1024 : 2048)

static inline enum weight_format weight_format(uint32_t type) {
    return type == GGUF_NVFP4 || type == GGUF_MXFP4 ? FMT_FP4 : type == GGUF_Q8_0 ? FMT_Q8 : FMT_F16;
}

static inline size_t weight_tiles(const struct weight *w) {
    return (size_t)w->n_expert * (size_t)((w->n_out + TILE_ROWS - 1) / TILE_ROWS) *
           (size_t)((w->n_in + TILE_COLS - 1) / TILE_COLS);
}

/* Whether a GPU has a router's rows in BF16, as they are; otherwise in F32. */
static inline bool router_halves(const struct weight *w) { return w->type == GGUF_BF16 && !w->scale; }

/* The matrices of a layer that there are, in the order of the forward; returns how many. */
enum { LAYER_WEIGHTS = 16 };
static inline int layer_weights(const struct layer *layer, const struct weight *out[LAYER_WEIGHTS]) {
    const struct weight *all[LAYER_WEIGHTS] = {&layer->wq,   &layer->wk,      &layer->wv,    &layer->wq_a,
                                               &layer->wq_b, &layer->wkv_a,   &layer->wk_b,  &layer->wv_b,
                                               &layer->wo,   &layer->router,  &layer->gate,  &layer->up,
                                               &layer->down, &layer->sh_gate, &layer->sh_up, &layer->sh_down};
    int n = 0;
    for (int i = 0; i < LAYER_WEIGHTS; i++)
        if (all[i]->data) out[n++] = all[i];
    return n;
}

/* A gated feed-forward: the routed experts, a dense layer's, or the shared expert. */
struct ffn_weights {
    const struct weight *gate, *up, *down;
};

/* Those of a layer, the shared one last; returns how many. */
static inline int layer_ffns(const struct layer *layer, struct ffn_weights out[2]) {
    const struct ffn_weights all[2] = {{&layer->gate, &layer->up, &layer->down},
                                       {&layer->sh_gate, &layer->sh_up, &layer->sh_down}};
    int n = 0;
    for (int i = 0; i < 2; i++)
        if (all[i].gate->data) out[n++] = all[i];
    return n;
}

/* What is collected of every routed expert (REAP, arXiv 2510.13999, equation 6): f is its output for a token, g its weight where those
 * of all experts of the token add up to 1. */
enum expert_stat {
    STAT_TOKENS,       /* that chose it */
    STAT_WEIGHTED,     /* sum of g |f| */
    STAT_WEIGHTED_MAX, /* largest g |f| */
    STAT_NORM,         /* sum of |f| */
    STAT_GATE,         /* sum of g */
    STATS
};

/* Sums of squares of the columns of a network's inputs: (n_expert, gate->n_in), then (n_expert, down->n_in). */
static inline size_t ffn_in_sum2(const struct ffn_weights *n) {
    return (size_t)n->gate->n_expert * ((size_t)n->gate->n_in + (size_t)n->down->n_in);
}

/* Of all layers before il, those of one layer following each other as in layer_ffns. */
static inline size_t in_sum2_before(const struct model *m, int il) {
    size_t n = 0;
    struct ffn_weights ffns[2];
    for (int i = 0; i < il; i++)
        for (int k = layer_ffns(&m->layers[i], ffns); k-- > 0;) n += ffn_in_sum2(&ffns[k]);
    return n;
}

/* Different experts that n tokens choose together, expected. */
static inline double experts_expected(const struct model *m, int n_expert, int n) {
    double none = 1;
    for (int i = 0; i < n; i++) none *= 1 - (double)m->n_expert_used / n_expert;
    return n_expert * (1 - none);
}

enum act {
    A_X,   /* (n_tok, n_embd) the residual stream */
    A_H,   /* (n_tok, n_embd) its norm */
    A_OUT, /* (n_tok, n_embd) what attention or feed-forward adds to it */
    A_QA,  /* (n_tok, q_lora) */
    A_Q,   /* (n_tok, n_head * head_k) */
    A_K,   /* (n_tok, n_head_kv * head_k); MLA: (n_tok, kv_lora + rope_dim) */
    A_V,   /* (n_tok, n_head_kv * head_v) */
    A_ATT, /* (n_tok, n_head * head_v) */
    ACT_COUNT
};

struct rank;
struct kv_plane;

/* How a token is chosen. */
struct sampling {
    bool greedy;
    float temp, top_p, min_p, repeat_penalty;
    int top_k; /* 0: off */
};

enum { PENALTY_WINDOW = 64 }; /* latest tokens that the repeat penalty looks at */

struct candidate {
    float logit;
    int32_t id;
};

/* What the machine can do, measured; 0: not measured. */
struct rates {
    double bytes; /* that are read (CPU) or copied, reads and writes counted (GPU), per second */
    double mma;   /* multiplications and additions of m16n8k16 with halves and F32 sums, per second */
};

/* One launch of a kernel, or all for matrices of one shape, in one forward and its logits. */
struct profile_row {
    char name[80];
    int calls;
    double seconds, bytes; /* of all calls; bytes 0: negligible */
};

struct ops {
    bool (*begin)(struct rank *r); /* before a forward; true: there is nothing left to do, a recording of it runs */
    void (*end)(struct rank *r);   /* after it */
    void (*embed)(struct rank *r, enum act x); /* x = rows of the embedding, or what the stage before left */
    void (*rmsnorm)(struct rank *r, enum act x, const float *w, enum act out); /* out = norm(x) * w; out may be x */
    /* x += the deltas of all ranks of the stage, in their order, the same bits on each; out = norm(x) * w */
    void (*all_reduce_add_rmsnorm)(struct rank *r, enum act x, enum act delta, const float *w, enum act out);
    void (*final_reduce)(struct rank *r, enum act x,
                         enum act delta); /* the same sum; x goes to the next stage, if there is one */
    void (*linear)(struct rank *r, const struct weight *w, enum act x, enum act out); /* out = W x */
    void (*linear3)(struct rank *r, enum act x, const struct weight *const w[3],
                    const enum act out[3]); /* out[i] = w[i] x; w[i] NULL: that many */
    void (*rope_store_kv)(struct rank *r, int il, enum act q, enum act k,
                          enum act v); /* head norms, rotation of q and k, k and v to the cache */
    void (*attention)(struct rank *r, int il, enum act q, enum act out); /* grouped-query, over the cache */
    void (*mla_store)(struct rank *r, int il, enum act q,
                      enum act kv); /* latent norm, rotation, latent and k_pe to the cache */
    void (*mla_attention)(struct rank *r, int il, enum act q,
                          enum act out);                               /* multi-head latent attention, over the cache */
    void (*ffn)(struct rank *r, int il, enum act x, enum act out);     /* dense SwiGLU */
    void (*moe_ffn)(struct rank *r, int il, enum act x, enum act out); /* router, routed experts, shared expert */
    /* final norm and head for rows first..first+n-1, on all ranks of the last stage; the results are the first one's: */
    void (*logits)(struct rank *r, int first, int n);
    const float *(*read_logits)(struct rank *r, int row); /* (n_vocab), row 0 is `first`; waits */
    /* chooses a token by row 0 of the logits; recent: the n_recent <= PENALTY_WINDOW latest ids; uniform: a draw from [0, 1) */
    void (*sample)(struct rank *r, const struct sampling *o, const int32_t *recent, int n_recent, double uniform);
    int32_t (*read_token)(struct rank *r); /* the one chosen; waits */
    /* rows first..first+n-1 of a plane to or from (store) host memory: data (n, row_bytes), scale (n, n_group); NULL: not this one */
    void (*kv_copy)(struct rank *r, const struct kv_plane *p, size_t first, size_t n, uint8_t *data, float *scale,
                    bool store);
    void (*wait)(struct rank *r); /* until everything that was enqueued is done */
    /* What was collected since the start, see struct rank; in_sum2 NULL: not wanted. Waits. */
    void (*read_stats)(struct rank *r, double *stats, float *in_sum2);
    struct rates (*measure)(struct rank *r);
    /* Times every kernel of run(arg), a forward; returns the launches in their order, at most n; a NULL pointer: the backend cannot. */
    int (*profile)(struct rank *r, void (*run)(void *), void *arg, struct profile_row *rows, int n);
    void (*close)(struct rank *r); /* frees what the rank holds */
};

enum {
    CHUNK_MAX = 512,   /* tokens of one forward on a CPU */
    LOGIT_ROWS = 16,   /* rows of one logits operation */
    LATENT_GROUP = 128 /* latents under one FP8 scale */
};

/* Sizes and limits of the kernels of a GPU. */
#ifdef CUEMU
#define ALLREDUCE_SLOT_FLOATS 3072 /* few, so that sums come in pieces */
#else
#define ALLREDUCE_SLOT_FLOATS (1 << 20)
#endif
enum {
    DECODE_MAX_TOKENS = 16,    /* a forward of more is prefill, with other kernels */
    PREFILL_MAX_TOKENS = 4096, /* tokens of one forward at most */
    SCRATCH_SHARE = 24,        /* activations take at most this part of the memory; longer chunks would need more */
    LIST_TILE = 128,           /* tokens of a tile of the list of a grouped product */
    SPLITS_MAX = 384,          /* parts of a context */
    NORM_MAX = 16384,          /* values of a row, */
    HEAD_MAX = 256,            /* of a head of grouped-query attention */
    ROUTE_MAX_GROUPS = 32,     /* of experts */
    SAMPLE_BLOCKS = 64,        /* that look for the best logits, */
    SAMPLE_BINS = 4096,        /* which are counted by size */
    ALLREDUCE_BLOCKS = 32,     /* of a sum over ranks; */
    ALLREDUCE_SLOT = ALLREDUCE_SLOT_FLOATS, /* floats that a rank pushes at once */
    STAGING_BUFFERS = FMT_F16 + 1, /* on the way to the GPU: two take turns, or one holds synthetic rows of a format */
    STAGING_BYTES = 32 << 20,      /* of each */
    PAGE_BYTES = 2 << 20           /* to which the driver rounds up what is allocated */
};

enum kv_type { KV_BF16, KV_FP8, KV_F32 };

/* One of the two arrays of a layer's cache. FP8 rows carry one F32 scale per `group` values, in an array of their own. */
struct kv_plane {
    uint8_t *data; /* (n_ctx, row_bytes) */
    float *scale;  /* (n_ctx, n_group); FP8 only */
    enum kv_type type;
    int width, group, n_group; /* values per row, per scale, scales per row */
    size_t row_bytes;          /* a multiple of 16 */
};

/* GQA: k (n_head_kv * head_k), v (n_head_kv * head_v). MLA: k the normed latent (kv_lora), v the rotated shared key (rope_dim). */
struct kv_layer {
    struct kv_plane k, v;
};

static inline struct kv_plane kv_plane_make(enum kv_type type, int width, int group) {
    struct kv_plane p;
    memset(&p, 0, sizeof p);
    p.type = type, p.width = width, p.group = group, p.n_group = (width + group - 1) / group;
    p.row_bytes = ((size_t)width * (type == KV_F32 ? 4 : type == KV_BF16 ? 2 : 1) + 15) / 16 * 16;
    return p;
}

/* The planes of a layer, without memory. */
static inline struct kv_layer kv_layer_make(const struct model *m, enum kv_type type) {
    struct kv_layer y;
    if (m->kv_lora) {
        y.k = kv_plane_make(type, m->kv_lora, LATENT_GROUP);
        y.v = kv_plane_make(type == KV_F32 ? KV_F32 : KV_BF16, m->rope_dim, m->rope_dim);
    } else {
        y.k = kv_plane_make(type, m->n_head_kv * m->head_k, m->head_k);
        y.v = kv_plane_make(type, m->n_head_kv * m->head_v, m->head_v);
    }
    return y;
}

/* Bytes of the cache per token, all layers. */
static inline size_t kv_token_bytes(const struct model *m, enum kv_type type) {
    struct kv_layer y = kv_layer_make(m, type);
    size_t scales = (y.k.type == KV_FP8 ? (size_t)y.k.n_group : 0) + (y.v.type == KV_FP8 ? (size_t)y.v.n_group : 0);
    return (size_t)m->n_layer * (y.k.row_bytes + y.v.row_bytes + scales * sizeof(float));
}

static inline void act_widths(const struct model *m, int width[ACT_COUNT]) {
    width[A_X] = width[A_H] = width[A_OUT] = m->n_embd;
    width[A_QA] = m->q_lora, width[A_Q] = m->n_head * m->head_k, width[A_ATT] = m->n_head * m->head_v;
    width[A_K] = m->kv_lora ? m->kv_lora + m->rope_dim : m->n_head_kv * m->head_k;
    width[A_V] = m->kv_lora ? 0 : m->n_head_kv * m->head_v;
}

/* Floats from row to row where several ranks' logits come together: their pieces are moved by 16 bytes. */
static inline size_t logits_stride(int n_vocab) { return ((size_t)n_vocab + 3) / 4 * 4; }

/* Bytes of a row's codes in FP4, and of its scales: a k64-tile has 4, and a copy moves 16. */
#define FP4_CODE_BYTES(n_in)  (((n_in) + 63) / 64 * 32)
#define FP4_SCALE_BYTES(n_in) (((n_in) + 255) / 256 * 16)

/* Rows of a file on their way into a matrix' tiles: 16 n_rt from row 16 rt0 on, as far as there are, of experts e0 .. e0 + n_e - 1. */
struct repack {
    size_t row_bytes;
    uint32_t type;
    int e0, n_e, rt0, n_rt;
    int shift; /* F16: halves hold weight * 2^shift; MXFP4: a block of exponent byte e gets the scale 2^(e - shift) */
    float factor; /* 2^shift */
    float unit;   /* of the format: what the expansion to halves leaves out */
};

/* By what a GPU's activations are sized. */
struct gpu_sizes {
    int chunk, splits;      /* tokens of a forward, parts of a context in decode, at most */
    bool w4a4, nccl, stats; /* prefill of experts in FP4; sums by NCCL; their results are looked at */
};

/* The activations of a rank on a GPU, each as BUFFER(field of struct cuda, type, count), for the model m, a part p, and the sizes s. What
 * few tokens need is laid out for DECODE_MAX_TOKENS. */
/* clang-format off: of products it makes pointers */
#define GPU_BUFFERS(BUFFER)                                                                                        \
    do {                                                                                                           \
        int width[ACT_COUNT];                                                                                      \
        const size_t decode = DECODE_MAX_TOKENS, n = (size_t)s.chunk, k = (size_t)m->n_expert_used, nk = n * k;    \
        const size_t experts = (size_t)m->n_expert_max, embd = (size_t)m->n_embd, ff = (size_t)m->n_ff_expert;     \
        const size_t rope = (size_t)m->rope_dim, heads = (size_t)m->n_head, kv_lora = (size_t)m->kv_lora;          \
        const size_t jobs = decode * k < experts ? decode * k : experts, tiles = nk / LIST_TILE + experts + 1;     \
        const size_t all = (size_t)(m->n_ff_dense > m->n_ff_shared ? m->n_ff_dense : m->n_ff_shared);              \
        act_widths(m, width);                                                                                      \
        for (int a = 0; a < ACT_COUNT; a++) {                                                                      \
            const bool half = a == A_H || a == A_QA || a == A_Q || a == A_ATT;                                     \
            BUFFER(x32[a], float, a == A_ATT ? 0 : n * (size_t)width[a]);                                          \
            BUFFER(x16[a], uint16_t, half ? n *(size_t)width[a] : 0);                                              \
        }                                                                                                          \
        BUFFER(cs, float, n *rope / 2);                                                                            \
        BUFFER(sn, float, n *rope / 2);                                                                            \
        BUFFER(q_absorbed, uint16_t, kv_lora ? n *heads *(kv_lora + rope) : 0);                                    \
        BUFFER(latent_out, uint16_t, n *heads *kv_lora);                                                           \
        BUFFER(partials, float, (size_t)s.splits *decode *heads *((kv_lora ? kv_lora : (size_t)m->head_v) + 2));   \
        BUFFER(hidden, uint16_t, (nk > jobs * decode ? nk : jobs * decode) * ff);                                  \
        BUFFER(hidden_shared, uint16_t, (n > decode ? n : decode) * all);                                          \
        BUFFER(x4.codes, uint8_t, s.w4a4 ? n *FP4_CODE_BYTES(embd) : 0);                                           \
        BUFFER(x4.scales, uint8_t, s.w4a4 ? n *FP4_SCALE_BYTES(embd) : 0);                                         \
        BUFFER(x4.scale, float, s.w4a4 ? n : 0);                                                                   \
        BUFFER(hidden4.codes, uint8_t, s.w4a4 ? nk *FP4_CODE_BYTES(ff) : 0);                                       \
        BUFFER(hidden4.scales, uint8_t, s.w4a4 ? nk *FP4_SCALE_BYTES(ff) : 0);                                     \
        BUFFER(hidden4.scale, float, s.w4a4 ? nk : 0);                                                             \
        BUFFER(expert_out, float, n > decode || s.stats ? nk * embd : 0);                                          \
        BUFFER(route.logits, float, n *experts);                                                                   \
        BUFFER(route.id, int32_t, nk);                                                                             \
        BUFFER(route.weight, float, nk);                                                                           \
        BUFFER(route.arrived, uint32_t, 1);                                                                        \
        BUFFER(route.n_jobs, int32_t, 1);                                                                          \
        BUFFER(route.job_expert, int32_t, jobs + 1);                                                               \
        BUFFER(route.job_weight, float, decode *(decode * k + 1));                                                 \
        BUFFER(sort.row, int32_t, nk);                                                                             \
        BUFFER(sort.inverse, int32_t, nk);                                                                         \
        BUFFER(sort.first, int32_t, experts + 1);                                                                  \
        BUFFER(sort.tile_expert, int32_t, tiles);                                                                  \
        BUFFER(sort.tile_first, int32_t, tiles);                                                                   \
        BUFFER(sort.tile_count, int32_t, tiles);                                                                   \
        BUFFER(sort.n_tiles, int32_t, 1);                                                                          \
        if (p.stage == p.n_stage - 1 && (p.n_rank == 1 || p.rank)) /* the first of several has them in its area */ \
            BUFFER(logits, float, LOGIT_ROWS *(p.rank ? logits_stride(m->output.n_out) : (size_t)m->n_vocab));     \
        BUFFER(gathered, float, s.nccl ? (size_t)p.n_rank *decode *embd : 0);                                      \
        BUFFER(sum16, uint16_t, s.nccl ? n *embd : 0);                                                             \
        BUFFER(sample.block_best, uint64_t, SAMPLE_BLOCKS);                                                        \
        BUFFER(sample.block_mass, double, SAMPLE_BLOCKS);                                                          \
        BUFFER(sample.bins, int, SAMPLE_BINS);                                                                     \
        BUFFER(sample.arrived, uint32_t, 1);                                                                       \
        BUFFER(sample.token, int32_t, 1);                                                                          \
    } while (0)
/* clang-format on */

/* What other ranks write to: on the receiver's GPU, or in host memory. */
struct mailbox {
    uint32_t *reduce_flag; /* (n_rank, ALLREDUCE_BLOCKS) */
    uint32_t *logits_flag; /* (n_rank) */
    uint32_t *hidden_flag; /* of the stage before */
    uint32_t *credit;      /* of the stage behind: what it has taken */
    float *slot;           /* (2, n_rank, ALLREDUCE_SLOT), of several ranks */
    float *x;              /* (chunk, n_embd) from the stage before */
    float *logits;         /* (LOGIT_ROWS, stride) of all ranks of the last stage, in the first of several */
};

/* In host memory, between a rank's GPU and its thread. */
struct heartbeat {
    uint32_t sums;    /* of the GPU: a sign of life; */
    uint32_t waiting; /* for whom it has waited long last, see WAIT_CODE */
    uint32_t abort;   /* of the thread */
};

enum channel { CH_ALLREDUCE, CH_SEND, CH_RECV, CH_LOGITS, CHANNELS };

/* On the rank's GPU. */
struct sequence {
    uint32_t done[CHANNELS], arrived[CHANNELS]; /* kernels that have ended; blocks of the one that runs */
    uint32_t aborted;                           /* nothing waits any more */
};

/* A rank of the stage, the channel, the sum of the forward. */
#define WAIT_CODE(rank, channel, place) ((uint32_t)(1 + (rank) + 16 * (channel) + 256 * (place)))

/* How long a rank has waited for its GPU. */
struct backoff {
    uint64_t turns;
    double idle, last; /* seconds, those in which the program was suspended not counted; the time of the latest look */
    uint32_t seen;     /* sums of all ranks then */
};

/* What one rank computes with. Sized at start; nothing is allocated afterwards. */
struct rank {
    const struct model *m; /* its part of the model */
    const struct ops *ops;
    struct process_group *pg; /* the others */
    int index;                /* among all ranks: stage * n_rank + rank */
    unsigned n_all_reduce;    /* sums over the ranks of its stage in this forward */
    char link[192];           /* GPU: how it adds up with the others; empty: there are none */
    int n_ctx, chunk;         /* tokens of context, of one forward at most */
    enum kv_type kv_type;
    struct kv_layer *kv;    /* (n_layer); planes in the backend's memory */
    int n_tok;              /* the batch: tokens of this forward, */
    int32_t pos;            /* position of the first, */
    int32_t *tokens;        /* (chunk) ids */
    int width[ACT_COUNT];   /* values per row */
    float *act[ACT_COUNT];  /* the slots in F32, in the backend's memory; GPU: NULL where it has no such form */
    void **owned;           /* stb_ds: allocations in the backend's memory */
    struct candidate *work; /* (n_ids), of the sampler, in host memory */
    double *stats;  /* (n_layer, n_expert_max, STATS) of the experts, in the backend's memory; NULL: not collected */
    float *in_sum2; /* (in_sum2_before(m, n_layer)) likewise, of the inputs of feed-forwards */
    size_t bytes, kv_bytes;          /* of activations; of the cache */
    size_t weight_bytes, free_bytes; /* GPU: of its copy of the weights; what is left */
    char name[128];                  /* what it runs on */

    /* the rest of a GPU's */
    struct cuda *cuda;
    int device, n_sm; /* its number; multiprocessors */
    char *err;        /* ERR_MAX bytes for the first error of the start; NULL later */
    bool failed;
    bool shared; /* another rank is on the same GPU */
    struct gpu_sizes sizes;
    int staging_next;                       /* the next one of the upload; */
    unsigned filled;                        /* stages with synthetic weights, bits */
    bool by_nccl[DECODE_MAX_TOKENS + 1];    /* sums of so many tokens */
    struct heartbeat *heartbeat[MAX_RANKS]; /* of all ranks of all stages; NULL: this one is alone */
    struct mailbox mailbox[MAX_RANKS];      /* likewise, as this one's GPU reaches them */
    struct sequence *sequence;              /* NULL: likewise */

    /* the rest of a CPU's */
    const struct kernels *k;
    int n_threads;
    float *cos, *sin;     /* (chunk, rope_dim / 2) of the batch's positions */
    uint8_t *pack;        /* packed inputs: 2 * chunk rows, or MLA absorbed: one per token and head */
    uint8_t *pack_h;      /* packed hidden rows of the feed-forward */
    float *hidden;        /* hidden rows of the feed-forward, one after the other */
    float *route;         /* (chunk, n_expert_max) router logits */
    int32_t *route_id;    /* (chunk, n_expert_used) */
    float *route_w;       /* (chunk, n_expert_used) */
    struct ffn_job *jobs; /* (n_expert_max + 1) */
    int n_jobs;
    int32_t *job_rows; /* tokens of the jobs */
    float *job_w;      /* their weights */
    float *norm_parts; /* with stats: (tiles of an expert's output, chunk * n_expert_used) squared norms of its parts */
    float *q_absorbed; /* MLA absorbed: (n, n_head, kv_lora + rope_dim), and the latent outputs */
    float *partials;   /* partial results of a partitioned context */
    float *logits;     /* (LOGIT_ROWS, n_vocab) */
    int32_t chosen;    /* the token of `sample` */
    uint8_t *scratch;  /* (n_threads, scratch_bytes) */
    size_t scratch_bytes;
};

/* Activations of the routed experts in prefill: in FP4 where the file was made for that and the GPU can, always halves, or
 * always FP4. */
enum moe_act { MOE_ACT_AUTO, MOE_ACT_F16, MOE_ACT_FP4 };

/* Who adds up what ranks on GPUs have, for up to 16 tokens: NCCL, the kernel of moe_cuda.cu, or whichever is faster here. */
enum allreduce { ALLREDUCE_AUTO, ALLREDUCE_NCCL, ALLREDUCE_ONESHOT };

/* A choice of a token by a GPU. */
struct sample_job {
    int n, limit; /* ids; how many of the best top-k leaves, n: all */
    int n_recent; /* 0 where nothing is penalised */
    bool greedy;
    float repeat_penalty, temp, top_p, min_p;
    double uniform;
    int32_t recent[PENALTY_WINDOW];
    uint32_t recent_mask[64]; /* bit id % 2048 of those: most ids need not be looked up */
};

/* What moe_cuda.cu offers, in a program that is built with it. */
struct cuda_options {
    struct process_group *pg;     /* NULL: there is one rank, */
    int index;                    /* or which of them */
    int device[MAX_RANKS], n_ctx; /* of all ranks; n_ctx 0: the trained length, or what fits */
    enum allreduce allreduce;
    int kv_splits; /* of the context in decode at most; 0: what fills the GPU */
    enum moe_act moe_act;
    enum kv_type kv;
    bool stats, in_sum2;                         /* collect them */
    size_t reserve;                              /* bytes to leave free */
    void (*progress)(double done, double total); /* bytes of weights that are there */
};

/* What a GPU is, for --doctor. */
struct gpu_facts {
    char name[64], bus[24]; /* as the driver calls it; its place on the bus */
    int major, minor;       /* compute capability */
    int driver, runtime;    /* CUDA's versions, 1000 * major + 10 * minor */
    int block_shared;       /* bytes of shared memory that a block can have */
    int n_sm;               /* multiprocessors */
    size_t total, free;     /* bytes of memory */
    double rate;            /* bytes that it reads per second; 0: it does not tell */
    char image[160];        /* probed: why no kernel of this program runs on it; empty: they do */
};

#ifdef __cplusplus
extern "C" {
#endif
int cuda_device_count(char *err);                                    /* 0: none can be used, and why */
bool cuda_peer(int from, int to);                                    /* can it write to the other's memory? */
const char *cuda_facts(int device, struct gpu_facts *f, bool probe); /* NULL, or why it cannot be asked */
/* Writes from one GPU to another (or within one): bytes per second of large copies, seconds of a small one; 0: not measured. */
void cuda_pair(int from, int to, double *rate, double *latency);
int cuda_nccl(void);                         /* its version; 0: the program was built without it */
const char *cuda_targets(void);              /* the chips that the program was built for */
bool cuda_attends(bool mla, int dk, int dv); /* whether there are kernels for keys and values of these widths */
/* Device memory of a rank, zeroed, until it ends; NULL after an error, which is rank_fail's. */
void *cuda_memory(struct rank *r, size_t bytes, const char *what);
/* Likewise host memory that all GPUs reach. */
void *cuda_host_memory(struct rank *r, size_t bytes, const char *what);
/* Between the host's memory and the GPU's, in the order of what is enqueued. False after an error. */
bool cuda_copy(struct rank *r, void *to, const void *from, size_t bytes, const char *what);
bool cuda_sync(struct rank *r, const char *what); /* waits for what was enqueued */
void cuda_reach(struct rank *r, int device);      /* from now on its kernels can write to that GPU's memory, a peer's */
/* Seconds that the GPU takes for what run(r, arg) enqueues; 0 after an error. */
double cuda_seconds(struct rank *r, void (*run)(struct rank *r, void *arg), void *arg, const char *what);
/* Steps of the start of a rank, in this order; errors are rank_fail's. */
void cuda_open(struct rank *r);
/* Room for a matrix in tiles. False: it is there already, or after an error. */
bool cuda_matrix(struct rank *r, const struct weight *w, const char *what);
/* Host memory, STAGING_BYTES, that cuda_repack takes `bytes` of and then repacks: (n_e, rows, row_bytes). NULL after an error. */
uint8_t *cuda_staging(struct rank *r, int stage);
void cuda_repack(struct rank *r, const struct weight *w, struct repack k, int stage, size_t bytes);
/* Of the matrix that was repacked: F16: bits of the largest |weight|; MXFP4: the largest exponent byte, 255 - the smallest. */
bool cuda_range(struct rank *r, uint32_t range[2]);
/* The copy of something that `key` names; it is made at the first call. NULL: there is no key, or after an error. */
const void *cuda_vector(struct rank *r, const void *key, const void *from, size_t bytes, const char *what);
void cuda_uploaded(struct rank *r);  /* everything */
void cuda_nccl_init(struct rank *r); /* NCCL */
void cuda_allocate(struct rank *r);  /* cache and activations */
/* what moe.c offers to it and its tests */
/* Copies a matrix in tiles. Halves hold 2^8 times the weight, so that whatever BF16 has above 2^-33 is exact; a matrix with weights
 * beyond 255 gets another power of two. MXFP4's exponents must fit UE4M3's 18 octaves, shifted as the matrix needs. */
void gpu_upload_matrix(struct rank *r, const struct weight *w, const char *what);
/* Parts of a context in decode, to fill 2 blocks per multiprocessor; n_head_blocks: KV heads, or groups of 16 heads of MLA. */
int attn_splits(int n_sm, int n_head_blocks);
void rank_fatal(const char *what);                             /* ends the program with a line */
void gpu_full(struct rank *r, size_t bytes, const char *what); /* an error: there is no room for them */
/* Keeps the first error of a start and lets the others know; once the program runs an error ends it. Always false. */
__attribute__((format(printf, 2, 3))) bool rank_fail(struct rank *r, const char *fmt, ...);
/* all (n, bytes) = what each of the n ranks of all stages has in mine, bytes <= ALL_GATHER_MAX; waits for all of them */
void rank_all_gather(struct rank *r, const void *mine, void *all, size_t bytes);
void rank_barrier(struct rank *r); /* waits for all of them */
/* Hears the others out: context and chunk become the smallest of all. False: somebody has failed. */
bool rank_agree(struct rank *r);
/* Between two looks at a GPU that is not ready: false: what it does is to be given up. */
bool rank_keep_waiting(struct rank *r, struct backoff *p, const char *what);
/* Bytes of a GPU's cache, which begins at base unless that is NULL. */
size_t rank_cache(struct rank *r, uint8_t *base);
int32_t sampling_choose(const struct sampling *o, struct candidate *work, int n, const float *logits,
                        const int32_t *recent, int n_recent, double uniform);
void sampling_job(struct sample_job *p, const struct sampling *o, int n, const int32_t *recent, int n_recent,
                  double uniform);
/* The thread's next launch moves so many bytes; `fmt` says of what. May be called several times. */
__attribute__((format(printf, 2, 3))) void profile_next(double bytes, const char *fmt, ...);
/* Before a launch its name as the source spells it, after it NULL. The event to be recorded; -1: none. */
int profile_launch(const char *kernel);
bool profiling(void);
void profile_start(struct profile_row *rows, int n);
int profile_end(void); /* rows that there are */
#ifdef __cplusplus
}
#endif

#ifndef MOE_TYPES_ONLY

/* ============================================================================================================
 * Limits and errors
 *
 * Two classes of error. Start-up errors end the program: one line on stderr that names the file or option, what was
 * expected and what was found; exit 1 (2 for wrong usage). Session errors are returned: functions give -1 and write
 * one line into `char err[ERR_MAX]`; the caller rolls back and lives on.
 * ============================================================================================================ */

#define MOE_VERSION "0.1.0"

enum exit_code { EXIT_OK = 0, EXIT_RUN = 1, EXIT_USAGE = 2, EXIT_INTERRUPT = 130 };

/* Set by SIGINT; polled at token and chunk boundaries. Counts, so that a second Ctrl-C can be told from the first. */
static volatile sig_atomic_t interrupted;

static void term_restore(void);
static void temp_remove(void);
static void message_neutralise(char *s);

static _Thread_local char rank_label[32]; /* "rank 1 of 4: " where a thread works for one of several */
static bool ranks_at_work;                /* there are threads that may never end */

/* What a report that is under way does with the message that ends the program, before that is printed; it must not die. */
static struct {
    void (*run)(void *arg, const char *line);
    void *arg;
} last_words;

__attribute__((format(printf, 2, 3), noreturn)) static void die_code(int code, const char *fmt, ...) {
    static int dying;
    char line[2048];
    va_list ap;
    while (__atomic_exchange_n(&dying, 1, __ATOMIC_SEQ_CST) && ranks_at_work) pause(); /* another thread has the word */
    term_restore();
    temp_remove();
    fflush(stdout);
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    message_neutralise(line);
    if (last_words.run && code == EXIT_RUN) last_words.run(last_words.arg, line);
    fprintf(stderr, "moe: %s%s\n", rank_label, line);
    if (ranks_at_work) _exit(code);
    exit(code);
}

#define die(...)       die_code(EXIT_RUN, __VA_ARGS__)
#define die_usage(...) die_code(EXIT_USAGE, __VA_ARGS__)

/* Writes a session error; evaluates to -1, so that `return fail(err, ...)` reads well. */
__attribute__((format(printf, 2, 3))) static int fail(char *err, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, ERR_MAX, fmt, ap);
    va_end(ap);
    message_neutralise(err);
    return -1;
}

/* ============================================================================================================
 * Allocation
 *
 * Memory that runs out ends the program. Between alloc_guard_begin and alloc_guard_end nothing may be allocated: the
 * token loop and everything below it works in memory laid out at start.
 * ============================================================================================================ */

static _Thread_local const char *alloc_guard; /* what is being guarded, or NULL */

static void alloc_guard_begin(const char *what) { alloc_guard = what; }
static void alloc_guard_end(void) { alloc_guard = NULL; }

static void alloc_check(bool got, size_t n) {
    if (alloc_guard) die("internal error: %zu bytes allocated during %s", n, alloc_guard);
    if (!got && n) die("out of memory (%zu bytes)", n);
}

static void *xmalloc(size_t n) {
    void *p = malloc(n);
    alloc_check(p != NULL, n);
    return p;
}

static void *xcalloc(size_t n, size_t size) {
    void *p = calloc(n, size);
    alloc_check(p != NULL, size && n > SIZE_MAX / size ? SIZE_MAX : n * size);
    return p;
}

static void *xrealloc(void *p, size_t n) {
    void *q = realloc(p, n);
    alloc_check(q != NULL, n);
    return q;
}

/* Zeroed and aligned to a cache line. */
static void *xaligned(size_t n) {
    void *p = NULL;
    n = (n + 63) / 64 * 64;
    if (posix_memalign(&p, 64, n ? n : 64)) p = NULL;
    alloc_check(p != NULL, n ? n : 64);
    memset(p, 0, n ? n : 64);
    return p;
}

static char *xstrndup(const char *s, size_t n) {
    char *p = xmalloc(n + 1);
    if (n) memcpy(p, s, n);
    p[n] = 0;
    return p;
}

static char *xstrdup(const char *s) { return xstrndup(s, strlen(s)); }

/* Dynamic arrays are stb_ds's (arrput, arrlen, arrsetlen, arrfree); its hash maps only with integers and pointers as keys, each of one
 * thread: what they share is a seed, of which each copies some value. One macro call per expression, no side effects in arguments;
 * a function that may grow an array takes a pointer to it. */
#define STBDS_REALLOC(context, p, n) xrealloc(p, n)
#define STBDS_FREE(context, p)       free(p)
#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>

/* Byte strings that grow are `char *` arrays of stb_ds, without a terminating NUL unless sb_cstr adds it. */
static void sb_put(char **sb, const char *s, size_t n) {
    if (n) memcpy(arraddnptr(*sb, n), s, n);
}

static void sb_puts(char **sb, const char *s) { sb_put(sb, s, strlen(s)); }

__attribute__((format(printf, 2, 3))) static void sb_printf(char **sb, const char *fmt, ...) {
    char tmp[1024];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(tmp, sizeof tmp, fmt, ap);
    va_end(ap);
    if (n < (int)sizeof tmp) {
        sb_put(sb, tmp, n > 0 ? (size_t)n : 0);
        return;
    }
    size_t at = arrlenu(*sb);
    arrsetlen(*sb, at + (size_t)n + 1);
    va_start(ap, fmt);
    vsnprintf(*sb + at, (size_t)n + 1, fmt, ap);
    va_end(ap);
    arrsetlen(*sb, at + (size_t)n);
}

/* NUL behind the last byte, not counted in arrlen. Valid until the next change. */
static const char *sb_cstr(char **sb) {
    arrput(*sb, 0);
    (void)arrpop(*sb);
    return *sb;
}

/* ============================================================================================================
 * Files, time, text
 * ============================================================================================================ */

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Appends everything that fd still gives. 0, or -1 with errno set. */
static int read_fd(int fd, char **sb) {
    for (;;) {
        size_t at = arrlenu(*sb);
        char *p = arraddnptr(*sb, 65536);
        ssize_t n = read(fd, p, 65536);
        arrsetlen(*sb, at + (size_t)(n > 0 ? n : 0));
        if (n == 0) return 0;
        if (n < 0 && (errno != EINTR || interrupted)) return -1;
    }
}

/* Appends a whole file. */
static int read_file(const char *path, char **sb, char *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(err, "cannot open '%s': %s", path, strerror(errno));
    int rc = read_fd(fd, sb);
    if (rc) fail(err, "cannot read '%s': %s", path, strerror(errno));
    close(fd);
    return rc;
}

/* Refuses what is not a regular file: a pipe would be waited for. 0, or -1 with a message. */
static int file_check(const char *path, struct stat *st, char *err) {
    if (stat(path, st)) return fail(err, "cannot open '%s': %s", path, strerror(errno));
    return S_ISREG(st->st_mode) ? 0 : fail(err, "'%s' is not a regular file", path);
}

/* The unfinished output, while temp_exists: whatever ends the program removes it. One at a time. */
static char temp_path[PATH_MAX + 32], temp_target[PATH_MAX]; /* the target behind all symbolic links */
static volatile sig_atomic_t temp_exists;

/* Safe in a signal handler. */
static void temp_remove(void) {
    if (temp_exists) unlink(temp_path);
    temp_exists = 0;
}

/* Begins a file that becomes `path` when it is complete, so that a failure leaves what was there. NULL with a message. */
static FILE *temp_create(const char *path, mode_t mode, char *err) {
    struct stat st;
    if (strlen(path) >= sizeof temp_target)
        return fail(err, "cannot write '%.80s...': %s", path, strerror(ENAMETOOLONG)), NULL;
    strcpy(temp_target, path);
    if (!lstat(path, &st) && (!realpath(path, temp_target) || stat(path, &st)))
        return fail(err, "cannot replace '%s': %s", path, strerror(errno)), NULL;
    if (!stat(path, &st) && !S_ISREG(st.st_mode))
        return fail(err, "cannot replace '%s': it is not a regular file", path), NULL;
    snprintf(temp_path, sizeof temp_path, "%s.tmp-%d", temp_target, (int)getpid());
    temp_exists = 1;
    int fd = open(temp_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w+");
    if (!f) fail(err, "cannot write '%s': %s", path, strerror(errno)), temp_remove();
    return f;
}

/* Ends it: what was written gets its name, unless `bad` or a failure. 0, or -1 with a message. */
static int temp_finish(FILE *f, const char *path, bool bad, char *err) {
    int rc = 0;
    if (bad || ferror(f) || fflush(f) || fsync(fileno(f)))
        rc = fail(err, "cannot write '%s': %s", path, strerror(errno));
    if (fclose(f) && !rc) rc = fail(err, "cannot write '%s': %s", path, strerror(errno));
    if (!rc && rename(temp_path, temp_target))
        rc = fail(err, "cannot rename '%s' to '%s': %s", temp_path, temp_target, strerror(errno));
    if (!rc) temp_exists = 0;
    temp_remove();
    return rc;
}

/* Bytes of memory that can still be taken without swapping, the cached pages of files among them. */
static uint64_t memory_available(void) {
    char *text = NULL, err[ERR_MAX];
    unsigned long long kib = 0;
    const char *at = read_file("/proc/meminfo", &text, err) ? NULL : strstr(sb_cstr(&text), "MemAvailable:");
    bool known = at && sscanf(at, "MemAvailable: %llu kB", &kib) == 1;
    arrfree(text);
    return known ? kib << 10 : (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Bytes of the UTF-8 sequence at s: its length if complete and valid, 0 if it is valid so far but cut off by n, -1 if it
 * is invalid. */
static int utf8_sequence(const char *s, size_t n) {
    const uint8_t *u = (const uint8_t *)s;
    utf8proc_int32_t cp;
    if (!n) return 0;
    int want = u[0] < 0x80                   ? 1
               : u[0] >= 0xc2 && u[0] < 0xe0 ? 2
               : (u[0] & 0xf0) == 0xe0       ? 3
               : u[0] >= 0xf0 && u[0] < 0xf5 ? 4
                                             : -1;
    if (want < 0) return -1;
    if (n >= (size_t)want) return utf8proc_iterate(u, want, &cp) == want ? want : -1;
    uint8_t t[4] = {0x80, 0x80, 0x80, 0x80};
    memcpy(t, u, n);
    if (n < 2 && (u[0] == 0xe0 || u[0] == 0xf0)) t[1] = 0xa0; /* the smallest second byte that is not overlong */
    return utf8proc_iterate(t, want, &cp) == want ? 0 : -1;
}

static bool utf8_valid(const char *s, size_t n) {
    while (n) {
        int k = utf8_sequence(s, n);
        if (k <= 0) return false;
        s += k, n -= (size_t)k;
    }
    return true;
}

/* A message quotes files and templates: controls, and bytes that are not UTF-8, become '?', so that it is one line that no
 * terminal obeys. */
static void message_neutralise(char *s) {
    for (size_t n = strlen(s); n;) {
        int k = utf8_sequence(s, n);
        bool control = k == 1 ? (uint8_t)*s < 32 || *s == 127 : k == 2 && (uint8_t)s[0] == 0xc2 && (uint8_t)s[1] < 0xa0;
        if (k < 1) k = 1, control = true;
        if (control) memset(s, '?', (size_t)k);
        s += k, n -= (size_t)k;
    }
}

/* Splitmix64: the random numbers of the sampler, of tests and of synthetic weights; the same everywhere. */
static uint64_t rng_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double rng_uniform(uint64_t *state) { return (double)(rng_next(state) >> 11) * 0x1p-53; } /* [0, 1) */

/* 1.5 GiB */
static const char *with_unit(double bytes, char out[32]) {
    static const char *const unit[] = {"bytes", "KiB", "MiB", "GiB"};
    int u = 0;
    while (bytes >= 1024 && u < 3) bytes /= 1024, u++;
    snprintf(out, 32, "%.*f %s", u ? 1 : 0, bytes, unit[u]);
    return out;
}

/* 1,234,567 */
static const char *with_commas(uint64_t v, char out[32]) {
    char tmp[32];
    int n = snprintf(tmp, sizeof tmp, "%llu", (unsigned long long)v), k = 0;
    for (int i = 0; i < n; i++) {
        out[k++] = tmp[i];
        if ((n - i - 1) % 3 == 0 && i + 1 < n) out[k++] = ',';
    }
    out[k] = 0;
    return out;
}

/* ============================================================================================================
 * Terminal
 *
 * stdout carries the answer, stderr everything else. Whether either is a terminal, and whether colour is wanted, is
 * decided once. Text from a model or a file reaches a terminal only through term_neutralise, which shows control characters
 * instead of obeying them.
 * ============================================================================================================ */

static struct {
    bool in_tty, out_tty, err_tty;
    bool err_moves;              /* stderr is a terminal that can rewrite its line */
    bool colour_out, colour_err; /* a terminal, NO_COLOR unset, TERM not dumb */
    volatile sig_atomic_t raw;   /* the line editor changed the terminal's mode */
    struct termios cooked;       /* valid while raw */
    bool dialogue;               /* somebody can type commands */
    int out_error;               /* errno of the first write to stdout that failed */
} term;

static void term_init(void) {
    const char *t = getenv("TERM"), *no = getenv("NO_COLOR");
    bool able = t && *t && strcmp(t, "dumb"), colour = able && !(no && *no);
    term.in_tty = isatty(0), term.out_tty = isatty(1), term.err_tty = isatty(2);
    term.err_moves = term.err_tty && able;
    term.colour_out = term.out_tty && colour, term.colour_err = term.err_tty && colour;
}

/* Safe in a signal handler: gives the terminal back as it was found. */
static void term_restore(void) {
    static const char reset[] = "\033[0m\033[?2004l\033[?25h";
    if (term.raw) {
        tcsetattr(0, TCSANOW, &term.cooked);
        term.raw = 0; /* last: a signal in between restores again */
        if (term.out_tty && write(1, reset, sizeof reset - 1) < 0) return;
    } else if (term.colour_out && write(1, reset, 4) < 0) return;
}

/* Flushes stdout and remembers why that failed. */
static void out_flush(void) {
    if ((fflush(stdout) || ferror(stdout)) && !term.out_error) term.out_error = errno ? errno : EIO;
}

/* Rewrites the line of progress on stderr, cut to the terminal's width, where it can be rewritten; "" removes it. */
__attribute__((format(printf, 1, 2))) static void status_line(const char *fmt, ...) {
    struct winsize w;
    char line[256];
    va_list ap;
    if (!term.err_moves) return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    int cols = !ioctl(2, TIOCGWINSZ, &w) && w.ws_col ? w.ws_col : 80;
    fprintf(stderr, "\r%.*s\033[K", cols - 1, line);
    fflush(stderr);
}

/* One warning or remark on stderr, in its own line, dim on a terminal. */
__attribute__((format(printf, 1, 2))) static void note(const char *fmt, ...) {
    va_list ap;
    if (term.colour_err) fputs("\033[2m", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputs(term.colour_err ? "\033[0m\n" : "\n", stderr);
}

/* Appends s to *out with C0 (but \n and \t), DEL and C1 controls made visible and malformed UTF-8 replaced. s consists of
 * whole UTF-8 sequences (the detokeniser holds the rest back), so no state is carried. */
static void term_neutralise(char **out, const char *s, size_t n) {
    for (size_t i = 0; i < n;) {
        uint8_t c = (uint8_t)s[i];
        int k = utf8_sequence(s + i, n - i);
        if (k <= 0) {
            sb_puts(out, "\xef\xbf\xbd");
            i++;
        } else if (c == '\n' || c == '\t' || (c >= 32 && c < 127)) {
            arrput(*out, (char)c);
            i++;
        } else if (c < 32 || c == 127) {
            sb_printf(out, "\\x%02x", c);
            i++;
        } else if (c == 0xc2 && (uint8_t)s[i + 1] < 0xa0) {
            sb_printf(out, "\\x%02x", (uint8_t)s[i + 1]);
            i += 2;
        } else {
            sb_put(out, s + i, (size_t)k);
            i += (size_t)k;
        }
    }
}
/* ============================================================================================================
 * Vocabulary and BPE
 *
 * Byte-level BPE as Hugging Face's tokenizers do it: text is cut at special tokens, the stretches between are brought
 * to NFC if the model wants that, cut into pieces by the model's expressions, and merged from single bytes upwards.
 *
 * The vocabulary is immutable after vocab_load and points into the GGUF image, which must outlive it; any number of
 * threads may tokenise at once. Ordinary tokens (found by merging) and special ones (found by their literal text) are
 * kept apart, so that merging can never produce a special token. Whether text may name a special token depends on where
 * the text came from; this section is told by origin bytes and flags and knows nothing of templates or messages.
 * ============================================================================================================ */

/* Values of tokenizer.ggml.token_type. */
enum token_type { TOKEN_NORMAL = 1, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_UNUSED, TOKEN_BYTE };

/* Of every byte of a text: whether the chat template wrote it, or it came from a message, a file or the user. */
enum { ORIGIN_TEMPLATE = 0, ORIGIN_DATA = 1 };

enum tokenize_flags {
    TOKENIZE_CONTROL = 1, /* control tokens in text of the template are recognised */
    TOKENIZE_TAGS = 2     /* user-defined tokens that look like tags are recognised in data too */
};

enum {
    VOCAB_MAX = 1 << 24, /* tokens, and merges */
    VOCAB_MAX_EXPRS = 6, /* expressions of a pre-tokenizer */
    VOCAB_PROBES = 1024, /* slots looked at for one entry; the largest vocabularies need less than 100 */
    SPECIAL_MAX = 1024,  /* bytes of a special token: at each byte of a text as many are compared */
    PIECE_MAX = 1 << 28, /* bytes merged at once; longer pieces are cut, so that symbols fit 32 bits */
    NFC_MAX_MARKS = 256, /* combining marks sorted at once; sorting is quadratic in utf8proc */
    RANK_NONE = -1       /* also of an empty slot */
};

struct bytes_slot {
    uint32_t hash;
    int32_t id; /* -1: empty */
};

struct merge_slot {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: empty */
    int32_t rank, id;
};

struct special_token {
    struct gguf_str text;
    int32_t id;
};

/* Open-addressed tables have 2^bits slots, at most two thirds of them used; linear probing, of at most VOCAB_PROBES slots. */
struct vocab {
    int32_t n_tokens;
    int32_t bos, eos, eot, pad; /* -1: none */
    bool add_bos, nfc, ignore_merges;
    struct gguf_str chat_template; /* p NULL: none */

    struct gguf_str *token; /* [n_tokens] the bytes a token stands for, in decoded or in the image */
    uint8_t *type;          /* [n_tokens] enum token_type */
    bool *stop;             /* [n_tokens] ends a turn */
    char *decoded;          /* bytes of ordinary tokens, end to end */

    struct bytes_slot *by_bytes; /* ordinary tokens by their bytes; of equal ones the lowest id */
    struct merge_slot *merges;   /* NULL: two symbols merge if their bytes make a token, of rank its id */
    int by_bytes_bits, merges_bits;
    int32_t byte_id[256]; /* token of a single byte, -1: none, such bytes are dropped */

    struct special_token *special; /* sorted by text, then id: an implicit trie */
    uint32_t n_special;
    uint32_t special_first[257]; /* [special_first[b], special_first[b + 1]) begin with byte b */

    pcre2_code *expr[VOCAB_MAX_EXPRS];
    int n_exprs;
    pcre2_match_context *match_context;
};

/* ---- pre-tokenizers ---- */

/* White space as Unicode has it and Rust and Oniguruma read \s. PCRE2's own \s would add U+180E. */
#define WS             "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define BLANKS         "[" WS "]+(?![^" WS "])|[" WS "]+"
#define LINES_BLANKS   "[" WS "]*[\\r\\n]+|" BLANKS
#define CONTRACTION    "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define WORD_PREFIX    "[^\\r\\n\\p{L}\\p{N}]?"
#define SYMBOLS        " ?[^" WS "\\p{L}\\p{N}]+"
#define GPT2           "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|" SYMBOLS "|" BLANKS
#define QWEN2          CONTRACTION "|" WORD_PREFIX "\\p{L}+|\\p{N}|" SYMBOLS "[\\r\\n]*|" LINES_BLANKS
#define LLAMA3         CONTRACTION "|" WORD_PREFIX "\\p{L}+|\\p{N}{1,3}|" SYMBOLS "[\\r\\n]*|" LINES_BLANKS
#define CASED(UP, LOW) WORD_PREFIX UP "*" LOW "+" CONTRACTION "?|" WORD_PREFIX UP "+" LOW "*" CONTRACTION "?"

/* Letters that are upper, title or without case, and those that are lower or without case; for Kimi without Han, which
 * a class of PCRE2 can only say as the complement of everything else. */
#define UPPER      "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER      "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define UPPER_XHAN "[^\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{sc:Han}]"
#define LOWER_XHAN "[^\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{sc:Han}]"

/* clang-format off */
/* The cased letters as DeepSeek's first tokenizer lists them. */
#define DEEPSEEK_LETTERS \
    "A-Za-z\\x{b5}À-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\\x{386}Έ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ" \
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\\x{1f7d}ᾀ-ᾴᾶ-ᾼ\\x{1fbe}ῂ-ῄῆ-ῌῐ-\\x{1fd3}ῖ-\\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\\x{2126}ℨ" \
    "\\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
#define DEEPSEEK_MARKS "!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}"
#define DEEPSEEK_CJK   "[\\x{800}-\\x{9fa5}\\x{ac00}-\\x{d7ff}]+"

/* A pre-tokenizer is a sequence of expressions: each cuts the pieces of the one before into its matches and the gaps
 * between them. No expression repeats a group, so that none needs a stack that grows with the text, and none is worse
 * than linear on a long run: hence the look-behind in DeepSeek's "blanks at the end". Names and the defaults of missing
 * keys are those of llama.cpp, expressions those of the models' own tokenizer.json (codes above 0x7f as numbers where
 * two characters look the same). */
static const struct pre_tokenizer {
    const char *names; /* values of tokenizer.ggml.pre */
    bool nfc, ignore_merges, add_bos;
    const char *expr[VOCAB_MAX_EXPRS];
} pre_tokenizers[] = {
    {.names = "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling",
     .expr = {GPT2}},
    {.names = "default", .expr = {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {.names = "deepseek-llm",
     .expr = {"[\\r\\n]", "[" WS "]?[" DEEPSEEK_LETTERS "]+", "[" WS "]?[" DEEPSEEK_MARKS "]+",
              "(?<![" WS "])[" WS "]++\\z", DEEPSEEK_CJK, "\\p{N}"}},
    {.names = "deepseek-coder",
     .expr = {"[\\r\\n]", "[" WS "]?\\p{L}+", "[" WS "]?\\p{P}+", DEEPSEEK_CJK, "\\p{N}"}},
    {.names = "deepseek-v3 joyai-llm hunyuan-dense",
     .expr = {"\\p{N}{1,3}", "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{30ff}]+",
              "[!-/:-@\\[-`{-~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
              " ?[\\p{P}\\p{S}]+[\\r\\n]*|" LINES_BLANKS}},
    {.names = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
     .ignore_merges = true, .add_bos = true, .expr = {LLAMA3}},
    {.names = "glm4 chatglm-bpe dbrx smaug-bpe", .expr = {LLAMA3}},
    {.names = "qwen2", .nfc = true, .expr = {QWEN2}},
    {.names = "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", .expr = {QWEN2}},
    {.names = "qwen35", .nfc = true,
     .expr = {CONTRACTION "|" WORD_PREFIX "[\\p{L}\\p{M}]+|\\p{N}| ?[^" WS "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|"
              LINES_BLANKS}},
    {.names = "gpt-4o llama4 kanana2 talkie minimax-m2",
     .expr = {CASED(UPPER, LOWER) "|\\p{N}{1,3}|" SYMBOLS "[\\r\\n/]*|" LINES_BLANKS}},
    {.names = "kimi-k2", .ignore_merges = true,
     .expr = {"\\p{sc:Han}+|" CASED(UPPER_XHAN, LOWER_XHAN) "|\\p{N}{1,3}|" SYMBOLS "[\\r\\n]*|" LINES_BLANKS}},
};
/* clang-format on */

enum { N_PRE_TOKENIZERS = sizeof pre_tokenizers / sizeof *pre_tokenizers };

/* Whether `word` is one of the words of a space-separated list. */
static bool word_in_list(struct gguf_str word, const char *list) {
    for (const char *p = list; *p;) {
        size_t n = strcspn(p, " ");
        if (n == word.n && !memcmp(p, word.p, n)) return true;
        p += n + (p[n] == ' ');
    }
    return false;
}

static int vocab_compile_exprs(struct vocab *v, const struct pre_tokenizer *pre, char *err) {
    v->match_context = pcre2_match_context_create(NULL);
    if (!v->match_context) return fail(err, "out of memory for the pre-tokenizer");
    pcre2_set_match_limit(v->match_context, UINT32_MAX); /* the number of steps grows with a run's length */
    for (int i = 0; i < VOCAB_MAX_EXPRS && pre->expr[i]; i++) {
        int code;
        size_t at;
        v->expr[i] =
            pcre2_compile((PCRE2_SPTR)pre->expr[i], PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
        if (!v->expr[i])
            return fail(err, "PCRE2 refuses expression %d of the pre-tokenizer '%s': error %d at offset %zu", i + 1,
                        pre->names, code, at);
        pcre2_jit_compile(v->expr[i], PCRE2_JIT_COMPLETE); /* without JIT matching is slower, not different */
        v->n_exprs++;
    }
    return 0;
}

/* ---- tables ---- */

/* The byte that a character of GPT-2's alphabet stands for, or -1. Printable Latin-1 stands for itself, the other 68 bytes
 * are U+0100 and up in their order. */
static int alphabet_byte(int cp) {
    if ((cp > 32 && cp < 127) || (cp > 160 && cp < 256 && cp != 173)) return cp;
    int k = cp - 256;
    return k < 0 || k > 67 ? -1 : k < 33 ? k : k < 67 ? k + 94 : 173;
}

/* Undoes GPT-2's alphabet: out has room for n bytes. Bytes written, or -1 if some character is not of the alphabet. */
static int64_t alphabet_decode(const char *s, size_t n, char *out) {
    const uint8_t *u = (const uint8_t *)s;
    int64_t k = 0;
    for (size_t i = 0; i < n;) {
        int cp = u[i++];
        if (cp >= 0x80) {
            if (cp < 0xc2 || cp > 0xdf || i == n || (u[i] & 0xc0) != 0x80) return -1;
            cp = (cp & 31) << 6 | (u[i++] & 63);
        }
        int b = alphabet_byte(cp);
        if (b < 0) return -1;
        out[k++] = (char)b;
    }
    return k;
}

/* log2 of the slots for n entries. */
static int table_bits(uint64_t n) {
    int bits = 4;
    while (1ull << bits < n + n / 2) bits++;
    return bits;
}

/* FNV-1a, finished by a multiplication so that the upper bits are good for the slot. */
static uint32_t bytes_hash(const char *s, size_t n) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)s[i]) * 16777619u;
    return h * 0x9e3779b1u;
}

/* The slot of the ordinary token with these bytes, or the empty one where it belongs; NULL: neither is near. */
static struct bytes_slot *bytes_slot(const struct vocab *v, const char *s, size_t n, uint32_t hash) {
    uint32_t mask = (1u << v->by_bytes_bits) - 1, i = hash >> (32 - v->by_bytes_bits);
    for (int probe = 0; probe < VOCAB_PROBES; probe++, i = (i + 1) & mask) {
        struct bytes_slot *e = &v->by_bytes[i];
        if (e->id < 0) return e;
        if (e->hash == hash && v->token[e->id].n == n && !memcmp(v->token[e->id].p, s, n)) return e;
    }
    return NULL;
}

static int32_t bytes_find(const struct vocab *v, const char *s, size_t n) {
    const struct bytes_slot *e = bytes_slot(v, s, n, bytes_hash(s, n));
    return e ? e->id : -1;
}

static struct merge_slot *merge_slot(const struct vocab *v, uint64_t pair) {
    uint32_t mask = (1u << v->merges_bits) - 1;
    uint32_t i = (uint32_t)(pair * 0x9e3779b97f4a7c15u >> (64 - v->merges_bits));
    for (int probe = 0; probe < VOCAB_PROBES; probe++, i = (i + 1) & mask)
        if (v->merges[i].pair == pair || v->merges[i].pair == UINT64_MAX) return &v->merges[i];
    return NULL;
}

/* ---- special tokens ---- */

static int special_compare(const void *a, const void *b) {
    const struct special_token *x = a, *y = b;
    int c = gguf_str_cmp(x->text, y->text);
    return c ? c : (x->id > y->id) - (x->id < y->id);
}

static bool is_special(int type) {
    return type == TOKEN_CONTROL || type == TOKEN_USER_DEFINED || type == TOKEN_UNKNOWN;
}

/* <think>, [TOOL_CALLS]: tokens that carry structure rather than text. */
static bool is_tag(struct gguf_str s) {
    return s.n > 1 && ((s.p[0] == '<' && s.p[s.n - 1] == '>') || (s.p[0] == '[' && s.p[s.n - 1] == ']'));
}

/* The first of special[lo, hi) whose byte at `depth` is not below b. All are longer than depth and equal before it. */
static uint32_t special_lower(const struct vocab *v, uint32_t lo, uint32_t hi, size_t depth, int b) {
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((uint8_t)v->special[mid].text.p[depth] < b) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

static bool special_allowed(const struct vocab *v, int32_t id, const uint8_t *origin, size_t n, unsigned flags) {
    if (v->type[id] != TOKEN_USER_DEFINED) {
        if (!(flags & TOKENIZE_CONTROL)) return false;
    } else if (flags & TOKENIZE_TAGS || !is_tag(v->token[id])) return true;
    return !origin || !memchr(origin, ORIGIN_DATA, n);
}

/* The longest special token at the head of the n bytes of text that flags and origin allow; its id and length, or -1. */
static int32_t special_match(const struct vocab *v, const char *text, size_t n, const uint8_t *origin, unsigned flags,
                             size_t *len) {
    uint32_t lo = v->special_first[(uint8_t)text[0]], hi = v->special_first[(uint8_t)text[0] + 1];
    int32_t best = -1;
    for (size_t depth = 1; lo < hi; depth++) {
        for (; lo < hi && v->special[lo].text.n == depth; lo++)
            if ((best < 0 || *len < depth) && special_allowed(v, v->special[lo].id, origin, depth, flags))
                best = v->special[lo].id, *len = depth;
        if (depth == n) break;
        uint8_t b = (uint8_t)text[depth];
        lo = special_lower(v, lo, hi, depth, b);
        hi = special_lower(v, lo, hi, depth, b + 1);
    }
    return best;
}

static int32_t special_find(const struct vocab *v, struct gguf_str text) {
    uint32_t lo = 0, hi = v->n_special;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (gguf_str_cmp(v->special[mid].text, text) < 0) lo = mid + 1;
        else hi = mid;
    }
    return lo < v->n_special && !gguf_str_cmp(v->special[lo].text, text) ? v->special[lo].id : -1;
}

/* ---- loading ---- */

/* A token id under a key; -1 if there is none or it is no token of this vocabulary. */
static int32_t vocab_key_id(const struct vocab *v, const struct gguf *g, const char *key) {
    const struct gguf_kv *kv = gguf_find(g, key);
    int64_t id;
    return kv && !kv->is_array && gguf_elem_int(kv, 0, &id) && id >= 0 && id < v->n_tokens ? (int32_t)id : -1;
}

static bool vocab_key_bool(const struct gguf *g, const char *key, bool missing) {
    const struct gguf_kv *kv = gguf_find(g, key);
    int64_t b;
    return kv && !kv->is_array && gguf_elem_int(kv, 0, &b) ? b != 0 : missing;
}

/* An array of strings with 1 to VOCAB_MAX elements. */
static int vocab_key_strings(const struct gguf *g, const char *key, const struct gguf_kv **kv, char *err) {
    *kv = gguf_find(g, key);
    if (!*kv) return fail(err, "the key %s is missing", key);
    if (!(*kv)->is_array || (*kv)->type != GGUF_V_STR) return fail(err, "the key %s is not an array of strings", key);
    if ((*kv)->n < 1 || (*kv)->n > VOCAB_MAX)
        return fail(err, "the key %s has %llu elements, expected 1 to %d", key, (unsigned long long)(*kv)->n,
                    VOCAB_MAX);
    return 0;
}

static int vocab_read_types(struct vocab *v, const struct gguf *g, char *err) {
    const struct gguf_kv *kv = gguf_find(g, "tokenizer.ggml.token_type");
    int64_t t;
    memset(v->type, TOKEN_NORMAL, (size_t)v->n_tokens);
    if (!kv) return 0;
    if (!kv->is_array || !gguf_elem_int(kv, 0, &t) || kv->n < (uint64_t)v->n_tokens)
        return fail(err, "tokenizer.ggml.token_type: expected an array of %d integers, found %llu elements",
                    v->n_tokens, (unsigned long long)kv->n);
    for (int32_t i = 0; i < v->n_tokens; i++)
        if (gguf_elem_int(kv, (uint64_t)i, &t) && t >= TOKEN_NORMAL && t <= TOKEN_BYTE) v->type[i] = (uint8_t)t;
    return 0;
}

static void vocab_index_special(struct vocab *v) {
    qsort(v->special, v->n_special, sizeof *v->special, special_compare);
    for (uint32_t b = 0, i = 0; b <= 256; b++) {
        v->special_first[b] = i;
        while (i < v->n_special && (uint8_t)v->special[i].text.p[0] == b) i++;
    }
}

/* A user-defined token may hold the place of a byte that UTF-8 never has (DeepSeek's first vocabulary: 0xf6). */
static void vocab_index_bytes(struct vocab *v) {
    for (int b = 0; b < 256; b++) v->byte_id[b] = bytes_find(v, (char[]){(char)b}, 1);
    for (uint32_t i = 0; i < v->n_special; i++) {
        const struct special_token *s = &v->special[i];
        char b[2];
        if (v->type[s->id] != TOKEN_USER_DEFINED || s->text.n > 2 || alphabet_decode(s->text.p, s->text.n, b) != 1)
            continue;
        int32_t *id = &v->byte_id[(uint8_t)b[0]];
        if (*id < 0) *id = s->id;
    }
}

/* Tokens, their types, and the tables of ordinary and special tokens. An ordinary token that is not spelt in GPT-2's
 * alphabet stands for its own text and cannot be found by merging. */
static int vocab_read_tokens(struct vocab *v, const struct gguf *g, char *err) {
    const struct gguf_kv *kv;
    if (vocab_key_strings(g, "tokenizer.ggml.tokens", &kv, err)) return -1;
    v->n_tokens = (int32_t)kv->n;
    v->token = xcalloc(kv->n, sizeof *v->token);
    v->type = xmalloc(kv->n);
    v->stop = xcalloc(kv->n, sizeof *v->stop);
    if (vocab_read_types(v, g, err)) return -1;
    size_t text = 0;
    const uint8_t *p = kv->data;
    for (int32_t i = 0; i < v->n_tokens; i++) {
        v->token[i] = gguf_next_str(&p);
        v->n_special += is_special(v->type[i]) && v->token[i].n;
        text += v->token[i].n;
    }
    v->decoded = xmalloc(text);
    v->by_bytes_bits = table_bits(kv->n);
    v->by_bytes = xmalloc(sizeof *v->by_bytes << v->by_bytes_bits);
    memset(v->by_bytes, 0xff, sizeof *v->by_bytes << v->by_bytes_bits);
    v->special = xcalloc(v->n_special, sizeof *v->special);
    uint32_t n_special = 0;
    char *out = v->decoded;
    for (int32_t i = 0; i < v->n_tokens; i++) {
        struct gguf_str *t = &v->token[i];
        if (is_special(v->type[i])) {
            if (t->n > SPECIAL_MAX)
                return fail(err, "the special token %d has %zu bytes, expected at most %d", i, t->n, SPECIAL_MAX);
            if (t->n) v->special[n_special++] = (struct special_token){*t, i};
            continue;
        }
        int64_t n = alphabet_decode(t->p, t->n, out);
        if (n <= 0) continue;
        *t = (struct gguf_str){out, (size_t)n};
        uint32_t hash = bytes_hash(out, t->n);
        struct bytes_slot *e = bytes_slot(v, out, t->n, hash);
        if (!e) return fail(err, "tokenizer.ggml.tokens: more than %d tokens collide", VOCAB_PROBES);
        if (e->id < 0) *e = (struct bytes_slot){hash, i};
        out += n;
    }
    vocab_index_special(v);
    vocab_index_bytes(v);
    return 0;
}

/* "left right" in GPT-2's alphabet, the earlier the stronger; of equal ones the first counts. A merge of which a part or
 * the result is no ordinary token can never be applied and is left out. */
static int vocab_read_merges(struct vocab *v, const struct gguf *g, char *err) {
    const struct gguf_kv *kv;
    if (vocab_key_strings(g, "tokenizer.ggml.merges", &kv, err)) return -1;
    v->merges_bits = table_bits(kv->n);
    v->merges = xmalloc(sizeof *v->merges << v->merges_bits);
    memset(v->merges, 0xff, sizeof *v->merges << v->merges_bits);
    const uint8_t *p = kv->data;
    char *both = NULL; /* the bytes of left and right */
    int rc = 0;
    for (int32_t rank = 0; rank < (int32_t)kv->n && !rc; rank++) {
        struct gguf_str s = gguf_next_str(&p);
        const char *gap = s.n ? memchr(s.p + 1, ' ', s.n - 1) : NULL;
        if (!gap) continue;
        size_t left = (size_t)(gap - s.p);
        arrsetlen(both, s.n);
        int64_t nl = alphabet_decode(s.p, left, both);
        int64_t nr = nl > 0 ? alphabet_decode(gap + 1, s.n - left - 1, both + nl) : -1;
        if (nr <= 0) continue;
        size_t n = (size_t)(nl + nr);
        int32_t l = bytes_find(v, both, (size_t)nl), r = bytes_find(v, both + nl, (size_t)nr),
                id = bytes_find(v, both, n);
        if (l < 0 || r < 0 || id < 0) continue;
        uint64_t pair = (uint64_t)l << 32 | (uint32_t)r;
        struct merge_slot *e = merge_slot(v, pair);
        if (!e) rc = fail(err, "tokenizer.ggml.merges: more than %d merges collide", VOCAB_PROBES);
        else if (e->pair != pair) *e = (struct merge_slot){pair, rank, id};
    }
    arrfree(both);
    return rc;
}

/* Texts that are control tokens wherever they are special at all: some files call them user-defined. Those of llama.cpp that
 * end a turn, the earlier ones first choice for eot, and GLM's turns of others. */
static const struct {
    const char *text;
    bool stop;
} known_control[] = {
    {"<|eot_id|>", true},      {"<|im_end|>", true},      {"[e~[", true},
    {"<|return|>", true},      {"<|call|>", true},        {"<|end|>", true},
    {"<end_of_turn>", true},   {"<|eom_id|>", true},      {"<｜end▁of▁sentence｜>", true},
    {"<|endoftext|>", true},   {"<|end_of_text|>", true}, {"[EOT]", true},
    {"[EOS]", true},           {"<EOT>", true},           {"</s>", true},
    {"<|user|>", true},        {"<|observation|>", true}, {"<|fim_pad|>", true},
    {"<|repo_name|>", true},   {"<|file_sep|>", true},    {"<|fim_prefix|>", false},
    {"<|fim_suffix|>", false}, {"<|fim_middle|>", false},
};

static void vocab_find_stops(struct vocab *v, const struct gguf *g) {
    const struct gguf_kv *kv = gguf_find(g, "tokenizer.ggml.eos_token_ids");
    int64_t id;
    v->eot = vocab_key_id(v, g, "tokenizer.ggml.eot_token_id");
    int32_t ids[] = {v->eos, v->eot, vocab_key_id(v, g, "tokenizer.ggml.eom_token_id")};
    for (int i = 0; i < 3; i++)
        if (ids[i] >= 0) v->stop[ids[i]] = true;
    for (uint64_t i = 0; kv && i < kv->n && gguf_elem_int(kv, i, &id); i++)
        if (id >= 0 && id < v->n_tokens) v->stop[id] = true;
    /* where <|return|> and <|call|> end a turn, <|end|> only ends a message (harmony) */
    bool harmony = special_find(v, (struct gguf_str){"<|return|>", 10}) >= 0 &&
                   special_find(v, (struct gguf_str){"<|call|>", 8}) >= 0;
    for (size_t i = 0; i < sizeof known_control / sizeof *known_control; i++) {
        const char *text = known_control[i].text;
        int32_t t = special_find(v, (struct gguf_str){text, strlen(text)});
        if (t < 0) continue;
        v->type[t] = TOKEN_CONTROL;
        if (!known_control[i].stop || (harmony && !strcmp(text, "<|end|>"))) continue;
        v->stop[t] = true;
        if (v->eot < 0) v->eot = t;
    }
}

static void vocab_free(struct vocab *v) {
    for (int i = 0; i < v->n_exprs; i++) pcre2_code_free(v->expr[i]);
    pcre2_match_context_free(v->match_context);
    free(v->token), free(v->type), free(v->stop), free(v->decoded);
    free(v->by_bytes), free(v->merges), free(v->special);
    memset(v, 0, sizeof *v);
}

static int vocab_read(struct vocab *v, const struct gguf *g, char *err) {
    struct gguf_str model, name;
    char shown[64];
    if (!gguf_get_str(g, "tokenizer.ggml.model", &model)) return fail(err, "the key tokenizer.ggml.model is missing");
    if (!gguf_str_eq(model, "gpt2"))
        return fail(err, "the tokenizer '%s' is not supported, only 'gpt2' (byte-level BPE) is",
                    gguf_printable(model, shown, sizeof shown));
    if (!gguf_get_str(g, "tokenizer.ggml.pre", &name)) return fail(err, "the key tokenizer.ggml.pre is missing");
    const struct pre_tokenizer *pre = pre_tokenizers, *end = pre + N_PRE_TOKENIZERS;
    while (pre < end && !word_in_list(name, pre->names)) pre++;
    if (pre == end)
        return fail(err, "the pre-tokenizer '%s' (tokenizer.ggml.pre) is not known",
                    gguf_printable(name, shown, sizeof shown));
    if (vocab_compile_exprs(v, pre, err) || vocab_read_tokens(v, g, err)) return -1;
    /* a vocabulary converted from tiktoken has no merges: there a token's id is its rank */
    bool ranked = gguf_str_eq(name, "kimi-k2") && !gguf_find(g, "tokenizer.ggml.merges");
    if (!ranked && vocab_read_merges(v, g, err)) return -1;
    v->nfc = vocab_key_bool(g, "tokenizer.ggml.normalizer.nfc", pre->nfc);
    v->ignore_merges = vocab_key_bool(g, "tokenizer.ggml.ignore_merges", pre->ignore_merges);
    v->add_bos = vocab_key_bool(g, "tokenizer.ggml.add_bos_token", pre->add_bos);
    v->bos = vocab_key_id(v, g, "tokenizer.ggml.bos_token_id");
    v->eos = vocab_key_id(v, g, "tokenizer.ggml.eos_token_id");
    v->pad = vocab_key_id(v, g, "tokenizer.ggml.padding_token_id");
    v->add_bos = v->add_bos && v->bos >= 0;
    vocab_find_stops(v, g);
    gguf_get_str(g, "tokenizer.chat_template", &v->chat_template);
    return 0;
}

/* Reads the tokenizer of a GGUF file, which must outlive v. 0, or -1 with a message and v empty. */
static int vocab_load(struct vocab *v, const struct gguf *g, char *err) {
    memset(v, 0, sizeof *v);
    int rc = vocab_read(v, g, err);
    if (rc) vocab_free(v);
    return rc;
}

/* ---- look-ups ---- */

/* The bytes a token stands for; none for an id outside the vocabulary. */
static struct gguf_str vocab_bytes(const struct vocab *v, int32_t id) {
    return id >= 0 && id < v->n_tokens ? v->token[id] : (struct gguf_str){"", 0};
}

static int vocab_type(const struct vocab *v, int32_t id) {
    return id >= 0 && id < v->n_tokens ? v->type[id] : TOKEN_UNUSED;
}

/* Whether the token ends a turn. */
static bool vocab_is_stop(const struct vocab *v, int32_t id) { return id >= 0 && id < v->n_tokens && v->stop[id]; }

/* ---- merging ---- */

/* Symbol i begins at byte i of the piece; symbols that were absorbed keep their place, without a rank. */
struct bpe_symbol {
    int32_t id;          /* -1: a byte without a token */
    int32_t rank;        /* of the merge with the next symbol; RANK_NONE: there is none */
    int32_t merged;      /* the token it gives */
    uint32_t prev, next; /* next of the last is the length of the piece */
};

/* What one call of tokenize works with; all arrays are stb_ds's. */
struct tokenizer {
    const struct vocab *v;
    struct bpe_symbol *symbols;
    uint64_t *heap;     /* rank << 32 | symbol, smallest first; stale where the symbol has another rank by now */
    size_t *ends, *cut; /* where pieces end, before and after an expression */
    pcre2_match_data *match;
    int32_t **out;
};

static void heap_push(uint64_t **heap, uint64_t x) {
    arrput(*heap, x);
    uint64_t *h = *heap;
    size_t i = arrlenu(h) - 1;
    for (; i && h[(i - 1) / 2] > x; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = x;
}

static uint64_t heap_pop(uint64_t *h) {
    uint64_t top = h[0], x = arrpop(h);
    size_t n = arrlenu(h), i = 0;
    for (size_t c = 1; c < n; c = 2 * i + 1) {
        c += c + 1 < n && h[c + 1] < h[c];
        if (h[c] >= x) break;
        h[i] = h[c], i = c;
    }
    if (n) h[i] = x;
    return top;
}

/* Finds the merge of symbol i with its right neighbour in a piece of n bytes. */
static void bpe_rate(struct tokenizer *t, const char *piece, uint32_t n, uint32_t i) {
    const struct vocab *v = t->v;
    struct bpe_symbol *s = &t->symbols[i], *r = &t->symbols[s->next];
    s->rank = RANK_NONE;
    if (s->next == n) return;
    if (v->merges) {
        const struct merge_slot *e = merge_slot(v, (uint64_t)s->id << 32 | (uint32_t)r->id);
        s->rank = e ? e->rank : RANK_NONE, s->merged = e ? e->id : -1;
    } else {
        s->rank = s->merged = bytes_find(v, piece + i, r->next - i);
    }
    if (s->rank != RANK_NONE) heap_push(&t->heap, (uint64_t)s->rank << 32 | i);
}

/* Appends the tokens of one piece: the strongest merge first, of equal ones the leftmost. O(n log n). */
static void bpe_piece(struct tokenizer *t, const char *piece, uint32_t n) {
    const struct vocab *v = t->v;
    if (v->ignore_merges) {
        int32_t id = bytes_find(v, piece, n);
        if (id >= 0) {
            arrput(*t->out, id);
            return;
        }
    }
    arrsetlen(t->symbols, (size_t)n + 1); /* one more, so that the neighbour of the last can be named */
    arrsetlen(t->heap, 0);
    for (uint32_t i = 0; i < n; i++)
        t->symbols[i] = (struct bpe_symbol){v->byte_id[(uint8_t)piece[i]], RANK_NONE, -1, i - 1, i + 1};
    for (uint32_t i = 0; i + 1 < n; i++) bpe_rate(t, piece, n, i);
    while (arrlenu(t->heap)) {
        uint64_t best = heap_pop(t->heap);
        uint32_t i = (uint32_t)best;
        struct bpe_symbol *s = &t->symbols[i];
        if (s->rank != (int32_t)(best >> 32)) continue;
        struct bpe_symbol *r = &t->symbols[s->next];
        s->id = s->merged;
        s->next = r->next;
        r->rank = RANK_NONE;
        if (s->next < n) t->symbols[s->next].prev = i;
        bpe_rate(t, piece, n, i);
        if (i) bpe_rate(t, piece, n, s->prev); /* symbol 0 is never absorbed: only it has none before */
    }
    for (uint32_t i = 0; i < n; i = t->symbols[i].next)
        if (t->symbols[i].id >= 0) arrput(*t->out, t->symbols[i].id);
}

/* ---- text to tokens ---- */

/* Cuts every piece of text (t->ends) into the matches of an expression and the gaps between them. */
static void split_pieces(struct tokenizer *t, const pcre2_code *expr, const char *text) {
    const size_t *ov = pcre2_get_ovector_pointer(t->match);
    arrsetlen(t->cut, 0);
    for (size_t i = 0, begin = 0; i < arrlenu(t->ends); begin = t->ends[i++]) {
        size_t n = t->ends[i] - begin, done = 0;
        while (done < n &&
               pcre2_match(expr, (PCRE2_SPTR)text + begin, n, done, PCRE2_NO_UTF_CHECK, t->match, t->v->match_context) >
                   0 &&
               ov[1] > done) {
            if (ov[0] > done) arrput(t->cut, begin + ov[0]);
            arrput(t->cut, begin + ov[1]);
            done = ov[1];
        }
        if (done < n) arrput(t->cut, begin + n);
    }
    size_t *swap = t->ends;
    t->ends = t->cut, t->cut = swap;
}

/* Appends the NFC form of valid UTF-8. Runs of combining marks are sorted NFC_MAX_MARKS at a time. */
static void nfc_append(char **out, const char *s, size_t n) {
    for (size_t end = 0, marks = 0; n; s += end, n -= end, end = marks = 0) {
        for (utf8proc_int32_t cp; end < n && marks < NFC_MAX_MARKS;) {
            end += (size_t)utf8proc_iterate((const uint8_t *)s + end, (utf8proc_ssize_t)(n - end), &cp);
            marks = utf8proc_get_property(cp)->combining_class ? marks + 1 : 0;
        }
        uint8_t *nfc = NULL;
        utf8proc_ssize_t k =
            utf8proc_map((const uint8_t *)s, (utf8proc_ssize_t)end, &nfc, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        if (k < 0) die("cannot bring %zu bytes to NFC: %s", end, utf8proc_errmsg(k));
        sb_put(out, (const char *)nfc, (size_t)k);
        free(nfc);
    }
}

/* Every character below U+0300 is in NFC and stays so beside others; those above have lead bytes from 0xcc. */
static bool is_trivially_nfc(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)s[i] >= 0xcc) return false;
    return true;
}

/* Valid UTF-8 without special tokens. */
static void tokenize_valid(struct tokenizer *t, const char *s, size_t n) {
    char *nfc = NULL;
    if (t->v->nfc && !is_trivially_nfc(s, n)) {
        nfc_append(&nfc, s, n);
        s = nfc, n = arrlenu(nfc);
    }
    arrsetlen(t->ends, 0);
    if (n) arrput(t->ends, n);
    for (int i = 0; i < t->v->n_exprs; i++) split_pieces(t, t->v->expr[i], s);
    for (size_t i = 0, at = 0; i < arrlenu(t->ends); i++)
        while (at < t->ends[i]) {
            size_t k = t->ends[i] - at < PIECE_MAX ? t->ends[i] - at : PIECE_MAX;
            bpe_piece(t, s + at, (uint32_t)k);
            at += k;
        }
    arrfree(nfc);
}

/* Any bytes without special tokens; every byte that is not part of valid UTF-8 is a piece of its own. */
static void tokenize_stretch(struct tokenizer *t, const char *s, size_t n) {
    for (size_t end = 0; n; s += end, n -= end, end = 0) {
        for (int k; end < n && (k = (uint8_t)s[end] < 0x80 ? 1 : utf8_sequence(s + end, n - end)) > 0;)
            end += (size_t)k;
        if (end) tokenize_valid(t, s, end);
        else bpe_piece(t, s, end = 1);
    }
}

/* Appends the tokens of n bytes of text, which may be anything, to the stb_ds array *out. origin: n bytes, or NULL for
 * text that is all the template's. Special tokens are recognised leftmost and longest:
 *   control       with TOKENIZE_CONTROL, where every byte is the template's
 *   user-defined  anywhere; if it looks like a tag, in data only with TOKENIZE_TAGS (one byte of data makes it data) */
static void tokenize(const struct vocab *v, const char *text, size_t n, const uint8_t *origin, unsigned flags,
                     int32_t **out) {
    if (!n) return;
    struct tokenizer t = {.v = v, .out = out, .match = pcre2_match_data_create(1, NULL)};
    if (!t.match) die("out of memory for the tokenizer");
    size_t from = 0;
    for (size_t at = 0, len = 0; at < n;) {
        int32_t id = special_match(v, text + at, n - at, origin ? origin + at : NULL, flags, &len);
        if (id < 0) {
            at++;
            continue;
        }
        tokenize_stretch(&t, text + from, at - from);
        arrput(*out, id);
        from = at += len;
    }
    tokenize_stretch(&t, text + from, n - from);
    pcre2_match_data_free(t.match);
    arrfree(t.symbols), arrfree(t.heap), arrfree(t.ends), arrfree(t.cut);
}

/* ---- tokens to text ---- */

/* A stream of tokens becomes whole UTF-8 sequences: pending holds the head of one that is valid so far. */
struct detok {
    uint8_t pending[4];
    int n;
};

static const char utf8_replacement[] = "\xef\xbf\xbd";

/* Ends the stream: a sequence that was cut off becomes U+FFFD. */
static void detok_end(struct detok *d, char **out) {
    if (d->n) sb_puts(out, utf8_replacement);
    d->n = 0;
}

/* Appends what is complete after one more token. Malformed bytes become one U+FFFD per maximal subpart (Unicode 3.9,
 * table 3-8), as Python's errors="replace" does over the whole stream. */
static void detok_put(const struct vocab *v, struct detok *d, int32_t id, char **out) {
    struct gguf_str s = vocab_bytes(v, id);
    for (size_t i = 0; i < s.n; i++) {
        d->pending[d->n++] = (uint8_t)s.p[i];
        int k = utf8_sequence((const char *)d->pending, (size_t)d->n);
        if (k < 0 && d->n > 1) { /* what was pending is malformed, the byte begins anew */
            sb_puts(out, utf8_replacement);
            d->pending[0] = (uint8_t)s.p[i], d->n = 1;
            k = utf8_sequence((const char *)d->pending, 1);
        }
        if (k < 0) sb_puts(out, utf8_replacement);
        if (k > 0) sb_put(out, (const char *)d->pending, (size_t)k);
        if (k) d->n = 0;
    }
}
/* ============================================================================================================
 * Chat template: values
 *
 * A Jinja interpreter that gives what Python's jinja2 3.1 gives in the environment of Hugging Face transformers
 * (immutable sandbox, trim_blocks, lstrip_blocks, loopcontrols). Every string carries the origin of each of its bytes:
 * the template, or data (anything under `messages`, `tools`, `documents`). Origin survives every operation, so text
 * that a user typed never becomes template text, the only text in which special tokens are recognised.
 *
 * Templates come from model files and are not trusted: depth, steps, memory and text are limited. Memory comes from a
 * pool that lives as long as the parsed template, or as one rendering; an error leaves by longjmp to template_parse or
 * template_render, which free it. Nothing here knows about models or tokens.
 * ============================================================================================================ */

struct text {
    char *s;         /* stb_ds array, no NUL */
    uint8_t *origin; /* stb_ds array of the same length: ORIGIN_* of every byte */
};

static void text_free(struct text *t) {
    arrfree(t->s);
    arrfree(t->origin);
}

enum {
    TEMPLATE_NESTING = 200,  /* blocks, brackets and operators inside each other in the source */
    TEMPLATE_DEPTH = 1000,   /* of evaluation: macros that call themselves, nested data */
    TEMPLATE_RANGE = 100000, /* elements of a range(), as in jinja2's sandbox */
    TEMPLATE_STEPS = 50000000,
    TEMPLATE_TEXT = 128 << 20,  /* bytes of a string */
    TEMPLATE_MEMORY = 512 << 20 /* bytes of a pool */
};

enum tv_kind {
    TV_ABSENT, /* not a value: an argument that was not passed, a variable that was never set */
    TV_UNDEF,
    TV_NONE,
    TV_BOOL,
    TV_INT,
    TV_FLOAT,
    TV_STR,
    TV_LIST, /* ranges and the views of a dictionary, too */
    TV_TUPLE,
    TV_GEN, /* a generator: always true, no length, used up by the first loop over it */
    TV_DICT,
    TV_NAMESPACE, /* the only value that changes after it was made */
    TV_FUNC,
    TV_MACRO,
    TV_LOOP
};

/* A template value. Strings and containers are shared by reference and never modified. */
struct tv {
    uint8_t kind;
    bool data;   /* made from data: its text, and the punctuation added when it is printed, is ORIGIN_DATA */
    bool markup; /* a string from `safe` or `escape`: + escapes the other operand */
    union {
        int64_t i; /* TV_BOOL too */
        double f;
        struct list *list; /* TV_LIST ... TV_NAMESPACE */
        const struct func *func;
        const struct macro *macro;
        struct loop *loop;
        struct {           /* TV_STR */
            const char *s; /* TV_UNDEF: the message for those who use the value, with a NUL */
            const uint8_t *o;
            size_t n;
        };
    };
};

/* A dictionary has its keys and values in turn, in order of insertion. */
struct list {
    struct tv *v;
    size_t n, cap;
};

struct args {
    struct list pos, kw;
    struct tv v[4];   /* by the signature of the function; TV_ABSENT where not passed */
    int mode;         /* which of several functions that share their code */
    const char *name; /* of the function, for messages */
};

struct job;

/* A filter, test, method or global. The signature names the parameters, `?` marks those that may be left out; "*": the
 * function looks at pos and kw itself. `self` is the value on the left of the | or the dot. */
struct builtin {
    int where; /* AS_*, OF_* */
    const char *name, *sig;
    struct tv (*fn)(struct job *j, struct tv self, struct args *a); /* NULL: the immutable sandbox refuses it */
    int mode;
};

struct func {
    const struct builtin *fn;
    struct tv self;
};

struct macro {
    const struct node *def;
    struct scope *scope; /* where it was defined */
};

struct scope {
    struct scope *up;
    struct list vars; /* a dictionary */
};

struct buf {
    char *s;
    uint8_t *o;
    size_t n, cap;
};

struct pool_block {
    struct pool_block *next;
    size_t used, size;
    _Alignas(16) char data[];
};

/* One parse or one rendering: its memory, its limits, and the way out on an error. */
struct job {
    struct pool_block *pool;
    size_t pool_bytes;     /* of the pool and of what from_json read */
    const uint8_t *run[2]; /* run_n[i] bytes that all say origin i */
    size_t run_n[2];
    jmp_buf out_of_here;
    char *err;
    int line, rc, depth;
    int64_t steps;
    struct scope *scope;
    struct buf *out;
    struct tv captured;  /* text of a {% set %} or {% filter %} block on the way to its filter */
    struct buf tail[28]; /* [i]: the last text of 2^i bytes or more that tv_concat made */
    json_t **parsed;     /* stb_ds array: what from_json read; strings point into it */
};

__attribute__((format(printf, 2, 3), noreturn)) static void job_fail(struct job *j, const char *fmt, ...) {
    va_list ap;
    int n = snprintf(j->err, ERR_MAX, "line %d: ", j->line);
    va_start(ap, fmt);
    vsnprintf(j->err + n, (size_t)(ERR_MAX - n), fmt, ap);
    va_end(ap);
    message_neutralise(j->err);
    j->rc = -1;
    longjmp(j->out_of_here, 1);
}

#define SHOW(x) (int)((x).n < 100 ? (x).n : 100), (x).s /* for %.*s */

/* Accounts for n elementary steps; handling 16 bytes is one. */
static void job_charge(struct job *j, size_t n) {
    j->steps += (int64_t)n;
    if (j->steps > TEMPLATE_STEPS) job_fail(j, "the template takes more than %d steps", TEMPLATE_STEPS);
}

static void job_enter(struct job *j) {
    if (++j->depth > TEMPLATE_DEPTH) job_fail(j, "recursion deeper than %d levels", TEMPLATE_DEPTH);
    job_charge(j, 1);
}

/* Accounts for n bytes of memory. */
static void job_reserve(struct job *j, size_t n) {
    if (n > TEMPLATE_MEMORY || j->pool_bytes + n > TEMPLATE_MEMORY)
        job_fail(j, "the template needs more than %d MiB", TEMPLATE_MEMORY >> 20);
    j->pool_bytes += n;
}

static void *job_alloc(struct job *j, size_t n) {
    struct pool_block *b = j->pool;
    n = (n + 15) / 16 * 16;
    if (!b || b->size - b->used < n) {
        bool large = b && n > 16384; /* does not end the block that small pieces come from */
        size_t size = n > 16384 ? n : 65536;
        job_reserve(j, size);
        struct pool_block *fresh = xmalloc(sizeof *fresh + size), **at = large ? &b->next : &j->pool;
        *fresh = (struct pool_block){.next = *at, .size = size};
        b = *at = fresh;
    }
    b->used += n;
    return memset(b->data + b->used - n, 0, n);
}

static void pool_free(struct pool_block *b) {
    while (b) {
        struct pool_block *next = b->next;
        free(b);
        b = next;
    }
}

/* Room for one more element in an array of the pool. */
static void *job_grow(struct job *j, void *p, size_t n, size_t *cap, size_t size) {
    if (n < *cap) return p;
    *cap = *cap ? 2 * *cap : 4;
    void *q = job_alloc(j, *cap * size);
    return n ? memcpy(q, p, n * size) : q;
}

/* A string of one origin at s, which is not copied. */
static struct tv tv_text(struct job *j, const char *s, size_t n, int origin) {
    if (j->run_n[origin] < n || !j->run[origin]) { /* origins of one kind are shared */
        j->run_n[origin] = n < 1024 ? 1024 : 2 * n;
        j->run[origin] = memset(job_alloc(j, j->run_n[origin]), origin, j->run_n[origin]);
    }
    return (struct tv){.kind = TV_STR, .data = origin == ORIGIN_DATA, .s = s, .o = j->run[origin], .n = n};
}

static struct tv tv_lit(struct job *j, const char *s) { return tv_text(j, s, strlen(s), ORIGIN_TEMPLATE); }
static struct tv tv_bool(bool b) { return (struct tv){.kind = TV_BOOL, .i = b}; }
static struct tv tv_int(int64_t i) { return (struct tv){.kind = TV_INT, .i = i}; }
static struct tv tv_float(double f) { return (struct tv){.kind = TV_FLOAT, .f = f}; }
static struct tv tv_none(void) { return (struct tv){.kind = TV_NONE}; }

static struct tv tv_list(struct job *j, int kind) {
    return (struct tv){.kind = (uint8_t)kind, .list = job_alloc(j, sizeof(struct list))};
}

__attribute__((format(printf, 2, 3))) static struct tv tv_undef(struct job *j, const char *fmt, ...) {
    char msg[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    return (struct tv){.kind = TV_UNDEF, .s = strcpy(job_alloc(j, strlen(msg) + 1), msg)};
}

static struct tv tv_sub(struct tv s, size_t from, size_t to) {
    s.s += from, s.o += from, s.n = to > from ? to - from : 0;
    return s;
}

static bool tv_is(struct tv v, const char *s) { return v.kind == TV_STR && v.n == strlen(s) && !memcmp(v.s, s, v.n); }

static bool tv_listy(struct tv v) { return v.kind >= TV_LIST && v.kind <= TV_GEN; }
static bool tv_whole(struct tv v) { return v.kind == TV_BOOL || v.kind == TV_INT; }
static bool tv_number(struct tv v) { return tv_whole(v) || v.kind == TV_FLOAT; }
static double tv_double(struct tv v) { return v.kind == TV_FLOAT ? v.f : (double)v.i; }

static bool tv_has_data(struct tv v) { return v.data || (v.kind == TV_STR && v.n && memchr(v.o, ORIGIN_DATA, v.n)); }

static void list_push(struct job *j, struct list *l, struct tv v) {
    l->v = job_grow(j, l->v, l->n, &l->cap, sizeof *l->v);
    l->v[l->n++] = v;
    job_charge(j, 1);
}

static const char *tv_type(struct tv v) {
    static const char *const name[] = {"",      "Undefined", "NoneType", "bool",  "int",
                                       "float", "str",       "list",     "tuple", "generator",
                                       "dict",  "Namespace", "function", "Macro", "LoopContext"};
    return name[v.kind];
}

/* Ends with jinja2's message if v is undefined, else with this one; for operations that v does not have. */
__attribute__((format(printf, 3, 4), noreturn)) static void tv_fail(struct job *j, struct tv v, const char *fmt, ...) {
    char msg[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    job_fail(j, "%s", v.kind == TV_UNDEF ? v.s : msg);
}

static bool tv_truthy(struct tv v) {
    if (v.kind == TV_UNDEF || v.kind == TV_NONE) return false;
    if (tv_number(v)) return tv_double(v) != 0;
    if (v.kind == TV_STR) return v.n != 0;
    return !(v.kind == TV_LIST || v.kind == TV_TUPLE || v.kind == TV_DICT) || v.list->n;
}

/* ---- code points ---- */

/* Length and value of the code point at s, n > 0. A byte that is not UTF-8 counts as one code point, 0xdc00 + byte, as
 * in Python's surrogateescape. */
static size_t cp_next(const char *s, size_t n, int32_t *cp) {
    *cp = (uint8_t)*s;
    if (*cp < 0x80) return 1;
    int k = utf8_sequence(s, n);
    if (k > 0) return (size_t)utf8proc_iterate((const uint8_t *)s, k, cp);
    *cp += 0xdc00;
    return 1;
}

/* The code point that ends at s + n, n > 0. */
static size_t cp_prev(const char *s, size_t n, int32_t *cp) {
    size_t k = 1;
    while (k < 4 && k < n && ((uint8_t)s[n - k] & 0xc0) == 0x80) k++;
    if (cp_next(s + n - k, k, cp) == k) return k;
    *cp = 0xdc00 + (uint8_t)s[n - 1];
    return 1;
}

static size_t cp_count(struct job *j, const char *s, size_t n) {
    size_t count = 0;
    int32_t cp;
    job_charge(j, n / 16);
    for (size_t i = 0; i < n; count++) i += cp_next(s + i, n - i, &cp);
    return count;
}

/* Byte offset of the code point with this number. */
static size_t cp_offset(struct tv v, int64_t number) {
    size_t i = 0;
    int32_t cp;
    while (number-- > 0 && i < v.n) i += cp_next(v.s + i, v.n - i, &cp);
    return i;
}

/* str.isspace of Python. */
static bool cp_space(int32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

/* Bytes of s that remain when the white space at its end is removed; bytes of white space at its start. */
static size_t space_end(const char *s, size_t n) {
    int32_t cp;
    for (size_t k; n; n -= k) {
        k = cp_prev(s, n, &cp);
        if (!cp_space(cp)) break;
    }
    return n;
}

static size_t space_start(const char *s, size_t n) {
    size_t i = 0;
    int32_t cp;
    for (size_t k; i < n; i += k) {
        k = cp_next(s + i, n - i, &cp);
        if (!cp_space(cp)) break;
    }
    return i;
}

/* ---- text that grows ---- */

static void buf_room(struct job *j, struct buf *b, size_t more) {
    job_charge(j, 1 + more / 16);
    if (more > TEMPLATE_TEXT || b->n + more > TEMPLATE_TEXT)
        job_fail(j, "a text of more than %d MiB", TEMPLATE_TEXT >> 20);
    if (b->n + more <= b->cap) return;
    b->cap = b->n ? 2 * (b->n + more) : more; /* exact at first: most texts are not added to */
    char *s = job_alloc(j, b->cap);
    uint8_t *o = job_alloc(j, b->cap);
    if (b->n) memcpy(s, b->s, b->n), memcpy(o, b->o, b->n);
    b->s = s, b->o = o;
}

static void buf_put(struct job *j, struct buf *b, struct tv v) {
    buf_room(j, b, v.n);
    if (v.n) memcpy(b->s + b->n, v.s, v.n), memcpy(b->o + b->n, v.o, v.n);
    b->n += v.n;
}

static void buf_fill(struct job *j, struct buf *b, const char *s, size_t n, int origin) {
    buf_room(j, b, n);
    if (n) memcpy(b->s + b->n, s, n), memset(b->o + b->n, origin, n);
    b->n += n;
}

__attribute__((format(printf, 4, 5))) static void buf_printf(struct job *j, struct buf *b, int origin, const char *fmt,
                                                             ...) {
    char tmp[256];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(tmp, sizeof tmp, fmt, ap);
    va_end(ap);
    buf_fill(j, b, tmp, n < (int)sizeof tmp ? (size_t)n : sizeof tmp - 1, origin);
}

static void buf_cp(struct job *j, struct buf *b, int32_t cp, int origin) {
    char u[4];
    buf_fill(j, b, u, (size_t)utf8proc_encode_char(cp, (uint8_t *)u), origin);
}

static struct tv buf_str(const struct buf *b) {
    static const uint8_t none[1];
    return (struct tv){.kind = TV_STR, .s = b->s ? b->s : "", .o = b->s ? b->o : none, .n = b->n};
}

/* ---- equality, order, dictionaries ---- */

static bool tv_eq(struct job *j, struct tv a, struct tv b);

/* -1, 0 or 1: a is below, equal to or above b, by their exact values; 2: one of them is not a number. */
static int number_order(struct tv a, struct tv b) {
    double x = tv_double(a), y = tv_double(b);
    if (x != y) return x < y ? -1 : x > y ? 1 : 2;
    if (a.kind == TV_FLOAT && b.kind == TV_FLOAT) return 0;
    __int128 i = a.kind == TV_FLOAT ? (__int128)x : a.i, k = b.kind == TV_FLOAT ? (__int128)y : b.i;
    return (i > k) - (i < k);
}

/* The value of a key; NULL: it is not there. */
static struct tv *dict_find(struct job *j, const struct list *d, struct tv key) {
    if (key.kind == TV_LIST || key.kind == TV_DICT) job_fail(j, "unhashable type: '%s'", tv_type(key));
    job_charge(j, 1 + d->n / 16);
    for (size_t i = 0; i < d->n; i += 2)
        if (tv_eq(j, d->v[i], key)) return &d->v[i + 1];
    return NULL;
}

static void dict_set(struct job *j, struct list *d, struct tv key, struct tv v) {
    struct tv *old = dict_find(j, d, key);
    if (old) {
        *old = v;
        return;
    }
    list_push(j, d, key);
    list_push(j, d, v);
}

static bool tv_eq(struct job *j, struct tv a, struct tv b) {
    if (a.kind == TV_STR && b.kind == TV_STR) {
        if (a.n != b.n) return false;
        job_charge(j, a.n / 16);
        return a.s == b.s || !memcmp(a.s, b.s, a.n);
    }
    if (tv_number(a) && tv_number(b)) return number_order(a, b) == 0;
    if (a.kind != b.kind) return false;
    if (a.kind == TV_UNDEF || a.kind == TV_NONE || a.list == b.list) return true;
    if ((a.kind != TV_LIST && a.kind != TV_TUPLE && a.kind != TV_DICT) || a.list->n != b.list->n) return false;
    bool eq = true, dict = a.kind == TV_DICT;
    job_enter(j);
    job_charge(j, a.list->n);
    for (size_t i = 0; eq && i < a.list->n; i += dict ? 2 : 1) {
        struct tv *v = dict ? dict_find(j, b.list, a.list->v[i]) : &b.list->v[i];
        eq = v && tv_eq(j, a.list->v[dict ? i + 1 : i], *v);
    }
    j->depth--;
    return eq;
}

/* a < b as Python orders them; UTF-8 sorts as its code points do. */
static bool tv_less(struct job *j, struct tv a, struct tv b) {
    if (tv_number(a) && tv_number(b)) return number_order(a, b) < 0;
    if (a.kind == TV_STR && b.kind == TV_STR) {
        size_t n = a.n < b.n ? a.n : b.n;
        job_charge(j, n / 16);
        int c = memcmp(a.s, b.s, n);
        return c ? c < 0 : a.n < b.n;
    }
    if (a.kind != b.kind || (a.kind != TV_LIST && a.kind != TV_TUPLE))
        tv_fail(j, a.kind == TV_UNDEF ? a : b, "'%s' and '%s' cannot be ordered", tv_type(a), tv_type(b));
    for (size_t i = 0; i < a.list->n && i < b.list->n; i++) {
        job_charge(j, 1);
        if (tv_eq(j, a.list->v[i], b.list->v[i])) continue;
        job_enter(j);
        bool less = tv_less(j, a.list->v[i], b.list->v[i]);
        j->depth--;
        return less;
    }
    return a.list->n < b.list->n;
}

/* The elements that a loop over v sees; they must not be modified. Uses up a generator. */
static struct list *tv_iter(struct job *j, struct tv v) {
    int32_t cp;
    if (v.kind == TV_LIST || v.kind == TV_TUPLE) return v.list;
    struct list *l = job_alloc(j, sizeof *l);
    if (v.kind == TV_GEN) {
        *l = *v.list;
        v.list->n = 0;
    } else if (v.kind == TV_DICT)
        for (size_t i = 0; i < v.list->n; i += 2) list_push(j, l, v.list->v[i]);
    else if (v.kind == TV_STR)
        for (size_t i = 0, k; i < v.n; i += k) {
            k = cp_next(v.s + i, v.n - i, &cp);
            list_push(j, l, tv_sub(v, i, i + k));
        }
    else if (v.kind != TV_UNDEF) job_fail(j, "'%s' object is not iterable", tv_type(v));
    return l;
}

/* ---- printing ---- */

/* repr() of Python's float: the shortest digits that read back as d. */
static void float_repr(double d, char out[40]) {
    int prec = -1;
    if (!isfinite(d)) {
        strcpy(out, isnan(d) ? "nan" : d < 0 ? "-inf" : "inf");
        return;
    }
    do snprintf(out, 40, "%.*e", ++prec, d);
    while (prec < 17 && strtod(out, NULL) != d);
    int e = atoi(strchr(out, 'e') + 1);
    if (e >= -4 && e < 16) snprintf(out, 40, "%.*f", prec - e > 1 ? prec - e : 1, d);
}

/* How values are printed: str(), with repr() for what is inside containers, or json.dumps. */
struct style {
    bool json, ascii, sort;
    struct tv indent; /* JSON: text of one level; TV_NONE: all in one line */
    struct tv comma, colon;
};

/* A string in quotes, with the escapes of repr() or JSON. */
static void write_quoted(struct job *j, struct buf *b, struct tv v, const struct style *st, int origin) {
    static const char plain[] = "\n\r\t\\\b\f\"", letter[] = "nrt\\bf\"";
    int own = tv_has_data(v) ? ORIGIN_DATA : origin;
    char quote = st->json || (v.n && memchr(v.s, '\'', v.n) && !memchr(v.s, '"', v.n)) ? '"' : '\'';
    size_t from = 0;
    int32_t cp;
    if (v.markup && !st->json) buf_printf(j, b, origin, "Markup(");
    buf_fill(j, b, &quote, 1, own);
    for (size_t i = 0, k; i < v.n; i += k) {
        k = cp_next(v.s + i, v.n - i, &cp);
        int c = utf8proc_category(cp);
        bool hidden = st->json ? cp < ' ' || (st->ascii && cp > 0x7e) : (c >= UTF8PROC_CATEGORY_ZS && cp != ' ') || !c;
        const char *esc = cp && cp < 0x80 ? strchr(plain, cp) : NULL;
        if (esc && esc >= plain + 4 && !st->json) esc = NULL; /* repr() has no \b, \f and \" */
        if (!esc && !hidden && cp != quote) continue;
        buf_put(j, b, tv_sub(v, from, i));
        from = i + k;
        if (esc || cp == quote) buf_printf(j, b, v.o[i], "\\%c", esc ? letter[esc - plain] : quote);
        else if (st->json && cp > 0xffff) /* a surrogate pair */
            buf_printf(j, b, v.o[i], "\\u%04x\\u%04x", 0xd7c0u + (unsigned)(cp >> 10), 0xdc00u + (cp & 0x3ffu));
        else
            buf_printf(j, b, v.o[i],
                       cp < 0x100 && !st->json ? "\\x%02x"
                       : cp < 0x10000          ? "\\u%04x"
                                               : "\\U%08x",
                       (unsigned)cp);
    }
    buf_put(j, b, tv_sub(v, from, v.n));
    buf_fill(j, b, &quote, 1, own);
    if (v.markup && !st->json) buf_printf(j, b, origin, ")");
}

static void tv_write(struct job *j, struct buf *b, struct tv v, const struct style *st, int level, int origin);
static struct list *list_sorted(struct job *j, const struct list *l, const struct list *keys, bool reverse);

static void write_newline(struct job *j, struct buf *b, const struct style *st, int level, int origin) {
    if (st->indent.kind != TV_STR) return;
    buf_fill(j, b, "\n", 1, origin);
    while (level--) buf_fill(j, b, st->indent.s, st->indent.n, origin);
}

static void write_items(struct job *j, struct buf *b, struct tv v, const struct style *st, int level, int origin) {
    bool dict = v.kind == TV_DICT || v.kind == TV_NAMESPACE, tuple = v.kind == TV_TUPLE && !st->json;
    struct list *keys = tv_iter(j, dict ? (struct tv){.kind = TV_DICT, .list = v.list} : v), values = {0};
    for (size_t i = 1; dict && i < v.list->n; i += 2) list_push(j, &values, v.list->v[i]);
    if (dict && st->sort) {
        values = *list_sorted(j, &values, keys, false);
        keys = list_sorted(j, keys, keys, false);
    }
    buf_fill(j, b, dict ? "{" : tuple ? "(" : "[", 1, origin);
    for (size_t i = 0; i < keys->n; i++) {
        struct tv item = keys->v[i];
        if (i) buf_fill(j, b, st->comma.s, st->comma.n, origin);
        write_newline(j, b, st, level + 1, origin);
        if (dict) {
            struct buf text = {0};
            if (st->json && item.kind == TV_TUPLE) job_fail(j, "keys must be str, int, float, bool or None, not tuple");
            if (st->json && item.kind != TV_STR) {
                tv_write(j, &text, item, st, 0, origin);
                item = buf_str(&text);
            }
            tv_write(j, b, item, st, level + 1, origin);
            buf_fill(j, b, st->colon.s, st->colon.n, origin);
            item = values.v[i];
        }
        tv_write(j, b, item, st, level + 1, origin);
    }
    if (tuple && keys->n == 1) buf_fill(j, b, ",", 1, origin);
    if (keys->n) write_newline(j, b, st, level, origin);
    buf_fill(j, b, dict ? "}" : tuple ? ")" : "]", 1, origin);
}

/* Appends a value. Text that is added to data is data; `origin` is that of the container around v. */
static void tv_write(struct job *j, struct buf *b, struct tv v, const struct style *st, int level, int origin) {
    char num[40];
    if (v.data) origin = ORIGIN_DATA;
    job_enter(j);
    if (st->json && (v.kind == TV_UNDEF || (v.kind >= TV_GEN && v.kind != TV_DICT)))
        job_fail(j, "Object of type %s is not JSON serializable", tv_type(v));
    switch (v.kind) {
    case TV_STR: write_quoted(j, b, v, st, origin); break;
    case TV_NONE: buf_printf(j, b, origin, st->json ? "null" : "None"); break;
    case TV_BOOL: buf_printf(j, b, origin, st->json ? v.i ? "true" : "false" : v.i ? "True" : "False"); break;
    case TV_INT: buf_printf(j, b, origin, "%lld", (long long)v.i); break;
    case TV_FLOAT:
        float_repr(v.f, num);
        if (st->json && !isfinite(v.f)) strcpy(num, isnan(v.f) ? "NaN" : v.f < 0 ? "-Infinity" : "Infinity");
        buf_printf(j, b, origin, "%s", num);
        break;
    case TV_LIST:
    case TV_TUPLE:
    case TV_DICT: write_items(j, b, v, st, level, origin); break;
    case TV_NAMESPACE:
        buf_printf(j, b, origin, "<Namespace ");
        write_items(j, b, v, st, level, origin);
        buf_printf(j, b, origin, ">");
        break;
    case TV_UNDEF: buf_printf(j, b, origin, "Undefined"); break;
    default: buf_printf(j, b, origin, "<%s>", tv_type(v));
    }
    j->depth--;
}

/* str(v); a string stays itself. */
static struct tv tv_str(struct job *j, struct tv v) {
    struct style st = {.comma = tv_lit(j, ", "), .colon = tv_lit(j, ": ")};
    struct buf b = {0};
    if (v.kind == TV_STR) return v;
    if (v.kind != TV_UNDEF) tv_write(j, &b, v, &st, 0, ORIGIN_TEMPLATE);
    return buf_str(&b);
}

/* A value from JSON; its strings stay where jansson keeps them. */
static struct tv tv_json(struct job *j, const json_t *json, bool data) {
    struct tv v = tv_none();
    const char *key;
    size_t i, n;
    json_t *item;
    job_enter(j);
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        v = tv_list(j, TV_DICT);
        json_object_keylen_foreach((json_t *)json, key, n, item) {
            list_push(j, v.list, tv_text(j, key, n, data));
            list_push(j, v.list, tv_json(j, item, data));
        }
        break;
    case JSON_ARRAY:
        v = tv_list(j, TV_LIST);
        json_array_foreach(json, i, item) list_push(j, v.list, tv_json(j, item, data));
        break;
    case JSON_STRING: v = tv_text(j, json_string_value(json), json_string_length(json), data); break;
    case JSON_INTEGER: v = tv_int(json_integer_value(json)); break;
    case JSON_REAL: v = tv_float(json_real_value(json)); break;
    case JSON_TRUE: v = tv_bool(true); break;
    case JSON_FALSE: v = tv_bool(false); break;
    case JSON_NULL: break;
    }
    v.data = data;
    j->depth--;
    return v;
}

/* ============================================================================================================
 * Chat template: operators
 *
 * What Python does with values: arithmetic, comparison, containment, subscripts, slices. Integers have 64 bits; where
 * Python's would grow beyond, that is an error.
 * ============================================================================================================ */

enum op {
    OP_NONE,
    OP_OR,
    OP_AND,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOT_IN,
    OP_ADD,
    OP_SUB,
    OP_CONCAT,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_COUNT
};

/* Levels of precedence. `not` stands between `and` and the comparisons; + binds less than ~. */
enum { LEVEL_OR, LEVEL_AND, LEVEL_NOT, LEVEL_COMPARE, LEVEL_ADD, LEVEL_CONCAT, LEVEL_MUL, LEVEL_POW, LEVEL_UNARY };

static const struct {
    const char *text;
    int level;
} op_table[OP_COUNT] = {{"", -1},
                        {"or", LEVEL_OR},
                        {"and", LEVEL_AND},
                        {"==", LEVEL_COMPARE},
                        {"!=", LEVEL_COMPARE},
                        {"<", LEVEL_COMPARE},
                        {"<=", LEVEL_COMPARE},
                        {">", LEVEL_COMPARE},
                        {">=", LEVEL_COMPARE},
                        {"in", LEVEL_COMPARE},
                        {"not", LEVEL_COMPARE},
                        {"+", LEVEL_ADD},
                        {"-", LEVEL_ADD},
                        {"~", LEVEL_CONCAT},
                        {"*", LEVEL_MUL},
                        {"/", LEVEL_MUL},
                        {"//", LEVEL_MUL},
                        {"%", LEVEL_MUL},
                        {"**", LEVEL_POW}};

static struct tv int_binary(struct job *j, enum op op, int64_t a, int64_t b) {
    int64_t r = op == OP_POW;
    bool over = false;
    switch (op) {
    case OP_ADD: over = __builtin_add_overflow(a, b, &r); break;
    case OP_SUB: over = __builtin_sub_overflow(a, b, &r); break;
    case OP_MUL: over = __builtin_mul_overflow(a, b, &r); break;
    case OP_POW:
        for (; b && !over; b >>= 1) {
            if (b & 1) over = __builtin_mul_overflow(r, a, &r);
            if (b > 1) over |= __builtin_mul_overflow(a, a, &a);
        }
        break;
    default: /* // and %: rounded down, the remainder has the sign of b */
        if (b == -1) return op == OP_MOD ? tv_int(0) : int_binary(j, OP_SUB, 0, a);
        r = op == OP_MOD ? a % b : a / b;
        if (a % b && (a < 0) != (b < 0)) r += op == OP_MOD ? b : -1;
    }
    if (over) job_fail(j, "integer overflow in %s", op_table[op].text);
    return tv_int(r);
}

static struct tv number_binary(struct job *j, enum op op, struct tv a, struct tv b) {
    double x = tv_double(a), y = tv_double(b), m, q;
    if (y == 0 && (op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD)) job_fail(j, "division by zero");
    if (tv_whole(a) && tv_whole(b) && op != OP_DIV && !(op == OP_POW && b.i < 0)) return int_binary(j, op, a.i, b.i);
    switch (op) {
    case OP_ADD: return tv_float(x + y);
    case OP_SUB: return tv_float(x - y);
    case OP_MUL: return tv_float(x * y);
    case OP_DIV: return tv_float(x / y);
    case OP_POW:
        if ((x == 0 && y < 0) || (x < 0 && y != floor(y))) job_fail(j, "no real result of **");
        return tv_float(pow(x, y));
    default:
        m = fmod(x, y), q = (x - m) / y;
        if (m == 0) m = copysign(0, y);
        else if ((m < 0) != (y < 0)) m += y, q -= 1;
        return tv_float(op == OP_MOD ? m : q == 0 ? copysign(0, x / y) : floor(q) + (q - floor(q) > 0.5));
    }
}

/* Markup: & < > ' " replaced; what already is markup stays. */
static struct tv html_escape(struct job *j, struct tv v) {
    static const char special[] = "&<>'\"";
    static const char *const escape[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    struct buf b = {0};
    v = tv_str(j, v);
    for (size_t i = 0; !v.markup && i < v.n; i++) {
        const char *at = v.s[i] ? strchr(special, v.s[i]) : NULL;
        if (at) buf_printf(j, &b, v.o[i], "%s", escape[at - special]);
        else buf_put(j, &b, tv_sub(v, i, i + 1));
    }
    if (!v.markup) v = buf_str(&b);
    v.markup = true;
    return v;
}

static struct buf *concat_tail(struct job *j, size_t n) { return &j->tail[63 - __builtin_clzll(n)]; }

/* What was made here before is added to in place, behind its end: a loop that accumulates a text is linear. One tail for
 * each order of magnitude, so that the pieces do not evict the text. */
static struct tv tv_concat(struct job *j, struct tv a, struct tv b) {
    if (!a.n || !b.n) return a.n ? a : b;
    struct buf out = {0}, *tail = concat_tail(j, a.n);
    if (tail->s == a.s && tail->o == a.o && tail->n == a.n) {
        out = *tail;
        *tail = (struct buf){0};
    } else {
        out.cap = a.n + b.n;
        out.s = job_alloc(j, out.cap), out.o = job_alloc(j, out.cap);
        buf_put(j, &out, a);
    }
    buf_put(j, &out, b);
    *concat_tail(j, out.n) = out;
    return buf_str(&out);
}

static struct tv tv_repeat(struct job *j, struct tv v, int64_t times) {
    struct buf b = {0};
    struct tv l = tv_list(j, v.kind);
    for (; times > 0 && (v.kind == TV_STR ? v.n : v.list->n); times--) {
        if (v.kind == TV_STR) buf_put(j, &b, v);
        else
            for (size_t i = 0; i < v.list->n; i++) list_push(j, l.list, v.list->v[i]);
        job_charge(j, 1);
    }
    return v.kind == TV_STR ? buf_str(&b) : l;
}

/* The whole part of a float. */
static int64_t float_int(struct job *j, double f, const char *what) {
    if (!(fabs(f) < 0x1p63)) job_fail(j, "integer overflow in %s", what);
    return (int64_t)f;
}

/* format % args with %s, %d and %% */
static struct tv str_percent(struct job *j, struct tv f, struct tv args) {
    struct list one = {.v = &args, .n = 1}, *l = args.kind == TV_TUPLE ? args.list : &one;
    struct buf b = {0};
    size_t used = 0;
    for (size_t i = 0; i < f.n; i++) {
        char conv = f.s[i] == '%' && i + 1 < f.n ? f.s[i + 1] : 0;
        if (f.s[i] != '%' || conv == '%') {
            buf_put(j, &b, tv_sub(f, i, i + 1));
            i += conv == '%';
            continue;
        }
        if (conv != 's' && conv != 'd') job_fail(j, "the format '%%%c' is not supported", conv ? conv : ' ');
        if (used == l->n) job_fail(j, "not enough arguments for format string");
        struct tv v = l->v[used++];
        if (conv == 'd' && !tv_number(v)) tv_fail(j, v, "%%d format: a number is required, not %s", tv_type(v));
        if (conv == 'd')
            v = (struct tv){.kind = TV_INT, .data = v.data, .i = v.kind == TV_FLOAT ? float_int(j, v.f, "%d") : v.i};
        buf_put(j, &b, tv_str(j, v));
        i++;
    }
    if (used < l->n && args.kind != TV_DICT && args.kind != TV_LIST && args.kind != TV_UNDEF)
        job_fail(j, "not all arguments converted during string formatting");
    return buf_str(&b);
}

static struct tv tv_binary(struct job *j, enum op op, struct tv a, struct tv b) {
    struct tv v = {0};
    bool str = a.kind == TV_STR && b.kind == TV_STR,
         alike = a.kind == b.kind && (a.kind == TV_LIST || a.kind == TV_TUPLE);
    if (op == OP_CONCAT) {
        v = tv_concat(j, tv_str(j, a), tv_str(j, b));
        v.markup = false;
        return v;
    }
    if (op == OP_ADD && str && (a.markup || b.markup)) {
        v = tv_concat(j, html_escape(j, a), html_escape(j, b));
        v.markup = true;
        return v;
    }
    if (op == OP_ADD && str) return tv_concat(j, a, b);
    if (op == OP_MOD && a.kind == TV_STR) return str_percent(j, a, b);
    if (op == OP_MUL && tv_whole(a)) v = a, a = b, b = v; /* 3 * 'x' */
    if (tv_number(a) && tv_number(b)) v = number_binary(j, op, a, b);
    else if (op == OP_ADD && alike) {
        v = tv_list(j, a.kind);
        for (size_t i = 0; i < a.list->n; i++) list_push(j, v.list, a.list->v[i]);
        for (size_t i = 0; i < b.list->n; i++) list_push(j, v.list, b.list->v[i]);
    } else if (op == OP_MUL && tv_whole(b) && a.kind >= TV_STR && a.kind <= TV_TUPLE) v = tv_repeat(j, a, b.i);
    else
        tv_fail(j, a.kind == TV_UNDEF ? a : b, "unsupported operand type(s) for %s: '%s' and '%s'", op_table[op].text,
                tv_type(a), tv_type(b));
    v.data = a.data || b.data;
    return v;
}

/* Offset of the first or last `sub` in s, or -1. Charges for the part of s that it looks at. */
static ptrdiff_t str_find(struct job *j, struct tv s, struct tv sub, bool last) {
    ptrdiff_t at = -1;
    if (!sub.n) return last ? (ptrdiff_t)s.n : 0;
    if (sub.n > s.n) return -1;
    const char *p = last ? NULL : memmem(s.s, s.n, sub.s, sub.n);
    if (p) at = p - s.s;
    for (size_t i = last ? s.n - sub.n + 1 : 0; i-- > 0 && at < 0;) {
        if (s.s[i] != sub.s[0]) continue;
        job_charge(j, sub.n / 16);
        if (!memcmp(s.s + i, sub.s, sub.n)) at = (ptrdiff_t)i;
    }
    job_charge(j, (at < 0 ? s.n : last ? s.n - (size_t)at : (size_t)at) / 16);
    return at;
}

static bool tv_in(struct job *j, struct tv x, struct tv in) {
    if (in.kind == TV_DICT) return dict_find(j, in.list, x) != NULL;
    if (in.kind != TV_STR && !tv_listy(in) && in.kind != TV_UNDEF)
        job_fail(j, "argument of type '%s' is not iterable", tv_type(in));
    if (in.kind == TV_STR && x.kind != TV_STR)
        job_fail(j, "'in <string>' requires string as left operand, not %s", tv_type(x));
    if (in.kind == TV_STR) return str_find(j, in, x, false) >= 0;
    const struct list *l = tv_iter(j, in);
    job_charge(j, l->n);
    for (size_t i = 0; i < l->n; i++)
        if (tv_eq(j, l->v[i], x)) return true;
    return false;
}

static bool tv_compare(struct job *j, enum op op, struct tv a, struct tv b) {
    if ((a.kind == TV_FLOAT && isnan(a.f)) || (b.kind == TV_FLOAT && isnan(b.f))) return op == OP_NE || op == OP_NOT_IN;
    switch (op) {
    case OP_EQ: return tv_eq(j, a, b);
    case OP_NE: return !tv_eq(j, a, b);
    case OP_LT: return tv_less(j, a, b);
    case OP_GT: return tv_less(j, b, a);
    case OP_LE: return !tv_less(j, b, a);
    case OP_GE: return !tv_less(j, a, b);
    case OP_IN: return tv_in(j, a, b);
    default: return !tv_in(j, a, b);
    }
}

static int64_t slice_index(struct job *j, struct tv v, int64_t n, int64_t none, int64_t low, int64_t high) {
    if (v.kind == TV_NONE) return none;
    if (!tv_whole(v)) job_fail(j, "slice indices must be integers or None");
    int64_t i = v.i < 0 ? v.i + n : v.i;
    return i < low ? low : i > high ? high : i;
}

/* v[start:stop:step]; TV_NONE stands for what is left out. Strings count code points. */
static struct tv tv_slice(struct job *j, struct tv v, struct tv start, struct tv stop, struct tv by) {
    bool str = v.kind == TV_STR;
    if (!str && v.kind != TV_LIST && v.kind != TV_TUPLE) tv_fail(j, v, "'%s' object cannot be sliced", tv_type(v));
    int64_t n = (int64_t)(str ? cp_count(j, v.s, v.n) : v.list->n);
    int64_t step = slice_index(j, by, 0, 1, INT64_MIN, INT64_MAX);
    if (!step) job_fail(j, "slice step cannot be zero");
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    int64_t i = slice_index(j, start, n, step < 0 ? high : low, low, high);
    int64_t end = slice_index(j, stop, n, step < 0 ? low : high, low, high);
    if (str && step == 1) {
        v = tv_sub(v, cp_offset(v, i), v.n);
        return tv_sub(v, 0, cp_offset(v, end - i));
    }
    const struct list *l = tv_iter(j, v);
    struct tv out = tv_list(j, v.kind);
    struct buf b = {0};
    for (; step < 0 ? i > end : i < end; i += step) {
        if (str) buf_put(j, &b, l->v[i]);
        else list_push(j, out.list, l->v[i]);
        if (step > n || step < -n) break; /* i + step must not overflow */
    }
    if (str) return buf_str(&b);
    out.data = v.data;
    return out;
}

static const struct builtin *method_find(struct tv o, struct tv name);
static struct tv loop_get(struct job *j, struct loop *l, struct tv key);

/* What Python's getattr finds: methods, members of a namespace, loop.*. TV_ABSENT: nothing. */
static struct tv tv_member(struct job *j, struct tv o, struct tv key) {
    const struct builtin *m = method_find(o, key);
    struct tv *found = o.kind == TV_NAMESPACE ? dict_find(j, o.list, key) : NULL;
    if ((m && !m->fn) || (found && key.n && key.s[0] == '_'))
        return tv_undef(j, "access to attribute '%.*s' of '%s' object is unsafe.", SHOW(key), tv_type(o));
    if (found) return *found;
    if (!m) return o.kind == TV_LOOP ? loop_get(j, o.loop, key) : (struct tv){0};
    struct func *f = job_alloc(j, sizeof *f);
    *f = (struct func){m, o};
    return (struct tv){.kind = TV_FUNC, .func = f};
}

/* o[key]; TV_ABSENT: nothing. */
static struct tv tv_element(struct job *j, struct tv o, struct tv key) {
    bool str = o.kind == TV_STR;
    struct tv *v = o.kind == TV_DICT && key.kind != TV_LIST && key.kind != TV_DICT ? dict_find(j, o.list, key) : NULL;
    if (v) return *v;
    if (!tv_whole(key) || !(str || o.kind == TV_LIST || o.kind == TV_TUPLE)) return (struct tv){0};
    int64_t n = (int64_t)(str ? cp_count(j, o.s, o.n) : o.list->n), i = key.i < 0 ? key.i + n : key.i;
    if (i < 0 || i >= n) return (struct tv){0};
    if (!str) return o.list->v[i];
    o = tv_sub(o, cp_offset(o, i), o.n);
    return tv_sub(o, 0, cp_offset(o, 1));
}

/* o.key or o[key], which differ in what is tried first, the attribute or the element. Undefined if there is neither. */
static struct tv tv_get(struct job *j, struct tv o, struct tv key, bool attribute) {
    const char *owner = o.kind == TV_NONE ? "None" : tv_type(o), *object = o.kind == TV_NONE ? "" : " object";
    if (o.kind == TV_UNDEF) job_fail(j, "%s", o.s);
    struct tv v = attribute ? tv_member(j, o, key) : tv_element(j, o, key);
    if (!v.kind && key.kind == TV_STR) v = attribute ? tv_element(j, o, key) : tv_member(j, o, key);
    if (v.kind) return v;
    if (key.kind == TV_STR) return tv_undef(j, "'%s%s' has no attribute '%.*s'", owner, object, SHOW(key));
    key = tv_str(j, key);
    return tv_undef(j, "%s%s has no element %.*s", owner, object, SHOW(key));
}

/* ============================================================================================================
 * Chat template: filters, tests, methods, globals
 *
 * All of them stand in one table; the parser finds filters and tests by name, subscripts find methods.
 * ============================================================================================================ */

/* Fills a->v by the signature. */
static void args_bind(struct job *j, const struct builtin *f, struct args *a) {
    size_t n = 0, used = 0;
    a->mode = f->mode, a->name = f->name;
    if (!strcmp(f->sig, "*")) return;
    for (const char *p = f->sig; *p; n++) {
        size_t k = strcspn(p, " ?");
        struct tv *kw = n < a->pos.n ? NULL : dict_find(j, &a->kw, tv_text(j, p, k, ORIGIN_TEMPLATE));
        a->v[n] = n < a->pos.n ? a->pos.v[n] : kw ? *kw : (struct tv){0};
        if (!a->v[n].kind && p[k] != '?') job_fail(j, "%s() needs an argument '%.*s'", f->name, (int)k, p);
        used += kw != NULL;
        p += k + strspn(p + k, " ?");
    }
    if (a->pos.n > n) job_fail(j, "%s() takes at most %zu arguments, not %zu", f->name, n, a->pos.n);
    if (2 * used < a->kw.n) job_fail(j, "%s() got a keyword that is not one of '%s', or one twice", f->name, f->sig);
}

/* Steps to look at all of v once. */
static size_t tv_size(struct tv v) {
    return v.kind == TV_STR ? v.n / 16 : tv_listy(v) || v.kind == TV_DICT ? v.list->n : 0;
}

static struct tv builtin_call(struct job *j, const struct builtin *f, struct tv self, struct args *a) {
    job_enter(j); /* map applies map */
    args_bind(j, f, a);
    job_charge(j, tv_size(self));
    for (size_t i = 0; i < a->pos.n; i++) job_charge(j, tv_size(a->pos.v[i]));
    struct tv v = f->fn(j, self, a);
    j->depth--;
    return v;
}

static bool arg_bool(struct args *a, int i) { return a->v[i].kind && tv_truthy(a->v[i]); }

static int64_t arg_int(struct job *j, struct args *a, int i, int64_t none) {
    struct tv v = a->v[i];
    if (!v.kind || v.kind == TV_NONE) return none;
    if (!tv_whole(v)) tv_fail(j, v, "%s(): '%s' is not an integer", a->name, tv_type(v));
    return v.i;
}

static struct tv arg_str(struct job *j, struct args *a, int i) {
    if (a->v[i].kind != TV_STR) tv_fail(j, a->v[i], "%s(): '%s' is not a string", a->name, tv_type(a->v[i]));
    return a->v[i];
}

/* ---- strings ---- */

enum { CASE_UPPER, CASE_LOWER, CASE_CAPITALIZE, CASE_TITLE, CASE_TITLE_FILTER };

static bool cp_cased(int32_t cp) {
    int c = utf8proc_category(cp);
    return c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LL || c == UTF8PROC_CATEGORY_LT;
}

/* upper, lower, capitalize, str.title, and the filter title, whose words begin behind white space and -({[<. Mappings are
 * of one code point, but for the German sharp s. */
static struct tv str_case(struct job *j, struct tv v, int mode) {
    struct buf b = {0};
    bool start = true; /* of a word, or of the string for capitalize */
    bool upper = mode == CASE_UPPER || mode == CASE_TITLE_FILTER;
    int32_t cp;
    for (size_t i = 0, k; i < v.n; i += k) {
        k = cp_next(v.s + i, v.n - i, &cp);
        bool up = mode == CASE_UPPER || (mode != CASE_LOWER && start);
        start = mode == CASE_TITLE
                    ? !cp_cased(cp)
                    : mode == CASE_TITLE_FILTER && (cp_space(cp) || strchr("-({[<", cp < 0x80 && cp ? cp : 'x'));
        int32_t to = !up ? utf8proc_tolower(cp) : upper ? utf8proc_toupper(cp) : utf8proc_totitle(cp);
        if (cp == 0xdf && up) buf_printf(j, &b, v.o[i], upper ? "SS" : "Ss");
        else if (to == cp) buf_put(j, &b, tv_sub(v, i, i + k));
        else buf_cp(j, &b, to, v.o[i]);
    }
    return buf_str(&b);
}

static struct tv f_case(struct job *j, struct tv self, struct args *a) { return str_case(j, tv_str(j, self), a->mode); }

enum { STRIP_LEFT = 1, STRIP_RIGHT = 2, STRIP_BOTH = 3 };

static struct tv f_strip(struct job *j, struct tv self, struct args *a) {
    struct tv v = tv_str(j, self);
    bool space = !a->v[0].kind || a->v[0].kind == TV_NONE;
    struct tv chars = space ? v : arg_str(j, a, 0);
    int32_t cp;
    if (space && a->mode & STRIP_RIGHT) v = tv_sub(v, 0, space_end(v.s, v.n));
    if (space && a->mode & STRIP_LEFT) v = tv_sub(v, space_start(v.s, v.n), v.n);
    for (size_t k; !space && a->mode & STRIP_RIGHT && v.n; v.n -= k) {
        k = cp_prev(v.s, v.n, &cp);
        if (str_find(j, chars, tv_sub(v, v.n - k, v.n), false) < 0) break;
    }
    for (size_t k; !space && a->mode & STRIP_LEFT && v.n; v = tv_sub(v, k, v.n)) {
        k = cp_next(v.s, v.n, &cp);
        if (str_find(j, chars, tv_sub(v, 0, k), false) < 0) break;
    }
    return v;
}

/* Fields between runs of white space; what is left after `max` splits keeps the white space at its far end. */
static void split_space(struct job *j, struct list *out, struct tv v, size_t max, bool right) {
    struct list words = {0};
    int32_t cp;
    for (size_t i = space_start(v.s, v.n); i < v.n; i += space_start(v.s + i, v.n - i)) {
        size_t from = i;
        for (size_t k; i < v.n; i += k) {
            k = cp_next(v.s + i, v.n - i, &cp);
            if (cp_space(cp)) break;
        }
        list_push(j, &words, tv_sub(v, from, i));
    }
    size_t n = words.n, cut = right ? n - max : max; /* the word at which the unsplit piece ends, or starts */
    for (size_t i = 0; i < n; i++) {
        struct tv w = words.v[i];
        if (n <= max || (right ? i >= cut : i < cut)) list_push(j, out, w);
        else if (right ? i + 1 == cut : i == cut)
            list_push(j, out, right ? tv_sub(v, 0, (size_t)(w.s + w.n - v.s)) : tv_sub(v, (size_t)(w.s - v.s), v.n));
    }
}

static struct tv f_split(struct job *j, struct tv v, struct args *a) {
    struct tv out = tv_list(j, TV_LIST);
    int64_t limit = arg_int(j, a, 1, -1);
    size_t max = limit < 0 ? SIZE_MAX : (size_t)limit;
    bool right = a->mode;
    if (!a->v[0].kind || a->v[0].kind == TV_NONE) {
        split_space(j, out.list, v, max, right);
        return out;
    }
    struct tv sep = arg_str(j, a, 0);
    if (!sep.n) job_fail(j, "empty separator");
    while (max--) {
        ptrdiff_t at = str_find(j, v, sep, right);
        if (at < 0) break;
        list_push(j, out.list, right ? tv_sub(v, (size_t)at + sep.n, v.n) : tv_sub(v, 0, (size_t)at));
        v = right ? tv_sub(v, 0, (size_t)at) : tv_sub(v, (size_t)at + sep.n, v.n);
    }
    list_push(j, out.list, v);
    for (size_t i = 0, n = out.list->n; right && i < n / 2; i++) {
        struct tv t = out.list->v[i];
        out.list->v[i] = out.list->v[n - 1 - i], out.list->v[n - 1 - i] = t;
    }
    return out;
}

static struct tv f_splitlines(struct job *j, struct tv v, struct args *a) {
    struct tv out = tv_list(j, TV_LIST);
    size_t from = 0;
    int32_t c;
    for (size_t i = 0, k; i < v.n; i += k) {
        k = cp_next(v.s + i, v.n - i, &c);
        if (!((c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029))
            continue;
        if (c == '\r' && i + 1 < v.n && v.s[i + 1] == '\n') k = 2;
        list_push(j, out.list, tv_sub(v, from, arg_bool(a, 0) ? i + k : i));
        from = i + k;
    }
    if (from < v.n) list_push(j, out.list, tv_sub(v, from, v.n));
    return out;
}

static struct tv f_replace(struct job *j, struct tv self, struct args *a) {
    struct tv v = tv_str(j, self), old = tv_str(j, a->v[0]), new = tv_str(j, a->v[1]);
    int64_t count = arg_int(j, a, 2, -1);
    struct buf b = {0};
    int32_t cp;
    for (; count; count--) {
        const char *at = old.n ? memmem(v.s, v.n, old.s, old.n) : v.s;
        if (!at) break;
        buf_put(j, &b, tv_sub(v, 0, (size_t)(at - v.s)));
        buf_put(j, &b, new);
        v = tv_sub(v, (size_t)(at - v.s) + old.n, v.n);
        job_charge(j, 1);
        if (old.n) continue;
        if (!v.n) break; /* an empty string is found before every code point and at the end */
        size_t k = cp_next(v.s, v.n, &cp);
        buf_put(j, &b, tv_sub(v, 0, k));
        v = tv_sub(v, k, v.n);
    }
    buf_put(j, &b, v);
    return buf_str(&b);
}

static struct tv attribute_path(struct job *j, struct tv item, struct tv path);

/* items|join(sep, attribute), or with mode 1 sep.join(items), where every item must be a string */
static struct tv f_join(struct job *j, struct tv self, struct args *a) {
    bool method = a->mode;
    const struct list *l = tv_iter(j, method ? a->v[0] : self);
    struct tv sep = method ? self : a->v[0].kind ? tv_str(j, a->v[0]) : tv_lit(j, "");
    struct buf b = {0};
    for (size_t i = 0; i < l->n; i++) {
        struct tv item = method ? l->v[i] : attribute_path(j, l->v[i], a->v[1]);
        if (method && item.kind != TV_STR)
            job_fail(j, "sequence item %zu: expected str instance, %s found", i, tv_type(item));
        if (i) buf_put(j, &b, sep);
        buf_put(j, &b, tv_str(j, item));
    }
    return buf_str(&b);
}

enum { AFFIX_STARTS, AFFIX_ENDS, AFFIX_REMOVE_PREFIX, AFFIX_REMOVE_SUFFIX };

static struct tv f_affix(struct job *j, struct tv v, struct args *a) {
    bool end = a->mode == AFFIX_ENDS || a->mode == AFFIX_REMOVE_SUFFIX, test = a->mode <= AFFIX_ENDS, found = false;
    struct list one = {.v = a->v, .n = 1}, *l = test && a->v[0].kind == TV_TUPLE ? a->v[0].list : &one;
    struct tv affix = l->n ? l->v[0] : v;
    for (size_t i = 0; i < l->n && !found; i++) {
        affix = l->v[i];
        if (affix.kind != TV_STR) tv_fail(j, affix, "%s(): '%s' is not a string", a->name, tv_type(affix));
        found = affix.n <= v.n && !memcmp(v.s + (end ? v.n - affix.n : 0), affix.s, affix.n);
    }
    if (test) return tv_bool(found);
    return !found ? v : end ? tv_sub(v, 0, v.n - affix.n) : tv_sub(v, affix.n, v.n);
}

enum { FIND_FIRST, FIND_LAST, FIND_COUNT, FIND_MUST = 4 };

/* find, rfind, index, rindex, count with start and end, in code points. */
static struct tv f_find(struct job *j, struct tv v, struct args *a) {
    struct tv sub = arg_str(j, a, 0), none = tv_none();
    struct tv in = tv_slice(j, v, a->v[1].kind ? a->v[1] : none, a->v[2].kind ? a->v[2] : none, none);
    int64_t count = 0;
    int64_t n = (int64_t)cp_count(j, v.s, v.n), from = 0, to = n;
    if (a->v[1].kind) from = slice_index(j, a->v[1], n, 0, 0, INT64_MAX);
    if (a->v[2].kind) to = slice_index(j, a->v[2], n, n, 0, n);
    bool beyond = from > to; /* where not even an empty string is found */
    if (a->mode == FIND_COUNT && !sub.n) return tv_int(beyond ? 0 : to - from + 1);
    for (const char *at; a->mode == FIND_COUNT && (at = memmem(in.s, in.n, sub.s, sub.n)); count++)
        in = tv_sub(in, (size_t)(at - in.s) + sub.n, in.n);
    if (a->mode == FIND_COUNT) return tv_int(count);
    ptrdiff_t at = beyond ? -1 : str_find(j, in, sub, (a->mode & 3) == FIND_LAST);
    if (at < 0 && a->mode & FIND_MUST) job_fail(j, "substring not found");
    return tv_int(at < 0 ? -1 : (int64_t)cp_count(j, v.s, (size_t)(in.s - v.s + at)));
}

enum { IS_ALPHA, IS_DIGIT, IS_ALNUM, IS_SPACE, IS_UPPER, IS_LOWER };

/* str.isalpha and so on: not empty and every code point qualifies; isupper, islower: every cased one, and one is. */
static bool str_is(struct tv v, int mode) {
    bool any = false;
    int32_t cp;
    for (size_t i = 0; i < v.n;) {
        i += cp_next(v.s + i, v.n - i, &cp);
        int c = utf8proc_category(cp);
        bool alpha = c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO, digit = c == UTF8PROC_CATEGORY_ND;
        if (mode >= IS_UPPER && !cp_cased(cp)) continue;
        bool ok[] = {alpha, digit, alpha || digit, cp_space(cp), c == UTF8PROC_CATEGORY_LU, c == UTF8PROC_CATEGORY_LL};
        if (!ok[mode]) return false;
        any = true;
    }
    return any;
}

static struct tv f_str_is(struct job *j, struct tv self, struct args *a) {
    return tv_bool(str_is(tv_str(j, self), a->mode));
}

static struct tv f_indent(struct job *j, struct tv v, struct args *a) {
    struct args none = {.name = a->name};
    if (v.kind != TV_STR) tv_fail(j, v, "indent: '%s' is not a string", tv_type(v));
    struct tv width = a->v[0].kind == TV_STR ? a->v[0] : tv_repeat(j, tv_lit(j, " "), arg_int(j, a, 0, 4));
    const struct list *l = f_splitlines(j, tv_concat(j, v, tv_lit(j, "\n")), &none).list;
    struct buf b = {0};
    if (arg_bool(a, 1)) buf_put(j, &b, width);
    for (size_t i = 0; i < l->n; i++) {
        if (i) buf_fill(j, &b, "\n", 1, l->v[i - 1].o[l->v[i - 1].n]); /* the origin of the line's own end */
        if (i && (arg_bool(a, 2) || l->v[i].n)) buf_put(j, &b, width);
        buf_put(j, &b, l->v[i]);
    }
    return buf_str(&b);
}

enum { STRING_PLAIN, STRING_SAFE, STRING_ESCAPE };

static struct tv f_string(struct job *j, struct tv self, struct args *a) {
    if (a->mode == STRING_ESCAPE) return html_escape(j, self);
    struct tv v = tv_str(j, self);
    v.markup |= a->mode == STRING_SAFE;
    return v;
}

/* ---- numbers ---- */

static struct tv f_abs(struct job *j, struct tv v, struct args *a) {
    if (!tv_number(v)) tv_fail(j, v, "bad operand type for %s(): '%s'", a->name, tv_type(v));
    if (v.kind == TV_FLOAT) v.f = fabs(v.f);
    else v.i = v.i < 0 ? int_binary(j, OP_SUB, 0, v.i).i : v.i, v.kind = TV_INT;
    return v;
}

/* A whole string as a number, an integer if it is written as one; TV_NONE: it is no number. */
static struct tv str_number(struct tv v) {
    char tmp[64], *end;
    v = tv_sub(v, space_start(v.s, v.n), space_end(v.s, v.n));
    if (!v.n || v.n >= sizeof tmp) return tv_none();
    size_t n = 0;
    for (size_t i = 0; i < v.n; i++) /* 1_000 */
        if (v.s[i] != '_' || !i || i + 1 == v.n || !isdigit((uint8_t)v.s[i - 1]) || !isdigit((uint8_t)v.s[i + 1]))
            tmp[n++] = v.s[i];
    tmp[n] = 0;
    size_t sign = strspn(tmp, "+-") == 1, digits = strspn(tmp + sign, "0123456789");
    errno = 0;
    if (digits && sign + digits == n) {
        struct tv whole = tv_int(strtoll(tmp, NULL, 10));
        if (!errno) return whole;
    }
    if (strspn(tmp, "0123456789+-.eE") != n && strcasecmp(tmp + sign, "inf") && strcasecmp(tmp + sign, "nan"))
        return tv_none();
    double d = strtod(tmp, &end);
    return *end ? tv_none() : tv_float(d);
}

/* int and, with mode 1, float */
static struct tv f_number(struct job *j, struct tv v, struct args *a) {
    struct tv none = a->v[0].kind ? a->v[0] : a->mode ? tv_float(0) : tv_int(0), n;
    bool data = tv_has_data(v);
    if (v.kind == TV_UNDEF) job_fail(j, "%s", v.s);
    if (v.kind == TV_STR) v = str_number(v);
    if (!tv_number(v) || (!a->mode && v.kind == TV_FLOAT && !isfinite(v.f))) return none;
    n = a->mode ? tv_float(tv_double(v)) : tv_int(tv_whole(v) ? v.i : float_int(j, v.f, "int()"));
    n.data = data;
    return n;
}

/* round(x, digits) of Python: halves, by the exact value, to the even neighbour. */
static struct tv int_round(struct job *j, int64_t i, int64_t digits) {
    __int128 x = i, p = 1, r;
    for (; digits < 0 && p < (__int128)1e20; digits++) p *= 10;
    r = x % p, x -= r;
    if (r < 0 ? -2 * r > p - (x / p & 1) : 2 * r > p - (x / p & 1)) x += r < 0 ? -p : p;
    if (x != (int64_t)x) job_fail(j, "integer overflow in round()");
    return tv_int((int64_t)x);
}

static struct tv float_round(struct job *j, double d, int64_t digits) {
    char tmp[700];
    double x = fabs(d), p = pow(10, -(double)digits), r = fmod(x, p);
    if (digits > 323 || !isfinite(d)) return tv_float(d);
    if (digits >= 0) {
        snprintf(tmp, sizeof tmp, "%.*f", (int)digits, d);
        return tv_float(strtod(tmp, NULL));
    }
    bool up = r > p / 2 || (r == p / 2 && fmod(x, 2 * p) >= p);
    x = up ? x + (p - r) : x - r;
    if (!isfinite(x)) job_fail(j, "the rounded value is too large");
    return tv_float(copysign(x, d));
}

static struct tv f_round(struct job *j, struct tv v, struct args *a) {
    struct tv method = a->v[1].kind ? arg_str(j, a, 1) : tv_lit(j, "common"), out;
    int64_t digits = arg_int(j, a, 0, 0);
    bool up = tv_is(method, "ceil");
    if (!tv_number(v)) tv_fail(j, v, "type %s does not define round()", tv_type(v));
    if (up || tv_is(method, "floor")) {
        double scale = pow(10, (double)digits), d = tv_double(v) * scale;
        if (!scale || !isfinite(d)) job_fail(j, "round: the number or the precision is out of range");
        out = tv_float(((up ? ceil(d) : floor(d)) + 0.0) / scale); /* + 0.0: no minus zero */
    } else if (!tv_is(method, "common")) job_fail(j, "round: the method must be common, ceil or floor");
    else out = tv_whole(v) ? int_round(j, v.i, digits) : float_round(j, v.f, digits);
    out.data = v.data;
    return out;
}

/* ---- sequences and mappings ---- */

static struct tv f_length(struct job *j, struct tv v, struct args *a) {
    (void)a;
    if (v.kind == TV_STR) return tv_int((int64_t)cp_count(j, v.s, v.n));
    if (v.kind == TV_UNDEF) return tv_int(0);
    if (v.kind != TV_LIST && v.kind != TV_TUPLE && v.kind != TV_DICT)
        job_fail(j, "object of type '%s' has no len()", tv_type(v));
    return tv_int((int64_t)v.list->n / (v.kind == TV_DICT ? 2 : 1));
}

static struct tv f_default(struct job *j, struct tv v, struct args *a) {
    if (v.kind != TV_UNDEF && !(arg_bool(a, 1) && !tv_truthy(v))) return v;
    return a->v[0].kind ? a->v[0] : tv_lit(j, "");
}

/* An element reached by `a.b.0`, the attribute= of filters; the item itself where there is none. */
static struct tv attribute_path(struct job *j, struct tv item, struct tv path) {
    if (!path.kind || path.kind == TV_NONE) return item;
    if (path.kind != TV_STR) return tv_get(j, item, path, false);
    for (;;) {
        const char *dot = memchr(path.s, '.', path.n);
        size_t n = dot ? (size_t)(dot - path.s) : path.n;
        struct tv part = tv_sub(path, 0, n);
        item = tv_get(j, item, str_is(part, IS_DIGIT) ? str_number(part) : part, false);
        if (!dot) return item;
        path = tv_sub(path, n + 1, path.n);
    }
}

/* What an element is sorted by: itself or an attribute, strings in lower case unless case counts. */
static struct tv sort_key(struct job *j, struct tv item, struct tv path, bool case_sensitive) {
    if (path.kind == TV_STR && memchr(path.s, ',', path.n))
        job_fail(j, "several attributes to sort by are not supported");
    struct tv v = attribute_path(j, item, path);
    return v.kind == TV_STR && !case_sensitive ? str_case(j, v, CASE_LOWER) : v;
}

/* A stable merge sort of l by keys. */
static struct list *list_sorted(struct job *j, const struct list *l, const struct list *keys, bool reverse) {
    struct list *out = job_alloc(j, sizeof *out);
    size_t *at = job_alloc(j, 2 * l->n * sizeof *at), *to = at + l->n;
    for (size_t i = 0; i < l->n; i++) at[i] = i;
    for (size_t width = 1; width < l->n; width *= 2) {
        for (size_t from = 0; from < l->n; from += 2 * width) {
            size_t mid = from + width < l->n ? from + width : l->n, end = mid + width < l->n ? mid + width : l->n;
            for (size_t i = from, k = mid, n = from; n < end; n++) {
                bool right = i == mid;
                if (i < mid && k < end) {
                    struct tv x = keys->v[at[i]], y = keys->v[at[k]];
                    right = reverse ? tv_less(j, x, y) : tv_less(j, y, x);
                }
                to[n] = right ? at[k++] : at[i++];
                job_charge(j, 1);
            }
        }
        size_t *t = at;
        at = to, to = t;
    }
    for (size_t i = 0; i < l->n; i++) list_push(j, out, l->v[at[i]]);
    return out;
}

static struct tv f_sort(struct job *j, struct tv self, struct args *a) {
    const struct list *l = tv_iter(j, self);
    struct list keys = {0};
    for (size_t i = 0; i < l->n; i++) list_push(j, &keys, sort_key(j, l->v[i], a->v[2], arg_bool(a, 1)));
    return (struct tv){.kind = TV_LIST, .list = list_sorted(j, l, &keys, arg_bool(a, 0))};
}

enum { DICT_KEYS = 1, DICT_VALUES, DICT_ITEMS, DICT_ITEMS_FILTER };

/* keys, values and items of a dictionary */
static struct tv f_items(struct job *j, struct tv self, struct args *a) {
    struct tv out = tv_list(j, a->mode == DICT_ITEMS_FILTER ? TV_GEN : TV_LIST);
    if (self.kind == TV_UNDEF && a->mode == DICT_ITEMS_FILTER) return out;
    if (self.kind != TV_DICT) tv_fail(j, self, "Can only get item pairs from a mapping.");
    for (size_t i = 0; i < self.list->n; i += 2) {
        struct tv pair = a->mode >= DICT_ITEMS ? tv_list(j, TV_TUPLE) : self.list->v[a->mode == DICT_KEYS ? i : i + 1];
        for (size_t k = i; a->mode >= DICT_ITEMS && k < i + 2; k++) list_push(j, pair.list, self.list->v[k]);
        list_push(j, out.list, pair);
    }
    return out;
}

static struct tv f_dictsort(struct job *j, struct tv self, struct args *a) {
    struct args items = {.mode = DICT_ITEMS};
    struct tv out = f_items(j, self, &items), by = a->v[1].kind ? arg_str(j, a, 1) : tv_lit(j, "key");
    if (!tv_is(by, "key") && !tv_is(by, "value")) job_fail(j, "You can only sort by either \"key\" or \"value\"");
    struct list keys = {0};
    for (size_t i = 0; i < out.list->n; i++)
        list_push(j, &keys, sort_key(j, out.list->v[i].list->v[tv_is(by, "value")], tv_none(), arg_bool(a, 0)));
    out.list = list_sorted(j, out.list, &keys, arg_bool(a, 2));
    return out;
}

static struct tv f_get(struct job *j, struct tv self, struct args *a) {
    struct tv *v = dict_find(j, self.list, a->v[0]);
    return v ? *v : a->v[1].kind ? a->v[1] : tv_none();
}

/* first and, with mode 1, last */
static struct tv f_end(struct job *j, struct tv self, struct args *a) {
    if (a->mode && self.kind == TV_GEN) job_fail(j, "'generator' object is not reversible");
    struct list *l = self.kind == TV_GEN ? self.list : tv_iter(j, self);
    if (!l->n) return tv_undef(j, "No %s item, sequence was empty.", a->name);
    struct tv v = l->v[a->mode ? l->n - 1 : 0];
    if (self.kind == TV_GEN) l->v++, l->n--, l->cap = l->n;
    return v;
}

static struct tv f_list(struct job *j, struct tv self, struct args *a) {
    (void)a;
    return (struct tv){.kind = TV_LIST, .data = self.data && tv_listy(self), .list = tv_iter(j, self)};
}

static struct tv f_reverse(struct job *j, struct tv self, struct args *a) {
    (void)a;
    struct tv none = tv_none(), l = self.kind == TV_STR ? self : f_list(j, self, a);
    l = tv_slice(j, l, none, none, tv_int(-1));
    if (l.kind == TV_LIST && self.kind != TV_GEN) l.kind = TV_GEN;
    return l;
}

/* min and, with mode 1, max */
static struct tv f_minmax(struct job *j, struct tv self, struct args *a) {
    const struct list *l = tv_iter(j, self);
    struct tv best = tv_undef(j, "No aggregated item, sequence was empty."), best_key = best;
    for (size_t i = 0; i < l->n; i++) {
        struct tv key = sort_key(j, l->v[i], a->v[1], arg_bool(a, 0));
        if (!i || (a->mode ? tv_less(j, best_key, key) : tv_less(j, key, best_key))) best = l->v[i], best_key = key;
    }
    return best;
}

static struct tv f_unique(struct job *j, struct tv self, struct args *a) {
    const struct list *l = tv_iter(j, self);
    struct tv out = tv_list(j, TV_GEN);
    struct list seen = {0};
    for (size_t i = 0; i < l->n; i++) {
        struct tv key = sort_key(j, l->v[i], a->v[1], arg_bool(a, 0));
        if (dict_find(j, &seen, key)) continue;
        dict_set(j, &seen, key, tv_none());
        list_push(j, out.list, l->v[i]);
    }
    return out;
}

static struct tv f_sum(struct job *j, struct tv self, struct args *a) {
    const struct list *l = tv_iter(j, self);
    struct tv sum = a->v[1].kind ? a->v[1] : tv_int(0);
    for (size_t i = 0; i < l->n; i++) sum = tv_binary(j, OP_ADD, sum, attribute_path(j, l->v[i], a->v[0]));
    return sum;
}

enum {
    AS_FILTER = 1,
    AS_TEST = 2,
    AS_GLOBAL = 4,
    OF_STR = 8,
    OF_DICT = 16,
    OF_LIST = 32,
    OF_TUPLE = 64,
    OF_LOOP = 128
};

static const struct builtin *builtin_find(int where, struct tv name);

/* The filter or test that map, select and their kin apply to every element. */
static const struct builtin *builtin_named(struct job *j, int where, struct tv name) {
    const struct builtin *f = name.kind == TV_STR ? builtin_find(where, name) : NULL;
    name = tv_str(j, name);
    if (!f) job_fail(j, "No %s named '%.*s'.", where == AS_FILTER ? "filter" : "test", SHOW(name));
    return f;
}

static struct tv f_map(struct job *j, struct tv self, struct args *a) {
    struct tv out = tv_list(j, TV_GEN), *path = a->pos.n ? NULL : dict_find(j, &a->kw, tv_lit(j, "attribute"));
    struct tv *none = path ? dict_find(j, &a->kw, tv_lit(j, "default")) : NULL;
    if (!tv_truthy(self)) return out;
    if (!path && !a->pos.n) job_fail(j, "map requires a filter argument");
    const struct list *l = tv_iter(j, self);
    const struct builtin *f = path ? NULL : builtin_named(j, AS_FILTER, a->pos.v[0]);
    for (size_t i = 0; i < l->n; i++) {
        struct tv v = path ? attribute_path(j, l->v[i], *path) : tv_none();
        if (f) {
            struct args rest = {.pos = {.v = a->pos.v + 1, .n = a->pos.n - 1}, .kw = a->kw};
            v = builtin_call(j, f, l->v[i], &rest);
        }
        list_push(j, out.list, none && v.kind == TV_UNDEF ? *none : v);
    }
    return out;
}

enum { SELECT_REJECT = 1, SELECT_BY_ATTRIBUTE = 2 };

static struct tv f_select(struct job *j, struct tv self, struct args *a) {
    struct tv out = tv_list(j, TV_GEN);
    size_t first = a->mode & SELECT_BY_ATTRIBUTE ? 1 : 0;
    if (!tv_truthy(self)) return out;
    if (a->pos.n < first) job_fail(j, "Missing parameter for attribute name");
    const struct list *l = tv_iter(j, self);
    const struct builtin *test = a->pos.n > first ? builtin_named(j, AS_TEST, a->pos.v[first]) : NULL;
    for (size_t i = 0; i < l->n; i++) {
        struct tv v = first ? attribute_path(j, l->v[i], a->pos.v[0]) : l->v[i];
        if (test) {
            struct args rest = {.pos = {.v = a->pos.v + first + 1, .n = a->pos.n - first - 1}, .kw = a->kw};
            v = builtin_call(j, test, v, &rest);
        }
        if (tv_truthy(v) == !(a->mode & SELECT_REJECT)) list_push(j, out.list, l->v[i]);
    }
    return out;
}

/* index and, with mode 1, count of a list */
static struct tv f_index(struct job *j, struct tv self, struct args *a) {
    int64_t count = 0;
    for (size_t i = 0; i < self.list->n; i++) {
        bool eq = tv_eq(j, self.list->v[i], a->v[0]);
        if (eq && !a->mode) return tv_int((int64_t)i);
        count += eq;
    }
    if (!a->mode) job_fail(j, "the value is not in the list");
    return tv_int(count);
}

static struct tv f_tojson(struct job *j, struct tv self, struct args *a) {
    struct tv indent = a->v[1].kind ? a->v[1] : tv_none(), sep = a->v[2];
    struct style st = {.json = true, .indent = indent, .ascii = arg_bool(a, 0), .sort = arg_bool(a, 3)};
    struct buf b = {0};
    if (indent.kind != TV_NONE && indent.kind != TV_STR) st.indent = tv_repeat(j, tv_lit(j, " "), arg_int(j, a, 1, 0));
    st.comma = tv_lit(j, indent.kind == TV_NONE ? ", " : ","), st.colon = tv_lit(j, ": ");
    if (sep.kind && sep.kind != TV_NONE) {
        const struct list *l = tv_iter(j, sep);
        if (l->n != 2 || l->v[0].kind != TV_STR || l->v[1].kind != TV_STR)
            job_fail(j, "tojson: separators must be two strings");
        st.comma = l->v[0], st.colon = l->v[1];
    }
    tv_write(j, &b, self, &st, 0, ORIGIN_TEMPLATE);
    return buf_str(&b);
}

static struct tv f_from_json(struct job *j, struct tv self, struct args *a) {
    json_error_t e;
    self = tv_str(j, self);
    job_reserve(j, 80 * self.n); /* jansson's tree is not in the pool; `{},` makes the largest */
    json_t *json = json_loadb(self.s, self.n, JSON_DECODE_ANY, &e);
    if (!json) job_fail(j, "%s: %s at byte %d", a->name, e.text, e.position);
    arrput(j->parsed, json);
    return tv_json(j, json, tv_has_data(self));
}

/* ---- tests ---- */

#define KIND(k)        (1 << TV_##k)
#define KINDS_SEQUENCE (KIND(LIST) | KIND(TUPLE) | KIND(STR) | KIND(DICT) | KIND(UNDEF))
#define KINDS_CALLABLE (KIND(FUNC) | KIND(MACRO) | KIND(LOOP) | KIND(UNDEF))
#define KINDS_NUMBER   (KIND(INT) | KIND(FLOAT) | KIND(BOOL))

/* The mode is the set of kinds that pass. */
static struct tv t_kind(struct job *j, struct tv v, struct args *a) {
    (void)j;
    return tv_bool(a->mode >> v.kind & 1);
}

static struct tv t_bool(struct job *j, struct tv v, struct args *a) {
    (void)j;
    return tv_bool(v.kind == TV_BOOL && v.i == a->mode);
}

static struct tv t_compare(struct job *j, struct tv v, struct args *a) {
    return tv_bool(tv_compare(j, (enum op)a->mode, v, a->v[0]));
}

/* odd, even, divisibleby: the remainder of a division is `mode`. */
static struct tv t_remainder(struct job *j, struct tv v, struct args *a) {
    struct tv by = a->v[0].kind ? a->v[0] : tv_int(2);
    return tv_bool(tv_eq(j, tv_binary(j, OP_MOD, v, by), tv_int(a->mode)));
}

static struct tv t_sameas(struct job *j, struct tv v, struct args *a) {
    (void)j;
    struct tv w = a->v[0];
    bool same = v.kind == w.kind && (v.kind == TV_NONE || v.list == w.list); /* any pointer, any number */
    return tv_bool(same && (v.kind != TV_STR || v.n == w.n));
}

/* ---- globals and loop ---- */

static struct tv g_range(struct job *j, struct tv self, struct args *a) {
    (void)self;
    bool two = a->v[1].kind;
    int64_t from = two ? arg_int(j, a, 0, 0) : 0, to = arg_int(j, a, two ? 1 : 0, 0), step = arg_int(j, a, 2, 1);
    struct tv out = tv_list(j, TV_LIST);
    if (!step) job_fail(j, "range() arg 3 must not be zero");
    for (int64_t i = from; step > 0 ? i < to : i > to;) {
        list_push(j, out.list, tv_int(i));
        if (out.list->n > TEMPLATE_RANGE)
            job_fail(j, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", TEMPLATE_RANGE);
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    return out;
}

/* dict(...) and namespace(...): a mapping, then keywords; the mode is the kind. */
static struct tv g_dict(struct job *j, struct tv self, struct args *a) {
    (void)self;
    struct tv out = tv_list(j, a->mode);
    if (a->pos.n > 1 || (a->pos.n && a->pos.v[0].kind != TV_DICT))
        job_fail(j, "%s() takes one mapping and keywords", a->name);
    for (size_t i = 0; a->pos.n && i < a->pos.v[0].list->n; i++) list_push(j, out.list, a->pos.v[0].list->v[i]);
    for (size_t i = 0; i < a->kw.n; i += 2) dict_set(j, out.list, a->kw.v[i], a->kw.v[i + 1]);
    return out;
}

__attribute__((noreturn)) static struct tv g_raise(struct job *j, struct tv self, struct args *a) {
    (void)self;
    struct tv v = tv_str(j, a->v[0]);
    snprintf(j->err, ERR_MAX, "%.*s", v.n < ERR_MAX ? (int)v.n : ERR_MAX, v.s);
    j->rc = -2;
    longjmp(j->out_of_here, 1);
}

static struct tv *variable_find(struct job *j, struct tv name);

/* strftime of the C library, as Python's; the time is the variable `now` where it is a string. */
static struct tv g_strftime(struct job *j, struct tv self, struct args *a) {
    (void)self;
    struct tv f = arg_str(j, a, 0), *now = variable_find(j, tv_lit(j, "now"));
    struct tm t = {0};
    time_t seconds = time(NULL);
    char format[512], text[4096], iso[32] = "";
    if (f.n + 2 > sizeof format || memchr(f.s, 0, f.n)) job_fail(j, "strftime_now: the format is too long");
    snprintf(format, sizeof format, "%.*s.", (int)f.n, f.s); /* with a dot, no result is empty */
    if (now && now->kind == TV_STR) {
        snprintf(iso, sizeof iso, "%.*s", SHOW(*now));
        int n = sscanf(iso, "%4d-%2d-%2d%*1[T ]%2d:%2d:%2d", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour, &t.tm_min,
                       &t.tm_sec);
        if (n < 3 || t.tm_year < 0 || t.tm_mon < 1 || t.tm_mon > 12)
            job_fail(j, "now: expected YYYY-MM-DDTHH:MM:SS, found '%s'", iso);
        t.tm_year -= 1900, t.tm_mon--;
        timegm(&t); /* finds the day of the week and of the year */
    } else localtime_r(&seconds, &t);
    size_t n = strftime(text, sizeof text, format, &t);
    if (!n--) job_fail(j, "strftime_now: the text is longer than %zu bytes", sizeof text - 2);
    return tv_text(j, memcpy(job_alloc(j, n + 1), text, n), n, tv_has_data(f));
}

struct loop {
    const struct list *src;
    size_t at;                        /* elements taken from src */
    const struct node *target, *test; /* `if` of the loop, asked when an element is taken, not before; NULL: none */
    struct scope *outer;
    struct tv prev, cur, next; /* next: TV_ABSENT, or taken ahead of its turn */
    int64_t index0;
};

static bool loop_take(struct job *j, struct loop *l, struct tv *out);

static bool loop_peek(struct job *j, struct loop *l) { return l->next.kind || loop_take(j, l, &l->next); }

/* Without `if` the length is known; with it, all that is left is asked now. */
static int64_t loop_length(struct job *j, struct loop *l) {
    struct list *rest = job_alloc(j, sizeof *rest);
    struct tv v;
    while (l->test && loop_take(j, l, &v)) list_push(j, rest, v);
    if (l->test) l->src = rest, l->at = 0, l->test = NULL;
    return (int64_t)(l->src->n - l->at) + l->index0 + 1 + (l->next.kind != TV_ABSENT);
}

static struct tv loop_get(struct job *j, struct loop *l, struct tv key) {
    if (tv_is(key, "index0")) return tv_int(l->index0);
    if (tv_is(key, "index")) return tv_int(l->index0 + 1);
    if (tv_is(key, "depth0") || tv_is(key, "depth")) return tv_int(key.n == 5); /* none is recursive */
    if (tv_is(key, "first")) return tv_bool(!l->index0);
    if (tv_is(key, "last")) return tv_bool(!loop_peek(j, l));
    if (tv_is(key, "length")) return tv_int(loop_length(j, l));
    if (tv_is(key, "revindex")) return tv_int(loop_length(j, l) - l->index0);
    if (tv_is(key, "revindex0")) return tv_int(loop_length(j, l) - l->index0 - 1);
    if (tv_is(key, "previtem")) return l->index0 ? l->prev : tv_undef(j, "there is no previous item");
    if (tv_is(key, "nextitem")) return loop_peek(j, l) ? l->next : tv_undef(j, "there is no next item");
    return (struct tv){0};
}

static struct tv l_cycle(struct job *j, struct tv self, struct args *a) {
    if (!a->pos.n) job_fail(j, "no items for cycling given");
    return a->pos.v[(size_t)self.loop->index0 % a->pos.n];
}

/* clang-format off */
static const struct builtin builtins[] = {
    {AS_FILTER, "abs", "", f_abs, 0},                       {AS_FILTER, "count", "", f_length, 0},
    {AS_FILTER, "d", "default_value? boolean?", f_default, 0}, {AS_FILTER, "default", "default_value? boolean?", f_default, 0},
    {AS_FILTER, "dictsort", "case_sensitive? by? reverse?", f_dictsort, 0},
    {AS_FILTER, "e", "", f_string, STRING_ESCAPE},          {AS_FILTER, "escape", "", f_string, STRING_ESCAPE},
    {AS_FILTER, "first", "", f_end, 0},                     {AS_FILTER, "last", "", f_end, 1},
    {AS_FILTER, "float", "default?", f_number, 1},          {AS_FILTER, "int", "default?", f_number, 0},
    {AS_FILTER, "from_json", "", f_from_json, 0},           {AS_FILTER, "indent", "width? first? blank?", f_indent, 0},
    {AS_FILTER, "items", "", f_items, DICT_ITEMS_FILTER},   {AS_FILTER, "join", "d? attribute?", f_join, 0},
    {AS_FILTER, "length", "", f_length, 0},                 {AS_FILTER, "list", "", f_list, 0},
    {AS_FILTER, "map", "*", f_map, 0},                      {AS_FILTER, "max", "case_sensitive? attribute?", f_minmax, 1},
    {AS_FILTER, "min", "case_sensitive? attribute?", f_minmax, 0},
    {AS_FILTER, "reject", "*", f_select, SELECT_REJECT},           {AS_FILTER, "rejectattr", "*", f_select, SELECT_REJECT | SELECT_BY_ATTRIBUTE},
    {AS_FILTER, "reverse", "", f_reverse, 0},               {AS_FILTER, "round", "precision? method?", f_round, 0},
    {AS_FILTER, "safe", "", f_string, STRING_SAFE},         {AS_FILTER, "string", "", f_string, STRING_PLAIN},
    {AS_FILTER, "select", "*", f_select, 0},           {AS_FILTER, "selectattr", "*", f_select, SELECT_BY_ATTRIBUTE},
    {AS_FILTER, "sort", "reverse? case_sensitive? attribute?", f_sort, 0},
    {AS_FILTER, "sum", "attribute? start?", f_sum, 0},      {AS_FILTER, "title", "", f_case, CASE_TITLE_FILTER},
    {AS_FILTER, "tojson", "ensure_ascii? indent? separators? sort_keys?", f_tojson, 0},
    {AS_FILTER, "trim", "chars?", f_strip, STRIP_BOTH},     {AS_FILTER, "unique", "case_sensitive? attribute?", f_unique, 0},

    {AS_FILTER | OF_STR, "capitalize", "", f_case, CASE_CAPITALIZE},
    {AS_FILTER | OF_STR, "lower", "", f_case, CASE_LOWER},  {AS_FILTER | OF_STR, "upper", "", f_case, CASE_UPPER},
    {AS_FILTER | OF_STR, "replace", "old new count?", f_replace, 0},
    {OF_STR, "count", "sub start? end?", f_find, FIND_COUNT},
    {OF_STR, "find", "sub start? end?", f_find, FIND_FIRST}, {OF_STR, "index", "sub start? end?", f_find, FIND_FIRST | FIND_MUST},
    {OF_STR, "rfind", "sub start? end?", f_find, FIND_LAST}, {OF_STR, "rindex", "sub start? end?", f_find, FIND_LAST | FIND_MUST},
    {OF_STR, "startswith", "prefix", f_affix, AFFIX_STARTS}, {OF_STR, "endswith", "suffix", f_affix, AFFIX_ENDS},
    {OF_STR, "removeprefix", "prefix", f_affix, AFFIX_REMOVE_PREFIX},
    {OF_STR, "removesuffix", "suffix", f_affix, AFFIX_REMOVE_SUFFIX},
    {OF_STR, "isalnum", "", f_str_is, IS_ALNUM},            {OF_STR, "isalpha", "", f_str_is, IS_ALPHA},
    {OF_STR, "isdigit", "", f_str_is, IS_DIGIT},            {OF_STR, "isspace", "", f_str_is, IS_SPACE},
    {OF_STR, "islower", "", f_str_is, IS_LOWER},            {OF_STR, "isupper", "", f_str_is, IS_UPPER},
    {OF_STR, "join", "iterable", f_join, 1},                {OF_STR, "title", "", f_case, CASE_TITLE},
    {OF_STR, "lstrip", "chars?", f_strip, STRIP_LEFT},      {OF_STR, "rstrip", "chars?", f_strip, STRIP_RIGHT},
    {OF_STR, "strip", "chars?", f_strip, STRIP_BOTH},       {OF_STR, "splitlines", "keepends?", f_splitlines, 0},
    {OF_STR, "split", "sep? maxsplit?", f_split, 0},        {OF_STR, "rsplit", "sep? maxsplit?", f_split, 1},

    {OF_DICT, "get", "key default?", f_get, 0},             {OF_DICT, "items", "", f_items, DICT_ITEMS},
    {OF_DICT, "keys", "", f_items, DICT_KEYS},              {OF_DICT, "values", "", f_items, DICT_VALUES},
    {OF_DICT | OF_LIST, "clear", "", NULL, 0},              {OF_DICT | OF_LIST, "pop", "", NULL, 0},
    {OF_DICT, "popitem", "", NULL, 0},                      {OF_DICT, "setdefault", "", NULL, 0},
    {OF_DICT, "update", "", NULL, 0},                       {OF_LIST, "append", "", NULL, 0},
    {OF_LIST, "extend", "", NULL, 0},                       {OF_LIST, "insert", "", NULL, 0},
    {OF_LIST, "remove", "", NULL, 0},                       {OF_LIST, "reverse", "", NULL, 0},
    {OF_LIST, "sort", "", NULL, 0},                         {OF_LOOP, "cycle", "*", l_cycle, 0},
    {OF_LIST | OF_TUPLE, "count", "value", f_index, 1},     {OF_LIST | OF_TUPLE, "index", "value", f_index, 0},

    {AS_TEST, "==", "other", t_compare, OP_EQ},             {AS_TEST, "!=", "other", t_compare, OP_NE},
    {AS_TEST, "<", "other", t_compare, OP_LT},              {AS_TEST, "<=", "other", t_compare, OP_LE},
    {AS_TEST, ">", "other", t_compare, OP_GT},              {AS_TEST, ">=", "other", t_compare, OP_GE},
    {AS_TEST, "eq", "other", t_compare, OP_EQ},             {AS_TEST, "equalto", "other", t_compare, OP_EQ},
    {AS_TEST, "ne", "other", t_compare, OP_NE},             {AS_TEST, "lt", "other", t_compare, OP_LT},
    {AS_TEST, "lessthan", "other", t_compare, OP_LT},       {AS_TEST, "le", "other", t_compare, OP_LE},
    {AS_TEST, "gt", "other", t_compare, OP_GT},             {AS_TEST, "greaterthan", "other", t_compare, OP_GT},
    {AS_TEST, "ge", "other", t_compare, OP_GE},             {AS_TEST, "in", "seq", t_compare, OP_IN},
    {AS_TEST, "divisibleby", "num", t_remainder, 0},        {AS_TEST, "even", "", t_remainder, 0},
    {AS_TEST, "odd", "", t_remainder, 1},                   {AS_TEST, "sameas", "other", t_sameas, 0},
    {AS_TEST, "true", "", t_bool, 1},                       {AS_TEST, "false", "", t_bool, 0},
    {AS_TEST, "lower", "", f_str_is, IS_LOWER},             {AS_TEST, "upper", "", f_str_is, IS_UPPER},
    {AS_TEST, "boolean", "", t_kind, KIND(BOOL)},           {AS_TEST, "callable", "", t_kind, KINDS_CALLABLE},
    {AS_TEST, "defined", "", t_kind, ~KIND(UNDEF)},         {AS_TEST, "undefined", "", t_kind, KIND(UNDEF)},
    {AS_TEST, "float", "", t_kind, KIND(FLOAT)},            {AS_TEST, "integer", "", t_kind, KIND(INT)},
    {AS_TEST, "mapping", "", t_kind, KIND(DICT)},           {AS_TEST, "none", "", t_kind, KIND(NONE)},
    {AS_TEST, "number", "", t_kind, KINDS_NUMBER},                {AS_TEST, "string", "", t_kind, KIND(STR)},
    {AS_TEST, "sequence", "", t_kind, KINDS_SEQUENCE},              {AS_TEST, "iterable", "", t_kind, KINDS_SEQUENCE | KIND(GEN) | KIND(LOOP)},

    {AS_GLOBAL, "dict", "*", g_dict, TV_DICT},              {AS_GLOBAL, "namespace", "*", g_dict, TV_NAMESPACE},
    {AS_GLOBAL, "raise_exception", "message", g_raise, 0},  {AS_GLOBAL, "range", "start stop? step?", g_range, 0},
    {AS_GLOBAL, "strftime_now", "format", g_strftime, 0},
};
/* clang-format on */

static const struct builtin *builtin_find(int where, struct tv name) {
    for (size_t i = 0; i < sizeof builtins / sizeof builtins[0]; i++)
        if (builtins[i].where & where && tv_is(name, builtins[i].name)) return &builtins[i];
    return NULL;
}

static const struct builtin *method_find(struct tv o, struct tv name) {
    static const int of[] = {
        [TV_STR] = OF_STR, [TV_LIST] = OF_LIST, [TV_TUPLE] = OF_TUPLE, [TV_DICT] = OF_DICT, [TV_LOOP] = OF_LOOP};
    return of[o.kind] ? builtin_find(of[o.kind], name) : NULL;
}

/* ============================================================================================================
 * Chat template: from source to tree
 *
 * The lexer cuts the source into tokens and applies the white space rules (trim_blocks, lstrip_blocks, the signs - and
 * +); the parser makes a tree of nodes with filters and tests resolved. Both live in the pool of the template. No node is
 * higher than TEMPLATE_NESTING, so whatever walks the tree may recurse.
 * ============================================================================================================ */

/* Expressions, then statements. In brackets the kids; bodies are N_BODY, targets N_NAME, N_MEMBER or N_TUPLE of them. */
enum node_kind {
    N_CONST,
    N_NAME,
    N_LIST,
    N_TUPLE,
    N_DICT,    /* [key, value, key, value, ...] */
    N_ATTR,    /* [object], val is the name */
    N_ITEM,    /* [object, key] */
    N_SLICE,   /* [object, start, stop, step], the last three may be NULL */
    N_CALL,    /* [callee, arguments] */
    N_FILTER,  /* [value, arguments]; fn, or NULL and a name that is unknown */
    N_TEST,    /* likewise */
    N_KEYWORD, /* val=[value] in arguments, val[=value] in the parameters of a macro */
    N_NOT,     /* [operand], as the next two */
    N_NEG,
    N_POS,
    N_BINARY,   /* [left, right], op */
    N_COND,     /* [test, then, else or NULL] */
    N_CAPTURED, /* what the filter of a {% set %} or {% filter %} block is applied to */

    N_BODY,
    N_DATA,
    N_PRINT,       /* [expression] */
    N_IF,          /* [test, body, test, body, ..., body of else] */
    N_FOR,         /* [target, iterable, if or NULL, body, else or NULL] */
    N_SET,         /* [target, value] */
    N_MEMBER,      /* [N_NAME, N_CONST], the target ns.member */
    N_SETBLOCK,    /* [body, filters or NULL, target] */
    N_FILTERBLOCK, /* [body, filters] */
    N_MACRO,       /* val is the name [N_KEYWORD..., body] */
    N_CALLBLOCK,   /* [N_CALL, N_MACRO] */
    N_WITH,        /* [target, value, target, value, ..., body] */
    N_BREAK,
    N_CONTINUE
};

struct node {
    uint8_t kind, op;
    int line, height;
    const struct builtin *fn;
    struct tv val; /* of a constant, or a name */
    struct node **kid;
    size_t n, cap;
};

struct template {
    struct pool_block *pool;
    struct node *body;
};

enum token_kind { T_EOF, T_DATA, T_VAR, T_VAR_END, T_BLOCK, T_BLOCK_END, T_WORD, T_STRING, T_INT, T_FLOAT };

/* T_WORD: a name, keyword or operator. */
struct token {
    int kind, line;
    const char *s;
    size_t n;
};

struct lexer {
    struct job *j;
    const char *s; /* line ends are \n */
    size_t n, at;
    bool line_start; /* the last token ended with a line end */
    struct token *token;
    size_t tokens, cap;
};

static bool lex_is(const struct lexer *l, size_t at, const char *s) {
    size_t k = strlen(s);
    return at <= l->n && l->n - at >= k && !memcmp(l->s + at, s, k);
}

static bool lex_any(const struct lexer *l, size_t at, const char *set) {
    return at < l->n && l->s[at] && strchr(set, l->s[at]);
}

/* Moves on by n bytes, counting lines. */
static void lex_skip(struct lexer *l, size_t n) {
    for (; n; n--, l->at++) l->j->line += l->line_start = l->s[l->at] == '\n';
}

/* A token of n bytes here, of which those within `edge` bytes of its ends (quotes) do not count. */
static void lex_token(struct lexer *l, int kind, size_t n, size_t edge) {
    l->token = job_grow(l->j, l->token, l->tokens, &l->cap, sizeof *l->token);
    l->token[l->tokens++] = (struct token){kind, l->j->line, l->s + l->at + edge, n - 2 * edge};
    lex_skip(l, n);
}

static bool lex_name(const struct lexer *l, size_t at) {
    if (at >= l->n || !(l->s[at] & 0x80)) return at < l->n && (isalnum((uint8_t)l->s[at]) || l->s[at] == '_');
    return !space_start(l->s + at, l->n - at);
}

static size_t lex_space(const struct lexer *l, size_t at) { return at + space_start(l->s + at, l->n - at); }

/* Template text up to `to`, where a tag begins, with this sign. Of the tags only {{ keeps the blanks before it. */
static void lex_data(struct lexer *l, size_t to, char sign, bool var) {
    size_t n = to - l->at;
    const char *s = l->s + l->at;
    if (sign == '-') n = space_end(s, n);
    else if (sign != '+' && !var) {
        const char *nl = memrchr(s, '\n', n);
        size_t line = nl ? (size_t)(nl - s) + 1 : 0;
        if ((nl || l->line_start) && space_start(s + line, n - line) == n - line) n = line;
    }
    if (n) lex_token(l, T_DATA, n, 0);
    lex_skip(l, to - l->at);
}

/* The end of a tag at `at` with the white space that it eats: where that ends, or 0 if there is none here. The end of a
 * block or comment is `trim`: it eats a line end unless it has a +. */
static size_t lex_end(const struct lexer *l, size_t at, const char *end, bool trim) {
    bool plus = trim && lex_is(l, at, "+"), minus = lex_is(l, at, "-");
    at += plus || minus ? 1 : 0;
    if (!lex_is(l, at, end)) return 0;
    return minus ? lex_space(l, at + 2) : at + (trim && !plus && lex_is(l, at + 2, "\n") ? 3 : 2);
}

static char lex_sign(const struct lexer *l, size_t at) { return lex_any(l, at, "-+") ? l->s[at] : 0; }

/* {% raw %} or {% endraw %} at `at`: where it ends, or 0. */
static size_t lex_raw(const struct lexer *l, size_t at, const char *word) {
    bool end = word[0] == 'e';
    if (!lex_is(l, at, "{%")) return 0;
    at = lex_space(l, at + (lex_sign(l, at + 2) ? 3 : 2));
    if (!lex_is(l, at, word)) return 0;
    return lex_end(l, lex_space(l, at + strlen(word)), "%}", end);
}

static void lex_number(struct lexer *l) {
    static const char digits[] = "0123456789";
    size_t k = l->at, e;
    bool element = k && l->s[k - 1] == '.', real = false; /* in a.0.1, 0.1 is no number */
    while (lex_any(l, k, digits)) k++;
    if (!element && lex_is(l, k, ".") && lex_any(l, k + 1, digits))
        for (real = true, k++; lex_any(l, k, digits);) k++;
    e = k + (lex_sign(l, k + 1) ? 2 : 1);
    if (!element && lex_any(l, k, "eE") && lex_any(l, e, digits))
        for (real = true, k = e; lex_any(l, k, digits);) k++;
    lex_token(l, real ? T_FLOAT : T_INT, k - l->at, 0);
}

static void lex_bracket(struct lexer *l, char *open, size_t *depth) {
    char c = l->s[l->at];
    if (strchr("([{", c)) {
        if (*depth == TEMPLATE_NESTING) job_fail(l->j, "more than %d brackets inside each other", TEMPLATE_NESTING);
        open[(*depth)++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (strchr(")]}", c) && (!*depth || open[--*depth] != c)) job_fail(l->j, "unexpected '%c'", c);
}

/* The inside of a tag up to its end. Inside brackets }} and %} are not the end. */
static void lex_tag(struct lexer *l, bool var) {
    static const char two[][3] = {"//", "**", "==", "!=", ">=", "<="};
    char open[TEMPLATE_NESTING];
    size_t depth = 0, k, end = 0;
    while (!end) {
        lex_skip(l, lex_space(l, l->at) - l->at);
        size_t at = l->at, n = 1;
        char c = at < l->n ? l->s[at] : 0;
        end = depth ? 0 : lex_end(l, at, var ? "}}" : "%}", !var);
        if (end) lex_token(l, var ? T_VAR_END : T_BLOCK_END, end - at, 0);
        else if (isdigit((uint8_t)c)) lex_number(l);
        else if (lex_name(l, at)) {
            for (k = at; lex_name(l, k);) k++;
            lex_token(l, T_WORD, k - at, 0);
        } else if (c == '\'' || c == '"') {
            for (k = at + 1; k < l->n && l->s[k] != c; k++) k += l->s[k] == '\\';
            if (k >= l->n) job_fail(l->j, "a string without its closing %c", c);
            lex_token(l, T_STRING, k + 1 - at, 1);
        } else {
            if (at == l->n) job_fail(l->j, "the template ends inside a tag");
            for (size_t i = 0; i < sizeof two / sizeof two[0]; i++) n += lex_is(l, at, two[i]);
            if (n == 1 && !lex_any(l, at, "+-/*%~[](){}<>=.:|,"))
                job_fail(l->j, "unexpected character 0x%02x", (uint8_t)c);
            lex_bracket(l, open, &depth);
            lex_token(l, T_WORD, n, 0);
        }
    }
}

static void lex_comment(struct lexer *l) {
    for (size_t at = l->at; at < l->n; at++) {
        size_t end = lex_end(l, at, "#}", true);
        if (!end) continue;
        lex_skip(l, end - l->at);
        return;
    }
    job_fail(l->j, "missing end of comment");
}

static void lex_template(struct lexer *l) {
    while (l->at < l->n) {
        size_t at = l->at, end, raw;
        while (at < l->n && !(l->s[at] == '{' && lex_any(l, at + 1, "%{#"))) at++;
        if (at == l->n) {
            lex_token(l, T_DATA, at - l->at, 0);
            return;
        }
        char tag = l->s[at + 1], sign = lex_sign(l, at + 2);
        lex_data(l, at, sign, tag == '{');
        if ((raw = end = lex_raw(l, at, "raw"))) {
            lex_skip(l, raw - at);
            while (raw < l->n && !(end = lex_raw(l, raw, "endraw"))) raw++;
            if (raw == l->n) job_fail(l->j, "missing end of raw block");
            lex_data(l, raw, lex_sign(l, raw + 2), false);
            lex_skip(l, end - raw);
            continue;
        }
        if (tag != '#') lex_token(l, tag == '{' ? T_VAR : T_BLOCK, 2, 0);
        lex_skip(l, (tag == '#' ? 2 : 0) + (sign ? 1 : 0));
        if (tag == '#') lex_comment(l);
        else lex_tag(l, tag == '{');
    }
}

/* ---- expressions ---- */

struct parser {
    struct job *j;
    const struct token *at;
    int loops;           /* around this place that break would leave */
    struct list unknown; /* filters and tests that do not exist: name, line. In a condition they fail when reached */
};

static struct node *node_new(struct parser *p, int kind) {
    struct node *n = job_alloc(p->j, sizeof *n);
    n->kind = (uint8_t)kind, n->line = p->at->line, n->height = 1;
    return n;
}

static struct node *node_add(struct parser *p, struct node *n, struct node *kid) {
    n->kid = job_grow(p->j, n->kid, n->n, &n->cap, sizeof *n->kid);
    n->kid[n->n++] = kid;
    if (kid && kid->height >= n->height) n->height = kid->height + 1;
    if (n->height > TEMPLATE_NESTING)
        job_fail(p->j, "more than %d operators or blocks inside each other", TEMPLATE_NESTING);
    return n;
}

static void parse_nest(struct parser *p) {
    if (++p->j->depth > TEMPLATE_NESTING)
        job_fail(p->j, "more than %d operators or blocks inside each other", TEMPLATE_NESTING);
}

static bool tok_equal(const struct token *t, const char *s) {
    return t->kind == T_WORD && t->n == strlen(s) && !memcmp(t->s, s, t->n);
}

static bool tok_is(const struct parser *p, const char *s) { return tok_equal(p->at, s); }

static void tok_next(struct parser *p) {
    if (p->at->kind != T_EOF) p->at++;
    p->j->line = p->at->line;
}

static bool tok_skip(struct parser *p, const char *s) {
    bool is = tok_is(p, s);
    if (is) tok_next(p);
    return is;
}

__attribute__((noreturn)) static void tok_unexpected(struct parser *p, const char *expected) {
    if (p->at->kind == T_EOF) job_fail(p->j, "expected %s, found the end of the template", expected);
    job_fail(p->j, "expected %s, found '%.*s'", expected, SHOW(*p->at));
}

static void tok_expect(struct parser *p, const char *s) {
    if (!tok_skip(p, s)) tok_unexpected(p, s);
}

static void tok_end(struct parser *p, int kind) {
    if (p->at->kind != kind) tok_unexpected(p, "the end of the tag");
    tok_next(p);
}

static bool tok_is_name(const struct parser *p) {
    return p->at->kind == T_WORD && (isalpha((uint8_t)*p->at->s) || *p->at->s == '_' || *p->at->s & 0x80);
}

static struct tv tok_name(struct parser *p) {
    const struct token *t = p->at;
    if (!tok_is_name(p)) tok_unexpected(p, "a name");
    tok_next(p);
    return tv_text(p->j, t->s, t->n, ORIGIN_TEMPLATE);
}

/* The escape sequence of a Python string literal behind the backslash before s[i]; returns where it ends. */
static size_t parse_escape(struct parser *p, struct buf *b, const char *s, size_t n, size_t i) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = s[i], digits[9] = "";
    const char *known = c ? strchr(from, c) : NULL;
    bool octal = c >= '0' && c <= '7';
    size_t want = octal ? 3 : c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0, k = 0, start = i + !octal;
    if (known) buf_fill(p->j, b, to + (known - from), 1, ORIGIN_TEMPLATE);
    if (c == 'N') job_fail(p->j, "the escape \\N is not supported");
    if (known || c == '\n') return i + 1;
    if (!want) { /* not an escape */
        buf_fill(p->j, b, s + i - 1, 2, ORIGIN_TEMPLATE);
        return i + 1;
    }
    while (k < want && start + k < n &&
           (octal ? s[start + k] >= '0' && s[start + k] <= '7' : isxdigit((uint8_t)s[start + k])))
        digits[k] = s[start + k], k++;
    unsigned long cp = strtoul(digits, NULL, octal ? 8 : 16);
    if ((!octal && k < want) || cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
        job_fail(p->j, "malformed \\%c escape", c);
    buf_cp(p->j, b, (int32_t)cp, ORIGIN_TEMPLATE);
    return start + k;
}

/* One or more literals in a row. */
static struct tv parse_string(struct parser *p) {
    struct buf b = {0};
    for (; p->at->kind == T_STRING; tok_next(p)) {
        const struct token *t = p->at;
        for (size_t i = 0; i < t->n;) {
            const char *esc = memchr(t->s + i, '\\', t->n - i);
            size_t k = esc ? (size_t)(esc - t->s) : t->n;
            buf_fill(p->j, &b, t->s + i, k - i, ORIGIN_TEMPLATE);
            i = esc ? parse_escape(p, &b, t->s, t->n, k + 1) : k;
        }
    }
    return buf_str(&b);
}

static struct tv parse_number(struct parser *p) {
    bool real = p->at->kind == T_FLOAT;
    char tmp[64];
    snprintf(tmp, sizeof tmp, "%.*s", SHOW(*p->at));
    errno = 0;
    struct tv v = real ? tv_float(strtod(tmp, NULL)) : tv_int(strtoll(tmp, NULL, 10));
    if (p->at->n >= sizeof tmp || (errno && !real)) job_fail(p->j, "the number '%s' is too large", tmp);
    tok_next(p);
    return v;
}

static struct node *parse_expr(struct parser *p);
static struct node *parse_binary(struct parser *p, int level);
static struct node *parse_primary(struct parser *p, int flags);

enum { WITH_COND = 1, MAY_BE_EMPTY = 2, IS_TARGET = 4, MAY_BE_MEMBER = 8 };

/* One expression, or a tuple of several separated by commas. */
static struct node *parse_tuple(struct parser *p, int flags) {
    struct node *tuple = node_new(p, N_TUPLE), *first = NULL;
    for (bool comma = false;; comma = true) {
        int k = p->at->kind;
        bool end = k == T_VAR_END || k == T_BLOCK_END || tok_is(p, ")") || (flags & IS_TARGET && tok_is(p, "in"));
        if (!end) {
            first = flags & IS_TARGET   ? parse_primary(p, flags)
                    : flags & WITH_COND ? parse_expr(p)
                                        : parse_binary(p, LEVEL_OR);
            node_add(p, tuple, first);
        }
        if (!end && tok_skip(p, ",")) continue;
        if (comma || (!first && flags & MAY_BE_EMPTY)) return tuple;
        if (!first) tok_unexpected(p, "an expression");
        return first;
    }
}

/* [a, b] or {k: v} */
static struct node *parse_display(struct parser *p) {
    bool dict = tok_is(p, "{");
    struct node *n = node_new(p, dict ? N_DICT : N_LIST);
    const char *end = dict ? "}" : "]";
    for (tok_next(p); !tok_is(p, end); node_add(p, n, parse_expr(p))) {
        if (n->n) tok_expect(p, ",");
        if (tok_is(p, end)) break;
        if (!dict) continue;
        node_add(p, n, parse_expr(p));
        tok_expect(p, ":");
    }
    tok_next(p);
    return n;
}

static struct node *parse_name(struct parser *p, int flags) {
    struct node *n = node_new(p, N_CONST);
    struct tv name = n->val = tok_name(p);
    if (tv_is(name, "true") || tv_is(name, "True")) n->val = tv_bool(true);
    else if (tv_is(name, "false") || tv_is(name, "False")) n->val = tv_bool(false);
    else if (tv_is(name, "none") || tv_is(name, "None")) n->val = tv_none();
    else n->kind = N_NAME;
    if (tv_is(name, "varargs") || tv_is(name, "kwargs")) job_fail(p->j, "'%.*s' is not supported", SHOW(name));
    if (n->kind == N_CONST || !(flags & MAY_BE_MEMBER) || !tok_skip(p, ".")) return n;
    struct node *member = node_add(p, node_new(p, N_MEMBER), n), *key = node_new(p, N_CONST);
    key->val = tok_name(p);
    return node_add(p, member, key);
}

static struct node *parse_primary(struct parser *p, int flags) {
    struct node *n;
    int k = p->at->kind;
    if (tok_is_name(p)) return parse_name(p, flags);
    if (k == T_STRING || k == T_INT || k == T_FLOAT) {
        n = node_new(p, N_CONST);
        n->val = k == T_STRING ? parse_string(p) : parse_number(p);
        return n;
    }
    parse_nest(p);
    if (tok_skip(p, "(")) {
        n = parse_tuple(p, MAY_BE_EMPTY | (flags & IS_TARGET ? flags : WITH_COND));
        tok_expect(p, ")");
    } else if (tok_is(p, "[") || tok_is(p, "{")) n = parse_display(p);
    else tok_unexpected(p, "an expression");
    p->j->depth--;
    return n;
}

/* (a, b, k=v), or the parameters of a macro: (a, b=v), added to the kids of n. */
static struct node *parse_args(struct parser *p, struct node *n, bool macro) {
    bool keywords = false;
    size_t first = n->n;
    parse_nest(p);
    for (tok_expect(p, "("); !tok_is(p, ")");) {
        if (n->n > first) tok_expect(p, ",");
        if (tok_is(p, ")")) break;
        bool keyword = tok_is_name(p) && tok_equal(p->at + 1, "=");
        struct node *arg = keyword || macro ? node_new(p, N_KEYWORD) : parse_expr(p);
        if (keywords && !keyword) job_fail(p->j, "an argument without a name behind one with a name");
        if (arg->kind == N_KEYWORD && !arg->val.kind && (keyword || macro)) arg->val = tok_name(p);
        if (keyword) {
            tok_next(p);
            node_add(p, arg, parse_expr(p));
        }
        keywords = keyword;
        node_add(p, n, arg);
    }
    tok_next(p);
    p->j->depth--;
    return n;
}

/* .name, .0, [key] or [start:stop:step] behind an object */
static struct node *parse_subscript(struct parser *p, struct node *o) {
    struct node *n = node_add(p, node_new(p, N_ITEM), o), *part[3] = {0};
    if (tok_skip(p, ".")) {
        if (p->at->kind == T_INT) return node_add(p, n, parse_primary(p, 0));
        n->kind = N_ATTR;
        n->val = tok_name(p);
        return n;
    }
    parse_nest(p);
    tok_next(p);
    for (int i = 0; i < 3 && !tok_is(p, "]"); i++) {
        if (!tok_is(p, ":")) part[i] = parse_expr(p);
        if (!tok_skip(p, ":")) break;
        n->kind = N_SLICE;
    }
    if (n->kind == N_ITEM && !part[0]) tok_unexpected(p, "a subscript");
    for (int i = 0; i < (n->kind == N_SLICE ? 3 : 1); i++) node_add(p, n, part[i]);
    tok_expect(p, "]");
    p->j->depth--;
    return n;
}

static struct node *parse_postfix(struct parser *p, struct node *n) {
    for (;;) {
        if (tok_is(p, ".") || tok_is(p, "[")) n = parse_subscript(p, n);
        else if (tok_is(p, "(")) n = parse_args(p, node_add(p, node_new(p, N_CALL), n), false);
        else return n;
    }
}

/* The filter or test whose name comes next, applied to value. */
static struct node *parse_callee(struct parser *p, int kind, struct node *value) {
    struct node *n = node_add(p, node_new(p, kind), value);
    n->val = tok_name(p);
    n->fn = builtin_find(kind == N_FILTER ? AS_FILTER : AS_TEST, n->val);
    if (n->fn) return n;
    list_push(p->j, &p->unknown, n->val);
    list_push(p->j, &p->unknown, tv_int(n->line));
    return n;
}

/* name(arguments), then | and more filters */
static struct node *parse_filter(struct parser *p, struct node *value) {
    do {
        value = parse_callee(p, N_FILTER, value);
        if (tok_is(p, "(")) parse_args(p, value, false);
    } while (tok_skip(p, "|"));
    return value;
}

static struct node *parse_test(struct parser *p, struct node *value) {
    bool negate = tok_skip(p, "not");
    struct node *n = parse_callee(p, N_TEST, value);
    int k = p->at->kind;
    bool word = tok_is_name(p) && !tok_is(p, "else") && !tok_is(p, "or") && !tok_is(p, "and");
    if (tok_is(p, "is")) job_fail(p->j, "You cannot chain multiple tests with is");
    if (tok_is(p, "(")) parse_args(p, n, false);
    else if (word || k == T_STRING || k == T_INT || k == T_FLOAT || tok_is(p, "[") || tok_is(p, "{"))
        node_add(p, n, parse_postfix(p, parse_primary(p, 0)));
    return negate ? node_add(p, node_new(p, N_NOT), n) : n;
}

/* A sign binds closer than the filters and tests behind its operand. */
static struct node *parse_unary(struct parser *p, bool with_filters) {
    struct node *n;
    parse_nest(p);
    if (tok_is(p, "-") || tok_is(p, "+")) {
        n = node_new(p, tok_is(p, "-") ? N_NEG : N_POS);
        tok_next(p);
        node_add(p, n, parse_unary(p, false));
    } else n = parse_primary(p, 0);
    n = parse_postfix(p, n);
    while (with_filters) {
        if (tok_skip(p, "|")) n = parse_filter(p, n);
        else if (tok_skip(p, "is")) n = parse_test(p, n);
        else if (tok_is(p, "(")) n = parse_args(p, node_add(p, node_new(p, N_CALL), n), false);
        else break;
    }
    p->j->depth--;
    return n;
}

/* The operator at this level, passed over; OP_NONE if there is none here. */
static enum op parse_operator(struct parser *p, int level) {
    for (int op = OP_OR; op < OP_COUNT; op++) {
        if (op_table[op].level != level || !tok_is(p, op_table[op].text)) continue;
        if (op == OP_NOT_IN && !tok_equal(p->at + 1, "in")) continue;
        tok_next(p);
        if (op == OP_NOT_IN) tok_next(p);
        return (enum op)op;
    }
    return OP_NONE;
}

/* Operators of this level and above. All are left-associative, ** too; a < b < c is a < b and b < c. */
static struct node *parse_binary(struct parser *p, int level) {
    struct node *left, *n, *middle = NULL;
    if (level == LEVEL_UNARY) return parse_unary(p, true);
    if (level == LEVEL_NOT && tok_is(p, "not")) {
        n = node_new(p, N_NOT);
        parse_nest(p);
        tok_next(p);
        node_add(p, n, parse_binary(p, level));
        p->j->depth--;
        return n;
    }
    left = parse_binary(p, level + 1);
    for (enum op op; (op = parse_operator(p, level)) != OP_NONE;) {
        struct node *right = parse_binary(p, level + 1);
        n = node_add(p, node_add(p, node_new(p, N_BINARY), middle ? middle : left), right);
        n->op = (uint8_t)op;
        if (middle) {
            n = node_add(p, node_add(p, node_new(p, N_BINARY), left), n);
            n->op = OP_AND;
        }
        if (level == LEVEL_COMPARE) middle = right;
        left = n;
    }
    return left;
}

/* then if test else other */
static struct node *parse_expr(struct parser *p) {
    size_t known = p->unknown.n;
    parse_nest(p);
    struct node *then = parse_binary(p, LEVEL_OR);
    while (tok_is(p, "if")) {
        struct node *n = node_new(p, N_COND);
        tok_next(p);
        node_add(p, n, parse_binary(p, LEVEL_OR));
        node_add(p, n, then);
        then = node_add(p, n, tok_skip(p, "else") ? parse_expr(p) : NULL);
        p->unknown.n = known;
    }
    p->j->depth--;
    return then;
}

/* ---- statements ---- */

static struct node *parse_body(struct parser *p, const char *ends);

/* The body of a statement, behind the end of its tag, added to n; stops at the name of one of the tags in `ends`. */
static struct node *parse_block(struct parser *p, struct node *n, const char *ends) {
    tok_skip(p, ":");
    tok_end(p, T_BLOCK_END);
    parse_nest(p);
    node_add(p, n, parse_body(p, ends));
    p->j->depth--;
    return n;
}

static struct node *parse_last_block(struct parser *p, struct node *n, const char *end) {
    parse_block(p, n, end);
    tok_next(p);
    return n;
}

static void check_target(struct parser *p, const struct node *n) {
    if (n->kind == N_NAME && tv_is(n->val, "loop") && p->loops) job_fail(p->j, "Can't assign to special loop variable");
    if (n->kind != N_NAME && n->kind != N_MEMBER && n->kind != N_TUPLE) tok_unexpected(p, "a name to assign to");
    for (size_t i = 0; i < n->n && n->kind == N_TUPLE; i++) check_target(p, n->kid[i]);
}

static struct node *parse_target(struct parser *p, int flags) {
    struct node *n = parse_tuple(p, IS_TARGET | flags);
    check_target(p, n);
    return n;
}

static struct node *parse_if(struct parser *p, struct node *n) {
    size_t known = p->unknown.n;
    do {
        node_add(p, n, parse_tuple(p, 0));
        parse_block(p, n, "elif else endif");
    } while (tok_skip(p, "elif"));
    if (tok_skip(p, "else")) parse_block(p, n, "endif");
    tok_next(p);
    p->unknown.n = known;
    return n;
}

static struct node *parse_for(struct parser *p, struct node *n) {
    p->loops++;
    node_add(p, n, parse_target(p, 0));
    tok_expect(p, "in");
    node_add(p, n, parse_tuple(p, 0));
    node_add(p, n, tok_skip(p, "if") ? parse_expr(p) : NULL);
    if (tok_is(p, "recursive")) job_fail(p->j, "recursive loops are not supported");
    parse_block(p, n, "endfor else");
    p->loops--;
    bool other = tok_is(p, "else");
    tok_next(p);
    return other ? parse_last_block(p, n, "endfor") : node_add(p, n, NULL);
}

static struct node *parse_set(struct parser *p, struct node *n) {
    struct node *target = parse_target(p, MAY_BE_MEMBER);
    if (tok_skip(p, "=")) return node_add(p, node_add(p, n, target), parse_tuple(p, WITH_COND));
    struct node *apply = tok_skip(p, "|") ? parse_filter(p, node_new(p, N_CAPTURED)) : NULL;
    n->kind = N_SETBLOCK;
    parse_last_block(p, n, "endset");
    return node_add(p, node_add(p, n, apply), target);
}

static struct node *parse_filter_block(struct parser *p, struct node *n) {
    struct node *apply = parse_filter(p, node_new(p, N_CAPTURED));
    return node_add(p, parse_last_block(p, n, "endfilter"), apply);
}

static struct node *parse_macro(struct parser *p, struct node *n) {
    int loops = p->loops;
    n->val = tok_name(p);
    parse_args(p, n, true);
    p->loops = 0;
    parse_last_block(p, n, "endmacro");
    p->loops = loops;
    return n;
}

static struct node *parse_call_block(struct parser *p, struct node *n) {
    struct node *caller = node_new(p, N_MACRO);
    int loops = p->loops;
    if (tok_is(p, "(")) parse_args(p, caller, true);
    struct node *call = parse_expr(p);
    if (call->kind != N_CALL) tok_unexpected(p, "a call");
    p->loops = 0;
    parse_last_block(p, caller, "endcall");
    p->loops = loops;
    return node_add(p, node_add(p, n, call), caller);
}

static struct node *parse_with(struct parser *p, struct node *n) {
    while (p->at->kind != T_BLOCK_END) {
        if (n->n) tok_expect(p, ",");
        struct node *target = parse_primary(p, IS_TARGET);
        check_target(p, target);
        tok_expect(p, "=");
        node_add(p, node_add(p, n, target), parse_expr(p));
    }
    return parse_last_block(p, n, "endwith");
}

/* {% generation %} marks the assistant's text for training; here it is a scope and nothing more. */
static struct node *parse_generation(struct parser *p, struct node *n) {
    return parse_last_block(p, n, "endgeneration");
}

static struct node *parse_jump(struct parser *p, struct node *n) {
    if (!p->loops) job_fail(p->j, "'%s' outside of a loop", n->kind == N_BREAK ? "break" : "continue");
    return n;
}

static struct node *parse_statement(struct parser *p) {
    static const struct {
        const char *word;
        struct node *(*parse)(struct parser *p, struct node *n);
        int kind;
    } statements[] = {{"if", parse_if, N_IF},
                      {"for", parse_for, N_FOR},
                      {"set", parse_set, N_SET},
                      {"macro", parse_macro, N_MACRO},
                      {"call", parse_call_block, N_CALLBLOCK},
                      {"filter", parse_filter_block, N_FILTERBLOCK},
                      {"with", parse_with, N_WITH},
                      {"generation", parse_generation, N_WITH},
                      {"break", parse_jump, N_BREAK},
                      {"continue", parse_jump, N_CONTINUE}};
    for (size_t i = 0; i < sizeof statements / sizeof statements[0]; i++) {
        if (!tok_is(p, statements[i].word)) continue;
        struct node *n = node_new(p, statements[i].kind);
        tok_next(p);
        return statements[i].parse(p, n);
    }
    if (!tok_is_name(p)) tok_unexpected(p, "the name of a statement");
    job_fail(p->j, "the statement '%.*s' is unknown, not supported or out of place", SHOW(*p->at));
}

/* Text, prints and statements up to a tag named in `ends`; NULL: up to the end of the template. */
static struct node *parse_body(struct parser *p, const char *ends) {
    struct node *body = node_new(p, N_BODY), *n;
    for (;; node_add(p, body, n)) {
        const struct token *t = p->at;
        if (t->kind == T_EOF && ends) tok_unexpected(p, ends);
        if (t->kind == T_EOF) return body;
        n = node_new(p, t->kind == T_DATA ? N_DATA : N_PRINT);
        tok_next(p);
        if (t->kind == T_DATA) n->val = tv_text(p->j, t->s, t->n, ORIGIN_TEMPLATE);
        else if (t->kind == T_VAR) {
            node_add(p, n, parse_tuple(p, WITH_COND));
            tok_end(p, T_VAR_END);
        } else { /* T_BLOCK: the lexer gives nothing else outside of tags */
            for (const char *e = ends; e && *e; e += strcspn(e, " "), e += *e == ' ') {
                char word[16] = "";
                snprintf(word, sizeof word, "%.*s", (int)strcspn(e, " "), e);
                if (tok_is(p, word)) return body;
            }
            n = parse_statement(p);
            tok_end(p, T_BLOCK_END);
        }
    }
}

struct source {
    const char *s;
    size_t n;
    struct template *t;
};

/* Source to tree, inside job_run. */
static void parse_source(struct job *j, void *arg) {
    struct source *src = arg;
    struct lexer l = {.j = j, .line_start = true};
    char *s = job_alloc(j, src->n + 1);
    for (size_t i = 0; i < src->n; i++) { /* \r\n and \r become \n */
        if (src->s[i] == '\n' && i && src->s[i - 1] == '\r') continue;
        s[l.n++] = src->s[i] == '\r' ? '\n' : src->s[i];
    }
    if (l.n && s[l.n - 1] == '\n') l.n--; /* keep_trailing_newline is off */
    l.s = s;
    lex_template(&l);
    for (int i = 0; i < 2; i++) lex_token(&l, T_EOF, 0, 0); /* the parser looks one token ahead */
    struct parser p = {.j = j, .at = l.token};
    src->t->body = parse_body(&p, NULL);
    if (!p.unknown.n) return;
    j->line = (int)p.unknown.v[1].i;
    job_fail(j, "No filter or test named '%.*s'.", SHOW(p.unknown.v[0]));
}

/* ============================================================================================================
 * Chat template: rendering
 *
 * A walk over the tree. Assignments go to the innermost scope; for, macro, call, with and the blocks that capture text
 * open one, if does not. A loop starts every round with an empty scope.
 * ============================================================================================================ */

enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

static struct tv node_eval(struct job *j, const struct node *n);
static enum flow node_exec(struct job *j, const struct node *n);

static struct tv *variable_find(struct job *j, struct tv name) {
    struct tv *v = NULL;
    for (struct scope *s = j->scope; s && !v; s = s->up) v = dict_find(j, &s->vars, name);
    return v;
}

static struct scope *scope_open(struct job *j, struct scope *up) {
    struct scope *s = job_alloc(j, sizeof *s);
    s->up = up;
    return j->scope = s;
}

static void node_assign(struct job *j, const struct node *target, struct tv v) {
    if (target->kind == N_NAME) {
        dict_set(j, &j->scope->vars, target->val, v);
        return;
    }
    if (target->kind == N_MEMBER) {
        struct tv o = node_eval(j, target->kid[0]);
        if (o.kind != TV_NAMESPACE) tv_fail(j, o, "cannot assign attribute on non-namespace object");
        dict_set(j, o.list, target->kid[1]->val, v);
        return;
    }
    const struct list *l = tv_iter(j, v);
    if (l->n != target->n)
        job_fail(j, "%s values to unpack (expected %zu, got %zu)", l->n < target->n ? "not enough" : "too many",
                 target->n, l->n);
    for (size_t i = 0; i < l->n; i++) node_assign(j, target->kid[i], l->v[i]);
}

/* What a body prints, as a string. */
static struct tv node_capture(struct job *j, const struct node *body, enum flow *flow) {
    struct buf b = {0}, *out = j->out;
    j->out = &b;
    *flow = node_exec(j, body);
    j->out = out;
    return buf_str(&b);
}

static struct tv macro_call(struct job *j, const struct macro *m, struct args *a) {
    struct scope *outer = j->scope;
    size_t params = m->def->n - 1, used = 0;
    int line = j->line;
    enum flow flow;
    struct tv caller = tv_lit(j, "caller"), *body = dict_find(j, &a->kw, caller);
    if (a->pos.n > params) job_fail(j, "the macro takes not more than %zu argument(s)", params);
    scope_open(j, m->scope);
    dict_set(j, &j->scope->vars, caller, body ? *body : tv_undef(j, "No caller defined"));
    for (size_t i = 0; i < params; i++) {
        const struct node *param = m->def->kid[i];
        struct tv *kw = i < a->pos.n ? &a->pos.v[i] : dict_find(j, &a->kw, param->val);
        struct tv v = kw         ? *kw
                      : param->n ? node_eval(j, param->kid[0])
                                 : tv_undef(j, "parameter '%.*s' was not provided", SHOW(param->val));
        used += kw && i >= a->pos.n && !tv_is(param->val, "caller");
        dict_set(j, &j->scope->vars, param->val, v);
    }
    if (2 * (used + (body != NULL)) < a->kw.n)
        job_fail(j, "the macro has no parameter of one of the given names, or got it twice");
    struct tv v = node_capture(j, m->def->kid[params], &flow);
    j->scope = outer, j->line = line;
    return v;
}

/* Arguments of a call, filter or test: the kids behind the first. */
static struct args eval_args(struct job *j, const struct node *n) {
    struct args a = {0};
    for (size_t i = 1; i < n->n; i++) {
        const struct node *kid = n->kid[i];
        if (kid->kind == N_KEYWORD) dict_set(j, &a.kw, kid->val, node_eval(j, kid->kid[0]));
        else list_push(j, &a.pos, node_eval(j, kid));
    }
    j->line = n->line;
    return a;
}

/* `caller`: the body of a call block, or NULL. */
static struct tv eval_call(struct job *j, const struct node *n, const struct macro *caller) {
    struct tv f = node_eval(j, n->kid[0]);
    struct args a = eval_args(j, n);
    if (caller) dict_set(j, &a.kw, tv_lit(j, "caller"), (struct tv){.kind = TV_MACRO, .macro = caller});
    if (f.kind == TV_MACRO) return macro_call(j, f.macro, &a);
    if (f.kind != TV_FUNC) tv_fail(j, f, "'%s' object is not callable", tv_type(f));
    return builtin_call(j, f.func->fn, f.func->self, &a);
}

static struct tv eval_name(struct job *j, const struct node *n) {
    struct tv *v = variable_find(j, n->val);
    const struct builtin *global = v ? NULL : builtin_find(AS_GLOBAL, n->val);
    if (v) return *v;
    if (!global) return tv_undef(j, "'%.*s' is undefined", SHOW(n->val));
    struct func *f = job_alloc(j, sizeof *f);
    f->fn = global;
    return (struct tv){.kind = TV_FUNC, .func = f};
}

static struct tv eval_display(struct job *j, const struct node *n) {
    struct tv v = tv_list(j, n->kind == N_DICT ? TV_DICT : n->kind == N_LIST ? TV_LIST : TV_TUPLE);
    for (size_t i = 0; i < n->n; i++) {
        struct tv item = node_eval(j, n->kid[i]);
        if (n->kind == N_DICT) dict_set(j, v.list, item, node_eval(j, n->kid[++i]));
        else list_push(j, v.list, item);
    }
    return v;
}

static struct tv eval_sign(struct job *j, const struct node *n) {
    struct tv v = node_eval(j, n->kid[0]);
    if (!tv_number(v)) tv_fail(j, v, "bad operand type for unary %s: '%s'", n->kind == N_NEG ? "-" : "+", tv_type(v));
    return tv_binary(j, n->kind == N_NEG ? OP_MUL : OP_ADD, tv_int(n->kind == N_NEG ? -1 : 0), v);
}

static struct tv eval_apply(struct job *j, const struct node *n) {
    struct tv v = node_eval(j, n->kid[0]);
    struct args a = eval_args(j, n);
    if (!n->fn) job_fail(j, "No %s named '%.*s'.", n->kind == N_FILTER ? "filter" : "test", SHOW(n->val));
    return builtin_call(j, n->fn, v, &a);
}

static struct tv eval_slice(struct job *j, const struct node *n) {
    struct tv v[4];
    for (int i = 0; i < 4; i++) v[i] = n->kid[i] ? node_eval(j, n->kid[i]) : tv_none();
    return tv_slice(j, v[0], v[1], v[2], v[3]);
}

static struct tv eval_binary(struct job *j, const struct node *n) {
    struct tv a = node_eval(j, n->kid[0]);
    enum op op = (enum op)n->op;
    if (op == OP_AND || op == OP_OR) return tv_truthy(a) == (op == OP_AND) ? node_eval(j, n->kid[1]) : a;
    struct tv b = node_eval(j, n->kid[1]);
    j->line = n->line;
    return op_table[op].level == LEVEL_COMPARE ? tv_bool(tv_compare(j, op, a, b)) : tv_binary(j, op, a, b);
}

static struct tv eval_get(struct job *j, const struct node *n) {
    struct tv o = node_eval(j, n->kid[0]), key = n->kind == N_ATTR ? n->val : node_eval(j, n->kid[1]);
    j->line = n->line;
    return tv_get(j, o, key, n->kind == N_ATTR);
}

static struct tv eval_cond(struct job *j, const struct node *n) {
    const struct node *kid = n->kid[tv_truthy(node_eval(j, n->kid[0])) ? 1 : 2];
    return kid ? node_eval(j, kid)
               : tv_undef(j, "the inline if-expression evaluated to false and no else section was defined.");
}

static struct tv node_eval(struct job *j, const struct node *n) {
    struct tv v;
    job_enter(j);
    j->line = n->line;
    switch ((enum node_kind)n->kind) {
    case N_CONST: v = n->val; break;
    case N_NAME: v = eval_name(j, n); break;
    case N_ATTR:
    case N_ITEM: v = eval_get(j, n); break;
    case N_SLICE: v = eval_slice(j, n); break;
    case N_CALL: v = eval_call(j, n, NULL); break;
    case N_FILTER:
    case N_TEST: v = eval_apply(j, n); break;
    case N_NOT: v = tv_bool(!tv_truthy(node_eval(j, n->kid[0]))); break;
    case N_NEG:
    case N_POS: v = eval_sign(j, n); break;
    case N_BINARY: v = eval_binary(j, n); break;
    case N_COND: v = eval_cond(j, n); break;
    case N_CAPTURED: v = j->captured; break;
    default: v = eval_display(j, n); /* N_LIST, N_TUPLE, N_DICT */
    }
    j->depth--;
    return v;
}

/* The next element that passes the loop's `if`. */
static bool loop_take(struct job *j, struct loop *l, struct tv *out) {
    while (l->at < l->src->n) {
        struct scope *scope = j->scope;
        *out = l->src->v[l->at++];
        if (!l->test) return true;
        scope_open(j, l->outer);
        node_assign(j, l->target, *out);
        bool pass = tv_truthy(node_eval(j, l->test));
        j->scope = scope;
        if (pass) return true;
    }
    out->kind = TV_ABSENT;
    return false;
}

static enum flow exec_for(struct job *j, const struct node *n) {
    struct scope *outer = j->scope;
    struct loop *l = job_alloc(j, sizeof *l);
    *l = (struct loop){.target = n->kid[0], .test = n->kid[2], .outer = outer, .index0 = -1};
    l->src = tv_iter(j, node_eval(j, n->kid[1]));
    struct scope *scope = scope_open(j, outer);
    bool ran = false; /* as jinja2 has it: a round that ends in break or continue does not count for else */
    enum flow flow = FLOW_NEXT;
    while (flow != FLOW_BREAK && loop_peek(j, l)) {
        l->prev = l->cur, l->cur = l->next, l->next.kind = TV_ABSENT, l->index0++;
        scope->vars.n = 0;
        dict_set(j, &scope->vars, tv_lit(j, "loop"), (struct tv){.kind = TV_LOOP, .loop = l});
        node_assign(j, l->target, l->cur);
        flow = node_exec(j, n->kid[3]);
        ran |= flow == FLOW_NEXT;
    }
    flow = FLOW_NEXT;
    if (!ran && n->kid[4]) {
        scope_open(j, outer);
        flow = node_exec(j, n->kid[4]);
    }
    j->scope = outer;
    return flow;
}

/* {% set x %} and {% filter f %} blocks */
static enum flow exec_capture(struct job *j, const struct node *n) {
    struct scope *outer = j->scope;
    enum flow flow;
    scope_open(j, outer);
    struct tv v = j->captured = node_capture(j, n->kid[0], &flow);
    if (flow == FLOW_NEXT && n->kid[1]) v = node_eval(j, n->kid[1]);
    j->scope = outer;
    if (flow != FLOW_NEXT) return flow;
    if (n->kind == N_SETBLOCK) node_assign(j, n->kid[2], v);
    else buf_put(j, j->out, tv_str(j, v));
    return FLOW_NEXT;
}

static enum flow exec_with(struct job *j, const struct node *n) {
    struct scope *outer = j->scope, *inner = scope_open(j, outer);
    for (size_t i = 0; i + 1 < n->n; i += 2) {
        j->scope = outer;
        struct tv v = node_eval(j, n->kid[i + 1]);
        j->scope = inner;
        node_assign(j, n->kid[i], v);
    }
    enum flow flow = node_exec(j, n->kid[n->n - 1]);
    j->scope = outer;
    return flow;
}

static enum flow exec_if(struct job *j, const struct node *n) {
    size_t i = 0;
    while (i + 1 < n->n && !tv_truthy(node_eval(j, n->kid[i]))) i += 2;
    return i + 1 < n->n ? node_exec(j, n->kid[i + 1]) : i < n->n ? node_exec(j, n->kid[i]) : FLOW_NEXT;
}

static void exec_macro(struct job *j, const struct node *n) {
    struct macro *m = job_alloc(j, sizeof *m);
    *m = (struct macro){n->kind == N_CALLBLOCK ? n->kid[1] : n, j->scope};
    if (n->kind == N_CALLBLOCK) buf_put(j, j->out, tv_str(j, eval_call(j, n->kid[0], m)));
    else dict_set(j, &j->scope->vars, n->val, (struct tv){.kind = TV_MACRO, .macro = m});
}

static enum flow node_exec(struct job *j, const struct node *n) {
    enum flow flow = FLOW_NEXT;
    job_enter(j);
    j->line = n->line;
    switch ((enum node_kind)n->kind) {
    case N_DATA: buf_put(j, j->out, n->val); break;
    case N_PRINT: buf_put(j, j->out, tv_str(j, node_eval(j, n->kid[0]))); break;
    case N_IF: flow = exec_if(j, n); break;
    case N_FOR: flow = exec_for(j, n); break;
    case N_SET: node_assign(j, n->kid[0], node_eval(j, n->kid[1])); break;
    case N_SETBLOCK:
    case N_FILTERBLOCK: flow = exec_capture(j, n); break;
    case N_MACRO:
    case N_CALLBLOCK: exec_macro(j, n); break;
    case N_WITH: flow = exec_with(j, n); break;
    case N_BREAK: flow = FLOW_BREAK; break;
    case N_CONTINUE: flow = FLOW_CONTINUE; break;
    default: /* N_BODY */
        for (size_t i = 0; i < n->n && flow == FLOW_NEXT; i++) flow = node_exec(j, n->kid[i]);
    }
    j->depth--;
    return flow;
}

struct rendering {
    const struct template *t;
    const json_t *vars;
    struct text *out;
};

/* Inside job_run. */
static void render_body(struct job *j, void *arg) {
    static const char *const data[] = {"messages", "tools", "documents"};
    struct rendering *r = arg;
    struct buf b = {0};
    const char *key;
    json_t *value;
    size_t n;
    j->out = &b;
    scope_open(j, NULL);
    for (int i = 1; i < 3; i++) dict_set(j, &j->scope->vars, tv_lit(j, data[i]), tv_none()); /* as transformers does */
    json_object_keylen_foreach((json_t *)r->vars, key, n, value) {
        struct tv name = tv_text(j, key, n, ORIGIN_TEMPLATE);
        bool is_data = tv_is(name, data[0]) || tv_is(name, data[1]) || tv_is(name, data[2]);
        dict_set(j, &j->scope->vars, name, tv_json(j, value, is_data));
    }
    node_exec(j, r->t->body);
    if (!b.n) return;
    memcpy(arraddnptr(r->out->s, b.n), b.s, b.n);
    memcpy(arraddnptr(r->out->origin, b.n), b.o, b.n);
}

/* Runs work; an error inside it ends here. The job lies outside of this frame, as longjmp wants it. */
static int job_run(struct job *j, void (*work)(struct job *j, void *arg), void *arg) {
    if (!setjmp(j->out_of_here)) work(j, arg);
    return j->rc;
}

static void template_free(struct template *t) {
    if (!t) return;
    pool_free(t->pool);
    free(t);
}

/* From n bytes of source. NULL and "line N: ..." for what is malformed or not supported. */
static struct template *template_parse(const char *src, size_t n, char *err) {
    struct template *t = xcalloc(1, sizeof *t);
    struct job j = {.err = err, .line = 1};
    int rc = job_run(&j, parse_source, &(struct source){src, n, t});
    t->pool = j.pool;
    if (!rc) return t;
    template_free(t);
    return NULL;
}

/* Appends the text to *out. Every key of the JSON object vars is a variable; `now` (2026-11-20T10:00:00) is also the time
 * of strftime_now. -1 and "line N: ...", or -2 and exactly the message that the template gave to raise_exception. */
static int template_render(const struct template *t, const json_t *vars, struct text *out, char *err) {
    struct job j = {.err = err};
    if (!json_is_object(vars)) return fail(err, "template variables: expected a JSON object");
    int rc = job_run(&j, render_body, &(struct rendering){t, vars, out});
    for (size_t i = 0; i < arrlenu(j.parsed); i++) json_decref(j.parsed[i]);
    arrfree(j.parsed);
    pool_free(j.pool);
    return rc;
}
/* ============================================================================================================
 * Model: metadata, tensors, binding
 *
 * A model is immutable after model_load. Every size is read from the file. Every tensor is bound once, by name, with its
 * shape checked against the metadata; afterwards nothing is looked up by string. A tensor of the file that no family
 * knows is an error, and so is a router, rope or scaling variant that is not known: nothing is guessed.
 * Loading ends the program only where an allocation fails, and never allocates more than a small multiple of what the file
 * really holds.
 * ============================================================================================================ */

static const char *const arch_names[] = {[ARCH_QWEN3MOE] = "qwen3moe", [ARCH_DEEPSEEK2] = "deepseek2"};

/* What loading carries along. The first error sticks; every step after it does nothing. */
struct loader {
    struct model *m;
    const struct gguf *g;
    const char *arch; /* prefix of the keys */
    bool *used;       /* (n_tensors) */
    char *err;
    bool failed;
};

__attribute__((format(printf, 2, 3))) static void loader_fail(struct loader *l, const char *fmt, ...) {
    if (l->failed) return;
    l->failed = true;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(l->err, ERR_MAX, fmt, ap);
    va_end(ap);
}

/* The key ARCH.suffix, or NULL. `key` receives its full name for messages. */
static const struct gguf_kv *loader_key(struct loader *l, const char *suffix, char key[128]) {
    snprintf(key, 128, "%s.%s", l->arch, suffix);
    return l->failed ? NULL : gguf_find(l->g, key);
}

#define KEY_REQUIRED INT64_MIN

/* An integer key within [lo, hi]; `dflt`, which may follow from other keys and is checked too, when absent, an error when dflt
 * is KEY_REQUIRED. An array with one value per layer is accepted if all are equal. */
static int loader_int(struct loader *l, const char *suffix, int64_t dflt, int64_t lo, int64_t hi) {
    char key[128];
    int64_t v = dflt, w;
    const struct gguf_kv *kv = loader_key(l, suffix, key);
    if (l->failed) return 0;
    if (!kv && dflt == KEY_REQUIRED) loader_fail(l, "metadata key '%s' is missing", key);
    if (kv && (!kv->n || !gguf_elem_int(kv, 0, &v))) loader_fail(l, "metadata key '%s' is not an integer", key);
    for (uint64_t i = 1; kv && i < kv->n && !l->failed; i++)
        if (!gguf_elem_int(kv, i, &w) || w != v) loader_fail(l, "metadata key '%s' differs between layers", key);
    if (!l->failed && (v < lo || v > hi))
        loader_fail(l, "metadata key '%s' is %lld%s, expected %lld to %lld", key, (long long)v, kv ? "" : " by default",
                    (long long)lo, (long long)hi);
    return l->failed ? 0 : (int)v;
}

/* A finite number within [lo, hi]; NAN as default: required. */
static float loader_num(struct loader *l, const char *suffix, double dflt, double lo, double hi) {
    char key[128];
    double v = dflt;
    const struct gguf_kv *kv = loader_key(l, suffix, key);
    if (l->failed) return 0;
    if (!kv && isnan(dflt)) loader_fail(l, "metadata key '%s' is missing", key);
    if (kv && (kv->is_array || !gguf_elem_f64(kv, 0, &v))) loader_fail(l, "metadata key '%s' is not a number", key);
    if (kv && !l->failed && !(v >= lo && v <= hi))
        loader_fail(l, "metadata key '%s' is %g, expected %g to %g", key, v, lo, hi);
    return l->failed ? 0 : (float)v;
}

static bool loader_bool(struct loader *l, const char *suffix, bool dflt) {
    char key[128];
    const struct gguf_kv *kv = loader_key(l, suffix, key);
    if (!kv) return dflt;
    if (kv->is_array || kv->type != GGUF_V_BOOL) loader_fail(l, "metadata key '%s' is not a boolean", key);
    return !l->failed && kv->data[0];
}

static void *loader_own(struct loader *l, size_t bytes) {
    void *p = xaligned(bytes);
    arrput(l->m->owned, p);
    return p;
}

static const char *shape_text(const uint64_t *ne, uint32_t n, char out[96]) {
    int k = 0;
    for (uint32_t i = 0; i < n; i++)
        k += snprintf(out + k, 96 - (size_t)k, "%s%llu", i ? ", " : "", (unsigned long long)ne[i]);
    return out;
}

/* The tensor of that name, marked as used; NULL when absent (an error unless optional) or when its shape is not
 * {n0, n1, n2} with trailing ones ignored. A dimension given as 0 may have any size. */
static const struct gguf_tensor *loader_tensor(struct loader *l, const char *name, uint64_t n0, uint64_t n1,
                                               uint64_t n2, bool optional) {
    char want[96], got[96];
    if (l->failed) return NULL;
    const struct gguf_tensor *t = gguf_find_tensor(l->g, name);
    if (!t) {
        if (!optional) loader_fail(l, "tensor '%s' is missing", name);
        return NULL;
    }
    uint64_t w[4] = {n0 ? n0 : t->ne[0], n1 ? n1 : t->ne[1], n2 ? n2 : t->ne[2], 1};
    if (memcmp(w, t->ne, sizeof w)) {
        uint32_t n = w[2] > 1 ? 3 : w[1] > 1 ? 2 : 1;
        loader_fail(l, "tensor '%s' has the shape {%s}, expected {%s}", name, shape_text(t->ne, t->n_dims, got),
                    shape_text(w, n, want));
        return NULL;
    }
    l->used[t - l->g->tensors] = true;
    return t;
}

/* A vector of n floats, converted from F32, F16 or BF16 into memory of the model. */
static const float *loader_vector(struct loader *l, const char *name, int n, bool optional) {
    const struct gguf_tensor *t = loader_tensor(l, name, (uint64_t)n, 1, 1, optional);
    if (!t) return NULL;
    if (t->type != GGUF_F32 && t->type != GGUF_F16 && t->type != GGUF_BF16) {
        loader_fail(l, "tensor '%s' has the type %s, expected F32, F16 or BF16", name, gguf_type_info(t->type).name);
        return NULL;
    }
    float *v = loader_own(l, (size_t)n * sizeof *v);
    gguf_dequantize_row(t->type, t->data, v, (size_t)n);
    for (int i = 0; i < n; i++)
        if (!isfinite(v[i])) {
            loader_fail(l, "tensor '%s' holds %g at index %d", name, v[i], i);
            return NULL;
        }
    return v;
}

/* BASE.weight of the shape {n_in, n_out, n_expert} (n_expert 1: a plain matrix) and its optional BASE.scale, of one factor
 * or one per expert. */
static void loader_weight(struct loader *l, struct weight *w, int n_in, int n_out, int n_expert, bool optional,
                          const char *base) {
    char name[160];
    snprintf(name, sizeof name, "%s.weight", base);
    const struct gguf_tensor *t = loader_tensor(l, name, (uint64_t)n_in, (uint64_t)n_out, (uint64_t)n_expert, optional);
    if (!t) return;
    if (t->type >= GGUF_I8 && t->type <= GGUF_F64) {
        loader_fail(l, "tensor '%s' has the type %s, which is not one of weights", name, gguf_type_info(t->type).name);
        return;
    }
    w->data = t->data, w->type = t->type;
    w->n_in = n_in, w->n_out = n_out, w->n_expert = n_expert;
    w->row_bytes = gguf_row_bytes(t->type, (size_t)n_in);
    w->expert_bytes = w->row_bytes * (size_t)n_out;
    snprintf(name, sizeof name, "%s.scale", base);
    t = gguf_find_tensor(l->g, name);
    if (t) {
        const float *s = loader_vector(l, name, t->ne[0] == 1 ? 1 : n_expert, false);
        float *all = s ? loader_own(l, (size_t)n_expert * sizeof *all) : NULL;
        for (int e = 0; all && e < n_expert; e++) all[e] = s[t->ne[0] == 1 ? 0 : e];
        w->scale = all;
    }
    /* the scale that activations had at calibration: kernels that quantise activations measure their own */
    snprintf(name, sizeof name, "%s.input_scale", base);
    t = gguf_find_tensor(l->g, name);
    if (t) l->used[t - l->g->tensors] = true, w->has_input_scale = true;
}

static void loader_layer_weight(struct loader *l, struct weight *w, int il, const char *what, int n_in, int n_out,
                                int n_expert, bool optional) {
    char base[128];
    snprintf(base, sizeof base, "blk.%d.%s", il, what);
    loader_weight(l, w, n_in, n_out, n_expert, optional, base);
}

static const float *loader_layer_vector(struct loader *l, int il, const char *what, int n, bool optional) {
    char name[128];
    snprintf(name, sizeof name, "blk.%d.%s", il, what);
    return loader_vector(l, name, n, optional);
}

/* Rotary frequencies, with the interpolation that the file asks for (YaRN: arXiv 2309.00071, section 3.2 and 3.4). */
static void loader_rope(struct loader *l) {
    struct model *m = l->m;
    struct gguf_str type = {"linear", 6}; /* upstream's default; without a factor it is none */
    char key[128];
    double base = loader_num(l, "rope.freq_base", 10000.0, 1.0, 1e12);
    double factor = loader_num(l, "rope.scaling.factor", 1.0, 0.0, 1e6);
    int original = loader_int(l, "rope.scaling.original_context_length", m->n_ctx_train, 1, INT32_MAX);
    double beta_fast = loader_num(l, "rope.scaling.yarn_beta_fast", 32.0, 0.0, 1e6);
    double beta_slow = loader_num(l, "rope.scaling.yarn_beta_slow", 1.0, 0.0, 1e6);
    double attn_factor = loader_num(l, "rope.scaling.attn_factor", 1.0, 0.0, 1e3);
    double log_mul = loader_num(l, "rope.scaling.yarn_log_multiplier", 0.0, 0.0, 10.0);
    snprintf(key, sizeof key, "%s.rope.scaling.type", l->arch);
    if (l->failed) return;
    if (gguf_find(l->g, key) && !gguf_get_str(l->g, key, &type))
        loader_fail(l, "metadata key '%s' is not a string", key);
    bool yarn = gguf_str_eq(type, "yarn"), linear = gguf_str_eq(type, "linear");
    if (!yarn && !linear && !gguf_str_eq(type, "none")) {
        char t[32];
        loader_fail(l, "metadata key '%s' is '%s'; known are none, linear and yarn", key,
                    gguf_printable(type, t, sizeof t));
    }
    loader_num(l, "rope.scale_linear", 1.0, 1.0, 1.0); /* not supported: nothing but the neutral values */
    loader_num(l, "rope.scaling.yarn_ext_factor", yarn, yarn, yarn);
    if (l->failed) return;
    if (factor == 0.0 || (!yarn && !linear)) factor = 1.0;
    m->rope_factor = (float)attn_factor;
    m->attn_scale = 1.0f / sqrtf((float)m->head_k);
    if (yarn && m->kv_lora && log_mul == 0.0) {
        loader_fail(l,
                    "metadata key '%s.rope.scaling.yarn_log_multiplier' is missing: YaRN with latent "
                    "attention needs it",
                    l->arch);
    } else if (yarn && m->kv_lora) { /* DeepSeek: the factor goes into the softmax scale, cos and sin stay */
        double mscale = 1.0 + log_mul * log(factor > 1.0 ? factor : 1.0);
        m->attn_scale *= (float)(mscale * mscale);
    } else if (yarn) {
        m->rope_factor *= (float)(1.0 + 0.1 * log(factor > 1.0 ? factor : 1.0));
    }
    int d = m->rope_dim;
    double lo = floor(d * log(original / (beta_fast * 2 * M_PI)) / (2 * log(base)));
    double hi = ceil(d * log(original / (beta_slow * 2 * M_PI)) / (2 * log(base)));
    lo = fmax(lo, 0.0), hi = fmin(hi, d - 1.0);
    if (lo == hi) hi += 0.001;
    float *freq = loader_own(l, (size_t)d / 2 * sizeof *freq);
    for (int i = 0; i < d / 2; i++) {
        double f = pow(base, -2.0 * i / d);
        double ramp = yarn ? fmin(fmax((i - lo) / (hi - lo), 0.0), 1.0) : 1.0;
        freq[i] = (float)(f / factor * ramp + f * (1.0 - ramp));
        if (!isfinite(freq[i])) loader_fail(l, "rotary frequency %d is not finite: see the keys %s.rope.*", i, l->arch);
    }
    m->rope_freq = freq;
}

static void loader_hparams(struct loader *l) {
    struct model *m = l->m;
    bool mla = m->arch == ARCH_DEEPSEEK2;
    m->n_ctx_train = loader_int(l, "context_length", KEY_REQUIRED, 1, 1 << 28);
    m->n_embd = loader_int(l, "embedding_length", KEY_REQUIRED, 1, 1 << 17);
    int blocks = loader_int(l, "block_count", KEY_REQUIRED, 1, MAX_LAYERS);
    m->n_mtp_layer = loader_int(l, "nextn_predict_layers", 0, 0, blocks - 1);
    m->n_layer = blocks - m->n_mtp_layer;
    m->n_head = loader_int(l, "attention.head_count", KEY_REQUIRED, 1, 1024);
    m->n_head_kv = loader_int(l, "attention.head_count_kv", m->n_head, 1, m->n_head);
    m->rms_eps = loader_num(l, "attention.layer_norm_rms_epsilon", NAN, 0.0, 1.0);
    m->n_expert_max = loader_int(l, "expert_count", KEY_REQUIRED, 1, MAX_EXPERTS);
    m->n_expert_used =
        loader_int(l, "expert_used_count", KEY_REQUIRED, 1, m->n_expert_max < MAX_TOPK ? m->n_expert_max : MAX_TOPK);
    if (mla) {
        m->q_lora = loader_int(l, "attention.q_lora_rank", 0, 0, 1 << 16);
        m->kv_lora = loader_int(l, "attention.kv_lora_rank", KEY_REQUIRED, 1, 8192);
        m->head_k = loader_int(l, "attention.key_length_mla", KEY_REQUIRED, 2, 4096);
        m->head_v = loader_int(l, "attention.value_length_mla", KEY_REQUIRED, 1, 4096);
        m->rope_dim = loader_int(l, "rope.dimension_count", KEY_REQUIRED, 2, m->head_k - 1);
        m->nope = m->head_k - m->rope_dim;
        if (loader_num(l, "attention.temperature_scale", 0.0, 0.0, 1e6) != 0.0f)
            loader_fail(l, "metadata key '%s.attention.temperature_scale' is set: that variant is not supported",
                        l->arch);
    } else {
        m->head_k = loader_int(l, "attention.key_length", m->n_head ? m->n_embd / m->n_head : 0, 2, 4096);
        m->head_v = loader_int(l, "attention.value_length", m->head_k, 1, 4096);
        m->rope_dim = loader_int(l, "rope.dimension_count", m->head_k, 2, m->head_k);
    }
    if (!l->failed && (m->rope_dim % 2 || m->n_head % m->n_head_kv))
        loader_fail(l, "%d rotary dimensions, %d heads, %d KV heads do not fit together", m->rope_dim, m->n_head,
                    m->n_head_kv);
    m->n_group = loader_int(l, "expert_group_count", 1, 0, MAX_EXPERTS);
    m->n_group_used = loader_int(l, "expert_group_used_count", m->n_group, 0, m->n_group ? m->n_group : 1);
    if (m->n_group < 2) m->n_group = m->n_group_used = 1;
    if (!l->failed && !m->n_group_used) loader_fail(l, "metadata key '%s.expert_group_used_count' is 0", l->arch);
    int gating = loader_int(l, "expert_gating_func", 0, 0, GATING_SIGMOID);
    bool by_arch = !gating && !mla; /* 0: as the architecture has it, and that includes the norm */
    m->gating = gating ? (enum gating)gating : GATING_SOFTMAX;
    m->norm_topk_prob = by_arch || loader_bool(l, "expert_weights_norm", !mla);
    m->routed_scaling_factor = loader_num(l, "expert_weights_scale", 1.0, 0.0, 1e6);
    if (m->routed_scaling_factor == 0.0f) m->routed_scaling_factor = 1.0f;
    loader_rope(l);
}

/* Kept original ids of a pruned layer: moe.reap.kept.N. */
static void loader_retained(struct loader *l, struct layer *layer, int il) {
    char key[64];
    int64_t v, last = -1;
    snprintf(key, sizeof key, "moe.reap.kept.%d", il);
    const struct gguf_kv *kv = l->failed ? NULL : gguf_find(l->g, key);
    if (!kv) return;
    if (!kv->is_array || kv->n != (uint64_t)layer->n_expert) {
        loader_fail(l, "metadata key '%s' lists %llu experts, the layer has %d", key, (unsigned long long)kv->n,
                    layer->n_expert);
        return;
    }
    int32_t *kept = loader_own(l, (size_t)layer->n_expert * sizeof *kept);
    for (int e = 0; e < layer->n_expert; e++, last = v) {
        if (!gguf_elem_int(kv, (uint64_t)e, &v) || v <= last || v > INT32_MAX) {
            loader_fail(l, "metadata key '%s' is not an ascending list of expert ids", key);
            return;
        }
        kept[e] = (int32_t)v;
    }
    layer->retained = kept;
}

/* Routed experts (their count is the router's), the shared expert, or a dense feed-forward. */
static void loader_ffn(struct loader *l, struct layer *layer, int il) {
    struct model *m = l->m;
    char name[128];
    snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", il);
    const struct gguf_tensor *router = gguf_find_tensor(l->g, name);
    if (l->failed) return;
    if (!router) {
        snprintf(name, sizeof name, "blk.%d.ffn_gate.weight", il);
        const struct gguf_tensor *t = loader_tensor(l, name, (uint64_t)m->n_embd, 0, 1, false);
        if (!t || t->ne[1] > 1 << 20) {
            if (t)
                loader_fail(l, "tensor '%s' is %llu wide, expected at most %d", name, (unsigned long long)t->ne[1],
                            1 << 20);
            return;
        }
        int n_ff = (int)t->ne[1];
        if (n_ff > m->n_ff_dense) m->n_ff_dense = n_ff;
        loader_layer_weight(l, &layer->gate, il, "ffn_gate", m->n_embd, n_ff, 1, false);
        loader_layer_weight(l, &layer->up, il, "ffn_up", m->n_embd, n_ff, 1, false);
        loader_layer_weight(l, &layer->down, il, "ffn_down", n_ff, m->n_embd, 1, false);
        return;
    }
    if (router->ne[1] > (uint64_t)m->n_expert_max || router->ne[1] < (uint64_t)m->n_expert_used ||
        router->ne[1] % (uint64_t)m->n_group) {
        loader_fail(l, "tensor '%s' routes to %llu experts, expected %d to %d%s", name,
                    (unsigned long long)router->ne[1], m->n_expert_used, m->n_expert_max,
                    m->n_group > 1 ? " and whole groups" : "");
        return;
    }
    int n = layer->n_expert = (int)router->ne[1];
    loader_layer_weight(l, &layer->router, il, "ffn_gate_inp", m->n_embd, n, 1, false);
    layer->router_bias = loader_layer_vector(l, il, "exp_probs_b.bias", n, true);
    if (layer->router_bias && m->gating == GATING_SOFTMAX)
        loader_fail(l,
                    "layer %d has a routing bias, which belongs to a sigmoid router; '%s.expert_gating_func' "
                    "does not say 2",
                    il, l->arch);
    snprintf(name, sizeof name, "blk.%d.ffn_down_exps.weight", il);
    const struct gguf_tensor *down = loader_tensor(l, name, 0, (uint64_t)m->n_embd, (uint64_t)n, false);
    if (!down || down->ne[0] > 1 << 20) {
        if (down)
            loader_fail(l, "tensor '%s' is %llu wide, expected at most %d", name, (unsigned long long)down->ne[0],
                        1 << 20);
        return;
    }
    int n_ff = (int)down->ne[0];
    if (n_ff > m->n_ff_expert) m->n_ff_expert = n_ff;
    loader_layer_weight(l, &layer->down, il, "ffn_down_exps", n_ff, m->n_embd, n, false);
    struct weight both = {0};
    loader_layer_weight(l, &both, il, "ffn_gate_up_exps", m->n_embd, 2 * n_ff, n, true);
    if (both.data) { /* one stack, gate rows first */
        layer->gate = layer->up = both;
        layer->gate.n_out = layer->up.n_out = n_ff;
        layer->up.data += (size_t)n_ff * both.row_bytes;
    } else {
        loader_layer_weight(l, &layer->gate, il, "ffn_gate_exps", m->n_embd, n_ff, n, false);
        loader_layer_weight(l, &layer->up, il, "ffn_up_exps", m->n_embd, n_ff, n, false);
    }
    snprintf(name, sizeof name, "blk.%d.ffn_down_shexp.weight", il);
    const struct gguf_tensor *shared = gguf_find_tensor(l->g, name);
    if (!l->failed && shared && shared->ne[0] <= 1 << 20) {
        n_ff = (int)shared->ne[0];
        if (n_ff > m->n_ff_shared) m->n_ff_shared = n_ff;
        loader_layer_weight(l, &layer->sh_gate, il, "ffn_gate_shexp", m->n_embd, n_ff, 1, false);
        loader_layer_weight(l, &layer->sh_up, il, "ffn_up_shexp", m->n_embd, n_ff, 1, false);
        loader_layer_weight(l, &layer->sh_down, il, "ffn_down_shexp", n_ff, m->n_embd, 1, false);
    }
    loader_retained(l, layer, il);
}

/* Gate and up multiply the same packed activations, whose format follows from the type. */
static void loader_same_type(struct loader *l, int il, const struct weight *gate, const struct weight *up) {
    if (gate->type != up->type)
        loader_fail(l, "layer %d: the gate has the type %s, expected that of up, %s", il,
                    gguf_type_info(gate->type).name, gguf_type_info(up->type).name);
}

static void loader_layer(struct loader *l, struct layer *layer, int il) {
    struct model *m = l->m;
    layer->attn_norm = loader_layer_vector(l, il, "attn_norm.weight", m->n_embd, false);
    layer->ffn_norm = loader_layer_vector(l, il, "ffn_norm.weight", m->n_embd, false);
    if (m->kv_lora) {
        if (m->q_lora) {
            loader_layer_weight(l, &layer->wq_a, il, "attn_q_a", m->n_embd, m->q_lora, 1, false);
            layer->q_a_norm = loader_layer_vector(l, il, "attn_q_a_norm.weight", m->q_lora, false);
            loader_layer_weight(l, &layer->wq_b, il, "attn_q_b", m->q_lora, m->n_head * m->head_k, 1, false);
        } else {
            loader_layer_weight(l, &layer->wq, il, "attn_q", m->n_embd, m->n_head * m->head_k, 1, false);
        }
        loader_layer_weight(l, &layer->wkv_a, il, "attn_kv_a_mqa", m->n_embd, m->kv_lora + m->rope_dim, 1, false);
        layer->kv_a_norm = loader_layer_vector(l, il, "attn_kv_a_norm.weight", m->kv_lora, false);
        loader_layer_weight(l, &layer->wk_b, il, "attn_k_b", m->nope, m->kv_lora, m->n_head, false);
        loader_layer_weight(l, &layer->wv_b, il, "attn_v_b", m->kv_lora, m->head_v, m->n_head, false);
    } else {
        loader_layer_weight(l, &layer->wq, il, "attn_q", m->n_embd, m->n_head * m->head_k, 1, false);
        loader_layer_weight(l, &layer->wk, il, "attn_k", m->n_embd, m->n_head_kv * m->head_k, 1, false);
        loader_layer_weight(l, &layer->wv, il, "attn_v", m->n_embd, m->n_head_kv * m->head_v, 1, false);
        layer->wq.bias = loader_layer_vector(l, il, "attn_q.bias", m->n_head * m->head_k, true);
        layer->wk.bias = loader_layer_vector(l, il, "attn_k.bias", m->n_head_kv * m->head_k, true);
        layer->wv.bias = loader_layer_vector(l, il, "attn_v.bias", m->n_head_kv * m->head_v, true);
        layer->q_norm = loader_layer_vector(l, il, "attn_q_norm.weight", m->head_k, false);
        layer->k_norm = loader_layer_vector(l, il, "attn_k_norm.weight", m->head_k, false);
    }
    loader_layer_weight(l, &layer->wo, il, "attn_output", m->n_head * m->head_v, m->n_embd, 1, false);
    loader_ffn(l, layer, il);
    loader_same_type(l, il, &layer->gate, &layer->up);
    loader_same_type(l, il, &layer->sh_gate, &layer->sh_up);
}

/* Every tensor of the file must have found its place; those of the prediction layers behind the last layer wait for theirs. */
static void loader_leftovers(struct loader *l) {
    for (uint32_t i = 0; i < l->g->n_tensors && !l->failed; i++) {
        const struct gguf_tensor *t = &l->g->tensors[i];
        char name[GGUF_MAX_NAME + 1];
        int il;
        if (l->used[i]) continue;
        gguf_printable(t->name, name, sizeof name);
        if (sscanf(name, "blk.%d.", &il) == 1 && il >= l->m->n_layer && il < l->m->n_layer + l->m->n_mtp_layer)
            continue;
        loader_fail(l, "tensor '%s' is not part of the architecture %s as known here", name, l->arch);
    }
}

/* FNV-1a over the metadata (of each value 4 KB at most), the names, types and shapes of tensors, and the ends of their data:
 * two files of one model differ, and so does one that is read with another rope. */
static uint64_t model_hash(const struct gguf *g) {
    uint64_t h = HASH_START;
    for (uint32_t i = 0; i < g->n_kv; i++) {
        const struct gguf_kv *kv = &g->kv[i];
        const uint8_t *end = kv->data + kv->n * gguf_value_bytes(kv->type);
        for (uint64_t k = 0; kv->type == GGUF_V_STR && k < kv->n && end - kv->data < 4096; k++) gguf_next_str(&end);
        h = hash_bytes(h, kv->key.p, kv->key.n);
        h = hash_bytes(h, &kv->type, sizeof kv->type);
        h = hash_bytes(h, &kv->n, sizeof kv->n);
        h = hash_bytes(h, kv->data, end - kv->data < 4096 ? (size_t)(end - kv->data) : 4096);
    }
    for (uint32_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        size_t n = t->bytes < 64 ? (size_t)t->bytes : 64;
        h = hash_bytes(h, t->name.p, t->name.n);
        h = hash_bytes(h, t->ne, sizeof t->ne);
        for (size_t j = 0; j < n; j++) h = (h ^ t->data[j] ^ (uint64_t)t->data[t->bytes - 1 - j] << 8) * 0x100000001b3u;
        h = (h ^ t->bytes ^ (uint64_t)t->type << 56) * 0x100000001b3u;
    }
    return h;
}

static int int_min(int a, int b) { return a < b ? a : b; }

static void model_free(struct model *m) {
    for (size_t i = 0; i < arrlenu(m->owned); i++) free(m->owned[i]);
    arrfree(m->owned);
    if (m->vocab) vocab_free(m->vocab);
    free(m->vocab);
    gguf_close(&m->gguf);
    memset(m, 0, sizeof *m);
}

/* Interprets the metadata and tensors of m->gguf, which it takes over. 0, or -1 with a message and m empty. */
static int model_bind(struct model *m, char *err) {
    struct loader l = {.m = m, .g = &m->gguf, .err = err};
    struct gguf_str s = {"", 0};
    char text[64];
    size_t known = 0, n_names = sizeof arch_names / sizeof *arch_names;
    m->vocab = xcalloc(1, sizeof *m->vocab);
    m->shard = (struct shard){0, 1, 0, 1};
    if (!gguf_get_str(l.g, "general.architecture", &s))
        loader_fail(&l, "metadata key 'general.architecture' is missing");
    while (known < n_names && !gguf_str_eq(s, arch_names[known])) known++;
    if (known == n_names)
        loader_fail(&l, "the architecture '%s' is not supported; known are qwen3moe and deepseek2",
                    gguf_printable(s, text, sizeof text));
    if (!l.failed && !l.g->n_tensors) loader_fail(&l, "the file holds a vocabulary but no tensors");
    l.used = xcalloc(l.g->n_tensors + 1u, sizeof *l.used);
    l.arch = known < n_names ? arch_names[known] : "";
    m->arch = (enum arch)known;
    s = (struct gguf_str){"", 0};
    gguf_get_str(l.g, "general.name", &s);
    gguf_printable(s, m->name, sizeof m->name);
    if (!l.failed) loader_hparams(&l);
    const struct gguf_tensor *embd = loader_tensor(&l, "token_embd.weight", (uint64_t)m->n_embd, 0, 1, false);
    if (embd && embd->ne[1] > 1 << 24)
        loader_fail(&l, "tensor 'token_embd.weight' has %llu rows", (unsigned long long)embd->ne[1]);
    m->n_vocab = embd && !l.failed ? (int)embd->ne[1] : 0;
    loader_weight(&l, &m->embd, m->n_embd, m->n_vocab, 1, false, "token_embd");
    loader_weight(&l, &m->output, m->n_embd, m->n_vocab, 1, true, "output");
    if (!m->output.data) m->output = m->embd;
    m->output_norm = loader_vector(&l, "output_norm.weight", m->n_embd, false);
    if (!l.failed) m->layers = loader_own(&l, (size_t)m->n_layer * sizeof *m->layers);
    for (int i = 0; i < m->n_layer && !l.failed; i++) loader_layer(&l, &m->layers[i], i);
    loader_leftovers(&l);
    const struct gguf_kv *kv = gguf_find(l.g, "moe.reap.pruned");
    int64_t v;
    m->pruned = kv && gguf_elem_int(kv, 0, &v) && v;
    if ((kv = gguf_find(l.g, "moe.reap.original_expert_count")) && gguf_elem_int(kv, 0, &v) && v > 0 &&
        v <= MAX_EXPERTS)
        m->n_expert_original = (int)v;
    struct gguf_str tokenizer = {"", 0};
    gguf_get_str(l.g, "tokenizer.ggml.model", &tokenizer);
    if (!l.failed && gguf_find(l.g, "tokenizer.ggml.tokens") && !gguf_str_eq(tokenizer, "no_vocab")) {
        char why[ERR_MAX];
        if (vocab_load(m->vocab, l.g, why)) loader_fail(&l, "%s", why);
        else if (m->vocab->n_tokens > m->n_vocab)
            loader_fail(&l, "the vocabulary has %d tokens, the embedding %d rows", m->vocab->n_tokens, m->n_vocab);
    }
    free(l.used);
    if (!l.failed) {
        for (uint32_t i = 0; i < l.g->n_images; i++) m->file_bytes += l.g->images[i].size;
        m->hash = model_hash(l.g);
        m->n_ids = m->vocab->n_tokens ? m->vocab->n_tokens : m->n_vocab;
        return 0;
    }
    model_free(m);
    return -1;
}

/* Share of the mapping that is in memory, from a sample of its pages. */
static double image_resident(const struct gguf_image *im) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (im->size + page - 1) / page, hit = 0, step = pages / 1024 + 1,
           n = 0;
    for (size_t i = 0; i < pages; i += step, n++) {
        unsigned char in = 0;
        if (!mincore((void *)(uintptr_t)(im->base + i * page), 1, &in)) hit += in & 1;
    }
    return n ? (double)hit / (double)n : 1.0;
}

/* Reads a large file into the page cache in order, which disks like better than the page faults of the first token; shows
 * progress on a terminal. Ctrl-C ends it early: the rest comes by page faults. */
static void model_prefetch(const struct model *m) {
    enum { STEP = 16 << 20 };
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    double total = (double)m->file_bytes, done = 0, t0 = now_seconds(), shown = t0;
    if (m->file_bytes < (uint64_t)256 << 20 || total > 0.9 * (double)page * (double)sysconf(_SC_PHYS_PAGES)) return;
    for (uint32_t k = 0; k < m->gguf.n_images; k++) {
        const struct gguf_image *im = &m->gguf.images[k];
        bool resident = !im->mapped || image_resident(im) > 0.99;
        for (size_t at = 0; at < im->size && !resident && !interrupted; at += STEP) {
            size_t n = im->size - at < STEP ? im->size - at : STEP;
            madvise((void *)(uintptr_t)(im->base + at), n, MADV_WILLNEED);
            for (size_t i = 0; i < n; i += page) (void)*(const volatile uint8_t *)(im->base + at + i);
            double t = now_seconds(), have = done + (double)(at + n);
            if (!term.err_moves || t - shown < 0.1) continue;
            shown = t;
            status_line("reading the model: %3.0f %%  %.1f of %.1f GiB  %.1f GiB/s  %.0f s left", 100 * have / total,
                        have / 0x1p30, total / 0x1p30, have / 0x1p30 / (t - t0), (total - have) / (have / (t - t0)));
        }
        done += (double)im->size;
    }
    if (shown > t0) status_line("%s", "");
}

/* Opens, maps and binds a model file, or with `header` its header alone. 0, or -1 with a message that begins with the path. */
static int model_open(struct model *m, const char *path, bool header, char *err) {
    char why[ERR_MAX];
    memset(m, 0, sizeof *m);
    if ((header ? gguf_open_header : gguf_open)(&m->gguf, path, err, ERR_MAX)) return -1;
    if (model_bind(m, why)) return fail(err, "'%.200s': %s", path, why);
    if (!m->name[0]) {
        const char *base = strrchr(path, '/');
        snprintf(m->name, sizeof m->name, "%s", base ? base + 1 : path);
        message_neutralise(m->name);
    }
    return 0;
}

/* The same with all of its data, which is read into memory. */
static int model_load(struct model *m, const char *path, char *err) {
    double t0 = now_seconds();
    if (model_open(m, path, false, err)) return -1;
    model_prefetch(m);
    m->load_seconds = now_seconds() - t0;
    return 0;
}

/* ============================================================================================================
 * Parts of a model
 *
 * What each of several ranks holds, the same for every backend: attention by heads, feed-forwards by columns in whole units of
 * 64, the head by rows; norms, routers, the low-rank projections and the embedding on all. Larger shares come first; nothing is
 * padded. A share may be empty: such a rank adds zeros. Parts are views into the same mapping.
 * ============================================================================================================ */

enum { FF_UNIT = 64 /* columns of a feed-forward; a multiple of every format's block */ };

struct range {
    int first, n;
};

/* What the rank gets of `total` things that are cut in whole units, the last of which may be shorter. */
static struct range shard_range(int total, int unit, int n_rank, int rank) {
    int units = (total + unit - 1) / unit, per = units / n_rank, more = units % n_rank;
    int first = (rank * per + int_min(rank, more)) * unit, n = (per + (rank < more)) * unit;
    if (n > total - first) n = total - first;
    return n > 0 ? (struct range){first, n} : (struct range){0, 0};
}

static void weight_rows(struct weight *w, struct range s) {
    if (!w->data) return;
    w->data += (size_t)s.first * w->row_bytes, w->n_out = s.n;
    if (w->bias) w->bias += s.first;
}

static void weight_columns(struct weight *w, struct range s) {
    if (!w->data) return;
    w->data += gguf_row_bytes(w->type, (size_t)s.first), w->n_in = s.n;
}

static void weight_matrices(struct weight *w, struct range s) {
    if (!w->data) return;
    w->data += (size_t)s.first * w->expert_bytes, w->n_expert = s.n;
    if (w->scale) w->scale += s.first;
}

/* Bytes of a weight as the file has it, or of a part. */
static uint64_t weight_bytes(const struct weight *w) {
    return w->data ? (uint64_t)gguf_row_bytes(w->type, (size_t)w->n_in) * (uint64_t)w->n_out * (uint64_t)w->n_expert
                   : 0;
}

static uint64_t layer_bytes(const struct layer *layer) {
    const struct weight *w[LAYER_WEIGHTS];
    uint64_t sum = 0;
    for (int i = 0, n = layer_weights(layer, w); i < n; i++) sum += weight_bytes(w[i]);
    return sum;
}

static int int_gcd(int a, int b) { return b ? int_gcd(b, a % b) : a; }

/* Heads that only together end where a block of the output projection does. */
static int heads_unit(const struct model *m) {
    int unit = 1;
    for (int il = 0; il < m->n_layer; il++) {
        int block = (int)gguf_type_info(m->layers[il].wo.type).block, u = block / int_gcd(block, m->head_v);
        unit = unit / int_gcd(unit, u) * u;
    }
    return unit;
}

struct heads_range {
    struct range q, kv;
};

/* Query heads go where their KV head is. With fewer KV heads than ranks, some ranks hold copies of one and share its query heads. */
static struct heads_range shard_heads(const struct model *m, int n_rank, int rank) {
    int unit = heads_unit(m), group = m->n_head / m->n_head_kv;
    struct heads_range h;
    if (m->kv_lora) {
        h.q = shard_range(m->n_head, unit, n_rank, rank);
        h.kv = (struct range){0, 1};
    } else if (m->n_head_kv >= n_rank) {
        h.kv = shard_range(m->n_head_kv, unit / int_gcd(unit, group), n_rank, rank);
        h.q = (struct range){h.kv.first * group, h.kv.n * group};
    } else {
        int j = rank * m->n_head_kv / n_rank; /* its KV head, which the ranks from..to-1 have */
        int from = (j * n_rank + m->n_head_kv - 1) / m->n_head_kv,
            to = ((j + 1) * n_rank + m->n_head_kv - 1) / m->n_head_kv;
        h.q = shard_range(group, unit, to - from, rank - from);
        h.q.first += j * group;
        h.kv = (struct range){j, 1};
    }
    if (!h.kv.n)
        h.kv.n = 1; /* a rank without query heads keeps the cache of one KV head, so that its sizes stay sizes */
    return h;
}

static void shard_layer(struct model *out, struct layer *layer, const struct model *m, struct heads_range h) {
    int n_rank = out->shard.n_rank, rank = out->shard.rank;
    struct range q = {h.q.first * m->head_k, h.q.n * m->head_k}, att = {h.q.first * m->head_v, h.q.n * m->head_v};
    struct range k = {h.kv.first * m->head_k, h.kv.n * m->head_k}, v = {h.kv.first * m->head_v, h.kv.n * m->head_v};
    weight_rows(&layer->wq, q), weight_rows(&layer->wq_b, q);
    weight_rows(&layer->wk, k), weight_rows(&layer->wv, v);
    weight_matrices(&layer->wk_b, h.q), weight_matrices(&layer->wv_b, h.q);
    weight_columns(&layer->wo, att);
    struct range ff = shard_range(layer->gate.n_out, FF_UNIT, n_rank, rank);
    struct range shared = shard_range(layer->sh_gate.n_out, FF_UNIT, n_rank, rank);
    weight_rows(&layer->gate, ff), weight_rows(&layer->up, ff), weight_columns(&layer->down, ff);
    weight_rows(&layer->sh_gate, shared), weight_rows(&layer->sh_up, shared), weight_columns(&layer->sh_down, shared);
    int *widest = layer->n_expert ? &out->n_ff_expert : &out->n_ff_dense;
    if (ff.n > *widest) *widest = ff.n;
    if (shared.n > out->n_ff_shared) out->n_ff_shared = shared.n;
}

/* Layers of a stage: consecutive ones, so many that the bytes of weights up to its last layer come nearest to its part of all. */
static struct range stage_layers(const struct model *m, int n_stage, int stage) {
    uint64_t all = weight_bytes(&m->embd) + weight_bytes(&m->output), sum = weight_bytes(&m->embd);
    int bound[MAX_RANKS + 1] = {0}, s = 1;
    for (int il = 0; il < m->n_layer; il++) all += layer_bytes(&m->layers[il]);
    for (int il = 0; il < m->n_layer && s < n_stage; il++) {
        uint64_t more = layer_bytes(&m->layers[il]);
        bool must = m->n_layer - il <= n_stage - s; /* every later stage needs a layer too */
        bool full = (sum + more / 2) * (uint64_t)n_stage >= all * (uint64_t)s;
        if (il > bound[s - 1] && (must || full)) bound[s++] = il;
        sum += more;
    }
    bound[n_stage] = m->n_layer;
    return (struct range){bound[stage], bound[stage + 1] - bound[stage]};
}

/* The part of a whole model, n_stage <= n_layer; shard_free frees it. */
static void shard_model(struct model *out, const struct model *m, struct shard shard) {
    struct heads_range h = shard_heads(m, shard.n_rank, shard.rank);
    struct range layers = stage_layers(m, shard.n_stage, shard.stage);
    struct range rows = shard_range(m->n_vocab, FF_UNIT, shard.n_rank, shard.rank);
    *out = *m;
    out->shard = shard;
    out->n_head = h.q.n, out->n_head_kv = h.kv.n, out->first_head_kv = h.kv.first;
    out->first_layer = layers.first, out->n_layer = layers.n;
    out->layers = xcalloc((size_t)layers.n, sizeof *out->layers);
    out->n_ff_dense = out->n_ff_expert = out->n_ff_shared = 0;
    for (int il = 0; il < layers.n; il++) {
        out->layers[il] = m->layers[layers.first + il];
        shard_layer(out, &out->layers[il], m, h);
    }
    weight_rows(&out->output, rows);
    out->first_id = rows.first;
    if (shard.stage) memset(&out->embd, 0, sizeof out->embd);
    if (shard.stage < shard.n_stage - 1) memset(&out->output, 0, sizeof out->output);
}

static void shard_free(struct model *shard) { free(shard->layers); }

/* ============================================================================================================
 * Synthetic models
 *
 * --synth: models with random weights in the shape of real ones, in memory or in a file. Tests and --doctor make small
 * ones.
 * ============================================================================================================ */

struct synth {
    const char *name, *arch;
    int n_layer, n_embd, n_head, n_head_kv;
    int head; /* values of a key and of a value; latent attention: rotated ones of the key not counted */
    int n_expert, n_used, n_ff, n_vocab, n_ctx;
    /* deepseek2 only */
    int q_lora, kv_lora, rope, n_dense, ff_dense, ff_shared, n_group, n_group_used;
    float scale; /* of the experts' weights */
    bool q8;     /* the backbone is Q8_0 instead of BF16 */
    bool sizes;  /* only sizes are looked at: nothing is filled in */
};

static const struct synth synths[] = {
    {.name = "qwen3-30b-a3b",
     .arch = "qwen3moe",
     .n_layer = 48,
     .n_embd = 2048,
     .n_head = 32,
     .n_head_kv = 4,
     .head = 128,
     .n_expert = 128,
     .n_used = 8,
     .n_ff = 768,
     .n_vocab = 151936,
     .n_ctx = 40960,
     .ff_dense = 6144},
    {.name = "qwen3-235b-a22b",
     .arch = "qwen3moe",
     .n_layer = 94,
     .n_embd = 4096,
     .n_head = 64,
     .n_head_kv = 4,
     .head = 128,
     .n_expert = 128,
     .n_used = 8,
     .n_ff = 1536,
     .n_vocab = 151936,
     .n_ctx = 40960,
     .ff_dense = 12288},
    {.name = "deepseek-v3",
     .arch = "deepseek2",
     .n_layer = 61,
     .n_embd = 7168,
     .n_head = 128,
     .n_head_kv = 1,
     .head = 128,
     .n_expert = 256,
     .n_used = 8,
     .n_ff = 2048,
     .n_vocab = 129280,
     .n_ctx = 163840,
     .q_lora = 1536,
     .kv_lora = 512,
     .rope = 64,
     .n_dense = 3,
     .ff_dense = 18432,
     .ff_shared = 2048,
     .n_group = 8,
     .n_group_used = 4,
     .scale = 2.5f},
    {.name = "kimi-k2",
     .arch = "deepseek2",
     .n_layer = 61,
     .n_embd = 7168,
     .n_head = 64,
     .n_head_kv = 1,
     .head = 128,
     .n_expert = 384,
     .n_used = 8,
     .n_ff = 2048,
     .n_vocab = 163840,
     .n_ctx = 131072,
     .q_lora = 1536,
     .kv_lora = 512,
     .rope = 64,
     .n_dense = 1,
     .ff_dense = 18432,
     .ff_shared = 2048,
     .n_group = 1,
     .n_group_used = 1,
     .scale = 2.827f},
};

/* Moves *p behind `word` if that stands there. */
static bool skip_word(const char **p, const char *word) {
    const size_t n = strlen(word);
    if (strncmp(*p, word, n)) return false;
    *p += n;
    return true;
}

/* Moves *p behind the number that stands there; 0: none does. */
static long skip_number(const char **p) {
    char *end;
    if (**p < '0' || **p > '9') return 0;
    const long v = strtol(*p, &end, 10);
    *p = end;
    return v;
}

/* NAME:LAYERS or NAME:layers=N,experts=M,backbone=bf16|q8_0, all optional. */
static struct synth synth_parse(const char *arg) {
    const size_t n = strcspn(arg, ":");
    const struct synth *found = NULL;
    char names[128];
    size_t at = 0;
    for (size_t i = 0; i < sizeof synths / sizeof *synths; i++) {
        if (strlen(synths[i].name) == n && !memcmp(arg, synths[i].name, n)) found = &synths[i];
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", i ? ", " : "", synths[i].name);
    }
    if (!found) die_usage("--synth %s: known shapes are %s", arg, names);
    struct synth y = *found;
    const bool groups = y.n_group > 1;
    const int step = groups ? y.n_group : 1, least = groups ? y.n_used * step / y.n_group_used : y.n_used;
    long layers = y.n_layer, experts = y.n_expert;
    const char *p = arg + n;
    for (char mark = ':'; *p == mark; mark = ',') {
        p++;
        if (skip_word(&p, "backbone=bf16")) y.q8 = false;
        else if (skip_word(&p, "backbone=q8_0")) y.q8 = true;
        else if (skip_word(&p, "experts=")) experts = skip_number(&p);
        else {
            skip_word(&p, "layers=");
            layers = skip_number(&p);
        }
    }
    if (*p || layers < 1 || layers > y.n_layer || experts < least || experts > y.n_expert || experts % step)
        die_usage("--synth %s: expected :layers=N,experts=M,backbone=bf16|q8_0 with layers from 1 to %d and "
                  "experts from %d to %d in steps of %d",
                  arg, y.n_layer, least, y.n_expert, step);
    y.n_layer = (int)layers;
    y.n_expert = (int)experts;
    return y;
}

/* Leaves of a shape what GPU R of N holds, text "R/N". The vocabulary stays whole: embedding and output have the same.
 * */
static void synth_shard(struct synth *y, const char *text) {
    if (strlen(text) != 3 || text[1] != '/' || text[2] < '1' || text[2] > '8' || text[0] < '0' || text[0] >= text[2])
        die_usage("--shard %s: expected R/N with N from 1 to 8 and R from 0 to N - 1", text);
    const int n = text[2] - '0';
    const struct {
        int *size, unit; /* a shard has whole units */
        const char *what;
    } divided[] = {{&y->n_head, 1, "attention heads"},
                   {&y->n_ff, 64, "columns of the experts"},
                   {&y->ff_shared, 64, "columns of the shared expert"},
                   {&y->ff_dense, 64, "columns of the dense feed-forward"}};
    for (size_t i = 0; i < sizeof divided / sizeof *divided; i++) {
        const int whole = *divided[i].size, unit = n * divided[i].unit;
        if (whole % unit)
            die_usage("--shard %s: %s has %d %s, not a multiple of %d", text, y->name, whole, divided[i].what, unit);
        *divided[i].size = whole / n;
    }
    y->n_head_kv = y->n_head_kv > n ? y->n_head_kv / n : 1;
}

/* Fills a tensor with numbers that keep a forward pass finite: norms near 1, matrices that keep the scale of their
 * input. */
static void synth_fill(uint8_t *p, uint64_t bytes, uint32_t type, bool vector, uint64_t *rng) {
    enum { PATTERN = 36 * 34 * 857 }; /* about 1 MiB of whole blocks of every type; repeated */
    const uint64_t n = bytes < PATTERN ? bytes : PATTERN;
    if (type == GGUF_NVFP4) {
        for (uint64_t i = 0; i < n; i += 36) {
            for (int s = 0; s < 4; s++) p[i + (uint64_t)s] = (uint8_t)(0x30 + rng_next(rng) % 16);
            for (int q = 0; q < 4; q++) {
                const uint64_t v = rng_next(rng);
                memcpy(p + i + 4 + 8 * q, &v, 8);
            }
        }
    } else if (type == GGUF_F32) {
        for (uint64_t i = 0; i + 4 <= n; i += 4) {
            const float u = (float)(rng_uniform(rng) - 0.5), v = vector ? 1.0f + 0.1f * u : 0.05f * u;
            memcpy(p + i, &v, 4);
        }
    } else if (type == GGUF_Q8_0) {
        const uint16_t scale = f16_from_f32(0.025f / 128);
        for (uint64_t i = 0; i < n; i += 34) {
            memcpy(p + i, &scale, 2);
            for (int q = 0; q < 4; q++) {
                const uint64_t v = rng_next(rng);
                memcpy(p + i + 2 + 8 * q, &v, 8);
            }
        }
    } else {
        for (uint64_t i = 0; i + 2 <= n; i += 2) {
            const uint16_t v = bf16_from_f32(0.05f * (float)(rng_uniform(rng) - 0.5));
            memcpy(p + i, &v, 2);
        }
    }
    for (uint64_t at = n; at < bytes; at += n) memcpy(p + at, p, bytes - at < n ? bytes - at : n);
}

struct synth_tensor {
    char name[64];
    uint32_t type, n_dims;
    uint64_t ne[3], bytes;
};

/* Appends a tensor (n2, n1, n0); `fmt` is its name with %d for the layer. */
static void synth_add(struct synth_tensor **list, uint32_t type, int n0, int n1, int n2, const char *fmt, int il) {
    struct synth_tensor t = {
        .type = type, .n_dims = n2 > 1 ? 3 : 1 + (n1 > 1), .ne = {(uint64_t)n0, (uint64_t)n1, (uint64_t)n2}};
    snprintf(t.name, sizeof t.name, fmt, il);
    t.bytes = gguf_row_bytes(type, (size_t)n0) * (size_t)n1 * (size_t)n2;
    arrput(*list, t);
}

/* Appends a SwiGLU feed-forward as NVFP4 releases have it; the suffix of the names tells its kind. */
static void synth_add_ffn(struct synth_tensor **t, const char *suffix, int n_embd, int n_ff, int n_expert, int il) {
    static const char *const role[3] = {"gate", "up", "down"};
    char name[64];
    for (int k = 0; k < 3; k++) {
        const bool down = k == 2;
        snprintf(name, sizeof name, "blk.%%d.ffn_%s%s.weight", role[k], suffix);
        synth_add(t, GGUF_NVFP4, down ? n_ff : n_embd, down ? n_embd : n_ff, n_expert, name, il);
        snprintf(name, sizeof name, "blk.%%d.ffn_%s%s.scale", role[k], suffix);
        synth_add(t, GGUF_F32, n_expert, 1, 1, name, il);
    }
}

/* Lists the tensors of a shape, in the types of NVFP4 releases: feed-forwards NVFP4, norms and router F32, the backbone
 * BF16 or Q8_0. */
static struct synth_tensor *synth_tensors(const struct synth *y) {
    struct synth_tensor *t = NULL;
    const uint32_t backbone = y->q8 ? GGUF_Q8_0 : GGUF_BF16;
    const int n = y->n_embd;
    synth_add(&t, backbone, n, y->n_vocab, 1, "token_embd.weight", 0);
    for (int i = 0; i < y->n_layer; i++) {
        synth_add(&t, GGUF_F32, n, 1, 1, "blk.%d.attn_norm.weight", i);
        if (y->kv_lora) {
            const int latent = y->kv_lora;
            synth_add(&t, backbone, n, y->q_lora, 1, "blk.%d.attn_q_a.weight", i);
            synth_add(&t, GGUF_F32, y->q_lora, 1, 1, "blk.%d.attn_q_a_norm.weight", i);
            synth_add(&t, backbone, y->q_lora, y->n_head * (y->head + y->rope), 1, "blk.%d.attn_q_b.weight", i);
            synth_add(&t, backbone, n, latent + y->rope, 1, "blk.%d.attn_kv_a_mqa.weight", i);
            synth_add(&t, GGUF_F32, latent, 1, 1, "blk.%d.attn_kv_a_norm.weight", i);
            synth_add(&t, backbone, y->head, latent, y->n_head, "blk.%d.attn_k_b.weight", i);
            synth_add(&t, backbone, latent, y->head, y->n_head, "blk.%d.attn_v_b.weight", i);
        } else {
            synth_add(&t, backbone, n, y->n_head * y->head, 1, "blk.%d.attn_q.weight", i);
            synth_add(&t, backbone, n, y->n_head_kv * y->head, 1, "blk.%d.attn_k.weight", i);
            synth_add(&t, backbone, n, y->n_head_kv * y->head, 1, "blk.%d.attn_v.weight", i);
            synth_add(&t, GGUF_F32, y->head, 1, 1, "blk.%d.attn_q_norm.weight", i);
            synth_add(&t, GGUF_F32, y->head, 1, 1, "blk.%d.attn_k_norm.weight", i);
        }
        synth_add(&t, backbone, y->n_head * y->head, n, 1, "blk.%d.attn_output.weight", i);
        synth_add(&t, GGUF_F32, n, 1, 1, "blk.%d.ffn_norm.weight", i);
        if (i < y->n_dense) {
            synth_add_ffn(&t, "", n, y->ff_dense, 1, i);
            continue;
        }
        synth_add(&t, GGUF_F32, n, y->n_expert, 1, "blk.%d.ffn_gate_inp.weight", i);
        if (y->kv_lora) synth_add(&t, GGUF_F32, y->n_expert, 1, 1, "blk.%d.exp_probs_b.bias", i);
        synth_add_ffn(&t, "_exps", n, y->n_ff, y->n_expert, i);
        if (y->ff_shared) synth_add_ffn(&t, "_shexp", n, y->ff_shared, 1, i);
    }
    synth_add(&t, GGUF_F32, n, 1, 1, "output_norm.weight", 0);
    synth_add(&t, backbone, n, y->n_vocab, 1, "output.weight", 0);
    return t;
}

/* The GGUF header of those tensors, malloc'ed, *bytes of it; *data: the bytes of tensors behind it. */
static uint8_t *synth_header(const struct synth *y, const struct synth_tensor *t, size_t *bytes, uint64_t *data) {
    struct gguf_writer w = {0};
    char key[96];
    const struct {
        const char *key;
        int value; /* 0: left out */
    } ints[] = {{"context_length", y->n_ctx},
                {"embedding_length", y->n_embd},
                {"block_count", y->n_layer},
                {"feed_forward_length", y->ff_dense},
                {"attention.head_count", y->n_head},
                {"attention.head_count_kv", y->n_head_kv},
                {"attention.key_length", y->kv_lora ? y->kv_lora + y->rope : y->head},
                {"attention.value_length", y->kv_lora ? y->kv_lora : y->head},
                {"attention.q_lora_rank", y->q_lora},
                {"attention.kv_lora_rank", y->kv_lora},
                {"attention.key_length_mla", y->kv_lora ? y->head + y->rope : 0},
                {"attention.value_length_mla", y->kv_lora ? y->head : 0},
                {"rope.dimension_count", y->rope},
                {"leading_dense_block_count", y->n_dense},
                {"expert_count", y->n_expert},
                {"expert_used_count", y->n_used},
                {"expert_feed_forward_length", y->n_ff},
                {"expert_shared_count", y->ff_shared > 0},
                {"expert_group_count", y->n_group},
                {"expert_group_used_count", y->n_group_used},
                {"expert_gating_func", y->kv_lora ? GATING_SIGMOID : 0},
                {"vocab_size", y->n_vocab}};
    gguf_put_str(&w, "general.architecture", y->arch, strlen(y->arch));
    gguf_put_str(&w, "general.name", y->name, strlen(y->name));
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        if (!ints[i].value) continue;
        snprintf(key, sizeof key, "%s.%s", y->arch, ints[i].key);
        gguf_put_u32(&w, key, (uint32_t)ints[i].value);
    }
    if (y->kv_lora) {
        snprintf(key, sizeof key, "%s.expert_weights_norm", y->arch);
        gguf_put_bool(&w, key, true);
        snprintf(key, sizeof key, "%s.expert_weights_scale", y->arch);
        gguf_put_f32(&w, key, y->scale);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", y->arch);
    gguf_put_f32(&w, key, 1e-6f);
    snprintf(key, sizeof key, "%s.rope.freq_base", y->arch);
    gguf_put_f32(&w, key, 1e6f);
    gguf_put_str(&w, "tokenizer.ggml.model", "no_vocab", 8);
    for (size_t i = 0; i < arrlenu(t); i++) gguf_add_tensor(&w, t[i].name, t[i].type, t[i].n_dims, t[i].ne);
    *data = w.data_bytes;
    uint8_t *h = gguf_header(&w, bytes);
    gguf_writer_free(&w);
    if (!h) die("out of memory for a synthetic header");
    return h;
}

/* Maps `total` writable bytes: of a new file, which becomes *f, or of memory. `synthetic`: most of them will never be
 * touched. */
static uint8_t *synth_map(const struct synth *y, const char *file, bool synthetic, size_t total, FILE **f) {
    const double memory = (double)sysconf(_SC_PAGESIZE) * (double)sysconf(_SC_PHYS_PAGES);
    char err[ERR_MAX];
    *f = NULL;
    if (file) {
        if (!access(file, F_OK)) die("cannot create '%s': %s", file, strerror(EEXIST));
        *f = temp_create(file, 0666, err);
        if (!*f) die("%s", err);
        const int rc = posix_fallocate(fileno(*f), 0, (off_t)total);
        if (rc) die("cannot write %zu bytes to '%s': %s", total, file, strerror(rc));
    } else if (!synthetic && (double)total > 0.9 * memory) {
        die("%s needs %.1f GiB of memory; cut it with --synth %s:layers=N,experts=M", y->name, (double)total / 0x1p30,
            y->name);
    }
    const int flags = *f ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | (synthetic ? MAP_NORESERVE : 0);
    uint8_t *p = mmap(NULL, total, PROT_READ | PROT_WRITE, flags, *f ? fileno(*f) : -1, 0);
    if (p == MAP_FAILED) die("cannot map %zu bytes: %s", total, strerror(errno));
    return p;
}

/* Makes a model in memory, or in a file when one is named, which must not exist yet. With `synthetic` the matrices are
 * addresses that nothing reads: a GPU makes its copies of a few random rows. */
static void synth_make(struct model *m, const struct synth *y, const char *file, bool synthetic) {
    char err[ERR_MAX];
    struct synth_tensor *t = synth_tensors(y);
    FILE *f;
    size_t head;
    uint64_t data, rng = 42;
    uint8_t *header = synth_header(y, t, &head, &data);
    const size_t total = head + (size_t)data;
    uint8_t *p = synth_map(y, file, synthetic, total, &f), *to = p + head;
    memcpy(p, header, head);
    free(header);
    for (size_t i = 0; i < arrlenu(t); i++) {
        const uint64_t bytes = t[i].bytes;
        if (interrupted) {
            temp_remove();
            exit(EXIT_INTERRUPT);
        }
        if (y->sizes || (synthetic && t[i].type != GGUF_F32)) {
            /* stays as it is */
        } else if (strstr(t[i].name,
                          ".scale")) { /* makes the weights of an expert about as large as those of the backbone */
            for (uint64_t k = 0; k < bytes / 4; k++) memcpy(to + 4 * k, &(float){0.01f}, 4);
        } else {
            synth_fill(to, bytes, t[i].type, t[i].n_dims == 1, &rng);
        }
        to += gguf_pad(bytes);
    }
    arrfree(t);
    if (f && temp_finish(f, file, false, err)) die("%s", err);
    if (gguf_parse(&m->gguf, p, total, err, ERR_MAX) || model_bind(m, err)) die("synthetic model: %s", err);
    m->synthetic = synthetic;
}

/* ============================================================================================================
 * CPU kernels
 *
 * Matrix products with weights as they lie in the file, and the small vector functions of a forward pass. Everything
 * works on one thread's range, allocates nothing and knows nothing of models, layers or threads.
 *
 * kernels_ref is the oracle: exact weights, F32 activations, sums in double. The others are exact in the weights too but
 * may round activations to 16-bit integers (one F32 scale per 32) or pairs of BF16. Invariant: for a given format, an element of
 * a result is a fixed function of its row of weights and its row of activations; how a caller cuts a product does not change a
 * bit.
 *
 * Order: formats, vector functions for any instruction set, products with F32 activations, integer panels, BF16 tiles, choice.
 * ============================================================================================================ */

enum act_format { ACT_F32, ACT_I16, ACT_BF16 }; /* how a row of activations is packed for a kernel */

enum { KERNEL_SCRATCH = 1 << 17 }; /* bytes of struct gemm's scratch */

/* y[t * y_stride + r] = scale * sum_i w[r][i] * x[row(t)][i] for r in [0, n_out), t in [0, n_tok);
 * row(t) = rows ? rows[t] : t. n_in is a multiple of the type's block. */
struct gemm {
    uint32_t type;          /* enum gguf_type of the weights */
    enum act_format format; /* of x: what kernels.act_format(type, n_tok) said */
    const uint8_t *w;       /* first row, unaligned */
    size_t w_stride;        /* bytes from row to row */
    int n_out, n_in;
    const uint8_t *x;    /* packed activations, 64-byte aligned */
    size_t x_stride;     /* bytes from token to token */
    const int32_t *rows; /* (n_tok) or NULL: which packed rows are the tokens */
    int n_tok;
    float scale;
    float *y;        /* (n_tok, n_out) */
    size_t y_stride; /* floats from token to token */
    void *scratch;   /* KERNEL_SCRATCH bytes, 64-byte aligned, the calling thread's own */
};

struct kernels {
    const char *name;
    enum act_format (*act_format)(uint32_t type, int n_tok);
    size_t (*act_bytes)(enum act_format f, int n); /* of a packed row of n, a multiple of 64 */
    void (*act_pack)(enum act_format f, const float *x, int n, void *out);
    void (*gemm)(const struct gemm *g);
    /* C (m,n) = A (m,k) B (n,k)^T and C (m,n) += A (m,k) B (k,n), row-major, ld*: floats from row to row */
    void (*sgemm_nt)(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc);
    void (*sgemm_nn_add)(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc);
    float (*exp_sum)(float *s, int n, float max);      /* s = exp(s - max), 0 for -infinity; the sum */
    void (*silu_mul)(float *g, const float *u, int n); /* g = g / (1 + exp(-g)) * u */
    /* to_*: bit for bit bf16_from_f32(x) and e4m3_from_f32(x * inv_scale); from_e4m3: finite codes only */
    void (*from_bf16)(const uint16_t *x, float *y, int n);
    void (*from_e4m3)(const uint8_t *x, float scale, float *y, int n);
    void (*to_e4m3)(const float *x, float inv_scale, uint8_t *y, int n);
    void (*to_bf16)(const float *x, uint16_t *y, int n);
    /* y = w * x / sqrt(mean(x^2) + eps); w NULL: all ones */
    void (*rmsnorm)(const float *x, const float *w, float eps, float *y, int n);
    float (*amax)(const float *x, int n); /* largest |x|, 0 for n = 0 */
    float (*max)(const float *x, int n);  /* largest x; n > 0, no NaN */
};

static inline const uint8_t *gemm_x(const struct gemm *g, int t) {
    return g->x + (size_t)(g->rows ? g->rows[t] : t) * g->x_stride;
}

/* 32 activations: value = (256 * hi + lo) * d, 16 bits in two digits of which neither is -128, so that they can be negated.
 * bias[h] = -16 * (sum of the half h) takes back the 16 that kernels with unsigned weights add to every weight; it is
 * stored, because it is the same for every row of weights. */
struct act_i16 {
    float d;
    int32_t bias[2];
    int8_t hi[32], lo[32];
};

/* ACT_BF16 is the sum of two BF16 numbers, in two planes one behind the other: bytes of one. */
static size_t act_plane(int n) { return (2 * (size_t)n + 63) / 64 * 64; }

/* An odd number of cache lines: were rows a power of two apart, the same place of every row would share a cache set. */
static size_t act_bytes(enum act_format f, int n) {
    size_t k = (size_t)n, bytes = f == ACT_F32    ? 4 * k
                                  : f == ACT_BF16 ? 2 * act_plane(n)
                                                  : (k + 31) / 32 * sizeof(struct act_i16);
    return (bytes + 63) / 64 * 64 | 64;
}

/* ============================================================================================================
 * CPU kernels: the oracle
 * ============================================================================================================ */

static enum act_format ref_act_format(uint32_t type, int n_tok) {
    (void)type, (void)n_tok;
    return ACT_F32;
}

static void ref_act_pack(enum act_format f, const float *x, int n, void *out) {
    memcpy(out, x, (size_t)n * sizeof *x);
    memset((char *)out + (size_t)n * sizeof *x, 0, act_bytes(f, n) - (size_t)n * sizeof *x);
}

static double ref_dot_wide(const float *a, const float *b, int n) {
    double s[8] = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) s[j] += (double)a[i + j] * (double)b[i + j];
    for (; i < n; i++) s[0] += (double)a[i] * (double)b[i];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static float ref_dot(const float *a, const float *b, int n) { return (float)ref_dot_wide(a, b, n); }

/* Rows are decoded in pieces, each for up to 16 tokens at a time. */
static void ref_gemm(const struct gemm *g) {
    enum { PIECE = 512, TOKENS = 16 };
    float w[PIECE];
    for (int t0 = 0; t0 < g->n_tok; t0 += TOKENS) {
        int nt = g->n_tok - t0 < TOKENS ? g->n_tok - t0 : TOKENS;
        for (int r = 0; r < g->n_out; r++) {
            const uint8_t *row = g->w + (size_t)r * g->w_stride;
            double sum[TOKENS] = {0};
            for (int i = 0; i < g->n_in; i += PIECE) {
                int n = g->n_in - i < PIECE ? g->n_in - i : PIECE;
                gguf_dequantize_row(g->type, row + gguf_row_bytes(g->type, (size_t)i), w, (size_t)n);
                for (int t = 0; t < nt; t++)
                    sum[t] += ref_dot_wide(w, (const float *)(const void *)gemm_x(g, t0 + t) + i, n);
            }
            for (int t = 0; t < nt; t++) g->y[(size_t)(t0 + t) * g->y_stride + (size_t)r] = (float)(g->scale * sum[t]);
        }
    }
}

static void ref_sgemm_nt(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            c[(ptrdiff_t)i * ldc + j] = ref_dot(a + (ptrdiff_t)i * lda, b + (ptrdiff_t)j * ldb, k);
}

static void ref_sgemm_nn_add(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double s = 0;
            for (int p = 0; p < k; p++) s += (double)a[(ptrdiff_t)i * lda + p] * (double)b[(ptrdiff_t)p * ldb + j];
            c[(ptrdiff_t)i * ldc + j] += (float)s;
        }
}

static float ref_exp_sum(float *s, int n, float max) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += s[i] = expf(s[i] - max);
    return (float)sum;
}

static void ref_silu_mul(float *g, const float *u, int n) {
    for (int i = 0; i < n; i++) g[i] = g[i] / (1.0f + expf(-g[i])) * u[i];
}

static void ref_from_bf16(const uint16_t *x, float *y, int n) {
    for (int i = 0; i < n; i++) y[i] = bf16_to_f32(x[i]);
}

static void ref_from_e4m3(const uint8_t *x, float scale, float *y, int n) {
    for (int i = 0; i < n; i++) y[i] = e4m3_to_f32(x[i]) * scale;
}

static void ref_to_e4m3(const float *x, float inv_scale, uint8_t *y, int n) {
    for (int i = 0; i < n; i++) y[i] = e4m3_from_f32(x[i] * inv_scale);
}

static void ref_to_bf16(const float *x, uint16_t *y, int n) {
    for (int i = 0; i < n; i++) y[i] = bf16_from_f32(x[i]);
}

static void ref_rmsnorm(const float *x, const float *w, float eps, float *y, int n) {
    float f = (float)(1.0 / sqrt(ref_dot_wide(x, x, n) / n + (double)eps));
    for (int i = 0; i < n; i++) y[i] = x[i] * f * (w ? w[i] : 1.0f);
}

static float ref_amax(const float *x, int n) {
    float m = 0;
    for (int i = 0; i < n; i++) m = fabsf(x[i]) > m ? fabsf(x[i]) : m;
    return m;
}

static float ref_max(const float *x, int n) {
    float m = x[0];
    for (int i = 1; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

static const struct kernels kernels_ref = {
    "reference",  ref_act_format, act_bytes,     ref_act_pack, ref_gemm,    ref_sgemm_nt, ref_sgemm_nn_add, ref_exp_sum,
    ref_silu_mul, ref_from_bf16,  ref_from_e4m3, ref_to_e4m3,  ref_to_bf16, ref_rmsnorm,  ref_amax,         ref_max};

/* ============================================================================================================
 * CPU kernels: vector functions for any instruction set
 *
 * Written once with the compiler's vector types and inlined into one wrapper per instruction set (VECTOR_FUNCTIONS).
 * Vectors are handed over by pointer: by value, their calling convention would depend on the instruction set.
 * ============================================================================================================ */

#if defined(__x86_64__)
enum { VL = 8 }; /* floats of a vector */
#else
enum { VL = 4 };
#endif
typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vu16 __attribute__((vector_size(2 * VL)));
typedef uint8_t vu8 __attribute__((vector_size(VL)));

/* The same, anywhere in memory of any type. */
typedef vf vf_mem __attribute__((aligned(1), may_alias));
typedef vi vi_mem __attribute__((aligned(1), may_alias));
typedef vu vu_mem __attribute__((aligned(1), may_alias));
typedef vu16 vu16_mem __attribute__((aligned(1), may_alias));
typedef vu8 vu8_mem __attribute__((aligned(1), may_alias));

#define VLOAD(type, p)      (*(const type##_mem *)(p))
#define VSTORE(type, p)     (*(type##_mem *)(p)) /* an lvalue */
#define VSELECT(mask, a, b) ((vf)(((vi)(mask) & (vi)(a)) | (~(vi)(mask) & (vi)(b))))
#define INLINE              static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE float vec_sum(const vf *v) {
    float s[VL];
    memcpy(s, v, sizeof s);
    UNROLL for (int n = VL / 2; n; n /= 2) { UNROLL for (int i = 0; i < n; i++) s[i] += s[i + n]; }
    return s[0];
}

/* A number of sign, exponent and mantissa, its exponent field at bit 23, becomes F32: rebias is the difference of the
 * biases. Subnormals are normalised by 2v - 2^(1-bias), since their hidden bit does not exist. */
INLINE void vec_rebias(const vu *bits, uint32_t rebias, vf *out) {
    vu b = *bits + (rebias << 23), least = (vu){0} + ((rebias + 1) << 23);
    *out = VSELECT(*bits < (1u << 23), (vf)b * 2.0f - (vf)least, (vf)b);
}

/* VL weights of a row, from element i on; exact. */
typedef void vec_load(const uint8_t *row, int i, vf *out);

INLINE void vec_load_f32(const uint8_t *row, int i, vf *out) { *out = VLOAD(vf, row + 4 * (ptrdiff_t)i); }

INLINE void vec_load_bf16(const uint8_t *row, int i, vf *out) {
    *out = (vf)(__builtin_convertvector(VLOAD(vu16, row + 2 * (ptrdiff_t)i), vu) << 16);
}

INLINE void vec_load_f16(const uint8_t *row, int i, vf *out) {
    vu h = __builtin_convertvector(VLOAD(vu16, row + 2 * (ptrdiff_t)i), vu), bits = (h & 0x7fff) << 13;
    vec_rebias(&bits, 112, out);
    *out = (vf)((vu)*out | (h & 0x8000) << 16 | ((vu)(bits >= 0x0f800000) & 0x7f800000)); /* infinity and NaN */
}

/* e^x for x <= 88, 0 below -87.3. Relative error 2e-7: x = n ln 2 + r; polynomial of degree 6 (Cephes, expf). */
INLINE void vec_exp(vf *x) {
    const float round = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    vf v = VSELECT(*x > 88.0f, (vf){0} + 88.0f, *x);
    vf t = v * 0x1.715476p0f + round, n = t - round;
    vf r = v - n * 0x1.63p-1f + n * 0x1.bd0106p-13f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vf y = p * (vf)(((vu)t + 127) << 23);
    *x = VSELECT(*x < -87.3f, (vf){0}, y);
}

INLINE float vec_dot(const float *a, const float *b, int n) {
    vf s[4] = {0};
    int i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
        UNROLL for (int j = 0; j < 4; j++) s[j] += VLOAD(vf, a + i + j * VL) * VLOAD(vf, b + i + j * VL);
    }
    for (; i + VL <= n; i += VL) s[0] += VLOAD(vf, a + i) * VLOAD(vf, b + i);
    s[0] = (s[0] + s[1]) + (s[2] + s[3]);
    float sum = vec_sum(&s[0]);
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* R rows of weights times T rows of F32 activations: y[t * y_stride + r]. The order of a sum does not depend on R or T. */
INLINE void vec_tile(vec_load *load, const struct gemm *g, int r0, int R, int t0, int T) {
    const uint8_t *w[4];
    const float *x[4];
    vf s[4][4] = {0};
    int i = 0;
    UNROLL for (int r = 0; r < R; r++) w[r] = g->w + (size_t)(r0 + r) * g->w_stride;
    UNROLL for (int t = 0; t < T; t++) x[t] = (const float *)(const void *)gemm_x(g, t0 + t);
    for (; i + VL <= g->n_in; i += VL) {
        vf a[4];
        UNROLL for (int r = 0; r < R; r++) load(w[r], i, &a[r]);
        UNROLL for (int t = 0; t < T; t++) {
            vf b = VLOAD(vf, x[t] + i);
            UNROLL for (int r = 0; r < R; r++) s[t][r] += a[r] * b;
        }
    }
    UNROLL for (int t = 0; t < T; t++) {
        UNROLL for (int r = 0; r < R; r++) {
            float sum = vec_sum(&s[t][r]), tail[VL];
            if (i < g->n_in) {
                gguf_dequantize_row(g->type, w[r] + gguf_row_bytes(g->type, (size_t)i), tail, (size_t)(g->n_in - i));
                for (int j = i; j < g->n_in; j++) sum += tail[j - i] * x[t][j];
            }
            g->y[(size_t)(t0 + t) * g->y_stride + (size_t)(r0 + r)] = g->scale * sum;
        }
    }
}

INLINE void vec_gemm(vec_load *load, const struct gemm *g) {
    int t = 0, r;
    for (; t + 4 <= g->n_tok; t += 4) {
        for (r = 0; r + 2 <= g->n_out; r += 2) vec_tile(load, g, r, 2, t, 4);
        if (r < g->n_out) vec_tile(load, g, r, 1, t, 4);
    }
    for (; t < g->n_tok; t++) {
        for (r = 0; r + 4 <= g->n_out; r += 4) vec_tile(load, g, r, 4, t, 1);
        for (; r < g->n_out; r++) vec_tile(load, g, r, 1, t, 1);
    }
}

/* C = A B^T as a product with weights B. */
static struct gemm sgemm_nt_as_gemm(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c,
                                    int ldc) {
    return (struct gemm){.type = GGUF_F32,
                         .w = (const uint8_t *)b,
                         .w_stride = 4 * (size_t)ldb,
                         .n_out = n,
                         .n_in = k,
                         .scale = 1.0f,
                         .x = (const uint8_t *)a,
                         .x_stride = 4 * (size_t)lda,
                         .n_tok = m,
                         .y = c,
                         .y_stride = (size_t)ldc};
}

/* M rows by N vectors of C += A B. */
INLINE void vec_tile_nn(int M, int N, int k, const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                        ptrdiff_t ldc) {
    vf s[4][2];
    UNROLL for (int i = 0; i < M; i++) { UNROLL for (int j = 0; j < N; j++) s[i][j] = VLOAD(vf, c + i * ldc + j * VL); }
    for (int p = 0; p < k; p++) {
        vf v[2];
        UNROLL for (int j = 0; j < N; j++) v[j] = VLOAD(vf, b + p * ldb + j * VL);
        UNROLL for (int i = 0; i < M; i++) { UNROLL for (int j = 0; j < N; j++) s[i][j] += a[i * lda + p] * v[j]; }
    }
    UNROLL for (int i = 0; i < M; i++) {
        UNROLL for (int j = 0; j < N; j++) VSTORE(vf, c + i * ldc + j * VL) = s[i][j];
    }
}

INLINE void vec_sgemm_nn_add(int m, int n, int k, const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                             float *c, ptrdiff_t ldc) {
    int i = 0, j;
    for (; i + 4 <= m; i += 4) {
        for (j = 0; j + 2 * VL <= n; j += 2 * VL)
            vec_tile_nn(4, 2, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
        for (; j + VL <= n; j += VL) vec_tile_nn(4, 1, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
    }
    for (; i < m; i++)
        for (j = 0; j + VL <= n; j += VL) vec_tile_nn(1, 1, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
    for (i = 0; i < m; i++)
        for (j = n / VL * VL; j < n; j++)
            for (int p = 0; p < k; p++) c[i * ldc + j] += a[i * lda + p] * b[p * ldb + j];
}

/* The last n < VL elements of a vector function go through a padded copy. */
INLINE float vec_exp_sum(float *s, int n, float max) {
    vf sum = {0};
    for (int i = 0; i < n; i += VL) {
        vf v = (vf){0} - INFINITY;
        if (i + VL <= n) v = VLOAD(vf, s + i);
        else memcpy(&v, s + i, (size_t)(n - i) * sizeof *s);
        v -= max;
        vec_exp(&v);
        sum += v;
        if (i + VL <= n) VSTORE(vf, s + i) = v;
        else memcpy(s + i, &v, (size_t)(n - i) * sizeof *s);
    }
    return vec_sum(&sum);
}

INLINE void vec_silu_mul(float *g, const float *u, int n) {
    for (int i = 0; i < n; i += VL) {
        vf x = {0}, y = {0};
        size_t bytes = (size_t)(n - i < VL ? n - i : VL) * sizeof *g;
        memcpy(&x, g + i, bytes), memcpy(&y, u + i, bytes);
        vf e = -x;
        vec_exp(&e);
        x = x / (1.0f + e) * y;
        memcpy(g + i, &x, bytes);
    }
}

INLINE void vec_from_bf16(const uint16_t *x, float *y, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) VSTORE(vu, y + i) = __builtin_convertvector(VLOAD(vu16, x + i), vu) << 16;
    ref_from_bf16(x + i, y + i, n - i);
}

INLINE void vec_from_e4m3(const uint8_t *x, float scale, float *y, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vu b = __builtin_convertvector(VLOAD(vu8, x + i), vu), bits = (b & 0x7f) << 20;
        vf v;
        vec_rebias(&bits, 120, &v);
        VSTORE(vf, y + i) = (vf)((vu)v | (b & 0x80) << 24) * scale;
    }
    ref_from_e4m3(x + i, scale, y + i, n - i);
}

/* The steps of e4m3_from_f32, with selections in the place of branches. */
INLINE void vec_to_e4m3(const float *x, float inv_scale, uint8_t *y, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vu u = (vu)(VLOAD(vf, x + i) * inv_scale), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
        vu normal = (a + 0x7ffff + (a >> 20 & 1) - 0x3c000000) >> 20;
        vu small = (vu)((vf)a + 16384.0f) - 0x46800000;
        vu r = (vu)VSELECT(a < 0x3c800000, small, normal);
        r = (vu)VSELECT(a >= 0x43e00000, (vu){0} + 0x7e, r);
        r = (vu)VSELECT(a > 0x7f800000, (vu){0} + 0x7f, r);
        VSTORE(vu8, y + i) = __builtin_convertvector(r | sign, vu8);
    }
    ref_to_e4m3(x + i, inv_scale, y + i, n - i);
}

INLINE void vec_to_bf16(const float *x, uint16_t *y, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vu u = VLOAD(vu, x + i), r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
        r = (vu)VSELECT((u & 0x7fffffff) > 0x7f800000, u >> 16 | 0x40, r);
        VSTORE(vu16, y + i) = __builtin_convertvector(r, vu16);
    }
    ref_to_bf16(x + i, y + i, n - i);
}

/* The sum of squares is taken in pieces, which bounds its rounding error as pairwise summation does. */
INLINE void vec_rmsnorm(const float *x, const float *w, float eps, float *y, int n) {
    enum { PIECE = 512 };
    double sum = 0;
    int i = 0;
    for (int p = 0; p < n; p += PIECE) sum += (double)vec_dot(x + p, x + p, n - p < PIECE ? n - p : PIECE);
    float f = (float)(1.0 / sqrt(sum / n + (double)eps));
    for (; i + VL <= n; i += VL) {
        vf v = VLOAD(vf, x + i) * f;
        if (w) v *= VLOAD(vf, w + i);
        VSTORE(vf, y + i) = v;
    }
    for (; i < n; i++) y[i] = x[i] * f * (w ? w[i] : 1.0f);
}

/* Magnitudes of floats are ordered as their bits are. */
INLINE float vec_amax(const float *x, int n) {
    vi m = {0};
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vi a = VLOAD(vi, x + i) & 0x7fffffff;
        m = (vi)VSELECT(a > m, a, m);
    }
    float best = ref_amax(x + i, n - i);
    for (int j = 0; j < VL; j++) best = f32_from_bits((uint32_t)m[j]) > best ? f32_from_bits((uint32_t)m[j]) : best;
    return best;
}

INLINE float vec_max(const float *x, int n) {
    if (n < VL) return ref_max(x, n);
    vf m = VLOAD(vf, x);
    int i = VL;
    for (; i + VL <= n; i += VL) {
        vf a = VLOAD(vf, x + i);
        m = VSELECT(a > m, a, m);
    }
    float best = i < n ? ref_max(x + i, n - i) : m[0];
    for (int l = 0; l < VL; l++) best = m[l] > best ? m[l] : best;
    return best;
}

/* n is a multiple of 32. What is below 2^-100 counts as zero: 32512 / amax stays finite. */
INLINE void vec_pack_i16(const float *x, int n, struct act_i16 *out) {
    for (int b = 0; b < n / 32; b++, x += 32) {
        float amax = vec_amax(x, 32), inv = amax < 0x1p-100f ? 0.0f : 32512.0f / amax; /* 127 * 256 */
        out[b].d = amax < 0x1p-100f ? 0.0f : amax / 32512.0f;
        for (int h = 0; h < 2; h++) {
            vu sum = {0};
            uint32_t total = 0;
            for (int i = 16 * h; i < 16 * h + 16; i += VL) {
                vf t = VLOAD(vf, x + i) * inv + 0x1.8p23f; /* rounds to the nearest integer */
                vu q = (vu)t - 0x4b400000, lo = ((q + 128) & 255) - 128, hi = (vu)((vi)(q - lo) >> 8);
                lo -= (vu)((vi)lo == -128); /* to -127 */
                VSTORE(vu8, out[b].hi + i) = __builtin_convertvector(hi, vu8);
                VSTORE(vu8, out[b].lo + i) = __builtin_convertvector(lo, vu8);
                sum += (hi << 8) + lo;
            }
            for (int j = 0; j < VL; j++) total += sum[j];
            out[b].bias[h] = (int32_t)(0 - 16 * total);
        }
    }
}

INLINE void vec_act_pack(enum act_format f, const float *x, int n, void *out) {
    if (f == ACT_F32) ref_act_pack(f, x, n, out);
    else if (f == ACT_I16) vec_pack_i16(x, n, out);
    else {
        uint16_t *hi = out, *lo = (uint16_t *)(void *)((uint8_t *)out + act_plane(n));
        memset(out, 0, act_bytes(f, n));
        for (int i = 0; i < n; i += 64) {
            float rest[64];
            int m = int_min(n - i, 64);
            vec_to_bf16(x + i, hi + i, m);
            vec_from_bf16(hi + i, rest, m);
            for (int j = 0; j < m; j++) rest[j] = x[i + j] - rest[j];
            vec_to_bf16(rest, lo + i, m);
        }
    }
}

/* The functions above for one instruction set; TARGET is its attribute. */
#define VECTOR_FUNCTIONS(isa, TARGET)                                                                  \
    TARGET static void isa##_act_pack(enum act_format f, const float *x, int n, void *out) {           \
        vec_act_pack(f, x, n, out);                                                                    \
    }                                                                                                  \
    TARGET static float isa##_exp_sum(float *s, int n, float max) { return vec_exp_sum(s, n, max); }   \
    TARGET static void isa##_silu_mul(float *g, const float *u, int n) { vec_silu_mul(g, u, n); }      \
    TARGET static void isa##_from_bf16(const uint16_t *x, float *y, int n) { vec_from_bf16(x, y, n); } \
    TARGET static void isa##_from_e4m3(const uint8_t *x, float scale, float *y, int n) {               \
        vec_from_e4m3(x, scale, y, n);                                                                 \
    }                                                                                                  \
    TARGET static void isa##_to_e4m3(const float *x, float inv_scale, uint8_t *y, int n) {             \
        vec_to_e4m3(x, inv_scale, y, n);                                                               \
    }                                                                                                  \
    TARGET static void isa##_to_bf16(const float *x, uint16_t *y, int n) { vec_to_bf16(x, y, n); }     \
    TARGET static void isa##_rmsnorm(const float *x, const float *w, float eps, float *y, int n) {     \
        vec_rmsnorm(x, w, eps, y, n);                                                                  \
    }                                                                                                  \
    TARGET static float isa##_amax(const float *x, int n) { return vec_amax(x, n); }                   \
    TARGET static float isa##_max(const float *x, int n) { return vec_max(x, n); }

/* The products with F32 activations likewise; load_*: how weights are loaded. */
#define VECTOR_PRODUCTS(isa, TARGET, load_bf16, load_f16)                                                              \
    TARGET static void isa##_gemm_f32(const struct gemm *g) {                                                          \
        if (g->type == GGUF_F32) vec_gemm(vec_load_f32, g);                                                            \
        else if (g->type == GGUF_BF16) vec_gemm(load_bf16, g);                                                         \
        else vec_gemm(load_f16, g);                                                                                    \
    }                                                                                                                  \
    TARGET static void isa##_sgemm_nt(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, \
                                      int ldc) {                                                                       \
        struct gemm g = sgemm_nt_as_gemm(m, n, k, a, lda, b, ldb, c, ldc);                                             \
        vec_gemm(vec_load_f32, &g);                                                                                    \
    }                                                                                                                  \
    TARGET static void isa##_sgemm_nn_add(int m, int n, int k, const float *a, int lda, const float *b, int ldb,       \
                                          float *c, int ldc) {                                                         \
        vec_sgemm_nn_add(m, n, k, a, lda, b, ldb, c, ldc);                                                             \
    }

/* The members of struct kernels behind gemm. */
#define VECTOR_TABLE(isa)                                                                                \
    isa##_sgemm_nt, isa##_sgemm_nn_add, isa##_exp_sum, isa##_silu_mul, isa##_from_bf16, isa##_from_e4m3, \
        isa##_to_e4m3, isa##_to_bf16, isa##_rmsnorm, isa##_amax, isa##_max

/* ============================================================================================================
 * CPU kernels: products with integer activations
 *
 * A panel is a few rows of weights (as many as an instruction set has 32-bit lanes), decoded in pieces of up to 512
 * weights to small integers and F32 scales, so that a piece stays in the first-level cache while every token of the call
 * passes over it. In a panel four consecutive weights of a row share a 32-bit lane and the lanes are the rows: the
 * activations are broadcast and nothing is ever summed across lanes.
 *
 * Per element, in this order, for each 32 weights: v = i0 * d0; v = i1 * d1 + v; sum = v * d + sum, where i0 and i1 are
 * the exact integer sums of the halves, d0 and d1 their weight scales, d the scale of the activations.
 * ============================================================================================================ */

enum {
    PANEL_ROWS = 16,    /* at most */
    PANEL_BLOCKS = 16,  /* pieces of 32 weights decoded at a time */
    PANEL_TOKENS = 512, /* whose sums are kept at a time */
    PANEL_GROUP = 4     /* tokens whose sums are in registers */
};

struct panel_isa {
    int rows;
    size_t block_bytes; /* of a panel, per 32 weights */
    /* n_blocks * 32 weights of `rows` rows, which lie w_stride apart; `next` comes next and may be prefetched */
    void (*decode)(uint32_t type, const uint8_t *w, size_t w_stride, const uint8_t *next, int n_blocks, void *panel);
    /* sum[t][rows] += panel times x[t], n_tok <= PANEL_GROUP */
    void (*dot)(uint32_t type, const void *panel, int n_blocks, const struct act_i16 *const *x, int n_tok, float *sum);
};

/* Rows [r0, r0 + n) of g against the tokens [t0, t0 + n_tok). */
static void panel_run(const struct gemm *g, const struct panel_isa *isa, int r0, int n, int t0, int n_tok) {
    uint8_t *panel = g->scratch, *copy = panel + PANEL_BLOCKS * isa->block_bytes;
    float *sum = (float *)(void *)(copy + PANEL_ROWS * PANEL_BLOCKS * sizeof(struct block_q8_0));
    memset(sum, 0, (size_t)(n_tok * isa->rows) * sizeof *sum);
    for (int b = 0; b < g->n_in / 32; b += PANEL_BLOCKS) {
        int nb = int_min(g->n_in / 32 - b, PANEL_BLOCKS);
        size_t bytes = gguf_row_bytes(g->type, 32 * (size_t)nb);
        const uint8_t *w = g->w + (size_t)r0 * g->w_stride + gguf_row_bytes(g->type, 32 * (size_t)b);
        size_t stride = g->w_stride;
        const uint8_t *next =
            b + nb < g->n_in / 32 ? w + bytes : g->w + (size_t)int_min(r0 + n, g->n_out - 1) * g->w_stride;
        if (n < isa->rows) { /* behind the last row there may be no memory: fill up with copies of it */
            for (int r = 0; r < isa->rows; r++)
                memcpy(copy + (size_t)r * bytes, w + (size_t)(r < n ? r : n - 1) * stride, bytes);
            w = copy, stride = bytes;
        }
        isa->decode(g->type, w, stride, next, nb, panel);
        for (int t = 0; t < n_tok; t += PANEL_GROUP) {
            const struct act_i16 *x[PANEL_GROUP];
            int nt = int_min(n_tok - t, PANEL_GROUP);
            for (int i = 0; i < nt; i++) x[i] = (const struct act_i16 *)(const void *)gemm_x(g, t0 + t + i) + b;
            isa->dot(g->type, panel, nb, x, nt, sum + (size_t)(t * isa->rows));
        }
    }
    for (int t = 0; t < n_tok; t++)
        for (int r = 0; r < n; r++)
            g->y[(size_t)(t0 + t) * g->y_stride + (size_t)(r0 + r)] = g->scale * sum[t * isa->rows + r];
}

static void panel_gemm(const struct gemm *g, const struct panel_isa *isa) {
    for (int t = 0; t < g->n_tok; t += PANEL_TOKENS)
        for (int r = 0; r < g->n_out; r += isa->rows)
            panel_run(g, isa, r, int_min(g->n_out - r, isa->rows), t, int_min(g->n_tok - t, PANEL_TOKENS));
}

static enum act_format panel_act_format(uint32_t type, int n_tok) {
    (void)n_tok;
    return type == GGUF_F32 || type == GGUF_F16 || type == GGUF_BF16 ? ACT_F32 : ACT_I16;
}

INLINE void panel_prefetch(const uint8_t *p, size_t stride, int rows) {
    UNROLL for (int r = 0; r < rows; r++) __builtin_prefetch(p + (size_t)r * stride);
}

/* The types of one instruction set's panels: vectors of `rows` lanes and 32 weights of every row. w[j] holds the weights
 * 4j..4j+3, a byte each, d the scales of both halves. */
#define PANEL_TYPES(isa, rows)                                                     \
    typedef float isa##_vf __attribute__((vector_size(4 * (rows)), may_alias));    \
    typedef int32_t isa##_vi __attribute__((vector_size(4 * (rows)), may_alias));  \
    typedef uint32_t isa##_vu __attribute__((vector_size(4 * (rows)), may_alias)); \
    typedef uint8_t isa##_vb __attribute__((vector_size(4 * (rows)), may_alias));  \
    struct isa##_block {                                                           \
        isa##_vu w[8];                                                             \
        isa##_vf d[2];                                                             \
    };

/* Decoding and multiplying panels. An instruction set brings
 *   columns(p, stride, out): `rows` rows of four dwords, `stride` bytes apart, transposed: out[j] holds dword j of each;
 *   codes(q, lo, hi): the low and the high FP4 codes of q as 2 * E2M1 plus a constant of its own;
 *   dot16(type, w, hi, lo, bias, sum): the sum of 16 weights w[4] by 16 activations, the constant taken back by the bias;
 *   q8_0_flip: what Q8_0 weights are XORed with. */
#define PANEL_FUNCTIONS(isa, TARGET, rows, q8_0_flip)                                                                 \
    /* See vec_rebias. */                                                                                             \
    TARGET INLINE void isa##_rebias(const isa##_vu *bits, uint32_t rebias, isa##_vf *out) {                           \
        isa##_vf v = (isa##_vf)(*bits + (rebias << 23)), least = (isa##_vf)((isa##_vu){0} + ((rebias + 1) << 23));    \
        isa##_vu small = (isa##_vu)(*bits < (1u << 23));                                                              \
        *out = (isa##_vf)((small & (isa##_vu)(v * 2.0f - least)) | (~small & (isa##_vu)v));                           \
    }                                                                                                                 \
    TARGET INLINE void isa##_decode_nvfp4(const uint8_t *w, size_t stride, const uint8_t *next, int n,                \
                                          struct isa##_block *p) {                                                    \
        for (int b = 0; b < n; b += 2, w += sizeof(struct block_nvfp4), p += 2) {                                     \
            panel_prefetch(next, stride, rows), next += sizeof(struct block_nvfp4);                                   \
            isa##_vu q[12], d;                                                                                        \
            isa##_columns(w, stride, q);                                                                              \
            isa##_columns(w + 16, stride, q + 4);                                                                     \
            isa##_columns(w + 20, stride, q + 8);                                                                     \
            q[8] = q[11]; /* q[1..8] are the codes */                                                                 \
            UNROLL for (int i = 0; i < 8; i++) {                                                                      \
                int at = i / 2 % 2 * 4 + i % 2;                                                                       \
                isa##_codes(&q[i + 1], &p[i / 4].w[at], &p[i / 4].w[at + 2]);                                         \
            }                                                                                                         \
            d = q[0] & (isa##_vu)((isa##_vb)q[0] != 0x7f);                                                            \
            UNROLL for (int i = 0; i < 4; i++) { /* half of UE4M3: E2M1 counts double */                              \
                isa##_vu bits = (i < 3 ? d << (20 - 8 * i) : d >> 4) & 0x07f00000;                                    \
                isa##_rebias(&bits, 119, &p[i / 2].d[i % 2]);                                                         \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    TARGET INLINE void isa##_decode_mxfp4(const uint8_t *w, size_t stride, const uint8_t *next, int n,                \
                                          struct isa##_block *p) {                                                    \
        for (int b = 0; b < n; b++, w += sizeof(struct block_mxfp4), p++) {                                           \
            panel_prefetch(next, stride, rows), next += sizeof(struct block_mxfp4);                                   \
            isa##_vu q[4], e[4];                                                                                      \
            isa##_columns(w, stride, e);                                                                              \
            isa##_columns(w + 1, stride, q);                                                                          \
            UNROLL for (int i = 0; i < 4; i++) isa##_codes(&q[i], &p->w[i], &p->w[i + 4]);                            \
            e[0] = (e[0] & 255) << 23;                                                                                \
            e[0] |= (isa##_vu)(e[0] == 0) & 0x00400000; /* the code 0: 2^-127 */                                      \
            p->d[0] = p->d[1] = (isa##_vf)e[0] * 0.5f;                                                                \
        }                                                                                                             \
    }                                                                                                                 \
    TARGET INLINE void isa##_decode_q8_0(const uint8_t *w, size_t stride, const uint8_t *next, int n,                 \
                                         struct isa##_block *p) {                                                     \
        for (int b = 0; b < n; b++, w += sizeof(struct block_q8_0), p++) {                                            \
            panel_prefetch(next, stride, rows), next += sizeof(struct block_q8_0);                                    \
            isa##_vu d[4], bits;                                                                                      \
            isa##_columns(w, stride, d);                                                                              \
            isa##_columns(w + 2, stride, p->w);                                                                       \
            isa##_columns(w + 18, stride, p->w + 4);                                                                  \
            UNROLL for (int i = 0; i < 8; i++) p->w[i] ^= (q8_0_flip);                                                \
            bits = (d[0] & 0x7fff) << 13;                                                                             \
            isa##_rebias(&bits, 112, &p->d[0]);                                                                       \
            bits = (isa##_vu)(bits >= 0x0f800000) & 0x7f800000; /* infinity and NaN */                                \
            p->d[0] = p->d[1] = (isa##_vf)((isa##_vu)p->d[0] | bits | (d[0] & 0x8000) << 16);                         \
        }                                                                                                             \
    }                                                                                                                 \
    TARGET static void isa##_panel_decode(uint32_t type, const uint8_t *w, size_t stride, const uint8_t *next, int n, \
                                          void *panel) {                                                              \
        if (type == GGUF_NVFP4) isa##_decode_nvfp4(w, stride, next, n, panel);                                        \
        else if (type == GGUF_MXFP4) isa##_decode_mxfp4(w, stride, next, n, panel);                                   \
        else isa##_decode_q8_0(w, stride, next, n, panel);                                                            \
    }                                                                                                                 \
    TARGET INLINE void isa##_dot_tokens(uint32_t type, int n_tok, const struct isa##_block *p, int n,                 \
                                        const struct act_i16 *const *x, isa##_vf *sum) {                              \
        isa##_vf s[PANEL_GROUP];                                                                                      \
        UNROLL for (int t = 0; t < n_tok; t++) s[t] = sum[t];                                                         \
        for (int b = 0; b < n; b++, p++) {                                                                            \
            UNROLL for (int t = 0; t < n_tok; t++) {                                                                  \
                const struct act_i16 *a = x[t] + b;                                                                   \
                isa##_vi i0, i1;                                                                                      \
                isa##_dot16(type, p->w, a->hi, a->lo, a->bias[0], &i0);                                               \
                isa##_dot16(type, p->w + 4, a->hi + 16, a->lo + 16, a->bias[1], &i1);                                 \
                isa##_vf v = __builtin_convertvector(i0, isa##_vf) * p->d[0];                                         \
                v = __builtin_convertvector(i1, isa##_vf) * p->d[1] + v;                                              \
                s[t] = v * a->d + s[t];                                                                               \
            }                                                                                                         \
        }                                                                                                             \
        UNROLL for (int t = 0; t < n_tok; t++) sum[t] = s[t];                                                         \
    }                                                                                                                 \
    TARGET INLINE void isa##_dot_type(uint32_t type, const void *panel, int n, const struct act_i16 *const *x,        \
                                      int n_tok, float *sum) {                                                        \
        if (n_tok == PANEL_GROUP) isa##_dot_tokens(type, PANEL_GROUP, panel, n, x, (isa##_vf *)sum);                  \
        else                                                                                                          \
            for (int t = 0; t < n_tok; t++) isa##_dot_tokens(type, 1, panel, n, x + t, (isa##_vf *)sum + t);          \
    }                                                                                                                 \
    TARGET static void isa##_panel_dot(uint32_t type, const void *panel, int n, const struct act_i16 *const *x,       \
                                       int n_tok, float *sum) {                                                       \
        if (type == GGUF_Q8_0) isa##_dot_type(GGUF_Q8_0, panel, n, x, n_tok, sum);                                    \
        else isa##_dot_type(GGUF_NVFP4, panel, n, x, n_tok, sum);                                                     \
    }                                                                                                                 \
    static const struct panel_isa isa##_panel = {rows, sizeof(struct isa##_block), isa##_panel_decode, isa##_panel_dot};

/* The scalar panel: signed weights, row by row. FP4 codes count double, so their scales are halved. */
struct scalar_block {
    int8_t w[4][32];
    float d[4][2];
};

static void scalar_decode_block(uint32_t type, const uint8_t *w, int half, int8_t *q, float *d) {
    if (type == GGUF_Q8_0) {
        memcpy(q, w + 2, 32);
        d[0] = d[1] = f16_to_f32((uint16_t)(w[0] | w[1] << 8));
    } else if (type == GGUF_MXFP4) {
        for (int j = 0; j < 16; j++) q[j] = e2m1_doubled[w[1 + j] & 15], q[j + 16] = e2m1_doubled[w[1 + j] >> 4];
        d[0] = d[1] = 0.5f * e8m0_to_f32(w[0]);
    } else {
        for (int j = 0; j < 16; j++) {
            uint8_t codes = w[4 + 16 * half + j];
            int at = (j & 7) + 2 * (j & 8);
            q[at] = e2m1_doubled[codes & 15], q[at + 8] = e2m1_doubled[codes >> 4];
        }
        for (int h = 0; h < 2; h++) d[h] = 0.5f * ue4m3_to_f32(w[2 * half + h]);
    }
}

static void scalar_panel_decode(uint32_t type, const uint8_t *w, size_t w_stride, const uint8_t *next, int n_blocks,
                                void *panel) {
    struct scalar_block *p = panel;
    (void)next;
    for (int r = 0; r < 4; r++, w += w_stride)
        for (int b = 0; b < n_blocks; b++)
            scalar_decode_block(type,
                                w + gguf_row_bytes(type, type == GGUF_NVFP4 ? (size_t)b / 2 * 64 : (size_t)b * 32),
                                b & 1, p[b].w[r], p[b].d[r]);
}

static void scalar_panel_dot(uint32_t type, const void *panel, int n_blocks, const struct act_i16 *const *x, int n_tok,
                             float *sum) {
    const struct scalar_block *p = panel;
    (void)type;
    for (int t = 0; t < n_tok; t++)
        for (int b = 0; b < n_blocks; b++)
            for (int r = 0; r < 4; r++) {
                int32_t i[2] = {0};
                for (int h = 0; h < 2; h++)
                    for (int j = 16 * h; j < 16 * h + 16; j++)
                        i[h] += p[b].w[r][j] * (256 * x[t][b].hi[j] + x[t][b].lo[j]);
                sum[4 * t + r] += ((float)i[0] * p[b].d[r][0] + (float)i[1] * p[b].d[r][1]) * x[t][b].d;
            }
}

VECTOR_FUNCTIONS(scalar, )
VECTOR_PRODUCTS(scalar, , vec_load_bf16, vec_load_f16)

static void scalar_gemm(const struct gemm *g) {
    static const struct panel_isa isa = {4, sizeof(struct scalar_block), scalar_panel_decode, scalar_panel_dot};
    if (g->format == ACT_I16) panel_gemm(g, &isa);
    else scalar_gemm_f32(g);
}

static const struct kernels kernels_scalar = {"scalar",        panel_act_format, act_bytes,
                                              scalar_act_pack, scalar_gemm,      VECTOR_TABLE(scalar)};

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>

/* ============================================================================================================
 * CPU kernels: AVX2
 * ============================================================================================================ */

#define AVX2        __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE AVX2 INLINE

PANEL_TYPES(avx2, 8)

AVX2_INLINE void avx2_columns(const uint8_t *p, size_t stride, avx2_vu out[4]) {
    __m256i m[4];
    UNROLL for (int i = 0; i < 4; i++, p += stride) {
        m[i] = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i_u *)p));
        m[i] = _mm256_inserti128_si256(m[i], _mm_loadu_si128((const __m128i_u *)(p + 4 * stride)), 1);
    }
    __m256i t0 = _mm256_unpacklo_epi32(m[0], m[1]), t1 = _mm256_unpackhi_epi32(m[0], m[1]);
    __m256i t2 = _mm256_unpacklo_epi32(m[2], m[3]), t3 = _mm256_unpackhi_epi32(m[2], m[3]);
    out[0] = (avx2_vu)_mm256_unpacklo_epi64(t0, t2), out[1] = (avx2_vu)_mm256_unpackhi_epi64(t0, t2);
    out[2] = (avx2_vu)_mm256_unpacklo_epi64(t1, t3), out[3] = (avx2_vu)_mm256_unpackhi_epi64(t1, t3);
}

/* Unsigned: 16 + 2 * E2M1. */
AVX2_INLINE void avx2_codes(const avx2_vu *q, avx2_vu *lo, avx2_vu *hi) {
    __m128i codes = _mm_add_epi8(_mm_loadu_si128((const __m128i_u *)e2m1_doubled), _mm_set1_epi8(16));
    __m256i table = _mm256_broadcastsi128_si256(codes);
    *lo = (avx2_vu)_mm256_shuffle_epi8(table, (__m256i)(*q & 0x0f0f0f0f));
    *hi = (avx2_vu)_mm256_shuffle_epi8(table, (__m256i)(*q >> 4 & 0x0f0f0f0f));
}

/* 16 weights by 16 digits. Four products of pairs of FP4 fit in 16 bits (4 * 2 * 28 * 127); of Q8_0, which stays signed, one
 * (2 * 128 * 127). */
AVX2_INLINE void avx2_dot_digit(uint32_t type, const avx2_vu w[4], const int8_t *q, avx2_vi *out) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    UNROLL for (int j = 0; j < 4; j++) {
        int32_t four;
        memcpy(&four, q + 4 * j, 4);
        __m256i x = _mm256_set1_epi32(four), v = (__m256i)w[j];
        if (type == GGUF_Q8_0) {
            x = _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(x, v));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, ones));
        } else sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(v, x));
    }
    *out = (avx2_vi)(type == GGUF_Q8_0 ? sum : _mm256_madd_epi16(sum, ones));
}

AVX2_INLINE void avx2_dot16(uint32_t type, const avx2_vu w[4], const int8_t *hi, const int8_t *lo, int32_t bias,
                            avx2_vi *out) {
    avx2_vi h, l;
    avx2_dot_digit(type, w, hi, &h);
    avx2_dot_digit(type, w, lo, &l);
    *out = (h << 8) + l + (type == GGUF_Q8_0 ? 0 : bias);
}

PANEL_FUNCTIONS(avx2, AVX2, 8, 0)

AVX2_INLINE void avx2_load_bf16(const uint8_t *row, int i, vf *out) {
    __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)(row + 2 * (ptrdiff_t)i)));
    *out = (vf)_mm256_slli_epi32(h, 16);
}

AVX2_INLINE void avx2_load_f16(const uint8_t *row, int i, vf *out) {
    *out = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(row + 2 * (ptrdiff_t)i)));
}

VECTOR_FUNCTIONS(avx2, AVX2)
VECTOR_PRODUCTS(avx2, AVX2, avx2_load_bf16, avx2_load_f16)

static void avx2_gemm(const struct gemm *g) {
    if (g->format == ACT_I16) panel_gemm(g, &avx2_panel);
    else avx2_gemm_f32(g);
}

static const struct kernels kernels_avx2 = {"avx2",        panel_act_format, act_bytes,
                                            avx2_act_pack, avx2_gemm,        VECTOR_TABLE(avx2)};

/* ============================================================================================================
 * CPU kernels: AVX-512 VNNI
 * ============================================================================================================ */

#define AVX512        __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define AVX512_INLINE AVX512 INLINE

PANEL_TYPES(avx512, 16)

AVX512_INLINE void avx512_columns(const uint8_t *p, size_t stride, avx512_vu out[4]) {
    __m512i m[4];
    UNROLL for (int i = 0; i < 4; i++, p += stride) {
        m[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i_u *)p));
        m[i] = _mm512_inserti32x4(m[i], _mm_loadu_si128((const __m128i_u *)(p + 4 * stride)), 1);
        m[i] = _mm512_inserti32x4(m[i], _mm_loadu_si128((const __m128i_u *)(p + 8 * stride)), 2);
        m[i] = _mm512_inserti32x4(m[i], _mm_loadu_si128((const __m128i_u *)(p + 12 * stride)), 3);
    }
    __m512i t0 = _mm512_unpacklo_epi32(m[0], m[1]), t1 = _mm512_unpackhi_epi32(m[0], m[1]);
    __m512i t2 = _mm512_unpacklo_epi32(m[2], m[3]), t3 = _mm512_unpackhi_epi32(m[2], m[3]);
    out[0] = (avx512_vu)_mm512_unpacklo_epi64(t0, t2), out[1] = (avx512_vu)_mm512_unpackhi_epi64(t0, t2);
    out[2] = (avx512_vu)_mm512_unpacklo_epi64(t1, t3), out[3] = (avx512_vu)_mm512_unpackhi_epi64(t1, t3);
}

/* Unsigned: 16 + 2 * E2M1. */
AVX512_INLINE void avx512_codes(const avx512_vu *q, avx512_vu *lo, avx512_vu *hi) {
    __m128i codes = _mm_add_epi8(_mm_loadu_si128((const __m128i_u *)e2m1_doubled), _mm_set1_epi8(16));
    __m512i table = _mm512_broadcast_i32x4(codes);
    *lo = (avx512_vu)_mm512_shuffle_epi8(table, (__m512i)(*q & 0x0f0f0f0f));
    *hi = (avx512_vu)_mm512_shuffle_epi8(table, (__m512i)(*q >> 4 & 0x0f0f0f0f));
}

/* vpdpbusd multiplies unsigned by signed bytes: Q8_0 is stored with 128 added, for which the bias of 16 counts 8 times. */
AVX512_INLINE void avx512_dot16(uint32_t type, const avx512_vu w[4], const int8_t *hi, const int8_t *lo, int32_t bias,
                                avx512_vi *out) {
    __m512i h = _mm512_setzero_si512(), l = _mm512_set1_epi32(bias);
    if (type == GGUF_Q8_0) l = _mm512_slli_epi32(l, 3);
    UNROLL for (int j = 0; j < 4; j++) {
        int32_t four[2];
        memcpy(&four[0], hi + 4 * j, 4);
        memcpy(&four[1], lo + 4 * j, 4);
        h = _mm512_dpbusd_epi32(h, (__m512i)w[j], _mm512_set1_epi32(four[0]));
        l = _mm512_dpbusd_epi32(l, (__m512i)w[j], _mm512_set1_epi32(four[1]));
    }
    *out = (avx512_vi)_mm512_add_epi32(l, _mm512_slli_epi32(h, 8));
}

PANEL_FUNCTIONS(avx512, AVX512, 16, 0x80808080)

/* Sums of the lanes of 16 vectors: lane i of the result is that of s[i]. Every step adds the halves of two vectors. */
AVX512_INLINE __m512 avx512_sums(const __m512 s[16]) {
    __m512 a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8;
                i++) { /* lanes: s0 s1 s0 s1, s4 s5 ..; s2 s3 ..; as 128 bits hold s0 s1 s2 s3 in the end */
        int j = i % 4 * 4 + i / 4 * 2;
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(s[j], s[j + 1]), _mm512_unpackhi_ps(s[j], s[j + 1]));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d lo = _mm512_castps_pd(a[i]), hi = _mm512_castps_pd(a[i + 4]);
        b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
        b[i] = _mm512_add_ps(b[i], _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi)));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m512 lo = b[2 * i], hi = b[2 * i + 1];
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(lo, hi, 0x88), _mm512_shuffle_f32x4(lo, hi, 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

AVX512_INLINE __m512 avx512_load(uint32_t type, const uint8_t *row, int i, __mmask16 m) {
    if (type == GGUF_F32) return _mm512_maskz_loadu_ps(m, row + 4 * (ptrdiff_t)i);
    __m256i h = _mm256_maskz_loadu_epi16(m, row + 2 * (ptrdiff_t)i);
    if (type == GGUF_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* R rows of weights times T rows of F32 activations, R * T <= 16: the lane R * t + r of the result. */
AVX512_INLINE __m512 avx512_tile(uint32_t type, const struct gemm *g, int r0, int R, int t0, int T) {
    const uint8_t *w[16];
    const float *x[4];
    __m512 s[16];
    UNROLL for (int i = 0; i < 16; i++) s[i] = _mm512_setzero_ps();
    UNROLL for (int r = 0; r < R; r++) w[r] = g->w + (size_t)(r0 + r) * g->w_stride;
    UNROLL for (int t = 0; t < T; t++) x[t] = (const float *)(const void *)gemm_x(g, t0 + t);
    for (int i = 0; i < g->n_in; i += 16) {
        __mmask16 m = g->n_in - i < 16 ? (__mmask16)((1u << (g->n_in - i)) - 1) : 0xffff;
        __m512 a[16];
        UNROLL for (int r = 0; r < R; r++) a[r] = avx512_load(type, w[r], i, m);
        UNROLL for (int t = 0; t < T; t++) {
            __m512 b = _mm512_maskz_loadu_ps(m, x[t] + i);
            UNROLL for (int r = 0; r < R; r++) s[R * t + r] = _mm512_fmadd_ps(a[r], b, s[R * t + r]);
        }
    }
    return _mm512_mul_ps(avx512_sums(s), _mm512_set1_ps(g->scale));
}

AVX512_INLINE void avx512_gemm_typed(uint32_t type, const struct gemm *g) {
    float y[16];
    int t = 0, r;
    for (; t + 4 <= g->n_tok; t += 4) {
        float *out = g->y + (size_t)t * g->y_stride;
        for (r = 0; r + 4 <= g->n_out; r += 4) {
            _mm512_storeu_ps(y, avx512_tile(type, g, r, 4, t, 4));
            for (int i = 0; i < 4; i++) memcpy(out + (size_t)i * g->y_stride + r, y + 4 * i, 16);
        }
        for (; r < g->n_out; r++) {
            _mm512_storeu_ps(y, avx512_tile(type, g, r, 1, t, 4));
            for (int i = 0; i < 4; i++) out[(size_t)i * g->y_stride + (size_t)r] = y[i];
        }
    }
    for (; t < g->n_tok; t++) {
        float *out = g->y + (size_t)t * g->y_stride;
        for (r = 0; r + 8 <= g->n_out; r += 8) _mm512_mask_storeu_ps(out + r, 0xff, avx512_tile(type, g, r, 8, t, 1));
        for (; r < g->n_out; r++) _mm512_mask_storeu_ps(out + r, 1, avx512_tile(type, g, r, 1, t, 1));
    }
}

AVX512 static void avx512_gemm_f32(const struct gemm *g) {
    if (g->type == GGUF_F32) avx512_gemm_typed(GGUF_F32, g);
    else if (g->type == GGUF_BF16) avx512_gemm_typed(GGUF_BF16, g);
    else avx512_gemm_typed(GGUF_F16, g);
}

AVX512 static void avx512_sgemm_nt(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c,
                                   int ldc) {
    struct gemm g = sgemm_nt_as_gemm(m, n, k, a, lda, b, ldb, c, ldc);
    avx512_gemm_typed(GGUF_F32, &g);
}

/* M rows by 32 columns of C += A B; m[j] masks the columns 16j on. */
AVX512_INLINE void avx512_tile_nn(int M, const __mmask16 m[2], int k, const float *a, ptrdiff_t lda, const float *b,
                                  ptrdiff_t ldb, float *c, ptrdiff_t ldc) {
    __m512 s[8][2];
    UNROLL for (int i = 0; i < M; i++) {
        s[i][0] = _mm512_maskz_loadu_ps(m[0], c + i * ldc);
        s[i][1] = _mm512_maskz_loadu_ps(m[1], c + i * ldc + 16);
    }
    for (int p = 0; p < k; p++) {
        __m512 v0 = _mm512_maskz_loadu_ps(m[0], b + p * ldb), v1 = _mm512_maskz_loadu_ps(m[1], b + p * ldb + 16);
        UNROLL for (int i = 0; i < M; i++) {
            s[i][0] = _mm512_fmadd_ps(_mm512_set1_ps(a[i * lda + p]), v0, s[i][0]);
            s[i][1] = _mm512_fmadd_ps(_mm512_set1_ps(a[i * lda + p]), v1, s[i][1]);
        }
    }
    UNROLL for (int i = 0; i < M; i++) {
        _mm512_mask_storeu_ps(c + i * ldc, m[0], s[i][0]);
        _mm512_mask_storeu_ps(c + i * ldc + 16, m[1], s[i][1]);
    }
}

AVX512 static void avx512_sgemm_nn_add(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c,
                                       int ldc) {
    for (int j = 0; j < n; j += 32) {
        uint32_t columns = n - j < 32 ? (1u << (n - j)) - 1 : 0xffffffff;
        __mmask16 mask[2] = {(__mmask16)columns, (__mmask16)(columns >> 16)};
        const float *p = a;
        float *q = c + j;
        int i = 0;
        for (; i + 8 <= m; i += 8, p += 8 * (ptrdiff_t)lda, q += 8 * (ptrdiff_t)ldc)
            avx512_tile_nn(8, mask, k, p, lda, b + j, ldb, q, ldc);
        for (; i + 4 <= m; i += 4, p += 4 * (ptrdiff_t)lda, q += 4 * (ptrdiff_t)ldc)
            avx512_tile_nn(4, mask, k, p, lda, b + j, ldb, q, ldc);
        for (; i < m; i++, p += lda, q += ldc) avx512_tile_nn(1, mask, k, p, lda, b + j, ldb, q, ldc);
    }
}

VECTOR_FUNCTIONS(avx512, AVX512)

static void avx512_gemm(const struct gemm *g) {
    if (g->format == ACT_I16) panel_gemm(g, &avx512_panel);
    else avx512_gemm_f32(g);
}

static const struct kernels kernels_avx512 = {"avx512-vnni",   panel_act_format, act_bytes,
                                              avx512_act_pack, avx512_gemm,      VECTOR_TABLE(avx512)};

/* ============================================================================================================
 * CPU kernels: AMX, BF16 tiles
 *
 * With many tokens, weights are decoded to BF16 tiles of 32 weights by 16 rows, which TDPBF16PS multiplies with
 * tiles of 16 tokens by 32 activations. FP4 times its scale is exact in BF16; F16 and Q8_0 become the sum of two BF16
 * numbers ("planes"), exact for F16 and to 2^-17 for Q8_0. AMX treats subnormal numbers as zero.
 *
 * A panel of 32 rows takes its turn with all tokens, AMX_K weights at a time, which stay in the first-level cache; their
 * sums are kept as tiles meanwhile. AMX_K is small, because the tile unit sleeps after some 1000 idle cycles, as long as a
 * panel takes to decode, and then needs 2000 to wake up (measured on Sapphire Rapids).
 * ============================================================================================================ */

#define AMX                                                                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16," \
                          "amx-tile,amx-bf16")))
#define AMX_INLINE AMX INLINE

enum {
    AMX_K = 128,      /* weights of a row decoded at a time */
    AMX_TOKENS = 512, /* whose sums are kept at a time */
    AMX_TILE = 1024   /* bytes */
};

/* In scratch. */
struct amx_work {
    uint8_t row[2][AMX_K / 32][16][64];    /* 16 rows as decoded: plane, step: (row, 32 weights) */
    uint8_t b[2][2][AMX_K / 32][AMX_TILE]; /* tile of rows, plane, step: (pair of weights, row) */
    uint8_t a[2][2][AMX_K / 32][AMX_TILE]; /* tile of tokens, plane, step: (token, 32 activations) */
    float c[AMX_TOKENS / 32][4][16][16];   /* two tiles of tokens by two of rows: (token, row) */
};
static_assert(sizeof(struct amx_work) <= KERNEL_SCRATCH, "the work space of AMX fits in the scratch");

/* The products of the 16 codes with every scale byte as BF16: 16 low bytes, then 16 high bytes. [0]: NVFP4, [1]: MXFP4. */
static uint8_t amx_products[2][256][32];

static void amx_init(void) {
    for (int d = 0; d < 256; d++)
        for (int c = 0; c < 16; c++)
            for (int mx = 0; mx < 2; mx++) {
                float scale = mx ? e8m0_to_f32((uint8_t)d) : ue4m3_to_f32((uint8_t)d);
                uint16_t h = bf16_from_f32(e2m1_to_f32((uint8_t)c) * scale);
                amx_products[mx][d][c] = (uint8_t)h, amx_products[mx][d][c + 16] = (uint8_t)(h >> 8);
            }
}

/* 32 weights whose codes are the 16 bytes at q. The qword i of the result has the codes of the low (i < 4) or high nibbles
 * of the bytes 8 * (i % 2) + 4 * (i / 2 % 2) on; even qwords take their products from the table d0, odd ones from d1. */
AMX_INLINE __m512i amx_decode_fp4(const uint8_t *q, const uint8_t *d0, const uint8_t *d1) {
    const __m512i shift =
        _mm512_set_epi64(0x3c3c34342c2c2424, 0x3c3c34342c2c2424, 0x1c1c14140c0c0404, 0x1c1c14140c0c0404,
                         0x3838303028282020, 0x3838303028282020, 0x1818101008080000, 0x1818101008080000);
    const __m512i base =
        _mm512_set_epi64(0x3020302030203020, 0x1000100010001000, 0x3020302030203020, 0x1000100010001000,
                         0x3020302030203020, 0x1000100010001000, 0x3020302030203020, 0x1000100010001000);
    __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i_u *)d0)),
                                       _mm256_loadu_si256((const __m256i_u *)d1), 1);
    __m512i codes = _mm512_multishift_epi64_epi8(shift, _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i_u *)q)));
    codes = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(15), base, 0xea); /* (codes & 15) | base */
    return _mm512_permutexvar_epi8(codes, table);
}

/* Which of the weights 4i..4i+3 of 32 the qwords of a decoded row hold. */
static const uint8_t *amx_order(uint32_t type) {
    static const uint8_t natural[8] = {0, 1, 2, 3, 4, 5, 6, 7}, nvfp4[8] = {0, 4, 1, 5, 2, 6, 3, 7},
                         mxfp4[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    return type == GGUF_NVFP4 ? nvfp4 : type == GGUF_MXFP4 ? mxfp4 : natural;
}

static int amx_planes(uint32_t type) { return type == GGUF_F16 || type == GGUF_Q8_0 ? 2 : 1; }

/* 32 F32 numbers as the sum of two BF16 numbers. */
AMX_INLINE void amx_split(__m512 x0, __m512 x1, uint8_t *hi, uint8_t *lo) {
    __m512i h = (__m512i)_mm512_cvtne2ps_pbh(x1, x0);
    __m512i h0 = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(h)), 16);
    __m512i h1 = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(h, 1)), 16);
    x0 = _mm512_sub_ps(x0, _mm512_castsi512_ps(h0)), x1 = _mm512_sub_ps(x1, _mm512_castsi512_ps(h1));
    _mm512_storeu_si512(hi, h);
    _mm512_storeu_si512(lo, (__m512i)_mm512_cvtne2ps_pbh(x1, x0));
}

/* n weights of one row from w on, 32 for every AMX_TILE bytes of `out`; what BF16 cannot hold of them in `rest`. */
AMX_INLINE void amx_decode_row(uint32_t type, const uint8_t *w, int n, uint8_t *out, uint8_t *rest) {
    if (type == GGUF_NVFP4)
        for (; n > 0; n -= 64, w += sizeof(struct block_nvfp4), out += 2 * AMX_TILE) {
            _mm512_store_si512(out, amx_decode_fp4(w + 4, amx_products[0][w[0]], amx_products[0][w[1]]));
            _mm512_store_si512(out + AMX_TILE, amx_decode_fp4(w + 20, amx_products[0][w[2]], amx_products[0][w[3]]));
        }
    else if (type == GGUF_MXFP4)
        for (; n > 0; n -= 32, w += sizeof(struct block_mxfp4), out += AMX_TILE)
            _mm512_store_si512(out, amx_decode_fp4(w + 1, amx_products[1][w[0]], amx_products[1][w[0]]));
    else if (type == GGUF_Q8_0)
        for (; n > 0; n -= 32, w += sizeof(struct block_q8_0), out += AMX_TILE, rest += AMX_TILE) {
            __m512 d = _mm512_set1_ps(_cvtsh_ss((uint16_t)(w[0] | w[1] << 8)));
            __m512i q0 = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)(w + 2)));
            __m512i q1 = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)(w + 18)));
            amx_split(_mm512_mul_ps(_mm512_cvtepi32_ps(q0), d), _mm512_mul_ps(_mm512_cvtepi32_ps(q1), d), out, rest);
        }
    else
        for (; n > 0; n -= 32, w += 64, out += AMX_TILE, rest += AMX_TILE) {
            __m512i h = _mm512_maskz_loadu_epi16(n < 32 ? (1u << n) - 1 : 0xffffffff, w);
            if (type == GGUF_BF16) _mm512_store_si512(out, h);
            else
                amx_split(_mm512_cvtph_ps(_mm512_castsi512_si256(h)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1)),
                          out, rest);
        }
}

/* Weights [k, k + n) of n_rows <= 16 rows from r0 on become the tiles b; columns of rows that do not exist stay as they
 * are. */
AMX static void amx_decode(const struct gemm *g, int r0, int n_rows, int k, int n, struct amx_work *work,
                           uint8_t b[2][AMX_K / 32][AMX_TILE]) {
    const uint8_t *w = g->w + (size_t)r0 * g->w_stride + gguf_row_bytes(g->type, (size_t)k),
                  *order = amx_order(g->type);
    for (int r = 0; r < n_rows; r++, w += g->w_stride) {
        uint8_t *out = work->row[0][0][r], *rest = work->row[1][0][r];
        switch (g->type) {
        case GGUF_NVFP4: amx_decode_row(GGUF_NVFP4, w, n, out, rest); break;
        case GGUF_MXFP4: amx_decode_row(GGUF_MXFP4, w, n, out, rest); break;
        case GGUF_Q8_0: amx_decode_row(GGUF_Q8_0, w, n, out, rest); break;
        case GGUF_BF16: amx_decode_row(GGUF_BF16, w, n, out, rest); break;
        default: amx_decode_row(GGUF_F16, w, n, out, rest);
        }
    }
    for (int p = 0; p < amx_planes(g->type); p++)
        for (int s = 0; s < (n + 31) / 32; s++) {
            for (int c = 0; c < 4; c++) { /* 8 weights: 4 pairs */
                uint8_t *even = b[p][s] + 128 * order[2 * c], *odd = b[p][s] + 128 * order[2 * c + 1];
                avx512_vu m[4];
                avx512_columns(work->row[p][s][0] + 16 * c, 64, m);
                memcpy(even, m, 128);
                memcpy(odd, m + 2, 128);
            }
        }
}

/* A tile of 16 tokens by 32 activations, and where those of the next steps lie. */
struct amx_tokens {
    const uint8_t *x;
    size_t stride, step, plane; /* bytes from token to token, step to step, plane to plane */
};

/* Activations [k, k + n) of n_tok <= 16 tokens from t0 on: where they lie if they lie evenly, else copied to `tiles`, the
 * last token filling up the tile. */
AMX static struct amx_tokens amx_gather(const struct gemm *g, int t0, int n_tok, int k, int n, uint8_t *tiles) {
    size_t plane = act_plane(g->n_in), tile_plane = AMX_K / 32 * AMX_TILE;
    if (!g->rows && n_tok == 16) return (struct amx_tokens){gemm_x(g, t0) + 2 * (ptrdiff_t)k, g->x_stride, 64, plane};
    for (int t = 0; t < 16; t++) {
        const uint8_t *x = gemm_x(g, t0 + int_min(t, n_tok - 1)) + 2 * (ptrdiff_t)k;
        for (int s = 0; s < (n + 31) / 32; s++, x += 64) {
            uint8_t *out = tiles + s * AMX_TILE + t * 64;
            _mm512_store_si512(out, _mm512_loadu_si512(x));
            _mm512_store_si512(out + tile_plane, _mm512_loadu_si512(x + plane));
        }
    }
    return (struct amx_tokens){tiles, 64, AMX_TILE, tile_plane};
}

/* c += two tiles of tokens times two tiles of rows, over all planes and `steps` steps; `toks`, `rows`: whether there are
 * two. */
AMX static void amx_multiply(float c[4][16][16], const struct amx_tokens a[2], bool toks,
                             uint8_t b[2][2][AMX_K / 32][AMX_TILE], bool rows, int planes, int steps, bool first) {
    __asm__ volatile("" ::: "memory"); /* gcc's tile loads do not say that they read memory */
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c[0], 64);
        _tile_loadd(1, c[1], 64);
        _tile_loadd(2, c[2], 64);
        _tile_loadd(3, c[3], 64);
    }
    for (int s = 0; s < steps; s++)
        for (int p = 0; p < planes; p++) {
            _tile_loadd(6, b[0][p][s], 64);
            if (rows) _tile_loadd(7, b[1][p][s], 64);
            for (int q = 0; q < 2; q++) {
                _tile_loadd(4, a[0].x + (size_t)s * a[0].step + (size_t)q * a[0].plane, a[0].stride);
                _tile_dpbf16ps(0, 4, 6);
                if (rows) _tile_dpbf16ps(1, 4, 7);
                if (toks) {
                    _tile_loadd(5, a[1].x + (size_t)s * a[1].step + (size_t)q * a[1].plane, a[1].stride);
                    _tile_dpbf16ps(2, 5, 6);
                    if (rows) _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
}

/* y = scale * c for n_tok tokens from t0 on and n_rows rows from r0 on, at most 16 of both, maybe none. */
AMX static void amx_store(const struct gemm *g, const float c[16][16], int t0, int n_tok, int r0, int n_rows) {
    __mmask16 m = (__mmask16)(n_rows > 0 ? (1u << n_rows) - 1 : 0);
    for (int t = 0; t < n_tok && m; t++)
        _mm512_mask_storeu_ps(g->y + (size_t)(t0 + t) * g->y_stride + r0, m,
                              _mm512_mul_ps(_mm512_load_ps(c[t]), _mm512_set1_ps(g->scale)));
}

/* 32 rows from r0 on against n_tok tokens from t0 on. */
AMX static void amx_panel(const struct gemm *g, int r0, int t0, int n_tok) {
    struct amx_work *work = g->scratch;
    int n_rows = int_min(g->n_out - r0, 32);
    for (int k = 0; k < g->n_in; k += AMX_K) {
        int n = int_min(g->n_in - k, AMX_K);
        amx_decode(g, r0, int_min(n_rows, 16), k, n, work, work->b[0]);
        if (n_rows > 16) amx_decode(g, r0 + 16, n_rows - 16, k, n, work, work->b[1]);
        for (int t = 0; t < n_tok; t += 32) {
            int toks = int_min(n_tok - t, 32);
            struct amx_tokens a[2];
            for (int j = 0; j < 2 && 16 * j < toks; j++)
                a[j] = amx_gather(g, t0 + t + 16 * j, int_min(toks - 16 * j, 16), k, n, work->a[j][0][0]);
            amx_multiply(work->c[t / 32], a, toks > 16, work->b, n_rows > 16, amx_planes(g->type), (n + 31) / 32, !k);
        }
    }
    for (int t = 0; t < n_tok; t += 16)
        for (int r = 0; r < n_rows; r += 16)
            amx_store(g, work->c[t / 32][t % 32 / 16 * 2 + r / 16], t0 + t, int_min(n_tok - t, 16), r0 + r,
                      int_min(n_rows - r, 16));
}

AMX static void amx_gemm_bf16(const struct gemm *g) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
    for (int t = 0; t < g->n_tok; t += AMX_TOKENS)
        for (int r = 0; r < g->n_out; r += 32) amx_panel(g, r, t, int_min(g->n_tok - t, AMX_TOKENS));
    _tile_release();
}

static void amx_gemm(const struct gemm *g) {
    if (g->format == ACT_BF16) amx_gemm_bf16(g);
    else avx512_gemm(g);
}

/* Decoding to tiles pays from 16 tokens on, or 8 where the alternative is F32 arithmetic (measured). */
static enum act_format amx_act_format(uint32_t type, int n_tok) {
    enum act_format few = panel_act_format(type, n_tok);
    return type == GGUF_F32 || n_tok < (few == ACT_I16 ? 16 : 8) ? few : ACT_BF16;
}

static const struct kernels kernels_amx = {"avx512-vnni amx-bf16", amx_act_format, act_bytes,
                                           avx512_act_pack,        amx_gemm,       VECTOR_TABLE(avx512)};

/* Linux lets a process use the tile registers only after it has asked; the answer holds for all of its threads. */
static bool amx_permitted(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return false;
    amx_init();
    return true;
}
#endif

#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16)
#define KERNELS_NEON
#include <arm_neon.h>
#include <sys/auxv.h>

/* ============================================================================================================
 * CPU kernels: NEON with dot products
 * ============================================================================================================ */

#define NEON        __attribute__((target("arch=armv8.2-a+dotprod")))
#define NEON_INLINE NEON INLINE

PANEL_TYPES(neon, 4)

NEON_INLINE void neon_columns(const uint8_t *p, size_t stride, neon_vu out[4]) {
    uint32x4_t m0 = vreinterpretq_u32_u8(vld1q_u8(p)), m1 = vreinterpretq_u32_u8(vld1q_u8(p + stride));
    uint32x4_t m2 = vreinterpretq_u32_u8(vld1q_u8(p + 2 * stride)), m3 = vreinterpretq_u32_u8(vld1q_u8(p + 3 * stride));
    uint64x2_t t0 = vreinterpretq_u64_u32(vtrn1q_u32(m0, m1)), t1 = vreinterpretq_u64_u32(vtrn2q_u32(m0, m1));
    uint64x2_t t2 = vreinterpretq_u64_u32(vtrn1q_u32(m2, m3)), t3 = vreinterpretq_u64_u32(vtrn2q_u32(m2, m3));
    out[0] = (neon_vu)vtrn1q_u64(t0, t2), out[1] = (neon_vu)vtrn1q_u64(t1, t3);
    out[2] = (neon_vu)vtrn2q_u64(t0, t2), out[3] = (neon_vu)vtrn2q_u64(t1, t3);
}

/* Signed: 2 * E2M1; no bias. */
NEON_INLINE void neon_codes(const neon_vu *q, neon_vu *lo, neon_vu *hi) {
    const int8x16_t table = vld1q_s8(e2m1_doubled);
    *lo = (neon_vu)vqtbl1q_s8(table, (uint8x16_t)(*q & 0x0f0f0f0f));
    *hi = (neon_vu)vqtbl1q_s8(table, (uint8x16_t)(*q >> 4 & 0x0f0f0f0f));
}

NEON_INLINE void neon_dot_digit(const neon_vu w[4], const int8_t *q, neon_vi *out) {
    int8x16_t x = vld1q_s8(q);
    int32x4_t sum = vdotq_laneq_s32(vdupq_n_s32(0), (int8x16_t)w[0], x, 0);
    sum = vdotq_laneq_s32(sum, (int8x16_t)w[1], x, 1);
    sum = vdotq_laneq_s32(sum, (int8x16_t)w[2], x, 2);
    *out = (neon_vi)vdotq_laneq_s32(sum, (int8x16_t)w[3], x, 3);
}

NEON_INLINE void neon_dot16(uint32_t type, const neon_vu w[4], const int8_t *hi, const int8_t *lo, int32_t bias,
                            neon_vi *out) {
    neon_vi h, l;
    (void)type, (void)bias;
    neon_dot_digit(w, hi, &h);
    neon_dot_digit(w, lo, &l);
    *out = (h << 8) + l;
}

PANEL_FUNCTIONS(neon, NEON, 4, 0)

VECTOR_FUNCTIONS(neon, NEON)
VECTOR_PRODUCTS(neon, NEON, vec_load_bf16, vec_load_f16)

static void neon_gemm(const struct gemm *g) {
    if (g->format == ACT_I16) panel_gemm(g, &neon_panel);
    else neon_gemm_f32(g);
}

static const struct kernels kernels_neon = {"neon-dotprod", panel_act_format, act_bytes,
                                            neon_act_pack,  neon_gemm,        VECTOR_TABLE(neon)};
#endif

/* ============================================================================================================
 * CPU kernels: choice
 * ============================================================================================================ */

/* In order of preference. */
static const struct kernels *const kernel_sets[] = {
#if defined(__x86_64__)
    &kernels_amx, &kernels_avx512, &kernels_avx2,
#elif defined(KERNELS_NEON)
    &kernels_neon,
#endif
    &kernels_scalar};

/* Whether the processor and the operating system run a set. */
static bool kernels_runnable(const struct kernels *k) {
#if defined(__x86_64__)
    bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    unsigned a, b, c, d;
    if (k == &kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
               (c & bit_F16C);
    if (k == &kernels_avx512) return avx512;
    if (k == &kernels_amx)
        return avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
               amx_permitted();
#elif defined(KERNELS_NEON)
    if (k == &kernels_neon) return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
    return k == &kernels_scalar;
}

static const struct kernels *kernels_choose(void) {
    size_t i = 0;
    while (!kernels_runnable(kernel_sets[i])) i++;
    return kernel_sets[i];
}

/* Read bandwidth of main memory in bytes per second with n_threads threads, measured: one pass over a buffer that no
 * cache holds, or a quarter of the available memory. Takes about half a second. 0: there was no memory. */
static double memory_bandwidth(int n_threads) {
    const size_t piece = 1 << 20;
    const struct kernels *k = kernels_choose();
    size_t mib = (size_t)(memory_available() >> 20), n = mib > 4096 ? 1024 : mib > 4 ? mib / 4 : 1;
    float *p = mmap(NULL, n * piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), sum = 0;
    if (p == MAP_FAILED) return 0;
    madvise(p, n * piece, MADV_HUGEPAGE);
#pragma omp parallel for num_threads(n_threads) schedule(static)
    for (size_t i = 0; i < n; i++) memset((char *)p + i * piece, 0, piece);
    double t = now_seconds();
#pragma omp parallel for num_threads(n_threads) schedule(static) reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += k->amax(p + i * (piece / sizeof *p), (int)(piece / sizeof *p));
    t = now_seconds() - t;
    munmap(p, n * piece);
    return (double)(n * piece) / t + (double)sum; /* sum is 0; adding it keeps the reads */
}

/* ============================================================================================================
 * KV cache
 * ============================================================================================================ */

/* Writes row `pos` from x (width). FP8: scale = amax / 448 of each group, folded back in by kv_load; a group
 * so small that 1 / scale would be infinite becomes zeros. */
static void kv_store(const struct kernels *k, const struct kv_plane *p, int64_t pos, const float *x) {
    uint8_t *row = p->data + (size_t)pos * p->row_bytes;
    if (p->type == KV_F32) {
        memcpy(row, x, (size_t)p->width * 4);
    } else if (p->type == KV_BF16) {
        k->to_bf16(x, (uint16_t *)(void *)row, p->width);
    } else {
        for (int g = 0; g < p->n_group; g++) {
            int at = g * p->group, n = p->width - at < p->group ? p->width - at : p->group;
            float amax = k->amax(x + at, n), scale = amax > 0x1p-100f ? amax / 448.0f : 1.0f;
            p->scale[pos * p->n_group + g] = scale;
            k->to_e4m3(x + at, 1.0f / scale, row + at, n);
        }
    }
}

/* out (n, ld) = values first..first+len-1 of rows pos..pos+n-1; a range that starts and ends at group boundaries. */
static void kv_load(const struct kernels *k, const struct kv_plane *p, int64_t pos, int n, int first, int len,
                    float *out, int ld) {
    for (int i = 0; i < n; i++, out += ld) {
        const uint8_t *row = p->data + (size_t)(pos + i) * p->row_bytes;
        if (p->type == KV_F32) {
            memcpy(out, row + (size_t)first * 4, (size_t)len * 4);
        } else if (p->type == KV_BF16) {
            k->from_bf16((const uint16_t *)(const void *)row + first, out, len);
        } else {
            const float *s = p->scale + (pos + i) * p->n_group;
            for (int at = 0; at < len; at += p->group) {
                int w = len - at < p->group ? len - at : p->group;
                k->from_e4m3(row + first + at, s[(first + at) / p->group], out + at, w);
            }
        }
    }
}

/* ============================================================================================================
 * Ranks
 *
 * A team is the ranks of one session: of each stage n_rank that share its layers. Every rank but the one with the logits has a thread of
 * its own; that one's is the caller's. pg_run is the only way to make them do something, pg_barrier and pg_send the only ways in which
 * ranks wait for one another: under one lock, with a watchdog, so that nothing waits forever.
 * ============================================================================================================ */

enum { PG_STALL = 5 /* seconds in which the whole program does nothing, after which who waits gives up */ };

struct process_group {
    int n_rank, n_stage, n;       /* n = n_rank * n_stage */
    int root;                     /* the rank with the logits, which works in the caller's thread; */
    pthread_t threads[MAX_RANKS]; /* of the others */
    struct model *shards;         /* (n), stage by stage */
    struct rank *ranks;           /* (n) */
    pthread_mutex_t lock;         /* of all that follows */
    pthread_cond_t changed;
    void (*run)(struct rank *r, void *arg); /* the current job */
    void *arg;
    unsigned jobs;             /* given out */
    unsigned ended[MAX_RANKS]; /* jobs that each rank has finished, */
    unsigned met[MAX_RANKS];   /* meetings that it has come to, */
    unsigned turns[MAX_RANKS]; /* ends of exchanges, */
    unsigned taken[MAX_RANKS],
        handed[MAX_RANKS]; /* batches that it has got from the stage before, and that this has left for it */
    unsigned heartbeats;   /* signs of life from ranks that wait for a device */
    uint8_t gathered[MAX_RANKS][ALL_GATHER_MAX];
    bool quit, alarm;
};

/* What the program has done: seconds of processors, pages that a disk brought, signs of life. */
static double pg_activity(const struct process_group *pg) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) +
           (double)u.ru_majflt + (double)__atomic_load_n(&pg->heartbeats, __ATOMIC_RELAXED);
}

/* Waits, under the lock, until each[first..first+n-1] have reached `want` (modulo 2^32); behind: the number of the rank that counts
 * each[first]. r: the one that waits for a sum; NULL: somebody for the end of a step. A wait in which nothing at all happens ends
 * the program: an error is better than silence. */
static void pg_wait_for(struct process_group *pg, const struct rank *r, const unsigned *each, int first, int n,
                        int behind, unsigned want) {
    double t = now_seconds(), effort = pg_activity(pg);
    for (int still = 0;;) {
        struct timespec until;
        char who[64] = "", what[64] = "the end of a step";
        for (int i = 0; i < n; i++)
            if ((int)(each[first + i] - want) < 0)
                snprintf(who + strlen(who), sizeof who - strlen(who), " %d", behind + i);
        if (!*who) return;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&pg->changed, &pg->lock, &until);
        double now = now_seconds(), did = pg_activity(pg);
        if (now - t < 1) continue;
        bool stopped = now - t > 2; /* nobody ran, this thread neither: the program was suspended */
        still = stopped || did - effort > 0.02 ? 0 : still + 1;
        t = now, effort = did;
        if (still < PG_STALL + !r) continue; /* who waits for a sum knows better who is behind */
        if (r)
            snprintf(what, sizeof what, "the sum of the %s of layer %d",
                     r->n_all_reduce % 2 ? "attention" : "feed-forward",
                     r->m->first_layer + (int)(r->n_all_reduce - 1) / 2);
        die("%s was not reached by all ranks, and nothing has moved for %d s; behind:%s (does a disk or a GPU not "
            "answer?)",
            what, still, who);
    }
}

/* Adds one to *count and lets all look. */
static void pg_advance(struct process_group *pg, unsigned *count) {
    ++*count;
    pthread_cond_broadcast(&pg->changed);
}

/* Returns when all ranks of the stage have come here as often. */
static void pg_barrier(struct rank *r) {
    struct process_group *pg = r->pg;
    const struct shard *shard = &r->m->shard;
    if (shard->n_rank == 1) return;
    pthread_mutex_lock(&pg->lock);
    pg_advance(pg, &pg->met[r->index]);
    pg_wait_for(pg, r, pg->met, r->index - shard->rank, shard->n_rank, r->index - shard->rank, pg->met[r->index]);
    pthread_mutex_unlock(&pg->lock);
}

/* The rank of the same number in the next stage, or the one before (step -1); NULL: there is none. */
static struct rank *pg_neighbour(struct rank *r, int step) {
    const struct shard *shard = &r->m->shard;
    int stage = shard->stage + step;
    return stage < 0 || stage >= shard->n_stage ? NULL : r + step * shard->n_rank;
}

/* Says that `to` has a batch, and waits for the one that r shall have. */
static void pg_send(struct rank *to) {
    struct process_group *pg = to->pg;
    pthread_mutex_lock(&pg->lock);
    pg_advance(pg, &pg->handed[to->index]);
    pthread_mutex_unlock(&pg->lock);
}
static void pg_recv(struct rank *r) {
    struct process_group *pg = r->pg;
    pthread_mutex_lock(&pg->lock);
    pg_wait_for(pg, NULL, pg->handed, r->index, 1, r->index - pg->n_rank, ++pg->taken[r->index]);
    pthread_mutex_unlock(&pg->lock);
}

static void pg_name_thread(const struct process_group *pg, int i) {
    if (pg->n > 1) snprintf(rank_label, sizeof rank_label, "rank %d of %d: ", i, pg->n);
}

static void *pg_thread(void *arg) {
    struct rank *r = arg;
    struct process_group *pg = r->pg;
    unsigned seen = 0;
    pg_name_thread(pg, r->index);
    pthread_mutex_lock(&pg->lock);
    for (;;) {
        while (pg->jobs == seen && !pg->quit) pthread_cond_wait(&pg->changed, &pg->lock);
        if (pg->jobs == seen) break;
        seen++;
        void (*run)(struct rank *, void *) = pg->run;
        void *what = pg->arg;
        pthread_mutex_unlock(&pg->lock);
        run(r, what);
        pthread_mutex_lock(&pg->lock);
        pg_advance(pg, &pg->ended[r->index]);
    }
    pthread_mutex_unlock(&pg->lock);
    return NULL;
}

/* run(rank, arg) on every rank at once; returns when all have. */
static void pg_run(struct process_group *pg, void (*run)(struct rank *r, void *arg), void *arg) {
    if (pg->n > 1) {
        pthread_mutex_lock(&pg->lock);
        pg->run = run, pg->arg = arg;
        pg_advance(pg, &pg->jobs);
        pthread_mutex_unlock(&pg->lock);
    }
    pg_name_thread(pg, pg->root);
    run(&pg->ranks[pg->root], arg);
    rank_label[0] = 0;
    if (pg->n == 1) return;
    pthread_mutex_lock(&pg->lock);
    pg->ended[pg->root]++;
    pg_wait_for(pg, NULL, pg->ended, 0, pg->n, 0, pg->jobs);
    pthread_mutex_unlock(&pg->lock);
}

#ifdef MOE_CUDA
void rank_all_gather(struct rank *r, const void *mine, void *all, size_t bytes) {
    struct process_group *pg = r->pg;
    if (!pg || pg->n == 1) {
        memcpy(all, mine, bytes);
        return;
    }
    pthread_mutex_lock(&pg->lock);
    for (int end = 0; end < 2; end++) { /* all have written; all have read */
        if (!end) memcpy(pg->gathered[r->index], mine, bytes);
        pg_advance(pg, &pg->turns[r->index]);
        pg_wait_for(pg, NULL, pg->turns, 0, pg->n, 0, pg->turns[r->index]);
        for (int i = 0; i < pg->n && !end; i++) memcpy((uint8_t *)all + (size_t)i * bytes, pg->gathered[i], bytes);
    }
    pthread_mutex_unlock(&pg->lock);
}

void rank_barrier(struct rank *r) {
    const char mine = 0;
    char all[MAX_RANKS];
    rank_all_gather(r, &mine, all, 1);
}

/* Whether a rank has failed: what others wait for may never come. */
static bool rank_alarm(struct rank *r, bool raise) {
    if (r->pg && raise) __atomic_store_n(&r->pg->alarm, true, __ATOMIC_RELEASE);
    return r->pg && __atomic_load_n(&r->pg->alarm, __ATOMIC_ACQUIRE);
}
#endif

/* Gives a rank its memory, on the rank's own thread. 0, or -1 with a message and nothing held. */
typedef int rank_starter(struct rank *r, const struct model *shard, void *arg, char *err);

struct pg_start {
    rank_starter *start;
    void *arg;
    int failed[MAX_RANKS];
    char err[MAX_RANKS][ERR_MAX];
};

static void rank_start(struct rank *r, void *arg) {
    struct pg_start *t = arg;
    struct process_group *pg = r->pg;
    int i = r->index;
    t->failed[i] = t->start(r, &pg->shards[i], t->arg, t->err[i]);
    r->pg = pg, r->index = i;
}

static void rank_close(struct rank *r, void *arg) {
    (void)arg;
    if (r->ops) r->ops->close(r);
    r->ops = NULL;
}

static void pg_close(struct process_group *pg) {
    pg_run(pg, rank_close, NULL);
    pthread_mutex_lock(&pg->lock);
    pg->quit = true;
    pthread_cond_broadcast(&pg->changed);
    pthread_mutex_unlock(&pg->lock);
    for (int i = 0; i < pg->n; i++)
        if (i != pg->root) pthread_join(pg->threads[i], NULL);
    for (int i = 0; i < pg->n; i++) shard_free(&pg->shards[i]);
    pthread_mutex_destroy(&pg->lock);
    pthread_cond_destroy(&pg->changed);
    free(pg->shards), free(pg->ranks);
    memset(pg, 0, sizeof *pg);
    ranks_at_work = false;
}

/* Starts n_stage * n_rank <= MAX_RANKS ranks of the model. 0, or -1 with the message of the first that failed. */
static int pg_open(struct process_group *pg, const struct model *m, int n_rank, int n_stage, rank_starter *start,
                   void *arg, char *err) {
    struct pg_start t = {.start = start, .arg = arg};
    pthread_condattr_t attr;
    sigset_t all, old;
    memset(pg, 0, sizeof *pg);
    pg->n_rank = n_rank, pg->n_stage = n_stage, pg->n = n_rank * n_stage, pg->root = pg->n - n_rank;
    size_t n = (size_t)pg->n;
    pg->shards = xcalloc(n, sizeof *pg->shards), pg->ranks = xcalloc(n, sizeof *pg->ranks);
    pthread_mutex_init(&pg->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&pg->changed, &attr);
    pthread_condattr_destroy(&attr);
    sigfillset(&all); /* signals are the caller's, but for a thread's own faults */
    const int own[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int i = 0; i < pg->n; i++) {
        shard_model(&pg->shards[i], m, (struct shard){i % n_rank, n_rank, i / n_rank, n_stage});
        pg->ranks[i].pg = pg, pg->ranks[i].index = i, pg->ranks[i].m = &pg->shards[i];
    }
    for (int i = 0; i < pg->n; i++)
        if (i != pg->root && pthread_create(&pg->threads[i], NULL, pg_thread, &pg->ranks[i]))
            die("cannot start a thread for rank %d", i);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    ranks_at_work = pg->n > 1;
    pg_run(pg, rank_start, &t);
    int bad = -1; /* those without a message gave up because another did */
    for (int i = pg->n - 1; i >= 0; i--)
        if (t.failed[i] && (bad < 0 || *t.err[i] || !*t.err[bad])) bad = i;
    if (bad < 0) return 0;
    if (pg->n > 1)
        fail(err, "rank %d of %d: %.*s", bad, pg->n, ERR_MAX - 32, *t.err[bad] ? t.err[bad] : "it could not start");
    else memcpy(err, t.err[bad], ERR_MAX);
    pg_close(pg);
    return -1;
}

/* ============================================================================================================
 * CPU operations
 *
 * The table for a CPU. All arithmetic that repeats is in struct kernels; these functions cut the work into items that do
 * not depend on the number of threads, so that results do not either.
 * ============================================================================================================ */

enum {
    ROW_TILE = 32,    /* weight rows of one work item */
    KEY_BLOCK = 64,   /* keys of one step of the online softmax */
    QUERY_ROWS = 64,  /* query rows (tokens x heads) of one attention work item */
    SPLIT_KEYS = 128, /* keys of one partition of the context in decode, at least */
    CPU_SPLITS_MAX = 64,
    SPLIT_TOKENS = 4,   /* up to so many tokens the context is partitioned */
    MLA_HEAD_GROUP = 8, /* heads that share a work item over the latent cache */
    OWN_PACK = 96 << 10 /* bytes of packed activations that every thread rather makes for itself than waits for */
};

static size_t size_max(size_t a, size_t b) { return a > b ? a : b; }

static float *act_row(const struct rank *r, enum act a, int t) { return r->act[a] + (size_t)t * (size_t)r->width[a]; }

static void *rank_scratch(const struct rank *r) { return r->scratch + (size_t)omp_get_thread_num() * r->scratch_bytes; }

/* Threads for work on n items: one token's norms are not worth waking anybody. */
static int rank_threads(const struct rank *r, int n) { return n < r->n_threads ? n : r->n_threads; }

/* The rank `rank` of r's stage: they lie side by side. */
static struct rank *rank_peer(struct rank *r, int rank) { return r - r->m->shard.rank + rank; }

static void cpu_embed(struct rank *r, enum act x) {
    const struct weight *w = &r->m->embd;
    const struct rank *before = pg_neighbour(r, -1);
    float scale = w->scale ? w->scale[0] : 1.0f;
    r->n_all_reduce = 0;
    if (before) pg_recv(r);
    for (int t = 0; t < r->n_tok; t++) {
        float *row = act_row(r, x, t);
        for (int i = 0; i < r->m->rope_dim / 2; i++) {
            float angle = (float)(r->pos + t) * r->m->rope_freq[i];
            r->cos[t * (r->m->rope_dim / 2) + i] = cosf(angle) * r->m->rope_factor;
            r->sin[t * (r->m->rope_dim / 2) + i] = sinf(angle) * r->m->rope_factor;
        }
        if (before) {
            memcpy(row, act_row(before, x, t), (size_t)r->m->n_embd * sizeof *row);
            continue;
        }
        gguf_dequantize_row(w->type, w->data + (size_t)r->tokens[t] * w->row_bytes, row, (size_t)w->n_in);
        for (int i = 0; scale != 1.0f && i < w->n_in; i++) row[i] *= scale;
    }
}

static void cpu_rmsnorm(struct rank *r, enum act x, const float *w, enum act out) {
#pragma omp parallel for num_threads(rank_threads(r, r->n_tok))
    for (int t = 0; t < r->n_tok; t++)
        r->k->rmsnorm(act_row(r, x, t), w, r->m->rms_eps, act_row(r, out, t), r->width[x]);
}

static void cpu_all_reduce_add_rmsnorm(struct rank *r, enum act x, enum act delta, const float *w, enum act out) {
    int n_rank = r->m->shard.n_rank, n = r->width[x];
    r->n_all_reduce++;
    pg_barrier(r);
#pragma omp parallel for num_threads(rank_threads(r, r->n_tok))
    for (int t = 0; t < r->n_tok; t++) {
        float *a = act_row(r, x, t), *d[MAX_RANKS];
        for (int k = 0; k < n_rank; k++) d[k] = act_row(rank_peer(r, k), delta, t);
        for (int i = 0; i < n; i++) {
            float sum = d[0][i];
            for (int k = 1; k < n_rank; k++) sum += d[k][i];
            a[i] += sum;
        }
        if (w) r->k->rmsnorm(a, w, r->m->rms_eps, act_row(r, out, t), n);
    }
    pg_barrier(r); /* nobody's delta is overwritten while others read it */
}

static void cpu_final_reduce(struct rank *r, enum act x, enum act delta) {
    struct rank *next = pg_neighbour(r, 1);
    cpu_all_reduce_add_rmsnorm(r, x, delta, NULL, x);
    if (next) pg_send(next);
}

/* Thread scratch: the kernels' own, a tile of results for the most tokens, three areas of packed activations. */
static float *scratch_tile(const struct rank *r) {
    return (float *)(void *)((uint8_t *)rank_scratch(r) + KERNEL_SCRATCH);
}

static uint8_t *scratch_pack(const struct rank *r, int area) {
    return (uint8_t *)rank_scratch(r) + KERNEL_SCRATCH + (size_t)r->chunk * ROW_TILE * sizeof(float) +
           (size_t)area * OWN_PACK;
}

/* Packs n rows of x (n_in, x_stride floats apart) inside a parallel region and returns them, act_bytes apart. Little work is done by
 * every thread for itself, in its own area, which saves a barrier; much is shared out and lands in `shared`. */
static const uint8_t *pack_rows(const struct rank *r, enum act_format f, const float *x, size_t x_stride, int n,
                                int n_in, uint8_t *shared, int area) {
    size_t stride = r->k->act_bytes(f, n_in);
    if ((size_t)n * stride <= OWN_PACK) {
        uint8_t *own = scratch_pack(r, area);
        for (int t = 0; t < n; t++) r->k->act_pack(f, x + (size_t)t * x_stride, n_in, own + (size_t)t * stride);
        return own;
    }
#pragma omp for schedule(static)
    for (int t = 0; t < n; t++) r->k->act_pack(f, x + (size_t)t * x_stride, n_in, shared + (size_t)t * stride);
    return shared;
}

/* y = W x for n rows of x (x_stride floats apart), inside a parallel region; the caller waits for the other threads. */
static void linear_rows(struct rank *r, const struct weight *w, const float *x, int x_stride, int n, float *y,
                        int y_stride) {
    if (!w->n_in) { /* an empty share */
#pragma omp for schedule(static) nowait
        for (int t = 0; t < n; t++) memset(y + (size_t)t * (size_t)y_stride, 0, (size_t)w->n_out * sizeof *y);
        return;
    }
    enum act_format f = r->k->act_format(w->type, n);
    const uint8_t *pack = pack_rows(r, f, x, (size_t)x_stride, n, w->n_in, r->pack, 0);
#pragma omp for schedule(dynamic) nowait
    for (int row = 0; row < w->n_out; row += ROW_TILE) {
        struct gemm g = {.type = w->type,
                         .format = f,
                         .w = w->data + (size_t)row * w->row_bytes,
                         .w_stride = w->row_bytes,
                         .n_out = w->n_out - row < ROW_TILE ? w->n_out - row : ROW_TILE,
                         .n_in = w->n_in,
                         .x = pack,
                         .x_stride = r->k->act_bytes(f, w->n_in),
                         .n_tok = n,
                         .scale = w->scale ? w->scale[0] : 1.0f,
                         .y = y + row,
                         .y_stride = (size_t)y_stride,
                         .scratch = rank_scratch(r)};
        r->k->gemm(&g);
        for (int t = 0; w->bias && t < n; t++)
            for (int i = 0; i < g.n_out; i++) g.y[(size_t)t * g.y_stride + (size_t)i] += w->bias[row + i];
    }
}

static void cpu_linear(struct rank *r, const struct weight *w, enum act x, enum act out) {
#pragma omp parallel num_threads(r->n_threads)
    linear_rows(r, w, r->act[x], r->width[x], r->n_tok, r->act[out], r->width[out]);
}

static void cpu_linear3(struct rank *r, enum act x, const struct weight *const w[3], const enum act out[3]) {
    for (int i = 0; i < 3 && w[i]; i++) cpu_linear(r, w[i], x, out[i]);
}

/* Rotates pairs (i, i + d/2) of x (d): the half-split form of Qwen. */
static void rope_halves(float *x, const float *c, const float *s, int d) {
    for (int i = 0; i < d / 2; i++) {
        float a = x[i], b = x[i + d / 2];
        x[i] = a * c[i] - b * s[i];
        x[i + d / 2] = a * s[i] + b * c[i];
    }
}

/* Rotates pairs (2i, 2i + 1): the interleaved form of DeepSeek. */
static void rope_pairs(float *x, const float *c, const float *s, int d) {
    for (int i = 0; i < d / 2; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * c[i] - b * s[i];
        x[2 * i + 1] = a * s[i] + b * c[i];
    }
}

static void cpu_rope_store_kv(struct rank *r, int il, enum act q, enum act k, enum act v) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
#pragma omp parallel for num_threads(rank_threads(r, r->n_tok))
    for (int t = 0; t < r->n_tok; t++) {
        const float *c = r->cos + t * (m->rope_dim / 2), *s = r->sin + t * (m->rope_dim / 2);
        for (int h = 0; h < m->n_head + m->n_head_kv; h++) {
            bool is_q = h < m->n_head;
            float *x = is_q ? act_row(r, q, t) + h * m->head_k : act_row(r, k, t) + (h - m->n_head) * m->head_k;
            r->k->rmsnorm(x, is_q ? layer->q_norm : layer->k_norm, m->rms_eps, x, m->head_k);
            rope_halves(x, c, s, m->rope_dim);
        }
        kv_store(r->k, &r->kv[il].k, r->pos + t, act_row(r, k, t));
        kv_store(r->k, &r->kv[il].v, r->pos + t, act_row(r, v, t));
    }
}

static void cpu_mla_store(struct rank *r, int il, enum act q, enum act kv) {
    const struct model *m = r->m;
#pragma omp parallel for num_threads(rank_threads(r, r->n_tok))
    for (int t = 0; t < r->n_tok; t++) {
        const float *c = r->cos + t * (m->rope_dim / 2), *s = r->sin + t * (m->rope_dim / 2);
        float *latent = act_row(r, kv, t);
        for (int h = 0; h < m->n_head; h++) rope_pairs(act_row(r, q, t) + h * m->head_k + m->nope, c, s, m->rope_dim);
        r->k->rmsnorm(latent, m->layers[il].kv_a_norm, m->rms_eps, latent, m->kv_lora);
        rope_pairs(latent + m->kv_lora, c, s, m->rope_dim);
        kv_store(r->k, &r->kv[il].k, r->pos + t, latent);
        kv_store(r->k, &r->kv[il].v, r->pos + t, latent + m->kv_lora);
    }
}

/* ---- attention: one work item is a set of query rows that share keys and values, over a range of the context ---- */

enum attend_kind {
    ATTEND_GQA,    /* rows: tokens x heads of one KV head */
    ATTEND_LATENT, /* rows: tokens x a group of heads; keys are [latent | k_pe], values the latents themselves */
    ATTEND_EXPAND  /* rows: tokens of one head; keys and values are multiplied out of the latents block by block */
};

struct attend {
    enum attend_kind kind;
    int il, head;     /* first head (GQA: the KV head) */
    int n_head;       /* heads in the item */
    int first, n_tok; /* tokens of the batch */
    int dk, dv;
    int begin, end; /* keys; the causal limit of each row applies on top */
    const float *q; /* row (t, h) at q + t * q_tok + h * q_head, (dk) */
    size_t q_tok, q_head;
    float *out; /* likewise, (dv): the result, */
    size_t out_tok, out_head;
    float *partial; /* or, when not NULL, the unfinished (n_tok * n_head, dv + 2): sums, maximum, denominator */
};

/* Scratch of an item, in floats. */
static size_t attend_floats(const struct model *m, int rows) {
    size_t dk = (size_t)(m->kv_lora ? m->kv_lora + m->rope_dim : m->head_k),
           dv = (size_t)(m->kv_lora ? m->kv_lora : m->head_v);
    dk = dk > (size_t)m->head_k ? dk : (size_t)m->head_k, dv = dv > (size_t)m->head_v ? dv : (size_t)m->head_v;
    size_t expand = m->kv_lora ? (size_t)m->kv_lora * (size_t)(m->nope + m->head_v) + KEY_BLOCK * dk : 0;
    return (size_t)rows * (dk + dv + KEY_BLOCK + 2) + KEY_BLOCK * (dk + dv) + expand + 64;
}

/* Keys pos..pos+n-1 as (n, dk) rows in *k and values as (n, dv) rows in *v, leading dimensions *ldk and *ldv. `buf` holds
 * KEY_BLOCK * (dk + dv) floats; `expand` the head's two matrices and a block of latents. */
static void attend_block(const struct rank *r, const struct attend *a, int pos, int n, float *buf, float *expand,
                         const float **k, int *ldk, const float **v, int *ldv) {
    const struct model *m = r->m;
    const struct kv_layer *c = &r->kv[a->il];
    float *kb = buf, *vb = buf + KEY_BLOCK * a->dk;
    *k = kb, *ldk = a->dk, *v = vb, *ldv = a->dv;
    if (a->kind == ATTEND_GQA) {
        kv_load(r->k, &c->k, pos, n, a->head * a->dk, a->dk, kb, a->dk);
        kv_load(r->k, &c->v, pos, n, a->head * a->dv, a->dv, vb, a->dv);
        return;
    }
    if (a->kind == ATTEND_LATENT) {
        kv_load(r->k, &c->k, pos, n, 0, m->kv_lora, kb, a->dk);
        kv_load(r->k, &c->v, pos, n, 0, m->rope_dim, kb + m->kv_lora, a->dk);
        *v = kb, *ldv = a->dk;
        return;
    }
    const float *w_k = expand, *w_v = w_k + m->kv_lora * m->nope;
    float *latent = expand + m->kv_lora * (m->nope + m->head_v);
    kv_load(r->k, &c->k, pos, n, 0, m->kv_lora, latent, m->kv_lora);
    for (int i = 0; i < n; i++) memset(kb + i * a->dk, 0, (size_t)m->nope * sizeof *kb);
    r->k->sgemm_nn_add(n, m->nope, m->kv_lora, latent, m->kv_lora, w_k, m->nope, kb, a->dk);
    kv_load(r->k, &c->v, pos, n, 0, m->rope_dim, kb + m->nope, a->dk);
    r->k->sgemm_nt(n, m->head_v, m->kv_lora, latent, m->kv_lora, w_v, m->kv_lora, vb, a->dv);
}

/* The head's matrices of wk_b and wv_b as floats, for attend_block. */
static void attend_expand_weights(const struct rank *r, const struct attend *a, float *out) {
    const struct weight *w[2] = {&r->m->layers[a->il].wk_b, &r->m->layers[a->il].wv_b};
    for (int i = 0; i < 2; i++) {
        float scale = w[i]->scale ? w[i]->scale[a->head] : 1.0f;
        for (int row = 0; row < w[i]->n_out; row++, out += w[i]->n_in) {
            gguf_dequantize_row(w[i]->type,
                                w[i]->data + (size_t)a->head * w[i]->expert_bytes + (size_t)row * w[i]->row_bytes, out,
                                (size_t)w[i]->n_in);
            for (int j = 0; scale != 1.0f && j < w[i]->n_in; j++) out[j] *= scale;
        }
    }
}

/* Online softmax over blocks of keys (arXiv 2112.05682; 2205.14135): per row the running maximum, denominator and weighted
 * sum of values. */
static void attend_run(const struct rank *r, const struct attend *a, float *scratch) {
    int rows = a->n_tok * a->n_head, dk = a->dk, dv = a->dv, ldk, ldv;
    float *q = scratch, *acc = q + rows * dk, *s = acc + rows * dv, *top = s + rows * KEY_BLOCK, *den = top + rows;
    float *buf = den + rows, *expand = buf + KEY_BLOCK * (dk + dv);
    const float *k, *v;
    for (int i = 0; i < rows; i++) {
        const float *src = a->q + (size_t)(a->first + i / a->n_head) * a->q_tok + (size_t)(i % a->n_head) * a->q_head;
        for (int j = 0; j < dk; j++) q[i * dk + j] = src[j] * r->m->attn_scale;
        top[i] = -INFINITY, den[i] = 0;
    }
    memset(acc, 0, (size_t)rows * (size_t)dv * sizeof *acc);
    if (a->kind == ATTEND_EXPAND) attend_expand_weights(r, a, expand);
    int last = r->pos + a->first + a->n_tok; /* one behind the newest key that any row sees */
    int end = a->end < last ? a->end : last;
    for (int pos = a->begin; pos < end; pos += KEY_BLOCK) {
        int n = end - pos < KEY_BLOCK ? end - pos : KEY_BLOCK;
        attend_block(r, a, pos, n, buf, expand, &k, &ldk, &v, &ldv);
        r->k->sgemm_nt(rows, n, dk, q, dk, k, ldk, s, KEY_BLOCK);
        for (int i = 0; i < rows; i++) {
            float *p = s + i * KEY_BLOCK, mx;
            int seen = r->pos + a->first + i / a->n_head + 1 - pos;
            seen = seen < 0 ? 0 : seen < n ? seen : n;
            mx = seen ? r->k->max(p, seen) : top[i];
            if (mx > top[i]) {
                float f = expf(top[i] - mx);
                den[i] *= f, top[i] = mx;
                for (int j = 0; j < dv; j++) acc[i * dv + j] *= f;
            }
            if (seen) den[i] += r->k->exp_sum(p, seen, top[i]);
            for (int j = seen; j < n; j++) p[j] = 0;
        }
        r->k->sgemm_nn_add(rows, dv, n, s, KEY_BLOCK, v, ldv, acc, dv);
    }
    for (int i = 0; i < rows; i++) {
        float *o = a->partial ? a->partial + (size_t)i * (size_t)(dv + 2)
                              : a->out + (size_t)(a->first + i / a->n_head) * a->out_tok +
                                    (size_t)(i % a->n_head) * a->out_head;
        float f = a->partial ? 1.0f : 1.0f / den[i];
        for (int j = 0; j < dv; j++) o[j] = acc[i * dv + j] * f;
        if (a->partial) o[dv] = top[i], o[dv + 1] = den[i];
    }
}

/* Joins the partitions of a row in their order; partitions without a visible key have denominator 0. */
static void attend_merge(const float *partials, int n_split, size_t stride, int dv, float *out) {
    float top = -INFINITY, den = 0;
    for (int p = 0; p < n_split; p++) top = fmaxf(top, partials[(size_t)p * stride + (size_t)dv]);
    memset(out, 0, (size_t)dv * sizeof *out);
    for (int p = 0; p < n_split; p++) {
        const float *x = partials + (size_t)p * stride;
        float f = x[dv + 1] > 0 ? expf(x[dv] - top) : 0;
        den += f * x[dv + 1];
        for (int j = 0; j < dv; j++) out[j] += f * x[j];
    }
    for (int j = 0; j < dv; j++) out[j] /= den;
}

/* All rows of the batch against the cache, inside a parallel region. `all` describes the whole: heads in n_head, of which
 * `group` go into one item; items of `tile` tokens. */
static void attend_all(struct rank *r, const struct attend *all, int group, int tile) {
    int keys = r->pos + r->n_tok, n_split = 1, split_keys = keys;
    int n_group = all->n_head / group, n_tile = (r->n_tok + tile - 1) / tile;
    if (r->n_tok <= SPLIT_TOKENS) {
        split_keys = (keys + CPU_SPLITS_MAX - 1) / CPU_SPLITS_MAX;
        split_keys = split_keys < SPLIT_KEYS ? SPLIT_KEYS : (split_keys + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
        n_split = (keys + split_keys - 1) / split_keys;
    }
    size_t stride = (size_t)all->dv + 2, rows = (size_t)r->n_tok * (size_t)group;
#pragma omp for schedule(dynamic)
    for (int i = n_group * n_tile * n_split - 1; i >= 0; i--) { /* the last tiles see the most keys: they start first */
        struct attend a = *all;
        int g = i % n_group, t = i / n_group % n_tile, p = i / n_group / n_tile;
        a.head = all->kind == ATTEND_GQA ? g : g * group;
        a.n_head = group;
        a.first = t * tile, a.n_tok = r->n_tok - a.first < tile ? r->n_tok - a.first : tile;
        a.begin = p * split_keys, a.end = a.begin + split_keys;
        a.q += (size_t)g * (size_t)group * a.q_head, a.out += (size_t)g * (size_t)group * a.out_head;
        if (n_split > 1) a.partial = r->partials + ((size_t)p * (size_t)n_group + (size_t)g) * rows * stride;
        attend_run(r, &a, rank_scratch(r));
    }
    if (n_split == 1) return;
#pragma omp for schedule(static)
    for (int i = 0; i < r->n_tok * all->n_head; i++) {
        int t = i / all->n_head, h = i % all->n_head;
        const float *partials = r->partials + ((size_t)(h / group) * rows + (size_t)(t * group + h % group)) * stride;
        attend_merge(partials, n_split, (size_t)n_group * rows * stride, all->dv,
                     all->out + (size_t)t * all->out_tok + (size_t)h * all->out_head);
    }
}

static int tile_tokens(int rows_per_token) { return rows_per_token < QUERY_ROWS ? QUERY_ROWS / rows_per_token : 1; }

static void cpu_attention(struct rank *r, int il, enum act q, enum act out) {
    const struct model *m = r->m;
    if (!m->n_head) return;
    int group = m->n_head / m->n_head_kv;
    struct attend a = {.kind = ATTEND_GQA,
                       .il = il,
                       .n_head = m->n_head,
                       .dk = m->head_k,
                       .dv = m->head_v,
                       .q = r->act[q],
                       .q_tok = (size_t)r->width[q],
                       .q_head = (size_t)m->head_k,
                       .out = r->act[out],
                       .out_tok = (size_t)r->width[out],
                       .out_head = (size_t)m->head_v};
#pragma omp parallel num_threads(r->n_threads)
    attend_all(r, &a, group, r->n_tok <= SPLIT_TOKENS ? r->n_tok : tile_tokens(group));
}

/* Whether n query tokens make multiplying keys and values out of the latents cheaper than absorbing the matrices into query
 * and output: products per key and head, (nope + v) * kv_lora / n + nope + rope + v against 2 * kv_lora + rope. */
static bool mla_expands(const struct model *m, int n) {
    int64_t saved = 2 * m->kv_lora - m->nope - m->head_v;
    return saved > 0 && (int64_t)(m->nope + m->head_v) * m->kv_lora < saved * n;
}

/* One matrix per head applied to one vector per token and head, inside a parallel region: y (n_tok, n_head, y_head) = w[h] x (n_tok,
 * n_head, x_head). The n_copy floats behind the input vector are copied behind the result. The caller waits for the other threads. */
static void heads_linear(struct rank *r, const struct weight *w, const float *x, size_t x_tok, size_t x_head, float *y,
                         size_t y_tok, size_t y_head, int n_copy) {
    enum act_format f = r->k->act_format(w->type, r->n_tok);
    size_t stride = r->k->act_bytes(f, w->n_in);
#pragma omp for schedule(static) nowait
    for (int h = 0; h < w->n_expert; h++) {
        uint8_t *pack = r->pack + (size_t)h * (size_t)r->n_tok * stride;
        const float *xh = x + (size_t)h * x_head;
        float *yh = y + (size_t)h * y_head;
        for (int t = 0; t < r->n_tok; t++) {
            r->k->act_pack(f, xh + (size_t)t * x_tok, w->n_in, pack + (size_t)t * stride);
            if (n_copy)
                memcpy(yh + (size_t)t * y_tok + w->n_out, xh + (size_t)t * x_tok + w->n_in, (size_t)n_copy * sizeof *y);
        }
        for (int row = 0; row < w->n_out; row += ROW_TILE) {
            struct gemm g = {.type = w->type,
                             .format = f,
                             .w = w->data + (size_t)h * w->expert_bytes + (size_t)row * w->row_bytes,
                             .w_stride = w->row_bytes,
                             .n_out = w->n_out - row < ROW_TILE ? w->n_out - row : ROW_TILE,
                             .n_in = w->n_in,
                             .x = pack,
                             .x_stride = stride,
                             .n_tok = r->n_tok,
                             .scale = w->scale ? w->scale[h] : 1.0f,
                             .y = yh + row,
                             .y_stride = y_tok,
                             .scratch = rank_scratch(r)};
            r->k->gemm(&g);
        }
    }
}

static void cpu_mla_attention(struct rank *r, int il, enum act q, enum act out) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    size_t q_tok = (size_t)r->width[q], out_tok = (size_t)r->width[out];
    if (!m->n_head) return;
    struct attend a = {.il = il,
                       .n_head = m->n_head,
                       .dk = m->head_k,
                       .dv = m->head_v,
                       .q = r->act[q],
                       .q_tok = q_tok,
                       .q_head = (size_t)m->head_k,
                       .out = r->act[out],
                       .out_tok = out_tok,
                       .out_head = (size_t)m->head_v};
    if (mla_expands(m, r->n_tok)) {
        a.kind = ATTEND_EXPAND;
#pragma omp parallel num_threads(r->n_threads)
        attend_all(r, &a, 1, r->n_tok);
        return;
    }
    size_t lat = (size_t)(m->kv_lora + m->rope_dim);
    float *latent_out = r->q_absorbed + (size_t)r->n_tok * (size_t)m->n_head * lat;
    a.kind = ATTEND_LATENT, a.dk = (int)lat, a.dv = m->kv_lora;
    a.q = r->q_absorbed, a.q_tok = (size_t)m->n_head * lat, a.q_head = lat;
    a.out = latent_out, a.out_tok = (size_t)m->n_head * (size_t)m->kv_lora, a.out_head = (size_t)m->kv_lora;
    int group = m->n_head % MLA_HEAD_GROUP ? 1 : MLA_HEAD_GROUP;
#pragma omp parallel num_threads(r->n_threads)
    {
        heads_linear(r, &layer->wk_b, r->act[q], q_tok, (size_t)m->head_k, r->q_absorbed, a.q_tok, lat, m->rope_dim);
#pragma omp barrier
        attend_all(r, &a, group, r->n_tok <= SPLIT_TOKENS ? r->n_tok : tile_tokens(group));
        heads_linear(r, &layer->wv_b, latent_out, a.out_tok, a.out_head, r->act[out], out_tok, (size_t)m->head_v, 0);
    }
}

/* ---- feed-forward: a list of jobs, each one expert (or the dense or shared network) with the tokens it gets ---- */

struct ffn_job {
    const struct weight *gate, *up, *down;
    int expert;
    int n_tok;           /* tokens of this job */
    const int32_t *rows; /* (n_tok) which ones; NULL: all in order */
    const float *w;      /* (n_tok) factors of the result; NULL: 1 */
    size_t hidden;       /* floats before this job's (n_tok, n_ff) in rank.hidden */
    size_t slot;         /* rows before this job's in rank.pack_h */
};

/* Ids and weights of the experts of one token. logits (n). DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): the bias and the groups
 * decide who is chosen, never with what weight. Ties go to the lower id, as torch.topk's do in practice. */
static void route_token(const struct model *m, const struct layer *layer, float *logits, int32_t *ids, float *weights) {
    int n = layer->n_expert, k = m->n_expert_used, per = n / m->n_group;
    float pick[MAX_EXPERTS], group[MAX_EXPERTS];
    if (m->gating == GATING_SOFTMAX) {
        float mx = -INFINITY, sum = 0;
        for (int e = 0; e < n; e++) mx = fmaxf(mx, logits[e]);
        for (int e = 0; e < n; e++) sum += logits[e] = expf(logits[e] - mx);
        for (int e = 0; e < n; e++) logits[e] /= sum;
    } else {
        for (int e = 0; e < n; e++) logits[e] = 1.0f / (1.0f + expf(-logits[e]));
    }
    for (int e = 0; e < n; e++) {
        pick[e] = logits[e] + (layer->router_bias ? layer->router_bias[e] : 0.0f);
        if (isnan(pick[e]))
            pick[e] = -INFINITY; /* the answer is lost, but the ids are distinct: scratch is sized for that */
    }
    if (m->n_group > 1) { /* a group's score is the sum of its two best; the others are out */
        for (int g = 0; g < m->n_group; g++) {
            float a = -INFINITY, b = -INFINITY;
            for (int e = g * per; e < (g + 1) * per; e++) {
                if (pick[e] > a) b = a, a = pick[e];
                else if (pick[e] > b) b = pick[e];
            }
            group[g] = per > 1 ? a + b : a;
        }
        for (int g = 0; g < m->n_group; g++) {
            int better = 0;
            for (int o = 0; o < m->n_group; o++) better += group[o] > group[g] || (group[o] == group[g] && o < g);
            for (int e = g * per; better >= m->n_group_used && e < (g + 1) * per; e++) pick[e] = -INFINITY;
        }
    }
    float sum = 0;
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!isnan(pick[e]) && (best < 0 || pick[e] > pick[best])) best = e;
        if (best < 0) best = i; /* only NaN left: the answer is lost, but the ids stay in range */
        ids[i] = best, weights[i] = logits[best];
        sum += weights[i];
        pick[best] = NAN;
    }
    float f = m->routed_scaling_factor;
    if (m->norm_topk_prob) f /= m->gating == GATING_SIGMOID ? sum + 1e-20f : sum;
    for (int i = 0; i < k; i++) weights[i] *= f;
}

/* Turns the batch's choices into jobs, in order of the expert ids, the shared expert last. */
static void ffn_jobs_build(struct rank *r, const struct layer *layer) {
    const struct model *m = r->m;
    int k = m->n_expert_used, count[MAX_EXPERTS] = {0}, at[MAX_EXPERTS];
    size_t hidden = 0, slot = 0;
    r->n_jobs = 0;
    for (int i = 0; i < r->n_tok * k; i++) count[r->route_id[i]]++;
    for (int e = 0, sum = 0; e < layer->n_expert; e++) {
        at[e] = sum;
        if (!count[e] || !layer->gate.n_out) continue;
        r->jobs[r->n_jobs++] = (struct ffn_job){&layer->gate,      &layer->up,     &layer->down, e,   count[e],
                                                r->job_rows + sum, r->job_w + sum, hidden,       slot};
        sum += count[e], slot += (size_t)count[e], hidden += (size_t)count[e] * (size_t)layer->gate.n_out;
    }
    for (int i = 0; i < r->n_tok * k; i++) {
        int j = at[r->route_id[i]]++;
        r->job_rows[j] = i / k, r->job_w[j] = r->route_w[i];
    }
    if (layer->sh_gate.n_out)
        r->jobs[r->n_jobs++] =
            (struct ffn_job){&layer->sh_gate, &layer->sh_up, &layer->sh_down, 0, r->n_tok, NULL, NULL, hidden, slot};
}

static struct gemm ffn_gemm(const struct rank *r, const struct weight *w, const struct ffn_job *j, enum act_format f,
                            int row) {
    return (struct gemm){.type = w->type,
                         .format = f,
                         .w = w->data + (size_t)j->expert * w->expert_bytes + (size_t)row * w->row_bytes,
                         .w_stride = w->row_bytes,
                         .n_out = w->n_out - row < ROW_TILE ? w->n_out - row : ROW_TILE,
                         .n_in = w->n_in,
                         .n_tok = j->n_tok,
                         .scale = w->scale ? w->scale[j->expert] : 1.0f,
                         .scratch = rank_scratch(r)};
}

/* Packs the hidden rows of all jobs, those of the last job as `last` says; little work is done by every thread for itself. */
static const uint8_t *ffn_pack_hidden(const struct rank *r, enum act_format f, enum act_format last, size_t stride,
                                      int n_rows) {
    bool own = (size_t)n_rows * stride <= OWN_PACK;
    uint8_t *out = own ? scratch_pack(r, 2) : r->pack_h;
    int threads = own ? 1 : omp_get_num_threads(), from = own ? 0 : omp_get_thread_num();
    for (int j = 0; j < r->n_jobs; j++) {
        const struct ffn_job *b = &r->jobs[j];
        size_t ff = (size_t)b->gate->n_out;
        for (int t = from; t < b->n_tok; t += threads)
            r->k->act_pack(j == r->n_jobs - 1 ? last : f, r->hidden + b->hidden + (size_t)t * ff, (int)ff,
                           out + (b->slot + (size_t)t) * stride);
    }
    if (!own) {
#pragma omp barrier
    }
    return out;
}

static float *norm_part(const struct rank *r, int tile, size_t slot) {
    return r->norm_parts + (size_t)tile * (size_t)r->chunk * (size_t)r->m->n_expert_used + slot;
}

static void in_sum2_add(float *sum, const float *x, int n) {
    for (int i = 0; i < n; i++) sum[i] += x[i] * x[i];
}

/* Collects what the jobs of the latest feed-forward, with the input x, were given and gave. */
static void stats_add(struct rank *r, int il, enum act x) {
    const struct layer *layer = &r->m->layers[il];
    const int k = r->m->n_expert_used, tiles = (r->m->n_embd + ROW_TILE - 1) / ROW_TILE;
    struct ffn_weights ffns[2];
    layer_ffns(layer, ffns);
#pragma omp parallel for num_threads(r->n_threads) schedule(dynamic)
    for (int i = 0; i < r->n_jobs; i++) {
        const struct ffn_job *j = &r->jobs[i];
        const bool second = j->gate != ffns[0].gate;
        const struct ffn_weights *ffn = &ffns[second];
        const size_t n_in = (size_t)j->gate->n_in, ff = (size_t)j->gate->n_out, e = (size_t)j->expert;
        double *s = r->stats + ((size_t)il * (size_t)r->m->n_expert_max + e) * STATS;
        for (int t = 0; t < j->n_tok && j->rows; t++) {
            const float *w = r->route_w + (size_t)j->rows[t] * (size_t)k;
            double square = 0, sum = 0;
            for (int c = 0; c < tiles; c++) square += (double)*norm_part(r, c, j->slot + (size_t)t);
            for (int c = 0; c < k; c++) sum += (double)w[c];
            const double norm = sqrt(square), g = sum > 0 ? (double)j->w[t] / sum : 0;
            s[STAT_TOKENS]++, s[STAT_WEIGHTED] += g * norm, s[STAT_NORM] += norm, s[STAT_GATE] += g;
            s[STAT_WEIGHTED_MAX] = fmax(s[STAT_WEIGHTED_MAX], g * norm);
        }
        if (!r->in_sum2) continue;
        float *in = r->in_sum2 + in_sum2_before(r->m, il) + (second ? ffn_in_sum2(&ffns[0]) : 0);
        float *down = in + (size_t)ffn->gate->n_expert * n_in;
        for (int t = 0; t < j->n_tok; t++) {
            in_sum2_add(in + e * n_in, act_row(r, x, j->rows ? j->rows[t] : t), (int)n_in);
            in_sum2_add(down + e * ff, r->hidden + j->hidden + (size_t)t * ff, (int)ff);
        }
    }
}

/* out = sum over the jobs of weight * down(silu(gate x) * (up x)), inside a parallel region. Each output element is summed in the
 * order of the jobs by one thread. `per_job`: tokens that a job has on average, which chooses the number format. */
static void ffn_run(struct rank *r, enum act x, enum act out, int per_job) {
    const struct kernels *k = r->k;
    if (!r->n_jobs) { /* an empty share */
#pragma omp for schedule(static)
        for (int t = 0; t < r->n_tok; t++) memset(act_row(r, out, t), 0, (size_t)r->width[out] * sizeof(float));
        return;
    }
    const struct ffn_job *j0 = &r->jobs[0];
    const struct ffn_job *jn =
        &r->jobs[r->n_jobs - 1]; /* the shared expert, if there is one: of all tokens, maybe of another type */
    int per_last = jn->rows ? per_job : jn->n_tok;
    enum act_format f = k->act_format(j0->gate->type, per_job), fs = k->act_format(jn->gate->type, per_last);
    enum act_format fd = k->act_format(j0->down->type, per_job), fds = k->act_format(jn->down->type, per_last);
    int n_in = j0->gate->n_in, n_ff = 0, n_rows = 0;
    size_t stride = k->act_bytes(f, n_in), stride_s = k->act_bytes(fs, n_in);
    const uint8_t *pack = pack_rows(r, f, r->act[x], (size_t)r->width[x], r->n_tok, n_in, r->pack, 0), *pack_s = pack;
    if (fs != f)
        pack_s =
            pack_rows(r, fs, r->act[x], (size_t)r->width[x], r->n_tok, n_in, r->pack + (size_t)r->n_tok * stride, 1);
    for (int j = 0; j < r->n_jobs; j++) {
        n_ff = r->jobs[j].gate->n_out > n_ff ? r->jobs[j].gate->n_out : n_ff;
        n_rows += r->jobs[j].n_tok;
    }
    float *tile = scratch_tile(r);
    size_t h_stride = size_max(k->act_bytes(fd, n_ff), k->act_bytes(fds, n_ff));
    int ff_tiles = (n_ff + ROW_TILE - 1) / ROW_TILE, tiles = r->n_jobs * ff_tiles;
#pragma omp for schedule(dynamic)
    for (int i = 0; i < tiles; i++) {
        const struct ffn_job *j = &r->jobs[i / ff_tiles];
        int row = i % ff_tiles * ROW_TILE, ff = j->gate->n_out;
        bool shared = j == jn;
        if (row >= ff) continue;
        struct gemm g = ffn_gemm(r, j->gate, j, shared ? fs : f, row), u = ffn_gemm(r, j->up, j, shared ? fs : f, row);
        g.x = u.x = shared ? pack_s : pack, g.x_stride = u.x_stride = shared ? stride_s : stride;
        g.rows = u.rows = j->rows;
        g.y = r->hidden + j->hidden + row, g.y_stride = (size_t)ff;
        u.y = tile, u.y_stride = ROW_TILE;
        k->gemm(&g);
        k->gemm(&u);
        for (int t = 0; t < j->n_tok; t++) k->silu_mul(g.y + (size_t)t * (size_t)ff, tile + t * ROW_TILE, g.n_out);
    }
    const uint8_t *pack_h = ffn_pack_hidden(r, fd, fds, h_stride, n_rows);
#pragma omp for schedule(dynamic) nowait
    for (int row = 0; row < r->width[out]; row += ROW_TILE) {
        for (int t = 0; t < r->n_tok; t++)
            memset(act_row(r, out, t) + row, 0,
                   sizeof(float) * (size_t)(r->width[out] - row < ROW_TILE ? r->width[out] - row : ROW_TILE));
        for (int i = 0; i < r->n_jobs; i++) {
            const struct ffn_job *j = &r->jobs[i];
            struct gemm g = ffn_gemm(r, j->down, j, j == jn ? fds : fd, row);
            g.x = pack_h + j->slot * h_stride, g.x_stride = h_stride;
            g.y = tile, g.y_stride = ROW_TILE;
            k->gemm(&g);
            for (int t = 0; t < j->n_tok; t++) {
                float *y = act_row(r, out, j->rows ? j->rows[t] : t) + row, w = j->w ? j->w[t] : 1.0f;
                for (int c = 0; c < g.n_out; c++) y[c] += w * tile[t * ROW_TILE + c];
            }
            if (!r->norm_parts || !j->rows) continue;
            float *part = norm_part(r, row / ROW_TILE, j->slot);
            for (int t = 0; t < j->n_tok; t++) {
                float sum = 0;
                for (int c = 0; c < g.n_out; c++) sum += tile[t * ROW_TILE + c] * tile[t * ROW_TILE + c];
                part[t] = sum;
            }
        }
    }
}

static void cpu_ffn(struct rank *r, int il, enum act x, enum act out) {
    const struct layer *layer = &r->m->layers[il];
    r->jobs[0] = (struct ffn_job){&layer->gate, &layer->up, &layer->down, 0, r->n_tok, NULL, NULL, 0, 0};
    r->n_jobs = layer->gate.n_out > 0;
#pragma omp parallel num_threads(r->n_threads)
    ffn_run(r, x, out, r->n_tok);
    if (r->stats) stats_add(r, il, x);
}

static void cpu_moe_ffn(struct rank *r, int il, enum act x, enum act out) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    int per_job = (r->n_tok * m->n_expert_used + layer->n_expert - 1) / layer->n_expert;
#pragma omp parallel num_threads(r->n_threads)
    {
        linear_rows(r, &layer->router, r->act[x], r->width[x], r->n_tok, r->route, m->n_expert_max);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int t = 0; t < r->n_tok; t++)
            route_token(m, layer, r->route + (size_t)t * (size_t)m->n_expert_max, r->route_id + t * m->n_expert_used,
                        r->route_w + t * m->n_expert_used);
#pragma omp single
        ffn_jobs_build(r, layer);
        ffn_run(r, x, out, per_job);
    }
    if (r->stats) stats_add(r, il, x);
}

static void cpu_read_stats(struct rank *r, double *stats, float *in_sum2) {
    memcpy(stats, r->stats, (size_t)r->m->n_layer * (size_t)r->m->n_expert_max * STATS * sizeof *stats);
    if (in_sum2) memcpy(in_sum2, r->in_sum2, in_sum2_before(r->m, r->m->n_layer) * sizeof *in_sum2);
}

static void cpu_logits(struct rank *r, int first, int n) {
    const struct weight *w = &r->m->output;
    float *out = rank_peer(r, 0)->logits + r->m->first_id;
#pragma omp parallel num_threads(r->n_threads)
    {
#pragma omp for schedule(static)
        for (int t = first; t < first + n; t++)
            r->k->rmsnorm(act_row(r, A_X, t), r->m->output_norm, r->m->rms_eps, act_row(r, A_H, t), r->m->n_embd);
        linear_rows(r, w, act_row(r, A_H, first), r->width[A_H], n, out, r->m->n_vocab);
    }
}

static const float *cpu_read_logits(struct rank *r, int row) { return r->logits + (size_t)row * (size_t)r->m->n_vocab; }

static void cpu_sample(struct rank *r, const struct sampling *o, const int32_t *recent, int n_recent, double uniform) {
    r->chosen = sampling_choose(o, r->work, r->m->n_ids, r->logits, recent, n_recent, uniform);
}
static int32_t cpu_read_token(struct rank *r) { return r->chosen; }

static bool cpu_begin(struct rank *r) { return (void)r, false; }
static void cpu_end(struct rank *r) { (void)r; }

static void cpu_kv_copy(struct rank *r, const struct kv_plane *p, size_t first, size_t n, uint8_t *data, float *scale,
                        bool store) {
    (void)r;
    uint8_t *d = p->data + first * p->row_bytes;
    if (data) memcpy(store ? d : data, store ? data : d, n * p->row_bytes);
    if (!scale) return;
    float *s = p->scale + first * (size_t)p->n_group;
    memcpy(store ? s : scale, store ? scale : s, n * (size_t)p->n_group * sizeof *s);
}

static void cpu_wait(struct rank *r) { (void)r; }
static struct rates cpu_measure(struct rank *r) { return (struct rates){memory_bandwidth(r->n_threads), 0}; }

static void cpu_close(struct rank *r) {
    for (size_t i = 0; i < arrlenu(r->owned); i++) free(r->owned[i]);
    arrfree(r->owned);
}

static const struct ops cpu_ops = {
    cpu_begin,        cpu_end,           cpu_embed,      cpu_rmsnorm,       cpu_all_reduce_add_rmsnorm,
    cpu_final_reduce, cpu_linear,        cpu_linear3,    cpu_rope_store_kv, cpu_attention,
    cpu_mla_store,    cpu_mla_attention, cpu_ffn,        cpu_moe_ffn,       cpu_logits,
    cpu_read_logits,  cpu_sample,        cpu_read_token, cpu_kv_copy,       cpu_wait,
    cpu_read_stats,   cpu_measure,       NULL,           cpu_close};

/* ---- memory of a rank ---- */

static void *rank_own(struct rank *r, size_t n, size_t size) {
    /* calloc: pages that are never touched, above all of the cache, cost nothing */
    void *p = n && size && n > SIZE_MAX / size ? NULL : calloc(n * size + 64, 1);
    if (!p) die("out of memory: %zu x %zu bytes for activations or the KV cache; a smaller -c needs less", n, size);
    r->bytes += n * size;
    arrput(r->owned, p);
    return (void *)(((uintptr_t)p + 63) / 64 * 64);
}

static void rank_plane(struct rank *r, struct kv_plane *p) {
    p->data = rank_own(r, (size_t)r->n_ctx, p->row_bytes);
    r->kv_bytes += (size_t)r->n_ctx * p->row_bytes;
    if (p->type != KV_FP8) return;
    p->scale = rank_own(r, (size_t)r->n_ctx * (size_t)p->n_group, sizeof(float));
    r->kv_bytes += (size_t)r->n_ctx * (size_t)p->n_group * sizeof(float);
}

/* Whether the rank has the logits of all. */
static bool rank_is_root(const struct model *m) { return !m->shard.rank && m->shard.stage == m->shard.n_stage - 1; }

/* Lays out the memory for contexts of n_ctx tokens. */
static void rank_init(struct rank *r, const struct model *m, const struct kernels *k, int n_threads, int n_ctx,
                      enum kv_type kv) {
    memset(r, 0, sizeof *r);
    r->m = m, r->ops = &cpu_ops, r->k = k, r->n_threads = n_threads, r->n_ctx = n_ctx, r->kv_type = kv;
    r->chunk = n_ctx < CHUNK_MAX ? n_ctx : CHUNK_MAX;
    snprintf(r->name, sizeof r->name, "%s, %d thread%s", k->name, n_threads, n_threads > 1 ? "s" : "");
    size_t c = (size_t)r->chunk, n_head = (size_t)m->n_head;
    act_widths(m, r->width);
    for (int a = 0; a < ACT_COUNT; a++) r->act[a] = rank_own(r, c * (size_t)r->width[a], sizeof(float));
    r->tokens = rank_own(r, c, sizeof *r->tokens);
    r->cos = rank_own(r, c * (size_t)m->rope_dim / 2, sizeof(float));
    r->sin = rank_own(r, c * (size_t)m->rope_dim / 2, sizeof(float));

    int absorbed = 1; /* the most tokens for which queries are taken into the latent space */
    while (m->kv_lora && absorbed < r->chunk && !mla_expands(m, absorbed + 1)) absorbed++;
    size_t n_ff = size_max((size_t)m->n_ff_dense, size_max((size_t)m->n_ff_expert, (size_t)m->n_ff_shared)), pack = 0,
           pack_h = 0;
    size_t n_in = size_max((size_t)m->n_embd, size_max(size_max((size_t)m->q_lora, n_ff), (size_t)r->width[A_ATT]));
    for (int f = ACT_F32; f <= ACT_BF16; f++) {
        pack = size_max(pack, 2 * c * k->act_bytes((enum act_format)f, (int)n_in));
        if (m->kv_lora) /* one row per token and head */
            pack = size_max(pack, (size_t)absorbed * n_head *
                                      k->act_bytes((enum act_format)f, m->kv_lora > m->nope ? m->kv_lora : m->nope));
        pack_h = size_max(pack_h, k->act_bytes((enum act_format)f, (int)n_ff));
    }
    size_t used = (size_t)m->n_expert_used, shared = (size_t)m->n_ff_shared,
           hidden = size_max((size_t)m->n_ff_dense, used * (size_t)m->n_ff_expert + shared);
    r->pack = rank_own(r, pack, 1);
    r->pack_h = rank_own(r, c * (used + 1), pack_h);
    r->hidden = rank_own(r, c * hidden, sizeof(float));
    r->route = rank_own(r, c * (size_t)m->n_expert_max, sizeof(float));
    r->route_id = rank_own(r, c * used, sizeof *r->route_id);
    r->route_w = rank_own(r, c * used, sizeof(float));
    r->job_rows = rank_own(r, c * used, sizeof *r->job_rows);
    r->job_w = rank_own(r, c * used, sizeof(float));
    r->jobs = rank_own(r, (size_t)m->n_expert_max + 1, sizeof *r->jobs);
    size_t lat = (size_t)(2 * m->kv_lora + m->rope_dim), dv = (size_t)(m->kv_lora ? m->kv_lora : m->head_v);
    if (m->kv_lora) r->q_absorbed = rank_own(r, (size_t)absorbed * n_head * lat, sizeof(float));
    r->partials = rank_own(r, CPU_SPLITS_MAX * SPLIT_TOKENS * n_head * (dv + 2), sizeof(float));
    if (rank_is_root(m)) {
        r->logits = rank_own(r, LOGIT_ROWS * (size_t)m->n_vocab, sizeof(float));
        r->work = rank_own(r, (size_t)m->n_ids, sizeof *r->work);
    }

    size_t rows = (size_t)(m->n_head / m->n_head_kv) * SPLIT_TOKENS; /* the largest attention item */
    rows = size_max(m->kv_lora ? size_max(c, MLA_HEAD_GROUP * SPLIT_TOKENS) : rows, QUERY_ROWS);
    r->scratch_bytes = size_max(attend_floats(m, (int)rows) * sizeof(float),
                                KERNEL_SCRATCH + c * ROW_TILE * sizeof(float) + 3 * OWN_PACK);
    r->scratch_bytes = (r->scratch_bytes + 4095) / 4096 * 4096;
    r->scratch = rank_own(r, (size_t)n_threads, r->scratch_bytes);
    r->kv = rank_own(r, (size_t)m->n_layer, sizeof *r->kv);
    for (int il = 0; il < m->n_layer; il++) {
        struct kv_layer *y = &r->kv[il];
        *y = kv_layer_make(m, kv);
        rank_plane(r, &y->k);
        rank_plane(r, &y->v);
    }
    r->bytes -= r->kv_bytes;
}

/* Lets a rank collect; in_sum2: those sums too. */
static void rank_stats_init(struct rank *r, bool in_sum2) {
    const struct model *m = r->m;
    const size_t tiles = ((size_t)m->n_embd + ROW_TILE - 1) / ROW_TILE;
    r->stats = rank_own(r, (size_t)m->n_layer * (size_t)m->n_expert_max * STATS, sizeof *r->stats);
    r->norm_parts = rank_own(r, tiles * (size_t)r->chunk * (size_t)m->n_expert_used, sizeof(float));
    if (in_sum2) r->in_sum2 = rank_own(r, in_sum2_before(m, m->n_layer), sizeof(float));
}

/* ============================================================================================================
 * Ranks on GPUs
 *
 * What a GPU holds, for the ranks that start and for --plan; and the start, a step of moe_cuda.cu after the other. All ranks go through
 * the same steps; what one of them meets, all hear of.
 * ============================================================================================================ */

/* Bytes of a GPU's copy of a matrix; rounded: as the driver allocates them. */
static size_t weight_gpu_bytes(const struct weight *w, bool rounded) {
    const enum weight_format f = weight_format(w->type);
    const size_t part[2] = {weight_tiles(w) * TILE_BYTES(f), f == FMT_F16 ? 0 : weight_tiles(w) * TILE_SCALES};
    size_t n = 0;
    for (int i = 0; i < 2; i++)
        n += rounded && part[i] > PAGE_BYTES / 2 ? (part[i] + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES : part[i];
    return n;
}

/* What the driver's rounding adds to up to 64 other allocations, and that of planes to 256 bytes. */
static size_t gpu_rounding(const struct model *m) { return (size_t)64 * PAGE_BYTES + (size_t)m->n_layer * 1024; }

/* The area of the rank that has the part p of the model, at base unless that is NULL; its bytes. */
static size_t mailbox_layout(struct mailbox *a, uint8_t *base, const struct model *m, struct shard shard,
                             struct gpu_sizes s) {
    const size_t n = (size_t)shard.n_rank;
    const bool head = n > 1 && !shard.rank && shard.stage == shard.n_stage - 1;
    size_t at = 0;
#define BUFFER(field, count) \
    a->field = base ? (void *)(base + at) : NULL, at += (sizeof *a->field * (count) + 255) / 256 * 256
    BUFFER(reduce_flag, n * ALLREDUCE_BLOCKS);
    BUFFER(logits_flag, n);
    BUFFER(hidden_flag, 1);
    BUFFER(credit, 1);
    BUFFER(slot, n > 1 ? 2 * n * ALLREDUCE_SLOT : 0);
    BUFFER(x, shard.stage ? (size_t)s.chunk * (size_t)m->n_embd : 0);
    BUFFER(logits, head ? LOGIT_ROWS * logits_stride(m->n_vocab) : 0);
#undef BUFFER
    return at;
}

/* Bytes of activations for forwards of `chunk` tokens, with everything that options may ask for. */
static size_t gpu_bytes(const struct model *m, int chunk, bool stats) {
    const struct shard p = m->shard;
    const struct gpu_sizes s = {chunk, SPLITS_MAX, true, p.n_rank > 1, stats};
    size_t total = 0;
#define BUFFER(field, type, count) total += sizeof(type) * (count)
    GPU_BUFFERS(BUFFER);
#undef BUFFER
    return total + (p.n_rank * p.n_stage > 1 ? mailbox_layout(&(struct mailbox){0}, NULL, m, p, s) : 0);
}

/* Tokens of a forward, so that activations are no large part of the memory. */
static int gpu_chunk(const struct model *m, int n_ctx, size_t memory, bool stats) {
    int chunk = int_min(PREFILL_MAX_TOKENS, n_ctx);
    while (chunk > 256 && gpu_bytes(m, chunk, stats) > memory / SCRATCH_SHARE) chunk /= 2;
    return chunk;
}

#ifdef MOE_CUDA
void sampling_job(struct sample_job *p, const struct sampling *o, int n, const int32_t *recent, int n_recent,
                  double uniform) {
    p->n = n, p->limit = o->top_k > 0 && o->top_k < n ? o->top_k : n;
    p->greedy = o->greedy || o->temp <= 0;
    p->n_recent = o->repeat_penalty != 1.0f ? n_recent : 0;
    memset(p->recent_mask, 0, sizeof p->recent_mask);
    for (int i = 0; i < n_recent; i++)
        p->recent[i] = recent[i], p->recent_mask[recent[i] >> 5 & 63] |= 1u << (recent[i] & 31);
    p->repeat_penalty = o->repeat_penalty, p->temp = o->temp, p->top_p = o->top_p, p->min_p = o->min_p;
    p->uniform = uniform;
}

/* The launches of a forward, while a thread profiles its rank. */
static _Thread_local struct {
    struct profile_row *row; /* (cap); NULL: nothing is recorded */
    int n, cap;
    char what[64]; /* of the next launch: what it works on, */
    double bytes;  /* and moves */
} profile;

void profile_next(double bytes, const char *fmt, ...) {
    if (!profile.row) return;
    if (profile.what[0]) strncat(profile.what, " + ", sizeof profile.what - 1 - strlen(profile.what));
    size_t at = strlen(profile.what);
    va_list v;
    va_start(v, fmt);
    vsnprintf(profile.what + at, sizeof profile.what - at, fmt, v);
    va_end(v);
    profile.bytes += bytes;
}

int profile_launch(const char *kernel) {
    if (!profile.row || profile.n == profile.cap) return -1;
    if (!kernel) return 2 * profile.n++ + 1;
    struct profile_row *row = &profile.row[profile.n];
    kernel += *kernel == '('; /* and without the arguments of a template */
    snprintf(row->name, sizeof row->name, "%.*s %s", (int)strcspn(kernel, "<"), kernel, profile.what);
    row->calls = 1, row->bytes = profile.bytes;
    profile.bytes = 0, profile.what[0] = 0;
    return 2 * profile.n;
}

bool profiling(void) { return profile.row; }

void profile_start(struct profile_row *rows, int n) {
    memset(&profile, 0, sizeof profile);
    profile.row = rows, profile.cap = n;
}

int profile_end(void) {
    profile.row = NULL;
    return profile.n;
}

/* Which of the program's images a chip of capability major.minor runs. */
static const char *gpu_image(int major, int minor) {
    const char *built = cuda_targets();
    if (!strcmp(built, "emulated")) return "emulated";
    if (major == 12 && strstr(built, "sm_120f")) return "sm_120f";
    if (major == 9 && !minor && strstr(built, "sm_90")) return "sm_90";
    return major >= 9 ? "PTX for compute_90" : "PTX for compute_80";
}

static void gpu_name(char out[128], int device, const struct gpu_facts *f) {
    snprintf(out, 128, "GPU %d %.63s (sm_%d%d, %.0f GiB)", device, f->name, f->major, f->minor,
             (double)f->total / 0x1p30);
}

/* NCCL's version, or why there is none. */
static const char *nccl_name(char out[24]) {
    const int v = cuda_nccl();
    snprintf(out, 24, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    return v ? out : "none (not found when the program was built)";
}

bool rank_fail(struct rank *r, const char *fmt, ...) {
    char text[ERR_MAX - 16];
    va_list v;
    va_start(v, fmt);
    vsnprintf(text, sizeof text, fmt, v);
    va_end(v);
    if (!r->err) die("GPU %d: %s", r->device, text);
    if (!r->failed) snprintf(r->err, ERR_MAX, "GPU %d: %s", r->device, text);
    r->failed = true;
    rank_alarm(r, true);
    return false;
}

bool rank_agree(struct rank *r) {
    const int mine[3] = {r->failed, r->n_ctx, r->chunk};
    int all[MAX_RANKS][3];
    rank_all_gather(r, mine, all, sizeof mine);
    for (int i = 0; i < r->m->shard.n_rank * r->m->shard.n_stage; i++) {
        r->failed |= all[i][0] != 0;
        r->n_ctx = int_min(r->n_ctx, all[i][1]), r->chunk = int_min(r->chunk, all[i][2]);
    }
    return !r->failed;
}

/* For whom the ranks wait, as far as their kernels said. */
static void rank_stalled(struct rank *r, const char *what, int seconds) {
    const struct shard shard = r->m->shard;
    char who[256] = "";
    for (int i = 0; i < shard.n_rank * shard.n_stage; i++) {
        const uint32_t code = *(volatile uint32_t *)&r->heartbeat[i]->waiting;
        const int rank = (int)((code - 1) & 15), channel = (int)((code - 1) >> 4 & 15), place = (int)(code >> 8);
        const size_t at = strlen(who), room = sizeof who - at;
        if (code && channel == CH_ALLREDUCE)
            snprintf(who + at, room, "; rank %d waited for rank %d at the sum of the %s of its layer %d", i,
                     i / shard.n_rank * shard.n_rank + rank, place % 2 ? "feed-forward" : "attention", place / 2);
        else if (code)
            snprintf(who + at, room, "; rank %d waited for %s", i,
                     channel == CH_LOGITS ? "a part of the logits" : "another stage");
    }
    rank_fail(
        r,
        "%s: nothing has happened for %d s%s. Has a GPU stopped? At the start: are writes between GPUs or NCCL broken "
        "here (IOMMU; NCCL_P2P_DISABLE=1 goes through the host)?",
        what, seconds, who);
}

bool rank_keep_waiting(struct rank *r, struct backoff *p, const char *what) {
    enum {
        SPINS = 20000,
        NAP = 50000 /* ns */,
        ALLREDUCE_STALL = 7,
        STAGE_STALL = 60 /* s: a stage computes for long */
    };
    const struct timespec nap = {0, NAP};
    const struct shard *part = &r->m->shard;
    const double now = now_seconds();
    uint32_t sums = 0;
    for (int i = 0; i < part->n_rank * part->n_stage; i++) sums += *(volatile uint32_t *)&r->heartbeat[i]->sums;
    p->idle = sums != p->seen || !p->turns ? 0 : p->idle + fmin(now - p->last, 0.5);
    p->seen = sums, p->last = now;
    if (r->pg) __atomic_add_fetch(&r->pg->heartbeats, 1, __ATOMIC_RELAXED);
    if (rank_alarm(r, false)) r->failed = true;
    if (p->idle > (part->n_stage > 1 ? STAGE_STALL : ALLREDUCE_STALL) && !r->failed)
        rank_stalled(r, what, (int)p->idle);
    if (r->failed) *(volatile uint32_t *)&r->heartbeat[r->index]->abort = 1;
    if (p->turns++ > SPINS || r->failed) nanosleep(&nap, NULL);
    return !r->failed;
}

size_t rank_cache(struct rank *r, uint8_t *base) {
    size_t bytes = 0;
    for (int il = 0; il < r->m->n_layer; il++) {
        struct kv_layer y = kv_layer_make(r->m, r->kv_type);
        for (int i = 0; i < 2; i++) {
            struct kv_plane *p = i ? &y.v : &y.k;
            p->data = base ? base + bytes : NULL;
            bytes += ((size_t)r->n_ctx * p->row_bytes + 255) / 256 * 256;
            if (p->type != KV_FP8) continue;
            p->scale = base ? (float *)(base + bytes) : NULL;
            bytes += ((size_t)r->n_ctx * (size_t)p->n_group * sizeof(float) + 255) / 256 * 256;
        }
        if (base) r->kv[il] = y;
    }
    return bytes;
}

/* A message in why (ERR_MAX) if the kernels cannot run this model or part of one. */
static void gpu_refuses(const struct model *m, enum kv_type kv, char *why) {
    const int dk = m->kv_lora ? m->kv_lora + m->rope_dim : m->head_k, dv = m->kv_lora ? m->kv_lora : m->head_v;
    const int row = m->n_embd > m->q_lora ? m->n_embd : m->q_lora;
    if (kv == KV_F32) fail(why, "--kv f32 is the CPU's; the GPU's cache is fp8 or bf16");
    else if (!cuda_attends(m->kv_lora != 0, dk, dv) || m->head_k > HEAD_MAX || m->head_v > HEAD_MAX)
        fail(why, "attention with keys of %d and values of %d is not supported on a GPU; use --cpu", dk, dv);
    else if (row > NORM_MAX)
        fail(why, "rows of %d values are not supported on a GPU (at most %d); use --cpu", row, NORM_MAX);
    else if (m->n_group > ROUTE_MAX_GROUPS)
        fail(why, "%d routing groups are not supported on a GPU; use --cpu", m->n_group);
    for (int il = -2; il < m->n_layer && !why[0]; il++) {
        const struct weight *w[LAYER_WEIGHTS] = {il == -2 ? &m->embd : &m->output};
        const int n = il < 0 ? 1 : layer_weights(&m->layers[il], w);
        for (int i = 0; i < n && !why[0]; i++)
            if (w[i]->data && !weight_tiles(w[i]))
                fail(why,
                     "%d ranks are too many for this model on GPUs: rank %d would have no part of %s %d; use a smaller "
                     "--tp",
                     m->shard.n_rank, m->shard.rank, il < 0 ? "the output behind layer" : "layer",
                     m->first_layer + (il < 0 ? m->n_layer - 1 : il));
            else if (w[i]->row_bytes > STAGING_BYTES / TILE_ROWS)
                fail(why, "a matrix with rows of %zu bytes (more than %d) is not supported on a GPU; use --cpu",
                     w[i]->row_bytes, STAGING_BYTES / TILE_ROWS);
            else if (w[i]->n_in % 8)
                fail(why, "a matrix with rows of %d weights (not a multiple of 8) is not supported on a GPU; use --cpu",
                     w[i]->n_in);
    }
}

/* Whether NCCL can and shall be used; what was asked for and cannot be is an error. One rank uses it when that is asked for, which
 * tries it out. */
static bool gpu_wants_nccl(struct rank *r, const struct cuda_options *o) {
    const struct shard shard = r->m->shard;
    const char *multi = getenv("NCCL_MULTI_RANK_GPU_ENABLE"), *lacks = NULL;
    const int version = cuda_nccl();
    bool twice = false;
    for (int i = 0; i < shard.n_rank * shard.n_stage; i++) /* all stages do the same */
        for (int k = 0; k < i; k++) twice |= o->device[i] == o->device[k];
    if (o->allreduce == ALLREDUCE_ONESHOT || (shard.n_rank == 1 && o->allreduce == ALLREDUCE_AUTO)) return false;
    if (!version) lacks = "this program was built without NCCL";
    else if (twice && (version < 23000 || !multi || strcmp(multi, "1") != 0))
        lacks = "NCCL does not run two ranks on one GPU";
    if (lacks && o->allreduce == ALLREDUCE_NCCL) rank_fail(r, "--allreduce nccl: %s", lacks);
    return !lacks;
}

void gpu_full(struct rank *r, size_t bytes, const char *what) {
    struct gpu_facts f;
    cuda_facts(r->device, &f, false);
    rank_fail(
        r,
        "out of memory: %s need %.2f GiB, %.2f of %.2f GiB are free; a smaller -c, --kv fp8 or fewer experts need "
        "less; --cpu needs none",
        what, (double)bytes / 0x1p30, (double)f.free / 0x1p30, (double)f.total / 0x1p30);
}

/* What its GPU says now; an error of the rank if it does not. */
static struct gpu_facts rank_facts(struct rank *r) {
    struct gpu_facts f;
    const char *why = cuda_facts(r->device, &f, false);
    if (why) rank_fail(r, "asking for its chip and memory: %s", why);
    return f;
}

int attn_splits(int n_sm, int n_head_blocks) {
    const int n = 2 * n_sm / n_head_blocks;
    return n < 1 ? 1 : n > SPLITS_MAX ? SPLITS_MAX : n;
}

/* What the chip and the options make of a rank. */
static void gpu_choose(struct rank *r, const struct cuda_options *o) {
    const struct model *m = r->m;
    const struct gpu_facts f = rank_facts(r);
    bool declared = false;
    gpu_name(r->name, r->device, &f);
    r->n_sm = f.n_sm;
    for (int il = 0; il < m->n_layer; il++) declared |= m->layers[il].n_expert && m->layers[il].gate.has_input_scale;
    /* PTX that the driver compiles for such a chip has none of these products */
    const bool can4 = f.major == 12 && gpu_image(f.major, f.minor)[0] != 'P';
    if (o->moe_act == MOE_ACT_FP4 && !can4)
        rank_fail(r,
                  "--moe-act fp4 needs a chip with FP4 products (compute capability 12) and a program that was "
                  "built for it; the chip has %d, the program is for: %s",
                  f.major, cuda_targets());
    r->sizes.w4a4 = can4 && (o->moe_act == MOE_ACT_FP4 || (o->moe_act == MOE_ACT_AUTO && declared));
    if (r->sizes.w4a4)
        snprintf(r->name + strlen(r->name), sizeof r->name - strlen(r->name), ", experts' prefill in FP4");
    r->sizes.splits = o->kv_splits ? int_min(o->kv_splits, SPLITS_MAX)
                                   : attn_splits(f.n_sm, m->kv_lora ? (m->n_head + 15) / 16 : m->n_head_kv);
    r->sizes.nccl = gpu_wants_nccl(r, o), r->sizes.stats = o->stats;
}

/* The rows of a part of a matrix, as many as there are, to a stage; by all threads. */
static void gpu_staging_rows(const struct weight *w, const struct repack *k, int rows, uint8_t *out) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < k->n_e * 16; i++) { /* sixteenths of an expert, so that one alone is shared out too */
        const int from = rows * (i % 16) / 16, to = rows * (i % 16 + 1) / 16;
        uint8_t *row = out + ((size_t)(i / 16) * (size_t)rows + (size_t)from) * k->row_bytes;
        const uint8_t *in =
            w->data + (size_t)(k->e0 + i / 16) * w->expert_bytes + (size_t)(k->rt0 * TILE_ROWS + from) * w->row_bytes;
        if (k->row_bytes == w->row_bytes) memcpy(row, in, (size_t)(to - from) * k->row_bytes);
        else /* some of the columns */
            for (int n = to - from; n-- > 0; row += k->row_bytes, in += w->row_bytes) memcpy(row, in, k->row_bytes);
    }
}

/* The rows of a matrix to its copy; k: how they are stored. Invented ones are made once per format and repacked again and again. */
static void gpu_upload_rows(struct rank *r, const struct weight *w, struct repack k) {
    const size_t expert = (size_t)w->n_out * k.row_bytes;
    const bool whole = expert <= STAGING_BYTES, synthesize = r->m->synthetic;
    const int n_rt = (w->n_out + TILE_ROWS - 1) / TILE_ROWS, n_e = whole ? (int)(STAGING_BYTES / expert) : 1;
    const int step = whole ? n_rt : (int)(STAGING_BYTES / (k.row_bytes * TILE_ROWS));
    for (k.e0 = 0; k.e0 < w->n_expert; k.e0 += n_e)
        for (k.rt0 = 0; k.rt0 < n_rt && !r->failed; k.rt0 += step) {
            const int rows = int_min(step * TILE_ROWS, w->n_out - k.rt0 * TILE_ROWS);
            const int stage = synthesize ? (int)weight_format(w->type) : r->staging_next++ % 2;
            size_t bytes = 0; /* what is new in the stage */
            k.n_e = int_min(w->n_expert - k.e0, n_e), k.n_rt = int_min(n_rt - k.rt0, step);
            if (!synthesize || !(r->filled >> stage & 1)) {
                uint8_t *out = cuda_staging(r, stage);
                uint64_t rng = 42;
                if (!out) return;
                bytes = synthesize ? STAGING_BYTES : (size_t)k.n_e * (size_t)rows * k.row_bytes;
                if (synthesize) synth_fill(out, bytes, w->type, false, &rng);
                else gpu_staging_rows(w, &k, rows, out);
                r->filled |= 1u << stage;
            }
            cuda_repack(r, w, k, stage, bytes);
        }
}

void gpu_upload_matrix(struct rank *r, const struct weight *w, const char *what) {
    const bool mx = w->type == GGUF_MXFP4;
    struct repack k = {.type = w->type, .row_bytes = gguf_row_bytes(w->type, (size_t)w->n_in), .shift = mx ? 116 : 8};
    if (!cuda_matrix(r, w, what)) return;
    for (int tries = 0; !r->failed; tries++) {
        uint32_t range[2];
        float top;
        k.factor = ldexpf(1, k.shift);
        k.unit = mx                      ? ldexpf(128, k.shift - 127)
                 : w->type == GGUF_NVFP4 ? 128
                 : w->type == GGUF_Q8_0  ? 1
                                         : 1 / k.factor;
        gpu_upload_rows(r, w, k);
        if (w->type == GGUF_NVFP4 || w->type == GGUF_Q8_0 || !cuda_range(r, range)) return;
        const int low = 255 - (int)range[1], high = (int)range[0];
        memcpy(&top, range, sizeof top);
        if (mx ? !high || (high - k.shift <= 8 && low - k.shift >= -9) : ldexpf(top, k.shift) <= 65504) return;
        if (tries && mx)
            rank_fail(r, "%s: MXFP4 exponents from %d to %d, 18 octaves are supported; use --cpu", what, low, high);
        else if (tries) rank_fail(r, "%s: a weight is %g, only finite ones are supported", what, (double)top);
        k.shift = mx ? high - 8 : 14 - ilogbf(top);
    }
}

static void gpu_upload_router(struct rank *r, const struct weight *w) {
    const size_t n_in = (size_t)w->n_in, n = (size_t)w->n_out * n_in;
    float *rows = NULL;
    if (!router_halves(w)) rows = xcalloc(n + 1, sizeof *rows);
    for (int i = 0; i < w->n_out && rows; i++)
        gguf_dequantize_row(w->type, w->data + (size_t)i * w->row_bytes, rows + (size_t)i * n_in, n_in);
    for (size_t i = 0; w->scale && i < n; i++) rows[i] *= w->scale[0];
    cuda_vector(r, w->data, rows ? (const void *)rows : w->data, n * (rows ? sizeof *rows : 2), "routers");
    if (rows) cuda_sync(r, "routers"), free(rows);
}

static void gpu_upload_floats(struct rank *r, const float *x, int n, const char *what) {
    cuda_vector(r, x, x, (size_t)n * sizeof *x, what);
}

/* Copies every tensor that a forward uses. */
static void gpu_upload(struct rank *r, void (*progress)(double, double)) {
    const struct model *m = r->m;
    const struct weight *w[LAYER_WEIGHTS];
    const struct gpu_facts f = rank_facts(r);
    char what[64];
    double total = (double)(weight_gpu_bytes(&m->embd, true) + weight_gpu_bytes(&m->output, true)), done = 0;
    for (int il = 0; il < m->n_layer; il++)
        for (int i = layer_weights(&m->layers[il], w); i-- > 0;)
            if (w[i] != &m->layers[il].router) total += (double)weight_gpu_bytes(w[i], true);
    if (!r->failed && total > (double)f.free) /* of several ranks on one GPU some may have begun: theirs is not free */
        rank_fail(r, "the weights take %.2f GiB, %.2f of %.2f GiB are free: prune experts, or --cpu", total / 0x1p30,
                  (double)f.free / 0x1p30, (double)f.total / 0x1p30);
    if (m->embd.data) gpu_upload_matrix(r, &m->embd, "token_embd");
    if (m->output.data) gpu_upload_matrix(r, &m->output, "output");
    gpu_upload_floats(r, m->output_norm, m->n_embd, "norms");
    for (int il = 0; il < m->n_layer && !r->failed; il++) {
        const struct layer *layer = &m->layers[il];
        const struct {
            const float *x;
            int n;
        } floats[] = {{layer->attn_norm, m->n_embd},        {layer->ffn_norm, m->n_embd},
                      {layer->q_norm, m->head_k},           {layer->k_norm, m->head_k},
                      {layer->q_a_norm, m->q_lora},         {layer->kv_a_norm, m->kv_lora},
                      {layer->router_bias, layer->n_expert}};
        snprintf(what, sizeof what, "layer %d", il);
        for (int i = 0, n = layer_weights(layer, w); i < n; i++) {
            if (w[i] == &layer->router) {
                gpu_upload_router(r, w[i]);
                continue;
            }
            gpu_upload_matrix(r, w[i], what);
            done += (double)weight_gpu_bytes(w[i], true);
            if (progress) progress(done, total);
        }
        for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
            gpu_upload_floats(r, floats[i].x, floats[i].n, "norms");
    }
    if (progress) progress(total, total);
}

/* Tokens of a forward and of the context that fit beside the weights, the same for all ranks. */
static void gpu_fit(struct rank *r, const struct cuda_options *o) {
    const struct model *m = r->m;
    const size_t per = kv_token_bytes(m, r->kv_type);
    size_t sharers = 0;
    if (!rank_agree(r)) return; /* all weights are there */
    if (r->sizes.nccl) cuda_nccl_init(r);
    const struct gpu_facts f = rank_facts(r);
    for (int i = 0; i < m->shard.n_rank * m->shard.n_stage; i++) sharers += o->device[i] == r->device;
    const int want = o->n_ctx ? o->n_ctx : m->n_ctx_train;
    r->shared = sharers > 1;
    r->n_ctx = want, r->chunk = gpu_chunk(m, want, f.total / sharers, o->stats);
    r->bytes = gpu_bytes(m, r->chunk, o->stats);
    const size_t room = f.free / sharers, keep = r->bytes + o->reserve / sharers + gpu_rounding(m),
                 fit = room > keep ? (room - keep) / per : 0;
    if (!o->n_ctx && fit < (size_t)want) r->n_ctx = (int)(fit / 256 * 256);
    if (!r->failed && r->n_ctx < 256 && r->n_ctx < want)
        rank_fail(r, "no room for a context: %.2f GiB are free after the weights, activations take %.2f GiB",
                  (double)room / 0x1p30, (double)r->bytes / 0x1p30);
    rank_agree(r);
    r->sizes.chunk = r->chunk;
    r->kv_bytes = per * (size_t)r->n_ctx;
}

/* Whether all these GPUs can write to each other's memory, and shall. */
static bool gpus_peers(const int *device, int n) {
    const char *off = getenv("NCCL_P2P_DISABLE");
    bool all = !off || !*off || !strcmp(off, "0");
    for (int i = 0; i < n * n && all; i++)
        all = device[i / n] == device[i % n] || cuda_peer(device[i / n], device[i % n]);
    return all;
}

/* Memory that the others may write to, and theirs. */
static void gpu_link(struct rank *r, const int *device, bool peers) {
    static const char what[] = "what other ranks send";
    const struct shard shard = r->m->shard;
    const int n = shard.n_rank * shard.n_stage;
    struct {
        uint8_t *area;
        struct heartbeat *heartbeat;
    } mine, all[MAX_RANKS];
    for (int i = 0; i < n && peers && !r->failed; i++)
        if (device[i] != r->device) cuda_reach(r, device[i]);
    const size_t bytes = mailbox_layout(&r->mailbox[r->index], NULL, r->m, shard, r->sizes);
    mine.area = peers ? cuda_memory(r, bytes, what) : cuda_host_memory(r, bytes, "host memory");
    mine.heartbeat = cuda_host_memory(r, sizeof *mine.heartbeat, "host memory");
    r->sequence = cuda_memory(r, sizeof *r->sequence, what);
    cuda_sync(r, "starting"); /* the flags are 0 before anybody knows where they are */
    rank_all_gather(r, &mine, all, sizeof mine);
    if (!rank_agree(r)) return;
    for (int i = 0; i < n; i++) {
        const struct shard other = {i % shard.n_rank, shard.n_rank, i / shard.n_rank, shard.n_stage};
        mailbox_layout(&r->mailbox[i], all[i].area, r->m, other, r->sizes);
        r->heartbeat[i] = all[i].heartbeat;
    }
}

/* What ranks push must arrive: there are machines where writes between GPUs are allowed and get lost. */
static void gpu_check_all_reduce(struct rank *r) {
    static const char what[] = "a first sum";
    const int n = r->m->n_embd, n_rank = r->m->shard.n_rank;
    const size_t bytes = (size_t)n * sizeof(float);
    float *x = xmalloc(bytes), *delta = xmalloc(bytes);
    for (int turn = 0; turn < 2 && !r->failed; turn++) { /* both halves of the slots */
        int wrong = 0;
        for (int i = 0; i < n; i++) x[i] = 0, delta[i] = (float)((r->m->shard.rank + 1) * (1 + i % 97 + turn));
        r->n_tok = 1;
        cuda_copy(r, r->act[A_X], x, bytes, what);
        cuda_copy(r, r->act[A_OUT], delta, bytes, what);
        r->ops->all_reduce_add_rmsnorm(r, A_X, A_OUT, NULL, A_H);
        cuda_copy(r, x, r->act[A_X], bytes, what);
        if (!cuda_sync(r, what)) break;
        for (int i = 0; i < n; i++) wrong += x[i] != (float)(n_rank * (n_rank + 1) / 2 * (1 + i % 97 + turn));
        if (wrong)
            rank_fail(r,
                      "%d of %d numbers from other GPUs came wrong: writes between GPUs are broken here (IOMMU?); "
                      "NCCL_P2P_DISABLE=1 goes through the host",
                      wrong, n);
    }
    free(x), free(delta);
}

static void gpu_run_all_reduces(struct rank *r, void *runs) {
    for (int i = *(const int *)runs; i > 0 && !r->failed; i--)
        r->ops->all_reduce_add_rmsnorm(r, A_X, A_OUT, r->m->output_norm, A_H);
}

/* Seconds of a sum of n_tok rows of the ranks of a stage; all of them call it. 0: that way does not exist. */
static double gpu_all_reduce_seconds(struct rank *r, int n_tok, bool nccl) {
    int warm = 3, runs = 20;
    bool *few = &r->by_nccl[n_tok <= DECODE_MAX_TOKENS ? n_tok : 0], before = *few;
    if (n_tok > r->chunk) return 0;
    if (nccl ? !r->sizes.nccl : n_tok > DECODE_MAX_TOKENS && r->sizes.nccl) return 0;
    *few = nccl, r->n_tok = n_tok;
    gpu_run_all_reduces(r, &warm);
    const double t = cuda_seconds(r, gpu_run_all_reduces, &runs, "timing sums") / runs;
    *few = before;
    return t;
}

/* For each number of tokens the faster way to add, by the slowest rank of all; both give the same bits. */
static void gpu_choose_all_reduce(struct rank *r, const struct cuda_options *o, bool peers) {
    enum { SIZES = 5 };
    static const int size[SIZES] = {1, 2, 4, 8, DECODE_MAX_TOKENS};
    const struct shard shard = r->m->shard;
    const char *way = peers ? "the memory of GPUs" : "the memory of the host (the GPUs cannot reach each other)";
    const bool wanted = r->sizes.nccl, both = wanted && o->allreduce == ALLREDUCE_AUTO;
    float us[SIZES][2] = {{0}}, all[MAX_RANKS][SIZES][2];
    char list[64] = "";
    for (int i = 0; i < SIZES && (shard.n_rank > 1 || wanted); i++)
        for (int k = 0; k < 2; k++)
            if (both || (k == wanted && i % (SIZES - 1) == 0))
                us[i][k] = (float)(1e6 * gpu_all_reduce_seconds(r, int_min(size[i], r->chunk), k));
    rank_all_gather(r, us, all, sizeof us);
    for (int i = 0, n = 1; i < SIZES; i++) {
        float worst[2] = {0};
        for (int k = 0; k < shard.n_rank * shard.n_stage; k++)
            for (int w = 0; w < 2; w++) worst[w] = fmaxf(worst[w], all[k][i][w]);
        const bool nccl = both ? worst[1] < worst[0] : wanted;
        for (; n <= size[i]; n++) r->by_nccl[n] = nccl;
        if (i % (SIZES - 1) == 0)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d: %s %.1f us", i ? ", " : "", size[i],
                     nccl ? "NCCL" : "own", (double)worst[nccl]);
    }
    if (shard.n_rank == 1 && !wanted) snprintf(r->link, sizeof r->link, "stages hand over through %s", way);
    else if (!wanted) snprintf(r->link, sizeof r->link, "sums through %s (tokens: %s)", way, list);
    else
        snprintf(r->link, sizeof r->link, "sums: NCCL %d.%d for many tokens, for few %s (tokens: %s); through %s",
                 cuda_nccl() / 10000, cuda_nccl() / 100 % 100, both ? "the faster" : "as asked", list, way);
}

/* 0, or -1 with a message. */
static int gpu_rank_init(struct rank *r, const struct model *m, const struct cuda_options *o, char *err) {
    const int n = m->shard.n_rank * m->shard.n_stage, found = cuda_device_count(err);
    memset(r, 0, sizeof *r);
    r->m = m, r->kv_type = o->kv, r->pg = o->pg, r->index = o->index, r->device = o->device[o->index], r->err = err;
    act_widths(m, r->width);
    if (found) err[0] = 0;
    if (found && r->device >= found) fail(err, "there is no GPU %d; found: %d", r->device, found);
    if (!err[0]) gpu_refuses(m, o->kv, err);
    r->failed = err[0] != 0;
    cuda_open(r);
    if (!r->failed) gpu_choose(r, o);
    if (!r->failed) gpu_upload(r, o->progress);
    if (!r->failed) cuda_uploaded(r);
    if (o->stats)
        r->stats = cuda_memory(r, (size_t)m->n_layer * (size_t)m->n_expert_max * STATS * sizeof *r->stats, "scores");
    if (o->in_sum2) r->in_sum2 = cuda_memory(r, in_sum2_before(m, m->n_layer) * sizeof *r->in_sum2, "squares");
    gpu_fit(r, o);
    if (!r->failed) {
        r->kv = xcalloc((size_t)m->n_layer, sizeof *r->kv), r->work = xcalloc((size_t)m->n_ids, sizeof *r->work);
        r->tokens = xcalloc((size_t)r->chunk, sizeof *r->tokens);
        cuda_allocate(r);
        if (n > 1 || o->allreduce == ALLREDUCE_NCCL) {
            const bool peers = gpus_peers(o->device, n);
            gpu_link(r, o->device, peers);
            if (!r->failed && m->shard.n_rank > 1) gpu_check_all_reduce(r);
            if (rank_agree(r)) gpu_choose_all_reduce(r, o, peers);
        }
        r->free_bytes = rank_facts(r).free;
    }
    if (rank_agree(r)) return r->err = NULL, 0;
    r->ops->close(r);
    return -1;
}
#endif

/* ============================================================================================================
 * Families
 *
 * One straight line per family. The batch (tokens, position) is in the rank.
 * ============================================================================================================ */

/* The second half of every layer: x += attention's result, then the feed-forward's goes to A_OUT. What a rank has there is a
 * part of a sum over the ranks. */
static void forward_ffn(struct rank *r, int il) {
    const struct ops *o = r->ops;
    const struct layer *layer = &r->m->layers[il];
    o->all_reduce_add_rmsnorm(r, A_X, A_OUT, layer->ffn_norm, A_H);
    if (layer->n_expert) o->moe_ffn(r, il, A_H, A_OUT);
    else o->ffn(r, il, A_H, A_OUT);
}

/* Qwen3-MoE: grouped-query attention with head norms, softmax router. */
static void forward_qwen3moe(struct rank *r) {
    const struct ops *o = r->ops;
    o->embed(r, A_X);
    for (int il = 0; il < r->m->n_layer; il++) {
        const struct layer *layer = &r->m->layers[il];
        if (!il) o->rmsnorm(r, A_X, layer->attn_norm, A_H);
        else o->all_reduce_add_rmsnorm(r, A_X, A_OUT, layer->attn_norm, A_H);
        o->linear3(r, A_H, (const struct weight *const[]){&layer->wq, &layer->wk, &layer->wv},
                   (const enum act[]){A_Q, A_K, A_V});
        o->rope_store_kv(r, il, A_Q, A_K, A_V);
        o->attention(r, il, A_Q, A_ATT);
        o->linear(r, &layer->wo, A_ATT, A_OUT);
        forward_ffn(r, il);
    }
    o->final_reduce(r, A_X, A_OUT);
}

/* DeepSeek-V3 and Kimi-K2: multi-head latent attention, sigmoid router with groups, a shared expert. */
static void forward_deepseek2(struct rank *r) {
    const struct ops *o = r->ops;
    o->embed(r, A_X);
    for (int il = 0; il < r->m->n_layer; il++) {
        const struct layer *layer = &r->m->layers[il];
        if (!il) o->rmsnorm(r, A_X, layer->attn_norm, A_H);
        else o->all_reduce_add_rmsnorm(r, A_X, A_OUT, layer->attn_norm, A_H);
        bool low = r->m->q_lora != 0; /* the query comes through a low rank */
        o->linear3(r, A_H, (const struct weight *const[]){&layer->wkv_a, low ? &layer->wq_a : &layer->wq, NULL},
                   (const enum act[]){A_K, low ? A_QA : A_Q, A_OUT});
        if (low) {
            o->rmsnorm(r, A_QA, layer->q_a_norm, A_QA);
            o->linear(r, &layer->wq_b, A_QA, A_Q);
        }
        o->mla_store(r, il, A_Q, A_K);
        o->mla_attention(r, il, A_Q, A_ATT);
        o->linear(r, &layer->wo, A_ATT, A_OUT);
        forward_ffn(r, il);
    }
    o->final_reduce(r, A_X, A_OUT);
}

static void forward(struct rank *r) {
    if (r->ops->begin(r)) return;
    if (r->m->arch == ARCH_QWEN3MOE) forward_qwen3moe(r);
    else forward_deepseek2(r);
    r->ops->end(r);
}
/* ============================================================================================================
 * Sampler
 *
 * Repeat penalty, then top-k, top-p, min-p, temperature: the order of llama.cpp. Works in arrays laid out at start.
 * ============================================================================================================ */

static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Larger logits first, lower ids first among equals. */
static bool candidate_before(struct candidate a, struct candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

static void heap_sink(struct candidate *h, int n, int i) {
    for (int c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && candidate_before(h[c + 1], h[c])) c++;
        if (!candidate_before(h[c], h[i])) return;
        struct candidate t = h[c];
        h[c] = h[i], h[i] = t;
    }
}

/* Moves the best of the heap's first n - popped candidates behind them: the i-th best ends at heap[n - 1 - i]. */
static struct candidate candidates_pop(struct candidate *heap, int n, int popped) {
    int last = n - 1 - popped;
    struct candidate best = heap[0];
    heap[0] = heap[last], heap[last] = best;
    heap_sink(heap, last, 0);
    return best;
}

/* Chooses one of the ids 0..n-1 by their logits; work (n). recent: the n_recent latest tokens; uniform: a draw from [0, 1).
 * Top-p is of the mass that top-k leaves, and like min-p looks at temperature 1. */
int32_t sampling_choose(const struct sampling *o, struct candidate *work, int n, const float *logits,
                        const int32_t *recent, int n_recent, double uniform) {
    bool penalise = o->repeat_penalty != 1.0f && n_recent > 0, greedy = o->greedy || o->temp <= 0;
    if (!penalise && greedy) return argmax(logits, n);
    for (int i = 0; i < n; i++) work[i] = (struct candidate){logits[i], i};
    for (int i = 0; penalise && i < n_recent; i++)
        if (recent[i] < n) { /* from the original value: a token that occurs twice is punished once */
            float v = logits[recent[i]];
            work[recent[i]].logit = v > 0 ? v / o->repeat_penalty : v * o->repeat_penalty;
        }
    for (int i = n / 2 - 1; i >= 0; i--) heap_sink(work, n, i);
    float top = work[0].logit;
    if (greedy) return work[0].id;
    int limit = o->top_k > 0 && o->top_k < n ? o->top_k : n, popped = 0, kept = 0;
    double total = 0, mass = 0, sum = 0, at = 0;
    if (limit < n)
        for (; popped < limit; popped++) total += exp((double)(candidates_pop(work, n, popped).logit - top));
    else if (o->top_p < 1.0f)
        for (int i = 0; i < n; i++) total += exp((double)(work[i].logit - top));
    const struct candidate *best = work + n - 1; /* best[-i] is the i-th */
    for (; kept < limit; kept++) {
        if (kept == popped) candidates_pop(work, n, popped++);
        double rel = (double)(best[-kept].logit - top);
        if (kept &&
            ((o->top_p < 1.0f && mass >= (double)o->top_p * total) || (o->min_p > 0 && exp(rel) < (double)o->min_p)))
            break;
        mass += exp(rel);
    }
    for (int i = 0; i < kept; i++) sum += exp((double)(best[-i].logit - top) / (double)o->temp);
    double want = uniform * sum;
    for (int i = 0; i < kept; i++)
        if ((at += exp((double)(best[-i].logit - top) / (double)o->temp)) > want) return best[-i].id;
    return best[1 - kept].id;
}

/* ============================================================================================================
 * Session
 *
 * One timeline of tokens with its KV state: tokens[0..n_past) are in the cache, and nothing else is. Every turn, undo,
 * load or prompt builds the token list it wants and calls session_sync, which keeps the common prefix and computes the
 * rest; a cache that does not fit the tokens cannot come about. A failed or interrupted sync leaves a shorter timeline.
 * ============================================================================================================ */

struct session {
    const struct model *m;
    struct process_group pg;
    struct rank *r;  /* of its ranks the one that has the logits */
    int32_t *tokens; /* (n_ctx) */
    int n_past, n_ctx;
    int sync_tokens;     /* of the latest sync: tokens computed, */
    double sync_seconds; /* and the time it took */
};

/* An empty timeline for n_stage * n_rank ranks, each started by `start`. 0, or -1 with a message. */
static int session_open(struct session *s, const struct model *m, int n_rank, int n_stage, rank_starter *start,
                        void *arg, char *err) {
    memset(s, 0, sizeof *s);
    if (pg_open(&s->pg, m, n_rank, n_stage, start, arg, err)) return -1;
    s->m = m, s->r = &s->pg.ranks[s->pg.root], s->n_ctx = s->r->n_ctx;
    s->tokens = xcalloc((size_t)s->n_ctx, sizeof *s->tokens);
    return 0;
}

struct cpu_options {
    const struct kernels *k;
    int n_threads, n_ctx; /* of all ranks together; tokens */
    enum kv_type kv;
    bool stats, in_sum2; /* collect them */
};

static int cpu_rank_start(struct rank *r, const struct model *shard, void *arg, char *err) {
    const struct cpu_options *o = arg;
    int n = shard->shard.n_rank * shard->shard.n_stage;
    (void)err; /* what fails ends the program */
    rank_init(r, shard, o->k, o->n_threads > n ? o->n_threads / n : 1, o->n_ctx, o->kv);
    if (o->stats) rank_stats_init(r, o->in_sum2);
    return 0;
}

/* A session of n_stage * n_rank ranks on the CPU. */
static void session_init(struct session *s, const struct model *m, int n_rank, int n_stage, struct cpu_options o) {
    char err[ERR_MAX];
    if (session_open(s, m, n_rank, n_stage, cpu_rank_start, &o, err)) die("%s", err);
}

static void session_free(struct session *s) {
    pg_close(&s->pg);
    free(s->tokens);
}

struct batch_job {
    const int32_t *ids; /* (n) */
    int n, pos;
};

static void rank_forward(struct rank *r, void *arg) {
    const struct batch_job *b = arg;
    alloc_guard_begin("a forward pass");
    memcpy(r->tokens, b->ids, (size_t)b->n * sizeof *b->ids);
    r->pos = b->pos, r->n_tok = b->n;
    forward(r);
    alloc_guard_end();
}

/* Computes n <= chunk tokens behind the timeline; no logits. */
static void session_forward(struct session *s, const int32_t *ids, int n) {
    struct batch_job b = {ids, n, s->n_past};
    memcpy(s->tokens + s->n_past, ids, (size_t)n * sizeof *ids);
    pg_run(&s->pg, rank_forward, &b);
    s->n_past += n;
}

struct rows_job {
    int first, n;
};

static void rank_logits(struct rank *r, void *arg) {
    const struct rows_job *j = arg;
    if (r->m->shard.stage == r->m->shard.n_stage - 1) r->ops->logits(r, j->first, j->n);
}

/* Logits of rows first..first+n-1 of the latest forward, n <= LOGIT_ROWS. */
static void session_head(struct session *s, int first, int n) {
    pg_run(&s->pg, rank_logits, &(struct rows_job){first, n});
}

static void rank_wait(struct rank *r, void *arg) {
    (void)arg;
    r->ops->wait(r);
}

static void session_wait(struct session *s) { pg_run(&s->pg, rank_wait, NULL); }

struct stats_job {
    const struct model *m; /* the whole */
    double *stats;
    float *in_sum2;
};

static void rank_read_stats(struct rank *r, void *arg) {
    const struct stats_job *j = arg;
    const int il = r->m->first_layer;
    r->ops->read_stats(r, j->stats + (size_t)il * (size_t)j->m->n_expert_max * STATS,
                       j->in_sum2 ? j->in_sum2 + in_sum2_before(j->m, il) : NULL);
}

/* stats (n_layer, n_expert_max, STATS) and in_sum2 (in_sum2_before(m, n_layer); NULL: not wanted) of all layers since the start.
 * Only for sessions that collect, with one rank a stage. */
static void session_stats(struct session *s, double *stats, float *in_sum2) {
    pg_run(&s->pg, rank_read_stats, &(struct stats_job){s->m, stats, in_sum2});
}

/* One token: forward and logits. */
static void session_decode(struct session *s, int32_t id) {
    session_forward(s, &id, 1);
    session_head(s, 0, 1);
}

/* (n_vocab) behind the last token, after a sync or decode. */
static const float *session_logits(struct session *s) { return s->r->ops->read_logits(s->r, 0); }

/* The next token, chosen by those logits. */
static int32_t session_sample(struct session *s, const struct sampling *o, uint64_t *rng) {
    int n = s->n_past < PENALTY_WINDOW ? s->n_past : PENALTY_WINDOW;
    double uniform = o->greedy || o->temp <= 0 ? 0 : rng_uniform(rng);
    s->r->ops->sample(s->r, o, s->tokens + s->n_past - n, n, uniform);
    return s->r->ops->read_token(s->r);
}

static void rank_measure(struct rank *r, void *arg) { ((struct rates *)arg)[r->index] = r->ops->measure(r); }

/* What all ranks can do together, measured at once. */
static struct rates session_measure(struct session *s) {
    struct rates each[MAX_RANKS], sum = {0, 0};
    pg_run(&s->pg, rank_measure, each);
    for (int i = 0; i < s->pg.n; i++) sum.bytes += each[i].bytes, sum.mma += each[i].mma;
    return sum;
}

/* What it runs on. */
static const char *session_name(const struct session *s, char out[192]) {
    if (s->pg.n == 1) return s->r->name;
    snprintf(out, 192, "%d ranks in %d stage%s, one on %s", s->pg.n, s->pg.n_stage, s->pg.n_stage > 1 ? "s" : "",
             s->r->name);
    return out;
}

/* Of all ranks. */
static uint64_t session_kv_bytes(const struct session *s) {
    uint64_t sum = 0;
    for (int i = 0; i < s->pg.n; i++) sum += s->pg.ranks[i].kv_bytes;
    return sum;
}

/* Bytes of cache that `more` further tokens of context would take. */
static uint64_t session_more_bytes(const struct session *s, int more) {
    return (uint64_t)more * kv_token_bytes(s->m, s->r->kv_type);
}

/* What helps against a full context, for a sentence that goes on with -c. */
static const char *context_remedy(void) { return term.dialogue ? "/undo, /clear or restart with" : "restart with"; }

/* -1 when n tokens do not fit, with a message that says what would help. */
static int session_fits(const struct session *s, int64_t n, char *err) {
    char a[32], b[32], c[32];
    if (n <= s->n_ctx) return 0;
    int more = (int)(n - s->n_ctx < INT32_MAX ? n - s->n_ctx : INT32_MAX);
    return fail(err, "the context is full: %s tokens are needed, %s fit; %s -c %lld (needs %s more)",
                with_commas((uint64_t)n, a), with_commas((uint64_t)s->n_ctx, b), context_remedy(), (long long)n,
                with_unit((double)session_more_bytes(s, more), c));
}

static void prefill_progress(int done, int n, double seconds) {
    char a[32], b[32];
    double rate = done / seconds;
    status_line("reading %s of %s tokens  %.0f %%  %.0f tok/s  %.0f s left", with_commas((uint64_t)done, a),
                with_commas((uint64_t)n, b), 100.0 * done / n, rate, (n - done) / rate);
}

enum sync_result { SYNC_DONE, SYNC_INTERRUPTED, SYNC_FAILED };

/* Makes the timeline equal ids[0..n), n >= 1, and the logits those behind the last one. Ctrl-C is looked at between chunks. */
static enum sync_result session_sync(struct session *s, const int32_t *ids, int n, char *err) {
    int keep = 0, done = 0;
    if (n < 1) return fail(err, "the prompt has no tokens"), SYNC_FAILED;
    if (session_fits(s, n, err)) return SYNC_FAILED;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->m->n_vocab)
            return fail(err, "token id %d is not in the vocabulary of %d", ids[i], s->m->n_vocab), SYNC_FAILED;
    while (keep < n - 1 && keep < s->n_past && s->tokens[keep] == ids[keep])
        keep++; /* the last one is computed for its logits */
    s->n_past = keep;
    double t0 = now_seconds(), shown = t0 + 0.4;
    while (s->n_past < n) {
        int c = n - s->n_past < s->r->chunk ? n - s->n_past : s->r->chunk;
        if (interrupted) break;
        session_forward(s, ids + s->n_past, c);
        done += c;
        double t = now_seconds();
        if (term.err_moves && t - shown > 0.1 && s->n_past < n) prefill_progress(done, n - keep, t - t0), shown = t;
    }
    if (shown > t0 + 0.4) status_line("%s", "");
    s->sync_tokens = done, s->sync_seconds = now_seconds() - t0;
    if (s->n_past < n) return SYNC_INTERRUPTED;
    session_head(s, s->r->n_tok - 1, 1);
    session_wait(s);
    s->sync_seconds = now_seconds() - t0;
    return SYNC_DONE;
}

/* A text on its way through one or two sessions side by side, from an empty timeline on. */
struct prefill {
    struct session *const *sessions; /* (n_session) */
    int n_session;
    /* gets the logits of every position, of each session (n_vocab); NULL: none are computed */
    void (*row)(void *ctx, int pos, const float *const logits[]);
    void (*chunk)(void *ctx, int n); /* called after every chunk, of n tokens; NULL: nothing is */
    void *ctx;
    int ignored; /* so many Ctrl-C do not stop it */
};

/* Runs ids[0..n) through the sessions, whose contexts have room for them. 0, or 1 when interrupted between chunks. */
static int prefill_run(const struct prefill *p, const int32_t *ids, int n) {
    int chunk = n;
    for (int s = 0; s < p->n_session; s++) {
        p->sessions[s]->n_past = 0;
        chunk = int_min(chunk, p->sessions[s]->r->chunk);
    }
    for (int pos = 0; pos < n; pos += chunk) {
        const int n_chunk = int_min(n - pos, chunk);
        if (interrupted > p->ignored) return 1;
        for (int s = 0; s < p->n_session; s++) session_forward(p->sessions[s], ids + pos, n_chunk);
        for (int i = 0; p->row && i < n_chunk; i += LOGIT_ROWS) {
            const int rows = int_min(n_chunk - i, LOGIT_ROWS);
            for (int s = 0; s < p->n_session; s++) session_head(p->sessions[s], i, rows);
            for (int k = 0; k < rows; k++) {
                const float *logits[2] = {NULL};
                for (int s = 0; s < p->n_session; s++)
                    logits[s] = p->sessions[s]->r->ops->read_logits(p->sessions[s]->r, k);
                p->row(p->ctx, pos + i + k, logits);
            }
        }
        if (p->chunk) p->chunk(p->ctx, n_chunk);
    }
    return 0;
}

struct score {
    void (*each)(void *ctx, int pos, const float *logits);
    void *ctx;
};

static void score_row(void *ctx, int pos, const float *const logits[]) {
    const struct score *s = ctx;
    s->each(s->ctx, pos, logits[0]);
}

/* Hands the logits of every position of ids[0..n) to `each`. 0, -1 with a message, or 1 when interrupted. */
static int session_score(struct session *s, const int32_t *ids, int n,
                         void (*each)(void *ctx, int pos, const float *logits), void *ctx, char *err) {
    struct score score = {each, ctx};
    if (session_fits(s, n, err)) return -1;
    return prefill_run(&(struct prefill){.sessions = &s, .n_session = 1, .row = score_row, .ctx = &score}, ids, n);
}

/* What n tokens of one forward use of the layers: bytes of the weights as stored, each once, and weights per token. Of the routed
 * experts the bytes count as many as tokens that choose independently are expected to choose. */
static double layers_use(const struct model *m, int n, double *per_token) {
    double bytes = 0;
    *per_token = 0;
    for (int il = 0; il < m->n_layer; il++) {
        const struct layer *layer = &m->layers[il];
        const struct weight *all[LAYER_WEIGHTS];
        for (int i = 0, n_all = layer_weights(layer, all); i < n_all; i++) {
            const struct weight *w = all[i];
            bool routed = layer->n_expert && (w == &layer->gate || w == &layer->up || w == &layer->down);
            double used = routed ? m->n_expert_used : w->n_expert;
            *per_token += used * w->n_in * w->n_out;
            bytes += (double)w->row_bytes * w->n_out * (routed ? experts_expected(m, layer->n_expert, n) : used);
        }
    }
    return bytes;
}

/* Bytes that a forward of n tokens with logits of each reads: the weights, and the cache of n_past tokens once for all of them. */
static double session_forward_bytes(const struct session *s, int n) {
    double per_token;
    return layers_use(s->m, n, &per_token) + (double)s->m->output.expert_bytes +
           (double)kv_token_bytes(s->m, s->r->kv_type) * s->n_past;
}

/* Multiplications and additions that a forward of n tokens behind n_past others takes with logits of the last one: attention as
 * the model defines it, whatever form of it is computed. */
static double session_forward_ops(const struct session *s, int n) {
    const struct model *m = s->m;
    double per_token, pairs = n * (s->n_past + (n + 1) / 2.0); /* of a query and a key that it sees */
    layers_use(m, n, &per_token);
    return 2 * (per_token * n + (double)m->n_layer * m->n_head * (m->head_k + m->head_v) * pairs +
                (double)m->output.n_in * m->output.n_out);
}

/* ---- the file of a session's state: README, "The format of /save" ---- */

static const char kv_magic[8] = "MOEKV002";

struct kv_header {
    char magic[8];
    uint64_t model_hash;
    uint32_t kv_type, n_layer, n_tokens;
    uint32_t k_row, v_row, k_scales, v_scales; /* bytes per row, scales per row */
    uint32_t pad;
    uint64_t checksum; /* of all that follows */
};
static_assert(sizeof(struct kv_header) == 56, "the header of a saved state is 56 bytes");

/* FNV-1a over words of 64 bits; the last one is filled up with zeros. */
static uint64_t checksum_add(uint64_t sum, const void *p, size_t n) {
    for (size_t at = 0; at < n; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const uint8_t *)p + at, n - at < 8 ? n - at : 8);
        sum = (sum ^ word) * 0x100000001b3u;
    }
    return sum;
}

static struct kv_header session_header(const struct session *s) {
    struct kv_layer whole = kv_layer_make(s->m, s->r->kv_type), *y = &whole;
    struct kv_header h = {.model_hash = s->m->hash,
                          .kv_type = (uint32_t)s->r->kv_type,
                          .n_layer = (uint32_t)s->m->n_layer,
                          .n_tokens = (uint32_t)s->n_past,
                          .k_row = (uint32_t)y->k.row_bytes,
                          .v_row = (uint32_t)y->v.row_bytes,
                          .k_scales = y->k.type == KV_FP8 ? (uint32_t)y->k.n_group : 0,
                          .v_scales = y->v.type == KV_FP8 ? (uint32_t)y->v.n_group : 0,
                          .checksum = HASH_START};
    memcpy(h.magic, kv_magic, sizeof h.magic);
    return h;
}

/* Rows first..first+n-1 of a plane of the whole model's layer il, or their scales, from or to (store) the ranks that have the layer.
 * all (n, row) bytes; part: room for the same. */
static void session_plane(struct session *s, int il, bool v, bool scales, size_t first, size_t n, uint8_t *all,
                          size_t row, uint8_t *part, bool store) {
    for (int i = 0; i < s->pg.n; i++) {
        struct rank *r = &s->pg.ranks[i];
        int own = il - r->m->first_layer, head = v ? r->m->head_v : r->m->head_k;
        if (own < 0 || own >= r->m->n_layer) continue;
        const struct kv_plane *p = v ? &r->kv[own].v : &r->kv[own].k;
        size_t size = scales || p->type == KV_F32 ? 4
                      : p->type == KV_BF16        ? 2
                                                  : 1,
               stride = scales ? (size_t)p->n_group * 4 : p->row_bytes;
        size_t from = r->m->kv_lora ? 0 : (size_t)r->m->first_head_kv * (scales ? 1 : (size_t)head) * size;
        size_t used = (size_t)(scales ? p->n_group : p->width) * size;
        if (store) memset(part, 0, n * stride); /* rows are filled up to 16 bytes */
        for (size_t t = 0; store && t < n; t++) memcpy(part + t * stride, all + t * row + from, used);
        r->ops->kv_copy(r, p, first, n, scales ? NULL : part, scales ? (float *)(void *)part : NULL, store);
        for (size_t t = 0; !store && t < n; t++) memcpy(all + t * row + from, part + t * stride, used);
    }
}

/* Writes or reads (store) what follows the header, and adds it to *sum: n token ids, then per plane all rows and all scales. */
static bool session_body(struct session *s, size_t n, FILE *f, bool store, uint64_t *sum) {
    enum { ROWS = 1024 }; /* a multiple of 8: only a plane's last word can be filled up */
    const struct kv_layer y = kv_layer_make(s->m, s->r->kv_type);
    size_t id = sizeof *s->tokens;
    uint8_t *buf = NULL;
    bool ok = (store ? fread(s->tokens, id, n, f) : fwrite(s->tokens, id, n, f)) == n;
    *sum = checksum_add(*sum, s->tokens, n * id);
    for (int i = 0; ok && i < 4 * s->m->n_layer; i++) {
        const struct kv_plane *p = i & 2 ? &y.v : &y.k;
        bool scales = i & 1;
        size_t row = scales ? (size_t)p->n_group * sizeof(float) : p->row_bytes;
        if (scales && p->type != KV_FP8) continue;
        buf = xrealloc(buf, 2 * ROWS * row);
        if (!store) memset(buf, 0, ROWS * row);
        for (size_t at = 0; ok && at < n; at += ROWS) {
            size_t k = n - at < ROWS ? n - at : ROWS;
            if (store) ok = fread(buf, row, k, f) == k;
            if (ok) session_plane(s, i / 4, i & 2, scales, at, k, buf, row, buf + ROWS * row, store);
            if (!store) ok = fwrite(buf, row, k, f) == k;
            if (ok) *sum = checksum_add(*sum, buf, k * row);
        }
    }
    free(buf);
    return ok;
}

static int session_save(struct session *s, const char *path, char *err) {
    struct kv_header h = session_header(s);
    FILE *f = temp_create(path, 0600, err);
    if (!f) return -1;
    bool whole = fwrite(&h, sizeof h, 1, f) == 1 && session_body(s, h.n_tokens, f, false, &h.checksum) &&
                 !fseek(f, 0, SEEK_SET) && fwrite(&h, sizeof h, 1, f) == 1;
    return temp_finish(f, path, !whole, err);
}

/* The state from a file. -1 leaves an empty timeline and says why the file does not fit; the caller then computes anew. */
static int session_load(struct session *s, const char *path, char *err) {
    struct kv_header h, want = session_header(s);
    struct stat st;
    s->n_past = 0;
    if (file_check(path, &st, err)) return -1;
    FILE *f = fopen(path, "rb");
    if (!f) return fail(err, "cannot open '%s': %s", path, strerror(errno));
    size_t per = sizeof *s->tokens +
                 (size_t)want.n_layer * (want.k_row + want.v_row + sizeof(float) * (want.k_scales + want.v_scales));
    int rc = 0;
    if (fread(&h, sizeof h, 1, f) != 1 || memcmp(h.magic, kv_magic, sizeof kv_magic))
        rc = fail(err, "'%s' is not a saved state of this version", path);
    else if (h.model_hash != want.model_hash) rc = fail(err, "'%s' belongs to another model file", path);
    else if (h.kv_type != want.kv_type) rc = fail(err, "'%s' was saved with another --kv", path);
    else if (h.n_layer != want.n_layer || h.k_row != want.k_row || h.v_row != want.v_row ||
             h.k_scales != want.k_scales || h.v_scales != want.v_scales)
        rc = fail(err, "'%s' has another cache layout", path);
    else if (h.n_tokens > (uint32_t)s->n_ctx)
        rc = fail(err, "'%s' holds %u tokens, the context %d", path, h.n_tokens, s->n_ctx);
    else if ((uint64_t)st.st_size != sizeof h + (uint64_t)per * h.n_tokens)
        rc = fail(err, "'%s' is %lld bytes long, expected %llu", path, (long long)st.st_size,
                  (unsigned long long)(sizeof h + (uint64_t)per * h.n_tokens));
    else if (!session_body(s, h.n_tokens, f, true, &want.checksum)) rc = fail(err, "cannot read '%s'", path);
    else if (want.checksum != h.checksum) rc = fail(err, "'%s' is damaged: its checksum is wrong", path);
    for (uint32_t i = 0; !rc && i < h.n_tokens; i++)
        if (s->tokens[i] < 0 || s->tokens[i] >= s->m->n_vocab)
            rc = fail(err, "'%s' holds the token id %d", path, s->tokens[i]);
    fclose(f);
    if (!rc) s->n_past = (int)h.n_tokens;
    return rc;
}
/* ============================================================================================================
 * Options
 *
 * The settings of a run, and the one table of options that drives the command line, --help and /set. An option that the
 * user does not give stays unset until a model is loaded, because its file may hold a default.
 * ============================================================================================================ */

/* THINK_LOW and above are efforts, which the template gets by name. */
enum think { THINK_AUTO, THINK_ON, THINK_OFF, THINK_LOW, THINK_MEDIUM, THINK_HIGH, THINK_MAX };
enum show_think { SHOW_AUTO, SHOW_ON, SHOW_OFF };

/* The names of the choices, indexed by their enum. */
static const char *const think_names[] = {
    [THINK_AUTO] = "auto",     [THINK_ON] = "on",     [THINK_OFF] = "off", [THINK_LOW] = "low",
    [THINK_MEDIUM] = "medium", [THINK_HIGH] = "high", [THINK_MAX] = "max", NULL};
static const char *const show_think_names[] = {[SHOW_AUTO] = "auto", [SHOW_ON] = "on", [SHOW_OFF] = "off", NULL};
static const char *const kv_names[] = {[KV_BF16] = "bf16", [KV_FP8] = "fp8", [KV_F32] = "f32", NULL};
static const char *const moe_act_names[] = {
    [MOE_ACT_AUTO] = "auto", [MOE_ACT_F16] = "bf16", [MOE_ACT_FP4] = "fp4", NULL};
static const char *const allreduce_names[] = {
    [ALLREDUCE_AUTO] = "auto", [ALLREDUCE_NCCL] = "nccl", [ALLREDUCE_ONESHOT] = "oneshot", NULL};

struct option;

struct settings {
    /* model and prompt; NULL: not given */
    char *model, *prompt, *prompt_file, *system, *system_file, *template_file, *ids;
    bool lines, raw, special, verbose;
    int n_predict; /* tokens of an answer at most; -1: no limit */
    enum think think;
    enum show_think show_think;
    /* sampling */
    bool greedy;
    double temp, top_p, min_p, repeat_penalty; /* NAN: unset */
    int top_k;                                 /* -1: unset */
    int seed;                                  /* -1: from the clock */
    /* machine */
    int n_ctx, threads;    /* 0: chosen by the program */
    int kv;                /* enum kv_type; -1: unset, settings_kv chooses */
    bool cpu, cpu_ref;     /* both keep everything on the CPU */
    char *gpus;            /* see gpus_parse */
    int tp, pp, kv_splits; /* 0: chosen by the program */
    int vram_reserve;      /* MiB */
    enum allreduce allreduce;
    enum moe_act moe_act;
    /* modes, and the options that belong to one */
    bool info, plan, tokenize, render, smoke, doctor, bench, json, profile, version, help;
    char *logits, *perplexity, *haystack, *synth, *shard, *output, *activations;
    char **calibrate, **compare; /* stb_ds, of malloc'ed names */
    int needle, depth;           /* tokens, 0: not given; percent */
    /* not options of the command line */
    const struct option *help_about; /* --help stands where the value of this one should */
    bool quiet;                      /* chats print neither answers nor statistics */
};

enum option_type { OPT_FLAG, OPT_INT, OPT_NUM, OPT_STR, OPT_CHOICE, OPT_FILES /* up to the next option */ };

struct option {
    const char *name; /* NULL: a heading of --help, whose text is `help` */
    char letter;      /* 0: none */
    enum option_type type;
    size_t offset;              /* in struct settings */
    const char *arg;            /* what --help calls the value */
    const char *const *choices; /* OPT_CHOICE: the names, NULL at the end; the field gets the index */
    double lo, hi;              /* range of numbers */
    bool in_chat;               /* /set may change it */
    const char *of;             /* the modes that it belongs to, separated by |; NULL: --help lists it */
    const char *help;           /* one line of --help, in 68 columns */
    const char *details;        /* what --NAME --help adds */
};

static const char plan_details[] =
    "-m takes a GGUF file, or only its header (moe-convert DIR --dry-run -o header.gguf). --synth takes a\n"
    "known shape. Without --gpus the plan is for the GPUs of this machine, or for its CPU.\n"
    "\n"
    "  --gpus 0,1        plan for these GPUs of this machine\n"
    "  --gpus 4x96       plan for four GPUs of 96 GiB; the usual sizes imply the memory bandwidth\n"
    "  --gpus 4x96@1792  plan for four GPUs of 96 GiB that read 1792 GB/s\n"
    "\n"
    "Exit code: 0 the model fits without pruning, 1 it does not.\n";

static const char doctor_details[] =
    "Checks in the order in which things fail: does a model start, does a forward pass complete, is the\n"
    "output coherent, does it stay coherent in a long context, is it fast enough? Without -m only the\n"
    "machine is checked. Exit code: 0 no errors, 1 errors.\n";

static const char calibrate_details[] =
    "A .jsonl file has one JSON object per line: {\"messages\": [...]}, {\"text\": ...}, or {\"prompt\": ...,\n"
    "\"completion\": ...}. Any other file is plain text; it runs in windows of -c tokens (default: 2048).\n"
    "\n"
    "A unit of work is a line of a .jsonl file or a window of a text. Every unit starts with an empty\n"
    "context. Ctrl-C ends the run after the current unit. A second Ctrl-C ends it at once and drops the\n"
    "work since the last save (at most a minute and one unit). To continue, repeat the command: it begins\n"
    "with the next unit. The scores are those of an uninterrupted run, up to rounding.\n";

static const char compare_details[] =
    "A and B are GGUF files with the same vocabulary. Both read TEXT in windows of -c tokens (default:\n"
    "2048). Prints the perplexity of each model, the Kullback-Leibler divergence of B from A in nats, and\n"
    "how often both agree on the most likely token.\n";

static const char needle_details[] =
    "The fact is a random number, which depends only on --seed, N and --depth. The answer goes to stdout,\n"
    "the result to stderr. Exit code: 0 the answer holds the number, 1 it does not.\n";

static const char bench_details[] =
    "Prints CSV: one line per context depth and batch, medians of up to 5 timed runs. Depths are 0, 4096,\n"
    "32768 and 131072 tokens, as far as -c has room. The cache is not computed up to that depth, only\n"
    "marked as filled: the time of a forward pass does not depend on its contents.\n"
    "\n"
    "  ctx_tokens                depth: tokens in the KV cache before the forward pass\n"
    "  prefill_tokens            tokens of the prefill chunk: at most 512 on a CPU, 4096 on a GPU; given\n"
    "                            on the line of batch 1 only, like the next two columns\n"
    "  prefill_tps               tokens per second of that chunk, with the logits of its last token\n"
    "  prefill_percent_of_mma    GPU only: rate of the operations that the model defines, as a percentage\n"
    "                            of the rate of mma.sync m16n8k16 measured at the start\n"
    "  batch                     tokens of one decode forward pass: 1, 2, 4, 8 or 16, with all logits\n"
    "  gen_tps                   tokens per second of these passes; all tokens of the batch count\n"
    "  kvcache_bytes             bytes of the KV cache at that depth\n"
    "  gen_gb_per_s              GB/s (1e9 bytes) read by a decode forward pass: each weight once, of the\n"
    "                            routed experts as many as independent choices are expected to hit, and\n"
    "                            the KV cache once\n"
    "  gen_percent_of_bandwidth  gen_gb_per_s as a percentage of the bandwidth measured at the start:\n"
    "                            reads on a CPU; copies on a GPU, with both directions counted\n"
    "\n"
    "The measured bandwidth and mma rate are printed on stderr. So is --profile's table of the kernels at\n"
    "depth 0, which works with a single GPU.\n";

static const char synth_details[] =
    "NAME is qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3 or kimi-k2. Options may follow a colon:\n"
    "NAME:layers=N,experts=M,backbone=bf16|q8_0 (default: the real numbers, bf16). Feed-forward weights\n"
    "are NVFP4, norms and routers F32, and the backbone is everything else.\n"
    "\n"
    "With -m FILE the model is written to FILE, which must not exist, before it is used. On a GPU these\n"
    "weights take no host memory: a few random rows are packed again and again.\n"
    "\n"
    "--shard 0/4 makes what the first of four GPUs under --tp 4 holds: heads and feed-forward columns are\n"
    "divided by 4, the vocabulary stays whole.\n";

#define AT(field)               offsetof(struct settings, field)
#define IS_FLAG(field)          .type = OPT_FLAG, .offset = AT(field)
#define IS_INT(field, low, top) .type = OPT_INT, .offset = AT(field), .lo = (low), .hi = (top)
#define IS_NUM(field, low, top) .type = OPT_NUM, .offset = AT(field), .lo = (low), .hi = (top)
#define IS_STR(field)           .type = OPT_STR, .offset = AT(field)
#define IS_FILES(field)         .type = OPT_FILES, .offset = AT(field)
#define IS_CHOICE(field, names) .type = OPT_CHOICE, .offset = AT(field), .choices = (names)

static const struct option options[] = {
    {.help = "Model and prompt"},
    {"model", 'm', IS_STR(model), .arg = "FILE", .help = "GGUF file; any part of a split one (default: $MOE_MODEL)"},
    {"prompt", 'p', IS_STR(prompt), .arg = "TEXT",
     .help = "answer TEXT and exit; piped stdin comes first, then a blank line"},
    {"file", 'f', IS_STR(prompt_file), .arg = "FILE", .help = "like -p, with the text of FILE"},
    {"system", 's', IS_STR(system), .arg = "TEXT", .help = "system message (default: none)"},
    {"system-file", IS_STR(system_file), .arg = "FILE", .help = "system message from FILE"},
    {"lines", IS_FLAG(lines), .help = "answer every line of stdin as a prompt of its own"},
    {"raw", IS_FLAG(raw), .help = "no chat template: continue the text and print it verbatim"},
    {"ids", IS_STR(ids), .arg = "1,2,3", .help = "use these token ids as the prompt; stdin is not read"},
    {"special", IS_FLAG(special), .help = "with --raw and --tokenize: text may spell control tokens"},
    {"chat-template-file", IS_STR(template_file), .arg = "FILE", .help = "Jinja template in place of the model's"},
    {.help = "Answer (sampling defaults come from the model file where it has them)"},
    {"predict", 'n', IS_INT(n_predict, -1, INT32_MAX), .arg = "N", .in_chat = true,
     .help = "generate at most N tokens (default: -1, until the model stops)"},
    {"think", IS_CHOICE(think, think_names), .arg = "MODE", .in_chat = true, .help = "thinking (default: auto)"},
    {"show-think", IS_CHOICE(show_think, show_think_names), .arg = "MODE", .in_chat = true,
     .help = "print the thinking (default: auto, on a terminal)"},
    {"greedy", IS_FLAG(greedy), .in_chat = true, .help = "always take the most likely token"},
    {"temp", IS_NUM(temp, 0, 100), .arg = "T", .in_chat = true, .help = "temperature (default: 0.7; 0 is greedy)"},
    {"top-k", IS_INT(top_k, 0, INT32_MAX), .arg = "K", .in_chat = true,
     .help = "sample from the K most likely tokens (default: 40; 0: all)"},
    {"top-p", IS_NUM(top_p, 0, 1), .arg = "P", .in_chat = true,
     .help = "sample from the likeliest tokens that add up to P (default: 0.95)"},
    {"min-p", IS_NUM(min_p, 0, 1), .arg = "P", .in_chat = true,
     .help = "drop tokens below P times the best (default: 0; pruned models 0.05)"},
    {"repeat-penalty", IS_NUM(repeat_penalty, 0.1, 10), .arg = "R", .in_chat = true,
     .help = "penalty on the last 64 tokens (default: 1; pruned models 1.1)"},
    {"seed", IS_INT(seed, -1, INT32_MAX), .arg = "N", .in_chat = true,
     .help = "seed of the sampler (default: -1, from the clock)"},
    {.help = "Machine"},
    {"ctx", 'c', IS_INT(n_ctx, 0, 1 << 28), .arg = "N",
     .help = "tokens of context (default: 0, the model's, or what memory allows)"},
    {"threads", 't', IS_INT(threads, 0, 1024), .arg = "N", .help = "CPU threads (default: 0, all processors)"},
    {"kv", IS_CHOICE(kv, kv_names), .arg = "TYPE", .help = "KV cache (default: fp8 on a GPU, bf16 on the CPU)"},
    {"cpu", IS_FLAG(cpu), .help = "use no GPU"},
    {"gpus", IS_STR(gpus), .arg = "0,1", .help = "GPUs to use, by number (default: the first ones; if none, the CPU)"},
    {"tp", IS_INT(tp, 1, MAX_RANKS), .arg = "N",
     .help = "tensor-parallel ranks (default: one for each of --gpus, or 1)"},
    {"pp", IS_INT(pp, 1, MAX_RANKS), .arg = "N", .help = "pipeline stages (default: 1)"},
    {"allreduce", IS_CHOICE(allreduce, allreduce_names), .arg = "HOW",
     .help = "all-reduce of --tp (default: auto, the faster)"},
    {"kv-splits", IS_INT(kv_splits, 0, 384), .arg = "N",
     .help = "splits of the context in GPU decode, at most (default: 0, automatic)"},
    {"moe-act", IS_CHOICE(moe_act, moe_act_names), .arg = "TYPE",
     .help = "expert activations in GPU prefill (default: auto)"},
    {"vram-reserve", IS_INT(vram_reserve, 0, 1 << 20), .arg = "MIB", .help = "GPU memory to leave free (default: 256)"},
    {"cpu-ref", IS_FLAG(cpu_ref), .help = "scalar reference arithmetic on the CPU: exact, slow"},
    {.help = "Instead of answering (details: moe --bench --help, for example)"},
    {"info", IS_FLAG(info), .help = "describe the model file"},
    {"plan", IS_FLAG(plan), .help = "does a model fit, and how fast can it be? exit 0 if it fits",
     .details = plan_details},
    {"doctor", IS_FLAG(doctor), .help = "find out why this machine is slow or fails; with -m also a model",
     .details = doctor_details},
    {"json", IS_FLAG(json), .of = "plan|doctor", .help = "print one JSON object, sizes in bytes"},
    {"tokenize", IS_FLAG(tokenize), .help = "print the token ids of stdin on one line"},
    {"render", IS_FLAG(render), .help = "print the chat template rendered with the JSON object on stdin"},
    {"logits", IS_STR(logits), .arg = "FILE.npy", .help = "write the logits of every position of the prompt"},
    {"perplexity", IS_STR(perplexity), .arg = "FILE", .help = "perplexity of a text, with its standard error"},
    {"calibrate", IS_FILES(calibrate), .arg = "FILES...",
     .help = "record what experts do for texts or chats, to -o, for moe-reap", .details = calibrate_details},
    {"output", 'o', IS_STR(output), .arg = "FILE.json", .of = "calibrate",
     .help = "the scores; those that FILE holds are added to"},
    {"activations", IS_STR(activations), .arg = "FILE.gguf", .of = "calibrate",
     .help = "also record activations, for moe-convert; from the first run on"},
    {"compare", IS_FILES(compare), .arg = "A B TEXT", .help = "how far the predictions of model B are from those of A",
     .details = compare_details},
    {"needle", IS_INT(needle, 64, 1 << 28), .arg = "N", .help = "find a fact in N tokens of prose; exit 0 if found",
     .details = needle_details},
    {"depth", IS_INT(depth, 0, 100), .arg = "PERCENT", .of = "needle", .help = "where the fact stands (default: 50)"},
    {"haystack", IS_STR(haystack), .arg = "FILE", .of = "needle", .help = "the prose (default: the shipped stories)"},
    {"smoke", IS_FLAG(smoke), .help = "three quick tests of the model; exit 0 if all pass"},
    {"bench", IS_FLAG(bench), .help = "prefill and decode speed at several depths, CSV on stdout",
     .details = bench_details},
    {"profile", IS_FLAG(profile), .of = "bench", .help = "on a GPU: add the time of every kernel"},
    {"synth", IS_STR(synth), .arg = "NAME", .help = "synthetic weights in a known shape, in place of -m",
     .details = synth_details},
    {"shard", IS_STR(shard), .arg = "R/N", .of = "synth", .help = "only what GPU R of N would hold"},
    {"verbose", IS_FLAG(verbose), .help = "print more on stderr"},
    {"version", IS_FLAG(version), .help = "version, and what this build can use"},
    {"help", 'h', IS_FLAG(help), .help = "this text"},
};

enum { N_OPTIONS = sizeof options / sizeof *options };

/* Sets every option to its default, or to unset. */
static void settings_init(struct settings *s) {
    *s = (struct settings){.n_predict = -1,
                           .temp = NAN,
                           .top_p = NAN,
                           .min_p = NAN,
                           .repeat_penalty = NAN,
                           .top_k = -1,
                           .seed = -1,
                           .kv = -1,
                           .vram_reserve = 256,
                           .depth = 50};
}

/* ============================================================================================================
 * Command line
 *
 * Reads the options, prints --help, serves /set, and settles what the user left open.
 * ============================================================================================================ */

/* The field of an option. */
static void *option_at(struct settings *s, const struct option *o) { return (char *)s + o->offset; }
static const void *option_value(const struct settings *s, const struct option *o) {
    return (const char *)s + o->offset;
}

/* Frees strings and lists of names. */
static void settings_free(struct settings *s) {
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (!o->name) continue;
        if (o->type == OPT_STR) free(*(char **)option_at(s, o));
        if (o->type != OPT_FILES) continue;
        char **list = *(char ***)option_at(s, o);
        for (size_t k = 0; k < arrlenu(list); k++) free(list[k]);
        arrfree(list);
    }
}

/* The option of this name; NULL: there is none. */
static const struct option *option_find(const char *name) {
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].name && !strcmp(options[i].name, name)) return &options[i];
    return NULL;
}

static const struct option *option_by_letter(char letter) {
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].letter == letter) return &options[i];
    return NULL;
}

/* Whether a mode was asked for; for options whose unset value is zero. */
static bool option_given(const struct settings *s, const struct option *o) {
    const void *at = option_value(s, o);
    if (o->type == OPT_FLAG) return *(const bool *)at;
    if (o->type == OPT_INT) return *(const int *)at != 0;
    return *(void *const *)at != NULL;
}

/* The choices of an option, such as bf16|fp8|f32. */
static const char *option_choices(const struct option *o, char out[64]) {
    int n = 0;
    for (int i = 0; o->choices[i]; i++) n += snprintf(out + n, 64 - (size_t)n, "%s%s", i ? "|" : "", o->choices[i]);
    return out;
}

/* Stores a number that is in range. 0, or -1 with a message. */
static int option_store_number(void *at, const struct option *o, const char *value, char *err) {
    const bool whole = o->type == OPT_INT;
    char *end;
    errno = 0;
    const double v = whole ? (double)strtoll(value, &end, 10) : strtod(value, &end);
    if (end == value || *end || errno || !(v >= o->lo && v <= o->hi))
        return fail(err, "--%s %s: expected %s from %.10g to %.10g", o->name, value,
                    whole ? "a whole number" : "a number", o->lo, o->hi);
    if (whole) *(int *)at = (int)v;
    else *(double *)at = v;
    return 0;
}

/* Stores the index of a choice. 0, or -1 with a message. */
static int option_store_choice(void *at, const struct option *o, const char *value, char *err) {
    char names[64];
    for (int i = 0; o->choices[i]; i++)
        if (!strcmp(o->choices[i], value)) {
            *(int *)at = i;
            return 0;
        }
    return fail(err, "--%s %s: expected %s", o->name, value, option_choices(o, names));
}

/* Parses and stores one value; a flag's is on or off. 0, or -1 with a message. */
static int option_store(struct settings *s, const struct option *o, const char *value, char *err) {
    void *at = option_at(s, o);
    const bool is_file = o->type == OPT_FILES || (o->type == OPT_STR && !strncmp(o->arg, "FILE", 4));
    if (is_file && !*value) return fail(err, "--%s wants the name of a file", o->name);
    switch (o->type) {
    case OPT_FLAG:
        if (strcmp(value, "on") && strcmp(value, "off"))
            return fail(err, "--%s is on or off, not '%s'", o->name, value);
        *(bool *)at = !strcmp(value, "on");
        return 0;
    case OPT_INT:
    case OPT_NUM: return option_store_number(at, o, value, err);
    case OPT_CHOICE: return option_store_choice(at, o, value, err);
    case OPT_FILES: arrput(*(char ***)at, xstrdup(value)); return 0;
    case OPT_STR: break;
    }
    free(*(char **)at);
    *(char **)at = xstrdup(value);
    return 0;
}

/* /set: stores a value if the option may change during a chat. */
static int option_set(struct settings *s, const char *name, const char *value, char *err) {
    const struct option *o = option_find(name);
    if (!o) return fail(err, "there is no option '%s'; /set lists them", name);
    if (!o->in_chat) return fail(err, "--%s can only be given at start", name);
    return option_store(s, o, value, err);
}

/* Prints a value as the command line takes it; nothing if it is unset. */
static void option_print_value(const struct settings *s, const struct option *o, FILE *f) {
    const void *at = option_value(s, o);
    switch (o->type) {
    case OPT_FLAG: fputs(*(const bool *)at ? "on" : "off", f); break;
    case OPT_INT: fprintf(f, "%d", *(const int *)at); break;
    case OPT_NUM: fprintf(f, "%g", *(const double *)at); break;
    case OPT_CHOICE:
        if (*(const int *)at >= 0) fputs(o->choices[*(const int *)at], f);
        break;
    case OPT_STR: {
        const char *value = *(char *const *)at;
        char *text = NULL;
        if (!value) break;
        term_neutralise(&text, value, strlen(value));
        fputs(sb_cstr(&text), f);
        arrfree(text);
        break;
    }
    case OPT_FILES: break;
    }
}

/* /set: the value of the option `name`, or (NULL) of all that it may change. */
static void option_print(const struct settings *s, const char *name, FILE *f) {
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (!o->name || (name ? strcmp(name, o->name) : !o->in_chat)) continue;
        fprintf(f, "  %-15s ", o->name);
        option_print_value(s, o, f);
        fprintf(f, "  %s\n", o->help);
    }
}

/* One line of --help. */
static void option_help_line(const struct option *o, FILE *f) {
    char left[64], choices[64];
    int n = o->letter ? snprintf(left, sizeof left, "-%c, --%s", o->letter, o->name)
                      : snprintf(left, sizeof left, "    --%s", o->name);
    if (o->arg) snprintf(left + n, sizeof left - (size_t)n, " %s", o->arg);
    fprintf(f, "  %-29s %s%s%s\n", left, o->choices ? option_choices(o, choices) : "", o->choices ? ": " : "", o->help);
}

/* Whether one of the names in `list`, separated by |, is `name`. */
static bool list_has(const char *list, const char *name) {
    const size_t n = strlen(name);
    for (const char *p = list; p; p = strchr(p, '|')) {
        p += *p == '|';
        if (!strncmp(p, name, n) && (p[n] == '|' || !p[n])) return true;
    }
    return false;
}

/* --NAME --help: the option, those that belong to it, and its details. */
static void option_details(const struct option *o, FILE *f) {
    option_help_line(o, f);
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].of && list_has(options[i].of, o->name)) option_help_line(&options[i], f);
    fprintf(f, "\n%s", o->details);
}

/* --help: the details of the modes that are given too; else all options but those that belong to a mode. */
static void options_help(const struct settings *s, FILE *f) {
    int detailed = 0;
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (!o->name || !o->details || (o != s->help_about && !option_given(s, o))) continue;
        if (detailed++) putc('\n', f);
        option_details(o, f);
    }
    if (detailed) return;
    fputs("moe - chat with mixture-of-experts models on your own machine\n"
          "  moe -m MODEL.gguf [options]          chat; if stdin is not a terminal, answer it and exit\n"
          "  moe -m MODEL.gguf -p TEXT [options]  answer TEXT and exit\n",
          f);
    for (int i = 0; i < N_OPTIONS; i++)
        if (!options[i].name) fprintf(f, "\n%s\n", options[i].help);
        else if (!options[i].of) option_help_line(&options[i], f);
    fputs("Exit code: 0 done, 1 the run failed, 2 wrong usage, 130 interrupted. Only answers go to stdout.\n", f);
}

/* Reads the command line; wrong usage ends the program. */
static void options_parse(struct settings *s, int argc, char **argv) {
    char err[ERR_MAX], name[64];
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *value = NULL;
        const struct option *o = NULL;
        if (a[0] != '-' || !a[1]) die_usage("'%s' is not an option; give a prompt with -p (see --help)", a);
        if (a[1] == '-') {
            const char *eq = strchr(a, '=');
            snprintf(name, sizeof name, "%.*s", eq ? (int)(eq - a - 2) : 60, a + 2);
            o = option_find(name);
            value = eq ? eq + 1 : NULL;
        } else {
            o = option_by_letter(a[1]);
            if (a[2]) value = a + 2;
            if (value && o && o->type == OPT_FLAG) { /* -hx is -h -x */
                value = NULL;
                argv[i]++;
                argv[i][0] = '-';
                i--;
            }
        }
        if (!o) die_usage("unknown option '%s' (see --help)", a);
        if (o->type == OPT_FLAG && !value) value = "on";
        else if (!value && i + 1 < argc) value = argv[++i];
        if (!value) die_usage("option '%s' wants a value: %s", a, o->choices ? option_choices(o, name) : o->arg);
        if (o->details && (!strcmp(value, "--help") || !strcmp(value, "-h"))) {
            s->help = true;
            s->help_about = o;
            continue;
        }
        if (option_store(s, o, value, err)) die_usage("%s", err);
        while (o->type == OPT_FILES && i + 1 < argc && argv[i + 1][0] != '-')
            if (option_store(s, o, argv[++i], err)) die_usage("%s", err);
    }
    /* --synth writes to the file of -m, which must have been meant */
    if (!s->model && !s->synth && !s->compare && getenv("MOE_MODEL")) s->model = xstrdup(getenv("MOE_MODEL"));
}

/* The value of --gpus: a list of device numbers, "0,1", which may repeat a number; or, for --plan, the description of a
 * machine, "4x96" or "4x96@1792": GPUs, GiB of each and, after the @, GB/s that each reads. */
struct gpu_list {
    int n;                 /* GPUs; 0: the option was not given */
    int device[MAX_RANKS]; /* of a list */
    double gib;            /* of a description; 0: it is a list */
    double gb_per_s;       /* of a description; 0: not given */
};

/* Parses --gpus; NULL: it was not given. */
static struct gpu_list gpus_parse(const char *text) {
    struct gpu_list g = {0};
    if (!text) return g;
    if (!*text) die_usage("--gpus wants at least one number");
    if (strchr(text, 'x')) {
        const bool rate = strchr(text, '@');
        int end = 0, got = rate ? sscanf(text, "%1dx%lf@%lf%n", &g.n, &g.gib, &g.gb_per_s, &end)
                                : sscanf(text, "%1dx%lf%n", &g.n, &g.gib, &end);
        const bool whole = got == 2 + rate && !text[end] && !text[strspn(text, "0123456789.x@")];
        if (!whole || g.n < 1 || g.n > MAX_RANKS || !(g.gib >= 1 && g.gib <= 1e6) ||
            (rate && !(g.gb_per_s >= 1 && g.gb_per_s <= 1e6)))
            die_usage("--gpus %s: expected NxGIB or NxGIB@GBPS with N from 1 to %d, such as 4x96 or 2x48@960", text,
                      MAX_RANKS);
        return g;
    }
    for (const char *p = text; *p;) {
        char *end;
        const long v = *p >= '0' && *p <= '9' ? strtol(p, &end, 10) : -1;
        if (v < 0 || v > 63 || (*end && (*end != ',' || !end[1])) || g.n == MAX_RANKS)
            die_usage("--gpus %s: expected one to %d numbers of GPUs, separated by commas", text, MAX_RANKS);
        g.device[g.n++] = (int)v;
        p = *end ? end + 1 : end;
    }
    return g;
}

/* Settles the sampling options that were not given: from the model file, or from our defaults. A pruned model repeats
 * itself more easily. */
static void settings_resolve(struct settings *s, const struct model *m) {
    static const struct {
        const char *key;
        size_t offset;
        double value, pruned;
    } defaults[] = {{"general.sampling.temp", AT(temp), 0.7, 0.7},
                    {"general.sampling.top_p", AT(top_p), 0.95, 0.95},
                    {"general.sampling.min_p", AT(min_p), 0.0, 0.05},
                    {"general.sampling.penalty_repeat", AT(repeat_penalty), 1.0, 1.1}};
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        for (size_t k = 0; k < sizeof defaults / sizeof *defaults; k++) {
            if (o->type != OPT_NUM || o->offset != defaults[k].offset) continue;
            const struct gguf_kv *kv = gguf_find(&m->gguf, defaults[k].key);
            double v, *at = option_at(s, o);
            if (!isnan(*at)) continue;
            *at = m->pruned ? defaults[k].pruned : defaults[k].value;
            if (kv && gguf_elem_f64(kv, 0, &v) && v >= o->lo && v <= o->hi) *at = v;
        }
    }
    if (s->top_k < 0) {
        const struct gguf_kv *kv = gguf_find(&m->gguf, "general.sampling.top_k");
        int64_t k;
        s->top_k = kv && gguf_elem_int(kv, 0, &k) && k >= 0 && k <= INT32_MAX ? (int)k : 40;
    }
}

/* What the sampler needs of the settings. */
static struct sampling settings_sampling(const struct settings *s) {
    return (struct sampling){.greedy = s->greedy,
                             .temp = (float)s->temp,
                             .top_p = (float)s->top_p,
                             .min_p = (float)s->min_p,
                             .repeat_penalty = (float)s->repeat_penalty,
                             .top_k = s->top_k};
}

/* --seed, or nanoseconds of the clock: two runs within a second differ. */
static uint64_t settings_seed(const struct settings *s) {
    struct timespec t;
    if (s->seed >= 0) return (uint64_t)s->seed;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The type of the KV cache; settles the default. */
static enum kv_type settings_kv(struct settings *s, bool gpu) {
    if (s->kv < 0) s->kv = gpu ? KV_FP8 : KV_BF16;
    return (enum kv_type)s->kv;
}

/* ============================================================================================================
 * Chat
 *
 * A conversation is a list of messages; a turn renders all of them with the model's template, tokenises, syncs the
 * session and generates. Text of messages keeps its origin through the template, so that nothing a user types becomes
 * a control token. The tokens of earlier turns are reused as far as their text equals the rendered text, cut at a special
 * token: what was generated need not be tokenised the way the tokeniser would.
 * ============================================================================================================ */

struct message {
    char *role, *content; /* malloc'ed; an assistant's content holds its thinking as generated */
};

struct turn_stats {
    int n_prompt, n_generated; /* tokens computed before, and during the answer */
    double prompt_seconds, seconds, first_seconds;
    double bytes;        /* read while generating */
    uint32_t logit_hash; /* of the last logits: equal runs give equal hashes */
};

struct chat {
    struct message *messages; /* stb_ds */
    struct settings *set;
    const struct model *m;
    struct session *s;
    struct template *t;
    bool splits_reasoning; /* the template wants reasoning_content beside content */
    bool strips_reasoning; /* the template takes the thinking out of content itself */
    uint64_t rng;          /* of the sampler */
    struct turn_stats last, total;
    int turns;
};

enum turn_result {
    TURN_DONE,
    TURN_STOPPED,     /* Ctrl-C while answering: the partial answer is kept and the turn closed */
    TURN_ROLLED_BACK, /* Ctrl-C before the first token: the messages are as before */
    TURN_FAILED       /* the same, err says why */
};

static bool text_has(const char *s, size_t n, const char *what) { return memmem(s, n, what, strlen(what)) != NULL; }

/* The template of the file or of --chat-template-file. 0, or -1 with a message. */
static int chat_template(struct template **out, const struct settings *set, const struct model *m, char **source,
                         char *err) {
    char why[ERR_MAX];
    if (set->template_file) {
        if (read_file(set->template_file, source, err)) return -1;
    } else if (!m || !m->vocab->n_tokens || !m->vocab->chat_template.p) {
        return fail(err, "the file has no chat template: use --chat-template-file, or --raw to continue plain text");
    } else {
        sb_put(source, m->vocab->chat_template.p, m->vocab->chat_template.n);
    }
    *out = template_parse(*source, arrlenu(*source), why);
    return *out ? 0 : fail(err, "chat template: %s", why);
}

/* What no template can take is refused: -1 with a message. */
static int message_check(const char *what, const char *s, size_t n, char *err) {
    if (utf8_valid(s, n) && !(n && memchr(s, 0, n))) return 0;
    return fail(err, "%s is not valid UTF-8 text", what);
}

static void chat_push(struct chat *c, const char *role, const char *content, size_t n) {
    struct message msg = {xstrdup(role), xstrndup(content, n)};
    arrput(c->messages, msg);
}

static void chat_pop(struct chat *c) {
    struct message msg = arrpop(c->messages);
    free(msg.role), free(msg.content);
}

static int chat_init(struct chat *c, struct settings *set, const struct model *m, struct session *s, char *err) {
    char *source = NULL;
    memset(c, 0, sizeof *c);
    c->set = set, c->m = m, c->s = s;
    if (set->system && message_check("the system message", set->system, strlen(set->system), err)) return -1;
    int rc = chat_template(&c->t, set, m, &source, err);
    if (!rc) {
        c->splits_reasoning = text_has(source, arrlenu(source), "reasoning_content");
        c->strips_reasoning = text_has(source, arrlenu(source), "</think>");
        c->rng = settings_seed(set);
        if (set->system && *set->system) chat_push(c, "system", set->system, strlen(set->system));
    }
    arrfree(source);
    return rc;
}

static void chat_free(struct chat *c) {
    while (arrlen(c->messages)) chat_pop(c);
    arrfree(c->messages);
    template_free(c->t);
}

/* Where the answer begins in an assistant's content: behind the thinking and the newlines that follow it. *think and *n: the
 * thinking without its tags and the newlines around it. */
static const char *split_answer(const char *content, const char **think, size_t *n) {
    const char *end = NULL, *from = strstr(content, "<think>");
    for (const char *p = content; (p = strstr(p, "</think>")); p += 8) end = p;
    *think = content, *n = 0;
    if (!end) return content;
    from = from && from < end ? from + 7 : content;
    from += strspn(from, "\n");
    while (end > from && end[-1] == '\n') end--;
    *think = from, *n = end > from ? (size_t)(end - from) : 0;
    end = strstr(end, "</think>") + 8;
    return end + strspn(end, "\n");
}

/* A message as the template wants it: thinking in a field of its own, inside the content, or not at all. */
static json_t *chat_message_json(const struct chat *c, const struct message *msg) {
    const char *think, *answer;
    size_t n;
    json_t *o = json_object();
    answer = strcmp(msg->role, "assistant") ? msg->content : split_answer(msg->content, &think, &n);
    json_object_set_new(o, "role", json_string(msg->role));
    json_object_set_new(o, "content", json_string(c->splits_reasoning || !c->strips_reasoning ? answer : msg->content));
    if (answer != msg->content && c->splits_reasoning)
        json_object_set_new(o, "reasoning_content", json_stringn(think, n));
    return o;
}

/* Variables every template may look at, as Hugging Face's apply_chat_template sets them. */
static void chat_common_vars(json_t *vars, const struct model *m, const struct settings *set) {
    const enum think think = set->think;
    json_object_set_new(vars, "tools", json_null());
    json_object_set_new(vars, "documents", json_null());
    if (m && m->vocab->n_tokens) {
        int32_t id[2] = {m->vocab->bos, m->vocab->eos};
        const char *name[2] = {"bos_token", "eos_token"};
        for (int i = 0; i < 2; i++)
            if (id[i] >= 0) {
                struct gguf_str s = vocab_bytes(m->vocab, id[i]);
                json_object_set_new(vars, name[i], json_stringn(s.p, s.n));
            }
    }
    if (think == THINK_AUTO) return;
    bool on = think != THINK_OFF;
    json_object_set_new(vars, "enable_thinking", json_boolean(on));
    json_object_set_new(vars, "thinking", json_boolean(on));
    if (think >= THINK_LOW) json_object_set_new(vars, "reasoning_effort", json_string(think_names[think]));
}

/* `answer`: the text ends where an answer begins. */
static int chat_render(const struct chat *c, bool answer, struct text *out, char *err) {
    json_t *vars = json_object(), *list = json_array();
    for (size_t i = 0; i < arrlenu(c->messages); i++)
        json_array_append_new(list, chat_message_json(c, &c->messages[i]));
    json_object_set_new(vars, "messages", list);
    json_object_set_new(vars, "add_generation_prompt", json_boolean(answer));
    chat_common_vars(vars, c->m, c->set);
    int rc = template_render(c->t, vars, out, err);
    json_decref(vars);
    return rc;
}

/* A token that cannot be part of ordinary text: a safe place to cut. */
static bool token_is_cut(const struct vocab *v, int32_t id) {
    return vocab_type(v, id) == TOKEN_CONTROL || vocab_type(v, id) == TOKEN_USER_DEFINED;
}

/* Token ids of a rendered prompt, taking over those of the session's timeline as long as their text agrees. */
static void chat_tokenize(const struct chat *c, const struct text *text, int32_t **ids) {
    const struct vocab *v = c->m->vocab;
    const struct session *s = c->s;
    size_t n = arrlenu(text->s), at = 0, cut_at = 0;
    int k = 0, cut = 0;
    if (s->n_past && v->add_bos && s->tokens[0] == v->bos) {
        struct gguf_str bos = vocab_bytes(v, v->bos);
        if (n < bos.n || memcmp(text->s, bos.p, bos.n)) k = cut = 1;
    }
    for (; k < s->n_past; k++) {
        int32_t id = s->tokens[k];
        if (id >= v->n_tokens) break;
        struct gguf_str b = vocab_bytes(v, id);
        bool special = token_is_cut(v, id), from_data = false;
        if (!b.n || b.n > n - at || memcmp(text->s + at, b.p, b.n)) break;
        for (size_t i = 0; special && i < b.n; i++) from_data |= text->origin[at + i] == ORIGIN_DATA;
        if (from_data) break;
        at += b.n;
        if (special) cut = k + 1, cut_at = at;
    }
    if (k == s->n_past) { /* all of it agrees: the next piece of text may start with a special token */
        tokenize(v, text->s + at, n - at, text->origin + at, TOKENIZE_CONTROL, ids);
        if (arrlen(*ids) && token_is_cut(v, (*ids)[0])) cut = k, cut_at = at;
    }
    arrsetlen(*ids, 0);
    for (int i = 0; i < cut; i++) arrput(*ids, s->tokens[i]);
    size_t before = arrlenu(*ids);
    tokenize(v, text->s + cut_at, n - cut_at, text->origin + cut_at, TOKENIZE_CONTROL, ids);
    if (!before && v->add_bos && v->bos >= 0 && (!arrlen(*ids) || (*ids)[0] != v->bos)) arrins(*ids, 0, v->bos);
}

/* Whether the model begins its answer inside its thinking: the prompt's last <think> is open and nothing but blanks follow. */
static bool prompt_opens_think(const struct text *t) {
    size_t n = arrlenu(t->s);
    while (n && strchr(" \n\t", t->s[n - 1])) n--;
    return n >= 7 && !memcmp(t->s + n - 7, "<think>", 7) && t->origin[n - 1] == ORIGIN_TEMPLATE;
}

/* ---- what is generated, on its way to the screen ---- */

struct printer {
    const struct vocab *v;
    struct detok detok;
    char *text;          /* stb_ds: all that was generated */
    size_t printed;      /* bytes of it dealt with */
    bool verbatim;       /* raw modes: every byte to stdout */
    bool ends_line;      /* a newline is added where the answer has none */
    bool thinking, show; /* inside <think>; thinking is printed */
    bool began;          /* something of the answer is on stdout */
    bool mute;           /* nothing is printed */
    char last;           /* the last byte there */
    int think_tokens;
    double start;
    char *out; /* stb_ds: scratch */
};

static void printer_write(struct printer *p, const char *s, size_t n, bool dim) {
    if (!n || p->mute) return;
    arrsetlen(p->out, 0);
    if (dim && term.colour_out) sb_puts(&p->out, "\033[2m");
    if (term.out_tty) term_neutralise(&p->out, s, n);
    else sb_put(&p->out, s, n);
    if (dim && term.colour_out) sb_puts(&p->out, "\033[0m");
    fwrite(p->out, 1, arrlenu(p->out), stdout);
    out_flush();
    p->last = s[n - 1];
}

/* The line that stands for hidden thinking on a terminal; empty text removes it. */
static void printer_hidden(const struct printer *p, bool done) {
    if (!term.out_tty || p->mute) return;
    if (done) status_line("%s", "");
    else status_line("thinking... %d tok %.1f s", p->think_tokens, now_seconds() - p->start);
}

/* Prints text[printed..end) as the state says, without the blanks that open an answer. */
static void printer_emit(struct printer *p, size_t end) {
    const char *s = p->text + p->printed;
    size_t n = end - p->printed;
    p->printed = end;
    if (p->thinking) {
        if (p->show) printer_write(p, s, n, true);
        return;
    }
    while (!p->began && n && strchr(" \n\t\r", *s)) s++, n--;
    if (n && !p->began && p->show && p->last && p->last != '\n') printer_write(p, "\n", 1, false);
    if (n) p->began = true;
    printer_write(p, s, n, false);
}

/* One more token. The tags <think> and </think> are found in the text, also when several tokens spell them. */
static void printer_token(struct printer *p, int32_t id) {
    detok_put(p->v, &p->detok, id, &p->text);
    size_t n = arrlenu(p->text);
    if (!n) return; /* so far only the start of a UTF-8 sequence */
    if (p->verbatim) {
        printer_write(p, p->text + p->printed, n - p->printed, false);
        p->printed = n;
        return;
    }
    p->think_tokens += p->thinking;
    for (;;) {
        const char *tag = p->thinking ? "</think>" : "<think>";
        size_t len = strlen(tag), rest = arrlenu(p->text) - p->printed, hold = 0;
        const char *hit = memmem(p->text + p->printed, rest, tag, len);
        if (hit && (p->thinking || !p->began)) { /* an answer that mentions <think> later on means the word */
            printer_emit(p, (size_t)(hit - p->text));
            p->printed += len;
            if (p->thinking && !p->show) printer_hidden(p, true);
            p->thinking = !p->thinking;
            continue;
        }
        if (p->thinking || !p->began)
            for (size_t k = 1; k < len && k <= rest; k++)
                if (!memcmp(p->text + arrlenu(p->text) - k, tag, k)) hold = k; /* perhaps the beginning of the tag */
        printer_emit(p, arrlenu(p->text) - hold);
        break;
    }
    if (p->thinking && !p->show && p->think_tokens % 8 == 1) printer_hidden(p, false);
}

static void printer_end(struct printer *p) {
    detok_end(&p->detok, &p->text);
    if (p->verbatim) printer_write(p, p->text + p->printed, arrlenu(p->text) - p->printed, false);
    else printer_emit(p, arrlenu(p->text));
    if (p->thinking && !p->show) printer_hidden(p, true);
    if (p->last != '\n' && p->ends_line && !p->mute) fputc('\n', stdout);
    out_flush();
    arrfree(p->out);
}

static struct printer printer_make(const struct chat *c, bool thinking, bool verbatim) {
    bool show = c->set->show_think == SHOW_ON || (c->set->show_think == SHOW_AUTO && term.out_tty);
    return (struct printer){.v = c->m->vocab,
                            .thinking = thinking,
                            .show = show,
                            .verbatim = verbatim,
                            .mute = c->set->quiet,
                            .ends_line = !verbatim || term.out_tty || c->set->lines,
                            .start = now_seconds()};
}

/* ---- generation ---- */

static uint32_t logit_hash(const float *x, int n) {
    uint32_t h = 0x811c9dc5u;
    for (int i = 0; i < n; i++) h = (h ^ f32_to_bits(x[i])) * 0x01000193u;
    return h;
}

enum stop_reason { STOP_END, STOP_LENGTH, STOP_CONTEXT, STOP_INTERRUPT };

/* Generates behind the synced session until the model stops; `p` prints. */
static enum stop_reason generate(struct chat *c, struct printer *p, struct turn_stats *st) {
    struct session *s = c->s;
    struct sampling o = settings_sampling(c->set);
    double t0 = now_seconds();
    enum stop_reason why = STOP_LENGTH;
    while (c->set->n_predict < 0 || st->n_generated < c->set->n_predict) {
        if (interrupted) {
            why = STOP_INTERRUPT;
            break;
        }
        int32_t id = session_sample(s, &o, &c->rng);
        if (!st->n_generated) st->first_seconds = now_seconds() - p->start;
        if (vocab_is_stop(c->m->vocab, id)) {
            why = STOP_END;
            break;
        }
        st->n_generated++;
        printer_token(p, id);
        if (s->n_past == s->n_ctx) {
            why = STOP_CONTEXT;
            break;
        }
        st->bytes += session_forward_bytes(s, 1);
        session_decode(s, id);
    }
    st->seconds = now_seconds() - t0;
    st->logit_hash = logit_hash(session_logits(s), c->m->n_vocab);
    printer_end(p);
    return why;
}

static void chat_stats_line(const struct chat *c, const struct turn_stats *st) {
    char a[32], b[32], d[32], line[256];
    double use = (double)c->s->n_past / c->s->n_ctx;
    if (c->set->quiet) return;
    int n = snprintf(line, sizeof line, "# %d tok", st->n_generated);
    if (st->n_generated && st->seconds > 0)
        n += snprintf(line + n, sizeof line - (size_t)n, " %.1f tok/s (%.1f GB/s)", st->n_generated / st->seconds,
                      st->bytes / st->seconds * 1e-9);
    if (st->n_prompt && st->prompt_seconds > 0)
        n += snprintf(line + n, sizeof line - (size_t)n, " | prompt %s at %.0f tok/s | first token %.2f s",
                      with_commas((uint64_t)st->n_prompt, a), st->n_prompt / st->prompt_seconds, st->first_seconds);
    snprintf(line + n, sizeof line - (size_t)n, " | context %s/%s (%.0f %%) | #%08x",
             with_commas((uint64_t)c->s->n_past, b), with_commas((uint64_t)c->s->n_ctx, d), 100 * use, st->logit_hash);
    note("%s", line);
    if (use > 0.8)
        note("%scontext %.0f %% full: %s a larger -c%s",
             !term.colour_err ? ""
             : use > 0.95     ? "\033[22;31m"
                              : "\033[22;33m",
             100 * use, context_remedy(), term.colour_err ? "\033[0m" : "");
}

static void chat_count(struct chat *c, const struct turn_stats *st) {
    c->last = *st, c->turns++;
    c->total.n_prompt += st->n_prompt, c->total.n_generated += st->n_generated;
    c->total.prompt_seconds += st->prompt_seconds, c->total.seconds += st->seconds, c->total.bytes += st->bytes;
}

/* Answers the messages as they are; the answer is appended unless nothing came of it. */
static enum turn_result chat_answer(struct chat *c, char *err) {
    struct text text = {0};
    int32_t *ids = NULL;
    struct turn_stats st = {0};
    enum turn_result result = TURN_FAILED;
    if (chat_render(c, true, &text, err)) {
        text_free(&text);
        return TURN_FAILED;
    }
    chat_tokenize(c, &text, &ids);
    bool opens = prompt_opens_think(&text);
    struct printer p = printer_make(c, opens, false);
    enum sync_result sync = session_sync(c->s, ids, (int)arrlen(ids), err);
    st.n_prompt = c->s->sync_tokens, st.prompt_seconds = c->s->sync_seconds;
    if (sync == SYNC_INTERRUPTED) result = TURN_ROLLED_BACK;
    if (sync == SYNC_DONE) {
        if (opens) sb_puts(&p.text, "<think>\n"), p.printed = arrlenu(p.text);
        size_t before = arrlenu(p.text);
        enum stop_reason why = generate(c, &p, &st);
        if (why == STOP_INTERRUPT) note("[stopped]");
        if (why == STOP_CONTEXT)
            note("[the context of %d tokens is full: the answer ends here; %s a larger -c]", c->s->n_ctx,
                 context_remedy());
        result = why == STOP_INTERRUPT ? TURN_STOPPED : TURN_DONE;
        if (why == STOP_INTERRUPT && arrlenu(p.text) == before) {
            result = TURN_ROLLED_BACK;
        } else {
            chat_push(c, "assistant", p.text, arrlenu(p.text));
            chat_count(c, &st);
            chat_stats_line(c, &st);
        }
    }
    arrfree(p.text);
    arrfree(ids);
    text_free(&text);
    return result;
}

static enum turn_result chat_turn(struct chat *c, const char *user, size_t n, char *err) {
    if (message_check("the message", user, n, err)) return TURN_FAILED;
    chat_push(c, "user", user, n);
    enum turn_result r = chat_answer(c, err);
    if (r == TURN_FAILED || r == TURN_ROLLED_BACK) chat_pop(c);
    return r;
}

static bool chat_last_is(const struct chat *c, const char *role) {
    return arrlen(c->messages) && !strcmp(arrlast(c->messages).role, role);
}

static int chat_regenerate(struct chat *c, enum turn_result *r, char *err) {
    if (chat_last_is(c, "user")) return *r = chat_answer(c, err), 0; /* as /load may leave it */
    if (!chat_last_is(c, "assistant")) return fail(err, "there is no message to answer");
    struct message old = arrpop(c->messages);
    *r = chat_answer(c, err);
    if (*r == TURN_FAILED || *r == TURN_ROLLED_BACK) {
        arrput(c->messages, old);
    } else {
        free(old.role), free(old.content);
    }
    return 0;
}

/* Cuts the timeline to what it shares with the messages, so that nothing taken back is saved or counted. */
static void chat_trim(struct chat *c) {
    char err[ERR_MAX];
    struct text text = {0};
    int32_t *ids = NULL;
    int keep = 0;
    if (arrlen(c->messages) && !chat_render(c, true, &text, err)) chat_tokenize(c, &text, &ids);
    while (keep < c->s->n_past && keep < arrlen(ids) && c->s->tokens[keep] == ids[keep]) keep++;
    c->s->n_past = keep;
    arrfree(ids);
    text_free(&text);
}

static int chat_undo(struct chat *c, char *err) {
    size_t n = arrlenu(c->messages);
    while (n && strcmp(c->messages[n - 1].role, "user")) n--;
    if (!n) return fail(err, "there is nothing to undo");
    while (arrlenu(c->messages) >= n) chat_pop(c);
    chat_trim(c);
    return 0;
}

/* Changes an option; a seed counts from here on. */
static int chat_set(struct chat *c, const char *name, const char *value, char *err) {
    if (option_set(c->set, name, value, err)) return -1;
    if (!strcmp(name, "seed")) c->rng = settings_seed(c->set);
    return 0;
}

static void chat_set_system(struct chat *c, const char *text) {
    bool has = arrlen(c->messages) && !strcmp(c->messages[0].role, "system"), want = text && *text;
    if (has && want) {
        free(c->messages[0].content);
        c->messages[0].content = xstrdup(text);
    } else if (has) {
        free(c->messages[0].role), free(c->messages[0].content);
        arrdel(c->messages, 0);
    } else if (want) {
        struct message msg = {xstrdup("system"), xstrdup(text)};
        arrins(c->messages, 0, msg);
    }
}

static void chat_clear(struct chat *c) {
    size_t keep = arrlen(c->messages) && !strcmp(c->messages[0].role, "system");
    while (arrlenu(c->messages) > keep) chat_pop(c);
    chat_trim(c);
}

/* ---- saved conversations: NAME.jsonl (messages) and NAME.kv (state), in ~/.moe unless NAME has a slash ---- */

/* Appends a name; a leading ~/ is the home directory. */
static void sb_path(char **sb, const char *name) {
    const char *home = getenv("HOME");
    bool at_home = home && !strncmp(name, "~/", 2);
    if (at_home) sb_puts(sb, home);
    sb_puts(sb, name + at_home);
}

static int chat_path(const char *name, const char *suffix, char out[4096], char *err) {
    const char *home = getenv("HOME");
    int n = (int)strnlen(name, 4096);
    if (n > 6 && !strcmp(name + n - 6, ".jsonl")) n -= 6; /* as /list does not show it */
    if (!*name || !utf8_valid(name, strlen(name)) || strlen(name) > 1024)
        return fail(err, "a name of 1 to 1024 bytes is wanted");
    if (strchr(name, '/')) {
        char *path = NULL;
        sb_path(&path, name);
        snprintf(out, 4096, "%.*s%s", (int)arrlen(path) - (int)strlen(name) + n, sb_cstr(&path), suffix);
        arrfree(path);
        return 0;
    }
    if (!home || !*home || strlen(home) > 2048) return fail(err, "HOME is not set: give a path with a slash");
    if (name[0] == '.') return fail(err, "a name does not begin with a dot");
    snprintf(out, 4096, "%s/.moe", home);
    if (mkdir(out, 0700) && errno != EEXIST) return fail(err, "cannot make '%s': %s", out, strerror(errno));
    snprintf(out, 4096, "%s/.moe/%.*s%s", home, n, name, suffix);
    return 0;
}

static int chat_save(struct chat *c, const char *name, char *err) {
    char path[4096];
    bool bad = false;
    FILE *f = chat_path(name, ".jsonl", path, err) ? NULL : temp_create(path, 0600, err);
    if (!f) return -1;
    fprintf(f, "{\"moe\":1,\"hash\":\"%016llx\"}\n", (unsigned long long)c->m->hash);
    for (size_t i = 0; i < arrlenu(c->messages); i++) {
        json_t *o = json_pack("{ssss}", "role", c->messages[i].role, "content", c->messages[i].content);
        bad |= !o || json_dumpf(o, f, JSON_COMPACT);
        fputc('\n', f);
        json_decref(o);
    }
    if (temp_finish(f, path, bad, err)) return -1;
    chat_trim(c);
    return chat_path(name, ".kv", path, err) || session_save(c->s, path, err) ? -1 : 0;
}

/* One line of the file as a message; false if it is none. */
static bool chat_parse_line(const char *line, size_t n, struct message *out) {
    json_t *o = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL);
    const char *role = json_string_value(json_object_get(o, "role")),
               *content = json_string_value(json_object_get(o, "content"));
    bool ok = role && content && (!strcmp(role, "system") || !strcmp(role, "user") || !strcmp(role, "assistant"));
    if (ok) *out = (struct message){xstrdup(role), xstrdup(content)};
    json_decref(o);
    return ok;
}

/* Parses a .jsonl file's text into *out. 0, or -1 with the line that is wrong and *out empty. */
static int chat_parse(const char *text, size_t n, struct message **out, char *err) {
    int line = 0, rc = 0;
    for (size_t at = 0; at < n && !rc;) {
        const char *end = memchr(text + at, '\n', n - at);
        size_t len = end ? (size_t)(end - text) - at : n - at;
        struct message msg;
        json_t *head = ++line == 1 ? json_loadb(text + at, len, 0, NULL) : NULL;
        if (line == 1 && json_integer_value(json_object_get(head, "moe")) != 1)
            rc = fail(err, "line 1 is not the header of a saved conversation");
        else if (line > 1 && len && !chat_parse_line(text + at, len, &msg))
            rc = fail(err, "line %d is not a message", line);
        else if (line > 1 && len) arrput(*out, msg);
        json_decref(head);
        at += len + 1;
    }
    if (!line) rc = fail(err, "it is empty");
    for (; rc && arrlen(*out); (void)arrpop(*out)) free(arrlast(*out).role), free(arrlast(*out).content);
    return rc;
}

static int chat_load(struct chat *c, const char *name, char *err) {
    char path[4096], why[ERR_MAX], *text = NULL;
    struct message *messages = NULL;
    struct stat st;
    if (chat_path(name, ".jsonl", path, err) || file_check(path, &st, err)) return -1;
    int rc = read_file(path, &text, err);
    if (!rc && chat_parse(text, arrlenu(text), &messages, why)) rc = fail(err, "'%s': %s", path, why);
    arrfree(text);
    if (rc) {
        arrfree(messages);
        return -1;
    }
    while (arrlen(c->messages)) chat_pop(c);
    arrfree(c->messages);
    c->messages = messages;
    if (chat_path(name, ".kv", path, err)) return -1;
    if (session_load(c->s, path, why)) note("%s: the conversation will be read again", why);
    return 0;
}

/* Saved conversations of ~/.moe, by name. */
static void chat_list(struct chat *c) {
    char path[4096], err[ERR_MAX];
    (void)c;
    if (chat_path("x", "", path, err)) {
        note("%s", err);
        return;
    }
    path[strlen(path) - 2] = 0;
    struct dirent **names = NULL;
    int n = scandir(path, &names, NULL, alphasort), shown = 0;
    for (int i = 0; i < n; i++) {
        char *dot = strrchr(names[i]->d_name, '.'), full[4400], when[32];
        struct stat st;
        snprintf(full, sizeof full, "%s/%s", path, names[i]->d_name);
        if (dot && !strcmp(dot, ".jsonl") && !stat(full, &st)) {
            char *safe = NULL;
            term_neutralise(&safe, names[i]->d_name, (size_t)(dot - names[i]->d_name));
            strftime(when, sizeof when, "%Y-%m-%d %H:%M", localtime(&st.st_mtime));
            fprintf(stderr, "  %s  %8lld bytes  %s\n", when, (long long)st.st_size, sb_cstr(&safe));
            arrfree(safe), shown++;
        }
        free(names[i]);
    }
    free(names);
    if (!shown) note("nothing is saved in %s", path);
}

static void chat_print_context(struct chat *c) {
    char a[32], b[32];
    chat_trim(c);
    double use = (double)c->s->n_past / c->s->n_ctx, per = (double)kv_token_bytes(c->m, c->s->r->kv_type);
    fprintf(stderr, "  [");
    for (int i = 0; i < 40; i++) fputc(i < (int)(use * 40 + 0.5) ? '#' : '.', stderr);
    fprintf(stderr, "] %s of %s tokens (%.0f %%)\n", with_commas((uint64_t)c->s->n_past, a),
            with_commas((uint64_t)c->s->n_ctx, b), 100 * use);
    fprintf(stderr, "  cache: %.1f of %.1f MiB (%s, %.0f bytes per token)\n", per * c->s->n_past / 0x1p20,
            (double)session_kv_bytes(c->s) / 0x1p20, kv_names[c->s->r->kv_type], per);
    for (size_t i = 0; i < arrlenu(c->messages); i++) {
        int32_t *ids = NULL;
        size_t n = strlen(c->messages[i].content);
        tokenize(c->m->vocab, c->messages[i].content, n, NULL, 0, &ids);
        fprintf(stderr, "  %-10s %7td tokens\n", c->messages[i].role, arrlen(ids));
        arrfree(ids);
    }
}

static void chat_print_stats(struct chat *c) {
    const struct turn_stats *t = &c->total;
    if (!c->turns) {
        note("no turn yet");
        return;
    }
    chat_stats_line(c, &c->last);
    fprintf(stderr, "  %d turns: %d tokens read in %.1f s, %d generated in %.1f s (%.1f tok/s, %.1f GB/s)\n", c->turns,
            t->n_prompt, t->prompt_seconds, t->n_generated, t->seconds,
            t->seconds > 0 ? t->n_generated / t->seconds : 0.0, t->seconds > 0 ? t->bytes / t->seconds * 1e-9 : 0.0);
}

/* ============================================================================================================
 * Keyboard
 *
 * Turns what a terminal sends into keys, and owns the terminal's mode while it does: term_raw takes it, term_restore gives
 * it back. Escape sequences follow ECMA-48 up to their final byte, so that an unknown one disappears whole. What a signal
 * has to tell (the window's size, a stop, Ctrl-C from elsewhere) arrives as a key as well.
 * ============================================================================================================ */

enum {
    ESCAPE_WAIT_MS = 100, /* within an escape sequence; after that it was the key ESC */
    PASTE_WAIT_MS = 5000  /* within a paste; after that its end was lost */
};

/* Keys are code points, control characters included; these stand above Unicode. */
enum {
    KEY_NONE = 0x110000,
    KEY_UP,
    KEY_DOWN,
    KEY_LEFT,
    KEY_RIGHT,
    KEY_HOME,
    KEY_END,
    KEY_DELETE,
    KEY_WORD_LEFT,
    KEY_WORD_RIGHT,
    KEY_WORD_RUBOUT, /* Alt-Backspace */
    KEY_WORD_DELETE, /* Alt-D */
    KEY_PASTE,       /* the pasted text lies in keyboard.paste */
    KEY_REDRAW,      /* the window's size or the terminal's mode changed */
    KEY_EOF
};

#define CONTROL(letter) ((letter)&31)

struct keyboard {
    char *in; /* bytes read and not yet used: from in_at on */
    size_t in_at;
    char *paste;
    int pushed; /* a key that key_read gives once more; 0: none */
    bool woken; /* a signal arrived in the middle of an escape sequence */
};

/* Appends s with NUL and malformed UTF-8 replaced by U+FFFD, CR LF and CR by LF. */
static void text_scrub(char **out, const char *s, size_t n) {
    for (size_t i = 0; i < n;) {
        int k = s[i] ? utf8_sequence(s + i, n - i) : -1;
        if (k <= 0) sb_puts(out, "\xef\xbf\xbd");
        else if (s[i] != '\r') sb_put(out, s + i, (size_t)k);
        else if (i + 1 == n || s[i + 1] != '\n') arrput(*out, '\n');
        i += k > 0 ? (size_t)k : 1;
    }
}

/* Signals of interest write a byte here. A flag alone could be set between its test and poll(), and with threads the handler
 * need not interrupt poll() at all. */
static int wake_pipe[2] = {-1, -1};

static void wake_up(int sig) {
    int saved = errno;
    (void)sig;
    ssize_t done = write(wake_pipe[1], "", 1); /* fails when it is full: awake already; or not there yet */
    (void)done;
    errno = saved;
}

static void write_all(int fd, const char *s, size_t n) {
    while (n) {
        ssize_t k = write(fd, s, n);
        if (k < 0 && errno == EAGAIN) poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, -1);
        if (k < 0 && errno != EINTR && errno != EAGAIN) return;
        if (k > 0) s += k, n -= (size_t)k;
    }
}

/* Takes the terminal, or takes it back after a stop. The keys of signals are read as characters; output is left alone. */
static void term_raw(void) {
    if (!term.raw && tcgetattr(0, &term.cooked)) return;
    term.raw = 1;
    struct termios t = term.cooked;
    t.c_iflag &= ~(tcflag_t)(BRKINT | ICRNL | INLCR | IGNCR | INPCK | ISTRIP | IXON);
    t.c_lflag &= ~(tcflag_t)(ECHO | ICANON | IEXTEN | ISIG);
    t.c_cflag |= CS8;
    t.c_cc[VMIN] = 1, t.c_cc[VTIME] = 0;
    tcsetattr(0, TCSADRAIN, &t);
    write_all(1, "\033[?2004h", 8); /* bracketed paste */
}

static bool input_ready(void) { return poll(&(struct pollfd){.fd = 0, .events = POLLIN}, 1, 0) > 0; }

enum {
    BYTE_EOF = -1,
    BYTE_NONE = -2 /* nothing in time */,
    BYTE_WAKE = -3 /* a signal, only when waiting for ever */
};

/* The next byte, waiting for wait_ms (-1: for ever). */
static int input_byte(struct keyboard *kb, int wait_ms) {
    while (kb->in_at == arrlenu(kb->in)) {
        struct pollfd p[2] = {{.fd = 0, .events = POLLIN}, {.fd = wake_pipe[0], .events = POLLIN}};
        char drain[64];
        int k = poll(p, 2, wait_ms);
        if (k == 0) return BYTE_NONE;
        if (k < 0 && errno != EINTR) return BYTE_EOF;
        if (k < 0) continue;
        if (p[1].revents) {
            while (read(wake_pipe[0], drain, sizeof drain) > 0) continue;
            if (wait_ms < 0) return BYTE_WAKE;
            kb->woken = true;
        }
        if (!p[0].revents) continue;
        arrsetlen(kb->in, 4096);
        kb->in_at = 0;
        ssize_t n = read(0, kb->in, 4096);
        arrsetlen(kb->in, n > 0 ? (size_t)n : 0);
        if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return BYTE_EOF;
    }
    return (uint8_t)kb->in[kb->in_at++];
}

/* What was typed while the terminal was not raw: whole lines, whose Enter arrives as a newline. */
static void input_typeahead(struct keyboard *kb) {
    while (input_ready()) {
        char line[4096];
        ssize_t n = read(0, line, sizeof line);
        if (n < 0) return;
        if (n == 0) arrput(kb->in, CONTROL('D'));
        if (n == 0) return;
        if (line[n - 1] == '\n') line[n - 1] = '\r';
        sb_put(&kb->in, line, (size_t)n);
    }
}

/* A bracketed paste, up to its end mark. */
static int key_paste(struct keyboard *kb) {
    static const char mark[] = "\033[201~";
    const size_t m = sizeof mark - 1;
    char *raw = NULL;
    for (int c; (c = input_byte(kb, PASTE_WAIT_MS)) >= 0;) {
        arrput(raw, (char)c);
        size_t n = arrlenu(raw);
        if (c == '~' && n >= m && !memcmp(raw + n - m, mark, m)) {
            arrsetlen(raw, n - m);
            break;
        }
    }
    arrsetlen(kb->paste, 0);
    text_scrub(&kb->paste, raw, arrlenu(raw));
    arrfree(raw);
    return KEY_PASTE;
}

/* The rest of a sequence that began with CSI or SS3: parameters up to a final byte (ECMA-48, 5.4), whether known or not. */
static int key_sequence(struct keyboard *kb) {
    int p[4] = {0}, i = 0, c = input_byte(kb, ESCAPE_WAIT_MS);
    if (c == '[') { /* the Linux console's F1 to F5: ESC [ [ A */
        input_byte(kb, ESCAPE_WAIT_MS);
        return KEY_NONE;
    }
    for (; c >= 0x20 && c < 0x40; c = input_byte(kb, ESCAPE_WAIT_MS)) {
        if (c == ';') i += i < 3;
        else if (isdigit(c) && p[i] < 10000) p[i] = p[i] * 10 + c - '0';
    }
    if (c >= 0 && (c < 0x20 || c > 0x7e)) kb->in_at--; /* not a sequence after all: the byte counts for itself */
    bool by_word = p[1] > 2;                           /* 1 + modifiers: 2 Shift, 3 Alt, 5 Ctrl */
    switch (c) {
    case 'A': return KEY_UP;
    case 'B': return KEY_DOWN;
    case 'C': return by_word ? KEY_WORD_RIGHT : KEY_RIGHT;
    case 'D': return by_word ? KEY_WORD_LEFT : KEY_LEFT;
    case 'F': return KEY_END;
    case 'H': return KEY_HOME;
    case 'M': return '\r';                           /* Enter of the keypad */
    case 'u': return p[0] == '\r' ? '\n' : KEY_NONE; /* Shift-Enter of terminals that tell it */
    case '~':
        switch (p[0]) {
        case 1:
        case 7: return KEY_HOME;
        case 4:
        case 8: return KEY_END;
        case 3: return KEY_DELETE;
        case 27: return p[2] == '\r' ? '\n' : KEY_NONE; /* Shift-Enter, xterm's older form */
        case 200: return key_paste(kb);
        }
    }
    return KEY_NONE;
}

/* The rest of a sequence that began with ESC. */
static int key_escape(struct keyboard *kb) {
    int c;
    do c = input_byte(kb, ESCAPE_WAIT_MS);
    while (c == 27);
    switch (c) {
    case '[':
    case 'O': return key_sequence(kb);
    case '\r':
    case '\n': return '\n';
    case 'b': return KEY_WORD_LEFT;
    case 'f': return KEY_WORD_RIGHT;
    case 'd': return KEY_WORD_DELETE;
    case 8:
    case 127: return KEY_WORD_RUBOUT;
    }
    if (c >= 0x80) kb->in_at--;
    return KEY_NONE;
}

/* Waits for the next key. */
static int key_read(struct keyboard *kb) {
    int key = kb->pushed;
    kb->pushed = 0;
    if (key) return key;
    int c = kb->woken ? BYTE_WAKE : input_byte(kb, -1);
    if (c == BYTE_WAKE) {
        bool stop = interrupted;
        kb->woken = false, interrupted = 0;
        return stop ? CONTROL('C') : KEY_REDRAW;
    }
    if (c < 0) return KEY_EOF;
    if (c == 27) return key_escape(kb);
    if (c < 0x80) return c;
    char s[4] = {(char)c};
    int n = 1, k;
    while ((k = utf8_sequence(s, (size_t)n)) == 0 && (c = input_byte(kb, ESCAPE_WAIT_MS)) >= 0) s[n++] = (char)c;
    if (k < 0 && n > 1) kb->in_at--; /* the byte that broke the sequence begins the next */
    utf8proc_int32_t cp = 0xfffd;
    if (k > 0) utf8proc_iterate((const uint8_t *)s, k, &cp);
    return cp;
}

/* ============================================================================================================
 * Edited text and history
 *
 * Owns what is being typed and what was typed before. Invariants: the text is valid UTF-8 without NUL and CR; the cursor
 * stands between two code points and never inside a folded paste. It moves by units, a unit being a grapheme cluster, a
 * newline or a folded paste; only an edit that joins what is on both sides of it (half of a flag typed before another flag)
 * leaves it within one, because the other half may follow. Knows nothing of the screen and of keys. Positions are found by
 * scanning from the front, which folding and HISTORY_ENTRY_MAX keep short.
 * ============================================================================================================ */

enum {
    HISTORY_MAX = 1000,        /* entries kept, in memory and in the file */
    HISTORY_ENTRY_MAX = 65536, /* bytes; a longer text is not remembered */
    FOLD_LINES = 8,            /* a paste of more lines or bytes than these is shown as a label */
    FOLD_BYTES = 400
};

/* A pasted stretch of the text, shown as one label; the cursor never stands inside. */
struct fold {
    size_t at, len; /* bytes of the text */
    int lines;
};

struct editor {
    char *text;
    size_t cursor; /* byte offset into text */
    struct fold *folds;
    const char *const *words; /* NULL-terminated: what Tab completes behind a leading slash; or NULL */
    bool screen;              /* the terminal can move its cursor */

    char **history;    /* oldest first */
    size_t history_at; /* the entry that is shown; arrlen(history): the draft */
    char *draft;       /* what was typed, while a history entry is shown */
    struct fold *draft_folds;
    char *history_path; /* or NULL */

    struct keyboard keys;
    const char *prompt, *continuation;
    int row;  /* of the cursor, in rows below the first one on the screen */
    int top;  /* row of the layout that is shown first: non-zero when the text is taller than the screen */
    int cols; /* width of the last refresh */
};

/* Columns on a terminal: the sum over the code points, as wcwidth-based terminals count a cluster. */
static int text_width(const char *s, size_t n) {
    int width = 0;
    for (utf8proc_int32_t cp; n;) {
        utf8proc_ssize_t k = utf8proc_iterate((const uint8_t *)s, (utf8proc_ssize_t)n, &cp);
        if (k <= 0) break;
        width += utf8proc_charwidth(cp);
        s += k, n -= (size_t)k;
    }
    return width;
}

/* The fold that begins at pos, or NULL. */
static const struct fold *fold_at(const struct editor *e, size_t pos) {
    for (int i = 0; i < arrlen(e->folds); i++)
        if (e->folds[i].at == pos) return &e->folds[i];
    return NULL;
}

static bool newline_at(const struct editor *e, size_t pos) { return e->text[pos] == '\n' && !fold_at(e, pos); }

/* Bytes of the grapheme cluster that valid UTF-8 begins with. */
static size_t cluster_bytes(const char *s, size_t n) {
    utf8proc_int32_t last = -1, cp, state = 0;
    size_t at = 0;
    while (at < n) {
        utf8proc_ssize_t k = utf8proc_iterate((const uint8_t *)s + at, (utf8proc_ssize_t)(n - at), &cp);
        if (last >= 0 && utf8proc_grapheme_break_stateful(last, cp, &state)) break;
        at += (size_t)k, last = cp;
    }
    return at;
}

/* End of the unit that begins at pos. */
static size_t unit_next(const struct editor *e, size_t pos) {
    const struct fold *f = fold_at(e, pos);
    size_t end = arrlenu(e->text);
    if (f) return f->at + f->len;
    for (int i = 0; i < arrlen(e->folds); i++)
        if (e->folds[i].at > pos && e->folds[i].at < end) end = e->folds[i].at;
    return pos < end ? pos + cluster_bytes(e->text + pos, end - pos) : pos;
}

/* Beginning of the unit before pos. */
static size_t unit_prev(const struct editor *e, size_t pos) {
    size_t p = 0;
    for (size_t q = 0; q < pos; q = unit_next(e, p)) p = q;
    return p;
}

static size_t line_start(const struct editor *e, size_t pos) {
    size_t start = 0;
    for (size_t p = 0, q; p < pos; p = q) {
        q = unit_next(e, p);
        if (newline_at(e, p)) start = q;
    }
    return start;
}

static size_t line_end(const struct editor *e, size_t pos) {
    while (pos < arrlenu(e->text) && !newline_at(e, pos)) pos = unit_next(e, pos);
    return pos;
}

/* Words are runs of letters and digits, or with `blanks` of anything but white space. */
static bool word_at(const struct editor *e, size_t pos, bool blanks) {
    uint8_t c = (uint8_t)e->text[pos];
    return fold_at(e, pos) || c >= 0x80 || (blanks ? !isspace(c) : isalnum(c));
}

static size_t word_left(const struct editor *e, size_t pos, bool blanks) {
    size_t start = 0;
    bool inside = false;
    for (size_t p = 0; p < pos; p = unit_next(e, p)) {
        bool word = word_at(e, p, blanks);
        if (word && !inside) start = p;
        inside = word;
    }
    return start;
}

static size_t word_right(const struct editor *e, size_t pos) {
    size_t n = arrlenu(e->text);
    while (pos < n && !word_at(e, pos, false)) pos = unit_next(e, pos);
    while (pos < n && word_at(e, pos, false)) pos = unit_next(e, pos);
    return pos;
}

/* At the cursor, which moves behind it. */
static void text_insert(struct editor *e, const char *s, size_t n) {
    if (!n) return;
    arrinsn(e->text, e->cursor, n);
    memcpy(e->text + e->cursor, s, n);
    for (int i = 0; i < arrlen(e->folds); i++)
        if (e->folds[i].at >= e->cursor) e->folds[i].at += n;
    e->cursor += n;
}

/* Removes [from, to) and leaves the cursor there. */
static void text_delete(struct editor *e, size_t from, size_t to) {
    if (from == to) return;
    arrdeln(e->text, from, to - from);
    for (int i = (int)arrlen(e->folds); i-- > 0;) {
        if (e->folds[i].at >= to) e->folds[i].at -= to - from;
        else if (e->folds[i].at >= from) arrdel(e->folds, i);
    }
    e->cursor = from;
}

static void text_set(struct editor *e, const char *s, size_t n) {
    arrsetlen(e->text, 0);
    arrsetlen(e->folds, 0);
    e->cursor = 0;
    text_insert(e, s, n);
}

/* As typed, but shown as a label when it is long. */
static void text_insert_paste(struct editor *e) {
    size_t n = arrlenu(e->keys.paste);
    struct fold f = {e->cursor, n, n && e->keys.paste[n - 1] != '\n'};
    for (size_t i = 0; i < n; i++) f.lines += e->keys.paste[i] == '\n';
    text_insert(e, e->keys.paste, n);
    if (n > FOLD_BYTES || f.lines > FOLD_LINES) arrput(e->folds, f);
}

/* Whether the text began with """ as it was typed: in a folded paste these are no marks. */
static bool text_is_block(const struct editor *e) {
    return arrlen(e->text) >= 3 && !memcmp(e->text, "\"\"\"", 3) && !fold_at(e, 0);
}

/* Why the text cannot be sent yet: 0 it can, '\\' its last line ends in a backslash (in an odd number of them), '"' a block
 * is not closed. */
static int text_continues(const struct editor *e) {
    size_t n = arrlenu(e->text), slashes = 0;
    if (text_is_block(e)) {
        while (isspace((uint8_t)e->text[n - 1])) n--;
        return n < 6 || memcmp(e->text + n - 3, "\"\"\"", 3) ? '"' : 0;
    }
    while (slashes < n && e->text[n - 1 - slashes] == '\\') slashes++;
    return slashes & 1 ? '\\' : 0;
}

/* Appends the text as it is sent: a block without its marks and the line breaks next to them. */
static void text_send(const struct editor *e, char **line) {
    const char *s = e->text;
    size_t n = arrlenu(s);
    if (text_is_block(e) && !text_continues(e)) {
        while (isspace((uint8_t)s[n - 1])) n--;
        s += 3, n -= 6;
        if (n && *s == '\n') s++, n--;
        if (n && s[n - 1] == '\n') n--;
    }
    sb_put(line, s, n);
}

/* ---- history ---- */

static void history_put(struct editor *e, const char *s, size_t n) {
    arrput(e->history, xstrndup(s, n));
    if (arrlen(e->history) > HISTORY_MAX) {
        free(e->history[0]);
        arrdel(e->history, 0);
    }
}

/* An entry as a line of the file: newlines become CR, which no text contains. */
static void history_line(char **out, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) arrput(*out, s[i] == '\n' ? '\r' : s[i]);
    arrput(*out, '\n');
}

/* Reads the file, whatever it holds, and shortens it when it has outgrown the limit. */
static void history_load(struct editor *e) {
    char *data = NULL, *entry = NULL, *tmp = NULL, err[ERR_MAX];
    struct stat st;
    size_t entries = 0, end;
    if (stat(e->history_path, &st) || !S_ISREG(st.st_mode) || st.st_size > (off_t)HISTORY_MAX * HISTORY_ENTRY_MAX)
        return;
    if (read_file(e->history_path, &data, err)) return;
    for (size_t at = 0; at < arrlenu(data); at = end + 1) {
        for (end = at; end < arrlenu(data) && data[end] != '\n'; end++) continue;
        if (end == at || end - at > HISTORY_ENTRY_MAX) continue;
        arrsetlen(entry, 0);
        text_scrub(&entry, data + at, end - at);
        history_put(e, entry, arrlenu(entry));
        entries++;
    }
    arrsetlen(data, 0);
    sb_printf(&tmp, "%s.%d", e->history_path, (int)getpid());
    int fd = entries > HISTORY_MAX ? open(sb_cstr(&tmp), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        for (int i = 0; i < arrlen(e->history); i++) history_line(&data, e->history[i], strlen(e->history[i]));
        bool whole = write(fd, data, arrlenu(data)) == (ssize_t)arrlen(data);
        if (close(fd) || !whole || rename(tmp, e->history_path)) unlink(tmp);
    }
    arrfree(data);
    arrfree(entry);
    arrfree(tmp);
}

/* Remembers a line. The file is opened for each and extended by one O_APPEND write, so that programs running side by side
 * mix whole lines; a file that cannot be written costs nothing but the memory of it. */
static void editor_history_add(struct editor *e, const char *line, size_t n) {
    if (!n || n > HISTORY_ENTRY_MAX) return;
    if (arrlen(e->history) && !strncmp(arrlast(e->history), line, n) && !arrlast(e->history)[n]) return;
    history_put(e, line, n);
    int fd = e->history_path ? open(e->history_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600) : -1;
    if (fd < 0) return;
    char *data = NULL;
    history_line(&data, line, n);
    if (!fchmod(fd, 0600) && write(fd, data, arrlenu(data)) < 0) note("cannot write '%s'", e->history_path);
    arrfree(data);
    close(fd);
}

/* Shows the entry `step` away; past the last one stands the draft. */
static void history_move(struct editor *e, int step) {
    size_t n = arrlenu(e->history), to = e->history_at + (size_t)step;
    if (to > n || !step) return; /* below 0 it wraps */
    if (e->history_at == n || to == n) {
        char *text = e->text;
        struct fold *folds = e->folds;
        e->text = e->draft, e->draft = text;
        e->folds = e->draft_folds, e->draft_folds = folds;
    }
    e->history_at = to;
    if (to < n) text_set(e, e->history[to], strlen(e->history[to]));
    e->cursor = arrlenu(e->text);
}

/* ============================================================================================================
 * Line editor
 *
 * Reads one text from the terminal. It does not know what a text means: the words that Tab completes are handed in. Every
 * refresh computes the whole picture from (text, cursor, width) and is one write(), so nothing about the screen is
 * remembered but the row of the cursor. Where the terminal cannot move its cursor (TERM=dumb, stdout redirected), lines
 * are read as the terminal gives them.
 * ============================================================================================================ */

enum edit_result { EDIT_MORE = -1 /* not finished: only within the editor */, EDIT_LINE, EDIT_EOF, EDIT_INTERRUPT };

/* The picture of prompt and text: rows of `cols` columns. A row ends in two bytes: CR LF behind a newline of the text, or
 * where the text wraps a space and CR, which make any terminal step to the next row and remember that the two belong
 * together (for copying, and when it re-wraps on a resize). */
struct picture {
    char *out;
    size_t *rows;      /* offset of each row in out */
    const char *style; /* an SGR sequence, or "" */
    int height, cols;  /* of the terminal */
    int row, col;      /* where the next cell goes */
    int cursor_row, cursor_col;
    int goal_row, goal_col; /* in: a place on the screen, row -1: none */
    size_t goal; /* out: the position in the text nearest to it in that row, SIZE_MAX: there is no such row */
};

/* The style ends with each row and begins again in the next, because a view that is scrolled begins at any row. */
static void picture_break(struct picture *p, const char two[static 2]) {
    if (*p->style) sb_puts(&p->out, "\033[0m");
    sb_put(&p->out, two, 2);
    arrput(p->rows, arrlenu(p->out));
    sb_puts(&p->out, p->style);
    p->row++, p->col = 0;
}

/* Makes room for a cell: one that is two columns wide is not cut at the edge. */
static void picture_fit(struct picture *p, int width) {
    if (p->col + width <= p->cols || !p->col) return;
    for (; p->col < p->cols; p->col++) arrput(p->out, ' ');
    picture_break(p, " \r");
}

static void picture_cell(struct picture *p, const char *s, size_t n, int width) {
    picture_fit(p, width);
    sb_put(&p->out, s, n);
    p->col += width;
    if (p->col >= p->cols) picture_break(p, " \r");
}

/* What is not itself text: valid UTF-8 without control characters. */
static void picture_label(struct picture *p, const char *s, const char *style) {
    p->style = term.colour_out ? style : "";
    sb_puts(&p->out, p->style);
    for (size_t left = strlen(s), n; left; s += n, left -= n) {
        n = cluster_bytes(s, left);
        picture_cell(p, s, n, text_width(s, n));
    }
    if (*p->style) sb_puts(&p->out, "\033[0m");
    p->style = "";
}

/* What stands for one unit of the text; only the last form is the text itself, so nothing of it acts on the terminal. */
static void picture_unit(const struct editor *e, struct picture *p, size_t from, size_t to) {
    const struct fold *f = fold_at(e, from);
    const uint8_t *s = (const uint8_t *)e->text + from;
    char label[64];
    if (f) {
        snprintf(label, sizeof label, "[pasted %d line%s]", f->lines, f->lines == 1 ? "" : "s");
        picture_label(p, label, "\033[2m");
    } else if (*s == '\n') {
        picture_break(p, "\r\n");
        picture_label(p, e->continuation, "\033[2m");
    } else if (*s == '\t') {
        picture_label(p, "    ", "");
    } else if (*s < 32 || *s == 127) {
        snprintf(label, sizeof label, "^%c", *s ^ 64);
        picture_label(p, label, "\033[2m");
    } else if (*s == 0xc2 && s[1] < 0xa0) {
        snprintf(label, sizeof label, "\\x%02x", s[1]);
        picture_label(p, label, "\033[2m");
    } else {
        picture_cell(p, (const char *)s, to - from, text_width((const char *)s, to - from));
    }
}

static void picture_draw(const struct editor *e, struct picture *p) {
    size_t n = arrlenu(e->text), next;
    struct winsize w = {0};
    p->height = !ioctl(1, TIOCGWINSZ, &w) && w.ws_row ? w.ws_row : 24;
    p->cols = w.ws_col ? w.ws_col : 80;
    arrsetlen(p->out, 0);
    arrsetlen(p->rows, 0);
    arrput(p->rows, 0);
    p->row = p->col = 0, p->goal = SIZE_MAX, p->style = "";
    picture_label(p, e->prompt, "\033[1m");
    for (size_t at = 0;; at = next) {
        next = unit_next(e, at);
        if (at < n && !fold_at(e, at)) picture_fit(p, text_width(e->text + at, next - at));
        if (at <= e->cursor) p->cursor_row = p->row, p->cursor_col = p->col;
        if (p->row == p->goal_row && (p->goal == SIZE_MAX || p->col <= p->goal_col)) p->goal = at;
        if (at >= n) return;
        picture_unit(e, p, at, next);
    }
}

static void picture_free(struct picture *p) {
    arrfree(p->out);
    arrfree(p->rows);
}

/* Draws everything anew, from the row where it began. */
static void editor_refresh(struct editor *e) {
    struct picture p = {.goal_row = -1};
    char *out = NULL;
    picture_draw(e, &p);
    int rows = (int)arrlen(p.rows), height = p.height;
    if (e->top > rows - height) e->top = rows > height ? rows - height : 0;
    if (p.cursor_row < e->top) e->top = p.cursor_row;
    if (p.cursor_row >= e->top + height) e->top = p.cursor_row - height + 1;
    int last = rows > e->top + height ? e->top + height - 1 : rows - 1;
    /* A terminal that became narrower or wider has wrapped the same text anew, so the cursor now stands where it belongs. */
    if (e->cols && e->cols != p.cols) e->row = p.cursor_row - e->top;
    if (e->row >= height) e->row = height - 1;

    sb_puts(&out, "\033[?25l\r");
    if (e->row > 0) sb_printf(&out, "\033[%dA", e->row);
    sb_puts(&out, "\033[J");
    size_t from = p.rows[e->top], to = last == rows - 1 ? arrlenu(p.out) : p.rows[last + 1] - 2;
    sb_put(&out, p.out + from, to - from);
    if (last > p.cursor_row) sb_printf(&out, "\033[%dA", last - p.cursor_row);
    sb_puts(&out, "\r");
    if (p.cursor_col) sb_printf(&out, "\033[%dC", p.cursor_col);
    sb_puts(&out, "\033[?25h");
    write_all(1, out, arrlenu(out));
    e->row = p.cursor_row - e->top, e->cols = p.cols;
    arrfree(out);
    picture_free(&p);
}

/* Puts the cursor below the text, for other output; the next refresh begins there. */
static void editor_leave(struct editor *e) {
    e->cursor = arrlenu(e->text);
    editor_refresh(e);
    write_all(1, "\r\n", 2);
    e->row = e->top = e->cols = 0;
}

/* Up and Down: through the rows of the text, then through the history. */
static void move_vertically(struct editor *e, int step) {
    struct picture p = {.goal_row = -1};
    picture_draw(e, &p);
    p.goal_row = p.cursor_row + step, p.goal_col = p.cursor_col;
    picture_draw(e, &p);
    if (p.goal_row >= 0 && p.goal != SIZE_MAX) e->cursor = p.goal;
    else history_move(e, step);
    picture_free(&p);
}

/* ---- keys ---- */

/* Tab behind "/pre": as far as the words with that beginning agree; when that is nowhere, lists them. */
static void editor_complete(struct editor *e) {
    const char *found = NULL;
    char *list = NULL;
    size_t n = e->cursor, common = 0, count = 0;
    if (!e->words || !n || e->text[0] != '/') return;
    for (int i = 0; e->words[i]; i++) {
        const char *w = e->words[i];
        if (strncmp(w, e->text + 1, n - 1)) continue;
        if (!found) found = w, common = strlen(w);
        while (strncmp(w, found, common)) common--;
        sb_printf(&list, "/%s  ", w);
        count++;
    }
    if (found) text_insert(e, found + n - 1, common - (n - 1));
    if (count == 1) text_insert(e, " ", 1);
    if (count > 1 && common == n - 1) {
        size_t at = e->cursor;
        editor_leave(e);
        sb_puts(&list, "\r\n");
        write_all(1, list, arrlenu(list));
        e->cursor = at;
    }
    arrfree(list);
}

/* Ctrl-R: the newest entry that contains what is typed. Ctrl-R again goes to an older one, Ctrl-C and Ctrl-G give the line
 * back as it was, any other key takes the entry and then acts on it. */
static void editor_search(struct editor *e) {
    const char *prompt = e->prompt;
    char *query = NULL, *shown = NULL, *text = NULL;
    struct fold *folds = NULL;
    size_t cursor = e->cursor, history_at = e->history_at;
    int key, at = (int)arrlen(e->history);
    sb_put(&text, e->text, arrlenu(e->text));
    for (int i = 0; i < arrlen(e->folds); i++) arrput(folds, e->folds[i]);
    for (;;) {
        arrsetlen(shown, 0);
        sb_puts(&shown, "(search '");
        term_neutralise(&shown, query, arrlenu(query));
        sb_puts(&shown, "') ");
        e->prompt = sb_cstr(&shown);
        editor_refresh(e);
        key = key_read(&e->keys);
        int from = at;
        if (key == KEY_REDRAW) {
            term_raw();
            continue;
        }
        if (key == 127 || key == CONTROL('H')) {
            while (arrlen(query) && ((uint8_t)arrpop(query) & 0xc0) == 0x80) continue;
            from = (int)arrlen(e->history) - 1;
        } else if (key >= 32 && key != 127 && key < KEY_NONE) {
            char s[4];
            sb_put(&query, s, (size_t)utf8proc_encode_char(key, (uint8_t *)s));
            if (from == (int)arrlen(e->history)) from--;
        } else if (key == CONTROL('R')) {
            from--;
        } else {
            break;
        }
        while (from >= 0 && !strstr(e->history[from], sb_cstr(&query))) from--;
        if (from < 0 || !arrlen(query)) continue;
        history_move(e, from - (int)e->history_at);
        at = from;
    }
    if (key == CONTROL('C') || key == CONTROL('G')) {
        history_move(e, (int)history_at - (int)e->history_at);
        text_set(e, text, arrlenu(text));
        for (int i = 0; i < arrlen(folds); i++) arrput(e->folds, folds[i]);
        e->cursor = cursor;
    } else {
        e->keys.pushed = key;
    }
    e->prompt = prompt;
    arrfree(query);
    arrfree(shown);
    arrfree(text);
    arrfree(folds);
}

/* Ctrl-Z. */
static void editor_suspend(struct editor *e) {
    size_t at = e->cursor;
    editor_leave(e);
    term_restore();
    kill(0, SIGTSTP); /* the whole job, as the terminal does it */
    term_raw();
    e->cursor = at;
}

/* Enter: the end, unless a backslash (which goes) or an open block asks for another line. */
static enum edit_result editor_enter(struct editor *e) {
    int why = text_continues(e);
    if (!why) return EDIT_LINE;
    if (why == '\\') {
        e->cursor = arrlenu(e->text);
        text_delete(e, e->cursor - 1, e->cursor);
    }
    text_insert(e, "\n", 1);
    return EDIT_MORE;
}

static enum edit_result editor_key(struct editor *e, int key) {
    size_t n = arrlenu(e->text), at = e->cursor, to;
    char s[4];
    switch (key) {
    case KEY_EOF: return EDIT_EOF;
    case '\r': return editor_enter(e);
    case '\n': text_insert(e, "\n", 1); break;
    case '\t': editor_complete(e); break;
    case KEY_PASTE: text_insert_paste(e); break;
    case KEY_HOME:
    case CONTROL('A'): e->cursor = line_start(e, at); break;
    case KEY_END:
    case CONTROL('E'): e->cursor = line_end(e, at); break;
    case KEY_LEFT:
    case CONTROL('B'): e->cursor = unit_prev(e, at); break;
    case KEY_RIGHT:
    case CONTROL('F'): e->cursor = unit_next(e, at); break;
    case KEY_UP:
    case CONTROL('P'): move_vertically(e, -1); break;
    case KEY_DOWN:
    case CONTROL('N'): move_vertically(e, 1); break;
    case KEY_WORD_LEFT: e->cursor = word_left(e, at, false); break;
    case KEY_WORD_RIGHT: e->cursor = word_right(e, at); break;
    case CONTROL('D'):
        if (!n) return EDIT_EOF;
        __attribute__((fallthrough));
    case KEY_DELETE: text_delete(e, at, unit_next(e, at)); break;
    case 127:
    case CONTROL('H'): text_delete(e, unit_prev(e, at), at); break;
    case CONTROL('K'): /* at the end of a line: the newline */
        to = line_end(e, at);
        text_delete(e, at, to == at ? unit_next(e, at) : to);
        break;
    case CONTROL('U'): text_delete(e, line_start(e, at), at); break;
    case CONTROL('W'): text_delete(e, word_left(e, at, true), at); break;
    case KEY_WORD_RUBOUT: text_delete(e, word_left(e, at, false), at); break;
    case KEY_WORD_DELETE: text_delete(e, at, word_right(e, at)); break;
    case CONTROL('C'):
        if (!n) return EDIT_INTERRUPT;
        e->history_at = arrlenu(e->history);
        text_set(e, "", 0);
        break;
    case CONTROL('L'):
        write_all(1, "\033[H\033[2J", 7);
        e->row = 0;
        break;
    case CONTROL('R'): editor_search(e); break;
    case CONTROL('Z'): editor_suspend(e); break;
    case KEY_REDRAW: term_raw(); break;
    default:
        if (key >= 32 && key < KEY_NONE) text_insert(e, s, (size_t)utf8proc_encode_char(key, (uint8_t *)s));
    }
    return EDIT_MORE;
}

/* Line by line as the terminal edits them itself; the prompt never goes to a stdout that is not a terminal. */
static enum edit_result editor_read_plain(struct editor *e) {
    const char *prompt = e->prompt;
    for (;;) {
        char *line = NULL;
        int c;
        if (term.in_tty && (term.out_tty || term.err_tty)) write_all(term.out_tty ? 1 : 2, prompt, strlen(prompt));
        while ((c = input_byte(&e->keys, -1)) != '\n' && c != BYTE_EOF && !(c == BYTE_WAKE && interrupted))
            if (c >= 0) arrput(line, (char)c);
        if (arrlen(line) && arrlast(line) == '\r') (void)arrpop(line);
        text_scrub(&e->text, line, arrlenu(line));
        arrfree(line);
        if (c == BYTE_WAKE) {
            interrupted = 0;
            if (term.err_tty) write_all(2, "\n", 1);
            return EDIT_INTERRUPT;
        }
        int why = text_continues(e);
        if (c == BYTE_EOF) return arrlen(e->text) ? EDIT_LINE : EDIT_EOF;
        if (!why) return EDIT_LINE;
        if (why == '\\') (void)arrpop(e->text);
        arrput(e->text, '\n');
        prompt = e->continuation;
    }
}

static enum edit_result editor_read_screen(struct editor *e) {
    static const int signals[2] = {SIGWINCH, SIGCONT};
    struct sigaction sa = {.sa_handler = wake_up, .sa_flags = SA_RESTART}, old[2];
    enum edit_result r;
    for (int i = 0; i < 2; i++) sigaction(signals[i], &sa, &old[i]);
    input_typeahead(&e->keys);
    term_raw();
    do {
        if (!e->keys.pushed && e->keys.in_at == arrlenu(e->keys.in) && !input_ready()) editor_refresh(e);
        r = editor_key(e, key_read(&e->keys));
    } while (r == EDIT_MORE);
    if (r != EDIT_EOF) editor_leave(e);
    term_restore();
    for (int i = 0; i < 2; i++) sigaction(signals[i], &old[i], NULL);
    return r;
}

/* Reads one text; the prompt stands before its first line, the continuation before the others. On EDIT_LINE *line is replaced
 * by the text. EDIT_EOF leaves the cursor behind the prompt, the others at the start of a row. */
static enum edit_result editor_read(struct editor *e, const char *prompt, const char *continuation, char **line) {
    fflush(stdout);
    text_set(e, "", 0);
    arrsetlen(e->draft, 0);
    arrsetlen(e->draft_folds, 0);
    e->history_at = arrlenu(e->history);
    e->prompt = prompt, e->continuation = continuation;
    e->row = e->top = e->cols = 0;
    enum edit_result r = e->screen ? editor_read_screen(e) : editor_read_plain(e);
    arrsetlen(*line, 0);
    if (r == EDIT_LINE) text_send(e, line);
    return r;
}

/* history_path NULL: nothing is kept beyond the run. */
static void editor_init(struct editor *e, const char *history_path) {
    const char *t = getenv("TERM");
    memset(e, 0, sizeof *e);
    e->screen = term.in_tty && term.out_tty && t && *t && strcmp(t, "dumb");
    if (wake_pipe[0] < 0 && pipe2(wake_pipe, O_CLOEXEC | O_NONBLOCK)) die("cannot make a pipe: %s", strerror(errno));
    if (!history_path) return;
    e->history_path = xstrdup(history_path);
    history_load(e);
}

static void editor_free(struct editor *e) {
    for (int i = 0; i < arrlen(e->history); i++) free(e->history[i]);
    arrfree(e->history);
    arrfree(e->text);
    arrfree(e->folds);
    arrfree(e->draft);
    arrfree(e->draft_folds);
    arrfree(e->keys.in);
    arrfree(e->keys.paste);
    free(e->history_path);
    memset(e, 0, sizeof *e);
}

/* ============================================================================================================
 * REPL commands
 *
 * Owns the dialogue at a terminal: the prompt, the commands and what signals do. A line is a message unless it begins with
 * a slash; a slash that names no command is an error and never reaches the model. Everything but answers goes to stderr.
 * It knows the conversation only through chat_* and the options only through option_*.
 * ============================================================================================================ */

enum { READ_MAX = 64 << 20 /* bytes of a file that /read and /edit accept */ };

/* ---- signals ---- */

/* A first Ctrl-C asks the work to stop, which it does at its next boundary; a second within a second does not wait. */
static void signal_interrupt(int sig) {
    static double last;
    double now = now_seconds();
    if (interrupted && now - last < 1.0) {
        term_restore();
        temp_remove();
        _exit(EXIT_INTERRUPT);
    }
    last = now;
    interrupted++;
    wake_up(sig);
}

/* SIGTERM, SIGHUP: nothing is saved; the code is the shell's convention. */
static void signal_end(int sig) {
    term_restore();
    temp_remove();
    _exit(128 + sig);
}

/* What ends the program without being asked for, or with a core file: as without this handler, only with the terminal in
 * order. */
static void signal_default(int sig) {
    term_restore();
    temp_remove();
    signal(sig, SIG_DFL);
    raise(sig);
}

/* A SIGBUS is a page of the mapped model that cannot be read, which is no fault of the program. The others end as by default
 * behind a line that says so. */
static void signal_crash(int sig) {
    static const char bus[] = "moe: the model file was truncated or its disk failed while in use\n";
    const char *name = sigabbrev_np(sig);
    char line[64] = "moe: internal error: SIG";
    ssize_t done;
    term_restore();
    temp_remove();
    if (sig == SIGBUS) {
        done = write(2, bus, sizeof bus - 1);
        _exit(EXIT_RUN);
    }
    strcat(strcat(line, name ? name : ""), "\n");
    done = write(2, line, strlen(line));
    (void)done;
    signal_default(sig);
}

/* What the parent ignores (nohup, a job without control) stays ignored, but for SIGINT at a terminal: there somebody presses
 * Ctrl-C and means it. SIGPIPE keeps its default, whatever the parent set: `moe | head` ends quietly, with status 141. */
static void signals_install(void) {
    static const struct {
        int sig;
        void (*fn)(int);
    } table[] = {{SIGINT, signal_interrupt}, {SIGTERM, signal_end},     {SIGHUP, signal_end},
                 {SIGSEGV, signal_crash},    {SIGBUS, signal_crash},    {SIGFPE, signal_crash},
                 {SIGILL, signal_crash},     {SIGABRT, signal_crash},   {SIGQUIT, signal_default},
                 {SIGUSR1, signal_default},  {SIGUSR2, signal_default}, {SIGALRM, signal_default},
                 {SIGXCPU, signal_default}};
    signal(SIGXFSZ, SIG_IGN); /* a limit of file sizes is an error of write() */
    static char stack[65536]; /* a handler must run when the stack itself has overflowed */
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        struct sigaction old, sa = {.sa_handler = table[i].fn, .sa_flags = SA_ONSTACK};
        bool ours = table[i].sig == SIGINT && isatty(0);
        if (!sigaction(table[i].sig, NULL, &old) && (ours || old.sa_handler != SIG_IGN))
            sigaction(table[i].sig, &sa, NULL);
    }
    signal(SIGPIPE, SIG_DFL);
    atexit(term_restore);
}

/* ---- commands ---- */

struct repl {
    struct chat *chat;
    struct editor editor;
    bool hinted; /* how to leave has been said */
};

/* One entry serves the parser, /help and Tab. */
struct command {
    const char *name;
    const char *arg; /* NULL: none; in brackets: optional */
    const char *help;
    int (*fn)(struct repl *r, char *arg, char *err); /* arg: trimmed, "" if none; -1: err says why */
};

enum { COMMAND_QUIT = 1 }; /* what /quit returns instead of 0 */

/* A session error, in its own line, red on a terminal. */
static void complain(const char *err) {
    char *line = NULL;
    if (term.err_tty) term_neutralise(&line, err, strlen(err));
    else sb_puts(&line, err);
    fprintf(stderr, term.colour_err ? "\033[31m%s\033[0m\n" : "%s\n", sb_cstr(&line));
    arrfree(line);
}

/* Says that there was no turn, and why; of a turn that was stopped its answer tells. That answers are lost is said once. */
static void turn_report(enum turn_result result, const char *err) {
    static bool said;
    char lost[ERR_MAX];
    if (term.out_error && !said) {
        fail(lost, "cannot write to stdout: %s; the answers are lost", strerror(term.out_error));
        complain(lost), said = true;
    }
    if (result == TURN_ROLLED_BACK) note("[stopped; the turn is taken back]");
    if (result == TURN_FAILED) complain(err);
}

/* One turn. A failed one has left the conversation as it was. */
static void repl_send(struct repl *r, const char *text, size_t n) {
    char err[ERR_MAX] = "";
    turn_report(chat_turn(r->chat, text, n, err), err);
}

/* Where the word at s ends; *rest is what follows it and white space. */
static size_t split_word(char *s, char **rest) {
    size_t n = strcspn(s, " \t\n");
    *rest = s + n + strspn(s + n, " \t\n");
    return n;
}

/* Appends a text file; what cannot be part of a message is an error. */
static int read_text(const char *path, char **out, char *err) {
    struct stat st;
    if (file_check(path, &st, err)) return -1;
    if (st.st_size > READ_MAX)
        return fail(err, "'%s' has %lld MiB, at most %d can be read", path, (long long)st.st_size >> 20,
                    READ_MAX >> 20);
    size_t at = arrlenu(*out);
    if (read_file(path, out, err)) return -1;
    size_t n = arrlenu(*out) - at;
    if (n && memchr(*out + at, 0, n)) return fail(err, "'%s' is not a text file: it holds a NUL byte", path);
    if (!utf8_valid(*out + at, n)) return fail(err, "'%s' is not valid UTF-8", path);
    return 0;
}

/* Appends a file as a message shows it: its name and a fence longer than any run of backticks within. */
static void frame_file(char **out, const char *name, const char *data, size_t n) {
    int fence = 3, run = 0;
    for (size_t i = 0; i < n; i++) {
        run = data[i] == '`' ? run + 1 : 0;
        if (run >= fence) fence = run + 1;
    }
    sb_printf(out, "File: %s\n", name);
    for (int i = 0; i < fence; i++) arrput(*out, '`');
    arrput(*out, '\n');
    sb_put(out, data, n);
    if (n && data[n - 1] != '\n') arrput(*out, '\n');
    for (int i = 0; i < fence; i++) arrput(*out, '`');
}

/* Changes an option, or without a value prints it. */
static int option_command(struct repl *r, const char *name, const char *value, char *err) {
    if (*value) return chat_set(r->chat, name, value, err);
    if (*name && !option_find(name)) return option_set(r->chat->set, name, value, err);
    option_print(r->chat->set, *name ? name : NULL, stderr);
    return 0;
}

static int cmd_set(struct repl *r, char *arg, char *err) {
    char *value;
    size_t n = split_word(arg, &value);
    arg[n] = 0;
    return option_command(r, arg, value, err);
}

/* Two knobs: whether the model thinks changes the prompt, whether that is shown only the screen. */
static int cmd_think(struct repl *r, char *arg, char *err) { return option_command(r, "think", arg, err); }
static int cmd_show(struct repl *r, char *arg, char *err) { return option_command(r, "show-think", arg, err); }

/* Without a text, shows the message. */
static int cmd_system(struct repl *r, char *arg, char *err) {
    const struct message *m = r->chat->messages;
    char *line = NULL;
    (void)err;
    if (*arg) {
        bool none = !strcmp(arg, "\"\"");
        chat_set_system(r->chat, none ? NULL : arg);
        note(none ? "[the system message is removed]" : "[the system message is set]");
        return 0;
    }
    if (!arrlen(m) || strcmp(m[0].role, "system")) {
        note("[no system message]");
        return 0;
    }
    term_neutralise(&line, m[0].content, strlen(m[0].content));
    note("%s", sb_cstr(&line));
    arrfree(line);
    return 0;
}

/* The message is TEXT, an empty line and the file; the name may be quoted, and begin with ~/. */
static int cmd_read(struct repl *r, char *arg, char *err) {
    char *text, *data = NULL, *message = NULL, *path = NULL;
    size_t n;
    if (*arg == '"' && strchr(arg + 1, '"')) { /* a name with blanks */
        n = strcspn(++arg, "\"");
        text = arg + n + 1;
        text += strspn(text, " \t\n");
    } else {
        n = split_word(arg, &text);
    }
    arg[n] = 0;
    sb_path(&path, arg);
    int rc = read_text(sb_cstr(&path), &data, err);
    if (!rc) {
        if (*text) sb_printf(&message, "%s\n\n", text);
        frame_file(&message, arg, data, arrlenu(data));
        note("[%td bytes read]", arrlen(data));
        repl_send(r, sb_cstr(&message), arrlenu(message));
    }
    arrfree(path);
    arrfree(data);
    arrfree(message);
    return rc;
}

/* What the editor leaves is sent, without the blanks at its end, unless it failed or left nothing. */
static int cmd_edit(struct repl *r, char *arg, char *err) {
    const char *editor = getenv("EDITOR");
    char *raw = NULL, *data = NULL, *command = NULL;
    strcpy(temp_path, "/tmp/moe-XXXXXX.md");
    int fd = mkostemps(temp_path, 3, O_CLOEXEC); /* mode 0600 */
    if (fd < 0) return fail(err, "cannot make a file in /tmp: %s", strerror(errno));
    temp_exists = 1;
    write_all(fd, arg, strlen(arg));
    close(fd);
    sb_printf(&command, "%s %s", editor && *editor ? editor : "vi", temp_path);
    struct termios mode; /* which the editor may leave changed */
    bool known = !tcgetattr(0, &mode);
    int status = system(sb_cstr(&command)), rc = 0;
    if (known) tcsetattr(0, TCSADRAIN, &mode);
    if (status)
        rc = fail(err, "'%s' failed with status %d, nothing is sent", command,
                  WIFEXITED(status) ? WEXITSTATUS(status) : status);
    else rc = read_text(temp_path, &raw, err);
    temp_remove();
    text_scrub(&data, raw, arrlenu(raw)); /* for the history: no CR */
    arrfree(raw);
    while (arrlen(data) && isspace((uint8_t)arrlast(data))) (void)arrpop(data);
    if (!rc && !arrlen(data)) note("[empty, nothing is sent]");
    if (!rc && arrlen(data)) {
        editor_history_add(&r->editor, data, arrlenu(data));
        note("[%td bytes]", arrlen(data));
        repl_send(r, sb_cstr(&data), arrlenu(data));
    }
    arrfree(command);
    arrfree(data);
    return rc;
}

static int cmd_undo(struct repl *r, char *arg, char *err) {
    (void)arg;
    if (chat_undo(r->chat, err)) return -1;
    note("[the last turn is taken back]");
    return 0;
}

static int cmd_regen(struct repl *r, char *arg, char *err) {
    enum turn_result result = TURN_DONE;
    (void)arg;
    if (chat_regenerate(r->chat, &result, err)) return -1;
    turn_report(result, err);
    return 0;
}

static int cmd_save(struct repl *r, char *arg, char *err) {
    if (chat_save(r->chat, arg, err)) return -1;
    note("[saved]");
    return 0;
}

static int cmd_load(struct repl *r, char *arg, char *err) {
    if (chat_load(r->chat, arg, err)) return -1;
    note("[loaded: %td messages]%s", arrlen(r->chat->messages),
         chat_last_is(r->chat, "user") ? " /regen answers the last" : "");
    return 0;
}

static int cmd_list(struct repl *r, char *arg, char *err) {
    (void)arg, (void)err;
    chat_list(r->chat);
    return 0;
}

static int cmd_ctx(struct repl *r, char *arg, char *err) {
    (void)arg, (void)err;
    chat_print_context(r->chat);
    return 0;
}

static int cmd_stats(struct repl *r, char *arg, char *err) {
    (void)arg, (void)err;
    chat_print_stats(r->chat);
    return 0;
}

static int cmd_clear(struct repl *r, char *arg, char *err) {
    (void)arg, (void)err;
    chat_clear(r->chat);
    note("[a new conversation]");
    return 0;
}

static int cmd_quit(struct repl *r, char *arg, char *err) {
    (void)r, (void)arg, (void)err;
    return COMMAND_QUIT;
}

static int cmd_help(struct repl *r, char *arg, char *err);

static const struct command commands[] = {
    {"help", "[COMMAND]", "this list, or one command", cmd_help},
    {"set", "[NAME [VALUE]]", "show or change an option", cmd_set},
    {"think", "[on|off|auto|LEVEL]", "whether, or how hard, the model thinks", cmd_think},
    {"show", "[on|off]", "whether its thinking is shown", cmd_show},
    {"system", "[TEXT]", "show or replace the system message; \"\" removes it", cmd_system},
    {"read", "FILE [TEXT]", "send TEXT and a text file; \"FILE\" if it has blanks", cmd_read},
    {"edit", "[TEXT]", "write a message in $EDITOR, then send it", cmd_edit},
    {"undo", NULL, "take the last message and its answer back", cmd_undo},
    {"regen", NULL, "answer the last message anew", cmd_regen},
    {"save", "NAME", "save the conversation", cmd_save},
    {"load", "NAME", "go on with a saved conversation", cmd_load},
    {"list", NULL, "list the saved conversations", cmd_list},
    {"ctx", NULL, "how full the context is", cmd_ctx},
    {"stats", NULL, "speed of the last turn and in total", cmd_stats},
    {"clear", NULL, "begin a new conversation", cmd_clear},
    {"quit", NULL, "leave (also Ctrl-D)", cmd_quit},
};

enum { N_COMMANDS = sizeof commands / sizeof *commands };

/* By its name or a unique beginning of it; NULL with err. */
static const struct command *command_find(const char *name, size_t n, char *err) {
    const struct command *found = NULL;
    char *list = NULL;
    int count = 0;
    for (int i = 0; i < N_COMMANDS; i++) {
        if (!n || strncmp(commands[i].name, name, n)) continue;
        found = &commands[i];
        sb_printf(&list, "%s/%s", count++ ? ", " : "", found->name);
        if (found->name[n]) continue;
        count = 1;
        break;
    }
    if (!count)
        fail(err, "unknown command /%.*s: /help lists them, a message that begins with a slash is typed //...",
             (int)(n < 40 ? n : 40), name);
    if (count > 1) fail(err, "/%.*s is ambiguous: %s", (int)n, name, sb_cstr(&list));
    arrfree(list);
    return count == 1 ? found : NULL;
}

static int cmd_help(struct repl *r, char *arg, char *err) {
    const struct command *one = NULL;
    (void)r;
    if (*arg == '/') arg++;
    if (*arg && !(one = command_find(arg, strlen(arg), err))) return -1;
    for (const struct command *c = commands; c < commands + N_COMMANDS; c++)
        if (!one || c == one) fprintf(stderr, "  /%-6s %-19s  %s\n", c->name, c->arg ? c->arg : "", c->help);
    if (one) return 0;
    fputs("Commands may be shortened as long as they stay unique; //text sends /text.\n"
          "Enter sends. A new line: Ctrl-J, Alt-Enter, a backslash before Enter, or a block between \"\"\" "
          "and \"\"\".\n"
          "Up and Down, Ctrl-R: history. Tab completes commands. Ctrl-C stops the answer, Ctrl-D leaves.\n",
          stderr);
    return 0;
}

/* line: what follows the slash; is changed. */
static int command_run(struct repl *r, char *line, char *err) {
    char *arg;
    size_t n = split_word(line, &arg), end = strlen(arg);
    const struct command *c = command_find(line, n, err);
    if (!c) return -1;
    while (end && isspace((uint8_t)arg[end - 1])) arg[--end] = 0;
    if (*arg && !c->arg) return fail(err, "/%s takes no argument", c->name);
    if (!*arg && c->arg && c->arg[0] != '[') return fail(err, "usage: /%s %s", c->name, c->arg);
    return c->fn(r, arg, err);
}

/* One line of input. COMMAND_QUIT, or 0. */
static int repl_line(struct repl *r, char *line, size_t n) {
    char err[ERR_MAX] = "";
    if (strspn(line, " \t\n") == n) return 0;
    editor_history_add(&r->editor, line, n);
    if (line[0] != '/' || line[1] == '/') {
        size_t skip = line[0] == '/';
        repl_send(r, line + skip, n - skip);
        return 0;
    }
    int rc = command_run(r, line + 1, err);
    if (rc < 0) complain(err);
    return rc == COMMAND_QUIT ? rc : 0;
}

/* The dialogue, until /quit or the end of input. Returns the exit code. */
static int repl_run(struct chat *c) {
    const char *words[N_COMMANDS + 1] = {NULL}, *home = getenv("HOME");
    struct repl r = {.chat = c};
    char *path = NULL, *line = NULL;
    enum edit_result got;
    int rc = 0;
    for (int i = 0; i < N_COMMANDS; i++) words[i] = commands[i].name;
    if (home && *home) sb_printf(&path, "%s/.moe_history", home);
    editor_init(&r.editor, arrlen(path) && term.in_tty ? sb_cstr(&path) : NULL);
    r.editor.words = words;
    term.dialogue = true;
    while (rc != COMMAND_QUIT) {
        interrupted = 0; /* only here: a Ctrl-C between Enter and the turn stops the turn */
        got = editor_read(&r.editor, "> ", ". ", &line);
        if (got == EDIT_EOF) break;
        if (got == EDIT_LINE) {
            size_t n = arrlenu(line);
            (void)sb_cstr(&line); /* the commands take their arguments apart in place */
            rc = repl_line(&r, line, n);
        } else if (!r.hinted) {
            note("(Ctrl-D or /quit leaves)");
            r.hinted = true;
        }
    }
    if (got == EDIT_EOF && (term.out_tty || term.err_tty)) fputc('\n', term.out_tty ? stdout : stderr);
    editor_free(&r.editor);
    arrfree(path);
    arrfree(line);
    return EXIT_OK;
}
/* ============================================================================================================
 * Plan
 *
 * Whether and how a model fits a machine, and how fast it can be there, before anything is loaded. What the ranks hold is
 * counted on the parts that the engine makes of a model, in the sizes in which a GPU keeps them; the speed is that of reading it.
 * ============================================================================================================ */

enum plan_read { READ_EXPERTS, READ_BACKBONE, READ_CACHE, READ_HEAD, PLAN_READS };

enum {
    PLAN_CTX = 4096,     /* a model that has no room for so many tokens does not fit, unless fewer are asked for */
    PLAN_CTX_STEP = 256, /* tokens to which the largest context is rounded */
    PLAN_LAYOUTS = 3     /* into tp x pp parts of up to MAX_RANKS GPUs */
};

/* Seconds of an all-reduce of one token's activations: one-shot, NCCL. */
static const double plan_reduce[2] = {5.5e-6, 12e-6};

/* A GPU; of a plan for the CPU the only one is that. */
struct plan_device {
    char name[128];
    int64_t memory, usable; /* bytes: of all; without the driver's and --vram-reserve */
    double rate;            /* bytes that are read per second */
    const char *source;     /* of the rate: measured, given .. */
};

/* What one rank holds and reads. */
struct plan_rank {
    struct model m;                      /* the sizes of its part, without layers */
    int64_t weights, rounding;           /* bytes; what the driver adds to them and to all other allocations */
    int64_t bytes_per_token[PLAN_READS]; /* bytes per token; of the cache per token of the context */
    int64_t cache, scratch, left;        /* at the plan's context */
};

struct plan_layout {
    int tp, pp;
    char name[32]; /* --tp N --pp M */
    struct plan_rank rank[MAX_RANKS];
    int context, largest[2]; /* tokens, 0: it does not fit; with a cache of fp8 and of bf16 */
    double roofline[2];      /* tokens per second, for each of plan_reduce */
};

struct plan {
    const struct model *m;
    bool cpu;
    struct plan_device device[MAX_RANKS];
    int n_device;
    int64_t host;        /* CPU: bytes of the file besides the layers, */
    int64_t activations; /* and of activations */
    enum kv_type kv;
    const char *kv_name;
    int want, least; /* tokens of context: wished for, indispensable */
    struct plan_layout layout[PLAN_LAYOUTS];
    int n_layout, chosen, context;
    int retained;       /* experts a layer that fit; 0: all fit, or none do */
    double percent;     /* of the experts that are so many */
    int min_experts;    /* the fewest that could be kept */
    int fallback;       /* the largest context with all experts, where that is below -c; 0: it is no alternative */
    int64_t missing[2]; /* bytes on the worst GPU, with all and with the fewest experts */
};

/* A matrix, n_used of whose experts a token uses. */
static void plan_matrix(struct plan_rank *r, bool cpu, const struct weight *w, enum plan_read kind, int n_used) {
    int64_t bytes = (int64_t)weight_gpu_bytes(w, false);
    if (!bytes) return;
    int64_t factors = w->scale ? 4 * (int64_t)w->n_expert : 0, bias = w->bias ? 4 * (int64_t)w->n_out : 0;
    r->rounding += (int64_t)weight_gpu_bytes(w, true) - bytes;
    r->weights += bytes + factors + bias;
    r->bytes_per_token[kind] += ((cpu ? (int64_t)weight_bytes(w) : bytes) + factors) / w->n_expert * n_used + bias;
}

static void plan_layer(struct plan_rank *r, bool cpu, const struct model *m, const struct layer *layer) {
    const struct weight *w[LAYER_WEIGHTS];
    for (int i = 0, n = layer_weights(layer, w); i < n; i++) {
        bool routed = layer->n_expert && (w[i] == &layer->gate || w[i] == &layer->up || w[i] == &layer->down);
        if (w[i] != &layer->router)
            plan_matrix(r, cpu, w[i], routed ? READ_EXPERTS : READ_BACKBONE,
                        routed ? m->n_expert_used : w[i]->n_expert);
    }
    if (layer->up.scale && layer->up.scale == layer->gate.scale && weight_tiles(&layer->up))
        r->weights -= 4 * (int64_t)layer->n_expert; /* one stack: its factors are there once */
    int64_t floats = 2 * m->n_embd + (layer->q_norm ? m->head_k : 0) + (layer->k_norm ? m->head_k : 0) +
                     (layer->q_a_norm ? m->q_lora : 0) + (layer->kv_a_norm ? m->kv_lora : 0) +
                     (layer->router_bias ? layer->n_expert : 0);
    int64_t router = (int64_t)layer->router.n_out * layer->router.n_in;
    const bool halves = router_halves(&layer->router);
    r->weights += 4 * floats + router * (halves ? 2 : 4);
    r->bytes_per_token[READ_BACKBONE] +=
        4 * floats + (cpu ? (int64_t)weight_bytes(&layer->router) : router * (halves ? 2 : 4));
}

static int64_t plan_scratch(const struct plan *p, const struct plan_rank *r, int i, int ctx) {
    if (p->cpu) return p->activations;
    return (int64_t)gpu_bytes(&r->m, gpu_chunk(&r->m, ctx, (size_t)p->device[i].memory, false), false);
}

/* Bytes that are left on the GPU of rank i; negative: that are missing. */
static int64_t plan_free(const struct plan *p, const struct plan_layout *d, int i, int ctx, enum kv_type kv) {
    const struct plan_rank *r = &d->rank[i];
    return p->device[i].usable - r->weights - r->rounding - plan_scratch(p, r, i, ctx) -
           (int64_t)kv_token_bytes(&r->m, kv) * ctx;
}

static int64_t plan_least_free(const struct plan *p, const struct plan_layout *d, int ctx, enum kv_type kv) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < p->n_device; i++) {
        int64_t f = plan_free(p, d, i, ctx, kv);
        if (f < least) least = f;
    }
    return least;
}

/* The largest context that there is room for; 0: none. */
static int plan_largest(const struct plan *p, const struct plan_layout *d, enum kv_type kv) {
    const int middle = PLAN_CTX / PLAN_CTX_STEP, most = (1 << 28) / PLAN_CTX_STEP;
    bool much = plan_least_free(p, d, PLAN_CTX, kv) >= 0;
    int lo = much ? middle : 0, hi = much ? most : middle - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (plan_least_free(p, d, mid * PLAN_CTX_STEP, kv) >= 0) lo = mid;
        else hi = mid - 1;
    }
    return lo * PLAN_CTX_STEP;
}

static int plan_context(const struct plan *p, const struct plan_layout *d) {
    if (plan_least_free(p, d, p->least, p->kv) < 0) return 0;
    if (plan_least_free(p, d, p->want, p->kv) >= 0) return p->want;
    return int_min(p->want, plan_largest(p, d, p->kv));
}

/* Tokens per second at a context, if nothing but reading and all-reduces took time. */
static double plan_roofline(const struct plan *p, const struct plan_layout *d, int ctx, double reduce) {
    double seconds = d->tp > 1 ? 2.0 * p->m->n_layer * reduce : 0;
    for (int stage = 0; stage < d->pp; stage++) {
        double slowest = 0;
        for (int i = stage * d->tp; i < (stage + 1) * d->tp; i++) {
            const int64_t *r = d->rank[i].bytes_per_token;
            double bytes = (double)(r[READ_EXPERTS] + r[READ_BACKBONE] + r[READ_HEAD]) + (double)r[READ_CACHE] * ctx;
            slowest = fmax(slowest, bytes / p->device[i].rate);
        }
        seconds += slowest;
    }
    return 1 / seconds;
}

static void plan_rank(struct plan_rank *r, const struct plan *p, const struct model *m, struct shard shard) {
    struct model *shard_of = &r->m;
    memset(r, 0, sizeof *r);
    shard_model(shard_of, m, shard);
    plan_matrix(r, p->cpu, &shard_of->output, READ_HEAD, 1);
    if (shard_of->output.data == shard_of->embd.data) r->weights = r->rounding = 0; /* one matrix is both */
    plan_matrix(r, p->cpu, &shard_of->embd, READ_HEAD, 0);
    for (int il = 0; il < shard_of->n_layer; il++) plan_layer(r, p->cpu, shard_of, &shard_of->layers[il]);
    r->weights += 4 * ((int64_t)m->n_embd + m->rope_dim / 2); /* the last norm and the rotary frequencies */
    r->bytes_per_token[READ_CACHE] = (int64_t)kv_token_bytes(shard_of, p->kv);
    r->rounding += (int64_t)gpu_rounding(shard_of);
    if (p->cpu) {
        r->weights = p->host, r->rounding = 0;
        for (int il = 0; il < shard_of->n_layer; il++) r->weights += (int64_t)layer_bytes(&shard_of->layers[il]);
    }
    shard_free(shard_of);
    shard_of->layers = NULL;
}

/* Whether every stage has layers, and every rank a part of each matrix: the GPU engine wants that. */
static bool plan_divides(const struct model *m, int tp, int pp) {
    bool whole = pp <= m->n_layer;
    for (int i = 0; i < tp * pp && whole; i++) {
        const struct weight *w[LAYER_WEIGHTS];
        struct model part;
        shard_model(&part, m, (struct shard){i % tp, tp, i / tp, pp});
        whole = !part.output.data || weight_tiles(&part.output);
        for (int il = 0; il < part.n_layer; il++)
            for (int k = layer_weights(&part.layers[il], w); k-- > 0;) whole &= weight_tiles(w[k]) > 0;
        shard_free(&part);
    }
    return whole;
}

/* Divides m in every way that was asked for, and chooses the first that fits; false: none does. */
static bool plan_choose(struct plan *p, const struct model *m) {
    for (int k = 0; k < p->n_layout; k++) {
        struct plan_layout *d = &p->layout[k];
        for (int i = 0; i < p->n_device; i++)
            plan_rank(&d->rank[i], p, m, (struct shard){i % d->tp, d->tp, i / d->tp, d->pp});
    }
    for (p->chosen = 0; p->chosen < p->n_layout; p->chosen++)
        if ((p->context = plan_context(p, &p->layout[p->chosen]))) return true;
    return false;
}

/* The same model with at most n experts in a layer, for its sizes; its layers are to be freed. The percentage that is left. */
static double plan_prune(struct model *out, const struct model *m, int n) {
    double all = 0, kept = 0;
    *out = *m;
    out->n_expert_max = int_min(m->n_expert_max, n);
    out->layers = xmalloc((size_t)m->n_layer * sizeof *out->layers);
    for (int il = 0; il < m->n_layer; il++) {
        struct layer *layer = &out->layers[il];
        *layer = m->layers[il];
        all += layer->n_expert, kept += int_min(layer->n_expert, n);
        if (layer->n_expert > n)
            layer->n_expert = layer->router.n_out = layer->gate.n_expert = layer->up.n_expert = layer->down.n_expert =
                n;
    }
    return 100 * kept / all;
}

/* Bytes that are missing on the worst GPU of the layout that lacks least, which becomes the chosen one. */
static int64_t plan_missing(struct plan *p) {
    int64_t best = INT64_MIN;
    for (int k = 0; k < p->n_layout; k++) {
        int64_t f = plan_least_free(p, &p->layout[k], p->least, p->kv);
        if (f > best) best = f, p->chosen = k;
    }
    return -best;
}

/* Finds how m fits: as it is, or with how many experts. */
static void plan_solve(struct plan *p) {
    const struct model *m = p->m;
    int step = m->n_group, most = 0, usual = int_min(PLAN_CTX, m->n_ctx_train);
    if (plan_choose(p, m)) return;
    p->missing[0] = p->missing[1] = plan_missing(p);
    p->context = p->least;
    for (int k = 0; k < p->n_layout; k++) {
        int n = plan_largest(p, &p->layout[k], p->kv);
        if (n >= usual && n > p->fallback) p->fallback = n;
    }
    for (int il = 0; il < m->n_layer; il++)
        if (m->layers[il].n_expert > most) most = m->layers[il].n_expert;
    p->min_experts = (m->n_expert_used + m->n_group_used - 1) / m->n_group_used * step;
    for (int n = (most - 1) / step * step; n >= p->min_experts; n -= step) {
        struct model pruned;
        double percent = plan_prune(&pruned, m, n);
        bool fits = plan_choose(p, &pruned);
        free(pruned.layers);
        if (fits) {
            p->retained = n, p->percent = percent, p->missing[1] = 0;
            return;
        }
        p->missing[1] = plan_missing(p);
    }
    plan_choose(p, m);
    plan_missing(p);
    p->context = p->least;
}

/* ---- the machine ---- */

/* The machine that --gpus describes. */
static void plan_described(struct plan *p, const char *text, int64_t reserve) {
    /* GiB and GB/s: RTX PRO 6000, RTX 5090, DGX Spark, H100, H200 */
    static const double usual[][2] = {{96, 1792}, {32, 1792}, {128, 273}, {80, 3350}, {141, 4800}};
    const struct gpu_list g = gpus_parse(text);
    const double gib = g.gib;
    const bool given = g.gb_per_s > 0;
    const int n = g.n;
    double gb = g.gb_per_s;
    for (size_t i = 0; i < sizeof usual / sizeof *usual && !given; i++) gb = gib == usual[i][0] ? usual[i][1] : gb;
    if (gb < 1)
        die_usage("--gpus %s: how fast GPUs of %g GiB read is not known here: add it in GB/s, --gpus %s@GBPS", text,
                  gib, text);
    p->n_device = n;
    for (int i = 0; i < n; i++) {
        struct plan_device *d = &p->device[i];
        d->memory = (int64_t)(gib * 0x1p30), d->rate = gb * 1e9, d->source = given ? "given" : "assumed";
        d->usable = (int64_t)(gib * 0x1p30 * 0.97) - ((int64_t)450 << 20) - reserve;
        snprintf(d->name, sizeof d->name, "GPU of %g GiB", gib);
    }
}

/* The listed GPUs, or as many as --tp and --pp ask for, or all. */
static void plan_real(struct plan *p, const struct settings *set, const int *device, int n) {
#ifdef MOE_CUDA
    char err[ERR_MAX];
    int found = cuda_device_count(err), asked = (set->tp ? set->tp : 1) * (set->pp ? set->pp : 1);
    p->n_device = n ? n : int_min(set->tp || set->pp ? asked : found, MAX_RANKS);
    for (int i = 0; i < p->n_device; i++) {
        struct plan_device *d = &p->device[i];
        int gpu = n ? device[i] : i, ranks = 0;
        struct gpu_facts f;
        if (gpu >= found) die("there is no GPU %d; found: %d", gpu, found);
        for (int k = 0; k < p->n_device; k++) ranks += (n ? device[k] : k) == gpu;
        if (cuda_facts(gpu, &f, false)) die("GPU %d does not tell its memory", gpu);
        gpu_name(d->name, gpu, &f);
        if (!(f.rate > 0)) die("%s does not tell how fast it reads: describe it, --gpus NxGIB@GBPS", d->name);
        d->memory = (int64_t)f.total / ranks, d->rate = f.rate / ranks, d->source = "of the device";
        d->usable = ((int64_t)f.free - ((int64_t)set->vram_reserve << 20)) / ranks;
    }
#else
    (void)p, (void)set, (void)device, (void)n;
#endif
}

static void plan_cpu(struct plan *p, const struct settings *set) {
    const struct model *m = p->m;
    struct plan_device *d = &p->device[0];
    struct rank r;
    int n_threads = set->threads ? set->threads : omp_get_num_procs();
    if (set->tp > 1 || set->pp > 1)
        die_usage("--plan divides a model among GPUs only: give --gpus 4x96, or no --tp and --pp");
    p->n_device = 1;
    d->memory = d->usable = (int64_t)memory_available();
    d->rate = memory_bandwidth(n_threads), d->source = "measured";
    snprintf(d->name, sizeof d->name, "CPU, %d threads", n_threads);
    p->host = (int64_t)m->file_bytes;
    for (uint32_t i = 0; i < m->gguf.n_tensors && !m->file_bytes; i++) p->host += (int64_t)m->gguf.tensors[i].bytes;
    for (int il = 0; il < m->n_layer; il++) p->host -= (int64_t)layer_bytes(&m->layers[il]);
    /* takes addresses, not memory: nothing is written */
    rank_init(&r, m, kernels_choose(), n_threads, int_min(p->least, CHUNK_MAX), p->kv);
    p->activations = (int64_t)r.bytes;
    r.ops->close(&r);
}

/* ---- the answer ---- */

/* Fills in what is told of every layout, and of the ranks of the chosen one. */
static void plan_finish(struct plan *p) {
    for (int k = 0; k < p->n_layout; k++) {
        struct plan_layout *d = &p->layout[k];
        d->context = plan_context(p, d);
        d->largest[0] = plan_largest(p, d, KV_FP8), d->largest[1] = plan_largest(p, d, KV_BF16);
        for (int j = 0; j < 2; j++)
            d->roofline[j] = plan_roofline(p, d, d->context ? d->context : p->least, plan_reduce[j]);
        snprintf(d->name, sizeof d->name, "--tp %d --pp %d", d->tp, d->pp);
        for (int i = 0; i < p->n_device; i++) {
            struct plan_rank *r = &d->rank[i];
            r->cache = r->bytes_per_token[READ_CACHE] *= p->context; /* is per token no longer */
            r->scratch = plan_scratch(p, r, i, p->context);
            r->left = p->device[i].usable - r->weights - r->rounding - r->scratch - r->cache;
        }
    }
}

static const char *plan_verdict(const struct plan *p) {
    return p->retained                   ? "needs pruning"
           : p->missing[0] > 0           ? "does not fit"
           : p->layout[p->chosen].pp > 1 ? "fits with --pp"
                                         : "fits";
}

/* Bytes per token of the rank that reads most, or of all. Returns their sum. */
static int64_t plan_bytes_per_token(const struct plan *p, bool all, int64_t out[PLAN_READS]) {
    const struct plan_layout *d = &p->layout[p->chosen];
    int64_t most = 0, total = 0;
    memset(out, 0, PLAN_READS * sizeof *out);
    for (int i = 0; i < p->n_device; i++) {
        const int64_t *r = d->rank[i].bytes_per_token;
        int64_t sum = 0;
        for (int k = 0; k < PLAN_READS; k++) sum += r[k], out[k] += all ? r[k] : 0;
        total += sum;
        if (sum > most) most = sum, memcpy(out, r, all ? 0 : PLAN_READS * sizeof *r);
    }
    return all ? total : most;
}

static void plan_print_head(const struct plan *p) {
    const struct model *m = p->m;
    const char *where = p->cpu ? "in memory" : "on a GPU";
    char a[32], b[32];
    printf("model       %.40s: %d layers, %d of %d experts a token\n", m->name, m->n_layer, m->n_expert_used,
           m->n_expert_max);
    for (int i = 0, same; i < p->n_device; i += same) {
        const struct plan_device *v = &p->device[i];
        for (same = 1; i + same < p->n_device && !strcmp(v->name, v[same].name);) same++;
        printf("%-11s %d x %.60s\n            %.2f GiB to use (%.2f reserved), reads %.0f GB/s (%s)\n",
               i ? "" : "machine", same, v->name, (double)v->usable / 0x1p30, (double)(v->memory - v->usable) / 0x1p30,
               v->rate * 1e-9, v->source);
    }
    printf("verdict     %s", plan_verdict(p));
    if (p->retained)
        printf(" to %d of %d experts a layer (%.1f %% of them stay)", p->retained, m->n_expert_max, p->percent);
    if (p->missing[0] > 0)
        printf("%s %s are missing %s", p->retained ? "\n            with all of them" : ":",
               with_unit((double)p->missing[0], a), where);
    if (p->missing[1] > 0 && p->missing[1] < p->missing[0])
        printf("\n            with %d experts a layer still %s", p->min_experts, with_unit((double)p->missing[1], a));
    putchar('\n');
    if (p->fallback) printf("            with all of them -c %d fits\n", p->fallback);
    if (!p->cpu) printf("layout    %s\n", p->layout[p->chosen].name);
    printf("context     %s tokens (trained: %s), %s cache\n", with_commas((uint64_t)p->context, a),
           with_commas((uint64_t)m->n_ctx_train, b), p->kv_name);
}

/* For people, in at most 80 columns. */
static void plan_print(const struct plan *p) {
    const struct plan_layout *d = &p->layout[p->chosen];
    char a[32], b[32];
    plan_print_head(p);
    printf("\nGiB         %9s     cache %9s  rounding       sum      free\n", p->cpu ? "file" : "weights",
           p->cpu ? "activat." : "scratch*");
    for (int i = 0; i < p->n_device; i++) {
        const struct plan_rank *r = &d->rank[i];
        int64_t bytes[] = {r->weights, r->cache, r->scratch, r->rounding, p->device[i].usable - r->left, r->left};
        snprintf(a, sizeof a,
                 p->cpu      ? "CPU"
                 : d->pp > 1 ? "GPU %d %d-%d"
                             : "GPU %d",
                 i, r->m.first_layer, r->m.first_layer + r->m.n_layer - 1);
        printf("%-11s", a);
        for (int k = 0; k < 6; k++) printf(" %9.3f", (double)bytes[k] / 0x1p30);
        putchar('\n');
    }
    if (!p->cpu)
        printf("* about; rounding: memory is given out in pieces of 2 MiB; reserved: for the\n  driver's context and "
               "NCCL, and by --vram-reserve\n");
    printf("\nGB a token    experts  backbone     cache      head       sum\n");
    for (int all = 0; all < (p->n_device > 1 ? 2 : 1); all++) {
        int64_t r[PLAN_READS], sum = plan_bytes_per_token(p, all, r);
        printf("%-11s", p->cpu ? "CPU" : all ? "all GPUs" : "one GPU");
        for (int k = 0; k < PLAN_READS; k++) printf(" %9.3f", (double)r[k] * 1e-9);
        printf(" %9.3f\n", (double)sum * 1e-9);
    }
    printf("\nlimit       %.1f tok/s at that context, if only reading took time", d->roofline[0]);
    if (d->tp > 1)
        printf(",\n            and %d all-reduces of %g us; %.1f with NCCL's of %g us", 2 * p->m->n_layer,
               plan_reduce[0] * 1e6, d->roofline[1], plan_reduce[1] * 1e6);
    printf("\n            (a limit, not a promise)\n");
    if (!p->cpu) printf("\n%-18s %17s %17s %14s\n", "layout", "context, fp8", "bf16", "tok/s limit");
    for (int k = 0; k < p->n_layout && !p->cpu; k++) {
        const struct plan_layout *o = &p->layout[k];
        printf("%-18s %17s %17s ", o->name, with_commas((uint64_t)o->largest[0], a),
               with_commas((uint64_t)o->largest[1], b));
        if (o->context) printf("%14.1f%s\n", o->roofline[0], o == d ? "  <-" : "");
        else printf("  does not fit\n");
    }
}

static json_t *plan_json_bytes_per_token(const int64_t r[PLAN_READS]) {
    json_int_t sum = r[READ_EXPERTS] + r[READ_BACKBONE] + r[READ_CACHE] + r[READ_HEAD];
    return json_pack("{s:I,s:I,s:I,s:I,s:I}", "experts", (json_int_t)r[READ_EXPERTS], "backbone",
                     (json_int_t)r[READ_BACKBONE], "cache", (json_int_t)r[READ_CACHE], "head", (json_int_t)r[READ_HEAD],
                     "sum", sum);
}

/* For programs: sizes in bytes. */
static void plan_print_json(const struct plan *p) {
    const struct plan_layout *d = &p->layout[p->chosen];
    const struct model *m = p->m;
    int64_t all[PLAN_READS];
    json_t *ranks = json_array(), *ways = json_array();
    for (int i = 0; i < p->n_device; i++) {
        const struct plan_rank *r = &d->rank[i];
        const struct plan_device *v = &p->device[i];
        const json_int_t n[] = {v->memory,  v->usable,   r->weights,          r->cache,
                                r->scratch, r->rounding, v->usable - r->left, r->left};
        json_array_append_new(ranks,
                              json_pack("{s:s,s:f,s:s,s:i,s:i,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o}", "name", v->name,
                                        "bytes_per_second", v->rate, "source", v->source, "first_layer",
                                        r->m.first_layer, "layers", r->m.n_layer, "memory", n[0], "usable", n[1],
                                        "weights", n[2], "cache", n[3], "scratch_about", n[4], "rounding", n[5], "sum",
                                        n[6], "free", n[7], "reads", plan_json_bytes_per_token(r->bytes_per_token)));
    }
    for (int k = 0; k < p->n_layout; k++) {
        const struct plan_layout *o = &p->layout[k];
        json_array_append_new(ways,
                              json_pack("{s:i,s:i,s:i,s:i,s:i,s:f,s:f}", "tp", o->tp, "pp", o->pp, "context",
                                        o->context, "largest_context_fp8", o->largest[0], "largest_context_bf16",
                                        o->largest[1], "limit_oneshot", o->roofline[0], "limit_nccl", o->roofline[1]));
    }
    plan_bytes_per_token(p, true, all);
    json_t *o = json_pack("{s:s,s:s,s:i,s:i,s:i,s:i}", "model", m->name, "architecture", arch_names[m->arch], "layers",
                          m->n_layer, "experts", m->n_expert_max, "experts_used", m->n_expert_used, "trained_context",
                          m->n_ctx_train);
    json_t *more =
        json_pack("{s:s,s:s,s:i,s:i,s:i,s:s,s:i,s:f,s:I,s:I,s:o,s:o,s:o}", "machine", p->cpu ? "cpu" : "gpu", "verdict",
                  plan_verdict(p), "tp", d->tp, "pp", d->pp, "context", p->context, "kv", p->kv_name, "keep_experts",
                  p->retained ? p->retained : m->n_expert_max, "keep_percent", p->retained ? p->percent : 100.0,
                  "missing", (json_int_t)p->missing[0], "missing_fewest_experts", (json_int_t)p->missing[1], "ranks",
                  ranks, "reads", plan_json_bytes_per_token(all), "layouts", ways);
    if (json_object_update(o, more) || json_dumpf(o, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(10)))
        die("cannot write the plan as JSON");
    putchar('\n');
    json_decref(more);
    json_decref(o);
}

/* --plan for a described machine, for n_device GPUs (0: those that are there), or for the CPU. Exit code 0: m fits. */
static int mode_plan(const struct model *m, struct settings *set, bool gpu, const int *device, int n_device) {
    struct plan *p = xcalloc(1, sizeof *p);
    p->m = m, p->cpu = !gpu, p->kv = settings_kv(set, gpu), p->kv_name = kv_names[p->kv];
    p->want = set->n_ctx ? set->n_ctx : m->n_ctx_train;
    p->least = set->n_ctx ? set->n_ctx : int_min(m->n_ctx_train, PLAN_CTX);
    if (gpu && p->kv == KV_F32) die_usage("--kv f32 is the CPU's; the GPU's cache is fp8 or bf16");
    if (!gpu) plan_cpu(p, set);
    else if (gpus_parse(set->gpus).gib > 0) plan_described(p, set->gpus, (int64_t)set->vram_reserve << 20);
    else plan_real(p, set, device, n_device);
    for (int tp = p->n_device; tp; tp--) {
        int pp = p->n_device / tp;
        bool asked = tp * pp == p->n_device && (!set->tp || tp == set->tp) && (!set->pp || pp == set->pp);
        if (!asked || (gpu && !plan_divides(m, tp, pp))) continue;
        p->layout[p->n_layout].tp = tp, p->layout[p->n_layout++].pp = pp;
    }
    if (!p->n_layout)
        die_usage(
            "%d GPUs cannot share this model%s: --tp times --pp must be that, each of --pp groups needs one of %d "
            "layers and each of --tp ranks a part of it",
            p->n_device, set->tp || set->pp ? " as --tp and --pp ask" : "", m->n_layer);
    plan_solve(p);
    plan_finish(p);
    if (set->json) plan_print_json(p);
    else plan_print(p);
    int code = p->missing[0] > 0 ? EXIT_RUN : EXIT_OK;
    free(p);
    return code;
}

/* ============================================================================================================
 * Engine
 *
 * Opens a model and a session on it, as the settings ask for: a file or synthetic weights, on a GPU or the CPU, divided
 * among ranks. What cannot be opened ends the program; engine_start returns errors, because --doctor reports them.
 * ============================================================================================================ */

struct engine {
    struct model model;
    struct session session; /* session.m is NULL until it is open */
    struct settings *set;
};

/* Tokens of context on the CPU: those of -c, or the trained length, shortened until the cache takes at most half of the
 * memory that is left when the whole model file stays in the page cache. */
static int choose_context(const struct engine *e) {
    const struct model *m = &e->model;
    const uint64_t trained = (uint64_t)m->n_ctx_train, per = kv_token_bytes(m, settings_kv(e->set, false));
    if (e->set->n_ctx) return e->set->n_ctx;
    const uint64_t have = memory_available(), spare = have > m->file_bytes ? (have - m->file_bytes) / 2 : 0;
    const uint64_t fits = per ? spare / per : 0, n = fits < trained ? fits / 256 * 256 : trained;
    return n < 256 ? int_min(m->n_ctx_train, 256) : (int)n;
}

#ifdef MOE_CUDA
void rank_fatal(const char *what) { die("%s", what); }

/* Shows how much of the model is on the GPU, on a terminal. */
static void upload_progress(double done, double total) {
    static double start, shown;
    const double t = now_seconds();
    if (done >= total && shown > 0) {
        status_line("%s", "");
        start = shown = 0;
    }
    if (!term.err_moves || done >= total) return;
    if (start <= 0) start = t;
    if (t - start < 0.5 || t - shown < 0.1) return;
    shown = t;
    status_line("sending the model to the GPU: %3.0f %%  %.1f of %.1f GiB  %.1f GiB/s", 100 * done / total,
                done / 0x1p30, total / 0x1p30, done / 0x1p30 / (t - start));
}
#endif

/* Whether the session will be on a GPU. On the CPU it is because that was asked for, or because there is no GPU and
 * none was asked for. */
static bool gpu_wanted(const struct settings *set) {
    if (set->cpu && set->gpus) die_usage("--cpu and --gpus exclude each other");
    if (set->cpu || set->cpu_ref) return false;
#ifdef MOE_CUDA
    char err[ERR_MAX];
    /* Loading a kernel may wait for the GPU to be idle, which it is not while the kernel of one rank waits for
     * another's. */
    if (set->tp > 1 || set->pp > 1 || (set->gpus && strchr(set->gpus, ','))) setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    if (cuda_device_count(err)) return true;
    if (set->gpus) die("--gpus %s: %s", set->gpus, err);
    if (set->verbose) note("%s", err);
#else
    if (set->gpus) die("--gpus %s: this program was built without CUDA", set->gpus);
#endif
    return false;
}

/* Settles --tp and --pp, and on a GPU the device of each rank. */
static void settings_ranks(struct settings *s, const struct model *m, int gpu[MAX_RANKS]) {
    const struct gpu_list list = gpus_parse(s->gpus);
    if (!s->pp) s->pp = s->calibrate && !s->tp && list.n ? list.n : 1; /* scores want whole experts */
    if (!s->tp) s->tp = list.n > s->pp ? list.n / s->pp : 1;
    const int n = s->tp * s->pp;
    if (s->calibrate && s->tp > 1) die_usage("--calibrate wants whole experts on every rank: --pp instead of --tp");
    if (n > MAX_RANKS)
        die_usage("--tp %d with --pp %d are %d ranks, at most %d are supported", s->tp, s->pp, n, MAX_RANKS);
    if (list.n && list.n != n)
        die_usage("--gpus %s lists %d GPUs, --tp %d with --pp %d want %d", s->gpus, list.n, s->tp, s->pp, n);
    if (s->pp > m->n_layer) die_usage("--pp %d: the model has %d layers", s->pp, m->n_layer);
    for (int i = 0; i < n; i++) gpu[i] = list.n ? list.device[i] : i;
}

#ifdef MOE_CUDA
/* Whether every two of these GPUs write to each other's memory, at a rate that makes it better than the host's memory.
 * */
static bool gpus_close(const int *gpu, int n) {
    enum { SLOW = 2 /* GB/s: a quarter of PCIe 3.0 x8, or detours */ };
    bool close = gpus_peers(gpu, n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i && close; k++) {
            double rate = 0, latency;
            if (gpu[i] == gpu[k]) continue;
            cuda_pair(gpu[k], gpu[i], &rate, &latency);
            close = rate > SLOW * 1e9;
        }
    return close;
}

/* Sets NCCL's variables for a workstation where the environment does not: one machine without InfiniBand, buffers that
 * fit PCIe, and peer access wherever gpus_close finds it useful. */
static void nccl_defaults(const int *gpu, int n, bool verbose) {
    const struct {
        const char *name, *value;
        bool wanted;
    } d[] = {{"NCCL_IB_DISABLE", "1", true},
             {"NCCL_SHM_DISABLE", "0", true},
             {"NCCL_BUFFSIZE", "4194304", true},
             {"NCCL_P2P_LEVEL", "SYS", !getenv("NCCL_P2P_LEVEL") && gpus_close(gpu, n)}};
    for (size_t i = 0; i < sizeof d / sizeof *d; i++) {
        const char *given = getenv(d[i].name);
        if (!given && d[i].wanted) setenv(d[i].name, d[i].value, 0);
        if (verbose && (given || d[i].wanted))
            note("%s=%s (%s)", d[i].name, given ? given : d[i].value, given ? "from the environment" : "default here");
    }
}

/* Starts one rank; a rank_starter. */
static int gpu_rank_start(struct rank *r, const struct model *shard, void *arg, char *err) {
    struct cuda_options o = *(const struct cuda_options *)arg;
    int n = shard->shard.n_rank * shard->shard.n_stage, procs = omp_get_num_procs();
    const int threads = omp_get_max_threads();
    o.pg = r->pg;
    o.index = r->index;
    if (o.index) o.progress = NULL;
    if (n > 1) omp_set_num_threads(procs > n ? procs / n : 1); /* of this thread: all upload at once */
    int rc = gpu_rank_init(r, shard, &o, err);
    omp_set_num_threads(threads);
    return rc;
}

/* Opens the session on GPUs and prints what each one holds. 0, or -1 with a message. */
static int engine_gpu(struct engine *e, const int gpu[MAX_RANKS], char *err) {
    struct settings *set = e->set;
    char number[32];
    struct cuda_options o = {.n_ctx = set->n_ctx,
                             .kv_splits = set->kv_splits,
                             .kv = settings_kv(set, true),
                             .allreduce = set->allreduce,
                             .moe_act = set->moe_act,
                             .stats = set->calibrate != NULL,
                             .in_sum2 = set->activations != NULL,
                             .reserve = (size_t)set->vram_reserve << 20,
                             .progress = upload_progress};
    memcpy(o.device, gpu, sizeof o.device);
    if (set->tp > 1 && o.allreduce != ALLREDUCE_ONESHOT) nccl_defaults(gpu, set->tp * set->pp, set->verbose);
    double t0 = now_seconds();
    if (session_open(&e->session, &e->model, set->tp, set->pp, gpu_rank_start, &o, err)) return -1;
    for (int i = 0; i < e->session.pg.n; i++) {
        const struct rank *r = &e->session.pg.ranks[i];
        double gib[] = {(double)r->weight_bytes / 0x1p30, (double)r->kv_bytes / 0x1p30, (double)r->bytes / 0x1p30,
                        (double)r->free_bytes / 0x1p30};
        note("%s: weights %.2f GiB (%.1f GiB/s), cache %.2f GiB (%s tokens, %s), scratch %.2f GiB, free %.2f GiB",
             r->name, gib[0], gib[0] / (now_seconds() - t0), gib[1], with_commas((uint64_t)r->n_ctx, number),
             kv_names[r->kv_type], gib[2], gib[3]);
    }
    if (*e->session.r->link) note("%s", e->session.r->link);
    return 0;
}
#endif

/* Opens the session for the model that is loaded. 0, or -1 with a message when a GPU refuses. */
static int engine_start(struct engine *e, bool gpu, char *err) {
    struct settings *set = e->set;
    char name[192];
    int devices[MAX_RANKS];
    settings_ranks(set, &e->model, devices);
#ifdef MOE_CUDA
    if (gpu && engine_gpu(e, devices, err)) return -1;
#endif
    (void)err;
    const char *idle = set->kv_splits   ? "--kv-splits"
                       : set->moe_act   ? "--moe-act"
                       : set->allreduce ? "--allreduce"
                                        : NULL;
    if (!gpu && idle) note("this runs on the CPU: %s has no effect", idle);
    if (!gpu && set->tp * set->pp > 1 && !set->cpu && !set->cpu_ref)
        note("no GPU is used: the %d ranks are threads of the CPU", set->tp * set->pp);
    if (!gpu)
        session_init(&e->session, &e->model, set->tp, set->pp,
                     (struct cpu_options){.k = set->cpu_ref ? &kernels_ref : kernels_choose(),
                                          .n_threads = set->threads ? set->threads : omp_get_num_procs(),
                                          .n_ctx = choose_context(e),
                                          .kv = settings_kv(set, false),
                                          .stats = set->calibrate != NULL,
                                          .in_sum2 = set->activations != NULL});
    if (e->session.n_ctx > e->model.n_ctx_train)
        note("-c %d is beyond the %d tokens that the model was trained for", e->session.n_ctx, e->model.n_ctx_train);
    if (set->verbose)
        note("%s: %.1f MiB loaded in %.2f s; %s; cache %.1f MiB for %d tokens; "
             "activations %.1f MiB",
             e->model.name, (double)e->model.file_bytes / 0x1p20, e->model.load_seconds,
             session_name(&e->session, name), (double)session_kv_bytes(&e->session) / 0x1p20, e->session.n_ctx,
             (double)e->session.r->bytes / 0x1p20);
    return 0;
}

/* Makes the model of --synth. `synthetic`: its matrices need no memory, see synth_make. */
static void synth_load(struct engine *e, bool synthetic) {
    const struct settings *set = e->set;
    struct synth y = synth_parse(set->synth);
    if (set->shard) synth_shard(&y, set->shard);
    y.sizes = (set->info || set->plan) && !set->model;
    synth_make(&e->model, &y, set->model, y.sizes || (synthetic && !set->model));
}

/* Loads the model of -m or --synth, without a session. */
static void engine_load(struct engine *e, struct settings *set, bool synthetic) {
    char err[ERR_MAX];
    *e = (struct engine){.set = set};
    if (set->synth) synth_load(e, synthetic);
    else if (!set->model) die_usage("no model: give -m MODEL.gguf or set MOE_MODEL");
    else if (model_load(&e->model, set->model, err)) die("%s", err);
    settings_resolve(set, &e->model);
}

/* Loads the model and opens a session. */
static void engine_open(struct engine *e, struct settings *set) {
    char err[ERR_MAX];
    const bool gpu = gpu_wanted(set);
    engine_load(e, set, gpu);
    if (engine_start(e, gpu, err)) die("%s", err);
}

/* Frees what engine_open has made. */
static void engine_close(struct engine *e) {
    if (e->session.m) session_free(&e->session);
    model_free(&e->model);
}

/* ============================================================================================================
 * Modes: tokenize, render, info, logits
 *
 * Each mode is a function of the engine that returns the exit code; `mode_table` in Main lists them. Results go to
 * stdout or to the named file, remarks to stderr. This section also reads prompts, for the modes that take one.
 * ============================================================================================================ */

/* Appends the tokens of a text. Without `special` control tokens in it are plain text. */
static void tokenize_all(const struct vocab *v, const char *s, size_t n, bool special, int32_t **ids) {
    uint8_t *origin = special ? NULL : xmalloc(n + 1);
    if (origin) memset(origin, ORIGIN_DATA, n);
    tokenize(v, s, n, origin, TOKENIZE_CONTROL | TOKENIZE_TAGS, ids);
    free(origin);
}

/* Appends all of stdin; ends the program if it cannot be read. */
static void read_stdin(char **out) {
    if (!read_fd(0, out)) return;
    if (interrupted) exit(EXIT_INTERRUPT);
    die("cannot read stdin: %s", strerror(errno));
}

/* Drops one line break at the end. */
static void drop_newline(char **text) {
    if (arrlen(*text) && arrlast(*text) == '\n') (void)arrpop(*text);
    if (arrlen(*text) && arrlast(*text) == '\r') (void)arrpop(*text);
}

/* Reports a prompt that could not be answered. The exit code. */
static int report(char *err) {
    message_neutralise(err);
    fprintf(stderr, "moe: %s\n", err);
    return EXIT_RUN;
}

/* Whether two names mean one file, which need not exist. */
static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    return !strcmp(a, b) || (!stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino);
}

/* Joins stdin, -f and -p by blank lines; false when there is none of them. */
static bool gather_prompt(const struct settings *set, char **out) {
    char err[ERR_MAX], *file = NULL;
    bool any = false;
    if (!term.in_tty) {
        read_stdin(out);
        drop_newline(out);
        any = arrlen(*out) > 0;
    }
    if (set->prompt_file) {
        if (read_file(set->prompt_file, &file, err)) die("%s", err);
        drop_newline(&file);
        if (any) sb_puts(out, "\n\n");
        sb_put(out, file, arrlenu(file));
        arrfree(file);
        any = true;
    }
    if (set->prompt) {
        if (any) sb_puts(out, "\n\n");
        sb_puts(out, set->prompt);
        any = true;
    }
    return any;
}

/* The token ids of --ids. */
static int32_t *parse_ids(const char *s, int n_vocab) {
    int32_t *ids = NULL;
    for (const char *p = s; *p;) {
        char *end;
        const long v = strtol(p, &end, 10);
        if (end == p || (*end && *end != ',' && *end != ' ') || v < 0 || v >= n_vocab)
            die_usage("--ids: '%.20s' is not a token id from 0 to %d", p, n_vocab - 1);
        arrput(ids, (int32_t)v);
        p = *end ? end + 1 : end;
    }
    if (!arrlen(ids)) die_usage("--ids: no token ids");
    return ids;
}

/* The token ids of a prompt that is not a chat: --ids, or plain text with --raw. NULL with a message when there are
 * none. */
static int32_t *raw_ids(const struct engine *e, const char *text, size_t n, char *err) {
    const struct vocab *v = e->model.vocab;
    int32_t *ids = NULL;
    if (e->set->ids) return parse_ids(e->set->ids, e->model.n_vocab);
    if (!v->n_tokens) die("'%s' has no vocabulary: give token ids with --ids", e->set->model);
    if (v->add_bos && v->bos >= 0) arrput(ids, v->bos);
    tokenize_all(v, text, n, e->set->special, &ids);
    if (!arrlen(ids)) fail(err, "the prompt has no tokens");
    return ids;
}

/* The token ids of a prompt as a message of a chat. NULL with a message when it cannot be one. */
static int32_t *chat_ids(struct engine *e, const char *text, size_t n, char *err) {
    struct chat c;
    struct text rendered = {0};
    int32_t *ids = NULL;
    if (chat_init(&c, e->set, &e->model, &e->session, err)) return NULL;
    if (!message_check("the prompt", text, n, err)) {
        chat_push(&c, "user", text, n);
        if (!chat_render(&c, true, &rendered, err)) chat_tokenize(&c, &rendered, &ids);
    }
    text_free(&rendered);
    chat_free(&c);
    return ids;
}

/* --tokenize: the token ids of stdin on one line. */
static int mode_tokenize(struct engine *e) {
    const struct settings *set = e->set;
    char err[ERR_MAX], *text = NULL;
    struct gguf g;
    struct vocab v;
    int32_t *ids = NULL;
    if (!set->model) die_usage("--tokenize wants a model: -m FILE");
    if (gguf_open(&g, set->model, err, ERR_MAX)) die("%s", err);
    if (vocab_load(&v, &g, err)) die("'%s': %s", set->model, err);
    read_stdin(&text);
    tokenize_all(&v, text, arrlenu(text), set->special, &ids);
    for (ptrdiff_t i = 0; i < arrlen(ids); i++) printf(i ? " %d" : "%d", ids[i]);
    putchar('\n');
    arrfree(ids);
    arrfree(text);
    vocab_free(&v);
    gguf_close(&g);
    return EXIT_OK;
}

/* --render: the chat template filled in with the variables on stdin. */
static int mode_render(struct engine *e) {
    const struct settings *set = e->set;
    struct model *m = set->model ? &e->model : NULL;
    char err[ERR_MAX], *text = NULL, *source = NULL;
    struct template *t;
    struct text out = {0};
    json_error_t why;
    if (!set->template_file && !m) die_usage("--render wants a template: --chat-template-file FILE or -m FILE");
    if (m) m->vocab = xcalloc(1, sizeof *m->vocab);
    if (m && (gguf_open(&m->gguf, set->model, err, ERR_MAX) || vocab_load(m->vocab, &m->gguf, err))) die("%s", err);
    if (chat_template(&t, set, m, &source, err)) die("%s", err);
    read_stdin(&text);
    json_t *given = json_loadb(text, arrlenu(text), JSON_REJECT_DUPLICATES, &why), *vars = json_object();
    if (!json_is_object(given))
        die("stdin is not a JSON object: %s (line %d)", given ? "another value" : why.text, given ? 1 : why.line);
    if (json_object_get(given, "now") && !json_is_string(json_object_get(given, "now"))) die("\"now\" is not a string");
    chat_common_vars(vars, m, set);
    json_object_update(vars, given);
    const int rc = template_render(t, vars, &out, err);
    if (!rc && out.s) fwrite(out.s, 1, arrlenu(out.s), stdout);
    json_decref(given);
    json_decref(vars);
    text_free(&out);
    template_free(t);
    arrfree(source);
    arrfree(text);
    if (m) model_free(m);
    return rc ? report(err) : EXIT_OK;
}

/* --info: the experts of each layer, and those that pruning kept. */
static void info_experts(const struct model *m) {
    printf("experts       %d used per token of width %d, %s router, shared width %d", m->n_expert_used, m->n_ff_expert,
           m->gating == GATING_SIGMOID ? "sigmoid" : "softmax", m->n_ff_shared);
    if (m->n_group > 1) printf(", %d of %d groups", m->n_group_used, m->n_group);
    printf("\nexperts kept  ");
    for (int il = 0, from = 0; il < m->n_layer; il++) {
        if (il + 1 < m->n_layer && m->layers[il + 1].n_expert == m->layers[from].n_expert) continue;
        printf("%slayers %d-%d: ", from ? ", " : "", from, il);
        if (m->layers[from].n_expert) printf("%d", m->layers[from].n_expert);
        else printf("dense");
        from = il + 1;
    }
    if (m->pruned) printf(" (pruned%s)", m->n_expert_original ? "" : "; the original count is not recorded");
    if (m->n_expert_original) printf(" of %d", m->n_expert_original);
    putchar('\n');
    for (int il = 0; il < m->n_layer; il++) {
        if (!m->layers[il].retained) continue;
        printf("  layer %3d keeps", il);
        for (int k = 0; k < m->layers[il].n_expert; k++) printf(" %d", m->layers[il].retained[k]);
        putchar('\n');
    }
}

/* --info: bytes and weights of every type. */
static void info_tensors(const struct model *m) {
    uint64_t bytes[GGUF_TYPE_COUNT] = {0}, weights[GGUF_TYPE_COUNT] = {0}, total = 0;
    for (uint32_t i = 0; i < m->gguf.n_tensors; i++) {
        const struct gguf_tensor *t = &m->gguf.tensors[i];
        bytes[t->type] += t->bytes;
        total += t->bytes;
        weights[t->type] += t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    }
    for (uint32_t t = 0; t < GGUF_TYPE_COUNT; t++)
        if (bytes[t])
            printf("%-13s %8.1f MiB, %.1f million weights\n", gguf_type_info(t).name, (double)bytes[t] / 0x1p20,
                   (double)weights[t] * 1e-6);
    printf("tensors       %u in ", m->gguf.n_tensors);
    if (m->gguf.n_images) printf("%u file%s", m->gguf.n_images, m->gguf.n_images > 1 ? "s" : "");
    else printf("memory");
    printf(", %.1f MiB\n", (double)total / 0x1p20);
}

/* --info: what the file holds. */
static int mode_info(struct engine *e) {
    const struct model *m = &e->model;
    const struct settings *set = e->set;
    char number[32];
    int dense = 0;
    for (int il = 0; il < m->n_layer; il++) dense += !m->layers[il].n_expert;
    printf("name          %s\narchitecture  %s\nlayers        %d (%d dense), %d for multi-token prediction\n", m->name,
           arch_names[m->arch], m->n_layer, dense, m->n_mtp_layer);
    printf("hidden        %d, vocabulary %d, trained context %s\n", m->n_embd, m->n_vocab,
           with_commas((uint64_t)m->n_ctx_train, number));
    if (m->kv_lora)
        printf("attention     %d heads, latent %d, key %d (%d rotary), value %d%s\n", m->n_head, m->kv_lora, m->head_k,
               m->rope_dim, m->head_v, m->q_lora ? ", low-rank query" : "");
    else
        printf("attention     %d heads, %d KV heads, key %d (%d rotary), value %d\n", m->n_head, m->n_head_kv,
               m->head_k, m->rope_dim, m->head_v);
    info_experts(m);
    info_tensors(m);
    printf("vocabulary    %d tokens, chat template %s\n", m->vocab->n_tokens,
           m->vocab->n_tokens && m->vocab->chat_template.p ? "yes" : "no");
    printf("sampling      temp %g, top-k %d, top-p %g, min-p %g, repeat penalty %g\n", set->temp, set->top_k,
           set->top_p, set->min_p, set->repeat_penalty);
    return EXIT_OK;
}

struct npy_out {
    FILE *f;
    int n_vocab;
};

static void npy_row(void *ctx, int pos, const float *logits) {
    const struct npy_out *o = ctx;
    (void)pos;
    fwrite(logits, sizeof *logits, (size_t)o->n_vocab, o->f);
}

/* Writes the logits of n tokens as float32 [n, n_vocab] in NumPy's format 1.0. The exit code. */
static int npy_write(struct engine *e, const int32_t *ids, int n) {
    enum { HEADER = 128 }; /* bytes: magic and version 8, length 2, text, newline */
    const char *path = e->set->logits;
    char err[ERR_MAX], text[HEADER];
    struct npy_out o = {.f = temp_create(path, 0666, err), .n_vocab = e->model.n_vocab};
    if (!o.f) die("%s", err);
    snprintf(text, sizeof text, "{'descr': '<f4', 'fortran_order': False, 'shape': (%d, %d), }", n, o.n_vocab);
    fprintf(o.f, "\x93NUMPY%c%c%c%c%-*s\n", 1, 0, HEADER - 10, 0, HEADER - 11, text);
    int rc = session_score(&e->session, ids, n, npy_row, &o, err);
    if (rc) {
        fclose(o.f);
        temp_remove();
    } else {
        rc = temp_finish(o.f, path, false, err);
    }
    if (rc < 0) die("%s", err);
    return rc ? EXIT_INTERRUPT : EXIT_OK;
}

/* --logits FILE.npy: the logits of every position of the prompt. */
static int mode_logits(struct engine *e) {
    const struct settings *set = e->set;
    char err[ERR_MAX], *text = NULL;
    const bool any = !set->ids && gather_prompt(set, &text);
    if (!set->ids && !any) die_usage("--logits wants a prompt: stdin, -p, -f or --ids");
    int32_t *ids = set->ids || set->raw ? raw_ids(e, text, arrlenu(text), err) : chat_ids(e, text, arrlenu(text), err);
    if (!ids) die("%s", err);
    const int code = npy_write(e, ids, (int)arrlen(ids));
    arrfree(ids);
    arrfree(text);
    return code;
}

/* ============================================================================================================
 * Modes: perplexity, needle, smoke
 *
 * Whether a model predicts text and answers as it should. Questions are asked by ask(), which --doctor uses too.
 * ============================================================================================================ */

/* Sums of -log p, the nll, over tokens that follow others. */
struct nll {
    const int32_t *ids; /* (n) the window that runs */
    int n, n_vocab;
    double sum, sum2; /* of the nll, of its square */
    int64_t count;
};

/* log sum exp of x (n), relative to its largest, which is at *best. */
static double log_total(const float *x, int n, int *best) {
    double sum = 0;
    *best = argmax(x, n);
    for (int i = 0; i < n; i++) sum += exp((double)(x[i] - x[*best]));
    return log(sum);
}

/* Adds the nll of the token behind `pos`; x (n_vocab) logits, `total` and `best` their log_total. */
static void nll_put(struct nll *s, int pos, const float *x, double total, int best) {
    if (pos + 1 >= s->n) return;
    const double nll = total + (double)(x[best] - x[s->ids[pos + 1]]);
    s->sum += nll;
    s->sum2 += nll * nll;
    s->count++;
}

/* The same for session_score. */
static void nll_add(void *ctx, int pos, const float *x) {
    struct nll *s = ctx;
    int best;
    if (pos + 1 >= s->n) return;
    const double total = log_total(x, s->n_vocab, &best);
    nll_put(s, pos, x, total, best);
}

/* exp of the mean; *error: its standard error. */
static double nll_perplexity(const struct nll *s, double *error) {
    const double mean = s->sum / (double)s->count, var = s->sum2 / (double)s->count - mean * mean;
    *error = s->count > 1 ? exp(mean) * sqrt(fmax(var, 0) / (double)(s->count - 1)) : 0;
    return exp(mean);
}

enum { TEXT_WINDOW = 2048 /* tokens of a text that run together at most; each window starts with an empty context */ };

/* --perplexity FILE: exp of the mean nll over windows of the text. */
static int mode_perplexity(struct engine *e) {
    const char *path = e->set->perplexity;
    char err[ERR_MAX], *text = NULL;
    int32_t *ids = NULL;
    if (!e->model.vocab->n_tokens) die("'%s' has no vocabulary", e->set->model);
    if (read_file(path, &text, err)) die("%s", err);
    tokenize_all(e->model.vocab, text, arrlenu(text), false, &ids);
    const int n = (int)arrlen(ids), window = int_min(e->session.n_ctx, TEXT_WINDOW);
    if (n < 2) die("'%s' has %d tokens: too short for a perplexity", path, n);
    if (window < 2) die("-c %d is too short for a perplexity: expected at least 2", window);
    struct nll s = {.n_vocab = e->model.n_vocab};
    const double t0 = now_seconds();
    for (int at = 0; at + 1 < n; at += window) {
        s.ids = ids + at;
        s.n = int_min(n - at, window);
        const int rc = session_score(&e->session, s.ids, s.n, nll_add, &s, err);
        if (rc < 0) die("%s", err);
        if (rc) return EXIT_INTERRUPT;
        status_line("%d of %d tokens, %.3f", at + s.n, n, exp(s.sum / (double)s.count));
    }
    status_line("%s", "");
    double error, perplexity = nll_perplexity(&s, &error);
    printf("perplexity %.4f +/- %.4f (%lld tokens, windows of %d, %.0f tok/s)\n", perplexity, error, (long long)s.count,
           window, (double)n / (now_seconds() - t0));
    arrfree(ids);
    arrfree(text);
    return EXIT_OK;
}

/* A question whose answer is known. */
struct question {
    const char *text; /* of the user's message */
    size_t n;         /* bytes of it */
    const char *want; /* what a right answer holds */
    int n_predict;    /* tokens of the answer at most */
};

struct answer {
    bool right, finite; /* it holds `want`; the logits behind it are finite */
    double seconds;     /* of prefill and decode together */
};

/* Asks in a chat of its own, greedily, without thinking and without a system message. The answer is printed unless
 * settings.quiet. 0, or -1 with a message. */
static int ask(struct engine *e, const struct question *q, struct answer *a, char *err) {
    struct settings set = *e->set;
    struct chat c;
    const char *think;
    size_t n_think;
    *a = (struct answer){0};
    set.think = THINK_OFF;
    set.greedy = true;
    set.repeat_penalty = 1.0;
    set.system = NULL;
    set.n_predict = q->n_predict;
    if (chat_init(&c, &set, &e->model, &e->session, err)) return -1;
    const double t0 = now_seconds();
    const enum turn_result result = chat_turn(&c, q->text, q->n, err);
    a->seconds = now_seconds() - t0;
    if (result == TURN_DONE) {
        const float *logits = session_logits(&e->session);
        a->right = strstr(split_answer(arrlast(c.messages).content, &think, &n_think), q->want) != NULL;
        a->finite = true;
        for (int i = 0; i < e->model.n_vocab; i++) a->finite &= isfinite(logits[i]) != 0;
    } else if (result != TURN_FAILED) {
        fail(err, "interrupted");
    }
    chat_free(&c);
    return result == TURN_DONE ? 0 : -1;
}

/* Finds a shipped prompt: beside the program, or where make install puts it. 0, or -1 with a message. */
static int prompts_path(const char *name, char out[4096], char *err) {
    static const char *const where[] = {"prompts", "../share/moe/prompts"};
    char exe[2048];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0) return fail(err, "cannot find the program's own path: %s", strerror(errno));
    exe[n] = 0;
    *strrchr(exe, '/') = 0;
    for (int i = 0; i < 2; i++) {
        snprintf(out, 4096, "%s/%s/%s", exe, where[i], name);
        if (!access(out, R_OK)) return 0;
    }
    return fail(err, "the file prompts/%s is not beside the program; name another one with --haystack", name);
}

/* Reads --haystack or the shipped one. 0, or -1 with a message. */
static int haystack_read(const struct settings *set, char **hay, char *err) {
    char path[4096];
    size_t bytes = 0; /* without newlines, of which a message cannot consist */
    if (!set->haystack && prompts_path("haystack.txt", path, err)) return -1;
    if (read_file(set->haystack ? set->haystack : path, hay, err)) return -1;
    for (size_t i = 0; i < arrlenu(*hay); i++) bytes += (*hay)[i] != '\n';
    if (utf8_valid(*hay, arrlenu(*hay)) && bytes >= 100) return 0;
    return fail(err, "the haystack is not UTF-8 text of at least 100 bytes");
}

/* Writes a message of about n tokens: paragraphs of the haystack, from the start again when it ends, with the fact
 * between them at `depth` percent. A paragraph that does not fit any more is passed over for shorter ones, up to 20
 * times. */
static void needle_text(const struct vocab *v, const char *hay, size_t len, int n, int depth, const char *fact,
                        char **out) {
    int32_t *ids = NULL;
    int have = 48, misses = 0; /* tokens of the fact, the question and the template */
    bool placed = false;
    for (size_t at = 0; misses < 20;) {
        const char *p = hay + at, *end = memmem(p, len - at, "\n\n", 2);
        const size_t bytes = end ? (size_t)(end - p) : len - at;
        arrsetlen(ids, 0);
        tokenize(v, p, bytes, NULL, 0, &ids);
        const int cost = (int)arrlen(ids) + 1;
        if (!placed && have + cost / 2 >= (double)n * depth / 100) {
            sb_puts(out, fact);
            placed = true;
        }
        if (have + cost > n) {
            misses++;
        } else if (bytes) {
            sb_put(out, p, bytes);
            sb_puts(out, "\n\n");
            have += cost;
        }
        at = end ? (size_t)(end - hay) + 2 : len;
        while (at < len && hay[at] == '\n') at++;
        if (at >= len) at = 0;
    }
    if (!placed) sb_puts(out, fact);
    arrfree(ids);
    sb_puts(out, "What is the secret code?");
}

/* Asks for a number that stands in n tokens of prose. 1 found, 0 not, -1 with a message. */
static int needle_run(struct engine *e, int n, int depth, int *secret, double *seconds, char *err) {
    const uint64_t seed = e->set->seed >= 0 ? (uint64_t)e->set->seed : 2;
    uint64_t rng = seed * 1000003u + (uint64_t)n * 101u + (uint64_t)depth;
    char fact[64], digits[16], *hay = NULL, *text = NULL;
    struct answer a = {0};
    *seconds = 0;
    *secret = 10000 + (int)(rng_uniform(&rng) * 90000);
    snprintf(digits, sizeof digits, "%05d", *secret);
    snprintf(fact, sizeof fact, "The secret code is %s.\n\n", digits);
    if (session_fits(&e->session, n, err)) return -1;
    int rc = haystack_read(e->set, &hay, err);
    if (!rc) {
        needle_text(e->model.vocab, hay, arrlenu(hay), n, depth, fact, &text);
        const struct question q = {.text = text, .n = arrlenu(text), .want = digits, .n_predict = 64};
        rc = ask(e, &q, &a, err);
        *seconds = a.seconds;
    }
    arrfree(hay);
    arrfree(text);
    return rc ? -1 : a.right;
}

/* --needle N: finds a fact in N tokens of prose. */
static int mode_needle(struct engine *e) {
    char err[ERR_MAX];
    double seconds;
    int secret, found = needle_run(e, e->set->needle, e->set->depth, &secret, &seconds, err);
    if (found < 0 && interrupted) return EXIT_INTERRUPT;
    if (found < 0) die("%s", err);
    note("needle %05d in %d tokens, depth %d %%, --kv %s: %s in %.1f s", secret, e->session.n_past, e->set->depth,
         kv_names[e->session.r->kv_type], found ? "found" : "NOT FOUND", seconds);
    return found ? EXIT_OK : EXIT_RUN;
}

/* Asks a short question: whether the logits are finite and the answer is right. 0, or -1 with a message. */
static int smoke_ask(struct engine *e, bool *finite, bool *right, double *seconds, char *err) {
    static const char text[] = "What is 7 squared? One word.";
    const struct question q = {.text = text, .n = sizeof text - 1, .want = "49", .n_predict = 256};
    struct answer a;
    const int rc = ask(e, &q, &a, err);
    *finite = a.finite;
    *right = a.right;
    *seconds = a.seconds;
    return rc;
}

enum { SMOKE_TOKENS = 1000 /* of the needle's haystack at most */ };
static int smoke_tokens(const struct session *s) { return int_min(s->n_ctx - 128, SMOKE_TOKENS); }

static void smoke_print(const char *what, bool ok, double seconds) {
    fprintf(stderr, "%-26s %-4s %6.2f s\n", what, ok ? "ok" : "FAIL", seconds);
}

/* --smoke. A: the model loads and its logits are finite; B: a question whose answer is known; C: the needle. */
static int mode_smoke(struct engine *e) {
    const int n = smoke_tokens(&e->session);
    char err[ERR_MAX] = "", needle[32];
    bool finite, right;
    double ask_seconds, needle_seconds = 0;
    int secret;
    if (n < 64)
        die("a context of %d tokens is too small for --smoke: expected at least %d", e->session.n_ctx, 128 + 64);
    smoke_ask(e, &finite, &right, &ask_seconds, err);
    const bool found = !interrupted && needle_run(e, n, 50, &secret, &needle_seconds, err) == 1;
    if (interrupted) return EXIT_INTERRUPT;
    snprintf(needle, sizeof needle, "C needle in %d tokens", n);
    smoke_print("A load and finite logits", finite, e->model.load_seconds);
    smoke_print("B 7 squared", right, ask_seconds);
    smoke_print(needle, found, needle_seconds);
    const bool ok = finite && right && found;
    if (!ok && *err) note("%s", err);
    return ok ? EXIT_OK : EXIT_RUN;
}

/* ============================================================================================================
 * Modes: calibrate, compare
 *
 * Statistics of the experts for moe-reap, and how far one model's predictions are from another's: convert/calibrate.h.
 * ============================================================================================================ */

#include "convert/calibrate.h"

/* ============================================================================================================
 * Modes: bench
 *
 * The speed of prefill and decode at several context depths, beside the measured bandwidth of the machine; and the time
 * of every kernel of a forward pass. `moe --bench --help` explains the columns.
 * ============================================================================================================ */

static int compare_double(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* Sorts x. */
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_double);
    return x[n / 2];
}

enum {
    BENCH_RUNS = 5,
    BENCH_REPEAT = 32,    /* forwards of a run at most */
    BENCH_PREFILL = 4096, /* tokens of a prefill at most */
    BENCH_LAUNCHES = 32   /* of a layer at most, for --profile */
};

static const int bench_depths[] = {0, 4096, 32768, 131072}; /* tokens, ascending */
static const int bench_batches[] = {1, 2, 4, 8, 16};        /* the last one is the largest */
enum {
    BENCH_DEPTHS = sizeof bench_depths / sizeof *bench_depths,
    BENCH_BATCHES = sizeof bench_batches / sizeof *bench_batches
};

/* Random token ids, the same in every run. */
static void bench_ids(const struct model *m, int32_t ids[BENCH_PREFILL]) {
    uint64_t rng = 1;
    for (int i = 0; i < BENCH_PREFILL; i++) ids[i] = (int32_t)(rng_next(&rng) % (uint64_t)m->n_vocab);
}

/* Median seconds of a forward of n of the BENCH_PREFILL ids behind `depth` other tokens, with the logits of the last
 * `rows` of them; 0: interrupted. Two runs are not counted: one warms up, one tells how often to repeat. If forwards
 * take too long for that, the first one counts. */
static double bench_forward(struct session *s, const int32_t *ids, int depth, int n, int rows) {
    const double budget = s->r->cuda ? 0.5 : 4; /* seconds */
    double t[BENCH_RUNS], spent = 0;
    int got = 0, repeat = 1;
    for (int run = -2; run < BENCH_RUNS && (!got || spent < budget); run++) {
        const double t0 = now_seconds();
        for (int i = 0; i < repeat; i++) {
            if (interrupted) return 0;
            s->n_past = depth;
            session_forward(s, ids + i * n % (BENCH_PREFILL - n + 1), n);
            session_head(s, n - rows, rows);
            session_wait(s);
        }
        const double all = now_seconds() - t0, one = all / repeat, fit = budget / 20 / one;
        spent += all;
        if (run >= 0 || spent > budget) t[got++] = one;
        if (run < 0) repeat = fit > BENCH_REPEAT ? BENCH_REPEAT : fit < 1 ? 1 : (int)fit;
    }
    s->n_past = depth;
    return interrupted ? 0 : median(t, got);
}

/* Marks the cache as filled from token `from` to `to`: the time of a forward depends on the depth, not on the contents.
 * A CPU's cache is written, because pages that never were are all mapped to one page of zeros, which stays in the
 * processor's cache. */
static void bench_fill_cache(struct session *s, int from, int to) {
    const size_t first = (size_t)from, n = (size_t)(to - from);
    for (int i = 0; i < s->pg.n; i++) {
        struct rank *r = &s->pg.ranks[i];
        for (int il = 0; il < 2 * r->m->n_layer && !r->cuda; il++) {
            const struct kv_plane *p = il & 1 ? &r->kv[il / 2].v : &r->kv[il / 2].k;
            memset(p->data + first * p->row_bytes, 0, n * p->row_bytes);
            if (p->type == KV_FP8)
                memset(p->scale + first * (size_t)p->n_group, 0, n * (size_t)p->n_group * sizeof(float));
        }
    }
}

/* Prints a number of the CSV behind a comma, or only the comma if it is not known. */
static void bench_field(bool known, double v, int digits) {
    if (known) printf(",%.*f", digits, v);
    else putchar(',');
}

/* The forward that --profile looks at. */
struct bench_call {
    struct session *s;
    const int32_t *ids;
    int n, rows;
};

static void bench_call(void *arg) {
    const struct bench_call *b = arg;
    b->s->n_past = 0;
    session_forward(b->s, b->ids, b->n);
    session_head(b->s, b->n - b->rows, b->rows);
}

/* Times the launches of the call: medians, added up by name, in *rows, malloc'ed. Returns how many. */
static int bench_launches(struct bench_call *call, struct profile_row **rows) {
    struct session *s = call->s;
    const int cap = BENCH_LAUNCHES * (s->m->n_layer + 1);
    int n = 0, n_row = 0;
    struct profile_row *row = xcalloc((size_t)cap, sizeof *row);
    double *t = xcalloc((size_t)cap * BENCH_RUNS, sizeof *t);
    for (int run = -1; run < BENCH_RUNS; run++) { /* the first is not counted */
        n = s->r->ops->profile(s->r, bench_call, call, row, cap);
        for (int i = 0; i < n && run >= 0; i++) t[i * BENCH_RUNS + run] = row[i].seconds;
    }
    for (int i = 0, at; i < n; i++) {
        struct profile_row one = row[i];
        one.seconds = median(t + i * BENCH_RUNS, BENCH_RUNS);
        for (at = 0; at < n_row && strcmp(row[at].name, one.name); at++) {}
        if (at == n_row) {
            row[n_row++] = one;
            continue;
        }
        row[at].calls++;
        row[at].seconds += one.seconds;
        row[at].bytes += one.bytes;
    }
    free(t);
    *rows = row;
    return n_row;
}

/* Prints the kernels of a forward at depth 0, which takes `whole` seconds, on stderr. */
static void bench_profile(struct session *s, const int32_t *ids, int n, int rows, double whole, double bandwidth) {
    const bool prefill = n > LOGIT_ROWS;
    struct bench_call call = {.s = s, .ids = ids, .n = n, .rows = rows};
    struct profile_row *row;
    char name[32];
    double sum = 0;
    int n_row = bench_launches(&call, &row), calls = 0;
    for (int i = 0; i < n_row; i++) {
        sum += row[i].seconds;
        calls += row[i].calls;
    }
    snprintf(name, sizeof name, prefill ? "prefill of %d" : "batch %d", n);
    fprintf(stderr, "\n%-56s %6s %9s %11s %8s %7s %7s\n", name, "calls", "us/call", "bytes/call", "GB/s", "% copy",
            "% time");
    for (int i = 0; i < n_row; i++) {
        const struct profile_row *p = &row[i];
        const double rate = p->bytes / p->seconds;
        fprintf(stderr, "%-56s %6d %9.2f", p->name, p->calls, p->seconds / p->calls * 1e6);
        if (p->bytes > 0 && p->seconds > 0)
            fprintf(stderr, " %11.0f %8.1f %7.1f", p->bytes / p->calls, rate * 1e-9, 100 * rate / bandwidth);
        else fprintf(stderr, " %11s %8s %7s", "-", "-", "-");
        fprintf(stderr, " %7.1f\n", 100 * p->seconds / sum);
    }
    fprintf(stderr, "%s: %.1f kernels per layer, %.1f us in kernels, %.1f us %s, gap %.2f us per kernel\n", name,
            (double)calls / s->m->n_layer, sum * 1e6, whole * 1e6, prefill ? "the forward" : "through the graph",
            (whole - sum) * 1e6 / calls);
    free(row);
}

/* A benchmark under way. */
struct bench {
    struct session *s;
    struct rates rates;            /* of the machine */
    int32_t ids[BENCH_PREFILL];    /* what is fed to the model */
    int chunk;                     /* tokens of a prefill */
    double decode0[BENCH_BATCHES]; /* seconds at depth 0, by batch */
    double prefill0;               /* likewise of the prefill */
};

/* Measures and prints the lines of one depth. False: interrupted. */
static bool bench_depth(struct bench *b, int depth) {
    struct session *s = b->s;
    const int n = int_min(s->n_ctx - depth, b->chunk);
    const unsigned long long cache = kv_token_bytes(s->m, s->r->kv_type) * (unsigned long long)depth;
    for (int i = 0; i < BENCH_BATCHES; i++) {
        const int batch = bench_batches[i];
        const bool first = !i;
        const double prefill = first ? bench_forward(s, b->ids, depth, n, 1) : 0;
        const double decode = bench_forward(s, b->ids, depth, batch, batch);
        if (interrupted) return false;
        if (!depth && first) b->prefill0 = prefill;
        if (!depth) b->decode0[i] = decode;
        const double ops = session_forward_ops(s, n), bytes = session_forward_bytes(s, batch);
        printf("%d,", depth);
        if (first) printf("%d", n);
        bench_field(first, n / prefill, 1);
        bench_field(first && b->rates.mma > 0, 100 * ops / prefill / b->rates.mma, 1);
        printf(",%d,%.1f,%llu,%.2f", batch, batch / decode, cache, bytes / decode * 1e-9);
        bench_field(b->rates.bytes > 0, 100 * bytes / decode / b->rates.bytes, 1);
        putchar('\n');
        fflush(stdout);
    }
    return true;
}

/* --bench: prefill of a chunk and decode of a few tokens at each depth. */
static int mode_bench(struct engine *e) {
    const int largest = bench_batches[BENCH_BATCHES - 1];
    struct session *s = &e->session;
    struct bench b = {.s = s, .chunk = int_min(s->r->chunk, BENCH_PREFILL)};
    char name[192];
    if (s->n_ctx < largest)
        die("a context of %d tokens is too small for --bench: expected at least %d", s->n_ctx, largest);
    if (e->set->profile && !s->r->ops->profile) die("--profile works on a GPU only");
    if (e->set->profile && s->pg.n > 1) die("--profile works with one rank: its kernels alone are timed");
    b.rates = session_measure(s);
    note("%s, memory %s at %.1f GB/s", session_name(s, name), s->r->cuda ? "copies" : "reads", b.rates.bytes * 1e-9);
    if (b.rates.mma > 0) note("m16n8k16 at %.1f TFLOP/s", b.rates.mma * 1e-12);
    printf("ctx_tokens,prefill_tokens,prefill_tps,prefill_percent_of_mma,batch,gen_tps,kvcache_bytes,"
           "gen_gb_per_s,gen_percent_of_bandwidth\n");
    bench_ids(s->m, b.ids);
    for (int i = 0; i < BENCH_DEPTHS && bench_depths[i] + largest <= s->n_ctx; i++) {
        bench_fill_cache(s, i ? bench_depths[i - 1] : 0, bench_depths[i]);
        if (!bench_depth(&b, bench_depths[i])) return EXIT_INTERRUPT;
    }
    for (int i = 0; i < BENCH_BATCHES && e->set->profile && !interrupted; i++)
        bench_profile(s, b.ids, bench_batches[i], bench_batches[i], b.decode0[i], b.rates.bytes);
    if (e->set->profile && !interrupted) bench_profile(s, b.ids, b.chunk, 1, b.prefill0, b.rates.bytes);
    return interrupted ? EXIT_INTERRUPT : EXIT_OK;
}

/* ============================================================================================================
 * Doctor
 *
 * Why a machine is slow or fails, in the order in which that is found out: does it start, complete a forward, say what
 * makes sense, do so behind a long context, and is it fast enough? What the kernel and drivers tell of the machine is text
 * from outside: bounded, and printed as ASCII.
 * ============================================================================================================ */

static int engine_start(struct engine *e, bool gpu, char *err);
static void engine_close(struct engine *e);
static void settings_ranks(struct settings *s, const struct model *m, int gpu[MAX_RANKS]);
#ifdef MOE_CUDA
static int gpu_rank_start(struct rank *r, const struct model *shard, void *arg, char *err);
static void nccl_defaults(const int *gpu, int n, bool verbose);
#endif

enum step { STEP_START, STEP_FORWARD, STEP_OUTPUT, STEP_CONTEXT, STEP_SPEED, STEPS };
enum level { LEVEL_OK, LEVEL_NOTE, LEVEL_WARNING, LEVEL_ERROR, LEVELS };

static const char *const step_names[STEPS][2] = {{"starts", "Starts?"},
                                                 {"forward", "Forward completes?"},
                                                 {"output", "Output coherent?"},
                                                 {"context", "Long context coherent?"},
                                                 {"speed", "Fast enough?"}};
static const char *const level_names[LEVELS] = {"ok", "note", "warning", "error"};

enum {
    DOCTOR_FINDINGS = 128, /* that --json reports; all are printed */
    DOCTOR_DEVICES = 8,    /* GPUs that are looked at */
    DOCTOR_COLUMNS = 100,
    FACT_MAX = 4096,       /* bytes of a file of the kernel's */
    BLOCK_SHARED = 101376, /* bytes of shared memory that kernels want for a block */
    ALLREDUCE_SLOW = 50,   /* microseconds of a sum of one token over GPUs, above which it is worth a warning */
    SPEED_PERCENT = 50,    /* of the roofline, below which there is something to find */
    SPEED_LAYER = 10,      /* microseconds of reading a layer, below which launches take a GPU longer */
    DISK_PIECE = 4 << 20,  /* bytes of a read, */
    DISK_MOST = 256 << 20, /* of all at most, */
    DISK_LEAST = 8 << 20,  /* and how many tell a speed; */
    DISK_SECONDS = 3,      /* how long at most */
    LOAD_SECONDS = 120,    /* of loading that are worth a warning */
};

struct finding {
    enum step step;
    enum level level;
    char what[ERR_MAX];
    const char *advice; /* NULL: there is nothing to change */
};

struct doctor {
    struct settings *set;
    enum step step;
    bool open[STEPS]; /* has findings */
    int count[LEVELS];
    struct finding found[DOCTOR_FINDINGS];
    int n;
    char bus[DOCTOR_DEVICES][24]; /* of NVIDIA's devices, as sysfs writes it */
    int n_bus, n_gpu;             /* how many; GPUs that CUDA can use */
    int device[MAX_RANKS];        /* of the ranks */
    double link[DOCTOR_DEVICES];  /* bytes per second of each GPU's, 0: not known */
    double busy;                  /* load average */
    double memory, available;     /* bytes */
};

static const char *doctor_root = ""; /* before /proc, /sys and /dev: tests bring their own */

/* ---- findings ---- */

static void doctor_ascii(char *s) {
    for (; *s; s++)
        if ((uint8_t)*s < 32 || (uint8_t)*s > 126) *s = '?';
}

/* Text behind a head of `indent` columns, broken between words. */
static void doctor_wrap(const char *head, int indent, const char *text) {
    int room = DOCTOR_COLUMNS - indent, n = (int)strlen(text);
    printf("%-*s", indent, head);
    while (n > room) {
        int cut = room;
        while (cut > room / 2 && text[cut] != ' ') cut--;
        if (text[cut] != ' ') cut = room;
        printf("%.*s\n%*s", cut, text, indent, "");
        text += cut, text += *text == ' ', n = (int)strlen(text);
    }
    puts(text);
}

/* Goes on to a step, past others that have found nothing. */
static void doctor_step(struct doctor *d, enum step step) {
    for (; d->step < step; d->step++)
        if (!d->open[d->step] && !d->set->json) printf("%s\n  -        not checked\n", step_names[d->step][1]);
}

__attribute__((format(printf, 4, 5))) static void doctor_find(struct doctor *d, enum level level, const char *advice,
                                                              const char *fmt, ...) {
    struct finding f = {.step = d->step, .level = level, .advice = level == LEVEL_OK ? NULL : advice};
    char head[16];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f.what, sizeof f.what, fmt, ap);
    va_end(ap);
    doctor_ascii(f.what);
    d->count[level]++;
    if (d->n < DOCTOR_FINDINGS) d->found[d->n++] = f;
    if (!d->set->json) {
        if (!d->open[d->step]) puts(step_names[d->step][1]);
        snprintf(head, sizeof head, "  %s", level_names[level]);
        doctor_wrap(head, 11, f.what);
        if (f.advice) doctor_wrap("           -> ", 14, f.advice);
        fflush(stdout);
    }
    d->open[d->step] = true;
}

/* The last line, or the JSON. The exit code. */
static int doctor_end(struct doctor *d) {
    int code = d->count[LEVEL_ERROR] ? EXIT_RUN : EXIT_OK;
    doctor_step(d, STEPS);
    if (!d->set->json) {
        printf("%d errors, %d warnings\n", d->count[LEVEL_ERROR], d->count[LEVEL_WARNING]);
        return code;
    }
    json_t *list = json_array();
    for (int i = 0; i < d->n; i++) {
        const struct finding *f = &d->found[i];
        json_array_append_new(list,
                              json_pack("{s:s,s:s,s:s,s:s}", "step", step_names[f->step][0], "level",
                                        level_names[f->level], "what", f->what, "advice", f->advice ? f->advice : ""));
    }
    json_t *all = json_pack("{s:o,s:i}", "findings", list, "exit", code);
    json_dumpf(all, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(all);
    return code;
}

/* What ends the program in the middle is a finding too. */
static void doctor_dies(void *arg, const char *line) {
    struct doctor *d = arg;
    last_words.run = NULL;
    alloc_guard_end();
    doctor_find(d, LEVEL_ERROR,
                d->step == STEP_START
                    ? "read the message: it names what could not be had"
                    : "run it again with --cpu: if that works, the GPU, its driver or its image is at fault",
                "%s%s", rank_label, line);
    doctor_end(d);
    fflush(stdout);
}

/* ---- facts ---- */

/* A file of the kernel's; "" when there is none. */
__attribute__((format(printf, 2, 3))) static const char *fact(char out[FACT_MAX], const char *fmt, ...) {
    char path[512];
    va_list ap;
    size_t at = (size_t)snprintf(path, sizeof path, "%.200s", doctor_root);
    va_start(ap, fmt);
    vsnprintf(path + at, sizeof path - at, fmt, ap);
    va_end(ap);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd < 0 ? -1 : read(fd, out, FACT_MAX - 1);
    if (fd >= 0) close(fd);
    out[n > 0 ? n : 0] = 0;
    out[strcspn(out, "\r")] = 0;
    return out;
}

static bool fact_exists(const char *path) {
    char full[512];
    snprintf(full, sizeof full, "%.200s%s", doctor_root, path);
    return !access(full, F_OK);
}

/* The number behind a word, in a file; 0: it is not there. */
static double fact_number(const char *text, const char *word) {
    const char *at = strstr(text, word);
    return at ? strtod(at + strlen(word), NULL) : 0;
}

static DIR *fact_dir(const char *path) {
    char full[512];
    snprintf(full, sizeof full, "%.200s%s", doctor_root, path);
    return opendir(full);
}

/* The next entry of a directory, NULL: there is none. */
static struct dirent *fact_entry(DIR *dir) {
    struct dirent *e = NULL;
    while (dir && (e = readdir(dir)) && e->d_name[0] == '.') {}
    return e;
}

/* Display adapters of NVIDIA on the PCI bus. */
static void doctor_bus(struct doctor *d) {
    char text[FACT_MAX];
    DIR *dir = fact_dir("/sys/bus/pci/devices");
    for (struct dirent *e; (e = fact_entry(dir)) && d->n_bus < DOCTOR_DEVICES;) {
        if (strlen(e->d_name) >= sizeof *d->bus || strspn(e->d_name, "0123456789abcdef:.") != strlen(e->d_name) ||
            strncmp(fact(text, "/sys/bus/pci/devices/%s/vendor", e->d_name), "0x10de", 6) ||
            strncmp(fact(text, "/sys/bus/pci/devices/%s/class", e->d_name), "0x03", 4))
            continue;
        strcpy(d->bus[d->n_bus++], e->d_name);
    }
    if (dir) closedir(dir);
}

static bool iommu_active(void) {
    char text[FACT_MAX];
    DIR *dir = fact_dir("/sys/class/iommu");
    bool any = fact_entry(dir) != NULL;
    if (dir) closedir(dir);
    fact(text, "/proc/cmdline");
    return any || strstr(text, "intel_iommu=on") || strstr(text, "amd_iommu=on");
}

/* Generation of a PCIe link by its billions of transfers per second; 0: unknown. */
static int link_generation(double gt) {
    static const double rate[] = {2.5, 5, 8, 16, 32, 64};
    for (int i = 0; i < 6; i++)
        if (gt > 0.9 * rate[i] && gt < 1.1 * rate[i]) return i + 1;
    return 0;
}

/* The PCIe link of a device, which its last copy has woken up. Returns bytes per second, 0: not known. */
static double doctor_link(struct doctor *d, const char *who, const char *bus, size_t memory) {
    static const char *const item[] = {"current_link_width", "max_link_width", "current_link_speed", "max_link_speed"};
    char text[FACT_MAX], path[256], numa[48] = "", bar[48] = "";
    struct stat st;
    double v[4];
    for (int i = 0; i < 4; i++) v[i] = strtod(fact(text, "/sys/bus/pci/devices/%.24s/%s", bus, item[i]), NULL);
    int gen = link_generation(v[2]), gen_max = link_generation(v[3]);
    if (!(v[0] >= 1 && v[0] <= 32 && v[1] >= 1 && v[1] <= 32) || !gen || !gen_max) return 0; /* a virtual machine */
    double rate = v[2] * 1e9 / 8 * v[0] * (gen < 3 ? 0.8 : 128.0 / 130);
    fact(text, "/sys/bus/pci/devices/%.24s/numa_node", bus);
    if (*text >= '0' && *text <= '9') snprintf(numa, sizeof numa, ", NUMA node %d", atoi(text));
    snprintf(path, sizeof path, "%.200s/sys/bus/pci/devices/%.24s/resource1", doctor_root, bus);
    bool sized = !stat(path, &st) && st.st_size > 0;
    if (sized) snprintf(bar, sizeof bar, ", BAR %.2f GiB", (double)st.st_size / 0x1p30);
    bool narrow = v[0] < v[1], small = sized && memory && (double)st.st_size < 0.5 * (double)memory;
    const char *advice = narrow ? "seat the card again, or in a slot with all lanes to the processor; look for shared "
                                  "lanes and bifurcation in the firmware, and for a riser"
                                : "idle links slow down, so look again under load; then at the slot, a riser, and the "
                                  "link speed in the firmware";
    doctor_find(d, narrow ? LEVEL_WARNING : (enum level)(gen < gen_max), advice,
                "%s: PCIe %d.0 x%.0f of at most %d.0 x%.0f, %.1f GB/s%s%s", who, gen, v[0], gen_max, v[1], rate * 1e-9,
                numa, bar);
    if (small)
        doctor_find(d, LEVEL_NOTE, "turn on Resizable BAR and \"above 4G decoding\" in the firmware",
                    "%s: only %.2f GiB of its memory can be reached over PCIe at once", who,
                    (double)st.st_size / 0x1p30);
    return rate;
}

/* ---- the program, GPUs ---- */

static void doctor_build(struct doctor *d) {
#ifdef MOE_CUDA
    char nccl[24];
    doctor_find(d, LEVEL_OK, NULL, "moe %s, CPU: %s; GPU: %s; NCCL: %s", MOE_VERSION, kernels_choose()->name,
                cuda_targets(), nccl_name(nccl));
#else
    bool nvidia = d->n_bus || fact_exists("/proc/driver/nvidia");
    doctor_find(d, LEVEL_OK, NULL, "moe %s, CPU: %s; built without CUDA", MOE_VERSION, kernels_choose()->name);
    if (d->set->gpus)
        doctor_find(d, LEVEL_ERROR, "install the CUDA toolkit (nvcc 12.9 or newer) and build again with make",
                    "--gpus %.80s: this program was built without CUDA", d->set->gpus);
    else if (nvidia)
        doctor_find(d, LEVEL_WARNING, "install the CUDA toolkit (nvcc 12.9 or newer) and build again with make",
                    "there is an NVIDIA GPU, but this program was built without CUDA: it uses the CPU");
    if (!nvidia) doctor_find(d, LEVEL_OK, NULL, "no GPU here: everything runs on the CPU");
    for (int i = 0; i < d->n_bus; i++) doctor_link(d, d->bus[i], d->bus[i], 0);
#endif
}

#ifdef MOE_CUDA
/* CUDA has no GPU. */
static void doctor_no_gpu(struct doctor *d, const char *err) {
    bool driver = fact_exists("/proc/driver/nvidia"), there = d->n_bus || driver;
    const char *advice =
        "see what nvidia-smi says and the kernel's log (dmesg); reboot if the card has fallen off the bus";
    if (fact_exists("/sys/module/nouveau")) advice = "blacklist nouveau, install NVIDIA's driver, reboot";
    else if (!driver) advice = "install NVIDIA's driver, or load it: modprobe nvidia; in a container: --gpus all";
    else if (!fact_exists("/dev/nvidiactl") || !fact_exists("/dev/nvidia0"))
        advice = "there is no /dev/nvidia0: run nvidia-modprobe, or give the container its GPUs (--gpus all)";
    else if (strstr(err, "newer driver")) advice = "install a driver that is as new as the CUDA this was built with";
    if (!there && !d->set->gpus) doctor_find(d, LEVEL_OK, NULL, "no GPU here: everything runs on the CPU (%s)", err);
    else if (!there)
        doctor_find(d, LEVEL_ERROR, "leave --gpus out to run on the CPU", "--gpus %.40s: %s", d->set->gpus, err);
    else doctor_find(d, LEVEL_ERROR, advice, "%s", err);
    for (int i = 0; i < d->n_bus; i++) doctor_link(d, d->bus[i], d->bus[i], 0);
}

static void doctor_gpu(struct doctor *d, int i) {
    struct gpu_facts f;
    char who[16];
    double rate, latency;
    const char *why = cuda_facts(i, &f, true);
    snprintf(who, sizeof who, "GPU %d", i);
    if (why) {
        doctor_find(d, LEVEL_ERROR, "see what nvidia-smi says of it, end what holds it, or leave it out with --gpus",
                    "%s: %s", who, why);
        return;
    }
    const char *image = gpu_image(f.major, f.minor);
    double total = (double)f.total, held = (double)(f.total - f.free);
    if (!i && f.driver < f.runtime)
        doctor_find(d, LEVEL_WARNING, "install a driver that is as new as the CUDA this program was built with",
                    "the driver knows CUDA %d.%d, this program was built with %d.%d", f.driver / 1000,
                    f.driver % 1000 / 10, f.runtime / 1000, f.runtime % 1000 / 10);
    cuda_pair(i, i, &rate, &latency);
    doctor_find(d, LEVEL_OK, NULL,
                "%s: %.63s, capability %d.%d, image %s, CUDA %d.%d, %.1f of %.1f GiB free, copies %.1f GB/s", who,
                f.name, f.major, f.minor, image, f.driver / 1000, f.driver % 1000 / 10, (double)f.free / 0x1p30,
                total / 0x1p30, rate * 1e-9);
    if (f.image[0])
        doctor_find(d, LEVEL_ERROR, "build again with nvcc 12.9 or newer (make clean, make), or install a newer driver",
                    "%s: a kernel does not run: %.159s", who, f.image);
    else if (f.major < 8)
        doctor_find(d, LEVEL_ERROR, "leave it out: --gpus with the numbers of others, or --cpu",
                    "%s: capability %d.%d is too old, at least 8.0 is needed", who, f.major, f.minor);
    else if (f.major == 12 && image[0] == 'P')
        doctor_find(d, LEVEL_WARNING, "build again with nvcc 12.9 or newer (make clean, make)",
                    "%s: this program has no sm_120f image, so its products in FP4 are not used", who);
    if (f.block_shared < BLOCK_SHARED)
        doctor_find(d, LEVEL_ERROR, "leave it out: --gpus with the numbers of others, or --cpu",
                    "%s: a block can have %d bytes of shared memory, kernels need %d", who, f.block_shared,
                    BLOCK_SHARED);
    if (held > 1.5 * 0x1p30 + 0.01 * total)
        doctor_find(d, LEVEL_NOTE, "nvidia-smi lists who holds it; end what is not needed",
                    "%s: other programs hold %.1f GiB of its memory", who, held / 0x1p30);
    for (char *p = f.bus; *p; p++) *p = (char)tolower((unsigned char)*p); /* as sysfs writes it */
    d->link[i] = doctor_link(d, who, f.bus, f.total);
}

static void doctor_pair(struct doctor *d, int a, int b) {
    static const char advice[] =
        "sums of ranks then go through the host: set iommu=pt or turn the IOMMU and ACS off, put "
        "both cards below one root complex; drivers refuse peers to some consumer cards";
    double rate[2], latency[2], link = fmin(d->link[a], d->link[b]);
    bool peers = gpus_peers((const int[]){a, b}, 2);
    cuda_pair(a, b, &rate[0], &latency[0]), cuda_pair(b, a, &rate[1], &latency[1]);
    bool slow = fmin(rate[0], rate[1]) < link / 4;
    doctor_find(d, peers && !slow ? LEVEL_OK : LEVEL_WARNING, advice,
                "GPU %d and %d: %speer access, %.1f and %.1f GB/s, %.1f and %.1f us%s", a, b, peers ? "" : "no ",
                rate[0] * 1e-9, rate[1] * 1e-9, latency[0] * 1e6, latency[1] * 1e6,
                slow ? ", less than a quarter of the link's rate" : "");
}

static void doctor_gpus(struct doctor *d) {
    char err[ERR_MAX] = "";
    setenv("CUDA_MODULE_LOADING", "EAGER", 0); /* see gpu_wanted */
    d->n_gpu = cuda_device_count(err);
    if (!d->n_gpu) {
        doctor_no_gpu(d, err);
        return;
    }
    int n = int_min(d->n_gpu, DOCTOR_DEVICES), ranks = d->set->tp * d->set->pp;
    if (d->n_bus > d->n_gpu)
        doctor_find(d, LEVEL_WARNING, "see what nvidia-smi lists, and CUDA_VISIBLE_DEVICES",
                    "%d NVIDIA GPUs are on the bus, CUDA has %d", d->n_bus, d->n_gpu);
    for (int i = 0; i < n && !interrupted; i++) doctor_gpu(d, i);
    for (int i = 0; i < ranks; i++)
        if (d->device[i] >= d->n_gpu)
            doctor_find(d, LEVEL_ERROR, "numbers begin with 0; give fewer ranks (--tp, --pp) or name GPUs (--gpus)",
                        "rank %d wants GPU %d, found: %d", i, d->device[i], d->n_gpu);
    for (int a = 0; a < n && a < MAX_RANKS; a++)
        for (int b = a + 1; b < n && b < MAX_RANKS && !interrupted; b++) doctor_pair(d, a, b);
}
#endif

/* ---- sums over ranks ---- */

enum { ALLREDUCE_SIZES = 2 };
static const int sum_tokens[ALLREDUCE_SIZES] = {1, 128}; /* of 2,048 floats: 8 KB, 1 MB */
typedef double all_reduce_times[ALLREDUCE_SIZES][2];     /* seconds: our own way, NCCL; 0: there is no such way */

static void rank_all_reduces(struct rank *r, void *arg) {
    all_reduce_times *t = (all_reduce_times *)arg + r->index;
    for (int i = 0; i < ALLREDUCE_SIZES; i++)
        for (int nccl = 0; nccl < 2; nccl++) {
            int runs = i ? 50 : 300;
            (*t)[i][nccl] = 0;
            if (sum_tokens[i] > r->chunk) continue;
#ifdef MOE_CUDA
            if (r->cuda) {
                (*t)[i][nccl] = gpu_all_reduce_seconds(r, sum_tokens[i], nccl);
                continue;
            }
#endif
            if (nccl) continue;
            double t0 = now_seconds();
            r->n_tok = sum_tokens[i];
            for (int k = 0; k < runs; k++) r->ops->all_reduce_add_rmsnorm(r, A_X, A_OUT, r->m->output_norm, A_H);
            (*t)[i][0] = (now_seconds() - t0) / runs;
        }
}

/* Of the slowest rank. */
static void measure_all_reduce(struct session *s, double t[ALLREDUCE_SIZES][2]) {
    all_reduce_times each[MAX_RANKS];
    memset(t, 0, sizeof(all_reduce_times));
    pg_run(&s->pg, rank_all_reduces, each);
    for (int i = 0; i < ALLREDUCE_SIZES; i++)
        for (int k = 0; k < 2; k++)
            for (int r = 0; r < s->pg.n; r++) t[i][k] = fmax(t[i][k], each[r][i][k]);
}

/* n ranks that add up, on one synthetic layer. */
static void doctor_all_reduce(struct doctor *d, bool gpu, int n) {
    struct synth y = synth_parse("qwen3-30b-a3b:layers=1,experts=8");
    struct model m = {0};
    struct session s;
    all_reduce_times t;
    char err[ERR_MAX] = "";
    int failed = 0;
    y.n_head = y.n_head_kv = MAX_RANKS, y.n_ff = 64 * MAX_RANKS, y.n_vocab = 1024; /* what every rank has a part of */
    synth_make(&m, &y, NULL, true);
    if (gpu) {
#ifdef MOE_CUDA
        struct cuda_options o = {.n_ctx = 256, .kv = KV_BF16, .allreduce = d->set->allreduce};
        memcpy(o.device, d->device, sizeof o.device);
        if (o.allreduce != ALLREDUCE_ONESHOT) nccl_defaults(d->device, n, d->set->verbose);
        failed = session_open(&s, &m, n, 1, gpu_rank_start, &o, err);
#endif
    } else
        session_init(
            &s, &m, n, 1,
            (struct cpu_options){.k = kernels_choose(), .n_threads = omp_get_num_procs(), .n_ctx = 256, .kv = KV_BF16});
    if (failed) {
        doctor_find(d, d->set->tp > 1 ? LEVEL_ERROR : LEVEL_WARNING,
                    "try --allreduce oneshot, then --gpus with fewer GPUs; NCCL_DEBUG=INFO makes NCCL tell",
                    "%d ranks cannot start: %s", n, err);
        model_free(&m);
        return;
    }
    measure_all_reduce(&s, t);
    for (int k = 0; k < 2; k++) {
        double best = t[0][0] > 0 && t[0][1] > 0 ? fmin(t[0][0], t[0][1]) : t[0][k];
        bool slow = gpu && best * 1e6 > ALLREDUCE_SLOW;
        if (t[0][k] + t[1][k] <= 0) continue;
        char us[ALLREDUCE_SIZES][24] = {"-", "-"};
        for (int i = 0; i < ALLREDUCE_SIZES; i++)
            if (t[i][k] > 0) snprintf(us[i], sizeof us[i], "%.1f us", t[i][k] * 1e6);
        doctor_find(d, slow ? LEVEL_WARNING : LEVEL_OK,
                    "there are two sums a layer: see what keeps the GPUs from each other above, or use --pp",
                    "a sum over %d ranks on %s%s: 8 KB %s, 1 MB %s", n, gpu ? "GPUs" : "the CPU",
                    !gpu ? ""
                    : k  ? ", NCCL"
                         : ", our own",
                    us[0], us[1]);
    }
    session_free(&s);
    model_free(&m);
}

/* ---- the host ---- */

/* Words in files of the kernel's that say something. */
static const struct {
    const char *path, *word;
    enum level level;
    const char *what, *advice;
} doctor_hints[] = {
    {"/proc/sys/kernel/osrelease", "icrosoft", LEVEL_NOTE,
     "this is WSL2: the GPU works by way of Windows' driver; peer access, pinned memory and disks are slower",
     "keep model files in the Linux file system, raise memory= in .wslconfig; for several GPUs boot Linux"},
    {"/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave", LEVEL_NOTE,
     "the processor's governor is powersave: it may be slow to speed up", "cpupower frequency-set -g performance"},
    {"/sys/kernel/mm/transparent_hugepage/enabled", "[never]", LEVEL_NOTE,
     "transparent huge pages are off: the cache and activations on the CPU are slower to reach",
     "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled, as root"},
};

/* Bytes that the memory of this control group is limited to; 0: it is not. */
static double cgroup_limit(void) {
    char text[FACT_MAX], path[256] = "";
    fact(text, "/proc/self/cgroup");
    const char *own = strstr(text, "0::/");
    if (own) sscanf(own + 3, "%255[^\n]", path);
    if (!*fact(text, "/sys/fs/cgroup%s/memory.max", path) && !*fact(text, "/sys/fs/cgroup/memory.max"))
        fact(text, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
    return strtod(text, NULL); /* "max" is 0 */
}

static void doctor_host(struct doctor *d) {
    char text[FACT_MAX];
    struct rlimit lock = {0, 0};
    int cores = omp_get_num_procs(), threads = d->set->threads ? d->set->threads : cores;
    fact(text, "/proc/meminfo");
    d->memory = fact_number(text, "MemTotal:") * 1024, d->available = fact_number(text, "MemAvailable:") * 1024;
    double swapped = (fact_number(text, "SwapTotal:") - fact_number(text, "SwapFree:")) * 1024, limit = cgroup_limit();
    doctor_find(d, LEVEL_OK, NULL,
                "host: %d processors, %.1f of %.1f GiB of memory available, reads %.1f GB/s with %d threads", cores,
                d->available / 0x1p30, d->memory / 0x1p30, memory_bandwidth(threads) * 1e-9, threads);
    if (kernels_choose() == &kernels_scalar)
        doctor_find(d, LEVEL_WARNING, "use a processor with AVX2 or AVX-512 (x86-64) or dot products (arm64), or a GPU",
                    "no vector instructions of this processor are used: the CPU will be slow");
    if (limit > 0 && limit < d->memory)
        doctor_find(d, LEVEL_NOTE, "raise the limit of the container or the service (--memory, MemoryMax=)",
                    "a control group limits memory to %.1f GiB", limit / 0x1p30);
    if (limit > 0 && limit < d->available) d->available = limit;
    if (swapped > 256 * 0x1p20)
        doctor_find(d, LEVEL_NOTE, "end programs that are not needed, or add memory", "%.1f GiB are swapped out",
                    swapped / 0x1p30);
    for (size_t i = 0; i < sizeof doctor_hints / sizeof *doctor_hints; i++)
        if (strstr(fact(text, "%s", doctor_hints[i].path), doctor_hints[i].word))
            doctor_find(d, doctor_hints[i].level, doctor_hints[i].advice, "%s", doctor_hints[i].what);
    d->busy = strtod(fact(text, "/proc/loadavg"), NULL);
    if (d->busy > 0.5 * cores)
        doctor_find(d, LEVEL_NOTE, "stop other programs and look again",
                    "the load average is %.1f on %d processors: times below are noisy", d->busy, cores);
    int gpus = d->n_gpu > d->n_bus ? d->n_gpu : d->n_bus;
    if (gpus >= 2 && iommu_active())
        doctor_find(d, LEVEL_NOTE,
                    "where peer access is missing or slow: boot with iommu=pt, or turn the IOMMU and ACS off",
                    "the IOMMU is active: copies between GPUs may be redirected through the host");
    if (gpus && fact_exists("/sys/module/nouveau"))
        doctor_find(d, LEVEL_WARNING, "blacklist nouveau, install NVIDIA's driver, reboot",
                    "the kernel module nouveau is loaded: CUDA cannot use a card that it drives");
    if (gpus && !getrlimit(RLIMIT_MEMLOCK, &lock) && lock.rlim_cur < (rlim_t)8 << 20)
        doctor_find(d, LEVEL_NOTE, "ulimit -l unlimited, or LimitMEMLOCK= of the service",
                    "only %llu KiB of memory may be locked: pinned buffers may fail",
                    (unsigned long long)lock.rlim_cur >> 10);
}

/* ---- the file ---- */

/* The name of a file system that is slow to map files from, by its number of statfs; NULL: it is none. */
static const char *slow_files(uint64_t type) {
    static const struct {
        uint32_t type;
        const char *name;
    } slow[] = {{0x6969, "NFS"},      {0xff534d42, "CIFS"},    {0xfe534d42, "SMB"}, {0x01021997, "9p"},
                {0x65735546, "FUSE"}, {0x794c7630, "overlay"}, {0x00c36400, "Ceph"}};
    for (size_t i = 0; i < sizeof slow / sizeof *slow; i++)
        if ((uint32_t)type == slow[i].type) return slow[i].name;
    return NULL;
}

/* Bytes per second of parts of the file that are not in the page cache, read past it; 0: too little to tell. */
static double disk_rate(const char *path) {
    static uint8_t resident[DISK_PIECE / 4096];
    struct stat st;
    double t = 0, done = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT), plain = open(path, O_RDONLY | O_CLOEXEC);
    uint8_t *map = MAP_FAILED, *to = mmap(NULL, DISK_PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (plain >= 0 && !fstat(plain, &st) && st.st_size >= DISK_LEAST)
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, plain, 0);
    if (map != MAP_FAILED && to != MAP_FAILED)
        for (off_t at = 0; at + DISK_PIECE <= st.st_size && done < DISK_MOST && t < DISK_SECONDS && !interrupted;
             at += DISK_PIECE) {
            if (mincore(map + at, DISK_PIECE, resident) || memchr(resident, 1, sizeof resident)) continue;
            double t0 = now_seconds();
            ssize_t n = fd >= 0 ? pread(fd, to, DISK_PIECE, at) : -1;
            if (n < 0) { /* not every file system reads past the cache */
                n = pread(plain, to, DISK_PIECE, at);
                posix_fadvise(plain, at, DISK_PIECE, POSIX_FADV_DONTNEED);
            }
            if (n <= 0) break;
            t += now_seconds() - t0, done += (double)n;
        }
    if (map != MAP_FAILED) munmap(map, (size_t)st.st_size);
    if (to != MAP_FAILED) munmap(to, DISK_PIECE);
    if (fd >= 0) close(fd);
    if (plain >= 0) close(plain);
    return done >= DISK_LEAST ? done / t : 0;
}

/* Size, place and speed of the model's file, before it is loaded. */
static bool doctor_file(struct doctor *d, bool gpu) {
    const char *path = d->set->model;
    char err[ERR_MAX], speed[96] = "", size[32];
    struct statfs fs;
    struct gguf g;
    double bytes = 0, cached = 0;
    if (gguf_open(&g, path, err, ERR_MAX)) {
        doctor_find(d, LEVEL_ERROR,
                    "check the path; a file that is damaged or incomplete: download or convert it again", "%s", err);
        return false;
    }
    for (uint32_t i = 0; i < g.n_images; i++)
        bytes += (double)g.images[i].size, cached += (double)g.images[i].size * image_resident(&g.images[i]);
    gguf_close(&g);
    double rate = disk_rate(path), wait = rate > 0 ? (bytes - cached) / rate : 0;
    if (rate > 0)
        snprintf(speed, sizeof speed, ", the disk reads %.2f GB/s, so that loading takes %.1f s", rate * 1e-9, wait);
    doctor_find(d, wait > LOAD_SECONDS ? LEVEL_WARNING : LEVEL_OK, "copy the file to a local NVMe disk",
                "the file has %s, %.0f %% of it in the page cache%s", with_unit(bytes, size), 100 * cached / bytes,
                speed);
    const char *slow = statfs(path, &fs) ? NULL : slow_files((uint64_t)fs.f_type);
    if (slow)
        doctor_find(d, LEVEL_WARNING, "copy it to a local disk; in a container mount that as a volume",
                    "the file lies on a file system of the kind %s, which is slow to load from", slow);
    if (!gpu && bytes > d->available && d->available > 0)
        doctor_find(d, LEVEL_WARNING, "a smaller or pruned model, more memory, or a GPU that holds it (see --plan)",
                    "the file is larger than the %.1f GiB of memory that are available: every token reads the disk",
                    d->available / 0x1p30);
    return true;
}

/* ---- the model at work ---- */

/* A and B of the smoke test; without a vocabulary a forward alone. False: there is nothing to go on with. */
static bool doctor_answer(struct doctor *d, struct engine *e) {
    static const char broken[] =
        "compare with --cpu-ref: if that is right, try --kv bf16 and --moe-act bf16 and report "
        "it; if not, the file is damaged: convert it again";
    char err[ERR_MAX] = "";
    int32_t id = 0;
    bool finite = true, right = false, mute = !e->model.vocab->n_tokens;
    double seconds, t0 = now_seconds();
    doctor_step(d, STEP_FORWARD);
    if (mute) {
        session_decode(&e->session, id);
        const float *x = session_logits(&e->session);
        for (int i = 0; i < e->model.n_vocab; i++) finite &= isfinite(x[i]) != 0;
        seconds = now_seconds() - t0;
    } else if (smoke_ask(e, &finite, &right, &seconds, err)) {
        if (!interrupted)
            doctor_find(d, LEVEL_ERROR, "read the message; a template can be given with --chat-template-file",
                        "no answer: %s", err);
        return false;
    }
    doctor_find(d, finite ? LEVEL_OK : LEVEL_ERROR, broken, "A: %s in %.2f s, logits %s",
                mute ? "a forward" : "an answer", seconds, finite ? "are finite" : "are not finite");
    doctor_step(d, STEP_OUTPUT);
    if (mute)
        doctor_find(d, LEVEL_NOTE, "a file with a vocabulary, converted by moe-convert",
                    "B and C, questions and answers, are not checked: the model has no vocabulary");
    else
        doctor_find(d, right ? LEVEL_OK : LEVEL_ERROR, broken, "B: 7 squared is %s",
                    right ? "49" : "not answered with 49");
    return true;
}

/* C of the smoke test. */
static void doctor_needle(struct doctor *d, struct engine *e) {
    char err[ERR_MAX] = "";
    int n = smoke_tokens(&e->session), secret;
    double seconds;
    if (!e->model.vocab->n_tokens) return;
    doctor_step(d, STEP_CONTEXT);
    if (n < 64) {
        doctor_find(d, LEVEL_NOTE, "-c 1200", "C: a context of %d tokens is too small for the needle",
                    e->session.n_ctx);
        return;
    }
    int found = needle_run(e, n, 50, &secret, &seconds, err);
    if (interrupted) return;
    if (found < 0) doctor_find(d, LEVEL_ERROR, "read the message; a text can be given with --haystack", "C: %s", err);
    else
        doctor_find(d, found ? LEVEL_OK : LEVEL_ERROR,
                    "try --kv bf16, and --needle N with smaller N; compare with --cpu-ref: if that finds it, report it",
                    "C: a fact in %d tokens is %s, %.2f s", n, found ? "found" : "NOT found", seconds);
}

/* Decoding against what reading alone would take. */
static void doctor_speed(struct doctor *d, struct engine *e) {
    struct session *s = &e->session;
    struct rates each[MAX_RANKS];
    struct plan *p = xcalloc(1, sizeof *p);
    struct plan_layout *v = &p->layout[0];
    int32_t ids[BENCH_PREFILL];
    all_reduce_times sums = {{0}};
    bool gpu = s->r->cuda != NULL;
    double all = 0, reduce = 0;
    doctor_step(d, STEP_SPEED);
    bench_ids(s->m, ids);
    double t = bench_forward(s, ids, 0, 1, 1);
    if (interrupted) {
        free(p);
        return;
    }
    pg_run(&s->pg, rank_measure, each);
    for (int i = 0; i < s->pg.n; i++) all += each[i].bytes;
    if (gpu && s->pg.n_rank > 1) {
        measure_all_reduce(s, sums);
        reduce = sums[0][1] > 0 ? fmin(sums[0][0], sums[0][1]) : sums[0][0];
    }
    /* a CPU's ranks share its memory: one reads what all of them do */
    p->m = s->m, p->cpu = !gpu, p->kv = s->r->kv_type;
    v->tp = gpu ? s->pg.n_rank : 1, v->pp = gpu ? s->pg.n_stage : 1, p->n_device = v->tp * v->pp;
    for (int i = 0; i < p->n_device; i++) {
        p->device[i].rate = gpu ? each[i].bytes : all;
        plan_rank(&v->rank[i], p, s->m, (struct shard){i % v->tp, v->tp, i / v->tp, v->pp});
    }
    double limit = all > 0 ? plan_roofline(p, v, 0, reduce) : 0, percent = limit > 0 ? 100 / t / limit : 0;
    bool small =
        gpu && limit > 0 && 1e6 / limit / s->m->n_layer<SPEED_LAYER, slow = limit> 0 && percent < SPEED_PERCENT;
    const char *advice =
        small ? "this model is too small to judge a GPU by: starting kernels takes longer than reading it"
        : gpu
            ? "in this order: another program on the GPU; its power or heat limit (nvidia-smi -q -d PERFORMANCE); sums "
              "between GPUs, see above; --bench --profile shows the kernels"
        : e->set->cpu_ref ? "leave out --cpu-ref, which is exact and slow"
        : d->busy > 0.5 * omp_get_num_procs()
            ? "stop the other programs that keep the processors busy, or set OMP_WAIT_POLICY=passive and a smaller -t"
            : "try -t with the number of real cores; then the governor, the memory limit and the page cache above";
    if (limit > 0)
        doctor_find(d,
                    !slow   ? LEVEL_OK
                    : small ? LEVEL_NOTE
                            : LEVEL_WARNING,
                    advice, "decode %.1f tok/s: %.*f %% of the %.1f tok/s that reading at %.1f GB/s%s allows", 1 / t,
                    percent<10, percent, limit, all * 1e-9, reduce> 0 ? ", and the sums," : "");
    else
        doctor_find(d, LEVEL_NOTE, "free some memory", "decode %.1f tok/s; there was no memory to measure reading with",
                    1 / t);
    free(p);
}

/* The model of the options, as it would be run. */
static void doctor_model(struct doctor *d, bool gpu) {
    struct engine e = {.set = d->set};
    char err[ERR_MAX] = "", tokens[32], name[192];
    if (d->set->synth) synth_load(&e, gpu);
    else if (!doctor_file(d, gpu)) return;
    else if (model_load(&e.model, d->set->model, err)) {
        doctor_find(d, LEVEL_ERROR, "the README lists the models that run; convert the release again with moe-convert",
                    "%s", err);
        return;
    }
    settings_resolve(d->set, &e.model);
    if (engine_start(&e, gpu, err))
        doctor_find(d, LEVEL_ERROR, "--plan tells what fits; a smaller -c, --kv fp8, more --gpus, or --cpu", "%s", err);
    else {
        doctor_find(d, LEVEL_OK, NULL, "%s is open on %s: %s tokens of context, loaded in %.2f s", e.model.name,
                    session_name(&e.session, name), with_commas((uint64_t)e.session.n_ctx, tokens),
                    e.model.load_seconds);
        if (*e.session.r->link) doctor_find(d, LEVEL_OK, NULL, "%s", e.session.r->link);
        if (doctor_answer(d, &e) && !interrupted) doctor_needle(d, &e);
        if (d->open[STEP_OUTPUT] && !interrupted) doctor_speed(d, &e);
    }
    engine_close(&e);
}

/* All of it, into d. The exit code. */
static int doctor_run(struct doctor *d) {
    struct settings *set = d->set;
    struct model any = {.n_layer = MAX_RANKS};
    if (set->cpu && set->gpus) die_usage("--cpu and --gpus exclude each other");
    for (int i = 0; i < MAX_RANKS; i++) d->device[i] = i;
    settings_ranks(set, &any, d->device);
    set->quiet = true;
    last_words.run = doctor_dies, last_words.arg = d;
    doctor_bus(d);
    doctor_build(d);
#ifdef MOE_CUDA
    if (set->cpu || set->cpu_ref) doctor_find(d, LEVEL_OK, NULL, "GPUs are left out, as asked for");
    else doctor_gpus(d);
#endif
    bool gpu = d->n_gpu > 0;
    if (!interrupted) doctor_host(d);
    int n = set->tp > 1 ? set->tp : !set->gpus && set->pp == 1 ? int_min(d->n_gpu, MAX_RANKS) : 1;
    if (n > 1 && !interrupted) doctor_all_reduce(d, gpu, n);
    if ((set->model || set->synth) && !interrupted) doctor_model(d, gpu);
    else if (!interrupted)
        doctor_find(d, LEVEL_NOTE, "moe --doctor -m FILE", "without a model only the machine is looked at");
    last_words.run = NULL;
    return interrupted ? EXIT_INTERRUPT : doctor_end(d);
}

static int mode_doctor(struct settings *set) {
    struct doctor *d = xcalloc(1, sizeof *d);
    d->set = set;
    int code = doctor_run(d);
    free(d);
    return code;
}

/* ============================================================================================================
 * Main
 *
 * Answers prompts and opens chats; the table of modes; what excludes what; the program from its arguments to its exit
 * code.
 * ============================================================================================================ */

/* Continues a prompt without a template and prints the continuation verbatim. */
static int answer_raw(struct engine *e, const char *text, size_t n) {
    char err[ERR_MAX];
    struct chat c = {.set = e->set, .m = &e->model, .s = &e->session, .rng = settings_seed(e->set)};
    struct turn_stats st = {0};
    enum stop_reason why = STOP_INTERRUPT;
    int32_t *ids = raw_ids(e, text, n, err);
    if (!e->model.vocab->n_tokens) die("'%s' has no vocabulary: only --logits can use it", e->set->model);
    if (!ids) return report(err);
    const enum sync_result r = session_sync(&e->session, ids, (int)arrlen(ids), err);
    arrfree(ids);
    if (r == SYNC_FAILED) return report(err);
    if (r == SYNC_DONE) {
        struct printer p = printer_make(&c, false, true);
        st.n_prompt = e->session.sync_tokens;
        st.prompt_seconds = e->session.sync_seconds;
        why = generate(&c, &p, &st);
        chat_stats_line(&c, &st);
        arrfree(p.text);
    }
    return why == STOP_INTERRUPT ? EXIT_INTERRUPT : EXIT_OK;
}

/* Answers one prompt in a chat of its own. */
static int answer_prompt(struct engine *e, const char *text, size_t n) {
    char err[ERR_MAX];
    struct chat c;
    if (chat_init(&c, e->set, &e->model, &e->session, err)) die("%s", err);
    const enum turn_result r = chat_turn(&c, text, n, err);
    chat_free(&c);
    if (r == TURN_FAILED) return report(err);
    return r == TURN_DONE ? EXIT_OK : EXIT_INTERRUPT;
}

/* --lines: answers every line of stdin. One that fails does not keep the others from being answered. */
static int mode_lines(struct engine *e) {
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int code = EXIT_OK;
    while (code != EXIT_INTERRUPT && (n = getline(&line, &cap, stdin)) >= 0) {
        if (n && line[n - 1] == '\n') n--;
        if (n && line[n - 1] == '\r') n--;
        if (!n) continue;
        const int rc = e->set->raw ? answer_raw(e, line, (size_t)n) : answer_prompt(e, line, (size_t)n);
        if (rc) code = rc;
    }
    free(line);
    return interrupted ? EXIT_INTERRUPT : code;
}

/* The lines that open a chat. */
static void banner(const struct engine *e) {
    const struct model *m = &e->model;
    char a[32], name[192];
    note("%s: %d layers, %d of %d experts per token%s%s", m->name, m->n_layer, m->n_expert_used, m->n_expert_max,
         m->pruned ? ", pruned" : "", m->pruned ? " (min-p and repeat penalty are on unless set)" : "");
    note("%s; context %s tokens, cache %.1f MiB (%s); loaded in %.2f s", session_name(&e->session, name),
         with_commas((uint64_t)e->session.n_ctx, a), (double)session_kv_bytes(&e->session) / 0x1p20,
         kv_names[e->session.r->kv_type], m->load_seconds);
    note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends");
}

/* Opens a chat at the terminal. */
static int answer_chat(struct engine *e) {
    char err[ERR_MAX];
    struct chat c;
    if (chat_init(&c, e->set, &e->model, &e->session, err)) die("%s", err);
    banner(e);
    const int code = repl_run(&c);
    chat_free(&c);
    return code;
}

/* Without a mode: answers --ids or the prompt, or opens a chat when stdin is a terminal. */
static int mode_answer(struct engine *e) {
    const struct settings *set = e->set;
    char *text = NULL;
    if (set->ids) return answer_raw(e, NULL, 0);
    if (!gather_prompt(set, &text)) {
        if (!term.in_tty) die_usage("no prompt: stdin is empty");
        if (set->raw) die_usage("--raw wants a prompt: -p, -f or piped stdin");
        return answer_chat(e);
    }
    const int code = set->raw ? answer_raw(e, text, arrlenu(text)) : answer_prompt(e, text, arrlenu(text));
    arrfree(text);
    return code;
}

/* --plan, for a described machine, GPUs of this one, or its CPU. */
static int run_plan(struct engine *e) {
    struct settings *set = e->set;
    const struct gpu_list list = gpus_parse(set->gpus);
    const bool described = list.gib > 0;
    char err[ERR_MAX];
    if (described && (set->cpu || set->cpu_ref)) die_usage("--cpu and --gpus exclude each other");
    const bool gpu = described || gpu_wanted(set);
    if (set->synth) synth_load(e, true);
    else if (!set->model) die_usage("no model: give -m MODEL.gguf or set MOE_MODEL");
    else if (model_open(&e->model, set->model, true, err)) die("%s", err);
    const int code = mode_plan(&e->model, set, gpu, list.device, described ? 0 : list.n);
    model_free(&e->model);
    return code;
}

static int run_doctor(struct engine *e) { return mode_doctor(e->set); }

/* What must be open before a mode runs. */
enum needs {
    NEEDS_NOTHING, /* it opens what it needs by itself */
    NEEDS_MODEL,   /* what the file says, no session */
    NEEDS_SESSION  /* a model and a session, on a GPU if there is one */
};

/* What the program does instead of answering, when the option of that name is given. */
struct mode {
    const char *option; /* NULL: there is none */
    enum needs needs;
    bool prompt;     /* takes stdin, -p, -f or --ids */
    int default_ctx; /* tokens of context without -c; 0: as for a chat */
    int (*run)(struct engine *e);
};

static const struct mode mode_table[] = {
    {"info", NEEDS_MODEL, .run = mode_info},
    {"plan", NEEDS_NOTHING, .run = run_plan},
    {"tokenize", NEEDS_NOTHING, .run = mode_tokenize},
    {"render", NEEDS_NOTHING, .run = mode_render},
    {"logits", NEEDS_SESSION, .prompt = true, .run = mode_logits},
    {"perplexity", NEEDS_SESSION, .run = mode_perplexity},
    {"needle", NEEDS_SESSION, .run = mode_needle},
    {"smoke", NEEDS_SESSION, .run = mode_smoke},
    {"bench", NEEDS_SESSION, .run = mode_bench},
    {"calibrate", NEEDS_SESSION, .default_ctx = TEXT_WINDOW, .run = mode_calibrate},
    {"compare", NEEDS_NOTHING, .default_ctx = TEXT_WINDOW, .run = mode_compare},
    {"doctor", NEEDS_NOTHING, .run = run_doctor},
    {"lines", NEEDS_SESSION, .run = mode_lines},
    {NULL, NEEDS_SESSION, .prompt = true, .run = mode_answer},
};

enum { N_MODES = sizeof mode_table / sizeof *mode_table };

/* The mode that is asked for. Two, or a mode beside a prompt that it does not take, end the program. */
static const struct mode *mode_find(const struct settings *s) {
    const struct {
        const char *name;
        bool given;
    } prompts[] = {{"-p", s->prompt}, {"-f", s->prompt_file}, {"--ids", s->ids}};
    const struct mode *found = NULL;
    for (int i = 0; i < N_MODES; i++) {
        const struct mode *m = &mode_table[i];
        if (m->option && !option_given(s, option_find(m->option))) continue;
        if (!m->option && found) continue;
        if (found) die_usage("--%s and --%s exclude each other", found->option, m->option);
        found = m;
    }
    for (int i = 0; i < 3; i++)
        if (prompts[i].given && !found->prompt)
            die_usage("--%s and %s exclude each other", found->option, prompts[i].name);
    for (int i = 0; i < 2; i++)
        if (prompts[i].given && s->ids) die_usage("%s and --ids exclude each other", prompts[i].name);
    return found;
}

/* Options that cannot be used together, or without another one, end the program instead of being ignored. */
static void settings_check(const struct settings *s) {
    if (s->system && s->system_file) die_usage("-s and --system-file exclude each other");
    if (s->profile && !s->bench) die_usage("--profile wants --bench");
    if (s->json && !s->plan && !s->doctor) die_usage("--json wants --plan or --doctor");
    if (s->plan && s->synth && s->model) die_usage("--plan wants -m or --synth, not both");
    if (gpus_parse(s->gpus).gib > 0 && !s->plan)
        die_usage("--gpus %s describes a machine, which only --plan takes; to run, give numbers of GPUs", s->gpus);
    if (s->shard && !s->synth) die_usage("--shard works with --synth only");
    if (!s->calibrate != !s->output) die_usage("--calibrate and -o want each other");
    if (s->activations && !s->calibrate) die_usage("--activations wants --calibrate");
    if (s->calibrate && s->synth) die_usage("--calibrate and --synth exclude each other");
    if (s->compare && arrlen(s->compare) != 3)
        die_usage("--compare wants A.gguf B.gguf TEXT, found %d names", (int)arrlen(s->compare));
    if (s->compare && (s->model || s->synth)) die_usage("--compare takes the place of -m and --synth");
    if (s->logits && s->model && same_file(s->logits, s->model)) die("--logits would replace the model '%s'", s->model);
}

/* Replaces --system-file by its text. */
static void settings_read_system(struct settings *s) {
    char err[ERR_MAX], *text = NULL;
    if (!s->system_file) return;
    if (read_file(s->system_file, &text, err)) die("%s", err);
    drop_newline(&text);
    if (message_check("the system message", text, arrlenu(text), err)) die("%s", err);
    s->system = xstrndup(text, arrlenu(text));
    arrfree(text);
}

/* Checks the settings, opens what the mode needs, and runs it. The exit code. */
static int run(struct settings *set) {
    const struct mode *mode = mode_find(set);
    struct engine e = {.set = set};
    settings_check(set);
    settings_read_system(set);
    if (!set->n_ctx) set->n_ctx = mode->default_ctx;
    if (mode->needs == NEEDS_NOTHING) return mode->run(&e);
    if (mode->needs == NEEDS_MODEL) engine_load(&e, set, true);
    else engine_open(&e, set);
    const int code = mode->run(&e);
    engine_close(&e);
    return code;
}

/* --version. */
static int print_version(void) {
    printf("moe %s (CPU: %s; GPU: %s)\n", MOE_VERSION, kernels_choose()->name,
#ifdef MOE_CUDA
           cuda_targets()
#else
           "built without CUDA"
#endif
    );
#ifdef MOE_CUDA
    char nccl[24];
    printf("NCCL: %s\n", nccl_name(nccl));
#endif
    return EXIT_OK;
}

/* The program. The tests include this file and have a main of their own. */
int moe_main(int argc, char **argv) {
    struct settings set;
    int code = EXIT_OK;
    /* a closed standard stream gives and takes nothing; no other file must get its number */
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDONLY);
    setlocale(LC_CTYPE, "C.UTF-8");
    term_init();
    signals_install();
    settings_init(&set);
    options_parse(&set, argc, argv);
    if (set.help) options_help(&set, stdout);
    else if (set.version) code = print_version();
    else code = run(&set);
    settings_free(&set);
    out_flush();
    if (term.out_error) die("cannot write to stdout: %s", strerror(term.out_error));
    return code;
}

#ifndef MOE_NO_MAIN
int main(int argc, char **argv) { return moe_main(argc, argv); }
#endif

#endif /* MOE_TYPES_ONLY */
