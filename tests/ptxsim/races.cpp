/* What two accesses know of each other: see races.h. */
#include "races.h"

namespace ptxsim {

/* ---- global cells ---- */

enum { SEQ_BITS = 15 }; /* of the number of a launch that a stamp keeps */
struct Stamp {          /* of an access */
    u32 seq, block, warp, lane, clock;
    u32 bytes; /* of the two: 1, 2 or 3 */
    bool atomic;
    bool several; /* of a read: other blocks read it, too */
    bool agreed;  /* of a write: others wrote the same value */
};
static u64 pack(const Stamp &s) {
    return (u64)(s.seq & ((1 << SEQ_BITS) - 1)) << 49 | (u64)(s.block & 0xFFFF) << 33 | (u64)s.clock << 17 |
           (u64)s.warp << 12 | (u64)s.lane << 7 | (u64)s.atomic << 6 | (u64)s.several << 5 | (u64)s.agreed << 4 |
           (u64)s.bytes << 2 | 1;
}
static Stamp unpack(u64 x) {
    return {(u32)(x >> 49),     (u32)(x >> 33) & 0xFFFF, (u32)(x >> 12) & 31,
            (u32)(x >> 7) & 31, (u32)(x >> 17) & 0xFFFF, (u32)(x >> 2) & 3,
            (x >> 6 & 1) != 0,  (x >> 5 & 1) != 0,       (x >> 4 & 1) != 0};
}

static void report(Warp &w, const Insn &in, const char *space, const char *what, const char *whom, u32 other) {
    note("kernel %s: race in %s memory: %s %s %u\n    at: %s", w.b->k->name.c_str(), space, what, whom, other,
         insn_text(in).c_str());
}

/* Whether an access with this stamp is ordered before what the warp does now. */
static bool ordered(const Warp &w, const Stamp &s, u32 lane, const char **whom, u32 *other) {
    const Block &b = *w.b;
    const Launch &L = *b.launch;
    const WarpRaces &own = b.races.warp[w.index];
    const u32 mask = (1 << SEQ_BITS) - 1;
    if (s.seq != (L.seq & mask)) {
        *whom = "launch", *other = s.seq;
        const u64 before = (L.seq - s.seq) & mask,
                  seq = before <= mask / 2 ? L.seq - before : L.seq + ((s.seq - L.seq) & mask);
        if (seq < L.seq && w.b->waited) return true;
        return !launch_runs(seq, L.stream);
    }
    if (s.block != (b.id & 0xFFFF)) {
        *whom = "block", *other = s.block;
        if (!own.view) return false;
        auto v = own.view->find(s.block);
        return v != own.view->end() && v->second[s.warp] >= s.clock;
    }
    if (s.warp != w.index) {
        *whom = "warp", *other = s.warp;
        return s.clock <= own.seen[s.warp];
    }
    *whom = "lane", *other = s.lane;
    return s.lane == lane || s.clock <= own.synced;
}

void races_global(Warp &w, const Insn &in, int lane, uintptr_t p, size_t n, Access how, bool same) {
    if (!arena.cells || p - arena.base >= arena.size) return;
    Block &b = *w.b;
    GlobalCell *cell = arena.cells + (p - arena.base) / 2;
    const WarpRaces &own = b.races.warp[w.index];
    const u32 seq = (u32)b.launch->seq & ((1 << SEQ_BITS) - 1);
    const Stamp now = {seq,
                       (u32)b.id & 0xFFFF,
                       w.index,
                       (u32)lane,
                       own.seen[w.index],
                       n == 1 ? 1u << (p & 1) : 3u,
                       (how & 1) != 0,
                       false,
                       false};
    const char *whom;
    u32 other;
    for (size_t i = 0; i < (n + 1) / 2; i++) {
        GlobalCell &c = cell[i];
        const Stamp was = unpack(c.write), read = unpack(c.read);
        const bool meets = c.write && was.bytes & now.bytes && !(was.atomic && how & 1);
        if (meets && !ordered(w, was, (u32)lane, &whom, &other)) {
            if (same) {
                c.write |= 1 << 4;
                continue;
            }
            if (how > ATOMIC_READ || !was.agreed)
                report(w, in, "global", how <= ATOMIC_READ ? "reads a write of" : "overwrites a write of", whom, other);
        }
        if (how <= ATOMIC_READ) {
            Stamp r = now;
            r.several = c.read && read.seq == seq && (read.several || read.block != now.block);
            c.read = pack(r);
            continue;
        }
        if (c.read && read.bytes & now.bytes && !same && !(read.atomic && how & 1)) {
            if (!ordered(w, read, (u32)lane, &whom, &other))
                report(w, in, "global", "overwrites what is read by", whom, other);
            else if (read.several && read.seq == seq && (own.view ? own.view->size() : 0) + 1 < b.launch->n_blocks())
                report(w, in, "global", "overwrites what is read by", "several blocks and", read.block);
        }
        c.write = pack(now), c.read = 0;
    }
}

/* ---- shared memory ---- */

void races_shared(Warp &w, const Insn &in, int lane, u32 offset, size_t n, Access how) {
    BlockRaces &races = w.b->races;
    const WarpRaces &own = races.warp[w.index];
    const u16 now = own.seen[w.index];
    for (u32 i = offset / 2; i < (offset + n + 1) / 2; i++) {
        SharedCell &c = races.shared[i];
        const u8 bytes = n == 1 ? (u8)(1 << (offset & 1)) : 3;
        if (c.clock && c.bytes & bytes && !(how & 1 && c.atomic)) {
            if (c.warp != w.index ? c.clock > own.seen[c.warp] : c.lane != lane && c.clock > own.synced)
                report(w, in, "shared", how <= ATOMIC_READ ? "reads a write of" : "overwrites a write of",
                       c.warp != w.index ? "warp" : "lane", c.warp != w.index ? c.warp : c.lane);
        }
        if (how <= ATOMIC_READ) {
            const bool same = c.read_warp == w.index && c.read[w.index] == now;
            c.read_lane = same && c.read_lane != lane ? 255 : (u8)lane;
            c.read_warp = (u8)w.index, c.read[w.index] = now;
            continue;
        }
        for (u32 r = 0; r < races.warp.size(); r++)
            if (r != w.index && c.read[r] > own.seen[r]) {
                report(w, in, "shared", "overwrites what is read by", "warp", r);
                break;
            }
        if (c.read_warp == w.index && c.read[w.index] > own.synced && c.read_lane != lane)
            report(w, in, "shared", "overwrites what is read by", "lane", c.read_lane);
        c.clock = now, c.warp = (u8)w.index, c.lane = (u8)lane, c.atomic = how == ATOMIC, c.bytes = bytes;
        memset(c.read, 0, sizeof c.read);
        c.read_lane = (u8)lane;
    }
}

/* ---- what orders ---- */

void races_begin(Block &b) {
    b.races.warp.assign(b.warps.size(), WarpRaces{});
    for (size_t i = 0; i < b.warps.size(); i++) b.races.warp[i].seen[i] = 1;
    b.races.shared.assign((b.shared_bytes + 1) / 2 + 8, SharedCell{});
}

static void tick(Warp &w) {
    WarpRaces &r = w.b->races.warp[w.index];
    r.synced = r.seen[w.index]++;
}

void races_warp_sync(Warp &w) { tick(w); }

static void join(Clocks &into, const Clocks &x) {
    for (int i = 0; i < LANES; i++) into[i] = std::max(into[i], x[i]);
}
static void join(View &into, const View &x) {
    for (auto &v : x) join(into[v.first], v.second);
}

void races_barrier(Block &b, const std::vector<Warp *> &arrived) {
    Clocks all = {};
    std::shared_ptr<const View> view = b.races.warp[arrived[0]->index].view;
    for (Warp *w : arrived) {
        const WarpRaces &r = b.races.warp[w->index];
        join(all, r.seen);
        if (r.view == view || !r.view) continue;
        auto both = std::make_shared<View>(view ? *view : View());
        join(*both, *r.view);
        view = both;
    }
    for (Warp *w : arrived) {
        b.races.warp[w->index].seen = all;
        b.races.warp[w->index].view = view;
        tick(*w);
    }
}

void races_release(Warp &w, uintptr_t p) {
    View &v = w.b->launch->races.published[p];
    WarpRaces &r = w.b->races.warp[w.index];
    if (r.view) join(v, *r.view);
    join(v[(u32)w.b->id & 0xFFFF], r.seen);
    r.seen[w.index]++;
}

void races_acquire(Warp &w, uintptr_t p) {
    auto &published = w.b->launch->races.published;
    auto v = published.find(p);
    if (v == published.end()) return;
    WarpRaces &r = w.b->races.warp[w.index];
    auto both = std::make_shared<View>(r.view ? *r.view : View());
    join(*both, v->second);
    r.view = both;
}

} // namespace ptxsim
