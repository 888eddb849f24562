/* A detector of data races: two accesses to the same memory, one of them a write, that no barrier, release and acquire, or
 * wait for an earlier launch orders. It compares what is known of two accesses, not their results, so that a race is
 * found in whichever order they were executed.
 *
 * Each warp counts its synchronizations, its clock; `seen` are the clocks of the block's other warps up to which it has
 * synchronized with them. An access is ordered before another one of
 *   the same warp         if a bar.warp.sync or a barrier of the block lies between them, or the lane is the same
 *   another warp          if its clock is at most what the other warp has seen
 *   another block         if an acquire has seen the clock in what a release published
 *   an earlier launch     if that has ended: griddepcontrol.wait, or no overlap
 * (after Flanagan and Freund, FastTrack). Two bytes are the unit: of shared memory with all reading warps, of global
 * memory with the latest reader, and whether blocks differ. Launches of other streams are not compared: they are ordered
 * by flags in memory, events or the host. Fences alone order nothing here. */
#ifndef PTXSIM_RACES_H
#define PTXSIM_RACES_H
#include "machine.h"

namespace ptxsim {

/* Begin and follow a block while machine.races. */
void races_begin(Block &b);
void races_barrier(Block &b, const std::vector<Warp *> &arrived);
void races_warp_sync(Warp &w);
/* An access of a lane to n bytes; `offset` in the block's shared memory. `same`: it stores what is there already, which is
 * no race: blocks of attention make the same rows of the cache. A race is a note. */
void races_shared(Warp &w, const Insn &in, int lane, u32 offset, size_t n, Access how);
void races_global(Warp &w, const Insn &in, int lane, uintptr_t p, size_t n, Access how, bool same);
/* Before a store or atomic that releases, and after a load or atomic that acquires. */
void races_release(Warp &w, uintptr_t p);
void races_acquire(Warp &w, uintptr_t p);

} // namespace ptxsim
#endif
