/* Counters of memory traffic and of bank conflicts: see ptxsim.h. */
#include "counts.h"

namespace ptxsim {

enum { SECTOR = 32, PAGE = 4096, BANKS = 32, WORD = 4, WAVEFRONT = BANKS * WORD };

/* ---- what has been counted ---- */

struct KernelCounts {
    sim_counts sum = {};
    std::vector<SiteCounts> sites;
};
/* Sectors of a page that were prefetched and not read since: by whom, NULL: none. */
typedef std::array<KernelCounts *, PAGE / SECTOR> Awaited;

static std::mutex counts_lock;
static std::map<const Kernel *, KernelCounts> counted;
static std::unordered_map<uintptr_t, Awaited> awaited; /* by number of a page */

void counts_begin(Launch &L) {
    L.counts = std::make_unique<LaunchCounts>();
    L.counts->sites.resize(L.k->code.size());
}

/* Prefetches of the launch wait for a reader. One that is wanted already has none of its own. */
static void await_prefetches(const LaunchCounts &c, KernelCounts &k) {
    for (auto &p : c.prefetches)
        for (uintptr_t at = p.first / SECTOR; at < (p.first + p.second) / SECTOR; at++) {
            KernelCounts *&by = awaited[at / (PAGE / SECTOR)][at % (PAGE / SECTOR)];
            k.sum.prefetched += SECTOR, k.sum.unread += SECTOR;
            if (!by) by = &k;
        }
}

/* Adds what the launch touched: sectors, their bytes. Its loads read what was prefetched. */
static void add_pages(const LaunchCounts &c, KernelCounts &k) {
    for (auto &page : c.pages) {
        auto a = awaited.find(page.first);
        for (size_t i = 0; i < PAGE / SECTOR; i++) {
            const u32 read = page.second->read[i], written = page.second->written[i];
            k.sum.loads.distinct_sectors += read != 0, k.sum.stores.distinct_sectors += written != 0;
            k.sum.loads.distinct_bytes += (u64)__builtin_popcount(read);
            k.sum.stores.distinct_bytes += (u64)__builtin_popcount(written);
            if (!read || a == awaited.end() || !a->second[i]) continue;
            a->second[i]->sum.unread -= SECTOR;
            a->second[i] = NULL;
        }
    }
}

void counts_end(Launch &L) {
    std::lock_guard<std::mutex> g(counts_lock);
    const LaunchCounts &c = *L.counts;
    KernelCounts &k = counted[L.k];
    k.sum.kernel = L.k->name.c_str();
    k.sum.launches++;
    k.sum.warps += L.n_blocks() * ((L.block.x * L.block.y * L.block.z + LANES - 1) / LANES);
    k.sites.resize(c.sites.size());
    for (size_t i = 0; i < c.sites.size(); i++) {
        const SiteCounts &s = c.sites[i];
        SiteCounts &to = k.sites[i];
        sim_traffic &t = L.k->code[i].access == STORES    ? k.sum.stores
                         : L.k->code[i].access == UPDATES ? k.sum.atomics
                                                          : k.sum.loads;
        k.sum.instructions += s.issued;
        t.requests += s.requests, t.sectors += s.sectors, t.bytes += s.bytes;
        k.sum.wavefronts += s.wavefronts, k.sum.conflicts += s.conflicts;
        to.issued += s.issued;
        to.requests += s.requests, to.sectors += s.sectors, to.bytes += s.bytes;
        to.wavefronts += s.wavefronts, to.conflicts += s.conflicts;
    }
    await_prefetches(c, k);
    add_pages(c, k);
    L.counts.reset();
}

/* ---- accesses ---- */

static TouchedPage &page_of(LaunchCounts &c, uintptr_t number) {
    auto &recent = c.recent[number % c.recent.size()];
    if (recent.second && recent.first == number) return *recent.second;
    auto &page = c.pages[number];
    if (!page) page = std::make_unique<TouchedPage>();
    recent = {number, page.get()};
    return *page;
}

/* A request of the lanes m for n[l] bytes each at a[l], which do not cross a sector. */
static void global(LaunchCounts &c, SiteCounts &site, Touch how, const u64 a[LANES], const u32 n[LANES], u32 m) {
    u64 sector[LANES];
    u32 bytes[LANES];
    int count = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        const u64 s = a[l] / SECTOR;
        const u32 wanted = (n[l] >= SECTOR ? FULL : (1u << n[l]) - 1) << (a[l] % SECTOR);
        int i = count - 1; /* lanes ascend, mostly */
        while (i >= 0 && sector[i] != s) i--;
        if (i < 0) sector[i = count++] = s, bytes[i] = 0;
        bytes[i] |= wanted;
    }
    site.requests++;
    site.sectors += (u64)count;
    for (int i = 0; i < count; i++) {
        TouchedPage &page = page_of(c, sector[i] / (PAGE / SECTOR));
        const size_t at = sector[i] % (PAGE / SECTOR);
        site.bytes += (u64)__builtin_popcount(bytes[i]);
        if (how == LOADS || how == COPIES) page.read[at] |= bytes[i];
        if (how == STORES) page.written[at] |= bytes[i];
    }
}

/* Wavefronts of the lanes m, which access n bytes each of shared memory at once. Lanes that read or write the same word
 * share it; atomics do not. */
static u32 bank_wavefronts(const u32 at[LANES], u32 n, u32 m, bool shares) {
    u32 word[WAVEFRONT / WORD * 2], in_bank[BANKS] = {}, latest[BANKS], count = 0, most = 0;
    for (int l = 0; l < LANES; l++)
        for (u32 k = 0; m >> l & 1 && k < (n + WORD - 1) / WORD; k++) {
            const u32 x = at[l] / WORD + k, bank = x % BANKS;
            bool known = shares && in_bank[bank] && latest[bank] == x;
            for (u32 i = 0; shares && !known && in_bank[bank] && i < count; i++) known = word[i] == x;
            if (known) continue;
            word[count++] = latest[bank] = x;
            most = std::max(most, ++in_bank[bank]);
        }
    return most;
}

/* A request of the lanes m for n bytes each of shared memory: so many lanes at once as fill the banks. */
static void shared(SiteCounts &site, const u32 at[LANES], u32 n, u32 m, bool shares) {
    const u32 lanes = std::min((u32)LANES, WAVEFRONT / std::max(n, (u32)WORD));
    for (u32 l = 0; l < LANES; l += lanes) {
        const u32 part = m & (lanes == LANES ? FULL : ((1u << lanes) - 1) << l);
        const u32 wavefronts = bank_wavefronts(at, n, part, shares);
        site.wavefronts += wavefronts;
        if (wavefronts) site.conflicts += wavefronts - 1;
    }
}

static void copy(Warp &w, const Insn &in, LaunchCounts &c, SiteCounts &site, u32 m) {
    const u32 *to = src<u32>(w, in.o[0]), *size = in.o[2] == NONE ? NULL : src<u32>(w, in.o[2]);
    const u64 *from = src<u64>(w, in.o[1]);
    u32 at[LANES], n[LANES], reads = 0;
    u64 a[LANES];
    for (int l = 0; l < LANES; l++) {
        at[l] = to[l] + (u32)in.imm, a[l] = from[l] + (u64)(s64)in.target, n[l] = size ? size[l] : in.bytes;
        reads |= (u32)(n[l] && m >> l & 1) << l;
    }
    shared(site, at, in.bytes, m, true);
    if (reads) global(c, site, COPIES, a, n, reads);
}

void counts_access(Warp &w, const Insn &in, LaunchCounts &c, SiteCounts &site, u32 m) {
    const u32 size = (u32)in.bytes * in.n;
    u32 at[LANES], n[LANES];
    u64 a[LANES];
    if (in.access == COPIES) return copy(w, in, c, site, m);
    if (in.access == PREFETCHES) {
        const u64 *p = src<u64>(w, in.o[0]);
        const u32 *bytes = src<u32>(w, in.o[1]);
        for (int l = 0; l < LANES; l++)
            if (m >> l & 1) c.prefetches.push_back({p[l], bytes[l]});
        return;
    }
    if (in.access == MATRICES || in.space == SHARED) {
        const u32 *p = src<u32>(w, in.o[0]);
        for (int l = 0; l < LANES; l++) at[l] = p[l] + (u32)in.imm;
        const u32 rows = in.n == 4 ? FULL : (1u << 8 * in.n) - 1;
        if (in.access == MATRICES) shared(site, at, 16, rows, true);
        else shared(site, at, size, m, in.access != UPDATES);
        return;
    }
    if (in.space > GLOBAL) return;
    const u64 *p = src<u64>(w, in.o[0]), base = (u64)(uintptr_t)w.b->shared;
    u32 own = 0, local = 0; /* generic addresses of shared and of local memory */
    for (int l = 0; l < LANES; l++) {
        a[l] = p[l] + (u64)in.imm, at[l] = (u32)(a[l] - base), n[l] = size;
        if (in.space == GLOBAL || !(m >> l & 1)) continue;
        own |= (u32)(a[l] - base < w.b->shared_bytes) << l;
        local |= (u32)(w.local && a[l] - (u64)(uintptr_t)w.local < (u64)LANES * w.b->k->local_bytes) << l;
    }
    if (own) shared(site, at, size, own, in.access != UPDATES);
    if (m & ~own & ~local) global(c, site, in.access, a, n, m & ~own & ~local);
}

/* ---- results ---- */

/* The instructions [first, last] of the innermost loop, by branches back, that has instruction `at`; else all. */
static std::pair<size_t, size_t> loop_of(const Kernel &k, size_t at) {
    std::pair<size_t, size_t> best = {0, k.code.size() - 1};
    for (size_t i = at; i < k.code.size(); i++) {
        const Insn &in = k.code[i];
        if (in.kind != BRANCH || in.target < 0 || (size_t)in.target > at) continue;
        if (i - (size_t)in.target < best.second - best.first) best = {(size_t)in.target, i};
    }
    return best;
}

} // namespace ptxsim

using namespace ptxsim;

extern "C" {

void sim_count(bool on) {
    if (on) counted.clear(), awaited.clear();
    machine.counts = on;
}

int sim_counted(struct sim_counts *out, int n) {
    int i = 0;
    for (auto &k : counted) {
        if (i < n) out[i] = k.second.sum;
        i++;
    }
    return i;
}

int sim_counted_sites(struct sim_site_counts *out, int n) {
    int count = 0;
    for (auto &k : counted)
        for (size_t i = 0; i < k.second.sites.size(); i++) {
            const SiteCounts &s = k.second.sites[i];
            if (!s.requests && !s.wavefronts) continue;
            if (count < n) {
                const auto loop = loop_of(*k.first, i);
                u64 issued = 0, conflicts = 0;
                for (size_t j = loop.first; j <= loop.second; j++)
                    issued += k.second.sites[j].issued, conflicts += k.second.sites[j].conflicts;
                out[count] = {k.second.sum.kernel,
                              k.first->code[i].text,
                              {s.requests, s.sectors, s.bytes, 0, 0},
                              s.wavefronts,
                              s.conflicts,
                              issued,
                              conflicts};
            }
            count++;
        }
    return count;
}

} /* extern "C" */
