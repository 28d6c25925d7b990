// Products of bfloat16, summed in float32 (BFDOT of arm64). BFDOT rounds its sums to odd and takes subnormal numbers for 0.
#pragma once
#include "product.h"

namespace {

struct InBFloat16 {
  static constexpr int PER_WORD = 2;
  static constexpr int HALVES = 1;
  static constexpr int ROWS = 8;
  static constexpr int JOINED = 1;
  static constexpr bool VALUES_BY_COLUMN = false;

  template <int WORD>
  static Lanes multiply_add_word(Lanes a, Lanes b, Lanes c) {
    return vbfdotq_laneq_f32(c, vreinterpretq_bf16_f32(b), vreinterpretq_bf16_f32(a), WORD);
  }
  static Lanes exp2(Lanes x) { return power_of_2(x); }

  // Return `left` bfloat16, at most two per word; clear `finite` if one of them is not.
  template <Role ROLE>
  static Integers words_of(const BFloat16 *x, int64_t left, bool &finite) {
    const uint16x8_t row = left >= 2 * WIDTH ? vld1q_u16(&x->bits)
                                             : vcombine_u16(load_halves(x, left), load_halves(x + WIDTH, left - WIDTH));
    const uint16x8_t exponent = vdupq_n_u16(0x7f80);
    if constexpr (ROLE == Role::plain) return vreinterpretq_s32_u16(row);
    const uint16x8_t odd = vceqq_u16(vandq_u16(row, exponent), exponent);
    if constexpr (ROLE == Role::scores) return vreinterpretq_s32_u16(vbslq_u16(odd, vdupq_n_u16(0x7fc0), row));
    finite &= vmaxvq_u16(odd) == 0;
    return vreinterpretq_s32_u16(vbicq_u16(row, odd));
  }

  // The words of two rows of bfloat16, of which each has an element of either.
  static void interleave(Integers a, Integers b, Integers (&pair)[2]) {
    const uint16x8_t even = vreinterpretq_u16_s32(a), odd = vreinterpretq_u16_s32(b);
    pair[0] = vreinterpretq_s32_u16(vzip1q_u16(even, odd));
    pair[1] = vreinterpretq_s32_u16(vzip2q_u16(even, odd));
  }
};

// As in product.h: words of an even and an odd row.
inline void store_weights(InBFloat16, Lanes even, Lanes odd, Word *to) {
  const auto rounded = [](Lanes x) { return vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(x)); };
  store(to, vreinterpretq_s32_u16(vzip1q_u16(rounded(even), rounded(odd))));
}

inline void store_weight_rows(InBFloat16, const Lanes (&rows)[2][2], Word *to, int64_t row_words) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const bfloat16x8_t row = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(rows[i][0]), rows[i][1]);
    store(to + i * row_words, vreinterpretq_s32_bf16(row));
  }
}

}  // namespace
