/* Quantizes plain weights to NVFP4, with a scale for each block of 16 weights and one for the matrix, to MXFP4 and to
 * Q8_0.
 *
 *   nvfp4_fastest               returns the fastest of the three below that this processor runs; all give the same bits
 *   quantize_nvfp4_scalar       one block after the other; the reference of the other two
 *   quantize_nvfp4_lanes8, 16   8 or 16 blocks at a time, one in each lane (AVX2, AVX-512)
 *   quantize_q8_0               as ggml's quantize_row_q8_0_ref
 *   quantize_mxfp4              with the better of two powers of two for each block
 *   quantize_blocks             to a type, by these
 *
 * Lanes and loops give the same bits because every sum is taken in the order of the weights and every multiply-add is
 * an explicit fused one.
 */
#ifndef CONVERT_QUANTIZE_H
#define CONVERT_QUANTIZE_H

#include <float.h>

#include "../gguf_nvfp4.h"

enum {
    BLOCK = 16,      /* weights with one E4M3 scale */
    SWEEP_BELOW = 3, /* E4M3 codes below that of amax / 6 that the search tries */
    SWEEP_ABOVE = 5, /* E4M3 codes above it that the search tries */
    E4M3_ONE = 0x38, /* the code of 1.0 */
    E4M3_LEAST = 1,  /* the code of 2^-9 */
    E4M3_MOST = 0x7e /* the code of 448 */
};

/* How one matrix is quantized. */
struct nvfp4_rule {
    float scale2;        /* scale of the matrix, see nvfp4_scale2 */
    bool sweep;          /* search the scale with the smallest error; false: use the one of amax / 6 */
    size_t n_in;         /* columns, a multiple of 64 */
    const float *weight; /* (n_in) weights of the squared errors of the columns; NULL: all 1 */
};

/* Sums over all weights of their squared errors and of their squares, in units of scale2 squared. */
struct quantize_sums {
    double error, power;
};

/* Returns the scale of a matrix whose largest magnitude is amax, so that amax is 6 x 448 x scale2. At least 2^-117, so
 * that the scales of blocks are no subnormal F32 numbers. */
static inline float nvfp4_scale2(float amax) {
    float s = amax / (6.0f * 448.0f);
    return s > 0x1p-117f ? s : 0x1p-117f;
}

/* Returns the E4M3 code of amax / 6 / scale2, at least that of 2^-9; of 1.0 for a block of zeros. */
static inline uint8_t nvfp4_amax_code(float amax, float scale2) {
    float s = amax / (6.0f * scale2);
    if (s == 0.0f) return E4M3_ONE;
    return e4m3_from_f32(s < 0x1p-9f ? 0x1p-9f : s);
}

/* Returns the E2M1 magnitude nearest to y >= 0, of two the one with the even code. Adding and subtracting 2^22 times
 * the power of two at or below y rounds y to two significant bits; below 1, to a multiple of a half. */
static inline float e2m1_round(float y) {
    uint32_t exponent = f32_to_bits(y) & 0x7f800000;
    float big = f32_from_bits((exponent > 0x3f800000 ? exponent : 0x3f800000) + (22u << 23));
    float q = (y + big) - big;
    return q < 6.0f ? q : 6.0f;
}

/* Returns the code of an E2M1 magnitude. */
static inline uint32_t e2m1_code(float q) { return q < 1.0f ? (uint32_t)(2 * q) : (f32_to_bits(q) >> 22) - 252; }

/* Returns the weighted squared error of a block x (16) with the scale d, in units of scale2 squared. weight (16) or
 * NULL. */
static inline float nvfp4_block_error(const float *x, const float *weight, float d, float scale2) {
    float sum = 0.0f, step = d * scale2;
    for (int i = 0; i < BLOCK; i++) {
        float y = fabsf(x[i]) / step, e = y - e2m1_round(y);
        sum = fmaf(weight ? e * weight[i] : e, e, sum);
    }
    return sum * (d * d);
}

/* Quantizes x (16) to 8 bytes of codes at qs (see struct block_nvfp4) and returns the E4M3 code of the scale. weight
 * (16): those of these columns, or NULL. s: the sums to add to. */
static inline uint8_t nvfp4_quantize_block(const float *x, const struct nvfp4_rule *r, const float *weight, uint8_t *qs,
                                           struct quantize_sums *s) {
    float amax = 0.0f, error = 0.0f, power = 0.0f;
    for (int i = 0; i < BLOCK; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    int first = nvfp4_amax_code(amax, r->scale2), code = first;
    float best = r->sweep ? nvfp4_block_error(x, weight, e4m3_to_f32((uint8_t)code), r->scale2) : 0.0f;
    for (int k = -SWEEP_BELOW; k <= SWEEP_ABOVE && r->sweep; k += k == -1 ? 2 : 1) {
        int c = first + k < E4M3_LEAST ? E4M3_LEAST : first + k;
        if (c > E4M3_MOST) c = E4M3_MOST;
        float e = nvfp4_block_error(x, weight, e4m3_to_f32((uint8_t)c), r->scale2);
        if (e < best) {
            best = e;
            code = c;
        }
    }
    float d = e4m3_to_f32((uint8_t)code), step = d * r->scale2;
    memset(qs, 0, BLOCK / 2);
    for (int i = 0; i < BLOCK; i++) {
        float y = fabsf(x[i]) / step, q = e2m1_round(y), e = y - q;
        error = fmaf(e, e, error);
        power = fmaf(y, y, power);
        uint32_t sign = x[i] < 0.0f ? 8 : 0;
        qs[i % 8] |= (uint8_t)((e2m1_code(q) | sign) << (i < 8 ? 0 : 4));
    }
    s->error += (double)(error * (d * d));
    s->power += (double)(power * (d * d));
    return (uint8_t)code;
}

/* Quantizes x (n), rows of r->n_in finite weights, to out (n / 64) and returns the sums of errors. */
typedef struct quantize_sums nvfp4_quantizer(const float *x, size_t n, const struct nvfp4_rule *r,
                                             struct block_nvfp4 *out);

static inline struct quantize_sums quantize_nvfp4_scalar(const float *x, size_t n, const struct nvfp4_rule *r,
                                                         struct block_nvfp4 *out) {
    struct quantize_sums s = {0, 0};
    for (size_t b = 0; b < n / BLOCK; b++) {
        const float *weight = r->weight ? r->weight + b * BLOCK % r->n_in : NULL;
        struct block_nvfp4 *o = &out[b / 4];
        o->d[b % 4] = nvfp4_quantize_block(x + BLOCK * b, r, weight, o->qs + b % 4 * 8, &s);
    }
    return s;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Defines quantize_nvfp4_##isa from the vectors of an instruction set with `lanes` floats (vf) and integers (vi), and
 * its min, max and fma. */
#define QUANTIZE_FUNCTIONS(isa, TARGET, lanes)                                                                         \
    /* E4M3, codes 1 to 0x7e */                                                                                        \
    TARGET QUANTIZE_INLINE isa##_vf isa##_e4m3(isa##_vi code) {                                                        \
        isa##_vf normal = (isa##_vf)((code << 20) + (120 << 23));                                                      \
        isa##_vf small = (isa##_vf)((code << 20) + (121 << 23)) - 0x1p-6f;                                             \
        isa##_vi is_small = (isa##_vi)(code < 8);                                                                      \
        return (isa##_vf)(((isa##_vi)small & is_small) | ((isa##_vi)normal & ~is_small));                              \
    }                                                                                                                  \
    /* See e2m1_round. */                                                                                              \
    TARGET QUANTIZE_INLINE isa##_vf isa##_round(isa##_vf y) {                                                          \
        isa##_vi exponent = (isa##_vi)y & 0x7f800000;                                                                  \
        isa##_vf big = (isa##_vf)(isa##_max(exponent, (isa##_vi){0} + 0x3f800000) + (22 << 23));                       \
        return isa##_min((y + big) - big, (isa##_vf){0} + 6.0f);                                                       \
    }                                                                                                                  \
    /* See nvfp4_block_error; x are magnitudes. */                                                                     \
    TARGET QUANTIZE_INLINE isa##_vf isa##_error(const isa##_vf *x, const isa##_vf *weight, isa##_vf d, float scale2) { \
        isa##_vf sum = {0}, step = d * scale2;                                                                         \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            isa##_vf y = x[i] / step, e = y - isa##_round(y);                                                          \
            sum = isa##_fma(weight ? e * weight[i] : e, e, sum);                                                       \
        }                                                                                                              \
        return sum * (d * d);                                                                                          \
    }                                                                                                                  \
    TARGET QUANTIZE_INLINE isa##_vi isa##_sweep(const isa##_vf *x, const isa##_vf *weight, isa##_vi first,             \
                                                float scale2) {                                                        \
        isa##_vi code = first;                                                                                         \
        isa##_vf best = isa##_error(x, weight, isa##_e4m3(first), scale2);                                             \
        for (int k = -SWEEP_BELOW; k <= SWEEP_ABOVE; k += k == -1 ? 2 : 1) {                                           \
            isa##_vi c = isa##_max(first + k, (isa##_vi){0} + E4M3_LEAST);                                             \
            c = (c & (isa##_vi)(c < E4M3_MOST)) | (E4M3_MOST & (isa##_vi)(c >= E4M3_MOST));                            \
            isa##_vf e = isa##_error(x, weight, isa##_e4m3(c), scale2);                                                \
            isa##_vi better = (isa##_vi)(e < best);                                                                    \
            code = (c & better) | (code & ~better);                                                                    \
            best = isa##_min(e, best);                                                                                 \
        }                                                                                                              \
        return code;                                                                                                   \
    }                                                                                                                  \
    /* The codes of the 16 weights of every lane: in lo the bytes 0 to 3, in hi 4 to 7. */                             \
    TARGET QUANTIZE_INLINE void isa##_encode(const isa##_vf *x, const isa##_vi *sign, isa##_vf d, float scale2,        \
                                             isa##_vi *lo, isa##_vi *hi, isa##_vf *error, isa##_vf *power) {           \
        isa##_vf step = d * scale2, err = {0}, pow = {0};                                                              \
        isa##_vi half[2] = {{0}, {0}};                                                                                 \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            isa##_vf y = x[i] / step, q = isa##_round(y), e = y - q;                                                   \
            err = isa##_fma(e, e, err);                                                                                \
            pow = isa##_fma(y, y, pow);                                                                                \
            isa##_vi least = (isa##_vi)(q < 1.0f);                                                                     \
            isa##_vi code = ((isa##_vi)(q == 0.5f) & 1) | ((((isa##_vi)q >> 22) - 252) & ~least);                      \
            half[i / 4 % 2] |= (code | (sign[i] & 8)) << (i % 4 * 8 + i / 8 * 4);                                      \
        }                                                                                                              \
        *lo = half[0];                                                                                                 \
        *hi = half[1];                                                                                                 \
        *error = err * (d * d);                                                                                        \
        *power = pow * (d * d);                                                                                        \
    }                                                                                                                  \
    TARGET static inline struct quantize_sums quantize_nvfp4_##isa(                                                    \
        const float *x, size_t n, const struct nvfp4_rule *r, struct block_nvfp4 *out) {                               \
        struct quantize_sums s = {0, 0};                                                                               \
        isa##_vf a[BLOCK], w[BLOCK], error, power; /* weight i of every lane */                                        \
        isa##_vi sign[BLOCK], code, lo, hi;                                                                            \
        for (size_t b0 = 0; b0 < n / BLOCK; b0 += (lanes)) {                                                           \
            size_t some = n / BLOCK - b0 < (lanes) ? n / BLOCK - b0 : (lanes);                                         \
            for (size_t k = 0; k < (lanes); k++) { /* lanes after the last block repeat it */                          \
                size_t at = BLOCK * (b0 + (k < some ? k : some - 1));                                                  \
                float amax = 0.0f;                                                                                     \
                for (int i = 0; i < BLOCK; i++) {                                                                      \
                    float v = x[at + (size_t)i], m = fabsf(v);                                                         \
                    a[i][k] = m;                                                                                       \
                    sign[i][k] = -(v < 0.0f);                                                                          \
                    amax = m > amax ? m : amax;                                                                        \
                }                                                                                                      \
                for (int i = 0; i < BLOCK && r->weight; i++) w[i][k] = r->weight[at % r->n_in + (size_t)i];            \
                code[k] = nvfp4_amax_code(amax, r->scale2);                                                            \
            }                                                                                                          \
            if (r->sweep && r->weight) code = isa##_sweep(a, w, code, r->scale2);                                      \
            else if (r->sweep) code = isa##_sweep(a, NULL, code, r->scale2);                                           \
            isa##_encode(a, sign, isa##_e4m3(code), r->scale2, &lo, &hi, &error, &power);                              \
            for (size_t k = 0; k < some; k++) {                                                                        \
                struct block_nvfp4 *o = &out[(b0 + k) / 4];                                                            \
                uint8_t *qs = o->qs + (b0 + k) % 4 * 8;                                                                \
                int32_t half[2] = {lo[k], hi[k]};                                                                      \
                o->d[(b0 + k) % 4] = (uint8_t)code[k];                                                                 \
                memcpy(qs, half, 8);                                                                                   \
                s.error += (double)error[k];                                                                           \
                s.power += (double)power[k];                                                                           \
            }                                                                                                          \
        }                                                                                                              \
        return s;                                                                                                      \
    }

#define QUANTIZE_INLINE static inline __attribute__((always_inline))
#define QUANTIZE_AVX2   __attribute__((target("avx2,fma")))
typedef float lanes8_vf __attribute__((vector_size(32)));
typedef int32_t lanes8_vi __attribute__((vector_size(32)));

QUANTIZE_AVX2 static inline lanes8_vf lanes8_min(lanes8_vf a, lanes8_vf b) { return _mm256_min_ps(a, b); }

QUANTIZE_AVX2 static inline lanes8_vi lanes8_max(lanes8_vi a, lanes8_vi b) {
    return (lanes8_vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

QUANTIZE_AVX2 static inline lanes8_vf lanes8_fma(lanes8_vf a, lanes8_vf b, lanes8_vf c) {
    return _mm256_fmadd_ps(a, b, c);
}

QUANTIZE_FUNCTIONS(lanes8, QUANTIZE_AVX2, 8)

#define QUANTIZE_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")))
typedef float lanes16_vf __attribute__((vector_size(64)));
typedef int32_t lanes16_vi __attribute__((vector_size(64)));

QUANTIZE_AVX512 static inline lanes16_vf lanes16_min(lanes16_vf a, lanes16_vf b) { return _mm512_min_ps(a, b); }

QUANTIZE_AVX512 static inline lanes16_vi lanes16_max(lanes16_vi a, lanes16_vi b) {
    return (lanes16_vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

QUANTIZE_AVX512 static inline lanes16_vf lanes16_fma(lanes16_vf a, lanes16_vf b, lanes16_vf c) {
    return _mm512_fmadd_ps(a, b, c);
}

QUANTIZE_FUNCTIONS(lanes16, QUANTIZE_AVX512, 16)
#endif

/* Returns the fastest quantizer that this processor runs. */
static inline nvfp4_quantizer *nvfp4_fastest(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return quantize_nvfp4_lanes16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return quantize_nvfp4_lanes8;
#endif
    return quantize_nvfp4_scalar;
}

/* Quantizes x (n) to out (n / 32) and returns the sums of squared errors and of squares. The largest magnitude of a
 * block becomes 127. */
static inline struct quantize_sums quantize_q8_0(const float *x, size_t n, struct block_q8_0 *out) {
    struct quantize_sums s = {0, 0};
    for (size_t b = 0; b < n / 32; b++, x += 32, out++) {
        float amax = 0.0f, error = 0.0f, power = 0.0f;
        for (int i = 0; i < 32; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        float d = amax / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
        uint16_t h = f16_from_f32(d);
        out->d[0] = (uint8_t)h;
        out->d[1] = (uint8_t)(h >> 8);
        for (int i = 0; i < 32; i++) {
            out->qs[i] = (int8_t)roundf(x[i] * inverse);
            float e = x[i] - (float)out->qs[i] * f16_to_f32(h);
            error += e * e;
            power += x[i] * x[i];
        }
        s.error += (double)error;
        s.power += (double)power;
    }
    return s;
}

/* Quantizes x (n) to out (n / 32), and returns the sums of squared errors and of squares. The scale of a block is the
 * power of two with the smaller error of two: the one with which the largest magnitude is in [4, 8), where 6 is the
 * largest code, and twice that. */
static inline struct quantize_sums quantize_mxfp4(const float *x, size_t n, struct block_mxfp4 *out) {
    struct quantize_sums s = {0, 0};
    for (size_t b = 0; b < n / 32; b++, x += 32, out++) {
        float amax = 0.0f, power = 0.0f, best = INFINITY;
        for (int i = 0; i < 32; i++) {
            amax = fmaxf(amax, fabsf(x[i]));
            power += x[i] * x[i];
        }
        int exponent = 0;
        frexpf(amax, &exponent); /* amax = [0.5, 1) 2^exponent */
        for (int k = 0; k < 2; k++) {
            const int e = exponent - 3 + k + 127, code = e < 0 ? 0 : e > 254 ? 254 : e;
            const float d = e8m0_to_f32((uint8_t)code);
            uint8_t qs[16] = {0};
            float error = 0.0f;
            for (int i = 0; i < 32; i++) {
                const float q = e2m1_round(fabsf(x[i]) / d), e2 = fabsf(x[i]) - q * d;
                qs[i % 16] |= (uint8_t)((e2m1_code(q) | (x[i] < 0.0f ? 8u : 0u)) << (i < 16 ? 0 : 4));
                error += e2 * e2;
            }
            if (!(error < best)) continue;
            best = error;
            out->e = (uint8_t)code;
            memcpy(out->qs, qs, sizeof qs);
        }
        s.error += (double)best;
        s.power += (double)power;
    }
    return s;
}

/* Quantizes x (n) to blocks of a type at `out`, and returns the sums of squared errors and of squares. r: how to
 * NVFP4. */
static inline struct quantize_sums quantize_blocks(enum gguf_type type, const float *x, size_t n,
                                                   const struct nvfp4_rule *r, void *out) {
    switch (type) {
    case GGUF_Q8_0: return quantize_q8_0(x, n, out);
    case GGUF_MXFP4: return quantize_mxfp4(x, n, out);
    case GGUF_NVFP4: return nvfp4_fastest()(x, n, r, out);
    case GGUF_FP8: /* keeps the codes of a source */
    case GGUF_FLOATS: break;
    }
    gguf_unexpected(__func__, type);
}

#endif
