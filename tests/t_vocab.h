/* Vocabulary and BPE: upstream's vectors, the cuts of every pre-tokenizer, origins, NFC, the detokenizer, long runs and
 * broken vocabularies. */

/* A vocabulary under construction. Byte-level: the 256 bytes come first (token b is byte b), then merges and added
 * tokens. SentencePiece: <unk>, <s>, </s>, 256 bytes, then pieces. */
struct test_vocab {
    char **tokens; /* stb_ds array of stb_ds arrays, spelt as in a file */
    char **merges;
    int32_t *types;
    float *scores;        /* of SentencePiece */
    const char *pre;      /* NULL: SentencePiece */
    bool gemma;           /* SentencePiece: the tokenizer of Gemma 4 */
    struct gguf_writer w; /* further keys */
    uint8_t *image;
    struct gguf g;
    struct vocab v;
};

/* The token with this literal text, special ones first; -1 if there is none. */
static int32_t vocab_find(const struct vocab *v, const char *text) {
    struct gguf_str s = {text, strlen(text)};
    int32_t id = special_find(v, s);
    return id >= 0 ? id : bytes_find(v, s.p, s.n);
}

/* Appends bytes in GPT-2's alphabet. */
static void test_alphabet(char **out, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        for (int cp = 0; cp < 324; cp++)
            if (alphabet_byte(cp) == (uint8_t)s[i]) {
                uint8_t u[4];
                sb_put(out, (char *)u, (size_t)utf8proc_encode_char(cp, u));
            }
}

static int32_t test_token(struct test_vocab *t, char *spelt, int type) {
    arrput(t->tokens, spelt);
    arrput(t->types, type);
    return (int32_t)arrlen(t->tokens) - 1;
}

static int32_t test_add(struct test_vocab *t, const char *text, int type) {
    char *s = NULL;
    sb_puts(&s, text);
    return test_token(t, s, type);
}

static int32_t test_merge(struct test_vocab *t, const char *left, const char *right) {
    char *m = NULL, *s = NULL;
    test_alphabet(&m, left, strlen(left));
    sb_put(&s, m, arrlenu(m));
    sb_puts(&m, " ");
    test_alphabet(&m, right, strlen(right));
    test_alphabet(&s, right, strlen(right));
    arrput(t->merges, m);
    return test_token(t, s, TOKEN_NORMAL);
}

static struct test_vocab test_vocab_begin(const char *pre) {
    struct test_vocab t = {.pre = pre};
    for (int b = 0; b < 256; b++) {
        char c = (char)b, *s = NULL;
        test_alphabet(&s, &c, 1);
        test_token(&t, s, TOKEN_NORMAL);
    }
    return t;
}

static void test_strings(struct gguf_writer *w, const char *key, char **s) {
    gguf_put_array(w, key, GGUF_V_STR, arrlenu(s), NULL);
    for (size_t i = 0; i < arrlenu(s); i++) gguf_put_bytes(w, s[i], arrlenu(s[i]));
}

/* Writes the file to memory, reads it back and loads the vocabulary. */
static int test_vocab_load(struct test_vocab *t, char *err) {
    size_t n = 0;
    const char *model = t->pre ? "gpt2" : t->gemma ? "gemma4" : "llama", *pre = t->pre ? t->pre : "default";
    gguf_put_str(&t->w, "tokenizer.ggml.model", model, strlen(model));
    gguf_put_str(&t->w, "tokenizer.ggml.pre", pre, strlen(pre));
    if (t->scores) gguf_put_array(&t->w, "tokenizer.ggml.scores", GGUF_V_F32, arrlenu(t->scores), t->scores);
    test_strings(&t->w, "tokenizer.ggml.tokens", t->tokens);
    gguf_put_array(&t->w, "tokenizer.ggml.token_type", GGUF_V_I32, arrlenu(t->types), t->types);
    if (t->merges) test_strings(&t->w, "tokenizer.ggml.merges", t->merges);
    t->image = gguf_header(&t->w, &n);
    if (gguf_parse(&t->g, t->image, n, err, ERR_MAX)) return -1;
    return vocab_load(&t->v, &t->g, err);
}

static void test_vocab_end(struct test_vocab *t) {
    vocab_free(&t->v);
    gguf_close(&t->g);
    gguf_writer_free(&t->w);
    free(t->image);
    for (size_t i = 0; i < arrlenu(t->tokens); i++) arrfree(t->tokens[i]);
    for (size_t i = 0; i < arrlenu(t->merges); i++) arrfree(t->merges[i]);
    arrfree(t->tokens), arrfree(t->merges), arrfree(t->types), arrfree(t->scores);
}

/* Loads, or fails the test. */
static bool test_vocab_ready(struct test_vocab *t) {
    char err[ERR_MAX] = "";
    return CHECK(!test_vocab_load(t, err), "%s", err);
}

/* Whether text gives exactly these ids (ended by -1). */
static bool test_ids(const struct vocab *v, const char *text, size_t n, const uint8_t *origin, unsigned flags,
                     const int32_t *want) {
    int32_t *got = NULL;
    size_t k = 0;
    tokenize(v, text, n, origin, flags, &got);
    while (want[k] >= 0) k++;
    bool same = k == arrlenu(got) && (!k || !memcmp(got, want, k * sizeof *want));
    for (size_t i = 0; !same && i < arrlenu(got); i++) fprintf(stderr, " %d", got[i]);
    arrfree(got);
    return same;
}

#define IDS(...) ((const int32_t[]){__VA_ARGS__, -1})

/* ---- the vectors of llama.cpp ---- */

static void test_vocab_golden(void) {
    static const char separator[] = "\n__ggml_vocab_test__\n", *names[] = {"gpt-2", "deepseek-llm"};
    for (int m = 0; m < 2; m++) {
        char rel[128], path[1200], err[ERR_MAX] = "", *inp = NULL, *out = NULL;
        snprintf(rel, sizeof rel, "golden/tokenizer/ggml-vocab-%s.gguf", names[m]);
        const char *file = shared_path(rel);
        if (!file) SKIP("../shared/%s is not there", rel);
        struct gguf g;
        struct vocab v;
        if (!CHECK(!gguf_open(&g, file, err, sizeof err) && !vocab_load(&v, &g, err), "%s", err)) return;
        snprintf(path, sizeof path, "%s.inp", file);
        int rc = read_file(path, &inp, err);
        snprintf(path, sizeof path, "%s.out", file);
        CHECK(!rc && !read_file(path, &out, err), "%s", err);
        int texts = 0;
        char *line = arrlenu(out) ? (char *)(uintptr_t)sb_cstr(&out) : NULL;
        for (const char *s = sb_cstr(&inp), *end; line && (end = strstr(s, separator));
             s = end + sizeof separator - 1, texts++) {
            int32_t *want = NULL;
            char *stop = line + strcspn(line, "\n");
            while (line < stop && strspn(line, " ") < (size_t)(stop - line))
                arrput(want, (int32_t)strtol(line, &line, 10));
            line = stop + (*stop == '\n');
            arrput(want, -1);
            uint8_t *origin = xmalloc((size_t)(end - s) + 1);
            memset(origin, ORIGIN_DATA, (size_t)(end - s) + 1);
            CHECK(test_ids(&v, s, (size_t)(end - s), origin, TOKENIZE_TAGS, want), "%s, text %d", names[m], texts);
            free(origin);
            arrfree(want);
        }
        CHECK(texts == 46, "%s: %d texts", names[m], texts);
        arrfree(inp), arrfree(out);
        vocab_free(&v);
        gguf_close(&g);
    }
}

/* ---- pre-tokenizers ---- */

/* Texts with '|' where the pieces of Hugging Face's Split(Regex, "isolated") meet, for the models' own expressions. */
/* clang-format off */
static const char *const test_cuts[][2] = {
    {"gpt-2", "It|'s| I|'|LL| we|'|Ve| '|ſ| 12345| x|2| ½Ⅻ３| don|’|t"},
    {"gpt-2", " | two|  | spaces|\n\n  \n| next|\r\n|\t|tab| \302\240|\343\200\200|wide|\341\240\216| |\342\200\250|x|  "},
    {"gpt-2", "HTTPServer| iPhone| ǅungla| ʰªº| '|sHello|'|S| dAvid|'d|."},
    {"gpt-2", "中文和English混排|，|한국어| かなカナー々|〇|！《|書|》。"},
    {"gpt-2", "if| (|a|!=|b|){/*| c| */}|\n|//|x| ==|\t|$|5|.|00|+=€|3| #|tag| @|me| a|/|b|/|\n"},
    {"gpt-2", "e|\314\201|tude| \314\201|x| न|्|द|ी| ह|ि|न|्|द|ी| ไทยำ| אב|ּ| مرحبا|٣٤٥"},
    {"gpt-2", "a|\302\205|b|\342\200\213\342\200\215|c|\013|\014|\034|d| \001\002\177| …—“|q|”"},
    {"gpt-2", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!|\n\n|\n|¿\?|\r\r| 1|,|234|.|5|e|6"},
    {"default", "It|'|s| I|'|LL| we|'|Ve| |'|ſ| |123|45| x|2| |½Ⅻ３| don|’|t"},
    {"default", " | two|  | spaces|\n\n  \n| next|\r\n|\t|tab| \302\240|\343\200\200|wide|\341\240\216| |\342\200\250|x|  "},
    {"default", "HTTPServer| iPhone| ǅungla| ʰªº| |'|sHello|'|S| dAvid|'|d|."},
    {"default", "中文和English混排|，|한국어| かなカナー々|〇|！《|書|》。"},
    {"default", "if| |(|a|!=|b|){/*| c| |*/}|\n|//|x| |==|\t|$|5|.|00|+=|€|3| |#|tag| |@|me| a|/|b|/|\n"},
    {"default", "e|\314\201|tude| \314\201|x| न|्|द|ी| ह|ि|न|्|द|ी| ไทยำ| אב|ּ| مرحبا|٣٤٥"},
    {"default", "a|\302\205|b|\342\200\213\342\200\215|c|\013|\014|\034|d| \001\002\177| |…—“|q|”"},
    {"default", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪|!!|\n\n\n|¿\?|\r\r| |1|,|234|.|5|e|6"},
    {"deepseek-llm", "It|'|s| I|'|LL| we|'|Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’|t"},
    {"deepseek-llm", " | two|  | spaces|\n|\n|  |\n| next|\r|\n|\ttab| \302\240|\343\200\200|wide|\341\240\216| |\342\200\250|x|  "},
    {"deepseek-llm", "HTTPServer| iPhone| ǅ|ungla| ʰªº| '|sHello|'|S| dAvid|'|d|."},
    {"deepseek-llm", "中文和|English|混排|，|한국어| |かなカナー々|〇|！|《書》|。"},
    {"deepseek-llm", "if| (|a|!=|b|){/*| c| */}|\n|//|x| ==|\t$|5|.|0|0|+=|€|3| #|tag| @|me| a|/|b|/|\n"},
    {"deepseek-llm", "e|\314\201|tude| \314\201|x| |न्दी| |हिन्दी| |ไทยำ| אבּ مرحبا|٣|٤|٥"},
    {"deepseek-llm", "a|\302\205b|\342\200\213\342\200\215|c|\013\014\034|d| \001\002\177 |…—|“|q|”"},
    {"deepseek-llm", "😀👨|\342\200\215|👩|\342\200\215|👧🏽 🇩🇪|!!|\n|\n|\n|¿|\?|\r|\r| |1|,|2|3|4|.|5|e|6"},
    {"deepseek-coder", "It|'|s| I|'|LL| we|'|Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’|t"},
    {"deepseek-coder", " | two|  | spaces|\n|\n|  |\n| next|\r|\n|\ttab| \302\240|\343\200\200|wide|\341\240\216| |\342\200\250|x|  "},
    {"deepseek-coder", "HTTPServer| iPhone| ǅungla| ʰªº| '|sHello|'|S| dAvid|'|d|."},
    {"deepseek-coder", "中文和|English|混排|，|한국어| |かなカナー々|〇|！|《|書|》。"},
    {"deepseek-coder", "if| (|a|!|=|b|){/*| c| */}|\n|//|x| ==\t$|5|.|0|0|+=|€|3| #|tag| @|me| a|/|b|/|\n"},
    {"deepseek-coder", "e|\314\201|tude| \314\201|x| |न|्|द|ी| |ह|ि|न|्|द|ी| |ไทยำ| אב|ּ| مرحبا|٣|٤|٥"},
    {"deepseek-coder", "a|\302\205b|\342\200\213\342\200\215|c|\013\014\034|d| \001\002\177| |…—“|q|”"},
    {"deepseek-coder", "😀👨|\342\200\215|👩|\342\200\215|👧🏽 🇩🇪|!!|\n|\n|\n|¿\?|\r|\r| |1|,|2|3|4|.|5|e|6"},
    {"deepseek-v3", "It|'s| I|'LL| we|'Ve| '|ſ| |123|45| x|2| |½Ⅻ３| don|’|t"},
    {"deepseek-v3", " | two|  | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"deepseek-v3", "HTTPServer| iPhone| ǅungla| ʰªº| '|sHello|'S| dAvid|'d|."},
    {"deepseek-v3", "中文和|English|混排|，|한국어| |かなカナー|々|〇|！《|書|》。"},
    {"deepseek-v3", "if| (|a|!=|b|){/*| c| */}\n|//|x| ==|\t|$|5|.|00|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"deepseek-v3", "e\314\201tude| \314\201x| न्दी| हिन्दी| ไทยำ| אבּ| مرحبا|٣٤٥"},
    {"deepseek-v3", "a|\302\205b|\342\200\213|\342\200\215c|\013|\014|\034d| |\001\002\177| …—“|q|”"},
    {"deepseek-v3", "😀👨|\342\200\215|👩|\342\200\215|👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|234|.|5|e|6"},
    {"llama-bpe", "It|'s| I|'LL| we|'Ve| '|ſ| |123|45| x|2| |½Ⅻ３| don|’t"},
    {"llama-bpe", " | two|  | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"llama-bpe", "HTTPServer| iPhone| ǅungla| ʰªº| '|sHello|'S| dAvid|'d|."},
    {"llama-bpe", "中文和English混排|，한국어| かなカナー々|〇|！《|書|》。"},
    {"llama-bpe", "if| (|a|!=|b|){/*| c| */}\n|//|x| ==|\t|$|5|.|00|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"llama-bpe", "e|\314\201tude| \314\201|x| न|्द|ी| ह|िन|्द|ी| ไทยำ| אב|ּ| مرحبا|٣٤٥"},
    {"llama-bpe", "a|\302\205b|\342\200\213\342\200\215|c|\013|\014|\034d| \001\002\177| …—“|q|”"},
    {"llama-bpe", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|234|.|5|e|6"},
    {"qwen2", "It|'s| I|'LL| we|'Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’t"},
    {"qwen2", " | two|  | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"qwen2", "HTTPServer| iPhone| ǅungla| ʰªº| '|sHello|'S| dAvid|'d|."},
    {"qwen2", "中文和English混排|，한국어| かなカナー々|〇|！《|書|》。"},
    {"qwen2", "if| (|a|!=|b|){/*| c| */}\n|//|x| ==|\t|$|5|.|0|0|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"qwen2", "e|\314\201tude| \314\201|x| न|्द|ी| ह|िन|्द|ी| ไทยำ| אב|ּ| مرحبا|٣|٤|٥"},
    {"qwen2", "a|\302\205b|\342\200\213\342\200\215|c|\013|\014|\034d| \001\002\177| …—“|q|”"},
    {"qwen2", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|2|3|4|.|5|e|6"},
    {"qwen35", "It|'s| I|'LL| we|'Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’t"},
    {"qwen35", " | two|  | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"qwen35", "HTTPServer| iPhone| ǅungla| ʰªº| '|sHello|'S| dAvid|'d|."},
    {"qwen35", "中文和English混排|，한국어| かなカナー々|〇|！《|書|》。"},
    {"qwen35", "if| (|a|!=|b|){/*| c| */}\n|//|x| ==|\t|$|5|.|0|0|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"qwen35", "e\314\201tude| \314\201x| न्दी| हिन्दी| ไทยำ| אבּ| مرحبا|٣|٤|٥"},
    {"qwen35", "a|\302\205b|\342\200\213\342\200\215|c|\013|\014|\034d| \001\002\177| …—“|q|”"},
    {"qwen35", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|2|3|4|.|5|e|6"},
    {"laguna", "It|'s| I|'LL| we|'Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’t"},
    {"laguna", " two|  | spaces|\n\n|  |\n| next|\r\n|\ttab| \302\240 |\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"laguna", "if| (|a|!=|b|){/*| c| */}|\n|//|x| ==|\t|$|5|.|0|0|+=€|3| #|tag| @|me| a|/b|/|\n"},
    {"laguna", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!|\n\n\n|¿\?\r\r| |1|,|2|3|4|.|5|e|6"},
    {"laguna", "a|\r\n\r\n|b|\r|\r\n\n|c|  |\n| | d|\n"},
    {"tekken", "It|'s| I|'LL| we|'Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’t"},
    {"tekken", "HTTPServer| i|Phone| ǅungla| ʰªº| '|s|Hello|'S| d|Avid|'d|."},
    {"tekken", "if| (|a|!=|b|){/*| c| */}\n//|x| ==|\t|$|5|.|0|0|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"tekken", "e\314\201tude| \314\201x| न्दी| हिन्दी| ไทยำ| אבּ| مرحبا|٣|٤|٥"},
    {"tekken", "a|\r\n\r\n|b|\r\r\n\n|c|  \n| | d|\n"},
    {"seed-coder", "It|'s| I|'LL| we|'Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’t"},
    {"seed-coder", "if| (|a|!=|b|){/*| c| */}|\n|//|x| ==|\t|$|5|.|0|0|+=€|3| #|tag| @|me| a|/b|/|\n"},
    {"seed-coder", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!|\n\n\n|¿\?|\r\r| |1|,|2|3|4|.|5|e|6"},
    {"bailingmoe2", "It|'s| I|'LL| we|'Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’t"},
    {"bailingmoe2", " two|  | spaces|\n\n  \n| next|\r\n|\ttab| \302\240 |\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"bailingmoe2", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|2|3|4|.|5|e|6"},
    {"exaone-moe", "It|'s| I|'LL| we|'Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’t"},
    {"exaone-moe", " two| | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"exaone-moe", "HTTPServer iPhone ǅungla ʰªº| '|sHello|'S| dAvid|'d|."},
    {"exaone-moe", "if| (|a|!=|b|){/*| c| */}\n|//|x| ==|\t|$|5|.|0|0|+=€|3| #|tag| @|me a|/b|/\n"},
    {"exaone-moe", "e\314\201tude| \314\201|x न्दी हिन्दी ไทยำ אבּ مرحبا|٣|٤|٥"},
    {"exaone-moe", "中文和English混排|，한국어 かなカナー々|〇|！《|書|》。"},
    {"exaone-moe", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n|\n\n|¿\?\r|\r| |1|,|2|3|4|.|5|e|6"},
    {"exaone-moe", "1| |1|2| |1|2|3| |1|2|3|4| |1|2|3|4|5|6|7|8| x|1|2|3|4|5|6| |٣|٤|٥|٦"},
    {"afmoe", "It|'s| I|'LL| we|'Ve| '|ſ| |12|345| x|2| |½Ⅻ３| don|’|t"},
    {"afmoe", " two| | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"afmoe", "HTTPServer| iPhone| ǅungla| ʰªº| '|sHello|'S| dAvid|'d|."},
    {"afmoe", "if| (|a|!=|b|){/*| c| */}\n|//|x| ==|\t|$|5|.|00|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"afmoe", "e\314\201tude| \314\201x| न्दी| हिन्दी| |ไ|ทยำ| אבּ| مرحبا|٣٤٥"},
    {"afmoe", "中文和|English|混排|，|한국어| |かなカナー|々|〇|！《|書|》。"},
    {"afmoe", "😀👨|\342\200\215|👩|\342\200\215|👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|234|.|5|e|6"},
    {"afmoe", "1| |12| |123| |1|234| |12|345|678| x|123|456| |٣|٤٥٦"},
    {"cohere2moe", "It's| I'LL| we'Ve| '|ſ| |12|345| x|2| |½Ⅻ|３| don|’t"},
    {"cohere2moe", " two| | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"cohere2moe", "HTTPServer| i|Phone| ǅungla| ʰªº| '|s|Hello'S| d|Avid'd|."},
    {"cohere2moe", "if| (|a|!=|b|){/*| c| */}\n//|x| ==|\t|$|5|.|00|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"cohere2moe", "e\314\201tude| \314\201x| न्दी| हिन्दी| ไทยำ| אבּ| مرحبا|٣٤٥"},
    {"cohere2moe", "中文和English混排|，한국어| かなカナー々|〇|！《|書|》。"},
    {"cohere2moe", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|234|.|5|e|6"},
    {"cohere2moe", "1| |12| |123| |1|234| |12|345|678| x|123|456| |٣|٤٥٦"},
    {"cohere2moe", "123|45|abc| |1|234|567| |12|abc|345| x|1|234| |123|4|_|5| |1|234|567|890|123"},
    {"refact", "It|'s| I|'|LL| we|'|Ve| '|ſ| |1|2|3|4|5| x|2| |½|Ⅻ|３| don|’|t"},
    {"refact", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!|\n\n|\n|¿\?|\r\r |1|,|2|3|4|.|5|e|6"},
    {"refact", "a|\r\n\r|\n|b|\r\r\n|\n|c|  \n | d|\n"},
    {"gpt-4o", "It's| I'LL| we'Ve| '|ſ| |123|45| x|2| |½Ⅻ３| don|’t"},
    {"gpt-4o", " | two|  | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"gpt-4o", "HTTPServer| i|Phone| ǅungla| ʰªº| '|s|Hello'S| d|Avid'd|."},
    {"gpt-4o", "中文和English混排|，한국어| かなカナー々|〇|！《|書|》。"},
    {"gpt-4o", "if| (|a|!=|b|){/*| c| */}\n//|x| ==|\t|$|5|.|00|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"gpt-4o", "e\314\201tude| \314\201x| न्दी| हिन्दी| ไทยำ| אבּ| مرحبا|٣٤٥"},
    {"gpt-4o", "a|\302\205b|\342\200\213\342\200\215|c|\013|\014|\034d| \001\002\177| …—“|q|”"},
    {"gpt-4o", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|234|.|5|e|6"},
    {"kimi-k2", "It's| I'LL| we'Ve| '|ſ| |123|45| x|2| |½Ⅻ３| don|’t"},
    {"kimi-k2", " | two|  | spaces|\n\n  \n| next|\r\n|\ttab| \302\240|\343\200\200wide|\341\240\216| |\342\200\250x|  "},
    {"kimi-k2", "HTTPServer| i|Phone| ǅungla| ʰªº| '|s|Hello'S| d|Avid'd|."},
    {"kimi-k2", "中文和|English|混排|，한국어| かなカナー|々〇|！《|書|》。"},
    {"kimi-k2", "if| (|a|!=|b|){/*| c| */}\n|//|x| ==|\t|$|5|.|00|+=€|3| #|tag| @|me| a|/b|/\n"},
    {"kimi-k2", "e\314\201tude| \314\201x| न्दी| हिन्दी| ไทยำ| אבּ| مرحبا|٣٤٥"},
    {"kimi-k2", "a|\302\205b|\342\200\213\342\200\215|c|\013|\014|\034d| \001\002\177| …—“|q|”"},
    {"kimi-k2", "😀👨\342\200\215👩\342\200\215👧🏽| 🇩🇪!!\n\n\n|¿\?\r\r| |1|,|234|.|5|e|6"},
};
/* clang-format on */

static void test_vocab_cuts(void) {
    char err[ERR_MAX] = "";
    const char *last = "";
    struct test_vocab t = {0};
    for (size_t i = 0; i < sizeof test_cuts / sizeof *test_cuts; i++) {
        if (strcmp(last, test_cuts[i][0])) {
            if (i) test_vocab_end(&t);
            t = test_vocab_begin(last = test_cuts[i][0]);
            test_merge(&t, "q", "q");
            if (!CHECK(!test_vocab_load(&t, err), "%s: %s", last, err)) break;
        }
        char *text = NULL, *got = NULL;
        for (const char *s = test_cuts[i][1]; *s; s++)
            if (*s != '|') arrput(text, *s);
        struct tokenizer k = {.v = &t.v, .match = pcre2_match_data_create(1, NULL)};
        arrput(k.ends, arrlenu(text));
        for (int e = 0; e < t.v.n_exprs; e++) split_pieces(&k, t.v.expr[e], text);
        for (size_t p = 0, at = 0; p < arrlenu(k.ends); at = k.ends[p++]) {
            if (p) arrput(got, '|');
            sb_put(&got, text + at, k.ends[p] - at);
        }
        CHECK(!strcmp(sb_cstr(&got), test_cuts[i][1]), "%s: [%s], expected [%s]", last, got, test_cuts[i][1]);
        pcre2_match_data_free(k.match);
        arrfree(k.ends), arrfree(k.cut), arrfree(text), arrfree(got);
    }
    test_vocab_end(&t);
}

/* Every name of the table loads, and every expression compiles. The names in files of other converters are known. */
static void test_vocab_names(void) {
    static const char *const like[][2] = {
        {"pixtral", "llama-bpe"}, {"glm4", "llama-bpe"},        {"chatglm-bpe", "llama-bpe"},
        {"inkling", "gpt-4o"},    {"inkling2", "gpt-4o"},       {"bailingmoe", "bailingmoe2"},
        {"hunyuan", "qwen2"},     {"exaone-moe", "exaone-moe"}, {"kimi-k2", "kimi-k2"},
        {"tekken", "tekken"},     {"qwen35", "qwen35"},         {"qwen2", "qwen2"}};
    for (size_t i = 0; i < sizeof like / sizeof *like; i++) {
        const char *expr[2] = {NULL};
        for (int k = 0; k < 2; k++)
            for (int p = 0; p < N_PRE_TOKENIZERS; p++)
                if (word_in_list((struct gguf_str){like[i][k], strlen(like[i][k])}, pre_tokenizers[p].names))
                    expr[k] = pre_tokenizers[p].expr[0];
        CHECK(expr[0] && expr[1] && !strcmp(expr[0], expr[1]), "%s is not like %s", like[i][0], like[i][1]);
    }
    for (int i = 0; i < N_PRE_TOKENIZERS; i++) {
        struct vocab v = {0};
        char err[ERR_MAX] = "";
        CHECK(!vocab_compile_exprs(&v, &pre_tokenizers[i], err), "%s", err);
        vocab_free(&v);
    }
    CHECK(word_in_list((struct gguf_str){"glm4", 4}, "gpt-2 glm4 x"), "a name in the middle");
    CHECK(!word_in_list((struct gguf_str){"gl", 2}, "gpt-2 glm4 x"), "a prefix is no name");
    CHECK(!word_in_list((struct gguf_str){"", 0}, "gpt-2 glm4 x"), "nothing is no name");
}

/* ---- merging ---- */

/* The definition, O(n^2): of all neighbors the strongest merge, of equal ones the leftmost, until there is none. */
static void test_bpe_naive(const struct vocab *v, const char *s, size_t n, int32_t **out) {
    int32_t *id = NULL;
    for (size_t i = 0; i < n; i++) arrput(id, v->byte_id[(uint8_t)s[i]]);
    for (;;) {
        ptrdiff_t best = -1;
        int32_t rank = INT32_MAX, merged = 0;
        for (ptrdiff_t i = 0; i + 1 < arrlen(id); i++) {
            const struct merge_slot *e = merge_slot(v, (uint64_t)id[i] << 32 | (uint32_t)id[i + 1]);
            if (e && e->pair != UINT64_MAX && e->rank < rank) best = i, rank = e->rank, merged = e->id;
        }
        if (best < 0) break;
        id[best] = merged;
        arrdel(id, best + 1);
    }
    for (ptrdiff_t i = 0; i < arrlen(id); i++) arrput(*out, id[i]);
    arrfree(id);
}

static void test_vocab_merging(void) {
    uint64_t seed = 7;
    for (int round = 0; round < 20; round++) {
        struct test_vocab t = test_vocab_begin("gpt-2");
        const char **words = NULL; /* merged texts: pairs of earlier ones */
        char store[64][64];
        arrput(words, "a"), arrput(words, "b"), arrput(words, "c");
        for (int i = 0; i < 40; i++) {
            const char *l = words[rng_next(&seed) % arrlenu(words)], *r = words[rng_next(&seed) % arrlenu(words)];
            if (strlen(l) + strlen(r) > 20) continue;
            snprintf(store[i], sizeof store[i], "%s%s", l, r);
            test_merge(&t, l, r);
            arrput(words, store[i]);
        }
        if (test_vocab_ready(&t))
            for (int i = 0; i < 50; i++) {
                char text[200];
                size_t n = 1 + rng_next(&seed) % (sizeof text - 1);
                for (size_t k = 0; k < n; k++) text[k] = "abc"[rng_next(&seed) % 3];
                int32_t *want = NULL;
                test_bpe_naive(&t.v, text, n, &want);
                arrput(want, -1);
                CHECK(test_ids(&t.v, text, n, NULL, 0, want), "round %d: %.*s", round, (int)n, text);
                arrfree(want);
            }
        arrfree(words);
        test_vocab_end(&t);
    }
}

/* Without merges (tiktoken) ids are ranks; a whole piece that is a token is taken as it is with ignore_merges. */
static void test_vocab_ranked(void) {
    struct test_vocab t = test_vocab_begin("kimi-k2");
    int32_t bc = test_add(&t, "bc", TOKEN_NORMAL), ab = test_add(&t, "ab", TOKEN_NORMAL);
    int32_t bcd = test_add(&t, "bcd", TOKEN_NORMAL), lone = test_add(&t, "wxyz", TOKEN_NORMAL);
    if (test_vocab_ready(&t)) {
        CHECK(!t.v.merges && t.v.ignore_merges, "kimi-k2 without merges");
        CHECK(test_ids(&t.v, "abcd", 4, NULL, 0, IDS('a', bcd)), "bc before ab, then bcd");
        CHECK(test_ids(&t.v, "abab", 4, NULL, 0, IDS(ab, ab)), "twice ab");
        CHECK(test_ids(&t.v, "wxyz", 4, NULL, 0, IDS(lone)), "a piece that is a token");
        CHECK(test_ids(&t.v, "bcwxyz", 6, NULL, 0, IDS(bc, 'w', 'x', 'y', 'z')), "which merging cannot reach");
    }
    test_vocab_end(&t);
    for (int ignore = 0; ignore < 2; ignore++) {
        t = test_vocab_begin("qwen2");
        test_merge(&t, "q", "q");
        lone = test_add(&t, "wxyz", TOKEN_NORMAL);
        gguf_put_bool(&t.w, "tokenizer.ggml.ignore_merges", ignore);
        if (test_vocab_ready(&t))
            CHECK(test_ids(&t.v, "wxyz", 4, NULL, 0, ignore ? IDS(lone) : IDS('w', 'x', 'y', 'z')), "%d", ignore);
        test_vocab_end(&t);
    }
    /* in files without that key it depends on the pre-tokenizer: the tokenizers of GLM-4.5 and later, whose files
     * llama.cpp names glm4, have it */
    static const struct {
        const char *pre;
        bool ignore;
    } named[] = {{"glm4", true}, {"glm5", true}, {"llama-bpe", true}, {"chatglm-bpe", false}, {"dbrx", false}};
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        t = test_vocab_begin(named[i].pre);
        test_merge(&t, "q", "q");
        lone = test_add(&t, "wxyz", TOKEN_NORMAL);
        if (test_vocab_ready(&t))
            CHECK(test_ids(&t.v, "wxyz", 4, NULL, 0, named[i].ignore ? IDS(lone) : IDS('w', 'x', 'y', 'z')), "%s",
                  named[i].pre);
        test_vocab_end(&t);
    }
}

/* ---- special tokens ---- */

static void test_vocab_origins(void) {
    struct test_vocab t = test_vocab_begin("qwen2");
    test_merge(&t, "x", "y");
    int32_t end = test_add(&t, "<|im_end|>", TOKEN_CONTROL), think = test_add(&t, "<think>", TOKEN_USER_DEFINED);
    int32_t hash = test_add(&t, "##", TOKEN_USER_DEFINED), hashes = test_add(&t, "####", TOKEN_USER_DEFINED);
    int32_t tag = test_add(&t, "[A]", TOKEN_USER_DEFINED), longer = test_add(&t, "[A]]", TOKEN_CONTROL);
    const unsigned both = TOKENIZE_CONTROL | TOKENIZE_TAGS;
    static const char text[] = "<|im_end|>";
    uint8_t data[16], mixed[16] = {0};
    int32_t plain[16];
    for (int i = 0; i < 16; i++) data[i] = ORIGIN_DATA, plain[i] = i < 10 ? text[i] : -1;
    if (test_vocab_ready(&t)) {
        const struct vocab *v = &t.v;
        CHECK(test_ids(v, text, 10, NULL, TOKENIZE_CONTROL, IDS(end)), "the template's");
        CHECK(test_ids(v, text, 10, NULL, TOKENIZE_TAGS, plain), "without TOKENIZE_CONTROL");
        CHECK(test_ids(v, text, 10, data, both, plain), "the user's");
        for (int i = 0; i < 10; i++) { /* one byte of data among the template's */
            mixed[i] = ORIGIN_DATA;
            CHECK(test_ids(v, text, 10, mixed, both, plain), "straddling at %d", i);
            mixed[i] = ORIGIN_TEMPLATE;
        }
        mixed[10] = ORIGIN_DATA;
        CHECK(test_ids(v, "<|im_end|>x", 11, mixed, both, IDS(end, 'x')), "data after it");
        CHECK(test_ids(v, "<think>", 7, NULL, 0, IDS(think)), "a tag of the template");
        CHECK(test_ids(v, "<think>", 7, data, TOKENIZE_TAGS, IDS(think)), "a tag in data, wanted");
        CHECK(test_ids(v, "<think>", 7, data, TOKENIZE_CONTROL, IDS('<', 't', 'h', 'i', 'n', 'k', '>')), "not wanted");
        CHECK(test_ids(v, "a##b", 4, data, 0, IDS('a', hash, 'b')), "no tag: anywhere");
        CHECK(test_ids(v, "#######", 7, data, 0, IDS(hashes, hash, '#')), "the longest, then the next");
        CHECK(test_ids(v, "[A]]", 4, NULL, both, IDS(longer)), "the longest");
        CHECK(test_ids(v, "[A]]", 4, NULL, 0, IDS(tag, ']')), "the longest that may match");
        CHECK(test_ids(v, "[A", 2, NULL, both, IDS('[', 'A')), "the text ends inside");
        CHECK(test_ids(v, NULL, 0, NULL, both, IDS(-1)), "no text");
        CHECK(vocab_type(v, end) == TOKEN_CONTROL && vocab_type(v, 'a') == TOKEN_NORMAL, "types");
        CHECK(vocab_type(v, -1) == TOKEN_UNUSED && !vocab_bytes(v, 1 << 20).n, "ids out of range");
        CHECK(vocab_find(v, "<think>") == think && vocab_find(v, "xy") == 256 && vocab_find(v, "xz") == -1, "find");
        CHECK(vocab_find(v, " ") == ' ' && vocab_find(v, "") == -1, "find");
    }
    test_vocab_end(&t);
}

static void test_vocab_stops(void) {
    struct test_vocab t = test_vocab_begin("gpt-4o");
    test_merge(&t, "x", "y");
    int32_t end = test_add(&t, "<|end|>", TOKEN_CONTROL), ret = test_add(&t, "<|return|>", TOKEN_CONTROL);
    int32_t call = test_add(&t, "<|call|>", TOKEN_USER_DEFINED), s = test_add(&t, "</s>", TOKEN_NORMAL);
    int32_t fim = test_add(&t, "<|fim_prefix|>", TOKEN_USER_DEFINED), user = test_add(&t, "<|user|>", TOKEN_CONTROL);
    uint32_t more[] = {'A', 'B', 100000};
    gguf_put_u32(&t.w, "tokenizer.ggml.eos_token_id", 'E');
    gguf_put_u32(&t.w, "tokenizer.ggml.eom_token_id", 'M');
    gguf_put_u32(&t.w, "tokenizer.ggml.eot_token_id", (uint32_t)end); /* wrong: it ends a message alone */
    gguf_put_u32(&t.w, "tokenizer.ggml.bos_token_id", 100000);
    gguf_put_array(&t.w, "tokenizer.ggml.eos_token_ids", GGUF_V_U32, 3, more);
    gguf_put_str(&t.w, "tokenizer.chat_template", "T{{x}}", 6);
    if (test_vocab_ready(&t)) {
        const int32_t stops[] = {'E', 'M', 'A', 'B', ret, call, user}, others[] = {end, s, fim, 'C', -1, 100000};
        for (int i = 0; i < 7; i++) CHECK(vocab_is_stop(&t.v, stops[i]), "%d stops", stops[i]);
        for (int i = 0; i < 6; i++) CHECK(!vocab_is_stop(&t.v, others[i]), "%d does not stop", others[i]);
        CHECK(vocab_type(&t.v, call) == TOKEN_CONTROL && vocab_type(&t.v, fim) == TOKEN_CONTROL, "known names");
        CHECK(t.v.eos == 'E' && t.v.eot == ret && t.v.bos == -1 && t.v.pad == -1 && !t.v.add_bos, "ids");
        CHECK(gguf_str_eq(t.v.chat_template, "T{{x}}"), "the template");
    }
    test_vocab_end(&t);
    t = test_vocab_begin("qwen2"); /* without <|call|> and <|return|> it does */
    test_merge(&t, "x", "y");
    end = test_add(&t, "<|end|>", TOKEN_CONTROL);
    if (test_vocab_ready(&t)) CHECK(vocab_is_stop(&t.v, end) && t.v.eot == end && t.v.eos == -1, "eot by name");
    test_vocab_end(&t);
}

/* ---- text ---- */

static void test_vocab_nfc(void) {
    for (int nfc = 0; nfc < 2; nfc++) {
        struct test_vocab t = test_vocab_begin("qwen2");
        test_merge(&t, "x", "y");
        gguf_put_bool(&t.w, "tokenizer.ggml.normalizer.nfc", nfc);
        if (test_vocab_ready(&t)) {
            CHECK(test_ids(&t.v, "e\314\201", 3, NULL, 0, nfc ? IDS(0xc3, 0xa9) : IDS('e', 0xcc, 0x81)), "%d", nfc);
            CHECK(test_ids(&t.v, "\303\251", 2, NULL, 0, IDS(0xc3, 0xa9)), "composed already");
            CHECK(test_ids(&t.v, "\377e\314\201", 4, NULL, 0, nfc ? IDS(0xff, 0xc3, 0xa9) : IDS(0xff, 'e', 0xcc, 0x81)),
                  "beside a malformed byte");
            CHECK(test_ids(&t.v, "x\0\342\204\253", 5, NULL, 0, /* U+212B, after a NUL */
                           nfc ? IDS('x', 0, 0xc3, 0x85) : IDS('x', 0, 0xe2, 0x84, 0xab)),
                  "%d", nfc);
        }
        test_vocab_end(&t);
    }
    struct test_vocab t = test_vocab_begin("qwen35");
    test_merge(&t, "x", "y");
    if (test_vocab_ready(&t)) CHECK(t.v.nfc, "qwen35 normalizes unless a key says otherwise");
    test_vocab_end(&t);
}

/* Bytes, one token each, and what they become, with '?' for U+FFFD. */
static void test_detok(const struct vocab *v, const char *bytes, const char *expected) {
    struct detok d = {{0}, 0};
    char *want = NULL, *got = NULL;
    for (const char *p = expected; *p; p++)
        if (*p == '?') sb_puts(&want, utf8_replacement);
        else arrput(want, *p);
    for (const char *p = bytes; *p; p++) {
        detok_put(v, &d, (uint8_t)*p, &got);
        CHECK(utf8_valid(got, arrlenu(got)), "%s: a part is no UTF-8", expected);
    }
    detok_end(&d, &got);
    CHECK(!strcmp(sb_cstr(&got), sb_cstr(&want)), "'%s', expected '%s'", got, expected);
    arrfree(want), arrfree(got);
}

static void test_vocab_detok(void) {
    CHECK(utf8_sequence(NULL, 0) == 0, "nothing is the beginning of something");
    /* expected: Python's bytes.decode(errors="replace") */
    static const char *const cases[][2] = {
        {"plain", "plain"},
        {"\360\237\230\200!", "\360\237\230\200!"}, /* an emoji */
        {"\303\251\344\270\255", "\303\251\344\270\255"},
        {"\377a", "?a"},
        {"\200\200", "??"},
        {"\303(", "?("},
        {"\340\200\200", "???"}, /* overlong */
        {"\340\240", "?"},       /* cut off */
        {"x\303", "x?"},
        {"\355\240\200", "???"}, /* a surrogate */
        {"\360\237\230", "?"},   /* cut off */
        {"\360\237\230x", "?x"},
        {"\360\237\303\251", "?\303\251"},
        {"\360\217\277\277", "????"}, /* overlong */
        {"\364\220\200\200", "????"}, /* above U+10FFFF */
        {"\300\257\365\200", "????"},
        {"\342\202\360\237\230\200", "?\360\237\230\200"},
    };
    struct test_vocab t = test_vocab_begin("qwen2");
    test_merge(&t, "x", "y");
    int32_t emoji = test_merge(&t, "\360\237", "\230\200"), end = test_add(&t, "<|im_end|>", TOKEN_CONTROL);
    if (test_vocab_ready(&t)) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_detok(&t.v, cases[i][0], cases[i][1]);
        struct detok d = {0};
        char *got = NULL;
        detok_put(&t.v, &d, 0xf0, &got);
        detok_put(&t.v, &d, emoji, &got);
        detok_put(&t.v, &d, end, &got);
        detok_put(&t.v, &d, 1 << 20, &got);
        detok_end(&d, &got);
        CHECK(!strcmp(sb_cstr(&got), "\357\277\275\360\237\230\200<|im_end|>"), "%s", got);
        arrfree(got);
        struct printer p = {.v = &t.v}; /* nothing to print yet */
        printer_token(&p, 0xe6);
        CHECK(!p.text && !p.printed && p.detok.n == 1, "%td bytes", arrlen(p.text));
    }
    test_vocab_end(&t);
}

/* Tokenizes n bytes that repeat `unit`, checks that the tokens give them back, and that it takes no quadratic time
 * (which would be minutes). */
static void test_paste(const struct vocab *v, const char *name, const char *text, size_t n) {
    int32_t *ids = NULL;
    char *back = NULL;
    double t = cpu_seconds();
    tokenize(v, text, n, NULL, 0, &ids);
    t = cpu_seconds() - t;
    for (size_t i = 0; i < arrlenu(ids); i++) {
        struct gguf_str b = vocab_bytes(v, ids[i]);
        sb_put(&back, b.p, b.n);
    }
    CHECK(arrlenu(back) == n && !memcmp(back, text, n), "%s: the tokens do not give the text back", name);
    CHECK(t < 10, "%s: %.1f s for %zu bytes", name, t, n);
    arrfree(ids), arrfree(back);
}

static void test_vocab_pastes(void) {
    static const char *const units[] = {
        "a", "A", " ", "\n", " \n", "0", "!", "<", "\344\270\255", "\302\240", "\314\243\314\201"};
    size_t n = 1 << 20;
    char *text = xmalloc(n + 4), pre[64];
    for (int p = 0; p < N_PRE_TOKENIZERS; p++) {
        n = p ? 1 << 17 : 1 << 20;
        snprintf(pre, sizeof pre, "%.*s", (int)strcspn(pre_tokenizers[p].names, " "), pre_tokenizers[p].names);
        struct test_vocab t = test_vocab_begin(pre);
        const char *grown[] = {"a", "aa", "aaaa", "aaaaaaaa", " ", "  ", "    ", "\n", "\n\n"};
        for (int i = 0; i < 9; i++) test_merge(&t, grown[i], grown[i]);
        test_add(&t, "<|x|>", TOKEN_CONTROL);
        /* NFC would keep runs of ordered marks too, but not random letters with marks */
        gguf_put_bool(&t.w, "tokenizer.ggml.normalizer.nfc", false);
        if (test_vocab_ready(&t)) {
            for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
                size_t k = strlen(units[u]);
                for (size_t i = 0; i < n; i++) text[i] = units[u][i % k];
                test_paste(&t.v, units[u], text, n / k * k);
            }
            memset(text, ' ', n);
            memcpy(text + n, "\344\270\255", 3);
            test_paste(&t.v, "blanks before a character", text, n + 3);
            uint64_t seed = 3;
            for (size_t i = 0; i < n; i++) text[i] = (char)rng_next(&seed);
            test_paste(&t.v, "random bytes", text, n);
        }
        test_vocab_end(&t);
    }
    free(text);
}

/* Runs of combining marks, which NFC sorts: UAX 15 asks for no more than 30 of them. The number of tokens says that no
 * mark is lost. */
static void test_vocab_marks(void) {
    static const struct {
        const char *unit;
        size_t bytes; /* of its NFC form */
    } runs[] = {
        {"\314\201\314\243", 4},     /* U+0301 U+0323: in the wrong order */
        {"\315\204", 4},             /* U+0344: two marks of one class */
        {"\340\275\263", 6},         /* U+0F73: class 0, two marks of classes 129 and 130 */
        {"\340\275\265", 6},         /* U+0F75: the same */
        {"\340\276\201", 6},         /* U+0F81: the same */
        {"\340\275\263\314\201", 8}, /* a third class after them */
    };
    char *text = xmalloc(1 << 20);
    struct test_vocab t = test_vocab_begin("qwen2");
    test_merge(&t, "x", "y");
    const bool ready = test_vocab_ready(&t);
    for (size_t r = 0; ready && r < sizeof runs / sizeof *runs; r++) {
        const size_t k = strlen(runs[r].unit), n = r == 2 ? 1 << 20 : 1 << 18;
        int32_t *ids = NULL;
        for (size_t i = 0; i < n; i++) text[i] = runs[r].unit[i % k];
        const double s = cpu_seconds();
        tokenize(&t.v, text, n / k * k, NULL, 0, &ids);
        const double took = cpu_seconds() - s;
        CHECK(arrlenu(ids) == n / k * runs[r].bytes, "run %zu: %zu ids", r, arrlenu(ids));
        CHECK(took < (SANITIZED ? 10 : 2), "run %zu: %.1f s", r, took);
        arrfree(ids);
    }
    test_vocab_end(&t);
    free(text);
}

/* ---- SentencePiece ---- */

static int32_t test_piece(struct test_vocab *t, const char *text, int type, float score) {
    arrput(t->scores, score);
    return test_add(t, text, type);
}

enum { SPM_BYTE = 3, SPM_FIRST = SPM_BYTE + 256 }; /* ids: <0x00>, and the first piece */

static struct test_vocab test_spm_begin(void) {
    static const char *const first[] = {"<unk>", "<s>", "</s>"};
    struct test_vocab t = {.pre = NULL};
    char byte[8];
    for (int i = 0; i < 3; i++) test_piece(&t, first[i], i ? TOKEN_CONTROL : TOKEN_UNKNOWN, 0);
    for (int b = 0; b < 256; b++) {
        snprintf(byte, sizeof byte, "<0x%02X>", (unsigned)b);
        test_piece(&t, byte, TOKEN_BYTE, 0);
    }
    return t;
}

#define BYTE_IDS(b) (SPM_BYTE + (b))

/* Where a blank goes in front. Catches a rule that is taken for another, a flag that is not heeded, U+2581 that is not
 * taken for a blank. */
static void test_spm_blanks(void) {
    enum { BLANK = SPM_FIRST, X, BLANK_X, REF };
    static const struct {
        const char *rule; /* "": none given; NULL: add_space_prefix is false */
        int32_t start, blank, control, defined,
            alone; /* the first token of "x", " x", "x" after </s>, after [R], [R] */
    } rules[] = {{"", BLANK_X, BLANK, BLANK_X, BLANK_X, REF},
                 {NULL, X, BLANK_X, X, X, REF},
                 {"start", BLANK_X, BLANK_X, X, X, REF},
                 {"stretches", BLANK_X, BLANK_X, BLANK_X, BLANK_X, REF},
                 {"control", BLANK_X, BLANK, BLANK_X, X, BLANK}};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const char *rule = rules[i].rule;
        struct test_vocab t = test_spm_begin();
        test_piece(&t, SPM_BLANK, TOKEN_NORMAL, -3);
        test_piece(&t, "x", TOKEN_NORMAL, -2);
        test_piece(&t, SPM_BLANK "x", TOKEN_NORMAL, -1);
        test_piece(&t, "[R]", TOKEN_USER_DEFINED, 0);
        if (!rule) gguf_put_bool(&t.w, "tokenizer.ggml.add_space_prefix", false);
        else if (*rule) gguf_put_str(&t.w, "moe.tokenizer.blanks", rule, strlen(rule));
        if (test_vocab_ready(&t)) {
            static const struct {
                const char *text;
                int at; /* of the token in question */
            } texts[] = {{"x", 0}, {" x", 0}, {"</s>x", 1}, {"[R]x", 1}, {"[R]", 0}, {SPM_BLANK "x", 0}};
            const int32_t want[] = {rules[i].start,   rules[i].blank, rules[i].control,
                                    rules[i].defined, rules[i].alone, rules[i].blank};
            for (size_t k = 0; k < sizeof texts / sizeof *texts; k++) {
                int32_t *ids = NULL;
                tokenize(&t.v, texts[k].text, strlen(texts[k].text), NULL, 3, &ids);
                /* a blank in front of [R] moves what follows */
                const ptrdiff_t at = texts[k].at + (k == 3 && rules[i].alone == BLANK);
                CHECK(arrlen(ids) > at && ids[at] == want[k], "rule '%s', text %zu: token %d", rule ? rule : "none", k,
                      arrlen(ids) > at ? ids[at] : -1);
                arrfree(ids);
            }
            const int32_t after[] = {rules[i].control, rules[i].defined};
            for (int k = 0; k < 2; k++)
                CHECK(test_ids(&t.v, "x", 1, NULL, k ? TOKENIZE_AFTER_DEFINED : TOKENIZE_AFTER_CONTROL, IDS(after[k])),
                      "rule '%s': the rest of a text", rule ? rule : "none");
            CHECK(t.v.bos == 1 && t.v.eos == 2 && t.v.add_bos, "llama.cpp's defaults");
        }
        test_vocab_end(&t);
    }
    struct test_vocab t = test_spm_begin();
    char err[ERR_MAX] = "";
    gguf_put_str(&t.w, "moe.tokenizer.blanks", "last", 4);
    CHECK(test_vocab_load(&t, err) &&
              !strcmp(err, "moe.tokenizer.blanks is 'last', expected start, stretches or control"),
          "%s", err);
    test_vocab_end(&t);
}

/* Bytes, special tokens and what merging must not find. */
static void test_spm_tokens(void) {
    struct test_vocab t = test_spm_begin();
    gguf_put_bool(&t.w, "tokenizer.ggml.add_space_prefix", false);
    int32_t a = test_piece(&t, "a", TOKEN_NORMAL, -9), e = test_piece(&t, "\303\251", TOKEN_NORMAL, -9);
    static const char *const grow[] = {"<",  "s",   ">",    "<s",    "0", "x", "1",
                                       "<0", "<0x", "<0x0", "<0x01", "p", "[", "[p"};
    int32_t id[14];
    for (int i = 0; i < 14; i++) id[i] = test_piece(&t, grow[i], TOKEN_NORMAL, -1);
    test_piece(&t, "[p]", TOKEN_UNUSED, 0);
    test_piece(&t, "]", TOKEN_NORMAL, -9);
    const int32_t space = test_piece(&t, SPM_BLANK, TOKEN_NORMAL, -9);
    test_piece(&t, "a a", TOKEN_NORMAL, 0); /* has a blank of its own, which text never has */
    const int32_t user = test_piece(&t, "two words", TOKEN_USER_DEFINED, 0);
    if (test_vocab_ready(&t)) {
        const struct vocab *v = &t.v;
        uint8_t data[16];
        memset(data, ORIGIN_DATA, sizeof data);
        CHECK(test_ids(v, "a\303\251", 3, NULL, 0, IDS(a, e)), "characters");
        CHECK(test_ids(v, "\303\250", 2, NULL, 0, IDS(BYTE_IDS(0xc3), BYTE_IDS(0xa8))), "the bytes of a character");
        CHECK(test_ids(v, "a\0\n\377\303", 5, NULL, 0,
                       IDS(a, BYTE_IDS(0), BYTE_IDS('\n'), BYTE_IDS(0xff), BYTE_IDS(0xc3))),
              "control characters and malformed bytes");
        CHECK(test_ids(v, "<0x01>", 6, NULL, 3, IDS(id[10], id[2])), "the text of a byte token is text");
        CHECK(test_ids(v, "<s>", 3, NULL, 1, IDS(1)), "a control token of the template");
        CHECK(test_ids(v, "<s>", 3, data, 3, IDS(id[3], id[2])), "the user's is text");
        CHECK(test_ids(v, "[p]", 3, NULL, 3, IDS(id[13], id[13] + 2)), "an unused token");
        CHECK(test_ids(v, "a a", 3, NULL, 3, IDS(a, space, a)), "a token with a blank of its own");
        CHECK(test_ids(v, "two words", 9, data, 0, IDS(user)), "a user-defined token with one");
        CHECK(vocab_bytes(v, BYTE_IDS(0xe6)).n == 1 && *vocab_bytes(v, BYTE_IDS(0xe6)).p == '\346', "a byte");
        CHECK(vocab_bytes(v, space).n == 1 && *vocab_bytes(v, space).p == ' ', "a blank");
        struct printer p = {.v = v, .mute = true, .verbatim = true}; /* a character in bytes comes out whole */
        static const uint8_t euro[] = {0xe2, 0x82, 0xac};
        for (int i = 0; i < 3; i++) {
            CHECK(!arrlen(p.text), "a part of a character is printed");
            printer_token(&p, BYTE_IDS(euro[i]));
        }
        CHECK(arrlen(p.text) == 3 && !memcmp(p.text, euro, 3), "%td bytes", arrlen(p.text));
        arrfree(p.text), arrfree(p.out), arrfree(p.safe);
    }
    test_vocab_end(&t);
}

/* llama.cpp's rule, step by step: of all pairs of neighbors that make a token, the one with the highest score, of equal
 * ones the leftmost, becomes one symbol. */
static void test_spm_naive(const struct test_vocab *t, const char *text, size_t n, int32_t **out) {
    size_t *ends = NULL;
    for (size_t i = 0; i < n; i++) arrput(ends, i + 1);
    for (;;) {
        ptrdiff_t best = -1;
        float score = 0;
        for (ptrdiff_t i = 0; i + 1 < arrlen(ends); i++) {
            const size_t from = i ? ends[i - 1] : 0;
            const int32_t id = bytes_find(&t->v, text + from, ends[i + 1] - from);
            if (id < 0 || (best >= 0 && t->scores[id] <= score)) continue;
            best = i;
            score = t->scores[id];
        }
        if (best < 0) break;
        arrdel(ends, best);
    }
    for (ptrdiff_t i = 0; i < arrlen(ends); i++) {
        const size_t from = i ? ends[i - 1] : 0;
        const int32_t id = bytes_find(&t->v, text + from, ends[i] - from);
        arrput(*out, id >= 0 ? id : BYTE_IDS((uint8_t)text[from]));
    }
    arrfree(ends);
}

/* Random vocabularies with many equal scores, in which most symbols are no tokens by themselves. Catches ties taken from
 * the right, stale candidates, pieces cut where a token reaches across. */
static void test_spm_merging(void) {
    uint64_t seed = 11;
    for (int round = 0; round < 40; round++) {
        struct test_vocab t = test_spm_begin();
        gguf_put_bool(&t.w, "tokenizer.ggml.add_space_prefix", false);
        for (int i = 0; i < 60; i++) {
            char piece[8] = "";
            const size_t n = 1 + rng_next(&seed) % 6;
            for (size_t k = 0; k < n; k++) piece[k] = "abc"[rng_next(&seed) % 3];
            bool had = false;
            for (size_t k = SPM_FIRST; k < arrlenu(t.tokens); k++) had |= !strcmp(sb_cstr(&t.tokens[k]), piece);
            if (!had) test_piece(&t, piece, TOKEN_NORMAL, -(float)(rng_next(&seed) % (round % 2 ? 5 : 1000)));
        }
        if (test_vocab_ready(&t))
            for (int i = 0; i < 50; i++) {
                char text[200];
                size_t n = 1 + rng_next(&seed) % (sizeof text - 1);
                for (size_t k = 0; k < n; k++) text[k] = "abcabcabcd"[rng_next(&seed) % 10];
                int32_t *want = NULL;
                test_spm_naive(&t, text, n, &want);
                arrput(want, -1);
                CHECK(test_ids(&t.v, text, n, NULL, 0, want), "round %d: %.*s", round, (int)n, text);
                arrfree(want);
            }
        test_vocab_end(&t);
    }
    /* with merges, those of the file alone count, in their order, whatever the scores are */
    struct test_vocab t = test_spm_begin();
    gguf_put_bool(&t.w, "tokenizer.ggml.add_space_prefix", false);
    int32_t one[3], more[3];
    for (int i = 0; i < 3; i++) one[i] = test_piece(&t, (char[]){"abc"[i], 0}, TOKEN_NORMAL, -9);
    static const char *const made[] = {"ab", "bc", "abc"}, *const merges[] = {"b c", "a b", "ab c"};
    for (int i = 0; i < 3; i++) {
        char *m = NULL;
        more[i] = test_piece(&t, made[i], TOKEN_NORMAL, -(float)i);
        sb_puts(&m, merges[i]);
        arrput(t.merges, m);
    }
    if (test_vocab_ready(&t)) {
        CHECK(test_ids(&t.v, "abc", 3, NULL, 0, IDS(one[0], more[1])), "bc first; a bc is no merge");
        CHECK(test_ids(&t.v, "ab", 2, NULL, 0, IDS(more[0])), "ab");
    }
    test_vocab_end(&t);
}

/* Gemma's: no blank in front, runs of newlines before anything is merged, user-defined tokens that merging makes, which
 * stand for blanks and are found in text by U+2581 alone. */
static void test_spm_gemma(void) {
    struct test_vocab t = test_spm_begin();
    t.gemma = true;
    const int32_t a = test_piece(&t, "a", TOKEN_NORMAL, 0), blank = test_piece(&t, SPM_BLANK, TOKEN_NORMAL, 0),
                  line = test_piece(&t, "\n", TOKEN_NORMAL, 0), three = test_piece(&t, "\n\n\n", TOKEN_NORMAL, 0),
                  two = test_piece(&t, "\n\n", TOKEN_USER_DEFINED, 0),
                  wide = test_piece(&t, SPM_BLANK SPM_BLANK, TOKEN_USER_DEFINED, 0),
                  more = test_piece(&t, SPM_BLANK "a", TOKEN_NORMAL, 0), row = test_piece(&t, "a\n", TOKEN_NORMAL, 0);
    static const char *const merges[] = {SPM_BLANK " " SPM_BLANK, SPM_BLANK " a", "\n \n", "a \n"};
    for (int i = 0; i < 4; i++) {
        char *m = NULL;
        sb_puts(&m, merges[i]);
        arrput(t.merges, m);
    }
    if (test_vocab_ready(&t)) {
        const struct vocab *v = &t.v;
        CHECK(v->add_bos == (v->bos >= 0) && !v->blanks, "no blank in front");
        CHECK(test_ids(v, "a a", 3, NULL, 0, IDS(a, more)), "a blank before a word");
        CHECK(test_ids(v, "     a", 6, NULL, 0, IDS(wide, wide, more)), "blanks are merged");
        CHECK(test_ids(v, SPM_BLANK SPM_BLANK SPM_BLANK "a", 10, NULL, 0, IDS(wide, more)), "U+2581 is found");
        CHECK(test_ids(v, "a\n", 2, NULL, 0, IDS(a, line)), "a newline is found before it is merged");
        CHECK(test_ids(v, "\n\n\n\n\na", 6, NULL, 0, IDS(three, two, a)), "the longest runs of newlines first");
        CHECK(test_ids(v, "<s>a", 4, NULL, 1, IDS(1, a)), "after a control token");
        CHECK(vocab_bytes(v, wide).n == 2 && !memcmp(vocab_bytes(v, wide).p, "  ", 2), "it stands for blanks");
        CHECK(vocab_bytes(v, row).n == 2 && blank != more, "other tokens");
    }
    test_vocab_end(&t);
}

/* Each broken vocabulary gives its line. */
static void test_spm_refusals(void) {
    static const struct {
        const char *message;
        int what; /* of the switch below */
    } cases[] = {{"tokenizer.ggml.tokens: there is no byte token <0x41>", 0},
                 {"the byte token 68 is '<0x4>', expected <0x00> to <0xFF>", 1},
                 {"the tokens 68 and 69 are both <0x41>", 2},
                 {"the tokens 259 and 260 are both 'ab'", 3},
                 {"the key tokenizer.ggml.scores is missing", 4},
                 {"tokenizer.ggml.scores: expected an array of 261 numbers, found 260 elements", 5},
                 {"tokenizer.ggml.scores: the score of token 260 is not a number", 6},
                 {"the token 260 has 1025 bytes, expected at most 1024", 7},
                 {"tokenizer.ggml.scores: expected an array of 261 numbers, found 1 elements", 8},
                 {"the key tokenizer.ggml.merges is not an array of strings", 9},
                 {"tokenizer.ggml.token_type: expected an array of 261 integers, found 260 elements", 10}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct test_vocab t = test_spm_begin();
        char err[ERR_MAX] = "", long_text[SPM_TOKEN_MAX + 2] = "";
        memset(long_text, 'x', SPM_TOKEN_MAX + 1);
        test_piece(&t, "ab", TOKEN_NORMAL, -1);
        test_piece(&t, cases[i].what == 3 ? "ab" : cases[i].what == 7 ? long_text : "cd", TOKEN_NORMAL, -2);
        switch (cases[i].what) {
        case 0: t.types[BYTE_IDS(0x41)] = TOKEN_NORMAL; break;
        case 1: arrdel(t.tokens[BYTE_IDS(0x41)], 4); break;
        case 2: t.tokens[BYTE_IDS(0x42)][4] = '1'; break;
        case 4: arrfree(t.scores); break;
        case 5: (void)arrpop(t.scores); break;
        case 6: t.scores[260] = NAN; break;
        case 8: arrfree(t.scores), gguf_put_str(&t.w, "tokenizer.ggml.scores", "x", 1); break;
        case 9: gguf_put_u32(&t.w, "tokenizer.ggml.merges", 1); break;
        case 10: (void)arrpop(t.types); break;
        }
        CHECK(test_vocab_load(&t, err) && !strcmp(err, cases[i].message), "'%s', expected '%s'", err, cases[i].message);
        test_vocab_end(&t);
    }
    struct test_vocab t = test_spm_begin(); /* a piece of the largest size, an empty one, odd scores */
    char text[SPM_TOKEN_MAX + 1] = "";
    memset(text, 'x', SPM_TOKEN_MAX);
    test_piece(&t, text, TOKEN_NORMAL, -INFINITY);
    test_piece(&t, "", TOKEN_NORMAL, INFINITY);
    if (test_vocab_ready(&t)) CHECK(t.v.token[SPM_FIRST].n == SPM_TOKEN_MAX, "a long token");
    test_vocab_end(&t);
}

/* Megabytes without a place to cut, and others. Quadratic time would be hours. */
static void test_spm_pastes(void) {
    static const char *const units[] = {"a", " ", "\n", "ab", "aab ", "\344\270\255", "\360\237\230\200", SPM_BLANK};
    enum { BYTES = SANITIZED ? 1 << 18 : 1 << 20 };
    char *text = xmalloc(BYTES), grown[20];
    struct test_vocab t = test_spm_begin();
    gguf_put_bool(&t.w, "tokenizer.ggml.add_space_prefix", false);
    for (int k = 1; k <= 16; k++) { /* runs of every length up to 16, as in Mistral's: all blanks have one score */
        memset(grown, 'a', 16), grown[k] = 0;
        test_piece(&t, grown, TOKEN_NORMAL, -(float)k);
        char *blanks = NULL;
        for (int i = 0; i < k; i++) sb_puts(&blanks, SPM_BLANK);
        test_piece(&t, sb_cstr(&blanks), TOKEN_NORMAL, -1e9f);
        arrfree(blanks);
    }
    test_piece(&t, "ab", TOKEN_NORMAL, -1);
    test_piece(&t, "ba", TOKEN_NORMAL, -1);
    test_piece(&t, "\344\270\255\344\270\255", TOKEN_NORMAL, -1);
    if (test_vocab_ready(&t)) {
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            const size_t k = strlen(units[u]);
            const bool blank = !strcmp(units[u], SPM_BLANK);
            for (size_t i = 0; i < BYTES; i++) text[i] = units[u][i % k];
            if (!blank) test_paste(&t.v, units[u], text, BYTES / k * k);
            int32_t *ids = NULL; /* as U+2581 a run of blanks is the same */
            if (blank) tokenize(&t.v, text, 16 * 3 * 1000, NULL, 0, &ids);
            CHECK(!blank || (arrlen(ids) == 1000 && vocab_bytes(&t.v, ids[999]).n == 16), "%td tokens", arrlen(ids));
            arrfree(ids);
        }
        uint64_t seed = 5;
        for (size_t i = 0; i < BYTES; i++) text[i] = "aaaab "[rng_next(&seed) % 6];
        test_paste(&t.v, "random letters", text, BYTES);
        for (size_t i = 0; i < BYTES; i++) text[i] = (char)rng_next(&seed);
        test_paste(&t.v, "random bytes", text, BYTES);
    }
    test_vocab_end(&t);
    free(text);
}

/* ---- broken vocabularies ---- */

static void test_vocab_refusals(void) {
    static const struct {
        const char *what, *model, *pre;
        int tokens, types, merges; /* counts; -1: the key is missing; -2: it has the wrong type */
        const char *message;       /* part of it; NULL: loads */
    } cases[] = {
        {"good", "gpt2", "gpt-2", 3, 3, 1, NULL},
        {"no types", "gpt2", "gpt-2", 3, -1, 1, NULL},
        {"no model", NULL, "gpt-2", 3, 3, 1, "tokenizer.ggml.model"},
        {"another model", "bert", "gpt-2", 3, 3, 1, "'bert'"},
        {"no bytes", "llama", NULL, 3, 3, 1, "no byte token <0x00>"},
        {"no pre", "gpt2", NULL, 3, 3, 1, "tokenizer.ggml.pre"},
        {"another pre", "gpt2", "viking", 3, 3, 1, "'viking'"},
        {"empty pre", "gpt2", "", 3, 3, 1, "''"},
        {"no tokens", "gpt2", "gpt-2", -1, 3, 1, "tokenizer.ggml.tokens"},
        {"zero tokens", "gpt2", "gpt-2", 0, 3, 1, "0 elements"},
        {"tokens are numbers", "gpt2", "gpt-2", -2, 3, 1, "array of strings"},
        {"few types", "gpt2", "gpt-2", 3, 2, 1, "3 integers"},
        {"types are floats", "gpt2", "gpt-2", 3, -2, 1, "3 integers"},
        {"no merges", "gpt2", "gpt-2", 3, 3, -1, "tokenizer.ggml.merges"},
        {"merges are numbers", "gpt2", "gpt-2", 3, 3, -2, "array of strings"},
        {"no merges, ranked", "gpt2", "kimi-k2", 3, 3, -1, NULL},
    };
    static const float numbers[] = {1, 2, 3};
    static const int32_t types[] = {TOKEN_NORMAL, 77, -5};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct gguf_writer w = {0};
        struct gguf g;
        struct vocab v;
        char err[ERR_MAX] = "";
        size_t n = 0;
        if (cases[i].model) gguf_put_str(&w, "tokenizer.ggml.model", cases[i].model, strlen(cases[i].model));
        if (cases[i].pre) gguf_put_str(&w, "tokenizer.ggml.pre", cases[i].pre, strlen(cases[i].pre));
        const char *keys[] = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"};
        const int counts[] = {cases[i].tokens, cases[i].merges};
        for (int k = 0; k < 2; k++) {
            if (counts[k] == -2) gguf_put_array(&w, keys[k], GGUF_V_F32, 3, numbers);
            if (counts[k] < 0) continue;
            gguf_put_array(&w, keys[k], GGUF_V_STR, (uint64_t)counts[k], NULL);
            for (int e = 0; e < counts[k]; e++) gguf_put_bytes(&w, &"abc"[e], 1);
        }
        if (cases[i].types == -2) gguf_put_array(&w, "tokenizer.ggml.token_type", GGUF_V_F32, 3, numbers);
        if (cases[i].types >= 0)
            gguf_put_array(&w, "tokenizer.ggml.token_type", GGUF_V_I32, (uint64_t)cases[i].types, types);
        uint8_t *image = gguf_header(&w, &n);
        CHECK(!gguf_parse(&g, image, n, err, sizeof err), "%s: %s", cases[i].what, err);
        int rc = vocab_load(&v, &g, err);
        CHECK(cases[i].message ? rc && strstr(err, cases[i].message) : !rc, "%s: %d, '%s'", cases[i].what, rc, err);
        if (!rc) CHECK(test_ids(&v, "ab\xffz", 4, NULL, 3, IDS(0, 1)), "%s: bytes without a token", cases[i].what);
        if (!rc) vocab_free(&v);
        gguf_close(&g);
        gguf_writer_free(&w);
        free(image);
    }
}

/* Strange entries load and do no harm. */
static void test_vocab_hostile(void) {
    struct test_vocab t = test_vocab_begin("llama-bpe");
    static const char *const merges[] = {"",     " ",    "a",     "ab",     " b",     "a ", "a  b",
                                         "zz b", "a zz", "b c d", "\377 a", "a \303", "x y"};
    int32_t xy = test_merge(&t, "x", "y");
    test_merge(&t, "y", "z");
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++) {
        char *m = NULL;
        sb_puts(&m, merges[i]);
        arrput(t.merges, m);
    }
    test_add(&t, "xy", TOKEN_NORMAL);
    test_add(&t, "", TOKEN_CONTROL);
    test_add(&t, "", TOKEN_NORMAL);
    test_add(&t, "\377\376", TOKEN_NORMAL);
    test_add(&t, "\303", TOKEN_USER_DEFINED);
    test_add(&t, "\346\261\211", TOKEN_NORMAL); /* not in the alphabet */
    int32_t twice = test_add(&t, "@@", TOKEN_CONTROL);
    test_add(&t, "@@", TOKEN_CONTROL);
    int32_t unknown = test_add(&t, "<unk>", TOKEN_UNKNOWN);
    gguf_put_u32(&t.w, "tokenizer.ggml.eos_token_id", UINT32_MAX);
    gguf_put_str(&t.w, "tokenizer.ggml.bos_token_id", "x", 1);
    gguf_put_str(&t.w, "tokenizer.ggml.eos_token_ids", "x", 1);
    if (test_vocab_ready(&t)) {
        CHECK(t.v.eos == -1 && t.v.bos == -1 && !t.v.add_bos, "ids that are none");
        CHECK(test_ids(&t.v, "xyzab", 5, NULL, 3, IDS(xy, 'z', 'a', 'b')), "the first of two counts, odd ones do not");
        CHECK(test_ids(&t.v, "\346\261\211", 3, NULL, 3, IDS(0xe6, 0xb1, 0x89)), "text outside the alphabet");
        CHECK(test_ids(&t.v, "@@<unk>", 7, NULL, 1, IDS(twice, unknown)), "the lowest id of two");
        CHECK(vocab_bytes(&t.v, unknown).n == 5, "literal text");
    }
    test_vocab_end(&t);
    /* a control token spelt like the result of a merge: merging may not produce it */
    t = test_vocab_begin("gpt-2");
    test_merge(&t, "x", "y");
    t.types[256] = TOKEN_CONTROL;
    if (test_vocab_ready(&t)) {
        CHECK(test_ids(&t.v, "xy", 2, NULL, 0, IDS('x', 'y')), "merging made a control token");
        CHECK(test_ids(&t.v, "xy", 2, NULL, TOKENIZE_CONTROL, IDS(256)), "the template's");
    }
    test_vocab_end(&t);
    /* merges whose result is the token after that of the merge before, but not by the rules */
    t = test_vocab_begin("gpt-2");
    xy = test_add(&t, "xy", TOKEN_NORMAL);
    test_merge(&t, "a", "b");
    test_merge(&t, "x", "y");
    int32_t part = test_merge(&t, "\346", "\261"), whole = test_merge(&t, "\346\261", "\211");
    arrsetlen(t.tokens[whole], 0);
    sb_puts(&t.tokens[whole], "\346\261\211");
    if (test_vocab_ready(&t)) {
        CHECK(test_ids(&t.v, "xy", 2, NULL, 0, IDS(xy)), "the lowest id of two results");
        CHECK(test_ids(&t.v, "\346\261\211", 3, NULL, 0, IDS(part, 0x89)), "a result outside the alphabet");
    }
    test_vocab_end(&t);
}

/* Special tokens of the largest size and above; tokens, then merges, that all want the same few slots of their table.
 * */
static void test_vocab_work(void) {
    char text[SPECIAL_MAX + 2] = "", err[ERR_MAX] = "";
    for (int more = 0; more < 2; more++) {
        struct test_vocab t = test_vocab_begin("gpt-2");
        test_merge(&t, "x", "y");
        memset(text, 'x', (size_t)(SPECIAL_MAX + more));
        test_add(&t, text, TOKEN_USER_DEFINED);
        int rc = test_vocab_load(&t, err);
        CHECK(more ? rc && !strcmp(err, "the special token 257 has 1025 bytes, expected at most 1024") : !rc,
              "%d, '%s'", rc, err);
        test_vocab_end(&t);
    }
    for (int merges = 0; merges < 2; merges++) {
        struct test_vocab t = test_vocab_begin("gpt-2");
        for (uint64_t l = 1; l < 256; l++)
            for (uint64_t r = 1; r < 256; r++) {
                char two[2] = {(char)l, (char)r}, *s = NULL;
                bool wanted = merges ? (l << 32 | r) * 0x9e3779b97f4a7c15u >> 53 < 36 : token_hash(two, 2) >> 20 < 72;
                if (!wanted) continue;
                test_alphabet(&s, two, 2);
                if (merges) test_merge(&t, (char[]){two[0], 0}, (char[]){two[1], 0}), arrfree(s);
                else test_token(&t, s, TOKEN_NORMAL);
            }
        int rc = test_vocab_load(&t, err);
        const char *want = merges ? "tokenizer.ggml.merges: more than 1024 merges collide"
                                  : "tokenizer.ggml.tokens: more than 1024 tokens collide";
        CHECK(rc && !strcmp(err, want), "%d, '%s', %td tokens", rc, err, arrlen(t.tokens));
        test_vocab_end(&t);
    }
}

#define TESTS_VOCAB                                                                                                    \
    {"vocab/golden", test_vocab_golden}, {"vocab/cuts", test_vocab_cuts}, {"vocab/names", test_vocab_names},           \
        {"vocab/merging", test_vocab_merging}, {"vocab/ranked", test_vocab_ranked},                                    \
        {"vocab/origins", test_vocab_origins}, {"vocab/stops", test_vocab_stops}, {"vocab/nfc", test_vocab_nfc},       \
        {"vocab/detok", test_vocab_detok}, {"vocab/pastes", test_vocab_pastes}, {"vocab/marks", test_vocab_marks},     \
        {"vocab/refusals", test_vocab_refusals}, {"vocab/hostile", test_vocab_hostile},                                \
        {"vocab/work", test_vocab_work}, {"vocab/spm_blanks", test_spm_blanks}, {"vocab/spm_tokens", test_spm_tokens}, \
        {"vocab/spm_merging", test_spm_merging}, {"vocab/spm_refusals", test_spm_refusals},                            \
        {"vocab/spm_gemma", test_spm_gemma}, {"vocab/spm_pastes", test_spm_pastes},
