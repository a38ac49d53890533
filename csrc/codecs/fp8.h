// E4M3 and E5M2 elements, and the FP32 scale that float8 and block planes share.
//
//   s = fp8_max / max(amax, epsilon)      code = cast(x · s)      decoded = float(code) · (1 / s)
#pragma once

#include "common.h"

namespace dfg {

template <bool kE5M2>
struct Fp8 {
  static constexpr float kMax = kE5M2 ? 57344.0f : 448.0f;
  static constexpr int kMantissaBits = kE5M2 ? 2 : 3;
  static constexpr int kMinExponent = kE5M2 ? -14 : -6;  // of normal numbers
};

// Encode scale of a finite amax, with its mantissa cleared. Both fp8_max are 1.75 times a power of
// two, so the quotient's exponent follows from amax's without dividing.
DFG_HD float fp8_power_of_two_scale(float amax, float fp8_max) {
  const int bits = static_cast<int>(bits_of(amax));
  const int top = static_cast<int>(bits_of(fp8_max) >> 23) + 127;
  const int exponent = top - (bits >> 23) - ((bits & 0x007FFFFF) > 0x00600000 ? 1 : 0);
  const int field = bits == 0 ? 127 : exponent < 254 ? exponent : 254;
  return float_of(static_cast<uint32_t>(field) << 23);
}

// Encode scale of a finite amax. amax 0 gives 1, a quotient that overflows FLT_MAX.
DFG_HD float fp8_encode_scale(float amax, float fp8_max, float epsilon, bool power_of_two) {
  amax = larger(amax, epsilon);
  if (power_of_two) return fp8_power_of_two_scale(amax, fp8_max);
  const float scale = smaller(divide(fp8_max, amax), kFltMax);
  return amax == 0.0f ? 1.0f : scale;
}

// Code of a value that is not NaN: nearest-even, saturating; zeros keep their sign.
template <bool kE5M2>
DFG_HD uint8_t fp8_encode(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t pair;
  if (kE5M2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  }
  return static_cast<uint8_t>(pair);
#else
  // Adding a power of two whose last mantissa bit is the code's last bit rounds there.
  constexpr int kShift = 23 - Fp8<kE5M2>::kMantissaBits;
  constexpr uint32_t kLeast = static_cast<uint32_t>(127 + Fp8<kE5M2>::kMinExponent) << 23;
  const uint32_t sign = (bits_of(value) >> 24) & 0x80u;
  const float v = smaller(magnitude(value), Fp8<kE5M2>::kMax);
  const uint32_t bits = bits_of(v);
  const uint32_t exponent = (bits > kLeast ? bits : kLeast) & kExponentMask;
  const float rounded = add(v, float_of(exponent + (static_cast<uint32_t>(kShift) << 23)));
  const uint32_t steps = bits_of(rounded) & 0x1Fu;
  return static_cast<uint8_t>(sign | (steps + ((exponent - kLeast) >> kShift)));
#endif
}

// Codes of a, b, c, d in the bytes of a word, a lowest.
template <bool kE5M2>
DFG_HD uint32_t fp8_encode4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  if (kE5M2) {
    asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1;"
        " cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return word;
#else
  return static_cast<uint32_t>(fp8_encode<kE5M2>(a)) | fp8_encode<kE5M2>(b) << 8 |
         fp8_encode<kE5M2>(c) << 16 | static_cast<uint32_t>(fp8_encode<kE5M2>(d)) << 24;
#endif
}

// Code of a non-finite input; a finite one keeps `code`.
template <bool kE5M2>
DFG_HD uint8_t fp8_nonfinite(float input, uint8_t code) {
  if (is_finite(input)) return code;
  if (!kE5M2 || is_nan(input)) return 0x7F;
  return bits_of(input) >> 31 ? 0xFC : 0x7C;
}

// Value of a code, without any scale; NaN codes give the positive quiet NaN.
template <bool kE5M2>
DFG_HD float fp8_decode(uint8_t code) {
  constexpr int kShift = 23 - Fp8<kE5M2>::kMantissaBits;
  const uint32_t low = code & 0x7Fu;
#if defined(__CUDA_ARCH__)
  // The exponent is re-biased by a product: exact, subnormal codes included.
  constexpr uint32_t kRebias = static_cast<uint32_t>(254 - (1 - Fp8<kE5M2>::kMinExponent)) << 23;
  uint32_t bits = bits_of(mul(float_of(low << kShift), float_of(kRebias)));
#else
  // The same without FP32 subnormals, which cost a processor a hundred cycles or more.
  constexpr uint32_t kLeast = static_cast<uint32_t>(127 + Fp8<kE5M2>::kMinExponent) << 23;
  const uint32_t above = (low << kShift) + kLeast;
  const uint32_t subnormal = bits_of(sub(float_of(above), float_of(kLeast)));
  uint32_t bits = select(low >> Fp8<kE5M2>::kMantissaBits == 0, subnormal, above - (1u << 23));
#endif
  if (kE5M2) bits = select(low == 0x7Cu, kExponentMask, bits);
  bits = select(kE5M2 ? low > 0x7Cu : low == 0x7Fu, kNanBits, bits);
  const uint32_t sign = bits == kNanBits ? 0u : (code & 0x80u) << 24;
  return float_of(bits | sign);
}

}  // namespace dfg
