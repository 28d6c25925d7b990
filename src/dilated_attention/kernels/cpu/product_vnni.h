// Products of bytes, summed in int32 (AVX512-VNNI): estimates alone may round as coarsely as that.
#pragma once
#include "product.h"

namespace {

struct InBytes {
  static constexpr int PER_WORD = 4;
  static constexpr int ROWS = 8;
  static constexpr int64_t MOST = INT32_MAX / (127 * 127);  // numbers of a row: the sum of their products is an int32
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
    return floats(_mm512_dpbusd_epi32(integers(c), integers(a), integers(b)));
  }

  // Rounds a row to integers of at most 127, times a unit, which is returned; NaN if a number is. The instruction
  // multiplies bytes without a sign by bytes with one: rows in lanes have one, the others have 128 added.
  template <bool IN_LANES>
  static float store_words(const float *row, int64_t words, Word *to) {
    Lanes largest = zeros(), odd = zeros();
    for (int64_t i = 0; i < words * PER_WORD; i += WIDTH) {
      const Lanes x = load(row + i);
      largest = larger(largest, magnitude(x)), odd = ::multiply_add(x, zeros(), odd);
    }
    const float unit = largest_of(largest) / 127;
    const Lanes inverse = all(unit > 0 ? 1 / unit : 0);
    const __m128i offset = _mm_set1_epi8(IN_LANES ? 0 : -128);
    for (int64_t w = 0; w < words; w += WIDTH / PER_WORD) {
      const Integers x = _mm512_cvtps_epi32(load(row + w * PER_WORD) * inverse);
      // Past the caches, which then need not read the line first. The counter of jobs (threads.h) orders these stores.
      _mm_stream_si128(reinterpret_cast<__m128i *>(to + w), _mm_xor_si128(_mm512_cvtsepi32_epi8(x), offset));
    }
    return unit + sum_of(odd);
  }

  // What a row of 128s, which stand for zeros, adds to the sums of rows in lanes, `words` steps of LANES.
  static Lanes offset(const Word *own, int64_t words) {
    Lanes sum = zeros();
    for (int64_t w = 0; w < words; w++) sum = multiply_add(floats(_mm512_set1_epi8(-128)), load(own + w * LANES), sum);
    return sum;
  }
  static Lanes number(Lanes sum, Lanes offset) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(integers(sum), integers(offset)));
  }
};

}  // namespace
