// Estimates in NEON.
#include "estimates.h"

int estimate_neon(Estimator estimator, int64_t type, const Estimate &call) { return estimate(estimator, type, call); }
