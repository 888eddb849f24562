/* Memory of the simulated GPUs, and the host's that is pinned. */
#include <sys/mman.h>
#include <unistd.h>

#include "machine.h"

namespace ptxsim {

Machine machine EARLY;
Arena arena EARLY;

enum { PAGE = 4096, POISON = 4 << 20 /* bytes of the file that new memory is a copy of */ };

static void *reserve(size_t bytes, int access) {
    void *p = mmap(NULL, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) perror("ptxsim: mmap"), abort();
    return p;
}

/* Makes reserved memory usable, every byte 0xFF. Pages that nobody touches take no time: they are a private mapping of a
 * file of such bytes. */
static bool poisoned(uintptr_t at, size_t bytes) {
    static int file = -1;
    if (file < 0) {
        const std::vector<u8> ones(POISON, 0xFF);
        file = memfd_create("poison", MFD_CLOEXEC);
        if (file < 0 || write(file, ones.data(), POISON) != POISON) perror("ptxsim: memfd"), abort();
    }
    for (size_t done = 0; done < bytes; done += POISON)
        if (mmap((void *)(at + done), std::min(bytes - done, (size_t)POISON), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, 0) == MAP_FAILED)
            return false;
    return true;
}

void arena_watch() {
    std::lock_guard<std::mutex> g(arena.lock);
    if (!arena.cells) arena.cells = (GlobalCell *)reserve(arena.size / 2 * sizeof *arena.cells, PROT_READ | PROT_WRITE);
}

void *arena_alloc(size_t bytes, int device) {
    std::lock_guard<std::mutex> g(arena.lock);
    if (!arena.base) {
        arena.base = arena.next = (uintptr_t)reserve(arena.size, PROT_NONE);
        arena.shadow = (u64 *)reserve(arena.size * 2, PROT_READ | PROT_WRITE);
        arena.latest =
            (std::atomic<u32> *)reserve(arena.size / LATEST_BYTES * sizeof *arena.latest, PROT_READ | PROT_WRITE);
    }
    const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    Device *d = device == HOST ? NULL : &machine.device[device];
    if (d && (bytes > d->memory || d->used > d->memory - bytes)) return NULL;
    if (bytes > arena.size || whole > arena.base + arena.size - arena.next) return NULL;
    const uintptr_t at = arena.next;
    if (d ? !poisoned(at, whole - PAGE) : mprotect((void *)at, whole - PAGE, PROT_READ | PROT_WRITE)) return NULL;
    arena.next += whole;
    if (d) d->used += bytes;
    auto v = std::make_shared<Allocs>(*arena.all);
    v->push_back({at, at + bytes, device});
    arena.all = v;
    return (void *)at;
}

bool arena_free(void *p) {
    std::lock_guard<std::mutex> g(arena.lock);
    auto v = std::make_shared<Allocs>(*arena.all);
    for (size_t i = 0; i < v->size(); i++) {
        const Alloc a = (*v)[i];
        if (a.lo != (uintptr_t)p) continue;
        v->erase(v->begin() + (long)i);
        arena.all = v;
        if (a.device != HOST) machine.device[a.device].used -= a.hi - a.lo;
        const size_t whole = (a.hi - a.lo + PAGE - 1) / PAGE * PAGE;
        if (whole && mmap(p, whole, PROT_NONE, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != p)
            perror("ptxsim: mmap"), abort();
        madvise(shadow_of(a.lo), whole * 2, MADV_DONTNEED);
        if (arena.cells) madvise(arena.cells + (a.lo - arena.base) / 2, whole / 2 * sizeof *arena.cells, MADV_DONTNEED);
        return true;
    }
    return false;
}

std::shared_ptr<const Allocs> arena_snapshot() {
    std::lock_guard<std::mutex> g(arena.lock);
    return arena.all;
}

const Alloc *alloc_find(const Allocs &all, uintptr_t lo, uintptr_t hi) {
    auto i = std::upper_bound(all.begin(), all.end(), lo, [](uintptr_t x, const Alloc &a) { return x < a.lo; });
    if (i == all.begin()) return NULL;
    --i;
    return lo >= i->lo && hi <= i->hi ? &*i : NULL;
}

bool range_ok(const void *p, size_t n) {
    if (!in_arena(p) || !n) return true;
    return alloc_find(*arena_snapshot(), (uintptr_t)p, (uintptr_t)p + n);
}

bool may_access(Block &b, uintptr_t lo, uintptr_t hi) {
    const Alloc *a = alloc_find(*b.all, lo, hi);
    if (!a) b.all = arena_snapshot(), a = alloc_find(*b.all, lo, hi);
    if (!a) return false;
    const int own = b.launch->device;
    if (a->device != HOST && a->device != own && !machine.peer_enabled[own][a->device]) return false;
    b.cache[cache_slot(lo)] = {a->lo, a->hi};
    return true;
}

} // namespace ptxsim
