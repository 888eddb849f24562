/* moe-reap: removes the routed experts of a model that contribute least to its output.
 *
 * Contents, bottom up:
 *   Settings                 the options as they were given
 *   Model                    the layers with routed experts, for both kinds of source
 *   Scores                   reads the scores.json files of moe --calibrate
 *   Selection                which experts every layer retains
 *   GGUF                     reads a GGUF file and writes one with the retained experts
 *   Hugging Face directory   the same for a directory of safetensors
 *   Report                   what is removed, and how well the scores cover the experts
 *   Main                     options, and the order of the steps
 *
 * The score of an expert is the mean of gate weight x norm of its output over the tokens routed to it (REAP, arXiv
 * 2510.13999). Retained weights are copied bit for bit. Everything is checked and planned before the first byte is
 * written. Data are copied in chunks; memory does not grow with the model.
 */
#define PROGRAM "moe-reap"
#include "common.h"

/* ============================================================================================================
 * Settings
 *
 * The options as they were given.
 * ============================================================================================================ */

enum criterion { REAP, FREQUENCY, NORM, RANDOM };
static const char *const criteria[] = {"reap", "frequency", "norm", "random", NULL};

enum mtp { MTP_PRUNE, MTP_DROP };
static const char *const mtp_names[] = {[MTP_PRUNE] = "prune", [MTP_DROP] = "drop", NULL};

struct settings {
    char *out, *name;
    int keep;      /* experts per layer; 0: not given */
    double ratio;  /* share of the experts that is removed; NAN: not given */
    double budget; /* GiB; NAN: not given */
    char *counts;  /* a file */
    int floor;     /* experts per layer; 0: default */
    enum criterion criterion;
    enum mtp mtp;
    int seed; /* -1: not given */
    bool per_layer, outliers, dry_run;
    struct common_settings common;
};

static struct settings opts = {.ratio = NAN, .budget = NAN, .seed = -1, .common.completion = -1};

enum {
    MIN_SAMPLES = 32,            /* routed tokens below which the score of an expert is too uncertain */
    MAX_BLOCKS = MAX_LAYERS + 16 /* layers, with those for multi-token prediction */
};

/* ============================================================================================================
 * Model
 *
 * The layers with routed experts, filled in by gguf_read or hf_read. The layers of the main model are called the trunk;
 * layers for multi-token prediction (MTP) come after it.
 * ============================================================================================================ */

struct expert {
    int64_t tokens; /* that were routed to it */
    /* over these tokens: the sum and the largest of gate weight x output norm, and the sum of the output norms */
    double weighted_sum, weighted_max, norm_sum;
    double score;        /* by the criterion; experts with larger scores are retained */
    int32_t original_id; /* its id before any pruning; -1: unknown */
    bool outlier;        /* retained before all others (--protect-outliers) */
    bool retained;
    int new_id;    /* its id in the output */
    int n_tensors; /* in a directory: the tensors of this expert alone */
};

struct expert_layer {
    int block;               /* its number in the model */
    int n, n_retained;       /* experts, retained experts */
    bool hash_routed;        /* experts are chosen by token id; all are retained */
    bool mtp;                /* for multi-token prediction */
    bool follows;            /* has no scores: retains the same ids as the last layer of the trunk */
    bool lists_ids;          /* the source has a list of original ids */
    struct expert *experts;  /* (n) by id */
    struct expert **ranking; /* (n) each routing group sorted from the best expert to the worst */
};

static struct {
    const char *path;
    struct expert_layer *layers;      /* stb_ds: the layers with routed experts, in order */
    int n_trunk, n_mtp;               /* layers of the trunk, layers for MTP; with and without experts */
    bool mtp_halves;                  /* a layer for MTP is two of their names: attention and experts */
    int top_k, n_group, n_group_used; /* experts per token, routing groups, groups per token */
    int n_zero;                       /* zero-computation experts of a layer, after the others */
    int min_experts;                  /* that a layer must retain for top_k and the groups */
    int original_experts;             /* of a layer before any pruning; 0: unknown */
    bool pruned;                      /* the source has been pruned before */
    uint64_t router_hash;             /* of the routers of the trunk as F32; score files have it too */
    size_t bytes;                     /* of the source */
    const char *arch;                 /* general.architecture */
} m;

/* Whether the output lacks a layer. */
static bool removed(const struct expert_layer *layer) { return layer->mtp && opts.mtp == MTP_DROP; }

/* Whether the retained experts of a layer are selected by their scores. */
static bool selectable(const struct expert_layer *layer) {
    return !layer->hash_routed && !layer->follows && !removed(layer);
}

/* Returns the layer with this number, or NULL if it has no routed experts. */
static struct expert_layer *layer_find(int block) {
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        if (m.layers[i].block == block) return &m.layers[i];
    return NULL;
}

/* Appends a layer of n experts. Layers are added in order. router: the name of its tensor, for messages. */
static struct expert_layer *layer_add(int block, size_t n, const char *router) {
    struct expert_layer layer = {.block = block, .mtp = block >= m.n_trunk, .follows = block >= m.n_trunk};
    if (n < (size_t)m.top_k || n > MAX_EXPERTS || n % (size_t)m.n_group)
        die("'%s': tensor '%s' routes to %zu experts, expected %d to %d%s", m.path, router, n, m.top_k, MAX_EXPERTS,
            m.n_group > 1 ? fmt(", a multiple of the %d groups", m.n_group) : "");
    layer.n = layer.n_retained = (int)n;
    layer.experts = xrealloc(NULL, n * sizeof *layer.experts);
    memset(layer.experts, 0, n * sizeof *layer.experts);
    for (int i = 0; i < layer.n; i++) {
        layer.experts[i].original_id = i;
        layer.experts[i].retained = true;
    }
    arrput(m.layers, layer);
    return &arrlast(m.layers);
}

/* Checks the layers and completes m. */
static void model_check(void) {
    int most = 0;
    bool any = false;
    m.min_experts = (m.top_k + m.n_group_used - 1) / m.n_group_used * m.n_group;
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        most = m.layers[i].n > most ? m.layers[i].n : most;
        any |= selectable(&m.layers[i]);
    }
    if (!any) die("'%s': no layer has routed experts that could be pruned", m.path);
    if (!m.original_experts && !m.pruned) m.original_experts = most;
    if (m.original_experts && m.original_experts < most)
        die("'%s': a layer has %d experts, the model had %d before pruning", m.path, most, m.original_experts);
    for (size_t i = 0; i < arrlenu(m.layers);
         i++) { /* original ids are unknown if a layer lost experts without a list */
        struct expert_layer *layer = &m.layers[i];
        for (int k = 0; k < layer->n && m.pruned && !layer->lists_ids && layer->n != m.original_experts; k++)
            layer->experts[k].original_id = -1;
    }
}

/* ============================================================================================================
 * Scores
 *
 * Reads score files and adds them up. A file must be of this model (the hash of its routers is the same), and no text
 * may be in two files.
 * ============================================================================================================ */

static struct {
    int n_files;
    char **sources;  /* stb_ds: hashes of the calibration texts */
    bool unfinished; /* a text was not read to its end */
    int64_t tokens;
    /* experts of selectable layers with MIN_SAMPLES tokens or more, with fewer, with none; all of them */
    size_t covered, undersampled, unseen, total;
} scores;

/* Returns the array of a key, which must have n elements. */
static json_t *score_array(struct doc d, const char *key, int n) {
    json_t *a = get_list(d, key);
    if (json_array_size(a) != (size_t)n)
        die("'%s': %s: '%s' has %zu numbers, the model's layer has %d experts", d.file, d.in, key, json_array_size(a),
            n);
    return a;
}

/* Returns element i of an array: a finite number from 0 up. */
static double score_number(struct doc d, const char *key, json_t *a, int i) {
    json_t *v = json_array_get(a, (size_t)i);
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= 0) || !isfinite(x))
        die("'%s': %s: '%s': expert %d has %s, expected a number of at least 0", d.file, d.in, key, i, json_show(v));
    return x;
}

/* Adds the scores of one layer. */
static void score_layer(struct doc d, struct expert_layer *layer) {
    json_t *tokens = score_array(d, "tokens", layer->n), *weighted = score_array(d, "weighted_sum", layer->n);
    json_t *most = score_array(d, "weighted_max", layer->n), *norm = score_array(d, "norm_sum", layer->n);
    for (int i = 0; i < layer->n; i++) {
        struct expert *e = &layer->experts[i];
        json_t *v = json_array_get(tokens, (size_t)i);
        double x = score_number(d, "weighted_max", most, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            __builtin_add_overflow(e->tokens, json_integer_value(v), &e->tokens))
            die("'%s': %s: 'tokens': expert %d has %s, expected an integer of at least 0", d.file, d.in, i,
                json_show(v));
        e->weighted_sum += score_number(d, "weighted_sum", weighted, i);
        e->norm_sum += score_number(d, "norm_sum", norm, i);
        e->weighted_max = x > e->weighted_max ? x : e->weighted_max;
        if (!isfinite(e->weighted_sum + e->norm_sum)) die("'%s': %s: the sums of expert %d overflow", d.file, d.in, i);
    }
}

/* Adds a score file. It may lack the MTP layers. */
static void scores_read(const char *path) {
    struct doc d = doc_open(path, path);
    char routers[17];
    expect(d, "format", !strcmp(get_str(d, "format", ""), "moe-scores"), "\"moe-scores\"");
    get_int(d, "version", 1, 1, REQUIRED);
    snprintf(routers, sizeof routers, "%016llx", (unsigned long long)m.router_hash);
    const char *of = get_str(get_obj(d, "model"), "routers", "(none)");
    if (strcmp(of, routers))
        die("'%s': scores of another model: its routers have the hash %s, those of '%s' %s", path, of, m.path, routers);
    if (__builtin_add_overflow(scores.tokens, get_int(d, "tokens", 0, INT64_MAX, REQUIRED), &scores.tokens))
        die("'%s': the token counts overflow", path);
    json_t *list = get_list(d, "layers");
    const int n = (int)json_array_size(list), all = m.n_trunk + m.n_mtp;
    if (n != m.n_trunk && n != all)
        die("'%s': expected scores of %d%s layers as in '%s', found %d", path, m.n_trunk,
            m.n_mtp ? fmt(" or %d", all) : "", m.path, n);
    for (int b = 0; b < n; b++) {
        json_t *j = json_array_get(list, (size_t)b);
        struct expert_layer *layer = layer_find(b);
        struct doc in = {j, d.file, fmt("layer %d", b)};
        bool given = !json_is_null(j);
        if (given && !json_is_object(j)) die("'%s': layer %d: expected an object, found %s", path, b, json_show(j));
        if (given && !layer) die("'%s': layer %d has scores, but no routed experts in '%s'", path, b, m.path);
        if (!given && layer && !layer->hash_routed && !layer->mtp) die("'%s': layer %d has no scores", path, b);
        if (given) score_layer(in, layer);
    }
    json_t *source;
    size_t i;
    json_array_foreach(get_list(d, "sources"), i, source) {
        const char *hash = json_string_value(json_object_get(source, "hash"));
        const char *name = json_string_value(json_object_get(source, "name"));
        scores.unfinished |= json_is_false(json_object_get(source, "done"));
        for (size_t k = 0; hash && k < arrlenu(scores.sources); k++)
            if (!strcmp(scores.sources[k], hash))
                die("'%s': the text '%s' is in another file of scores too: it would count twice", path,
                    name ? name : hash);
        if (hash) arrput(scores.sources, xstrdup(hash));
    }
    json_decref(d.obj);
    scores.n_files++;
}

/* Finds out which MTP layers have scores. Dies if one that has none cannot take over the ids of the last layer of the
 * trunk. */
static void mtp_check(void) {
    const struct expert_layer *last = NULL;
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        struct expert_layer *layer = &m.layers[i];
        if (!layer->mtp) last = layer;
        for (int k = 0; k < layer->n; k++) layer->follows &= !layer->hash_routed && !layer->experts[k].tokens;
        if (!layer->follows || removed(layer)) continue;
        if (!last || last->hash_routed || last->n != layer->n)
            die("'%s': layer %d, for multi-token prediction, has %d experts without scores, and the last layer before "
                "it %s: --mtp drop removes it",
                m.path, layer->block, layer->n,
                !last               ? "none"
                : last->hash_routed ? "is routed by hash"
                                    : fmt("%d", last->n));
    }
}

/* Counts how many experts have enough tokens. Dies if a selectable layer has none. */
static void scores_check(void) {
    for (size_t i = 0; i < arrlenu(m.layers) && scores.n_files; i++) {
        const struct expert_layer *layer = &m.layers[i];
        bool any = false;
        if (!selectable(layer)) continue;
        for (int k = 0; k < layer->n; k++) {
            any |= layer->experts[k].tokens > 0;
            scores.covered += layer->experts[k].tokens >= MIN_SAMPLES;
            scores.undersampled += layer->experts[k].tokens < MIN_SAMPLES;
            scores.unseen += !layer->experts[k].tokens;
        }
        scores.total += (size_t)layer->n;
        if (!any || !scores.tokens) die("layer %d was never calibrated: its scores have no tokens", layer->block);
    }
}

/* ============================================================================================================
 * Selection
 *
 * Ranks the experts of each layer and marks the best as retained. Routing groups are ranges of ids, so every group of a
 * layer must retain the same number; a unit is one expert of each group.
 * ============================================================================================================ */

enum amount { NONE, KEEP, RATIO, BUDGET, COUNTS };

static enum amount amount;    /* which option says how many experts are retained */
static uint64_t random_state; /* for --criterion random */

static int by_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Marks the outliers: experts of the first three quarters of the trunk's layers with one huge output ("super experts"),
 * above the 99.5th percentile and a tenth of the maximum of all these layers. The rule is that of the REAP reference
 * code. */
static void protect_outliers(void) {
    double *all = NULL;
    size_t n_layers = 0, index = 0;
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        if (!selectable(&m.layers[i]) || m.layers[i].mtp) continue;
        n_layers++;
        for (int k = 0; k < m.layers[i].n; k++) arrput(all, m.layers[i].experts[k].weighted_max);
    }
    qsort(all, arrlenu(all), sizeof *all, by_double);
    double at = 0.995 * (double)(arrlenu(all) - 1), part = at - floor(at);
    double lo = all[(size_t)at], hi = all[(size_t)ceil(at)], limit = lo + part * (hi - lo);
    if (arrlast(all) / 10 > limit) limit = arrlast(all) / 10;
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        struct expert_layer *layer = &m.layers[i];
        if (!selectable(layer) || layer->mtp || index++ >= n_layers * 3 / 4) continue;
        for (int k = 0; k < layer->n; k++) layer->experts[k].outlier = layer->experts[k].weighted_max > limit;
    }
    arrfree(all);
}

/* qsort: outliers first, then larger scores, then lower ids (their order in memory). */
static int by_rank(const void *a, const void *b) {
    const struct expert *x = *(struct expert *const *)a, *y = *(struct expert *const *)b;
    if (x->outlier != y->outlier) return x->outlier ? -1 : 1;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return (x > y) - (x < y);
}

/* Sets the scores by the criterion and ranks the experts of each routing group. */
static void rank_experts(void) {
    if (opts.outliers) protect_outliers();
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        struct expert_layer *layer = &m.layers[i];
        int per = layer->n / m.n_group;
        if (!selectable(layer)) continue;
        layer->ranking = xrealloc(NULL, (size_t)layer->n * sizeof(struct expert *));
        for (int k = 0; k < layer->n; k++) {
            struct expert *e = &layer->experts[k];
            double sum = opts.criterion == NORM ? e->norm_sum : e->weighted_sum;
            e->score = opts.criterion == RANDOM      ? rng_uniform(&random_state)
                       : opts.criterion == FREQUENCY ? (double)e->tokens
                       : e->tokens                   ? sum / (double)e->tokens
                                                     : 0;
            layer->ranking[k] = e;
        }
        for (int g = 0; g < m.n_group; g++)
            qsort(layer->ranking + g * per, (size_t)per, sizeof(struct expert *), by_rank);
    }
}

/* Returns the sum of the scores of the t-th best experts of all groups, as a share of the layer; infinity for an
 * outlier. */
static double unit_value(const struct expert_layer *layer, int t) {
    double sum = 0, v = 0;
    for (int k = 0; k < layer->n; k++) sum += layer->experts[k].score;
    for (int g = 0; g < m.n_group; g++) {
        const struct expert *e = layer->ranking[g * (layer->n / m.n_group) + t];
        if (e->outlier) return INFINITY;
        v += sum > 0 ? e->score / sum : 0;
    }
    return v;
}

/* Redistributes the retained experts over the layers (--per-layer): every layer gets the floor, and each further unit
 * goes to the layer where it has the largest share of the scores. */
static void spread_counts(void) {
    int units = 0, most = 0;
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        if (selectable(&m.layers[i]) && m.layers[i].n_retained > most) most = m.layers[i].n_retained;
    int least = (most + 1) / 2 > m.min_experts ? (most + 1) / 2 : m.min_experts;
    if (opts.floor) least = opts.floor;
    least = (least + m.n_group - 1) / m.n_group * m.n_group;
    if (least > most) die("--floor %d: an even distribution gives only %d experts per layer", opts.floor, most);
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        struct expert_layer *layer = &m.layers[i];
        if (!selectable(layer)) continue;
        units += layer->n_retained;
        layer->n_retained = layer->n_retained < least ? layer->n_retained : least;
        units -= layer->n_retained;
    }
    for (units /= m.n_group; units > 0; units--) {
        struct expert_layer *best = NULL;
        double value = 0;
        for (size_t i = 0; i < arrlenu(m.layers); i++) {
            struct expert_layer *layer = &m.layers[i];
            if (!selectable(layer) || layer->n_retained == layer->n) continue;
            double v = unit_value(layer, layer->n_retained / m.n_group);
            if (!best || v > value) {
                best = layer;
                value = v;
            }
        }
        best->n_retained += m.n_group;
    }
}

/* Marks the best n_retained experts of every layer as retained and numbers them. */
static void mark_retained(void) {
    const struct expert_layer *last = NULL;
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        struct expert_layer *layer = &m.layers[i];
        int per = layer->n / m.n_group;
        if (selectable(layer))
            for (int k = 0; k < layer->n; k++) layer->ranking[k]->retained = k % per < layer->n_retained / m.n_group;
        if (removed(layer) || layer->follows) {
            layer->n_retained = removed(layer) ? 0 : last->n_retained;
            for (int k = 0; k < layer->n; k++)
                layer->experts[k].retained = !removed(layer) && last->experts[k].retained;
        }
        if (!layer->mtp) last = layer;
        for (int k = 0, n = 0; k < layer->n; k++)
            if (layer->experts[k].retained) layer->experts[k].new_id = n++;
    }
}

/* Returns the most experts of a selectable layer. */
static int largest_layer(void) {
    int most = 0;
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        if (selectable(&m.layers[i]) && m.layers[i].n > most) most = m.layers[i].n;
    return most;
}

/* Retains n experts in every layer, or all if it has fewer. */
static void select_uniform(int n) {
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        if (selectable(&m.layers[i])) m.layers[i].n_retained = m.layers[i].n < n ? m.layers[i].n : n;
    if (opts.per_layer) spread_counts();
    mark_retained();
}

/* Dies unless a layer of n experts can retain `count`. n -1: the largest layer. who: what asks for it, for the
 * message. */
static void check_count(const char *who, int count, int n) {
    int most = n < 0 ? largest_layer() : n, lower = count / m.n_group * m.n_group;
    if (count < m.min_experts)
        die("%s: %d expert%s too few: %d per token%s need %d", who, count, count == 1 ? " is" : "s are", m.top_k,
            m.n_group > 1 ? fmt(" from %d of %d groups", m.n_group_used, m.n_group) : "", m.min_experts);
    if (count > most) die("%s: %d experts are more than the %d of the model", who, count, most);
    if (count != lower)
        die("%s: %d experts are not a multiple of the %d groups; %d and %d are", who, count, m.n_group, lower,
            lower + m.n_group);
}

/* Removes the share --ratio of every layer's experts, rounded down to whole units. */
static void select_by_ratio(void) {
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        struct expert_layer *layer = &m.layers[i];
        if (!selectable(layer)) continue;
        layer->n_retained =
            layer->n - (int)(layer->n * opts.ratio + 1e-9) / m.n_group * m.n_group; /* never more than the share */
        check_count(fmt("--ratio %g: layer %d", opts.ratio, layer->block), layer->n_retained, layer->n);
    }
    if (opts.per_layer) spread_counts();
    mark_retained();
}

/* Returns why --counts cannot name a layer, NULL if it can. layer NULL: it has no routed experts. */
static const char *not_counted(const struct expert_layer *layer) {
    if (!layer) return "has no routed experts";
    if (removed(layer)) return "is removed by --mtp drop";
    return layer->follows ? "has no scores and keeps the experts of the last layer before it" : NULL;
}

/* Retains what the file of --counts says: lines "LAYER COUNT", where # begins a comment. */
static void select_by_counts(void) {
    FILE *f = input_file(opts.counts);
    char *line = NULL;
    size_t cap = 0, no = 0;
    bool seen[MAX_BLOCKS] = {false};
    while (line_next(f, opts.counts, &line, &cap) >= 0) {
        int block, count, end = 0;
        no++;
        line[strcspn(line, "#\n")] = 0;
        if (!line[strspn(line, " \t\r")]) continue;
        const char *who = fmt("'%s', line %zu", opts.counts, no);
        if (sscanf(line, "%6d %6d %n", &block, &count, &end) != 2 || line[end])
            die("%s: expected LAYER COUNT, found '%s'", who, line);
        struct expert_layer *layer = layer_find(block);
        if (not_counted(layer)) die("%s: layer %d %s", who, block, not_counted(layer));
        if (seen[block]) die("%s: layer %d appears twice", who, block);
        seen[block] = true;
        if (layer->hash_routed && count != layer->n)
            die("%s: layer %d is routed by hash and keeps its %d experts", who, block, layer->n);
        if (!layer->hash_routed) check_count(fmt("%s: layer %d", who, block), count, layer->n);
        layer->n_retained = count;
    }
    free(line);
    fclose(f);
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        if (selectable(&m.layers[i]) && !seen[m.layers[i].block])
            die("'%s': layer %d is missing", opts.counts, m.layers[i].block);
    mark_retained();
}

/* Retains as many experts per layer as --budget allows, by binary search. output_bytes: returns the size of the output
 * with the experts that are marked as retained. */
static void select_within_budget(size_t (*output_bytes)(void)) {
    int least = opts.per_layer && opts.floor > m.min_experts ? opts.floor : m.min_experts;
    int lo = (least + m.n_group - 1) / m.n_group, hi = largest_layer() / m.n_group;
    while (lo < hi) { /* in units: lo may fit, hi + 1 does not */
        int mid = (lo + hi + 1) / 2;
        select_uniform(mid * m.n_group);
        if ((double)output_bytes() <= opts.budget * 0x1p30) lo = mid;
        else hi = mid - 1;
    }
    select_uniform(lo * m.n_group);
    if ((double)output_bytes() <= opts.budget * 0x1p30) return;
    die("--budget %g GiB: the smallest output, with %d experts a layer, has %zu bytes (%.4f GiB)", opts.budget,
        lo * m.n_group, output_bytes(), (double)output_bytes() / 0x1p30);
}

/* Ranks the experts and marks the retained ones. output_bytes: see select_within_budget. */
static void select_experts(size_t (*output_bytes)(void)) {
    rank_experts();
    if (amount == KEEP) check_count("--keep", opts.keep, -1);
    if (opts.per_layer && opts.floor) check_count("--floor", (opts.floor + m.n_group - 1) / m.n_group * m.n_group, -1);
    if (amount == KEEP) select_uniform(opts.keep);
    if (amount == RATIO) select_by_ratio();
    if (amount == BUDGET) select_within_budget(output_bytes);
    if (amount == COUNTS) select_by_counts();
}

/* A summary of the selection. */
struct outcome {
    int largest;  /* retained experts of the layer that has most */
    int chosen;   /* the same among selectable layers */
    bool differ;  /* selectable layers retain different numbers */
    bool dropped; /* a selectable layer loses experts */
};

static struct outcome outcome(void) {
    struct outcome o = {0};
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        const struct expert_layer *layer = &m.layers[i];
        o.largest = layer->n_retained > o.largest ? layer->n_retained : o.largest;
        if (!selectable(layer)) continue;
        o.differ |= o.chosen && o.chosen != layer->n_retained;
        o.chosen = layer->n_retained > o.chosen ? layer->n_retained : o.chosen;
        o.dropped |= layer->n_retained < layer->n;
    }
    return o;
}

/* Returns the name of the output: --name, or NAME-REAP-KofE for a model called NAME or NAME-REAP-... Valid as long as
 * fmt's. */
static const char *pruned_name(const char *name) {
    struct outcome o = outcome();
    const char *tail = strstr(name, "-REAP"), *rest;
    unsigned k, e;
    int end = 0;
    if (opts.name) return opts.name;
    if (!o.dropped) return name;
    for (; tail && (rest = strstr(tail + 1, "-REAP")); tail = rest) continue;
    if (tail && tail[5] && (sscanf(tail + 5, "-%4uof%4u%n", &k, &e, &end) != 2 || tail[5 + end])) tail = NULL;
    int n = tail ? (int)(tail - name) : (int)strlen(name);
    if (o.differ || !m.original_experts) return fmt("%.*s-REAP", n, name);
    return fmt("%.*s-REAP-%dof%d", n, name, o.chosen, m.original_experts);
}

/* ============================================================================================================
 * GGUF
 *
 * Reads a GGUF file and writes the pruned one. Tensors stay in their order. Of a tensor with one slice per expert, the
 * slices of the retained experts are copied in their order; all other tensors are copied whole.
 * ============================================================================================================ */

static struct gguf gguf; /* the source */

/* How a tensor is copied. */
struct slicing {
    int layer;     /* index into m.layers: has one slice for each expert of that layer; -1: copied whole */
    size_t n_zero; /* slices after these, of zero-computation experts, which stay */
    bool dropped;  /* not copied, because it is of an MTP layer and --mtp drop was given */
};

static struct slicing *slicings; /* (gguf.n_tensors) */
static uint8_t *gguf_head;       /* the header of the output */
static size_t gguf_head_size;    /* bytes of the header */
static uint64_t gguf_data;       /* bytes after the header */

/* Returns a name for messages; valid as long as fmt's. */
static const char *kv_name(struct gguf_str s) {
    char text[128];
    return fmt("%s", gguf_printable(s, text, sizeof text));
}

/* Returns the key of the architecture with this suffix; valid as long as fmt's. */
static const char *arch_key(const char *suffix) { return fmt("%s.%s", m.arch, suffix); }

/* Returns the value of a key: an integer from lo to hi, or an array of equal ones. fallback: its value if it is
 * missing, -1: the key is mandatory. */
static int meta_int(const char *key, int fallback, int lo, int hi) {
    const struct gguf_kv *kv = gguf_find(&gguf, key);
    int64_t v = 0, w;
    if (!kv && fallback >= 0) return fallback;
    if (!kv) die("'%s': metadata key '%s' is missing", m.path, key);
    if (!kv->n || !gguf_elem_int(kv, 0, &v)) die("'%s': metadata key '%s' is not an integer", m.path, key);
    for (uint64_t i = 1; i < kv->n; i++)
        if (!gguf_elem_int(kv, i, &w) || w != v) die("'%s': metadata key '%s' differs between layers", m.path, key);
    if (v < lo || v > hi) die("'%s': metadata key '%s' is %lld, expected %d to %d", m.path, key, (long long)v, lo, hi);
    return (int)v;
}

/* Opens all parts of the file as shards. They are read with pread, so that a failing disk is an error and not a
 * signal. */
static void gguf_parts(const char *path) {
    char prefix[PATH_MAX];
    unsigned no = 1, count = 1;
    bool split = gguf_split_name(path, prefix, sizeof prefix, &no, &count);
    for (unsigned i = 0; i < count; i++) {
        const char *part = split ? fmt("%s-%05u-of-%05u.gguf", prefix, i + 1, count) : path;
        struct source_file s = {xstrdup(part), input_open(part)};
        arrput(shards, s);
        m.bytes += gguf.images[i].size;
    }
}

/* Returns the offset of a tensor in its part of the file. */
static size_t gguf_offset(const struct gguf_tensor *t) { return (size_t)(t->data - gguf.images[t->shard].base); }

/* Adds a router to m.router_hash, as F32. */
static void gguf_hash_router(const struct gguf_tensor *t) {
    size_t cols = (size_t)t->ne[0], bytes = gguf_row_bytes(t->type, cols);
    float *row = (float *)(void *)scratch(1, cols * sizeof *row);
    const struct gguf_format *format = gguf_find_format(t->type);
    if (!format)
        die("'%s': tensor '%s' has the type %s, which is not a weight type", m.path, kv_name(t->name),
            gguf_type_info(t->type).name);
    for (uint64_t r = 0; r < t->ne[1]; r++) {
        uint8_t *raw = scratch(0, bytes);
        read_exact(&shards[t->shard], gguf_offset(t) + r * bytes, raw, bytes);
        format->decode(raw, row, cols);
        m.router_hash = hash_bytes(m.router_hash, row, cols * sizeof *row);
    }
}

/* Reads moe.reap.kept.N, the original ids of a layer's experts, if it is there. */
static void gguf_read_retained(struct expert_layer *layer) {
    const char *key = fmt("moe.reap.kept.%d", layer->block);
    const struct gguf_kv *kv = gguf_find(&gguf, key);
    int64_t v, last = -1;
    if (!kv) return;
    m.pruned = layer->lists_ids = true;
    if (!kv->is_array || kv->n != (uint64_t)layer->n)
        die("'%s': metadata key '%s' lists %llu experts, the layer has %d", m.path, key, (unsigned long long)kv->n,
            layer->n);
    for (int i = 0; i < layer->n; i++, last = v) {
        if (!gguf_elem_int(kv, (uint64_t)i, &v) || v <= last || v > INT32_MAX ||
            (m.original_experts && v >= m.original_experts))
            die("'%s': metadata key '%s' is not an ascending list of expert ids", m.path, key);
        layer->experts[i].original_id = (int32_t)v;
    }
}

/* Returns the number N of the layer of a tensor "blk.N.REST" and sets *rest; -1 if the name is not of that form. */
static int tensor_block(const char *name, const char **rest) {
    char *end;
    if (!starts_with(name, "blk.") || name[4] < '0' || name[4] > '9') return -1;
    long n = strtol(name + 4, &end, 10);
    *rest = end + 1;
    return *end == '.' && n < INT_MAX ? (int)n : -1;
}

/* Finds out how a tensor is copied. */
static void gguf_find_slicing(const struct gguf_tensor *t, struct slicing *c) {
    char name[GGUF_MAX_NAME + 1];
    const char *rest = "";
    if (memchr(t->name.p, 0, t->name.n)) die("'%s': the name of tensor '%s' holds a NUL", m.path, kv_name(t->name));
    snprintf(name, sizeof name, "%.*s", (int)t->name.n, t->name.p);
    int block = tensor_block(name, &rest);
    struct expert_layer *layer = block < 0 ? NULL : layer_find(block);
    c->layer = -1;
    c->n_zero = 0;
    c->dropped = opts.mtp == MTP_DROP && block >= m.n_trunk;
    if (!strstr(rest, "_exps.") && !starts_with(rest, "ffn_gate_inp.") && !starts_with(rest, "exp_probs_b")) return;
    if (!strcmp(rest, "ffn_gate_inp.scale") || !strcmp(rest, "ffn_norm_exps.weight")) return; /* of what these read */
    if (!layer) die("'%s': tensor '%s' without 'blk.%d.ffn_gate_inp.weight'", m.path, name, block);
    uint64_t n = t->ne[t->n_dims - 1], all = t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    if (all == 1 && ends_with(rest, "scale")) return; /* one scale for all experts */
    if (!strstr(rest, "_exps.")) c->n_zero = (size_t)m.n_zero;
    if (n != (uint64_t)layer->n + c->n_zero)
        die("'%s': tensor '%s' ends in a dimension of %llu, the layer has %d experts%s", m.path, name,
            (unsigned long long)n, layer->n, c->n_zero ? fmt(" and %zu without computation", c->n_zero) : "");
    if (t->n_dims == 1 && gguf_type_info(t->type).block > 1)
        die("'%s': tensor '%s' has the type %s, which cannot be cut by expert", m.path, name,
            gguf_type_info(t->type).name);
    c->layer = (int)(layer - m.layers);
}

/* Opens the source and fills in m. */
static void gguf_read(const char *path) {
    static char arch[64];
    char err[1024];
    struct gguf_str s = {"", 0};
    if (gguf_open(&gguf, path, err, sizeof err)) die("%s", err);
    gguf_parts(path);
    if (!gguf_get_str(&gguf, "general.architecture", &s) || !s.n || s.n >= sizeof arch)
        die("'%s': metadata key 'general.architecture' is missing or not a short string", path);
    m.arch = gguf_printable(s, arch, sizeof arch);
    int blocks = meta_int(arch_key("block_count"), -1, 1, MAX_LAYERS);
    m.n_mtp = meta_int(arch_key("nextn_predict_layers"), 0, 0, blocks - 1);
    m.n_trunk = blocks - m.n_mtp;
    m.top_k = meta_int(arch_key("expert_used_count"), -1, 1, MAX_EXPERTS);
    m.n_zero = meta_int(arch_key("expert_zero_count"), 0, 0, MAX_EXPERTS);
    m.n_group = meta_int(arch_key("expert_group_count"), 1, 0, MAX_EXPERTS);
    if (!m.n_group) m.n_group = 1;
    m.n_group_used = meta_int(arch_key("expert_group_used_count"), m.n_group, m.n_group > 1, m.n_group);
    if (m.n_group == 1) m.n_group_used = 1;
    m.original_experts = meta_int("moe.reap.original_expert_count", 0, 0, INT_MAX);
    m.pruned = meta_int("moe.reap.pruned", 0, 0, 1);
    m.router_hash = HASH_START;
    for (int b = 0; b < blocks; b++) {
        const struct gguf_tensor *t = gguf_find_tensor(&gguf, fmt("blk.%d.ffn_gate_inp.weight", b));
        if (!t) continue;
        const size_t n = t->n_dims == 2 && t->ne[1] > (uint64_t)m.n_zero ? (size_t)t->ne[1] - (size_t)m.n_zero : 0;
        struct expert_layer *layer = layer_add(b, n, kv_name(t->name));
        layer->hash_routed = gguf_find_tensor(&gguf, fmt("blk.%d.ffn_gate_tid2eid", b)) ||
                             gguf_find_tensor(&gguf, fmt("blk.%d.ffn_gate_tid2eid.weight", b));
        if (b < m.n_trunk) gguf_hash_router(t);
        gguf_read_retained(layer);
    }
    slicings = xrealloc(NULL, gguf.n_tensors * sizeof *slicings);
    for (uint32_t i = 0; i < gguf.n_tensors; i++) gguf_find_slicing(&gguf.tensors[i], &slicings[i]);
}

/* Returns the FNV-1a hash of everything before the data in all parts of the source. */
static uint64_t gguf_source_hash(void) {
    uint64_t h = HASH_START;
    for (uint32_t k = 0; k < gguf.n_images; k++) {
        size_t end = gguf.images[k].size;
        for (uint32_t i = 0; i < gguf.n_tensors; i++)
            if (gguf.tensors[i].shard == k && gguf_offset(&gguf.tensors[i]) < end) end = gguf_offset(&gguf.tensors[i]);
        h = hash_bytes(h, gguf.images[k].base, end);
    }
    return h;
}

/* Copies a key of the source; of an array only the first n elements. */
static void put_kv(struct gguf_writer *w, const struct gguf_kv *kv, uint64_t n) {
    const uint8_t *end = kv->data + n * gguf_value_bytes(kv->type);
    for (uint64_t i = 0; kv->type == GGUF_V_STR && i < n; i++) gguf_next_str(&end);
    gguf_put_bytes(w, kv->key.p, kv->key.n);
    gguf_put_u32_raw(w, kv->is_array ? GGUF_V_ARR : kv->type);
    if (kv->is_array) {
        gguf_put_u32_raw(w, kv->type);
        gguf_put_u64_raw(w, n);
    }
    gguf_put(w, kv->data, (size_t)(end - kv->data));
    w->n_kv++;
}

/* Writes how many experts each of `blocks` layers retains; 0: dense. */
static void put_counts_per_layer(struct gguf_writer *w, int blocks) {
    int32_t counts[MAX_LAYERS] = {0};
    for (size_t i = 0; i < arrlenu(m.layers); i++) counts[m.layers[i].block] = m.layers[i].n_retained;
    gguf_put_array(w, arch_key("expert_count_per_layer"), GGUF_V_I32, (uint64_t)blocks, counts);
}

/* Writes moe.reap.kept.N, the original ids of the retained experts, for each layer that has lost experts. */
static void put_retained(struct gguf_writer *w) {
    bool unknown = false;
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        const struct expert_layer *layer = &m.layers[i];
        int32_t ids[MAX_EXPERTS];
        int n = 0;
        for (int k = 0; k < layer->n; k++)
            if (layer->experts[k].retained) ids[n++] = layer->experts[k].original_id;
        if (!n || (layer->n_retained == layer->n && !layer->lists_ids)) continue;
        if (ids[0] < 0) unknown = true;
        else gguf_put_array(w, fmt("moe.reap.kept.%d", layer->block), GGUF_V_I32, (uint64_t)n, ids);
    }
    static bool reported;
    if (unknown && !reported)
        err_message("'%s' was pruned but has no list of original expert ids: the output has none", m.path);
    reported |= unknown;
}

/* Writes the keys moe.reap.*. source: the hash of the source. */
static void put_reap(struct gguf_writer *w, uint64_t source) {
    char hash[17];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)source);
    gguf_put_bool(w, "moe.reap.pruned", m.pruned || outcome().dropped);
    if (m.original_experts) gguf_put_u32(w, "moe.reap.original_expert_count", (uint32_t)m.original_experts);
    put_retained(w);
    gguf_put_str(w, "moe.reap.criterion", criteria[opts.criterion], strlen(criteria[opts.criterion]));
    if (scores.n_files) {
        gguf_put_key(w, "moe.reap.calibration.tokens", GGUF_V_U64);
        gguf_put_u64_raw(w, (uint64_t)scores.tokens);
        gguf_put_f32(w, "moe.reap.calibration.coverage", (float)((double)scores.covered / (double)scores.total));
    }
    gguf_put_str(w, "moe.reap.source_hash", hash, 16);
}

/* Writes the keys of the source in their order, with the values that pruning changes, and then moe.reap.*. */
static void put_metadata(struct gguf_writer *w) {
    static uint64_t source;
    struct outcome o = outcome();
    int blocks = m.n_trunk + (opts.mtp == MTP_DROP ? 0 : m.n_mtp);
    bool named = false, listed = false;
    char name[1024];
    for (uint32_t i = 0; i < gguf.n_kv; i++) {
        const struct gguf_kv *kv = &gguf.kv[i];
        char key[128];
        gguf_printable(kv->key, key, sizeof key);
        bool ours = starts_with(key, m.arch) && key[strlen(m.arch)] == '.';
        const char *suffix = ours ? key + strlen(m.arch) + 1 : "";
        if (starts_with(key, "split.") || starts_with(key, "moe.reap.")) continue;
        if (!strcmp(key, "general.name") && kv->type == GGUF_V_STR && !kv->is_array) {
            const uint8_t *p = kv->data;
            struct gguf_str s = gguf_next_str(&p);
            snprintf(name, sizeof name, "%.*s", s.n < 900 ? (int)s.n : 900, s.p);
            const char *text = pruned_name(name);
            gguf_put_str(w, key, text, strlen(text));
            named = true;
        } else if (!strcmp(key, "general.alignment")) gguf_put_u32(w, key, GGUF_DEFAULT_ALIGN);
        else if (!strcmp(suffix, "expert_count")) gguf_put_u32(w, key, (uint32_t)o.largest);
        else if (!strcmp(suffix, "expert_count_per_layer")) {
            put_counts_per_layer(w, blocks);
            listed = true;
        } else if ((opts.mtp == MTP_DROP) && !strcmp(suffix, "block_count")) gguf_put_u32(w, key, (uint32_t)blocks);
        else if ((opts.mtp == MTP_DROP) && !strcmp(suffix, "nextn_predict_layers")) gguf_put_u32(w, key, 0);
        else if ((opts.mtp == MTP_DROP) && ours && kv->is_array && kv->n == (uint64_t)(m.n_trunk + m.n_mtp) &&
                 strcmp(suffix, "rope.dimension_sections"))
            put_kv(w, kv, (uint64_t)blocks); /* an array with one element per layer */
        else put_kv(w, kv, kv->n);
    }
    if (opts.name && !named) gguf_put_str(w, "general.name", opts.name, strlen(opts.name));
    if (o.differ && !listed) put_counts_per_layer(w, blocks);
    if (!source) source = gguf_source_hash();
    put_reap(w, source);
}

/* Makes the header of the output for the retained experts. Returns the bytes of the whole file. */
static size_t gguf_plan(void) {
    struct gguf_writer w = {0};
    put_metadata(&w);
    for (uint32_t i = 0; i < gguf.n_tensors; i++) {
        const struct gguf_tensor *t = &gguf.tensors[i];
        uint64_t ne[4] = {t->ne[0], t->ne[1], t->ne[2], t->ne[3]};
        char name[GGUF_MAX_NAME + 1];
        snprintf(name, sizeof name, "%.*s", (int)t->name.n, t->name.p);
        if (slicings[i].dropped) continue;
        if (slicings[i].layer >= 0)
            ne[t->n_dims - 1] = (uint64_t)m.layers[slicings[i].layer].n_retained + slicings[i].n_zero;
        gguf_add_tensor(&w, name, t->type, t->n_dims, ne);
    }
    free(gguf_head);
    gguf_head = gguf_header(&w, &gguf_head_size);
    if (!gguf_head) die("out of memory for the header");
    gguf_data = w.data_bytes;
    gguf_writer_free(&w);
    return gguf_head_size + gguf_data;
}

/* Copies the bytes [at, at + n) of a file to the output and drops large ranges from the page cache. */
static void copy_bytes(const struct source_file *s, size_t at, size_t n) {
    for (size_t k; n; at += k, n -= k) {
        k = n < CHUNK_BYTES ? n : CHUNK_BYTES;
        uint8_t *buf = scratch(0, k);
        read_exact(s, at, buf, k);
        if (k >= 1 << 20) posix_fadvise(s->fd, (off_t)at, (off_t)k, POSIX_FADV_DONTNEED);
        out_write(buf, k);
    }
}

/* Copies the slices of the retained experts of a layer. The slices begin at `at` and have `bytes` bytes each; neighbors
 * are copied together. */
static void copy_retained(const struct source_file *s, size_t at, size_t bytes, const struct expert_layer *layer) {
    for (int k = 0, run; k < layer->n; k += run) {
        for (run = 1; k + run < layer->n && layer->experts[k + run].retained == layer->experts[k].retained; run++)
            continue;
        if (layer->experts[k].retained) copy_bytes(s, at + (size_t)k * bytes, (size_t)run * bytes);
    }
}

/* Writes the output. */
static void gguf_write(char path[PATH_MAX]) {
    static const uint8_t zeros[GGUF_DEFAULT_ALIGN];
    uint32_t n = 0;
    out_begin(path);
    out_write(gguf_head, gguf_head_size);
    for (uint32_t i = 0; i < gguf.n_tensors; i++) {
        const struct gguf_tensor *t = &gguf.tensors[i];
        const struct source_file *s = &shards[t->shard];
        size_t from = dest.done;
        if (slicings[i].dropped) continue;
        if (slicings[i].layer < 0) copy_bytes(s, gguf_offset(t), t->bytes);
        else {
            const struct expert_layer *layer = &m.layers[slicings[i].layer];
            const size_t all = (size_t)layer->n + slicings[i].n_zero, bytes = t->bytes / all;
            copy_retained(s, gguf_offset(t), bytes, layer);
            copy_bytes(s, gguf_offset(t) + (size_t)layer->n * bytes, slicings[i].n_zero * bytes);
        }
        out_write(zeros, gguf_pad(dest.done - from) - (dest.done - from));
        n++;
    }
    if (dest.done != dest.total) die("internal error: %zu bytes written, %zu planned", dest.done, dest.total);
    out_end();
    err_message("'%s': %u tensors, %s", path, n, human((double)dest.total));
}

/* ============================================================================================================
 * Hugging Face directory
 *
 * Writes a directory with the same files. Tensors of removed experts are left out, those of retained experts are
 * renumbered, stacks and routers are sliced. config.json, the index and lists of quantized modules are changed
 * accordingly. All other files are copied with their permissions, but not what links lead to outside.
 * ============================================================================================================ */

/* What the name of a tensor, or of a module in a list, refers to. */
enum role {
    OTHER,
    EXPERT, /* one expert */
    STACK,  /* all experts of a layer */
    ROUTER
};

struct parsed_name {
    enum role role;
    int block;        /* number of the layer, -1: none */
    int expert;       /* EXPERT: its number */
    size_t at, end;   /* EXPERT: where its digits are in the name */
    size_t prefix;    /* bytes before "layers.", of DeepSeek-V4 "mtp.", or of Hunyuan 4 "mtp_layers." */
    bool mtp;         /* below the last two, whose layers come after the others */
    const char *rest; /* the name after the number of the layer and its dot */
};

/* Returns the number at s, at most six digits without a sign, and sets *n to its length; -1 if there is none. */
static int digits(const char *s, size_t *n) {
    *n = strspn(s, "0123456789");
    return *n && *n <= 6 ? (int)strtol(s, NULL, 10) : -1;
}

/* Whether the name p of a tensor, after "mlp." or the like, is one of these words or begins with one and a dot. */
static bool begins_with_word(const char *p, const char *words) {
    const size_t n = strcspn(p, ".");
    return one_of(fmt("%.*s", (int)n, p), words);
}

/* Returns where `word`, such as ".layers.", ends in a name, which may begin with it without its first dot; NULL: it is
 * not there. */
static const char *after(const char *name, const char *word) {
    const char *p = strstr(name, word);
    if (starts_with(name, word + 1)) return name + strlen(word + 1);
    return p ? p + strlen(word) : NULL;
}

/* Parses a name such as "model.layers.3.mlp.experts.5.up_proj.weight", with any prefix, or "mtp.0.ffn.gate.weight". */
static struct parsed_name name_parse(const char *name) {
    static const char *const stems[] = {"mlp.", "ffn.", "block_sparse_moe.", "feed_forward.", "moe.", "mixer.", ""};
    static const char routers[] =
        "gate router primary_router moe_statics e_score_correction_bias expert_bias router_bias";
    struct parsed_name r = {.block = -1, .rest = ""};
    r.mtp = starts_with(name, "mtp.") || strstr(name, ".mtp.") || strstr(name, ".mtp_");
    static const char *const before[] = {".layers.", ".mtp.", ".mtp_layers."};
    const char *p = NULL;
    size_t n, k = 0;
    while (k < COUNT(before) && !(p = after(name, before[k]))) k++;
    if (!p) return r;
    r.block = digits(p, &n);
    if (r.block >= 0 && p[n] != '.') r.block = -1;
    if (r.block < 0) return r;
    r.prefix = (size_t)(p - name) - strlen(before[k] + 1);
    if (r.mtp) r.block = m.n_trunk + (m.mtp_halves ? r.block / 2 : r.block);
    r.rest = p += n + 1;
    k = 0;
    while (k < COUNT(stems) && !starts_with(p, stems[k])) k++;
    p += strlen(stems[k]);
    if (begins_with_word(p, routers) && !ends_with(p, "tid2eid") && strcmp(p, "router.scale")) r.role = ROUTER;
    if (!strcmp(stems[k], "moe.") && begins_with_word(p, "gate_proj up_proj down_proj")) r.role = STACK;
    if (!strcmp(stems[k], "block_sparse_moe.") && begins_with_word(p, "input_linear output_linear")) r.role = STACK;
    if (!starts_with(p, "experts.")) return r;
    r.expert = digits(p + 8, &n);
    if (r.expert < 0 || (p[8 + n] && p[8 + n] != '.')) r.role = STACK;
    else {
        r.role = EXPERT;
        r.at = (size_t)(p + 8 - name);
        r.end = r.at + n;
    }
    return r;
}

/* A file of the output: a text, a safetensors file with `text` as its header, or a copy. */
struct out_file {
    char *name;
    char *text;       /* stb_ds */
    int shard, other; /* index into shards or others; -1: it is not of that kind */
    size_t bytes;
};

/* A file that is copied. */
struct other_file {
    struct source_file source;
    size_t bytes;
    mode_t mode; /* permissions */
};

static struct out_file *hf_files;  /* stb_ds */
static struct other_file *others;  /* stb_ds */
static uint32_t *by_place;         /* (arrlen(tensors)) indices of tensors, sorted by shard and offset */
static const char *hf_prefix = ""; /* of the names of layers; layers of a vision tower have another one */
static char **hf_metadata;         /* stb_ds: __metadata__ of every shard as JSON; NULL: none */
static struct doc hf_config, hf_text, hf_quant,
    hf_index; /* config.json, its text_config, hf_quant_config.json, index */

/* Keys of config.json for the number of experts, for those of a token, and for groups of experts. The first may be lists
 * with a number for every layer, as per_layer_num_experts and moe_sparsity_config.num_experts of quantization_config
 * are. */
static const char *const count_keys[] = {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
                                         "moe_num_primary_experts"};
static const char *const top_k_keys[] = {"num_experts_per_tok",           "moe_k",         "moe_top_k",
                                         "num_experts_per_token",         "top_k_experts", "moe_topk",
                                         "moe_num_active_primary_experts"};
static const char *const group_keys[] = {"n_group", "num_expert_group"};
static const char sparsity_key[] = "moe_sparsity_config", layers_key[] = "per_layer_num_experts";

/* Returns the object of config.json that has a key: text_config, or else all of it. */
static struct doc hf_doc_of(const char *key) { return get(hf_text, key) ? hf_text : hf_config; }

static int hf_int(const char *key, int64_t lo, int64_t hi, int64_t fallback) {
    return (int)get_int(hf_doc_of(key), key, lo, hi, fallback);
}

/* Returns the one of n keys that config.json has, or the first. */
static const char *hf_key_of(const char *const *keys, size_t n) {
    while (--n && !get(hf_doc_of(keys[n]), keys[n])) continue;
    return keys[n];
}

/* Returns how many experts a token has: a number, or a list of it for each layer. */
static int hf_top_k(void) {
    const char *key = hf_key_of(top_k_keys, COUNT(top_k_keys));
    const struct doc d = hf_doc_of(key);
    json_t *v, *list = get(d, key);
    size_t i;
    if (!json_is_array(list)) return hf_int(key, 1, MAX_EXPERTS, REQUIRED);
    const int64_t n = json_element(list, 0);
    json_array_foreach(list, i, v)
        expect(d, key, n >= 1 && n <= MAX_EXPERTS && json_element(list, i) == n, "the same number for all layers");
    return (int)n;
}

/* Finds the layers by their routers and hashes those of the trunk. A hash-routed layer also has a table from token ids
 * to experts. */
static void hf_read_layers(void) {
    struct tensor *routers[MAX_BLOCKS] = {NULL};
    bool hash_routed[MAX_BLOCKS] = {false};
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        struct tensor *t = &tensors[i];
        struct parsed_name p = name_parse(t->name);
        bool router =
            p.role == ROUTER && (ends_with(p.rest, ".gate.weight") || ends_with(p.rest, ".router.weight") ||
                                 ends_with(p.rest, ".gate.wg.weight") || ends_with(p.rest, ".router.layer.weight") ||
                                 ends_with(p.rest, ".primary_router.weight") || !strcmp(p.rest, "router.proj.weight"));
        bool table = ends_with(p.rest, "tid2eid");
        if (p.block < 0 || (!router && !table)) continue;
        if (p.block >= (int)COUNT(routers))
            die("%s: layer %d is beyond the limit of %d", where(t), p.block, MAX_LAYERS);
        hash_routed[p.block] |= table;
        if (router && routers[p.block]) die("%s: the layer has another router, '%s'", where(t), routers[p.block]->name);
        if (router) routers[p.block] = t;
    }
    for (int b = 0; b < (int)COUNT(routers); b++) {
        struct tensor *t = routers[b];
        if (!t) continue;
        if (t->rank != 2 || !is_float(t))
            die("%s: expected a matrix of BF16, F16 or F32, found %s", where(t), shape_text(t));
        layer_add(b, t->shape[0], t->name)->hash_routed = hash_routed[b];
        if (arrlen(m.layers) == 1) {
            char *prefix = xstrdup(t->name);
            prefix[name_parse(t->name).prefix] = 0;
            hf_prefix = prefix;
        }
        size_t cols = t->shape[1], bytes = cols * (dtypes[t->dtype].bits / 8);
        float *row = (float *)(void *)scratch(1, cols * sizeof *row);
        for (size_t r = 0; r < t->shape[0] && b < m.n_trunk; r++) {
            uint8_t *raw = scratch(0, bytes);
            tensor_read(t, r * bytes, raw, bytes);
            gguf_dequantize_row(float_type(t), raw, row, cols);
            m.router_hash = hash_bytes(m.router_hash, row, cols * sizeof *row);
        }
    }
}

/* Returns which size of a tensor with one slice for each of n experts is n: the first, after sizes of 1. */
static uint32_t slice_axis(const struct tensor *t, size_t n) {
    uint32_t d = 0;
    while (d + 1 < t->rank && t->shape[d] == 1 && n != 1) d++;
    return d;
}

/* Checks that all experts of a layer have the same number of tensors, and that stacks and routers have one slice per
 * expert. */
static void hf_check_tensors(void) {
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        const struct tensor *t = &tensors[i];
        struct parsed_name p = name_parse(t->name);
        if (p.role == OTHER) continue;
        struct expert_layer *layer = layer_find(p.block);
        if (!layer) die("%s: layer %d has no router mlp.gate.weight", where(t), p.block);
        if (p.role == EXPERT && p.expert >= layer->n)
            die("%s: expert %d; the router has %d experts", where(t), p.expert, layer->n);
        if (p.role == EXPERT) layer->experts[p.expert].n_tensors++;
        else if (t->bytes * 8 != dtypes[t->dtype].bits &&
                 (!t->rank || t->shape[slice_axis(t, (size_t)layer->n)] != (size_t)layer->n ||
                  t->bytes % (size_t)layer->n))
            die("%s: expected %d slices, one for each expert, found %s", where(t), layer->n, shape_text(t));
    }
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        for (int k = 1; k < m.layers[i].n; k++)
            if (m.layers[i].experts[k].n_tensors != m.layers[i].experts[0].n_tensors)
                die("'%s': layer %d: expert %d has %d tensors, expert 0 has %d", m.path, m.layers[i].block, k,
                    m.layers[i].experts[k].n_tensors, m.layers[i].experts[0].n_tensors);
}

/* Reads the original ids from the object "reap" of config.json, if it is there. */
static void hf_read_retained(void) {
    struct doc reap = get_obj(hf_config, "reap");
    if (!reap.obj) return;
    m.pruned = true;
    m.original_experts = (int)get_int(reap, "original_experts", 1, INT32_MAX, REQUIRED);
    json_t *kept = get_list(reap, "kept");
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        struct expert_layer *layer = &m.layers[i];
        json_t *ids = json_array_get(kept, (size_t)layer->block);
        if (!json_is_array(ids)) continue;
        layer->lists_ids = true;
        expect(reap, "kept", json_array_size(ids) == (size_t)layer->n,
               fmt("%d ids for layer %d", layer->n, layer->block));
        for (int k = 0; k < layer->n; k++) {
            int64_t v = json_is_integer(json_array_get(ids, (size_t)k))
                            ? json_integer_value(json_array_get(ids, (size_t)k))
                            : -1;
            expect(reap, "kept", v >= 0 && v < m.original_experts && (!k || v > layer->experts[k - 1].original_id),
                   fmt("rising ids below %d for layer %d", m.original_experts, layer->block));
            layer->experts[k].original_id = (int32_t)v;
        }
    }
}

/* qsort: indices of tensors by shard and offset. */
static int by_shard_offset(const void *a, const void *b) {
    const struct tensor *x = &tensors[*(const uint32_t *)a], *y = &tensors[*(const uint32_t *)b];
    if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
    return by_offset(x, y);
}

/* Whether a file of model_dir is in it, or is a link to one in it or in ../../blobs, where the cache of Hugging Face
 * keeps the files of a snapshot. Another link may lead to anything that the user can read. */
static bool hf_is_inside(const char *name) {
    char dir[PATH_MAX], blobs[PATH_MAX], file[PATH_MAX];
    if (!realpath(model_dir, dir) || !realpath(in_dir(name), file)) return false;
    if (starts_with(file, fmt("%s/", dir))) return true;
    return realpath(in_dir("../../blobs"), blobs) && starts_with(file, fmt("%s/", blobs));
}

/* Opens the files that are copied: neither changed nor safetensors of the model. */
static void hf_read_others(void) {
    char **names = NULL;
    struct dirent *e;
    DIR *d = opendir(model_dir);
    if (!d) die("cannot open '%s': %s", model_dir, strerror(errno));
    while ((e = readdir(d))) arrput(names, xstrdup(e->d_name));
    closedir(d);
    qsort(names, arrlenu(names), sizeof *names, by_text);
    for (size_t i = 0; i < arrlenu(names); i++) {
        struct stat st;
        bool known = one_of(names[i], "config.json hf_quant_config.json model.safetensors.index.json . ..");
        for (size_t k = 0; k < arrlenu(shards); k++) known |= !strcmp(shards[k].name, names[i]);
        bool regular = !stat(in_dir(names[i]), &st) && S_ISREG(st.st_mode);
        bool weights = ends_with(names[i], ".safetensors"); /* that were not read are not pruned either */
        bool copied = regular && !known && !weights && hf_is_inside(names[i]);
        if (copied || (regular && known)) m.bytes += (size_t)st.st_size;
        if (copied) {
            struct other_file o = {{names[i], input_open(in_dir(names[i]))}, (size_t)st.st_size, st.st_mode & 0777};
            arrput(others, o);
            continue;
        }
        if (!known)
            err_message("'%s' is %s: not copied", in_dir(names[i]),
                        !regular  ? "not a regular file"
                        : weights ? "not read"
                                  : "a link to a file elsewhere");
        free(names[i]);
    }
    arrfree(names);
}

/* Reads __metadata__ of all shards. */
static void hf_read_metadata(void) {
    for (size_t i = 0; i < arrlenu(shards); i++) {
        uint8_t len[8];
        read_exact(&shards[i], 0, len, 8);
        size_t n = gguf_rd64(len);
        char *text = xrealloc(NULL, n);
        read_exact(&shards[i], 8, text, n);
        json_t *header = json_loadb(text, n, 0, NULL), *meta = json_object_get(header, "__metadata__");
        arrput(hf_metadata, meta ? json_dumps(meta, JSON_COMPACT) : NULL);
        json_decref(header);
        free(text);
    }
}

/* Checks a list of the layers' numbers of experts, if the key has one. */
static void hf_check_list(struct doc d, const char *key) {
    json_t *list = get(d, key);
    if (!json_is_array(list)) return;
    m.pruned = true;
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        const struct expert_layer *layer = &m.layers[i];
        json_t *v = json_array_get(list, (size_t)layer->block);
        if (layer->mtp && !v) continue;
        expect(d, key, json_is_integer(v) && json_integer_value(v) == layer->n,
               fmt("%d for layer %d, as its router has,", layer->n, layer->block));
    }
}

/* Checks the lists of config.json. */
static void hf_check_lists(void) {
    struct doc q = get_obj(hf_doc_of("quantization_config"), "quantization_config"), s = get_obj(q, sparsity_key);
    for (size_t k = 0; k < COUNT(count_keys); k++) hf_check_list(hf_doc_of(count_keys[k]), count_keys[k]);
    hf_check_list(hf_doc_of(layers_key), layers_key);
    hf_check_list(s, "num_experts");
    expect(s, "method", !s.obj || !strcmp(get_str(s, "method", ""), "prune"), "\"prune\"");
}

/* Whether the name p of a tensor is one of the model's layers, not one of a tower for pictures. */
static bool is_ours(const char *name, const struct parsed_name *p) {
    return p->block >= 0 && p->prefix == strlen(hf_prefix) && !memcmp(name, hf_prefix, p->prefix);
}

/* Counts the layers for multi-token prediction, with experts or without: scores may list them all. */
static void hf_count_mtp(void) {
    for (size_t i = 0; i < arrlenu(tensors); i++) {
        const struct parsed_name p = name_parse(tensors[i].name);
        const int n = p.block + 1 - m.n_trunk;
        if ((p.mtp || is_ours(tensors[i].name, &p)) && n > m.n_mtp) m.n_mtp = n;
    }
}

/* Whether --mtp drop removes a tensor of the index, by its name. */
static bool is_dropped(const char *name) {
    const struct parsed_name p = name_parse(name);
    return p.mtp || p.block >= m.n_trunk;
}

/* Opens the source and fills in m. */
static void hf_read(const char *path) {
    model_dir = path;
    hf_config = doc_read("config.json");
    if (!hf_config.obj) die("'%s' has no config.json", path);
    hf_text = get_obj(hf_config, "text_config");
    hf_quant = doc_read("hf_quant_config.json");
    const json_t *listed = get(hf_config, "layers_block_type"); /* then the number may be missing */
    m.n_trunk = hf_int("num_hidden_layers", 1, MAX_LAYERS, listed ? (int64_t)json_array_size(listed) : REQUIRED);
    m.mtp_halves = !strcmp(get_str(hf_config, "model_type", ""), "nemotron_h");
    if (opts.mtp == MTP_DROP) may_lack = is_dropped;
    source_open();
    hf_index = source_index;
    m.top_k = hf_top_k();
    m.n_group = hf_int(hf_key_of(group_keys, COUNT(group_keys)), 1, MAX_EXPERTS, 1);
    m.n_group_used = m.n_group == 1 ? 1 : hf_int("topk_group", 1, m.n_group, m.n_group);
    m.router_hash = HASH_START;
    bool counted = false;
    for (size_t k = 0; k < COUNT(count_keys); k++) counted |= get(hf_doc_of(count_keys[k]), count_keys[k]) != NULL;
    if (!counted) die("config.json has none of num_experts, n_routed_experts, num_local_experts, moe_num_experts");
    hf_read_layers();
    hf_count_mtp();
    hf_check_tensors();
    hf_check_lists();
    hf_read_retained();
    by_place = xrealloc(NULL, arrlenu(tensors) * sizeof *by_place);
    for (uint32_t i = 0; i < arrlenu(tensors); i++) by_place[i] = i;
    qsort(by_place, arrlenu(tensors), sizeof *by_place, by_shard_offset);
    hf_read_metadata();
    hf_read_others();
}

/* Returns the name of a tensor or module in the output; NULL if it is removed. Valid as long as fmt's. */
static const char *hf_rename(const char *name) {
    struct parsed_name p = name_parse(name);
    const struct expert_layer *layer = p.role == EXPERT ? layer_find(p.block) : NULL;
    if ((opts.mtp == MTP_DROP) && (p.mtp || (is_ours(name, &p) && p.block >= m.n_trunk))) return NULL;
    if (!layer || p.expert >= layer->n) return name;
    if (!layer->experts[p.expert].retained) return NULL;
    return fmt("%.*s%d%s", (int)p.at, name, layer->experts[p.expert].new_id, name + p.end);
}

/* Whether a pattern (not a plain name) contains the number of an expert, which cannot be renumbered. */
static bool names_expert(const char *pattern) {
    const char *p = strstr(pattern, "experts");
    if (!p || name_parse(pattern).role == EXPERT) return false;
    p += strlen("experts");
    p += strspn(p, "\\.");
    return *p >= '0' && *p <= '9';
}

/* Returns a copy of j in which the modules in lists and keys are renamed or removed like their experts. */
static json_t *hf_renamed(json_t *j, const char *file) {
    bool list = json_is_array(j);
    const char *key;
    json_t *v, *out = list ? json_array() : json_object();
    size_t i;
    json_array_foreach(j, i, v) {
        const char *name = json_string_value(v), *to = name ? hf_rename(name) : NULL;
        if (name && names_expert(name))
            die("%s: %s contains an expert number, which pruning changes", file, json_show(v));
        if (name && to) json_array_append_new(out, json_string(to));
        else if (!name)
            json_array_append_new(out, json_is_object(v) || json_is_array(v) ? hf_renamed(v, file) : json_incref(v));
    }
    if (list) return out;
    json_object_foreach(j, key, v) {
        const char *to = hf_rename(key);
        if (names_expert(key)) die("%s: '%s' contains an expert number, which pruning changes", file, key);
        char *name = to ? xstrdup(to) : NULL;
        if (name)
            json_object_set_new(out, name,
                                json_is_object(v) || json_is_array(v) ? hf_renamed(v, file) : json_incref(v));
        free(name);
    }
    return out;
}

/* ============================================================================================================
 * Hugging Face directory: output
 *
 * The new config.json, the shards with the retained experts, and their index.
 * ============================================================================================================ */

/* Adds the object "reap", which moe-convert reads: original ids by layer, criterion, calibration. */
static void hf_put_reap(json_t *config) {
    json_t *kept = json_array(), *reap;
    bool known = m.original_experts > 0;
    int blocks = 0;
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        if (m.layers[i].n_retained) blocks = m.layers[i].block + 1;
    for (int b = 0; b < blocks; b++) {
        const struct expert_layer *layer = layer_find(b);
        json_t *ids = layer && (layer->lists_ids || layer->n_retained < layer->n) ? json_array() : json_null();
        for (int k = 0; layer && k < layer->n; k++) {
            known &= layer->experts[k].original_id >= 0;
            if (layer->experts[k].retained) json_array_append_new(ids, json_integer(layer->experts[k].original_id));
        }
        json_array_append_new(kept, ids);
    }
    reap = json_pack("{s:i,s:o,s:s}", "original_experts", m.original_experts, "kept", kept, "criterion",
                     criteria[opts.criterion]);
    if (scores.n_files)
        json_object_update_new(reap, json_pack("{s:I,s:f}", "calibration_tokens", (json_int_t)scores.tokens,
                                               "calibration_coverage", (double)scores.covered / (double)scores.total));
    if (known) json_object_set(config, "reap", reap);
    json_decref(reap);
}

/* Returns a list with the number of experts of every layer before those for multi-token prediction. dense: what it has
 * for a layer without experts; -1: null. */
static json_t *hf_counts(int dense) {
    json_t *list = json_array();
    for (int b = 0; b < m.n_trunk; b++) {
        const struct expert_layer *layer = layer_find(b);
        const int n = layer ? layer->n_retained : dense;
        json_array_append_new(list, n < 0 ? json_null() : json_integer(n));
    }
    return list;
}

/* Whether layers retain different numbers of experts. */
static bool hf_uneven(void) {
    bool differ = false;
    for (size_t i = 0; i < arrlenu(m.layers); i++)
        differ |= m.layers[i].n_retained != outcome().largest && !removed(&m.layers[i]);
    return differ;
}

/* Sets the numbers of experts in one object of config.json. */
static void hf_put_counts(json_t *text) {
    const int most = outcome().largest;
    for (size_t k = 0; k < COUNT(count_keys); k++) {
        json_t *was = json_object_get(text, count_keys[k]);
        if (was) json_object_set_new(text, count_keys[k], json_is_array(was) ? hf_counts(0) : json_integer(most));
    }
    if (json_object_get(text, layers_key)) json_object_set_new(text, layers_key, hf_counts(most));
}

/* Says in quantization_config how many experts the layers have if they differ, or if the source said it: in the form of
 * compressed-tensors 0.20 (expert_sparsity.py). A model without such an object gets one, which says no more about the
 * weights: what hf_quant_config.json says of them, or that they are not quantized. */
static void hf_put_sparsity(json_t *config) {
    json_t *text = json_object_get(config, "text_config"), *q = json_object_get(text, "quantization_config");
    if (!q) q = json_object_get(config, "quantization_config");
    if (!hf_uneven() && !json_object_get(q, sparsity_key)) return;
    if (!json_is_object(q)) {
        q = hf_quant.obj ? json_pack("{s:s}", "quant_method", "modelopt")
                         : json_pack("{s:s,s:s,s:{},s:[]}", "quant_method", "compressed-tensors", "format", "dense",
                                     "config_groups", "ignore");
        json_object_set_new(config, "quantization_config", q);
    }
    json_object_set_new(q, sparsity_key, json_pack("{s:s,s:o}", "method", "prune", "num_experts", hf_counts(-1)));
}

/* Shortens lists with an element for every layer and those for multi-token prediction, which are removed. */
static void hf_shorten_lists(json_t *text) {
    static const char *const lists[] = {
        "layer_types",   "mlp_layer_types",      "rope_theta",     "partial_rotary_factors",
        "swiglu_limits", "swiglu_limits_shared", "compress_ratios"};
    const json_int_t n = json_integer_value(json_object_get(text, "num_nextn_predict_layers"));
    for (size_t k = 0; k < COUNT(lists); k++) {
        json_t *list = json_object_get(text, lists[k]);
        if (n <= 0 || json_array_size(list) != (size_t)(m.n_trunk + n)) continue;
        while (json_array_size(list) > (size_t)m.n_trunk) json_array_remove(list, json_array_size(list) - 1);
    }
}

/* Returns config.json for the output. */
static json_t *hf_new_config(void) {
    struct outcome o = outcome();
    json_t *config = json_deep_copy(hf_config.obj), *texts[] = {config, json_object_get(config, "text_config")};
    for (int i = 0; i < 2 && texts[i]; i++) {
        json_t *q = json_object_get(texts[i], "quantization_config");
        hf_put_counts(texts[i]);
        static const char *const mtp[] = {"num_nextn_predict_layers", "mtp_num_hidden_layers"};
        if (opts.mtp == MTP_DROP) hf_shorten_lists(texts[i]);
        for (size_t k = 0; k < COUNT(mtp); k++)
            if ((opts.mtp == MTP_DROP) && json_object_get(texts[i], mtp[k]))
                json_object_set_new(texts[i], mtp[k], json_integer(0));
        if (json_is_object(q)) json_object_set_new(texts[i], "quantization_config", hf_renamed(q, "config.json"));
    }
    hf_put_sparsity(config);
    if (m.pruned || o.dropped) hf_put_reap(config);
    return config;
}

/* Returns how many decimal digits represent every number of j exactly. */
static int real_digits(json_t *j) {
    int most = 15, n;
    const char *key;
    char text[64];
    json_t *v;
    size_t i;
    json_array_foreach(j, i, v) if ((n = real_digits(v)) > most) most = n;
    json_object_foreach(j, key, v) if ((n = real_digits(v)) > most) most = n;
    for (n = 15; json_is_real(j) && n < 17; n++) {
        snprintf(text, sizeof text, "%.*g", n, json_real_value(j));
        if (strtod(text, NULL) == json_real_value(j)) break;
    }
    return json_is_real(j) && n > most ? n : most;
}

static void text_put(char **text, const char *s) { memcpy(arraddnptr(*text, strlen(s)), s, strlen(s)); }

/* Adds a JSON file and takes over j. was: its contents in the source; if they are equal, the file is copied byte by
 * byte. */
static void hf_add_json(const char *name, json_t *j, struct doc was) {
    struct out_file f = {.name = xstrdup(name), .shard = -1, .other = -1};
    if (json_equal(j, was.obj)) {
        FILE *in = input_file(in_dir(name));
        for (size_t n = 1; n; arrsetlen(f.text, arrlenu(f.text) - 4096 + n)) {
            char *p = arraddnptr(f.text, 4096);
            n = fread(p, 1, 4096, in);
        }
        if (ferror(in)) die("cannot read '%s': %s", in_dir(name), strerror(errno));
        fclose(in);
    } else {
        char *s = json_dumps(j, JSON_INDENT(2) | JSON_REAL_PRECISION(real_digits(j)));
        if (!s) die("out of memory for '%s'", name);
        text_put(&f.text, s);
        text_put(&f.text, "\n");
        free(s);
    }
    json_decref(j);
    f.bytes = arrlenu(f.text);
    arrput(hf_files, f);
}

/* Returns the layer for whose experts a tensor has slices, or NULL. */
static const struct expert_layer *hf_sliced(const struct tensor *t) {
    struct parsed_name p = name_parse(t->name);
    bool slices = (p.role == STACK || p.role == ROUTER) && t->bytes * 8 != dtypes[t->dtype].bits;
    return slices ? layer_find(p.block) : NULL;
}

/* Returns the bytes of a tensor in the output. layer: hf_sliced(t). */
static size_t hf_bytes(const struct tensor *t, const struct expert_layer *layer) {
    return layer ? t->bytes / (size_t)layer->n * (size_t)layer->n_retained : t->bytes;
}

/* Returns size d of the shape of a tensor in the output. layer: hf_sliced(t). */
static size_t hf_shape(const struct tensor *t, const struct expert_layer *layer, uint32_t d) {
    return layer && d == slice_axis(t, (size_t)layer->n) ? (size_t)layer->n_retained : t->shape[d];
}

/* Adds a shard with its new header and adds the bytes of its data to *all. Its tensors are by_place[first..last). A
 * shard that loses all tensors is left out. */
static void hf_add_shard(int shard, size_t first, size_t last, size_t *all) {
    struct out_file f = {.name = xstrdup(shards[shard].name), .shard = shard, .other = -1};
    size_t at = 0, n = 0;
    text_put(&f.text, "01234567{");
    if (hf_metadata[shard]) {
        text_put(&f.text, "\"__metadata__\":");
        text_put(&f.text, hf_metadata[shard]);
    }
    for (size_t i = first; i < last; i++) {
        const struct tensor *t = &tensors[by_place[i]];
        const struct expert_layer *layer = hf_sliced(t);
        const char *to = hf_rename(t->name);
        if (!to) continue;
        json_t *name = json_string(to);
        char *quoted = json_dumps(name, JSON_ENCODE_ANY);
        size_t bytes = hf_bytes(t, layer);
        text_put(&f.text, arrlenu(f.text) > 9 ? "," : "");
        text_put(&f.text, quoted);
        text_put(&f.text, fmt(":{\"dtype\":\"%s\",\"shape\":[", dtypes[t->dtype].name));
        for (uint32_t d = 0; d < t->rank; d++) text_put(&f.text, fmt("%s%zu", d ? "," : "", hf_shape(t, layer, d)));
        text_put(&f.text, fmt("],\"data_offsets\":[%zu,%zu]}", at, at + bytes));
        at += bytes;
        n++;
        free(quoted);
        json_decref(name);
    }
    text_put(&f.text, "}");
    while (arrlenu(f.text) % 8) arrput(f.text, ' ');
    uint64_t header = arrlenu(f.text) - 8;
    memcpy(f.text, &header, 8);
    f.bytes = arrlenu(f.text) + at;
    *all += at;
    if (n || first == last) arrput(hf_files, f);
    else {
        free(f.name);
        arrfree(f.text);
    }
}

/* Adds the index. all: the bytes of all data. Where the source has none, or one that does not say where every tensor
 * is, it lists the tensors. */
static void hf_add_index(size_t all) {
    json_t *index = hf_index.obj ? json_deep_copy(hf_index.obj) : json_pack("{s:{}}", "metadata"),
           *meta = json_object_get(index, "metadata"), *map = json_object(), *file;
    const bool list = !hf_index.obj || source_index_differs;
    const char *name;
    json_object_foreach(json_object_get(hf_index.obj, "weight_map"), name, file) {
        const char *to = list ? NULL : hf_rename(name);
        if (to) json_object_set(map, to, file);
    }
    for (size_t i = 0; i < arrlenu(tensors) && list; i++) {
        const char *to = hf_rename(tensors[i].name);
        if (to) json_object_set_new(map, to, json_string(shards[tensors[i].shard].name));
    }
    json_object_set_new(index, "weight_map", map);
    if (json_is_object(meta) && json_number_value(json_object_get(meta, "total_size")) != (double)all) {
        json_object_del(meta, "total_parameters"); /* it would be wrong, and nothing needs it */
        json_object_set_new(meta, "total_size", json_integer((json_int_t)all));
    }
    hf_add_json("model.safetensors.index.json", index, hf_index);
}

/* Makes the list of files for the retained experts. Returns the bytes of all files. */
static size_t hf_plan(void) {
    size_t all = 0, bytes = 0, first = 0, last;
    for (size_t i = 0; i < arrlenu(hf_files); i++) {
        free(hf_files[i].name);
        arrfree(hf_files[i].text);
    }
    arrsetlen(hf_files, 0);
    hf_add_json("config.json", hf_new_config(), hf_config);
    if (hf_quant.obj) hf_add_json("hf_quant_config.json", hf_renamed(hf_quant.obj, "hf_quant_config.json"), hf_quant);
    for (int s = 0; s < (int)arrlen(shards); s++, first = last) {
        for (last = first; last < arrlenu(tensors) && (int)tensors[by_place[last]].shard == s; last++) continue;
        hf_add_shard(s, first, last, &all);
    }
    if (hf_index.obj || arrlenu(shards) > 1) hf_add_index(all);
    for (int i = 0; i < (int)arrlen(others); i++) {
        struct out_file f = {.name = xstrdup(others[i].source.name), .shard = -1, .other = i, .bytes = others[i].bytes};
        arrput(hf_files, f);
    }
    for (size_t i = 0; i < arrlenu(hf_files); i++) bytes += hf_files[i].bytes;
    return bytes;
}

static char hf_temp[PATH_MAX + 32]; /* the unfinished directory, "" if there is none */

/* Removes an unfinished directory. It stays if it holds other files than those of the output. */
static void hf_remove(const char *dir) {
    for (size_t i = 0; i < arrlenu(hf_files); i++) unlink(fmt("%s/%s", dir, hf_files[i].name));
    rmdir(dir);
}

/* Removes the output that is unfinished at exit. */
static void hf_cleanup(void) {
    if (hf_temp[0]) hf_remove(hf_temp);
}

/* Dies unless the directory `path` can be created with all files. */
static void hf_check_target(char path[PATH_MAX]) {
    struct stat st;
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = 0;
    if (!lstat(path, &st)) die("'%s' exists; for a model in a directory, -o must name a new directory", path);
    check_free_space(path);
}

/* Writes one file of the output. */
static void hf_write_file(const struct out_file *f) {
    const char *temp = fmt("%s/%s", hf_temp, f->name);
    int fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, f->other >= 0 ? others[f->other].mode : 0666);
    if (fd < 0 || !(dest.f = fdopen(fd, "w"))) die("cannot create '%s': %s", temp, strerror(errno));
    out_write(f->text, arrlenu(f->text));
    if (f->other >= 0) copy_bytes(&others[f->other].source, 0, f->bytes);
    for (size_t i = 0; i < arrlenu(tensors) && f->shard >= 0; i++) {
        const struct tensor *t = &tensors[by_place[i]];
        if ((int)t->shard != f->shard || !hf_rename(t->name)) continue;
        const struct expert_layer *layer = hf_sliced(t);
        if (layer) copy_retained(&shards[t->shard], t->at, t->bytes / (size_t)layer->n, layer);
        else copy_bytes(&shards[t->shard], t->at, t->bytes);
    }
    if (fflush(dest.f) || fsync(fileno(dest.f)) || fclose(dest.f))
        die("cannot write '%s': %s", dest.path, strerror(errno));
}

/* Writes the directory under a temporary name and renames it. */
static void hf_write(char path[PATH_MAX]) {
    char copy[PATH_MAX];
    hf_check_target(path);
    out_start(path);
    char temp[sizeof hf_temp];
    temp_each_stale(path, hf_remove);
    temp_name(temp, path);
    if (mkdir(temp, 0777)) die("cannot create '%s': %s", temp, strerror(errno));
    strcpy(hf_temp, temp);
    atexit(hf_cleanup);
    for (size_t i = 0; i < arrlenu(hf_files); i++) hf_write_file(&hf_files[i]);
    if (dest.done != dest.total) die("internal error: %zu bytes written, %zu planned", dest.done, dest.total);
    sync_dir(hf_temp);
    if (rename(hf_temp, path)) die("cannot rename '%s' to '%s': %s", hf_temp, path, strerror(errno));
    hf_temp[0] = 0;
    snprintf(copy, sizeof copy, "%s", path);
    sync_dir(dirname(copy));
    progress(true);
    err_message("'%s': %zu files, %s", path, arrlenu(hf_files), human((double)dest.total));
}

/* ============================================================================================================
 * Report
 *
 * Prints on stdout, for each layer: its experts before and after, the share of the summed weighted outputs that is
 * retained, how many experts were never seen or seen less than MIN_SAMPLES times, and the ids of the removed ones; then
 * totals.
 * ============================================================================================================ */

/* Prints the line of one layer. */
static void report_layer(const struct expert_layer *layer) {
    double all = 0, retained = 0;
    int unseen = 0, undersampled = 0;
    for (int k = 0; k < layer->n; k++) {
        all += layer->experts[k].weighted_sum;
        if (layer->experts[k].retained) retained += layer->experts[k].weighted_sum;
        unseen += !layer->experts[k].tokens;
        undersampled += layer->experts[k].tokens < MIN_SAMPLES;
    }
    printf("%5d  %4d -> %-4d ", layer->block, layer->n, layer->n_retained);
    if (scores.n_files && selectable(layer))
        printf("%6.2f %% %6d %6d ", all > 0 ? 100 * retained / all : 100, unseen, undersampled);
    else printf("%8s %6s %6s ", "-", "-", "-");
    if (layer->hash_routed) printf(" (routed by hash: all retained)");
    if (layer->mtp)
        printf(" (multi-token prediction%s)", removed(layer)   ? ": removed"
                                              : layer->follows ? ": as the last layer before"
                                                               : "");
    for (int k = 0; k < layer->n && selectable(layer); k++)
        if (!layer->experts[k].retained) printf(" %d", k);
    putchar('\n');
}

/* Says which MTP layers have no scores although there are score files. */
static void report_followers(void) {
    for (size_t i = 0; i < arrlenu(m.layers) && scores.n_files; i++)
        if (m.layers[i].follows && !removed(&m.layers[i]))
            err_message("layer %d, for multi-token prediction, has no scores: it retains the same experts as the last "
                        "layer before it",
                        m.layers[i].block);
}

/* bytes: of the output. */
static void report_print(size_t bytes) {
    long long before = 0, after = 0;
    double all = 0, retained = 0;
    printf("layer   experts    score   never   <%d   dropped\n", MIN_SAMPLES);
    for (size_t i = 0; i < arrlenu(m.layers); i++) {
        const struct expert_layer *layer = &m.layers[i];
        report_layer(layer);
        before += layer->n;
        after += layer->n_retained;
        for (int k = 0; k < layer->n && selectable(layer); k++) {
            all += layer->experts[k].weighted_sum;
            if (layer->experts[k].retained) retained += layer->experts[k].weighted_sum;
        }
    }
    printf("total   experts %lld -> %lld", before, after);
    if (all > 0) printf(", %.2f %% of the weighted output is retained", 100 * retained / all);
    printf("\ntotal   %zu bytes -> %zu (%.2f %%)\n", m.bytes, bytes, 100 * (double)bytes / (double)m.bytes);
    const char *plural = scores.n_files > 1 ? "s" : "";
    const char *unfinished = scores.unfinished ? " (the calibration was not finished)" : "";
    if (scores.n_files)
        printf("scores  %lld tokens in %d file%s%s\n", (long long)scores.tokens, scores.n_files, plural, unfinished);
    if (scores.undersampled)
        printf("warning: %zu of %zu experts were seen fewer than %d times (%zu never): calibrate with more text\n",
               scores.undersampled, scores.total, MIN_SAMPLES, scores.unseen);
}

/* ============================================================================================================
 * Main
 *
 * Options, and the order of the steps.
 * ============================================================================================================ */

static const struct option options[] = {
    {"output", "-o", IS_STR(out), .arg = "FILE", .help = "the file or directory to write"},
    {"keep", IS_INT(keep, 1, MAX_EXPERTS), .arg = "N", .help = "retain N experts per layer"},
    {"ratio", IS_NUM(ratio, 0, 1), .arg = "R", .help = "remove this share of every layer's experts, from 0 to below 1"},
    {"budget", IS_NUM(budget, 0, 1e9), .arg = "GIB", .help = "retain as many experts as fit in an output of this size"},
    {"counts", IS_STR(counts), .arg = "FILE", .help = "lines LAYER COUNT, one for every layer with experts"},
    {"per-layer", IS_FLAG(per_layer), .help = "the same total, distributed over the layers by the experts' scores"},
    {"floor", IS_INT(floor, 1, MAX_EXPERTS), .arg = "N",
     .help = "with --per-layer: fewest experts in a layer (default: half of an even share)"},
    {"criterion", IS_CHOICE(criterion, criteria), .arg = "NAME",
     .help =
         "what ranks the experts: mean of gate weight x output norm (default), tokens, mean output norm, or chance, "
         "without scores"},
    {"seed", IS_INT(seed, 0, INT32_MAX), .arg = "N", .help = "random seed for --criterion random (default: 0)"},
    {"protect-outliers", IS_FLAG(outliers),
     .help = "retain experts with one huge output in the first three quarters of the layers"},
    {"mtp", IS_CHOICE(mtp, mtp_names), .arg = "HOW",
     .help = "layers for multi-token prediction: prune by their scores (default; like the last layer before them "
             "where the files have none), or remove"},
    {"name", IS_STR(name), .arg = "NAME", .help = "general.name (default: that of the source with -REAP-KofE)"},
    {"dry-run", IS_FLAG(dry_run), .help = "print the report, write nothing"},
    COMMON_OPTIONS,
};

static const struct manual manual = {
    .name = PROGRAM,
    .summary = "remove experts from mixture-of-experts models",
    .usage = "  moe-reap IN SCORES.json... -o OUT\n"
             "           (--keep N | --ratio R | --budget GIB | --counts FILE) [options]\n",
    .about = "Removes the routed experts that contribute least, by the scores of\n"
             "moe --calibrate. Several score files are added up. Retained weights are copied\n"
             "bit for bit. IN is a GGUF file or a Hugging Face directory; OUT is of the same\n"
             "kind.\n",
    .operand = {.type = OPT_STR, .arg = "FILE"},
    .exit_codes = "0 done, 1 failed, 2 wrong usage",
    .options = options,
    .n_options = COUNT(options),
};

/* Finds which option says how many experts are retained. Two end the program. */
static void find_amount(void) {
    const bool given[] = {
        [KEEP] = opts.keep, [RATIO] = !isnan(opts.ratio), [BUDGET] = !isnan(opts.budget), [COUNTS] = opts.counts};
    for (int i = KEEP; i <= COUNTS; i++) {
        if (!given[i]) continue;
        if (amount != NONE) die_usage("--keep, --ratio, --budget and --counts cannot be combined");
        amount = (enum amount)i;
    }
    if (opts.ratio == 1) die_usage("--ratio 1 would leave no experts");
}

/* Dies with exit code 2 if options are missing or contradict each other. n_files: scores. */
static void check_usage(size_t n_files) {
    if (!m.path) die_usage("no model given (see --help)");
    if (!opts.out && !opts.dry_run) die_usage("give -o OUT or --dry-run (see --help)");
    if (opts.out && !strcmp(opts.out, "-")) die_usage("-o -: the output cannot go to stdout");
    if (opts.out && strlen(opts.out) >= PATH_MAX - 1) die_usage("the name given with -o is too long");
    if (amount == NONE) die_usage("give one of --keep, --ratio, --budget and --counts (see --help)");
    if (opts.per_layer && amount == COUNTS) die_usage("--per-layer works only with --keep, --ratio or --budget");
    if (opts.floor && !opts.per_layer) die_usage("--floor works only with --per-layer");
    if (opts.seed >= 0 && opts.criterion != RANDOM) die_usage("--seed works only with --criterion random");
    if (!n_files && opts.criterion != RANDOM) die_usage("no scores given: moe --calibrate writes them (see --help)");
    if (!n_files && opts.outliers) die_usage("--protect-outliers needs scores");
}

int main(int argc, char **argv) {
    const char **files = NULL;
    char target[PATH_MAX];
    program_init();
    signal(SIGBUS, signal_bus); /* a GGUF is mapped while its header is read */
    arguments_read(&opts, argc, argv, &files);
    common_options_run(&opts.common);
    if (arrlen(files)) {
        m.path = files[0];
        arrdel(files, 0);
    }
    find_amount();
    check_usage(arrlenu(files));
    strcpy(target, opts.out ? opts.out : "");
    random_state = opts.seed > 0 ? (uint64_t)opts.seed : 0;

    struct stat st;
    const bool part = ends_with(m.path, ".json") || ends_with(m.path, ".safetensors");
    if (!stat(m.path, &st) && (S_ISDIR(st.st_mode) || part)) m.path = model_dir_find(m.path);
    if (stat(m.path, &st)) die("cannot open '%s': %s", m.path, strerror(errno));
    bool dir = S_ISDIR(st.st_mode);
    if (dir && opts.name) die_usage("--name works only with a GGUF file");
    size_t (*plan)(void) = dir ? hf_plan : gguf_plan;
    (dir ? hf_read : gguf_read)(m.path);
    model_check();
    for (size_t i = 0; i < arrlenu(files); i++) scores_read(files[i]);
    mtp_check();
    scores_check();
    select_experts(plan);
    dest.total = plan();
    if (opts.out && !opts.dry_run) (dir ? hf_check_target : check_target)(target);
    report_followers();
    report_print(dest.total);
    fflush(stdout);
    if (opts.out && !opts.dry_run) (dir ? hf_write : gguf_write)(target);
    arrfree(files);
    gguf_close(&gguf);
    return stdout_end();
}
