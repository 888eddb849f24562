/* What the parts of the PTX simulator share: memory, decoded programs, and the state of what runs. See ptxsim.h. */
#ifndef PTXSIM_MACHINE_H
#define PTXSIM_MACHINE_H
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ptxsim.h"

namespace ptxsim {

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

enum { LANES = 32, SHARED_MAX = 101376, SHARED_STATIC = 49152, DEVICES_MAX = 8 };
static const u32 FULL = 0xFFFFFFFFu;
#define EACH_LANE _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)

/* Constructed before the program registers its kernels, which its own constructors do. */
#define EARLY __attribute__((init_priority(101)))

inline u64 time_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000u + (u64)t.tv_nsec;
}

/* ---- The machine: what ptxsim.h changes ---- */

struct Device {
    size_t memory = (size_t)16 << 30, used = 0;
    int major = 12, minor = 0, l2_bytes = 4 << 20;
    bool integrated = false;
};
struct Machine {
    Device device[DEVICES_MAX];
    int n_device = 1;
    bool peers_possible = true;
    std::atomic<bool> peer_enabled[DEVICES_MAX][DEVICES_MAX] = {};
    std::atomic<u64> seed{0};
    /* Products that tensor cores add at once before they cut the sum off; 0: sums are rounded. */
    int mma_truncates = 0;
    bool races = false;                                               /* look for races: see races.h */
    bool counts = false;                                              /* count accesses: see sim_count */
    void (*change)(const char *kernel, void *argument) = NULL;        /* see sim_change_arguments, */
    std::string (*edit)(const char *kernel, std::string body) = NULL; /* sim_edit */
    std::atomic<bool> logs_prefetches{false};
    std::vector<std::pair<uintptr_t, u32>> prefetches; /* address, bytes */
    std::map<std::string, int> failures;               /* by API: calls left until one fails */
    std::mutex lock;                                   /* of prefetches and failures */
};
extern Machine machine;
enum { SM_COUNT = 4 };

struct GlobalCell { /* of two bytes, see races.h */
    u64 write, read;
};

/* ---- Memory ---- */

enum { HOST = -1, LATEST_BYTES = 4096 };
struct Alloc {
    uintptr_t lo, hi;
    int device; /* HOST: pinned */
};
typedef std::vector<Alloc> Allocs; /* sorted by address */

/* One reservation for all devices and for pinned memory. Addresses are never used again, so that what is freed stays
 * invalid; a gap follows each allocation. */
struct Arena {
    uintptr_t base = 0, next = 0;
    size_t size = (size_t)1 << 40;
    std::mutex lock;
    std::shared_ptr<const Allocs> all = std::make_shared<Allocs>();
    u64 *shadow = NULL;              /* (size / 4): see shadow_of */
    std::atomic<u32> *latest = NULL; /* (size / LATEST_BYTES): the latest launch that wrote there */
    GlobalCell *cells = NULL;        /* (size / 2), while races are looked for */
};
extern Arena arena;

/* Prepares to look for races. */
void arena_watch();
/* Allocates memory of a device or of the host. NULL: the device has no more, or the system. */
void *arena_alloc(size_t bytes, int device);
/* Frees what arena_alloc gave. False: it did not give that, or it has been freed. */
bool arena_free(void *p);
std::shared_ptr<const Allocs> arena_snapshot();
/* The allocation that holds [lo, hi), or NULL. */
const Alloc *alloc_find(const Allocs &all, uintptr_t lo, uintptr_t hi);
inline bool in_arena(const void *p) { return (uintptr_t)p - arena.base < arena.size; }
/* Whether [p, p + n) is memory of the arena in use, or not of the arena at all: the host's. */
bool range_ok(const void *p, size_t n);

/* For 4 bytes of the arena each, the launch that wrote them last (upper half) and its block (lower half). */
inline u64 *shadow_of(uintptr_t p) {
    return arena.shadow && p - arena.base < arena.size ? arena.shadow + (p - arena.base) / 4 : NULL;
}

/* A launch writes to p. */
inline void latest_write(uintptr_t p, u32 seq) {
    auto &x = arena.latest[(p - arena.base) / LATEST_BYTES];
    u32 was = x.load(std::memory_order_relaxed);
    while (was < seq && !x.compare_exchange_weak(was, seq, std::memory_order_relaxed)) continue;
}
/* Whether no launch from `seq` on has written to p or near it. */
inline bool is_settled(uintptr_t p, u64 seq) {
    return !in_arena((const void *)p) ||
           arena.latest[(p - arena.base) / LATEST_BYTES].load(std::memory_order_relaxed) < seq;
}

/* ---- Decoded programs ---- */

struct Block;
struct Warp;
struct Insn;
typedef void (*Fn)(Warp &, const Insn &);
enum Kind : u8 {
    SIMPLE,
    BRANCH,
    EXIT,
    BARRIER,
    MEMBERS, /* waits for the lanes of a mask */
    ALIGNED, /* waits for all lanes */
    NOTHING, /* removed by sim_remove_site */
    DEPENDS, /* griddepcontrol.wait */
    TRIGGERS /* griddepcontrol.launch_dependents */
};
enum Space : u8 { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };
/* What counts.cpp counts an instruction as; MATRICES: ldmatrix. */
enum Touch : u8 { NO_ACCESS, LOADS, STORES, UPDATES, COPIES, MATRICES, PREFETCHES };
enum { NONE = INT32_MAX };

struct alignas(64) Insn {
    Fn fn = NULL;
    s32 o[6] = {NONE, NONE, NONE, NONE, NONE, NONE}; /* operands: offsets of registers; bit 31: of constants */
    s32 guard = NONE;
    s32 target = -1; /* of a branch; of mma: index of the first operand in Kernel::ext */
    Kind kind = SIMPLE;
    Touch access = NO_ACCESS;
    u8 n = 1, bytes = 0, space = 0;
    bool guard_not : 1, nc : 1;
    bool cached : 1, strong : 1; /* a plain load, through L1; not torn, see the memory model */
    bool late : 1;               /* a relaxed store, which lands as late as it may */
    s64 imm = 0;
    const char *text = NULL; /* of the instruction, up to its semicolon */
    Insn() : guard_not(false), nc(false), cached(true), strong(false), late(false) {}
};

struct Param {
    std::string name;
    u32 at, size;
};

struct Image;
struct Kernel {
    std::string name;
    Image *image = NULL;
    const char *body = NULL, *end = NULL;
    std::string edited; /* the body, where sim_edit is in force */
    std::vector<Param> params;
    u32 param_bytes = 0;
    int max_threads = 1024;
    std::once_flag once;
    std::vector<Insn> code;
    std::vector<s32> ext;
    u8 *consts = NULL;
    u32 reg_bytes = 0, static_shared = 0, dynamic_at = 0, local_bytes = 0;
    std::unique_ptr<std::atomic<u8>[]> ran; /* by instruction: whether it was executed */
};

struct Symbol {
    u64 value;
    size_t size;
};
/* The PTX of one target. Owns its kernels, whose bodies are decoded when they are first launched. */
struct Image {
    std::string text;
    int cc = 80;
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
    std::map<std::string, Symbol> globals;
    std::map<std::string, std::pair<u32, u32>> shared; /* of the module: size, alignment */
    std::map<std::string, u32> extern_shared;          /* alignment */
};

/* The engine's PTX for each target (images.cpp): texts that end with a zero, an empty one after the last. NULL: it is
 * not linked. */
extern "C" __attribute__((weak)) const char ptx_images[];

/* Finds the symbols and kernels of a PTX module. Ends the program if it cannot be read. */
Image *image_load(const char *text, size_t size);
/* Decodes the body of a kernel, once. Ends the program at an instruction that the simulator does not have; the message
 * names it. */
void decode(Kernel &k);

/* ---- What the detector of races keeps: see races.h ---- */

struct SharedCell {
    u16 clock;       /* of the latest write, 0: none */
    u8 warp, lane;   /* that wrote */
    u8 read_warp;    /* of the latest read, */
    u8 read_lane;    /* its lane; 255: several */
    u8 bytes;        /* that were written: 1, 2 or 3 */
    bool atomic;     /* the write */
    u16 read[LANES]; /* by warp: clock of its latest read, 0: none */
};
/* ATOMIC_READ and ATOMIC do not race with each other. */
enum Access : u8 { READ, ATOMIC_READ, WRITE, ATOMIC };

typedef std::array<u16, LANES> Clocks;
typedef std::map<u32, Clocks> View; /* by block: the clocks that an acquire has seen */

/* What a block's warps know of each other. */
struct WarpRaces {
    Clocks seen; /* its own clock is seen[index] */
    u16 synced;  /* its clock before the latest bar.warp.sync or barrier */
    std::shared_ptr<const View> view;
};
struct BlockRaces {
    std::vector<WarpRaces> warp;
    std::vector<SharedCell> shared;
};
struct LaunchRaces {
    std::unordered_map<uintptr_t, View> published; /* by address of a release */
};

/* ---- What the counters keep: see counts.cpp ---- */

struct SiteCounts { /* of an instruction, as in struct sim_counts */
    u64 issued = 0, requests = 0, sectors = 0, bytes = 0, wavefronts = 0, conflicts = 0;
};
struct TouchedPage { /* of 4096 bytes of global memory: the bytes of each sector that were read, and written */
    u32 read[128] = {}, written[128] = {};
};
struct LaunchCounts {
    std::vector<SiteCounts> sites;                                     /* by instruction */
    std::unordered_map<uintptr_t, std::unique_ptr<TouchedPage>> pages; /* by number */
    std::array<std::pair<uintptr_t, TouchedPage *>, 64> recent = {};   /* of them */
    std::vector<std::pair<uintptr_t, u32>> prefetches;                 /* address, bytes */
};

/* ---- Execution state ---- */

struct Stream;
struct Launch {
    Kernel *k;
    dim3 grid, block;
    size_t dynamic;
    std::vector<u8> params;
    Stream *stream;
    int device;
    bool programmatic; /* its blocks have to execute griddepcontrol.wait: it has the attribute of programmatic stream
                        * serialization, and the host's speed decides whether an earlier launch still runs */
    bool overlaps;     /* it may begin before those before it in the stream have ended */
    /* Those have ended. Written and read by the thread of its stream. */
    bool released;
    u64 seq = 0;             /* counts launches of all streams from 1 */
    u64 oldest = 0;          /* those of its stream before this one had ended when it began */
    std::vector<u32> order;  /* of blocks; empty: 0, 1, .. */
    u64 next = 0, ended = 0; /* blocks that were begun, and that have ended */
    bool pauses;             /* its blocks pause after griddepcontrol.launch_dependents: the next launch goes first */
    bool failed = false;
    std::vector<std::unique_ptr<Block>> blocks; /* begun, not ended */
    std::minstd_rand rng;
    LaunchRaces races;
    std::unique_ptr<LaunchCounts> counts; /* NULL: nothing is counted */
    u64 n_blocks() const { return (u64)grid.x * grid.y * grid.z; }
};

struct AsyncCopy {
    u32 dst, group;
    u8 lane, size, whole; /* bytes from memory, bytes in all */
    uintptr_t src;
};

struct LateStore { /* a relaxed store to memory that has not landed */
    uintptr_t at;
    u64 value;
    u8 bytes;
};

struct Split { /* lanes that are elsewhere than those that run */
    s32 pc;
    u32 mask;
    bool blocked;
    u32 need; /* lanes that it waits for, if it is blocked */
};
struct Warp {
    u8 *regs;
    const u8 *consts;
    u32 m; /* lanes that execute the instruction */
    Block *b;
    s32 pc;
    u32 active, live;
    std::vector<Split> others;
    u32 bar_arrived; /* lanes at a barrier; 0: none */
    int bar_id, bar_count;
    s32 bar_result;
    bool bar_or;
    u32 bar_pred;
    u8 *local;
    std::vector<AsyncCopy> copies;
    u32 groups[LANES]; /* of copies that each lane has closed */
    u32 index;
    bool stalled; /* at griddepcontrol.wait, */
    bool waited;  /* beyond it */
};

enum Status : u8 {
    READY,
    PAUSED,  /* it has let the next launch begin, which goes first */
    POLLING, /* others go first: they may write what it waits for */
    STALLED, /* all its warps wait for the launches before */
    ENDED
};
struct Block {
    Launch *launch;
    Kernel *k;
    Status status;
    std::vector<Warp> warps;
    u8 *shared;
    u32 shared_bytes;
    uint3 ctaid;
    u64 id;
    bool triggered; /* one of its threads executed griddepcontrol.launch_dependents, */
    bool waited;    /* griddepcontrol.wait, */
    bool acquired;  /* an acquire */
    bool leave;     /* the warp that runs leaves after this instruction */
    std::shared_ptr<const Allocs> all;
    struct {
        uintptr_t lo, hi;
    } cache[32]; /* of allocations that its device may use, see cache_slot */
    int device;
    std::vector<u8> buffer, shared_buffer, local_buffer;
    std::vector<u32> order; /* of warps */
    u64 polls;              /* loads that acquire */
    std::vector<LateStore> late;
    std::minstd_rand rng;
    BlockRaces races;
};

/* The next operation of a stream: a launch, or work that is ordered fully. */
struct Operation {
    std::shared_ptr<Launch> launch;
    std::function<void()> work;
};

/* Prints a violation that does not end the launch, each text once, and counts it for sim_violations. */
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Ends the launch: its text goes to stderr, later calls of the runtime fail. */
void trap(Block &b, const Insn *in, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The text of an instruction, for messages. */
std::string insn_text(const Insn &in);

/* Whether the block's device may use [lo, hi). */
bool may_access(Block &b, uintptr_t lo, uintptr_t hi);
inline size_t cache_slot(uintptr_t p) { return p >> 12 & 31; }
/* The latest n of the block's late stores land. */
void stores_land(Block &b, size_t n);

/* Runs a launch, and those after it that may begin before it has ended: `next` gives them, or nothing. On return all have
 * ended. */
void launches_run(std::shared_ptr<Launch> first, const std::function<std::shared_ptr<Launch>()> &next);
/* Whether a launch of this number has not ended. */
bool launch_runs(u64 seq, const Stream *stream);
/* Whether this call of a function is one that sim_fail lets fail. */
bool call_fails(const char *function);
/* Enqueues work in a stream, in its recording if it is recorded. False: the stream is not one of the device, or a kernel
 * has gone wrong. */
bool stream_enqueue(void *stream, int device, std::function<void()> f);
int device_of_thread();
/* A kernel has gone wrong: every later call of the runtime fails. */
void machine_fail();

template <class T>
static inline T *dst(Warp &w, s32 o) {
    return (T *)(w.regs + o);
}
template <class T>
static inline const T *src(const Warp &w, s32 o) {
    return (const T *)(o < 0 ? w.consts + (o & INT32_MAX) : w.regs + o);
}
inline u32 get_pred(const Warp &w, s32 o) { return *src<u32>(w, o); }
inline void set_pred(Warp &w, s32 o, u32 v) {
    u32 *d = dst<u32>(w, o);
    *d = (*d & ~w.m) | (v & w.m);
}

} // namespace ptxsim
#endif
