// AVX512-BF16: bfloat16 products of bfloat16 elements, summed in float32.
#include "in_bfloat16.h"
#include "product_bf16.h"

int run_avx512_bf16(Kernel kernel, int64_t type, const Call &call) {
  return run_in_bfloat16<InBFloat16>(kernel, type, call, run_avx512);
}
