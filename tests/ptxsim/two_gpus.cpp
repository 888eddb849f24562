/* The machine of `make sim-chat`: two GPUs of 32 GiB that reach each other. */
#include "ptxsim.h"

[[maybe_unused]] static const bool two_gpus = (sim_devices(2, true), sim_memory(-1, (size_t)32 << 30), true);
