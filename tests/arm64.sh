#!/bin/bash
# tests/arm64.sh: builds the program and the tests for 64-bit ARM and runs the unit tests and three prompts of the reference
# under qemu-user. The libraries are unpacked in build/arm64. `tests/arm64.sh deps` installs the compiler and qemu, as root;
# without `deps` they are installed where root runs it. CFLAGS: for the compiler.
set -eu
cd "$(dirname "$0")/.."
dir=build/arm64 lib=usr/lib/aarch64-linux-gnu
if ! { command -v aarch64-linux-gnu-gcc && command -v qemu-aarch64-static && dpkg --print-foreign-architectures | grep arm64; } >/dev/null; then
    [ "$(id -u)" = 0 ] || { echo "packages are missing; type: sudo tests/arm64.sh deps"; exit 1; }
    dpkg --add-architecture arm64
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static >/dev/null
fi
[ "${1:-}" != deps ] || exit 0
mkdir -p $dir/root $dir/inc/stb
cp /usr/include/stb/stb_ds.h $dir/inc/stb/
cd $dir
apt-get download -qq libjansson-dev:arm64 libjansson4:arm64 libpcre2-dev:arm64 libpcre2-8-0:arm64 libutf8proc-dev:arm64 libutf8proc2:arm64
for d in *.deb; do dpkg -x "$d" root; done
cd ../..
build() { # build SOURCE PROGRAM
    # shellcheck disable=SC2086 # several flags
    aarch64-linux-gnu-gcc -std=gnu11 ${CFLAGS:--O2 -g} -isystem $dir/inc -isystem $dir/root/usr/include -fopenmp "$1" -o "$2" \
        -L$dir/root/$lib -L$dir/root/lib/aarch64-linux-gnu -ljansson -lpcre2-8 -lutf8proc -lm
}
qemu() {
    qemu-aarch64-static -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=$dir/root/$lib:$dir/root/lib/aarch64-linux-gnu "$@"
}
build moe.c $dir/moe
build tests/test_moe.c $dir/test_moe
for t in 'What is 7 squared? One word.=49' 'What is the capital of France?=The capital of France is Paris.' \
    'Sort these words: pear, apple, kite, bear.=bread, kite, kite, falcon,'; do
    got=$(qemu $dir/moe -m build/demo.gguf --greedy --think off -t 2 -p "${t%%=*}" </dev/null)
    echo "${t%%=*} $got"
    [ "$got" = "${t#*=}" ]
done
qemu $dir/test_moe nvfp4 vocab template kernels model/fixtures model/router model/rope model/sampler model/kv model/ops model/state
