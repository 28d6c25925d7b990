// Products of bfloat16 in tile registers, summed in float32 (AMX-BF16).
//
// A tile is sixteen rows of sixteen words. One instruction multiplies two of them: c[16 rows][16 lanes] += a[16 rows][16
// words] . b[16 words][16 lanes], the operands of product.h, but for streamed values, whose rows have to be columns.
// `Tiles` has the instructions: amx.h.
#pragma once
#include <utility>

#include "product_bf16.h"

namespace {

// The shape of each tile register, loaded before they are used: here all eight are whole.
struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);

// N is 2 for float32 as the sum of two bfloat16: x = high + low within 2^-17 of itself, a . b = a_high . b_high +
// a_high . b_low + a_low . b_high, and what that leaves out is, with the roundings, some 1e-5 of |a| . |b|. In an operand,
// each row of high halves is followed by the row of its low halves. Numbers of 3.39e38 and above overflow.
template <class Tiles, int N = 1>
struct InTiles : InBFloat16 {
  static constexpr int HALVES = N, ROWS = 2 * WIDTH, JOINED = 8;
  static constexpr bool VALUES_BY_COLUMN = true;

  // 2^x within 3e-6 of itself; 0 at -infinity, NaN at NaN.
  static Lanes exp2(Lanes x) {
    const Lanes f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Lanes y = _mm512_fmadd_ps(all(0.013426685531007718f), f, all(0.05224247220066932f));
    y = _mm512_fmadd_ps(y, f, all(0.2412802056977763f));
    y = _mm512_fmadd_ps(y, f, all(0.6930448447834592f));
    y = _mm512_fmadd_ps(y, f, all(1.f));
    return _mm512_scalef_ps(y, x);
  }

  static void to_words(const Lanes (&row)[2], __m512i (&words)[2]) {
    const auto widened = [](__m256i x) { return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); };
    words[0] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(row[1], row[0]));
    const Lanes first = _mm512_sub_ps(row[0], widened(_mm512_castsi512_si256(words[0])));
    const Lanes second = _mm512_sub_ps(row[1], widened(_mm512_extracti64x4_epi64(words[0], 1)));
    words[1] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  }
};

// Words of an even and an odd row, as in product.h, to the nearest. Processors with tiles convert pairs in a unit of
// which there is one; these instructions have two.
template <class Tiles>
inline void store_weights(InTiles<Tiles>, Lanes even, Lanes odd, Word *to) {
  const __m512i half = all(int32_t(0x8000)), low = _mm512_srli_epi32(_mm512_add_epi32(integers(even), half), 16);
  _mm512_store_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(integers(odd), half)));
}

template <class Tiles>
inline void store_weights(InTiles<Tiles, 2>, Lanes even, Lanes odd, Word *to) {
  const auto high = [](Lanes x) {
    return floats(_mm512_and_si512(_mm512_add_epi32(integers(x), all(int32_t(0x8000))), all(int32_t(0xffff0000))));
  };
  store_weights(InTiles<Tiles>(), even, odd, to);
  store_weights(InTiles<Tiles>(), _mm512_sub_ps(even, high(even)), _mm512_sub_ps(odd, high(odd)), to + LANES);
}

template <class Tiles>
inline void store_weight_rows(InTiles<Tiles, 2>, const Lanes (&rows)[2][2], Word *to, int64_t row_words) {
  for (int i = 0; i < 2; i++) {
    __m512i words[2];
    InTiles<Tiles, 2>::to_words(rows[i], words);
    for (int h = 0; h < 2; h++) _mm512_store_si512(to + i * row_words + h * row_words / 2, words[h]);
  }
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

// An operand's rows lie `row` words apart; the low halves of a row lie `low` words behind it.
struct Operand {
  const Word *at;
  int64_t row, low;
  Operand operator+(int64_t words) const { return {at + words, row, low}; }
};

// c[16 M][16 N] (+)= a . b over `words` words. Tiles 0 to 3 are c, 4 and 5 are a, 6 and 7 are b.
template <class Tiles, int M, int N, bool ADD, int HALVES>
inline void tile_product(Operand a, Operand b, int words, float *c, int64_t c_row) {
  const auto load_a = [](Operand a) {
    for_each<M, 1>([=](auto m, auto) { Tiles::template load<4 + m>(a.at + m * WIDTH * a.row, a.row); });
  };
  const auto load_b = [](Operand b) {
    for_each<1, N>([=](auto, auto n) { Tiles::template load<6 + n>(b.at + n * WIDTH, b.row); });
  };
  const auto multiply_add = [] {
    for_each<M, N>([](auto m, auto n) { Tiles::template multiply_add<2 * m + n, 4 + m, 6 + n>(); });
  };
  for_each<M, N>([=](auto m, auto n) {
    if constexpr (ADD)
      Tiles::template load<2 * m + n>(c + m * WIDTH * c_row + n * WIDTH, c_row);
    else
      Tiles::template zero<2 * m + n>();
  });
  for (int k = 0; k < words; k += WIDTH, a.at += WIDTH, b.at += WIDTH * b.row) {
    load_a(a), load_b(b), multiply_add();
    if constexpr (HALVES == 2) {
      load_a(a + a.low), multiply_add();
      load_a(a), load_b(b + b.low), multiply_add();
    }
  }
  for_each<M, N>([=](auto m, auto n) { Tiles::template store<2 * m + n>(c + m * WIDTH * c_row + n * WIDTH, c_row); });
}

// The same for any multiples of 16 rows and lanes; words are rounded up to a multiple of 16.
template <class Tiles, bool ADD, int HALVES>
void tile_products(Operand a, Operand b, int words, float *c, int64_t c_row, int rows, int lanes) {
  for (int r = 0; r < rows; r += 2 * WIDTH)
    for (int x = 0; x < lanes; x += 2 * WIDTH)
      with_vectors(rows - r, [=](auto m) {
        with_vectors(lanes - x, [=](auto n) {
          tile_product<Tiles, m(), n(), ADD, HALVES>(a + r * a.row, b + x, words, c + r * c_row + x, c_row);
        });
      });
}

// As in product.h.
template <class Tiles, int HALVES>
void multiply(InTiles<Tiles, HALVES>, const Word *rows, int64_t row_words, const Word *own, int words, float *c,
              int count, int lanes = LANES) {
  tile_products<Tiles, false, HALVES>({rows, row_words, row_words / 2}, {own, HALVES * LANES, LANES}, words, c, LANES,
                                      count, lanes);
}

template <class Tiles, int HALVES>
void multiply_transposed(InTiles<Tiles, HALVES>, const Word *values, const Word *weights, int first, int count,
                         float *c, int columns, int lanes = LANES) {
  tile_products<Tiles, true, HALVES>({values + first / 2, HALVES * CHUNK / 2, CHUNK / 2},
                                     {weights + first / 2 * HALVES * LANES, HALVES * LANES, LANES}, count / 2, c, LANES,
                                     columns, lanes);
}

template <class Tiles, int HALVES>
void multiply_rows(InTiles<Tiles, HALVES>, const Word *weights, int64_t weight_words, const Word *values, int steps,
                   float *c, int count, int columns) {
  tile_products<Tiles, true, HALVES>({weights, weight_words, weight_words / 2}, {values, HALVES * columns, columns},
                                     steps, c, columns, count, columns);
}

}  // namespace
