#!/bin/bash
# Stands in for the programs that measure.sh runs: the test cli/measure links it under their names. Some of them fail.
case "${0##*/} $*" in
    nvidia-smi*-lms*) ;;
    nvidia-smi*=name\ *) echo "Stub 9000" ;;
    nvidia-smi*=compute_cap\ *) echo 12.0 ;;
    nvidia-smi*=memory.free\ *) echo 9000 ;;
    nvidia-smi*=pcie*) echo 'Field "pcie" is not a valid field to query.'; exit 2 ;;
    nvidia-smi*) echo "Stub 9000, 580.1, CUDA Version: 13.0" ;;
    nvcc*) echo "Cuda compilation tools, release 13.0, V13.0.1" ;;
    make*) echo "cc -o moe"; echo "a.c:1: warning: a stub" ;;
    bench_decode*) printf '### A shape\n\n| tokens | switches | us |\n|---|---|---|\n| 1 | all on | 5.0 |\n| 1 | x | OTHER BITS |\n'; exit 1 ;;
    bench_tiles*) printf '| GEMM | us |\n|---|---|\n| a | 1 |\n' ;;
    test_gpu*) echo "ok   cuda/gemv"; exit 124 ;;
    compute-sanitizer*) echo "1 passed"; kill -SEGV $$ ;;
    moe*--version*) echo "moe 0 (CPU: none; GPU: sm_120f sm_90)" ;;
    moe*:layers=47*--info*) echo "tensors       9 in memory, 39000.0 MiB" ;;
    moe*--info*) printf 'layers        48\ntensors       9 in memory, 40000.0 MiB\n' ;;
    moe*--bench*) printf 'all-reduce 5 us\nctx_tokens,batch\n0,1\nk_embed 1 of 2\nbatch 1: 6.0 kernels per layer\n' ;;
    moe*--perplexity*) case $* in *fp4*) p=5.10 ;; *--kv\ fp8*) p=5.00 ;; *) p=4.99 ;; esac; echo "perplexity $p +/- 0.1" ;;
    moe*--needle*) echo "needle 1 in 2 tokens" >&2 ;;
    moe*--logits*) echo "all-reduce, weights, ok here"; echo x >"${!#}" ;;
    moe*) echo "all-reduce, weights, ok here" ;;
esac
