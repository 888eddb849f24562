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

#define TESTS_TOKENS {"tokens/bytes", test_tokens_bytes}, {"tokens/pieces", test_tokens_pieces},
