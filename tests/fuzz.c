/* The parsers on arbitrary bytes: model files, texts, templates, saved conversations, directories of Hugging Face,
 * scores, command lines.
 *
 * make fuzz builds a libFuzzer program that has many names: build/fuzz-NAME fuzzes the function of NAME in the table
 * fuzz_targets. With FUZZ_REPLAY the functions serve t_hostile.h. What must hold beyond "no crash" is said with
 * FUZZ_CHECK. Run at the top of the tree: some functions want files of the corpus. */
#ifndef FUZZ_REPLAY
#define MOE_NO_MAIN
#include "../moe.c"
#include <sys/prctl.h>
#define FUZZ_CHECK(cond, ...) \
    ((cond) ? (void)0 : (fprintf(stderr, "%s: ", #cond), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), abort()))
#else
#define FUZZ_CHECK(cond, ...) (void)CHECK(cond, __VA_ARGS__)
#endif
#include <sys/mman.h>

enum { FUZZ_CONTEXT = 8, FUZZ_MODEL = 4 << 20 /* bytes of a file that is run */ };

/* One line of text: what a file says comes out neutralized. */
static void fuzz_line(const char *line, size_t n) {
    FUZZ_CHECK(n > 0, "an empty line");
    FUZZ_CHECK(utf8_valid(line, n), "a line that is not UTF-8: %.*s", (int)n, line);
    for (size_t i = 0; i < n; i++)
        FUZZ_CHECK((uint8_t)line[i] >= 32 && line[i] != 127, "the control character %d in '%.*s'", line[i], (int)n,
                   line);
}

static void fuzz_message(const char *err) {
    FUZZ_CHECK(strlen(err) < ERR_MAX, "%zu bytes of message", strlen(err));
    fuzz_line(err, strlen(err));
}

/* Lines that `program` printed on stderr. */
static void fuzz_said(const char *said, size_t n, const char *program) {
    const size_t head = strlen(program);
    for (const char *p = said, *end; p < said + n; p = end + 1) {
        end = memchr(p, '\n', (size_t)(said + n - p));
        if (!end) end = said + n;
        const bool named = (size_t)(end - p) > head + 2 && !memcmp(p, program, head) && !memcmp(p + head, ": ", 2);
        FUZZ_CHECK(named, "%s said '%.*s'", program, (int)(end - p), p);
        if (named) fuzz_line(p + head + 2, (size_t)(end - p) - head - 2);
    }
}

/* Two tokens at once, then one. What a broken model computes means nothing; that it stays in its memory does. */
static void fuzz_forward(const struct model *m, const struct kernels *k, enum kv_type kv) {
    struct session s;
    char err[ERR_MAX] = "";
    session_open_cpu(&s, m, 1, 1, (struct cpu_options){k, 1, FUZZ_CONTEXT, kv, false, false, {0}});
    FUZZ_CHECK(session_sync(&s, (int32_t[]){0, m->n_vocab - 1}, 2, 0, err) == SYNC_DONE, "%s", err);
    session_decode(&s, argmax(session_logits(&s), m->n_vocab));
    FUZZ_CHECK(s.n_past == 3, "%d tokens", s.n_past);
    session_free(&s);
}

/* A model file in memory. Whether it was bound. */
static bool fuzz_bind(const uint8_t *data, size_t size, bool run) {
    struct model m;
    char err[ERR_MAX] = "";
    uint8_t *copy = xmalloc(size); /* of exactly this size, so that the sanitizer sees what lies after it */
    memcpy(copy, data, size);
    memset(&m, 0, sizeof m);
    bool ok = !gguf_parse(&m.gguf, copy, size, err, sizeof err) && !model_bind(&m, err);
    if (!ok) fuzz_message(err);
    if (ok && run && size <= FUZZ_MODEL)
        fuzz_forward(&m, size & 1 ? &kernels_ref : kernels_choose(), (enum kv_type)(size % 3));
    if (ok) model_free(&m);
    FUZZ_CHECK(!m.gguf.kv && !m.layers, "a refused file leaves something");
    free(copy);
    return ok;
}

static void fuzz_gguf(const uint8_t *data, size_t size) { fuzz_bind(data, size, true); }

/* ---- tokenizer ---- */

/* A vocabulary file of SentencePiece, with a few pieces and a special token of each kind; *n bytes, malloc'ed. */
static uint8_t *fuzz_pieces(size_t *n) {
    static const struct {
        const char *text;
        int type;
        float score;
    } more[] = {{"<|user|>", TOKEN_CONTROL, 0},   {"<think>", TOKEN_USER_DEFINED, 0},
                {"plain", TOKEN_USER_DEFINED, 0}, {SPM_BLANK "t", TOKEN_NORMAL, -1},
                {"he", TOKEN_NORMAL, -2},         {SPM_BLANK "the", TOKEN_NORMAL, -2},
                {"t", TOKEN_NORMAL, -9},          {"h", TOKEN_NORMAL, -9},
                {SPM_BLANK, TOKEN_NORMAL, -9},    {SPM_BLANK SPM_BLANK, TOKEN_NORMAL, -9}};
    enum { MORE = sizeof more / sizeof *more };
    struct gguf_writer w = {0};
    int32_t type[256 + MORE];
    float score[256 + MORE] = {0};
    char text[8];
    gguf_put_str(&w, "tokenizer.ggml.model", "llama", 5);
    gguf_put_bool(&w, "tokenizer.ggml.add_space_prefix", false);
    gguf_put_array(&w, "tokenizer.ggml.tokens", GGUF_V_STR, 256 + MORE, NULL);
    for (int b = 0; b < 256; b++) {
        gguf_put_bytes(&w, text, (size_t)snprintf(text, sizeof text, "<0x%02X>", (unsigned)b));
        type[b] = TOKEN_BYTE;
    }
    for (int i = 0; i < MORE; i++) {
        gguf_put_bytes(&w, more[i].text, strlen(more[i].text));
        type[256 + i] = more[i].type;
        score[256 + i] = more[i].score;
    }
    gguf_put_array(&w, "tokenizer.ggml.token_type", GGUF_V_I32, 256 + MORE, type);
    gguf_put_array(&w, "tokenizer.ggml.scores", GGUF_V_F32, 256 + MORE, score);
    uint8_t *h = gguf_header(&w, n);
    gguf_writer_free(&w);
    return h;
}

/* A vocabulary file of all bytes, a few merges and a special token of each kind; *n bytes, malloc'ed. */
static uint8_t *fuzz_vocabulary(const char *pre, size_t *n) {
    static const char *const more[] = {"th", "the", "ab", "abc", "<|user|>", "<think>", "plain"};
    static const char *const merges[] = {"t h", "th e", "a b", "ab c"};
    struct gguf_writer w = {0};
    int32_t type[256 + 7];
    char text[2];
    gguf_put_str(&w, "tokenizer.ggml.model", "gpt2", 4);
    gguf_put_str(&w, "tokenizer.ggml.pre", pre, strcspn(pre, " "));
    gguf_put_array(&w, "tokenizer.ggml.tokens", GGUF_V_STR, 256 + 7, NULL);
    for (int cp = 0; cp < 256 + 68; cp++) {
        if (alphabet_byte(cp) < 0) continue;
        size_t k = cp < 0x80 ? 1 : 2;
        text[0] = (char)(k == 1 ? cp : 0xc0 | cp >> 6), text[1] = (char)(0x80 | (cp & 63));
        gguf_put_bytes(&w, text, k);
    }
    for (int i = 0; i < 7; i++) gguf_put_bytes(&w, more[i], strlen(more[i]));
    for (int i = 0; i < 256 + 7; i++) type[i] = i == 260 ? TOKEN_CONTROL : i > 260 ? TOKEN_USER_DEFINED : TOKEN_NORMAL;
    gguf_put_array(&w, "tokenizer.ggml.token_type", GGUF_V_I32, 256 + 7, type);
    gguf_put_array(&w, "tokenizer.ggml.merges", GGUF_V_STR, 4, NULL);
    for (int i = 0; i < 4; i++) gguf_put_bytes(&w, merges[i], strlen(merges[i]));
    uint8_t *h = gguf_header(&w, n);
    gguf_writer_free(&w);
    return h;
}

/* text through v and back. `whole`: v has a token for every byte, so nothing may be lost. */
static void fuzz_text(const struct vocab *v, const char *text, size_t n, unsigned flags, bool whole) {
    int32_t *ids = NULL;
    char *bytes = NULL, *back = NULL;
    uint8_t *origin = xmalloc(n + 1);
    struct detok d = {0};
    memset(origin, ORIGIN_DATA, n + 1);
    tokenize(v, text, n, flags & 4 ? origin : NULL, flags & 3, &ids);
    for (size_t i = 0; i < arrlenu(ids); i++) {
        if (ids[i] < 0 || ids[i] >= v->n_tokens) FUZZ_CHECK(false, "id %d of %d tokens", ids[i], v->n_tokens);
        if (flags & 4 && vocab_type(v, ids[i]) == TOKEN_CONTROL)
            FUZZ_CHECK(false, "data became the control token %d", ids[i]);
        sb_put(&bytes, vocab_bytes(v, ids[i]).p, vocab_bytes(v, ids[i]).n);
        detok_put(v, &d, ids[i], &back);
    }
    detok_end(&d, &back);
    FUZZ_CHECK(utf8_valid(back, arrlenu(back)), "text that is not UTF-8");
    if (whole && (!v->nfc || is_trivially_nfc(text, n)) && !(v->spm && memmem(text, n, SPM_BLANK, 3))) {
        FUZZ_CHECK(arrlenu(bytes) == n && (!n || !memcmp(bytes, text, n)), "%zu bytes became %zu others", n,
                   arrlenu(bytes));
        if (utf8_valid(text, n))
            FUZZ_CHECK(arrlenu(back) == n && (!n || !memcmp(back, text, n)), "%zu bytes became %zu others as text", n,
                       arrlenu(back));
    }
    free(origin);
    arrfree(ids), arrfree(bytes), arrfree(back);
}

/* A vocabulary file and a text, each one half; or the number of a pre-tokenizer or of SentencePiece, flags, and a
 * text. */
static void fuzz_tokenizer(const uint8_t *data, size_t size) {
    static struct vocab fixed[N_PRE_TOKENIZERS + 1]; /* made at first use, for compiling the expressions is slow */
    struct gguf g;
    struct vocab v;
    char err[ERR_MAX] = "";
    size_t n = size / 2;
    if (size < 2) return;
    if (size < 8 || memcmp(data, "GGUF", 4)) {
        int i = data[0] % (N_PRE_TOKENIZERS + 1);
        if (!fixed[i].n_tokens) { /* the file stays, the vocabulary points into it */
            uint8_t *file = i < N_PRE_TOKENIZERS ? fuzz_vocabulary(pre_tokenizers[i].names, &n) : fuzz_pieces(&n);
            FUZZ_CHECK(!gguf_parse(&g, file, n, err, sizeof err) && !vocab_load(&fixed[i], &g, err), "%s", err);
            gguf_close(&g);
        }
        fuzz_text(&fixed[i], (const char *)data + 2, size - 2, data[1], true);
        return;
    }
    uint8_t *file = xmalloc(n);
    memcpy(file, data, n);
    bool parsed = !gguf_parse(&g, file, n, err, sizeof err), loaded = parsed && !vocab_load(&v, &g, err);
    if (loaded) {
        fuzz_text(&v, (const char *)data + n, size - n, data[size - 1], false);
        vocab_free(&v);
    } else {
        fuzz_message(err);
    }
    if (parsed) gguf_close(&g);
    free(file);
}

/* ---- template ---- */

/* A line of JSON variables, then the template. */
static void fuzz_template(const uint8_t *data, size_t size) {
    const uint8_t *end = size ? memchr(data, '\n', size) : NULL;
    size_t head = end ? (size_t)(end - data) : 0, n = end ? size - head - 1 : size;
    char err[ERR_MAX] = "", *source = xmalloc(n);
    memcpy(source, data + size - n, n);
    json_t *vars = json_loadb((const char *)data, head, JSON_REJECT_DUPLICATES, NULL);
    struct template *t = template_parse(source, n, err);
    free(source); /* the template owns what it needs */
    if (t) {
        struct tpl_text out = {0};
        int rc = template_render(t, vars, &out, err);
        FUZZ_CHECK(arrlenu(out.s) == arrlenu(out.origin), "%zu bytes, %zu origins", arrlenu(out.s),
                   arrlenu(out.origin));
        if (rc == -1) fuzz_message(err); /* -2: the words are the template's own */
        text_free(&out);
    } else {
        fuzz_message(err);
    }
    template_free(t);
    json_decref(vars);
}

/* ---- session ---- */

/* Gives a saved state the checksum that its bytes have, so that changed ones get past it. n_tensor: cache tensors that the model
 * has. */
static void fuzz_checksum(uint8_t *data, size_t size, size_t n_tensor) {
    struct kv_header h;
    const size_t cache = n_tensor * sizeof(struct kv_tensor);
    if (size < sizeof h + cache) return;
    memcpy(&h, data, sizeof h);
    size_t ids = h.n_tokens * sizeof(int32_t), at = sizeof h + cache;
    if (ids > size - at) ids = size - at;
    h.checksum = checksum_add(HASH_START, data + sizeof h, cache);
    h.checksum = checksum_add(h.checksum, data + at, ids);
    h.checksum = checksum_add(h.checksum, data + at + ids, size - at - ids);
    memcpy(data, &h, sizeof h);
}

/* A saved state for valid-qwen3moe.gguf (whose hash counts as 0), or a saved conversation. */
static void fuzz_session(const uint8_t *data, size_t size) {
    static struct model m;
    char err[ERR_MAX] = "", path[64];
    struct message *messages = NULL;
    if (size < 8 || memcmp(data, kv_magic, 8)) {
        int rc = chat_parse((const char *)data, size, &messages, err);
        if (rc) fuzz_message(err);
        FUZZ_CHECK(!rc || !arrlen(messages), "%td messages of a refused file", arrlen(messages));
        for (; arrlen(messages); (void)arrpop(messages)) message_free(&arrlast(messages));
        arrfree(messages);
        return;
    }
    if (!m.n_embd && model_load(&m, "tests/corpus/gguf/valid-qwen3moe.gguf", err)) {
        FUZZ_CHECK(false, "%s", err);
        return;
    }
    m.hash = 0;
    struct session s;
    session_open_cpu(&s, &m, 1, 1, (struct cpu_options){&kernels_ref, 1, FUZZ_CONTEXT, KV_F32, false, false, {0}});
    int fd = memfd_create("state", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    uint8_t *copy = xmalloc(size);
    memcpy(copy, data, size);
    fuzz_checksum(copy, size, 2);
    FUZZ_CHECK(fd >= 0 && write(fd, copy, size) == (ssize_t)size, "cannot make a file in memory");
    free(copy);
    if (session_load(&s, path, err)) {
        fuzz_message(err);
        FUZZ_CHECK(!s.n_past, "%d tokens of a refused state", s.n_past);
    } else if (s.n_past < FUZZ_CONTEXT) {
        session_decode(&s, 1);
    }
    close(fd);
    session_free(&s);
}

/* ---- the converters, on files ---- */

enum { FUZZ_DATA = 1 << 20 /* bytes of a safetensors file behind its header */ };

/* Removes what is in a directory. The number of its entries. */
static int fuzz_clear(const char *dir) {
    char path[512];
    int n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (unlink(path)) fuzz_clear(path), rmdir(path);
        n++;
    }
    if (d) closedir(d);
    return n;
}

static char fuzz_base[64]; /* the directory of fuzz_dir */

static void fuzz_dir_remove(void) {
    fuzz_clear(fuzz_base);
    rmdir(fuzz_base);
}

/* A directory for files: "in" is for what a converter reads, "to" for what it writes. */
static const char *fuzz_dir(const char *sub) {
    static char path[80];
    if (!*fuzz_base) {
#ifdef FUZZ_REPLAY
        snprintf(fuzz_base, sizeof fuzz_base, "%s/fuzz", test_dir());
#else
        snprintf(fuzz_base, sizeof fuzz_base, "/dev/shm/moe-fuzz.%d", (int)getpid());
#endif
        atexit(fuzz_dir_remove);
        for (int i = 0; i < 3; i++) {
            snprintf(path, sizeof path, "%s%s", fuzz_base, (const char *[]){"", "/in", "/to"}[i]);
            FUZZ_CHECK(!mkdir(path, 0700), "cannot make %s", path);
        }
    }
    snprintf(path, sizeof path, "%s/%s", fuzz_base, sub);
    return path;
}

static void fuzz_write(const char *name, const void *p, size_t n) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", fuzz_dir("in"), name);
    FILE *f = fopen(path, "wb");
    if (!f || (n && fwrite(p, 1, n, f) != n) || fclose(f))
        FUZZ_CHECK(false, "cannot write %s: %s", path, strerror(errno));
}

/* Runs a converter: the exit code. *out becomes what it printed, *said what it printed on stderr. */
#ifdef FUZZ_REPLAY
static int fuzz_program(const char *command, char **out, char **said) {
    const char *bin = !strncmp(command, "moe-reap ", 9) ? REAP_BIN : CONVERT_BIN;
    char line[1024];
    snprintf(line, sizeof line, "timeout 20 %s %s", bin, strchr(command, ' ') + 1);
    return run_command(line, out, said);
}
#else
/* The main functions of convert/. They end the program, and leave their variables as they are: a child runs them. */
int convert_main(int argc, char **argv);
int reap_main(int argc, char **argv);

/* libFuzzer's counters of the edges that were taken: their begin and end. A declaration of these symbols in C would take
 * their names from the compiler. The child copies its counters to memory that the parent reads. */
__asm__(".pushsection .data\n.balign 8\nfuzz_edges: .quad __start___sancov_cntrs, __stop___sancov_cntrs\n.popsection");
extern uint8_t *fuzz_edges[2];
struct fuzz_shared {
    bool ended; /* by exit: no sanitizer stopped it */
    uint8_t counters[];
};
static struct fuzz_shared *fuzz_shared;

/* Ends the child after all that the converter does at exit, and before what libFuzzer does. */
static void fuzz_child_end(int code, void *arg) {
    (void)arg;
    memcpy(fuzz_shared->counters, fuzz_edges[0], (size_t)(fuzz_edges[1] - fuzz_edges[0]));
    fuzz_shared->ended = true;
    _exit(code);
}

static int fuzz_program(const char *command, char **out, char **said) {
    static int fd[2];
    const size_t n_counters = (size_t)(fuzz_edges[1] - fuzz_edges[0]);
    char line[1024], *argv[16], err[ERR_MAX];
    int argc = 0, status = 0;
    if (!fuzz_shared) {
        for (int i = 0; i < 2; i++) fd[i] = memfd_create("stream", MFD_CLOEXEC);
        fuzz_shared =
            mmap(NULL, sizeof *fuzz_shared + n_counters, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        FUZZ_CHECK(fd[0] >= 0 && fd[1] >= 0 && fuzz_shared != MAP_FAILED, "%s", strerror(errno));
    }
    snprintf(line, sizeof line, "%s", command);
    for (char *s = strtok(line, " "); s && argc < 15; s = strtok(NULL, " ")) argv[argc++] = s;
    argv[argc] = NULL;
    for (int i = 0; i < 2; i++) FUZZ_CHECK(!ftruncate(fd[i], 0) && !lseek(fd[i], 0, SEEK_SET), "%s", strerror(errno));
    fuzz_shared->ended = false;
    const pid_t pid = fork();
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 0; i < 2; i++) dup2(fd[i], i + 1);
        on_exit(fuzz_child_end, NULL);
        exit(strcmp(argv[0], "moe-reap") ? convert_main(argc, argv) : reap_main(argc, argv));
    }
    FUZZ_CHECK(pid > 0 && TEMP_FAILURE_RETRY(waitpid(pid, &status, 0)) == pid, "%s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd[i]);
        FUZZ_CHECK(!read_file(path, i ? said : out, err), "%s", err);
    }
    FUZZ_CHECK(fuzz_shared->ended, "%s ended by the status %d: %s", command, status, sb_cstr(said));
    memcpy(fuzz_edges[0], fuzz_shared->counters, n_counters);
    return WEXITSTATUS(status);
}
#endif

static int fuzz_taken; /* runs of converters that succeeded */

/* Runs a converter on the files in "in". It either succeeds and writes to "to", or says why not on one line at the end
 * and leaves nothing there. */
static void fuzz_convert(const char *command) {
    char *out = NULL, *said = NULL, program[16], path[128], err[ERR_MAX];
    snprintf(program, sizeof program, "%.*s", (int)strcspn(command, " "), command);
    const int code = fuzz_program(command, &out, &said);
    FUZZ_CHECK(code == 0 || code == 1, "`%s` gave %d: %s", command, code, sb_cstr(&said));
    FUZZ_CHECK(!code || (!arrlenu(out) && arrlenu(said)), "`%s` printed %zu bytes and said %zu", command, arrlenu(out),
               arrlenu(said));
    fuzz_said(said, arrlenu(said), program);
    snprintf(path, sizeof path, "%s/out.gguf", fuzz_dir("to"));
    if (!code && !access(path, F_OK)) { /* moe takes what was written */
        arrsetlen(out, 0);
        FUZZ_CHECK(!read_file(path, &out, err), "%s", err);
        FUZZ_CHECK(fuzz_bind((const uint8_t *)out, arrlenu(out), true), "`%s` wrote a file that is refused", command);
    }
    const int n = fuzz_clear(fuzz_dir("to"));
    FUZZ_CHECK(n == (code || strstr(command, "--dry-run") ? 0 : 1), "`%s` gave %d and left %d files", command, code, n);
    arrfree(out), arrfree(said);
    fuzz_taken += !code;
}

/* Writes a safetensors file of this header, with as many bytes of data as it says. */
static void fuzz_write_safetensors(const char *name, const char *header, size_t n) {
    json_t *j = json_loadb(header, n, 0, NULL), *tensor;
    json_int_t end = 0;
    const char *key;
    char *file = NULL;
    json_object_foreach(j, key, tensor) {
        const json_int_t to = json_integer_value(json_array_get(json_object_get(tensor, "data_offsets"), 1));
        if (to > end && to <= FUZZ_DATA) end = to;
    }
    json_decref(j);
    sb_put(&file, (const char *)&(uint64_t){n}, 8);
    sb_put(&file, header, n);
    if (end) memset(arraddnptr(file, (size_t)end), 0x3c, (size_t)end); /* a usual number in each format */
    fuzz_write(name, file, arrlenu(file));
    arrfree(file);
}

/* Writes the files of a text to "in": after each line "=== NAME" is one, up to the line feed before the next. */
static void fuzz_write_files(const char *text, size_t n) {
    const char *end = text + n, *p = n ? memmem(text, n, "=== ", 4) : NULL;
    while (p) {
        char name[64];
        const char *begin = memchr(p, '\n', (size_t)(end - p)), *next;
        if (!begin) return;
        const size_t length = (size_t)(begin++ - p) - 4;
        next = memmem(begin, (size_t)(end - begin), "\n=== ", 5);
        const size_t size = (size_t)((next ? next : end) - begin);
        snprintf(name, sizeof name, "%.*s", (int)length, p + 4);
        p = next ? next + 1 : NULL;
        if (length != strlen(name) || !isalpha((uint8_t)*name) ||
            name[strspn(name, "abcdefghijklmnopqrstuvwxyz_-.0123456789")])
            continue;
        if (strstr(name, ".safetensors") && !strstr(name, ".json")) fuzz_write_safetensors(name, begin, size);
        else fuzz_write(name, begin, size);
    }
}

/* A line that chooses the command, and the files of a directory. */
static void fuzz_hf(const uint8_t *data, size_t size) {
    static const struct {
        const char *line, *command;
    } t[] = {{"reap\n", "moe-reap %s -o %s/out --keep 1 --criterion random"},
             {"dry\n", "moe-convert %s --dry-run"},
             {"quantize\n", "moe-convert %s -o %s/out.gguf --quantize nvfp4 --dense --backbone q8_0"},
             {"", "moe-convert %s -o %s/out.gguf"}};
    char command[256], in[80];
    size_t i = 0;
    while (*t[i].line && (size < strlen(t[i].line) || memcmp(data, t[i].line, strlen(t[i].line)))) i++;
    fuzz_write_files((const char *)data, size);
    snprintf(in, sizeof in, "%s", fuzz_dir("in"));
    snprintf(command, sizeof command, t[i].command, in, fuzz_dir("to"));
    fuzz_convert(command);
    fuzz_clear(in);
}

/* A safetensors file, beside the other files of a seed of the directories. */
static void fuzz_safetensors(const uint8_t *data, size_t size) {
    char command[256], in[80], err[ERR_MAX], *seed = NULL;
    FUZZ_CHECK(!read_file("tests/corpus/hf/qwen3_moe.txt", &seed, err), "%s", err);
    fuzz_write_files(seed, arrlenu(seed));
    arrfree(seed);
    fuzz_write("model.safetensors", data, size);
    snprintf(in, sizeof in, "%s", fuzz_dir("in"));
    snprintf(command, sizeof command, "moe-convert %s -o %s/out.gguf", in, fuzz_dir("to"));
    fuzz_convert(command);
    fuzz_clear(in);
}

/* ---- scores ---- */

/* Scores of a model of the corpus as `moe --calibrate` reads them. The caller closes it. */
static int fuzz_scores_load(struct calibration *c, struct engine *e, const char *path, char *err) {
    const struct model *m = &e->model;
    *c = (struct calibration){.e = e, .n_stats = (size_t)model_blocks(m) * (size_t)m->n_expert_max * STATS};
    snprintf(c->routers, sizeof c->routers, "%016llx", (unsigned long long)routers_hash(m));
    c->before = xcalloc(c->n_stats, sizeof *c->before);
    c->stats = xcalloc(c->n_stats, sizeof *c->stats);
    return scores_load(c, path, err);
}

/* A score file: what `moe --calibrate` takes it writes and reads again with the same values, and moe-reap prunes by it
 * or refuses it. */
static void fuzz_scores(const uint8_t *data, size_t size) {
    static struct engine e;
    static const char model[] = "tests/corpus/gguf/valid-qwen3moe.gguf";
    char path[128], command[256], err[ERR_MAX];
    struct calibration a, b;
    if (!e.model.n_embd && model_load(&e.model, model, err)) {
        FUZZ_CHECK(false, "%s", err);
        return;
    }
    fuzz_write("scores.json", data, size);
    snprintf(path, sizeof path, "%s/scores.json", fuzz_dir("in"));
    if (fuzz_scores_load(&a, &e, path, err)) {
        fuzz_message(err);
    } else {
        memcpy(a.stats, a.before, a.n_stats * sizeof *a.stats);
        json_t *j = calibration_json(&a);
        char *text = json_dumps(j, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
        json_decref(j);
        fuzz_write("again.json", text, strlen(text));
        free(text);
        snprintf(path, sizeof path, "%s/again.json", fuzz_dir("in"));
        const int rc = fuzz_scores_load(&b, &e, path, err);
        FUZZ_CHECK(!rc, "what was written is refused: %s", err);
        FUZZ_CHECK(!memcmp(a.before, b.before, a.n_stats * sizeof *a.before), "other sums");
        FUZZ_CHECK(a.tokens == b.tokens && arrlen(a.sources) == arrlen(b.sources), "%lld tokens became %lld",
                   (long long)a.tokens, (long long)b.tokens);
        for (size_t i = 0; i < arrlenu(a.sources) && i < arrlenu(b.sources); i++) {
            const struct corpus *x = &a.sources[i], *y = &b.sources[i];
            FUZZ_CHECK(!strcmp(x->name, y->name) && x->hash == y->hash && x->tokens == y->tokens &&
                           x->unit == y->unit && x->window == y->window && x->done == y->done,
                       "source %zu, '%s', became another", i, x->name);
        }
        calibration_close(&b);
    }
    calibration_close(&a);
    snprintf(path, sizeof path, "%s", fuzz_dir("in"));
    snprintf(command, sizeof command, "moe-reap %s %s/scores.json -o %s/out.gguf --keep 1", model, path,
             fuzz_dir("to"));
    fuzz_convert(command);
    fuzz_clear(path);
}

/* ---- options ---- */

/* Numbers are in range or as they were, choices have names. */
static void fuzz_settings(const struct settings *s, const struct settings *unset) {
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (!o->name) continue;
        const void *at = option_value(s, o), *was = option_value(unset, o);
        int n = 0;
        if (o->type == OPT_INT || o->type == OPT_CHOICE) n = *(const int *)at;
        if (o->type == OPT_INT)
            FUZZ_CHECK((n >= o->lo && n <= o->hi) || n == *(const int *)was, "--%s is %d", o->name, n);
        if (o->type == OPT_NUM)
            FUZZ_CHECK((*(const double *)at >= o->lo && *(const double *)at <= o->hi) ||
                           !memcmp(at, was, sizeof(double)),
                       "--%s is %g", o->name, *(const double *)at);
        for (int k = 0; o->type == OPT_CHOICE && k < n; k++) FUZZ_CHECK(o->choices[k], "--%s is choice %d", o->name, n);
    }
}

/* What /set prints of an option that was set is what it takes. */
static void fuzz_print(struct settings *s, const struct settings *unset, const struct option *o) {
    char *text[2] = {NULL, NULL}, err[ERR_MAX] = "";
    if (o->type == OPT_FILES || option_same(s, unset, o)) return;
    for (int i = 0; i < 2; i++) {
        option_text(s, o, &text[i]);
        if (!i) FUZZ_CHECK(!option_set(s, o->name, sb_cstr(&text[0]), err), "%s", err);
    }
    FUZZ_CHECK(!strcmp(text[0], sb_cstr(&text[1])), "--%s: '%s' became '%s'", o->name, text[0], text[1]);
    arrfree(text[0]), arrfree(text[1]);
}

/* Arguments with a NUL after each: a command line; or, after "/set", names and values of options in a chat. */
static void fuzz_options(const uint8_t *data, size_t size) {
    struct settings s, unset;
    char err[ERR_MAX] = "", **argv = NULL, *text = NULL, *said = NULL;
    size_t n_said = 0;
    sb_put(&text, (const char *)data, size);
    (void)sb_cstr(&text);
    arrput(argv, (char *)(uintptr_t) "moe");
    for (size_t at = 0; at < size; at += strlen(text + at) + 1) arrput(argv, text + at);
    const int argc = (int)arrlen(argv);
    arrput(argv, NULL);
    settings_init(&s), settings_init(&unset);
    if (argc > 1 && !strcmp(argv[1], "/set")) {
        for (int i = 2; i + 1 < argc; i += 2)
            if (option_set(&s, argv[i], argv[i + 1], err)) fuzz_message(err);
        for (int i = 0; i < N_OPTIONS; i++)
            if (options[i].name && options[i].in_chat) fuzz_print(&s, &unset, &options[i]);
    } else {
        FILE *was = stderr;
        stderr = open_memstream(&said, &n_said);
        const int rc = options_parse(&s, argc, argv, err);
        fclose(stderr);
        stderr = was;
        if (rc) fuzz_message(err);
        fuzz_said(said, n_said, PROGRAM);
    }
    fuzz_settings(&s, &unset);
    settings_free(&s);
    free(said);
    arrfree(argv), arrfree(text);
}

static const struct {
    const char *name; /* of the program after "fuzz-", and of the seeds' directory in tests/corpus */
    void (*fn)(const uint8_t *data, size_t size);
} fuzz_targets[] = {{"gguf", fuzz_gguf},       {"tokenizer", fuzz_tokenizer},     {"template", fuzz_template},
                    {"session", fuzz_session}, {"safetensors", fuzz_safetensors}, {"hf", fuzz_hf},
                    {"scores", fuzz_scores},   {"options", fuzz_options}};

#ifndef FUZZ_REPLAY
static void (*fuzz_target)(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *name = strstr((*argv)[0], "fuzz-");
    (void)argc;
    for (const char *p = name; p; p = strstr(p + 1, "fuzz-")) name = p; /* the last */
    for (size_t i = 0; i < sizeof fuzz_targets / sizeof *fuzz_targets; i++)
        if (name && !strcmp(fuzz_targets[i].name, name + 5)) fuzz_target = fuzz_targets[i].fn;
    FUZZ_CHECK(fuzz_target, "%s: the program must be called fuzz-NAME", (*argv)[0]);
    setenv("OMP_NUM_THREADS", "1", 0);
    setlocale(LC_CTYPE, "C.UTF-8");
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_target(data, size);
    return 0;
}
#endif
