/* The instructions of the PTX ISA that the engine's images and the tests' kernels have. A function executes one for the
 * lanes w.m of a warp. Included by decode.cpp, which chooses the function. */
#include <cfenv>
#include <limits>
#include <sched.h>
#include <unistd.h>

#include "races.h"

namespace ptxsim {

/* ---- Arithmetic ---------------------------------------------------------------------------------------------------- */

template <class D, class T, class F>
static void unary(Warp &w, const Insn &in) {
    D *d = dst<D>(w, in.o[0]);
    const T *a = src<T>(w, in.o[1]);
    const u32 m = w.m;
    if (m == FULL) EACH_LANE d[l] = F::f(a[l]);
    else EACH_LANE d[l] = m >> l & 1 ? F::f(a[l]) : d[l];
}
template <class D, class T, class F>
static void binary(Warp &w, const Insn &in) {
    D *d = dst<D>(w, in.o[0]);
    const T *a = src<T>(w, in.o[1]), *b = src<T>(w, in.o[2]);
    const u32 m = w.m;
    if (m == FULL) EACH_LANE d[l] = F::f(a[l], b[l]);
    else EACH_LANE d[l] = m >> l & 1 ? F::f(a[l], b[l]) : d[l];
}
template <class D, class T, class F> /* the third operand is as wide as the result */
static void ternary(Warp &w, const Insn &in) {
    D *d = dst<D>(w, in.o[0]);
    const T *a = src<T>(w, in.o[1]), *b = src<T>(w, in.o[2]);
    const D *c = src<D>(w, in.o[3]);
    const u32 m = w.m;
    if (m == FULL) EACH_LANE d[l] = F::f(a[l], b[l], c[l]);
    else EACH_LANE d[l] = m >> l & 1 ? F::f(a[l], b[l], c[l]) : d[l];
}
template <class D, class T, class F> /* a shift: the second operand has 32 bits */
static void shift(Warp &w, const Insn &in) {
    D *d = dst<D>(w, in.o[0]);
    const T *a = src<T>(w, in.o[1]);
    const u32 *b = src<u32>(w, in.o[2]);
    const u32 m = w.m;
    EACH_LANE d[l] = m >> l & 1 ? F::f(a[l], b[l]) : d[l];
}
/* Bit 0 of each byte. */
static inline u32 gathered_bits(const u8 t[LANES]) {
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u64 x;
        memcpy(&x, t + 8 * i, 8);
        r |= (u32)(x * 0x0102040810204080ull >> 56) << 8 * i;
    }
    return r;
}
template <class T, class F>
static void compare(Warp &w, const Insn &in) {
    const T *a = src<T>(w, in.o[2]), *b = src<T>(w, in.o[3]);
    alignas(64) u8 t[LANES];
    EACH_LANE t[l] = F::f(a[l], b[l]) ? 1 : 0;
    const u32 r = gathered_bits(t);
    u32 *d = dst<u32>(w, in.o[0]);
    *d = (*d & ~w.m) | (r & w.m);
    if (in.o[1] != NONE) {
        u32 *q = dst<u32>(w, in.o[1]);
        *q = (*q & ~w.m) | (~r & w.m);
    }
}

#define OP1(name, T, e)                           \
    template <class T>                            \
    struct name {                                 \
        static inline T f(T a) { return (T)(e); } \
    }
#define OP2(name, T, e)                                \
    template <class T>                                 \
    struct name {                                      \
        static inline T f(T a, T b) { return (T)(e); } \
    }
#define OPC(name, e)                                 \
    template <class T>                               \
    struct name {                                    \
        static inline bool f(T a, T b) { return e; } \
    }
OP2(Add, T, a + b);
OP2(Sub, T, a - b);
OP2(Mul, T, (a) * (b));
OP2(And, T, (a) & (b));
OP2(Or, T, a | b);
OP2(Xor, T, a ^ b);
OP1(Not, T, ~a);
OP1(Mov, T, a);
OP2(MinI, T, a < b ? a : b);
OP2(MaxI, T, a > b ? a : b);
OP1(NegI, T, 0 - a);
OP1(NegF, T, -a);
OP1(AbsI, T, a < 0 ? 0 - a : a);
OP2(DivF, T, a / b);
/* minNum: a NaN gives way to a number, -0 < +0 */
OP2(MinF, T, a != a ? b : b != b ? a : a < b ? a : b < a ? b : std::signbit(a) ? a : b);
OP2(MaxF, T, a != a ? b : b != b ? a : a > b ? a : b > a ? b : std::signbit(a) ? b : a);
OPC(Eq, a == b);
OPC(Ne, (a < b) | (a > b));
OPC(NeI, a != b);
OPC(Lt, a < b);
OPC(Le, a <= b);
OPC(Gt, a > b);
OPC(Ge, a >= b);
OPC(Equ, !((a < b) | (a > b)));
OPC(Neu, !(a == b));
OPC(Ltu, !(a >= b));
OPC(Leu, !(a > b));
OPC(Gtu, !(a <= b));
OPC(Geu, !(a < b));
OPC(Num, (a == a) & (b == b));
OPC(Nan, (a != a) | (b != b));
template <class T>
struct DivI {
    static inline T f(T a, T b) {
        return b == 0 ? (T)-1 : std::is_signed<T>::value && b == (T)-1 ? (T)(0 - a) : (T)(a / b);
    }
};
template <class T>
struct RemI {
    static inline T f(T a, T b) { return b == 0 ? a : std::is_signed<T>::value && b == (T)-1 ? (T)0 : (T)(a % b); }
};
template <class T>
struct Shl {
    static inline T f(T a, u32 b) { return b >= 8 * sizeof(T) ? 0 : (T)(a << b); }
};
template <class T>
struct Shr {
    static inline T f(T a, u32 b) { return b >= 8 * sizeof(T) ? (T)(a < 0 ? -1 : 0) : (T)(a >> b); }
};
template <class T>
struct MadLo {
    static inline T f(T a, T b, T c) { return (T)(a * b + c); }
};
template <class D, class T>
struct MulWide {
    static inline D f(T a, T b) { return (D)a * (D)b; }
};
template <class D, class T>
struct MadWide {
    static inline D f(T a, T b, D c) { return (D)a * (D)b + c; }
};
template <class W, class T>
struct MulHi {
    static inline T f(T a, T b) { return (T)(((W)a * (W)b) >> 8 * sizeof(T)); }
};
struct Fma32 {
    static inline f32 f(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
};
struct Fma64 {
    static inline f64 f(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
};
struct AbsF {
    static inline f32 f(f32 a) { return fabsf(a); }
};
struct AbsD {
    static inline f64 f(f64 a) { return fabs(a); }
};
struct Rcp {
    static inline f32 f(f32 a) { return 1.0f / a; }
};
struct Sqrt {
    static inline f32 f(f32 a) { return __builtin_sqrtf(a); }
};
struct SqrtD {
    static inline f64 f(f64 a) { return __builtin_sqrt(a); }
};
struct Rsqrt {
    static inline f32 f(f32 a) { return (f32)(1.0 / sqrt((f64)a)); }
};
/* div.approx: 0 for divisors of 2^126 and more (PTX ISA, div) */
struct DivApprox {
    static inline f32 f(f32 a, f32 b) {
        return fabsf(b) > 0x1p126f && fabsf(b) <= 3.40282347e38f
                   ? (fabsf(a) <= 3.40282347e38f ? copysignf(0, a) * copysignf(1, b) : NAN)
                   : a / b;
    }
};
struct CopySign {
    static inline f32 f(f32 a, f32 b) { return copysignf(b, a); }
}; /* the sign of a, the rest of b */
struct Popc {
    static inline u32 f(u32 a) { return (u32)__builtin_popcount(a); }
};
struct Brev {
    static inline u32 f(u32 a) {
        a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
        a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
        a = (a >> 4 & 0x0F0F0F0Fu) | (a & 0x0F0F0F0Fu) << 4;
        return __builtin_bswap32(a);
    }
};
struct Clz {
    static inline u32 f(u32 a) { return a ? (u32)__builtin_clz(a) : 32u; }
};
struct BfindShift {
    static inline u32 f(u32 a) { return a ? (u32)__builtin_clz(a) : FULL; }
};
struct Bfind {
    static inline u32 f(u32 a) { return a ? 31u - (u32)__builtin_clz(a) : FULL; }
};

static inline f64 exp2_poly(f64 x) { /* relative error below 1e-10 for |x| <= 0.5 */
    const f64 y = x * 0.69314718055994530942;
    return 1 + y * (1 + y * (1.0 / 2 +
                             y * (1.0 / 6 +
                                  y * (1.0 / 24 + y * (1.0 / 120 + y * (1.0 / 720 + y * (1.0 / 5040 + y / 40320)))))));
}
template <bool FTZ>
struct Ex2 {
    static inline f32 f(f32 a) {
        const f32 c = a > 200 ? 200 : a < -200 ? -200 : a; /* NaN stays */
        const f64 n = std::nearbyint((f64)c);
        const s64 e = (s64)(c == c ? n : 0) + 1023;
        const u64 bits = (u64)e << 52;
        f64 scale;
        memcpy(&scale, &bits, 8);
        const f32 r = (f32)(exp2_poly((f64)c - n) * scale);
        return FTZ && fabsf(r) < 1.17549435e-38f ? 0.0f : r;
    }
};
struct Lg2 {
    static inline f32 f(f32 a) { return (f32)log2((f64)a); }
};
struct SinA {
    static inline f32 f(f32 a) { return (f32)sin((f64)a); }
};
struct CosA {
    static inline f32 f(f32 a) { return (f32)cos((f64)a); }
};
struct TanhA {
    static inline f32 f(f32 a) { return (f32)tanh((f64)a); }
};
struct Bfe {
    static inline u32 f(u32 a, u32 b, u32 c) {
        b &= 255, c &= 255;
        return b >= 32 || !c ? 0 : c >= 32 ? a >> b : a >> b & ((1u << c) - 1);
    }
};
struct ShfL {
    static inline u32 f(u32 a, u32 b, u32 c) { return (u32)(((u64)b << 32 | a) << (c & 31) >> 32); }
};
struct ShfR {
    static inline u32 f(u32 a, u32 b, u32 c) { return (u32)(((u64)b << 32 | a) >> (c & 31)); }
};
struct Prmt {
    static inline u32 f(u32 a, u32 b, u32 c) {
        const u64 v = (u64)b << 32 | a;
        u32 r = 0;
        for (int i = 0; i < 4; i++) {
            const u32 s = c >> 4 * i & 15;
            u32 x = (u32)(v >> 8 * (s & 7)) & 255;
            if (s & 8) x = x & 128 ? 255 : 0;
            r |= x << 8 * i;
        }
        return r;
    }
};
template <class T>
static void bfi(Warp &w, const Insn &in) {
    T *d = dst<T>(w, in.o[0]);
    const T *a = src<T>(w, in.o[1]), *b = src<T>(w, in.o[2]);
    const u32 *c = src<u32>(w, in.o[3]), *n = src<u32>(w, in.o[4]);
    for (int l = 0; l < LANES; l++) {
        if (!(w.m >> l & 1)) continue;
        const u32 pos = c[l] & 255, len = n[l] & 255, bits = 8 * sizeof(T);
        T mask = len >= bits ? (T)-1 : (T)(((T)1 << len) - 1);
        mask = pos >= bits ? 0 : (T)(mask << pos);
        d[l] = (T)((b[l] & ~mask) | (pos >= bits ? 0 : (a[l] << pos) & mask));
    }
}
/* Directed rounding. */
template <int MODE, bool FMA>
__attribute__((noinline)) static void rounded(Warp &w, const Insn &in) {
    f32 *d = dst<f32>(w, in.o[0]);
    const f32 *a = src<f32>(w, in.o[1]), *b = src<f32>(w, in.o[2]), *c = FMA ? src<f32>(w, in.o[3]) : a;
    const int before = fegetround();
    fesetround(MODE);
    for (int l = 0; l < LANES; l++) {
        if (!(w.m >> l & 1)) continue;
        volatile f32 x = a[l], y = b[l], z = c[l], r;
        r = FMA ? fmaf(x, y, z) : x + y;
        d[l] = r;
    }
    fesetround(before);
}

/* ---- Conversions --------------------------------------------------------------------------------------------------- */

static inline u32 bits_of(f32 x) {
    u32 u;
    memcpy(&u, &x, 4);
    return u;
}
static inline f32 float_of(u32 u) {
    f32 x;
    memcpy(&x, &u, 4);
    return x;
}
static inline f32 half_value(u16 h) {
    const u32 s = (u32)(h & 0x8000) << 16, e = (u32)(h & 0x7FFF) << 13;
    const f32 v = float_of(e) * 0x1p112f; /* the bias of 15 becomes 127; subnormals are exact */
    return float_of(s | ((h & 0x7C00) == 0x7C00 ? e | 0x7F800000u : bits_of(v)));
}
static inline u16 to_half(f32 x) { /* to the nearest, ties to even */
    const u32 u = bits_of(x), s = u >> 16 & 0x8000, a = u & 0x7FFFFFFFu;
    const u32 normal = (a - (112u << 23) + 0xFFF + (a >> 13 & 1)) >> 13;
    const u32 small = bits_of(float_of(a) + 0.5f) - 0x3F000000u; /* rounds at 2^-24 */
    u32 r = a < 0x38800000u ? small : normal;
    r = a >= 0x477FF000u ? 0x7C00 : r; /* 65520 and more */
    r = a > 0x7F800000u ? 0x7FFF : r;
    return (u16)(s | r);
}
static inline u16 to_half_sat(f32 x) {
    const u16 h = to_half(x);
    return (h & 0x7FFF) == 0x7C00 ? (u16)(h - 1) : h;
}
static inline u16 to_bf16(f32 x) {
    const u32 u = bits_of(x);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFF : (u16)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
/* The nearest value of a format of e exponent bits (bias) and m mantissa bits, by its table; ties to the even code. */
static u8 to_small(f32 x, const f32 *value, int n) { /* value (n) ascending, codes 0 .. n - 1; saturates */
    const f32 a = fabsf(x);
    const f32 *p = std::lower_bound(value, value + n, a);
    int i = (int)(p - value);
    if (i == n) i = n - 1;
    else if (i > 0) {
        const f64 up = (f64)value[i] - a, down = (f64)a - value[i - 1];
        if (down < up || (down == up && !((i - 1) & 1))) i--;
    }
    return (u8)i;
}
static struct Small {
    f32 e2m1[8], e4m3[127];
    Small() {
        for (int i = 0; i < 8; i++) {
            const int e = i >> 1, m = i & 1;
            e2m1[i] = e ? ldexpf(1 + m / 2.0f, e - 1) : m * 0.5f;
        }
        for (int i = 0; i < 127; i++) {
            const int e = i >> 3, m = i & 7;
            e4m3[i] = e ? ldexpf(1 + m / 8.0f, e - 7) : ldexpf((f32)m, -9);
        }
    }
} small_formats EARLY;
static u8 to_e4m3(f32 x) {
    const u8 s = std::signbit(x) ? 0x80 : 0;
    return x != x ? 0x7F : (u8)(s | to_small(x, small_formats.e4m3, 127));
}
static u8 to_e2m1(f32 x) {
    const u8 s = std::signbit(x) ? 8 : 0;
    return x != x ? 7 : (u8)(s | to_small(x, small_formats.e2m1, 8));
}
static inline f32 e4m3_value(u32 c) {
    const f32 v = float_of((c & 127) << 20) * 0x1p120f; /* the bias of 7 becomes 127; subnormals are exact */
    return float_of((c & 128) << 24 | bits_of((c & 127) == 127 ? NAN : v));
}

/* cvt.*x2.f32 d, a, b: a goes to the high half. */
#define PACK2(name, expression)                                         \
    static void name(Warp &w, const Insn &in) {                         \
        u32 *d = dst<u32>(w, in.o[0]);                                  \
        const f32 *a = src<f32>(w, in.o[1]), *b = src<f32>(w, in.o[2]); \
        const u32 m = w.m;                                              \
        EACH_LANE {                                                     \
            const u32 hi = expression(a[l]), lo = expression(b[l]);     \
            d[l] = m >> l & 1 ? hi << 16 | lo : d[l];                   \
        }                                                               \
    }
PACK2(cvt_f16x2, to_half)
PACK2(cvt_f16x2_sat, to_half_sat)
PACK2(cvt_bf16x2, to_bf16)
static void cvt_e4m3x2(Warp &w, const Insn &in) {
    u16 *d = dst<u16>(w, in.o[0]);
    const f32 *a = src<f32>(w, in.o[1]), *b = src<f32>(w, in.o[2]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = (u16)(to_e4m3(a[l]) << 8 | to_e4m3(b[l]));
}
static void cvt_e2m1x2(Warp &w, const Insn &in) {
    u16 *d = dst<u16>(w, in.o[0]);
    const f32 *a = src<f32>(w, in.o[1]), *b = src<f32>(w, in.o[2]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = (u16)(to_e2m1(a[l]) << 4 | to_e2m1(b[l]));
}
/* The halves of two in each lane. */
static inline void half_values(const u16 *from, f32 *to) {
    for (int i = 0; i < 2 * LANES; i++) to[i] = half_value(from[i]);
}
static inline void write_halves(Warp &w, s32 o, const f32 *from) {
    u32 *d = dst<u32>(w, o);
    const u32 m = w.m;
    alignas(64) u32 h[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++) h[i] = to_half(from[i]);
    EACH_LANE d[l] = m >> l & 1 ? h[2 * l + 1] << 16 | h[2 * l] : d[l];
}
static void cvt_f16x2_e4m3x2(Warp &w, const Insn &in) {
    const u8 *a = (const u8 *)src<u16>(w, in.o[1]);
    alignas(64) f32 v[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++) v[i] = e4m3_value(a[i]);
    write_halves(w, in.o[0], v);
}
static void cvt_f32_f16(Warp &w, const Insn &in) {
    f32 *d = dst<f32>(w, in.o[0]);
    const u16 *a = src<u16>(w, in.o[1]);
    const u32 m = w.m;
    EACH_LANE d[l] = m >> l & 1 ? half_value(a[l]) : d[l];
}
static void cvt_f16_f32_sat(Warp &w, const Insn &in) {
    u16 *d = dst<u16>(w, in.o[0]);
    const f32 *a = src<f32>(w, in.o[1]);
    const u32 m = w.m;
    EACH_LANE d[l] = m >> l & 1 ? to_half_sat(a[l]) : d[l];
}
static void cvt_f16_f32(Warp &w, const Insn &in) {
    u16 *d = dst<u16>(w, in.o[0]);
    const f32 *a = src<f32>(w, in.o[1]);
    const u32 m = w.m;
    EACH_LANE d[l] = m >> l & 1 ? to_half(a[l]) : d[l];
}
template <class F> /* products and sums in F32 round once more without harm: 24 >= 2 * 11 + 2 */
static void f16_pairs(Warp &w, const Insn &in) {
    alignas(64) f32 a[2 * LANES], b[2 * LANES];
    half_values((const u16 *)src<u32>(w, in.o[1]), a);
    half_values((const u16 *)src<u32>(w, in.o[2]), b);
    for (int i = 0; i < 2 * LANES; i++) a[i] = F::f(a[i], b[i]);
    write_halves(w, in.o[0], a);
}
struct CvtSat {
    static inline f32 f(f32 a) { return a > 1 ? 1.0f : a > 0 ? a : 0.0f; }
}; /* NaN: 0 */
struct Rint {
    static inline f32 f(f32 a) { return __builtin_rintf(a); }
};
struct Trunc {
    static inline f32 f(f32 a) { return __builtin_truncf(a); }
};
struct Floor {
    static inline f32 f(f32 a) { return __builtin_floorf(a); }
};
struct Ceil {
    static inline f32 f(f32 a) { return __builtin_ceilf(a); }
};
template <class D, int HOW> /* 0 nearest, 1 to zero, 2 down, 3 up; saturates, NaN: 0 */
struct ToInt {
    static inline D f(f32 a) {
        const f64 x = HOW == 0 ? nearbyint((f64)a) : HOW == 1 ? trunc((f64)a) : HOW == 2 ? floor((f64)a) : ceil((f64)a);
        if (x != x) return 0;
        if (x >= (f64)std::numeric_limits<D>::max()) return std::numeric_limits<D>::max();
        if (x <= (f64)std::numeric_limits<D>::min()) return std::numeric_limits<D>::min();
        return (D)x;
    }
};
template <class D, class T>
struct Cast {
    static inline D f(T a) { return (D)a; }
};

/* Integer to integer of any widths: in.n = bits of the source, in.bytes = bits of the result, in.space: its signs. */
template <class D, class T>
static void cvt_int(Warp &w, const Insn &in) {
    const int from = 64 - in.n, to = 64 - in.bytes;
    const bool from_signed = in.space & 1, to_signed = in.space & 2;
    D *d = dst<D>(w, in.o[0]);
    const T *a = src<T>(w, in.o[1]);
    const u32 m = w.m;
    EACH_LANE {
        u64 v = (u64)a[l] << from;
        v = (from_signed ? (u64)((s64)v >> from) : v >> from) << to;
        v = to_signed ? (u64)((s64)v >> to) : v >> to;
        d[l] = m >> l & 1 ? (D)v : d[l];
    }
}

/* ---- Predicates, moves --------------------------------------------------------------------------------------------- */

static void pred_and(Warp &w, const Insn &in) { set_pred(w, in.o[0], get_pred(w, in.o[1]) & get_pred(w, in.o[2])); }
static void pred_or(Warp &w, const Insn &in) { set_pred(w, in.o[0], get_pred(w, in.o[1]) | get_pred(w, in.o[2])); }
static void pred_xor(Warp &w, const Insn &in) { set_pred(w, in.o[0], get_pred(w, in.o[1]) ^ get_pred(w, in.o[2])); }
static void pred_not(Warp &w, const Insn &in) { set_pred(w, in.o[0], ~get_pred(w, in.o[1])); }
static void pred_mov(Warp &w, const Insn &in) { set_pred(w, in.o[0], get_pred(w, in.o[1])); }
template <class T>
static void selp(Warp &w, const Insn &in) {
    T *d = dst<T>(w, in.o[0]);
    const T *a = src<T>(w, in.o[1]), *b = src<T>(w, in.o[2]);
    const u32 p = get_pred(w, in.o[3]), m = w.m;
    EACH_LANE {
        const T v = p >> l & 1 ? a[l] : b[l];
        d[l] = m >> l & 1 ? v : d[l];
    }
}
template <class W, class H>
static void mov_pack(Warp &w, const Insn &in) {
    W *d = dst<W>(w, in.o[0]);
    const H *a = src<H>(w, in.o[1]), *b = src<H>(w, in.o[2]);
    const u32 m = w.m;
    EACH_LANE d[l] = m >> l & 1 ? (W)a[l] | (W)b[l] << 8 * sizeof(H) : d[l];
}
template <class W, class H>
static void mov_unpack(Warp &w, const Insn &in) { /* o[0], o[1] = halves of o[2] */
    H *a = dst<H>(w, in.o[0]), *b = dst<H>(w, in.o[1]);
    const W *s = src<W>(w, in.o[2]);
    for (int l = 0; l < LANES; l++) {
        if (!(w.m >> l & 1)) continue;
        const W v = s[l];
        a[l] = (H)v, b[l] = (H)(v >> 8 * sizeof(H));
    }
}
enum {
    S_TID_X,
    S_TID_Y,
    S_TID_Z,
    S_NTID_X,
    S_NTID_Y,
    S_NTID_Z,
    S_CTAID_X,
    S_CTAID_Y,
    S_CTAID_Z,
    S_NCTAID_X,
    S_NCTAID_Y,
    S_NCTAID_Z,
    S_LANE,
    S_WARP,
    S_TIME,
    S_CLOCK,
    S_LT,
    S_SMID
};
static void mov_special(Warp &w, const Insn &in) {
    const Block &b = *w.b;
    const dim3 n = b.launch->block, g = b.launch->grid;
    alignas(64) u64 v[LANES];
    const u32 t = w.index * LANES;
    auto all = [&](u64 x) { EACH_LANE v[l] = x; };
    switch (in.imm) {
    case S_TID_X:
        if (t + LANES <= n.x) EACH_LANE v[l] = t + (u32)l;
        else EACH_LANE v[l] = (t + (u32)l) % n.x;
        break;
    case S_TID_Y: EACH_LANE v[l] = (t + (u32)l) / n.x % n.y; break;
    case S_TID_Z: EACH_LANE v[l] = (t + (u32)l) / n.x / n.y; break;
    case S_NTID_X: all(n.x); break;
    case S_NTID_Y: all(n.y); break;
    case S_NTID_Z: all(n.z); break;
    case S_CTAID_X: all(b.ctaid.x); break;
    case S_CTAID_Y: all(b.ctaid.y); break;
    case S_CTAID_Z: all(b.ctaid.z); break;
    case S_NCTAID_X: all(g.x); break;
    case S_NCTAID_Y: all(g.y); break;
    case S_NCTAID_Z: all(g.z); break;
    case S_LANE: EACH_LANE v[l] = (u64)l; break;
    case S_WARP: all(w.index); break;
    case S_SMID: all(b.id % SM_COUNT); break;
    case S_TIME:
    case S_CLOCK: all(time_ns() / 100); break; /* a device would be that much faster */
    case S_LT: EACH_LANE v[l] = (1u << l) - 1; break;
    }
    const u32 m = w.m;
    if (in.bytes == 8) {
        u64 *d = dst<u64>(w, in.o[0]);
        EACH_LANE d[l] = m >> l & 1 ? v[l] : d[l];
    } else {
        u32 *d = dst<u32>(w, in.o[0]);
        EACH_LANE d[l] = m >> l & 1 ? (u32)v[l] : d[l];
    }
}

/* ---- Loads and stores ---- */

/* Where the active lanes access memory; inactive lanes have the address of an active one. */
struct Places {
    uintptr_t a[LANES], lo, hi; /* hi: behind all of them, where the space is global or generic */
    bool row;                   /* all lanes are active, each right behind the one before */
    bool same;                  /* all active lanes have one address */
};

/* A launch that may overlap must not read what those before it write until it has executed griddepcontrol.wait, and not
 * write at all. Within a launch, what another block wrote must not be read through L1 or as constant data. */
static void shadow_store(Block &b, const Insn &in, uintptr_t p, size_t n) {
    u64 *s = shadow_of(p);
    if (!s) return;
    if (b.launch->programmatic && !b.waited)
        note("kernel %s: stores to global memory before griddepcontrol.wait\n    at: %s", b.k->name.c_str(),
             insn_text(in).c_str());
    const u64 v = b.launch->seq << 32 | (u32)b.id;
    latest_write(p, (u32)b.launch->seq);
    for (size_t i = 0; i < n; i += 4) s[i / 4] = v;
}
/* Those of the active lanes, n bytes each. */
static void shadow_stores(Warp &w, const Insn &in, const Places &at, size_t n) {
    Block &b = *w.b;
    const u64 v = b.launch->seq << 32 | (u32)b.id;
    u64 *const s = shadow_of(at.lo);
    const uintptr_t word = at.lo & ~(uintptr_t)3; /* that s[0] stands for */
    const bool plain = s && shadow_of(at.hi - 1) && (!b.launch->programmatic || b.waited);
    if (plain && at.row) {
        for (uintptr_t p = at.lo; p < at.hi; p = (p | (LATEST_BYTES - 1)) + 1) latest_write(p, (u32)b.launch->seq);
        for (size_t i = 0, e = (at.hi - word + 3) / 4; i < e; i++) s[i] = v;
        return;
    }
    const bool near = plain && at.hi - at.lo <= LATEST_BYTES;
    if (near) latest_write(at.lo, (u32)b.launch->seq), latest_write(at.hi - 1, (u32)b.launch->seq);
    for (size_t i = 0; near && i < n; i += 4)
        for (int l = 0; l < LANES; l++) s[(at.a[l] - word + i) / 4] = v;
    for (int l = 0; !near && l < LANES; l++)
        if (w.m >> l & 1) shadow_store(b, in, at.a[l], n);
}
static void shadow_load(Block &b, const Insn &in, uintptr_t p) {
    const u64 *s = shadow_of(p);
    if (!s || !*s) return;
    const u64 seq = *s >> 32;
    if (!b.waited && seq != b.launch->seq && launch_runs(seq, b.launch->stream))
        note("kernel %s: reads what an earlier kernel wrote before griddepcontrol.wait\n    at: %s", b.k->name.c_str(),
             insn_text(in).c_str());
    if (seq == b.launch->seq && in.nc)
        note("kernel %s: ld.global.nc of what the same launch wrote\n    at: %s", b.k->name.c_str(),
             insn_text(in).c_str());
    if (seq == b.launch->seq && in.cached && !b.acquired && (u32)*s != (u32)b.id)
        note("kernel %s: reads through L1 what another block of the launch wrote, without an acquire\n    at: %s",
             b.k->name.c_str(), insn_text(in).c_str());
}

/* Those of the active lanes. Most find nothing to look at closer: launches that had ended wrote it. */
static inline void shadow_loads(Warp &w, const Insn &in, const Places &at) {
    Block &b = *w.b;
    if (at.hi - at.lo <= LATEST_BYTES && is_settled(at.lo, b.launch->oldest) && is_settled(at.hi - 1, b.launch->oldest))
        return;
    const u64 own = b.launch->seq;
    u64 closer = 0;
    for (int l = 0; l < LANES; l++) {
        const u64 *s = shadow_of(at.a[l]), seq = s ? *s >> 32 : 0;
        closer |= seq == own || (!b.waited && seq);
    }
    for (int l = 0; closer && l < LANES; l++)
        if (w.m >> l & 1) shadow_load(b, in, at.a[l]);
}

/* The addresses of the active lanes, checked. False: the launch has failed. */
static inline __attribute__((always_inline)) bool addresses(Warp &w, const Insn &in, int space, size_t bytes,
                                                            Places &at, s32 operand, s64 imm) {
    Block &b = *w.b;
    const u32 m = w.m;
    const int first = __builtin_ctz(m);
    uintptr_t *const a = at.a;
    if (space == SHARED) {
        const u32 *p = src<u32>(w, operand);
        u32 top = 0, any = 0, other = 0, differ = 0;
        const u32 offset = (u32)imm, f = p[first] + offset;
        u32 x[LANES];
        EACH_LANE x[l] = m >> l & 1 ? p[l] + offset : f;
        for (int l = 0; l < LANES; l++)
            top = x[l] > top ? x[l] : top, any |= x[l], differ |= x[l] - f, other |= x[l] - (f + (u32)l * (u32)bytes);
        if (top + bytes > b.shared_bytes || top + bytes < top) {
            trap(b, &in, "shared memory: address %u of %u bytes, %zu wide, thread %u", top, b.shared_bytes, bytes,
                 w.index * LANES);
            return false;
        }
        if (any & (bytes - 1)) {
            trap(b, &in, "shared memory: misaligned address, %zu wide", bytes);
            return false;
        }
        EACH_LANE a[l] = (uintptr_t)b.shared + x[l];
        at.row = m == FULL && !other, at.same = !differ;
        return true;
    }
    const u64 *p = src<u64>(w, operand);
    const u64 offset = (u64)imm, f = p[first] + offset;
    EACH_LANE a[l] = m >> l & 1 ? p[l] + offset : f;
    u64 lo = f, hi = f, any = f, other = 0;
    for (int l = 0; l < LANES; l++) other |= a[l] - (f + (u64)l * bytes);
    at.row = m == FULL && !other;
    if (at.row) hi += (LANES - 1) * bytes;
    else
        for (int l = 0; l < LANES; l++) lo = a[l] < lo ? a[l] : lo, hi = a[l] > hi ? a[l] : hi, any |= a[l];
    at.same = lo == hi;
    hi += bytes;
    if (space == PARAM || space == LOCAL) {
        const size_t size = space == PARAM ? b.launch->params.size() : b.k->local_bytes;
        if (lo > size || hi > size || hi < bytes || any & (bytes - 1)) {
            trap(b, &in, "%s memory: address %llu of %zu", space == PARAM ? "parameter" : "local",
                 (unsigned long long)(hi - bytes), size);
            return false;
        }
        const uintptr_t base = space == PARAM ? (uintptr_t)b.launch->params.data() : (uintptr_t)w.local;
        const size_t each = space == PARAM ? 0 : b.k->local_bytes;
        EACH_LANE a[l] += base + (m >> l & 1 ? (size_t)l : (size_t)first) * each;
        at.row &= !each, at.same &= !each;
        return true;
    }
    if (any & (bytes - 1)) {
        trap(b, &in, "misaligned global address, %zu wide, e.g. %#llx", bytes, (unsigned long long)f);
        return false;
    }
    at.lo = lo, at.hi = hi;
    const auto &known = b.cache[cache_slot(lo)];
    if (lo >= known.lo && hi <= known.hi && lo < hi) return true;
    if (lo < hi && alloc_find(*b.all, lo, hi) && may_access(b, lo, hi)) return true;
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        if (space == GENERIC && a[l] >= (uintptr_t)b.shared && a[l] + bytes <= (uintptr_t)b.shared + b.shared_bytes)
            continue;
        if (space == GENERIC && w.local && a[l] >= (uintptr_t)w.local &&
            a[l] + bytes <= (uintptr_t)w.local + (size_t)LANES * b.k->local_bytes)
            continue;
        if (may_access(b, a[l], a[l] + bytes)) continue;
        trap(b, &in, "invalid global address %#llx, %zu wide, thread %u", (unsigned long long)a[l], bytes,
             w.index * LANES + (u32)l);
        return false;
    }
    return true;
}

/* Tells the detector of races of an access of the active lanes. */
static inline void races_lanes(Warp &w, const Insn &in, const uintptr_t a[LANES], size_t bytes, Access how,
                               u32 same = 0) {
    if (!machine.races || in.space > SHARED) return;
    const uintptr_t shared = (uintptr_t)w.b->shared;
    for (int l = 0; l < LANES; l++) {
        if (!(w.m >> l & 1)) continue;
        if (a[l] - shared < w.b->shared_bytes) races_shared(w, in, l, (u32)(a[l] - shared), bytes, how);
        else races_global(w, in, l, a[l], bytes, how, same >> l & 1);
    }
}

/* Between the registers of all lanes and a row of memory, in which the N numbers of a lane stand together. */
template <class M, class R, int N>
static inline void load_row(Warp &w, const Insn &in, const M *from) {
    R *d[N];
    for (int j = 0; j < N; j++) d[j] = dst<R>(w, in.o[1 + j]);
    EACH_LANE for (int j = 0; j < N; j++) d[j][l] = (R)from[N * l + j];
}
template <class M, class R, int N>
static inline void store_row(Warp &w, const Insn &in, M *to) {
    const R *s[N];
    for (int j = 0; j < N; j++) s[j] = src<R>(w, in.o[1 + j]);
    EACH_LANE for (int j = 0; j < N; j++) to[N * l + j] = (M)s[j][l];
}

template <class M, class R>
static void load(Warp &w, const Insn &in) {
    Places at;
    const int n = in.n;
    if (!addresses(w, in, in.space, sizeof(M) * (size_t)n, at, in.o[0], in.imm)) return;
    const u32 m = w.m;
    if (in.space <= GLOBAL) shadow_loads(w, in, at);
    if (machine.races) races_lanes(w, in, at.a, sizeof(M) * (size_t)n, in.strong ? ATOMIC_READ : READ);
    if (at.row && !in.strong) {
        const M *from = (const M *)at.a[0];
        if (n == 1) return load_row<M, R, 1>(w, in, from);
        if (n == 2) return load_row<M, R, 2>(w, in, from);
        if (n == 4) return load_row<M, R, 4>(w, in, from);
    }
    for (int j = 0; j < n; j++) {
        R *d = dst<R>(w, in.o[1 + j]);
        if (at.same && !in.strong) {
            const R x = (R)((const M *)at.a[0])[j];
            EACH_LANE d[l] = m >> l & 1 ? x : d[l];
        } else if (m == FULL)
            for (int l = 0; l < LANES; l++) d[l] = (R)((const volatile M *)at.a[l])[j];
        else
            for (int l = 0; l < LANES; l++)
                if (m >> l & 1) d[l] = (R)((const volatile M *)at.a[l])[j];
    }
}
/* A release before, and an acquire after, the access of the active lanes. */
static inline void races_released(Warp &w, const Insn &in) {
    const u64 *p = src<u64>(w, in.o[0]);
    for (int l = 0; machine.races && in.space <= GLOBAL && l < LANES; l++)
        if (w.m >> l & 1) races_release(w, p[l] + (u64)in.imm);
}
static inline void races_acquired(Warp &w, const Insn &in) {
    const u64 *p = src<u64>(w, in.o[0]);
    for (int l = 0; machine.races && in.space <= GLOBAL && l < LANES; l++)
        if (w.m >> l & 1) races_acquire(w, p[l] + (u64)in.imm);
}
template <class M, class R>
static void load_acquire(Warp &w,
                         const Insn &in) { /* a poll, perhaps: of what another block, stream or device writes */
    load<M, R>(w, in);
    if (!(++w.b->polls & 63)) {
        stores_land(*w.b, (w.b->late.size() + 1) / 2); /* at some time all become visible: the last ones first */
        w.b->status = POLLING, w.b->leave = true;
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    w.b->acquired = true;
    races_acquired(w, in);
}
template <class M, class R>
static void load_param(Warp &w, const Insn &in) { /* a constant address */
    const u8 *p = w.b->launch->params.data() + in.imm;
    const u32 m = w.m;
    for (int j = 0; j < in.n; j++) {
        M x;
        memcpy(&x, p + (size_t)j * sizeof(M), sizeof(M));
        R *d = dst<R>(w, in.o[1 + j]);
        EACH_LANE d[l] = m >> l & 1 ? (R)x : d[l];
    }
}
template <class M, class R>
static void store(Warp &w, const Insn &in) {
    Places at;
    const int n = in.n;
    if (!addresses(w, in, in.space, sizeof(M) * (size_t)n, at, in.o[0], in.imm)) return;
    const u32 m = w.m;
    if (in.space <= GLOBAL && arena.shadow) shadow_stores(w, in, at, sizeof(M) * (size_t)n);
    if (machine.races) {
        u32 same = 0;
        for (int l = 0; l < LANES; l++) {
            if (!(m >> l & 1)) continue;
            bool equal = true;
            for (int j = 0; j < n; j++) equal &= ((volatile M *)at.a[l])[j] == (M)src<R>(w, in.o[1 + j])[l];
            same |= (u32)equal << l;
        }
        races_lanes(w, in, at.a, sizeof(M) * (size_t)n, in.strong ? ATOMIC : WRITE, same);
    }
    if (at.row && !in.strong) {
        M *to = (M *)at.a[0];
        if (n == 1) return store_row<M, R, 1>(w, in, to);
        if (n == 2) return store_row<M, R, 2>(w, in, to);
        if (n == 4) return store_row<M, R, 4>(w, in, to);
    }
    for (int l = 0; l < LANES; l++)
        for (int j = 0; j < n && m >> l & 1; j++) {
            const M x = (M)src<R>(w, in.o[1 + j])[l];
            if (in.late) w.b->late.push_back({at.a[l] + (size_t)j * sizeof(M), (u64)x, sizeof(M)});
            else ((volatile M *)at.a[l])[j] = x;
        }
}
template <class M, class R>
static void store_release(Warp &w, const Insn &in) {
    stores_land(*w.b, w.b->late.size());
    std::atomic_thread_fence(std::memory_order_release);
    races_released(w, in);
    store<M, R>(w, in);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    enum { SEEN_US = 2000 }; /* other devices may see it long before the block's other warps go on */
    if (machine.races && in.space <= GLOBAL && w.b->rng() % 4 == 0) usleep(SEEN_US);
}

enum { A_ADD, A_MIN, A_MAX, A_OR, A_AND, A_XOR, A_EXCH, A_CAS, A_INC };
template <class T, int OP>
static void atomic(Warp &w, const Insn &in) { /* o[0] address, o[1] result or NONE, o[2] operand, o[3] of cas */
    Places at;
    if (!addresses(w, in, in.space, sizeof(T), at, in.o[0], in.imm)) return;
    const T *v = src<T>(w, in.o[2]);
    races_lanes(w, in, at.a, sizeof(T), ATOMIC);
    if (in.nc) {
        stores_land(*w.b, w.b->late.size());
        w.b->acquired = true, races_released(w, in), races_acquired(w, in);
    }
    for (int l = 0; l < LANES; l++) {
        if (!(w.m >> l & 1)) continue;
        T *p = (T *)at.a[l], old = __atomic_load_n(p, __ATOMIC_SEQ_CST), now;
        do {
            const T x = v[l];
            now = OP == A_ADD    ? (T)(old + x)
                  : OP == A_MIN  ? std::min(old, x)
                  : OP == A_MAX  ? std::max(old, x)
                  : OP == A_OR   ? (T)(old | x)
                  : OP == A_AND  ? (T)(old & x)
                  : OP == A_XOR  ? (T)(old ^ x)
                  : OP == A_EXCH ? x
                  : OP == A_CAS  ? (old == x ? src<T>(w, in.o[3])[l] : old)
                                 : (T)(old >= x ? 0 : old + 1);
        } while (!__atomic_compare_exchange_n(p, &old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
        if (in.space <= GLOBAL && arena.shadow) shadow_store(*w.b, in, at.a[l], sizeof(T));
        if (in.o[1] != NONE) dst<T>(w, in.o[1])[l] = old;
    }
}
static void fence(Warp &w, const Insn &) {
    stores_land(*w.b, w.b->late.size());
    std::atomic_thread_fence(std::memory_order_seq_cst);
    w.b->acquired = true;
}
static void warp_sync(Warp &w, const Insn &) {
    if (machine.races && w.m == w.live) races_warp_sync(w);
}
static void cvta_shared(Warp &w, const Insn &in) {
    u64 *d = dst<u64>(w, in.o[0]);
    const u64 *a = src<u64>(w, in.o[1]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = (u64)(uintptr_t)w.b->shared + a[l];
}
static void cvta_to_shared(Warp &w, const Insn &in) {
    u64 *d = dst<u64>(w, in.o[0]);
    const u64 *a = src<u64>(w, in.o[1]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = a[l] - (u64)(uintptr_t)w.b->shared;
}
static void cvta_local(Warp &w, const Insn &in) {
    u64 *d = dst<u64>(w, in.o[0]);
    const u64 *a = src<u64>(w, in.o[1]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = (u64)(uintptr_t)(w.local + (size_t)l * w.b->k->local_bytes) + a[l];
}
static void cvta_to_local(Warp &w, const Insn &in) {
    u64 *d = dst<u64>(w, in.o[0]);
    const u64 *a = src<u64>(w, in.o[1]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = a[l] - (u64)(uintptr_t)(w.local + (size_t)l * w.b->k->local_bytes);
}
static void cvta_param(Warp &w, const Insn &in) {
    u64 *d = dst<u64>(w, in.o[0]);
    const u64 *a = src<u64>(w, in.o[1]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = (u64)(uintptr_t)w.b->launch->params.data() + a[l];
}

/* cp.async.cg.shared.global [o0], [o1], 16, o2: the bytes beyond o2 are zeros. Writes garbage now, the data at the wait. */
static void cp_async(Warp &w, const Insn &in) {
    Places to, from;
    Block &b = *w.b;
    const u32 all = w.m;
    const u32 *size = in.o[2] == NONE ? NULL : src<u32>(w, in.o[2]);
    if (!addresses(w, in, SHARED, in.bytes, to, in.o[0], (s32)in.imm)) return;
    u32 reads = all;
    if (size)
        for (int l = 0; l < LANES; l++)
            if (all >> l & 1 && !size[l]) reads &= ~(1u << l);
    if (reads) {
        w.m = reads;
        const bool ok = addresses(w, in, GLOBAL, in.bytes, from, in.o[1], in.target);
        if (ok) shadow_loads(w, in, from);
        w.m = all;
        if (!ok) return;
    }
    for (int l = 0; l < LANES; l++) {
        if (!(all >> l & 1)) continue;
        const u32 n = size ? size[l] : in.bytes, d = (u32)(to.a[l] - (uintptr_t)b.shared);
        if (n > in.bytes) return trap(b, &in, "cp.async: source size %u", n);
        if (machine.races) {
            if (reads >> l & 1) races_global(w, in, l, from.a[l], n, READ, false);
            races_shared(w, in, l, d, in.bytes, WRITE);
        }
        memset((void *)to.a[l], 0xFF, in.bytes);
        w.copies.push_back({d, w.groups[l], (u8)l, (u8)n, in.bytes, n ? from.a[l] : 0});
    }
}
static void cp_async_commit(Warp &w, const Insn &) {
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) w.groups[l]++;
}
static void cp_async_wait(Warp &w, const Insn &in) { /* imm: groups that may stay in flight */
    size_t kept = 0;
    for (const AsyncCopy &c : w.copies) {
        if (!(w.m >> c.lane & 1) || (s64)c.group >= (s64)w.groups[c.lane] - in.imm) {
            w.copies[kept++] = c;
            continue;
        }
        u8 *d = w.b->shared + c.dst;
        if (machine.races) races_shared(w, in, c.lane, c.dst, c.whole, WRITE);
        memset(d, 0, c.whole);
        if (c.size) memcpy(d, (const void *)c.src, c.size);
    }
    w.copies.resize(kept);
}
static void prefetch_l2(Warp &w, const Insn &in) {
    const u64 *p = src<u64>(w, in.o[0]);
    const u32 *n = src<u32>(w, in.o[1]);
    const bool logs = machine.logs_prefetches;
    for (int l = 0; l < LANES; l++) {
        if (!(w.m >> l & 1)) continue;
        if (p[l] % 16 || n[l] % 16)
            return trap(*w.b, &in, "prefetch of %u bytes at %#llx: not a multiple of 16", n[l],
                        (unsigned long long)p[l]);
        if (!may_access(*w.b, p[l], p[l] + n[l]))
            return trap(*w.b, &in, "prefetch of %u bytes at %#llx: outside of allocations", n[l],
                        (unsigned long long)p[l]);
        if (!logs) continue;
        std::lock_guard<std::mutex> g(machine.lock);
        machine.prefetches.push_back({p[l], n[l]});
    }
}

/* ---- Across the lanes ---------------------------------------------------------------------------------------------- */

enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };
template <int BY> /* lanes l and l ^ BY exchange */
static inline void exchange(u32 *d, const u32 *a) {
    u32 r[LANES];
    for (int i = 0; i < LANES; i += 2 * BY)
        for (int l = i; l < i + BY; l++) r[l] = a[l + BY], r[l + BY] = a[l];
    memcpy(d, r, sizeof r);
}
template <int HOW>
static void shfl(Warp &w, const Insn &in) { /* d, p, a, b, c, members */
    u32 *d = dst<u32>(w, in.o[0]);
    const u32 *a = src<u32>(w, in.o[2]), *b = src<u32>(w, in.o[3]), *c = src<u32>(w, in.o[4]), m = w.m;
    if (HOW == SHFL_BFLY && m == FULL && in.o[3] < 0 && in.o[4] < 0 && (c[0] & 0x1F1F) == 31) {
        if (in.o[1] != NONE) set_pred(w, in.o[1], FULL);
        switch (b[0] & 31) { /* what sums over a warp are made of */
        case 1: return exchange<1>(d, a);
        case 2: return exchange<2>(d, a);
        case 4: return exchange<4>(d, a);
        case 8: return exchange<8>(d, a);
        case 16: return exchange<16>(d, a);
        }
    }
    alignas(64) u32 r[LANES], taken[LANES];
    alignas(64) s32 from[LANES];
    alignas(64) u8 valid[LANES];
    EACH_LANE {
        const int by = (int)(b[l] & 31), clamp = (int)(c[l] & 31), seg = (int)(c[l] >> 8 & 31);
        const int top = (l & seg) | (clamp & ~seg), bottom = l & seg;
        const int j = HOW == SHFL_UP     ? l - by
                      : HOW == SHFL_DOWN ? l + by
                      : HOW == SHFL_BFLY ? l ^ by
                                         : bottom | (by & ~seg);
        const bool p = HOW == SHFL_UP ? j >= top : j <= top;
        from[l] = p ? j : l, valid[l] = p;
    }
    EACH_LANE taken[l] = m >> l & 1 ? a[l] : 0xDEADBEEFu; /* of a lane that does not take part: undefined */
    for (int l = 0; l < LANES; l++) r[l] = taken[from[l]];
    EACH_LANE d[l] = m >> l & 1 ? r[l] : d[l];
    if (in.o[1] != NONE) set_pred(w, in.o[1], gathered_bits(valid));
}
enum { VOTE_ANY, VOTE_ALL, VOTE_UNI, VOTE_BALLOT };
template <int HOW>
static void vote(Warp &w, const Insn &in) { /* d, p, members */
    u32 p = get_pred(w, in.o[1]);
    if (in.n == 2) p = ~p;
    p &= w.m;
    if (HOW == VOTE_BALLOT) {
        u32 *d = dst<u32>(w, in.o[0]);
        for (int l = 0; l < LANES; l++)
            if (w.m >> l & 1) d[l] = p;
        return;
    }
    const bool r = HOW == VOTE_ANY ? p != 0 : HOW == VOTE_ALL ? p == w.m : p == 0 || p == w.m;
    set_pred(w, in.o[0], r ? FULL : 0);
}
template <class T, int OP>
static void redux(Warp &w, const Insn &in) { /* d, a, members */
    const T *a = src<T>(w, in.o[1]);
    bool any = false;
    T r = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(w.m >> l & 1)) continue;
        const T x = a[l];
        r = !any          ? x
            : OP == A_ADD ? (T)(r + x)
            : OP == A_MIN ? std::min(r, x)
            : OP == A_MAX ? std::max(r, x)
            : OP == A_OR  ? (T)(r | x)
            : OP == A_AND ? (T)(r & x)
                          : (T)(r ^ x);
        any = true;
    }
    T *d = dst<T>(w, in.o[0]);
    for (int l = 0; l < LANES; l++)
        if (w.m >> l & 1) d[l] = r;
}

/* ---- Tensor cores: PTX ISA, "Matrix fragments for mma.m16n8k16 / m16n8k64", "Block scaling", "ldmatrix" --------------- */

/* A matrix of eight rows of eight halves, its columns one after the other. */
static inline void transpose(const u16 *const row[8], u16 *out) {
    typedef u16 Halves __attribute__((vector_size(16)));
    for (int k = 0; k < 8; k++) {
        const Halves column = {row[0][k], row[1][k], row[2][k], row[3][k], row[4][k], row[5][k], row[6][k], row[7][k]};
        memcpy(out + 8 * k, &column, sizeof column);
    }
}

/* ldmatrix.m8n8.x4: matrix i has its row addresses in lanes 8i .. 8i + 7, rows of 16 bytes. Lane l gets of matrix i row
 * l / 4, elements 2 (l % 4) and the next one; transposed: of column l / 4. o[0]: addresses, o[1..4]: results. */
template <bool TRANS>
static void ldmatrix(Warp &w, const Insn &in) {
    Places at;
    const uintptr_t *const a = at.a;
    w.m = in.n == 4 ? FULL : (1u << 8 * in.n) - 1;
    const bool ok = addresses(w, in, SHARED, 16, at, in.o[0], in.imm);
    w.m = FULL;
    if (!ok) return;
    for (int l = 0; machine.races && l < 8 * in.n; l++)
        races_shared(w, in, l, (u32)(a[l] - (uintptr_t)w.b->shared), 16, READ);
    for (int i = 0; i < 4 && i < in.n; i++) { /* after all addresses are read */
        const u16 *row[8];
        u16 *const d = dst<u16>(w, in.o[1 + i]);
        for (int g = 0; g < 8; g++) row[g] = (const u16 *)a[8 * i + g];
        if (TRANS) transpose(row, d);
        else
            for (int g = 0; g < 8; g++) memcpy(d + 8 * g, row[g], 16);
    }
}

/* Adds n numbers: aligned to the largest exponent, cut off `more` bits behind the 24 of F32, and then to F32. */
static inline f32 cut_sum(const f32 *x, int n, int stride, int more) {
    f64 top = 0, s = 0;
    for (int i = 0; i < n; i++) top = std::max(top, std::fabs((f64)x[i * stride])), s += (f64)x[i * stride];
    if (!(std::fabs(s) <= 1.7e308) || top == 0) return (f32)s; /* infinite, NaN, 0 */
    const f64 unit = std::ldexp(1.0, ilogb(top) - 23 - more);
    s = 0;
    for (int i = 0; i < n; i++) s += trunc((f64)x[i * stride] / unit);
    s *= unit;
    const f32 r = (f32)s;
    return std::fabs((f64)r) > std::fabs(s) ? float_of(bits_of(r) - 1) : r;
}

/* Numbers of eight columns. */
typedef f32 Columns __attribute__((vector_size(32)));
typedef s32 ColumnBits __attribute__((vector_size(32)));
typedef f64 WideColumns __attribute__((vector_size(64)));

/* The same of the columns of x. What is aligned has 26 bits: 16 of them add up exactly in 32. */
template <int n>
static inline Columns cut_sums(const Columns *x, int more) {
    Columns top = {}, all = {};
    for (int i = 0; i < n; i++) {
        const Columns size = (Columns)((ColumnBits)x[i] & 0x7FFFFFFF);
        top = size > top ? size : top;
        all += size;
    }
    const ColumnBits unusual = ~((all < 0x1p120f) & ((top > 0x1p-90f) | (top == 0)));
    top = top > 0 ? top : top + 1;
    const ColumnBits shift = 127 + 23 + more - ((ColumnBits)top >> 23);
    const Columns scale = (Columns)((127 + shift) << 23), unit = (Columns)((127 - shift) << 23);
    WideColumns sum = {};
    for (int i0 = 0; i0 < n; i0 += 16) {
        ColumnBits some = {};
        for (int i = i0; i < std::min(n, i0 + 16); i++) some += __builtin_convertvector(x[i] * scale, ColumnBits);
        sum += __builtin_convertvector(some, WideColumns);
    }
    sum *= __builtin_convertvector(unit, WideColumns);
    Columns r = __builtin_convertvector(sum, Columns);
    const WideColumns back = __builtin_convertvector(r, WideColumns);
    for (int c = 0; c < 8; c++) {
        if (std::fabs(back[c]) > std::fabs(sum[c])) r[c] = float_of(bits_of(r[c]) - 1);
        if (unusual[c]) r[c] = cut_sum((const f32 *)x + c, n, 8, more);
    }
    return r;
}

static inline Columns fma_columns(f32 a, Columns b, Columns c) {
    for (int i = 0; i < 8; i++) c[i] = __builtin_fmaf(a, b[i], c[i]);
    return c;
}
/* A row of C as registers have it: its even columns before its odd ones. The columns of B are put into that order. */
static const int column_order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
static inline void read_sums(const Warp &w, const s32 *o, Columns C[16]) {
    for (int i = 0; i < 4; i++)
        for (int g = 0; g < 8; g++) memcpy((f32 *)&C[g + 8 * (i / 2)] + 4 * (i % 2), src<f32>(w, o[i]) + 4 * g, 16);
}
static inline void write_sums(Warp &w, const s32 *o, const Columns C[16]) {
    for (int i = 0; i < 4; i++)
        for (int g = 0; g < 8; g++)
            memcpy(dst<f32>(w, o[i]) + 4 * g, (const f32 *)&C[g + 8 * (i / 2)] + 4 * (i % 2), 16);
}

/* mma.m16n8k16, f16 with f32 sums: with g = lane / 4, t = lane % 4
 *   a_i (i = 0..7): row g for i in {0,1,4,5}, otherwise g + 8; column 2t + (i & 1), + 8 for i >= 4
 *   b_i (i = 0..3): row 2t + (i & 1), + 8 for i >= 2; column g
 *   c_i (i = 0..3): row g, + 8 for i >= 2; column 2t + (i & 1)
 * The halves of a register of A are eight rows of eight, those of B eight columns of eight. */
static void mma_16816(Warp &w, const Insn &in) {
    const s32 *o = w.b->k->ext.data() + in.target;
    alignas(64) f32 A[4][8][8]; /* of each register */
    alignas(64) Columns B[16], C[16];
    for (int r = 0; r < 4; r++) {
        alignas(64) u16 a[2 * LANES];
        memcpy(a, src<u32>(w, o[4 + r]), sizeof a);
        half_values(a, A[r][0]);
    }
    for (int r = 0; r < 2; r++) {
        alignas(64) u16 b[2 * LANES], t[2 * LANES];
        const u16 *column[8];
        memcpy(b, src<u32>(w, o[8 + r]), sizeof b);
        for (int c = 0; c < 8; c++) column[c] = b + 8 * column_order[c];
        transpose(column, t);
        half_values(t, (f32 *)&B[8 * r]);
    }
    read_sums(w, o + 10, C);
    const int cut = machine.mma_truncates;
    for (int r = 0; cut && r < 16; r++) {
        Columns x[16 + 1]; /* the products, which are exact, after them C */
        for (int k = 0; k < 16; k++) x[k] = A[r / 8 + 2 * (k / 8)][r % 8][k % 8] * B[k];
        x[16] = C[r];
        if (cut == 8) { /* C comes with the first ones, their sum with the others */
            std::swap(x[8], x[16]);
            x[8] = cut_sums<9>(x, 1);
            C[r] = cut_sums<9>(x + 8, 1);
        } else C[r] = cut_sums<17>(x, 2);
    }
    for (int half = 0; !cut && half < 2; half++) {
        Columns s[8] = {};
        for (int k = 0; k < 16; k++) {
            const f32(*a)[8] = A[half + 2 * (k / 8)];
#pragma GCC unroll 8
            for (int g = 0; g < 8; g++) s[g] = fma_columns(a[g][k % 8], B[k], s[g]);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) C[8 * half + g] += s[g];
    }
    write_sums(w, o, C);
}

/* The four bits of an E2M1 number, as the upper ones of an F32 with its smallest exponents. */
static inline f32 e2m1_value(u32 code) { return float_of((code & 8) << 28 | (code & 7) << 22) * 0x1p126f; }

/* mma.m16n8k64, e2m1 with ue4m3 scales per 16 values (scale_vec::4X):
 *   a_i (i = 0..31, four bits each): row g for i < 8 and 16 <= i < 24, otherwise g + 8; column 8t + (i & 7), + 32 for i >= 16
 *   b_i (i = 0..15): row 8t + (i & 7), + 32 for i >= 8; column g
 * Scales: a register holds the four of one row of A or column of B, byte j for k = 16j .. 16j + 15. With thread-id-a = p,
 * row g comes from lane 4g + 2p, row g + 8 from lane 4g + 2p + 1; with thread-id-b = q, column g from lane 4g + q. */
static void mma_16864(Warp &w, const Insn &in) {
    const s32 *o = w.b->k->ext.data() + in.target;
    const int p = (int)(in.imm & 15), q = (int)(in.imm >> 4 & 15);
    alignas(64) f32 A[4][8][32]; /* of each register */
    alignas(64) Columns B[64], C[16], SB[4];
    f32 SA[16][4];
    const u32 *sa = src<u32>(w, o[14]), *sb = src<u32>(w, o[15]);
    for (int r = 0; r < 4; r++) {
        const u32 *a = src<u32>(w, o[4 + r]);
        f32 *v = A[r][0];
        for (int l = 0; l < LANES; l++, v += 8)
            for (int i = 0; i < 8; i++) v[i] = e2m1_value(a[l] >> 4 * i);
    }
    for (int at = 0; at < 8; at++) { /* eight numbers of each column */
        const u32 *b = src<u32>(w, o[8 + at / 4]) + at % 4;
        u32 column[8];
        f32 *v = (f32 *)&B[8 * at];
        for (int c = 0; c < 8; c++) column[c] = b[4 * column_order[c]];
        for (int i = 0; i < 8; i++, v += 8)
            for (int c = 0; c < 8; c++) v[c] = e2m1_value(column[c] >> 4 * i);
    }
    read_sums(w, o + 10, C);
    for (int j = 0; j < 4; j++) {
        for (int r = 0; r < 16; r++)
            SA[r][j] = e4m3_value((sa[4 * (r % 8) + 2 * p + r / 8] >> 8 * j & 0x7F)); /* unsigned */
        for (int c = 0; c < 8; c++) SB[j][c] = e4m3_value((sb[4 * column_order[c] + q] >> 8 * j & 0x7F));
    }
    for (int r = 0; machine.mma_truncates && r < 16; r++) {
        Columns x[64 + 1]; /* the products, which are exact, after them C */
        for (int k = 0; k < 64; k++)
            x[k] = A[r / 8 + 2 * (k / 32)][r % 8][k % 32] * B[k] * (SA[r][k / 16] * SB[k / 16]);
        x[64] = C[r];
        C[r] = cut_sums<65>(x, 2);
    }
    for (int half = 0; !machine.mma_truncates && half < 2; half++) {
        f64 sum[8][8];
        for (int g = 0; g < 8; g++)
            for (int c = 0; c < 8; c++) sum[g][c] = C[8 * half + g][c];
        for (int j = 0; j < 4; j++) { /* 16 products of E2M1 add up exactly in F32 */
            Columns s[8] = {};
            for (int k = 16 * j; k < 16 * j + 16; k++) {
                const f32(*a)[32] = A[half + 2 * (k / 32)];
#pragma GCC unroll 8
                for (int g = 0; g < 8; g++) s[g] = fma_columns(a[g][k % 32], B[k], s[g]);
            }
            for (int g = 0; g < 8; g++)
                for (int c = 0; c < 8; c++) sum[g][c] += (f64)s[g][c] * ((f64)SA[8 * half + g][j] * SB[j][c]);
        }
        for (int g = 0; g < 8; g++)
            for (int c = 0; c < 8; c++) C[8 * half + g][c] = (f32)sum[g][c];
    }
    write_sums(w, o, C);
}

} // namespace ptxsim
