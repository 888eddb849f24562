# make           everything: ./moe, build/moe-convert, build/moe-reap, build/demo.gguf
# make chat      the same, and opens a chat with the demo model
# make test      builds and runs the tests
# make measure   speed of everything on a GPU
# make help      lists the targets
#
# The first step installs missing system packages (Debian, Ubuntu); then make calls itself, so that pkg-config is asked
# when it is there.

PREFIX   ?= /usr/local
ifeq ($(origin CC),default)
CC       := gcc
endif
CLANG    ?= clang
PACKAGES := gcc g++ libc6-dev pkg-config libjansson-dev libpcre2-dev libutf8proc-dev libstb-dev
GOALS    := all chat test bench asan fuzz test-arm64 install moe build/moe-convert build/moe-reap build/demo.gguf build/test_moe build/test_cuda build/test_gpu \
            build/bench_tiles mutate test-gpu measure

# What a goal needs is built on all cores; several goals run one after the other, and a chat keeps the terminal.
JOBS = $(if $(findstring -j,$(MAKEFLAGS))$(word 2,$(MAKECMDGOALS))$(filter chat,$(MAKECMDGOALS)),,-j$(shell nproc 2>/dev/null || echo 1))

.DEFAULT_GOAL := all
.PHONY: all chat test mutate test-gpu measure bench asan fuzz test-arm64 install clean help format deps goals

ifneq ($(DEPS),ok)

# One call for all goals: two would build the same file side by side with -j.
$(GOALS): goals ;

goals: deps
	@$(MAKE) --no-print-directory $(JOBS) DEPS=ok $(filter $(GOALS),$(or $(MAKECMDGOALS),all))

deps:
	@if command -v $(CC) >/dev/null && command -v $(CXX) >/dev/null && command -v pkg-config >/dev/null && pkg-config --exists jansson libpcre2-8 libutf8proc \
	    && echo '#include <stb/stb_ds.h>' | $(CC) -fopenmp -E - >/dev/null 2>&1; then :; \
	elif command -v apt-get >/dev/null; then \
	    echo "installing: $(PACKAGES)"; \
	    if [ "$$(id -u)" = 0 ]; then S=; else S=sudo; fi; \
	    $$S apt-get update -qq && $$S env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(PACKAGES) >/dev/null; \
	else \
	    echo "missing packages; install what your system calls: $(PACKAGES)"; exit 1; \
	fi

else

, := ,
WARN   := -Wall -Wextra -Wshadow -Wvla $(if $(WERROR),-Werror)
LIBS   := $(shell pkg-config --libs jansson libpcre2-8 libutf8proc) -lm
CFLAGS ?= -O2 -g
FLAGS   = -std=gnu11 $(CFLAGS) $(WARN) $(shell pkg-config --cflags jansson libpcre2-8 libutf8proc)
SAN    := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
TESTS  := tests/test_moe.c $(wildcard tests/*.h) convert/quantize.h convert/calibrate.h

# CUDA where nvcc is: chips of Blackwell workstations (from 12.9 on), of Hopper, and code that drivers compile for others: for newer
# ones with launches that overlap (compute_90: without its wait they must not), for older ones without.
NVCC     ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
ifneq ($(NVCC),)
NVCC_VERSION := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
CUDA_SM120   := $(shell [ "$(NVCC_VERSION)" -ge 129 ] 2>/dev/null && echo yes)
CUDA_LIB     := $(abspath $(dir $(NVCC))../lib64)
# NCCL beside CUDA or in the system; without it GPUs add up by our own kernel alone.
NCCL_LIBS    := $(shell $(CC) -I$(CUDA_LIB)/../include -include nccl.h -E -x c /dev/null >/dev/null 2>&1 && echo 'int main(void) { return 0; }' | \
    $(CC) -x c - -o /dev/null -L$(CUDA_LIB) -lnccl 2>/dev/null && echo -lnccl $(if $(wildcard $(CUDA_LIB)/libnccl.so*),-Wl$(,)-rpath$(,)$(CUDA_LIB)))
CUDA_TARGETS := $(if $(CUDA_SM120),sm_120f )sm_90 compute_90 compute_80
CUDA_FLAGS   := -std=c++17 -O3 --threads 0 $(if $(CUDA_SM120),-gencode arch=compute_120f$(,)code=sm_120f) \
    -gencode 'arch=compute_90$(,)code=[sm_90$(,)compute_90]' -gencode arch=compute_80$(,)code=compute_80 -DMOE_CUDA_TARGETS='"$(CUDA_TARGETS)"' $(if $(NCCL_LIBS),-DHAVE_NCCL) \
    -Xcompiler -fopenmp$(,)-Wall$(,)-Wextra$(,)-Wno-unused-function $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
CUDA_LIBS    := -L$(CUDA_LIB) -lcudart_static -lstdc++ -ldl -lrt -lpthread $(NCCL_LIBS)
endif

all: moe build/moe-convert build/moe-reap build/demo.gguf

# moe.c and moe-convert include the table of pre-tokenizers.
moe build/moe-convert build/test_moe build/test_cuda build/moe_library.o build/test_gpu: convert/pre_tokenizers.h

build build/asan:
	@mkdir -p $@

ifneq ($(NVCC),)
moe: moe.c convert/calibrate.h moe_cuda.cu gguf_nvfp4.h build/moe_cuda.o Makefile
	$(CC) $(FLAGS) -DMOE_CUDA -fopenmp moe.c build/moe_cuda.o -o $@ $(LIBS) $(CUDA_LIBS)

build/moe_cuda.o: moe_cuda.cu moe.c gguf_nvfp4.h Makefile | build
	$(if $(CUDA_SM120),,@echo "nvcc before 12.9: without the image for RTX PRO 6000, RTX 5090 and DGX Spark")
	$(if $(NCCL_LIBS),,@echo "no NCCL: GPUs add up by our own kernel alone")
	@mkdir -p build/nvcc
	@echo "$(NVCC) -c moe_cuda.cu -o $@ ($(CUDA_TARGETS))"
	@$(NVCC) $(CUDA_FLAGS) -Xptxas -v --keep --keep-dir build/nvcc -c moe_cuda.cu -o $@ 2>build/nvcc/log || { cat build/nvcc/log; rm -f $@; exit 1; }
else
moe: moe.c convert/calibrate.h moe_cuda.cu gguf_nvfp4.h Makefile
	@echo "no nvcc: building without CUDA"
	$(CC) $(FLAGS) -fopenmp moe.c -o $@ $(LIBS)
endif

build/moe-convert: convert/moe-convert.c convert/common.h convert/quantize.h moe.c gguf_nvfp4.h Makefile | build
	$(CC) $(FLAGS) -fopenmp convert/moe-convert.c -o $@ $(LIBS)

build/moe-reap: convert/moe-reap.c convert/common.h gguf_nvfp4.h Makefile | build
	$(CC) $(FLAGS) convert/moe-reap.c -o $@ $(LIBS)

build/demo.gguf: build/moe-convert $(wildcard convert/demo/*)
	build/moe-convert convert/demo -o $@ --name moe-demo

# Greedy, because chance makes so small a model err.
chat: all
	@./moe -m build/demo.gguf --greedy

bench: all
	./moe -m build/demo.gguf --bench -c 8192

build/test_moe: $(TESTS) moe.c moe_cuda.cu gguf_nvfp4.h Makefile | build
	$(CC) $(FLAGS) -fopenmp tests/test_moe.c -o $@ $(LIBS)

# Threads that wait asleep: on a busy machine spinning ones stand in each other's way.
test mutate asan: export OMP_WAIT_POLICY = passive

test: all build/test_moe build/test_cuda build/tiles_emulated
	build/test_moe -j2
	build/test_cuda -j2 cuda
	build/tiles_emulated >build/tiles_emulated.md || { grep OTHER build/tiles_emulated.md; exit 1; }

# The CUDA backend on an emulator: the tests in C, moe_cuda.cu as C++.
EMULATED := -std=c++17 -x c++ -DCUEMU -O2 -g -fno-strict-aliasing -Wall -Wextra -Wshadow -Wno-unused-function $(if $(WERROR),-Werror) -fopenmp
CUDA_TESTS := tests/test_cuda.cu tests/t_cuda_kernels.h tests/t_cuda_mutate.h tests/emu_selftest.h tests/cuda_emu.h
build/emulated.o: $(CUDA_TESTS) moe_cuda.cu moe.c gguf_nvfp4.h Makefile | build
	$(CXX) $(EMULATED) -c tests/test_cuda.cu -o $@

build/test_cuda: $(TESTS) build/emulated.o moe.c moe_cuda.cu gguf_nvfp4.h Makefile | build
	$(CC) $(FLAGS) -DMOE_CUDA -DCUEMU -fopenmp -c tests/test_moe.c -o build/test_cuda.o
	$(CXX) build/test_cuda.o build/emulated.o -fopenmp -o $@ $(LIBS)

# The tile sizes of prefill, timed on a device; on the emulator they are only compared.
build/moe_library.o: moe.c convert/calibrate.h moe_cuda.cu gguf_nvfp4.h Makefile | build
	$(CC) $(FLAGS) -DMOE_NO_MAIN -DMOE_CUDA -fopenmp -c moe.c -o $@

build/tiles_emulated: build/moe_library.o tests/bench_tiles.cu tests/cuda_emu.h moe_cuda.cu gguf_nvfp4.h Makefile
	$(CXX) $(EMULATED) -c tests/bench_tiles.cu -o $@.o
	$(CXX) build/moe_library.o $@.o -fopenmp -o $@ $(LIBS)

build/bench_tiles: build/moe_library.o tests/bench_tiles.cu moe_cuda.cu gguf_nvfp4.h Makefile
	$(NVCC) $(CUDA_FLAGS) -c tests/bench_tiles.cu -o $@.o
	$(CC) build/moe_library.o $@.o -fopenmp -o $@ $(LIBS) $(CUDA_LIBS)

# Leaves out every barrier of moe_cuda.cu once: some test has to fail.
mutate: build/moe-convert build/test_cuda
	build/test_cuda --mutate

# The tests of the CUDA backend on a device; those of single kernels also under compute-sanitizer.
GPU_KERNELS := cuda/upload cuda/gemv cuda/router cuda/sort cuda/gemm cuda/attention
build/test_gpu: $(TESTS) $(CUDA_TESTS) moe_cuda.cu moe.c gguf_nvfp4.h Makefile | build
	$(CC) $(FLAGS) -DMOE_CUDA -fopenmp -c tests/test_moe.c -o build/test_gpu_moe.o
	$(NVCC) $(CUDA_FLAGS) -c tests/test_cuda.cu -o build/test_gpu_cuda.o
	$(CC) build/test_gpu_moe.o build/test_gpu_cuda.o -fopenmp -o $@ $(LIBS) $(CUDA_LIBS)

SANITIZER = $(firstword $(shell command -v compute-sanitizer) $(wildcard $(dir $(NVCC))compute-sanitizer))
test-gpu:
	@[ -n "$(NVCC)" ] || { echo "make test-gpu wants nvcc"; exit 1; }
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make test-gpu wants a GPU: nvidia-smi lists none"; exit 1; }
	@$(MAKE) --no-print-directory DEPS=ok build/moe-convert build/test_gpu
	build/test_gpu cuda
	$(if $(SANITIZER),$(SANITIZER) --error-exitcode 1 --tool memcheck build/test_gpu $(GPU_KERNELS) cuda/forward,@echo "no compute-sanitizer: not checked with it")
	$(if $(SANITIZER),$(SANITIZER) --error-exitcode 1 --tool racecheck build/test_gpu $(GPU_KERNELS))

# Builds, checks and times everything on a GPU within ten minutes: results in build/measured.
measure:
	@tests/measure.sh

# The whole suite, with the programs that it starts, under AddressSanitizer and UndefinedBehaviorSanitizer.
asan: build/demo.gguf | build/asan
	ln -sfn ../../prompts build/asan/prompts
	$(CC) $(FLAGS) $(SAN) -fopenmp moe.c -o build/asan/moe $(LIBS)
	$(CC) $(FLAGS) $(SAN) -fopenmp convert/moe-convert.c -o build/asan/moe-convert $(LIBS)
	$(CC) $(FLAGS) $(SAN) convert/moe-reap.c -o build/asan/moe-reap $(LIBS)
	$(CC) $(FLAGS) $(SAN) -fopenmp -DMOE_BIN='"build/asan/moe"' -DCONVERT_BIN='"build/asan/moe-convert"' -DREAP_BIN='"build/asan/moe-reap"' -DSANITIZED=1 \
	    tests/test_moe.c -o build/asan/test_moe $(LIBS)
	build/asan/test_moe -j2

# A libFuzzer program for each parser: build/fuzz-gguf tests/corpus/gguf, and so on.
FUZZERS := gguf tokenize template session
fuzz: | build
	@command -v $(CLANG) >/dev/null || { echo "make fuzz wants clang"; exit 1; }
	for t in $(FUZZERS); do $(CLANG) -std=gnu11 -O1 -g -fopenmp -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFUZZ_TARGET=fuzz_$$t \
	    -Wno-unused-function tests/fuzz.c -o build/fuzz-$$t $(LIBS) || exit 1; done

# A cross build for arm64 under qemu-user: the unit tests and three prompts of the reference. The libraries are unpacked below build/, not installed.
ARM64 := build/arm64
test-arm64: all | build
	mkdir -p $(ARM64)/root
	if [ "$$(id -u)" = 0 ]; then S=; else S=sudo; fi; \
	    $$S dpkg --add-architecture arm64 && $$S apt-get update -qq && \
	    $$S env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static >/dev/null
	cd $(ARM64) && apt-get download -qq libjansson-dev:arm64 libjansson4:arm64 libpcre2-dev:arm64 libpcre2-8-0:arm64 libutf8proc-dev:arm64 libutf8proc2:arm64 \
	    && for d in *.deb; do dpkg -x $$d root; done && mkdir -p inc/stb && cp /usr/include/stb/stb_ds.h inc/stb/
	aarch64-linux-gnu-gcc -std=gnu11 $(CFLAGS) $(WARN) -isystem $(ARM64)/inc -isystem $(ARM64)/root/usr/include -fopenmp moe.c -o $(ARM64)/moe \
	    -L$(ARM64)/root/usr/lib/aarch64-linux-gnu -L$(ARM64)/root/lib/aarch64-linux-gnu -ljansson -lpcre2-8 -lutf8proc -lm
	aarch64-linux-gnu-gcc -std=gnu11 $(CFLAGS) $(WARN) -isystem $(ARM64)/inc -isystem $(ARM64)/root/usr/include -fopenmp tests/test_moe.c \
	    -o $(ARM64)/test_moe -L$(ARM64)/root/usr/lib/aarch64-linux-gnu -L$(ARM64)/root/lib/aarch64-linux-gnu -ljansson -lpcre2-8 -lutf8proc -lm
	for t in 'What is 7 squared? One word.=49' 'What is the capital of France?=The capital of France is Paris.' 'Sort these words: pear, apple, kite, bear.=bread, kite, kite, falcon,'; do \
	    got=$$($(QEMU) $(ARM64)/moe -m build/demo.gguf --greedy --think off -t 2 -p "$${t%%=*}" </dev/null); \
	    echo "$${t%%=*} $$got"; [ "$$got" = "$${t#*=}" ] || exit 1; done
	$(QEMU) $(ARM64)/test_moe nvfp4 vocab template kernels model/fixtures model/router model/rope model/sampler model/kv model/ops model/state

QEMU := qemu-aarch64-static -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=$(ARM64)/root/usr/lib/aarch64-linux-gnu:$(ARM64)/root/lib/aarch64-linux-gnu

install: moe build/moe-convert build/moe-reap
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/moe/prompts
	install -m 755 moe build/moe-convert build/moe-reap $(DESTDIR)$(PREFIX)/bin
	install -m 644 prompts/*.txt $(DESTDIR)$(PREFIX)/share/moe/prompts

endif

clean:
	rm -rf build moe

format:
	clang-format -i moe.c moe_cuda.cu gguf_nvfp4.h convert/*.[ch] tests/*.c tests/*.h tests/*.cu

help:
	@echo 'make           ./moe, build/moe-convert, build/moe-reap and build/demo.gguf; installs missing system packages first'
	@echo 'make chat      opens a chat with the demo model'
	@echo 'make test      runs the tests'
	@echo 'make mutate    leaves out every barrier of the CUDA backend once: the tests must notice'
	@echo 'make test-gpu  the tests of the CUDA backend on a GPU, and under compute-sanitizer'
	@echo 'make measure   builds, checks and times everything on a GPU; results in build/measured'
	@echo 'make bench     speed of the demo model'
	@echo 'make asan      the tests under the address and undefined-behaviour sanitizers'
	@echo 'make test-arm64 a cross build and its tests under qemu-user'
	@echo 'make fuzz      libFuzzer programs of the parsers (clang)'
	@echo 'make install PREFIX=/usr/local'
	@echo 'make WERROR=1  warnings are errors; make CC=clang'
	@echo 'make format    clang-format; make clean'
