#!/bin/bash
# tests/measure.sh [DIRECTORY]: builds, checks and times everything on the first GPU, in less than ten minutes. All of it
# goes to DIRECTORY/report.md (default build/measured), with a section for each step; the output of a step is beside it.
# The lines that matter are printed here, too. A step that fails (exit code 124: it took too long) does not stop the
# others. Exit code: 0 if all steps succeeded.
# shellcheck disable=SC2016,SC2317 # Markdown has backticks; a trap calls finish
cd "$(dirname "$0")/.." || exit 1
PATH=$PATH:/usr/local/cuda/bin
export CUDA_DEVICE_ORDER=PCI_BUS_ID # the first GPU of CUDA is that of nvidia-smi
command -v nvcc >/dev/null || { echo "make measure wants nvcc"; exit 1; }
nvidia-smi -L >/dev/null 2>&1 || { echo "make measure wants a GPU: nvidia-smi lists none"; exit 1; }
out=${1:-build/measured} failed=() last=none end=585 # seconds
report=$out/report.md first=${CUDA_VISIBLE_DEVICES%%,*}
mkdir -p "$out" || exit 1
file=$out/synth.gguf # 4.3 GB; moved to /dev/shm if it fits there
[ "$(df -Pk /dev/shm 2>/dev/null | awk 'END {print int($4)}')" -gt 6000000 ] && file=$(mktemp -u /dev/shm/moe-XXXXXX)

# gpu FIELD: what nvidia-smi says of the first GPU; it names an unknown field on stdout
gpu() {
    local x
    x=$(nvidia-smi -i "${first:-0}" --query-gpu="$1" --format=csv,noheader 2>/dev/null) && echo "$x" || echo -
}

# Begins the report: the machine.
machine() {
    local version memory
    version=$(sed -n 's/^#define MOE_VERSION *"\(.*\)"/\1/p' moe.c)
    memory=$(awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
    printf '# moe on %s\n\n| machine | |\n|---|---|\n' "$(gpu name)"
    printf '| %s | %s |\n' GPU "$(gpu name), capability $(gpu compute_cap), $(gpu memory.total)" \
        driver "$(gpu driver_version), for CUDA $(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p')" \
        nvcc "$(nvcc --version | sed -n 's/.*release //p')" \
        'clocks before' "$(gpu clocks.sm), memory $(gpu clocks.mem)" \
        'clocks at most' "$(gpu clocks.max.sm), memory $(gpu clocks.max.mem), power limit $(gpu power.limit)" \
        PCIe "generation $(gpu pcie.link.gen.max), $(gpu pcie.link.width.max) lanes" \
        host "$(LC_ALL=C lscpu | sed -n 's/^Model name: *//p' | head -n 1), $(nproc) processors, $((memory / 1024)) GiB" \
        system "$(uname -srm), $(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release)" \
        date "$(date -u '+%Y-%m-%d %H:%M UTC')" \
        version "$version, $(git describe --always --dirty 2>/dev/null || echo no git)"
}

# Ends the report: what failed.
finish() {
    [ -z "$sampler" ] || kill "$sampler" 2>/dev/null
    rm -f "$file"
    {
        printf '## What failed\n\n'
        [ "$last" = "the end" ] || echo "- it was interrupted; the last step was $last"
        printf -- '- %s\n' "${failed[@]}" | grep -v '^- $' || [ "$last" != "the end" ] || echo 'Nothing.'
        printf '\n%s\n' "$SECONDS s in all"
    } >>"$report"
}

# clocks N: clocks, temperature and power in the samples behind line N
clocks() {
    awk -F', *' -v from="$1" '
        NR > from && $1 + 0 > 0 {
            if (!n++ || $1 + 0 < low) low = $1 + 0
            for (i = 1; i <= 4; i++) if ($i + 0 > most[i] + 0) most[i] = $i + 0
        }
        END {if (n) printf "%d to %d MHz, memory %d MHz, %d degrees, %d W", low, most[1], most[2], most[3], most[4]}
    ' "$out/clocks.txt"
}

# section NAME PATTERN VERDICT COMMAND LINE: a section of the report: the tables of a step that prints some, otherwise
# the lines that match; the last lines of a step that failed. LINE: where the samples of its clocks begin
section() {
    local log=$out/$1.txt at
    at=$(clocks "$5")
    printf '## %s: %s\n\n`%s`\n\n' "$1" "$3" "$4"
    [ -z "$at" ] || printf 'Clocks: %s\n\n' "$at"
    if grep -q '^|' "$log"; then
        head -n 500 "$log"
        echo
    else
        ! grep -qE -- "$2" "$log" || printf '```\n%s\n```\n\n' "$(grep -E -- "$2" "$log" | head -n 300)"
        [ "${3%%,*}" = ok ] || printf 'Its last lines:\n\n```\n%s\n```\n\n' "$(tail -n 20 "$log")"
    fi
}

# step NAME SECONDS PATTERN COMMAND..: runs the command with this time limit and prints the lines that match the
# pattern. `all` is the pattern of the report where that has more.
step() {
    local log=$out/$1.txt from=$SECONDS most=$((end - SECONDS)) rc=124 word=ok why sample
    sample=$(wc -l <"$out/clocks.txt")
    last=$1
    [ "$2" -lt "$most" ] && most=$2
    : >"$log"
    if [ "$most" -gt 0 ]; then
        timeout -k 5 "$most" "${@:4}" >"$log" 2>&1 </dev/null
        rc=$?
    fi
    case $rc in 124 | 137) [ "$most" -gt 0 ] && why=" (not done in $most s)" || why=" (no time was left)" ;; esac
    [ $rc = 0 ] || word="FAILED, exit code $rc$why" failed+=("$1: FAILED, exit code $rc$why")
    echo "$1: $word, $((SECONDS - from)) s of $SECONDS"
    grep -E -- "$3" "$log" | head -n 150 | cut -c1-160
    [ $rc = 0 ] || tail -n 3 "$log"
    section "$1" "${all:-$3}" "$word, $((SECONDS - from)) s" "$(head -n 1 <<<"${*:4}" | cut -c1-160)" "$sample" \
        >>"$report"
}
weights() { ./moe --synth "$@" --info </dev/null | awk '/^tensors/ {print int($5)}'; } # MiB of weights
# bench SHAPE [OPTIONS]: benchmarks synthetic weights, with as many layers as fit 85 % of the free memory; the rest is
# for the KV cache and the activations
bench() {
    local all n
    all=$(./moe --synth "$@" --info </dev/null | awk '/^layers/ {print $2}')
    n=$(awk -v n="$all" -v full="$(weights "$@")" -v less="$(weights "$1:layers=$((all - 1))" "${@:2}")" -v free="$free" \
        'BEGIN {over = full - 0.85 * free; n -= over > 0 ? int(over / (full - less)) + 1 : 0; print n < 1 ? 1 : n}')
    echo "$*: $n of $all layers, $(weights "$1:layers=$n" "${@:2}") MiB of weights, $free MiB of memory free" |
        tee -a "$report"
    echo >>"$report"
    all=. step "bench-$1" 60 '^ctx_|^[0-9]+,| at [0-9.]+ |weights|kernels per layer' \
        ./moe --gpus 0 --synth "$1:layers=$n" "${@:2}" --bench --profile -c 0
}

machine >"$report"
echo >>"$report"
trap finish EXIT
trap 'exit 130' INT TERM HUP
: >"$out/clocks.txt"
sampled=clocks.sm,clocks.mem,temperature.gpu,power.draw
stdbuf -oL nvidia-smi -i "${first:-0}" --query-gpu=$sampled --format=csv,noheader,nounits -lms 1000 \
    >>"$out/clocks.txt" 2>/dev/null &
sampler=$!
moe=(./moe -m build/demo.gguf)
asked=name,driver_version,memory.total,memory.free,clocks.max.sm,clocks.max.mem,power.limit
step gpu 20 . nvidia-smi --query-gpu=$asked --format=csv,noheader
free=$(nvidia-smi -i "${first:-0}" --query-gpu=memory.free --format=csv,noheader,nounits)
case $free in # of a GPU in host memory it is unknown
    '' | *[!0-9]*) free=$(awk '/^MemAvailable/ {print int($2 / 1024)}' /proc/meminfo) ;;
esac
step build 240 '(warning|error)(:| #)|\*\*\*' \
    make --no-print-directory -k -j"$(nproc)" WERROR=1 all build/test_gpu build/bench_tiles build/bench_decode
step version 10 . ./moe --version
step test_gpu 120 'FAIL|passed' build/test_gpu cuda
step smoke 30 ' ok | FAIL ' "${moe[@]}" --gpus 0 --smoke
step decode 90 '^###|^\| (recorded|kernel by)|\| 1 \| all o|BITS|RECORDED|WRONG|FAILED' build/bench_decode
step needle 30 needle "${moe[@]}" --gpus 0 --needle 60000 --kv fp8
for ranks in 0,0 0,0,0,0; do step "needle-$ranks" 40 'needle|all-reduce' "${moe[@]}" --gpus $ranks --needle 8000; done
for ranks in 0 0,0 0,0,0,0; do
    step "ranks-$ranks" 30 '^ctx_|^[0-9]+,|all-reduce' ./moe --gpus $ranks --synth qwen3-30b-a3b:layers=8 --bench -c 512
done
step doctor 60 . "${moe[@]}" --doctor --gpus 0
step doctor-ranks 40 'all-reduce' ./moe --doctor --gpus 0,0,0,0
step nccl 20 'all-reduce|49' "${moe[@]}" --gpus 0 --tp 1 --allreduce nccl --greedy --think off -p 'What is 7 squared? One word.'
# Pairs of runs: a run, what it is compared with, and how much worse its perplexity may be, in percent. The demo model is
# made for W4A4, so that this is what a chip that has it takes unless told otherwise.
pairs='fp8:cpu:0.5 bf16:cpu:0.5'
head -c 28000 prompts/haystack.txt >"$out/prose.txt" # 6,370 tokens for the demo model
rm -f "$out"/perplexity-*.txt
for kv in fp8 bf16; do
    step perplexity-$kv 30 perpl "${moe[@]}" --gpus 0 --kv $kv --moe-act bf16 --perplexity "$out/prose.txt"
done
if ./moe --version | grep -q sm_120f && [[ $(gpu compute_cap) = 12.* ]]; then
    pairs+=' w4a4:fp8:5'
    step perplexity-w4a4 30 perpl "${moe[@]}" --gpus 0 --kv fp8 --moe-act fp4 --perplexity "$out/prose.txt"
else echo "W4A4 is not for this chip or build: its perplexity is not measured" | tee -a "$report" && echo >>"$report"; fi
step perplexity-cpu 60 perpl "${moe[@]}" --cpu --perplexity "$out/prose.txt"
step perplexities 5 . awk -v pairs="$pairs" '
    /^perplexity/ {name = FILENAME; gsub(/.*perplexity-|\.txt$/, "", name); x[name] = $2}
    END {print "| run | perplexity | against | perplexity | worse by, % | allowed, % |\n|---|---|---|---|---|---|"
         for (n = split(pairs, p, " "); i++ < n; bad += !(worse <= q[3] && worse >= -q[3])) {
             split(p[i], q, ":"); worse = x[q[1]] && x[q[2]] ? 100 * x[q[1]] / x[q[2]] - 100 : 999
             printf "| %s | %s | %s | %s | %+.2f | %s |\n", q[1], x[q[1]], q[2], x[q[2]], worse, q[3]}
         exit bad > 0}' "$out"/perplexity-*.txt
bench qwen3-30b-a3b; bench deepseek-v3 --shard 0/4; bench qwen3-235b-a22b; bench kimi-k2 --shard 0/4
step tiles 60 '\|' build/bench_tiles
step write 60 tensors ./moe --synth qwen3-30b-a3b:layers=8 -m "$file" --info
step upload 30 'weights|loaded' ./moe -m "$file" --gpus 0 --verbose -c 256 --ids 1,2,3 --logits "$out/logits.npy"
# The same file with memory for a part of its experts: the same bits, and the rate at which the rest is copied.
few=(./moe -m "$file" --gpus 0 --vram-reserve $((free > 3200 ? free - 3200 : 0)) -c 256)
step experts 40 'experts|weights|differ' sh -c '"$@" && cmp "$0/logits.npy" "$0/host.npy"' "$out" \
    "${few[@]}" --verbose --ids 1,2,3 --logits "$out/host.npy"
step bench-experts 40 '^ctx_|^[0-9]+,|experts|k_fetch' "${few[@]}" --bench --profile
if sanitizer=$(command -v compute-sanitizer); then
    step sanitizer 120 'ERROR|passed' "$sanitizer" --error-exitcode 1 build/test_gpu cuda/gemv cuda/router cuda/sort
else echo "no compute-sanitizer: not checked with it" | tee -a "$report" && echo >>"$report"; fi
last="the end"
[ ${#failed[@]} = 0 ] && word="all steps succeeded" || word="some steps FAILED"
echo "$SECONDS s; $word; the report is $report"
exit $((${#failed[@]} > 0))
