/* Races that the simulator must find, each beside the same kernel with what orders it. Included by test_cuda.cu. */

/* Threads read what other warps of the block write; with `ordered` after a barrier. */
__global__ void k_race_shared(int *out, int ordered) {
    SHARED(int, x, 64);
    x[threadIdx.x] = (int)threadIdx.x;
    if (ordered) __syncthreads();
    out[threadIdx.x] = x[63 - threadIdx.x];
}

/* Threads overwrite what other warps have yet to read. */
__global__ void k_race_reused(int *out, int ordered) {
    SHARED(int, x, 64);
    x[threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    const int y = x[63 - threadIdx.x];
    if (ordered) __syncthreads();
    x[threadIdx.x] = 2 * y;
    out[threadIdx.x] = x[threadIdx.x];
}

/* Lanes read what others of the warp write. */
__global__ void k_race_lanes(int *out, int ordered) {
    SHARED(int, x, WARP);
    x[threadIdx.x] = (int)threadIdx.x;
    if (ordered) __syncwarp();
    out[threadIdx.x] = x[WARP - 1 - threadIdx.x];
}

/* A block reads what another one writes before it counts itself. */
__global__ void k_race_blocks(int *x, uint32_t *count, int *out, int ordered) {
    __shared__ uint32_t before;
    x[blockIdx.x * 64 + threadIdx.x] = (int)threadIdx.x;
    if (ordered) __syncthreads();
    if (!threadIdx.x) before = atom_add_acq_rel(count, 1);
    __syncthreads();
    if (before == gridDim.x - 1) out[threadIdx.x] = x[(gridDim.x - 1 - blockIdx.x) * 64 + threadIdx.x];
}

/* A block publishes by a counter that releases nothing. */
__global__ void k_race_release(int *x, uint32_t *count, int *out, int ordered) {
    __shared__ uint32_t before;
    x[blockIdx.x * 64 + threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    if (!threadIdx.x) before = ordered ? atom_add_acq_rel(count, 1) : atomicAdd(count, 1);
    __syncthreads();
    if (before == gridDim.x - 1) out[threadIdx.x] = load_l2(&x[(gridDim.x - 1 - blockIdx.x) * 64 + threadIdx.x]);
}

/* Two blocks write the same place. */
__global__ void k_race_writes(int *x, int ordered) {
    x[(ordered ? blockIdx.x : 0) * 64 + threadIdx.x] = (int)blockIdx.x;
}

/* A launch reads what the one before it writes; with `ordered` after the wait. */
__global__ void k_race_overlap(int *x, int *out, int ordered) {
    grid_dependency_launch();
    if (ordered) grid_dependency_wait();
    const int y = load_l2(x + threadIdx.x);
    if (!ordered) grid_dependency_wait();
    out[threadIdx.x] = y;
}

/* A launch that may overlap with one before it writes, with `ordered` after the wait. Nothing runs before it. */
__global__ void k_race_alone(int *out, int ordered) {
    if (ordered) grid_dependency_wait();
    out[threadIdx.x] = 0;
}

/* The violations of a launch, which may follow another one. */
template <class F>
static int violations_of(F launches) {
    launches();
    finish("a race");
    return sim_take_violations();
}

extern "C" void cuda_test_races(void) {
    begin_test(0);
    sim_races(true), sim_quiet(true);
    gpu_array<int> x(std::vector<int>(128)), out(std::vector<int>(128));
    gpu_array<uint32_t> count(std::vector<uint32_t>(2));
    for (int ordered = 0; ordered < 2; ordered++) {
        const int o = ordered;
        const struct {
            const char *what;
            int n;
        } found[] = {
            {"shared memory", violations_of([&] { k_race_shared<<<1, 64, 0, test_stream>>>(out.p, o); })},
            {"shared memory that is reused",
             violations_of([&] { k_race_reused<<<1, 64, 0, test_stream>>>(out.p, o); })},
            {"lanes", violations_of([&] { k_race_lanes<<<1, WARP, 0, test_stream>>>(out.p, o); })},
            {"blocks", violations_of([&] { k_race_blocks<<<2, 64, 0, test_stream>>>(x.p, count.p, out.p, o); })},
            {"a counter without release",
             violations_of([&] { k_race_release<<<2, 64, 0, test_stream>>>(x.p, count.p + 1, out.p, o); })},
            {"writes of blocks", violations_of([&] { k_race_writes<<<2, 64, 0, test_stream>>>(x.p, o); })},
            {"launches that overlap", violations_of([&] {
                 x.arrive();
                 LAUNCH_PDL(k_race_overlap, 1, 64, 0, test_stream, x.p, out.p, o);
             })},
            {"a launch alone", violations_of([&] { LAUNCH_PDL(k_race_alone, 1, 64, 0, test_stream, out.p, o); })}};
        for (auto &f : found)
            expect(ordered ? !f.n : f.n > 0, "%s, %s: %d violations", f.what, ordered ? "ordered" : "a race", f.n);
        must(cudaMemset(count.p, 0, count.bytes()), "clearing the counters");
    }
    sim_races(false), sim_quiet(false);
}
