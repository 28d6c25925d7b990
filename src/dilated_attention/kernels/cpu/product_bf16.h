// Products of bfloat16, summed in float32 (AVX512-BF16).
#pragma once
#include "product.h"

namespace {

struct InBFloat16 {
  static constexpr int PER_WORD = 2;
  static constexpr int HALVES = 1;
  static constexpr int ROWS = 8;
  static constexpr int JOINED = 1;
  static constexpr bool VALUES_BY_COLUMN = false;
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static Lanes exp2(Lanes x) { return power_of_2(x); }
};

// As in product.h: words of an even and an odd row.
inline void store_weights(InBFloat16, Lanes even, Lanes odd, Word *to) {
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                              6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i pair = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  _mm512_store_si512(to, _mm512_permutexvar_epi16(interleave, pair));
}

inline void store_weight_rows(InBFloat16, const Lanes (&rows)[2][2], Word *to, int64_t row_words) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    _mm512_store_si512(to + i * row_words, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(rows[i][1], rows[i][0])));
}

}  // namespace
