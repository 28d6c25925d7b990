// AMX-BF16: as avx512_bf16.cpp, in tile registers.
#include "amx.h"

#include "backward.h"
#include "forward.h"
#include "kernels.h"
#include "threads.h"

namespace {

template <class Tiles, class Kernel>
int compute_in_tiles(const Call &call) {
  return compute(Configured<Tiles, Kernel>(call), call.threads) ? 0 : 1;
}

template <class Tiles>
int run_in_tiles(Kernel kernel, int64_t type, const Call &call) {
  if (Type(type) != Type::bfloat16) return 2;
  switch (kernel) {
    case Kernel::forward:
      return compute_in_tiles<Tiles, Forward<BFloat16, InTiles<Tiles>>>(call);
    case Kernel::stats:
      return run_avx512(kernel, type, call);
    case Kernel::dq:
      return compute_in_tiles<Tiles, BackwardDq<BFloat16, InTiles<Tiles>>>(call);
    case Kernel::dkdv:
      return compute_in_tiles<Tiles, BackwardDkdv<BFloat16, InTiles<Tiles>>>(call);
  }
  return 2;
}

}  // namespace

int run_amx(Kernel kernel, int64_t type, const Call &call) { return run_in_tiles<Amx>(kernel, type, call); }
