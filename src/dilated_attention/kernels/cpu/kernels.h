// What each instruction set offers, and what the library exports.
#pragma once
#include "call.h"

enum class Kernel : int64_t { forward, stats, dq, dkdv };

// 0, 1 for want of memory, 2 for an element type that the set does not serve.
int run_avx2(Kernel kernel, int64_t type, const Call &call);
int run_avx512(Kernel kernel, int64_t type, const Call &call);
int run_avx512_bf16(Kernel kernel, int64_t type, const Call &call);
int run_amx(Kernel kernel, int64_t type, const Call &call);
int run_neon(Kernel kernel, int64_t type, const Call &call);
int run_neon_bf16(Kernel kernel, int64_t type, const Call &call);
