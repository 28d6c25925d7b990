// AMX-BF16: as avx512_bf16.cpp, in tile registers; float32 and float16 as the sum of two bfloat16, which for float16 is
// exact.
#define CHUNK_ROWS 128  // product.h: a chunk's sums pass through the tile registers once

#include "amx.h"

#include "backward.h"
#include "by_block.h"
#include "forward.h"
#include "kernels.h"
#include "threads.h"

namespace {

template <class Tiles, class Kernel>
int compute_in_tiles(const Call &call) {
  return compute(Configured<Tiles, Kernel>(call), call.threads) ? 0 : 1;
}

template <class Tiles, class Element, int HALVES>
int run_in_tiles(Kernel kernel, int64_t type, const Call &call) {
  switch (kernel) {
    case Kernel::forward:
      return call.by_block ? compute_in_tiles<Tiles, ForwardByBlock<Element, InTiles<Tiles, HALVES>>>(call)
                           : compute_in_tiles<Tiles, Forward<Element, InTiles<Tiles, HALVES>>>(call);
    case Kernel::stats:
      return run_avx512(kernel, type, call);
    case Kernel::dq:
      return compute_in_tiles<Tiles, BackwardDq<Element, InTiles<Tiles, HALVES>>>(call);
    case Kernel::dkdv:
      return compute_in_tiles<Tiles, BackwardDkdv<Element, InTiles<Tiles, HALVES>>>(call);
  }
  return 2;
}

template <class Tiles>
int run_in_tiles(Kernel kernel, int64_t type, const Call &call) {
  switch (Type(type)) {
    case Type::float32:
      return run_in_tiles<Tiles, Float32, 2>(kernel, type, call);
    case Type::bfloat16:
      return run_in_tiles<Tiles, BFloat16, 1>(kernel, type, call);
    case Type::float16:
      return run_in_tiles<Tiles, Float16, 2>(kernel, type, call);
  }
  return 2;
}

}  // namespace

int run_amx(Kernel kernel, int64_t type, const Call &call) { return run_in_tiles<Amx>(kernel, type, call); }
