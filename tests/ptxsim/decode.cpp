/* Reads PTX: the symbols and kernels of a module, and the instructions of a kernel's body. */
#include "instructions.h"

namespace ptxsim {

/* ---- Decoder ------------------------------------------------------------------------------------------------------- */

struct Type {
    char kind; /* u s f b p */
    int bits;
    bool is_signed() const { return kind == 's'; }
};
static Type type_of(const std::string &s) {
    if (s == "pred") return {'p', 1};
    if (s == "f16x2" || s == "bf16x2") return {'b', 32};
    if (s == "bf16") return {'b', 16};
    if (s.size() >= 2 && strchr("usfb", s[0]) && isdigit((u8)s[1])) return {s[0], atoi(s.c_str() + 1)};
    return {0, 0};
}
[[noreturn]] static void undecoded(const Kernel &k, const char *at, const char *why) {
    const char *e = strchr(at, ';');
    fprintf(stderr, "ptxsim: kernel %s: cannot decode: %s: %.*s\n", k.name.c_str(), why, (int)(e ? e - at : 60), at);
    abort();
}

#define PICK(name)                                                                                                  \
    static Fn pick_##name(int bits, bool s, int r) {                                                                \
        if (r == 16) return bits == 8 ? s ? name<s8, u16> : name<u8, u16> : bits == 16 ? name<u16, u16> : (Fn)NULL; \
        if (r == 32)                                                                                                \
            return bits == 8    ? s ? name<s8, u32> : name<u8, u32>                                                 \
                      : bits == 16 ? s ? name<s16, u32> : name<u16, u32>                                            \
                      : bits == 32 ? name<u32, u32>                                                                 \
                                : (Fn)NULL;                                                                         \
        return bits == 8    ? s ? name<s8, u64> : name<u8, u64>                                                     \
                  : bits == 16 ? s ? name<s16, u64> : name<u16, u64>                                                \
                  : bits == 32 ? s ? name<s32, u64> : name<u32, u64>                                                \
                               : name<u64, u64>;                                                                       \
    }
PICK(load)
PICK(load_acquire)
PICK(load_param)
PICK(store)
PICK(store_release)

/* All widths of an integer operation; signed where that matters. */
template <template <class> class F>
static Fn int_op(Type t) {
    const bool s = t.is_signed();
    switch (t.bits) {
    case 16: return s ? binary<s16, s16, F<s16>> : binary<u16, u16, F<u16>>;
    case 32: return s ? binary<s32, s32, F<s32>> : binary<u32, u32, F<u32>>;
    default: return s ? binary<s64, s64, F<s64>> : binary<u64, u64, F<u64>>;
    }
}
template <template <class> class F>
static Fn int_op1(Type t) {
    switch (t.bits) {
    case 16: return unary<s16, s16, F<s16>>;
    case 32: return unary<s32, s32, F<s32>>;
    default: return unary<s64, s64, F<s64>>;
    }
}
template <template <class> class F>
static Fn shift_op(Type t) {
    const bool s = t.is_signed();
    switch (t.bits) {
    case 16: return s ? shift<s16, s16, F<s16>> : shift<u16, u16, F<u16>>;
    case 32: return s ? shift<s32, s32, F<s32>> : shift<u32, u32, F<u32>>;
    default: return s ? shift<s64, s64, F<s64>> : shift<u64, u64, F<u64>>;
    }
}
template <template <class> class F>
static Fn float_op(Type t) {
    return t.bits == 32 ? binary<f32, f32, F<f32>> : binary<f64, f64, F<f64>>;
}
template <template <class> class F>
static Fn cmp_op(Type t) {
    if (t.kind == 'f') return t.bits == 32 ? compare<f32, F<f32>> : compare<f64, F<f64>>;
    const bool s = t.is_signed();
    switch (t.bits) {
    case 16: return s ? compare<s16, F<s16>> : compare<u16, F<u16>>;
    case 32: return s ? compare<s32, F<s32>> : compare<u32, F<u32>>;
    default: return s ? compare<s64, F<s64>> : compare<u64, F<u64>>;
    }
}
template <int OP>
static Fn atomic_op(Type t) {
    const bool s = t.is_signed();
    return t.bits == 32 ? s ? atomic<s32, OP> : atomic<u32, OP> : s ? atomic<s64, OP> : atomic<u64, OP>;
}
template <int OP>
static Fn redux_op(Type t) {
    return t.is_signed() ? redux<s32, OP> : redux<u32, OP>;
}

/* The modifiers that are implemented, by opcode. Those of mma are compared as a whole. */
#define INTS "u16 s16 u32 s32 u64 s64 "
#define BITS "b16 b32 b64 "
#define ACCESS \
    "global shared local param weak volatile relaxed sys gpu cta L1::no_allocate v2 v4 b8 u8 s8 f32 f64 " INTS BITS
#define UPDATE                                                                                                       \
    "global shared relaxed acquire release acq_rel sys gpu cta add min max and or xor exch cas inc b32 b64 u32 s32 " \
    "u64 s64"
static const std::map<std::string, const char *> known_modifiers = {
    {"abs", "f32 f64 " INTS},
    {"add", "f16x2 rn rz rm rp f32 f64 " INTS},
    {"and", "pred " BITS},
    {"atom", UPDATE},
    {"bar", "sync red warp or and pred"},
    {"barrier", "sync red or and pred"},
    {"bfe", "u32"},
    {"bfi", "b32 b64"},
    {"bfind", "shiftamt u32"},
    {"bra", "uni"},
    {"brev", "b32"},
    {"clz", "b32"},
    {"copysign", "f32"},
    {"cp", "async ca cg shared global commit_group wait_group wait_all bulk prefetch L2 L2::128B L2::256B"},
    {"cvt", "rn rni rzi rmi rpi sat satfinite f16 f32 f64 f16x2 bf16x2 e4m3x2 e2m1x2 u8 s8 " INTS},
    {"cvta", "to global shared local param u64"},
    {"div", "rn approx full f32 f64 " INTS},
    {"ex2", "approx ftz f32"},
    {"exit", ""},
    {"fence", "sc acq_rel sys gpu cta"},
    {"fma", "rn rz rm rp f32 f64"},
    {"griddepcontrol", "wait launch_dependents"},
    {"ld", "acquire ca cg cs cv lu nc " ACCESS},
    {"ldmatrix", "sync aligned m8n8 x1 x2 x4 trans shared b16"},
    {"lg2", "approx f32"},
    {"mad", "lo wide " INTS},
    {"max", "f32 f64 " INTS},
    {"membar", "cta gl sys"},
    {"min", "f32 f64 " INTS},
    {"mov", "pred f32 f64 " INTS BITS},
    {"mul", "lo hi wide rn f16x2 f32 f64 " INTS},
    {"neg", "f32 f64 " INTS},
    {"not", "pred " BITS},
    {"or", "pred " BITS},
    {"popc", "b32"},
    {"prmt", "b32"},
    {"rcp", "rn approx f32"},
    {"red", UPDATE},
    {"redux", "sync add min max and or xor u32 s32 b32"},
    {"rem", INTS},
    {"ret", ""},
    {"rsqrt", "approx f32"},
    {"selp", "f32 f64 " INTS BITS},
    {"setp", "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan f32 f64 " INTS BITS},
    {"shf", "l r wrap b32"},
    {"shfl", "sync up down bfly idx b32"},
    {"shl", BITS},
    {"shr", INTS BITS},
    {"sin", "approx f32"},
    {"cos", "approx f32"},
    {"tanh", "approx f32"},
    {"sqrt", "rn approx f32 f64"},
    {"st", "release wb cg cs wt " ACCESS},
    {"sub", "rn f32 f64 " INTS},
    {"vote", "sync any all uni ballot pred b32"},
    {"xor", "pred " BITS}};

/* Instructions whose operands all have 32 bits, and which come in one form. */
static const std::map<std::string, Fn> words_of_32_bits = {
    {"ex2", unary<f32, f32, Ex2<false>>},     {"lg2", unary<f32, f32, Lg2>},     {"rcp", unary<f32, f32, Rcp>},
    {"sqrt", unary<f32, f32, Sqrt>},          {"rsqrt", unary<f32, f32, Rsqrt>}, {"sin", unary<f32, f32, SinA>},
    {"cos", unary<f32, f32, CosA>},           {"tanh", unary<f32, f32, TanhA>},  {"popc", unary<u32, u32, Popc>},
    {"copysign", binary<f32, f32, CopySign>}, {"brev", unary<u32, u32, Brev>},   {"clz", unary<u32, u32, Clz>},
    {"prmt", ternary<u32, u32, Prmt>},        {"bfe", ternary<u32, u32, Bfe>}};

struct Decoder {
    Kernel &k;
    Image &image;
    struct Reg {
        int width; /* 1: predicate */
        s32 at = NONE;
        s32 lo = INT32_MAX, hi = -1;
    };
    struct Family {
        int first, count;
    };
    std::vector<Reg> regs;
    std::vector<std::unordered_map<std::string, Family>> families;
    std::vector<std::unordered_map<std::string, int>> names;
    std::map<std::pair<int, std::string>, s32> labels; /* by scope and name */
    std::vector<int> outer = {-1};                     /* of each scope the one around it */
    int scope = 0;
    struct Branch {
        s32 insn;
        std::string label;
        int scope;
    };
    std::vector<Branch> branches;
    std::map<std::pair<u64, int>, s32> const_index;
    std::vector<u8> consts;
    std::map<std::string, u64> local_symbols;
    struct Use {
        s32 insn, reg;
        s32 *unused;
        int slot; /* of o, or 6 + index within ext */
        bool def;
    };
    std::vector<Use> uses;
    Insn in;
    const char *at = NULL;
    bool dynamic_symbol =
        false; /* the operand is the start of dynamic shared memory, whose place is known at the end */
    u32 extern_align = 16;

    explicit Decoder(Kernel &kernel) : k(kernel), image(*kernel.image) {}
    [[noreturn]] void fail(const char *why) { undecoded(k, at, why); }

    void declare(const std::string &name, int count, int width) { /* count < 0: one of that name */
        const int first = (int)regs.size();
        for (int i = 0; i < std::max(count, 1); i++) {
            Reg r;
            r.width = width;
            regs.push_back(r);
        }
        if (count >= 0) families.back()[name] = {first, count};
        else names.back()[name] = first;
    }
    int find_reg(const std::string &s) {
        for (size_t i = names.size(); i-- > 0;) {
            auto n = names[i].find(s);
            if (n != names[i].end()) return n->second;
            size_t d = s.size();
            while (d && isdigit((u8)s[d - 1])) d--;
            if (d == s.size()) continue;
            auto f = families[i].find(s.substr(0, d));
            if (f == families[i].end()) continue;
            const int x = atoi(s.c_str() + d);
            if (x < f->second.count) return f->second.first + x;
        }
        return -1;
    }
    s32 constant(u64 v, int width) {
        const auto key = std::make_pair(v, width);
        auto i = const_index.find(key);
        if (i != const_index.end()) return i->second;
        const size_t bytes = width == 1 ? 4 : (size_t)abs(width) / 8, where = consts.size();
        consts.resize(where + (bytes * LANES + 63) / 64 * 64);
        if (width == 1) v = v ? FULL : 0;
        for (int l = 0; l < (width == 1 ? 1 : LANES); l++) memcpy(&consts[where + bytes * (size_t)l], &v, bytes);
        return const_index[key] = (s32)((u32)where | 0x80000000u);
    }
    bool symbol(const std::string &s, u64 *v) {
        auto l = local_symbols.find(s);
        if (l != local_symbols.end()) return *v = l->second, true;
        for (const Param &p : k.params)
            if (p.name == s) return *v = p.at, true;
        auto g = image.globals.find(s);
        if (g != image.globals.end()) return *v = g->second.value, true;
        auto sh = image.shared.find(s);
        if (sh != image.shared.end()) {
            const u32 a = sh->second.second;
            k.static_shared = (k.static_shared + a - 1) / a * a;
            *v = local_symbols[s] = k.static_shared;
            k.static_shared += sh->second.first;
            return true;
        }
        auto e = image.extern_shared.find(s);
        if (e != image.extern_shared.end()) {
            extern_align = std::max(extern_align, e->second);
            return *v = 0, dynamic_symbol = true;
        }
        return false;
    }
    bool immediate(const std::string &s, u64 *v) {
        if (s.size() > 2 && s[0] == '0' && (s[1] == 'f' || s[1] == 'F'))
            return *v = strtoull(s.c_str() + 2, NULL, 16), true;
        if (s.size() > 2 && s[0] == '0' && (s[1] == 'd' || s[1] == 'D'))
            return *v = strtoull(s.c_str() + 2, NULL, 16), true;
        if (isdigit((u8)s[0]) || s[0] == '-') {
            *v = s[0] == '-' ? (u64)strtoll(s.c_str(), NULL, 0) : strtoull(s.c_str(), NULL, 0);
            return true;
        }
        return symbol(s, v);
    }
    /* The operand of a slot; a register is filled in when registers have places. */
    void operand(int slot, const std::string &s, bool def, int width) {
        s32 value;
        const int r = find_reg(s);
        if (r >= 0) {
            uses.push_back({(s32)k.code.size(), r, NULL, slot, def});
            value = NONE;
        } else if (s == "_" && def) {
            declare("_" + std::to_string(regs.size()), -1, width);
            uses.push_back({(s32)k.code.size(), (s32)regs.size() - 1, NULL, slot, true});
            value = NONE;
        } else {
            u64 v;
            if (def || !immediate(s, &v)) fail(("operand " + s).c_str());
            if (width < 64) v &= ((u64)1 << width) - 1;
            value = constant(v, dynamic_symbol ? -width : width);
            dynamic_symbol = false;
        }
        if (slot < 6) in.o[slot] = value;
        else k.ext[(size_t)in.target + (size_t)slot - 6] = value;
    }
    int width_of(const std::string &s) {
        const int r = find_reg(s);
        return r < 0 ? 0 : regs[(size_t)r].width;
    }
    /* [register + offset], [symbol + offset], [number] */
    void address(int slot, const std::string &s, int width) {
        std::string t = s.substr(1, s.size() - 2);
        s64 offset = 0;
        const size_t plus = t.find('+');
        if (plus != std::string::npos) {
            offset = strtoll(t.c_str() + plus + 1, NULL, 0);
            t.resize(plus);
        }
        while (!t.empty() && isspace((u8)t.back())) t.pop_back();
        operand(slot, t, false, width);
        in.imm = offset;
    }
    static std::vector<std::string> split(const std::string &s, char by) {
        std::vector<std::string> out;
        int depth = 0;
        std::string now;
        for (char c : s) {
            if (c == '{' || c == '[') depth++;
            if (c == '}' || c == ']') depth--;
            if (c == by && !depth) out.push_back(now), now.clear();
            else if (!isspace((u8)c)) now += c;
        }
        if (!now.empty()) out.push_back(now);
        return out;
    }
    static std::vector<std::string> parts(const std::string &s) { /* {a, b} or a */
        if (s[0] != '{') return {s};
        return split(s.substr(1, s.size() - 2), ',');
    }

    void directive(const std::string &s) {
        if (!s.compare(0, 4, ".reg")) {
            std::string t = s.substr(4);
            size_t i = t.find('.'), e = i + 1;
            while (e < t.size() && isalnum((u8)t[e])) e++;
            const Type type = type_of(t.substr(i + 1, e - i - 1));
            const int width = type.kind == 'p' ? 1 : std::max(type.bits, 16);
            for (std::string n : split(t.substr(e), ',')) {
                const size_t a = n.find('<');
                if (a == std::string::npos) declare(n, -1, width);
                else declare(n.substr(0, a), atoi(n.c_str() + a + 1), width);
            }
        } else if (!s.compare(0, 7, ".shared") || !s.compare(0, 6, ".local")) {
            u32 align = 1;
            size_t i = s.find(".align");
            if (i != std::string::npos) align = (u32)atoi(s.c_str() + i + 6);
            const size_t open = s.find('['), sp = s.find_last_of(" \t", open);
            const size_t tb = s.rfind('.', sp);
            const int bits = type_of(s.substr(tb + 1, s.find_first_of(" \t", tb) - tb - 1)).bits;
            const u32 size =
                open == std::string::npos ? (u32)bits / 8 : (u32)atoi(s.c_str() + open + 1) * (u32)bits / 8;
            std::string name = s.substr(sp + 1, (open == std::string::npos ? s.size() : open) - sp - 1);
            u32 &total = s[1] == 's' ? k.static_shared : k.local_bytes;
            total = (total + align - 1) / align * align;
            local_symbols[name] = total;
            total += size;
        }
    }

    /* The instruction that is decoded. */
    std::string full;               /* opcode and modifiers, */
    std::vector<std::string> words; /* one by one; */
    std::string opcode;             /* the first of them */
    Type suffix;                    /* what the last one says, */
    int reg_width;                  /* and bits of a register for it */
    bool is_float;
    std::vector<std::string> arg; /* operands */

    bool has(const char *modifier) const { return std::find(words.begin() + 1, words.end(), modifier) != words.end(); }
    void three(int wd, int wa) { /* operands d, a, b, (c): bits of the first and of the others */
        operand(0, arg[0], true, wd);
        for (size_t j = 1; j < arg.size(); j++) operand((int)j, arg[j], false, wa);
    }

    void decode_barrier() { /* bar, barrier */
        if (has("warp")) {
            in.kind = MEMBERS, in.fn = warp_sync, in.space = 0;
            operand(0, arg[0], false, 32);
        } else {
            in.kind = BARRIER;
            size_t j = 0;
            if (has("red")) {
                if (!has("or") && !has("and")) fail("bar.red");
                in.n = has("or") ? 1 : 2;
                operand(0, arg[j++], true, 1);
            }
            in.imm = atoi(arg[j++].c_str());
            if (has("red")) operand(1, arg.back(), false, 1), arg.pop_back();
            if (j < arg.size()) in.target = atoi(arg[j].c_str());
            else in.target = 0;
        }
    }
    void decode_move() {        /* mov of numbers */
        if (arg[1][0] == '{') { /* pack */
            const auto p = parts(arg[1]);
            if (p.size() != 2) fail("vector");
            operand(0, arg[0], true, reg_width);
            for (int j = 0; j < 2; j++) operand(1 + j, p[(size_t)j], false, reg_width / 2);
            in.fn = reg_width == 64 ? mov_pack<u64, u32> : mov_pack<u32, u16>;
        } else if (arg[0][0] == '{') {
            const auto p = parts(arg[0]);
            if (p.size() != 2) fail("vector");
            for (int j = 0; j < 2; j++) operand(j, p[(size_t)j], true, reg_width / 2);
            operand(2, arg[1], false, reg_width);
            in.fn = reg_width == 64 ? mov_unpack<u64, u32> : mov_unpack<u32, u16>;
        } else if (arg[1][0] == '%' && find_reg(arg[1]) < 0) {
            static const std::map<std::string, int> special = {
                {"%tid.x", S_TID_X},       {"%tid.y", S_TID_Y},       {"%tid.z", S_TID_Z},
                {"%ntid.x", S_NTID_X},     {"%ntid.y", S_NTID_Y},     {"%ntid.z", S_NTID_Z},
                {"%ctaid.x", S_CTAID_X},   {"%ctaid.y", S_CTAID_Y},   {"%ctaid.z", S_CTAID_Z},
                {"%nctaid.x", S_NCTAID_X}, {"%nctaid.y", S_NCTAID_Y}, {"%nctaid.z", S_NCTAID_Z},
                {"%laneid", S_LANE},       {"%warpid", S_WARP},       {"%globaltimer", S_TIME},
                {"%clock64", S_CLOCK},     {"%clock", S_CLOCK},       {"%lanemask_lt", S_LT},
                {"%smid", S_SMID}};
            auto sp = special.find(arg[1]);
            if (sp == special.end()) fail("special register");
            in.fn = mov_special, in.imm = sp->second, in.bytes = (u8)(reg_width / 8);
            operand(0, arg[0], true, reg_width);
        } else {
            three(reg_width, reg_width);
            in.fn = reg_width == 16   ? unary<u16, u16, Mov<u16>>
                    : reg_width == 32 ? unary<u32, u32, Mov<u32>>
                                      : unary<u64, u64, Mov<u64>>;
        }
    }
    void decode_access() { /* ld, st */
        const bool ld = opcode == "ld";
        in.access = ld ? LOADS : STORES;
        in.space = has("global")   ? GLOBAL
                   : has("shared") ? SHARED
                   : has("local")  ? LOCAL
                   : has("param")  ? PARAM
                                   : GENERIC;
        in.nc = has("nc");
        in.strong = has("volatile") || has("relaxed") || has("acquire") || has("release");
        in.late = !ld && has("relaxed") && in.space <= GLOBAL;
        in.cached = !(has("cg") || has("volatile") || has("relaxed") || has("acquire") || has("cv"));
        in.bytes = (u8)(suffix.bits / 8);
        const auto v = parts(ld ? arg[0] : arg[1]);
        in.n = (u8)v.size();
        if (in.n > 4 || (has("v2") ? 2u : has("v4") ? 4u : 1u) != in.n) fail("vector");
        int r = suffix.bits < 16 ? 16 : suffix.bits;
        for (size_t j = 0; j < v.size(); j++) {
            const int vw = width_of(v[j]);
            if (vw) r = vw;
        }
        if (r < suffix.bits) fail("register is too narrow");
        for (size_t j = 0; j < v.size(); j++) operand(1 + (int)j, v[j], ld, r);
        const std::string &a = ld ? arg[1] : arg[0];
        std::string base = a.substr(1, a.find_first_of("+]") - 1);
        const bool sgn = suffix.is_signed();
        if (in.space == PARAM && find_reg(base) < 0) {
            address(0, a, 64);
            u64 p = 0;
            if (!symbol(base, &p)) fail("parameter");
            in.imm += (s64)p;
            in.o[0] = NONE;
            if (in.imm < 0 || in.imm + in.bytes * in.n > k.param_bytes) fail("parameter bounds");
            in.fn = pick_load_param(suffix.bits, sgn, r);
        } else {
            address(0, a, in.space == SHARED ? 32 : 64);
            in.fn = ld ? has("acquire") ? pick_load_acquire(suffix.bits, sgn, r) : pick_load(suffix.bits, sgn, r)
                    : has("release") ? pick_store_release(suffix.bits, sgn, r)
                                     : pick_store(suffix.bits, sgn, r);
        }
        if (!in.fn) fail("widths");
    }
    void decode_atomic() { /* atom, red */
        const bool returns = opcode == "atom";
        in.access = UPDATES, in.bytes = (u8)(suffix.bits / 8);
        size_t j = 0;
        in.space = has("global") ? GLOBAL : has("shared") ? SHARED : GENERIC;
        if (returns) operand(1, arg[j++], true, reg_width);
        address(0, arg[j++], in.space == SHARED ? 32 : 64);
        operand(2, arg[j++], false, reg_width);
        if (j < arg.size()) operand(3, arg[j++], false, reg_width);
        if (is_float) fail("floating-point atomic");
        in.fn = has("add")    ? atomic_op<A_ADD>(suffix)
                : has("min")  ? atomic_op<A_MIN>(suffix)
                : has("max")  ? atomic_op<A_MAX>(suffix)
                : has("or")   ? atomic_op<A_OR>(suffix)
                : has("and")  ? atomic_op<A_AND>(suffix)
                : has("xor")  ? atomic_op<A_XOR>(suffix)
                : has("exch") ? atomic_op<A_EXCH>(suffix)
                : has("cas")  ? atomic_op<A_CAS>(suffix)
                : has("inc")  ? atomic_op<A_INC>(suffix)
                              : (Fn)NULL;
        in.cached = false;
        in.nc = has("acq_rel") || has("acquire");
    }
    void decode_copy() { /* cp.async and its waits, prefetches */
        if (full == "cp.async.commit_group") in.fn = cp_async_commit;
        else if (has("wait_group")) in.fn = cp_async_wait, in.imm = atoi(arg[0].c_str());
        else if (has("wait_all")) in.fn = cp_async_wait, in.imm = -1;
        else if (has("prefetch")) {
            address(0, arg[0], 64);
            operand(1, arg[1], false, 32);
            if (in.imm) fail("offset");
            in.fn = prefetch_l2, in.access = PREFETCHES;
        } else if (has("bulk")) fail("cp.async.bulk");
        else {
            address(1, arg[1], 64);
            in.target = (s32)in.imm;
            address(0, arg[0], 32);
            in.bytes = (u8)atoi(arg[2].c_str());
            if (arg.size() > 3) operand(2, arg[3], false, 32);
            in.fn = cp_async, in.access = COPIES;
            in.space = GLOBAL;
            in.cached = has("ca");
        }
    }
    void decode_multiply() { /* mma */
        in.kind = ALIGNED;
        in.target = (s32)k.ext.size();
        k.ext.resize(k.ext.size() + 16, NONE);
        int slot = 6;
        const size_t want[4] = {4, 4, 2, 4};
        for (size_t j = 0; j < 4; j++) {
            const auto v = parts(arg[j]);
            if (v.size() != want[j]) fail("fragment");
            for (const auto &y : v) operand(slot++, y, j == 0, 32);
        }
        if (full == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") in.fn = mma_16816;
        else if (has("m16n8k64") && has("kind::mxf4nvf4") && has("block_scale") && has("scale_vec::4X") &&
                 suffix.kind == 0 && words.back() == "ue4m3") {
            operand(slot++, arg[4], false, 32);
            const auto a = parts(arg[5]), b = parts(arg[7]);
            operand(slot++, arg[6], false, 32);
            if (a[0] != "0" || b[0] != "0") fail("byte-id"); /* must be 0 for 4X */
            in.imm = atoi(a[1].c_str()) | atoi(b[1].c_str()) << 4;
            if ((in.imm & 15) > 1 || (in.imm >> 4) > 3) fail("thread-id");
            in.fn = mma_16864;
        } else fail("mma");
    }
    void decode_set_predicate() { /* setp */
        const size_t bar = arg[0].find('|');
        operand(0, arg[0].substr(0, bar), true, 1);
        if (bar != std::string::npos) operand(1, arg[0].substr(bar + 1), true, 1);
        operand(2, arg[1], false, reg_width);
        operand(3, arg[2], false, reg_width);
        if (arg.size() > 3) fail("setp with a predicate");
        const std::string &c = words[1];
        Type u = suffix;
        if (u.kind == 'b') u.kind = 'u';
        in.fn = c == "eq"                ? cmp_op<Eq>(u)
                : c == "ne"              ? is_float ? cmp_op<Ne>(u) : cmp_op<NeI>(u)
                             : c == "lt" || c == "lo" ? cmp_op<Lt>(u)
                : c == "le" || c == "ls" ? cmp_op<Le>(u)
                : c == "gt" || c == "hi" ? cmp_op<Gt>(u)
                : c == "ge" || c == "hs" ? cmp_op<Ge>(u)
                : c == "equ"             ? cmp_op<Equ>(u)
                : c == "neu"             ? cmp_op<Neu>(u)
                : c == "ltu"             ? cmp_op<Ltu>(u)
                : c == "leu"             ? cmp_op<Leu>(u)
                : c == "gtu"             ? cmp_op<Gtu>(u)
                : c == "geu"             ? cmp_op<Geu>(u)
                : c == "num"             ? cmp_op<Num>(u)
                : c == "nan"             ? cmp_op<Nan>(u)
                                         : (Fn)NULL;
    }
    void decode_convert() { /* cvt */
        const std::string &ts = words.back(), &td = words[words.size() - 2];
        const Type d = type_of(td), q = type_of(ts);
        if (td == "f16x2" && ts == "f32") in.fn = has("satfinite") ? cvt_f16x2_sat : cvt_f16x2;
        else if (td == "bf16x2" && ts == "f32" && !has("satfinite")) in.fn = cvt_bf16x2;
        else if (td == "e4m3x2" && ts == "f32") in.fn = cvt_e4m3x2;
        else if (td == "e2m1x2" && ts == "f32") in.fn = cvt_e2m1x2;
        else if (td == "f16x2" && ts == "e4m3x2") in.fn = cvt_f16x2_e4m3x2;
        if (in.fn) {
            if (!has("rn")) fail("rounding");
            if (ts == "f32" && !has("satfinite") && td[0] == 'e') fail("satfinite");
            operand(0, arg[0], true, td == "e4m3x2" || td == "e2m1x2" ? 16 : 32);
            for (size_t j = 1; j < arg.size(); j++) operand((int)j, arg[j], false, ts == "e4m3x2" ? 16 : 32);
        } else {
            if (!d.kind || !q.kind) fail("cvt");
            const int sw = std::max({q.bits, width_of(arg[1]), 16}), dw = std::max({d.bits, width_of(arg[0]), 16});
            operand(0, arg[0], true, dw);
            operand(1, arg[1], false, sw);
            const bool di = d.kind != 'f', qi = q.kind != 'f';
            const int how = has("rzi") ? 1 : has("rmi") ? 2 : has("rpi") ? 3 : 0;
            if (di && qi) {
                if (has("sat")) fail("cvt.sat");
                if (d.bits == 32 && q.bits == 64 && dw == 32 && sw == 64) in.fn = unary<u32, u64, Cast<u32, u64>>;
                else if (d.bits == 64 && q.bits == 32 && dw == 64 && sw == 32)
                    in.fn = q.is_signed() ? unary<s64, s32, Cast<s64, s32>> : unary<u64, u32, Cast<u64, u32>>;
                else if (d.bits == 16 && q.bits == 32 && dw == 16 && sw == 32) in.fn = unary<u16, u32, Cast<u16, u32>>;
                else if (d.bits == 32 && q.bits == 16 && dw == 32 && sw == 16 && !q.is_signed())
                    in.fn = unary<u32, u16, Cast<u32, u16>>;
                else {
                    in.fn = dw == 16   ? sw == 16   ? cvt_int<u16, u16>
                                         : sw == 32 ? cvt_int<u16, u32>
                                                    : cvt_int<u16, u64>
                              : dw == 32 ? sw == 16   ? cvt_int<u32, u16>
                                           : sw == 32 ? cvt_int<u32, u32>
                                                      : cvt_int<u32, u64>
                              : sw == 16 ? cvt_int<u64, u16>
                            : sw == 32 ? cvt_int<u64, u32>
                                       : cvt_int<u64, u64>;
                    in.n = (u8)q.bits, in.bytes = (u8)d.bits;
                    in.space = (u8)((q.is_signed() ? 1 : 0) | (d.is_signed() ? 2 : 0));
                }
            } else if (!di && !qi) {
                if (d.bits == 32 && q.bits == 16) in.fn = cvt_f32_f16;
                else if (d.bits == 16 && q.bits == 32)
                    in.fn = !has("rn") || has("sat") ? (Fn)NULL : has("satfinite") ? cvt_f16_f32_sat : cvt_f16_f32;
                else if (d.bits == 64 && q.bits == 32) in.fn = unary<f64, f32, Cast<f64, f32>>;
                else if (d.bits == 32 && q.bits == 64) in.fn = has("rn") ? unary<f32, f64, Cast<f32, f64>> : (Fn)NULL;
                else if (d.bits == 32)
                    in.fn = has("sat")   ? unary<f32, f32, CvtSat>
                            : has("rni") ? unary<f32, f32, Rint>
                            : has("rzi") ? unary<f32, f32, Trunc>
                            : has("rmi") ? unary<f32, f32, Floor>
                            : has("rpi") ? unary<f32, f32, Ceil>
                                         : (Fn)NULL;
            } else if (di) {
                if (q.bits != 32 || d.bits != 32) fail("cvt float to integer");
                if (d.is_signed())
                    in.fn = how == 0   ? unary<s32, f32, ToInt<s32, 0>>
                            : how == 1 ? unary<s32, f32, ToInt<s32, 1>>
                            : how == 2 ? unary<s32, f32, ToInt<s32, 2>>
                                       : unary<s32, f32, ToInt<s32, 3>>;
                else
                    in.fn = how == 0   ? unary<u32, f32, ToInt<u32, 0>>
                            : how == 1 ? unary<u32, f32, ToInt<u32, 1>>
                            : how == 2 ? unary<u32, f32, ToInt<u32, 2>>
                                       : unary<u32, f32, ToInt<u32, 3>>;
            } else {
                if (!has("rn")) fail("rounding");
                const bool sgn = q.is_signed();
                if (sw != q.bits) fail("cvt integer to float");
                if (d.bits == 32)
                    in.fn = q.bits == 16   ? sgn ? unary<f32, s16, Cast<f32, s16>> : unary<f32, u16, Cast<f32, u16>>
                              : q.bits == 32 ? sgn ? unary<f32, s32, Cast<f32, s32>> : unary<f32, u32, Cast<f32, u32>>
                              : sgn ? unary<f32, s64, Cast<f32, s64>>
                                           : unary<f32, u64, Cast<f32, u64>>;
                else
                    in.fn = q.bits == 32   ? sgn ? unary<f64, s32, Cast<f64, s32>> : unary<f64, u32, Cast<f64, u32>>
                              : q.bits == 64 ? sgn ? unary<f64, s64, Cast<f64, s64>> : unary<f64, u64, Cast<f64, u64>>
                                             : (Fn)NULL;
            }
        }
    }
    void decode_arithmetic() { /* add, sub, mul, mad, fma, min, max, div, rem */
        if (words.back() == "f16x2") {
            if (!has("rn") || (opcode != "add" && opcode != "mul")) fail("f16x2");
            three(32, 32);
            in.fn = opcode == "add" ? f16_pairs<Add<f32>> : f16_pairs<Mul<f32>>;
        } else if (is_float) {
            if (has("ftz") || has("sat")) fail("modifier");
            three(reg_width, reg_width);
            if (has("rm") || has("rz") || has("rp")) {
                if (suffix.bits != 32) fail("rounding");
                if (opcode == "fma")
                    in.fn = has("rm")   ? rounded<FE_DOWNWARD, true>
                            : has("rz") ? rounded<FE_TOWARDZERO, true>
                                        : rounded<FE_UPWARD, true>;
                else if (opcode == "add")
                    in.fn = has("rm")   ? rounded<FE_DOWNWARD, false>
                            : has("rz") ? rounded<FE_TOWARDZERO, false>
                                        : rounded<FE_UPWARD, false>;
            } else
                in.fn = opcode == "add"   ? float_op<Add>(suffix)
                        : opcode == "sub" ? float_op<Sub>(suffix)
                        : opcode == "mul" ? float_op<Mul>(suffix)
                        : opcode == "min" ? float_op<MinF>(suffix)
                        : opcode == "max" ? float_op<MaxF>(suffix)
                        : opcode == "div" ? has("approx") ? binary<f32, f32, DivApprox> : float_op<DivF>(suffix)
                        : opcode == "fma" || opcode == "mad"
                            ? suffix.bits == 32 ? ternary<f32, f32, Fma32> : ternary<f64, f64, Fma64>
                            : (Fn)NULL;
        } else {
            const bool wide = has("wide"), hi = has("hi"), sgn = suffix.is_signed();
            const int wd = wide ? 2 * reg_width : reg_width;
            if (has("sat") || has("cc")) fail("modifier");
            operand(0, arg[0], true, wd);
            operand(1, arg[1], false, reg_width);
            operand(2, arg[2], false, reg_width);
            if (arg.size() > 3) operand(3, arg[3], false, wd);
            if (wide)
                in.fn = opcode == "mul" ? suffix.bits == 16 ? sgn ? binary<s32, s16, MulWide<s32, s16>>
                                                                  : binary<u32, u16, MulWide<u32, u16>>
                                          : sgn ? binary<s64, s32, MulWide<s64, s32>>
                                                            : binary<u64, u32, MulWide<u64, u32>>
                        : suffix.bits == 16
                            ? sgn ? ternary<s32, s16, MadWide<s32, s16>> : ternary<u32, u16, MadWide<u32, u16>>
                        : sgn ? ternary<s64, s32, MadWide<s64, s32>>
                              : ternary<u64, u32, MadWide<u64, u32>>;
            else if (hi) {
                if (opcode != "mul") fail("mad.hi");
                in.fn = suffix.bits == 16 ? sgn ? binary<s16, s16, MulHi<s32, s16>> : binary<u16, u16, MulHi<u32, u16>>
                        : suffix.bits == 32
                            ? sgn ? binary<s32, s32, MulHi<s64, s32>> : binary<u32, u32, MulHi<u64, u32>>
                        : sgn ? binary<s64, s64, MulHi<__int128, s64>>
                              : binary<u64, u64, MulHi<unsigned __int128, u64>>;
            } else if (opcode == "mad")
                in.fn = suffix.bits == 16   ? ternary<u16, u16, MadLo<u16>>
                        : suffix.bits == 32 ? ternary<u32, u32, MadLo<u32>>
                                            : ternary<u64, u64, MadLo<u64>>;
            else {
                Type u = suffix;
                if (opcode == "add" || opcode == "sub" || opcode == "mul") u.kind = 'u'; /* wraps */
                in.fn = opcode == "add"   ? int_op<Add>(u)
                        : opcode == "sub" ? int_op<Sub>(u)
                        : opcode == "mul" ? int_op<Mul>(u)
                        : opcode == "min" ? int_op<MinI>(u)
                        : opcode == "max" ? int_op<MaxI>(u)
                        : opcode == "div" ? int_op<DivI>(u)
                        : opcode == "rem" ? int_op<RemI>(u)
                                          : (Fn)NULL;
            }
        }
    }

    /* Chooses the function of the instruction, and its operands. */
    void decode_any() {
        if (opcode == "bra") {
            in.kind = BRANCH;
            branches.push_back({(s32)k.code.size(), arg[0], scope});
        } else if (opcode == "ret" || opcode == "exit") {
            in.kind = EXIT;
        } else if (opcode == "bar" || opcode == "barrier") {
            decode_barrier();
        } else if (opcode == "mov" && suffix.kind == 'p') {
            in.fn = pred_mov;
            three(1, 1);
        } else if (opcode == "mov") {
            decode_move();
        } else if (opcode == "ld" || opcode == "st") {
            decode_access();
        } else if (opcode == "atom" || opcode == "red") {
            decode_atomic();
        } else if (opcode == "cvta") {
            const bool to = has("to");
            operand(0, arg[0], true, 64);
            operand(1, arg[1], false, 64);
            in.fn = has("global")         ? unary<u64, u64, Mov<u64>>
                    : has("shared")       ? to ? cvta_to_shared : cvta_shared
                    : has("local")        ? to ? cvta_to_local : cvta_local
                    : has("param") && !to ? cvta_param
                                          : (Fn)NULL;
        } else if (opcode == "cp") {
            decode_copy();
        } else if (opcode == "griddepcontrol") {
            in.kind = has("wait") ? DEPENDS : TRIGGERS;
        } else if (opcode == "membar" || opcode == "fence") {
            in.fn = fence;
        } else if (opcode == "shfl") {
            in.kind = MEMBERS, in.space = 5;
            const size_t bar = arg[0].find('|');
            operand(0, arg[0].substr(0, bar), true, 32);
            if (bar != std::string::npos) operand(1, arg[0].substr(bar + 1), true, 1);
            for (int j = 1; j < 5; j++) operand(1 + j, arg[(size_t)j], false, 32);
            in.fn = has("up")     ? shfl<SHFL_UP>
                    : has("down") ? shfl<SHFL_DOWN>
                    : has("bfly") ? shfl<SHFL_BFLY>
                                  : shfl<SHFL_IDX>;
        } else if (opcode == "vote") {
            in.kind = MEMBERS, in.space = 2;
            const bool ballot = has("ballot");
            operand(0, arg[0], true, ballot ? 32 : 1);
            in.n = arg[1][0] == '!' ? 2 : 1;
            operand(1, arg[1].substr(arg[1][0] == '!'), false, 1);
            operand(2, arg[2], false, 32);
            in.fn = ballot       ? vote<VOTE_BALLOT>
                    : has("any") ? vote<VOTE_ANY>
                    : has("all") ? vote<VOTE_ALL>
                                 : vote<VOTE_UNI>;
        } else if (opcode == "redux") {
            in.kind = MEMBERS, in.space = 2;
            three(32, 32);
            in.fn = has("add")   ? redux_op<A_ADD>(suffix)
                    : has("min") ? redux_op<A_MIN>(suffix)
                    : has("max") ? redux_op<A_MAX>(suffix)
                    : has("or")  ? redux_op<A_OR>(suffix)
                    : has("and") ? redux_op<A_AND>(suffix)
                                 : redux_op<A_XOR>(suffix);
        } else if (opcode == "ldmatrix") {
            in.kind = ALIGNED;
            const auto v = parts(arg[0]);
            in.n = (u8)v.size();
            if (!has("m8n8") || !has("b16")) fail("shape");
            for (size_t j = 0; j < v.size(); j++) operand(1 + (int)j, v[j], true, 32);
            address(0, arg[1], 32);
            in.fn = has("trans") ? ldmatrix<true> : ldmatrix<false>, in.access = MATRICES;
        } else if (opcode == "mma") {
            decode_multiply();
        } else if (opcode == "setp") {
            decode_set_predicate();
        } else if (opcode == "selp") {
            operand(0, arg[0], true, reg_width);
            operand(1, arg[1], false, reg_width);
            operand(2, arg[2], false, reg_width);
            operand(3, arg[3], false, 1);
            in.fn = reg_width == 16 ? selp<u16> : reg_width == 32 ? selp<u32> : selp<u64>;
        } else if ((opcode == "and" || opcode == "or" || opcode == "xor" || opcode == "not") && suffix.kind == 'p') {
            three(1, 1);
            in.fn = opcode == "and" ? pred_and : opcode == "or" ? pred_or : opcode == "xor" ? pred_xor : pred_not;
        } else if (opcode == "cvt") {
            decode_convert();
        } else if (opcode == "add" || opcode == "sub" || opcode == "mul" || opcode == "mad" || opcode == "fma" ||
                   opcode == "min" || opcode == "max" || opcode == "div" || opcode == "rem") {
            decode_arithmetic();
        } else if (opcode == "and" || opcode == "or" || opcode == "xor") {
            three(reg_width, reg_width);
            in.fn = opcode == "and"  ? int_op<And>({'u', suffix.bits})
                    : opcode == "or" ? int_op<Or>({'u', suffix.bits})
                                     : int_op<Xor>({'u', suffix.bits});
        } else if (opcode == "not") {
            three(reg_width, reg_width);
            in.fn = int_op1<Not>(suffix);
        } else if (opcode == "neg") {
            three(reg_width, reg_width);
            in.fn = is_float ? suffix.bits == 32 ? unary<f32, f32, NegF<f32>> : unary<f64, f64, NegF<f64>>
                             : int_op1<NegI>(suffix);
        } else if (opcode == "abs") {
            three(reg_width, reg_width);
            in.fn =
                is_float ? suffix.bits == 32 ? unary<f32, f32, AbsF> : unary<f64, f64, AbsD> : int_op1<AbsI>(suffix);
        } else if (opcode == "shl" || opcode == "shr") {
            operand(0, arg[0], true, reg_width);
            operand(1, arg[1], false, reg_width);
            operand(2, arg[2], false, 32);
            in.fn = opcode == "shl" ? shift_op<Shl>({'u', suffix.bits}) : shift_op<Shr>(suffix);
        } else if (opcode == "sqrt" && suffix.bits == 64) {
            three(64, 64);
            in.fn = unary<f64, f64, SqrtD>;
        } else if (opcode == "bfind") {
            three(32, 32);
            in.fn = has("shiftamt") ? unary<u32, u32, BfindShift> : unary<u32, u32, Bfind>;
        } else if (opcode == "shf") {
            three(32, 32);
            in.fn = has("l") ? ternary<u32, u32, ShfL> : ternary<u32, u32, ShfR>;
        } else if (opcode == "ex2" && has("ftz")) {
            three(32, 32);
            in.fn = unary<f32, f32, Ex2<true>>;
        } else if (words_of_32_bits.count(opcode)) {
            three(32, 32);
            in.fn = words_of_32_bits.at(opcode);
        } else if (opcode == "bfi") {
            operand(0, arg[0], true, reg_width);
            operand(1, arg[1], false, reg_width);
            operand(2, arg[2], false, reg_width);
            operand(3, arg[3], false, 32);
            operand(4, arg[4], false, 32);
            in.fn = reg_width == 64 ? bfi<u64> : bfi<u32>;
        }
    }

    void instruction(const char *begin, const char *end) {
        in = Insn();
        at = begin;
        in.text = begin;
        std::string s(begin, end);
        size_t i = 0;
        if (s[0] == '@') {
            const size_t e = s.find_first_of(" \t");
            in.guard_not = s[1] == '!';
            const int r = find_reg(s.substr(in.guard_not ? 2 : 1, e - (in.guard_not ? 2 : 1)));
            if (r < 0) fail("guard");
            uses.push_back({(s32)k.code.size(), r, NULL, -1, false});
            i = s.find_first_not_of(" \t", e);
        }
        size_t e = i;
        while (e < s.size() && !isspace((u8)s[e])) e++;
        full = s.substr(i, e - i);
        words.clear();
        for (size_t a = 0; a <= full.size();) {
            size_t b = full.find('.', a);
            if (b == std::string::npos) b = full.size();
            words.push_back(full.substr(a, b - a));
            a = b + 1;
        }
        arg = split(s.substr(e), ',');
        opcode = words[0];
        suffix = type_of(words.back());
        reg_width = std::max(suffix.bits, 16);
        is_float = suffix.kind == 'f';
        if (opcode != "mma") {
            auto known = known_modifiers.find(opcode);
            if (known == known_modifiers.end()) fail("unknown instruction");
            const std::string all = std::string(" ") + known->second + " ";
            for (size_t j = 1; j < words.size(); j++)
                if (all.find(" " + words[j] + " ") == std::string::npos)
                    fail(("unknown modifier ." + words[j]).c_str());
        }
        decode_any();
        if (!in.fn && in.kind != BRANCH && in.kind != EXIT && in.kind != BARRIER && in.kind != DEPENDS &&
            in.kind != TRIGGERS)
            fail("unknown instruction");
        k.code.push_back(in);
    }

    void body() {
        const char *p = k.body, *end = k.end;
        names.emplace_back(), families.emplace_back();
        while (p < end) {
            while (p < end && isspace((u8)*p)) p++;
            if (p >= end) break;
            if (p[0] == '/' && p[1] == '/') {
                while (p < end && *p != '\n') p++;
            } else if (*p == '{') {
                names.emplace_back(), families.emplace_back();
                outer.push_back(scope), scope = (int)outer.size() - 1;
                p++;
            } else if (*p == '}') {
                names.pop_back(), families.pop_back();
                scope = outer[(size_t)scope];
                p++;
            } else if (*p == '.') {
                const char *e = p;
                if (!strncmp(p, ".loc", 4) && isspace((u8)p[4]))
                    while (e < end && *e != '\n') e++;
                else
                    while (e < end && *e != ';') e++;
                at = p;
                directive(std::string(p, e));
                p = e + 1;
            } else {
                const char *e = p;
                while (e < end && (isalnum((u8)*e) || *e == '_' || *e == '$')) e++;
                if (e < end && *e == ':' && e[1] != ':') {
                    labels[{scope, std::string(p, e)}] = (s32)k.code.size();
                    p = e + 1;
                    continue;
                }
                while (e < end && *e != ';') e++;
                instruction(p, e);
                p = e + 1;
            }
        }
        in = Insn();
        in.kind = EXIT;
        k.code.push_back(in);
        for (auto &b : branches) {
            auto l = labels.end();
            for (int i = b.scope; i >= 0 && l == labels.end(); i = outer[(size_t)i]) l = labels.find({i, b.label});
            if (l == labels.end()) fail(("label " + b.label).c_str());
            k.code[(size_t)b.insn].target = l->second;
        }
    }

    /* Gives registers their places: by linear scan over the instructions where they live, so that a warp's registers fit
     * into the cache. A write under a guard, or by some lanes only, keeps the others: lanes are independent. */
    void place() {
        const size_t n = k.code.size(), nr = regs.size(), n_word = (nr + 63) / 64;
        std::vector<s32> block_of(n), starts;
        std::vector<char> leader(n + 1, 0);
        leader[0] = 1;
        for (size_t i = 0; i < n; i++) {
            if (k.code[i].kind == BRANCH) leader[(size_t)k.code[i].target] = 1, leader[i + 1] = 1;
            if (k.code[i].kind == EXIT) leader[i + 1] = 1;
        }
        for (size_t i = 0; i < n; i++) {
            if (leader[i]) starts.push_back((s32)i);
            block_of[i] = (s32)starts.size() - 1;
        }
        const size_t nb = starts.size();
        starts.push_back((s32)n);
        std::vector<u64> gen(nb * n_word), kill(nb * n_word), live_in(nb * n_word), live_out(nb * n_word);
        std::vector<size_t> first(n + 1);
        size_t u = 0;
        for (size_t i = 0; i < n; i++) {
            first[i] = u;
            while (u < uses.size() && (size_t)uses[u].insn == i) u++;
        }
        first[n] = u;
        auto bit = [](std::vector<u64> &v, size_t base, s32 r) -> bool {
            return v[base + (size_t)r / 64] >> (r % 64) & 1;
        };
        for (size_t i = 0; i < n; i++) {
            const size_t base = (size_t)block_of[i] * n_word;
            for (size_t j = first[i]; j < first[i + 1]; j++)
                if (!uses[j].def && !bit(kill, base, uses[j].reg))
                    gen[base + (size_t)uses[j].reg / 64] |= (u64)1 << (uses[j].reg % 64);
            for (size_t j = first[i]; j < first[i + 1]; j++)
                if (uses[j].def) {
                    if (guarded(i, first)) {
                        if (!bit(kill, base, uses[j].reg))
                            gen[base + (size_t)uses[j].reg / 64] |= (u64)1 << (uses[j].reg % 64);
                    } else kill[base + (size_t)uses[j].reg / 64] |= (u64)1 << (uses[j].reg % 64);
                }
        }
        for (bool changed = true; changed;) {
            changed = false;
            for (size_t b = nb; b-- > 0;) {
                const Insn &last = k.code[(size_t)starts[b + 1] - 1];
                s32 next[2] = {-1, -1};
                if (last.kind == BRANCH) next[0] = block_of[(size_t)last.target];
                const bool falls =
                    !((last.kind == BRANCH || last.kind == EXIT) && !guarded((size_t)starts[b + 1] - 1, first));
                if (falls && b + 1 < nb) next[1] = (s32)b + 1;
                for (size_t wd = 0; wd < n_word; wd++) {
                    u64 out = 0;
                    for (s32 x : next)
                        if (x >= 0) out |= live_in[(size_t)x * n_word + wd];
                    live_out[b * n_word + wd] = out;
                    const u64 now = gen[b * n_word + wd] | (out & ~kill[b * n_word + wd]);
                    if (now != live_in[b * n_word + wd]) live_in[b * n_word + wd] = now, changed = true;
                }
            }
        }
        auto extend = [&](s32 r, s32 pos) {
            Reg &g = regs[(size_t)r];
            g.lo = std::min(g.lo, pos), g.hi = std::max(g.hi, pos);
        };
        for (size_t b = 0; b < nb; b++)
            for (size_t r = 0; r < nr; r++) {
                if (bit(live_in, b * n_word, (s32)r)) extend((s32)r, starts[b]);
                if (bit(live_out, b * n_word, (s32)r)) extend((s32)r, starts[b + 1] - 1);
            }
        for (const Use &x : uses) extend(x.reg, x.insn);
        std::vector<s32> order;
        for (size_t r = 0; r < nr; r++)
            if (regs[r].hi >= 0) order.push_back((s32)r);
        std::sort(order.begin(), order.end(), [&](s32 a, s32 b) { return regs[(size_t)a].lo < regs[(size_t)b].lo; });
        std::map<int, std::vector<s32>> free_slots;
        std::vector<std::pair<s32, s32>> busy; /* (end, register), a heap */
        auto later = [](const std::pair<s32, s32> &a, const std::pair<s32, s32> &b) { return a.first > b.first; };
        u32 top = 0;
        for (s32 r : order) {
            Reg &g = regs[(size_t)r];
            while (!busy.empty() && busy.front().first < g.lo) {
                const Reg &old = regs[(size_t)busy.front().second];
                free_slots[old.width == 1 ? 16 : old.width].push_back(old.at);
                std::pop_heap(busy.begin(), busy.end(), later);
                busy.pop_back();
            }
            const int cls = g.width == 1 ? 16 : g.width;
            auto &f = free_slots[cls];
            if (!f.empty()) g.at = f.back(), f.pop_back();
            else g.at = (s32)top, top += (u32)cls / 8 * LANES;
            busy.push_back({g.hi, r});
            std::push_heap(busy.begin(), busy.end(), later);
        }
        k.reg_bytes = (top + 63) / 64 * 64 + 64;
        for (const Use &x : uses) {
            Insn &i = k.code[(size_t)x.insn];
            const s32 where = regs[(size_t)x.reg].at;
            if (x.slot < 0) i.guard = where;
            else if (x.slot < 6) i.o[x.slot] = where;
            else k.ext[(size_t)i.target + (size_t)x.slot - 6] = where;
        }
    }
    bool guarded(size_t i, const std::vector<size_t> &first) {
        for (size_t j = first[i]; j < first[i + 1]; j++)
            if (uses[j].slot < 0) return true;
        return false;
    }

    void run() {
        body();
        k.dynamic_at = (k.static_shared + extern_align - 1) / extern_align * extern_align;
        for (auto &c : const_index)
            if (c.first.second < 0)
                for (int l = 0; l < LANES; l++) {
                    const u64 v = k.dynamic_at;
                    const size_t bytes = (size_t)-c.first.second / 8;
                    memcpy(&consts[(size_t)(c.second & INT32_MAX) + bytes * (size_t)l], &v, bytes);
                }
        place();
        k.consts = (u8 *)aligned_alloc(64, consts.size() / 64 * 64 + 64);
        memcpy(k.consts, consts.data(), consts.size());
        k.ran.reset(new std::atomic<u8>[k.code.size()]());
    }
};

void decode(Kernel &k) {
    std::call_once(k.once, [&] {
        if (machine.edit) {
            k.edited = machine.edit(k.name.c_str(), std::string(k.body, k.end)) + "\n";
            k.body = k.edited.c_str(), k.end = k.body + k.edited.size();
        }
        Decoder(k).run();
    });
}

Image *image_load(const char *text, size_t size) {
    Image *m = new Image;
    m->text.assign(text, size);
    const char *p = m->text.c_str();
    if (const char *t = strstr(p, ".target")) {
        if (const char *s = strstr(t, "sm_")) m->cc = atoi(s + 3);
    }
    auto name_at = [](const char *s) {
        const char *e = s;
        while (isalnum((u8)*e) || *e == '_' || *e == '$') e++;
        return std::string(s, e);
    };
    for (const char *line = p; line && *line;) {
        const char *eol = strchr(line, '\n');
        if (!eol) eol = line + strlen(line);
        const std::string s(line, eol);
        const char *next = *eol ? eol + 1 : eol;
        if (s.find(".entry") != std::string::npos && s.compare(0, 2, "//")) {
            auto k = std::make_unique<Kernel>();
            k->image = m;
            const char *e = strstr(line, ".entry") + 6;
            while (isspace((u8)*e)) e++;
            k->name = name_at(e);
            const char *open = strchr(e, '{'), *paren = strchr(e, '(');
            if (paren && paren < open) {
                const char *close = strchr(paren, ')');
                std::string list(paren + 1, close);
                for (const std::string &q0 : [&] { /* split keeps no blanks: do it by hand */
                                                   std::vector<std::string> v;
                                                   std::string now;
                                                   for (char c : list)
                                                       if (c == ',') v.push_back(now), now.clear();
                                                       else now += c;
                                                   v.push_back(now);
                                                   return v;
                     }()) {
                    const size_t at = q0.find(".param");
                    if (at == std::string::npos) continue;
                    u32 align = 0, sz = 0;
                    std::string type, nm;
                    char buf[512];
                    std::vector<std::string> words;
                    for (const char *c = q0.c_str() + at; *c;) {
                        while (isspace((u8)*c)) c++;
                        size_t n = 0;
                        while (*c && !isspace((u8)*c) && n < sizeof buf - 1) buf[n++] = *c++;
                        buf[n] = 0;
                        if (n) words.push_back(buf);
                    }
                    u32 count = 1;
                    for (size_t i = 1; i < words.size(); i++) {
                        if (words[i] == ".align") { /* of a pointer (.ptr .align) or of the parameter */
                            if (std::find(words.begin(), words.begin() + (long)i, ".ptr") == words.begin() + (long)i)
                                align = (u32)atoi(words[i + 1].c_str());
                            i++;
                        } else if (words[i][0] == '.') {
                            const Type ty = type_of(words[i].substr(1));
                            if (ty.kind) type = words[i].substr(1);
                        } else {
                            nm = words[i];
                        }
                    }
                    const size_t br = nm.find('[');
                    if (br != std::string::npos) count = (u32)atoi(nm.c_str() + br + 1), nm.resize(br);
                    sz = (u32)type_of(type).bits / 8;
                    if (!align) align = sz;
                    k->param_bytes = (k->param_bytes + align - 1) / align * align;
                    k->params.push_back({nm, k->param_bytes, sz * count});
                    k->param_bytes += sz * count;
                }
            }
            const std::string head(e, open);
            const size_t mt = head.find(".maxntid");
            if (mt != std::string::npos) {
                int v[3] = {1, 1, 1};
                sscanf(head.c_str() + mt + 8, "%d , %d , %d", &v[0], &v[1], &v[2]);
                k->max_threads = v[0] * v[1] * v[2];
            }
            int depth = 0;
            const char *q = open;
            do {
                if (*q == '{') depth++;
                if (*q == '}') depth--;
                q++;
            } while (depth);
            k->body = open + 1;
            k->end = q - 1;
            next = q;
            m->kernels[k->name] = std::move(k);
        } else if (s.find(".global") == 0 || s.find(".visible .global") == 0) {
            const size_t open = s.find('[');
            u32 align = 4;
            const size_t al = s.find(".align");
            if (al != std::string::npos) align = (u32)atoi(s.c_str() + al + 6);
            (void)align;
            const size_t sp = s.find_last_of(" \t", open == std::string::npos ? s.find_first_of("=;") - 2 : open);
            const std::string nm = name_at(s.c_str() + sp + 1);
            const size_t tb = s.rfind('.', sp);
            const u32 bytes = (u32)type_of(s.substr(tb + 1, s.find_first_of(" \t", tb) - tb - 1)).bits / 8;
            const u32 count = open == std::string::npos ? 1 : (u32)atoi(s.c_str() + open + 1);
            u8 *mem = (u8 *)arena_alloc((size_t)bytes * count, HOST);
            memset(mem, 0, (size_t)bytes * count);
            const size_t eq = s.find('=');
            if (eq != std::string::npos) {
                size_t i = s.find('{', eq);
                i = i == std::string::npos ? eq + 1 : i + 1;
                for (u32 n = 0; n < count; n++) {
                    char *stop;
                    const u64 v = strtoull(s.c_str() + i, &stop, 0);
                    memcpy(mem + (size_t)n * bytes, &v, bytes);
                    i = (size_t)(stop - s.c_str());
                    while (i < s.size() && (s[i] == ',' || isspace((u8)s[i]))) i++;
                }
            }
            m->globals[nm] = {(u64)(uintptr_t)mem, (size_t)bytes * count};
        } else if (s.find(".shared") == 0 || s.find(".extern .shared") == 0) {
            u32 align = 1;
            const size_t al = s.find(".align");
            if (al != std::string::npos) align = (u32)atoi(s.c_str() + al + 6);
            const size_t open = s.find('['), sp = s.find_last_of(" \t", open);
            const std::string nm = name_at(s.c_str() + sp + 1);
            if (s[1] == 'e') m->extern_shared[nm] = align;
            else {
                const size_t tb = s.rfind('.', sp);
                const u32 bytes = (u32)type_of(s.substr(tb + 1, s.find_first_of(" \t", tb) - tb - 1)).bits / 8;
                m->shared[nm] = {(open == std::string::npos ? 1u : (u32)atoi(s.c_str() + open + 1)) * bytes, align};
            }
        }
        line = next;
    }
    return m;
}

} // namespace ptxsim
