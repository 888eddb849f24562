/* What moe-convert and moe-reap share: JSON, the safetensors reader, output files that appear only when they are
 * complete, and the reading of the command line. Messages, memory, temporary files, the line of progress and the form
 * of the table of options are those of moe.c. The including program defines PROGRAM, its name in messages, and
 * `manual`. */
#ifndef CONVERT_COMMON_H
#define CONVERT_COMMON_H

#define MOE_FOUNDATIONS_ONLY
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* a converter needs only some of them */
#include "../moe.c"
#pragma GCC diagnostic pop

#include <libgen.h>
#include <sys/statvfs.h>

static_assert(sizeof(size_t) == 8, "sizes of files and tensors are size_t");

enum { CHUNK_BYTES = 8 << 20 };

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* ============================================================================================================
 * Strings
 *
 * Tests of strings, and formatted text that nobody frees.
 * ============================================================================================================ */

/* Returns a formatted string, at most PATH_MAX - 1 bytes. It is valid for the next 15 calls. */
__attribute__((format(printf, 1, 2))) static inline const char *fmt(const char *f, ...) {
    static char ring[16][PATH_MAX];
    static unsigned turn;
    char *p = ring[turn++ % 16];
    va_list ap;
    va_start(ap, f);
    vsnprintf(p, sizeof ring[0], f, ap);
    va_end(ap);
    return p;
}

static inline bool ends_with(const char *s, const char *tail) {
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && !memcmp(s + n - k, tail, k);
}

static inline bool starts_with(const char *s, const char *head) { return !strncmp(s, head, strlen(head)); }

/* Whether s is one of the words in a list separated by spaces. */
static inline bool one_of(const char *s, const char *words) {
    return strstr(fmt(" %s ", words), fmt(" %s ", s)) != NULL;
}

/* Returns a size such as "1.5 GB"; valid as long as fmt's. */
static inline const char *human(double bytes) {
    static const char unit[] = " kMGTP";
    int u = 0;
    while (bytes >= 1000 && u < 5) {
        bytes /= 1000;
        u++;
    }
    return u ? fmt("%.1f %cB", bytes, unit[u]) : fmt("%.0f B", bytes);
}

/* ============================================================================================================
 * JSON
 *
 * Typed access to configuration files. null is the same as a missing key; a wrong type is an error that shows the
 * value.
 * ============================================================================================================ */

static const char *model_dir; /* the Hugging Face directory */

/* Returns the path of a file in model_dir; valid as long as fmt's. */
static inline const char *in_dir(const char *file) { return fmt("%s/%s", model_dir, file); }

static struct stat *inputs; /* stb_ds: all files that were opened for reading */

/* Opens a regular file for reading. A pipe is an error instead of a wait. */
static inline int input_open(const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st)) die("cannot open '%s': %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) die("'%s' is not a regular file", path);
    char head[64];
    const ssize_t n = pread(fd, head, sizeof head, 0);
    if (n > 0 && is_lfs_pointer(head, (size_t)n)) die("'%s' is a Git LFS pointer: run git lfs pull", path);
    arrput(inputs, st);
    return fd;
}

static inline FILE *input_file(const char *path) {
    FILE *f = fdopen(input_open(path), "r");
    if (!f) die("cannot open '%s': %s", path, strerror(errno));
    return f;
}

/* Returns a value as JSON, shortened to 80 bytes, for a message. */
static inline const char *json_show(const json_t *j) {
    char *s = json_dumps(j, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);
    const char *out = "none";
    if (s) out = fmt("%.80s%s", s, strlen(s) > 80 ? "..." : "");
    free(s);
    return out;
}

/* A JSON object, and its place for messages: the file, and the object's key in it (NULL: it is the whole file). */
struct doc {
    json_t *obj; /* NULL: all keys are missing */
    const char *file, *in;
};

/* Reads a JSON file, which messages about its contents call `name`. */
static inline struct doc doc_open(const char *path, const char *name) {
    json_error_t e;
    FILE *f = input_file(path);
    json_t *j = json_loadf(f, JSON_REJECT_DUPLICATES, &e);
    fclose(f);
    if (!j) die("'%s': %s (line %d, column %d)", path, e.text, e.line, e.column);
    if (!json_is_object(j)) die("'%s': expected a JSON object", path);
    return (struct doc){j, name, NULL};
}

/* Reads a JSON file of model_dir; obj is NULL if the file is missing. */
static inline struct doc doc_read(const char *file) {
    return access(in_dir(file), F_OK) ? (struct doc){NULL, file, NULL} : doc_open(in_dir(file), file);
}

/* Returns the value of a key, NULL if it is missing or null. */
static inline json_t *get(struct doc d, const char *key) {
    json_t *j = d.obj ? json_object_get(d.obj, key) : NULL;
    return json_is_null(j) ? NULL : j;
}

/* Dies unless ok, with the value of the key. what: the value that was expected. */
static inline void expect(struct doc d, const char *key, bool ok, const char *what) {
    if (ok) return;
    const char *path = d.in ? fmt("%s.%s", d.in, key) : key;
    die("%s: key '%s': expected %s, found %s", d.file, path, what, json_show(get(d, key)));
}

#define REQUIRED INT64_MIN /* a fallback that makes the key mandatory */

/* The functions below return the value of a key, and `fallback` if it is missing. get_int: from lo to hi. */
static inline int64_t get_int(struct doc d, const char *key, int64_t lo, int64_t hi, int64_t fallback) {
    json_t *j = get(d, key);
    if (!j && fallback != REQUIRED) return fallback;
    expect(d, key, json_is_integer(j) && json_integer_value(j) >= lo && json_integer_value(j) <= hi,
           fmt("an integer from %lld to %lld", (long long)lo, (long long)hi));
    return json_integer_value(j);
}

/* fallback NAN: the key is mandatory. */
static inline double get_num(struct doc d, const char *key, double fallback) {
    json_t *j = get(d, key);
    if (!j && !isnan(fallback)) return fallback;
    expect(d, key, json_is_number(j), "a number");
    return json_number_value(j);
}

static inline bool get_bool(struct doc d, const char *key, bool fallback) {
    json_t *j = get(d, key);
    expect(d, key, !j || json_is_boolean(j), "true or false");
    return j ? json_is_true(j) : fallback;
}

static inline const char *get_str(struct doc d, const char *key, const char *fallback) {
    json_t *j = get(d, key);
    expect(d, key, !j || json_is_string(j), "a string");
    return j ? json_string_value(j) : fallback;
}

static inline json_t *get_list(struct doc d, const char *key) {
    json_t *j = get(d, key);
    expect(d, key, !j || json_is_array(j), "a list");
    return j;
}

static inline struct doc get_obj(struct doc d, const char *key) {
    json_t *j = get(d, key);
    expect(d, key, !j || json_is_object(j), "an object");
    return (struct doc){j, d.file, key};
}

/* ============================================================================================================
 * safetensors
 *
 * A safetensors file is a u64 header length, a JSON header and the data (github.com/huggingface/safetensors). The
 * ranges of a header must cover the data section exactly, without a hole or an overlap, and each must be as long as
 * dtype and shape say. Data may be unaligned. They are read with pread, so that a failing disk is an error and not a
 * signal.
 * ============================================================================================================ */

/* those whose values are read; of the others only the size matters */
enum dtype { F32, F16, BF16, F8_E4M3, U8, F8_E8M0, I8, I32, I64 };

static const struct {
    const char *name;
    unsigned bits;
} dtypes[] = {[F32] = {"F32", 32},   [F16] = {"F16", 16},
              [BF16] = {"BF16", 16}, [F8_E4M3] = {"F8_E4M3", 8},
              [U8] = {"U8", 8},      [F8_E8M0] = {"F8_E8M0", 8},
              [I8] = {"I8", 8},      [I32] = {"I32", 32},
              [I64] = {"I64", 64},   {"F8_E5M2", 8},
              {"BOOL", 8},           {"I16", 16},
              {"U16", 16},           {"U32", 32},
              {"U64", 64},           {"F64", 64},
              {"C64", 64},           {"F4", 4},
              {"F6_E2M3", 6},        {"F6_E3M2", 6},
              {"F8_E4M3FNUZ", 8},    {"F8_E5M2FNUZ", 8}};

enum { MAX_RANK = 8, MAX_HEADER = 100000000 /* bytes, the limit of the safetensors library */ };

/* One file of a model. */
struct source_file {
    char *name;
    int fd;
};

struct tensor {
    char *name;
    uint32_t dtype; /* index into dtypes */
    uint32_t rank;  /* sizes in shape */
    size_t shape[MAX_RANK];
    size_t at, bytes; /* where the data are in the file */
    uint32_t shard;   /* index into shards */
    bool used;        /* written to the output or skipped on purpose */
};

static struct source_file *shards; /* stb_ds */
static struct tensor *tensors;     /* stb_ds, sorted by name */

/* Returns dtype and shape for a message, such as "BF16 [576, 7168]". */
static inline const char *shape_text(const struct tensor *t) {
    char s[256] = "[";
    for (uint32_t i = 0; i < t->rank; i++)
        snprintf(s + strlen(s), sizeof s - strlen(s), "%s%zu", i ? ", " : "", t->shape[i]);
    return fmt("%s %s]", dtypes[t->dtype].name, s);
}

static inline bool is_float(const struct tensor *t) { return t->dtype == F32 || t->dtype == F16 || t->dtype == BF16; }

/* Returns the GGUF type with the same bits as an F32, F16 or BF16 tensor. */
static inline uint32_t float_type(const struct tensor *t) {
    if (t->dtype == F32) return GGUF_F32;
    return t->dtype == F16 ? GGUF_F16 : GGUF_BF16;
}

/* Returns file and name of a tensor for a message. */
static inline const char *where(const struct tensor *t) {
    return fmt("'%s': tensor '%s'", shards[t->shard].name, t->name);
}

/* Reads n bytes from offset `at` of a file. */
static inline void read_exact(const struct source_file *s, size_t at, void *buf, size_t n) {
    uint8_t *p = buf;
    while (n) {
        ssize_t k = pread(s->fd, p, n, (off_t)at);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) die("cannot read '%s': %s", s->name, strerror(errno));
        if (!k) die("'%s': the file ends at byte %zu, %zu more were expected", s->name, at, n);
        p += k;
        at += (size_t)k;
        n -= (size_t)k;
    }
}

/* Reads the bytes [at, at + n) of a tensor and drops large ranges from the page cache, because they are read only
 * once. */
static inline void tensor_read(const struct tensor *t, size_t at, void *buf, size_t n) {
    const struct source_file *s = &shards[t->shard];
    read_exact(s, t->at + at, buf, n);
    if (n >= 1 << 20) posix_fadvise(s->fd, (off_t)(t->at + at), (off_t)n, POSIX_FADV_DONTNEED);
}

/* Appends the tensor of one header entry. The data section begins at byte data_at of the file and has data_bytes
 * bytes. */
static inline void parse_entry(const char *file, const char *name, json_t *e, size_t data_at, size_t data_bytes) {
    struct tensor t = {.at = data_at, .shard = (uint32_t)arrlen(shards) - 1};
    const char *dtype = json_string_value(json_object_get(e, "dtype"));
    json_t *shape = json_object_get(e, "shape"), *range = json_object_get(e, "data_offsets");
    size_t n_types = COUNT(dtypes);
    while (t.dtype < n_types && strcmp(dtypes[t.dtype].name, dtype ? dtype : "")) t.dtype++;
    if (t.dtype == n_types) die("'%s': tensor '%s': the dtype '%s' is unknown", file, name, dtype ? dtype : "(none)");
    if (!json_is_array(shape) || json_array_size(shape) > MAX_RANK)
        die("'%s': tensor '%s': the shape is not a list of at most %d sizes", file, name, MAX_RANK);
    t.rank = (uint32_t)json_array_size(shape);
    size_t bits = dtypes[t.dtype].bits;
    for (uint32_t i = 0; i < t.rank; i++) {
        json_t *d = json_array_get(shape, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            die("'%s': tensor '%s': size %u of the shape is %s", file, name, i, json_show(d));
        t.shape[i] = (size_t)json_integer_value(d);
        if (__builtin_mul_overflow(bits, t.shape[i], &bits)) die("'%s': tensor '%s': the size overflows", file, name);
    }
    json_t *b = json_array_get(range, 0), *end = json_array_get(range, 1);
    if (json_array_size(range) != 2 || !json_is_integer(b) || !json_is_integer(end) || json_integer_value(b) < 0 ||
        json_integer_value(end) < json_integer_value(b))
        die("'%s': tensor '%s': data_offsets are %s", file, name, range ? json_show(range) : "missing");
    size_t first = (size_t)json_integer_value(b), last = (size_t)json_integer_value(end);
    if (last > data_bytes)
        die("'%s': tensor '%s': data ends at byte %zu of %zu: the file is truncated", file, name, last, data_bytes);
    if (bits % 8 || last - first != bits / 8)
        die("'%s': tensor '%s': %zu bytes of data for %s", file, name, last - first, shape_text(&t));
    t.at += first;
    t.bytes = last - first;
    t.name = xstrdup(name);
    arrput(tensors, t);
}

/* qsort: by offset, an empty tensor before the one at the same offset. */
static inline int by_offset(const void *a, const void *b) {
    const struct tensor *x = a, *y = b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Opens one file, which stays open, and appends its tensors. */
static inline void shard_open(const char *name) {
    struct source_file s = {xstrdup(name), input_open(in_dir(name))};
    arrput(shards, s);
    uint8_t len[8];
    size_t size = (size_t)arrlast(inputs).st_size;
    if (size < 8) die("'%s': not a safetensors file (%zu bytes)", name, size);
    read_exact(&s, 0, len, 8);
    size_t n = gguf_rd64(len);
    if (n > MAX_HEADER || n > size - 8)
        die("'%s': a header of %zu bytes in a file of %zu: not a safetensors file, or truncated", name, n, size);
    char *text = xrealloc(NULL, n);
    json_error_t e;
    read_exact(&s, 8, text, n);
    json_t *header = n && *text == '{' ? json_loadb(text, n, JSON_REJECT_DUPLICATES, &e) : NULL;
    if (!header) die("'%s': the header is not valid JSON: %s", name, n && *text == '{' ? e.text : "no '{'");
    free(text);

    size_t first = arrlenu(tensors);
    const char *key;
    json_t *value;
    json_object_foreach(header, key, value) {
        if (strcmp(key, "__metadata__")) parse_entry(name, key, value, 8 + n, size - 8 - n);
    }
    json_decref(header);
    size_t count = arrlenu(tensors) - first;
    size_t at = 8 + n;
    if (count) qsort(tensors + first, count, sizeof *tensors, by_offset);
    for (size_t i = first; i < first + count; i++) {
        if (tensors[i].at != at)
            die("%s: data starts at byte %zu of the file, expected %zu (a hole or an overlap)", where(&tensors[i]),
                tensors[i].at, at);
        at += tensors[i].bytes;
    }
    if (at != size) die("'%s': the tensors end at byte %zu, the file has %zu", name, at, size);
}

static inline int by_name(const void *a, const void *b) {
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

/* Returns a tensor by its full name, or NULL. */
static inline struct tensor *tensor_find(const char *name) {
    struct tensor key = {.name = (char *)(uintptr_t)name};
    return bsearch(&key, tensors, arrlenu(tensors), sizeof *tensors, by_name);
}

/* Opens all files that the index names, or model.safetensors. Every tensor of the index must be in its file and every
 * tensor of a file in the index, but those of a prediction layer in mtp.safetensors: quantized releases of GLM-4.7 have
 * that file and do not list it. */
static inline void source_open(void) {
    static const char unlisted[] = "mtp.safetensors";
    struct doc index = doc_read("model.safetensors.index.json"), map = get_obj(index, "weight_map");
    const char *name;
    json_t *file, *seen = json_object();
    expect(index, "weight_map", !index.obj || map.obj, "an object");
    if (!index.obj && access(in_dir("model.safetensors"), F_OK))
        die("'%s' has neither %s nor model.safetensors", model_dir, index.file);
    if (!index.obj) shard_open("model.safetensors");
    json_object_foreach(map.obj, name, file) {
        const char *f = get_str(map, name, NULL);
        expect(map, name, f && !strchr(f, '/') && !strstr(f, ".."), "a file name without a directory");
        if (json_object_get(seen, f)) continue;
        json_object_set_new(seen, f, json_true());
        shard_open(f);
    }
    if (index.obj && !json_object_get(seen, unlisted) && !access(in_dir(unlisted), F_OK)) shard_open(unlisted);
    json_decref(seen);
    if (!arrlenu(tensors)) die("'%s': the safetensors files hold no tensor", model_dir);
    qsort(tensors, arrlenu(tensors), sizeof *tensors, by_name);
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        struct tensor *t = &tensors[i];
        if (i && !strcmp(t[-1].name, t->name)) die("%s: also in '%s'", where(t), shards[t[-1].shard].name);
        const char *f = get_str(map, t->name, NULL);
        if (index.obj && !f && strcmp(shards[t->shard].name, unlisted)) die("%s: the index does not list it", where(t));
        if (f && strcmp(f, shards[t->shard].name)) die("%s: the index says that it is in '%s'", where(t), f);
    }
    json_object_foreach(map.obj, name, file) {
        if (!tensor_find(name)) die("%s: tensor '%s' is not in '%s'", index.file, name, json_string_value(file));
    }
    json_decref(index.obj);
}

/* ============================================================================================================
 * Output
 *
 * A file is written under a temporary name in the directory of its target, synced and then renamed. Under the final
 * name there is always a complete file or what was there before.
 * ============================================================================================================ */

static struct {
    FILE *f;
    const char *path;
    size_t done, total;  /* bytes written, bytes to write */
    double start, shown; /* now_seconds() of the start and of the last progress bar */
} dest;

static volatile sig_atomic_t stop_signal; /* the signal that asks the program to stop, 0: none */

/* Draws the progress bar, at most five times a second; last: once more, with a newline. */
static inline void progress(bool last) {
    double t = now_seconds(), rate;
    if (!term.err_moves || (!last && t - dest.shown < 0.2)) return;
    dest.shown = t;
    rate = (double)dest.done / (t - dest.start > 1e-3 ? t - dest.start : 1e-3);
    double part = dest.total ? (double)dest.done / (double)dest.total : 1;
    long eta = rate > 0 ? (long)((double)(dest.total - dest.done) / rate + 0.5) : 0;
    char bar[33] = "................................";
    memset(bar, '#', (size_t)(32 * part));
    status_line("[%s] %3.0f %%  %s of %s  %s/s  ETA %ld:%02ld:%02ld", bar, 100 * part, human((double)dest.done),
                human((double)dest.total), human(rate), eta / 3600, eta / 60 % 60, eta % 60);
    if (last) status_end();
}

/* Writes n bytes of the output. All output goes through here, so that signals and full disks are handled in one
 * place. */
static inline void out_write(const void *p, size_t n) {
    if (stop_signal) die_code(128 + stop_signal, "interrupted; nothing was written to '%s'", dest.path);
    if (n && fwrite(p, 1, n, dest.f) != n) die("cannot write '%s': %s", dest.path, strerror(errno));
    dest.done += n;
    progress(false);
}

/* Returns buffer number `which` (0 to 5) with at least n bytes. Its contents are lost when it grows. */
static inline uint8_t *scratch(int which, size_t n) {
    static struct {
        uint8_t *p;
        size_t n;
    } buf[6];
    if (n > buf[which].n) {
        free(buf[which].p);
        buf[which].p = xrealloc(NULL, n);
        buf[which].n = n;
    }
    return buf[which].p;
}

static inline void on_signal(int sig) { stop_signal = sig; }

/* Handles a signal, unless the parent process ignores it (nohup). */
static inline void stop_on(int sig) {
    struct sigaction old, act = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    if (!sigaction(sig, NULL, &old) && old.sa_handler != SIG_IGN) sigaction(sig, &act, NULL);
}

/* Dies unless the directory of `path` has space for dest.total bytes. */
static inline void check_free_space(const char *path) {
    char dir[PATH_MAX], copy[PATH_MAX], need[64];
    struct statvfs fs;
    snprintf(copy, sizeof copy, "%s", path);
    strcpy(dir, dirname(copy));
    if (statvfs(dir, &fs)) die("'%s': %s", dir, strerror(errno));
    double available = (double)fs.f_bavail * (double)fs.f_frsize;
    snprintf(need, sizeof need, "%s", human((double)dest.total));
    if (available < (double)dest.total) die("'%s': %s needed, %s free", dir, need, human(available));
}

/* Dies unless `path` can be written: not a directory, not one of the input files, enough space. A symbolic link in
 * `path` is replaced by its target. */
static inline void check_target(char path[PATH_MAX]) {
    char copy[PATH_MAX];
    struct stat st;
    if (!lstat(path, &st)) {
        bool link = S_ISLNK(st.st_mode);
        if (!realpath(path, copy) || stat(copy, &st)) die("cannot replace '%s': %s", path, strerror(errno));
        for (size_t i = 0; i < arrlenu(inputs); i++)
            if (inputs[i].st_dev == st.st_dev && inputs[i].st_ino == st.st_ino)
                die("cannot replace '%s': it is one of the input files", path);
        if (link) strcpy(path, copy);
    }
    if (!stat(path, &st) && S_ISDIR(st.st_mode)) die("'%s' is a directory; -o must name a file", path);
    if (!stat(path, &st) && !S_ISREG(st.st_mode)) die("cannot replace '%s': it is not a regular file", path);
    check_free_space(path);
}

/* Starts the progress bar and installs the signal handlers. */
static inline void out_start(const char *path) {
    term_init();
    dest.path = path;
    dest.start = now_seconds();
    signal(SIGXFSZ, SIG_IGN); /* write() then returns an error at the limit of file sizes */
    stop_on(SIGINT);
    stop_on(SIGTERM);
    stop_on(SIGHUP);
}

/* Begins an output of dest.total bytes. A symbolic link in `path` is replaced by its target. */
static inline void out_begin(char path[PATH_MAX]) {
    check_target(path);
    out_start(path);
    if (!(dest.f = temp_open(path, 0666))) die("cannot write '%s': %s", path, strerror(errno));
}

/* Syncs a directory, so that a rename in it survives a crash. */
static inline void sync_dir(const char *path) {
    int dir = open(path, O_RDONLY | O_CLOEXEC);
    if (dir >= 0) {
        fsync(dir);
        close(dir);
    }
}

/* Syncs the output and gives it its final name. */
static inline void out_end(void) {
    char copy[PATH_MAX], err[ERR_MAX];
    if (temp_finish(dest.f, dest.path, false, err)) die("%s", err);
    snprintf(copy, sizeof copy, "%s", dest.path);
    sync_dir(dirname(copy));
    progress(true);
}

/* Returns the exit code 0, or dies if stdout could not be written. */
static inline int stdout_end(void) {
    if (fflush(stdout) || ferror(stdout)) die("cannot write to stdout: %s", strerror(errno));
    return 0;
}

/* ============================================================================================================
 * Command line
 *
 * Reads the options of a converter into its settings. Options that every converter has print something and end it.
 * ============================================================================================================ */

/* The fields of the options that every converter has. */
struct common_settings {
    bool version, man, help;
    int completion; /* enum shell; -1: not asked for */
};

/* Rows of the table of options. `common` is the field of struct settings. */
#define COMMON_OPTIONS                                                            \
    {"man", IS_FLAG(common.man), .help = "print the manual page, for man -l -"},  \
        {"completion", IS_CHOICE(common.completion, shell_names), .arg = "SHELL", \
         .help = "print the completion script for this shell"},                   \
        {"version", IS_FLAG(common.version), .help = "print the version"}, {      \
        "help", "-h", IS_FLAG(common.help), .help = "this text"                   \
    }

/* Reads one option. next: the argument behind it; NULL: there is none. Returns whether it was taken as the value. */
static inline bool argument_read(struct settings *s, const char *a, const char *next) {
    char name[64], err[ERR_MAX], *typed = NULL;
    const char *value = argument_split(a, name);
    const struct option *o = option_by_argument(name);
    if (!o) die_usage("unknown option '%s' (see --help)", a);
    if (o->type == OPT_FLAG && !value) value = "on";
    const bool taken = !value && next;
    if (taken) value = next;
    if (!value) die_usage("%s needs a value", a);
    sb_printf(&typed, taken ? "%s %s" : "%s", a, next);
    if (option_store(s, o, sb_cstr(&typed), value, err)) die_usage("%s", err);
    arrfree(typed);
    return taken;
}

/* Reads the command line. Appends what is no option to *operands. */
static inline void arguments_read(struct settings *s, int argc, char **argv, const char ***operands) {
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') i += argument_read(s, argv[i], argv[i + 1]);
        else arrput(*operands, argv[i]);
    }
}

/* Prints what the options of every converter ask for, and then ends the program. */
static inline void common_options_run(const struct common_settings *s) {
    if (s->help) manual_help(true, stdout);
    else if (s->version) printf("%s %s\n", manual.name, MOE_VERSION);
    else if (s->man) manual_page(stdout);
    else if (s->completion >= 0) manual_completion((enum shell)s->completion, stdout);
    else return;
    exit(stdout_end());
}

#endif
