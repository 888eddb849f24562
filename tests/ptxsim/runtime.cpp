/* The CUDA runtime's functions that the engine and its tests call: modules, devices, streams, events, graphs. */
#include <condition_variable>
#include <deque>
#include <fnmatch.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "machine.h"

namespace ptxsim {

/* ---- errors ---- */

static thread_local cudaError_t last_error;
static std::atomic<int> sticky_error{0}; /* of a kernel: all later calls return it */

void machine_fail() { sticky_error = cudaErrorIllegalAddress; }

static cudaError_t fail_with(cudaError_t e) {
    if (e != cudaSuccess) last_error = e;
    return e;
}
static cudaError_t sticky() { return (cudaError_t)sticky_error.load(); }

bool call_fails(const char *function) {
    std::lock_guard<std::mutex> g(machine.lock);
    auto i = machine.failures.find(function);
    if (i == machine.failures.end() || --i->second > 0) return false;
    machine.failures.erase(i);
    return true;
}

/* Calls that a thread must not make while it records a stream (cudaStreamCaptureModeThreadLocal): the recording is
 * lost. */
static thread_local int recordings;
static thread_local bool recording_lost;
static bool recording(const char *call) {
    if (!recordings) return false;
    note("%s while the thread records a stream", call);
    recording_lost = true;
    last_error = cudaErrorStreamCaptureUnsupported;
    return true;
}

/* Begin a function of the runtime; WAITS one that a recording does not allow. */
#define CALL()                \
    if (call_fails(__func__)) \
    return fail_with(strncmp(__func__, "cudaMalloc", 10) ? cudaErrorUnknown : cudaErrorMemoryAllocation)
#define WAITS() \
    CALL();     \
    if (recording(__func__)) return cudaErrorStreamCaptureUnsupported
#define NEEDS(condition, error) \
    if (!(condition)) return fail_with(error)

/* ---- streams ---- */

struct Graph {
    struct Node {
        std::shared_ptr<const Launch> launch; /* copied for each run; NULL: work */
        std::function<void()> work;
    };
    std::vector<Node> nodes;
};

/* Begins to work when somebody waits, for it or for another stream: so the host sees what it has not waited for as late
 * as can be, and what a kernel may overlap with does not depend on how fast the host is. */
struct Stream {
    std::mutex lock;
    std::condition_variable wake, idle;
    std::deque<Operation> queue;
    bool goes = false, busy = false, quit = false;
    bool blocking;                /* synchronous copies wait for it */
    std::atomic<bool> full{true}; /* the next launch is ordered after all earlier work */
    int device;
    Graph *capture = NULL;
    std::thread worker;

    void push(Operation o) {
        std::lock_guard<std::mutex> g(lock);
        queue.push_back(std::move(o));
    }
    void go() {
        std::lock_guard<std::mutex> g(lock);
        if (!queue.empty()) goes = true, wake.notify_one();
    }
    bool done() {
        std::lock_guard<std::mutex> g(lock);
        return queue.empty() && !busy;
    }
    void wait() {
        std::unique_lock<std::mutex> g(lock);
        idle.wait(g, [&] { return queue.empty() && !busy; });
    }
    /* A launch at the head of the queue that may overlap with those before it. */
    std::shared_ptr<Launch> next_overlapping() {
        std::lock_guard<std::mutex> g(lock);
        if (queue.empty() || !queue.front().launch || !queue.front().launch->overlaps) return NULL;
        auto L = std::move(queue.front().launch);
        queue.pop_front();
        return L;
    }
    void main() {
        std::unique_lock<std::mutex> g(lock);
        for (;;) {
            wake.wait(g, [&] { return quit || (goes && !queue.empty()); });
            if (queue.empty()) return;
            Operation o = std::move(queue.front());
            queue.pop_front();
            busy = true;
            g.unlock();
            if (o.work) o.work();
            else if (!sticky()) launches_run(std::move(o.launch), [this] { return next_overlapping(); });
            g.lock();
            busy = false;
            if (queue.empty()) goes = false, idle.notify_all();
        }
    }
};

static std::mutex streams_lock EARLY;
static std::vector<Stream *> streams EARLY;
static Stream *own_streams[DEVICES_MAX]; /* by device: of the handle NULL */
static thread_local int current_device;

static Stream *stream_new(bool blocking) {
    Stream *s = new Stream;
    s->blocking = blocking;
    s->device = current_device;
    s->worker = std::thread([s] { s->main(); });
    std::lock_guard<std::mutex> g(streams_lock);
    streams.push_back(s);
    return s;
}

/* The stream of a handle: NULL is that of the device, of its own for each. */
static Stream *stream_of(cudaStream_t s) {
    static std::mutex lock;
    if (s) return (Stream *)s;
    std::lock_guard<std::mutex> g(lock);
    if (!own_streams[current_device]) own_streams[current_device] = stream_new(true);
    return own_streams[current_device];
}

static std::vector<Stream *> all_streams() {
    std::lock_guard<std::mutex> g(streams_lock);
    return streams;
}

/* Lets all streams work: somebody waits, and kernels of one may wait for those of another. */
static void streams_go() {
    for (Stream *s : all_streams()) s->go();
}

/* Waits for the streams of the current device. only_blocking: for those that synchronous copies wait for. */
static void streams_wait(bool only_blocking) {
    streams_go();
    for (Stream *s : all_streams())
        if (s->device == current_device && !s->capture && (s->blocking || !only_blocking)) s->wait(), s->full = true;
}

/* Enqueues work that is not a launch. */
static cudaError_t enqueue(cudaStream_t stream, std::function<void()> f) {
    NEEDS(!sticky(), sticky());
    Stream *s = stream_of(stream);
    if (s->capture) s->capture->nodes.push_back({NULL, std::move(f)});
    else s->push({NULL, std::move(f)}), s->full = true;
    return cudaSuccess;
}

bool stream_enqueue(void *stream, int device, std::function<void()> f) {
    return stream_of((cudaStream_t)stream)->device == device && !enqueue((cudaStream_t)stream, std::move(f));
}
int device_of_thread() { return current_device; }

/* ---- modules ---- */

struct Module;
struct Function {
    Module *module;
    std::string name;
    Kernel *by_image[2][8] = {};       /* of the engine's module, of its own */
    int max_dynamic[DEVICES_MAX] = {}; /* bytes of dynamic shared memory that cudaFuncSetAttribute allowed */
};
/* The PTX of one or several targets: of a fat binary, or the engine's. */
struct Module {
    std::vector<std::pair<const char *, size_t>> text;
    std::vector<int> target;  /* 10 x compute capability */
    std::vector<bool> family; /* runs on chips of this major version alone */
    std::vector<std::unique_ptr<Image>> image;
    std::mutex lock;
};
static std::mutex registry_lock EARLY;
static std::vector<Module *> modules EARLY;
static Module *engine; /* of build/moe_cuda.o (images.cpp); NULL: it is not linked */
static std::unordered_map<const void *, std::unique_ptr<Function>> functions EARLY;

static Function *function_of(const void *host) {
    std::lock_guard<std::mutex> g(registry_lock);
    auto i = functions.find(host);
    return i == functions.end() ? NULL : i->second.get();
}

/* The image that the device runs: the newest one that it can. -1: none. */
static int image_for(const Module &m, int device) {
    const int cc = 10 * machine.device[device].major + machine.device[device].minor;
    int best = -1;
    for (int i = 0; i < (int)m.target.size(); i++) {
        if (m.target[i] > cc || (m.family[i] && m.target[i] / 10 != cc / 10)) continue;
        if (best < 0 || m.target[i] > m.target[best]) best = i;
    }
    return best;
}

/* A kernel of another module that the engine has too is left out: the engine's runs. */
static Image *module_image(Module &m, int i) {
    std::lock_guard<std::mutex> g(m.lock);
    if (m.image[i]) return m.image[i].get();
    m.image[i].reset(image_load(m.text[i].first, m.text[i].second));
    if (engine && &m != engine)
        for (auto &k : module_image(*engine, 0)->kernels) m.image[i]->kernels.erase(k.first);
    return m.image[i].get();
}

/* The kernel of a function as the device runs it, decoded; NULL: the program has no image for it. */
static Kernel *kernel_for(Function *f, int device) {
    if (!f) return NULL;
    for (int own = 0; own < 2; own++) {
        Module *m = own ? f->module : engine;
        const int i = m ? image_for(*m, device) : -1;
        if (i < 0) continue;
        Kernel *&known = f->by_image[own][i];
        if (known) return known;
        auto &kernels = module_image(*m, i)->kernels;
        auto k = kernels.find(f->name);
        if (k == kernels.end()) continue;
        decode(*k->second);
        return known = k->second.get();
    }
    return NULL;
}

static void module_add_text(Module &m, const char *text, size_t size) {
    const char *t = strstr(text, ".target sm_");
    if (!t && engine) return; /* compressed: the engine's object, whose PTX is linked beside it */
    if (!t) fprintf(stderr, "ptxsim: the embedded PTX is compressed: build with --compress-mode=none\n"), abort();
    char *end;
    m.target.push_back((int)strtol(t + strlen(".target sm_"), &end, 10));
    m.family.push_back(*end == 'f' || *end == 'a');
    m.text.push_back({text, strnlen(text, size)});
    m.image.emplace_back();
}

/* An image that device 0 runs is read once, before tests fork. */
static Module *module_add(Module *m) {
    const int first = image_for(*m, 0);
    if (first >= 0) module_image(*m, first);
    std::lock_guard<std::mutex> g(registry_lock);
    modules.push_back(m);
    return m;
}

static void engine_add() {
    if (engine || !ptx_images) return;
    engine = new Module;
    for (const char *text = ptx_images; *text; text += strlen(text) + 1) module_add_text(*engine, text, strlen(text));
    module_add(engine);
}

/* ---- launches ---- */

/* The name of a kernel in the source, of its mangled one: _Z, the length, the name. */
static std::string source_name(const std::string &mangled) {
    char *end;
    if (mangled.compare(0, 2, "_Z")) return mangled;
    const size_t n = strtoul(mangled.c_str() + 2, &end, 10);
    return std::string(end, std::min(n, strlen(end)));
}

static cudaError_t launch(Function *f, dim3 grid, dim3 block, void **args, size_t dynamic, cudaStream_t stream,
                          bool overlaps) {
    if (call_fails("LAUNCH")) return fail_with(cudaErrorUnknown);
    NEEDS(!sticky(), sticky());
    Stream *s = stream_of(stream);
    Kernel *k = kernel_for(f, s->device);
    NEEDS(k, f ? cudaErrorNoKernelImageForDevice : cudaErrorInvalidDeviceFunction);
    const u64 threads = (u64)block.x * block.y * block.z;
    if (!threads || !grid.x || !grid.y || !grid.z || threads > (u64)k->max_threads || block.z > 64 ||
        grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) {
        note("kernel %s: grid %u %u %u, block %llu of at most %d threads", k->name.c_str(), grid.x, grid.y, grid.z,
             (unsigned long long)threads, k->max_threads);
        return fail_with(cudaErrorInvalidConfiguration);
    }
    const size_t total = dynamic ? k->dynamic_at + dynamic : k->static_shared;
    if (total > SHARED_MAX || (dynamic && total > SHARED_STATIC && dynamic > (size_t)f->max_dynamic[s->device])) {
        note("kernel %s: %zu bytes of dynamic shared memory, %d allowed", k->name.c_str(), dynamic,
             f->max_dynamic[s->device]);
        return fail_with(cudaErrorInvalidValue);
    }
    if (machine.change) machine.change(source_name(f->name).c_str(), args[0]);
    auto L = std::make_shared<Launch>();
    L->k = k, L->grid = grid, L->block = block, L->dynamic = dynamic, L->stream = s, L->device = s->device;
    L->params.resize(k->param_bytes);
    for (size_t i = 0; i < k->params.size(); i++)
        memcpy(L->params.data() + k->params[i].at, args[i], k->params[i].size);
    L->programmatic = L->overlaps = overlaps && k->image->cc >= 90; /* chips before 9.0 ignore it */
    if (s->capture) {
        s->capture->nodes.push_back({std::move(L), NULL});
        return cudaSuccess;
    }
    L->overlaps &= !s->full.exchange(false);
    s->push({std::move(L), NULL});
    return cudaSuccess;
}

/* A launch of a recording, to be run. */
static std::shared_ptr<Launch> launch_copy(const Launch &from, Stream *s, bool first) {
    auto L = std::make_shared<Launch>();
    L->k = from.k, L->grid = from.grid, L->block = from.block, L->dynamic = from.dynamic, L->params = from.params;
    L->stream = s, L->device = s->device, L->programmatic = from.programmatic, L->overlaps = from.overlaps && !first;
    return L;
}

struct Event {
    std::mutex lock;
    std::condition_variable wake;
    bool done = true;
    u64 recorded = 0, happened = 0; /* times */
    u64 ns = 0;
};

/* What copies between GPUs take beyond the time of this processor: a link has 16 GB/s at most. */
static std::atomic<u64> link_ns;

/* Ends the launch without a message if a copy leaves its allocation. */
static void copy_checked(void *to, const void *from, size_t n) {
    if (range_ok(to, n) && range_ok(from, n)) {
        memcpy(to, from, n);
        return;
    }
    fprintf(stderr, "ptxsim: a copy of %zu bytes leaves its allocation\n", n);
    sticky_error = cudaErrorInvalidValue;
}

static bool no_device(int device) { return device < 0 || device >= machine.n_device; }

static void each_device(int device, const std::function<void(Device &)> &f) {
    for (int i = 0; i < DEVICES_MAX; i++)
        if (device < 0 || i == device) f(machine.device[i]);
}

/* A line for each kernel that was launched: target, name, and for each instruction whether it ran. */
static void coverage_append(FILE *f) {
    for (Module *m : modules)
        for (auto &image : m->image)
            if (image)
                for (auto &k : image->kernels) {
                    std::string ran;
                    for (size_t i = 0; i < k.second->code.size(); i++)
                        if (k.second->code[i].text) ran += k.second->ran[i] ? '1' : '0'; /* not the end */
                    if (ran.find('1') != std::string::npos)
                        fprintf(f, "%d %s %s\n", image->cc, k.first.c_str(), ran.c_str());
                }
}

/* What all lines of a file say, by target and kernel. */
static std::map<std::pair<int, std::string>, std::string> coverage_read(FILE *f) {
    std::map<std::pair<int, std::string>, std::string> all;
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, f) > 0) {
        char name[1024];
        int cc, at;
        if (sscanf(line, "%d %1023s %n", &cc, name, &at) != 2) continue;
        std::string ran(line + at, strcspn(line + at, "\n"));
        std::string &sum = all[{cc, name}];
        sum.resize(ran.size(), '0');
        for (size_t i = 0; i < ran.size(); i++) sum[i] = std::max(sum[i], ran[i]);
    }
    free(line);
    return all;
}

/* The synchronizing instructions of the decoded kernels. */
static std::vector<std::pair<Kernel *, size_t>> all_sites() {
    static const char *const names[] = {"bar", "barrier", "membar", "fence", "griddepcontrol.wait", "cp.async.wait"};
    std::vector<std::pair<Kernel *, size_t>> sites;
    for (Module *m : modules)
        for (auto &image : m->image)
            if (image)
                for (auto &k : image->kernels)
                    for (size_t i = 0; i < k.second->code.size(); i++) {
                        const char *text = k.second->code[i].text;
                        if (!text) continue;
                        if (*text == '@') text += strcspn(text, " \t"), text += strspn(text, " \t");
                        bool found = false;
                        for (const char *name : names) {
                            const size_t n = strlen(name);
                            found |= !strncmp(text, name, n) && !isalpha((u8)text[n]);
                        }
                        if (found) sites.push_back({k.second.get(), i});
                    }
    return sites;
}

/* The threads of streams do not live on in a child process: it has no streams. */
[[maybe_unused]] static const int forgets_streams = pthread_atfork(NULL, NULL, [] {
    streams.clear();
    for (Stream *&s : own_streams) s = NULL;
});

} // namespace ptxsim

using namespace ptxsim;

void sim_edit(std::string (*f)(const char *kernel, std::string body)) { machine.edit = f; }

extern "C" {

/* ---- ptxsim.h ---- */

void sim_seed(uint64_t seed) { machine.seed = seed; }
void sim_devices(int n, bool peers) {
    machine.n_device = std::min(std::max(n, 1), (int)DEVICES_MAX);
    machine.peers_possible = peers;
    for (auto &row : machine.peer_enabled)
        for (auto &e : row) e = false;
    if (no_device(current_device)) current_device = 0;
}
void sim_memory(int device, size_t bytes) {
    each_device(device, [=](Device &d) { d.memory = bytes; });
}
void sim_l2(int device, int bytes) {
    each_device(device, [=](Device &d) { d.l2_bytes = bytes; });
}
void sim_capability(int device, int major, int minor) {
    each_device(device, [=](Device &d) { d.major = major, d.minor = minor; });
}
void sim_integrated(int device, bool is) {
    each_device(device, [=](Device &d) { d.integrated = is; });
}
void sim_truncate_sums(int products) { machine.mma_truncates = products; }
void sim_races(bool on) {
    if (on) arena_watch();
    machine.races = on;
}
static std::atomic<bool> waits_lost;
void sim_lose_waits(void) { waits_lost = true; }
void sim_fail(const char *function, int n) {
    std::lock_guard<std::mutex> g(machine.lock);
    machine.failures.erase(function);
    if (n) machine.failures[function] = n;
}
void sim_log_prefetches(bool on) {
    std::lock_guard<std::mutex> g(machine.lock);
    machine.prefetches.clear();
    machine.logs_prefetches = on;
}
size_t sim_prefetched(const void *p, size_t n) {
    std::lock_guard<std::mutex> g(machine.lock);
    size_t got = 0;
    for (auto &x : machine.prefetches) got += x.first - (uintptr_t)p < n ? x.second : 0;
    return got;
}
size_t sim_prefetches(void) {
    std::lock_guard<std::mutex> g(machine.lock);
    return machine.prefetches.size();
}
int sim_graph_launches(const void *graph_exec, int *overlapping) {
    int n = 0;
    *overlapping = 0;
    for (auto &node : ((const Graph *)graph_exec)->nodes)
        if (node.launch) n++, *overlapping += node.launch->overlaps;
    return n;
}
bool sim_append_coverage(const char *path) {
    FILE *f = fopen(path, "a");
    if (!f) return false;
    const bool alone = !flock(fileno(f), LOCK_EX); /* until it is closed */
    coverage_append(f);
    return !fclose(f) && alone;
}
/* Calls f with each kernel of the images that device 0 takes, and with what a file says of it; NULL: nothing. False: the file
 * cannot be opened. */
static bool coverage_each(const char *path, const std::function<void(Kernel &, const std::string *)> &f) {
    FILE *file = fopen(path, "r");
    if (!file) return false;
    const auto all = coverage_read(file);
    fclose(file);
    for (Module *m : modules) {
        const int best = image_for(*m, 0);
        if (best < 0) continue;
        for (auto &k : module_image(*m, best)->kernels) {
            const auto found = all.find({m->target[(size_t)best], k.first});
            f(*k.second, found == all.end() ? NULL : &found->second);
        }
    }
    return true;
}
int sim_print_coverage(const char *path, const struct sim_uncovered *known, int n) {
    size_t all = 0, sum = 0;
    int bad = 0;
    std::vector<bool> needed((size_t)n);
    const bool ok = coverage_each(path, [&](Kernel &k, const std::string *ran) {
        const size_t of = ran ? ran->size() : 0, yes = ran ? (size_t)std::count(ran->begin(), ran->end(), '1') : 0;
        const char *why = NULL;
        all += of, sum += yes;
        if (ran && yes * 100 >= of * 97) return;
        for (int i = 0; i < n && !why; i++)
            if (!fnmatch(known[i].kernel, k.name.c_str(), 0)) why = known[i].why, needed[(size_t)i] = true;
        bad += !why;
        printf("%5.1f %% of %5zu  %s%s%s\n", of ? 100.0 * (double)yes / (double)of : 0, of, k.name.c_str(),
               why ? ": " : "", why ? why : "");
    });
    if (!ok) return -1;
    for (int i = 0; i < n; i++)
        if (!needed[(size_t)i]) bad++, printf("no kernel needs the exception %s\n", known[i].kernel);
    printf("%zu of %zu instructions of the kernels that were launched ran, %.1f %%\n", sum, all,
           100.0 * (double)sum / (double)std::max(all, (size_t)1));
    return bad;
}
bool sim_print_left_out(const char *path, const char *kernel) {
    return coverage_each(path, [&](Kernel &k, const std::string *ran) {
        if (!ran || !strstr(k.name.c_str(), kernel)) return;
        decode(k);
        for (size_t i = 0; i < ran->size(); i++)
            printf("%s %c %.*s\n", k.name.c_str(), (*ran)[i], (int)strcspn(k.code[i].text, ";"), k.code[i].text);
    });
}
bool sim_write_ptx(const char *path) {
    FILE *f = fopen(path, "w");
    if (!f) return false;
    for (Module *m : modules)
        for (auto &t : m->text) fwrite(t.first, 1, t.second, f);
    return !fclose(f);
}

int sim_sites(struct sim_site *out, int n) {
    int i = 0;
    for (auto &s : all_sites()) {
        if (i < n) out[i] = {s.first->name.c_str(), s.first->code[s.second].text, s.first->ran[s.second] != 0};
        i++;
    }
    return i;
}
void sim_forget_runs(void) {
    for (auto &s : all_sites()) s.first->ran[s.second] = 0;
}
void sim_remove_site(const char *text) {
    for (auto &s : all_sites())
        if (s.first->code[s.second].text == text) s.first->code[s.second].kind = NOTHING;
}
void sim_change_arguments(void (*f)(const char *kernel, void *argument)) { machine.change = f; }

/* ---- what nvcc's host code calls ---- */

void **__cudaRegisterFatBinary(void *wrapper) {
    struct Wrapper {
        int magic, version;
        const u8 *data;
        void *more;
    } *w = (Wrapper *)wrapper;
    engine_add();
    auto *m = new Module;
    /* a header of 16 bytes with the length, then entries: kind, size of the header, size of the data */
    const u8 *p = w->data;
    u64 left;
    memcpy(&left, p + 8, 8);
    for (p += 16; left > 64;) {
        u16 kind;
        u32 header;
        u64 size;
        memcpy(&kind, p, 2), memcpy(&header, p + 4, 4), memcpy(&size, p + 8, 8);
        if (kind == 1) module_add_text(*m, (const char *)p + header, size);
        p += header + size, left -= header + size;
    }
    if (m->text.empty() && !engine)
        fprintf(stderr, "ptxsim: no PTX in the program: build with code=compute_XX\n"), abort();
    return (void **)module_add(m);
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
char __cudaInitModule(void **) { return 1; }
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
void __cudaRegisterFunction(void **module, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                            dim3 *, int *) {
    std::lock_guard<std::mutex> g(registry_lock);
    auto f = std::make_unique<Function>();
    f->module = (Module *)module, f->name = name;
    functions[host] = std::move(f);
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
    *k = (cudaKernel_t)function_of(f);
    return *k ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}
static thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch((Function *)k, grid, block, args, shared, stream, false);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(function_of(f), grid, block, args, shared, stream, false);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    bool overlaps = false;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            overlaps = c->attrs[i].val.programmaticStreamSerializationAllowed;
    return launch(function_of(f), c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream, overlaps);
}
cudaError_t cudaFuncSetAttribute(const void *host, cudaFuncAttribute a, int value) {
    CALL();
    Function *f = function_of(host);
    Kernel *k = kernel_for(f, current_device);
    NEEDS(k, f ? cudaErrorNoKernelImageForDevice : cudaErrorInvalidDeviceFunction);
    if (a != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    NEEDS(value >= 0 && k->dynamic_at + (size_t)value <= SHARED_MAX, cudaErrorInvalidValue);
    f->max_dynamic[current_device] = value;
    return cudaSuccess;
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *n) {
    CALL();
    return *n = machine.n_device, cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    CALL();
    NEEDS(!no_device(device), cudaErrorInvalidDevice);
    return current_device = device, cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    CALL();
    return *device = current_device, cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    CALL();
    NEEDS(!no_device(device), cudaErrorInvalidDevice);
    const Device &d = machine.device[device];
    memset(p, 0, sizeof *p);
    strcpy(p->name, "simulated GPU");
    p->totalGlobalMem = d.memory;
    p->sharedMemPerBlock = SHARED_STATIC, p->sharedMemPerBlockOptin = SHARED_MAX;
    p->sharedMemPerMultiprocessor = SHARED_MAX + 1024;
    p->major = d.major, p->minor = d.minor, p->integrated = d.integrated;
    p->multiProcessorCount = SM_COUNT, p->l2CacheSize = d.l2_bytes, p->memoryBusWidth = 512;
    p->warpSize = LANES, p->maxThreadsPerBlock = 1024, p->pciBusID = 1 + device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int device) {
    CALL();
    NEEDS(!no_device(device), cudaErrorInvalidDevice);
    const Device &d = machine.device[device];
    switch (a) {
    case cudaDevAttrMultiProcessorCount: *v = SM_COUNT; break;
    case cudaDevAttrComputeCapabilityMajor: *v = d.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = d.minor; break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate: *v = 1000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = 512; break;
    case cudaDevAttrL2CacheSize: *v = d.l2_bytes; break;
    case cudaDevAttrIntegrated: *v = d.integrated; break;
    case cudaDevAttrPciBusId: *v = 1 + device; break;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId: *v = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = SHARED_MAX; break;
    default: return fail_with(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) {
    CALL();
    return *v = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
    CALL();
    return *v = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int device) {
    CALL();
    NEEDS(!no_device(device), cudaErrorInvalidDevice);
    return snprintf(s, (size_t)n, "0000:%02x:00.0", 1 + device), cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    CALL();
    NEEDS(!no_device(device) && !no_device(peer), cudaErrorInvalidDevice);
    return *can = machine.peers_possible && device != peer, cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    CALL();
    NEEDS(!no_device(peer) && peer != current_device, cudaErrorInvalidDevice);
    NEEDS(!flags, cudaErrorInvalidValue);
    NEEDS(machine.peers_possible, cudaErrorPeerAccessUnsupported);
    NEEDS(!machine.peer_enabled[current_device][peer].exchange(true), cudaErrorPeerAccessAlreadyEnabled);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    CALL();
    std::lock_guard<std::mutex> g(arena.lock);
    const Device &d = machine.device[current_device];
    *total = d.memory, *free_bytes = d.memory - std::min(d.memory, d.used);
    return cudaSuccess;
}

/* ---- memory ---- */

struct Registered {
    size_t bytes;
    void *seen; /* by GPUs */
};
static std::map<uintptr_t, Registered> registered; /* by the host's address */
static std::mutex registered_lock;

cudaError_t cudaMalloc(void **p, size_t n) {
    WAITS();
    NEEDS((*p = arena_alloc(n, current_device)), cudaErrorMemoryAllocation);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **p, size_t n) {
    WAITS();
    NEEDS((*p = arena_alloc(n, HOST)), cudaErrorMemoryAllocation);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) {
    WAITS();
    NEEDS((*p = arena_alloc(n, HOST)), cudaErrorMemoryAllocation);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    WAITS();
    streams_wait(false); /* as the real one does */
    NEEDS(!p || arena_free(p), cudaErrorInvalidValue);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) {
    WAITS();
    streams_wait(false);
    NEEDS(!p || arena_free(p), cudaErrorInvalidValue);
    return cudaSuccess;
}
/* GPUs see registered memory at another address: a program must not take the host's. Both are mappings of one file, which
 * has what the memory had. */
static void *share(void *p, size_t n) {
    void *seen = arena_alloc(n, HOST);
    const int file = memfd_create("registered", MFD_CLOEXEC);
    auto map = [&](void *at) { return mmap(at, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == at; };
    const bool done = seen && file >= 0 && !ftruncate(file, (off_t)n) && map(seen) && (memcpy(seen, p, n), map(p));
    if (file >= 0) close(file);
    if (!done) perror("ptxsim: registered memory"), abort();
    return seen;
}

cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
    WAITS();
    const uintptr_t at = (uintptr_t)p;
    std::lock_guard<std::mutex> g(registered_lock);
    NEEDS(p && n && at % 4096 == 0 && n % 4096 == 0, cudaErrorInvalidValue);
    auto after = registered.lower_bound(at);
    NEEDS(after == registered.end() || after->first >= at + n, cudaErrorHostMemoryAlreadyRegistered);
    NEEDS(after == registered.begin() || std::prev(after)->first + std::prev(after)->second.bytes <= at,
          cudaErrorHostMemoryAlreadyRegistered);
    registered[at] = {n, share(p, n)};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) {
    WAITS();
    streams_wait(false);
    std::lock_guard<std::mutex> g(registered_lock);
    const auto found = registered.find((uintptr_t)p);
    NEEDS(found != registered.end(), cudaErrorHostMemoryNotRegistered);
    arena_free(found->second.seen);
    registered.erase(found);
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **seen, void *p, unsigned) {
    CALL();
    std::lock_guard<std::mutex> g(registered_lock);
    const auto found = registered.find((uintptr_t)p);
    NEEDS(found != registered.end(), cudaErrorInvalidValue);
    return *seen = found->second.seen, cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
    WAITS();
    streams_wait(true);
    NEEDS(!sticky(), sticky());
    copy_checked(to, from, n);
    return fail_with(sticky());
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t s) {
    CALL();
    NEEDS(range_ok(to, n) && range_ok(from, n), cudaErrorInvalidValue);
    if (in_arena(from)) return enqueue(s, [=] { copy_checked(to, from, n); });
    auto copy = std::make_shared<std::vector<u8>>((const u8 *)from, (const u8 *)from + n); /* staged: not pinned */
    return enqueue(s, [=] { copy_checked(to, copy->data(), n); });
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n, cudaStream_t s) {
    CALL();
    NEEDS(range_ok(to, n) && range_ok(from, n), cudaErrorInvalidValue);
    return enqueue(s, [=] { copy_checked(to, from, n), link_ns += n / 16; });
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
    WAITS();
    NEEDS(range_ok(p, n), cudaErrorInvalidValue);
    streams_wait(true);
    memset(p, v, n);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
    CALL();
    NEEDS(range_ok(p, n), cudaErrorInvalidValue);
    return enqueue(s, [=] { memset(p, v, n); });
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    CALL();
    return *s = (cudaStream_t)stream_new(!(flags & cudaStreamNonBlocking)), cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) {
    CALL();
    return *s = (cudaStream_t)stream_new(true), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    CALL();
    Stream *s = (Stream *)stream;
    streams_go();
    s->wait();
    {
        std::lock_guard<std::mutex> g(streams_lock);
        streams.erase(std::find(streams.begin(), streams.end(), s));
    }
    {
        std::lock_guard<std::mutex> g(s->lock);
        s->quit = true;
        s->wake.notify_all();
    }
    s->worker.join(); /* *s stays: another thread may have it in its list of all_streams */
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    WAITS();
    Stream *s = stream_of(stream);
    NEEDS(!s->capture, cudaErrorStreamCaptureUnsupported);
    streams_go();
    s->wait();
    s->full = true;
    return fail_with(sticky());
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    WAITS();
    Stream *s = stream_of(stream);
    NEEDS(!s->capture, cudaErrorStreamCaptureUnsupported);
    NEEDS(!sticky(), sticky());
    streams_go();
    if (!s->done()) return sched_yield(), cudaErrorNotReady;
    s->full = true;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    WAITS();
    streams_wait(false);
    return fail_with(sticky());
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    CALL();
    return *e = (cudaEvent_t) new Event, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) {
    CALL();
    return *e = (cudaEvent_t) new Event, cudaSuccess;
}
static void event_wait(Event *e) {
    streams_go();
    std::unique_lock<std::mutex> g(e->lock);
    e->wake.wait(g, [&] { return e->done; });
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    CALL();
    event_wait((Event *)e);
    delete (Event *)e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALL();
    Event *e = (Event *)event;
    Stream *s = stream_of(stream);
    NEEDS(!s->capture, cudaErrorStreamCaptureUnsupported);
    {
        std::lock_guard<std::mutex> g(e->lock);
        e->done = false;
        e->recorded++;
    }
    const auto happen = [e] {
        std::lock_guard<std::mutex> g(e->lock);
        e->done = ++e->happened == e->recorded;
        e->ns = time_ns() + link_ns;
        e->wake.notify_all();
    };
    s->push({NULL, happen});
    return cudaSuccess;
}
/* Later work of the stream waits for the latest record. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    CALL();
    Event *e = (Event *)event;
    Stream *s = stream_of(stream);
    u64 record;
    NEEDS(!s->capture, cudaErrorStreamCaptureUnsupported);
    {
        std::lock_guard<std::mutex> g(e->lock);
        record = e->recorded;
    }
    if (waits_lost) return cudaSuccess;
    s->full = true;
    s->push({NULL, [e, record] {
                 std::unique_lock<std::mutex> g(e->lock);
                 e->wake.wait(g, [&] { return e->happened >= record; });
             }});
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    WAITS();
    event_wait((Event *)event);
    return fail_with(sticky());
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    WAITS();
    NEEDS(!sticky(), sticky());
    Event *e = (Event *)event;
    streams_go();
    std::lock_guard<std::mutex> g(e->lock);
    if (!e->done) sched_yield();
    return e->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    CALL();
    *ms = (float)((double)(((Event *)b)->ns - ((Event *)a)->ns) * 1e-6);
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    CALL();
    Stream *s = (Stream *)stream;
    NEEDS(s, cudaErrorStreamCaptureUnsupported);
    NEEDS(!s->capture, cudaErrorIllegalState);
    s->capture = new Graph;
    recordings++, recording_lost = false;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *g) {
    Stream *s = stream_of(stream);
    std::unique_ptr<Graph> made(std::exchange(s->capture, (Graph *)NULL));
    *g = NULL;
    NEEDS(made, cudaErrorIllegalState);
    recordings--;
    NEEDS(!recording_lost, cudaErrorStreamCaptureInvalidated);
    CALL();
    *g = (cudaGraph_t)made.release();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long) {
    CALL();
    return *e = (cudaGraphExec_t) new Graph(*(Graph *)g), cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    CALL();
    return delete (Graph *)g, cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) {
    CALL();
    streams_wait(false);
    return delete (Graph *)g, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    WAITS();
    NEEDS(!sticky(), sticky());
    Stream *s = stream_of(stream);
    bool first = true;
    for (auto &n : ((Graph *)exec)->nodes) {
        s->push(n.launch ? Operation{launch_copy(*n.launch, s, first), NULL} : Operation{NULL, n.work});
        first = !n.launch;
    }
    s->full = true; /* what follows comes after the whole graph */
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t e = last_error ? last_error : sticky();
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError(void) { return last_error ? last_error : sticky(); }
const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorPeerAccessUnsupported: return "peer access is not supported between these two devices";
    case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return "unknown error";
    }
}
} /* extern "C" */
