// AVX-512: products in float32.
#include "in_float32.h"

int run_avx512(Kernel kernel, int64_t type, const Call &call) { return run_in_float32(kernel, type, call); }
