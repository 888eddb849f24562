/* NCCL's functions that the engine calls, between simulated GPUs. Ranks are threads of one process: a collective runs
 * when the streams of all ranks have reached it. */
#if __has_include(<nccl.h>)
#include <nccl.h>

#include <condition_variable>

#include "machine.h"

namespace ptxsim {

struct Part { /* of a collective: what a rank brings */
    const char *what;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t type;
};

/* The ranks that belong together. */
struct Communicator {
    std::mutex lock;
    std::condition_variable wake;
    std::vector<int> device; /* by rank; -1: it has not called ncclCommInitRank */
    std::vector<bool> aborted;
    std::vector<Part> part;
    size_t missing, arrived = 0;
    u64 done = 0; /* collectives */
    bool broken = false;
};

static std::mutex forming_lock;
static std::map<u64, std::shared_ptr<Communicator>> forming; /* by ncclUniqueId, until all ranks have called */

static thread_local char last_words[256];
__attribute__((format(printf, 2, 3))) static ncclResult_t fails(ncclResult_t e, const char *format, ...) {
    va_list v;
    va_start(v, format);
    vsnprintf(last_words, sizeof last_words, format, v);
    va_end(v);
    return e;
}
#define CALL() \
    if (call_fails(__func__)) return fails(ncclSystemError, "%s: made to fail", __func__)

static size_t size_of(ncclDataType_t type) { return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1; }

static float bf16_value(u16 b) {
    const u32 u = (u32)b << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
static u16 bf16_of(float x) {
    u32 u;
    memcpy(&u, &x, sizeof u);
    return x != x ? 0x7FFF : (u16)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

/* Sums of the ranks' values. Each begins with another rank's, as data that goes round in rings does. */
template <class T, class F>
static void sum(const std::vector<Part> &part, F plus, T *out) {
    const size_t n = part.size(), count = part[0].count;
    for (size_t i = 0; i < count; i++) {
        const size_t first = i * n / count + 1;
        auto at = [&](size_t r) { return ((const T *)part[r % n].send)[i]; };
        T x = at(first);
        for (size_t r = 1; r < n; r++) x = plus(x, at(first + r));
        out[i] = x;
    }
}

/* Runs a collective whose parts are all there. */
static void collective(const std::vector<Part> &part) {
    const Part &p = part[0];
    for (const Part &q : part)
        if (strcmp(p.what, q.what) || p.count != q.count || p.type != q.type)
            fprintf(stderr, "ptxsim: %s of %zu values meets %s of %zu\n", p.what, p.count, q.what, q.count), abort();
    const size_t bytes = p.count * size_of(p.type);
    std::vector<u8> all;
    if (strcmp(p.what, "ncclAllReduce")) {
        for (const Part &q : part) all.insert(all.end(), (const u8 *)q.send, (const u8 *)q.send + bytes);
    } else {
        all.resize(bytes);
        if (p.type == ncclFloat32)
            sum(
                part, [](float a, float b) { return a + b; }, (float *)all.data());
        else
            sum(
                part, [](u16 a, u16 b) { return bf16_of(bf16_value(a) + bf16_value(b)); }, (u16 *)all.data());
    }
    for (const Part &q : part) memcpy(q.recv, all.data(), all.size());
}

/* In the thread of a rank's stream: brings its part, and waits until the collective has run. */
static void take_part(Communicator &c, size_t rank, const Part &p) {
    std::unique_lock<std::mutex> g(c.lock);
    const u64 turn = c.done;
    if (c.aborted[rank]) return;
    c.part[rank] = p;
    if (++c.arrived == c.part.size()) {
        collective(c.part);
        c.arrived = 0, c.done++;
        c.wake.notify_all();
    }
    c.wake.wait(g, [&] { return c.done != turn || c.aborted[rank]; });
    if (c.done == turn) c.arrived--; /* aborted: its part does not count */
}

} // namespace ptxsim

using namespace ptxsim;

struct ncclComm {
    std::shared_ptr<Communicator> all;
    size_t rank;
    int device;
};

static ncclResult_t enqueue(const char *what, const void *send, void *recv, size_t count, ncclDataType_t type,
                            ncclComm_t comm, cudaStream_t stream) {
    if (!comm) return fails(ncclInvalidArgument, "%s: no communicator", what);
    if (type != ncclFloat32 && type != ncclBfloat16 &&
        (strcmp(what, "ncclAllGather") || (type != ncclInt8 && type != ncclUint8)))
        return fails(ncclInvalidArgument, "%s: type %d", what, type);
    const size_t bytes = count * size_of(type);
    if (!in_arena(send) || !in_arena(recv) || !range_ok(send, bytes) ||
        !range_ok(recv, strcmp(what, "ncclAllGather") ? bytes : bytes * comm->all->part.size()))
        return fails(ncclInvalidArgument, "%s: a buffer is not in memory of a device", what);
    const Part p = {what, send, recv, count, type};
    const auto all = comm->all;
    const size_t rank = comm->rank;
    if (!stream_enqueue(stream, comm->device, [=] { take_part(*all, rank, p); }))
        return fails(ncclInvalidUsage, "%s: the stream is not one of device %d", what, comm->device);
    return ncclSuccess;
}

extern "C" {

const char *ncclGetErrorString(ncclResult_t e) {
    static const char *const text[] = {"no error",       "unhandled cuda error", "unhandled system error",
                                       "internal error", "invalid argument",     "invalid usage",
                                       "remote error",   "in progress"};
    return (unsigned)e < sizeof text / sizeof *text ? text[e] : "unknown result code";
}
const char *ncclGetLastError(ncclComm_t) { return last_words; }
ncclResult_t ncclGetVersion(int *v) {
    CALL();
    return *v = NCCL_VERSION_CODE, ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static std::atomic<u64> last{0};
    CALL();
    const u64 key = ++last;
    memset(id, 0, sizeof *id);
    return memcpy(id->internal, &key, sizeof key), ncclSuccess;
}
/* Returns when all ranks have called. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank) {
    u64 key;
    memcpy(&key, id.internal, sizeof key);
    *comm = NULL;
    if (n < 1 || rank < 0 || rank >= n || !key) return fails(ncclInvalidArgument, "rank %d of %d", rank, n);
    std::shared_ptr<Communicator> all;
    {
        std::lock_guard<std::mutex> g(forming_lock);
        auto &formed = forming[key];
        if (!formed) {
            formed = std::make_shared<Communicator>();
            formed->device.assign((size_t)n, -1), formed->aborted.resize((size_t)n), formed->part.resize((size_t)n);
            formed->missing = (size_t)n;
        }
        all = formed;
        if (call_fails(__func__) || all->part.size() != (size_t)n || all->device[(size_t)rank] >= 0) {
            all->broken = true;
            all->wake.notify_all();
            return fails(ncclSystemError, "ncclCommInitRank: rank %d of %d", rank, n);
        }
        all->device[(size_t)rank] = device_of_thread();
        if (!--all->missing) forming.erase(key);
        all->wake.notify_all();
    }
    std::unique_lock<std::mutex> g(forming_lock);
    all->wake.wait(g, [&] { return !all->missing || all->broken; });
    if (all->broken) return fails(ncclRemoteError, "ncclCommInitRank: another rank has failed");
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            if (all->device[(size_t)i] == all->device[(size_t)k])
                return fails(ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
                             k, i, 1 + all->device[(size_t)i]);
    *comm = new ncclComm{all, (size_t)rank, device_of_thread()};
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    CALL();
    return delete comm, ncclSuccess;
}
/* What the rank has enqueued does nothing any more. The other ranks keep waiting for it. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    CALL();
    {
        std::lock_guard<std::mutex> g(comm->all->lock);
        comm->all->aborted[comm->rank] = true;
        comm->all->wake.notify_all();
    }
    return delete comm, ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    CALL();
    if (op != ncclSum) return fails(ncclInvalidArgument, "ncclAllReduce: operation %d", op);
    return enqueue("ncclAllReduce", send, recv, count, type, comm, stream);
}
ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    CALL();
    return enqueue("ncclAllGather", send, recv, count, type, comm, stream);
}
}
#endif
