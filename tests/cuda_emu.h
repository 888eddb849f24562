// CUDA on a CPU, for tests. moe_cuda.cu, host code and kernels, compiles against this header with
//     g++ -std=c++17 -O2 -fno-strict-aliasing -x c++ -DCUEMU
//
// Every CUDA thread is a fiber. Work is queued on streams and runs when the host synchronizes. A seeded random number
// generator decides which warp, lane, block and stream runs next, and starves some warps for long stretches, so that a
// missing barrier shows in the results. Breaking a rule of CUDA ends the process with a report: divergent collectives
// and barriers, deadlock, accesses out of bounds, misalignment.
// The emulator shows nothing about speed, bank conflicts, registers, or the memory model across SMs. A kernel that
// polls must do so by ld_acquire, ld_acquire_sys, ld_sys16 (of one address) or __nanosleep.
//
// Host threads take turns: a lock is held during every API call, and a thread that waits in a call runs the kernels of
// all threads. When kernels do nothing but poll and other threads that have made a call are alive, the waiting thread
// lets those go on; after cuemu::deadlock_seconds seconds it reports a deadlock. With several host threads a seed does not
// repeat a schedule. There may be several devices (cuemu::devices), and NCCL.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

// ---- Keywords and vector types ----------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__    static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__    // empty: libstdc++ has an attribute of this name, and its headers may follow
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

#define CUEMU_VECTOR2(name, T, align) \
    struct alignas(align) name {      \
        T x, y;                       \
    };                                \
    inline name make_##name(T x, T y) { return {x, y}; }
#define CUEMU_VECTOR4(name, T, align) \
    struct alignas(align) name {      \
        T x, y, z, w;                 \
    };                                \
    inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
CUEMU_VECTOR2(uint2, unsigned, 8)
CUEMU_VECTOR2(int2, int, 8)
CUEMU_VECTOR2(float2, float, 8)
CUEMU_VECTOR4(uint4, unsigned, 16)
CUEMU_VECTOR4(int4, int, 16)
CUEMU_VECTOR4(float4, float, 16)
CUEMU_VECTOR4(ushort4, unsigned short, 8)
CUEMU_VECTOR4(uchar4, unsigned char, 4)
struct uint3 {
    unsigned x, y, z;
};
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
// ---- Errors -----------------------------------------------------------------------------------------------
#define CUEMU_ERRORS(X)                                                                                    \
    X(cudaSuccess, 0, "no error")                                                                          \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                                        \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                                       \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                  \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                               \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                      \
    X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime version")     \
    X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution on the device")    \
    X(cudaErrorPeerAccessUnsupported, 217, "peer access is not supported between these two devices")       \
    X(cudaErrorUnsupportedPtxVersion, 222, "the provided PTX was compiled with an unsupported toolchain.") \
    X(cudaErrorNotReady, 600, "device not ready")                                                          \
    X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                            \
    X(cudaErrorPeerAccessNotEnabled, 705, "peer access has not been enabled")                              \
    X(cudaErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region")  \
    X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")          \
    X(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")   \
    X(cudaErrorUnknown, 999, "unknown error")
enum cudaError_t {
#define CUEMU_X(name, code, text) name = code,
    CUEMU_ERRORS(CUEMU_X)
#undef CUEMU_X
};
inline const char *cudaGetErrorName(cudaError_t e) {
#define CUEMU_X(name, code, text) \
    if (e == name) return #name;
    CUEMU_ERRORS(CUEMU_X)
#undef CUEMU_X
    return "unrecognized error code";
}
inline const char *cudaGetErrorString(cudaError_t e) {
#define CUEMU_X(name, code, text) \
    if (e == name) return text;
    CUEMU_ERRORS(CUEMU_X)
#undef CUEMU_X
    return "unrecognized error code";
}

// ---- Switching stacks -------------------------------------------------------------------------------------
#if defined __x86_64__ && !defined CUEMU_UCONTEXT
// Saves the registers that the ABI preserves on the old stack, stores its pointer in *from, and continues on `to`. It
// is in a comdat section, so that several translation units may include this header.
asm(R"(
.pushsection .text.cuemu_switch,"axG",@progbits,cuemu_switch,comdat
.weak cuemu_switch
.type cuemu_switch,@function
cuemu_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
.size cuemu_switch,.-cuemu_switch
.popsection
)");
// A new stack starts with 6 registers, the entry point, and a word for alignment.
#define CUEMU_FRAME_WORDS 8
#define CUEMU_FRAME_ENTRY 6
#elif defined __aarch64__ && !defined CUEMU_UCONTEXT
asm(R"(
.pushsection .text.cuemu_switch,"axG",%progbits,cuemu_switch,comdat
.weak cuemu_switch
.type cuemu_switch,%function
cuemu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp];      stp x21, x22, [sp, #16];   stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64];   stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96];   stp d10, d11, [sp, #112];  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp];      ldp x21, x22, [sp, #16];   ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64];   ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96];   ldp d10, d11, [sp, #112];  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cuemu_switch,.-cuemu_switch
.popsection
)");
#define CUEMU_FRAME_WORDS 20
#define CUEMU_FRAME_ENTRY 11
#else
#include <ucontext.h>
#endif

namespace cuemu {
#ifndef CUEMU_FRAME_WORDS
struct context {
    ucontext_t uc;
    void start(char *low, char *high, void (*entry)()) {
        getcontext(&uc);
        uc.uc_stack.ss_sp = low, uc.uc_stack.ss_size = (size_t)(high - low), uc.uc_link = nullptr;
        makecontext(&uc, entry, 0);
    }
    void leave(context &to) { swapcontext(&uc, &to.uc); }
};
#else
extern "C" void cuemu_switch(void **from, void *to);
struct context {
    void *sp;
    void start(char *, char *high, void (*entry)()) {
        void **frame = (void **)high - CUEMU_FRAME_WORDS;
        memset(frame, 0, CUEMU_FRAME_WORDS * sizeof *frame);
        frame[CUEMU_FRAME_ENTRY] = (void *)entry;
        sp = frame;
    }
    void leave(context &to) { cuemu_switch(&sp, to.sp); }
};
#endif

// ---- State ------------------------------------------------------------------------------------------------
constexpr uint32_t FULL = 0xffffffff;    // mask of a whole warp
constexpr size_t SMEM_MAX = 101376;      // shared memory of a block on SM120
constexpr size_t SMEM_STATIC = 48 << 10; // what a kernel may use without asking for more
constexpr size_t RED = 256;              // bytes of a red zone
constexpr size_t ARENA = 256 << 10;      // room for SMEM_MAX, and for red zones and alignment of some hundred arrays
constexpr size_t STACK = 64 << 10, PAGE = 4096;
constexpr int DEVICES_MAX = 8;
constexpr unsigned RESIDENT_MAX = 256; // blocks of one launch that run at a time
constexpr uint8_t POISON_SMEM = 0xfd, POISON_GLOBAL = 0xff, CANARY = 0xfb;

// Compares the pointers first: equal literals nearly always have one address.
inline bool same_text(const char *a, const char *b) { return a == b || !strcmp(a, b); }

// A place in the source. The default arguments of here() are the caller's file and line.
struct site {
    const char *file;
    int line;
    const char *function = "";
    static constexpr site here(const char *f = __builtin_FILE(), int l = __builtin_LINE(),
                               const char *fn = __builtin_FUNCTION()) {
        return {f, l, fn};
    }
    bool operator==(const site &o) const { return line == o.line && same_text(file, o.file); }
};

struct warp;
struct block;
struct launch;

struct async_copy { // a cp.async in flight; src null: writes zeros
    void *dst;
    const void *src;
    uint64_t group; // number of commits before it
};

// One CUDA thread. `what` and `at` tell where it waits, for reports.
struct fiber {
    context ctx;
    uint3 tid;
    unsigned lane;
    warp *w;
    block *blk;
    const char *what;
    site at;
    char *stack = nullptr;
    bool triggered; // it called grid_dependency_launch, or has exited
    uint64_t commits;
    std::vector<async_copy> pending; // oldest first
    const void *polled;              // the address that ld_sys16 read last
};

// Runs a warp collective for all its lanes at once, from warp.in to warp.out.
typedef void (*action)(warp &w, uint32_t lanes);

struct open_collective { // a warp collective that waits for its lanes
    uint32_t mask, arrived;
    site at;
    const char *what;
    action act;
};

// Sets of lanes are bit masks. A lane in `live` either runs, or is in exactly one of runnable, spinning, parked,
// at_barrier[*] or the `arrived` set of a collective.
struct warp {
    fiber *lane; // [32]
    uint32_t live, runnable, spinning, parked, at_barrier[16];
    uint32_t priority; // the runnable warp with the highest priority runs
    bool listed;       // it is in `ready`
    std::vector<open_collective> open;
    uint32_t in[32][8], out[32][4];
};

struct barrier_state {
    unsigned arrived, expected, yes, result;
    site at;
};

struct shared_array {
    const void *key;
    char *p;
    size_t bytes;
    const char *label;
};

struct sys_store { // a store of st_sys16 that has not landed in memory
    uint4 *dst, v;
    unsigned thread;
    enum { THREAD, WARP, BLOCK } order; // the threads whose release makes it land
};

struct block {
    launch *run;
    uint3 idx;
    unsigned n, live, triggers; // all threads; those that have not exited; those that let dependents start
    barrier_state bar[16];
    std::vector<fiber> f;
    std::vector<warp> w;
    char *arena = nullptr, *top; // red zone, array, red zone, .. up to top; arrays[0] is the dynamic array
    size_t smem_bytes;
    std::vector<shared_array> arrays;
    std::vector<sys_store> stores; // oldest first
};

struct kernel { // what LAUNCH fixes; graphs share it
    const char *name;
    dim3 grid, dim;
    size_t smem;
    bool pdl;
    std::function<void()> body;
};

struct launch { // a kernel that has begun
    const kernel *k;
    int device;
    uint64_t blocks, first, stride; // the i-th block to start is (first + i * stride) % blocks
    uint64_t started = 0, done = 0, triggered = 0;
    bool early = false;        // PDL: the kernel before it in the stream has not ended
    bool waited = false;       // some thread called grid_dependency_wait
    bool next_decided = false; // it has been drawn whether the launch after it starts early
};

struct communicator {          // the ranks of an NCCL communicator
    std::vector<int> device;   // by rank; -1: has not called yet
    std::vector<bool> aborted; // by rank; an aborted rank's calls do nothing
    unsigned missing;
    bool broken = false; // initialization of some rank has failed
};
struct nccl_call {
    std::shared_ptr<communicator> all;
    unsigned rank;
    const char *what;
    const void *send;
    void *recv;
    size_t count;
    int type, root;
};

struct event_state {
    unsigned recorded = 0, done = 0; // number of times
    double ms = 0;                   // time of the last one
};

// What a stream executes: a kernel, work on the host, waiting for an event, or a rank's part of a collective.
struct op {
    std::shared_ptr<const kernel> k;
    std::function<void()> work;
    std::shared_ptr<event_state> event;
    unsigned event_count = 0;
    uint64_t seq = 0;                 // order of queuing over all streams
    std::shared_ptr<launch> run = {}; // set once k has begun
    std::shared_ptr<const nccl_call> nccl = {};
};

struct barrier_site {
    const char *file;
    int line;
    const char *function;
    const char *kind; // "__syncthreads", "__syncwarp", "named_barrier", "cp_async_wait", or
                      // "grid_dependency_wait"
    uint64_t count;   // how often a thread executed it
    bool skip;
};

enum memory_kind { DEVICE, PINNED, REGISTERED };
struct allocation {
    char *p;
    size_t bytes;
    memory_kind kind;
    char *map; // the mapping, with guard pages; null: not made here
    size_t map_bytes;
    int device; // the current device when it was made
};

struct gpu {
    size_t limit = (size_t)16 << 30, used = 0; // bytes
    int major = 12, minor = 0;
    int l2_bytes = 4 << 20;
    bool integrated = false;
    bool peer[DEVICES_MAX] = {}; // devices whose memory its kernels may access
};
} // namespace cuemu

struct CUgraph_st {
    std::vector<cuemu::op> ops;
};
struct CUgraphExec_st : CUgraph_st {};
struct CUevent_st {
    std::shared_ptr<cuemu::event_state> state;
    int device;
};
struct CUstream_st {
    std::deque<cuemu::op> q = {};
    bool blocking = true;          // keeps order with the legacy stream
    bool dead = false;             // destroyed; the work queued on it is still done
    bool broken = false;           // its capture has failed
    CUgraph_st *capture = nullptr; // not null: it is capturing
    std::thread::id capturer = {}; // thread whose waiting calls break the capture; default: any thread's
    int device = 0;
    bool legacy = false; // it is stream 0 of its device
};
typedef CUstream_st *cudaStream_t;
typedef CUevent_st *cudaEvent_t;
typedef CUgraph_st *cudaGraph_t;
typedef CUgraphExec_st *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;

namespace cuemu {
inline fiber host;        // the host's own context
inline fiber *me = &host; // the fiber that runs; only this variable tells, so that nothing is stale after a switch
inline uint64_t rng_state = 1, switches, events; // events: counts everything but spinning
inline unsigned spinners;
inline std::vector<warp *> ready; // has every warp with runnable lanes
inline warp *pass_warp;           // the warp whose turn it is
inline uint32_t pass_lanes;       // its lanes that have not run in this turn
inline unsigned pass_start, churn = 15;
inline bool pass_backward;
inline std::vector<std::unique_ptr<block>> resident, idle_blocks;
inline std::vector<block *> finished;
inline std::list<CUstream_st> streams;
inline uint64_t op_seq;
inline std::map<char *, allocation> allocations;
inline gpu gpus[DEVICES_MAX];
inline int device_count = 1;
inline bool peers_possible = true;
inline std::map<std::pair<int, const void *>, size_t> smem_limit; // by device and kernel
inline std::map<std::string, int> failures;                       // by API: calls left until one fails
inline std::map<uint64_t, std::shared_ptr<communicator>> forming; // by ncclUniqueId, until all ranks have called
inline std::vector<barrier_site> barrier_sites;
inline std::atomic<uint64_t> timer = 1000000000; // what global_timer returns, ns
inline bool timer_read;
inline thread_local cudaError_t last_error; // these two belong to the host thread: fibers move between threads
inline thread_local int current_device;

// xorshift64*
inline uint64_t rnd() {
    rng_state ^= rng_state >> 12, rng_state ^= rng_state << 25, rng_state ^= rng_state >> 27;
    return rng_state * 0x2545f4914f6cdd1d >> 8;
}
inline bool coin() { return rnd() & 1; }
inline void seed(uint64_t s) { rng_state = (s + 1) * 0x9e3779b97f4a7c15 | 1; }

[[noreturn, gnu::format(printf, 1, 2)]] inline void die(const char *fmt, ...) {
    fflush(stdout);
    fprintf(stderr, "cuemu: ");
    if (me != &host)
        fprintf(stderr, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", me->blk->run->k->name, me->blk->idx.x,
                me->blk->idx.y, me->blk->idx.z, me->tid.x, me->tid.y, me->tid.z);
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    abort();
}

// ---- Host threads -----------------------------------------------------------------------------------------
// The thread that holds the lock owns all variables above and runs the fibers. A fiber continues in whichever thread
// runs them next, so kernels must not read thread_local variables.

inline std::mutex big_lock, prefetches_lock;
inline bool prefetches_logged;
inline std::vector<std::pair<const uint8_t *, uint32_t>> prefetches; // what prefetch_l2 was asked for
inline std::condition_variable news_came;
inline uint64_t news, announced;         // counts work queued or done; a thread without work waits for a change
inline unsigned host_threads;            // threads that are alive and have made a call
inline std::atomic<unsigned> contenders; // threads that want the lock
// Seconds without news until a deadlock is reported; 0 with one thread. Long, because the other threads may have work
// that makes no news, and a busy machine stretches it.
inline double deadlock_seconds = 120;
inline pthread_t runner; // the thread that runs the fibers
inline thread_local unsigned lock_depth;

struct host_thread {
    stack_t alt = {}; // stack for SIGSEGV while a fiber's own stack is in use
    uint64_t calls = 0;
    host_thread() {
        host_threads++;
        alt.ss_size = STACK, alt.ss_sp = malloc(STACK);
        sigaltstack(&alt, nullptr);
    }
    ~host_thread() {
        std::lock_guard<std::mutex> l(big_lock);
        host_threads--, news++, news_came.notify_all();
        alt.ss_flags = SS_DISABLE;
        sigaltstack(&alt, nullptr), free(alt.ss_sp);
    }
};
inline thread_local host_thread this_thread;

// Holds the lock during an API call. Calls may be nested.
struct scope {
    scope() {
        if (lock_depth++) return;
        if (!big_lock.try_lock()) contenders++, big_lock.lock(), contenders--;
        this_thread.calls++; // its constructor runs at the first use
    }
    ~scope() {
        if (--lock_depth) return;
        if (announced != news) announced = news, news_came.notify_all();
        big_lock.unlock();
    }
    scope(const scope &) = delete;
};

// Returns the time in seconds.
inline double real_time() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- Scheduler --------------------------------------------------------------------------------------------
// The runnable warp with the highest priority runs. Priorities are drawn anew now and then, so the lowest warp waits
// until all others are blocked, often for long ("probabilistic concurrency testing"). A turn runs each runnable lane
// until it blocks, in a random rotation and direction. Some turns leave lanes out, so that lanes drift apart.

inline void wake(warp &w, uint32_t lanes) {
    w.runnable |= lanes;
    if (lanes && !w.listed) w.listed = true, ready.push_back(&w);
}

inline bool begin_pass() {
    if (!ready.empty() && !(rnd() & churn)) ready[rnd() % ready.size()]->priority = (uint32_t)rnd();
    warp *best = nullptr;
    for (size_t i = 0; i < ready.size();) {
        warp *w = ready[i];
        if (!w->runnable) {
            w->listed = false, ready[i] = ready.back(), ready.pop_back();
            continue;
        }
        if (!best || w->priority > best->priority) best = w;
        i++;
    }
    if (!best) return false;
    uint64_t r = rnd();
    pass_warp = best, pass_lanes = best->runnable;
    if (!(r & 7) && (pass_lanes & r >> 16)) pass_lanes &= (uint32_t)(r >> 16);
    pass_start = r >> 3 & 31, pass_backward = r >> 8 & 1;
    return true;
}

// Returns the next fiber to run, or the host if none is runnable.
inline fiber *next_fiber() {
    if (!pass_lanes && !begin_pass()) return &host;
    uint32_t rotated = pass_lanes >> pass_start | pass_lanes << (-pass_start & 31);
    unsigned l = (unsigned)(pass_backward ? 31 - __builtin_clz(rotated) : __builtin_ctz(rotated));
    l = (l + pass_start) & 31;
    pass_lanes &= ~(1u << l), pass_warp->runnable &= ~(1u << l);
    return pass_warp->lane + l;
}

// Runs others until this fiber's lane is woken. The caller has put the lane into some set of its warp.
inline void yield(const char *what, site at) {
    fiber *f = me, *next = next_fiber();
    f->what = what, f->at = at;
    switches++, me = next;
    f->ctx.leave(next->ctx);
}
inline void wait(const char *what, site at) { events++, yield(what, at); }

inline uint32_t lane_bit() { return 1u << me->lane; }

// ---- Stores that other devices read -----------------------------------------------------------------------
// A store of st_sys16 stays in a buffer of its block until it lands in memory: at a random time, at the block's end,
// or when a thread that sees it releases (st_release_sys, __threadfence_system, and the same for the GPU). The storing
// thread sees it at once, its warp after a __syncwarp, the block after a __syncthreads (after a named barrier: if the
// storing warp takes part). So a kernel that sets a flag without a barrier or fence before it shows old memory to
// those who wait for the flag. All other stores are visible to everyone at once.

template <class F>
void land_stores(block &b, F lands) {
    size_t kept = 0;
    for (const sys_store &s : b.stores)
        if (lands(s)) *s.dst = s.v, events++;
        else b.stores[kept++] = s;
    b.stores.resize(kept);
}
inline void land_some(block &b) { // stores to one address together: they must land in order
    const uint64_t salt = rnd() | 1;
    land_stores(b, [=](const sys_store &s) { return ((uintptr_t)s.dst >> 4) * salt >> 40 & 1; });
}
inline bool visible(const sys_store &s) {
    const unsigned self = (unsigned)(me - &me->blk->f[0]);
    return s.thread == self || s.order == sys_store::BLOCK ||
           (s.order == sys_store::WARP && s.thread / 32 == self / 32);
}
inline void release_stores() {
    if (!me->blk->stores.empty()) land_stores(*me->blk, visible);
}

// ---- Warp collectives and barriers ------------------------------------------------------------------------

// Runs the i-th open collective if no lane is missing. Lanes that have exited are not waited for.
inline bool collective_complete(warp &w, size_t i) {
    open_collective m = w.open[i];
    if (m.arrived != (m.mask & w.live)) return false;
    w.open[i] = w.open.back(), w.open.pop_back();
    m.act(w, m.arrived);
    wake(w, m.arrived & ~lane_bit());
    return true;
}

// A lane writes its operands to post(). collective() returns its results once all lanes of the mask have come.
inline uint32_t *post() { return me->w->in[me->lane]; }
inline const uint32_t *collective(uint32_t mask, const char *what, site at, action act) {
    warp &w = *me->w;
    const uint32_t bit = lane_bit(), *out = w.out[me->lane];
    if (!(mask & bit)) die("%s at %s:%d: lane %u is not in the mask %08x", what, at.file, at.line, me->lane, mask);
    size_t i = 0;
    for (; i < w.open.size(); i++) {
        open_collective &m = w.open[i];
        if (m.mask == mask && m.at == at && same_text(m.what, what)) break;
        if ((m.mask & bit) && (m.arrived & mask)) // each would wait for the other
            die("warp %u diverged: lane %u is at %s %s:%d with mask %08x, lanes %08x wait at %s %s:%d with "
                "mask %08x",
                (unsigned)(&w - &me->blk->w[0]), me->lane, what, at.file, at.line, mask, m.arrived, m.what, m.at.file,
                m.at.line, m.mask);
    }
    if (i == w.open.size()) w.open.push_back({mask, 0, at, what, act});
    w.open[i].arrived |= bit;
    if (!collective_complete(w, i)) wait(what, at);
    return out;
}

template <class F>
inline void for_lanes(uint32_t lanes, F fn) {
    for (; lanes; lanes &= lanes - 1) fn((unsigned)__builtin_ctz(lanes));
}

// Waits at a barrier for n threads and returns how many came with pred. all: it is __syncthreads, which every thread
// of the block must reach at the same line.
inline unsigned barrier(int id, unsigned n, bool all, bool pred, const char *what, site at) {
    block &b = *me->blk;
    barrier_state &r = b.bar[id];
    if (all && b.live != b.n)
        die("divergent barrier: %s at %s:%d, %u threads of the block have exited", what, at.file, at.line,
            b.n - b.live);
    if (r.arrived && (r.expected != n || (all && !(r.at == at))))
        die("divergent barrier: %s at %s:%d for %u threads, %u threads wait at %s:%d for %u", what, at.file, at.line, n,
            r.arrived, r.at.file, r.at.line, r.expected);
    r.expected = n, r.at = at, r.yes += pred;
    if (++r.arrived < n) {
        me->w->at_barrier[id] |= lane_bit();
        wait(what, at);
    } else {
        for (sys_store &s : b.stores)
            if (all || b.w[s.thread / 32].at_barrier[id] || &b.w[s.thread / 32] == me->w) s.order = sys_store::BLOCK;
        r.result = r.yes, r.arrived = r.yes = 0;
        for (warp &w : b.w) wake(w, w.at_barrier[id]), w.at_barrier[id] = 0;
    }
    return r.result;
}

inline void land(const async_copy &c) {
    if (c.src) memcpy(c.dst, c.src, 16);
    else memset(c.dst, 0, 16);
}

// ---- Mutation: barriers that are left out -----------------------------------------------------------------
inline barrier_site &find_barrier(site at, const char *kind) {
    // Cache, by address of the file's name, line and kind: 1 + an index into barrier_sites, which may be wrong.
    static unsigned table[1024];
    unsigned &slot = table[((uintptr_t)at.file * 31 + (unsigned)at.line * 7 + (unsigned char)kind[6]) & 1023];
    auto is = [&](const barrier_site &b) {
        return b.line == at.line && same_text(b.kind, kind) && same_text(b.file, at.file);
    };
    if (slot && is(barrier_sites[slot - 1])) return barrier_sites[slot - 1];
    for (slot = 1; slot <= barrier_sites.size(); slot++)
        if (is(barrier_sites[slot - 1])) return barrier_sites[slot - 1];
    barrier_sites.push_back({at.file, at.line, at.function, kind, 0, false});
    return barrier_sites.back();
}
inline bool skipped(site at, const char *kind) {
    barrier_site &b = find_barrier(at, kind);
    b.count++;
    return b.skip;
}
// barriers() returns all barriers seen so far. skip() turns those of a line off (only of a kind, if given); unskip()
// turns all on again.
inline std::vector<barrier_site> barriers() { return barrier_sites; }
inline void skip(const char *file, int line, const char *kind = nullptr) {
    unsigned found = 0;
    for (barrier_site &b : barrier_sites)
        if (b.line == line && same_text(b.file, file) && (!kind || same_text(b.kind, kind))) b.skip = true, found++;
    if (!found) die("skip: no barrier has been seen at %s:%d", file, line);
}
inline void unskip() {
    for (barrier_site &b : barrier_sites) b.skip = false;
}

// ---- Blocks -----------------------------------------------------------------------------------------------

// Places a shared array of this block after the others.
inline char *place_array(block &b, const void *key, const char *label, size_t bytes, size_t align) {
    char *p = (char *)(((uintptr_t)b.top + align - 1) & ~(uintptr_t)(align - 1));
    b.smem_bytes += bytes;
    if (b.smem_bytes > SMEM_MAX) die("%s: %zu bytes of shared memory, the limit is %zu", label, b.smem_bytes, SMEM_MAX);
    if (b.smem_bytes - b.run->k->smem > SMEM_STATIC)
        die("%s: %zu bytes of static shared memory, the limit is %zu", label, b.smem_bytes - b.run->k->smem,
            SMEM_STATIC);
    if (p + bytes + RED > b.arena + ARENA) die("%s: too many shared arrays", label);
    memset(b.top, CANARY, (size_t)(p - b.top)), memset(p, POISON_SMEM, bytes), memset(p + bytes, CANARY, RED);
    b.arrays.push_back({key, p, bytes, label});
    b.top = p + bytes + RED;
    return p;
}

// Implements SHARED. key: one address per instantiation of the surrounding function, because nvcc makes one array for
// each.
inline void *shared_array_of(const void *key, const char *label, size_t bytes, size_t align) {
    for (shared_array &a : me->blk->arrays)
        if (a.key == key) return a.p;
    return place_array(*me->blk, key, label, bytes, align < 16 ? 16 : align);
}
inline void *dynamic_array() { return me->blk->arrays[0].p; }

// Returns the first byte of a red zone that was overwritten, or null.
inline const char *overwritten(const char *zone, size_t n) {
    for (; n; zone++, n--)
        if ((uint8_t)*zone != CANARY) return zone;
    return nullptr;
}

// Dies unless the n bytes at p, aligned to n, are shared memory of this block.
inline void check_shared(const void *p, size_t n, const char *what, site at) {
    if ((uintptr_t)p % n)
        die("%s at %s:%d: shared address %p is not aligned to %zu bytes", what, at.file, at.line, p, n);
    for (shared_array &a : me->blk->arrays)
        if ((char *)p >= a.p && (char *)p + n <= a.p + a.bytes) return;
    die("%s at %s:%d: %p is not in shared memory of this block", what, at.file, at.line, p);
}
inline void check_aligned(const void *p, size_t n, const char *what, site at) {
    if ((uintptr_t)p % n) die("%s at %s:%d: address %p is not aligned to %zu bytes", what, at.file, at.line, p, n);
}

inline void trigger(fiber &f) {
    if (f.triggered) return;
    f.triggered = true;
    if (++f.blk->triggers == f.blk->n) f.blk->run->triggered++;
}

inline void fiber_main() {
    fiber &f = *me;
    block &b = *f.blk;
    b.run->k->body();
    const barrier_state &r = b.bar[0];
    if (r.arrived && r.expected == b.n)
        die("divergent barrier: the thread exits, %u threads wait at %s:%d", r.arrived, r.at.file, r.at.line);
    trigger(f);
    f.w->live &= ~lane_bit();
    for (size_t i = 0; i < f.w->open.size();)
        if (!collective_complete(*f.w, i)) i++;
    if (!--b.live) finished.push_back(&b);
    wait("exit", {"", 0});
    __builtin_unreachable();
}

// Tops of stacks are staggered: otherwise they would all compete for the same few cache lines.
inline void fiber_start(fiber &f, unsigned index) {
    static unsigned stacks;
    if (!f.stack) {
        f.stack = (char *)mmap(nullptr, PAGE + STACK, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f.stack == MAP_FAILED) die("no memory for stacks");
        // A guard page costs two of the 65,530 mappings of a process. Once many are used, only the first thread of
        // each warp gets one.
        if (index % 32 == 0 || stacks++ < 8192) mprotect(f.stack, PAGE, PROT_NONE);
    }
    f.ctx.start(f.stack + PAGE, f.stack + PAGE + STACK - (index * 192 & 4095), fiber_main);
}

inline void block_start(launch &l) {
    if (idle_blocks.empty()) idle_blocks.push_back(std::make_unique<block>());
    resident.push_back(std::move(idle_blocks.back()));
    idle_blocks.pop_back();
    block &b = *resident.back();
    const dim3 grid = l.k->grid, dim = l.k->dim;
    const uint64_t i = (l.first + l.started++ * l.stride) % l.blocks;
    b.run = &l;
    b.idx = {(unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y), (unsigned)(i / grid.x / grid.y)};
    b.n = b.live = dim.x * dim.y * dim.z, b.triggers = 0;
    for (barrier_state &s : b.bar) s = {};
    if (!b.arena) b.arena = (char *)aligned_alloc(1024, ARENA);
    b.top = b.arena + RED, b.smem_bytes = 0, b.arrays.clear();
    memset(b.arena, CANARY, RED);
    place_array(b, nullptr, "the dynamic array", l.k->smem, 1024);
    const unsigned warps = (b.n + 31) / 32;
    if (b.f.size() < warps * 32) b.f.resize(warps * 32);
    b.w.resize(warps);
    for (unsigned t = 0; t < b.n; t++) {
        fiber &f = b.f[t];
        f.tid = {t % dim.x, t / dim.x % dim.y, t / dim.x / dim.y};
        f.lane = t % 32, f.w = &b.w[t / 32], f.blk = &b;
        f.triggered = false, f.commits = 0, f.polled = nullptr, f.pending.clear();
        fiber_start(f, t);
    }
    for (unsigned i_w = 0; i_w < warps; i_w++) {
        warp &w = b.w[i_w];
        const unsigned lanes = std::min(32u, b.n - i_w * 32);
        w.lane = &b.f[i_w * 32];
        w.live = lanes < 32 ? (1u << lanes) - 1 : FULL;
        w.runnable = w.spinning = w.parked = 0, w.priority = (uint32_t)rnd(), w.listed = false;
        memset(w.at_barrier, 0, sizeof w.at_barrier);
        w.open.clear();
        wake(w, w.live);
    }
}

// ---- Streams ----------------------------------------------------------------------------------------------

inline void launch_begin(op &o, int device) {
    const dim3 g = o.k->grid;
    o.run = std::make_shared<launch>();
    launch &l = *o.run;
    l.k = o.k.get(), l.device = device, l.blocks = (uint64_t)g.x * g.y * g.z;
    l.first = rnd() % l.blocks;
    do l.stride = 1 + rnd() % l.blocks;
    while (std::gcd(l.stride, l.blocks) != 1);
    churn = (unsigned[]){3, 15, 63}[rnd() % 3];
}

// The legacy stream and the blocking streams of a device run their work in the order in which it was queued.
inline bool may_start(const CUstream_st &s, const op &o) {
    if (o.event && o.event->done < o.event_count) return false;
    if (!s.blocking) return true;
    for (auto &t : streams)
        if (&t != &s && t.blocking && !t.q.empty() && t.q.front().seq < o.seq && (s.legacy || t.legacy) &&
            t.device == s.device)
            return false;
    return true;
}

// Programmatic dependent launch: when the i-th kernel of a stream begins, or has let its dependents go, the kernel
// after it may start. Its blocks then run up to grid_dependency_wait.
inline void start_next_early(CUstream_st &s, size_t i) {
    launch &l = *s.q[i].run;
    if (l.next_decided) return;
    l.next_decided = true;
    if (i + 1 == s.q.size() || !s.q[i + 1].k || !s.q[i + 1].k->pdl || !may_start(s, s.q[i + 1]) || coin()) return;
    launch_begin(s.q[i + 1], s.device);
    launch &next = *s.q[i + 1].run;
    next.early = true;
    for (uint64_t n = std::min<uint64_t>(next.blocks, 1 + rnd() % 16); n; n--) block_start(next);
}

// For a collective at the head of a stream: nccl_ready tells whether the parts of all ranks are, too; nccl_run
// executes them.
inline bool nccl_ready(const nccl_call &);
inline void nccl_run(CUstream_st &);

// Starts a block or a kernel, or does other work of a stream. Returns false if there is nothing to start.
inline bool start_something() {
    static std::vector<CUstream_st *> can;
    can.clear();
    for (auto &s : streams) {
        if (s.q.empty()) continue;
        const launch *l = s.q.front().run.get();
        for (size_t i = 1; i < s.q.size() && s.q[i].run && s.q[i].run->triggered == s.q[i].run->blocks; i++)
            start_next_early(s, i);
        const op &head = s.q.front();
        if (l           ? l->started < l->blocks && l->started - l->done < RESIDENT_MAX
            : head.nccl ? nccl_ready(*head.nccl)
                        : may_start(s, head))
            can.push_back(&s);
    }
    if (can.empty()) return !ready.empty();
    CUstream_st &s = *can[rnd() % can.size()];
    op &o = s.q.front();
    // Often one block alone: most bugs need no more, and it is faster. Otherwise some blocks together.
    if (o.run) {
        launch &l = *o.run;
        for (uint64_t n = rnd() % 4 ? 1 : 1 + rnd() % 8; n && l.started < l.blocks; n--) block_start(l);
    } else if (o.k) {
        launch_begin(o, s.device), start_next_early(s, 0);
    } else if (o.nccl) {
        nccl_run(s);
    } else {
        if (o.work) o.work();
        s.q.pop_front(), news++;
    }
    return true;
}

inline void launch_end(launch &l) {
    if (l.k->pdl && !l.waited)
        die("kernel %s was launched with LAUNCH_PDL and no thread called grid_dependency_wait", l.k->name);
    for (auto &s : streams) {
        if (s.q.empty() || s.q.front().run.get() != &l) continue;
        s.q.pop_front(), news++; // frees l
        launch *next = s.q.empty() ? nullptr : s.q.front().run.get();
        if (!next) return;
        next->early = false;
        if (next->done == next->blocks) return launch_end(*next); // it never waited and was faster
        for (auto &b : resident)
            if (b->run == next)
                for (warp &w : b->w) wake(w, w.parked), w.parked = 0;
        return;
    }
}

inline void retire_blocks() {
    for (block *b : finished) {
        launch &l = *b->run;
        land_stores(*b, [](const sys_store &) { return true; });
        for (shared_array &a : b->arrays) {
            const char *bad = overwritten(a.p - RED, RED);
            if (!bad) bad = overwritten(a.p + a.bytes, RED);
            if (bad)
                die("kernel %s, block (%u,%u,%u): out of bounds: shared array %s of %zu bytes was written at "
                    "offset %td",
                    l.k->name, b->idx.x, b->idx.y, b->idx.z, a.label, a.bytes, bad - a.p);
        }
        auto it = std::find_if(resident.begin(), resident.end(), [&](auto &r) { return r.get() == b; });
        idle_blocks.push_back(std::move(*it));
        *it = std::move(resident.back());
        resident.pop_back();
        if (++l.done == l.blocks) launch_end(l);
    }
    finished.clear();
}

// ---- Polling ----------------------------------------------------------------------------------------------

// Lets other threads run while this one polls. Now and then it does not, so that the thread also sees old values.
inline void spin(const char *what, site at) {
    if (!(rnd() & 3)) return;
    me->w->spinning |= lane_bit(), spinners++;
    yield(what, at);
}
inline void wake_spinners() {
    spinners = 0;
    for (auto &b : resident) {
        if (!b->stores.empty() && !(rnd() & 3)) land_some(*b);
        for (warp &w : b->w) wake(w, w.spinning), w.spinning = 0;
    }
}

// ---- Running what is queued -------------------------------------------------------------------------------

[[noreturn]] inline void deadlock() {
    std::map<std::string, unsigned> groups;
    for (auto &b : resident)
        for (unsigned t = 0; t < b->n; t++) {
            const fiber &f = b->f[t];
            if (!(f.w->live >> f.lane & 1)) continue;
            groups[std::string("kernel ") + b->run->k->name + ": " + f.what + " at " + f.at.file + ":" +
                   std::to_string(f.at.line)]++;
        }
    for (auto &g : groups) fprintf(stderr, "cuemu: %u threads wait in %s\n", g.second, g.first.c_str());
    for (auto &s : streams)
        if (!s.q.empty() && s.q.front().event) fprintf(stderr, "cuemu: a stream waits for an event\n");
        else if (const nccl_call *c = s.q.empty() ? nullptr : s.q.front().nccl.get())
            fprintf(stderr, "cuemu: rank %u of %zu waits in %s\n", c->rank, c->all->device.size(), c->what);
    for (auto &t : forming)
        if (!t.second->broken)
            fprintf(stderr, "cuemu: %u of %zu ranks have not called ncclCommInitRank\n", t.second->missing,
                    t.second->device.size());
    die("deadlock: %zu blocks are resident and nothing can run", resident.size());
}

// Returns the allocation that p points into, or null.
inline const allocation *find_allocation(const void *p) {
    auto it = allocations.upper_bound((char *)p);
    if (it == allocations.begin()) return nullptr;
    const allocation &a = (--it)->second;
    return (char *)p < a.p + a.bytes ? &a : nullptr;
}

inline void on_segv(int, siginfo_t *info, void *) {
    signal(SIGSEGV, SIG_DFL);
    // Not the emulator's fault: it happens again and ends the process.
    if (me == &host || !pthread_equal(runner, pthread_self())) return;
    char *p = (char *)info->si_addr;
    if (p >= me->stack && p < me->stack + PAGE) die("stack overflow: more than %zu bytes", STACK);
    for (auto &[base, a] : allocations)
        if (p >= a.map && p < a.map + a.map_bytes)
            die("out of bounds: access at offset %td of an allocation of %zu bytes", p - base, a.bytes);
    die("access to %p, which is not allocated", (void *)p);
}

inline void catch_segv() {
    static bool done;
    if (std::exchange(done, true)) return;
    struct sigaction sa = {};
    sa.sa_sigaction = on_segv, sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &sa, nullptr);
}

inline void check_allocation(const allocation &a) {
    if (!a.map) return;
    const char *bad = overwritten(a.p + a.bytes, -a.bytes & 255);
    const size_t before = std::min(RED, (size_t)(a.p - a.map) - PAGE);
    if (!bad) bad = overwritten(a.p - before, before);
    if (bad) die("out of bounds: an allocation of %zu bytes was written at offset %td", a.bytes, bad - a.p);
}

struct listener { // a thread that found nothing to run
    uint64_t heard = 0;
    double since = 0; // when the news last changed
    unsigned jumps = 0;
};

inline void timer_jump(uint64_t ns) { timer += ns; }

// Waits a little for other host threads. If they do nothing, the timer of kernels that read it jumps ahead: 1000
// seconds in all, in steps of ten. Returns false if nothing will ever happen.
inline bool listen(listener &l) {
    if (l.heard != news) l.heard = news, l.since = real_time(), l.jumps = 0;
    if (host_threads == 1 || real_time() - l.since > deadlock_seconds)
        return timer_read && l.jumps++ < 100 ? timer_jump(10000000000), true : false;
    if (announced != news) announced = news, news_came.notify_all();
    std::unique_lock<std::mutex> lock(big_lock, std::adopt_lock);
    news_came.wait_for(lock, std::chrono::milliseconds(1), [&] { return news != l.heard; });
    lock.release();
    return runner = pthread_self(), true;
}

// Gives the lock to a thread that wants it.
inline void give_way() {
    const unsigned before = contenders;
    big_lock.unlock();
    for (int i = 0; i < 1000 && contenders >= before; i++) std::this_thread::yield();
    big_lock.lock();
    runner = pthread_self();
}

// Runs what is queued on all streams until done(), for at most `rounds` rounds (0: no limit). With one host thread it
// runs until nothing can go on any more: a stream that should have waited for another is then far ahead, and it shows.
template <class F>
void drain(F done, unsigned rounds = 0) {
    uint64_t seen = 0;
    unsigned idle = 0; // rounds in which threads polled and nothing else happened
    listener ear;
    catch_segv();
    runner = pthread_self();
    for (unsigned n = 0; !rounds || n < rounds; n++) {
        me = next_fiber();
        if (me != &host) host.ctx.leave(me->ctx);
        retire_blocks();
        if (contenders && !(rnd() & 15)) give_way();
        if (host_threads > 1 && done()) break;
        if (!ready.empty()) continue;
        // A block none of whose threads polls or waits for the kernel before cannot be helped by other blocks.
        const bool stuck =
            !spinners && std::any_of(resident.begin(), resident.end(), [](auto &b) { return !b->run->early; });
        if (spinners && events != seen) seen = events, idle = 0, wake_spinners();
        else if (!stuck && start_something()) continue;
        else if (spinners && ++idle < 64) wake_spinners();
        else if (done() || rounds) break;
        else if (stuck || !listen(ear)) deadlock();
        else idle = 60, wake_spinners();
    }
    if (rounds) return;
    for (auto &a : allocations) check_allocation(a.second);
    streams.remove_if([](auto &s) { return s.dead && s.q.empty(); });
}

// Conditions to wait for: everything queued until now on a stream, or on a device, is done.
inline auto stream_done(const CUstream_st *s) {
    return [s, last = op_seq] { return s->q.empty() || s->q.front().seq > last; };
}
inline auto device_done(int device) {
    return [device, last = op_seq] {
        return std::all_of(streams.begin(), streams.end(),
                           [&](auto &s) { return s.device != device || s.q.empty() || s.q.front().seq > last; });
    };
}

// ---- What the host API is made of -------------------------------------------------------------------------

inline cudaError_t fail(cudaError_t e) { return e ? last_error = e : e; }

// Returns whether this call is to fail.
inline bool failing(const char *api) {
    if (me != &host) die("%s is called by a kernel", api);
    auto it = failures.find(api);
    if (it == failures.end() || --it->second > 0) return false;
    failures.erase(it);
    return true;
}

// Begins every API call. waits: the call is not allowed while a stream is capturing.
inline cudaError_t enter(bool waits, const char *api) {
    if (failing(api)) return fail(!strncmp(api, "cudaMalloc", 10) ? cudaErrorMemoryAllocation : cudaErrorUnknown);
    bool capturing = false;
    for (auto &s : streams)
        if (waits && s.capture && (s.capturer == std::thread::id() || s.capturer == std::this_thread::get_id()))
            s.broken = capturing = true;
    return capturing ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

#define CUEMU_ENTER(waits)     \
    cuemu::scope in_this_call; \
    if (const cudaError_t refused = cuemu::enter(waits, __func__)) return refused

// Not inlined: compilers would look inside and warn callers of results that a refused call does not set.
#define CUEMU_API __attribute__((noinline)) inline cudaError_t

// Makes the n-th call of this API from now on fail (1: the next one). A kernel launch is called LAUNCH.
inline void fail_next(const char *api, int n) {
    scope locked;
    failures[api] = n;
}

// Sets the number of devices, 1 to 8, and turns all peer access off.
inline void devices(int n) {
    scope locked;
    if (n < 1 || n > DEVICES_MAX) die("%d devices", n);
    device_count = n;
    for (gpu &g : gpus) memset(g.peer, 0, sizeof g.peer);
    if (current_device >= n) current_device = 0;
}
inline void peers(bool possible) { peers_possible = possible; }
// memory(): bytes that cudaMalloc may give out on each device, or on one. allocated(): bytes given out on the current
// device.
inline void memory(size_t bytes, int device = -1) {
    scope locked;
    for (int i = 0; i < DEVICES_MAX; i++)
        if (device < 0 || i == device) gpus[i].limit = bytes;
}
inline size_t allocated() {
    scope locked;
    return gpus[current_device].used;
}
inline void l2_bytes_of(int device, int bytes) { gpus[device].l2_bytes = bytes; }
inline void integrated_of(int device, bool is) { gpus[device].integrated = is; }
inline void capability_of(int device, int major, int minor) { gpus[device].major = major, gpus[device].minor = minor; }
inline void capability(int major, int minor) {
    for (int i = 0; i < DEVICES_MAX; i++) capability_of(i, major, minor);
}

// A handle of 0 means stream 0 of the current device.
inline CUstream_st *find_stream(cudaStream_t handle) {
    for (auto &s : streams)
        if (handle ? &s == handle && !s.dead : s.legacy && s.device == current_device) return &s;
    if (handle) return nullptr;
    streams.emplace_back();
    streams.back().device = current_device, streams.back().legacy = true;
    return &streams.back();
}

inline cudaError_t append(CUstream_st &s, op o) {
    if (s.capture) return s.capture->ops.push_back(std::move(o)), cudaSuccess;
    o.seq = ++op_seq, news++;
    s.q.push_back(std::move(o));
    return cudaSuccess;
}
// Kernels need a stream of the current device, copies do not.
inline cudaError_t enqueue(cudaStream_t handle, op o, bool any_device = false) {
    CUstream_st *s = find_stream(handle);
    if (!s || (s->device != current_device && !any_device)) return fail(cudaErrorInvalidResourceHandle);
    return append(*s, std::move(o));
}

template <class T>
using no_deduce = std::common_type_t<T>;

// Called with each kernel, as the launch spells it, and its first argument, which it may change: for tests of tests.
inline void (*change_argument)(const char *kernel, void *first);

// Implements LAUNCH. Arguments are converted to the kernel's parameters here and copied for each thread.
template <class... P>
void enqueue_kernel(void (*k)(P...), const char *name, bool pdl, dim3 grid, dim3 dim, size_t smem, cudaStream_t stream,
                    no_deduce<P>... args) {
    scope locked;
    if (enter(false, "LAUNCH")) return;
    auto limit = smem_limit.find({current_device, (const void *)k});
    if (smem > (limit == smem_limit.end() ? SMEM_STATIC : limit->second)) return (void)fail(cudaErrorInvalidValue);
    const uint64_t threads = (uint64_t)dim.x * dim.y * dim.z;
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 || !threads ||
        dim.x > 1024 || dim.y > 1024 || dim.z > 64 || threads > 1024)
        return (void)fail(cudaErrorInvalidConfiguration);
    std::tuple<P...> packed(args...);
    if constexpr (sizeof...(P) > 0)
        if (change_argument) change_argument(name, (void *)&std::get<0>(packed));
    auto body = [k, packed] { std::apply(k, packed); };
    enqueue(stream, {std::make_shared<const kernel>(kernel{name, grid, dim, smem, pdl, body}), {}, {}});
}

// Returns whether the n bytes at p are within one allocation (device), or not in device memory (host).
inline bool accessible(const void *p, size_t n, bool device) {
    const allocation *a = find_allocation(p);
    if (!device) return !a || a->kind != DEVICE;
    return a && a->kind == DEVICE && (char *)p + n <= a->p + a->bytes;
}

} // namespace cuemu

// ---- Host API ---------------------------------------------------------------------------------------------

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaDeviceAttr {
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrIntegrated = 18,
    cudaDevAttrPciBusId = 33,
    cudaDevAttrPciDeviceId = 34,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrPciDomainId = 50,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaDeviceP2PAttr {
    cudaDevP2PAttrPerformanceRank = 1,
    cudaDevP2PAttrAccessSupported,
    cudaDevP2PAttrNativeAtomicSupported,
    cudaDevP2PAttrCudaArrayAccessSupported
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum : unsigned {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventBlockingSync = 1,
    cudaEventDisableTiming = 2,
    cudaHostRegisterDefault = 0,
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2,
    cudaHostAllocDefault = 0,
    cudaHostAllocPortable = 1,
    cudaHostAllocMapped = 2,
    cudaHostAllocWriteCombined = 4
};
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, l2CacheSize, memoryBusWidth, memoryClockRate, clockRate, warpSize;
    int maxThreadsPerBlock, pciBusID, pciDeviceID, pciDomainID, integrated;
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, maxDynamicSharedSizeBytes;
};

CUEMU_API cudaPeekAtLastError() { return cuemu::last_error; }
CUEMU_API cudaGetLastError() { return std::exchange(cuemu::last_error, cudaSuccess); }

namespace cuemu {
inline bool no_device(int device) { return device < 0 || device >= device_count; }
} // namespace cuemu
CUEMU_API cudaGetDeviceCount(int *n) {
    CUEMU_ENTER(false);
    return *n = cuemu::device_count, cudaSuccess;
}
CUEMU_API cudaSetDevice(int device) {
    CUEMU_ENTER(false);
    if (cuemu::no_device(device)) return cuemu::fail(cudaErrorInvalidDevice);
    return cuemu::current_device = device, cudaSuccess;
}
CUEMU_API cudaGetDevice(int *device) {
    CUEMU_ENTER(false);
    return *device = cuemu::current_device, cudaSuccess;
}
CUEMU_API cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    CUEMU_ENTER(false);
    if (cuemu::no_device(device)) return cuemu::fail(cudaErrorInvalidDevice);
    const cuemu::gpu &g = cuemu::gpus[device];
    *p = {};
    strcpy(p->name, "emulated GPU");
    p->totalGlobalMem = g.limit;
    p->sharedMemPerBlock = cuemu::SMEM_STATIC, p->sharedMemPerBlockOptin = cuemu::SMEM_MAX;
    p->sharedMemPerMultiprocessor = cuemu::SMEM_MAX + 1024;
    p->major = g.major, p->minor = g.minor, p->integrated = g.integrated;
    p->multiProcessorCount = 4, p->l2CacheSize = g.l2_bytes, p->memoryBusWidth = 512;
    p->memoryClockRate = 1000000, p->clockRate = 1000000, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
    p->pciBusID = 1 + device;
    return cudaSuccess;
}
CUEMU_API cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device) {
    CUEMU_ENTER(false);
    cudaDeviceProp p;
    if (cudaError_t e = cudaGetDeviceProperties(&p, device)) return e;
    switch (attr) {
    case cudaDevAttrClockRate: return *value = p.clockRate, cudaSuccess;
    case cudaDevAttrMultiProcessorCount: return *value = p.multiProcessorCount, cudaSuccess;
    case cudaDevAttrIntegrated: return *value = p.integrated, cudaSuccess;
    case cudaDevAttrPciBusId: return *value = p.pciBusID, cudaSuccess;
    case cudaDevAttrPciDeviceId: return *value = p.pciDeviceID, cudaSuccess;
    case cudaDevAttrPciDomainId: return *value = p.pciDomainID, cudaSuccess;
    case cudaDevAttrMemoryClockRate: return *value = p.memoryClockRate, cudaSuccess;
    case cudaDevAttrGlobalMemoryBusWidth: return *value = p.memoryBusWidth, cudaSuccess;
    case cudaDevAttrL2CacheSize: return *value = p.l2CacheSize, cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: return *value = p.major, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: return *value = p.minor, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = (int)p.sharedMemPerBlockOptin, cudaSuccess;
    }
    return cuemu::fail(cudaErrorInvalidValue);
}
CUEMU_API cudaDriverGetVersion(int *v) {
    CUEMU_ENTER(false);
    return *v = 13000, cudaSuccess;
}
CUEMU_API cudaRuntimeGetVersion(int *v) {
    CUEMU_ENTER(false);
    return *v = 13000, cudaSuccess;
}
CUEMU_API cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    CUEMU_ENTER(false);
    const cuemu::gpu &g = cuemu::gpus[cuemu::current_device];
    *total = g.limit, *free_bytes = *total - std::min(*total, g.used);
    return cudaSuccess;
}
CUEMU_API cudaDeviceGetPCIBusId(char *id, int bytes, int device) {
    CUEMU_ENTER(false);
    if (cuemu::no_device(device)) return cuemu::fail(cudaErrorInvalidDevice);
    if (!id || bytes < 13) return cuemu::fail(cudaErrorInvalidValue);
    return snprintf(id, (size_t)bytes, "0000:%02x:00.0", 1 + device), cudaSuccess;
}

CUEMU_API cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    CUEMU_ENTER(false);
    if (cuemu::no_device(device) || cuemu::no_device(peer)) return cuemu::fail(cudaErrorInvalidDevice);
    return *can = cuemu::peers_possible && device != peer, cudaSuccess;
}
CUEMU_API cudaDeviceGetP2PAttribute(int *value, cudaDeviceP2PAttr attr, int device, int peer) {
    CUEMU_ENTER(false);
    if (cuemu::no_device(device) || cuemu::no_device(peer) || device == peer)
        return cuemu::fail(cudaErrorInvalidDevice);
    *value = attr == cudaDevP2PAttrAccessSupported && cuemu::peers_possible;
    return cudaSuccess;
}
CUEMU_API cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    CUEMU_ENTER(false);
    if (cuemu::no_device(peer) || peer == cuemu::current_device) return cuemu::fail(cudaErrorInvalidDevice);
    if (flags) return cuemu::fail(cudaErrorInvalidValue);
    if (!cuemu::peers_possible) return cuemu::fail(cudaErrorPeerAccessUnsupported);
    if (std::exchange(cuemu::gpus[cuemu::current_device].peer[peer], true))
        return cuemu::fail(cudaErrorPeerAccessAlreadyEnabled);
    return cudaSuccess;
}
CUEMU_API cudaDeviceDisablePeerAccess(int peer) {
    CUEMU_ENTER(true);
    if (cuemu::no_device(peer)) return cuemu::fail(cudaErrorInvalidDevice);
    if (!std::exchange(cuemu::gpus[cuemu::current_device].peer[peer], false))
        return cuemu::fail(cudaErrorPeerAccessNotEnabled);
    return cudaSuccess;
}

namespace cuemu {
// Allocates between guard pages. The end is the end of a page, up to the slack of 256-byte alignment, which holds a
// canary.
inline cudaError_t allocate(void **p, size_t bytes, memory_kind kind) {
    *p = nullptr;
    if (!bytes) return cudaSuccess;
    gpu &g = gpus[current_device];
    if (bytes > (size_t)1 << 46 || (kind == DEVICE && bytes > g.limit - std::min(g.limit, g.used)))
        return fail(cudaErrorMemoryAllocation);
    const size_t aligned = (bytes + 255) & ~(size_t)255, pages = (aligned + PAGE - 1) & ~(PAGE - 1);
    char *map = (char *)mmap(nullptr, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    mprotect(map + PAGE, pages, PROT_READ | PROT_WRITE);
    char *data = map + PAGE + pages - aligned;
    memset(map + PAGE, CANARY, pages - aligned);
    memset(data, POISON_GLOBAL, bytes), memset(data + bytes, CANARY, aligned - bytes);
    allocations[data] = {data, bytes, kind, map, pages + 2 * PAGE, current_device};
    if (kind == DEVICE) g.used += bytes;
    return *p = data, cudaSuccess;
}
inline cudaError_t release(void *p, memory_kind kind) {
    if (!p) return cudaSuccess;
    auto it = allocations.find((char *)p);
    drain(device_done(it == allocations.end() ? current_device : it->second.device));
    it = allocations.find((char *)p); // another thread may have freed it
    if (it == allocations.end() || it->second.kind != kind)
        return fail(kind == REGISTERED ? cudaErrorHostMemoryNotRegistered : cudaErrorInvalidValue);
    if (it->second.map) munmap(it->second.map, it->second.map_bytes);
    if (kind == DEVICE) gpus[it->second.device].used -= it->second.bytes;
    allocations.erase(it);
    return cudaSuccess;
}

inline void copy_rows(char *dst, size_t dpitch, const char *src, size_t spitch, size_t width, size_t height) {
    for (size_t y = 0; y < height; y++) memmove(dst + y * dpitch, src + y * spitch, width);
}
// Queues a copy. Pageable memory is read when the copy's turn comes, as on machines whose GPUs read it themselves.
// Drivers that stage it read it earlier, but nobody may rely on that.
inline cudaError_t copy(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
                        cudaMemcpyKind kind, cudaStream_t handle) {
    if (!width || !height) return cudaSuccess;
    auto on_device = [=](const void *p, cudaMemcpyKind one_way) {
        return kind == cudaMemcpyDefault ? accessible(p, 1, true) : kind == one_way || kind == cudaMemcpyDeviceToDevice;
    };
    const bool dst_device = on_device(dst, cudaMemcpyHostToDevice), src_device = on_device(src, cudaMemcpyDeviceToHost);
    if (width > dpitch || width > spitch || !accessible(dst, dpitch * (height - 1) + width, dst_device) ||
        !accessible(src, spitch * (height - 1) + width, src_device))
        return fail(cudaErrorInvalidValue);
    return enqueue(handle, {{}, [=] { copy_rows((char *)dst, dpitch, (const char *)src, spitch, width, height); }, {}},
                   true);
}
} // namespace cuemu

template <class T>
CUEMU_API cudaMalloc(T **p, size_t bytes) {
    CUEMU_ENTER(true);
    void *v;
    cudaError_t e = cuemu::allocate(&v, bytes, cuemu::DEVICE);
    return *p = (T *)v, e;
}
template <class T>
CUEMU_API cudaMallocHost(T **p, size_t bytes) {
    CUEMU_ENTER(true);
    void *v;
    cudaError_t e = cuemu::allocate(&v, bytes, cuemu::PINNED);
    return *p = (T *)v, e;
}
CUEMU_API cudaHostAlloc(void **p, size_t bytes, unsigned) {
    CUEMU_ENTER(true);
    return cuemu::allocate(p, bytes, cuemu::PINNED);
}
CUEMU_API cudaHostGetDevicePointer(void **p, void *host, unsigned) {
    CUEMU_ENTER(false);
    const cuemu::allocation *a = cuemu::find_allocation(host);
    if (!a || a->kind == cuemu::DEVICE) return *p = nullptr, cuemu::fail(cudaErrorInvalidValue);
    return *p = host, cudaSuccess;
}
CUEMU_API cudaFree(void *p) {
    CUEMU_ENTER(true);
    return cuemu::release(p, cuemu::DEVICE);
}
CUEMU_API cudaFreeHost(void *p) {
    CUEMU_ENTER(true);
    return cuemu::release(p, cuemu::PINNED);
}
CUEMU_API cudaHostRegister(void *p, size_t bytes, unsigned) {
    CUEMU_ENTER(true);
    if (!p || !bytes || cuemu::find_allocation(p)) return cuemu::fail(cudaErrorInvalidValue);
    cuemu::allocations[(char *)p] = {(char *)p, bytes, cuemu::REGISTERED, nullptr, 0, cuemu::current_device};
    return cudaSuccess;
}
CUEMU_API cudaHostUnregister(void *p) {
    CUEMU_ENTER(true);
    return cuemu::release(p, cuemu::REGISTERED);
}

CUEMU_API cudaMemcpy(void *dst, const void *src, size_t n, cudaMemcpyKind kind) {
    CUEMU_ENTER(true);
    cudaError_t e = cuemu::copy(dst, n, src, n, n, 1, kind, nullptr);
    cuemu::drain(cuemu::stream_done(cuemu::find_stream(nullptr)));
    return e;
}
CUEMU_API cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    CUEMU_ENTER(false);
    return cuemu::copy(dst, n, src, n, n, 1, kind, stream);
}
CUEMU_API cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device, size_t n,
                              cudaStream_t stream = nullptr) {
    CUEMU_ENTER(false);
    const cuemu::allocation *d = cuemu::find_allocation(dst), *s = cuemu::find_allocation(src);
    if (cuemu::no_device(dst_device) || cuemu::no_device(src_device)) return cuemu::fail(cudaErrorInvalidDevice);
    if (!d || !s || d->device != dst_device || s->device != src_device) return cuemu::fail(cudaErrorInvalidValue);
    constexpr double LINK = 10e9; // bytes per second between devices, however fast this machine's memory is
    if (dst_device != src_device)
        cuemu::enqueue(stream,
                       {{}, [=] { std::this_thread::sleep_for(std::chrono::duration<double>((double)n / LINK)); }, {}},
                       true);
    return cuemu::copy(dst, n, src, n, n, 1, cudaMemcpyDeviceToDevice, stream);
}
CUEMU_API cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
                            cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    CUEMU_ENTER(false);
    return cuemu::copy(dst, dpitch, src, spitch, width, height, kind, stream);
}
CUEMU_API cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t stream = nullptr) {
    CUEMU_ENTER(false);
    if (!n) return cudaSuccess;
    if (!cuemu::accessible(p, n, true)) return cuemu::fail(cudaErrorInvalidValue);
    return cuemu::enqueue(stream, {{}, [=] { memset(p, value, n); }, {}});
}
CUEMU_API cudaMemset(void *p, int value, size_t n) {
    CUEMU_ENTER(true);
    return cudaMemsetAsync(p, value, n);
}

CUEMU_API cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    CUEMU_ENTER(false);
    *s = &cuemu::streams.emplace_back();
    (*s)->blocking = !(flags & cudaStreamNonBlocking), (*s)->device = cuemu::current_device;
    return cudaSuccess;
}
CUEMU_API cudaStreamCreate(cudaStream_t *s) {
    CUEMU_ENTER(false);
    return cudaStreamCreateWithFlags(s, cudaStreamDefault);
}
CUEMU_API cudaStreamDestroy(cudaStream_t s) {
    CUEMU_ENTER(false);
    if (!s || !cuemu::find_stream(s)) return cuemu::fail(cudaErrorInvalidResourceHandle);
    delete s->capture;
    s->capture = nullptr, s->dead = true;
    return cudaSuccess;
}
CUEMU_API cudaStreamSynchronize(cudaStream_t s) {
    CUEMU_ENTER(true);
    const CUstream_st *found = cuemu::find_stream(s);
    if (!found) return cuemu::fail(cudaErrorInvalidResourceHandle);
    return cuemu::drain(cuemu::stream_done(found)), cudaSuccess;
}
CUEMU_API cudaDeviceSynchronize() {
    CUEMU_ENTER(true);
    return cuemu::drain(cuemu::device_done(cuemu::current_device)), cudaSuccess;
}
namespace cuemu {
// Tells whether done() holds, without waiting. Sometimes some of the queued work runs after the question.
template <class F>
cudaError_t query(F done) {
    if (done()) return cudaSuccess;
    if (coin()) drain(done, 1 + (unsigned)(rnd() % 32));
    if (contenders) give_way();
    return cudaErrorNotReady;
}
} // namespace cuemu
CUEMU_API cudaStreamQuery(cudaStream_t s) {
    CUEMU_ENTER(true);
    const CUstream_st *found = cuemu::find_stream(s);
    return found ? cuemu::query(cuemu::stream_done(found)) : cuemu::fail(cudaErrorInvalidResourceHandle);
}

CUEMU_API cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    CUEMU_ENTER(false);
    return *e = new CUevent_st{std::make_shared<cuemu::event_state>(), cuemu::current_device}, cudaSuccess;
}
CUEMU_API cudaEventCreate(cudaEvent_t *e) {
    CUEMU_ENTER(false);
    return cudaEventCreateWithFlags(e, cudaEventDefault);
}
CUEMU_API cudaEventDestroy(cudaEvent_t e) {
    CUEMU_ENTER(false);
    return delete e, cudaSuccess;
}
CUEMU_API cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    CUEMU_ENTER(false);
    if (!event) return cuemu::fail(cudaErrorInvalidResourceHandle);
    CUstream_st *s = cuemu::find_stream(stream);
    if (s && s->capture) return s->broken = true, cuemu::fail(cudaErrorStreamCaptureUnsupported);
    if (!s || s->device != event->device) return cuemu::fail(cudaErrorInvalidResourceHandle);
    auto record = [state = event->state, count = ++event->state->recorded] {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        state->done = count, state->ms = (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
    };
    return cuemu::append(*s, {{}, record, {}});
}
CUEMU_API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    CUEMU_ENTER(false);
    if (!event) return cuemu::fail(cudaErrorInvalidResourceHandle);
    CUstream_st *s = cuemu::find_stream(stream);
    if (s && s->capture) return s->broken = true, cuemu::fail(cudaErrorStreamCaptureUnsupported);
    if (!s) return cuemu::fail(cudaErrorInvalidResourceHandle);
    return cuemu::append(*s, {{}, {}, event->state, event->state->recorded});
}
namespace cuemu {
inline auto event_done(cudaEvent_t e) {
    return [state = e->state, n = e->state->recorded] { return state->done >= n; };
}
} // namespace cuemu
CUEMU_API cudaEventSynchronize(cudaEvent_t event) {
    CUEMU_ENTER(true);
    if (!event) return cuemu::fail(cudaErrorInvalidResourceHandle);
    return cuemu::drain(cuemu::event_done(event)), cudaSuccess;
}
CUEMU_API cudaEventQuery(cudaEvent_t event) {
    CUEMU_ENTER(true);
    return event ? cuemu::query(cuemu::event_done(event)) : cuemu::fail(cudaErrorInvalidResourceHandle);
}
CUEMU_API cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    CUEMU_ENTER(false);
    if (!from->state->recorded || !to->state->recorded) return cuemu::fail(cudaErrorInvalidResourceHandle);
    if (from->state->done < from->state->recorded || to->state->done < to->state->recorded) return cudaErrorNotReady;
    return *ms = (float)(to->state->ms - from->state->ms), cudaSuccess;
}

template <class... P>
CUEMU_API cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int value) {
    CUEMU_ENTER(false);
    if (value < 0 || (size_t)value > cuemu::SMEM_MAX) return cuemu::fail(cudaErrorInvalidValue);
    return cuemu::smem_limit[{cuemu::current_device, (const void *)kernel}] = (size_t)value, cudaSuccess;
}
template <class... P>
CUEMU_API cudaFuncGetAttributes(cudaFuncAttributes *a, void (*kernel)(P...)) {
    CUEMU_ENTER(false);
    *a = {};
    auto limit = cuemu::smem_limit.find({cuemu::current_device, (const void *)kernel});
    a->maxThreadsPerBlock = 1024;
    a->maxDynamicSharedSizeBytes = (int)(limit == cuemu::smem_limit.end() ? cuemu::SMEM_STATIC : limit->second);
    return cudaSuccess;
}
template <class... P>
CUEMU_API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void (*)(P...), int /*threads*/, size_t /*smem*/) {
    CUEMU_ENTER(false);
    return *n = 2, cudaSuccess;
}

CUEMU_API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    CUEMU_ENTER(false);
    CUstream_st *s = cuemu::find_stream(stream);
    if (!stream || !s || s->capture)
        return cuemu::fail(s ? cudaErrorStreamCaptureUnsupported : cudaErrorInvalidResourceHandle);
    s->capture = new CUgraph_st, s->broken = false;
    s->capturer = mode == cudaStreamCaptureModeGlobal ? std::thread::id() : std::this_thread::get_id();
    return cudaSuccess;
}
CUEMU_API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) { // the capture ends in any case
    cuemu::scope in_this_call;
    const cudaError_t refused = cuemu::enter(false, __func__);
    CUstream_st *s = cuemu::find_stream(stream);
    *graph = nullptr;
    if (!s || !s->capture) return cuemu::fail(cudaErrorInvalidValue);
    CUgraph_st *g = std::exchange(s->capture, nullptr);
    if (refused) return delete g, refused;
    if (s->broken) return delete g, cuemu::fail(cudaErrorStreamCaptureInvalidated);
    return *graph = g, cudaSuccess;
}
CUEMU_API cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long = 0) {
    CUEMU_ENTER(false);
    return *exec = new CUgraphExec_st{graph->ops}, cudaSuccess;
}
CUEMU_API cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    CUEMU_ENTER(false);
    for (const cuemu::op &o : exec->ops)
        if (cudaError_t e = cuemu::enqueue(stream, o)) return e;
    return cudaSuccess;
}
CUEMU_API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
    CUEMU_ENTER(false);
    if (nodes) return cuemu::fail(cudaErrorInvalidValue); // returns only the count
    return *n = graph->ops.size(), cudaSuccess;
}
CUEMU_API cudaGraphDestroy(cudaGraph_t graph) {
    CUEMU_ENTER(false);
    return delete graph, cudaSuccess;
}
CUEMU_API cudaGraphExecDestroy(cudaGraphExec_t exec) {
    CUEMU_ENTER(false);
    return delete exec, cudaSuccess;
}

// ---- Kernels ----------------------------------------------------------------------------------------------

#define LAUNCH(kernel, grid, block, smem, stream, ...) \
    cuemu::enqueue_kernel(kernel, #kernel, false, grid, block, smem, stream, ##__VA_ARGS__)
#define LAUNCH_PDL(kernel, grid, block, smem, stream, ...) \
    cuemu::enqueue_kernel(kernel, #kernel, true, grid, block, smem, stream, ##__VA_ARGS__)

#define threadIdx (cuemu::me->tid)
#define blockIdx  (cuemu::me->blk->idx)
#define blockDim  (cuemu::me->blk->run->k->dim)
#define gridDim   (cuemu::me->blk->run->k->grid)

#define CUEMU_STR_(x)     #x
#define CUEMU_STR(x)      CUEMU_STR_(x)
#define DYN_SMEM(T, name) T *name = (T *)cuemu::dynamic_array()
#define SHARED(T, name, count)                                                                         \
    static char name##_key_;                                                                           \
    T *name = (T *)cuemu::shared_array_of(&name##_key_, #name " at " __FILE__ ":" CUEMU_STR(__LINE__), \
                                          sizeof(T) * (count), alignof(T))

#define CUEMU_AT cuemu::site at = cuemu::site::here()

inline void __syncthreads(CUEMU_AT) {
    if (!cuemu::skipped(at, "__syncthreads")) cuemu::barrier(0, cuemu::me->blk->n, true, false, "__syncthreads", at);
}
inline int __syncthreads_count(int pred, CUEMU_AT) {
    return (int)cuemu::barrier(0, cuemu::me->blk->n, true, pred, "__syncthreads_count", at);
}
inline int __syncthreads_or(int pred, CUEMU_AT) {
    return cuemu::barrier(0, cuemu::me->blk->n, true, pred, "__syncthreads_or", at) != 0;
}
inline int __syncthreads_and(int pred, CUEMU_AT) {
    return cuemu::barrier(0, cuemu::me->blk->n, true, pred, "__syncthreads_and", at) == cuemu::me->blk->n;
}
// barrier.sync id, n_threads
inline void named_barrier(int id, int n_threads, CUEMU_AT) {
    if (id < 0 || id > 15 || n_threads <= 0 || n_threads % 32 || (unsigned)n_threads > cuemu::me->blk->n)
        cuemu::die("named_barrier at %s:%d: id %d, %d threads", at.file, at.line, id, n_threads);
    if (!cuemu::skipped(at, "named_barrier"))
        cuemu::barrier(id, (unsigned)n_threads, false, false, "named_barrier", at);
}
inline void __syncwarp(uint32_t mask = cuemu::FULL, CUEMU_AT) {
    if (cuemu::skipped(at, "__syncwarp")) return;
    cuemu::collective(mask, "__syncwarp", at, [](cuemu::warp &w, uint32_t lanes) {
        cuemu::block &b = *w.lane->blk;
        for (cuemu::sys_store &s : b.stores)
            if (&b.w[s.thread / 32] == &w && (lanes >> s.thread % 32 & 1) && s.order == cuemu::sys_store::THREAD)
                s.order = cuemu::sys_store::WARP;
    });
}

namespace cuemu {
// Returns the value of lane src; all ones if that lane does not take part (in CUDA it is undefined).
template <class T>
T shuffle(uint32_t mask, T v, unsigned src, const char *what, site at) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffles move up to 8 bytes");
    const action move = [](warp &w, uint32_t lanes) {
        for_lanes(lanes, [&](unsigned l) {
            const unsigned from = w.in[l][2];
            if (lanes >> from & 1) memcpy(w.out[l], w.in[from], 8);
            else memset(w.out[l], 0xff, 8);
        });
    };
    uint32_t *in = post();
    memcpy(in, &v, sizeof v), in[2] = src;
    memcpy((void *)&v, collective(mask, what, at, move), sizeof v);
    return v;
}
inline uint32_t ballot(uint32_t mask, bool pred, const char *what, site at) {
    *post() = pred;
    return *collective(mask, what, at, [](warp &w, uint32_t lanes) {
        uint32_t yes = 0;
        for_lanes(lanes, [&](unsigned l) { yes |= w.in[l][0] << l; });
        for_lanes(lanes, [&](unsigned l) { w.out[l][0] = yes; });
    });
}
template <class T, T (*fold)(T, T)>
T reduce(uint32_t mask, T v, const char *what, site at) {
    static_assert(std::is_same<T, int>::value || std::is_same<T, unsigned>::value, "as in CUDA");
    const action fold_all = [](warp &w, uint32_t lanes) {
        T sum = (T)w.in[__builtin_ctz(lanes)][0];
        for_lanes(lanes & (lanes - 1), [&](unsigned l) { sum = fold(sum, (T)w.in[l][0]); });
        for_lanes(lanes, [&](unsigned l) { w.out[l][0] = (uint32_t)sum; });
    };
    *post() = (uint32_t)v;
    return (T)*collective(mask, what, at, fold_all);
}
template <class T>
T fold_add(T a, T b) {
    return (T)((unsigned)a + (unsigned)b);
}
template <class T>
T fold_max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
T fold_min(T a, T b) {
    return b < a ? b : a;
}
} // namespace cuemu

template <class T>
T __shfl_sync(uint32_t mask, T v, int src, int width = 32, CUEMU_AT) {
    const unsigned lane = cuemu::me->lane, w = (unsigned)width;
    return cuemu::shuffle(mask, v, (lane & ~(w - 1)) | ((unsigned)src & (w - 1)), "__shfl_sync", at);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int bits, int width = 32, CUEMU_AT) {
    const unsigned lane = cuemu::me->lane, end = (lane | ((unsigned)width - 1)) + 1, src = lane ^ (unsigned)bits;
    return cuemu::shuffle(mask, v, src < end ? src : lane, "__shfl_xor_sync", at);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, unsigned delta, int width = 32, CUEMU_AT) {
    const unsigned lane = cuemu::me->lane, begin = lane & ~((unsigned)width - 1);
    return cuemu::shuffle(mask, v, lane - begin >= delta ? lane - delta : lane, "__shfl_up_sync", at);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T v, unsigned delta, int width = 32, CUEMU_AT) {
    const unsigned lane = cuemu::me->lane, last = lane | ((unsigned)width - 1);
    return cuemu::shuffle(mask, v, last - lane >= delta ? lane + delta : lane, "__shfl_down_sync", at);
}
inline uint32_t __ballot_sync(uint32_t mask, int pred, CUEMU_AT) {
    return cuemu::ballot(mask, pred, "__ballot_sync", at);
}
inline int __any_sync(uint32_t mask, int pred, CUEMU_AT) { return cuemu::ballot(mask, pred, "__any_sync", at) != 0; }
inline int __all_sync(uint32_t mask, int pred, CUEMU_AT) { return cuemu::ballot(mask, !pred, "__all_sync", at) == 0; }
template <class T>
T __reduce_add_sync(uint32_t mask, T v, CUEMU_AT) {
    return cuemu::reduce<T, cuemu::fold_add<T>>(mask, v, "__reduce_add_sync", at);
}
template <class T>
T __reduce_max_sync(uint32_t mask, T v, CUEMU_AT) {
    return cuemu::reduce<T, cuemu::fold_max<T>>(mask, v, "__reduce_max_sync", at);
}
template <class T>
T __reduce_min_sync(uint32_t mask, T v, CUEMU_AT) {
    return cuemu::reduce<T, cuemu::fold_min<T>>(mask, v, "__reduce_min_sync", at);
}

// ---- Device functions of CUDA -----------------------------------------------------------------------------

#define CUEMU_MIN_MAX(T)                             \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
CUEMU_MIN_MAX(int)
CUEMU_MIN_MAX(unsigned)
CUEMU_MIN_MAX(long)
CUEMU_MIN_MAX(unsigned long)
CUEMU_MIN_MAX(long long)
CUEMU_MIN_MAX(unsigned long long)
#undef CUEMU_MIN_MAX
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline float __uint_as_float(unsigned u) {
    float f;
    return memcpy(&f, &u, 4), f;
}
inline unsigned __float_as_uint(float f) {
    unsigned u;
    return memcpy(&u, &f, 4), u;
}
inline float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
inline int __float_as_int(float f) { return (int)__float_as_uint(f); }

// Macros, because glibc declares some of these names itself but does not let programs link to them.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#if !defined __GLIBC__ || !__GLIBC_PREREQ(2, 42)
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#endif
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float x) { // saturates; NaN: 0
    if (x != x) return 0;
    return x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : (int)lrintf(x);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __brev(unsigned x) {
    x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
    x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
    x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
    return __builtin_bswap32(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
// prmt.b32: each nibble of s selects a byte of y:x; with bit 3 set, that byte's sign bit, 8 times.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned sel = s >> 4 * i, byte = (unsigned)(both >> 8 * (sel & 7)) & 255;
        r |= (sel & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((uint64_t)hi << 32 | lo) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (shift & 31));
}

template <class T>
T __ldg(const T *p) {
    return *p;
}
inline void __threadfence() { cuemu::release_stores(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { cuemu::release_stores(); }
inline void __nanosleep(unsigned, CUEMU_AT) { cuemu::spin("__nanosleep", at); }
inline long long clock64() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
// Returns nanoseconds. 100 pass from one reading to the next, and seconds while nothing else can happen.
inline uint64_t global_timer() {
    cuemu::timer_read = true;
    return cuemu::timer += 100;
}
[[noreturn]] inline void __trap(CUEMU_AT) { cuemu::die("__trap at %s:%d", at.file, at.line); }

namespace cuemu {
// Sets *p to fn(*p) and returns what it was.
template <class T, class F>
T atomic(T *p, F fn) {
    static_assert(std::is_same<T, int>::value || std::is_same<T, unsigned>::value ||
                      std::is_same<T, unsigned long long>::value || std::is_same<T, float>::value,
                  "as in CUDA");
    events++;
    const T old = *p;
    *p = fn(old);
    return old;
}
} // namespace cuemu
template <class T>
T atomicAdd(T *p, cuemu::no_deduce<T> v) {
    return cuemu::atomic(p, [=](T x) { return x + v; });
}
template <class T>
T atomicMax(T *p, cuemu::no_deduce<T> v) {
    static_assert(std::is_integral<T>::value, "as in CUDA");
    return cuemu::atomic(p, [=](T x) { return x < v ? v : x; });
}
template <class T>
T atomicMin(T *p, cuemu::no_deduce<T> v) {
    static_assert(std::is_integral<T>::value, "as in CUDA");
    return cuemu::atomic(p, [=](T x) { return v < x ? v : x; });
}
template <class T>
T atomicExch(T *p, cuemu::no_deduce<T> v) {
    return cuemu::atomic(p, [=](T) { return v; });
}
template <class T>
T atomicCAS(T *p, cuemu::no_deduce<T> expected, cuemu::no_deduce<T> v) {
    static_assert(std::is_integral<T>::value, "as in CUDA");
    return cuemu::atomic(p, [=](T x) { return x == expected ? v : x; });
}
template <class T>
T atomicOr(T *p, cuemu::no_deduce<T> v) {
    return cuemu::atomic(p, [=](T x) { return x | v; });
}
template <class T>
T atomicAnd(T *p, cuemu::no_deduce<T> v) {
    return cuemu::atomic(p, [=](T x) { return x & v; });
}

// ---- PTX wrappers: conversions ----------------------------------------------------------------------------

namespace cuemu {
// Formats of few bits: a sign, exponent bits with this bias, mantissa bits. Codes below leave the sign out.

// Returns the value of a finite code.
inline float widen(uint32_t code, int mantissa, int bias) {
    return __uint_as_float(code << (23 - mantissa)) * __uint_as_float((uint32_t)(254 - bias) << 23);
}
// Rounds |x| to the nearest code, ties to even; codes go on beyond the format's largest. Takes doubles, so that sums
// and products of two f16 are exact and are rounded once.
inline uint32_t narrow(double x, int mantissa, int bias) {
    auto bits_of = [](double v) {
        uint64_t u;
        return memcpy(&u, &v, 8), u;
    };
    x = fabs(x);
    const uint64_t bits = bits_of(x), smallest_normal = (uint64_t)(1024 - bias) << 52;
    if (bits < smallest_normal) { // let an addition round, to the unit of its sum
        const uint64_t magic = smallest_normal + ((uint64_t)(52 - mantissa) << 52);
        double sum;
        memcpy(&sum, &magic, 8);
        return (uint32_t)(bits_of(sum + x) - magic);
    }
    const int drop = 52 - mantissa;
    const uint64_t rounded = bits + ((uint64_t)1 << (drop - 1)) - 1 + (bits >> drop & 1);
    return (uint32_t)std::min<uint64_t>((rounded >> drop) - ((uint64_t)(1023 - bias) << mantissa), 0xffff);
}
inline uint16_t to_f16(double x) {
    if (x != x) return 0x7fff;
    return (uint16_t)(std::min(narrow(x, 10, 15), 0x7c00u) | (std::signbit(x) ? 0x8000u : 0));
}
inline uint32_t to_e4m3(float x) {
    if (x != x) return 0x7f;
    return std::min(narrow(x, 3, 7), 0x7eu) | (std::signbit(x) ? 0x80u : 0);
}
inline uint32_t to_e2m1(float x) { // PTX: NaN becomes the largest positive value
    if (x != x) return 7;
    return std::min(narrow(x, 1, 1), 7u) | (std::signbit(x) ? 8u : 0);
}
inline float with_sign(float magnitude, uint32_t negative) { return negative ? -magnitude : magnitude; }
inline float from_e4m3(uint32_t b) { return with_sign((b & 127) == 127 ? NAN : widen(b & 127, 3, 7), b & 128); }
inline float from_e2m1(uint32_t n) {
    static const float value[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return value[n & 15];
}
} // namespace cuemu

inline uint16_t f32_to_f16(float x) { return cuemu::to_f16(x); }
inline float half_to_f32(uint16_t h) {
    const uint32_t m = h & 0x7fffu;
    return cuemu::with_sign(m < 0x7c00 ? cuemu::widen(m, 10, 15) : __uint_as_float(0x7f800000 | m << 13), h & 0x8000u);
}
inline uint32_t f32_to_f16x2(float lo, float hi) { return f32_to_f16(lo) | (uint32_t)f32_to_f16(hi) << 16; }
inline float bf16_value(uint16_t b) { return __uint_as_float((uint32_t)b << 16); }
inline uint32_t f32_to_bf16x2(float lo, float hi) {
    auto one = [](float x) {
        const uint32_t u = __float_as_uint(x);
        return x != x ? 0x7fffu : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    };
    return one(lo) | one(hi) << 16;
}
inline uint16_t f32_to_e4m3x2(float lo, float hi) { return (uint16_t)(cuemu::to_e4m3(lo) | cuemu::to_e4m3(hi) << 8); }
inline uint32_t e4m3x2_to_f16x2(uint16_t x) {
    return f32_to_f16x2(cuemu::from_e4m3(x & 255u), cuemu::from_e4m3((uint32_t)x >> 8));
}
inline uint32_t e2m1x2_to_f16x2(uint8_t x) {
    return f32_to_f16x2(cuemu::from_e2m1(x & 15u), cuemu::from_e2m1((uint32_t)x >> 4));
}
inline uint32_t f32_to_e2m1x2(float lo, float hi) { return cuemu::to_e2m1(lo) | cuemu::to_e2m1(hi) << 4; }

namespace cuemu {
template <class F>
uint32_t each_half(uint32_t a, uint32_t b, uint32_t c, F fn) {
    auto half = [](uint32_t x, int i) { return (double)half_to_f32((uint16_t)(x >> 16 * i)); };
    return to_f16(fn(half(a, 0), half(b, 0), half(c, 0))) | (uint32_t)to_f16(fn(half(a, 1), half(b, 1), half(c, 1)))
                                                                << 16;
}
} // namespace cuemu
inline uint32_t f16x2_mul(uint32_t a, uint32_t b) {
    return cuemu::each_half(a, b, 0, [](double x, double y, double) { return x * y; });
}
inline uint32_t f16x2_add(uint32_t a, uint32_t b) {
    return cuemu::each_half(a, b, 0, [](double x, double y, double) { return x + y; });
}
inline uint32_t f16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
    return cuemu::each_half(a, b, c, [](double x, double y, double z) { return x * y + z; });
}

// ---- PTX wrappers: copies to shared memory ----------------------------------------------------------------

// A copy lands at once or when it is waited for, at random.
inline void cp_async16(void *smem, const void *gmem, bool valid = true, CUEMU_AT) {
    cuemu::check_shared(smem, 16, "cp_async16", at);
    if (valid) cuemu::check_aligned(gmem, 16, "cp_async16", at), (void)*(const volatile char *)gmem;
    const cuemu::async_copy c = {smem, valid ? gmem : nullptr, cuemu::me->commits};
    if (cuemu::coin()) cuemu::land(c);
    else cuemu::me->pending.push_back(c);
}
inline void cp_async_commit() { cuemu::me->commits++; }
template <int N>
void cp_async_wait(CUEMU_AT) {
    if (cuemu::skipped(at, "cp_async_wait")) return;
    std::vector<cuemu::async_copy> &pending = cuemu::me->pending;
    size_t n = 0;
    while (n < pending.size() && pending[n].group + N < cuemu::me->commits) cuemu::land(pending[n++]);
    pending.erase(pending.begin(), pending.begin() + (ptrdiff_t)n);
}

// ---- PTX wrappers: matrix fragments and products ----------------------------------------------------------

namespace cuemu {
// Matrix j has its rows at the addresses of lanes 8j .. 8j+7. Lane l gets the element pair (l / 4, l % 4) of each
// matrix, or of its transpose.
template <unsigned COUNT, bool TRANS>
void ldmatrix(uint32_t *r, const void *row, const char *what, site at) {
    const action distribute = [](warp &w, uint32_t lanes) {
        if (lanes != FULL) die("ldmatrix: lanes %08x are missing", ~lanes);
        for (unsigned j = 0; j < COUNT; j++) {
            uint16_t m[8][8];
            for (unsigned i = 0; i < 8; i++) {
                const void *from;
                memcpy(&from, w.in[8 * j + i], sizeof from);
                memcpy(m[i], from, 16);
            }
            for (unsigned l = 0; l < 32; l++) {
                const unsigned g = l / 4, t = l % 4 * 2;
                w.out[l][j] = TRANS ? m[t][g] | (uint32_t)m[t + 1][g] << 16 : m[g][t] | (uint32_t)m[g][t + 1] << 16;
            }
        }
    };
    if (me->lane < 8 * COUNT) check_shared(row, 16, what, at);
    memcpy(post(), &row, sizeof row);
    memcpy(r, collective(FULL, what, at, distribute), 4 * COUNT);
}

typedef float row8 __attribute__((vector_size(32)));

// D = A B for a tile m16n8 with E elements in a 32-bit register and k = 8 E. DECODE converts element i of a register
// to f32. In all these instructions register r of A holds row g + 8 (r & 1), k from E t + 4 E (r >> 1) on; register r
// of B holds column g, k from E t + 4 E r on. With E = 8 there is a scale per 16 elements.
template <unsigned E, float (*DECODE)(uint32_t word, unsigned i)>
void mma_tile(warp &w, uint32_t lanes) {
    constexpr unsigned K = 8 * E;
    static float a[16][K];
    static union {
        float at[K][8];
        row8 row[K];
    } b;
    if (lanes != FULL) die("mma: lanes %08x are missing", ~lanes);
    for (unsigned l = 0; l < 32; l++) {
        const unsigned g = l / 4, t = l % 4;
        for (unsigned r = 0; r < 4; r++)
            for (unsigned i = 0; i < E; i++) a[g + 8 * (r & 1)][E * t + 4 * E * (r >> 1) + i] = DECODE(w.in[l][r], i);
        for (unsigned r = 0; r < 2; r++)
            for (unsigned i = 0; i < E; i++) b.at[E * t + 4 * E * r + i][g] = DECODE(w.in[l][4 + r], i);
    }
    if (E == 8) // the scales of row m come from lane 4 (m % 8) + m / 8, those of column n from lane 4 n
        for (unsigned j = 0; j < K / 16; j++) {
            row8 sb;
            for (unsigned n = 0; n < 8; n++) sb[n] = from_e4m3(w.in[4 * n][7] >> 8 * j & 127);
            for (unsigned k = 16 * j; k < 16 * j + 16; k++) b.row[k] *= sb;
            for (unsigned m = 0; m < 16; m++) {
                const float sa = from_e4m3(w.in[4 * (m & 7) + (m >> 3)][6] >> 8 * j & 127);
                for (unsigned k = 16 * j; k < 16 * j + 16; k++) a[m][k] *= sa;
            }
        }
    for (unsigned m = 0; m < 16; m += 4) { // four rows at a time hide the latency of the additions
        row8 d[4] = {};
        for (unsigned k = 0; k < K; k++) {
            const row8 bk = b.row[k];
            d[0] += a[m][k] * bk, d[1] += a[m + 1][k] * bk, d[2] += a[m + 2][k] * bk, d[3] += a[m + 3][k] * bk;
        }
        for (unsigned i = 0; i < 4; i++) // register r of D: row g + 8 (r >> 1), columns 2 t and 2 t + 1
            for (unsigned n = 0; n < 8; n++)
                w.out[4 * ((m + i) & 7) + n / 2][(m + i) / 8 * 2 + n % 2] = __float_as_uint(d[i][n]);
    }
}
inline float f16_at(uint32_t word, unsigned i) { return half_to_f32((uint16_t)(word >> 16 * i)); }
inline float bf16_at(uint32_t word, unsigned i) { return bf16_value((uint16_t)(word >> 16 * i)); }
inline float e4m3_at(uint32_t word, unsigned i) { return from_e4m3(word >> 8 * i & 255); }
inline float e2m1_at(uint32_t word, unsigned i) { return from_e2m1(word >> 4 * i); }

inline void mma(float d[4], const uint32_t a[4], const uint32_t b[2], uint32_t sfa, uint32_t sfb, const char *what,
                site at, action tile) {
    uint32_t *in = post();
    memcpy(in, a, 16), memcpy(in + 4, b, 8), in[6] = sfa, in[7] = sfb;
    const uint32_t *sum = collective(FULL, what, at, tile);
    for (int r = 0; r < 4; r++) d[r] += __uint_as_float(sum[r]);
}
} // namespace cuemu

inline void ldmatrix_x4(uint32_t r[4], const void *row, CUEMU_AT) {
    cuemu::ldmatrix<4, false>(r, row, "ldmatrix_x4", at);
}
inline void ldmatrix_x4_trans(uint32_t r[4], const void *row, CUEMU_AT) {
    cuemu::ldmatrix<4, true>(r, row, "ldmatrix_x4_trans", at);
}
inline void ldmatrix_x2(uint32_t r[2], const void *row, CUEMU_AT) {
    cuemu::ldmatrix<2, false>(r, row, "ldmatrix_x2", at);
}
inline void ldmatrix_x2_trans(uint32_t r[2], const void *row, CUEMU_AT) {
    cuemu::ldmatrix<2, true>(r, row, "ldmatrix_x2_trans", at);
}
inline void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2], CUEMU_AT) {
    cuemu::mma(d, a, b, 0, 0, "mma_f16", at, cuemu::mma_tile<2, cuemu::f16_at>);
}
inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], CUEMU_AT) {
    cuemu::mma(d, a, b, 0, 0, "mma_bf16", at, cuemu::mma_tile<2, cuemu::bf16_at>);
}
inline void mma_e4m3(float d[4], const uint32_t a[4], const uint32_t b[2], CUEMU_AT) {
    cuemu::mma(d, a, b, 0, 0, "mma_e4m3", at, cuemu::mma_tile<4, cuemu::e4m3_at>);
}
inline void mma_nvfp4(float d[4], const uint32_t a[4], const uint32_t b[2], uint32_t sfa, uint32_t sfb, CUEMU_AT) {
    cuemu::mma(d, a, b, sfa, sfb, "mma_nvfp4", at, cuemu::mma_tile<8, cuemu::e2m1_at>);
}

// ---- PTX wrappers: global memory, dependent launches ------------------------------------------------------

inline uint4 ldg_stream(const void *p, CUEMU_AT) {
    cuemu::check_aligned(p, 16, "ldg_stream", at);
    return *(const uint4 *)p;
}
#define UNROLL /* pragmas that g++ does not know */
#define UNROLL_BY(n)
inline uint16_t clamped_f16(float x) {
    return x != x ? (uint16_t)0x7FFF : f32_to_f16(fminf(fmaxf(x, -65504.0f), 65504.0f));
}
inline uint32_t clamped_f16x2(float lo, float hi) { return clamped_f16(lo) | (uint32_t)clamped_f16(hi) << 16; }
inline float exp2_fast(float x) { return exp2f(x); }
template <class T>
inline T load_l2(const T *p) {
    return *p;
}
inline void prefetch_l2(const void *p, uint32_t n) {
    if (!n || n > 16384 || n % 16 || (uintptr_t)p % 16) cuemu::die("prefetch_l2 of %u bytes at %p", n, p);
    if (!cuemu::accessible(p, n, true)) cuemu::die("prefetch_l2 of %u bytes at %p, beyond an allocation", n, p);
    std::lock_guard<std::mutex> hold(cuemu::prefetches_lock);
    if (cuemu::prefetches_logged) cuemu::prefetches.emplace_back((const uint8_t *)p, n);
}
inline uint32_t ld_acquire(const uint32_t *p, CUEMU_AT) {
    cuemu::spin("ld_acquire", at);
    return *(const volatile uint32_t *)p;
}

namespace cuemu {
// Checks peer access: without it a kernel may not touch memory of another device.
inline void check_peer(const void *p, const char *what, site at) {
    if (device_count == 1) return;
    const allocation *a = find_allocation(p);
    const int device = me->blk->run->device;
    if (a && a->kind == DEVICE && a->device != device && !gpus[device].peer[a->device])
        die("%s at %s:%d: device %d has no access to memory of device %d", what, at.file, at.line, device, a->device);
}
} // namespace cuemu
inline uint32_t ld_acquire_sys(const uint32_t *p, CUEMU_AT) {
    cuemu::check_peer(p, "ld_acquire_sys", at);
    cuemu::spin("ld_acquire_sys", at);
    return *(const volatile uint32_t *)p;
}
inline void st_release(uint32_t *p, uint32_t v) {
    cuemu::release_stores();
    cuemu::events++, *(volatile uint32_t *)p = v;
}
inline void st_release_sys(uint32_t *p, uint32_t v, CUEMU_AT) {
    cuemu::check_peer(p, "st_release_sys", at);
    st_release(p, v);
}
inline void st_sys16(void *p, uint4 v, CUEMU_AT) {
    cuemu::check_aligned(p, 16, "st_sys16", at), cuemu::check_peer(p, "st_sys16", at);
    (void)*(volatile char *)p;
    cuemu::block &b = *cuemu::me->blk;
    b.stores.push_back({(uint4 *)p, v, (unsigned)(cuemu::me - &b.f[0]), cuemu::sys_store::THREAD});
    if (!(cuemu::rnd() & 63)) cuemu::land_some(b);
}
// A thread that reads the same address again is polling.
inline uint4 ld_sys16(const void *p, CUEMU_AT) {
    cuemu::check_aligned(p, 16, "ld_sys16", at), cuemu::check_peer(p, "ld_sys16", at);
    if (std::exchange(cuemu::me->polled, p) == p) cuemu::spin("ld_sys16", at);
    const std::vector<cuemu::sys_store> &stores = cuemu::me->blk->stores;
    for (size_t i = stores.size(); i-- > 0;)
        if (stores[i].dst == p && cuemu::visible(stores[i])) return stores[i].v;
    return *(const uint4 *)p;
}
// Others may look now at what this announces as done: often the rest of the warp falls after here.
inline uint32_t atom_add_acq_rel(uint32_t *p, uint32_t v) {
    cuemu::release_stores();
    if (cuemu::coin()) cuemu::pass_lanes = 0, cuemu::me->w->priority = 0;
    return atomicAdd(p, v);
}

inline void grid_dependency_wait(CUEMU_AT) {
    cuemu::launch &l = *cuemu::me->blk->run;
    l.waited = true;
    if (cuemu::skipped(at, "grid_dependency_wait") || !l.early) return;
    cuemu::me->w->parked |= cuemu::lane_bit();
    cuemu::wait("grid_dependency_wait", at);
}
inline void grid_dependency_launch() { cuemu::trigger(*cuemu::me); }

// ---- NCCL -------------------------------------------------------------------------------------------------
// A collective is a part for each rank, queued on its stream; all are executed at once when every rank's next one
// is at the head of its stream.

#define NCCL_UNIQUE_ID_BYTES 128
enum ncclResult_t {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress
};
enum ncclDataType_t { ncclInt8 = 0, ncclChar = 0, ncclUint8 = 1, ncclFloat32 = 7, ncclFloat = 7, ncclBfloat16 = 9 };
enum ncclRedOp_t { ncclSum };
struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
};
struct ncclComm {
    std::shared_ptr<cuemu::communicator> all;
    unsigned rank;
    int device;
};
typedef ncclComm *ncclComm_t;

namespace cuemu {
inline bool same_device_allowed;
inline thread_local unsigned group_depth;
inline thread_local std::vector<std::function<ncclResult_t()>> group_calls; // calls that ncclGroupEnd makes
inline thread_local char nccl_said[256] = "";

// Allows several ranks of a communicator on one device.
inline void nccl_same_device(bool allowed) { same_device_allowed = allowed; }

[[gnu::format(printf, 2, 3)]] inline ncclResult_t nccl_fail(ncclResult_t e, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(nccl_said, sizeof nccl_said, fmt, ap);
    va_end(ap);
    return e;
}
#define CUEMU_NCCL __attribute__((noinline)) inline ncclResult_t
#define CUEMU_NCCL_ENTER()     \
    cuemu::scope in_this_call; \
    if (cuemu::failing(__func__)) return cuemu::nccl_fail(ncclSystemError, "%s: made to fail", __func__)

inline size_t nccl_bytes(int type) { return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1; }

// Makes the call now, or at the end of the group.
inline ncclResult_t in_group(std::function<ncclResult_t()> call) {
    if (!group_depth) return call();
    return group_calls.push_back(std::move(call)), ncclSuccess;
}

// Returns the stream with the next part of a rank at its head, or null.
inline CUstream_st *nccl_head(const communicator *all, unsigned rank) {
    CUstream_st *first = nullptr;
    for (auto &s : streams) {
        if (s.q.empty() || !s.q.front().nccl) continue;
        const op &o = s.q.front();
        if (o.nccl->all.get() == all && o.nccl->rank == rank && may_start(s, o) &&
            (!first || o.seq < first->q.front().seq))
            first = &s;
    }
    return first;
}
inline bool nccl_ready(const nccl_call &c) {
    if (c.all->aborted[c.rank]) return true;
    for (unsigned r = 0; r < c.all->device.size(); r++)
        if (!nccl_head(c.all.get(), r)) return false;
    return true;
}

// Computes `count` sums. Each starts with another rank's value, as data that goes round in rings does.
inline void nccl_sum(const std::vector<const nccl_call *> &part, size_t count, int type, char *sum) {
    auto add = [&](auto of, auto plus) {
        for (size_t i = 0, n = part.size(); i < count; i++) {
            auto at = [&](size_t r) { return ((decltype(of) *)part[r % n]->send)[i]; };
            const size_t first = i * n / count + 1;
            auto x = at(first);
            for (size_t r = 1; r < n; r++) x = plus(x, at(first + r));
            ((decltype(of) *)sum)[i] = x;
        }
    };
    if (type == ncclFloat32) add(float(), [](float a, float b) { return a + b; });
    else if (type == ncclBfloat16)
        add(uint16_t(),
            [](uint16_t a, uint16_t b) { return (uint16_t)f32_to_bf16x2(bf16_value(a) + bf16_value(b), 0); });
    else add(uint8_t(), [](uint8_t a, uint8_t b) { return (uint8_t)(a + b); });
}

inline void nccl_run(CUstream_st &stream) {
    const std::shared_ptr<const nccl_call> c = stream.q.front().nccl;
    const size_t n = c->all->device.size(), bytes = c->count * nccl_bytes(c->type);
    news++;
    if (c->all->aborted[c->rank]) return stream.q.pop_front();
    std::vector<CUstream_st *> heads;
    std::vector<const nccl_call *> part;
    for (unsigned r = 0; r < n; r++) {
        heads.push_back(nccl_head(c->all.get(), r));
        part.push_back(heads[r]->q.front().nccl.get());
        const nccl_call &o = *part[0], &p = *part[r];
        if (!same_text(o.what, p.what) || o.count != p.count || o.type != p.type || o.root != p.root)
            die("mismatch: rank 0 calls %s with count %zu, type %d, root %d, rank %u %s with %zu, %d, %d", o.what,
                o.count, o.type, o.root, r, p.what, p.count, p.type, p.root);
    }
    std::vector<char> result;
    if (same_text(c->what, "ncclAllReduce")) {
        nccl_sum(part, c->count, c->type, (result.resize(bytes), result.data()));
    } else {
        const bool gather = same_text(c->what, "ncclAllGather");
        for (size_t r = gather ? 0 : (size_t)c->root; r < (gather ? n : (size_t)c->root + 1); r++)
            result.insert(result.end(), (const char *)part[r]->send, (const char *)part[r]->send + bytes);
    }
    for (const nccl_call *p : part) memcpy(p->recv, result.data(), result.size());
    for (CUstream_st *s : heads) s->q.pop_front();
}

inline ncclResult_t nccl_queue(const char *what, const void *send, void *recv, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream) {
    CUstream_st *s = find_stream(stream);
    if (!comm) return nccl_fail(ncclInvalidArgument, "%s: no communicator", what);
    const size_t n = comm->all->device.size(), bytes = count * nccl_bytes(type);
    auto usable = [&](const void *p, size_t size) {
        return accessible(p, size, true) && find_allocation(p)->device == comm->device;
    };
    if ((type > ncclUint8 && type != ncclFloat32 && type != ncclBfloat16) || root < 0 || (size_t)root >= n)
        return nccl_fail(ncclInvalidArgument, "%s: type %d, root %d", what, type, root);
    if (!s || s->device != comm->device)
        return nccl_fail(ncclInvalidUsage, "%s: the stream is not one of device %d", what, comm->device);
    if (!count) return ncclSuccess;
    if (!usable(recv, same_text(what, "ncclAllGather") ? n * bytes : bytes) ||
        ((!same_text(what, "ncclBroadcast") || root == (int)comm->rank) && !usable(send, bytes)))
        return nccl_fail(ncclInvalidArgument, "%s: a buffer is not in memory of device %d", what, comm->device);
    op o = {};
    o.nccl = std::make_shared<nccl_call>(nccl_call{comm->all, comm->rank, what, send, recv, count, type, root});
    return in_group([s, o] { return append(*s, o), ncclSuccess; });
}
} // namespace cuemu

inline const char *ncclGetErrorString(ncclResult_t e) {
    static const char *const text[] = {"no error",       "unhandled cuda error", "unhandled system error",
                                       "internal error", "invalid argument",     "invalid usage",
                                       "remote error",   "in progress"};
    return e >= 0 && e <= ncclInProgress ? text[e] : "unknown result code";
}
inline const char *ncclGetLastError(ncclComm_t) { return cuemu::nccl_said; }
CUEMU_NCCL ncclGetVersion(int *v) {
    CUEMU_NCCL_ENTER();
    return *v = 22803, ncclSuccess;
}
CUEMU_NCCL ncclGetUniqueId(ncclUniqueId *id) {
    CUEMU_NCCL_ENTER();
    static uint64_t last;
    return *id = {}, memcpy(id->internal, &++last, sizeof last), ncclSuccess;
}
CUEMU_NCCL ncclGroupStart() {
    CUEMU_NCCL_ENTER();
    return cuemu::group_depth++, ncclSuccess;
}
CUEMU_NCCL ncclGroupEnd() {
    CUEMU_NCCL_ENTER();
    if (!cuemu::group_depth) return cuemu::nccl_fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--cuemu::group_depth) return ncclSuccess;
    ncclResult_t first = ncclSuccess;
    for (auto &call : std::exchange(cuemu::group_calls, {}))
        if (const ncclResult_t e = call(); e && !first) first = e;
    return first;
}
// Returns when all ranks have called; in a group, ncclGroupEnd does.
CUEMU_NCCL ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank) {
    cuemu::scope in_this_call;
    uint64_t key;
    memcpy(&key, id.internal, sizeof key);
    *comm = nullptr;
    if (n < 1 || rank < 0 || rank >= n || !key) return cuemu::nccl_fail(ncclInvalidArgument, "rank %d of %d", rank, n);
    std::shared_ptr<cuemu::communicator> &formed = cuemu::forming[key];
    if (!formed) {
        const size_t count = (size_t)n;
        formed = std::make_shared<cuemu::communicator>(
            cuemu::communicator{std::vector<int>(count, -1), std::vector<bool>(count), (unsigned)n});
    }
    const std::shared_ptr<cuemu::communicator> all = formed;
    cuemu::news++;
    ncclResult_t refused = cuemu::failing(__func__) ? ncclSystemError : ncclSuccess;
    if (all->device.size() != (size_t)n || all->device[(size_t)rank] >= 0) refused = ncclInvalidUsage;
    if (refused) return all->broken = true, cuemu::nccl_fail(refused, "ncclCommInitRank: rank %d of %d", rank, n);
    all->device[(size_t)rank] = cuemu::current_device;
    if (!--all->missing) cuemu::forming.erase(key);
    *comm = new ncclComm{all, (unsigned)rank, cuemu::current_device};
    return cuemu::in_group([=] {
        cuemu::drain([=] { return !all->missing || all->broken; });
        ncclResult_t e = ncclSuccess;
        if (all->broken) e = cuemu::nccl_fail(ncclRemoteError, "ncclCommInitRank: another rank has failed");
        for (int i = 0; i < n && !e; i++)
            for (int j = 0; j < i && !e; j++)
                if (all->device[(size_t)i] == all->device[(size_t)j] && !cuemu::same_device_allowed)
                    e = cuemu::nccl_fail(ncclInvalidUsage,
                                         "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000", j, i,
                                         1 + all->device[(size_t)i]);
        if (e) delete *comm, *comm = nullptr;
        return e;
    });
}
CUEMU_NCCL ncclCommInitAll(ncclComm_t *comms, int n, const int *devices) {
    CUEMU_NCCL_ENTER();
    ncclUniqueId id;
    const int before = cuemu::current_device;
    ncclResult_t first = ncclGetUniqueId(&id);
    for (int i = 0; i < n; i++)
        if (cuemu::no_device(devices ? devices[i] : i))
            return cuemu::nccl_fail(ncclUnhandledCudaError, "ncclCommInitAll: device %d", devices ? devices[i] : i);
    ncclGroupStart();
    for (int i = 0; i < n && !first; i++) {
        cuemu::current_device = devices ? devices[i] : i;
        first = ncclCommInitRank(comms + i, n, id, i);
    }
    cuemu::current_device = before;
    const ncclResult_t e = ncclGroupEnd();
    return first ? first : e;
}
CUEMU_NCCL ncclCommDestroy(ncclComm_t comm) {
    CUEMU_NCCL_ENTER();
    return delete comm, ncclSuccess;
}
// What the rank has queued does nothing any more. The other ranks keep waiting for it.
CUEMU_NCCL ncclCommAbort(ncclComm_t comm) {
    CUEMU_NCCL_ENTER();
    comm->all->aborted[comm->rank] = true, cuemu::news++;
    return delete comm, ncclSuccess;
}
// Reports an error after fail_next.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *e) {
    cuemu::scope in_this_call;
    return *e = cuemu::failing(__func__) ? ncclSystemError : ncclSuccess, ncclSuccess;
}
CUEMU_NCCL ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                         ncclComm_t comm, cudaStream_t stream) {
    CUEMU_NCCL_ENTER();
    if (op != ncclSum) return cuemu::nccl_fail(ncclInvalidArgument, "ncclAllReduce: op %d", op);
    return cuemu::nccl_queue("ncclAllReduce", send, recv, count, type, 0, comm, stream);
}
CUEMU_NCCL ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                         cudaStream_t stream) {
    CUEMU_NCCL_ENTER();
    return cuemu::nccl_queue("ncclAllGather", send, recv, count, type, 0, comm, stream);
}
CUEMU_NCCL ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
    CUEMU_NCCL_ENTER();
    return cuemu::nccl_queue("ncclBroadcast", send, recv, count, type, root, comm, stream);
}
