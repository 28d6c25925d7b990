// Estimates in AVX512-VNNI: shares of joined tokens by products of bytes.
#include "estimates.h"
#include "product_vnni.h"

int estimate_avx512_vnni(Estimator estimator, int64_t type, const Estimate &call) {
  return estimate<InBytes>(estimator, type, call);
}
