// Estimates in AVX-512.
#include "estimates.h"

int estimate_avx512(Estimator estimator, int64_t type, const Estimate &call) { return estimate(estimator, type, call); }
