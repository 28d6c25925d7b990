// AVX512-BF16: bfloat16 products of bfloat16 elements, summed in float32.
#include "backward.h"
#include "forward.h"
#include "kernels.h"
#include "product_bf16.h"
#include "threads.h"

int run_avx512_bf16(Kernel kernel, int64_t type, const Call &call) {
  if (Type(type) != Type::bfloat16) return 2;
  switch (kernel) {
    case Kernel::forward:
      return compute(Forward<BFloat16, InBFloat16>(call), call.threads) ? 0 : 1;
    case Kernel::stats:
      return run_avx512(kernel, type, call);
    case Kernel::dq:
      return compute(BackwardDq<BFloat16, InBFloat16>(call), call.threads) ? 0 : 1;
    case Kernel::dkdv:
      return compute(BackwardDkdv<BFloat16, InBFloat16>(call), call.threads) ? 0 : 1;
  }
  return 2;
}
