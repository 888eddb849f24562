/* --calibrate: what the experts of a model do on texts. --compare: how far a model's predictions are from another's.
 *
 * moe.c includes this file in its section of that name. It stands here because moe-reap reads the scores and
 * moe-convert the activations.
 *
 *   moe --calibrate FILES... -o SCORES [--activations ACTIVATIONS]
 *
 *   files --corpus_open--> units --unit_run--> sums of every rank --calibration_save--> SCORES, ACTIVATIONS
 *
 * A unit is a line of a .jsonl file or a window of -c tokens of a text. It starts with an empty context, and the
 * outputs are written only between units. So a run that was interrupted and continued counts every token once, in the
 * context in which an uninterrupted run counts it. Its scores differ only by rounding: the sums of each run are added
 * to those of the runs before.
 *
 * SCORES is JSON:
 *   format, version  "moe-scores", 1
 *   model            {name, routers}: routers is a hash of all routers' weights and identifies the model
 *   tokens           tokens counted in all runs
 *   sources          [{name, hash, tokens, unit, window, done}], one per text: hash of its bytes; tokens and units
 *                    counted; tokens of a window; whether all of it is counted
 *   layers           [null, or {tokens, weighted_sum, weighted_max, norm_sum, gate_sum}]: null for a dense layer; each
 *                    list has one number per expert, see enum expert_stat
 *
 * ACTIVATIONS is GGUF as llama-imatrix writes it: NAME.in_sum2 (n_in, n_expert) and NAME.counts (1, n_expert) for every
 * matrix of the feed-forwards. Its key moe.calibration.tokens repeats "tokens" of the SCORES that it belongs to. */

enum {
    SAVE_SECONDS = 60,  /* between savings, at least */
    COVERED_TOKENS = 32 /* an expert that fewer tokens chose has a score by chance */
};
static const double TOKENS_MAX = 0x1p53; /* tokens that a score file may hold: a double counts them exactly */

/* A text, which is counted unit by unit. */
struct corpus {
    char *name, *text; /* malloc'ed; stb_ds, NULL: not in this run */
    uint64_t hash;     /* of the text */
    int64_t tokens;    /* tokens that are counted */
    int64_t unit;      /* units that are counted */
    int window;        /* tokens of a window; 0: the score file does not say */
    bool lines, done;  /* it is a .jsonl; all of it is counted */
};

/* Invariant between units: `before` and what the session has collected since its start are the counted units of all
 * sources. */
struct calibration {
    struct engine *e;
    struct chat chat;       /* renders conversations */
    struct corpus *sources; /* stb_ds */
    double *before;         /* (model_blocks, n_expert_max, STATS) of earlier runs */
    double *stats;          /* the same of all runs, see calibration_sum */
    float *in_sum2_start;   /* (n_in_sum2) of earlier runs; NULL without --activations */
    float *in_sum2;         /* the same of all runs */
    size_t n_stats, n_in_sum2;
    char routers[17];           /* routers_hash in hexadecimal */
    int64_t tokens, tokens_run; /* counted in all runs, in this one */
    double started, saved;      /* seconds */
    double bytes, bytes_done;   /* of the texts of this run */
    bool stopping;              /* Ctrl-C: the run ends after this unit */
};

static const char *const stat_names[STATS] = {"tokens", "weighted_sum", "weighted_max", "norm_sum", "gate_sum"};

/* Identifies a model whatever the type of its experts is: a hash of all routers' rows as floats. */
static uint64_t routers_hash(const struct model *m) {
    uint64_t h = HASH_START;
    float *row = xcalloc((size_t)m->n_embd, sizeof *row);
    for (int il = 0; il < m->n_layer; il++) {
        const struct weight *w = &m->layers[il].router;
        for (int e = 0; e < layer_routes(&m->layers[il]); e++) {
            gguf_dequantize_row(w->type, w->data + (size_t)e * w->row_bytes, row, (size_t)w->n_in);
            h = hash_bytes(h, row, (size_t)w->n_in * sizeof *row);
        }
    }
    free(row);
    return h;
}

/* The STATS numbers of an expert in all (model_blocks, n_expert_max, STATS). */
static double *stats_of(const struct model *m, double *all, int il, int expert) {
    return all + ((size_t)il * (size_t)m->n_expert_max + (size_t)expert) * STATS;
}

/* ---- the scores ---- */

/* Computes the sums of all runs from those of earlier runs and what the session has collected. */
static void calibration_sum(struct calibration *c) {
    session_stats(&c->e->session, c->stats, c->in_sum2);
    for (size_t i = 0; i < c->n_stats; i++) {
        const double x = c->before[i], y = c->stats[i];
        c->stats[i] = i % STATS == STAT_WEIGHTED_MAX ? fmax(x, y) : x + y;
    }
    if (!c->in_sum2) return;
    for (size_t i = 0; i < c->n_in_sum2; i++) c->in_sum2[i] += c->in_sum2_start[i];
}

static json_t *corpus_json(const struct corpus *s) {
    char hash[17];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)s->hash);
    return json_pack("{s:s, s:s, s:I, s:I, s:i, s:b}", "name", s->name, "hash", hash, "tokens", (json_int_t)s->tokens,
                     "unit", (json_int_t)s->unit, "window", s->window, "done", s->done);
}

static json_t *layer_json(const struct calibration *c, int il) {
    const struct model *m = &c->e->model;
    const int n = m->layers[il].n_expert;
    json_t *layer = n ? json_object() : json_null();
    for (int k = 0; n && k < STATS; k++) {
        json_t *list = json_array();
        for (int e = 0; e < n; e++) {
            const double x = stats_of(m, c->stats, il, e)[k];
            if (!isfinite(x)) die("layer %d, expert %d: its output is not a number", il, e);
            json_array_append_new(list, k == STAT_TOKENS ? json_integer((json_int_t)x) : json_real(x));
        }
        json_object_set_new(layer, stat_names[k], list);
    }
    return layer;
}

static json_t *calibration_json(const struct calibration *c) {
    const struct model *m = &c->e->model;
    json_t *sources = json_array(), *layers = json_array();
    char name[sizeof m->name];
    snprintf(name, sizeof name, "%s", m->name);
    message_sanitize(name);
    for (size_t i = 0; i < arrlenu(c->sources); i++) json_array_append_new(sources, corpus_json(&c->sources[i]));
    for (int il = 0; il < model_blocks(m); il++)
        if (!m->layers[il].visit) json_array_append_new(layers, layer_json(c, il));
    if (json_array_size(sources) != arrlenu(c->sources)) die("out of memory for the scores");
    json_t *all =
        json_pack("{s:s, s:i, s:{s:s, s:s}, s:I, s:o, s:o}", "format", "moe-scores", "version", 1, "model", "name",
                  name, "routers", c->routers, "tokens", (json_int_t)c->tokens, "sources", sources, "layers", layers);
    if (!all) die("out of memory for the scores");
    return all;
}

/* Reads one layer of a score file into `before`. 0, or -1 with a message. */
static int layer_load(struct calibration *c, const json_t *layer, int il, const char *path, char *err) {
    const struct model *m = &c->e->model;
    const size_t n = (size_t)m->layers[il].n_expert;
    for (int k = 0; n && k < STATS; k++) {
        const json_t *list = json_object_get(layer, stat_names[k]);
        if (json_array_size(list) != n)
            return fail(err, "'%s': layer %d: expected %zu numbers in %s, found %zu", path, il, n, stat_names[k],
                        json_array_size(list));
        for (size_t e = 0; e < n; e++) {
            const json_t *x = json_array_get(list, e);
            const double v = json_number_value(x);
            const bool whole = k == STAT_TOKENS;
            const double most = whole ? TOKENS_MAX : DBL_MAX;
            if (!(whole ? json_is_integer(x) : json_is_number(x)) || !(v >= 0) || !(v <= most))
                return fail(err, "'%s': layer %d: %s of expert %zu is not %s from 0 to %g", path, il, stat_names[k], e,
                            whole ? "an integer" : "a number", most);
            stats_of(m, c->before, il, (int)e)[k] = v;
        }
    }
    return 0;
}

/* Appends a source of a score file. One with an "offset" stopped in the middle of a unit: its context is lost, so that
 * the rest cannot be counted as it should be. 0, or -1 with a message. */
static int source_load(struct calibration *c, const json_t *source, const char *path, char *err) {
    const char *name = json_string_value(json_object_get(source, "name"));
    const char *hash = json_string_value(json_object_get(source, "hash"));
    struct corpus s = {.tokens = json_integer_value(json_object_get(source, "tokens")),
                       .unit = json_integer_value(json_object_get(source, "unit")),
                       .done = json_is_true(json_object_get(source, "done"))};
    const json_int_t window = json_integer_value(json_object_get(source, "window"));
    if (!name || !hash || s.tokens < 0 || (double)s.tokens > TOKENS_MAX || s.unit < 0 || s.unit > INT32_MAX ||
        window < 0 || window > INT32_MAX)
        return fail(err, "'%s': source %zu is incomplete", path, arrlenu(c->sources));
    if (json_integer_value(json_object_get(source, "offset")))
        return fail(err,
                    "'%s' stopped within a line or window of '%s' and cannot be resumed: remove it, or give another -o",
                    path, name);
    s.window = (int)window;
    s.hash = strtoull(hash, NULL, 16);
    s.name = xstrdup(name);
    arrput(c->sources, s);
    return 0;
}

/* Checks that a score file belongs to the model. 0, or -1 with a message. */
static int scores_check(const struct calibration *c, const json_t *j, const char *path, char *err) {
    const struct model *m = &c->e->model;
    const size_t n_layer = json_array_size(json_object_get(j, "layers"));
    const char *format = json_string_value(json_object_get(j, "format"));
    const char *routers = json_string_value(json_object_get(json_object_get(j, "model"), "routers"));
    if (!format || strcmp(format, "moe-scores") || json_integer_value(json_object_get(j, "version")) != 1)
        return fail(err, "'%s' is not a score file of version 1; it will not be replaced", path);
    if (!routers || strcmp(routers, c->routers))
        return fail(err, "'%s' belongs to another model: routers %s, here %s", path, routers ? routers : "(none)",
                    c->routers);
    if (n_layer == (size_t)file_layers(m, m->n_layer) && m->n_mtp)
        return fail(err,
                    "'%s' has no scores of the prediction layer: write another file, or go on without that layer "
                    "(--spec-type none)",
                    path);
    if (n_layer != (size_t)file_layers(m, model_blocks(m)))
        return fail(err, "'%s' has %zu layers, expected %d", path, n_layer, file_layers(m, model_blocks(m)));
    const json_t *tokens = json_object_get(j, "tokens");
    if (!json_is_integer(tokens) || c->tokens < 0 || (double)c->tokens > TOKENS_MAX)
        return fail(err, "'%s': tokens is not an integer from 0 to %g", path, TOKENS_MAX);
    return 0;
}

/* Reads the score file of earlier runs, if there is one. 0, or -1 with a message. */
static int scores_load(struct calibration *c, const char *path, char *err) {
    char *text = NULL;
    json_error_t why;
    struct stat st;
    size_t i;
    const json_t *source;
    if (access(path, F_OK)) return 0;
    if (file_check(path, &st, err) || read_file(path, &text, err)) return -1;
    json_t *j = json_loadb(text ? text : "", arrlenu(text), JSON_REJECT_DUPLICATES, &why);
    arrfree(text);
    if (!j) return fail(err, "'%s': %s (line %d)", path, why.text, why.line);
    c->tokens = json_integer_value(json_object_get(j, "tokens"));
    int rc = scores_check(c, j, path, err);
    for (int il = 0; il < model_blocks(&c->e->model) && !rc; il++) {
        const struct layer *layer = &c->e->model.layers[il];
        if (!layer->visit)
            rc = layer_load(c, json_array_get(json_object_get(j, "layers"), (size_t)layer->block), il, path, err);
    }
    json_array_foreach(json_object_get(j, "sources"), i, source) {
        if (!rc) rc = source_load(c, source, path, err);
    }
    json_decref(j);
    return rc;
}

/* ---- the activations ---- */

/* A matrix whose inputs' squares are summed. The gate and the up matrix of a feed-forward read the same inputs. */
struct activation {
    char name[64];
    size_t n_expert, n_in;
    size_t first; /* its sums are in_sum2[first ..] (n_expert, n_in) */
    int il;
    bool routed; /* each expert counts the tokens that chose it, the others all tokens */
};

/* Lists them in the order of the file; stb_ds. */
static struct activation *activations_list(const struct model *m) {
    struct activation *list = NULL;
    for (int il = 0; il < model_blocks(m); il++) {
        const struct layer *layer = &m->layers[il];
        struct ffn_weights ffns[2];
        size_t first = in_sum2_before(m, il);
        if (layer->visit) continue;
        for (int i = 0, n = layer_ffns(layer, ffns); i < n; first += ffn_in_sum2(&ffns[i++]))
            for (const struct tensor_rule *rule = rule_next(NULL, layer); rule; rule = rule_next(rule, layer)) {
                const struct weight *w = rule_is_weight(rule) ? rule_weight(rule, layer) : NULL;
                if (!w || (w != ffns[i].gate && w != ffns[i].up && w != ffns[i].down)) continue;
                struct activation a = {.n_expert = (size_t)w->n_expert,
                                       .n_in = (size_t)w->n_in,
                                       .first = first,
                                       .il = il,
                                       .routed = rule_routed(rule)};
                if (w == ffns[i].down) a.first += a.n_expert * (size_t)ffns[i].up->n_in;
                snprintf(a.name, sizeof a.name, "blk.%d.%s.weight", layer->block, rule->name);
                arrput(list, a);
            }
    }
    return list;
}

static void activation_write(const struct calibration *c, const struct activation *a, FILE *f) {
    static const uint8_t zeros[GGUF_DEFAULT_ALIGN];
    const size_t sums = a->n_expert * a->n_in * sizeof(float), counts = a->n_expert * sizeof(float);
    fwrite(c->in_sum2 + a->first, 1, sums, f);
    fwrite(zeros, 1, gguf_pad(sums) - sums, f);
    for (size_t e = 0; e < a->n_expert; e++) {
        const double n = a->routed ? stats_of(&c->e->model, c->stats, a->il, (int)e)[STAT_TOKENS] : (double)c->tokens;
        fwrite(&(float){(float)n}, sizeof(float), 1, f);
    }
    fwrite(zeros, 1, gguf_pad(counts) - counts, f);
}

/* Writes the sums of squares to `path`. 0, or -1 with a message. */
static int activations_save(const struct calibration *c, const char *path, char *err) {
    struct activation *list = activations_list(&c->e->model);
    struct gguf_writer w = {0};
    char name[80];
    size_t n;
    gguf_put_str(&w, "general.type", "imatrix", 7);
    gguf_put_array(&w, "imatrix.datasets", GGUF_V_STR, arrlenu(c->sources), NULL);
    for (size_t i = 0; i < arrlenu(c->sources); i++) gguf_put_bytes(&w, c->sources[i].name, strlen(c->sources[i].name));
    gguf_put_u32(&w, "imatrix.chunk_size", (uint32_t)c->e->session.n_ctx);
    gguf_put_u32(&w, "imatrix.chunk_count", (uint32_t)(c->tokens / c->e->session.n_ctx));
    gguf_put_array(&w, "moe.calibration.tokens", GGUF_V_U64, 1, &(uint64_t){(uint64_t)c->tokens});
    for (size_t i = 0; i < arrlenu(list); i++) {
        snprintf(name, sizeof name, "%s.in_sum2", list[i].name);
        gguf_add_tensor(&w, name, GGUF_F32, 2, (uint64_t[]){list[i].n_in, list[i].n_expert});
        snprintf(name, sizeof name, "%s.counts", list[i].name);
        gguf_add_tensor(&w, name, GGUF_F32, 2, (uint64_t[]){1, list[i].n_expert});
    }
    uint8_t *header = gguf_header(&w, &n);
    if (!header) die("out of memory");
    FILE *f = temp_create(path, 0666, err);
    if (f) fwrite(header, 1, n, f);
    for (size_t i = 0; f && i < arrlenu(list); i++) activation_write(c, &list[i], f);
    free(header);
    gguf_writer_free(&w);
    arrfree(list);
    return f ? temp_finish(f, path, false, err) : -1;
}

/* Copies the sums out of an open file. 0, or -1 with a message. */
static int activations_copy(struct calibration *c, const struct gguf *g, const char *path, char *err) {
    struct activation *list = activations_list(&c->e->model);
    int rc = 0;
    for (size_t i = 0; i < arrlenu(list) && !rc; i++) {
        char name[80];
        const size_t n = list[i].n_expert * list[i].n_in;
        snprintf(name, sizeof name, "%s.in_sum2", list[i].name);
        const struct gguf_tensor *t = gguf_find_tensor(g, name);
        if (!t || t->type != GGUF_F32 || t->bytes != n * sizeof(float))
            rc = fail(err, "'%s': expected a tensor '%s' of %zu floats", path, name, n);
        else memcpy(c->in_sum2_start + list[i].first, t->data, t->bytes);
    }
    arrfree(list);
    return rc;
}

/* Reads the sums in `path` if they belong to the scores: 1, 0 if they belong to others, -1 with a message. */
static int activations_read(struct calibration *c, const char *path, char *err) {
    struct gguf g;
    int64_t tokens = -1;
    if (gguf_open(&g, path, err, ERR_MAX)) return -1;
    const struct gguf_kv *kv = gguf_find(&g, "moe.calibration.tokens");
    int rc;
    if (!kv || !gguf_elem_int(kv, 0, &tokens))
        rc = fail(err, "'%s' was not written by --activations; it will not be replaced", path);
    else if (tokens != c->tokens) rc = 0;
    else rc = tokens && activations_copy(c, &g, path, err) ? -1 : 1;
    gguf_close(&g);
    return rc;
}

/* The new activations before they get their name, see calibration_save. */
static const char *activations_next(const struct calibration *c, char out[PATH_MAX]) {
    snprintf(out, PATH_MAX, "%s.next", c->e->set->activations);
    return out;
}

/* Reads the activations that belong to the scores of earlier runs. 0, or -1 with a message. */
static int activations_load(struct calibration *c, char *err) {
    const char *path = c->e->set->activations;
    char next[PATH_MAX];
    const bool there = !access(path, F_OK);
    int rc = there ? activations_read(c, path, err) : 0;
    if (!rc && !access(activations_next(c, next), F_OK)) rc = activations_read(c, next, err);
    if (rc < 0) return -1;
    /* without scores there is nothing to go on with: old activations are replaced */
    if (rc || !c->tokens) return 0;
    return fail(err, "'%s' holds %lld tokens, '%s' does not belong to it: remove both, or omit --activations",
                c->e->set->output, (long long)c->tokens, path);
}

/* Writes both files. Each is replaced as a whole. The activations are complete under another name (.next) before the
 * scores are replaced, and get their own name after it: at any moment there is a file that belongs to the scores, and
 * activations_load finds it. Only between units: see the invariant of struct calibration. */
static void calibration_save(struct calibration *c) {
    const struct settings *set = c->e->set;
    char err[ERR_MAX], next[PATH_MAX];
    calibration_sum(c);
    if (set->activations && activations_save(c, activations_next(c, next), err)) die("%s", err);
    FILE *f = temp_create(set->output, 0666, err);
    if (!f) {
        if (set->activations) unlink(next);
        die("%s", err);
    }
    json_t *j = calibration_json(c);
    const bool bad = json_dumpf(j, f, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) != 0;
    json_decref(j);
    putc('\n', f);
    if (temp_finish(f, set->output, bad, err)) die("%s", err);
    if (set->activations && rename(next, set->activations))
        die("cannot rename '%s' to '%s': %s", next, set->activations, strerror(errno));
    c->saved = now_seconds();
}

/* ---- texts ---- */

/* The forms of a line: chats, single texts, and pairs of a question and its answer. Keys that are not in the line are
 * NULL. */
struct line_keys {
    const json_t *messages, *prompt, *completion, *text, *system, *tools;
    const json_t *question, *input, *answer;
};

/* The keys of a line, and their place in struct line_keys. Data sets name the same things differently. */
static const struct {
    const char *name;
    size_t at;
} line_names[] = {
    {"messages", offsetof(struct line_keys, messages)},     {"conversations", offsetof(struct line_keys, messages)},
    {"conversation", offsetof(struct line_keys, messages)}, {"prompt", offsetof(struct line_keys, prompt)},
    {"completion", offsetof(struct line_keys, completion)}, {"text", offsetof(struct line_keys, text)},
    {"system", offsetof(struct line_keys, system)},         {"tools", offsetof(struct line_keys, tools)},
    {"instruction", offsetof(struct line_keys, question)},  {"question", offsetof(struct line_keys, question)},
    {"input", offsetof(struct line_keys, input)},           {"context", offsetof(struct line_keys, input)},
    {"output", offsetof(struct line_keys, answer)},         {"response", offsetof(struct line_keys, answer)},
    {"answer", offsetof(struct line_keys, answer)}};

/* Names once the keys of a line that its form does not use. */
static void line_report(const json_t *line, const struct line_keys *k, const char *path) {
    const json_t *const *all = (const json_t *const *)k;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)line, key, value) {
        bool used = json_is_empty(value);
        for (size_t i = 0; i < sizeof *k / sizeof *all; i++) used |= all[i] == value;
        if (!used) note_once("'%s': the key \"%.64s\" is not used", path, key);
    }
}

/* Sorts the keys of a line into the form that it has. */
static void line_sort(const json_t *line, struct line_keys *k) {
    enum { N = sizeof line_names / sizeof *line_names };
    const json_t **all = (const json_t **)k;
    const char *key;
    json_t *value;
    *k = (struct line_keys){0};
    json_object_foreach((json_t *)line, key, value) {
        int i = 0;
        while (i < N && strcmp(line_names[i].name, key)) i++;
        const json_t **at = i < N ? all + line_names[i].at / sizeof *all : NULL;
        if (at && !*at && !json_is_null(value)) *at = value;
    }
    const bool lists = json_is_array(k->prompt) || (!k->prompt && json_is_array(k->completion));
    if (!k->question && k->answer && !k->completion && !lists) k->question = k->prompt;
    if (k->messages) *k = (struct line_keys){.messages = k->messages, .system = k->system, .tools = k->tools};
    else if (lists)
        *k = (struct line_keys){
            .prompt = k->prompt, .completion = k->completion, .system = k->system, .tools = k->tools};
    else if (k->question && k->answer)
        *k = (struct line_keys){
            .question = k->question, .input = k->input, .answer = k->answer, .system = k->system, .tools = k->tools};
    else if (k->text) *k = (struct line_keys){.text = k->text};
    else *k = (struct line_keys){.prompt = k->prompt, .completion = k->completion};
}

/* Appends the messages of a line to the chat: those of a list; a system message and a question with its answer. 0, or
 * -1 with a message. */
static int line_messages(struct chat *chat, const struct line_keys *k, char *err) {
    const char *question = json_string_value(k->question), *input = json_string_value(k->input),
               *answer = json_string_value(k->answer);
    char *text = NULL;
    if (k->system && !json_is_string(k->system)) return fail(err, "\"system\" is not text");
    if (json_string_length(k->system))
        chat_push(chat, "system", json_string_value(k->system), json_string_length(k->system));
    if (k->messages) return chat_push_list(chat, "messages", k->messages, err);
    if (k->prompt && chat_push_list(chat, "prompt", k->prompt, err)) return -1;
    if (k->prompt) return k->completion ? chat_push_list(chat, "completion", k->completion, err) : 0;
    if (!question || !answer || (k->input && !input))
        return fail(err, "a question and its answer must be text, and so must what stands between them");
    sb_puts(&text, question);
    if (input && *input) sb_printf(&text, "\n\n%s", input);
    chat_push(chat, "user", sb_cstr(&text), arrlenu(text));
    chat_push(chat, "assistant", answer, strlen(answer));
    arrfree(text);
    return 0;
}

/* The message for a line of no known form: -1. */
static int line_unknown(const json_t *line, char *err) {
    char *found = NULL;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)line, key, value) {
        if (arrlen(found) < ERR_MAX / 4) sb_printf(&found, "%s\"%.64s\"", arrlen(found) ? ", " : "", key);
    }
    fail(err,
         "expected \"messages\", \"conversations\", \"text\", \"prompt\" and \"completion\", or \"instruction\" and "
         "\"output\"; found %s",
         arrlen(found) ? sb_cstr(&found) : "no keys");
    arrfree(found);
    return -1;
}

/* Takes the line s (n) of a .jsonl: the messages of a chat, which are appended to c->chat, or texts, of which at most
 * two are set. 0, or -1 with a message. *line owns the texts. */
static int line_read(struct calibration *c, const char *path, const char *s, size_t n, json_t **line,
                     const char *texts[2], char *err) {
    json_error_t why;
    struct line_keys k;
    char why_tools[ERR_MAX];
    *line = json_loadb(s, n, 0, &why);
    texts[0] = texts[1] = NULL;
    if (!*line) return fail(err, "%s", why.text);
    if (!json_is_object(*line)) return fail(err, "the line is %s, expected an object", json_type_name(*line));
    line_sort(*line, &k);
    if (k.tools) {
        json_t *tools =
            json_is_string(k.tools) ? json_loads(json_string_value(k.tools), 0, NULL) : json_incref((json_t *)k.tools);
        const int rc = chat_take_list(&c->chat, "tools", tools, why_tools);
        json_decref(tools);
        if (rc) return fail(err, "%s", why_tools);
    }
    if (k.messages || k.question || json_is_array(k.prompt) || json_is_array(k.completion)) {
        line_report(*line, &k, path);
        return line_messages(&c->chat, &k, err);
    }
    const json_t *const plain[] = {k.text ? k.text : k.prompt, k.completion};
    for (int i = 0; i < 2; i++) {
        if (plain[i] && !json_is_string(plain[i]))
            return fail(err, "\"%s\" is %s, expected text",
                        k.text ? "text"
                        : i    ? "completion"
                               : "prompt",
                        json_type_name(plain[i]));
        texts[i] = json_string_value(plain[i]);
    }
    if (texts[0] || texts[1]) {
        line_report(*line, &k, path);
        return 0;
    }
    return line_unknown(*line, err);
}

/* Frees what line_read has made. */
static void line_free(struct calibration *c, json_t *line) {
    while (arrlen(c->chat.messages) > 0) chat_pop(&c->chat);
    json_decref(c->chat.vars);
    c->chat.vars = NULL;
    json_decref(line);
}

/* The line that begins at byte *at, which moves after it: its *n bytes. */
static const char *corpus_line(const struct corpus *s, size_t *at, size_t *n) {
    const char *p = s->text + *at, *end = memchr(p, '\n', arrlenu(s->text) - *at);
    *n = end ? (size_t)(end - p) : arrlenu(s->text) - *at;
    *at += *n + (end != NULL);
    return p;
}

/* Parses all lines of a .jsonl before the first is counted. 0, or -1 with a message. */
static int corpus_check(struct calibration *c, const struct corpus *s, char *err) {
    char why[ERR_MAX];
    const char *texts[2];
    json_t *j;
    int64_t line = 1;
    for (size_t at = 0, n; s->lines && at < arrlenu(s->text); line++) {
        const char *p = corpus_line(s, &at, &n);
        if (is_blank(p, n)) continue;
        const int rc = line_read(c, s->name, p, n, &j, texts, why);
        line_free(c, j);
        if (rc) return fail(err, "'%s', line %lld: %s", s->name, (long long)line, why);
    }
    return 0;
}

/* The source with this hash: one of an earlier run, or a new one. */
static struct corpus *corpus_find(struct calibration *c, const char *path, uint64_t hash) {
    const size_t n = arrlenu(c->sources);
    for (size_t i = 0; i < n; i++)
        if (c->sources[i].hash == hash) return &c->sources[i];
    struct corpus s = {.name = xstrdup(path), .hash = hash};
    message_sanitize(s.name);
    for (size_t i = 0; i < n; i++)
        if (!strcmp(c->sources[i].name, s.name) && c->sources[i].tokens)
            note("'%s' differs from the text of an earlier run, whose %lld tokens are counted", s.name,
                 (long long)c->sources[i].tokens);
    arrput(c->sources, s);
    return &c->sources[n];
}

/* Reads and checks the text of a file. Its index among the sources, or -1 with a message. */
static ptrdiff_t corpus_open(struct calibration *c, const char *path, char *err) {
    const int window = c->e->session.n_ctx;
    char *text = NULL;
    if (read_text_file(path, &text, err)) return -1;
    const size_t bytes = arrlenu(text), n = strlen(path);
    const bool lines = n > 6 && !strcasecmp(path + n - 6, ".jsonl");
    if (!bytes || !utf8_valid(text, bytes)) {
        arrfree(text);
        return fail(err, "'%s' is %s", path, bytes ? "not valid UTF-8 text" : "empty");
    }
    if (n > 5 && !strcasecmp(path + n - 5, ".json"))
        note("'%s' counts as plain text; jq -c '.[]' writes its chats as lines of a .jsonl file", path);
    const uint64_t h = hash_bytes(hash_bytes(HASH_START, text, bytes), "lines", lines ? 5 : 0);
    struct corpus *s = corpus_find(c, path, h);
    arrfree(s->text); /* the same file may be named twice */
    s->text = text;
    s->lines = lines;
    if (!lines && s->unit && !s->done && s->window != window)
        return fail(err, "'%s' counts '%s' in windows of %d tokens, not %d: continue with -c %d", c->e->set->output,
                    s->name, s->window, window, s->window);
    if (!s->done) s->window = window;
    return corpus_check(c, s, err) ? -1 : s - c->sources;
}

/* Appends the tokens of a line of a .jsonl: conversations by the model's template, other text as it is. 0, or -1 with a
 * message. */
static int line_tokens(struct calibration *c, const char *path, const char *s, size_t n, int32_t **ids, char *err) {
    const char *texts[2];
    json_t *line;
    struct tpl_text t = {0};
    int rc = line_read(c, path, s, n, &line, texts, err);
    if (!rc && arrlen(c->chat.messages)) {
        session_truncate(&c->e->session, 0); /* chat_tokenize must not reuse tokens of the line before */
        chat_report_idle(&c->chat);
        rc = chat_render(&c->chat, false, &t, err);
        if (!rc) chat_tokenize(&c->chat, &t, ids);
        text_free(&t);
    }
    for (int i = 0; !rc && i < 2; i++)
        if (texts[i]) tokenize_all(c->e->model.vocab, texts[i], strlen(texts[i]), false, ids);
    line_free(c, line);
    return rc;
}

/* ---- the run ---- */

enum run_end { RUN_DONE, RUN_STOPPED /* after a unit */, RUN_CUT /* within a unit, which must not be saved */ };

/* A unit on its way through the session, as prefill_run sees it. */
struct unit_progress {
    struct calibration *c;
    struct corpus *s;
    double bytes_per_token; /* of the text */
};

static void unit_chunk(void *ctx, int n) {
    const struct unit_progress *p = ctx;
    struct calibration *c = p->c;
    session_wait(&c->e->session); /* a GPU works asynchronously: the loop must not run ahead of it */
    p->s->tokens += n;
    c->tokens += n;
    c->tokens_run += n;
    c->bytes_done += n * p->bytes_per_token;
    const double t = now_seconds() - c->started, rate = (double)c->tokens_run / fmax(t, 1e-3);
    const double part = c->bytes > 0 ? fmin(c->bytes_done / c->bytes, 1) : 1;
    const long left = part > 0 ? (long)(t / part - t) : 0;
    status_line("%s: %3.0f %% of all, %lld tokens, %.0f tok/s, %ld:%02ld:%02ld left", p->s->name, 100 * part,
                (long long)c->tokens, rate, left / 3600, left / 60 % 60, left % 60);
    if (!interrupted || c->stopping) return;
    c->stopping = true;
    status_line("%s", "");
    note("stopping at the end of this %s; Ctrl-C again stops at once", p->s->lines ? "line" : "window");
}

/* Counts one unit, in windows of the context: a line may be longer. */
static enum run_end unit_run(struct calibration *c, struct corpus *s, const int32_t *ids, int n,
                             double bytes_per_token) {
    struct session *session = &c->e->session;
    struct unit_progress progress = {.c = c, .s = s, .bytes_per_token = bytes_per_token};
    const struct prefill p = {
        .sessions = &session, .n_session = 1, .chunk = unit_chunk, .ctx = &progress, .ignored = 1};
    for (int at = 0; at < n; at += session->n_ctx)
        if (prefill_run(&p, ids + at, int_min(n - at, session->n_ctx))) return RUN_CUT;
    s->unit++;
    if (now_seconds() - c->saved > SAVE_SECONDS) calibration_save(c);
    return interrupted ? RUN_STOPPED : RUN_DONE;
}

/* Counts the rest of a text, window by window. */
static enum run_end text_run(struct calibration *c, struct corpus *s) {
    const double bytes = (double)arrlenu(s->text);
    enum run_end end = RUN_DONE;
    int32_t *ids = NULL;
    tokenize_all(c->e->model.vocab, s->text, arrlenu(s->text), false, &ids);
    const int64_t n = arrlen(ids), first = s->unit * s->window;
    c->bytes_done += bytes * (double)first / (double)n;
    for (int64_t at = first; at < n && end == RUN_DONE; at += s->window)
        end = unit_run(c, s, ids + at, (int)(n - at < s->window ? n - at : s->window), bytes / (double)n);
    s->done = end != RUN_CUT && s->unit * s->window >= n;
    arrfree(ids);
    return s->done ? RUN_DONE : end;
}

/* Counts the rest of a .jsonl, line by line. A line that cannot be used ends the program after the lines before it are
 * saved. */
static enum run_end lines_run(struct calibration *c, struct corpus *s) {
    const size_t size = arrlenu(s->text);
    char err[ERR_MAX];
    enum run_end end = RUN_DONE;
    int32_t *ids = NULL;
    size_t at = 0, n;
    for (int64_t line = 0; at < size && end == RUN_DONE; line++) {
        const char *p = corpus_line(s, &at, &n);
        arrsetlen(ids, 0);
        if (line >= s->unit && !is_blank(p, n) && line_tokens(c, s->name, p, n, &ids, err)) {
            calibration_save(c);
            die("'%s', line %lld: %s", s->name, (long long)line + 1, err);
        }
        const int n_ids = (int)arrlen(ids);
        if (line >= s->unit) end = unit_run(c, s, ids, n_ids, n_ids ? (double)n / n_ids : 0);
        if (!n_ids) c->bytes_done += (double)n;
    }
    s->done = end != RUN_CUT && at >= size;
    arrfree(ids);
    return s->done ? RUN_DONE : end;
}

/* Prints how well the texts cover the experts: of each layer that is not covered well, and of all. */
static void calibration_report(const struct calibration *c) {
    const struct model *m = &c->e->model;
    int64_t all = 0, never_all = 0, rare_all = 0;
    for (int il = 0; il < model_blocks(m); il++) {
        int never = 0, rare = 0, n = m->layers[il].n_expert;
        if (m->layers[il].visit) continue;
        for (int e = 0; e < n; e++) {
            const double t = stats_of(m, c->stats, il, e)[STAT_TOKENS];
            never += t <= 0;
            rare += t > 0 && t < COVERED_TOKENS;
        }
        if (never + rare)
            printf("layer %3d: of %d experts %d were never chosen, %d more by fewer than %d tokens\n",
                   m->layers[il].block, n, never, rare, COVERED_TOKENS);
        all += n;
        never_all += never;
        rare_all += rare;
    }
    printf("%lld tokens; of %lld experts %lld (%.1f %%) were seen at least %d times, %lld never\n",
           (long long)c->tokens, (long long)all, (long long)(all - never_all - rare_all),
           100.0 * (double)(all - never_all - rare_all) / (double)all, COVERED_TOKENS, (long long)never_all);
}

/* Refuses a model without experts or vocabulary, and outputs that would replace another file of the command. */
static void calibration_check(const struct engine *e) {
    const struct settings *set = e->set;
    const char *const outputs[] = {set->output, set->activations};
    if (!e->model.n_expert_max) die("'%s' has no routed experts", set->model);
    if (!e->model.vocab->n_tokens) die("'%s' has no vocabulary", set->model);
    for (int i = 0; i < 2; i++) {
        if (!outputs[i]) continue;
        bool taken = same_file(outputs[i], set->model) || (i && same_file(outputs[1], outputs[0]));
        for (size_t k = 0; k < arrlenu(set->calibrate); k++) taken |= same_file(outputs[i], set->calibrate[k]);
        if (taken) die("'%s' is also an input or the other output; it will not be replaced", outputs[i]);
    }
}

/* Makes the sums, from earlier runs where there are any. */
static void calibration_open(struct calibration *c, struct engine *e) {
    const struct model *m = &e->model;
    char err[ERR_MAX];
    *c = (struct calibration){.e = e,
                              .n_stats = (size_t)model_blocks(m) * (size_t)m->n_expert_max * STATS,
                              .n_in_sum2 = in_sum2_before(m, model_blocks(m))};
    snprintf(c->routers, sizeof c->routers, "%016llx", (unsigned long long)routers_hash(m));
    c->before = xcalloc(c->n_stats, sizeof *c->before);
    c->stats = xcalloc(c->n_stats, sizeof *c->stats);
    if (e->set->activations) {
        c->in_sum2 = xcalloc(c->n_in_sum2, sizeof *c->in_sum2);
        c->in_sum2_start = xcalloc(c->n_in_sum2, sizeof *c->in_sum2);
    }
    if (scores_load(c, e->set->output, err)) die("%s", err);
    if (e->set->activations && activations_load(c, err)) die("%s", err);
    if (chat_init(&c->chat, e->set, m, &e->session, err)) die("%s", err);
    while (arrlen(c->chat.messages) > 0) chat_pop(&c->chat); /* no system message */
}

static void calibration_close(struct calibration *c) {
    for (size_t i = 0; i < arrlenu(c->sources); i++) {
        free(c->sources[i].name);
        arrfree(c->sources[i].text);
    }
    arrfree(c->sources);
    chat_free(&c->chat);
    free(c->before);
    free(c->stats);
    free(c->in_sum2);
    free(c->in_sum2_start);
}

/* --calibrate FILES... -o FILE: collects for every routed expert what pruning and quantizing want to know. */
static int mode_calibrate(struct engine *e) {
    const struct settings *set = e->set;
    const size_t n_files = arrlenu(set->calibrate);
    char err[ERR_MAX];
    struct calibration c;
    enum run_end end = RUN_DONE;
    calibration_check(e);
    calibration_open(&c, e);
    const int64_t had = c.tokens;
    ptrdiff_t *order = xcalloc(n_files, sizeof *order); /* not pointers: the list of sources grows while it is filled */
    for (size_t i = 0; i < n_files; i++) {
        order[i] = corpus_open(&c, set->calibrate[i], err);
        if (order[i] < 0) die("%s", err);
        if (!c.sources[order[i]].done) c.bytes += (double)arrlenu(c.sources[order[i]].text);
    }
    if (had) note("resuming '%s': %lld tokens from earlier runs", set->output, (long long)had);
    calibration_save(&c); /* a file that cannot be written is better known before the work */
    c.started = now_seconds();
    for (size_t i = 0; i < n_files && end == RUN_DONE && !interrupted; i++) {
        struct corpus *s = &c.sources[order[i]];
        if (s->done) note("'%s' is already in '%s'", set->calibrate[i], set->output);
        else end = s->lines ? lines_run(&c, s) : text_run(&c, s);
    }
    status_line("%s", "");
    if (end == RUN_CUT) {
        note("stopped; what was counted in the last %.0f seconds is not saved and will be counted again",
             now_seconds() - c.saved);
    } else {
        calibration_save(&c);
        if (interrupted) note("interrupted; repeat the command to resume");
        calibration_report(&c);
    }
    free(order);
    calibration_close(&c);
    return interrupted ? EXIT_INTERRUPT : EXIT_OK;
}

/* ---- --compare ---- */

/* Sums over the positions of a text, for two models with the same vocabulary. */
struct divergence {
    struct nll nll[2];
    float *kl;    /* stb_ds: Kullback-Leibler divergence at each position, in nats */
    int64_t same; /* positions with the same best token */
    int done, n;  /* tokens that went through, of the text */
};

/* Adds a position: logits[0] are model A's, logits[1] model B's. */
static void divergence_add(void *ctx, int pos, const float *const logits[]) {
    struct divergence *d = ctx;
    const float *a = logits[0], *b = logits[1];
    const int n = d->nll[0].n_vocab;
    int top_a, top_b;
    const double la = log_total(a, n, &top_a), lb = log_total(b, n, &top_b);
    double kl = 0;
    if (!isfinite(la) || !isfinite(lb)) die("model %c gives logits that are not finite", isfinite(la) ? 'B' : 'A');
    for (int i = 0; i < n; i++) {
        const double p = (double)(a[i] - a[top_a]) - la, q = (double)(b[i] - b[top_b]) - lb;
        kl += exp(p) * (p - q);
    }
    arrput(d->kl, (float)fmax(kl, 0));
    d->same += top_a == top_b;
    nll_put(&d->nll[0], pos, a, la, top_a);
    nll_put(&d->nll[1], pos, b, lb, top_b);
}

static void divergence_chunk(void *ctx, int n) {
    struct divergence *d = ctx;
    d->done += n;
    status_line("%d of %d tokens", d->done, d->n);
}

static int compare_float(const void *a, const void *b) {
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

/* Runs the text through both models in windows. 0, or 1 when interrupted. */
static int divergence_run(struct divergence *d, struct engine models[2], const int32_t *ids, int n, int window) {
    struct session *const sessions[] = {&models[0].session, &models[1].session};
    const struct prefill p = {
        .sessions = sessions, .n_session = 2, .row = divergence_add, .chunk = divergence_chunk, .ctx = d};
    int rc = 0;
    d->n = n;
    for (int at = 0; at + 1 < n && !rc; at += window) {
        const int n_ids = int_min(n - at, window);
        for (int i = 0; i < 2; i++) {
            d->nll[i].ids = ids + at;
            d->nll[i].n = n_ids;
        }
        rc = prefill_run(&p, ids + at, n_ids);
    }
    status_line("%s", "");
    return rc;
}

/* Checks that ids mean the same in both models. 0, or -1 with a message. */
static int same_vocabulary(const struct model *a, const struct model *b, char *err) {
    if (!a->vocab->n_tokens || a->n_vocab != b->n_vocab || a->vocab->n_tokens != b->vocab->n_tokens)
        return fail(err, "the models have different vocabularies: %d and %d tokens", a->vocab->n_tokens,
                    b->vocab->n_tokens);
    for (int i = 0; i < a->vocab->n_tokens; i++) {
        const struct gguf_str x = vocab_bytes(a->vocab, i), y = vocab_bytes(b->vocab, i);
        if (x.n != y.n || memcmp(x.p, y.p, x.n)) return fail(err, "token %d is not the same in both models", i);
    }
    return 0;
}

static void divergence_print(struct divergence *d, const struct settings *set, int window) {
    const size_t n = arrlenu(d->kl);
    double sum = 0, sum2 = 0, error;
    for (size_t i = 0; i < n; i++) {
        sum += (double)d->kl[i];
        sum2 += (double)d->kl[i] * (double)d->kl[i];
    }
    const double mean = sum / (double)n, var = sum2 / (double)n - mean * mean;
    qsort(d->kl, n, sizeof *d->kl, compare_float);
    for (int i = 0; i < 2; i++) {
        const double perplexity = nll_perplexity(&d->nll[i], &error);
        printf("perplexity %c    %.4f +/- %.4f  ", 'A' + i, perplexity, error);
        out_text(set->compare[i], strlen(set->compare[i]));
        putchar('\n');
    }
    printf("KL of B from A  mean %.6f +/- %.6f, median %.6f, 99 %% %.6f, largest %.6f\n", mean,
           sqrt(fmax(var, 0) / (double)n), (double)d->kl[n / 2], (double)d->kl[(n - 1) * 99 / 100],
           (double)d->kl[n - 1]);
    printf("same best token %.2f %% of %zu positions in windows of %d\n", 100.0 * (double)d->same / (double)n, n,
           window);
}

/* --compare A B TEXT: how far B's predictions are from A's. */
static int mode_compare(struct engine *e) {
    const struct settings *set = e->set;
    struct settings sets[2] = {*set, *set};
    struct engine models[2];
    char err[ERR_MAX], *text = NULL;
    int32_t *ids = NULL;
    if (read_text_file(set->compare[2], &text, err)) die("%s", err);
    for (int i = 0; i < 2; i++) {
        sets[i].model = set->compare[i];
        engine_open(&models[i], &sets[i]);
    }
    const struct model *a = &models[0].model;
    if (same_vocabulary(a, &models[1].model, err)) die("%s", err);
    tokenize_all(a->vocab, text, arrlenu(text), false, &ids);
    const int n = (int)arrlen(ids), window = int_min(models[0].session.n_ctx, models[1].session.n_ctx);
    if (n < 2 || window < 2) die("'%s' has %d tokens in windows of %d: too few to compare", set->compare[2], n, window);
    struct divergence d = {.nll = {{.n_vocab = a->n_vocab}, {.n_vocab = a->n_vocab}}};
    const int rc = divergence_run(&d, models, ids, n, window);
    if (!rc) divergence_print(&d, set, window);
    for (int i = 0; i < 2; i++) engine_close(&models[i]);
    arrfree(d.kl);
    arrfree(ids);
    arrfree(text);
    return rc ? EXIT_INTERRUPT : EXIT_OK;
}
