// Four numbers at a time, in NEON, which every arm64 processor has: vectors.h.
#pragma once

namespace {

using Lanes = float32x4_t;
using Integers = int32x4_t;
using Mask = uint32x4_t;
using Halves = uint16x4_t;
constexpr int WIDTH = 4, REGISTERS = 32;

inline Lanes all(float x) { return vdupq_n_f32(x); }
inline Integers all(int32_t x) { return vdupq_n_s32(x); }
inline Lanes floats(Integers x) { return vreinterpretq_f32_s32(x); }
inline Integers integers(Lanes x) { return vreinterpretq_s32_f32(x); }

inline Lanes load(const float *x) { return vld1q_f32(x); }
inline Integers load_integers(const int32_t *x) { return vld1q_s32(x); }  // not aligned
inline void store(float *x, Lanes y) { vst1q_f32(x, y); }
inline void store(float *x, Integers y) { store(x, floats(y)); }
inline void store(float *x, Lanes y, Mask where) { store(x, vbslq_f32(where, y, load(x))); }

inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return vfmaq_f32(c, a, b); }
inline Lanes multiply_subtract(Lanes a, Lanes b, Lanes c) { return vfmaq_f32(vnegq_f32(c), a, b); }
inline Lanes larger(Lanes a, Lanes b) { return vmaxq_f32(a, b); }  // NaN where either is
inline Lanes square_root(Lanes x) { return vsqrtq_f32(x); }
inline Lanes magnitude(Lanes x) { return vabsq_f32(x); }
inline Lanes with_sign_of(Lanes x, Lanes y) {  // y >= 0
  return floats((integers(all(-0.f)) & integers(x)) | integers(y));
}
inline float sum_of(Lanes x) { return vaddvq_f32(x); }
inline float largest_of(Lanes x) { return vmaxvq_f32(x); }

inline Integers add(Integers a, Integers b) { return vaddq_s32(a, b); }
inline Integers multiply(Integers a, Integers b) { return vmulq_s32(a, b); }
inline Integers shift_left(Integers x, int bits) { return vshlq_s32(x, all(bits)); }
inline Integers shift_right(Integers x, int bits) {
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), all(-bits)));
}

inline Mask first_lanes(int64_t n) {
  constexpr int32_t NUMBERS[WIDTH] = {0, 1, 2, 3};
  return vcgtq_s32(all(int32_t(n < WIDTH ? n : WIDTH)), load_integers(NUMBERS));
}
inline Mask inverse(Mask x) { return vmvnq_u32(x); }
inline Mask at_least(Integers a, Integers b) { return vcgeq_s32(a, b); }
inline Mask at_most(Integers a, Integers b) { return vcleq_s32(a, b); }
inline Mask share_bits(Integers a, Integers b) { return vtstq_s32(a, b); }
inline Mask greater(Lanes a, Lanes b) { return vcgtq_f32(a, b); }
inline Mask equal(Lanes a, Lanes b) { return vceqq_f32(a, b); }
inline Mask is_nan(Lanes x) { return inverse(equal(x, x)); }
inline Mask infinite_or_nan(Lanes x) {
  const Integers exponent = all(0x7f800000);
  return vceqq_s32(integers(x) & exponent, exponent);
}
inline bool any(Mask x) { return vmaxvq_u32(x); }
inline Lanes choose(Mask where, Lanes a, Lanes b) { return vbslq_f32(where, a, b); }
inline Lanes only(Mask where, Lanes a) { return floats(vreinterpretq_s32_u32(where) & integers(a)); }

inline Lanes nearest_integer(Lanes x) { return vrndnq_f32(x); }

// As in vectors_avx2.h.
inline Lanes bounded_exponent(Lanes x) { return vminq_f32(all(128.f), vmaxq_f32(all(-127.f), x)); }
inline Lanes times_power_of_2(Lanes x, Lanes whole) {
  return x * floats(shift_left(add(vcvtq_s32_f32(whole), all(127)), 23));
}

// Without calls, before which the sums of a loop would be stored.
inline Halves load_halves(const void *x, int64_t n) {
  const uint16_t *from = static_cast<const uint16_t *>(x);
  if (n >= WIDTH) return vld1_u16(from);
  Halves y = vdup_n_u16(0);
  if (n >= 1) y = vld1_lane_u16(from, y, 0);
  if (n >= 2) y = vld1_lane_u16(from + 1, y, 1);
  if (n >= 3) y = vld1_lane_u16(from + 2, y, 2);
  return y;
}
inline void store_halves(void *x, Halves y, int64_t n) {
  uint16_t *to = static_cast<uint16_t *>(x);
  if (n >= WIDTH) return vst1_u16(to, y);
  if (n >= 1) vst1_lane_u16(to, y, 0);
  if (n >= 2) vst1_lane_u16(to + 1, y, 1);
  if (n >= 3) vst1_lane_u16(to + 2, y, 2);
}
inline Halves narrowed(Integers x) { return vmovn_u32(vreinterpretq_u32_s32(x)); }
inline Lanes bfloat16_to_floats(Halves x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
inline Lanes float16_to_floats(Halves x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
inline Halves round_to_float16(Lanes x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

inline Lanes load(const Float32 *x, int64_t n) {
  if (n >= WIDTH) return vld1q_f32(&x->bits);
  const float32x2_t none = vdup_n_f32(0);
  if (n <= 0) return vcombine_f32(none, none);
  const float32x2_t low = n == 1 ? vld1_lane_f32(&x->bits, none, 0) : vld1_f32(&x->bits);
  return vcombine_f32(low, n == 3 ? vld1_lane_f32(&x[2].bits, none, 0) : none);
}
inline void store(Float32 *x, Lanes y, int64_t n) {
  if (n >= WIDTH) return vst1q_f32(&x->bits, y);
  if (n >= 2) vst1_f32(&x->bits, vget_low_f32(y));
  if (n == 1) vst1q_lane_f32(&x->bits, y, 0);
  if (n == 3) vst1q_lane_f32(&x[2].bits, y, 2);
}

inline void transpose(Integers (&r)[WIDTH]) {
  const auto pairs = [](Integers x) { return vreinterpretq_s64_s32(x); };
  const Integers low = vtrn1q_s32(r[0], r[1]), next_low = vtrn2q_s32(r[0], r[1]);
  const Integers high = vtrn1q_s32(r[2], r[3]), next_high = vtrn2q_s32(r[2], r[3]);
  r[0] = vreinterpretq_s32_s64(vtrn1q_s64(pairs(low), pairs(high)));
  r[1] = vreinterpretq_s32_s64(vtrn1q_s64(pairs(next_low), pairs(next_high)));
  r[2] = vreinterpretq_s32_s64(vtrn2q_s64(pairs(low), pairs(high)));
  r[3] = vreinterpretq_s32_s64(vtrn2q_s64(pairs(next_low), pairs(next_high)));
}

inline Lanes sums_of(const Lanes (&x)[WIDTH]) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }

}  // namespace
