#!/bin/bash
# tests/compare_trees.sh [--quick] [--fresh] [-v] BASE NEW: whether two trees of this program compute the same, to the
# bit.
#
# Both trees are compiled as their Makefiles say, but without CUDA, into build/compare of each; what is there and still
# good, results too, is not made again (--fresh: everything is). The inputs, which are the demo model, the fixtures and
# the prompts, are those of BASE. Compared are:
#
#   gguf      the files that moe-convert writes, byte by byte
#   logits    of a prompt, on the CPU: every model, the exact kernels and every set of vector kernels that this machine
#             runs, --tp 1 to 4 and --pp, all types of the cache, at once, token by token, in pieces, and beyond what
#             one forward takes; and what the program writes with --cpu-ref --logits
#   program   what the program says and writes: sampled answers, perplexity, the scores of --calibrate
#   plan      the numbers of --plan --json, without the words around them: the shapes of --synth, some models, several
#             machines
#   launches  the kernels that a GPU is told to run, in their order, on simulated GPUs (with nvcc). Their names do not
#             count: each is known by when it first appeared
#   simulated the logits that come out of them
#
# Prints for each of these how many results are equal, and every one that is not; with -v all of them, and the kernels
# of both trees side by side. --quick takes less than a minute: the best and the plainest vector kernels, --tp 1 and 2,
# fewer plans, no GPU. Exit code: 0 all are equal, 1 some differ, 2 something could not be built or run.
#
# tests/compare_trees.c runs inside the engine; the names that it knows of moe.c stand at its top, once for BASE and
# once for today.
quick= fresh= verbose=
while [[ ${1-} == -* ]]; do
    case $1 in
    --quick) quick=quick ;;
    --fresh) fresh=yes ;;
    -v) verbose=yes ;;
    *) set -- ;;
    esac
    shift
done
[ $# = 2 ] && [ -f "$1/moe.c" ] && [ -f "$2/moe.c" ] ||
    { echo "usage: tests/compare_trees.sh [--quick] [--fresh] [-v] BASE NEW" >&2; exit 2; }
source=$(cd "$(dirname "$0")" && pwd) base=$(cd "$1" && pwd) new=$(cd "$2" && pwd)
cores=$(nproc) sections=(gguf logits program plan launches simulated)
[ $quick ] && sections=(gguf logits plan)
# How nvcc makes PTX, and the simulator that runs it: the same for both trees.
{ read -r line; eval "nvcc=($line)"; read -ra simulator; } < <(make -s --no-print-directory -C "$source/.." DEPS=ok --eval='
compare-simulator:;@:$(info $(if $(NVCC),$(NVCC) $(PTX_FLAGS) -w))$(info $(SIM_PARTS:%=build/ptxsim_%.o))' compare-simulator)
gpu=$([ $quick ] || [ ${#nvcc[@]} = 0 ] || echo gpu)
if [ ! $quick ] && [ ! $gpu ]; then
    echo "no nvcc: the CUDA backend is not compared"
    sections=(gguf logits program plan)
fi
unset MOE_MODEL MAKEFLAGS MAKELEVEL
export OMP_WAIT_POLICY=passive LC_ALL=C HOME=/nonexistent
prompt=$(awk 'BEGIN {for (i = 0; i < 70; i++) printf "%s%d", i ? "," : "", (i * 389 + 17) % 500}')
failed=$(mktemp)
trap 'rm -f "$failed"' EXIT

# job COMMAND..: in the background, as many at a time as there are processors
job() {
    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n; done
    { "$@" || echo "$*" >>"$failed"; } &
}
# finish WHAT: waits for the jobs, all of which must have succeeded
finish() {
    wait
    [ -s "$failed" ] || return 0
    echo "$1 failed:" >&2
    sort "$failed" >&2
    exit 2
}
key() { sha256sum | cut -c1-32; }
# current FILE KEY: FILE was made from what KEY stands for
current() { [ ! $fresh ] && [ -s "$1" ] && [ "$(cat "$1.key" 2>/dev/null)" = "$2" ]; }
# made FILE KEY COMMAND..: makes FILE by the command unless it is current
made() {
    current "$1" "$2" && return
    rm -f "$1.key"
    "${@:3}" 2>"$1.log" && echo "$2" >"$1.key" && return
    grep -m 10 -E 'error|undefined' "$1.log" >&2
    return 1
}

# ---- building: DIR is build/compare/base or build/compare/new of a tree ----

# compiled FILE INPUT OPTION.. -- COMPILER..: the text behind the preprocessor says whether FILE is current
compiled() {
    local file=$1 input=$2 options=() text
    shift 2
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    text=$("$@" "${options[@]}" -E -P "$input" 2>"$file.log" | key; exit "${PIPESTATUS[0]}") || return
    text=$({ echo "$text $*" "${options[@]}"; "$1" --version; } | key)
    made "$file" "$text" "$@" "${options[@]}" "$input" -o "$file"
}
# engine FILE TREE NAMES OPTION.. -- COMPILER..: compare_trees.c with the names of the base or of today; with the
# others, where those are not this tree's
engine() {
    local file=$1 names=$3 options=(-I"$2") input=$source/compare_trees.c
    shift 3
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    if ! "${@:2}" "${options[@]}" $names -fsyntax-only "$input" 2>"$file.names.log"; then
        names=$([ $names ] || echo -DCOMPARE_BASE)
        "${@:2}" "${options[@]}" $names -fsyntax-only "$input" 2>/dev/null ||
            { grep -m 10 error "$file.names.log" >&2; return 1; }
    fi
    compiled "$file" "$input" "${options[@]}" $names "$@"
}
make_simulator() {
    make -s -C "$source/.." DEPS=ok "${simulator[@]}" >/dev/null &&
        made "$1" "$(cat "$source"/ptxsim/* | key)" ld -r "${simulator[@]/#/$source/../}" -o "$1"
}
# build DIR TREE NAMES: starts the compilers
build() {
    local dir=$1 tree=$2 names=$3 c cxx libs lock
    mkdir -p "$dir" && exec {lock}>"$dir/lock" && flock "$lock" || exit 2 # two comparisons take turns
    { read -ra c; read -ra libs; read -ra cxx; } < <(make -s --no-print-directory -C "$tree" DEPS=ok NVCC= --eval='
compare-flags:;@echo "$(CC) $(FLAGS) -w -fopenmp"; echo "$(LIBS)"; echo "$(CXX)"' compare-flags)
    [ ${#cxx[@]} -gt 0 ] || { echo "$tree/Makefile does not tell how to compile" >&2; exit 2; }
    echo "${libs[*]}" >"$dir/libs"
    echo "${cxx[0]}" >"$dir/linker"
    job engine "$dir/program.o" "$tree" "$names" -- "${c[@]}" -c
    [ ! $gpu ] || job engine "$dir/program_gpu.o" "$tree" "$names" -DMOE_CUDA -- "${c[@]}" -c
    [ ! $gpu ] || job make_simulator "$dir/simulator.o"
    [ ! $gpu ] || job made "$dir/simulated.o" "$(cat "$tree"/{moe_cuda.cu,moe.c,gguf_nvfp4.h} | key)" \
        "${nvcc[@]}" -c "$tree/moe_cuda.cu" -o "$dir/simulated.o"
    job compiled "$dir/convert.o" "$tree/convert/moe-convert.c" -Wa,-I"$tree" -- "${c[@]}" -c
}
# linked DIR FILE OBJECT..
linked() {
    local dir=$1 file=$2 objects=("${@:3}")
    made "$dir/$file" "$(cat "${objects[@]/%/.key}" "$dir/libs" | key)" \
        "$(cat "$dir/linker")" "${objects[@]}" -fopenmp -o "$dir/$file" $(cat "$dir/libs")
}
link_all() {
    linked "$1" program "$1/program.o" && linked "$1" convert "$1/convert.o" || return
    [ ! $gpu ] || linked "$1" program_gpu "$1/program_gpu.o" "$1/simulated.o" "$1/simulator.o"
}

# ---- results: lines of a name, a tab, a value ----

line() {
    [ "$2" ] || echo "$1: no result" >>"$failed"
    printf '%s\t%s\n' "$1" "$2"
}
numbers() { sed 's/"[^"]*"//g' | grep -oE -- '-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?' | paste -sd' '; }
hash_of() { sha256sum "$1" | cut -c1-16; }
# attempt OUT ERR COMMAND..
attempt() { "${@:3}" >"$1" 2>"$2" </dev/null; }
# quietly COMMAND..: says something only if it fails
quietly() {
    local said
    said=$("$@" 2>&1 >/dev/null </dev/null) && return
    echo "$said" >&2
    return 1
}

gguf_of() { # DIR NAME SOURCE OPTION..
    local file=$1/models/$2.gguf
    quietly "$1/convert" "$3" -o "$file" "${@:4}" && line "$2" "$(hash_of "$file")" >"$1/gguf.$2.part"
}
run_gguf() {
    local f=$base/tests/fixtures config
    rm -rf "$1/models"
    mkdir -p "$1/models"
    job gguf_of "$1" demo "$base/convert/demo" --name moe-demo
    for config in "$f"/*/config.json; do
        config=${config%/config.json}
        job gguf_of "$1" "${config##*/}" "$config"
    done
    job gguf_of "$1" qwen3moe,nvfp4,q8_0 "$f/qwen3moe" --quantize nvfp4 --dense --backbone q8_0
    job gguf_of "$1" deepseek_v3,nvfp4 "$f/deepseek_v3" --quantize nvfp4 --search amax --keep 'blk.1.*down'
    job gguf_of "$1" deepseek_v3_plain,bf16 "$f/deepseek_v3_plain" --quantize nvfp4 --backbone bf16
    job gguf_of "$1" qwen3moe_ct,header "$f/qwen3moe_ct" --dry-run
}
models() { (cd "$1/models" && printf '%s\n' *.gguf) | sed 's/\.gguf$//' | grep -v ,header; }

logits_of() { # DIR MODEL
    local dir=$1 m=$2 d file=$1/logits.$2
    local moe=("$dir/program" moe -t 2 -m "$dir/models/$m.gguf" --ids "$prompt" -c 70 --logits "$file.npy")
    "$dir/program" logits "$dir/models/$m.gguf" $quick >"$file.lines" || return
    awk -v m="$m" '{print m " " $1 " " $2 " " $3 " " $4 "\t" $5 " " $6}' "$file.lines" >"$file.part"
    for d in "1 1" "2 1" ${quick:-"3 1" "4 1" "1 2" "2 2"}; do
        [ "$d" = quick ] && continue
        quietly "${moe[@]}" --cpu-ref --kv f32 --tp ${d% *} --pp ${d#* } || return
        line "$m --cpu-ref tp${d% *},pp${d#* } f32" "$(hash_of "$file.npy")" >>"$file.part"
    done
    quietly "${moe[@]}" --cpu || return
    line "$m --cpu" "$(hash_of "$file.npy")" >>"$file.part"
    rm -f "$file.npy" "$file.lines"
}
run_logits() {
    local m
    for m in demo $(models "$1" | grep -v demo); do # the longest first
        [ $quick ] && [[ $m == *,* ]] || job logits_of "$1" "$m"
    done
}

program_of() { # DIR MODEL
    local dir=$1 m=$2 file=$1/program.$2 moe=("$1/program" moe --cpu -t 2 -m "$1/models/$2.gguf") a
    for a in "--greedy -n 24" "--seed 5 -n 40 --temp 1" \
        "--seed 6 -n 24 --top-k 5 --min-p 0.05 --repeat-penalty 1.2 --tp 2"; do
        attempt "$file.out" "$file.err" "${moe[@]}" --raw -p 'Once upon a time' -c 128 $a || return
        line "$m --raw $a" "$(hash_of "$file.out")"
    done >"$file.part"
    attempt "$file.out" "$file.err" "${moe[@]}" --perplexity "$dir/prose.txt" || return
    line "$m --perplexity" "$(sed 's/,.*//' "$file.out" | numbers)" >>"$file.part"
    quietly env -C "$dir" "${moe[@]}" --calibrate prose.txt -o "$file.json" --activations "$file.gguf" || return
    line "$m --calibrate" "$(hash_of "$file.json")" >>"$file.part"
    line "$m --activations" "$(hash_of "$file.gguf")" >>"$file.part"
    rm -f "$file".{out,err,json,gguf}
}
run_program() {
    local m
    head -c 2500 "$base/prompts/haystack.txt" >"$1/prose.txt"
    for m in $(models "$1"); do job program_of "$1" "$m"; done
}

plan_of() { # DIR NAME OPTION..: every machine
    local dir=$1 file=$1/plan.$2 rc machine
    local machines=("1x24" "1x24@936" "1x96" "2x96" "4x96" "4x32@1792" "4x96 --tp 2 --pp 2" "2x96 --pp 2"
        "4x96 --kv bf16 -c 8192")
    [ $quick ] || machines+=("2x96 --tp 2" "3x141" "4x96 --tp 4" "4x96 --pp 4" "4x32@1792 --tp 2 --pp 2"
        "4x32@1792 --tp 1 --pp 4" "8x80 --tp 4 --pp 2" "2x128 -c 131072" "4x96 --vram-reserve 4000")
    for machine in "${machines[@]}"; do
        attempt "$file.out" "$file.err" "$dir/program" moe --plan --json "${@:3}" --gpus $machine
        rc=$? # 1: does not fit, 2: cannot be divided so
        [ $rc -le 2 ] || { cat "$file.err" >&2; return 1; }
        line "$2 $machine" "exit code $rc: $(numbers <"$file.out")"
    done >"$file.part"
    rm -f "$file".{out,err}
}
plan_cpu() { # DIR MODEL: what does not depend on how fast and how large the memory is
    local file=$1/plan.cpu-$2
    local keys='"(weights|cache|scratch_about|experts|backbone|head|sum|first_layer|layers)"'
    attempt "$file.out" "$file.err" "$1/program" moe --plan --json --cpu --kv f32 -c 256 -t 2 -m "$1/models/$2.gguf" ||
        return
    line "$2 --cpu" "$(grep -E "$keys" "$file.out" | numbers)" >"$file.part"
    rm -f "$file".{out,err}
}
run_plan() {
    local shape shapes m
    shapes=$("$1/program" moe --plan --gpus 1x96 --synth x 2>&1 | sed -n 's/.*known shapes are //p' | tr -d ,)
    [ "$shapes" ] || { echo "the program does not tell the shapes of --synth" >&2; exit 2; }
    for shape in $shapes; do
        job plan_of "$1" "$shape" --synth "$shape"
        [ $quick ] && continue
        job plan_of "$1" "$shape:backbone=q8_0" --synth "$shape:backbone=q8_0"
        job plan_of "$1" "$shape,shard" --synth "$shape:layers=9" --shard 0/4
    done
    for m in demo ${quick:-qwen3moe qwen3moe_reap deepseek_v3 deepseek_v3_fp8}; do
        [ "$m" = quick ] && continue
        job plan_of "$1" "$m" -m "$1/models/$m.gguf"
        job plan_cpu "$1" "$m"
    done
}

# k1 for the first kernel and wherever it appears again, k2 for the next other one ..; - between threads
by_appearance() {
    awk '$1 != "-" && !($1 in k) {k[$1] = "k" ++n} {printf "%s ", $1 == "-" ? "-" : k[$1]} END {print NR}'
}
# launches_of DIR NAME OPTION..: kernels by name into launches/NAME; their list and the logits or the answer into parts
launches_of() {
    local dir=$1 name=$2 list=$1/launches/$2 file=$1/launches.$2
    attempt "$file.out" "$file.err" "$dir/program_gpu" launches "$list" moe "${@:3}" ||
        { cat "$file.err" >&2; return 1; }
    [ -s "$list" ] || { echo "$name: no launches were noted" >&2; return 1; }
    line "$name" "$(by_appearance <"$list")" >"$file.part"
    [ -e "$file.npy" ] || cp "$file.out" "$file.npy"
    line "$name" "$(hash_of "$file.npy")" >"$dir/simulated.$name.part"
    rm -f "$file".{out,err,npy}
}
run_launches() {
    local m n kv gpu=()
    rm -rf "$1/launches"
    mkdir -p "$1/launches"
    for m in qwen3moe deepseek_v3; do
        gpu=(-m "$1/models/$m.gguf" -c 80 --gpus 0)
        for n in 1 4 40; do
            for kv in fp8 bf16; do
                job launches_of "$1" "$m,$n,$kv" "${gpu[@]}" --kv $kv --ids "$(cut -d, -f1-$n <<<"$prompt")" \
                    --logits "$1/launches.$m,$n,$kv.npy"
            done
        done
        job launches_of "$1" "$m,answer" "${gpu[@]}" --raw --seed 3 --temp 1 --top-k 40 -n 6 --ids 5,6,7,8,9
        gpu+=(--gpus 0,0 --allreduce oneshot --ids "$(cut -d, -f1-20 <<<"$prompt")")
        job launches_of "$1" "$m,tp2" "${gpu[@]}" --tp 2 --logits "$1/launches.$m,tp2.npy"
        job launches_of "$1" "$m,pp2" "${gpu[@]}" --pp 2 --tp 1 --logits "$1/launches.$m,pp2.npy"
    done
    gpu=(-m "$1/models/qwen3moe_nvfp4.gguf" -c 80 --gpus 0)
    job launches_of "$1" nvfp4,fp4 "${gpu[@]}" --moe-act fp4 --ids "$prompt" --logits "$1/launches.nvfp4,fp4.npy"
}

# text_of DIR SECTION: the file of its results
text_of() { echo "$1/$2$([ $quick ] && [ "$2" != gguf ] && echo .quick).txt"; }
# results DIR: every section whose file is not current
results() {
    local dir=$1 s inputs what text by
    inputs=$({ echo "$prompt"; cat "$dir/convert.key"; grep -m 1 ^flags /proc/cpuinfo
        find "$base/tests/fixtures" "$base/convert/demo" "$base/prompts" -type f | sort | xargs cat; } | key)
    for s in "${sections[@]}"; do
        text=$(text_of "$dir" $s) by=${s/simulated/launches}
        what=$inputs$(declare -f run_$by ${by}_of plan_cpu line numbers hash_of attempt by_appearance | key)
        case $s in
        gguf) ;;
        launches | simulated) what+=$(cat "$dir/program_gpu.key") ;;
        *) what+=$(cat "$dir/program.key") ;;
        esac
        # what is simulated comes with the launches: neither is current without the other
        current "$text" "$what" && { [ $s != launches ] || current "$(text_of "$dir" simulated)" "$what"; } && continue
        rm -f "$text.key"
        if [ $s != simulated ]; then
            rm -f "$dir/$s".*.part
            [ $s = launches ] && rm -f "$dir"/simulated.*.part
            run_$s "$dir"
            finish "$s of $dir"
        fi
        cat "$dir/$s".*.part >"$text" && echo "$what" >"$text.key" || exit 2
        rm -f "$dir/$s".*.part
        echo "$text: $(wc -l <"$text") results, $SECONDS s"
    done
}

# ---- comparison ----

# differences BASE NEW: names that are not equal in both, with what differs first
differences() {
    awk -F'\t' -v all="$verbose" '
        function first(a, b,   x, y, i, n, m) {
            n = split(a, x, " "); m = split(b, y, " ")
            for (i = 1; i <= n && i <= m && x[i] == y[i];) i++
            if (n <= 3 && m <= 3) return a " | " b
            return "word " i " of " n " and " m ": " (i > n ? "nothing" : x[i]) " | " (i > m ? "nothing" : y[i])
        }
        NR == FNR {old[$1] = $2; next}
        {seen[$1] = 1}
        !($1 in old) {print "  " $1 ": only in the new tree"; bad++; next}
        old[$1] != $2 {print "  " $1 ": " first(old[$1], $2); bad++; next}
        {same++; if (all) print "  = " $1 ": " $2}
        END {
            for (k in old) if (!(k in seen)) {print "  " k ": only in the base"; bad++}
            print same + 0 " equal, " bad + 0 " differ" > "/dev/stderr"
            exit bad || !same
        }' "$1" "$2"
}

a=$base/build/compare/base b=$new/build/compare/new
build "$a" "$base" -DCOMPARE_BASE
build "$b" "$new" ""
finish "compiling"
job link_all "$a"
job link_all "$b"
finish "linking"
echo "compiled: $SECONDS s"
results "$a"
results "$b"
code=0
for s in "${sections[@]}"; do
    list=$(differences "$(text_of "$a" $s)" "$(text_of "$b" $s)" 2>"$failed") || code=1
    printf '%-9s %s\n' "$s" "$(cat "$failed")"
    [ "$list" ] && echo "$list"
    if [ $s = gguf ]; then
        for f in "$a"/models/*.gguf; do cmp "$f" "$b/models/${f##*/}" || code=1; done
    fi
    if [ $s = launches ] && [ $verbose ]; then
        for f in "$a"/launches/*; do
            echo "  ${f##*/}: base, new"
            paste "$f" "$b/launches/${f##*/}" | awk -F'\t' '{printf "    %4d %-24s %s\n", NR, $1, $2}'
        done
    fi
done
echo "$([ $code = 0 ] && echo "the trees compute the same" || echo "the trees DIFFER"), $SECONDS s"
exit $code
