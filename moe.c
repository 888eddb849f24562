/* moe - chat with mixture-of-experts language models whose weights are NVFP4, on your own machine.
 *
 * moe.c is the program and its CPU backend; moe_cuda.cu is the CUDA backend, which a build without nvcc leaves out
 * (this program then runs on the CPU alone). gguf_nvfp4.h holds the file format and the number formats. convert/ makes
 * and prunes model files.
 *
 * One turn of a conversation:
 *
 *   messages --template--> text with the origin of every byte --tokenize--> ids --session_sync--> logits
 *   logits --sampler--> id --session_decode--> logits, and so on; each id --detokenize--> printer --> stdout
 *
 *   main > moe_main > run > mode_answer > answer_chat > repl_run > repl_line > repl_send > chat_turn > chat_answer;
 *   chat_answer > session_sync > session_forward > pg_run > rank_run > forward > forward_gqa, forward_mla;
 *   chat_answer > generate > session_sample, session_decode, printer_token
 *
 * One forward pass (forward_gqa, forward_mla) is a straight line over the operations of `struct ops`:
 *
 *   embed; per layer: norm, q/k/v, rotation + cache, attention, wo, all-reduce + add + norm, experts; last all-reduce
 *
 * The logits are a step of their own (session_head), because a prefill wants those of its last token only.
 * With several ranks each runs this line on its shard of the model. An all-reduce follows attention and the
 * feed-forward of each layer, in front of the next norm.
 *
 * Two nouns: `struct model` never changes after loading; `struct session` is one timeline of tokens with its KV state.
 * Memory on the CPU: the mapped model file, state_bytes(m, --kv, -c) and activations for chunks of CHUNK_MAX tokens
 * (cpu_rank_init). On a GPU: packed copies of the weights, the state, and gpu_bytes of activations. A forward allocates
 * nothing.
 *
 * Contents: search for the name of a section. The number is its length in lines, to the nearest ten.
 *
 *  Types
 *   Types: tensors, layers, models                  460  the table of tensors; layer, model, family
 *   Types: operations                               190  the table that every backend fills in; its contract
 *   Types: state, ranks, the GPU backend            350  planes of state; struct rank; cuda_* functions
 *
 *  Foundations
 *   Limits and errors                                80  die and fail: the two classes of errors
 *   Allocation                                      110  xmalloc and its guard; strings; stb_ds
 *   Files, time, text                               280  clock, files, atomic output, UTF-8, random numbers
 *   Terminal                                        130  what stderr may show; control characters made visible
 *   Options of a program                            150  the form of the table of options; values of options
 *   Help and manual page                            190  what --help and --man print
 *   Completion                                      160  scripts for bash and zsh
 *   Progress of a turn                               70  the line that is shown until an answer begins
 *   Terminal: columns and word wrap                 150  columns of text; answers broken between words
 *
 *  Text
 *   Vocabulary: pre-tokenizers                       20  the expressions that cut text into pieces
 *   Vocabulary: tables and loading                  440  tokens and merges of a file, as hash tables
 *   Vocabulary: text to tokens and back             300  BPE; tokens to text
 *   Chat template: values                           450  values; the origin of every byte of text
 *   Chat template: comparing and printing values    300  order, equality, repr, tojson
 *   Chat template: format strings                   180  str.format
 *   Chat template: operators                        300  arithmetic, comparison, subscripts
 *   Chat template: functions on strings             310  filters and methods of strings
 *   Chat template: functions on sequences           370  filters and methods of numbers, sequences, mappings
 *   Chat template: tests, globals, builtins         250  is defined, range, loop, and the one table of all functions
 *   Chat template: lexer                            200  source to tokens
 *   Chat template: parsing expressions              450  tokens to expression trees
 *   Chat template: parsing statements               210  tokens to statement trees
 *   Chat template: rendering                        380  evaluates a tree; what a chat hands to it
 *
 *  Engine
 *   Model: tensors of a file                        300  reads keys and rotations, checks and binds tensors
 *   Model: metadata of families                     160  what each family reads
 *   Model: layers and files                         340  binds layers, checks leftovers, opens files
 *   Shards of a model                               220  what each rank holds
 *   Synthetic models                                480  --synth: shapes of real models with random weights
 *   CPU threads                                     240  the team of a rank: loops, barriers, waiting
 *   CPU kernels                                     130  their interface; formats of activations
 *   CPU kernels: reference                          170  scalar F32: the oracle
 *   CPU kernels: portable vector functions          460  norms, softmax, small F32 matrices, by vector extensions
 *   CPU kernels: GEMM with integer activations      250  panels of weights, 16-bit activations
 *   CPU kernels: GEMM with F32 panels               100  transposed panels of weights, many tokens
 *   CPU kernels: scalar                              80  GEMM for any processor
 *   CPU kernels: AVX2                                90  GEMM for it
 *   CPU kernels: AVX-512 VNNI                       160  GEMM for it
 *   CPU kernels: AMX, BF16 tiles                    280  prefill on tiles
 *   CPU kernels: NEON with dot products              60  GEMM for it
 *   CPU kernels: choice                              90  the best set that the processor has
 *   KV cache                                         60  rows of the cache in BF16, FP8, F32
 *   Ranks                                           300  steps, barriers, all_gather, send and recv, a watchdog
 *   CPU operations                                  340  embedding, norms, all-reduce, linear, rotation
 *   CPU operations: attention                       420  online softmax over the cache; latent attention
 *   CPU operations: gated delta net                 150  linear attention with a recurrent state
 *   CPU operations: feed-forward                    410  router and experts
 *   CPU operations: memory of a rank                130  the table of operations; what a rank allocates
 *   GPU backend                                      40  sizes of a GPU's copy; stubs without CUDA
 *   Families                                        100  the forwards. START HERE
 *   Sampler                                          80  penalty, top-k, top-p, min-p, temperature
 *   Session                                         470  a timeline of tokens: sync, truncation, snapshots, decode
 *   Session: the saved state                        210  the file of /save
 *
 *  Program
 *   Options                                         400  the option table, values and defaults
 *   Command line                                    330  parsing, --MODE --help, checks of what was given together
 *   Keyboard                                        260  bytes of a terminal to keys
 *   Keys during a turn                              110  Ctrl-C and typing ahead while the model works
 *   Chat                                            250  messages, their rendering, their tokens
 *   Chat: generation                                460  an answer on its way to the screen
 *   Chat: saved conversations                       260  /save and /load
 *   Edited text                                     340  the text behind the prompt, what was cut from it
 *   History of texts                                120  texts of former times; undo
 *   Line editor                                     210  drawing and moving in it
 *   Text in another program                          60  files of text; $EDITOR
 *   Line editor: keys                               320  what each key does
 *   REPL commands                                   570  /help, /undo, /save ..
 *   REPL completion                                 130  what Tab puts behind a command
 *   Plan                                            390  --plan: bytes and roofline before anything is loaded
 *   Plan: forecast                                  240  the speed of decode: a fixed time and bytes for each kernel
 *   Plan: the answer                                240  as text and as JSON
 *   Finding a model                                 110  what -m and bare moe say where there is none
 *   Engine                                          200  opens model and session as the settings ask for
 *   Modes: tokenize, render, info, logits           340  small programs beside the chat
 *   Modes: perplexity, needle, smoke                250  what the model can do
 *   Modes: calibrate, compare                        10  convert/calibrate.h
 *   Modes: bench                                    230  speed at several depths and batches
 *   Doctor: report                                  140  --doctor: findings as text and JSON
 *   Doctor: machine                                 370  checks of driver, GPUs and host
 *   Doctor: model                                   330  checks that compute
 *   Modes: prompts and requests                     210  answers beside a dialogue: -p, --lines, --jsonl
 *   Main                                            230  the table of modes, and main
 */
#ifndef MOE_TYPES_ONLY
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fnmatch.h>
#include <float.h>
#include <jansson.h>
#include <limits.h>
#include <locale.h>
#include <poll.h>
#include <setjmp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <utf8proc.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

#include <stddef.h>

#include "gguf_nvfp4.h"

/* ============================================================================================================
 * Types: tensors, layers, models
 *
 * What a model consists of. moe_cuda.cu includes this file with MOE_TYPES_ONLY and sees this section and the next two.
 * convert/common.h includes it with MOE_FOUNDATIONS_ONLY and sees the foundations too: all sections up to
 * "Completion".
 * ============================================================================================================ */

enum {
    ERR_MAX = 512,        /* bytes of a session error message */
    MAX_TOPK = 32,        /* experts used per token */
    MAX_TRAINED = 1 << 28 /* positions that a model was trained for */
};

/* One matrix in the mapped file, or a stack of n_expert of them: of experts, or of heads (wk_b, wv_b). */
struct weight {
    const uint8_t *data; /* (n_expert, n_out, n_in) blocks of `type`; NULL: the model has no such tensor */
    uint32_t type;       /* enum gguf_type */
    int n_in, n_out, n_expert;
    size_t row_bytes, expert_bytes; /* strides */
    /* 0, or of a matrix that is part of another: its rows come in runs of row_run, row_run_bytes apart; the columns of
     * a row in runs of col_run, col_run_bytes apart */
    int row_run, col_run;
    size_t row_run_bytes, col_run_bytes;
    const float *scale;   /* (n_expert) factors of the outputs, or NULL for 1 */
    const float *bias;    /* (n_out) added to the output of a plain matrix, or NULL */
    bool has_input_scale; /* the file was made for 4-bit activations: it has NAME.input_scale */
};

/* Shape of a layer's attention. In a shard n_head and n_head_kv count the rank's own heads. */
struct attn {
    int n_head, n_head_kv; /* query heads; KV heads, each read by n_head / n_head_kv query heads */
    int head_k, head_v;    /* values of one head's key (latent attention: nope + rotated) and of its value */
    int q_lora;            /* latent attention: width of the compressed query; 0: wq makes the query at once */
    int kv_lora;           /* latent attention: width of the latent; 0: grouped-query attention */
    int rope;              /* index in model.ropes */
    int first_head_kv, whole_head_kv; /* shard: the first of its KV heads, and how many the whole model has */
    float scale;                      /* factor of q.k before the softmax */
};

/* Shape of a layer's gated delta net. In a shard n_key and n_value count the rank's own heads. Value heads are in
 * grouped order (Hugging Face's, value head j uses key head j / (n_value / n_key)) or in tiled order (of files of
 * qwen35moe, j uses key head j % n_key). */
struct delta {
    int n_key, n_value; /* heads of queries and keys; heads of values and of the result */
    int head_k, head_v; /* values of a head's key and of its value */
    int n_conv;         /* tokens under the short convolution */
    bool tiled;
    int first_key, whole_key; /* shard: the first of its key heads, and how many the whole model has */
};

/* A rotation of queries and keys by position. */
struct rope {
    int dim;           /* values of a head that are rotated */
    float factor;      /* of cos and sin (YaRN) */
    const float *freq; /* (dim / 2) radians per position */
};
enum { MAX_ROPES = 2 /* on a CPU; a GPU takes one, and no family here has more */ };

/* What a layer is made of. The table of tensors says by these bits which layers have a tensor. */
enum layer_has {
    HAS_GQA = 1 << 0,        /* grouped-query attention */
    HAS_MLA = 1 << 1,        /* multi-head latent attention */
    HAS_Q = 1 << 2,          /* the query is one matmul: GQA, and latent attention without a compressed query */
    HAS_Q_LORA = 1 << 3,     /* the query is compressed first */
    HAS_DENSE_FFN = 1 << 4,  /* one feed-forward for all tokens */
    HAS_EXPERTS = 1 << 5,    /* a router and experts */
    HAS_SHARED = 1 << 6,     /* an expert that every token uses */
    HAS_HEAD_NORM = 1 << 7,  /* the heads of queries and keys are normed */
    HAS_PREDICTION = 1 << 8, /* a multi-token-prediction layer, which only the converter and moe-reap look at */
    HAS_ATTENTION = 1 << 9,  /* attention over a cache, grouped-query or latent */
    HAS_Q_GATE = 1 << 10,    /* wq has a row of gates after each head's query: they scale the head's result */
    HAS_DELTA = 1 << 11,     /* a gated delta net in place of attention */
    HAS_DELTA_AB = 1 << 12,  /* whose decay and beta have a matrix each, */
    HAS_DELTA_BA = 1 << 13,  /* or one for both */
    HAS_FFN_NORM = 1 << 14,  /* the norm before the feed-forward is called ffn_norm, */
    HAS_POST_NORM = 1 << 15  /* or post_attention_norm */
};

struct layer {
    uint32_t has; /* bits of enum layer_has */
    struct attn attn;
    const float *attn_norm, *ffn_norm; /* (n_embd) */
    struct weight wo;                  /* (n_embd, n_head * head_v) */
    /* grouped-query attention; wq also in latent attention without a compressed query */
    struct weight wq;             /* (n_head * head_k, n_embd) */
    struct weight wk;             /* (n_head_kv * head_k, n_embd) */
    struct weight wv;             /* (n_head_kv * head_v, n_embd) */
    const float *q_norm, *k_norm; /* (head_k) */
    /* multi-head latent attention */
    struct weight wq_a, wq_b;          /* (q_lora, n_embd), (n_head * head_k, q_lora) */
    struct weight wkv_a;               /* (kv_lora + rope dim, n_embd) */
    struct weight wk_b, wv_b;          /* n_head of (kv_lora, head_k - rope dim), n_head of (head_v, kv_lora) */
    const float *q_a_norm, *kv_a_norm; /* (q_lora), (kv_lora) */
    /* gated delta net; wq, wk (n_key * head_k, n_embd), wv (n_value * head_v, n_embd), wo (n_embd, n_value * head_v) */
    struct delta delta;
    struct weight wz;              /* (n_value * head_v, n_embd) gates of the result */
    struct weight w_alpha, w_beta; /* (n_value, n_embd) */
    const float *conv;             /* (whole model's n_key * head_k twice + n_value * head_v, n_conv) */
    const float *decay, *dt_bias;  /* (whole model's n_value): -exp(A_log); added to alpha */
    const float *delta_norm;       /* (head_v) */
    /* feed-forward: dense when n_expert is 0 */
    int n_expert;                          /* routed experts of this layer; pruning makes it differ between layers */
    int n_expert_used;                     /* of them per token */
    int n_ff, n_ff_shared;                 /* hidden width of an expert or dense feed-forward; of the shared expert */
    struct weight router;                  /* (n_expert, n_embd) */
    const float *router_bias;              /* (n_expert), added for the selection only; NULL: none */
    struct weight gate, up, down;          /* (n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff), each n_expert times */
    struct weight sh_gate, sh_up, sh_down; /* the shared expert, of width n_ff_shared */
    const float *sh_weight;                /* (n_embd) sigmoid(sh_weight x) scales the shared expert; NULL: 1 */
    const int32_t *retained; /* (n_expert) ids that the experts had before pruning, ascending; NULL: not recorded */
};

/* Sizes that the shapes of a layer's tensors are made of; layer_dim gives their values. */
enum dim {
    DIM_ONE,
    DIM_EMBD,    /* n_embd */
    DIM_2_EMBD,  /* 2 n_embd */
    DIM_VOCAB,   /* n_vocab */
    DIM_Q,       /* n_head * head_k; with HAS_Q_GATE twice that */
    DIM_K,       /* n_head_kv * head_k */
    DIM_V,       /* n_head_kv * head_v */
    DIM_ATT,     /* n_head * head_v */
    DIM_HEADS,   /* n_head */
    DIM_HEAD_K,  /* head_k */
    DIM_HEAD_V,  /* head_v */
    DIM_NOPE,    /* head_k without its rotated values */
    DIM_Q_LORA,  /* q_lora */
    DIM_KV_LORA, /* kv_lora */
    DIM_KV_A,    /* kv_lora + rotated values */
    DIM_EXPERTS, /* n_expert */
    DIM_FF,      /* n_ff */
    DIM_SHARED,  /* n_ff_shared */
    /* of a gated delta net */
    DIM_CONV,       /* n_conv */
    DIM_KEY,        /* n_key * head_k */
    DIM_VALUES,     /* n_value */
    DIM_VALUE,      /* n_value * head_v */
    DIM_VALUE_HEAD, /* head_v */
    DIM_MIX,        /* 2 n_key * head_k + n_value * head_v */
    DIM_BA,         /* 2 n_value */
    DIM_COUNT
};

enum tensor_kind {
    TENSOR_MATRIX, /* struct weight: NAME.weight (in, out, n), with NAME.scale and NAME.input_scale where they exist */
    TENSOR_ROUTER, /* the same; a GPU keeps it in BF16 or F32 */
    TENSOR_VECTOR  /* const float *: NAME (in, out), F32, F16 or BF16 */
};

/* One tensor of a layer. Binding, sharding, upload, plan, roofline, synthetic models, --calibrate and the converter
 * walk this table. Tensor parallelism divides a tensor along one dimension at most (dim_range). A row without a name is
 * a part of the NOT_BOUND row before it, which loader_fused cuts up. The embedding, the output and its norm belong to
 * no layer and are in struct model. */
struct tensor_rule {
    const char *name; /* GGUF: blk.N.NAME, of a matrix without ".weight"; NULL: a part of the row before */
    const char *hf;   /* model.layers.N.HF of Hugging Face checkpoints, without ".weight"; NULL: made from others */
    uint16_t field;   /* offset in struct layer; NOT_BOUND: the engine does not use it as it is */
    uint8_t kind;     /* enum tensor_kind */
    uint8_t in, out;  /* enum dim: values of a row, rows; of a vector its length and DIM_ONE */
    uint8_t n;        /* enum dim: matrices in the stack */
    uint16_t when;    /* bits of enum layer_has that a layer must all have */
    bool optional;
};
enum { NOT_BOUND = UINT16_MAX };

#define MATRIX(name, hf, field, in, out, n, when) \
    { name, hf, offsetof(struct layer, field), TENSOR_MATRIX, DIM_##in, DIM_##out, DIM_##n, when, false }
#define VECTOR(name, hf, field, in, when) \
    { name, hf, offsetof(struct layer, field), TENSOR_VECTOR, DIM_##in, DIM_ONE, DIM_ONE, when, false }
#define OPTIONAL(name, hf, field, in, when) \
    { name, hf, offsetof(struct layer, field), TENSOR_VECTOR, DIM_##in, DIM_ONE, DIM_ONE, when, true }
/* clang-format off */
static const struct tensor_rule tensor_rules[] = {
    VECTOR("attn_norm.weight",      "input_layernorm",              attn_norm,   EMBD,              0),
    MATRIX("attn_q_a",              "self_attn.q_a_proj",           wq_a,        EMBD,    Q_LORA,   ONE,     HAS_Q_LORA),
    VECTOR("attn_q_a_norm.weight",  "self_attn.q_a_layernorm",      q_a_norm,    Q_LORA,            HAS_Q_LORA),
    MATRIX("attn_q_b",              "self_attn.q_b_proj",           wq_b,        Q_LORA,  Q,        ONE,     HAS_Q_LORA),
    MATRIX("attn_q",                "self_attn.q_proj",             wq,          EMBD,    Q,        ONE,     HAS_Q),
    MATRIX("attn_kv_a_mqa",         "self_attn.kv_a_proj_with_mqa", wkv_a,       EMBD,    KV_A,     ONE,     HAS_MLA),
    VECTOR("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm",     kv_a_norm,   KV_LORA,           HAS_MLA),
    MATRIX("attn_k_b",              NULL,                           wk_b,        NOPE,    KV_LORA,  HEADS,   HAS_MLA),
    MATRIX("attn_v_b",              NULL,                           wv_b,        KV_LORA, HEAD_V,   HEADS,   HAS_MLA),
    MATRIX("attn_k",                "self_attn.k_proj",             wk,          EMBD,    K,        ONE,     HAS_GQA),
    MATRIX("attn_v",                "self_attn.v_proj",             wv,          EMBD,    V,        ONE,     HAS_GQA),
    OPTIONAL("attn_q.bias",         NULL,                           wq.bias,     Q,                 HAS_GQA),
    OPTIONAL("attn_k.bias",         NULL,                           wk.bias,     K,                 HAS_GQA),
    OPTIONAL("attn_v.bias",         NULL,                           wv.bias,     V,                 HAS_GQA),
    VECTOR("attn_q_norm.weight",    "self_attn.q_norm",             q_norm,      HEAD_K,            HAS_HEAD_NORM),
    VECTOR("attn_k_norm.weight",    "self_attn.k_norm",             k_norm,      HEAD_K,            HAS_HEAD_NORM),
    MATRIX("attn_output",           "self_attn.o_proj",             wo,          ATT,     EMBD,     ONE,     HAS_ATTENTION),
    {"attn_qkv", "linear_attn.in_proj_qkv", NOT_BOUND, TENSOR_MATRIX, DIM_EMBD, DIM_MIX, DIM_ONE, HAS_DELTA, false},
    MATRIX(NULL,                    NULL,                           wq,          EMBD,    KEY,      ONE,     HAS_DELTA),
    MATRIX(NULL,                    NULL,                           wk,          EMBD,    KEY,      ONE,     HAS_DELTA),
    MATRIX(NULL,                    NULL,                           wv,          EMBD,    VALUE,    ONE,     HAS_DELTA),
    MATRIX("attn_gate",             "linear_attn.in_proj_z",        wz,          EMBD,    VALUE,    ONE,     HAS_DELTA),
    MATRIX("ssm_alpha",             "linear_attn.in_proj_a",        w_alpha,     EMBD,    VALUES,   ONE,     HAS_DELTA_AB),
    MATRIX("ssm_beta",              "linear_attn.in_proj_b",        w_beta,      EMBD,    VALUES,   ONE,     HAS_DELTA_AB),
    {"ssm_ba", "linear_attn.in_proj_ba", NOT_BOUND, TENSOR_MATRIX, DIM_EMBD, DIM_BA, DIM_ONE, HAS_DELTA_BA, false},
    MATRIX(NULL,                    NULL,                           w_alpha,     EMBD,    VALUES,   ONE,     HAS_DELTA_BA),
    MATRIX(NULL,                    NULL,                           w_beta,      EMBD,    VALUES,   ONE,     HAS_DELTA_BA),
    {"ssm_conv1d.weight", "linear_attn.conv1d", offsetof(struct layer, conv), TENSOR_VECTOR, DIM_CONV, DIM_MIX, DIM_ONE, HAS_DELTA, false},
    VECTOR("ssm_a",                 "linear_attn.A_log",            decay,       VALUES,            HAS_DELTA),
    VECTOR("ssm_dt.bias",           "linear_attn.dt_bias",          dt_bias,     VALUES,            HAS_DELTA),
    VECTOR("ssm_norm.weight",       "linear_attn.norm",             delta_norm,  VALUE_HEAD,        HAS_DELTA),
    MATRIX("ssm_out",               "linear_attn.out_proj",         wo,          VALUE,   EMBD,     ONE,     HAS_DELTA),
    VECTOR("ffn_norm.weight",       "post_attention_layernorm",     ffn_norm,    EMBD,              HAS_FFN_NORM),
    VECTOR("post_attention_norm.weight", "post_attention_layernorm", ffn_norm,   EMBD,              HAS_POST_NORM),
    MATRIX("ffn_gate",              "mlp.gate_proj",                gate,        EMBD,    FF,       ONE,     HAS_DENSE_FFN),
    MATRIX("ffn_up",                "mlp.up_proj",                  up,          EMBD,    FF,       ONE,     HAS_DENSE_FFN),
    MATRIX("ffn_down",              "mlp.down_proj",                down,        FF,      EMBD,     ONE,     HAS_DENSE_FFN),
    {"ffn_gate_inp", "mlp.gate", offsetof(struct layer, router), TENSOR_ROUTER, DIM_EMBD, DIM_EXPERTS, DIM_ONE, HAS_EXPERTS, false},
    OPTIONAL("exp_probs_b.bias",    "mlp.gate.e_score_correction_bias", router_bias, EXPERTS,       HAS_EXPERTS),
    MATRIX("ffn_gate_exps",         "mlp.experts.*.gate_proj",      gate,        EMBD,    FF,       EXPERTS, HAS_EXPERTS),
    MATRIX("ffn_up_exps",           "mlp.experts.*.up_proj",        up,          EMBD,    FF,       EXPERTS, HAS_EXPERTS),
    MATRIX("ffn_down_exps",         "mlp.experts.*.down_proj",      down,        FF,      EMBD,     EXPERTS, HAS_EXPERTS),
    MATRIX("ffn_gate_shexp",        "mlp.shared_experts.gate_proj", sh_gate,     EMBD,    SHARED,   ONE,     HAS_SHARED),
    MATRIX("ffn_up_shexp",          "mlp.shared_experts.up_proj",   sh_up,       EMBD,    SHARED,   ONE,     HAS_SHARED),
    MATRIX("ffn_down_shexp",        "mlp.shared_experts.down_proj", sh_down,     SHARED,  EMBD,     ONE,     HAS_SHARED),
    OPTIONAL("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate", sh_weight,   EMBD,              HAS_SHARED),
    {"nextn.enorm.weight",            "enorm",            NOT_BOUND, TENSOR_VECTOR, DIM_EMBD,   DIM_ONE,   DIM_ONE, HAS_PREDICTION, false},
    {"nextn.hnorm.weight",            "hnorm",            NOT_BOUND, TENSOR_VECTOR, DIM_EMBD,   DIM_ONE,   DIM_ONE, HAS_PREDICTION, false},
    {"nextn.eh_proj",                 "eh_proj",          NOT_BOUND, TENSOR_MATRIX, DIM_2_EMBD, DIM_EMBD,  DIM_ONE, HAS_PREDICTION, false},
    {"nextn.shared_head_norm.weight", "shared_head.norm", NOT_BOUND, TENSOR_VECTOR, DIM_EMBD,   DIM_ONE,   DIM_ONE, HAS_PREDICTION, false},
    {"nextn.shared_head_head",        "shared_head.head", NOT_BOUND, TENSOR_MATRIX, DIM_EMBD,   DIM_VOCAB, DIM_ONE, HAS_PREDICTION, true},
    {"nextn.embed_tokens",            "embed_tokens",     NOT_BOUND, TENSOR_MATRIX, DIM_EMBD,   DIM_VOCAB, DIM_ONE, HAS_PREDICTION, true},
};
/* clang-format on */
#undef MATRIX
#undef VECTOR
#undef OPTIONAL
enum { TENSOR_RULES = sizeof tensor_rules / sizeof *tensor_rules };

static inline struct weight *rule_weight(const struct tensor_rule *rule, const struct layer *layer) {
    return (struct weight *)(uintptr_t)((const uint8_t *)layer + rule->field);
}

static inline const float **rule_vector(const struct tensor_rule *rule, const struct layer *layer) {
    return (const float **)(uintptr_t)((const uint8_t *)layer + rule->field);
}

/* The range of each number in the metadata of an architecture (ARCH.key). moe-convert writes no others. */
static const struct key_range {
    const char *key;
    double lo, hi;
} key_ranges[] = {{"attention.layer_norm_rms_epsilon", 0, 1},
                  {"attention.temperature_scale", 0, 1e6},
                  {"expert_weights_scale", 0, 1e6},
                  {"rope.freq_base", 1, 1e12},
                  {"rope.scaling.attn_factor", 0, 1e3},
                  {"rope.scaling.factor", 0, 1e6},
                  {"rope.scaling.yarn_beta_fast", 0, 1e6},
                  {"rope.scaling.yarn_beta_slow", 0, 1e6},
                  {"rope.scaling.yarn_log_multiplier", 0, 10},
                  /* not supported: nothing but the neutral value */
                  {"rope.scale_linear", 1, 1},
                  {"rope.scaling.yarn_ext_factor", 0, 1}};

/* Returns the range of a key, which is in the table. */
static inline const struct key_range *key_range_of(const char *key) {
    const struct key_range *r = key_ranges;
    while (strcmp(r->key, key)) r++;
    return r;
}

/* Whether the row's field is a struct weight. */
static inline bool rule_is_weight(const struct tensor_rule *rule) {
    return rule->kind != TENSOR_VECTOR && rule->field != NOT_BOUND;
}

/* Returns the layer's next tensor after `rule` (NULL: the first one), or NULL. Optional tensors are among them: their
 * field may be NULL. */
static inline const struct tensor_rule *rule_next(const struct tensor_rule *rule, const struct layer *layer) {
    for (rule = rule ? rule + 1 : tensor_rules; rule < tensor_rules + TENSOR_RULES; rule++)
        if ((rule->when & layer->has) == rule->when) return rule;
    return NULL;
}

/* Whether a token reads only those matrices of the stack whose experts it has chosen. */
static inline bool rule_routed(const struct tensor_rule *rule) { return rule->n == DIM_EXPERTS; }

enum gating { GATING_SOFTMAX = 1, GATING_SIGMOID = 2 }; /* values of the metadata key */

/* What a rank holds of a model: rank `rank` of the n_rank that divide every layer of a stage (tensor parallelism), in
 * pipeline stage `stage` of n_stage, each of which has consecutive layers. */
struct shard {
    int rank, n_rank, stage, n_stage;
};

enum { MAX_RANKS = 4 /* of all stages together */, ALL_GATHER_MAX = 256 /* bytes */ };

/* Largest sizes over the layers of a model or shard: what buffers are made for. */
struct maxima {
    int n_head, head_k, head_v, q_lora, kv_lora, rope_dim;
    int q, k, v, att;                         /* values of all heads: queries, keys, values, attention's result */
    int values, z, mix;                       /* delta net: value heads, their values, values under the convolution */
    int n_expert_used;                        /* per token */
    int n_ff_dense, n_ff_expert, n_ff_shared; /* hidden widths; 0: no layer has such a feed-forward */
    bool sh_weight;                           /* whether a layer scales its shared expert */
};

/* A whole file, or one rank's shard of it. In a shard the layers, their heads and widths, output.n_out and max are the
 * rank's own; all other sizes are the model's. */
struct model {
    struct shard shard;
    int first_layer, first_id; /* shard: of the model's layers, of the rows of output */
    struct gguf gguf;
    struct vocab *vocab; /* never NULL after binding; n_tokens 0: the file has none */
    const struct family *family;
    char name[128];
    int n_layer;     /* without the multi-token-prediction layers */
    int n_mtp_layer; /* present in the file, not bound */
    int n_embd, n_vocab, n_ctx_train;
    int n_ids; /* tokens that may be chosen: padding rows of the embedding are not */
    float rms_eps;
    struct rope ropes[MAX_ROPES];
    int n_rope;
    struct maxima max;
    int n_expert_max;          /* expert_count of the file; a pruned layer may have fewer */
    int n_group, n_group_used; /* routing groups; 1: no grouping */
    enum gating gating;
    bool norm_topk_prob; /* the chosen experts' weights are divided by their sum */
    float routed_scaling_factor;
    bool pruned;                /* the file says that experts were removed */
    int n_expert_original;      /* before pruning, 0 if not recorded */
    struct weight embd, output; /* (n_vocab, n_embd) */
    const float *output_norm;   /* (n_embd) */
    struct layer *layers;       /* (n_layer) */
    uint64_t file_bytes;        /* of all split files; 0 for synthetic weights */
    bool synthetic;             /* matrices are addresses without contents: a GPU repacks synthetic rows */
    uint64_t hash;              /* identifies the file to saved sessions */
    void **owned;               /* stb_ds: what model_free frees */
    double load_seconds;
};

struct loader;
struct rank;
struct plane;

/* A family of models: one architecture name of GGUF and what belongs to it. */
struct family {
    const char *arch;    /* general.architecture */
    enum gating gating;  /* the router's function where the file does not name it */
    bool norm_topk_prob; /* whether the chosen experts' weights are divided by their sum where the file does not say */
    /* Reads the metadata of attention, and what is this family's alone. */
    void (*read)(struct loader *l);
    /* Says what layer il is made of and the shape of its attention. */
    void (*layer)(struct loader *l, struct layer *layer, int il);
    /* Writes the operations of one forward pass: the batch's tokens to hidden rows. */
    void (*forward)(struct rank *r);
    /* Adds planes to those of attention, whose own stay as they are: its operations index them by position. GPUs refuse
     * families with this function. NULL: there are none. */
    void (*planes)(const struct model *m, const struct layer *layer, struct plane *out);
};

static inline int layer_rope_dim(const struct model *m, const struct layer *layer) {
    return m->ropes[layer->attn.rope].dim;
}

/* Width of the values of a layer's keys that are not rotated (latent attention). */
static inline int layer_nope(const struct model *m, const struct layer *layer) {
    return layer->attn.head_k - layer_rope_dim(m, layer);
}

/* The value of a dimension in a layer. */
static inline int layer_dim(const struct model *m, const struct layer *layer, enum dim dim) {
    const struct attn *a = &layer->attn;
    const struct delta *d = &layer->delta;
    switch (dim) {
    case DIM_ONE: return 1;
    case DIM_EMBD: return m->n_embd;
    case DIM_2_EMBD: return 2 * m->n_embd;
    case DIM_VOCAB: return m->n_vocab;
    case DIM_Q: return a->n_head * a->head_k * (layer->has & HAS_Q_GATE ? 2 : 1);
    case DIM_K: return a->n_head_kv * a->head_k;
    case DIM_V: return a->n_head_kv * a->head_v;
    case DIM_ATT: return a->n_head * a->head_v;
    case DIM_HEADS: return a->n_head;
    case DIM_HEAD_K: return a->head_k;
    case DIM_HEAD_V: return a->head_v;
    case DIM_NOPE: return layer_nope(m, layer);
    case DIM_Q_LORA: return a->q_lora;
    case DIM_KV_LORA: return a->kv_lora;
    case DIM_KV_A: return a->kv_lora + layer_rope_dim(m, layer);
    case DIM_EXPERTS: return layer->n_expert;
    case DIM_FF: return layer->n_ff;
    case DIM_SHARED: return layer->n_ff_shared;
    case DIM_CONV: return d->n_conv;
    case DIM_KEY: return d->n_key * d->head_k;
    case DIM_VALUES: return d->n_value;
    case DIM_VALUE: return d->n_value * d->head_v;
    case DIM_VALUE_HEAD: return d->head_v;
    case DIM_MIX: return 2 * d->n_key * d->head_k + d->n_value * d->head_v;
    case DIM_BA: return 2 * d->n_value;
    case DIM_COUNT: break;
    }
    return 0;
}

/* Floats of a vector that a rank holds. A gated delta net finds its heads in the whole model's vectors. */
static inline size_t rule_floats(const struct tensor_rule *rule, const struct model *m, const struct layer *layer) {
    struct layer whole = *layer;
    struct delta *d = &whole.delta;
    if (d->n_key) {
        d->n_value = d->n_value / d->n_key * d->whole_key;
        d->n_key = d->whole_key;
    }
    return (size_t)layer_dim(m, &whole, (enum dim)rule->in) * (size_t)layer_dim(m, &whole, (enum dim)rule->out);
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

/* What is collected of every routed expert (REAP, arXiv 2510.13999, equation 6): f is its output for a token, g its
 * weight where those of all experts of the token add up to 1. */
enum expert_stat {
    STAT_TOKENS,       /* that chose it */
    STAT_WEIGHTED,     /* sum of g |f| */
    STAT_WEIGHTED_MAX, /* largest g |f| */
    STAT_NORM,         /* sum of |f| */
    STAT_GATE,         /* sum of g */
    STATS
};

/* Floats of in_sum2 for a feed-forward, the sums of squares of its inputs by column: (n_expert, gate->n_in) of gate and
 * up, then (n_expert, down->n_in) of down. */
static inline size_t ffn_in_sum2(const struct ffn_weights *n) {
    return (size_t)n->gate->n_expert * ((size_t)n->gate->n_in + (size_t)n->down->n_in);
}

/* Floats of in_sum2 for all layers before il. Within a layer the feed-forwards stand in the order of layer_ffns. */
static inline size_t in_sum2_before(const struct model *m, int il) {
    size_t n = 0;
    struct ffn_weights ffns[2];
    for (int i = 0; i < il; i++)
        for (int k = layer_ffns(&m->layers[i], ffns); k-- > 0;) n += ffn_in_sum2(&ffns[k]);
    return n;
}

/* Expected number of different experts that n tokens use if they choose independently. */
static inline double experts_expected(const struct layer *layer, int n) {
    double none = 1;
    for (int i = 0; i < n; i++) none *= 1 - (double)layer->n_expert_used / layer->n_expert;
    return layer->n_expert * (1 - none);
}

/* ============================================================================================================
 * Types: operations
 *
 * A forward pass is a straight line of coarse operations from the table `struct ops`; each backend fills in one table.
 * The contract, which graph capture, tensor-parallel ranks and the kernel emulator depend on:
 *   - an operation of ENQUEUE_OPS returns nothing. On a GPU it enqueues work and does not wait (except that ranks which
 *     share a GPU may wait for each other in an all-reduce); on a CPU the work is done when it returns;
 *   - a forward never branches on data;
 *   - activations are named slots (enum act) whose memory and number format are the backend's; only rows
 *     0..n_tok-1 of a slot mean anything;
 *   - tokens, positions and lengths live in the rank's batch, in the backend's memory;
 *   - there are no globals: everything is reached through struct rank;
 *   - the same n_tok gives the same list of operations.
 * ============================================================================================================ */

/* The slots of activations. */
enum act {
    A_X,     /* (n_tok, n_embd) the residual stream */
    A_H,     /* (n_tok, n_embd) its norm */
    A_OUT,   /* (n_tok, n_embd) the output of attention or feed-forward, which is added to it */
    A_QA,    /* (n_tok, q_lora) MLA: the low-rank query */
    A_Q,     /* (n_tok, n_head * head_k) queries */
    A_K,     /* (n_tok, n_head_kv * head_k) keys; MLA: (n_tok, kv_lora + rope_dim) latent and shared key */
    A_V,     /* (n_tok, n_head_kv * head_v) values */
    A_ATT,   /* (n_tok, n_head * head_v) outputs of the heads */
    A_Z,     /* (n_tok, n_value * head_v) delta net: gates of the result */
    A_ALPHA, /* (n_tok, n_value) delta net: inputs of the decay, */
    A_BETA,  /* (n_tok, n_value) and of beta */
    ACT_COUNT
};

enum { LINEAR_MAX = 6 /* matrices of a layer's projections */ };

/* The matrices that a layer multiplies its first norm by, and where their results go; behind them NULL. */
static inline void layer_projections(const struct layer *l, const struct weight *w[LINEAR_MAX + 1],
                                     enum act out[LINEAR_MAX]) {
    const bool mla = l->has & HAS_MLA, low_rank = l->has & HAS_Q_LORA;
    const struct weight *const latent[2] = {&l->wkv_a, low_rank ? &l->wq_a : &l->wq};
    const enum act latent_out[2] = {A_K, low_rank ? A_QA : A_Q};
    const struct weight *const heads[LINEAR_MAX] = {&l->wq, &l->wk, &l->wv, &l->wz, &l->w_alpha, &l->w_beta};
    const enum act heads_out[LINEAR_MAX] = {A_Q, A_K, A_V, A_Z, A_ALPHA, A_BETA};
    const int n = mla ? 2 : l->has & HAS_DELTA ? 6 : 3;
    for (int i = 0; i < n; i++) {
        w[i] = mla ? latent[i] : heads[i];
        out[i] = mla ? latent_out[i] : heads_out[i];
    }
    w[n] = NULL;
}

/* How a token is chosen; the options of the same names. */
struct sampling {
    bool greedy; /* the best token; temp <= 0 means the same */
    float temp, top_p, min_p, repeat_penalty;
    int top_k; /* 0: off */
};

enum {
    PENALTY_WINDOW = 64, /* latest tokens that the repeat penalty looks at */
    TOKEN_CHOSEN = -1    /* in place of an id: the token that `sample` chose on the device */
};

/* A token that may be chosen. */
struct candidate {
    float logit;
    int32_t id;
};

/* What a device can do, measured; 0: not measured. */
struct rates {
    double bytes;   /* bytes per second that a CPU reads, or that a GPU copies, reads and writes counted */
    double mma;     /* multiplications and additions per second of m16n8k16 with halves and F32 sums */
    double nominal; /* not measured: bytes per second that a GPU says it reads */
};

/* A kernel of a forward and its logits: one launch, or all launches with matrices of one shape. */
struct profile_row {
    char name[80];  /* the kernel and what it works on */
    int calls;      /* launches */
    double seconds; /* of all of them */
    double bytes;   /* that all of them move; 0: negligible */
    double fixed;   /* seconds of all of them beside moving bytes, by the forecast; 0: it does not know them */
};

/* The operations, each written once as X(return type, name, parameters, arguments). struct ops, the tables cpu_ops and
 * cuda_ops (of functions cpu_NAME and cuda_NAME) and the wrappers of the tests are generated from these lists, so none
 * of them can miss an operation. clang-format is off: it would read `type *name` as a multiplication. */
/* clang-format off */

/* Operations that only enqueue work. */
#define ENQUEUE_OPS(X)                                                                                                 \
    /* x = the token embeddings of the batch; on a later pipeline stage waits for the hidden states of the one before. \
       Also computes cos and sin of the batch's positions */                                                           \
    X(void, embed, (struct rank *r, enum act x), (r, x))                                                               \
    /* x += the deltas of the stage's ranks, added in rank order: the same bits on each (delta ACT_COUNT: none); then  \
       norm(x) times the matrices of layer_projections of layer il. Overwrites A_H */                                  \
    X(void, projections, (struct rank *r, int il, enum act x, enum act delta), (r, il, x, delta))                      \
    /* x = norm(x) * norm; out = W x */                                                                                \
    X(void, norm_linear, (struct rank *r, enum act x, const float *norm, const struct weight *w, enum act out),        \
      (r, x, norm, w, out))                                                                                            \
    /* out = W x */                                                                                                    \
    X(void, linear, (struct rank *r, const struct weight *w, enum act x, enum act out), (r, w, x, out))                \
    /* out = grouped-query attention over the cache of layer il: norms the heads of q and k, rotates them, value i     \
       against i + rope dim / 2, writes k and v to the cache, and with HAS_Q_GATE multiplies the result by the         \
       sigmoid of the gates that stand in q after each head's query. Overwrites q and k */                             \
    X(void, attention, (struct rank *r, int il, enum act q, enum act k, enum act v, enum act out),                     \
      (r, il, q, k, v, out))                                                                                           \
    /* out = gated delta net of layer il over A_Q, A_K, A_V (before the convolution), A_ALPHA, A_BETA, gated by A_Z;   \
       takes the tokens that the layer's state lacks into it, see session_forward */                                   \
    X(void, delta_net, (struct rank *r, int il, enum act out), (r, il, out))                                           \
    /* out = multi-head latent attention (MLA) over the cache of layer il: norms the latent in kv, rotates, and        \
       writes the latent and the shared key to the cache. Overwrites q and kv */                                       \
    X(void, mla_attention, (struct rank *r, int il, enum act q, enum act kv, enum act out), (r, il, q, kv, out))       \
    /* x += the deltas as in projections; out = the feed-forward of layer il of norm(x): dense SwiGLU, or router,      \
       routed experts and shared expert. Overwrites A_H */                                                             \
    X(void, norm_ffn, (struct rank *r, int il, enum act x, enum act delta, enum act out), (r, il, x, delta, out))      \
    /* x += the deltas as in projections; then x is sent to the next pipeline stage, if there is one */                \
    X(void, final_reduce, (struct rank *r, enum act x, enum act delta), (r, x, delta))                                 \
    /* final norm and output matrix of rows first..first+n-1 on every rank of the last stage; the root gathers them */ \
    X(void, logits, (struct rank *r, int first, int n), (r, first, n))                                                 \
    /* chooses a token by row 0 of the logits; recent: the n_recent latest ids; uniform: a draw from [0, 1) */         \
    X(void, sample, (struct rank *r, const struct sampling *o, const int32_t *recent, int n_recent, double uniform),   \
      (r, o, recent, n_recent, uniform))

/* Operations around a forward, and those that wait and return results. */
#define HOST_OPS(X)                                                                                                    \
    /* runs the family's forward on the rank's batch; or, on a GPU, a recording of an earlier one of as many tokens;   \
       on a CPU every thread of the rank runs it */                                                                    \
    X(void, forward, (struct rank *r), (r))                                                                            \
    /* (n_vocab) logits of row first + row; waits */                                                                   \
    X(const float *, read_logits, (struct rank *r, int row), (r, row))                                                 \
    /* the token that `sample` chose; waits for the choice alone. *on_device: whether the device has it, too, and a    \
       forward of TOKEN_CHOSEN was right */                                                                            \
    X(int32_t, read_token, (struct rank *r, bool *on_device), (r, on_device))                                          \
    /* copies rows first..first+n-1 of a plane to host memory, or back (store): data (n, row_bytes) and scale          \
       (n, n_group), NULL: not this one; waits */                                                                      \
    X(void, plane_copy, (struct rank *r, const struct plane *p, size_t first, size_t n, uint8_t *data, float *scale,   \
                      bool store), (r, p, first, n, data, scale, store))                                               \
    /* waits for everything that was enqueued */                                                                       \
    X(void, wait, (struct rank *r), (r))                                                                               \
    /* copies the statistics since the start, see struct rank; in_sum2 NULL: not these; waits */                       \
    X(void, read_stats, (struct rank *r, double *stats, float *in_sum2), (r, stats, in_sum2))                          \
    /* measures memory and matrix units; waits */                                                                      \
    X(struct rates, measure, (struct rank *r), (r))                                                                    \
    /* seconds of an all-reduce with its norm for n_tok tokens, by NCCL or by our own kernel; the ranks of a stage     \
       call it together; 0: this way does not exist here, or n_tok exceeds the chunk; waits */                         \
    X(double, time_all_reduce, (struct rank *r, int n_tok, bool nccl), (r, n_tok, nccl))                               \
    /* times every kernel of the forward body(arg); returns how many of the n rows it filled, in the order of the      \
       launches; 0: the backend cannot; waits */                                                                       \
    X(int, profile, (struct rank *r, void (*body)(void *), void *arg, struct profile_row *rows, int n),                \
      (r, body, arg, rows, n))                                                                                         \
    /* frees what the rank holds */                                                                                    \
    X(void, close, (struct rank *r), (r))
/* clang-format on */
#define OPS(X) ENQUEUE_OPS(X) HOST_OPS(X)

/* A forward has two all-reduces per layer. Returns what the i-th follows. */
enum { ALL_REDUCES_PER_LAYER = 2 };
static inline const char *all_reduce_after(unsigned i) {
    return i % ALL_REDUCES_PER_LAYER ? "feed-forward" : "attention";
}

struct ops {
#define OPS_MEMBER(type, name, params, args) type(*name) params;
    OPS(OPS_MEMBER)
#undef OPS_MEMBER
};

enum {
    CHUNK_MAX = 512,   /* tokens of one forward on a CPU */
    LOGIT_ROWS = 16,   /* rows of one logits operation */
    LATENT_GROUP = 128 /* latents under one FP8 scale */
};

enum kv_type { KV_BF16, KV_FP8, KV_F32 };

/* Returns the first matrix of which the shard holds nothing, and its layer in *layer (-1: the output); NULL: it holds
 * something of each, as the GPU's kernels need. */
static inline const struct weight *shard_gap(const struct model *m, int *layer) {
    *layer = -1;
    if (m->output.data && (!m->output.n_out || !m->output.n_in)) return &m->output;
    for (*layer = 0; *layer < m->n_layer; ++*layer)
        for (const struct tensor_rule *rule = rule_next(NULL, &m->layers[*layer]); rule;
             rule = rule_next(rule, &m->layers[*layer])) {
            const struct weight *w = rule_is_weight(rule) ? rule_weight(rule, &m->layers[*layer]) : NULL;
            if (w && w->data && (!w->n_out || !w->n_in || !w->n_expert)) return w;
        }
    return NULL;
}

/* ============================================================================================================
 * Types: state, ranks, the GPU backend
 *
 * A layer's state is a list of planes: the KV cache, and the state of recurrent layers. Allocation, plan, save, load,
 * truncation and bench iterate over it. The families here have planes of kind PLANE_TOKENS only; tests/t_state.h has a
 * family with all kinds. A rank is one worker with its shard, its planes and its activations.
 * ============================================================================================================ */

/* How the rows of a plane follow the timeline. */
enum plane_kind {
    PLANE_TOKENS, /* a row for every token */
    PLANE_BLOCKS, /* a row for every `ratio` tokens, once they are complete */
    PLANE_RING, /* the latest n_row tokens: token p is row p % n_row; n_row >= window + the tokens that a forward writes
                   * before it reads */
    PLANE_STATE /* n_row rows that stand for all tokens before struct rank's state_pos */
};

/* What a plane of a layer holds. */
enum plane_use {
    PLANE_K,      /* GQA: keys; MLA: normed latents; delta net: q and k before the convolution */
    PLANE_V,      /* GQA: values; MLA: the rotated key that all heads share; delta net: v before the convolution */
    PLANE_RECENT, /* a ring of what a recurrent state has not absorbed yet; delta net: alpha and beta */
    PLANE_POOL,   /* blocks: pooled rows */
    PLANE_SUM,    /* a recurrent state */
    PLANE_USES
};

/* One array of a layer's state, the same on every backend, because saved sessions record it. FP8 rows carry one F32
 * scale per `group` values, in an array of their own. A shard holds values first .. first + width - 1 of the whole row,
 * which has `whole`; ranks with all of it have first 0. */
struct plane {
    uint8_t *data; /* (plane_rows, row_bytes) */
    float *scale;  /* (plane_rows, n_group); FP8 only */
    enum kv_type type;
    int width, group, n_group; /* values per row (0: the layer has no such plane), per scale; scales per row */
    size_t row_bytes;          /* a multiple of 16 */
    enum plane_kind kind;
    int ratio, n_row; /* blocks: tokens of a row; ring, state: rows */
    int window;       /* ring: rows before its first token that a forward reads */
    int n_run;        /* the whole row is n_run runs of whole / n_run values; a shard has width / n_run of each, */
    int first, whole; /* from value `first` of a run on */
};

static inline struct plane plane_make(enum kv_type type, int width, int group) {
    struct plane p;
    memset(&p, 0, sizeof p);
    p.type = type;
    p.width = p.whole = width;
    p.n_run = 1;
    p.group = group;
    p.n_group = (width + group - 1) / group;
    p.row_bytes = ((size_t)width * (type == KV_F32 ? 4 : type == KV_BF16 ? 2 : 1) + 15) / 16 * 16;
    return p;
}

enum {
    DECODE_MAX_TOKENS = 16,     /* tokens of a decode forward at most */
    MAX_LAG = DECODE_MAX_TOKENS /* tokens by which recurrent states may lag behind the timeline */
};

/* A plane of F32 whose row has n_run runs of `per_key` values for each key head. */
static inline struct plane delta_plane(const struct delta *d, enum plane_kind kind, int n_row, int n_run, int per_key) {
    struct plane p = plane_make(KV_F32, n_run * d->n_key * per_key, 1);
    p.kind = kind;
    p.n_row = n_row;
    p.n_run = n_run;
    p.first = d->first_key * per_key;
    p.whole = n_run * d->whole_key * per_key;
    return p;
}

/* The planes of a gated delta net: rings of the convolution's inputs and of alpha and beta, and the state, for each
 * value head (head_k, head_v). A ring holds the tokens under the convolution before the first that lags, those that
 * lag, and those of a decode forward. */
static inline void delta_planes(const struct delta *d, struct plane out[PLANE_USES]) {
    const int group = d->n_key ? d->n_value / d->n_key : 0; /* value heads of a key head */
    const int run = d->tiled ? group : 1, per_run = d->tiled ? 1 : group;
    const int n_row = d->n_conv - 1 + 2 * MAX_LAG;
    out[PLANE_K] = delta_plane(d, PLANE_RING, n_row, 2, d->head_k);
    out[PLANE_V] = delta_plane(d, PLANE_RING, n_row, run, per_run * d->head_v);
    out[PLANE_RECENT] = delta_plane(d, PLANE_RING, n_row, 2 * run, per_run);
    for (int u = PLANE_K; u <= PLANE_RECENT; u++) out[u].window = d->n_conv - 1;
    out[PLANE_SUM] = delta_plane(d, PLANE_STATE, 1, run, per_run * d->head_k * d->head_v);
}

/* The planes of a layer, without memory. */
static inline void layer_planes(const struct model *m, const struct layer *layer, enum kv_type type,
                                struct plane out[PLANE_USES]) {
    const struct attn *a = &layer->attn;
    memset(out, 0, PLANE_USES * sizeof *out);
    if (layer->has & HAS_MLA) {
        const int rope = layer_rope_dim(m, layer);
        out[PLANE_K] = plane_make(type, a->kv_lora, LATENT_GROUP);
        out[PLANE_V] = plane_make(type == KV_F32 ? KV_F32 : KV_BF16, rope, rope);
    } else if (layer->has & HAS_DELTA) {
        delta_planes(&layer->delta, out);
    } else {
        out[PLANE_K] = plane_make(type, a->n_head_kv * a->head_k, a->head_k);
        out[PLANE_V] = plane_make(type, a->n_head_kv * a->head_v, a->head_v);
        out[PLANE_K].first = a->first_head_kv * a->head_k;
        out[PLANE_V].first = a->first_head_kv * a->head_v;
        out[PLANE_K].whole = a->whole_head_kv * a->head_k;
        out[PLANE_V].whole = a->whole_head_kv * a->head_v;
    }
    if (m->family->planes) m->family->planes(m, layer, out);
}

/* Rows of a plane for contexts of n_ctx tokens. */
static inline size_t plane_rows(const struct plane *p, size_t n_ctx) {
    if (!p->width) return 0;
    return p->kind == PLANE_TOKENS ? n_ctx : p->kind == PLANE_BLOCKS ? n_ctx / (size_t)p->ratio : (size_t)p->n_row;
}

/* Rows in use after n tokens. */
static inline size_t plane_used(const struct plane *p, size_t n) {
    const size_t rows = plane_rows(p, n);
    return p->kind == PLANE_RING && n < rows ? n : rows;
}

/* Bytes of a row's scales. */
static inline size_t plane_scale_bytes(const struct plane *p) {
    return p->type == KV_FP8 ? (size_t)p->n_group * sizeof(float) : 0;
}

/* Bytes of all planes of all layers for contexts of n_ctx tokens. */
static inline size_t state_bytes(const struct model *m, enum kv_type type, size_t n_ctx) {
    struct plane planes[PLANE_USES];
    size_t bytes = 0;
    for (int il = 0; il < m->n_layer; il++) {
        layer_planes(m, &m->layers[il], type, planes);
        for (int u = 0; u < PLANE_USES; u++)
            bytes += plane_rows(&planes[u], n_ctx) * (planes[u].row_bytes + plane_scale_bytes(&planes[u]));
    }
    return bytes;
}

/* The most tokens of context, up to `most` or a smaller multiple of 256, whose state takes at most so many bytes. */
static inline int context_fit(const struct model *m, enum kv_type kv, uint64_t bytes, int most) {
    if (state_bytes(m, kv, (size_t)most) <= bytes) return most;
    int lo = 0, hi = (most - 1) / 256; /* multiples of 256: lo fits */
    while (lo < hi) {
        const int mid = (lo + hi + 1) / 2;
        if (state_bytes(m, kv, (size_t)mid * 256) <= bytes) lo = mid;
        else hi = mid - 1;
    }
    return lo * 256;
}

/* Whether a plane does not keep a row per token, so that going back needs a copy of it. */
static inline bool plane_is_snapshot(const struct plane *p) {
    return p->width && (p->kind == PLANE_RING || p->kind == PLANE_STATE);
}

/* Bytes of a snapshot of a model's rings and recurrent states. */
static inline size_t snapshot_bytes(const struct model *m, enum kv_type type) {
    struct plane planes[PLANE_USES];
    size_t bytes = 0;
    for (int il = 0; il < m->n_layer; il++) {
        layer_planes(m, &m->layers[il], type, planes);
        for (int u = 0; u < PLANE_USES; u++)
            if (plane_is_snapshot(&planes[u]))
                bytes += (size_t)planes[u].n_row * (planes[u].row_bytes + plane_scale_bytes(&planes[u]));
    }
    return bytes;
}

/* Bytes of a layer's planes that a forward of one token at position n_past reads; a recurrent state counts twice,
 * because it is written too. */
static inline double layer_state_reads(const struct model *m, const struct layer *layer, enum kv_type type,
                                       size_t n_past) {
    struct plane planes[PLANE_USES];
    double bytes = 0;
    layer_planes(m, layer, type, planes);
    for (int u = 0; u < PLANE_USES; u++) {
        const struct plane *p = &planes[u];
        const size_t rows = p->kind == PLANE_RING ? (size_t)p->window : plane_used(p, n_past);
        bytes += (double)(rows * (p->row_bytes + plane_scale_bytes(p))) * (p->kind == PLANE_STATE ? 2 : 1);
    }
    return bytes;
}

/* The same of all layers. */
static inline double state_reads(const struct model *m, enum kv_type type, size_t n_past) {
    double bytes = 0;
    for (int il = 0; il < m->n_layer; il++) bytes += layer_state_reads(m, &m->layers[il], type, n_past);
    return bytes;
}

/* Values of a row of every activation, for the widest layer. */
static inline void act_widths(const struct model *m, int width[ACT_COUNT]) {
    width[A_X] = width[A_H] = width[A_OUT] = m->n_embd;
    width[A_QA] = m->max.q_lora;
    width[A_Q] = m->max.q;
    width[A_K] = m->max.k;
    width[A_V] = m->max.v;
    width[A_ATT] = m->max.att;
    width[A_Z] = m->max.z;
    width[A_ALPHA] = width[A_BETA] = m->max.values;
}

/* What one rank computes with. Sized at start; nothing is allocated afterwards. */
struct rank {
    const struct model *m;    /* its shard of the model */
    const struct ops *ops;    /* its backend; NULL: it has not started */
    struct process_group *pg; /* the ranks of the session; NULL: it is alone */
    int index;                /* among all ranks: stage * n_rank + rank */
    char name[128];           /* what it runs on */
    char link[224];           /* GPU: how all-reduces and stages are connected, for the start line; empty: one rank */

    /* the batch of a forward */
    int n_tok;             /* tokens */
    int32_t pos;           /* position of the first */
    int32_t state_pos;     /* tokens that recurrent states have absorbed; PLANE_RECENT holds those from it to pos */
    int32_t *tokens;       /* (chunk) ids; the only one may be TOKEN_CHOSEN, see goes_ahead */
    bool goes_ahead;       /* a forward of the token that `sample` is about to choose can be enqueued behind it */
    unsigned n_all_reduce; /* all-reduces of this forward that have begun */

    /* memory; "the backend's" is the device's on a GPU */
    int n_ctx, chunk;      /* tokens of context, and of one forward at most */
    int width[ACT_COUNT];  /* values per row of a slot */
    float *act[ACT_COUNT]; /* (chunk, width) the slots in F32, the backend's; GPU: NULL where a slot has no such form */
    enum kv_type kv_type;
    struct plane (*planes)[PLANE_USES]; /* (n_layer) in the backend's memory; width 0: the layer has none */
    double *stats;  /* (n_layer, n_expert_max, STATS) statistics of experts, the backend's; NULL: not collected */
    float *in_sum2; /* (in_sum2_before(m, n_layer)) sums of squared inputs, the backend's; NULL: not collected */
    struct candidate *work; /* (n_ids) scratch of the sampler, the host's */
    void **owned;           /* stb_ds: allocations in the backend's memory */
    size_t bytes;           /* of activations */
    size_t kv_bytes;        /* of all planes */
    size_t weight_bytes;    /* GPU: of its copy of the weights */
    size_t free_bytes;      /* GPU: that are left after the start */

    struct cuda *cuda; /* the rest of a GPU's, see moe_cuda.cu; NULL: the rank is on the CPU */

    /* the rest of a CPU's */
    const struct kernels *k;                /* the kernels for its instruction set */
    struct team *team;                      /* its threads; NULL: the caller is the only one */
    float *cos[MAX_ROPES], *sin[MAX_ROPES]; /* (chunk, rope dim / 2) of the batch's positions, for each rotation */
    uint8_t *pack;                          /* packed inputs: 2 * chunk rows, or MLA absorbed: one per token and head */
    uint8_t *pack_h;                        /* packed hidden rows of the feed-forward */
    float *hidden;                          /* hidden rows of the feed-forward, one after the other */
    float *route;                           /* (chunk, n_expert_max) router logits */
    int32_t *route_id;                      /* (chunk, n_expert_used) the chosen experts, */
    float *route_w;                         /* (chunk, n_expert_used) and their weights */
    struct ffn_job *jobs;                   /* (n_expert_max + 1), of which n_jobs are used */
    int n_jobs;
    int32_t *job_rows; /* (chunk * n_expert_used) tokens of the jobs */
    float *job_w;      /* (chunk * n_expert_used) weights of their results */
    float *shared_w;   /* (chunk) weights of the shared expert */
    float *mix;        /* (chunk + MAX_LAG, 2 K + V) delta net: q, k, v after the convolution */
    float **taps;      /* (n_layer) of layers with a delta net: the taps of its convolution, see delta_taps */
    float *decay_beta; /* (chunk + MAX_LAG, 2 n_value) delta net: logarithms of the decay, and beta */
    float *norm_parts; /* with stats: (tiles of an expert's output, chunk * n_expert_used) squared norm of each tile */
    float *q_absorbed; /* MLA absorbed: (n, n_head, kv_lora + rope_dim), and the latent outputs */
    float *partials;   /* partial results of a partitioned context */
    float *logits;     /* (LOGIT_ROWS, n_vocab) */
    int32_t chosen;    /* the token of `sample` */
    uint8_t *scratch;  /* (n_threads, scratch_bytes) of each thread */
    size_t scratch_bytes; /* a multiple of 4096 */
};

/* Activations of the routed experts in prefill on a GPU. */
enum moe_act {
    MOE_ACT_AUTO, /* FP4 where the file was made for that and the GPU can, otherwise halves */
    MOE_ACT_F16,  /* always halves */
    MOE_ACT_FP4   /* always FP4 */
};

/* Who does the all-reduces over GPUs. NCCL, unless ONESHOT is asked for, does those of more than 16 tokens. */
enum allreduce {
    ALLREDUCE_AUTO,   /* up to 16 tokens the faster one, measured at the start */
    ALLREDUCE_NCCL,   /* NCCL for any number of tokens */
    ALLREDUCE_ONESHOT /* our own kernel, k_add_norm<DELTA_PUSHED> */
};

/* How the ranks of a session start on GPUs. */
struct cuda_options {
    int device[MAX_RANKS]; /* the GPU of each rank */
    int n_ctx;             /* tokens; 0: the trained length, or what fits */
    enum allreduce allreduce;
    int kv_splits; /* splits of the context in decode at most; 0: as many as fill the GPU */
    enum moe_act moe_act;
    enum kv_type kv;
    bool stats, in_sum2;                         /* collect these statistics */
    size_t reserve;                              /* bytes of each GPU to leave free */
    void (*progress)(double done, double total); /* told of rank 0's upload, in bytes; NULL: nobody wants to know */
};

/* What a GPU is. */
struct gpu_facts {
    char name[64], bus[24]; /* as the driver calls it; its place on the bus */
    char label[128];        /* number, name, chip and memory, for messages */
    int major, minor;       /* compute capability */
    int driver, runtime;    /* CUDA's versions, 1000 * major + 10 * minor */
    int block_shared;       /* bytes of shared memory that a block can have */
    int n_sm;               /* multiprocessors */
    size_t total, free;     /* bytes of memory */
    bool integrated;        /* it is the host's memory: cached pages of files count as free */
    double rate;            /* bytes that it reads per second; 0: it does not tell */
    int l2;                 /* bytes of its second-level cache */
    const char *image;      /* which of the program's images it runs: sm_120f, sm_90, or "PTX for .." */
    char kernel_error[160]; /* probed: why no kernel of this program runs on it; empty: they do */
};

#ifdef __cplusplus
extern "C" {
#endif
/* The functions of moe_cuda.cu besides its operations. Without CUDA they are stubs, see the section "GPU backend". */

/* How many GPUs can be used; 0: none, and err (ERR_MAX) says why. */
int cuda_device_count(char *err);
/* Asks a GPU what it is; probe: and runs a kernel on it. NULL, or why it cannot be asked. */
const char *cuda_facts(int device, struct gpu_facts *f, bool probe);
/* Whether all n GPUs can write to each other's memory, and NCCL_P2P_DISABLE does not forbid it. */
bool cuda_peers(const int *device, int n);
/* Times writes from one GPU to another, or within one: bytes per second of large copies, seconds of a small one; 0: not
 * measured. */
void cuda_pair(int from, int to, double *rate, double *latency);
/* NCCL's version, 10000 * major + 100 * minor + patch; 0: the program was built without it. */
int cuda_nccl_version(void);
/* The chips that the program was built for; NULL: it was built without CUDA. */
const char *cuda_targets(void);
/* The rank_starter of a GPU; opts is a struct cuda_options. */
int cuda_rank_start(struct rank *r, const struct model *shard, const void *opts, char *err);

/* The functions of moe.c that moe_cuda.cu calls. */

/* Ends the program with one line. */
__attribute__((noreturn)) void rank_fatal(const char *what);
/* Prints a remark on a line of its own. */
void rank_note(const char *what);
/* Copies mine (bytes) of each of the n ranks of all stages to all (n, bytes) of every rank; bytes <= ALL_GATHER_MAX.
 * All ranks call it, and it waits for all of them: it is a barrier, too. */
void rank_all_gather(struct rank *r, const void *mine, void *all, size_t bytes);
/* Tells the watchdog that r is alive while it waits for its GPU; failed: tells the other ranks that r has failed.
 * Returns whether any rank has failed: then what r waits for may never come. */
bool rank_heartbeat(struct rank *r, bool failed);
/* Seconds of a clock that never goes back. */
double now_seconds(void);
/* Bytes of the host's memory that can be taken without swapping. */
uint64_t rank_host_memory(void);
/* Chooses a token on the host, for choices that the GPU leaves to it; see the section "Sampler". */
int32_t sampling_choose(const struct sampling *o, struct candidate *work, int n, const float *logits,
                        const int32_t *recent, int n_recent, double uniform);
/* Fills rows of a type with synthetic weights; vector: of a norm. */
void synth_fill(uint8_t *p, uint64_t bytes, uint32_t type, bool vector, uint64_t *rng);
#ifdef __cplusplus
}
#endif

#ifndef MOE_TYPES_ONLY

/* ============================================================================================================
 * Limits and errors
 *
 * There are two classes of errors. A start-up error ends the program (die): one line on stderr names the file or
 * option, what was expected and what was found; the exit code is 1, or 2 for wrong usage. A session error is returned
 * (fail): the function returns -1 and writes one line to `char err[ERR_MAX]`; its caller rolls back and goes on.
 * ============================================================================================================ */

#define MOE_VERSION "0.1.0"
#ifndef PROGRAM
#define PROGRAM "moe" /* the name before messages; the converters define theirs */
#endif

enum exit_code { EXIT_OK = 0, EXIT_RUN = 1, EXIT_USAGE = 2, EXIT_INTERRUPT = 130 };

/* Number of SIGINTs that nothing has reacted to yet. Polled after every token and after every chunk of a prefill. */
static atomic_int interrupted;

static void term_restore(void);
static void temp_remove(void);
static void message_sanitize(char *s);
static void status_end(void);

static _Thread_local char rank_label[32]; /* "rank 1 of 4: " in a thread of a process group of several, else "" */
static bool ranks_at_work;                /* threads of several ranks run, which may never end: leave by _exit() */

/* Gets the fatal message before it is printed, so that --doctor can finish its report. Must not call die(). */
static struct {
    void (*run)(void *arg, const char *line);
    void *arg;
} last_words;

/* Prints a message on a line of its own on stderr, behind the name of the program. */
__attribute__((format(printf, 1, 2))) static void message_print(const char *fmt, ...) {
    char line[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    message_sanitize(line);
    status_end();
    fprintf(stderr, PROGRAM ": %s\n", line);
}

/* Prints a message and ends the program. Restores the terminal and removes an unfinished output file first. */
__attribute__((format(printf, 2, 3), noreturn)) static void die_code(int code, const char *fmt, ...) {
    static int dying;
    char line[2048];
    va_list ap;
    while (__atomic_exchange_n(&dying, 1, __ATOMIC_SEQ_CST) && ranks_at_work)
        pause(); /* another thread is ending the program */
    term_restore();
    temp_remove();
    fflush(stdout);
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    message_sanitize(line);
    if (last_words.run && code == EXIT_RUN) last_words.run(last_words.arg, line);
    message_print("%s%s", rank_label, line);
    if (ranks_at_work) _exit(code);
    exit(code);
}

#define die(...)       die_code(EXIT_RUN, __VA_ARGS__)
#define die_usage(...) die_code(EXIT_USAGE, __VA_ARGS__)

/* Writes a session error to err. Returns -1, so that a caller can write `return fail(err, ...)`. */
__attribute__((format(printf, 2, 3))) static int fail(char *err, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, ERR_MAX, fmt, ap);
    va_end(ap);
    message_sanitize(err);
    return -1;
}

/* ============================================================================================================
 * Allocation
 *
 * Allocations that end the program when memory runs out, the dynamic arrays of stb_ds, and byte strings that grow.
 *
 * While the alloc guard of a thread is set, an allocation in that thread is an internal error: computing tokens has to
 * do with the memory that was laid out at the start.
 * ============================================================================================================ */

static _Thread_local const char *alloc_guard; /* what this thread does without allocating, or NULL */

static void alloc_guard_begin(const char *what) { alloc_guard = what; }
static void alloc_guard_end(void) { alloc_guard = NULL; }

/* Dies if the guard is set, or if an allocation of n bytes failed. */
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

/* n zeroed bytes, aligned to a cache line of 64 bytes. For free(). */
static void *xaligned(size_t n) {
    void *p = NULL;
    n = (n + 63) / 64 * 64;
    if (posix_memalign(&p, 64, n ? n : 64)) p = NULL;
    alloc_check(p != NULL, n ? n : 64);
    memset(p, 0, n ? n : 64);
    return p;
}

/* Copies n bytes and adds a NUL. */
static char *xstrndup(const char *s, size_t n) {
    char *p = xmalloc(n + 1);
    if (n) memcpy(p, s, n);
    p[n] = 0;
    return p;
}

static char *xstrdup(const char *s) { return xstrndup(s, strlen(s)); }

/* Dynamic arrays are stb_ds's: arrput, arrlen, arrsetlen, arrfree. Write one macro call per expression, without side
 * effects in its arguments; a function that may grow an array takes a pointer to it. Hash maps are used with integer
 * and pointer keys only. Never share a map between threads: even a look-up writes to it. (The global seed of stb_ds is
 * safe to share: each map copies it once.) */
#define STBDS_REALLOC(context, p, n) xrealloc(p, n)
#define STBDS_FREE(context, p)       free(p)
#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>

/* A byte string that grows (sb) is a `char *` array of stb_ds, NULL while it is empty. Its length is arrlen; it has no
 * NUL unless sb_cstr adds one. sb_put appends n bytes. */
static void sb_put(char **sb, const char *s, size_t n) {
    if (n) memcpy(arraddnptr(*sb, n), s, n);
}

static void sb_puts(char **sb, const char *s) { sb_put(sb, s, strlen(s)); }

/* Appends formatted text of any length. */
__attribute__((format(printf, 2, 0))) static void sb_vprintf(char **sb, const char *fmt, va_list ap) {
    char tmp[1024];
    va_list again;
    va_copy(again, ap);
    const int n = vsnprintf(tmp, sizeof tmp, fmt, ap);
    if (n < (int)sizeof tmp) {
        sb_put(sb, tmp, n > 0 ? (size_t)n : 0);
    } else {
        const size_t at = arrlenu(*sb);
        arrsetlen(*sb, at + (size_t)n + 1);
        vsnprintf(*sb + at, (size_t)n + 1, fmt, again);
        arrsetlen(*sb, at + (size_t)n);
    }
    va_end(again);
}

__attribute__((format(printf, 2, 3))) static void sb_printf(char **sb, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    sb_vprintf(sb, fmt, ap);
    va_end(ap);
}

/* Returns the string with a NUL behind its last byte, which arrlen does not count. Valid until the next change. */
static const char *sb_cstr(char **sb) {
    arrput(*sb, 0);
    (void)arrpop(*sb);
    return *sb;
}

/* ============================================================================================================
 * Files, time, text
 *
 * The clock, whole files, output files that replace others in one step, UTF-8, random numbers, numbers for people.
 * ============================================================================================================ */

static int int_min(int a, int b) { return a < b ? a : b; }

static int int_max(int a, int b) { return a > b ? a : b; }

/* n / by, and n as a multiple of `by`, both rounded up. */
static int ceil_by(int n, int by) { return (n + by - 1) / by; }

static int ceil_to(int n, int by) { return ceil_by(n, by) * by; }

/* Seconds on a clock that is never set back. */
double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Appends everything up to the end of fd. Returns 0, or -1 with errno set. After Ctrl-C, EINTR ends it. */
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

/* Appends a whole file. Returns 0, or -1 with a message. */
static int read_file(const char *path, char **sb, char *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(err, "cannot open '%s': %s", path, strerror(errno));
    int rc = read_fd(fd, sb);
    if (rc) fail(err, "cannot read '%s': %s", path, strerror(errno));
    close(fd);
    return rc;
}

/* Refuses anything but a regular file: reading a pipe might wait forever. Returns 0, or -1 with a message. */
static int file_check(const char *path, struct stat *st, char *err) {
    if (stat(path, st)) return fail(err, "cannot open '%s': %s", path, strerror(errno));
    return S_ISREG(st->st_mode) ? 0 : fail(err, "'%s' is not a regular file", path);
}

enum { TEMPS = 2 }; /* output files that get their names together, at most */

/* The output files that are being written. Only the last one is open. Whatever ends the program removes them. */
static struct {
    char path[PATH_MAX + 32]; /* its name now */
    char target[PATH_MAX];    /* its name when it is complete */
} temps[TEMPS];
static volatile sig_atomic_t n_temps;

/* Removes the unfinished output files. Safe in a signal handler. */
static void temp_remove(void) {
    while (n_temps) unlink(temps[--n_temps].path);
}

/* Whether `name` is that of a temporary file for `target` (both without directory), TARGET.tmp-PID-NUMBER, whose
 * process is gone. */
static bool temp_is_stale(const char *name, const char *target) {
    const size_t n = strlen(target);
    char *end;
    if (strncmp(name, target, n) || strncmp(name + n, ".tmp-", 5) || !isdigit((uint8_t)name[n + 5])) return false;
    const long pid = strtol(name + n + 5, &end, 10);
    if (pid < 1 || pid > INT_MAX || *end != '-' || strspn(end + 1, "0123456789abcdef") != 8 || end[9]) return false;
    return kill((pid_t)pid, 0) && errno == ESRCH;
}

/* Calls fn for each temporary name of `target` that a process left behind when it was killed. */
static void temp_each_stale(const char *target, void (*fn)(const char *path)) {
    const char *slash = strrchr(target, '/'), *base = slash ? slash + 1 : target;
    char dir[PATH_MAX], path[2 * PATH_MAX];
    snprintf(dir, sizeof dir, "%.*s", (int)(base - target), target);
    DIR *d = opendir(slash ? dir : ".");
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!temp_is_stale(e->d_name, base)) continue;
        snprintf(path, sizeof path, "%s%s", dir, e->d_name);
        fn(path);
    }
    if (d) closedir(d);
}

static void temp_unlink(const char *path) { unlink(path); }

/* Sets `path` to a temporary name for `target`. Nobody can guess it. */
static void temp_name(char path[PATH_MAX + 32], const char *target) {
    uint32_t number = 0;
    if (getrandom(&number, sizeof number, 0) < 0) number = (uint32_t)(now_seconds() * 1e6);
    snprintf(path, PATH_MAX + 32, "%.*s.tmp-%d-%08x", PATH_MAX, target, (int)getpid(), number);
}

/* Opens a temporary file that temp_finish renames to `target`, so that a failure leaves the old file as it was. Follows
 * no link and opens no file that is there already. Returns NULL with errno on failure. */
static FILE *temp_open(const char *target, mode_t mode) {
    char *path = temps[n_temps].path;
    int fd = -1;
    if (n_temps == TEMPS) die("internal error: more than %d output files at once", TEMPS);
    temp_each_stale(target, temp_unlink);
    snprintf(temps[n_temps].target, sizeof temps[n_temps].target, "%s", target);
    for (int tries = 0; fd < 0 && tries < 100 && (!tries || errno == EEXIST); tries++) {
        temp_name(path, target);
        n_temps++; /* first, so that a signal in between removes the file */
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
        if (fd < 0) n_temps--;
    }
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w+");
    if (fd < 0 || f) return f;
    close(fd);
    unlink(path);
    n_temps--;
    errno = ENOMEM;
    return NULL;
}

/* Does the same after a check of `path`. If it is a symbolic link, it is the file behind it that is replaced. Returns
 * NULL with a message on failure. */
static FILE *temp_create(const char *path, mode_t mode, char *err) {
    char target[PATH_MAX];
    struct stat st;
    if (strlen(path) >= sizeof target) {
        fail(err, "cannot write '%.80s...': %s", path, strerror(ENAMETOOLONG));
        return NULL;
    }
    strcpy(target, path);
    if (!lstat(path, &st) && (!realpath(path, target) || stat(path, &st))) {
        fail(err, "cannot replace '%s': %s", path, strerror(errno));
        return NULL;
    }
    if (!stat(path, &st) && !S_ISREG(st.st_mode)) {
        fail(err, "cannot replace '%s': it is not a regular file", path);
        return NULL;
    }
    FILE *f = temp_open(target, mode);
    if (!f) fail(err, "cannot write '%s': %s", path, strerror(errno));
    return f;
}

/* Closes the temporary file for `path`, unless `bad` or an error. It keeps its temporary name; another may be opened.
 * Returns 0, or -1 with a message. A failure removes all temporary files. */
static int temp_close(FILE *f, const char *path, bool bad, char *err) {
    int rc = 0;
    if (bad || ferror(f) || fflush(f) || fsync(fileno(f)))
        rc = fail(err, "cannot write '%s': %s", path, strerror(errno));
    if (fclose(f) && !rc) rc = fail(err, "cannot write '%s': %s", path, strerror(errno));
    if (rc) temp_remove();
    return rc;
}

/* Gives the temporary files, which are closed, their names. Returns 0, or -1 with a message. */
static int temp_commit(char *err) {
    for (int i = 0; i < n_temps; i++)
        if (rename(temps[i].path, temps[i].target)) {
            fail(err, "cannot rename '%s' to '%s': %s", temps[i].path, temps[i].target, strerror(errno));
            temp_remove();
            return -1;
        }
    n_temps = 0;
    return 0;
}

/* Closes the temporary file and gives it its name, unless `bad` or an error. Returns 0, or -1 with a message. */
static int temp_finish(FILE *f, const char *path, bool bad, char *err) {
    return temp_close(f, path, bad, err) || temp_commit(err) ? -1 : 0;
}

/* Makes jansson allocate by xmalloc: it would leave out what it has no memory for. Has unfinished output files removed
 * at every exit, also by a library. Called once, at the start. */
static void program_init(void) {
    json_set_alloc_funcs(xmalloc, free);
    atexit(temp_remove);
}

/* Reads the next line of a file by getline. Returns its length, or -1 at the end. Dies if it cannot be read. */
static ssize_t line_next(FILE *f, const char *name, char **line, size_t *cap) {
    const ssize_t n = getline(line, cap, f);
    if (n < 0 && !feof(f) && !interrupted) die("cannot read '%s': %s", name, strerror(errno));
    return n;
}

/* Bytes of memory that can be taken without swapping. Cached pages of files count as free. */
static uint64_t memory_available(void) {
    char *text = NULL, err[ERR_MAX];
    unsigned long long kib = 0;
    const char *at = read_file("/proc/meminfo", &text, err) ? NULL : strstr(sb_cstr(&text), "MemAvailable:");
    bool known = at && sscanf(at, "MemAvailable: %llu kB", &kib) == 1;
    arrfree(text);
    return known ? kib << 10 : (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Length of the UTF-8 sequence at s, where there are n bytes. 0: valid so far but cut off. -1: invalid. */
static int utf8_sequence(const char *s, size_t n) {
    const uint8_t *u = (const uint8_t *)s;
    utf8proc_int32_t cp;
    if (!n) return 0;
    int want; /* the length that the first byte announces */
    if (u[0] < 0x80) want = 1;
    else if (u[0] >= 0xc2 && u[0] < 0xe0) want = 2;
    else if ((u[0] & 0xf0) == 0xe0) want = 3;
    else if (u[0] >= 0xf0 && u[0] < 0xf5) want = 4;
    else return -1;
    if (n >= (size_t)want) return utf8proc_iterate(u, want, &cp) == want ? want : -1;
    uint8_t t[4] = {0x80, 0x80, 0x80, 0x80};
    memcpy(t, u, n);
    if (n < 2 && (u[0] == 0xe0 || u[0] == 0xf0)) t[1] = 0xa0; /* the smallest second byte that is not overlong */
    return utf8proc_iterate(t, want, &cp) == want ? 0 : -1;
}

/* Whether n bytes consist of whole, valid UTF-8 sequences. */
static bool utf8_valid(const char *s, size_t n) {
    while (n) {
        int k = utf8_sequence(s, n);
        if (k <= 0) return false;
        s += k;
        n -= (size_t)k;
    }
    return true;
}

/* Whether a terminal would obey a character instead of showing it: the control characters, and those of the
 * bidirectional algorithm, which change the order in which other text is shown. */
static bool is_control(utf8proc_int32_t cp) {
    return cp < 32 || (cp >= 127 && cp < 160) || cp == 0x61c || cp == 0x200e || cp == 0x200f ||
           (cp >= 0x202a && cp <= 0x202e) || (cp >= 0x2066 && cp <= 0x2069);
}

/* Replaces control characters and malformed UTF-8 in a message by '?'. Messages quote files and templates: they must
 * stay on one line and must not control the terminal. Other text is made harmless by term_escape, which shows it on a
 * terminal, by input_sanitize, which brings it into the editor, and by gguf_printable, which quotes names of a file. */
static void message_sanitize(char *s) {
    for (size_t n = strlen(s); n;) {
        utf8proc_int32_t cp = 0;
        int k = utf8_sequence(s, n);
        if (k > 0) utf8proc_iterate((uint8_t *)s, k, &cp);
        else k = 1;
        if (is_control(cp)) memset(s, '?', (size_t)k);
        s += k;
        n -= (size_t)k;
    }
}

/* Splitmix64, the random numbers of the sampler, of tests and of synthetic weights. The same on every machine. */
static uint64_t rng_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double rng_uniform(uint64_t *state) { return (double)(rng_next(state) >> 11) * 0x1p-53; } /* [0, 1) */

/* Writes a number of bytes with its unit to `out`, such as "1.5 GiB". */
static const char *with_unit(double bytes, char out[32]) {
    static const char *const unit[] = {"bytes", "KiB", "MiB", "GiB"};
    int u = 0;
    for (; bytes >= 1024 && u < 3; u++) bytes /= 1024;
    snprintf(out, 32, "%.*f %s", u ? 1 : 0, bytes, unit[u]);
    return out;
}

/* Writes a number with commas to `out`, such as "1,234,567". */
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
 * stdout carries the answer; everything else goes to stderr. term_init finds out once whether each is a terminal and
 * whether to use color. Text from a model or a file reaches a terminal only through term_escape, which shows control
 * characters instead of sending them.
 * ============================================================================================================ */

static struct {
    bool in_tty, out_tty, err_tty;
    bool err_moves;            /* stderr is a terminal that can rewrite its line */
    bool status;               /* the cursor is at the end of a line of progress */
    bool color_out, color_err; /* a terminal, NO_COLOR unset, TERM not dumb */
    atomic_bool raw;           /* the line editor has changed the terminal's mode */
    struct termios cooked;     /* the mode before that; valid while raw */
    bool dialogue;             /* the user can type commands */
    bool quiet;                /* --quiet: notes only answer commands */
    bool simple;               /* --simple-io: no line editor */
    int out_error;             /* errno of the first write to stdout that failed */
} term;

/* Fills in_tty to color_err. Called once, at the start. */
static void term_init(void) {
    const char *t = getenv("TERM"), *no = getenv("NO_COLOR");
    bool able = t && *t && strcmp(t, "dumb"), color = able && !(no && *no);
    term.in_tty = isatty(0);
    term.out_tty = isatty(1);
    term.err_tty = isatty(2);
    term.err_moves = term.err_tty && able;
    term.color_out = term.out_tty && color;
    term.color_err = term.err_tty && color;
}

/* Restores the mode, the color and the cursor of the terminal. Safe in a signal handler. */
static void term_restore(void) {
    static const char reset[] = "\033[0m\033[?2004l\033[?25h";
    if (term.raw) {
        tcsetattr(0, TCSANOW, &term.cooked);
        term.raw = false; /* last, so that a signal in between restores again */
        if (term.out_tty && write(1, reset, sizeof reset - 1) < 0) return;
    } else if (term.color_out && write(1, reset, 4) < 0) return;
}

/* Flushes stdout. Keeps the first error in term.out_error. */
static void out_flush(void) {
    if ((fflush(stdout) || ferror(stdout)) && !term.out_error) term.out_error = errno ? errno : EIO;
}

/* Shows a line of progress on stderr in place of the last one, cut to the width of the terminal; "" removes it. Does
 * nothing where a line cannot be rewritten. */
__attribute__((format(printf, 1, 2))) static void status_line(const char *fmt, ...) {
    struct winsize w;
    char line[256];
    va_list ap;
    if (!term.err_moves) return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    int cols = !ioctl(2, TIOCGWINSZ, &w) && w.ws_col ? w.ws_col : 80;
    if (cols <= (int)sizeof line) line[cols - 1] = 0;
    message_sanitize(line);
    fprintf(stderr, "\r%s\033[K", line);
    fflush(stderr);
    term.status = line[0];
}

/* Leaves the line of progress as it is and goes on below it. */
static void status_end(void) {
    if (term.status) fputc('\n', stderr);
    term.status = false;
}

/* Appends s (n bytes) to *out for a terminal: controls other than \n and \t become visible as \x1b or \u202e, malformed
 * UTF-8 becomes U+FFFD. s must not end within a UTF-8 sequence; the detokenizer holds such bytes back. */
static void term_escape(char **out, const char *s, size_t n) {
    for (size_t i = 0; i < n;) {
        utf8proc_int32_t cp = 0;
        int k = utf8_sequence(s + i, n - i);
        if (k > 0) utf8proc_iterate((const uint8_t *)s + i, k, &cp);
        if (k <= 0) sb_puts(out, "\xef\xbf\xbd");
        else if (cp == '\n' || cp == '\t' || !is_control(cp)) sb_put(out, s + i, (size_t)k);
        else sb_printf(out, cp < 256 ? "\\x%02x" : "\\u%04x", (unsigned)cp);
        i += k > 0 ? (size_t)k : 1;
    }
}

/* Appends s (n bytes) to *out, for a terminal by term_escape. */
static void term_put(char **out, const char *s, size_t n, bool tty) {
    if (tty) term_escape(out, s, n);
    else sb_put(out, s, n);
}

/* Prints text of a model or a file to stdout. */
static void out_put(const char *s, size_t n) {
    char *shown = NULL;
    term_put(&shown, s, n, term.out_tty);
    if (arrlen(shown)) fwrite(shown, 1, arrlenu(shown), stdout);
    arrfree(shown);
}

/* Prints a line on stderr, on a terminal in a color (a parameter of SGR). */
static void line_print(const char *color, const char *text) {
    char *shown = NULL;
    term_put(&shown, text, strlen(text), term.err_tty);
    if (term.color_err) fprintf(stderr, "\033[%sm%s\033[0m\n", color, sb_cstr(&shown));
    else fprintf(stderr, "%s\n", sb_cstr(&shown));
    arrfree(shown);
}

/* Prints a warning or a remark on a line of its own on stderr, dim on a terminal. */
__attribute__((format(printf, 1, 2))) static void note(const char *fmt, ...) {
    char *line = NULL;
    va_list ap;
    if (term.quiet && !term.dialogue) return;
    va_start(ap, fmt);
    sb_vprintf(&line, fmt, ap);
    va_end(ap);
    line_print("2", sb_cstr(&line));
    arrfree(line);
}

/* Handles SIGBUS: a page of the mapped model file cannot be read. Ends the program. */
static void signal_bus(int sig) {
    static const char line[] = PROGRAM ": the model file was truncated or its disk failed while in use\n";
    (void)sig;
    term_restore();
    temp_remove();
    ssize_t done = write(2, line, sizeof line - 1);
    (void)done;
    _exit(EXIT_RUN);
}

/* ============================================================================================================
 * Options of a program
 *
 * The form of the table of options, which moe, moe-convert and moe-reap share, and how a value gets from the command
 * line into a field of the settings. The table drives the command line, --help, the manual page and the completion.
 * ============================================================================================================ */

/* The settings of a run; each program has its own. */
struct settings;

enum option_type { OPT_FLAG, OPT_INT, OPT_NUM, OPT_STR, OPT_CHOICE, OPT_FILES /* up to the next option */ };

struct option {
    const char *name; /* NULL: a heading of --help, whose text is `help` */
    const char *also; /* other names, separated by |; --help shows the first if it begins with one dash */
    enum option_type type;
    size_t offset;              /* in the program's struct settings */
    const char *arg;            /* what --help calls the value */
    const char *const *choices; /* OPT_CHOICE: the names, NULL at the end; the field gets the index */
    double lo, hi;              /* range of numbers */
    bool in_chat;               /* /set may change it */
    bool rare;                  /* only --help all lists it */
    const char *of;             /* the modes that it belongs to, separated by |; else NULL */
    const char *help;           /* what it does, and its default */
    const char *details;        /* what --NAME --help adds */
};

#define AT(field)               offsetof(struct settings, field)
#define IS_FLAG(field)          .type = OPT_FLAG, .offset = AT(field)
#define IS_INT(field, low, top) .type = OPT_INT, .offset = AT(field), .lo = (low), .hi = (top)
#define IS_NUM(field, low, top) .type = OPT_NUM, .offset = AT(field), .lo = (low), .hi = (top)
#define IS_STR(field)           .type = OPT_STR, .offset = AT(field)
#define IS_FILES(field)         .type = OPT_FILES, .offset = AT(field)
#define IS_CHOICE(field, names) .type = OPT_CHOICE, .offset = AT(field), .choices = (names)

/* What a program says about itself. A list has one line NAME<tab>TEXT for each thing. */
struct manual {
    const char *name;
    const char *summary;     /* one line without a full stop */
    const char *usage;       /* lines that show how to call it */
    const char *about;       /* paragraphs; lines that begin with two blanks keep their breaks */
    struct option operand;   /* what stands without an option: its type and `arg` */
    const char *files;       /* a list */
    const char *environment; /* a list */
    const char *exit_codes;  /* separated by commas */
    const struct option *options;
    int n_options;
};

static const struct manual manual; /* defined by the program */

/* The field of an option. */
static void *option_at(struct settings *s, const struct option *o) { return (char *)s + o->offset; }
static const void *option_value(const struct settings *s, const struct option *o) {
    return (const char *)s + o->offset;
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

/* The option of this name; NULL: there is none. */
static const struct option *option_find(const char *name) {
    for (int i = 0; i < manual.n_options; i++)
        if (manual.options[i].name && !strcmp(manual.options[i].name, name)) return &manual.options[i];
    return NULL;
}

/* The option that an argument names, such as -c, --ctx or --ctx-size. */
static const struct option *option_by_argument(const char *name) {
    for (int i = 0; i < manual.n_options; i++)
        if (manual.options[i].also && list_has(manual.options[i].also, name)) return &manual.options[i];
    return strncmp(name, "--", 2) ? NULL : option_find(name + 2);
}

/* Copies the name of an argument such as --NAME=VALUE or -c, with the dashes; an underscore counts as a dash. Returns
 * the value; NULL: there is none. */
static const char *argument_split(const char *a, char name[64]) {
    const bool is_long = a[0] == '-' && a[1] == '-';
    const char *eq = is_long ? strchr(a, '=') : NULL;
    snprintf(name, 64, "%.*s", eq ? (int)(eq - a) : 63, a);
    for (char *p = name; is_long && *p; p++)
        if (*p == '_') *p = '-';
    return eq ? eq + 1 : NULL;
}

/* The choices of an option, such as bf16|fp8|f32. */
static const char *option_choices(const struct option *o, char out[64]) {
    int n = 0;
    for (int i = 0; o->choices[i]; i++) n += snprintf(out + n, 64 - (size_t)n, "%s%s", i ? "|" : "", o->choices[i]);
    return out;
}

/* Stores a number that is in range. 0, or -1 with a message. */
static int option_store_number(void *at, const struct option *o, const char *typed, const char *value, char *err) {
    const bool whole = o->type == OPT_INT;
    char *end;
    errno = 0;
    const double v = whole ? (double)strtoll(value, &end, 10) : strtod(value, &end);
    if (end == value || *end || errno || value[strspn(value, "+-.0123456789eE")] || !(v >= o->lo && v <= o->hi))
        return fail(err, "%s: expected %s from %.10g to %.10g", typed, whole ? "a whole number" : "a number", o->lo,
                    o->hi);
    if (whole) *(int *)at = (int)v;
    else *(double *)at = v;
    return 0;
}

/* Stores the index of a choice. 0, or -1 with a message. */
static int option_store_choice(void *at, const struct option *o, const char *typed, const char *value, char *err) {
    char names[64];
    for (int i = 0; o->choices[i]; i++)
        if (!strcmp(o->choices[i], value)) {
            *(int *)at = i;
            return 0;
        }
    return fail(err, "%s: expected %s", typed, option_choices(o, names));
}

/* Whether the value of an option is the name of a file. */
static bool option_is_file(const struct option *o) {
    return o->type == OPT_FILES || (o->type == OPT_STR && !strncmp(o->arg, "FILE", 4));
}

/* Parses and stores one value; a flag's is on or off. typed: the option with its value, as the user gave them. 0, or -1
 * with a message. */
static int option_store(struct settings *s, const struct option *o, const char *typed, const char *value, char *err) {
    void *at = option_at(s, o);
    if (option_is_file(o) && !*value) return fail(err, "--%s needs the name of a file", o->name);
    switch (o->type) {
    case OPT_FLAG:
        if (strcmp(value, "on") && strcmp(value, "off")) return fail(err, "%s: expected on|off", typed);
        *(bool *)at = !strcmp(value, "on");
        return 0;
    case OPT_INT:
    case OPT_NUM: return option_store_number(at, o, typed, value, err);
    case OPT_CHOICE: return option_store_choice(at, o, typed, value, err);
    case OPT_FILES: arrput(*(char ***)at, xstrdup(value)); return 0;
    case OPT_STR: break;
    }
    free(*(char **)at);
    *(char **)at = xstrdup(value);
    return 0;
}

/* ============================================================================================================
 * Help and manual page
 *
 * What --help and --man print: the table of options, and what the program says about itself.
 * ============================================================================================================ */

enum { HELP_INDENT = 25, HELP_COLUMNS = 80 };

/* Appends a list of names whose separator is | in brackets. */
static void names_print(char **text, const char *begin, const char *between, const char *list) {
    sb_puts(text, begin);
    for (const char *p = list; *p; p++)
        if (*p == '|') sb_puts(text, between);
        else arrput(*text, *p);
    sb_puts(text, "]");
}

/* The lines of an option in --help: its names and value, then the help, whose words are wrapped. all: tells the other
 * names too, and the modes that it belongs to. */
static void option_help_line(const struct option *o, bool all, FILE *f) {
    char *text = NULL, choices[64];
    const char *more = o->also;
    int at = 0;
    if (more && more[1] != '-') {
        const int n = (int)strcspn(more, "|");
        at = fprintf(f, "  %.*s, --%s", n, more, o->name);
        more = more[n] ? more + n + 1 : NULL;
    } else at = fprintf(f, "      --%s", o->name);
    if (o->arg) at += fprintf(f, " %s", o->arg);
    if (o->choices) sb_printf(&text, "%s: ", option_choices(o, choices));
    sb_puts(&text, o->help);
    if (all && o->of) names_print(&text, " [with --", ", --", o->of);
    if (all && more) names_print(&text, " [also ", ", ", more);
    for (const char *p = sb_cstr(&text); *p;) {
        const int n = (int)strcspn(p, " ");
        const bool full = at >= HELP_INDENT && (p == text || at + 1 + n > HELP_COLUMNS);
        if (full) at = fprintf(f, "\n%*s", HELP_INDENT, "") - 1;
        else at += fprintf(f, "%*s", at < HELP_INDENT ? HELP_INDENT - at : 1, "");
        at += fprintf(f, "%.*s", n, p);
        p += n + (p[n] == ' ');
    }
    putc('\n', f);
    arrfree(text);
}

/* --help: the options that most people need, or with `all` every one. */
static void manual_help(bool all, FILE *f) {
    fprintf(f, "%s - %s\n%s", manual.name, manual.summary, manual.usage);
    if (all) fprintf(f, "\n%s", manual.about);
    for (int i = 0; i < manual.n_options; i++) {
        const struct option *o = &manual.options[i];
        if (!i || !o->name) putc('\n', f);
        if (!o->name) fprintf(f, "%s\n", o->help);
        else if (all || (!o->rare && !o->of)) option_help_line(o, all, f);
    }
    fprintf(f, "%sExit code: %s.\n", all ? "\n" : "", manual.exit_codes);
}

/* Appends text for roff. begin: it is at the beginning of a line, where a dot or an apostrophe would be a request. */
static void man_escape(char **out, const char *text, bool begin) {
    static const char from[] = "\\-'`^~\"";
    static const char *const to[] = {"\\e", "\\-", "\\(aq", "\\(ga", "\\(ha", "\\(ti", "\\(dq"};
    if (begin && *text == '.') sb_puts(out, "\\&");
    for (; *text; text++) {
        const char *k = strchr(from, *text);
        if (k) sb_puts(out, to[k - from]);
        else arrput(*out, *text);
    }
}

/* Prints the lines of a text; those that begin with two blanks keep their breaks. An empty line begins a paragraph. */
static void man_lines(const char *text, FILE *f) {
    bool verbatim = false, gap = false;
    for (const char *p = text; *p;) {
        const int n = (int)strcspn(p, "\n");
        char *line = NULL, *plain = xstrndup(p, (size_t)n);
        const bool indented = p[0] == ' ' && p[1] == ' ';
        man_escape(&line, plain, true);
        if (n && gap) fputs(".PP\n", f);
        if (n && indented != verbatim) fputs(indented ? ".nf\n" : ".fi\n", f);
        if (n) verbatim = indented;
        if (n) fprintf(f, "%s\n", sb_cstr(&line));
        gap = !n;
        p += n + (p[n] == '\n');
        free(plain);
        arrfree(line);
    }
    if (verbatim) fputs(".fi\n", f);
}

/* Prints a section of a list with lines NAME<tab>TEXT; nothing if the list is NULL. */
static void man_list(const char *title, const char *list, FILE *f) {
    if (!list) return;
    fprintf(f, ".SH %s\n", title);
    for (const char *p = list; *p; p += strcspn(p, "\n") + 1) {
        char *name = xstrndup(p, strcspn(p, "\t")),
             *text = xstrndup(p + strlen(name) + 1, strcspn(p, "\n") - strlen(name) - 1);
        char *line = NULL;
        man_escape(&line, name, false);
        sb_puts(&line, "\\fP\n");
        man_escape(&line, text, true);
        fprintf(f, ".TP\n\\fB%s\n", sb_cstr(&line));
        free(name);
        free(text);
        arrfree(line);
    }
}

/* Calls `each` with every name of an option, with its dashes: the first that --help shows comes first. */
static void option_names(const struct option *o, void (*each)(const char *name, void *arg), void *arg) {
    char name[64];
    const char *more = o->also;
    const bool is_short = more && more[1] != '-';
    for (int i = 0; i < 2 || more; i++) {
        if (i == is_short) snprintf(name, sizeof name, "--%s", o->name);
        else if (more) {
            const size_t n = strcspn(more, "|");
            snprintf(name, sizeof name, "%.*s", (int)n, more);
            more = more[n] ? more + n + 1 : NULL;
        } else break;
        each(name, arg);
    }
}

/* Appends a name of an option, behind a comma unless it is the first. */
static void man_name(const char *name, void *line) {
    char **out = line;
    sb_puts(out, arrlenu(*out) ? "\\fP, \\fB" : "\\fB");
    man_escape(out, name, false);
}

/* Prints an option: its names and value, then the help. */
static void man_option(const struct option *o, FILE *f) {
    char *line = NULL, choices[64];
    option_names(o, man_name, &line);
    sb_puts(&line, "\\fP");
    if (o->arg) {
        sb_puts(&line, " \\fI");
        man_escape(&line, o->arg, false);
        sb_puts(&line, "\\fP");
    }
    sb_puts(&line, "\n");
    if (o->choices) {
        man_escape(&line, option_choices(o, choices), true);
        sb_puts(&line, ": ");
    }
    man_escape(&line, o->help, !o->choices);
    if (o->of) names_print(&line, " [with \\-\\-", ", \\-\\-", o->of);
    fprintf(f, ".TP\n%s\n", sb_cstr(&line));
    arrfree(line);
}

/* --man: the manual page, for the macros of man(7). */
static void manual_page(FILE *f) {
    char *name = NULL, *line = NULL, *codes = NULL;
    bool modes = false;
    man_escape(&name, manual.name, false);
    man_escape(&line, manual.summary, false);
    man_escape(&codes, manual.exit_codes, true);
    fprintf(f, ".TH \"%s\" 1 \"\" \"%s " MOE_VERSION "\" \"User Commands\"\n", sb_cstr(&name), name);
    fprintf(f, ".SH NAME\n%s \\- %s\n.SH SYNOPSIS\n", name, sb_cstr(&line));
    man_lines(manual.usage, f);
    fputs(".SH DESCRIPTION\n", f);
    man_lines(manual.about, f);
    fputs(".SH OPTIONS\n", f);
    for (int i = 0; i < manual.n_options; i++) {
        const struct option *o = &manual.options[i];
        modes |= o->details != NULL;
        arrsetlen(line, 0);
        man_escape(&line, o->help, false);
        if (o->name) man_option(o, f);
        else fprintf(f, ".SS \"%s\"\n", sb_cstr(&line));
    }
    if (modes) fputs(".SH MODES\n", f);
    for (int i = 0; i < manual.n_options; i++) {
        const struct option *o = &manual.options[i];
        if (!o->details) continue;
        arrsetlen(line, 0);
        man_escape(&line, o->name, false);
        fprintf(f, ".SS \\-\\-%s\n", sb_cstr(&line));
        man_lines(o->details, f);
    }
    man_list("FILES", manual.files, f);
    man_list("ENVIRONMENT", manual.environment, f);
    fprintf(f, ".SH EXIT STATUS\n%s\n", sb_cstr(&codes));
    arrfree(name);
    arrfree(line);
    arrfree(codes);
}

/* ============================================================================================================
 * Completion
 *
 * What --completion prints: a script for a shell, which completes the options of the table and their values.
 * ============================================================================================================ */

enum shell { SHELL_BASH, SHELL_ZSH };
static const char *const shell_names[] = {[SHELL_BASH] = "bash", [SHELL_ZSH] = "zsh", NULL};

/* How the value of an option is completed. */
enum value_kind { VALUE_NONE, VALUE_OTHER, VALUE_CHOICE, VALUE_FILE, VALUE_DIR };

static enum value_kind option_kind(const struct option *o) {
    if (o->type == OPT_FLAG) return VALUE_NONE;
    if (o->type == OPT_CHOICE) return VALUE_CHOICE;
    if (option_is_file(o)) return VALUE_FILE;
    return !strcmp(o->arg, "DIR") ? VALUE_DIR : VALUE_OTHER;
}

/* The ending of the files that an option takes, such as .gguf; "": any. It stands behind FILE in `arg`. */
static const char *option_ending(const struct option *o) { return !strncmp(o->arg, "FILE.", 5) ? o->arg + 4 : ""; }

/* Appends a name of an option to the pattern of a case of bash. */
static void bash_name(const char *name, void *pattern) {
    char **out = pattern;
    if (arrlenu(*out)) arrput(*out, '|');
    sb_puts(out, name);
}

/* Prints the command of bash that completes the value of an option; nothing if it cannot be known. */
static void bash_value(const struct option *o, FILE *f) {
    const char *ending = option_ending(o);
    const enum value_kind kind = option_kind(o);
    if (kind == VALUE_OTHER) return;
    fputs("mapfile -t COMPREPLY < <(", f);
    if (kind == VALUE_CHOICE) {
        fputs("compgen -W '", f);
        for (int i = 0; o->choices[i]; i++) fprintf(f, "%s%s", i ? " " : "", o->choices[i]);
        fputs("' -- \"$word\"); ", f);
    } else if (kind == VALUE_DIR) fputs("compgen -d -- \"$word\"); ", f);
    else if (*ending) fprintf(f, "compgen -f -X '!*%s' -- \"$word\"; compgen -d -- \"$word\"); ", ending);
    else fputs("compgen -f -- \"$word\"); ", f);
}

/* --completion bash: a function that completes the options of the program, their values and its operand. */
static void completion_bash(const char *function, FILE *f) {
    char *words = NULL, *lists = NULL;
    fprintf(f,
            "# Completion of %s for bash, made by %s --completion bash.\n"
            "_%s() {\n"
            "    local word=${COMP_WORDS[COMP_CWORD]} option=${COMP_WORDS[COMP_CWORD - 1]} i=$((COMP_CWORD - 1))\n"
            "    COMPREPLY=()\n"
            "    [[ $option == = ]] && option=${COMP_WORDS[COMP_CWORD - 2]}\n"
            "    [[ $word == = ]] && word=\n"
            "    case $option in\n",
            manual.name, manual.name, function);
    for (int i = 0; i < manual.n_options; i++) {
        const struct option *o = &manual.options[i];
        char *pattern = NULL;
        if (!o->name) continue;
        option_names(o, bash_name, &pattern);
        sb_printf(&words, " %s", sb_cstr(&pattern));
        if (o->type == OPT_FILES) sb_printf(&lists, "%s%s", arrlenu(lists) ? "|" : "", pattern);
        if (o->type != OPT_FLAG) {
            fprintf(f, "    %s) ", pattern);
            bash_value(o, f);
            fputs("return ;;\n", f);
        }
        arrfree(pattern);
    }
    for (size_t i = 0; i < arrlenu(words); i++)
        if (words[i] == '|') words[i] = ' ';
    fprintf(f,
            "    esac\n"
            "    if [[ $word == -* ]]; then\n"
            "        mapfile -t COMPREPLY < <(compgen -W '%s' -- \"$word\")\n"
            "        return\n"
            "    fi\n",
            sb_cstr(&words) + 1);
    if (lists)
        fprintf(f,
                "    while [[ $i -gt 0 && ${COMP_WORDS[i]} != -* ]]; do i=$((i - 1)); done\n"
                "    case ${COMP_WORDS[i]} in\n"
                "    %s) mapfile -t COMPREPLY < <(compgen -f -- \"$word\"); return ;;\n"
                "    esac\n",
                sb_cstr(&lists));
    fputs("    ", f);
    bash_value(&manual.operand, f);
    fprintf(f, "\n}\ncomplete -o filenames -F _%s %s\n", function, manual.name);
    arrfree(words);
    arrfree(lists);
}

/* Appends text for a string of zsh in single quotes, where brackets and colons are special. */
static void zsh_escape(char **out, const char *text) {
    for (; *text; text++) {
        if (strchr("[]:\\", *text)) arrput(*out, '\\');
        if (*text == '\'') sb_puts(out, "'\\'");
        arrput(*out, *text);
    }
}

/* Appends what zsh shows of a value, and how it completes it. */
static void zsh_value(char **out, const struct option *o) {
    const enum value_kind kind = option_kind(o);
    sb_puts(out, o->type == OPT_FILES ? ":*-*:" : ":");
    zsh_escape(out, o->arg);
    arrput(*out, ':');
    if (kind == VALUE_CHOICE) {
        sb_puts(out, "(");
        for (int i = 0; o->choices[i]; i++) sb_printf(out, "%s%s", i ? " " : "", o->choices[i]);
        sb_puts(out, ")");
    } else if (kind == VALUE_DIR) sb_puts(out, "_files -/");
    else if (kind == VALUE_FILE && *option_ending(o)) sb_printf(out, "_files -g \"*%s\"", option_ending(o));
    else if (kind == VALUE_FILE) sb_puts(out, "_files");
}

/* Appends a name of an option to a list that is separated by blanks. */
static void zsh_name(const char *name, void *list) {
    char **out = list;
    if (arrlenu(*out)) arrput(*out, ' ');
    sb_puts(out, name);
}

/* --completion zsh: one specification of _arguments for every name of an option. */
static void completion_zsh(FILE *f) {
    fprintf(f, "#compdef %s\n# Completion of %s for zsh, made by %s --completion zsh.\n_arguments", manual.name,
            manual.name, manual.name);
    for (int i = 0; i < manual.n_options; i++) {
        const struct option *o = &manual.options[i];
        char *names = NULL, *rest = NULL;
        if (!o->name) continue;
        option_names(o, zsh_name, &names);
        arrput(rest, '[');
        zsh_escape(&rest, o->help);
        arrput(rest, ']');
        if (o->type != OPT_FLAG) zsh_value(&rest, o);
        for (const char *p = sb_cstr(&names); *p;) {
            const int n = (int)strcspn(p, " ");
            const bool equals = o->type != OPT_FLAG && p[1] == '-';
            fprintf(f, " \\\n    '(%s)%.*s%s%s'", names, n, p, equals ? "=" : "", sb_cstr(&rest));
            p += n + (p[n] == ' ');
        }
        arrfree(names);
        arrfree(rest);
    }
    char *operand = NULL;
    zsh_value(&operand, &manual.operand);
    fprintf(f, " \\\n    '*%s'\n", sb_cstr(&operand));
    arrfree(operand);
}

/* --completion: the completion for a shell. */
static void manual_completion(enum shell shell, FILE *f) {
    char function[32];
    snprintf(function, sizeof function, "%s", manual.name);
    for (char *p = function; *p; p++)
        if (*p == '-') *p = '_';
    if (shell == SHELL_BASH) completion_bash(function, f);
    else completion_zsh(f);
}

#ifndef MOE_FOUNDATIONS_ONLY

/* ============================================================================================================
 * Progress of a turn
 *
 * A line on stderr that says what a turn does before its answer can be seen. The working thread sets the numbers, any
 * thread draws the line.
 * ============================================================================================================ */

static struct {
    pthread_mutex_t lock;
    enum { PROGRESS_NONE, PROGRESS_PROMPT, PROGRESS_THINKING } what;
    int done, n;         /* tokens; n: of the prompt */
    double since, drawn; /* now_seconds() */
    bool stopping;
} turn_progress = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Draws the line of progress at most ten times a second, and that of a prompt not in the first 0.4 seconds. */
static void progress_draw(void) {
    char a[32], b[32];
    pthread_mutex_lock(&turn_progress.lock);
    const double now = now_seconds(), t = now - turn_progress.since;
    if (turn_progress.what && (t > 0.4 || turn_progress.what == PROGRESS_THINKING) &&
        (now - turn_progress.drawn > 0.1 || turn_progress.stopping)) {
        const double rate = turn_progress.done / t;
        turn_progress.drawn = now;
        if (turn_progress.stopping) status_line("stopping...");
        else if (turn_progress.what == PROGRESS_THINKING)
            status_line("thinking... %d tok %.1f s", turn_progress.done, t);
        else if (!turn_progress.done)
            status_line("reading %s tokens  %.1f s", with_commas((uint64_t)turn_progress.n, a), t);
        else
            status_line("reading %s of %s tokens  %.0f %%  %.0f tok/s  %.0f s left",
                        with_commas((uint64_t)turn_progress.done, a), with_commas((uint64_t)turn_progress.n, b),
                        100.0 * turn_progress.done / turn_progress.n, rate,
                        (turn_progress.n - turn_progress.done) / rate);
    }
    pthread_mutex_unlock(&turn_progress.lock);
}

static void progress_set(int what, int done, int n) {
    pthread_mutex_lock(&turn_progress.lock);
    if ((int)turn_progress.what != what) turn_progress.since = now_seconds();
    turn_progress.what = what;
    turn_progress.done = done;
    turn_progress.n = n;
    pthread_mutex_unlock(&turn_progress.lock);
    progress_draw();
}

/* Says at once that a turn is about to stop. */
static void progress_stopping(void) {
    pthread_mutex_lock(&turn_progress.lock);
    turn_progress.stopping = true;
    turn_progress.since = 0;
    pthread_mutex_unlock(&turn_progress.lock);
    progress_draw();
}

/* Removes the line. */
static void progress_end(void) {
    pthread_mutex_lock(&turn_progress.lock);
    if (turn_progress.what && term.status) status_line("%s", "");
    turn_progress.what = PROGRESS_NONE;
    turn_progress.stopping = false;
    pthread_mutex_unlock(&turn_progress.lock);
}

/* ============================================================================================================
 * Terminal: columns and word wrap
 *
 * How many columns text takes, and the wrapping of a streamed answer between words. A word is held back until it is
 * known where it ends, so that nothing that was printed has to be taken back, whatever a terminal makes of it. Blocks
 * between lines of ``` are not wrapped.
 * ============================================================================================================ */

/* Returns the columns of a code point, the most that a terminal gives it. *vague, unless NULL: set if others give it
 * fewer. Code points that utf8proc does not know may be new emoji. */
static int code_width(utf8proc_int32_t cp, bool *vague) {
    static const struct {
        utf8proc_int32_t first, last;
        int width;
    } odd[] = {{0x600, 0x605, 1},     {0x6dd, 0x6dd, 1},     {0x70f, 0x70f, 1},     {0x890, 0x891, 1},
               {0x8e2, 0x8e2, 1},     {0x110bd, 0x110bd, 1}, {0x110cd, 0x110cd, 1}, /* signs in front of numbers */
               {0x1160, 0x11ff, 0},   {0xd7b0, 0xd7ff, 0}, /* vowels and ends of Hangul syllables */
               {0x2630, 0x2637, 2},   {0x268a, 0x268f, 2},   {0x4dc0, 0x4dff, 2},   {0x1d300, 0x1d356, 2},
               {0x1d360, 0x1d376, 2},  /* wide since Unicode 16 */
               {0x1f1e6, 0x1f1ff, 2}}; /* halves of flags */
    const utf8proc_category_t category = utf8proc_category(cp);
    int width = utf8proc_charwidth(cp);
    bool differ = category == UTF8PROC_CATEGORY_CN || category == UTF8PROC_CATEGORY_MC;
    if (category == UTF8PROC_CATEGORY_CN) width = 2;
    if (category == UTF8PROC_CATEGORY_MC) width = 1; /* vowel signs with a column of their own */
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        if (cp < odd[i].first || cp > odd[i].last) continue;
        width = odd[i].width;
        differ = true;
    }
    if (vague) *vague |= differ;
    return width;
}

/* Returns the columns that cp adds after the code point `last`; 0: none. A variation selector makes a symbol wide
 * (U+FE0F) or narrow (U+FE0E) on terminals that heed it. */
static int code_adds(utf8proc_int32_t last, utf8proc_int32_t cp, bool *vague) {
    if (vague && cp == 0xfe0e) *vague = true;
    if (cp != 0xfe0f) return code_width(cp, vague);
    const bool symbol = utf8proc_get_property(last)->boundclass == UTF8PROC_BOUNDCLASS_EXTENDED_PICTOGRAPHIC;
    return (symbol || last == '#' || last == '*' || (last >= '0' && last <= '9')) && code_width(last, NULL) == 1;
}

/* Returns the columns of s (n), the most that a terminal gives it: the sum over its code points. *vague, unless NULL:
 * set if there are terminals that give it fewer, because they draw several of these code points as one sign, or because
 * their tables differ. */
static int text_width(const char *s, size_t n, bool *vague) {
    int width = 0, parts = 0;
    for (utf8proc_int32_t cp, last = 0; n; last = cp) {
        utf8proc_ssize_t k = utf8proc_iterate((const uint8_t *)s, (utf8proc_ssize_t)n, &cp);
        if (k <= 0) break;
        const int w = code_adds(last, cp, vague);
        width += w;
        if (vague && w && parts++) *vague = true;
        s += k;
        n -= (size_t)k;
    }
    return width;
}

/* Returns the bytes of the first grapheme cluster of s (n), valid UTF-8. */
static size_t cluster_bytes(const char *s, size_t n) {
    utf8proc_int32_t last = -1, cp, state = 0;
    size_t at = 0;
    while (at < n) {
        utf8proc_ssize_t k = utf8proc_iterate((const uint8_t *)s + at, (utf8proc_ssize_t)(n - at), &cp);
        if (last >= 0 && utf8proc_grapheme_break_stateful(last, cp, &state)) break;
        at += (size_t)k;
        last = cp;
    }
    return at;
}

/* Text on its way to a terminal. */
struct wrap {
    int cols;                     /* of the terminal; 0: the text goes through as it is */
    int col;                      /* where the next cell goes */
    int gap;                      /* blanks that are printed if a word follows them in the same row */
    char *word;                   /* stb_ds: what is held back */
    int width;                    /* its columns */
    bool rest;                    /* it is the rest of a word that is longer than a row */
    int marks;                    /* backticks that the line begins with; -1: it begins with something else */
    bool code;                    /* the line is in a block between lines of ``` */
    utf8proc_int32_t last, state; /* of utf8proc_grapheme_break_stateful */
};

/* Appends what is held back to *out, in a new row if it does not fit. */
static void wrap_flush(struct wrap *w, char **out) {
    if (!arrlen(w->word)) return;
    if (w->col && !w->rest && w->col + w->gap + w->width > w->cols) {
        arrput(*out, '\n');
        w->col = w->gap = 0;
    }
    w->col += w->gap + w->width;
    for (; w->gap; w->gap--) arrput(*out, ' ');
    if (w->col > w->cols) w->col %= w->cols;
    sb_put(out, w->word, arrlenu(w->word));
    arrsetlen(w->word, 0);
    w->width = 0;
}

/* Whether a row may end between two code points without a blank: where one of them is wide, as in Chinese, but not
 * before closing punctuation. */
static bool wrap_between(utf8proc_int32_t a, utf8proc_int32_t b) {
    static const char closing[] =
        "\xe3\x80\x81\xe3\x80\x82\xef\xbc\x8c\xef\xbc\x8e\xef\xbc\x81\xef\xbc\x9f\xef\xbc\x9a"
        "\xef\xbc\x9b\xef\xbc\x89\xe3\x80\x8d\xe3\x80\x8f\xe3\x80\x91\xe3\x80\x8b"; /* 、。，．！？：；）」』】》 */
    char s[5] = {0};
    if (code_width(a, NULL) < 2 && code_width(b, NULL) < 2) return false;
    utf8proc_encode_char(b, (uint8_t *)s);
    return !strstr(closing, s);
}

/* Appends s (n) to *out, wrapped. s: valid UTF-8 without controls other than \n and \t. */
static void wrap_put(struct wrap *w, const char *s, size_t n, char **out) {
    utf8proc_int32_t cp;
    for (utf8proc_ssize_t k; n; s += k, n -= (size_t)k) {
        k = utf8proc_iterate((const uint8_t *)s, (utf8proc_ssize_t)n, &cp);
        if (k <= 0) return;
        const bool cluster = !w->last || utf8proc_grapheme_break_stateful(w->last, cp, &w->state);
        if (w->marks >= 0 && cp == '`') w->marks++;
        else if (w->marks < 3 && cp != ' ' && cp != '\n') w->marks = -1;
        if (cp == '\n') {
            wrap_flush(w, out);
            if (w->marks >= 3) w->code = !w->code;
            w->marks = w->col = w->gap = 0;
            w->rest = false;
            arrput(*out, '\n');
        } else if (w->code) {
            sb_put(out, s, (size_t)k);
        } else if (cp == ' ' || cp == '\t') {
            wrap_flush(w, out);
            w->rest = false;
            w->gap += cp == ' ' ? 1 : 8 - (w->col + w->gap) % 8;
        } else {
            const bool full = w->width >= w->cols, between = cluster && wrap_between(w->last, cp);
            if (full || between) wrap_flush(w, out);
            if (full || between) w->rest = !between;
            sb_put(&w->word, s, (size_t)k);
            w->width += code_adds(w->last, cp, NULL);
        }
        w->last = cp;
    }
}

/* ============================================================================================================
 * Vocabulary: pre-tokenizers
 *
 * Before BPE, the model's pre-tokenizer cuts text into pieces such as words, numbers and runs of blanks. No token spans
 * two pieces. This section is data: the expressions of every pre-tokenizer that a GGUF file may name.
 * ============================================================================================================ */

#include "convert/pre_tokenizers.h"

/* Whether `word` is one of the words of a space-separated list. */
static bool word_in_list(struct gguf_str word, const char *list) {
    for (const char *p = list; *p;) {
        size_t n = strcspn(p, " ");
        if (n == word.n && !memcmp(p, word.p, n)) return true;
        p += n + (p[n] == ' ');
    }
    return false;
}

/* ============================================================================================================
 * Vocabulary: tables and loading
 *
 * The tables of a byte-level BPE vocabulary, read from a GGUF file: tokens, bytes to token, merges, special tokens.
 *
 * A vocabulary is immutable after vocab_load and points into the GGUF image, which must outlive it. Any number of
 * threads may tokenize at once. Ordinary tokens, which merging finds, and special tokens, which are found by their
 * literal text, are kept in separate tables, so that merging can never produce a special token.
 * ============================================================================================================ */

/* Values of tokenizer.ggml.token_type. */
enum token_type { TOKEN_NORMAL = 1, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_UNUSED, TOKEN_BYTE };

/* The origin of one byte of text: written by the chat template, or taken from a message, a file or the user. */
enum { ORIGIN_TEMPLATE = 0, ORIGIN_DATA = 1 };

enum tokenize_flags {
    TOKENIZE_CONTROL = 1, /* recognize control tokens in template text */
    TOKENIZE_TAGS = 2     /* recognize user-defined tokens that look like tags in data, too */
};

enum {
    VOCAB_MAX = 1 << 24, /* of tokens, and of merges */
    VOCAB_PROBES = 1024, /* slots tried for one entry; the largest vocabularies need less than 100 */
    SPECIAL_MAX = 1024,  /* bytes of a special token; matching may compare that many at every byte of a text */
    PIECE_MAX = 1 << 28, /* bytes merged at once; longer pieces are cut, so that symbols fit 32 bits */
    NFC_MAX_MARKS = 256, /* combining marks normalized at once; utf8proc sorts them in quadratic time */
    RANK_NONE = -1       /* there is no merge; also what an empty slot holds */
};

/* Slots of the tables by_bytes and merges. */
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

/* by_bytes and merges are open-addressed tables of 2^bits slots, of which at most two thirds are used. Linear probing
 * tries at most VOCAB_PROBES slots. */
struct vocab {
    int32_t n_tokens;
    int32_t bos, eos, eot, pad; /* -1: none */
    bool add_bos, nfc, ignore_merges;
    struct gguf_str chat_template; /* p NULL: none */

    struct gguf_str *token; /* (n_tokens) the bytes that a token stands for, in decoded or in the image */
    uint8_t *type;          /* (n_tokens) enum token_type */
    bool *stop;             /* (n_tokens) the token ends a turn */
    char *decoded;          /* the bytes of all ordinary tokens, end to end */

    struct bytes_slot *by_bytes; /* ordinary tokens by their bytes; of equal ones the lowest id */
    struct merge_slot *merges;   /* NULL: any two symbols whose bytes make a token merge; its id is the rank */
    int by_bytes_bits, merges_bits;
    int32_t byte_id[256]; /* token of each single byte; -1: none, the byte is dropped */

    struct special_token *special; /* (n_special) sorted by text, then id; special_match walks it like a trie */
    uint32_t n_special;
    uint32_t special_first[257]; /* [special_first[b], special_first[b + 1]) begin with byte b */

    pcre2_code *expr[VOCAB_MAX_EXPRS];
    int n_exprs;
    pcre2_match_context *match_context;
};

/* ---- tables ---- */

/* The byte that a character of GPT-2's byte alphabet stands for, or -1. Printable Latin-1 stands for itself; U+0100 and
 * up stand for the other 68 bytes in order. */
static int alphabet_byte(int cp) {
    if ((cp > 32 && cp < 127) || (cp > 160 && cp < 256 && cp != 173)) return cp;
    int k = cp - 256;
    if (k < 0 || k > 67) return -1;
    if (k < 33) return k;      /* bytes 0 to 32 */
    if (k < 67) return k + 94; /* bytes 127 to 160 */
    return 173;
}

/* Decodes n bytes of text in GPT-2's alphabet to `out`, which has room for n bytes. Returns the number of bytes
 * written, or -1 if a character is not in the alphabet. */
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

/* log2 of the number of slots for n entries. */
static int table_bits(uint64_t n) {
    int bits = 4;
    while (1ull << bits < n + n / 2) bits++;
    return bits;
}

/* Hash of a token's bytes: FNV-1a, multiplied so that the upper bits, which choose the slot, are well mixed. */
static uint32_t token_hash(const char *s, size_t n) {
    return (uint32_t)(hash_bytes(HASH_START, s, n) * 0x9e3779b97f4a7c15u >> 32);
}

/* Finds the slot of the ordinary token with these bytes, or else the empty slot for it. NULL after VOCAB_PROBES
 * slots. */
static struct bytes_slot *bytes_slot(const struct vocab *v, const char *s, size_t n, uint32_t hash) {
    uint32_t mask = (1u << v->by_bytes_bits) - 1, i = hash >> (32 - v->by_bytes_bits);
    for (int probe = 0; probe < VOCAB_PROBES; probe++, i = (i + 1) & mask) {
        struct bytes_slot *e = &v->by_bytes[i];
        if (e->id < 0) return e;
        if (e->hash == hash && v->token[e->id].n == n && !memcmp(v->token[e->id].p, s, n)) return e;
    }
    return NULL;
}

/* Id of the ordinary token with these bytes, or -1. */
static int32_t bytes_find(const struct vocab *v, const char *s, size_t n) {
    const struct bytes_slot *e = bytes_slot(v, s, n, token_hash(s, n));
    return e ? e->id : -1;
}

/* Finds the slot of a merge (left id << 32 | right id), or else the empty slot for it. NULL after VOCAB_PROBES
 * slots. */
static struct merge_slot *merge_slot(const struct vocab *v, uint64_t pair) {
    uint32_t mask = (1u << v->merges_bits) - 1;
    uint32_t i = (uint32_t)(pair * 0x9e3779b97f4a7c15u >> (64 - v->merges_bits));
    for (int probe = 0; probe < VOCAB_PROBES; probe++, i = (i + 1) & mask)
        if (v->merges[i].pair == pair || v->merges[i].pair == UINT64_MAX) return &v->merges[i];
    return NULL;
}

/* ---- special tokens ---- */

/* Orders special tokens for qsort. */
static int special_compare(const void *a, const void *b) {
    const struct special_token *x = a, *y = b;
    int c = gguf_str_cmp(x->text, y->text);
    return c ? c : (x->id > y->id) - (x->id < y->id);
}

/* Whether tokens of a type are found by their literal text instead of by merging. */
static bool is_special(int type) {
    return type == TOKEN_CONTROL || type == TOKEN_USER_DEFINED || type == TOKEN_UNKNOWN;
}

/* Id of the special token with this text, the lowest if there are several, or -1. */
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

/* Compiles the expressions of a pre-tokenizer. Returns 0, or -1 with a message. */
static int vocab_compile_exprs(struct vocab *v, const struct pre_tokenizer *pre, char *err) {
    v->match_context = pcre2_match_context_create(NULL);
    if (!v->match_context) return fail(err, "out of memory for the pre-tokenizer");
    pcre2_set_match_limit(v->match_context, UINT32_MAX); /* the default is too low for long runs */
    for (int i = 0; i < VOCAB_MAX_EXPRS && pre->expr[i]; i++) {
        int code;
        size_t at;
        v->expr[i] =
            pcre2_compile((PCRE2_SPTR)pre->expr[i], PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
        char why[128] = "";
        if (!v->expr[i]) pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        if (!v->expr[i])
            return fail(err, "PCRE2 rejects expression %d of the pre-tokenizer '%s': %s, at offset %zu", i + 1,
                        pre->names, why, at);
        pcre2_jit_compile(v->expr[i], PCRE2_JIT_COMPLETE); /* if this fails, matching is only slower */
        v->n_exprs++;
    }
    return 0;
}

/* The token id under a key; -1 if the key is missing or the id is outside the vocabulary. */
static int32_t vocab_key_id(const struct vocab *v, const struct gguf *g, const char *key) {
    const struct gguf_kv *kv = gguf_find(g, key);
    int64_t id;
    return kv && !kv->is_array && gguf_elem_int(kv, 0, &id) && id >= 0 && id < v->n_tokens ? (int32_t)id : -1;
}

/* The bool under a key, or `missing`. */
static bool vocab_key_bool(const struct gguf *g, const char *key, bool missing) {
    const struct gguf_kv *kv = gguf_find(g, key);
    int64_t b;
    return kv && !kv->is_array && gguf_elem_int(kv, 0, &b) ? b != 0 : missing;
}

/* Finds the array of 1 to VOCAB_MAX strings under a key. Returns 0, or -1 with a message. */
static int vocab_key_strings(const struct gguf *g, const char *key, const struct gguf_kv **kv, char *err) {
    *kv = gguf_find(g, key);
    if (!*kv) return fail(err, "the key %s is missing", key);
    if (!(*kv)->is_array || (*kv)->type != GGUF_V_STR) return fail(err, "the key %s is not an array of strings", key);
    if ((*kv)->n < 1 || (*kv)->n > VOCAB_MAX)
        return fail(err, "the key %s has %llu elements, expected 1 to %d", key, (unsigned long long)(*kv)->n,
                    VOCAB_MAX);
    return 0;
}

/* Fills v->type. A token without a type, or with an unknown one, is normal. */
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

/* Sorts the special tokens and indexes them by their first byte. */
static void vocab_index_special(struct vocab *v) {
    qsort(v->special, v->n_special, sizeof *v->special, special_compare);
    for (uint32_t b = 0, i = 0; b <= 256; b++) {
        v->special_first[b] = i;
        while (i < v->n_special && (uint8_t)v->special[i].text.p[0] == b) i++;
    }
}

/* Fills v->byte_id. In DeepSeek's first vocabulary a user-defined token stands for 0xf6, a byte that UTF-8 never
 * has. */
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

/* Reads the tokens and their types, and builds the tables of ordinary and special tokens. An ordinary token that is not
 * spelled in GPT-2's alphabet stands for its own text and cannot be found by merging. */
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
        uint32_t hash = token_hash(out, t->n);
        struct bytes_slot *e = bytes_slot(v, out, t->n, hash);
        if (!e) return fail(err, "tokenizer.ggml.tokens: more than %d tokens collide", VOCAB_PROBES);
        if (e->id < 0) *e = (struct bytes_slot){hash, i};
        out += n;
    }
    vocab_index_special(v);
    vocab_index_bytes(v);
    return 0;
}

/* Reads the merges: strings "left right" in GPT-2's alphabet, the strongest first. Of equal ones the first counts. A
 * merge whose parts or result are not all ordinary tokens can never be applied and is left out. */
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

/* Special tokens that are control tokens whatever the file says; some files call them user-defined. `stop`: the token
 * ends a turn. Those are llama.cpp's and, for GLM, the tokens that begin the turn of someone else. The first one that a
 * vocabulary has is its eot, if the file names none. */
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

/* Finds the tokens that end a turn, and eot. Needs v->eos. */
static void vocab_find_stops(struct vocab *v, const struct gguf *g) {
    const struct gguf_kv *kv = gguf_find(g, "tokenizer.ggml.eos_token_ids");
    int64_t id;
    v->eot = vocab_key_id(v, g, "tokenizer.ggml.eot_token_id");
    int32_t ids[] = {v->eos, v->eot, vocab_key_id(v, g, "tokenizer.ggml.eom_token_id")};
    for (int i = 0; i < 3; i++)
        if (ids[i] >= 0) v->stop[ids[i]] = true;
    for (uint64_t i = 0; kv && i < kv->n && gguf_elem_int(kv, i, &id); i++)
        if (id >= 0 && id < v->n_tokens) v->stop[id] = true;
    /* in harmony (gpt-oss), <|return|> and <|call|> end a turn; <|end|> only ends a message */
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

/* Frees what vocab_load allocated and zeroes *v. */
static void vocab_free(struct vocab *v) {
    for (int i = 0; i < v->n_exprs; i++) pcre2_code_free(v->expr[i]);
    pcre2_match_context_free(v->match_context);
    free(v->token);
    free(v->type);
    free(v->stop);
    free(v->decoded);
    free(v->by_bytes);
    free(v->merges);
    free(v->special);
    memset(v, 0, sizeof *v);
}

/* Reads everything into *v, which vocab_load frees on an error. */
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

/* Reads the tokenizer of a GGUF file, which must outlive v. Returns 0, or -1 with a message and v empty. */
static int vocab_load(struct vocab *v, const struct gguf *g, char *err) {
    memset(v, 0, sizeof *v);
    int rc = vocab_read(v, g, err);
    if (rc) vocab_free(v);
    return rc;
}

/* ---- look-ups ---- */

/* The bytes that a token stands for; none for an id outside the vocabulary. */
static struct gguf_str vocab_bytes(const struct vocab *v, int32_t id) {
    return id >= 0 && id < v->n_tokens ? v->token[id] : (struct gguf_str){"", 0};
}

/* enum token_type of a token; TOKEN_UNUSED for an id outside the vocabulary. */
static int vocab_type(const struct vocab *v, int32_t id) {
    return id >= 0 && id < v->n_tokens ? v->type[id] : TOKEN_UNUSED;
}

/* Whether the token ends a turn. */
static bool vocab_is_stop(const struct vocab *v, int32_t id) { return id >= 0 && id < v->n_tokens && v->stop[id]; }

/* ============================================================================================================
 * Vocabulary: text to tokens and back
 *
 * tokenize does what Hugging Face's tokenizers do. It cuts text at special tokens, brings the stretches between them to
 * NFC if the model wants that, cuts these into pieces with the pre-tokenizer, and merges each piece from single bytes
 * upwards. struct detok turns tokens back into whole UTF-8 sequences.
 *
 * Whether text may become a special token depends on where the text came from. This section is told by origin bytes and
 * flags; it knows nothing of templates or messages.
 * ============================================================================================================ */

/* ---- special tokens ---- */

/* Whether a token looks like a tag, such as <think> or [TOOL_CALLS]: it carries structure rather than text. */
static bool is_tag(struct gguf_str s) {
    return s.n > 1 && ((s.p[0] == '<' && s.p[s.n - 1] == '>') || (s.p[0] == '[' && s.p[s.n - 1] == ']'));
}

/* Binary search: the first of special[lo, hi), all longer than `depth` and equal before it, with a byte >= b there. */
static uint32_t special_lower(const struct vocab *v, uint32_t lo, uint32_t hi, size_t depth, int b) {
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((uint8_t)v->special[mid].text.p[depth] < b) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

/* Whether n bytes of text with these origins may become special token `id`: the rules stand above tokenize. */
static bool special_allowed(const struct vocab *v, int32_t id, const uint8_t *origin, size_t n, unsigned flags) {
    if (v->type[id] != TOKEN_USER_DEFINED) {
        if (!(flags & TOKENIZE_CONTROL)) return false;
    } else if (flags & TOKENIZE_TAGS || !is_tag(v->token[id])) return true;
    return !origin || !memchr(origin, ORIGIN_DATA, n);
}

/* Finds the longest special token that flags and origin allow at the start of text (n bytes). Returns its id and *len,
 * or -1. */
static int32_t special_match(const struct vocab *v, const char *text, size_t n, const uint8_t *origin, unsigned flags,
                             size_t *len) {
    uint32_t lo = v->special_first[(uint8_t)text[0]], hi = v->special_first[(uint8_t)text[0] + 1];
    int32_t best = -1;
    for (size_t depth = 1; lo < hi; depth++) {
        for (; lo < hi && v->special[lo].text.n == depth; lo++)
            if ((best < 0 || *len < depth) && special_allowed(v, v->special[lo].id, origin, depth, flags)) {
                best = v->special[lo].id;
                *len = depth;
            }
        if (depth == n) break;
        uint8_t b = (uint8_t)text[depth];
        lo = special_lower(v, lo, hi, depth, b);
        hi = special_lower(v, lo, hi, depth, b + 1);
    }
    return best;
}

/* ---- merging ---- */

/* A symbol of the piece that is being merged. Symbol i begins at byte i of the piece. One that its left neighbor has
 * absorbed keeps its place in the array, with RANK_NONE. */
struct bpe_symbol {
    int32_t id;          /* -1: a byte without a token */
    int32_t rank;        /* of the merge with the next symbol, or RANK_NONE */
    int32_t merged;      /* the token that this merge gives */
    uint32_t prev, next; /* neighbors; next of the last symbol is the length of the piece */
};

/* The working state of one call of tokenize. All arrays are stb_ds's. */
struct tokenizer {
    const struct vocab *v;
    struct bpe_symbol *symbols;
    uint64_t *heap; /* min-heap of possible merges, rank << 32 | symbol; stale if the symbol's rank is another by now */
    size_t *ends, *cut; /* offsets at which pieces end, before and after an expression */
    pcre2_match_data *match;
    int32_t **out; /* the array that receives the ids */
};

/* Adds an element to a binary min-heap. */
static void heap_push(uint64_t **heap, uint64_t x) {
    arrput(*heap, x);
    uint64_t *h = *heap;
    size_t i = arrlenu(h) - 1;
    for (; i && h[(i - 1) / 2] > x; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = x;
}

/* Removes the smallest element and returns it. */
static uint64_t heap_pop(uint64_t *h) {
    uint64_t top = h[0], x = arrpop(h);
    size_t n = arrlenu(h), i = 0;
    for (size_t c = 1; c < n; c = 2 * i + 1) {
        c += c + 1 < n && h[c + 1] < h[c];
        if (h[c] >= x) break;
        h[i] = h[c];
        i = c;
    }
    if (n) h[i] = x;
    return top;
}

/* Finds the merge of symbol i with its right neighbor, in a piece of n bytes, and puts it on the heap. */
static void bpe_rate(struct tokenizer *t, const char *piece, uint32_t n, uint32_t i) {
    const struct vocab *v = t->v;
    struct bpe_symbol *s = &t->symbols[i], *r = &t->symbols[s->next];
    s->rank = RANK_NONE;
    if (s->next == n) return;
    if (v->merges) {
        const struct merge_slot *e = merge_slot(v, (uint64_t)s->id << 32 | (uint32_t)r->id);
        if (e) {
            s->rank = e->rank;
            s->merged = e->id;
        }
    } else {
        s->rank = s->merged = bytes_find(v, piece + i, r->next - i);
    }
    if (s->rank != RANK_NONE) heap_push(&t->heap, (uint64_t)s->rank << 32 | i);
}

/* Appends the tokens of a piece of n bytes: merges the lowest rank first, of equal ranks the leftmost. O(n log n). */
static void bpe_piece(struct tokenizer *t, const char *piece, uint32_t n) {
    const struct vocab *v = t->v;
    if (v->ignore_merges) {
        int32_t id = bytes_find(v, piece, n);
        if (id >= 0) {
            arrput(*t->out, id);
            return;
        }
    }
    arrsetlen(t->symbols, (size_t)n + 1); /* one more: bpe_rate takes the address of the symbol behind the last */
    arrsetlen(t->heap, 0);
    for (uint32_t i = 0; i < n; i++)
        t->symbols[i] = (struct bpe_symbol){
            .id = v->byte_id[(uint8_t)piece[i]], .rank = RANK_NONE, .merged = -1, .prev = i - 1, .next = i + 1};
    for (uint32_t i = 0; i + 1 < n; i++) bpe_rate(t, piece, n, i);
    while (arrlenu(t->heap)) {
        uint64_t best = heap_pop(t->heap);
        uint32_t i = (uint32_t)best;
        struct bpe_symbol *s = &t->symbols[i];
        if (s->rank != (int32_t)(best >> 32)) continue; /* stale */
        struct bpe_symbol *r = &t->symbols[s->next];
        s->id = s->merged;
        s->next = r->next;
        r->rank = RANK_NONE;
        if (s->next < n) t->symbols[s->next].prev = i;
        bpe_rate(t, piece, n, i);
        if (i) bpe_rate(t, piece, n, s->prev); /* only symbol 0, which is never absorbed, has none before it */
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
        while (done < n) {
            const int rc =
                pcre2_match(expr, (PCRE2_SPTR)text + begin, n, done, PCRE2_NO_UTF_CHECK, t->match, t->v->match_context);
            if (rc == PCRE2_ERROR_NOMEMORY) die("out of memory for the tokenizer");
            if (rc <= 0 || ov[1] <= done) break;
            if (ov[0] > done) arrput(t->cut, begin + ov[0]);
            arrput(t->cut, begin + ov[1]);
            done = ov[1];
        }
        if (done < n) arrput(t->cut, begin + n);
    }
    size_t *swap = t->ends;
    t->ends = t->cut;
    t->cut = swap;
}

/* Whether the canonical decomposition of a character begins with a combining mark. The Tibetan signs U+0F73, U+0F75 and
 * U+0F81 have class 0, but decompose into two marks; Unicode promises that no others will. */
static bool is_nfc_mark(utf8proc_int32_t cp) {
    return utf8proc_get_property(cp)->combining_class || cp == 0xf73 || cp == 0xf75 || cp == 0xf81;
}

/* Appends the NFC form of valid UTF-8. Normalizes a run of combining marks NFC_MAX_MARKS at a time. */
static void nfc_append(char **out, const char *s, size_t n) {
    for (size_t end = 0, marks = 0; n; s += end, n -= end, end = marks = 0) {
        for (utf8proc_int32_t cp; end < n && marks < NFC_MAX_MARKS;) {
            end += (size_t)utf8proc_iterate((const uint8_t *)s + end, (utf8proc_ssize_t)(n - end), &cp);
            marks = is_nfc_mark(cp) ? marks + 1 : 0;
        }
        uint8_t *nfc = NULL;
        utf8proc_ssize_t k =
            utf8proc_map((const uint8_t *)s, (utf8proc_ssize_t)end, &nfc, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        if (k < 0) die("cannot normalize %zu bytes to NFC: %s", end, utf8proc_errmsg(k));
        sb_put(out, (const char *)nfc, (size_t)k);
        free(nfc);
    }
}

/* Whether NFC leaves a text as it is because all characters are below U+0300: those are in NFC, and stay so side by
 * side. The UTF-8 of the others begins with 0xcc or above. */
static bool is_trivially_nfc(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)s[i] >= 0xcc) return false;
    return true;
}

/* Appends the tokens of valid UTF-8 without special tokens. */
static void tokenize_valid(struct tokenizer *t, const char *s, size_t n) {
    char *nfc = NULL;
    if (t->v->nfc && !is_trivially_nfc(s, n)) {
        nfc_append(&nfc, s, n);
        s = nfc;
        n = arrlenu(nfc);
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

/* Appends the tokens of bytes without special tokens. A byte that is not valid UTF-8 is a piece of its own. */
static void tokenize_stretch(struct tokenizer *t, const char *s, size_t n) {
    for (size_t end = 0; n; s += end, n -= end, end = 0) {
        for (int k; end < n && (k = (uint8_t)s[end] < 0x80 ? 1 : utf8_sequence(s + end, n - end)) > 0;)
            end += (size_t)k;
        if (end) tokenize_valid(t, s, end);
        else bpe_piece(t, s, end = 1);
    }
}

/* Appends the tokens of n bytes of text to the stb_ds array *out. Any bytes are allowed. origin: (n) ORIGIN_* of every
 * byte, or NULL if all are the template's. At each byte from left to right, the longest special token that is allowed
 * is recognized:
 *   control       only with TOKENIZE_CONTROL, and only if every byte is the template's
 *   user-defined  always; if it looks like a tag and one of its bytes is data, only with TOKENIZE_TAGS */
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
    arrfree(t.symbols);
    arrfree(t.heap);
    arrfree(t.ends);
    arrfree(t.cut);
}

/* ---- tokens to text ---- */

/* Turns a stream of tokens into whole UTF-8 sequences. `pending` holds the first n bytes of an incomplete one. */
struct detok {
    uint8_t pending[4];
    int n;
};

static const char utf8_replacement[] = "\xef\xbf\xbd";

/* Ends the stream. A sequence that was cut off becomes U+FFFD. */
static void detok_end(struct detok *d, char **out) {
    if (d->n) sb_puts(out, utf8_replacement);
    d->n = 0;
}

/* Appends what one more token completes. Malformed bytes become U+FFFD, one for each maximal subpart (Unicode 3.9,
 * table 3-8), as with Python's errors="replace" over the whole stream. */
static void detok_put(const struct vocab *v, struct detok *d, int32_t id, char **out) {
    struct gguf_str s = vocab_bytes(v, id);
    for (size_t i = 0; i < s.n; i++) {
        d->pending[d->n++] = (uint8_t)s.p[i];
        int k = utf8_sequence((const char *)d->pending, (size_t)d->n);
        if (k < 0 && d->n > 1) { /* what was pending is malformed; this byte begins a new sequence */
            sb_puts(out, utf8_replacement);
            d->pending[0] = (uint8_t)s.p[i];
            d->n = 1;
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
 * A model file carries a chat template: Jinja source that turns a conversation into the text of a prompt. The sections
 * "Chat template" interpret it. They give, byte for byte, what Python's jinja2 3.1 gives in the environment of Hugging
 * Face transformers (immutable sandbox, trim_blocks, lstrip_blocks, loopcontrols):
 *
 *   source --lexer--> tokens --parser--> tree of struct node --rendering--> text with the origin of every byte
 *
 * Values. A value is a struct tv, passed by value: a kind, and a number, a string or a pointer to a container. Strings
 * and containers are shared and never change once they are made; only a namespace is assigned to, and only a generator
 * is used up.
 *
 * Origin. Beside the bytes of every string stands an array with the origin of each: ORIGIN_TEMPLATE if the template
 * wrote it, ORIGIN_DATA if it came from `messages`, `tools` or `documents`. Every operation copies the origins with the
 * bytes, and what it makes of data, such as the digits of a number, is data. So what a user typed never becomes
 * template text, the only text in which control tokens are recognized.
 *
 * Evaluation. node_eval computes the value of an expression by recursion over its tree. node_exec runs a statement,
 * which prints to j->out. Variables live in a chain of scopes. Filters, tests, methods and global functions are C
 * functions in one table.
 *
 * Limits and errors. Templates come from model files and are not trusted: nesting, recursion, steps, text and memory
 * are limited. All memory comes from a pool that lives as long as the parsed template, or as one rendering. An error
 * leaves by longjmp to job_run, and template_parse or template_render frees the pool. Nothing here knows about models
 * or tokens.
 * ============================================================================================================ */

/* Text with the origin of every byte. */
struct text {
    char *s;         /* stb_ds array, without a NUL */
    uint8_t *origin; /* stb_ds array of the same length: ORIGIN_* of every byte */
};

static void text_free(struct text *t) {
    arrfree(t->s);
    arrfree(t->origin);
}

enum {
    TEMPLATE_NESTING = 200,     /* blocks, brackets and operators inside each other in the source */
    TEMPLATE_DEPTH = 1000,      /* levels of evaluation: recursive macros, nested data */
    TEMPLATE_RANGE = 100000,    /* elements of a range(), as in jinja2's sandbox */
    TEMPLATE_STEPS = 50000000,  /* see job_charge */
    TEMPLATE_TEXT = 128 << 20,  /* bytes of a string */
    TEMPLATE_MEMORY = 512 << 20 /* bytes of a pool */
};

enum tv_kind {
    TV_ABSENT, /* not a value: an argument that was not passed, a member that was not found */
    TV_UNDEF,  /* prints as nothing; most operations on it are errors */
    TV_NONE,
    TV_BOOL,
    TV_INT,
    TV_FLOAT,
    TV_STR,
    TV_LIST, /* also a range, or the keys, values or items of a dictionary */
    TV_TUPLE,
    TV_GEN, /* a generator: always true, without a length, used up by the first loop over it */
    TV_DICT,
    TV_NAMESPACE, /* the only value whose members can be assigned to */
    TV_FUNC,
    TV_MACRO,
    TV_LOOP
};

/* A template value. */
struct tv {
    uint8_t kind;
    bool data;   /* made from data: all that it prints, punctuation included, is ORIGIN_DATA */
    bool markup; /* a string from `safe` or `escape`: + escapes the other operand */
    union {
        int64_t i; /* TV_BOOL too */
        double f;
        struct list *list; /* TV_LIST ... TV_NAMESPACE */
        const struct func *func;
        const struct macro *macro;
        struct loop *loop;
        struct {              /* TV_STR */
            const char *s;    /* (n); TV_UNDEF: the message for using the value, with a NUL */
            const uint8_t *o; /* (n) ORIGIN_* of every byte */
            size_t n;
        };
    };
};

/* The elements of a container. A dictionary or namespace has its keys and values in turn, in order of insertion. */
struct list {
    struct tv *v;
    size_t n, cap;
};

/* The arguments of a call. */
struct args {
    struct list pos, kw; /* positional arguments; keyword arguments, a dictionary */
    struct tv v[4];      /* by the parameters of the function; TV_ABSENT where not passed */
    int mode;            /* builtin.mode */
    const char *name;    /* of the function, for messages */
};

struct job;

/* A filter, test, method or global function. `self` is the value to the left of the | or the dot. */
struct builtin {
    int where; /* AS_*, OF_*: what the name stands for */
    const char *name;
    const char *sig; /* names of the parameters, `?` behind the optional ones; "*": fn reads pos and kw itself */
    struct tv (*fn)(struct job *j, struct tv self, struct args *a); /* NULL: the immutable sandbox refuses it */
    int mode;                                                       /* tells apart the functions that share fn */
};

/* A built-in function as a value; a method is bound to its object `self`. */
struct func {
    const struct builtin *fn;
    struct tv self;
};

/* A {% macro %}, or the body of a {% call %} block. */
struct macro {
    const struct node *def; /* N_MACRO */
    struct scope *scope;    /* where it was defined */
};

/* The variables of a block. */
struct scope {
    struct scope *up; /* where the look-up goes on; NULL: nowhere */
    struct list vars; /* a dictionary */
};

/* Text that grows, in the pool: (cap) bytes and origins, of which n are used. */
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
    size_t pool_bytes;     /* bytes of the pool and of what from_json parsed */
    const uint8_t *run[2]; /* [i]: (run_n[i]) bytes, all of origin i, which strings share as their origins */
    size_t run_n[2];
    jmp_buf out_of_here;
    char *err;
    int line;           /* of the source, for messages */
    int rc;             /* of job_run */
    int depth;          /* levels of parsing or evaluation */
    const char *stack;  /* where the job's first frame is, */
    size_t stack_bytes; /* and how far below it the last one may be */
    int64_t steps;
    struct scope *scope;
    struct buf *out;
    struct tv captured;  /* the text of a {% set %} or {% filter %} block, for N_CAPTURED */
    struct buf tail[28]; /* [i]: the last text of 2^i to 2^(i + 1) - 1 bytes that tv_concat made */
    json_t **parsed;     /* stb_ds array: what from_json parsed; strings point into it */
};

/* Ends the parse or the rendering with "line N: message". */
__attribute__((format(printf, 2, 3), noreturn)) static void job_fail(struct job *j, const char *fmt, ...) {
    va_list ap;
    int n = snprintf(j->err, ERR_MAX, "line %d: ", j->line);
    va_start(ap, fmt);
    vsnprintf(j->err + n, (size_t)(ERR_MAX - n), fmt, ap);
    va_end(ap);
    message_sanitize(j->err);
    j->rc = -1;
    longjmp(j->out_of_here, 1);
}

/* The first 100 bytes of a string or token, for %.*s. */
#define SHOW(x) (int)((x).n < 100 ? (x).n : 100), (x).s

/* Counts n elementary steps against TEMPLATE_STEPS. Handling 16 bytes of text is one step. */
static void job_charge(struct job *j, size_t n) {
    j->steps += (int64_t)n;
    if (j->steps > TEMPLATE_STEPS) job_fail(j, "the template takes more than %d steps", TEMPLATE_STEPS);
}

/* Fails when recursion has used half of the stack that `ulimit -s` allows. */
static void job_stack(struct job *j) {
    const char *here = __builtin_frame_address(0);
    if ((size_t)(j->stack - here) > j->stack_bytes) job_fail(j, "recursion too deep for the stack (ulimit -s)");
}

/* Enters a level of evaluation; the caller leaves it with j->depth--. */
static void job_enter(struct job *j) {
    if (++j->depth > TEMPLATE_DEPTH) job_fail(j, "recursion deeper than %d levels", TEMPLATE_DEPTH);
    job_stack(j);
    job_charge(j, 1);
}

/* Counts n bytes against TEMPLATE_MEMORY. */
static void job_reserve(struct job *j, size_t n) {
    if (n > TEMPLATE_MEMORY || j->pool_bytes + n > TEMPLATE_MEMORY)
        job_fail(j, "the template needs more than %d MiB", TEMPLATE_MEMORY >> 20);
    j->pool_bytes += n;
}

/* Takes n zeroed bytes from the pool, aligned to 16. */
static void *job_alloc(struct job *j, size_t n) {
    struct pool_block *b = j->pool;
    n = (n + 15) / 16 * 16;
    if (!b || b->size - b->used < n) {
        bool large = b && n > 16384; /* gets its own block; small pieces go on coming from the old one */
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

/* Makes room for one more element of `size` bytes in an array of the pool that has n of them. Returns the array. */
static void *job_grow(struct job *j, void *p, size_t n, size_t *cap, size_t size) {
    if (n < *cap) return p;
    *cap = *cap ? 2 * *cap : 4;
    void *q = job_alloc(j, *cap * size);
    return n ? memcpy(q, p, n * size) : q;
}

/* A string of the n bytes at s, which are not copied, all of one origin. */
static struct tv tv_text(struct job *j, const char *s, size_t n, int origin) {
    if (j->run_n[origin] < n || !j->run[origin]) {
        j->run_n[origin] = n < 1024 ? 1024 : 2 * n;
        j->run[origin] = memset(job_alloc(j, j->run_n[origin]), origin, j->run_n[origin]);
    }
    return (struct tv){.kind = TV_STR, .data = origin == ORIGIN_DATA, .s = s, .o = j->run[origin], .n = n};
}

/* Values of the template's own. The text of tv_lit is not copied. */
static struct tv tv_lit(struct job *j, const char *s) { return tv_text(j, s, strlen(s), ORIGIN_TEMPLATE); }
static struct tv tv_bool(bool b) { return (struct tv){.kind = TV_BOOL, .i = b}; }
static struct tv tv_int(int64_t i) { return (struct tv){.kind = TV_INT, .i = i}; }
static struct tv tv_float(double f) { return (struct tv){.kind = TV_FLOAT, .f = f}; }
static struct tv tv_none(void) { return (struct tv){.kind = TV_NONE}; }

/* An empty container. */
static struct tv tv_list(struct job *j, int kind) {
    return (struct tv){.kind = (uint8_t)kind, .list = job_alloc(j, sizeof(struct list))};
}

/* An undefined value. The message is for an operation that does not accept it. */
__attribute__((format(printf, 2, 3))) static struct tv tv_undef(struct job *j, const char *fmt, ...) {
    char msg[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    return (struct tv){.kind = TV_UNDEF, .s = strcpy(job_alloc(j, strlen(msg) + 1), msg)};
}

/* The bytes [from, to) of a string. */
static struct tv tv_sub(struct tv s, size_t from, size_t to) {
    s.s += from;
    s.o += from;
    s.n = to > from ? to - from : 0;
    return s;
}

/* Whether v is the string s. */
static bool tv_is(struct tv v, const char *s) { return v.kind == TV_STR && v.n == strlen(s) && !memcmp(v.s, s, v.n); }

/* Groups of kinds: v.list holds the elements of a listy value, v.i the number of a whole one. */
static bool tv_listy(struct tv v) { return v.kind >= TV_LIST && v.kind <= TV_GEN; }
static bool tv_whole(struct tv v) { return v.kind == TV_BOOL || v.kind == TV_INT; }
static bool tv_number(struct tv v) { return tv_whole(v) || v.kind == TV_FLOAT; }
static double tv_double(struct tv v) { return v.kind == TV_FLOAT ? v.f : (double)v.i; }

/* Whether v, or a byte of it, is data. */
static bool tv_has_data(struct tv v) { return v.data || (v.kind == TV_STR && v.n && memchr(v.o, ORIGIN_DATA, v.n)); }

/* Appends an element. */
static void list_push(struct job *j, struct list *l, struct tv v) {
    l->v = job_grow(j, l->v, l->n, &l->cap, sizeof *l->v);
    l->v[l->n++] = v;
    job_charge(j, 1);
}

/* Python's name for the type of a value. */
static const char *tv_type(struct tv v) {
    static const char *const name[] = {
        [TV_ABSENT] = "",       [TV_UNDEF] = "Undefined", [TV_NONE] = "NoneType",   [TV_BOOL] = "bool",
        [TV_INT] = "int",       [TV_FLOAT] = "float",     [TV_STR] = "str",         [TV_LIST] = "list",
        [TV_TUPLE] = "tuple",   [TV_GEN] = "generator",   [TV_DICT] = "dict",       [TV_NAMESPACE] = "Namespace",
        [TV_FUNC] = "function", [TV_MACRO] = "Macro",     [TV_LOOP] = "LoopContext"};
    return name[v.kind];
}

/* Fails because v does not support an operation. If v is undefined, shows jinja2's message about that instead. */
__attribute__((format(printf, 3, 4), noreturn)) static void tv_fail(struct job *j, struct tv v, const char *fmt, ...) {
    char msg[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    job_fail(j, "%s", v.kind == TV_UNDEF ? v.s : msg);
}

/* Python's bool(v). */
static bool tv_truthy(struct tv v) {
    if (v.kind == TV_UNDEF || v.kind == TV_NONE) return false;
    if (tv_number(v)) return tv_double(v) != 0;
    if (v.kind == TV_STR) return v.n != 0;
    return !(v.kind == TV_LIST || v.kind == TV_TUPLE || v.kind == TV_DICT) || v.list->n;
}

/* ---- code points ---- */

/* Reads the code point at s (n > 0 bytes) to *cp and returns its length. A byte that is not UTF-8 counts as the code
 * point 0xdc00 + byte, as with Python's surrogateescape. */
static size_t cp_next(const char *s, size_t n, int32_t *cp) {
    *cp = (uint8_t)*s;
    if (*cp < 0x80) return 1;
    int k = utf8_sequence(s, n);
    if (k > 0) return (size_t)utf8proc_iterate((const uint8_t *)s, k, cp);
    *cp += 0xdc00;
    return 1;
}

/* Reads the code point that ends at s + n (n > 0) to *cp and returns its length. */
static size_t cp_prev(const char *s, size_t n, int32_t *cp) {
    size_t k = 1;
    while (k < 4 && k < n && ((uint8_t)s[n - k] & 0xc0) == 0x80) k++;
    if (cp_next(s + n - k, k, cp) == k) return k;
    *cp = 0xdc00 + (uint8_t)s[n - 1];
    return 1;
}

/* Number of code points in n bytes. */
static size_t cp_count(struct job *j, const char *s, size_t n) {
    size_t count = 0;
    int32_t cp;
    job_charge(j, n / 16);
    for (size_t i = 0; i < n; count++) i += cp_next(s + i, n - i, &cp);
    return count;
}

/* Byte offset of code point `number` of a string, or the string's length. */
static size_t cp_offset(struct tv v, int64_t number) {
    size_t i = 0;
    int32_t cp;
    while (number-- > 0 && i < v.n) i += cp_next(v.s + i, v.n - i, &cp);
    return i;
}

/* Python's str.isspace. */
static bool cp_space(int32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

/* Bytes of s that remain without the white space at its end. */
static size_t space_end(const char *s, size_t n) {
    int32_t cp;
    for (size_t k; n; n -= k) {
        k = cp_prev(s, n, &cp);
        if (!cp_space(cp)) break;
    }
    return n;
}

/* Bytes of white space at the start of s. */
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

/* Makes room for `more` bytes, and charges for writing them. */
static void buf_room(struct job *j, struct buf *b, size_t more) {
    job_charge(j, 1 + more / 16);
    if (more > TEMPLATE_TEXT || b->n + more > TEMPLATE_TEXT)
        job_fail(j, "the template makes a text of more than %d MiB", TEMPLATE_TEXT >> 20);
    if (b->n + more <= b->cap) return;
    b->cap = b->n ? 2 * (b->n + more) : more; /* exact at first, since most texts do not grow */
    char *s = job_alloc(j, b->cap);
    uint8_t *o = job_alloc(j, b->cap);
    if (b->n) {
        memcpy(s, b->s, b->n);
        memcpy(o, b->o, b->n);
    }
    b->s = s;
    b->o = o;
}

/* Appends a string with its origins. */
static void buf_put(struct job *j, struct buf *b, struct tv v) {
    buf_room(j, b, v.n);
    if (v.n) {
        memcpy(b->s + b->n, v.s, v.n);
        memcpy(b->o + b->n, v.o, v.n);
    }
    b->n += v.n;
}

/* Appends n bytes, all of one origin. */
static void buf_fill(struct job *j, struct buf *b, const char *s, size_t n, int origin) {
    buf_room(j, b, n);
    if (n) {
        memcpy(b->s + b->n, s, n);
        memset(b->o + b->n, origin, n);
    }
    b->n += n;
}

/* Appends at most 255 bytes of formatted text, all of one origin. */
__attribute__((format(printf, 4, 5))) static void buf_printf(struct job *j, struct buf *b, int origin, const char *fmt,
                                                             ...) {
    char tmp[256];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(tmp, sizeof tmp, fmt, ap);
    va_end(ap);
    buf_fill(j, b, tmp, n < (int)sizeof tmp ? (size_t)n : sizeof tmp - 1, origin);
}

/* Appends a code point. */
static void buf_cp(struct job *j, struct buf *b, int32_t cp, int origin) {
    char u[4];
    buf_fill(j, b, u, (size_t)utf8proc_encode_char(cp, (uint8_t *)u), origin);
}

/* The text as a string, which shares the bytes. */
static struct tv buf_str(const struct buf *b) {
    static const uint8_t none[1];
    if (!b->s) return (struct tv){.kind = TV_STR, .s = "", .o = none};
    return (struct tv){.kind = TV_STR, .s = b->s, .o = b->o, .n = b->n};
}

/* ============================================================================================================
 * Chat template: comparing and printing values
 *
 * Equality and order as Python has them, dictionaries, the elements that a loop sees; then Python's str() and repr(),
 * JSON, and HTML escapes.
 * ============================================================================================================ */

/* ---- equality, order, dictionaries ---- */

static bool tv_eq(struct job *j, struct tv a, struct tv b);

/* Compares two numbers by their exact values. -1, 0 or 1: a is below, equal to or above b; 2: one of them is NaN. */
static int number_order(struct tv a, struct tv b) {
    double x = tv_double(a), y = tv_double(b);
    if (x < y) return -1;
    if (x > y) return 1;
    if (x != y) return 2;
    if (a.kind == TV_FLOAT && b.kind == TV_FLOAT) return 0;
    __int128 i = a.kind == TV_FLOAT ? (__int128)x : a.i;
    __int128 k = b.kind == TV_FLOAT ? (__int128)y : b.i;
    return (i > k) - (i < k);
}

/* Finds the value of a key in a dictionary; NULL: there is none. */
static struct tv *dict_find(struct job *j, const struct list *d, struct tv key) {
    if (key.kind == TV_LIST || key.kind == TV_DICT) job_fail(j, "unhashable type: '%s'", tv_type(key));
    job_charge(j, 1 + d->n / 16);
    for (size_t i = 0; i < d->n; i += 2)
        if (tv_eq(j, d->v[i], key)) return &d->v[i + 1];
    return NULL;
}

/* Sets the value of a key in a dictionary. */
static void dict_set(struct job *j, struct list *d, struct tv key, struct tv v) {
    struct tv *old = dict_find(j, d, key);
    if (old) {
        *old = v;
        return;
    }
    list_push(j, d, key);
    list_push(j, d, v);
}

/* Python's a == b. */
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

/* Python's a < b. Strings compare by bytes, since UTF-8 sorts as its code points do. */
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

/* The elements that a loop over v sees. They must not be modified: the list may be v's own. Uses up a generator. */
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

/* Python's repr(d): the shortest digits that read back as d. */
static void float_repr(double d, char out[40]) {
    int prec = -1;
    if (isnan(d)) {
        strcpy(out, "nan");
        return;
    }
    if (isinf(d)) {
        strcpy(out, d < 0 ? "-inf" : "inf");
        return;
    }
    do snprintf(out, 40, "%.*e", ++prec, d);
    while (prec < 17 && strtod(out, NULL) != d);
    int e = atoi(strchr(out, 'e') + 1);
    if (e >= -4 && e < 16) snprintf(out, 40, "%.*f", prec - e > 1 ? prec - e : 1, d);
}

/* How tv_write prints values: as repr(), or as JSON like json.dumps. */
struct style {
    bool json, ascii, sort; /* JSON; escape all but ASCII; sort the keys */
    struct tv indent;       /* indentation of one level; not a string: everything in one line */
    struct tv comma, colon; /* separators */
};

/* Appends a string in quotes, escaped as by repr() or in JSON. An escape has the origin of what it stands for. */
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

/* Appends a part of the style. In data it is data; else it has its own origin. */
static void write_style(struct job *j, struct buf *b, struct tv part, int origin) {
    if (origin == ORIGIN_DATA) buf_fill(j, b, part.s, part.n, origin);
    else buf_put(j, b, part);
}

/* Starts an indented line, if the style asks for that. */
static void write_newline(struct job *j, struct buf *b, const struct style *st, int level, int origin) {
    if (st->indent.kind != TV_STR) return;
    buf_fill(j, b, "\n", 1, origin);
    while (level--) write_style(j, b, st->indent, origin);
}

/* Appends a container other than a generator. `origin` is that of its punctuation. */
static void write_items(struct job *j, struct buf *b, struct tv v, const struct style *st, int level, int origin) {
    bool dict = v.kind == TV_DICT || v.kind == TV_NAMESPACE, tuple = v.kind == TV_TUPLE && !st->json;
    const char *brackets = dict ? "{}" : "[]";
    if (tuple) brackets = "()";
    struct list *keys = tv_iter(j, dict ? (struct tv){.kind = TV_DICT, .list = v.list} : v), values = {0};
    for (size_t i = 1; dict && i < v.list->n; i += 2) list_push(j, &values, v.list->v[i]);
    if (dict && st->sort) {
        values = *list_sorted(j, &values, keys, false);
        keys = list_sorted(j, keys, keys, false);
    }
    buf_fill(j, b, brackets, 1, origin);
    for (size_t i = 0; i < keys->n; i++) {
        struct tv item = keys->v[i];
        if (i) write_style(j, b, st->comma, origin);
        write_newline(j, b, st, level + 1, origin);
        if (dict) {
            struct buf text = {0};
            if (st->json && item.kind == TV_TUPLE) job_fail(j, "keys must be str, int, float, bool or None, not tuple");
            if (st->json && item.kind != TV_STR) {
                tv_write(j, &text, item, st, 0, origin);
                item = buf_str(&text);
            }
            tv_write(j, b, item, st, level + 1, origin);
            write_style(j, b, st->colon, origin);
            item = values.v[i];
        }
        tv_write(j, b, item, st, level + 1, origin);
    }
    if (tuple && keys->n == 1) buf_fill(j, b, ",", 1, origin);
    if (keys->n) write_newline(j, b, st, level, origin);
    buf_fill(j, b, brackets + 1, 1, origin);
}

/* Appends a value in a style. What is added to data is data; else it has `origin`, which is that of the container. */
static void tv_write(struct job *j, struct buf *b, struct tv v, const struct style *st, int level, int origin) {
    static const char *const bool_name[2][2] = {{"False", "True"}, {"false", "true"}}; /* [JSON][value] */
    char num[40];
    if (v.data) origin = ORIGIN_DATA;
    job_enter(j);
    if (st->json && (v.kind == TV_UNDEF || (v.kind >= TV_GEN && v.kind != TV_DICT)))
        job_fail(j, "Object of type %s is not JSON serializable", tv_type(v));
    switch (v.kind) {
    case TV_STR: write_quoted(j, b, v, st, origin); break;
    case TV_NONE: buf_printf(j, b, origin, st->json ? "null" : "None"); break;
    case TV_BOOL: buf_printf(j, b, origin, "%s", bool_name[st->json][v.i != 0]); break;
    case TV_INT: buf_printf(j, b, origin, "%lld", (long long)v.i); break;
    case TV_FLOAT:
        float_repr(v.f, num);
        if (st->json && isnan(v.f)) strcpy(num, "NaN");
        if (st->json && isinf(v.f)) strcpy(num, v.f < 0 ? "-Infinity" : "Infinity");
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

/* Python's str(v). A string stays as it is; an undefined value is empty. */
static struct tv tv_str(struct job *j, struct tv v) {
    struct style st = {.comma = tv_lit(j, ", "), .colon = tv_lit(j, ": ")};
    struct buf b = {0};
    if (v.kind == TV_STR) return v;
    if (v.kind != TV_UNDEF) tv_write(j, &b, v, &st, 0, ORIGIN_TEMPLATE);
    return buf_str(&b);
}

/* str(v) as markup, with & < > ' and " escaped, unless it is markup already. */
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

/* A value from JSON, all of it data if `data`. Strings point into jansson's tree, which must outlive the job. */
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
 * Chat template: format strings
 *
 * Python's two ways to fill values into a text: the operator % and str.format. Every part of the result keeps its
 * origin.
 * ============================================================================================================ */

/* The integer part of a float. `what` names the operation in the message. */
static int64_t float_int(struct job *j, double f, const char *what) {
    if (!(fabs(f) < 0x1p63)) job_fail(j, "integer overflow in %s", what);
    return (int64_t)f;
}

/* Python's format % args, with %s, %d and %%. */
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

/* ---- str.format ---- */

/* What stands after the colon of a replacement field: [[fill]align][0][width][.precision][type]. The rest of Python's
 * format language (signs, separators, `#`, other types, fields in fields) is refused. */
struct format_spec {
    struct tv fill; /* one code point */
    char align;     /* < left, > right, ^ center, = between sign and digits; 0: not given */
    size_t width;   /* code points; 0: not given */
    int precision;  /* digits behind the point, or the most code points of a string; -1: not given */
    char type;      /* s, d or f; 0: not given */
};

/* Parses the digits at spec[*i] and moves *i behind them. A number above `max` is an error. */
static int64_t format_digits(struct job *j, struct tv spec, size_t *i, int64_t max) {
    int64_t n = 0;
    for (; *i < spec.n && isdigit((uint8_t)spec.s[*i]); ++*i) {
        n = 10 * n + (spec.s[*i] - '0');
        if (n > max) job_fail(j, "a number in the format '%.*s' is larger than %lld", SHOW(spec), (long long)max);
    }
    return n;
}

/* Whether spec[i] is an alignment. */
static bool format_is_align(struct tv spec, size_t i) { return i < spec.n && spec.s[i] && strchr("<>^=", spec.s[i]); }

/* Parses a format. For a number, a 0 before the width pads between sign and digits. */
static struct format_spec format_parse(struct job *j, struct tv spec, bool number) {
    struct format_spec f = {.fill = tv_lit(j, " "), .precision = -1};
    int32_t cp;
    size_t i = 0, first = cp_next(spec.s, spec.n, &cp);
    bool filled = format_is_align(spec, first);
    if (filled) f.fill = tv_sub(spec, 0, first);
    if (filled) i = first;
    if (format_is_align(spec, i)) f.align = spec.s[i++];
    if (!filled && i < spec.n && spec.s[i] == '0') {
        f.fill = tv_lit(j, "0");
        if (!f.align && number) f.align = '=';
        i++;
    }
    f.width = (size_t)format_digits(j, spec, &i, TEMPLATE_TEXT);
    if (i + 1 < spec.n && spec.s[i] == '.' && isdigit((uint8_t)spec.s[i + 1])) {
        i++;
        f.precision = (int)format_digits(j, spec, &i, TEMPLATE_TEXT);
    }
    if (i < spec.n && spec.s[i] && strchr("sdf", spec.s[i])) f.type = spec.s[i++];
    if (i < spec.n) job_fail(j, "the format '%.*s' is not supported", SHOW(spec));
    return f;
}

/* The text of a value without its padding. `origin` is that of the digits of a number. */
static struct tv format_text(struct job *j, struct tv v, struct tv spec, const struct format_spec *f, int origin) {
    char num[512];
    bool str = v.kind == TV_STR, fixed = f->type == 'f' && !str, wrong;
    if (str) wrong = (f->type && f->type != 's') || f->align == '=';
    else if (fixed) wrong = f->precision > 100;
    else wrong = f->precision >= 0 || f->type == 's' || (f->type == 'd' && v.kind == TV_FLOAT);
    if (wrong) job_fail(j, "the format '%.*s' is not supported for an object of type '%s'", SHOW(spec), tv_type(v));
    if (str) return f->precision < 0 ? v : tv_sub(v, 0, cp_offset(v, f->precision));
    if (fixed && isfinite(tv_double(v)))
        snprintf(num, sizeof num, "%.*f", f->precision < 0 ? 6 : f->precision, tv_double(v));
    else if (v.kind == TV_FLOAT) float_repr(v.f, num);
    else snprintf(num, sizeof num, "%lld", (long long)v.i);
    size_t n = strlen(num);
    return tv_text(j, memcpy(job_alloc(j, n), num, n), n, origin);
}

/* Python's format(v, spec). The padding, and the digits of a number, are data if the value or the spec is. */
static struct tv format_value(struct job *j, struct tv v, struct tv spec) {
    struct buf b = {0};
    if (!spec.n) return tv_str(j, v);
    if (v.kind != TV_STR && !tv_number(v)) job_fail(j, "unsupported format string passed to %s.__format__", tv_type(v));
    int origin = tv_has_data(v) || tv_has_data(spec) ? ORIGIN_DATA : ORIGIN_TEMPLATE;
    struct format_spec f = format_parse(j, spec, v.kind != TV_STR);
    struct tv text = format_text(j, v, spec, &f, origin);
    size_t n = cp_count(j, text.s, text.n), pad = f.width > n ? f.width - n : 0, left = 0;
    if (!f.align) f.align = v.kind == TV_STR ? '<' : '>';
    if (f.align == '^') left = pad / 2;
    if (f.align == '>' || f.align == '=') left = pad;
    size_t sign = f.align == '=' && text.s[0] == '-';
    buf_put(j, &b, tv_sub(text, 0, sign));
    for (size_t i = 0; i < left; i++) buf_fill(j, &b, f.fill.s, f.fill.n, origin);
    buf_put(j, &b, tv_sub(text, sign, text.n));
    for (size_t i = left; i < pad; i++) buf_fill(j, &b, f.fill.s, f.fill.n, origin);
    return buf_str(&b);
}

/* The argument that a field names. Fields without a name take the positional arguments in turn, and *next counts them.
 * Python does not allow both those and fields with a number; *next is -1 once there was one with a number. */
static struct tv format_argument(struct job *j, struct args *a, struct tv name, int64_t *next) {
    size_t i = 0;
    int64_t index = format_digits(j, name, &i, INT32_MAX);
    struct tv *v = NULL;
    if (i < name.n) v = dict_find(j, &a->kw, name);
    else {
        if (name.n ? *next > 0 : *next < 0)
            job_fail(j, "cannot switch between automatic field numbering and manual field specification");
        if (name.n) *next = -1;
        else index = (*next)++;
        if (index < (int64_t)a->pos.n) v = &a->pos.v[index];
    }
    if (!v) job_fail(j, "format() has no argument for the field '{%.*s}'", SHOW(name));
    return *v;
}

/* Python's text.format(...): {} and {0} are positional arguments, {name} is a keyword argument, {{ and }} are
 * braces. */
static struct tv f_format(struct job *j, struct tv text, struct args *a) {
    struct buf b = {0};
    int64_t next = 0;
    for (size_t i = 0; i < text.n;) {
        size_t k = i;
        while (k < text.n && text.s[k] != '{' && text.s[k] != '}') k++;
        buf_put(j, &b, tv_sub(text, i, k));
        if (k == text.n) break;
        char brace = text.s[k];
        if (k + 1 < text.n && text.s[k + 1] == brace) {
            buf_put(j, &b, tv_sub(text, k, k + 1));
            i = k + 2;
            continue;
        }
        const char *close = memchr(text.s + k, '}', text.n - k);
        if (brace == '}' || k + 1 == text.n) job_fail(j, "Single '%c' encountered in format string", brace);
        if (!close) job_fail(j, "expected '}' before end of string");
        struct tv field = tv_sub(text, k + 1, (size_t)(close - text.s));
        const char *colon = memchr(field.s, ':', field.n);
        size_t n = colon ? (size_t)(colon - field.s) : field.n;
        struct tv name = tv_sub(field, 0, n), spec = tv_sub(field, colon ? n + 1 : n, field.n);
        if (memchr(field.s, '{', field.n) || memchr(name.s, '!', n) || memchr(name.s, '.', n) || memchr(name.s, '[', n))
            job_fail(j, "the format field '{%.*s}' is not supported", SHOW(field));
        struct tv v = format_argument(j, a, name, &next);
        if (text.markup && v.markup && spec.n)
            job_fail(j, "the format '%.*s' is not supported for markup in markup", SHOW(spec));
        v = format_value(j, v, spec);
        buf_put(j, &b, text.markup ? html_escape(j, v) : v);
        i = (size_t)(close - text.s) + 1;
    }
    struct tv out = buf_str(&b);
    out.markup = text.markup;
    return out;
}

/* ============================================================================================================
 * Chat template: operators
 *
 * Python's operations on values: arithmetic, comparison, `in`, attributes, subscripts, slices. Integers have 64 bits; a
 * result that would need more in Python is an error.
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

/* Precedence of the operators, the loosest first. `not` binds less than a comparison, + less than ~. */
enum { PREC_OR, PREC_AND, PREC_NOT, PREC_COMPARE, PREC_ADD, PREC_CONCAT, PREC_MUL, PREC_POW, PREC_UNARY };

static const struct {
    const char *text;
    int prec;
} op_table[OP_COUNT] = {
    [OP_NONE] = {"", -1},           [OP_OR] = {"or", PREC_OR},           [OP_AND] = {"and", PREC_AND},
    [OP_EQ] = {"==", PREC_COMPARE}, [OP_NE] = {"!=", PREC_COMPARE},      [OP_LT] = {"<", PREC_COMPARE},
    [OP_LE] = {"<=", PREC_COMPARE}, [OP_GT] = {">", PREC_COMPARE},       [OP_GE] = {">=", PREC_COMPARE},
    [OP_IN] = {"in", PREC_COMPARE}, [OP_NOT_IN] = {"not", PREC_COMPARE}, /* the first of its two words */
    [OP_ADD] = {"+", PREC_ADD},     [OP_SUB] = {"-", PREC_ADD},          [OP_CONCAT] = {"~", PREC_CONCAT},
    [OP_MUL] = {"*", PREC_MUL},     [OP_DIV] = {"/", PREC_MUL},          [OP_FLOORDIV] = {"//", PREC_MUL},
    [OP_MOD] = {"%", PREC_MUL},     [OP_POW] = {"**", PREC_POW}};

/* Arithmetic on integers. b is not 0 for // and %, and not negative for **. */
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
    default: /* // and %: round down; the remainder has the sign of b */
        if (b == -1) return op == OP_MOD ? tv_int(0) : int_binary(j, OP_SUB, 0, a);
        r = op == OP_MOD ? a % b : a / b;
        if (a % b && (a < 0) != (b < 0)) r += op == OP_MOD ? b : -1;
    }
    if (over) job_fail(j, "integer overflow in %s", op_table[op].text);
    return tv_int(r);
}

/* Arithmetic on numbers: in integers if both are, else in double. */
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
        if ((x == 0 && y < 0) || (x < 0 && y != floor(y))) job_fail(j, "the result of ** is not a real number");
        return tv_float(pow(x, y));
    default:
        m = fmod(x, y);
        q = (x - m) / y;
        if (m == 0) m = copysign(0, y);
        else if ((m < 0) != (y < 0)) {
            m += y;
            q -= 1;
        }
        if (op == OP_MOD) return tv_float(m);
        if (q == 0) return tv_float(copysign(0, x / y));
        return tv_float(floor(q) + (q - floor(q) > 0.5));
    }
}

/* The result kept for texts of n bytes, n > 0. */
static struct buf *concat_tail(struct job *j, size_t n) { return &j->tail[63 - __builtin_clzll(n)]; }

/* Concatenates two strings. If a is the last result of its size, b is appended to it in place, so that a loop that
 * accumulates a text takes linear time. One result for each power of two is kept, so that short pieces do not displace
 * the text. */
static struct tv tv_concat(struct job *j, struct tv a, struct tv b) {
    if (!a.n || !b.n) return a.n ? a : b;
    struct buf out = {0}, *tail = concat_tail(j, a.n);
    if (tail->s == a.s && tail->o == a.o && tail->n == a.n) {
        out = *tail;
        *tail = (struct buf){0};
    } else {
        out.cap = a.n + b.n;
        out.s = job_alloc(j, out.cap);
        out.o = job_alloc(j, out.cap);
        buf_put(j, &out, a);
    }
    buf_put(j, &out, b);
    *concat_tail(j, out.n) = out;
    return buf_str(&out);
}

/* v * times, of a string, list or tuple. */
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

/* a op b, for arithmetic operators and ~. */
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
    if (op == OP_MUL && tv_whole(a)) { /* 3 * 'x' */
        v = a;
        a = b;
        b = v;
    }
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

/* Byte offset of the first or last `sub` in s, or -1. Charges for the part of s that was searched. */
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
    size_t looked_at = s.n;
    if (at >= 0) looked_at = last ? s.n - (size_t)at : (size_t)at;
    job_charge(j, looked_at / 16);
    return at;
}

/* Python's `x in y`. */
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

/* a op b, for comparisons. */
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

/* A bound of a slice of n elements, clamped to [low, high]; `none` if it was left out. A negative one counts from the
 * end. */
static int64_t slice_index(struct job *j, struct tv v, int64_t n, int64_t none, int64_t low, int64_t high) {
    if (v.kind == TV_NONE) return none;
    if (!tv_whole(v)) job_fail(j, "slice indices must be integers or None");
    int64_t i = v.i < 0 ? v.i + n : v.i;
    if (i < low) return low;
    return i > high ? high : i;
}

/* v[start:stop:step], with TV_NONE for what is left out. Counts code points in strings. */
static struct tv tv_slice(struct job *j, struct tv v, struct tv start, struct tv stop, struct tv by) {
    bool str = v.kind == TV_STR;
    if (!str && v.kind != TV_LIST && v.kind != TV_TUPLE) tv_fail(j, v, "'%s' object cannot be sliced", tv_type(v));
    int64_t n = (int64_t)(str ? cp_count(j, v.s, v.n) : v.list->n);
    int64_t step = slice_index(j, by, 0, 1, INT64_MIN, INT64_MAX);
    if (!step) job_fail(j, "slice step cannot be zero");
    int64_t low = step < 0 ? -1 : 0;
    int64_t high = step < 0 ? n - 1 : n;
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

/* What Python's getattr finds: a method, a member of a namespace or of `loop`. TV_ABSENT: nothing. */
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
    int64_t n = (int64_t)(str ? cp_count(j, o.s, o.n) : o.list->n);
    int64_t i = key.i < 0 ? key.i + n : key.i;
    if (i < 0 || i >= n) return (struct tv){0};
    if (!str) return o.list->v[i];
    o = tv_sub(o, cp_offset(o, i), o.n);
    return tv_sub(o, 0, cp_offset(o, 1));
}

/* o.key (attribute) or o[key]. The first looks for an attribute and then for an element, the second the other way
 * round. Undefined if there is neither. */
static struct tv tv_get(struct job *j, struct tv o, struct tv key, bool attribute) {
    const char *owner = o.kind == TV_NONE ? "None" : tv_type(o);
    const char *object = o.kind == TV_NONE ? "" : " object";
    if (o.kind == TV_UNDEF) job_fail(j, "%s", o.s);
    struct tv v = attribute ? tv_member(j, o, key) : tv_element(j, o, key);
    if (!v.kind && key.kind == TV_STR) v = attribute ? tv_element(j, o, key) : tv_member(j, o, key);
    if (v.kind) return v;
    if (key.kind == TV_STR) return tv_undef(j, "'%s%s' has no attribute '%.*s'", owner, object, SHOW(key));
    key = tv_str(j, key);
    return tv_undef(j, "%s%s has no element %.*s", owner, object, SHOW(key));
}

/* ============================================================================================================
 * Chat template: functions on strings
 *
 * A built-in function is a C function fn(job, self, args). Its prefix tells what a name in a template calls: f_ a
 * filter or method, t_ a test, g_ a global function, l_ a method of `loop`. One without a comment does what Python or
 * jinja2 document for its name. Functions that share their code are told apart by a->mode.
 *
 * This section binds arguments to parameters; then come the functions on strings.
 * ============================================================================================================ */

/* Binds the arguments to the parameters of f, in a->v. */
static void args_bind(struct job *j, const struct builtin *f, struct args *a) {
    size_t n = 0, used = 0;
    a->mode = f->mode;
    a->name = f->name;
    if (!strcmp(f->sig, "*")) return;
    for (const char *p = f->sig; *p; n++) {
        size_t k = strcspn(p, " ?");
        struct tv *kw = n < a->pos.n ? NULL : dict_find(j, &a->kw, tv_text(j, p, k, ORIGIN_TEMPLATE));
        a->v[n] = (struct tv){0};
        if (n < a->pos.n) a->v[n] = a->pos.v[n];
        else if (kw) a->v[n] = *kw;
        if (!a->v[n].kind && p[k] != '?') job_fail(j, "%s() needs an argument '%.*s'", f->name, (int)k, p);
        used += kw != NULL;
        p += k + strspn(p + k, " ?");
    }
    if (a->pos.n > n) job_fail(j, "%s() takes at most %zu arguments, not %zu", f->name, n, a->pos.n);
    if (2 * used < a->kw.n)
        job_fail(j, "%s() got a keyword twice, or one that is not a parameter (%s)", f->name, f->sig);
}

/* The steps that looking at all of v takes. */
static size_t tv_size(struct tv v) {
    if (v.kind == TV_STR) return v.n / 16;
    return tv_listy(v) || v.kind == TV_DICT ? v.list->n : 0;
}

/* Calls a built-in function. Charges for looking at self and each positional argument once. */
static struct tv builtin_call(struct job *j, const struct builtin *f, struct tv self, struct args *a) {
    job_enter(j); /* map can apply map */
    args_bind(j, f, a);
    job_charge(j, tv_size(self));
    for (size_t i = 0; i < a->pos.n; i++) job_charge(j, tv_size(a->pos.v[i]));
    struct tv v = f->fn(j, self, a);
    j->depth--;
    return v;
}

/* Argument i as a bool; false if it was not passed. */
static bool arg_bool(struct args *a, int i) { return a->v[i].kind && tv_truthy(a->v[i]); }

/* Argument i as an integer; `none` if it is None or was not passed. */
static int64_t arg_int(struct job *j, struct args *a, int i, int64_t none) {
    struct tv v = a->v[i];
    if (!v.kind || v.kind == TV_NONE) return none;
    if (!tv_whole(v)) tv_fail(j, v, "%s(): '%s' is not an integer", a->name, tv_type(v));
    return v.i;
}

/* Argument i, which must be a string. */
static struct tv arg_str(struct job *j, struct args *a, int i) {
    if (a->v[i].kind != TV_STR) tv_fail(j, a->v[i], "%s(): '%s' is not a string", a->name, tv_type(a->v[i]));
    return a->v[i];
}

enum { CASE_UPPER, CASE_LOWER, CASE_CAPITALIZE, CASE_TITLE, CASE_TITLE_FILTER };

/* Whether a code point has upper and lower case. */
static bool cp_cased(int32_t cp) {
    int c = utf8proc_category(cp);
    return c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LL || c == UTF8PROC_CATEGORY_LT;
}

/* Changes the case: upper, lower, capitalize, str.title, and the filter title, for which a word begins after white
 * space or one of -({[<. Each code point maps to one, except the German sharp s. */
static struct tv str_case(struct job *j, struct tv v, int mode) {
    struct buf b = {0};
    bool start = true; /* at the start of a word, or of the string for capitalize */
    bool upper = mode == CASE_UPPER || mode == CASE_TITLE_FILTER;
    int32_t cp;
    for (size_t i = 0, k; i < v.n; i += k) {
        k = cp_next(v.s + i, v.n - i, &cp);
        bool up = mode == CASE_UPPER || (mode != CASE_LOWER && start);
        start = mode == CASE_TITLE
                    ? !cp_cased(cp)
                    : mode == CASE_TITLE_FILTER && (cp_space(cp) || strchr("-({[<", cp < 0x80 && cp ? cp : 'x'));
        int32_t to = utf8proc_tolower(cp);
        if (up) to = upper ? utf8proc_toupper(cp) : utf8proc_totitle(cp);
        if (cp == 0xdf && up) buf_printf(j, &b, v.o[i], upper ? "SS" : "Ss");
        else if (to == cp) buf_put(j, &b, tv_sub(v, i, i + k));
        else buf_cp(j, &b, to, v.o[i]);
    }
    return buf_str(&b);
}

static struct tv f_case(struct job *j, struct tv self, struct args *a) { return str_case(j, tv_str(j, self), a->mode); }

enum { STRIP_LEFT = 1, STRIP_RIGHT = 2, STRIP_BOTH = 3 };

/* strip, lstrip, rstrip, trim. */
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

/* Splits at runs of white space, at most `max` times. The rest keeps the white space at its far end. */
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
    size_t n = words.n, cut = right ? n - max : max; /* first word of the unsplit rest; right: first word behind it */
    for (size_t i = 0; i < n; i++) {
        struct tv w = words.v[i];
        if (n <= max || (right ? i >= cut : i < cut)) list_push(j, out, w);
        else if (right ? i + 1 == cut : i == cut)
            list_push(j, out, right ? tv_sub(v, 0, (size_t)(w.s + w.n - v.s)) : tv_sub(v, (size_t)(w.s - v.s), v.n));
    }
}

/* split, rsplit. */
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
        out.list->v[i] = out.list->v[n - 1 - i];
        out.list->v[n - 1 - i] = t;
    }
    return out;
}

/* Splits at every line end that Python knows. */
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

/* replace(old, new, count). */
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

/* items|join(sep, attribute) or, with mode 1, sep.join(items), whose items must be strings. */
static struct tv f_join(struct job *j, struct tv self, struct args *a) {
    bool method = a->mode;
    const struct list *l = tv_iter(j, method ? a->v[0] : self);
    struct tv sep = tv_lit(j, "");
    if (method) sep = self;
    else if (a->v[0].kind) sep = tv_str(j, a->v[0]);
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

/* startswith and endswith, of a string or one of a tuple; removeprefix, removesuffix. */
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
    if (!found) return v;
    return end ? tv_sub(v, 0, v.n - affix.n) : tv_sub(v, affix.n, v.n);
}

enum { FIND_FIRST, FIND_LAST, FIND_COUNT, FIND_MUST = 4 };

/* find, rfind, index, rindex, count. Positions count code points. */
static struct tv f_find(struct job *j, struct tv v, struct args *a) {
    struct tv sub = arg_str(j, a, 0), none = tv_none();
    struct tv start = a->v[1].kind ? a->v[1] : none;
    struct tv stop = a->v[2].kind ? a->v[2] : none;
    struct tv in = tv_slice(j, v, start, stop, none);
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

/* Python's str.isalpha and so on: there is a code point, and all of them qualify. For isupper and islower only those
 * with case matter. */
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

/* string, safe, escape. */
static struct tv f_string(struct job *j, struct tv self, struct args *a) {
    if (a->mode == STRING_ESCAPE) return html_escape(j, self);
    struct tv v = tv_str(j, self);
    v.markup |= a->mode == STRING_SAFE;
    return v;
}

/* ============================================================================================================
 * Chat template: functions on sequences
 *
 * More filters and methods: conversion and rounding of numbers, then what lists, tuples, generators and dictionaries
 * offer, then JSON.
 * ============================================================================================================ */

/* ---- numbers ---- */

static struct tv f_abs(struct job *j, struct tv v, struct args *a) {
    if (!tv_number(v)) tv_fail(j, v, "bad operand type for %s(): '%s'", a->name, tv_type(v));
    if (v.kind == TV_FLOAT) v.f = fabs(v.f);
    else {
        if (v.i < 0) v.i = int_binary(j, OP_SUB, 0, v.i).i;
        v.kind = TV_INT;
    }
    return v;
}

/* Reads a string as Python's int() or float() does: an integer if it is written as one. TV_NONE: it is not a number. */
static struct tv str_number(struct tv v) {
    char tmp[64], *end;
    v = tv_sub(v, space_start(v.s, v.n), space_end(v.s, v.n));
    if (!v.n || v.n >= sizeof tmp) return tv_none();
    size_t n = 0;
    for (size_t i = 0; i < v.n; i++) /* without the _ of 1_000 */
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

/* int and, with mode 1, float. */
static struct tv f_number(struct job *j, struct tv v, struct args *a) {
    bool to_float = a->mode, data = tv_has_data(v);
    struct tv none = to_float ? tv_float(0) : tv_int(0), n;
    if (a->v[0].kind) none = a->v[0];
    if (v.kind == TV_UNDEF) job_fail(j, "%s", v.s);
    if (v.kind == TV_STR) v = str_number(v);
    if (!tv_number(v) || (!to_float && v.kind == TV_FLOAT && !isfinite(v.f))) return none;
    if (to_float) n = tv_float(tv_double(v));
    else n = tv_int(tv_whole(v) ? v.i : float_int(j, v.f, "int()"));
    n.data = data;
    return n;
}

/* Python's round(i, digits): halves go to the even neighbor. */
static struct tv int_round(struct job *j, int64_t i, int64_t digits) {
    __int128 x = i, p = 1, r;
    for (; digits < 0 && p < (__int128)1e20; digits++) p *= 10;
    r = x % p;
    x -= r;
    __int128 twice = r < 0 ? -2 * r : 2 * r;
    if (twice > p - (x / p & 1)) x += r < 0 ? -p : p;
    if (x != (int64_t)x) job_fail(j, "integer overflow in round()");
    return tv_int((int64_t)x);
}

/* Python's round(d, digits): by the exact value of d, halves go to the even neighbor. */
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

/* Follows a path such as a.b.0, the attribute= of filters. Without a path, item itself. */
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

/* What an element is sorted by: itself or an attribute; strings in lower case unless case_sensitive. */
static struct tv sort_key(struct job *j, struct tv item, struct tv path, bool case_sensitive) {
    if (path.kind == TV_STR && memchr(path.s, ',', path.n))
        job_fail(j, "several attributes to sort by are not supported");
    struct tv v = attribute_path(j, item, path);
    return v.kind == TV_STR && !case_sensitive ? str_case(j, v, CASE_LOWER) : v;
}

/* Sorts l by keys, one for each element: a stable merge sort. With `reverse`, equal elements keep their order, too. */
static struct list *list_sorted(struct job *j, const struct list *l, const struct list *keys, bool reverse) {
    struct list *out = job_alloc(j, sizeof *out);
    size_t *at = job_alloc(j, 2 * l->n * sizeof *at), *to = at + l->n;
    for (size_t i = 0; i < l->n; i++) at[i] = i;
    for (size_t width = 1; width < l->n; width *= 2) {
        for (size_t from = 0; from < l->n; from += 2 * width) {
            size_t mid = from + width < l->n ? from + width : l->n;
            size_t end = mid + width < l->n ? mid + width : l->n;
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
        at = to;
        to = t;
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

/* keys, values, items. */
static struct tv f_items(struct job *j, struct tv self, struct args *a) {
    struct tv out = tv_list(j, a->mode == DICT_ITEMS_FILTER ? TV_GEN : TV_LIST);
    if (self.kind == TV_UNDEF && a->mode == DICT_ITEMS_FILTER) return out;
    if (self.kind != TV_DICT) tv_fail(j, self, "Can only get item pairs from a mapping.");
    for (size_t i = 0; i < self.list->n; i += 2) {
        struct tv item = self.list->v[a->mode == DICT_KEYS ? i : i + 1];
        if (a->mode >= DICT_ITEMS) {
            item = tv_list(j, TV_TUPLE);
            list_push(j, item.list, self.list->v[i]);
            list_push(j, item.list, self.list->v[i + 1]);
        }
        list_push(j, out.list, item);
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
    if (v) return *v;
    return a->v[1].kind ? a->v[1] : tv_none();
}

/* first and, with mode 1, last. */
static struct tv f_end(struct job *j, struct tv self, struct args *a) {
    if (a->mode && self.kind == TV_GEN) job_fail(j, "'generator' object is not reversible");
    struct list *l = self.kind == TV_GEN ? self.list : tv_iter(j, self);
    if (!l->n) return tv_undef(j, "No %s item, sequence was empty.", a->name);
    struct tv v = l->v[a->mode ? l->n - 1 : 0];
    if (self.kind == TV_GEN) {
        l->v++;
        l->n--;
        l->cap = l->n;
    }
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

/* min and, with mode 1, max. */
static struct tv f_minmax(struct job *j, struct tv self, struct args *a) {
    const struct list *l = tv_iter(j, self);
    struct tv best = tv_undef(j, "No aggregated item, sequence was empty."), best_key = best;
    for (size_t i = 0; i < l->n; i++) {
        struct tv key = sort_key(j, l->v[i], a->v[1], arg_bool(a, 0));
        if (i && !(a->mode ? tv_less(j, best_key, key) : tv_less(j, key, best_key))) continue;
        best = l->v[i];
        best_key = key;
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

/* What a name of a built-in function stands for: a filter, a test, a global function, or a method of a type. */
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

/* Finds the filter or test that map, select and so on apply to every element. */
static const struct builtin *builtin_named(struct job *j, int where, struct tv name) {
    const struct builtin *f = name.kind == TV_STR ? builtin_find(where, name) : NULL;
    name = tv_str(j, name);
    if (!f) job_fail(j, "No %s named '%.*s'.", where == AS_FILTER ? "filter" : "test", SHOW(name));
    return f;
}

/* map(filter, arguments) or map(attribute=path, default=value). */
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

/* select, reject, selectattr, rejectattr. Without a test, the truth of the element or attribute decides. */
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

/* index and, with mode 1, count, of a list or tuple. */
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

/* The tojson of transformers: json.dumps without HTML escapes, ensure_ascii off. */
static struct tv f_tojson(struct job *j, struct tv self, struct args *a) {
    struct tv indent = a->v[1].kind ? a->v[1] : tv_none(), sep = a->v[2];
    struct style st = {.json = true, .indent = indent, .ascii = arg_bool(a, 0), .sort = arg_bool(a, 3)};
    struct buf b = {0};
    if (indent.kind != TV_NONE && indent.kind != TV_STR) st.indent = tv_repeat(j, tv_lit(j, " "), arg_int(j, a, 1, 0));
    st.comma = tv_lit(j, indent.kind == TV_NONE ? ", " : ",");
    st.colon = tv_lit(j, ": ");
    if (sep.kind && sep.kind != TV_NONE) {
        const struct list *l = tv_iter(j, sep);
        if (l->n != 2 || l->v[0].kind != TV_STR || l->v[1].kind != TV_STR)
            job_fail(j, "tojson: separators must be two strings");
        st.comma = l->v[0];
        st.colon = l->v[1];
    }
    tv_write(j, &b, self, &st, 0, ORIGIN_TEMPLATE);
    return buf_str(&b);
}

static struct tv f_from_json(struct job *j, struct tv self, struct args *a) {
    json_error_t e;
    self = tv_str(j, self);
    job_reserve(j, 80 * self.n); /* jansson's tree is not in the pool; `{},` needs the most per byte */
    json_t *json = json_loadb(self.s, self.n, JSON_DECODE_ANY, &e);
    if (!json) job_fail(j, "%s: %s at byte %d", a->name, e.text, e.position);
    arrput(j->parsed, json);
    return tv_json(j, json, tv_has_data(self));
}

/* ============================================================================================================
 * Chat template: tests, globals, builtins
 *
 * The other built-in functions, and the table of all. The parser finds filters and tests in it by name, rendering finds
 * global functions, and subscripts find methods.
 * ============================================================================================================ */

/* ---- tests ---- */

#define KIND(k)        (1 << TV_##k)
#define KINDS_SEQUENCE (KIND(LIST) | KIND(TUPLE) | KIND(STR) | KIND(DICT) | KIND(UNDEF))
#define KINDS_CALLABLE (KIND(FUNC) | KIND(MACRO) | KIND(LOOP) | KIND(UNDEF))
#define KINDS_NUMBER   (KIND(INT) | KIND(FLOAT) | KIND(BOOL))

/* Whether the kind of v is in the set of kinds `mode`. */
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

/* odd, even, divisibleby: whether the remainder is `mode`. */
static struct tv t_remainder(struct job *j, struct tv v, struct args *a) {
    struct tv by = a->v[0].kind ? a->v[0] : tv_int(2);
    return tv_bool(tv_eq(j, tv_binary(j, OP_MOD, v, by), tv_int(a->mode)));
}

static struct tv t_sameas(struct job *j, struct tv v, struct args *a) {
    (void)j;
    struct tv w = a->v[0];
    bool same = v.kind == w.kind && (v.kind == TV_NONE || v.list == w.list); /* the union holds a pointer or a number */
    return tv_bool(same && (v.kind != TV_STR || v.n == w.n));
}

/* ---- globals and loop ---- */

/* range(stop) or range(start, stop, step), made at once as a list. */
static struct tv g_range(struct job *j, struct tv self, struct args *a) {
    (void)self;
    bool two = a->v[1].kind;
    int64_t from = two ? arg_int(j, a, 0, 0) : 0;
    int64_t to = arg_int(j, a, two ? 1 : 0, 0);
    int64_t step = arg_int(j, a, 2, 1);
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

/* dict(...) and namespace(...): a mapping, then keywords. The mode is the kind of the result. */
static struct tv g_dict(struct job *j, struct tv self, struct args *a) {
    (void)self;
    struct tv out = tv_list(j, a->mode);
    if (a->pos.n > 1 || (a->pos.n && a->pos.v[0].kind != TV_DICT))
        job_fail(j, "%s() takes one mapping and keywords", a->name);
    for (size_t i = 0; a->pos.n && i < a->pos.v[0].list->n; i++) list_push(j, out.list, a->pos.v[0].list->v[i]);
    for (size_t i = 0; i < a->kw.n; i += 2) dict_set(j, out.list, a->kw.v[i], a->kw.v[i + 1]);
    return out;
}

/* raise_exception(message): the error is the message, without "line N:". */
__attribute__((noreturn)) static struct tv g_raise(struct job *j, struct tv self, struct args *a) {
    (void)self;
    struct tv v = tv_str(j, a->v[0]);
    snprintf(j->err, ERR_MAX, "%.*s", v.n < ERR_MAX ? (int)v.n : ERR_MAX, v.s);
    j->rc = -2;
    longjmp(j->out_of_here, 1);
}

static struct tv *variable_find(struct job *j, struct tv name);

/* strftime_now(format), by the strftime of the C library. The time is the variable `now` if that is a string. */
static struct tv g_strftime(struct job *j, struct tv self, struct args *a) {
    (void)self;
    struct tv f = arg_str(j, a, 0), *now = variable_find(j, tv_lit(j, "now"));
    struct tm t = {0};
    time_t seconds = time(NULL);
    char format[512], text[4096], iso[32] = "";
    if (f.n + 2 > sizeof format || memchr(f.s, 0, f.n)) job_fail(j, "strftime_now: the format is too long");
    /* strftime returns 0 for an empty text and for an error; with a dot at its end no text is empty */
    snprintf(format, sizeof format, "%.*s.", (int)f.n, f.s);
    if (now && now->kind == TV_STR) {
        snprintf(iso, sizeof iso, "%.*s", SHOW(*now));
        int n = sscanf(iso, "%4d-%2d-%2d%*1[T ]%2d:%2d:%2d", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour, &t.tm_min,
                       &t.tm_sec);
        if (n < 3 || t.tm_year < 0 || t.tm_mon < 1 || t.tm_mon > 12)
            job_fail(j, "now: expected YYYY-MM-DDTHH:MM:SS, found '%s'", iso);
        t.tm_year -= 1900;
        t.tm_mon--;
        timegm(&t); /* fills in the day of the week and of the year */
    } else localtime_r(&seconds, &t);
    size_t n = strftime(text, sizeof text, format, &t);
    if (!n--) job_fail(j, "strftime_now: the text is longer than %zu bytes", sizeof text - 2);
    return tv_text(j, memcpy(job_alloc(j, n + 1), text, n), n, tv_has_data(f));
}

/* The variable `loop`. */
struct loop {
    const struct list *src;           /* what is looped over */
    size_t at;                        /* elements taken from src */
    const struct node *target, *test; /* test: the `if`, evaluated when an element is taken; NULL: none */
    struct scope *outer;              /* the scope around the loop */
    struct tv prev, cur, next;        /* next: TV_ABSENT, or an element that was taken ahead of its turn */
    int64_t index0;                   /* of cur */
};

static bool loop_take(struct job *j, struct loop *l, struct tv *out);

/* Whether there is another element; takes it ahead of its turn. */
static bool loop_peek(struct job *j, struct loop *l) { return l->next.kind || loop_take(j, l, &l->next); }

/* Number of elements. With an `if`, the test of all that are left is evaluated now. */
static int64_t loop_length(struct job *j, struct loop *l) {
    struct list *rest = job_alloc(j, sizeof *rest);
    struct tv v;
    while (l->test && loop_take(j, l, &v)) list_push(j, rest, v);
    if (l->test) {
        l->src = rest;
        l->at = 0;
        l->test = NULL;
    }
    return (int64_t)(l->src->n - l->at) + l->index0 + 1 + (l->next.kind != TV_ABSENT);
}

/* A member of `loop`; TV_ABSENT: there is none of this name. */
static struct tv loop_get(struct job *j, struct loop *l, struct tv key) {
    if (tv_is(key, "index0")) return tv_int(l->index0);
    if (tv_is(key, "index")) return tv_int(l->index0 + 1);
    if (tv_is(key, "depth0") || tv_is(key, "depth")) return tv_int(key.n == 5); /* 1 and 0: loops are not recursive */
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
/* where, name, parameters, function, mode */
static const struct builtin builtins[] = {
    {AS_FILTER, "abs", "", f_abs, 0},                        {AS_FILTER, "count", "", f_length, 0},
    {AS_FILTER, "d", "default_value? boolean?", f_default, 0},
    {AS_FILTER, "default", "default_value? boolean?", f_default, 0},
    {AS_FILTER, "dictsort", "case_sensitive? by? reverse?", f_dictsort, 0},
    {AS_FILTER, "e", "", f_string, STRING_ESCAPE},           {AS_FILTER, "escape", "", f_string, STRING_ESCAPE},
    {AS_FILTER, "first", "", f_end, 0},                      {AS_FILTER, "last", "", f_end, 1},
    {AS_FILTER, "float", "default?", f_number, 1},           {AS_FILTER, "int", "default?", f_number, 0},
    {AS_FILTER, "from_json", "", f_from_json, 0},            {AS_FILTER, "indent", "width? first? blank?", f_indent, 0},
    {AS_FILTER, "items", "", f_items, DICT_ITEMS_FILTER},    {AS_FILTER, "join", "d? attribute?", f_join, 0},
    {AS_FILTER, "length", "", f_length, 0},                  {AS_FILTER, "list", "", f_list, 0},
    {AS_FILTER, "map", "*", f_map, 0},
    {AS_FILTER, "max", "case_sensitive? attribute?", f_minmax, 1},
    {AS_FILTER, "min", "case_sensitive? attribute?", f_minmax, 0},
    {AS_FILTER, "reject", "*", f_select, SELECT_REJECT},
    {AS_FILTER, "rejectattr", "*", f_select, SELECT_REJECT | SELECT_BY_ATTRIBUTE},
    {AS_FILTER, "reverse", "", f_reverse, 0},                {AS_FILTER, "round", "precision? method?", f_round, 0},
    {AS_FILTER, "safe", "", f_string, STRING_SAFE},          {AS_FILTER, "string", "", f_string, STRING_PLAIN},
    {AS_FILTER, "select", "*", f_select, 0},
    {AS_FILTER, "selectattr", "*", f_select, SELECT_BY_ATTRIBUTE},
    {AS_FILTER, "sort", "reverse? case_sensitive? attribute?", f_sort, 0},
    {AS_FILTER, "sum", "attribute? start?", f_sum, 0},       {AS_FILTER, "title", "", f_case, CASE_TITLE_FILTER},
    {AS_FILTER, "tojson", "ensure_ascii? indent? separators? sort_keys?", f_tojson, 0},
    {AS_FILTER, "trim", "chars?", f_strip, STRIP_BOTH},
    {AS_FILTER, "unique", "case_sensitive? attribute?", f_unique, 0},

    {AS_FILTER | OF_STR, "capitalize", "", f_case, CASE_CAPITALIZE},
    {AS_FILTER | OF_STR, "lower", "", f_case, CASE_LOWER},   {AS_FILTER | OF_STR, "upper", "", f_case, CASE_UPPER},
    {AS_FILTER | OF_STR, "replace", "old new count?", f_replace, 0},
    {OF_STR, "count", "sub start? end?", f_find, FIND_COUNT},
    {OF_STR, "format", "*", f_format, 0},                    {OF_STR, "find", "sub start? end?", f_find, FIND_FIRST},
    {OF_STR, "index", "sub start? end?", f_find, FIND_FIRST | FIND_MUST},
    {OF_STR, "rfind", "sub start? end?", f_find, FIND_LAST},
    {OF_STR, "rindex", "sub start? end?", f_find, FIND_LAST | FIND_MUST},
    {OF_STR, "startswith", "prefix", f_affix, AFFIX_STARTS}, {OF_STR, "endswith", "suffix", f_affix, AFFIX_ENDS},
    {OF_STR, "removeprefix", "prefix", f_affix, AFFIX_REMOVE_PREFIX},
    {OF_STR, "removesuffix", "suffix", f_affix, AFFIX_REMOVE_SUFFIX},
    {OF_STR, "isalnum", "", f_str_is, IS_ALNUM},             {OF_STR, "isalpha", "", f_str_is, IS_ALPHA},
    {OF_STR, "isdigit", "", f_str_is, IS_DIGIT},             {OF_STR, "isspace", "", f_str_is, IS_SPACE},
    {OF_STR, "islower", "", f_str_is, IS_LOWER},             {OF_STR, "isupper", "", f_str_is, IS_UPPER},
    {OF_STR, "join", "iterable", f_join, 1},                 {OF_STR, "title", "", f_case, CASE_TITLE},
    {OF_STR, "lstrip", "chars?", f_strip, STRIP_LEFT},       {OF_STR, "rstrip", "chars?", f_strip, STRIP_RIGHT},
    {OF_STR, "strip", "chars?", f_strip, STRIP_BOTH},        {OF_STR, "splitlines", "keepends?", f_splitlines, 0},
    {OF_STR, "split", "sep? maxsplit?", f_split, 0},         {OF_STR, "rsplit", "sep? maxsplit?", f_split, 1},

    {OF_DICT, "get", "key default?", f_get, 0},              {OF_DICT, "items", "", f_items, DICT_ITEMS},
    {OF_DICT, "keys", "", f_items, DICT_KEYS},               {OF_DICT, "values", "", f_items, DICT_VALUES},
    {OF_DICT | OF_LIST, "clear", "", NULL, 0},               {OF_DICT | OF_LIST, "pop", "", NULL, 0},
    {OF_DICT, "popitem", "", NULL, 0},                       {OF_DICT, "setdefault", "", NULL, 0},
    {OF_DICT, "update", "", NULL, 0},                        {OF_LIST, "append", "", NULL, 0},
    {OF_LIST, "extend", "", NULL, 0},                        {OF_LIST, "insert", "", NULL, 0},
    {OF_LIST, "remove", "", NULL, 0},                        {OF_LIST, "reverse", "", NULL, 0},
    {OF_LIST, "sort", "", NULL, 0},                          {OF_LOOP, "cycle", "*", l_cycle, 0},
    {OF_LIST | OF_TUPLE, "count", "value", f_index, 1},      {OF_LIST | OF_TUPLE, "index", "value", f_index, 0},

    {AS_TEST, "==", "other", t_compare, OP_EQ},              {AS_TEST, "!=", "other", t_compare, OP_NE},
    {AS_TEST, "<", "other", t_compare, OP_LT},               {AS_TEST, "<=", "other", t_compare, OP_LE},
    {AS_TEST, ">", "other", t_compare, OP_GT},               {AS_TEST, ">=", "other", t_compare, OP_GE},
    {AS_TEST, "eq", "other", t_compare, OP_EQ},              {AS_TEST, "equalto", "other", t_compare, OP_EQ},
    {AS_TEST, "ne", "other", t_compare, OP_NE},              {AS_TEST, "lt", "other", t_compare, OP_LT},
    {AS_TEST, "lessthan", "other", t_compare, OP_LT},        {AS_TEST, "le", "other", t_compare, OP_LE},
    {AS_TEST, "gt", "other", t_compare, OP_GT},              {AS_TEST, "greaterthan", "other", t_compare, OP_GT},
    {AS_TEST, "ge", "other", t_compare, OP_GE},              {AS_TEST, "in", "seq", t_compare, OP_IN},
    {AS_TEST, "divisibleby", "num", t_remainder, 0},         {AS_TEST, "even", "", t_remainder, 0},
    {AS_TEST, "odd", "", t_remainder, 1},                    {AS_TEST, "sameas", "other", t_sameas, 0},
    {AS_TEST, "true", "", t_bool, 1},                        {AS_TEST, "false", "", t_bool, 0},
    {AS_TEST, "lower", "", f_str_is, IS_LOWER},              {AS_TEST, "upper", "", f_str_is, IS_UPPER},
    {AS_TEST, "boolean", "", t_kind, KIND(BOOL)},            {AS_TEST, "callable", "", t_kind, KINDS_CALLABLE},
    {AS_TEST, "defined", "", t_kind, ~KIND(UNDEF)},          {AS_TEST, "undefined", "", t_kind, KIND(UNDEF)},
    {AS_TEST, "float", "", t_kind, KIND(FLOAT)},             {AS_TEST, "integer", "", t_kind, KIND(INT)},
    {AS_TEST, "mapping", "", t_kind, KIND(DICT)},            {AS_TEST, "none", "", t_kind, KIND(NONE)},
    {AS_TEST, "number", "", t_kind, KINDS_NUMBER},           {AS_TEST, "string", "", t_kind, KIND(STR)},
    {AS_TEST, "sequence", "", t_kind, KINDS_SEQUENCE},
    {AS_TEST, "iterable", "", t_kind, KINDS_SEQUENCE | KIND(GEN) | KIND(LOOP)},

    {AS_GLOBAL, "dict", "*", g_dict, TV_DICT},               {AS_GLOBAL, "namespace", "*", g_dict, TV_NAMESPACE},
    {AS_GLOBAL, "raise_exception", "message", g_raise, 0},   {AS_GLOBAL, "range", "start stop? step?", g_range, 0},
    {AS_GLOBAL, "strftime_now", "format", g_strftime, 0},
};
/* clang-format on */

/* Finds a built-in function by its name; NULL: there is none. */
static const struct builtin *builtin_find(int where, struct tv name) {
    for (size_t i = 0; i < sizeof builtins / sizeof builtins[0]; i++)
        if (builtins[i].where & where && tv_is(name, builtins[i].name)) return &builtins[i];
    return NULL;
}

/* Finds a method of a value; NULL: there is none. */
static const struct builtin *method_find(struct tv o, struct tv name) {
    static const int of[] = {
        [TV_STR] = OF_STR, [TV_LIST] = OF_LIST, [TV_TUPLE] = OF_TUPLE, [TV_DICT] = OF_DICT, [TV_LOOP] = OF_LOOP};
    return of[o.kind] ? builtin_find(of[o.kind], name) : NULL;
}

/* ============================================================================================================
 * Chat template: lexer
 *
 * Cuts the source into tokens and applies the white space rules: trim_blocks, lstrip_blocks, and the signs - and + in
 * tags. Tokens point into the source, which lives in the pool of the template.
 * ============================================================================================================ */

enum token_kind {
    T_EOF,
    T_DATA,      /* text outside of tags */
    T_VAR,       /* {{ */
    T_VAR_END,   /* }} */
    T_BLOCK,     /* {% */
    T_BLOCK_END, /* %} */
    T_WORD,      /* a name, keyword or operator */
    T_STRING,
    T_INT,
    T_FLOAT
};

/* The text of a token; of a string without the quotes. */
struct token {
    int kind, line;
    const char *s;
    size_t n;
};

struct lexer {
    struct job *j;
    const char *s; /* (n) the source; line ends are \n */
    size_t n, at;
    bool line_start;     /* the last token ended with a line end */
    struct token *token; /* (cap), of which `tokens` are used */
    size_t tokens, cap;
};

/* Whether s stands at `at`. */
static bool lex_is(const struct lexer *l, size_t at, const char *s) {
    size_t k = strlen(s);
    return at <= l->n && l->n - at >= k && !memcmp(l->s + at, s, k);
}

/* Whether one of the characters of `set` stands at `at`. */
static bool lex_any(const struct lexer *l, size_t at, const char *set) {
    return at < l->n && l->s[at] && strchr(set, l->s[at]);
}

/* Moves on by n bytes, counting lines. */
static void lex_skip(struct lexer *l, size_t n) {
    for (; n; n--, l->at++) l->j->line += l->line_start = l->s[l->at] == '\n';
}

/* Adds the next n bytes as a token and moves on. Its text is without the `edge` bytes (quotes) at both ends. */
static void lex_token(struct lexer *l, int kind, size_t n, size_t edge) {
    l->token = job_grow(l->j, l->token, l->tokens, &l->cap, sizeof *l->token);
    l->token[l->tokens++] = (struct token){kind, l->j->line, l->s + l->at + edge, n - 2 * edge};
    lex_skip(l, n);
}

/* Whether the byte at `at` may be part of a name. One of a character above 0x7f may, unless that is white space. */
static bool lex_name(const struct lexer *l, size_t at) {
    if (at >= l->n || !(l->s[at] & 0x80)) return at < l->n && (isalnum((uint8_t)l->s[at]) || l->s[at] == '_');
    return !space_start(l->s + at, l->n - at);
}

/* Offset after the white space at `at`. */
static size_t lex_space(const struct lexer *l, size_t at) { return at + space_start(l->s + at, l->n - at); }

/* Adds the text up to `to`, where a tag with this sign begins. A - removes the white space before the tag. Without a
 * sign, lstrip_blocks removes the blanks before a tag that is the first in its line, but not before {{ (var). */
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

/* If the end of a tag stands at `at`, returns the offset behind it and the white space that it removes; else 0. A -
 * removes all white space. With `trim` (blocks and comments) trim_blocks removes one line end, unless there is a +. */
static size_t lex_end(const struct lexer *l, size_t at, const char *end, bool trim) {
    bool plus = trim && lex_is(l, at, "+"), minus = lex_is(l, at, "-");
    at += plus || minus ? 1 : 0;
    if (!lex_is(l, at, end)) return 0;
    if (minus) return lex_space(l, at + 2);
    return at + (trim && !plus && lex_is(l, at + 2, "\n") ? 3 : 2);
}

/* The sign at `at`, or 0. */
static char lex_sign(const struct lexer *l, size_t at) { return lex_any(l, at, "-+") ? l->s[at] : 0; }

/* If {% raw %} or {% endraw %}, as `word` says, stands at `at`, returns the offset behind it; else 0. */
static size_t lex_raw(const struct lexer *l, size_t at, const char *word) {
    bool end = word[0] == 'e';
    if (!lex_is(l, at, "{%")) return 0;
    at = lex_space(l, at + (lex_sign(l, at + 2) ? 3 : 2));
    if (!lex_is(l, at, word)) return 0;
    return lex_end(l, lex_space(l, at + strlen(word)), "%}", end);
}

/* Adds a number. An integer only, if it is after a dot: a.0.1 has no 0.1. */
static void lex_number(struct lexer *l) {
    static const char digits[] = "0123456789";
    size_t k = l->at, e;
    bool element = k && l->s[k - 1] == '.', real = false;
    while (lex_any(l, k, digits)) k++;
    if (!element && lex_is(l, k, ".") && lex_any(l, k + 1, digits))
        for (real = true, k++; lex_any(l, k, digits);) k++;
    e = k + (lex_sign(l, k + 1) ? 2 : 1);
    if (!element && lex_any(l, k, "eE") && lex_any(l, e, digits))
        for (real = true, k = e; lex_any(l, k, digits);) k++;
    lex_token(l, real ? T_FLOAT : T_INT, k - l->at, 0);
}

/* Checks that brackets match. open: (TEMPLATE_NESTING) the closing brackets that are awaited, of which *depth are
 * used. */
static void lex_bracket(struct lexer *l, char *open, size_t *depth) {
    char c = l->s[l->at];
    if (strchr("([{", c)) {
        if (*depth == TEMPLATE_NESTING) job_fail(l->j, "more than %d brackets inside each other", TEMPLATE_NESTING);
        char close = '}';
        if (c == '(') close = ')';
        if (c == '[') close = ']';
        open[(*depth)++] = close;
    } else if (strchr(")]}", c) && (!*depth || open[--*depth] != c)) job_fail(l->j, "unexpected '%c'", c);
}

/* Adds the tokens of a tag behind its beginning, and its end. Inside brackets, }} and %} are not the end. */
static void lex_tag(struct lexer *l, bool var) {
    static const char two[][3] = {"//", "**", "==", "!=", ">=", "<="};
    char open[TEMPLATE_NESTING];
    const char *close = var ? "}}" : "%}";
    size_t depth = 0, k, end = 0;
    while (!end) {
        lex_skip(l, lex_space(l, l->at) - l->at);
        size_t at = l->at, n = 1;
        char c = at < l->n ? l->s[at] : 0;
        end = depth ? 0 : lex_end(l, at, close, !var);
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

/* Skips the rest of a comment. */
static void lex_comment(struct lexer *l) {
    for (size_t at = l->at; at < l->n; at++) {
        size_t end = lex_end(l, at, "#}", true);
        if (!end) continue;
        lex_skip(l, end - l->at);
        return;
    }
    job_fail(l->j, "missing end of comment");
}

/* Adds the tokens of the whole source. */
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
        if (tag == '#') lex_skip(l, 2);
        else lex_token(l, tag == '{' ? T_VAR : T_BLOCK, 2, 0);
        if (sign) lex_skip(l, 1);
        if (tag == '#') lex_comment(l);
        else lex_tag(l, tag == '{');
    }
}

/* ============================================================================================================
 * Chat template: parsing expressions
 *
 * A parser by recursive descent that makes a tree of nodes from tokens: parse_expr (a if b else c) calls parse_binary
 * (operators by precedence), which calls parse_unary (signs, filters, tests), parse_postfix (subscripts, calls) and
 * parse_primary. Filters and tests are looked up here. Nodes live in the pool of the template. No node is higher than
 * TEMPLATE_NESTING, so whatever walks the tree may recurse.
 * ============================================================================================================ */

/* Expressions, then statements. The kids stand in brackets. A body is an N_BODY; a target of an assignment is an
 * N_NAME, an N_MEMBER or an N_TUPLE of targets. */
enum node_kind {
    N_CONST,
    N_NAME,
    N_LIST,
    N_TUPLE,
    N_DICT,     /* [key, value, key, value, ...] */
    N_ATTR,     /* [object], val is the name */
    N_ITEM,     /* [object, key] */
    N_SLICE,    /* [object, start, stop, step], the last three may be NULL */
    N_CALL,     /* [callee, arguments] */
    N_FILTER,   /* [value, arguments]; fn, or NULL and a name that is unknown */
    N_TEST,     /* as N_FILTER */
    N_KEYWORD,  /* val=[value] in arguments, val[=value] in the parameters of a macro */
    N_NOT,      /* [operand] */
    N_NEG,      /* [operand] */
    N_POS,      /* [operand] */
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
    uint8_t kind, op; /* enum node_kind, enum op */
    int line, height; /* height: nodes on the longest path down, this one included */
    const struct builtin *fn;
    struct tv val;     /* of a constant, or a name */
    struct node **kid; /* (cap), of which n are used */
    size_t n, cap;
};

/* A filter or test that does not exist is an error of the source. In a condition it fails when it is evaluated, as in
 * jinja2: parse_expr and parse_if take it off `unknown` again. */
struct parser {
    struct job *j;
    const struct token *at; /* the current token */
    int loops;              /* number of loops around the current place, in the same macro */
    struct list unknown;    /* names and lines of filters and tests that do not exist */
};

/* A node without kids, at the current line. */
static struct node *node_new(struct parser *p, int kind) {
    struct node *n = job_alloc(p->j, sizeof *n);
    n->kind = (uint8_t)kind;
    n->line = p->at->line;
    n->height = 1;
    return n;
}

/* Adds a kid, or NULL for one that was left out. Returns n. */
static struct node *node_add(struct parser *p, struct node *n, struct node *kid) {
    n->kid = job_grow(p->j, n->kid, n->n, &n->cap, sizeof *n->kid);
    n->kid[n->n++] = kid;
    if (kid && kid->height >= n->height) n->height = kid->height + 1;
    if (n->height > TEMPLATE_NESTING)
        job_fail(p->j, "more than %d operators or blocks inside each other", TEMPLATE_NESTING);
    return n;
}

/* Enters a level of recursion; the caller leaves it with j->depth--. */
static void parse_nest(struct parser *p) {
    if (++p->j->depth > TEMPLATE_NESTING)
        job_fail(p->j, "more than %d operators or blocks inside each other", TEMPLATE_NESTING);
    job_stack(p->j);
}

/* Whether a token is the word s; tok_is: whether the current one is. */
static bool tok_equal(const struct token *t, const char *s) {
    return t->kind == T_WORD && t->n == strlen(s) && !memcmp(t->s, s, t->n);
}

static bool tok_is(const struct parser *p, const char *s) { return tok_equal(p->at, s); }

/* Moves to the next token. */
static void tok_next(struct parser *p) {
    if (p->at->kind != T_EOF) p->at++;
    p->j->line = p->at->line;
}

/* Moves on if the current token is the word s. Returns whether it was. */
static bool tok_skip(struct parser *p, const char *s) {
    bool is = tok_is(p, s);
    if (is) tok_next(p);
    return is;
}

/* Fails at the current token. */
__attribute__((noreturn)) static void tok_unexpected(struct parser *p, const char *expected) {
    if (p->at->kind == T_EOF) job_fail(p->j, "expected %s, found the end of the template", expected);
    job_fail(p->j, "expected %s, found '%.*s'", expected, SHOW(*p->at));
}

/* Moves on after the word s, which must be here. */
static void tok_expect(struct parser *p, const char *s) {
    if (!tok_skip(p, s)) tok_unexpected(p, s);
}

/* Moves on after the end of a tag, which must be here. */
static void tok_end(struct parser *p, int kind) {
    if (p->at->kind != kind) tok_unexpected(p, "the end of the tag");
    tok_next(p);
}

/* Whether the current token is a name or keyword. */
static bool tok_is_name(const struct parser *p) {
    return p->at->kind == T_WORD && (isalpha((uint8_t)*p->at->s) || *p->at->s == '_' || *p->at->s & 0x80);
}

/* Moves on after a name and returns it. */
static struct tv tok_name(struct parser *p) {
    const struct token *t = p->at;
    if (!tok_is_name(p)) tok_unexpected(p, "a name");
    tok_next(p);
    return tv_text(p->j, t->s, t->n, ORIGIN_TEMPLATE);
}

/* Appends what an escape sequence of a Python string means; s[i] is behind its backslash. Returns the offset behind
 * it. */
static size_t parse_escape(struct parser *p, struct buf *b, const char *s, size_t n, size_t i) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = s[i], digits[9] = "";
    const char *known = c ? strchr(from, c) : NULL;
    bool octal = c >= '0' && c <= '7';
    size_t want = 0, k = 0, start = i + !octal; /* digits; 0: not an escape with digits */
    if (octal) want = 3;
    if (c == 'x') want = 2;
    if (c == 'u') want = 4;
    if (c == 'U') want = 8;
    if (known) buf_fill(p->j, b, to + (known - from), 1, ORIGIN_TEMPLATE);
    if (c == 'N') job_fail(p->j, "the escape \\N is not supported");
    if (known || c == '\n') return i + 1;
    if (!want) { /* not an escape */
        buf_fill(p->j, b, s + i - 1, 2, ORIGIN_TEMPLATE);
        return i + 1;
    }
    while (k < want && start + k < n &&
           (octal ? s[start + k] >= '0' && s[start + k] <= '7' : isxdigit((uint8_t)s[start + k]))) {
        digits[k] = s[start + k];
        k++;
    }
    unsigned long cp = strtoul(digits, NULL, octal ? 8 : 16);
    if ((!octal && k < want) || cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
        job_fail(p->j, "malformed \\%c escape", c);
    buf_cp(p->j, b, (int32_t)cp, ORIGIN_TEMPLATE);
    return start + k;
}

/* Parses one string, or several in a row, which Python joins. */
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

/* Parses an integer or a float. */
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
static struct node *parse_binary(struct parser *p, int prec);
static struct node *parse_primary(struct parser *p, int flags);

/* What parse_tuple and the functions below it accept. */
enum {
    WITH_COND = 1,    /* a if b else c */
    MAY_BE_EMPTY = 2, /* () */
    IS_TARGET = 4,    /* only targets of an assignment */
    MAY_BE_MEMBER = 8 /* ns.member among these */
};

/* Parses one expression, or several with commas between them, which make a tuple. */
static struct node *parse_tuple(struct parser *p, int flags) {
    struct node *tuple = node_new(p, N_TUPLE), *first = NULL;
    for (bool comma = false;; comma = true) {
        int k = p->at->kind;
        bool end = k == T_VAR_END || k == T_BLOCK_END || tok_is(p, ")") || (flags & IS_TARGET && tok_is(p, "in"));
        if (!end) {
            if (flags & IS_TARGET) first = parse_primary(p, flags);
            else if (flags & WITH_COND) first = parse_expr(p);
            else first = parse_binary(p, PREC_OR);
            node_add(p, tuple, first);
        }
        if (!end && tok_skip(p, ",")) continue;
        if (comma || (!first && flags & MAY_BE_EMPTY)) return tuple;
        if (!first) tok_unexpected(p, "an expression");
        return first;
    }
}

/* Parses [a, b] or {k: v}. */
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

/* Parses a variable, a constant (true, false, none), or ns.member. */
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

/* Parses a name, a literal, a list, a dictionary, or what stands in parentheses. */
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

/* Parses arguments (a, b, k=v), or the parameters (a, b=v) of a macro, and adds them to the kids of n. */
static struct node *parse_args(struct parser *p, struct node *n, bool macro) {
    bool keywords = false;
    size_t first = n->n;
    parse_nest(p);
    for (tok_expect(p, "("); !tok_is(p, ")");) {
        if (n->n > first) tok_expect(p, ",");
        if (tok_is(p, ")")) break;
        bool keyword = tok_is_name(p) && tok_equal(p->at + 1, "=");
        struct node *arg = keyword || macro ? node_new(p, N_KEYWORD) : parse_expr(p);
        if (keywords && !keyword) job_fail(p->j, "positional argument follows keyword argument");
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

/* Parses .name, .0, [key] or [start:stop:step] after an object. */
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

/* Parses the subscripts and calls after an object. */
static struct node *parse_postfix(struct parser *p, struct node *n) {
    for (;;) {
        if (tok_is(p, ".") || tok_is(p, "[")) n = parse_subscript(p, n);
        else if (tok_is(p, "(")) n = parse_args(p, node_add(p, node_new(p, N_CALL), n), false);
        else return n;
    }
}

/* Makes a node for the filter or test whose name comes next, applied to value. It may not exist: see struct parser. */
static struct node *parse_callee(struct parser *p, int kind, struct node *value) {
    struct node *n = node_add(p, node_new(p, kind), value);
    n->val = tok_name(p);
    n->fn = builtin_find(kind == N_FILTER ? AS_FILTER : AS_TEST, n->val);
    if (n->fn) return n;
    list_push(p->j, &p->unknown, n->val);
    list_push(p->j, &p->unknown, tv_int(n->line));
    return n;
}

/* Parses name(arguments), then | and more filters. */
static struct node *parse_filter(struct parser *p, struct node *value) {
    do {
        value = parse_callee(p, N_FILTER, value);
        if (tok_is(p, "(")) parse_args(p, value, false);
    } while (tok_skip(p, "|"));
    return value;
}

/* Parses a test behind `is`: `not`, the name, and an argument that may stand without parentheses. */
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

/* Parses an operand with its signs, filters and tests. A sign binds closer than a filter: -1|abs is (-1)|abs. */
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

/* Moves on after an operator of this precedence and returns it; OP_NONE: there is none here. */
static enum op parse_operator(struct parser *p, int prec) {
    for (int op = OP_OR; op < OP_COUNT; op++) {
        if (op_table[op].prec != prec || !tok_is(p, op_table[op].text)) continue;
        if (op == OP_NOT_IN && !tok_equal(p->at + 1, "in")) continue;
        tok_next(p);
        if (op == OP_NOT_IN) tok_next(p);
        return (enum op)op;
    }
    return OP_NONE;
}

/* Parses operators of this precedence and tighter ones. All are left-associative, even **, as in jinja2. a < b < c
 * becomes a < b and b < c. */
static struct node *parse_binary(struct parser *p, int prec) {
    struct node *left, *n, *middle = NULL;
    if (prec == PREC_UNARY) return parse_unary(p, true);
    if (prec == PREC_NOT && tok_is(p, "not")) {
        n = node_new(p, N_NOT);
        parse_nest(p);
        tok_next(p);
        node_add(p, n, parse_binary(p, prec));
        p->j->depth--;
        return n;
    }
    left = parse_binary(p, prec + 1);
    for (enum op op; (op = parse_operator(p, prec)) != OP_NONE;) {
        struct node *right = parse_binary(p, prec + 1);
        n = node_add(p, node_add(p, node_new(p, N_BINARY), middle ? middle : left), right);
        n->op = (uint8_t)op;
        if (middle) {
            n = node_add(p, node_add(p, node_new(p, N_BINARY), left), n);
            n->op = OP_AND;
        }
        if (prec == PREC_COMPARE) middle = right;
        left = n;
    }
    return left;
}

/* Parses an expression, with any `if` and `else` behind it. */
static struct node *parse_expr(struct parser *p) {
    size_t known = p->unknown.n;
    parse_nest(p);
    struct node *then = parse_binary(p, PREC_OR);
    while (tok_is(p, "if")) {
        struct node *n = node_new(p, N_COND);
        tok_next(p);
        node_add(p, n, parse_binary(p, PREC_OR));
        node_add(p, n, then);
        then = node_add(p, n, tok_skip(p, "else") ? parse_expr(p) : NULL);
        p->unknown.n = known;
    }
    p->j->depth--;
    return then;
}

/* ============================================================================================================
 * Chat template: parsing statements
 *
 * parse_statement finds the function for a statement by the first word of its tag. That function gets a new node,
 * parses the rest of the tag, the body and the closing tag, adds them to the node, and returns it. parse_source is the
 * entry point.
 * ============================================================================================================ */

static struct node *parse_body(struct parser *p, const char *ends);

/* Parses the end of the current tag and the body behind it, which becomes a kid of n. Stops at the name of one of the
 * tags in `ends`. */
static struct node *parse_block(struct parser *p, struct node *n, const char *ends) {
    tok_skip(p, ":");
    tok_end(p, T_BLOCK_END);
    parse_nest(p);
    node_add(p, n, parse_body(p, ends));
    p->j->depth--;
    return n;
}

/* The same up to the closing tag `end`, whose name is skipped. */
static struct node *parse_last_block(struct parser *p, struct node *n, const char *end) {
    parse_block(p, n, end);
    tok_next(p);
    return n;
}

/* Fails unless n can be assigned to. */
static void check_target(struct parser *p, const struct node *n) {
    if (n->kind == N_NAME && tv_is(n->val, "loop") && p->loops) job_fail(p->j, "Can't assign to special loop variable");
    if (n->kind != N_NAME && n->kind != N_MEMBER && n->kind != N_TUPLE) tok_unexpected(p, "a name to assign to");
    for (size_t i = 0; i < n->n && n->kind == N_TUPLE; i++) check_target(p, n->kid[i]);
}

/* Parses the target of an assignment. */
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

/* {% generation %} marks the assistant's text for training; here it is only a scope. */
static struct node *parse_generation(struct parser *p, struct node *n) {
    return parse_last_block(p, n, "endgeneration");
}

static struct node *parse_jump(struct parser *p, struct node *n) {
    if (!p->loops) job_fail(p->j, "'%s' outside of a loop", n->kind == N_BREAK ? "break" : "continue");
    return n;
}

/* Parses the statement whose tag has just been opened. */
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

/* Parses text, {{ }} and statements, up to a tag named in `ends`; NULL: up to the end of the template. */
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

/* A parsed template. */
struct template {
    struct pool_block *pool;
    struct node *body;
};

/* What template_parse hands to parse_source. */
struct source {
    const char *s;
    size_t n;
    struct template *t;
};

/* Makes the tree of a template. Runs inside job_run. */
static void parse_source(struct job *j, void *arg) {
    struct source *src = arg;
    struct lexer l = {.j = j, .line_start = true};
    char *s = job_alloc(j, src->n + 1);
    for (size_t i = 0; i < src->n; i++) { /* \r\n and \r become \n */
        if (src->s[i] == '\n' && i && src->s[i - 1] == '\r') continue;
        s[l.n++] = src->s[i] == '\r' ? '\n' : src->s[i];
    }
    if (l.n && s[l.n - 1] == '\n') l.n--; /* keep_trailing_newline is off in jinja2 */
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
 * Walks the tree: node_eval computes an expression, with an eval_ function for each kind, and node_exec runs a
 * statement or body, with an exec_ function for each kind. template_parse and template_render are the interface of the
 * interpreter.
 *
 * An assignment goes to the innermost scope. for, macro, call, with and the blocks that capture text open a scope, if
 * does not. A loop begins every round with an empty scope.
 * ============================================================================================================ */

/* What follows a statement: the next one, or a break or continue that its loop has to handle. */
enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

static struct tv node_eval(struct job *j, const struct node *n);
static enum flow node_exec(struct job *j, const struct node *n);

/* Finds a variable, in the innermost scope first; NULL: it is not set. */
static struct tv *variable_find(struct job *j, struct tv name) {
    struct tv *v = NULL;
    for (struct scope *s = j->scope; s && !v; s = s->up) v = dict_find(j, &s->vars, name);
    return v;
}

/* Makes an empty scope inside of `up` the current one. The caller puts j->scope back. */
static struct scope *scope_open(struct job *j, struct scope *up) {
    struct scope *s = job_alloc(j, sizeof *s);
    s->up = up;
    return j->scope = s;
}

/* Assigns v to a target, or its elements to a tuple of targets. */
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

/* Runs a body and returns what it prints. */
static struct tv node_capture(struct job *j, const struct node *body, enum flow *flow) {
    struct buf b = {0}, *out = j->out;
    j->out = &b;
    *flow = node_exec(j, body);
    j->out = out;
    return buf_str(&b);
}

/* Calls a macro and returns what it prints. The keyword `caller` is the body of a {% call %} block. */
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
        struct tv *given = i < a->pos.n ? &a->pos.v[i] : dict_find(j, &a->kw, param->val), v;
        if (given) v = *given;
        else if (param->n) v = node_eval(j, param->kid[0]);
        else v = tv_undef(j, "parameter '%.*s' was not provided", SHOW(param->val));
        used += given && i >= a->pos.n && !tv_is(param->val, "caller");
        dict_set(j, &j->scope->vars, param->val, v);
    }
    if (2 * (used + (body != NULL)) < a->kw.n)
        job_fail(j, "the macro got a keyword twice, or one that is not a parameter");
    struct tv v = node_capture(j, m->def->kid[params], &flow);
    j->scope = outer;
    j->line = line;
    return v;
}

/* Evaluates the arguments of a call, filter or test: all kids but the first. */
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

/* Calls a macro or a function. caller: the body of a {% call %} block, or NULL. */
static struct tv eval_call(struct job *j, const struct node *n, const struct macro *caller) {
    struct tv f = node_eval(j, n->kid[0]);
    struct args a = eval_args(j, n);
    if (caller) dict_set(j, &a.kw, tv_lit(j, "caller"), (struct tv){.kind = TV_MACRO, .macro = caller});
    if (f.kind == TV_MACRO) return macro_call(j, f.macro, &a);
    if (f.kind != TV_FUNC) tv_fail(j, f, "'%s' object is not callable", tv_type(f));
    return builtin_call(j, f.func->fn, f.func->self, &a);
}

/* A variable, or else a global function. */
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
    int kind = n->kind == N_LIST ? TV_LIST : TV_TUPLE;
    if (n->kind == N_DICT) kind = TV_DICT;
    struct tv v = tv_list(j, kind);
    for (size_t i = 0; i < n->n; i++) {
        struct tv item = node_eval(j, n->kid[i]);
        if (n->kind == N_DICT) dict_set(j, v.list, item, node_eval(j, n->kid[++i]));
        else list_push(j, v.list, item);
    }
    return v;
}

static struct tv eval_sign(struct job *j, const struct node *n) {
    bool negate = n->kind == N_NEG;
    struct tv v = node_eval(j, n->kid[0]);
    if (!tv_number(v)) tv_fail(j, v, "bad operand type for unary %s: '%s'", negate ? "-" : "+", tv_type(v));
    return negate ? tv_binary(j, OP_MUL, tv_int(-1), v) : tv_binary(j, OP_ADD, tv_int(0), v);
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
    return op_table[op].prec == PREC_COMPARE ? tv_bool(tv_compare(j, op, a, b)) : tv_binary(j, op, a, b);
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

/* The value of an expression. */
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

/* Takes the next element that passes the loop's `if`. Returns false if there is none. */
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

/* Runs a loop, or its `else`. */
static enum flow exec_for(struct job *j, const struct node *n) {
    struct scope *outer = j->scope;
    struct loop *l = job_alloc(j, sizeof *l);
    *l = (struct loop){.target = n->kid[0], .test = n->kid[2], .outer = outer, .index0 = -1};
    l->src = tv_iter(j, node_eval(j, n->kid[1]));
    struct scope *scope = scope_open(j, outer);
    bool ran = false; /* a round ran to its end; as in jinja2, break and continue do not count */
    enum flow flow = FLOW_NEXT;
    while (flow != FLOW_BREAK && loop_peek(j, l)) {
        l->prev = l->cur;
        l->cur = l->next;
        l->next.kind = TV_ABSENT;
        l->index0++;
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

/* Runs a {% set x %} or {% filter f %} block. */
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

/* Runs a {% with %} block. The values are evaluated outside of its scope. */
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

/* Runs the first branch whose test is true, or the `else`. */
static enum flow exec_if(struct job *j, const struct node *n) {
    size_t i = 0;
    while (i + 1 < n->n && !tv_truthy(node_eval(j, n->kid[i]))) i += 2;
    if (i + 1 < n->n) return node_exec(j, n->kid[i + 1]);
    return i < n->n ? node_exec(j, n->kid[i]) : FLOW_NEXT;
}

/* Defines a macro, or runs a {% call %} block. */
static void exec_macro(struct job *j, const struct node *n) {
    struct macro *m = job_alloc(j, sizeof *m);
    *m = (struct macro){n->kind == N_CALLBLOCK ? n->kid[1] : n, j->scope};
    if (n->kind == N_CALLBLOCK) buf_put(j, j->out, tv_str(j, eval_call(j, n->kid[0], m)));
    else dict_set(j, &j->scope->vars, n->val, (struct tv){.kind = TV_MACRO, .macro = m});
}

/* Runs a body or a statement. */
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

/* What template_render hands to render_body. */
struct rendering {
    const struct template *t;
    const json_t *vars;
    struct text *out;
};

/* Renders a template. Runs inside job_run. */
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

/* Runs work and returns j->rc. job_fail returns to here. The job lies outside of this frame, because longjmp leaves the
 * variables of this function undefined. */
static int job_run(struct job *j, void (*work)(struct job *j, void *arg), void *arg) {
    struct rlimit limit;
    j->stack = __builtin_frame_address(0);
    j->stack_bytes = getrlimit(RLIMIT_STACK, &limit) || limit.rlim_cur == RLIM_INFINITY ? SIZE_MAX : limit.rlim_cur / 2;
    if (!setjmp(j->out_of_here)) work(j, arg);
    return j->rc;
}

static void template_free(struct template *t) {
    if (!t) return;
    pool_free(t->pool);
    free(t);
}

/* Parses n bytes of source. Returns NULL and "line N: ..." if something is malformed or not supported. */
static struct template *template_parse(const char *src, size_t n, char *err) {
    struct template *t = xcalloc(1, sizeof *t);
    struct job j = {.err = err, .line = 1};
    int rc = job_run(&j, parse_source, &(struct source){src, n, t});
    t->pool = j.pool;
    if (!rc) return t;
    template_free(t);
    return NULL;
}

/* Renders a template and appends the text to *out. Every key of the JSON object vars is a variable; `now`
 * (2026-11-20T10:00:00) is also the time of strftime_now. Returns 0; or -1 and "line N: ..."; or -2 and exactly the
 * message that the template gave to raise_exception. */
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
 * Model: tensors of a file
 *
 * A model is immutable after model_load. Every size is read from the file. Every tensor is bound once, by name, with
 * its shape checked against the metadata; afterwards nothing is looked up by string. A tensor of the file that no
 * family knows is an error, and so is a router, rope or scaling variant that is not known: nothing is guessed. Loading
 * ends the program only where an allocation fails, and never allocates more than a small multiple of what the file
 * really holds.
 * ============================================================================================================ */

/* The family of that architecture name, or NULL. */
static const struct family *family_find(struct gguf_str arch);
/* The names of all families for a message: "a, b and c". */
static const char *family_names(char out[ERR_MAX]);

/* What loading carries along. The first error sticks; every step after it does nothing. */
struct loader {
    struct model *m;
    const struct gguf *g;
    const char *arch; /* prefix of the keys */
    bool *used;       /* (n_tensors) */
    char *err;
    bool failed;
    struct attn attn;   /* what all layers share */
    struct delta delta; /* what all gated delta nets share; then by layer: */
    bool recurrent[MAX_LAYERS];
    int n_head[MAX_LAYERS], n_head_kv[MAX_LAYERS], n_expert_used[MAX_LAYERS];
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

/* An integer key within [lo, hi]; `dflt`, which may follow from other keys and is checked too, when absent, an error
 * when dflt is KEY_REQUIRED. An array with one value per layer is accepted if all are equal. */
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

/* An integer for every layer within [lo, hi], from one number for all or an array of block_count numbers. Without the
 * key all are dflt, which is KEY_REQUIRED where that is an error. */
static void loader_ints(struct loader *l, const char *suffix, int64_t dflt, int64_t lo, int64_t hi,
                        int out[MAX_LAYERS]) {
    char key[128];
    int64_t v = dflt;
    const struct gguf_kv *kv = loader_key(l, suffix, key);
    const int blocks = l->m->n_layer + l->m->n_mtp_layer;
    if (l->failed) return;
    if (!kv && dflt == KEY_REQUIRED) loader_fail(l, "metadata key '%s' is missing", key);
    if (kv && kv->is_array && kv->n != (uint64_t)blocks)
        loader_fail(l, "metadata key '%s' has %llu values, expected one for each of %d layers", key,
                    (unsigned long long)kv->n, blocks);
    for (int il = 0; il < l->m->n_layer && !l->failed; il++) {
        if (kv && !gguf_elem_int(kv, kv->is_array ? (uint64_t)il : 0, &v))
            loader_fail(l, "metadata key '%s' is not an integer", key);
        else if (v < lo || v > hi)
            loader_fail(l, "metadata key '%s' is %lld%s, expected %lld to %lld", key, (long long)v,
                        kv ? "" : " by default", (long long)lo, (long long)hi);
        out[il] = (int)v;
    }
}

/* A finite number within its range; NAN as default: required. */
static float loader_num(struct loader *l, const char *suffix, double dflt) {
    char key[128];
    double v = dflt;
    const struct key_range *range = key_range_of(suffix);
    const struct gguf_kv *kv = loader_key(l, suffix, key);
    if (l->failed) return 0;
    if (!kv && isnan(dflt)) loader_fail(l, "metadata key '%s' is missing", key);
    if (kv && (kv->is_array || !gguf_elem_f64(kv, 0, &v))) loader_fail(l, "metadata key '%s' is not a number", key);
    if (kv && !l->failed && !(v >= range->lo && v <= range->hi))
        loader_fail(l, "metadata key '%s' is %g, expected %g to %g", key, v, range->lo, range->hi);
    return l->failed ? 0 : (float)v;
}

/* A boolean key; dflt when absent. */
static bool loader_bool(struct loader *l, const char *suffix, bool dflt) {
    char key[128];
    const struct gguf_kv *kv = loader_key(l, suffix, key);
    if (!kv) return dflt;
    if (kv->is_array || kv->type != GGUF_V_BOOL) loader_fail(l, "metadata key '%s' is not a boolean", key);
    return !l->failed && kv->data[0];
}

/* Returns aligned memory that model_free frees. */
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
static const float *loader_vector(struct loader *l, const char *name, int n_in, int n_out, bool optional) {
    const struct gguf_tensor *t = loader_tensor(l, name, (uint64_t)n_in, (uint64_t)n_out, 1, optional);
    if (!t) return NULL;
    if (t->type != GGUF_F32 && t->type != GGUF_F16 && t->type != GGUF_BF16) {
        loader_fail(l, "tensor '%s' has the type %s, expected F32, F16 or BF16", name, gguf_type_info(t->type).name);
        return NULL;
    }
    const size_t n = (size_t)n_in * (size_t)n_out;
    float *v = loader_own(l, n * sizeof *v);
    gguf_dequantize_row(t->type, t->data, v, n);
    for (size_t i = 0; i < n; i++)
        if (!isfinite(v[i])) {
            loader_fail(l, "tensor '%s' holds %g at index %zu", name, v[i], i);
            return NULL;
        }
    return v;
}

/* Whether the file lists BASE.weight as made for 16-bit activations although it has an input scale:
 * general.tensor_extra.name (names) and general.tensor_extra.prec_a4 (as many booleans, false: 16-bit), as llama.cpp's
 * converter writes them. */
static bool loader_wants_16_bit(struct loader *l, const char *base) {
    const struct gguf_kv *names = gguf_find(l->g, "general.tensor_extra.name");
    const struct gguf_kv *a4 = gguf_find(l->g, "general.tensor_extra.prec_a4");
    char name[160];
    if (!names && !a4) return false;
    if (!names || !a4 || names->type != GGUF_V_STR || a4->type != GGUF_V_BOOL || names->n != a4->n) {
        loader_fail(l,
                    "metadata keys 'general.tensor_extra.name' and 'general.tensor_extra.prec_a4': expected a list of "
                    "strings and a list of as many booleans");
        return false;
    }
    snprintf(name, sizeof name, "%s.weight", base);
    const uint8_t *at = names->data;
    for (uint64_t i = 0; i < names->n; i++)
        if (gguf_str_eq(gguf_next_str(&at), name)) return !a4->data[i];
    return false;
}

/* BASE.weight of the shape {n_in, n_out, n_expert} (n_expert 1: a plain matrix) and its optional BASE.scale, of one
 * factor or one per expert. */
static void loader_weight(struct loader *l, struct weight *w, int n_in, int n_out, int n_expert, bool optional,
                          const char *base) {
    char name[160];
    snprintf(name, sizeof name, "%s.weight", base);
    const struct gguf_tensor *t = loader_tensor(l, name, (uint64_t)n_in, (uint64_t)n_out, (uint64_t)n_expert, optional);
    if (!t) return;
    if (t->type >= GGUF_I8 && t->type <= GGUF_F64) {
        loader_fail(l, "tensor '%s' has the type %s, which is not a weight type", name, gguf_type_info(t->type).name);
        return;
    }
    w->data = t->data;
    w->type = t->type;
    w->n_in = n_in;
    w->n_out = n_out;
    w->n_expert = n_expert;
    w->row_bytes = gguf_row_bytes(t->type, (size_t)n_in);
    w->expert_bytes = w->row_bytes * (size_t)n_out;
    snprintf(name, sizeof name, "%s.scale", base);
    t = gguf_find_tensor(l->g, name);
    if (t) {
        const float *s = loader_vector(l, name, t->ne[0] == 1 ? 1 : n_expert, 1, false);
        float *all = s ? loader_own(l, (size_t)n_expert * sizeof *all) : NULL;
        for (int e = 0; all && e < n_expert; e++) all[e] = s[t->ne[0] == 1 ? 0 : e];
        w->scale = all;
    }
    /* the scale that activations had at calibration: kernels that quantize activations measure their own */
    snprintf(name, sizeof name, "%s.input_scale", base);
    t = gguf_find_tensor(l->g, name);
    if (!t) return;
    l->used[t - l->g->tensors] = true;
    w->has_input_scale = !loader_wants_16_bit(l, base);
}

/* Binds the tensor of one row of the table in layer il, unless it is bound already. */
static void loader_rule(struct loader *l, const struct tensor_rule *rule, struct layer *layer, int il) {
    const struct model *m = l->m;
    char name[128];
    const int in = layer_dim(m, layer, rule->in), out = layer_dim(m, layer, rule->out),
              n = layer_dim(m, layer, rule->n);
    if (!rule->name || rule->field == NOT_BOUND) return; /* loader_fused has bound it */
    snprintf(name, sizeof name, "blk.%d.%s", il, rule->name);
    if (rule->kind != TENSOR_VECTOR) {
        struct weight *w = rule_weight(rule, layer);
        if (!w->data) loader_weight(l, w, in, out, n, rule->optional, name);
        return;
    }
    const float **v = rule_vector(rule, layer);
    if (!*v) *v = loader_vector(l, name, in, out, rule->optional);
    char *suffix = strstr(name, ".bias");
    if (*v || !suffix) return;
    *suffix = 0; /* files of Hy3 have exp_probs_b */
    *v = loader_vector(l, name, in, out, true);
}

/* Appends a rotation of `dim` values to m->ropes, and sets attn->rope and attn->scale; attn->head_k and kv_lora must be
 * set. Frequencies are interpolated as the file asks (YaRN: arXiv 2309.00071, sections 3.2 and 3.4). */
static void loader_rope(struct loader *l, int dim, struct attn *attn) {
    struct model *m = l->m;
    struct rope rope = {.dim = dim};
    struct gguf_str type = {"linear", 6}; /* llama.cpp's default; without a factor it does nothing */
    char key[128];
    double base = loader_num(l, "rope.freq_base", 10000.0);
    double factor = loader_num(l, "rope.scaling.factor", 1.0);
    int original = loader_int(l, "rope.scaling.original_context_length", m->n_ctx_train, 1, INT32_MAX);
    double beta_fast = loader_num(l, "rope.scaling.yarn_beta_fast", 32.0);
    double beta_slow = loader_num(l, "rope.scaling.yarn_beta_slow", 1.0);
    double attn_factor = loader_num(l, "rope.scaling.attn_factor", 1.0);
    double log_mul = loader_num(l, "rope.scaling.yarn_log_multiplier", 0.0);
    snprintf(key, sizeof key, "%s.rope.scaling.type", l->arch);
    if (l->failed) return;
    if (dim % 2) loader_fail(l, "metadata key '%s.rope.dimension_count' is %d, expected an even number", l->arch, dim);
    if (gguf_find(l->g, key) && !gguf_get_str(l->g, key, &type))
        loader_fail(l, "metadata key '%s' is not a string", key);
    bool yarn = gguf_str_eq(type, "yarn"), linear = gguf_str_eq(type, "linear");
    if (!yarn && !linear && !gguf_str_eq(type, "none")) {
        char t[32];
        loader_fail(l, "metadata key '%s' is '%s'; known are none, linear and yarn", key,
                    gguf_printable(type, t, sizeof t));
    }
    loader_num(l, "rope.scale_linear", 1.0);
    const double ext = (double)loader_num(l, "rope.scaling.yarn_ext_factor", yarn);
    if (!l->failed && ext != yarn)
        loader_fail(l, "metadata key '%s.rope.scaling.yarn_ext_factor' is %g, expected %d", l->arch, ext, yarn);
    if (l->failed) return;
    if (factor == 0.0 || (!yarn && !linear)) factor = 1.0;
    rope.factor = (float)attn_factor;
    attn->scale = 1.0f / sqrtf((float)attn->head_k);
    if (yarn && attn->kv_lora && log_mul == 0.0) {
        loader_fail(l,
                    "metadata key '%s.rope.scaling.yarn_log_multiplier' is missing: YaRN with latent "
                    "attention needs it",
                    l->arch);
    } else if (yarn && attn->kv_lora) { /* DeepSeek: the factor goes into the softmax scale, cos and sin stay */
        double mscale = 1.0 + log_mul * log(factor > 1.0 ? factor : 1.0);
        attn->scale *= (float)(mscale * mscale);
    } else if (yarn) {
        rope.factor *= (float)(1.0 + 0.1 * log(factor > 1.0 ? factor : 1.0));
    }
    int d = dim;
    double lo = floor(d * log(original / (beta_fast * 2 * M_PI)) / (2 * log(base)));
    double hi = ceil(d * log(original / (beta_slow * 2 * M_PI)) / (2 * log(base)));
    lo = fmax(lo, 0.0);
    hi = fmin(hi, d - 1.0);
    if (lo == hi) hi += 0.001;
    float *freq = loader_own(l, (size_t)d / 2 * sizeof *freq);
    for (int i = 0; i < d / 2; i++) {
        double f = pow(base, -2.0 * i / d);
        double ramp = yarn ? fmin(fmax((i - lo) / (hi - lo), 0.0), 1.0) : 1.0;
        freq[i] = (float)(f / factor * ramp + f * (1.0 - ramp));
        if (!isfinite(freq[i])) loader_fail(l, "rotary frequency %d is not finite: see the keys %s.rope.*", i, l->arch);
    }
    rope.freq = freq;
    attn->rope = m->n_rope;
    m->ropes[m->n_rope++] = rope;
}

/* ============================================================================================================
 * Model: metadata of families
 *
 * How the keys of a file become sizes and shapes of layers: what all families share, then what each reads for itself.
 * ============================================================================================================ */

/* Reads the metadata of grouped-query attention. */
static void read_gqa(struct loader *l) {
    const struct model *m = l->m;
    struct attn *a = &l->attn;
    const int n_head = l->n_head[0];
    a->head_k = loader_int(l, "attention.key_length", n_head ? m->n_embd / n_head : 0, 2, 4096);
    a->head_v = loader_int(l, "attention.value_length", a->head_k, 1, 4096);
    loader_rope(l, loader_int(l, "rope.dimension_count", a->head_k, 2, a->head_k), a);
}

/* Qwen3-MoE. Files of llama.cpp without expert_gating_func mean softmax over all experts and norm_topk_prob, whatever
 * expert_weights_norm says. */
static void read_qwen3moe(struct loader *l) {
    read_gqa(l);
    char key[128];
    if (!loader_key(l, "expert_gating_func", key)) l->m->norm_topk_prob = true;
}

/* Reads the metadata of multi-head latent attention (arXiv 2405.04434, section 2.1). */
static void read_mla(struct loader *l) {
    struct attn *a = &l->attn;
    a->q_lora = loader_int(l, "attention.q_lora_rank", 0, 0, 1 << 16);
    a->kv_lora = loader_int(l, "attention.kv_lora_rank", KEY_REQUIRED, 1, 8192);
    a->head_k = loader_int(l, "attention.key_length_mla", KEY_REQUIRED, 2, 4096);
    a->head_v = loader_int(l, "attention.value_length_mla", KEY_REQUIRED, 1, 4096);
    int rope = loader_int(l, "rope.dimension_count", KEY_REQUIRED, 2, a->head_k - 1);
    if (loader_num(l, "attention.temperature_scale", 0.0) != 0.0f)
        loader_fail(l, "metadata key '%s.attention.temperature_scale' is set: that variant is not supported", l->arch);
    loader_rope(l, rope, a);
}

/* Sets the shape of a layer's attention from what all layers share and what the metadata say of this one. */
static void layer_attn(struct loader *l, struct layer *layer, int il) {
    layer->attn = l->attn;
    layer->attn.n_head = l->n_head[il];
    layer->attn.n_head_kv = layer->attn.whole_head_kv = l->n_head_kv[il];
}

/* A layer with grouped-query attention whose heads are normed. */
static void layer_gqa(struct loader *l, struct layer *layer, int il) {
    layer->has = HAS_ATTENTION | HAS_GQA | HAS_Q | HAS_HEAD_NORM | HAS_FFN_NORM;
    layer_attn(l, layer, il);
}

/* A layer with latent attention. */
static void layer_mla(struct loader *l, struct layer *layer, int il) {
    layer->has = HAS_ATTENTION | HAS_MLA | (l->attn.q_lora ? HAS_Q_LORA : HAS_Q) | HAS_FFN_NORM;
    layer_attn(l, layer, il);
}

/* Reads the metadata of Qwen3.5 and Qwen3-Next: gated delta nets (arXiv 2412.06464) and layers of attention. */
static void read_qwen35(struct loader *l) {
    struct delta *d = &l->delta;
    int every[MAX_LAYERS], inner;
    read_gqa(l);
    l->m->norm_topk_prob = true;
    d->n_conv = loader_int(l, "ssm.conv_kernel", KEY_REQUIRED, 1, 8);
    d->n_key = loader_int(l, "ssm.group_count", KEY_REQUIRED, 1, 1024);
    d->n_value = loader_int(l, "ssm.time_step_rank", KEY_REQUIRED, d->n_key, 1024);
    d->head_k = loader_int(l, "ssm.state_size", KEY_REQUIRED, 1, 512); /* a state of 2^31 bytes at most */
    inner = loader_int(l, "ssm.inner_size", KEY_REQUIRED, d->n_value, 1 << 20);
    const int interval = loader_int(l, "full_attention_interval", 4, 1, MAX_LAYERS);
    if (l->failed) return; /* the sizes are 0 */
    d->head_v = inner / d->n_value;
    d->whole_key = d->n_key;
    if (d->n_value % d->n_key || inner % d->n_value)
        loader_fail(l, "'%s.ssm.*': %d key heads, %d value heads, %d inner values: each must divide the next", l->arch,
                    d->n_key, d->n_value, inner);
    if (!l->failed && l->attn.head_k != l->attn.head_v)
        loader_fail(l, "metadata key '%s.attention.value_length' is %d, expected the key length, %d", l->arch,
                    l->attn.head_v, l->attn.head_k);
    for (int il = 0; il < l->m->n_layer; il++) l->recurrent[il] = (il + 1) % interval != 0;
    char key[128];
    if (!loader_key(l, "attention.recurrent_layers", key)) return;
    loader_ints(l, "attention.recurrent_layers", 0, 0, 1, every);
    for (int il = 0; il < l->m->n_layer && !l->failed; il++) l->recurrent[il] = every[il];
}

/* A layer of qwen35moe, whose value heads are tiled, with a gated delta net or gated attention. */
static void layer_qwen35(struct loader *l, struct layer *layer, int il) {
    if (l->recurrent[il]) {
        layer->has = HAS_DELTA | HAS_DELTA_AB | HAS_POST_NORM;
        layer->delta = l->delta;
        layer->delta.tiled = true;
        return;
    }
    layer->has = HAS_ATTENTION | HAS_GQA | HAS_Q | HAS_Q_GATE | HAS_HEAD_NORM | HAS_POST_NORM;
    layer_attn(l, layer, il);
}

/* A layer of qwen3next, whose value heads are grouped and whose alpha and beta are one matrix. */
static void layer_qwen3next(struct loader *l, struct layer *layer, int il) {
    layer_qwen35(l, layer, il);
    if (!l->recurrent[il]) return;
    layer->has ^= HAS_DELTA_AB | HAS_DELTA_BA;
    layer->delta.tiled = false;
}

/* Metadata that all families have, and the family's own. */
static void loader_hparams(struct loader *l) {
    struct model *m = l->m;
    char key[128];
    m->n_ctx_train = loader_int(l, "context_length", KEY_REQUIRED, 1, MAX_TRAINED);
    m->n_embd = loader_int(l, "embedding_length", KEY_REQUIRED, 1, 1 << 17);
    int blocks = loader_int(l, "block_count", KEY_REQUIRED, 1, MAX_LAYERS);
    m->n_mtp_layer = loader_int(l, "nextn_predict_layers", 0, 0, blocks - 1);
    m->n_layer = blocks - m->n_mtp_layer;
    loader_ints(l, "attention.head_count", KEY_REQUIRED, 1, 1024, l->n_head);
    int most = 1;
    for (int il = 0; il < m->n_layer; il++) most = int_max(most, l->n_head[il]);
    if (loader_key(l, "attention.head_count_kv", key))
        loader_ints(l, "attention.head_count_kv", 0, 1, most, l->n_head_kv);
    else memcpy(l->n_head_kv, l->n_head, sizeof l->n_head);
    m->rms_eps = loader_num(l, "attention.layer_norm_rms_epsilon", NAN);
    m->n_expert_max = loader_int(l, "expert_count", KEY_REQUIRED, 1, MAX_EXPERTS);
    loader_ints(l, "expert_used_count", KEY_REQUIRED, 1, m->n_expert_max < MAX_TOPK ? m->n_expert_max : MAX_TOPK,
                l->n_expert_used);
    m->n_group = loader_int(l, "expert_group_count", 1, 0, MAX_EXPERTS);
    m->n_group_used = loader_int(l, "expert_group_used_count", m->n_group, 0, m->n_group ? m->n_group : 1);
    if (m->n_group < 2) m->n_group = m->n_group_used = 1;
    if (!l->failed && !m->n_group_used) loader_fail(l, "metadata key '%s.expert_group_used_count' is 0", l->arch);
    int gating = loader_int(l, "expert_gating_func", 0, 0, GATING_SIGMOID);
    m->gating = gating ? (enum gating)gating : m->family->gating;
    m->norm_topk_prob = loader_bool(l, "expert_weights_norm", m->family->norm_topk_prob);
    m->routed_scaling_factor = loader_num(l, "expert_weights_scale", 1.0);
    if (m->routed_scaling_factor == 0.0f) m->routed_scaling_factor = 1.0f;
    m->family->read(l);
    for (int il = 0; il < m->n_layer && !l->failed; il++)
        if (l->n_head[il] % l->n_head_kv[il])
            loader_fail(l, "layer %d has %d heads, expected a multiple of its %d KV heads", il, l->n_head[il],
                        l->n_head_kv[il]);
}

/* Reads the original ids of a pruned layer's experts, metadata key moe.reap.kept.N. */
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
    int32_t *retained = loader_own(l, (size_t)layer->n_expert * sizeof *retained);
    for (int e = 0; e < layer->n_expert; e++, last = v) {
        if (!gguf_elem_int(kv, (uint64_t)e, &v) || v <= last || v > INT32_MAX) {
            loader_fail(l, "metadata key '%s' is not an ascending list of expert ids", key);
            return;
        }
        retained[e] = (int32_t)v;
    }
    layer->retained = retained;
}

/* ============================================================================================================
 * Model: layers and files
 *
 * Binding of layers by the table of tensors, and opening a file.
 * ============================================================================================================ */

/* Dimension `axis` of blk.il.NAME, which is a width of at most 2^20. 0: the layer has no such tensor, or after an
 * error. */
static int loader_width(struct loader *l, int il, const char *what, int axis) {
    char name[128];
    snprintf(name, sizeof name, "blk.%d.%s.weight", il, what);
    const struct gguf_tensor *t = l->failed ? NULL : gguf_find_tensor(l->g, name);
    if (!t) return 0;
    if (t->ne[axis] > 1 << 20) {
        loader_fail(l, "tensor '%s' is %llu wide, expected at most %d", name, (unsigned long long)t->ne[axis], 1 << 20);
        return 0;
    }
    return (int)t->ne[axis];
}

/* Sets which feed-forwards layer il has, their widths and the number of experts. The tensors tell, because these differ
 * between layers in pruned models and in some families. */
static void loader_ffn_shape(struct loader *l, struct layer *layer, int il) {
    const struct model *m = l->m;
    char name[128];
    snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", il);
    const struct gguf_tensor *router = gguf_find_tensor(l->g, name);
    if (l->failed) return;
    if (!router) {
        layer->has |= HAS_DENSE_FFN;
        layer->n_ff = loader_width(l, il, "ffn_gate", 1);
        return;
    }
    layer->has |= HAS_EXPERTS;
    layer->n_expert_used = l->n_expert_used[il];
    if (router->ne[1] > (uint64_t)m->n_expert_max || router->ne[1] < (uint64_t)layer->n_expert_used ||
        router->ne[1] % (uint64_t)m->n_group) {
        char groups[32] = "";
        if (m->n_group > 1) snprintf(groups, sizeof groups, ", in %d equal groups", m->n_group);
        loader_fail(l, "tensor '%s' routes to %llu experts, expected %d to %d%s", name,
                    (unsigned long long)router->ne[1], layer->n_expert_used, m->n_expert_max, groups);
        return;
    }
    layer->n_expert = (int)router->ne[1];
    layer->n_ff = loader_width(l, il, "ffn_down_exps", 0);
    layer->n_ff_shared = loader_width(l, il, "ffn_down_shexp", 0);
    if (layer->n_ff_shared) layer->has |= HAS_SHARED;
}

/* Returns a view of rows from..from+n-1 of a weight, in each matrix of a stack. */
static struct weight weight_view(const struct weight *all, int from, int n) {
    struct weight w = *all;
    w.data += (size_t)from * all->row_bytes;
    w.n_out = n;
    if (all->bias) w.bias += from;
    return w;
}

/* Cuts up the fused tensors of a gated delta net: attn_qkv has the rows of queries, keys and values; ssm_ba, for each
 * key head, those of beta and then of alpha of its value heads. */
static void loader_fused_delta(struct loader *l, struct layer *layer, int il) {
    const int n_embd = l->m->n_embd, key = layer_dim(l->m, layer, DIM_KEY), value = layer_dim(l->m, layer, DIM_VALUE);
    const int group = layer->delta.n_value / layer->delta.n_key;
    struct weight qkv = {0}, ba = {0};
    char name[128];
    snprintf(name, sizeof name, "blk.%d.attn_qkv", il);
    loader_weight(l, &qkv, n_embd, 2 * key + value, 1, false, name);
    layer->wq = weight_view(&qkv, 0, key);
    layer->wk = weight_view(&qkv, key, key);
    layer->wv = weight_view(&qkv, 2 * key, value);
    if (!(layer->has & HAS_DELTA_BA)) return;
    snprintf(name, sizeof name, "blk.%d.ssm_ba", il);
    loader_weight(l, &ba, n_embd, 2 * layer->delta.n_value, 1, false, name);
    ba.row_run = group;
    ba.row_run_bytes = 2 * (size_t)group * ba.row_bytes;
    layer->w_beta = weight_view(&ba, 0, layer->delta.n_value);
    layer->w_alpha = weight_view(&ba, group, layer->delta.n_value);
}

/* Matrices that a file holds as one: gate and up of the experts, gate rows first; queries, keys and values. */
static void loader_fused(struct loader *l, struct layer *layer, int il) {
    struct weight both = {0}, qkv = {0};
    char name[128];
    const int n_embd = l->m->n_embd, n_ff = layer->n_ff;
    if (layer->has & HAS_EXPERTS) {
        snprintf(name, sizeof name, "blk.%d.ffn_gate_up_exps", il);
        loader_weight(l, &both, n_embd, 2 * n_ff, layer->n_expert, true, name);
    }
    if (both.data) {
        layer->gate = weight_view(&both, 0, n_ff);
        layer->up = weight_view(&both, n_ff, n_ff);
    }
    if (layer->has & HAS_DELTA) loader_fused_delta(l, layer, il);
    if (!(layer->has & HAS_GQA)) return;
    const int q = layer_dim(l->m, layer, DIM_Q), k = layer_dim(l->m, layer, DIM_K), v = layer_dim(l->m, layer, DIM_V);
    snprintf(name, sizeof name, "blk.%d.attn_qkv", il);
    loader_weight(l, &qkv, n_embd, q + k + v, 1, true, name);
    if (!qkv.data) return;
    snprintf(name, sizeof name, "blk.%d.attn_qkv.bias", il);
    qkv.bias = loader_vector(l, name, q + k + v, 1, true);
    layer->wq = weight_view(&qkv, 0, q);
    layer->wk = weight_view(&qkv, q, k);
    layer->wv = weight_view(&qkv, q + k, v);
}

/* Gate and up multiply the same packed activations, whose format follows from the type. */
static void loader_same_type(struct loader *l, int il, const struct weight *gate, const struct weight *up) {
    if (gate->type != up->type)
        loader_fail(l, "layer %d: gate has the type %s, expected that of up, %s", il, gguf_type_info(gate->type).name,
                    gguf_type_info(up->type).name);
}

/* Binds all tensors of layer il. */
static void loader_layer(struct loader *l, struct layer *layer, int il) {
    l->m->family->layer(l, layer, il);
    loader_ffn_shape(l, layer, il);
    loader_fused(l, layer, il);
    for (const struct tensor_rule *rule = rule_next(NULL, layer); rule && !l->failed; rule = rule_next(rule, layer))
        loader_rule(l, rule, layer, il);
    if (layer->router_bias && l->m->gating == GATING_SOFTMAX)
        loader_fail(l,
                    "layer %d has a routing bias, which needs a sigmoid router, but '%s.expert_gating_func' "
                    "is not 2",
                    il, l->arch);
    if (layer->has & HAS_EXPERTS) loader_retained(l, layer, il);
    loader_same_type(l, il, &layer->gate, &layer->up);
    loader_same_type(l, il, &layer->sh_gate, &layer->sh_up);
}

/* Computes m->max from the layers. */
static void model_maxima(struct model *m) {
    struct maxima *x = &m->max;
    memset(x, 0, sizeof *x);
    for (int il = 0; il < m->n_layer; il++) {
        const struct layer *layer = &m->layers[il];
        const struct attn *a = &layer->attn;
        const bool mla = layer->has & HAS_MLA;
        x->n_head = int_max(x->n_head, a->n_head);
        x->head_k = int_max(x->head_k, a->head_k);
        x->head_v = int_max(x->head_v, a->head_v);
        x->q_lora = int_max(x->q_lora, a->q_lora);
        x->kv_lora = int_max(x->kv_lora, a->kv_lora);
        x->rope_dim = int_max(x->rope_dim, layer_rope_dim(m, layer));
        const bool delta = layer->has & HAS_DELTA;
        x->q = int_max(x->q, layer_dim(m, layer, delta ? DIM_KEY : DIM_Q));
        x->k = int_max(x->k, layer_dim(m, layer, delta ? DIM_KEY : mla ? DIM_KV_A : DIM_K));
        x->v = int_max(x->v, delta ? layer_dim(m, layer, DIM_VALUE) : mla ? 0 : layer_dim(m, layer, DIM_V));
        x->att = int_max(x->att, layer_dim(m, layer, delta ? DIM_VALUE : DIM_ATT));
        x->values = int_max(x->values, layer->delta.n_value);
        x->z = int_max(x->z, layer_dim(m, layer, DIM_VALUE));
        x->mix = int_max(x->mix, layer_dim(m, layer, DIM_MIX));
        x->n_expert_used = int_max(x->n_expert_used, layer->n_expert_used);
        int *n_ff = layer->n_expert ? &x->n_ff_expert : &x->n_ff_dense;
        *n_ff = int_max(*n_ff, layer->n_ff);
        x->n_ff_shared = int_max(x->n_ff_shared, layer->n_ff_shared);
        x->sh_weight |= layer->sh_weight != NULL;
    }
}

/* Refuses tensors of the file that nothing has bound. Those of prediction layers, after the last layer, are exempt:
 * nothing runs them yet. */
static void loader_leftovers(struct loader *l) {
    for (uint32_t i = 0; i < l->g->n_tensors && !l->failed; i++) {
        const struct gguf_tensor *t = &l->g->tensors[i];
        char name[GGUF_MAX_NAME + 1];
        int il;
        if (l->used[i]) continue;
        gguf_printable(t->name, name, sizeof name);
        if (sscanf(name, "blk.%d.", &il) == 1 && il >= l->m->n_layer && il < l->m->n_layer + l->m->n_mtp_layer)
            continue;
        loader_fail(l, "tensor '%s' is not part of the architecture %s", name, l->arch);
    }
}

/* Adjusts the layer count where the file lacks the prediction layers that its metadata count, and refuses a file that
 * holds nothing else. */
static void loader_has_trunk(struct loader *l) {
    if (l->failed || gguf_find_tensor(l->g, "blk.0.attn_norm.weight")) return;
    for (uint32_t i = 0; i < l->g->n_tensors; i++) {
        const struct gguf_str name = l->g->tensors[i].name;
        if (!memmem(name.p, name.n, ".nextn.", 7)) continue;
        loader_fail(l, "the file holds only multi-token-prediction layers; give the file with the layers before them");
        return;
    }
}

/* FNV-1a over the metadata (of each value 4 KB at most), the names, types and shapes of tensors, and the ends of their
 * data: two files of one model differ, and so does one that is read with another rope. */
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
        for (size_t j = 0; j < n; j++) h = hash_value(h, t->data[j] ^ (uint64_t)t->data[t->bytes - 1 - j] << 8);
        h = hash_value(h, t->bytes ^ (uint64_t)t->type << 56);
    }
    return h;
}

/* Frees a model that model_load or synth_make has filled, with its vocabulary and mapping; never a shard. */
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
    char text[64], known[ERR_MAX];
    m->vocab = xcalloc(1, sizeof *m->vocab);
    m->shard = (struct shard){0, 1, 0, 1};
    if (!gguf_get_str(l.g, "general.architecture", &s))
        loader_fail(&l, "metadata key 'general.architecture' is missing");
    m->family = family_find(s);
    if (!m->family)
        loader_fail(&l, "the architecture '%s' is not supported; known are %s", gguf_printable(s, text, sizeof text),
                    family_names(known));
    if (!l.failed && !l.g->n_tensors) loader_fail(&l, "the file holds a vocabulary but no tensors");
    l.used = xcalloc(l.g->n_tensors + 1u, sizeof *l.used);
    l.arch = m->family ? m->family->arch : "";
    s = (struct gguf_str){"", 0};
    gguf_get_str(l.g, "general.name", &s);
    gguf_printable(s, m->name, sizeof m->name);
    if (!l.failed) loader_hparams(&l);
    loader_has_trunk(&l);
    const struct gguf_tensor *embd = loader_tensor(&l, "token_embd.weight", (uint64_t)m->n_embd, 0, 1, false);
    if (embd && embd->ne[1] > 1 << 24)
        loader_fail(&l, "tensor 'token_embd.weight' has %llu rows, expected at most %d",
                    (unsigned long long)embd->ne[1], 1 << 24);
    m->n_vocab = embd && !l.failed ? (int)embd->ne[1] : 0;
    loader_weight(&l, &m->embd, m->n_embd, m->n_vocab, 1, false, "token_embd");
    loader_weight(&l, &m->output, m->n_embd, m->n_vocab, 1, true, "output");
    if (!m->output.data) m->output = m->embd;
    m->output_norm = loader_vector(&l, "output_norm.weight", m->n_embd, 1, false);
    if (!l.failed) m->layers = loader_own(&l, (size_t)m->n_layer * sizeof *m->layers);
    for (int i = 0; i < m->n_layer && !l.failed; i++) loader_layer(&l, &m->layers[i], i);
    if (!l.failed) model_maxima(m);
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

/* Reads a large file into the page cache in order, which disks like better than the page faults of the first token;
 * shows progress on a terminal. Ctrl-C ends it early: the rest comes by page faults. */
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

/* Opens, maps and binds a model file, or with `header` its header alone. 0, or -1 with a message that begins with the
 * path. */
static int model_open(struct model *m, const char *path, bool header, char *err) {
    char why[ERR_MAX];
    memset(m, 0, sizeof *m);
    if ((header ? gguf_open_header : gguf_open)(&m->gguf, path, err, ERR_MAX)) return -1;
    if (model_bind(m, why)) return fail(err, "'%.200s': %s", path, why);
    if (!m->name[0]) {
        const char *base = strrchr(path, '/');
        snprintf(m->name, sizeof m->name, "%s", base ? base + 1 : path);
        message_sanitize(m->name);
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
 * Shards of a model
 *
 * What each rank holds, the same for every backend. Tensor parallelism divides attention by heads, feed-forwards by
 * their hidden width in whole units of 64, the output matrix by rows; every rank has the norms, routers, low-rank
 * projections and the embedding. Pipeline parallelism gives each stage consecutive layers. Larger shards come first and
 * nothing is padded. A shard may be empty: such a rank adds zeros. Shards are views into the same mapping.
 * ============================================================================================================ */

enum { SHARD_UNIT = 64 /* columns of a feed-forward; a multiple of every format's block */ };

/* Items first..first+n-1; with `run`, n items in runs of `run`, `stride` apart. */
struct range {
    int first, n, run, stride;
};

/* Returns the share of `rank` of `total` items that are divided in whole units. The last unit may be shorter; lower
 * ranks get one unit more where units do not divide evenly. */
static struct range shard_range(int total, int unit, int n_rank, int rank) {
    int units = (total + unit - 1) / unit, per = units / n_rank, more = units % n_rank;
    int first = (rank * per + int_min(rank, more)) * unit, n = (per + (rank < more)) * unit;
    if (n > total - first) n = total - first;
    return n > 0 ? (struct range){first, n, n, 0} : (struct range){0, 0, 0, 0};
}

static void weight_rows(struct weight *w, struct range s) {
    if (!w->data) return;
    w->n_out = s.n;
    if (w->row_run) { /* a part gets whole runs */
        w->data += (size_t)(s.first / w->row_run) * w->row_run_bytes;
        return;
    }
    w->data += (size_t)s.first * w->row_bytes;
    if (s.run == s.n) return;
    w->row_run = s.run;
    w->row_run_bytes = (size_t)s.stride * w->row_bytes;
}

static void weight_columns(struct weight *w, struct range s) {
    if (!w->data) return;
    w->data += gguf_row_bytes(w->type, (size_t)s.first);
    w->n_in = s.n;
    if (s.run == s.n) return;
    w->col_run = s.run;
    w->col_run_bytes = gguf_row_bytes(w->type, (size_t)s.stride);
}

static void weight_matrices(struct weight *w, struct range s) {
    if (!w->data) return;
    w->data += (size_t)s.first * w->expert_bytes;
    w->n_expert = s.n;
    if (w->scale) w->scale += s.first;
}

/* Bytes of a weight, or of a rank's shard of it, in the file's format. */
static uint64_t weight_bytes(const struct weight *w) {
    return w->data ? (uint64_t)gguf_row_bytes(w->type, (size_t)w->n_in) * (uint64_t)w->n_out * (uint64_t)w->n_expert
                   : 0;
}

/* Bytes of a layer's weights in the file's format. */
static uint64_t layer_bytes(const struct layer *layer) {
    uint64_t sum = 0;
    for (const struct tensor_rule *rule = rule_next(NULL, layer); rule; rule = rule_next(rule, layer))
        if (rule_is_weight(rule)) sum += weight_bytes(rule_weight(rule, layer));
    return sum;
}

static int int_gcd(int a, int b) { return b ? int_gcd(b, a % b) : a; }

/* Returns the fewest heads whose results fill whole quantization blocks of wo's rows in every layer: query heads of
 * attention (recurrent: key heads of gated delta nets). Ranks divide heads in multiples of it. */
static int heads_unit(const struct model *m, bool recurrent) {
    int unit = 1;
    for (int il = 0; il < m->n_layer; il++) {
        const struct layer *layer = &m->layers[il];
        const struct delta *d = &layer->delta;
        if (recurrent != (d->n_key > 0)) continue;
        int values = recurrent ? d->tiled ? d->head_v : d->head_v * (d->n_value / d->n_key) : layer->attn.head_v;
        int block = (int)gguf_type_info(layer->wo.type).block, u = block / int_gcd(block, values);
        unit = unit / int_gcd(unit, u) * u;
    }
    return unit;
}

/* Returns items first..first+n-1. */
static struct range range_of(int first, int n) { return (struct range){first, n, n, 0}; }

struct heads_range {
    struct range q, kv; /* of attention */
    struct range key;   /* of a gated delta net */
};

/* Returns the heads of a rank, which gets whole units of `unit` query heads. A query head goes to the rank that has its
 * KV head. With fewer KV heads than ranks, several ranks hold a copy of the same KV head and divide its query heads.
 * Latent attention has one KV head, which every rank holds. */
static struct heads_range shard_heads(const struct attn *a, int unit, int n_rank, int rank) {
    struct heads_range h = {{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}};
    if (!a->n_head) return h;
    int group = a->n_head / a->n_head_kv;
    if (a->kv_lora) {
        h.q = shard_range(a->n_head, unit, n_rank, rank);
        h.kv = range_of(0, 1);
    } else if (a->n_head_kv >= n_rank) {
        h.kv = shard_range(a->n_head_kv, unit / int_gcd(unit, group), n_rank, rank);
        h.q = range_of(h.kv.first * group, h.kv.n * group);
    } else {
        int j = rank * a->n_head_kv / n_rank; /* its KV head, which the ranks from..to-1 have */
        int from = (j * n_rank + a->n_head_kv - 1) / a->n_head_kv,
            to = ((j + 1) * n_rank + a->n_head_kv - 1) / a->n_head_kv;
        h.q = shard_range(group, unit, to - from, rank - from);
        h.q.first += j * group;
        h.kv = range_of(j, 1);
    }
    if (!h.kv.n) h.kv.n = 1; /* a rank without query heads has a cache all the same: no size is 0 */
    return h;
}

/* Returns the range of the value heads of some key heads, each of `size` items. In tiled order there is a run for every
 * value head of a key head. */
static struct range value_range(const struct delta *d, struct range key, int size) {
    const int group = d->n_value / d->n_key;
    if (!d->tiled || !key.n) return range_of(key.first * group * size, key.n * group * size);
    return (struct range){key.first * size, key.n * group * size, key.n * size, d->n_key * size};
}

/* Returns the range of a dimension that a rank holds. layer: of the whole model. Dimensions that ranks do not divide
 * are returned whole. */
static struct range dim_range(const struct model *m, const struct layer *layer, enum dim d, struct heads_range h,
                              struct shard shard) {
    const struct attn *a = &layer->attn;
    const int n = layer_dim(m, layer, d);
    switch (d) {
    case DIM_Q: {
        const int per = layer->has & HAS_Q_GATE ? 2 * a->head_k : a->head_k;
        return range_of(h.q.first * per, h.q.n * per);
    }
    case DIM_K: return range_of(h.kv.first * a->head_k, h.kv.n * a->head_k);
    case DIM_V: return range_of(h.kv.first * a->head_v, h.kv.n * a->head_v);
    case DIM_ATT: return range_of(h.q.first * a->head_v, h.q.n * a->head_v);
    case DIM_HEADS: return h.q;
    case DIM_KEY: return range_of(h.key.first * layer->delta.head_k, h.key.n * layer->delta.head_k);
    case DIM_VALUES: return value_range(&layer->delta, h.key, 1);
    case DIM_VALUE: return value_range(&layer->delta, h.key, layer->delta.head_v);
    case DIM_FF:
    case DIM_SHARED: return shard_range(n, SHARD_UNIT, shard.n_rank, shard.rank);
    default: return range_of(0, n);
    }
}

/* Makes of a layer of the whole model the rank's shard of it. */
static void shard_layer(struct layer *out, const struct model *m, const struct layer *whole, struct shard shard) {
    struct heads_range h = shard_heads(&whole->attn, heads_unit(m, false), shard.n_rank, shard.rank);
    h.key = shard_range(whole->delta.n_key, heads_unit(m, true), shard.n_rank, shard.rank);
    *out = *whole;
    for (const struct tensor_rule *rule = rule_next(NULL, whole); rule; rule = rule_next(rule, whole)) {
        const struct range in = dim_range(m, whole, rule->in, h, shard);
        if (rule->field == NOT_BOUND) continue;
        if (rule->kind == TENSOR_VECTOR) {
            const float **v = rule_vector(rule, out);
            if (*v && !(rule->when & HAS_DELTA)) *v += in.first; /* a delta net finds its heads in the whole vectors */
            continue;
        }
        struct weight *w = rule_weight(rule, out);
        weight_rows(w, dim_range(m, whole, rule->out, h, shard));
        weight_columns(w, in);
        weight_matrices(w, dim_range(m, whole, rule->n, h, shard));
    }
    out->attn.n_head = h.q.n;
    out->attn.n_head_kv = h.kv.n;
    out->attn.first_head_kv = h.kv.first;
    if (whole->has & HAS_DELTA) {
        out->delta.n_value = whole->delta.n_value / whole->delta.n_key * h.key.n;
        out->delta.n_key = h.key.n;
        out->delta.first_key = h.key.first;
    }
    out->n_ff = dim_range(m, whole, DIM_FF, h, shard).n;
    out->n_ff_shared = dim_range(m, whole, DIM_SHARED, h, shard).n;
}

/* Returns the consecutive layers of a pipeline stage. Stages end where the bytes of weights up to there come nearest to
 * equal shares; each has a layer at least. */
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
    return range_of(bound[stage], bound[stage + 1] - bound[stage]);
}

/* A rank's shard of a whole model, n_stage <= n_layer; shard_free frees it. */
static void shard_model(struct model *out, const struct model *m, struct shard shard) {
    struct range layers = stage_layers(m, shard.n_stage, shard.stage);
    struct range rows = shard_range(m->n_vocab, SHARD_UNIT, shard.n_rank, shard.rank);
    *out = *m;
    out->shard = shard;
    out->first_layer = layers.first;
    out->n_layer = layers.n;
    out->layers = xcalloc((size_t)layers.n, sizeof *out->layers);
    for (int il = 0; il < layers.n; il++) shard_layer(&out->layers[il], m, &m->layers[layers.first + il], shard);
    model_maxima(out);
    weight_rows(&out->output, rows);
    out->first_id = rows.first;
    if (shard.stage) memset(&out->embd, 0, sizeof out->embd);
    if (shard.stage < shard.n_stage - 1) memset(&out->output, 0, sizeof out->output);
}

/* Frees what shard_model has allocated. */
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
    /* 0 or what some families have */
    int q_lora, kv_lora, rope, n_dense, ff_dense, ff_shared, n_group, n_group_used;
    float scale; /* of the experts' weights; 0: 1 */
    /* gated delta nets: key heads, value heads, values of a head; every interval-th layer has attention instead */
    int n_key, n_value, delta_head, interval;
    bool q8;    /* the backbone is Q8_0 instead of BF16 */
    bool sizes; /* only sizes are looked at: nothing is filled in */
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
    {.name = "hy3",
     .arch = "hy_v3",
     .n_layer = 80,
     .n_embd = 4096,
     .n_head = 64,
     .n_head_kv = 8,
     .head = 128,
     .n_expert = 192,
     .n_used = 8,
     .n_ff = 1536,
     .n_vocab = 120832,
     .n_ctx = 131072,
     .n_dense = 1,
     .ff_dense = 13312,
     .ff_shared = 1536,
     .scale = 2.826f},
    {.name = "qwen3.5-35b-a3b",
     .arch = "qwen35moe",
     .n_layer = 40,
     .n_embd = 2048,
     .n_head = 16,
     .n_head_kv = 2,
     .head = 256,
     .n_expert = 256,
     .n_used = 8,
     .n_ff = 512,
     .n_vocab = 248320,
     .n_ctx = 262144,
     .rope = 64,
     .ff_shared = 512,
     .n_key = 16,
     .n_value = 32,
     .delta_head = 128,
     .interval = 4},
    {.name = "qwen3.5-122b-a10b",
     .arch = "qwen35moe",
     .n_layer = 48,
     .n_embd = 3072,
     .n_head = 32,
     .n_head_kv = 2,
     .head = 256,
     .n_expert = 256,
     .n_used = 8,
     .n_ff = 1024,
     .n_vocab = 248320,
     .n_ctx = 262144,
     .rope = 64,
     .ff_shared = 1024,
     .n_key = 16,
     .n_value = 64,
     .delta_head = 128,
     .interval = 4},
    {.name = "qwen3.5-397b-a17b",
     .arch = "qwen35moe",
     .n_layer = 60,
     .n_embd = 4096,
     .n_head = 32,
     .n_head_kv = 2,
     .head = 256,
     .n_expert = 512,
     .n_used = 10,
     .n_ff = 1024,
     .n_vocab = 248320,
     .n_ctx = 262144,
     .rope = 64,
     .ff_shared = 1024,
     .n_key = 16,
     .n_value = 64,
     .delta_head = 128,
     .interval = 4},
};

/* Moves *p behind `word` if that stands there. */
static bool skip_word(const char **p, const char *word) {
    const size_t n = strlen(word);
    if (strncmp(*p, word, n)) return false;
    *p += n;
    return true;
}

/* Moves *p after the number that stands there; 0: none does. */
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

/* Reduces a shape to what rank R of N holds, text "R/N". The vocabulary stays whole, because a shape has one size for
 * the embedding and the output. */
static void synth_shard(struct synth *y, const char *text) {
    if (strlen(text) != 3 || text[1] != '/' || text[2] < '1' || text[2] > '8' || text[0] < '0' || text[0] >= text[2])
        die_usage("--shard %s: expected R/N with N from 1 to 8 and R from 0 to N - 1", text);
    const int n = text[2] - '0';
    const struct {
        int *size, unit; /* a shard has whole units */
        const char *what;
    } divided[] = {{&y->n_head, 1, "attention heads"},
                   {&y->n_key, 1, "key heads of gated delta nets"},
                   {&y->n_value, 1, "value heads of gated delta nets"},
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
void synth_fill(uint8_t *p, uint64_t bytes, uint32_t type, bool vector, uint64_t *rng) {
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

/* The tensors of layer il, by the table of tensors: feed-forwards NVFP4, vectors and routers F32, the rest BF16 or
 * Q8_0. */
static void synth_add_layer(struct synth_tensor **list, const struct synth *y, struct loader *l, int il) {
    const struct model *m = l->m;
    const bool dense = il < y->n_dense;
    const uint32_t backbone = y->q8 ? GGUF_Q8_0 : GGUF_BF16;
    struct layer layer = {0};
    char name[64];
    m->family->layer(l, &layer, il);
    layer.has |= dense ? HAS_DENSE_FFN : HAS_EXPERTS;
    if (!dense && y->ff_shared) layer.has |= HAS_SHARED;
    layer.n_expert = dense ? 0 : y->n_expert;
    layer.n_ff = dense ? y->ff_dense : y->n_ff;
    layer.n_ff_shared = y->ff_shared;
    for (const struct tensor_rule *rule = rule_next(NULL, &layer); rule; rule = rule_next(rule, &layer)) {
        const int in = layer_dim(m, &layer, rule->in), out = layer_dim(m, &layer, rule->out);
        const int n = layer_dim(m, &layer, rule->n);
        const bool ffn = rule->in == DIM_FF || rule->in == DIM_SHARED || rule->out == DIM_FF || rule->out == DIM_SHARED;
        const bool bias = rule->field == offsetof(struct layer, router_bias) && m->gating == GATING_SIGMOID;
        const bool gate = rule->field == offsetof(struct layer, sh_weight) && y->n_key;
        if (rule->optional && !bias && !gate) continue;
        if (!rule->name) continue;
        snprintf(name, sizeof name, "blk.%%d.%s%s", rule->name, rule->kind == TENSOR_VECTOR ? "" : ".weight");
        synth_add(list, rule->kind != TENSOR_MATRIX ? GGUF_F32 : ffn ? GGUF_NVFP4 : backbone, in, out, n, name, il);
        if (rule->kind != TENSOR_MATRIX || !ffn) continue;
        snprintf(name, sizeof name, "blk.%%d.%s.scale", rule->name);
        synth_add(list, GGUF_F32, n, 1, 1, name, il);
    }
}

static uint8_t *synth_header(const struct synth *y, const struct synth_tensor *t, size_t *bytes, uint64_t *data);

/* The tensors of a shape (stb_ds). Its family reads the metadata, as from a file. */
static struct synth_tensor *synth_tensors(const struct synth *y) {
    struct synth_tensor *list = NULL;
    const uint32_t backbone = y->q8 ? GGUF_Q8_0 : GGUF_BF16;
    char err[ERR_MAX];
    size_t bytes;
    uint64_t data;
    uint8_t *header = synth_header(y, NULL, &bytes, &data);
    struct model m = {.family = family_find((struct gguf_str){y->arch, strlen(y->arch)})};
    struct loader l = {.m = &m, .g = &m.gguf, .arch = y->arch, .err = err};
    if (gguf_parse(&m.gguf, header, bytes, err, ERR_MAX)) die("synthetic model: %s", err);
    loader_hparams(&l);
    if (l.failed) die("synthetic model: %s", err);
    synth_add(&list, backbone, y->n_embd, y->n_vocab, 1, "token_embd.weight", 0);
    for (int il = 0; il < y->n_layer; il++) synth_add_layer(&list, y, &l, il);
    synth_add(&list, GGUF_F32, y->n_embd, 1, 1, "output_norm.weight", 0);
    synth_add(&list, backbone, y->n_embd, y->n_vocab, 1, "output.weight", 0);
    model_free(&m);
    free(header);
    return list;
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
                {"expert_shared_feed_forward_length", y->n_key ? y->ff_shared : 0},
                {"ssm.conv_kernel", y->n_key ? 4 : 0},
                {"ssm.group_count", y->n_key},
                {"ssm.time_step_rank", y->n_value},
                {"ssm.state_size", y->delta_head},
                {"ssm.inner_size", y->n_value * y->delta_head},
                {"full_attention_interval", y->interval},
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
    }
    if (y->scale > 0) {
        snprintf(key, sizeof key, "%s.expert_weights_scale", y->arch);
        gguf_put_f32(&w, key, y->scale);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", y->arch);
    gguf_put_f32(&w, key, 1e-6f);
    if (y->n_key) { /* llama.cpp wants it; moe reads text, for which it means nothing */
        snprintf(key, sizeof key, "%s.rope.dimension_sections", y->arch);
        gguf_put_array(&w, key, GGUF_V_I32, 4, (const int32_t[4]){11, 11, 10, 0});
    }
    snprintf(key, sizeof key, "%s.rope.freq_base", y->arch);
    gguf_put_f32(&w, key, y->n_key ? 1e7f : 1e6f);
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

/* Fills a tensor of a gated delta net whose numbers are no norm's: decays of -1 to 0, taps of -0.25 to 0.25. False: it
 * is another tensor. */
static bool synth_fill_delta(uint8_t *p, const struct synth_tensor *t, uint64_t *rng) {
    const char *name = strchr(t->name + 4, '.'); /* behind blk.N */
    const bool decay = name && !strcmp(name, ".ssm_a");
    if (!decay && (!name || strcmp(name, ".ssm_conv1d.weight"))) return false;
    for (uint64_t i = 0; i < t->bytes / 4; i++) {
        const float u = (float)rng_uniform(rng), v = decay ? -0.002f - u * u * u : 0.5f * u - 0.25f;
        memcpy(p + 4 * i, &v, 4);
    }
    return true;
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
        const bool skip = y->sizes || (synthetic && t[i].type != GGUF_F32); /* nobody reads the values */
        if (!skip && strstr(t[i].name, ".scale")) {
            /* 0.01 makes the weights of an expert about as large as those of the backbone */
            for (uint64_t k = 0; k < bytes / 4; k++) memcpy(to + 4 * k, &(float){0.01f}, 4);
        } else if (!skip && !synth_fill_delta(to, &t[i], &rng)) {
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
 * CPU threads
 *
 * A team is the threads of one rank on a CPU. All of them run the whole forward; the loops of an operation divide their
 * items among them. A thread has a contiguous share of a loop, the same one every time, so that it reads what its own
 * caches and its node's memory hold. A thread that has finished its share takes items from the ends of the others', so
 * that nobody waits for a thread that has no processor.
 *
 * A thread that waits spins for TEAM_SPIN and then sleeps. At most barriers of a forward it does not need to sleep; a
 * longer wait leaves the processor to other programs.
 *
 * Outside team_run a thread is alone: its loops have all items, and it waits for nobody.
 * ============================================================================================================ */

#define TEAM_SPIN 50e-6 /* seconds; waking a thread takes about as long */

enum { ITEM_BITS = 20, LOOP_BITS = 24, ITEM_MASK = (1 << ITEM_BITS) - 1 };

/* What is left of a thread's share of a loop, in one word: the number of the loop modulo 2^24, first item, end. */
struct team_share {
    _Alignas(64) _Atomic uint64_t left;
    uint32_t loop; /* the thread's own: loops that it has begun, modulo 2^24 */
};

struct team {
    int n;
    double spin;               /* seconds */
    pthread_t *threads;        /* (n); the first is the caller of team_run */
    struct team_share *shares; /* (n) */
    void (*body)(void *);      /* what team_run runs; NULL: the threads end */
    void *arg;
    const char *alloc_guard; /* the caller's */
    atomic_int started;      /* threads that have taken their number */
    atomic_int arrived;      /* threads at the barrier */
    atomic_uint phase;       /* barriers that all have reached */
    atomic_int asleep;       /* threads that wait for `woken` */
    pthread_mutex_t lock;
    pthread_cond_t woken; /* phase has changed */
};

/* The thread in its team, and its loop. */
static _Thread_local struct {
    struct team *team; /* NULL: it is alone */
    int index;
    int n, from; /* items of the loop; the thread from whose share it takes them; alone: the next item */
} team_me;

/* Processors that this program may use. */
static int processors(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return int_max(1, (int)sysconf(_SC_NPROCESSORS_ONLN));
    return CPU_COUNT(&set);
}

static void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until the phase is no longer `phase`. */
static void team_wait(struct team *t, unsigned phase) {
    const double until = t->spin > 0 ? now_seconds() + t->spin : 0;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(&t->phase, memory_order_acquire) != phase) return;
            cpu_relax();
        }
    } while (until > 0 && now_seconds() < until);
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add(&t->asleep, 1);
    while (atomic_load(&t->phase) == phase) pthread_cond_wait(&t->woken, &t->lock);
    atomic_fetch_sub(&t->asleep, 1);
    pthread_mutex_unlock(&t->lock);
}

/* Waits until all threads of the team are here. Returns true in the last of them, and there at once: the others wait
 * until it calls team_release. */
static bool team_arrive(void) {
    struct team *t = team_me.team;
    if (!t) return true;
    const unsigned phase = atomic_load_explicit(&t->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->n - 1) return true;
    team_wait(t, phase);
    return false;
}

/* Lets the other threads go on. */
static void team_release(void) {
    struct team *t = team_me.team;
    if (!t) return;
    atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
    atomic_fetch_add(&t->phase, 1);
    if (!atomic_load(&t->asleep)) return; /* a thread counts itself before it looks at the phase */
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->woken);
    pthread_mutex_unlock(&t->lock);
}

static void team_barrier(void) {
    if (team_arrive()) team_release();
}

/* Whether this is the first thread, for work that one does. */
static bool team_leads(void) { return !team_me.index; }

static int team_size(void) { return team_me.team ? team_me.team->n : 1; }

static uint64_t share_word(uint32_t loop, int next, int end) {
    return (uint64_t)loop << 2 * ITEM_BITS | (uint64_t)next << ITEM_BITS | (uint64_t)end;
}

/* Returns the sign of the share's loop minus loop `to`; negative: nobody has begun the share of loop `to`. */
static int32_t share_ahead(uint64_t left, uint32_t to) {
    return (int32_t)(((uint32_t)(left >> 2 * ITEM_BITS) - to) << (32 - LOOP_BITS));
}

/* Takes an item of thread v's share of this thread's loop: the first one of its own, the last one of another's. Returns
 * -1 if there is none: also where v has gone on to a later loop, which it does when every share is empty. */
static int share_take(struct team *t, int v) {
    const uint32_t loop = t->shares[team_me.index].loop;
    const int begin = (int)(((int64_t)team_me.n * v + t->n - 1) / t->n); /* rounded up: a single item is the leader's */
    const int end = (int)(((int64_t)team_me.n * (v + 1) + t->n - 1) / t->n);
    const bool own = v == team_me.index;
    _Atomic uint64_t *left = &t->shares[v].left;
    uint64_t now = atomic_load_explicit(left, memory_order_relaxed);
    for (;;) {
        if (share_ahead(now, loop) < 0) { /* v has not begun this loop; this thread may begin it for v */
            const uint64_t whole = share_word(loop, begin, end);
            if (!atomic_compare_exchange_weak_explicit(left, &now, whole, memory_order_relaxed, memory_order_relaxed))
                continue;
            now = whole;
        }
        const int next = (int)(now >> ITEM_BITS & ITEM_MASK), stop = (int)(now & ITEM_MASK);
        if (share_ahead(now, loop) > 0 || next == stop) return -1;
        const uint64_t rest = own ? share_word(loop, next + 1, stop) : share_word(loop, next, stop - 1);
        if (atomic_compare_exchange_weak_explicit(left, &now, rest, memory_order_relaxed, memory_order_relaxed))
            return own ? next : stop - 1;
    }
}

/* Returns an item of a loop that the team divides, -1 when there is none left:
 *
 *     for (int i = team_first(n); i >= 0; i = team_next()) ..
 *
 * All threads run the same loops; a loop has fewer than 2^20 items, and no other loop inside. Its end is no barrier. */
static int team_next(void) {
    struct team *t = team_me.team;
    if (!t) return team_me.from < team_me.n ? team_me.from++ : -1;
    for (;;) {
        const int i = share_take(t, team_me.from);
        if (i >= 0) return i;
        team_me.from = (team_me.from + 1) % t->n;
        if (team_me.from == team_me.index) return -1;
    }
}

static int team_first(int n) {
    struct team *t = team_me.team;
    team_me.n = n;
    team_me.from = team_me.index;
    if (t) t->shares[team_me.index].loop = (t->shares[team_me.index].loop + 1) % (1u << LOOP_BITS);
    return team_next();
}

/* Blocks the calling thread's signals but for its own faults, until they are set to *old again. Threads that it starts
 * in between leave the others to it. */
static void signals_block(sigset_t *old) {
    const int own[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT};
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, old);
}

static void *team_thread(void *arg) {
    struct team *t = arg;
    team_me.team = t;
    team_me.index = atomic_fetch_add(&t->started, 1);
    for (;;) {
        team_barrier();
        if (!t->body) return NULL;
        alloc_guard = t->alloc_guard;
        t->body(t->arg);
        team_barrier();
    }
}

/* Runs body(arg) in every thread of the team, of which the caller is the first, and waits for all. t NULL: the caller
 * alone. */
static void team_run(struct team *t, void (*body)(void *), void *arg) {
    if (t) t->body = body, t->arg = arg, t->alloc_guard = alloc_guard;
    team_me.team = t;
    team_me.index = 0;
    team_barrier();
    body(arg);
    team_barrier();
    team_me.team = NULL;
}

/* Starts a team of n threads; NULL for a single one. crowded: the program has more threads than processors, so that a
 * thread that spins keeps another from working. */
static struct team *team_start(int n, bool crowded) {
    sigset_t old;
    if (n == 1) return NULL;
    struct team *t = xcalloc(1, sizeof *t);
    t->n = n;
    t->spin = crowded ? 0 : TEAM_SPIN;
    t->threads = xcalloc((size_t)n, sizeof *t->threads);
    if (posix_memalign((void **)&t->shares, 64, (size_t)n * sizeof *t->shares)) die("out of memory");
    memset(t->shares, 0, (size_t)n * sizeof *t->shares);
    t->started = 1;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->woken, NULL);
    signals_block(&old);
    for (int i = 1; i < n; i++)
        if (pthread_create(&t->threads[i], NULL, team_thread, t)) die("cannot start %d threads; try a smaller -t", n);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return t;
}

/* Ends the threads and frees the team. */
static void team_stop(struct team *t) {
    if (!t) return;
    t->body = NULL;
    team_me.team = t;
    team_me.index = 0;
    team_barrier();
    team_me.team = NULL;
    for (int i = 1; i < t->n; i++) pthread_join(t->threads[i], NULL);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->woken);
    free(t->threads);
    free(t->shares);
    free(t);
}

/* ============================================================================================================
 * CPU kernels
 *
 * GEMM with the weight types of the file, and the small vector functions of a forward pass. A kernel computes one
 * thread's share, allocates nothing and knows nothing of models, layers or threads.
 *
 * Each instruction set has a table, struct kernels. At start kernels_choose picks the first one that the machine runs.
 * All tables decode weights exactly; only AMX rounds Q8_0 weights, to 2^-17. Activations may be rounded: to 16-bit
 * integers with one F32 scale per 32 (ACT_I16), or to the sum of two BF16 numbers (ACT_BF16).
 *
 * Invariant: an element of a result depends on its row of weights, its row of activations and the activation format
 * alone, and its sum is always taken in the same order. How a caller divides a GEMM into calls does not change a bit.
 *
 * Order: the types, the reference, vector functions, GEMM with integer activations and with F32 panels, one section per
 * instruction set, the choice.
 *
 * Tried and dropped:
 *   int8 activations, one F32 scale per 32: NMSE of the logits 1.5e-3 over 4,096 tokens; six greedy choices changed
 *     that had a margin above 0.5 logit. 16 bits cost a third of the speed where arithmetic is the limit, and nothing
 *     where memory bandwidth is.
 *   one BF16 number per activation (AMX): up to twice the prefill speed; one greedy choice in 4,096 changed that had a
 *     margin above 0.5 logit.
 *   prefetching the rows that follow into the first cache: 11.5 instead of 16.1 GB/s (NVFP4, one thread, Zen 4). It has
 *     fewer misses in flight than the second.
 *   merging rows into vectors by masked broadcasts instead of vinserti32x4, or from computed addresses: no faster (Zen 4).
 *   AMX_K of 256 and 512: the tile unit powers down while a panel is decoded; 128 keeps it awake.
 * ============================================================================================================ */

/* How a row of activations is stored for GEMM. ACT_F32_PANEL is stored as ACT_F32 is, but multiplied otherwise: by a
 * transposed panel of weights, which pays for many tokens. */
enum act_format { ACT_F32, ACT_F32_PANEL, ACT_I16, ACT_BF16, ACT_FORMATS };

enum { KERNEL_SCRATCH = 1 << 17 }; /* bytes of gemm.scratch */

/* The arguments of one GEMM: y[t * y_stride + r] = scale * sum_i w[r][i] * x[row(t)][i] for r < n_out and t < n_tok,
 * where row(t) = rows ? rows[t] : t. n_in is a multiple of the block of the weight type. */
struct gemm {
    uint32_t type;          /* enum gguf_type of the weights */
    enum act_format format; /* of x, as kernels.act_format(type, n_tok) returned it */
    const uint8_t *w;       /* (n_out, n_in) weights, unaligned */
    size_t w_stride;        /* bytes from row to row */
    int n_out, n_in;
    const uint8_t *x;    /* packed activations, 64-byte aligned */
    size_t x_stride;     /* bytes from row to row */
    const int32_t *rows; /* (n_tok) the row of x for each token; NULL: token t is row t */
    int n_tok;
    float scale;
    float *y;        /* (n_tok, n_out) */
    size_t y_stride; /* floats from token to token */
    void *scratch;   /* KERNEL_SCRATCH bytes, 64-byte aligned, owned by the calling thread */
};

enum {
    PREFETCH_TOKENS = 16,  /* most tokens for which reading weights may take longer than multiplying them */
    SAME_BITS_TOKENS = 16, /* most tokens of a forward for which a row must not depend on their number */
    TRANSPOSE_ROWS = 16    /* rows of which kernels.transpose makes whole columns */
};

/* C (m, n) += A (m, k) B (k, n), row-major. lda, ldb, ldc: floats per row. */
typedef void sgemm_function(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc);

/* y (n, ldy) = the transpose of m rows of n F32, BF16 or F16 values, x_stride bytes apart, as F32. Columns from m on, up
 * to the next multiple of TRANSPOSE_ROWS, become 0; ldy is at least that. */
typedef void transpose_function(uint32_t type, const uint8_t *x, size_t x_stride, int m, int n, float *y, int ldy);

/* The kernels of one instruction set. */
struct kernels {
    const char *name;
    /* Activations: the format that gemm wants for weights of `type` and n_tok tokens, the bytes of a packed row of n (a
     * multiple of 64), and a function that packs one. */
    enum act_format (*act_format)(uint32_t type, int n_tok);
    size_t (*act_bytes)(enum act_format f, int n);
    void (*act_pack)(enum act_format f, const float *x, int n, void *out);
    void (*gemm)(const struct gemm *g);
    sgemm_function *sgemm_add;
    transpose_function *transpose;
    float (*dot)(const float *a, const float *b, int n);  /* returns the dot product of a (n) and b (n) */
    float (*exp_sum)(float *s, int n, float max);         /* s = exp(s - max), 0 for -infinity; returns the sum of s */
    void (*silu_mul)(float *g, const float *u, int n);    /* g = g / (1 + exp(-g)) * u */
    void (*sigmoid_mul)(float *x, const float *g, int n); /* x = x / (1 + exp(-g)); x may be g */
    /* Conversions with the same bits as bf16_to_f32(x), e4m3_to_f32(x) * scale, e4m3_from_f32(x * inv_scale) and
     * bf16_from_f32(x). from_e4m3 takes finite codes only. */
    void (*from_bf16)(const uint16_t *x, float *y, int n);
    void (*from_e4m3)(const uint8_t *x, float scale, float *y, int n);
    void (*to_e4m3)(const float *x, float inv_scale, uint8_t *y, int n);
    void (*to_bf16)(const float *x, uint16_t *y, int n);
    /* y = w * x / sqrt(mean(x^2) + eps); w NULL: all ones (arXiv 1910.07467) */
    void (*rmsnorm)(const float *x, const float *w, float eps, float *y, int n);
    void (*mul_add)(float *y, const float *w, const float *x, int n); /* y += w * x */
    void (*scale)(const float *x, float f, float *y, int n);          /* y = f * x; y may be x */
    void (*scale_add)(const float *x, float f, float *y, int n);      /* y += f * x */
    /* One token of the gated delta rule over n columns of the state S (dk, lds): u = beta (v - a S^T k); S = a S + k
     * u^T; o = S^T q. q, k (dk); v, o (n). */
    void (*delta_step)(float *S, int lds, int dk, int n, const float *q, const float *k, const float *v, float a,
                       float beta, float *o);
    float (*amax)(const float *x, int n); /* returns the largest |x|, 0 for n = 0 */
    float (*max)(const float *x, int n);  /* returns the largest x; n > 0, no NaN */
};

/* Whether a tile of F32 products prefetches the rows behind its own: it is the first that reads them, and they follow in
 * memory. */
static inline bool gemm_prefetches(const struct gemm *g, int t0, size_t weight_size) {
    return t0 == 0 && g->n_tok <= PREFETCH_TOKENS && g->w_stride == weight_size * (size_t)g->n_in;
}

/* Returns the packed activations of token t. */
static inline const uint8_t *gemm_x(const struct gemm *g, int t) {
    return g->x + (size_t)(g->rows ? g->rows[t] : t) * g->x_stride;
}

/* 32 activations as 16-bit integers with one scale: value = (256 * hi + lo) * d. The integer is stored as two signed
 * digits, because the instructions multiply bytes; neither digit is -128, so that a kernel may negate it.
 *
 * bias[h] is -16 times the sum of the 16 integers of half h. Kernels with unsigned FP4 codes add 16 to every code;
 * adding the bias takes that back. It is stored because it is the same for every row of weights. */
struct act_i16 {
    float d;
    int32_t bias[2];
    int8_t hi[32], lo[32];
};

/* Returns the bytes of one plane of an ACT_BF16 row. An activation is the sum of two BF16 numbers; a row holds first
 * the plane of all high numbers, then the plane of all low ones. */
static size_t act_plane(int n) { return (2 * (size_t)n + 63) / 64 * 64; }

/* Returns the bytes of a packed row: an odd number of cache lines. With rows a power of two apart, element i of every
 * row would fall into the same cache set. */
static size_t act_bytes(enum act_format f, int n) {
    size_t bytes = ((size_t)n + 31) / 32 * sizeof(struct act_i16);
    if (f == ACT_F32 || f == ACT_F32_PANEL) bytes = 4 * (size_t)n;
    if (f == ACT_BF16) bytes = 2 * act_plane(n);
    return (bytes + 63) / 64 * 64 | 64;
}

/* ============================================================================================================
 * CPU kernels: reference
 *
 * Plain C with F32 activations and sums in double. The tests compare all other kernels with these; --cpu-ref runs them.
 * ============================================================================================================ */

static enum act_format ref_act_format(uint32_t type, int n_tok) {
    (void)type;
    (void)n_tok;
    return ACT_F32;
}

/* Copies the row as F32 and clears the rest of its bytes. */
static void ref_act_pack(enum act_format f, const float *x, int n, void *out) {
    memcpy(out, x, (size_t)n * sizeof *x);
    memset((char *)out + (size_t)n * sizeof *x, 0, act_bytes(f, n) - (size_t)n * sizeof *x);
}

/* Returns the dot product of a (n) and b (n), summed in double. */
static double ref_dot_wide(const float *a, const float *b, int n) {
    double s[8] = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) s[j] += (double)a[i + j] * (double)b[i + j];
    for (; i < n; i++) s[0] += (double)a[i] * (double)b[i];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static float ref_dot(const float *a, const float *b, int n) { return (float)ref_dot_wide(a, b, n); }

/* Decodes each row in pieces of 512 weights and multiplies a piece by up to 16 tokens before decoding the next. */
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

static void ref_sgemm_add(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double s = 0;
            for (int p = 0; p < k; p++) s += (double)a[(ptrdiff_t)i * lda + p] * (double)b[(ptrdiff_t)p * ldb + j];
            c[(ptrdiff_t)i * ldc + j] += (float)s;
        }
}

static void ref_transpose(uint32_t type, const uint8_t *x, size_t x_stride, int m, int n, float *y, int ldy) {
    enum { PIECE = 64 };
    for (int r = 0; r < m || r % TRANSPOSE_ROWS; r++)
        for (int i = 0; i < n; i += PIECE) {
            float v[PIECE] = {0};
            const int some = int_min(n - i, PIECE);
            if (r < m)
                gguf_dequantize_row(type, x + (size_t)r * x_stride + gguf_row_bytes(type, (size_t)i), v, (size_t)some);
            for (int j = 0; j < some; j++) y[(ptrdiff_t)(i + j) * ldy + r] = v[j];
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

static void ref_sigmoid_mul(float *x, const float *g, int n) {
    for (int i = 0; i < n; i++) x[i] = x[i] / (1.0f + expf(-g[i]));
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

static void ref_scale(const float *x, float f, float *y, int n) {
    for (int i = 0; i < n; i++) y[i] = f * x[i];
}

static void ref_scale_add(const float *x, float f, float *y, int n) {
    for (int i = 0; i < n; i++) y[i] += f * x[i];
}

static void ref_mul_add(float *y, const float *w, const float *x, int n) {
    for (int i = 0; i < n; i++) y[i] += w[i] * x[i];
}

static void ref_delta_step(float *S, int lds, int dk, int n, const float *q, const float *k, const float *v, float a,
                           float beta, float *o) {
    enum { PIECE = 32 };
    for (int c0 = 0; c0 < n; c0 += PIECE) {
        const int m = int_min(PIECE, n - c0);
        double old[PIECE] = {0}, out[PIECE] = {0};
        float u[PIECE];
        for (int i = 0; i < dk; i++)
            for (int c = 0; c < m; c++) old[c] += (double)S[(ptrdiff_t)i * lds + c0 + c] * (double)k[i];
        for (int c = 0; c < m; c++) u[c] = beta * (v[c0 + c] - a * (float)old[c]);
        for (int i = 0; i < dk; i++) {
            float *row = S + (ptrdiff_t)i * lds + c0;
            for (int c = 0; c < m; c++) {
                row[c] = a * row[c] + k[i] * u[c];
                out[c] += (double)row[c] * (double)q[i];
            }
        }
        for (int c = 0; c < m; c++) o[c0 + c] = (float)out[c];
    }
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

static const struct kernels kernels_ref = {.name = "reference",
                                           .act_format = ref_act_format,
                                           .act_bytes = act_bytes,
                                           .act_pack = ref_act_pack,
                                           .gemm = ref_gemm,
                                           .sgemm_add = ref_sgemm_add,
                                           .transpose = ref_transpose,
                                           .dot = ref_dot,
                                           .exp_sum = ref_exp_sum,
                                           .silu_mul = ref_silu_mul,
                                           .sigmoid_mul = ref_sigmoid_mul,
                                           .from_bf16 = ref_from_bf16,
                                           .from_e4m3 = ref_from_e4m3,
                                           .to_e4m3 = ref_to_e4m3,
                                           .to_bf16 = ref_to_bf16,
                                           .rmsnorm = ref_rmsnorm,
                                           .mul_add = ref_mul_add,
                                           .scale = ref_scale,
                                           .scale_add = ref_scale_add,
                                           .delta_step = ref_delta_step,
                                           .amax = ref_amax,
                                           .max = ref_max};

/* ============================================================================================================
 * CPU kernels: portable vector functions
 *
 * Functions in the compiler's vector types, written once. VECTOR_FUNCTIONS and VECTOR_GEMM inline them into one wrapper
 * per instruction set. Vectors are passed by pointer, because by value their calling convention would depend on the
 * instruction set.
 * ============================================================================================================ */

#if defined(__x86_64__)
enum { VL = 8 }; /* floats in a vector */
#else
enum { VL = 4 };
#endif
typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vu16 __attribute__((vector_size(2 * VL)));
typedef uint8_t vu8 __attribute__((vector_size(VL)));

/* The same types for unaligned memory of any other type. */
typedef vf vf_mem __attribute__((aligned(1), may_alias));
typedef vi vi_mem __attribute__((aligned(1), may_alias));
typedef vu vu_mem __attribute__((aligned(1), may_alias));
typedef vu16 vu16_mem __attribute__((aligned(1), may_alias));
typedef vu8 vu8_mem __attribute__((aligned(1), may_alias));

#define VLOAD(type, p)      (*(const type##_mem *)(p))
#define VSTORE(type, p)     (*(type##_mem *)(p)) /* an lvalue: VSTORE(vf, p) = v */
#define VSELECT(mask, a, b) ((vf)(((vi)(mask) & (vi)(a)) | (~(vi)(mask) & (vi)(b))))
#define INLINE              static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Returns the sum of the lanes, always in the same order. */
INLINE float vec_sum(const vf *v) {
    float s[VL];
    memcpy(s, v, sizeof s);
    UNROLL for (int n = VL / 2; n; n /= 2) { UNROLL for (int i = 0; i < n; i++) s[i] += s[i + n]; }
    return s[0];
}

/* Converts a small float format to F32. bits: the value without its sign, shifted so that its exponent field begins at
 * bit 23. rebias: the F32 exponent bias minus that of the format. A subnormal has no hidden bit; 2v - 2^(1-bias)
 * removes the one that F32 assumes. */
INLINE void vec_rebias(const vu *bits, uint32_t rebias, vf *out) {
    vu b = *bits + (rebias << 23), least = (vu){0} + ((rebias + 1) << 23);
    *out = VSELECT(*bits < (1u << 23), (vf)b * 2.0f - (vf)least, (vf)b);
}

/* Loads the VL weights i..i+VL-1 of a row as F32, exactly. */
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

/* Converts finite E4M3 codes. An F32 with the bits of an E4M3, subnormal or not, is 2^-120 of it. */
INLINE void vec_e4m3(const vu *code, vf *out) { *out = (vf)((*code & 0x7f) << 20 | (*code & 0x80) << 24) * 0x1p120f; }

INLINE void vec_load_e4m3(const uint8_t *row, int i, vf *out) {
    vu code = __builtin_convertvector(VLOAD(vu8, row + i), vu);
    vec_e4m3(&code, out);
}

/* x = e^x. Above 88 it gives e^88, below -87.3 it gives 0. x = n ln 2 + r, and e^r is a polynomial of degree 6 (Cephes,
 * expf); the relative error is at most 2e-7. */
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

/* Returns the dot product of a (n) and b (n). */
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

/* Multiplies R <= 4 rows of weights from r0 on by the F32 activations of T <= 4 tokens from t0 on and stores the
 * results in g->y. The order in which an element is summed does not depend on R or T. */
INLINE void vec_tile(vec_load *load, const struct gemm *g, int r0, int R, int t0, int T) {
    const size_t size = g->type == GGUF_F32 ? 4 : 2, step = VL * (size_t)R * size; /* bytes of a step of the loop */
    const bool ahead = gemm_prefetches(g, t0, size);
    const uint8_t *w[4], *next = g->w + (size_t)(r0 + R) * g->w_stride;
    const float *x[4];
    vf s[4][4] = {0};
    int i = 0;
    UNROLL for (int r = 0; r < R; r++) w[r] = g->w + (size_t)(r0 + r) * g->w_stride;
    UNROLL for (int t = 0; t < T; t++) x[t] = (const float *)(const void *)gemm_x(g, t0 + t);
    for (; i + VL <= g->n_in; i += VL) {
        vf a[4];
        if (ahead) { /* in the order of memory */
            for (size_t b = 0; b < step; b += 64) __builtin_prefetch(next + b, 0, 2);
            next += step;
        }
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

/* GEMM with F32 activations, in tiles of 2 rows by 4 tokens or 4 rows by 1 token. */
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

/* Defines sgemm_add for one instruction set: vectors of `lanes` floats, tiles of `rows` rows by two vectors. An element
 * of C is one chain of additions in the order of k, so that neither lanes nor rows change its bits. */
#define SGEMM_ADD(isa, TARGET, lanes, rows)                                                                         \
    typedef float isa##_mm __attribute__((vector_size(4 * (lanes))));                                               \
    typedef isa##_mm isa##_mm_mem __attribute__((aligned(1), may_alias));                                           \
    /* M <= rows rows by N <= 2 vectors of C, which stay in registers. */                                           \
    TARGET INLINE void isa##_mm_tile(int M, int N, int k, const float *a, ptrdiff_t lda, const float *b,            \
                                     ptrdiff_t ldb, float *c, ptrdiff_t ldc) {                                      \
        isa##_mm s[rows][2], v[2];                                                                                  \
        UNROLL for (int i = 0; i < M; i++) {                                                                        \
            UNROLL for (int j = 0; j < N; j++) s[i][j] = VLOAD(isa##_mm, c + i * ldc + j * (lanes));                \
        }                                                                                                           \
        for (int p = 0; p < k; p++) {                                                                               \
            UNROLL for (int j = 0; j < N; j++) v[j] = VLOAD(isa##_mm, b + p * ldb + j * (lanes));                   \
            UNROLL for (int i = 0; i < M; i++) {                                                                    \
                UNROLL for (int j = 0; j < N; j++) s[i][j] += a[i * lda + p] * v[j];                                \
            }                                                                                                       \
        }                                                                                                           \
        UNROLL for (int i = 0; i < M; i++) {                                                                        \
            UNROLL for (int j = 0; j < N; j++) VSTORE(isa##_mm, c + i * ldc + j * (lanes)) = s[i][j];               \
        }                                                                                                           \
    }                                                                                                               \
    /* M rows of C; the columns after the last whole vector are computed one by one. */                             \
    TARGET INLINE void isa##_mm_rows(int M, int n, int k, const float *a, ptrdiff_t lda, const float *b,            \
                                     ptrdiff_t ldb, float *c, ptrdiff_t ldc) {                                      \
        int j = 0;                                                                                                  \
        for (; j + 2 * (lanes) <= n; j += 2 * (lanes)) isa##_mm_tile(M, 2, k, a, lda, b + j, ldb, c + j, ldc);      \
        for (; j + (lanes) <= n; j += (lanes)) isa##_mm_tile(M, 1, k, a, lda, b + j, ldb, c + j, ldc);              \
        for (; j < n; j++)                                                                                          \
            for (int i = 0; i < M; i++)                                                                             \
                for (int p = 0; p < k; p++) c[i * ldc + j] += a[i * lda + p] * b[p * ldb + j];                      \
    }                                                                                                               \
    TARGET static void isa##_sgemm_add(int m, int n, int k, const float *a, int lda, const float *b, int ldb,       \
                                       float *c, int ldc) {                                                         \
        ptrdiff_t i = 0;                                                                                            \
        for (; i + (rows) <= m; i += (rows)) isa##_mm_rows(rows, n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc); \
        for (; i + 4 <= m; i += 4) isa##_mm_rows(4, n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc);              \
        for (; i + 2 <= m; i += 2) isa##_mm_rows(2, n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc);              \
        for (; i < m; i++) isa##_mm_rows(1, n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc);                      \
    }

/* Loads or stores the first n elements of v, all of them for n >= VL. */
INLINE void vec_load_some(const float *x, int n, vf *v) {
    if (n >= VL) *v = VLOAD(vf, x);
    else memcpy(v, x, (size_t)n * sizeof *x);
}

INLINE void vec_store_some(const vf *v, int n, float *x) {
    if (n >= VL) VSTORE(vf, x) = *v;
    else memcpy(x, v, (size_t)n * sizeof *x);
}

INLINE float vec_exp_sum(float *s, int n, float max) {
    vf sum = {0};
    for (int i = 0; i < n; i += VL) {
        vf v = (vf){0} - INFINITY;
        vec_load_some(s + i, n - i, &v);
        v -= max;
        vec_exp(&v);
        sum += v;
        vec_store_some(&v, n - i, s + i);
    }
    return vec_sum(&sum);
}

INLINE void vec_silu_mul(float *g, const float *u, int n) {
    for (int i = 0; i < n; i += VL) {
        vf x = {0}, y = {0};
        vec_load_some(g + i, n - i, &x);
        vec_load_some(u + i, n - i, &y);
        vf e = -x;
        vec_exp(&e);
        x = x * y / (1.0f + e);
        vec_store_some(&x, n - i, g + i);
    }
}

INLINE void vec_sigmoid_mul(float *x, const float *g, int n) {
    for (int i = 0; i < n; i += VL) {
        vf y = {0}, e = {0};
        vec_load_some(x + i, n - i, &y);
        vec_load_some(g + i, n - i, &e);
        e = -e;
        vec_exp(&e);
        y = y / (1.0f + e);
        vec_store_some(&y, n - i, x + i);
    }
}

INLINE void vec_from_bf16(vec_load *load, const uint16_t *x, float *y, int n) {
    int i = 0;
    for (vf v; i + VL <= n; i += VL) {
        load((const uint8_t *)x, i, &v);
        VSTORE(vf, y + i) = v;
    }
    ref_from_bf16(x + i, y + i, n - i);
}

INLINE void vec_from_e4m3(vec_load *load, const uint8_t *x, float scale, float *y, int n) {
    int i = 0;
    for (vf v; i + VL <= n; i += VL) {
        load(x, i, &v);
        VSTORE(vf, y + i) = v * scale;
    }
    ref_from_e4m3(x + i, scale, y + i, n - i);
}

/* e4m3_from_f32 with selections instead of branches. */
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

/* bf16_from_f32 with selections instead of branches. */
INLINE void vec_to_bf16(const float *x, uint16_t *y, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vu u = VLOAD(vu, x + i), r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
        r = (vu)VSELECT((u & 0x7fffffff) > 0x7f800000, u >> 16 | 0x40, r);
        VSTORE(vu16, y + i) = __builtin_convertvector(r, vu16);
    }
    ref_to_bf16(x + i, y + i, n - i);
}

/* The squares are summed in pieces of 512 in F32 and the pieces in double, which bounds the rounding error. */
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

INLINE void vec_scale(const float *x, float f, float *y, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) VSTORE(vf, y + i) = VLOAD(vf, x + i) * f;
    ref_scale(x + i, f, y + i, n - i);
}

INLINE void vec_scale_add(const float *x, float f, float *y, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) VSTORE(vf, y + i) += VLOAD(vf, x + i) * f;
    ref_scale_add(x + i, f, y + i, n - i);
}

INLINE void vec_mul_add(float *y, const float *w, const float *x, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) VSTORE(vf, y + i) = VLOAD(vf, y + i) + VLOAD(vf, w + i) * VLOAD(vf, x + i);
    ref_mul_add(y + i, w + i, x + i, n - i);
}

/* Four vectors of columns at a time: the state's columns stay in the first cache from one pass to the other. */
INLINE void vec_delta_step(float *S, int lds, int dk, int n, const float *q, const float *k, const float *v, float a,
                           float beta, float *o) {
    enum { N = 4 };
    int c = 0;
    for (; c + N * VL <= n; c += N * VL) {
        vf u[N] = {0}, out[N] = {0};
        for (int i = 0; i < dk; i++) {
            UNROLL for (int j = 0; j < N; j++) u[j] += k[i] * VLOAD(vf, S + (ptrdiff_t)i * lds + c + j * VL);
        }
        UNROLL for (int j = 0; j < N; j++) u[j] = beta * (VLOAD(vf, v + c + j * VL) - a * u[j]);
        for (int i = 0; i < dk; i++) {
            UNROLL for (int j = 0; j < N; j++) {
                vf x = a * VLOAD(vf, S + (ptrdiff_t)i * lds + c + j * VL) + k[i] * u[j];
                VSTORE(vf, S + (ptrdiff_t)i * lds + c + j * VL) = x;
                out[j] += q[i] * x;
            }
        }
        UNROLL for (int j = 0; j < N; j++) VSTORE(vf, o + c + j * VL) = out[j];
    }
    if (c < n) ref_delta_step(S + c, lds, dk, n - c, q, k, v + c, a, beta, o + c);
}

/* Compares the bits as integers: they are in the same order as the magnitudes. */
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

/* Packs n activations, a multiple of 32, as ACT_I16. The largest of 32 becomes 32512 = 127 * 256. A block below 2^-100
 * becomes zeros, so that 32512 / amax stays finite. */
INLINE void vec_pack_i16(const float *x, int n, struct act_i16 *out) {
    for (int b = 0; b < n / 32; b++, x += 32) {
        float amax = vec_amax(x, 32), inv = amax < 0x1p-100f ? 0.0f : 32512.0f / amax;
        out[b].d = amax < 0x1p-100f ? 0.0f : amax / 32512.0f;
        for (int h = 0; h < 2; h++) {
            vu sum = {0};
            uint32_t total = 0;
            for (int i = 16 * h; i < 16 * h + 16; i += VL) {
                vf t = VLOAD(vf, x + i) * inv + 0x1.8p23f; /* rounds to the nearest integer */
                vu q = (vu)t - 0x4b400000, lo = ((q + 128) & 255) - 128, hi = (vu)((vi)(q - lo) >> 8);
                lo -= (vu)((vi)lo == -128); /* -128 becomes -127 */
                VSTORE(vu8, out[b].hi + i) = __builtin_convertvector(hi, vu8);
                VSTORE(vu8, out[b].lo + i) = __builtin_convertvector(lo, vu8);
                sum += (hi << 8) + lo;
            }
            for (int j = 0; j < VL; j++) total += sum[j];
            out[b].bias[h] = (int32_t)(0 - 16 * total);
        }
    }
}

/* Packs a row of n activations. ACT_BF16: the high number is x rounded, the low one is the rest rounded. */
INLINE void vec_act_pack(vec_load *load_bf16, enum act_format f, const float *x, int n, void *out) {
    if (f == ACT_F32 || f == ACT_F32_PANEL) ref_act_pack(f, x, n, out);
    else if (f == ACT_I16) vec_pack_i16(x, n, out);
    else {
        uint16_t *hi = out, *lo = (uint16_t *)(void *)((uint8_t *)out + act_plane(n));
        memset(out, 0, act_bytes(f, n));
        for (int i = 0; i < n; i += 64) {
            float rest[64];
            int m = int_min(n - i, 64);
            vec_to_bf16(x + i, hi + i, m);
            vec_from_bf16(load_bf16, hi + i, rest, m);
            for (int j = 0; j < m; j++) rest[j] = x[i + j] - rest[j];
            vec_to_bf16(rest, lo + i, m);
        }
    }
}

/* Defines the vector functions of one instruction set. TARGET: its function attribute. */
#define VECTOR_FUNCTIONS(isa, TARGET, load_bf16, load_e4m3)                                                        \
    TARGET static void isa##_act_pack(enum act_format f, const float *x, int n, void *out) {                       \
        vec_act_pack(load_bf16, f, x, n, out);                                                                     \
    }                                                                                                              \
    TARGET static float isa##_dot(const float *a, const float *b, int n) { return vec_dot(a, b, n); }              \
    TARGET static float isa##_exp_sum(float *s, int n, float max) { return vec_exp_sum(s, n, max); }               \
    TARGET static void isa##_silu_mul(float *g, const float *u, int n) { vec_silu_mul(g, u, n); }                  \
    TARGET static void isa##_sigmoid_mul(float *x, const float *g, int n) { vec_sigmoid_mul(x, g, n); }            \
    TARGET static void isa##_from_bf16(const uint16_t *x, float *y, int n) { vec_from_bf16(load_bf16, x, y, n); }  \
    TARGET static void isa##_from_e4m3(const uint8_t *x, float scale, float *y, int n) {                           \
        vec_from_e4m3(load_e4m3, x, scale, y, n);                                                                  \
    }                                                                                                              \
    TARGET static void isa##_to_e4m3(const float *x, float inv_scale, uint8_t *y, int n) {                         \
        vec_to_e4m3(x, inv_scale, y, n);                                                                           \
    }                                                                                                              \
    TARGET static void isa##_to_bf16(const float *x, uint16_t *y, int n) { vec_to_bf16(x, y, n); }                 \
    TARGET static void isa##_rmsnorm(const float *x, const float *w, float eps, float *y, int n) {                 \
        vec_rmsnorm(x, w, eps, y, n);                                                                              \
    }                                                                                                              \
    TARGET static void isa##_mul_add(float *y, const float *w, const float *x, int n) { vec_mul_add(y, w, x, n); } \
    TARGET static void isa##_scale(const float *x, float f, float *y, int n) { vec_scale(x, f, y, n); }            \
    TARGET static void isa##_scale_add(const float *x, float f, float *y, int n) { vec_scale_add(x, f, y, n); }    \
    TARGET static void isa##_delta_step(float *S, int lds, int dk, int n, const float *q, const float *k,          \
                                        const float *v, float a, float beta, float *o) {                           \
        vec_delta_step(S, lds, dk, n, q, k, v, a, beta, o);                                                        \
    }                                                                                                              \
    TARGET static float isa##_amax(const float *x, int n) { return vec_amax(x, n); }                               \
    TARGET static float isa##_max(const float *x, int n) { return vec_max(x, n); }

/* Defines the GEMM with F32 activations of one instruction set. load_bf16, load_f16: its functions of type vec_load. */
#define VECTOR_GEMM(isa, TARGET, load_bf16, load_f16)          \
    TARGET static void isa##_gemm_f32(const struct gemm *g) {  \
        if (g->type == GGUF_F32) vec_gemm(vec_load_f32, g);    \
        else if (g->type == GGUF_BF16) vec_gemm(load_bf16, g); \
        else vec_gemm(load_f16, g);                            \
    }                                                          \
    SGEMM_ADD(isa, TARGET, VL, 4)

/* Initializes the members of struct kernels that the two macros above define. */
#define VECTOR_TABLE(isa)                                                                                           \
    .act_bytes = act_bytes, .act_pack = isa##_act_pack, .sgemm_add = isa##_sgemm_add, .dot = isa##_dot,             \
    .exp_sum = isa##_exp_sum, .silu_mul = isa##_silu_mul, .sigmoid_mul = isa##_sigmoid_mul,                         \
    .from_bf16 = isa##_from_bf16, .from_e4m3 = isa##_from_e4m3, .to_e4m3 = isa##_to_e4m3, .to_bf16 = isa##_to_bf16, \
    .rmsnorm = isa##_rmsnorm, .mul_add = isa##_mul_add, .scale = isa##_scale, .scale_add = isa##_scale_add,         \
    .delta_step = isa##_delta_step, .amax = isa##_amax, .max = isa##_max

/* ============================================================================================================
 * CPU kernels: GEMM with integer activations
 *
 * For NVFP4, MXFP4 and Q8_0 weights and ACT_I16 activations. A panel is a group of weight rows, as many as a vector of
 * the instruction set has 32-bit lanes. Up to 512 weights of each row are decoded to small integers and F32 scales, so
 * that the panel stays in the first-level cache while all tokens of the call are multiplied by it. Lane r belongs to
 * row r and holds four consecutive weights of it. The activations are broadcast to all lanes, and lanes are never added
 * to each other. For up to PANEL_GROUP tokens, as in decode, there is no panel: a block is decoded and multiplied in
 * registers, and each row is read from start to end. The sums are the same bits.
 *
 * The sum of an element takes these steps for each 32 weights: v = i0 * d0; v = i1 * d1 + v; sum = v * d + sum. i0 and
 * i1 are the exact integer sums of the two halves, d0 and d1 the weight scales of the halves, d is the scale of the
 * activations.
 *
 * Budget of 64 NVFP4 weights of a panel's rows (AVX-512, 16 rows): about 130 instructions decode them. A token takes 54,
 * of which 38 are on the multipliers (32 vpdpbusd and 6 in F32): one a cycle on Zen 4, so 84 % of the peak is the most.
 * Measured there: 110 cycles for one token, 222 for four, 1,326 for 32, so 39 for each further token.
 * ============================================================================================================ */

enum {
    PANEL_ROWS = 16,    /* most rows of a panel */
    PANEL_BLOCKS = 16,  /* most blocks of 32 weights of a row in a panel */
    PANEL_TOKENS = 512, /* tokens whose sums are in gemm.scratch at a time */
    PANEL_GROUP = 4     /* tokens whose sums are in registers at a time */
};

/* The panel functions of one instruction set. */
struct panel_isa {
    int n_rows;         /* rows of a panel */
    size_t block_bytes; /* bytes of a panel for 32 weights of every row */
    /* Decodes n_blocks * 32 weights of n_rows rows, which are w_stride bytes apart. next: what will be decoded next; it
     * may be prefetched. */
    void (*decode)(uint32_t type, const uint8_t *w, size_t w_stride, const uint8_t *next, int n_blocks, void *panel);
    /* sum (n_tok, n_rows) += panel times x[t], n_tok <= PANEL_GROUP */
    void (*dot)(uint32_t type, const void *panel, int n_blocks, const struct act_i16 *const *x, int n_tok, float *sum);
    /* sum (n_tok, n_rows) = n_rows rows of n_blocks * 32 weights, w_stride bytes apart, times x[t], without a panel;
     * n_tok <= PANEL_GROUP; NULL: there is none */
    void (*direct)(uint32_t type, const uint8_t *w, size_t w_stride, int n_blocks, const struct act_i16 *const *x,
                   int n_tok, float *sum);
};

/* Computes rows [r0, r0 + n) of g for the tokens [t0, t0 + n_tok), n <= n_rows and n_tok <= PANEL_TOKENS. Scratch: the
 * panel, copies of the last rows, the sums (n_tok, n_rows). */
static void panel_run(const struct gemm *g, const struct panel_isa *isa, int r0, int n, int t0, int n_tok) {
    uint8_t *panel = g->scratch, *copy = panel + PANEL_BLOCKS * isa->block_bytes;
    float *sum = (float *)(void *)(copy + PANEL_ROWS * PANEL_BLOCKS * sizeof(struct block_q8_0));
    const bool direct = isa->direct && n_tok <= PANEL_GROUP && n == isa->n_rows;
    if (direct) {
        const struct act_i16 *x[PANEL_GROUP];
        for (int i = 0; i < n_tok; i++) x[i] = (const struct act_i16 *)(const void *)gemm_x(g, t0 + i);
        isa->direct(g->type, g->w + (size_t)r0 * g->w_stride, g->w_stride, g->n_in / 32, x, n_tok, sum);
    } else {
        memset(sum, 0, (size_t)(n_tok * isa->n_rows) * sizeof *sum);
    }
    for (int b = 0; b < g->n_in / 32 && !direct; b += PANEL_BLOCKS) {
        int nb = int_min(g->n_in / 32 - b, PANEL_BLOCKS);
        size_t bytes = gguf_row_bytes(g->type, 32 * (size_t)nb);
        const uint8_t *w = g->w + (size_t)r0 * g->w_stride + gguf_row_bytes(g->type, 32 * (size_t)b);
        size_t stride = g->w_stride;
        const uint8_t *next =
            b + nb < g->n_in / 32 ? w + bytes : g->w + (size_t)int_min(r0 + n, g->n_out - 1) * g->w_stride;
        if (n < isa->n_rows) { /* there may be no memory after the last row: fill the panel with copies of it */
            for (int r = 0; r < isa->n_rows; r++)
                memcpy(copy + (size_t)r * bytes, w + (size_t)(r < n ? r : n - 1) * stride, bytes);
            w = copy;
            stride = bytes;
        }
        isa->decode(g->type, w, stride, next, nb, panel);
        for (int t = 0; t < n_tok; t += PANEL_GROUP) {
            const struct act_i16 *x[PANEL_GROUP];
            int nt = int_min(n_tok - t, PANEL_GROUP);
            for (int i = 0; i < nt; i++) x[i] = (const struct act_i16 *)(const void *)gemm_x(g, t0 + t + i) + b;
            isa->dot(g->type, panel, nb, x, nt, sum + (size_t)(t * isa->n_rows));
        }
    }
    for (int t = 0; t < n_tok; t++)
        vec_scale(sum + t * isa->n_rows, g->scale, g->y + (size_t)(t0 + t) * g->y_stride + (size_t)r0, n);
}

/* GEMM with ACT_I16 activations, panel by panel. */
static void panel_gemm(const struct gemm *g, const struct panel_isa *isa) {
    for (int t = 0; t < g->n_tok; t += PANEL_TOKENS)
        for (int r = 0; r < g->n_out; r += isa->n_rows)
            panel_run(g, isa, r, int_min(g->n_out - r, isa->n_rows), t, int_min(g->n_tok - t, PANEL_TOKENS));
}

/* Integers for the block types; float weights stay with F32 activations. */
static enum act_format panel_act_format(uint32_t type, int n_tok) {
    if (type != GGUF_F32 && type != GGUF_F16 && type != GGUF_BF16) return ACT_I16;
    return n_tok > SAME_BITS_TOKENS ? ACT_F32_PANEL : ACT_F32;
}

/* Prefetches the first bytes of each of `rows` rows, which are `stride` bytes apart. */
INLINE void panel_prefetch(const uint8_t *p, size_t stride, int rows) {
    UNROLL for (int r = 0; r < rows; r++) __builtin_prefetch(p + (size_t)r * stride);
}

/* Defines the types of one instruction set's panels: vectors of `rows` lanes, and a block of 32 weights of every row.
 * Lane r of w[j] holds the weights 4j..4j+3 of row r, a byte each; lane r of d[h] is the scale of its half h. */
#define PANEL_TYPES(isa, rows)                                                     \
    typedef float isa##_vf __attribute__((vector_size(4 * (rows)), may_alias));    \
    typedef int32_t isa##_vi __attribute__((vector_size(4 * (rows)), may_alias));  \
    typedef uint32_t isa##_vu __attribute__((vector_size(4 * (rows)), may_alias)); \
    typedef uint8_t isa##_vb __attribute__((vector_size(4 * (rows)), may_alias));  \
    struct isa##_block {                                                           \
        isa##_vu w[8];                                                             \
        isa##_vf d[2];                                                             \
    };

/* Defines isa##_panel, the panel functions of one instruction set, from its
 *   columns(p, stride, out): transposes `rows` rows of four dwords, `stride` bytes apart: lane r of out[j] is dword j
 *     of row r;
 *   codes(q, lo, hi): translates the FP4 codes in the low and high nibbles of q to 2 * E2M1 plus a constant;
 *   dot16(type, w, hi, lo, bias, sum): sum = 16 weights w[4] times 16 activations, without that constant;
 *   q8_0_flip: what Q8_0 weights are XORed with. */
#define PANEL_FUNCTIONS(isa, TARGET, rows, q8_0_flip)                                                                 \
    /* See vec_rebias. */                                                                                             \
    TARGET INLINE void isa##_rebias(const isa##_vu *bits, uint32_t rebias, isa##_vf *out) {                           \
        isa##_vf v = (isa##_vf)(*bits + (rebias << 23)), least = (isa##_vf)((isa##_vu){0} + ((rebias + 1) << 23));    \
        isa##_vu small = (isa##_vu)(*bits < (1u << 23));                                                              \
        *out = (isa##_vf)((small & (isa##_vu)(v * 2.0f - least)) | (~small & (isa##_vu)v));                           \
    }                                                                                                                 \
    TARGET INLINE void isa##_decode_nvfp4(const uint8_t *w, size_t stride, struct isa##_block *p) {                   \
        isa##_vu q[12], d;                                                                                            \
        isa##_columns(w, stride, q);                                                                                  \
        isa##_columns(w + 16, stride, q + 4);                                                                         \
        isa##_columns(w + 20, stride, q + 8);                                                                         \
        q[8] = q[11]; /* q[0] are the four scales, q[1..8] the codes */                                               \
        UNROLL for (int i = 0; i < 8; i++) {                                                                          \
            int at = i / 2 % 2 * 4 + i % 2;                                                                           \
            isa##_codes(&q[i + 1], &p[i / 4].w[at], &p[i / 4].w[at + 2]);                                             \
        }                                                                                                             \
        d = q[0] & (isa##_vu)((isa##_vb)q[0] != 0x7f);                                                                \
        UNROLL for (int i = 0; i < 4; i++) {                                                                          \
            /* See vec_e4m3. Half of the scale, because the codes are 2 * E2M1. */                                    \
            isa##_vu bits = (i < 3 ? d << (20 - 8 * i) : d >> 4) & 0x07f00000;                                        \
            p[i / 2].d[i % 2] = (isa##_vf)bits * 0x1p119f;                                                            \
        }                                                                                                             \
    }                                                                                                                 \
    TARGET INLINE void isa##_decode_mxfp4(const uint8_t *w, size_t stride, struct isa##_block *p) {                   \
        isa##_vu q[4], e[4];                                                                                          \
        isa##_columns(w, stride, e);                                                                                  \
        isa##_columns(w + 1, stride, q);                                                                              \
        UNROLL for (int i = 0; i < 4; i++) isa##_codes(&q[i], &p->w[i], &p->w[i + 4]);                                \
        e[0] = (e[0] & 255) << 23;                                                                                    \
        e[0] |= (isa##_vu)(e[0] == 0) & 0x00400000; /* code 0 means 2^-127 */                                         \
        p->d[0] = p->d[1] = (isa##_vf)e[0] * 0.5f;                                                                    \
    }                                                                                                                 \
    TARGET INLINE void isa##_decode_q8_0(const uint8_t *w, size_t stride, struct isa##_block *p) {                    \
        isa##_vu d[4], bits;                                                                                          \
        isa##_columns(w, stride, d);                                                                                  \
        isa##_columns(w + 2, stride, p->w);                                                                           \
        isa##_columns(w + 18, stride, p->w + 4);                                                                      \
        UNROLL for (int i = 0; i < 8; i++) p->w[i] ^= (q8_0_flip);                                                    \
        bits = (d[0] & 0x7fff) << 13;                                                                                 \
        isa##_rebias(&bits, 112, &p->d[0]);                                                                           \
        bits = (isa##_vu)(bits >= 0x0f800000) & 0x7f800000; /* infinity and NaN */                                    \
        p->d[0] = p->d[1] = (isa##_vf)((isa##_vu)p->d[0] | bits | (d[0] & 0x8000) << 16);                             \
    }                                                                                                                 \
    /* Decodes a block of a row's format: 64 weights of NVFP4, else 32. */                                            \
    TARGET INLINE void isa##_decode_block(uint32_t type, const uint8_t *w, size_t stride, struct isa##_block *p) {    \
        if (type == GGUF_NVFP4) isa##_decode_nvfp4(w, stride, p);                                                     \
        else if (type == GGUF_MXFP4) isa##_decode_mxfp4(w, stride, p);                                                \
        else isa##_decode_q8_0(w, stride, p);                                                                         \
    }                                                                                                                 \
    TARGET INLINE void isa##_decode_type(uint32_t type, size_t bytes, int step, const uint8_t *w, size_t stride,      \
                                         const uint8_t *next, int n, struct isa##_block *p) {                         \
        for (int b = 0; b < n; b += step, w += bytes, next += bytes) {                                                \
            panel_prefetch(next, stride, rows);                                                                       \
            isa##_decode_block(type, w, stride, p + b);                                                               \
        }                                                                                                             \
    }                                                                                                                 \
    TARGET static void isa##_panel_decode(uint32_t type, const uint8_t *w, size_t stride, const uint8_t *next, int n, \
                                          void *panel) {                                                              \
        if (type == GGUF_NVFP4)                                                                                       \
            isa##_decode_type(GGUF_NVFP4, sizeof(struct block_nvfp4), 2, w, stride, next, n, panel);                  \
        else if (type == GGUF_MXFP4)                                                                                  \
            isa##_decode_type(GGUF_MXFP4, sizeof(struct block_mxfp4), 1, w, stride, next, n, panel);                  \
        else isa##_decode_type(GGUF_Q8_0, sizeof(struct block_q8_0), 1, w, stride, next, n, panel);                   \
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
    /* The block and the sums stay in registers. The rows that follow are prefetched in the order of memory. */       \
    TARGET INLINE void isa##_direct_type(uint32_t type, size_t bytes, int step, int n_tok, const uint8_t *w,          \
                                         size_t stride, int n, const struct act_i16 *const *x, float *sum) {          \
        const uint8_t *next = w + (rows)*stride;                                                                      \
        isa##_vf s[PANEL_GROUP];                                                                                      \
        UNROLL for (int t = 0; t < n_tok; t++) s[t] = (isa##_vf){0};                                                  \
        for (int b = 0; b < n; b += step, w += bytes, next += (rows)*bytes) {                                         \
            struct isa##_block p[2];                                                                                  \
            const struct act_i16 *at[PANEL_GROUP];                                                                    \
            UNROLL for (size_t i = 0; i < (rows)*bytes; i += 64) __builtin_prefetch(next + i, 0, 2);                  \
            isa##_decode_block(type, w, stride, p);                                                                   \
            UNROLL for (int t = 0; t < n_tok; t++) at[t] = x[t] + b;                                                  \
            isa##_dot_tokens(type, n_tok, p, step, at, s);                                                            \
        }                                                                                                             \
        UNROLL for (int t = 0; t < n_tok; t++)((isa##_vf *)(void *)sum)[t] = s[t];                                    \
    }                                                                                                                 \
    TARGET INLINE void isa##_direct_tokens(uint32_t type, size_t bytes, int step, int n_tok, const uint8_t *w,        \
                                           size_t stride, int n, const struct act_i16 *const *x, float *sum) {        \
        if (n_tok == 1) isa##_direct_type(type, bytes, step, 1, w, stride, n, x, sum);                                \
        else if (n_tok == 2) isa##_direct_type(type, bytes, step, 2, w, stride, n, x, sum);                           \
        else if (n_tok == 3) isa##_direct_type(type, bytes, step, 3, w, stride, n, x, sum);                           \
        else isa##_direct_type(type, bytes, step, 4, w, stride, n, x, sum);                                           \
    }                                                                                                                 \
    TARGET static void isa##_panel_direct(uint32_t type, const uint8_t *w, size_t stride, int n,                      \
                                          const struct act_i16 *const *x, int n_tok, float *sum) {                    \
        if (type == GGUF_NVFP4)                                                                                       \
            isa##_direct_tokens(GGUF_NVFP4, sizeof(struct block_nvfp4), 2, n_tok, w, stride, n, x, sum);              \
        else if (type == GGUF_MXFP4)                                                                                  \
            isa##_direct_tokens(GGUF_MXFP4, sizeof(struct block_mxfp4), 1, n_tok, w, stride, n, x, sum);              \
        else isa##_direct_tokens(GGUF_Q8_0, sizeof(struct block_q8_0), 1, n_tok, w, stride, n, x, sum);               \
    }                                                                                                                 \
    static const struct panel_isa isa##_panel = {.n_rows = rows,                                                      \
                                                 .block_bytes = sizeof(struct isa##_block),                           \
                                                 .decode = isa##_panel_decode,                                        \
                                                 .dot = isa##_panel_dot,                                              \
                                                 .direct = isa##_panel_direct};

/* ============================================================================================================
 * CPU kernels: GEMM with F32 panels
 *
 * For F32, BF16 and F16 weights and ACT_F32_PANEL activations: many tokens. A panel of F32_ROWS rows by F32_DEPTH
 * weights is transposed into the first-level cache. A vector then has one weight of each of several rows, every
 * activation is broadcast to all of its lanes, and no lanes are added. Nearly all instructions multiply: 98 % of the
 * peak in the first-level cache, where tiles of dot products have 74 % (AVX-512, Zen 4).
 * ============================================================================================================ */

enum {
    F32_ROWS = 32,   /* rows of a panel */
    F32_DEPTH = 128, /* weights of a row in a panel */
    F32_PICKED = 32  /* tokens that are copied side by side at a time */
};

/* What lies in gemm.scratch. */
struct f32_work {
    float panel[F32_DEPTH][F32_ROWS], picked[F32_PICKED][F32_DEPTH], sum[PANEL_TOKENS][F32_ROWS];
};

static_assert(sizeof(struct f32_work) <= KERNEL_SCRATCH, "the work space of F32 panels fits in the scratch");

/* Computes rows [r0, r0 + n_row) of g for the tokens [t0, t0 + n_tok), n_row <= F32_ROWS and n_tok <= PANEL_TOKENS. */
static void f32_panel_run(const struct gemm *g, sgemm_function *sgemm_add, transpose_function *transpose, int r0,
                          int n_row, int t0, int n_tok) {
    struct f32_work *work = g->scratch;
    const size_t size = gguf_row_bytes(g->type, 1);
    memset(work->sum, 0, (size_t)n_tok * sizeof *work->sum);
    for (int i = 0; i < g->n_in; i += F32_DEPTH) {
        const int n = int_min(g->n_in - i, F32_DEPTH), cols = ceil_to(n_row, TRANSPOSE_ROWS);
        transpose(g->type, g->w + (size_t)r0 * g->w_stride + (size_t)i * size, g->w_stride, n_row, n, work->panel[0],
                  F32_ROWS);
        for (int t = 0, some; t < n_tok; t += some) {
            const float *x = g->rows ? work->picked[0] : (const float *)(const void *)gemm_x(g, t0 + t) + i;
            const int x_stride = g->rows ? F32_DEPTH : (int)(g->x_stride / sizeof *x);
            some = g->rows ? int_min(n_tok - t, F32_PICKED) : n_tok;
            for (int j = 0; j < some && g->rows; j++)
                memcpy(work->picked[j], (const float *)(const void *)gemm_x(g, t0 + t + j) + i, (size_t)n * sizeof *x);
            sgemm_add(some, cols, n, x, x_stride, work->panel[0], F32_ROWS, work->sum[t], F32_ROWS);
        }
    }
    for (int t = 0; t < n_tok; t++)
        vec_scale(work->sum[t], g->scale, g->y + (size_t)(t0 + t) * g->y_stride + (size_t)r0, n_row);
}

/* GEMM with ACT_F32_PANEL activations, panel by panel. */
static void f32_panel_gemm(const struct gemm *g, sgemm_function *sgemm_add, transpose_function *transpose) {
    for (int t = 0; t < g->n_tok; t += PANEL_TOKENS)
        for (int r = 0; r < g->n_out; r += F32_ROWS)
            f32_panel_run(g, sgemm_add, transpose, r, int_min(g->n_out - r, F32_ROWS), t,
                          int_min(g->n_tok - t, PANEL_TOKENS));
}

/* Defines isa##_transpose from isa##_columns (see PANEL_FUNCTIONS) and isa##_rebias. */
#define TRANSPOSE(isa, TARGET, rows)                                                                                   \
    typedef isa##_vu isa##_vu_mem __attribute__((aligned(1), may_alias));                                              \
    /* 16 bytes of every row become columns of y. */                                                                   \
    TARGET INLINE void isa##_transpose_step(uint32_t type, const uint8_t *x, size_t stride, float *y, ptrdiff_t ldy) { \
        isa##_vu q[4], v[2];                                                                                           \
        isa##_columns(x, stride, q);                                                                                   \
        UNROLL for (int j = 0; j < 4; j++) {                                                                           \
            if (type == GGUF_F32) {                                                                                    \
                VSTORE(isa##_vu, y + j * ldy) = q[j];                                                                  \
                continue;                                                                                              \
            }                                                                                                          \
            v[0] = q[j] << 16, v[1] = q[j] & 0xffff0000;                                                               \
            UNROLL for (int h = 0; h < 2; h++) {                                                                       \
                if (type == GGUF_F16) {                                                                                \
                    isa##_vu bits = (v[h] & 0x7fff0000) >> 3, sign = v[h] & 0x80000000;                                \
                    isa##_vf f;                                                                                        \
                    isa##_rebias(&bits, 112, &f);                                                                      \
                    v[h] = (isa##_vu)f | ((isa##_vu)(bits >= 0x0f800000) & 0x7f800000) | sign;                         \
                }                                                                                                      \
                VSTORE(isa##_vu, y + (2 * j + h) * ldy) = v[h];                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Rows and values that do not fill a step go through a copy. */                                                   \
    TARGET INLINE void isa##_transpose_type(uint32_t type, int size, const uint8_t *x, size_t x_stride, int m, int n,  \
                                            float *y, ptrdiff_t ldy) {                                                 \
        const int step = 16 / size;                                                                                    \
        for (int r = 0; r < m || r % TRANSPOSE_ROWS; r += (rows))                                                      \
            for (int i = 0; i < n; i += step) {                                                                        \
                const uint8_t *from = x + (ptrdiff_t)r * (ptrdiff_t)x_stride + i * size;                               \
                uint8_t copy[16 * (rows)] = {0};                                                                       \
                float out[8 * (rows)];                                                                                 \
                if (r + (rows) <= m && i + step <= n) {                                                                \
                    isa##_transpose_step(type, from, x_stride, y + i * ldy + r, ldy);                                  \
                    continue;                                                                                          \
                }                                                                                                      \
                const int some = int_min(n - i, step);                                                                 \
                for (int j = 0; r + j < m && j < (rows); j++)                                                          \
                    memcpy(copy + 16 * j, from + (size_t)j * x_stride, (size_t)(some * size));                         \
                isa##_transpose_step(type, copy, 16, out, rows);                                                       \
                for (int j = 0; j < some; j++) memcpy(y + (i + j) * ldy + r, out + j * (rows), 4 * (rows));            \
            }                                                                                                          \
    }                                                                                                                  \
    TARGET static void isa##_transpose(uint32_t type, const uint8_t *x, size_t x_stride, int m, int n, float *y,       \
                                       int ldy) {                                                                      \
        if (type == GGUF_F32) isa##_transpose_type(GGUF_F32, 4, x, x_stride, m, n, y, ldy);                            \
        else if (type == GGUF_BF16) isa##_transpose_type(GGUF_BF16, 2, x, x_stride, m, n, y, ldy);                     \
        else isa##_transpose_type(GGUF_F16, 2, x, x_stride, m, n, y, ldy);                                             \
    }

/* ============================================================================================================
 * CPU kernels: scalar
 *
 * For any processor.
 * ============================================================================================================ */

/* 32 weights of four rows. FP4 weights are stored as 2 * E2M1 with half their scale. */
struct scalar_block {
    int8_t w[4][32];
    float d[4][2];
};

/* Decodes 32 weights of the block at w to q (32) and d (2). half: which 32 of an NVFP4 block. */
static void scalar_decode_block(uint32_t type, const uint8_t *w, int half, int8_t *q, float *d) {
    if (type == GGUF_Q8_0) {
        memcpy(q, w + 2, 32);
        d[0] = d[1] = f16_to_f32((uint16_t)(w[0] | w[1] << 8));
    } else if (type == GGUF_MXFP4) {
        for (int j = 0; j < 16; j++) {
            q[j] = e2m1_doubled[w[1 + j] & 15];
            q[j + 16] = e2m1_doubled[w[1 + j] >> 4];
        }
        d[0] = d[1] = 0.5f * e8m0_to_f32(w[0]);
    } else {
        for (int j = 0; j < 16; j++) {
            uint8_t codes = w[4 + 16 * half + j];
            int at = (j & 7) + 2 * (j & 8);
            q[at] = e2m1_doubled[codes & 15];
            q[at + 8] = e2m1_doubled[codes >> 4];
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

VECTOR_FUNCTIONS(scalar, , vec_load_bf16, vec_load_e4m3)
VECTOR_GEMM(scalar, , vec_load_bf16, vec_load_f16)

static void scalar_gemm(const struct gemm *g) {
    static const struct panel_isa isa = {.n_rows = 4,
                                         .block_bytes = sizeof(struct scalar_block),
                                         .decode = scalar_panel_decode,
                                         .dot = scalar_panel_dot};
    if (g->format == ACT_I16) panel_gemm(g, &isa);
    else if (g->format == ACT_F32_PANEL) f32_panel_gemm(g, scalar_sgemm_add, ref_transpose);
    else scalar_gemm_f32(g);
}

static const struct kernels kernels_scalar = {.name = "scalar",
                                              .act_format = panel_act_format,
                                              .gemm = scalar_gemm,
                                              .transpose = ref_transpose,
                                              VECTOR_TABLE(scalar)};

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>

/* ============================================================================================================
 * CPU kernels: AVX2
 *
 * For x86-64 processors with AVX2, FMA and F16C: panels of 8 rows, bytes multiplied by vpmaddubsw.
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
    out[0] = (avx2_vu)_mm256_unpacklo_epi64(t0, t2);
    out[1] = (avx2_vu)_mm256_unpackhi_epi64(t0, t2);
    out[2] = (avx2_vu)_mm256_unpacklo_epi64(t1, t3);
    out[3] = (avx2_vu)_mm256_unpackhi_epi64(t1, t3);
}

/* Translates FP4 codes to unsigned bytes: 16 + 2 * E2M1. */
AVX2_INLINE void avx2_codes(const avx2_vu *q, avx2_vu *lo, avx2_vu *hi) {
    __m128i codes = _mm_add_epi8(_mm_loadu_si128((const __m128i_u *)e2m1_doubled), _mm_set1_epi8(16));
    __m256i table = _mm256_broadcastsi128_si256(codes);
    *lo = (avx2_vu)_mm256_shuffle_epi8(table, (__m256i)(*q & 0x0f0f0f0f));
    *hi = (avx2_vu)_mm256_shuffle_epi8(table, (__m256i)(*q >> 4 & 0x0f0f0f0f));
}

/* out = 16 weights times 16 digits. vpmaddubsw adds two products in 16 bits. For FP4 weights four such pairs fit into
 * 16 bits (4 x 2 x 28 x 127 < 2^15), so they are widened to 32 bits once. Q8_0 weights stay signed, and only one pair
 * fits (2 x 128 x 127). */
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
TRANSPOSE(avx2, AVX2, 8)

AVX2_INLINE void avx2_load_bf16(const uint8_t *row, int i, vf *out) {
    __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)(row + 2 * (ptrdiff_t)i)));
    *out = (vf)_mm256_slli_epi32(h, 16);
}

AVX2_INLINE void avx2_load_e4m3(const uint8_t *row, int i, vf *out) {
    vu code = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i_u *)(row + i)));
    vec_e4m3(&code, out);
}

AVX2_INLINE void avx2_load_f16(const uint8_t *row, int i, vf *out) {
    *out = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(row + 2 * (ptrdiff_t)i)));
}

VECTOR_FUNCTIONS(avx2, AVX2, avx2_load_bf16, avx2_load_e4m3)
VECTOR_GEMM(avx2, AVX2, avx2_load_bf16, avx2_load_f16)

static void avx2_gemm(const struct gemm *g) {
    if (g->format == ACT_I16) panel_gemm(g, &avx2_panel);
    else if (g->format == ACT_F32_PANEL) f32_panel_gemm(g, avx2_sgemm_add, avx2_transpose);
    else avx2_gemm_f32(g);
}

static const struct kernels kernels_avx2 = {
    .name = "AVX2", .act_format = panel_act_format, .gemm = avx2_gemm, .transpose = avx2_transpose, VECTOR_TABLE(avx2)};

/* ============================================================================================================
 * CPU kernels: AVX-512 VNNI
 *
 * Panels of 16 rows, bytes multiplied by vpdpbusd; F32, BF16 and F16 weights in tiles of 16 accumulators.
 * ============================================================================================================ */

#define AVX512        __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
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
    out[0] = (avx512_vu)_mm512_unpacklo_epi64(t0, t2);
    out[1] = (avx512_vu)_mm512_unpackhi_epi64(t0, t2);
    out[2] = (avx512_vu)_mm512_unpacklo_epi64(t1, t3);
    out[3] = (avx512_vu)_mm512_unpackhi_epi64(t1, t3);
}

/* Translates FP4 codes to unsigned bytes: 16 + 2 * E2M1. */
AVX512_INLINE void avx512_codes(const avx512_vu *q, avx512_vu *lo, avx512_vu *hi) {
    __m128i codes = _mm_add_epi8(_mm_loadu_si128((const __m128i_u *)e2m1_doubled), _mm_set1_epi8(16));
    __m512i table = _mm512_broadcast_i32x4(codes);
    *lo = (avx512_vu)_mm512_shuffle_epi8(table, (__m512i)(*q & 0x0f0f0f0f));
    *hi = (avx512_vu)_mm512_shuffle_epi8(table, (__m512i)(*q >> 4 & 0x0f0f0f0f));
}

/* out = 16 weights times 16 activations. vpdpbusd multiplies unsigned by signed bytes, so Q8_0 weights are stored with
 * 128 added; the bias, which is for 16 added, then counts 8 times. */
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
TRANSPOSE(avx512, AVX512, 16)

/* Returns the sums of the lanes of 16 vectors: lane i is the sum of s[i]. Each of the four steps adds the halves of two
 * vectors and puts the results into one. */
AVX512_INLINE __m512 avx512_sum_lanes(const __m512 s[16]) {
    __m512 a[8], b[4], c[2];
    /* Pairs s0 s1, s4 s5, ... first and s2 s3, ... next, so that after the second step 128 bits hold s0 s1 s2 s3. */
    UNROLL for (int i = 0; i < 8; i++) {
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

/* Loads the weights i..i+15 of a row as F32, those of the mask only; the others are 0. */
AVX512_INLINE __m512 avx512_load(uint32_t type, const uint8_t *row, int i, __mmask16 m) {
    if (type == GGUF_F32) return _mm512_maskz_loadu_ps(m, row + 4 * (ptrdiff_t)i);
    __m256i h = _mm256_maskz_loadu_epi16(m, row + 2 * (ptrdiff_t)i);
    if (type == GGUF_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* Returns R rows of weights times the F32 activations of T tokens, R * T <= 16, in lane R * t + r. Unlike vec_tile it
 * adds the lanes of all sums at once. */
AVX512_INLINE __m512 avx512_tile(uint32_t type, const struct gemm *g, int r0, int R, int t0, int T) {
    const size_t size = type == GGUF_F32 ? 4 : 2, step = 16 * (size_t)R * size; /* bytes of a step of the loop */
    const bool ahead = gemm_prefetches(g, t0, size);
    const uint8_t *w[16], *next = g->w + (size_t)(r0 + R) * g->w_stride;
    const float *x[4];
    __m512 s[16];
    UNROLL for (int i = 0; i < 16; i++) s[i] = _mm512_setzero_ps();
    UNROLL for (int r = 0; r < R; r++) w[r] = g->w + (size_t)(r0 + r) * g->w_stride;
    UNROLL for (int t = 0; t < T; t++) x[t] = (const float *)(const void *)gemm_x(g, t0 + t);
    for (int i = 0; i < g->n_in; i += 16) {
        __mmask16 m = g->n_in - i < 16 ? (__mmask16)((1u << (g->n_in - i)) - 1) : 0xffff;
        __m512 a[16];
        if (ahead) { /* the rows that follow, in the order of memory */
            UNROLL for (size_t b = 0; b < step; b += 64) __builtin_prefetch(next + b, 0, 2);
            next += step;
        }
        UNROLL for (int r = 0; r < R; r++) a[r] = avx512_load(type, w[r], i, m);
        UNROLL for (int t = 0; t < T; t++) {
            __m512 b = _mm512_maskz_loadu_ps(m, x[t] + i);
            UNROLL for (int r = 0; r < R; r++) s[R * t + r] = _mm512_fmadd_ps(a[r], b, s[R * t + r]);
        }
    }
    return _mm512_mul_ps(avx512_sum_lanes(s), _mm512_set1_ps(g->scale));
}

/* GEMM with F32 activations: tiles of 4 rows by 4 tokens, then of 8 rows by 2 tokens or by 1. */
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
    for (; t + 2 <= g->n_tok; t += 2) {
        float *out = g->y + (size_t)t * g->y_stride;
        for (r = 0; r < g->n_out; r += g->n_out - r < 8 ? 1 : 8) {
            const size_t n = g->n_out - r < 8 ? 1 : 8;
            _mm512_storeu_ps(y, n < 8 ? avx512_tile(type, g, r, 1, t, 2) : avx512_tile(type, g, r, 8, t, 2));
            for (size_t i = 0; i < 2; i++) memcpy(out + i * g->y_stride + r, y + n * i, n * sizeof *y);
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

SGEMM_ADD(avx512, AVX512, 16, 8)

VECTOR_FUNCTIONS(avx512, AVX512, avx2_load_bf16, avx2_load_e4m3)

static void avx512_gemm(const struct gemm *g) {
    if (g->format == ACT_I16) panel_gemm(g, &avx512_panel);
    else if (g->format == ACT_F32_PANEL) f32_panel_gemm(g, avx512_sgemm_add, avx512_transpose);
    else avx512_gemm_f32(g);
}

static const struct kernels kernels_avx512 = {.name = "AVX-512 VNNI",
                                              .act_format = panel_act_format,
                                              .gemm = avx512_gemm,
                                              .transpose = avx512_transpose,
                                              VECTOR_TABLE(avx512)};

/* ============================================================================================================
 * CPU kernels: AMX, BF16 tiles
 *
 * For more than 16 tokens. Weights are decoded to BF16 tiles of 32 weights by 16 rows. TDPBF16PS multiplies them by
 * tiles of 16 tokens by 32 activations. An FP4 weight times its block scale is exact in BF16. F16 and Q8_0 weights
 * become the sum of two BF16 numbers, one plane of tiles each: exact for F16, to 2^-17 for Q8_0. AMX treats subnormal
 * numbers as zero.
 *
 * A panel is 32 rows by AMX_K weights. It is decoded once and stays in the first-level cache while all tokens are
 * multiplied by it; their sums are stored as tiles. AMX_K is small because the tile unit powers down after about 1,000
 * idle cycles, as long as a larger panel takes to decode, and needs 2,000 cycles to wake up (measured on Sapphire
 * Rapids).
 * ============================================================================================================ */

#define AMX                                                                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16," \
                          "amx-tile,amx-bf16")))
#define AMX_INLINE AMX INLINE

enum {
    AMX_K = 128,      /* weights of a row in a panel */
    AMX_TOKENS = 512, /* tokens whose sums are in gemm.scratch at a time */
    AMX_TILE = 1024   /* bytes of a tile */
};

/* What lies in gemm.scratch. A step is 32 weights, the depth of a tile. */
struct amx_work {
    uint8_t row[2][AMX_K / 32][16][64];    /* 16 rows as decoded: (plane, step, row, 32 weights) */
    uint8_t b[2][2][AMX_K / 32][AMX_TILE]; /* weights: (16 rows, plane, step) tiles of (pair of weights, row) */
    uint8_t a[2][2][AMX_K / 32][AMX_TILE]; /* activations: (16 tokens, plane, step) tiles of (token, activation) */
    float c[AMX_TOKENS / 32][4][16][16];   /* sums: (32 tokens, 2 x 2) tiles of (token, row) */
};
static_assert(sizeof(struct amx_work) <= KERNEL_SCRATCH, "the work space of AMX fits in the scratch");

/* [mx][scale byte]: the BF16 values of the 16 FP4 codes under that scale, first their low bytes, then their high bytes.
 * mx 0: NVFP4, 1: MXFP4. */
static uint8_t amx_fp4_values[2][256][32];

/* Fills the table; called once, by amx_permitted. */
static void amx_init(void) {
    for (int d = 0; d < 256; d++)
        for (int c = 0; c < 16; c++)
            for (int mx = 0; mx < 2; mx++) {
                float scale = mx ? e8m0_to_f32((uint8_t)d) : ue4m3_to_f32((uint8_t)d);
                uint16_t h = bf16_from_f32(e2m1_to_f32((uint8_t)c) * scale);
                amx_fp4_values[mx][d][c] = (uint8_t)h;
                amx_fp4_values[mx][d][c + 16] = (uint8_t)(h >> 8);
            }
}

/* Decodes the 32 FP4 codes in the 16 bytes at q to BF16. Qword i of the result holds the low (i < 4) or high nibbles of
 * the four bytes from 8 * (i % 2) + 4 * (i / 2 % 2) on. d0, d1: rows of amx_fp4_values for even and odd qwords. */
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

/* Returns the order of a decoded row: qword i holds the weights 4 * order[i] to 4 * order[i] + 3 of its 32. */
static const uint8_t *amx_order(uint32_t type) {
    static const uint8_t natural[8] = {0, 1, 2, 3, 4, 5, 6, 7}, nvfp4[8] = {0, 4, 1, 5, 2, 6, 3, 7},
                         mxfp4[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    if (type == GGUF_NVFP4) return nvfp4;
    return type == GGUF_MXFP4 ? mxfp4 : natural;
}

/* Returns how many BF16 numbers a weight is the sum of. */
static int amx_planes(uint32_t type) { return type == GGUF_F16 || type == GGUF_Q8_0 ? 2 : 1; }

/* Writes 32 F32 numbers as the sum of two BF16 numbers: hi (32) and lo (32). */
AMX_INLINE void amx_split(__m512 x0, __m512 x1, uint8_t *hi, uint8_t *lo) {
    __m512i h = (__m512i)_mm512_cvtne2ps_pbh(x1, x0);
    __m512i h0 = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(h)), 16);
    __m512i h1 = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(h, 1)), 16);
    x0 = _mm512_sub_ps(x0, _mm512_castsi512_ps(h0));
    x1 = _mm512_sub_ps(x1, _mm512_castsi512_ps(h1));
    _mm512_storeu_si512(hi, h);
    _mm512_storeu_si512(lo, (__m512i)_mm512_cvtne2ps_pbh(x1, x0));
}

/* Decodes n weights of one row to BF16: 32 at out, the next 32 AMX_TILE bytes further, and so on. rest: the second
 * plane, in the same layout. */
AMX_INLINE void amx_decode_row(uint32_t type, const uint8_t *w, int n, uint8_t *out, uint8_t *rest) {
    if (type == GGUF_NVFP4)
        for (; n > 0; n -= 64, w += sizeof(struct block_nvfp4), out += 2 * AMX_TILE) {
            _mm512_store_si512(out, amx_decode_fp4(w + 4, amx_fp4_values[0][w[0]], amx_fp4_values[0][w[1]]));
            _mm512_store_si512(out + AMX_TILE,
                               amx_decode_fp4(w + 20, amx_fp4_values[0][w[2]], amx_fp4_values[0][w[3]]));
        }
    else if (type == GGUF_MXFP4)
        for (; n > 0; n -= 32, w += sizeof(struct block_mxfp4), out += AMX_TILE)
            _mm512_store_si512(out, amx_decode_fp4(w + 1, amx_fp4_values[1][w[0]], amx_fp4_values[1][w[0]]));
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

/* Decodes the weights [k, k + n) of n_rows <= 16 rows from r0 on to the tiles b. Columns of b for rows that do not
 * exist keep what they held; amx_store ignores their sums. */
AMX static void amx_decode(const struct gemm *g, int r0, int n_rows, int k, int n, struct amx_work *work,
                           uint8_t b[2][AMX_K / 32][AMX_TILE]) {
    const uint8_t *w = g->w + (size_t)r0 * g->w_stride + gguf_row_bytes(g->type, (size_t)k);
    const uint8_t *order = amx_order(g->type);
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

/* Where the tiles of 16 tokens by 32 activations lie. */
struct amx_tokens {
    const uint8_t *x;           /* the first one */
    size_t stride, step, plane; /* bytes from token to token, step to step, plane to plane */
};

/* Finds the activations [k, k + n) of n_tok <= 16 tokens from t0 on. 16 tokens that lie evenly are used in place,
 * others are copied to `tiles`, the last token as often as it takes to fill a tile. */
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

/* c += two tiles of tokens a times two tiles of rows b, over all planes and `steps` steps. two_a, two_b: whether the
 * second tile is there. first: c is set instead. c: (a0 b0), (a0 b1), (a1 b0), (a1 b1), each (token, row). */
AMX static void amx_multiply(float c[4][16][16], const struct amx_tokens a[2], bool two_a,
                             uint8_t b[2][2][AMX_K / 32][AMX_TILE], bool two_b, int planes, int steps, bool first) {
    __asm__ volatile("" ::: "memory"); /* gcc does not know that its tile loads read memory */
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
            if (two_b) _tile_loadd(7, b[1][p][s], 64);
            for (int q = 0; q < 2; q++) {
                _tile_loadd(4, a[0].x + (size_t)s * a[0].step + (size_t)q * a[0].plane, a[0].stride);
                _tile_dpbf16ps(0, 4, 6);
                if (two_b) _tile_dpbf16ps(1, 4, 7);
                if (two_a) {
                    _tile_loadd(5, a[1].x + (size_t)s * a[1].step + (size_t)q * a[1].plane, a[1].stride);
                    _tile_dpbf16ps(2, 5, 6);
                    if (two_b) _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
}

/* y = scale * c for n_tok tokens from t0 on and n_rows rows from r0 on. Both are at most 16 and may be 0 or less. */
AMX static void amx_store(const struct gemm *g, const float c[16][16], int t0, int n_tok, int r0, int n_rows) {
    __mmask16 m = (__mmask16)(n_rows > 0 ? (1u << n_rows) - 1 : 0);
    for (int t = 0; t < n_tok && m; t++)
        _mm512_mask_storeu_ps(g->y + (size_t)(t0 + t) * g->y_stride + r0, m,
                              _mm512_mul_ps(_mm512_load_ps(c[t]), _mm512_set1_ps(g->scale)));
}

/* Computes up to 32 rows from r0 on for n_tok <= AMX_TOKENS tokens from t0 on. */
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

/* GEMM with ACT_BF16 activations. All eight tiles have 16 rows of 64 bytes. */
AMX static void amx_gemm_bf16(const struct gemm *g) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
    for (int t = 0; t < g->n_tok; t += AMX_TOKENS)
        for (int r = 0; r < g->n_out; r += 32) amx_panel(g, r, t, int_min(g->n_tok - t, AMX_TOKENS));
    _tile_release();
}

static void amx_gemm(const struct gemm *g) {
    if (g->format == ACT_BF16) amx_gemm_bf16(g);
    else avx512_gemm(g);
}

/* Decoding to tiles is faster from 8 tokens on where the alternative is F32 arithmetic, else from 16 (measured). */
static enum act_format amx_act_format(uint32_t type, int n_tok) {
    return type == GGUF_F32 || n_tok <= SAME_BITS_TOKENS ? panel_act_format(type, n_tok) : ACT_BF16;
}

static const struct kernels kernels_amx = {.name = "AVX-512 VNNI, AMX",
                                           .act_format = amx_act_format,
                                           .gemm = amx_gemm,
                                           .transpose = avx512_transpose,
                                           VECTOR_TABLE(avx512)};

/* Whether the processor has AMX and Linux lets this process use the tile registers. A process must ask once; the answer
 * holds for all of its threads. */
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
 *
 * For 64-bit ARM processors with the dot product instructions (ARMv8.2): panels of 4 rows, bytes multiplied by SDOT.
 * ============================================================================================================ */

#define NEON        __attribute__((target("arch=armv8.2-a+dotprod")))
#define NEON_INLINE NEON INLINE

PANEL_TYPES(neon, 4)

NEON_INLINE void neon_columns(const uint8_t *p, size_t stride, neon_vu out[4]) {
    uint32x4_t m0 = vreinterpretq_u32_u8(vld1q_u8(p)), m1 = vreinterpretq_u32_u8(vld1q_u8(p + stride));
    uint32x4_t m2 = vreinterpretq_u32_u8(vld1q_u8(p + 2 * stride)), m3 = vreinterpretq_u32_u8(vld1q_u8(p + 3 * stride));
    uint64x2_t t0 = vreinterpretq_u64_u32(vtrn1q_u32(m0, m1)), t1 = vreinterpretq_u64_u32(vtrn2q_u32(m0, m1));
    uint64x2_t t2 = vreinterpretq_u64_u32(vtrn1q_u32(m2, m3)), t3 = vreinterpretq_u64_u32(vtrn2q_u32(m2, m3));
    out[0] = (neon_vu)vtrn1q_u64(t0, t2);
    out[1] = (neon_vu)vtrn1q_u64(t1, t3);
    out[2] = (neon_vu)vtrn2q_u64(t0, t2);
    out[3] = (neon_vu)vtrn2q_u64(t1, t3);
}

/* Translates FP4 codes to signed bytes, 2 * E2M1; the bias is not needed. */
NEON_INLINE void neon_codes(const neon_vu *q, neon_vu *lo, neon_vu *hi) {
    const int8x16_t table = vld1q_s8(e2m1_doubled);
    *lo = (neon_vu)vqtbl1q_s8(table, (uint8x16_t)(*q & 0x0f0f0f0f));
    *hi = (neon_vu)vqtbl1q_s8(table, (uint8x16_t)(*q >> 4 & 0x0f0f0f0f));
}

/* out = 16 weights times 16 digits. */
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
    (void)type;
    (void)bias;
    neon_dot_digit(w, hi, &h);
    neon_dot_digit(w, lo, &l);
    *out = (h << 8) + l;
}

PANEL_FUNCTIONS(neon, NEON, 4, 0)
TRANSPOSE(neon, NEON, 4)

VECTOR_FUNCTIONS(neon, NEON, vec_load_bf16, vec_load_e4m3)
VECTOR_GEMM(neon, NEON, vec_load_bf16, vec_load_f16)

static void neon_gemm(const struct gemm *g) {
    if (g->format == ACT_I16) panel_gemm(g, &neon_panel);
    else if (g->format == ACT_F32_PANEL) f32_panel_gemm(g, neon_sgemm_add, neon_transpose);
    else neon_gemm_f32(g);
}

static const struct kernels kernels_neon = {
    .name = "NEON", .act_format = panel_act_format, .gemm = neon_gemm, .transpose = neon_transpose, VECTOR_TABLE(neon)};
#endif

/* ============================================================================================================
 * CPU kernels: choice
 *
 * Picks the table of kernels for this machine at start, and measures its memory bandwidth.
 * ============================================================================================================ */

/* All tables, the fastest first. */
static const struct kernels *const kernel_sets[] = {
#if defined(__x86_64__)
    &kernels_amx, &kernels_avx512, &kernels_avx2,
#elif defined(KERNELS_NEON)
    &kernels_neon,
#endif
    &kernels_scalar};

/* Whether the processor and the operating system support a table. */
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

/* Returns the fastest table that this machine supports. */
static const struct kernels *kernels_choose(void) {
    size_t i = 0;
    while (!kernels_runnable(kernel_sets[i])) i++;
    return kernel_sets[i];
}

/* The memory that memory_bandwidth reads, in pieces of 1 MiB. */
struct bandwidth {
    const struct kernels *k;
    uint8_t *p;
    int n; /* pieces */
    _Atomic float amax;
};

enum { BANDWIDTH_PIECE = 1 << 20 };

static void bandwidth_fill(void *arg) {
    const struct bandwidth *b = arg;
    for (int i = team_first(b->n); i >= 0; i = team_next())
        memset(b->p + (size_t)i * BANDWIDTH_PIECE, 0, BANDWIDTH_PIECE);
}

static void bandwidth_read(void *arg) {
    struct bandwidth *b = arg;
    for (int i = team_first(b->n); i >= 0; i = team_next()) {
        const uint8_t *p = b->p + (size_t)i * BANDWIDTH_PIECE;
        /* storing the result keeps the reads */
        b->amax = b->k->amax((const float *)(const void *)p, BANDWIDTH_PIECE / (int)sizeof(float));
    }
}

/* Measures the read bandwidth of main memory with n_threads threads: the best of three passes over 1 GiB, or over a
 * quarter of the available memory if that is less. Takes about half a second. Returns bytes per second, 0 if there was
 * no memory. */
static double memory_bandwidth(int n_threads) {
    struct bandwidth b = {.k = kernels_choose(), .n = 1};
    const size_t mib = (size_t)(memory_available() >> 20);
    if (mib > 4) b.n = mib > 4096 ? 1024 : (int)(mib / 4);
    const size_t bytes = (size_t)b.n * BANDWIDTH_PIECE;
    b.p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.p == MAP_FAILED) return 0;
    madvise(b.p, bytes, MADV_HUGEPAGE);
    struct team *t = team_start(n_threads, n_threads > processors());
    team_run(t, bandwidth_fill, &b);
    double best = INFINITY; /* seconds */
    for (int pass = 0; pass < 3; pass++) {
        const double start = now_seconds();
        team_run(t, bandwidth_read, &b);
        best = fmin(best, now_seconds() - start);
    }
    team_stop(t);
    munmap(b.p, bytes);
    return (double)bytes / best;
}

/* ============================================================================================================
 * KV cache
 *
 * Stores rows of keys, values or latents in BF16, FP8 or F32, and loads them as F32. Only the CPU uses these functions.
 * ============================================================================================================ */

/* Writes row `pos` from x (width). FP8: scale = amax / 448 of each group, folded back in by kv_load; a group
 * so small that 1 / scale would be infinite becomes zeros. */
static void kv_store(const struct kernels *k, const struct plane *p, int64_t pos, const float *x) {
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
static void kv_load(const struct kernels *k, const struct plane *p, int64_t pos, int n, int first, int len, float *out,
                    int ld) {
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

/* out (len, ld) = the same values transposed; see transpose_function. rows (n, len): scratch. */
static void kv_load_columns(const struct kernels *k, const struct plane *p, int64_t pos, int n, int first, int len,
                            float *rows, float *out, int ld) {
    const size_t size = p->type == KV_F32 ? 4 : 2;
    if (p->type == KV_FP8) {
        kv_load(k, p, pos, n, first, len, rows, len);
        k->transpose(GGUF_F32, (const uint8_t *)rows, (size_t)len * sizeof *rows, n, len, out, ld);
    } else {
        k->transpose(p->type == KV_F32 ? GGUF_F32 : GGUF_BF16,
                     p->data + (size_t)pos * p->row_bytes + (size_t)first * size, p->row_bytes, n, len, out, ld);
    }
}

/* ============================================================================================================
 * Ranks
 *
 * A process group is the ranks of one session: n_stage pipeline stages, each of n_rank ranks that share its layers. The
 * root rank, the first of the last stage, gathers the logits and works in the caller's thread; every other rank has a
 * thread of its own. pg_run runs a step on all ranks; between steps the caller may use plane_copy of any rank, and
 * sample, read_token and read_logits of the root. CPU ranks wait for one another in stage_barrier, pg_send and pg_recv
 * only: under one lock, with a watchdog that ends the program when no thread makes progress.
 * ============================================================================================================ */

enum { PG_STALL = 5 /* seconds without progress of any thread after which a waiting rank ends the program */ };

/* Gives a rank its memory, on the rank's own thread; r->pg, r->index and r->m are set, all else is zero. Returns 0, or
 * -1 with nothing held and a message, which is empty where the rank stopped because another failed. */
typedef int rank_starter(struct rank *r, const struct model *shard, const void *opts, char *err);

/* The start of a process group, and what became of each rank. */
struct pg_start {
    rank_starter *start;
    const void *opts; /* for start */
    bool failed[MAX_RANKS];
    char err[MAX_RANKS][ERR_MAX];
};

enum rank_step_kind {
    RANK_START,           /* start the rank: start */
    RANK_FORWARD,         /* compute ids (n) at positions pos.. with recurrent states at state_pos */
    RANK_LOGITS,          /* logits of rows first..first+n-1 of the latest forward, on the last stage */
    RANK_WAIT,            /* wait until everything is computed */
    RANK_READ_STATS,      /* copy the statistics of the rank's layers of `whole` to stats and in_sum2 */
    RANK_MEASURE,         /* rates[index] = what the rank's device can do */
    RANK_TIME_ALL_REDUCE, /* seconds[index] = time of an all-reduce of n tokens, by NCCL or not (nccl) */
    RANK_CLOSE            /* free what the rank holds */
};

/* What every rank of a process group does at once. Each kind uses the fields that its comment names. */
struct rank_step {
    enum rank_step_kind kind;
    const int32_t *ids; /* NULL: the token that was chosen */
    int n, pos, state_pos, first;
    bool nccl;
    struct pg_start *start;
    const struct model *whole; /* the model of which the ranks have shards; the sizes of stats and in_sum2 */
    double *stats;             /* (n_layer, n_expert_max, STATS) */
    float *in_sum2;            /* (in_sum2_before(whole, n_layer)), or NULL */
    struct rates *rates;       /* (MAX_RANKS) */
    double *seconds;           /* (MAX_RANKS) */
};

/* Does a rank's part of a step. Defined in "Session", because it calls the forward. */
static void rank_run(struct rank *r, const struct rank_step *step);

struct process_group {
    int n_rank, n_stage, n;                      /* ranks of a stage; stages; n = n_rank * n_stage */
    int root;                                    /* index of the root rank */
    pthread_t threads[MAX_RANKS];                /* of all ranks but the root */
    struct model *shards;                        /* (n), stage by stage */
    struct rank *ranks;                          /* (n), stage by stage */
    pthread_mutex_t lock;                        /* of all that follows */
    pthread_cond_t changed;                      /* some of what follows has changed */
    struct rank_step step;                       /* the latest, and */
    unsigned steps;                              /* how many there were */
    unsigned ended[MAX_RANKS];                   /* steps that each rank has finished */
    unsigned arrived[MAX_RANKS];                 /* barriers that it has reached */
    unsigned turns[MAX_RANKS];                   /* phases of rank_all_gather that it has ended */
    unsigned received[MAX_RANKS];                /* batches that it has received from the stage before */
    unsigned sent[MAX_RANKS];                    /* batches that the stage before has sent to it */
    unsigned heartbeats;                         /* counts up while a rank waits for a device: a sign of life */
    uint8_t gathered[MAX_RANKS][ALL_GATHER_MAX]; /* what each rank contributes to rank_all_gather */
    bool quit;                                   /* asks the threads to end */
    bool alarm;                                  /* a rank has failed */
};

/* A number that grows as long as anything in the program moves: processor time, pages read from disk, heartbeats. */
static double pg_activity(const struct process_group *pg) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) +
           (double)u.ru_majflt + (double)__atomic_load_n(&pg->heartbeats, __ATOMIC_RELAXED);
}

/* Waits, with the lock held, until the counters each[first..first+n-1] have reached `want` (modulo 2^32). owner: the
 * rank that advances each[first]; the next counters belong to the next ranks. event: what is awaited, for a message; r:
 * the rank that waits in an all-reduce, which the message then names, or NULL. Ends the program when no thread has made
 * progress for PG_STALL seconds. */
static void pg_wait_for(struct process_group *pg, const char *event, const struct rank *r, const unsigned *each,
                        int first, int n, int owner, unsigned want) {
    double t = now_seconds(), effort = pg_activity(pg);
    for (int still = 0;;) {
        struct timespec until;
        char who[64] = "", what[64];
        for (int i = 0; i < n; i++)
            if ((int)(each[first + i] - want) < 0)
                snprintf(who + strlen(who), sizeof who - strlen(who), " %d", owner + i);
        if (!*who) return;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&pg->changed, &pg->lock, &until);
        double now = now_seconds(), did = pg_activity(pg);
        if (now - t < 1) continue;
        bool stopped = now - t > 2; /* nobody ran, this thread neither: the program was suspended */
        still = stopped || did - effort > 0.02 ? 0 : still + 1;
        t = now;
        effort = did;
        if (still < PG_STALL + !r) continue; /* a rank in an all-reduce knows who is missing: let it report first */
        snprintf(what, sizeof what, "%s", event);
        if (r)
            snprintf(what, sizeof what, "the all-reduce after the %s of layer %d",
                     all_reduce_after(r->n_all_reduce - 1),
                     r->m->first_layer + (int)(r->n_all_reduce - 1) / ALL_REDUCES_PER_LAYER);
        die("%s: no progress for %d s; missing rank:%s (is a disk or a GPU not responding?)", what, still, who);
    }
}

/* Adds one to *count, under the lock, and wakes all that wait. */
static void pg_advance(struct process_group *pg, unsigned *count) {
    ++*count;
    pthread_cond_broadcast(&pg->changed);
}

/* Waits until all ranks of the stage have called it as often. */
static void stage_barrier(struct rank *r) {
    struct process_group *pg = r->pg;
    const struct shard *shard = &r->m->shard;
    if (shard->n_rank == 1) return;
    pthread_mutex_lock(&pg->lock);
    pg_advance(pg, &pg->arrived[r->index]);
    pg_wait_for(pg, NULL, r, pg->arrived, r->index - shard->rank, shard->n_rank, r->index - shard->rank,
                pg->arrived[r->index]);
    pthread_mutex_unlock(&pg->lock);
}

/* The rank of the same number in the next stage (step 1) or the one before (step -1); NULL: there is none. */
static struct rank *pg_neighbor(struct rank *r, int step) {
    const struct shard *shard = &r->m->shard;
    int stage = shard->stage + step;
    return stage < 0 || stage >= shard->n_stage ? NULL : r + step * shard->n_rank;
}

/* Tells `to` that its input is ready, which is the output of the stage before. */
static void pg_send(struct rank *to) {
    struct process_group *pg = to->pg;
    pthread_mutex_lock(&pg->lock);
    pg_advance(pg, &pg->sent[to->index]);
    pthread_mutex_unlock(&pg->lock);
}

/* Waits for the input of r. */
static void pg_recv(struct rank *r) {
    struct process_group *pg = r->pg;
    pthread_mutex_lock(&pg->lock);
    pg_wait_for(pg, "the input of a pipeline stage", NULL, pg->sent, r->index, 1, r->index - pg->n_rank,
                ++pg->received[r->index]);
    pthread_mutex_unlock(&pg->lock);
}

/* Messages of this thread begin with the number of rank i, where there are several. */
static void pg_name_thread(const struct process_group *pg, int i) {
    if (pg->n > 1) snprintf(rank_label, sizeof rank_label, "rank %d of %d: ", i, pg->n);
}

/* The thread of a rank other than the root: runs every step of the process group, until it quits. */
static void *pg_thread(void *arg) {
    struct rank *r = arg;
    struct process_group *pg = r->pg;
    unsigned seen = 0;
    pg_name_thread(pg, r->index);
    pthread_mutex_lock(&pg->lock);
    for (;;) {
        while (pg->steps == seen && !pg->quit) pthread_cond_wait(&pg->changed, &pg->lock);
        if (pg->steps == seen) break;
        seen++;
        const struct rank_step step = pg->step;
        pthread_mutex_unlock(&pg->lock);
        rank_run(r, &step);
        pthread_mutex_lock(&pg->lock);
        pg_advance(pg, &pg->ended[r->index]);
    }
    pthread_mutex_unlock(&pg->lock);
    return NULL;
}

/* Runs a step on every rank at once; returns when all have ended it. With ranks on GPUs, Ctrl-Z takes effect only after
 * the step: a kernel would wait for a rank that was stopped before its launch, and a GPU that drives a display ends
 * kernels that run for seconds. Threads that a driver makes during the start inherit the mask. */
static void pg_run(struct process_group *pg, struct rank_step step) {
    const bool hold = pg->n > 1 && (step.kind == RANK_START || pg->ranks[pg->root].cuda);
    sigset_t stop, old;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    if (hold) pthread_sigmask(SIG_BLOCK, &stop, &old);
    if (pg->n > 1) {
        pthread_mutex_lock(&pg->lock);
        pg->step = step;
        pg_advance(pg, &pg->steps);
        pthread_mutex_unlock(&pg->lock);
    }
    pg_name_thread(pg, pg->root);
    rank_run(&pg->ranks[pg->root], &step);
    rank_label[0] = 0;
    if (pg->n == 1) return;
    pthread_mutex_lock(&pg->lock);
    pg->ended[pg->root]++;
    pg_wait_for(pg, "the end of a step", NULL, pg->ended, 0, pg->n, 0, pg->steps);
    pthread_mutex_unlock(&pg->lock);
    if (hold) pthread_sigmask(SIG_SETMASK, &old, NULL);
}

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
        pg_wait_for(pg, "an exchange between the ranks", NULL, pg->turns, 0, pg->n, 0, pg->turns[r->index]);
        for (int i = 0; i < pg->n && !end; i++) memcpy((uint8_t *)all + (size_t)i * bytes, pg->gathered[i], bytes);
    }
    pthread_mutex_unlock(&pg->lock);
}

bool rank_heartbeat(struct rank *r, bool failed) {
    struct process_group *pg = r->pg;
    if (!pg) return failed;
    __atomic_add_fetch(&pg->heartbeats, 1, __ATOMIC_RELAXED);
    if (failed) __atomic_store_n(&pg->alarm, true, __ATOMIC_RELEASE);
    return __atomic_load_n(&pg->alarm, __ATOMIC_ACQUIRE);
}

void rank_fatal(const char *what) { die("%s", what); }

uint64_t rank_host_memory(void) { return memory_available(); }

/* Without note(), which allocates: a forward must not. */
void rank_note(const char *what) {
    if (!term.quiet || term.dialogue) fprintf(stderr, "%s\n", what);
}

/* Ends the ranks and their threads, and frees the process group. */
static void pg_close(struct process_group *pg) {
    pg_run(pg, (struct rank_step){.kind = RANK_CLOSE});
    pthread_mutex_lock(&pg->lock);
    pg->quit = true;
    pthread_cond_broadcast(&pg->changed);
    pthread_mutex_unlock(&pg->lock);
    for (int i = 0; i < pg->n; i++)
        if (i != pg->root) pthread_join(pg->threads[i], NULL);
    for (int i = 0; i < pg->n; i++) shard_free(&pg->shards[i]);
    pthread_mutex_destroy(&pg->lock);
    pthread_cond_destroy(&pg->changed);
    free(pg->shards);
    free(pg->ranks);
    memset(pg, 0, sizeof *pg);
    ranks_at_work = false;
}

/* Starts n_stage * n_rank <= MAX_RANKS ranks of the model. 0, or -1 with the message of the first that failed. */
static int pg_open(struct process_group *pg, const struct model *m, int n_rank, int n_stage, rank_starter *start,
                   const void *opts, char *err) {
    struct pg_start t = {.start = start, .opts = opts};
    pthread_condattr_t attr;
    sigset_t old;
    memset(pg, 0, sizeof *pg);
    pg->n_rank = n_rank;
    pg->n_stage = n_stage;
    pg->n = n_rank * n_stage;
    pg->root = pg->n - n_rank;
    size_t n = (size_t)pg->n;
    pg->shards = xcalloc(n, sizeof *pg->shards);
    pg->ranks = xcalloc(n, sizeof *pg->ranks);
    pthread_mutex_init(&pg->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&pg->changed, &attr);
    pthread_condattr_destroy(&attr);
    signals_block(&old);
    for (int i = 0; i < pg->n; i++) {
        shard_model(&pg->shards[i], m, (struct shard){i % n_rank, n_rank, i / n_rank, n_stage});
        pg->ranks[i].pg = pg;
        pg->ranks[i].index = i;
        pg->ranks[i].m = &pg->shards[i];
    }
    for (int i = 0; i < pg->n; i++)
        if (i != pg->root && pthread_create(&pg->threads[i], NULL, pg_thread, &pg->ranks[i]))
            die("cannot start a thread for rank %d", i);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    ranks_at_work = pg->n > 1;
    pg_run(pg, (struct rank_step){.kind = RANK_START, .start = &t});
    int bad = -1; /* ranks without a message stopped because another failed */
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
 * The table for a CPU. All arithmetic that repeats is in struct kernels; these functions cut the work into items that
 * do not depend on the number of threads, so that results do not either.
 *
 * Every thread of the rank's team calls them (see cpu_forward). An operation ends with op_end: when it returns, its
 * results are complete.
 * ============================================================================================================ */

enum {
    ROW_TILE = 32,    /* weight rows of one work item */
    KEY_BLOCK = 64,   /* keys of one step of the online softmax */
    KEY_GROUP = 32,   /* keys that are loaded and multiplied at a time */
    QUERY_ROWS = 64,  /* query rows (tokens x heads) of one attention work item */
    SPLIT_KEYS = 256, /* keys of one partition of the context in decode, at least */
    CPU_SPLITS_MAX = 64,
    SPLIT_TOKENS = 4,   /* most tokens of a forward for which the context is split */
    MLA_HEAD_GROUP = 8, /* heads of a set over the latent cache */
    OWN_PACK = 96 << 10 /* bytes of packed activations up to which every thread packs all of them itself */
};

/* The parts of a forward, while cpu_profile times its only rank. A part ends where the next one begins. */
static struct {
    struct profile_row *row; /* (cap); NULL: nothing is timed */
    int n, cap;
    double last; /* now_seconds() when the latest part ended */
} cpu_timing;

/* Ends a part, which has read `bytes` of weights and cache. One thread calls it, while the others wait. */
__attribute__((format(printf, 2, 0))) static void part_end(double bytes, const char *fmt, va_list v) {
    const double now = now_seconds();
    if (cpu_timing.n == cpu_timing.cap) return;
    struct profile_row *row = &cpu_timing.row[cpu_timing.n++];
    vsnprintf(row->name, sizeof row->name, fmt, v);
    row->calls = 1;
    row->bytes = bytes;
    row->seconds = now - cpu_timing.last;
    cpu_timing.last = now;
}

/* A barrier that ends a part. */
__attribute__((format(printf, 2, 3))) static void op_end(double bytes, const char *fmt, ...) {
    va_list v;
    if (!team_arrive()) return;
    va_start(v, fmt);
    if (cpu_timing.row) part_end(bytes, fmt, v);
    va_end(v);
    team_release();
}

/* The same for products with up to LINEAR_MAX matrices, of which w is NULL behind the last. */
static void op_end_matrices(const char *what, const struct weight *const *w) {
    char rows[16 * LINEAR_MAX];
    double bytes = 0;
    for (int i = 0, n = 0; w[i]; i++) {
        n += snprintf(rows + n, sizeof rows - (size_t)n, i ? " + %d" : "%d", w[i]->n_out);
        bytes += (double)weight_bytes(w[i]);
    }
    op_end(bytes, "%s %s %s x %d", what, gguf_type_info(w[0]->type).name, rows, w[0]->n_in);
}

static void op_end_matrix(const char *what, const struct weight *w) {
    op_end_matrices(what, (const struct weight *const[]){w, NULL});
}

static size_t size_max(size_t a, size_t b) { return a > b ? a : b; }

/* Row t of an activation slot. */
static float *act_row(const struct rank *r, enum act a, int t) { return r->act[a] + (size_t)t * (size_t)r->width[a]; }

/* The calling thread's scratch. */
static void *cpu_scratch(const struct rank *r) { return r->scratch + (size_t)team_me.index * r->scratch_bytes; }

/* The rank `rank` of r's stage: they lie side by side. */
static struct rank *rank_peer(struct rank *r, int rank) { return r - r->m->shard.rank + rank; }

static void cpu_embed(struct rank *r, enum act x) {
    const struct weight *w = &r->m->embd;
    const struct rank *before = pg_neighbor(r, -1);
    float scale = w->scale ? w->scale[0] : 1.0f;
    if (team_leads()) {
        r->n_all_reduce = 0;
        if (before) pg_recv(r);
    }
    if (before) team_barrier();
    for (int t = team_first(r->n_tok); t >= 0; t = team_next()) {
        float *row = act_row(r, x, t);
        for (int k = 0; k < r->m->n_rope; k++) {
            const struct rope *rope = &r->m->ropes[k];
            const int half = rope->dim / 2;
            for (int i = 0; i < half; i++) {
                float angle = (float)(r->pos + t) * rope->freq[i];
                r->cos[k][t * half + i] = cosf(angle) * rope->factor;
                r->sin[k][t * half + i] = sinf(angle) * rope->factor;
            }
        }
        if (before) {
            memcpy(row, act_row(before, x, t), (size_t)r->m->n_embd * sizeof *row);
            continue;
        }
        gguf_dequantize_row(w->type, w->data + (size_t)r->tokens[t] * w->row_bytes, row, (size_t)w->n_in);
        for (int i = 0; scale != 1.0f && i < w->n_in; i++) row[i] *= scale;
    }
    op_end(0, "embedding");
}

static void rmsnorm_rows(struct rank *r, enum act x, const float *w, enum act out) {
    for (int t = team_first(r->n_tok); t >= 0; t = team_next())
        r->k->rmsnorm(act_row(r, x, t), w, r->m->rms_eps, act_row(r, out, t), r->width[x]);
    op_end(0, "norm");
}

/* A barrier for all threads of all ranks of the stage. */
static void stage_team_barrier(struct rank *r) {
    if (r->m->shard.n_rank == 1) return;
    if (!team_arrive()) return;
    stage_barrier(r);
    team_release();
}

/* Reads the deltas of the stage's ranks in their own memory, between two barriers. */
static void all_reduce_add_rmsnorm(struct rank *r, enum act x, enum act delta, const float *w, enum act out) {
    int n_rank = r->m->shard.n_rank, n = r->width[x];
    if (team_leads()) r->n_all_reduce++;
    stage_team_barrier(r);
    for (int t = team_first(r->n_tok); t >= 0; t = team_next()) {
        float *a = act_row(r, x, t), *d[MAX_RANKS];
        for (int k = 0; k < n_rank; k++) d[k] = act_row(rank_peer(r, k), delta, t);
        for (int i = 0; i < n; i++) {
            float sum = d[0][i];
            for (int k = 1; k < n_rank; k++) sum += d[k][i];
            a[i] += sum;
        }
        if (w) r->k->rmsnorm(a, w, r->m->rms_eps, act_row(r, out, t), n);
    }
    stage_team_barrier(r); /* nobody's delta is overwritten while others read it */
    op_end(0, w ? "sum, norm" : "sum");
}

static void cpu_final_reduce(struct rank *r, enum act x, enum act delta) {
    struct rank *next = pg_neighbor(r, 1);
    all_reduce_add_rmsnorm(r, x, delta, NULL, x);
    if (next && team_leads()) pg_send(next);
}

/* A thread's scratch: KERNEL_SCRATCH bytes for the kernels, a tile of results for `chunk` tokens, then three buffers of
 * OWN_PACK bytes for packed activations. scratch_tile returns the second, scratch_pack one of the three. */
static float *scratch_tile(const struct rank *r) {
    return (float *)(void *)((uint8_t *)cpu_scratch(r) + KERNEL_SCRATCH);
}

static uint8_t *scratch_pack(const struct rank *r, int i) {
    return (uint8_t *)cpu_scratch(r) + KERNEL_SCRATCH + (size_t)r->chunk * ROW_TILE * sizeof(float) +
           (size_t)i * OWN_PACK;
}

/* Packs n rows of x (n_in, x_stride floats apart) into `shared`, act_bytes apart. The threads divide the rows. */
static void pack_shared(const struct rank *r, enum act_format f, const float *x, size_t x_stride, int n, int n_in,
                        uint8_t *shared) {
    const size_t stride = r->k->act_bytes(f, n_in);
    for (int t = team_first(n); t >= 0; t = team_next())
        r->k->act_pack(f, x + (size_t)t * x_stride, n_in, shared + (size_t)t * stride);
    team_barrier();
}

/* Packs n rows of x (n_in, x_stride floats apart) and returns them, act_bytes apart. Up to OWN_PACK bytes every thread
 * packs all rows into its own buffer i, which saves a barrier; beyond, the threads divide the rows and pack them into
 * `shared`. */
static const uint8_t *pack_rows(const struct rank *r, enum act_format f, const float *x, size_t x_stride, int n,
                                int n_in, uint8_t *shared, int i) {
    size_t stride = r->k->act_bytes(f, n_in);
    if ((size_t)n * stride <= OWN_PACK) {
        uint8_t *own = scratch_pack(r, i);
        for (int t = 0; t < n; t++) r->k->act_pack(f, x + (size_t)t * x_stride, n_in, own + (size_t)t * stride);
        return own;
    }
    pack_shared(r, f, x, x_stride, n, n_in, shared);
    return shared;
}

/* y[:, row..row+n_row-1] = W x for n rows of packed x, or added to y. n_row <= ROW_TILE. */
static void linear_tile(struct rank *r, const struct weight *w, enum act_format f, const uint8_t *x, int col, int n_in,
                        int n, int row, int n_row, float *y, int y_stride) {
    const size_t at = w->row_run
                          ? (size_t)(row / w->row_run) * w->row_run_bytes + (size_t)(row % w->row_run) * w->row_bytes
                          : (size_t)row * w->row_bytes;
    const size_t run = w->col_run ? (size_t)(col / w->col_run) * w->col_run_bytes : 0;
    struct gemm g = {.type = w->type,
                     .format = f,
                     .w = w->data + at + run,
                     .w_stride = w->row_bytes,
                     .n_out = n_row,
                     .n_in = n_in,
                     .x = x,
                     .x_stride = r->k->act_bytes(f, n_in),
                     .n_tok = n,
                     .scale = w->scale ? w->scale[0] : 1.0f,
                     .y = y + row,
                     .y_stride = (size_t)y_stride,
                     .scratch = cpu_scratch(r)};
    if (col) {
        g.y = scratch_tile(r);
        g.y_stride = ROW_TILE;
    }
    r->k->gemm(&g);
    for (int t = 0; t < n && (col || w->bias); t++)
        r->k->scale_add(col ? g.y + (size_t)t * g.y_stride : w->bias + row, 1.0f,
                        y + (size_t)t * (size_t)y_stride + row, n_row);
}

/* n rows of input of a matrix, packed. */
struct packed {
    enum act_format f;
    int n_run, n_in;    /* runs of columns, each with packed rows of its own; columns of a run */
    const uint8_t *own; /* the thread's copy; NULL: it is in r->pack */
};

static struct packed linear_pack(struct rank *r, const struct weight *w, const float *x, int x_stride, int n) {
    struct packed p = {.f = r->k->act_format(w->type, n), .n_in = w->col_run ? w->col_run : w->n_in};
    if (!w->n_in) return p; /* this rank's shard is empty */
    p.n_run = w->n_in / p.n_in;
    const size_t run_bytes = (size_t)n * r->k->act_bytes(p.f, p.n_in);
    if (p.n_run == 1) {
        const uint8_t *rows = pack_rows(r, p.f, x, (size_t)x_stride, n, p.n_in, r->pack, 0);
        if (rows != r->pack) p.own = rows;
        return p;
    }
    for (int k = 0; k < p.n_run; k++)
        pack_shared(r, p.f, x + (size_t)k * (size_t)p.n_in, (size_t)x_stride, n, p.n_in,
                    r->pack + (size_t)k * run_bytes);
    return p;
}

/* y = W x for n rows of packed x. Ends without a barrier. */
static void linear_rows(struct rank *r, const struct weight *w, const struct packed *x, int n, float *y, int y_stride) {
    const size_t run_bytes = (size_t)n * r->k->act_bytes(x->f, x->n_in);
    for (int t = w->n_in ? -1 : team_first(n); t >= 0; t = team_next())
        memset(y + (size_t)t * (size_t)y_stride, 0, (size_t)w->n_out * sizeof *y);
    for (int i = w->n_in ? team_first(ceil_by(w->n_out, ROW_TILE)) : -1; i >= 0; i = team_next()) {
        const int end = int_min((i + 1) * ROW_TILE, w->n_out);
        for (int row = i * ROW_TILE, m; row < end; row += m) {
            m = w->row_run ? int_min(end - row, w->row_run - row % w->row_run) : end - row;
            for (int k = 0; k < x->n_run; k++)
                linear_tile(r, w, x->f, x->own ? x->own : r->pack + (size_t)k * run_bytes, k * x->n_in, x->n_in, n, row,
                            m, y, y_stride);
        }
    }
}

/* out[i] = w[i] x for each w up to NULL. */
static void linear_each(struct rank *r, enum act x, const struct weight *const *w, const enum act *out) {
    struct packed p;
    for (int i = 0; w[i]; i++) {
        const bool same = i && r->k->act_format(w[i]->type, r->n_tok) == p.f && w[i]->n_in == w[i - 1]->n_in &&
                          w[i]->col_run == w[i - 1]->col_run;
        if (i && !same && !p.own) team_barrier(); /* others may still read what is packed */
        if (!same) p = linear_pack(r, w[i], r->act[x], r->width[x], r->n_tok);
        linear_rows(r, w[i], &p, r->n_tok, r->act[out[i]], r->width[out[i]]);
    }
    op_end_matrices("linear", w);
}

static void cpu_linear(struct rank *r, const struct weight *w, enum act x, enum act out) {
    linear_each(r, x, (const struct weight *const[]){w, NULL}, &out);
}

static void cpu_norm_linear(struct rank *r, enum act x, const float *norm, const struct weight *w, enum act out) {
    rmsnorm_rows(r, x, norm, x);
    cpu_linear(r, w, x, out);
}

static void cpu_projections(struct rank *r, int il, enum act x, enum act delta) {
    const struct layer *layer = &r->m->layers[il];
    const struct weight *w[LINEAR_MAX + 1];
    enum act out[LINEAR_MAX];
    layer_projections(layer, w, out);
    if (delta == ACT_COUNT) rmsnorm_rows(r, x, layer->attn_norm, A_H);
    else all_reduce_add_rmsnorm(r, x, delta, layer->attn_norm, A_H);
    linear_each(r, A_H, w, out);
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

/* Floats from one head's query to the next: its gates may stand between. */
static int query_stride(const struct layer *layer) {
    return layer->has & HAS_Q_GATE ? 2 * layer->attn.head_k : layer->attn.head_k;
}

/* Norms and rotates the heads of q and k in place, then writes k and v to the cache at their positions. */
static void rope_store_kv(struct rank *r, int il, enum act q, enum act k, enum act v) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    const struct attn *a = &layer->attn;
    const int dim = m->ropes[a->rope].dim, q_head = query_stride(layer);
    for (int t = team_first(r->n_tok); t >= 0; t = team_next()) {
        const float *c = r->cos[a->rope] + t * (dim / 2), *s = r->sin[a->rope] + t * (dim / 2);
        for (int h = 0; h < a->n_head + a->n_head_kv; h++) {
            bool is_q = h < a->n_head;
            float *x = is_q ? act_row(r, q, t) + h * q_head : act_row(r, k, t) + (h - a->n_head) * a->head_k;
            r->k->rmsnorm(x, is_q ? layer->q_norm : layer->k_norm, m->rms_eps, x, a->head_k);
            rope_halves(x, c, s, dim);
        }
        kv_store(r->k, &r->planes[il][PLANE_K], r->pos + t, act_row(r, k, t));
        kv_store(r->k, &r->planes[il][PLANE_V], r->pos + t, act_row(r, v, t));
    }
    op_end(0, "rotation, cache");
}

/* Rotates q, norms the latent, rotates the shared key, and writes latent and key to the cache at their positions. */
static void mla_store(struct rank *r, int il, enum act q, enum act kv) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    const struct attn *a = &layer->attn;
    const int dim = m->ropes[a->rope].dim, nope = a->head_k - dim;
    for (int t = team_first(r->n_tok); t >= 0; t = team_next()) {
        const float *c = r->cos[a->rope] + t * (dim / 2), *s = r->sin[a->rope] + t * (dim / 2);
        float *latent = act_row(r, kv, t);
        for (int h = 0; h < a->n_head; h++) rope_pairs(act_row(r, q, t) + h * a->head_k + nope, c, s, dim);
        r->k->rmsnorm(latent, layer->kv_a_norm, m->rms_eps, latent, a->kv_lora);
        rope_pairs(latent + a->kv_lora, c, s, dim);
        kv_store(r->k, &r->planes[il][PLANE_K], r->pos + t, latent);
        kv_store(r->k, &r->planes[il][PLANE_V], r->pos + t, latent + a->kv_lora);
    }
    op_end(0, "rotation, cache");
}

/* ============================================================================================================
 * CPU operations: attention
 *
 * A set of query rows shares keys and values. A work item is one or more sets over a range of the context: it computes
 * an online softmax over blocks of keys, all sets for one block after the other, so that the cache is read once. In
 * decode the context is split among items, whose partial results are merged in a fixed order.
 *
 * Keys are loaded transposed, so that both products are sgemm_add: the lanes of a vector are keys, then values of a row.
 *
 * Tried and dropped: 128 and 256 query rows an item, and blocks of 32 keys (same speed, Zen 4).
 * ============================================================================================================ */

enum attend_kind {
    ATTEND_GQA,    /* rows: tokens x heads of one KV head */
    ATTEND_LATENT, /* rows: tokens x a group of heads; keys are [latent | k_pe], values the latents themselves */
    ATTEND_EXPAND  /* rows: tokens of one head; keys and values are expanded from the latents block by block */
};

struct attend {
    enum attend_kind kind;
    int il, head;     /* the first set's first head (GQA: its KV head) */
    int n_set;        /* sets, of consecutive heads (GQA: of consecutive KV heads) */
    int n_head;       /* query heads of a set */
    int first, n_tok; /* tokens of the batch */
    int dk, dv;
    int begin, end; /* keys; the causal limit of each row applies on top */
    const float *q; /* row (t, h) at q + t * q_tok + h * q_head, (dk) */
    size_t q_tok, q_head;
    float *out; /* row (t, h) at out + t * out_tok + h * out_head, (dv): the result */
    size_t out_tok, out_head;
    float *partial; /* or, when not NULL, the unfinished (n_set, n_tok * n_head, dv + 2): sums, maximum, denominator */
};

/* Scratch of an item. Query rows: of all its sets, scaled queries, and of each row the weighted sum of values, maximum
 * and denominator so far. Then a block of keys. */
struct attend_work {
    float *q, *acc;   /* (rows, dk), (rows, dv) */
    float *top, *den; /* (rows) */
    float *s;         /* (rows of a set, KEY_BLOCK) scores */
    float *keys;      /* (dk, KEY_BLOCK), transposed */
    float *values;    /* (KEY_BLOCK, dv) */
    float *rows;      /* (KEY_BLOCK, dk) what is to be transposed */
    float *w_k, *w_v; /* ATTEND_EXPAND: the head's wk_b and wv_b transposed, (nope, n_lat) and (kv_lora, n_v) */
    float *latents;   /* ATTEND_EXPAND: (kv_lora, KEY_BLOCK), transposed */
    int n_lat, n_v;   /* kv_lora and head_v, rounded up to TRANSPOSE_ROWS */
    /* What is not prefetched yet of the next block of keys and of values, and the bytes of each that a step takes. */
    const uint8_t *ahead[2], *ahead_end[2];
    size_t ahead_step;
};

/* Divides `scratch` among an item's buffers for `rows` query rows, set_rows in a set, and returns the number of its
 * floats. nope: 0, or the part of a head's key that ATTEND_EXPAND makes from kv_lora latents. */
static size_t attend_divide(struct attend_work *w, float *scratch, int rows, int set_rows, int dk, int dv, int nope,
                            int kv_lora) {
    enum { ALIGN = 64 / sizeof(float) };
    const int v = nope ? ceil_to(dv, TRANSPOSE_ROWS) : 0, lat = nope ? ceil_to(kv_lora, TRANSPOSE_ROWS) : 0;
    const struct {
        float **p;
        int n, width;
    } part[] = {{&w->q, rows, dk},
                {&w->acc, rows, dv},
                {&w->top, rows, 1},
                {&w->den, rows, 1},
                {&w->s, set_rows, KEY_BLOCK},
                {&w->keys, dk, KEY_BLOCK},
                {&w->values, KEY_BLOCK, dv},
                {&w->rows, KEY_BLOCK, int_max(dk, lat)},
                {&w->w_k, nope, lat},
                {&w->w_v, lat, v},
                {&w->latents, lat, KEY_BLOCK}};
    size_t at = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        *part[i].p = scratch ? scratch + at : NULL;
        at += ((size_t)part[i].n * (size_t)part[i].width + ALIGN - 1) / ALIGN * ALIGN;
    }
    w->n_lat = lat;
    w->n_v = v;
    return at;
}

/* Fills w->w_k and w->w_v with the item's head of wk_b and wv_b. */
static void attend_expand_weights(const struct rank *r, const struct attend *a, const struct attend_work *w) {
    const struct layer *layer = &r->m->layers[a->il];
    const struct weight *const from[2] = {&layer->wk_b, &layer->wv_b};
    float *const to[2] = {w->w_k, w->w_v};
    const int ld[2] = {w->n_lat, w->n_v};
    for (int i = 0; i < 2; i++) {
        const struct weight *b = from[i];
        const float scale = b->scale ? b->scale[a->head] : 1.0f;
        for (int row = 0; row < b->n_out; row += TRANSPOSE_ROWS) {
            const int n = int_min(b->n_out - row, TRANSPOSE_ROWS);
            for (int j = 0; j < n; j++) {
                float *x = w->rows + (ptrdiff_t)j * b->n_in;
                gguf_dequantize_row(b->type,
                                    b->data + (size_t)a->head * b->expert_bytes + (size_t)(row + j) * b->row_bytes, x,
                                    (size_t)b->n_in);
                if (scale != 1.0f) r->k->scale(x, scale, x, b->n_in);
            }
            r->k->transpose(GGUF_F32, (const uint8_t *)w->rows, (size_t)b->n_in * sizeof(float), n, b->n_in,
                            to[i] + row, ld[i]);
        }
    }
}

/* Loads keys pos..pos+n-1 of the latent cache and their values. */
static void attend_load_latents(const struct rank *r, const struct attend *a, const struct attend_work *w, int pos,
                                int n) {
    const struct plane *keys = &r->planes[a->il][PLANE_K], *values = &r->planes[a->il][PLANE_V];
    const struct attn *shape = &r->m->layers[a->il].attn;
    const int lat = shape->kv_lora, rope = r->m->ropes[shape->rope].dim;
    const int nope = a->dk - rope; /* values of a key before the rotated ones */
    const size_t row = (size_t)lat * sizeof(float);
    if (a->kind == ATTEND_LATENT) {
        kv_load(r->k, keys, pos, n, 0, lat, w->values, lat);
        r->k->transpose(GGUF_F32, (const uint8_t *)w->values, row, n, lat, w->keys, KEY_BLOCK);
    } else {
        kv_load(r->k, keys, pos, n, 0, lat, w->rows, lat);
        r->k->transpose(GGUF_F32, (const uint8_t *)w->rows, row, n, lat, w->latents, KEY_BLOCK);
        memset(w->values, 0, (size_t)n * (size_t)a->dv * sizeof *w->values);
        r->k->sgemm_add(n, a->dv, lat, w->rows, lat, w->w_v, w->n_v, w->values, a->dv);
        memset(w->keys, 0, (size_t)nope * KEY_BLOCK * sizeof *w->keys);
        r->k->sgemm_add(nope, ceil_to(n, TRANSPOSE_ROWS), lat, w->w_k, w->n_lat, w->latents, KEY_BLOCK, w->keys,
                        KEY_BLOCK);
    }
    kv_load_columns(r->k, values, pos, n, 0, rope, w->rows, w->keys + (ptrdiff_t)nope * KEY_BLOCK, KEY_BLOCK);
}

/* Prepares to prefetch n keys and values from `pos` on in `steps` calls of attend_prefetch. */
static void attend_ahead(const struct rank *r, const struct attend *a, struct attend_work *w, int pos, int n,
                         int steps) {
    w->ahead_step = 0;
    for (int u = 0; u < 2; u++) {
        const struct plane *p = &r->planes[a->il][u ? PLANE_V : PLANE_K];
        w->ahead[u] = p->data + (size_t)pos * p->row_bytes;
        w->ahead_end[u] = w->ahead[u] + (size_t)n * p->row_bytes;
        w->ahead_step = size_max(w->ahead_step, ((size_t)n * p->row_bytes / (size_t)steps + 63) / 64 * 64);
    }
}

/* Prefetches what a step takes. Steps are small and stand between products, because a core has few reads in flight. */
static void attend_prefetch(struct attend_work *w) {
    for (int u = 0; u < 2; u++)
        for (size_t i = 0; i < w->ahead_step && w->ahead[u] < w->ahead_end[u]; i += 64, w->ahead[u] += 64)
            __builtin_prefetch(w->ahead[u], 0, 2);
}

/* Takes the n keys from `pos` on into the rows of a set. */
static void attend_keys(const struct rank *r, const struct attend *a, struct attend_work *w, int set, int pos, int n) {
    const struct plane *keys = &r->planes[a->il][PLANE_K], *values = &r->planes[a->il][PLANE_V];
    const int rows = a->n_tok * a->n_head, at = set * rows, dk = a->dk, dv = a->dv;
    float *acc = w->acc + (size_t)at * (size_t)dv, *top = w->top + at, *den = w->den + at;
    memset(w->s, 0, (size_t)rows * KEY_BLOCK * sizeof *w->s);
    for (int i = 0; i < n; i += KEY_GROUP) {
        const int some = int_min(n - i, KEY_GROUP);
        if (a->kind == ATTEND_GQA)
            kv_load_columns(r->k, keys, pos + i, some, (a->head + set) * dk, dk, w->rows, w->keys + i, KEY_BLOCK);
        attend_prefetch(w);
        r->k->sgemm_add(rows, ceil_to(some, TRANSPOSE_ROWS), dk, w->q + (size_t)at * (size_t)dk, dk, w->keys + i,
                        KEY_BLOCK, w->s + i, KEY_BLOCK);
        attend_prefetch(w);
    }
    for (int i = 0; i < rows; i++) {
        float *p = w->s + i * KEY_BLOCK, mx;
        int seen = r->pos + a->first + i / a->n_head + 1 - pos;
        seen = seen < 0 ? 0 : seen < n ? seen : n;
        mx = seen ? r->k->max(p, seen) : top[i];
        if (mx > top[i]) {
            const float f = expf(top[i] - mx);
            den[i] *= f, top[i] = mx;
            r->k->scale(acc + i * dv, f, acc + i * dv, dv);
        }
        if (seen) den[i] += r->k->exp_sum(p, seen, top[i]);
        for (int j = seen; j < n; j++) p[j] = 0;
        attend_prefetch(w);
    }
    for (int i = 0; i < n; i += KEY_GROUP) {
        const int some = int_min(n - i, KEY_GROUP);
        float *v = w->values + i * dv;
        if (a->kind == ATTEND_GQA) kv_load(r->k, values, pos + i, some, (a->head + set) * dv, dv, v, dv);
        attend_prefetch(w);
        r->k->sgemm_add(rows, dv, some, w->s + i, KEY_BLOCK, v, dv, acc, dv);
        attend_prefetch(w);
    }
}

/* Floats of scratch of an item with `rows` query rows in all its sets, whatever its kind. */
static size_t attend_floats(const struct model *m, int rows) {
    const struct maxima *x = &m->max;
    const int lat = x->kv_lora, nope = lat ? x->head_k : 0;
    struct attend_work w;
    const size_t latent = lat ? attend_divide(&w, NULL, rows, rows, lat + x->rope_dim, lat, 0, 0) : 0;
    return size_max(latent, attend_divide(&w, NULL, rows, rows, x->head_k, x->head_v, nope, lat));
}

/* Online softmax over blocks of keys (arXiv 2112.05682; 2205.14135): per row the running maximum, denominator and
 * weighted sum of values. */
static void attend_run(const struct rank *r, const struct attend *a, float *scratch) {
    const int set_rows = a->n_tok * a->n_head, rows = a->n_set * set_rows, dk = a->dk, dv = a->dv;
    const struct attn *shape = &r->m->layers[a->il].attn;
    struct attend_work w = {.ahead_step = 0};
    attend_divide(&w, scratch, rows, set_rows, dk, dv,
                  a->kind == ATTEND_EXPAND ? shape->head_k - r->m->ropes[shape->rope].dim : 0, shape->kv_lora);
    for (int i = 0; i < rows; i++) {
        const int set = i / set_rows, t = i % set_rows / a->n_head, h = set * a->n_head + i % a->n_head;
        const float *src = a->q + (size_t)(a->first + t) * a->q_tok + (size_t)h * a->q_head;
        r->k->scale(src, shape->scale, w.q + i * dk, dk);
        w.top[i] = -INFINITY;
        w.den[i] = 0;
    }
    memset(w.acc, 0, (size_t)rows * (size_t)dv * sizeof *w.acc);
    if (a->kind == ATTEND_EXPAND) attend_expand_weights(r, a, &w);
    const int last = r->pos + a->first + a->n_tok; /* one past the newest key that any row sees */
    const int end = int_min(a->end, last);
    for (int pos = a->begin; pos < end; pos += KEY_BLOCK) {
        const int n = int_min(end - pos, KEY_BLOCK);
        if (a->n_set > 1)
            attend_ahead(r, a, &w, pos + n, int_min(last - pos - n, KEY_BLOCK),
                         a->n_set * (set_rows + 4 * KEY_BLOCK / KEY_GROUP));
        if (a->kind != ATTEND_GQA) attend_load_latents(r, a, &w, pos, n);
        for (int set = 0; set < a->n_set; set++) attend_keys(r, a, &w, set, pos, n);
    }
    for (int i = 0; i < rows; i++) {
        const int set = i / set_rows, t = i % set_rows / a->n_head, h = set * a->n_head + i % a->n_head;
        float *o = a->partial ? a->partial + (size_t)i * (size_t)(dv + 2)
                              : a->out + (size_t)(a->first + t) * a->out_tok + (size_t)h * a->out_head;
        const float f = a->partial ? 1.0f : 1.0f / w.den[i];
        r->k->scale(w.acc + i * dv, f, o, dv);
        if (a->partial) o[dv] = w.top[i], o[dv + 1] = w.den[i];
    }
}

/* Joins the partitions of a row in their order; partitions without a visible key have denominator 0. */
static void attend_merge(const struct kernels *k, const float *partials, int n_split, size_t stride, int dv,
                         float *out) {
    float top = -INFINITY, den = 0;
    for (int p = 0; p < n_split; p++) top = fmaxf(top, partials[(size_t)p * stride + (size_t)dv]);
    memset(out, 0, (size_t)dv * sizeof *out);
    for (int p = 0; p < n_split; p++) {
        const float *x = partials + (size_t)p * stride;
        float f = x[dv + 1] > 0 ? expf(x[dv] - top) : 0;
        den += f * x[dv + 1];
        k->scale_add(x, f, out, dv);
    }
    k->scale(out, 1.0f / den, out, dv);
}

/* All rows of the batch against the cache. `all` describes the whole: heads in n_head, of which `group` are a set; items
 * of `tile` tokens. */
static void attend_all(struct rank *r, const struct attend *all, int group, int tile) {
    const int keys = r->pos + r->n_tok, n_group = all->n_head / group, n_tile = ceil_by(r->n_tok, tile);
    int n_split = 1, split_keys = keys, n_set = 1;
    if (r->n_tok <= SPLIT_TOKENS) {
        split_keys = ceil_by(int_max(SPLIT_KEYS, ceil_by(keys, CPU_SPLITS_MAX)), KEY_BLOCK) * KEY_BLOCK;
        n_split = ceil_by(keys, split_keys);
        n_set = ceil_by(n_group, ceil_by(2 * team_size(), n_split)); /* enough items for all threads */
    }
    const size_t stride = (size_t)all->dv + 2, rows = (size_t)r->n_tok * (size_t)group;
    const int n_part = ceil_by(n_group, n_set), n_item = n_part * n_tile * n_split;
    for (int i = team_first(n_item); i >= 0; i = team_next()) {
        struct attend a = *all;
        const int g = i % n_part * n_set, p = i / n_part / n_tile;
        const int t = n_tile - 1 - i / n_part % n_tile; /* the last tiles see the most keys: they start first */
        a.head = all->kind == ATTEND_GQA ? g : g * group;
        a.n_set = int_min(n_set, n_group - g);
        a.n_head = group;
        a.first = t * tile;
        a.n_tok = int_min(r->n_tok - a.first, tile);
        a.begin = p * split_keys;
        a.end = a.begin + split_keys;
        a.q += (size_t)g * (size_t)group * a.q_head;
        a.out += (size_t)g * (size_t)group * a.out_head;
        if (n_split > 1) a.partial = r->partials + ((size_t)p * (size_t)n_group + (size_t)g) * rows * stride;
        attend_run(r, &a, cpu_scratch(r));
    }
    team_barrier();
    if (n_split == 1) return;
    for (int i = team_first(r->n_tok * all->n_head); i >= 0; i = team_next()) {
        int t = i / all->n_head, h = i % all->n_head;
        const float *partials = r->partials + ((size_t)(h / group) * rows + (size_t)(t * group + h % group)) * stride;
        attend_merge(r->k, partials, n_split, (size_t)n_group * rows * stride, all->dv,
                     all->out + (size_t)t * all->out_tok + (size_t)h * all->out_head);
    }
    team_barrier();
}

/* Tokens of a work item whose tokens have rows_per_token query rows each. */
static int tile_tokens(int rows_per_token) { return rows_per_token < QUERY_ROWS ? QUERY_ROWS / rows_per_token : 1; }

/* Bytes of cache or state that the batch's last token reads. */
static double cache_bytes(const struct rank *r, int il) {
    return layer_state_reads(r->m, &r->m->layers[il], r->kv_type, (size_t)(r->pos + r->n_tok));
}

static void op_end_latent(const struct rank *r, int il) {
    const struct layer *layer = &r->m->layers[il];
    op_end((double)(weight_bytes(&layer->wk_b) + weight_bytes(&layer->wv_b)) + cache_bytes(r, il), "latent attention");
}

/* x *= the sigmoid of the gates in q. */
static void attention_gate(struct rank *r, int il, enum act q, enum act x) {
    const struct attn *a = &r->m->layers[il].attn;
    for (int t = team_first(r->n_tok); t >= 0; t = team_next())
        for (int h = 0; h < a->n_head; h++)
            r->k->sigmoid_mul(act_row(r, x, t) + h * a->head_v, act_row(r, q, t) + (2 * h + 1) * a->head_k, a->head_v);
    op_end(0, "attention gates");
}

/* Grouped-query attention. A work item has the query heads of one KV head for a tile of tokens. */
static void cpu_attention(struct rank *r, int il, enum act q, enum act k, enum act v, enum act out) {
    const struct attn *shape = &r->m->layers[il].attn;
    if (!shape->n_head) return;
    rope_store_kv(r, il, q, k, v);
    int group = shape->n_head / shape->n_head_kv;
    struct attend a = {.kind = ATTEND_GQA,
                       .il = il,
                       .n_head = shape->n_head,
                       .dk = shape->head_k,
                       .dv = shape->head_v,
                       .q = r->act[q],
                       .q_tok = (size_t)r->width[q],
                       .q_head = (size_t)query_stride(&r->m->layers[il]),
                       .out = r->act[out],
                       .out_tok = (size_t)r->width[out],
                       .out_head = (size_t)shape->head_v};
    attend_all(r, &a, group, r->n_tok <= SPLIT_TOKENS ? r->n_tok : tile_tokens(group));
    op_end(cache_bytes(r, il), "attention");
    if (r->m->layers[il].has & HAS_Q_GATE) attention_gate(r, il, q, out);
}

/* Whether n query tokens make it cheaper to expand keys and values from the latents than to absorb wk_b and wv_b into
 * queries and outputs. Multiplications per key and head: (nope + v) * kv_lora / n + nope + rope + v when expanded,
 * 2 * kv_lora + rope when absorbed. */
static bool mla_expands(const struct model *m, const struct layer *layer, int n) {
    const struct attn *a = &layer->attn;
    const int nope = layer_nope(m, layer);
    int64_t saved = 2 * a->kv_lora - nope - a->head_v;
    return saved > 0 && (int64_t)(nope + a->head_v) * a->kv_lora < saved * n;
}

/* y (n_tok, n_head, y_head) = w[h] x (n_tok, n_head, x_head), one matrix per head. The n_copy floats that follow an
 * input vector are copied to follow its result. Ends without a barrier. */
static void heads_linear(struct rank *r, const struct weight *w, const float *x, size_t x_tok, size_t x_head, float *y,
                         size_t y_tok, size_t y_head, int n_copy) {
    enum act_format f = r->k->act_format(w->type, r->n_tok);
    size_t stride = r->k->act_bytes(f, w->n_in);
    for (int h = team_first(w->n_expert); h >= 0; h = team_next()) {
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
                             .scratch = cpu_scratch(r)};
            r->k->gemm(&g);
        }
    }
}

/* Latent attention (arXiv 2405.04434, section 2.1.2). For few query tokens wk_b is absorbed into the queries and wv_b
 * into the results, so that attention works on the cached latents; for many, keys and values are expanded block by
 * block (see mla_expands). */
static void cpu_mla_attention(struct rank *r, int il, enum act q, enum act kv, enum act out) {
    const struct layer *layer = &r->m->layers[il];
    const struct attn *shape = &layer->attn;
    const int n_head = shape->n_head, rope = layer_rope_dim(r->m, layer);
    const size_t q_tok = (size_t)r->width[q], out_tok = (size_t)r->width[out];
    const size_t head_k = (size_t)shape->head_k, head_v = (size_t)shape->head_v, lat = (size_t)shape->kv_lora;
    mla_store(r, il, q, kv);
    if (!n_head) return;
    struct attend a = {.il = il,
                       .n_head = n_head,
                       .dk = shape->head_k,
                       .dv = shape->head_v,
                       .q = r->act[q],
                       .q_tok = q_tok,
                       .q_head = head_k,
                       .out = r->act[out],
                       .out_tok = out_tok,
                       .out_head = head_v};
    if (mla_expands(r->m, layer, r->n_tok)) {
        a.kind = ATTEND_EXPAND;
        attend_all(r, &a, 1, r->n_tok);
        op_end_latent(r, il);
        return;
    }
    const size_t key = lat + (size_t)rope; /* values of an absorbed query */
    float *latent_out = r->q_absorbed + (size_t)r->n_tok * (size_t)n_head * key;
    a.kind = ATTEND_LATENT;
    a.dk = (int)key;
    a.dv = shape->kv_lora;
    a.q = r->q_absorbed;
    a.q_tok = (size_t)n_head * key;
    a.q_head = key;
    a.out = latent_out;
    a.out_tok = (size_t)n_head * lat;
    a.out_head = lat;
    int group = n_head % MLA_HEAD_GROUP ? 1 : MLA_HEAD_GROUP;
    heads_linear(r, &layer->wk_b, r->act[q], q_tok, head_k, r->q_absorbed, a.q_tok, key, rope);
    team_barrier();
    attend_all(r, &a, group, r->n_tok <= SPLIT_TOKENS ? r->n_tok : tile_tokens(group));
    heads_linear(r, &layer->wv_b, latent_out, a.out_tok, a.out_head, r->act[out], out_tok, head_v, 0);
    op_end_latent(r, il);
}

/* ============================================================================================================
 * CPU operations: gated delta net
 *
 * Linear attention with a state S (head_k, head_v) per value head (gated delta rule, arXiv 2412.06464). For a token
 * with query q, key k, value v, decay a in (0, 1] and beta:
 *
 *   u = beta (v - a S^T k);  S = a S + k u^T;  result = S^T q
 *
 * All tokens are computed one after the other, so that results do not depend on how they were batched.
 *
 * Tried and dropped: chunks of 64 tokens (the WY form of the paper, section 3.3) with the F32 GEMMs: 3.2 us per token
 * and value head of 128 x 128 (AVX-512, Zen 4) against 1.6, because a column block of the state stays in the first
 * cache.
 * ============================================================================================================ */

enum { DELTA_COLUMNS = 32 /* columns of a state in a work item: they stay in the first cache over all tokens */ };

/* The whole model's value head of a rank's value head j. */
static int delta_value_head(const struct delta *d, int j) {
    const int group = d->n_value / d->n_key;
    return d->tiled ? j / d->n_key * d->whole_key + d->first_key + j % d->n_key : d->first_key * group + j;
}

/* The key head of a value head, both of the rank. */
static int delta_key_head(const struct delta *d, int j) {
    return d->tiled ? j % d->n_key : j / (d->n_value / d->n_key);
}

/* Values of token p of a ring's row, before the convolution: this forward's (from slot a) or kept ones. */
static const float *delta_row(const struct rank *r, int il, enum plane_use use, enum act a, int p) {
    const struct plane *ring = &r->planes[il][use];
    if (p >= r->pos) return act_row(r, a, p - r->pos);
    return (const float *)(const void *)(ring->data + (size_t)(p % ring->n_row) * ring->row_bytes);
}

/* y (n) = the convolution of token p's values from value `from` of r->mix's row on, then SiLU. at, kept: floats before
 * these values in a row of the slot, and of the ring. */
static void delta_conv(const struct rank *r, int il, enum plane_use use, enum act a, int p, int from, int at, int kept,
                       int n, float *y) {
    const struct delta *d = &r->m->layers[il].delta;
    const int mix = 2 * d->n_key * d->head_k + d->n_value * d->head_v;
    memset(y, 0, (size_t)n * sizeof *y);
    for (int j = 0; j < d->n_conv; j++) {
        const int q = p - d->n_conv + 1 + j; /* the last tap is for token p */
        if (q < 0) continue;
        r->k->mul_add(y, r->taps[il] + j * mix + from, delta_row(r, il, use, a, q) + (q < r->pos ? kept : at), n);
    }
    r->k->sigmoid_mul(y, y, n);
}

/* Scales x (n) to norm `norm`, with 1e-6 added to the sum of squares (l2norm of the reference). */
static void delta_unit(const struct rank *r, float *x, int n, float norm) {
    const float f = norm / sqrtf(r->k->dot(x, x, n) + 1e-6f);
    for (int i = 0; i < n; i++) x[i] *= f;
}

/* Fills row i of r->mix (q | k | v) and of r->decay_beta (log decay | beta) for token p. */
static void delta_inputs(const struct rank *r, int il, int i, int p) {
    const struct layer *layer = &r->m->layers[il];
    const struct delta *d = &layer->delta;
    const int key = d->n_key * d->head_k;
    float *q = r->mix + (size_t)i * (size_t)r->m->max.mix, *k = q + key, *v = k + key;
    float *decay = r->decay_beta + (size_t)i * 2 * (size_t)r->m->max.values, *beta = decay + d->n_value;
    delta_conv(r, il, PLANE_K, A_Q, p, 0, 0, 0, key, q);
    delta_conv(r, il, PLANE_K, A_K, p, key, 0, key, key, k);
    delta_conv(r, il, PLANE_V, A_V, p, 2 * key, 0, 0, d->n_value * d->head_v, v);
    for (int h = 0; h < d->n_key; h++) {
        delta_unit(r, q + h * d->head_k, d->head_k, 1.0f / sqrtf((float)d->head_k));
        delta_unit(r, k + h * d->head_k, d->head_k, 1.0f);
    }
    const struct plane *recent = &r->planes[il][PLANE_RECENT];
    const float *kept = (const float *)(const void *)(recent->data + (size_t)(p % recent->n_row) * recent->row_bytes);
    const float *a = p < r->pos ? kept : act_row(r, A_ALPHA, p - r->pos);
    const float *b = p < r->pos ? kept + d->n_value : act_row(r, A_BETA, p - r->pos);
    for (int j = 0; j < d->n_value; j++) {
        const int head = delta_value_head(d, j);
        const float x = a[j] + layer->dt_bias[head];
        decay[j] = layer->decay[head] * (x > 20.0f ? x : log1pf(expf(x)));
        beta[j] = 1.0f / (1.0f + expf(-b[j]));
    }
}

/* Row i of r->mix, in the state S (head_k, lds) of columns first..first+n-1 of value head j; o (n): the result. */
static void delta_token(const struct rank *r, const struct delta *d, int j, int i, float *S, int lds, int first, int n,
                        float *o) {
    const int key = d->n_key * d->head_k;
    const float *q = r->mix + (size_t)i * (size_t)r->m->max.mix + delta_key_head(d, j) * d->head_k;
    const float *v = r->mix + (size_t)i * (size_t)r->m->max.mix + 2 * key + j * d->head_v + first;
    const float *gates = r->decay_beta + (size_t)i * 2 * (size_t)r->m->max.values + j;
    r->k->delta_step(S, lds, d->head_k, n, q, q + key, v, expf(gates[0]), gates[d->n_value], o);
}

/* DELTA_COLUMNS columns of a value head: takes tokens into the state as session_forward says, and writes the results of
 * the forward's own tokens to slot `out`. */
static void delta_columns(struct rank *r, int il, int item, enum act out) {
    const struct delta *d = &r->m->layers[il].delta;
    const int items = ceil_by(d->head_v, DELTA_COLUMNS), j = item / items;
    const int first = item % items * DELTA_COLUMNS, n = int_min(DELTA_COLUMNS, d->head_v - first);
    const int lag = r->pos - r->state_pos, rows = lag + r->n_tok, taken = r->n_tok > MAX_LAG ? rows - 1 : lag;
    float *S = cpu_scratch(r), unused[DELTA_COLUMNS];
    float *kept = (float *)(void *)r->planes[il][PLANE_SUM].data + (size_t)j * (size_t)(d->head_k * d->head_v) + first;
    for (int h = 0; h < d->head_k; h++) memcpy(S + h * n, kept + h * d->head_v, (size_t)n * sizeof *S);
    for (int i = 0; i < rows; i++) {
        float *o = i < lag ? unused : act_row(r, out, i - lag) + j * d->head_v + first;
        for (int h = 0; h < d->head_k && i == taken; h++)
            memcpy(kept + h * d->head_v, S + h * n, (size_t)n * sizeof *S);
        delta_token(r, d, j, i, S, n, first, n, o);
    }
}

/* Keeps the convolution's inputs, alpha and beta of the forward's last tokens. */
static void delta_keep(struct rank *r, int il) {
    const struct delta *d = &r->m->layers[il].delta;
    const int key = d->n_key * d->head_k, n_row = r->planes[il][PLANE_K].n_row;
    for (int t = int_max(0, r->n_tok - n_row); t < r->n_tok; t++) {
        float *row[3];
        for (int u = 0; u < 3; u++) {
            const struct plane *p = &r->planes[il][PLANE_K + u];
            row[u] = (float *)(void *)(p->data + (size_t)((r->pos + t) % n_row) * p->row_bytes);
        }
        memcpy(row[0], act_row(r, A_Q, t), (size_t)key * sizeof(float));
        memcpy(row[0] + key, act_row(r, A_K, t), (size_t)key * sizeof(float));
        memcpy(row[1], act_row(r, A_V, t), (size_t)(d->n_value * d->head_v) * sizeof(float));
        memcpy(row[2], act_row(r, A_ALPHA, t), (size_t)d->n_value * sizeof(float));
        memcpy(row[2] + d->n_value, act_row(r, A_BETA, t), (size_t)d->n_value * sizeof(float));
    }
}

static void cpu_delta_net(struct rank *r, int il, enum act out) {
    const struct layer *layer = &r->m->layers[il];
    const struct delta *d = &layer->delta;
    const int n = r->pos - r->state_pos + r->n_tok;
    const int items = d->n_value * ceil_by(d->head_v, DELTA_COLUMNS);
    if (!d->n_value) return; /* this rank's shard is empty */
    for (int i = team_first(n); i >= 0; i = team_next()) delta_inputs(r, il, i, r->state_pos + i);
    team_barrier();
    for (int i = team_first(items); i >= 0; i = team_next()) delta_columns(r, il, i, out);
    team_barrier();
    for (int i = team_first(r->n_tok * d->n_value); i >= 0; i = team_next()) {
        float *o = act_row(r, out, i / d->n_value) + i % d->n_value * d->head_v;
        float *z = act_row(r, A_Z, i / d->n_value) + i % d->n_value * d->head_v;
        r->k->rmsnorm(o, layer->delta_norm, r->m->rms_eps, o, d->head_v);
        r->k->silu_mul(z, o, d->head_v);
        memcpy(o, z, (size_t)d->head_v * sizeof *o);
    }
    if (team_leads()) delta_keep(r, il);
    op_end(cache_bytes(r, il), "delta net");
}

/* ============================================================================================================
 * CPU operations: feed-forward
 *
 * The router makes a list of jobs: each is an expert, or the dense or shared feed-forward, with its tokens. One thread
 * sums each element of the result in the order of the jobs, so that the sum does not depend on the number of threads.
 * ============================================================================================================ */

struct ffn_job {
    const struct weight *gate, *up, *down;
    int expert;
    int n_tok;           /* tokens of this job */
    const int32_t *rows; /* (n_tok) which ones; NULL: all in order */
    const float *w;      /* (n_tok) factors of the result; NULL: 1 */
    size_t hidden;       /* floats before this job's (n_tok, n_ff) in rank.hidden */
    size_t slot;         /* rows before this job's in rank.pack_h */
};

/* Chooses the experts of a token: their ids and weights. logits (n) are overwritten. In DeepSeek-V3 (arXiv 2412.19437,
 * section 2.1.2) the bias and the groups decide which experts are chosen, but not their weights. Ties go to the lower
 * id, as torch.topk's do in practice. */
static void route_token(const struct model *m, const struct layer *layer, float *logits, int32_t *ids, float *weights) {
    int n = layer->n_expert, k = layer->n_expert_used, per = n / m->n_group;
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
        if (isnan(pick[e])) pick[e] = -INFINITY; /* keeps the ids distinct, which scratch sizes rely on */
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
        if (best < 0) best = i; /* only NaN are left: keep the ids in range */
        ids[i] = best;
        weights[i] = logits[best];
        sum += weights[i];
        pick[best] = NAN;
    }
    float f = m->routed_scaling_factor;
    if (m->norm_topk_prob) f /= m->gating == GATING_SIGMOID ? sum + 1e-20f : sum;
    for (int i = 0; i < k; i++) weights[i] *= f;
}

/* Turns the batch's choices into jobs, in order of the expert ids, the shared expert last. */
static void ffn_jobs_build(struct rank *r, const struct layer *layer, enum act x) {
    int k = layer->n_expert_used, count[MAX_EXPERTS] = {0}, at[MAX_EXPERTS];
    size_t hidden = 0, slot = 0;
    r->n_jobs = 0;
    for (int i = 0; i < r->n_tok * k; i++) count[r->route_id[i]]++;
    for (int e = 0, sum = 0; e < layer->n_expert; e++) {
        at[e] = sum;
        if (!count[e] || !layer->gate.n_out) continue;
        r->jobs[r->n_jobs++] = (struct ffn_job){.gate = &layer->gate,
                                                .up = &layer->up,
                                                .down = &layer->down,
                                                .expert = e,
                                                .n_tok = count[e],
                                                .rows = r->job_rows + sum,
                                                .w = r->job_w + sum,
                                                .hidden = hidden,
                                                .slot = slot};
        sum += count[e];
        slot += (size_t)count[e];
        hidden += (size_t)count[e] * (size_t)layer->gate.n_out;
    }
    for (int i = 0; i < r->n_tok * k; i++) {
        int j = at[r->route_id[i]]++;
        r->job_rows[j] = i / k;
        r->job_w[j] = r->route_w[i];
    }
    for (int t = 0; layer->sh_weight && t < r->n_tok; t++) {
        float gate = r->k->dot(act_row(r, x, t), layer->sh_weight, r->m->n_embd), one = 1;
        r->k->sigmoid_mul(&one, &gate, 1);
        r->shared_w[t] = one;
    }
    if (layer->sh_gate.n_out)
        r->jobs[r->n_jobs++] = (struct ffn_job){.gate = &layer->sh_gate,
                                                .up = &layer->sh_up,
                                                .down = &layer->sh_down,
                                                .n_tok = r->n_tok,
                                                .w = layer->sh_weight ? r->shared_w : NULL,
                                                .hidden = hidden,
                                                .slot = slot};
}

/* The GEMM of rows row..row+ROW_TILE-1 of w for a job, without its input and output. */
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
                         .scratch = cpu_scratch(r)};
}

/* Packs the hidden rows of all jobs in format f, those of the last job in format `last`. As in pack_rows, every thread
 * packs all of them itself up to OWN_PACK bytes. */
static const uint8_t *ffn_pack_hidden(const struct rank *r, enum act_format f, enum act_format last, size_t stride,
                                      int n_rows) {
    const bool own = (size_t)n_rows * stride <= OWN_PACK;
    uint8_t *out = own ? scratch_pack(r, 2) : r->pack_h;
    for (int j = 0; j < r->n_jobs; j++) {
        const struct ffn_job *b = &r->jobs[j];
        const size_t ff = (size_t)b->gate->n_out;
        for (int t = own ? 0 : team_first(b->n_tok); t >= 0 && t < b->n_tok; t = own ? t + 1 : team_next())
            r->k->act_pack(j == r->n_jobs - 1 ? last : f, r->hidden + b->hidden + (size_t)t * ff, (int)ff,
                           out + (b->slot + (size_t)t) * stride);
    }
    if (!own) team_barrier();
    return out;
}

/* The squared norm of tile `tile` of the output of a (token, expert) pair. */
static float *norm_part(const struct rank *r, int tile, size_t slot) {
    return r->norm_parts + (size_t)tile * (size_t)r->chunk * (size_t)r->m->max.n_expert_used + slot;
}

/* Adds the squares of x (n) to sum (n). */
static void in_sum2_add(float *sum, const float *x, int n) {
    for (int i = 0; i < n; i++) sum[i] += x[i] * x[i];
}

/* Adds the latest feed-forward's jobs to the statistics: tokens, gate weights, output norms, squared inputs x. */
static void stats_add(struct rank *r, int il, enum act x) {
    const struct layer *layer = &r->m->layers[il];
    const int k = layer->n_expert_used, tiles = ceil_by(r->m->n_embd, ROW_TILE);
    struct ffn_weights ffns[2];
    layer_ffns(layer, ffns);
    for (int i = team_first(r->n_jobs); i >= 0; i = team_next()) {
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
    team_barrier();
}

/* Bytes of the jobs' matrices: gate and up, or down. */
static double jobs_bytes(const struct rank *r, bool down) {
    double bytes = 0;
    for (int i = 0; i < r->n_jobs; i++) {
        const struct ffn_job *j = &r->jobs[i];
        const struct weight *w[2] = {down ? j->down : j->gate, down ? NULL : j->up};
        for (int k = 0; k < 2 && w[k]; k++) bytes += (double)w[k]->n_out * (double)w[k]->row_bytes;
    }
    return bytes;
}

/* The name of the jobs' part of a forward. */
static const char *jobs_name(const struct rank *r) { return r->n_jobs && r->jobs[0].rows ? "experts" : "dense"; }

/* out = sum over the jobs of weight * down(silu(gate x) * (up x)). per_job: average tokens of a job, which chooses the
 * format of activations. */
static void ffn_run(struct rank *r, enum act x, enum act out, int per_job) {
    const struct kernels *k = r->k;
    if (!r->n_jobs) { /* this rank's shard is empty */
        for (int t = team_first(r->n_tok); t >= 0; t = team_next())
            memset(act_row(r, out, t), 0, (size_t)r->width[out] * sizeof(float));
        team_barrier();
        return;
    }
    const struct ffn_job *j0 = &r->jobs[0];
    /* the shared expert, if there is one: it has all tokens, and its weights may be of another type */
    const struct ffn_job *jn = &r->jobs[r->n_jobs - 1];
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
    int ff_tiles = ceil_by(n_ff, ROW_TILE), tiles = r->n_jobs * ff_tiles;
    for (int i = team_first(tiles); i >= 0; i = team_next()) {
        const struct ffn_job *j = &r->jobs[i / ff_tiles];
        int row = i % ff_tiles * ROW_TILE, ff = j->gate->n_out;
        bool shared = j == jn;
        if (row >= ff) continue;
        struct gemm g = ffn_gemm(r, j->gate, j, shared ? fs : f, row), u = ffn_gemm(r, j->up, j, shared ? fs : f, row);
        g.x = u.x = shared ? pack_s : pack;
        g.x_stride = u.x_stride = shared ? stride_s : stride;
        g.rows = u.rows = j->rows;
        g.y = r->hidden + j->hidden + row;
        g.y_stride = (size_t)ff;
        u.y = tile;
        u.y_stride = ROW_TILE;
        k->gemm(&g);
        k->gemm(&u);
        for (int t = 0; t < j->n_tok; t++) k->silu_mul(g.y + (size_t)t * (size_t)ff, tile + t * ROW_TILE, g.n_out);
    }
    op_end(jobs_bytes(r, false), "%s gate, up", jobs_name(r));
    const uint8_t *pack_h = ffn_pack_hidden(r, fd, fds, h_stride, n_rows);
    /* many tokens: several tiles an item, between which a job's hidden rows stay in the second cache */
    const int width = r->width[out], n_tile = ceil_by(width, ROW_TILE);
    const int by = ROW_TILE * (r->n_tok > SAME_BITS_TOKENS ? int_max(1, int_min(8, n_tile / (4 * team_size()))) : 1);
    for (int c = team_first(ceil_by(width, by)); c >= 0; c = team_next()) {
        const int end = int_min((c + 1) * by, width);
        for (int t = 0; t < r->n_tok; t++)
            memset(act_row(r, out, t) + c * by, 0, sizeof(float) * (size_t)(end - c * by));
        for (int i = 0; i < r->n_jobs; i++)
            for (int row = c * by; row < end; row += ROW_TILE) {
                const struct ffn_job *j = &r->jobs[i];
                struct gemm g = ffn_gemm(r, j->down, j, j == jn ? fds : fd, row);
                g.x = pack_h + j->slot * h_stride;
                g.x_stride = h_stride;
                g.y = tile;
                g.y_stride = ROW_TILE;
                k->gemm(&g);
                for (int t = 0; t < j->n_tok; t++)
                    k->scale_add(tile + t * ROW_TILE, j->w ? j->w[t] : 1.0f,
                                 act_row(r, out, j->rows ? j->rows[t] : t) + row, g.n_out);
                if (!r->norm_parts || !j->rows) continue;
                float *part = norm_part(r, row / ROW_TILE, j->slot);
                for (int t = 0; t < j->n_tok; t++) part[t] = k->dot(tile + t * ROW_TILE, tile + t * ROW_TILE, g.n_out);
            }
    }
    op_end(jobs_bytes(r, true), "%s down", jobs_name(r));
}

/* Runs the dense feed-forward as a single job. */
static void ffn_dense(struct rank *r, int il, enum act x, enum act out) {
    const struct layer *layer = &r->m->layers[il];
    if (team_leads()) {
        r->jobs[0] = (struct ffn_job){.gate = &layer->gate, .up = &layer->up, .down = &layer->down, .n_tok = r->n_tok};
        r->n_jobs = layer->gate.n_out > 0;
    }
    team_barrier();
    ffn_run(r, x, out, r->n_tok);
    if (r->stats) stats_add(r, il, x);
}

/* Routes each token, sorts the chosen experts into jobs, and runs these and the shared expert. */
static void ffn_routed(struct rank *r, int il, enum act x, enum act out) {
    const struct model *m = r->m;
    const struct layer *layer = &m->layers[il];
    const int k = layer->n_expert_used, per_job = ceil_by(r->n_tok * k, layer->n_expert);
    const struct packed p = linear_pack(r, &layer->router, r->act[x], r->width[x], r->n_tok);
    linear_rows(r, &layer->router, &p, r->n_tok, r->route, m->n_expert_max);
    team_barrier();
    for (int t = team_first(r->n_tok); t >= 0; t = team_next())
        route_token(m, layer, r->route + (size_t)t * (size_t)m->n_expert_max, r->route_id + t * k, r->route_w + t * k);
    if (team_arrive()) {
        ffn_jobs_build(r, layer, x);
        team_release();
    }
    op_end_matrix("router", &layer->router);
    ffn_run(r, x, out, per_job);
    if (r->stats) stats_add(r, il, x);
}

static void cpu_norm_ffn(struct rank *r, int il, enum act x, enum act delta, enum act out) {
    all_reduce_add_rmsnorm(r, x, delta, r->m->layers[il].ffn_norm, A_H);
    if (r->m->layers[il].n_expert) ffn_routed(r, il, A_H, out);
    else ffn_dense(r, il, A_H, out);
}

static void cpu_read_stats(struct rank *r, double *stats, float *in_sum2) {
    memcpy(stats, r->stats, (size_t)r->m->n_layer * (size_t)r->m->n_expert_max * STATS * sizeof *stats);
    if (in_sum2) memcpy(in_sum2, r->in_sum2, in_sum2_before(r->m, r->m->n_layer) * sizeof *in_sum2);
}

/* The rows of a logits operation. */
struct logit_rows {
    struct rank *r;
    int first, n;
};

static void logits_body(void *arg) {
    const struct logit_rows *a = arg;
    struct rank *r = a->r;
    const struct weight *w = &r->m->output;
    for (int i = team_first(a->n); i >= 0; i = team_next())
        r->k->rmsnorm(act_row(r, A_X, a->first + i), r->m->output_norm, r->m->rms_eps, act_row(r, A_H, a->first + i),
                      r->m->n_embd);
    team_barrier();
    const struct packed p = linear_pack(r, w, act_row(r, A_H, a->first), r->width[A_H], a->n);
    linear_rows(r, w, &p, a->n, rank_peer(r, 0)->logits + r->m->first_id, r->m->n_vocab);
    op_end_matrix("output", w);
}

static void cpu_logits(struct rank *r, int first, int n) {
    team_run(r->team, logits_body, &(struct logit_rows){r, first, n});
}

static const float *cpu_read_logits(struct rank *r, int row) { return r->logits + (size_t)row * (size_t)r->m->n_vocab; }

static void cpu_sample(struct rank *r, const struct sampling *o, const int32_t *recent, int n_recent, double uniform) {
    r->chosen = sampling_choose(o, r->work, r->m->n_ids, r->logits, recent, n_recent, uniform);
}

static int32_t cpu_read_token(struct rank *r, bool *on_device) {
    *on_device = false;
    return r->chosen;
}

static void forward_body(void *arg) {
    struct rank *r = arg;
    r->m->family->forward(r);
}

static void cpu_forward(struct rank *r) { team_run(r->team, forward_body, r); }

static void cpu_plane_copy(struct rank *r, const struct plane *p, size_t first, size_t n, uint8_t *data, float *scale,
                           bool store) {
    (void)r;
    uint8_t *d = p->data + first * p->row_bytes;
    if (data) memcpy(store ? d : data, store ? data : d, n * p->row_bytes);
    if (!scale) return;
    float *s = p->scale + first * (size_t)p->n_group;
    memcpy(store ? s : scale, store ? scale : s, n * (size_t)p->n_group * sizeof *s);
}

static void cpu_wait(struct rank *r) { (void)r; }
static struct rates cpu_measure(struct rank *r) {
    return (struct rates){.bytes = memory_bandwidth(r->team ? r->team->n : 1)};
}

enum { ALL_REDUCES_TIMED = 100 };

static void all_reduces_body(void *arg) {
    struct rank *r = arg;
    for (int k = 0; k < ALL_REDUCES_TIMED; k++) all_reduce_add_rmsnorm(r, A_X, A_OUT, r->m->output_norm, A_H);
}

static double cpu_time_all_reduce(struct rank *r, int n_tok, bool nccl) {
    if (nccl || n_tok > r->chunk) return 0;
    double t0 = now_seconds();
    r->n_tok = n_tok;
    team_run(r->team, all_reduces_body, r);
    return (now_seconds() - t0) / ALL_REDUCES_TIMED;
}

static int cpu_profile(struct rank *r, void (*body)(void *), void *arg, struct profile_row *rows, int n) {
    (void)r;
    cpu_timing.row = rows;
    cpu_timing.cap = n;
    cpu_timing.n = 0;
    cpu_timing.last = now_seconds();
    body(arg);
    cpu_timing.row = NULL;
    return cpu_timing.n;
}

static void cpu_close(struct rank *r) {
    team_stop(r->team);
    for (size_t i = 0; i < arrlenu(r->owned); i++) free(r->owned[i]);
    arrfree(r->owned);
}

static const struct ops cpu_ops = {
#define CPU_OP(type, name, params, args) .name = cpu_##name,
    OPS(CPU_OP)
#undef CPU_OP
};

/* ============================================================================================================
 * CPU operations: memory of a rank
 *
 * Everything is allocated here, at the start; nothing while tokens are computed.
 * ============================================================================================================ */

/* Returns n zeroed elements of `size` bytes, aligned to 64 bytes, which cpu_close frees; counts them in r->bytes. */
static void *cpu_own(struct rank *r, size_t n, size_t size) {
    /* calloc: pages that are never touched, above all of the cache, cost nothing */
    void *p = n && size && n > SIZE_MAX / size ? NULL : calloc(n * size + 64, 1);
    if (!p) die("out of memory: %zu x %zu bytes for activations or the KV cache; try a smaller -c", n, size);
    r->bytes += n * size;
    arrput(r->owned, p);
    return (void *)(((uintptr_t)p + 63) / 64 * 64);
}

static void cpu_plane(struct rank *r, struct plane *p) {
    const size_t rows = plane_rows(p, (size_t)r->n_ctx);
    p->data = cpu_own(r, rows, p->row_bytes);
    r->kv_bytes += rows * (p->row_bytes + plane_scale_bytes(p));
    if (p->type == KV_FP8) p->scale = cpu_own(r, rows * (size_t)p->n_group, sizeof(float));
}

/* Whether the rank is the root: the first of the last stage, which gathers the logits. */
static bool rank_is_root(const struct model *m) { return !m->shard.rank && m->shard.stage == m->shard.n_stage - 1; }

/* The convolution's taps for the rank's own values in the order of r->mix: (n_conv, mix). */
static float *delta_taps(struct rank *r, int il) {
    const struct layer *layer = &r->m->layers[il];
    const struct delta *d = &layer->delta;
    const int key = d->n_key * d->head_k, mix = 2 * key + d->n_value * d->head_v;
    float *taps = cpu_own(r, (size_t)(d->n_conv * mix), sizeof *taps);
    for (int c = 0; c < mix; c++) {
        int whole = d->first_key * d->head_k + c; /* the value's number in the whole model */
        if (c >= key) whole += (d->whole_key - d->n_key) * d->head_k;
        if (c >= 2 * key)
            whole = 2 * d->whole_key * d->head_k + delta_value_head(d, (c - 2 * key) / d->head_v) * d->head_v +
                    (c - 2 * key) % d->head_v;
        for (int j = 0; j < d->n_conv; j++) taps[j * mix + c] = layer->conv[whole * d->n_conv + j];
    }
    return taps;
}

/* Lays out the memory for contexts of n_ctx tokens. */
static void cpu_rank_init(struct rank *r, const struct model *m, const struct kernels *k, int n_threads, int n_ctx,
                          enum kv_type kv) {
    memset(r, 0, sizeof *r);
    r->m = m;
    r->ops = &cpu_ops;
    r->k = k;
    r->n_ctx = n_ctx;
    r->kv_type = kv;
    r->chunk = n_ctx < CHUNK_MAX ? n_ctx : CHUNK_MAX;
    snprintf(r->name, sizeof r->name, "CPU (%s), %d thread%s", k->name, n_threads, n_threads > 1 ? "s" : "");
    const struct maxima *x = &m->max;
    size_t c = (size_t)r->chunk, n_head = (size_t)x->n_head;
    act_widths(m, r->width);
    for (int a = 0; a < ACT_COUNT; a++) r->act[a] = cpu_own(r, c * (size_t)r->width[a], sizeof(float));
    r->tokens = cpu_own(r, c, sizeof *r->tokens);
    for (int i = 0; i < m->n_rope; i++) {
        r->cos[i] = cpu_own(r, c * (size_t)m->ropes[i].dim / 2, sizeof(float));
        r->sin[i] = cpu_own(r, c * (size_t)m->ropes[i].dim / 2, sizeof(float));
    }

    int absorbed = 1; /* the most tokens for which queries are taken into the latent space */
    for (int il = 0; il < m->n_layer && x->kv_lora; il++)
        while (absorbed < r->chunk && !mla_expands(m, &m->layers[il], absorbed + 1)) absorbed++;
    size_t n_ff = size_max((size_t)x->n_ff_dense, size_max((size_t)x->n_ff_expert, (size_t)x->n_ff_shared)), pack = 0,
           pack_h = 0;
    size_t n_in = size_max((size_t)m->n_embd, size_max(size_max((size_t)x->q_lora, n_ff), (size_t)r->width[A_ATT]));
    for (int f = 0; f < ACT_FORMATS; f++) {
        pack = size_max(pack, 2 * c * k->act_bytes((enum act_format)f, (int)n_in));
        if (x->kv_lora) /* one row per token and head */
            pack = size_max(pack, (size_t)absorbed * n_head *
                                      k->act_bytes((enum act_format)f, int_max(x->kv_lora, x->head_k - x->rope_dim)));
        pack_h = size_max(pack_h, k->act_bytes((enum act_format)f, (int)n_ff));
    }
    size_t used = (size_t)x->n_expert_used, shared = (size_t)x->n_ff_shared,
           hidden = size_max((size_t)x->n_ff_dense, used * (size_t)x->n_ff_expert + shared);
    r->pack = cpu_own(r, pack, 1);
    r->pack_h = cpu_own(r, c * (used + 1), pack_h);
    r->hidden = cpu_own(r, c * hidden, sizeof(float));
    r->route = cpu_own(r, c * (size_t)m->n_expert_max, sizeof(float));
    r->route_id = cpu_own(r, c * used, sizeof *r->route_id);
    r->route_w = cpu_own(r, c * used, sizeof(float));
    r->job_rows = cpu_own(r, c * used, sizeof *r->job_rows);
    r->job_w = cpu_own(r, c * used, sizeof(float));
    r->shared_w = cpu_own(r, x->sh_weight ? c : 0, sizeof(float));
    r->mix = cpu_own(r, x->mix ? (c + MAX_LAG) * (size_t)x->mix : 0, sizeof(float));
    r->decay_beta = cpu_own(r, x->mix ? (c + MAX_LAG) * 2 * (size_t)x->values : 0, sizeof(float));
    r->jobs = cpu_own(r, (size_t)m->n_expert_max + 1, sizeof *r->jobs);
    size_t lat = (size_t)(2 * x->kv_lora + x->rope_dim), dv = (size_t)(x->kv_lora ? x->kv_lora : x->head_v);
    if (x->kv_lora) r->q_absorbed = cpu_own(r, (size_t)absorbed * n_head * lat, sizeof(float));
    r->partials = cpu_own(r, CPU_SPLITS_MAX * SPLIT_TOKENS * n_head * (dv + 2), sizeof(float));
    if (rank_is_root(m)) {
        r->logits = cpu_own(r, LOGIT_ROWS * (size_t)m->n_vocab, sizeof(float));
        r->work = cpu_own(r, (size_t)m->n_ids, sizeof *r->work);
    }

    /* query rows of the largest attention item */
    const size_t rows = size_max(size_max(n_head * SPLIT_TOKENS, QUERY_ROWS), x->kv_lora ? c : 0);
    size_t delta = 0;
    for (int il = 0; il < m->n_layer; il++) delta = size_max(delta, (size_t)m->layers[il].delta.head_k * DELTA_COLUMNS);
    r->scratch_bytes = size_max(size_max(attend_floats(m, (int)rows), delta) * sizeof(float),
                                KERNEL_SCRATCH + c * ROW_TILE * sizeof(float) + 3 * OWN_PACK);
    r->scratch_bytes = (r->scratch_bytes + 4095) / 4096 * 4096;
    r->scratch = cpu_own(r, (size_t)n_threads, r->scratch_bytes);
    r->planes = cpu_own(r, (size_t)m->n_layer, sizeof *r->planes);
    r->taps = cpu_own(r, x->mix ? (size_t)m->n_layer : 0, sizeof *r->taps);
    for (int il = 0; il < m->n_layer; il++) {
        if (m->layers[il].has & HAS_DELTA) r->taps[il] = delta_taps(r, il);
        layer_planes(m, &m->layers[il], kv, r->planes[il]);
        for (int u = 0; u < PLANE_USES; u++)
            if (r->planes[il][u].width) cpu_plane(r, &r->planes[il][u]);
    }
    r->bytes -= r->kv_bytes;
}

/* Allocates the statistics of --calibrate, and with in_sum2 the sums of --activations. */
static void cpu_stats_init(struct rank *r, bool in_sum2) {
    const struct model *m = r->m;
    const size_t tiles = ((size_t)m->n_embd + ROW_TILE - 1) / ROW_TILE;
    r->stats = cpu_own(r, (size_t)m->n_layer * (size_t)m->n_expert_max * STATS, sizeof *r->stats);
    r->norm_parts = cpu_own(r, tiles * (size_t)r->chunk * (size_t)m->max.n_expert_used, sizeof(float));
    if (in_sum2) r->in_sum2 = cpu_own(r, in_sum2_before(m, m->n_layer), sizeof(float));
}

/* ============================================================================================================
 * GPU backend
 *
 * moe_cuda.cu has the operations of a GPU and the start of its ranks. Here its first section, "Sizes on a GPU", is
 * included in every build, because --plan needs it: weight_gpu_bytes, gpu_bytes, gpu_chunk. Without CUDA, stubs follow.
 * ============================================================================================================ */

#define MOE_GPU_SIZES_ONLY
#include "moe_cuda.cu"

#ifndef MOE_CUDA
static const char no_cuda[] = "this program was built without CUDA";
int cuda_device_count(char *err) { return fail(err, "%s", no_cuda), 0; }
const char *cuda_facts(int device, struct gpu_facts *f, bool probe) {
    (void)device, (void)probe;
    memset(f, 0, sizeof *f);
    return no_cuda;
}
bool cuda_peers(const int *device, int n) { return (void)device, (void)n, false; }
void cuda_pair(int from, int to, double *rate, double *latency) {
    (void)from, (void)to;
    *rate = *latency = 0;
}
int cuda_nccl_version(void) { return 0; }
const char *cuda_targets(void) { return NULL; }
int cuda_rank_start(struct rank *r, const struct model *shard, const void *opts, char *err) {
    (void)r, (void)shard, (void)opts;
    return fail(err, "%s", no_cuda);
}
#endif

/* NCCL's version, or why there is none. */
static const char *nccl_name(char out[24]) {
    const int v = cuda_nccl_version();
    snprintf(out, 24, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    return v ? out : "none (not found when the program was built)";
}

/* ============================================================================================================
 * Families
 *
 * Start here. A forward pass is a straight line of operations (struct ops) over the layers of a rank's shard. The
 * batch, its tokens and position, is in struct rank. A forward never looks at data; it may look at what a layer is made
 * of.
 *
 * A new family whose operations exist is a row of `families`; the functions that read its metadata (section "Model:
 * metadata of families"); for tensors that no family has had, rows of `tensor_rules` and a bit of `enum layer_has`; a
 * row of `synths` for --synth; and in convert/moe-convert.c a row of its own `families` with a function that reads
 * config.json and names that differ from the table's; and the tables of families in both READMEs. Tests say what is
 * missing. Head sizes that no GPU kernel has are added to attn_find in moe_cuda.cu. Grouped-query attention without
 * head norms, or with a window, is no operation that exists: it needs a check in rope_store_kv, attend_run and
 * attend_all, their kernels in moe_cuda.cu (k_rope_gqa, attn_begin, attn_mask, shard_check), and state_reads.
 * ============================================================================================================ */

/* What the norm before attention adds to A_X: what the layer before left in A_OUT, where each rank has a partial sum. */
static enum act forward_delta(int il) { return il ? A_OUT : ACT_COUNT; }

/* The first half of a layer with grouped-query attention: A_X to A_OUT. */
static void forward_gqa_half(struct rank *r, int il) {
    const struct ops *o = r->ops;
    const struct layer *layer = &r->m->layers[il];
    o->projections(r, il, A_X, forward_delta(il));
    o->attention(r, il, A_Q, A_K, A_V, A_ATT);
    o->linear(r, &layer->wo, A_ATT, A_OUT);
}

/* The first half of a layer with a gated delta net: A_X to A_OUT. */
static void forward_delta_half(struct rank *r, int il) {
    const struct ops *o = r->ops;
    const struct layer *layer = &r->m->layers[il];
    o->projections(r, il, A_X, forward_delta(il));
    o->delta_net(r, il, A_ATT);
    o->linear(r, &layer->wo, A_ATT, A_OUT);
}

/* The first half of a layer with multi-head latent attention: A_X to A_OUT. The query may go through a low rank. */
static void forward_mla_half(struct rank *r, int il) {
    const struct ops *o = r->ops;
    const struct layer *layer = &r->m->layers[il];
    o->projections(r, il, A_X, forward_delta(il));
    if (layer->has & HAS_Q_LORA) o->norm_linear(r, A_QA, layer->q_a_norm, &layer->wq_b, A_Q);
    o->mla_attention(r, il, A_Q, A_K, A_ATT);
    o->linear(r, &layer->wo, A_ATT, A_OUT);
}

/* Grouped-query attention with normed heads (Qwen3-MoE, Hy3), and gated delta nets (Qwen3.5, Qwen3-Next). */
static void forward_gqa(struct rank *r) {
    r->ops->embed(r, A_X);
    for (int il = 0; il < r->m->n_layer; il++) {
        if (r->m->layers[il].has & HAS_DELTA) forward_delta_half(r, il);
        else forward_gqa_half(r, il);
        r->ops->norm_ffn(r, il, A_X, A_OUT, A_OUT);
    }
    r->ops->final_reduce(r, A_X, A_OUT);
}

/* Multi-head latent attention: DeepSeek-V3, Kimi-K2. */
static void forward_mla(struct rank *r) {
    r->ops->embed(r, A_X);
    for (int il = 0; il < r->m->n_layer; il++) {
        forward_mla_half(r, il);
        r->ops->norm_ffn(r, il, A_X, A_OUT, A_OUT);
    }
    r->ops->final_reduce(r, A_X, A_OUT);
}

/* clang-format off */
static const struct family families[] = {
    {.arch = "qwen3moe",  .gating = GATING_SOFTMAX, .norm_topk_prob = true,
     .read = read_qwen3moe, .layer = layer_gqa, .forward = forward_gqa},
    {.arch = "qwen35moe", .gating = GATING_SOFTMAX, .norm_topk_prob = true,
     .read = read_qwen35,   .layer = layer_qwen35, .forward = forward_gqa},
    {.arch = "qwen3next", .gating = GATING_SOFTMAX, .norm_topk_prob = true,
     .read = read_qwen35,   .layer = layer_qwen3next, .forward = forward_gqa},
    {.arch = "deepseek2", .gating = GATING_SOFTMAX, .norm_topk_prob = false,
     .read = read_mla,      .layer = layer_mla, .forward = forward_mla},
    {.arch = "hy_v3",     .gating = GATING_SIGMOID, .norm_topk_prob = true,
     .read = read_gqa,      .layer = layer_gqa, .forward = forward_gqa},
};
/* clang-format on */
enum { FAMILIES = sizeof families / sizeof *families };

static const struct family *family_find(struct gguf_str arch) {
    for (int i = 0; i < FAMILIES; i++)
        if (gguf_str_eq(arch, families[i].arch)) return &families[i];
    return NULL;
}

static const char *family_names(char out[ERR_MAX]) {
    size_t n = 0;
    for (int i = 0; i < FAMILIES; i++)
        n += (size_t)snprintf(out + n, ERR_MAX - n, "%s%s",
                              !i                  ? ""
                              : i == FAMILIES - 1 ? " and "
                                                  : ", ",
                              families[i].arch);
    return out;
}

/* ============================================================================================================
 * Sampler
 *
 * Chooses the next token from the logits: repeat penalty, then top-k, top-p, min-p and temperature, in llama.cpp's
 * order. It allocates nothing; the caller provides an array for the candidates.
 * ============================================================================================================ */

/* Returns the index of the largest x (n), the lowest of equals. */
static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Whether a comes before b: larger logits first, lower ids first among equals. */
static bool candidate_before(struct candidate a, struct candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

/* Restores the order of the heap h (n) when element i may be too small: moves it down. */
static void heap_sink(struct candidate *h, int n, int i) {
    for (int c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && candidate_before(h[c + 1], h[c])) c++;
        if (!candidate_before(h[c], h[i])) return;
        struct candidate t = h[c];
        h[c] = h[i];
        h[i] = t;
    }
}

/* Takes the best of the first n - popped candidates out of the heap and puts it in the last of their places. The i-th
 * best thus ends at heap[n - 1 - i]. */
static struct candidate candidates_pop(struct candidate *heap, int n, int popped) {
    int last = n - 1 - popped;
    struct candidate best = heap[0];
    heap[0] = heap[last];
    heap[last] = best;
    heap_sink(heap, last, 0);
    return best;
}

/* Returns one of the ids 0..n-1, drawn by their logits (n). work (n): scratch. recent: the latest n_recent tokens, for
 * the repeat penalty. uniform: a random number from [0, 1). Top-p is a share of the probability that top-k leaves.
 * Top-p and min-p use the probabilities at temperature 1, before the temperature is applied. */
int32_t sampling_choose(const struct sampling *o, struct candidate *work, int n, const float *logits,
                        const int32_t *recent, int n_recent, double uniform) {
    bool penalise = o->repeat_penalty != 1.0f && n_recent > 0, greedy = o->greedy || o->temp <= 0;
    if (!penalise && greedy) return argmax(logits, n);
    for (int i = 0; i < n; i++) work[i] = (struct candidate){logits[i], i};
    for (int i = 0; penalise && i < n_recent; i++)
        if (recent[i] < n) { /* from the original logit, so that a token that occurs twice is penalized once */
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
    const struct candidate *best = work + n - 1; /* best[-i] is the i-th best */
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
 * One timeline of tokens with its KV state: tokens[0..n_past) are in the cache, and nothing else is, but for the row of
 * a forward ahead, which the next forward overwrites. Every turn, undo, load or prompt builds the token list it wants
 * and calls session_sync, which keeps the common prefix and computes the rest; a cache that does not fit the tokens
 * cannot come about. A failed or interrupted sync leaves a shorter timeline.
 * ============================================================================================================ */

enum { SNAPSHOTS = 8 /* snapshots of recurrent states and rings that a session keeps */ };

struct session {
    const struct model *m;
    struct process_group pg;
    struct rank *r;  /* the root rank, which has the logits */
    int32_t *tokens; /* (n_ctx) */
    int n_past, n_ctx;
    int state_pos;        /* recurrent states stand for tokens[0..state_pos), <= n_past */
    bool ahead;           /* a forward of the token behind the timeline, as the device chose it, is under way */
    bool host_chose;      /* the latest token: the device left the choice to the host */
    size_t snapshot_size; /* bytes of a snapshot; 0: every plane has a row per token and none is needed */
    struct snapshot {
        int n, state_pos; /* tokens and state_pos when it was taken; n 0: it is free */
        unsigned used;    /* when it was taken or restored last */
        uint8_t *data;    /* (snapshot_size) rows of rings and states, by rank, layer and use */
    } snapshots[SNAPSHOTS];
    unsigned snapshot_clock; /* counts snapshots taken and restored */
    int sync_tokens;         /* of the latest sync: tokens computed, */
    double sync_seconds;     /* and the time it took */
};

/* Makes an empty timeline on n_stage * n_rank ranks, each started by `start`. 0, or -1 with a message. */
static int session_open(struct session *s, const struct model *m, int n_rank, int n_stage, rank_starter *start,
                        const void *opts, char *err) {
    memset(s, 0, sizeof *s);
    if (pg_open(&s->pg, m, n_rank, n_stage, start, opts, err)) return -1;
    s->m = m;
    s->r = &s->pg.ranks[s->pg.root];
    s->n_ctx = s->r->n_ctx;
    s->tokens = xcalloc((size_t)s->n_ctx, sizeof *s->tokens);
    for (int i = 0; i < s->pg.n; i++) s->snapshot_size += snapshot_bytes(s->pg.ranks[i].m, s->r->kv_type);
    for (int i = 0; i < SNAPSHOTS && s->snapshot_size; i++) s->snapshots[i].data = xcalloc(s->snapshot_size, 1);
    return 0;
}

struct cpu_options {
    const struct kernels *k;
    int n_threads, n_ctx; /* of all ranks together; tokens */
    enum kv_type kv;
    bool stats, in_sum2; /* collect statistics of experts; and sums of squared inputs */
};

/* The rank_starter of a CPU. */
static int cpu_rank_start(struct rank *r, const struct model *shard, const void *opts, char *err) {
    const struct cpu_options *o = opts;
    const int n = shard->shard.n_rank * shard->shard.n_stage, n_threads = int_max(1, o->n_threads / n);
    (void)err; /* what fails ends the program */
    cpu_rank_init(r, shard, o->k, n_threads, o->n_ctx, o->kv);
    r->team = team_start(n_threads, n * n_threads > processors());
    if (o->stats) cpu_stats_init(r, o->in_sum2);
    return 0;
}

/* Opens a session of n_stage * n_rank ranks on the CPU. An error ends the program. */
static void session_open_cpu(struct session *s, const struct model *m, int n_rank, int n_stage, struct cpu_options o) {
    char err[ERR_MAX];
    if (session_open(s, m, n_rank, n_stage, cpu_rank_start, &o, err)) die("%s", err);
}

/* Ends the ranks and frees the session. */
static void session_free(struct session *s) {
    pg_close(&s->pg);
    free(s->tokens);
    for (int i = 0; i < SNAPSHOTS; i++) free(s->snapshots[i].data);
}

/* ---- the length of the timeline ---- */

/* Returns the shortest length to which the timeline can be truncated without a snapshot: rings and recurrent states no
 * longer hold what came before. */
static int session_reach(const struct session *s) {
    struct plane planes[PLANE_USES];
    int reach = 0;
    for (int il = 0; il < s->m->n_layer && s->snapshot_size; il++) {
        layer_planes(s->m, &s->m->layers[il], s->r->kv_type, planes);
        for (int u = 0; u < PLANE_USES; u++) {
            const struct plane *p = &planes[u];
            if (!p->width) continue;
            if (p->kind == PLANE_STATE) reach = int_max(reach, s->state_pos);
            if (p->kind == PLANE_RING && s->n_past > p->n_row) reach = int_max(reach, s->n_past - p->n_row + p->window);
        }
    }
    return reach;
}

/* Copies rings and states of all ranks to `data`, or from it (store); NULL with store: fills them with zeros. */
static void session_copy_snapshot(struct session *s, uint8_t *data, bool store) {
    uint8_t *zeros = NULL;
    for (int i = 0; i < s->pg.n; i++) {
        struct rank *r = &s->pg.ranks[i];
        for (int k = 0; k < r->m->n_layer * PLANE_USES; k++) {
            const struct plane *p = &r->planes[k / PLANE_USES][k % PLANE_USES];
            if (!plane_is_snapshot(p)) continue;
            const size_t rows = (size_t)p->n_row, bytes = rows * p->row_bytes, scales = rows * plane_scale_bytes(p);
            if (!data) {
                zeros = xrealloc(zeros, bytes + scales);
                memset(zeros, 0, bytes + scales);
            }
            uint8_t *at = data ? data : zeros;
            r->ops->plane_copy(r, p, 0, rows, at, scales ? (float *)(void *)(at + bytes) : NULL, store);
            if (data) data += bytes + scales;
        }
    }
    free(zeros);
}

/* Truncates the timeline to n tokens and returns its new length. Where a ring or recurrent state cannot go back that
 * far, the latest snapshot at or before n is restored and the timeline ends there; without one it becomes empty. Every
 * shortening of the timeline goes through here; it grows by session_forward and session_decode, and by
 * session_fake_fill (--bench) and session_read (/load). */
static int session_truncate(struct session *s, int n) {
    struct snapshot *best = NULL;
    if (n >= s->n_past) return s->n_past;
    const bool restore = s->snapshot_size && n < session_reach(s);
    s->ahead = false;
    for (int i = 0; i < SNAPSHOTS; i++) {
        struct snapshot *k = &s->snapshots[i];
        if (k->n > n) k->n = 0; /* of tokens that are taken back */
        if (restore && k->n && (!best || k->n > best->n)) best = k;
    }
    s->n_past = n;
    if (!restore) return n;
    s->n_past = best ? best->n : 0;
    s->state_pos = best ? best->state_pos : 0;
    if (best) best->used = ++s->snapshot_clock;
    session_copy_snapshot(s, best ? best->data : NULL, true);
    return s->n_past;
}

/* Takes a snapshot of rings and recurrent states at the end of the timeline. It replaces the least recently used one.
 * Does nothing where every plane has a row per token. */
static void session_keep(struct session *s) {
    struct snapshot *k = &s->snapshots[0];
    if (!s->snapshot_size || !s->n_past) return;
    for (int i = 0; i < SNAPSHOTS; i++) {
        struct snapshot *other = &s->snapshots[i];
        if (other->n == s->n_past) return;
        if (k->n && (!other->n || other->used < k->used)) k = other;
    }
    k->n = s->n_past;
    k->state_pos = s->state_pos;
    k->used = ++s->snapshot_clock;
    session_copy_snapshot(s, k->data, false);
}

/* Sets the length of the timeline to n tokens without computing them, for --bench: the time of a forward depends on the
 * length alone. */
static void session_fake_fill(struct session *s, int n) {
    session_truncate(s, n);
    s->n_past = s->state_pos = n;
    s->ahead = false;
}

/* Starts a rank by step->start, which may clear all of *r. */
static void rank_start(struct rank *r, struct pg_start *t) {
    struct process_group *pg = r->pg;
    const int i = r->index;
    t->failed[i] = t->start(r, &pg->shards[i], t->opts, t->err[i]) != 0;
    r->pg = pg;
    r->index = i;
}

/* Does the rank's part of a step, on the rank's thread. A forward and its logits may not allocate. */
static void rank_run(struct rank *r, const struct rank_step *step) {
    switch (step->kind) {
    case RANK_START: rank_start(r, step->start); break;
    case RANK_FORWARD:
        alloc_guard_begin("a forward pass");
        if (step->ids) memcpy(r->tokens, step->ids, (size_t)step->n * sizeof *step->ids);
        else r->tokens[0] = TOKEN_CHOSEN;
        r->pos = step->pos;
        r->state_pos = step->state_pos;
        r->n_tok = step->n;
        r->ops->forward(r);
        alloc_guard_end();
        break;
    case RANK_LOGITS:
        alloc_guard_begin("a logits step");
        if (r->m->shard.stage == r->m->shard.n_stage - 1) r->ops->logits(r, step->first, step->n);
        alloc_guard_end();
        break;
    case RANK_WAIT: r->ops->wait(r); break;
    case RANK_READ_STATS: {
        const int il = r->m->first_layer;
        r->ops->read_stats(r, step->stats + (size_t)il * (size_t)step->whole->n_expert_max * STATS,
                           step->in_sum2 ? step->in_sum2 + in_sum2_before(step->whole, il) : NULL);
        break;
    }
    case RANK_MEASURE: step->rates[r->index] = r->ops->measure(r); break;
    case RANK_TIME_ALL_REDUCE: step->seconds[r->index] = r->ops->time_all_reduce(r, step->n, step->nccl); break;
    case RANK_CLOSE:
        if (r->ops) r->ops->close(r);
        r->ops = NULL;
        break;
    }
}

/* Appends n <= chunk tokens to the timeline and computes their state, but no logits. Recurrent states first absorb the
 * tokens that they lag behind. A decode forward then leaves its own tokens out, so that any of them can be taken back;
 * a prefill forward leaves out the last one. */
static void session_forward(struct session *s, const int32_t *ids, int n) {
    memcpy(s->tokens + s->n_past, ids, (size_t)n * sizeof *ids);
    pg_run(&s->pg,
           (struct rank_step){.kind = RANK_FORWARD, .ids = ids, .n = n, .pos = s->n_past, .state_pos = s->state_pos});
    s->state_pos = n <= MAX_LAG ? s->n_past : s->n_past + n - 1;
    s->n_past += n;
    s->ahead = false;
}

/* Enqueues the forward of the token that is being chosen, before the host knows it: the device need not wait until the
 * host has read the token and printed it. session_decode takes it into the timeline; any other forward overwrites it. */
static void session_forward_ahead(struct session *s) {
    pg_run(&s->pg, (struct rank_step){.kind = RANK_FORWARD, .n = 1, .pos = s->n_past, .state_pos = s->state_pos});
    s->state_pos = s->n_past;
    s->ahead = true;
}

/* Computes the logits of rows first..first+n-1 of the latest forward, n <= LOGIT_ROWS. */
static void session_head(struct session *s, int first, int n) {
    pg_run(&s->pg, (struct rank_step){.kind = RANK_LOGITS, .first = first, .n = n});
}

/* Waits until everything is computed. */
static void session_wait(struct session *s) { pg_run(&s->pg, (struct rank_step){.kind = RANK_WAIT}); }

/* Copies the statistics of all layers since the start: stats (n_layer, n_expert_max, STATS) and in_sum2
 * (in_sum2_before(m, n_layer); NULL: not wanted). Only for sessions that collect them, with one rank a stage. */
static void session_stats(struct session *s, double *stats, float *in_sum2) {
    pg_run(&s->pg, (struct rank_step){.kind = RANK_READ_STATS, .whole = s->m, .stats = stats, .in_sum2 = in_sum2});
}

/* One token: forward and logits. */
static void session_decode(struct session *s, int32_t id) {
    if (s->ahead) s->tokens[s->n_past++] = id;
    else session_forward(s, &id, 1);
    s->ahead = false;
    session_head(s, 0, 1);
}

/* Returns the logits (n_vocab) of the last token, after a sync or decode. */
static const float *session_logits(struct session *s) { return s->r->ops->read_logits(s->r, 0); }

/* The next token, chosen by those logits. It has to go to session_decode, or not into the timeline. */
static int32_t session_sample(struct session *s, const struct sampling *o, uint64_t *rng) {
    int n = s->n_past < PENALTY_WINDOW ? s->n_past : PENALTY_WINDOW;
    double uniform = o->greedy || o->temp <= 0 ? 0 : rng_uniform(rng);
    alloc_guard_begin("the choice of a token");
    s->r->ops->sample(s->r, o, s->tokens + s->n_past - n, n, uniform);
    alloc_guard_end();
    if (s->r->goes_ahead && !s->host_chose && s->n_past < s->n_ctx) session_forward_ahead(s);
    alloc_guard_begin("the choice of a token");
    bool on_device;
    const int32_t id = s->r->ops->read_token(s->r, &on_device);
    s->ahead &= on_device;
    s->host_chose = !on_device;
    alloc_guard_end();
    return id;
}

/* What the ranks' devices can do, measured at once: each[i] of rank i. Returns their sum. */
static struct rates session_measure(struct session *s, struct rates each[MAX_RANKS]) {
    struct rates sum = {0};
    pg_run(&s->pg, (struct rank_step){.kind = RANK_MEASURE, .rates = each});
    for (int i = 0; i < s->pg.n; i++) {
        sum.bytes += each[i].bytes;
        sum.mma += each[i].mma;
        sum.nominal += each[i].nominal;
    }
    return sum;
}

/* Seconds of an all-reduce of n_tok tokens over the ranks of a stage, of the slowest of them; 0: this way does not
 * exist. */
static double session_time_all_reduce(struct session *s, int n_tok, bool nccl) {
    double each[MAX_RANKS], slowest = 0;
    pg_run(&s->pg, (struct rank_step){.kind = RANK_TIME_ALL_REDUCE, .n = n_tok, .nccl = nccl, .seconds = each});
    for (int i = 0; i < s->pg.n; i++) slowest = fmax(slowest, each[i]);
    return slowest;
}

/* The backend's name, or the number of ranks and stages, for the start line. */
static const char *session_name(const struct session *s, char out[192]) {
    if (s->pg.n == 1) return s->r->name;
    snprintf(out, 192, "%d ranks in %d stage%s, one on %s", s->pg.n, s->pg.n_stage, s->pg.n_stage > 1 ? "s" : "",
             s->r->name);
    return out;
}

/* Bytes of KV cache and other state over all ranks. */
static uint64_t session_kv_bytes(const struct session *s) {
    uint64_t sum = 0;
    for (int i = 0; i < s->pg.n; i++) sum += s->pg.ranks[i].kv_bytes;
    return sum;
}

/* Bytes of state over all ranks that `more` further tokens of context would take. */
static uint64_t session_more_bytes(const struct session *s, int more) {
    const size_t n = (size_t)s->n_ctx;
    uint64_t bytes = 0;
    for (int i = 0; i < s->pg.n; i++) {
        const struct model *m = s->pg.ranks[i].m;
        bytes += state_bytes(m, s->r->kv_type, n + (size_t)more) - state_bytes(m, s->r->kv_type, n);
    }
    return bytes;
}

/* Writes what helps against a full context to `out`; n: tokens that are needed, 0: some more. */
static const char *context_remedy(const struct session *s, int64_t n, char out[160]) {
    const char *shorten = term.dialogue ? "shorten the message, use /undo or /clear" : "shorten the prompt";
    char a[32];
    const bool grows = s->n_ctx < s->m->n_ctx_train && n <= s->m->n_ctx_train;
    if (!grows)
        snprintf(out, 160, "%s (the model is trained for %s tokens)", shorten,
                 with_commas((uint64_t)s->m->n_ctx_train, a));
    else if (n)
        snprintf(out, 160, "%s, or restart with -c %lld (%s more)", shorten, (long long)n,
                 with_unit((double)session_more_bytes(s, (int)(n - s->n_ctx)), a));
    else snprintf(out, 160, "%s, or restart with a larger -c", term.dialogue ? "/undo, /clear" : shorten);
    return out;
}

/* -1 when n tokens do not fit, with a message that says what would help. */
static int session_fits(const struct session *s, int64_t n, char *err) {
    char a[32], b[32], remedy[160];
    if (n <= s->n_ctx) return 0;
    return fail(err, "this needs %s tokens, and the context holds %s: %s", with_commas((uint64_t)n, a),
                with_commas((uint64_t)s->n_ctx, b), context_remedy(s, n, remedy));
}

enum sync_result { SYNC_DONE, SYNC_INTERRUPTED, SYNC_FAILED };

/* Makes the timeline equal ids[0..n), n >= 1, and computes the logits of the last token. Only the tokens after the
 * common prefix are computed. mark > 0: takes a snapshot after the first `mark` tokens, to which a later turn may
 * return. Ctrl-C is checked between chunks. */
static enum sync_result session_sync(struct session *s, const int32_t *ids, int n, int mark, char *err) {
    int keep = 0, done = 0;
    if (n < 1) return fail(err, "the prompt has no tokens"), SYNC_FAILED;
    if (session_fits(s, n, err)) return SYNC_FAILED;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->m->n_vocab)
            return fail(err, "token id %d is not in the vocabulary of %d", ids[i], s->m->n_vocab), SYNC_FAILED;
    while (keep < n - 1 && keep < s->n_past && s->tokens[keep] == ids[keep])
        keep++; /* the last one is computed for its logits */
    keep = session_truncate(s, keep);
    const double t0 = now_seconds();
    while (s->n_past < n) {
        int c = int_min(n - s->n_past, s->r->chunk);
        if (interrupted) break;
        progress_set(PROGRESS_PROMPT, done, n - keep);
        if (s->snapshot_size && s->n_past < mark) c = int_min(c, mark - s->n_past);
        session_forward(s, ids + s->n_past, c);
        if (s->n_past == mark) session_keep(s);
        done += c;
    }
    progress_end();
    s->sync_tokens = done;
    s->sync_seconds = now_seconds() - t0;
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
        session_truncate(p->sessions[s], 0);
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

/* Returns the bytes of layer weights that a forward of n tokens reads, each weight once; *per_token: weights that a
 * token is multiplied with. Of the routed experts as many count as n independent tokens are expected to choose. */
static double layers_use(const struct model *m, int n, double *per_token) {
    double bytes = 0;
    *per_token = 0;
    for (int il = 0; il < m->n_layer; il++) {
        const struct layer *layer = &m->layers[il];
        for (const struct tensor_rule *rule = rule_next(NULL, layer); rule; rule = rule_next(rule, layer)) {
            if (!rule_is_weight(rule)) continue;
            const struct weight *w = rule_weight(rule, layer);
            const bool routed = rule_routed(rule);
            double used = routed ? layer->n_expert_used : w->n_expert;
            *per_token += used * w->n_in * w->n_out;
            bytes += (double)w->row_bytes * w->n_out * (routed ? experts_expected(layer, n) : used);
        }
    }
    return bytes;
}

/* Bytes that a forward of n tokens with logits of each reads: the weights, and the cache of n_past tokens once for all
 * of them. */
static double session_forward_bytes(const struct session *s, int n) {
    double per_token;
    return layers_use(s->m, n, &per_token) + (double)s->m->output.expert_bytes +
           state_reads(s->m, s->r->kv_type, (size_t)s->n_past);
}

/* Multiplications and additions of a forward of n tokens after n_past others, with logits of the last one:
 * attention as the model defines it, whatever form of it is computed. */
static double session_forward_ops(const struct session *s, int n) {
    const struct model *m = s->m;
    double per_token, pairs = n * (s->n_past + (n + 1) / 2.0); /* of a query and a key that it sees */
    layers_use(m, n, &per_token);
    double heads = 0; /* values of keys and values that all heads of all layers see for a pair */
    double rule = 0;  /* multiplications of the delta rule for a token */
    for (int il = 0; il < m->n_layer; il++) {
        const struct attn *a = &m->layers[il].attn;
        const struct delta *d = &m->layers[il].delta;
        heads += (double)a->n_head * (a->head_k + a->head_v);
        rule += 3.0 * d->n_value * d->head_k * d->head_v;
    }
    return 2 * ((per_token + rule) * n + heads * pairs + (double)m->output.n_in * m->output.n_out);
}

/* ============================================================================================================
 * Session: the saved state
 *
 * The file that /save writes beside the conversation. All integers are little-endian:
 *
 *   struct kv_header       40 bytes: MOEKV003, hash of the model, --kv, numbers of planes and tokens, state_pos,
 *                          checksum
 *   struct kv_plane[]      what each plane of the whole model is; it must be what the model has now
 *   int32_t[]              the tokens
 *   planes in that order   all rows in use, padded to 16 bytes each, then their scales in F32 (FP8)
 *
 * Rows are those of the whole model, so a state may be loaded with another --tp and --pp. The checksum is FNV-1a over
 * 64-bit words: it finds damage, not malice. Load only files from people whom you trust.
 * ============================================================================================================ */

static const char kv_magic[8] = "MOEKV003";

struct kv_header {
    char magic[8];
    uint64_t model_hash;
    uint32_t kv_type, n_plane, n_tokens, state_pos;
    uint64_t checksum; /* of all that follows */
};
static_assert(sizeof(struct kv_header) == 40, "the header of a saved state is 40 bytes");

/* A plane of the whole model, as the file describes it: it must be what the model has. */
struct kv_plane {
    uint32_t layer, use, kind, ratio, n_row, width, row_bytes, scales;
};

/* FNV-1a over words of 64 bits; the last one is filled up with zeros. */
static uint64_t checksum_add(uint64_t sum, const void *p, size_t n) {
    for (size_t at = 0; at < n; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const uint8_t *)p + at, n - at < 8 ? n - at : 8);
        sum = hash_value(sum, word);
    }
    return sum;
}

/* The planes of the whole model (stb_ds), in the order of the file. */
static struct kv_plane *session_planes(const struct session *s) {
    struct kv_plane *list = NULL;
    struct plane planes[PLANE_USES];
    for (int il = 0; il < s->m->n_layer; il++) {
        layer_planes(s->m, &s->m->layers[il], s->r->kv_type, planes);
        for (int u = 0; u < PLANE_USES; u++) {
            const struct plane *p = &planes[u];
            const struct kv_plane k = {.layer = (uint32_t)il,
                                       .use = (uint32_t)u,
                                       .kind = p->kind,
                                       .ratio = (uint32_t)p->ratio,
                                       .n_row = (uint32_t)p->n_row,
                                       .width = (uint32_t)p->width,
                                       .row_bytes = (uint32_t)p->row_bytes,
                                       .scales = p->type == KV_FP8 ? (uint32_t)p->n_group : 0};
            if (p->width) arrput(list, k);
        }
    }
    return list;
}

/* Copies rows first..first+n-1 of a plane of the whole model, or their scales, from the ranks that have the layer;
 * store: to them. all: (n, row) bytes. buf: as many bytes, for a rank's shard of them. */
static void session_plane_rows(struct session *s, const struct kv_plane *what, bool scales, size_t first, size_t n,
                               uint8_t *all, size_t row, uint8_t *buf, bool store) {
    for (int i = 0; i < s->pg.n; i++) {
        struct rank *r = &s->pg.ranks[i];
        const int il = (int)what->layer - r->m->first_layer;
        if (il < 0 || il >= r->m->n_layer) continue;
        const struct plane *p = &r->planes[il][what->use];
        const size_t size = scales || p->type == KV_F32 ? 4 : p->type == KV_BF16 ? 2 : 1;
        const size_t stride = scales ? plane_scale_bytes(p) : p->row_bytes;
        const size_t from = (size_t)(scales ? p->first / p->group : p->first) * size, n_run = (size_t)p->n_run;
        const size_t used = (size_t)(scales ? p->n_group : p->width) * size / n_run;
        const size_t run = (size_t)(scales ? p->n_group : p->whole) * size / n_run; /* scales: there is one run */
        if (store) memset(buf, 0, n * stride);                                      /* rows are padded to 16 bytes */
        for (size_t k = 0; store && k < n * n_run; k++)
            memcpy(buf + k / n_run * stride + k % n_run * used, all + k / n_run * row + k % n_run * run + from, used);
        r->ops->plane_copy(r, p, first, n, scales ? NULL : buf, scales ? (float *)(void *)buf : NULL, store);
        for (size_t k = 0; !store && k < n * n_run; k++)
            memcpy(all + k / n_run * row + k % n_run * run + from, buf + k / n_run * stride + k % n_run * used, used);
    }
}

/* Rows of a plane that are in use after n tokens. */
static size_t kv_plane_rows(const struct kv_plane *k, size_t n) {
    const struct plane p = {
        .kind = (enum plane_kind)k->kind, .ratio = (int)k->ratio, .n_row = (int)k->n_row, .width = (int)k->width};
    return plane_used(&p, n);
}

/* Bytes of a saved state of n tokens after its header: descriptions of planes, ids and rows. */
static uint64_t session_body_bytes(const struct kv_plane *list, size_t n) {
    uint64_t bytes = n * sizeof(int32_t) + arrlenu(list) * sizeof *list;
    for (size_t i = 0; i < arrlenu(list); i++)
        bytes += kv_plane_rows(&list[i], n) * (list[i].row_bytes + list[i].scales * sizeof(float));
    return bytes;
}

/* Writes or reads (store) what follows the descriptions of planes, and adds it to *sum: n token ids, then per plane all
 * rows in use, and all their scales. */
static bool session_body(struct session *s, const struct kv_plane *list, size_t n, FILE *f, bool store, uint64_t *sum) {
    enum { ROWS = 1024 }; /* a multiple of 8: only a plane's last word can be padded */
    const size_t id = sizeof *s->tokens;
    uint8_t *buf = NULL;
    bool ok = (store ? fread(s->tokens, id, n, f) : fwrite(s->tokens, id, n, f)) == n;
    *sum = checksum_add(*sum, s->tokens, n * id);
    for (size_t i = 0; ok && i < 2 * arrlenu(list); i++) {
        const struct kv_plane *k = &list[i / 2];
        const bool scales = i & 1;
        const size_t row = scales ? k->scales * sizeof(float) : k->row_bytes, rows = kv_plane_rows(k, n);
        if (!row || !rows) continue;
        const size_t most = rows < ROWS ? rows : ROWS;
        buf = xrealloc(buf, 2 * most * row);
        if (!store) memset(buf, 0, most * row);
        for (size_t at = 0; ok && at < rows; at += ROWS) {
            const size_t c = rows - at < ROWS ? rows - at : ROWS;
            if (store) ok = fread(buf, row, c, f) == c;
            if (ok) session_plane_rows(s, k, scales, at, c, buf, row, buf + most * row, store);
            if (!store) ok = fwrite(buf, row, c, f) == c;
            if (ok) *sum = checksum_add(*sum, buf, c * row);
        }
    }
    free(buf);
    return ok;
}

static struct kv_header session_header(const struct session *s, const struct kv_plane *list) {
    struct kv_header h = {.model_hash = s->m->hash,
                          .kv_type = (uint32_t)s->r->kv_type,
                          .n_plane = (uint32_t)arrlenu(list),
                          .n_tokens = (uint32_t)s->n_past,
                          .state_pos = (uint32_t)s->state_pos,
                          .checksum = checksum_add(HASH_START, list, arrlenu(list) * sizeof *list)};
    memcpy(h.magic, kv_magic, sizeof h.magic);
    return h;
}

/* Writes the state to a temporary file for `path`, which temp_commit gives its name. 0, or -1 with a message. */
static int session_save(struct session *s, const char *path, char *err) {
    struct kv_plane *list = session_planes(s);
    struct kv_header h = session_header(s, list);
    FILE *f = temp_create(path, 0600, err);
    int rc = -1;
    if (f) {
        const bool whole = fwrite(&h, sizeof h, 1, f) == 1 && fwrite(list, sizeof *list, h.n_plane, f) == h.n_plane &&
                           session_body(s, list, h.n_tokens, f, false, &h.checksum) && !fseek(f, 0, SEEK_SET) &&
                           fwrite(&h, sizeof h, 1, f) == 1;
        rc = temp_close(f, path, !whole, err);
    }
    arrfree(list);
    return rc;
}

/* Reads the descriptions of planes and compares them with the model's. */
static bool session_same_planes(const struct kv_plane *list, FILE *f) {
    const size_t n = arrlenu(list);
    struct kv_plane *got = xcalloc(n + 1, sizeof *got);
    const bool same = fread(got, sizeof *got, n, f) == n && !memcmp(got, list, n * sizeof *got);
    free(got);
    return same;
}

/* Reads the state after the header into an empty timeline. 0, or -1 with a message. */
static int session_read(struct session *s, const struct kv_plane *list, FILE *f, const char *path, char *err) {
    struct kv_header h, want = session_header(s, list);
    struct stat st;
    if (fread(&h, sizeof h, 1, f) != 1 || memcmp(h.magic, kv_magic, 5))
        return fail(err, "'%s' is not a saved state", path);
    if (memcmp(h.magic, kv_magic, sizeof kv_magic))
        return fail(err, "'%s' has the format %.8s of another version of moe, expected %.8s", path, h.magic, kv_magic);
    if (h.model_hash != want.model_hash) return fail(err, "'%s' belongs to another model file", path);
    if (h.kv_type != want.kv_type) return fail(err, "'%s' was saved with a different --kv", path);
    if (h.n_tokens > (uint32_t)s->n_ctx)
        return fail(err, "'%s' holds %u tokens, but the context only %d", path, h.n_tokens, s->n_ctx);
    if (h.state_pos > h.n_tokens)
        return fail(err, "'%s' is damaged: %u of %u tokens are in its state", path, h.state_pos, h.n_tokens);
    if (h.n_plane != want.n_plane) return fail(err, "'%s' has a different cache layout", path);
    const uint64_t bytes = sizeof h + session_body_bytes(list, h.n_tokens);
    if (fstat(fileno(f), &st) || (uint64_t)st.st_size != bytes)
        return fail(err, "'%s' is %lld bytes long, expected %llu", path, (long long)st.st_size,
                    (unsigned long long)bytes);
    if (!session_same_planes(list, f)) return fail(err, "'%s' has a different cache layout", path);
    if (!session_body(s, list, h.n_tokens, f, true, &want.checksum)) return fail(err, "cannot read '%s'", path);
    if (want.checksum != h.checksum) return fail(err, "'%s' is damaged: its checksum is wrong", path);
    for (uint32_t i = 0; i < h.n_tokens; i++)
        if (s->tokens[i] < 0 || s->tokens[i] >= s->m->n_vocab)
            return fail(err, "'%s' is damaged: it holds the token id %d", path, s->tokens[i]);
    s->n_past = (int)h.n_tokens;
    s->state_pos = (int)h.state_pos;
    return 0;
}

/* Reads a saved state. -1 with a message why the file does not fit, and an empty timeline: the caller prefills instead.
 * */
static int session_load(struct session *s, const char *path, char *err) {
    struct stat st;
    session_truncate(s, 0);
    if (file_check(path, &st, err)) return -1;
    FILE *f = fopen(path, "rb");
    if (!f) return fail(err, "cannot open '%s': %s", path, strerror(errno));
    struct kv_plane *list = session_planes(s);
    const int rc = session_read(s, list, f, path, err);
    if (rc) session_copy_snapshot(s, NULL, true);
    arrfree(list);
    fclose(f);
    return rc;
}

/* ============================================================================================================
 * Options
 *
 * The settings of a run, and the one table of options, which drives /set too. An option that the
 * user does not give stays unset until a model is loaded, because its file may hold a default.
 * ============================================================================================================ */

/* THINK_LOW and above are efforts, which the template gets by name. */
enum think { THINK_AUTO, THINK_ON, THINK_OFF, THINK_LOW, THINK_MEDIUM, THINK_HIGH, THINK_MAX };
enum show_think { SHOW_AUTO, SHOW_ON, SHOW_OFF };
enum color { COLOR_AUTO, COLOR_ON, COLOR_OFF };

/* The names of the choices, indexed by their enum. */
static const char *const think_names[] = {
    [THINK_AUTO] = "auto",     [THINK_ON] = "on",     [THINK_OFF] = "off", [THINK_LOW] = "low",
    [THINK_MEDIUM] = "medium", [THINK_HIGH] = "high", [THINK_MAX] = "max", NULL};
static const char *const show_think_names[] = {[SHOW_AUTO] = "auto", [SHOW_ON] = "on", [SHOW_OFF] = "off", NULL};
static const char *const color_names[] = {[COLOR_AUTO] = "auto", [COLOR_ON] = "on", [COLOR_OFF] = "off", NULL};
static const char *const kv_names[] = {[KV_BF16] = "bf16", [KV_FP8] = "fp8", [KV_F32] = "f32", NULL};
static const char *const moe_act_names[] = {
    [MOE_ACT_AUTO] = "auto", [MOE_ACT_F16] = "bf16", [MOE_ACT_FP4] = "fp4", NULL};
static const char *const allreduce_names[] = {
    [ALLREDUCE_AUTO] = "auto", [ALLREDUCE_NCCL] = "nccl", [ALLREDUCE_ONESHOT] = "oneshot", NULL};

struct settings {
    /* model and prompt; NULL: not given */
    char *model, *prompt, *prompt_file, *system, *system_file, *template_file, *ids;
    char *load;
    bool go_on, lines, jsonl, raw, special, escape, quiet, verbose, simple_io;
    enum color color;
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
    bool info, plan, tokenize, render, smoke, doctor, bench, json, profile, list_devices, version, help, man;
    int completion; /* enum shell; -1: not asked for */
    char *logits, *perplexity, *haystack, *synth, *shard, *output, *activations;
    char **calibrate, **compare; /* stb_ds, of malloc'ed names */
    int needle, depth;           /* tokens, 0: not given; percent */
    /* not options of the command line */
    const struct option *help_about; /* --help stands where the value of this one should */
    bool help_all;                   /* --help all */
    bool mute;                       /* chats print neither answers nor statistics */
};

static const char jsonl_details[] = "Every line of stdin is a request, an object with these keys:\n"
                                    "\n"
                                    "  prompt       a string, or in its place\n"
                                    "  messages     a list of objects {\"role\": ..., \"content\": ...}\n"
                                    "  id           any value (default: the number of the line)\n"
                                    "  max_tokens, temperature, seed   as -n, --temp and --seed\n"
                                    "  stop         a string or a list of strings that end the answer\n"
                                    "\n"
                                    "Every answer is a line of stdout, in the order of the requests: id, text,\n"
                                    "reasoning (the thinking, if there is any), finish (stop, length or interrupted)\n"
                                    "and usage (prompt_tokens, cached_tokens of them, completion_tokens). A request\n"
                                    "that fails is answered with id and error, and the exit code is 1.\n";

static const char plan_details[] = "-m takes a GGUF file, or only its header (moe-convert DIR --dry-run -o\n"
                                   "header.gguf). --synth takes a known shape. Without --gpus the plan is for the\n"
                                   "GPUs of this machine, or for its CPU.\n"
                                   "\n"
                                   "  --gpus 0,1        plan for these GPUs of this machine\n"
                                   "  --gpus 4x96       plan for four GPUs of 96 GiB; the usual sizes imply the\n"
                                   "                    memory bandwidth\n"
                                   "  --gpus 4x96@1792  plan for four GPUs of 96 GiB that read 1792 GB/s\n"
                                   "\n"
                                   "Exit code: 0 the model fits without pruning, 1 it does not.\n";

static const char doctor_details[] = "Checks in the order in which things fail: does a model start, does a forward\n"
                                     "pass complete, is the output coherent, does it stay coherent in a long context,\n"
                                     "is it fast enough? Without -m only the machine is checked. Exit code: 0 no\n"
                                     "errors, 1 errors.\n";

static const char calibrate_details[] =
    "A .jsonl file has one JSON object per line: {\"messages\": [...]}, {\"text\": ...},\n"
    "or {\"prompt\": ..., \"completion\": ...}. Any other file is plain text; it runs in\n"
    "windows of -c tokens (default: 2048).\n"
    "\n"
    "A unit of work is a line of a .jsonl file or a window of a text. Every unit\n"
    "starts with an empty context. Ctrl-C ends the run after the current unit. A\n"
    "second Ctrl-C ends it at once and drops the work since the last save (at most a\n"
    "minute and one unit). To continue, repeat the command: it begins with the next\n"
    "unit. The scores are those of an uninterrupted run, up to rounding.\n"
    "\n"
    "With --gpus the layers are divided: one stage of --pp for each GPU.\n";

static const char compare_details[] =
    "A and B are GGUF files with the same vocabulary. Both read TEXT in windows of -c\n"
    "tokens (default: 2048). Prints the perplexity of each model, the\n"
    "Kullback-Leibler divergence of B from A in nats, and how often both agree on the\n"
    "most likely token.\n";

static const char needle_details[] = "The fact is a random number, which depends only on --seed, N and --depth. The\n"
                                     "answer goes to stdout, the result to stderr. Exit code: 0 the answer holds the\n"
                                     "number, 1 it does not.\n";

static const char bench_details[] = "Prints CSV: one line per context depth and batch, medians of up to 5 timed runs.\n"
                                    "Depths are 0, 4096, 32768 and 131072 tokens, as far as -c has room. The cache is\n"
                                    "not computed up to that depth, only marked as filled: the time of a forward pass\n"
                                    "does not depend on its contents.\n"
                                    "\n"
                                    "  ctx_tokens                depth: tokens in the KV cache before the pass\n"
                                    "  prefill_tokens            tokens of the prefill chunk: at most 512 on a CPU,\n"
                                    "                            4096 on a GPU; given on the line of batch 1 only,\n"
                                    "                            like the next two columns\n"
                                    "  prefill_tps               tokens per second of that chunk, with the logits of\n"
                                    "                            its last token\n"
                                    "  prefill_percent_of_mma    GPU only: rate of the operations that the model\n"
                                    "                            defines, as a percentage of the rate of mma.sync\n"
                                    "                            m16n8k16 measured at the start\n"
                                    "  batch                     tokens of one decode forward pass: 1, 2, 4, 8 or 16,\n"
                                    "                            with all logits\n"
                                    "  gen_tps                   tokens per second of these passes; all tokens of the\n"
                                    "                            batch count\n"
                                    "  kvcache_bytes             bytes of the KV cache at that depth\n"
                                    "  gen_gb_per_s              GB/s (1e9 bytes) read by a decode forward pass: each\n"
                                    "                            weight once, counting the routed experts that the\n"
                                    "                            batch is expected to use if its tokens choose\n"
                                    "                            independently, and the KV cache once\n"
                                    "  gen_percent_of_bandwidth  gen_gb_per_s as a percentage of the bandwidth\n"
                                    "                            measured at the start: reads on a CPU; copies on a\n"
                                    "                            GPU, with both directions counted\n"
                                    "\n"
                                    "The measured bandwidth and mma rate are printed on stderr. --profile adds a\n"
                                    "table of the kernels (GPU) or operations (CPU) of a forward pass at depth 0; it\n"
                                    "needs a single rank. Its column `forecast` has the microseconds that --plan\n"
                                    "expects of a kernel for one token when nothing was requested ahead.\n";

static const char synth_details[] = "NAME is qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, kimi-k2, hy3,\n"
                                    "qwen3.5-35b-a3b, qwen3.5-122b-a10b or qwen3.5-397b-a17b. Options may follow a\n"
                                    "colon: NAME:layers=N,experts=M,backbone=bf16|q8_0 (default: the model's, bf16).\n"
                                    "Feed-forward weights are NVFP4, norms and routers F32, and the backbone is\n"
                                    "everything else.\n"
                                    "\n"
                                    "With -m FILE the model is written to FILE, which must not exist, before it is\n"
                                    "used. On a GPU these weights take no host memory: a few random rows are packed\n"
                                    "again and again.\n"
                                    "\n"
                                    "--shard 0/4 makes what the first of four GPUs under --tp 4 holds: heads and\n"
                                    "feed-forward columns are divided by 4, the vocabulary stays whole.\n";

static const struct option options[] = {
    {.help = "Model and prompt"},
    {"model", "-m", IS_STR(model), .arg = "FILE.gguf", .help = "GGUF file, any part of a split one (or $MOE_MODEL)"},
    {"prompt", "-p", IS_STR(prompt), .arg = "TEXT", .help = "answer TEXT and exit; piped stdin comes before it"},
    {"file", "-f", IS_STR(prompt_file), .arg = "FILE", .help = "like -p, with the prompt read from FILE (-: stdin)"},
    {"system", "-sys|--system-prompt", IS_STR(system), .arg = "TEXT", .help = "system message (default: none)"},
    {"system-file", "--system-prompt-file|-sysf", IS_STR(system_file), .arg = "FILE",
     .help = "system message read from FILE"},
    {"continue", IS_FLAG(go_on), .help = "resume the last conversation; with -p, one turn of it"},
    {"load", IS_STR(load), .arg = "NAME", .help = "resume the conversation that /save NAME saved"},
    {"lines", IS_FLAG(lines), .help = "answer every line of stdin as a prompt of its own"},
    {"jsonl", IS_FLAG(jsonl), .help = "the same with a JSON object per line, in and out", .details = jsonl_details},
    {"raw", "--no-conversation|-no-cnv", IS_FLAG(raw), .help = "no chat template: continue the text verbatim"},
    {"escape", "-e", IS_FLAG(escape), .rare = true, .help = "process \\n, \\t, \\\\ and \\xHH in the text of -p"},
    {"ids", IS_STR(ids), .rare = true, .arg = "1,2,3", .help = "use these token ids as the prompt; stdin is not read"},
    {"special", IS_FLAG(special), .rare = true,
     .help = "with --raw or --tokenize: recognize control tokens such as <|im_end|> in the text"},
    {"chat-template-file", IS_STR(template_file), .rare = true, .arg = "FILE",
     .help = "Jinja template in place of the model's"},
    {.help = "Answer (sampling: the model file's own defaults win)"},
    {"predict", "-n|--n-predict", IS_INT(n_predict, -1, INT32_MAX), .arg = "N", .in_chat = true,
     .help = "at most N tokens (default: -1, until the model stops)"},
    {"think", "--reasoning|--reasoning-effort|-rea", IS_CHOICE(think, think_names), .arg = "MODE", .in_chat = true,
     .help = "how hard to think (default: auto)"},
    {"show-think", IS_CHOICE(show_think, show_think_names), .arg = "MODE", .in_chat = true,
     .help = "print the thinking (auto: on a terminal)"},
    {"greedy", IS_FLAG(greedy), .in_chat = true, .help = "always take the most likely token, until --temp is set"},
    {"temp", "--temperature", IS_NUM(temp, 0, 100), .arg = "T", .in_chat = true,
     .help = "temperature (default: 0.7; 0: greedy)"},
    {"top-k", IS_INT(top_k, 0, INT32_MAX), .arg = "K", .in_chat = true,
     .help = "sample from the K most likely tokens (default: 40)"},
    {"top-p", IS_NUM(top_p, 0, 1), .arg = "P", .in_chat = true,
     .help = "sample from the most likely tokens whose probabilities add up to P (default: 0.95)"},
    {"min-p", IS_NUM(min_p, 0, 1), .arg = "P", .in_chat = true,
     .help = "drop tokens less likely than P times the likeliest (default: 0; pruned models 0.05)"},
    {"repeat-penalty", IS_NUM(repeat_penalty, 0.1, 10), .arg = "R", .in_chat = true,
     .help = "penalize tokens seen in the last 64 (default: 1, off; pruned models 1.1)"},
    {"seed", "-s", IS_INT(seed, -1, INT32_MAX), .arg = "N", .in_chat = true,
     .help = "random seed (default: -1, taken from the clock)"},
    {.help = "Machine"},
    {"ctx", "-c|--ctx-size", IS_INT(n_ctx, 0, 1 << 28), .arg = "N",
     .help = "tokens of context (default: 0, as trained or what fits)"},
    {"threads", "-t", IS_INT(threads, -1, 1024), .arg = "N", .help = "CPU threads (default: 0, all processors)"},
    {"kv", "--cache-type-k|--cache-type-v|-ctk|-ctv", IS_CHOICE(kv, kv_names), .arg = "TYPE",
     .help = "KV cache (default: fp8; on a CPU bf16)"},
    {"cpu", IS_FLAG(cpu), .help = "use no GPU"},
    {"gpus", IS_STR(gpus), .arg = "0,1", .help = "GPU numbers (default: the first; without any, the CPU)"},
    {"tp", IS_INT(tp, 1, MAX_RANKS), .arg = "N", .help = "GPUs that share every layer (default: all of --gpus)"},
    {"pp", IS_INT(pp, 1, MAX_RANKS), .arg = "N", .help = "pipeline stages that divide the layers (default: 1)"},
    {"vram-reserve", IS_INT(vram_reserve, 0, 1 << 20), .arg = "MIB", .help = "GPU memory to leave free (default: 256)"},
    {"allreduce", IS_CHOICE(allreduce, allreduce_names), .rare = true, .arg = "HOW",
     .help = "how the GPUs' partial results are summed (default: auto)"},
    {"kv-splits", IS_INT(kv_splits, 0, 384), .rare = true, .arg = "N",
     .help = "at most N parallel parts of the context when decoding on a GPU (default: 0, automatic)"},
    {"moe-act", IS_CHOICE(moe_act, moe_act_names), .rare = true, .arg = "TYPE",
     .help = "expert activations in GPU prefill (default: auto)"},
    {"cpu-ref", IS_FLAG(cpu_ref), .rare = true, .help = "scalar reference arithmetic on the CPU: exact, slow"},
    {"list-devices", IS_FLAG(list_devices), .help = "list the GPUs and exit"},
    {.help = "Other modes (details: moe --bench --help, for example)"},
    {"info", IS_FLAG(info), .help = "describe the model file"},
    {"plan", IS_FLAG(plan), .help = "will the model fit, and how fast can it run?", .details = plan_details},
    {"doctor", IS_FLAG(doctor), .help = "diagnose this machine; with -m, the model too", .details = doctor_details},
    {"json", IS_FLAG(json), .of = "plan|doctor", .help = "print one JSON object, sizes in bytes"},
    {"tokenize", IS_FLAG(tokenize), .help = "print the token ids of stdin on one line"},
    {"render", IS_FLAG(render), .rare = true, .help = "render the chat template with the JSON object on stdin"},
    {"logits", IS_STR(logits), .rare = true, .arg = "FILE.npy",
     .help = "write the logits of every position of the prompt"},
    {"perplexity", IS_STR(perplexity), .arg = "FILE", .help = "perplexity of a text file, with its standard error"},
    {"calibrate", IS_FILES(calibrate), .arg = "FILES",
     .help = "record expert statistics into -o, for moe-reap; resumes", .details = calibrate_details},
    {"output", "-o|--output-file", IS_STR(output), .arg = "FILE.json", .of = "calibrate",
     .help = "score file; an existing one is added to"},
    {"activations", IS_STR(activations), .arg = "FILE.gguf", .of = "calibrate",
     .help = "also record activations, for moe-convert; give it on every run"},
    {"compare", IS_FILES(compare), .arg = "A B TEXT", .help = "compare the predictions of two models on TEXT",
     .details = compare_details},
    {"needle", IS_INT(needle, 64, 1 << 28), .arg = "N", .help = "find a fact in N tokens of prose; exit 0 if found",
     .details = needle_details},
    {"depth", IS_INT(depth, 0, 100), .arg = "PERCENT", .of = "needle", .help = "position of the fact (default: 50)"},
    {"haystack", IS_STR(haystack), .arg = "FILE", .of = "needle", .help = "the prose (default: the shipped stories)"},
    {"smoke", IS_FLAG(smoke), .help = "three quick tests of the model; exit 0 if all pass"},
    {"bench", IS_FLAG(bench), .help = "prefill and decode speed at several depths, as CSV", .details = bench_details},
    {"profile", IS_FLAG(profile), .of = "bench", .help = "also print the time of each kernel or operation"},
    {"synth", IS_STR(synth), .arg = "NAME", .help = "random weights in a known shape, in place of -m",
     .details = synth_details},
    {"shard", IS_STR(shard), .arg = "R/N", .of = "synth", .help = "only what GPU R of N would hold"},
    {.help = "Messages"},
    {"quiet", "-q|--log-disable", IS_FLAG(quiet), .in_chat = true, .help = "no banner, no statistics, no notes"},
    {"verbose", "-v|--log-verbose", IS_FLAG(verbose), .in_chat = true, .help = "print more on stderr"},
    {"color", "-co", IS_CHOICE(color, color_names), .rare = true, .arg = "WHEN",
     .help = "color (default: auto, on a terminal)"},
    {"simple-io", IS_FLAG(simple_io), .rare = true, .help = "no line editor, no color, as with TERM=dumb"},
    {"version", IS_FLAG(version), .help = "version, and what this build can use"},
    {"man", IS_FLAG(man), .rare = true, .help = "print the manual page, for man -l -"},
    {"completion", IS_CHOICE(completion, shell_names), .rare = true, .arg = "SHELL",
     .help = "print the completion script for this shell"},
    {"help", "-h|--usage", IS_FLAG(help), .help = "this text; --help all: every option"},
};

/* Names of llama.cpp that are no options here. They are accepted and ignored, refused, or stand for an option. */
struct foreign {
    const char *names; /* patterns of fnmatch, separated by blanks; = at the end: it takes a value; ~: on|off|auto may
                          follow */
    const char *value; /* the row applies to these values, separated by |; NULL: to all */
    const char *as;    /* the option that it stands for; NULL: none */
    bool refused;      /* else ignored; for rows without `as` */
    const char *why;
};

#define REFUSE .refused = true, .why
#define IGNORE .why

static const struct foreign foreigners[] = {
    {"-ngl= --gpu-layers= --n-gpu-layers=", "0", .as = "--cpu"},
    {"-ngl= --gpu-layers= --n-gpu-layers=", IGNORE = "all layers run on the GPUs, or with --cpu on the CPU"},
    {"-dev= --device=", "none", .as = "--cpu"},
    {"-dev= --device= -mg --main-gpu", REFUSE = "choose GPUs with --gpus 0,1; --list-devices lists them"},
    {"--reasoning-budget=", "0", .as = "--think=off"},
    {"--reasoning-budget=", "-1", IGNORE = "only -n limits the thinking"},
    {"--reasoning-budget --reasoning-budget-message", REFUSE = "thinking has no budget of its own; use --think or -n"},
    {"--reasoning-format=", IGNORE = "--show-think says whether the thinking is printed"},
    {"--reasoning-preserve --chat-template-kwargs", REFUSE = "the only template argument is --think"},
    {"--no-reasoning-preserve", IGNORE = "the chat template decides which thinking stays"},
    {"-cnv --conversation -i --interactive -if --interactive-first -ins --instruct",
     IGNORE = "without a prompt, moe opens a chat on a terminal"},
    {"-st --single-turn", IGNORE = "-p, -f and piped stdin are answered once"},
    {"-mli --multiline-input", IGNORE = "Ctrl-J or \\ before Enter begins a new line"},
    {"--jinja --no-jinja --skip-chat-parsing --no-skip-chat-parsing",
     IGNORE = "the model's own Jinja template is always used"},
    {"--chat-template --chatml -cml --in-prefix --in-prefix-bos --in-suffix",
     REFUSE = "the chat template frames messages; give another one with --chat-template-file"},
    {"-fa~ --flash-attn~", IGNORE = "flash attention is always on"},
    {"-b= --batch-size= -ub= --ubatch-size=", IGNORE = "prefill runs in chunks of a fixed size"},
    {"-tb= --threads-batch=", IGNORE = "-t sets the threads of prefill and decode"},
    {"-C= --cpu-mask= -Cr= --cpu-range= --cpu-strict= --prio= --poll= -Cb= --cpu-mask-batch= -Crb= --cpu-range-batch= "
     "--cpu-strict-batch= --prio-batch= --poll-batch= --numa=",
     IGNORE = "use taskset, nice or numactl"},
    {"--no-display-prompt --display-prompt --verbose-prompt -ptc= --print-token-count=",
     IGNORE = "stdout carries the answer only; --tokenize prints the tokens of a text"},
    {"-sp", IGNORE = "control tokens are printed with --raw only"},
    {"--warmup --no-warmup", IGNORE = "there is no warm-up"},
    {"--no-context-shift --keep=", IGNORE = "the context is never shifted"},
    {"--context-shift", REFUSE = "not supported; an answer ends when the context is full"},
    {"--swa-full -ctxcp= --ctx-checkpoints= --swa-checkpoints= -cram= --cache-ram= -dt= --defrag-thold= -kvo "
     "--kv-offload "
     "--op-offload --no-op-offload --repack -nr --no-repack --no-host -lzm= --lazy-mode= -bs --backend-sampling",
     IGNORE = "how weights and cache are kept cannot be changed"},
    {"-nkvo --no-kv-offload", REFUSE = "the KV cache is always kept with its layers"},
    {"--perf --no-perf --show-timings --no-show-timings", IGNORE = "--quiet hides the statistics"},
    {"--log-colors~ --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-jsonl --no-log-jsonl -lv= "
     "--verbosity= --log-verbosity=",
     IGNORE = "there is no log; --verbose prints more, --quiet less"},
    {"--log-file --log-prompts-dir", REFUSE = "there is no log; 2>FILE keeps the messages"},
    {"--offline", IGNORE = "moe never uses the network"},
    {"--no-escape", IGNORE = "escapes are processed with -e only"},
    {"-fit~ --fit~", IGNORE = "-c 0, the default, fits the context into memory"},
    {"-fitt --fit-target -fitc --fit-ctx", REFUSE = "use --vram-reserve MIB and -c N"},
    {"-np= --parallel=", "1", IGNORE = "there is one conversation at a time"},
    {"-np --parallel", REFUSE = "there is one conversation at a time"},
    {"--check-tensors", IGNORE = "--smoke and --doctor check a model"},
    {"-lm= --load-mode=", "auto|mmap", IGNORE = "model files are always memory-mapped"},
    {"--mmap", IGNORE = "model files are always memory-mapped"},
    {"-lm --load-mode --no-mmap --mlock -dio --direct-io",
     REFUSE = "model files are always memory-mapped, and the system caches them"},
    {"--no-mmproj --no-mmproj-auto --mmproj-auto --mmproj-offload --no-mmproj-offload", IGNORE = "there are no images"},
    {"-mm --mmproj* -mmu -mmdev --image* --audio --video*", REFUSE = "images, audio and video are not supported"},
    {"--presence-penalty= --frequency-penalty= --mirostat= --xtc-probability= --dry-multiplier= --dynatemp-range=",
     "0|0.0|0.00", IGNORE = "that is off anyway"},
    {"--typical= --typical-p=", "1|1.0", IGNORE = "that is off anyway"},
    {"--repeat-last-n=", "64", IGNORE = "the repeat penalty covers the last 64 tokens"},
    {"--repeat-last-n", REFUSE = "the repeat penalty covers the last 64 tokens"},
    {"--presence-penalty --frequency-penalty --mirostat* --xtc-* --dry-* --dynatemp-* --typical --typical-p "
     "--top-nsigma "
     "--top-n-sigma --adaptive-* -l --logit-bias --samplers --sampler-seq --sampling-seq",
     REFUSE = "not supported; the samplers are --repeat-penalty, --top-k, --top-p, --min-p, --temp, in this order"},
    {"--ignore-eos -r --reverse-prompt", REFUSE = "not supported; an answer ends where the model ends it, or with -n"},
    {"--grammar --grammar-file -j --json-schema -jf --json-schema-file", REFUSE = "grammars are not supported"},
    {"--lora* --control-vector*", REFUSE = "adapters are not supported; merge them before converting"},
    {"-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn",
     REFUSE = "experts cannot stay in host memory beside a GPU; --plan says what fits"},
    {"-sm --split-mode -ts --tensor-split", REFUSE = "use --tp N to share every layer, or --pp N to divide the layers"},
    {"--override-kv --rope-* --yarn-* -gan --grp-attn-n -gaw --grp-attn-w",
     REFUSE = "the metadata of the model file cannot be changed"},
    {"--rpc", REFUSE = "several machines are not supported"},
    {"--server-base", REFUSE = "there is no server"},
    {"--prompt-cache --prompt-cache-all --prompt-cache-ro",
     REFUSE = "/save and /load keep a conversation with its cache"},
    {"-bf --binary-file", REFUSE = "a prompt is UTF-8 text: use -f"},
    {"-md --model-draft -td -tbd -Cd -Crd -Cbd -hfd -hfrd --hf-repo-draft -ctkd -ctvd -otd -cmoed -ncmoed -devd -ngld "
     "--*-draft --draft* --spec-* --no-spec-*",
     REFUSE = "speculative decoding is not supported"},
    {"-hf -hfr --hf-repo -hff --hf-file -hft --hf-token -mu --model-url -dr --docker-repo -cl --cache-list --*-default",
     REFUSE = "moe does not download: hf download ORG/NAME --local-dir DIR, then moe-convert DIR -o X.gguf"},
    {"--completion-bash", .as = "--completion=bash"},
};

enum { N_OPTIONS = sizeof options / sizeof *options };

static const struct manual manual = {
    .name = PROGRAM,
    .summary = "chat with mixture-of-experts models on your own machine",
    .usage = "  moe -m MODEL.gguf [options]          chat, or answer the prompt on piped stdin\n"
             "  moe -m MODEL.gguf -p TEXT [options]  answer TEXT and exit\n",
    .about = "Models are GGUF files with mixture-of-experts layers and often NVFP4 weights.\n"
             "They run on one to four NVIDIA GPUs or on the CPU. moe-convert makes them from\n"
             "releases on Hugging Face, moe-reap removes experts, and --plan says whether one\n"
             "fits a machine. The answer goes to stdout and everything else to stderr.\n"
             "\n"
             "Options of llama-cli that are not listed here are ignored with a note or refused\n"
             "with the reason.\n",
    .operand = {.type = OPT_STR, .arg = "FILE.gguf"},
    .files = "~/.moe\tconversations of /save\n"
             "~/.moe/models, PREFIX/share/moe/models\tmodels that are listed if -m is missing\n"
             "~/.moe_history\tlines typed in chats\n",
    .environment = "MOE_MODEL\tthe model if -m is missing\n"
                   "HOME\tthe directory of the files above\n"
                   "VISUAL, EDITOR\tthe editor of /edit and Ctrl-X Ctrl-E; VISUAL comes first\n"
                   "TERM, NO_COLOR\twhat the terminal can show\n"
                   "CUDA_VISIBLE_DEVICES\tthe GPUs that may be used\n",
    .exit_codes = "0 done, 1 failed, 2 wrong usage, 130 interrupted",
    .options = options,
    .n_options = N_OPTIONS,
};

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
                           .completion = -1,
                           .vram_reserve = 256,
                           .depth = 50};
}

/* ============================================================================================================
 * Command line
 *
 * Reads the options, prints --help, serves /set, and settles what the user left open.
 * ============================================================================================================ */

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

/* Whether a mode was asked for; for options whose unset value is zero. */
static bool option_given(const struct settings *s, const struct option *o) {
    const void *at = option_value(s, o);
    if (o->type == OPT_FLAG) return *(const bool *)at;
    if (o->type == OPT_INT) return *(const int *)at != 0;
    return *(void *const *)at != NULL;
}

/* Parses and stores a value as option_store does. The last one of --greedy and a --temp above 0 counts. */
static int settings_store(struct settings *s, const struct option *o, const char *typed, const char *value, char *err) {
    if (option_store(s, o, typed, value, err)) return -1;
    if (option_at(s, o) == &s->temp && s->temp > 0) s->greedy = false;
    return 0;
}

/* /set: stores a value if the option may change during a chat. */
static int option_set(struct settings *s, const char *name, const char *value, char *err) {
    const struct option *o = option_find(name);
    char typed[128];
    if (!o) return fail(err, "unknown option '%s' (/set lists them)", name);
    if (!o->in_chat)
        return fail(err, "--%s can only be set on the command line%s", name,
                    strcmp(name, "system") ? "" : "; /system changes the message");
    snprintf(typed, sizeof typed, "%s %s", name, value);
    return settings_store(s, o, typed, value, err);
}

/* Appends the value of an option as /set takes it. */
static void option_text(const struct settings *s, const struct option *o, char **out) {
    const void *at = option_value(s, o);
    switch (o->type) {
    case OPT_FLAG: sb_puts(out, *(const bool *)at ? "on" : "off"); break;
    case OPT_INT: sb_printf(out, "%d", *(const int *)at); break;
    case OPT_NUM: sb_printf(out, "%g", *(const double *)at); break;
    case OPT_CHOICE:
        if (*(const int *)at >= 0) sb_puts(out, o->choices[*(const int *)at]);
        break;
    case OPT_STR: {
        const char *value = *(char *const *)at;
        if (value) term_escape(out, value, strlen(value));
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
        char *value = NULL;
        option_text(s, o, &value);
        const char *end = strstr(o->help, " (default"); /* the value says what holds in this chat */
        fprintf(f, "  %-15s %-6s  %.*s\n", o->name, sb_cstr(&value), end ? (int)(end - o->help) : (int)strlen(o->help),
                o->help);
        arrfree(value);
    }
}

/* --NAME --help: the option, those that belong to it, and its details. */
static void option_details(const struct option *o, FILE *f) {
    option_help_line(o, false, f);
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].of && list_has(options[i].of, o->name)) option_help_line(&options[i], false, f);
    fprintf(f, "\n%s", o->details);
}

/* --help: the details of the modes that are given too; else the options that most people need, or with `all` every
 * one. */
static void options_help(const struct settings *s, FILE *f) {
    int detailed = 0;
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (!o->name || !o->details || (o != s->help_about && !option_given(s, o))) continue;
        if (detailed++) putc('\n', f);
        option_details(o, f);
    }
    if (detailed) return;
    manual_help(s->help_all, f);
}

/* Whether one of the patterns matches; *takes becomes what stands behind it: '=', '~' or 0. */
static bool foreign_matches(const char *patterns, const char *name, char *takes) {
    char one[64];
    for (const char *p = patterns; *p; p += *p == ' ') {
        const size_t n = strcspn(p, " ");
        *takes = strchr("=~", p[n - 1]) ? p[n - 1] : 0;
        snprintf(one, sizeof one, "%.*s", (int)n - (*takes != 0), p);
        if (!fnmatch(one, name, 0)) return true;
        p += n;
    }
    return false;
}

/* The row for a foreign option and its value, which may be NULL; NULL: there is none. *takes: as in foreign_matches. */
static const struct foreign *foreign_find(const char *name, const char *value, char *takes) {
    for (size_t i = 0; i < sizeof foreigners / sizeof *foreigners; i++) {
        const struct foreign *f = &foreigners[i];
        if (f->value && !(value && list_has(f->value, value))) continue;
        if (foreign_matches(f->names, name, takes)) return f;
    }
    return NULL;
}

/* An argument that is no option: a model. 0, or -1 with a message. */
static int positional_parse(struct settings *s, const char *a, char *err) {
    const char *dot = strrchr(a, '.');
    struct stat st;
    const bool there = !stat(a, &st), file = there && S_ISREG(st.st_mode) && dot && !strcmp(dot, ".gguf");
    if (!file && !(there && S_ISDIR(st.st_mode)))
        return fail(err, "unexpected argument '%s': use -p for a prompt, -m for a model", a);
    if (s->model) return fail(err, "unexpected argument '%s': the model is '%s'", a, s->model);
    s->model = xstrdup(a);
    return 0;
}

/* Reads one option and its values, or a model. Appends a malloc'ed note for what is ignored. Returns the number of
 * arguments behind the first that it has taken, or -1 with a message. */
static int option_parse(struct settings *s, int argc, char **argv, char ***notes, char *err) {
    char name[64], takes = 0, *text = NULL;
    const char *a = argv[0], *next = argc > 1 ? argv[1] : NULL;
    int taken = 0;
    if (a[0] != '-' || !a[1]) return positional_parse(s, a, err);
    const char *value = argument_split(a, name);
    const struct option *o = option_by_argument(name);
    const struct foreign *f = o ? NULL : foreign_find(name, value ? value : next, &takes);
    if (f) {
        if (f->refused) return fail(err, "%s: %s", a, f->why);
        if (takes == '=' && !value && !next) return fail(err, "%s needs a value", a);
        taken = !value && (takes == '=' || (takes == '~' && next && list_has("on|off|auto|0|1|true|false", next)));
        if (!f->as) {
            sb_printf(&text, "%s has no effect: %s", a, f->why);
            arrput(*notes, xstrdup(sb_cstr(&text)));
            arrfree(text);
            return taken;
        }
        value = argument_split(f->as, name);
        o = option_by_argument(name);
    } else if (!o && a[1] != '-' && isdigit((unsigned char)a[2 + (a[2] == '-')])) { /* a glued number, as in -n16 */
        o = option_by_argument((char[]){'-', a[1], 0});
        if (o && o->type == OPT_INT) value = a + 2;
        else o = NULL;
    }
    if (!o) return fail(err, "unknown option '%s' (see --help)", a);
    if (o->type == OPT_FLAG && !value) value = "on";
    else if (!value && next) {
        value = next;
        taken = 1;
    }
    if (!value) return fail(err, "%s needs a value: %s", a, o->choices ? option_choices(o, name) : o->arg);
    if (o->details && (!strcmp(value, "--help") || !strcmp(value, "-h"))) {
        s->help = true;
        s->help_about = o;
        return taken;
    }
    if (option_at(s, o) == &s->help && next && !strcmp(next, "all")) {
        s->help_all = true;
        taken = 1;
    }
    sb_printf(&text, taken ? "%s %s" : "%s", a, next);
    const int kv = s->kv;
    int rc = settings_store(s, o, sb_cstr(&text), value, err);
    if (!rc && kv >= 0 && s->kv != kv && strcmp(name, "--kv"))
        rc = fail(err, "%s: keys and values share one type, already set to %s", text, kv_names[kv]);
    arrfree(text);
    for (; !rc && o->type == OPT_FILES && taken + 1 < argc && argv[taken + 1][0] != '-'; taken++)
        rc = option_store(s, o, a, argv[taken + 1], err);
    return rc ? rc : taken;
}

/* Replaces \n, \t, \r, \\, \" , \' and \xHH in place. */
static void text_unescape(char *text) {
    static const char from[] = "ntr\\\"'", to[] = "\n\t\r\\\"'";
    char *out = text;
    for (const char *p = text; *p; p++) {
        const char *k = *p == '\\' && p[1] ? strchr(from, p[1]) : NULL;
        unsigned byte = 0;
        if (k) {
            *out++ = to[k - from];
            p++;
        } else if (*p == '\\' && p[1] == 'x' && isxdigit((unsigned char)p[2]) && isxdigit((unsigned char)p[3]) &&
                   sscanf(p + 2, "%2x", &byte) == 1 && byte) {
            *out++ = (char)byte;
            p += 3;
        } else *out++ = *p;
    }
    *out = 0;
}

/* Reads the command line. Says what has no effect, unless --quiet. 0, or -1 with a message. */
static int options_parse(struct settings *s, int argc, char **argv, char *err) {
    const int available = processors();
    char **notes = NULL;
    int rc = 0;
    for (int i = 1, n; i < argc && !rc; i += n + 1) {
        n = option_parse(s, argc - i, argv + i, &notes, err);
        if (n < 0) rc = -1;
    }
    if (!rc && s->quiet && s->verbose) rc = fail(err, "--quiet and --verbose cannot be combined");
    for (size_t i = 0; i < arrlenu(notes); i++) {
        if (!rc && !s->quiet) message_print("%s", notes[i]);
        free(notes[i]);
    }
    arrfree(notes);
    if (rc) return rc;
    if (s->threads > available) {
        if (!s->quiet)
            message_print("-t %d: this machine has %d processor%s; using %d", s->threads, available,
                          available == 1 ? "" : "s", available);
        s->threads = available;
    }
    if (s->escape && s->prompt) text_unescape(s->prompt);
    /* --synth writes to the file of -m, which must have been meant */
    if (!s->model && !s->synth && !s->compare && getenv("MOE_MODEL")) s->model = xstrdup(getenv("MOE_MODEL"));
    return 0;
}

/* CPU threads: -t, or one per processor. */
static int settings_threads(const struct settings *s) { return s->threads > 0 ? s->threads : processors(); }

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
    if (!*text) die_usage("--gpus needs at least one number");
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
            die_usage("--gpus %s: expected 1 to %d GPU numbers from 0 to 63, separated by commas", text, MAX_RANKS);
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
 * Keyboard
 *
 * Turns the bytes that a terminal sends into keys. The terminal is in raw mode while the editor reads: term_raw
 * switches to it, term_restore switches back. Escape sequences are read up to their final byte (ECMA-48), so that an
 * unknown one is ignored as a whole. Signals also arrive as keys: KEY_REDRAW after a change of the window size or a
 * stop, Ctrl-C after SIGINT.
 * ============================================================================================================ */

enum {
    ESCAPE_WAIT_MS = 100, /* longest pause within an escape sequence; after it, ESC was a key of its own */
    PASTE_WAIT_MS = 5000  /* longest pause within a paste; after it, the end mark was lost */
};

/* A key is a code point, control characters included, or one of these, which lie above Unicode. */
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
    KEY_YANK_OLDER,  /* Alt-Y */
    KEY_EXTERNAL,    /* Ctrl-X Ctrl-E */
    KEY_PASTE,       /* the pasted text is in keyboard.paste */
    KEY_REDRAW,      /* the window size or the mode of the terminal changed */
    KEY_EOF
};

#define CONTROL(letter) ((letter)&31)

struct keyboard {
    char *in;     /* stb_ds: bytes read; those from in_at on are not used yet */
    size_t in_at; /* index into in */
    char *paste;  /* stb_ds: the last paste */
    int pushed;   /* a key that key_read returns once more; 0: none */
    bool woken;   /* a signal arrived in the middle of an escape sequence */
};

/* Appends s (n), which was typed, pasted or saved, as text for the editor: NUL and malformed UTF-8 become U+FFFD, CR LF
 * and CR become LF. */
static void input_sanitize(char **out, const char *s, size_t n) {
    for (size_t i = 0; i < n;) {
        int k = s[i] ? utf8_sequence(s + i, n - i) : -1;
        if (k <= 0) sb_puts(out, "\xef\xbf\xbd");
        else if (s[i] != '\r') sb_put(out, s + i, (size_t)k);
        else if (i + 1 == n || s[i + 1] != '\n') arrput(*out, '\n');
        i += k > 0 ? (size_t)k : 1;
    }
}

/* Signal handlers write a byte here, which ends poll(). A flag is not enough: it could be set between its test and
 * poll(), and with several threads the handler may run in another one. */
static int wake_pipe[2] = {-1, -1};

/* Opens the pipe, once. */
static void wake_open(void) {
    if (wake_pipe[0] < 0 && pipe2(wake_pipe, O_CLOEXEC | O_NONBLOCK)) die("cannot make a pipe: %s", strerror(errno));
}

/* The signal handler of the editor; also called by signal_interrupt. */
static void wake_up(int sig) {
    int saved = errno;
    (void)sig;
    ssize_t done = write(wake_pipe[1], "", 1); /* fails if the pipe is full or not open yet: both do no harm */
    (void)done;
    errno = saved;
}

/* Writes s (n) past interruptions and full buffers; other errors are ignored. */
static void write_all(int fd, const char *s, size_t n) {
    while (n) {
        ssize_t k = write(fd, s, n);
        if (k < 0 && errno == EAGAIN) poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, -1);
        if (k < 0 && errno != EINTR && errno != EAGAIN) return;
        if (k > 0) {
            s += k;
            n -= (size_t)k;
        }
    }
}

static bool input_ready(void) { return poll(&(struct pollfd){.fd = 0, .events = POLLIN}, 1, 0) > 0; }

enum {
    BYTE_EOF = -1,
    BYTE_NONE = -2, /* no byte in time */
    BYTE_WAKE = -3  /* a signal; only with an unlimited wait */
};

/* Returns the next byte or one of the above. wait_ms: how long to wait, -1: without limit. */
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

/* Takes over what was typed in cooked mode, where the terminal makes a newline of Enter. Before the switch to raw mode
 * this reads whole lines, and Ctrl-D reads as an end of input. `late`: reads after the switch what came in between. A
 * Ctrl-D in there is a NUL. */
static void input_typeahead(struct keyboard *kb, bool late) {
    while (input_ready()) {
        char s[4096];
        ssize_t n = read(0, s, sizeof s);
        if (n < 0) return;
        if (n == 0) arrput(kb->in, CONTROL('D'));
        if (n == 0) return;
        for (ssize_t i = late ? 0 : n - 1; i < n; i++) {
            if (s[i] == '\n') s[i] = '\r';
            if (!s[i] && late) s[i] = CONTROL('D');
        }
        sb_put(&kb->in, s, (size_t)n);
    }
}

/* Switches the terminal to raw mode, also again after a stop. Ctrl-C, Ctrl-Z and the like are then read as characters.
 * The processing of output does not change. What was typed in cooked mode goes to kb. */
static void term_raw(struct keyboard *kb) {
    bool cooked = !term.raw;
    if (cooked) input_typeahead(kb, false);
    if (cooked && tcgetattr(0, &term.cooked)) return;
    term.raw = true;
    struct termios t = term.cooked;
    t.c_iflag &= ~(tcflag_t)(BRKINT | ICRNL | INLCR | IGNCR | INPCK | ISTRIP | IXON);
    t.c_lflag &= ~(tcflag_t)(ECHO | ICANON | IEXTEN | ISIG);
    t.c_cflag |= CS8;
    t.c_cc[VMIN] = 1;
    t.c_cc[VTIME] = 0;
    tcsetattr(0, TCSADRAIN, &t);
    if (cooked) input_typeahead(kb, true);
    write_all(1, "\033[?2004h", 8); /* bracketed paste */
}

/* Reads a bracketed paste up to its end mark into kb->paste. */
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
    input_sanitize(&kb->paste, raw, arrlenu(raw));
    arrfree(raw);
    return KEY_PASTE;
}

/* Reads the rest of an escape sequence that began with CSI or SS3: parameters, then a final byte (ECMA-48, 5.4).
 * Returns its key, KEY_NONE if it is unknown. */
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
    if (c >= 0 && (c < 0x20 || c > 0x7e)) kb->in_at--; /* not a sequence: the byte is a key of its own */
    bool by_word = p[1] > 2;                           /* the second parameter is 2 for Shift, 3 for Alt, 5 for Ctrl */
    switch (c) {
    case 'A': return KEY_UP;
    case 'B': return KEY_DOWN;
    case 'C': return by_word ? KEY_WORD_RIGHT : KEY_RIGHT;
    case 'D': return by_word ? KEY_WORD_LEFT : KEY_LEFT;
    case 'F': return KEY_END;
    case 'H': return KEY_HOME;
    case 'M': return '\r';                           /* Enter of the keypad */
    case 'u': return p[0] == '\r' ? '\n' : KEY_NONE; /* Shift-Enter, in terminals that report it */
    case '~':
        switch (p[0]) {
        case 1:
        case 7: return KEY_HOME;
        case 4:
        case 8: return KEY_END;
        case 3: return KEY_DELETE;
        case 27: return p[2] == '\r' ? '\n' : KEY_NONE; /* Shift-Enter in xterm's older form */
        case 200: return key_paste(kb);
        }
    }
    return KEY_NONE;
}

/* Reads the rest of a sequence that began with ESC. Alt and a key send ESC and that key. */
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
    case 'y': return KEY_YANK_OLDER;
    case 8:
    case 127: return KEY_WORD_RUBOUT;
    }
    if (c >= 0x80) kb->in_at--;
    return KEY_NONE;
}

/* Waits for the next key and returns it. */
static int key_read(struct keyboard *kb) {
    int key = kb->pushed;
    kb->pushed = 0;
    if (key) return key;
    int c = kb->woken ? BYTE_WAKE : input_byte(kb, -1);
    if (c == BYTE_WAKE) {
        bool stop = interrupted;
        kb->woken = false;
        interrupted = 0;
        return stop ? CONTROL('C') : KEY_REDRAW;
    }
    if (c < 0) return KEY_EOF;
    if (c == 27) return key_escape(kb);
    if (c < 0x80) return c;
    char s[4] = {(char)c};
    int n = 1, k;
    while ((k = utf8_sequence(s, (size_t)n)) == 0 && (c = input_byte(kb, ESCAPE_WAIT_MS)) >= 0) s[n++] = (char)c;
    if (k < 0 && n > 1) kb->in_at--; /* the byte that does not fit begins the next sequence */
    utf8proc_int32_t cp = 0xfffd;
    if (k > 0) utf8proc_iterate((const uint8_t *)s, k, &cp);
    return cp;
}

/* ============================================================================================================
 * Keys during a turn
 *
 * While the model reads and answers, a thread reads the keyboard. Ctrl-C stops the turn at its next token or chunk; a
 * second one within a second ends the program. Ctrl-\\ acts at once, and so does Ctrl-Z unless ranks are on GPUs (see
 * pg_run); other keys wait for the next prompt. The thread also renews the line of progress, which the work itself would
 * do only between two chunks.
 * ============================================================================================================ */

static struct {
    pthread_t thread;
    struct keyboard *keys; /* NULL: the terminal is not in raw mode, keys are not read */
    atomic_bool running;
} watch;

/* Acts on Ctrl-C. Every turn before this one has been saved. */
static void watch_interrupt(void) {
    static double last;
    const double now = now_seconds();
    if (interrupted && now - last < 1.0) {
        progress_end();
        term_restore();
        write_all(2, "\r\n", 2);
        temp_remove();
        _exit(EXIT_INTERRUPT);
    }
    last = now;
    interrupted = 1;
    progress_stopping();
}

/* Stops the job as Ctrl-Z does where the terminal sees to it, and goes on after SIGCONT. */
static void watch_suspend(struct keyboard *kb) {
    sigset_t pending;
    term_restore();
    kill(0, SIGTSTP);
    for (int i = 0; i < 500; i++) { /* a step of ranks may have to end before, or another thread is stopped first */
        poll(NULL, 0, 20);
        sigemptyset(&pending);
        sigpending(&pending);
        if (!sigismember(&pending, SIGTSTP)) break;
    }
    term_raw(kb);
}

/* Keeps the bytes s (n) for the next prompt and acts on those that are commands. Within a paste no byte is one. */
static void watch_bytes(struct keyboard *kb, const char *s, size_t n, bool *pasting) {
    static const char marks[2][7] = {"\033[200~", "\033[201~"};
    for (size_t i = 0; i < n; i++) {
        const bool act = !*pasting;
        if (act && s[i] == CONTROL('C')) watch_interrupt();
        else if (act && s[i] == CONTROL('Z')) watch_suspend(kb);
        else if (act && s[i] == CONTROL('\\')) kill(0, SIGQUIT);
        else arrput(kb->in, s[i]);
        const size_t have = arrlenu(kb->in);
        if (have >= 6 && !memcmp(kb->in + have - 6, marks[*pasting], 6)) *pasting = !*pasting;
    }
}

static void *watch_run(void *unused) {
    (void)unused;
    struct keyboard *kb = watch.keys;
    bool pasting = false, open = kb != NULL;
    while (watch.running) {
        struct pollfd p[2] = {{.fd = wake_pipe[0], .events = POLLIN}, {.fd = 0, .events = POLLIN}};
        char s[4096];
        if (poll(p, open ? 2 : 1, 100) < 0) continue;
        if (p[0].revents) {
            while (read(wake_pipe[0], s, sizeof s) > 0) continue;
            if (open && watch.running) term_raw(kb); /* after SIGCONT */
        }
        if (open && p[1].revents) {
            const ssize_t n = read(0, s, sizeof s);
            open = n > 0 || (n < 0 && (errno == EINTR || errno == EAGAIN));
            if (n > 0) watch_bytes(kb, s, (size_t)n, &pasting);
        }
        progress_draw();
    }
    return NULL;
}

/* Starts to watch a turn. kb: the keyboard of a dialogue whose terminal is in raw mode, or NULL. */
static void watch_begin(struct keyboard *kb) {
    struct sigaction sa = {.sa_handler = wake_up, .sa_flags = SA_RESTART};
    if (!kb && !term.err_moves) return;
    wake_open();
    if (kb) {
        arrdeln(kb->in, 0, kb->in_at);
        kb->in_at = 0;
        if (!term.raw) term_raw(kb);
        sigaction(SIGCONT, &sa, NULL);
    }
    watch.keys = kb;
    watch.running = true;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old); /* signals are for the other threads */
    if (pthread_create(&watch.thread, NULL, watch_run, NULL)) watch.running = false;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void watch_end(void) {
    if (!watch.running) return;
    watch.running = false;
    wake_up(0);
    pthread_join(watch.thread, NULL);
    progress_end();
}

/* ============================================================================================================
 * Chat
 *
 * A conversation is a list of messages. A turn renders all of them with the model's template, tokenizes the text, syncs
 * the session with the tokens and generates an answer. The template keeps track of which text came from messages, so
 * that nothing a user types becomes a control token.
 *
 * The tokens of earlier turns are reused as far as their text is the rendered text, up to a special token. They are not
 * tokenized again, because the model may have generated a text in other tokens than the tokenizer would choose.
 *
 * ============================================================================================================ */

#define LAST_CHAT "last" /* the name of the conversation that --continue resumes */

struct message {
    char *role, *content; /* malloc'ed; the content of an assistant includes its thinking as generated */
};

enum stop_reason {
    STOP_END,     /* the model or a stop string ended the answer */
    STOP_LENGTH,  /* -n */
    STOP_CONTEXT, /* the context is full */
    STOP_INTERRUPT
};

struct turn_stats {
    enum stop_reason why;      /* why the answer ended */
    int n_cached;              /* tokens of the prompt that were in the cache */
    int n_prompt, n_generated; /* tokens of the prompt that were computed, tokens of the answer */
    double prompt_seconds;     /* to compute the prompt */
    double seconds;            /* to generate the answer */
    double first_seconds;      /* from the start of the turn to the first token of the answer */
    double bytes;              /* of weights and KV cache read while generating */
    uint32_t logit_hash;       /* of the last logits: equal runs give equal hashes */
};

struct chat {
    struct message *messages; /* stb_ds */
    struct settings *set;
    const struct model *m;
    struct session *s;
    struct template *t;
    bool splits_reasoning;         /* the template reads reasoning_content beside content */
    bool strips_reasoning;         /* the template removes the thinking from content itself */
    uint64_t rng;                  /* state of the sampler's random numbers */
    struct turn_stats last, total; /* of the last turn, of all turns */
    int turns;                     /* turns in `total` */
    const char **stops;            /* stb_ds: strings that end an answer, for --jsonl, which prints no text */
    struct keyboard *keys;         /* of a dialogue in raw mode: read while the model answers; or NULL */
    char *name;                    /* under which the conversation was saved or loaded, or NULL */
    bool autosave;                 /* save every turn for --continue */
    int open_past;                 /* tokens of the session when the last answer was stopped; 0: it was not */
    int saved_turns;               /* turns and messages at the last autosave; */
    ptrdiff_t saved_messages;      /* -1: other messages have been loaded since */
    bool saved_state;              /* whether it wrote the state */
};

enum turn_result {
    TURN_DONE,
    TURN_STOPPED,     /* Ctrl-C during the answer: the part that was generated is its message */
    TURN_ROLLED_BACK, /* Ctrl-C before the first token: the messages are as before the turn */
    TURN_FAILED       /* an error: the messages are as before the turn, err holds the message */
};

static bool text_has(const char *s, size_t n, const char *what) { return memmem(s, n, what, strlen(what)) != NULL; }

/* Parses the template of --chat-template-file, or else of the model file, into *out and appends its text to *source.
 * Returns 0, or -1 with a message. */
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

/* Checks that s (n) is UTF-8 without NUL, as templates need. what: its name in the error. Returns 0, or -1 with a
 * message. */
static int message_check(const char *what, const char *s, size_t n, char *err) {
    if (n && memchr(s, 0, n)) return fail(err, "%s has a NUL byte: it is not text", what);
    return utf8_valid(s, n) ? 0 : fail(err, "%s is not valid UTF-8", what);
}

/* Appends a message. */
static void chat_push(struct chat *c, const char *role, const char *content, size_t n) {
    struct message msg = {xstrdup(role), xstrndup(content, n)};
    arrput(c->messages, msg);
}

static void message_free(struct message *msg) {
    free(msg->role);
    free(msg->content);
}

/* Removes the last message. */
static void chat_pop(struct chat *c) {
    struct message msg = arrpop(c->messages);
    message_free(&msg);
}

/* Starts a conversation with --system as its first message, if given. Returns 0, or -1 with a message; free it in both
 * cases. */
static int chat_init(struct chat *c, struct settings *set, const struct model *m, struct session *s, char *err) {
    char *source = NULL;
    memset(c, 0, sizeof *c);
    c->set = set;
    c->m = m;
    c->s = s;
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
    arrfree(c->stops);
    free(c->name);
    template_free(c->t);
}

/* Returns where the answer begins in an assistant's content: after the thinking and the newlines that follow it. Sets
 * *think and *n to the thinking without its tags and without the newlines around it. */
static const char *split_answer(const char *content, const char **think, size_t *n) {
    const char *end = NULL, *from = strstr(content, "<think>");
    for (const char *p = content; (p = strstr(p, "</think>")); p += 8) end = p;
    *think = content;
    *n = 0;
    if (!end) return content;
    from = from && from < end ? from + 7 : content;
    from += strspn(from, "\n");
    while (end > from && end[-1] == '\n') end--;
    *think = from;
    *n = end > from ? (size_t)(end - from) : 0;
    end = strstr(end, "</think>") + 8;
    return end + strspn(end, "\n");
}

/* Returns a message as the template expects it: the thinking in reasoning_content, inside content, or left out. */
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

/* Sets the variables that any template may use, as Hugging Face's apply_chat_template does. */
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

/* Renders all messages into *out. answer: the text ends where the model's answer begins (add_generation_prompt).
 * Returns 0, or -1 with a message. */
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

/* Whether a token is special. No ordinary token spans one, so text can be tokenized from there on by itself. */
static bool token_is_special(const struct vocab *v, int32_t id) {
    return vocab_type(v, id) == TOKEN_CONTROL || vocab_type(v, id) == TOKEN_USER_DEFINED;
}

/* Sets *ids to the tokens of a rendered prompt. Tokens of the session are taken over as long as their text is that of
 * the prompt, up to the last special token among them (cut); the rest of the prompt (from byte cut_at on) is
 * tokenized. */
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
        bool special = token_is_special(v, id), from_data = false;
        if (!b.n || b.n > n - at || memcmp(text->s + at, b.p, b.n)) break;
        for (size_t i = 0; special && i < b.n; i++) from_data |= text->origin[at + i] == ORIGIN_DATA;
        if (from_data) break;
        at += b.n;
        if (special) {
            cut = k + 1;
            cut_at = at;
        }
    }
    if (k == s->n_past) { /* all tokens agree: if the rest begins with a special token, none need be cut off */
        tokenize(v, text->s + at, n - at, text->origin + at, TOKENIZE_CONTROL, ids);
        if (arrlen(*ids) && token_is_special(v, (*ids)[0])) {
            cut = k;
            cut_at = at;
        }
    }
    arrsetlen(*ids, 0);
    for (int i = 0; i < cut; i++) arrput(*ids, s->tokens[i]);
    size_t before = arrlenu(*ids);
    tokenize(v, text->s + cut_at, n - cut_at, text->origin + cut_at, TOKENIZE_CONTROL, ids);
    if (!before && v->add_bos && v->bos >= 0 && (!arrlen(*ids) || (*ids)[0] != v->bos)) arrins(*ids, 0, v->bos);
}

/* Whether the prompt ends in an opening <think> of the template, so that the answer begins inside the thinking. */
static bool prompt_opens_think(const struct text *t) {
    size_t n = arrlenu(t->s);
    while (n && strchr(" \n\t", t->s[n - 1])) n--;
    return n >= 7 && !memcmp(t->s + n - 7, "<think>", 7) && t->origin[n - 1] == ORIGIN_TEMPLATE;
}

/* ============================================================================================================
 * Chat: generation
 *
 * An answer on its way from token ids to the screen: bytes that may end within a character, thinking that may be
 * hidden, and what the turn took.
 * ============================================================================================================ */

struct printer {
    const struct vocab *v;
    struct detok detok;
    char *text;       /* stb_ds: all generated text */
    size_t printed;   /* bytes of text that were printed or left out on purpose */
    bool verbatim;    /* print every byte, tags of thinking included (raw modes) */
    bool ends_line;   /* add a newline if the answer does not end in one */
    bool thinking;    /* the text from `printed` on is inside <think> */
    bool show;        /* print the thinking too */
    bool began;       /* a part of the answer has been printed */
    size_t answer_at; /* where in text it begins */
    bool marked;      /* the thinking began with a line that says so */
    bool mute;        /* print nothing */
    char last;        /* the last byte that was printed, 0 before the first */
    int think_tokens; /* tokens generated inside <think> */
    double start;     /* now_seconds() at the start of the turn */
    struct wrap wrap; /* on a terminal: holds back the last word */
    bool dim;         /* the style of that word */
    char *out, *safe; /* stb_ds: scratch */
};

/* Writes s (n) to stdout, dim on a terminal if `dim`. n 0: writes what is held back. */
static void printer_write(struct printer *p, const char *s, size_t n, bool dim) {
    struct winsize w;
    if (p->mute) return;
    if (dim != p->dim && arrlen(p->wrap.word)) printer_write(p, "", 0, p->dim);
    p->dim = dim;
    const bool styled = dim && term.color_out;
    arrsetlen(p->out, 0);
    arrsetlen(p->safe, 0);
    if (styled) sb_puts(&p->out, "\033[2m");
    if (term.out_tty) term_escape(&p->safe, s, n);
    if (p->wrap.cols) p->wrap.cols = !ioctl(1, TIOCGWINSZ, &w) && w.ws_col ? w.ws_col : 80;
    if (!term.out_tty) sb_put(&p->out, s, n);
    else if (!p->wrap.cols) sb_put(&p->out, p->safe, arrlenu(p->safe));
    else if (n) wrap_put(&p->wrap, p->safe, arrlenu(p->safe), &p->out);
    else wrap_flush(&p->wrap, &p->out);
    const bool empty = arrlenu(p->out) == (styled ? 4 : 0);
    if (styled) sb_puts(&p->out, "\033[0m");
    if (!empty) fwrite(p->out, 1, arrlenu(p->out), stdout);
    out_flush();
    if (n) p->last = s[n - 1];
}

/* Shows on a terminal how long the model has been thinking while its thoughts are hidden. done: removes that line. */
static void printer_hidden(const struct printer *p, bool done) {
    if (!term.out_tty || p->mute) return;
    if (done) progress_end();
    else progress_set(PROGRESS_THINKING, p->think_tokens, 0);
}

/* Prints a line that tells thinking from answer where no style does. */
static void printer_marker(struct printer *p, const char *line) {
    if (term.color_out) return;
    p->marked = true;
    printer_write(p, line, strlen(line), false);
}

/* Prints text[printed..end) as thinking or as answer. White space at the start of the answer is left out. */
static void printer_emit(struct printer *p, size_t end) {
    const char *s = p->text + p->printed;
    size_t n = end - p->printed;
    p->printed = end;
    if (p->thinking) {
        if (p->show && !p->marked && n) printer_marker(p, "[thinking]\n");
        if (p->show) printer_write(p, s, n, true);
        return;
    }
    while (!p->began && n && strchr(" \n\t\r", *s)) {
        s++;
        n--;
    }
    if (n && !p->began && p->show && p->last && p->last != '\n') printer_write(p, "\n", 1, false);
    if (n && !p->began && p->marked) printer_marker(p, "[answer]\n");
    if (n && !p->began) {
        p->began = true;
        p->answer_at = (size_t)(s - p->text);
    }
    printer_write(p, s, n, false);
}

/* Appends a token and prints what can be printed. <think> and </think> are searched for in the text, because a model
 * may spell them with several tokens. What may be the beginning of a tag is held back. */
static void printer_token(struct printer *p, int32_t id) {
    detok_put(p->v, &p->detok, id, &p->text);
    size_t n = arrlenu(p->text);
    if (!n) return; /* so far only an incomplete UTF-8 sequence */
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
        if (hit && (p->thinking || !p->began)) { /* later in an answer, <think> is ordinary text */
            printer_emit(p, (size_t)(hit - p->text));
            p->printed += len;
            if (p->thinking && !p->show) printer_hidden(p, true);
            p->thinking = !p->thinking;
            continue;
        }
        if (p->thinking || !p->began)
            for (size_t k = 1; k < len && k <= rest; k++)
                if (!memcmp(p->text + arrlenu(p->text) - k, tag, k)) hold = k; /* may be the beginning of the tag */
        printer_emit(p, arrlenu(p->text) - hold);
        break;
    }
    if (p->thinking && !p->show) printer_hidden(p, false);
}

/* Prints what was held back and ends the line. */
static void printer_end(struct printer *p) {
    detok_end(&p->detok, &p->text);
    if (p->verbatim) printer_write(p, p->text + p->printed, arrlenu(p->text) - p->printed, false);
    else printer_emit(p, arrlenu(p->text));
    printer_write(p, "", 0, p->dim);
    if (p->thinking && !p->show) printer_hidden(p, true);
    if (p->last != '\n' && p->ends_line && !p->mute) fputc('\n', stdout);
    out_flush();
    arrfree(p->wrap.word);
    arrfree(p->safe);
    arrfree(p->out);
}

/* thinking: the answer begins inside <think>; verbatim: every byte is printed. */
static struct printer printer_make(const struct chat *c, bool thinking, bool verbatim) {
    bool show = c->set->show_think == SHOW_ON || (c->set->show_think == SHOW_AUTO && term.out_tty);
    return (struct printer){.v = c->m->vocab,
                            .thinking = thinking,
                            .show = show,
                            .verbatim = verbatim,
                            .mute = c->set->mute,
                            .wrap.cols = !verbatim && term.out_tty,
                            .ends_line = !verbatim || term.out_tty || c->set->lines,
                            .start = now_seconds()};
}

/* ---- generation ---- */

/* Returns the FNV-1a hash of n logits, one step per number. */
static uint32_t logit_hash(const float *x, int n) {
    uint32_t h = 0x811c9dc5u;
    for (int i = 0; i < n; i++) h = (h ^ f32_to_bits(x[i])) * 0x01000193u;
    return h;
}

/* Whether a stop string ends the answer, of which the bytes from `from` on are new. The text is cut off before it. */
static bool answer_stops(const struct chat *c, struct printer *p, size_t from) {
    const size_t start = p->verbatim ? 0 : p->answer_at;
    size_t end = SIZE_MAX;
    if (!p->verbatim && !p->began) return false;
    for (size_t i = 0; i < arrlenu(c->stops); i++) {
        const size_t len = strlen(c->stops[i]), at = from > start + len - 1 ? from - (len - 1) : start;
        const char *hit = memmem(p->text + at, arrlenu(p->text) - at, c->stops[i], len);
        if (hit && (size_t)(hit - p->text) < end) end = (size_t)(hit - p->text);
    }
    if (end == SIZE_MAX) return false;
    arrsetlen(p->text, end);
    p->printed = end;
    p->detok = (struct detok){0};
    return true;
}

/* Continues the session until the model stops, a limit is reached or Ctrl-C; prints through p and fills in st. */
static void generate(struct chat *c, struct printer *p, struct turn_stats *st) {
    struct session *s = c->s;
    struct sampling o = settings_sampling(c->set);
    double t0 = now_seconds();
    st->why = STOP_LENGTH;
    while (c->set->n_predict < 0 || st->n_generated < c->set->n_predict) {
        if (interrupted) {
            st->why = STOP_INTERRUPT;
            break;
        }
        int32_t id = session_sample(s, &o, &c->rng);
        if (!st->n_generated) st->first_seconds = now_seconds() - p->start;
        if (vocab_is_stop(c->m->vocab, id)) {
            st->why = STOP_END;
            break;
        }
        const size_t before = arrlenu(p->text);
        st->n_generated++;
        printer_token(p, id);
        if (arrlen(c->stops) && answer_stops(c, p, before)) {
            st->why = STOP_END;
            break;
        }
        if (s->n_past == s->n_ctx) {
            st->why = STOP_CONTEXT;
            break;
        }
        st->bytes += session_forward_bytes(s, 1);
        session_decode(s, id);
    }
    st->seconds = now_seconds() - t0;
    st->logit_hash = logit_hash(session_logits(s), c->m->n_vocab);
    printer_end(p);
}

/* Prints the speed of a turn and the use of the context on stderr, in one line of a terminal of 80 columns. details: a
 * second line. Above 80 % of the context a warning follows. */
static void chat_stats_line(const struct chat *c, const struct turn_stats *st, bool details) {
    char a[32], line[256], remedy[160];
    const double use = (double)c->s->n_past / c->s->n_ctx;
    if (c->set->quiet || c->set->mute) return;
    int n = snprintf(line, sizeof line, "# %d tok", st->n_generated);
    if (st->n_generated && st->seconds > 0)
        n += snprintf(line + n, sizeof line - (size_t)n, " %.1f tok/s", st->n_generated / st->seconds);
    if (st->n_prompt && st->prompt_seconds > 0)
        n += snprintf(line + n, sizeof line - (size_t)n, " | prompt %s at %.0f tok/s",
                      with_commas((uint64_t)st->n_prompt, a), st->n_prompt / st->prompt_seconds);
    note("%s | context %.0f %% of %s", line, 100 * use, with_commas((uint64_t)c->s->n_ctx, a));
    if (details)
        note("# first token %.2f s | %.1f GB/s | context %s | logits #%08x", st->first_seconds,
             st->seconds > 0 ? st->bytes / st->seconds * 1e-9 : 0, with_commas((uint64_t)c->s->n_past, a),
             st->logit_hash);
    snprintf(line, sizeof line, "context %.0f %% full: %s", 100 * use, context_remedy(c->s, 0, remedy));
    if (use > 0.8 && c->s->n_past < c->s->n_ctx)    /* a full one has been reported */
        line_print(use > 0.95 ? "31" : "33", line); /* red, yellow */
}

/* Adds a turn to the totals. */
static void chat_count(struct chat *c, const struct turn_stats *st) {
    c->last = *st;
    c->turns++;
    c->total.n_prompt += st->n_prompt;
    c->total.n_generated += st->n_generated;
    c->total.prompt_seconds += st->prompt_seconds;
    c->total.seconds += st->seconds;
    c->total.bytes += st->bytes;
}

/* Returns how many of the ids precede the generation prompt: what a later turn's rendering has in
 * common with this one, even where the template drops the thinking of former answers. 0 where the session needs no
 * snapshot. */
static int chat_mark(struct chat *c, const struct text *text, const int32_t *ids) {
    const struct vocab *v = c->m->vocab;
    struct text messages = {0};
    char err[ERR_MAX];
    size_t common = 0, at = 0;
    int n = 0;
    if (!c->s->snapshot_size) return 0;
    if (!chat_render(c, false, &messages, err))
        while (common < arrlenu(messages.s) && common < arrlenu(text->s) && messages.s[common] == text->s[common])
            common++;
    text_free(&messages);
    if (arrlen(ids) && v->add_bos && ids[0] == v->bos) {
        const struct gguf_str bos = vocab_bytes(v, v->bos);
        if (arrlenu(text->s) < bos.n || memcmp(text->s, bos.p, bos.n)) n = 1; /* the text does not have it */
    }
    for (; n < arrlen(ids); n++) {
        at += vocab_bytes(v, ids[n]).n;
        if (at > common) break;
    }
    return n;
}

/* Says why an answer ended before the model was done. */
static void answer_report(const struct chat *c, const struct printer *p, const struct turn_stats *st) {
    char a[32], remedy[160];
    const char *thinking = p->thinking ? ", still thinking" : "";
    if (c->set->mute) return;
    if (st->why == STOP_INTERRUPT) note("[stopped%s]", thinking);
    if (st->why == STOP_LENGTH) note("[stopped after %d tokens (-n)%s]", st->n_generated, thinking);
    if (st->why == STOP_CONTEXT)
        note("[stopped%s: the context of %s tokens is full; %s]", thinking, with_commas((uint64_t)c->s->n_ctx, a),
             context_remedy(c->s, 0, remedy));
}

/* Generates, says why it ended, and remembers whether /continue can go on. */
static void answer_generate(struct chat *c, struct printer *p, struct turn_stats *st) {
    generate(c, p, st);
    watch_end();
    answer_report(c, p, st);
    c->open_past = st->why == STOP_INTERRUPT || st->why == STOP_LENGTH ? c->s->n_past : 0;
}

/* Generates an answer to the messages as they are and appends it, unless nothing was generated. err: the message of
 * TURN_FAILED. */
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
    watch_begin(c->keys);
    enum sync_result sync = session_sync(c->s, ids, (int)arrlen(ids), chat_mark(c, &text, ids), err);
    st.n_prompt = c->s->sync_tokens;
    st.n_cached = (int)arrlen(ids) - st.n_prompt;
    st.prompt_seconds = c->s->sync_seconds;
    if (sync == SYNC_INTERRUPTED) result = TURN_ROLLED_BACK;
    if (sync == SYNC_DONE) {
        if (opens) {
            sb_puts(&p.text, "<think>\n");
            p.printed = arrlenu(p.text);
        }
        size_t before = arrlenu(p.text);
        answer_generate(c, &p, &st);
        result = st.why == STOP_INTERRUPT ? TURN_STOPPED : TURN_DONE;
        if (st.why == STOP_INTERRUPT && arrlenu(p.text) == before) {
            result = TURN_ROLLED_BACK;
        } else {
            chat_push(c, "assistant", p.text, arrlenu(p.text));
            chat_count(c, &st);
            chat_stats_line(c, &st, c->set->verbose);
        }
    }
    watch_end();
    arrfree(p.text);
    arrfree(ids);
    text_free(&text);
    return result;
}

/* Appends a user's message and answers it. If that fails or is rolled back, the message is removed again. */
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

/* Replaces the last answer by a new one; *r is the result of that turn. Returns 0, or -1 with a message. */
static int chat_regenerate(struct chat *c, enum turn_result *r, char *err) {
    if (chat_last_is(c, "user")) { /* a loaded conversation may end so */
        *r = chat_answer(c, err);
        return 0;
    }
    if (!chat_last_is(c, "assistant")) return fail(err, "there is no message to answer");
    struct message old = arrpop(c->messages);
    *r = chat_answer(c, err);
    if (*r == TURN_FAILED || *r == TURN_ROLLED_BACK) {
        arrput(c->messages, old);
    } else {
        message_free(&old);
    }
    return 0;
}

/* Goes on with the last answer, which was stopped. Returns 0, or -1 with a message. */
static int chat_continue(struct chat *c, char *err) {
    int32_t *ids = NULL;
    struct turn_stats st = {0};
    if (!chat_last_is(c, "assistant") || !c->open_past || c->open_past != c->s->n_past)
        return fail(err, "no answer was stopped: /regen answers the last message again");
    char **content = &arrlast(c->messages).content;
    const char *open = strstr(*content, "<think>");
    struct printer p = printer_make(c, open && !strstr(open, "</think>"), false);
    sb_puts(&p.text, *content);
    p.printed = arrlenu(p.text);
    p.began = !p.thinking;
    for (int i = 0; i < c->s->n_past; i++) arrput(ids, c->s->tokens[i]);
    watch_begin(c->keys);
    const enum sync_result sync = session_sync(c->s, ids, (int)arrlen(ids), 0, err);
    if (sync == SYNC_DONE) {
        answer_generate(c, &p, &st);
        free(*content);
        *content = xstrndup(p.text, arrlenu(p.text));
        chat_count(c, &st);
        chat_stats_line(c, &st, c->set->verbose);
    }
    watch_end();
    arrfree(ids);
    arrfree(p.text);
    return sync == SYNC_FAILED ? -1 : 0;
}

/* Shortens the session to the tokens that the messages still have, so that nothing that was taken back is saved or
 * counted. */
static void chat_trim(struct chat *c) {
    char err[ERR_MAX];
    struct text text = {0};
    int32_t *ids = NULL;
    int keep = 0;
    if (arrlen(c->messages) && !chat_render(c, true, &text, err)) chat_tokenize(c, &text, &ids);
    while (keep < c->s->n_past && keep < arrlen(ids) && c->s->tokens[keep] == ids[keep]) keep++;
    session_truncate(c->s, keep);
    arrfree(ids);
    text_free(&text);
}

/* Returns the number of the last message of the user, counted from 1; 0: there is none. */
static size_t chat_last_question(const struct chat *c) {
    size_t n = arrlenu(c->messages);
    while (n && strcmp(c->messages[n - 1].role, "user")) n--;
    return n;
}

/* Replaces message `number` and everything after it by a message of the user, and answers that. If it fails or is rolled
 * back, the messages are as before. */
static enum turn_result chat_replace(struct chat *c, size_t number, const char *user, size_t n, char *err) {
    struct message *old = NULL;
    for (size_t i = number - 1; i < arrlenu(c->messages); i++) arrput(old, c->messages[i]);
    arrsetlen(c->messages, number - 1);
    const enum turn_result r = chat_turn(c, user, n, err);
    const bool back = r == TURN_FAILED || r == TURN_ROLLED_BACK;
    for (size_t i = 0; i < arrlenu(old); i++) {
        if (back) arrput(c->messages, old[i]);
        else message_free(&old[i]);
    }
    arrfree(old);
    return r;
}

/* Removes the last message of the user and everything after it. Returns 0, or -1 with a message. */
static int chat_undo(struct chat *c, char *err) {
    const size_t n = chat_last_question(c);
    if (!n) return fail(err, "there is nothing to undo");
    while (arrlenu(c->messages) >= n) chat_pop(c);
    chat_trim(c);
    return 0;
}

/* Changes an option. A new seed restarts the random numbers. Returns 0, or -1 with a message. */
static int chat_set(struct chat *c, const char *name, const char *value, char *err) {
    if (option_set(c->set, name, value, err)) return -1;
    if (!strcmp(name, "seed")) c->rng = settings_seed(c->set);
    return 0;
}

/* Sets or replaces the system message; NULL or "" removes it. */
static void chat_set_system(struct chat *c, const char *text) {
    bool has = arrlen(c->messages) && !strcmp(c->messages[0].role, "system"), want = text && *text;
    if (has && want) {
        free(c->messages[0].content);
        c->messages[0].content = xstrdup(text);
    } else if (has) {
        message_free(&c->messages[0]);
        arrdel(c->messages, 0);
    } else if (want) {
        struct message msg = {xstrdup("system"), xstrdup(text)};
        arrins(c->messages, 0, msg);
    }
}

/* Removes all messages but the system message. */
static void chat_clear(struct chat *c) {
    size_t keep = arrlen(c->messages) && !strcmp(c->messages[0].role, "system");
    while (arrlenu(c->messages) > keep) chat_pop(c);
    chat_trim(c);
}

/* ============================================================================================================
 * Chat: saved conversations
 *
 * /save and /load: NAME.jsonl (the messages, a JSON object a line) and NAME.kv (the state), in ~/.moe unless NAME has a
 * slash. The messages are what counts: a state that does not fit is computed again from them.
 * ============================================================================================================ */

/* Appends a path; a leading ~/ becomes the home directory. */
static void sb_path(char **sb, const char *name) {
    const char *home = getenv("HOME");
    bool at_home = home && !strncmp(name, "~/", 2);
    if (at_home) sb_puts(sb, home);
    sb_puts(sb, name + at_home);
}

/* Sets out to the path of a saved conversation's file and makes ~/.moe if needed. Returns 0, or -1 with a message. */
static int chat_path(const char *name, const char *suffix, char out[4096], char *err) {
    const char *home = getenv("HOME");
    int n = (int)strnlen(name, 4096);
    if (n > 6 && !strcmp(name + n - 6, ".jsonl")) n -= 6; /* the suffix may be given */
    if (!*name || !utf8_valid(name, strlen(name)) || strlen(name) > 1024)
        return fail(err, "the name must be 1 to 1024 bytes of UTF-8");
    if (strchr(name, '/')) {
        char *path = NULL;
        sb_path(&path, name);
        snprintf(out, 4096, "%.*s%s", (int)arrlen(path) - (int)strlen(name) + n, sb_cstr(&path), suffix);
        arrfree(path);
        return 0;
    }
    if (!home || !*home || strlen(home) > 2048) return fail(err, "HOME is not set: give a path with a slash");
    if (name[0] == '.') return fail(err, "the name must not start with a dot");
    snprintf(out, 4096, "%s/.moe", home);
    if (mkdir(out, 0700) && errno != EEXIST) return fail(err, "cannot make '%s': %s", out, strerror(errno));
    snprintf(out, 4096, "%s/.moe/%.*s%s", home, n, name, suffix);
    return 0;
}

/* Writes the messages to a temporary file. Returns 0, or -1 with a message. */
static int chat_save_messages(const struct chat *c, const char *path, char *err) {
    bool bad = false;
    FILE *f = temp_create(path, 0600, err);
    if (!f) return -1;
    fprintf(f, "{\"moe\":1,\"hash\":\"%016llx\"}\n", (unsigned long long)c->m->hash);
    for (size_t i = 0; i < arrlenu(c->messages); i++) {
        json_t *o = json_pack("{ssss}", "role", c->messages[i].role, "content", c->messages[i].content);
        bad |= !o || json_dumpf(o, f, JSON_COMPACT);
        fputc('\n', f);
        json_decref(o);
    }
    return temp_close(f, path, bad, err);
}

/* Writes the messages, and with `state` the state of the session: all files, or none. Returns 0, or -1 with a
 * message. */
static int chat_write(struct chat *c, const char *name, bool state, char *err) {
    char path[4096];
    bool bad = chat_path(name, ".jsonl", path, err) || chat_save_messages(c, path, err);
    if (!bad && state) bad = chat_path(name, ".kv", path, err) || session_save(c->s, path, err);
    if (!bad && !temp_commit(err)) return 0;
    temp_remove();
    return -1;
}

/* Saves the conversation under a name. Another conversation of that name is replaced only with `force`. Returns 0, or
 * -1 with a message. */
static int chat_save(struct chat *c, const char *name, bool force, char *err) {
    char path[4096];
    if (chat_path(name, ".jsonl", path, err)) return -1;
    if (!force && !access(path, F_OK) && (!c->name || strcmp(c->name, name)))
        return fail(err, "'%s' is another conversation: /save! %s replaces it", name, name);
    if (chat_write(c, name, true, err)) return -1;
    char *before = c->name;
    c->name = xstrdup(name);
    free(before);
    note("[saved %td message%s to %s]", arrlen(c->messages), arrlen(c->messages) == 1 ? "" : "s", path);
    return 0;
}

enum { LAST_STATE_MAX = 256 << 20 /* bytes of state that are written after every turn; more are at the end */ };

/* Saves the conversation for --continue, if it is one of those that are. at_end: the program exits. False, and once a
 * message, if it cannot be saved. */
static bool chat_autosave(struct chat *c, bool at_end) {
    static bool reported;
    char err[ERR_MAX], path[4096];
    const char *home = getenv("HOME");
    bool asked = false; /* an empty conversation does not replace the last one */
    for (size_t i = 0; i < arrlenu(c->messages); i++) asked |= !strcmp(c->messages[i].role, "user");
    if (!c->autosave || !home || !*home || !c->turns || !asked) return true;
    const bool same = c->saved_turns == c->turns && c->saved_messages == arrlen(c->messages);
    if (same && (c->saved_state || !at_end)) return true;
    const bool small = state_bytes(c->m, c->s->r->kv_type, (size_t)c->s->n_past) <= LAST_STATE_MAX;
    if (!small && !at_end && !chat_path(LAST_CHAT, ".kv", path, err)) unlink(path); /* it belongs to other messages */
    c->saved_turns = c->turns;
    c->saved_messages = arrlen(c->messages);
    c->saved_state = small || at_end;
    if (!chat_write(c, LAST_CHAT, c->saved_state, err)) return true;
    if (!reported) note("the conversation was not saved: %s", err);
    reported = true;
    return false;
}

/* Parses one line of the file; false if it is not a message. */
static bool chat_parse_line(const char *line, size_t n, struct message *out) {
    json_t *o = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL);
    const char *role = json_string_value(json_object_get(o, "role")),
               *content = json_string_value(json_object_get(o, "content"));
    bool ok = role && content && (!strcmp(role, "system") || !strcmp(role, "user") || !strcmp(role, "assistant"));
    if (ok) *out = (struct message){xstrdup(role), xstrdup(content)};
    json_decref(o);
    return ok;
}

/* Parses the text of a .jsonl file into *out. Returns 0, or -1 with a message that names the line; *out is then
 * empty. */
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
    if (!line) rc = fail(err, "the file is empty");
    for (; rc && arrlen(*out); (void)arrpop(*out)) message_free(&arrlast(*out));
    return rc;
}

/* Replaces the messages by those of a saved conversation. Without a usable KV cache the next turn computes all of them
 * again. Returns 0, or -1 with a message. */
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
    c->open_past = 0;
    c->saved_messages = -1;
    free(c->name);
    c->name = xstrdup(name);
    if (chat_path(name, ".kv", path, err)) return -1;
    if (!session_load(c->s, path, why)) return 0;
    if (access(path, F_OK)) snprintf(why, sizeof why, "no saved cache for '%.256s'", name);
    note("%s: the next turn processes the conversation again", why);
    return 0;
}

enum { SHOW_LINES = 12 /* of a message in a short view */ };

/* Prints the last n messages, without thinking. brief: only the beginning of a long one. */
static void chat_show(const struct chat *c, size_t n, bool brief) {
    const size_t all = arrlenu(c->messages);
    for (size_t i = n < all ? all - n : 0; i < all; i++) {
        const struct message *m = &c->messages[i];
        const char *think, *text = m->content;
        const bool user = strcmp(m->role, "assistant");
        size_t n_think, lines = 0, end = 0;
        char *safe = NULL;
        if (!user) text = split_answer(text, &think, &n_think);
        const size_t len = strlen(text);
        while (end < len && !(brief && lines == SHOW_LINES)) lines += text[end++] == '\n';
        term_escape(&safe, text, end);
        fprintf(stderr, "%s%s%s%s%s%s\n", term.color_err && user ? "\033[1m" : "", user ? "> " : "",
                !strcmp(m->role, "system") ? "(system) " : "", sb_cstr(&safe), end < len ? "..." : "",
                term.color_err && user ? "\033[0m" : "");
        arrfree(safe);
    }
}

/* Lists the saved conversations in ~/.moe by name. */
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
            term_escape(&safe, names[i]->d_name, (size_t)(dot - names[i]->d_name));
            strftime(when, sizeof when, "%Y-%m-%d %H:%M", localtime(&st.st_mtime));
            fprintf(stderr, "  %s  %8lld bytes  %s\n", when, (long long)st.st_size, sb_cstr(&safe));
            arrfree(safe);
            shown++;
        }
        free(names[i]);
    }
    free(names);
    if (n < 0) note("cannot read '%s': %s", path, strerror(errno));
    else if (!shown) note("nothing is saved in %s", path);
}

/* Prints how full the context is, what of it the next turn can use, the size of the cache, and the tokens of each
 * message. */
static void chat_print_context(struct chat *c) {
    char a[32], b[32], err[ERR_MAX];
    struct text text = {0};
    int32_t *ids = NULL;
    const struct session *s = c->s;
    const double use = (double)s->n_past / s->n_ctx,
                 bytes = (double)state_bytes(c->m, s->r->kv_type, (size_t)s->n_past);
    fprintf(stderr, "  [");
    for (int i = 0; i < 40; i++) fputc(i < (int)(use * 40 + 0.5) ? '#' : '.', stderr);
    fprintf(stderr, "] %s of %s tokens (%.0f %%)\n", with_commas((uint64_t)s->n_past, a),
            with_commas((uint64_t)s->n_ctx, b), 100 * use);
    fprintf(stderr, "  cache: %.1f of %.1f MiB (%s, %.0f bytes for one more token)\n", bytes / 0x1p20,
            (double)session_kv_bytes(s) / 0x1p20, kv_names[s->r->kv_type], (double)session_more_bytes(s, 1));
    if (arrlen(c->messages) && !chat_render(c, false, &text, err)) {
        int same = 0;
        chat_tokenize(c, &text, &ids);
        while (same < s->n_past && same < arrlen(ids) && s->tokens[same] == ids[same]) same++;
        fprintf(stderr, "  the next turn sends %s tokens before your message, %s of them from the cache\n",
                with_commas((uint64_t)arrlen(ids), a), with_commas((uint64_t)same, b));
    }
    arrfree(ids);
    text_free(&text);
    for (size_t i = 0; i < arrlenu(c->messages); i++) {
        ids = NULL;
        size_t n = strlen(c->messages[i].content);
        tokenize(c->m->vocab, c->messages[i].content, n, NULL, 0, &ids);
        fprintf(stderr, "  %-10s %7td tokens\n", c->messages[i].role, arrlen(ids));
        arrfree(ids);
    }
}

/* Prints the speed of the last turn and of all turns. */
static void chat_print_stats(struct chat *c) {
    const struct turn_stats *t = &c->total;
    if (!c->turns) {
        note("no turn yet");
        return;
    }
    chat_stats_line(c, &c->last, true);
    double tokens_per_s = t->seconds > 0 ? t->n_generated / t->seconds : 0;
    double bytes_per_s = t->seconds > 0 ? t->bytes / t->seconds : 0;
    fprintf(stderr, "  %d turn%s: %d prompt tokens in %.1f s, %d generated in %.1f s (%.1f tok/s, %.1f GB/s)\n",
            c->turns, c->turns == 1 ? "" : "s", t->n_prompt, t->prompt_seconds, t->n_generated, t->seconds,
            tokens_per_s, bytes_per_s * 1e-9);
}

/* ============================================================================================================
 * Edited text
 *
 * The text that is being typed, the texts that were cut from it and its former states. The section knows nothing of the
 * screen and of keys.
 *
 * Invariants: the text is valid UTF-8 without NUL and CR; the cursor is between two code points and never inside a
 * fold. A fold is a long paste that is shown as a short label. The cursor moves by units; a unit is a grapheme cluster,
 * a newline or a fold. After an edit the cursor may be inside a cluster, as when one half of a flag is typed before
 * another flag: the second half may follow.
 *
 * Positions are found by scanning from the start of the text. Folds keep that short.
 * ============================================================================================================ */

enum {
    FOLD_LINES = 8, /* a paste of more lines or more bytes becomes a fold */
    FOLD_BYTES = 400,
    CUTS_MAX = 16,        /* texts that Ctrl-Y and Alt-Y bring back */
    STEPS_MAX = 100,      /* states that undo brings back, */
    STEPS_BYTES = 4 << 20 /* and their bytes; the newest one is always kept */
};

/* A pasted part of the text that is shown as a label. */
struct fold {
    size_t at, len; /* bytes of the text */
    int lines;
};

/* A piece of text with its folds. */
struct passage {
    char *text;         /* stb_ds */
    struct fold *folds; /* stb_ds */
};

/* A state of the editor to which undo goes back. */
struct step {
    struct passage was;
    size_t cursor, history_at;
};

/* What a key did, as far as the next key depends on it. */
enum edit_action { ACTION_OTHER, ACTION_TYPED, ACTION_CUT, ACTION_YANKED };

struct editor {
    char *text;         /* stb_ds */
    size_t cursor;      /* byte offset into text */
    struct fold *folds; /* stb_ds */
    bool screen;        /* the terminal can move its cursor */
    /* Appends what Tab may put in place of line[*from .. cursor) to *candidates, in memory of its own; NULL: nothing. A
     * candidate that ends in a slash can be continued. */
    void (*complete)(const char *line, size_t cursor, char ***candidates, size_t *from);

    struct passage *cuts;          /* stb_ds: texts cut, the newest last */
    size_t yanked;                 /* the cut that was inserted last, */
    size_t yanked_at;              /* and where */
    struct step *steps;            /* stb_ds: former states, the newest last */
    bool chord;                    /* the key before this one was Ctrl-X */
    bool in_step;                  /* the newest of steps is the state before the present change */
    enum edit_action last, action; /* of the key before, and of this one */

    struct passage *history; /* stb_ds: oldest first */
    size_t history_at;       /* the entry that is being edited; arrlen(history): a new text */
    struct passage draft;    /* the new text, while a history entry is edited */
    char *history_path;      /* or NULL */

    struct keyboard keys;
    const char *prompt, *continuation; /* shown before the first line, before the other lines */
    int row;                           /* row of the cursor, counted from the first row that the last refresh drew */
    int top;  /* first row of the picture that is shown; above 0 if the text is taller than the screen */
    int cols; /* width at the last refresh, 0: none yet */
};

/* ---- passages ---- */

/* Returns a copy of the bytes [from, to) of a text and of the folds in it. */
static struct passage passage_copy(const char *text, const struct fold *folds, size_t from, size_t to) {
    struct passage p = {NULL, NULL};
    sb_put(&p.text, text + from, to - from);
    for (int i = 0; i < arrlen(folds); i++) {
        const struct fold f = {folds[i].at - from, folds[i].len, folds[i].lines};
        if (folds[i].at >= from && folds[i].at < to) arrput(p.folds, f);
    }
    return p;
}

static void passage_free(struct passage *p) {
    arrfree(p->text);
    arrfree(p->folds);
}

static bool passage_is(const struct passage *p, const char *s, size_t n) {
    return arrlenu(p->text) == n && (!n || !memcmp(p->text, s, n));
}

/* Appends q to p. */
static void passage_append(struct passage *p, const struct passage *q) {
    const size_t n = arrlenu(p->text);
    sb_put(&p->text, q->text, arrlenu(q->text));
    for (int i = 0; i < arrlen(q->folds); i++) {
        const struct fold f = {q->folds[i].at + n, q->folds[i].len, q->folds[i].lines};
        arrput(p->folds, f);
    }
}

/* Returns the lines of s (n). */
static int text_lines(const char *s, size_t n) {
    int lines = n && s[n - 1] != '\n';
    for (size_t i = 0; i < n; i++) lines += s[i] == '\n';
    return lines;
}

/* ---- units ---- */

/* Returns the fold that begins at pos, or NULL. */
static const struct fold *fold_at(const struct editor *e, size_t pos) {
    for (int i = 0; i < arrlen(e->folds); i++)
        if (e->folds[i].at == pos) return &e->folds[i];
    return NULL;
}

static bool newline_at(const struct editor *e, size_t pos) { return e->text[pos] == '\n' && !fold_at(e, pos); }

/* Returns the end of the unit that begins at pos. */
static size_t unit_next(const struct editor *e, size_t pos) {
    const struct fold *f = fold_at(e, pos);
    size_t end = arrlenu(e->text);
    if (f) return f->at + f->len;
    for (int i = 0; i < arrlen(e->folds); i++)
        if (e->folds[i].at > pos && e->folds[i].at < end) end = e->folds[i].at;
    return pos < end ? pos + cluster_bytes(e->text + pos, end - pos) : pos;
}

/* Returns the end of the unit that pos is in. */
static size_t unit_end(const struct editor *e, size_t pos) {
    size_t p = 0;
    while (p <= pos && p < arrlenu(e->text)) p = unit_next(e, p);
    return p;
}

/* Returns the beginning of the unit before pos. */
static size_t unit_prev(const struct editor *e, size_t pos) {
    size_t p = 0;
    for (size_t q = 0; q < pos; q = unit_next(e, p)) p = q;
    return p;
}

/* Returns the beginning of the line that pos is in. */
static size_t line_start(const struct editor *e, size_t pos) {
    size_t start = 0;
    for (size_t p = 0, q; p < pos; p = q) {
        q = unit_next(e, p);
        if (newline_at(e, p)) start = q;
    }
    return start;
}

/* Returns the end of the line that pos is in, before its newline. */
static size_t line_end(const struct editor *e, size_t pos) {
    while (pos < arrlenu(e->text) && !newline_at(e, pos)) pos = unit_next(e, pos);
    return pos;
}

/* Whether the unit at pos is part of a word: a run of letters and digits, or with `blanks` of anything but white
 * space. */
static bool word_at(const struct editor *e, size_t pos, bool blanks) {
    uint8_t c = (uint8_t)e->text[pos];
    return fold_at(e, pos) || c >= 0x80 || (blanks ? !isspace(c) : isalnum(c));
}

/* Returns the beginning of the last word that begins before pos. */
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

/* Returns the end of the first word that ends after pos. */
static size_t word_right(const struct editor *e, size_t pos) {
    size_t n = arrlenu(e->text);
    while (pos < n && !word_at(e, pos, false)) pos = unit_next(e, pos);
    while (pos < n && word_at(e, pos, false)) pos = unit_next(e, pos);
    return pos;
}

/* ---- changes ---- */

static struct step step_take(const struct editor *e) {
    return (struct step){passage_copy(e->text, e->folds, 0, arrlenu(e->text)), e->cursor, e->history_at};
}

static void steps_clear(struct editor *e) {
    for (int i = 0; i < arrlen(e->steps); i++) passage_free(&e->steps[i].was);
    arrsetlen(e->steps, 0);
}

/* Keeps the state before the first change of a step. Drops the oldest states if there are too many. */
static void edit_step(struct editor *e) {
    if (e->in_step) return;
    e->in_step = true;
    const struct step now = step_take(e);
    arrput(e->steps, now);
    size_t bytes = 0;
    int keep = 0, n = (int)arrlen(e->steps);
    for (; keep < n && keep < STEPS_MAX; keep++) {
        bytes += arrlenu(e->steps[n - 1 - keep].was.text);
        if (keep && bytes > STEPS_BYTES) break;
    }
    for (int i = 0; i < n - keep; i++) passage_free(&e->steps[i].was);
    if (keep < n) arrdeln(e->steps, 0, n - keep);
}

/* Inserts s (n) at the cursor and moves the cursor to its end. */
static void text_insert(struct editor *e, const char *s, size_t n) {
    if (!n) return;
    edit_step(e);
    arrinsn(e->text, e->cursor, n);
    memcpy(e->text + e->cursor, s, n);
    for (int i = 0; i < arrlen(e->folds); i++)
        if (e->folds[i].at >= e->cursor) e->folds[i].at += n;
    e->cursor += n;
}

/* Does the same with a passage. */
static void text_insert_passage(struct editor *e, const struct passage *p) {
    const size_t at = e->cursor;
    text_insert(e, p->text, arrlenu(p->text));
    for (int i = 0; i < arrlen(p->folds); i++) {
        const struct fold f = {p->folds[i].at + at, p->folds[i].len, p->folds[i].lines};
        arrput(e->folds, f);
    }
}

/* Removes [from, to) with the folds in it and puts the cursor there. */
static void text_delete(struct editor *e, size_t from, size_t to) {
    if (from == to) return;
    edit_step(e);
    arrdeln(e->text, from, to - from);
    for (int i = (int)arrlen(e->folds); i-- > 0;) {
        if (e->folds[i].at >= to) e->folds[i].at -= to - from;
        else if (e->folds[i].at >= from) arrdel(e->folds, i);
    }
    e->cursor = from;
}

/* Replaces the text by s (n), with the cursor at its end. */
static void text_set(struct editor *e, const char *s, size_t n) {
    text_delete(e, 0, arrlenu(e->text));
    text_insert(e, s, n);
}

/* Inserts the last paste at the cursor; a long one becomes a fold. */
static void text_insert_paste(struct editor *e) {
    const size_t n = arrlenu(e->keys.paste);
    const struct fold f = {e->cursor, n, text_lines(e->keys.paste, n)};
    text_insert(e, e->keys.paste, n);
    if (n > FOLD_BYTES || f.lines > FOLD_LINES) arrput(e->folds, f);
}

/* Swaps the two units before the cursor. */
static void text_swap(struct editor *e) {
    const size_t end = e->cursor, second = unit_prev(e, end), first = unit_prev(e, second);
    if (first == second) return;
    struct passage p = passage_copy(e->text, e->folds, first, second);
    text_delete(e, first, second);
    e->cursor = end - (second - first);
    text_insert_passage(e, &p);
    passage_free(&p);
}

/* Removes [from, to), which Ctrl-Y brings back. What keys in a row cut becomes one piece. */
static void text_cut(struct editor *e, size_t from, size_t to) {
    if (from == to) return;
    struct passage p = passage_copy(e->text, e->folds, from, to);
    e->action = ACTION_CUT;
    if (e->last == ACTION_CUT && arrlen(e->cuts)) {
        struct passage before = arrpop(e->cuts);
        const bool backward = from < e->cursor;
        struct passage *front = backward ? &p : &before, *back = backward ? &before : &p;
        passage_append(front, back);
        passage_free(back);
        p = *front;
    }
    arrput(e->cuts, p);
    if (arrlen(e->cuts) > CUTS_MAX) {
        passage_free(&e->cuts[0]);
        arrdel(e->cuts, 0);
    }
    text_delete(e, from, to);
}

/* Inserts the newest cut. `older`: puts the cut before it in place of the one that the last key inserted. */
static void text_yank(struct editor *e, bool older) {
    const size_t n = arrlenu(e->cuts);
    if (!n || (older && e->last != ACTION_YANKED)) return;
    e->yanked = older ? (e->yanked + n - 1) % n : n - 1;
    if (older) text_delete(e, e->yanked_at, e->cursor);
    e->yanked_at = e->cursor;
    text_insert_passage(e, &e->cuts[e->yanked]);
    e->action = ACTION_YANKED;
}

/* Whether the text is a block: it begins with """, and not as part of a fold. */
static bool text_is_block(const struct editor *e) {
    return arrlen(e->text) >= 3 && !memcmp(e->text, "\"\"\"", 3) && !fold_at(e, 0);
}

/* Returns why the text needs another line: '\\' if it ends in a backslash (an odd number of them), '"' if a block is
 * not closed, 0 if it is complete. */
static int text_continues(const struct editor *e) {
    size_t n = arrlenu(e->text), slashes = 0;
    if (text_is_block(e)) {
        while (isspace((uint8_t)e->text[n - 1])) n--;
        return n < 6 || memcmp(e->text + n - 3, "\"\"\"", 3) ? '"' : 0;
    }
    while (slashes < n && e->text[n - 1 - slashes] == '\\') slashes++;
    return slashes & 1 ? '\\' : 0;
}

/* Returns where the text that is sent begins, and in *n its length: a block loses its marks and the newlines next to
 * them. */
static size_t text_sent(const struct editor *e, size_t *n) {
    const char *s = e->text;
    *n = arrlenu(s);
    if (!text_is_block(e) || text_continues(e)) return 0;
    while (isspace((uint8_t)s[*n - 1])) --*n;
    *n -= 6;
    const size_t from = *n && s[3] == '\n' ? 4 : 3;
    *n -= from - 3;
    if (*n && s[from + *n - 1] == '\n') --*n;
    return from;
}

/* ============================================================================================================
 * History of texts
 *
 * The texts of former times, which Up, Down and Ctrl-R bring back, and undo, which brings back former states of the
 * text. A file keeps the history for later runs, without the folds and without very long texts.
 * ============================================================================================================ */

enum {
    HISTORY_MAX = 1000,       /* entries, in memory and in the file */
    HISTORY_ENTRY_MAX = 65536 /* bytes; a longer text does not enter the file */
};

/* Appends an entry, which it takes over, and drops the oldest if there are too many. An entry of many lines without a
 * fold becomes one, so that Up and Down soon get past it. */
static void history_put(struct editor *e, struct passage p) {
    const size_t n = arrlenu(p.text);
    const struct fold whole = {0, n, text_lines(p.text, n)};
    if (!arrlen(p.folds) && whole.lines > FOLD_LINES) arrput(p.folds, whole);
    arrput(e->history, p);
    if (arrlen(e->history) > HISTORY_MAX) {
        passage_free(&e->history[0]);
        arrdel(e->history, 0);
    }
}

/* Appends an entry as a line of the history file. Its newlines become CR, which no text contains. */
static void history_line(char **out, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) arrput(*out, s[i] == '\n' ? '\r' : s[i]);
    arrput(*out, '\n');
}

/* Reads the history file and rewrites it if it has more than HISTORY_MAX entries. Any content is accepted; a file that
 * cannot be read is an empty history. */
static void history_load(struct editor *e) {
    char *data = NULL, *tmp = NULL, err[ERR_MAX];
    struct stat st;
    size_t entries = 0, end;
    if (stat(e->history_path, &st) || !S_ISREG(st.st_mode) || st.st_size > (off_t)HISTORY_MAX * HISTORY_ENTRY_MAX)
        return;
    if (read_file(e->history_path, &data, err)) return;
    for (size_t at = 0; at < arrlenu(data); at = end + 1) {
        for (end = at; end < arrlenu(data) && data[end] != '\n'; end++) continue;
        if (end == at || end - at > HISTORY_ENTRY_MAX) continue;
        struct passage entry = {NULL, NULL};
        input_sanitize(&entry.text, data + at, end - at);
        history_put(e, entry);
        entries++;
    }
    arrsetlen(data, 0);
    sb_printf(&tmp, "%s.%d", e->history_path, (int)getpid());
    int fd = entries > HISTORY_MAX ? open(sb_cstr(&tmp), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        for (int i = 0; i < arrlen(e->history); i++)
            history_line(&data, e->history[i].text, arrlenu(e->history[i].text));
        bool whole = write(fd, data, arrlenu(data)) == (ssize_t)arrlen(data);
        if (close(fd) || !whole || rename(tmp, e->history_path)) unlink(tmp);
    }
    arrfree(data);
    arrfree(tmp);
}

/* Adds a text to the history, unless it is that of the last entry, with its folds if it is the text that was read last.
 * The file is opened for each entry and extended by
 * one write with O_APPEND, so that programs that run at the same time mix whole lines. If that fails, only the file
 * lacks the entry. */
static void editor_history_add(struct editor *e, const char *line, size_t n) {
    size_t sent_n;
    if (!n || (arrlen(e->history) && passage_is(&arrlast(e->history), line, n))) return;
    const size_t from = text_sent(e, &sent_n);
    const bool sent = sent_n == n && !memcmp(e->text + from, line, n);
    history_put(e, sent ? passage_copy(e->text, e->folds, from, from + n) : passage_copy(line, NULL, 0, n));
    if (!e->history_path || n > HISTORY_ENTRY_MAX) return;
    int fd = open(e->history_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
    if (fd < 0) return;
    char *data = NULL;
    history_line(&data, line, n);
    if (!fchmod(fd, 0600) && write(fd, data, arrlenu(data)) < 0) note("cannot write '%s'", e->history_path);
    arrfree(data);
    close(fd);
}

/* Replaces the text by a history entry. After the newest entry comes the draft. */
static void history_go(struct editor *e, size_t to) {
    const size_t n = arrlenu(e->history);
    edit_step(e);
    if ((e->history_at == n) != (to == n)) {
        const struct passage now = {e->text, e->folds};
        e->text = e->draft.text;
        e->folds = e->draft.folds;
        e->draft = now;
    }
    e->history_at = to;
    e->cursor = arrlenu(e->text);
    if (to == n) return;
    text_set(e, "", 0);
    text_insert_passage(e, &e->history[to]);
}

/* Goes to the next older (step -1) or newer (1) entry, if there is one. */
static void history_move(struct editor *e, int step) {
    if (step < 0 ? e->history_at > 0 : e->history_at < arrlenu(e->history)) history_go(e, e->history_at + (size_t)step);
}

/* Brings a state back. */
static void step_restore(struct editor *e, const struct step *s) {
    if (e->history_at != s->history_at) history_go(e, s->history_at);
    text_set(e, "", 0);
    text_insert_passage(e, &s->was);
    e->cursor = s->cursor;
}

/* Takes the last change back. */
static void text_undo(struct editor *e) {
    e->in_step = true; /* undo is no step of its own */
    for (bool same = true; same && arrlen(e->steps);) {
        struct step s = arrpop(e->steps);
        same = passage_is(&s.was, e->text, arrlenu(e->text));
        step_restore(e, &s);
        passage_free(&s.was);
    }
}

/* ============================================================================================================
 * Line editor
 *
 * Reads one text from the terminal, which may have several lines. The section does not know what a text means; the
 * caller passes a function that completes it.
 *
 * Every refresh computes the whole picture from the text, the cursor and the width, and draws it with one write(). All
 * that is remembered of the screen is the row of the cursor. If the terminal cannot move its cursor (TERM=dumb, or
 * stdout is redirected), lines are read as the terminal edits them.
 * ============================================================================================================ */

enum edit_result {
    EDIT_MORE = -1, /* the text is not finished; only within this section */
    EDIT_LINE,
    EDIT_EOF,
    EDIT_INTERRUPT
};

/* Prompt and text laid out in rows of `cols` columns. A row ends in two bytes. After a newline of the text they
 * are CR LF. Where the text wraps they are a space and CR: any terminal then steps to the next row and remembers that
 * the two rows are one line, for copying and for a resize. In a row with a cluster whose columns terminals count
 * differently they are CR LF too, and the cursor gets to its column by printing the row again: the terminal saves the
 * place on the way and goes back to it. The rest of the row is printed as well, because it may begin with a mark on what
 * stands before the cursor. */
struct picture {
    char *out;                  /* stb_ds: all rows, with escape sequences */
    size_t *rows;               /* stb_ds: offset of each row in out */
    const char *style;          /* SGR sequence of the current cells, or "" */
    int height, cols;           /* of the terminal */
    int row, col;               /* place of the next cell */
    bool vague;                 /* terminals disagree about a cell of this row: `col` is the most they give it */
    int cursor_row, cursor_col; /* place of the cursor, */
    size_t cursor_at;           /* and in out */
    bool cursor_vague;          /* its row is vague up to there */
    int goal_row, goal_col;     /* input: a place; goal_row -1: none */
    size_t goal; /* output: the position in the text nearest to that place in its row; SIZE_MAX: no such row */
};

/* Ends a row with the two bytes and begins the next. The style is repeated in every row, because a scrolled view may
 * begin at any row. */
static void picture_break(struct picture *p, const char two[static 2]) {
    if (*p->style) sb_puts(&p->out, "\033[0m");
    sb_put(&p->out, two, 2);
    arrput(p->rows, arrlenu(p->out));
    sb_puts(&p->out, p->style);
    p->row++;
    p->col = 0;
    p->vague = false;
}

/* Goes on in the next row, where the terminal does. In a row of which terminals disagree how far it reaches, the
 * program ends it. */
static void picture_wrap(struct picture *p) { picture_break(p, p->vague ? "\r\n" : " \r"); }

/* Begins a new row if a cell of this width does not fit, so that a wide character is not cut at the edge. */
static void picture_fit(struct picture *p, int width) {
    if (p->col + width <= p->cols || !p->col) return;
    for (; p->col < p->cols && !p->vague; p->col++) arrput(p->out, ' ');
    picture_wrap(p);
}

/* Appends one cluster s (n). */
static void picture_cell(struct picture *p, const char *s, size_t n) {
    bool vague = false;
    const int width = text_width(s, n, &vague);
    picture_fit(p, width);
    sb_put(&p->out, s, n);
    p->col += width;
    p->vague |= vague;
    if (p->col >= p->cols) picture_wrap(p);
}

/* Appends a prompt or label in a style. s: valid UTF-8 without control characters. */
static void picture_label(struct picture *p, const char *s, const char *style) {
    p->style = term.color_out ? style : "";
    sb_puts(&p->out, p->style);
    for (size_t left = strlen(s), n; left; s += n, left -= n) {
        n = cluster_bytes(s, left);
        picture_cell(p, s, n);
    }
    if (*p->style) sb_puts(&p->out, "\033[0m");
    p->style = "";
}

/* Appends the unit [from, to) of the text. Folds and control characters are shown as labels, so that nothing in the
 * text acts on the terminal. */
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
        picture_cell(p, (const char *)s, to - from);
    }
}

static void screen_size(int *rows, int *cols) {
    struct winsize w = {0};
    *rows = !ioctl(1, TIOCGWINSZ, &w) && w.ws_row ? w.ws_row : 24;
    *cols = w.ws_col ? w.ws_col : 80;
}

/* Lays out prompt and text for the present size of the terminal, and finds the places of the cursor and of the goal. */
static void picture_draw(const struct editor *e, struct picture *p) {
    size_t n = arrlenu(e->text), next;
    screen_size(&p->height, &p->cols);
    arrsetlen(p->out, 0);
    arrsetlen(p->rows, 0);
    arrput(p->rows, 0);
    p->row = p->col = 0;
    p->goal = SIZE_MAX;
    p->style = "";
    picture_label(p, e->prompt, "\033[1m");
    for (size_t at = 0;; at = next) {
        next = unit_next(e, at);
        if (at < n && !fold_at(e, at)) picture_fit(p, text_width(e->text + at, next - at, NULL));
        if (at <= e->cursor) {
            p->cursor_row = p->row;
            p->cursor_col = p->col;
            p->cursor_at = arrlenu(p->out);
            p->cursor_vague = p->vague;
        }
        if (p->row == p->goal_row && (p->goal == SIZE_MAX || p->col <= p->goal_col)) p->goal = at;
        if (at >= n) return;
        picture_unit(e, p, at, next);
    }
}

static void picture_free(struct picture *p) {
    arrfree(p->out);
    arrfree(p->rows);
}

/* Draws the picture again from its first row on. If it is taller than the screen, only the part around the cursor is
 * drawn. */
static void editor_refresh(struct editor *e) {
    struct picture p = {.goal_row = -1};
    char *out = NULL;
    picture_draw(e, &p);
    int rows = (int)arrlen(p.rows), height = p.height;
    if (e->top > rows - height) e->top = rows > height ? rows - height : 0;
    if (p.cursor_row < e->top) e->top = p.cursor_row;
    if (p.cursor_row >= e->top + height) e->top = p.cursor_row - height + 1;
    int last = rows > e->top + height ? e->top + height - 1 : rows - 1;
    /* A terminal with a new width has wrapped the old text again, so its cursor is in the row of the new picture. */
    if (e->cols && e->cols != p.cols) e->row = p.cursor_row - e->top;
    if (e->row >= height) e->row = height - 1;

    sb_puts(&out, "\033[?25l\r");
    if (e->row > 0) sb_printf(&out, "\033[%dA", e->row);
    sb_puts(&out, "\033[J");
    size_t from = p.rows[e->top], to = last == rows - 1 ? arrlenu(p.out) : p.rows[last + 1] - 2;
    sb_put(&out, p.out + from, to - from);
    if (last > p.cursor_row) sb_printf(&out, "\033[%dA", last - p.cursor_row);
    sb_puts(&out, "\r");
    if (p.cursor_vague) {
        const size_t end = p.cursor_row < rows - 1 ? p.rows[p.cursor_row + 1] - 2 : arrlenu(p.out);
        sb_put(&out, p.out + p.rows[p.cursor_row], p.cursor_at - p.rows[p.cursor_row]);
        sb_puts(&out, "\0337");
        sb_put(&out, p.out + p.cursor_at, end - p.cursor_at);
        sb_puts(&out, "\0338");
    } else if (p.cursor_col) {
        sb_printf(&out, "\033[%dC", p.cursor_col);
    }
    sb_puts(&out, "\033[?25h");
    write_all(1, out, arrlenu(out));
    e->row = p.cursor_row - e->top;
    e->cols = p.cols;
    arrfree(out);
    picture_free(&p);
}

/* Moves the cursor below the text, so that other output can follow. The next refresh begins there. */
static void editor_leave(struct editor *e) {
    e->cursor = arrlenu(e->text);
    editor_refresh(e);
    write_all(1, "\r\n", 2);
    e->row = e->top = e->cols = 0;
}

/* Moves the cursor one row up (step -1) or down (1), past the first and last row to other history entries. */
static void move_vertically(struct editor *e, int step) {
    struct picture p = {.goal_row = -1};
    picture_draw(e, &p);
    p.goal_row = p.cursor_row + step;
    p.goal_col = p.cursor_col;
    picture_draw(e, &p);
    if (p.goal_row >= 0 && p.goal != SIZE_MAX) e->cursor = p.goal;
    else history_move(e, step);
    picture_free(&p);
}

/* ============================================================================================================
 * Text in another program
 *
 * Reads files of text, and lets the user write one in the editor of $VISUAL or $EDITOR.
 * ============================================================================================================ */

enum { READ_MAX = 64 << 20 /* bytes of a file of text */ };

/* Appends a text file to *out. Returns 0, or -1 with a message if it is too large or not UTF-8 without NUL. */
static int read_text(const char *path, char **out, char *err) {
    struct stat st;
    if (file_check(path, &st, err)) return -1;
    if (st.st_size > READ_MAX)
        return fail(err, "'%s' is %lld MiB, at most %d MiB can be read", path, (long long)st.st_size >> 20,
                    READ_MAX >> 20);
    size_t at = arrlenu(*out);
    if (read_file(path, out, err)) return -1;
    size_t n = arrlenu(*out) - at;
    if (n && memchr(*out + at, 0, n)) return fail(err, "'%s' is not a text file: it holds a NUL byte", path);
    if (!utf8_valid(*out + at, n)) return fail(err, "'%s' is not valid UTF-8", path);
    return 0;
}

/* Runs the user's editor on text (n). Appends what it saved to *out, without white space at its end. Returns 0, or -1
 * with a message. Then the message names the file if it holds another text than before. */
static int external_edit(const char *text, size_t n, char **out, char *err) {
    const char *visual = getenv("VISUAL"), *editor = getenv("EDITOR");
    const char *name = visual && *visual ? visual : editor && *editor ? editor : "vi";
    char *raw = NULL, *command = NULL, *path = temps[n_temps].path, why[ERR_MAX];
    strcpy(path, "/tmp/moe-XXXXXX.md");
    int fd = mkostemps(path, 3, O_CLOEXEC); /* mode 0600 */
    if (fd < 0) return fail(err, "cannot make a file in /tmp: %s", strerror(errno));
    n_temps++;
    write_all(fd, text, n);
    close(fd);
    sb_printf(&command, "%s %s", name, path);
    term_restore();
    struct termios mode; /* of the terminal, in case the editor changes it */
    const bool known = !tcgetattr(0, &mode);
    const int status = system(sb_cstr(&command));
    if (known) tcsetattr(0, TCSADRAIN, &mode);
    int rc = read_text(path, &raw, why);
    const bool same = rc ? access(path, F_OK) != 0 : arrlenu(raw) == n && (!n || !memcmp(raw, text, n));
    if (status) rc = fail(why, "'%s' failed with status %d", name, WIFEXITED(status) ? WEXITSTATUS(status) : status);
    if (rc && same) fail(err, "%s", why);
    else if (rc) fail(err, "the text is kept in %s: %s", path, why);
    if (rc && !same) n_temps--;
    temp_remove();
    if (!rc) input_sanitize(out, raw, arrlenu(raw));
    while (arrlen(*out) && isspace((uint8_t)arrlast(*out))) (void)arrpop(*out);
    arrfree(raw);
    arrfree(command);
    return rc;
}

/* ============================================================================================================
 * Line editor: keys
 *
 * What each key does, completion, the search of the history, and the loop that reads a text.
 * ============================================================================================================ */

enum { LIST_ROWS = 20 /* of candidates that Tab lists at most */ };

/* Prints texts in columns, without the first `shared` bytes, which all have in common. */
static void editor_list(char *const *names, size_t shared) {
    char *out = NULL, **shown = NULL;
    int *widths = NULL, width = 0, height, cols;
    const int n = (int)arrlen(names);
    for (int i = 0; i < n; i++) {
        char *safe = NULL;
        term_escape(&safe, names[i] + shared, strlen(names[i]) - shared);
        const int w = text_width(safe, arrlenu(safe), NULL);
        arrput(widths, w);
        arrput(shown, safe);
        width = int_max(width, w);
    }
    screen_size(&height, &cols);
    const int across = int_max(1, (cols + 1) / (width + 2)), rows = int_min((n + across - 1) / across, LIST_ROWS);
    for (int row = 0; row < rows; row++) {
        for (int i = row, gap = 0; i < n && i < rows * across; i += rows) {
            for (; gap > 0; gap--) arrput(out, ' ');
            sb_put(&out, shown[i], arrlenu(shown[i]));
            gap = width + 2 - widths[i];
        }
        sb_puts(&out, "\r\n");
    }
    if (n > rows * across) sb_printf(&out, "... and %d more\r\n", n - rows * across);
    write_all(1, out, arrlenu(out));
    for (int i = 0; i < n; i++) arrfree(shown[i]);
    arrfree(shown);
    arrfree(widths);
    arrfree(out);
}

static int text_compare(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Completes the text before the cursor as far as all candidates agree. If that adds nothing, lists them, without the
 * directory that they share. */
static void editor_complete(struct editor *e) {
    char **found = NULL;
    size_t from = 0, common = 0, shared = 0, at = e->cursor;
    if (e->complete) e->complete(sb_cstr(&e->text), at, &found, &from);
    const size_t n = arrlenu(found);
    if (n) {
        qsort(found, n, sizeof *found, text_compare);
        const char *first = found[0], *last = found[n - 1];
        while (first[common] && first[common] == last[common]) common++;
        while (((uint8_t)first[common] & 0xc0) == 0x80) common--; /* to the start of a code point */
        const bool adds = common > at - from;
        if (adds || n == 1) {
            text_delete(e, from, at);
            text_insert(e, first, common);
        }
        if (n == 1 && first[common - 1] != '/') text_insert(e, " ", 1);
        for (size_t i = 1; i < common; i++)
            if (first[i] == '/') shared = i + 1;
        if (n > 1 && !adds) {
            editor_leave(e);
            editor_list(found, shared);
            e->cursor = at;
        }
    }
    for (size_t i = 0; i < n; i++) free(found[i]);
    arrfree(found);
}

/* Searches the history (Ctrl-R) for the newest entry that contains what is typed. Ctrl-R again finds an older one.
 * Ctrl-C and Ctrl-G bring back the text from before the search, as does Enter where no entry matches. Any other key ends
 * the search and then acts on the text that is shown. */
static void editor_search(struct editor *e) {
    const char *prompt = e->prompt;
    char *query = NULL, *shown = NULL;
    struct step before = step_take(e);
    bool missed = false;
    int key, at = (int)arrlen(e->history);
    for (;;) {
        arrsetlen(shown, 0);
        sb_puts(&shown, missed ? "(no match '" : "(search '");
        term_escape(&shown, query, arrlenu(query));
        sb_puts(&shown, "') ");
        e->prompt = sb_cstr(&shown);
        editor_refresh(e);
        key = key_read(&e->keys);
        int from = at;
        if (key == KEY_REDRAW) {
            term_raw(&e->keys);
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
        const size_t n = arrlenu(query);
        if (!n) at = (int)arrlen(e->history);
        while (n && from >= 0 && !memmem(e->history[from].text, arrlenu(e->history[from].text), query, n)) from--;
        if (n && from >= 0) history_go(e, (size_t)(at = from));
        else if (key != CONTROL('R')) step_restore(e, &before);
        if (key != CONTROL('R')) missed = n && from < 0;
    }
    if (key == CONTROL('C') || key == CONTROL('G')) step_restore(e, &before);
    else if (key != '\r' || !missed) e->keys.pushed = key;
    e->prompt = prompt;
    arrfree(query);
    arrfree(shown);
    passage_free(&before.was);
}

/* Stops the program (Ctrl-Z) and continues after SIGCONT. */
static void editor_suspend(struct editor *e) {
    size_t at = e->cursor;
    editor_leave(e);
    term_restore();
    kill(0, SIGTSTP); /* the whole job, as the terminal does it */
    term_raw(&e->keys);
    e->cursor = at;
}

/* Edits the text in another program (Ctrl-X Ctrl-E). */
static void editor_external(struct editor *e) {
    const size_t at = e->cursor, n = arrlenu(e->text);
    char *text = NULL, err[ERR_MAX];
    editor_leave(e);
    e->cursor = at;
    if (external_edit(e->text, n, &text, err)) note("%s", err);
    else if (arrlenu(text) != n || (n && memcmp(text, e->text, n) != 0)) text_set(e, text, arrlenu(text));
    arrfree(text);
    term_raw(&e->keys);
}

/* Handles Enter: ends the text, or begins a new line after a backslash (which is removed) and in an open block. */
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

/* Begins a new step of undo, unless the key goes on with a word that is being typed. Returns the key, after Ctrl-X what
 * both together stand for. */
static int editor_key_begin(struct editor *e, int key) {
    if (e->chord && key == CONTROL('U')) key = CONTROL('_');
    if (e->chord && key == CONTROL('E')) key = KEY_EXTERNAL;
    e->chord = e->chord && key == KEY_REDRAW;
    const bool typed = key >= 32 && key != 127 && key < KEY_NONE;
    const bool blank = e->cursor && isspace((uint8_t)e->text[e->cursor - 1]);
    e->last = e->action;
    e->in_step = typed && e->last == ACTION_TYPED && (!blank || key == ' ');
    e->action = typed ? ACTION_TYPED : ACTION_OTHER;
    return key;
}

/* Acts on a key. */
static enum edit_result editor_key(struct editor *e, int key) {
    size_t n = arrlenu(e->text), at = e->cursor, to;
    char s[4];
    switch (key = editor_key_begin(e, key)) {
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
    case CONTROL('F'): e->cursor = unit_end(e, at); break;
    case KEY_UP:
    case CONTROL('P'): move_vertically(e, -1); break;
    case KEY_DOWN:
    case CONTROL('N'): move_vertically(e, 1); break;
    case KEY_WORD_LEFT: e->cursor = word_left(e, at, false); break;
    case KEY_WORD_RIGHT: e->cursor = word_right(e, at); break;
    case CONTROL('D'):
        if (!n) return EDIT_EOF;
        __attribute__((fallthrough));
    case KEY_DELETE: text_delete(e, at, unit_end(e, at)); break;
    case 127:
    case CONTROL('H'): text_delete(e, unit_prev(e, at), at); break;
    case CONTROL('K'): /* at the end of a line: the newline */
        to = line_end(e, at);
        text_cut(e, at, to == at ? unit_next(e, at) : to);
        break;
    case CONTROL('U'): text_cut(e, line_start(e, at), at); break;
    case CONTROL('W'): text_cut(e, word_left(e, at, true), at); break;
    case KEY_WORD_RUBOUT: text_cut(e, word_left(e, at, false), at); break;
    case KEY_WORD_DELETE: text_cut(e, at, word_right(e, at)); break;
    case CONTROL('Y'): text_yank(e, false); break;
    case KEY_YANK_OLDER: text_yank(e, true); break;
    case CONTROL('T'): text_swap(e); break;
    case CONTROL('_'): text_undo(e); break;
    case CONTROL('X'): e->chord = true; break;
    case KEY_EXTERNAL: editor_external(e); break;
    case CONTROL('C'):
        if (!n) return EDIT_INTERRUPT;
        text_set(e, "", 0);
        e->history_at = arrlenu(e->history);
        break;
    case CONTROL('L'):
        write_all(1, "\033[H\033[2J", 7);
        e->row = 0;
        break;
    case CONTROL('R'): editor_search(e); break;
    case CONTROL('Z'): editor_suspend(e); break;
    case KEY_REDRAW: term_raw(&e->keys); break;
    default:
        if (key >= 32 && key < KEY_NONE) text_insert(e, s, (size_t)utf8proc_encode_char(key, (uint8_t *)s));
    }
    return EDIT_MORE;
}

/* Reads lines as the terminal itself edits them. The prompt goes to stdout or stderr, whichever is a terminal. */
static enum edit_result editor_read_plain(struct editor *e) {
    const char *prompt = e->prompt;
    for (;;) {
        char *line = NULL;
        int c;
        if (term.in_tty && (term.out_tty || term.err_tty)) write_all(term.out_tty ? 1 : 2, prompt, strlen(prompt));
        while ((c = input_byte(&e->keys, -1)) != '\n' && c != BYTE_EOF && !(c == BYTE_WAKE && interrupted))
            if (c >= 0) arrput(line, (char)c);
        if (arrlen(line) && arrlast(line) == '\r') (void)arrpop(line);
        input_sanitize(&e->text, line, arrlenu(line));
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

/* Reads a text key by key in raw mode. Keys that have already arrived are handled before the screen is drawn. */
static enum edit_result editor_read_screen(struct editor *e) {
    static const int signals[2] = {SIGWINCH, SIGCONT};
    struct sigaction sa = {.sa_handler = wake_up, .sa_flags = SA_RESTART}, old[2];
    enum edit_result r;
    for (int i = 0; i < 2; i++) sigaction(signals[i], &sa, &old[i]);
    term_raw(&e->keys);
    if (interrupted) { /* acts before the keys taken over: they came later, Ctrl-C drops those in front of it */
        interrupted = 0;
        e->keys.pushed = CONTROL('C');
    }
    do {
        if (!e->keys.pushed && e->keys.in_at == arrlenu(e->keys.in) && !input_ready()) editor_refresh(e);
        r = editor_key(e, key_read(&e->keys));
    } while (r == EDIT_MORE);
    if (r != EDIT_EOF) editor_leave(e);
    for (int i = 0; i < 2; i++) sigaction(signals[i], &old[i], NULL);
    return r;
}

/* Reads one text into *line, which is empty unless the result is EDIT_LINE. `prompt` is shown before its first line,
 * `continuation` before the others. EDIT_EOF leaves the cursor after the prompt, the other results at the start of a
 * row. */
static enum edit_result editor_read(struct editor *e, const char *prompt, const char *continuation, char **line) {
    fflush(stdout);
    text_set(e, "", 0);
    steps_clear(e);
    e->history_at = arrlenu(e->history);
    e->prompt = prompt;
    e->continuation = continuation;
    e->row = e->top = e->cols = 0;
    enum edit_result r = e->screen ? editor_read_screen(e) : editor_read_plain(e);
    arrsetlen(*line, 0);
    size_t n;
    const size_t from = text_sent(e, &n);
    if (r == EDIT_LINE) sb_put(line, e->text + from, n);
    return r;
}

/* Prepares an editor and reads the history. history_path: the history file, NULL: none. */
static void editor_init(struct editor *e, const char *history_path) {
    const char *t = getenv("TERM");
    memset(e, 0, sizeof *e);
    e->screen = term.in_tty && term.out_tty && !term.simple && t && *t && strcmp(t, "dumb");
    wake_open();
    if (!history_path) return;
    e->history_path = xstrdup(history_path);
    history_load(e);
}

static void editor_free(struct editor *e) {
    for (int i = 0; i < arrlen(e->history); i++) passage_free(&e->history[i]);
    for (int i = 0; i < arrlen(e->cuts); i++) passage_free(&e->cuts[i]);
    steps_clear(e);
    arrfree(e->history);
    arrfree(e->cuts);
    arrfree(e->steps);
    arrfree(e->text);
    arrfree(e->folds);
    passage_free(&e->draft);
    arrfree(e->keys.in);
    arrfree(e->keys.paste);
    free(e->history_path);
    memset(e, 0, sizeof *e);
}

/* ============================================================================================================
 * REPL commands
 *
 * The interactive dialogue: prompt, commands and signal handlers. A line is a message unless it begins with a slash. A
 * slash that names no command is an error and never reaches the model. Everything but answers goes to stderr. The
 * section uses the conversation only through chat_* and the options only through option_*. It is over 450 lines because
 * the table of commands and their functions stand together.
 * ============================================================================================================ */

/* ---- signals ---- */

/* SIGINT. The first asks the running work to stop at its next token or chunk; a second one within a second ends the
 * program. */
static void signal_interrupt(int sig) {
    static double last;
    double now = now_seconds();
    if (interrupted && now - last < 1.0) {
        const ssize_t done = term.status ? write(2, "\n", 1) : 0;
        (void)done;
        term_restore();
        temp_remove();
        _exit(EXIT_INTERRUPT);
    }
    last = now;
    interrupted++;
    wake_up(sig);
}

/* SIGTERM, SIGHUP: ends the program without saving. The exit code is the shell's convention. */
static void signal_end(int sig) {
    term_restore();
    temp_remove();
    _exit(128 + sig);
}

/* Signals that end the program by default: restores the terminal, then does the same. */
static void signal_default(int sig) {
    term_restore();
    temp_remove();
    signal(sig, SIG_DFL);
    raise(sig);
}

/* Crashes are errors of the program: it prints a line and ends as by default. */
static void signal_crash(int sig) {
    const char *name = sigabbrev_np(sig);
    char line[64] = "moe: internal error: SIG";
    ssize_t done;
    term_restore();
    temp_remove();
    strcat(strcat(line, name ? name : ""), "\n");
    done = write(2, line, strlen(line));
    (void)done;
    signal_default(sig);
}

/* Installs the handlers. A signal that the parent process ignores (nohup, a shell without job control) stays ignored,
 * except SIGINT if stdin is a terminal. SIGPIPE always has its default, so that `moe | head` ends silently with status
 * 141. */
static void signals_install(void) {
    static const struct {
        int sig;
        void (*fn)(int);
    } table[] = {{SIGINT, signal_interrupt}, {SIGTERM, signal_end},     {SIGHUP, signal_end},
                 {SIGSEGV, signal_crash},    {SIGBUS, signal_bus},      {SIGFPE, signal_crash},
                 {SIGILL, signal_crash},     {SIGABRT, signal_crash},   {SIGQUIT, signal_default},
                 {SIGUSR1, signal_default},  {SIGUSR2, signal_default}, {SIGALRM, signal_default},
                 {SIGXCPU, signal_default}};
    signal(SIGXFSZ, SIG_IGN); /* write() then returns an error at the limit of file sizes */
    static char stack[65536]; /* for handlers, which must run even after a stack overflow */
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
    bool hinted; /* how to exit has been said */
    bool force;  /* the command was given with an exclamation mark */
};

/* An entry of the table of commands, which the parser, /help and Tab completion use. */
struct command {
    const char *name;
    const char *arg; /* what /help shows for the argument; NULL: takes none, in brackets: optional; ! in front: the name
                        may end in an exclamation mark, which replaces what is there */
    const char *help;
    /* Runs the command. arg: trimmed, "" if there is none; may be changed. Returns 0, COMMAND_QUIT, or -1 with a
     * message. */
    int (*fn)(struct repl *r, char *arg, char *err);
};

enum { COMMAND_QUIT = 1 }; /* result of /quit */

static void repl_complete(const char *line, size_t cursor, char ***candidates, size_t *from);

/* Prints a session error in its own line, red on a terminal. */
static void print_error(const char *err) { line_print("31", err); }

/* Reports a turn that failed or was rolled back, and once that stdout cannot be written. */
static void turn_report(enum turn_result result, const char *err) {
    static bool reported;
    char lost[ERR_MAX];
    if (term.out_error && !reported) {
        fail(lost, "cannot write to stdout: %s; the answers are lost", strerror(term.out_error));
        print_error(lost);
        reported = true;
    }
    if (result == TURN_ROLLED_BACK) note("[stopped before the answer; your message was removed (Up brings it back)]");
    if (result == TURN_FAILED) print_error(err);
}

/* Sends a message and reports the result. */
static void repl_send(struct repl *r, const char *text, size_t n) {
    char err[ERR_MAX] = "";
    turn_report(chat_turn(r->chat, text, n, err), err);
}

/* Returns the length of the word at s; *rest is what follows the word and white space. */
static size_t split_word(char *s, char **rest) {
    size_t n = strcspn(s, " \t\n");
    *rest = s + n + strspn(s + n, " \t\n");
    return n;
}

/* Appends a file as it appears in a message: its name, then its text in a fence longer than any run of backticks in
 * it. */
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

/* Changes an option. Without a value prints it; without a name prints all. Returns 0, or -1 with a message. */
static int option_command(struct repl *r, const char *name, const char *value, char *err) {
    if (*value && chat_set(r->chat, name, value, err)) return -1;
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

static int cmd_think(struct repl *r, char *arg, char *err) { return option_command(r, "think", arg, err); }

/* Prints the conversation, or the last messages of it. */
static int cmd_show(struct repl *r, char *arg, char *err) {
    char *end;
    const long n = *arg ? strtol(arg, &end, 10) : LONG_MAX;
    if (*arg && (*end || n < 1)) return fail(err, "'%s': expected a number of messages", arg);
    if (!arrlen(r->chat->messages)) note("[no messages]");
    chat_show(r->chat, (size_t)n, false);
    return 0;
}

/* Replaces the system message; without an argument prints it. */
static int cmd_system(struct repl *r, char *arg, char *err) {
    const struct message *m = r->chat->messages;
    (void)err;
    if (*arg) {
        bool none = !strcmp(arg, "\"\"");
        chat_set_system(r->chat, none ? NULL : arg);
        chat_trim(r->chat);
        note(none ? "[system message removed]" : "[system message set]");
        return 0;
    }
    if (!arrlen(m) || strcmp(m[0].role, "system")) {
        note("[no system message]");
        return 0;
    }
    note("%s", m[0].content);
    return 0;
}

/* Sends TEXT, an empty line and a file. The file name may be in double quotes and may begin with ~/. */
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

/* Shows a message that was not typed behind the prompt as if it had been; of a long one the beginning. */
static void print_sent(const struct editor *e, const char *text, size_t n) {
    enum { ROWS = 20 };
    char *safe = NULL;
    const int lines = text_lines(text, n);
    term_escape(&safe, text, n);
    const char *s = sb_cstr(&safe);
    for (int i = 0; i < lines && i < ROWS; i++) {
        const int len = (int)strcspn(s, "\n");
        fprintf(stderr, "%s%.*s\n", i ? e->continuation : e->prompt, len, s);
        s += len + 1;
    }
    if (lines > ROWS) note("... and %d more line%s", lines - ROWS, lines - ROWS == 1 ? "" : "s");
    arrfree(safe);
}

/* Opens $VISUAL or $EDITOR with the argument as text, with /edit! the last message of the user. Sends the result, unless
 * the editor failed or the text is empty; with /edit! it replaces that message and what followed. */
static int cmd_edit(struct repl *r, char *arg, char *err) {
    struct chat *c = r->chat;
    char *text = NULL;
    const size_t last = chat_last_question(c);
    if (r->force && *arg) return fail(err, "/edit! takes no argument");
    if (r->force && !last) return fail(err, "there is no message to edit");
    const char *old = r->force ? c->messages[last - 1].content : arg;
    const int rc = external_edit(old, strlen(old), &text, err);
    const size_t n = arrlenu(text);
    if (!rc && !n) note("[empty message, not sent]");
    if (!rc && n) {
        editor_history_add(&r->editor, text, n);
        print_sent(&r->editor, text, n);
        if (r->force) turn_report(chat_replace(c, last, sb_cstr(&text), n, err), err);
        else repl_send(r, sb_cstr(&text), n);
    }
    arrfree(text);
    return rc;
}

static int cmd_undo(struct repl *r, char *arg, char *err) {
    (void)arg;
    if (chat_undo(r->chat, err)) return -1;
    note("[last turn removed]");
    return 0;
}

static int cmd_regen(struct repl *r, char *arg, char *err) {
    enum turn_result result = TURN_DONE;
    (void)arg;
    if (chat_regenerate(r->chat, &result, err)) return -1;
    turn_report(result, err);
    return 0;
}

static int cmd_save(struct repl *r, char *arg, char *err) { return chat_save(r->chat, arg, r->force, err); }

/* Says where a conversation that was loaded is. */
static void repl_loaded(const struct chat *c) {
    const ptrdiff_t n = arrlen(c->messages);
    chat_show(c, 2, true);
    note("[loaded %td message%s%s]", n, n == 1 ? "" : "s", chat_last_is(c, "user") ? "; /regen answers the last" : "");
}

static int cmd_load(struct repl *r, char *arg, char *err) {
    if (chat_load(r->chat, arg, err)) return -1;
    repl_loaded(r->chat);
    return 0;
}

/* Removes the files of a saved conversation. */
static int cmd_delete(struct repl *r, char *arg, char *err) {
    char path[4096];
    (void)r;
    if (chat_path(arg, ".jsonl", path, err)) return -1;
    if (unlink(path)) return fail(err, "cannot delete '%s': %s", path, strerror(errno));
    if (!chat_path(arg, ".kv", path, err)) unlink(path);
    note("[deleted %s]", arg);
    return 0;
}

/* Gives the conversation, which has been saved or loaded, another name. */
static int cmd_rename(struct repl *r, char *arg, char *err) {
    static const char *const suffixes[] = {".kv", ".jsonl"};
    char from[4096], to[4096];
    const char *name = r->chat->name;
    if (!name) return fail(err, "the conversation has no name: /save NAME");
    if (chat_path(arg, ".jsonl", to, err)) return -1;
    if (!access(to, F_OK)) return fail(err, "'%s' is another conversation", arg);
    for (int i = 0; i < 2; i++) {
        if (chat_path(name, suffixes[i], from, err) || chat_path(arg, suffixes[i], to, err)) return -1;
        if (rename(from, to) && (i || errno != ENOENT))
            return fail(err, "cannot rename '%s': %s", from, strerror(errno));
    }
    note("[renamed %s to %s]", name, arg);
    free(r->chat->name);
    r->chat->name = xstrdup(arg);
    return 0;
}

/* Writes the conversation as Markdown. */
static int cmd_export(struct repl *r, char *arg, char *err) {
    const struct chat *c = r->chat;
    char *path = NULL;
    sb_path(&path, arg);
    FILE *f = access(sb_cstr(&path), F_OK) || r->force ? temp_create(path, 0600, err) : NULL;
    int rc = f ? 0 : access(path, F_OK) || r->force ? -1 : fail(err, "'%s' exists: /export! replaces it", path);
    for (size_t i = 0; !rc && i < arrlenu(c->messages); i++) {
        const struct message *m = &c->messages[i];
        const char *think, *text = m->content;
        size_t n;
        if (!strcmp(m->role, "assistant")) text = split_answer(text, &think, &n);
        fprintf(f, "%s## %c%s\n\n%s\n", i ? "\n" : "", toupper(m->role[0]), m->role + 1, text);
    }
    if (f) rc = temp_finish(f, path, false, err);
    if (!rc) note("[wrote %td message%s to %s]", arrlen(c->messages), arrlen(c->messages) == 1 ? "" : "s", path);
    arrfree(path);
    return rc;
}

/* Puts the last answer into the clipboard of the terminal (OSC 52). */
static int cmd_copy(struct repl *r, char *arg, char *err) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *think;
    size_t n_think;
    char *out = NULL;
    (void)arg;
    if (!chat_last_is(r->chat, "assistant")) return fail(err, "there is no answer to copy");
    if (!r->editor.screen) return fail(err, "/copy needs a terminal");
    const uint8_t *s = (const uint8_t *)split_answer(arrlast(r->chat->messages).content, &think, &n_think);
    const size_t n = strlen((const char *)s);
    sb_puts(&out, "\033]52;c;");
    for (size_t i = 0; i < n; i += 3) {
        const uint32_t w =
            (uint32_t)s[i] << 16 | (i + 1 < n ? (uint32_t)s[i + 1] << 8 : 0) | (i + 2 < n ? s[i + 2] : 0);
        const char four[4] = {digits[w >> 18], digits[w >> 12 & 63], i + 1 < n ? digits[w >> 6 & 63] : '=',
                              i + 2 < n ? digits[w & 63] : '='};
        sb_put(&out, four, 4);
    }
    sb_puts(&out, "\a");
    write_all(1, out, arrlenu(out));
    arrfree(out);
    note("[copied %zu bytes, if the terminal allows it]", n);
    return 0;
}

static int cmd_continue(struct repl *r, char *arg, char *err) {
    (void)arg;
    return chat_continue(r->chat, err);
}

static int cmd_list(struct repl *r, char *arg, char *err) {
    (void)arg;
    (void)err;
    chat_list(r->chat);
    return 0;
}

static int cmd_ctx(struct repl *r, char *arg, char *err) {
    (void)arg;
    (void)err;
    chat_print_context(r->chat);
    return 0;
}

static int cmd_stats(struct repl *r, char *arg, char *err) {
    (void)arg;
    (void)err;
    chat_print_stats(r->chat);
    return 0;
}

static int cmd_clear(struct repl *r, char *arg, char *err) {
    (void)arg;
    (void)err;
    chat_clear(r->chat);
    free(r->chat->name);
    r->chat->name = NULL;
    note("[conversation cleared; the system message stays]");
    return 0;
}

static int cmd_quit(struct repl *r, char *arg, char *err) {
    (void)r;
    (void)arg;
    (void)err;
    return COMMAND_QUIT;
}

static int cmd_help(struct repl *r, char *arg, char *err);

static const struct command commands[] = {
    {"help", "[COMMAND]", "list the commands, or one of them", cmd_help},
    {"set", "[NAME [VALUE]]", "show or change an option", cmd_set},
    {"think", "[on|off|auto|LEVEL]", "set whether, or how hard, the model thinks", cmd_think},
    {"show", "[N]", "print the conversation, or its last N messages", cmd_show},
    {"system", "[TEXT]", "show or replace the system message; \"\" removes it", cmd_system},
    {"read", "FILE [TEXT]", "send TEXT and a text file; \"FILE\" if the name has spaces", cmd_read},
    {"edit", "![TEXT]", "write a message in $VISUAL or $EDITOR; /edit! changes the last one", cmd_edit},
    {"undo", NULL, "remove the last message and its answer", cmd_undo},
    {"regen", NULL, "regenerate the last answer", cmd_regen},
    {"continue", NULL, "continue an answer that was stopped", cmd_continue},
    {"copy", NULL, "copy the last answer to the clipboard", cmd_copy},
    {"export", "!FILE", "write the conversation as Markdown; /export! replaces FILE", cmd_export},
    {"save", "!NAME", "save the conversation; /save! replaces another one", cmd_save},
    {"load", "NAME", "resume a saved conversation", cmd_load},
    {"rename", "NAME", "rename the saved conversation", cmd_rename},
    {"delete", "NAME", "delete a saved conversation", cmd_delete},
    {"list", NULL, "list the saved conversations", cmd_list},
    {"ctx", NULL, "show how full the context is", cmd_ctx},
    {"stats", NULL, "show the speed of the last turn and of all turns", cmd_stats},
    {"clear", NULL, "start a new conversation", cmd_clear},
    {"quit", NULL, "exit (also /exit, /bye, Ctrl-D)", cmd_quit},
};

enum { N_COMMANDS = sizeof commands / sizeof *commands };

/* Finds a command by its name or a unique beginning of it. Returns NULL with a message if there is none or more than
 * one. */
static const struct command *command_find(const char *name, size_t n, char *err) {
    const struct command *found = NULL;
    static const char *const others[][2] = {{"exit", "quit"}, {"bye", "quit"}, {"?", "help"}};
    char *list = NULL;
    int count = 0;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (strlen(others[i][0]) != n || memcmp(others[i][0], name, n)) continue;
        name = others[i][1];
        n = strlen(name);
    }
    for (int i = 0; i < N_COMMANDS; i++) {
        if (!n || strncmp(commands[i].name, name, n)) continue;
        found = &commands[i];
        sb_printf(&list, "%s/%s", count++ ? ", " : "", found->name);
        if (found->name[n]) continue;
        count = 1;
        break;
    }
    if (!count)
        fail(err, "unknown command /%.*s (see /help); to send a message that starts with /, type //",
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
        if (!one || c == one)
            fprintf(stderr, "  /%-6s %-19s  %s\n", c->name, c->arg ? c->arg + (*c->arg == '!') : "", c->help);
    if (one) return 0;
    fputs("Commands may be shortened as long as they stay unique. //text sends /text.\n"
          "Enter sends. For a new line use Ctrl-J, Alt-Enter, a backslash before Enter, or a block between \"\"\" "
          "and \"\"\".\n"
          "Up, Down and Ctrl-R: history. Tab completes commands, names and values.\n"
          "Ctrl-W, Ctrl-U, Ctrl-K and Alt-D cut, Ctrl-Y and Alt-Y paste. Ctrl-_ undoes. Ctrl-X Ctrl-E opens $EDITOR.\n"
          "Ctrl-C stops the answer, Ctrl-D exits.\n",
          stderr);
    return 0;
}

/* Runs the command in `line`, the text after the slash, which is changed. Returns what the command returns. */
static int command_run(struct repl *r, char *line, char *err) {
    char *arg;
    size_t n = split_word(line, &arg), end = strlen(arg);
    r->force = n && line[n - 1] == '!';
    n -= r->force;
    const struct command *c = command_find(line, n, err);
    if (!c) return -1;
    if (r->force && (!c->arg || *c->arg != '!')) return fail(err, "there is no /%s!, only /%s", c->name, c->name);
    while (end && isspace((uint8_t)arg[end - 1])) arg[--end] = 0;
    if (*arg && !c->arg) return fail(err, "/%s takes no argument", c->name);
    if (!*arg && c->arg && c->arg[*c->arg == '!'] != '[')
        return fail(err, "usage: /%s %s", c->name, c->arg + (*c->arg == '!'));
    return c->fn(r, arg, err);
}

/* Whether a text is meant as a command: one line, whose first word is a slash and letters. A path or a comment of a
 * program is a message. */
static bool is_command(const char *s, size_t n) {
    size_t end = 1;
    if (*s != '/' || memchr(s, '\n', n)) return false;
    while (end < n && isalpha((uint8_t)s[end])) end++;
    if (end < n && (s[end] == '!' || (s[end] == '?' && end == 1))) end++;
    return end > 1 && (end == n || isspace((uint8_t)s[end]));
}

/* Handles one text, a message or a command. Returns COMMAND_QUIT or 0. */
static int repl_line(struct repl *r, char *line, size_t n) {
    char err[ERR_MAX] = "";
    const size_t blanks = strspn(line, " \t\n");
    if (blanks == n) return 0;
    editor_history_add(&r->editor, line, n);
    if (!strcmp(line, "exit") || !strcmp(line, "quit") || !strcmp(line, "help")) {
        note("(type /%s for the command)", line);
        return 0;
    }
    if (is_command(line + blanks, n - blanks)) {
        const int rc = command_run(r, line + blanks + 1, err);
        if (rc < 0) print_error(err);
        chat_autosave(r->chat, false);
        return rc == COMMAND_QUIT ? rc : 0;
    }
    const bool escaped = line[0] == '/' && is_command(line + 1, n - 1); /* //help is a message */
    repl_send(r, line + escaped, n - escaped);
    chat_autosave(r->chat, false);
    return 0;
}

/* Runs the dialogue until /quit or the end of input. Returns the exit code. */
static int repl_run(struct chat *c) {
    const char *home = getenv("HOME");
    struct repl r = {.chat = c};
    char *path = NULL, *line = NULL;
    enum edit_result got;
    int rc = 0;
    if (home && *home) sb_printf(&path, "%s/.moe_history", home);
    editor_init(&r.editor, arrlen(path) && term.in_tty ? sb_cstr(&path) : NULL);
    r.editor.complete = repl_complete;
    if (r.editor.screen) c->keys = &r.editor.keys;
    c->autosave = r.editor.screen;
    term.dialogue = true;
    while (rc != COMMAND_QUIT) {
        interrupted = 0; /* only here, so that a Ctrl-C between Enter and the turn still stops the turn */
        got = editor_read(&r.editor, "> ", ". ", &line);
        if (got == EDIT_EOF) break;
        if (got == EDIT_LINE) {
            size_t n = arrlenu(line);
            (void)sb_cstr(&line); /* commands split their arguments in place */
            rc = repl_line(&r, line, n);
        } else if (!r.hinted) {
            note("(Ctrl-D or /quit to exit)");
            r.hinted = true;
        }
    }
    if (got == EDIT_EOF && (term.out_tty || term.err_tty)) fputc('\n', term.out_tty ? stdout : stderr);
    chat_autosave(c, true);
    term_restore();
    c->keys = NULL;
    editor_free(&r.editor);
    arrfree(path);
    arrfree(line);
    return EXIT_OK;
}

/* ============================================================================================================
 * REPL completion
 *
 * What Tab completes: names of commands, and after some of them names of options, their values, saved conversations and
 * files.
 * ============================================================================================================ */

/* Appends a word if it begins with what is typed. */
static void complete_word(const char *word, const char *typed, char ***out) {
    if (!strncmp(word, typed, strlen(typed))) arrput(*out, xstrdup(word));
}

/* The functions below append the candidates for the argument of a command. *from: where the argument begins, changed to
 * where they begin. */

static void complete_command(char *arg, char ***out, size_t *from) {
    (void)from;
    for (int i = 0; i < N_COMMANDS; i++) complete_word(commands[i].name, arg, out);
}

static void complete_value(const struct option *o, const char *typed, char ***out) {
    static const char *const flag[] = {"on", "off", NULL};
    const char *const *names = o->type == OPT_FLAG ? flag : o->choices;
    for (; names && *names; names++) complete_word(*names, typed, out);
}

static void complete_think(char *arg, char ***out, size_t *from) {
    (void)from;
    complete_value(option_find("think"), arg, out);
}

static void complete_set(char *arg, char ***out, size_t *from) {
    char *value;
    const size_t n = split_word(arg, &value);
    const bool named = arg[n];
    arg[n] = 0;
    const struct option *o = named ? option_find(arg) : NULL;
    if (named) *from += (size_t)(value - arg);
    if (o && o->in_chat) complete_value(o, value, out);
    for (int i = 0; i < N_OPTIONS && !named; i++)
        if (options[i].name && options[i].in_chat) complete_word(options[i].name, arg, out);
}

/* Whether the name of a file can stand in a command. */
static bool name_usable(const char *s) {
    for (const char *p = s; *p; p++)
        if ((uint8_t)*p < 32 || *p == 127 || *p == '"') return false;
    return utf8_valid(s, strlen(s));
}

/* Appends the names in a directory that begin with `base`, each behind `before`. suffix: takes only files that end in
 * it, without it; NULL: takes all files, and directories with a slash. */
static void complete_directory(const char *path, const char *before, const char *base, const char *suffix,
                               char ***out) {
    DIR *d = opendir(path);
    const size_t k = suffix ? strlen(suffix) : 0;
    for (const struct dirent *f; d && (f = readdir(d));) {
        char *full = NULL, *name = NULL;
        struct stat st;
        const size_t n = strlen(f->d_name);
        if (strncmp(f->d_name, base, strlen(base)) || (*f->d_name == '.' && *base != '.')) continue;
        if (!strcmp(f->d_name, ".") || !strcmp(f->d_name, "..") || !name_usable(f->d_name)) continue;
        if (n <= k || (suffix && strcmp(f->d_name + n - k, suffix))) continue;
        sb_printf(&full, "%s/%s", path, f->d_name);
        const bool found = !stat(sb_cstr(&full), &st), dir = found && S_ISDIR(st.st_mode) && !suffix;
        sb_printf(&name, "%s%.*s%s", before, (int)(n - k), f->d_name, dir ? "/" : "");
        if (found && (dir || S_ISREG(st.st_mode))) arrput(*out, xstrdup(sb_cstr(&name)));
        arrfree(full);
        arrfree(name);
    }
    if (d) closedir(d);
}

static void complete_saved(char *arg, char ***out, size_t *from) {
    char path[4096], err[ERR_MAX];
    (void)from;
    if (strchr(arg, '/') || chat_path("x", "", path, err)) return;
    *strrchr(path, '/') = 0;
    complete_directory(path, "", arg, ".jsonl", out);
}

/* Completes the name of a file. If one of the candidates has a blank, all are in double quotes. */
static void complete_file(char *arg, char ***out, size_t *from) {
    bool quoted = *arg == '"';
    char *path = NULL, **found = NULL;
    const char *name = arg + quoted, *slash = strrchr(name, '/');
    (void)from;
    if (name[strcspn(name, quoted ? "\"" : " \t\n")]) return; /* the cursor is behind the name */
    char *dir = xstrndup(name, slash ? (size_t)(slash + 1 - name) : 0);
    sb_path(&path, *dir ? dir : "./");
    complete_directory(sb_cstr(&path), dir, name + strlen(dir), NULL, &found);
    for (int i = 0; i < arrlen(found); i++) quoted |= strchr(found[i], ' ') != NULL;
    for (int i = 0; i < arrlen(found); i++) {
        char *word = NULL;
        const bool open = !quoted || found[i][strlen(found[i]) - 1] == '/';
        sb_printf(&word, "%s%s%s", quoted ? "\"" : "", found[i], open ? "" : "\"");
        arrput(*out, xstrdup(sb_cstr(&word)));
        arrfree(word);
        free(found[i]);
    }
    arrfree(found);
    arrfree(path);
    free(dir);
}

static const struct {
    const char *command;
    void (*fn)(char *arg, char ***out, size_t *from);
} completions[] = {
    {"help", complete_command}, {"set", complete_set},      {"think", complete_think},
    {"export", complete_file},  {"read", complete_file},    {"save", complete_saved},
    {"load", complete_saved},   {"rename", complete_saved}, {"delete", complete_saved},
};

/* Completes the name of a command or its argument, for the editor. */
static void repl_complete(const char *line, size_t cursor, char ***candidates, size_t *from) {
    char *text = xstrndup(line, cursor), *arg, err[ERR_MAX];
    const size_t n = *text == '/' ? split_word(text + 1, &arg) : 0;
    const bool named = n && text[1 + n];
    const struct command *c = named ? command_find(text + 1, n, err) : NULL;
    *from = named ? (size_t)(arg - text) : 1;
    if (*text == '/' && !named) complete_command(text + 1, candidates, from);
    for (size_t i = 0; c && i < sizeof completions / sizeof *completions; i++)
        if (!strcmp(completions[i].command, c->name)) completions[i].fn(arg, candidates, from);
    free(text);
}

/* ============================================================================================================
 * Plan
 *
 * Says whether a model fits a machine, in which layout, and how fast it can be there at most. Needs only the sizes of
 * the tensors; the weights are not read. Weights are counted by tensor_rules (plan_layer), the cache by layer_planes
 * (state_bytes), scratch by GPU_BUFFERS (gpu_bytes), all on the shards that the engine makes. The roofline is the rate
 * at which tokens would come if only reading them and the all-reduces took time.
 * ============================================================================================================ */

/* What a token reads. */
enum plan_read {
    READ_EXPERTS,  /* the routed experts that it uses */
    READ_BACKBONE, /* all other weights of the layers: attention, norms, routers, dense and shared feed-forwards */
    READ_CACHE,    /* the state */
    READ_HEAD,     /* the output matrix */
    PLAN_READS
};

enum {
    PLAN_CTX = 4096,     /* tokens of context that a model needs room for to fit, unless -c asks for fewer */
    PLAN_CTX_STEP = 256, /* the largest context is rounded down to a multiple of so many tokens */
    PLAN_LAYOUTS = 3     /* most ways to write the number of GPUs, up to MAX_RANKS, as tp x pp */
};

/* Seconds of an all-reduce of one token's activations, assumed: the one-shot kernel, NCCL. --doctor measures them. */
static const double plan_reduce[2] = {5.5e-6, 12e-6};

/* A GPU; the only device of a plan for the CPU is the CPU. */
struct plan_device {
    char name[128];
    int64_t memory, usable; /* bytes: of all; without what the driver takes and --vram-reserve */
    double rate;            /* bytes that it reads per second */
    double l2;              /* bytes of a GPU's second-level cache */
    const char *source;     /* of the rate: "measured", "given" .. */
};

/* What one rank holds and reads. */
struct plan_rank {
    struct model m;                      /* its shard of the model */
    int64_t weights, rounding;           /* bytes; what the driver adds to them and to all other allocations */
    int64_t bytes_per_token[PLAN_READS]; /* that a token reads; of the cache at the plan's context */
    int64_t cache, scratch, left;        /* at the plan's context */
};

/* What decoding a token is expected to take. */
struct forecast {
    double seconds;
    double beside; /* seconds of these in which the memory is not read */
    int kernels;
};

struct plan_layout {
    int tp, pp;
    char name[32]; /* --tp N --pp M */
    struct plan_rank rank[MAX_RANKS];
    int context, largest[2];  /* tokens, 0: it does not fit; largest: with a cache of FP8 and of BF16 */
    double roofline[2];       /* tokens per second, for each of plan_reduce */
    struct forecast forecast; /* of GPUs */
};

/* How the search ended. What does not fit with all experts may still fit with a smaller context: see `shorter`. */
enum plan_outcome { PLAN_FITS, PLAN_FITS_STAGES, PLAN_NEEDS_PRUNING, PLAN_DOES_NOT_FIT };

static const char *const plan_verdicts[] = {"fits", "fits with --pp", "needs pruning", "does not fit"};

struct plan {
    const struct model *m;
    bool cpu;
    struct plan_device device[MAX_RANKS];
    int n_device;
    int64_t host;        /* CPU: bytes of the file without the layers */
    int64_t activations; /* CPU: bytes of activation buffers */
    enum kv_type kv;
    const char *kv_name;
    int want, least; /* tokens of context: wished for; without which the model does not fit */
    struct plan_layout layout[PLAN_LAYOUTS];
    int n_layout;
    /* the answer */
    enum plan_outcome outcome;
    int chosen, context;    /* index of the layout; tokens of context */
    int experts;            /* per layer, after pruning; if even that does not fit, all */
    double percent;         /* of the model's experts that these are */
    int fewest;             /* experts per layer that a token needs */
    int shorter;            /* tokens: the largest context with all experts where they do not fit with -c N; 0: none */
    int64_t missing;        /* bytes that the fullest device lacks with all experts, */
    int64_t missing_pruned; /* and with the fewest; 0: it fits */
};

/* Bytes that a token reads of a matrix. n_used: experts of it that the token uses. */
static int64_t plan_matrix_reads(bool cpu, const struct weight *w, int n_used) {
    const int64_t bytes = (int64_t)weight_gpu_bytes(w, false), factors = w->scale ? 4 * (int64_t)w->n_expert : 0;
    if (!bytes) return 0;
    return ((cpu ? (int64_t)weight_bytes(w) : bytes) + factors) / w->n_expert * n_used;
}

/* Adds the bytes of a matrix that a rank holds. */
static void plan_matrix(struct plan_rank *r, const struct weight *w) {
    const int64_t bytes = (int64_t)weight_gpu_bytes(w, false);
    if (!bytes) return;
    r->rounding += (int64_t)weight_gpu_bytes(w, true) - bytes;
    r->weights += bytes + (w->scale ? 4 * (int64_t)w->n_expert : 0);
}

/* Bytes that a GPU holds of a vector or router of a layer. */
static int64_t plan_vector(const struct tensor_rule *rule, const struct model *m, const struct layer *layer) {
    const struct weight *w = rule_weight(rule, layer);
    if (rule->kind == TENSOR_ROUTER) return (int64_t)w->n_out * w->n_in * (router_halves(w) ? 2 : 4);
    return *rule_vector(rule, layer) ? 4 * (int64_t)rule_floats(rule, m, layer) : 0;
}

/* Bytes that a token reads of a tensor of a layer. */
static int64_t plan_tensor_reads(bool cpu, const struct tensor_rule *rule, const struct model *m,
                                 const struct layer *layer) {
    if (rule->field == NOT_BOUND) return 0;
    const struct weight *w = rule_weight(rule, layer);
    if (rule->kind == TENSOR_MATRIX)
        return plan_matrix_reads(cpu, w, rule_routed(rule) ? layer->n_expert_used : w->n_expert);
    return cpu && rule->kind == TENSOR_ROUTER ? (int64_t)weight_bytes(w) : plan_vector(rule, m, layer);
}

/* Adds what a rank holds and reads of a layer: every tensor of the table. */
static void plan_layer(struct plan_rank *r, bool cpu, const struct model *m, const struct layer *layer) {
    for (const struct tensor_rule *rule = rule_next(NULL, layer); rule; rule = rule_next(rule, layer)) {
        if (rule->field == NOT_BOUND) continue;
        if (rule->kind == TENSOR_MATRIX) plan_matrix(r, rule_weight(rule, layer));
        else r->weights += plan_vector(rule, m, layer);
        r->bytes_per_token[rule_routed(rule) ? READ_EXPERTS : READ_BACKBONE] += plan_tensor_reads(cpu, rule, m, layer);
    }
    if (layer->up.scale && layer->up.scale == layer->gate.scale && weight_gpu_bytes(&layer->up, false))
        r->weights -= 4 * (int64_t)layer->n_expert; /* one stack: its factors are there once */
}

/* Bytes of the activation buffers of rank i. */
static int64_t plan_scratch(const struct plan *p, const struct plan_rank *r, int i, int ctx) {
    if (p->cpu) return p->activations;
    return (int64_t)gpu_bytes(&r->m, gpu_chunk(&r->m, ctx, (size_t)p->device[i].memory, false), false);
}

/* Bytes left on the device of rank i; negative: bytes missing. */
static int64_t plan_bytes_left(const struct plan *p, const struct plan_layout *d, int i, int ctx, enum kv_type kv) {
    const struct plan_rank *r = &d->rank[i];
    return p->device[i].usable - r->weights - r->rounding - plan_scratch(p, r, i, ctx) -
           (int64_t)state_bytes(&r->m, kv, (size_t)ctx);
}

/* Bytes left on the fullest device of a layout. */
static int64_t plan_least_free(const struct plan *p, const struct plan_layout *d, int ctx, enum kv_type kv) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < p->n_device; i++) {
        int64_t f = plan_bytes_left(p, d, i, ctx, kv);
        if (f < least) least = f;
    }
    return least;
}

/* The largest context in tokens that a layout has room for; 0: none. */
static int plan_largest(const struct plan *p, const struct plan_layout *d, enum kv_type kv) {
    const int middle = PLAN_CTX / PLAN_CTX_STEP, most = (1 << 28) / PLAN_CTX_STEP;
    const bool fits = plan_least_free(p, d, PLAN_CTX, kv) >= 0;
    int lo = fits ? middle : 0;
    int hi = fits ? most : middle - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (plan_least_free(p, d, mid * PLAN_CTX_STEP, kv) >= 0) lo = mid;
        else hi = mid - 1;
    }
    return lo * PLAN_CTX_STEP;
}

/* The context in tokens that a layout can be run with, at most p->want; 0: less than p->least. */
static int plan_context(const struct plan *p, const struct plan_layout *d) {
    if (plan_least_free(p, d, p->least, p->kv) < 0) return 0;
    if (plan_least_free(p, d, p->want, p->kv) >= 0) return p->want;
    return int_min(p->want, plan_largest(p, d, p->kv));
}

/* Tokens per second at a context if only reads and all-reduces took time. Ranks of a stage read at the same time. */
static double plan_roofline(const struct plan *p, const struct plan_layout *d, int ctx, double reduce) {
    double seconds = d->tp > 1 ? (double)ALL_REDUCES_PER_LAYER * p->m->n_layer * reduce : 0;
    for (int stage = 0; stage < d->pp; stage++) {
        double slowest = 0;
        for (int i = stage * d->tp; i < (stage + 1) * d->tp; i++) {
            const int64_t *r = d->rank[i].bytes_per_token;
            double bytes = (double)(r[READ_EXPERTS] + r[READ_BACKBONE] + r[READ_HEAD]) +
                           state_reads(&d->rank[i].m, p->kv, (size_t)ctx);
            slowest = fmax(slowest, bytes / p->device[i].rate);
        }
        seconds += slowest;
    }
    return 1 / seconds;
}

/* Frees a plan and the shards that its ranks were sized for. */
static void plan_free(struct plan *p) {
    for (size_t k = 0; k < sizeof p->layout / sizeof *p->layout; k++)
        for (int i = 0; i < MAX_RANKS; i++) shard_free(&p->layout[k].rank[i].m);
    free(p);
}

/* Computes what a rank holds and reads for its shard of m. */
static void plan_rank(struct plan_rank *r, const struct plan *p, const struct model *m, struct shard shard) {
    struct model *shard_of = &r->m;
    shard_free(&r->m);
    memset(r, 0, sizeof *r);
    shard_model(shard_of, m, shard);
    plan_matrix(r, &shard_of->output);
    if (shard_of->output.data == shard_of->embd.data) r->weights = r->rounding = 0; /* one matrix is both */
    plan_matrix(r, &shard_of->embd);
    r->bytes_per_token[READ_HEAD] = plan_matrix_reads(p->cpu, &shard_of->output, 1);
    for (int il = 0; il < shard_of->n_layer; il++) plan_layer(r, p->cpu, shard_of, &shard_of->layers[il]);
    r->weights += 4 * (int64_t)m->n_embd; /* the last norm */
    for (int i = 0; i < m->n_rope; i++) r->weights += 4 * (int64_t)(m->ropes[i].dim / 2);
    r->rounding += (int64_t)gpu_rounding(shard_of);
    if (p->cpu) {
        r->weights = p->host;
        r->rounding = 0;
        for (int il = 0; il < shard_of->n_layer; il++) r->weights += (int64_t)layer_bytes(&shard_of->layers[il]);
    }
}

/* Whether every stage has layers and every rank rows of each matrix, as the GPU engine needs. */
static bool plan_divides(const struct model *m, int tp, int pp) {
    bool whole = pp <= m->n_layer;
    for (int i = 0; i < tp * pp && whole; i++) {
        struct model shard;
        shard_model(&shard, m, (struct shard){i % tp, tp, i / tp, pp});
        whole = !shard_gap(&shard, &(int){0});
        shard_free(&shard);
    }
    return whole;
}

/* Sizes the ranks of every layout for m and chooses the first layout that fits; false: none does. */
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

/* Copies the sizes of m with at most n experts per layer; the caller frees out->layers. Returns the percentage of
 * experts that remain. */
static double plan_prune(struct model *out, const struct model *m, int n) {
    double all = 0, retained = 0;
    *out = *m;
    out->n_expert_max = int_min(m->n_expert_max, n);
    out->layers = xmalloc((size_t)m->n_layer * sizeof *out->layers);
    for (int il = 0; il < m->n_layer; il++) {
        struct layer *layer = &out->layers[il];
        *layer = m->layers[il];
        all += layer->n_expert;
        retained += int_min(layer->n_expert, n);
        if (layer->n_expert > n)
            layer->n_expert = layer->router.n_out = layer->gate.n_expert = layer->up.n_expert = layer->down.n_expert =
                n;
    }
    return all > 0 ? 100 * retained / all : 100;
}

/* Chooses the layout that comes closest to fitting; returns the bytes missing on its fullest device. */
static int64_t plan_missing(struct plan *p) {
    int64_t best = INT64_MIN;
    for (int k = 0; k < p->n_layout; k++) {
        int64_t left = plan_least_free(p, &p->layout[k], p->least, p->kv);
        if (left <= best) continue;
        best = left;
        p->chosen = k;
    }
    return -best;
}

/* The search: all experts first, then fewer per layer, each time in every layout, until one fits. */
static void plan_solve(struct plan *p) {
    const struct model *m = p->m;
    const int all = m->n_expert_max, step = m->n_group, usual = int_min(PLAN_CTX, m->n_ctx_train);
    int most = 0;
    for (int il = 0; il < m->n_layer; il++)
        if (m->layers[il].n_expert > most) most = m->layers[il].n_expert;
    p->fewest = (m->max.n_expert_used + m->n_group_used - 1) / m->n_group_used * step;
    for (int n = all; n == all || n >= p->fewest; n = (int_min(n, most) - 1) / step * step) {
        struct model pruned;
        p->experts = n;
        p->percent = plan_prune(&pruned, m, n);
        bool fits = plan_choose(p, &pruned);
        free(pruned.layers);
        if (fits) {
            p->missing_pruned = 0;
            p->outcome = n < all ? PLAN_NEEDS_PRUNING : p->layout[p->chosen].pp > 1 ? PLAN_FITS_STAGES : PLAN_FITS;
            return;
        }
        p->missing_pruned = plan_missing(p);
        if (n < all) continue;
        p->missing = p->missing_pruned;
        for (int k = 0; k < p->n_layout; k++) {
            int longest = plan_largest(p, &p->layout[k], p->kv);
            if (longest >= usual && longest > p->shorter) p->shorter = longest;
        }
    }
    plan_choose(p, m); /* sizes the ranks with all experts again */
    plan_missing(p);
    p->outcome = PLAN_DOES_NOT_FIT;
    p->experts = all;
    p->percent = 100;
    p->context = p->least;
}

/* ---- the machine ---- */

/* The machine that --gpus describes. */
static void plan_described(struct plan *p, const char *text, int64_t reserve) {
    /* GiB, GB/s, MiB of L2 (0: weights cannot be requested into it): RTX PRO 6000, RTX 5090, DGX Spark, H100, H200, RTX
     * 5070, 5070 Ti, 3090, RTX 6000 Ada */
    static const double usual[][3] = {{96, 1792, 128}, {32, 1792, 96}, {128, 273, 24}, {80, 3350, 50}, {141, 4800, 50},
                                      {12, 672, 48},   {16, 896, 48},  {24, 936, 0},   {48, 960, 0}};
    const struct gpu_list g = gpus_parse(text);
    const double gib = g.gib;
    const bool given = g.gb_per_s > 0;
    const int n = g.n;
    double gb = g.gb_per_s, l2 = usual[0][2]; /* of other sizes: as the card that the forecast is for */
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        if (gib != usual[i][0]) continue;
        if (!given) gb = usual[i][1];
        l2 = usual[i][2];
    }
    if (gb < 1)
        die_usage("--gpus %s: unknown memory bandwidth for a GPU of %g GiB: give it in GB/s, --gpus %s@GBPS", text, gib,
                  text);
    p->n_device = n;
    for (int i = 0; i < n; i++) {
        struct plan_device *d = &p->device[i];
        d->memory = (int64_t)(gib * 0x1p30);
        d->rate = gb * 1e9;
        d->l2 = l2 * 0x1p20;
        d->source = given ? "given" : "assumed";
        /* 3 % of a card's memory are not reported as free; a CUDA context takes 450 MiB */
        d->usable = (int64_t)(gib * 0x1p30 * 0.97) - ((int64_t)450 << 20) - reserve;
        snprintf(d->name, sizeof d->name, "GPU of %g GiB", gib);
    }
}

/* Asks the GPUs of this machine: the n that are listed in device, otherwise as many as --tp and --pp need, or all. */
static void plan_real(struct plan *p, const struct settings *set, const int *device, int n) {
    char err[ERR_MAX];
    int found = cuda_device_count(err), asked = (set->tp ? set->tp : 1) * (set->pp ? set->pp : 1);
    p->n_device = n ? n : int_min(set->tp || set->pp ? asked : found, MAX_RANKS);
    for (int i = 0; i < p->n_device; i++) {
        struct plan_device *d = &p->device[i];
        int gpu = n ? device[i] : i, ranks = 0;
        struct gpu_facts f;
        if (gpu >= found) die("there is no GPU %d; this machine has %d", gpu, found);
        for (int k = 0; k < p->n_device; k++) ranks += (n ? device[k] : k) == gpu;
        if (cuda_facts(gpu, &f, false)) die("cannot read the memory size of GPU %d", gpu);
        snprintf(d->name, sizeof d->name, "%s", f.label);
        if (!(f.rate > 0)) die("unknown memory bandwidth for %s: describe the GPUs with --gpus NxGIB@GBPS", d->name);
        d->memory = (int64_t)f.total / ranks;
        d->rate = f.rate / ranks;
        d->l2 = f.major >= 9 ? (double)f.l2 / ranks : 0;
        d->source = "reported";
        d->usable = ((int64_t)f.free - ((int64_t)set->vram_reserve << 20)) / ranks;
    }
}

/* Measures the CPU: available memory, bandwidth, and the buffers that the engine would allocate. */
static void plan_cpu(struct plan *p, const struct settings *set) {
    const struct model *m = p->m;
    struct plan_device *d = &p->device[0];
    struct rank r;
    int n_threads = settings_threads(set);
    if (set->tp > 1 || set->pp > 1)
        die_usage("--tp and --pp need GPUs: describe them, such as --gpus 4x96, or omit both");
    p->n_device = 1;
    d->memory = d->usable = (int64_t)memory_available();
    d->rate = memory_bandwidth(n_threads);
    d->source = "measured";
    snprintf(d->name, sizeof d->name, "CPU, %d thread%s", n_threads, n_threads == 1 ? "" : "s");
    p->host = (int64_t)m->file_bytes;
    for (uint32_t i = 0; i < m->gguf.n_tensors && !m->file_bytes; i++) p->host += (int64_t)m->gguf.tensors[i].bytes;
    for (int il = 0; il < m->n_layer; il++) p->host -= (int64_t)layer_bytes(&m->layers[il]);
    /* takes addresses but no memory, because nothing is written */
    cpu_rank_init(&r, m, kernels_choose(), n_threads, int_min(p->least, CHUNK_MAX), p->kv);
    p->activations = (int64_t)r.bytes + SNAPSHOTS * (int64_t)snapshot_bytes(m, p->kv);
    r.ops->close(&r);
}

/* ============================================================================================================
 * Plan: forecast
 *
 * How long a GPU takes for the decode of one token: the kernels of a forward follow each other, and each has a fixed
 * cost and bytes to read. What a kernel requests ahead of its use comes while the memory would idle, and is not read
 * again. The list of launches is that of the engine (moe_cuda.cu, "Operations"); a test compares the two.
 * ============================================================================================================ */

/* The launches of a decode forward, by what they do. */
enum decode_kernel {
    DECODE_EMBED,
    DECODE_ADD_NORM,
    DECODE_PROJECTIONS,
    DECODE_QUERY, /* MLA: out of the low-rank query */
    DECODE_MLA_QUERY,
    DECODE_ATTENTION,
    DECODE_MLA_ATTENTION,
    DECODE_MLA_VALUE,
    DECODE_DELTA,
    DECODE_LINEAR, /* attention's output, a dense layer's down, the head */
    DECODE_ROUTER,
    DECODE_GLU,
    DECODE_DOWN,
    DECODE_SEND,
    DECODE_SAMPLE,
    DECODE_SHARE,
    DECODE_KERNELS
};

/* The kernel as --profile calls it, and microseconds that one token takes beside the handover to the kernel and the
 * reading of its bytes. The source is a timing model of the machine code for an RTX PRO 6000 at 2.4 GHz, with 358
 * clocks to L2 and 877 to memory. "run": the model ran the kernel with shapes of 30B to 671B, which gave this range.
 * The others are sums of latencies. No card was measured. */
static const struct {
    const char *name;
    double us;
} decode_costs[DECODE_KERNELS] = {
    [DECODE_EMBED] = {"k_embed", 1.0},             /* two latencies of memory, and a sine */
    [DECODE_ADD_NORM] = {"k_add_norm", 0.8},       /* four latencies of L2, and a sum over the block */
    [DECODE_PROJECTIONS] = {"k_gemv_linear", 0.4}, /* run: 0.3 to 0.4 */
    [DECODE_QUERY] = {"k_gemv_linear", 0.4},       /* run: 0.3 to 1.0 */
    [DECODE_MLA_QUERY] = {"k_mla_query", 0.8},     /* 0.4 as above, 0.4 to load and rotate the queries */
    [DECODE_ATTENTION] = {"attn_kernel", 3.1},     /* run: 1.9; 0.5 to rotate, 0.7 to join splits */
    [DECODE_MLA_ATTENTION] = {"attn_kernel", 4.0}, /* run: 1.6 a tile of keys, 2 to 3 before the first */
    [DECODE_MLA_VALUE] = {"k_mla_value", 1.6},     /* run: 0.1; 0.8 to join splits, 0.7 to add up a head's blocks */
    [DECODE_DELTA] = {"k_delta_decode", 2.0},      /* a latency of memory, and an SM moves a head's state */
    [DECODE_LINEAR] = {"k_gemv_linear", 0.4},      /* run: 0.2 to 0.9 */
    [DECODE_ROUTER] = {"k_route_decode", 1.6},     /* two passes of latencies: the logits, the choice */
    [DECODE_GLU] = {"k_gemv_glu", 1.4},            /* run: 1.4 */
    [DECODE_DOWN] = {"k_gemv_down", 1.0},          /* run: 0.6 to 1.7 */
    [DECODE_SEND] = {"k_send_rows", 2.5},          /* half an all-reduce */
    [DECODE_SAMPLE] = {"k_sample", 18.0},          /* two passes over the logits, two small copies, the next graph */
    [DECODE_SHARE] = {"k_share_token", 2.5},       /* as k_send_rows */
};

static const double forecast_handover = 1.0; /* microseconds from one kernel to the next, assumed */
static const double forecast_norm = 0.6;     /* of a norm in the kernel that needs it: two latencies of L2, a sum */
static const double forecast_rate = 0.91;    /* part of the memory's rate that kernels reach: 1.63 of 1.79 TB/s */
static const char forecast_source[] = "timing model, no card was measured";

/* A launch of a decode forward. */
struct launch {
    enum decode_kernel kernel;
    bool norms;   /* it makes the norm of its input */
    bool reduces; /* it adds the deltas of several ranks */
    double bytes; /* that it reads */
    double dense; /* those of them that kernels in front may request */
    int ahead;    /* it requests the dense bytes of the launches behind it, up to this one; 0: of none */
};

/* The launch of a layer that reads a tensor. Norms are counted where their result is used. */
static enum decode_kernel launch_of_tensor(const struct tensor_rule *rule, const struct layer *layer) {
    switch (rule->field) {
    case offsetof(struct layer, q_a_norm):
    case offsetof(struct layer, wq_b): return DECODE_QUERY;
    case offsetof(struct layer, kv_a_norm):
    case offsetof(struct layer, wk_b): return DECODE_MLA_QUERY;
    case offsetof(struct layer, wv_b): return DECODE_MLA_VALUE;
    case offsetof(struct layer, q_norm):
    case offsetof(struct layer, k_norm): return DECODE_ATTENTION;
    case offsetof(struct layer, conv):
    case offsetof(struct layer, decay):
    case offsetof(struct layer, dt_bias):
    case offsetof(struct layer, delta_norm): return DECODE_DELTA;
    case offsetof(struct layer, wo): return DECODE_LINEAR;
    case offsetof(struct layer, ffn_norm): return layer->n_expert ? DECODE_ROUTER : DECODE_GLU;
    case offsetof(struct layer, router):
    case offsetof(struct layer, router_bias):
    case offsetof(struct layer, sh_weight): return DECODE_ROUTER;
    case offsetof(struct layer, gate):
    case offsetof(struct layer, up):
    case offsetof(struct layer, sh_gate):
    case offsetof(struct layer, sh_up): return DECODE_GLU;
    case offsetof(struct layer, down):
    case offsetof(struct layer, sh_down): return DECODE_DOWN;
    default: return DECODE_PROJECTIONS;
    }
}

/* Adds a launch to a stb_ds array; returns its index. */
static int launch_add(struct launch **list, enum decode_kernel kernel, double bytes, double dense) {
    const struct launch l = {.kernel = kernel, .bytes = bytes, .dense = dense};
    arrput(*list, l);
    return (int)arrlen(*list) - 1;
}

/* Adds the launch of a norm of the residual stream, unless the next kernel makes it. own: no deltas of other ranks are
 * to be added to it. Returns whether the next kernel makes it. */
static bool launch_add_norm(struct launch **list, const struct model *m, bool own, bool may_fuse) {
    if (may_fuse && gpu_norm_fuses(1, m->n_embd, own)) return true;
    const int at = launch_add(list, DECODE_ADD_NORM, 0, 0);
    (*list)[at].reduces = !own;
    return false;
}

/* Adds the launches of layer il of a shard. router: the launch of the layer before that requests the first products of
 * this one, or 0; returns that of this layer. */
static int launch_add_layer(struct launch **list, const struct model *m, int il, enum kv_type kv, size_t n_past,
                            int router) {
    const struct layer *layer = &m->layers[il];
    const bool alone = m->shard.n_rank == 1, mla = layer->has & HAS_MLA, delta = layer->has & HAS_DELTA;
    double bytes[DECODE_KERNELS] = {0}, dense[DECODE_KERNELS] = {0};
    for (const struct tensor_rule *rule = rule_next(NULL, layer); rule; rule = rule_next(rule, layer)) {
        const enum decode_kernel k = launch_of_tensor(rule, layer);
        const double reads = (double)plan_tensor_reads(false, rule, m, layer);
        bytes[k] += reads;
        if (rule->kind == TENSOR_MATRIX && k != DECODE_GLU && k != DECODE_DOWN) dense[k] += reads;
    }
#define ADD(kernel) launch_add(list, kernel, bytes[kernel], dense[kernel])
    bool fuses = launch_add_norm(list, m, alone || !il, true);
    const int first = ADD(DECODE_PROJECTIONS);
    (*list)[first].norms = fuses;
    if (router) (*list)[router].ahead = first;
    if (layer->has & HAS_Q_LORA) {
        const bool query_fuses = gpu_norm_fuses(1, m->max.q_lora, true);
        if (!query_fuses) launch_add(list, DECODE_ADD_NORM, 0, 0);
        const int query = ADD(DECODE_QUERY);
        (*list)[query].norms = query_fuses;
    }
    if (mla) ADD(DECODE_MLA_QUERY);
    const int attention = ADD(mla ? DECODE_MLA_ATTENTION : delta ? DECODE_DELTA : DECODE_ATTENTION);
    (*list)[attention].bytes += layer_state_reads(m, layer, kv, n_past);
    if (mla) ADD(DECODE_MLA_VALUE);
    const int out = ADD(DECODE_LINEAR);
    (*list)[attention].ahead = out;
    if (!fuses) (*list)[first].ahead = out;
    fuses = launch_add_norm(list, m, alone, layer->n_expert > 0);
    router = layer->n_expert ? ADD(DECODE_ROUTER) : 0;
    if (router) (*list)[router].norms = fuses;
    ADD(DECODE_GLU);
    launch_add(list, router ? DECODE_DOWN : DECODE_LINEAR, bytes[DECODE_DOWN], 0);
#undef ADD
    return router;
}

/* The launches of a shard for one token at position n_past, up to the choice of the next one, as a stb_ds array. */
static struct launch *decode_launches(const struct model *m, enum kv_type kv, size_t n_past) {
    const struct shard *shard = &m->shard;
    const bool alone = shard->n_rank == 1;
    struct launch *list = NULL;
    int router = 0;
    if (shard->n_rank * shard->n_stage > 1) launch_add(&list, DECODE_SHARE, 0, 0);
    launch_add(&list, DECODE_EMBED, 0, 0);
    if (shard->stage) launch_add(&list, DECODE_SEND, 0, 0);
    for (int il = 0; il < m->n_layer; il++) router = launch_add_layer(&list, m, il, kv, n_past, router);
    launch_add_norm(&list, m, alone, false);
    if (shard->stage + 1 < shard->n_stage) {
        launch_add(&list, DECODE_SEND, 0, 0);
        return list;
    }
    launch_add_norm(&list, m, true, false);
    const double head = (double)plan_matrix_reads(false, &m->output, 1);
    const int last = launch_add(&list, DECODE_LINEAR, head, head);
    if (router) list[router].ahead = last;
    if (!alone) launch_add(&list, DECODE_SEND, 0, 0);
    if (!shard->rank) launch_add(&list, DECODE_SAMPLE, 0, 0);
    return list;
}

/* Seconds of a launch beside reading its bytes. */
static double launch_fixed(const struct launch *l) {
    return (forecast_handover + decode_costs[l->kernel].us + (l->norms ? forecast_norm : 0)) * 1e-6 +
           (l->reduces ? plan_reduce[0] : 0);
}

/* What the launches from `from` on take one after the other, with memory of so many bytes per second and a cache of l2 bytes. A
 * kernel that requests ahead does so while it does not read itself. Behind a norm it begins as early as that: it does
 * not wait for it. */
static struct forecast forecast_launches(const struct launch *list, int from, double rate, double l2) {
    const int n = (int)arrlen(list);
    struct forecast f = {.kernels = n};
    double bytes = 0, *got = xcalloc((size_t)n, sizeof *got); /* got: bytes of a launch that were requested */
    rate *= forecast_rate;
    for (int i = from; i < n; i++) {
        const struct launch *l = &list[i];
        const bool early = i && l[-1].kernel == DECODE_ADD_NORM;
        double room = (launch_fixed(l) + (early ? launch_fixed(l - 1) : 0)) * rate, share = l2 / AHEAD_SHARE;
        f.seconds += launch_fixed(l) + (l->bytes - got[i]) / rate;
        bytes += l->bytes;
        for (int k = i + 1; k <= l->ahead; k++) {
            const double asked = fmin(share, list[k].dense), come = fmax(0, fmin(room, asked - got[k]));
            got[k] += come;
            room -= come;
            share -= asked;
        }
    }
    f.beside = f.seconds - bytes / rate;
    free(got);
    return f;
}

/* The forecast of a layout at a context. Ranks of a stage run at the same time: the slowest counts. */
static struct forecast plan_forecast(const struct plan *p, const struct plan_layout *d, int ctx) {
    struct forecast sum = {0};
    for (int stage = 0; stage < d->pp; stage++) {
        struct forecast slowest = {0};
        for (int i = stage * d->tp; i < (stage + 1) * d->tp; i++) {
            struct launch *list = decode_launches(&d->rank[i].m, p->kv, (size_t)ctx);
            const int early = stage ? 2 : 0; /* later stages have the id and its embedding before their input comes */
            const struct forecast f = forecast_launches(list, early, p->device[i].rate, p->device[i].l2);
            if (f.seconds > slowest.seconds) slowest = f;
            arrfree(list);
        }
        sum.seconds += slowest.seconds;
        sum.beside += slowest.beside;
        sum.kernels += slowest.kernels;
    }
    return sum;
}

/* Sets `fixed` of the n rows that profile an engine's decode of one token at position 0, if these are the launches that
 * the forecast knows. */
static void forecast_profile(const struct session *s, struct profile_row *row, int n) {
    struct launch *list = decode_launches(s->r->m, s->r->kv_type, 1);
    bool same = arrlen(list) == n + 1; /* the token is not chosen */
    for (int i = 0; i < n && same; i++) {
        const char *name = decode_costs[list[i].kernel].name;
        same = !strncmp(row[i].name, name, strlen(name)) && row[i].name[strlen(name)] == ' ';
    }
    for (int i = 0; i < n && same; i++) row[i].fixed = launch_fixed(&list[i]);
    arrfree(list);
}

/* ============================================================================================================
 * Plan: the answer
 *
 * What is printed, as text and as JSON, from one list of values.
 * ============================================================================================================ */

/* Computes what is printed of every layout, and of the ranks of the chosen one. */
static void plan_finish(struct plan *p) {
    for (int k = 0; k < p->n_layout; k++) {
        struct plan_layout *d = &p->layout[k];
        d->context = plan_context(p, d);
        d->largest[0] = plan_largest(p, d, KV_FP8);
        d->largest[1] = plan_largest(p, d, KV_BF16);
        for (int j = 0; j < 2; j++)
            d->roofline[j] = plan_roofline(p, d, d->context ? d->context : p->least, plan_reduce[j]);
        if (!p->cpu) d->forecast = plan_forecast(p, d, d->context ? d->context : p->least);
        snprintf(d->name, sizeof d->name, "--tp %d --pp %d", d->tp, d->pp);
        for (int i = 0; i < p->n_device; i++) {
            struct plan_rank *r = &d->rank[i];
            r->bytes_per_token[READ_CACHE] = (int64_t)state_reads(&r->m, p->kv, (size_t)p->context);
            r->cache = (int64_t)state_bytes(&r->m, p->kv, (size_t)p->context);
            r->scratch = plan_scratch(p, r, i, p->context);
            r->left = p->device[i].usable - r->weights - r->rounding - r->scratch - r->cache;
        }
    }
}

enum plan_unit { PLAN_GIB, PLAN_GB, PLAN_TOKENS, PLAN_RATE /* tokens per second */ };

/* One line of a table in the text, and the same values as an object of the JSON. */
struct plan_row {
    json_t *json;
    char labels[88], text[88]; /* columns of 11 characters */
};

/* Adds a value: to the JSON under its key, and to the text below its label unless that is NULL. */
static void plan_put(struct plan_row *row, const char *key, const char *label, enum plan_unit unit, double value) {
    const size_t at[2] = {strlen(row->labels), strlen(row->text)};
    char text[32];
    if (json_object_set_new(row->json, key, unit == PLAN_RATE ? json_real(value) : json_integer((json_int_t)value)))
        die("cannot write the plan as JSON");
    if (!label) return;
    if (unit == PLAN_TOKENS) with_commas((uint64_t)value, text);
    else if (unit == PLAN_RATE) snprintf(text, sizeof text, "%.1f", value);
    else snprintf(text, sizeof text, "%.3f", value * (unit == PLAN_GIB ? 0x1p-30 : 1e-9));
    snprintf(row->labels + at[0], sizeof row->labels - at[0], " %10s", label);
    snprintf(row->text + at[1], sizeof row->text - at[1], " %10s", text);
}

/* The memory of rank i. */
static struct plan_row plan_memory_row(const struct plan *p, int i) {
    const struct plan_device *v = &p->device[i];
    const struct plan_rank *r = &p->layout[p->chosen].rank[i];
    struct plan_row row = {.json =
                               json_pack("{s:s,s:f,s:s,s:i,s:i,s:I,s:I}", "name", v->name, "bytes_per_second", v->rate,
                                         "source", v->source, "first_layer", r->m.first_layer, "layers", r->m.n_layer,
                                         "memory", (json_int_t)v->memory, "usable", (json_int_t)v->usable)};
    plan_put(&row, "weights", p->cpu ? "file" : "weights", PLAN_GIB, (double)r->weights);
    plan_put(&row, "cache", "cache", PLAN_GIB, (double)r->cache);
    plan_put(&row, "scratch_about", p->cpu ? "buffers" : "scratch*", PLAN_GIB, (double)r->scratch);
    plan_put(&row, "rounding", "rounding", PLAN_GIB, (double)r->rounding);
    plan_put(&row, "sum", "sum", PLAN_GIB, (double)(v->usable - r->left));
    plan_put(&row, "free", "free", PLAN_GIB, (double)r->left);
    return row;
}

/* The bytes that a token reads. */
static struct plan_row plan_reads_row(const int64_t r[PLAN_READS]) {
    struct plan_row row = {.json = json_object()};
    plan_put(&row, "experts", "experts", PLAN_GB, (double)r[READ_EXPERTS]);
    plan_put(&row, "backbone", "backbone", PLAN_GB, (double)r[READ_BACKBONE]);
    plan_put(&row, "cache", "cache", PLAN_GB, (double)r[READ_CACHE]);
    plan_put(&row, "head", "head", PLAN_GB, (double)r[READ_HEAD]);
    plan_put(&row, "sum", "sum", PLAN_GB, (double)(r[READ_EXPERTS] + r[READ_BACKBONE] + r[READ_CACHE] + r[READ_HEAD]));
    return row;
}

/* The largest contexts of a layout, and its speed. */
static struct plan_row plan_layout_row(const struct plan_layout *d) {
    struct plan_row row = {.json = json_pack("{s:i,s:i,s:i}", "tp", d->tp, "pp", d->pp, "context", d->context)};
    plan_put(&row, "largest_context_fp8", "fp8 cache", PLAN_TOKENS, d->largest[0]);
    plan_put(&row, "largest_context_bf16", "bf16 cache", PLAN_TOKENS, d->largest[1]);
    plan_put(&row, "limit_oneshot", "roofline", PLAN_RATE, d->roofline[0]);
    plan_put(&row, "limit_nccl", NULL, PLAN_RATE, d->roofline[1]);
    if (d->forecast.kernels) plan_put(&row, "forecast", "forecast", PLAN_RATE, 1 / d->forecast.seconds);
    return row;
}

/* Adds a line to the text; title: puts a line with the labels before it, or NULL. */
static void plan_line(char **text, const char *title, const char *name, const struct plan_row *row) {
    if (title) sb_printf(text, "%-13s%s\n", title, row->labels);
    sb_printf(text, "%-13s%s\n", name, row->text);
}

/* The text above the tables. */
static void plan_head(const struct plan *p, char **text) {
    const struct model *m = p->m;
    const char *where = p->cpu ? "of memory" : "on a GPU";
    char a[32], b[32];
    sb_printf(text, "model       %.40s: %d layers, %d of %d experts per token\n", m->name, m->n_layer,
              m->max.n_expert_used, m->n_expert_max);
    for (int i = 0, same; i < p->n_device; i += same) {
        const struct plan_device *v = &p->device[i];
        for (same = 1; i + same < p->n_device && !strcmp(v->name, v[same].name);) same++;
        sb_printf(text, "%-11s ", i ? "" : "machine");
        if (same > 1) sb_printf(text, "%d x ", same);
        sb_printf(text, "%.60s\n            %.2f GiB usable (%.2f reserved), reads %.0f GB/s (%s)\n", v->name,
                  (double)v->usable / 0x1p30, (double)(v->memory - v->usable) / 0x1p30, v->rate * 1e-9, v->source);
    }
    sb_printf(text, "verdict     %s", plan_verdicts[p->outcome]);
    with_unit((double)p->missing, a);
    if (p->outcome == PLAN_NEEDS_PRUNING)
        sb_printf(text,
                  " to %d of %d experts per layer (moe-reap --keep %d)\n            with all experts: short by %s %s",
                  p->experts, m->n_expert_max, p->experts, a, where);
    if (p->outcome == PLAN_DOES_NOT_FIT) sb_printf(text, ": short by %s %s", a, where);
    if (p->missing_pruned > 0 && p->missing_pruned < p->missing)
        sb_printf(text, "\n            with %d experts per layer: still short by %s", p->fewest,
                  with_unit((double)p->missing_pruned, a));
    if (p->shorter) sb_printf(text, "\n            with all experts: fits with -c %d", p->shorter);
    if (!p->cpu) sb_printf(text, "\nlayout      %s", p->layout[p->chosen].name);
    sb_printf(text, "\ncontext     %s tokens (trained: %s), %s cache\n\n", with_commas((uint64_t)p->context, a),
              with_commas((uint64_t)m->n_ctx_train, b), p->kv_name);
    if (snapshot_bytes(m, p->kv))
        sb_printf(text, "snapshots   %s of host memory for %d snapshots of rings and recurrent states\n\n",
                  with_unit((double)SNAPSHOTS * (double)snapshot_bytes(m, p->kv), a), SNAPSHOTS);
}

/* The answer for people, in at most 80 columns, goes to text; returns that for programs, with sizes in bytes. */
static json_t *plan_answer(const struct plan *p, char **text) {
    const struct plan_layout *d = &p->layout[p->chosen];
    const struct model *m = p->m;
    json_t *ranks = json_array(), *layouts = json_array();
    int64_t all[PLAN_READS] = {0}, most = -1;
    struct plan_row most_row = {0}; /* of the rank that reads most */
    plan_head(p, text);
    for (int i = 0; i < p->n_device; i++) {
        const struct plan_rank *r = &d->rank[i];
        struct plan_row row = plan_memory_row(p, i), reads = plan_reads_row(r->bytes_per_token);
        int64_t sum = 0;
        char name[32] = "CPU";
        for (int k = 0; k < PLAN_READS; k++) {
            sum += r->bytes_per_token[k];
            all[k] += r->bytes_per_token[k];
        }
        if (sum > most) {
            most = sum;
            most_row = reads;
        }
        json_object_set_new(row.json, "reads", reads.json);
        json_array_append_new(ranks, row.json);
        if (!p->cpu) snprintf(name, sizeof name, "GPU %d", i);
        if (d->pp > 1)
            snprintf(name, sizeof name, "GPU %d %d-%d", i, r->m.first_layer, r->m.first_layer + r->m.n_layer - 1);
        plan_line(text, i ? NULL : "GiB", name, &row);
    }
    if (!p->cpu)
        sb_printf(text, "* approximate; rounding: the driver allocates in pieces of 2 MiB; reserved: for\n"
                        "  the driver's context, NCCL and --vram-reserve\n");
    sb_printf(text, "\n");
    struct plan_row all_row = plan_reads_row(all);
    plan_line(text, "GB per token", p->cpu ? "CPU" : "one GPU", &most_row);
    if (p->n_device > 1) plan_line(text, NULL, "all GPUs", &all_row);
    sb_printf(text, "\nroofline    at most %.1f tok/s at this context, from memory bandwidth", d->roofline[0]);
    if (d->tp > 1)
        sb_printf(text, "\n            and %d all-reduces, assumed %g us; %.1f tok/s with NCCL's %g us",
                  ALL_REDUCES_PER_LAYER * m->n_layer, plan_reduce[0] * 1e6, d->roofline[1], plan_reduce[1] * 1e6);
    sb_printf(text, "\n            (real speed is lower)\n");
    if (!p->cpu)
        sb_printf(text,
                  "forecast    about %.0f tok/s at this context: %d kernels,\n"
                  "            %.2f ms beside reading (source: %s)\n",
                  1 / d->forecast.seconds, d->forecast.kernels, d->forecast.beside * 1e3, forecast_source);
    for (int k = 0; k < p->n_layout; k++) {
        const struct plan_layout *o = &p->layout[k];
        struct plan_row row = plan_layout_row(o);
        const char *mark = !o->context ? "  does not fit" : o == d ? "  <-" : "";
        json_array_append_new(layouts, row.json);
        if (p->cpu) continue;
        if (!k) sb_printf(text, "\n%-13s%s\n", "context up to", row.labels);
        sb_printf(text, "%-13s%s%s\n", o->name, row.text, mark);
    }
    json_t *json = json_pack("{s:s,s:s,s:i,s:i,s:i,s:i,s:s,s:s,s:i,s:i,s:i,s:s,s:i,s:f,s:I,s:I,s:o,s:o,s:o}", "model",
                             m->name, "architecture", m->family->arch, "layers", m->n_layer, "experts", m->n_expert_max,
                             "experts_used", m->max.n_expert_used, "trained_context", m->n_ctx_train, "machine",
                             p->cpu ? "cpu" : "gpu", "verdict", plan_verdicts[p->outcome], "tp", d->tp, "pp", d->pp,
                             "context", p->context, "kv", p->kv_name, "keep_experts", p->experts, "keep_percent",
                             p->percent, "missing", (json_int_t)p->missing, "missing_fewest_experts",
                             (json_int_t)p->missing_pruned, "ranks", ranks, "reads", all_row.json, "layouts", layouts);
    if (!p->cpu) {
        json_object_set_new(json, "forecast", json_real(1 / d->forecast.seconds));
        json_object_set_new(json, "forecast_source", json_string(forecast_source));
    }
    return json;
}

/* The layouts that the options and the model's shape allow, tensor parallelism first. */
static void plan_layouts(struct plan *p, const struct settings *set) {
    for (int tp = p->n_device; tp; tp--) {
        int pp = p->n_device / tp;
        bool asked = tp * pp == p->n_device && (!set->tp || tp == set->tp) && (!set->pp || pp == set->pp);
        if (!asked || (!p->cpu && !plan_divides(p->m, tp, pp))) continue;
        p->layout[p->n_layout].tp = tp;
        p->layout[p->n_layout].pp = pp;
        p->n_layout++;
    }
    if (!p->n_layout)
        die_usage("%d GPU%s cannot share this model%s: --tp times --pp must be %d, each --pp stage needs one of the "
                  "%d layers, and each --tp rank needs rows of every matrix",
                  p->n_device, p->n_device == 1 ? "" : "s", set->tp || set->pp ? " as --tp and --pp ask" : "",
                  p->n_device, p->m->n_layer);
}

/* --plan for GPUs that --gpus describes, for n_device GPUs of this machine (0: for all), or for the CPU. Exit code 0:
 * m fits. */
static int mode_plan(const struct model *m, struct settings *set, bool gpu, const int *device, int n_device) {
    struct plan *p = xcalloc(1, sizeof *p);
    char *text = NULL;
    p->m = m;
    p->cpu = !gpu;
    p->kv = settings_kv(set, gpu);
    p->kv_name = kv_names[p->kv];
    p->want = set->n_ctx ? set->n_ctx : m->n_ctx_train;
    p->least = set->n_ctx ? set->n_ctx : int_min(m->n_ctx_train, PLAN_CTX);
    if (gpu && p->kv == KV_F32) die_usage("--kv f32 works only on the CPU; on a GPU use fp8 or bf16");
    if (!gpu) plan_cpu(p, set);
    else if (gpus_parse(set->gpus).gib > 0) plan_described(p, set->gpus, (int64_t)set->vram_reserve << 20);
    else plan_real(p, set, device, n_device);
    plan_layouts(p, set);
    plan_solve(p);
    plan_finish(p);
    json_t *json = plan_answer(p, &text);
    if (!set->json) fputs(sb_cstr(&text), stdout);
    else if (json_dumpf(json, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(10))) die("cannot write the plan as JSON");
    else putchar('\n');
    json_decref(json);
    arrfree(text);
    int code = p->outcome == PLAN_NEEDS_PRUNING || p->outcome == PLAN_DOES_NOT_FIT ? EXIT_RUN : EXIT_OK;
    plan_free(p);
    return code;
}

/* ============================================================================================================
 * Finding a model
 *
 * What the program says when -m is left out, or names no GGUF file.
 * ============================================================================================================ */

/* Whether a name ends with .gguf and is not a later part of a split model. */
static int is_model_name(const struct dirent *d) {
    const size_t n = strlen(d->d_name);
    const char *of = strstr(d->d_name, "-of-");
    return n > 5 && !strcmp(d->d_name + n - 5, ".gguf") && !(of && (of < d->d_name + 6 || memcmp(of - 6, "-00001", 6)));
}

/* Lists the models in a directory on stderr, below a title before the first. "" stands for the current directory. */
static void models_list(const char *dir, const char *title) {
    struct dirent **entries;
    const int n = scandir(*dir ? dir : ".", &entries, is_model_name, alphasort);
    for (int i = 0; i < n; i++) {
        char *path = NULL, *shown = NULL;
        struct stat st;
        sb_printf(&path, "%s%s%s", dir, *dir ? "/" : "", entries[i]->d_name);
        if (!stat(sb_cstr(&path), &st) && S_ISREG(st.st_mode)) {
            if (*title) fprintf(stderr, "%s\n", title);
            title = "";
            term_escape(&shown, path, strlen(path));
            fprintf(stderr, "  -m %-40s %7.2f GiB\n", sb_cstr(&shown), (double)st.st_size / 0x1p30);
        }
        arrfree(path);
        arrfree(shown);
        free(entries[i]);
    }
    if (n >= 0) free(entries);
}

/* Resolves a path from the directory of the program. 0, or -1 if nothing readable is there. */
static int beside_program(const char *path, char out[PATH_MAX]) {
    char exe[PATH_MAX], full[2 * PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0) return -1;
    exe[n] = 0;
    *strrchr(exe, '/') = 0;
    snprintf(full, sizeof full, "%s/%s", exe, path);
    return realpath(full, out) && !access(out, R_OK) ? 0 : -1;
}

/* How to call moe-convert: by its path if the program was built here and not installed. */
static const char *convert_command(void) {
    static char path[PATH_MAX];
    return beside_program("build/moe-convert", path) ? "moe-convert" : path;
}

/* Ends the program because no model was given. Lists those in the current directory, in ~/.moe/models, and where make
 * install puts the demo model. */
__attribute__((noreturn)) static void model_missing(void) {
    const char *home = getenv("HOME");
    char *dir = NULL, shipped[PATH_MAX];
    message_print("no model: give -m MODEL.gguf or set MOE_MODEL");
    models_list("", "Models in this directory:");
    if (home && *home) {
        sb_printf(&dir, "%s/.moe/models", home);
        models_list(sb_cstr(&dir), "Models in ~/.moe/models:");
        arrfree(dir);
    }
    if (!beside_program("../share/moe/models", shipped)) models_list(shipped, "Models beside this program:");
    fprintf(stderr,
            "To get one (18 GB, and 18 GB more once it is converted):\n"
            "  hf download nvidia/Qwen3-30B-A3B-NVFP4 --local-dir Qwen3-30B-A3B-NVFP4\n"
            "  %s Qwen3-30B-A3B-NVFP4 -o qwen3-30b-a3b.gguf\n",
            convert_command());
    exit(EXIT_USAGE);
}

/* Whether a name looks like one on Hugging Face, ORG/NAME. */
static bool is_hub_name(const char *name) {
    const char *slash = strchr(name, '/');
    return slash && slash > name && slash[1] && *name != '.' && *name != '~' && !strchr(slash + 1, '/') &&
           !strstr(slash, ".gguf") &&
           !name[strspn(name, "/-._abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")];
}

/* Ends the program if -m names something that is not a model but can become one: a directory, or a model on Hugging
 * Face. */
static void model_check(const char *path) {
    struct stat st;
    char file[4096];
    if (stat(path, &st)) {
        const bool hub = errno == ENOENT && is_hub_name(path);
        const char *name = hub ? strchr(path, '/') + 1 : NULL;
        if (hub)
            die("'%s' is not a local file; to get it: hf download %s --local-dir %s, then %s %s -o %s.gguf", path, path,
                name, convert_command(), name, name);
        return;
    }
    if (!S_ISDIR(st.st_mode)) return;
    const int n = (int)strlen(path) - (path[strlen(path) - 1] == '/');
    snprintf(file, sizeof file, "%.*s/config.json", n, path);
    if (!access(file, F_OK))
        die("'%s' is a Hugging Face model; convert it: %s %.*s -o %.*s.gguf", path, convert_command(), n, path, n,
            path);
    message_print("'%s' is a directory: expected a GGUF file", path);
    snprintf(file, sizeof file, "%.*s", n, path);
    models_list(file, "Models in it:");
    exit(EXIT_RUN);
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
    const uint64_t have = memory_available(), budget = have > m->file_bytes ? (have - m->file_bytes) / 2 : 0;
    if (e->set->n_ctx) return e->set->n_ctx;
    return int_max(context_fit(m, settings_kv(e->set, false), budget, m->n_ctx_train), int_min(m->n_ctx_train, 256));
}

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

/* Whether the session will be on a GPU. On the CPU it is because that was asked for, or because there is no GPU and
 * none was asked for. */
static bool gpu_wanted(const struct settings *set) {
    if (set->cpu && set->gpus) die_usage("--cpu and --gpus cannot be combined");
    if (set->cpu || set->cpu_ref) return false;
    char err[ERR_MAX];
    /* Loading a kernel may wait for the GPU to be idle, which it is not while the kernel of one rank waits for
     * another's. */
    if (set->tp > 1 || set->pp > 1 || (set->gpus && strchr(set->gpus, ','))) setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    if (cuda_device_count(err)) return true;
    if (set->gpus) die("--gpus %s: %s", set->gpus, err);
    if (set->verbose) note("%s", err);
    return false;
}

/* Settles --tp and --pp, and on a GPU the device of each rank. */
static void settings_ranks(struct settings *s, const struct model *m, int gpu[MAX_RANKS]) {
    const struct gpu_list list = gpus_parse(s->gpus);
    if (!s->pp) s->pp = s->calibrate && !s->tp && list.n ? list.n : 1; /* scores want whole experts */
    if (!s->tp) s->tp = list.n > s->pp ? list.n / s->pp : 1;
    const int n = s->tp * s->pp;
    if (s->calibrate && s->tp > 1) die_usage("--calibrate needs whole experts on every rank: use --pp instead of --tp");
    if (n > MAX_RANKS)
        die_usage("--tp %d with --pp %d makes %d ranks; at most %d are supported", s->tp, s->pp, n, MAX_RANKS);
    if (list.n && list.n != n)
        die_usage("--gpus %s lists %d GPU%s; --tp %d with --pp %d needs %d", s->gpus, list.n, list.n == 1 ? "" : "s",
                  s->tp, s->pp, n);
    if (s->pp > m->n_layer)
        die_usage("--pp %d: the model has only %d layer%s", s->pp, m->n_layer, m->n_layer == 1 ? "" : "s");
    for (int i = 0; i < n; i++) gpu[i] = list.n ? list.device[i] : i;
}

/* Whether every two of these GPUs write to each other's memory, at a rate that makes it better than the host's memory.
 * */
static bool gpus_close(const int *gpu, int n) {
    enum { SLOW = 2 /* GB/s: a quarter of PCIe 3.0 x8, or detours */ };
    bool close = cuda_peers(gpu, n);
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
            note("%s=%s (%s)", d[i].name, given ? given : d[i].value, given ? "from the environment" : "moe's default");
    }
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
    if (session_open(&e->session, &e->model, set->tp, set->pp, cuda_rank_start, &o, err)) return -1;
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

/* Opens the session for the model that is loaded. 0, or -1 with a message when a GPU refuses. */
static int engine_start(struct engine *e, bool gpu, char *err) {
    struct settings *set = e->set;
    char name[192];
    int devices[MAX_RANKS];
    settings_ranks(set, &e->model, devices);
    if (gpu && engine_gpu(e, devices, err)) return -1;
    const char *idle = set->kv_splits   ? "--kv-splits"
                       : set->moe_act   ? "--moe-act"
                       : set->allreduce ? "--allreduce"
                                        : NULL;
    if (!gpu && idle) note("this runs on the CPU: %s has no effect", idle);
    if (!gpu && set->tp * set->pp > 1 && !set->cpu && !set->cpu_ref)
        note("no GPU is used: the %d ranks are threads of the CPU", set->tp * set->pp);
    if (!gpu)
        session_open_cpu(&e->session, &e->model, set->tp, set->pp,
                         (struct cpu_options){.k = set->cpu_ref ? &kernels_ref : kernels_choose(),
                                              .n_threads = settings_threads(set),
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
    else if (!set->model) model_missing();
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

/* Appends all of a file, "-": of stdin; ends the program if it cannot be read. */
static void read_input(const char *path, char **out) {
    char err[ERR_MAX];
    if (!strcmp(path, "-")) read_stdin(out);
    else if (read_file(path, out, err)) die("%s", err);
}

/* Drops one line break at the end. */
static void drop_newline(char **text) {
    if (arrlen(*text) && arrlast(*text) == '\n') (void)arrpop(*text);
    if (arrlen(*text) && arrlast(*text) == '\r') (void)arrpop(*text);
}

/* Reports a prompt that could not be answered. The exit code. */
static int report(const char *err) {
    message_print("%s", err);
    return EXIT_RUN;
}

/* Whether two names mean one file, which need not exist. */
static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    return !strcmp(a, b) || (!stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino);
}

/* Joins stdin, -f and -p by blank lines; false when there is none of them. */
static bool gather_prompt(const struct settings *set, char **out) {
    char *file = NULL;
    bool any = false;
    if (!term.in_tty && !(set->prompt_file && !strcmp(set->prompt_file, "-"))) {
        read_stdin(out);
        drop_newline(out);
        any = arrlen(*out) > 0;
    }
    if (set->prompt_file) {
        read_input(set->prompt_file, &file);
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
    if (!set->model) die_usage("--tokenize needs a model: -m FILE");
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
    if (!set->template_file && !m) die_usage("--render needs a template: --chat-template-file FILE or -m FILE");
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
    if (!rc) out_put(out.s, arrlenu(out.s));
    json_decref(given);
    json_decref(vars);
    text_free(&out);
    template_free(t);
    arrfree(source);
    arrfree(text);
    if (m) model_free(m);
    return rc ? report(err) : EXIT_OK;
}

/* Whether two layers mix tokens in the same way. */
static bool info_same(const struct layer *a, const struct layer *b) {
    return !memcmp(&a->attn, &b->attn, sizeof a->attn) && !memcmp(&a->delta, &b->delta, sizeof a->delta) &&
           !((a->has ^ b->has) & (HAS_DELTA | HAS_Q_GATE));
}

/* The line on attention or delta net of layer `first` and of all later layers like it: "layers 0-2, 4-6, 8-10, ..
 * (45)". */
static void info_attention(const struct model *m, int first) {
    enum { RANGES = 3 }; /* ranges of layers that are listed */
    const struct layer *layer = &m->layers[first];
    const struct attn *a = &layer->attn;
    const struct delta *d = &layer->delta;
    const int rope = m->ropes[a->rope].dim;
    int ranges = 0, n = 0;
    printf("%s", layer->has & HAS_DELTA ? "delta net     " : "attention     ");
    for (int il = first; il < m->n_layer; il++) {
        int last = il;
        if (!info_same(&m->layers[il], layer)) continue;
        while (last + 1 < m->n_layer && info_same(&m->layers[last + 1], layer)) last++;
        if (last - il + 1 == m->n_layer) break;
        if (ranges++ < RANGES) printf(last > il ? "%s%d-%d" : "%s%d", n ? ", " : "layers ", il, last);
        n += last - il + 1;
        il = last;
    }
    if (ranges > RANGES) printf(", .. (%d)", n);
    if (n) printf(": ");
    if (d->n_key)
        printf("%d key heads of %d, %d value heads of %d, convolution over %d tokens\n", d->n_key, d->head_k,
               d->n_value, d->head_v, d->n_conv);
    else if (a->kv_lora)
        printf("%d heads, latent %d, key %d (%d rotary), value %d%s\n", a->n_head, a->kv_lora, a->head_k, rope,
               a->head_v, a->q_lora ? ", low-rank query" : "");
    else
        printf("%d heads, %d KV heads, key %d (%d rotary), value %d%s\n", a->n_head, a->n_head_kv, a->head_k, rope,
               a->head_v, layer->has & HAS_Q_GATE ? ", gated" : "");
}

/* --info: the experts of each layer, and those that pruning kept. */
static void info_experts(const struct model *m) {
    printf("experts       %d used per token of width %d, %s router, shared width %d", m->max.n_expert_used,
           m->max.n_ff_expert, m->gating == GATING_SIGMOID ? "sigmoid" : "softmax", m->max.n_ff_shared);
    if (m->n_group > 1) printf(", %d of %d groups", m->n_group_used, m->n_group);
    printf("\nexperts kept  ");
    for (int il = 0, from = 0; il < m->n_layer; il++) {
        if (il + 1 < m->n_layer && m->layers[il + 1].n_expert == m->layers[from].n_expert) continue;
        printf(from < il ? "%slayers %d-%d: " : "%slayer %d: ", from ? ", " : "", from, il);
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

/* --list-devices: the GPUs, and the CPU. */
static int mode_list_devices(struct engine *e) {
    char err[ERR_MAX];
    const int n = cuda_device_count(err);
    if (!n) note("%s", err);
    for (int i = 0; i < n; i++) {
        struct gpu_facts f;
        const char *why = cuda_facts(i, &f, false);
        if (why) printf("GPU %d: %s\n", i, why);
        else
            printf("GPU %d: %s, %.1f GiB, %.1f GiB free\n", i, f.name, (double)f.total / 0x1p30,
                   (double)f.free / 0x1p30);
    }
    printf("CPU: %s, %d thread%s\n", kernels_choose()->name, settings_threads(e->set),
           settings_threads(e->set) == 1 ? "" : "s");
    return EXIT_OK;
}

/* --info: what the file holds. */
static int mode_info(struct engine *e) {
    const struct model *m = &e->model;
    const struct settings *set = e->set;
    char number[32];
    int dense = 0;
    for (int il = 0; il < m->n_layer; il++) dense += !m->layers[il].n_expert;
    printf("name          %s\narchitecture  %s\nlayers        %d (%d dense), %d for multi-token prediction\n", m->name,
           m->family->arch, m->n_layer, dense, m->n_mtp_layer);
    printf("hidden        %d, vocabulary %d, trained context %s\n", m->n_embd, m->n_vocab,
           with_commas((uint64_t)m->n_ctx_train, number));
    for (int il = 0; il < m->n_layer; il++) {
        int like = 0; /* the first layer like this one */
        while (!info_same(&m->layers[like], &m->layers[il])) like++;
        if (like == il) info_attention(m, il);
    }
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
    if (!set->ids && !any) die_usage("--logits needs a prompt: stdin, -p, -f or --ids");
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

/* Sums of the negative log-likelihood (nll) of tokens, given those before. */
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

/* Adds the nll of the token after `pos`; x (n_vocab) logits, `total` and `best` their log_total. */
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
    read_input(path, &text);
    tokenize_all(e->model.vocab, text, arrlenu(text), false, &ids);
    const int n = (int)arrlen(ids), window = int_min(e->session.n_ctx, TEXT_WINDOW);
    if (n < 2) die("'%s' has %d tokens: too short for --perplexity", path, n);
    if (window < 2) die("-c %d is too short for --perplexity: expected at least 2", window);
    struct nll s = {.n_vocab = e->model.n_vocab};
    const double t0 = now_seconds();
    for (int at = 0; at + 1 < n; at += window) {
        s.ids = ids + at;
        s.n = int_min(n - at, window);
        const int rc = session_score(&e->session, s.ids, s.n, nll_add, &s, err);
        if (rc < 0) die("%s", err);
        if (rc) return EXIT_INTERRUPT;
        status_line("%d of %d tokens, perplexity %.3f", at + s.n, n, exp(s.sum / (double)s.count));
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
    bool right, finite; /* it holds `want`; the logits after it are finite */
    double seconds;     /* of prefill and decode together */
};

/* Asks in a chat of its own, greedily, without thinking and without a system message. The answer is printed unless
 * settings.mute. 0, or -1 with a message. */
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
static int prompts_path(const char *name, char out[PATH_MAX], char *err) {
    char path[256];
    snprintf(path, sizeof path, "prompts/%s", name);
    if (!beside_program(path, out)) return 0;
    snprintf(path, sizeof path, "../share/moe/prompts/%s", name);
    if (!beside_program(path, out)) return 0;
    return fail(err, "prompts/%s was not found beside the program; give another text with --haystack", name);
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

/* Median seconds of a forward of n of the BENCH_PREFILL ids after `depth` other tokens, with the logits of the last
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
            session_fake_fill(s, depth);
            session_forward(s, ids + i * n % (BENCH_PREFILL - n + 1), n);
            session_head(s, n - rows, rows);
            session_wait(s);
        }
        const double all = now_seconds() - t0, one = all / repeat, fit = budget / 20 / one;
        spent += all;
        if (run >= 0 || spent > budget) t[got++] = one;
        if (run < 0) repeat = fit > BENCH_REPEAT ? BENCH_REPEAT : fit < 1 ? 1 : (int)fit;
    }
    session_fake_fill(s, depth);
    return interrupted ? 0 : median(t, got);
}

/* Marks the cache as filled from token `from` to `to`: the time of a forward depends on the depth, not on the contents.
 * A CPU's cache is written, because pages that never were are all mapped to one page of zeros, which stays in the
 * processor's cache. */
static void bench_fill_cache(struct session *s, int from, int to) {
    for (int i = 0; i < s->pg.n; i++) {
        struct rank *r = &s->pg.ranks[i];
        for (int k = 0; k < PLANE_USES * r->m->n_layer && !r->cuda; k++) {
            const struct plane *p = &r->planes[k / PLANE_USES][k % PLANE_USES];
            if (!p->data) continue;
            const size_t first = plane_used(p, (size_t)from), n = plane_used(p, (size_t)to) - first;
            memset(p->data + first * p->row_bytes, 0, n * p->row_bytes);
            if (p->type == KV_FP8) memset(p->scale + first * (size_t)p->n_group, 0, n * plane_scale_bytes(p));
        }
    }
}

/* Prints a number of the CSV after a comma, or only the comma if it is not known. */
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
    session_truncate(b->s, 0);
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
    if (s->r->cuda && call->n == 1) forecast_profile(s, row, n);
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
        row[at].fixed += one.fixed;
    }
    free(t);
    *rows = row;
    return n_row;
}

/* Prints the kernels (GPU) or operations (CPU) of a forward at depth 0, which takes `whole` seconds, on stderr. */
static void bench_profile(struct session *s, const int32_t *ids, int n, int rows, double whole, struct rates rates) {
    const bool prefill = n > LOGIT_ROWS;
    const double bandwidth = rates.bytes, reached = forecast_rate * rates.nominal;
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
    const bool forecast = n_row > 0 && row[0].fixed > 0 && reached > 0;
    fprintf(stderr, "\n%-56s %6s %9s", name, "calls", "us/call");
    if (forecast) fprintf(stderr, " %9s", "forecast");
    fprintf(stderr, " %11s %8s %7s %7s\n", "bytes/call", "GB/s", s->r->cuda ? "% copy" : "% read", "% time");
    for (int i = 0; i < n_row; i++) {
        const struct profile_row *p = &row[i];
        const double rate = p->bytes / p->seconds;
        fprintf(stderr, "%-56s %6d %9.2f", p->name, p->calls, p->seconds / p->calls * 1e6);
        if (forecast) fprintf(stderr, " %9.2f", (p->fixed + p->bytes / reached) / p->calls * 1e6);
        if (p->bytes > 0 && p->seconds > 0)
            fprintf(stderr, " %11.0f %8.1f %7.1f", p->bytes / p->calls, rate * 1e-9, 100 * rate / bandwidth);
        else fprintf(stderr, " %11s %8s %7s", "-", "-", "-");
        fprintf(stderr, " %7.1f\n", 100 * p->seconds / sum);
    }
    if (s->r->cuda)
        fprintf(stderr, "%s: %.1f kernels per layer, %.1f us in kernels, %.1f us %s, gap %.2f us per kernel\n", name,
                (double)calls / s->m->n_layer, sum * 1e6, whole * 1e6, prefill ? "the forward" : "through the graph",
                (whole - sum) * 1e6 / calls);
    else
        fprintf(stderr, "%s: %.1f us in operations, %.1f us the forward without timing them\n", name, sum * 1e6,
                whole * 1e6);
    free(row);
}

/* A benchmark under way. */
struct bench {
    struct session *s;
    struct rates rates;            /* of the machine */
    int32_t ids[BENCH_PREFILL];    /* what is fed to the model */
    int chunk;                     /* tokens of a prefill */
    double decode0[BENCH_BATCHES]; /* seconds at depth 0, by batch */
    double prefill0;               /* seconds of the prefill at depth 0 */
};

/* Measures and prints the lines of one depth. False: interrupted. */
static bool bench_depth(struct bench *b, int depth) {
    struct session *s = b->s;
    const int n = int_min(s->n_ctx - depth, b->chunk);
    const unsigned long long cache = state_bytes(s->m, s->r->kv_type, (size_t)depth);
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
    if (e->set->profile && s->pg.n > 1) die("--profile works only with a single rank, found %d", s->pg.n);
    struct rates each[MAX_RANKS];
    b.rates = session_measure(s, each);
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
        bench_profile(s, b.ids, bench_batches[i], bench_batches[i], b.decode0[i], b.rates);
    if (e->set->profile && !interrupted) bench_profile(s, b.ids, b.chunk, 1, b.prefill0, b.rates);
    return interrupted ? EXIT_INTERRUPT : EXIT_OK;
}

/* ============================================================================================================
 * Doctor: report
 *
 * --doctor finds out why a machine is slow or fails. It asks five questions in this order: does the machine start, does
 * a forward pass complete, is the output coherent, is it coherent with a long context, is decoding fast enough? The
 * report is one list of findings. As text each is printed at once, because a later check may hang; as JSON all are
 * printed at the end.
 * ============================================================================================================ */

enum doctor_step { STEP_START, STEP_FORWARD, STEP_OUTPUT, STEP_CONTEXT, STEP_SPEED, STEPS };
enum severity { SEVERITY_OK, SEVERITY_NOTE, SEVERITY_WARNING, SEVERITY_ERROR, SEVERITIES };

/* In the JSON, in the text. */
static const char *const step_names[STEPS][2] = {{"starts", "Starts?"},
                                                 {"forward", "Forward completes?"},
                                                 {"output", "Output coherent?"},
                                                 {"context", "Long context coherent?"},
                                                 {"speed", "Fast enough?"}};
static const char *const severity_names[SEVERITIES] = {"ok", "note", "warning", "error"};

enum {
    DOCTOR_FINDINGS = 128, /* that --json reports; the text shows all */
    DOCTOR_DEVICES = 8,    /* GPUs that are checked */
    DOCTOR_COLUMNS = 100   /* of the text */
};

struct finding {
    enum doctor_step step;
    enum severity severity;
    char what[ERR_MAX];
    const char *advice; /* NULL: there is nothing to change */
};

struct doctor {
    struct settings *set;
    enum doctor_step step;
    bool open[STEPS]; /* has findings */
    int count[SEVERITIES];
    struct finding found[DOCTOR_FINDINGS];
    int n;
    /* the machine */
    char bus[DOCTOR_DEVICES][24];             /* NVIDIA's devices, as sysfs names them */
    int n_bus, n_gpu;                         /* how many; GPUs that CUDA can use */
    int device[MAX_RANKS];                    /* GPUs of the ranks */
    double link[DOCTOR_DEVICES];              /* bytes per second between host and GPU, 0: not known */
    struct gpu_facts gpu;                     /* the GPU that is checked now, */
    int cores;                                /* processors */
    double memory, available, limit, swapped; /* bytes; limit: of the control group, 0: none */
    double load;                              /* average number of threads that want to run */
    char measured[ERR_MAX];                   /* by the last probe that found something */
};

/* Prints text behind a head of `indent` columns, broken between words. */
static void doctor_wrap(const char *head, int indent, const char *text) {
    int room = DOCTOR_COLUMNS - indent, n = (int)strlen(text);
    printf("%-*s", indent, head);
    while (n > room) {
        int cut = room;
        while (cut > room / 2 && text[cut] != ' ') cut--;
        if (text[cut] != ' ') cut = room;
        printf("%.*s\n%*s", cut, text, indent, "");
        text += cut;
        text += *text == ' ';
        n = (int)strlen(text);
    }
    puts(text);
}

/* Goes on to a step; the text names the steps before it that have no findings. */
static void doctor_step(struct doctor *d, enum doctor_step step) {
    for (; d->step < step; d->step++)
        if (!d->open[d->step] && !d->set->json) printf("%s\n  -        not checked\n", step_names[d->step][1]);
}

static void finding_print(const struct finding *f, bool first) {
    char head[16];
    if (first) puts(step_names[f->step][1]);
    snprintf(head, sizeof head, "  %s", severity_names[f->severity]);
    doctor_wrap(head, 11, f->what);
    if (f->advice) doctor_wrap("           -> ", 14, f->advice);
    fflush(stdout);
}

/* Adds a finding to the report. The text shows it at once. */
__attribute__((format(printf, 4, 5))) static void doctor_find(struct doctor *d, enum severity severity,
                                                              const char *advice, const char *fmt, ...) {
    struct finding f = {.step = d->step, .severity = severity, .advice = severity == SEVERITY_OK ? NULL : advice};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f.what, sizeof f.what, fmt, ap);
    va_end(ap);
    gguf_printable((struct gguf_str){f.what, strlen(f.what)}, f.what, sizeof f.what); /* drivers may say anything */
    d->count[severity]++;
    if (d->n < DOCTOR_FINDINGS) d->found[d->n++] = f;
    if (!d->set->json) finding_print(&f, !d->open[d->step]);
    d->open[d->step] = true;
}

/* Prints the last line, or the JSON. Returns the exit code. */
static int doctor_end(struct doctor *d) {
    int code = d->count[SEVERITY_ERROR] ? EXIT_RUN : EXIT_OK;
    doctor_step(d, STEPS);
    if (!d->set->json) {
        const int errors = d->count[SEVERITY_ERROR], warnings = d->count[SEVERITY_WARNING];
        printf("%d error%s, %d warning%s\n", errors, errors == 1 ? "" : "s", warnings, warnings == 1 ? "" : "s");
        return code;
    }
    json_t *list = json_array();
    for (int i = 0; i < d->n; i++) {
        const struct finding *f = &d->found[i];
        json_array_append_new(list, json_pack("{s:s,s:s,s:s,s:s}", "step", step_names[f->step][0], "level",
                                              severity_names[f->severity], "what", f->what, "advice",
                                              f->advice ? f->advice : ""));
    }
    json_t *all = json_pack("{s:o,s:i}", "findings", list, "exit", code);
    json_dumpf(all, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(all);
    return code;
}

/* Gets the message that ends the program, so that the report ends with it. */
static void doctor_dies(void *arg, const char *line) {
    struct doctor *d = arg;
    last_words.run = NULL;
    alloc_guard_end();
    doctor_find(d, SEVERITY_ERROR,
                d->step == STEP_START
                    ? "read the message: it names what is missing"
                    : "run it again with --cpu: if that works, the GPU, its driver or its image is at fault",
                "%s%s", rank_label, line);
    doctor_end(d);
    fflush(stdout);
}

/* ============================================================================================================
 * Doctor: machine
 *
 * Checks that need no model: the program, the GPUs, their links, the host. Most of them are a row of doctor_checks and
 * a probe. To add one, write the probe and insert the row where the report should show it. Links and copies have
 * functions of their own. Text from the kernel and from drivers is not trusted: it is read into bounded buffers and
 * printed as ASCII.
 * ============================================================================================================ */

enum {
    BLOCK_SHARED = 101376, /* bytes of shared memory that kernels need for a block */
    FACT_MAX = 4096        /* bytes of a file of the kernel that are read */
};

static const char *doctor_root = ""; /* before /proc, /sys and /dev: tests bring their own */

/* Reads a file of the kernel; "" when there is none. */
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

/* The number behind a word in a text; 0: the word is not there. */
static double fact_number(const char *text, const char *word) {
    const char *at = strstr(text, word);
    return at ? strtod(at + strlen(word), NULL) : 0;
}

static bool fact_says(const char *path, const char *word) {
    char text[FACT_MAX];
    return strstr(fact(text, "%s", path), word) != NULL;
}

static bool fact_exists(const char *path) {
    char full[512];
    snprintf(full, sizeof full, "%.200s%s", doctor_root, path);
    return !access(full, F_OK);
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

static bool iommu_active(void) {
    DIR *dir = fact_dir("/sys/class/iommu");
    bool any = fact_entry(dir) != NULL;
    if (dir) closedir(dir);
    return any || fact_says("/proc/cmdline", "intel_iommu=on") || fact_says("/proc/cmdline", "amd_iommu=on");
}

/* Bytes of memory that the control group of this process may use; 0: there is no limit. */
static double cgroup_limit(void) {
    char text[FACT_MAX], path[256] = "";
    fact(text, "/proc/self/cgroup");
    const char *own = strstr(text, "0::/");
    if (own) sscanf(own + 3, "%255[^\n]", path);
    if (!*fact(text, "/sys/fs/cgroup%s/memory.max", path) && !*fact(text, "/sys/fs/cgroup/memory.max"))
        fact(text, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
    return strtod(text, NULL); /* "max" is 0 */
}

/* ---- probes ---- */

/* Keeps what a probe measured, for the text of its check, if it found something. Returns found. */
__attribute__((format(printf, 3, 4))) static bool measured(struct doctor *d, bool found, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    if (found) vsnprintf(d->measured, sizeof d->measured, fmt, ap);
    va_end(ap);
    return found;
}

/* A probe says whether there is something to report. */
#define PROBE(name) static bool name(__attribute__((unused)) struct doctor *d)

PROBE(nvidia_here) { return d->n_bus || fact_exists("/proc/driver/nvidia"); }
PROBE(nvidia_absent) { return !nvidia_here(d); }
PROBE(gpu_unwanted) { return !nvidia_here(d) && !d->set->gpus; }
PROBE(gpus_wanted) { return measured(d, d->set->gpus, "%s", d->set->gpus); }
PROBE(nouveau_loaded) { return fact_exists("/sys/module/nouveau"); }
PROBE(nouveau_matters) { return (d->n_gpu || d->n_bus) && nouveau_loaded(d); }
PROBE(driver_absent) { return !fact_exists("/proc/driver/nvidia"); }
PROBE(devices_absent) { return !fact_exists("/dev/nvidiactl") || !fact_exists("/dev/nvidia0"); }
PROBE(driver_refused) { return strstr(d->measured, "newer driver") != NULL; }
PROBE(gpus_hidden) { return measured(d, d->n_bus > d->n_gpu, "%d of the %d", d->n_gpu, d->n_bus); }
PROBE(driver_older) {
    const int has = d->gpu.driver, wants = d->gpu.runtime;
    return measured(d, has < wants, "%d.%d, this program was built with %d.%d", has / 1000, has % 1000 / 10,
                    wants / 1000, wants % 1000 / 10);
}
PROBE(image_fails) { return measured(d, d->gpu.kernel_error[0], "%s", d->gpu.kernel_error); }
PROBE(chip_too_old) { return measured(d, d->gpu.major < 8, "%d.%d", d->gpu.major, d->gpu.minor); }
PROBE(image_without_fp4) { return d->gpu.major == 12 && d->gpu.image[0] == 'P'; }
PROBE(shared_memory_small) {
    return measured(d, d->gpu.block_shared < BLOCK_SHARED, "%d of the %d", d->gpu.block_shared, BLOCK_SHARED);
}
PROBE(memory_held) {
    const double total = (double)d->gpu.total, held = total - (double)d->gpu.free;
    return measured(d, held > 1.5 * 0x1p30 + 0.01 * total, "%.1f GiB", held / 0x1p30);
}
PROBE(vectors_absent) { return kernels_choose() == &kernels_scalar; }
PROBE(memory_limited) { return measured(d, d->limit > 0 && d->limit < d->memory, "%.1f GiB", d->limit / 0x1p30); }
PROBE(memory_swapped) { return measured(d, d->swapped > 256 * 0x1p20, "%.1f GiB", d->swapped / 0x1p30); }
PROBE(wsl) { return fact_says("/proc/sys/kernel/osrelease", "icrosoft"); }
PROBE(powersave) { return fact_says("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave"); }
PROBE(huge_pages_off) { return fact_says("/sys/kernel/mm/transparent_hugepage/enabled", "[never]"); }
PROBE(cores_busy) {
    return measured(d, d->load > 0.5 * d->cores, "%.1f on %d processor%s", d->load, d->cores, d->cores == 1 ? "" : "s");
}
PROBE(iommu_matters) { return (d->n_gpu >= 2 || d->n_bus >= 2) && iommu_active(); }
PROBE(locking_limited) {
    struct rlimit lock = {0, 0};
    const bool low = (d->n_gpu || d->n_bus) && !getrlimit(RLIMIT_MEMLOCK, &lock) && lock.rlim_cur < (rlim_t)8 << 20;
    return measured(d, low, "%llu KiB", (unsigned long long)lock.rlim_cur >> 10);
}

/* ---- the table ---- */

/* What a row is about; ELSE: it is skipped if the row above was found, or skipped itself. */
enum subject { ON_BUILD, ON_NO_GPU, ON_CUDA, ON_GPU, ON_HOST, ELSE = 8 };

struct check {
    enum subject subject;
    enum severity severity;
    bool (*probe)(struct doctor *d); /* NULL: always found */
    const char *what, *advice;       /* %s in `what`: d->measured */
};

#define ADVICE_NOUVEAU "blacklist nouveau, install NVIDIA's driver, reboot"
#define ADVICE_TOOLKIT "install the CUDA toolkit (nvcc 12.9 or newer) and build again with make"
#define ADVICE_OMIT    "leave it out: give --gpus the numbers of the others, or use --cpu"
#define ADVICE_DRIVER  "install a driver that supports the CUDA version this program was built with"

static const struct check doctor_checks[] = {
    {ON_BUILD, SEVERITY_ERROR, gpus_wanted, "--gpus %s: this program was built without CUDA", ADVICE_TOOLKIT},
    {ON_BUILD | ELSE, SEVERITY_WARNING, nvidia_here,
     "there is an NVIDIA GPU, but this program was built without CUDA: it uses the CPU", ADVICE_TOOLKIT},
    {ON_BUILD, SEVERITY_OK, nvidia_absent, "no GPU here: everything runs on the CPU", NULL},

    {ON_NO_GPU, SEVERITY_OK, gpu_unwanted, "no GPU here: everything runs on the CPU (%s)", NULL},
    {ON_NO_GPU | ELSE, SEVERITY_ERROR, nvidia_absent, "there is no GPU for --gpus: %s",
     "leave --gpus out to run on the CPU"},
    {ON_NO_GPU | ELSE, SEVERITY_ERROR, nouveau_loaded, "%s", ADVICE_NOUVEAU},
    {ON_NO_GPU | ELSE, SEVERITY_ERROR, driver_absent, "%s",
     "install NVIDIA's driver, or load it: modprobe nvidia; in a container: --gpus all"},
    {ON_NO_GPU | ELSE, SEVERITY_ERROR, devices_absent, "%s",
     "there is no /dev/nvidia0: run nvidia-modprobe, or give the container its GPUs (--gpus all)"},
    {ON_NO_GPU | ELSE, SEVERITY_ERROR, driver_refused, "%s", ADVICE_DRIVER},
    {ON_NO_GPU | ELSE, SEVERITY_ERROR, NULL, "%s",
     "check nvidia-smi and the kernel's log (dmesg); reboot if the card has fallen off the bus"},

    {ON_CUDA, SEVERITY_WARNING, gpus_hidden, "CUDA sees only %s NVIDIA GPUs on the bus",
     "check what nvidia-smi lists, and CUDA_VISIBLE_DEVICES"},
    {ON_CUDA, SEVERITY_WARNING, driver_older, "the driver supports CUDA %s", ADVICE_DRIVER},

    {ON_GPU, SEVERITY_ERROR, image_fails, "a kernel does not run: %s",
     "build again with nvcc 12.9 or newer (make clean, make), or install a newer driver"},
    {ON_GPU | ELSE, SEVERITY_ERROR, chip_too_old, "capability %s is too old: expected at least 8.0", ADVICE_OMIT},
    {ON_GPU | ELSE, SEVERITY_WARNING, image_without_fp4,
     "this program has no sm_120f image, so its FP4 GEMMs are not used",
     "build again with nvcc 12.9 or newer (make clean, make)"},
    {ON_GPU, SEVERITY_ERROR, shared_memory_small, "a block can have only %s bytes of shared memory that kernels need",
     ADVICE_OMIT},
    {ON_GPU, SEVERITY_NOTE, memory_held, "other programs hold %s of its memory",
     "nvidia-smi lists them; stop those that are not needed"},

    {ON_HOST, SEVERITY_WARNING, vectors_absent,
     "no vector instructions of this processor are used: the CPU will be slow",
     "use a processor with AVX2 or AVX-512 (x86-64) or dot products (arm64), or a GPU"},
    {ON_HOST, SEVERITY_NOTE, memory_limited, "a control group limits memory to %s",
     "raise the limit of the container or the service (--memory, MemoryMax=)"},
    {ON_HOST, SEVERITY_NOTE, memory_swapped, "%s are swapped out", "stop programs that are not needed, or add memory"},
    {ON_HOST, SEVERITY_NOTE, wsl,
     "this is WSL2: the GPU works through Windows' driver; peer access, pinned memory and disks are slower",
     "keep model files in the Linux file system, raise memory= in .wslconfig; for several GPUs boot Linux"},
    {ON_HOST, SEVERITY_NOTE, powersave, "the processor's governor is powersave: it may be slow to speed up",
     "cpupower frequency-set -g performance"},
    {ON_HOST, SEVERITY_NOTE, huge_pages_off,
     "transparent huge pages are off: the cache and activations on the CPU are slower to reach",
     "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled, as root"},
    {ON_HOST, SEVERITY_NOTE, cores_busy, "the load average is %s: times below are noisy",
     "stop other programs and look again"},
    {ON_HOST, SEVERITY_NOTE, iommu_matters,
     "the IOMMU is active: copies between GPUs may be redirected through the host",
     "where peer access is missing or slow: boot with iommu=pt, or turn the IOMMU and ACS off"},
    {ON_HOST, SEVERITY_WARNING, nouveau_matters,
     "the kernel module nouveau is loaded: CUDA cannot use a card that it drives", ADVICE_NOUVEAU},
    {ON_HOST, SEVERITY_NOTE, locking_limited, "only %s of memory may be locked: pinned buffers may fail",
     "ulimit -l unlimited, or LimitMEMLOCK= of the service"},
};

/* Runs the checks of a subject in the order of the table. who: the device to name before their text, or NULL. */
static void doctor_check(struct doctor *d, enum subject subject, const char *who) {
    bool found = false;
    for (size_t i = 0; i < sizeof doctor_checks / sizeof *doctor_checks; i++) {
        const struct check *c = &doctor_checks[i];
        char what[ERR_MAX];
        if ((c->subject | ELSE) != (subject | ELSE) || ((c->subject & ELSE) && found)) continue;
        found = !c->probe || c->probe(d);
        if (!found) continue;
        snprintf(what, sizeof what, c->what, d->measured);
        doctor_find(d, c->severity, c->advice, "%s%s%s", who ? who : "", who ? ": " : "", what);
    }
}

/* ---- GPUs ---- */

/* Finds NVIDIA's display adapters on the PCI bus. */
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

/* Generation of a PCIe link by its billions of transfers per second; 0: unknown. */
static int link_generation(double gt) {
    static const double rate[] = {2.5, 5, 8, 16, 32, 64};
    for (int i = 0; i < 6; i++)
        if (gt > 0.9 * rate[i] && gt < 1.1 * rate[i]) return i + 1;
    return 0;
}

/* Checks the PCIe link of a device, which a copy has just woken up. Returns bytes per second, 0: not known. */
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
    const double reach = stat(path, &st) ? 0 : (double)st.st_size;
    if (reach > 0) snprintf(bar, sizeof bar, ", BAR %.2f GiB", reach / 0x1p30);
    const bool narrow = v[0] < v[1];
    const char *advice = narrow ? "seat the card again, or in a slot with all lanes to the processor; look for shared "
                                  "lanes and bifurcation in the firmware, and for a riser"
                                : "idle links slow down, so look again under load; then at the slot, a riser, and the "
                                  "link speed in the firmware";
    doctor_find(d,
                narrow          ? SEVERITY_WARNING
                : gen < gen_max ? SEVERITY_NOTE
                                : SEVERITY_OK,
                advice, "%s: PCIe %d.0 x%.0f of at most %d.0 x%.0f, %.1f GB/s%s%s", who, gen, v[0], gen_max, v[1],
                rate * 1e-9, numa, bar);
    if (reach > 0 && reach < 0.5 * (double)memory)
        doctor_find(d, SEVERITY_NOTE, "turn on Resizable BAR and \"above 4G decoding\" in the firmware",
                    "%s: only %.2f GiB of its memory can be reached over PCIe at once", who, reach / 0x1p30);
    return rate;
}

/* What the program was built for; without CUDA also the GPUs that it cannot use. */
static void doctor_build(struct doctor *d) {
    char nccl[24];
    if (cuda_targets())
        doctor_find(d, SEVERITY_OK, NULL, "moe %s, CPU: %s; GPU: %s; NCCL: %s", MOE_VERSION, kernels_choose()->name,
                    cuda_targets(), nccl_name(nccl));
    else {
        doctor_find(d, SEVERITY_OK, NULL, "moe %s, CPU: %s; built without CUDA", MOE_VERSION, kernels_choose()->name);
        doctor_check(d, ON_BUILD, NULL);
    }
    for (int i = 0; i < d->n_bus; i++) doctor_link(d, d->bus[i], d->bus[i], 0);
}

static void doctor_gpu(struct doctor *d, int i) {
    struct gpu_facts *f = &d->gpu;
    char who[16];
    double rate, latency;
    const char *why = cuda_facts(i, f, true);
    snprintf(who, sizeof who, "GPU %d", i);
    if (why) {
        doctor_find(d, SEVERITY_ERROR, "see what nvidia-smi says about it, stop what uses it, or omit it from --gpus",
                    "%s: %s", who, why);
        return;
    }
    cuda_pair(i, i, &rate, &latency);
    doctor_find(d, SEVERITY_OK, NULL,
                "%s: %.63s, capability %d.%d, image %s, CUDA %d.%d, %.1f of %.1f GiB free, copies %.1f GB/s", who,
                f->name, f->major, f->minor, f->image, f->driver / 1000, f->driver % 1000 / 10,
                (double)f->free / 0x1p30, (double)f->total / 0x1p30, rate * 1e-9);
    doctor_check(d, ON_GPU, who);
    for (char *p = f->bus; *p; p++) *p = (char)tolower((unsigned char)*p); /* as sysfs writes it */
    d->link[i] = doctor_link(d, who, f->bus, f->total);
}

/* Measures copies between two GPUs, both ways. */
static void doctor_pair(struct doctor *d, int a, int b) {
    double rate[2], latency[2];
    bool peers = cuda_peers((const int[]){a, b}, 2);
    cuda_pair(a, b, &rate[0], &latency[0]);
    cuda_pair(b, a, &rate[1], &latency[1]);
    bool slow = fmin(rate[0], rate[1]) < fmin(d->link[a], d->link[b]) / 4;
    doctor_find(d, peers && !slow ? SEVERITY_OK : SEVERITY_WARNING,
                "all-reduces then go through the host: set iommu=pt or turn the IOMMU and ACS off, put both cards "
                "below one root complex; drivers refuse peer access to some consumer cards",
                "GPU %d and %d: %speer access, %.1f and %.1f GB/s, %.1f and %.1f us%s", a, b, peers ? "" : "no ",
                rate[0] * 1e-9, rate[1] * 1e-9, latency[0] * 1e6, latency[1] * 1e6,
                slow ? ", less than a quarter of the link's rate" : "");
}

static void doctor_gpus(struct doctor *d) {
    char err[ERR_MAX] = "";
    setenv("CUDA_MODULE_LOADING", "EAGER", 0); /* see gpu_wanted */
    d->n_gpu = cuda_device_count(err);
    if (!d->n_gpu) {
        measured(d, true, "%s", err);
        doctor_check(d, ON_NO_GPU, NULL);
        for (int i = 0; i < d->n_bus; i++) doctor_link(d, d->bus[i], d->bus[i], 0);
        return;
    }
    int n = int_min(d->n_gpu, DOCTOR_DEVICES), ranks = d->set->tp * d->set->pp;
    cuda_facts(0, &d->gpu, false);
    doctor_check(d, ON_CUDA, NULL);
    for (int i = 0; i < n && !interrupted; i++) doctor_gpu(d, i);
    for (int i = 0; i < ranks; i++)
        if (d->device[i] >= d->n_gpu)
            doctor_find(d, SEVERITY_ERROR, "numbers start at 0; give fewer ranks (--tp, --pp) or name GPUs (--gpus)",
                        "rank %d needs GPU %d; this machine has %d", i, d->device[i], d->n_gpu);
    for (int a = 0; a < n && a < MAX_RANKS; a++)
        for (int b = a + 1; b < n && b < MAX_RANKS && !interrupted; b++) doctor_pair(d, a, b);
}

static void doctor_host(struct doctor *d) {
    char text[FACT_MAX];
    const int threads = settings_threads(d->set);
    d->cores = processors();
    d->load = strtod(fact(text, "/proc/loadavg"), NULL);
    d->limit = cgroup_limit();
    fact(text, "/proc/meminfo");
    d->memory = fact_number(text, "MemTotal:") * 1024;
    d->available = fact_number(text, "MemAvailable:") * 1024;
    d->swapped = (fact_number(text, "SwapTotal:") - fact_number(text, "SwapFree:")) * 1024;
    doctor_find(d, SEVERITY_OK, NULL,
                "host: %d processor%s, %.1f of %.1f GiB of memory available, reads %.1f GB/s with %d thread%s",
                d->cores, d->cores == 1 ? "" : "s", d->available / 0x1p30, d->memory / 0x1p30,
                memory_bandwidth(threads) * 1e-9, threads, threads == 1 ? "" : "s");
    doctor_check(d, ON_HOST, NULL);
    if (d->limit > 0 && d->limit < d->available) d->available = d->limit;
}

/* ============================================================================================================
 * Doctor: model
 *
 * Checks that compute: all-reduces, reading the file, an answer, a fact in a long context, the speed of decoding.
 * ============================================================================================================ */

static void nccl_defaults(const int *gpu, int n, bool verbose);

enum {
    ALLREDUCE_SLOW = 50,   /* microseconds of an all-reduce of one token over GPUs, above which a warning is due */
    SPEED_PERCENT = 50,    /* of the roofline, below which decoding is too slow */
    SPEED_LAYER = 10,      /* microseconds of reading a layer, below which launches take a GPU longer */
    LOAD_SECONDS = 120,    /* of loading, above which a warning is due */
    DISK_PIECE = 4 << 20,  /* bytes of a read */
    DISK_MOST = 256 << 20, /* bytes that are read at most */
    DISK_LEAST = 8 << 20,  /* bytes that are enough to tell a speed */
    DISK_SECONDS = 3       /* of reading at most */
};

/* ---- all-reduces ---- */

enum { ALLREDUCE_SIZES = 2 };
static const int all_reduce_tokens[ALLREDUCE_SIZES] = {1, 128}; /* of 2,048 floats: 8 KB, 1 MB */
typedef double all_reduce_times[ALLREDUCE_SIZES][2];            /* seconds: one-shot, NCCL; 0: not possible */

/* Times the all-reduces of the slowest rank. Returns the seconds of one token by the faster way. */
static double measure_all_reduce(struct session *s, double t[ALLREDUCE_SIZES][2]) {
    for (int i = 0; i < ALLREDUCE_SIZES; i++)
        for (int nccl = 0; nccl < 2; nccl++) t[i][nccl] = session_time_all_reduce(s, all_reduce_tokens[i], nccl);
    return t[0][0] > 0 && t[0][1] > 0 ? fmin(t[0][0], t[0][1]) : fmax(t[0][0], t[0][1]);
}

/* Times all-reduces of n ranks on a synthetic model of one layer. */
static void doctor_all_reduce(struct doctor *d, bool gpu, int n) {
    struct synth y = synth_parse("qwen3-30b-a3b:layers=1,experts=8");
    struct model m = {0};
    struct session s;
    all_reduce_times t;
    char err[ERR_MAX] = "";
    int failed = 0;
    y.n_head = y.n_head_kv = MAX_RANKS; /* so that every rank has a shard */
    y.n_ff = 64 * MAX_RANKS;
    y.n_vocab = 1024;
    synth_make(&m, &y, NULL, true);
    if (gpu) {
        struct cuda_options o = {.n_ctx = 256, .kv = KV_BF16, .allreduce = d->set->allreduce};
        memcpy(o.device, d->device, sizeof o.device);
        if (o.allreduce != ALLREDUCE_ONESHOT) nccl_defaults(d->device, n, d->set->verbose);
        failed = session_open(&s, &m, n, 1, cuda_rank_start, &o, err);
    } else
        session_open_cpu(
            &s, &m, n, 1,
            (struct cpu_options){.k = kernels_choose(), .n_threads = processors(), .n_ctx = 256, .kv = KV_BF16});
    if (failed) {
        doctor_find(d, d->set->tp > 1 ? SEVERITY_ERROR : SEVERITY_WARNING,
                    "try --allreduce oneshot, then --gpus with fewer GPUs; NCCL_DEBUG=INFO makes NCCL say more",
                    "%d ranks cannot start: %s", n, err);
        model_free(&m);
        return;
    }
    const bool slow = measure_all_reduce(&s, t) * 1e6 > ALLREDUCE_SLOW && gpu;
    for (int k = 0; k < 2; k++) {
        static const char *const where[2][2] = {{"the CPU", ""}, {"GPUs, one-shot", "GPUs, NCCL"}};
        char us[ALLREDUCE_SIZES][24] = {"-", "-"};
        for (int i = 0; i < ALLREDUCE_SIZES; i++)
            if (t[i][k] > 0) snprintf(us[i], sizeof us[i], "%.1f us", t[i][k] * 1e6);
        if (t[0][k] + t[1][k] > 0)
            doctor_find(d, slow ? SEVERITY_WARNING : SEVERITY_OK,
                        "every layer needs two: see above what slows copies between GPUs, or use --pp",
                        "an all-reduce over %d ranks on %s: 8 KB %s, 1 MB %s", n, where[gpu][k], us[0], us[1]);
    }
    session_free(&s);
    model_free(&m);
}

/* ---- the file ---- */

/* The kind of a file system that is slow to map files from, by its number of statfs; NULL: it is not slow. */
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

/* Bytes per second of reading parts of the file that are not in the page cache; 0: too little to tell. */
static double disk_rate(const char *path) {
    static uint8_t resident[DISK_PIECE / 4096],
        to[DISK_PIECE] __attribute__((aligned(4096))); /* as O_DIRECT needs it */
    struct stat st;
    double t = 0, done = 0;
    int direct = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT), plain = open(path, O_RDONLY | O_CLOEXEC);
    uint8_t *map = MAP_FAILED;
    if (plain >= 0 && !fstat(plain, &st) && st.st_size >= DISK_LEAST)
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, plain, 0);
    const off_t end = map == MAP_FAILED ? 0 : st.st_size;
    for (off_t at = 0; at + DISK_PIECE <= end && done < DISK_MOST && t < DISK_SECONDS && !interrupted;
         at += DISK_PIECE) {
        if (mincore(map + at, DISK_PIECE, resident) || memchr(resident, 1, sizeof resident)) continue;
        double t0 = now_seconds();
        ssize_t n = direct >= 0 ? pread(direct, to, DISK_PIECE, at) : -1;
        if (n < 0) { /* this file system cannot read past the page cache */
            n = pread(plain, to, DISK_PIECE, at);
            posix_fadvise(plain, at, DISK_PIECE, POSIX_FADV_DONTNEED);
        }
        if (n <= 0) break;
        t += now_seconds() - t0;
        done += (double)n;
    }
    if (map != MAP_FAILED) munmap(map, (size_t)st.st_size);
    if (direct >= 0) close(direct);
    if (plain >= 0) close(plain);
    return done >= DISK_LEAST ? done / t : 0;
}

/* Checks size, place and speed of the model's file before it is loaded. False: it cannot be read. */
static bool doctor_file(struct doctor *d, bool gpu) {
    const char *path = d->set->model;
    char err[ERR_MAX], speed[96] = "", size[32];
    struct statfs fs;
    struct gguf g;
    double bytes = 0, cached = 0;
    if (gguf_open(&g, path, err, ERR_MAX)) {
        doctor_find(d, SEVERITY_ERROR,
                    "check the path; if the file is damaged or incomplete, download or convert it again", "%s", err);
        return false;
    }
    for (uint32_t i = 0; i < g.n_images; i++) {
        bytes += (double)g.images[i].size;
        cached += (double)g.images[i].size * image_resident(&g.images[i]);
    }
    gguf_close(&g);
    const double rate = disk_rate(path), wait = rate > 0 ? (bytes - cached) / rate : 0;
    if (rate > 0)
        snprintf(speed, sizeof speed, ", the disk reads %.2f GB/s, so loading takes %.1f s", rate * 1e-9, wait);
    doctor_find(d, wait > LOAD_SECONDS ? SEVERITY_WARNING : SEVERITY_OK, "copy the file to a local NVMe disk",
                "the file has %s, %.0f %% of it in the page cache%s", with_unit(bytes, size), 100 * cached / bytes,
                speed);
    const char *slow = statfs(path, &fs) ? NULL : slow_files((uint64_t)fs.f_type);
    if (slow)
        doctor_find(d, SEVERITY_WARNING, "copy it to a local disk; in a container mount that as a volume",
                    "the file is on %s, which is slow to load from", slow);
    if (!gpu && bytes > d->available && d->available > 0)
        doctor_find(d, SEVERITY_WARNING,
                    "use a smaller or pruned model, more memory, or a GPU that holds it (see --plan)",
                    "the file is larger than the %.1f GiB of available memory: every token reads from disk",
                    d->available / 0x1p30);
    return true;
}

/* ---- the model at work ---- */

/* Runs A and B of the smoke test; without a vocabulary only a forward pass. False: no more can be checked. */
static bool doctor_answer(struct doctor *d, struct engine *e) {
    static const char broken[] =
        "compare with --cpu-ref: if that is right, try --kv bf16 and --moe-act bf16 and report "
        "it; if not, the file is damaged: convert it again";
    char err[ERR_MAX] = "";
    const bool mute = !e->model.vocab->n_tokens;
    bool finite = true, right = false;
    double seconds, t0 = now_seconds();
    doctor_step(d, STEP_FORWARD);
    if (mute) {
        session_decode(&e->session, 0);
        const float *x = session_logits(&e->session);
        for (int i = 0; i < e->model.n_vocab; i++) finite &= isfinite(x[i]) != 0;
        seconds = now_seconds() - t0;
    } else if (smoke_ask(e, &finite, &right, &seconds, err)) {
        if (!interrupted)
            doctor_find(d, SEVERITY_ERROR, "read the message; a template can be given with --chat-template-file",
                        "no answer: %s", err);
        return false;
    }
    doctor_find(d, finite ? SEVERITY_OK : SEVERITY_ERROR, broken, "A: %s in %.2f s, logits %s",
                mute ? "a forward pass" : "an answer", seconds, finite ? "are finite" : "are not finite");
    doctor_step(d, STEP_OUTPUT);
    if (mute)
        doctor_find(d, SEVERITY_NOTE, "use a file with a vocabulary, converted by moe-convert",
                    "B and C, questions and answers, are not checked: the model has no vocabulary");
    else
        doctor_find(d, right ? SEVERITY_OK : SEVERITY_ERROR, broken, "B: 7 squared is %s",
                    right ? "49" : "not answered with 49");
    return true;
}

/* Runs C of the smoke test. */
static void doctor_needle(struct doctor *d, struct engine *e) {
    char err[ERR_MAX] = "";
    int n = smoke_tokens(&e->session), secret;
    double seconds;
    if (!e->model.vocab->n_tokens) return;
    doctor_step(d, STEP_CONTEXT);
    if (n < 64) {
        doctor_find(d, SEVERITY_NOTE, "run with -c 1200", "C: a context of %d tokens is too small for the needle",
                    e->session.n_ctx);
        return;
    }
    int found = needle_run(e, n, 50, &secret, &seconds, err);
    if (interrupted) return;
    if (found < 0)
        doctor_find(d, SEVERITY_ERROR, "read the message; a text can be given with --haystack", "C: %s", err);
    else
        doctor_find(d, found ? SEVERITY_OK : SEVERITY_ERROR,
                    "try --kv bf16, and --needle N with smaller N; compare with --cpu-ref: if that finds it, report it",
                    "C: a fact in %d tokens is %s, %.2f s", n, found ? "found" : "NOT found", seconds);
}

/* The roofline of decoding in tokens per second. each, all: bytes per second that the ranks read; reduce: seconds of
 * an all-reduce. */
static double doctor_roofline(const struct session *s, const struct rates *each, double all, double reduce) {
    struct plan *p = xcalloc(1, sizeof *p);
    struct plan_layout *v = &p->layout[0];
    const bool gpu = s->r->cuda != NULL;
    p->m = s->m;
    p->cpu = !gpu;
    p->kv = s->r->kv_type;
    v->tp = gpu ? s->pg.n_rank : 1; /* ranks on the CPU share its memory: one reads what all of them do */
    v->pp = gpu ? s->pg.n_stage : 1;
    p->n_device = v->tp * v->pp;
    for (int i = 0; i < p->n_device; i++) {
        p->device[i].rate = gpu ? each[i].bytes : all;
        plan_rank(&v->rank[i], p, s->m, (struct shard){i % v->tp, v->tp, i / v->tp, v->pp});
    }
    double tokens = plan_roofline(p, v, 0, reduce);
    plan_free(p);
    return tokens;
}

/* What to change when decoding is too slow; tiny: the model is too small to judge a GPU by. */
static const char *doctor_speed_advice(const struct doctor *d, bool gpu, bool tiny) {
    if (tiny)
        return "this model is too small to judge a GPU by: launching kernels takes longer than reading the weights";
    if (gpu)
        return "check in this order: another program on the GPU; its power or heat limit (nvidia-smi -q -d "
               "PERFORMANCE); all-reduces between GPUs, see above; --bench --profile shows the kernels";
    if (d->set->cpu_ref) return "leave out --cpu-ref, which is exact and slow";
    if (d->load > 0.5 * d->cores) return "stop the other programs that keep the processors busy, or try a smaller -t";
    return "try -t with the number of physical cores; then the governor, the memory limit and the page cache above";
}

/* Compares the speed of decoding with its roofline. */
static void doctor_speed(struct doctor *d, struct engine *e) {
    struct session *s = &e->session;
    struct rates each[MAX_RANKS];
    int32_t ids[BENCH_PREFILL];
    all_reduce_times times;
    const bool gpu = s->r->cuda != NULL;
    doctor_step(d, STEP_SPEED);
    bench_ids(s->m, ids);
    const double seconds = bench_forward(s, ids, 0, 1, 1);
    if (interrupted) return;
    const double all = session_measure(s, each).bytes;
    const double reduce = gpu && s->pg.n_rank > 1 ? measure_all_reduce(s, times) : 0;
    const double roofline = all > 0 ? doctor_roofline(s, each, all, reduce) : 0;
    if (roofline <= 0) {
        doctor_find(d, SEVERITY_NOTE, "free some memory",
                    "decode %.1f tok/s; too little memory to measure the bandwidth", 1 / seconds);
        return;
    }
    const double percent = 100 / seconds / roofline;
    const bool slow = percent < SPEED_PERCENT, tiny = gpu && 1e6 / roofline / s->m->n_layer < SPEED_LAYER;
    const enum severity severity = !slow ? SEVERITY_OK : tiny ? SEVERITY_NOTE : SEVERITY_WARNING;
    doctor_find(d, severity, doctor_speed_advice(d, gpu, tiny),
                "decode %.1f tok/s: %.*f %% of the roofline, %.1f tok/s at %.1f GB/s%s", 1 / seconds,
                percent < 10 ? 1 : 0, percent, roofline, all * 1e-9, reduce > 0 ? " with all-reduces" : "");
}

/* Checks the model of the options as it would be run. */
static void doctor_model(struct doctor *d, bool gpu) {
    struct engine e = {.set = d->set};
    char err[ERR_MAX] = "", tokens[32], name[192];
    if (d->set->synth) synth_load(&e, gpu);
    else if (!doctor_file(d, gpu)) return;
    else if (model_load(&e.model, d->set->model, err)) {
        doctor_find(d, SEVERITY_ERROR,
                    "the README lists the models that run; convert the release again with moe-convert", "%s", err);
        return;
    }
    settings_resolve(d->set, &e.model);
    if (engine_start(&e, gpu, err))
        doctor_find(d, SEVERITY_ERROR, "--plan says what fits; try a smaller -c, --kv fp8, more --gpus, or --cpu", "%s",
                    err);
    else {
        doctor_find(d, SEVERITY_OK, NULL, "%s loaded on %s, in %.2f s, with %s tokens of context", e.model.name,
                    session_name(&e.session, name), e.model.load_seconds,
                    with_commas((uint64_t)e.session.n_ctx, tokens));
        if (*e.session.r->link) doctor_find(d, SEVERITY_OK, NULL, "%s", e.session.r->link);
        if (doctor_answer(d, &e) && !interrupted) doctor_needle(d, &e);
        if (d->open[STEP_OUTPUT] && !interrupted) doctor_speed(d, &e);
    }
    engine_close(&e);
}

/* Makes the report. Returns the exit code. */
static int doctor_run(struct doctor *d) {
    struct settings *set = d->set;
    struct model any = {.n_layer = MAX_RANKS};
    if (set->cpu && set->gpus) die_usage("--cpu and --gpus cannot be combined");
    for (int i = 0; i < MAX_RANKS; i++) d->device[i] = i;
    settings_ranks(set, &any, d->device);
    set->mute = true;
    last_words.run = doctor_dies;
    last_words.arg = d;
    doctor_bus(d);
    doctor_build(d);
    if (cuda_targets() && (set->cpu || set->cpu_ref)) doctor_find(d, SEVERITY_OK, NULL, "no GPU is used, as requested");
    else if (cuda_targets()) doctor_gpus(d);
    bool gpu = d->n_gpu > 0;
    if (!interrupted) doctor_host(d);
    int n = set->tp > 1 ? set->tp : !set->gpus && set->pp == 1 ? int_min(d->n_gpu, MAX_RANKS) : 1;
    if (n > 1 && !interrupted) doctor_all_reduce(d, gpu, n);
    if ((set->model || set->synth) && !interrupted) doctor_model(d, gpu);
    else if (!interrupted)
        doctor_find(d, SEVERITY_NOTE, "moe --doctor -m FILE", "without a model only the machine is checked");
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
 * Modes: prompts and requests
 *
 * Answers that are not part of a dialogue: of one prompt, of every line of stdin, of requests in JSON.
 * ============================================================================================================ */

/* Continues a text, or the tokens of --ids, without a template. The continuation is appended to the messages. err: the
 * message of TURN_FAILED. */
static enum turn_result raw_turn(struct engine *e, struct chat *c, const char *text, size_t n, char *err) {
    struct turn_stats st = {0};
    int32_t *ids = raw_ids(e, text, n, err);
    if (!e->model.vocab->n_tokens) die("'%s' has no vocabulary: only --logits can use it", e->set->model);
    if (!ids) return TURN_FAILED;
    const enum sync_result sync = session_sync(c->s, ids, (int)arrlen(ids), 0, err);
    st.n_prompt = c->s->sync_tokens;
    st.n_cached = (int)arrlen(ids) - st.n_prompt;
    st.prompt_seconds = c->s->sync_seconds;
    arrfree(ids);
    if (sync != SYNC_DONE) return sync == SYNC_FAILED ? TURN_FAILED : TURN_ROLLED_BACK;
    struct printer p = printer_make(c, false, true);
    generate(c, &p, &st);
    chat_push(c, "assistant", p.text, arrlenu(p.text));
    chat_count(c, &st);
    chat_stats_line(c, &st, c->set->verbose);
    arrfree(p.text);
    return st.why == STOP_INTERRUPT ? TURN_STOPPED : TURN_DONE;
}

/* The name of the conversation that is resumed; NULL: none. */
static const char *settings_resume(const struct settings *set) { return set->go_on ? LAST_CHAT : set->load; }

/* Starts a conversation; with --raw or --ids there is no template. */
static void prompt_chat(struct engine *e, struct settings *set, struct chat *c) {
    char err[ERR_MAX];
    if (set->raw || set->ids)
        *c = (struct chat){.set = set, .m = &e->model, .s = &e->session, .rng = settings_seed(set)};
    else if (chat_init(c, set, &e->model, &e->session, err)) die("%s", err);
}

/* Answers one prompt; with --continue or --load as the next turn of that conversation, which is saved for --continue.
 * Returns the exit code, or -1 with a message. */
static int answer_prompt(struct engine *e, const char *text, size_t n, char *err) {
    struct chat c;
    prompt_chat(e, e->set, &c);
    const bool raw = e->set->raw || e->set->ids;
    const char *name = settings_resume(e->set);
    if (name && chat_load(&c, name, err)) die("%s", err);
    c.autosave = name != NULL;
    const enum turn_result r = raw ? raw_turn(e, &c, text, n, err) : chat_turn(&c, text, n, err);
    const bool saved = chat_autosave(&c, true);
    chat_free(&c);
    if (r == TURN_FAILED) return -1;
    if (r != TURN_DONE) return EXIT_INTERRUPT;
    return saved ? EXIT_OK : EXIT_RUN;
}

/* Answers every line of stdin that is not empty with `answer`, which returns an exit code. A line that fails does not
 * keep the others from being answered. */
static int answer_lines(struct engine *e, int (*answer)(struct engine *e, const char *line, size_t n, int number)) {
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int code = EXIT_OK;
    for (int number = 1; code != EXIT_INTERRUPT && (n = line_next(stdin, "stdin", &line, &cap)) >= 0; number++) {
        if (n && line[n - 1] == '\n') n--;
        if (n && line[n - 1] == '\r') n--;
        const int rc = n ? answer(e, line, (size_t)n, number) : EXIT_OK;
        if (rc) code = rc;
    }
    free(line);
    return interrupted ? EXIT_INTERRUPT : code;
}

/* Answers a line of --lines. */
static int answer_line(struct engine *e, const char *line, size_t n, int number) {
    char err[ERR_MAX];
    const int code = answer_prompt(e, line, n, err);
    if (code >= 0) return code;
    message_print("line %d: %s", number, err);
    return EXIT_RUN;
}

static int mode_lines(struct engine *e) { return answer_lines(e, answer_line); }

/* ---- requests of --jsonl ---- */

/* The keys of a request that are options. */
static const char *const request_options[][2] = {{"max_tokens", "predict"}, {"temperature", "temp"}, {"seed", "seed"}};

/* Takes over the text of a request: `prompt` or `messages`. Returns 0, or -1 with a message. */
static int request_text(struct chat *c, const json_t *prompt, const json_t *messages, char *err) {
    size_t i;
    const json_t *m;
    if (!prompt == !messages) return fail(err, "a request needs either \"prompt\" or \"messages\"");
    if (prompt && !json_is_string(prompt)) return fail(err, "\"prompt\" is not a string");
    if (prompt) chat_push(c, "user", json_string_value(prompt), json_string_length(prompt));
    if (prompt) return 0;
    if (c->set->raw) return fail(err, "--raw takes \"prompt\", not \"messages\"");
    if (!json_array_size(messages)) return fail(err, "\"messages\" is not a list of messages");
    json_array_foreach(messages, i, m) {
        const json_t *content = json_object_get(m, "content");
        const char *role = json_string_value(json_object_get(m, "role"));
        const bool known = role && (!strcmp(role, "user") || !strcmp(role, "assistant") || !strcmp(role, "system"));
        if (!known) return fail(err, "messages[%zu]: the role must be system, user or assistant", i);
        if (!json_is_string(content) || json_object_size(m) != 2)
            return fail(err, "messages[%zu]: expected \"role\" and \"content\", both strings", i);
        if (!i && !strcmp(role, "system")) chat_set_system(c, NULL); /* it replaces that of --system */
        chat_push(c, role, json_string_value(content), json_string_length(content));
    }
    return chat_last_is(c, "user") ? 0 : fail(err, "the last message must be the user's");
}

/* Takes over `stop`, a string or a list of strings. Returns 0, or -1 with a message. */
static int request_stops(struct chat *c, const json_t *stop, char *err) {
    const size_t n = json_is_array(stop) ? json_array_size(stop) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *one = json_is_array(stop) ? json_array_get(stop, i) : stop;
        if (!json_string_length(one)) return fail(err, "\"stop\" must be a string or a list of strings, none empty");
        arrput(c->stops, json_string_value(one));
    }
    return 0;
}

/* Takes over a request: its messages and options. Returns 0, or -1 with a message. */
static int request_read(struct chat *c, json_t *request, char *err) {
    json_t *prompt = NULL, *messages = NULL, *value;
    const char *key;
    json_object_foreach(request, key, value) {
        const char *option = NULL;
        for (size_t i = 0; i < sizeof request_options / sizeof *request_options; i++)
            if (!strcmp(key, request_options[i][0])) option = request_options[i][1];
        if (json_is_null(value) || !strcmp(key, "id")) continue;
        if (!strcmp(key, "prompt")) prompt = value;
        else if (!strcmp(key, "messages")) messages = value;
        else if (!strcmp(key, "stop") && request_stops(c, value, err)) return -1;
        else if (option) {
            char typed[96], *text = json_dumps(value, JSON_ENCODE_ANY);
            snprintf(typed, sizeof typed, "\"%s\"", key);
            const int rc = settings_store(c->set, option_find(option), typed, text, err);
            free(text);
            if (rc) return -1;
        } else if (strcmp(key, "stop")) {
            return fail(err, "unknown key \"%s\"; known: id, prompt, messages, max_tokens, temperature, seed, stop",
                        key);
        }
    }
    c->rng = settings_seed(c->set);
    return request_text(c, prompt, messages, err);
}

/* Prints an object on one line and frees it. */
static void print_json_line(json_t *o) {
    char *text = json_dumps(o, JSON_COMPACT);
    if (!text) die("out of memory");
    puts(text);
    out_flush();
    free(text);
    json_decref(o);
}

/* Adds the answer of a conversation to a response: its text, its thinking if there is any, what it took and why it
 * ended. */
static void response_answer(const struct chat *c, json_t *response) {
    static const char *const finish[] = {
        [STOP_END] = "stop", [STOP_LENGTH] = "length", [STOP_CONTEXT] = "length", [STOP_INTERRUPT] = "interrupted"};
    const struct turn_stats *st = &c->last;
    const char *think = "", *content = arrlast(c->messages).content, *text = content;
    size_t n = 0;
    if (!c->set->raw) text = split_answer(content, &think, &n);
    if (!c->set->raw && text == content && !strncmp(content, "<think>", 7)) { /* it did not come to an end */
        think = content + 7 + strspn(content + 7, "\n");
        n = strlen(think);
        text = "";
    }
    json_object_set_new(response, "text", json_string(text));
    if (n) json_object_set_new(response, "reasoning", json_stringn(think, n));
    json_object_set_new(response, "finish", json_string(finish[st->why]));
    json_object_set_new(response, "usage",
                        json_pack("{sisisi}", "prompt_tokens", st->n_cached + st->n_prompt, "cached_tokens",
                                  st->n_cached, "completion_tokens", st->n_generated));
}

/* Answers a line of --jsonl, a request, with a line on stdout: an answer or an error. */
static int answer_request(struct engine *e, const char *line, size_t n, int number) {
    char err[ERR_MAX] = "";
    struct chat c;
    struct settings set = *e->set;
    json_error_t why;
    enum turn_result r = TURN_FAILED;
    json_t *request = json_loadb(line, n, JSON_REJECT_DUPLICATES, &why), *response = json_object();
    json_t *id = json_object_get(request, "id");
    set.mute = true;
    prompt_chat(e, &set, &c);
    if (!request) fail(err, "%s at byte %d", why.text, why.position);
    else if (!json_is_object(request)) fail(err, "not a JSON object");
    else if (!request_read(&c, request, err))
        r = set.raw ? raw_turn(e, &c, c.messages[0].content, strlen(c.messages[0].content), err) : chat_answer(&c, err);
    json_object_set_new(response, "id", id ? json_incref(id) : json_integer(number));
    if (r == TURN_FAILED) json_object_set_new(response, "error", json_string(err));
    else if (r != TURN_ROLLED_BACK) response_answer(&c, response);
    if (r == TURN_ROLLED_BACK) json_decref(response);
    else print_json_line(response);
    chat_free(&c);
    json_decref(request);
    return r == TURN_FAILED ? EXIT_RUN : r == TURN_DONE ? EXIT_OK : EXIT_INTERRUPT;
}

static int mode_jsonl(struct engine *e) { return answer_lines(e, answer_request); }

/* ============================================================================================================
 * Main
 *
 * Opens chats; the table of modes; what excludes what; the program from its arguments to its exit code.
 * ============================================================================================================ */

/* The lines that open a chat. */
static void banner(const struct engine *e) {
    const struct model *m = &e->model;
    char a[32], name[192];
    note("%s: %d layers, %d of %d experts per token%s%s", m->name, m->n_layer, m->max.n_expert_used, m->n_expert_max,
         m->pruned ? ", pruned" : "", m->pruned ? " (min-p and repeat penalty are on unless set)" : "");
    note("%s; loaded in %.2f s", session_name(&e->session, name), m->load_seconds);
    note("context %s tokens, cache %.1f MiB (%s)", with_commas((uint64_t)e->session.n_ctx, a),
         (double)session_kv_bytes(&e->session) / 0x1p20, kv_names[e->session.r->kv_type]);
    note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D exits");
}

/* Opens a chat at the terminal. */
static int answer_chat(struct engine *e) {
    char err[ERR_MAX];
    struct chat c;
    if (chat_init(&c, e->set, &e->model, &e->session, err)) die("%s", err);
    const char *name = settings_resume(e->set);
    if (name && chat_load(&c, name, err)) die("%s", err);
    banner(e);
    if (name) repl_loaded(&c);
    const int code = repl_run(&c);
    chat_free(&c);
    return code;
}

/* Without a mode: answers --ids or the prompt, or opens a chat when stdin is a terminal. */
static int mode_answer(struct engine *e) {
    const struct settings *set = e->set;
    char *text = NULL, err[ERR_MAX];
    if (!set->ids && !gather_prompt(set, &text)) {
        if (!term.in_tty) die_usage("no prompt: stdin is empty");
        if (set->raw) die_usage("--raw needs a prompt: -p, -f or piped stdin");
        return answer_chat(e);
    }
    const int code = answer_prompt(e, text, arrlenu(text), err);
    arrfree(text);
    return code < 0 ? report(err) : code;
}

/* --plan, for a described machine, GPUs of this one, or its CPU. */
static int run_plan(struct engine *e) {
    struct settings *set = e->set;
    const struct gpu_list list = gpus_parse(set->gpus);
    const bool described = list.gib > 0;
    char err[ERR_MAX];
    if (described && (set->cpu || set->cpu_ref)) die_usage("--cpu and --gpus cannot be combined");
    const bool gpu = described || gpu_wanted(set);
    if (set->synth) synth_load(e, true);
    else if (!set->model) model_missing();
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
    {"list-devices", NEEDS_NOTHING, .run = mode_list_devices},
    {"lines", NEEDS_SESSION, .run = mode_lines},
    {"jsonl", NEEDS_SESSION, .run = mode_jsonl},
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
        if (found) die_usage("--%s and --%s cannot be combined", found->option, m->option);
        found = m;
    }
    for (int i = 0; i < 3; i++)
        if (prompts[i].given && !found->prompt)
            die_usage("--%s and %s cannot be combined", found->option, prompts[i].name);
    for (int i = 0; i < 2; i++)
        if (prompts[i].given && s->ids) die_usage("%s and --ids cannot be combined", prompts[i].name);
    if (s->go_on && s->load) die_usage("--continue and --load cannot be combined");
    const char *other = found->option ? found->option : s->raw ? "raw" : s->ids ? "ids" : NULL;
    if (other && settings_resume(s))
        die_usage("--%s and --%s cannot be combined", s->load ? "load" : "continue", other);
    return found;
}

/* Options that cannot be used together, or without another one, end the program instead of being ignored. */
static void settings_check(const struct settings *s) {
    if (s->system && s->system_file) die_usage("--system and --system-file cannot be combined");
    if (s->profile && !s->bench) die_usage("--profile works only with --bench");
    if (s->json && !s->plan && !s->doctor) die_usage("--json works only with --plan or --doctor");
    if (s->plan && s->synth && s->model) die_usage("--plan needs -m or --synth, not both");
    if (gpus_parse(s->gpus).gib > 0 && !s->plan)
        die_usage("--gpus %s describes a machine, which only --plan takes; to run, give GPU numbers", s->gpus);
    if (s->shard && !s->synth) die_usage("--shard works only with --synth");
    if (!s->calibrate != !s->output) die_usage("--calibrate needs -o FILE, and -o works only with --calibrate");
    if (s->activations && !s->calibrate) die_usage("--activations works only with --calibrate");
    if (s->calibrate && s->synth) die_usage("--calibrate and --synth cannot be combined");
    if (s->compare && arrlen(s->compare) != 3)
        die_usage("--compare needs A.gguf B.gguf TEXT, found %d names", (int)arrlen(s->compare));
    if (s->compare && (s->model || s->synth))
        die_usage("--compare cannot be combined with -m or --synth: it names both models");
    if (s->model && !s->synth) model_check(s->model);
    for (size_t i = 0; i + 1 < arrlenu(s->compare); i++) model_check(s->compare[i]);
    if (s->logits && s->model && same_file(s->logits, s->model)) die("--logits would replace the model '%s'", s->model);
}

/* Replaces --system-file by its text. */
static void settings_read_system(struct settings *s) {
    char err[ERR_MAX], *text = NULL;
    if (!s->system_file) return;
    read_input(s->system_file, &text);
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
    char nccl[24];
    const char *targets = cuda_targets();
    printf("moe %s (CPU: %s; GPU: %s)\n", MOE_VERSION, kernels_choose()->name,
           targets ? targets : "built without CUDA");
    if (targets) printf("NCCL: %s\n", nccl_name(nccl));
    return EXIT_OK;
}

/* What the settings say of the terminal. */
static void settings_terminal(const struct settings *s) {
    if (s->color != COLOR_AUTO || s->simple_io) term.color_out = term.color_err = s->color == COLOR_ON;
    if (s->simple_io) term.err_moves = false;
    term.simple = s->simple_io;
    term.quiet = s->quiet;
}

/* The program. The tests include this file and have a main of their own. */
int moe_main(int argc, char **argv) {
    struct settings set;
    char err[ERR_MAX];
    int code = EXIT_OK;
    /* a closed standard stream gives and takes nothing; no other file must get its number */
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDONLY);
    setlocale(LC_CTYPE, "C.UTF-8");
    program_init();
    term_init();
    signals_install();
    settings_init(&set);
    if (options_parse(&set, argc, argv, err)) die_usage("%s", err);
    settings_terminal(&set);
    if (set.help) options_help(&set, stdout);
    else if (set.man) manual_page(stdout);
    else if (set.completion >= 0) manual_completion((enum shell)set.completion, stdout);
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

#endif /* MOE_FOUNDATIONS_ONLY */
#endif /* MOE_TYPES_ONLY */
