// What each instruction set offers, and what the library exports.
#pragma once
#include "call.h"

enum class Kernel : int64_t { forward, stats, dq, dkdv };

// Return 0, or 1 if memory ran out, or 2 if the set does not serve this element type.
int run_avx2(Kernel kernel, int64_t type, const Call &call);
int run_avx512(Kernel kernel, int64_t type, const Call &call);
int run_avx512_bf16(Kernel kernel, int64_t type, const Call &call);
int run_amx(Kernel kernel, int64_t type, const Call &call);
int run_neon(Kernel kernel, int64_t type, const Call &call);
int run_neon_bf16(Kernel kernel, int64_t type, const Call &call);
