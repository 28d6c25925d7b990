// NEON: products in float32.
#include "in_float32.h"

int run_neon(Kernel kernel, int64_t type, const Call &call) { return run_in_float32(kernel, type, call); }
