/* What moe-convert and moe-reap share: JSON, directories, the safetensors reader, output files that appear only when
 * they are complete, and the reading of the command line. Messages, memory, temporary files, the line of progress and
 * the form of the table of options are those of moe.c. The including program defines PROGRAM, its name in messages, and
 * `manual`. */
#ifndef CONVERT_COMMON_H
#define CONVERT_COMMON_H

#define MOE_LOADER_ONLY
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* a converter needs only some of them */
#include "../moe.c"
#pragma GCC diagnostic pop

#include <libgen.h>
#include <sys/statvfs.h>

#ifdef SANITIZED
/* A converter ends when its one file is written, and what it has allocated lives until then: leaks are not looked
 * for. */
const char *__asan_default_options(void) { return "detect_leaks=0"; }
#endif

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
 * Typed access to configuration files, which are read as Python's json module reads them. null is the same as a missing
 * key; a wrong type is an error that shows the value or, in a file whose contents have defaults, a note.
 * ============================================================================================================ */

static const char *model_dir; /* the Hugging Face directory */

/* Returns the path of a file in model_dir; valid as long as fmt's. */
static inline const char *in_dir(const char *file) { return fmt("%s/%s", model_dir, file); }

static struct stat *inputs; /* stb_ds: all files that were opened for reading */

/* Opens a regular file for reading. A pipe is an error instead of a wait. */
static inline int input_open(const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT && !lstat(path, &st))
        die("'%s' is a link to a file that is missing: the download is incomplete", path);
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

/* A JSON object, and its place for messages: the file, and the object's key in it (NULL: it is the whole file). */
struct doc {
    json_t *obj; /* NULL: all keys are missing */
    const char *file, *in;
};

/* Reads the next line of a file by getline. Returns its length, or -1 at the end. Dies if it cannot be read. */
static inline ssize_t line_next(FILE *f, const char *name, char **line, size_t *cap) {
    const ssize_t n = getline(line, cap, f);
    if (n < 0 && !feof(f)) die("cannot read '%s': %s", name, strerror(errno));
    return n;
}

/* Files whose contents have defaults: what is broken in them is a note and counts as missing, as in transformers. */
static const char files_with_defaults[] = "generation_config.json tokenizer_config.json chat_template.json "
                                          "processor_config.json model.safetensors.index.json";

static const char json_infinity[] = "9e307"; /* stands for infinity, which JSON does not have */

/* Returns a value as JSON, shortened to 80 bytes, for a message. */
static inline const char *json_show(const json_t *j) {
    if (json_is_real(j) && fabs(json_real_value(j)) >= strtod(json_infinity, NULL))
        return json_real_value(j) < 0 ? "-Infinity" : "Infinity";
    char *s = json_dumps(j, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);
    const char *out = "none";
    if (s) out = fmt("%.80s%s", s, strlen(s) > 80 ? "..." : "");
    free(s);
    return out;
}

/* Returns the code of the escape \uXXXX at p, -1 if there is none. */
static inline long json_escape(const char *p) {
    char digits[5] = "";
    if (p[0] != '\\' || p[1] != 'u' || strspn(p + 2, "0123456789abcdefABCDEF") < 4) return -1;
    memcpy(digits, p + 2, 4);
    return strtol(digits, NULL, 16);
}

/* Returns how many bytes the value or the escape at p has that Python's json module reads and jansson does not; 0:
 * there is none. to (n + 2 bytes, n being those at p that may belong to a number): what jansson reads in its place,
 * of the same length where that is possible. *value: what it means, for a note; "": the same. quoted: p is in a
 * string. */
static inline size_t json_foreign(const char *p, bool quoted, size_t n, char *to, const char **value) {
    const bool minus = *p == '-', named = starts_with(p + minus, "Infinity");
    if (quoted) {
        const long a = json_escape(p), b = a >> 10 == 0xd800 >> 10 ? json_escape(p + 6) : -1;
        const bool pair = b >> 10 == 0xdc00 >> 10, lone = a >> 11 == 0xd800 >> 11 && !pair;
        if (pair) snprintf(to, 13, "%s", p);
        else strcpy(to, "\\ufffd");
        *value = pair ? "" : to;
        return pair ? 12 : lone || !a ? 6 : 0;
    }
    if (starts_with(p, "NaN")) {
        strcpy(to, *value = "null");
        return 3;
    }
    if (named) n = minus + strlen("Infinity");
    if (!n) return 0;
    errno = 0;
    strtoll(p, NULL, 10);
    const bool whole = strspn(p, "-0123456789") >= n, large = named || isinf(strtod(p, NULL));
    *value = large ? minus ? "-9e307" : json_infinity : "";
    if (large) snprintf(to, n + 1, "%-*s", (int)n, *value);
    else if (whole && errno == ERANGE) snprintf(to, n + 1, "%.*se2", (int)n - 2, p); /* 17 digits or more are left */
    else return 0;
    return n;
}

/* Returns a text of n bytes, after which there is a zero, in a form that jansson reads as Python's json module reads
 * the text: whole numbers of any size become doubles, NaN null, infinity 9e307, and \u0000 and halves of surrogate
 * pairs U+FFFD. Lines stay as they are. Prints the first value that changes by that. An stb_ds array. */
static inline char *json_mend(const char *name, const char *text, size_t n) {
    enum { DIGITS = 4300 /* the most that Python reads */ };
    char *out = NULL, to[DIGITS + 2];
    const char *first = NULL;
    const char *from = text, *value;
    bool quoted = false;
    int line = 1;
    size_t changed = 0, step;
    for (const char *p = text; p < text + n; p += step) {
        const bool escape = quoted && *p == '\\', number = !quoted && strchr("-0123456789IN", *p);
        const size_t digits = number ? strspn(p, "-+.eE0123456789") : 0;
        line += *p == '\n';
        if (*p == '"') quoted = !quoted;
        step = escape ? 2 : digits ? digits : 1;
        const size_t foreign = (escape || number) && digits <= DIGITS ? json_foreign(p, quoted, digits, to, &value) : 0;
        if (!foreign) continue;
        step = foreign;
        sb_put(&out, from, (size_t)(p - from));
        sb_puts(&out, to);
        from = p + step;
        if (*value && !changed++)
            first = xstrdup(fmt("line %d: %.*s is read as %s", line, step > 40 ? 40 : (int)step, p, value));
    }
    sb_put(&out, from, (size_t)(text + n - from));
    if (changed) err_message("'%s': %s%s", name, first, changed > 1 ? fmt(", and %zu more", changed - 1) : "");
    return out;
}

/* Whether n bytes are UTF-16 or UTF-32: they begin with its mark, or with a zero beside an ASCII character. */
static inline bool is_utf16(const char *s, size_t n) {
    return n >= 2 && ((uint8_t)s[0] + (uint8_t)s[1] == 0xff + 0xfe || !s[0] != !s[1]);
}

/* Appends the text of a file to *text, without a byte-order mark. Returns 0, or -1 with a message. */
static inline int text_read(const char *path, char **text, char *err) {
    close(input_open(path));
    if (read_file(path, text, err)) return -1;
    if (is_utf16(*text, arrlenu(*text))) return fail(err, "'%s' is UTF-16: save it as UTF-8", path);
    if (arrlenu(*text) >= 3 && !memcmp(*text, "\xef\xbb\xbf", 3)) arrdeln(*text, 0, 3);
    sb_cstr(text);
    return 0;
}

/* Returns the JSON object in a file as Python's json module reads it; of a key that stands twice the last value counts.
 * NULL: there is none; err says why. */
static inline json_t *json_read_hf(const char *path, const char *name, char *err) {
    char *raw = NULL, *text = NULL;
    json_error_t e;
    json_t *j = NULL;
    if (text_read(path, &raw, err)) goto end;
    text = json_mend(name, raw, arrlenu(raw));
    j = json_loadb(text, arrlenu(text), JSON_REJECT_DUPLICATES, &e);
    if (!j && json_error_code(&e) == json_error_duplicate_key) {
        err_message("'%s': line %d: %s: the last one counts", name, e.line, e.text);
        j = json_loadb(text, arrlenu(text), 0, &e);
    }
    if (!arrlen(raw)) fail(err, "'%s' is empty", path);
    else if (!j) fail(err, "'%s': %s (line %d, column %d)", path, e.text, e.line, e.column);
    else if (!json_is_object(j)) {
        fail(err, "'%s': expected a JSON object, found %s", path, json_show(j));
        json_decref(j);
        j = NULL;
    }
end:
    arrfree(raw);
    arrfree(text);
    return j;
}

/* Reads a JSON file of ours, which messages about its contents call `name`. */
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
    char err[ERR_MAX];
    if (access(in_dir(file), F_OK)) return (struct doc){NULL, file, NULL};
    json_t *j = json_read_hf(in_dir(file), file, err);
    if (!j && !one_of(file, files_with_defaults)) die("%s", err);
    if (!j) err_message("%s: it is not used", err);
    return (struct doc){j, file, NULL};
}

/* Returns the value of a key, NULL if it is missing or null. */
static inline json_t *get(struct doc d, const char *key) {
    json_t *j = d.obj ? json_object_get(d.obj, key) : NULL;
    return json_is_null(j) ? NULL : j;
}

/* Returns "expected WHAT, found VALUE" of a key for a message. */
static inline const char *misfit(struct doc d, const char *key, const char *what) {
    return fmt("%s: key '%s': expected %s, found %s", d.file, d.in ? fmt("%s.%s", d.in, key) : key, what,
               json_show(get(d, key)));
}

/* Dies unless ok, with the value of the key. what: the value that was expected. */
static inline void expect(struct doc d, const char *key, bool ok, const char *what) {
    if (!ok) die("%s", misfit(d, key, what));
}

/* Returns ok, whether a value is of the right kind. Where it is not, dies or, in a file with defaults, says so. */
static inline bool fits(struct doc d, const char *key, bool ok, const char *what) {
    if (!ok && one_of(d.file, files_with_defaults)) err_message("%s: it is not used", misfit(d, key, what));
    else expect(d, key, ok, what);
    return ok;
}

/* Whether j is a whole number, also one that is written as 1024.0 or 1e3; *v: the number. */
static inline bool json_whole(const json_t *j, int64_t *v) {
    const double x = json_number_value(j);
    const bool real = json_is_real(j) && fabs(x) < 0x1p53 && x == floor(x);
    *v = real ? (int64_t)x : json_integer_value(j);
    return real || json_is_integer(j);
}

/* Returns the number of a list's element, -1 if it is not a whole number. */
static inline int64_t json_element(const json_t *list, size_t i) {
    int64_t v;
    return json_whole(json_array_get(list, i), &v) ? v : -1;
}

#define REQUIRED INT64_MIN /* a fallback that makes the key mandatory */

/* The functions below return the value of a key, and `fallback` if it is missing. get_int: from lo to hi. */
static inline int64_t get_int(struct doc d, const char *key, int64_t lo, int64_t hi, int64_t fallback) {
    json_t *j = get(d, key);
    int64_t v;
    if (!j && fallback != REQUIRED) return fallback;
    const bool whole = json_whole(j, &v);
    if (!fits(d, key, whole && v >= lo && v <= hi, fmt("an integer from %lld to %lld", (long long)lo, (long long)hi)))
        return fallback;
    return v;
}

/* The same for a limit from 1 up: a number above hi is hi; 0 and what stands for no limit, -1 and false, is
 * `fallback`. */
static inline int64_t get_limit(struct doc d, const char *key, int64_t hi, int64_t fallback) {
    const json_t *j = get(d, key);
    int64_t v;
    if (json_is_false(j) || (json_whole(j, &v) && (v == 0 || v == -1))) return fallback;
    return json_is_number(j) && json_number_value(j) > (double)hi ? hi : get_int(d, key, 1, hi, fallback);
}

/* fallback NAN: the key is mandatory. */
static inline double get_num(struct doc d, const char *key, double fallback) {
    json_t *j = get(d, key);
    if (!j && !isnan(fallback)) return fallback;
    return fits(d, key, json_is_number(j), "a number") ? json_number_value(j) : fallback;
}

/* 0 and 1 are false and true. */
static inline bool get_bool(struct doc d, const char *key, bool fallback) {
    json_t *j = get(d, key);
    int64_t v;
    if (json_whole(j, &v) && v >> 1 == 0) return v;
    return fits(d, key, !j || json_is_boolean(j), "true or false") && j ? json_is_true(j) : fallback;
}

static inline const char *get_str(struct doc d, const char *key, const char *fallback) {
    json_t *j = get(d, key);
    return fits(d, key, !j || json_is_string(j), "a string") && j ? json_string_value(j) : fallback;
}

static inline json_t *get_list(struct doc d, const char *key) {
    json_t *j = get(d, key);
    return fits(d, key, !j || json_is_array(j), "a list") ? j : NULL;
}

static inline struct doc get_obj(struct doc d, const char *key) {
    json_t *j = get(d, key);
    return (struct doc){fits(d, key, !j || json_is_object(j), "an object") ? j : NULL, d.file, key};
}

/* ============================================================================================================
 * Directories
 *
 * What may be given as a model: its directory, a file in it, or a folder of the Hugging Face cache, which is
 * models--ORG--NAME/{refs/main, snapshots/COMMIT/config.json, blobs/..}. What else is given is refused with what to
 * type.
 * ============================================================================================================ */

static const char config_json[] = "config.json";

static inline int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Returns the names in a directory that begin and end so, in order; an stb_ds array of strings that nobody frees. It is
 * empty where the directory cannot be read. */
static inline char **dir_list(const char *path, const char *head, const char *tail) {
    char **names = NULL;
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));)
        if (*e->d_name != '.' && starts_with(e->d_name, head) && ends_with(e->d_name, tail))
            arrput(names, xstrdup(e->d_name));
    if (d) closedir(d);
    if (names) qsort(names, arrlenu(names), sizeof *names, by_text);
    return names;
}

static inline bool path_exists(const char *path) { return !access(path, F_OK); }

/* Returns the name of a model of Hugging Face, ORG/NAME, by its folder in the cache, models--ORG--NAME. */
static inline const char *cache_model(const char *root) {
    const char *folder = strrchr(root, '/'), *name = folder ? folder + 1 : root;
    if (!starts_with(name, "models--")) return name;
    name += strlen("models--");
    const char *dashes = strstr(name, "--");
    return dashes ? fmt("%.*s/%s", (int)(dashes - name), name, dashes + 2) : name;
}

/* Returns the snapshot in a folder of the cache that refs/main names, or else its only one. */
static inline const char *cache_snapshot(const char *root) {
    char *commit = NULL, err[ERR_MAX], **names = dir_list(fmt("%s/snapshots", root), "", "");
    const char *found = NULL, *taken = NULL;
    size_t whole = 0;
    if (!read_file(fmt("%s/refs/main", root), &commit, err)) commit[strcspn(sb_cstr(&commit), " \r\n")] = 0;
    for (size_t i = 0; i < arrlenu(names); i++) {
        if (!path_exists(fmt("%s/snapshots/%s/%s", root, names[i], config_json))) continue;
        if (commit && !strcmp(names[i], commit)) taken = names[i];
        found = names[i];
        whole++;
    }
    if (!found)
        die("'%s' has no snapshot with a %s: complete it with: hf download %s", root, config_json, cache_model(root));
    if (!taken && whole > 1)
        die("'%s' has %zu snapshots, and refs/main names none of them: type %s/snapshots/%s or another", root, whole,
            root, found);
    err_message("'%s': taking the snapshot %s%s", root, taken ? taken : found, taken ? ", which refs/main names" : "");
    return xstrdup(fmt("%s/snapshots/%s", root, taken ? taken : found));
}

/* Dies with what to type in place of a path that is neither a file nor a directory. */
__attribute__((noreturn)) static inline void refuse_missing(const char *path) {
    const int why = errno;
    const char *slash = strchr(path, '/'), *home = getenv("HOME");
    const int org = slash ? (int)(slash - path) : 0;
    if (why == ENOENT && org && *path != '.' && *path != '~' && slash[1] && !strchr(slash + 1, '/') &&
        !path_exists(fmt("%.*s", org, path))) {
        const char *folder = fmt("%s/.cache/huggingface/hub/models--%.*s--%s", home ? home : "", org, path, slash + 1);
        if (path_exists(folder))
            die("'%s' is not a directory; the cache of Hugging Face has it: type %s", path, folder);
        die("'%s' is not a directory; download the model with: hf download %s --local-dir %s", path, path, slash + 1);
    }
    die("cannot open '%s': %s", path, strerror(why));
}

/* Dies with what to type in place of a directory without config.json. */
__attribute__((noreturn)) static inline void refuse_directory(const char *dir) {
    static const char *const hubs[] = {"", "/hub"};
    char **gguf = dir_list(dir, "", ".gguf"), **all = dir_list(dir, "", ""), **inside = NULL;
    for (size_t i = 0; i < COUNT(hubs); i++) {
        char **models = dir_list(fmt("%s%s", dir, hubs[i]), "models--", "");
        if (models)
            die("'%s' is the cache of Hugging Face: type %s%s/%s%s", dir, dir, hubs[i], models[0],
                arrlen(models) > 1 ? " or another" : "");
    }
    for (size_t i = 0; i < arrlenu(all); i++)
        if (path_exists(fmt("%s/%s/%s", dir, all[i], config_json))) arrput(inside, all[i]);
    const char *names = inside ? fmt("%s/%s", dir, inside[0]) : NULL;
    for (size_t i = 1; i < arrlenu(inside) && i < 8; i++) names = fmt("%s, %s/%s", names, dir, inside[i]);
    if (names)
        die("'%s' has no %s; %s: %s%s", dir, config_json, arrlen(inside) > 1 ? "type one of these" : "type", names,
            arrlen(inside) > 8 ? ", .." : "");
    if (gguf) die("'%s' has no %s; its GGUF files need no conversion: moe -m %s/%s", dir, config_json, dir, gguf[0]);
    die("'%s' has no %s", dir, config_json);
}

/* Returns the directory of the model that `path` is, is in or leads to. */
static inline const char *model_dir_find(const char *path) {
    static const char *const parts[] = {"snapshots", "blobs", "refs"};
    struct stat st;
    char copy[PATH_MAX];
    const char *dir = path;
    if (stat(path, &st)) refuse_missing(path);
    snprintf(copy, sizeof copy, "%s", path);
    if (S_ISREG(st.st_mode)) {
        if (is_gguf_file(path)) die("'%s' is a GGUF file already: moe -m %s", path, path);
        dir = xstrdup(dirname(copy));
    }
    if (!path_exists(fmt("%s/%s", dir, config_json))) {
        char *root = xstrdup(dir);
        while (strlen(root) > 1 && ends_with(root, "/")) root[strlen(root) - 1] = 0;
        const char *last = strrchr(root, '/') ? strrchr(root, '/') + 1 : root;
        for (size_t i = 0; i < COUNT(parts); i++)
            if (!strcmp(last, parts[i])) root = xstrdup(fmt("%s/..", root));
        if (!path_exists(fmt("%s/snapshots", root))) refuse_directory(dir);
        return cache_snapshot(ends_with(root, "/..") ? xstrdup(realpath(root, copy) ? copy : root) : root);
    }
    if (dir != path) err_message("'%s' is a file: reading the directory '%s'", path, dir);
    return dir;
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
static inline enum gguf_type float_type(const struct tensor *t) {
    switch (t->dtype) {
    case F32: return GGUF_F32;
    case F16: return GGUF_F16;
    case BF16: return GGUF_BF16;
    default: die("internal error: tensor '%s' holds no floats", t->name);
    }
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

/* qsort: by name, then by file. */
static inline int by_name_and_file(const void *a, const void *b) {
    const int order = by_name(a, b);
    const struct tensor *x = a, *y = b;
    return order ? order : (x->shard > y->shard) - (x->shard < y->shard);
}

/* Whether two tensors have the same type, shape and bytes. */
static inline bool same_tensor(const struct tensor *a, const struct tensor *b) {
    enum { BYTES = 1 << 20 /* compared at a time */ };
    bool same = a->dtype == b->dtype && a->rank == b->rank;
    for (uint32_t i = 0; same && i < a->rank; i++) same = a->shape[i] == b->shape[i];
    for (size_t at = 0; same && at < a->bytes; at += BYTES) {
        size_t n = a->bytes - at < BYTES ? a->bytes - at : BYTES;
        uint8_t *x = scratch(0, n), *y = scratch(1, n);
        tensor_read(a, at, x, n);
        tensor_read(b, at, y, n);
        same = !memcmp(x, y, n);
    }
    return same;
}

/* How many things of a kind were found, and the first of them, for one line about all. */
struct finding {
    size_t n;
    const char *first;
};

static inline void finding_add(struct finding *f, const char *what) {
    if (!f->n++) f->first = xstrdup(what);
}

static const char index_file[] = "model.safetensors.index.json", single_file[] = "model.safetensors";
static struct doc source_index;   /* of the files that were read; obj NULL: there is none */
static bool source_index_differs; /* it does not say where every tensor is */

/* Dies if files of a set, such as model-00002-of-00003.safetensors, are missing from a list. */
static inline void check_set(char *const *files) {
    for (size_t i = 0; i < arrlenu(files); i++) {
        const char *of = strstr(files[i], "-of-"), *number = of;
        const int n = of ? atoi(of + strlen("-of-")) : 0;
        while (number > files[i] && number[-1] >= '0' && number[-1] <= '9') number--;
        for (int k = 1; k <= n && n <= 9999 && number < of; k++) {
            const char *want = fmt("%.*s%0*d%s", (int)(number - files[i]), files[i], (int)(of - number), k, of);
            bool have = false;
            for (size_t j = 0; j < arrlenu(files); j++) have |= !strcmp(files[j], want);
            if (!have) die("'%s' is missing, of %d files: the download of '%s' is incomplete", want, n, model_dir);
        }
    }
}

/* Returns the safetensors files of a directory without an index. Mistral's own files are copies of the others with
 * other names of tensors. */
static inline char **files_without_index(void) {
    static const char *const others[][2] = {{"consolidated", "names of Mistral's own"},
                                            {"adapter_", "a LoRA adapter, which is not merged"},
                                            {"optimizer", "the state of a training"}};
    char **all = dir_list(model_dir, "", ".safetensors"), **files = NULL;
    for (size_t i = 0; i < arrlenu(all); i++) {
        size_t k = 0;
        while (k < COUNT(others) && !starts_with(all[i], others[k][0])) k++;
        if (k == COUNT(others)) arrput(files, all[i]);
        else err_message("'%s' is not read: %s", all[i], others[k][1]);
    }
    check_set(files);
    return files;
}

/* Dies because a directory has no safetensors file, with what to do. */
__attribute__((noreturn)) static inline void refuse_no_tensors(void) {
    static const char *const tails[] = {".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".gguf", ".incomplete"};
    for (size_t k = 0; k < COUNT(tails); k++) {
        char **names = dir_list(model_dir, "", tails[k]);
        if (!names) continue;
        if (!strcmp(tails[k], ".gguf"))
            die("'%s' has GGUF files and no safetensors file: moe -m %s/%s", model_dir, model_dir, names[0]);
        if (!strcmp(tails[k], ".incomplete")) die("'%s': the download of '%s' is incomplete", model_dir, names[0]);
        die("'%s' has %s and no safetensors file: save the model as safetensors first, as save_pretrained of "
            "transformers does",
            model_dir, names[0]);
    }
    die("'%s' has neither %s nor another safetensors file%s", model_dir, single_file,
        dir_list(model_dir, "", ".safetensors") ? " of a whole model with transformers' names" : "");
}

/* Whether the model runs without a tensor, by its name; NULL: without none. */
static bool (*may_lack)(const char *tensor);

/* Whether the model runs without all tensors that the index has in a file. */
static inline bool may_lack_file(struct doc map, const char *file) {
    const char *name;
    json_t *v;
    bool may = may_lack != NULL;
    json_object_foreach(map.obj, name, v) may = may && (strcmp(get_str(map, name, ""), file) || may_lack(name));
    return may;
}

/* Returns the files that the index names, each once; NULL, with a line, if none of them is there and others are: then
 * the index belongs to other files. Dies if only some are there. */
static inline char **files_of_index(struct doc map) {
    char **files = NULL;
    const char *name, *missing = NULL;
    size_t n_missing = 0;
    json_t *v, *seen = json_object();
    json_object_foreach(map.obj, name, v) {
        const char *f = get_str(map, name, NULL);
        expect(map, name, f && !strchr(f, '/') && !strstr(f, ".."), "a file name without a directory");
        if (json_object_get(seen, f)) continue;
        json_object_set_new(seen, f, json_true());
        if (!path_exists(in_dir(f)) && may_lack_file(map, f)) {
            err_message("'%s' is missing; it has only tensors for multi-token prediction", f);
            continue;
        }
        arrput(files, xstrdup(f));
        if (path_exists(in_dir(f))) continue;
        if (!n_missing++) missing = arrlast(files);
    }
    json_decref(seen);
    if (n_missing && n_missing == arrlenu(files) && dir_list(model_dir, "", ".safetensors")) {
        err_message("%s names '%s' and other files that '%s' does not have: it is not used", index_file, missing,
                    model_dir);
        arrfree(files);
        return NULL;
    }
    for (size_t i = 0; i < arrlenu(files) && n_missing; i++)
        if (path_exists(in_dir(files[i]))) close(input_open(in_dir(files[i]))); /* a Git LFS pointer explains more */
    if (n_missing)
        die("'%s'%s missing, of %zu files that %s names: the download of '%s' is incomplete", missing,
            n_missing > 1 ? fmt(" and %zu more are", n_missing - 1) : " is", arrlenu(files), index_file, model_dir);
    return files;
}

/* Reads the index. One that is broken is a note, and is not used. */
static inline struct doc index_read(void) {
    struct doc index = doc_read(index_file), map = get_obj(index, "weight_map");
    if (index.obj && !get(index, "weight_map")) err_message("%s has no weight_map: it is not used", index_file);
    return (struct doc){map.obj ? index.obj : NULL, index_file, NULL};
}

static const char unlisted_file[] = "mtp.safetensors";

/* Chooses the files of the source: model.safetensors, which transformers looks for first, those of the index, or all. A
 * MTP layer in mtp.safetensors is read in any case: quantized releases of GLM-4.7 have that file and do not list
 * it. */
static inline char **files_choose(void) {
    const bool single = path_exists(in_dir(single_file));
    char **files = NULL, **all = dir_list(model_dir, "", ".safetensors");
    struct finding unread = {0};
    source_index = index_read();
    const struct doc map = get_obj(source_index, "weight_map");
    bool named = !single;
    const char *name;
    json_t *v;
    json_object_foreach(map.obj, name, v) named |= json_is_string(v) && !strcmp(json_string_value(v), single_file);
    if (map.obj && named) files = files_of_index(map);
    else if (map.obj) err_message("%s names other files than '%s': it is not used", index_file, single_file);
    if (!files) source_index.obj = NULL;
    if (!files && single) arrput(files, xstrdup(single_file));
    if (!files) return files_without_index();
    for (size_t i = 0; i < arrlenu(all); i++) {
        bool have = false;
        for (size_t k = 0; k < arrlenu(files); k++) have |= !strcmp(files[k], all[i]);
        if (have) continue;
        if (!strcmp(all[i], unlisted_file)) arrput(files, all[i]);
        else finding_add(&unread, all[i]);
    }
    if (unread.n)
        err_message("'%s'%s not read: %s", unread.first,
                    unread.n > 1 ? fmt(" and %zu more safetensors files are", unread.n - 1) : " is",
                    source_index.obj ? "the index does not name it" : "'model.safetensors' is there");
    return files;
}

/* Takes tensors once that are in several files with the same bytes: from the file that the index names, or the
 * first. */
static inline void drop_copies(struct doc map) {
    struct finding copies = {0};
    size_t n = 0;
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        struct tensor t = tensors[i], *kept = n ? &tensors[n - 1] : NULL;
        if (!kept || strcmp(kept->name, t.name)) {
            tensors[n++] = t;
            continue;
        }
        if (!same_tensor(kept, &t)) die("%s: also in '%s', with another value", where(kept), shards[t.shard].name);
        finding_add(&copies, fmt("'%s' in '%s' and '%s'", t.name, shards[kept->shard].name, shards[t.shard].name));
        const char *file = get_str(map, t.name, NULL);
        if (file && !strcmp(file, shards[t.shard].name)) *kept = t;
    }
    arrsetlen(tensors, n);
    if (copies.n)
        err_message("%zu tensor%s twice with the same bytes: each is taken once (%s)", copies.n,
                    copies.n > 1 ? "s are there" : " is there", copies.first);
}

/* Says where the index and the files disagree. The files count. */
static inline void check_index(struct doc map) {
    struct finding elsewhere = {0}, unlisted = {0}, absent = {0};
    const char *name;
    json_t *v;
    for (size_t i = 0; i < arrlenu(tensors) && map.obj; i++) {
        const struct tensor *t = &tensors[i];
        const char *file = get_str(map, t->name, NULL), *in = shards[t->shard].name;
        if (!file && strcmp(in, unlisted_file)) finding_add(&unlisted, where(t));
        if (file && strcmp(file, in)) finding_add(&elsewhere, fmt("%s, not in '%s'", where(t), file));
    }
    json_object_foreach(map.obj, name, v) {
        if (!tensor_find(name)) finding_add(&absent, name);
    }
    const struct {
        struct finding f;
        const char *what;
    } lines[] = {{unlisted, "the index does not list it"},
                 {elsewhere, "the index names another file"},
                 {absent, "the index lists this tensor, but no file has it"}};
    for (size_t k = 0; k < COUNT(lines); k++) {
        const struct finding f = lines[k].f;
        if (f.n)
            err_message("%s: %s%s", f.first, lines[k].what, f.n > 1 ? fmt("; so it is with %zu more", f.n - 1) : "");
        source_index_differs |= f.n;
    }
}

/* Opens the files of the source. */
static inline void source_open(void) {
    char **files = files_choose();
    for (size_t i = 0; i < arrlenu(files); i++) shard_open(files[i]);
    if (!files) refuse_no_tensors();
    if (!arrlenu(tensors)) die("'%s': the safetensors files hold no tensor", model_dir);
    const struct doc map = get_obj(source_index, "weight_map");
    qsort(tensors, arrlenu(tensors), sizeof *tensors, by_name_and_file);
    drop_copies(map);
    check_index(map);
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

/* Reads one option. next: the argument after it; NULL: there is none. Returns whether it was taken as the value. */
static inline bool argument_read(struct settings *s, const char *a, const char *next) {
    char name[64], err[ERR_MAX], *typed = NULL;
    const char *value = argument_split(a, name);
    const struct option *o = option_by_argument(name);
    if (!o) {
        option_unknown(a, err);
        die_usage("%s", err);
    }
    if (o->type == OPT_FLAG && !value) value = "on";
    const bool taken = !value && next;
    if (taken) value = next;
    if (!value) die_usage("%s needs a value", a);
    sb_printf(&typed, taken ? "%s %s" : "%s", a, next);
    if (option_store(s, o, sb_cstr(&typed), value, err)) die_usage("%s", err);
    arrfree(typed);
    return taken;
}

/* Reads the command line. Appends what is not an option to *operands. */
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
