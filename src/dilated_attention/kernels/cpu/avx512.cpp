// AVX-512: products in float32, whatever the type of the elements.
#include "backward.h"
#include "forward.h"
#include "kernels.h"
#include "threads.h"

namespace {

template <class Element>
bool run(Kernel kernel, const Call &call) {
  switch (kernel) {
    case Kernel::forward:
      return compute(Forward<Element, InFloat32>(call), call.threads);
    case Kernel::stats:
      return compute(Stats<Element>(call), call.threads);
    case Kernel::dq:
      return compute(BackwardDq<Element, InFloat32>(call), call.threads);
    case Kernel::dkdv:
      return compute(BackwardDkdv<Element, InFloat32>(call), call.threads);
  }
  return false;
}

}  // namespace

int run_avx512(Kernel kernel, int64_t type, const Call &call) {
  switch (Type(type)) {
    case Type::float32:
      return run<Float32>(kernel, call) ? 0 : 1;
    case Type::bfloat16:
      return run<BFloat16>(kernel, call) ? 0 : 1;
    case Type::float16:
      return run<Float16>(kernel, call) ? 0 : 1;
  }
  return 2;
}
