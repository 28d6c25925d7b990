// Sixteen numbers at a time, in AVX-512: vectors.h.
#pragma once

namespace {

using Lanes = __m512;
using Integers = __m512i;
using Mask = __mmask16;
using Halves = __m256i;
constexpr int WIDTH = 16, REGISTERS = 32;

inline Lanes all(float x) { return _mm512_set1_ps(x); }
inline Integers all(int32_t x) { return _mm512_set1_epi32(x); }
inline Lanes floats(Integers x) { return _mm512_castsi512_ps(x); }
inline Integers integers(Lanes x) { return _mm512_castps_si512(x); }

inline Lanes load(const float *x) { return _mm512_load_ps(x); }
inline Integers load_integers(const int32_t *x) { return _mm512_loadu_si512(x); }  // not aligned
inline void store(float *x, Lanes y) { _mm512_store_ps(x, y); }
inline void store(float *x, Integers y) { _mm512_store_si512(x, y); }
inline void store(float *x, Lanes y, Mask where) { _mm512_mask_store_ps(x, where, y); }

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes multiply_subtract(Lanes a, Lanes b, Lanes c) { return _mm512_fmsub_ps(a, b, c); }
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes square_root(Lanes x) { return _mm512_sqrt_ps(x); }
inline Lanes magnitude(Lanes x) { return _mm512_andnot_ps(all(-0.f), x); }
inline Lanes with_sign_of(Lanes x, Lanes y) { return _mm512_or_ps(_mm512_and_ps(all(-0.f), x), y); }  // y >= 0
inline float sum_of(Lanes x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Lanes x) { return _mm512_reduce_max_ps(x); }
inline Lanes nearest_integer(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes bounded_exponent(Lanes x) { return x; }
inline Lanes times_power_of_2(Lanes x, Lanes whole) { return _mm512_scalef_ps(x, whole); }

inline Integers add(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
inline Integers multiply(Integers a, Integers b) { return _mm512_mullo_epi32(a, b); }
inline Integers shift_left(Integers x, int bits) { return _mm512_slli_epi32(x, bits); }
inline Integers shift_right(Integers x, int bits) { return _mm512_srli_epi32(x, bits); }

inline Mask first_lanes(int64_t n) { return n >= WIDTH ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
inline Mask at_least(Integers a, Integers b) { return _mm512_cmpge_epi32_mask(a, b); }
inline Mask at_most(Integers a, Integers b) { return _mm512_cmple_epi32_mask(a, b); }
inline Mask share_bits(Integers a, Integers b) { return _mm512_test_epi32_mask(a, b); }
inline Mask greater(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask equal(Lanes a, Lanes b) { return _mm512_cmpeq_ps_mask(a, b); }
inline Mask is_nan(Lanes x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Mask infinite_or_nan(Lanes x) { return _mm512_fpclass_ps_mask(x, 0x99); }
inline Mask inverse(Mask x) { return ~x; }
inline bool any(Mask x) { return x; }
inline Lanes choose(Mask where, Lanes a, Lanes b) { return _mm512_mask_mov_ps(b, where, a); }
inline Lanes only(Mask where, Lanes a) { return _mm512_maskz_mov_ps(where, a); }

inline Halves load_halves(const void *x, int64_t n) { return _mm256_maskz_loadu_epi16(first_lanes(n), x); }
inline void store_halves(void *x, Halves y, int64_t n) { _mm256_mask_storeu_epi16(x, first_lanes(n), y); }
inline Integers widened(Halves x) { return _mm512_cvtepu16_epi32(x); }
inline Halves narrowed(Integers x) { return _mm512_cvtepi32_epi16(x); }
inline Lanes bfloat16_to_floats(Halves x) { return floats(shift_left(widened(x), 16)); }
inline Lanes float16_to_floats(Halves x) { return _mm512_cvtph_ps(x); }
inline Halves round_to_float16(Lanes x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes load(const Float32 *x, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), x); }
inline void store(Float32 *x, Lanes y, int64_t n) { _mm512_mask_storeu_ps(x, first_lanes(n), y); }

inline void transpose(Integers (&r)[WIDTH]) {
  Integers t[WIDTH];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const int j = i / 4 * 8 + i % 4;
    t[j] = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88);
    t[j + 4] = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

inline Lanes sums_of(const Lanes (&x)[WIDTH]) {
  Lanes pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    pairs[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  const auto halves = [](Lanes a, Lanes b) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
}

}  // namespace
