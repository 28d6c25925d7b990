// A vector of numbers at a time: what instruction sets do, under the names that the kernels use.
//
// vectors_avx512.h, vectors_avx2.h and vectors_neon.h define, for WIDTH numbers in one of REGISTERS registers,
//   Lanes, Integers, Halves, Mask: float32, int32, 16 bits and a truth value in each lane;
//   all(x), load(x), store(x, y): one number in every lane; lanes from and to aligned memory;
//   load(x, n), store(x, y, n): the first n elements of any type, zeros behind them;
//   a + b, a * b, multiply_add(a, b, c), ...: lane by lane; multiply_add is a * b + c in one rounding;
//   choose(mask, a, b), only(mask, a): a where the mask is set, else b or 0;
//   share_bits(a, b): whether a & b is not 0;
//   transpose(rows), sums_of(vectors): WIDTH x WIDTH words; the sum of each vector.
#pragma once
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <limits>

// Every file that is compiled for an instruction set has its own copy of these functions: a copy that two files shared
// could be the one for the set that the machine lacks.
namespace {

using Word = float;  // 32 bits that are broadcast or multiplied as one: a float32, or two bfloat16
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

}  // namespace

#ifdef __aarch64__
#include "vectors_neon.h"
#elif defined(__AVX512F__)
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif

namespace {

inline Lanes zeros() { return all(0.f); }

// 2^x, exact at integers, else within 2e-7 of itself (tests/test_cpu_kernels.py); 0 at -infinity, NaN at NaN. AVX2 and
// NEON have 0 below 2^-126 and infinity from 2^127.5 on. On Zen 5 vreduce, which would give the fraction at once, takes three times
// as long as vrndscale.
inline Lanes power_of_2(Lanes exponent) {
  const Lanes x = bounded_exponent(exponent);
  const Lanes whole = nearest_integer(x), f = x - whole;
  Lanes y = multiply_add(all(0.0013264728477224708f), f, all(0.009671512991189957f));
  y = multiply_add(y, f, all(0.05550733581185341f));
  y = multiply_add(y, f, all(0.24022242426872253f));
  y = multiply_add(y, f, all(0.6931470036506653f));
  y = multiply_add(y, f, all(1.f));
  return times_power_of_2(y, whole);
}

// tanh x within 3e-7 of itself (tests/test_cpu_kernels.py); 1 at infinity, NaN at NaN. Near 0, where 1 - 2^y would cancel, a
// polynomial: the coefficients of tanhf in Cephes (Moshier).
inline Lanes tanh_of(Lanes x) {
  const Lanes size = magnitude(x), square = x * x;
  Lanes y = multiply_add(all(-0.00570498872745f), square, all(0.0206390887954f));
  y = multiply_add(y, square, all(-0.0537397155531f));
  y = multiply_add(y, square, all(0.133314422036f));
  y = multiply_add(y, square, all(-0.333332819422f));
  const Lanes near = multiply_add(y * square, x, x);
  const Lanes power = power_of_2(larger(all(-32.f), size * all(-2 * LOG2E)));
  const Lanes far = (all(1.f) - power) / (all(1.f) + power);
  return choose(greater(all(0.625f), size), near, with_sign_of(x, far));
}

// To the nearest, ties to even; a NaN stays one.
inline Halves round_to_bfloat16(Lanes x) {
  const Integers bits = integers(x), odd = shift_right(bits, 16) & all(1);
  const Integers rounded = add(bits, add(odd, all(0x7fff)));
  return narrowed(shift_right(integers(choose(is_nan(x), all(NOT_A_NUMBER), floats(rounded))), 16));
}

inline Lanes load(const BFloat16 *x, int64_t n) { return bfloat16_to_floats(load_halves(x, n)); }
inline Lanes load(const Float16 *x, int64_t n) { return float16_to_floats(load_halves(x, n)); }
inline void store(BFloat16 *x, Lanes y, int64_t n) { store_halves(x, round_to_bfloat16(y), n); }
inline void store(Float16 *x, Lanes y, int64_t n) { store_halves(x, round_to_float16(y), n); }

inline Lanes infinite_or_nan_to_nan(Lanes x) { return multiply_add(x, zeros(), x); }

}  // namespace
