// Products of bfloat16 in tile registers, summed in float32 (AMX-BF16).
//
// A tile is sixteen rows of sixteen words. One instruction multiplies two of them: c[16 rows][16 lanes] += a[16 rows][16
// words] . b[16 words][16 lanes], the operands of product.h, but for streamed values, whose rows have to be columns.
// `Tiles` has the instructions: amx.h.
#pragma once
#include <utility>

#include "product_bf16.h"

namespace {

// What the processor is told of its tiles before they are used: here all eight are whole.
struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);

template <class Tiles>
struct InTiles : InBFloat16 {
  static constexpr int ROWS = 2 * WIDTH;
  static constexpr int JOINED = 8;
  static constexpr bool VALUES_BY_COLUMN = true;
  // 2^x within 3e-6 of itself, a thousandth of what rounding to bfloat16 adds; 0 at -infinity, NaN at NaN.
  static Lanes exp2(Lanes x) {
    const Lanes f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Lanes y = _mm512_fmadd_ps(all(0.013426685531007718f), f, all(0.05224247220066932f));
    y = _mm512_fmadd_ps(y, f, all(0.2412802056977763f));
    y = _mm512_fmadd_ps(y, f, all(0.6930448447834592f));
    y = _mm512_fmadd_ps(y, f, all(1.f));
    return _mm512_scalef_ps(y, x);
  }
};

// Words of an even and an odd row, as in product.h, to the nearest. Processors with tiles convert pairs in a unit of
// which there is one; these instructions have two.
template <class Tiles>
inline void store_weights(InTiles<Tiles>, Lanes even, Lanes odd, Word *to) {
  const __m512i half = all(int32_t(0x8000)), low = _mm512_srli_epi32(_mm512_add_epi32(integers(even), half), 16);
  _mm512_store_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(integers(odd), half)));
}

// A kernel that has the tiles configured while it works, and gives their state up after.
template <class Tiles, class Kernel>
struct Configured : Kernel {
  using Kernel::Kernel;

  void operator()(int64_t work, float *memory) const {
    static constexpr Configuration whole;
    Tiles::configure(whole);
    Kernel::operator()(work, memory);
    Tiles::release();
  }
};

// body(m, n) for all m < M and n < N, which the compiler knows.
template <int M, int N, class Body>
inline void for_each(Body body) {
  constexpr std::integral_constant<int, 0> zero;
  constexpr std::integral_constant<int, 1> one;
  body(zero, zero);
  if constexpr (N > 1) body(zero, one);
  if constexpr (M > 1) body(one, zero);
  if constexpr (M > 1 && N > 1) body(one, one);
}

// c[16 M][16 N] (+)= a . b over so many words. Tiles 0 to 3 are c, 4 and 5 are a, 6 and 7 are b.
template <class Tiles, int M, int N, bool ADD>
inline void tile_product(const Word *a, int64_t a_row, const Word *b, int64_t b_row, int words, float *c,
                         int64_t c_row) {
  for_each<M, N>([=](auto m, auto n) {
    if constexpr (ADD)
      Tiles::template load<2 * m + n>(c + m * WIDTH * c_row + n * WIDTH, c_row);
    else
      Tiles::template zero<2 * m + n>();
  });
  for (int k = 0; k < words; k += WIDTH) {
    for_each<M, 1>([=](auto m, auto) { Tiles::template load<4 + m>(a + m * WIDTH * a_row + k, a_row); });
    for_each<1, N>([=](auto, auto n) { Tiles::template load<6 + n>(b + k * b_row + n * WIDTH, b_row); });
    for_each<M, N>([](auto m, auto n) { Tiles::template multiply_add<2 * m + n, 4 + m, 6 + n>(); });
  }
  for_each<M, N>([=](auto m, auto n) { Tiles::template store<2 * m + n>(c + m * WIDTH * c_row + n * WIDTH, c_row); });
}

// The same for any multiples of 16 rows and lanes; words are rounded up to a multiple of 16.
template <class Tiles, bool ADD>
void tile_products(const Word *a, int64_t a_row, const Word *b, int64_t b_row, int words, float *c, int64_t c_row,
                   int rows, int lanes) {
  for (int r = 0; r < rows; r += 2 * WIDTH)
    for (int x = 0; x < lanes; x += 2 * WIDTH)
      with_vectors(rows - r, [=](auto m) {
        with_vectors(lanes - x, [=](auto n) {
          tile_product<Tiles, m(), n(), ADD>(a + r * a_row, a_row, b + x, b_row, words, c + r * c_row + x, c_row);
        });
      });
}

// As in product.h.
template <class Tiles>
void multiply(InTiles<Tiles>, const Word *rows, int64_t row_words, const Word *own, int words, float *c, int count,
              int lanes = LANES) {
  tile_products<Tiles, false>(rows, row_words, own, LANES, words, c, LANES, count, lanes);
}

template <class Tiles>
void multiply_transposed(InTiles<Tiles>, const Word *values, const Word *weights, int first, int count, float *c,
                         int columns, int lanes = LANES) {
  tile_products<Tiles, true>(values + first / 2, CHUNK / 2, weights + first / 2 * LANES, LANES, count / 2, c, LANES,
                             columns, lanes);
}

template <class Tiles>
void multiply_rows(InTiles<Tiles>, const Word *weights, int64_t weight_words, const Word *values, int64_t row_words,
                   int steps, float *c, int count, int columns) {
  tile_products<Tiles, true>(weights, weight_words, values, row_words, steps, c, row_words, count, columns);
}

}  // namespace
