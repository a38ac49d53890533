// Vector basics of the CPU kernels: rows of 128 lanes, transposition, maxima, dtype conversions.
//
// Every loop over lanes has a constant trip count and no branch, so that the compiler vectorises it
// for the instruction set of the file that includes this. All names live in DFG_VARIANT: the same
// source is compiled once per instruction set.
#pragma once

#include "../codecs/common.h"
#include "../kernels.h"
#include "tiles.h"

#if defined(__FAST_MATH__)
#error "codes and scales are exact: build without -ffast-math and with -ffp-contract=off"
#endif

namespace dfg {
namespace DFG_VARIANT {

constexpr int kLanes = kTile;
constexpr uint32_t kMagnitudeMask = 0x7FFFFFFFu;

// One cache line more than the lanes: a column of a tile would else lie in 8 sets of the cache.
using Lanes = float[kLanes + 16];
using Words32 = uint32_t[kLanes];
using Bytes = uint8_t[kLanes];

using Float4 = float __attribute__((vector_size(16)));
using Byte16 = uint8_t __attribute__((vector_size(16)));

#if defined(__clang__)
#define DFG_SHUFFLE(mask_type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define DFG_SHUFFLE(mask_type, a, b, ...) __builtin_shuffle(a, b, mask_type{__VA_ARGS__})
#endif

using Int4 = int32_t __attribute__((vector_size(16)));

DFG_HD Float4 interleave_low(Float4 a, Float4 b) { return DFG_SHUFFLE(Int4, a, b, 0, 4, 1, 5); }
DFG_HD Float4 interleave_high(Float4 a, Float4 b) { return DFG_SHUFFLE(Int4, a, b, 2, 6, 3, 7); }
DFG_HD Byte16 interleave_low(Byte16 a, Byte16 b) {
  return DFG_SHUFFLE(Byte16, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
DFG_HD Byte16 interleave_high(Byte16 a, Byte16 b) {
  return DFG_SHUFFLE(Byte16, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// One of the log2(n) perfect shuffles that together transpose an n × n block.
template <int kCount, class V>
DFG_HD void shuffle_rows(const V (&in)[kCount], V (&out)[kCount]) {
  DFG_UNROLL
  for (int i = 0; i < kCount / 2; ++i) {
    out[2 * i] = interleave_low(in[i], in[i + kCount / 2]);
    out[2 * i + 1] = interleave_high(in[i], in[i + kCount / 2]);
  }
}

inline void transpose(const Lanes* __restrict in, Lanes* __restrict out) {
  for (int row = 0; row < kLanes; row += 4) {
    for (int lane = 0; lane < kLanes; lane += 4) {
      Float4 a[4], b[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&a[i], &in[row + i][lane], sizeof(Float4));
      shuffle_rows<4>(a, b);
      shuffle_rows<4>(b, a);
      for (int i = 0; i < 4; ++i) std::memcpy(&out[lane + i][row], &a[i], sizeof(Float4));
    }
  }
}

// out[lane][row] = in[row][lane] for `rows` rows, a multiple of 16.
inline void transpose(const Bytes* __restrict in, int rows, Bytes* __restrict out) {
  for (int row = 0; row < rows; row += 16) {
    for (int lane = 0; lane < kLanes; lane += 16) {
      Byte16 a[16], b[16];
      DFG_UNROLL
      for (int i = 0; i < 16; ++i) std::memcpy(&a[i], &in[row + i][lane], sizeof(Byte16));
      shuffle_rows<16>(a, b);
      shuffle_rows<16>(b, a);
      shuffle_rows<16>(a, b);
      shuffle_rows<16>(b, a);
      DFG_UNROLL
      for (int i = 0; i < 16; ++i) std::memcpy(&out[lane + i][row], &a[i], sizeof(Byte16));
    }
  }
}

// Bits of magnitudes compare as integers do; signed ones are what every instruction set has.
DFG_HD uint32_t larger_bits(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
}

// The largest of lanes [first, first + count).
inline uint32_t largest(const uint32_t* lanes, int count) {
  uint32_t result = 0;
  for (int lane = 0; lane < count; ++lane) result = larger_bits(result, lanes[lane]);
  return result;
}

// Bits of max |v| of each lane over `rows` rows, NaN and Inf included.
inline void magnitudes(const Lanes* __restrict v, int rows, Words32& __restrict top) {
  for (int lane = 0; lane < kLanes; ++lane) top[lane] = 0;
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      top[lane] = larger_bits(top[lane], bits_of(v[row][lane]) & kMagnitudeMask);
    }
  }
}

// *target = max(*target, value) for magnitudes, between threads. A target of -1 counts as less.
inline void raise(float* target, uint32_t bits) {
  int32_t* word = reinterpret_cast<int32_t*>(target);
  int32_t held = __atomic_load_n(word, __ATOMIC_RELAXED);
  const int32_t wanted = static_cast<int32_t>(bits);
  while (held < wanted && !__atomic_compare_exchange_n(word, &held, wanted, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
  }
}

// What the three input dtypes mean, and how FP32 values are rounded to them.
template <Dtype kDtype>
struct Element;

template <>
struct Element<Dtype::f32> {
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7F800000u, kMagnitude = 0x7FFFFFFFu;
  static DFG_HD float widen(Bits bits) { return float_of(bits); }
  static DFG_HD Bits narrow(float value) { return bits_of(value); }
  // What the content hash reads.
  static DFG_HD uint32_t pattern(float value) { return bits_of(value) << 1 | bits_of(value) >> 31; }
  static DFG_HD float rounded(float value) { return value; }
  static DFG_HD float saturated(float value) {
    const float v =
        float_of(bits_of(smaller(magnitude(value), kFltMax)) | (bits_of(value) & 0x80000000u));
    return is_nan(value) ? float_of(kNanBits) : v;
  }
};

template <>
struct Element<Dtype::bf16> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7F80u, kMagnitude = 0x7FFFu;
  static DFG_HD float widen(Bits bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
  static DFG_HD Bits narrow(float value) { return static_cast<Bits>(bits_of(value) >> 16); }
  static DFG_HD uint32_t pattern(float value) { return bits_of(value) >> 16; }
  // Nearest-even, overflow to infinity.
  static DFG_HD float rounded(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t result = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
    return float_of((bits & kMagnitudeMask) > kExponentMask ? kNanBits : result);
  }
  static DFG_HD float saturated(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t top = bits & kMagnitudeMask;
    const uint32_t up = (top + 0x7FFFu + (top >> 16 & 1u)) & 0xFFFF0000u;
    const uint32_t result = (up < 0x7F7F0000u ? up : 0x7F7F0000u) | (bits & 0x80000000u);
    return float_of(top > kExponentMask ? kNanBits : result);
  }
};

template <>
struct Element<Dtype::f16> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7C00u, kMagnitude = 0x7FFFu;
  static constexpr uint32_t kLeast = 113u << 23;  // 2^-14, the least normal number
  static constexpr float kMax = 65504.0f;
  // FP16's subnormal numbers lie evenly above zero as do those above kLeast: moved by it, no FP32
  // subnormal is computed with, which would cost a hundred cycles or more.
  static DFG_HD float widen(Bits bits) {
    const uint32_t low = static_cast<uint32_t>(bits & kMagnitude) << 13;
    const uint32_t above = low + kLeast;
    const uint32_t subnormal = bits_of(sub(float_of(above), float_of(kLeast)));
    const uint32_t finite = select(low < 0x00800000u, subnormal, above - 0x00800000u);
    const uint32_t top = low >= 0x0F800000u ? low | kExponentMask : finite;
    return float_of(top | static_cast<uint32_t>(bits & 0x8000u) << 16);
  }
  // Of a value that is an FP16 number already.
  static DFG_HD Bits narrow(float value) {
    const uint32_t bits = bits_of(value), top = bits & kMagnitudeMask;
    const uint32_t above = bits_of(add(float_of(top), float_of(kLeast)));
    const uint32_t finite = select(top < kLeast, above, top + 0x00800000u) - kLeast;
    const uint32_t nonfinite = (top & 0x007FFFFFu) + (static_cast<uint32_t>(kInfinity) << 13);
    const uint32_t low = select(top >= kExponentMask, nonfinite, finite);
    return static_cast<Bits>(low >> 13 | (bits >> 16 & 0x8000u));
  }
  static DFG_HD uint32_t pattern(float value) { return narrow(value); }
  static DFG_HD float rounded(float value) { return value; }
  static DFG_HD float saturated(float value) {
    const float v = smaller(magnitude(value), kMax);
    const uint32_t bits = bits_of(v);
    const uint32_t exponent = (bits > kLeast ? bits : kLeast) & kExponentMask;
    // A power of two whose last mantissa bit is FP16's: the addition rounds.
    const float grid = float_of(exponent + (13u << 23));
    const uint32_t result = bits_of(sub(add(v, grid), grid)) | (bits_of(value) & 0x80000000u);
    return float_of(is_nan(value) ? kNanBits : result);
  }
};

// Calls function(Element<dtype>{}).
template <class Function>
DFG_HD void with_element(Dtype dtype, const Function& function) {
  if (dtype == Dtype::bf16) {
    function(Element<Dtype::bf16>{});
  } else if (dtype == Dtype::f16) {
    function(Element<Dtype::f16>{});
  } else {
    function(Element<Dtype::f32>{});
  }
}

}  // namespace DFG_VARIANT
}  // namespace dfg
