// Eight numbers at a time, in AVX2 with FMA and F16C: vectors.h.
#pragma once
#include <cstring>

namespace {

using Lanes = __m256;
using Integers = __m256i;
using Mask = __m256i;
using Halves = __m128i;
constexpr int WIDTH = 8, REGISTERS = 16;

inline Lanes all(float x) { return _mm256_set1_ps(x); }
inline Integers all(int32_t x) { return _mm256_set1_epi32(x); }
inline Lanes floats(Integers x) { return _mm256_castsi256_ps(x); }
inline Integers integers(Lanes x) { return _mm256_castps_si256(x); }

inline Lanes load(const float *x) { return _mm256_load_ps(x); }
inline Integers load_integers(const int32_t *x) {  // not aligned
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x));
}
inline void store(float *x, Lanes y) { _mm256_store_ps(x, y); }
inline void store(float *x, Integers y) { store(x, floats(y)); }
inline void store(float *x, Lanes y, Mask where) { _mm256_maskstore_ps(x, where, y); }

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes multiply_subtract(Lanes a, Lanes b, Lanes c) { return _mm256_fmsub_ps(a, b, c); }
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline Lanes square_root(Lanes x) { return _mm256_sqrt_ps(x); }
inline Lanes magnitude(Lanes x) { return _mm256_andnot_ps(all(-0.f), x); }
inline Lanes with_sign_of(Lanes x, Lanes y) { return _mm256_or_ps(_mm256_and_ps(all(-0.f), x), y); }  // y >= 0
inline float sum_of(Lanes x) {
  const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1), two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}
inline float largest_of(Lanes x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Integers add(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
inline Integers multiply(Integers a, Integers b) { return _mm256_mullo_epi32(a, b); }
inline Integers shift_left(Integers x, int bits) { return _mm256_slli_epi32(x, bits); }
inline Integers shift_right(Integers x, int bits) { return _mm256_srli_epi32(x, bits); }

inline Mask first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(all(int32_t(n < WIDTH ? n : WIDTH)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Mask inverse(Mask x) { return x ^ all(-1); }
inline Mask at_least(Integers a, Integers b) { return inverse(_mm256_cmpgt_epi32(b, a)); }
inline Mask at_most(Integers a, Integers b) { return at_least(b, a); }
inline Mask share_bits(Integers a, Integers b) { return inverse(_mm256_cmpeq_epi32(a & b, all(0))); }
inline Mask greater(Lanes a, Lanes b) { return integers(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline Mask equal(Lanes a, Lanes b) { return integers(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline Mask is_nan(Lanes x) { return integers(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
inline Mask infinite_or_nan(Lanes x) {
  const Integers exponent = all(0x7f800000);
  return _mm256_cmpeq_epi32(integers(x) & exponent, exponent);
}
inline bool any(Mask x) { return !_mm256_testz_si256(x, x); }
inline Lanes choose(Mask where, Lanes a, Lanes b) { return _mm256_blendv_ps(b, a, floats(where)); }
inline Lanes only(Mask where, Lanes a) { return floats(where & integers(a)); }

inline Lanes nearest_integer(Lanes x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// Those whose power is 0, a number or infinity in the exponent's eight bits; a NaN stays one.
inline Lanes bounded_exponent(Lanes x) { return _mm256_min_ps(all(128.f), _mm256_max_ps(all(-127.f), x)); }
inline Lanes times_power_of_2(Lanes x, Lanes whole) {
  return x * floats(shift_left(add(_mm256_cvtps_epi32(whole), all(127)), 23));
}

inline Halves load_halves(const void *x, int64_t n) {
  if (n >= WIDTH) return _mm_loadu_si128(static_cast<const __m128i *>(x));
  Halves halves = _mm_setzero_si128();
  if (n > 0) std::memcpy(&halves, x, n * sizeof(uint16_t));
  return halves;
}
inline void store_halves(void *x, Halves halves, int64_t n) {
  if (n >= WIDTH)
    _mm_storeu_si128(static_cast<__m128i *>(x), halves);
  else if (n > 0)
    std::memcpy(x, &halves, n * sizeof(uint16_t));
}
inline Integers widened(Halves x) { return _mm256_cvtepu16_epi32(x); }
inline Halves narrowed(Integers x) {
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
inline Lanes bfloat16_to_floats(Halves x) { return floats(shift_left(widened(x), 16)); }
inline Lanes float16_to_floats(Halves x) {
#ifdef __clang__
  asm("" : "+x"(x));  // Clang 14 would take halves from two branches apart into eight numbers
#endif
  return _mm256_cvtph_ps(x);
}
inline Halves round_to_float16(Lanes x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes load(const Float32 *x, int64_t n) {
  return n >= WIDTH ? _mm256_loadu_ps(&x->bits) : _mm256_maskload_ps(&x->bits, first_lanes(n));
}
inline void store(Float32 *x, Lanes y, int64_t n) {
  if (n >= WIDTH)
    _mm256_storeu_ps(&x->bits, y);
  else
    _mm256_maskstore_ps(&x->bits, first_lanes(n), y);
}

inline void transpose(Integers (&r)[WIDTH]) {
  Integers t[WIDTH];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Integers low = r[i], high = r[i + 4];
    r[i] = _mm256_permute2x128_si256(low, high, 0x20);
    r[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
  }
}

inline Lanes sums_of(const Lanes (&x)[WIDTH]) {
  const auto pairs = [&](int i) { return _mm256_hadd_ps(x[i], x[i + 1]); };
  const Lanes low = _mm256_hadd_ps(pairs(0), pairs(2)), high = _mm256_hadd_ps(pairs(4), pairs(6));
  return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}

}  // namespace
