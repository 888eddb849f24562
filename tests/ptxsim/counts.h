/* What kernels ask of memory, counted as a profiler counts it: see struct sim_counts in ptxsim.h. */
#ifndef PTXSIM_COUNTS_H
#define PTXSIM_COUNTS_H
#include "machine.h"

namespace ptxsim {

/* Begin and end a launch while machine.counts. */
void counts_begin(Launch &L);
void counts_end(Launch &L);
/* Counts instruction pc for the lanes m of a warp, which executes it next; none: it is skipped, and issued all the same. */
void counts_access(Warp &w, const Insn &in, LaunchCounts &c, SiteCounts &site, u32 m);
inline void counts_insn(Warp &w, const Insn &in, s32 pc, u32 m) {
    LaunchCounts &c = *w.b->launch->counts;
    SiteCounts &site = c.sites[(size_t)pc];
    site.issued++;
    if (in.access != NO_ACCESS && m) counts_access(w, in, c, site, m);
}

} // namespace ptxsim
#endif
