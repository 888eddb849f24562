/* The CUDA backend as the tests see it: moe_cuda.cu itself, with the emulator (g++ -x c++ -DCUEMU) or on a device (nvcc), and the
 * few functions by which tests/t_cuda.h, which is C, reaches into it. */
#include "../moe_cuda.cu"

extern "C" {

/* Tokens and positions to the device, without recording what follows. */
void cuda_test_batch(struct rank *r) { send_batch(r); }

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

/* The copy of a matrix: bytes of codes and of scales. */
void cuda_test_tiles(struct rank *r, const struct weight *w, uint8_t *codes, uint8_t *scales) {
    const struct dmat *d = mat(r->cuda, w);
    cudaStreamSynchronize(r->cuda->stream);
    cudaMemcpy(codes, d->codes, weight_tiles(w) * (size_t)tile_bytes(d->fmt), cudaMemcpyDeviceToHost);
    if (d->scales) cudaMemcpy(scales, d->scales, weight_tiles(w) * TILE_SCALES, cudaMemcpyDeviceToHost);
}

/* Limits the emulated memory. */
void cuda_test_memory(size_t bytes) {
#ifdef CUEMU
    cuemu::memory(bytes);
#else
    (void)bytes;
#endif
}
}
