/* gguf_nvfp4.h - the GGUF v3 container and the number formats of its tensors.
 *
 * Shared by moe.c, moe_cuda.cu, the converter, moe-reap and the tests. Every function is static inline and compiles as
 * C11 and C++17.
 *
 *   numbers    BF16, F16, E4M3, UE4M3, E8M0, E2M1: to and from F32
 *   formats    the table of the formats of weights
 *   blocks     NVFP4, MXFP4, Q8_0, FP8: decode, quantize, repack from the Hugging Face order
 *   reader     gguf_open (maps a file and its parts), gguf_open_header (also a header without data), gguf_parse and
 *              gguf_parse_header (the same of one image in memory), typed look-ups
 *   writer     gguf_put_*, gguf_add_tensor, gguf_header: the header in memory; the caller streams the tensor data
 *
 * The reader trusts nothing. Every count, length and offset is checked against the size of the file before it is used,
 * and every multiplication for overflow. An error is one line in `err` with the byte offset or the name; bytes of a
 * name that are not printable ASCII appear as '?'. Nothing is copied: strings and tensor data point into the image.
 *
 * The container: github.com/ggml-org/ggml, docs/gguf.md. The block types: ggml-common.h there.
 */
#ifndef GGUF_NVFP4_H
#define GGUF_NVFP4_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ============================================================================================================
 * Numbers
 *
 * Small float formats, bit by bit: X_to_f32 is exact, X_from_f32 rounds. S.E.M: bits of sign, exponent, mantissa.
 *
 *   BF16 1.8.7    F16 1.5.10    E4M3 1.4.3    UE4M3 0.4.3    E8M0 0.8.0    E2M1 1.2.1
 * ============================================================================================================ */

static inline float f32_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t f32_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float bf16_to_f32(uint16_t h) { return f32_from_bits((uint32_t)h << 16); }

/* Rounds to nearest, ties to even. NaN stays NaN. */
static inline uint16_t bf16_from_f32(float f) {
    uint32_t u = f32_to_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;
    if (exp == 31) return f32_from_bits(sign | 0x7f800000 | man << 13);
    if (exp) return f32_from_bits(sign | (exp + 112) << 23 | man << 13);
    float f = (float)man * 0x1p-24f;
    return sign ? -f : f;
}

/* Rounds to nearest, ties to even. Overflow gives infinity. */
static inline uint16_t f16_from_f32(float f) {
    uint32_t u = f32_to_bits(f), sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) { /* below 2^-14: adding 0.5 rounds to a multiple of 2^-24 */
        float r = f32_from_bits(u) + 0.5f;
        return (uint16_t)(sign | (f32_to_bits(r) - 0x3f000000));
    }
    u += 0xfff + ((u >> 13) & 1);
    return (uint16_t)(sign | ((u - 0x38000000) >> 13));
}

/* E4M3: bias 7, no infinities, 0x7f and 0xff are NaN, the largest number is 448. OCP 8-bit Floating Point, table 1. */
static inline float e4m3_to_f32(uint8_t b) {
    uint32_t exp = (b >> 3) & 15, man = b & 7;
    float f;
    if ((b & 0x7f) == 0x7f) return f32_from_bits(0x7fc00000);
    f = exp ? f32_from_bits((exp + 120) << 23 | man << 20) : (float)man * 0x1p-9f;
    return b & 0x80 ? -f : f;
}

/* Rounds to nearest, ties to even. Saturates at 448. NaN gives 0x7f, or 0xff if its sign bit is set. */
static inline uint8_t e4m3_from_f32(float f) {
    uint32_t u = f32_to_bits(f), sign = (u >> 24) & 0x80;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return (uint8_t)(sign | 0x7f);
    if (u >= 0x43e00000) return (uint8_t)(sign | 0x7e);
    if (u < 0x3c800000) { /* below 2^-6: adding 2^14 rounds to a multiple of 2^-9 */
        float r = f32_from_bits(u) + 16384.0f;
        return (uint8_t)(sign | (f32_to_bits(r) - 0x46800000));
    }
    u += 0x7ffff + ((u >> 20) & 1);
    return (uint8_t)(sign | ((u - 0x3c000000) >> 20));
}

/* UE4M3, the block scale of NVFP4 in GGUF, as ggml reads it: 0x7f is zero; in other codes bit 7 is ignored. */
static inline float ue4m3_to_f32(uint8_t b) {
    uint32_t exp = (b >> 3) & 15, man = b & 7;
    if (b == 0x7f) return 0.0f;
    return exp ? f32_from_bits((exp + 120) << 23 | man << 20) : (float)man * 0x1p-9f;
}

/* UE4M3 as ggml's reference quantizer writes it: ties round up, and everything from 256 on becomes 448. It only serves
 * nvfp4_encode_block_ref; the converter takes its scales from the source or from convert/quantize.h. */
static inline uint8_t ue4m3_from_f32(float f) {
    uint32_t u = f32_to_bits(f);
    if (!(f > 0.0f)) return 0;
    if (f >= 256.0f) return 0x7e;
    int exp = (int)(u >> 23) - 127 + 7;
    if (exp <= 0) {
        int m = (int)(f * 512.0f + 0.5f);
        return (uint8_t)(m > 7 ? 7 : m);
    }
    uint32_t man = (u >> 20) & 7;
    if (u & 0x80000) {
        if (++man == 8) {
            man = 0;
            exp++;
        }
    }
    return exp >= 15 ? 0x7e : (uint8_t)(exp << 3 | (int)man);
}

/* E8M0, the block scale of MXFP4: 2^(b-127). The standard's NaN, 0xff, is not treated specially, as in ggml. */
static inline float e8m0_to_f32(uint8_t b) { return b ? f32_from_bits((uint32_t)b << 23) : 0x1p-127f; }

/* Twice the value of each E2M1 code. These are small integers, so that products with int8 are exact. */
static const int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline float e2m1_to_f32(uint8_t code) {
    static const float value[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return value[code & 15];
}

/* ============================================================================================================
 * Blocks
 *
 * The tensor types of GGUF. A row of a quantized tensor is a sequence of blocks; a block holds a few weights and their
 * scales.
 * ============================================================================================================ */

/* NVFP4: 64 weights. Sub-block s (16 weights) has the scale d[s]. Byte qs[8*s+j] holds weight 16*s+j in its low nibble
 * and weight 16*s+j+8 in its high nibble. weight = E2M1(code) * UE4M3(d[s]) * scale2; scale2 is in the F32 tensor
 * NAME.scale. */
struct block_nvfp4 {
    uint8_t d[4];
    uint8_t qs[32];
};
static_assert(sizeof(struct block_nvfp4) == 36, "an NVFP4 block is 36 bytes");

/* MXFP4: 32 weights. Byte qs[j] holds weight j in its low nibble and weight j+16 in its high nibble. weight =
 * E2M1(code) * 2^(e-127). */
struct block_mxfp4 {
    uint8_t e;
    uint8_t qs[16];
};
static_assert(sizeof(struct block_mxfp4) == 17, "an MXFP4 block is 17 bytes");

/* Q8_0: 32 weights. weight = qs[j] * F16(d). */
struct block_q8_0 {
    uint8_t d[2]; /* F16, little-endian; bytes, because blocks are only 2-byte aligned */
    int8_t qs[32];
};
static_assert(sizeof(struct block_q8_0) == 34, "a Q8_0 block is 34 bytes");

/* FP8: 128 weights. weight = E4M3(qs[j]) * F32(d). ggml has no such type: it keeps the codes and the scales of releases in
 * FP8, one scale for 128 x 128 weights, for a row or for a matrix, in every row. */
enum { FP8_BLOCK = 128 };
struct block_fp8 {
    uint8_t d[4]; /* F32, little-endian */
    uint8_t qs[FP8_BLOCK];
};
static_assert(sizeof(struct block_fp8) == 132, "an FP8 block is 132 bytes");

/* Whether NAME.scale, a factor of each matrix, belongs to a format. */
enum gguf_factor {
    GGUF_FACTOR_NONE, /* nothing that quantizes to it writes one */
    GGUF_FACTOR_ANY,  /* a matrix has one if its source has */
    GGUF_FACTOR_OWN   /* every matrix has one: the scales of its blocks are relative to it */
};

/* The types of ggml in the order of their numbers in a file (enum ggml_type), and those of moe after them; an error can
 * name whatever type was found. An O has the bytes of a value; 0: the type is not supported. An X is a format of
 * weights. Whatever depends on the format is a column here, a switch over enum gguf_type without default, or stands
 * beside an assertion of GGUF_FORMAT_COUNT: the compiler names what a new row lacks.
 *   NAME, name   GGUF_NAME is the type, name_decode_row decodes it
 *   block        weights of a block; 1: the format is one of floats
 *   bytes        of a block
 *   file_type    number of a file that has most of its bytes in this format (llama_ftype)
 *   factor       enum gguf_factor without its GGUF_FACTOR_ */
/* clang-format off */
#define GGUF_TYPES(X, O)                                                                                    \
    /* NAME  name   block  bytes                       file_type  factor */                                 \
    X(F32,   f32,       1, 4,                                  0, ANY)                                      \
    X(F16,   f16,       1, 2,                                  1, ANY)                                      \
    O(Q4_0, 0) O(Q4_1, 0) O(Q4_2, 0) O(Q4_3, 0) O(Q5_0, 0) O(Q5_1, 0)                                       \
    X(Q8_0,  q8_0,     32, sizeof(struct block_q8_0),          7, ANY)                                      \
    O(Q8_1, 0) O(Q2_K, 0) O(Q3_K, 0) O(Q4_K, 0) O(Q5_K, 0) O(Q6_K, 0) O(Q8_K, 0) O(IQ2_XXS, 0) O(IQ2_XS, 0) \
    O(IQ3_XXS, 0) O(IQ1_S, 0) O(IQ4_NL, 0) O(IQ3_S, 0) O(IQ2_S, 0) O(IQ4_XS, 0)                             \
    O(I8, 1) O(I16, 2) O(I32, 4) O(I64, 8) O(F64, 8) O(IQ1_M, 0)                                            \
    X(BF16,  bf16,      1, 2,                                 32, ANY)                                      \
    O(Q4_0_4_4, 0) O(Q4_0_4_8, 0) O(Q4_0_8_8, 0) O(TQ1_0, 0) O(TQ2_0, 0)                                    \
    O(IQ4_NL_4_4, 0) O(IQ4_NL_4_8, 0) O(IQ4_NL_8_8, 0)                                                      \
    X(MXFP4, mxfp4,    32, sizeof(struct block_mxfp4),        38, NONE)                                     \
    X(NVFP4, nvfp4,    64, sizeof(struct block_nvfp4),        39, OWN)                                      \
    O(Q1_0, 0) O(Q2_0, 0)
/* of moe alone, from the number GGUF_OWN on */
#define GGUF_OWN_TYPES(X)                                                                                   \
    X(FP8,   fp8, FP8_BLOCK, sizeof(struct block_fp8),  GGUF_OWN, ANY)
/* clang-format on */

#define GGUF_NOTHING(...)
#define GGUF_FORMATS(X) GGUF_TYPES(X, GGUF_NOTHING) GGUF_OWN_TYPES(X)
#define GGUF_OTHERS(O)  GGUF_TYPES(GGUF_NOTHING, O)

#define GGUF_NUMBER(NAME, ...) GGUF_NUMBER_##NAME,
#define GGUF_MEMBER(NAME, ...) GGUF_##NAME = GGUF_NUMBER_##NAME,
#define GGUF_INDEX(NAME, ...)  GGUF_INDEX_##NAME,
enum { GGUF_TYPES(GGUF_NUMBER, GGUF_NUMBER) GGUF_TYPE_COUNT };
enum { GGUF_OWN = 65536, GGUF_BEFORE_OWN = GGUF_OWN - 1, GGUF_OWN_TYPES(GGUF_NUMBER) GGUF_OWN_END };
enum { GGUF_TYPE_SLOTS = GGUF_TYPE_COUNT + GGUF_OWN_END - GGUF_OWN }; /* of an array with a place for each type */
enum gguf_type { GGUF_FORMATS(GGUF_MEMBER) };
enum { GGUF_OTHERS(GGUF_MEMBER) };
enum { GGUF_FORMATS(GGUF_INDEX) GGUF_FORMAT_COUNT }; /* of gguf_formats */

static_assert(GGUF_Q8_0 == 8 && GGUF_BF16 == 30 && GGUF_NVFP4 == 40, "each type has the number that ggml gives it");
static_assert((int)GGUF_FP8 == (int)GGUF_OWN, "files have this number");

/* The labels of a switch for all formats of floats, for those whose blocks are integers with scales (E2M1 is half of
 * one), and for all formats of blocks. */
#define GGUF_FLOATS \
    GGUF_F32:       \
    case GGUF_F16:  \
    case GGUF_BF16
#define GGUF_INTEGERS \
    GGUF_Q8_0:        \
    case GGUF_MXFP4:  \
    case GGUF_NVFP4
#define GGUF_BLOCKS \
    GGUF_INTEGERS:  \
    case GGUF_FP8

/* What a type is called, and what a row of it takes. */
struct gguf_type_traits {
    const char *name;
    uint32_t block, bytes; /* elements and bytes of a block; 0: not supported here */
};

#define GGUF_FORMAT_TRAITS(NAME, name, block, bytes, ...) {#NAME, block, bytes},
#define GGUF_OTHER_TRAITS(NAME, bytes)                    {#NAME, (bytes) > 0, bytes},

/* Returns the traits of a type, of "unknown" if neither ggml nor moe has such a type. */
static inline struct gguf_type_traits gguf_type_info(uint32_t type) {
    static const struct gguf_type_traits t[] = {GGUF_TYPES(GGUF_FORMAT_TRAITS, GGUF_OTHER_TRAITS)};
    static const struct gguf_type_traits own[] = {GGUF_OWN_TYPES(GGUF_FORMAT_TRAITS)};
    static const struct gguf_type_traits unknown = {"unknown", 0, 0};
    if (type >= GGUF_OWN && type < GGUF_OWN_END) return own[type - GGUF_OWN];
    return type < GGUF_TYPE_COUNT ? t[type] : unknown;
}

/* Returns the place of a type in an array of GGUF_TYPE_SLOTS, and the type of a place. */
static inline uint32_t gguf_type_slot(uint32_t type) {
    return type < GGUF_OWN ? type : type - GGUF_OWN + GGUF_TYPE_COUNT;
}
static inline uint32_t gguf_slot_type(uint32_t slot) {
    return slot < GGUF_TYPE_COUNT ? slot : slot - GGUF_TYPE_COUNT + GGUF_OWN;
}

/* Ends the program: `where`, a function, was called with a type that it never gets. */
__attribute__((noreturn, cold)) static inline void gguf_unexpected(const char *where, uint32_t type) {
    fprintf(stderr, "internal error: %s: weights of the type %s (%u)\n", where, gguf_type_info(type).name, type);
    abort();
}

/* Returns the bytes of n elements, a multiple of the block; 0 for a type that is not supported. */
static inline size_t gguf_row_bytes(uint32_t type, size_t n) {
    struct gguf_type_traits t = gguf_type_info(type);
    return t.block ? n / t.block * t.bytes : 0;
}

/* out (64) = one NVFP4 block without scale2. The values are exact in BF16 and F32. */
static inline void nvfp4_decode_block(const struct block_nvfp4 *b, float *out) {
    for (int s = 0; s < 4; s++) {
        float d = ue4m3_to_f32(b->d[s]);
        for (int j = 0; j < 8; j++) {
            out[16 * s + j] = e2m1_to_f32(b->qs[8 * s + j] & 15) * d;
            out[16 * s + j + 8] = e2m1_to_f32(b->qs[8 * s + j] >> 4) * d;
        }
    }
}

/* Quantizes x (64) as ggml's reference does: scale amax / 6, no scale2, the lowest code of equals. Tests compare it
 * with ggml; convert/quantize.h has smaller errors. */
static inline void nvfp4_encode_block_ref(const float *x, struct block_nvfp4 *b) {
    for (int s = 0; s < 4; s++) {
        float amax = 0.0f;
        for (int j = 0; j < 16; j++) amax = fabsf(x[16 * s + j]) > amax ? fabsf(x[16 * s + j]) : amax;
        b->d[s] = ue4m3_from_f32(amax / 6.0f);
        float d = ue4m3_to_f32(b->d[s]);
        uint8_t code[16];
        for (int j = 0; j < 16; j++) {
            float best = INFINITY;
            code[j] = 0;
            for (uint8_t c = 0; c < 16; c++) {
                float e = fabsf(e2m1_to_f32(c) * d - x[16 * s + j]);
                if (e < best) {
                    best = e;
                    code[j] = c;
                }
            }
        }
        for (int j = 0; j < 8; j++) b->qs[8 * s + j] = (uint8_t)(code[j] | code[j + 8] << 4);
    }
}

/* Repacks 64 NVFP4 weights from the order of Hugging Face (ModelOpt, compressed-tensors) to a GGUF block, without loss.
 * packed (32): byte k holds weight 2k in its low and 2k+1 in its high nibble. scales (4): E4M3. The sign bit of a scale
 * is dropped; the caller checks that none is negative. */
static inline void nvfp4_repack_block(const uint8_t *packed, const uint8_t *scales, struct block_nvfp4 *b) {
    for (int s = 0; s < 4; s++) {
        const uint8_t *p = packed + 8 * s;
        b->d[s] = scales[s] & 0x7f;
        for (int j = 0; j < 8; j++) {
            uint8_t lo = (uint8_t)(p[j / 2] >> (j & 1) * 4 & 15), hi = (uint8_t)(p[j / 2 + 4] >> (j & 1) * 4 & 15);
            b->qs[8 * s + j] = (uint8_t)(lo | hi << 4);
        }
    }
}

/* out (32) = one MXFP4 block. */
static inline void mxfp4_decode_block(const struct block_mxfp4 *b, float *out) {
    float d = e8m0_to_f32(b->e);
    for (int j = 0; j < 16; j++) {
        out[j] = e2m1_to_f32(b->qs[j] & 15) * d;
        out[j + 16] = e2m1_to_f32(b->qs[j] >> 4) * d;
    }
}

/* out (32) = one Q8_0 block. */
static inline void q8_0_decode_block(const struct block_q8_0 *b, float *out) {
    float d = f16_to_f32((uint16_t)(b->d[0] | b->d[1] << 8));
    for (int j = 0; j < 32; j++) out[j] = (float)b->qs[j] * d;
}

/* out (FP8_BLOCK) = one FP8 block. */
static inline void fp8_decode_block(const struct block_fp8 *b, float *out) {
    float d;
    memcpy(&d, b->d, sizeof d);
    for (int j = 0; j < FP8_BLOCK; j++) out[j] = e4m3_to_f32(b->qs[j]) * d;
}

/* Decode a row of n weights, a multiple of the block, to F32 without the factor in NAME.scale. */
typedef void gguf_decode(const uint8_t *row, float *out, size_t n);

static inline void f32_decode_row(const uint8_t *row, float *out, size_t n) { memcpy(out, row, n * 4); }

static inline void f16_decode_row(const uint8_t *row, float *out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = f16_to_f32((uint16_t)(row[2 * i] | row[2 * i + 1] << 8));
}

static inline void bf16_decode_row(const uint8_t *row, float *out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = bf16_to_f32((uint16_t)(row[2 * i] | row[2 * i + 1] << 8));
}

static inline void q8_0_decode_row(const uint8_t *row, float *out, size_t n) {
    for (size_t i = 0; i < n / 32; i++) q8_0_decode_block((const struct block_q8_0 *)row + i, out + 32 * i);
}

static inline void mxfp4_decode_row(const uint8_t *row, float *out, size_t n) {
    for (size_t i = 0; i < n / 32; i++) mxfp4_decode_block((const struct block_mxfp4 *)row + i, out + 32 * i);
}

static inline void nvfp4_decode_row(const uint8_t *row, float *out, size_t n) {
    for (size_t i = 0; i < n / 64; i++) nvfp4_decode_block((const struct block_nvfp4 *)row + i, out + 64 * i);
}

static inline void fp8_decode_row(const uint8_t *row, float *out, size_t n) {
    for (size_t i = 0; i < n / FP8_BLOCK; i++) fp8_decode_block((const struct block_fp8 *)row + i, out + FP8_BLOCK * i);
}

/* A format of weights; gguf_type_info has its name and sizes. */
struct gguf_format {
    enum gguf_type type;
    gguf_decode *decode;
    uint32_t file_type;
    enum gguf_factor factor;
};

#define GGUF_FORMAT_ROW(NAME, name, block, bytes, file_type, factor) \
    {GGUF_##NAME, name##_decode_row, file_type, GGUF_FACTOR_##factor},
static const struct gguf_format gguf_formats[GGUF_FORMAT_COUNT] = {GGUF_FORMATS(GGUF_FORMAT_ROW)};

/* Returns the row of a type that a file names; NULL: it is not a type of weights. */
static inline const struct gguf_format *gguf_find_format(uint32_t type) {
#define GGUF_FOUND(NAME, ...) \
    case GGUF_##NAME: return &gguf_formats[GGUF_INDEX_##NAME];
    switch (type) {
        GGUF_FORMATS(GGUF_FOUND)
    default: return NULL;
    }
}

static inline const struct gguf_format *gguf_format(enum gguf_type type) {
    const struct gguf_format *f = gguf_find_format(type);
    if (!f) gguf_unexpected(__func__, type);
    return f;
}

/* Whether a type that a file names is one of weights in floats. */
static inline bool gguf_is_float(uint32_t type) {
    const struct gguf_format *f = gguf_find_format(type);
    if (!f) return false;
    switch (f->type) {
    case GGUF_FLOATS: return true;
    case GGUF_BLOCKS: return false;
    }
    return false;
}

/* out (n) = one row as F32, without the factor in NAME.scale. n is a multiple of the block. */
static inline void gguf_dequantize_row(enum gguf_type type, const void *row, float *out, size_t n) {
    gguf_format(type)->decode((const uint8_t *)row, out, n);
}

/* ============================================================================================================
 * Reader
 *
 * Maps GGUF files and makes tables of their metadata and tensors, sorted by name. A header is read through struct
 * gguf_cursor, which checks every length; after a successful open no pointer can leave the file.
 * ============================================================================================================ */

/* Types of metadata values, as numbered in the file. */
enum gguf_value {
    GGUF_V_U8,
    GGUF_V_I8,
    GGUF_V_U16,
    GGUF_V_I16,
    GGUF_V_U32,
    GGUF_V_I32,
    GGUF_V_F32,
    GGUF_V_BOOL,
    GGUF_V_STR,
    GGUF_V_ARR,
    GGUF_V_U64,
    GGUF_V_I64,
    GGUF_V_F64,
    GGUF_V_COUNT
};

enum {
    GGUF_MAX_KEY = 65535,
    GGUF_MAX_NAME = 255, /* bytes of a tensor name */
    GGUF_MAX_SHARDS = 9999,
    GGUF_DEFAULT_ALIGN = 32,
    GGUF_MAX_ALIGN = 65536
};

enum { MAX_LAYERS = 512, MAX_EXPERTS = 1024 /* per layer */ }; /* of a model, as in llama.cpp */

/* FNV-1a, 64 bits: the hash h after one more value. Begin with HASH_START. */
#define HASH_START 0xcbf29ce484222325u
static inline uint64_t hash_value(uint64_t h, uint64_t value) { return (h ^ value) * 0x100000001b3u; }

/* The hash h after n more bytes, each a value of its own. */
static inline uint64_t hash_bytes(uint64_t h, const void *p, size_t n) {
    for (size_t i = 0; i < n; i++) h = hash_value(h, ((const uint8_t *)p)[i]);
    return h;
}

/* A string in the image: n bytes of any content, not NUL-terminated. */
struct gguf_str {
    const char *p;
    size_t n;
};

/* One entry of the metadata. */
struct gguf_kv {
    struct gguf_str key;
    uint32_t type; /* enum gguf_value; for an array the type of its elements */
    bool is_array;
    uint64_t n;          /* elements; 1 for a scalar */
    const uint8_t *data; /* little-endian, unaligned; a string is a u64 length and its bytes */
};

struct gguf_tensor {
    struct gguf_str name;
    uint32_t type; /* number of a type that gguf_type_info supports */
    uint32_t n_dims;
    uint64_t ne[4]; /* sizes, the contiguous one first; unused ones are 1 */
    uint64_t bytes; /* of the data */
    const uint8_t *data;
    uint32_t shard; /* index of the image that holds the data */
};

struct gguf_image {
    const uint8_t *base; /* a mapping, or the caller's memory when !mapped */
    size_t size;
    bool mapped;
    int fd; /* the mapped file, open for reading; 0: there is none */
};

/* An open file with all its parts. Invariants: every pointer lies inside an image; kv_order and tensor_order sort kv
 * and tensors by name; no name occurs twice. kv is the metadata of the first part. */
struct gguf {
    struct gguf_image *images;
    uint32_t n_images;
    struct gguf_kv *kv;
    uint32_t *kv_order;
    uint32_t n_kv;
    struct gguf_tensor *tensors;
    uint32_t *tensor_order;
    uint32_t n_tensors;
    bool header_only; /* the file ends before its data, and all data read as zeros (gguf_open_header) */
};

static inline bool gguf_str_eq(struct gguf_str s, const char *z) {
    size_t n = strlen(z);
    return s.n == n && !memcmp(s.p, z, n);
}

static inline int gguf_str_cmp(struct gguf_str a, struct gguf_str b) {
    size_t n = a.n < b.n ? a.n : b.n;
    int c = n ? memcmp(a.p, b.p, n) : 0;
    return c ? c : (a.n > b.n) - (a.n < b.n);
}

/* Copies at most cap-1 bytes of a string for a message, with '?' for everything but printable ASCII. Returns out, which
 * may be the string's own memory. */
static inline const char *gguf_printable(struct gguf_str s, char *out, size_t cap) {
    size_t n = s.n < cap - 1 ? s.n : cap - 1;
    for (size_t i = 0; i < n; i++) out[i] = s.p[i] >= 32 && s.p[i] < 127 ? s.p[i] : '?';
    out[n] = 0;
    return out;
}

static inline uint32_t gguf_rd32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t gguf_rd64(const uint8_t *p) { return gguf_rd32(p) | (uint64_t)gguf_rd32(p + 4) << 32; }

/* Reads an image from front to back. After the first error all reads return zeros, and `err` keeps the first
 * message. */
struct gguf_cursor {
    const uint8_t *base;
    size_t size, pos;
    bool failed;
    char *err;
    size_t errlen;
};

/* Records an error with the byte offset, unless there has been one. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline void
gguf_fail(struct gguf_cursor *c, const char *fmt, ...) {
    if (c->failed) return;
    c->failed = true;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(c->err, c->errlen, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < c->errlen) snprintf(c->err + n, c->errlen - (size_t)n, ", at byte %zu", c->pos);
}

/* Returns the next n bytes, or NULL after an error. what: their name in the message, also in the functions below. */
static inline const uint8_t *gguf_take(struct gguf_cursor *c, uint64_t n, const char *what) {
    if (!c->failed && n > c->size - c->pos)
        gguf_fail(c, "file ends inside %s (%llu bytes wanted, %zu left)", what, (unsigned long long)n,
                  c->size - c->pos);
    if (c->failed) return NULL;
    const uint8_t *p = c->base + c->pos;
    c->pos += (size_t)n;
    return p;
}

static inline uint32_t gguf_take32(struct gguf_cursor *c, const char *what) {
    const uint8_t *p = gguf_take(c, 4, what);
    return p ? gguf_rd32(p) : 0;
}

static inline uint64_t gguf_take64(struct gguf_cursor *c, const char *what) {
    const uint8_t *p = gguf_take(c, 8, what);
    return p ? gguf_rd64(p) : 0;
}

/* Returns the next string of at most `max` bytes; "" after an error. */
static inline struct gguf_str gguf_take_str(struct gguf_cursor *c, uint64_t max, const char *what) {
    struct gguf_str s = {"", 0};
    uint64_t n = gguf_take64(c, what);
    if (n > max) gguf_fail(c, "length %llu of %s is above %llu", (unsigned long long)n, what, (unsigned long long)max);
    const uint8_t *p = gguf_take(c, n, what);
    if (p) {
        s.p = (const char *)p;
        s.n = (size_t)n;
    }
    return s;
}

/* Returns the bytes of a value; 0 for strings and arrays. */
static inline uint32_t gguf_value_bytes(uint32_t type) {
    static const uint8_t bytes[GGUF_V_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < GGUF_V_COUNT ? bytes[type] : 0;
}

/* Reads a value and its type into kv, whose key is set. */
static inline void gguf_take_value(struct gguf_cursor *c, struct gguf_kv *kv) {
    char key[64];
    gguf_printable(kv->key, key, sizeof key);
    kv->type = gguf_take32(c, "a value type");
    kv->n = 1;
    if (kv->type == GGUF_V_ARR) {
        kv->is_array = true;
        kv->type = gguf_take32(c, "an array's element type");
        kv->n = gguf_take64(c, "an array's length");
        if (kv->type == GGUF_V_ARR) gguf_fail(c, "key '%s' is an array of arrays", key);
    }
    if (c->failed) return;
    if (kv->type >= GGUF_V_COUNT) {
        gguf_fail(c, "key '%s' has the unknown value type %u", key, kv->type);
        return;
    }
    kv->data = c->base + c->pos;
    uint32_t w = gguf_value_bytes(kv->type);
    if (w) {
        if (kv->n > (c->size - c->pos) / w) {
            gguf_fail(c, "key '%s' has %llu elements of %u bytes, more than the file holds", key,
                      (unsigned long long)kv->n, w);
            return;
        }
        gguf_take(c, kv->n * w, "an array");
        if (kv->type == GGUF_V_BOOL)
            for (uint64_t i = 0; i < kv->n; i++)
                if (kv->data[i] > 1) {
                    gguf_fail(c, "key '%s' has the boolean %u", key, kv->data[i]);
                    return;
                }
    } else {
        for (uint64_t i = 0; i < kv->n && !c->failed; i++) gguf_take_str(c, UINT64_MAX, key);
    }
}

/* Writes the names of all formats of weights, such as "F32, F16 or BF16". Returns out. */
static inline const char *gguf_format_names(char *out, size_t cap) {
    size_t n = 0;
    for (int i = 0; i < GGUF_FORMAT_COUNT && n < cap; i++) {
        const char *before = !i ? "" : i + 1 < GGUF_FORMAT_COUNT ? ", " : " or ";
        n += (size_t)snprintf(out + n, cap - n, "%s%s", before, gguf_type_info(gguf_formats[i].type).name);
    }
    return out;
}

/* Reads one entry of the tensor table. t->bytes is the offset of the data until gguf_place_tensors. */
static inline void gguf_take_tensor(struct gguf_cursor *c, struct gguf_tensor *t) {
    char name[64], formats[128];
    t->name = gguf_take_str(c, GGUF_MAX_NAME, "a tensor name");
    gguf_printable(t->name, name, sizeof name);
    if (!c->failed && !t->name.n) gguf_fail(c, "a tensor without a name");
    t->n_dims = gguf_take32(c, "a tensor's dimensions");
    if (!c->failed && (t->n_dims < 1 || t->n_dims > 4))
        gguf_fail(c, "tensor '%s' has %u dimensions, not 1 to 4", name, t->n_dims);
    uint64_t n = 1;
    for (uint32_t d = 0; d < 4; d++) {
        t->ne[d] = d < t->n_dims && !c->failed ? gguf_take64(c, "a tensor's shape") : 1;
        if (c->failed) return;
        if (!t->ne[d] || t->ne[d] > INT64_MAX / n) {
            gguf_fail(c, "tensor '%s': dimension %u is %llu (zero, or the element count overflows)", name, d,
                      (unsigned long long)t->ne[d]);
            return;
        }
        n *= t->ne[d];
    }
    t->type = gguf_take32(c, "a tensor's type");
    t->bytes = gguf_take64(c, "a tensor's offset");
    if (c->failed) return;
    struct gguf_type_traits ti = gguf_type_info(t->type);
    if (!ti.block)
        gguf_fail(c, "tensor '%s' has the type %s (%u), expected %s; moe-convert makes those of the original release",
                  name, ti.name, t->type, gguf_format_names(formats, sizeof formats));
    else if (t->ne[0] % ti.block)
        gguf_fail(c, "tensor '%s': rows of %llu elements are not whole %s blocks of %u", name,
                  (unsigned long long)t->ne[0], ti.name, ti.block);
    else if (n / ti.block > INT64_MAX / ti.bytes) gguf_fail(c, "tensor '%s': its size overflows", name);
}

/* qsort: by the place of the data. */
static inline int gguf_cmp_offset(const void *a, const void *b) {
    const struct gguf_tensor *x = *(const struct gguf_tensor *const *)a, *y = *(const struct gguf_tensor *const *)b;
    return (x->data > y->data) - (x->data < y->data);
}

/* Returns the bytes that the whole file would have, given its tensors t (n) and the start of its data section.
 * t[i].bytes are still offsets from `start`. */
static inline uint64_t gguf_whole_bytes(struct gguf_cursor *c, const struct gguf_tensor *t, uint32_t n, size_t start,
                                        uint32_t align) {
    const uint64_t most = (uint64_t)1 << 46; /* half of what a process can address on x86-64 */
    uint64_t end = start;
    char name[64];
    for (uint32_t i = 0; i < n && !c->failed; i++) {
        uint64_t off = t[i].bytes, bytes = gguf_row_bytes(t[i].type, t[i].ne[0] * t[i].ne[1] * t[i].ne[2] * t[i].ne[3]);
        if (off > most - start || bytes > most - start - off)
            gguf_fail(c, "tensor '%s': data of %llu bytes at offset %llu end beyond %llu bytes",
                      gguf_printable(t[i].name, name, sizeof name), (unsigned long long)bytes, (unsigned long long)off,
                      (unsigned long long)most);
        else if (start + off + bytes > end) end = start + off + bytes;
    }
    return (end + align - 1) / align * align;
}

/* Turns the offsets of the tensors t (n) into pointers. Their data must lie inside the data section and must not
 * overlap. A file that ends before its data section is an error; *whole, unless NULL, is then set to the bytes that it
 * would have. */
static inline void gguf_place_tensors(struct gguf_cursor *c, struct gguf_tensor *t, uint32_t n, uint32_t align,
                                      uint64_t *whole) {
    char name[64], other[64];
    size_t start = (c->pos + align - 1) / align * align;
    if (c->size <= start) {
        uint64_t bytes = whole ? gguf_whole_bytes(c, t, n, start, align) : 0;
        if (c->failed) return;
        if (whole) *whole = bytes;
        snprintf(c->err, c->errlen, "the file holds only a header: use it with --plan, or convert the model");
        c->failed = true;
        return;
    }
    const struct gguf_tensor **by = (const struct gguf_tensor **)malloc((n + 1) * sizeof *by);
    if (!by) {
        gguf_fail(c, "out of memory for %u tensors", n);
        return;
    }
    for (uint32_t i = 0; i < n && !c->failed; i++) {
        uint64_t off = t[i].bytes, count = t[i].ne[0] * t[i].ne[1] * t[i].ne[2] * t[i].ne[3];
        gguf_printable(t[i].name, name, sizeof name);
        t[i].bytes = gguf_row_bytes(t[i].type, count);
        if (off % align)
            gguf_fail(c, "tensor '%s': offset %llu is not a multiple of %u", name, (unsigned long long)off, align);
        else if (off > c->size - start || t[i].bytes > c->size - start - off)
            gguf_fail(c,
                      "tensor '%s': data of %llu bytes at offset %llu end beyond the file of %zu bytes: is the "
                      "download complete?",
                      name, (unsigned long long)t[i].bytes, (unsigned long long)off, c->size);
        else t[i].data = c->base + start + off;
        by[i] = &t[i];
    }
    if (!c->failed) qsort(by, n, sizeof *by, gguf_cmp_offset);
    for (uint32_t i = 1; i < n && !c->failed; i++)
        if (by[i - 1]->data + by[i - 1]->bytes > by[i]->data)
            gguf_fail(c, "tensors '%s' and '%s' overlap", gguf_printable(by[i - 1]->name, name, sizeof name),
                      gguf_printable(by[i]->name, other, sizeof other));
    free(by);
}

/* Unmaps all images, frees the tables and clears g. */
static inline void gguf_close(struct gguf *g) {
    for (uint32_t i = 0; i < g->n_images; i++) {
        if (g->images[i].mapped) munmap((void *)(uintptr_t)g->images[i].base, g->images[i].size);
        if (g->images[i].fd) close(g->images[i].fd);
    }
    free(g->images);
    free(g->kv);
    free(g->kv_order);
    free(g->tensors);
    free(g->tensor_order);
    memset(g, 0, sizeof *g);
}

/* ============================================================================================================
 * Reader: files and look-ups
 *
 * Maps a file and its parts, and finds keys and tensors by name.
 * ============================================================================================================ */

struct gguf_sort_item {
    struct gguf_str name;
    uint32_t index;
};

static inline int gguf_cmp_item(const void *a, const void *b) {
    return gguf_str_cmp(((const struct gguf_sort_item *)a)->name, ((const struct gguf_sort_item *)b)->name);
}

/* Returns the indices of n records of `stride` bytes, sorted by their name, which is their first member. NULL with a
 * message if a name occurs twice. what: "key" or "tensor". */
static inline uint32_t *gguf_sorted(const void *records, size_t stride, uint32_t n, const char *what, char *err,
                                    size_t errlen) {
    struct gguf_sort_item *it = (struct gguf_sort_item *)malloc((n + 1) * sizeof *it);
    uint32_t *order = (uint32_t *)malloc((n + 1) * sizeof *order);
    if (!it || !order) {
        snprintf(err, errlen, "out of memory for %u names", n);
        free(it);
        free(order);
        return NULL;
    }
    for (uint32_t i = 0; i < n; i++) {
        memcpy(&it[i].name, (const char *)records + i * stride, sizeof it[i].name);
        it[i].index = i;
    }
    qsort(it, n, sizeof *it, gguf_cmp_item);
    for (uint32_t i = 0; i < n; i++) {
        if (i && !gguf_str_cmp(it[i - 1].name, it[i].name)) {
            char name[64];
            snprintf(err, errlen, "%s '%s' occurs twice", what, gguf_printable(it[i].name, name, sizeof name));
            free(it);
            free(order);
            return NULL;
        }
        order[i] = it[i].index;
    }
    free(it);
    return order;
}

/* Returns the index of the record called `name`, or -1. order (n): as gguf_sorted returned it. */
static inline int64_t gguf_lookup(const void *records, size_t stride, const uint32_t *order, uint32_t n,
                                  const char *name) {
    struct gguf_str want = {name, strlen(name)}, s;
    uint32_t lo = 0, hi = n;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        memcpy(&s, (const char *)records + order[mid] * stride, sizeof s);
        int c = gguf_str_cmp(s, want);
        if (!c) return order[mid];
        if (c < 0) lo = mid + 1;
        else hi = mid;
    }
    return -1;
}

/* Whether these are the bytes of a Git LFS pointer, which stands for a file that was not fetched. */
static inline bool is_lfs_pointer(const void *p, size_t size) {
    static const char head[] = "version https://git-lfs.github.com/spec/";
    return size >= sizeof head - 1 && !memcmp(p, head, sizeof head - 1);
}

/* Appends the tensors of one image to g, and the metadata if it is the first. whole: see gguf_place_tensors. Returns 0,
 * or -1 with a message. */
static inline int gguf_parse_image(struct gguf *g, const void *base, size_t size, uint64_t *whole, char *err,
                                   size_t errlen) {
    struct gguf_cursor c = {(const uint8_t *)base, size, 0, false, err, errlen};
    const uint8_t *magic = gguf_take(&c, 4, "the magic");
    if (magic && memcmp(magic, "GGUF", 4)) {
        if (is_lfs_pointer(base, size)) snprintf(err, errlen, "this is a Git LFS pointer: run git lfs pull");
        else
            snprintf(err, errlen, "not a GGUF file (starts with %02x %02x %02x %02x)", magic[0], magic[1], magic[2],
                     magic[3]);
        return -1;
    }
    uint32_t version = gguf_take32(&c, "the version");
    if (!c.failed && !(version & 0xffff)) gguf_fail(&c, "big-endian GGUF is not supported");
    if (!c.failed && version != 2 && version != 3) gguf_fail(&c, "GGUF version %u is not 2 or 3", version);
    uint64_t n_tensors = gguf_take64(&c, "the tensor count"), n_kv = gguf_take64(&c, "the metadata count");
    /* A tensor entry takes at least 33 bytes, a metadata entry 14: larger counts cannot be true. */
    if (!c.failed && n_tensors > (size - c.pos) / 33 + 1)
        gguf_fail(&c, "%llu tensors do not fit a file of %zu bytes", (unsigned long long)n_tensors, size);
    if (!c.failed && n_kv > (size - c.pos) / 14 + 1)
        gguf_fail(&c, "%llu metadata entries do not fit a file of %zu bytes", (unsigned long long)n_kv, size);
    if (c.failed) return -1;
    if (n_tensors > UINT32_MAX / 2 - g->n_tensors || n_kv > UINT32_MAX / 2) {
        gguf_fail(&c, "%llu tensors and %llu metadata entries are too many", (unsigned long long)n_tensors,
                  (unsigned long long)n_kv);
        return -1;
    }
    struct gguf_kv *kv = (struct gguf_kv *)calloc(n_kv + 1, sizeof *kv);
    struct gguf_tensor *all = (struct gguf_tensor *)realloc(g->tensors, (g->n_tensors + n_tensors + 1) * sizeof *all);
    if (all) g->tensors = all;
    if (!kv || !all) gguf_fail(&c, "out of memory for the file's tables");
    uint32_t align = GGUF_DEFAULT_ALIGN;
    for (uint64_t i = 0; i < n_kv && !c.failed; i++) {
        kv[i].key = gguf_take_str(&c, GGUF_MAX_KEY, "a key");
        if (!c.failed && !kv[i].key.n) gguf_fail(&c, "an empty key");
        gguf_take_value(&c, &kv[i]);
        if (c.failed || !gguf_str_eq(kv[i].key, "general.alignment")) continue;
        if (kv[i].is_array || kv[i].type != GGUF_V_U32) gguf_fail(&c, "general.alignment is not a u32");
        else align = gguf_rd32(kv[i].data);
        if (!c.failed && (!align || align & (align - 1) || align > GGUF_MAX_ALIGN))
            gguf_fail(&c, "general.alignment %u is not a power of two up to %d", align, GGUF_MAX_ALIGN);
    }
    struct gguf_tensor *t = c.failed ? NULL : all + g->n_tensors;
    for (uint64_t i = 0; i < n_tensors && !c.failed; i++) {
        memset(&t[i], 0, sizeof t[i]);
        t[i].shard = g->n_images ? g->n_images - 1 : 0; /* gguf_map has already counted this image */
        gguf_take_tensor(&c, &t[i]);
    }
    if (!c.failed && n_tensors) gguf_place_tensors(&c, t, (uint32_t)n_tensors, align, whole);
    if (c.failed) {
        free(kv);
        return -1;
    }
    g->n_tensors += (uint32_t)n_tensors;
    if (g->kv) {
        free(kv);
    } else {
        g->kv = kv;
        g->n_kv = (uint32_t)n_kv;
        g->kv_order = gguf_sorted(kv, sizeof *kv, g->n_kv, "key", err, errlen);
        if (!g->kv_order) return -1;
    }
    return 0;
}

/* Sorts the tensors of all images. Returns 0, or -1 with a message. */
static inline int gguf_index_tensors(struct gguf *g, char *err, size_t errlen) {
    g->tensor_order = gguf_sorted(g->tensors, sizeof *g->tensors, g->n_tensors, "tensor", err, errlen);
    return g->tensor_order ? 0 : -1;
}

/* Opens the image of one file in the caller's memory, which must outlive g. Returns 0, or -1 with a message; g is then
 * empty. */
static inline int gguf_parse(struct gguf *g, const void *base, size_t size, char *err, size_t errlen) {
    memset(g, 0, sizeof *g);
    if (gguf_parse_image(g, base, size, NULL, err, errlen) || gguf_index_tensors(g, err, errlen)) {
        gguf_close(g);
        return -1;
    }
    return 0;
}

/* Returns the metadata entry of a key, or NULL. */
static inline const struct gguf_kv *gguf_find(const struct gguf *g, const char *key) {
    int64_t i = gguf_lookup(g->kv, sizeof *g->kv, g->kv_order, g->n_kv, key);
    return i < 0 ? NULL : &g->kv[i];
}

/* Returns a tensor by its name, or NULL. */
static inline const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, const char *name) {
    int64_t i = gguf_lookup(g->tensors, sizeof *g->tensors, g->tensor_order, g->n_tensors, name);
    return i < 0 ? NULL : &g->tensors[i];
}

/* *out = element i of an integer or boolean value. False if it is of another type or does not fit. */
static inline bool gguf_elem_int(const struct gguf_kv *kv, uint64_t i, int64_t *out) {
    if (i >= kv->n) return false;
    uint32_t w = gguf_value_bytes(kv->type);
    const uint8_t *p = kv->data + i * w;
    switch (kv->type) {
    case GGUF_V_U8:
    case GGUF_V_BOOL: *out = p[0]; return true;
    case GGUF_V_I8: *out = (int8_t)p[0]; return true;
    case GGUF_V_U16: *out = p[0] | p[1] << 8; return true;
    case GGUF_V_I16: *out = (int16_t)(p[0] | p[1] << 8); return true;
    case GGUF_V_U32: *out = gguf_rd32(p); return true;
    case GGUF_V_I32: *out = (int32_t)gguf_rd32(p); return true;
    case GGUF_V_U64:
    case GGUF_V_I64: *out = (int64_t)gguf_rd64(p); return kv->type == GGUF_V_I64 || *out >= 0;
    default: return false;
    }
}

/* *out = element i of a float or integer value. False if it is of another type. */
static inline bool gguf_elem_f64(const struct gguf_kv *kv, uint64_t i, double *out) {
    int64_t v;
    if (i >= kv->n) return false;
    if (kv->type == GGUF_V_F32) {
        *out = f32_from_bits(gguf_rd32(kv->data + 4 * i));
        return true;
    }
    if (kv->type == GGUF_V_F64) {
        uint64_t u = gguf_rd64(kv->data + 8 * i);
        memcpy(out, &u, 8);
        return true;
    }
    if (kv->type == GGUF_V_BOOL || !gguf_elem_int(kv, i, &v)) return false;
    *out = (double)v;
    return true;
}

/* Returns the next string of a string value or array and advances *p, which starts at kv->data. Call at most kv->n
 * times. */
static inline struct gguf_str gguf_next_str(const uint8_t **p) {
    struct gguf_str s = {(const char *)*p + 8, (size_t)gguf_rd64(*p)};
    *p += 8 + s.n;
    return s;
}

/* *out = the string of a key. False if the key is missing or not a single string. */
static inline bool gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv || kv->is_array || kv->type != GGUF_V_STR) return false;
    const uint8_t *p = kv->data;
    *out = gguf_next_str(&p);
    return true;
}

/* Splits "PREFIX-00002-of-00005.gguf" into prefix, *no and *count. False if the name does not end so. */
static inline bool gguf_split_name(const char *path, char *prefix, size_t cap, unsigned *no, unsigned *count) {
    size_t n = strlen(path);
    unsigned a, b;
    if (n < 20 || n - 20 >= cap || sscanf(path + n - 20, "-%5u-of-%5u.gguf", &a, &b) != 2) return false;
    char tail[32];
    snprintf(tail, sizeof tail, "-%05u-of-%05u.gguf", a % 100000, b % 100000);
    if (strcmp(tail, path + n - 20)) return false;
    memcpy(prefix, path, n - 20);
    prefix[n - 20] = 0;
    *no = a;
    *count = b;
    return true;
}

/* Replaces the image of a header by one of the whole file, `whole` bytes, in which all data are zeros. The zeros cost
 * addresses but no memory. Only the pages of the header are writable, so that the kernel commits memory for those
 * alone, whatever its overcommit setting. Returns 0, or -1 with a message. */
static inline int gguf_map_zeros(struct gguf *g, uint64_t whole, char *err, size_t errlen) {
    struct gguf_image *im = &g->images[0];
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = whole > SIZE_MAX ? MAP_FAILED : mmap(NULL, (size_t)whole, PROT_READ, flags, -1, 0);
    if (p != MAP_FAILED && mprotect(p, im->size, PROT_READ | PROT_WRITE)) {
        munmap(p, (size_t)whole);
        p = MAP_FAILED;
    }
    if (p == MAP_FAILED) {
        snprintf(err, errlen, "cannot map %llu bytes of zeros: %s", (unsigned long long)whole, strerror(errno));
        return -1;
    }
    memcpy(p, im->base, im->size);
    if (im->mapped) munmap((void *)(uintptr_t)im->base, im->size);
    if (im->fd) close(im->fd);
    im->base = (const uint8_t *)p;
    im->size = (size_t)whole;
    im->mapped = true;
    im->fd = 0;
    g->header_only = true;
    return gguf_parse_image(g, p, im->size, NULL, err, errlen);
}

/* Maps one file and appends its contents to g. header_of: 0: the file must have its data; else the number of parts of
 * the model, and a single part may be a header without data. Returns 0, or -1 with a message. */
static inline int gguf_map(struct gguf *g, const char *path, unsigned header_of, char *err, size_t errlen) {
    struct stat st;
    uint64_t whole = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused below, not waited for */
    if (!fd) {                                              /* not stdin's number, which means none */
        fd = fcntl(0, F_DUPFD_CLOEXEC, 1);
        close(0);
    }
    if (fd < 0) {
        snprintf(err, errlen, "cannot open: %s", strerror(errno));
        return -1;
    }
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size <= 0) {
        snprintf(err, errlen, "%s", S_ISREG(st.st_mode) ? "the file is empty" : "not a regular file");
        close(fd);
        return -1;
    }
    void *p =
        (uint64_t)st.st_size > SIZE_MAX ? MAP_FAILED : mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        snprintf(err, errlen, "cannot map %lld bytes: %s", (long long)st.st_size, strerror(errno));
        close(fd);
        return -1;
    }
    struct gguf_image *im = (struct gguf_image *)realloc(g->images, (g->n_images + 1) * sizeof *im);
    if (!im) {
        munmap(p, (size_t)st.st_size);
        close(fd);
        snprintf(err, errlen, "out of memory");
        return -1;
    }
    g->images = im;
    im[g->n_images].base = (const uint8_t *)p;
    im[g->n_images].size = (size_t)st.st_size;
    im[g->n_images].mapped = true;
    im[g->n_images].fd = fd;
    if (!gguf_parse_image(g, im[g->n_images++].base, (size_t)st.st_size, header_of ? &whole : NULL, err, errlen))
        return 0;
    if (whole && header_of == 1) return gguf_map_zeros(g, whole, err, errlen);
    if (whole) snprintf(err, errlen, "one of %u parts, and it holds only a header", header_of);
    return -1;
}

/* Opens a file with all its parts. header: a header without data is accepted. Returns 0, or -1 with a message; g is
 * then empty. */
static inline int gguf_open_as(struct gguf *g, const char *path, bool header, char *err, size_t errlen) {
    char prefix[4096], part[4096 + 32], why[512];
    unsigned no = 1, count = 1;
    const struct gguf_kv *kv;
    int64_t v;
    memset(g, 0, sizeof *g);
    bool split = gguf_split_name(path, prefix, sizeof prefix, &no, &count);
    if (split && (!no || no > count || count > GGUF_MAX_SHARDS)) {
        snprintf(err, errlen, "'%.200s': part %u of %u does not exist", path, no, count);
        return -1;
    }
    for (unsigned i = 0; i < count; i++) {
        if (split) snprintf(part, sizeof part, "%s-%05u-of-%05u.gguf", prefix, i + 1, count);
        else snprintf(part, sizeof part, "%s", path);
        if (gguf_map(g, part, header ? count : 0, why, sizeof why)) {
            snprintf(err, errlen, "'%.200s': %.250s", part, why);
            gguf_close(g);
            return -1;
        }
        if (!i && (kv = gguf_find(g, "split.count")) && gguf_elem_int(kv, 0, &v) && v != (int64_t)count && v > 1) {
            snprintf(err, errlen, "'%.200s': split.count is %lld, the name says %u part%s", part, (long long)v, count,
                     count > 1 ? "s" : "");
            gguf_close(g);
            return -1;
        }
    }
    if ((kv = gguf_find(g, "split.tensors.count")) && gguf_elem_int(kv, 0, &v) && v != (int64_t)g->n_tensors)
        snprintf(why, sizeof why, "split.tensors.count is %lld, the parts hold %u", (long long)v, g->n_tensors);
    else if (!gguf_index_tensors(g, why, sizeof why)) return 0;
    snprintf(err, errlen, "'%.200s': %.250s", path, why);
    gguf_close(g);
    return -1;
}

/* Maps a file read-only. If its name ends in "-0000K-of-0000N.gguf", maps all N parts; the metadata are those of the
 * first. Returns 0, or -1 with a message that names the part; g is then empty. */
static inline int gguf_open(struct gguf *g, const char *path, char *err, size_t errlen) {
    return gguf_open_as(g, path, false, err, errlen);
}

/* Like gguf_open, but also accepts a header without data, as moe-convert --dry-run -o writes it: one file that ends
 * between its tensor table and its data section. Sizes and pointers are those of the whole file, and header_only is
 * set. */
static inline int gguf_open_header(struct gguf *g, const char *path, char *err, size_t errlen) {
    return gguf_open_as(g, path, true, err, errlen);
}

/* The same of a header in the caller's memory, which must outlive g if there are no tensors. */
static inline int gguf_parse_header(struct gguf *g, const void *base, size_t size, char *err, size_t errlen) {
    uint64_t whole = 0;
    memset(g, 0, sizeof *g);
    g->images = (struct gguf_image *)calloc(1, sizeof *g->images);
    if (!g->images) {
        snprintf(err, errlen, "out of memory");
        return -1;
    }
    g->images[0].base = (const uint8_t *)base;
    g->images[0].size = size;
    g->n_images = 1;
    int rc = gguf_parse_image(g, base, size, &whole, err, errlen);
    if (rc && whole) rc = gguf_map_zeros(g, whole, err, errlen);
    if (!rc && !gguf_index_tensors(g, err, errlen)) return 0;
    gguf_close(g);
    return -1;
}

/* ============================================================================================================
 * Writer
 *
 * Collects a header in memory: gguf_put_* add metadata, gguf_add_tensor adds tensors, gguf_header returns the bytes.
 * The caller writes them and then the data of the tensors in the same order, each padded to the alignment (gguf_pad).
 * ============================================================================================================ */

/* A header in the making. When memory runs out `failed` is set, and gguf_header returns NULL. */
struct gguf_writer {
    uint8_t *kv, *info; /* the metadata, the tensor table */
    size_t kv_len, kv_cap, info_len, info_cap;
    uint64_t n_kv, n_tensors, data_bytes; /* data_bytes: of all tensors, padded */
    bool failed;
};

/* Appends n bytes to a growing buffer. */
static inline void gguf_append(struct gguf_writer *w, uint8_t **buf, size_t *len, size_t *cap, const void *p,
                               size_t n) {
    if (w->failed) return;
    if (n > *cap - *len) {
        size_t want = (*cap + n) * 2;
        uint8_t *q = want < n ? NULL : (uint8_t *)realloc(*buf, want);
        if (!q) {
            w->failed = true;
            return;
        }
        *buf = q;
        *cap = want;
    }
    if (n) memcpy(*buf + *len, p, n);
    *len += n;
}

/* Appends n bytes of metadata as they are in memory: file and hosts are little-endian. */
static inline void gguf_put(struct gguf_writer *w, const void *p, size_t n) {
    gguf_append(w, &w->kv, &w->kv_len, &w->kv_cap, p, n);
}

static inline void gguf_put_u32_raw(struct gguf_writer *w, uint32_t v) { gguf_put(w, &v, 4); }
static inline void gguf_put_u64_raw(struct gguf_writer *w, uint64_t v) { gguf_put(w, &v, 8); }

/* Appends a string: its length and its bytes. */
static inline void gguf_put_bytes(struct gguf_writer *w, const char *p, size_t n) {
    gguf_put_u64_raw(w, n);
    gguf_put(w, p, n);
}

/* Begins a metadata entry; its value follows. */
static inline void gguf_put_key(struct gguf_writer *w, const char *key, uint32_t type) {
    gguf_put_bytes(w, key, strlen(key));
    gguf_put_u32_raw(w, type);
    w->n_kv++;
}

static inline void gguf_put_u32(struct gguf_writer *w, const char *key, uint32_t v) {
    gguf_put_key(w, key, GGUF_V_U32);
    gguf_put_u32_raw(w, v);
}

static inline void gguf_put_f32(struct gguf_writer *w, const char *key, float v) {
    gguf_put_key(w, key, GGUF_V_F32);
    gguf_put(w, &v, 4);
}

static inline void gguf_put_bool(struct gguf_writer *w, const char *key, bool v) {
    uint8_t b = v;
    gguf_put_key(w, key, GGUF_V_BOOL);
    gguf_put(w, &b, 1);
}

static inline void gguf_put_str(struct gguf_writer *w, const char *key, const char *p, size_t n) {
    gguf_put_key(w, key, GGUF_V_STR);
    gguf_put_bytes(w, p, n);
}

/* Appends an array of n elements of a fixed-size type. For strings, pass p NULL and call gguf_put_bytes n times. */
static inline void gguf_put_array(struct gguf_writer *w, const char *key, uint32_t elem, uint64_t n, const void *p) {
    gguf_put_key(w, key, GGUF_V_ARR);
    gguf_put_u32_raw(w, elem);
    gguf_put_u64_raw(w, n);
    if (p) gguf_put(w, p, (size_t)n * gguf_value_bytes(elem));
}

/* Returns n rounded up to the alignment of tensor data. */
static inline uint64_t gguf_pad(uint64_t n) {
    return (n + GGUF_DEFAULT_ALIGN - 1) / GGUF_DEFAULT_ALIGN * GGUF_DEFAULT_ALIGN;
}

/* Adds the next tensor. Returns the bytes of its data, without padding. */
static inline uint64_t gguf_add_tensor(struct gguf_writer *w, const char *name, uint32_t type, uint32_t n_dims,
                                       const uint64_t *ne) {
    uint64_t count = 1, n = strlen(name);
    gguf_append(w, &w->info, &w->info_len, &w->info_cap, &n, 8);
    gguf_append(w, &w->info, &w->info_len, &w->info_cap, name, (size_t)n);
    gguf_append(w, &w->info, &w->info_len, &w->info_cap, &n_dims, 4);
    for (uint32_t i = 0; i < n_dims; i++) count *= ne[i];
    gguf_append(w, &w->info, &w->info_len, &w->info_cap, ne, 8 * n_dims);
    gguf_append(w, &w->info, &w->info_len, &w->info_cap, &type, 4);
    gguf_append(w, &w->info, &w->info_len, &w->info_cap, &w->data_bytes, 8);
    uint64_t bytes = gguf_row_bytes(type, (size_t)count);
    w->n_tensors++;
    w->data_bytes += gguf_pad(bytes);
    return bytes;
}

/* Returns the finished header of *bytes bytes, padded to the alignment; the caller frees it. NULL: out of memory. */
static inline uint8_t *gguf_header(struct gguf_writer *w, size_t *bytes) {
    size_t n = 24 + w->kv_len + w->info_len, padded = (size_t)gguf_pad(n);
    uint8_t *h = w->failed ? NULL : (uint8_t *)calloc(1, padded);
    if (!h) return NULL;
    uint32_t version = 3;
    memcpy(h, "GGUF", 4);
    memcpy(h + 4, &version, 4);
    memcpy(h + 8, &w->n_tensors, 8);
    memcpy(h + 16, &w->n_kv, 8);
    if (w->kv_len) memcpy(h + 24, w->kv, w->kv_len);
    if (w->info_len) memcpy(h + 24 + w->kv_len, w->info, w->info_len);
    *bytes = padded;
    return h;
}

static inline void gguf_writer_free(struct gguf_writer *w) {
    free(w->kv);
    free(w->info);
    memset(w, 0, sizeof *w);
}

#endif
