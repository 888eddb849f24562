#!/bin/bash
# tests/measure.sh [DIRECTORY]: builds, checks and times everything on the first GPU, in less than ten minutes. The
# output of each step goes to DIRECTORY (default build/measured); the lines that matter are printed here, too. A step
# that fails (exit code 124: it took too long) does not stop the others. Exit code: 0 if all steps succeeded.
cd "$(dirname "$0")/.." || exit 1
PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || { echo "make measure wants nvcc"; exit 1; }
nvidia-smi -L >/dev/null 2>&1 || { echo "make measure wants a GPU: nvidia-smi lists none"; exit 1; }
out=${1:-build/measured} failed=0 end=585 # seconds
mkdir -p "$out" || exit 1
file=$out/synth.gguf # 4.3 GB; moved to /dev/shm if it fits there
[ "$(df -Pk /dev/shm 2>/dev/null | awk 'END {print int($4)}')" -gt 6000000 ] && file=$(mktemp -u /dev/shm/moe-XXXXXX)
trap 'rm -f "$file"' EXIT

# step NAME SECONDS PATTERN COMMAND..: runs the command with this time limit and prints the lines that match the pattern
step() {
    local log=$out/$1.txt from=$SECONDS most=$((end - SECONDS)) rc=124 word=ok
    [ "$2" -lt "$most" ] && most=$2
    : >"$log"
    [ "$most" -gt 0 ] && { timeout -k 5 "$most" "${@:4}" >"$log" 2>&1 </dev/null; rc=$?; }
    [ $rc = 0 ] || word="FAIL, exit code $rc," failed=1
    echo "$1: $word $((SECONDS - from)) s of $SECONDS"
    grep -E -- "$3" "$log" | head -n 150 | cut -c1-160
    [ $rc = 0 ] || tail -n 3 "$log"
}
weights() { ./moe --synth "$@" --info </dev/null | awk '/^tensors/ {print int($5)}'; } # MiB of weights
# bench SHAPE [OPTIONS]: benchmarks synthetic weights, with as many layers as fit 85 % of the free memory; the rest is
# for the KV cache and the activations
bench() {
    local all n
    all=$(./moe --synth "$@" --info </dev/null | awk '/^layers/ {print $2}')
    n=$(awk -v n="$all" -v full="$(weights "$@")" -v less="$(weights "$1:layers=$((all - 1))" "${@:2}")" -v free="$free" \
        'BEGIN {over = full - 0.85 * free; n -= over > 0 ? int(over / (full - less)) + 1 : 0; print n < 1 ? 1 : n}')
    echo "$*: $n of $all layers, $(weights "$1:layers=$n" "${@:2}") MiB of weights, $free MiB of memory free"
    step "bench-$1" 60 '^[0-9]+,| at [0-9.]+ |weights|kernels per layer' \
        ./moe --gpus 0 --synth "$1:layers=$n" "${@:2}" --bench --profile -c 0
}
moe=(./moe -m build/demo.gguf) asked=name,driver_version,memory.total,memory.free,clocks.max.sm,clocks.max.mem,power.limit
step gpu 20 . nvidia-smi --query-gpu=$asked --format=csv,noheader
free=$(nvidia-smi -i 0 --query-gpu=memory.free --format=csv,noheader,nounits)
step build 240 'warning:|error:' make -j"$(nproc)" WERROR=1 all build/test_gpu build/bench_tiles
step version 10 . ./moe --version
step test_gpu 120 'FAIL|passed' build/test_gpu cuda
step smoke 30 ' ok | FAIL ' "${moe[@]}" --gpus 0 --smoke
step needle 30 needle "${moe[@]}" --gpus 0 --needle 60000 --kv fp8
for ranks in 0,0 0,0,0,0; do step "needle-$ranks" 40 'needle|all-reduce' "${moe[@]}" --gpus $ranks --needle 8000; done
step doctor 60 . "${moe[@]}" --doctor --gpus 0
step doctor-ranks 40 'sum' ./moe --doctor --gpus 0,0,0,0
step nccl 20 'all-reduce|49' "${moe[@]}" --gpus 0 --tp 1 --allreduce nccl --greedy --think off -p 'What is 7 squared? One word.'
head -c 28000 prompts/haystack.txt >"$out/prose.txt" # 6,370 tokens for the demo model
for kv in fp8 bf16; do step "perplexity-$kv" 30 perpl "${moe[@]}" --gpus 0 --kv $kv --perplexity "$out/prose.txt"; done
step perplexity-cpu 60 perpl "${moe[@]}" --cpu --perplexity "$out/prose.txt"
step perplexities 5 . awk '/^perplexity/ {x[n++] = $2}
    END {a = 100 * x[0] / x[2] - 100; b = 100 * x[1] / x[2] - 100; printf "fp8 %+.2f %%, bf16 %+.2f %% of the CPU, 0.5 allowed\n", a, b
         exit n != 3 || a * a > 0.25 || b * b > 0.25}' "$out"/perplexity-{fp8,bf16,cpu}.txt
bench qwen3-30b-a3b; bench deepseek-v3 --shard 0/4; bench qwen3-235b-a22b; bench kimi-k2 --shard 0/4
step tiles 60 '\|' build/bench_tiles
step write 60 tensors ./moe --synth qwen3-30b-a3b:layers=8 -m "$file" --info
step upload 30 'weights|loaded' ./moe -m "$file" --gpus 0 --verbose -c 256 --ids 1,2,3 --logits "$out/logits.npy"
if sanitizer=$(command -v compute-sanitizer); then
    step sanitizer 120 'ERROR|passed' "$sanitizer" --error-exitcode 1 build/test_gpu cuda/gemv cuda/router cuda/sort
else echo "no compute-sanitizer: not checked with it"; fi
echo "$SECONDS s; $([ $failed = 0 ] && echo "all steps succeeded" || echo "some steps FAILED"); what they said is in $out"
exit $failed
