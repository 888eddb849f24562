/* Tokenizers of releases, through build/moe-convert: the 10,000 texts of tests/golden/tokens in each of its sets, against
 * what the tokenizers and sentencepiece libraries make of them; SentencePiece's vocabularies, files and refusals. */

enum { TOKENS_TEXTS = 10000, TOKENS_VOCAB = 1750 };

/* Text `seed` of tests/oracle/gen_tokens.py. */
static char *tokens_text(const json_t *parts, const json_t *ranges, uint64_t seed) {
    char *out = NULL, one[5];
    for (uint64_t n = 1 + rng_next(&seed) % 12; n; n--) {
        const uint64_t r = rng_next(&seed), k = rng_next(&seed);
        const char *s = one;
        if (r % 8 < 6) {
            s = json_string_value(json_array_get(parts, (r >> 8) % json_array_size(parts)));
        } else {
            const json_t *range = json_array_get(ranges, (r >> 8) % json_array_size(ranges));
            const uint64_t first = (uint64_t)json_integer_value(json_array_get(range, 0)),
                           last = (uint64_t)json_integer_value(json_array_get(range, 1));
            one[utf8proc_encode_char((utf8proc_int32_t)(first + (r >> 32) % (last - first + 1)), (uint8_t *)one)] = 0;
        }
        uint64_t times = k % 512 == 1 ? 1 + (k >> 8) % 300 : k % 16 == 0 ? 1 + (k >> 8) % 12 : 1;
        while (times--) sb_puts(&out, s);
    }
    return out;
}

static json_t *tokens_json(const char *file) {
    char path[128];
    json_error_t e;
    snprintf(path, sizeof path, "tests/golden/tokens/%s", file);
    json_t *j = json_load_file(path, 0, &e);
    CHECK(j, "%s: %s", path, e.text);
    return j;
}

/* A directory with a vocabulary of TOKENS_VOCAB. tokenizer: taken over; NULL: there is no tokenizer.json. */
static void tokens_begin(struct hf *h, const char *name, json_t *tokenizer) {
    hf_begin(h, name);
    hf_qwen3(h);
    static const char *const wide[] = {"model.embed_tokens", "lm_head"};
    for (int i = 0; i < 2; i++) {
        char full[64];
        snprintf(full, sizeof full, "%s.weight", wide[i]);
        hf_drop(h, full);
        hf_linear(h, wide[i], TOKENS_VOCAB, HF_EMBD, HF_BF16);
    }
    json_object_set_new(h->config, "vocab_size", json_integer(TOKENS_VOCAB));
    json_decref(h->tokenizer);
    h->tokenizer = tokenizer;
}

/* The same with tokenizer.model. */
static void tokens_begin_model(struct hf *h, const char *name, const char *data, size_t n) {
    tokens_begin(h, name, NULL);
    hf_set(h->tokenizer_config, "{\"eos_token\":\"</s>\",\"bos_token\":\"<s>\",\"add_bos_token\":true}");
    hf_write(h, "tokenizer.model", data, n);
}

static char *tokens_model(void) {
    char *data = NULL, err[ERR_MAX] = "";
    CHECK(!read_file("tests/golden/tokens/pieces.model", &data, err), "%s", err);
    return data;
}

/* The tokenizer.json of a set of sets.json. */
static json_t *tokens_tokenizer(const json_t *set) {
    json_t *t = tokens_json(json_string_value(json_object_get(set, "base"))), *keys = json_object_get(set, "keys"), *v;
    const char *key;
    json_object_foreach(keys, key, v) {
        if (strcmp(key, "added_tokens")) json_object_set(t, key, v);
        else json_array_extend(json_object_get(t, key), v);
    }
    if (json_object_get(set, "model")) json_object_update(json_object_get(t, "model"), json_object_get(set, "model"));
    return t;
}

/* Converts the tokenizer of a set and loads the vocabulary. */
static bool tokens_convert(struct hf *h, const json_t *set, struct vocab *v) {
    const char *base = json_string_value(json_object_get(set, "base")),
               *pre = json_string_value(json_object_get(set, "pre")),
               *blanks = json_string_value(json_object_get(set, "blanks"));
    char err[ERR_MAX] = "";
    if (strstr(base, ".model")) {
        char *data = tokens_model();
        tokens_begin_model(h, "tokens", data, arrlenu(data));
        arrfree(data);
    } else {
        tokens_begin(h, "tokens", tokens_tokenizer(set));
    }
    if (!hf_convert(h) || !CHECK(!vocab_load(v, &h->g, err), "%s", err)) return false;
    if (pre) {
        CHECK(key_is(&h->g, "tokenizer.ggml.pre", pre), "%s: the pre-tokenizer has another name", pre);
        return true;
    }
    const char *rule = strcmp(blanks, "all") ? blanks : "";
    CHECK(key_is(&h->g, "tokenizer.ggml.model", "llama") && key_is(&h->g, "tokenizer.ggml.pre", "default"), "names");
    CHECK(key_int(&h->g, "tokenizer.ggml.add_space_prefix") == (*blanks != 0), "add_space_prefix");
    CHECK(key_is(&h->g, "moe.tokenizer.blanks", rule), "the rule is not '%s'", rule);
    return true;
}

/* Checks that ids give s (n) back, but for what is documented: NFC, blanks in front of stretches, blanks for U+2581. */
static void tokens_back(const struct vocab *v, const char *s, size_t n, const int32_t *ids, const char *what) {
    char *want = NULL, *got = NULL, *printed = NULL;
    struct detok d = {0};
    unsigned before = 0;
    bool begins = true;
    if (v->nfc) nfc_append(&want, s, n);
    else if (v->spm) spm_append(&want, s, n, false);
    else sb_put(&want, s, n);
    for (size_t i = 0; i < arrlenu(ids); i++) {
        struct gguf_str b = vocab_bytes(v, ids[i]);
        const size_t at = arrlenu(got) < arrlenu(want) ? arrlenu(got) : arrlenu(want);
        const bool special = is_special(vocab_type(v, ids[i]));
        detok_put(v, &d, ids[i], &printed);
        if (begins && !special && blank_wanted(v, before, want + at, arrlenu(want) - at)) {
            CHECK(b.n && *b.p == ' ', "%s: no blank in front", what);
            b.p++, b.n--;
        }
        sb_put(&got, b.p, b.n);
        begins = special;
        if (special) before = tokenize_after(v, ids[i]);
    }
    detok_end(&d, &printed);
    CHECK(arrlenu(got) == arrlenu(want) && (!got || !memcmp(got, want, arrlenu(got))),
          "%s: the tokens do not give it back: [%s], expected [%s]", what, sb_cstr(&got), sb_cstr(&want));
    CHECK(utf8_valid(printed, arrlenu(printed)) &&
              !memmem(printed, arrlenu(printed), "\xef\xbf\xbd", 3) == !memmem(want, arrlenu(want), "\xef\xbf\xbd", 3),
          "%s: printed as [%s]", what, sb_cstr(&printed));
    arrfree(want), arrfree(got), arrfree(printed);
}

/* All texts in one set. As data they never give a control token. */
static void tokens_compare(const struct vocab *v, char *const *texts, const uint8_t *expected, const char *name,
                           bool pieces) {
    const unsigned flags = pieces ? TOKENIZE_TAGS : TOKENIZE_TAGS | TOKENIZE_CONTROL;
    int32_t *ids = NULL;
    uint8_t *data = NULL;
    char what[128];
    for (int i = 0, wrong = 0; i < TOKENS_TEXTS && wrong < 3; i++) {
        const size_t n = arrlenu(texts[i]);
        uint32_t h = 0x811c9dc5u;
        arrsetlen(ids, 0);
        tokenize(v, texts[i], n, NULL, flags, &ids);
        for (size_t k = 0; k < arrlenu(ids); k++) h = (h ^ (uint32_t)ids[k]) * 0x01000193u;
        snprintf(what, sizeof what, "%s, text %d", name, i);
        wrong += !CHECK(((h ^ h >> 16) & 0xffff) == (uint32_t)(expected[2 * i] | expected[2 * i + 1] << 8),
                        "%s: other tokens: tests/oracle/gen_tokens.py show '%s' %d", what, name, i);
        tokens_back(v, texts[i], n, ids, what);
        arrsetlen(ids, 0);
        arrsetlen(data, n);
        memset(data, ORIGIN_DATA, n);
        tokenize(v, texts[i], n, data, TOKENIZE_TAGS | TOKENIZE_CONTROL, &ids);
        for (size_t k = 0; k < arrlenu(ids); k++) {
            const int type = vocab_type(v, ids[k]);
            CHECK(type != TOKEN_CONTROL && type != TOKEN_UNKNOWN, "%s: data became token %d", what, ids[k]);
        }
    }
    arrfree(ids), arrfree(data);
}

/* Catches, among much else: another expression; NFC left out or added; ties of SentencePiece taken from the right; its
 * merges taken in the order of scores or the other way round; a blank too many or too few in front; byte tokens or
 * control text found by merging; pieces cut where a token reaches across. */
static void tokens_sets(bool bytes) {
    json_t *all = tokens_json("parts.json"), *sets = tokens_json("sets.json"), *set;
    char *expected = NULL, *texts[TOKENS_TEXTS], err[ERR_MAX] = "";
    size_t i;
    for (int k = 0; k < TOKENS_TEXTS; k++)
        texts[k] = tokens_text(json_object_get(all, "parts"), json_object_get(all, "ranges"), (uint64_t)k);
    CHECK(!read_file("tests/golden/tokens/expected.bin", &expected, err), "%s", err);
    if (CHECK(arrlenu(expected) == 2 * TOKENS_TEXTS * json_array_size(sets), "%zu bytes", arrlenu(expected))) {
        json_array_foreach(sets, i, set) {
            const char *base = json_string_value(json_object_get(set, "base"));
            struct hf h;
            struct vocab v = {0};
            if (bytes != !strcmp(base, "bytes.json")) continue;
            if (tokens_convert(&h, set, &v))
                tokens_compare(&v, texts, (uint8_t *)expected + 2 * TOKENS_TEXTS * i,
                               json_string_value(json_object_get(set, "name")), strstr(base, ".model"));
            vocab_free(&v);
            hf_end(&h);
        }
    }
    for (int k = 0; k < TOKENS_TEXTS; k++) arrfree(texts[k]);
    arrfree(expected);
    json_decref(all);
    json_decref(sets);
}

static void test_tokens_bytes(void) { tokens_sets(true); }
static void test_tokens_pieces(void) { tokens_sets(false); }

/* A session that holds the first j tokens of a text changes nothing in its tokens, and none of those up to the last
 * special one are made anew, even where they are not what tokenize would make. Catches a blank in front that is looked
 * for in the text, and the rest of a text that is taken for its beginning. */
static void test_tokens_session(void) {
    json_t *all = tokens_json("parts.json"), *sets = tokens_json("sets.json"), *set;
    size_t i;
    json_array_foreach(sets, i, set) {
        const char *name = json_string_value(json_object_get(set, "name"));
        struct hf h;
        struct vocab v = {0};
        int compared = 0;
        if (!json_object_get(set, "blanks")) continue;
        bool ready = tokens_convert(&h, set, &v);
        v.add_bos = false;
        for (uint64_t seed = 0; ready && seed < TOKENS_TEXTS / 2; seed++) {
            struct tpl_text text = {
                .s = tokens_text(json_object_get(all, "parts"), json_object_get(all, "ranges"), seed)};
            const size_t n = arrlenu(text.s);
            struct model m = {.vocab = &v};
            int32_t *want = NULL, *ids = NULL;
            arrsetlen(text.origin, n);
            memset(text.origin, ORIGIN_TEMPLATE, n);
            tokenize(&v, text.s, n, NULL, TOKENIZE_CONTROL, &want);
            bool special = false;
            for (size_t k = 0; k < arrlenu(want); k++) special |= token_is_special(&v, want[k]);
            for (size_t j = 0; special && j <= arrlenu(want); j++) {
                struct session s = {.tokens = want, .n_past = (int)j};
                const struct chat c = {.m = &m, .s = &s};
                arrsetlen(ids, 0);
                chat_tokenize(&c, &text, &ids);
                CHECK(arrlenu(ids) == arrlenu(want) && !memcmp(ids, want, arrlenu(want) * sizeof *want),
                      "%s, text %d, %zu tokens in the session: other tokens", name, (int)seed, j);
                compared++;
            }
            arrfree(want), arrfree(ids);
            text_free(&text);
        }
        CHECK(!ready || compared > 1000, "%s: %d comparisons", name, compared);
        if (ready) { /* "<s>", a blank and "of" letter by letter, "</s>" */
            static const char *const letters[] = {"<s>", " ", "o", "f", "</s>"};
            int32_t odd[5], *ids = NULL;
            struct tpl_text text = {0};
            struct model m = {.vocab = &v};
            struct session s = {.tokens = odd, .n_past = 5};
            const struct chat c = {.m = &m, .s = &s};
            const bool front = blank_wanted(&v, TOKENIZE_AFTER_CONTROL, "of", 2);
            for (int k = 0; k < 5; k++) odd[k] = vocab_find(&v, letters[k]);
            sb_puts(&text.s, front ? "<s>of</s>of" : "<s> of</s>of");
            arrsetlen(text.origin, arrlenu(text.s));
            memset(text.origin, ORIGIN_TEMPLATE, arrlenu(text.s));
            chat_tokenize(&c, &text, &ids);
            CHECK(arrlenu(ids) > 5 && !memcmp(ids, odd, sizeof odd), "%s: the tokens of the session are not kept",
                  name);
            arrfree(ids);
            text_free(&text);
        }
        vocab_free(&v);
        hf_end(&h);
    }
    json_decref(all);
    json_decref(sets);
}

/* ---- tokenizer.json and tokenizer.model of SentencePiece: what is written, what is refused ---- */

static double tokens_score(const struct hf *h, int64_t id) {
    const struct gguf_kv *kv = gguf_find(&h->g, "tokenizer.ggml.scores");
    double x = NAN;
    CHECK(kv && gguf_elem_f64(kv, (uint64_t)id, &x), "no score of token %d", (int)id);
    return x;
}

static int64_t tokens_type(const struct hf *h, int64_t id) {
    const struct gguf_kv *kv = gguf_find(&h->g, "tokenizer.ggml.token_type");
    int64_t t = -1;
    CHECK(kv && gguf_elem_int(kv, (uint64_t)id, &t), "no type of token %d", (int)id);
    return t;
}

/* Scores and types. Catches a score that is the place of another merge, scores of a tokenizer.model that belongs to
 * another tokenizer, an unused or user-defined piece with the type of another. */
static void test_tokens_written(void) {
    json_t *pieces = tokens_json("pieces.json"), *single = tokens_json("single.json");
    const json_t *vocab = json_object_get(json_object_get(single, "model"), "vocab"),
                 *merges = json_object_get(json_object_get(single, "model"), "merges");
    json_t *normalizer =
        json_pack("{s:s,s:{s:s},s:s}", "type", "Replace", "pattern", "String", " ", "content", SPM_BLANK);
    char *model = tokens_model();
    struct hf h;
    json_object_set(single, "normalizer", normalizer);
    json_object_set_new(pieces, "normalizer", normalizer);
    tokens_begin(&h, "scores", json_incref(single));
    if (hf_convert(&h)) {
        CHECK(gguf_find(&h.g, "tokenizer.ggml.merges")->n == json_array_size(merges), "merges");
        for (size_t i = 0; i < json_array_size(merges); i++) {
            char whole[128];
            const json_t *pair = json_array_get(merges, i);
            snprintf(whole, sizeof whole, "%s%s", json_string_value(json_array_get(pair, 0)),
                     json_string_value(json_array_get(pair, 1)));
            const int64_t id = json_integer_value(json_object_get(vocab, whole));
            CHECK(tokens_score(&h, id) == -(double)i, "merge %zu: score %g", i, tokens_score(&h, id));
        }
        CHECK(tokens_score(&h, 259) == -1e9 && tokens_type(&h, 259) == TOKEN_NORMAL, "a character");
        CHECK(tokens_type(&h, 3) == TOKEN_BYTE && tokens_type(&h, 258) == TOKEN_BYTE, "bytes");
        CHECK(tokens_type(&h, 1) == TOKEN_CONTROL && tokens_type(&h, TOKENS_VOCAB - 1) == TOKEN_UNUSED, "others");
    }
    hf_write(&h, "tokenizer.model", model, arrlenu(model)); /* of another vocabulary */
    if (hf_convert(&h)) {
        CHECK(strstr(h.err, "another token than in tokenizer.json: its scores are not used"), "%s", h.err);
        CHECK(tokens_score(&h, 259) == -1e9, "scores of another vocabulary");
    }
    hf_end(&h);
    tokens_begin(&h, "scores", json_incref(pieces));
    hf_write(&h, "tokenizer.model", model, arrlenu(model));
    if (hf_convert(&h)) CHECK(tokens_score(&h, 300) == -37 && gguf_find(&h.g, "tokenizer.ggml.merges"), "both files");
    hf_end(&h);
    json_t *words = json_object_get(json_object_get(pieces, "model"), "vocab"), *v;
    const char *word, *last = NULL;
    json_object_foreach(words, word, v) if (json_integer_value(v) == 1699) last = word;
    json_object_del(words, last);
    json_object_set_new(words, "zzzz", json_integer(1699));
    tokens_begin(&h, "scores", json_incref(pieces));
    hf_write(&h, "tokenizer.model", model, arrlenu(model)); /* of a vocabulary with one other token */
    if (hf_convert(&h)) CHECK(strstr(h.err, "piece 1699 of tokenizer.model is '"), "%s", h.err);
    hf_end(&h);
    tokens_begin_model(&h, "scores", model, arrlenu(model));
    hf_set(h.tokenizer_config,
           "{\"unk_token\":\"<unk>\",\"added_tokens_decoder\":{\"1701\":{\"content\":\"<x>\",\"special\":"
           "true},\"1702\":{\"content\":\"a\xe2\x96\x81"
           "b\",\"special\":false}}}");
    hf_write(&h, "added_tokens.json", "{\"<|y|>\":1700}", 14);
    if (hf_convert(&h)) {
        static const int types[] = {TOKEN_UNKNOWN, TOKEN_CONTROL,      TOKEN_CONTROL,      TOKEN_CONTROL,
                                    TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_USER_DEFINED, TOKEN_BYTE};
        for (int i = 0; i < 8; i++) CHECK(tokens_type(&h, i) == types[i], "type of token %d", i);
        CHECK(tokens_score(&h, 300) == -37 && !gguf_find(&h.g, "tokenizer.ggml.merges"), "tokenizer.model alone");
        CHECK(tokens_type(&h, 1700) == TOKEN_CONTROL && tokens_type(&h, 1701) == TOKEN_CONTROL, "added tokens");
        CHECK(!strcmp(key_string(&h.g, "tokenizer.ggml.tokens", 1702), "a b"), "a blank in a user-defined token");
        CHECK(key_int(&h.g, "tokenizer.ggml.bos_token_id") == 1 && key_int(&h.g, "tokenizer.ggml.eos_token_id") == 2 &&
                  key_int(&h.g, "tokenizer.ggml.unknown_token_id") == 0 &&
                  key_int(&h.g, "tokenizer.ggml.add_bos_token") == 1,
              "special ids");
    }
    hf_set(h.tokenizer_config, "{\"add_prefix_space\":false}");
    if (hf_convert(&h)) CHECK(key_int(&h.g, "tokenizer.ggml.add_space_prefix") == 0, "add_prefix_space");
    hf_set(h.tokenizer_config, "{\"add_prefix_space\":true,\"legacy\":false}");
    if (hf_convert(&h)) CHECK(key_is(&h.g, "moe.tokenizer.blanks", "start"), "legacy");
    hf_end(&h);
    json_decref(pieces);
    json_decref(single);
    arrfree(model);
}

/* Keys of tokenizer.json that are merged into pieces.json, and the message. */
static void test_tokens_refusals(void) {
    static const char *const cases[][2] = {
        {"{\"normalizer\":null}", "key 'normalizer': expected Replace, because of byte_fallback"},
        {"{\"normalizer\":{\"type\":\"NFKC\"}}",
         "expected none, Prepend, Replace or a Sequence of those, found \"NFKC\""},
        {"{\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"_\"}}",
         "'normalizer.prepend': expected U+2581, found \"_\""},
        {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"x\"},\"content\":\"y\"}}",
         "expected a blank"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\"}}", "expected Metaspace, because of byte_fallback, found \"Split\""},
        {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\xe2\x96\x81\"}}",
         "'pre_tokenizer.split': expected false"},
        {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\xe2\x96\x81\",\"split\":false,\"prepend_"
         "scheme\":\"last\"}}",
         "always, first or never"},
        {"{\"decoder\":{\"type\":\"WordPiece\"}}",
         "expected Replace, ByteFallback, Fuse, Strip, Metaspace or a Sequence"},
        {"{\"model\":{\"ignore_merges\":true}}", "'model.ignore_merges': expected false, because of byte_fallback"},
        {"{\"model\":{\"merges\":[]}}", "the tokenizer has no merges"},
        {"{\"model\":{\"byte_fallback\":false}}", "expected none, NFC or a Sequence of those, found \"Replace\""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct hf h;
        json_t *t = tokens_json("pieces.json"), *keys = json_loads(cases[i][0], 0, NULL),
               *model = json_object_get(keys, "model");
        hf_set(t,
               "{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\xe2\x96\x81\"}}");
        if (model) json_object_update(json_object_get(t, "model"), model);
        else json_object_update(t, keys);
        json_decref(keys);
        tokens_begin(&h, "refused", t);
        const int rc = hf_convert_to(&h, "out.gguf");
        CHECK(rc == 1 && strstr(h.err, cases[i][1]) && !strncmp(h.err, "moe-convert: ", 13), "%s: exit %d: %s",
              cases[i][0], rc, h.err);
        hf_end(&h);
    }
}

/* Appends a field of a protobuf message: a varint, or bytes. */
static void pb_varint(char **out, uint64_t v) {
    for (; v > 127; v >>= 7) arrput(*out, (char)(v | 128));
    arrput(*out, (char)v);
}
static void pb_number(char **out, uint32_t field, uint64_t v) {
    pb_varint(out, field << 3);
    pb_varint(out, v);
}
static void pb_bytes(char **out, uint32_t field, const char *s, size_t n) {
    pb_varint(out, field << 3 | 2);
    pb_varint(out, n);
    sb_put(out, s, n);
}
static void pb_piece(char **out, const char *text, size_t n, float score, int type) {
    char *p = NULL;
    if (text) pb_bytes(&p, 1, text, n);
    pb_varint(&p, 2 << 3 | 5);
    sb_put(&p, (const char *)&score, 4);
    pb_number(&p, 3, (uint64_t)type);
    pb_bytes(out, 1, p, arrlenu(p));
    arrfree(p);
}

/* Files of SentencePiece that are wrong in one way each. */
static void test_tokens_models(void) {
    static const char *const messages[] = {
        NULL, /* a good one */
        "the model has the type 1, expected 2 (BPE)",
        "the model has no tokens for bytes (byte_fallback)",
        "the model puts blanks at the ends of words, expected in front",
        "the model normalizes characters, expected the normalizer 'identity'",
        "the model merges blanks (remove_extra_whitespaces), expected not",
        "the model does not write U+2581 for a blank (escape_whitespaces)",
        "the score of piece 259 is not finite",
        "piece 259 has the type 7, expected 1 to 6",
        "the text of piece 259 is not UTF-8",
        "the text of piece 259 is not UTF-8", /* a NUL */
        "piece 259 has no text",
        "piece 259 is 'x', expected a byte <0x00> to <0xFF>",
        "tokenizer.model: the file is cut off",
        "this is not a model of SentencePiece", /* a type of field that there is not */
        "this is not a model of SentencePiece", /* no pieces */
        "a number has more than 10 bytes",
        "token 'x1750' has the id 1750, vocab_size is 1750",
        "the tokenizer has 255 tokens for bytes, expected 256",
        "this is not a model of SentencePiece", /* not how it was trained */
        "tokenizer.model: the file is cut off", /* in a number */
    };
    for (int i = 0; i < (int)(sizeof messages / sizeof *messages); i++) {
        char *out = NULL, *trainer = NULL, *norm = NULL, text[16];
        struct hf h;
        for (int id = 0; i != 15 && id < (i == 17 ? 1751 : 259); id++) {
            const bool byte = id >= (i == 18 ? 4 : 3) && id < 259;
            int n = snprintf(text, sizeof text, byte ? "<0x%02X>" : "x%d", (unsigned)(byte ? id - 3 : id));
            pb_piece(&out, text, (size_t)n, 0, byte ? TOKEN_BYTE : id < 3 ? TOKEN_CONTROL : TOKEN_NORMAL);
        }
        if (i == 7) pb_piece(&out, "x", 1, NAN, 1);
        if (i == 8) pb_piece(&out, "x", 1, 0, 7);
        if (i == 9) pb_piece(&out, "\xff", 1, 0, 1);
        if (i == 10) pb_piece(&out, "a\0b", 3, 0, 1);
        if (i == 11) pb_piece(&out, NULL, 0, 0, 1);
        if (i == 12) pb_piece(&out, "x", 1, 0, TOKEN_BYTE);
        pb_number(&trainer, 3, i == 1 ? 1 : 2);
        pb_number(&trainer, 24, i == 3);
        pb_number(&trainer, 35, i != 2);
        if (i == 4) pb_bytes(&norm, 2, "map", 3);
        pb_number(&norm, 4, i == 5);
        pb_number(&norm, 5, i != 6);
        if (i != 19) pb_bytes(&out, 2, trainer, arrlenu(trainer));
        pb_bytes(&out, 3, norm, arrlenu(norm));
        if (i == 13) (void)arrpop(out);
        if (i == 14) arrput(out, 11);
        if (i == 20) arrput(out, 24);
        for (int k = 0; i == 16 && k < 11; k++) arrput(out, (char)0x88);
        tokens_begin_model(&h, "model", out, arrlenu(out));
        hf_set(h.tokenizer_config, "{\"eos_token\":\"x2\",\"bos_token\":\"x1\"}");
        const int rc = hf_convert_to(&h, "out.gguf");
        CHECK(messages[i] ? rc == 1 && strstr(h.err, messages[i]) : !rc, "model %d: exit %d: %s", i, rc, h.err);
        hf_end(&h);
        arrfree(out), arrfree(trainer), arrfree(norm);
    }
}

/* tokenizer.model cut off and with flipped bits: one line that refuses it, or a file that loads. */
static void test_tokens_flips(void) {
    char *model = tokens_model(), *data = NULL, err[ERR_MAX];
    uint64_t rng = 17;
    int refused = 0;
    struct hf h;
    tokens_begin_model(&h, "flips", model, arrlenu(model));
    for (int i = 0; i < (SANITIZED ? 10 : 60); i++) {
        struct vocab v;
        arrsetlen(data, 0);
        sb_put(&data, model, arrlenu(model));
        /* half of the flips hit the end, where it says how the model was trained */
        const size_t from = i % 2 ? arrlenu(data) - 600 : 0;
        if (i % 4 == 0) arrsetlen(data, rng_next(&rng) % arrlenu(data));
        else
            for (int k = 0; k < 2; k++)
                data[from + rng_next(&rng) % (arrlenu(data) - from)] ^= (char)(1 << rng_next(&rng) % 8);
        hf_write(&h, "tokenizer.model", data, arrlenu(data));
        const int rc = hf_convert_to(&h, "out.gguf");
        const char *line = strstr(h.err, "moe-convert: ");
        if (rc) {
            refused++;
            CHECK(rc == 1 && line == h.err && strchr(line, '\n') == line + strlen(line) - 1, "exit %d: %s", rc, h.err);
            continue;
        }
        char path[256];
        snprintf(path, sizeof path, "%s/out.gguf", h.dir);
        gguf_close(&h.g);
        if (!CHECK(!gguf_open(&h.g, path, err, sizeof err), "%s", err)) break;
        if (!vocab_load(&v, &h.g, err)) vocab_free(&v);
        else CHECK(!strchr(err, '\n') && *err, "no message");
    }
    CHECK(refused > (SANITIZED ? 3 : 10), "%d files were refused", refused);
    hf_end(&h);
    arrfree(model), arrfree(data);
}

#define TESTS_TOKENS                                                                      \
    {"tokens/bytes", test_tokens_bytes}, {"tokens/pieces", test_tokens_pieces},           \
        {"tokens/session", test_tokens_session}, {"tokens/written", test_tokens_written}, \
        {"tokens/refusals", test_tokens_refusals}, {"tokens/models", test_tokens_models}, \
        {"tokens/flips", test_tokens_flips},
