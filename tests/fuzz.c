/* The parsers on arbitrary bytes: GGUF and model, tokenizer, chat template, saved conversations and states.
 *
 * make fuzz builds one libFuzzer program from each fuzz_* function; with FUZZ_REPLAY the functions serve t_hostile.h.
 * What must hold beyond "no crash" is said with FUZZ_CHECK. Run at the top of the tree: the session wants a model of the
 * corpus. */
#ifndef FUZZ_REPLAY
#define MOE_NO_MAIN
#include "../moe.c"
#define FUZZ_CHECK(cond, ...) \
    ((cond) ? (void)0 : (fprintf(stderr, "%s: ", #cond), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), abort()))
#else
#define FUZZ_CHECK(cond, ...) (void)CHECK(cond, __VA_ARGS__)
#endif
#include <sys/mman.h>

enum { FUZZ_CONTEXT = 8, FUZZ_MODEL = 1 << 20 /* bytes of a file that is run */ };

/* Messages are one line of text: what a file says comes out neutralized. */
static void fuzz_message(const char *err) {
    size_t n = strlen(err);
    FUZZ_CHECK(n > 0 && n < ERR_MAX, "%zu bytes of message", n);
    FUZZ_CHECK(utf8_valid(err, n), "a message that is not UTF-8: %s", err);
    for (size_t i = 0; i < n; i++)
        FUZZ_CHECK((uint8_t)err[i] >= 32 && err[i] != 127, "the control character %d in '%s'", err[i], err);
}

/* Two tokens at once, then one. What a broken model computes means nothing; that it stays in its memory does. */
static void fuzz_forward(const struct model *m, const struct kernels *k, enum kv_type kv) {
    struct session s;
    char err[ERR_MAX] = "";
    session_open_cpu(&s, m, 1, 1, (struct cpu_options){k, 1, FUZZ_CONTEXT, kv, false, false});
    FUZZ_CHECK(session_sync(&s, (int32_t[]){0, m->n_vocab - 1}, 2, 0, err) == SYNC_DONE, "%s", err);
    session_decode(&s, argmax(session_logits(&s), m->n_vocab));
    FUZZ_CHECK(s.n_past == 3, "%d tokens", s.n_past);
    session_free(&s);
}

/* A model file in memory. Whether it was bound. */
static bool fuzz_bind(const uint8_t *data, size_t size, bool run) {
    struct model m;
    char err[ERR_MAX] = "";
    uint8_t *copy = xmalloc(size); /* of exactly this size, so that the sanitizer sees what lies behind it */
    memcpy(copy, data, size);
    memset(&m, 0, sizeof m);
    bool ok = !gguf_parse(&m.gguf, copy, size, err, sizeof err) && !model_bind(&m, err);
    if (!ok) fuzz_message(err);
    if (ok && run && size <= FUZZ_MODEL)
        fuzz_forward(&m, size & 1 ? &kernels_ref : kernels_choose(), (enum kv_type)(size % 3));
    if (ok) model_free(&m);
    FUZZ_CHECK(!m.gguf.kv && !m.layers, "a refused file leaves something behind");
    free(copy);
    return ok;
}

static void fuzz_gguf(const uint8_t *data, size_t size) { fuzz_bind(data, size, true); }

/* ---- tokenizer ---- */

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
    if (whole && (!v->nfc || is_trivially_nfc(text, n))) {
        FUZZ_CHECK(arrlenu(bytes) == n && (!n || !memcmp(bytes, text, n)), "%zu bytes became %zu others", n,
                   arrlenu(bytes));
        if (utf8_valid(text, n))
            FUZZ_CHECK(arrlenu(back) == n && (!n || !memcmp(back, text, n)), "%zu bytes became %zu others as text", n,
                       arrlenu(back));
    }
    free(origin);
    arrfree(ids), arrfree(bytes), arrfree(back);
}

/* A vocabulary file and a text, each one half; or the number of a pre-tokenizer, flags, and a text. */
static void fuzz_tokenize(const uint8_t *data, size_t size) {
    static struct vocab fixed[N_PRE_TOKENIZERS]; /* made at first use, for compiling the expressions is slow */
    struct gguf g;
    struct vocab v;
    char err[ERR_MAX] = "";
    size_t n = size / 2;
    if (size < 2) return;
    if (size < 8 || memcmp(data, "GGUF", 4)) {
        int i = data[0] % N_PRE_TOKENIZERS;
        if (!fixed[i].n_tokens) {
            uint8_t *file = fuzz_vocabulary(pre_tokenizers[i].names, &n); /* stays, the vocabulary points into it */
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
        struct text out = {0};
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

/* A saved state for valid-qwen3moe.gguf (whose hash counts as 0), or a saved conversation. */
static void fuzz_session(const uint8_t *data, size_t size) {
    static struct model m;
    char err[ERR_MAX] = "", path[64];
    struct message *messages = NULL;
    if (size < 8 || memcmp(data, kv_magic, 8)) {
        int rc = chat_parse((const char *)data, size, &messages, err);
        if (rc) fuzz_message(err);
        FUZZ_CHECK(!rc || !arrlen(messages), "%td messages of a refused file", arrlen(messages));
        for (; arrlen(messages); (void)arrpop(messages)) free(arrlast(messages).role), free(arrlast(messages).content);
        arrfree(messages);
        return;
    }
    if (!m.n_embd && model_load(&m, "tests/corpus/gguf/valid-qwen3moe.gguf", err)) {
        FUZZ_CHECK(false, "%s", err);
        return;
    }
    m.hash = 0;
    struct session s;
    session_open_cpu(&s, &m, 1, 1, (struct cpu_options){&kernels_ref, 1, FUZZ_CONTEXT, KV_F32, false, false});
    int fd = memfd_create("state", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    FUZZ_CHECK(fd >= 0 && write(fd, data, size) == (ssize_t)size, "cannot make a file in memory");
    if (session_load(&s, path, err)) {
        fuzz_message(err);
        FUZZ_CHECK(!s.n_past, "%d tokens of a refused state", s.n_past);
    } else if (s.n_past < FUZZ_CONTEXT) {
        session_decode(&s, 1);
    }
    close(fd);
    session_free(&s);
}

#ifndef FUZZ_REPLAY
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    FUZZ_TARGET(data, size);
    return 0;
}
#endif
