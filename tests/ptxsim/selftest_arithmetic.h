/* Arithmetic of the simulator's self-test: operands, truths, and a table of instructions with a check of each result.
 * Included by selftest.cu alone. */
/* ---- Operands ---------------------------------------------------------------------------------------------------- */

static u64 random_state = 1;
static u64 random_bits() { /* splitmix64 */
    u64 z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static std::vector<u32> random_words(size_t n) {
    std::vector<u32> v(n);
    for (u32 &x : v) x = (u32)random_bits();
    return v;
}

static float F(u32 u) { return f32_from_bits(u); }
static u32 B(float f) { return f32_to_bits(f); }
static double D(u64 u) {
    double f;
    memcpy(&f, &u, 8);
    return f;
}
static u64 BD(double f) {
    u64 u;
    memcpy(&u, &f, 8);
    return u;
}

static const u64 int_edges[] = {0,          1,
                                2,          3,
                                7,          8,
                                15,         16,
                                31,         32,
                                33,         63,
                                64,         65,
                                100,        127,
                                128,        255,
                                256,        0x7FFF,
                                0x8000,     0xFFFF,
                                0x10000,    0x12345678,
                                ~0ull,      ~1ull,
                                ~127ull,    0x55555555,
                                0xAAAAAAAA, 0x7FFFFFFF,
                                0x80000000, 0xFFFFFFFF,
                                1ull << 32, 0x123456789ABCDEF0,
                                INT64_MAX,  (u64)INT64_MIN};
static const u32 float_edges[] = {0x00000000, 0x00000001, 0x00000002, 0x007FFFFF, 0x00800000, 0x00800001, 0x33800000,
                                  0x34000000, 0x38800000, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FC00000,
                                  0x40000000, 0x40200000, 0x40490FDB, 0x43E00000, 0x477FE000, 0x4B000001, 0x4F000000,
                                  0x7E800000, 0x7E800001, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000};
enum { INT_EDGES = sizeof int_edges / sizeof *int_edges, FLOAT_EDGES = 2 * sizeof float_edges / sizeof *float_edges };

static u64 edge_f32(size_t i) { return float_edges[i / 2] | (i & 1 ? 0x80000000u : 0); }
static u64 edge_f64(size_t i) { /* those of f32 as f64, among them subnormals of f64 in place of f32's */
    const u32 u = (u32)edge_f32(i), a = u & 0x7FFFFFFF;
    const u64 sign = (u64)(u >> 31) << 63;
    if (a < 0x00800000) return sign | a;
    if (a == 0x7F7FFFFF) return sign | 0x7FEFFFFFFFFFFFFF;
    return a > 0x7F800000 ? sign | 0x7FF8000000000000 : BD((double)F(u));
}

enum Inputs { INTS, FLOATS, DOUBLES, HALVES, ALL16, SWEEP };
struct Operands {
    std::vector<u64> v[3];
};

/* x: random bits, which stay in every fourth case; otherwise moderate numbers, of which some sums cancel. */
static void float_case(size_t i, u64 x[3]) {
    if (i % 4 == 0) return;
    u32 f[3];
    for (int k = 0; k < 3; k++) f[k] = ((u32)x[k] & 0x807FFFFF) | (110 + (u32)(x[k] >> 32) % 30) << 23;
    if (i % 4 == 2) f[2] = B(-F(f[0]) * F(f[1])) + (u32)(random_bits() % 3) - 1;
    if (i % 4 == 3) f[1] = (f[0] ^ 0x80000000) + (u32)(random_bits() % 5) - 2;
    for (int k = 0; k < 3; k++) x[k] = f[k];
}
static void double_case(size_t i, u64 x[3]) {
    if (i % 4 == 0) return;
    float_case(i, x);
    for (int k = 0; k < 3; k++) /* at, between and next to values of F32 */
        x[k] = BD((double)F((u32)x[k])) + (i % 8 < 4 ? 0 : 1ull << 28) + random_bits() % 3 - 1;
    if (i % 4 == 2) x[2] = BD(-D(x[0]) * D(x[1])) + random_bits() % 3 - 1;
}

/* Every 7919th float, all values of F16 and BF16, the numbers half-way between them, and neighbors. */
static const std::vector<u32> &sweep() {
    static std::vector<u32> v;
    if (!v.empty()) return v;
    for (u64 i = 0; i < 1ull << 32; i += 7919) v.push_back((u32)i);
    for (u32 i = 0; i < 65536; i++) {
        const float f16 = f16_to_f32((u16)i);
        const u32 tie = fabsf(f16) < 0x1p-14f ? B(f16 + 0x1p-25f) : B(f16) + 0x1000;
        v.push_back(i << 16);
        for (u32 at : {B(f16), tie, i << 16 | 0x8000})
            for (u32 k = 0; k < 3; k++) v.push_back(at + k - 1);
    }
    return v;
}

/* Operands of an instruction: all pairs of edges, then edges at random, then a mix for each kind. */
static Operands operands(Inputs kind) {
    static const size_t count[] = {16384, 65536, 65536, 131072, 65536, 0};
    Operands o;
    const size_t n = kind == SWEEP ? sweep().size() : count[kind], edges = kind == INTS ? INT_EDGES : FLOAT_EDGES;
    auto edge = [&](size_t i) { return kind == INTS ? int_edges[i] : kind == FLOATS ? edge_f32(i) : edge_f64(i); };
    random_state = (u64)kind + 1;
    for (auto &v : o.v) v.resize(n);
    for (size_t i = 0; i < n; i++) {
        u64 x[3] = {random_bits(), random_bits(), random_bits()};
        if (kind <= DOUBLES && i < n / 4) {
            const bool pairs = i < edges * edges;
            const size_t at[3] = {pairs ? i % edges : x[0] % edges, pairs ? i / edges : x[1] % edges, x[2] % edges};
            for (int k = 0; k < 3; k++) x[k] = edge(at[k]);
        } else if (kind == INTS) {
            for (int k = 0; k < 3; k++) {
                const u64 how = random_bits() % 4;
                if (how == 0) x[k] = edge(x[k] % edges);
                if (how == 1) x[k] &= 0x3F3F; /* shifts, positions and lengths */
            }
        } else if (kind == FLOATS) {
            float_case(i, x);
        } else if (kind == DOUBLES) {
            double_case(i, x);
        } else if (kind == HALVES) {
            x[0] = (x[0] & 0xFFFF0000) | (u16)i;
            if (i & 65536) x[1] = (x[0] & 0xC400C400) ^ (x[1] & 0x83FF83FF); /* of near exponents */
        } else if (kind == ALL16) {
            x[0] = i;
        } else {
            x[0] = sweep()[i], x[1] = sweep()[(i * 7 + 12345) % n];
        }
        for (int k = 0; k < 3; k++) o.v[k][i] = x[k];
    }
    return o;
}

/* ---- Arithmetic -------------------------------------------------------------------------------------------------- */

/* Whether a result is the number wanted, bit for bit, or any NaN where NaN is wanted. */
static bool same(u32 d, float want) { return want != want ? F(d) != F(d) : d == B(want); }
static bool same(u64 d, double want) { return want != want ? D(d) != D(d) : d == BD(want); }
static bool same16(u16 d, u16 want, u16 infinity) {
    return (want & 0x7FFF) > infinity ? (d & 0x7FFF) > infinity : d == want;
}
/* Whether a result is close to the number wanted: by its distance in representable values, relatively, absolutely. */
static bool within_ulps(u32 d, double want, int n) {
    const float w = (float)want;
    if (w != w) return F(d) != F(d);
    auto ordered = [](u32 u) { return u >> 31 ? -(int64_t)(u & 0x7FFFFFFF) : (int64_t)u; };
    return F(d) == F(d) && llabs(ordered(d) - ordered(B(w))) <= n;
}
static bool within_share(u32 d, double want, double share) {
    if (want != want) return F(d) != F(d);
    return std::isinf(want) ? F(d) == want : fabs((double)F(d) - want) <= share * fabs(want);
}
static bool within(u32 d, double want, double distance) {
    if (want != want) return F(d) != F(d);
    return std::isinf(want) ? F(d) == want : fabs((double)F(d) - want) <= distance;
}
static bool subnormal(u32 a) { return (a & 0x7FFFFFFF) < 0x00800000 && (a & 0x7FFFFFFF); }

template <class T>
static T rounded(int mode, T a, T b) {
    volatile T x = a, y = b;
    fesetround(mode);
    volatile T r = x + y;
    fesetround(FE_TONEAREST);
    return r;
}
static float rounded_fma(int mode, float a, float b, float c) {
    volatile float x = a, y = b, z = c;
    fesetround(mode);
    volatile float r = fmaf(x, y, z);
    fesetround(FE_TONEAREST);
    return r;
}

/* minimum and maximum of the ISA: a NaN gives way to a number, and -0 is below +0. */
template <class T>
static T lesser(T a, T b) {
    if (a != a || b != b) return a != a ? b : a;
    return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T>
static T greater(T a, T b) {
    return -lesser(-a, -b);
}

template <class T>
static T bits_extracted(T a, u32 from, u32 count) { /* the ISA's loop over bits */
    T d = 0;
    for (u32 i = 0; i < 8 * sizeof(T); i++)
        if (i < count && from + i < 8 * sizeof(T)) d |= (a >> (from + i) & 1) << i;
    return d;
}
template <class T>
static T bits_inserted(T a, T b, u32 from, u32 count) {
    for (u32 i = 0; i < count && from + i < 8 * sizeof(T); i++)
        b = (b & ~((T)1 << (from + i))) | (a >> i & 1) << (from + i);
    return b;
}
static u32 bits_reversed(u32 a) {
    u32 d = 0;
    for (int i = 0; i < 32; i++) d |= (a >> i & 1) << (31 - i);
    return d;
}
static u32 bytes_permuted(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int i = 0; i < 4; i++) {
        const u32 from = c >> 4 * i & 15, word = from & 4 ? b : a, byte = word >> 8 * (from & 3) & 255;
        d |= (from & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return d;
}
template <class T>
static T shifted_left(T a, u32 n) {
    return n >= 8 * sizeof(T) ? (T)0 : (T)(a << n);
}
template <class T>
static T shifted_right(T a, u32 n) {
    return (T)(a >> (n >= 8 * sizeof(T) ? 8 * sizeof(T) - 1 : n) >> (n >= 8 * sizeof(T) ? 1 : 0));
}

static u16 half_of(double x) { return __half_as_ushort(__double2half(x)); }
static double half_value(u32 h) { return f16_to_f32((u16)h); }
static bool halves(u32 d, u16 high, u16 low, u16 infinity = 0x7C00) {
    return same16((u16)(d >> 16), high, infinity) && same16((u16)d, low, infinity);
}
static u16 to_f16(u32 a) { /* two codecs have to agree */
    const u16 h = f16_from_f32(F(a)), other = __half_as_ushort(__float2half_rn(F(a)));
    return same16(h, other, 0x7C00) ? h : (printf("codecs of F16 differ at %#x\n", a), exit(1), h);
}
static u16 to_f16_finite(u32 a) {
    const u16 h = to_f16(a);
    return (h & 0x7FFF) == 0x7C00 ? (u16)(h - 1) : h;
}
static u16 to_bf16(u32 a) {
    const u16 h = bf16_from_f32(F(a)), other = __bfloat16_as_ushort(__float2bfloat16_rn(F(a)));
    return same16(h, other, 0x7F80) ? h : (printf("codecs of BF16 differ at %#x\n", a), exit(1), h);
}
static bool is_e4m3(u32 d, u32 a) {
    const u8 code = e4m3_from_f32(F(a)), other = __nv_cvt_float_to_fp8(F(a), __NV_SATFINITE, __NV_E4M3);
    if (F(a) != F(a)) return d == 0x7F;
    return (d & 255) == code && code == other;
}
static bool is_e2m1(u32 d, u32 a) { /* the nearest code, ties to the even one; NaN gives the largest number */
    const float x = fminf(fabsf(F(a)), 8);
    if (F(a) != F(a)) return d == 7;
    int best = 0;
    for (int i = 1; i < 8; i++) {
        const double now = fabs((double)e2m1_to_f32((u8)best) - x), other = fabs((double)e2m1_to_f32((u8)i) - x);
        if (other < now || (other == now && !(i & 1))) best = i;
    }
    return d == ((u32)best | (a >> 31) << 3) && d == __nv_cvt_float_to_fp4(F(a), __NV_E2M1, cudaRoundNearest);
}
static u16 e4m3_half(u32 code) { /* every value of E4M3 is one of F16 */
    const float v = e4m3_to_f32((u8)code);
    return v != v ? 0x7FFF : f16_from_f32(v);
}

/* cvt from f32 to integers: clamps to the type, and NaN gives 0. */
template <class T>
static T to_integer(double x) {
    if (x != x) return 0;
    if (x >= (double)std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
    return x <= (double)std::numeric_limits<T>::min() ? std::numeric_limits<T>::min() : (T)x;
}

/* Of the ISA: 2 ulp for divisors of 2^-126 to 2^126; above, 0 with the sign, or NaN of infinity; below, nothing. */
static bool is_quotient(u32 d, u32 a, u32 b) {
    const float divisor = fabsf(F(b));
    if (subnormal(b)) return true;
    if (divisor > 0x1p126f && !std::isinf(divisor))
        return F(a) != F(a) || std::isinf(F(a)) ? F(d) != F(d) : (d & 0x7FFFFFFF) == 0 && d >> 31 == (a ^ b) >> 31;
    return within_ulps(d, (double)F(a) / (double)F(b), 2);
}
/* 2 ulp; subnormal operands count as 0, and subnormal results are 0. */
static bool is_flushed_power(u32 d, u32 a) {
    const double want = subnormal(a) ? 1 : exp2((double)F(a));
    if (subnormal(d)) return false;
    return (d == 0 && want < 0x1.000004p-126) || within_ulps(d, want, 2);
}
/* An absolute error of 2^-22 between 0.5 and 2, a relative one of 2^-22 elsewhere. */
static bool is_logarithm(u32 d, u32 a) {
    const float x = F(a);
    if (a >> 31 && subnormal(a)) return true;
    return x > 0.5f && x < 2 ? within(d, log2((double)x), 0x1p-22) : within_share(d, log2((double)x), 0x1p-22);
}

#define PREDICATE(x) ".reg .pred p; .reg .b32 n; and.b32 n, " x ", 1; setp.ne.u32 p, n, 0; "
#define PREDICATES \
    ".reg .pred p, q; .reg .b32 n; and.b32 n, %1, 1; setp.ne.u32 p, n, 0; and.b32 n, %2, 1; setp.ne.u32 q, n, 0; "
#define SHOW " selp.u32 %0, 1, 0, p;"

/* X(name, capability, operands, registers of d, a, b, c, instructions with %0 = d, %1.. = a.., whether d is right) */
/* clang-format off */
#define INTEGER_OPS(X)                                                                                                 \
    X(add_s16, 80, INTS, h, h, h, h, "add.s16 %0, %1, %2;", d == (u16)(a + b))                                         \
    X(add_s32, 80, INTS, r, r, r, r, "add.s32 %0, %1, %2;", d == a + b)                                                \
    X(add_s64, 80, INTS, l, l, l, l, "add.s64 %0, %1, %2;", d == a + b)                                                \
    X(add_u64, 80, INTS, l, l, l, l, "add.u64 %0, %1, %2;", d == a + b)                                                \
    X(sub_s16, 80, INTS, h, h, h, h, "sub.s16 %0, %1, %2;", d == (u16)(a - b))                                         \
    X(sub_s32, 80, INTS, r, r, r, r, "sub.s32 %0, %1, %2;", d == a - b)                                                \
    X(sub_s64, 80, INTS, l, l, l, l, "sub.s64 %0, %1, %2;", d == a - b)                                                \
    X(mul_lo_s16, 80, INTS, h, h, h, h, "mul.lo.s16 %0, %1, %2;", d == (u16)((u32)a * b))                              \
    X(mul_lo_s32, 80, INTS, r, r, r, r, "mul.lo.s32 %0, %1, %2;", d == a * b)                                          \
    X(mul_lo_s64, 80, INTS, l, l, l, l, "mul.lo.s64 %0, %1, %2;", d == a * b)                                          \
    X(mul_hi_s16, 80, INTS, h, h, h, h, "mul.hi.s16 %0, %1, %2;", d == (u16)((int16_t)a * (int16_t)b >> 16))           \
    X(mul_hi_u16, 80, INTS, h, h, h, h, "mul.hi.u16 %0, %1, %2;", d == (u16)((u32)a * b >> 16))                        \
    X(mul_hi_s32, 80, INTS, r, r, r, r, "mul.hi.s32 %0, %1, %2;", d == (u32)((int64_t)(int)a * (int)b >> 32))          \
    X(mul_hi_u32, 80, INTS, r, r, r, r, "mul.hi.u32 %0, %1, %2;", d == (u32)((u64)a * b >> 32))                        \
    X(mul_hi_s64, 80, INTS, l, l, l, l, "mul.hi.s64 %0, %1, %2;", d == (u64)((__int128)(int64_t)a * (int64_t)b >> 64)) \
    X(mul_hi_u64, 80, INTS, l, l, l, l, "mul.hi.u64 %0, %1, %2;", d == (u64)((unsigned __int128)a * b >> 64))          \
    X(mul_wide_s16, 80, INTS, r, h, h, h, "mul.wide.s16 %0, %1, %2;", d == (u32)((int16_t)a * (int16_t)b))             \
    X(mul_wide_u16, 80, INTS, r, h, h, h, "mul.wide.u16 %0, %1, %2;", d == (u32)a * b)                                 \
    X(mul_wide_s32, 80, INTS, l, r, r, r, "mul.wide.s32 %0, %1, %2;", d == (u64)((int64_t)(int)a * (int)b))            \
    X(mul_wide_u32, 80, INTS, l, r, r, r, "mul.wide.u32 %0, %1, %2;", d == (u64)a * b)                                 \
    X(mad_lo_s16, 80, INTS, h, h, h, h, "mad.lo.s16 %0, %1, %2, %3;", d == (u16)((u32)a * b + c))                      \
    X(mad_lo_s32, 80, INTS, r, r, r, r, "mad.lo.s32 %0, %1, %2, %3;", d == a * b + c)                                  \
    X(mad_lo_s64, 80, INTS, l, l, l, l, "mad.lo.s64 %0, %1, %2, %3;", d == a * b + c)                                  \
    X(mad_wide_u16, 80, INTS, r, h, h, r, "mad.wide.u16 %0, %1, %2, %3;", d == (u32)a * b + c)                         \
    X(mad_wide_s32, 80, INTS, l, r, r, l, "mad.wide.s32 %0, %1, %2, %3;", d == (u64)((int64_t)(int)a * (int)b) + c)    \
    X(mad_wide_u32, 80, INTS, l, r, r, l, "mad.wide.u32 %0, %1, %2, %3;", d == (u64)a * b + c)                         \
    X(div_s32, 80, INTS, r, r, r, r, "div.s32 %0, %1, %2;", !b || b == ~0u || d == (u32)((int)a / (int)b))             \
    X(div_u32, 80, INTS, r, r, r, r, "div.u32 %0, %1, %2;", !b || d == a / b)                                          \
    X(div_s64, 80, INTS, l, l, l, l, "div.s64 %0, %1, %2;", !b || b == ~0ull || d == (u64)((int64_t)a / (int64_t)b))   \
    X(div_u64, 80, INTS, l, l, l, l, "div.u64 %0, %1, %2;", !b || d == a / b)                                          \
    X(rem_s32, 80, INTS, r, r, r, r, "rem.s32 %0, %1, %2;", !b || b == ~0u || d == (u32)((int)a % (int)b))             \
    X(rem_u32, 80, INTS, r, r, r, r, "rem.u32 %0, %1, %2;", !b || d == a % b)                                          \
    X(rem_u64, 80, INTS, l, l, l, l, "rem.u64 %0, %1, %2;", !b || d == a % b)                                          \
    X(neg_s16, 80, INTS, h, h, h, h, "neg.s16 %0, %1;", d == (u16)-a)                                                  \
    X(neg_s32, 80, INTS, r, r, r, r, "neg.s32 %0, %1;", d == -a)                                                       \
    X(neg_s64, 80, INTS, l, l, l, l, "neg.s64 %0, %1;", d == -a)                                                       \
    X(abs_s32, 80, INTS, r, r, r, r, "abs.s32 %0, %1;", d == (a >> 31 ? -a : a))                                       \
    X(abs_s64, 80, INTS, l, l, l, l, "abs.s64 %0, %1;", d == (a >> 63 ? -a : a))                                       \
    X(min_s16, 80, INTS, h, h, h, h, "min.s16 %0, %1, %2;", d == (u16)std::min((int16_t)a, (int16_t)b))                \
    X(min_u16, 80, INTS, h, h, h, h, "min.u16 %0, %1, %2;", d == std::min(a, b))                                       \
    X(min_s32, 80, INTS, r, r, r, r, "min.s32 %0, %1, %2;", d == (u32)std::min((int)a, (int)b))                        \
    X(min_u32, 80, INTS, r, r, r, r, "min.u32 %0, %1, %2;", d == std::min(a, b))                                       \
    X(min_s64, 80, INTS, l, l, l, l, "min.s64 %0, %1, %2;", d == (u64)std::min((int64_t)a, (int64_t)b))                \
    X(max_s32, 80, INTS, r, r, r, r, "max.s32 %0, %1, %2;", d == (u32)std::max((int)a, (int)b))                        \
    X(max_u32, 80, INTS, r, r, r, r, "max.u32 %0, %1, %2;", d == std::max(a, b))                                       \
    X(max_u64, 80, INTS, l, l, l, l, "max.u64 %0, %1, %2;", d == std::max(a, b))                                       \
    X(and_b16, 80, INTS, h, h, h, h, "and.b16 %0, %1, %2;", d == (a & b))                                              \
    X(and_b32, 80, INTS, r, r, r, r, "and.b32 %0, %1, %2;", d == (a & b))                                              \
    X(and_b64, 80, INTS, l, l, l, l, "and.b64 %0, %1, %2;", d == (a & b))                                              \
    X(or_b16, 80, INTS, h, h, h, h, "or.b16 %0, %1, %2;", d == (a | b))                                                \
    X(or_b32, 80, INTS, r, r, r, r, "or.b32 %0, %1, %2;", d == (a | b))                                                \
    X(or_b64, 80, INTS, l, l, l, l, "or.b64 %0, %1, %2;", d == (a | b))                                                \
    X(xor_b16, 80, INTS, h, h, h, h, "xor.b16 %0, %1, %2;", d == (a ^ b))                                              \
    X(xor_b32, 80, INTS, r, r, r, r, "xor.b32 %0, %1, %2;", d == (a ^ b))                                              \
    X(xor_b64, 80, INTS, l, l, l, l, "xor.b64 %0, %1, %2;", d == (a ^ b))                                              \
    X(not_b16, 80, INTS, h, h, h, h, "not.b16 %0, %1;", d == (u16)~a)                                                  \
    X(not_b32, 80, INTS, r, r, r, r, "not.b32 %0, %1;", d == ~a)                                                       \
    X(not_b64, 80, INTS, l, l, l, l, "not.b64 %0, %1;", d == ~a)                                                       \
    X(shl_b16, 80, INTS, h, h, r, h, "shl.b16 %0, %1, %2;", d == shifted_left(a, b))                                   \
    X(shl_b32, 80, INTS, r, r, r, r, "shl.b32 %0, %1, %2;", d == shifted_left(a, b))                                   \
    X(shl_b64, 80, INTS, l, l, r, l, "shl.b64 %0, %1, %2;", d == shifted_left(a, b))                                   \
    X(shr_s16, 80, INTS, h, h, r, h, "shr.s16 %0, %1, %2;", d == (u16)shifted_right((int16_t)a, b))                    \
    X(shr_u16, 80, INTS, h, h, r, h, "shr.u16 %0, %1, %2;", d == shifted_right(a, b))                                  \
    X(shr_s32, 80, INTS, r, r, r, r, "shr.s32 %0, %1, %2;", d == (u32)shifted_right((int)a, b))                        \
    X(shr_u32, 80, INTS, r, r, r, r, "shr.u32 %0, %1, %2;", d == shifted_right(a, b))                                  \
    X(shr_s64, 80, INTS, l, l, r, l, "shr.s64 %0, %1, %2;", d == (u64)shifted_right((int64_t)a, b))                    \
    X(shr_u64, 80, INTS, l, l, r, l, "shr.u64 %0, %1, %2;", d == shifted_right(a, b))                                  \
    X(shf_l, 80, INTS, r, r, r, r, "shf.l.wrap.b32 %0, %1, %2, %3;", d == (u32)(((u64)b << 32 | a) << (c & 31) >> 32)) \
    X(shf_r, 80, INTS, r, r, r, r, "shf.r.wrap.b32 %0, %1, %2, %3;", d == (u32)(((u64)b << 32 | a) >> (c & 31)))       \
    X(prmt, 80, INTS, r, r, r, r, "prmt.b32 %0, %1, %2, %3;", d == bytes_permuted(a, b, c))                            \
    X(popc, 80, INTS, r, r, r, r, "popc.b32 %0, %1;", d == (u32)__builtin_popcount(a))                                 \
    X(brev, 80, INTS, r, r, r, r, "brev.b32 %0, %1;", d == bits_reversed(a))                                           \
    X(clz, 80, INTS, r, r, r, r, "clz.b32 %0, %1;", d == (a ? (u32)__builtin_clz(a) : 32))                             \
    X(bfind, 80, INTS, r, r, r, r, "bfind.u32 %0, %1;", d == (a ? 31 - (u32)__builtin_clz(a) : ~0u))                   \
    X(bfind_shift, 80, INTS, r, r, r, r, "bfind.shiftamt.u32 %0, %1;", d == (a ? (u32)__builtin_clz(a) : ~0u))         \
    X(bfe_u32, 80, INTS, r, r, r, r, "bfe.u32 %0, %1, %2, %3;", d == bits_extracted(a, b & 255, c & 255))              \
    X(bfi_b32, 80, INTS, r, r, r, r, ".reg .b32 n; shr.u32 n, %3, 8; bfi.b32 %0, %1, %2, %3, n;",                      \
      d == bits_inserted(a, b, c & 255, c >> 8 & 255))                                                                 \
    X(bfi_b64, 80, INTS, l, l, l, r, ".reg .b32 n; shr.u32 n, %3, 8; bfi.b64 %0, %1, %2, %3, n;",                      \
      d == bits_inserted(a, b, c & 255, c >> 8 & 255))                                                                 \
    X(mov_b16, 80, INTS, h, h, h, h, "mov.b16 %0, %1;", d == a)                                                        \
    X(mov_u16, 80, INTS, h, h, h, h, "mov.u16 %0, %1;", d == a)                                                        \
    X(mov_b32, 80, INTS, r, r, r, r, "mov.b32 %0, %1;", d == a)                                                        \
    X(mov_u32, 80, INTS, r, r, r, r, "mov.u32 %0, %1;", d == a)                                                        \
    X(mov_f32, 80, INTS, r, r, r, r, "mov.f32 %0, %1;", d == a)                                                        \
    X(mov_b64, 80, INTS, l, l, l, l, "mov.b64 %0, %1;", d == a)                                                        \
    X(mov_u64, 80, INTS, l, l, l, l, "mov.u64 %0, %1;", d == a)                                                        \
    X(mov_f64, 80, INTS, l, l, l, l, "mov.f64 %0, %1;", d == a)                                                        \
    X(mov_numbers, 80, INTS, l, l, l, l, ".reg .b64 x; mov.u64 %0, -3; mov.f64 x, 0d3FF8000000000000;"                 \
      " xor.b64 %0, %0, x; xor.b64 x, x, 0x1234; and.b64 x, x, %1; add.s64 %0, %0, x;",                                \
      d == (~2ull ^ BD(1.5)) + ((BD(1.5) ^ 0x1234) & a))                                                               \
    X(mov_number_f32, 80, INTS, r, r, r, r, "mov.f32 %0, 0f40490FDB; xor.b32 %0, %0, -2147483648;", d == 0xC0490FDB)   \
    X(mov_pack32, 80, INTS, r, h, h, h, "mov.b32 %0, {%1, %2};", d == ((u32)b << 16 | a))                              \
    X(mov_pack64, 80, INTS, l, r, r, r, "mov.b64 %0, {%1, %2};", d == ((u64)b << 32 | a))                              \
    X(mov_unpack32, 80, INTS, r, r, r, r, ".reg .b16 x, y; mov.b32 {x, y}, %1; mov.b32 %0, {y, x};",                   \
      d == (a << 16 | a >> 16))                                                                                        \
    X(mov_unpack64, 80, INTS, l, l, r, r, ".reg .b32 x, y; mov.b64 {x, y}, %1; mov.b64 %0, {y, x};",                   \
      d == (a << 32 | a >> 32))                                                                                        \
    X(selp_b16, 80, INTS, h, h, h, r, PREDICATE("%3") "selp.b16 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_u16, 80, INTS, h, h, h, r, PREDICATE("%3") "selp.u16 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_b32, 80, INTS, r, r, r, r, PREDICATE("%3") "selp.b32 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_s32, 80, INTS, r, r, r, r, PREDICATE("%3") "selp.s32 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_u32, 80, INTS, r, r, r, r, PREDICATE("%3") "selp.u32 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_f32, 80, INTS, r, r, r, r, PREDICATE("%3") "selp.f32 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_b64, 80, INTS, l, l, l, r, PREDICATE("%3") "selp.b64 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_u64, 80, INTS, l, l, l, r, PREDICATE("%3") "selp.u64 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(selp_f64, 80, INTS, l, l, l, r, PREDICATE("%3") "selp.f64 %0, %1, %2, p;", d == (c & 1 ? a : b))                 \
    X(and_pred, 80, INTS, r, r, r, r, PREDICATES "and.pred p, p, q;" SHOW, d == (a & b & 1))                           \
    X(or_pred, 80, INTS, r, r, r, r, PREDICATES "or.pred p, p, q;" SHOW, d == ((a | b) & 1))                           \
    X(xor_pred, 80, INTS, r, r, r, r, PREDICATES "xor.pred p, p, q;" SHOW, d == ((a ^ b) & 1))                         \
    X(not_pred, 80, INTS, r, r, r, r, PREDICATES "not.pred p, p;" SHOW, d == (~a & 1))                                 \
    X(mov_pred, 80, INTS, r, r, r, r, PREDICATES "mov.pred p, q;" SHOW, d == (b & 1))                                  \
    X(mov_pred_number, 80, INTS, r, r, r, r, PREDICATES "mov.pred p, -1; @q mov.pred p, 0;" SHOW, d == (~b & 1))       \
    X(guards, 80, INTS, r, r, r, r, PREDICATES "mov.b32 %0, %3; @p add.s32 %0, %0, %1; @!q xor.b32 %0, %0, %2;",       \
      d == ((c + (a & 1 ? a : 0)) ^ (b & 1 ? 0 : b)))                                                                  \
    X(cvt_s16_s8, 80, ALL16, h, h, h, h, "cvt.s16.s8 %0, %1;", d == (u16)(int8_t)a)                                    \
    X(cvt_u32_u8, 80, ALL16, r, h, h, h, "cvt.u32.u8 %0, %1;", d == (u8)a)                                             \
    X(cvt_u32_u16, 80, ALL16, r, h, h, h, "cvt.u32.u16 %0, %1;", d == a)                                               \
    X(cvt_s32_s16, 80, ALL16, r, h, h, h, "cvt.s32.s16 %0, %1;", d == (u32)(int16_t)a)                                 \
    X(cvt_s32_s8, 80, ALL16, r, h, h, h, "cvt.s32.s8 %0, %1;", d == (u32)(int8_t)a)                                    \
    X(cvt_u64_u16, 80, ALL16, l, h, h, h, "cvt.u64.u16 %0, %1;", d == a)                                               \
    X(cvt_s64_s16, 80, ALL16, l, h, h, h, "cvt.s64.s16 %0, %1;", d == (u64)(int16_t)a)                                 \
    X(cvt_s8_s32, 80, INTS, h, r, r, r, "cvt.s8.s32 %0, %1;", d == (u16)(int8_t)a)                                     \
    X(cvt_u8_u32, 80, INTS, h, r, r, r, "cvt.u8.u32 %0, %1;", d == (u8)a)                                              \
    X(cvt_u16_u32, 80, INTS, h, r, r, r, "cvt.u16.u32 %0, %1;", d == (u16)a)                                           \
    X(cvt_s64_s32, 80, INTS, l, r, r, r, "cvt.s64.s32 %0, %1;", d == (u64)(int)a)                                      \
    X(cvt_u64_u32, 80, INTS, l, r, r, r, "cvt.u64.u32 %0, %1;", d == a)                                                \
    X(cvt_u32_u64, 80, INTS, r, l, r, r, "cvt.u32.u64 %0, %1;", d == (u32)a)

#define FLOAT_OPS(X)                                                                                                   \
    X(add_f32, 80, FLOATS, r, r, r, r, "add.f32 %0, %1, %2;", same(d, F(a) + F(b)))                                    \
    X(add_rz_f32, 80, FLOATS, r, r, r, r, "add.rz.f32 %0, %1, %2;", same(d, rounded(FE_TOWARDZERO, F(a), F(b))))       \
    X(add_rm_f32, 80, FLOATS, r, r, r, r, "add.rm.f32 %0, %1, %2;", same(d, rounded(FE_DOWNWARD, F(a), F(b))))         \
    X(add_rp_f32, 80, FLOATS, r, r, r, r, "add.rp.f32 %0, %1, %2;", same(d, rounded(FE_UPWARD, F(a), F(b))))           \
    X(sub_f32, 80, FLOATS, r, r, r, r, "sub.f32 %0, %1, %2;", same(d, F(a) - F(b)))                                    \
    X(mul_f32, 80, FLOATS, r, r, r, r, "mul.f32 %0, %1, %2;", same(d, F(a) * F(b)))                                    \
    X(mul_rn_f32, 80, FLOATS, r, r, r, r, "mul.rn.f32 %0, %1, %2;", same(d, F(a) * F(b)))                              \
    X(fma_rn_f32, 80, FLOATS, r, r, r, r, "fma.rn.f32 %0, %1, %2, %3;", same(d, fmaf(F(a), F(b), F(c))))               \
    X(fma_rz_f32, 80, FLOATS, r, r, r, r, "fma.rz.f32 %0, %1, %2, %3;",                                                \
      same(d, rounded_fma(FE_TOWARDZERO, F(a), F(b), F(c))))                                                           \
    X(fma_rm_f32, 80, FLOATS, r, r, r, r, "fma.rm.f32 %0, %1, %2, %3;",                                                \
      same(d, rounded_fma(FE_DOWNWARD, F(a), F(b), F(c))))                                                             \
    X(fma_rp_f32, 80, FLOATS, r, r, r, r, "fma.rp.f32 %0, %1, %2, %3;",                                                \
      same(d, rounded_fma(FE_UPWARD, F(a), F(b), F(c))))                                                               \
    X(div_rn_f32, 80, FLOATS, r, r, r, r, "div.rn.f32 %0, %1, %2;", same(d, F(a) / F(b)))                              \
    X(div_full_f32, 80, FLOATS, r, r, r, r, "div.full.f32 %0, %1, %2;", within_ulps(d, (double)F(a) / (double)F(b), 2))\
    X(div_approx_f32, 80, FLOATS, r, r, r, r, "div.approx.f32 %0, %1, %2;", is_quotient(d, a, b))                      \
    X(rcp_rn_f32, 80, FLOATS, r, r, r, r, "rcp.rn.f32 %0, %1;", same(d, 1 / F(a)))                                     \
    X(sqrt_rn_f32, 80, FLOATS, r, r, r, r, "sqrt.rn.f32 %0, %1;", same(d, sqrtf(F(a))))                                \
    X(rsqrt_approx_f32, 80, FLOATS, r, r, r, r, "rsqrt.approx.f32 %0, %1;",                                            \
      (a >> 31 && subnormal(a)) || within_share(d, 1 / sqrt((double)F(a)), 0x1.12p-23))                                \
    X(ex2_approx_f32, 80, FLOATS, r, r, r, r, "ex2.approx.f32 %0, %1;", within_ulps(d, exp2((double)F(a)), 2))         \
    X(ex2_approx_range, 80, SWEEP, r, r, r, r, "ex2.approx.f32 %0, %1;", within_ulps(d, exp2((double)F(a)), 2))        \
    X(ex2_approx_ftz_f32, 80, SWEEP, r, r, r, r, "ex2.approx.ftz.f32 %0, %1;", is_flushed_power(d, a))                 \
    X(lg2_approx_f32, 80, FLOATS, r, r, r, r, "lg2.approx.f32 %0, %1;", is_logarithm(d, a))                            \
    X(lg2_approx_range, 80, SWEEP, r, r, r, r, "lg2.approx.f32 %0, %1;", is_logarithm(d, a))                           \
    X(sin_approx_f32, 80, FLOATS, r, r, r, r, "sin.approx.f32 %0, %1;",                                                \
      (fabsf(F(a)) > 314.1f && !std::isinf(F(a))) ||                                                                   \
      within(d, sin((double)F(a)), fabsf(F(a)) <= 6.28f ? 0x1.6Ap-21 : 0x1.3Bp-15))                                    \
    X(cos_approx_f32, 80, FLOATS, r, r, r, r, "cos.approx.f32 %0, %1;",                                                \
      (fabsf(F(a)) > 314.1f && !std::isinf(F(a))) ||                                                                   \
      within(d, cos((double)F(a)), fabsf(F(a)) <= 6.28f ? 0x1.6Ap-21 : 0x1.3Bp-15))                                    \
    X(tanh_approx_f32, 80, FLOATS, r, r, r, r, "tanh.approx.f32 %0, %1;",                                              \
      within_share(d, tanh((double)F(a)), 0x1p-11))                                                                    \
    X(min_f32, 80, FLOATS, r, r, r, r, "min.f32 %0, %1, %2;", same(d, lesser(F(a), F(b))))                             \
    X(max_f32, 80, FLOATS, r, r, r, r, "max.f32 %0, %1, %2;", same(d, greater(F(a), F(b))))                            \
    X(neg_f32, 80, FLOATS, r, r, r, r, "neg.f32 %0, %1;", same(d, -F(a)))                                              \
    X(abs_f32, 80, FLOATS, r, r, r, r, "abs.f32 %0, %1;", same(d, fabsf(F(a))))                                        \
    X(copysign_f32, 80, FLOATS, r, r, r, r, "copysign.f32 %0, %1, %2;", same(d, copysignf(F(b), F(a))))                \
    X(add_f64, 80, DOUBLES, l, l, l, l, "add.f64 %0, %1, %2;", same(d, D(a) + D(b)))                                   \
    X(add_rn_f64, 80, DOUBLES, l, l, l, l, "add.rn.f64 %0, %1, %2;", same(d, D(a) + D(b)))                             \
    X(sub_f64, 80, DOUBLES, l, l, l, l, "sub.f64 %0, %1, %2;", same(d, D(a) - D(b)))                                   \
    X(mul_f64, 80, DOUBLES, l, l, l, l, "mul.f64 %0, %1, %2;", same(d, D(a) * D(b)))                                   \
    X(fma_rn_f64, 80, DOUBLES, l, l, l, l, "fma.rn.f64 %0, %1, %2, %3;", same(d, fma(D(a), D(b), D(c))))               \
    X(div_rn_f64, 80, DOUBLES, l, l, l, l, "div.rn.f64 %0, %1, %2;", same(d, D(a) / D(b)))                             \
    X(sqrt_rn_f64, 80, DOUBLES, l, l, l, l, "sqrt.rn.f64 %0, %1;", same(d, sqrt(D(a))))                                \
    X(min_f64, 80, DOUBLES, l, l, l, l, "min.f64 %0, %1, %2;", same(d, lesser(D(a), D(b))))                            \
    X(max_f64, 80, DOUBLES, l, l, l, l, "max.f64 %0, %1, %2;", same(d, greater(D(a), D(b))))                           \
    X(neg_f64, 80, DOUBLES, l, l, l, l, "neg.f64 %0, %1;", same(d, -D(a)))                                             \
    X(abs_f64, 80, DOUBLES, l, l, l, l, "abs.f64 %0, %1;", same(d, fabs(D(a))))                                        \
    X(add_rn_f16x2, 80, HALVES, r, r, r, r, "add.rn.f16x2 %0, %1, %2;",                                                \
      halves(d, half_of(half_value(a >> 16) + half_value(b >> 16)), half_of(half_value(a) + half_value(b))))           \
    X(mul_rn_f16x2, 80, HALVES, r, r, r, r, "mul.rn.f16x2 %0, %1, %2;",                                                \
      halves(d, half_of(half_value(a >> 16) * half_value(b >> 16)), half_of(half_value(a) * half_value(b))))

#define CONVERSIONS(X)                                                                                                 \
    X(cvt_f32_f16, 80, ALL16, r, h, h, h, "cvt.f32.f16 %0, %1;",                                                       \
      same(d, f16_to_f32(a)) && same(d, __half2float(__ushort_as_half(a))))                                            \
    X(cvt_rn_f16_f32, 80, SWEEP, h, r, r, r, "cvt.rn.f16.f32 %0, %1;", same16(d, to_f16(a), 0x7C00))                   \
    X(cvt_satfinite_f16, 80, SWEEP, h, r, r, r, "cvt.rn.satfinite.f16.f32 %0, %1;",                                    \
      same16(d, to_f16_finite(a), 0x7C00))                                                                             \
    X(cvt_rn_f16x2, 80, SWEEP, r, r, r, r, "cvt.rn.f16x2.f32 %0, %1, %2;", halves(d, to_f16(a), to_f16(b)))            \
    X(cvt_satfinite_f16x2, 80, SWEEP, r, r, r, r, "cvt.rn.satfinite.f16x2.f32 %0, %1, %2;",                            \
      halves(d, to_f16_finite(a), to_f16_finite(b)))                                                                   \
    X(cvt_rn_bf16x2, 80, SWEEP, r, r, r, r, "cvt.rn.bf16x2.f32 %0, %1, %2;", halves(d, to_bf16(a), to_bf16(b), 0x7F80))\
    X(cvt_e4m3x2_f32, 89, SWEEP, h, r, r, r, "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;",                                \
      is_e4m3(d >> 8, a) && is_e4m3(d & 255, b))                                                                       \
    X(cvt_f16x2_e4m3x2, 89, ALL16, r, h, h, h, "cvt.rn.f16x2.e4m3x2 %0, %1;",                                          \
      halves(d, e4m3_half(a >> 8), e4m3_half(a & 255)))                                                                \
    X(cvt_e2m1x2_f32, 120, SWEEP, r, r, r, r,                                                                          \
      ".reg .b8 x; cvt.rn.satfinite.e2m1x2.f32 x, %1, %2; cvt.u32.u8 %0, x;", is_e2m1(d >> 4, a) && is_e2m1(d & 15, b))\
    X(cvt_f64_f32, 80, SWEEP, l, r, r, r, "cvt.f64.f32 %0, %1;", same(d, (double)F(a)))                                \
    X(cvt_rn_f32_f64, 80, DOUBLES, r, l, r, r, "cvt.rn.f32.f64 %0, %1;", same(d, (float)D(a)))                         \
    X(cvt_rni_f32, 80, SWEEP, r, r, r, r, "cvt.rni.f32.f32 %0, %1;", same(d, rintf(F(a))))                             \
    X(cvt_rzi_f32, 80, SWEEP, r, r, r, r, "cvt.rzi.f32.f32 %0, %1;", same(d, truncf(F(a))))                            \
    X(cvt_rmi_f32, 80, SWEEP, r, r, r, r, "cvt.rmi.f32.f32 %0, %1;", same(d, floorf(F(a))))                            \
    X(cvt_rpi_f32, 80, SWEEP, r, r, r, r, "cvt.rpi.f32.f32 %0, %1;", same(d, ceilf(F(a))))                             \
    X(cvt_sat_f32, 80, SWEEP, r, r, r, r, "cvt.sat.f32.f32 %0, %1;",                                                   \
      F(d) == (F(a) > 1 ? 1 : F(a) > 0 ? F(a) : 0))                                                                    \
    X(cvt_rni_s32, 80, SWEEP, r, r, r, r, "cvt.rni.s32.f32 %0, %1;", d == (u32)to_integer<int>(rint((double)F(a))))    \
    X(cvt_rzi_s32, 80, SWEEP, r, r, r, r, "cvt.rzi.s32.f32 %0, %1;", d == (u32)to_integer<int>(trunc((double)F(a))))   \
    X(cvt_rmi_s32, 80, SWEEP, r, r, r, r, "cvt.rmi.s32.f32 %0, %1;", d == (u32)to_integer<int>(floor((double)F(a))))   \
    X(cvt_rpi_u32, 80, SWEEP, r, r, r, r, "cvt.rpi.u32.f32 %0, %1;", d == to_integer<u32>(ceil((double)F(a))))         \
    X(cvt_rzi_u32, 80, SWEEP, r, r, r, r, "cvt.rzi.u32.f32 %0, %1;", d == to_integer<u32>(trunc((double)F(a))))        \
    X(cvt_f32_u16, 80, ALL16, r, h, h, h, "cvt.rn.f32.u16 %0, %1;", same(d, (float)a))                                 \
    X(cvt_f32_s16, 80, ALL16, r, h, h, h, "cvt.rn.f32.s16 %0, %1;", same(d, (float)(int16_t)a))                        \
    X(cvt_f32_s32, 80, INTS, r, r, r, r, "cvt.rn.f32.s32 %0, %1;", same(d, (float)(int)a))                             \
    X(cvt_f32_u32, 80, INTS, r, r, r, r, "cvt.rn.f32.u32 %0, %1;", same(d, (float)a))                                  \
    X(cvt_f32_s64, 80, INTS, r, l, r, r, "cvt.rn.f32.s64 %0, %1;", same(d, (float)(int64_t)a))                         \
    X(cvt_f32_u64, 80, INTS, r, l, r, r, "cvt.rn.f32.u64 %0, %1;", same(d, (float)a))                                  \
    X(cvt_f64_s32, 80, INTS, l, r, r, r, "cvt.rn.f64.s32 %0, %1;", same(d, (double)(int)a))                            \
    X(cvt_f64_s64, 80, INTS, l, l, r, r, "cvt.rn.f64.s64 %0, %1;", same(d, (double)(int64_t)a))

/* C(name, operands, register, comparison, whether it holds) */
#define COMPARISONS(C)                                                                                                 \
    C(eq_b32, INTS, r, "eq.b32", a == b) C(eq_s16, INTS, h, "eq.s16", a == b) C(ne_s16, INTS, h, "ne.s16", a != b)     \
    C(lt_s16, INTS, h, "lt.s16", (int16_t)a < (int16_t)b)                                                              \
    C(lt_u16, INTS, h, "lt.u16", a < b) C(gt_u16, INTS, h, "gt.u16", a > b)                                            \
    C(eq_s32, INTS, r, "eq.s32", a == b) C(ne_s32, INTS, r, "ne.s32", a != b) C(ne_u32, INTS, r, "ne.u32", a != b)     \
    C(lt_s32, INTS, r, "lt.s32", (int)a < (int)b) C(le_s32, INTS, r, "le.s32", (int)a <= (int)b)                       \
    C(gt_s32, INTS, r, "gt.s32", (int)a > (int)b) C(ge_s32, INTS, r, "ge.s32", (int)a >= (int)b)                       \
    C(lt_u32, INTS, r, "lt.u32", a < b) C(le_u32, INTS, r, "le.u32", a <= b) C(gt_u32, INTS, r, "gt.u32", a > b)       \
    C(ge_u32, INTS, r, "ge.u32", a >= b) C(lo_u32, INTS, r, "lo.u32", a < b) C(ls_u32, INTS, r, "ls.u32", a <= b)      \
    C(hi_u32, INTS, r, "hi.u32", a > b) C(hs_u32, INTS, r, "hs.u32", a >= b)                                           \
    C(eq_s64, INTS, l, "eq.s64", a == b) C(ne_s64, INTS, l, "ne.s64", a != b)                                          \
    C(lt_s64, INTS, l, "lt.s64", (int64_t)a < (int64_t)b) C(le_s64, INTS, l, "le.s64", (int64_t)a <= (int64_t)b)       \
    C(gt_s64, INTS, l, "gt.s64", (int64_t)a > (int64_t)b) C(ge_s64, INTS, l, "ge.s64", (int64_t)a >= (int64_t)b)       \
    C(lt_u64, INTS, l, "lt.u64", a < b) C(le_u64, INTS, l, "le.u64", a <= b) C(gt_u64, INTS, l, "gt.u64", a > b)       \
    C(ge_u64, INTS, l, "ge.u64", a >= b) C(eq_b64, INTS, l, "eq.b64", a == b)                                          \
    C(eq_f32, FLOATS, r, "eq.f32", F(a) == F(b)) C(ne_f32, FLOATS, r, "ne.f32", F(a) < F(b) || F(a) > F(b))            \
    C(lt_f32, FLOATS, r, "lt.f32", F(a) < F(b)) C(le_f32, FLOATS, r, "le.f32", F(a) <= F(b))                           \
    C(gt_f32, FLOATS, r, "gt.f32", F(a) > F(b)) C(ge_f32, FLOATS, r, "ge.f32", F(a) >= F(b))                           \
    C(equ_f32, FLOATS, r, "equ.f32", !(F(a) < F(b) || F(a) > F(b))) C(neu_f32, FLOATS, r, "neu.f32", F(a) != F(b))     \
    C(ltu_f32, FLOATS, r, "ltu.f32", !(F(a) >= F(b))) C(leu_f32, FLOATS, r, "leu.f32", !(F(a) > F(b)))                 \
    C(gtu_f32, FLOATS, r, "gtu.f32", !(F(a) <= F(b))) C(geu_f32, FLOATS, r, "geu.f32", !(F(a) < F(b)))                 \
    C(num_f32, FLOATS, r, "num.f32", !std::isnan(F(a)) && !std::isnan(F(b)))                                           \
    C(nan_f32, FLOATS, r, "nan.f32", std::isnan(F(a)) || std::isnan(F(b)))                                             \
    C(eq_f64, DOUBLES, l, "eq.f64", D(a) == D(b)) C(lt_f64, DOUBLES, l, "lt.f64", D(a) < D(b))                         \
    C(gt_f64, DOUBLES, l, "gt.f64", D(a) > D(b)) C(ge_f64, DOUBLES, l, "ge.f64", D(a) >= D(b))                         \
    C(ltu_f64, DOUBLES, l, "ltu.f64", !(D(a) >= D(b))) C(leu_f64, DOUBLES, l, "leu.f64", !(D(a) > D(b)))               \
    C(geu_f64, DOUBLES, l, "geu.f64", !(D(a) < D(b))) C(neu_f64, DOUBLES, l, "neu.f64", D(a) != D(b))
/* clang-format on */

/* Both results of a comparison: bit 0, and its opposite in bit 1; bit 2 comes from the form with one result. */
#define COMPARISON(X, name, kind, R, op, holds)                                                                \
    X(setp_##name, 80, kind, r, R, R, R,                                                                       \
      ".reg .pred p, q, s; .reg .b32 n; setp." op " p|q, %1, %2; setp." op " s, %1, %2; selp.u32 %0, 1, 0, p;" \
      " selp.u32 n, 2, 0, q; or.b32 %0, %0, n; selp.u32 n, 4, 0, s; or.b32 %0, %0, n;",                        \
      d == ((holds) ? 5u : 2u))
#define COMPARISON_KERNEL(...) COMPARISON(ARITHMETIC_KERNEL, __VA_ARGS__)
#define COMPARISON_ENTRY(...)  COMPARISON(ARITHMETIC_ENTRY, __VA_ARGS__)

#define ARITHMETIC_KERNEL(name, capability, kind, D_, A_, B_, C_, text, right)                         \
    __global__ void k_##name(t_##D_ *d, const t_##A_ *a, const t_##B_ *b, const t_##C_ *c, int n) {    \
        const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);                                    \
        if (i >= n) return;                                                                            \
        FROM_##capability(t_##D_ x; asm volatile("{ " text " }"                                        \
                                                 : "=" #D_(x)                                          \
                                                 : #A_(a[i]), #B_(b[i]), #C_(c[i]));                   \
                          d[i] = x;)                                                                   \
    }                                                                                                  \
    static long wrong_##name(const void *d_, const void *a_, const void *b_, const void *c_, long n) { \
        for (long i = 0; i < n; i++) {                                                                 \
            const t_##D_ d = ((const t_##D_ *)d_)[i];                                                  \
            const t_##A_ a = ((const t_##A_ *)a_)[i];                                                  \
            const t_##B_ b = ((const t_##B_ *)b_)[i];                                                  \
            const t_##C_ c = ((const t_##C_ *)c_)[i];                                                  \
            (void)a, (void)b, (void)c;                                                                 \
            if (!(right)) return i;                                                                    \
        }                                                                                              \
        return -1;                                                                                     \
    }
INTEGER_OPS(ARITHMETIC_KERNEL)
FLOAT_OPS(ARITHMETIC_KERNEL)
CONVERSIONS(ARITHMETIC_KERNEL)
COMPARISONS(COMPARISON_KERNEL)

static const struct Arithmetic {
    const char *name, *text;
    int capability;
    Inputs kind;
    size_t size[4]; /* of d, a, b, c */
    const void *kernel;
    long (*wrong)(const void *d, const void *a, const void *b, const void *c,
                  long n); /* index of a wrong result, or -1 */
} arithmetic[] = {
#define ARITHMETIC_ENTRY(name, capability, kind, D_, A_, B_, C_, text, right) \
    {#name,                                                                   \
     text,                                                                    \
     capability,                                                              \
     kind,                                                                    \
     {sizeof(t_##D_), sizeof(t_##A_), sizeof(t_##B_), sizeof(t_##C_)},        \
     (const void *)k_##name,                                                  \
     wrong_##name},
    INTEGER_OPS(ARITHMETIC_ENTRY) FLOAT_OPS(ARITHMETIC_ENTRY) CONVERSIONS(ARITHMETIC_ENTRY)
        COMPARISONS(COMPARISON_ENTRY)};

static std::vector<u8> narrowed(const std::vector<u64> &v, size_t size) {
    std::vector<u8> to(v.size() * size);
    for (size_t i = 0; i < v.size(); i++) memcpy(&to[i * size], &v[i], size);
    return to;
}
static u64 element(const std::vector<u8> &v, size_t size, size_t i) {
    u64 x = 0;
    memcpy(&x, &v[i * size], size);
    return x;
}

/* The k-th operand of a kind in a size, as the host and as the device have it. */
struct Column {
    std::vector<u8> host;
    std::unique_ptr<Array<u8>> device;
};
static const Column &column(Inputs kind, int k, size_t size) {
    static Operands made[SWEEP + 1];
    static Column columns[SWEEP + 1][3][9];
    if (made[kind].v[0].empty()) made[kind] = operands(kind);
    Column &c = columns[kind][k][size];
    if (c.host.empty()) {
        c.host = narrowed(made[kind].v[k], size);
        c.device.reset(new Array<u8>(c.host));
    }
    return c;
}

static Outcome run_arithmetic(const Arithmetic &t) {
    static Array<u8> &d = *new Array<u8>(8 * sweep().size());
    static std::vector<u8> out(d.n);
    const Column *in[3];
    for (int k = 0; k < 3; k++) in[k] = &column(t.kind, k, t.size[k + 1]);
    const size_t n = in[0]->host.size() / t.size[1];
    int count = (int)n;
    void *args[] = {(void *)&d.p, (void *)&in[0]->device->p, (void *)&in[1]->device->p, (void *)&in[2]->device->p,
                    &count};
    CUDA(cudaMemset(d.p, 0xAA, n * t.size[0]));
    CUDA(cudaLaunchKernel(t.kernel, dim3((unsigned)(n + 255) / 256), dim3(256), args, 0, 0));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpy(out.data(), d.p, n * t.size[0], cudaMemcpyDeviceToHost));
    const long i = t.wrong(out.data(), in[0]->host.data(), in[1]->host.data(), in[2]->host.data(), (long)n);
    if (i < 0) return PASSED;
    auto shown = [&](const std::vector<u8> &v, size_t size) { return (unsigned long long)element(v, size, (size_t)i); };
    return fail("%s gave %#llx of %#llx, %#llx, %#llx", t.text, shown(out, t.size[0]), shown(in[0]->host, t.size[1]),
                shown(in[1]->host, t.size[2]), shown(in[2]->host, t.size[3]));
}
