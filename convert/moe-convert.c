/* moe-convert: converts a Hugging Face model directory to one GGUF file.
 *
 * Contents, bottom up:
 *   Weights       how a linear layer is stored in the source (NVFP4, MXFP4, MXFP8, FP8, plain), with its scales
 *   Types         which type --quantize, --backbone and --keep give a matrix; --importance
 *   Plan          the list of output tensors: name, type, shape, and where their data come from
 *   Model         what the source has, and the layers that the engine makes of it, tensor by tensor; in four sections
 *   Families      what config.json says in each family, and the table of families; in five sections
 *   What config.json says of quantization
 *   Vocabulary    tokenizer.json, tiktoken.model or tokenizer.model to tokens, types and merges, and numbers of tokens;
 *                 in four sections
 *   Metadata      the keys of the GGUF file; in two sections
 *   Output        writes the tensors
 *   Main          listing, report, options
 *
 * All of the plan is made before the first byte is written, from the headers of the source, and the data of what may be
 * a copy of the embedding or the output matrix (skip_copy, settle_head), so that an unknown model leaves no file. A
 * tensor of the source is used, skipped on purpose with a line on stderr, or an error. Data are copied in chunks;
 * memory does not grow with the model.
 */
#define PROGRAM "moe-convert"
#include "common.h"
#include "pre_tokenizers.h"
#include "quantize.h"

#include <setjmp.h>

enum {
    MAX_VOCAB = 4 << 20, /* tokens */
    MAX_MTP = 16,        /* layers for multi-token prediction */
    PARALLEL = 1 << 17   /* fewer weights than these are converted by one thread */
};

/* ============================================================================================================
 * Weights
 *
 * The format of a linear layer X follows from the dtype and rank of X.weight (or X.weight_packed, X_blocks) and from
 * the scales that the source has for it, never from quantization_config. A scale that is missing or has an unexpected
 * shape or size is an error, because a model with wrong scales fluently generates nonsense.
 * ============================================================================================================ */

/* While a layer for multi-token prediction is planned: where refuse_part returns to, and with what message. */
static struct {
    bool planned;
    jmp_buf out;
    char why[PATH_MAX];
} prediction;

/* Dies because a part of the model is missing or has another size than it should have. The model runs without a layer
 * for multi-token prediction, so that such a layer is left out instead. */
__attribute__((noreturn, format(printf, 1, 2))) static void refuse_part(const char *f, ...) {
    va_list ap;
    va_start(ap, f);
    vsnprintf(prediction.why, sizeof prediction.why, f, ap);
    va_end(ap);
    if (prediction.planned) longjmp(prediction.out, 1);
    die("%s", prediction.why);
}

/* How the weights of a matrix are stored. */
enum format {
    PLAIN,      /* BF16, F16 or F32 */
    NVFP4,      /* E2M1, times an E4M3 scale for each 16, times `factor` */
    MXFP4,      /* E2M1, times an E8M0 scale for each 32 */
    MXFP8,      /* E4M3, times an E8M0 scale for each 32 */
    FP8_TENSOR, /* E4M3, times `factor` */
    FP8_ROW,    /* E4M3, times scale[row] */
    FP8_GRID    /* E4M3, times scale[block_row(row)][column / block] */
};

static const char *const format_names[] = {"plain",          "NVFP4",       "MXFP4",        "MXFP8",
                                           "FP8 per tensor", "FP8 per row", "FP8 in blocks"};

/* One linear layer of the source. */
struct linear {
    enum format format;
    const struct tensor *w;
    const struct tensor *scale; /* NVFP4: (rows, cols / 16), MXFP4 and 8: (rows, cols / 32); of some FP8; else NULL */
    size_t rows, cols;          /* in weights; a fused expert tensor (E, R, C) has E * R rows */
    size_t block;               /* FP8_GRID: rows and columns of a block */
    size_t chunk;               /* FP8_GRID: rows after which new blocks begin; of a fused tensor R */
    float factor;               /* of all weights; it becomes NAME.scale. 1 if the format has none */
    float gain;                 /* besides, of an expert's results: a part of NAME.scale; 0: 1 */
    bool fold;                  /* the weights are multiplied by `factor` as they are read; there is no NAME.scale */
    float input_scale;          /* of W4A4 activations; 0: none */
    size_t groups; /* columns are heads in `groups` groups and are written in tiled order; 0: as they are */
    size_t head;   /* columns of a head */
};

/* Returns the number in the source of the i-th of n heads in tiled order: one of every group, then the next of every
 * group. */
static size_t tiled_head(size_t i, size_t groups, size_t n) { return i % groups * (n / groups) + i / groups; }

/* Formats that are not supported, recognized by the name of a tensor. */
static const struct {
    const char *suffix, *format;
} refused_suffixes[] = {{".pre_quant_scale", "AWQ-smoothed weights (pre_quant_scale)"},
                        {".weight_shape", "INT4 pack-quantized weights"},
                        {".weight_zero_point", "integer weights with zero points"},
                        {".weight_g_idx", "GPTQ weights"},
                        {".g_idx", "GPTQ weights"},
                        {".qweight", "GPTQ or AWQ weights"},
                        {".qzeros", "GPTQ or AWQ weights"},
                        {".svdquant_lora_a", "SVDQuant weights"},
                        {".lora_A.weight", "a LoRA adapter"},
                        {".absmax", "bitsandbytes weights"}};

/* Tensors that the forward pass does not need, and why. */
static const char of_cache[] = "the cache of keys and values has scales of its own",
                  of_inputs[] = "inputs of FP8 matrices are not rounded to FP8";
static const struct {
    const char *suffix, *why;
} skipped_suffixes[] = {{".k_scale", of_cache},
                        {".v_scale", of_cache},
                        {".q_scale", of_cache},
                        {".kv_scale", of_cache},
                        {".k_proj.output_scale", of_cache},
                        {".v_proj.output_scale", of_cache},
                        {".activation_scale", of_inputs},
                        {".rotary_emb.inv_freq", "frequencies follow from config.json"},
                        {".gate.bias_vl", "moe reads text only"}};

static size_t n_skipped;   /* tensors of the source that are skipped on purpose */
static bool no_prediction; /* --no-mtp: layers for multi-token prediction are left out */

static void skip(struct tensor *t) {
    t->used = true;
    n_skipped++;
}

/* Names of the tensors of a linear layer X: X.weight and what may stand beside it. */
static const char *const linear_parts[] = {
    "weight",         "weight_packed",       "weight_scale", "weight_scale_inv",  "scale",
    "weight_scale_2", "weight_global_scale", "input_scale",  "input_global_scale"};

/* Scales of inputs that are not used: of FP8 matrices, and of matrices that are not quantized. */
static struct finding fp8_inputs, plain_inputs;

/* Reads n values of an F32, BF16 or F16 tensor from value `first` on. */
static void read_floats(const struct tensor *t, size_t first, size_t n, float *out) {
    static uint8_t *raw;
    size_t w = dtypes[t->dtype].bits / 8;
    arrsetlen(raw, n * w + 1);
    tensor_read(t, first * w, raw, n * w);
    gguf_dequantize_row(float_type(t), raw, out, n);
}

static bool is_scalar(const struct tensor *t) { return t->bytes * 8 == dtypes[t->dtype].bits; }

/* Reads a tensor of one value and marks it as used. */
static float read_scalar(struct tensor *t) {
    float v;
    if (!is_float(t) || !is_scalar(t)) die("%s: expected one number, found %s", where(t), shape_text(t));
    t->used = true;
    read_floats(t, 0, 1, &v);
    return v;
}

/* Whether all E2M1 codes of a tensor's bytes from..from+n-1 are 0 or -0. Their scale then has no meaning. */
static bool all_zero(const struct tensor *t, size_t from, size_t n) {
    uint8_t buf[1 << 16];
    for (size_t at = 0; at < n; at += sizeof buf) {
        size_t k = n - at < sizeof buf ? n - at : sizeof buf;
        tensor_read(t, from + at, buf, k);
        for (size_t i = 0; i < k; i++)
            if (buf[i] & 0x77) return false;
    }
    return true;
}

/* Returns the scale v of a whole NVFP4 matrix, read from t, as a factor. The matrix is n bytes of w from `from` on.
 * ModelOpt: weight_scale_2 = amax / 2688, a multiplier. compressed-tensors: weight_global_scale = 2688 / amax, a
 * divisor. Weights are far below 2688, so a value on the wrong side of 1 must follow the other convention. */
static float global_factor(const struct tensor *t, float v, bool divisor, const struct tensor *w, size_t from,
                           size_t n) {
    float factor = divisor ? 1.0f / v : v;
    if (isfinite(v) && v > 0 && factor > 0 && factor <= 1) return factor;
    if (all_zero(w, from, n)) return isfinite(factor) ? factor : 0.0f;
    if (!isfinite(v) || v <= 0) die("%s: expected a finite number above 0, found %g", where(t), (double)v);
    if (divisor)
        die("%s: %g; this scale divides (2688 / largest weight), so it should be at least 1: the file seems to hold "
            "the multiplier",
            where(t), (double)v);
    die("%s: %g; this scale multiplies (largest weight / 2688), so it should be above 0 and at most 1: the file seems "
        "to hold the divisor",
        where(t), (double)v);
}

/* Returns an input scale, or 0 if it is invalid, as for an expert that calibration never reached. */
static float valid_input_scale(float v) { return isfinite(v) && v > 0 ? v : 0.0f; }

/* Returns the input scale of a layer, or 0 if there is none or it is invalid. */
static float read_input_scale(const char *x, bool divisor) {
    struct tensor *t = tensor_find(fmt("%s.%s", x, divisor ? "input_global_scale" : "input_scale"));
    if (!t) return 0.0f;
    const float v = read_scalar(t);
    return valid_input_scale(divisor ? 1.0f / v : v);
}

/* Whether scales are powers of two. */
static bool are_powers(const struct tensor *s) { return s->dtype == U8 || s->dtype == F8_E8M0; }

/* Checks the scales s of weights w, of rows of `cols` weights: of 4 bits, w having the sizes (.., cols / 2), or E4M3. s
 * has the sizes (.., cols / 16) or, with powers of two, (.., cols / 32). Returns the format: NVFP4, MXFP4 or MXFP8. */
static enum format check_block_scales(const struct tensor *w, struct tensor *s, size_t cols) {
    const bool powers = are_powers(s);
    const size_t per = powers ? 32 : 16;
    struct tensor want = *w;
    want.dtype = powers ? s->dtype : F8_E4M3;
    want.shape[want.rank - 1] = cols / per;
    bool good = cols % per == 0 && s->dtype == want.dtype && s->rank == want.rank;
    for (uint32_t i = 0; i < want.rank; i++) good = good && s->shape[i] == want.shape[i];
    if (!good)
        die("%s: expected %s, one scale per %zu weights in row order, found %s%s", where(s), shape_text(&want), per,
            shape_text(s), s->rank == 1 ? " (swizzled for a GPU?)" : "");
    s->used = true;
    return w->dtype == F8_E4M3 ? MXFP8 : powers ? MXFP4 : NVFP4;
}

/* Returns the scales of DeepSeek-V4's layer x, which are powers of two, or NULL. */
static struct tensor *find_powers(const char *x) {
    struct tensor *s = tensor_find(fmt("%s.scale", x));
    return s && are_powers(s) ? s : NULL;
}

/* Describes the 4-bit layer x. w: (rows, cols / 2) U8 or I8. compressed: its scales have the names of
 * compressed-tensors, else those of ModelOpt or DeepSeek. */
static struct linear resolve_fp4(const char *x, struct tensor *w, bool compressed) {
    struct linear l = {.w = w, .rows = w->shape[0], .cols = w->shape[1] * 2, .factor = 1.0f};
    struct tensor *s = tensor_find(fmt("%s.weight_scale", x));
    if (!s) s = find_powers(x);
    if (!s) refuse_part("%s: %s, but '%s.weight_scale' is missing", where(w), shape_text(w), x);
    l.format = check_block_scales(w, s, l.cols);
    l.scale = s;
    if (l.format == MXFP4) return l;
    const char *name = compressed ? "weight_global_scale" : "weight_scale_2";
    struct tensor *t = tensor_find(fmt("%s.%s", x, name));
    if (!t) refuse_part("%s: NVFP4 codes, but '%s.%s' is missing", where(w), x, name);
    l.factor = global_factor(t, read_scalar(t), compressed, w, 0, w->bytes);
    l.input_scale = read_input_scale(x, compressed);
    return l;
}

/* Returns the scale v of a whole FP8 matrix, read from t. */
static float fp8_factor(const struct tensor *t, float v) {
    if (!isfinite(v) || v < 0) die("%s: expected a finite scale, found %g", where(t), (double)v);
    return v;
}

/* The factor of results that becomes a part of NAME.scale. */
static float result_gain(const struct linear *l) { return l->gain != 0 ? l->gain : 1.0f; }

/* The factor that becomes NAME.scale, but for that. */
static float outer_factor(const struct linear *l) { return l->fold ? 1.0f : l->factor; }

/* Rows and columns of a block of FP8 weights: of most releases, and of DeepSeek-V4.1. */
static const size_t block_sizes[] = {128, 32};

static size_t blocks_of(size_t n, size_t block) { return n / block + (n % block != 0); }

/* Returns the row of an FP8_GRID matrix's scales that belongs to a row of its weights. */
static size_t block_row(const struct linear *l, size_t row) {
    return row / l->chunk * blocks_of(l->chunk, l->block) + row % l->chunk / l->block;
}

/* Whether scales have the sizes (rows, cols) or, as ModelOpt writes them for FP8_PB_WO, (rows, 1, cols, 1). */
static bool is_grid(const struct tensor *s, size_t rows, size_t cols) {
    const bool apart = s->rank == 4 && s->shape[1] == 1 && s->shape[3] == 1;
    return (s->rank == 2 || apart) && s->shape[0] == rows && s->shape[apart ? 2 : 1] == cols;
}

/* Marks the scale of inputs `in`, if there is one, as left out. */
static void leave_input_scale(struct tensor *in, struct finding *f) {
    if (!in || in->used) return;
    skip(in);
    finding_add(f, in->name);
}

/* Describes the FP8 layer x, whose blocks begin anew in each of `chunks` equal parts of its rows. w: (rows, cols) E4M3.
 * weight_scale_inv is a multiplier like weight_scale, despite its name. It is by blocks, as DeepSeek-V4's scale is,
 * so that a matrix of one block is rounded like its neighbors. */
static struct linear resolve_fp8(const char *x, struct tensor *w, size_t chunks) {
    struct linear l = {.w = w, .rows = w->shape[0], .cols = w->shape[1], .chunk = w->shape[0] / chunks, .factor = 1.0f};
    struct tensor *s = tensor_find(fmt("%s.weight_scale_inv", x)), *in = tensor_find(fmt("%s.input_scale", x));
    bool inv = s != NULL;
    if (!s) s = tensor_find(fmt("%s.weight_scale", x));
    if (!s) s = tensor_find(fmt("%s.scale", x)), inv = s; /* DeepSeek-V4 */
    if (!s)
        refuse_part("%s: FP8 weights, but neither '%s.weight_scale_inv', '.weight_scale' nor '.scale' exists", where(w),
                    x);
    bool blocks = false;
    for (size_t k = 0; k < COUNT(block_sizes) && !blocks; k++) {
        l.block = block_sizes[k];
        blocks = is_grid(s, chunks * blocks_of(l.chunk, l.block), blocks_of(l.cols, l.block));
    }
    if (are_powers(s)) l.format = blocks ? FP8_GRID : check_block_scales(w, s, l.cols);
    else if (is_float(s) && inv && blocks) l.format = FP8_GRID;
    else if (is_float(s) && is_scalar(s) && (!inv || s->rank < 2)) l.format = FP8_TENSOR;
    else if (is_float(s) && s->rank && s->shape[0] == l.rows && (s->rank == 1 || (s->rank == 2 && s->shape[1] == 1)))
        l.format = FP8_ROW;
    else if (is_float(s) && blocks) l.format = FP8_GRID;
    else
        die("%s: expected one scale, one per row (%zu), one per 32 x 32 block [%zu, %zu] or one per 128 x 128 block "
            "[%zu, %zu], found %s",
            where(s), l.rows, chunks * blocks_of(l.chunk, 32), blocks_of(l.cols, 32), chunks * blocks_of(l.chunk, 128),
            blocks_of(l.cols, 128), shape_text(s));
    s->used = true;
    leave_input_scale(in, &fp8_inputs);
    if (l.format == FP8_TENSOR) l.factor = fp8_factor(s, read_scalar(s));
    else l.scale = s;
    return l;
}

/* Describes the linear layer x, such as "model.layers.3.mlp.up_proj", and marks its tensors as used. chunks: see
 * resolve_fp8. */
static struct linear resolve_chunks(const char *x, size_t chunks) {
    struct tensor *w = tensor_find(fmt("%s.weight_packed", x));
    bool compressed = w != NULL;
    if (!w) w = tensor_find(fmt("%s.weight", x));
    if (!w) w = tensor_find(x); /* a parameter of its own, such as index_kpool_compress_gate */
    if (!w) refuse_part("'%s': tensor '%s.weight' is missing", model_dir, x);
    w->used = true;
    if (w->rank != 2 || !w->bytes) die("%s: expected a matrix, found %s", where(w), shape_text(w));
    if (w->dtype == U8 || (w->dtype == I8 && find_powers(x))) return resolve_fp4(x, w, compressed);
    if (w->dtype == F8_E4M3 && !compressed) return resolve_fp8(x, w, chunks);
    if (compressed || !is_float(w))
        die("%s: weights of the form %s are not supported (NVFP4, MXFP4, MXFP8, FP8 E4M3, BF16, F16 and F32 are)",
            where(w), shape_text(w));
    leave_input_scale(tensor_find(fmt("%s.input_scale", x)), &plain_inputs);
    leave_input_scale(tensor_find(fmt("%s.input_global_scale", x)), &plain_inputs);
    return (struct linear){.format = PLAIN, .w = w, .rows = w->shape[0], .cols = w->shape[1], .factor = 1.0f};
}

static struct linear resolve_linear(const char *x) { return resolve_chunks(x, 1); }

/* ---- all experts of a layer in one tensor (E, rows, cols) ---- */

/* Returns a tensor beside the fused experts x, or NULL: x_side, or x.side where the weights are x.weight. */
static struct tensor *fused_side(const char *x, const char *side) {
    struct tensor *t = tensor_find(fmt("%s_%s", x, side));
    return t ? t : tensor_find(fmt("%s.%s", x, side));
}

/* A matrix of fused experts w: part `part` of n_part (gate and up) of expert e. */
struct fused {
    struct tensor *w;
    const char *x;
    size_t e, n_part, part;
};

/* Reads the number that a tensor has for a matrix, and marks the tensor as used. It has one for all matrices, for each
 * expert or for each matrix. */
static float fused_number(const struct fused *f, struct tensor *t) {
    const size_t n = f->w->shape[0], have = t->bytes * 8 / dtypes[t->dtype].bits;
    float v;
    if (!is_float(t) || (have != 1 && have != n && have != n * f->n_part))
        die("%s: expected 1, %zu or %zu numbers, found %s", where(t), n, n * f->n_part, shape_text(t));
    t->used = true;
    read_floats(t, have == 1 ? 0 : have == n ? f->e : f->e * f->n_part + f->part, 1, &v);
    return v;
}

/* Describes the whole of fused experts as rows of one matrix, with the scales of matrix f. */
static struct linear resolve_fused(const struct fused *f) {
    struct tensor *w = f->w, *s = fused_side(f->x, "weight_scale"), *in = fused_side(f->x, "input_scale");
    const size_t n = w->shape[0], rows = w->shape[1];
    struct linear l = {.format = PLAIN, .w = w, .rows = n * rows, .cols = w->shape[2], .factor = 1.0f};
    w->used = true;
    if (!s) s = tensor_find(fmt("%s_scale", f->x));
    if (w->dtype == U8) {
        struct tensor *global = fused_side(f->x, "weight_scale_2"), *amax = tensor_find(fmt("%s_amax", f->x));
        const size_t bytes = w->bytes / n / f->n_part;
        if (!s) refuse_part("%s: 4-bit codes, but '%s_weight_scale' is missing", where(w), f->x);
        l.cols *= 2;
        l.scale = s;
        l.format = check_block_scales(w, s, l.cols);
        if (l.format == MXFP4) return l;
        if (!global && !amax) refuse_part("%s: NVFP4 codes, but '%s_weight_scale_2' is missing", where(w), f->x);
        float factor = fused_number(f, global ? global : amax);
        if (!global) { /* Inkling 2's: the largest weight, over a denominator */
            struct tensor *denominator = tensor_find(fmt("%s_outer_scale_denominator", f->x));
            if (!denominator) refuse_part("%s: there is no '%s_outer_scale_denominator'", where(amax), f->x);
            factor /= fused_number(f, denominator);
        }
        l.factor = global_factor(global ? global : amax, factor, false, w, (f->e * f->n_part + f->part) * bytes, bytes);
        l.input_scale = in ? valid_input_scale(fused_number(f, in)) : 0.0f;
    } else if (w->dtype == F8_E4M3 && s && are_powers(s)) {
        l.scale = s;
        l.format = check_block_scales(w, s, l.cols);
    } else if (w->dtype == F8_E4M3) {
        struct tensor *inv = fused_side(f->x, "scale_inv");
        const bool by_row = s && is_float(s) && s->rank > 1 && s->shape[0] == n && s->shape[1] == rows &&
                            s->bytes * 8 == n * rows * dtypes[s->dtype].bits;
        if (!inv) inv = fused_side(f->x, "weight_scale_inv");
        if (!s && !inv)
            refuse_part("%s: FP8 weights, but neither '%s_weight_scale' nor '%s_scale_inv' exists", where(w), f->x,
                        f->x);
        if (inv && (!is_float(inv) || inv->rank != 3 || inv->shape[0] != n || inv->shape[1] != blocks_of(rows, 128) ||
                    inv->shape[2] != blocks_of(l.cols, 128)))
            die("%s: expected one scale per 128 x 128 block of %zu matrices of %zu x %zu, found %s", where(inv), n,
                rows, l.cols, shape_text(inv));
        l.format = inv ? FP8_GRID : by_row ? FP8_ROW : FP8_TENSOR;
        l.scale = inv ? inv : by_row ? s : NULL;
        l.chunk = rows;
        l.block = 128;
        if (inv) inv->used = true;
        else if (by_row) s->used = true;
        else l.factor = fp8_factor(s, fused_number(f, s));
        leave_input_scale(in, &fp8_inputs);
    }
    return l;
}

/* Describes gpt-oss' experts x of a layer as rows of one matrix: x_blocks (E, rows, cols / 32, 16) and x_scales (E,
 * rows, cols / 32). Byte j of a block holds its weights 2j and 2j + 1, as a byte of MXFP4 codes does elsewhere. */
static struct linear resolve_blocks(const char *x, struct tensor *w) {
    struct tensor *s = tensor_find(fmt("%s_scales", x));
    if (w->dtype != U8 || w->rank != 4 || w->shape[3] != 16 || !w->bytes)
        die("%s: expected U8 [experts, rows, blocks, 16], found %s", where(w), shape_text(w));
    if (!s) refuse_part("%s: MXFP4 codes, but '%s_scales' is missing", where(w), x);
    struct tensor want = *w;
    want.rank = 3;
    if (s->dtype != U8 || s->rank != 3 || memcmp(s->shape, w->shape, 3 * sizeof *s->shape))
        die("%s: expected %s, one scale per 32 weights, found %s", where(s), shape_text(&want), shape_text(s));
    w->used = s->used = true;
    return (struct linear){.format = MXFP4,
                           .w = w,
                           .scale = s,
                           .rows = w->shape[0] * w->shape[1],
                           .cols = w->shape[2] * 32,
                           .factor = 1.0f};
}

/* Returns a tensor of F32, F16 or BF16 and marks it as used. */
static struct tensor *resolve_vector(const char *name) {
    struct tensor *t = tensor_find(name);
    if (!t) refuse_part("'%s': tensor '%s' is missing", model_dir, name);
    if (!is_float(t)) die("%s: expected BF16, F16 or F32, found %s", where(t), shape_text(t));
    t->used = true;
    return t;
}

/* ============================================================================================================
 * Types
 *
 * The GGUF type of each output matrix. Without options it keeps the type of the source. --quantize sets the type of the
 * experts (with --dense also of dense feed-forward layers), which are most of a model; --backbone sets the type of all
 * other matrices. FP8 is only kept: --backbone fp8 keeps it in what is FP8 in the source, experts included. NVFP4 and
 * MXFP4 matrices of the source are never changed.
 * ============================================================================================================ */

enum { AS_STORED = GGUF_TYPE_COUNT };

/* Set by the options. */
static struct {
    uint32_t experts, backbone; /* enum gguf_type, or AS_STORED */
    bool dense;                 /* feed-forward matrices of dense layers have the type of experts */
    bool amax;                  /* --search amax: do not search for better scales */
    pcre2_code *keep;           /* --keep: tensors that keep the type of the source; NULL: none */
    size_t n_kept;              /* tensors that would have another type without it */
} types = {.experts = AS_STORED, .backbone = AS_STORED};

/* An importance matrix as llama-imatrix writes it. For a matrix NAME it has NAME.in_sum2 (n_in, experts), the sums of
 * the squares of its inputs, and NAME.counts (1, experts), how many inputs were summed. */
static struct {
    struct gguf g;
    const char *path;            /* NULL: none was given */
    size_t weighted, unweighted; /* quantized matrices that it has, and that it lacks */
} importance;

/* Opens the file of --importance. */
static void importance_open(const char *path) {
    char err[1024], found[64];
    struct gguf_str type = {"none", 4};
    close(input_open(path));
    if (gguf_open(&importance.g, path, err, sizeof err)) die("%s", err);
    importance.path = path;
    gguf_get_str(&importance.g, "general.type", &type);
    if (!gguf_str_eq(type, "imatrix"))
        die("'%s': expected an importance matrix (general.type imatrix), found %s", path,
            gguf_printable(type, found, sizeof found));
}

static float importance_value(const struct gguf_tensor *t, size_t i) {
    return f32_from_bits(gguf_rd32(t->data + 4 * i));
}

/* Returns a tensor of n0 x n1 finite values from 0 up, or NULL if the file does not have it. */
static const struct gguf_tensor *importance_find(const char *name, size_t n0, size_t n1) {
    const struct gguf_tensor *t = gguf_find_tensor(&importance.g, name);
    if (!t) return NULL;
    if (t->type != GGUF_F32 || t->ne[0] != n0 || t->ne[1] != n1 || t->ne[2] * t->ne[3] != 1)
        die("'%s': tensor '%s': expected F32 %zu x %zu, found %s %zu x %zu x %zu", importance.path, name, n0, n1,
            gguf_type_info(t->type).name, (size_t)t->ne[0], (size_t)t->ne[1], (size_t)(t->ne[2] * t->ne[3]));
    for (size_t i = 0; i < n0 * n1; i++) {
        float v = importance_value(t, i);
        if (!(v >= 0 && v <= FLT_MAX))
            die("'%s': tensor '%s': value %zu is %g; expected a finite number of at least 0", importance.path, name, i,
                (double)v);
    }
    return t;
}

/* What the pieces of a matrix are. */
enum stacking {
    SINGLE,    /* one matrix, whose rows may come in several pieces */
    DENSE_FFN, /* one matrix of a dense feed-forward layer */
    EXPERTS,   /* one matrix per expert, each with its own scales */
    HEADS      /* one matrix per attention head, with common scales */
};

/* Compiles the expression of --keep. */
static void keep_regex_compile(const char *regex) {
    int code;
    size_t at;
    PCRE2_UCHAR why[128];
    types.keep = pcre2_compile((PCRE2_SPTR)regex, PCRE2_ZERO_TERMINATED, 0, &code, &at, NULL);
    if (types.keep) return;
    pcre2_get_error_message(code, why, sizeof why);
    die_usage("--keep '%s': %s at character %zu", regex, (char *)why, at + 1);
}

/* Whether --keep matches a GGUF name. */
static bool matches_keep(const char *name) {
    if (!types.keep) return false;
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    if (!match) die("out of memory");
    int rc = pcre2_match(types.keep, (PCRE2_SPTR)name, PCRE2_ZERO_TERMINATED, 0, 0, match, NULL);
    pcre2_match_data_free(match);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) die("--keep: the expression takes too many steps for '%s'", name);
    types.n_kept += rc >= 0;
    return rc >= 0;
}

static size_t n_misaligned; /* matrices that keep their type because n_in is not a multiple of the block */

/* Returns the type of a matrix with rows of n_in weights. stored: its type without options. fp4: all its weights have 4
 * bits in the source. */
static enum gguf_type matrix_type(const char *name, bool fp4, enum gguf_type stored, enum stacking how, size_t n_in) {
    bool expert = how == EXPERTS || (how == DENSE_FFN && types.dense);
    uint32_t type = expert ? types.experts : types.backbone;
    if (type == AS_STORED || type == GGUF_FP8 || type == stored || fp4 || matches_keep(name)) return stored;
    struct gguf_type_traits t = gguf_type_info(type);
    if (n_in % t.block == 0) return type;
    if (!n_misaligned++)
        err_message("%s: rows of %zu weights are not a multiple of %u: the tensor stays %s", name, n_in, t.block,
                    gguf_type_info(stored).name);
    return stored;
}

/* ============================================================================================================
 * Plan
 *
 * The list of output tensors in file order. A tensor is a sequence of pieces, which are row ranges of source matrices
 * (the experts of a stack, the heads of kv_b_proj or of a delta net), or a few F32 values that are computed here
 * (.scale). Where the pieces of a tensor, or gate and up, have several formats, most of them decide: few experts in
 * BF16 are quantized like the others, and a few in four bits are stored as BF16, exactly.
 * ============================================================================================================ */

/* Part of a source matrix: rows [row, row + rows), or those that the fields below say. */
struct piece {
    struct linear lin;
    size_t row, rows; /* rows: as many as are written */
    size_t step;      /* the rows are that far apart; 0: 1 */
    size_t
        head; /* row 2i of a head of that size is row i of its source, and row 2i + 1 row i + head / 2; 0: as it is */
    /* columns col, col + step, .. of the source rows [row, row + height) are written as rows; height 0: none are */
    size_t col, height;
    const struct linear *beside; /* its rows continue those of `lin`; NULL: nothing does */
};

/* Returns the row of the source that is row i of a piece, which is not transposed. */
static size_t piece_row(const struct piece *p, size_t i) {
    if (!p->head) return p->row + i * (p->step ? p->step : 1);
    const size_t at = i % p->head;
    return p->row + i - at + at % 2 * (p->head / 2) + at / 2;
}

/* Returns the weights of a row of a piece. */
static size_t piece_width(const struct piece *p) {
    return p->height ? p->height : p->lin.cols + (p->beside ? p->beside->cols : 0);
}

/* What F32 values of the source are. */
enum meaning {
    VALUES,
    LESS_ONE,  /* norms of the Qwen3-Next line: 1 + w is written */
    LOGARITHM, /* of the decay: -exp(w) is written */
    EXPONENT   /* of a decay with a bound: exp(w) is written */
};

struct output {
    char name[64];
    uint32_t type, n_dims; /* type: enum gguf_type, or GGUF_I32 */
    size_t ne[4], bytes;   /* sizes, the contiguous one first */
    struct piece *pieces;  /* stb_ds; empty: the data are `values` */
    float *values;         /* stb_ds */
    enum meaning meaning;  /* what the values of the source are */
    float factor;          /* of these; 0: 1 */
    bool finite;           /* moe refuses infinity and NaN in it */
    int below;             /* I32: ids of experts, which are below this number */
    const char *remark;    /* for the listing of --dry-run */

    /* for matrices that are quantized here */
    size_t n_quantized; /* weights that are; rounding to BF16 does not count */
    float *scale2;      /* the values of NAME.scale, one per piece, set when the piece is written; NULL: not NVFP4 */
    const struct gguf_tensor *sum2, *counts; /* of --importance; NULL: all columns have the same weight */
    struct quantize_sums sums;               /* error of what has been written */
};

static struct output *plan; /* stb_ds */

/* Appends an output of shape {a, b, c}, the contiguous size first. The pointer is valid until the next call. */
static struct output *plan_add(const char *name, uint32_t type, uint32_t n_dims, size_t a, size_t b, size_t c) {
    struct output o = {.type = type, .n_dims = n_dims, .ne = {a, b, c, 1}, .remark = ""};
    size_t n = 1;
    for (uint32_t i = 0; i < n_dims; i++)
        if (!o.ne[i] || __builtin_mul_overflow(n, o.ne[i], &n) || n > INT64_MAX / 64)
            die("tensor '%s': the size %zu x %zu x %zu overflows", name, a, b, c);
    snprintf(o.name, sizeof o.name, "%s", name);
    o.bytes = gguf_row_bytes(type, n);
    arrput(plan, o);
    return &arrlast(plan);
}

/* Appends an F32 vector and takes over the array. */
static void plan_values(const char *name, float *values) {
    struct output *o = plan_add(name, GGUF_F32, 1, arrlenu(values), 1, 1);
    o->values = values;
}

/* Returns base.scale of n matrices, an stb_ds array; NULL: none of them has a factor. */
static float *outer_factors(const struct piece *p, size_t n) {
    float *factor = NULL;
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        any |= !p[i].lin.fold && (p[i].lin.format == NVFP4 || p[i].lin.format == FP8_TENSOR);
        any |= p[i].lin.gain != 0;
        arrput(factor, outer_factor(&p[i].lin) * result_gain(&p[i].lin));
    }
    if (!any) arrfree(factor);
    return factor;
}

/* Appends base.input_scale of n matrices, if NVFP4 ones among them have input scales. */
static void plan_input_scales(const char *base, const struct piece *p, size_t n) {
    size_t missing = 0, count = 0;
    float *input = NULL, largest = 0.0f;
    for (size_t i = 0; i < n; i++) {
        if (p[i].lin.input_scale > largest) largest = p[i].lin.input_scale;
        missing += p[i].lin.format == NVFP4 && p[i].lin.input_scale == 0.0f;
        count += p[i].lin.format == NVFP4;
    }
    if (largest == 0.0f) return;
    for (size_t i = 0; i < n; i++) arrput(input, p[i].lin.input_scale > 0 ? p[i].lin.input_scale : largest);
    if (missing)
        err_message("%s: %zu of %zu input scales are missing; the largest of the others is used", base, missing, count);
    plan_values(fmt("%s.input_scale", base), input);
}

/* Finds the importance of the columns of o, a stack of n matrices. */
static void importance_bind(struct output *o, size_t n) {
    if (!importance.path) return;
    o->sum2 = importance_find(fmt("%s.in_sum2", o->name), o->ne[0], n);
    o->counts = importance_find(fmt("%s.counts", o->name), 1, n);
    if (!o->sum2 != !o->counts)
        die("'%s': '%s.%s' exists, but '%s.%s' does not", importance.path, o->name, o->sum2 ? "in_sum2" : "counts",
            o->name, o->sum2 ? "counts" : "in_sum2");
    if (o->sum2) importance.weighted++;
    else importance.unweighted++;
}

/* Types of blocks that sources have, too, in another order of bytes. */
static const struct repacking {
    enum gguf_type type;
    unsigned formats; /* bits of enum format: of the source */
    size_t scaled;    /* weights with a scale */
} repackings[] = {{GGUF_NVFP4, 1 << NVFP4, 16},
                  {GGUF_MXFP4, 1 << MXFP4, 32},
                  {GGUF_FP8, 1 << FP8_TENSOR | 1 << FP8_ROW | 1 << FP8_GRID, FP8_BLOCK}};

/* NULL: no source has the blocks of this type. */
static const struct repacking *repacking_of(enum gguf_type type) {
    for (size_t i = 0; i < COUNT(repackings); i++)
        if (repackings[i].type == type) return &repackings[i];
    return NULL;
}

/* Whether a piece is written as a type of blocks without a change. */
static bool repacks(const struct piece *p, enum gguf_type type) {
    const struct repacking *r = repacking_of(type);
    const struct linear *l = &p->lin;
    return r && !p->height && !p->beside && !l->fold && r->formats >> l->format & 1 &&
           (l->format != FP8_GRID || l->block == r->scaled) && l->cols % gguf_type_info(type).block == 0 &&
           l->head % r->scaled == 0;
}

/* Whether two matrices have the same format, and floats the same type. */
static bool same_format(const struct linear *a, const struct linear *b) {
    return a->format == b->format && (a->format != PLAIN || a->w->dtype == b->w->dtype);
}

static const char *format_name(const struct linear *l) {
    return l->format == PLAIN ? dtypes[l->w->dtype].name : format_names[l->format];
}

/* Whether all pieces of two matrices have the same format. q: the other one of gate and up, or NULL. */
static bool is_uniform(const struct piece *p, const struct piece *q) {
    const struct linear *first = &p[0].lin;
    bool same = !p->beside || same_format(first, p->beside);
    for (size_t i = 0; i < arrlenu(p); i++) same &= same_format(first, &p[i].lin);
    for (size_t i = 0; i < arrlenu(q); i++) same &= same_format(first, &q[i].lin);
    return same;
}

/* Returns the type of a matrix without options. q: the other one of gate and up, which must have the same type, or
 * NULL. */
static enum gguf_type stored_type(const char *name, const struct piece *p, const struct piece *q) {
    const struct piece *both[] = {p, q};
    const size_t n = arrlenu(p) + arrlenu(q);
    size_t count[COUNT(repackings)] = {0}, best = 0, sum = 0;
    for (size_t r = 0; r < COUNT(repackings); r++) {
        for (size_t k = 0; k < COUNT(both); k++)
            for (size_t i = 0; i < arrlenu(both[k]); i++) count[r] += repacks(&both[k][i], repackings[r].type);
        if (repackings[r].type == GGUF_FP8) { /* nothing is quantized to it */
            if (count[r] == n && types.backbone == GGUF_FP8 && !matches_keep(name)) return GGUF_FP8;
            continue;
        }
        if (count[r] > count[best]) best = r;
        sum += count[r];
    }
    if (count[best] == n) return repackings[best].type;
    if (is_uniform(p, q)) return p[0].lin.format == PLAIN ? float_type(p[0].lin.w) : GGUF_BF16;
    return 2 * sum > n && !matches_keep(name) ? repackings[best].type : GGUF_BF16;
}

/* A line about matrices of a layer whose pieces have several formats, which is printed once for all that it is true
 * of. */
static struct {
    char *names; /* such as "blk.0.ffn_gate_exps, blk.0.ffn_up_exps"; NULL: there is no line */
    char *text;
} mixture;

static void mixture_print(void) {
    if (mixture.names) err_message("%s: %s", mixture.names, mixture.text);
    free(mixture.names);
    free(mixture.text);
    mixture.names = mixture.text = NULL;
}

static void mixture_add(const char *base, const char *text) {
    const bool more = mixture.names && !strcmp(mixture.text, text) && strlen(mixture.names) < 256;
    char *names = xstrdup(more ? fmt("%s, %s", mixture.names, base) : base);
    if (!more) mixture_print();
    free(mixture.names);
    mixture.names = names;
    if (!more) mixture.text = xstrdup(text);
}

/* Says what becomes of a matrix that is stored as `type` because its pieces, or gate and up, differ. Of experts, those
 * are named that are not like most of the others. */
static void note_mixture(const char *base, const struct piece *p, enum gguf_type type) {
    enum { LISTED = 8 };
    const size_t n = arrlenu(p);
    const bool fp4 = repacking_of(type);
    const char *name = gguf_type_info(type).name, *lossless = fp4 ? " (--keep stores them all as BF16)" : "";
    size_t most = 0, best = 0, odd = 0;
    for (size_t i = 0; i < n; i++) {
        size_t same = 0;
        for (size_t k = 0; k < n; k++) same += same_format(&p[i].lin, &p[k].lin);
        if (same > most) most = same, best = i;
    }
    char *list = NULL;
    for (size_t i = 0; i < n && most < n; i++)
        if (!same_format(&p[i].lin, &p[best].lin) && odd++ < LISTED)
            sb_printf(&list, "%s%zu (%s)", odd > 1 ? ", " : "", i, format_name(&p[i].lin));
    if (odd > LISTED) sb_printf(&list, " and %zu more", odd - LISTED);
    if (odd && fp4 && repacks(&p[best], type))
        mixture_add(base, fmt("expert%s %s %s quantized to %s like the other %zu%s", odd > 1 ? "s" : "", sb_cstr(&list),
                              odd > 1 ? "are" : "is", name, most, lossless));
    else if (odd)
        mixture_add(base, fmt("expert%s %s %s, and the other %zu %s: all are stored as %s%s", odd > 1 ? "s" : "",
                              sb_cstr(&list), odd > 1 ? "differ" : "differs", most, format_name(&p[best].lin), name,
                              lossless));
    else if (stored_type(fmt("%s.weight", base), p, NULL) != type)
        mixture_add(base, fmt("%s is stored as %s, because gate and up must have the same type%s",
                              format_name(&p[0].lin), name, lossless));
    arrfree(list);
}

/* Returns what --dry-run says of a matrix that is stored as `type`. */
static const char *stored_remark(const struct piece *p, enum gguf_type type) {
    const struct linear *l = &p->lin;
    if (repacks(p, type) || (l->format == PLAIN && float_type(l->w) == type)) return "";
    if (l->format == MXFP4) return "BF16 of E2M1 x E8M0, exact";
    if (l->format == MXFP8 || (l->format == FP8_GRID && are_powers(l->scale))) return "BF16 of E4M3 x E8M0, exact";
    if (l->format == NVFP4) return l->fold ? "BF16 from NVFP4, rounded" : "BF16 of E2M1 x E4M3, exact";
    if (l->format == FP8_TENSOR && !l->fold) return "BF16 of E4M3, exact";
    return l->format == PLAIN ? "rounded" : "BF16 from FP8, rounded";
}

/* Appends base.weight as `type` and its scales. stored: its type without options. uniform: its pieces, and gate and up,
 * have the same format. p: pieces, of the same size unless they are parts of a single matrix; the array is taken
 * over. */
static void plan_typed(const char *base, struct piece *p, enum stacking how, enum gguf_type stored, enum gguf_type type,
                       bool uniform) {
    const bool single = how == SINGLE || how == DENSE_FFN, floats = gguf_is_float(type);
    const enum gguf_factor factor = gguf_format(type)->factor;
    const size_t n_in = piece_width(p), n = how == EXPERTS ? arrlenu(p) : 1;
    size_t n_out = 0, n_quantized = 0;
    for (size_t i = 0; i < arrlenu(p); i++) {
        n_out += single || !i ? p[i].rows : 0;
        if (floats || repacks(&p[i], type)) continue;
        n_quantized += p[i].rows * n_in;
        p[i].lin.fold = factor == GGUF_FACTOR_NONE;
    }
    struct output *o = plan_add(fmt("%s.weight", base), type, single ? 2 : 3, n_in, n_out, single ? 1 : arrlenu(p));
    o->pieces = p;
    o->n_quantized = n_quantized;
    o->remark = type != stored ? floats ? "rounded" : "quantized"
                : uniform      ? stored_remark(p, type)
                : floats       ? "BF16 of several formats"
                               : "partly quantized";
    float *scale = outer_factors(p, n);
    if (factor == GGUF_FACTOR_OWN && n_quantized) {
        if (!scale) arrsetlen(scale, n);
        o->scale2 = scale;
        importance_bind(o, n);
    }
    bool has_inputs = false;
    for (size_t i = 0; i < arrlenu(p); i++) has_inputs |= p[i].lin.format == NVFP4 && !p[i].height && !p[i].lin.fold;
    if (scale) plan_values(fmt("%s.scale", base), scale);
    if (has_inputs) plan_input_scales(base, p, n);
}

/* Whether all weights of a matrix have four bits in the source and are not decoded for a tensor without scales. */
static bool is_fp4(const struct piece *p) {
    bool fp4 = true;
    for (size_t i = 0; i < arrlenu(p); i++)
        fp4 &= (p[i].lin.format == NVFP4 || p[i].lin.format == MXFP4) && !p[i].lin.fold;
    return fp4;
}

/* Appends base.weight and its scales. p: see plan_typed. */
static void plan_matrix(const char *base, struct piece *p, enum stacking how) {
    const char *name = fmt("%s.weight", base);
    const bool uniform = is_uniform(p, NULL);
    const enum gguf_type stored = stored_type(name, p, NULL),
                         type = matrix_type(name, is_fp4(p), stored, how, piece_width(p));
    if (!uniform && how == EXPERTS) note_mixture(base, p, type);
    plan_typed(base, p, how, stored, type, uniform);
}

/* Appends gate and up of a feed-forward or of its experts, which must have the same type, because they have the same
 * inputs. */
static void plan_pair(const char *const base[2], struct piece *const p[2], enum stacking how) {
    const bool uniform = is_uniform(p[0], p[1]);
    enum gguf_type stored = GGUF_BF16, type[2];
    for (int k = 0; k < 2; k++) {
        const enum gguf_type one = stored_type(fmt("%s.weight", base[k]), p[k], p[!k]);
        stored = !k || one == stored ? one : GGUF_BF16; /* --keep may name only one of them */
    }
    for (int k = 0; k < 2; k++)
        type[k] = matrix_type(fmt("%s.weight", base[k]), is_fp4(p[k]), stored, how, piece_width(p[k]));
    for (int k = 0; k < 2; k++) {
        const bool same = type[0] == type[1];
        if (!uniform) note_mixture(base[k], p[k], same ? type[k] : stored);
        plan_typed(base[k], p[k], how, stored, same ? type[k] : stored, uniform);
    }
}

/* ============================================================================================================
 * Model
 *
 * The metadata of the file are made of config.json first (put_keys), and the engine's loader reads them. Its family
 * makes the layers, and its table of tensors (moe.c, tensor_rules) gives the names and the shape of every tensor. The
 * number of experts of a layer is the one thing that comes from the tensors: a pruned release may keep the original in
 * its config.
 * ============================================================================================================ */

/* A family whose releases name tensors otherwise than the table of tensors: `from` begins the table's name, up to its
 * end or a dot; `to` begins the release's. The first row that fits counts. */
struct renaming {
    const char *from, *to;
    enum {
        EVERYWHERE,
        PREDICTION, /* only in layers for multi-token prediction, */
        BESIDE,     /* where the tensor is named beside these layers (mtp.fc), not below one */
        SECOND,     /* likewise where their second half is named as a layer of its own, mtp.layers.1 after .0: of it */
        BARE        /* only where names do not begin with "model." */
    } where;
};

/* What only a checkpoint has: names, layouts, and the keys of config.json, which are the fields whose names end in
 * _key. */
static struct checkpoint {
    const char *arch;                /* of GGUF */
    const char *prefix;              /* of every tensor name: "" or "language_model." */
    const char *body;                /* follows it in all names but the output matrix's, such as "model." */
    const char *layers;              /* follows it in names of layers, before their numbers; NULL: "layers." */
    bool halved;                     /* two layers of GGUF are one layer of its names, which have the half where the
                                      * renaming has '@' */
    const struct renaming *renaming; /* ends with from NULL; NULL: there is none */
    const char *pre;                 /* the pre-tokenizer, whatever tokenizer.json has; NULL: the one it has */
    struct doc top, cfg;             /* config.json, and its object of the language model (itself, or text_config) */
    bool wrapped;                    /* the language model is a part of it */
    bool tied;                       /* the output matrix is the embedding */
    bool zero_centered;              /* norms are stored less 1 */
    bool normed_head;                /* columns of the output matrix have the length 1, whatever is stored */
    size_t n_vocab;                  /* tokens */
    int64_t context;                 /* tokens of the context; 0: as config.json says */

    int n_layer, n_mtp;  /* layers, and layers for multi-token prediction after them: together the blocks */
    const char *mtp_key; /* how many of the latter there are; NULL: none */
    bool mtp_unsaid;     /* config.json does not say how many there are */
    bool mtp_dense;      /* they have a dense FFN */
    const char *mtp;     /* begins the names of their tensors; NULL: as other layers */
    bool mtp_bare;       /* their numbers stand after `mtp`, "mtp.0." in place of "mtp.layers.0." */
    bool mtp_beside;     /* there is one, and some of its tensors are named beside it */
    bool mtp_halves;     /* each is two layers of their names */
    const char *mtp_why; /* why they are left out; NULL: they are not */
    bool dspark;         /* tensors below `mtp` are a DSpark module, which is left out */

    const char *kinds;              /* what each layer is: M for Mamba-2, * for attention, E for experts, - for a dense
                                      * FFN; NULL: each has what mixes tokens and an FFN */
    enum mixer mixer;               /* of the layers with attention */
    bool (*is_windowed)(int layer); /* the block has a window; NULL: none has */
    bool alternate;                 /* every other layer has one where config.json does not say */
    int n_typed;                    /* blocks whose kind config.json tells; 0: all */
    size_t window;                  /* keys that a token sees in a window; 0: no layer has one */
    bool tell_window;               /* GGUF files say how many, even 0 */
    bool (*has_indexer)(int layer); /* the block has an indexer; NULL: the engine knows */
    bool indexed;                   /* layer_types may call layers of attention indexed_attention */
    bool (*lacks_kv)(int layer);    /* the block has a recurrent mixer or a gated convolution, and no KV head; NULL: all
                                      * have some */
    bool no_rope;                   /* latent attention has no rotated values */
    bool grown_latents;             /* GGUF files have norms of latents times sqrt(hidden_size / their width) */
    bool unrotated;                 /* attention has no rotation, and GGUF files say so (Granite 4) */
    int full_head;                  /* values of a head in layers without a window; 0: as many as in the others */
    int n_head, n_head_kv;          /* heads of queries, of keys and values */
    int window_heads[2];            /* the same in layers with a window; 0: as many */
    const char *kv_key;             /* n_head_kv; without kv_optional it must be there */
    bool kv_optional;               /* n_head_kv may be missing: it is n_head */
    const char *v_head_key;         /* values of a head's value; NULL: as many as of its key */
    const char *heads_key;          /* lists the heads of the layers; NULL: there is no list */
    bool list_heads, list_kv;       /* GGUF files list n_head of every block, n_head_kv */
    bool head_norm;                 /* heads of queries and keys have norms, which the engine does not know */
    bool head_gate;                 /* heads have gates */
    bool (*gates_values)(int layer); /* the block has a gate for every value; NULL: for every head */
    bool sinks, window_sinks;        /* heads have sinks in layers without a window, in those with one */
    bool qkv_bias;                   /* queries, keys and values have biases */
    bool pairs;                      /* GGUF files have queries and keys in the order of struct piece's `head` */
    size_t qkv_chunks;               /* qkv_proj has so many parts, each with queries, keys, values; 0: there is none */

    bool (*is_dense)(int layer);             /* the layer has a dense FFN */
    int first_dense;                         /* layers that have one before the first mixture */
    bool leads;                              /* GGUF files say how many */
    int n_expert, top_k, n_group;            /* as config.json says; n_group 0: there are no groups of experts */
    int experts[MAX_LAYERS];                 /* of each block, as its tensors say; 0: dense */
    const char *experts_key, *experts_other; /* n_expert: the first of these that is there; NULL: all are dense */
    const char *experts_if;                  /* there are experts if config.json says so; NULL: there are */
    const char *top_k_key;                   /* top_k */
    const char *width_key, *dense_key;       /* widths of an expert and of a dense FFN */
    bool interleaved;                        /* gate and up of fused experts are every other row or column */
    bool by_rows;                            /* interleaved: those are rows of (E, rows, cols) */
    bool by_columns;                         /* fused experts are (E, cols, rows), columns of gate before those of up */
    bool flat_experts; /* stacks of experts are matrices, (E width, n_embd) of gate, of up and of down transposed */
    bool ungated;      /* feed-forwards have no gate */
    const char *expert_gain;               /* factors of the experts' results, in the table's words; NULL: none */
    bool own_values;                       /* layers without a window have a matrix of values */
    int n_shared;                          /* shared experts of a layer */
    const char *shared_key, *shared_count; /* their width is the first, times the second; NULL: once */
    bool shared_width;                     /* GGUF files say how wide they are */
    bool shared_gate;                      /* they have a gate */
    const char *router_bias;               /* GGUF name of the bias for the choice of experts; NULL: none */
    enum gating gating;                    /* the router's function */
    const char *norm_key;                  /* weights are divided by their sum; "": config.json does not say */
    bool norm_topk_prob;                   /* the same where it does not */
    const char *scaling_factor;            /* the key of the factor of the experts' results; NULL: there is none */
    bool scaling_optional;                 /* that key may be missing */

    const char *eps_key;       /* what norms add to the mean square */
    bool centers;              /* norms take off the mean */
    double eps;                /* the same where config.json does not say */
    double rope_theta, rotary; /* base and share of the rotation where it does not; rope_theta -1: it must */
    bool partial;              /* `rotary` may differ */
    bool window_rope;          /* layers with a window have another rotation */
    const char *window_theta;  /* its base; NULL: as rope_theta's */
    const int32_t *sections;   /* the shares of time, height and width where config.json does not say; NULL: GGUF files
                                * have none */
    bool stretched;            /* the base may be stretched by a factor alpha */
    bool proportional;         /* of all pairs of a head those after a share are not rotated, by rope_freqs.weight */
    bool longrope;             /* frequencies may have factors for short contexts and for long ones (LongRoPE) */
    bool llama3;               /* rope_freqs.weight may change frequencies */
    bool exact_yarn;           /* YaRN's ramp is not rounded */
    bool tempered;             /* queries grow with their position */

    void (*put)(void);                      /* writes keys that only this family has; NULL: there are none */
    void (*put_tokens)(void);               /* writes what this family has of tokens; NULL: nothing */
    void (*put_template)(const char *name); /* writes a chat template for a release without; NULL: there is none */
} src;

/* Returns the one of two names of a key that the config has; `name` where it has none or both. Releases of Kimi Linear
 * have the other names, and so do models of Ling 3 that transformers saved. */
static const char *either(const char *name, const char *other) {
    return !get(src.cfg, name) && get(src.cfg, other) ? other : name;
}

/* Returns max_position_embeddings, MAX_TRAINED where that is more. */
static int64_t context_length(void) {
    const char *key = either("max_position_embeddings", "model_max_length");
    if (src.context) return src.context;
    expect(src.cfg, key, json_is_number(get(src.cfg, key)) && json_number_value(get(src.cfg, key)) >= 1,
           fmt("an integer from 1 to %d", MAX_TRAINED));
    return get_limit(src.cfg, key, MAX_TRAINED, REQUIRED);
}

/* Returns a size from the config. */
static size_t size_of(const char *key) { return (size_t)get_int(src.cfg, key, 1, INT32_MAX, REQUIRED); }

/* Returns the rotated values of a key of latent attention. */
static size_t latent_rope(void) { return src.no_rope ? 0 : size_of("qk_rope_head_dim"); }

/* Returns the values of a head's key. */
static size_t head_k(void) {
    if (src.mixer == MIXER_MLA) return size_of("qk_nope_head_dim") + latent_rope();
    if (src.full_head) return (size_t)src.full_head;
    return (size_t)get_int(src.cfg, "head_dim", 1, 65536, (int64_t)size_of("hidden_size") / src.n_head);
}

/* Returns the same of layers with a window. */
static size_t window_head_k(void) {
    return src.full_head ? (size_t)get_int(src.cfg, "head_dim", 2, 65536, 256) : head_k();
}

/* Returns the values of a head's value. */
static size_t head_v(void) { return src.v_head_key ? size_of(src.v_head_key) : head_k(); }

/* Whether a block is of one of these kinds, or has both halves. */
static bool has_kind(int layer, const char *kinds) {
    return !src.kinds || layer >= src.n_layer || strchr(kinds, src.kinds[layer]) != NULL;
}

/* Whether a block has a window. */
static bool is_windowed(int layer) { return src.is_windowed && src.is_windowed(layer); }

/* The model that is written: its metadata as the engine's loader reads them, and the layer that is being planned. */
static struct {
    struct model model;
    struct loader loader;
    struct layer layer;
} made;

/* A size of the layer that is planned. */
static size_t dim_of(enum dim d) { return (size_t)layer_dim(&made.model, &made.layer, d); }

/* Sizes in the words of config.json. Those that are missing differ between families. */
/* clang-format off */
static const char *const dim_names[DIM_COUNT] = {
    [DIM_ONE] = "1", [DIM_EMBD] = "hidden_size", [DIM_2_EMBD] = "2 hidden_size", [DIM_SUM] = "hidden_size",
    [DIM_VOCAB] = "vocab_size", [DIM_TOKENS] = "vocab_size",
    [DIM_HEADS] = "num_attention_heads",
    [DIM_NOPE] = "qk_nope_head_dim", [DIM_ROPE] = "qk_rope_head_dim", [DIM_LATENT_PART] = "routed_expert_hidden_size", [DIM_Q_LORA] = "q_lora_rank",
    [DIM_KV_LORA] = "kv_lora_rank", [DIM_KV_A] = "kv_lora_rank + qk_rope_head_dim",
    [DIM_INDEXES] = "index_n_heads",
    [DIM_HC_EMBD] = "hc_mult x hidden_size", [DIM_HC] = "hc_mult", [DIM_HC_MIX] = "(2 + hc_mult) hc_mult",
    [DIM_HC_SCALES] = "reading, writing and mixing", [DIM_HC_LOW] = "hc_lowrank",
    [DIM_NGRAM] = "ple_embed_dim", [DIM_NGRAM_CONV] = "ple_conv_kernel_size",
    [DIM_NGRAM_KV] = "(hc_mult + 1) hidden_size",
    [DIM_COMPRESS_RATIO] = "tokens of a compressed key", [DIM_INDEX_COMPRESSED] = "2 index_head_dim",
    [DIM_GROUP_IN] = "num_attention_heads / o_groups x head_dim",
    [DIM_O_LORA] = "o_lora_rank", [DIM_GROUPS_OUT] = "o_groups x o_lora_rank",
    [DIM_EXPERTS] = "the layer's experts", [DIM_ROUTES] = "the layer's experts and zero_expert_num", [DIM_LATENT] = "moe_latent_size",
    [DIM_CONV] = "linear_conv_kernel_dim",
    [DIM_KEY] = "linear_num_key_heads x linear_key_head_dim",
    [DIM_VALUES] = "linear_num_value_heads", [DIM_VALUE] = "linear_num_value_heads x linear_value_head_dim",
    [DIM_VALUE_HEAD] = "linear_value_head_dim",
    [DIM_MIX] = "heads of queries, keys and values", [DIM_BA] = "2 linear_num_value_heads",
    [DIM_DECAYS] = "num_attention_heads x head_dim of linear attention",
    [DIM_LOW] = "head_dim of linear attention",
    [DIM_TAPS] = "conv_kernel_size", [DIM_KV_TAPS] = "num_key_value_heads x conv_kernel_size",
    [DIM_REL] = "num_attention_heads x d_rel", [DIM_REL_HEAD] = "d_rel",
    [DIM_EXTENT] = "rel_extent, with a window sliding_window_size", [DIM_READ] = "readings of attention",
    [DIM_READS] = "messages", [DIM_PAIR] = "2 hidden_size", [DIM_GATE_LOW] = "loop_gate_rank"};

/* Those of Mamba-2. */
static const char *const mamba_dim_names[DIM_COUNT] = {
    [DIM_CONV] = "conv_kernel", [DIM_VALUES] = "mamba_num_heads", [DIM_VALUE] = "mamba_num_heads x mamba_head_dim",
    [DIM_MIX] = "mamba_num_heads x mamba_head_dim + 2 n_groups x ssm_state_size", [DIM_KEYS] = "n_groups",
    [DIM_GROUP] = "mamba_num_heads / n_groups x mamba_head_dim",
    [DIM_MAMBA_IN] = "2 mamba_num_heads x mamba_head_dim + 2 n_groups x ssm_state_size + mamba_num_heads"};

/* Those of a gated convolution. */
static const char *const conv_dim_names[DIM_COUNT] = {
    [DIM_CONV] = "conv_L_cache", [DIM_VALUE] = "hidden_size", [DIM_MIX] = "hidden_size", [DIM_CONV_IN] = "3 hidden_size"};
/* clang-format on */

/* Returns a size of the layer that is planned in the words of config.json. */
static const char *dim_name(enum dim d) {
    const struct layer *l = &made.layer;
    const bool mla = l->mixer == MIXER_MLA, gqa = l->mixer == MIXER_GQA, kda = l->delta.n_decay > 1;
    const char *k = mla ? "qk_nope_head_dim + qk_rope_head_dim" : "head_dim";
    const char *v = src.v_head_key ? src.v_head_key : "head_dim";
    if (l->mixer == MIXER_MAMBA && mamba_dim_names[d]) return mamba_dim_names[d];
    if (l->mixer == MIXER_CONV && conv_dim_names[d]) return conv_dim_names[d];
    switch ((int)d) {
    case DIM_KEY:
    case DIM_VALUE: return kda ? "num_attention_heads x head_dim of linear attention" : dim_names[d];
    case DIM_VALUES: return kda ? "num_attention_heads" : dim_names[d];
    case DIM_CONV: return kda ? "taps of a convolution" : dim_names[d];
    case DIM_VALUE_HEAD: return kda ? "head_dim of linear attention" : dim_names[d];
    case DIM_Q:
        return fmt(mla ? "%snum_attention_heads x (%s)" : "%snum_attention_heads x %s", l->attn.q_gate ? "2 " : "", k);
    case DIM_K: return fmt("num_key_value_heads x %s", k);
    case DIM_V: return fmt("num_key_value_heads x %s", v);
    case DIM_GATES: return l->attn.n_gate == 1 ? "num_attention_heads" : dim_name(DIM_ATT);
    case DIM_ATT: return fmt("num_attention_heads x %s", v);
    case DIM_HEAD_K: return k;
    case DIM_HEAD_V: return v;
    case DIM_COMPRESS_RATIO: return mla ? "index_kpool" : dim_names[d];
    case DIM_INDEX_COMPRESSED: return mla ? "index_head_dim" : dim_names[d];
    case DIM_COMPRESSED: return dim_of(d) > (size_t)l->attn.head_k ? "2 head_dim" : "head_dim";
    case DIM_INDEX_Q: return gqa ? "heads x width of the indexer" : "index_n_heads x index_head_dim";
    case DIM_INDEX_K: return gqa ? "width of the indexer" : "index_head_dim";
    case DIM_NGRAM: return src.mixer == MIXER_CSA ? "rows of n-grams x engram_head_dim" : dim_names[d];
    case DIM_HC: return made.model.hc_low ? "hc_count" : dim_names[d];
    case DIM_HC_EMBD: return made.model.hc_low ? "hc_count x hidden_size" : dim_names[d];
    case DIM_USED: return src.top_k_key;
    case DIM_FF: return l->n_expert ? src.width_key : src.dense_key;
    case DIM_GATE_UP: return fmt("2 %s", src.dense_key);
    case DIM_EXPERT: return dim_name(l->n_latent ? DIM_LATENT : DIM_EMBD);
    case DIM_SHARED: return src.shared_count ? fmt("%s x %s", src.shared_key, src.shared_count) : src.shared_key;
    case DIM_ROUTES: return dim_names[l->n_zero ? d : DIM_EXPERTS];
    default: return dim_names[d];
    }
}

/* Dies unless a tensor has the sizes r and c; c ONE: it is a vector. */
static void check_shape(const struct tensor *t, size_t rows, size_t cols, enum dim r, enum dim c) {
    const size_t m = dim_of(r), n = dim_of(c);
    if (rows == m && cols == n) return;
    if (c == DIM_ONE) refuse_part("%s: expected [%zu] (%s), found %s", where(t), m, dim_name(r), shape_text(t));
    refuse_part("%s: expected [%zu, %zu] (%s, %s), found %s", where(t), m, n, dim_name(r), dim_name(c), shape_text(t));
}

/* Returns the Hugging Face name of a tensor of a layer, or (layer -1) of the whole model: "model." begins the names in
 * its body. */
static const char *hf_name(int layer, const char *rest) {
    const char *mtp = layer >= src.n_layer ? src.mtp : NULL;
    int number = layer - src.n_layer, second = 0; /* of a layer for multi-token prediction */
    for (const struct renaming *r = src.renaming; r && r->from; r++) {
        const size_t n = strlen(r->from);
        if (!starts_with(rest, r->from) || (rest[n] && rest[n] != '.')) continue;
        if ((r->where == PREDICTION || r->where == SECOND) && layer < src.n_layer) continue;
        if (r->where == BARE && *src.body) continue;
        rest = fmt("%s%s", r->to, rest + n);
        if (mtp && r->where == BESIDE) return fmt("%s%s%s", src.prefix, mtp, rest);
        second = r->where == SECOND;
        break;
    }
    if (src.halved && layer >= 0) {
        const char *at = strchr(rest, '@');
        if (at) rest = fmt("%.*s%d%s", (int)(at - rest), rest, layer % 2, at + 1);
        layer /= 2;
    }
    if (src.mtp_halves) number = 2 * number + second;
    if (mtp) return fmt("%s%s%s%d.%s", src.prefix, mtp, src.mtp_bare ? "" : "layers.", number, rest);
    if (layer >= 0) return fmt("%s%s%s%d.%s", src.prefix, src.body, src.layers ? src.layers : "layers.", layer, rest);
    return starts_with(rest, "model.") ? fmt("%s%s%s", src.prefix, src.body, rest + 6) : fmt("%s%s", src.prefix, rest);
}

static struct gguf_writer writer;

static const char *arch_key(const char *rest) { return fmt("%s.%s", src.arch, rest); }
static int n_blocks(void) { return src.n_layer + src.n_mtp; }

/* Writes a whole number. */
static void kv_u32(const char *key, size_t v) {
    if (v > UINT32_MAX) die("config.json: '%s' of the file would be %zu, expected at most %u", key, v, UINT32_MAX);
    gguf_put_u32(&writer, arch_key(key), (uint32_t)v);
}

/* Writes a number v that is, or follows from, the value of `name` in d. Dies unless it is in the range of its key. */
static void kv_num(struct doc d, const char *name, double v, const char *key) {
    const struct key_rule *r = key_rule_of(key);
    expect(d, name, v >= r->lo && v <= r->hi, fmt("a number that makes %s %g to %g", key, r->lo, r->hi));
    gguf_put_f32(&writer, arch_key(key), (float)v);
}

/* Writes an array of n values. */
static void kv_array(const char *key, enum gguf_value type, int n, const void *values) {
    gguf_put_array(&writer, arch_key(key), type, (uint64_t)n, values);
}

/* Writes for each of n blocks whether `is` holds for it. */
static void kv_flags(const char *key, int n, bool (*is)(int block)) {
    bool flags[MAX_LAYERS];
    for (int l = 0; l < n; l++) flags[l] = is(l);
    kv_array(key, GGUF_V_BOOL, n, flags);
}

static void kv_str(const char *key, const char *s) { gguf_put_str(&writer, key, s, strlen(s)); }

static void kv_i32(const char *key, int32_t v) {
    gguf_put_key(&writer, key, GGUF_V_I32);
    gguf_put_u32_raw(&writer, (uint32_t)v);
}

static void kv_strings(const char *key, char *const *s, size_t n) {
    gguf_put_array(&writer, key, GGUF_V_STR, n, NULL);
    for (size_t i = 0; i < n; i++) gguf_put_bytes(&writer, s[i], strlen(s[i]));
}

/* Describes a tensor as rows of values; sizes of 1 do not count. */
static struct linear as_rows(const struct tensor *t) {
    struct linear l = {.format = PLAIN, .w = t, .rows = 1, .factor = 1.0f};
    for (uint32_t i = 0; i < t->rank; i++) {
        if (i && t->shape[i] == 1) continue;
        if (i) l.rows *= l.cols;
        l.cols = t->shape[i];
    }
    return l;
}

static bool has_linear(const char *x) {
    return tensor_find(fmt("%s.weight", x)) || tensor_find(fmt("%s.weight_packed", x));
}

/* ============================================================================================================
 * Model: matrices and vectors
 *
 * The plan of a tensor: where its values come from, and what becomes of fused or folded ones.
 * ============================================================================================================ */

/* Describes a tensor of values as rows: floats, or a matrix with scales, such as the gate of a shared expert (1, n). */
static struct linear resolve_values(const char *name) {
    const struct tensor *t = tensor_find(name);
    const char *x = ends_with(name, ".weight") ? fmt("%.*s", (int)(strlen(name) - strlen(".weight")), name) : name;
    const bool scaled = t ? !is_float(t) && t->rank == 2 && x != name : has_linear(x);
    return scaled ? resolve_linear(x) : as_rows(resolve_vector(name));
}

/* Returns the pieces of a tensor with these rows. Where they are heads of values, each one is a piece. */
static struct piece *pieces_of(struct linear l, enum dim rows) {
    const struct delta *d = &made.layer.delta;
    size_t head = rows == DIM_VALUES ? 1 : rows == DIM_VALUE || rows == DIM_MIX ? (size_t)d->head_v : 0;
    size_t before = rows == DIM_MIX ? dim_of(DIM_MIX) - dim_of(DIM_VALUE) : 0; /* queries and keys */
    struct piece *p = NULL, first = {.lin = l, .rows = d->tiled && head ? before : l.rows};
    if (src.pairs && (rows == DIM_Q || rows == DIM_K)) first.head = dim_of(DIM_HEAD_K);
    if (first.rows) arrput(p, first);
    for (size_t i = 0, n = (size_t)d->n_value; i < n && d->tiled && head; i++) {
        struct piece one = {.lin = l, .row = before + tiled_head(i, (size_t)d->n_key, n) * head, .rows = head};
        arrput(p, one);
    }
    return p;
}

/* Appends a tensor of F32. out DIM_ONE: it is a vector. */
static void plan_f32(const char *dst, struct linear l, enum dim in, enum dim out, enum meaning meaning) {
    struct output *o = plan_add(dst, GGUF_F32, out == DIM_ONE ? 1 : 2, dim_of(in), dim_of(out), 1);
    l.fold = true;
    if (out == DIM_ONE && l.format == PLAIN) {
        l.rows = dim_of(in);
        l.cols = 1;
    }
    o->pieces = pieces_of(l, out == DIM_ONE ? in : out);
    o->meaning = meaning;
    o->finite = true;
}

/* The same for a tensor whose shape is checked. */
static void plan_vector(const char *dst, const char *from, enum dim in, enum dim out, enum meaning meaning) {
    struct linear l = resolve_values(from);
    if (out != DIM_ONE && l.format == PLAIN && l.rows == 1 && l.cols == dim_of(in) * dim_of(out)) {
        l.rows = dim_of(out); /* it is a vector of the source */
        l.cols = dim_of(in);
    }
    if (out == DIM_ONE) check_shape(l.w, l.cols, l.rows, in, out);
    else check_shape(l.w, l.rows, l.cols, out, in);
    plan_f32(dst, l, in, out, meaning);
}

/* The taps of a convolution over `values` values. */
static void plan_taps(const char *dst, const char *from, enum dim taps, enum dim values) {
    plan_vector(dst, from, taps, values, VALUES);
    struct output *o = &arrlast(plan);
    o->n_dims = 3;
    o->ne[2] = o->ne[1];
    o->ne[1] = 1;
}

/* Returns the pieces of a matrix with these sizes. */
static struct piece *matrix_pieces(struct linear l, enum dim rows, enum dim cols) {
    check_shape(l.w, l.rows, l.cols, rows, cols);
    if (made.layer.delta.tiled && cols == DIM_VALUE) {
        l.groups = (size_t)made.layer.delta.n_key;
        l.head = dim_of(DIM_VALUE_HEAD);
    }
    return pieces_of(l, rows);
}

/* A matrix of the source with its shape checked, as one of GGUF. */
static void plan_linear(const char *dst, struct linear l, enum dim rows, enum dim cols, enum stacking how) {
    plan_matrix(dst, matrix_pieces(l, rows, cols), how);
}

/* A matrix that is stored without scales: a table of embeddings. */
static struct linear resolve_folded(const char *from) {
    struct linear l = resolve_linear(from);
    l.fold = l.format != PLAIN;
    return l;
}

static size_t n_copies;         /* skipped tensors that are copies of the model's embedding or output matrix */
static struct finding unchosen; /* skipped biases for the choice of experts in layers that do not choose */

/* Says which tensors of a kind are left out, and why. */
static void report_skipped(struct finding f, const char *why) {
    if (f.n > 1) err_message("%zu tensors such as '%s' are left out: %s", f.n, f.first, why);
    else if (f.n) err_message("tensor '%s' is left out: %s", f.first, why);
}

/* Returns tensor i of linear_parts of a linear layer, or NULL. */
static struct tensor *find_part(const char *x, size_t i) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.%s", x, linear_parts[i]);
    return tensor_find(name);
}

/* Whether two linear layers have the same tensors, byte for byte. */
static bool same_linear(const char *x, const char *y) {
    if (!has_linear(x)) return false;
    for (size_t i = 0; i < COUNT(linear_parts); i++) {
        const struct tensor *a = find_part(x, i), *b = find_part(y, i);
        if (!a != !b || (a && !same_tensor(a, b))) return false;
    }
    return true;
}

/* Skips all tensors of a linear layer. */
static void skip_linear(const char *x) {
    for (size_t i = 0; i < COUNT(linear_parts); i++) {
        struct tensor *t = find_part(x, i);
        if (t && !t->used) skip(t);
    }
}

/* Skips the embedding or the output matrix of an MTP layer if it has the bytes of the model's. A reader takes the
 * model's where a layer has none. */
static bool skip_copy(const char *from, bool embedding) {
    if (!same_linear(from, hf_name(-1, embedding || src.tied ? "model.embed_tokens" : "lm_head"))) return false;
    skip_linear(from);
    n_copies++;
    return true;
}

static void plan_kv_b(int layer);
static void plan_eh_proj(int layer);
static void plan_messages(int layer);
static void plan_qkvz(int layer);
static void plan_qkv(int layer);
static struct piece *expert_pieces(const struct tensor_rule *r, int layer);
static void plan_expert_biases(const struct tensor_rule *rule, int layer);

/* A table of the experts of every token id. */
static void plan_ids(const struct tensor_rule *r, int layer) {
    struct tensor *t = tensor_find(hf_name(layer, r->hf));
    if (!t) refuse_part("'%s': tensor '%s' is missing", model_dir, hf_name(layer, r->hf));
    if ((t->dtype != I64 && t->dtype != I32) || t->rank != 2)
        die("%s: expected a matrix of I64 or I32, found %s", where(t), shape_text(t));
    check_shape(t, t->shape[0], t->shape[1], r->out, r->in);
    struct output *o = plan_add(fmt("blk.%d.%s", layer, r->name), GGUF_I32, 2, dim_of(r->in), dim_of(r->out), 1);
    struct piece one = {.lin = {.format = PLAIN, .w = t, .rows = dim_of(r->out), .cols = dim_of(r->in), .factor = 1.0f},
                        .rows = dim_of(r->out)};
    arrput(o->pieces, one);
    o->below = src.experts[layer];
    t->used = true;
}

/* What the values of a vector are. */
static enum meaning meaning_of(const struct tensor_rule *r) {
    const struct delta *d = &made.layer.delta;
    if (r->field == offsetof(struct layer, decay)) return d->bound < 0 && !d->flat_decay ? EXPONENT : LOGARITHM;
    const bool norm = (ends_with(r->name, "norm.weight") && r->field != offsetof(struct layer, delta_norm)) ||
                      starts_with(r->name, "ple_norm_");
    return norm && src.zero_centered ? LESS_ONE : VALUES;
}

/* Returns the values of a norm (rows DIM_ONE) or of a matrix of one row, malloc'ed. */
static float *read_query(const char *name, enum dim cols) {
    const struct tensor *t = cols == DIM_ONE ? resolve_vector(name) : resolve_linear(name).w;
    float *v = xrealloc(NULL, dim_of(DIM_EMBD) * sizeof *v);
    if (cols == DIM_ONE) check_shape(t, 1, dim_of(DIM_EMBD), DIM_ONE, DIM_EMBD);
    read_floats(t, 0, dim_of(DIM_EMBD), v);
    return v;
}

/* The query by which blocks are read: the weights of a norm times a matrix of one row. */
static void plan_query(const char *dst, const char *half) {
    float *v = NULL, *norm = read_query(fmt("%s_norm.weight", half), DIM_ONE),
          *row = read_query(fmt("%s_proj", half), DIM_EMBD);
    for (size_t i = 0; i < dim_of(DIM_EMBD); i++) arrput(v, norm[i] * row[i]);
    free(norm), free(row);
    plan_values(dst, v);
}

/* A vector of a layer. */
static void plan_layer_vector(const struct tensor_rule *r, const char *dst, const char *from) {
    const char *leaf = strrchr(r->hf, '.');
    const bool bias = r->field == offsetof(struct layer, router_bias);
    const bool qkv_bias = starts_with(r->name, "attn_") && ends_with(r->name, ".bias");
    const bool gate = r->field == offsetof(struct layer, sh_weight) && src.shared_gate;
    const bool norm = r->field == offsetof(struct layer, head_norm) && /* not the model's */
                      layer_streams(&made.model, &made.layer);
    const bool optional = r->optional && !bias && !qkv_bias && !gate && !norm;
    if (bias && made.layer.has_expert_ids) { /* nothing is chosen there */
        struct tensor *unused = tensor_find(from);
        if (!unused) return;
        skip(unused);
        finding_add(&unchosen, unused->name);
        return;
    }
    if ((bias && !src.router_bias) || (qkv_bias && !src.qkv_bias)) return;
    if (bias) dst = fmt("%.*s%s", (int)(strlen(dst) - strlen(r->name)), dst, src.router_bias);
    const bool bare = !ends_with(dst, ".weight") ||
                      one_of(leaf ? leaf + 1 : r->hf,
                             "sinks position_bias fn base scale proj static_w index_kpool_compress_ape layer_scalar "
                             "k_weight q_weight");
    const char *name = fmt("%s%s", from, bare ? "" : ".weight");
    if (r->n != DIM_ONE) plan_taps(dst, name, r->in, r->n);
    else if (!optional || tensor_find(name)) plan_vector(dst, name, r->in, r->out, meaning_of(r));
    if (src.grown_latents &&
        (r->field == offsetof(struct layer, q_a_norm) || r->field == offsetof(struct layer, kv_a_norm)))
        arrlast(plan).factor = (float)sqrt((double)dim_of(DIM_EMBD) / (double)dim_of(r->in));
}

/* Whether a row is the gate of a feed-forward, shared or not, or of experts. The row of up follows it. */
static bool is_gate(const struct tensor_rule *r) {
    return r->kind == TENSOR_MATRIX &&
           (r->field == offsetof(struct layer, gate) || r->field == offsetof(struct layer, sh_gate));
}

/* What the pieces of a row's matrix are. */
static enum stacking stacking_of(const struct tensor_rule *r) {
    const bool ffn = r->in == DIM_FF || r->out == DIM_FF || r->out == DIM_GATE_UP;
    return r->n == DIM_EXPERTS ? EXPERTS : ffn ? DENSE_FFN : SINGLE;
}

/* Returns gate (k 0) or up of a feed-forward, or of a shared expert, that has both as one matrix, the rows of gate first.
 * NULL: it has not. */
static struct piece *half_pieces(const struct tensor_rule *r, int layer, size_t k) {
    const bool shared = r->out == DIM_SHARED;
    const char *both = hf_name(layer, shared ? "mlp.shared_experts.gate_up_proj" : "mlp.gate_up_proj");
    const size_t rows = dim_of(r->out), cols = dim_of(r->in);
    if (!has_linear(both)) return NULL;
    struct piece *p = NULL, one = {.lin = resolve_linear(both), .row = k * rows, .rows = rows};
    if (one.lin.rows != 2 * rows || one.lin.cols != cols)
        die("%s: expected [%zu, %zu] (2 %s, %s), found %s", where(one.lin.w), 2 * rows, cols, dim_name(r->out),
            dim_name(r->in), shape_text(one.lin.w));
    arrput(p, one);
    return p;
}

/* Gate and up, whose rows are r and the one after it. */
static void plan_gate_up(const struct tensor_rule *r, int layer) {
    struct piece *p[2];
    for (int k = 0; k < 2; k++) {
        p[k] = r->n == DIM_EXPERTS ? expert_pieces(&r[k], layer) : half_pieces(&r[k], layer, (size_t)k);
        if (!p[k]) p[k] = matrix_pieces(resolve_linear(hf_name(layer, r[k].hf)), r[k].out, r[k].in);
    }
    const char *const base[2] = {fmt("blk.%d.%s", layer, r[0].name), fmt("blk.%d.%s", layer, r[1].name)};
    plan_pair(base, p, stacking_of(r));
}

/* Appends the queries or the key of an indexer, whose rows of index_qk_proj follow one another. */
static void plan_index_qk(const struct tensor_rule *r, int layer) {
    const struct linear l = resolve_linear(hf_name(layer, "self_attn.indexer.index_qk_proj"));
    const size_t q = dim_of(DIM_INDEX_Q), k = dim_of(DIM_INDEX_K);
    const bool key = r->out == DIM_INDEX_K;
    if (l.rows != q + k || l.cols != dim_of(DIM_EMBD))
        die("%s: expected [%zu, %zu] ((indexer_n_heads + 1) x indexer_head_dim, hidden_size), found %s", where(l.w),
            q + k, dim_of(DIM_EMBD), shape_text(l.w));
    struct piece *p = NULL, one = {.lin = l, .row = key ? q : 0, .rows = key ? k : q};
    arrput(p, one);
    plan_matrix(fmt("blk.%d.%s", layer, r->name), p, SINGLE);
}

/* The tensor of one row of the table, for a layer. */
static void plan_rule(const struct tensor_rule *r, int layer) {
    if (!r->name || (r != tensor_rules && is_gate(r - 1) && !made.layer.ungated))
        return; /* a part of the row before, or up, planned with gate */
    const char *dst = fmt("blk.%d.%s", layer, r->name);
    const bool qkv = !strcmp(r->name, "attn_qkv"), fused = made.layer.delta.fused_ba; /* z is in the same tensor */
    if (r->field == offsetof(struct layer, wk_b)) plan_kv_b(layer);                   /* and wv_b */
    if (fused && qkv) plan_qkvz(layer);
    if (layer_streams(&made.model, &made.layer) && r->field == offsetof(struct layer, eh_proj)) {
        plan_eh_proj(layer);
        return;
    }
    if (r->field == offsetof(struct layer, read_messages)) {
        plan_messages(layer);
        return;
    }
    if (r->when == HAS_PLAIN_BLOCKS) {
        plan_query(dst, fmt("%.*s", (int)strlen(hf_name(layer, r->hf)) - 5, hf_name(layer, r->hf)));
        return;
    }
    if (r->when & (HAS_READ_BLOCKS | HAS_RES_BLOCKS)) { /* that of the first layer's attention does not exist */
        const bool ffn = r->field == offsetof(struct layer, read_ffn);
        plan_vector(dst, hf_name(-1, fmt("model.%s.%d", r->hf, ffn ? layer : layer - 1)), r->in, r->out, VALUES);
        return;
    }
    if (!r->hf || (fused && (qkv || r->field == offsetof(struct layer, wz)))) return;
    if (r->n == DIM_EXPERTS) {
        struct piece *p = is_gate(r) ? NULL : expert_pieces(r, layer);
        if (p) plan_matrix(fmt("blk.%d.%s", layer, r->name), p, EXPERTS);
        else plan_gate_up(r, layer);
        return;
    }
    const char *from = hf_name(layer, r->hf);
    if (src.qkv_chunks && one_of(r->name, "attn_q attn_k attn_v") && has_linear(hf_name(layer, "self_attn.qkv_proj"))) {
        if (!strcmp(r->name, "attn_q")) plan_qkv(layer);
    } else if (r->kind == TENSOR_VECTOR) {
        if (strchr(r->hf, '*')) plan_expert_biases(r, layer);
        else plan_layer_vector(r, dst, from);
    } else if (r->kind == TENSOR_IDS) {
        plan_ids(r, layer);
    } else if (r->n == DIM_GROUPS) { /* one matrix with the rows of all groups */
        plan_linear(dst, resolve_linear(from), DIM_GROUPS_OUT, r->in, SINGLE);
    } else if (r->kind == TENSOR_ROUTER || /* F32: routing decides on small differences */
               (r->field == offsetof(struct layer, w_index) && resolve_linear(from).format == PLAIN)) {
        const struct linear l = resolve_linear(from);
        check_shape(l.w, l.rows, l.cols, r->out, r->in);
        plan_f32(fmt("%s.weight", dst), l, r->in, r->out, VALUES);
    } else if (is_gate(r)) {
        plan_gate_up(r, layer);
    } else if (made.layer.attn.index_means && one_of(r->name, "indexer.q_proj indexer.k_proj")) {
        plan_index_qk(r, layer);
    } else if (!r->optional || has_linear(from)) {
        const bool embedding = r->out == DIM_TOKENS;
        if ((embedding || r->out == DIM_VOCAB) && skip_copy(from, embedding)) return;
        plan_linear(dst, embedding ? resolve_folded(from) : resolve_linear(from), r->out, r->in, stacking_of(r));
    }
}

/* Appends kv_b_proj (head, nope + v, kv_lora) as the two matrices of absorbed attention: k_b, transposed per head, and
 * v_b (DeepSeek-V2, arXiv 2405.04434, section 2.1). */
static void plan_kv_b(int layer) {
    struct linear l = resolve_linear(hf_name(layer, "self_attn.kv_b_proj"));
    const size_t nope = dim_of(DIM_NOPE), v_head = dim_of(DIM_HEAD_V), rows = dim_of(DIM_HEADS) * (nope + v_head);
    if (l.rows != rows || l.cols != dim_of(DIM_KV_LORA))
        die("%s: expected [%zu, %zu] (num_attention_heads x (qk_nope_head_dim + v_head_dim), kv_lora_rank), found %s",
            where(l.w), rows, dim_of(DIM_KV_LORA), shape_text(l.w));
    struct piece *k = NULL, *v = NULL;
    for (size_t h = 0; h < dim_of(DIM_HEADS); h++) {
        size_t row = h * (nope + v_head);
        struct piece kp = {.lin = l, .row = row, .rows = l.cols, .step = 1, .height = nope};
        struct piece vp = {.lin = l, .row = row + nope, .rows = v_head};
        arrput(k, kp);
        arrput(v, vp);
    }
    plan_matrix(fmt("blk.%d.attn_k_b", layer), k, HEADS);
    plan_matrix(fmt("blk.%d.attn_v_b", layer), v, HEADS);
}

/* Appends e_proj and h_proj of an MTP layer, which multiply the embedding and each stream, side by side. */
static void plan_eh_proj(int layer) {
    struct linear *h = xrealloc(NULL, sizeof *h); /* kept: the plan lives as long as the program */
    struct piece *p = NULL,
                 one = {.lin = resolve_folded(hf_name(layer, "e_proj")), .rows = dim_of(DIM_EMBD), .beside = h};
    *h = resolve_folded(hf_name(layer, "h_proj"));
    check_shape(one.lin.w, one.lin.rows, one.lin.cols, DIM_EMBD, DIM_EMBD);
    check_shape(h->w, h->rows, h->cols, DIM_EMBD, DIM_EMBD);
    arrput(p, one);
    plan_matrix(fmt("blk.%d.nextn.eh_proj", layer), p, SINGLE);
}

/* Appends the queries of messages: of one tensor those of READ_Q and READ_FFN, layer by layer, of another those of READ_K
 * and READ_V. */
static void plan_messages(int layer) {
    static const char *const from[] = {"model.middle_cycle_cross_pass_queries",
                                       "model.middle_cycle_cross_pass_kv_queries"};
    const size_t n = 2 * (size_t)made.model.n_loop, at = 2 * (size_t)(layer - made.model.loop_first);
    struct output *o =
        plan_add(fmt("blk.%d.loop_messages.weight", layer), GGUF_F32, 2, dim_of(DIM_EMBD), dim_of(DIM_READS), 1);
    o->finite = true;
    for (int i = 0; i < READS; i++) {
        const bool kv = i == READ_K || i == READ_V;
        const struct linear l = as_rows(resolve_vector(hf_name(-1, from[kv])));
        if (l.rows != n || l.cols != dim_of(DIM_EMBD))
            die("%s: expected [%zu, %zu] (two for each layer of the loop, hidden_size), found %s", where(l.w), n,
                dim_of(DIM_EMBD), shape_text(l.w));
        const struct piece one = {.lin = l, .row = at + (i == READ_V || i == READ_FFN), .rows = 1};
        arrput(o->pieces, one);
    }
}

/* Appends in_proj_qkvz as attn_qkv and attn_gate. Its rows are, for every head of keys, the query, the key, and the
 * values and gates of the heads of values that belong to it. */
static void plan_qkvz(int layer) {
    struct linear l = resolve_linear(hf_name(layer, "linear_attn.in_proj_qkvz"));
    const size_t n_key = (size_t)made.layer.delta.n_key, key = dim_of(DIM_KEY) / n_key,
                 value = dim_of(DIM_VALUE) / n_key, stride = 2 * (key + value);
    const size_t begin[] = {0, key, 2 * key, 2 * key + value}, rows[] = {key, key, value, value};
    struct piece *p[2] = {NULL, NULL};
    if (l.rows != n_key * stride || l.cols != dim_of(DIM_EMBD))
        die("%s: expected [%zu, %zu] (2 x (%s + %s), hidden_size), found %s", where(l.w), n_key * stride,
            dim_of(DIM_EMBD), dim_name(DIM_KEY), dim_name(DIM_VALUE), shape_text(l.w));
    for (size_t part = 0; part < 4; part++)
        for (size_t h = 0; h < n_key; h++) {
            struct piece one = {.lin = l, .row = h * stride + begin[part], .rows = rows[part]};
            arrput(p[part == 3], one);
        }
    plan_matrix(fmt("blk.%d.attn_qkv", layer), p[0], SINGLE);
    plan_matrix(fmt("blk.%d.attn_gate", layer), p[1], SINGLE);
}

/* Appends qkv_proj as attn_qkv, or as three matrices where heads are reordered. Each of its parts has rows of queries,
 * then of keys, then of values. FP8 blocks begin anew in every part. */
static void plan_qkv(int layer) {
    const size_t n = src.qkv_chunks, rows[] = {dim_of(DIM_Q), dim_of(DIM_K), dim_of(DIM_V)},
                 all = rows[0] + rows[1] + rows[2];
    const char *from = hf_name(layer, "self_attn.qkv_proj");
    struct linear l = resolve_chunks(from, n);
    struct piece *p = NULL;
    if (l.rows != all || l.cols != dim_of(DIM_EMBD) || rows[0] % n || rows[1] % n || rows[2] % n)
        die("%s: expected [%zu, %zu] (%zu parts with queries, keys and values, hidden_size), found %s", where(l.w), all,
            dim_of(DIM_EMBD), n, shape_text(l.w));
    for (size_t k = 0, before = 0; k < 3; before += rows[k++] / n) {
        for (size_t c = 0; c < n; c++) {
            struct piece one = {.lin = l, .row = c * (all / n) + before, .rows = rows[k] / n};
            if (src.pairs && k < 2) one.head = dim_of(DIM_HEAD_K);
            arrput(p, one);
        }
        if (!src.pairs) continue;
        plan_matrix(fmt("blk.%d.attn_%c", layer, "qkv"[k]), p, SINGLE);
        p = NULL;
    }
    if (p) plan_matrix(fmt("blk.%d.attn_qkv", layer), p, SINGLE);
}

/* ============================================================================================================
 * Model: experts
 *
 * Finds the experts of a layer, stacked or one by one, and counts them.
 * ============================================================================================================ */

/* Returns the tensor (E, rows, cols) x or x.weight with all experts of a layer, or NULL. In gate_up_proj the rows of
 * gate come before those of up. */
static struct tensor *find_fused(const char *x) {
    struct tensor *t = tensor_find(x);
    if (!t) t = tensor_find(fmt("%s.weight", x));
    if (!t) return NULL;
    const size_t width = src.flat_experts ? size_of(src.width_key) : 0;
    if (width && t->rank == 2 && t->shape[0] % width == 0) {
        t->rank = 3;
        t->shape[2] = t->shape[1];
        t->shape[1] = width;
        t->shape[0] /= width;
    }
    if (t->rank != 3 || !t->bytes || !(is_float(t) || t->dtype == U8 || t->dtype == F8_E4M3))
        die("%s: expected BF16, F16, F32, NVFP4 (U8) or F8_E4M3 of rank 3, found %s", where(t), shape_text(t));
    return t;
}

/* Returns the name of a tensor of expert e; "*" stands for its number in hf. */
static const char *expert_name(int layer, const char *hf, size_t e) {
    const char *x = hf_name(layer, hf), *star = strchr(x, '*');
    return fmt("%.*s%zu%s", (int)(star - x), x, e, star + 1);
}

/* Where the matrices of a layer's experts are. */
struct expert_source {
    enum {
        EACH,   /* a tensor for every matrix */
        ROWS,   /* (E, rows, cols): of gate, up or down, or the rows of gate before those of up */
        COLUMNS /* (E, cols, rows): the columns of gate and up alternate, or by_columns gate's come first */
    } form;
    struct tensor *w;    /* NULL: EACH */
    const char *hf;      /* its name, without .weight or _blocks */
    size_t n_part, part; /* matrices of an expert in w, and which one of them is meant */
    bool blocks;         /* ROWS of gpt-oss' MXFP4 (E, rows, cols / 32, 16), where those of gate and up alternate */
};

/* Finds the matrices of gate, or up, or down. */
static struct expert_source find_experts(int layer, bool up, bool down) {
    struct expert_source s = {.hf = down ? "mlp.experts.down_proj" : "mlp.experts.gate_up_proj",
                              .n_part = down ? 1 : 2};
    s.part = up;
    if (src.interleaved) s.w = tensor_find(fmt("%s_blocks", hf_name(layer, s.hf)));
    s.blocks = s.w != NULL;
    s.form = ROWS;
    if (s.w) return s;
    s.w = find_fused(hf_name(layer, s.hf));
    if (s.w && (src.by_columns || src.flat_experts || (src.interleaved && !src.by_rows))) s.form = COLUMNS;
    if (s.w) return s;
    s = (struct expert_source){.form = ROWS, .n_part = 1, .hf = up ? "mlp.experts.up_proj" : "mlp.experts.gate_proj"};
    if (!down) s.w = find_fused(hf_name(layer, s.hf));
    if (!s.w) s.form = EACH;
    return s;
}

/* Dies unless lists of the layers' numbers of experts, which config.json of pruned models has in several places, agree
 * with the tensors of a layer. */
static void check_count_lists(int layer) {
    struct doc q = get_obj(get(src.cfg, "quantization_config") ? src.cfg : src.top, "quantization_config");
    const struct {
        struct doc d;
        const char *key;
    } lists[] = {{get_obj(q, "moe_sparsity_config"), "num_experts"},
                 {src.cfg, "per_layer_num_experts"},
                 {src.cfg, src.experts_key}};
    for (size_t i = 0; i < COUNT(lists); i++) {
        json_t *list = get(lists[i].d, lists[i].key), *v = json_array_get(list, (size_t)layer);
        if (!json_is_array(list) || layer >= src.n_layer) continue;
        if (json_element(list, (size_t)layer) != src.experts[layer])
            die("%s: key '%s': expected %d experts for layer %d, as its tensors have, found %s", lists[i].d.file,
                lists[i].d.in ? fmt("%s.%s", lists[i].d.in, lists[i].key) : lists[i].key, src.experts[layer], layer,
                v ? json_show(v) : "the end of the list");
    }
}

/* Returns how many experts the tensors of a layer have. Dies if config.json does not allow that number. */
static int count_experts(int layer) {
    const char *hf = src.ungated ? "mlp.experts.*.up_proj" : "mlp.experts.*.gate_proj";
    struct expert_source s = find_experts(layer, src.ungated, false);
    int n = 0;
    if (s.w) n = s.w->shape[0] > MAX_EXPERTS ? MAX_EXPERTS + 1 : (int)s.w->shape[0];
    else
        while (n <= MAX_EXPERTS && has_linear(expert_name(layer, hf, (size_t)n))) n++;
    if (!n) refuse_part("'%s': tensor '%s.weight' is missing", model_dir, expert_name(layer, hf, 0));
    const int most = layer < src.n_layer ? src.n_expert : MAX_EXPERTS; /* pruning may have spared an MTP layer */
    if (n > most || n < src.top_k)
        refuse_part("layer %d has %d experts; expected from %s = %d to %s", layer, n, src.top_k_key, src.top_k,
                    layer < src.n_layer ? fmt("the %d of config.json", most) : fmt("%d", most));
    if (src.n_group > 1 && n % src.n_group)
        refuse_part("layer %d has %d experts, not a multiple of n_group = %d", layer, n, src.n_group);
    return n;
}

/* Returns matrix r of expert e. */
static struct piece expert_piece(const struct tensor_rule *r, int layer, const struct expert_source *s, size_t e) {
    const size_t rows = dim_of(r->out), cols = dim_of(r->in), stride = rows * s->n_part;
    if (s->form == EACH) {
        struct linear l = resolve_linear(expert_name(layer, r->hf, e));
        check_shape(l.w, l.rows, l.cols, r->out, r->in);
        return (struct piece){.lin = l, .rows = rows};
    }
    const struct fused f = {s->w, hf_name(layer, s->hf), e, s->n_part, s->part};
    struct tensor *w = s->w, want = *w;
    want.rank = s->blocks ? 4 : 3;
    want.shape[0] = dim_of(DIM_EXPERTS);
    want.shape[1] = s->form == COLUMNS ? cols : stride;
    want.shape[2] = s->form == COLUMNS ? stride : s->blocks ? cols / 32 : cols / (w->dtype == U8 ? 2 : 1);
    if (s->blocks) want.shape[3] = 16;
    if (w->rank != want.rank || memcmp(want.shape, w->shape, w->rank * sizeof *w->shape) || (s->blocks && cols % 32))
        die("%s: expected %s, found %s", where(w), shape_text(&want), shape_text(w));
    if (s->blocks)
        return (struct piece){
            .lin = resolve_blocks(f.x, w), .row = e * stride + s->part, .rows = rows, .step = s->n_part};
    if (s->form == ROWS && src.interleaved)
        return (struct piece){.lin = resolve_fused(&f), .row = e * stride + s->part, .rows = rows, .step = s->n_part};
    if (s->form == ROWS)
        return (struct piece){.lin = resolve_fused(&f), .row = e * stride + s->part * rows, .rows = rows};
    if (!is_float(w)) die("%s: expected BF16, F16 or F32, found %s", where(w), shape_text(w));
    return (struct piece){.lin = resolve_fused(&f),
                          .row = e * cols,
                          .rows = rows,
                          .col = src.by_columns ? s->part * rows : s->part,
                          .step = src.by_columns ? 1 : s->n_part,
                          .height = cols};
}

/* Returns the values of a vector of the source, malloc'ed. Dies if one is 0 or not finite. */
static float *read_vector(const char *name, enum dim n) {
    struct tensor *t = resolve_vector(name);
    float *v = xrealloc(NULL, dim_of(n) * sizeof *v);
    check_shape(t, 1, dim_of(n), DIM_ONE, n);
    read_floats(t, 0, dim_of(n), v);
    for (size_t i = 0; i < dim_of(n); i++)
        if (!isfinite(v[i]) || v[i] == 0) die("%s: expected numbers other than 0, found %g", where(t), (double)v[i]);
    return v;
}

/* Returns a stack of a layer's experts; every expert is one piece. */
static struct piece *expert_pieces(const struct tensor_rule *r, int layer) {
    const struct expert_source s =
        find_experts(layer, r->field == offsetof(struct layer, up), r->field == offsetof(struct layer, down));
    struct piece *p = NULL;
    float *gain = src.expert_gain && r->field == offsetof(struct layer, down)
                      ? read_vector(hf_name(layer, src.expert_gain), DIM_EXPERTS)
                      : NULL;
    for (size_t e = 0; e < dim_of(DIM_EXPERTS); e++) {
        struct piece one = expert_piece(r, layer, &s, e);
        one.lin.gain = gain ? gain[e] : 0;
        arrput(p, one);
    }
    free(gain);
    return p;
}

/* Biases of a layer's experts: down_proj_bias (E, rows), or gate_up_proj_bias (E, 2 rows), where those of gate and up
 * alternate. */
static void plan_expert_biases(const struct tensor_rule *r, int layer) {
    const bool down = starts_with(r->name, "ffn_down"), up = starts_with(r->name, "ffn_up");
    const size_t n = dim_of(DIM_EXPERTS), rows = dim_of(r->in), n_part = down ? 1 : 2;
    struct tensor *t =
        resolve_vector(hf_name(layer, down ? "mlp.experts.down_proj_bias" : "mlp.experts.gate_up_proj_bias"));
    struct linear l = {.format = PLAIN, .w = t, .rows = n * n_part * rows, .cols = 1, .factor = 1.0f};
    if (t->rank != 2 || t->shape[0] != n || t->shape[1] != n_part * rows)
        die("%s: expected [%zu, %zu] (the layer's experts, %s%s), found %s", where(t), n, n_part * rows,
            down ? "" : "2 ", dim_name(r->in), shape_text(t));
    struct output *o = plan_add(fmt("blk.%d.%s", layer, r->name), GGUF_F32, 2, rows, n, 1);
    o->finite = true;
    for (size_t e = 0; e < n; e++) {
        struct piece one = {.lin = l, .row = e * n_part * rows + up, .rows = rows, .step = n_part};
        arrput(o->pieces, one);
    }
}

/* ============================================================================================================
 * Model: layers and leftovers
 *
 * The plan of all layers; every tensor of the source is used or reported.
 * ============================================================================================================ */

/* Plans what joins the streams before the head. */
static void plan_hc_head(void) {
    if (!made.model.n_hc || !family_reads_last(made.model.family)) return;
    if (made.model.hc_low) {
        const char *mixer = hf_name(-1, "model.hyper_connection_mixer");
        plan_vector("output_hc_norm.weight", fmt("%s.hc_norm.weight", mixer), DIM_HC_EMBD, DIM_ONE, LESS_ONE);
        plan_linear("output_hc_down", resolve_linear(fmt("%s.input_mix_weight_down", mixer)), DIM_HC_LOW, DIM_HC_EMBD,
                    SINGLE);
        plan_linear("output_hc_up", resolve_linear(fmt("%s.input_mix_weight_up", mixer)), DIM_HC_EMBD, DIM_HC_LOW,
                    SINGLE);
        return;
    }
    plan_vector("output_hc_fn.weight", hf_name(-1, "model.hc_head.hc_fn"), DIM_HC_EMBD, DIM_HC, VALUES);
    plan_vector("output_hc_base.weight", hf_name(-1, "model.hc_head.hc_base"), DIM_HC, DIM_ONE, VALUES);
    plan_vector("output_hc_scale.weight", hf_name(-1, "model.hc_head.hc_scale"), DIM_ONE, DIM_ONE, VALUES);
}

/* Plans the norm of the embedding and the query of the last reading, where the residual is blocks of layers. */
static void plan_blocks(void) {
    if (!made.model.n_res) return;
    if (made.model.family->plain_blocks) {
        plan_query("output_res_score.weight", hf_name(-1, "model.output_attn_res"));
        return;
    }
    plan_vector("token_embd_norm.weight", hf_name(-1, "model.embed_norm.weight"), DIM_EMBD, DIM_ONE, VALUES);
    plan_vector("output_res.weight", hf_name(-1, "model.attn_res.output_query"), DIM_EMBD, DIM_ONE, VALUES);
}

/* Returns the name of what the table of n-grams has: its rows, and how they are found. */
static const char *ngram_name(const char *what) {
    const int layer = (int)json_element(get_list(src.cfg, "ple_layer_ids"), 0) - 1; /* counted from 1 */
    return hf_name(layer, fmt("ple.ple_embedding.%s", what));
}

/* Returns shard i of the table of n-grams as rows. All shards have one scale, if they are FP8. */
static struct linear ngram_shard(size_t i, struct tensor *scale) {
    const char *name = ngram_name(fmt("ngram_embedding.shard_%zu.weight", i));
    struct tensor *t = tensor_find(name);
    if (!t) die("'%s': tensor '%s' is missing", model_dir, name);
    if (t->rank != 2 || !t->bytes || !(t->dtype == F8_E4M3 ? scale != NULL : is_float(t)))
        die("%s: expected a matrix of BF16, F16, F32 or, with '%s', F8_E4M3, found %s", where(t),
            ngram_name("ngram_embedding.weight_scale"), shape_text(t));
    struct linear l = as_rows(t);
    l.rows = t->shape[0];
    l.cols = t->shape[1];
    t->used = true;
    if (t->dtype != F8_E4M3) return l;
    l.format = FP8_TENSOR;
    l.factor = fp8_factor(scale, read_scalar(scale));
    return l;
}

/* Plans a part of a layer's table of n-grams as its bytes: weights of E4M3, or their scales. */
static void plan_table(int layer, const char *part, size_t rows, size_t cols) {
    const bool scales = !strcmp(part, "scale");
    const char *name = hf_name(layer, fmt("engram.embed.%s", part));
    struct tensor *t = tensor_find(name);
    if (!t) die("'%s': tensor '%s' is missing", model_dir, name);
    if (t->dtype != (scales ? F8_E8M0 : F8_E4M3) || t->rank != 2 || t->shape[0] != rows || t->shape[1] != cols)
        die("%s: expected %s [%zu, %zu] (engram_num_embeddings, engram_head_dim%s), found %s", where(t),
            dtypes[scales ? F8_E8M0 : F8_E4M3].name, rows, cols, scales ? " / 32" : "", shape_text(t));
    struct output *o =
        plan_add(fmt("blk.%d.engram_embd%s.weight", layer, scales ? "_scale" : ""), GGUF_I8, 2, cols, rows, 1);
    struct piece one = {.lin = {.format = PLAIN, .w = t, .rows = rows, .cols = cols, .factor = 1.0f}, .rows = rows};
    arrput(o->pieces, one);
    o->remark = scales ? "bytes of E8M0" : "bytes of E4M3";
    t->used = true;
}

/* Plans the tables of n-grams of DeepSeek-V4.1. */
static void plan_engrams(void) {
    json_t *counts = get_list(src.cfg, "engram_num_embeddings");
    for (int i = 0; i < made.model.n_ngram; i++) {
        const struct ngram *g = &made.model.ngram[i];
        const size_t rows = (size_t)json_element(counts, (size_t)i);
        plan_table(g->layer, "weight", rows, (size_t)g->row);
        plan_table(g->layer, "scale", rows, (size_t)g->row / NGRAM_SCALE);
    }
}

/* Plans the tables of n-grams: of each layer, or one, whose rows are in many tensors. */
static void plan_ngrams(void) {
    const struct ngram *g = made.model.ngram;
    struct piece *p = NULL;
    if (!made.model.n_ngram) return;
    if (!g->ends) {
        plan_engrams();
        return;
    }
    const size_t n = (size_t)get_int(src.cfg, "split_ngram_parts", 1, 1 << 16, 512);
    struct tensor *scale = tensor_find(ngram_name("ngram_embedding.weight_scale"));
    for (size_t i = 0; i < n; i++) {
        struct piece one = {.lin = ngram_shard(i, scale)};
        one.rows = one.lin.rows;
        if (one.lin.cols != (size_t)g->row)
            die("%s: expected rows of %d values (ple_embed_dim over the heads), found %s", where(one.lin.w), g->row,
                shape_text(one.lin.w));
        arrput(p, one);
    }
    plan_matrix("per_layer_token_embd", p, SINGLE);
}

/* Whether a block has a dense feed-forward. Layers after the last ordinary one predict further tokens. */
static bool is_dense(int layer) {
    return !src.experts_key || (layer < src.n_layer ? src.is_dense(layer) : src.mtp_dense);
}

/* Counts the experts of a block. */
static void find_counts(int layer) {
    if (is_dense(layer)) return;
    src.experts[layer] = count_experts(layer);
    check_count_lists(layer);
}

/* Returns a width of a feed-forward, which is `count` times that of a key. */
static int ff_width(const char *key, size_t count) {
    return (int)(count * (size_t)get_int(src.cfg, key, 1, (int64_t)(MAX_WIDTH / count), REQUIRED));
}

/* Returns a layer: what the engine's family says by the metadata, and what its loader would find in the tensors. */
static struct layer layer_shape(int layer) {
    struct layer l = {0};
    struct attn *a = &l.attn;
    made.model.family->layer(&made.loader, &l, layer);
    const struct attn *whole = &made.loader.attn;
    l.mtp = layer >= src.n_layer;
    if (src.head_norm) l.qk_norm = QK_NORM_HEADS;
    a->has_sinks |= a->window ? src.window_sinks : src.sinks;
    if (src.own_values) a->v_is_k = false;
    if (src.head_gate) a->n_gate = src.gates_values && src.gates_values(layer) ? a->head_v : 1;
    if (src.has_indexer) a->n_index = src.has_indexer(layer) ? whole->n_index : 0;
    l.n_expert = src.experts[layer];
    l.n_expert_used = l.n_expert ? src.top_k : 0;
    l.n_zero = l.n_expert ? made.loader.n_zero : 0;
    l.n_ff = l.no_ffn ? 0 : ff_width(l.n_expert ? src.width_key : src.dense_key, 1);
    l.n_latent = l.n_expert ? made.loader.n_latent : 0;
    if (layer_parts(&made.model, &l)) l.n_ff_shared = ff_width(src.dense_key, 1);
    else if (l.n_expert && src.n_shared)
        l.n_ff_shared = ff_width(src.shared_key, src.shared_count ? (size_t)src.n_shared : 1);
    l.has = layer_conditions(&made.model, &l);
    return l;
}

/* Plans every tensor that a layer has. */
static void plan_layer(int layer) {
    const struct layer *l = &made.layer;
    made.layer = layer_shape(layer);
    for (const struct tensor_rule *r = rule_next(NULL, l); r; r = rule_next(r, l)) plan_rule(r, layer);
    mixture_print();
}

/* Whether the source has tensors whose names begin so. */
static bool has_below(const char *below) {
    for (size_t i = 0; i < arrlenu(tensors); i++)
        if (starts_with(tensors[i].name, below)) return true;
    return false;
}

/* Whether the layers below src.mtp are a DSpark module, which DeepSeek-V4 releases may have in place of a prediction
 * layer. */
static bool is_dspark(void) {
    static const char *const parts[] = {".main_proj.", ".markov_head.", ".confidence_head."};
    for (size_t i = 0; i < arrlenu(tensors) && src.mixer == MIXER_CSA; i++)
        for (size_t k = 0; k < COUNT(parts); k++)
            if (starts_with(tensors[i].name, src.mtp) && strstr(tensors[i].name, parts[k])) return true;
    return false;
}

/* Leaves out the layers for multi-token prediction from `first` on: each needs the one before. why: for the message. */
static void leave_prediction(int first, const char *why) {
    const int last = src.n_layer + src.n_mtp - 1;
    char below[256] = ""; /* begins the names of all such layers, if all are left out and have no other names */
    size_t n = 0;
    if (src.mtp && first == src.n_layer) snprintf(below, sizeof below, "%s%s", src.prefix, src.mtp);
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        struct tensor *t = &tensors[i];
        bool left = *below && starts_with(t->name, below);
        for (int layer = first; layer <= last && !*below && !left; layer++)
            left = starts_with(t->name, hf_name(layer, ""));
        n += left;
        if (left && !t->used) skip(t);
    }
    err_message("layer%s %d%s for multi-token prediction %s left out, %zu tensor%s: %s", last > first ? "s" : "", first,
                last > first ? fmt(" to %d", last) : "", last > first ? "are" : "is", n, n == 1 ? "" : "s", why);
    src.n_mtp = first - src.n_layer;
}

/* Finds out how the names begin, and how many layers for multi-token prediction there are. Exports have more than one
 * form of names, and some lack the MTP layers that their config.json announces. */
static void find_names(void) {
    static const char *const bodies[] = {
        "model.",     "model.language_model.", "model.language_model.model.language_model.", "backbone.",
        "model.llm.", "transformer."};
    static const char *const mtps[] = {"mtp.", "model.mtp.", "model.language_model.mtp."};
    if (tensor_find("language_model.model.norm.weight")) src.prefix = "language_model.";
    for (size_t k = 0; k < COUNT(bodies); k++) {
        const char *was = src.body;
        src.body = bodies[k];
        if (!tensor_find(hf_name(-1, "model.norm.weight"))) src.body = was;
    }
    const bool beside = src.mtp_beside, csa = src.mixer == MIXER_CSA;
    if (csa && tensor_find("embed.weight")) src.body = "";
    for (size_t k = 0; k < COUNT(mtps) && beside; k++)
        if (has_below(fmt("%s%s", src.prefix, mtps[k]))) src.mtp = mtps[k];
    for (size_t k = 0; k < COUNT(mtps) && csa; k++)
        if (has_below(fmt("%s0.", mtps[k]))) src.mtp = mtps[k];
    src.dspark = is_dspark();
    if (src.dspark) src.n_mtp = 0;
    const int announced = src.n_mtp, most = src.mtp_unsaid ? MAX_MTP : announced;
    src.n_mtp = beside && src.mtp;
    while (!beside && src.n_mtp < most && has_below(hf_name(src.n_layer + src.n_mtp, ""))) src.n_mtp++;
    if (src.mtp_why && src.n_mtp) leave_prediction(src.n_layer, src.mtp_why);
    else if (no_prediction && src.n_mtp) leave_prediction(src.n_layer, "--no-mtp");
    else if (no_prediction) err_message("--no-mtp: the model has no layer for multi-token prediction");
    for (int layer = src.n_layer + src.n_mtp; layer < src.n_layer + announced && !no_prediction && !src.mtp_why;
         layer++)
        err_message("'%s': config.json announces layer %d for multi-token prediction, but its tensors are missing: "
                    "it is left out",
                    model_dir, layer);
}

/* Skips or refuses tensors by their names. */
static void screen_names(void) {
    static const char *const vision[] = {"vision_tower.",
                                         "vision_encoder.",
                                         "mm_projector.",
                                         "model.visual.",
                                         "visual.",
                                         "multi_modal_projector.",
                                         "vision_model.",
                                         "vit_large_projector.",
                                         "audio_encoder.",
                                         "speech_embeddings.",
                                         "patch_merge_mlp.",
                                         "model.vision_tower.",
                                         "model.embed_vision.",
                                         "model.audio_tower.",
                                         "model.embed_audio.",
                                         "vision.",
                                         "image_",
                                         "aligner."};
    static const char *const drafts[] = {"model.mtp_block.",       "model.mtp_emb_norm.", "model.mtp_hidden_norm.",
                                         "model.mtp_linear_proj.", "language_model.mtp.", "language_model.model.mtp.",
                                         "model.mtp.embed_tokens."};
    const bool multimodal = src.wrapped || get(src.top, "vision_config") || get(src.top, "audio_config");
    size_t n_vision = 0, n_draft = 0, n_dspark = 0;
    struct finding needless[COUNT(skipped_suffixes)] = {{0}};
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        struct tensor *t = &tensors[i];
        if (t->used) continue; /* left out with its layer */
        bool skipped = false, draft = false, dspark = src.dspark && starts_with(t->name, src.mtp);
        for (size_t k = 0; k < COUNT(vision) && multimodal; k++) skipped |= starts_with(t->name, vision[k]);
        for (size_t k = 0; k < COUNT(drafts); k++) draft |= starts_with(t->name, drafts[k]);
        /* the releases' own readers take the model's (convert.py) */
        const bool copy = src.n_mtp && src.mtp_bare && starts_with(t->name, src.mtp) &&
                          (strstr(t->name, ".emb") || ends_with(t->name, ".head.weight"));
        n_vision += skipped;
        n_draft += draft;
        n_dspark += dspark;
        n_copies += copy;
        skipped |= draft || dspark || copy;
        for (size_t k = 0; k < COUNT(skipped_suffixes) && !skipped; k++) {
            skipped = ends_with(t->name, skipped_suffixes[k].suffix);
            size_t first = 0; /* row with the same reason */
            while (skipped_suffixes[first].why != skipped_suffixes[k].why) first++;
            if (skipped) finding_add(&needless[first], t->name);
        }
        if (skipped) {
            skip(t);
            continue;
        }
        for (size_t k = 0; k < COUNT(refused_suffixes); k++)
            if (ends_with(t->name, refused_suffixes[k].suffix))
                die("%s: %s are not supported", where(t), refused_suffixes[k].format);
    }
    for (size_t k = 0; k < COUNT(needless); k++) report_skipped(needless[k], skipped_suffixes[k].why);
    if (n_vision) err_message("%zu tensors that read pictures or sound are left out: moe reads text only", n_vision);
    if (n_draft)
        err_message("%zu tensors for multi-token prediction are left out: moe does not run such layers", n_draft);
    if (n_dspark) err_message("%zu tensors of a DSpark module are left out: moe does not draft with one", n_dspark);
}

/* Dies if a tensor was neither used nor skipped, because the model then has parts that are not known here. */
static void check_all_used(void) {
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        const struct tensor *t = &tensors[i];
        if (t->used) continue;
        unsigned layer = 0, expert = 0;
        const char *body = fmt("%s%s", src.prefix, src.body);
        int found = starts_with(t->name, body) ? sscanf(t->name + strlen(body), "layers.%5u.", &layer) : 0;
        if (src.mtp_bare && starts_with(t->name, src.mtp)) {
            found = sscanf(t->name + strlen(src.mtp), "%5u.", &layer);
            layer += (unsigned)src.n_layer;
        }
        const char *at = strstr(t->name, ".experts.");
        if (found == 1 && at) found += sscanf(at, ".experts.%5u.", &expert);
        if (src.halved) layer = 2 * layer + 1;
        if (found >= 1 && layer >= (unsigned)(src.n_layer + src.n_mtp))
            die("%s: layer %u is out of range: num_hidden_layers is %d, num_nextn_predict_layers %d", where(t), layer,
                src.n_layer, src.n_mtp);
        if (found == 2 && expert >= (unsigned)src.experts[layer])
            die("%s: layer %u has experts 0 to %d and then a gap", where(t), layer, src.experts[layer] - 1);
        die("%s: %s: nothing in %s uses it", where(t), shape_text(t), src.arch);
    }
}

/* ============================================================================================================
 * Model: rotations, prediction, the whole
 *
 * Rotations of positions, MTP layers, and the order of the plan.
 * ============================================================================================================ */

/* Returns the object of RoPE parameters, rope_scaling if it is not empty, else the newer rope_parameters, as in
 * transformers; where there is another one for layers with a window, that of `windowed` layers or the others. */
static struct doc rope_doc(bool windowed) {
    struct doc r = get_obj(src.cfg, "rope_scaling");
    if (!json_object_size(r.obj)) r = get_obj(src.cfg, "rope_parameters");
    if (get(r, "full_attention") || get(r, "sliding_attention"))
        return get_obj(r, windowed ? "sliding_attention" : "full_attention");
    if (windowed && get(src.cfg, "swa_rope_parameters")) return get_obj(src.cfg, "swa_rope_parameters");
    return windowed ? (struct doc){NULL, r.file, r.in} : r;
}

static const char *rope_type(struct doc r) { return get_str(r, "rope_type", get_str(r, "type", "default")); }

/* Whether the base is stretched by alpha: releases of Hunyuan-A13B call it dynamic. */
static bool is_stretched(struct doc r) { return src.stretched && !strcmp(rope_type(r), "dynamic") && get(r, "alpha"); }

/* Refuses a list that ends before the last layer. Those for multi-token prediction may follow it. */
static void check_per_layer(const char *key, const json_t *list) {
    expect(src.cfg, key, json_array_size(list) >= (size_t)src.n_layer,
           fmt("a value for each of %d layers", src.n_layer));
}

/* Returns the number that config.json has for all layers, or in a list for those with a window, or without. */
static double layer_number(const char *key, bool windowed, double dflt) {
    json_t *v, *list = get(src.cfg, key);
    double found = NAN;
    size_t i;
    if (!json_is_array(list)) return get_num(src.cfg, key, dflt);
    check_per_layer(key, list);
    json_array_foreach(list, i, v) {
        if (i >= (size_t)(src.n_layer + src.n_mtp) || is_windowed((int)i) != windowed) continue;
        expect(src.cfg, key, json_is_number(v) && (isnan(found) || json_number_value(v) == found),
               "the same number for all layers of a kind");
        found = json_number_value(v);
    }
    return isnan(found) ? dflt : found;
}

/* Returns the base of the rotation: of the RoPE parameters r, else of config.json, else dflt. Sets *d to where it
 * is. */
static double rope_base(struct doc r, bool windowed, double dflt, struct doc *d) {
    *d = get(r, "rope_theta") || !get(src.cfg, "rope_theta") ? r : src.cfg;
    return d->obj == r.obj ? get_num(r, "rope_theta", dflt) : layer_number("rope_theta", windowed, dflt);
}

/* Returns the context before the scaling: original_max_position_embeddings of config.json, else of the RoPE
 * parameters r, else all of it, as in transformers. Where layers have several rotations, that of config.json does not
 * count. */
static int64_t original_context(struct doc r) {
    const char *key = "original_max_position_embeddings";
    const bool own = r.in && one_of(r.in, "rope_scaling rope_parameters") && get(src.cfg, key);
    return get_int(own ? src.cfg : r, key, 1, INT32_MAX, context_length());
}

/* Returns how much longer the context becomes. Without a number it follows from the two contexts. */
static double rope_factor(struct doc r) {
    return get_num(r, "factor", (double)context_length() / (double)original_context(r));
}

/* Returns how many values of a head are rotated: the share of partial_rotary_factor, which is in r, or in config.json,
 * for all layers or in a list. */
static size_t rotated(struct doc r, bool windowed) {
    const char *list = "partial_rotary_factors";
    struct doc d = get(r, "partial_rotary_factor") ? r : src.cfg;
    const char *key = d.obj == src.cfg.obj && get(src.cfg, list) ? list : "partial_rotary_factor";
    const double share = key == list ? layer_number(list, windowed, src.rotary) : get_num(d, key, src.rotary);
    const double n = (double)(windowed ? window_head_k() : head_k()) * share + 1e-9;
    if (src.mixer == MIXER_MLA) { /* a part by itself; the share is of all of a key, or of head_dim */
        const size_t rope = size_of("qk_rope_head_dim"),
                     head = (size_t)(get_num(src.cfg, either("linear_head_dim", "head_dim"), 0) * share + 1e-9);
        expect(d, key, share == 1 || (size_t)n == rope || head == rope, "1, or the share of qk_rope_head_dim");
        return rope;
    }
    if (!src.partial && !src.window_rope) expect(d, key, share == 1, "1");
    expect(d, key, share > 0 && share <= 1 && (size_t)n >= 2 && (size_t)n % 2 == 0,
           "a share of head_dim that is an even number");
    return (size_t)n;
}

/* Whether frequencies have factors for short contexts and for long ones. */
static bool is_longrope(struct doc r) { return src.longrope && one_of(rope_type(r), "longrope su"); }

/* Returns one of the lists of factors, stb_ds. */
static float *longrope_factors(struct doc r, const char *key) {
    json_t *list = get_list(r, key);
    const size_t n = rotated(r, false) / 2;
    float *factors = NULL;
    expect(r, key, json_array_size(list) == n, fmt("%zu numbers", n));
    for (size_t i = 0; i < n; i++) {
        const double v = json_number_value(json_array_get(list, i));
        expect(r, key, v >= 1e-6 && v <= 1e6, "numbers from 1e-06 to 1e+06");
        arrput(factors, (float)v);
    }
    return factors;
}

/* Writes rope_freqs.weight, numbers that the frequencies are divided by in layers without a window: those of Llama 3, or
 * 1 for the pairs that are rotated and 1e30 for the others. transformers has the formulas in modeling_rope_utils.py. */
static void plan_rope_factors(void) {
    struct doc r = rope_doc(false);
    float *factors = NULL;
    if (src.proportional) {
        const size_t turned = rotated(r, false) / 2;
        for (size_t i = 0; i < head_k() / 2; i++) arrput(factors, i < turned ? 1.0f : 1e30f);
        plan_values("rope_freqs.weight", factors);
        return;
    }
    if (is_longrope(r)) {
        plan_values("rope_factors_long.weight", longrope_factors(r, "long_factor"));
        plan_values("rope_factors_short.weight", longrope_factors(r, "short_factor"));
        return;
    }
    if (!src.llama3 || strcmp(rope_type(r), "llama3")) return;
    const size_t n = rotated(r, false);
    struct doc in;
    const double theta = rope_base(r, false, src.rope_theta, &in);
    const double factor = rope_factor(r), low = get_num(r, "low_freq_factor", NAN),
                 high = get_num(r, "high_freq_factor", NAN);
    const double original = (double)original_context(r);
    expect(r, "factor", factor >= 1 && factor <= 1e6, "a number from 1 to 1e+06");
    expect(r, "low_freq_factor", low > 0 && low <= high, "a number above 0, at most high_freq_factor");
    for (size_t i = 0; i < head_k() / 2; i++) {
        const double length = 2 * M_PI * pow(theta, 2.0 * (double)i / (double)n);
        const double turns = original / length - low;
        const double smooth = low == high ? turns >= 0 : fmin(fmax(turns / (high - low), 0), 1);
        arrput(factors, i < n / 2 ? (float)(1 / ((1 - smooth) / factor + smooth)) : 1.0f);
    }
    plan_values("rope_freqs.weight", factors);
}

/* Settles whether the output matrix is the embedding, as transformers does: an lm_head.weight that is another matrix is
 * used whatever config.json says. Of two that are the same, either may be missing. */
static void settle_head(void) {
    static const char key[] = "tie_word_embeddings";
    char *head = xstrdup(hf_name(-1, "lm_head")), *name = xstrdup(hf_name(-1, "lm_head.weight"));
    char *embd = xstrdup(hf_name(-1, "model.embed_tokens"));
    const bool any = has_linear(head), input = has_linear(embd);
    if (!any && !src.tied)
        die("'%s': tensor '%s' is missing, and config.json does not say that it is the embedding: key '%s': %s",
            model_dir, name, key, get(src.top, key) ? json_show(get(src.top, key)) : "none");
    if (src.tied && any && !input) {
        err_message("'%s' has no embedding: it is '%s', as '%s' of config.json says", model_dir, name, key);
    } else if (src.tied && any && same_linear(head, embd)) {
        skip_linear(head);
        err_message("tensor '%s' is left out: it is a copy of the embedding", name);
    } else if (src.tied && any) {
        src.tied = false;
        err_message("tensor '%s' is used: it is not the embedding, though '%s' of config.json says so", name, key);
    } else if (src.tied && !get_bool(src.top, key, true)) {
        err_message("'%s' is missing: it is the embedding, as '%s' of text_config says; config.json says no", name,
                    key);
    }
    free(head);
    free(name);
    free(embd);
}

/* Plans a layer for multi-token prediction. Where a part of it is missing or has another size, leaves it out and all
 * layers of that kind after it; false. */
static bool plan_prediction(int layer) {
    const size_t planned = arrlenu(plan), skipped = n_skipped, copies = n_copies, weighted = importance.weighted,
                 unweighted = importance.unweighted;
    const struct finding of_fp8 = fp8_inputs, of_plain = plain_inputs, biases = unchosen;
    bool *used = xrealloc(NULL, arrlenu(tensors) * sizeof *used);
    for (size_t i = 0; i < arrlenu(tensors); i++) used[i] = tensors[i].used;
    prediction.planned = true;
    const bool whole = !setjmp(prediction.out);
    if (whole) find_counts(layer);
    if (whole) plan_layer(layer);
    prediction.planned = false;
    if (!whole) {
        for (size_t i = 0; i < arrlenu(tensors); i++) tensors[i].used = used[i];
        arrsetlen(plan, planned);
        n_skipped = skipped;
        n_copies = copies;
        importance.weighted = weighted;
        importance.unweighted = unweighted;
        fp8_inputs = of_fp8;
        plain_inputs = of_plain;
        unchosen = biases;
        mixture_print();
        leave_prediction(layer, prediction.why);
    }
    free(used);
    return whole;
}

/* Finds the names, the layers and the experts of the source, which the metadata depend on. */
static void survey(void) {
    find_names();
    if (src.n_typed && src.n_typed < src.n_layer + src.n_mtp)
        die("config.json: key 'layer_types': expected %d layers, found %d", src.n_layer + src.n_mtp, src.n_typed);
    screen_names();
    settle_head();
    for (int l = 0; l < src.n_layer; l++) find_counts(l);
}

/* Appends the last norm of Ling 1, whose output matrix W has columns of length 1: its weights are divided by the lengths,
 *
 *   logits = (W / (|W_j| + 1e-7)) n = W (n / (|W_j| + 1e-7))            W_j: column j
 *
 * so that W stays as it is. */
static void plan_normed_head(void) {
    const struct tensor *norm = resolve_vector(hf_name(-1, "model.norm.weight"));
    const struct linear l = resolve_linear(hf_name(-1, "lm_head"));
    const size_t n = l.cols;
    check_shape(norm, 1, n, DIM_ONE, DIM_EMBD);
    check_shape(l.w, l.rows, n, DIM_VOCAB, DIM_EMBD);
    if (l.format != PLAIN) die("%s: expected BF16, F16 or F32, because of norm_head", where(l.w));
    double *sum = xrealloc(NULL, n * sizeof *sum);
    float *row = xrealloc(NULL, n * sizeof *row), *weight = NULL;
    memset(sum, 0, n * sizeof *sum);
    for (size_t i = 0; i < l.rows; i++) {
        read_floats(l.w, i * n, n, row);
        for (size_t j = 0; j < n; j++) sum[j] += (double)row[j] * (double)row[j];
    }
    read_floats(norm, 0, n, row);
    for (size_t j = 0; j < n; j++) arrput(weight, (float)((double)row[j] / (sqrt(sum[j]) + 1e-7)));
    plan_values("output_norm.weight", weight);
    free(sum);
    free(row);
}

/* Makes the plan. */
static void plan_model(void) {
    const bool own = !src.tied || has_linear(hf_name(-1, "model.embed_tokens"));
    plan_linear("token_embd", resolve_folded(hf_name(-1, own ? "model.embed_tokens" : "lm_head")), DIM_VOCAB, DIM_EMBD,
                SINGLE);
    if (made.model.norm == NORM_BIAS)
        plan_vector("output_norm.bias", hf_name(-1, "model.norm.bias"), DIM_EMBD, DIM_ONE, VALUES);
    if (made.model.family->head_bias)
        plan_vector("output.bias", hf_name(-1, "lm_head.bias"), DIM_VOCAB, DIM_ONE, VALUES);
    if (src.normed_head) plan_normed_head();
    else if (!made.model.hc_low)
        plan_vector(made.model.family->last_norm ? made.model.family->last_norm : "output_norm.weight",
                    hf_name(-1, "model.norm.weight"), DIM_EMBD, DIM_ONE, src.zero_centered ? LESS_ONE : VALUES);
    if (!src.tied) plan_linear("output", resolve_linear(hf_name(-1, "lm_head")), DIM_VOCAB, DIM_EMBD, SINGLE);
    plan_rope_factors();
    plan_hc_head();
    plan_blocks();
    plan_ngrams();
    for (int l = 0; l < src.n_layer; l++) plan_layer(l);
    for (int l = src.n_layer; l < src.n_layer + src.n_mtp && plan_prediction(l); l++) continue;
    report_skipped(fp8_inputs, of_inputs);
    report_skipped(plain_inputs, "the weights beside it are not quantized");
    report_skipped(unchosen, "token ids have their experts in such a layer");
    if (n_copies)
        err_message("%zu cop%s of the model's embedding or output matrix in layers for multi-token prediction %s "
                    "left out: moe uses the model's own",
                    n_copies, n_copies > 1 ? "ies" : "y", n_copies > 1 ? "are" : "is");
    if (types.keep && !types.n_kept) err_message("--keep: no tensor that would change matches");
    if (n_misaligned > 1) err_message("%zu tensors keep their type because of the length of their rows", n_misaligned);
    check_all_used();
}

/* ============================================================================================================
 * Families: Qwen
 *
 * What config.json says in each family, and first what families share.
 * ============================================================================================================ */

/* Dies unless each key that is there has the one value that moe computes with. list: words, a key and its value in
 * turn. A key with the value none must not be there. */
static void check_fixed(struct doc d, const char *list) {
    char key[64], value[32];
    int n = 0;
    for (; sscanf(list, " %63s %31s%n", key, value, &n) == 2; list += n) {
        const bool none = !strcmp(value, "none"), truth = !strcmp(value, "true"), word = isalpha((unsigned char)*value);
        if (none) expect(d, key, !get(d, key), value);
        else if (truth || !strcmp(value, "false")) expect(d, key, get_bool(d, key, truth) == truth, value);
        else if (word) expect(d, key, !strcmp(get_str(d, key, value), value), fmt("\"%s\"", value));
        else expect(d, key, get_num(d, key, atof(value)) == atof(value), value);
    }
}

/* Makes a number of each list of numbers by layer, which have to be the same. keys: words. */
static void config_level(const char *keys) {
    char key[64];
    for (int n = 0; sscanf(keys, " %63s%n", key, &n) == 1; keys += n) {
        json_t *v, *list = get(src.cfg, key);
        size_t i;
        if (!json_is_array(list)) continue;
        json_array_foreach(list, i, v)
            expect(src.cfg, key, json_is_integer(v) && json_equal(v, json_array_get(list, 0)),
                   "the same whole number for all layers");
        expect(src.cfg, key, json_array_size(list) >= (size_t)src.n_layer, fmt("%d numbers", src.n_layer));
        json_object_set(src.cfg.obj, key, json_array_get(list, 0));
    }
}

/* Gives keys the names that most families have: pairs of such a name and where config.json has it, the name of a key or
 * of one in an object. One with a question mark may be missing. */
static void config_rename(const char *pairs) {
    char key[64], path[64];
    for (int n = 0; sscanf(pairs, " %63s %63s%n", key, path, &n) == 2; pairs += n) {
        char *dot = strchr(path, '.'), *end = path + strlen(path) - 1;
        const bool optional = *end == '?';
        if (optional) *end = 0;
        if (dot) *dot = 0;
        const struct doc d = dot ? get_obj(src.cfg, fmt("%s", path)) : src.cfg;
        const char *own = dot ? dot + 1 : path;
        json_t *v = get(d, own);
        expect(d, own, v || optional || get(src.cfg, key), "a value");
        if (v) json_object_set(src.cfg.obj, key, v);
    }
}

/* Reads the number of experts of a layer. Configurations of pruned models may list those of all layers. */
static void config_expert_count(void) {
    if (src.experts_other && get(src.cfg, src.experts_other) && !get(src.cfg, src.experts_key))
        src.experts_key = src.experts_other;
    const char *key = src.experts_key;
    json_t *v, *list = key ? get(src.cfg, key) : NULL;
    size_t i;
    if (!key) return;
    if (!json_is_array(list)) {
        src.n_expert = (int)get_int(src.cfg, key, 1, MAX_EXPERTS, REQUIRED);
        return;
    }
    json_array_foreach(list, i, v) {
        const int64_t n = json_element(list, i);
        expect(src.cfg, key, json_is_null(v) || (n >= 0 && n <= MAX_EXPERTS), fmt("numbers up to %d", MAX_EXPERTS));
        if (n > src.n_expert) src.n_expert = (int)n;
    }
    expect(src.cfg, key, src.n_expert, fmt("an integer from 1 to %d or a list of such", MAX_EXPERTS));
}

/* Reads the number of KV heads. */
static void config_heads(void) {
    const bool latent = src.mixer == MIXER_MLA || src.mixer == MIXER_CSA; /* keys and values are common to all heads */
    const bool all = src.kv_optional || json_is_null(json_object_get(src.cfg.obj, src.kv_key)); /* as in transformers */
    src.n_head_kv = latent ? 1 : (int)get_int(src.cfg, src.kv_key, 1, INT32_MAX, all ? src.n_head : REQUIRED);
}

static bool is_dense_qwen3(int layer) {
    int64_t dense;
    size_t i;
    json_t *v, *list = get_list(src.cfg, "mlp_only_layers");
    json_array_foreach(list, i, v) {
        expect(src.cfg, "mlp_only_layers", json_whole(v, &dense), "numbers of layers");
        if (dense == layer) return true;
    }
    return (layer + 1) % (int)get_int(src.cfg, "decoder_sparse_step", 1, MAX_LAYERS, 1) != 0;
}

/* Writes how many layers of Qwen3-VL add what the vision tower has of a picture: its text part knows the number from
 * its width of inputs. */
static void put_qwen3_vl(void) {
    json_t *list = get_list(get_obj(src.top, "vision_config"), "deepstack_visual_indexes");
    kv_u32("n_deepstack_layers", json_array_size(list));
}

/* Whether a block has a gated delta net. */
static bool is_recurrent(int layer) {
    struct doc c = src.cfg;
    const int interval = (int)get_int(c, "full_attention_interval", 1, MAX_LAYERS, 4);
    json_t *list = get_list(c, "layer_types");
    const char *type = (layer + 1) % interval ? "linear_attention" : "full_attention";
    if (layer >= src.n_layer) return false;
    if (list) type = json_string_value(json_array_get(list, (size_t)layer));
    expect(c, "layer_types", !list || json_array_size(list) == (size_t)src.n_layer, fmt("%d layers", src.n_layer));
    if (type && src.indexed && !strcmp(type, "indexed_attention"))
        type = "full_attention"; /* as transformers writes it */
    expect(c, "layer_types", type && one_of(type, "full_attention linear_attention"),
           "\"full_attention\" and \"linear_attention\"");
    return !strcmp(type, "linear_attention");
}

/* Writes the sizes of the layers with a gated delta net, and which layers they are. */
static void put_delta(void) {
    struct doc c = src.cfg;
    const size_t n_key = size_of("linear_num_key_heads"), n_value = size_of("linear_num_value_heads");
    expect(c, "linear_num_value_heads", n_value % n_key == 0, fmt("a multiple of the %zu heads of keys", n_key));
    kv_u32("ssm.conv_kernel", (size_t)get_int(c, "linear_conv_kernel_dim", 1, 64, 4));
    kv_u32("ssm.state_size", size_of("linear_key_head_dim"));
    kv_u32("ssm.group_count", n_key);
    kv_u32("ssm.time_step_rank", n_value);
    kv_u32("ssm.inner_size", n_value * size_of("linear_value_head_dim"));
    kv_u32("full_attention_interval", (size_t)get_int(c, "full_attention_interval", 1, MAX_LAYERS, 4));
    kv_flags("attention.recurrent_layers", n_blocks(), is_recurrent);
}

static bool is_dense_never(int layer) { return layer < 0; }
static const struct renaming qwen_next_names[] = {{"mlp.shared_experts", "mlp.shared_expert", EVERYWHERE},
                                                  {"enorm", "pre_fc_norm_embedding", BESIDE},
                                                  {"hnorm", "pre_fc_norm_hidden", BESIDE},
                                                  {"eh_proj", "fc", BESIDE},
                                                  {"shared_head.norm", "norm", BESIDE},
                                                  {NULL, NULL, EVERYWHERE}};

/* Reads the keys of Qwen3.8-Flash-Next. */
static void config_qwen4(void) {
    struct doc c = src.cfg;
    const char *gate = get_str(c, "output_gate_type", get_str(c, "hidden_act", "silu"));
    expect(c, "output_gate_type", !strcmp(gate, "sigmoid"), "\"sigmoid\" (GGUF files can say no other)");
    expect(c, "ple_layer_ids", json_array_size(get_list(c, "ple_layer_ids")) <= 1,
           "at most one layer (GGUF files can say no more)");
}

/* Writes n numbers of 64 bits that the source has as a tensor of I64. */
static void put_longs(const char *key, const char *name, size_t n) {
    struct tensor *t = tensor_find(name);
    int64_t *v = xrealloc(NULL, n * sizeof *v);
    if (!t) die("'%s': tensor '%s' is missing", model_dir, name);
    if (t->dtype != I64 || t->rank != 1 || t->shape[0] != n)
        die("%s: expected %zu numbers of I64, found %s", where(t), n, shape_text(t));
    t->used = true;
    tensor_read(t, 0, v, n * sizeof *v);
    for (size_t i = 0; i < n; i++)
        if (v[i] < 0) die("%s: number %zu is %lld, expected one from 0 up", where(t), i, (long long)v[i]);
    kv_array(key, GGUF_V_U64, (int)n, v);
    free(v);
}

/* Writes which layer has the table of n-grams, and how rows are found in it. */
static void put_ngrams(void) {
    struct doc c = src.cfg;
    json_t *list = get_list(c, "ple_layer_ids"), *eos = get(c, "eos_token_id");
    int64_t end = -1;
    if (!json_array_size(list)) return;
    const int64_t layer = json_element(list, 0) - 1;
    const size_t size = (size_t)get_int(c, "ngram_size", 2, NGRAM_MAX, 3);
    const size_t each = (size_t)get_int(c, "heads_per_ngram", 1, NGRAM_HEADS, 8), heads = (size - 1) * each;
    const size_t wide = (size_t)get_int(c, "ple_embed_dim", 1, 1 << 20, (int64_t)size_of("hidden_size"));
    expect(c, "ple_layer_ids", layer >= 0 && layer < src.n_layer, fmt("a number from 1 to %d", src.n_layer));
    expect(c, "ple_embed_dim", wide % heads == 0, fmt("a multiple of the %zu heads of n-grams", heads));
    /* of a list the first, as in transformers */
    expect(c, "eos_token_id", json_whole(json_is_array(eos) ? json_array_get(eos, 0) : eos, &end) && end >= 0,
           "a token id, or a list of such");
    kv_array("ple.layers", GGUF_V_I32, 1, (int32_t[]){(int32_t)layer});
    kv_u32("ple.ngram_size", size);
    kv_u32("ple.heads_per_ngram", each);
    kv_u32("ple.conv_kernel", (size_t)get_int(c, "ple_conv_kernel_size", 1, 64, 4));
    kv_u32("ple.eos_token_id", (size_t)end);
    if (get(src.top, "image_token_id")) /* of llama.cpp alone */
        kv_u32("ple.image_token_id", (size_t)get_int(src.top, "image_token_id", 0, INT32_MAX, REQUIRED));
    kv_u32("embedding_length_per_layer_input", wide / heads);
    put_longs("ple.layer_multipliers", ngram_name("layer_multipliers"), size);
    put_longs("ple.head_offsets", ngram_name("ngram_heads_offsets"), heads);
    put_longs("ple.head_vocab_sizes", ngram_name("ngram_heads_vocab_sizes"), heads);
}

static void put_qwen4(void) {
    struct doc c = src.cfg;
    const size_t ratio = (size_t)get_int(c, "indexer_compress_ratio", 1, 1 << 16, REQUIRED);
    int32_t ratios[MAX_LAYERS];
    put_delta();
    kv_u32("hyper_connection.count", (size_t)get_int(c, "hc_count", 2, HC_MAX, 4));
    kv_u32("hyper_connection.low_rank", (size_t)get_int(c, "hc_lowrank", 1, 1 << 16, 320));
    kv_u32("attention.indexer.head_count", (size_t)get_int(c, "indexer_n_heads", 1, 1024, REQUIRED));
    kv_u32("attention.indexer.key_length", (size_t)get_int(c, "indexer_head_dim", 2, 1024, REQUIRED));
    kv_u32("attention.indexer.top_k", (size_t)get_int(c, "indexer_budget", 1, MAX_TRAINED, REQUIRED));
    for (int l = 0; l < n_blocks(); l++) ratios[l] = is_recurrent(l) ? 0 : (int32_t)ratio;
    kv_array("attention.compress_ratios", GGUF_V_I32, n_blocks(), ratios);
    put_ngrams();
}

static const struct renaming qwen4_names[] = {
    {"model.norm", "model.hyper_connection_mixer.hc_norm", EVERYWHERE}, /* the norm before the head */
    {"enorm", "pre_fc_norm_embedding", BESIDE},
    {"hnorm", "pre_fc_norm_hidden", BESIDE},
    {"e_proj", "fc_embedding", BESIDE},
    {"h_proj", "fc_hidden", BESIDE},
    {"hc_head", "hyper_connection_mixer", BESIDE},
    {"self_attn.indexer.q_norm", "self_attn.indexer.q_layernorm", EVERYWHERE},
    {"self_attn.indexer.k_norm", "self_attn.indexer.k_layernorm", EVERYWHERE},
    {"mlp.shared_experts", "mlp.shared_expert", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* ============================================================================================================
 * Families: DeepSeek, GLM, Hy3
 *
 * Latent attention, indexers and compressed keys; and families whose first layers are dense.
 * ============================================================================================================ */

/* Counts the layers with a dense feed-forward before the first mixture. */
static void count_leading_dense(void) {
    while (src.first_dense < src.n_layer && src.is_dense(src.first_dense)) src.first_dense++;
}

static bool is_dense_leading(int layer) { return layer < src.first_dense; }
/* Leading layers with a dense feed-forward: they are counted, or all layers are listed. */
static void config_leading_dense(void) {
    struct doc c = src.cfg;
    size_t i;
    json_t *v, *list = get_list(c, "mlp_layer_types");
    src.first_dense = list ? 0 : (int)get_int(c, "first_k_dense_replace", 0, MAX_LAYERS, src.first_dense);
    json_array_foreach(list, i, v) {
        const char *type = json_is_string(v) ? json_string_value(v) : "";
        const bool dense = !strcmp(type, "dense"), leading = (size_t)src.first_dense == i;
        expect(c, "mlp_layer_types", dense ? leading : !strcmp(type, "sparse"),
               "\"dense\" layers, then \"sparse\" ones");
        src.first_dense += dense;
    }
}

/* Reads the keys of the experts of DeepSeek-V3, which other families have too. */
static void config_deepseek_experts(void) {
    struct doc c = src.cfg;
    config_leading_dense();
    src.n_group = (int)get_int(c, either("n_group", "num_expert_group"), 1, MAX_EXPERTS, REQUIRED);
    const char *method = get_str(c, "topk_method", "noaux_tc");
    src.router_bias = strcmp(method, "noaux_tc") ? NULL : "exp_probs_b.bias";
    src.gating = strcmp(get_str(c, "scoring_func", "sigmoid"), "sigmoid") ? GATING_SOFTMAX : GATING_SIGMOID;
    expect(c, "scoring_func", one_of(get_str(c, "scoring_func", "sigmoid"), "sigmoid softmax"), "sigmoid or softmax");
    expect(c, "topk_method", src.router_bias || (!strcmp(method, "greedy") && src.n_group == 1),
           "\"noaux_tc\", or \"greedy\" with n_group 1");
}

/* Reads the keys of DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash. */
static void config_deepseek3(void) {
    config_deepseek_experts();
    expect(src.cfg, "index_topk", !get(src.cfg, "index_topk"), "none (no sparse attention)");
}

/* Reads the keys of DeepSeek-V2, whose router is a softmax. Groups count where the choice is limited to some. */
static void config_deepseek2(void) {
    struct doc c = src.cfg;
    const char *method = get_str(c, "topk_method", "greedy");
    config_leading_dense();
    expect(c, "topk_method", one_of(method, "greedy group_limited_greedy"), "\"greedy\" or \"group_limited_greedy\"");
    src.n_group = strcmp(method, "greedy") ? (int)get_int(c, "n_group", 1, MAX_EXPERTS, REQUIRED) : 0;
}

/* Reads the keys of Mistral 4, whose router is a softmax. */
static void config_mistral4(void) {
    config_leading_dense();
    src.n_group = (int)get_int(src.cfg, "n_group", 1, MAX_EXPERTS, 1);
}

/* Returns the width of an indexer's heads. */
static size_t index_width(void) { return (size_t)get_int(src.cfg, "index_head_dim", 2, 1024, REQUIRED); }

/* Writes the sizes of an indexer. */
static void put_indexer(void) {
    kv_u32("attention.indexer.head_count", (size_t)get_int(src.cfg, "index_n_heads", 1, 1024, REQUIRED));
    kv_u32("attention.indexer.key_length", index_width());
    kv_u32("attention.indexer.top_k", (size_t)get_int(src.cfg, "index_topk", 1, MAX_TRAINED, REQUIRED));
}

/* Dies unless an indexer (DeepSeek-V3.2, arXiv 2512.02556, section 2.1) has what it needs. */
static void check_indexer(void) {
    struct doc c = src.cfg;
    expect(c, "q_lora_rank", get_int(c, "q_lora_rank", 0, INT32_MAX, 0), "a number above 0, because of the indexer");
    expect(c, "index_head_dim", index_width() >= latent_rope(),
           fmt("at least the %zu of qk_rope_head_dim", latent_rope()));
}

/* Reads the keys of experts and of an indexer. */
static void config_indexer(void) {
    config_deepseek_experts();
    check_indexer();
}

/* Returns the key that says which layers of GLM-5 have an indexer: a list, a pattern, or how often one has it. */
static const char *indexer_key(void) {
    return get(src.cfg, "indexer_types")        ? "indexer_types"
           : get(src.cfg, "index_topk_pattern") ? "index_topk_pattern"
                                                : "index_topk_freq";
}

/* Whether a layer of GLM-5 has an indexer: those for multi-token prediction do. */
static bool has_indexer_glm(int layer) {
    struct doc c = src.cfg;
    const char *key = indexer_key(), *type;
    json_t *list = get(c, key);
    const size_t i = (size_t)layer;
    if (layer >= src.n_layer) return true;
    if (!strcmp(key, "index_topk_freq")) {
        const int freq = (int)get_int(c, "index_topk_freq", 0, MAX_LAYERS, 1);
        const int offset = (int)get_int(c, "index_skip_topk_offset", 0, MAX_LAYERS, 2);
        return layer < offset || freq <= 1 || (layer - offset + 1) % freq == 0;
    }
    if (json_is_string(list)) {
        const char *letters = json_string_value(list);
        expect(c, key, strlen(letters) == (size_t)src.n_layer && strspn(letters, "FS") == (size_t)src.n_layer,
               fmt("F or S for each of %d layers", src.n_layer));
        return letters[i] == 'F';
    }
    type = json_string_value(json_array_get(list, i));
    expect(c, key, json_array_size(list) == (size_t)src.n_layer && type && one_of(type, "full shared"),
           fmt("\"full\" or \"shared\" for each of %d layers", src.n_layer));
    return !strcmp(type, "full");
}

static bool has_indexer_always(int layer) { return layer >= 0; }
/* Reads the keys of DeepSeek-V3.2: every layer has an indexer. */
static void config_deepseek_v32(void) {
    static const char *const others[] = {"indexer_types", "index_topk_pattern"};
    config_indexer();
    for (size_t i = 0; i < COUNT(others); i++)
        expect(src.cfg, others[i], !get(src.cfg, others[i]), "none (every layer has an indexer)");
    expect(src.cfg, "index_topk_freq", get_int(src.cfg, "index_topk_freq", 0, MAX_LAYERS, 1) <= 1, "1");
}

/* Writes the sizes of GLM-5's indexer, and which layers have one. */
static void put_glm_dsa(void) {
    put_indexer();
    kv_flags("attention.indexer.types", src.n_layer, has_indexer_glm);
}

/* Reads the keys of GLM-5: layers without an indexer share the choice of the one before. */
static void config_glm_dsa(void) {
    config_indexer();
    expect(src.cfg, indexer_key(), has_indexer_glm(0), "an indexer in layer 0");
}

/* The kinds of layers of DeepSeek-V4 in transformers' words, and how many tokens a compressed key has. GGUF files can
 * say no other numbers. */
static const struct {
    const char *type;
    int ratio;
} compressions[] = {
    {"sliding_attention", 0}, {"compressed_sparse_attention", 4}, {"heavily_compressed_attention", 128}};

/* Returns the row of `compressions` of a layer by one of two lists of config.json; of an unknown kind their number. */
static size_t compression_of(json_t *ratios, json_t *kinds, int layer) {
    const int64_t ratio = json_element(ratios, (size_t)layer);
    const char *type = json_string_value(json_array_get(kinds, (size_t)layer));
    size_t k = 0;
    while (k < COUNT(compressions) &&
           (ratios ? ratio != compressions[k].ratio : !type || strcmp(type, compressions[k].type)))
        k++;
    return k;
}

/* Writes which layers of DeepSeek-V4 have compressed keys, compress_ratios of the releases or layer_types of
 * transformers. The list may go on with layers for multi-token prediction. */
static void put_ratios(void) {
    struct doc c = src.cfg, rates = get_obj(c, "compress_rates");
    json_t *ratios = get_list(c, "compress_ratios"), *kinds = get_list(c, "layer_types");
    const char *key = ratios || !kinds ? "compress_ratios" : "layer_types";
    const char *known = ratios || !kinds ? "0, 4 or 128"
                                         : "\"sliding_attention\", \"compressed_sparse_attention\" or "
                                           "\"heavily_compressed_attention\"";
    const int n = (int)json_array_size(ratios ? ratios : kinds), blocks = n_blocks();
    int32_t all[MAX_LAYERS] = {0};
    expect(c, key, n >= src.n_layer && n <= MAX_LAYERS, fmt("%s for each of %d layers", known, src.n_layer));
    for (int l = 0; l < n; l++) {
        const size_t k = compression_of(ratios, kinds, l);
        expect(c, key, k < COUNT(compressions), fmt("%s for each of %d layers", known, src.n_layer));
        all[l] = compressions[k].ratio;
        expect(c, "layer_types", !kinds || l >= src.n_layer || compression_of(NULL, kinds, l) == k,
               "what compress_ratios says");
        expect(c, key, !all[l] || l < src.n_layer || l >= blocks,
               fmt("%s for layer %d, which is for multi-token prediction", ratios ? "0" : "\"sliding_attention\"", l));
    }
    for (size_t k = 1; k < COUNT(compressions); k++)
        expect(rates, compressions[k].type,
               get_int(rates, compressions[k].type, 1, INT32_MAX, compressions[k].ratio) == compressions[k].ratio,
               fmt("%d (GGUF files have no other number)", compressions[k].ratio));
    kv_array("attention.compress_ratios", GGUF_V_I32, ratios && n > blocks ? n : blocks, all);
}

/* Counts the first layers of DeepSeek-V4 that find experts by token ids. */
static int count_hash_layers(void) {
    struct doc c = src.cfg;
    json_t *v, *list = get_list(c, "mlp_layer_types");
    size_t i;
    int n = 0;
    if (!list) return (int)get_int(c, "num_hash_layers", 0, src.n_layer, REQUIRED);
    expect(c, "mlp_layer_types", json_array_size(list) == (size_t)src.n_layer, fmt("%d layers", src.n_layer));
    json_array_foreach(list, i, v) {
        const char *type = json_is_string(v) ? json_string_value(v) : "";
        const bool hash = !strcmp(type, "hash_moe");
        expect(c, "mlp_layer_types", hash ? (size_t)n == i : !strcmp(type, "moe"),
               "\"hash_moe\" layers, then \"moe\" ones");
        n += hash;
    }
    expect(c, "num_hash_layers", get_int(c, "num_hash_layers", 0, src.n_layer, n) == n,
           fmt("%d as in mlp_layer_types", n));
    return n;
}

/* Returns the RoPE parameters of DeepSeek-V4's layers with compressed keys, or of the others. The releases scale the
 * former's frequencies alone. */
static struct doc rope_part(bool compressed) {
    struct doc r = rope_doc(false);
    if (get(r, "main") || get(r, "compress")) return get_obj(r, compressed ? "compress" : "main");
    return compressed ? r : (struct doc){NULL, r.file, r.in};
}

/* Writes swiglu_limit, the limit of every feed-forward or, with n 1, of routed experts alone. */
static void put_limit(size_t n) {
    static const char *const clamps[] = {"swiglu_clamp_exp", "swiglu_clamp_shexp"};
    const struct key_rule *range = key_rule_of(clamps[0]);
    const double limit = get_num(src.cfg, "swiglu_limit", NAN);
    float limits[MAX_LAYERS];
    for (int l = 0; l < n_blocks(); l++) limits[l] = limit > range->hi ? 0 : (float)limit;
    expect(src.cfg, "swiglu_limit", limit >= range->lo, fmt("a number from %g", range->lo));
    for (size_t i = 0; i < n; i++) kv_array(clamps[i], GGUF_V_F32, n_blocks(), limits);
}

/* Writes the sizes of hyper-connections. */
static void put_hyper(void) {
    struct doc c = src.cfg;
    kv_u32("hyper_connection.count", (size_t)get_int(c, "hc_mult", 1, HC_MAX, REQUIRED));
    kv_u32("hyper_connection.sinkhorn_iterations", (size_t)get_int(c, "hc_sinkhorn_iters", 1, 1000, REQUIRED));
    kv_num(c, "hc_eps", get_num(c, "hc_eps", NAN), "hyper_connection.epsilon");
}

/* Writes what DeepSeek-V4 and V4.1 have in common. */
static void put_csa(void) {
    struct doc c = src.cfg;
    const size_t window = (size_t)get_limit(c, "sliding_window", MAX_TRAINED, 0);
    kv_u32("attention.q_lora_rank", size_of("q_lora_rank"));
    expect(c, "sliding_window", window, "a number above 0");
    kv_u32("attention.sliding_window", window);
    put_limit(2);
    put_indexer();
    kv_u32("attention.output_group_count", size_of("o_groups"));
    kv_u32("attention.output_lora_rank", size_of("o_lora_rank"));
}

static void put_deepseek_v4(void) {
    put_csa();
    put_ratios();
    put_hyper();
    kv_u32("hash_layer_count", (size_t)count_hash_layers());
    kv_u32("embedding_length_out", size_of("hc_mult") * size_of("hidden_size"));
}

/* Writes a list of layers, unless it is empty. */
static void put_sources(const char *from, const char *to) {
    struct doc c = src.cfg;
    json_t *list = get_list(c, from);
    const int n = (int)json_array_size(list);
    int32_t layers[MAX_LAYERS];
    for (int i = 0; i < n; i++) {
        const int64_t layer = json_element(list, (size_t)i);
        expect(c, from, layer >= (i ? layers[i - 1] + 1 : 0) && layer < src.n_layer,
               fmt("numbers of layers, ascending and below %d", src.n_layer));
        layers[i] = (int32_t)layer;
    }
    if (n) kv_array(to, GGUF_V_I32, n, layers);
}

static void put_engrams(void);

/* Writes what V4.1 has for itself: which layers make compressed keys and which choose among them, and n-grams. The list
 * of ratios goes on with those of a DSpark module. */
static void put_deepseek_v41(void) {
    struct doc c = src.cfg;
    json_t *ratios = get_list(c, "compress_ratios");
    int32_t all[MAX_LAYERS];
    const int source = (int)get_int(c, "candidate_source_layer_id", -1, src.n_layer - 1, -1);
    put_csa();
    for (int l = 0; l < src.n_layer; l++) {
        const int64_t ratio = json_element(ratios, (size_t)l);
        expect(c, "compress_ratios", ratio >= 0 && ratio <= 2, fmt("0, 1 or 2 for each of %d layers", src.n_layer));
        all[l] = (int32_t)ratio;
    }
    kv_array("attention.compress_ratios", GGUF_V_I32, src.n_layer, all);
    put_hyper();
    put_sources("kv_source_layer_ids", "attention.kv_source_layers");
    put_sources("index_source_layer_ids", "attention.index_source_layers");
    if (source >= 0) {
        kv_u32("attention.indexer.candidate_source_layer", (size_t)source);
        kv_u32("attention.indexer.candidate_topk_blocks", size_of("candidate_topk_blocks"));
        kv_u32("attention.indexer.candidate_block_size", size_of("candidate_block_size"));
    }
    put_engrams();
}

static void put_deepseek_v4_template(const char *name);
static void put_deepseek_v41_template(const char *name);
static void put_token_map(void);

/* Reads the keys of DeepSeek-V4: the releases' or transformers', which keeps no MTP layers. */
static void config_deepseek_v4(void) {
    struct doc c = src.cfg;
    const size_t head = size_of("head_dim"), heads = (size_t)src.n_head, groups = size_of("o_groups");
    expect(c, "o_groups", heads % groups == 0, fmt("a divisor of the %zu heads", heads));
    if (get(c, "qk_rope_head_dim")) {
        const size_t n = (size_t)get_int(c, "qk_rope_head_dim", 2, (int64_t)head, REQUIRED);
        src.rotary = (double)n / (double)head;
        expect(c, "qk_rope_head_dim", rotated(rope_part(false), false) == n, "head_dim x partial_rotary_factor");
    }
    const size_t rope = rotated(rope_part(false), false);
    expect(c, "index_head_dim", index_width() >= rope, fmt("at least the %zu rotated values of a head", rope));
    expect(c, "tie_word_embeddings", !src.tied, "false");
}
static const struct renaming deepseek_v4_names[] = {
    {"model.embed_tokens", "model.embed", BARE},
    {"lm_head", "head", EVERYWHERE},
    {"model.hc_head.hc_fn", "model.hc_head_fn", BARE},
    {"model.hc_head.hc_base", "model.hc_head_base", BARE},
    {"model.hc_head.hc_scale", "model.hc_head_scale", BARE},
    {"hc_head.fn", "hc_head_fn", EVERYWHERE},
    {"hc_head.base", "hc_head_base", EVERYWHERE},
    {"hc_head.scale", "hc_head_scale", EVERYWHERE},
    {"shared_head.norm", "norm", EVERYWHERE},
    {"input_layernorm", "attn_norm", EVERYWHERE},
    {"post_attention_layernorm", "ffn_norm", EVERYWHERE},
    {"attn_hc.fn", "hc_attn_fn", EVERYWHERE},
    {"attn_hc.base", "hc_attn_base", EVERYWHERE},
    {"attn_hc.scale", "hc_attn_scale", EVERYWHERE},
    {"ffn_hc.fn", "hc_ffn_fn", EVERYWHERE},
    {"ffn_hc.base", "hc_ffn_base", EVERYWHERE},
    {"ffn_hc.scale", "hc_ffn_scale", EVERYWHERE},
    {"self_attn.sinks", "attn.attn_sink", EVERYWHERE},
    {"self_attn.q_a_proj", "attn.wq_a", EVERYWHERE},
    {"self_attn.q_a_layernorm", "attn.q_norm", EVERYWHERE},
    {"self_attn.q_b_proj", "attn.wq_b", EVERYWHERE},
    {"self_attn.kv_proj", "attn.wkv", EVERYWHERE},
    {"self_attn.kv_norm", "attn.kv_norm", BARE},
    {"self_attn.kv_norm", "attn.norm", EVERYWHERE},
    {"self_attn.o_a_proj", "attn.wo_a", EVERYWHERE},
    {"self_attn.o_b_proj", "attn.wo_b", EVERYWHERE},
    {"self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b", EVERYWHERE},
    {"self_attn.compressor.indexer.scorer.weights_proj", "attn.indexer.weights_proj", EVERYWHERE},
    {"self_attn.compressor.indexer.k_proj", "attn.indexer.wk", EVERYWHERE},
    {"self_attn.compressor.indexer.k_norm", "attn.indexer.k_norm", EVERYWHERE},
    {"self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv", EVERYWHERE},
    {"self_attn.compressor.indexer.gate_proj", "attn.indexer.compressor.wgate", EVERYWHERE},
    {"self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape", EVERYWHERE},
    {"self_attn.compressor.indexer.kv_norm", "attn.indexer.compressor.norm", EVERYWHERE},
    {"self_attn.compressor.kv_proj", "attn.compressor.wkv", EVERYWHERE},
    {"self_attn.compressor.gate_proj", "attn.compressor.wgate", EVERYWHERE},
    {"self_attn.compressor.position_bias", "attn.compressor.ape", EVERYWHERE},
    {"self_attn.compressor.kv_norm", "attn.compressor.norm", EVERYWHERE},
    {"mlp.gate.tid2eid", "ffn.gate.tid2eid", EVERYWHERE},
    {"mlp.gate.e_score_correction_bias", "ffn.gate.bias", EVERYWHERE},
    {"mlp.gate", "ffn.gate", EVERYWHERE},
    {"mlp.experts.*.gate_proj", "ffn.experts.*.w1", EVERYWHERE},
    {"mlp.experts.*.up_proj", "ffn.experts.*.w3", EVERYWHERE},
    {"mlp.experts.*.down_proj", "ffn.experts.*.w2", EVERYWHERE},
    {"mlp.shared_experts.gate_proj", "ffn.shared_experts.w1", EVERYWHERE},
    {"mlp.shared_experts.up_proj", "ffn.shared_experts.w3", EVERYWHERE},
    {"mlp.shared_experts.down_proj", "ffn.shared_experts.w2", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* Reads the keys of Hunyuan 4. */
static void config_hy4(void) {
    config_leading_dense();
    check_indexer();
    expect(src.cfg, "indexer_types", get_list(src.cfg, "indexer_types"), "a list");
    expect(src.cfg, "indexer_types", has_indexer_glm(0), "an indexer in layer 0");
}

/* Writes the sizes of Hunyuan 4, whose limit is that of routed experts alone. */
static void put_hy4(void) {
    struct doc c = src.cfg;
    put_glm_dsa();
    put_limit(1);
    kv_u32("hyper_connection.count", (size_t)get_int(c, "hc_mult", 1, HC_MAX, REQUIRED));
    kv_num(c, "hc_eps", get_num(c, "hc_eps", NAN), "hyper_connection.epsilon");
    kv_num(c, "hc_magnitude", get_num(c, "hc_magnitude", NAN), "hyper_connection.magnitude");
}

static const struct renaming hy4_names[] = {{"attn_hc.fn", "hc_attn_layer.hc_pre.hc_fn", EVERYWHERE},
                                            {"attn_hc.base", "hc_attn_layer.hc_pre.hc_base", EVERYWHERE},
                                            {"attn_hc.scale", "hc_attn_layer.hc_pre.hc_scale", EVERYWHERE},
                                            {"ffn_hc.fn", "hc_mlp_layer.hc_pre.hc_fn", EVERYWHERE},
                                            {"ffn_hc.base", "hc_mlp_layer.hc_pre.hc_base", EVERYWHERE},
                                            {"ffn_hc.scale", "hc_mlp_layer.hc_pre.hc_scale", EVERYWHERE},
                                            {"model.hc_head.hc_fn", "model.hc_head.hc_head_fn", EVERYWHERE},
                                            {"model.hc_head.hc_base", "model.hc_head.hc_head_base", EVERYWHERE},
                                            {"model.hc_head.hc_scale", "model.hc_head.hc_head_scale", EVERYWHERE},
                                            {"self_attn.sinks", "self_attn.learnable_sink_param", EVERYWHERE},
                                            {"self_attn.g_proj", "self_attn.linear_gate", EVERYWHERE},
                                            {"shared_head.norm", "final_layernorm", EVERYWHERE},
                                            {NULL, NULL, EVERYWHERE}};

/* Reads the keys of GLM-4.5 to 4.7. */
static void config_glm4(void) {
    struct doc c = src.cfg;
    config_deepseek_experts();
    src.head_norm = get_bool(c, "use_qk_norm", false);
    src.qkv_bias = get_bool(c, "attention_bias", false);
}

/* Reads the keys of GLM-4-0414. */
static void config_glm4_dense(void) { src.qkv_bias = get_bool(src.cfg, "attention_bias", false); }

/* Reads the keys of dots.llm1 (arXiv 2506.05767), whose releases give the method of the choice as scoring_func. Without
 * layer_types the layers from max_window_layers on have a window. */
static void config_dots1(void) {
    struct doc c = src.cfg;
    size_t i;
    json_t *v, *kinds = get_list(c, "layer_types");
    config_leading_dense();
    src.n_group = (int)get_int(c, "n_group", 1, MAX_EXPERTS, 1);
    src.norm_topk_prob = false;
    expect(c, "scoring_func", one_of(get_str(c, "scoring_func", "noaux_tc"), "noaux_tc sigmoid"),
           "noaux_tc or sigmoid");
    json_array_foreach(kinds, i, v)
        expect(c, "layer_types", json_is_string(v) && !strcmp(json_string_value(v), "full_attention"),
               "\"full_attention\" throughout (GGUF files of dots1 cannot have windows)");
    expect(c, "max_window_layers",
           kinds || !get(c, "sliding_window") || get_int(c, "max_window_layers", 0, INT32_MAX, 62) >= src.n_layer,
           fmt("at least %d (GGUF files of dots1 cannot have windows)", src.n_layer));
}

/* Whether a layer of dots.3 has an indexer: those without a window do. */
static bool has_indexer_dots3(int layer) { return layer < src.n_layer && !is_windowed(layer); }

/* Writes the sizes of dots.3, whose layers with a window have some of their own. */
static void put_dots3(void) {
    const size_t latent = size_of("swa_kv_lora_rank"), rope = size_of("qk_rope_head_dim");
    put_indexer();
    kv_flags("attention.indexer.types", src.n_layer, has_indexer_dots3);
    kv_u32("attention.kv_lora_rank_swa", latent);
    kv_u32("attention.key_length_swa", latent + rope);
    kv_u32("attention.value_length_swa", latent);
    kv_u32("attention.key_length_mla_swa", size_of("swa_qk_nope_head_dim") + rope);
    kv_u32("attention.value_length_mla_swa", size_of("swa_v_head_dim"));
}

/* Reads the keys of dots.3. */
static void config_dots3(void) {
    struct doc c = src.cfg;
    static const char *const same[] = {"q_lora_rank", "qk_rope_head_dim"};
    config_leading_dense();
    src.n_group = 1;
    check_indexer();
    src.window_heads[0] = (int)get_int(c, "swa_num_attention_heads", 1, 65536, REQUIRED);
    for (size_t i = 0; i < COUNT(same); i++) {
        const char *other = fmt("swa_%s", same[i]);
        expect(c, other, size_of(other) == size_of(same[i]), fmt("%zu as %s", size_of(same[i]), same[i]));
    }
    expect(c, "layer_types", src.window && has_indexer_dots3(0), "layers with a window, and none in layer 0");
}

/* Whether a layer of LongCat-Flash is the first half of one of the release's. */
static bool is_dense_longcat(int layer) { return layer % 2 == 0; }

static void put_longcat(void) {
    kv_u32("expert_zero_count", (size_t)get_int(src.cfg, "zero_expert_num", 0, MAX_EXPERTS - src.n_expert, 0));
}

static const struct renaming longcat_names[] = {
    {"input_layernorm", "input_layernorm.@", EVERYWHERE},
    {"post_attention_layernorm", "post_attention_layernorm.@", EVERYWHERE},
    {"self_attn", "self_attn.@", EVERYWHERE},
    {"mlp.gate_proj", "mlps.@.gate_proj", EVERYWHERE},
    {"mlp.up_proj", "mlps.@.up_proj", EVERYWHERE},
    {"mlp.down_proj", "mlps.@.down_proj", EVERYWHERE},
    {"mlp.gate.e_score_correction_bias", "mlp.router.e_score_correction_bias", EVERYWHERE},
    {"mlp.gate", "mlp.router.classifier", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* Reads the keys of Hunyuan-A13B. The alpha of its releases makes a context of 256K tokens, whatever
 * max_position_embeddings says, as in llama.cpp. */
static void config_hunyuan(void) {
    const struct doc c = src.cfg, r = rope_doc(false);
    src.width_key = either("moe_intermediate_size", "intermediate_size");
    src.shared_count = get(c, "num_shared_expert") ? "num_shared_expert" : NULL;
    if (src.shared_count) src.n_shared = (int)get_int(c, src.shared_count, 1, 64, REQUIRED);
    if (is_stretched(r) && get_num(r, "alpha", NAN) == 1000) src.context = 256 << 10;
}

static const struct renaming hunyuan_names[] = {{"self_attn.q_norm", "self_attn.query_layernorm", EVERYWHERE},
                                                {"self_attn.k_norm", "self_attn.key_layernorm", EVERYWHERE},
                                                {"mlp.gate", "mlp.gate.wg", EVERYWHERE},
                                                {"mlp.shared_experts", "mlp.shared_mlp", EVERYWHERE},
                                                {NULL, NULL, EVERYWHERE}};

static const struct renaming hy3_names[] = {{"mlp.gate.e_score_correction_bias", "mlp.expert_bias", EVERYWHERE},
                                            {"mlp.gate", "mlp.router.gate", EVERYWHERE},
                                            {"mlp.shared_experts", "mlp.shared_mlp", EVERYWHERE},
                                            {"shared_head.norm", "final_layernorm", EVERYWHERE},
                                            {NULL, NULL, EVERYWHERE}};

/* ============================================================================================================
 * Families: grouped-query attention
 *
 * gpt-oss, MiniMax-M2, Mixtral, OLMoE, Qwen2-MoE, ERNIE-4.5, Step-3.5 and Laguna.
 * ============================================================================================================ */

/* Whether a block has a window, by layer_types, which may go on with layers for multi-token prediction. Without that
 * list every other layer of gpt-oss has one. */
static bool is_windowed_typed(int layer) {
    json_t *list = get_list(src.cfg, "layer_types");
    const char *type = json_string_value(json_array_get(list, (size_t)layer));
    return type ? !strcmp(type, "sliding_attention") : !list && src.alternate && layer < src.n_layer && layer % 2 == 0;
}

/* Reads which layers have a window and how many keys it has. */
static void config_windows(void) {
    struct doc c = src.cfg;
    json_t *v, *list = get_list(c, "layer_types");
    size_t i;
    const int n = (int)json_array_size(list);
    bool any = false;
    expect(c, "layer_types", !list || n == src.n_layer || n == src.n_layer + src.n_mtp,
           src.n_mtp ? fmt("%d or %d layers", src.n_layer, src.n_layer + src.n_mtp) : fmt("%d layers", src.n_layer));
    json_array_foreach(list, i, v) {
        expect(c, "layer_types", json_is_string(v) && one_of(json_string_value(v), "full_attention sliding_attention"),
               "\"full_attention\" and \"sliding_attention\"");
    }
    src.n_typed = n;
    for (int l = 0; l < n_blocks(); l++) any |= is_windowed(l);
    src.window = (size_t)get_limit(c, "sliding_window", MAX_TRAINED, 0);
    expect(c, "sliding_window", !any || src.window, "a number above 0");
    if (!any) src.window = 0;
}

static const struct renaming gpt_oss_names[] = {{"mlp.gate", "mlp.router", EVERYWHERE}, {NULL, NULL, EVERYWHERE}};

/* Reads the keys of MiniMax-M2. */
static void config_minimax_m2(void) {
    struct doc c = src.cfg;
    json_t *list = get_list(c, "attn_type_list");
    if (get(c, "rotary_dim"))
        src.rotary = (double)get_int(c, "rotary_dim", 2, (int64_t)head_k(), REQUIRED) / (double)head_k();
    for (size_t i = 0; i < json_array_size(list); i++)
        expect(c, "attn_type_list", json_element(list, i) == 1, "1 for every layer");
}
/* Of Mixtral and MiniMax; indexers and shared experts are those of MiniMax-M3. */
static const struct renaming minimax_names[] = {
    {"self_attn.indexer.q_proj", "self_attn.index_q_proj", EVERYWHERE},
    {"self_attn.indexer.k_proj", "self_attn.index_k_proj", EVERYWHERE},
    {"self_attn.indexer.q_norm", "self_attn.index_q_norm", EVERYWHERE},
    {"self_attn.indexer.k_norm", "self_attn.index_k_norm", EVERYWHERE},
    {"mlp.experts.*.gate_proj", "block_sparse_moe.experts.*.w1", EVERYWHERE},
    {"mlp.experts.*.up_proj", "block_sparse_moe.experts.*.w3", EVERYWHERE},
    {"mlp.experts.*.down_proj", "block_sparse_moe.experts.*.w2", EVERYWHERE},
    {"mlp.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias", EVERYWHERE},
    {"mlp.gate", "block_sparse_moe.gate", EVERYWHERE},
    {"mlp.shared_experts", "block_sparse_moe.shared_experts", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* Reads the keys of Mixtral (arXiv 2401.04088). GGUF's llama has no key for a window. */
static void config_mixtral(void) {
    struct doc c = src.cfg;
    expect(c, "head_dim", head_k() % 2 == 0, "an even number");
    const int64_t window = get_limit(c, "sliding_window", MAX_TRAINED, MAX_TRAINED);
    expect(c, "sliding_window", window >= get_limit(c, "max_position_embeddings", MAX_TRAINED, MAX_TRAINED),
           "none or the whole context (GGUF files of llama cannot have windows)");
}

/* Reads the keys of Qwen1.5-MoE and Qwen2-MoE. */
static void config_qwen2_moe(void) {
    struct doc c = src.cfg;
    src.qkv_bias = get_bool(c, "qkv_bias", true);
}
/* Reads the keys of Granite's mixtures. */
static void config_granite(void) {
    src.n_shared = get_int(src.cfg, "shared_intermediate_size", 0, MAX_WIDTH, 0) > 0;
    if (!src.n_shared) src.shared_key = NULL;
}

/* Whether a layer of Granite with windows is rotated: layer_rope_theta has 0 for the others, no_rope_layers has so too. */
static bool is_rotated_granite(int layer) {
    const char *key = get(src.cfg, "layer_rope_theta") ? "layer_rope_theta" : "no_rope_layers";
    const json_t *list = get_list(src.cfg, key);
    if (!list) return true;
    check_per_layer(key, list);
    const json_t *v = json_array_get(list, (size_t)layer);
    expect(src.cfg, key, json_is_number(v), "a number for each layer");
    return json_number_value(v) != 0;
}

/* Reads the keys of Granite with windows. All rotated layers have one base, and the shared experts, which no release
 * has, are one matrix in GGUF files. */
static void config_granite_swa(void) {
    const json_t *bases = get_list(src.cfg, "layer_rope_theta");
    struct doc in;
    const double own = rope_base(rope_doc(false), false, src.rope_theta, &in);
    expect(src.cfg, "layer_types", get_list(src.cfg, "layer_types") != NULL, "a list of all layers");
    expect(src.cfg, "shared_intermediate_size", !get_int(src.cfg, "shared_intermediate_size", 0, MAX_WIDTH, 0),
           "0: shared experts are not supported");
    for (int l = 0; l < src.n_layer && bases; l++)
        expect(src.cfg, "layer_rope_theta",
               !is_rotated_granite(l) || json_number_value(json_array_get(bases, (size_t)l)) == own,
               fmt("0 or rope_theta, %g, for each layer", own));
}

/* Whether a layer of Granite 4 has Mamba-2, as layer_types says in the words of the releases or of transformers. */
static bool is_mamba_granite(int layer) {
    const char *type = json_string_value(json_array_get(get_list(src.cfg, "layer_types"), (size_t)layer));
    expect(src.cfg, "layer_types", type && one_of(type, "mamba linear_attention attention full_attention"),
           "\"mamba\" or \"attention\" for each layer");
    return one_of(type, "mamba linear_attention");
}

/* Finds the architecture of a model of Granite 4: there are hybrids and models of attention alone, mixtures and dense
 * ones, where the feed-forward is what is the shared expert elsewhere. */
static const char *kinds_granite(void) {
    const struct doc c = src.cfg;
    const size_t n = json_array_size(get_list(c, "layer_types"));
    const bool experts = get_int(c, "num_local_experts", 0, MAX_EXPERTS, 0) > 0;
    bool mamba = false;
    expect(c, "layer_types", n && n == size_of("num_hidden_layers"), "\"mamba\" or \"attention\" for each layer");
    for (size_t l = 0; l < n; l++) mamba |= is_mamba_granite((int)l);
    src.arch = mamba ? "granitehybrid" : experts ? "granitemoe" : "granite";
    src.unrotated = strcmp(get_str(c, "position_embedding_type", "nope"), "rope");
    if (mamba && src.unrotated) src.context = 1 << 20; /* as in llama.cpp: nothing depends on positions */
    if (experts) return NULL;
    src.experts_key = src.experts_other = src.shared_key = NULL;
    src.dense_key = "shared_intermediate_size";
    return NULL;
}

/* Reads the keys of Granite 4. */
static void config_granite4(void) {
    const json_t *most = json_array_get(get_list(src.cfg, "time_step_limit"), 1);
    src.n_shared = src.experts_key != NULL;
    expect(src.cfg, "time_step_limit", !json_is_number(most) || isinf(json_number_value(most)), "no limit");
}

/* Writes the factors of Granite. */
static void put_granite(void) {
    static const char *const names[][2] = {{"attention_multiplier", "attention.scale"},
                                           {"embedding_multiplier", "embedding_scale"},
                                           {"residual_multiplier", "residual_scale"},
                                           {"logits_scaling", "logit_scale"}};
    for (size_t i = 0; i < COUNT(names); i++) {
        const double v = get_num(src.cfg, names[i][0], 1);
        expect(src.cfg, names[i][0], v > 0, "a number above 0");
        kv_num(src.cfg, names[i][0], v, names[i][1]);
    }
}

/* The same of Granite with windows, and which layers are rotated. */
static void put_granite_swa(void) {
    put_granite();
    kv_flags("attention.rope_pattern", src.n_layer, is_rotated_granite);
}

/* The same of Granite 4, whether heads are rotated, and the sizes of Mamba-2. */
static void put_granite4(void) {
    const struct doc c = src.cfg;
    put_granite();
    gguf_put_bool(&writer, arch_key("rope.scaling.finetuned"), !src.unrotated);
    if (strcmp(src.arch, "granitehybrid")) return;
    const size_t inner = size_of("hidden_size") * (size_t)get_int(c, "mamba_expand", 1, 64, 2),
                 heads = size_of("mamba_n_heads"), groups = (size_t)get_int(c, "mamba_n_groups", 1, INT32_MAX, 1);
    const json_t *head = get(c, "mamba_d_head");
    expect(c, "mamba_n_heads", heads % groups == 0 && inner % heads == 0,
           fmt("a multiple of the %zu of mamba_n_groups that divides mamba_expand x hidden_size, %zu", groups, inner));
    expect(c, "mamba_d_head", !head || json_is_string(head) || json_integer_value(head) == (int64_t)(inner / heads),
           fmt("%zu, as mamba_n_heads gives", inner / heads));
    kv_u32("ssm.conv_kernel", (size_t)get_int(c, "mamba_d_conv", 1, 16, 4));
    kv_u32("ssm.state_size", size_of("mamba_d_state"));
    kv_u32("ssm.group_count", groups);
    kv_u32("ssm.time_step_rank", heads);
    kv_u32("ssm.inner_size", inner);
}

static const struct renaming granite_swa_names[] = {{"mlp.experts", "block_sparse_moe.experts", EVERYWHERE},
                                                    {"mlp.gate", "block_sparse_moe.router", EVERYWHERE},
                                                    {NULL, NULL, EVERYWHERE}};

static const struct renaming granite_names[] = {
    {"mlp.experts.gate_up_proj", "block_sparse_moe.input_linear", EVERYWHERE},
    {"mlp.experts.down_proj", "block_sparse_moe.output_linear", EVERYWHERE},
    {"mlp.gate", "block_sparse_moe.router.layer", EVERYWHERE},
    {"mlp.shared_experts.gate_up_proj", "shared_mlp.input_linear", EVERYWHERE},
    {"mlp.shared_experts.down_proj", "shared_mlp.output_linear", EVERYWHERE},
    {"mlp.gate_up_proj", "shared_mlp.input_linear", EVERYWHERE},
    {"mlp.down_proj", "shared_mlp.output_linear", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};
static const struct renaming shared_expert_names[] = {{"mlp.shared_experts", "mlp.shared_expert", EVERYWHERE},
                                                      {NULL, NULL, EVERYWHERE}};

/* Returns what config.json of Gemma 4 says of layers without a window: for each layer, or by a key for all of them; key
 * NULL: there it says the same as of the others. */
static int64_t full_size(const char *key, const char *nested, int64_t dflt) {
    const struct doc layers = get_obj(src.cfg, "per_layer_config");
    const int64_t common = get_int(src.cfg, nested, 1, 65536, dflt);
    int64_t found = 0;
    if (!layers.obj) return key ? get_int(src.cfg, key, 1, 65536, dflt) : common;
    for (int l = 0; l < src.n_layer; l++) {
        const struct doc one = get_obj(layers, fmt("%d", l));
        const int64_t n = one.obj ? get_int(one, nested, 1, 65536, common) : common;
        const int64_t want = is_windowed(l) ? common : found ? found : n;
        expect(one.obj ? one : src.cfg, nested, n == want, fmt("%lld in layer %d", (long long)want, l));
        if (!is_windowed(l)) found = n;
    }
    return found;
}

/* Reads the keys of Gemma 4. */
static void config_gemma4(void) {
    struct doc c = src.cfg, r = rope_doc(false);
    expect(c, "hidden_size_per_layer_input", !get_int(c, "hidden_size_per_layer_input", 0, INT32_MAX, 256),
           "0 (inputs of each layer, as E2B and E4B have, are not supported)");
    expect(c, "num_kv_shared_layers", !get_int(c, "num_kv_shared_layers", 0, INT32_MAX, 0),
           "0 (layers that share keys and values are not supported)");
    expect(c, "use_bidirectional_attention", strcmp(get_str(c, "use_bidirectional_attention", "none"), "all") != 0,
           "none or \"vision\"");
    expect(c, "layer_types", src.n_typed == src.n_layer, fmt("the kinds of %d layers", src.n_layer));
    expect(c, "layer_types", src.window && !is_windowed(src.n_layer - 1),
           "layers with a window, and a last one without");
    src.window_heads[1] = src.n_head_kv;
    src.own_values = !get_bool(c, "attention_k_eq_v", false);
    src.n_head_kv =
        (int)full_size(src.own_values ? NULL : "num_global_key_value_heads", "num_key_value_heads", src.n_head_kv);
    src.full_head = (int)full_size("global_head_dim", "head_dim", 512);
    expect(r, "rope_type", !strcmp(rope_type(r), "proportional"), "\"proportional\"");
    src.tied = get_bool(c, "tie_word_embeddings", get_bool(src.top, "tie_word_embeddings", true));
}

/* Writes the keys of Gemma 4's layers with a window, and those that say what its larger siblings lack. A cap of 0 is none,
 * where llama.cpp takes 30 for no key. */
static void put_gemma4(void) {
    struct doc c = src.cfg;
    kv_u32("attention.key_length_swa", window_head_k());
    kv_u32("attention.value_length_swa", window_head_k());
    kv_u32("attention.shared_kv_layers", 0);
    kv_u32("embedding_length_per_layer_input", 0);
    kv_num(c, "final_logit_softcapping", get_num(c, "final_logit_softcapping", 0), "final_logit_softcapping");
}

static const struct renaming gemma4_names[] = {{"post_attention_layernorm", "pre_feedforward_layernorm", EVERYWHERE},
                                               {"post_self_attn_layernorm", "post_attention_layernorm", EVERYWHERE},
                                               {"post_mlp_layernorm", "post_feedforward_layernorm", EVERYWHERE},
                                               {"post_mlp_layernorm_1", "post_feedforward_layernorm_1", EVERYWHERE},
                                               {"post_mlp_layernorm_2", "post_feedforward_layernorm_2", EVERYWHERE},
                                               {"pre_mlp_layernorm_2", "pre_feedforward_layernorm_2", EVERYWHERE},
                                               {"mlp.gate.scale", "router.scale", EVERYWHERE},
                                               {"mlp.gate.per_expert_scale", "router.per_expert_scale", EVERYWHERE},
                                               {"mlp.gate", "router.proj", EVERYWHERE},
                                               {"mlp.experts", "experts", EVERYWHERE},
                                               {NULL, NULL, EVERYWHERE}};

/* ERNIE 4.5: every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index is a mixture. */
static bool is_dense_ernie(int layer) {
    const int last = (int)get_int(src.cfg, "moe_layer_end_index", -1, MAX_LAYERS, -1);
    const int step = (int)get_int(src.cfg, "moe_layer_interval", 1, MAX_LAYERS, 1);
    return layer < src.first_dense || (last >= 0 && layer > last) || (layer + 1) % step;
}
static void put_ernie(void) {
    kv_u32("interleave_moe_layer_step", (size_t)get_int(src.cfg, "moe_layer_interval", 1, MAX_LAYERS, 1));
}
static void config_ernie(void) {
    struct doc c = src.cfg;
    src.first_dense = (int)get_int(c, "moe_layer_start_index", 0, MAX_LAYERS, 0);
    src.router_bias = get_bool(c, "moe_use_aux_free", true) ? "exp_probs_b.bias" : NULL;
    src.tied = get_bool(c, "tie_word_embeddings", true);
}
static const struct renaming ernie_names[] = {
    {"mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* Step-3.5: moe_layers_enum names the mixtures, "3,4,5" or a list; without it they are the layers from 3 on, as in
 * transformers. */
static bool is_dense_step(int layer) {
    char *end;
    const json_t *list = get(src.cfg, "moe_layers_enum");
    if (!list) return layer < 3;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const int64_t n = json_element(list, i);
        expect(src.cfg, "moe_layers_enum", n >= 0, "numbers of layers");
        if (n == layer) return false;
    }
    if (json_is_array(list)) return true;
    for (const char *p = get_str(src.cfg, "moe_layers_enum", ""); *p; p = *end == ',' ? end + 1 : end) {
        const long n = strtol(p, &end, 10);
        expect(src.cfg, "moe_layers_enum", end > p && (!*end || *end == ','), "numbers with commas between them");
        if (n == layer) return false;
    }
    return true;
}
/* Writes a limit for every layer from a list, if there is one; null is 0, none. */
static void put_limits(const char *key, const char *name) {
    const struct key_rule *range = key_rule_of(name);
    json_t *list = get_list(src.cfg, key);
    float limits[MAX_LAYERS] = {0};
    if (list) check_per_layer(key, list);
    for (size_t l = 0; l < json_array_size(list) && l < MAX_LAYERS; l++) {
        json_t *v = json_array_get(list, l);
        const double limit = json_number_value(v);
        expect(src.cfg, key, json_is_null(v) || (json_is_number(v) && limit >= range->lo),
               fmt("null or numbers from %g", range->lo));
        limits[l] = limit > range->hi ? 0 : (float)limit;
    }
    if (list) kv_array(name, GGUF_V_F32, n_blocks(), limits);
}

static void put_step(void) {
    kv_u32("moe_every_n_layers", (size_t)get_int(src.cfg, "moe_every_n_layer", 1, MAX_LAYERS, 1));
    put_limits("swiglu_limits", "swiglu_clamp_exp");
    put_limits("swiglu_limits_shared", "swiglu_clamp_shexp");
}
static void config_step(void) {
    struct doc c = src.cfg, other = get_obj(c, "attention_other_setting");
    count_leading_dense();
    src.window_heads[0] = (int)get_int(other, "num_attention_heads", 1, 65536, src.n_head);
    src.window_heads[1] = (int)get_int(other, "num_attention_groups", 1, 65536, src.n_head_kv);
    src.head_norm = get_bool(c, "use_qk_norm", true);
    src.head_gate = get_bool(c, "use_head_wise_attn_gate", false);
    src.zero_centered = get_bool(c, "zero_centered", true);
    src.router_bias = get_bool(c, "use_moe_router_bias", true) ? "exp_probs_b.bias" : NULL;
    expect(c, "query_pre_attn_scalar", get_num(c, "query_pre_attn_scalar", (double)head_k()) == (double)head_k(),
           fmt("%zu as head_dim", head_k()));
    expect(c, "use_rope_layers", !json_array_size(get_list(c, "use_rope_layers")), "none");
    expect(other, "head_dim", get_int(other, "head_dim", 1, 65536, (int64_t)head_k()) == (int64_t)head_k(),
           fmt("%zu as in the other layers", head_k()));
}
static const struct renaming step_names[] = {{"mlp.gate.e_score_correction_bias", "moe.router_bias", EVERYWHERE},
                                             {"mlp.gate", "moe.gate", EVERYWHERE},
                                             {"mlp.experts.*", "moe.experts.*", EVERYWHERE},
                                             {"mlp.experts", "moe", EVERYWHERE},
                                             {"mlp.shared_experts", "share_expert", EVERYWHERE},
                                             {"shared_head.norm", "transformer.shared_head.norm", EVERYWHERE},
                                             {"shared_head.head", "transformer.shared_head.output", EVERYWHERE},
                                             {NULL, NULL, EVERYWHERE}};

/* Returns the value of a layer in a list of 0 and 1. */
static bool listed_bit(struct doc d, const char *key, int layer) {
    json_t *list = get_list(d, key), *v = json_array_get(list, (size_t)layer);
    const int64_t bit = json_is_boolean(v) ? json_is_true(v) : json_element(list, (size_t)layer);
    expect(d, key, json_array_size(list) == (size_t)src.n_layer && bit >> 1 == 0,
           fmt("0 or 1 for each of %d layers", src.n_layer));
    return bit;
}

/* Dies unless layer_types names layers with a window, which alone are rotated. */
static void check_typed_windows(void) {
    expect(src.cfg, "layer_types", src.n_typed, "the kinds of all layers");
    expect(src.cfg, "layer_types", src.window, "layers with a window (GGUF files of this family rotate no others)");
}

/* Reads the keys of EXAONE's mixtures. */
static void config_exaone(void) {
    struct doc c = src.cfg;
    const bool listed = get_list(c, "is_moe_layer") != NULL;
    check_typed_windows();
    config_leading_dense();
    src.n_group = (int)get_int(c, "n_group", 1, MAX_EXPERTS, 1);
    for (int l = 0; l < src.n_layer && listed; l++)
        expect(c, "is_moe_layer", listed_bit(c, "is_moe_layer", l) == !src.is_dense(l),
               fmt("%d dense layers, then mixtures", src.first_dense));
}
static const struct renaming exaone_names[] = {
    {"mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias", EVERYWHERE}, {NULL, NULL, EVERYWHERE}};

/* Whether Trinity's layer has a gate for every value: all do. */
static bool gates_always(int layer) { return layer >= 0; }

/* Reads the keys of Trinity. */
static void config_afmoe(void) {
    check_typed_windows();
    expect(src.cfg, "mup_enabled", get_bool(src.cfg, "mup_enabled", false),
           "true (GGUF files of afmoe scale embeddings)");
    src.first_dense = (int)get_int(src.cfg, "num_dense_layers", 0, MAX_LAYERS, 1);
}
static const struct renaming afmoe_names[] = {{"post_attention_layernorm", "pre_mlp_layernorm", EVERYWHERE},
                                              {"post_self_attn_layernorm", "post_attention_layernorm", EVERYWHERE},
                                              {"self_attn.g_proj", "self_attn.gate_proj", EVERYWHERE},
                                              {"mlp.gate.e_score_correction_bias", "mlp.expert_bias", EVERYWHERE},
                                              {"mlp.gate", "mlp.router.gate", EVERYWHERE},
                                              {NULL, NULL, EVERYWHERE}};

/* Reads the keys of Cohere's mixtures. In transformers a dense layer without a window is rotated if each dense layer
 * has none, in llama.cpp always. */
static void config_cohere2(void) {
    struct doc c = src.cfg;
    const char *by = get_str(c, "expert_selection_fn", "softmax"),
               *joins = get_str(c, "shared_expert_combination_strategy", "average");
    check_typed_windows();
    config_leading_dense();
    src.tied = get_bool(c, "tie_word_embeddings", true);
    src.centers = !get(c, "rms_norm_eps");
    if (src.centers) src.eps_key = "layer_norm_eps";
    expect(c, "expert_selection_fn", one_of(by, "softmax sigmoid"), "softmax or sigmoid");
    src.gating = strcmp(by, "sigmoid") ? GATING_SOFTMAX : GATING_SIGMOID;
    if (src.gating == GATING_SOFTMAX) src.norm_key = ""; /* over the chosen experts */
    expect(c, "shared_expert_combination_strategy", !src.n_shared || !strcmp(joins, "average"),
           "average (GGUF files of cohere2moe have no other)");
    for (int l = 0; l < src.first_dense; l++)
        expect(c, "prefix_dense_sliding_window_pattern",
               is_windowed(l) || get_int(c, "prefix_dense_sliding_window_pattern", 1, MAX_LAYERS, 1) == 1,
               "1 (GGUF files of cohere2moe rotate the first dense layers)");
}

/* Writes what Cohere's mixtures multiply logits by. */
static void put_cohere2(void) {
    const double scale = get_num(src.cfg, "logit_scale", 0.0625);
    expect(src.cfg, "logit_scale", scale > 0, "a number above 0");
    kv_num(src.cfg, "logit_scale", scale, "logit_scale");
}

/* Reads the keys of Phi-3.5-MoE. */
static void config_phimoe(void) {
    struct doc c = src.cfg;
    const int64_t window = get_limit(c, "sliding_window", MAX_TRAINED, MAX_TRAINED);
    expect(c, "attention_bias", get_bool(c, "attention_bias", false), "true");
    expect(c, "lm_head_bias", get_bool(c, "lm_head_bias", false), "true");
    expect(c, "num_experts_per_tok", src.top_k == 2, "2");
    expect(c, "router_jitter_noise", fabs(get_num(c, "router_jitter_noise", 0.01) - 0.01) < 1e-9, "0.01");
    expect(c, "sliding_window", window >= get_limit(c, "max_position_embeddings", MAX_TRAINED, MAX_TRAINED),
           "none or the whole context");
}

/* Reads the keys of DBRX. */
static void config_dbrx(void) {
    struct doc c = src.cfg, ffn = get_obj(c, "ffn_config"), act = get_obj(ffn, "ffn_act_fn");
    expect(act, "name", !strcmp(get_str(act, "name", "silu"), "silu"), "\"silu\"");
    expect(ffn, "moe_normalize_expert_weights", get_num(ffn, "moe_normalize_expert_weights", 1) == 1, "1");
    src.qkv_chunks = 1;
    src.centers = true;
    src.eps_key = "layer_norm_eps";
}

/* Writes what DBRX limits queries, keys and values to; 0: nothing. llama.cpp takes the width of experts from the key of
 * dense layers. */
static void put_dbrx(void) {
    kv_num(src.cfg, "clip_qkv", get_num(src.cfg, "clip_qkv", 0), "attention.clamp_kqv");
    kv_u32("feed_forward_length", size_of(src.width_key));
}

static const struct renaming dbrx_names[] = {{"self_attn.qkv_proj", "norm_attn_norm.attn.Wqkv", EVERYWHERE},
                                             {"self_attn.o_proj", "norm_attn_norm.attn.out_proj", EVERYWHERE},
                                             {"input_layernorm", "norm_attn_norm.norm_1", EVERYWHERE},
                                             {"post_attention_layernorm", "norm_attn_norm.norm_2", EVERYWHERE},
                                             {"mlp.gate", "ffn.router.layer", EVERYWHERE},
                                             {"mlp.experts.gate_proj", "ffn.experts.mlp.w1", EVERYWHERE},
                                             {"mlp.experts.up_proj", "ffn.experts.mlp.v1", EVERYWHERE},
                                             {"mlp.experts.down_proj", "ffn.experts.mlp.w2", EVERYWHERE},
                                             {"mlp.experts.*.gate_proj", "ffn.experts.mlp.w1_linear.*", EVERYWHERE},
                                             {"mlp.experts.*.up_proj", "ffn.experts.mlp.v1_linear.*", EVERYWHERE},
                                             {"mlp.experts.*.down_proj", "ffn.experts.mlp.w2_linear.*", EVERYWHERE},
                                             {"model.embed_tokens", "model.wte", EVERYWHERE},
                                             {"model.norm", "model.norm_f", EVERYWHERE},
                                             {NULL, NULL, EVERYWHERE}};

/* Writes the limits of Maple's experts, which its code has and config.json has not. */
static void put_maple(void) {
    float limits[MAX_LAYERS];
    for (int l = 0; l < src.n_layer; l++) limits[l] = 7;
    kv_array("swiglu_clamp_exp", GGUF_V_F32, src.n_layer, limits);
}
static const struct renaming arctic_names[] = {{"pre_mlp_layernorm_2", "post_attention_layernorm", EVERYWHERE},
                                               {"post_attention_layernorm", "residual_layernorm", EVERYWHERE},
                                               {"mlp.experts.*.gate_proj", "block_sparse_moe.experts.*.w1", EVERYWHERE},
                                               {"mlp.experts.*.up_proj", "block_sparse_moe.experts.*.w3", EVERYWHERE},
                                               {"mlp.experts.*.down_proj", "block_sparse_moe.experts.*.w2", EVERYWHERE},
                                               {"mlp.gate_proj", "residual_mlp.w1", EVERYWHERE},
                                               {"mlp.up_proj", "residual_mlp.w3", EVERYWHERE},
                                               {"mlp.down_proj", "residual_mlp.w2", EVERYWHERE},
                                               {"mlp.gate", "block_sparse_moe.gate", EVERYWHERE},
                                               {NULL, NULL, EVERYWHERE}};
static const struct renaming maple_names[] = {{"model.embed_tokens", "model.word_embeddings", EVERYWHERE},
                                              {NULL, NULL, EVERYWHERE}};

/* Whether a layer of SmallThinker has a window. */
static bool is_windowed_smallthinker(int layer) {
    return json_element(get_list(src.cfg, "sliding_window_layout"), (size_t)layer) == 1;
}

/* Reads the keys of SmallThinker. GGUF files say neither which layers have windows nor which are rotated: the first of
 * each four layers has no window and no rotation, or no layer has a window and all are rotated. */
static void config_smallthinker(void) {
    struct doc c = src.cfg;
    json_t *windows = get_list(c, "sliding_window_layout"), *turned = get_list(c, "rope_layout");
    bool some = false;
    for (int l = 0; l < src.n_layer; l++) some |= is_windowed_smallthinker(l);
    for (int l = 0; l < src.n_layer; l++) {
        const int64_t window = json_element(windows, (size_t)l);
        expect(c, "sliding_window_layout", window == (some && l % 4),
               some ? "0 for the first of each four layers and 1 for the others" : "0 for each layer");
        expect(c, "rope_layout", json_element(turned, (size_t)l) == (!some || window),
               some ? "the same as sliding_window_layout" : "1 for each layer");
    }
    if (some) src.window = size_of("sliding_window_size");
    if (!get_bool(c, "moe_primary_router_apply_softmax", false)) src.gating = GATING_SIGMOID;
}

static const struct renaming smallthinker_names[] = {
    {"mlp.gate", "block_sparse_moe.primary_router", EVERYWHERE},
    {"mlp.experts.*.gate_proj", "block_sparse_moe.experts.*.gate", EVERYWHERE},
    {"mlp.experts.*.up_proj", "block_sparse_moe.experts.*.up", EVERYWHERE},
    {"mlp.experts.*.down_proj", "block_sparse_moe.experts.*.down", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* How many layers of Llama 4 stand from one mixture to the next. */
static int llama4_step(void) { return (int)get_int(src.cfg, "interleave_moe_layer_step", 1, MAX_LAYERS, 1); }

static bool is_dense_llama4(int layer) { return (layer + 1) % llama4_step() != 0; }

/* Whether a layer of Llama 4 sees a chunk of keys: all but each fourth. */
static bool is_chunked(int layer) { return (layer + 1) % 4 != 0; }

/* Reads the keys of Llama 4. GGUF files do not say which layers are rotated: those that see a chunk. */
static void config_llama4(void) {
    struct doc c = src.cfg;
    json_t *turned = get_list(c, "no_rope_layers"), *kinds = get_list(c, "layer_types"),
           *moe = get_list(c, "moe_layers");
    size_t n_moe = 0;
    for (int l = 0; l < src.n_layer; l++) {
        const char *type = json_string_value(json_array_get(kinds, (size_t)l));
        const char *expected = is_chunked(l) ? "chunked_attention" : "full_attention";
        expect(c, "layer_types", !kinds || (type && !strcmp(type, expected)),
               "\"full_attention\" for each fourth layer and \"chunked_attention\" for the others");
        expect(c, "no_rope_layers", !json_array_size(turned) || json_element(turned, (size_t)l) == is_chunked(l),
               "0 for each fourth layer and 1 for the others");
        if (is_dense_llama4(l)) continue;
        expect(c, "moe_layers", !moe || json_element(moe, n_moe) == l,
               "the layers that interleave_moe_layer_step says, counted from 0");
        n_moe++;
    }
    expect(c, "moe_layers", !moe || json_array_size(moe) == n_moe, fmt("%zu layers", n_moe));
    src.window = (size_t)get_int(c, "attention_chunk_size", 1, MAX_TRAINED, 8192);
}

/* Writes which layers have experts, how queries of layers without a rotation grow, and whether heads of the others are
 * normed. Files of llama.cpp have none of the latter. */
static void put_llama4(void) {
    struct doc c = src.cfg;
    const json_t *tuning = get(c, "attn_temperature_tuning"); /* releases have true or 4 */
    const bool tuned = !tuning || json_is_true(tuning) || (json_is_integer(tuning) && json_integer_value(tuning));
    kv_u32("interleave_moe_layer_step", (size_t)llama4_step());
    kv_num(c, "attn_scale", tuned ? get_num(c, "attn_scale", 0.1) : 0, "attention.temperature_scale");
    kv_u32("attention.temperature_length", (size_t)get_int(c, "floor_scale", 1, INT32_MAX, 8192));
    gguf_put_bool(&writer, arch_key("attention.use_qk_norm"), get_bool(c, "use_qk_norm", true));
}

static const struct renaming llama4_names[] = {{"mlp.gate", "feed_forward.router", EVERYWHERE},
                                               {"mlp.shared_experts", "feed_forward.shared_expert", EVERYWHERE},
                                               {"mlp", "feed_forward", EVERYWHERE},
                                               {NULL, NULL, EVERYWHERE}};

/* Laguna: mlp_layer_types or mlp_only_layers list the dense layers; without them the first one is. */
static bool is_dense_laguna(int layer) {
    json_t *list = get_list(src.cfg, "mlp_layer_types");
    const char *type = json_string_value(json_array_get(list, (size_t)layer));
    if (!list) return get(src.cfg, "mlp_only_layers") ? is_dense_qwen3(layer) : layer < 1;
    expect(src.cfg, "mlp_layer_types", type && one_of(type, "dense sparse"),
           fmt("%d times \"dense\" or \"sparse\"", src.n_layer));
    return !strcmp(type, "dense");
}

/* Mellum 2: mlp_layer_types lists the dense layers; without it there are none. */
static bool is_dense_mellum(int layer) { return get(src.cfg, "mlp_layer_types") && is_dense_laguna(layer); }

/* Reads the keys of Mellum 2. */
static void config_mellum(void) {
    if (get(src.cfg, "num_mtp_layers")) src.n_mtp = (int)get_int(src.cfg, "num_mtp_layers", 0, 1, REQUIRED);
}

/* Whether Laguna's layer has a gate for every value instead of every head. */
static bool gates_values(int layer) {
    struct doc c = src.cfg;
    json_t *list = get_list(c, "gating_types"), *v = list ? json_array_get(list, (size_t)layer) : get(c, "gating");
    const char *type = json_string_value(v);
    const bool values = type && one_of(type, "per-element per_element");
    expect(c, list ? "gating_types" : "gating",
           values || (type && one_of(type, "per-head per_head")) || (!list && (!v || json_is_true(v))),
           "\"per-head\" or \"per-element\"");
    return values;
}

static void config_laguna(void) {
    struct doc c = src.cfg;
    json_t *list = get_list(c, "num_attention_heads_per_layer");
    count_leading_dense();
    expect(c, "num_attention_heads_per_layer", !list || json_array_size(list) == (size_t)src.n_layer,
           fmt("%d numbers", src.n_layer));
    for (int l = 0; l < src.n_layer; l++) {
        const int64_t heads = list ? json_element(list, (size_t)l) : src.n_head;
        expect(c, "num_attention_heads_per_layer", heads > 0 && heads <= 65536, "numbers from 1 to 65536");
        gates_values(l);
    }
}
static const struct renaming laguna_names[] = {
    {"mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias", EVERYWHERE},
    {"mlp.shared_experts", "mlp.shared_expert", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* ============================================================================================================
 * Families: Kimi delta attention
 *
 * Kimi Linear, Ling 3 and GLM-5.3-Flash.
 * ============================================================================================================ */

/* Writes the sizes of Kimi delta attention. */
static void put_kda(int64_t head_dim, int64_t taps) {
    kv_u32("kda.head_dim", (size_t)head_dim);
    kv_u32("ssm.conv_kernel", (size_t)taps);
}

/* Returns a size of Kimi Linear's linear attention, which linear_attn_config has, or a key of its own in the words of
 * transformers. */
static int64_t linear_size(const char *nested, const char *flat, int64_t dflt) {
    struct doc s = get_obj(src.cfg, "linear_attn_config");
    return get_int(s.obj ? s : src.cfg, s.obj ? nested : flat, 1, 65536, dflt);
}

/* Whether a list of layers, counted from 1, has this one. */
static bool lists_layer(struct doc d, const char *key, int layer) {
    json_t *list = get_list(d, key);
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_element(list, i) == layer + 1) return true;
    return false;
}

/* Whether a layer of Kimi Linear has Kimi delta attention: linear_attn_config of the releases lists both kinds, or
 * layer_types of transformers. */
static bool is_kda_kimi(int layer) {
    struct doc c = src.cfg, s = get_obj(c, "linear_attn_config");
    if (!s.obj) {
        expect(c, "layer_types", get(c, "layer_types"), "a list, because there is no linear_attn_config");
        return is_recurrent(layer);
    }
    const bool kda = lists_layer(s, "kda_layers", layer);
    expect(s, "kda_layers", kda != lists_layer(s, "full_attn_layers", layer),
           fmt("layer %d, counted from 1, either in this list or in full_attn_layers", layer + 1));
    return kda;
}

/* Dies unless config.json has as many heads of linear attention as of latent attention. */
static void check_linear_heads(void) {
    struct doc c = src.cfg, s = get_obj(c, "linear_attn_config");
    expect(s.obj ? s : c, s.obj ? "num_heads" : "linear_num_heads",
           linear_size("num_heads", "linear_num_heads", REQUIRED) == src.n_head,
           fmt("%d as num_attention_heads (GGUF files have one number)", src.n_head));
}

static void put_kimi_linear(void) {
    put_kda(linear_size("head_dim", "linear_head_dim", REQUIRED),
            linear_size("short_conv_kernel_size", "linear_conv_kernel_dim", 4));
}

/* Reads the keys of Kimi Linear. */
static void config_kimi_linear(void) {
    config_leading_dense();
    src.n_group = (int)get_int(src.cfg, either("n_group", "num_expert_group"), 1, MAX_EXPERTS, 1);
    check_linear_heads();
}

static const struct renaming kimi_linear_names[] = {
    {"mlp.experts.*.gate_proj", "block_sparse_moe.experts.*.w1", EVERYWHERE},
    {"mlp.experts.*.up_proj", "block_sparse_moe.experts.*.w3", EVERYWHERE},
    {"mlp.experts.*.down_proj", "block_sparse_moe.experts.*.w2", EVERYWHERE},
    {"mlp.gate", "block_sparse_moe.gate", EVERYWHERE},
    {"mlp.shared_experts", "block_sparse_moe.shared_experts", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

static const struct renaming kimi_k3_names[] = {
    {"mlp.experts.*.gate_proj", "block_sparse_moe.experts.*.w1", EVERYWHERE},
    {"mlp.experts.*.up_proj", "block_sparse_moe.experts.*.w3", EVERYWHERE},
    {"mlp.experts.*.down_proj", "block_sparse_moe.experts.*.w2", EVERYWHERE},
    {"mlp.gate", "block_sparse_moe.gate", EVERYWHERE},
    {"mlp.shared_experts", "block_sparse_moe.shared_experts", EVERYWHERE},
    {"mlp.routed_expert_down_proj", "block_sparse_moe.routed_expert_down_proj", EVERYWHERE},
    {"mlp.routed_expert_norm", "block_sparse_moe.routed_expert_norm", EVERYWHERE},
    {"mlp.routed_expert_up_proj", "block_sparse_moe.routed_expert_up_proj", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* Reads the keys of Kimi-K3. GGUF files have no word on a single group of experts. */
static void config_kimi_k3(void) {
    config_kimi_linear();
    if (src.n_group == 1) src.n_group = 0;
}

/* Writes the sizes of Kimi-K3. */
static void put_kimi_k3(void) {
    struct doc c = src.cfg, s = get_obj(c, "linear_attn_config");
    put_kimi_linear();
    if (get(s, "gate_lower_bound"))
        kv_num(s, "gate_lower_bound", get_num(s, "gate_lower_bound", NAN), "kda.gate_lower_bound");
    kv_num(c, "activation_situ_beta", get_num(c, "activation_situ_beta", NAN), "activation.situ_beta");
    kv_num(c, "activation_situ_linear_beta", get_num(c, "activation_situ_linear_beta", NAN),
           "activation.situ_linear_beta");
    kv_u32("expert_latent_length", size_of("routed_expert_hidden_size"));
    kv_u32("attn_res.block_size", size_of("attn_res_block_size"));
}

/* Whether a layer of Ling 3 has Kimi delta attention: all but the last of a group, or those of layer_types. */
static bool is_kda_bailing(int layer) {
    struct doc c = src.cfg;
    if (get(c, "layer_types")) return is_recurrent(layer);
    const int group = (int)get_int(c, "layer_group_size", 1, MAX_LAYERS, REQUIRED);
    expect(c, "layer_group_size", src.n_layer % group == 0, fmt("a divisor of %d layers", src.n_layer));
    return layer < src.n_layer && (layer + 1) % group != 0;
}

static void put_bailing(void) {
    struct doc c = src.cfg;
    put_kda(get_int(c, either("linear_head_dim", "head_dim"), 2, 512, REQUIRED),
            get_int(c, either("linear_conv_kernel_dim", "short_conv_kernel_size"), 1, 8, 4));
    gguf_put_bool(&writer, arch_key("kda.safe_gate"), true);
    kv_num(c, "kda_lower_bound", get_num(c, "kda_lower_bound", -5), "kda.gate_lower_bound");
    put_limits("expert_swiglu_limit_list", "swiglu_clamp_exp");
    put_limits("share_expert_swiglu_limit_list", "swiglu_clamp_shexp");
}

/* Reads the keys of Ling 3. Ling 2.5 has the same model_type. */
static void config_bailing(void) {
    struct doc c = src.cfg;
    const char *name = json_string_value(json_array_get(get_list(src.top, "architectures"), 0));
    expect(src.top, "architectures", name && one_of(name, "BailingMoeV3ForCausalLM BailingHybridForCausalLM"),
           "BailingMoeV3ForCausalLM (moe does not compute the lightning attention of BailingMoeV2_5ForCausalLM)");
    config_deepseek_experts();
    if (get(c, "moe_shared_expert_intermediate_size")) src.shared_key = "moe_shared_expert_intermediate_size";
}

/* Whether a layer of GLM-5.3-Flash has Kimi delta attention, by layer_types. The others have latent attention. */
static bool is_kda_glm(int layer) {
    const char *known = "linear_attention indexed_attention full_attention", *type;
    json_t *list = get_list(src.cfg, "layer_types");
    if (layer >= src.n_layer) return false;
    type = json_string_value(json_array_get(list, (size_t)layer));
    expect(src.cfg, "layer_types", json_array_size(list) == (size_t)src.n_layer && type && one_of(type, known),
           fmt("\"linear_attention\" or \"indexed_attention\" for each of %d layers", src.n_layer));
    return !strcmp(type, "linear_attention");
}

/* Whether a layer of GLM-5.3-Flash has an indexer. */
static bool has_indexer_glm_next(int layer) { return !is_kda_glm(layer) && has_indexer_glm(layer); }

/* Writes the sizes of GLM-5.3-Flash. Without a lower bound it is that of transformers, -5, and null in the words of
 * transformers, or beside "safe_gate": false, means that there is none. */
static void put_glm5_next(void) {
    struct doc c = src.cfg, s = get_obj(c, "linear_attn_config");
    const char *key = s.obj ? "gate_lower_bound" : "linear_lower_bound";
    struct doc d = s.obj ? s : c;
    const bool null = json_is_null(json_object_get(d.obj, key));
    put_kimi_linear();
    if (!null || (s.obj && get_bool(s, "safe_gate", true))) kv_num(d, key, get_num(d, key, -5), "kda.gate_lower_bound");
    put_glm_dsa();
    kv_u32("attention.indexer.kpool", size_of("index_kpool"));
    gguf_put_bool(&writer, arch_key("attention.indexer.kpool_select_tail"), true);
    put_limit(2);
    put_hyper();
}

/* Reads the keys of GLM-5.3-Flash. */
static void config_glm5_next(void) {
    struct doc c = src.cfg;
    int first = 0;
    config_indexer();
    check_linear_heads();
    while (first < src.n_layer && is_kda_glm(first)) first++;
    expect(c, indexer_key(), first == src.n_layer || has_indexer_glm(first),
           fmt("an indexer in layer %d, the first of latent attention", first));
    expect(c, "index_topk", get_int(c, "index_topk", 1, MAX_TRAINED, REQUIRED) % (int64_t)size_of("index_kpool") == 0,
           "a multiple of index_kpool");
}

static const struct renaming glm5_next_names[] = {{"attn_hc.fn", "hc_attn_fn", EVERYWHERE},
                                                  {"attn_hc.base", "hc_attn_base", EVERYWHERE},
                                                  {"attn_hc.scale", "hc_attn_scale", EVERYWHERE},
                                                  {"ffn_hc.fn", "hc_ffn_fn", EVERYWHERE},
                                                  {"ffn_hc.base", "hc_ffn_base", EVERYWHERE},
                                                  {"ffn_hc.scale", "hc_ffn_scale", EVERYWHERE},
                                                  {NULL, NULL, EVERYWHERE}};

/* Reads the keys of Ling 2 and Sarvam. The mean that Sarvam takes off the biases of the choice changes no choice. */
static void config_ling(void) {
    config_leading_dense();
    src.n_group = (int)get_int(src.cfg, "n_group", 1, MAX_EXPERTS, 1);
    src.qkv_chunks = 1;
    if (get(src.cfg, "moe_shared_expert_intermediate_size")) src.shared_key = "moe_shared_expert_intermediate_size";
}

/* Reads the keys of Ling 1. */
static void config_ling1(void) {
    config_leading_dense();
    src.qkv_chunks = 1;
    src.normed_head = get_bool(src.cfg, "norm_head", false);
    expect(src.cfg, "norm_head", !src.normed_head || !src.tied, "false, because of tie_word_embeddings");
}

static const struct renaming ling_names[] = {{"self_attn.qkv_proj", "attention.query_key_value", EVERYWHERE},
                                             {"self_attn.o_proj", "attention.dense", EVERYWHERE},
                                             {"self_attn.q_norm", "attention.query_layernorm", EVERYWHERE},
                                             {"self_attn.k_norm", "attention.key_layernorm", EVERYWHERE},
                                             {"model.embed_tokens", "model.word_embeddings", EVERYWHERE},
                                             {"mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias", EVERYWHERE},
                                             {"layer_output_norm", "final_layernorm", PREDICTION},
                                             {NULL, NULL, EVERYWHERE}};

static const struct renaming bailing_names[] = {
    {"self_attn.o_proj", "attention.dense", EVERYWHERE},
    {"self_attn", "attention", EVERYWHERE},
    {"model.embed_tokens", "model.word_embeddings", EVERYWHERE},
    {"mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias", EVERYWHERE},
    {"layer_output_norm", "final_layernorm", PREDICTION},
    {NULL, NULL, EVERYWHERE}};

/* ============================================================================================================
 * Families: MiMo-V2, MiniMax-M3, the table
 *
 * The last families, and the table of all.
 * ============================================================================================================ */

static bool is_dense_mimo(int layer) { return !listed_bit(src.cfg, "moe_layer_freq", layer); }

/* Whether a block has a window: those for multi-token prediction do. */
static bool is_windowed_mimo(int layer) {
    return layer >= src.n_layer || listed_bit(src.cfg, "hybrid_layer_pattern", layer);
}

static void put_mimo(void) {
    if (get(src.cfg, "attention_value_scale"))
        kv_num(src.cfg, "attention_value_scale", get_num(src.cfg, "attention_value_scale", NAN),
               "attention.value_scale");
}

/* Reads the keys of MiMo-V2. Its layers for multi-token prediction have windows. */
static void config_mimo(void) {
    struct doc c = src.cfg;
    src.window = (size_t)get_limit(c, "sliding_window", MAX_TRAINED, 0);
    expect(c, "sliding_window", src.window, "a number above 0");
    src.window_heads[0] = (int)get_int(c, "swa_num_attention_heads", 1, 65536, src.n_head);
    src.window_heads[1] = (int)get_int(c, "swa_num_key_value_heads", 1, 65536, REQUIRED);
    src.list_heads = src.window_heads[0] != src.n_head;
    src.qkv_chunks = (size_t)src.n_head_kv;
    src.sinks = get_bool(c, "add_full_attention_sink_bias", false);
    src.window_sinks = get_bool(c, "add_swa_attention_sink_bias", false);
    src.n_group = (int)get_int(c, "n_group", 1, MAX_EXPERTS, 1);
    expect(c, "sliding_window_size",
           get_limit(c, "sliding_window_size", MAX_TRAINED, (int64_t)src.window) == (int64_t)src.window,
           fmt("%zu as sliding_window", src.window));
    expect(c, "swa_head_dim", get_int(c, "swa_head_dim", 1, 65536, (int64_t)head_k()) == (int64_t)head_k(),
           fmt("%zu as head_dim", head_k()));
    expect(c, "swa_v_head_dim", get_int(c, "swa_v_head_dim", 1, 65536, (int64_t)head_v()) == (int64_t)head_v(),
           fmt("%zu as v_head_dim", head_v()));
}
static const struct renaming mimo_names[] = {{"self_attn.sinks", "self_attn.attention_sink_bias", EVERYWHERE},
                                             {"post_attention_layernorm", "pre_mlp_layernorm", PREDICTION},
                                             {"layer_output_norm", "final_layernorm", PREDICTION},
                                             {NULL, NULL, EVERYWHERE}};

/* MiniMax-M3: mlp_layer_types, as transformers writes it, or moe_layer_freq lists the dense layers. */
static bool is_dense_minimax(int layer) {
    return get(src.cfg, "mlp_layer_types") ? is_dense_laguna(layer) : !listed_bit(src.cfg, "moe_layer_freq", layer);
}

/* Whether a layer of MiniMax-M3 has an indexer. */
static bool has_indexer_minimax(int layer) {
    struct doc c = src.cfg;
    json_t *list = get_list(c, "layer_types"), *v = json_array_get(list, (size_t)layer);
    if (!list) return listed_bit(get_obj(c, "sparse_attention_config"), "sparse_attention_freq", layer);
    const char *type = json_string_value(v);
    expect(c, "layer_types",
           json_array_size(list) == (size_t)src.n_layer && type && one_of(type, "full_attention minimax_m3_sparse"),
           fmt("%d times \"full_attention\" or \"minimax_m3_sparse\"", src.n_layer));
    return !strcmp(type, "minimax_m3_sparse");
}

/* Returns a size of MiniMax-M3's indexer, which sparse_attention_config has, or a key of its own in the words of
 * transformers. */
static size_t index_size(const char *nested, const char *flat, int64_t lo, int64_t hi) {
    struct doc s = get_obj(src.cfg, "sparse_attention_config");
    const bool own = !get(s, nested);
    return (size_t)get_int(own ? src.cfg : s, own ? flat : nested, lo, hi, REQUIRED);
}

/* Checks what else MiniMax-M3's config.json says about attention. */
static void check_minimax_attention(void) {
    struct doc s = get_obj(src.cfg, "sparse_attention_config");
    check_fixed(s, "use_sparse_attention true sparse_score_type max sparse_init_block 0");
    for (int l = 0; l < src.n_layer; l++) {
        if (!has_indexer_minimax(l) || !get(s, "sparse_disable_index_value")) continue;
        expect(s, "sparse_disable_index_value", listed_bit(s, "sparse_disable_index_value", l),
               fmt("1 for layer %d, which has an indexer", l));
    }
}

static void put_minimax_m3(void) {
    const size_t block = index_size("sparse_block_size", "index_block_size", 1, 1 << 16);
    const size_t chosen = index_size("sparse_topk_blocks", "index_topk_blocks", 1, MAX_TRAINED / (int64_t)block);
    kv_u32("attention.indexer.head_count", index_size("sparse_num_index_heads", "index_n_heads", 1, 1024));
    kv_u32("attention.indexer.key_length", index_size("sparse_index_dim", "index_head_dim", 2, 1024));
    kv_u32("attention.indexer.top_k", chosen);
    kv_u32("attention.indexer.block_size", block);
    kv_u32("attention.indexer.local_blocks",
           index_size("sparse_local_block", "index_local_blocks", 1, (int64_t)chosen));
}

/* Reads the keys of MiniMax-M3. Its MTP layers are not in the releases. */
static void config_minimax_m3(void) {
    struct doc c = src.cfg;
    const size_t heads = index_size("sparse_num_index_heads", "index_n_heads", 1, 1024);
    const size_t block = index_size("sparse_block_size", "index_block_size", 1, 1 << 16);
    const bool nested = get(get_obj(c, "sparse_attention_config"), "sparse_block_size");
    count_leading_dense();
    expect(nested ? get_obj(c, "sparse_attention_config") : c, nested ? "sparse_block_size" : "index_block_size",
           !(block & (block - 1)), "a power of two");
    src.shared_width = size_of(src.shared_key) != size_of(src.width_key);
    if (get(c, "rotary_dim")) {
        const size_t n = (size_t)get_int(c, "rotary_dim", 2, (int64_t)head_k(), REQUIRED);
        src.rotary = (double)n / (double)head_k();
        expect(c, "rotary_dim", rotated(rope_doc(false), false) == n, "head_dim x partial_rotary_factor");
    }
    check_minimax_attention();
    expect(c, "num_key_value_heads", (size_t)src.n_head_kv == heads, fmt("%zu, as the indexer has heads", heads));
}

/* ============================================================================================================
 * Families: Nemotron-3
 *
 * Layers of one half: Mamba-2, attention without a rotation, experts or a dense feed-forward.
 * ============================================================================================================ */

/* Returns a letter for each layer of Nemotron-3, see struct checkpoint's `kinds`: of a list of words, the releases' or
 * transformers', or of a text. The list counts. */
static const char *kinds_nemotron(void) {
    static const char *const words[] = {"Mmamba", "Mlinear_attention", "*attention", "*full_attention", "Emoe", "-mlp"};
    static const char expected[] = "\"mamba\", \"attention\", \"moe\" or \"mlp\" for each layer";
    struct doc c = src.cfg;
    const char *key = get(c, "layers_block_type") ? "layers_block_type" : "layer_types";
    json_t *v, *list = get_list(c, key);
    const char *text = get_str(c, "hybrid_override_pattern", NULL);
    char *kinds = NULL;
    size_t i;
    if (!list) {
        expect(c, "hybrid_override_pattern", text && *text && strspn(text, "M*E-") == strlen(text),
               "a text of M, *, E and -, or layers_block_type");
        sb_puts(&kinds, text);
    }
    json_array_foreach(list, i, v) {
        const char *word = json_is_string(v) ? json_string_value(v) : "";
        size_t k = 0;
        while (k < COUNT(words) && strcmp(words[k] + 1, word)) k++;
        expect(c, key, k < COUNT(words), expected);
        arrput(kinds, *words[k]);
    }
    expect(c, key, kinds != NULL, expected);
    if (strchr(sb_cstr(&kinds), 'E')) return kinds;
    src.arch = "nemotron_h"; /* the dense models */
    src.experts_key = src.shared_key = src.mtp_key = src.scaling_factor = NULL;
    src.n_shared = 0;
    return kinds;
}

static bool is_dense_nemotron(int layer) { return !has_kind(layer, "E"); }

/* Reads the keys of Nemotron-3 and of its dense predecessors. Its MTP layer is attention, then experts. */
static void config_nemotron(void) {
    struct doc c = src.cfg;
    json_t *list = get_list(c, "mtp_layers_block_type");
    const char *first = json_string_value(json_array_get(list, 0)), *then = json_string_value(json_array_get(list, 1));
    const bool listed = json_array_size(list) == 2 && first && one_of(first, "attention full_attention") && then &&
                        !strcmp(then, "moe");
    expect(c, "num_hidden_layers", strlen(src.kinds) == (size_t)src.n_layer,
           fmt("%zu, as kinds of layers are listed", strlen(src.kinds)));
    if (list ? !listed : strcmp(get_str(c, "mtp_hybrid_override_pattern", "*E"), "*E"))
        src.mtp_why = "moe runs such layers of attention, then experts";
    if (src.experts_key) src.n_group = (int)get_int(c, "n_group", 1, MAX_EXPERTS, 1);
}

/* Writes the sizes of Mamba-2, the width of every layer's feed-forward, and that of what experts read. */
static void put_nemotron(void) {
    struct doc c = src.cfg;
    const size_t heads = size_of("mamba_num_heads"), groups = size_of("n_groups");
    int32_t n_ff[MAX_LAYERS];
    expect(c, "mamba_num_heads", heads % groups == 0, fmt("a multiple of the %zu of n_groups", groups));
    kv_u32("ssm.conv_kernel", size_of("conv_kernel"));
    kv_u32("ssm.state_size", size_of("ssm_state_size"));
    kv_u32("ssm.group_count", groups);
    kv_u32("ssm.time_step_rank", heads);
    kv_u32("ssm.inner_size", heads * size_of("mamba_head_dim"));
    for (int l = 0; l < n_blocks(); l++)
        n_ff[l] = !has_kind(l, "E-") ? 0 : ff_width(has_kind(l, "E") ? src.width_key : src.dense_key, 1);
    kv_array("feed_forward_length", GGUF_V_I32, n_blocks(), n_ff);
    if (get(c, "moe_latent_size")) kv_u32("moe_latent_size", size_of("moe_latent_size"));
    gguf_put_f32(&writer, arch_key("attention.layer_norm_epsilon"), (float)get_num(c, src.eps_key, src.eps));
}

static const struct renaming nemotron_names[] = {{"model.embed_tokens", "model.embeddings", EVERYWHERE},
                                                 {"model.norm", "model.norm_f", EVERYWHERE},
                                                 {"input_layernorm", "norm", EVERYWHERE},
                                                 {"self_attn", "mixer", EVERYWHERE},
                                                 {"mamba", "mixer", EVERYWHERE},
                                                 {"mlp", "mixer", SECOND},
                                                 {"mlp", "mixer", EVERYWHERE},
                                                 {"post_attention_layernorm", "norm", SECOND},
                                                 {"shared_head.norm", "final_layernorm", SECOND},
                                                 {NULL, NULL, EVERYWHERE}};

/* ============================================================================================================
 * Families: LFM2
 *
 * Gated convolutions, and attention in the layers that layer_types says.
 * ============================================================================================================ */

/* Whether a layer of LFM2 has a gated convolution. */
static bool is_conv_lfm2(int layer) {
    json_t *list = get_list(src.cfg, "layer_types");
    const char *type = json_string_value(json_array_get(list, (size_t)layer));
    expect(src.cfg, "layer_types",
           json_array_size(list) == (size_t)src.n_layer && type && one_of(type, "conv full_attention"),
           fmt("\"conv\" or \"full_attention\" for each of %d layers", src.n_layer));
    return !strcmp(type, "conv");
}

/* Reads the keys of LFM2. The output matrix is the embedding unless config.json says otherwise. */
static void config_lfm2(void) {
    src.tied = get_bool(src.cfg, either("tie_word_embeddings", "tie_embedding"), true);
    src.first_dense = (int)get_int(src.cfg, "num_dense_layers", 0, MAX_LAYERS, 2);
}

static void put_lfm2(void) { kv_u32("shortconv.l_cache", (size_t)get_int(src.cfg, "conv_L_cache", 1, 8, 3)); }

static const struct renaming lfm2_names[] = {
    {"model.norm", "model.embedding_norm", EVERYWHERE},
    {"input_layernorm", "operator_norm", EVERYWHERE},
    {"post_attention_layernorm", "ffn_norm", EVERYWHERE},
    {"self_attn.q_norm", "self_attn.q_layernorm", EVERYWHERE},
    {"self_attn.k_norm", "self_attn.k_layernorm", EVERYWHERE},
    {"self_attn.o_proj", "self_attn.out_proj", EVERYWHERE},
    {"mlp.gate.e_score_correction_bias", "feed_forward.expert_bias", EVERYWHERE},
    {"mlp.gate", "feed_forward.gate", EVERYWHERE},
    {"mlp.gate_proj", "feed_forward.w1", EVERYWHERE},
    {"mlp.up_proj", "feed_forward.w3", EVERYWHERE},
    {"mlp.down_proj", "feed_forward.w2", EVERYWHERE},
    {"mlp.experts.*.gate_proj", "feed_forward.experts.*.w1", EVERYWHERE},
    {"mlp.experts.*.up_proj", "feed_forward.experts.*.w3", EVERYWHERE},
    {"mlp.experts.*.down_proj", "feed_forward.experts.*.w2", EVERYWHERE},
    {NULL, NULL, EVERYWHERE}};

/* ============================================================================================================
 * Families: Inkling 2
 *
 * Attention with a bias by distance, blocks of layers as the residual, layers in a loop. llama.cpp had no keys and names
 * for these when the ones here were made.
 * ============================================================================================================ */

/* Whether a layer of Inkling 2 has a window: as layer_types says, or all but each sixth. */
static bool is_windowed_inkling(int layer) {
    json_t *list = get_list(src.cfg, "layer_types");
    const char *type = list              ? json_string_value(json_array_get(list, (size_t)layer))
                       : (layer + 1) % 6 ? "hybrid_sliding"
                                         : "hybrid";
    expect(src.cfg, "layer_types", type && one_of(type, "hybrid hybrid_sliding"),
           "\"hybrid\" or \"hybrid_sliding\" for each layer");
    return !strcmp(type, "hybrid_sliding");
}

/* Reads the keys of Inkling 2. */
static void config_inkling2(void) {
    struct doc c = src.cfg;
    src.window = (size_t)get_int(c, "sliding_window_size", 1, MAX_TRAINED, 1024);
    const struct {
        const char *key;
        int64_t value;
    } same[] = {{"swa_num_attention_heads", src.n_head},
                {"swa_num_key_value_heads", src.n_head_kv},
                {"swa_head_dim", (int64_t)head_k()}};
    for (size_t i = 0; i < COUNT(same); i++)
        expect(c, same[i].key, get_int(c, same[i].key, 1, 65536, same[i].value) == same[i].value,
               fmt("%lld, as in layers without a window", (long long)same[i].value));
}

/* Writes the sizes of the loop: the keys of the text model, or those of its loop_config. */
static void put_loop(void) {
    struct doc c = src.cfg, loop = get_obj(c, "loop_config");
    const bool own = !loop.obj;
    if (own && !get(c, "loop_num_passes")) return;
    if (own) loop = c;
    const int64_t first = get_int(loop, own ? "loop_layer_index_start" : "core_start", 0, MAX_LAYERS, 6);
    const int64_t end = get_int(loop, own ? "loop_layer_index_end" : "core_end", first, MAX_LAYERS, 18);
    const int64_t passes = get_int(loop, own ? "loop_num_passes" : "num_passes", 2, MAX_LAYERS, 3);
    kv_u32("loop.first_layer", (size_t)first);
    kv_u32("loop.layer_count", (size_t)(end - first));
    kv_u32("loop.pass_count", (size_t)passes);
    kv_u32("loop.gate_rank", (size_t)get_int(loop, own ? "loop_gate_rank" : "gate_rank", 1, MAX_WIDTH, 64));
}

static void put_inkling2(void) {
    struct doc c = src.cfg;
    kv_u32("attention.conv_kernel", (size_t)get_int(c, "conv_kernel_size", 1, 8, 4));
    kv_u32("attention.relative.head_length", (size_t)get_int(c, "d_rel", 1, 256, 16));
    kv_u32("attention.relative.extent", (size_t)get_int(c, "rel_extent", 1, 1 << 16, 1024));
    kv_num(c, "rel_l2_clip_threshold", get_num(c, "rel_l2_clip_threshold", 8), "attention.relative.clip");
    kv_num(c, "qk_l2_clip_threshold", get_num(c, "qk_l2_clip_threshold", 16 * M_SQRT2), "attention.clip");
    kv_num(c, "log_scaling_alpha", get_num(c, "log_scaling_alpha", 0.1), "attention.temperature_scale");
    kv_u32("attention.temperature_length", (size_t)get_int(c, "log_scaling_n_floor", 1, INT32_MAX, REQUIRED));
    kv_num(c, "mlp_gate_softcap", get_num(c, "mlp_gate_softcap", 4), "ffn_gate_softcap");
    kv_num(c, "mlp_up_softcap", get_num(c, "mlp_up_softcap", 25), "ffn_up_softcap");
    kv_num(c, "final_logit_softcapping", get_num(c, "final_logit_softcapping", 30), "final_logit_softcapping");
    kv_u32("attn_res.block_size", (size_t)get_int(c, "n_layers_per_attn_res_block", 1, MAX_LAYERS, 6));
    put_loop();
}

static const struct renaming inkling2_names[] = {{"model.embed_tokens", "model.embed", EVERYWHERE},
                                                 {"lm_head", "model.unembed", EVERYWHERE},
                                                 {"self_attn.g_proj", "attn.gate_attn", EVERYWHERE},
                                                 {"post_attention_layernorm", "mlp_norm", EVERYWHERE},
                                                 {"mlp.gate.e_score_correction_bias", "mlp.gate.bias", EVERYWHERE},
                                                 {"mlp.experts.gate_up_proj", "mlp.experts.w13_weight", EVERYWHERE},
                                                 {"mlp.experts.down_proj", "mlp.experts.w2_weight", EVERYWHERE},
                                                 {NULL, NULL, EVERYWHERE}};

/* What several rows of the table have in common. */
/* clang-format off */
static const char bias_name[] = "exp_probs_b.bias"; /* in GGUF */
static const int32_t qwen35_sections[4] = {11, 11, 10, 0}, qwen3_vl_sections[4] = {24, 20, 20, 0};
static const char fixed_delta[] = "norm_topk_prob true attn_output_gate true use_sliding_window false "
                                  "mtp_use_dedicated_embeddings false",
                  fixed_deepseek[] = "moe_layer_freq 1 rope_interleave true",
                  fixed_m3[] = "use_qk_norm true qk_norm_type per_head use_gemma_norm true attention_output_gate false "
                               "n_shared_experts 1 use_routing_bias true scoring_func sigmoid swiglu_limit 7 "
                               "swiglu_alpha 1.702 swiglu_beta 1",
                  fixed_bailing[] =
                      "gated_attention_proj_granularity_type head_wise no_kda_lora true use_kda_lora false "
                      "kda_safe_gate true mtp_use_kda false num_kv_heads_for_linear_attn 0 use_mla_nope false "
                      "rope_interleave true moe_router_enable_expert_bias true score_function sigmoid group_norm_size 1 "
                      "use_bias false use_qkv_bias false use_nGPT false up_proj_norm false value_norm false "
                      "scale_router_input false pregate_inference false",
                  fixed_ling[] = "score_function sigmoid moe_router_enable_expert_bias true use_qk_norm true use_bias false "
                                 "use_qkv_bias false norm_head false use_sliding_window false",
                  fixed_mimo[] = "scoring_func sigmoid topk_method noaux_tc n_shared_experts 0",
                  fixed_nemotron[] = "mlp_hidden_act relu2 mamba_hidden_act silu use_conv_bias true use_bias false "
                                     "mlp_bias false mamba_proj_bias false n_shared_experts 1 sliding_window none "
                                     "block_configs none";

#define LATENT .mixer = MIXER_MLA, .v_head_key = "v_head_dim"
#define DEEPSEEK_EXPERTS                                                                                       \
    .is_dense = is_dense_leading, .leads = true, .experts_key = "n_routed_experts",                            \
    .shared_key = "moe_intermediate_size", .shared_count = "n_shared_experts",                                 \
    .mtp_key = "num_nextn_predict_layers", .norm_topk_prob = true, .scaling_factor = "routed_scaling_factor"
#define QWEN_HYBRID                                                                                            \
    .mtp_key = "mtp_num_hidden_layers", .mtp_beside = true, .rope_theta = 10000, .rotary = 0.25,               \
    .partial = true, .zero_centered = true
#define QWEN_EXPERTS                                                                                           \
    .experts_key = "num_experts", .shared_key = "shared_expert_intermediate_size", .n_shared = 1,              \
    .shared_gate = true, .shared_width = true, .norm_topk_prob = true
#define QWEN_DELTA        QWEN_HYBRID, .renaming = qwen_next_names, .put = put_delta
#define QWEN_DELTA_EXPERTS QWEN_DELTA, QWEN_EXPERTS
#define MINIMAX_M3                                                                                             \
    .arch = "minimax-m3", .renaming = minimax_names, .is_dense = is_dense_minimax, .leads = true,              \
    .has_indexer = has_indexer_minimax, .experts_key = "num_local_experts", .experts_other = "num_experts",    \
    .dense_key = "dense_intermediate_size", .width_key = "intermediate_size",                                  \
    .shared_key = "shared_intermediate_size", .n_shared = 1, .router_bias = bias_name, .norm_key = "",         \
    .norm_topk_prob = true, .partial = true, .zero_centered = true, .scaling_factor = "routed_scaling_factor", \
    .scaling_optional = true, .put = put_minimax_m3
#define MIMO                                                                                                   \
    .arch = "mimo2", .renaming = mimo_names, .is_dense = is_dense_mimo, .is_windowed = is_windowed_mimo,       \
    .window_theta = "swa_rope_theta", .experts_key = "n_routed_experts", .v_head_key = "v_head_dim",           \
    .list_kv = true, .mtp = "model.mtp.", .mtp_dense = true, .mtp_unsaid = true, .window_rope = true,          \
    .partial = true, .norm_topk_prob = true, .router_bias = bias_name,                                         \
    .scaling_factor = "routed_scaling_factor", .scaling_optional = true, .eps_key = "layernorm_epsilon",       \
    .eps = 1e-5, .put = put_mimo

#define GRANITE                                                                                                \
    .renaming = granite_names, .is_dense = is_dense_never,                                                     \
    .experts_key = "num_local_experts", .experts_other = "num_experts", .width_key = "intermediate_size",      \
    .shared_key = "shared_intermediate_size", .shared_width = true, .kv_optional = true, .norm_key = "",       \
    .norm_topk_prob = true, .pairs = true, .rope_theta = 10000

#define LING                                                                                                   \
    .arch = "bailingmoe2", .renaming = ling_names, .is_dense = is_dense_leading, .leads = true,                \
    .first_dense = 1, .experts_key = "num_experts", .shared_key = "moe_intermediate_size",                     \
    .shared_count = "num_shared_experts", .n_shared = 1, .shared_width = true, .router_bias = bias_name,       \
    .mtp_key = "num_nextn_predict_layers", .norm_topk_prob = true, .scaling_factor = "routed_scaling_factor",  \
    .partial = true

#define INKLING                                                                                                \
    .arch = "inkling2", .renaming = inkling2_names, .mixer = MIXER_REL, .is_windowed = is_windowed_inkling,    \
    .is_dense = is_dense_never, .experts_key = "n_routed_experts", .interleaved = true, .by_rows = true,       \
    .router_bias = bias_name, .norm_key = "", .norm_topk_prob = true, .scaling_factor = "route_scale",         \
    .rope_theta = 10000, .put = put_inkling2

/* The one table of families. */
static const struct release {
    const char *type;     /* model_type of config.json */
    const char *class;    /* the one of architectures, where several families have the type; NULL: any */
    const char *wrapper;  /* model_type of a config.json that has this family's in text_config; NULL: there is none */
    const char *(*kinds)(void); /* what src.kinds is, and what that decides; NULL: it is NULL */
    void (*config)(void); /* reads the rest of config.json into src; NULL: there is nothing */
    const char *act;      /* another name of hidden_act; NULL: there is none */
    const char *names;    /* other names of keys, see config_rename; NULL: there are none */
    const char *level;    /* keys whose lists have one value, see config_level; NULL: there are none */
    const char *fixed;    /* keys that have one value, see check_fixed; NULL: there are none */
    struct checkpoint src; /* what all releases have in common; of what is 0 config_read has the default */
} releases[] = {
    {.type = "qwen3_moe", .fixed = "use_sliding_window false",
     .src = {.arch = "qwen3moe", .is_dense = is_dense_qwen3, .experts_key = "num_experts",
             .experts_other = "num_local_experts"}},
    {.type = "qwen3_vl_moe_text", .wrapper = "qwen3_vl_moe", .fixed = "use_sliding_window false norm_topk_prob true",
     .src = {.arch = "qwen3vlmoe", .is_dense = is_dense_qwen3, .experts_key = "num_experts",
             .experts_other = "num_local_experts", .by_columns = true, .norm_topk_prob = true, .rope_theta = 500000,
             .sections = qwen3_vl_sections, .put = put_qwen3_vl}},
    {.type = "qwen3", .fixed = "use_sliding_window false",
     .src = {.arch = "qwen3"}},
    {.type = "qwen3_5_text", .wrapper = "qwen3_5", .fixed = fixed_delta,
     .src = {.arch = "qwen35", .pre = "qwen35", QWEN_DELTA, .sections = qwen35_sections}},
    {.type = "qwen3_5_moe_text", .wrapper = "qwen3_5_moe", .fixed = fixed_delta,
     .src = {.arch = "qwen35moe", .pre = "qwen35", QWEN_DELTA_EXPERTS, .is_dense = is_dense_never,
             .sections = qwen35_sections}},
    {.type = "qwen4_exp_text", .wrapper = "qwen4_exp", .config = config_qwen4,
     .fixed = "indexer_kv_heads 1 use_sliding_window false",
     .src = {.arch = "qwen4exp", .pre = "qwen35", QWEN_HYBRID, QWEN_EXPERTS, .renaming = qwen4_names, .put = put_qwen4,
             .is_dense = is_dense_never, .indexed = true, .sections = qwen35_sections}},
    {.type = "qwen3_next", .fixed = fixed_delta,
     .src = {.arch = "qwen3next", QWEN_DELTA_EXPERTS, .is_dense = is_dense_qwen3}},
    {.type = "deepseek_v2", .config = config_deepseek2,
     .fixed = "moe_layer_freq 1 norm_topk_prob false scoring_func softmax",
     .src = {.arch = "deepseek2", LATENT, .is_dense = is_dense_leading, .leads = true, .experts_key = "n_routed_experts",
             .experts_other = "num_experts", .shared_key = "moe_intermediate_size", .shared_count = "n_shared_experts",
             .n_shared = 2, .scaling_factor = "routed_scaling_factor", .rope_theta = 10000}},
    {.type = "deepseek", .config = config_leading_dense,
     .fixed = "moe_layer_freq 1 norm_topk_prob false scoring_func softmax routed_scaling_factor 1",
     .src = {.arch = "deepseek", .is_dense = is_dense_leading, .leads = true, .experts_key = "n_routed_experts",
             .shared_key = "moe_intermediate_size", .shared_count = "n_shared_experts", .n_shared = 2,
             .kv_optional = true, .pairs = true, .rope_theta = 10000}},
    {.type = "deepseek_v3", .wrapper = "kimi_k25", .config = config_deepseek3, .fixed = fixed_deepseek,
     .src = {.arch = "deepseek2", LATENT, DEEPSEEK_EXPERTS}},
    {.type = "kimi_k2", .wrapper = "kimi_k25", .config = config_deepseek3, .fixed = fixed_deepseek,
     .src = {.arch = "deepseek2", LATENT, DEEPSEEK_EXPERTS}},
    {.type = "glm4_moe_lite", .config = config_deepseek3, .fixed = fixed_deepseek,
     .src = {.arch = "deepseek2", LATENT, DEEPSEEK_EXPERTS}},
    {.type = "deepseek_v32", .config = config_deepseek_v32,
     .fixed = "moe_layer_freq 1 rope_interleave true indexer_rope_interleave false",
     .src = {.arch = "deepseek32", LATENT, DEEPSEEK_EXPERTS, .has_indexer = has_indexer_always, .put = put_indexer}},
    {.type = "glm_moe_dsa", .config = config_glm_dsa,
     .fixed = "moe_layer_freq 1 rope_interleave true indexer_rope_interleave true",
     .src = {.arch = "glm-dsa", LATENT, DEEPSEEK_EXPERTS, .has_indexer = has_indexer_glm, .put = put_glm_dsa}},
    {.type = "glm4_moe", .config = config_glm4, .fixed = "moe_layer_freq 1",
     .src = {.arch = "glm4moe", DEEPSEEK_EXPERTS, .rotary = 0.5, .partial = true}},
    {.type = "solar_open", .config = config_deepseek_experts, .fixed = "moe_layer_freq 1 use_qk_norm false",
     .src = {.arch = "glm4moe", DEEPSEEK_EXPERTS, .rope_theta = 1e6, .eps = 1e-5}},
    {.type = "glm4", .config = config_glm4_dense,
     .src = {.arch = "glm4", .rotary = 0.5, .partial = true}},
    {.type = "dots1", .config = config_dots1,
     .src = {.arch = "dots1", DEEPSEEK_EXPERTS, .router_bias = bias_name, .scaling_optional = true}},
    {.type = "dots3_note", .config = config_dots3, .names = "sliding_window sliding_window_size?",
     .fixed = "moe_layer_freq 1 use_dsa true scoring_func sigmoid topk_method noaux_tc n_group 1 topk_group 1 "
              "apply_mla_qkv_lora_rescale true k_rope_only_layernorm true attention_gate_type headwise "
              "swa_attention_gate_type headwise use_dynamic_rsf false",
     .src = {.arch = "dots3note", LATENT, .is_dense = is_dense_leading, .leads = true, .first_dense = 1,
             .experts_key = "n_routed_experts", .experts_other = "num_local_experts",
             .shared_key = "moe_intermediate_size", .shared_count = "n_shared_experts", .n_shared = 1,
             .is_windowed = is_windowed_typed, .window_rope = true, .window_theta = "swa_rope_theta", .list_heads = true,
             .has_indexer = has_indexer_dots3, .grown_latents = true, .mtp_unsaid = true,
             .mtp_why = "moe has no reference for it", .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .scaling_optional = true, .eps = 1e-5, .put = put_dots3}},
    {.type = "longcat_flash",
     .names = "num_hidden_layers num_layers num_experts_per_tok moe_topk? intermediate_size ffn_hidden_size? "
              "moe_intermediate_size expert_ffn_hidden_size?",
     .fixed = "attention_method MLA mla_scale_q_lora true mla_scale_kv_lora true router_bias false norm_topk_prob false "
              "zero_expert_type identity ngram_vocab_size_ratio none oe_vocab_size_ratio none",
     .src = {.arch = "longcat-flash", .renaming = longcat_names, .halved = true, LATENT, .is_dense = is_dense_longcat,
             .experts_key = "n_routed_experts", .experts_other = "num_local_experts",
             .shared_key = "intermediate_size", .n_shared = 1, .grown_latents = true, .mtp_beside = true,
             .mtp_why = "moe has no reference for it", .router_bias = bias_name,
             .scaling_factor = "routed_scaling_factor", .rope_theta = 1e7, .eps = 1e-5, .put = put_longcat}},
    {.type = "deepseek_v4", .config = config_deepseek_v4,
     .fixed = "num_key_value_heads 1 n_shared_experts 1 scoring_func sqrtsoftplus topk_method noaux_tc "
              "norm_topk_prob true mlp_bias false",
     .src = {.arch = "deepseek4", .renaming = deepseek_v4_names, .mixer = MIXER_CSA, .is_dense = is_dense_never,
             .dense_key = "", .experts_key = "n_routed_experts", .shared_key = "moe_intermediate_size",
             .shared_count = "n_shared_experts", .n_shared = 1, .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .mtp_key = "num_nextn_predict_layers", .mtp = "mtp.",
             .mtp_bare = true, .rotary = 0.125, .partial = true, .put = put_deepseek_v4,
             .put_template = put_deepseek_v4_template}},
    {.type = "deepseek_v41_text", .wrapper = "deepseek_v41", .config = config_deepseek_v4,
     .fixed = "num_key_value_heads 1 n_shared_experts 1 scoring_func sqrtsoftplus topk_method noaux_tc "
              "norm_topk_prob true mlp_bias false q_head_norm false hc_pre_from_prev_sublayer true num_hash_layers 0",
     .src = {.arch = "deepseek41", .renaming = deepseek_v4_names, .mixer = MIXER_CSA, .is_dense = is_dense_never,
             .dense_key = "", .experts_key = "n_routed_experts", .shared_key = "moe_intermediate_size",
             .shared_count = "n_shared_experts", .n_shared = 1, .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .mtp_key = "num_nextn_predict_layers", .mtp = "mtp.",
             .mtp_bare = true, .rotary = 0.125, .partial = true, .put = put_deepseek_v41,
             .put_template = put_deepseek_v41_template, .put_tokens = put_token_map}},
    {.type = "hy_v3", .config = config_leading_dense, .fixed = "route_norm true",
     .src = {.arch = "hy_v3", .renaming = hy3_names, .is_dense = is_dense_leading, .leads = true, .first_dense = 1,
             .experts_key = "num_experts", .shared_key = "moe_intermediate_size", .shared_count = "num_shared_experts",
             .n_shared = 1, .mtp_key = "num_nextn_predict_layers", .router_bias = "exp_probs_b",
             .norm_topk_prob = true, .scaling_factor = "router_scaling_factor"}},
    {.type = "hy_v4", .config = config_hy4, .fixed = "n_group 1 topk_group 1",
     .src = {.arch = "hy_v4", .renaming = hy4_names, LATENT, .is_dense = is_dense_leading, .leads = true,
             .first_dense = 1, .experts_key = "n_routed_experts", .experts_other = "num_local_experts",
             .shared_key = "moe_intermediate_size", .shared_count = "n_shared_experts", .n_shared = 1,
             .has_indexer = has_indexer_glm, .mtp_key = "num_nextn_predict_layers", .mtp = "model.mtp_layers.",
             .mtp_bare = true, .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .eps = 1e-5, .put = put_hy4}},
    {.type = "hunyuan_v1_moe", .config = config_hunyuan, .level = "moe_topk moe_intermediate_size num_shared_expert",
     .fixed = "use_qk_norm true use_cla false use_mla false use_mixed_mlp_moe true norm_topk_prob true mlp_bias false "
              "moe_layer_num_skipped 0 routed_scaling_factor 1 group_limited_greedy false",
     .src = {.arch = "hunyuan-moe", .renaming = hunyuan_names, .is_dense = is_dense_never, .top_k_key = "moe_topk",
             .experts_key = "num_experts", .shared_key = "intermediate_size", .n_shared = 1, .shared_width = true,
             .kv_optional = true, .norm_key = "", .norm_topk_prob = true, .rope_theta = 10000, .stretched = true,
             .eps = 1e-5}},
    {.type = "gpt_oss", .fixed = "attention_bias true swiglu_limit 7 swiglu_alpha 1.702",
     .src = {.arch = "gpt-oss", .renaming = gpt_oss_names, .is_dense = is_dense_never,
             .is_windowed = is_windowed_typed, .alternate = true, .tell_window = true,
             .experts_key = "num_local_experts", .experts_other = "num_experts", .width_key = "intermediate_size",
             .qkv_bias = true, .interleaved = true, .exact_yarn = true, .norm_key = "", .norm_topk_prob = true,
             .eps = 1e-5}},
    {.type = "minimax_m2", .config = config_minimax_m2,
     .fixed = "use_qk_norm true qk_norm_type per_layer use_routing_bias true scoring_func sigmoid "
              "shared_intermediate_size 0",
     .src = {.arch = "minimax-m2", .renaming = minimax_names, .is_dense = is_dense_never,
             .experts_key = "num_local_experts", .experts_other = "num_experts", .width_key = "intermediate_size",
             .router_bias = bias_name, .norm_key = "", .norm_topk_prob = true, .partial = true}},
    {.type = "minimax_m3", .wrapper = "minimax_m3_vl", .config = config_minimax_m3, .act = "swigluoai",
     .fixed = fixed_m3,
     .src = {MINIMAX_M3}},
    {.type = "minimax_m3_vl_text", .wrapper = "minimax_m3_vl", .config = config_minimax_m3, .act = "swigluoai",
     .fixed = fixed_m3,
     .src = {MINIMAX_M3}},
    {.type = "mixtral", .config = config_mixtral,
     .src = {.arch = "llama", .renaming = minimax_names, .is_dense = is_dense_never,
             .experts_key = "num_local_experts", .experts_other = "num_experts", .width_key = "intermediate_size",
             .kv_optional = true, .norm_key = "", .norm_topk_prob = true, .pairs = true, .llama3 = true, .eps = 1e-5}},
    {.type = "llama", .fixed = "mlp_bias false",
     .src = {.arch = "llama", .kv_optional = true, .pairs = true, .llama3 = true, .rope_theta = 10000}},
    {.type = "mistral", .wrapper = "mistral3", .fixed = "sliding_window none",
     .src = {.arch = "llama", .pairs = true, .rope_theta = 10000}},
    {.type = "ministral3", .wrapper = "mistral3", .fixed = "sliding_window none",
     .src = {.arch = "mistral3", .pairs = true, .eps = 1e-5, .tempered = true}},
    {.type = "mistral4", .wrapper = "mistral3", .config = config_mistral4, .fixed = "rope_interleave true",
     .src = {.arch = "mistral4", LATENT, DEEPSEEK_EXPERTS, .tempered = true}},
    {.type = "gemma4_text", .wrapper = "gemma4", .config = config_gemma4,
     .fixed = "hidden_activation gelu_pytorch_tanh",
     .src = {.arch = "gemma4", .renaming = gemma4_names, .is_dense = is_dense_never, .is_windowed = is_windowed_typed,
             .experts_key = "num_experts", .experts_if = "enable_moe_block", .top_k_key = "top_k_experts", .expert_gain = "mlp.gate.per_expert_scale",
             .norm_key = "", .norm_topk_prob = true, .list_kv = true, .window_rope = true, .partial = true,
             .proportional = true,
             .rope_theta = 1e6, .put = put_gemma4}},
    {.type = "granitemoe", .config = config_granite,
     .src = {GRANITE, .arch = "granitemoe", .put = put_granite}},
    {.type = "granitemoeshared", .config = config_granite,
     .src = {GRANITE, .arch = "granitemoe", .put = put_granite}},
    {.type = "granitemoe_swa", .config = config_granite_swa, .fixed = "mlp_bias false",
     .src = {.arch = "granite_swa", .renaming = granite_swa_names, .is_dense = is_dense_never,
             .is_windowed = is_windowed_typed, .experts_key = "num_local_experts", .experts_other = "num_experts",
             .width_key = "intermediate_size", .kv_optional = true, .norm_key = "", .norm_topk_prob = true, .pairs = true,
             .rope_theta = 10000, .put = put_granite_swa}},
    {.type = "granite_swa", .config = config_granite_swa, .fixed = "mlp_bias false",
     .src = {.arch = "granite_swa", .is_windowed = is_windowed_typed, .kv_optional = true, .pairs = true,
             .rope_theta = 10000, .put = put_granite_swa}},
    {.type = "granitemoehybrid", .kinds = kinds_granite, .config = config_granite4,
     .fixed = "mamba_conv_bias true mamba_proj_bias false mlp_bias false normalization_function rmsnorm",
     .src = {GRANITE, .arch = "granitehybrid", .lacks_kv = is_mamba_granite, .put = put_granite4}},
    {.type = "olmoe", .fixed = "clip_qkv none",
     .src = {.arch = "olmoe", .is_dense = is_dense_never, .experts_key = "num_experts",
             .experts_other = "num_local_experts", .width_key = "intermediate_size", .kv_optional = true,
             .eps = 1e-5}},
    {.type = "qwen2", .fixed = "use_sliding_window false",
     .src = {.arch = "qwen2", .kv_optional = true, .qkv_bias = true, .rope_theta = 10000}},
    {.type = "qwen2_moe", .config = config_qwen2_moe, .fixed = "use_sliding_window false",
     .src = {.arch = "qwen2moe", .renaming = shared_expert_names, .is_dense = is_dense_qwen3,
             .experts_key = "num_experts", .kv_optional = true, .n_shared = 1,
             .shared_key = "shared_expert_intermediate_size", .shared_gate = true, .shared_width = true}},
    {.type = "ernie4_5_moe", .config = config_ernie, .fixed = "use_bias false",
     .src = {.arch = "ernie4_5-moe", .renaming = ernie_names, .is_dense = is_dense_ernie, .leads = true,
             .experts_key = "moe_num_experts", .top_k_key = "moe_k", .shared_key = "moe_intermediate_size",
             .shared_count = "moe_num_shared_experts", .shared_width = true, .kv_optional = true, .norm_key = "",
             .norm_topk_prob = true, .eps = 1e-5, .put = put_ernie}},
    {.type = "step3p5", .wrapper = "step3p7", .config = config_step,
     .fixed = "moe_router_activation sigmoid sink false mlp_bias false",
     .src = {.arch = "step35", .renaming = step_names, .is_dense = is_dense_step, .leads = true,
             .is_windowed = is_windowed_typed, .tell_window = true, .experts_key = "moe_num_experts",
             .top_k_key = "moe_top_k", .kv_key = "num_attention_groups", .shared_key = "share_expert_dim",
             .n_shared = 1, .shared_width = true, .list_heads = true, .list_kv = true,
             .mtp_key = "num_nextn_predict_layers", .mtp_dense = true, .window_rope = true, .llama3 = true,
             .norm_key = "norm_expert_weight", .norm_topk_prob = true, .scaling_factor = "moe_router_scaling_factor",
             .scaling_optional = true, .eps = 1e-5, .put = put_step}},
    {.type = "exaone_moe", .config = config_exaone, .fixed = "scoring_func sigmoid topk_method noaux_tc",
     .src = {.arch = "exaone-moe", .renaming = exaone_names, .is_dense = is_dense_leading, .leads = true,
             .first_dense = 1, .is_windowed = is_windowed_typed, .experts_key = "num_experts",
             .shared_key = "moe_intermediate_size", .shared_count = "num_shared_experts", .n_shared = 1,
             .shared_width = true, .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .mtp_key = "num_nextn_predict_layers", .mtp_beside = true,
             .mtp_why = "moe does not know which keys it sees", .llama3 = true, .eps = 1e-5}},
    {.type = "afmoe", .config = config_afmoe,
     .fixed = "score_func sigmoid route_norm true n_group 1 topk_group 1 num_expert_groups 1 num_limited_groups 1",
     .src = {.arch = "afmoe", .renaming = afmoe_names, .is_dense = is_dense_leading, .leads = true,
             .is_windowed = is_windowed_typed, .head_gate = true, .gates_values = gates_always,
             .experts_key = "num_experts", .shared_key = "moe_intermediate_size",
             .shared_count = "num_shared_experts", .n_shared = 2, .router_bias = bias_name, .kv_optional = true,
             .norm_key = "", .norm_topk_prob = true, .scaling_factor = "route_scale", .scaling_optional = true,
             .eps = 1e-5}},
    {.type = "cohere2_moe", .config = config_cohere2,
     .src = {.arch = "cohere2moe", .is_dense = is_dense_leading, .leads = true, .is_windowed = is_windowed_typed,
             .experts_key = "num_experts", .width_key = "intermediate_size",
             .dense_key = "prefix_dense_intermediate_size", .shared_key = "intermediate_size",
             .shared_count = "num_shared_experts", .shared_width = true, .kv_optional = true, .norm_topk_prob = true,
             .mtp_key = "num_nextn_predict_layers", .mtp_why = "moe has no reference for it", .rope_theta = 10000,
             .eps = 1e-5, .put = put_cohere2}},
    {.type = "dbrx", .config = config_dbrx,
     .names = "num_hidden_layers n_layers num_attention_heads n_heads hidden_size d_model max_position_embeddings "
              "max_seq_len num_key_value_heads attn_config.kv_n_heads clip_qkv attn_config.clip_qkv? rope_theta "
              "attn_config.rope_theta? num_local_experts ffn_config.moe_num_experts num_experts_per_tok "
              "ffn_config.moe_top_k ffn_hidden_size ffn_config.ffn_hidden_size",
     .src = {.arch = "dbrx", .renaming = dbrx_names, .layers = "blocks.", .is_dense = is_dense_never,
             .experts_key = "num_local_experts", .width_key = "ffn_hidden_size", .flat_experts = true,
             .norm_key = "", .norm_topk_prob = true, .eps = 1e-5, .put = put_dbrx}},
    {.type = "arctic",
     .fixed = "moe_layer_frequency 1 parallel_attn_mlp_res true use_residual true attention_bias false",
     .src = {.arch = "arctic", .renaming = arctic_names, .is_dense = is_dense_never, .experts_key = "num_local_experts",
             .width_key = "intermediate_size", .shared_key = "hidden_size", .n_shared = 1, .kv_optional = true,
             .norm_key = "", .norm_topk_prob = true, .pairs = true, .eps = 1e-5}},
    {.type = "maple",
     .fixed = "use_bias false use_qk_norm true num_shared_experts 0 first_k_dense_replace 0 "
              "moe_router_enable_expert_bias false nope_on_global_attention true norm_topk_prob true",
     .src = {.arch = "maple", .renaming = maple_names, .is_dense = is_dense_never, .is_windowed = is_windowed_typed,
             .experts_key = "num_experts", .norm_topk_prob = true, .partial = true, .put = put_maple}},
    {.type = "smallthinker", .config = config_smallthinker,
     .fixed = "moe_enable_early_router true moe_enable_secondary_experts false moe_shared_primary_experts 0 "
              "use_qk_norm false norm_topk_prob true",
     .src = {.arch = "smallthinker", .renaming = smallthinker_names, .is_dense = is_dense_never,
             .is_windowed = is_windowed_smallthinker, .experts_key = "moe_num_primary_experts",
             .top_k_key = "moe_num_active_primary_experts", .width_key = "moe_ffn_hidden_size",
             .dense_key = "moe_ffn_hidden_size", .norm_key = "", .norm_topk_prob = true}},
    {.type = "llama4_text", .wrapper = "llama4", .config = config_llama4,
     .src = {.arch = "llama4", .renaming = llama4_names, .is_dense = is_dense_llama4, .is_windowed = is_chunked,
             .experts_key = "num_local_experts", .width_key = "intermediate_size",
             .dense_key = "intermediate_size_mlp", .shared_key = "intermediate_size", .n_shared = 1,
             .by_columns = true, .norm_key = "", .kv_optional = true, .llama3 = true, .rope_theta = 5e5, .eps = 1e-5,
             .put = put_llama4}},
    {.type = "phimoe", .config = config_phimoe,
     .src = {.arch = "phimoe", .renaming = minimax_names, .is_dense = is_dense_never, .experts_key = "num_local_experts",
             .width_key = "intermediate_size", .kv_optional = true, .qkv_bias = true, .norm_key = "",
             .norm_topk_prob = false, .longrope = true, .rope_theta = 1e6, .eps = 1e-5}},
    {.type = "laguna", .config = config_laguna,
     .fixed = "moe_router_logit_softcapping 0 moe_apply_router_weight_on_input false moe_router_score_func sigmoid "
              "norm_topk_prob true swa_attention_sink_enabled false",
     .src = {.arch = "laguna", .renaming = laguna_names, .is_dense = is_dense_laguna, .leads = true,
             .is_windowed = is_windowed_typed, .window_rope = true, .partial = true,
             .heads_key = "num_attention_heads_per_layer", .list_heads = true, .head_gate = true,
             .gates_values = gates_values, .experts_key = "num_experts", .n_shared = 1,
             .shared_key = "shared_expert_intermediate_size", .shared_width = true, .router_bias = bias_name,
             .norm_key = "", .norm_topk_prob = true, .scaling_factor = "moe_routed_scaling_factor",
             .scaling_optional = true}},
    {.type = "mellum", .config = config_mellum, .fixed = "use_sliding_window true",
     .src = {.arch = "mellum", .is_dense = is_dense_mellum, .is_windowed = is_windowed_typed, .window_rope = true,
             .partial = true, .experts_key = "num_experts", .experts_other = "num_local_experts",
             .mtp_key = "num_nextn_predict_layers", .mtp_beside = true,
             .mtp_why = "GGUF files of mellum have none", .norm_topk_prob = true}},
    {.type = "mimo_v2_flash", .config = config_mimo, .fixed = fixed_mimo,
     .src = {MIMO}},
    {.type = "mimo_v2", .config = config_mimo, .fixed = fixed_mimo,
     .src = {MIMO}},
    {.type = "kimi_linear", .class = "KimiK3ForConditionalGeneration", .wrapper = "kimi_k3",
     .config = config_kimi_k3, .act = "situ",
     .fixed = "hidden_act situ mla_use_nope true moe_layer_freq 1 moe_router_activation_func sigmoid "
              "num_nextn_predict_layers 0 latent_moe_use_norm true",
     .src = {.arch = "kimi-k3", .renaming = kimi_k3_names, LATENT, .lacks_kv = is_kda_kimi,
             .is_dense = is_dense_leading, .leads = true, .first_dense = 1, .experts_key = "num_experts",
             .experts_other = "num_local_experts", .shared_key = "moe_intermediate_size",
             .shared_count = "num_shared_experts", .n_shared = 1, .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .rope_theta = 10000, .eps = 1e-5, .put = put_kimi_k3}},
    {.type = "kimi_linear", .config = config_kimi_linear,
     .fixed = "mla_use_nope true moe_layer_freq 1 moe_router_activation_func sigmoid num_nextn_predict_layers 0",
     .src = {.arch = "kimi-linear", .renaming = kimi_linear_names, LATENT, .lacks_kv = is_kda_kimi,
             .is_dense = is_dense_leading, .leads = true, .first_dense = 1, .experts_key = "num_experts",
             .experts_other = "num_local_experts", .shared_key = "moe_intermediate_size",
             .shared_count = "num_shared_experts", .n_shared = 1, .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .rope_theta = 10000, .eps = 1e-5, .put = put_kimi_linear}},
    {.type = "bailing_moe", .class = "BailingMoeV2ForCausalLM", .config = config_ling, .fixed = fixed_ling,
     .src = {LING, .rotary = 0.5}},
    {.type = "bailing_moe", .class = "BailingMoeForCausalLM", .config = config_ling1,
     .fixed = "use_bias false use_qkv_bias false norm_softmax false multi_gate false",
     .src = {.arch = "bailingmoe", .renaming = ling_names, .is_dense = is_dense_leading, .leads = true,
             .experts_key = "num_experts", .shared_key = "moe_intermediate_size", .shared_count = "num_shared_experts",
             .kv_optional = true, .pairs = true, .norm_topk_prob = true}},
    {.type = "bailing_moe_v2", .config = config_ling, .fixed = fixed_ling,
     .src = {LING, .rotary = 0.5}},
    {.type = "sarvam_moe", .config = config_ling, .fixed = fixed_ling,
     .src = {LING, .rope_theta = 8e6}},
    {.type = "bailing_hybrid", .config = config_bailing, .fixed = fixed_bailing,
     .src = {.arch = "bailingmoe3", .renaming = bailing_names, LATENT, .lacks_kv = is_kda_bailing,
             .is_dense = is_dense_leading, .leads = true, .experts_key = "num_experts",
             .shared_key = "moe_intermediate_size", .shared_count = "num_shared_experts", .n_shared = 1,
             .shared_width = true, .mtp_key = "num_nextn_predict_layers", .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .rope_theta = 6e6, .put = put_bailing}},
    {.type = "glm5_next_text", .wrapper = "glm5_next", .config = config_glm5_next,
     .fixed = "mla_use_nope true mhc true moe_layer_freq 1 index_kpool_always_select_tail true",
     .src = {.arch = "glm5-next", .renaming = glm5_next_names, LATENT, DEEPSEEK_EXPERTS, .no_rope = true,
             .lacks_kv = is_kda_glm, .has_indexer = has_indexer_glm_next, .eps = 1e-5, .put = put_glm5_next}},
    {.type = "nemotron_h", .kinds = kinds_nemotron, .config = config_nemotron, .fixed = fixed_nemotron,
     .src = {.arch = "nemotron_h_moe", .renaming = nemotron_names, .is_dense = is_dense_nemotron, .ungated = true,
             .experts_key = "n_routed_experts", .shared_key = "moe_shared_expert_intermediate_size", .n_shared = 1,
             .shared_width = true, .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .list_kv = true, .mtp = "mtp.", .mtp_halves = true,
             .mtp_key = "num_nextn_predict_layers", .rope_theta = 10000, .partial = true,
             .eps_key = "layer_norm_epsilon", .eps = 1e-5, .put = put_nemotron}},
    {.type = "lfm2_moe", .config = config_lfm2, .fixed = "conv_bias false use_expert_bias true",
     .src = {.arch = "lfm2moe", .renaming = lfm2_names, .is_dense = is_dense_leading, .leads = true,
             .lacks_kv = is_conv_lfm2, .experts_key = "num_experts", .router_bias = bias_name, .norm_topk_prob = true,
             .scaling_factor = "routed_scaling_factor", .scaling_optional = true, .rope_theta = 1e6,
             .eps_key = "norm_eps", .eps = 1e-5, .put = put_lfm2}},
    {.type = "inkling2_text", .wrapper = "inkling2", .config = config_inkling2, .fixed = "scoring_func sigmoid",
     .src = {INKLING}},
    {.type = "inkling2_loop_text", .wrapper = "inkling2_loop", .config = config_inkling2,
     .fixed = "scoring_func sigmoid",
     .src = {INKLING}}};
#undef LATENT
#undef DEEPSEEK_EXPERTS
#undef QWEN_HYBRID
#undef QWEN_EXPERTS
#undef QWEN_DELTA
#undef QWEN_DELTA_EXPERTS
#undef MINIMAX_M3
#undef MIMO
#undef GRANITE
#undef LING
#undef INKLING
/* clang-format on */

/* Whether a tensor of the index belongs to a layer for multi-token prediction, by its name. */
static bool is_of_prediction(const char *name) {
    const char *at = strstr(name, "layers.");
    if (starts_with(name, "mtp.") || strstr(name, ".mtp.")) return true;
    return at && isdigit((unsigned char)at[7]) && strtol(at + 7, NULL, 10) >= src.n_layer;
}

/* The model types, for a message. */
static const char *family_types(void) {
    const char *list = releases[0].type;
    for (size_t f = 1; f < COUNT(releases); f++)
        if (strcmp(releases[f].type, releases[f - 1].type)) list = fmt("%s, %s", list, releases[f].type);
    for (size_t f = 0; f < COUNT(releases); f++) {
        bool listed = !releases[f].wrapper;
        for (size_t k = 0; k < f && !listed; k++)
            listed = releases[k].wrapper && !strcmp(releases[k].wrapper, releases[f].wrapper);
        if (!listed) list = fmt("%s, %s", list, releases[f].wrapper);
    }
    return list;
}

/* Reads config.json into src. */
static void config_read(void) {
    src.top = doc_read("config.json");
    if (!src.top.obj) die("'%s' has no config.json", model_dir);
    const char *type = get_str(src.top, "model_type", "(none)"), *wrapper = type;
    bool wrapped = false;
    for (size_t f = 0; f < COUNT(releases); f++) wrapped |= releases[f].wrapper && !strcmp(releases[f].wrapper, type);
    const struct doc top = src.top, cfg = wrapped ? get_obj(top, "text_config") : top;
    const bool untold = wrapped && !get(cfg, "model_type"); /* MiniMax-M3 */
    if (!untold) type = get_str(cfg, "model_type", "(none)");
    size_t f = 0, n = COUNT(releases);
    const char *first = json_string_value(json_array_get(get_list(top, "architectures"), 0)), *classes = NULL;
    for (; f < n; f++) {
        const char *name = untold ? releases[f].wrapper : releases[f].type, *class = releases[f].class;
        if (!name || strcmp(name, type)) continue;
        if (!class || (first && !strcmp(class, first))) break;
        classes = classes ? fmt("%s or %s", classes, class) : class;
    }
    expect(top, "architectures", f < n || !classes, classes);
    expect(cfg, "model_type", f < n && (!wrapped || (releases[f].wrapper && !strcmp(releases[f].wrapper, wrapper))),
           family_types());
    const struct release *r = &releases[f];
    src = r->src;
    src.top = top;
    src.cfg = cfg;
    src.wrapped = wrapped;
    src.prefix = "";
    src.body = "model.";
    src.gating = family_find((struct gguf_str){src.arch, strlen(src.arch)})->gating;
    if (src.rope_theta == 0) src.rope_theta = -1;
    if (src.rotary == 0) src.rotary = 1;
    if (src.eps == 0) src.eps = 1e-6;
    if (!src.norm_key) src.norm_key = either("norm_topk_prob", "moe_renormalize");
    if (!src.eps_key) src.eps_key = "rms_norm_eps";
    if (!src.top_k_key) src.top_k_key = either("num_experts_per_tok", "num_experts_per_token");
    if (!src.width_key) src.width_key = "moe_intermediate_size";
    if (!src.dense_key) src.dense_key = "intermediate_size";
    if (!src.kv_key) src.kv_key = "num_key_value_heads";
    if (r->names) config_rename(r->names);
    src.kinds = r->kinds ? r->kinds() : NULL;
    src.n_layer = (int)get_int(src.cfg, "num_hidden_layers", 1, (MAX_LAYERS - 16) / (src.halved ? 2 : 1),
                               src.kinds ? (int64_t)strlen(src.kinds) : REQUIRED);
    if (src.halved) src.n_layer *= 2;
    src.n_head = (int)get_int(src.cfg, "num_attention_heads", 1, 65536, REQUIRED);
    if (r->level) config_level(r->level);
    if (src.experts_if && !get_bool(src.cfg, src.experts_if, false)) src.experts_key = NULL;
    if (src.experts_key) src.top_k = (int)get_int(src.cfg, src.top_k_key, 1, MAX_EXPERTS, REQUIRED);
    src.n_vocab = (size_t)get_int(src.cfg, "vocab_size", 1, MAX_VOCAB, REQUIRED);
    src.tied = get_bool(src.cfg, "tie_word_embeddings", false) || get_bool(src.top, "tie_word_embeddings", false);
    const char *act = get_str(src.cfg, "hidden_act", "silu");
    const char *other = r->act;
    expect(src.cfg, "hidden_act", !strcmp(act, "silu") || (other && !strcmp(act, other)),
           other ? fmt("\"silu\" or \"%s\"", other) : "\"silu\"");
    check_fixed(src.cfg, r->fixed ? r->fixed : "");
    config_heads();
    config_expert_count();
    if (src.mtp_key) src.n_mtp = (int)get_int(src.cfg, src.mtp_key, 0, src.mtp_beside ? 1 : MAX_MTP, 0);
    if (src.shared_count) src.n_shared = (int)get_int(src.cfg, src.shared_count, 0, 64, src.n_shared);
    if (src.is_windowed == is_windowed_typed) config_windows();
    if (r->config) r->config();
    expect(src.cfg, "attention_bias", src.qkv_bias || !get_bool(src.cfg, "attention_bias", false), "false");
}

/* ============================================================================================================
 * What config.json says of quantization
 *
 * The keys of quantization_config that moe-convert knows, and what their values have to be.
 * ============================================================================================================ */

/* Returns the first source of an output that is NVFP4, or NULL. */
static const struct tensor *nvfp4_source(const struct output *o) {
    for (size_t i = 0; i < arrlenu(o->pieces); i++)
        if (o->pieces[i].lin.format == NVFP4) return o->pieces[i].lin.w;
    return NULL;
}

/* Where a key about quantization stands. */
enum quant_place {
    QUANT_WHOLE, /* quantization_config of config.json, or "quantization" of hf_quant_config.json */
    QUANT_GROUP, /* an object of config_groups */
    QUANT_ARGS,  /* weights, input_activations or output_activations of a group */
    QUANT_LAYER  /* an object of quantized_layers */
};

/* The keys that ModelOpt, compressed-tensors, vLLM and transformers write about quantization, and what moe does with
 * them. Another key is named in a line. */
static const struct {
    enum quant_place place;
    const char *keys;
    const char
        *refusal; /* why a value other than null, false, 0 and nothing is refused; NULL: the key is harmless or is
                            read below */
} quant_keys[] = {
    /* read: what they say must be known here */
    {QUANT_WHOLE, "quant_method quant_algo format weight_block_size fmt group_size moe_sparsity_config", NULL},
    {QUANT_WHOLE, "config_groups quantized_layers", NULL},
    {QUANT_GROUP, "format quant_algo", NULL},
    {QUANT_LAYER, "quant_algo", NULL},
    /* harmless: the tensors tell which modules are quantized and how; moe has a cache and rounds inputs as it likes */
    {QUANT_WHOLE,
     "ignore ignored_layers modules_to_not_convert modules_to_convert exclude_modules packed_modules_mapping producer "
     "version quantization_status global_compression_ratio dequantize run_compressed use_optimized_inference "
     "is_checkpoint_fp8_serialized activation_scheme activation_scale_ub scale_fmt expert_dtype kv_cache_scheme "
     "kv_cache_quant_algo bits _pre_quantization_dtype moe_quant_algo",
     NULL},
    {QUANT_GROUP, "targets weights input_activations output_activations", NULL},
    {QUANT_ARGS,
     "num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype zp_dtype observer "
     "observer_kwargs is_mx",
     NULL},
    {QUANT_LAYER, "group_size weight_block_size", NULL},
    /* arithmetic that moe does not have */
    {QUANT_WHOLE, "transform_config", "moe does not apply transforms"},
    {QUANT_WHOLE,
     "rotation rotate online_rotation online_rotations rotation_config hadamard hadamard_config use_hadamard",
     "moe does not rotate the inputs of matrices"},
    {QUANT_WHOLE, "sparsity_config", "moe does not read compressed sparse weights"},
    {QUANT_WHOLE, "pre_quant_scale smoothquant smoothquant_val smooth_quant",
     "moe does not scale the inputs of matrices"},
    {QUANT_WHOLE, "has_zero_point zero_point clamp_val", "moe has neither zero points nor clamped inputs"},
    {QUANT_WHOLE, "desc_act static_groups", "moe does not reorder the inputs of matrices"},
    {QUANT_WHOLE, "lora_rank lora_config svd svd_rank", "moe does not add low-rank matrices"},
    {QUANT_GROUP, "pre_quant_scale", "moe does not scale the inputs of matrices"},
    {QUANT_GROUP, "has_zero_point", "moe has no zero points"},
    {QUANT_GROUP, "lora_rank", "moe does not add low-rank matrices"},
    {QUANT_LAYER, "pre_quant_scale", "moe does not scale the inputs of matrices"},
    {QUANT_LAYER, "has_zero_point", "moe has no zero points"},
    {QUANT_LAYER, "lora_rank", "moe does not add low-rank matrices"}};

/* The algorithms of ModelOpt that moe reads, and the weights with one scale; 0: it may be any number. */
static const struct {
    const char *name;
    int64_t group;
} quant_algos[] = {{"NVFP4", 16},
                   {"W4A16_NVFP4", 16},
                   {"W4A8_NVFP4_FP8", 16},
                   {"MXFP4", 32},
                   {"W4A16_MXFP4", 32},
                   {"W4A8_MXFP4_FP8", 32},
                   {"W4A8_MXFP4_MXFP8", 32},
                   {"MXFP8", 32},
                   {"FP8", 0},
                   {"FP8_PER_CHANNEL_PER_TOKEN", 0},
                   {"FP8_PB_WO", 0},
                   {"FP8_BLOCK_SCALES", 0},
                   {"MIXED_PRECISION", 0},
                   {"none", 0}};

static const char quant_formats[] = "nvfp4-pack-quantized mxfp4-pack-quantized mxfp8-quantized float-quantized "
                                    "naive-quantized mixed-precision dense";

/* Dies unless quant_algo of an object is known here, and its group_size belongs to it. */
static void check_quant_algo(struct doc d) {
    const char *algo = get_str(d, "quant_algo", "none");
    char *known = NULL;
    size_t k = 0;
    for (size_t i = 0; i < COUNT(quant_algos); i++) sb_printf(&known, "%s%s", i ? " " : "", quant_algos[i].name);
    while (k < COUNT(quant_algos) && strcmp(quant_algos[k].name, algo)) k++;
    expect(d, "quant_algo", k < COUNT(quant_algos), fmt("one of %s", sb_cstr(&known)));
    const int64_t group = quant_algos[k].group;
    const json_t *given = get(d, "group_size");
    if (group && given && json_number_value(given) != 0) get_int(d, "group_size", group, group, group);
    arrfree(known);
}

/* Whether a value says that a feature is not used: null, false, 0, "", "none", nothing, the format dense, or an
 * object of such values. */
static bool is_unused(const json_t *j) {
    const char *key, *text = json_string_value(j);
    json_t *v;
    bool unused = true;
    if (json_is_object(j)) {
        text = json_string_value(json_object_get(j, "format")); /* of sparsity_config */
        if (text) return !strcmp(text, "dense");
        json_object_foreach((json_t *)(uintptr_t)j, key, v) unused &= is_unused(v);
        return unused;
    }
    if (text) return !*text || !strcmp(text, "none");
    return json_is_null(j) || json_is_false(j) || (json_is_array(j) && !json_array_size(j)) ||
           (json_is_number(j) && json_number_value(j) == 0);
}

static struct finding quant_unknown; /* keys about quantization that are not known here; the last of them is `first` */

/* Checks the keys of an object about quantization and of those in it. path: its place in the file, for messages. */
static void check_quant_keys(struct doc d, enum quant_place place, const char *path) {
    const char *key, *name;
    json_t *v, *in;
    if (place != QUANT_ARGS) check_quant_algo(d);
    expect(d, "format", place == QUANT_ARGS || one_of(get_str(d, "format", "dense"), quant_formats),
           fmt("one of %s", quant_formats));
    json_object_foreach(d.obj, key, v) {
        size_t k = 0;
        char at[512], below[768];
        while (k < COUNT(quant_keys) && (quant_keys[k].place != place || !one_of(key, quant_keys[k].keys))) k++;
        snprintf(at, sizeof at, "%s.%s", path, key);
        if (k == COUNT(quant_keys)) {
            if (!is_unused(v)) finding_add(&quant_unknown, fmt("%s: key '%s' (%s)", d.file, at, json_show(v)));
        } else if (quant_keys[k].refusal && !is_unused(v))
            die("%s: key '%s': %s (expected null or nothing, found %s)", d.file, at, quant_keys[k].refusal,
                json_show(v));
        if (place == QUANT_GROUP && json_is_object(v) && strcmp(key, "targets"))
            check_quant_keys((struct doc){v, d.file, at}, QUANT_ARGS, at);
        const bool groups = place == QUANT_WHOLE && !strcmp(key, "config_groups");
        if (!json_is_object(v) || (!groups && (place != QUANT_WHOLE || strcmp(key, "quantized_layers")))) continue;
        json_object_foreach(v, name, in) {
            snprintf(below, sizeof below, "%s.%s", at, name);
            if (json_is_object(in))
                check_quant_keys((struct doc){in, d.file, below}, groups ? QUANT_GROUP : QUANT_LAYER, below);
        }
    }
}

/* Checks the keys of all objects about quantization that the release has. */
static void check_quantization_keys(void) {
    struct doc hf = doc_read("hf_quant_config.json");
    const struct {
        struct doc in;
        const char *key;
    } places[] = {{src.top, "quantization_config"},
                  {src.wrapped ? src.cfg : (struct doc){NULL, NULL, NULL}, "quantization_config"},
                  {src.top, "compression_config"}, /* of compressed-tensors before 0.8 */
                  {hf, "quantization"}};
    for (size_t i = 0; i < COUNT(places); i++) {
        struct doc d = get_obj(places[i].in, places[i].key);
        char path[128];
        snprintf(path, sizeof path, "%s%s", places[i].in.in ? fmt("%s.", places[i].in.in) : "", places[i].key);
        d.in = path;
        if (d.obj) check_quant_keys(d, QUANT_WHOLE, path);
    }
    if (quant_unknown.n)
        err_message("%s is unknown here and not used%s", quant_unknown.first,
                    quant_unknown.n > 1 ? fmt("; so are %zu more about quantization", quant_unknown.n - 1) : "");
    json_decref(hf.obj);
}

/* Checks what the release says about its quantization: it must be known here and must agree with the tensors. */
static void check_quantization(void) {
    struct doc hf = doc_read("hf_quant_config.json"), q;
    q = get_obj(get(src.cfg, "quantization_config") ? src.cfg : src.top, "quantization_config");
    const struct doc whole = get_obj(hf, "quantization");
    static const char methods[] = "modelopt modelopt_fp4 compressed-tensors fp8 mxfp4 mxfp8 nvfp4 none";
    expect(q, "quant_method", one_of(get_str(q, "quant_method", "none"), methods), fmt("one of %s", methods));
    bool announced = false, found = false;
    const char *const said[] = {get_str(q, "quant_algo", ""), get_str(q, "format", ""),
                                get_str(whole, "quant_algo", "")};
    for (size_t i = 0; i < COUNT(said); i++) announced |= one_of(said[i], "NVFP4 W4A16_NVFP4 nvfp4-pack-quantized");
    const bool mxfp8 = !strcmp(get_str(q, "quant_method", "none"), "mxfp8");
    json_t *block = get_list(q, "weight_block_size");
    const int64_t size = json_element(block, 0);
    for (size_t i = 0; i < json_array_size(block); i++) {
        const bool square = (size == 128 || size == 32) && json_element(block, i) == size;
        expect(q, "weight_block_size", mxfp8 ? json_element(block, i) == (i ? 32 : 1) : square,
               mxfp8 ? "[1, 32]" : "[128, 128] or [32, 32]");
    }
    expect(q, "fmt", strcasestr(get_str(q, "fmt", "e4m3"), "e4m3") != NULL, "e4m3");
    struct doc sparsity = get_obj(q, "moe_sparsity_config");
    const char *method = get_str(sparsity, "method", "prune");
    expect(sparsity, "method", !strcmp(method, "prune"), "\"prune\"");
    for (size_t i = 0; i < arrlenu(plan); i++) found |= nvfp4_source(&plan[i]) != NULL;
    if (announced && !found) die("%s says NVFP4, but no tensor is NVFP4", q.obj ? q.file : hf.file);
    json_decref(hf.obj);
}

/* ============================================================================================================
 * Vocabulary
 *
 * Byte-level BPE and SentencePiece BPE with tokens for bytes.
 *
 * Byte-level BPE: texts of tokens are stored in GPT-2's alphabet, one printable character per byte; added tokens are
 * stored literally. The pre-tokenizer is recognized by its expressions and stored by its name in llama.cpp. An unknown
 * one is an error, because other pieces would give tokens that the model was not trained on, without any error later.
 *
 * SentencePiece: ordinary tokens are stored with U+2581 for a blank, added tokens literally. Its tokenizer.json has a
 * list of merges, which is stored, and which moe follows; llama.cpp merges by scores. Scores are those of
 * tokenizer.model. Without that file the score of a token is minus the place of the first merge that makes it, from 0
 * on, so that the highest score is merged first; tokens that no merge makes have NO_SCORE.
 * ============================================================================================================ */

/* As in GGUF files and tokenizer.model. */
enum token_type {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN,
    TOKEN_CONTROL,
    TOKEN_USER,
    TOKEN_UNUSED,
    TOKEN_BYTE /* <0x00> to <0xFF> of SentencePiece */
};

#define NO_SCORE  -1e9f
#define SPM_BLANK "\xe2\x96\x81" /* U+2581 */

static struct {
    char **text;             /* (vocab_size) NULL: no such token */
    int32_t *type;           /* (vocab_size) enum token_type */
    char **merges;           /* stb_ds: "left right", the first merge first */
    const char *pre;         /* name of the pre-tokenizer */
    bool nfc, ignore_merges; /* normalize to NFC; a piece that is a token is not split */
    bool add_bos;            /* the post-processor adds it; tokenizer_config.json may overrule that */
    bool spm;                /* SentencePiece */
    float *score;            /* (vocab_size) of SentencePiece */
    const char *blanks; /* what stretches get a blank in front: NULL, none; "all"; a value of moe.tokenizer.blanks */
} vocab;

/* Returns an expression with line ends as escapes and with contractions in their short form, as in the table; an stb_ds
 * array. */
static char *normalize_expression(const char *s) {
    static const char spelled[] = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])";
    char *out = NULL;
    while (*s) {
        bool contractions = starts_with(s, spelled);
        char one[2] = {*s};
        const char *put = one;
        if (*s == '\r') put = "\\r";
        if (*s == '\n') put = "\\n";
        if (contractions) put = CONTRACTION;
        memcpy(arraddnptr(out, strlen(put)), put, strlen(put));
        s += contractions ? sizeof spelled - 1 : 1;
    }
    arrput(out, 0);
    return out;
}

/* Appends the expressions of one pre-tokenizer of tokenizer.json. */
static void collect_expressions(struct doc d, char ***list) {
    size_t i;
    json_t *v;
    const char *type = get_str(d, "type", "(none)");
    if (!strcmp(type, "Sequence")) {
        json_array_foreach(get_list(d, "pretokenizers"), i, v) collect_expressions((struct doc){v, d.file, d.in}, list);
    } else if (!strcmp(type, "Split")) {
        struct doc pattern = get_obj(d, "pattern");
        const char *e = get_str(pattern, "Regex", NULL), *how = get_str(d, "behavior", "(none)");
        /* Removed and inverted leaves the matches. That is the same as Isolated if the expression matches
         * everything. */
        bool plain = !strcmp(how, "Isolated") || (!strcmp(how, "Removed") && get_bool(d, "invert", false));
        bool with_next = !strcmp(how, "MergedWithNext") && !get_bool(d, "invert", false);
        if (!e || !(plain || with_next)) die("%s: this Split is not supported: %s", d.file, json_show(d.obj));
        arrput(*list, normalize_expression(with_next ? fmt("%s" HF_WITH_NEXT, e) : e));
    } else if (!strcmp(type, "Digits")) {
        arrput(*list, normalize_expression(get_bool(d, "individual_digits", false) ? "\\p{N}" : "\\p{N}+"));
    } else if (!strcmp(type, "ByteLevel")) {
        expect(d, "add_prefix_space", !get_bool(d, "add_prefix_space", false), "false");
        if (get_bool(d, "use_regex", true)) arrput(*list, normalize_expression(HF_GPT2));
    } else expect(d, "type", false, "Sequence, Split, Digits or ByteLevel");
}

/* Sets vocab.pre by the expressions of the pre-tokenizer d. If several rows of the table have the same expressions, the
 * one is taken whose ignore_merges, then whose nfc, are those of this tokenizer. */
static void recognize_pre_tokenizer(struct doc d) {
    char **list = NULL;
    if (!d.obj) die("%s: key 'pre_tokenizer' is missing: only byte-level BPE and SentencePiece are supported", d.file);
    collect_expressions(d, &list);
    size_t n = arrlenu(list);
    int most = -1;
    const struct pre_tokenizer *found = NULL;
    for (const struct pre_tokenizer *p = pre_tokenizers; p < pre_tokenizers + N_PRE_TOKENIZERS; p++) {
        size_t i = 0;
        while (i < n && i < VOCAB_MAX_EXPRS && p->hf[i] && !strcmp(p->hf[i], list[i])) i++;
        bool same = i == n && n && (i == VOCAB_MAX_EXPRS || !p->hf[i]);
        const int agree = 2 * (p->ignore_merges == vocab.ignore_merges) + (p->nfc == vocab.nfc);
        if (same && agree > most) {
            most = agree;
            found = p;
        }
    }
    if (found) {
        const int len = (int)strcspn(found->names, " ");
        const char *name = fmt("%.*s", len, found->names);
        if (src.pre && strcmp(name, src.pre))
            err_message("%s has the pre-tokenizer %s; %s is written, which models of %s were trained with", d.file,
                        name, src.pre, src.arch);
        vocab.pre = src.pre ? src.pre : xstrdup(name);
    }
    char all[1536] = "";
    for (size_t i = 0; i < n; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? "  then  " : "", list[i]);
    if (!vocab.pre) die("%s: the pre-tokenizer is unknown: %s", d.file, n ? all : "it does not split");
    for (size_t i = 0; i < n; i++) arrfree(list[i]);
    arrfree(list);
}

/* Sets text and type of a token. An added token may repeat an entry of the vocabulary, but must not change its text. */
static void vocab_set(const char *file, const char *text, int64_t id, enum token_type type) {
    if (id < 0 || (size_t)id >= src.n_vocab)
        die("%s: token '%s' has the id %lld, vocab_size is %zu", file, text, (long long)id, src.n_vocab);
    if (vocab.text[id] && strcmp(vocab.text[id], text))
        die("%s: the tokens '%s' and '%s' have the same id %lld", file, vocab.text[id], text, (long long)id);
    if (!vocab.text[id]) vocab.text[id] = xstrdup(text);
    vocab.type[id] = type;
}

/* Returns the type of an added token. Some releases do not mark control tokens as special; like llama.cpp, this goes by
 * their text. */
static enum token_type added_token_type(const char *text, bool special) {
    return special || (starts_with(text, "<|") && ends_with(text, "|>")) ||
                   (starts_with(text, "<｜") && ends_with(text, "｜>"))
               ? TOKEN_CONTROL
               : TOKEN_USER;
}

/* Adds the token that the object d describes. */
static void add_token(struct doc d, int64_t id) {
    const char *text = get_str(d, "content", NULL);
    if (!text) die("%s: an added token without content: %s", d.file, json_show(d.obj));
    static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    for (int i = 0; i < 3; i++) expect(d, flags[i], !get_bool(d, flags[i], false), "false");
    vocab_set(d.file, text, id, added_token_type(text, get_bool(d, "special", false)));
}

/* Reads the normalizer. Byte-level: none or NFC. SentencePiece: none; or U+2581 for blanks, with one in front or
 * without. *escaped: that was found. */
static void read_normalizer(struct doc d, bool *escaped) {
    size_t i;
    json_t *v;
    if (!d.obj) return;
    const char *type = get_str(d, "type", "(none)");
    if (!strcmp(type, "Sequence")) {
        json_array_foreach(get_list(d, "normalizers"), i, v) read_normalizer((struct doc){v, d.file, d.in}, escaped);
    } else if (!vocab.spm) {
        expect(d, "type", !strcmp(type, "NFC"), "none, NFC or a Sequence of those");
        vocab.nfc = true;
    } else if (!strcmp(type, "Prepend")) {
        expect(d, "prepend", !strcmp(get_str(d, "prepend", ""), SPM_BLANK), "U+2581");
        vocab.blanks = "all";
    } else {
        expect(d, "type", !strcmp(type, "Replace"), "none, Prepend, Replace or a Sequence of those");
        expect(d, "pattern", !strcmp(get_str(get_obj(d, "pattern"), "String", ""), " "), "a blank");
        expect(d, "content", !strcmp(get_str(d, "content", ""), SPM_BLANK), "U+2581");
        *escaped = true;
    }
}

/* Reads the pre-tokenizer of SentencePiece: none, one that finds nothing to split, or Metaspace that does not split. */
static void read_metaspace(struct doc d, bool *escaped) {
    if (!d.obj) return;
    /* Gemma's: a split at blanks, of which the normalizer has left none */
    if (*escaped && !strcmp(get_str(d, "type", "(none)"), "Split") &&
        !strcmp(get_str(get_obj(d, "pattern"), "String", ""), " "))
        return;
    expect(d, "type", !strcmp(get_str(d, "type", "(none)"), "Metaspace"), "Metaspace, because of byte_fallback");
    expect(d, "replacement", !strcmp(get_str(d, "replacement", ""), SPM_BLANK), "U+2581");
    expect(d, "split", !get_bool(d, "split", true), "false");
    const char *scheme = get_str(d, "prepend_scheme", get_bool(d, "add_prefix_space", true) ? "always" : "never");
    expect(d, "prepend_scheme", one_of(scheme, "always first never"), "always, first or never");
    if (!strcmp(scheme, "always")) vocab.blanks = "stretches";
    if (!strcmp(scheme, "first")) vocab.blanks = "start";
    *escaped = true;
}

/* Checks the decoder. */
static void read_decoder(struct doc d) {
    size_t i;
    json_t *v;
    const char *type = get_str(d, "type", "ByteLevel");
    if (vocab.spm && !strcmp(type, "Sequence")) {
        json_array_foreach(get_list(d, "decoders"), i, v) read_decoder((struct doc){v, d.file, d.in});
    } else if (vocab.spm) {
        expect(d, "type", !d.obj || one_of(type, "Replace ByteFallback Fuse Strip Metaspace"),
               "Replace, ByteFallback, Fuse, Strip, Metaspace or a Sequence of those");
    } else expect(d, "type", !strcmp(type, "ByteLevel"), "ByteLevel");
}

/* Whether a text is the token of a byte of SentencePiece. */
static bool is_byte_token(const char *text) {
    return strlen(text) == 6 && starts_with(text, "<0x") && text[5] == '>' && strspn(text + 3, "0123456789ABCDEF") == 2;
}

/* Reads the post-processor: it adds nothing, or one token before the text, the beginning-of-sequence token. */
static void read_post_processor(struct doc d) {
    size_t i;
    json_t *v;
    if (!d.obj) return;
    const char *type = get_str(d, "type", "(none)");
    if (!strcmp(type, "ByteLevel")) return;
    if (!strcmp(type, "Sequence")) {
        json_array_foreach(get_list(d, "processors"), i, v) read_post_processor((struct doc){v, d.file, d.in});
        return;
    }
    expect(d, "type", !strcmp(type, "TemplateProcessing"), "ByteLevel, TemplateProcessing or a Sequence");
    json_t *single = get_list(d, "single");
    size_t n = json_array_size(single);
    bool bos = n == 2 && json_object_get(json_array_get(single, 0), "SpecialToken");
    expect(d, "single", (n == 1 || bos) && json_object_get(json_array_get(single, n - 1), "Sequence"),
           "the text, or one token and the text");
    vocab.add_bos = bos;
}

/* Reads the merges, "a b" or ["a","b"]. Both parts and their concatenation must be tokens. */
static void read_merges(struct doc model, json_t *tokens) {
    size_t i;
    json_t *v;
    json_array_foreach(get_list(model, "merges"), i, v) {
        const char *a = json_string_value(json_array_get(v, 0)), *b = json_string_value(json_array_get(v, 1));
        char *pair = json_is_string(v)                   ? xstrdup(json_string_value(v))
                     : a && b && json_array_size(v) == 2 ? xstrdup(fmt("%s %s", a, b))
                                                         : NULL;
        char *space = pair ? strchr(pair, ' ') : NULL;
        if (!space || space == pair || !space[1] || strchr(space + 1, ' '))
            die("%s: merge %zu: expected two parts without spaces, found %s", model.file, i, json_show(v));
        *space = 0;
        json_t *whole = json_object_get(tokens, fmt("%s%s", pair, space + 1));
        if (!json_object_get(tokens, pair) || !json_object_get(tokens, space + 1) || !whole)
            die("%s: merge %zu: %s: a part or the whole is not in the vocabulary", model.file, i, json_show(v));
        *space = ' ';
        arrput(vocab.merges, pair);
        float *score = &vocab.score[json_integer_value(whole)];
        if (*score == NO_SCORE) *score = -(float)i;
    }
}

/* Reads tokenizer.json. */
static void read_tokenizer_json(struct doc d) {
    struct doc model = get_obj(d, "model"), tokens = get_obj(model, "vocab");
    size_t i;
    const char *text;
    json_t *v;
    bool escaped = false;
    expect(model, "type", !strcmp(get_str(model, "type", "BPE"), "BPE"), "BPE");
    expect(d, "model", tokens.obj, "an object with a vocabulary");
    vocab.spm = get_bool(model, "byte_fallback", false);
    expect(model, "end_of_word_suffix", !*get_str(model, "end_of_word_suffix", ""), "none");
    expect(model, "continuing_subword_prefix", !*get_str(model, "continuing_subword_prefix", ""), "none");
    vocab.ignore_merges = get_bool(model, "ignore_merges", false);
    expect(model, "ignore_merges", !vocab.spm || !vocab.ignore_merges, "false, because of byte_fallback");
    json_object_foreach(tokens.obj, text, v) {
        vocab_set(d.file, text, get_int(tokens, text, 0, INT32_MAX, REQUIRED),
                  vocab.spm && is_byte_token(text) ? TOKEN_BYTE : TOKEN_NORMAL);
    }
    read_merges(model, tokens.obj);
    json_array_foreach(get_list(d, "added_tokens"), i, v) {
        struct doc t = {v, d.file, "added_tokens"};
        add_token(t, get_int(t, "id", 0, INT32_MAX, REQUIRED));
    }
    read_normalizer(get_obj(d, "normalizer"), &escaped);
    if (vocab.spm) read_metaspace(get_obj(d, "pre_tokenizer"), &escaped);
    else recognize_pre_tokenizer(get_obj(d, "pre_tokenizer"));
    expect(d, "normalizer", !vocab.spm || escaped, "Replace, because of byte_fallback: U+2581 stands for a blank");
    read_post_processor(get_obj(d, "post_processor"));
    read_decoder(get_obj(d, "decoder"));
}

/* ============================================================================================================
 * Vocabulary: tiktoken
 *
 * tiktoken.model has lines "BASE64 RANK". The rank of a token is its id and its place in the order of merging. The
 * file has no merges; derive_merge finds the one that makes a token.
 * ============================================================================================================ */

struct bytes {
    uint8_t *p;
    uint32_t n;
};

static struct bytes *ranks; /* stb_ds, by rank */
static int32_t *rank_table; /* (rank_mask + 1) hash table from bytes to rank with linear probing; -1: empty */
static size_t rank_mask;    /* a power of two minus 1 */

static size_t rank_hash(const uint8_t *p, size_t n) {
    uint64_t h = hash_bytes(HASH_START, p, n);
    return (size_t)(h ^ h >> 29);
}

/* Returns the slot of these bytes in rank_table: the one with their rank, or the empty one where it belongs. */
static int32_t *rank_slot(const uint8_t *p, size_t n) {
    size_t i = rank_hash(p, n) & rank_mask;
    while (rank_table[i] >= 0 && (ranks[rank_table[i]].n != n || memcmp(ranks[rank_table[i]].p, p, n)))
        i = (i + 1) & rank_mask;
    return &rank_table[i];
}

/* Returns decoded base64; n = 0 if it is malformed. The caller frees p. */
static struct bytes base64_decode(const char *s, size_t n) {
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    struct bytes b = {xrealloc(NULL, n), 0};
    uint32_t acc = 0, bits = 0;
    while (n && s[n - 1] == '=') n--;
    for (size_t i = 0; i < n; i++) {
        const char *c = s[i] ? strchr(alphabet, s[i]) : NULL;
        if (!c) return (struct bytes){b.p, 0};
        acc = acc << 6 | (uint32_t)(c - alphabet);
        bits += 6;
        if (bits >= 8) {
            bits -= 8;
            b.p[b.n++] = (uint8_t)(acc >> bits);
        }
    }
    return b;
}

/* Returns bytes in GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes become U+0100 and up in
 * their order. Valid until the next call. */
static const char *alphabet_text(struct bytes b) {
    static char *out;
    arrsetlen(out, 0);
    for (uint32_t i = 0; i < b.n; i++) {
        uint32_t c = b.p[i], cp = c;
        if (c < 33) cp = 256 + c;
        else if (c >= 127 && c < 161) cp = 256 + 33 + c - 127;
        else if (c == 173) cp = 256 + 67;
        if (cp >= 128) arrput(out, (char)(0xc0 | cp >> 6));
        arrput(out, (char)(cp < 128 ? cp : 0x80 | (cp & 63)));
    }
    arrput(out, 0);
    return out;
}

/* Appends the merge that makes a token: encodes its bytes with the tokens of smaller rank; if that leaves two parts,
 * they are the merge. O(n^2) in the length of the token. */
static void derive_merge(int32_t rank) {
    struct bytes t = ranks[rank];
    static uint32_t *cut; /* stb_ds: where the parts begin, and the end */
    arrsetlen(cut, t.n + 1);
    for (uint32_t i = 0; i <= t.n; i++) cut[i] = i;
    for (;;) {
        size_t parts = arrlenu(cut) - 1, best = 0;
        int32_t least = rank;
        for (size_t i = 0; i + 1 < parts; i++) {
            int32_t r = *rank_slot(t.p + cut[i], cut[i + 2] - cut[i]);
            if (r >= 0 && r < least) {
                least = r;
                best = i;
            }
        }
        if (least == rank) break;
        arrdel(cut, best + 1);
    }
    if (arrlenu(cut) != 3) return;
    char *left = xstrdup(alphabet_text((struct bytes){t.p, cut[1]}));
    arrput(vocab.merges, xstrdup(fmt("%s %s", left, alphabet_text((struct bytes){t.p + cut[1], t.n - cut[1]}))));
    free(left);
}

/* Reads tiktoken.model; config: tokenizer_config.json. */
static void read_tiktoken(const char *file, struct doc config) {
    FILE *f = input_file(in_dir(file));
    char *line = NULL;
    size_t cap = 0, n_line = 0;
    ssize_t len;
    expect(config, "tokenizer_class", !strcmp(get_str(config, "tokenizer_class", ""), "TikTokenTokenizer"),
           fmt("\"TikTokenTokenizer\" (Kimi) beside %s", file));
    while ((len = line_next(f, file, &line, &cap)) > 0) {
        n_line++;
        while (len && (line[len - 1] == '\n' || line[len - 1] == '\r')) line[--len] = 0;
        if (!len) continue;
        char *space = strchr(line, ' '), *end = NULL;
        long rank = space ? strtol(space + 1, &end, 10) : -1;
        struct bytes b = space ? base64_decode(line, (size_t)(space - line)) : (struct bytes){0};
        if (!b.n || !end || *end || end == space + 1 || rank != (long)arrlen(ranks) || rank >= MAX_VOCAB || b.n > 1024)
            die("%s: line %zu: expected base64 and the rank %td", file, n_line, arrlen(ranks));
        arrput(ranks, b);
    }
    if (!n_line) die("%s: the file is empty", file);
    free(line);
    fclose(f);
    for (rank_mask = 1; rank_mask < 2 * arrlenu(ranks); rank_mask *= 2) {}
    rank_table = xrealloc(NULL, rank_mask * sizeof *rank_table);
    memset(rank_table, 0xff, rank_mask * sizeof *rank_table);
    rank_mask--;
    int32_t n = (int32_t)arrlen(ranks);
    for (int32_t r = 0; r < n; r++) {
        int32_t *slot = rank_slot(ranks[r].p, ranks[r].n);
        if (*slot >= 0) die("%s: the ranks %d and %d are the same bytes", file, *slot, r);
        *slot = r;
        vocab_set(file, alphabet_text(ranks[r]), r, TOKEN_NORMAL);
    }
    for (int32_t r = 0; r < n; r++)
        if (ranks[r].n > 1) derive_merge(r);
    vocab.pre = "kimi-k2";
}

/* ============================================================================================================
 * Vocabulary: SentencePiece
 *
 * tokenizer.model is a protobuf message:
 *
 *   1: a piece of the vocabulary, once for each id {1: text, 2: score, 3: enum token_type}
 *   2: how it was trained {3: model type, 24: blanks at the ends of words, 35: tokens for bytes}
 *   3: how text is normalized {1: name, 2: map of characters, 3: blank in front, 4: blanks are merged, 5: U+2581}
 * ============================================================================================================ */

/* What is left of a message. */
struct wire {
    const uint8_t *p, *end;
    const char *file;
};

struct field {
    uint32_t number;
    uint64_t value;    /* of a varint, or the bits of a float */
    struct wire bytes; /* of a field with a length; otherwise empty */
};

static uint64_t wire_varint(struct wire *w) {
    uint64_t v = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (w->p == w->end) die("%s: the file is cut off", w->file);
        v |= (uint64_t)(*w->p & 127) << shift;
        if (!(*w->p++ & 128)) return v;
    }
    die("%s: a number has more than 10 bytes", w->file);
}

/* Reads the next field of a message; false at its end. */
static bool wire_next(struct wire *w, struct field *f) {
    if (w->p == w->end) return false;
    const uint64_t tag = wire_varint(w), type = tag & 7;
    if (tag >> 32 || (type != 0 && type != 1 && type != 2 && type != 5))
        die("%s: this is not a model of SentencePiece", w->file);
    *f = (struct field){.number = (uint32_t)(tag >> 3)};
    if (type == 0) {
        f->value = wire_varint(w);
        return true;
    }
    const uint64_t n = type == 2 ? wire_varint(w) : type == 1 ? 8 : 4;
    if (n > (uint64_t)(w->end - w->p)) die("%s: the file is cut off", w->file);
    if (type == 2) f->bytes = (struct wire){w->p, w->p + n, w->file};
    else f->value = type == 5 ? gguf_rd32(w->p) : gguf_rd64(w->p);
    w->p += n;
    return true;
}

/* Reads a piece: text (malloc'ed), type and score. */
static char *read_piece(struct wire w, int64_t id, enum token_type *type, float *score) {
    char *text = NULL;
    struct field f;
    *type = TOKEN_NORMAL;
    *score = 0;
    while (wire_next(&w, &f)) {
        if (f.number == 2) *score = f32_from_bits((uint32_t)f.value);
        if (f.number == 3 && (f.value < TOKEN_NORMAL || f.value > TOKEN_BYTE))
            die("%s: piece %lld has the type %llu, expected 1 to 6", w.file, (long long)id,
                (unsigned long long)f.value);
        if (f.number == 3) *type = (enum token_type)f.value;
        if (f.number != 1) continue;
        const size_t n = (size_t)(f.bytes.end - f.bytes.p);
        if (!n || memchr(f.bytes.p, 0, n) || !utf8_valid((const char *)f.bytes.p, n))
            die("%s: the text of piece %lld is not UTF-8", w.file, (long long)id);
        free(text);
        text = xstrndup((const char *)f.bytes.p, n);
    }
    if (!text) die("%s: piece %lld has no text", w.file, (long long)id);
    if (!isfinite(*score)) die("%s: the score of piece %lld is not finite", w.file, (long long)id);
    if (*type == TOKEN_BYTE && !is_byte_token(text))
        die("%s: piece %lld is '%s', expected a byte <0x00> to <0xFF>", w.file, (long long)id, text);
    return text;
}

/* Dies unless a model is BPE with tokens for bytes and blanks in front of words. */
static void check_trainer(struct wire w) {
    uint64_t type = 1;
    bool suffix = false, bytes = false;
    struct field f;
    while (wire_next(&w, &f)) {
        if (f.number == 3) type = f.value;
        if (f.number == 24) suffix = f.value;
        if (f.number == 35) bytes = f.value;
    }
    if (type != 2) die("%s: the model has the type %llu, expected 2 (BPE)", w.file, (unsigned long long)type);
    if (!bytes) die("%s: the model has no tokens for bytes (byte_fallback)", w.file);
    if (suffix) die("%s: the model puts blanks at the ends of words, expected in front", w.file);
}

/* Returns whether a blank goes in front of text. Dies if text is changed in any other way. */
static bool read_normalization(struct wire w) {
    bool front = true, merged = true, escaped = true, map = false;
    struct field f;
    while (wire_next(&w, &f)) {
        if (f.number == 2) map = f.bytes.p < f.bytes.end;
        if (f.number == 3) front = f.value;
        if (f.number == 4) merged = f.value;
        if (f.number == 5) escaped = f.value;
    }
    if (map) die("%s: the model normalizes characters, expected the normalizer 'identity'", w.file);
    if (merged) die("%s: the model merges blanks (remove_extra_whitespaces), expected not", w.file);
    if (!escaped) die("%s: the model does not write U+2581 for a blank (escape_whitespaces)", w.file);
    return front;
}

/* Takes over the scores of tokenizer.model, if its ordinary pieces are the tokens of tokenizer.json. */
static void take_scores(const char *file, char *const *text, const enum token_type *type, const float *score,
                        size_t n) {
    for (size_t i = 0; i < n; i++)
        if (type[i] == TOKEN_NORMAL && (i >= src.n_vocab || !vocab.text[i] || strcmp(vocab.text[i], text[i]))) {
            err_message("piece %zu of %s is '%s', another token than in tokenizer.json: its scores are not used", i,
                        file, text[i]);
            return;
        }
    memcpy(vocab.score, score, n * sizeof *score);
}

/* Reads tokenizer.model; config: tokenizer_config.json. After tokenizer.json it only gives the scores. */
static void read_sentencepiece(const char *file, struct doc config, bool only_scores) {
    char *data = NULL, err[ERR_MAX], **text = NULL;
    enum token_type *type = NULL;
    float *score = NULL;
    bool front = true, defined = false, trained = false, normalized = false;
    struct field f;
    close(input_open(in_dir(file)));
    if (read_file(in_dir(file), &data, err)) die("%s", err);
    struct wire whole = {(const uint8_t *)data, (const uint8_t *)data + arrlenu(data), file};
    while (wire_next(&whole, &f)) {
        if (f.number == 2) check_trainer(f.bytes);
        if (f.number == 3) front = read_normalization(f.bytes);
        trained |= f.number == 2;
        normalized |= f.number == 3;
        if (f.number != 1) continue;
        enum token_type t;
        float x;
        arrput(text, read_piece(f.bytes, arrlen(text), &t, &x));
        arrput(type, t);
        arrput(score, x);
        defined |= t == TOKEN_USER;
    }
    if (!arrlen(text) || !trained || !normalized) die("%s: this is not a model of SentencePiece", file);
    const size_t n = arrlenu(text);
    if (only_scores) {
        if (n <= src.n_vocab) take_scores(file, text, type, score, n);
    } else {
        vocab.spm = vocab.add_bos = true;
        for (size_t i = 0; i < n; i++) {
            vocab_set(file, text[i], (int64_t)i, type[i]);
            vocab.score[i] = score[i];
        }
        const char *always = get_bool(config, "legacy", true) ? defined ? "control" : "all" : "start";
        vocab.blanks = get_bool(config, "add_prefix_space", front) ? always : NULL;
    }
    for (size_t i = 0; i < n; i++) free(text[i]);
    arrfree(text), arrfree(type), arrfree(score), arrfree(data);
}

/* Adds the tokens of added_tokens.json, {"text": id}. */
static void read_added_tokens(void) {
    struct doc d = doc_read("added_tokens.json");
    const char *text;
    json_t *v;
    json_object_foreach(d.obj, text, v) {
        vocab_set(d.file, text, get_int(d, text, 0, INT32_MAX, REQUIRED), added_token_type(text, false));
    }
    json_decref(d.obj);
}

/* Adds the tokens of tokenizer_config.json. Ids without a token among the 256 special ones of a tiktoken model get the
 * names that Kimi's tokenizer gives them. */
static void read_added_decoder(struct doc config) {
    struct doc added = get_obj(config, "added_tokens_decoder");
    const char *key;
    json_t *v;
    json_object_foreach(added.obj, key, v) {
        char *end;
        long id = strtol(key, &end, 10);
        expect(added, key, !*end && end != key && json_is_object(v), "ids and tokens");
        add_token((struct doc){v, config.file, added.in}, id);
    }
    if (!arrlen(ranks)) return;
    for (int64_t id = arrlen(ranks); id < arrlen(ranks) + 256 && (size_t)id < src.n_vocab; id++)
        if (!vocab.text[id]) vocab_set(config.file, fmt("<|reserved_token_%lld|>", (long long)id), id, TOKEN_CONTROL);
}

/* Whether the tokenizer is Gemma's: merging makes added tokens, too, and they are found in text before blanks become
 * U+2581. */
static bool is_gemma(void) { return vocab.spm && !strcmp(src.arch, "gemma4") && !vocab.blanks && arrlen(vocab.merges); }

/* Writes blanks for U+2581 in place: user-defined tokens are found in text as it is. */
static void unescape_blanks(char *text) {
    for (char *hit = text; (hit = strstr(hit, SPM_BLANK)); hit++) {
        *hit = ' ';
        memmove(hit + 1, hit + 3, strlen(hit + 3) + 1);
    }
}

/* Reads all tokens. Ids without a token become unused ones. */
static void read_vocabulary(struct doc config) {
    size_t n = src.n_vocab;
    vocab.text = xrealloc(NULL, n * sizeof *vocab.text);
    vocab.type = xrealloc(NULL, n * sizeof *vocab.type);
    vocab.score = xrealloc(NULL, n * sizeof *vocab.score);
    memset(vocab.text, 0, n * sizeof *vocab.text);
    for (size_t i = 0; i < n; i++) vocab.score[i] = NO_SCORE;
    struct doc d = doc_read("tokenizer.json");
    const bool pieces = !access(in_dir("tokenizer.model"), F_OK);
    if (d.obj) {
        read_tokenizer_json(d);
        if (vocab.spm && pieces) read_sentencepiece("tokenizer.model", config, true);
    } else if (!access(in_dir("tiktoken.model"), F_OK)) {
        read_tiktoken("tiktoken.model", config);
    } else if (pieces) {
        read_sentencepiece("tokenizer.model", config, false);
        read_added_tokens();
    } else die("'%s' has neither tokenizer.json nor tiktoken.model nor tokenizer.model", model_dir);
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += vocab.text[i] && vocab.type[i] == TOKEN_BYTE;
    if (vocab.spm && bytes != 256) die("'%s': the tokenizer has %zu tokens for bytes, expected 256", model_dir, bytes);
    if ((d.obj || !vocab.spm) && !arrlen(vocab.merges))
        die("'%s': the tokenizer has no merges: only BPE is supported", model_dir);
    json_decref(d.obj);
    read_added_decoder(config);
    for (size_t i = 0; i < n; i++) {
        if (vocab.text[i] && vocab.spm && vocab.type[i] == TOKEN_USER && !is_gemma()) unescape_blanks(vocab.text[i]);
        if (vocab.text[i]) continue;
        vocab.text[i] = xstrdup(fmt("[PAD%zu]", i));
        vocab.type[i] = TOKEN_UNUSED;
    }
}

/* ============================================================================================================
 * Vocabulary: n-grams
 *
 * The tables of n-grams of DeepSeek-V4.1 (Engram, arXiv 2601.07372) have rows for hashes of tokens' numbers. Tokens
 * have the same number that differ by case, accents and blanks alone. The factors of the hashes are random numbers of
 * numpy.random.default_rng, the sizes of the tables primes. The release computes all of them; the file has them.
 * ============================================================================================================ */

/* Ranges of characters that the release's normalizer (of the library tokenizers) neither decomposes nor removes: its
 * data are Unicode 9's. All later marks and later characters with decompositions are in them. */
static const utf8proc_int32_t newer[][2] = {
    {0x7f4, 0x815},     {0x85c, 0x8d3},     {0x9e4, 0xa00},     {0xae4, 0xb00},     {0xb4e, 0xb55},
    {0xc04, 0xc3d},     {0xce4, 0xd00},     {0xd04, 0xd3d},     {0xd64, 0xd81},     {0xeba, 0xeba},
    {0xece, 0xedb},     {0x1715, 0x1731},   {0x180e, 0x1884},   {0x1abf, 0x1aff},   {0x1cf5, 0x1cf7},
    {0x1df6, 0x1dfa},   {0x32ff, 0x32ff},   {0xa771, 0xa7f7},   {0xa828, 0xa87f},   {0xa8f2, 0xa925},
    {0xab60, 0xabe2},   {0x1037b, 0x10a00}, {0x10ae7, 0x10fff}, {0x11047, 0x1107e}, {0x110bb, 0x110ff},
    {0x11135, 0x11172}, {0x111c1, 0x111c9}, {0x111cd, 0x1122b}, {0x1123f, 0x112de}, {0x11304, 0x1133b},
    {0x11375, 0x11434}, {0x11447, 0x114af}, {0x1172c, 0x11c2e}, {0x11cb7, 0x16aef}, {0x16b37, 0x16f50},
    {0x16f7f, 0x16f8e}, {0x16f93, 0x1bc9c}, {0x1bc9f, 0x1d15d}, {0x1e02b, 0x1e8cf}, {0x1f16c, 0x1f18f},
    {0x1f252, 0x2f7ff}};

static bool is_newer(utf8proc_int32_t cp) {
    size_t i = 0;
    while (i < COUNT(newer) && cp > newer[i][1]) i++;
    return i < COUNT(newer) && cp >= newer[i][0];
}

/* Whether a character is an accent: a mark. Two letters of Vedic were marks in Unicode 9. */
static bool is_accent(utf8proc_int32_t cp) {
    const utf8proc_category_t c = utf8proc_category(cp);
    return c == UTF8PROC_CATEGORY_MN || c == UTF8PROC_CATEGORY_MC || c == UTF8PROC_CATEGORY_ME || cp == 0x1cf2 ||
           cp == 0x1cf3;
}

/* Whether a character of a decomposed text is white space. */
static bool is_white(utf8proc_int32_t cp) {
    return cp == ' ' || (cp >= 9 && cp <= 13) || cp == 0x85 || cp == 0x1680 || cp == 0x2028 || cp == 0x2029;
}

/* Returns n bytes of valid UTF-8 decomposed (NFKD), in lower case and without accents, an stb_ds array. A run of
 * blanks, tabs and line ends becomes one blank. White space at the ends is removed, unless the whole is one blank. A
 * text of which nothing would remain is returned as it is. */
static char *plain_text(const char *s, size_t n) {
    enum { PARTS = 32, SENTINEL = 0xe000 }; /* the release's sign for a lone blank becomes a blank wherever it is */
    const utf8proc_uint8_t *u = (const utf8proc_uint8_t *)s;
    utf8proc_int32_t cp, part[PARTS], *all = NULL;
    char *out = NULL;
    for (size_t i = 0; i < n;) {
        int bound = 0;
        i += (size_t)utf8proc_iterate(u + i, (utf8proc_ssize_t)(n - i), &cp);
        utf8proc_ssize_t k = 1;
        part[0] = cp;
        if (!is_newer(cp)) k = utf8proc_decompose_char(cp, part, PARTS, UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT, &bound);
        for (utf8proc_ssize_t j = 0; j < k; j++) {
            const bool blank = part[j] == ' ' || part[j] == '\t' || part[j] == '\r' || part[j] == '\n';
            if (is_accent(part[j]) && !is_newer(part[j])) continue;
            if (!blank) arrput(all, utf8proc_tolower(part[j]));
            else if (!arrlen(all) || arrlast(all) != ' ') arrput(all, ' ');
        }
    }
    size_t first = 0, last = arrlenu(all);
    const bool lone = last == 1 && all[0] == ' ';
    while (!lone && first < last && is_white(all[first])) first++;
    while (!lone && first < last && is_white(all[last - 1])) last--;
    for (size_t i = first; i < last; i++) {
        utf8proc_uint8_t one[4];
        const utf8proc_ssize_t k = utf8proc_encode_char(all[i] == SENTINEL ? ' ' : all[i], one);
        memcpy(arraddnptr(out, k), one, (size_t)k);
    }
    if (!arrlen(out) && n) memcpy(arraddnptr(out, n), s, n);
    arrfree(all);
    return out;
}

/* A token, and the text by which it gets its number: equal texts get equal numbers. */
struct token_key {
    char *text; /* stb_ds */
    int32_t token;
};

/* By text, then by token. */
static int compare_keys(const void *a, const void *b) {
    const struct token_key *x = a, *y = b;
    const size_t n = arrlenu(x->text), m = arrlenu(y->text);
    const int order = n && m ? memcmp(x->text, y->text, n < m ? n : m) : 0;
    if (order) return order;
    return n != m ? (n < m ? -1 : 1) : (x->token > y->token) - (x->token < y->token);
}

/* Returns the bytes of a token, whose name is in GPT-2's alphabet or, of added tokens, as it is; an stb_ds array. */
static char *token_bytes(const char *name) {
    enum { LETTERS = 256 + 68 };
    static int16_t byte_of[LETTERS];
    const utf8proc_uint8_t *u = (const utf8proc_uint8_t *)name;
    utf8proc_int32_t cp;
    char *out = NULL;
    for (int b = byte_of['!'] ? 256 : 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        utf8proc_iterate((const utf8proc_uint8_t *)alphabet_text((struct bytes){&byte, 1}), -1, &cp);
        byte_of[cp] = (int16_t)(b + 1);
    }
    for (; *u; u += utf8proc_iterate(u, -1, &cp)) {
        if (utf8proc_iterate(u, -1, &cp) <= 0 || cp >= LETTERS || !byte_of[cp]) {
            arrsetlen(out, 0);
            memcpy(arraddnptr(out, strlen(name)), name, strlen(name));
            return out;
        }
        arrput(out, (char)(byte_of[cp] - 1));
    }
    return out;
}

/* Returns the text of struct token_key for a token: its normalized text, or its name if its bytes are not valid
 * UTF-8. */
static char *token_text(const char *name) {
    char *bytes = token_bytes(name), *key = NULL;
    const utf8proc_ssize_t n = (utf8proc_ssize_t)arrlen(bytes);
    utf8proc_int32_t cp = 0;
    utf8proc_ssize_t i = 0, k = 1;
    for (; i < n && k > 0 && cp != 0xfffd; i += k)
        k = utf8proc_iterate((const utf8proc_uint8_t *)bytes + i, n - i, &cp);
    if (k > 0 && cp != 0xfffd) key = plain_text(bytes, (size_t)n);
    else memcpy(arraddnptr(key, strlen(name)), name, strlen(name));
    arrfree(bytes);
    return key;
}

/* Writes the number of every token. Numbers rise by the first token that has them. Ids without a token have that of the
 * token that stands before a text. */
static void put_token_map(void) {
    struct doc c = src.cfg;
    if (!json_array_size(get_list(c, "engram_layer_ids"))) return;
    const size_t n = src.n_vocab, pad = (size_t)get_int(c, "engram_pad_token_id", 0, (int64_t)n - 1, REQUIRED);
    struct token_key *keys = xrealloc(NULL, n * sizeof *keys);
    int32_t *number = xrealloc(NULL, n * sizeof *number), *first = xrealloc(NULL, n * sizeof *first), count = 0;
    if (vocab.spm) die("'%s': n-grams of tokens need byte-level BPE, the tokenizer is SentencePiece", model_dir);
    for (size_t i = 0; i < n; i++) {
        const bool unused = vocab.type[i] == TOKEN_UNUSED;
        keys[i] = (struct token_key){unused ? NULL : token_text(vocab.text[i]), (int32_t)i};
        if (unused) arrput(keys[i].text, (char)0xff); /* no token's, which are UTF-8 */
    }
    qsort(keys, n, sizeof *keys, compare_keys);
    for (size_t i = 0, from = 0; i < n; i++) {
        if (i && (arrlenu(keys[i].text) != arrlenu(keys[from].text) ||
                  (arrlen(keys[i].text) && memcmp(keys[i].text, keys[from].text, arrlenu(keys[i].text)) != 0)))
            from = i;
        first[keys[i].token] = keys[from].token;
    }
    for (size_t i = 0; i < n; i++)
        if (vocab.type[i] != TOKEN_UNUSED) number[i] = first[i] == (int32_t)i ? count++ : number[first[i]];
    for (size_t i = 0; i < n; i++)
        if (vocab.type[i] == TOKEN_UNUSED) number[i] = vocab.type[pad] == TOKEN_UNUSED ? 0 : number[pad];
    expect(c, "engram_compressed_vocab_size",
           get_int(c, "engram_compressed_vocab_size", 1, (int64_t)n, REQUIRED) == count,
           fmt("%d, the tokens that differ by more than case, accents and blanks", count));
    kv_array("engram.token_map", GGUF_V_I32, (int)n, number);
    for (size_t i = 0; i < n; i++) arrfree(keys[i].text);
    free(keys);
    free(number);
    free(first);
}

/* Random numbers of numpy.random.default_rng(seed): PCG64 (XSL-RR), whose state and increment a SeedSequence makes. */
struct numpy_rng {
    unsigned __int128 state, increment;
};

static uint64_t numpy_next(struct numpy_rng *r) {
    static const uint64_t high = 0x2360ed051fc65da4, low = 0x4385df649fccf645;
    r->state = r->state * ((unsigned __int128)high << 64 | low) + r->increment;
    const uint64_t mixed = (uint64_t)(r->state >> 64) ^ (uint64_t)r->state;
    const int turn = (int)(r->state >> 122);
    return mixed >> turn | mixed << (-turn & 63);
}

/* Mixes a word with a constant that is multiplied each time. */
static uint32_t seed_hash(uint32_t v, uint32_t *constant, uint32_t factor) {
    v ^= *constant;
    *constant *= factor;
    v *= *constant;
    return v ^ v >> 16;
}

static struct numpy_rng numpy_seed(uint32_t seed) {
    enum { POOL = 4, WORDS = 8 };
    uint32_t pool[POOL], constant = 0x43b0d7e5;
    uint64_t out[WORDS / 2] = {0};
    for (int i = 0; i < POOL; i++) pool[i] = seed_hash(i ? 0 : seed, &constant, 0x931e8875);
    for (int from = 0; from < POOL; from++)
        for (int to = 0; to < POOL; to++) {
            if (from == to) continue;
            const uint32_t v = 0xca01f9ddu * pool[to] - 0x4973f715u * seed_hash(pool[from], &constant, 0x931e8875);
            pool[to] = v ^ v >> 16;
        }
    constant = 0x8b51f9dd;
    for (int i = 0; i < WORDS; i++)
        out[i / 2] |= (uint64_t)seed_hash(pool[i % POOL], &constant, 0x58f38ded) << i % 2 * 32;
    struct numpy_rng r = {0, ((unsigned __int128)out[2] << 64 | out[3]) << 1 | 1};
    numpy_next(&r);
    r.state += (unsigned __int128)out[0] << 64 | out[1];
    numpy_next(&r);
    return r;
}

/* Returns a number below n, as Generator.integers does for n above 2^32 (arXiv 1805.10941, algorithm 5). */
static uint64_t numpy_below(struct numpy_rng *r, uint64_t n) {
    unsigned __int128 m = (unsigned __int128)numpy_next(r) * n;
    while ((uint64_t)m < -n % n) m = (unsigned __int128)numpy_next(r) * n;
    return (uint64_t)(m >> 64);
}

static bool is_prime(int64_t n) {
    for (int64_t d = 2; d * d <= n; d++)
        if (n % d == 0) return false;
    return n > 1;
}

/* Writes how the layers' tables of n-grams are found. The heads' rows are primes from engram_vocab_size on, none twice
 * in the model. */
static void put_engrams(void) {
    struct doc c = src.cfg;
    json_t *layers = get_list(c, "engram_layer_ids"), *counts = get_list(c, "engram_num_embeddings");
    const size_t n = json_array_size(layers);
    if (!n) return;
    const size_t size = (size_t)get_int(c, "engram_max_ngram_size", 2, NGRAM_MAX, REQUIRED);
    const size_t each = (size_t)get_int(c, "engram_n_heads", 1, NGRAM_HEADS / ((int64_t)size - 1), REQUIRED);
    const int64_t numbers = get_int(c, "engram_compressed_vocab_size", 1, (int64_t)src.n_vocab, REQUIRED);
    int64_t prime = get_int(c, "engram_vocab_size", 2, INT32_MAX / 2, REQUIRED);
    int32_t *rows = NULL, *sizes = NULL, *offsets = NULL;
    int64_t *factors = NULL;
    expect(c, "engram_num_embeddings", json_array_size(counts) == n, fmt("a number for each of %zu layers", n));
    for (size_t i = 0; i < n; i++) {
        int64_t sum = 0;
        struct numpy_rng r = numpy_seed(10007u * (uint32_t)json_element(layers, i));
        for (size_t k = 0; k < (size - 1) * each; k++, prime++) {
            while (!is_prime(prime)) prime++;
            arrput(sizes, (int32_t)prime);
            arrput(offsets, (int32_t)sum);
            sum += prime;
            expect(c, "engram_vocab_size", sum <= INT32_MAX, fmt("tables of at most %d rows", INT32_MAX));
        }
        expect(c, "engram_num_embeddings", json_element(counts, i) == sum,
               fmt("%lld for table %zu, the sum of %zu primes", (long long)sum, i, (size - 1) * each));
        arrput(rows, (int32_t)sum);
        for (size_t k = 0; k < size; k++)
            arrput(factors, (int64_t)(2 * numpy_below(&r, (uint64_t)(INT64_MAX / numbers / 2)) + 1));
    }
    put_sources("engram_layer_ids", "engram.layers");
    kv_u32("engram.ngram_size", size);
    kv_u32("engram.head_count", each);
    kv_u32("engram.head_dim", size_of("engram_head_dim"));
    kv_array("engram.embedding_counts", GGUF_V_I32, (int)n, rows);
    kv_array("engram.head_bucket_sizes", GGUF_V_I32, (int)arrlen(sizes), sizes);
    kv_array("engram.head_offsets", GGUF_V_I32, (int)arrlen(offsets), offsets);
    kv_array("engram.multipliers", GGUF_V_I64, (int)arrlen(factors), factors);
    kv_u32("engram.compressed_vocab_size", (size_t)numbers);
    kv_u32("engram.pad_token_id", (size_t)get_int(c, "engram_pad_token_id", 0, (int64_t)src.n_vocab - 1, REQUIRED));
    arrfree(rows);
    arrfree(sizes);
    arrfree(offsets);
    arrfree(factors);
}

/* ============================================================================================================
 * Metadata
 *
 * Writes the keys of the GGUF file under the names that llama.cpp uses, and moe.reap.* for pruned models.
 * ============================================================================================================ */

/* Writes the shares of time, height and width in a rotation, which are the same number for text. */
static void put_rope_sections(struct doc r) {
    int32_t sections[4] = {0};
    json_t *list = get_list(r, "mrope_section");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const int64_t n = json_element(list, i);
        expect(r, "mrope_section", i < 4 && n >= 0 && n <= INT32_MAX, "at most four numbers from 0 up");
        sections[i] = (int32_t)n;
    }
    kv_array("rope.dimension_sections", GGUF_V_I32, 4, list ? sections : src.sections);
}

/* Writes how many values are rotated. Step-3.5 has no key: layers without a window rotate half of a head. */
static void put_rotated(struct doc r) {
    const size_t head = head_k(), n = src.proportional ? head : rotated(r, false);
    const bool half = !src.partial && src.window_rope && src.mixer != MIXER_MLA;
    if (half) expect(src.cfg, "partial_rotary_factors", 2 * n == head, "0.5 for layers without a window");
    else if (src.partial || src.pairs) kv_u32("rope.dimension_count", n);
    if (src.sections) put_rope_sections(r);
    if (!src.window_rope || !src.window) return;
    r = rope_doc(true);
    if (half) expect(src.cfg, "partial_rotary_factors", rotated(r, true) == head, "1 for layers with a window");
    else if (!src.window_theta) kv_u32("rope.dimension_count_swa", rotated(r, true));
}

/* Writes the base of the rotation in layers with a window, whose frequencies are never scaled. */
static void put_window_base(void) {
    struct doc w = rope_doc(true);
    const char *key = src.window_theta && get(src.cfg, src.window_theta) ? src.window_theta : "rope_theta";
    const bool own = !w.obj && get(src.cfg, key);
    if (!src.window_rope || !src.window) return;
    const double theta = own ? layer_number(key, true, -1) : get_num(w, "rope_theta", -1);
    kv_num(own ? src.cfg : w, key, theta, "rope.freq_base_swa");
    expect(w, "rope_type", one_of(rope_type(w), "default none"), "\"default\"");
}

/* Says which RoPE parameters are not among the known ones, words with spaces between them. transformers warns of
 * them. */
static void note_unknown(struct doc r, const char *known) {
    const char *key;
    json_t *v;
    json_object_foreach(r.obj, key, v) {
        if (!one_of(key, known) && !json_is_null(v))
            err_message("%s: key '%s.%s' is not used: it is not a parameter of '%s'", r.file, r.in, key, rope_type(r));
    }
}

/* Says which values of the context and of the rotations are not used as they are. */
static void note_rope(void) {
    static const char known[] = "type rope_type rope_theta factor original_max_position_embeddings beta_fast beta_slow "
                                "attention_factor partial_rotary_factor truncate";
    const struct doc r = rope_doc(false), c = src.cfg;
    const bool llama3 = src.llama3 && !strcmp(rope_type(r), "llama3");
    if (json_number_value(get(c, "max_position_embeddings")) > MAX_TRAINED)
        err_message("config.json: key 'max_position_embeddings': %s is read as %d",
                    json_show(get(c, "max_position_embeddings")), MAX_TRAINED);
    if (src.mixer == MIXER_CSA) {
        note_unknown(rope_part(true), known);
        note_unknown(rope_part(false), "type rope_type rope_theta partial_rotary_factor");
        return;
    }
    note_unknown(r, fmt("%s mscale mscale_all_dim%s", known,
                        llama3          ? " low_freq_factor high_freq_factor"
                        : src.sections  ? " mrope_section mrope_interleaved"
                        : src.tempered  ? " llama_4_scaling_beta max_position_embeddings"
                        : src.stretched ? " alpha"
                        : src.longrope  ? " short_factor long_factor short_mscale long_mscale"
                                        : ""));
    if (r.in && !strcmp(r.in, "rope_scaling") && get(c, "rope_parameters"))
        err_message("config.json: key 'rope_parameters' is not used: there is rope_scaling");
}

/* Writes the base of DeepSeek-V4's rotation of one kind of layers, which is in their RoPE parameters or in
 * config.json. */
static void put_base(struct doc r, const char *name, const char *key) {
    const bool own = get(r, "rope_theta");
    kv_num(own ? r : src.cfg, own ? "rope_theta" : name, get_num(own ? r : src.cfg, own ? "rope_theta" : name, NAN),
           key);
}

/* Dies unless RoPE parameters that change frequencies are YaRN's. */
static void check_yarn(struct doc r) {
    expect(r, get(r, "rope_type") ? "rope_type" : "type", !strcmp(rope_type(r), "yarn"), "\"default\" or \"yarn\"");
    expect(r, "factor", rope_factor(r) >= 1, "a number from 1");
}

/* Writes YaRN's keys. attention: the factor of cos and sin; NAN: it follows from the others. */
static void put_yarn(struct doc r, double attention) {
    kv_str(arch_key("rope.scaling.type"), "yarn");
    kv_num(r, "factor", rope_factor(r), "rope.scaling.factor");
    kv_u32("rope.scaling.original_context_length", (size_t)original_context(r));
    if (!isnan(attention)) gguf_put_f32(&writer, arch_key("rope.scaling.yarn_attn_factor"), (float)attention);
    kv_num(r, "beta_fast", get_num(r, "beta_fast", 32), "rope.scaling.yarn_beta_fast");
    kv_num(r, "beta_slow", get_num(r, "beta_slow", 1), "rope.scaling.yarn_beta_slow");
}

/* Writes the RoPE keys of DeepSeek-V4: layers with compressed keys have a base of their own and YaRN, which changes
 * frequencies alone. */
static void put_two_rotations(void) {
    const struct doc plain = rope_part(false), r = rope_part(true);
    check_fixed(r, "mscale none mscale_all_dim none");
    const size_t n = rotated(plain, false);
    kv_u32("rope.dimension_count", n);
    put_base(plain, "rope_theta", "rope.freq_base");
    put_base(r, "compress_rope_theta", "attention.compress_rope_freq_base");
    expect(plain, "rope_type", one_of(rope_type(plain), "default none"), "\"default\"");
    expect(r, "partial_rotary_factor", rotated(r, false) == n, "the same as in the other layers");
    if (one_of(rope_type(r), "default none")) return;
    check_yarn(r);
    check_fixed(r, "attention_factor 1 truncate true");
    put_yarn(r, NAN);
}

/* Returns the base that alpha makes of theta, so that the slowest pair turns alpha times as slowly: transformers has the
 * formula in modeling_hunyuan_v1_moe.py. */
static double stretched_base(struct doc r, double theta) {
    const double alpha = get_num(r, "alpha", NAN), n = (double)head_k();
    expect(r, "alpha", alpha > 0 && n > 2, "a number above 0");
    check_fixed(r, "factor 1 mscale 1 mscale_all_dim 1");
    return theta * pow(alpha, n / (n - 2));
}

/* Writes the RoPE keys, from rope_theta and rope_scaling or from the newer rope_parameters. YaRN (arXiv 2309.00071)
 * with MLA scales the softmax by mscale_all_dim. cos and sin stay unscaled only if mscale is the same number; anything
 * else is an error. */
static void put_rope(void) {
    static const char only[] = "[\"full_attention\"]"; /* layers whose frequencies rope_scaling changes */
    struct doc r = rope_doc(false);
    const bool mla = src.mixer == MIXER_MLA, llama3 = src.llama3 && !strcmp(rope_type(r), "llama3");
    if (src.mixer == MIXER_REL) return; /* nothing is rotated */
    if (src.mixer == MIXER_CSA) {
        put_two_rotations();
        return;
    }
    if (src.no_rope) return;
    struct doc in;
    double theta = rope_base(r, false, src.rope_theta, &in);
    if (is_stretched(r)) theta = stretched_base(r, theta);
    kv_num(in, "rope_theta", theta, "rope.freq_base");
    const char *type = rope_type(r);
    put_rotated(r);
    put_window_base();
    if (is_stretched(r)) return;
    if (src.window_rope && src.window && !one_of(type, "default none") && get(src.cfg, "yarn_only_types"))
        expect(src.cfg, "yarn_only_types", !strcmp(json_show(get(src.cfg, "yarn_only_types")), only), only);
    if (one_of(type, "default none") || llama3) return;
    if (is_longrope(r)) {
        const double mscale = get_num(r, "long_mscale", NAN);
        expect(r, "short_mscale", get_num(r, "short_mscale", NAN) == mscale, fmt("%g as long_mscale", mscale));
        kv_num(r, "long_mscale", mscale, "rope.scaling.attn_factor");
        kv_u32("rope.scaling.original_context_length", (size_t)original_context(r));
        return;
    }
    if (src.proportional) {
        check_fixed(r, "factor 1");
        return;
    }
    check_yarn(r);
    double mscale = get_num(r, "mscale", 0), all = get_num(r, "mscale_all_dim", 0);
    const bool level = !mla && src.tempered; /* cos and sin stay as they are */
    double usual = level ? 1 : 0.1 * log(rope_factor(r)) + 1;
    double attention = get_num(r, "attention_factor", mla ? 0 : usual);
    expect(r, "truncate", get_bool(r, "truncate", true) != src.exact_yarn, src.exact_yarn ? "false" : "true");
    if (level) check_fixed(r, "mscale 1 mscale_all_dim 1");
    else
        expect(r, "mscale_all_dim", mla ? all > 0 && mscale == all : mscale == 0 && all == 0,
               mla ? fmt("the same number above 0 as mscale, %g,", mscale) : "neither mscale nor this");
    expect(r, "attention_factor", fabs(attention - (mla ? 0 : usual)) <= 1e-4, mla ? "none" : fmt("%g or none", usual));
    put_yarn(r, get(r, "attention_factor") && !mla ? attention : NAN);
    if (mla) kv_num(r, "mscale_all_dim", 0.1 * all, "rope.scaling.yarn_log_multiplier");
    if (level) kv_num(r, "mscale_all_dim", all, "rope.scaling.yarn_log_multiplier");
    if (!src.tempered) return;
    kv_num(r, "llama_4_scaling_beta", get_num(r, "llama_4_scaling_beta", NAN), "attention.temperature_scale");
    kv_u32("attention.temperature_length", (size_t)original_context(r));
}

/* Whether config.json has a list of the layers' numbers of experts. */
static bool pruned_by_lists(void) {
    struct doc q = get_obj(get(src.cfg, "quantization_config") ? src.cfg : src.top, "quantization_config");
    return get(q, "moe_sparsity_config") || get(src.cfg, "per_layer_num_experts") ||
           (src.experts_key && json_is_array(get(src.cfg, src.experts_key)));
}

/* Writes the numbers of experts, if there are any. */
static void put_experts(void) {
    const int blocks = n_blocks();
    int most = 0;
    bool differ = false;
    if (!src.experts_key) return;
    for (int l = 0; l < blocks; l++) most = int_max(most, src.experts[l]);
    for (int l = 0; l < blocks; l++) differ |= src.experts[l] && src.experts[l] != most;
    if (!most) most = src.n_expert; /* all layers are dense */
    kv_u32("expert_count", (size_t)most);
    kv_u32("expert_used_count", (size_t)src.top_k);
    kv_u32("expert_feed_forward_length", size_of(src.width_key));
    if (differ) kv_array("expert_count_per_layer", GGUF_V_I32, blocks, src.experts);
}

/* Writes what is known about pruning. The object "reap" of config.json lists, by layer, the original ids of the
 * retained experts. */
static void put_pruning(const char *name) {
    const int blocks = n_blocks();
    bool pruned = strstr(name, "REAP") != NULL || pruned_by_lists();
    int most = 0;
    for (int l = 0; l < blocks; l++) {
        pruned |= src.experts[l] && src.experts[l] < src.n_expert;
        most = int_max(most, src.experts[l]);
    }
    struct doc reap = get_obj(src.top, "reap");
    if (reap.obj) {
        int64_t original = get_int(reap, "original_experts", most, INT32_MAX, REQUIRED);
        json_t *kept = get_list(reap, "kept");
        gguf_put_u32(&writer, "moe.reap.original_expert_count", (uint32_t)original);
        for (int l = 0; l < blocks; l++) {
            json_t *ids = json_array_get(kept, (size_t)l);
            int32_t list[MAX_EXPERTS];
            if (!json_is_array(ids)) continue;
            expect(reap, "kept", json_array_size(ids) == (size_t)src.experts[l],
                   fmt("%d ids for layer %d", src.experts[l], l));
            for (int i = 0; i < src.experts[l]; i++) {
                const int64_t id = json_element(ids, (size_t)i);
                list[i] = id < original ? (int32_t)id : -1;
                expect(reap, "kept", list[i] >= 0 && (!i || list[i] > list[i - 1]),
                       fmt("rising ids below %lld for layer %d", (long long)original, l));
            }
            gguf_put_array(&writer, fmt("moe.reap.kept.%d", l), GGUF_V_I32, (size_t)src.experts[l], list);
        }
        pruned = true;
    }
    if (pruned) gguf_put_bool(&writer, "moe.reap.pruned", true);
}

/* Writes a number of heads. list: for each block, else one for all. list_key: the list of config.json, or NULL.
 * windowed: heads of layers with a window; 0: as many as `all`. */
static void put_heads(const char *key, bool list, int all, const char *list_key, int windowed) {
    const int blocks = n_blocks();
    json_t *listed = list_key ? get_list(src.cfg, list_key) : NULL;
    int32_t n[MAX_LAYERS];
    const bool kv = !strcmp(key, "attention.head_count_kv"); /* 0: the layer has no attention */
    for (int l = 0; l < blocks; l++)
        n[l] = listed && l < src.n_layer    ? (int32_t)json_element(listed, (size_t)l)
               : windowed && is_windowed(l) ? windowed
               : kv && !has_kind(l, "*")    ? 0
                                            : all;
    if (list) kv_array(key, GGUF_V_I32, blocks, n);
    else kv_u32(key, (size_t)all);
}

/* Writes how many KV heads the blocks have. */
static void put_kv_heads(void) {
    const int blocks = n_blocks();
    int32_t n[MAX_LAYERS];
    if (!src.lacks_kv) {
        put_heads("attention.head_count_kv", src.list_kv, src.n_head_kv, NULL, src.window_heads[1]);
        return;
    }
    for (int l = 0; l < blocks; l++) n[l] = src.lacks_kv(l) ? 0 : src.n_head_kv;
    kv_array("attention.head_count_kv", GGUF_V_I32, blocks, n);
}

/* Writes how many keys layers with a window see, and which layers these are. */
static void put_windows(void) {
    if (!src.window && !src.tell_window) return;
    kv_u32("attention.sliding_window", src.window);
    kv_flags("attention.sliding_window_pattern", n_blocks(), is_windowed);
}

/* Writes the sizes of attention's heads. */
static void put_head_sizes(void) {
    const size_t latent = src.mixer == MIXER_MLA ? size_of("kv_lora_rank") : 0;
    if (!latent) {
        kv_u32("attention.key_length", head_k());
        kv_u32("attention.value_length", head_v());
        return;
    }
    const int64_t least = src.no_rope ? 0 : 2, most = src.no_rope ? 0 : 65536;
    const size_t rope = (size_t)get_int(src.cfg, "qk_rope_head_dim", least, most, REQUIRED);
    const int64_t q_lora = get_int(src.cfg, "q_lora_rank", 0, INT32_MAX, 0);
    kv_u32("attention.key_length", latent + rope);
    kv_u32("attention.value_length", latent);
    kv_u32("attention.key_length_mla", head_k());
    kv_u32("attention.value_length_mla", head_v());
    kv_u32("attention.kv_lora_rank", latent);
    if (q_lora) kv_u32("attention.q_lora_rank", (size_t)q_lora);
    kv_u32("rope.dimension_count", rope);
}

/* Writes the sizes of the model. */
static void put_architecture(void) {
    struct doc c = src.cfg;
    kv_u32("block_count", (size_t)n_blocks());
    kv_u32("context_length", (size_t)context_length());
    kv_u32("embedding_length", size_of("hidden_size"));
    if (get(c, src.dense_key) && !src.kinds) kv_u32("feed_forward_length", size_of(src.dense_key));
    kv_u32("vocab_size", src.n_vocab);
    kv_num(c, src.eps_key, get_num(c, src.eps_key, src.eps),
           src.centers ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon");
    put_heads("attention.head_count", src.list_heads, src.n_head, src.heads_key, src.window_heads[0]);
    if (src.experts_key) {
        if (src.gating <= GATING_SQRT_SOFTPLUS) kv_u32("expert_gating_func", src.gating);
        gguf_put_bool(&writer, arch_key("expert_weights_norm"), get_bool(c, src.norm_key, src.norm_topk_prob));
    }
    put_kv_heads();
    put_head_sizes();
    put_windows();
    if (src.leads) kv_u32("leading_dense_block_count", (size_t)src.first_dense);
    if (src.shared_key && !family_find((struct gguf_str){src.arch, strlen(src.arch)})->beside)
        kv_u32("expert_shared_count", (size_t)src.n_shared);
    if (src.shared_width && src.n_shared)
        kv_u32("expert_shared_feed_forward_length",
               size_of(src.shared_key) * (src.shared_count ? (size_t)src.n_shared : 1));
    if (src.put) src.put();
    if (src.scaling_factor && (!src.scaling_optional || get(c, src.scaling_factor)))
        kv_num(c, src.scaling_factor, get_num(c, src.scaling_factor, NAN), "expert_weights_scale");
    if (src.n_group) {
        kv_u32("expert_group_count", (size_t)src.n_group);
        kv_u32("expert_group_used_count",
               (size_t)get_int(c, "topk_group", 1, src.n_group, src.n_group == 1 ? 1 : REQUIRED));
    }
    if (src.n_mtp) kv_u32("nextn_predict_layers", (size_t)src.n_mtp);
}

/* Writes the metadata that the engine reads to make layers. */
static void put_keys(void) {
    put_architecture();
    put_rope();
    put_experts();
}

/* Fills in `made` with what the engine's loader reads of these metadata. Dies where it refuses them. */
static void load_keys(void) {
    static char err[ERR_MAX];
    size_t bytes;
    kv_str("general.architecture", src.arch);
    put_keys();
    uint8_t *header = gguf_header(&writer, &bytes); /* kept: the model points into it */
    gguf_writer_free(&writer);
    if (!header) die("out of memory for the header");
    made.loader = (struct loader){.m = &made.model, .g = &made.model.gguf, .err = err};
    if (!gguf_parse_header(&made.model.gguf, header, bytes, err, sizeof err)) {
        loader_begin(&made.loader);
        if (!made.loader.failed) loader_hparams(&made.loader);
        if (!made.loader.failed) made.model.n_vocab = (int)src.n_vocab;
        if (!made.loader.failed) return;
    }
    die("'%s': moe could not load the file: %s", model_dir, err);
}

/* Dies unless the engine's loader binds a finished header, whose data are zeros for it. */
static void check_loads(const uint8_t *header, size_t bytes) {
    struct model m = {0};
    char err[ERR_MAX];
    if (gguf_parse_header(&m.gguf, header, bytes, err, sizeof err) || model_tensors(&m, err))
        die("'%s': moe could not load the file: %s", model_dir, err);
    model_close(&m);
}

/* ============================================================================================================
 * Metadata: tokens and templates
 *
 * Special tokens, chat templates and the settings of the sampler.
 * ============================================================================================================ */

/* Returns the id of the token whose text is the value of a key, "<|im_end|>" or {"content": "<|im_end|>"}; -1 if there
 * is none. */
static int32_t token_id(struct doc config, const char *key) {
    json_t *v = get(config, key);
    const char *text = json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
    for (size_t i = 0; text && i < src.n_vocab; i++)
        if (!strcmp(vocab.text[i], text)) return (int32_t)i;
    return -1;
}

/* Appends the token ids of a key, which has one or a list, to *ids, each once. null and negative numbers are none.
 * tell: say what else is not a token. */
static void collect_ids(struct doc d, const char *key, int32_t **ids, bool tell) {
    json_t *v = get(d, key);
    size_t n = json_is_array(v) ? json_array_size(v) : v != NULL;
    for (size_t i = 0; i < n; i++) {
        const json_t *e = json_is_array(v) ? json_array_get(v, i) : v;
        int64_t id;
        const bool whole = json_whole(e, &id);
        if (json_is_null(e) || (whole && id < 0)) continue;
        if (!whole || (size_t)id >= src.n_vocab) {
            if (tell) err_message("%s: not used", misfit(d, key, fmt("token ids below %zu", src.n_vocab)));
            continue;
        }
        bool have = false;
        for (size_t k = 0; k < arrlenu(*ids); k++) have |= (*ids)[k] == (int32_t)id;
        if (!have) arrput(*ids, (int32_t)id);
    }
}

/* Returns the id of the special token `name`, found as in llama.cpp: by its text in tokenizer_config.json, else by its
 * id in config.json; -1 if there is none. tell: say what is not a token. */
static int32_t special_id(struct doc config, const char *name, bool tell) {
    const char *text = fmt("%s_token", name), *key = fmt("%s_token_id", name);
    int32_t id = token_id(config, text), *ids = NULL;
    if (tell && id < 0 && get(config, text) && !json_is_false(get(config, text)))
        err_message("%s: not used", misfit(config, text, "a token of the vocabulary"));
    if (id < 0) collect_ids(get(src.cfg, key) ? src.cfg : src.top, key, &ids, tell && strcmp(name, "eos"));
    if (arrlen(ids)) id = ids[0];
    arrfree(ids);
    return id;
}

/* The text of deepseek_v4.jinja. */
extern const char deepseek_v4_template[], deepseek_v4_template_end[];
__asm__(".section .rodata\n"
        "deepseek_v4_template:\n"
        ".incbin \"convert/deepseek_v4.jinja\"\n"
        "deepseek_v4_template_end:\n"
        ".previous\n");

/* Whether a release of DeepSeek-V4 has a text for the effort high, too, as those from 0731 on: its encoder has it, or
 * where that is missing the name says so. */
static bool deepseek_v4_grades(const char *name) {
    static const char file[] = "encoding/encoding_dsv4.py", text[] = "Reasoning Effort: Beyond maximum";
    char *source = NULL, err[ERR_MAX];
    if (access(in_dir(file), F_OK)) return strstr(name, "0731") || strstr(name, "0813");
    if (read_file(in_dir(file), &source, err)) die("%s", err);
    const bool graded = memmem(source, arrlenu(source), text, strlen(text)) != NULL;
    arrfree(source);
    return graded;
}

/* Writes our chat template of DeepSeek-V4 and V4.1, whose releases have a program in Python instead. head: what makes it
 * that of the release. */
static void put_own_template(const char *head, const char *efforts) {
    char *text = NULL;
    sb_puts(&text, head);
    sb_put(&text, deepseek_v4_template, (size_t)(deepseek_v4_template_end - deepseek_v4_template));
    gguf_put_str(&writer, "tokenizer.chat_template", text, arrlenu(text));
    arrfree(text);
    err_message("'%s' has no chat template: taking moe's, with the reasoning effort%s", model_dir, efforts);
}

static void put_deepseek_v4_template(const char *name) {
    const bool graded = deepseek_v4_grades(name);
    put_own_template(graded ? "{%- set graded_efforts = true -%}\n" : "", graded ? "s high and max" : " max");
}

static void put_deepseek_v41_template(const char *name) {
    (void)name;
    put_own_template("{%- set v41 = true -%}\n", "s low, high and max");
}

/* Returns the template in the key chat_template: a text, or of a list of {name, template} or an object {name:
 * template} the one named "default", or the only one. NULL: there is none. Says which are left out. */
static const char *template_of(struct doc d) {
    static const char key[] = "chat_template";
    json_t *v = get(d, key), *e, *named = json_is_array(v) ? json_object() : v;
    char *others = NULL;
    const char *name;
    size_t i;
    if (json_is_string(v) || !v) return v && *json_string_value(v) ? json_string_value(v) : NULL;
    json_array_foreach(v, i, e) {
        name = json_string_value(json_object_get(e, "name"));
        if (name) json_object_set(named, name, json_object_get(e, "template"));
    }
    if (!fits(d, key, json_object_size(named), "a text, or texts with names")) return NULL;
    json_t *found = json_object_get(named, "default");
    if (!found && json_object_size(named) == 1) found = json_object_iter_value(json_object_iter(named));
    json_object_foreach(named, name, e) {
        if (e != found) sb_printf(&others, "%s'%s'", others ? ", " : "", name);
    }
    if (others)
        err_message("%s: left out: chat template%s %s%s", d.file, strchr(others, ',') ? "s" : "", sb_cstr(&others),
                    found ? "" : " (none is named 'default')");
    arrfree(others);
    if (found) fits(d, key, json_is_string(found), "a text as template");
    return json_string_value(found);
}

/* Returns the text of a template file as Python reads it, with \n for all ends of lines; an stb_ds array. NULL: there
 * is no such file, or it is empty. */
static char *template_file_read(const char *file) {
    char *text = NULL, err[ERR_MAX], *to;
    if (!path_exists(in_dir(file))) return NULL;
    if (text_read(in_dir(file), &text, err)) die("%s", err);
    const size_t n = arrlenu(text);
    if (!n) return NULL;
    if (memchr(text, 0, n) || !utf8_valid(text, n)) die("'%s' is not UTF-8", in_dir(file));
    to = text;
    for (const char *p = text; p < text + n; p++) {
        const bool windows = p[0] == '\r' && p[1] == '\n'; /* after the text there is a zero */
        *to++ = *p == '\r' ? '\n' : *p;
        p += windows;
    }
    *to = 0;
    arrsetlen(text, (size_t)(to - text));
    return text;
}

/* Writes the chat template: of the files below the first that has one, in transformers' order, else that of the family.
 * config: tokenizer_config.json; name: the model's. */
static void put_template(struct doc config, const char *name) {
    static const char folder[] = "additional_chat_templates", jinja[] = "chat_template.jinja";
    const struct doc legacy = doc_read("chat_template.json"), processor = doc_read("processor_config.json");
    char **more = dir_list(in_dir(folder), "", ".jinja"), *other = template_file_read(fmt("%s/default.jinja", folder)),
         *text = other ? other : template_file_read(jinja);
    const struct {
        const char *file, *text;
    } sources[] = {{other ? folder : jinja, text},
                   {config.file, template_of(config)},
                   {legacy.file, template_of(legacy)},
                   {processor.file, template_of(processor)}};
    size_t k = 0;
    while (k < COUNT(sources) && !sources[k].text) k++;
    for (size_t i = k + 1; i < COUNT(sources); i++)
        if (sources[i].text && strcmp(sources[i].text, sources[k].text))
            err_message("%s has another chat template than %s, which is taken", sources[i].file, sources[k].file);
    for (size_t i = 0; i < arrlenu(more); i++)
        if (strcmp(more[i], "default.jinja")) err_message("left out: chat template '%s/%s'", folder, more[i]);
    if (k < COUNT(sources)) kv_str("tokenizer.chat_template", sources[k].text);
    else if (src.put_template) src.put_template(name);
    else err_message("'%s' has no chat template", model_dir);
    arrfree(text);
    json_decref(legacy.obj);
    json_decref(processor.obj);
}

/* Whether a value of generation_config.json turns nothing on. */
static bool is_off(const json_t *v) {
    return !json_is_true(v) && !json_object_size(v) && !json_array_size(v) &&
           (!json_is_number(v) || json_number_value(v) == 0 || json_number_value(v) == 1);
}

/* Writes the sampling defaults of generation_config.json, if it says do_sample. */
static void put_sampling(struct doc g) {
    static const struct {
        const char *name, *key;
        double lo, hi;
    } numbers[] = {{"temperature", "general.sampling.temp", 0, 100},
                   {"top_p", "general.sampling.top_p", 0, 1},
                   {"min_p", "general.sampling.min_p", 0, 1},
                   {"repetition_penalty", "general.sampling.penalty_repeat", 0.1, 10}};
    static const char *const unknown[] = {"typical_p",     "epsilon_cutoff",       "eta_cutoff",
                                          "top_h",         "no_repeat_ngram_size", "encoder_repetition_penalty",
                                          "num_beams",     "penalty_alpha",        "guidance_scale",
                                          "sequence_bias", "bad_words_ids",        "suppress_tokens",
                                          "min_length",    "begin_suppress_tokens"};
    struct finding unused = {0};
    int64_t k;
    for (size_t i = 0; i < COUNT(unknown); i++)
        if (!is_off(get(g, unknown[i]))) err_message("%s: key '%s' is not used", g.file, unknown[i]);
    const bool sampled = get_bool(g, "do_sample", false);
    for (size_t i = 0; i < COUNT(numbers); i++) {
        const json_t *v = get(g, numbers[i].name);
        const double x = json_number_value(v), lo = numbers[i].lo, hi = numbers[i].hi;
        if (!v) continue;
        if (!sampled) finding_add(&unused, numbers[i].name);
        else if (fits(g, numbers[i].name, json_is_number(v) && x >= lo && x <= hi,
                      fmt("a number from %g to %g", lo, hi)))
            gguf_put_f32(&writer, numbers[i].key, (float)x);
    }
    if (get(g, "top_k") && !sampled) finding_add(&unused, "top_k");
    else if (json_whole(get(g, "top_k"), &k) && k < 0) kv_i32("general.sampling.top_k", 0); /* off */
    else if (get(g, "top_k")) kv_i32("general.sampling.top_k", (int32_t)get_limit(g, "top_k", INT32_MAX, 0));
    if (unused.n)
        err_message("%s: key '%s'%s not used: do_sample is not true", g.file, unused.first,
                    unused.n > 1 ? fmt(" and %zu more are", unused.n - 1) : " is");
}

/* Writes how tokens are merged, and what is done to the text before. */
static void put_merging(void) {
    if (vocab.spm) {
        gguf_put_array(&writer, "tokenizer.ggml.scores", GGUF_V_F32, src.n_vocab, vocab.score);
        if (arrlen(vocab.merges)) kv_strings("tokenizer.ggml.merges", vocab.merges, arrlenu(vocab.merges));
        gguf_put_bool(&writer, "tokenizer.ggml.add_space_prefix", vocab.blanks != NULL);
        if (vocab.blanks && strcmp(vocab.blanks, "all")) kv_str("moe.tokenizer.blanks", vocab.blanks);
        return;
    }
    kv_strings("tokenizer.ggml.merges", vocab.merges, arrlenu(vocab.merges));
    if (vocab.ignore_merges) gguf_put_bool(&writer, "tokenizer.ggml.ignore_merges", true);
    gguf_put_bool(&writer, "tokenizer.ggml.normalizer.nfc", vocab.nfc);
}

/* Writes the tokens, merges, special tokens and the chat template. name: the model's. */
static void put_vocabulary(const char *name) {
    struct doc config = doc_read("tokenizer_config.json"), generation = doc_read("generation_config.json");
    read_vocabulary(config);
    put_sampling(generation);
    kv_str("tokenizer.ggml.model", is_gemma() ? "gemma4" : vocab.spm ? "llama" : "gpt2");
    kv_str("tokenizer.ggml.pre", is_gemma() ? "gemma4" : vocab.spm ? "default" : vocab.pre);
    kv_strings("tokenizer.ggml.tokens", vocab.text, src.n_vocab);
    gguf_put_array(&writer, "tokenizer.ggml.token_type", GGUF_V_I32, src.n_vocab, vocab.type);
    if (src.put_tokens) src.put_tokens();
    put_merging();
    static const char *const specials[][2] = {{"bos", "tokenizer.ggml.bos_token_id"},
                                              {"eos", "tokenizer.ggml.eos_token_id"},
                                              {"pad", "tokenizer.ggml.padding_token_id"},
                                              {"unk", "tokenizer.ggml.unknown_token_id"}};
    int32_t id, *stops = NULL;
    for (int i = 0; i < 3 + vocab.spm; i++)
        if ((id = special_id(config, specials[i][0], true)) >= 0) gguf_put_u32(&writer, specials[i][1], (uint32_t)id);
    collect_ids(generation, "eos_token_id", &stops, true);
    collect_ids(src.cfg, "eos_token_id", &stops, true);
    if (src.wrapped) collect_ids(src.top, "eos_token_id", &stops, true);
    id = special_id(config, "eos", false);
    bool have = id < 0;
    for (size_t i = 0; i < arrlenu(stops); i++) have |= stops[i] == id;
    if (!have) arrput(stops, id);
    if (!arrlen(stops)) die("'%s': no file names a token that ends an answer (eos_token_id)", model_dir);
    gguf_put_array(&writer, "tokenizer.ggml.eos_token_ids", GGUF_V_I32, arrlenu(stops), stops);
    arrfree(stops);
    bool add_bos = get_bool(config, "add_bos_token", vocab.add_bos);
    expect(config, "bos_token", !add_bos || special_id(config, "bos", false) >= 0,
           "a token, because every text begins with it");
    gguf_put_bool(&writer, "tokenizer.ggml.add_bos_token", add_bos);
    put_template(config, name);
    json_decref(config.obj);
    json_decref(generation.obj);
}

/* Returns --name, else the name of the directory. A directory in a Hugging Face cache is named by its commit; then the
 * name is that of the cache's folder, models--ORG--NAME, or the one in config.json. */
static const char *model_name(const char *given) {
    static char dir[PATH_MAX];
    if (given) return given;
    if (!realpath(model_dir, dir)) die("'%s': %s", model_dir, strerror(errno));
    const char *base = strrchr(dir, '/') + 1, *path = json_string_value(get(src.top, "_name_or_path"));
    const bool commit = strlen(base) == 40 && strspn(base, "0123456789abcdef") == 40;
    char *folder = commit ? strstr(dir, "/models--") : NULL;
    if (folder) {
        folder[1 + strcspn(folder + 1, "/")] = 0;
        path = cache_model(folder);
    }
    if (commit && path && *path) return xstrdup(strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
    return *base ? base : "model";
}

/* Returns general.file_type: the number of the type that has most of the bytes. */
static uint32_t file_type(void) {
    size_t sum[GGUF_TYPE_SLOTS] = {0};
    uint32_t best = gguf_type_slot(GGUF_F32);
    for (size_t i = 0; i < arrlenu(plan); i++) sum[gguf_type_slot(plan[i].type)] += plan[i].bytes;
    for (uint32_t t = 0; t < GGUF_TYPE_SLOTS; t++)
        if (sum[t] > sum[best] && gguf_find_format(gguf_slot_type(t))) best = t;
    return gguf_format((enum gguf_type)gguf_slot_type(best))->file_type;
}

/* Returns the algorithm that a release names for a tensor of its own: of the innermost module that quantized_layers
 * lists, else of the whole release. */
static const char *quantization_of(const char *tensor, struct doc q) {
    struct doc layers = get_obj(q, "quantized_layers");
    char *name = xstrdup(tensor), *dot;
    const char *algo = get_str(q, "quant_algo", "none");
    while ((dot = strrchr(name, '.'))) {
        *dot = 0;
        if (!get(layers, name)) continue;
        algo = get_str(get_obj(layers, name), "quant_algo", "none");
        break;
    }
    free(name);
    return algo;
}

/* Lists the NVFP4 matrices whose inputs the release wants in 16 bits, even where they have an input scale. */
static void put_precision(void) {
    struct doc hf = doc_read("hf_quant_config.json"), q = get_obj(src.cfg, "quantization_config");
    char **names = NULL;
    if (!get(q, "quant_algo")) q = get_obj(src.top, "quantization_config");
    if (!get(q, "quant_algo")) q = get_obj(hf, "quantization");
    for (size_t i = 0; i < arrlenu(plan); i++)
        if (plan[i].type == GGUF_NVFP4 && nvfp4_source(&plan[i]) &&
            !strcmp(quantization_of(nvfp4_source(&plan[i])->name, q), "W4A16_NVFP4"))
            arrput(names, plan[i].name);
    bool *a4 = xrealloc(NULL, arrlenu(names) + 1);
    memset(a4, 0, arrlenu(names) + 1);
    if (names) {
        kv_strings("general.tensor_extra.name", names, arrlenu(names));
        gguf_put_array(&writer, "general.tensor_extra.prec_a4", GGUF_V_BOOL, arrlenu(names), a4);
    }
    free(a4);
    arrfree(names);
    json_decref(hf.obj);
}

/* Writes all keys and the tensor table. */
static void put_metadata(const char *name) {
    kv_str("general.architecture", src.arch);
    kv_str("general.name", name);
    gguf_put_u32(&writer, "general.file_type", file_type());
    gguf_put_u32(&writer, "general.quantization_version", 2);
    note_rope();
    put_keys();
    put_pruning(name);
    put_precision();
    put_vocabulary(name);
    for (size_t i = 0; i < arrlenu(plan); i++)
        gguf_add_tensor(&writer, plan[i].name, plan[i].type, plan[i].n_dims, plan[i].ne);
}

/* ============================================================================================================
 * Output
 *
 * Reads the pieces of each output in chunks, converts them to its type and writes them.
 * ============================================================================================================ */

static size_t n_implausible; /* NVFP4 matrices whose largest weight is below 1e-5 or above 64 */

/* Returns the bytes of a row in the source, without block scales. */
static size_t row_bytes(const struct linear *l) {
    return l->w->dtype == U8 || l->w->dtype == I8 ? l->cols / 2 : l->cols * (dtypes[l->w->dtype].bits / 8);
}

/* Reads rows first..first+n-1 of a piece of t, whose rows have `bytes` bytes. */
static void read_picked(const struct tensor *t, size_t bytes, const struct piece *p, size_t first, size_t n,
                        uint8_t *out) {
    if (!p->head && !p->step) {
        tensor_read(t, (p->row + first) * bytes, out, n * bytes);
        return;
    }
    const size_t begin = p->head ? p->row + first / p->head * p->head : piece_row(p, first);
    const size_t end = p->head ? p->row + ((first + n - 1) / p->head + 1) * p->head : piece_row(p, first + n - 1) + 1;
    uint8_t *all = scratch(4, (end - begin) * bytes);
    tensor_read(t, begin * bytes, all, (end - begin) * bytes);
    for (size_t i = 0; i < n; i++) memcpy(out + i * bytes, all + (piece_row(p, first + i) - begin) * bytes, bytes);
}

/* Reads n rows of E4M3 block scales and returns the largest. 0x80, minus zero, becomes 0; negative scales and NaN are
 * errors. */
static uint8_t read_block_scales(const struct piece *p, size_t first, size_t n, uint8_t *s) {
    const struct linear *l = &p->lin;
    size_t per_row = l->cols / 16;
    uint8_t most = 0;
    read_picked(l->scale, per_row, p, first, n, s);
    for (size_t i = 0; i < n * per_row; i++) {
        if (s[i] > 0x80 || s[i] == 0x7f)
            die("%s: row %zu, block %zu: the scale byte %02x is %s", where(l->scale), piece_row(p, first + i / per_row),
                i % per_row, s[i], (s[i] & 0x7f) == 0x7f ? "not a number" : "negative");
        s[i] &= 0x7f;
        most = s[i] > most ? s[i] : most;
    }
    return most;
}

/* Reads n rows of E8M0 block scales. NaN is an error. */
static void read_powers(const struct piece *p, size_t first, size_t n, uint8_t *s) {
    const size_t per_row = p->lin.cols / 32;
    read_picked(p->lin.scale, per_row, p, first, n, s);
    for (size_t i = 0; i < n * per_row; i++)
        if (s[i] == 0xff)
            die("%s: row %zu, block %zu: the scale byte ff is not a number", where(p->lin.scale),
                piece_row(p, first + i / per_row), i % per_row);
}

/* dst (cols) = one row of raw bytes as F32, without a `factor` that is not folded. s: its block scales (NVFP4, MXFP4,
 * MXFP8). scale: its scale, or one for each block of columns (FP8). e4m3: the values of all bytes. Returns the bits of
 * the largest magnitude; infinity and NaN are larger than any number. */
static int32_t decode_row(const struct linear *l, const uint8_t *raw, const uint8_t *s, const float *scale,
                          const float e4m3[256], float *dst) {
    size_t step = l->format == FP8_GRID ? l->block : l->cols;
    int32_t most = 0;
    switch (l->format) {
    case PLAIN: gguf_dequantize_row(float_type(l->w), raw, dst, l->cols); break;
    case NVFP4:
    case MXFP4:
        for (size_t c = 0; c < l->cols; c++)
            dst[c] = e2m1_to_f32(raw[c / 2] >> (c & 1) * 4 & 15) *
                     (l->format == NVFP4 ? e4m3[s[c / 16]] : e8m0_to_f32(s[c / 32]));
        break;
    case MXFP8:
        for (size_t c = 0; c < l->cols; c++) dst[c] = e4m3[raw[c]] * e8m0_to_f32(s[c / 32]);
        break;
    case FP8_TENSOR:
    case FP8_ROW:
    case FP8_GRID:
        for (size_t c = 0; c < l->cols; c += step, scale++)
            for (size_t i = c; i < c + step && i < l->cols; i++) dst[i] = e4m3[raw[i]] * *scale;
    }
    for (size_t c = 0; c < l->cols && l->fold; c++) dst[c] *= l->factor;
#pragma omp simd reduction(max : most)
    for (size_t c = 0; c < l->cols; c++) {
        int32_t u = (int32_t)(f32_to_bits(dst[c]) & 0x7fffffff);
        most = u > most ? u : most;
    }
    return most;
}

/* Dies unless `largest`, the largest magnitude of v, is finite. v: the rows of a piece from `first` on. */
static void check_finite(const struct piece *p, size_t first, const float *v, float largest) {
    const size_t width = piece_width(p);
    size_t at = 0;
    if (isfinite(largest)) return;
    while (isfinite(v[at])) at++;
    const size_t row = first + at / width, col = at % width;
    if (p->beside && col >= p->lin.cols)
        die("%s: row %zu, column %zu is not a finite number", where(p->beside->w), row, col - p->lin.cols);
    die("%s: row %zu, column %zu is not a finite number", where(p->lin.w), p->height ? p->row + col : piece_row(p, row),
        p->height ? p->col + row * p->step : col);
}

/* Brings the columns of n rows to the order in which they are written. row: bytes of a row. */
static void order_columns(const struct linear *l, void *rows, size_t n, size_t row) {
    if (!l->groups) return;
    const size_t heads = l->cols / l->head, head = row / heads;
    uint8_t *copy = xrealloc(NULL, row), *p = rows;
    for (size_t r = 0; r < n; r++, p += row) {
        memcpy(copy, p, row);
        for (size_t i = 0; i < heads; i++) memcpy(p + i * head, copy + tiled_head(i, l->groups, heads) * head, head);
    }
    free(copy);
}

/* scale (n) = the scales of rows first..first+n-1 of an FP8_ROW piece. */
static void read_scales_of_rows(const struct piece *p, size_t first, size_t n, float *scale) {
    const struct tensor *t = p->lin.scale;
    const size_t bytes = dtypes[t->dtype].bits / 8;
    uint8_t *raw = scratch(1, n * bytes);
    read_picked(t, bytes, p, first, n, raw);
    gguf_dequantize_row(float_type(t), raw, scale, n);
}

/* out (n) = scales of FP8 blocks from `first` on. The power of two that is NaN is an error. */
static void read_block_factors(const struct tensor *t, size_t first, size_t n, float *out) {
    if (!are_powers(t)) {
        read_floats(t, first, n, out);
        return;
    }
    uint8_t *raw = scratch(5, n);
    tensor_read(t, first, raw, n);
    for (size_t i = 0; i < n; i++) {
        if (raw[i] == 0xff) die("%s: block %zu: the scale byte ff is not a number", where(t), first + i);
        out[i] = e8m0_to_f32(raw[i]);
    }
}

/* Scales of rows of an FP8 piece, without a `factor` of the whole matrix. */
struct fp8_scales {
    const float *scale; /* in scratch(2) */
    size_t low, tiles;  /* FP8_GRID: the first row of blocks, blocks of a row */
};

/* Reads the scales of rows first..first+n-1. Other formats have the one scale 1. */
static struct fp8_scales read_fp8_scales(const struct piece *p, size_t first, size_t n) {
    const struct linear *l = &p->lin;
    struct fp8_scales f = {.low = SIZE_MAX, .tiles = l->format == FP8_GRID ? blocks_of(l->cols, l->block) : 0};
    size_t scales = l->format == FP8_ROW ? n : 1, high = 0;
    for (size_t i = 0; i < n && l->format == FP8_GRID; i++) {
        const size_t row = block_row(l, piece_row(p, first + i));
        f.low = row < f.low ? row : f.low;
        high = row > high ? row : high;
    }
    if (l->format == FP8_GRID) scales = (high - f.low + 1) * f.tiles;
    float *scale = (float *)(void *)scratch(2, scales * sizeof *scale);
    scale[0] = 1.0f;
    if (l->format == FP8_ROW) read_scales_of_rows(p, first, n, scale);
    if (l->format == FP8_GRID) read_block_factors(l->scale, f.low * f.tiles, scales, scale);
    f.scale = scale;
    return f;
}

/* Returns the scales of row first + i: one, or FP8_GRID: one for each block of columns. */
static const float *fp8_scales_of(const struct fp8_scales *f, const struct piece *p, size_t first, size_t i) {
    if (p->lin.format == FP8_GRID) return f->scale + (block_row(&p->lin, piece_row(p, first + i)) - f->low) * f->tiles;
    return f->scale + (p->lin.format == FP8_ROW ? i : 0);
}

/* dst (n, cols) = rows of a piece that is not transposed; see read_rows. */
static float read_straight(const struct piece *p, size_t first, size_t n, float *dst) {
    const struct linear *l = &p->lin;
    const bool powers = l->format == MXFP4 || l->format == MXFP8;
    const size_t rb = row_bytes(l), per_row = l->cols / (powers ? 32 : 16);
    const struct fp8_scales scales = read_fp8_scales(p, first, n);
    uint8_t *raw = scratch(0, n * rb), *s = scratch(1, n * per_row + 1);
    float e4m3[256];
    int32_t most = 0;
    for (int b = 0; b < 256; b++) e4m3[b] = e4m3_to_f32((uint8_t)b);
    read_picked(l->w, rb, p, first, n, raw);
    if (l->format == NVFP4) read_block_scales(p, first, n, s);
    if (powers) read_powers(p, first, n, s);
#pragma omp parallel for schedule(dynamic, 16) reduction(max : most) if (n * l->cols > PARALLEL)
    for (size_t i = 0; i < n; i++) {
        const float *scale = fp8_scales_of(&scales, p, first, i);
        int32_t u = decode_row(l, raw + i * rb, s + i * per_row, scale, e4m3, dst + i * l->cols);
        most = u > most ? u : most;
    }
    float largest = f32_from_bits((uint32_t)most);
    if (l->format != PLAIN) check_finite(p, first, dst, largest);
    order_columns(l, dst, n, l->cols * sizeof *dst);
    return largest;
}

/* dst (rows, height) = a whole transposed piece; see read_rows. */
static float read_transposed(const struct piece *p, float *dst) {
    const struct linear *l = &p->lin;
    const struct piece source = {.lin = *l, .row = p->row, .rows = p->height};
    const size_t step = CHUNK_BYTES / (l->cols * 4) + 1;
    int32_t most = 0;
    for (size_t first = 0; first < p->height; first += step) {
        const size_t n = p->height - first < step ? p->height - first : step;
        float *v = (float *)(void *)scratch(4, n * l->cols * sizeof *v);
        read_straight(&source, first, n, v);
#pragma omp parallel for reduction(max : most) if (n * p->rows > PARALLEL)
        for (size_t r = 0; r < p->rows; r++)
            for (size_t i = 0; i < n; i++) {
                const float x = v[i * l->cols + p->col + r * p->step];
                const int32_t u = (int32_t)(f32_to_bits(x) & 0x7fffffff);
                dst[r * p->height + first + i] = x;
                most = u > most ? u : most;
            }
    }
    return f32_from_bits((uint32_t)most);
}

/* dst (n, width) = rows of a piece with another one beside it; see read_rows. */
static float read_joined(const struct piece *p, size_t first, size_t n, float *dst) {
    const struct piece parts[] = {{.lin = p->lin, .rows = p->rows}, {.lin = *p->beside, .rows = p->rows}};
    const size_t width = piece_width(p);
    float largest = 0;
    for (size_t k = 0, at = 0; k < COUNT(parts); at += parts[k++].lin.cols) {
        const size_t cols = parts[k].lin.cols;
        float *v = (float *)(void *)scratch(4, n * cols * sizeof *v);
        const float most = read_straight(&parts[k], first, n, v);
        largest = most > largest || isnan(most) ? most : largest;
        for (size_t r = 0; r < n; r++) memcpy(dst + r * width + at, v + r * cols, cols * sizeof *v);
    }
    return largest;
}

/* Returns how many rows of a piece are converted at a time: a transposed one is read as a whole. */
static size_t rows_at_a_time(const struct piece *p) {
    return p->height ? p->rows : CHUNK_BYTES / (piece_width(p) * 4) + 1;
}

/* dst (n, width) = rows of a piece as F32, without outer_factor(), as many as rows_at_a_time says. Returns the largest
 * magnitude, which only in plain matrices may be infinite or NaN. */
static float read_rows(const struct piece *p, size_t first, size_t n, float *dst) {
    if (p->beside) return read_joined(p, first, n, dst);
    return p->height ? read_transposed(p, dst) : read_straight(p, first, n, dst);
}

/* Writes v (n) as a type of floats. v is converted in place. */
static void write_floats(enum gguf_type type, float *v, size_t n) {
    uint8_t *p = (uint8_t *)v;
    for (size_t i = 0; type != GGUF_F32 && i < n; i++) {
        uint16_t h = 0;
        switch (type) {
        case GGUF_F16: h = f16_from_f32(v[i]); break;
        case GGUF_BF16: h = bf16_from_f32(v[i]); break;
        case GGUF_F32: /* above */
        case GGUF_BLOCKS: gguf_unexpected(__func__, type);
        }
        memcpy(p + 2 * i, &h, 2);
    }
    out_write(p, gguf_row_bytes(type, n));
}

/* Turns values of the source into those that are written. */
static void apply_meaning(enum meaning meaning, float factor, float *v, size_t n) {
    for (size_t i = 0; i < n && meaning == LESS_ONE; i++) v[i] += 1.0f;
    for (size_t i = 0; i < n && (meaning == LOGARITHM || meaning == EXPONENT); i++)
        v[i] = (float)((meaning == LOGARITHM ? -1 : 1) * exp((double)v[i]));
    for (size_t i = 0; i < n && factor != 0; i++) v[i] *= factor;
}

/* Dies if a type cannot have the scale of a block whose largest weight is `largest`. */
static void check_scale(const struct piece *p, enum gguf_type type, float largest) {
    switch (type) {
    case GGUF_Q8_0: /* largest / 127 must be finite in F16 */
        if (largest / 127.0f >= 65520.0f)
            die("%s: weights up to %g are too large for Q8_0", where(p->lin.w), (double)largest);
        return;
    case GGUF_MXFP4:
    case GGUF_NVFP4: /* after NAME.scale */
    case GGUF_FP8:
    case GGUF_FLOATS: return;
    }
}

/* Quantizes v, n rows of the output that come from l, and writes them. r: how to NVFP4, else NULL. The work is divided
 * into parts of a fixed size, so that the sums of errors do not depend on the number of threads. */
static void write_quantized(struct output *o, const struct linear *l, const struct nvfp4_rule *r, const float *v,
                            size_t n) {
    enum { WEIGHTS = 1 << 14 };
    size_t step = WEIGHTS / o->ne[0] + 1, parts = (n + step - 1) / step, bytes = gguf_row_bytes(o->type, o->ne[0]);
    uint8_t *to = scratch(0, n * bytes);
    struct quantize_sums *sums = (struct quantize_sums *)(void *)scratch(1, parts * sizeof *sums);
#pragma omp parallel for schedule(dynamic) if (n * o->ne[0] > PARALLEL)
    for (size_t i = 0; i < parts; i++) {
        size_t row = i * step, rows = n - row < step ? n - row : step;
        sums[i] = quantize_blocks(o->type, v + row * o->ne[0], rows * o->ne[0], r, to + row * bytes);
    }
    double unit = (double)outer_factor(l) * (r ? (double)r->scale2 : 1);
    for (size_t i = 0; i < parts; i++) {
        o->sums.error += unit * unit * sums[i].error;
        o->sums.power += unit * unit * sums[i].power;
    }
    out_write(to, n * bytes);
}

/* Returns the weights of the columns of matrix `index` in the error, 1 on average: their mean squared inputs. NULL:
 * there is no importance matrix, or it has no inputs for this one. Valid until the next call. */
static const float *column_weights(const struct output *o, size_t index) {
    static float *weights;
    size_t n = o->ne[0];
    double sum = 0;
    if (!o->sum2 || importance_value(o->counts, index) == 0.0f) return NULL;
    for (size_t c = 0; c < n; c++) sum += (double)importance_value(o->sum2, index * n + c);
    if (sum == 0) return NULL;
    arrsetlen(weights, n);
    for (size_t c = 0; c < n; c++)
        weights[c] = (float)((double)importance_value(o->sum2, index * n + c) * (double)n / sum);
    return weights;
}

/* Writes piece `index` as NVFP4. It is read twice, first to find scale2, then to quantize, unless it fits in one
 * chunk. */
static void write_as_nvfp4(struct output *o, size_t index) {
    const struct piece *p = &o->pieces[index];
    const struct linear *l = &p->lin;
    const size_t step = rows_at_a_time(p), width = piece_width(p);
    float *v = (float *)(void *)scratch(3, (step < p->rows ? step : p->rows) * width * sizeof *v), amax = 0.0f;
    for (size_t r = 0; r < p->rows; r += step) {
        size_t n = p->rows - r < step ? p->rows - r : step;
        float largest = read_rows(p, r, n, v);
        check_finite(p, r, v, largest);
        amax = fmaxf(amax, largest);
        out_write(v, 0); /* writes nothing, but handles signals */
    }
    struct nvfp4_rule rule = {nvfp4_scale2(amax), !types.amax, width, column_weights(o, index)};
    o->scale2[index] = rule.scale2 * outer_factor(l) * result_gain(l);
    for (size_t r = 0; r < p->rows; r += step) {
        size_t n = p->rows - r < step ? p->rows - r : step;
        if (step < p->rows) read_rows(p, r, n, v);
        write_quantized(o, l, &rule, v, n);
    }
}

/* Repacks and writes n rows of an NVFP4 piece. *most: the largest scale byte so far. */
static void write_nvfp4_rows(const struct piece *p, size_t first, size_t n, uint8_t *most) {
    const struct linear *l = &p->lin;
    size_t blocks = l->cols / 64, rb = row_bytes(l);
    uint8_t *raw = scratch(0, n * rb), *s = scratch(1, n * l->cols / 16), largest;
    struct block_nvfp4 *b = (struct block_nvfp4 *)scratch(2, n * blocks * sizeof *b);
    read_picked(l->w, rb, p, first, n, raw);
    largest = read_block_scales(p, first, n, s);
    *most = largest > *most ? largest : *most;
    order_columns(l, raw, n, rb);
    order_columns(l, s, n, l->cols / 16);
    for (size_t i = 0; i < n * blocks; i++) nvfp4_repack_block(raw + 32 * i, s + 4 * i, &b[i]);
    out_write(b, n * blocks * sizeof *b);
}

/* Repacks and writes n rows of an MXFP4 piece. Byte j of a block of the source holds its weights 2j and 2j + 1. */
static void write_mxfp4_rows(const struct piece *p, size_t first, size_t n) {
    const struct linear *l = &p->lin;
    const size_t blocks = l->cols / 32, rb = row_bytes(l);
    uint8_t *raw = scratch(0, n * rb), *s = scratch(1, n * blocks);
    struct block_mxfp4 *b = (struct block_mxfp4 *)scratch(2, n * blocks * sizeof *b);
    read_picked(l->w, rb, p, first, n, raw);
    read_powers(p, first, n, s);
    order_columns(l, raw, n, rb);
    order_columns(l, s, n, blocks);
    for (size_t i = 0; i < n * blocks; i++) {
        const uint8_t *q = raw + 16 * i;
        b[i].e = s[i];
        for (int j = 0; j < 16; j++) {
            const int low = q[j / 2] >> j % 2 * 4 & 15, high = q[8 + j / 2] >> j % 2 * 4 & 15;
            b[i].qs[j] = (uint8_t)(low | high << 4);
        }
    }
    out_write(b, n * blocks * sizeof *b);
}

/* Repacks and writes n rows of an FP8 piece. */
static void write_fp8_rows(const struct piece *p, size_t first, size_t n) {
    const struct linear *l = &p->lin;
    const size_t blocks = l->cols / FP8_BLOCK;
    const struct fp8_scales scales = read_fp8_scales(p, first, n);
    uint8_t *raw = scratch(0, n * l->cols);
    struct block_fp8 *b = (struct block_fp8 *)scratch(3, n * blocks * sizeof *b);
    read_picked(l->w, l->cols, p, first, n, raw);
    for (size_t i = 0; i < n; i++) {
        const float *scale = fp8_scales_of(&scales, p, first, i);
        for (size_t k = 0; k < blocks; k++) {
            const float d = scale[l->format == FP8_GRID ? k : 0];
            const uint8_t *codes = raw + i * l->cols + FP8_BLOCK * k;
            bool finite = isfinite(d);
            for (size_t j = 0; j < FP8_BLOCK; j++) finite &= (codes[j] & 0x7f) != 0x7f;
            if (!finite)
                die("%s: row %zu, block %zu of 128 columns has a weight that is not finite", where(l->w),
                    piece_row(p, first + i), k);
            memcpy(b[i * blocks + k].d, &d, sizeof d);
            memcpy(b[i * blocks + k].qs, codes, FP8_BLOCK);
        }
    }
    order_columns(l, b, n, blocks * sizeof *b);
    out_write(b, n * blocks * sizeof *b);
}

/* Writes n rows of a piece as they are: of the same type, or FP8, MXFP4 and NVFP4 in blocks of GGUF. *most: see
 * write_nvfp4_rows. */
static void write_rows_as_stored(const struct piece *p, size_t first, size_t n, uint8_t *most) {
    const size_t bytes = row_bytes(&p->lin);
    uint8_t *raw;
    switch (p->lin.format) {
    case NVFP4: write_nvfp4_rows(p, first, n, most); return;
    case MXFP4: write_mxfp4_rows(p, first, n); return;
    case FP8_TENSOR:
    case FP8_ROW:
    case FP8_GRID: write_fp8_rows(p, first, n); return;
    case PLAIN:
        raw = scratch(0, n * bytes);
        read_picked(p->lin.w, bytes, p, first, n, raw);
        order_columns(&p->lin, raw, n, bytes);
        out_write(raw, n * bytes);
        return;
    case MXFP8: break;
    }
    die("internal error: %s: %s cannot be written as stored", where(p->lin.w), format_name(&p->lin));
}

/* Writes piece `index` in chunks of whole rows. */
static void write_piece(struct output *o, size_t index) {
    const struct piece *p = &o->pieces[index];
    const struct linear *l = &p->lin;
    const size_t step = rows_at_a_time(p), width = piece_width(p);
    const bool same = l->format == PLAIN && float_type(l->w) == o->type && !o->finite && !p->height && !p->beside;
    const bool repacked = repacks(p, o->type);
    uint8_t most = 0;
    if (o->scale2 && !repacked) {
        write_as_nvfp4(o, index);
        return;
    }
    for (size_t r = 0; r < p->rows; r += step) {
        size_t n = p->rows - r < step ? p->rows - r : step;
        if (same || repacked) {
            write_rows_as_stored(p, r, n, &most);
            continue;
        }
        float *v = (float *)(void *)scratch(3, n * width * sizeof *v);
        float largest = read_rows(p, r, n, v);
        if (!gguf_is_float(o->type)) {
            check_finite(p, r, v, largest);
            check_scale(p, o->type, largest);
            write_quantized(o, l, NULL, v, n);
            continue;
        }
        apply_meaning(o->meaning, o->factor, v, n * width);
        for (size_t i = 0; o->finite && i < n * width; i++) check_finite(p, r, v, v[i]);
        write_floats(o->type, v, n * width);
    }
    float largest = 6.0f * e4m3_to_f32(most) * l->factor;
    if (most && (largest < 1e-5f || largest > 64.0f) && !n_implausible++)
        err_message("%s: weights up to %g are implausible; is its scale right?", where(l->w), (double)largest);
}

/* Writes a table of experts as I32. */
static void write_ids(const struct output *o) {
    const struct tensor *t = o->pieces[0].lin.w;
    const size_t used = o->ne[0], bytes = dtypes[t->dtype].bits / 8, step = CHUNK_BYTES / (used * bytes) + 1;
    for (size_t r = 0; r < o->ne[1]; r += step) {
        const size_t n = (o->ne[1] - r < step ? o->ne[1] - r : step) * used;
        uint8_t *raw = scratch(0, n * bytes);
        int32_t *ids = (int32_t *)(void *)scratch(1, n * sizeof *ids);
        tensor_read(t, r * used * bytes, raw, n * bytes);
        for (size_t i = 0; i < n; i++) {
            int64_t id = 0;
            int32_t narrow = 0;
            memcpy(bytes == 4 ? (void *)&narrow : (void *)&id, raw + i * bytes, bytes);
            if (bytes == 4) id = narrow;
            if (id < 0 || id >= o->below)
                die("%s: token %zu has expert %lld; the layer has experts 0 to %d", where(t), r + i / used,
                    (long long)id, o->below - 1);
            ids[i] = (int32_t)id;
            for (size_t k = i - i % used; k < i; k++)
                if (ids[k] == ids[i]) die("%s: token %zu has expert %d twice", where(t), r + i / used, ids[i]);
        }
        out_write(ids, n * sizeof *ids);
    }
}

/* Writes bytes of E4M3 or E8M0 as I8. NaN is an error. */
static void write_bytes(const struct output *o) {
    const struct tensor *t = o->pieces[0].lin.w;
    const uint8_t mask = t->dtype == F8_E4M3 ? 0x7f : 0xff;
    for (size_t from = 0; from < o->bytes; from += CHUNK_BYTES) {
        const size_t n = o->bytes - from < CHUNK_BYTES ? o->bytes - from : CHUNK_BYTES;
        uint8_t *raw = scratch(0, n);
        bool bad = false;
        tensor_read(t, from, raw, n);
        for (size_t i = 0; i < n; i++) bad |= (raw[i] & mask) == mask;
        for (size_t i = 0; i < n && bad; i++)
            if ((raw[i] & mask) == mask)
                die("%s: row %zu: the byte %02x is not a number", where(t), (from + i) / o->ne[0], raw[i]);
        out_write(raw, n);
    }
}

/* Writes the data of one output, padded to the alignment. */
static void write_output(struct output *o) {
    static const uint8_t zeros[GGUF_DEFAULT_ALIGN];
    size_t from = dest.done;
    if (o->values) out_write(o->values, arrlenu(o->values) * sizeof *o->values);
    if (o->type == GGUF_I32) write_ids(o);
    if (o->type == GGUF_I8) write_bytes(o);
    for (size_t i = 0; i < arrlenu(o->pieces) && o->type != GGUF_I32 && o->type != GGUF_I8; i++) write_piece(o, i);
    if (dest.done - from != o->bytes)
        die("internal error: %s: %zu bytes written, %zu planned", o->name, dest.done - from, o->bytes);
    out_write(zeros, gguf_pad(o->bytes) - o->bytes);
}

/* Writes the file. only_header: without the data of its tensors. */
static void write_file(char path[PATH_MAX], const uint8_t *header, size_t header_bytes, bool only_header) {
    dest.total = header_bytes + (only_header ? 0 : writer.data_bytes);
    out_begin(path);
    out_write(header, header_bytes);
    for (size_t i = 0; i < arrlenu(plan) && !only_header; i++) write_output(&plan[i]);
    out_end();
    if (n_implausible > 1) err_message("%zu matrices have implausible weights", n_implausible);
    err_message("'%s': %s%zu tensors, %s", path, only_header ? "only the header of " : "", arrlenu(plan),
                human((double)dest.total));
}

/* ============================================================================================================
 * Main
 *
 * The listing of --dry-run, the report of quantization errors, options, and the order of the steps.
 * ============================================================================================================ */

/* Returns the name of a tensor of the source for the listing; valid until the next call. */
static const char *source_name(const struct tensor *t) {
    static char shown[256];
    return gguf_printable((struct gguf_str){t->name, strlen(t->name)}, shown, sizeof shown);
}

/* Prints a line for each output: name, type, shape, bytes, source, remark; then totals. */
static void list_plan(size_t header_bytes) {
    size_t sum[GGUF_TYPE_SLOTS] = {0}, data = 0;
    size_t count[GGUF_TYPE_SLOTS] = {0};
    for (size_t i = 0; i < arrlenu(plan); i++) {
        const struct output *o = &plan[i];
        char shape[96] = "";
        for (uint32_t d = 0; d < o->n_dims; d++)
            snprintf(shape + strlen(shape), sizeof shape - strlen(shape), "%s%zu", d ? " x " : "", o->ne[d]);
        printf("%-36s %-6s %-22s %12zu  ", o->name, gguf_type_info(o->type).name, shape, o->bytes);
        if (o->values) printf("%zu value%s", arrlenu(o->values), arrlenu(o->values) == 1 ? "" : "s");
        else printf("%s", source_name(o->pieces[0].lin.w));
        if (arrlenu(o->pieces) > 1) printf(" (%zu pieces)", arrlenu(o->pieces));
        printf("%s%s\n", *o->remark ? "  " : "", o->remark);
        sum[gguf_type_slot(o->type)] += o->bytes;
        data += o->bytes;
        count[gguf_type_slot(o->type)]++;
    }
    for (uint32_t i = 0; i < GGUF_TYPE_SLOTS; i++)
        if (count[i])
            printf("total %-6s %6zu tensors %20zu bytes\n", gguf_type_info(gguf_slot_type(i)).name, count[i], sum[i]);
    printf("total        %6zu tensors %20zu bytes, %zu with header and padding; %zu tensors of the source "
           "are skipped\n",
           arrlenu(plan), data, header_bytes + writer.data_bytes, n_skipped);
}

/* Returns the relative error and the signal-to-noise ratio of quantized weights; valid as long as fmt's. */
static const char *error_text(struct quantize_sums s) {
    return s.error > 0 ? fmt("%7.3f %% %6.2f dB", 100 * sqrt(s.error / s.power), 10 * log10(s.power / s.error))
                       : "  exact";
}

/* Prints a line for each quantized matrix: name, type, weights, error relative to the root mean square of the weights,
 * signal-to-noise ratio; then totals. Warns of matrices below LEAST_DB. */
static void report_errors(void) {
    enum { LEAST_DB = 18 };
    for (uint32_t slot = 0; slot < GGUF_TYPE_SLOTS; slot++) {
        const uint32_t type = gguf_slot_type(slot);
        struct quantize_sums sum = {0, 0};
        size_t count = 0, weights = 0;
        for (size_t i = 0; i < arrlenu(plan); i++) {
            const struct output *o = &plan[i];
            const size_t n = o->n_quantized;
            if (!n || o->type != type) continue;
            const char *name = gguf_type_info(type).name;
            printf("%-36s %-6s %12zu weights  %s\n", o->name, name, n, error_text(o->sums));
            if (o->sums.error > 0 && 10 * log10(o->sums.power / o->sums.error) < LEAST_DB)
                err_message(
                    "%s: its weights do not suit %s: signal to noise is below %d dB (--keep leaves it as it is)",
                    o->name, name, LEAST_DB);
            count++;
            weights += n;
            sum.error += o->sums.error;
            sum.power += o->sums.power;
        }
        if (count)
            printf("total %-6s %6zu tensors %28zu weights  %s\n", gguf_type_info(type).name, count, weights,
                   error_text(sum));
    }
    if (!importance.path) return;
    printf("importance   %6zu tensors are weighted, %zu are not in '", importance.weighted, importance.unweighted);
    out_text(importance.path, strlen(importance.path));
    puts("'");
}

enum search { SEARCH_SWEEP, SEARCH_AMAX };
static const char *const search_names[] = {[SEARCH_SWEEP] = "sweep", [SEARCH_AMAX] = "amax", NULL};
static const char *const quantize_names[] = {"nvfp4", NULL};
static const enum gguf_type quantize_types[] = {GGUF_NVFP4};
static_assert(COUNT(quantize_names) == COUNT(quantize_types) + 1, "each choice has a type");
static const char *const backbone_names[] = {"bf16", "q8_0", "fp8", NULL};
static const enum gguf_type backbone_types[] = {GGUF_BF16, GGUF_Q8_0, GGUF_FP8};
static_assert(COUNT(backbone_names) == COUNT(backbone_types) + 1, "each choice has a type");

/* The options as they were given; NULL and -1: not given. */
struct settings {
    char *out, *name, *importance, *keep;
    int quantize, search, backbone; /* indices of the names above */
    bool dense, no_mtp, dry_run;
    struct common_settings common;
};

static struct settings opt = {.quantize = -1, .search = -1, .backbone = -1, .common.completion = -1};

static const struct option options[] = {
    {"output", "-o", IS_STR(out), .arg = "FILE.gguf", .help = "the file to write"},
    {"name", IS_STR(name), .arg = "NAME", .help = "general.name (default: the name of the directory)"},
    {"quantize", IS_CHOICE(quantize, quantize_names), .arg = "TYPE",
     .help = "quantize the routed experts, or the feed-forwards of a dense model, to this type; prints each tensor's "
             "error"},
    {"dense", IS_FLAG(dense), .help = "with --quantize: also quantize the feed-forward part of dense layers"},
    {"search", IS_CHOICE(search, search_names), .arg = "HOW",
     .help = "with --quantize: sweep takes the best of nine scales for every 16 weights; amax takes the scale of the "
             "largest weight (default: sweep)"},
    {"importance", IS_STR(importance), .arg = "FILE.gguf",
     .help = "with --quantize: weight the errors by the mean squared inputs in FILE, which llama-imatrix or "
             "moe --calibrate --activations writes"},
    {"backbone", IS_CHOICE(backbone, backbone_names), .arg = "TYPE",
     .help =
         "type of all other matrices that are not NVFP4 (default: as stored); fp8 keeps FP8 weights, also of experts, "
         "as they are: for moe alone, llama.cpp has no such type"},
    {"keep", IS_STR(keep), .arg = "REGEX",
     .help = "keep the type of tensors whose GGUF name matches; experts of several formats become BF16"},
    {"no-mtp", IS_FLAG(no_mtp),
     .help = "leave out the layers for multi-token prediction, with which moe drafts tokens"},
    {"dry-run", IS_FLAG(dry_run),
     .help = "list the tensors without writing them; with -o write the header of the file, for moe --plan"},
    COMMON_OPTIONS,
};

static const struct manual manual = {
    .name = PROGRAM,
    .summary = "convert Hugging Face models to GGUF",
    .usage = "  moe-convert HF_DIR -o OUT.gguf [options]\n"
             "  moe-convert HF_DIR --dry-run [-o HEADER.gguf] [options]\n",
    .about = "Converts a Hugging Face model directory (safetensors, config.json,\n"
             "tokenizer.json or tiktoken.model) to GGUF.\n"
             "Models: qwen3_moe, qwen3_vl_moe, qwen3_vl_moe_text, qwen3_5_moe,\n"
             "qwen3_5_moe_text, qwen3_5, qwen3_5_text, qwen3, qwen3_next, qwen4_exp,\n"
             "qwen4_exp_text, deepseek_v3, deepseek_v2, deepseek, deepseek_v32, deepseek_v4,\n"
             "deepseek_v41, deepseek_v41_text, kimi_k2, kimi_k25, hy_v3, glm4_moe, solar_open,\n"
             "glm4_moe_lite, glm_moe_dsa, glm4, dots1, dots3_note, longcat_flash, hy_v4,\n"
             "hunyuan_v1_moe, bailing_moe, bailing_moe_v2, sarvam_moe, granitemoe,\n"
             "granitemoeshared, granitemoehybrid, granitemoe_swa, granite_swa, exaone_moe,\n"
             "afmoe, cohere2_moe, dbrx, lfm2_moe, arctic, maple, smallthinker, llama4,\n"
             "llama4_text, phimoe, gpt_oss, minimax_m2, minimax_m3_vl, minimax_m3_vl_text,\n"
             "minimax_m3, mixtral, llama, mistral, mistral3, ministral3, mistral4, gemma4,\n"
             "gemma4_text, olmoe, qwen2_moe, qwen2, ernie4_5_moe, step3p5, step3p7, laguna,\n"
             "mellum, mimo_v2_flash, mimo_v2, kimi_linear, kimi_k3, bailing_hybrid, glm5_next,\n"
             "inkling2, inkling2_text, inkling2_loop, inkling2_loop_text, nemotron_h.\n"
             "NVFP4 and MXFP4 weights are repacked without loss. MXFP8 and FP8 E4M3 become\n"
             "BF16, or FP8 stays with --backbone fp8. BF16, F16 and F32 are kept. Norms and\n"
             "routers become F32.\n",
    .operand = {.type = OPT_STR, .arg = "DIR"},
    .exit_codes = "0 done, 1 failed, 2 wrong usage",
    .options = options,
    .n_options = COUNT(options),
};

/* Checks the options and sets `types`. */
static void apply_options(void) {
    if (!model_dir) die_usage("no Hugging Face directory given (see --help)");
    if (!opt.out && !opt.dry_run) die_usage("give -o OUT.gguf or --dry-run (see --help)");
    if (opt.out && !strcmp(opt.out, "-")) die_usage("-o -: the output cannot go to stdout");
    if (opt.out && strlen(opt.out) >= PATH_MAX - 1) die_usage("the name given with -o is too long");
    const char *unused = opt.importance ? "--importance" : NULL;
    if (opt.search >= 0) unused = "--search";
    if (opt.dense) unused = "--dense";
    if (opt.quantize < 0 && unused) die_usage("%s needs --quantize nvfp4", unused);
    if (opt.importance && opt.search == SEARCH_AMAX)
        die_usage("--importance works only with --search sweep: amax looks only at the largest weight");
    if (opt.quantize >= 0) types.experts = quantize_types[opt.quantize];
    if (opt.backbone >= 0) types.backbone = backbone_types[opt.backbone];
    types.dense = opt.dense;
    no_prediction = opt.no_mtp;
    types.amax = opt.search == SEARCH_AMAX;
    if (opt.keep) keep_regex_compile(opt.keep);
}

int main(int argc, char **argv) {
    char target[PATH_MAX];
    const char **dirs = NULL;
    program_init();
    signal(SIGBUS, signal_bus); /* --importance is mapped */
    arguments_read(&opt, argc, argv, &dirs);
    common_options_run(&opt.common);
    if (arrlen(dirs) > 1) die_usage("expected one directory, got '%s' and '%s'", dirs[0], dirs[1]);
    model_dir = arrlen(dirs) ? dirs[0] : NULL;
    arrfree(dirs);
    apply_options();
    strcpy(target, opt.out ? opt.out : "");

    model_dir = model_dir_find(model_dir);
    config_read();
    if (!src.experts_key)
        types.dense = types.experts != AS_STORED; /* dense feed-forwards are what there is to quantize */
    may_lack = is_of_prediction;
    source_open();
    if (opt.importance) importance_open(opt.importance);
    check_quantization_keys();
    survey();
    load_keys();
    plan_model();
    check_quantization();
    put_metadata(model_name(opt.name));
    size_t header_bytes;
    uint8_t *header = gguf_header(&writer, &header_bytes);
    if (!header) die("out of memory for the header");
    check_loads(header, header_bytes);
    if (opt.out) write_file(target, header, header_bytes, opt.dry_run);
    if (opt.dry_run) list_plan(header_bytes); /* at the end, because a closed pipe ends the program */
    else report_errors();
    free(header);
    gguf_writer_free(&writer);
    pcre2_code_free(types.keep);
    if (opt.importance) gguf_close(&importance.g);
    json_decref(src.top.obj);
    return stdout_end();
}
