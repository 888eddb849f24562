#!/bin/bash
# tests/bench_vs.sh LLAMA_BENCH MODEL: times moe and llama.cpp's llama-bench on one file, in turns, and prints medians and
# ratios as a Markdown table. RUNS (5): runs of each program. DEPTHS ("0 4096"): tokens of context before the timed
# ones. THREADS: for both programs (default: what each takes).
#
# A ratio is the median of the ratios of neighboring runs, because the speed of a machine drifts. Of moe the columns
# prefill_tps and gen_tps of --bench at batch 1; of llama-bench the tests pp512 and tg32.
cd "$(dirname "$0")/.." || exit 1
llama=$1 model=$2 runs=${RUNS:-5} depths=${DEPTHS:-0 4096} threads=(${THREADS:+-t "$THREADS"})
[ -x "$llama" ] || { echo "bench-vs: no program '$llama': LLAMA_BENCH is the path of llama-bench"; exit 2; }
[ -r "$model" ] || { echo "bench-vs: no file '$model': MODEL is a GGUF file that both programs read"; exit 2; }
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT

fail() { echo "bench-vs: $1 failed:"; tail -n 5 "$dir/error"; exit 1; }
most=0
for d in $depths; do [ "$d" -gt "$most" ] && most=$d; done

# Lines of $dir/times: run, program, what and depth, tokens per second; and of moe GB/s and percent of bandwidth.
for run in $(seq "$runs"); do
    echo "run $run of $runs" >&2
    ./moe -m "$model" --bench -c $((most + 1024)) "${threads[@]}" >"$dir/moe" 2>"$dir/error" </dev/null || fail moe
    awk -F, -v run="$run" -v depths=" $depths " '$5 == 1 && index(depths, " " $1 " ") {
        print run, "moe", "decode-" $1, $6, $8, $9; print run, "moe", "prefill-" $1, $3 }' "$dir/moe" >>"$dir/times"
    sed -n 's/.* reads at \([0-9.]*\) GB\/s.*/\1/p' "$dir/error" >>"$dir/bandwidth"
    for d in $depths; do
        "$llama" -m "$model" -p 512 -n 32 -d "$d" -r 1 -o jsonl "${threads[@]}" 2>"$dir/error" >"$dir/llama" || fail llama-bench
        sed 's/.*"n_prompt": \([0-9]*\).*"n_depth": \([0-9]*\).*"avg_ts": \([0-9.]*\).*/\1 \2 \3/' "$dir/llama" |
            awk -v run="$run" '{ print run, "llama", ($1 ? "prefill-" : "decode-") $2, $3 }' >>"$dir/times"
    done
done

awk -v depths="$depths" -v cpu="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" \
    -v cores="$(nproc)" -v load="$(cut -d' ' -f1 /proc/loadavg)" -v reads="$(sort -g "$dir/bandwidth" | tr '\n' ' ')" '
function median(x, n,   i, j, t) {
    for (i = 2; i <= n; i++) for (j = i; j > 1 && x[j] < x[j - 1]; j--) { t = x[j]; x[j] = x[j - 1]; x[j - 1] = t }
    return n % 2 ? x[(n + 1) / 2] : (x[n / 2] + x[n / 2 + 1]) / 2
}
function column(program, what,   i, x) { # median (least-most)
    for (i = 1; i <= runs; i++) x[i] = speed[i, program, what]
    return sprintf("%.1f (%.1f-%.1f)", median(x, runs), x[1], x[runs])
}
{ speed[$1, $2, $3] = $4; runs = $1 > runs ? $1 : runs; if ($2 == "moe" && $6) rate[$1, $3] = $5 }
END {
    n = split(reads, bw, " ")
    printf "%s, %d processors, load %s; plain reads %.1f GB/s (%.1f-%.1f)\n\n", cpu, cores, load, median(bw, n), bw[1], bw[n]
    print "| tokens/s | moe | llama.cpp | ratio (least) | moe reads |"
    print "|---|---|---|---|---|"
    split("decode prefill", kinds, " ")
    d = split(depths, depth, " ")
    for (k = 1; k <= 2; k++)
        for (i = 1; i <= d; i++) {
            what = kinds[k] "-" depth[i]
            for (r = 1; r <= runs; r++) {
                if (!speed[r, "moe", what] || !speed[r, "llama", what]) { print "no figure of " what; exit 1 }
                ratio[r] = speed[r, "moe", what] / speed[r, "llama", what]
                gb[r] = rate[r, what]
            }
            share = median(ratio, runs)
            printf "| %s at %d | %s | %s | %.2f (%.2f) | %s |\n", k == 1 ? "decode" : "prefill of 512", depth[i],
                column("moe", what), column("llama", what), share, ratio[1],
                k == 1 ? sprintf("%.1f GB/s", median(gb, runs)) : ""
        }
}' "$dir/times"
