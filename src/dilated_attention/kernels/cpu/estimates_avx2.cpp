// Estimates in AVX2.
#include "estimates.h"

int estimate_avx2(Estimator estimator, int64_t type, const Estimate &call) { return estimate(estimator, type, call); }
