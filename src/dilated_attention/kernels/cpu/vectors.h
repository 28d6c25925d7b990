// Sixteen numbers at a time: what AVX-512 does, under the names that the kernels use.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <limits>

// Every file that is compiled for an instruction set has its own copy of these functions: a copy that two files shared
// could be the one for the set that the machine lacks.
namespace {

using Lanes = __m512;
using Word = float;  // 32 bits that are broadcast or multiplied as one: a float32, or two bfloat16
constexpr int WIDTH = 16;
constexpr float INF = std::numeric_limits<float>::infinity(), NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

enum class Type : int64_t { float32, bfloat16, float16 };
struct Float32 {
  float bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Lanes all(float x) { return _mm512_set1_ps(x); }
inline __m512i all(int32_t x) { return _mm512_set1_epi32(x); }
inline __mmask16 first_lanes(int64_t n) { return n >= WIDTH ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
inline Lanes floats(__m512i x) { return _mm512_castsi512_ps(x); }
inline __m512i integers(Lanes x) { return _mm512_castps_si512(x); }

// 2^x, exact at integers, else within 2e-7 of itself (tests/test_cpu_kernels.py); 0 at -infinity, NaN at NaN. On Zen 5
// vreduce, which would give the fraction at once, takes three times as long as vrndscale.
inline Lanes power_of_2(Lanes x) {
  const Lanes whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Lanes f = _mm512_sub_ps(x, whole);
  Lanes y = _mm512_fmadd_ps(all(0.0013264728477224708f), f, all(0.009671512991189957f));
  y = _mm512_fmadd_ps(y, f, all(0.05550733581185341f));
  y = _mm512_fmadd_ps(y, f, all(0.24022242426872253f));
  y = _mm512_fmadd_ps(y, f, all(0.6931470036506653f));
  y = _mm512_fmadd_ps(y, f, all(1.f));
  return _mm512_scalef_ps(y, whole);
}

// The first n of sixteen elements as floats; zeros behind them.
inline Lanes load(const Float32 *x, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), x); }
inline __m256i load_halves(const void *x, int64_t n) { return _mm256_maskz_loadu_epi16(first_lanes(n), x); }
inline Lanes load(const BFloat16 *x, int64_t n) {
  return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(x, n)), 16));
}
inline Lanes load(const Float16 *x, int64_t n) { return _mm512_cvtph_ps(load_halves(x, n)); }

// To the nearest, ties to even; a NaN stays one.
inline __m256i round_to_bfloat16(Lanes x) {
  const __m512i bits = integers(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, all(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, all(0x7fc00000)), 16));
}
inline void store(Float32 *x, Lanes y, int64_t n) { _mm512_mask_storeu_ps(x, first_lanes(n), y); }
inline void store(BFloat16 *x, Lanes y, int64_t n) {
  _mm256_mask_storeu_epi16(x, first_lanes(n), round_to_bfloat16(y));
}
inline void store(Float16 *x, Lanes y, int64_t n) {
  _mm256_mask_storeu_epi16(x, first_lanes(n), _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Lanes infinite_or_nan_to_nan(Lanes x) { return _mm512_fmadd_ps(x, _mm512_setzero_ps(), x); }
inline __mmask16 infinite_or_nan(Lanes x) { return _mm512_fpclass_ps_mask(x, 0x99); }

// 16 x 16 words.
inline void transpose(__m512i (&r)[WIDTH]) {
  __m512i t[WIDTH];
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

// The sum of each of sixteen vectors.
inline Lanes sums_of(const Lanes (&x)[WIDTH]) {
  Lanes pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto halves = [](Lanes a, Lanes b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
}

}  // namespace
