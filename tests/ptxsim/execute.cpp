/* Runs warps, blocks and launches. */
#include <sched.h>
#include <unistd.h>

#include "counts.h"
#include "races.h"

namespace ptxsim {

std::string insn_text(const Insn &in) {
    const char *s = in.text, *e = s ? strchr(s, ';') : NULL;
    if (!s) return "the end";
    std::string t(s, e ? (size_t)(e - s) : 60);
    for (char &c : t)
        if (c == '\n' || c == '\t') c = ' ';
    return t;
}

static std::atomic<int> violations;
static std::map<std::string, int> violations_seen;
static std::atomic<bool> quiet{false}, ends_at_violation{false};
extern "C" void sim_quiet(bool on) { quiet = on; }
extern "C" void sim_end_at_violation(void) { ends_at_violation = true; }
extern "C" int sim_violations(void) { return violations; }
extern "C" int sim_take_violations(void) {
    violations_seen.clear();
    return violations.exchange(0);
}

void note(const char *format, ...) {
    static std::mutex lock;
    char s[1024];
    va_list v;
    va_start(v, format);
    vsnprintf(s, sizeof s, format, v);
    va_end(v);
    if (ends_at_violation) _exit(1);
    std::lock_guard<std::mutex> g(lock);
    violations++;
    if (!violations_seen[s]++ && !quiet) fprintf(stderr, "ptxsim: %s\n", s);
}

void trap(Block &b, const Insn *in, const char *format, ...) {
    char s[512];
    va_list v;
    va_start(v, format);
    vsnprintf(s, sizeof s, format, v);
    va_end(v);
    b.leave = true;
    if (std::exchange(b.launch->failed, true)) return;
    fprintf(stderr, "ptxsim: kernel %s, block (%u,%u,%u): %s%s%s\n", b.k->name.c_str(), b.ctaid.x, b.ctaid.y, b.ctaid.z,
            s, in ? "\n    at: " : "", in ? insn_text(*in).c_str() : "");
    machine_fail();
}

void stores_land(Block &b, size_t n) {
    for (size_t i = b.late.size() - n; i < b.late.size(); i++) {
        const LateStore &s = b.late[i];
        if (s.bytes == 1) *(volatile u8 *)s.at = (u8)s.value;
        else if (s.bytes == 2) *(volatile u16 *)s.at = (u16)s.value;
        else if (s.bytes == 4) *(volatile u32 *)s.at = (u32)s.value;
        else *(volatile u64 *)s.at = s.value;
    }
    if (!n) return;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    b.late.resize(b.late.size() - n);
}

/* ---- Warps ---- */

static s32 next_meeting(const Warp &w, s32 pc) {
    s32 limit = INT32_MAX;
    for (const Split &s : w.others)
        if (!s.blocked || s.pc >= pc) limit = std::min(limit, s.pc);
    return limit;
}

/* The next split after all lanes of the last one wait or have ended; one of no lanes if there is none. */
static Split next_split(Warp &w) {
    int best = -1;
    for (size_t i = 0; i < w.others.size(); i++)
        if (!w.others[i].blocked && (best < 0 || w.others[i].pc < w.others[(size_t)best].pc)) best = (int)i;
    for (size_t i = 0; best < 0 && i < w.others.size(); i++)
        if (!(w.others[i].need & w.live & ~w.others[i].mask)) best = (int)i;
    if (best < 0) return {};
    const Split next = w.others[(size_t)best];
    w.others.erase(w.others.begin() + best);
    return next;
}

/* Runs a warp until it ends or all its lanes are at a barrier. COUNTS: counts what it does. */
template <bool COUNTS>
static void run_warp(Warp &w) {
    Block &b = *w.b;
    const Insn *const code = b.k->code.data();
    std::atomic<u8> *const ran = b.k->ran.get();
    s32 pc = w.pc;
    u32 active = w.active;
    s32 limit = next_meeting(w, pc);
    for (;;) {
        if (__builtin_expect(pc >= limit, 0)) {
            for (size_t i = 0; i < w.others.size();)
                if (w.others[i].pc == pc) {
                    active |= w.others[i].mask;
                    w.others.erase(w.others.begin() + (long)i);
                } else {
                    i++;
                }
            int best = -1;
            for (size_t i = 0; i < w.others.size(); i++)
                if (!w.others[i].blocked && w.others[i].pc < pc &&
                    (best < 0 || w.others[i].pc < w.others[(size_t)best].pc))
                    best = (int)i;
            if (best >= 0) {
                std::swap(w.others[(size_t)best].pc, pc);
                std::swap(w.others[(size_t)best].mask, active);
                limit = next_meeting(w, pc);
                continue;
            }
            limit = next_meeting(w, pc);
            continue;
        }
        const Insn &in = code[pc];
        u32 m = active;
        if (in.guard != NONE) {
            const u32 g = *(const u32 *)(w.regs + in.guard);
            m &= in.guard_not ? ~g : g;
        }
        if (!ran[pc].load(std::memory_order_relaxed)) ran[pc].store(1, std::memory_order_relaxed);
        if (COUNTS) counts_insn(w, in, pc, m);
        if (__builtin_expect(in.kind == SIMPLE, 1)) {
            pc++;
            if (!m) continue;
            w.m = m;
            in.fn(w, in);
            if (b.leave) break;
            continue;
        }
        if (in.kind == BRANCH) {
            if (!m) {
                pc++;
            } else if (m == active) {
                pc = in.target;
                if (!w.others.empty()) limit = next_meeting(w, pc);
            } else {
                Split other = {in.target, m, false, 0};
                active &= ~m;
                pc++;
                if (other.pc < pc) std::swap(other.pc, pc), std::swap(other.mask, active);
                w.others.push_back(other);
                limit = next_meeting(w, pc);
            }
            if (b.leave) break;
            continue;
        }
        if (!m || in.kind == NOTHING) {
            pc++;
            continue;
        }
        if (in.kind == EXIT) {
            w.live &= ~m;
            active &= ~m;
            pc++;
            if (active) continue;
            if (!w.live) break;
            const Split next = next_split(w);
            if (!next.mask) {
                trap(b, &code[w.others[0].pc], "lanes %08x wait for others that have ended or wait elsewhere",
                     w.others[0].mask);
                break;
            }
            pc = next.pc, active = next.mask;
            limit = next_meeting(w, pc);
            continue;
        }
        if (in.kind == TRIGGERS) {
            pc++;
            if (std::exchange(b.triggered, true) || !b.launch->pauses) continue;
            b.status = PAUSED, b.leave = true;
            break;
        }
        if (in.kind == DEPENDS) {
            if (b.launch->overlaps && !b.launch->released) {
                w.stalled = true;
                break;
            }
            pc++;
            w.waited = b.waited = true;
            continue;
        }
        const u32 *const members = in.kind == MEMBERS ? src<u32>(w, in.o[in.space]) : NULL;
        u32 need = members ? 0 : w.live, outside = 0;
        if (members && in.o[in.space] < 0) need = members[0] & w.live, outside = m & ~members[0]; /* a constant */
        else
            for (int l = 0; members && l < LANES; l++)
                if (m >> l & 1) need |= members[l] & w.live, outside |= (u32) !(members[l] >> l & 1) << l;
        if (outside) {
            trap(b, &in, "lanes %08x execute it that are not in their masks", outside);
            break;
        }
        if (need & ~m) { /* others have to come first */
            Split next = {pc + 1, active & ~m, false, 0};
            w.others.push_back({pc, m, true, need});
            if (!next.mask) next = next_split(w);
            if (!next.mask) {
                trap(b, &in, "executed by lanes %08x only, others wait elsewhere", m);
                break;
            }
            pc = next.pc, active = next.mask;
            limit = next_meeting(w, pc);
            continue;
        }
        if (in.kind == ALIGNED && m != FULL) { /* the others have ended, or never were */
            trap(b, &in, "executed by lanes %08x only", m);
            break;
        }
        pc++;
        w.m = m;
        if (members) { /* those that name each other together */
            for (u32 rest = m; rest && !b.leave; rest &= ~w.m) {
                w.m = members[__builtin_ctz(rest)] & rest;
                in.fn(w, in);
            }
            if (b.leave) break;
            continue;
        }
        if (in.kind != BARRIER) {
            in.fn(w, in);
            if (b.leave) break;
            continue;
        }
        w.bar_arrived = m;
        w.bar_id = (int)in.imm;
        w.bar_count = in.target;
        w.bar_result = in.o[0];
        if (in.o[0] != NONE) w.bar_or = in.n == 1, w.bar_pred = get_pred(w, in.o[1]);
        break;
    }
    w.pc = pc;
    w.active = active;
}

/* Lets go the warps at a barrier that is complete. Returns false if none is. */
static bool barriers_release(Block &b) {
    u32 live = 0;
    for (Warp &w : b.warps) live += w.live != 0;
    for (int id = 0; id < 16; id++) {
        u32 arrived = 0, count = 0;
        bool any = false, all = true;
        for (Warp &w : b.warps) {
            if (!w.bar_arrived || w.bar_id != id) continue;
            arrived++;
            count = (u32)w.bar_count / LANES;
            any |= (w.bar_pred & w.bar_arrived) != 0;
            all &= (~w.bar_pred & w.bar_arrived) == 0;
        }
        if (!arrived || arrived < (count ? count : live)) continue;
        std::vector<Warp *> met;
        for (Warp &w : b.warps) {
            if (!w.bar_arrived || w.bar_id != id) continue;
            w.m = w.bar_arrived;
            if (w.bar_result != NONE) set_pred(w, w.bar_result, (w.bar_or ? any : all) ? FULL : 0);
            w.bar_arrived = 0;
            if (machine.races) met.push_back(&w);
        }
        if (!met.empty()) races_barrier(b, met);
        return true;
    }
    return false;
}

/* ---- Blocks ---- */

/* Begins a block of a launch. */
static void block_begin(Block &b, Launch &L, u64 id) {
    Kernel &k = *L.k;
    const u32 threads = L.block.x * L.block.y * L.block.z, n = (threads + LANES - 1) / LANES;
    b.launch = &L, b.k = &k, b.id = id, b.status = READY;
    b.ctaid = {(u32)(id % L.grid.x), (u32)(id / L.grid.x % L.grid.y), (u32)(id / L.grid.x / L.grid.y)};
    b.triggered = b.waited = b.acquired = b.leave = false;
    b.late.clear();
    b.polls = 0;
    b.shared_bytes = L.dynamic ? k.dynamic_at + (u32)L.dynamic : k.static_shared;
    auto reserve = [](std::vector<u8> &v, size_t bytes) {
        if (v.size() < bytes) v.assign(bytes, 0xFF);
    };
    reserve(b.buffer, (size_t)n * k.reg_bytes + 64);
    reserve(b.shared_buffer, b.shared_bytes + 1024);
    reserve(b.local_buffer, (size_t)n * LANES * k.local_bytes + 64);
    b.warps.resize(n);
    b.rng.seed((u32)(machine.seed * 7919 + L.seq * 31 + id));
    auto all = arena_snapshot();
    if (all != b.all || b.device != L.device)
        for (auto &c : b.cache) c = {1, 0};
    b.all = std::move(all), b.device = L.device;
    b.shared = (u8 *)(((uintptr_t)b.shared_buffer.data() + 1023) / 1024 * 1024);
    memset(b.shared, 0xFF, b.shared_bytes);
    u8 *regs = (u8 *)(((uintptr_t)b.buffer.data() + 63) / 64 * 64);
    b.order.resize(n);
    for (u32 i = 0; i < n; i++) {
        Warp &w = b.warps[i];
        b.order[i] = i;
        w.regs = regs + (size_t)i * k.reg_bytes;
        w.consts = k.consts;
        w.b = &b;
        w.index = i;
        w.stalled = w.waited = false;
        w.pc = 0;
        w.live = w.active = threads - i * LANES >= LANES ? FULL : (1u << (threads - i * LANES)) - 1;
        w.others.clear();
        w.copies.clear();
        memset(w.groups, 0, sizeof w.groups);
        w.bar_arrived = 0;
        w.bar_result = NONE;
        w.bar_pred = 0;
        w.local = k.local_bytes ? b.local_buffer.data() + (size_t)i * LANES * k.local_bytes : NULL;
    }
    if (machine.races) races_begin(b);
}

/* Runs a block until it ends, or as far as its status says. */
static void block_run(Block &b) {
    Launch &L = *b.launch;
    const bool shuffles = machine.seed;
    b.status = READY, b.leave = false;
    for (;;) {
        bool any = false, stalled = false, live = false;
        if (shuffles) std::shuffle(b.order.begin(), b.order.end(), b.rng);
        for (size_t at = 0; at < b.order.size(); at++) {
            Warp &w = b.warps[b.order[at]];
            live |= w.live != 0;
            if (!w.live || w.bar_arrived) continue;
            if (w.stalled && !L.released) {
                stalled = true;
                continue;
            }
            w.stalled = false;
            if (L.counts) run_warp<true>(w);
            else run_warp<false>(w);
            if (w.stalled) stalled = true;
            else any = true;
            if (L.failed) b.status = ENDED;
            if (b.leave) { /* a warp that polls comes last from now on: the others do not wait for it */
                std::rotate(b.order.begin(), b.order.begin() + (ptrdiff_t)at + 1, b.order.end());
                return;
            }
        }
        if (any) continue;
        if (!live) break;
        if (barriers_release(b)) continue;
        if (stalled) {
            b.status = STALLED;
            return;
        }
        for (Warp &w : b.warps) /* the first that waits */
            if (w.bar_arrived)
                trap(b, &b.k->code[(size_t)w.pc - 1],
                     "deadlock at barriers: warp %u waits at one that is never complete", w.index);
        break;
    }
    stores_land(b, b.late.size());
    b.status = ENDED;
    if (L.programmatic && !b.waited && !L.failed)
        note("kernel %s: a block ends without griddepcontrol.wait: what follows may overtake the kernel before",
             L.k->name.c_str());
}

/* ---- Launches ---- */

enum {
    RESIDENT = 2 * SM_COUNT, /* blocks of a launch that run at the same time; more if all of them poll */
    FLIGHT_MAX = 3,          /* launches that overlap */
    RUNNING_MAX = 4096
};

static std::atomic<u64> launch_count{0};
static struct { /* by number of a launch, until it has ended */
    std::atomic<u64> seq;
    std::atomic<const Stream *> stream;
} running[RUNNING_MAX];

bool launch_runs(u64 seq, const Stream *stream) {
    const auto &r = running[seq % RUNNING_MAX];
    return r.stream == stream && r.seq == seq;
}

/* Kept for their buffers, by all streams: a thread of one lives no longer than a session. */
static std::mutex spare_lock;
static std::vector<std::unique_ptr<Block>> spare_blocks;

/* oldest: of those of its stream that have not ended; NULL: all have. */
static void launch_begin(Launch &L, const Launch *oldest) {
    const bool first = !oldest;
    decode(*L.k);
    L.seq = ++launch_count;
    L.oldest = first ? L.seq : oldest->seq;
    L.released = first;
    L.overlaps &= !first;
    running[L.seq % RUNNING_MAX].seq = L.seq, running[L.seq % RUNNING_MAX].stream = L.stream;
    L.rng.seed((u32)(machine.seed * 104729 + L.seq));
    if (machine.counts) counts_begin(L);
    L.pauses = !machine.seed || machine.races || L.rng() & 64;
    if (!machine.seed) return;
    L.order.resize(L.n_blocks());
    for (u64 i = 0; i < L.n_blocks(); i++) L.order[i] = (u32)i;
    std::shuffle(L.order.begin(), L.order.end(), L.rng);
}

static Block &launch_next_block(Launch &L) {
    std::unique_ptr<Block> b;
    {
        std::lock_guard<std::mutex> g(spare_lock);
        if (!spare_blocks.empty()) b = std::move(spare_blocks.back()), spare_blocks.pop_back();
    }
    L.blocks.push_back(b ? std::move(b) : std::make_unique<Block>());
    const u64 i = L.next++;
    block_begin(*L.blocks.back(), L, L.order.empty() ? i : L.order[i]);
    return *L.blocks.back();
}

/* Runs block i of those that were begun. */
static void launch_step(Launch &L, size_t i) {
    Block &b = *L.blocks[i];
    block_run(b);
    if (b.status == POLLING) std::rotate(L.blocks.begin() + (long)i, L.blocks.begin() + (long)i + 1, L.blocks.end());
    if (b.status != ENDED) return;
    {
        std::lock_guard<std::mutex> g(spare_lock);
        spare_blocks.push_back(std::move(L.blocks[i]));
    }
    L.blocks.erase(L.blocks.begin() + (long)i);
    L.ended++;
}

/* Whether the next launch may begin: each block has triggered it or has ended. */
static bool launch_lets_follow(const Launch &L) {
    for (auto &b : L.blocks)
        if (!b->triggered) return false;
    return L.next == L.n_blocks();
}

/* Runs a block with this status, or one that has not begun: with READY if there is room, with POLLING because those that
 * have begun may wait for it. False: there is none. */
static bool launch_step_any(Launch &L, Status status) {
    if (status != PAUSED && L.next < L.n_blocks() &&
        (status == POLLING ? !L.blocks.empty() : L.blocks.size() < RESIDENT)) {
        launch_next_block(L);
        launch_step(L, L.blocks.size() - 1);
        return true;
    }
    for (size_t i = 0; i < L.blocks.size(); i++) {
        Block &b = *L.blocks[i];
        if (b.status == STALLED && L.released) b.status = READY;
        if (b.status != status) continue;
        launch_step(L, i);
        return true;
    }
    return false;
}

/* Between two looks at memory that another stream or the host writes: longer the more there were, so that who waits long
 * takes no time from others. */
static void nap(int looks) {
    enum { YIELDS = 1000, NAP_US = 20, NAPS_DOUBLED = 10 };
    if (looks < YIELDS) sched_yield();
    else usleep(NAP_US << std::min((looks - YIELDS) / 64, (int)NAPS_DOUBLED));
}

void launches_run(std::shared_ptr<Launch> first, const std::function<std::shared_ptr<Launch>()> &next) {
    std::vector<std::shared_ptr<Launch>> flight; /* oldest first */
    int idle = 0;                                /* looks since something else ran */
    launch_begin(*first, NULL);
    flight.push_back(std::move(first));
    while (!flight.empty()) {
        if (flight.size() < FLIGHT_MAX && launch_lets_follow(*flight.back()))
            if (auto L = next()) {
                launch_begin(*L, flight[0].get());
                flight.push_back(std::move(L));
                continue;
            }
        bool any = false;
        for (Status s : {READY, PAUSED})
            for (size_t i = flight.size(); !any && i-- > 0;) any = launch_step_any(*flight[i], s);
        if (any) idle = 0;
        for (size_t i = 0; !any && i < flight.size(); i++)
            if ((any = launch_step_any(*flight[i], POLLING))) nap(idle++);
        bool failed = false;
        for (auto &L : flight) failed |= L->failed;
        if (failed) {
            for (auto &L : flight) running[L->seq % RUNNING_MAX].stream = NULL;
            return;
        }
        while (!flight.empty() && flight[0]->ended == flight[0]->n_blocks()) {
            running[flight[0]->seq % RUNNING_MAX].stream = NULL;
            if (flight[0]->counts) counts_end(*flight[0]);
            flight.erase(flight.begin());
            if (!flight.empty()) flight[0]->released = true;
        }
    }
}

} // namespace ptxsim
