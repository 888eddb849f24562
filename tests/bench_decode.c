/* The half of bench_decode.cu that is C: the shapes that it times. */
#define MOE_NO_MAIN
#include "../moe.c"

int bench_decode_model(struct model *m, int shape, int n_layer, char name[64]) {
    static const struct {
        const char *name, *shard;
    } shapes[] = {
        {"qwen3-30b-a3b", NULL}, {"qwen3-235b-a22b", NULL}, {"qwen3.5-35b-a3b", NULL}, {"deepseek-v3", "0/4"}};
    if (shape >= (int)(sizeof shapes / sizeof *shapes)) return 0;
    struct synth y = synth_parse(shapes[shape].name);
    const int whole = synth_layers(&y);
    const char *shard = shapes[shape].shard;
    if (shard) synth_shard(&y, shard);
    snprintf(name, 64, "%s%s%s", y.name, shard ? ", shard " : "", shard ? shard : "");
    synth_set_layers(&y, int_min(whole, n_layer));
    if (synth_int(&y, "leading_dense_block_count") > 1) /* most layers of the whole shape have experts */
        synth_set(&y, "leading_dense_block_count", "1");
    synth_make(m, &y, NULL, true);
    return whole;
}

void bench_decode_free(struct model *m) { model_free(m); }
