// Products of bfloat16 elements, summed in float32. Each instruction set that has such products compiles its own.
#pragma once
#include "backward.h"
#include "by_block.h"
#include "forward.h"
#include "kernels.h"
#include "threads.h"

namespace {

// `run_stats` is of the set whose products are in float32.
template <class InBFloat16>
int run_in_bfloat16(Kernel kernel, int64_t type, const Call &call,
                    int (*run_stats)(Kernel, int64_t, const Call &)) {
  if (Type(type) != Type::bfloat16) return 2;
  switch (kernel) {
    case Kernel::forward:
      return (call.by_block ? compute(ForwardByBlock<BFloat16, InBFloat16>(call), call.threads)
                            : compute(Forward<BFloat16, InBFloat16>(call), call.threads))
                 ? 0
                 : 1;
    case Kernel::stats:
      return run_stats(kernel, type, call);
    case Kernel::dq:
      return compute(BackwardDq<BFloat16, InBFloat16>(call), call.threads) ? 0 : 1;
    case Kernel::dkdv:
      return compute(BackwardDkdv<BFloat16, InBFloat16>(call), call.threads) ? 0 : 1;
  }
  return 2;
}

}  // namespace
