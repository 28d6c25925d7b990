// Estimates in AVX512-BF16: shares of joined tokens by products of bfloat16.
#include "estimates.h"
#include "product_bf16.h"

int estimate_avx512_bf16(Estimator estimator, int64_t type, const Estimate &call) {
  return estimate<InBFloat16>(estimator, type, call);
}
