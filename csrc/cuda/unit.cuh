// Codes of one unit, 16 elements along the contraction, and back.
#pragma once

#include "../codecs/fp8.h"
#include "../codecs/hadamard.h"
#include "../codecs/mxfp8.h"
#include "../codecs/nvfp4.h"
#include "../codecs/philox.h"
#include "element.cuh"

namespace dfg {

// Non-finite elements become zero.
template <class E>
__device__ __forceinline__ void clean_pair(typename E::Pair& w) {
  const float lo = E::lo(w), hi = E::hi(w);
  if constexpr (E::kBytes == 4) {
    w = E::pack(is_finite(lo) ? lo : 0.0f, is_finite(hi) ? hi : 0.0f);
  } else {
    w = (is_finite(lo) ? w & 0xFFFFu : 0u) | (is_finite(hi) ? w & 0xFFFF0000u : 0u);
  }
}

template <class E, int kCount>
__device__ __forceinline__ void clean_pairs(typename E::Pair (&p)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) clean_pair<E>(p[k]);
}

// 16 FP8 codes of what `at` gives for 0 … 15.
template <bool kE5M2, class At>
__device__ __forceinline__ uint4 fp8_codes_at(const At& at) {
  uint4 codes;
  auto* word = reinterpret_cast<uint32_t*>(&codes);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    word[w] = fp8_encode4<kE5M2>(at(4 * w), at(4 * w + 1), at(4 * w + 2), at(4 * w + 3));
  }
  return codes;
}

// Of the unit's elements as they are.
template <class Unit>
__device__ __forceinline__ uint4 fp8_codes(const Unit& u, bool e5m2) {
  const auto at = [&](int k) { return u.at(k); };
  return e5m2 ? fp8_codes_at<true>(at) : fp8_codes_at<false>(at);
}

// Of x · s.
template <class Unit>
__device__ __forceinline__ uint4 fp8_codes(const Unit& u, float s, bool e5m2) {
  const auto at = [&](int k) { return mul(u.at(k), s); };
  return e5m2 ? fp8_codes_at<true>(at) : fp8_codes_at<false>(at);
}

// Multiplies both elements of a BF16 pair by powers of two. The products are exact, or so small
// that they are encoded as zero, or so large that they saturate.
template <class E, int kCount>
__device__ __forceinline__ void scale_pairs(typename E::Pair (&p)[kCount], float lo, float hi) {
  const auto both = E::pack(lo, hi);
#pragma unroll
  for (int k = 0; k < kCount; ++k) p[k] = E::mul(p[k], both);
}

// Codes of non-finite elements; `original` is the unit before cleaning.
template <class Unit>
__device__ __forceinline__ void mark_nonfinite(uint4& codes, const Unit& original, bool e5m2) {
  auto* word = reinterpret_cast<uint32_t*>(&codes);
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const float x = original.at(k);
    if (is_finite(x)) continue;
    const uint32_t code = e5m2 ? fp8_nonfinite<true>(x, 0) : fp8_nonfinite<false>(x, 0);
    word[k / 4] = (word[k / 4] & ~(0xFFu << (8 * (k % 4)))) | code << (8 * (k % 4));
  }
}

// Decoded values, rounded to the input's dtype and saturated. all_finite: no code is NaN or Inf.
template <class E>
__device__ __forceinline__ RowUnit<E> fp8_values(const uint4& codes, float scale, bool e5m2,
                                                 bool all_finite) {
  const auto* word = reinterpret_cast<const uint32_t*>(&codes);
  RowUnit<E> result;
  if (all_finite) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const auto two = static_cast<unsigned short>(word[k / 2] >> (16 * (k % 2)));
      uint32_t halves;
      if (e5m2) {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(two));
      } else {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
      }
      using Half = Element<Dtype::f16>;
      result.p[k] = E::pack_saturated(mul(Half::lo(halves), scale), mul(Half::hi(halves), scale));
    }
    return result;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float v[2];
    for (int h = 0; h < 2; ++h) {
      const auto code = static_cast<uint8_t>(word[k / 2] >> (16 * (k % 2) + 8 * h));
      v[h] = mul(e5m2 ? fp8_decode<true>(code) : fp8_decode<false>(code), scale);
    }
    result.p[k] = E::pack_saturated(v[0], v[1]);
    // The hardware's NaN has another payload than the one that numerics.md hashes.
    if constexpr (E::kBytes == 2) {
      if (is_nan(v[0])) result.p[k] = (result.p[k] & 0xFFFF0000u) | E::kNan;
      if (is_nan(v[1])) result.p[k] = (result.p[k] & 0xFFFFu) | E::kNan << 16;
    } else {
      if (is_nan(v[0])) result.p[k].x = kNanBits;
      if (is_nan(v[1])) result.p[k].y = kNanBits;
    }
  }
  return result;
}

// Sign bits of elements 8·part … + 7, each at the top bit of its nibble.
template <class Unit>
__device__ __forceinline__ uint32_t sign_nibbles_of_floats(const Unit& u, int part) {
  uint32_t signs = 0;
#pragma unroll
  for (int k = 0; k < 8; ++k) signs |= (bits_of(u.at(8 * part + k)) >> 31) << (4 * k + 3);
  return signs;
}

__device__ __forceinline__ uint32_t sign_nibbles(const FloatUnit& u, int part) {
  return sign_nibbles_of_floats(u, part);
}

__device__ __forceinline__ uint32_t interleaved_signs(uint32_t even, uint32_t odd) {
  return ((even & 0x80808080u) >> 4) | (odd & 0x80808080u);
}

// Sixteen-bit elements: byte permutations gather the bytes that hold the signs.
template <class E>
__device__ __forceinline__ uint32_t sign_nibbles(const RowUnit<E>& u, int part) {
  if constexpr (E::kBytes == 4) {
    return sign_nibbles_of_floats(u, part);
  } else {
    const uint32_t a = __byte_perm(u.p[4 * part], u.p[4 * part + 1], 0x7351);
    const uint32_t b = __byte_perm(u.p[4 * part + 2], u.p[4 * part + 3], 0x7351);
    return interleaved_signs(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  }
}

template <class E, int kHalf>
__device__ __forceinline__ uint32_t sign_nibbles(const ColumnUnit<E, kHalf>& u, int part) {
  if constexpr (E::kBytes == 4) {
    return sign_nibbles_of_floats(u, part);
  } else {
    constexpr int kBytes = kHalf ? 0x7632 : 0x5410;
    const int k = 8 * part;
    const uint32_t even = __byte_perm(__byte_perm(u.p[k], u.p[k + 2], 0x7351),
                                      __byte_perm(u.p[k + 4], u.p[k + 6], 0x7351), kBytes);
    const uint32_t odd = __byte_perm(__byte_perm(u.p[k + 1], u.p[k + 3], 0x7351),
                                     __byte_perm(u.p[k + 5], u.p[k + 7], 0x7351), kBytes);
    return interleaved_signs(even, odd);
  }
}

// Four codes as the nibbles of the low 16 bits; what lies above is of no use. Products: shifts and
// disjunctions would compete for the integer pipeline.
__device__ __forceinline__ uint32_t nibbles(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return ((d * 16u + c) * 16u + b) * 16u + a;
}

// Codes of |x| · m; kTame: every |x| · m is below 7, so that none needs clamping to 6.
template <bool kTame, class Unit>
__device__ __forceinline__ uint2 nvfp4_nearest(const Unit& magnitudes, float m) {
  uint2 codes;
  auto* word = reinterpret_cast<uint32_t*>(&codes);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t quad[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32_t low[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float v = mul(magnitudes.at(8 * part + 4 * q + k), m);
        low[k] = e2m1_nearest_low(kTame ? v : fminf(v, 6.0f));
      }
      quad[q] = nibbles(low[0], low[1], low[2], low[3]);
    }
    word[part] = __byte_perm(quad[0], quad[1], 0x5410);
  }
  return codes;
}

// Where the random bits of a unit come from: numerics.md, "Stochastic rounding".
struct Draw {
  uint32_t seed, stream, step;
  uint32_t counter;  // j >> 3 of the unit's first element
  uint32_t shift;    // j & 7 of it
  uint32_t row;      // i
  uint32_t content;  // h
};

// Words whose 16-bit halves belong to elements 8·part … + 7 of the unit.
__device__ __forceinline__ Words draw_words(const Draw& draw, int part) {
  const uint32_t counter = draw.counter + part;
  Words words = philox4x32(counter, draw.row, draw.step, draw.content, draw.seed, draw.stream);
  if (draw.shift == 0) return words;
  // A shard that does not start at a multiple of 8: its elements span two counters.
  const Words next =
      philox4x32(counter + 1, draw.row, draw.step, draw.content, draw.seed, draw.stream);
  uint32_t w[8];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    w[k] = words.word[k];
    w[k + 4] = next.word[k];
  }
#pragma unroll
  for (int k = 0; k < 6; ++k) w[k] = draw.shift & 4 ? w[k + 2] : w[k];
#pragma unroll
  for (int k = 0; k < 5; ++k) w[k] = draw.shift & 2 ? w[k + 1] : w[k];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    words.word[k] = draw.shift & 1 ? __funnelshift_r(w[k], w[k + 1], 16) : w[k];
  }
  return words;
}

template <bool kTame, class Unit>
__device__ __forceinline__ uint2 nvfp4_stochastic(const Unit& magnitudes, float m,
                                                  const Draw& draw) {
  uint2 codes;
  auto* word = reinterpret_cast<uint32_t*>(&codes);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const Words random = draw_words(draw, part);
    uint32_t top[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      // 256·r + kStochasticNoise: the two bytes of r between those of the constant.
      const uint32_t noise =
          __byte_perm(random.word[k / 2], kStochasticNoise, k & 1 ? 0x7324 : 0x7104);
      const float v = mul(magnitudes.at(8 * part + k), m);
      top[k] = e2m1_stochastic_top(kTame ? v : fminf(v, 6.0f), noise);
    }
    const auto top_bytes = [&](int k) {  // of elements k, k + 2, k + 4 and k + 6
      return __byte_perm(__byte_perm(top[k], top[k + 2], 0x0073),
                         __byte_perm(top[k + 4], top[k + 6], 0x0073), 0x5410);
    };
    const uint32_t both = top_bytes(1) * 16 + top_bytes(0);
    word[part] = both - ((both & 0x88888888u) >> 3);  // rounded up from 6: 8 becomes 7
  }
  return codes;
}

template <class Unit>
__device__ __forceinline__ uint2 signs_of(const Unit& u) {
  return make_uint2(sign_nibbles(u, 0), sign_nibbles(u, 1));
}

// Codes of a unit given as magnitudes and signs. top: largest magnitude, times m.
template <class Unit>
__device__ __forceinline__ uint2 nvfp4_codes(const Unit& magnitudes, uint2 signs, float top,
                                             float m, bool stochastic, const Draw& draw) {
  uint2 codes;
  if (top < 7.0f) {
    codes = stochastic ? nvfp4_stochastic<true>(magnitudes, m, draw)
                       : nvfp4_nearest<true>(magnitudes, m);
  } else {  // a scale byte that is subnormal, or an amax that was given too small
    codes = stochastic ? nvfp4_stochastic<false>(magnitudes, m, draw)
                       : nvfp4_nearest<false>(magnitudes, m);
  }
  return make_uint2(codes.x | signs.x, codes.y | signs.y);
}

__device__ __forceinline__ float e4m3_value(uint8_t byte) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(byte)));
  return Element<Dtype::f16>::lo(halves);
}

// Correctly rounded 1/a for a of 2^-126 … 2^126, as reciprocal() is without its branch for the
// rest; NaN for 0.
__device__ __forceinline__ float normal_reciprocal(float a) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(a));
  return __fmaf_rn(guess, -__fmaf_rn(a, guess, -1.0f), guess);
}

// As nvfp4_multiplier, with the hardware's conversion; byte is not NaN.
__device__ __forceinline__ float nvfp4_multiplier_fast(uint8_t byte, Nvfp4Global global) {
  const float product = mul(e4m3_value(byte), global.inverse);
  // 1/S is at most 2^116.7 and a byte stands for 2^-9 … 448, or 0: min() takes FLT_MAX over NaN.
  constexpr float kLeast = 8.0e-31f;  // about 2^-100
  return fminf(global.inverse < kLeast ? reciprocal(product) : normal_reciprocal(product), kFltMax);
}

// Decoded values of one block, rounded to the input's dtype and saturated.
template <class E>
__device__ __forceinline__ RowUnit<E> nvfp4_values(const uint2& codes, uint8_t byte, float g) {
  const float factor = mul(fp8_decode<false>(byte), g);
  const bool is_nan_block = byte == kNvfp4NanScale;
  const auto* word = reinterpret_cast<const uint32_t*>(&codes);
  RowUnit<E> result;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t two = word[k / 4] >> (8 * (k % 4));
    result.p[k] = E::pack_saturated(mul(e2m1_decode(two & 15u), factor),
                                    mul(e2m1_decode(two >> 4 & 15u), factor));
    if constexpr (E::kBytes == 2) {
      if (is_nan_block) result.p[k] = E::kNan | E::kNan << 16;
    } else {
      if (is_nan_block) result.p[k] = make_uint2(kNanBits, kNanBits);
    }
  }
  return result;
}

// Elements from `count` on become zero.
template <class E>
__device__ __forceinline__ void keep_first(RowUnit<E>& u, int count) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (2 * k + 1 < count) continue;
    const uint32_t mask = 2 * k < count ? 0xFFFFFFFFu : 0u;
    if constexpr (E::kBytes == 2) {
      u.p[k] &= mask & 0xFFFFu;
    } else {
      u.p[k] = make_uint2(u.p[k].x & mask, 0u);
    }
  }
}

// Bit pattern that the content hash sees: 16 bits, or FP32 rotated left by one.
__device__ __forceinline__ uint32_t hashed(uint32_t fp32_bits) {
  return fp32_bits << 1 | fp32_bits >> 31;
}

template <class E>
__device__ __forceinline__ uint32_t content_of_row(const RowUnit<E>& u) {
  uint32_t h = 0;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    constexpr uint32_t kHigh = 0x10000u;
    const uint32_t even = hash_factor(2 * k), odd = hash_factor(2 * k + 1);
    if constexpr (E::kBytes == 2) {
      // word · even counts the high half 2^16 · even times; the second product mends that.
      h += u.p[k] * even + (u.p[k] >> 16) * (odd - kHigh * even);
    } else {
      h += hashed(u.p[k].x) * even + hashed(u.p[k].y) * odd;
    }
  }
  return h;
}

// Hashes of both columns.
template <class E>
__device__ __forceinline__ uint2 content_of_columns(const typename E::Pair (&p)[16]) {
  uint32_t lo = 0, hi = 0;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const uint32_t factor = hash_factor(k);
    if constexpr (E::kBytes == 2) {
      lo += p[k] * factor;
      hi += (p[k] >> 16) * factor;
    } else {
      lo += hashed(p[k].x) * factor;
      hi += hashed(p[k].y) * factor;
    }
  }
  if constexpr (E::kBytes == 2) lo -= hi << 16;
  return make_uint2(lo, hi);
}

// The rotated unit: BF16 is rounded to BF16, other dtypes stay FP32.
template <class E>
struct RotatedUnit {
  using Type = FloatUnit;
};
template <>
struct RotatedUnit<Element<Dtype::bf16>> {
  using Type = RowUnit<Element<Dtype::bf16>>;
};

// The random signs of the rotation. Element k of a pair's halves is first and second.
template <class E>
__device__ __forceinline__ void flip(typename E::Pair& w, int first, int second) {
  const bool lo = kHadamardSigns >> first & 1u, hi = kHadamardSigns >> second & 1u;
  if constexpr (E::kBytes == 2) {
    w ^= (lo ? 0x8000u : 0u) | (hi ? 0x80000000u : 0u);
  } else {
    w.x ^= lo ? 0x80000000u : 0u;
    w.y ^= hi ? 0x80000000u : 0u;
  }
}

template <class E>
__device__ __forceinline__ void flip_row(RowUnit<E>& u) {
#pragma unroll
  for (int k = 0; k < 8; ++k) flip<E>(u.p[k], 2 * k, 2 * k + 1);
}

template <class E>
__device__ __forceinline__ void flip_columns(typename E::Pair (&p)[16]) {
#pragma unroll
  for (int k = 0; k < 16; ++k) flip<E>(p[k], k, k);
}

// Rotates a unit whose signs were flipped. kFast: see hadamard16_of_bf16.
template <class E, bool kFast, class Unit>
__device__ __forceinline__ typename RotatedUnit<E>::Type rotate(const Unit& u) {
  FloatUnit r;
#pragma unroll
  for (int k = 0; k < 16; ++k) r.v[k] = u.at(k);
  if constexpr (kFast) {
    hadamard16_of_bf16(r.v);
  } else {
    hadamard16(r.v, false);
  }
  if constexpr (E::kRotationIsRounded) {
    RowUnit<E> result;
#pragma unroll
    for (int k = 0; k < 8; ++k) result.p[k] = E::pack(r.v[2 * k], r.v[2 * k + 1]);
    return result;
  } else {
    return r;
  }
}

template <class E>
__device__ __forceinline__ void clean(RowUnit<E>& u) {
  clean_pairs<E>(u.p);
}
__device__ __forceinline__ void clean(FloatUnit& u) {
#pragma unroll
  for (int k = 0; k < 16; ++k) u.v[k] = is_finite(u.v[k]) ? u.v[k] : 0.0f;
}

// In place.
template <class E>
__device__ __forceinline__ void drop_signs(RowUnit<E>& u) {
#pragma unroll
  for (int k = 0; k < 8; ++k) u.p[k] = E::abs(u.p[k]);
}
__device__ __forceinline__ void drop_signs(FloatUnit& u) {
#pragma unroll
  for (int k = 0; k < 16; ++k) u.v[k] = fabsf(u.v[k]);
}

// A unit after the rotation, non-finite values taken out. kFast: by hadamard16_of_bf16, which wants
// more registers.
template <class E, bool kFast>
struct Rotated {
  typename RotatedUnit<E>::Type magnitudes;
  uint2 signs;
  uint32_t amax;  // FP32 bits
  bool is_bad;    // there were non-finite values

  template <class Unit>
  __device__ __forceinline__ explicit Rotated(const Unit& u) : is_bad(false) {
    take(rotate<E, kFast>(u));
    if (amax < (kFast ? kHadamardSafe : kExponentMask)) return;
    if (kFast) take(rotate<E, false>(u));
    is_bad = dfg::is_bad(amax);
    if (is_bad) {
      auto cleaned = rotate<E, false>(u);
      clean(cleaned);
      take(cleaned);
    }
  }

 private:
  __device__ __forceinline__ void take(const typename RotatedUnit<E>::Type& rotated) {
    magnitudes = rotated;
    signs = signs_of(rotated);
    drop_signs(magnitudes);
    amax = max_of_magnitudes(magnitudes);
  }
};

}  // namespace dfg
