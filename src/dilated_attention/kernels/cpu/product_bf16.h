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

  // Return `left` bfloat16, at most two per word; clear `finite` if one of them is not.
  template <Role ROLE>
  static __m512i words_of(const BFloat16 *x, int64_t left, bool &finite) {
    const __mmask32 inside = left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
    const __m512i row = _mm512_maskz_loadu_epi16(inside, x), exponent = _mm512_set1_epi16(0x7f80);
    if constexpr (ROLE == Role::plain) return row;
    const __mmask32 odd = _mm512_cmpeq_epi16_mask(row & exponent, exponent);
    if constexpr (ROLE == Role::scores) return _mm512_mask_mov_epi16(row, odd, _mm512_set1_epi16(0x7fc0));
    finite &= odd == 0;
    return _mm512_maskz_mov_epi16(~odd, row);
  }

  // The words of two rows of bfloat16, of which each has an element of either.
  static void interleave(__m512i a, __m512i b, __m512i (&pair)[2]) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    pair[0] = _mm512_permutex2var_epi16(a, order, b);
    pair[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(order, _mm512_set1_epi16(WIDTH)), b);
  }
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
