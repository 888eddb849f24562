/* NCCL's functions that the engine calls, between simulated GPUs. Ranks are threads of one process or of several on one
 * host: they meet in shared memory. A collective runs when the streams of all ranks have reached it. */
#if __has_include(<nccl.h>)
#include <nccl.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "machine.h"

namespace ptxsim {

enum { RANKS = 8 };
enum Collective { ALL_REDUCE, ALL_GATHER, BROADCAST };
static const char *const kind_names[] = {"ncclAllReduce", "ncclAllGather", "ncclBroadcast"};

struct Part { /* of a collective: what a rank brings */
    Collective kind;
    size_t count;
    ncclDataType_t type;
    int root; /* of a broadcast */
};

/* A message from one rank to another, of which there is one at a time. */
struct Channel {
    size_t bytes;
    bool full;
};

/* What the ranks that belong together share. In the file the data of every rank, of the result and of every channel
 * follow, AREA bytes each. */
struct Communicator {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int n;
    int missing; /* ranks that have not called ncclCommInitRank */
    bool broken;
    int device[RANKS], process[RANKS]; /* by rank; process 0: it has not called */
    bool aborted[RANKS];
    Part part[RANKS];
    int arrived, left; /* of a collective: ranks that have brought their parts, that have the result */
    u64 done;          /* collectives */
    Channel channel[RANKS][RANKS];
};
static const size_t AREA = (size_t)1 << 28;

static u8 *area(Communicator *c, int i) { return (u8 *)c + 65536 + (size_t)i * AREA; }
static size_t shared_bytes(int n) { return 65536 + (size_t)(n + 1 + n * n) * AREA; }

struct Guard {
    Communicator *c;
    explicit Guard(Communicator *to) : c(to) { pthread_mutex_lock(&c->lock); }
    ~Guard() { pthread_mutex_unlock(&c->lock); }
};
template <class F>
static void wait_until(Communicator *c, F f) {
    while (!f()) pthread_cond_wait(&c->wake, &c->lock);
}

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

static size_t size_of(ncclDataType_t type) {
    return type == ncclFloat32 || type == ncclInt32 ? 4 : type == ncclBfloat16 ? 2 : 1;
}

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
static void sum(Communicator *c, F plus, T *out) {
    const size_t n = (size_t)c->n, count = c->part[0].count;
    for (size_t i = 0; i < count; i++) {
        const size_t first = i * n / count + 1;
        auto at = [&](size_t r) { return ((const T *)area(c, (int)(r % n)))[i]; };
        T x = at(first);
        for (size_t r = 1; r < n; r++) x = plus(x, at(first + r));
        out[i] = x;
    }
}

/* Runs a collective whose parts are all there. */
static void collective(Communicator *c) {
    const Part &p = c->part[0];
    u8 *out = area(c, c->n);
    for (int i = 0; i < c->n; i++) {
        const Part &q = c->part[i];
        if (p.kind == q.kind && p.count == q.count && p.type == q.type && p.root == q.root) continue;
        fprintf(stderr, "ptxsim: %s of %zu values meets %s of %zu\n", kind_names[p.kind], p.count, kind_names[q.kind],
                q.count);
        abort();
    }
    const size_t bytes = p.count * size_of(p.type);
    if (p.kind == ALL_GATHER)
        for (int i = 0; i < c->n; i++) memcpy(out + (size_t)i * bytes, area(c, i), bytes);
    else if (p.kind == BROADCAST) memcpy(out, area(c, p.root), bytes);
    else if (p.type == ncclFloat32)
        sum(
            c, [](float a, float b) { return a + b; }, (float *)out);
    else
        sum(
            c, [](u16 a, u16 b) { return bf16_of(bf16_value(a) + bf16_value(b)); }, (u16 *)out);
}

/* In the thread of a rank's stream: brings its part, and waits until the collective has run. */
static void take_part(Communicator *c, int rank, const Part &p, const void *send, void *recv) {
    Guard g(c);
    const size_t bytes = p.count * size_of(p.type);
    wait_until(c, [&] { return !c->left || c->aborted[rank]; }); /* all have the result before */
    if (c->aborted[rank]) return;
    const u64 turn = c->done;
    c->part[rank] = p;
    memcpy(area(c, rank), send, bytes);
    if (++c->arrived == c->n) {
        collective(c);
        c->arrived = 0, c->left = c->n, c->done++;
        pthread_cond_broadcast(&c->wake);
    }
    wait_until(c, [&] { return c->done != turn || c->aborted[rank]; });
    if (c->done == turn) { /* aborted: its part does not count */
        c->arrived--;
        return;
    }
    memcpy(recv, area(c, c->n), p.kind == ALL_GATHER ? bytes * (size_t)c->n : bytes);
    if (!--c->left) pthread_cond_broadcast(&c->wake);
}

/* In the thread of a rank's stream: hands bytes to a peer, or takes them. */
static void pass_on(Communicator *c, int rank, int peer, bool send, void *data, size_t bytes) {
    Guard g(c);
    const int from = send ? rank : peer, to = send ? peer : rank;
    Channel &ch = c->channel[from][to];
    u8 *at = area(c, c->n + 1 + from * c->n + to);
    wait_until(c, [&] { return ch.full != send || c->aborted[rank]; });
    if (c->aborted[rank]) return;
    if (!send && ch.bytes != bytes)
        fprintf(stderr, "ptxsim: ncclSend of %zu bytes meets ncclRecv of %zu\n", ch.bytes, bytes), abort();
    memcpy(send ? (void *)at : data, send ? data : (void *)at, bytes);
    ch.bytes = bytes;
    ch.full = send;
    pthread_cond_broadcast(&c->wake);
}

/* The shared memory by that name: the first to come makes it. */
static Communicator *shared_open(const char *name, int n) {
    const size_t bytes = shared_bytes(n);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    const bool made = fd >= 0;
    if (!made) fd = shm_open(name, O_RDWR, 0600);
    if (fd < 0 || (made && ftruncate(fd, (off_t)bytes))) return NULL;
    for (off_t size = 0; size < (off_t)bytes; size = lseek(fd, 0, SEEK_END)) usleep(100);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return NULL;
    Communicator *c = (Communicator *)p;
    if (made) {
        pthread_mutexattr_t m;
        pthread_condattr_t w;
        pthread_mutexattr_init(&m);
        pthread_mutexattr_setpshared(&m, PTHREAD_PROCESS_SHARED);
        pthread_mutex_init(&c->lock, &m);
        pthread_condattr_init(&w);
        pthread_condattr_setpshared(&w, PTHREAD_PROCESS_SHARED);
        pthread_cond_init(&c->wake, &w);
        c->missing = n;
        __atomic_store_n(&c->n, n, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&c->n, __ATOMIC_ACQUIRE)) usleep(100);
    return c;
}

} // namespace ptxsim

using namespace ptxsim;

struct ncclComm {
    Communicator *all;
    int rank, device;
};

/* Whether a call is one that NCCL would take; if not, what it returns. */
static ncclResult_t refuses(const char *what, const void *send, size_t sent, void *recv, size_t received,
                            ncclDataType_t type, ncclComm_t comm) {
    if (!comm) return fails(ncclInvalidArgument, "%s: no communicator", what);
    if (type != ncclFloat32 && type != ncclBfloat16 && type != ncclInt32 &&
        (strcmp(what, "ncclAllGather") || (type != ncclInt8 && type != ncclUint8)))
        return fails(ncclInvalidArgument, "%s: type %d", what, type);
    if (!in_arena(send) || !in_arena(recv) || !range_ok(send, sent) || !range_ok(recv, received))
        return fails(ncclInvalidArgument, "%s: a buffer is not in memory of a device", what);
    return received > AREA ? fails(ncclInternalError, "%s: %zu bytes", what, received) : ncclSuccess;
}

static ncclResult_t enqueue(Collective kind, const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                            ncclComm_t comm, cudaStream_t stream) {
    const char *what = kind_names[kind];
    const size_t bytes = count * size_of(type);
    const ncclResult_t e =
        refuses(what, send, bytes, recv, kind == ALL_GATHER && comm ? bytes * (size_t)comm->all->n : bytes, type, comm);
    if (e != ncclSuccess) return e;
    Communicator *all = comm->all;
    const Part p = {kind, count, type, root};
    const int rank = comm->rank;
    if (!stream_enqueue(stream, comm->device, [=] { take_part(all, rank, p, send, recv); }))
        return fails(ncclInvalidUsage, "%s: the stream is not one of device %d", what, comm->device);
    return ncclSuccess;
}

static ncclResult_t enqueue_pass(bool send, void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                 cudaStream_t stream) {
    const char *what = send ? "ncclSend" : "ncclRecv";
    const size_t bytes = count * size_of(type);
    const ncclResult_t e = refuses(what, data, bytes, data, bytes, type, comm);
    if (e != ncclSuccess) return e;
    Communicator *all = comm->all;
    const int rank = comm->rank;
    if (peer < 0 || peer >= all->n || peer == rank) return fails(ncclInvalidArgument, "%s: rank %d", what, peer);
    if (!stream_enqueue(stream, comm->device, [=] { pass_on(all, rank, peer, send, data, bytes); }))
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
    static std::atomic<unsigned> last{0};
    CALL();
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/ptxsim-nccl-%d-%u", (int)getpid(), ++last);
    return ncclSuccess;
}
/* Returns when all ranks have called. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank) {
    *comm = NULL;
    if (n < 1 || n > RANKS || rank < 0 || rank >= n || id.internal[0] != '/')
        return fails(ncclInvalidArgument, "rank %d of %d", rank, n);
    Communicator *c = shared_open(id.internal, n);
    if (!c) return fails(ncclSystemError, "ncclCommInitRank: no shared memory");
    Guard g(c);
    if (call_fails(__func__) || c->n != n || c->process[rank]) {
        c->broken = true;
        pthread_cond_broadcast(&c->wake);
        shm_unlink(id.internal);
        return fails(ncclSystemError, "ncclCommInitRank: rank %d of %d", rank, n);
    }
    c->device[rank] = device_of_thread();
    c->process[rank] = (int)getpid();
    if (!--c->missing) shm_unlink(id.internal);
    pthread_cond_broadcast(&c->wake);
    wait_until(c, [&] { return !c->missing || c->broken; });
    if (c->broken) return fails(ncclRemoteError, "ncclCommInitRank: another rank has failed");
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            if (c->device[i] == c->device[k] && c->process[i] == c->process[k])
                return fails(ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
                             k, i, 1 + c->device[i]);
    *comm = new ncclComm{c, rank, device_of_thread()};
    return ncclSuccess;
}
/* After all that the rank has enqueued. */
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    CALL();
    munmap(comm->all, shared_bytes(comm->all->n));
    return delete comm, ncclSuccess;
}
/* What the rank has enqueued does nothing any more. The other ranks keep waiting for it. The memory stays: what is
 * enqueued looks at it. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    CALL();
    {
        Guard g(comm->all);
        comm->all->aborted[comm->rank] = true;
        pthread_cond_broadcast(&comm->all->wake);
    }
    return delete comm, ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    CALL();
    if (op != ncclSum) return fails(ncclInvalidArgument, "ncclAllReduce: operation %d", op);
    return enqueue(ALL_REDUCE, send, recv, count, type, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    CALL();
    return enqueue(ALL_GATHER, send, recv, count, type, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    CALL();
    return enqueue(BROADCAST, send, recv, count, type, root, comm, stream);
}
/* A rank's calls of a group run one after the other. */
ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }
ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    CALL();
    return enqueue_pass(true, (void *)data, count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    CALL();
    return enqueue_pass(false, data, count, type, peer, comm, stream);
}
}
#endif
