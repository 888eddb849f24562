/* The speed of decoding a model whose experts are read from disk, beside what the disk allows:
 *
 *   build/bench_store MODEL.gguf MIB [THREADS [TOKENS]]
 *
 * MIB: memory of routed experts; 0: they are mapped, and come by page faults. Decodes tokens of a fixed random sequence,
 * one at a time, and then reads as many bytes from random places of the file by the same threads. What that rate allows
 * is the rate / (bytes that a token reads from disk).
 */
#define main engine_main
#include "../moe.c"
#undef main

/* Bytes a second of reads of `n` bytes at random places of the model's first file. */
static double random_read_rate(struct store *s, size_t n) {
    const struct gguf_image *im = &s->m->gguf.images[0];
    uint8_t *to = mmap(NULL, 64 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t rng = 1;
    _Atomic int left = 0;
    const double t0 = now_seconds();
    for (size_t at = 0; at < n; at += READ_PIECE) {
        const uint64_t piece = (uint64_t)(rng_uniform(&rng) * (double)(im->size / READ_PIECE - 1));
        reader_ask(&s->reader, im->fd, piece * READ_PIECE, READ_PIECE, to + at % (64 << 20), &left);
    }
    reader_wait(&s->reader, &left);
    munmap(to, 64 << 20);
    return (double)n / (now_seconds() - t0);
}

/* Milliseconds of processor time between two states. */
static double processor_ms(const struct rusage *a, const struct rusage *b) {
    const struct timeval *t[] = {&b->ru_utime, &b->ru_stime, &a->ru_utime, &a->ru_stime};
    double ms = 0;
    for (int i = 0; i < 4; i++) ms += (i < 2 ? 1 : -1) * (1e3 * (double)t[i]->tv_sec + 1e-3 * (double)t[i]->tv_usec);
    return ms;
}

int main(int argc, char **argv) {
    struct model m;
    struct session s;
    struct rusage before, after;
    char err[ERR_MAX];
    uint64_t rng = 7, hits = 0, misses = 0, read = 0;
    const int threads = argc > 3 ? atoi(argv[3]) : processors(), n = argc > 4 ? atoi(argv[4]) : 32, warm = 16;
    if (argc < 3) die("bench_store MODEL.gguf MIB [THREADS [TOKENS]]");
    if (model_load(&m, argv[1], err)) die("%s", err);
    m.n_mtp = 0;
    session_open_cpu(&s, &m, 1, 1, (struct cpu_options){kernels_choose(), threads, 512, KV_BF16, false, false, {0}});
    struct store *store = NULL;
    const struct store_options o = {.bytes = (uint64_t)atol(argv[2]) << 20, .n_stage = 1, .least = 2};
    if (o.bytes && (part_read(&m, PART_REST, ALL_LAYERS, err) || !(store = store_open(&m, o, err)))) die("%s", err);
    s.r->cpu->store = store;
    double t0 = 0;
    for (int i = 0; i < warm + n; i++) {
        if (i == warm) {
            t0 = now_seconds();
            getrusage(RUSAGE_SELF, &before);
            if (store) read = store->reader.bytes;
            for (int il = 0; store && il < m.n_layer; il++) store->layer[il].count = (struct expert_counts){0};
        }
        session_decode(&s, (int32_t)(rng_uniform(&rng) * m.n_vocab));
        session_check(&s);
    }
    const double seconds = now_seconds() - t0;
    getrusage(RUSAGE_SELF, &after);
    printf("%.2f tok/s, processors %.0f ms a token, %ld major faults\n", n / seconds, processor_ms(&before, &after) / n,
           after.ru_majflt - before.ru_majflt);
    if (store) {
        const double bytes = (double)(store->reader.bytes - read) / n,
                     rate = random_read_rate(store, (size_t)(bytes * n));
        for (int il = 0; il < m.n_layer; il++)
            hits += store->layer[il].count.hits, misses += store->layer[il].count.misses;
        printf("%d slots, %.1f %% hits, %.0f MB a token, %.2f GB/s from random places, which allow %.2f tok/s: %.0f %% "
               "of that\n",
               store->layer[0].n_slot, 100 * (double)hits / (double)(hits + misses), bytes * 1e-6, rate * 1e-9,
               rate / bytes, 100 * n / seconds * bytes / rate);
    }
    session_free(&s);
    model_free(&m);
    return 0;
}
