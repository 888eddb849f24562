## make           builds ./moe, build/moe-convert, build/moe-reap and build/demo.gguf
## make chat      builds everything and opens a chat with the demo model
## make test      builds everything and runs the tests
## make deps      installs the packages that are missing (Debian, Ubuntu; as root)
#
# Everything needs the packages first: as root make installs them by itself, as another user it prints the command to type.
# DEPS=ok leaves that check out.

PREFIX   ?= /usr/local
CLANG    ?= clang
CFLAGS   ?= -O2 -g
CORES    := $(shell nproc 2>/dev/null || echo 2)
ifeq ($(origin CC),default)
CC       := gcc
endif
# One goal is built on all cores; several goals run one after the other.
ifeq ($(word 2,$(MAKECMDGOALS)),)
MAKEFLAGS += -j$(CORES)
endif

WARN    := -Wall -Wextra -Wshadow -Wvla -Werror=switch $(if $(WERROR),-Werror)
HEADERS := gguf_nvfp4.h $(wildcard convert/*.h convert/*.jinja) Makefile
ENGINE  := moe.c moe_cuda.cu $(HEADERS)
TESTS   := tests/test_moe.c $(wildcard tests/*.h) $(ENGINE)
# Expanded in each recipe, when the packages are there.
LIBS     = $(shell pkg-config --libs jansson libpcre2-8 libutf8proc) -lm
FLAGS    = -std=gnu11 $(CFLAGS) $(WARN) $(shell pkg-config --cflags jansson libpcre2-8 libutf8proc) -fopenmp
, := ,

# CUDA where nvcc is: native code for Blackwell workstation cards (from nvcc 12.9 on) and Hopper, and PTX that drivers compile for
# other chips: compute_90 for newer ones, with launches that overlap, compute_80 for older ones, without.
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
ifneq ($(NVCC),)
NVCC_VERSION := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
CUDA_SM120   := $(shell [ "$(NVCC_VERSION)" -ge 129 ] 2>/dev/null && echo yes)
CUDA_LIB     := $(abspath $(dir $(NVCC))../lib64)
CUDA_TARGETS := $(if $(CUDA_SM120),sm_120f )sm_90 compute_90 compute_80
PTX_TARGETS  := $(if $(CUDA_SM120),compute_120f )compute_90 compute_80
# NCCL beside CUDA or in the system; without it our own kernel alone adds over GPUs.
NCCL_LIBS     = $(shell $(CC) -I$(CUDA_LIB)/../include -include nccl.h -E -x c /dev/null >/dev/null 2>&1 && echo 'int main(void) { return 0; }' | \
    $(CC) -x c - -o /dev/null -L$(CUDA_LIB) -lnccl 2>/dev/null && echo -lnccl $(if $(wildcard $(CUDA_LIB)/libnccl.so*),-Wl$(,)-rpath$(,)$(CUDA_LIB)))
CUDA_FLAGS    = $(CUDA_COMMON) $(CUDA_CODE)
CUDA_CODE     = $(if $(CUDA_SM120),-gencode arch=compute_120f$(,)code=sm_120f) \
    -gencode 'arch=compute_90$(,)code=[sm_90$(,)compute_90]' -gencode arch=compute_80$(,)code=compute_80
CUDA_COMMON   = -std=c++17 -O3 --threads 0 -DMOE_CUDA_TARGETS='"$(CUDA_TARGETS)"' $(if $(NCCL_LIBS),-DHAVE_NCCL) \
    -Xcompiler -fopenmp$(,)-Wall$(,)-Wextra$(,)-Wno-unused-function$(,)-Werror=switch $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
CUDA_LIBS     = -L$(CUDA_LIB) -lcudart_static -lstdc++ -ldl -lrt -lpthread $(NCCL_LIBS)
endif

# MPI where mpicc is and compiles, for ranks on several machines.
MPICC   ?= mpicc
MPI      = $(shell echo 'int main(void) { return 0; }' | $(MPICC) -include mpi.h -x c - -o /dev/null >/dev/null 2>&1 && echo yes)
LINKS_MPI = $(if $(MPI),OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC) -DMOE_MPI,$(CC))

.DEFAULT_GOAL := all
.PHONY: all chat sim-chat test test-programs test-cuda test-chips coverage sass mutate test-gpu measure bench bench-vs asan tsan oom fuzz test-arm64 install uninstall deb clean help format deps

all: moe build/moe-convert build/moe-reap build/demo.gguf

# Names each package that is missing: what it is for does not work, and dpkg does not know it either.
wants   = $(1) >/dev/null 2>&1 || dpkg -s $(2) >/dev/null 2>&1 || echo $(2);
MISSING = $(shell $(call wants,command -v $(CC),gcc) $(call wants,command -v $(CXX),g++) \
    $(call wants,$(CC) -include stdio.h -E -x c /dev/null,libc6-dev) $(call wants,command -v pkg-config,pkg-config) \
    $(call wants,pkg-config --exists jansson,libjansson-dev) $(call wants,pkg-config --exists libpcre2-8,libpcre2-dev) \
    $(call wants,pkg-config --exists libutf8proc,libutf8proc-dev) \
    $(call wants,$(CC) -fopenmp -include stb/stb_ds.h -E -x c /dev/null,libstb-dev))
APT     = $(shell command -v apt-get)
NOT_APT = packages are missing: install what your system calls $(1)
NO_ROOT = packages are missing: $(1); type: $(if $(shell command -v sudo),sudo make deps,su -c "apt-get install -y $(1)")
PROBLEM = $(if $(APT),$(if $(filter-out 0,$(shell id -u)),$(NO_ROOT)),$(NOT_APT))
deps:
	$(if $(MISSING),$(call INSTALL_PACKAGES,$(MISSING)))
INSTALL_PACKAGES = $(if $(PROBLEM),$(error $(PROBLEM)),@echo "installing: $(1)" && apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(1) >/dev/null)

build: | $(if $(filter ok,$(DEPS)),,deps)
	@mkdir -p $@

moe: $(ENGINE) $(if $(NVCC),build/moe_cuda.o) | build
	$(if $(NVCC),,@echo "no nvcc: building without CUDA")
	$(if $(MPI),,@echo "no mpicc: building without MPI, for one machine")
	$(LINKS_MPI) $(FLAGS) moe.c $(if $(NVCC),-DMOE_CUDA build/moe_cuda.o) -o $@ $(LIBS) $(CUDA_LIBS)

build/moe_cuda.o: $(ENGINE) | build
	@[ -n "$(NVCC)" ] || { echo "$@ wants nvcc"; exit 1; }
	$(if $(CUDA_SM120),,@echo "nvcc before 12.9: without native code for RTX PRO 6000, RTX 5090 and DGX Spark")
	$(if $(NCCL_LIBS),,@echo "no NCCL: our own kernel alone adds over GPUs")
	@mkdir -p build/nvcc
	@echo "$(NVCC) -c moe_cuda.cu -o $@ ($(CUDA_TARGETS)): takes some minutes"
	@$(NVCC) $(CUDA_FLAGS) -Xptxas -v --keep --keep-dir build/nvcc -c moe_cuda.cu -o $@ 2>build/nvcc/log || { cat build/nvcc/log; rm -f $@; exit 1; }

build/moe-convert build/moe-reap: build/%: convert/%.c $(ENGINE) | build
	$(CC) $(FLAGS) $< -o $@ $(LIBS)

build/demo.gguf: build/moe-convert $(wildcard convert/demo/*)
	build/moe-convert convert/demo -o $@ --name moe-demo

# Greedy, because random sampling makes so small a model err.
chat: all
	@./moe -m build/demo.gguf --greedy

## make bench     times the demo model
bench: all
	./moe -m build/demo.gguf --bench -c 8192
## make bench-vs  times llama.cpp beside it on one file: LLAMA_BENCH=path/to/llama-bench MODEL=file
bench-vs: all
	tests/bench_vs.sh "$(LLAMA_BENCH)" "$(MODEL)"

# Threads sleep while they wait: on a busy machine, spinning ones take the time of others.
test test-programs test-cuda test-chips coverage mutate asan tsan: export OMP_WAIT_POLICY = passive

# The models of tests/fixtures, which the tests map.
FIXTURES := $(patsubst tests/fixtures/%/config.json,build/fixtures/%.gguf,$(wildcard tests/fixtures/*/config.json))
build/test_moe build/test_cuda build/test_gpu: | $(FIXTURES)

.SECONDEXPANSION:
$(FIXTURES): build/fixtures/%.gguf: build/moe-convert $$(wildcard tests/fixtures/$$*/*)
	@mkdir -p $(@D)
	@build/moe-convert tests/fixtures/$* -o $@ 2>$@.log || { cat $@.log; exit 1; }
	@rm $@.log

test: test-programs test-cuda

test-programs: all build/test_moe
	build/test_moe -j$(CORES)

test-cuda: $(if $(NVCC),build/test_cuda build/selftest build/demo.gguf)
ifeq ($(NVCC),)
	@echo "no nvcc: the CUDA backend is not tested"
else
	build/test_cuda --ptx build/test_cuda.ptx && build/selftest --instructions build/test_cuda.ptx
	build/selftest
	build/test_cuda -j$(CORES)
endif

## make test-chips runs the CUDA backend's PTX as other chips do, with sums that tensor cores cut off, and looks for races
SIM_KERNELS := cuda/upload cuda/gemv cuda/router cuda/sort cuda/links cuda/gemm cuda/attention cuda/windows cuda/delta_net \
    cuda/norms cuda/rotations cuda/indexer cuda/rows
test-chips: $(if $(NVCC),build/test_cuda)
ifneq ($(NVCC),)
	build/test_cuda --capability 90 --truncate 16 -j$(CORES) $(SIM_KERNELS) cuda/fixtures
	build/test_cuda --capability 80 -j$(CORES) cuda/fixtures
	build/test_cuda --races 1 --seed 1 --truncate 16 -j$(CORES) $(SIM_KERNELS) cuda/sample cuda/forward cuda/stats cuda/all_reduce cuda/slots
endif

## make coverage  names the CUDA kernels of whose PTX the tests run less than 97 %, but for those whose reason is known
coverage: build/test_cuda
	rm -f build/coverage
	build/test_cuda --coverage build/coverage -j$(CORES)
	build/test_cuda --covered build/coverage

# Tests measure less memory, and their threads spin shorter: several tests share the processors.
SPARING := -DBANDWIDTH_PIECES=64 -DTEAM_SPIN=5e-6
build/test_moe: $(TESTS) | build
	$(CC) $(FLAGS) -g1 $(SPARING) tests/test_moe.c -o $@ $(LIBS)

# The tests of the CUDA backend: as nvcc compiles it to PTX, with a simulator in place of the CUDA runtime and its GPUs.
SIMULATED  := -DSIMULATED -DALLREDUCE_SLOT_FLOATS=3072 -DDELTA_SEGMENT_TOKENS=128 -DMLA_SEGMENT_KEYS=64 -DEXPERT_RING_BYTES=65536 -DHOST_PROBE_BYTES=65536 -DALLREDUCE_TIMED=2 $(SPARING)
SIM_PARTS  := memory decode races counts execute runtime nccl
SIM_FLAGS   = -std=c++17 -O3 -g1 $(filter-out -Wvla,$(WARN)) -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-strict-aliasing $(SIM_ARCH) -I$(CUDA_LIB)/../include
# Vectors of the host's, where the compiler has them: 32 lanes are a loop.
SIM_ARCH    = -march=native

build/test_cuda: build/test_cuda.o build/simulated.o build/arrive.o build/ptxsim_images.o $(SIM_PARTS:%=build/ptxsim_%.o)
	$(CXX) $^ -fopenmp -lpthread -o $@ $(LIBS)

build/test_cuda.o: $(TESTS) | build
	$(CC) $(FLAGS) -O1 -ftree-vectorize -g1 -DMOE_CUDA $(SIMULATED) -Wno-unused-function -Wno-format-truncation -c tests/test_moe.c -o $@

# The engine's kernels are those of build/moe_cuda.o: PTX of this object runs for kernels of the tests alone. The newest
# target is enough: on other chips they run none but k_arrive.
PTX_FLAGS   = $(CUDA_COMMON) --compress-mode=none $(firstword $(PTX_CODE))
PTX_CODE    = $(foreach t,$(PTX_TARGETS),-gencode=arch=$t$(,)code=$t)
build/simulated.o: $(TESTS) tests/test_cuda.cu tests/bench_tiles.cu tests/bench_decode.cu tests/ptxsim/ptxsim.h | build
	@[ -n "$(NVCC)" ] || { echo "$@ wants nvcc"; exit 1; }
	@echo "$(NVCC) -c tests/test_cuda.cu -o $@: takes a minute"
	@$(NVCC) $(PTX_FLAGS) $(SIMULATED) -c tests/test_cuda.cu -o $@

build/arrive.o: tests/arrive.cu | build
	$(NVCC) $(CUDA_COMMON) --compress-mode=none $(PTX_CODE) -c $< -o $@

build/ptxsim_images.o: tests/ptxsim/images.cpp build/moe_cuda.o
	$(CXX) '-DIMAGES=$(foreach t,$(PTX_TARGETS),IMAGE("$t"))' -c $< -o $@

build/ptxsim_%.o: tests/ptxsim/%.cpp $(wildcard tests/ptxsim/*.h) | build
	$(CXX) $(SIM_FLAGS) -c $< -o $@

# The simulator's own tests.
build/selftest: build/selftest_cuda.o $(SIM_PARTS:%=build/ptxsim_%.o)
	$(CXX) $^ -lpthread -o $@

build/selftest_cuda.o: tests/ptxsim/selftest.cu tests/ptxsim/selftest_arithmetic.h gguf_nvfp4.h | build
	$(NVCC) $(PTX_FLAGS) -c $< -o $@

## make sim-chat  opens a chat on two simulated GPUs: ARGS='--tp 1 --bench' and so on go to the program
sim-chat: build/moe-sim build/demo.gguf
	@build/moe-sim -m build/demo.gguf --greedy --tp 2 $(ARGS)

build/moe-sim: moe.c build/moe_cuda.o $(SIM_PARTS:%=build/ptxsim_%.o) build/ptxsim_images.o build/ptxsim_two_gpus.o $(HEADERS)
	$(LINKS_MPI) $(FLAGS) moe.c -DMOE_CUDA $(filter %.o,$^) -o $@ $(LIBS) -lstdc++ -lpthread

## make sass      prints what the hot loops of the CUDA kernels cost, from their machine code, and their memory traffic
sass: moe build/test_cuda
	@build/test_cuda --sass

## make mutate    removes each barrier, fence and wait of the CUDA backend's PTX once: some test must fail
mutate: build/moe-convert build/test_cuda
	build/test_cuda --mutate

build/test_gpu: build/test_gpu.o build/test_gpu_cuda.o build/test_gpu_arrive.o
	$(CC) $^ -fopenmp -o $@ $(LIBS) $(CUDA_LIBS)

build/test_gpu.o: $(TESTS) | build
	$(CC) $(FLAGS) -DMOE_CUDA -Wno-unused-function -Wno-format-truncation -c tests/test_moe.c -o $@

build/test_gpu_cuda.o: $(TESTS) tests/test_cuda.cu | build
	$(NVCC) $(CUDA_FLAGS) -c tests/test_cuda.cu -o $@

build/test_gpu_arrive.o: tests/arrive.cu | build
	$(NVCC) $(CUDA_FLAGS) -c $< -o $@

## make test-gpu  runs the tests of the CUDA backend on a GPU, and those of its kernels under compute-sanitizer
KERNELS   := cuda/upload cuda/gemv cuda/router cuda/sort cuda/gemm cuda/attention cuda/delta_net cuda/norms cuda/rotations \
    cuda/indexer cuda/rows
SANITIZER  = $(firstword $(shell command -v compute-sanitizer) $(wildcard $(dir $(NVCC))compute-sanitizer))
test-gpu: build/demo.gguf $(if $(NVCC),build/test_gpu)
	@[ -n "$(NVCC)" ] || { echo "make test-gpu wants nvcc"; exit 1; }
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make test-gpu wants a GPU: nvidia-smi lists none"; exit 1; }
	build/test_gpu
	$(if $(SANITIZER),$(SANITIZER) --error-exitcode 1 --tool memcheck build/test_gpu $(KERNELS) cuda/forward,@echo "no compute-sanitizer: not checked with it")
	$(if $(SANITIZER),$(SANITIZER) --error-exitcode 1 --tool racecheck build/test_gpu $(KERNELS))

build/bench_tiles: $(ENGINE) tests/bench_tiles.cu | build
	$(CC) $(FLAGS) -DMOE_NO_MAIN -DMOE_CUDA -c moe.c -o build/moe_library.o
	$(NVCC) $(CUDA_FLAGS) -c tests/bench_tiles.cu -o $@.o
	$(CC) build/moe_library.o $@.o -fopenmp -o $@ $(LIBS) $(CUDA_LIBS)

build/bench_store: $(ENGINE) tests/bench_store.c | build
	$(CC) $(FLAGS) -Wno-unused-function tests/bench_store.c -o $@ $(LIBS)

build/bench_decode: $(ENGINE) tests/bench_decode.cu tests/bench_decode.c | build
	$(CC) $(FLAGS) -DMOE_CUDA -Wno-unused-function -c tests/bench_decode.c -o build/bench_decode_shapes.o
	$(NVCC) $(CUDA_FLAGS) -c tests/bench_decode.cu -o $@.o
	$(CC) build/bench_decode_shapes.o $@.o -fopenmp -o $@ $(LIBS) $(CUDA_LIBS)

## make measure   builds, checks and times everything on a GPU in ten minutes; report in build/measured/report.md
measure:
	@tests/measure.sh

## make asan      runs the tests, and the programs that they start, under the address and undefined-behavior sanitizers
# Without what computes long texts: every parser, mixer, set of kernels and program is in a test that stays.
asan: ONLY := -model/fixtures-deepseek -model/prediction -model/demo -model/threads -model/decode -model/batches -think/official -think/ended \
    -draft/text -draft/demo -draft/state -draft/ngrams -draft/distribution -draft/ends -parallel/fixtures -parallel/drafts \
    -state/alone -state/chunks -state/chosen -state/compressed -state/dialogue -state/ring -state/resize -ranks/fixtures -ranks/fast -ranks/demo -cli/needle -cli/bench -cli/determinism -doctor/cli \
    -state/truncation -qat/fixtures -plan/streams -quantize/perplexity -calibrate/files -calibrate/resumes -calibrate/activations \
    -reap/calibrated -reap/model -state/file -calibrate/compare -plan/sparse -plan/published -plan/readme
## make tsan      runs the tests of all that has threads under ThreadSanitizer (clang, and libomp for its tool archer)
tsan: ONLY := team/ store/ ranks/ repl/ state model/fixtures cli/ calibrate/sums calibrate/files doctor/
tsan: export TSAN_OPTIONS = ignore_noninstrumented_modules=1
SANITIZED = $(addprefix build/$(1)/,moe-convert moe-reap test_moe)
$(call SANITIZED,asan): private SAN := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
$(call SANITIZED,tsan): private SAN := -fsanitize=thread
$(call SANITIZED,tsan): private CC := $(CLANG)
$(call SANITIZED,asan) $(call SANITIZED,tsan): $(TESTS) $(wildcard convert/*.c) | build
	@command -v $(CC) >/dev/null || { echo "$@ wants $(CC)"; exit 1; }
	@mkdir -p $(@D) && ln -sfn ../../prompts $(@D)/prompts
	$(CC) $(FLAGS) -O1 -g1 $(SAN) -DSANITIZED=1 -DMOE_BIN='"$(@D)/moe"' -DCONVERT_BIN='"$(@D)/moe-convert"' -DREAP_BIN='"$(@D)/moe-reap"' \
	    $(wildcard convert/$(@F).c tests/$(@F).c) -o $@ $(LIBS)
# The tests are the program, too, by its name.
asan tsan: %: build/demo.gguf $(FIXTURES) $$(call SANITIZED,%)
	ln -f build/$@/test_moe build/$@/moe
	build/$@/test_moe -j$(CORES) $(ONLY)

## make oom       fails every allocation of the programs, one after the other: each must end in a message or the same result
oom: export OMP_WAIT_POLICY = passive
oom: all
	for p in moe convert/moe-convert convert/moe-reap; do \
	    $(CC) $(FLAGS) -Wno-unused-function -DOOM_SOURCE="\"../$$p.c\"" tests/oom.c -o build/oom-$${p##*/} $(LIBS) || exit 1; done
	for p in moe moe-convert moe-reap; do build/oom-$$p || exit 1; done

## make fuzz      builds a libFuzzer program for each parser (clang): build/fuzz-gguf tests/corpus/gguf, and so on
# One program has the names of all. It holds the converters too; each has a copy of the foundations of moe.c (muldefs).
FUZZERS    := gguf tokenizer template session safetensors hf scores options
FUZZ_FLAGS := -std=gnu11 -O1 -g -fopenmp -Wno-unused-function -Wno-pass-failed -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
FUZZ_UNITS := tests/fuzz convert/moe-convert convert/moe-reap
fuzz: $(FUZZ_UNITS:%=build/%.fuzz.o)
	$(CLANG) -fopenmp -fsanitize=fuzzer,address,undefined -Wl,-z,muldefs $^ -o build/fuzz $(LIBS)
	for t in $(FUZZERS); do ln -f build/fuzz build/fuzz-$$t || exit 1; done

build/%.fuzz.o: %.c tests/fuzz.c $(ENGINE) | build
	@command -v $(CLANG) >/dev/null || { echo "make fuzz wants clang"; exit 1; }
	@mkdir -p $(@D)
	$(CLANG) $(FUZZ_FLAGS) $(if $(filter convert/%,$<),-Dmain=$(patsubst moe-%,%,$(*F))_main) -c $< -o $@

## make test-arm64 builds for 64-bit ARM and runs some tests under qemu-user
test-arm64: build/demo.gguf $(FIXTURES)
	CFLAGS="$(CFLAGS) $(WARN)" tests/arm64.sh

PROGRAMS := moe build/moe-convert build/moe-reap
NAMES    := $(notdir $(PROGRAMS))

build/docs: $(PROGRAMS)
	@rm -rf $@ $@.tmp && mkdir -p $@.tmp
	for p in $(PROGRAMS); do n=$@.tmp/$${p##*/} && ./$$p --man >$$n.1 && ./$$p --completion bash >$$n.bash && ./$$p --completion zsh >$$n.zsh || exit 1; done
	@mv $@.tmp $@

# Copies everything below the directory $(1). zsh looks for completions in $(2) there.
BASH_DIR := share/bash-completion/completions
define INSTALL
install -d $(addprefix $(1)/,bin share/man/man1 $(BASH_DIR) $(2) share/moe/prompts share/moe/models)
install -m 755 $(PROGRAMS) $(1)/bin
install -m 644 $(NAMES:%=build/docs/%.1) $(1)/share/man/man1
@for n in $(NAMES); do install -m 644 build/docs/$$n.bash $(1)/$(BASH_DIR)/$$n && install -m 644 build/docs/$$n.zsh $(1)/$(2)/_$$n || exit 1; done
install -m 644 prompts/*.txt $(1)/share/moe/prompts
install -m 644 build/demo.gguf $(1)/share/moe/models
endef

## make install   copies programs, manual pages, completions and the demo model to PREFIX=/usr/local
install: all build/docs
	$(call INSTALL,$(DESTDIR)$(PREFIX),share/zsh/site-functions)

## make uninstall removes what make install copied
uninstall: TREE = $(DESTDIR)$(PREFIX)
uninstall:
	rm -f $(addprefix $(TREE)/,$(NAMES:%=bin/%) $(NAMES:%=share/man/man1/%.1) $(NAMES:%=$(BASH_DIR)/%) $(NAMES:%=share/zsh/site-functions/_%) \
	    $(addprefix share/moe/,$(wildcard prompts/*.txt)) share/moe/models/demo.gguf)
	for d in moe/prompts moe/models moe; do [ ! -d $(TREE)/share/$$d ] || rmdir --ignore-fail-on-non-empty $(TREE)/share/$$d || exit 1; done

## make deb       makes the Debian package moe-chat in build/
ifneq ($(shell command -v dpkg-deb),)
# Takes another name than Debian's editor moe, which owns /usr/bin/moe too.
deb: all build/docs
	@rm -rf build/deb
	$(call INSTALL,build/deb/usr,share/zsh/vendor-completions)
	strip build/deb/usr/bin/*
	gzip -9n build/deb/usr/share/man/man1/*
	install -D -m 644 LICENSE build/deb/usr/share/doc/moe-chat/copyright
	@install -d build/deb/DEBIAN
	@libraries=$$(ldd $(PROGRAMS) | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u) && \
	    depends=$$(for l in $$libraries; do dpkg -S $$l /usr$$l 2>/dev/null; done | sed 's/:.*//' | sort -u | \
	        sed "s/^libc6$$/& (>= $$(getconf GNU_LIBC_VERSION | sed 's/.* //'))/" | paste -sd, | sed 's/,/, /g') && \
	    printf '%s\n' 'Package: moe-chat' "Version: $$(./moe --version | sed -n 's/^moe \([^ ]*\) .*/\1/p')" \
	        "Architecture: $$(dpkg --print-architecture)" 'Maintainer: local build <root@localhost>' 'Section: science' 'Priority: optional' \
	        'Conflicts: moe' "Depends: $$depends" "Installed-Size: $$(du -sk build/deb/usr | cut -f1)" \
	        "Description: $$(./moe --help | sed -n '1s/^moe - //p')" " The programs are moe, moe-convert and moe-reap." >build/deb/DEBIAN/control
	dpkg-deb -Zgzip -z1 --root-owner-group --build build/deb build
else
deb:
	@echo "no dpkg-deb: no Debian package is made"
endif

## make format    runs clang-format; make clean removes what was built
format:
	clang-format -i moe.c moe_cuda.cu gguf_nvfp4.h convert/*.[ch] tests/*.c tests/*.h tests/*.cu tests/ptxsim/*

clean:
	rm -rf build moe

## WERROR=1 makes warnings errors, CC=clang takes another compiler, NVCC=/path/to/nvcc another CUDA (NVCC= none)
help:
	@sed -n 's/^## //p' Makefile
