/* The CUDA backend as the tests see it: moe_cuda.cu itself, for a device or (SIMULATED) for the PTX simulator, and the
 * few functions by which tests/t_cuda.h, which is C, reaches into it. The simulator runs the kernels of
 * build/moe_cuda.o; of this file's it takes those alone which that has not. */
#include "../moe_cuda.cu"
#ifdef SIMULATED
#include "ptxsim/ptxsim.h"
#endif
#include "t_cuda_kernels.h"
#include "t_cuda_rows.h"

extern "C" {

/* Tokens and positions to the device, without recording what follows. */
void cuda_test_batch(struct rank *r) { send_batch(r); }

/* The first n floats of the ring of hidden states, from the device (read) or to it. */
void cuda_test_mtp_hidden(struct rank *r, float *rows, int n, bool read) {
    float *ring = r->cuda->mtp_hidden;
    cudaStreamSynchronize(r->cuda->stream);
    cudaMemcpy(read ? rows : ring, read ? ring : rows, (size_t)n * sizeof *rows, cudaMemcpyDefault);
}

/* n numbers, from the device (read) or to it. */
static void test_copy(struct rank *r, int32_t *numbers, int32_t *device, int n, bool read) {
    cudaStreamSynchronize(r->cuda->stream);
    if (n) cudaMemcpy(read ? numbers : device, read ? device : numbers, (size_t)n * sizeof *device, cudaMemcpyDefault);
}
void cuda_test_chosen(struct rank *r, int32_t *keys, int first, int n, bool read) {
    test_copy(r, keys, r->cuda->topk_blocks + first, n, read);
}
void cuda_test_candidates(struct rank *r, int32_t *blocks, int first, int n, bool read) {
    test_copy(r, blocks, r->cuda->candidates + first, n, read);
}

/* The jobs of the decode forward's latest layer with experts. */
void cuda_test_jobs(struct rank *r, struct expert_job *jobs, int *n) {
    const struct route_args &p = r->cuda->route;
    cudaStreamSynchronize(r->cuda->stream);
    cudaMemcpy(n, p.n_jobs, sizeof *n, cudaMemcpyDeviceToHost);
    cudaMemcpy(jobs, p.jobs, (size_t)*n * sizeof *jobs, cudaMemcpyDeviceToHost);
}

/* Slots of a layer's experts; 0: all are on the GPU. */
int cuda_test_n_slot(struct rank *r) { return r->cuda->sizes.offload.n_slot; }

/* The cache of a layer's experts. */
void cuda_test_slots(struct rank *r, int il, int32_t *slot_of, int32_t *expert_of, uint32_t *heat) {
    const struct expert_cache a = expert_cache_of(r, il);
    const size_t n = (size_t)r->m->layers[il].n_expert;
    cudaStreamSynchronize(r->cuda->stream);
    cudaMemcpy(slot_of, a.slot_of, n * sizeof *slot_of, cudaMemcpyDeviceToHost);
    cudaMemcpy(heat, a.heat, n * sizeof *heat, cudaMemcpyDeviceToHost);
    cudaMemcpy(expert_of, a.expert_of, (size_t)a.n_slot * sizeof *expert_of, cudaMemcpyDeviceToHost);
}

/* Row 0 of the logits, by a kernel before: it comes late, and the blocks of the next one run together. */
void cuda_test_logits(struct rank *r, const float *x, int n) {
    struct cuda *c = r->cuda;
    cudaStreamSynchronize(c->stream);
    cudaMemcpy(c->logits + n, x, (size_t)n * sizeof *x, cudaMemcpyHostToDevice);
    LAUNCH_PDL(k_arrive, 4, 256, 0, c->stream, (uint32_t *)c->logits, (const uint32_t *)c->logits + n, (size_t)n);
}

bool cuda_test_chose(struct rank *r) { return *r->cuda->token_host >= 0; }

/* Nothing is left of a choice that the next one would count. */
bool cuda_test_counted(struct rank *r) {
    static int bins[LOGIT_ROWS * (SAMPLE_BINS + 1)];
    int any = 0;
    const size_t n = LOGIT_ROWS * (size_t)SAMPLE_BINS;
    cudaMemcpy(bins, r->cuda->sample.bins, n * sizeof *bins, cudaMemcpyDeviceToHost);
    cudaMemcpy(bins + n, r->cuda->sample.arrived, LOGIT_ROWS * sizeof *bins, cudaMemcpyDeviceToHost);
    for (int b : bins) any |= b;
    return !any;
}

/* Counts the halves that products read and that are infinite or NaN. */
size_t cuda_test_not_finite(struct rank *r) {
    struct cuda *c = r->cuda;
    const struct gpu_sizes s = c->sizes;
    const struct gpu_dims d = gpu_dims_of(r->m, s);
    const struct {
        const uint16_t *at;
        size_t n;
    } all[] = {{c->x16[A_H], d.n * d.act[A_H]},
               {c->x16[A_QA], d.n * d.act[A_QA]},
               {c->x16[A_Q], d.n * d.act[A_Q]},
               {c->x16[A_ATT], d.n * d.act[A_ATT]},
               {c->x16[A_EH], d.n * d.act[A_EH]},
               {c->q_absorbed, d.latent ? d.n * d.heads * (d.latent + d.rope) : 0},
               {c->hidden, gpu_larger(d.pairs, d.jobs * d.decode) * d.ff},
               {c->hidden_shared, gpu_larger(d.n, d.decode) * d.dense}};
    size_t bad = 0;
    cudaDeviceSynchronize();
    for (auto &x : all) {
        std::vector<uint16_t> h(x.at ? x.n : 0);
        if (h.empty()) continue;
        cudaMemcpy(h.data(), x.at, h.size() * sizeof h[0], cudaMemcpyDeviceToHost);
        for (uint16_t v : h) bad += (v & 0x7C00) == 0x7C00;
    }
    return bad;
}

size_t cuda_test_free_bytes(void) {
    size_t n = 0, total = 0;
    cudaDeviceSynchronize();
    cudaMemGetInfo(&n, &total);
    return n;
}

#ifdef SIMULATED
int cuda_test_turns(void) { return 60; }
void cuda_test_fail(const char *function, int n) { sim_fail(function, n); }
void cuda_test_memory(size_t bytes) { sim_memory(-1, bytes); }
void cuda_test_memory_of(int device, size_t bytes) { sim_memory(device, bytes); }
void cuda_test_devices(int n, bool peers) { sim_devices(n, peers); }
void cuda_test_l2(int device, int bytes) { sim_l2(device, bytes); }
void cuda_test_log_prefetches(bool on) { sim_log_prefetches(on); }
size_t cuda_test_prefetched(const struct weight *w, size_t *bytes) {
    const struct device_matrix *d = w->copy;
    size_t n[2];
    device_matrix_bytes(d, n);
    *bytes = n[0] + n[1];
    return (n[0] ? sim_prefetched(d->codes, n[0]) : 0) + (n[1] ? sim_prefetched(d->scales, n[1]) : 0);
}
void cuda_test_integrated(int device, bool is) { sim_integrated(device, is); }
void cuda_test_capability(int device, int major, int minor) { sim_capability(device, major, minor); }
void cuda_test_patience(int seconds) { stall_seconds[0] = stall_seconds[1] = seconds; }
#else
int cuda_test_turns(void) { return 1000; }
void cuda_test_devices(int, bool) {}
void cuda_test_memory(size_t) {}
#endif

/* A slot from floats (n_tok, width), in every form that the backend keeps. */
void cuda_test_write(struct rank *r, enum act a, const float *x, int n_tok) {
    struct cuda *c = r->cuda;
    size_t n = (size_t)n_tok * (size_t)r->width[a];
    uint16_t *h = (uint16_t *)malloc(n * sizeof *h + 1);
    for (size_t i = 0; i < n; i++) h[i] = f16_from_f32(x[i]);
    cudaStreamSynchronize(c->stream);
    if (c->x32[a]) cudaMemcpy(c->x32[a], x, n * sizeof *x, cudaMemcpyHostToDevice);
    if (c->x16[a]) cudaMemcpy(c->x16[a], h, n * sizeof *h, cudaMemcpyHostToDevice);
    free(h);
}

/* A slot as floats: the F32 form where there is one, unless `half`. */
void cuda_test_read(struct rank *r, enum act a, float *x, int n_tok, bool half) {
    struct cuda *c = r->cuda;
    size_t n = (size_t)n_tok * (size_t)r->width[a];
    cudaStreamSynchronize(c->stream);
    if (c->x32[a] && !half) {
        cudaMemcpy(x, c->x32[a], n * sizeof *x, cudaMemcpyDeviceToHost);
        return;
    }
    uint16_t *h = (uint16_t *)malloc(n * sizeof *h + 1);
    cudaMemcpy(h, c->x16[a], n * sizeof *h, cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < n; i++) x[i] = f16_to_f32(h[i]);
    free(h);
}

/* Bytes of the GPU besides the weights and the cache. */
size_t cuda_test_activations(struct rank *r) { return r->cuda->allocated - r->weight_bytes - cache_layout(r, NULL); }

/* Whether prefill of experts is in FP4. */
bool cuda_test_w4a4(struct rank *r) { return r->cuda->sizes.w4a4; }

/* How forwards are launched: an enum launching. */
int cuda_test_launching(struct rank *r) { return r->cuda->launching; }

/* Whether sums of n tokens are NCCL's. */
bool cuda_test_by_nccl(struct rank *r, int n) { return r->cuda->by_nccl[n]; }

/* What the start says of copies that the upload has not made; err (ERR_MAX): "" where all are there. */
void cuda_test_upload_check(struct rank *r, char *err) {
    err[0] = 0;
    r->cuda->err = err;
    upload_check(r);
    r->cuda->err = NULL;
    r->cuda->failed = false;
}

/* The copy of a matrix of r->m: bytes of codes and of scales. */
void cuda_test_tiles(struct rank *r, const struct weight *w, uint8_t *codes, uint8_t *scales) {
    const struct device_matrix *d = w->copy;
    cudaStreamSynchronize(r->cuda->stream);
    cudaMemcpy(codes, d->codes, weight_tiles(w) * (size_t)TILE_BYTES(d->fmt), cudaMemcpyDeviceToHost);
    if (d->scales) cudaMemcpy(scales, d->scales, weight_tiles(w) * TILE_SCALES, cudaMemcpyDeviceToHost);
}
}

#ifdef SIMULATED
#include "t_cuda_races.h"
#include "t_cuda_mutate.h"
#include "bench_tiles.cu"
#include "bench_decode.cu"
#endif
