// Products in float32, whatever the type of the elements; and tiles of few rows. Each instruction set compiles its own.
#pragma once
#include "backward.h"
#include "by_block.h"
#include "few.h"
#include "forward.h"
#include "kernels.h"
#include "threads.h"

namespace {

template <class Element>
bool run_on(Kernel kernel, const Call &call) {
  switch (kernel) {
    case Kernel::forward:
      return call.few        ? compute(Few<Element, Kernel::forward>(call), call.threads)
             : call.by_block ? compute(ForwardByBlock<Element, InFloat32>(call), call.threads)
                             : compute(Forward<Element, InFloat32>(call), call.threads);
    case Kernel::stats:
      return compute(Stats<Element>(call), call.threads);
    case Kernel::dq:
      return call.few ? compute(Few<Element, Kernel::dq>(call), call.threads)
                      : compute(BackwardDq<Element, InFloat32>(call), call.threads);
    case Kernel::dkdv:
      return call.few ? compute(Few<Element, Kernel::dkdv>(call), call.threads)
                      : compute(BackwardDkdv<Element, InFloat32>(call), call.threads);
  }
  return false;
}

inline int run_in_float32(Kernel kernel, int64_t type, const Call &call) {
  switch (Type(type)) {
    case Type::float32:
      return run_on<Float32>(kernel, call) ? 0 : 1;
    case Type::bfloat16:
      return run_on<BFloat16>(kernel, call) ? 0 : 1;
    case Type::float16:
      return run_on<Float16>(kernel, call) ? 0 : 1;
  }
  return 2;
}

}  // namespace
