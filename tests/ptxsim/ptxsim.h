/* The PTX simulator: a CUDA runtime for tests, whose GPUs are this machine's processor.
 *
 * A program that nvcc compiled to PTX (code=compute_XX, uncompressed), linked with the simulator instead of libcudart,
 * runs its kernels in an interpreter. What is executed is the compiler's output, inline assembler included; each
 * instruction follows the PTX ISA, not a wrapper of the program under test.
 *
 *   warp         32 lanes in lock-step over decoded instructions. Lanes that diverge become splits; the one with the
 *                lowest address runs, and splits that meet merge. Instructions with .sync wait for all lanes that they
 *                name.
 *   block        warps run one after another, each up to a barrier, in an order that the seed shuffles
 *   grid         blocks in an order that the seed shuffles; one that polls memory by ld.acquire lets others run
 *   stream       a thread that works off a queue: the host sees what it has not waited for as late as on a GPU
 *   image        of several targets in the program, a device takes the newest that its capability allows
 *
 * Checks: every address lies in an allocation that the device may use and is aligned for the access; shared memory is
 * bounded, and poisoned at the start of a block; cp.async writes garbage at once and the data at the wait, the latest
 * moment that the ISA allows; relaxed stores land when their block releases or ends, and while it polls, the last ones
 * first; .aligned instructions need the whole warp; limits of launches; what a kernel that may overlap with those before
 * it reads and writes before griddepcontrol.wait.
 *
 * memory.cpp, decode.cpp with instructions.h, execute.cpp, runtime.cpp and nccl.cpp are the parts; races.cpp and
 * counts.cpp watch what runs; machine.h is what they share. This file is what tests change of the machine. Its functions
 * are called while no kernel runs. */
#ifndef PTXSIM_H
#define PTXSIM_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The order of warps and blocks from now on; 0: first to last. */
void sim_seed(uint64_t seed);

/* How many GPUs there are (1 to 8), and whether they can reach each other's memory. Turns peer access off. */
void sim_devices(int n, bool peers);
/* Of one GPU, or of all (device -1): bytes of memory, bytes of L2, compute capability, memory shared with the host. */
void sim_memory(int device, size_t bytes);
void sim_l2(int device, int bytes);
void sim_capability(int device, int major, int minor);
void sim_integrated(int device, bool is);

/* Cuts sums of tensor cores off after so many products (8 or 16), as Ampere and Hopper do; 0: rounds them. */
void sim_truncate_sums(int products);

/* Looks for races from the next launch on, which takes several times as long: see races.h. Launches then always overlap
 * where they may, and some warps pause after a release, which other devices see meanwhile. */
void sim_races(bool on);

/* ---- counters ---- */

/* Traffic of warps with global memory. A request is one executed instruction of a warp, with at least one active lane. A
 * sector is 32 bytes, the unit of L1, L2 and DRAM. */
struct sim_traffic {
    uint64_t requests;
    uint64_t sectors;          /* of each request; sectors / requests is Nsight Compute's sectors per request */
    uint64_t bytes;            /* of each request that lanes ask for; a byte of several lanes counts once. bytes / (32
                                * sectors) is the share of the sectors that is needed */
    uint64_t distinct_sectors; /* of each launch: its DRAM traffic at least, and not more if L2 keeps them */
    uint64_t distinct_bytes;   /* of these that some lane asks for */
};

/* What the launches of a kernel did. Terms are Nsight Compute's:
 *   instructions  executed by warps, also those whose lanes are all off by a guard: PTX, not SASS. One takes one issue
 *                 slot.
 *   loads         of ld and cp.async, before L1: "L1 global load sectors". What L1 holds needs no sector of L2.
 *   stores        of st; atomics: of atom and red, whose distinct sectors are not counted
 *   wavefronts    of shared memory: a wavefront reads or writes one word of 4 bytes in each of 32 banks. Lanes of one word
 *                 share it, those of an atomic do not. An access of up to 4 bytes is made by all lanes at once, of 8 by
 *                 halves of the warp, of 16 by quarters; ldmatrix by matrices; cp.async writes by quarters.
 *   conflicts     wavefronts beyond one for each of these parts: "excessive" wavefronts
 *   prefetched    bytes that cp.async.bulk.prefetch.L2 asks for
 *   unread        of these that no load of its launch, or of one that ends later, reads; or that were asked for before,
 *                 and not read since
 * A card has more: caches, whose hits and evictions depend on time; the compiler's SASS, which merges and splits
 * instructions; conflicts between the wavefronts of several warps; pairs of lanes that share a wavefront of 8 or 16 bytes
 * by rules that NVIDIA does not document; local memory, which is not counted here. */
struct sim_counts {
    const char *kernel; /* its mangled name */
    uint64_t launches, warps, instructions;
    struct sim_traffic loads, stores, atomics;
    uint64_t wavefronts, conflicts;
    uint64_t prefetched, unread;
};
/* An instruction that accesses global or shared memory. */
struct sim_site_counts {
    const char *kernel, *text;  /* as in struct sim_site */
    struct sim_traffic traffic; /* without distinct sectors and bytes */
    uint64_t wavefronts, conflicts;
    uint64_t loop;           /* instructions of the innermost loop around it, or of the kernel if there is none, */
    uint64_t loop_conflicts; /* and conflicts of these */
};
/* Counts launches from now on, beginning with nothing, or ends that; what has been counted stays. */
void sim_count(bool on);
/* Write what was counted, of at most n kernels or instructions. Return how many there are. */
int sim_counted(struct sim_counts *out, int n);
int sim_counted_sites(struct sim_site_counts *out, int n);

/* Lets the n-th call of a function of the runtime or of NCCL fail, 1 for the next one; "LAUNCH" for a kernel's launch. 0:
 * none any more. */
void sim_fail(const char *function, int n);
/* Streams do not wait for events any more. */
void sim_lose_waits(void);

/* Begins or ends a list of prefetches into L2; sim_prefetched: bytes of [p, p + n) in it. sim_prefetches: how many. */
void sim_log_prefetches(bool on);
size_t sim_prefetched(const void *p, size_t n);
size_t sim_prefetches(void);

/* The launches of a graph: how many, and how many of them may overlap with the one before. */
int sim_graph_launches(const void *graph_exec, int *overlapping);

/* ---- mutations ---- */

/* An instruction that synchronizes or orders memory: a barrier, a fence, a wait for copies or for earlier launches. */
struct sim_site {
    const char *kernel; /* its mangled name */
    const char *text;   /* in the PTX, up to a semicolon: also stands for the instruction */
    bool ran;           /* since sim_forget_runs */
};
/* Writes those of the kernels that were launched, at most n. Returns how many there are. */
int sim_sites(struct sim_site *out, int n);
void sim_forget_runs(void);
/* From now on the instruction does nothing. */
void sim_remove_site(const char *text);

/* Calls f before each launch, with the kernel's name in the source and its first argument, which it may change. */
void sim_change_arguments(void (*f)(const char *kernel, void *argument));

/* Writes the PTX of the program, all images one after the other. False: the file cannot be written. */
bool sim_write_ptx(const char *path);

/* Violations that did not end a launch, since the program began or sim_take_violations, which forgets them. */
int sim_violations(void);
int sim_take_violations(void);
/* Whether violations are printed. */
void sim_quiet(bool on);
/* From now on a violation ends the process, with exit code 1. */
void sim_end_at_violation(void);
/* Appends to a file which instructions of which kernels ran in this process. False: it cannot be opened. */
bool sim_append_coverage(const char *path);
/* A kernel of which less may run than of the others: a pattern of its mangled name, see fnmatch. */
struct sim_uncovered {
    const char *kernel, *why;
};
/* Prints the kernels of device 0's image of which, by all that a file has, less than 97 % ran, with the reason where `known`
 * (n) has one. Returns how many have none, and how many reasons no kernel needs; -1: the file cannot be opened. */
int sim_print_coverage(const char *path, const struct sim_uncovered *known, int n);
/* Prints the instructions of kernels whose mangled names contain `kernel`, each after a 1 if it ran. */
bool sim_print_left_out(const char *path, const char *kernel);

#ifdef __cplusplus
}
#include <string>
/* Calls f with the PTX of each kernel that is decoded from now on: it returns what is executed. */
void sim_edit(std::string (*f)(const char *kernel, std::string body));
#endif
#endif
