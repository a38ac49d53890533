// The two ends of decoding: 8 codes of a word as scaled floats, 8 floats as stored elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../codecs/fp8.h"
#include "../codecs/nvfp4.h"
#include "stream_common.cuh"

namespace dfg::stream {

// Codes: Word holds 8 of them, the first lowest.
//   bytes(n): of n codes, n even      load(p): 8 codes at an address that is a multiple of their
//   size has_nonfinite(word): some code may be NaN or Inf      element(word, i): its value,
//   unscaled products(word, factor, out): value · factor, for finite codes and |factor| ≤ 2^100

template <bool kE5M2>
struct Fp8Codes {
  using Word = uint2;
  static constexpr float kMax = Fp8<kE5M2>::kMax;

  static __device__ int64_t bytes(int64_t codes) { return codes; }
  static __device__ Word load(const uint8_t* codes) { return load8(codes); }

  static __device__ bool has_nonfinite(Word w) {
    // 7F in E4M3, 7C and above in E5M2 carry into the sign bit of their byte.
    constexpr uint32_t kCarry = kE5M2 ? 0x04040404u : 0x01010101u;
    return (((w.x & 0x7F7F7F7Fu) + kCarry) | ((w.y & 0x7F7F7F7Fu) + kCarry)) & 0x80808080u;
  }

  static __device__ float element(Word w, int i) {
    return fp8_decode<kE5M2>(static_cast<uint8_t>((i < 4 ? w.x : w.y) >> (8 * (i & 3))));
  }

  static __device__ void products(Word w, float factor, float (&out)[8]) {
    four_products(w.x, factor, out);
    four_products(w.y, factor, out + 4);
  }

 private:
  // FP16 holds every E4M3 and E5M2 value.
  static __device__ void four_products(uint32_t codes, float factor, float* out) {
    uint32_t low, high;
    if (kE5M2) {
      asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e5m2x2 %0, l;"
          " cvt.rn.f16x2.e5m2x2 %1, h; }"
          : "=r"(low), "=r"(high)
          : "r"(codes));
    } else {
      asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l;"
          " cvt.rn.f16x2.e4m3x2 %1, h; }"
          : "=r"(low), "=r"(high)
          : "r"(codes));
    }
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&low));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&high));
    out[0] = mul(a.x, factor);
    out[1] = mul(a.y, factor);
    out[2] = mul(b.x, factor);
    out[3] = mul(b.y, factor);
  }
};

struct E2m1Codes {
  using Word = uint32_t;
  static constexpr float kMax = 6.0f;

  static __device__ int64_t bytes(int64_t codes) { return codes / 2; }
  static __device__ Word load(const uint8_t* codes) { return load4(codes); }
  static __device__ bool has_nonfinite(Word) { return false; }
  static __device__ float element(Word w, int i) { return e2m1_decode(w >> (4 * i) & 0xFu); }

  static __device__ void products(Word w, float factor, float (&out)[8]) {
    // Two exponent bits and a mantissa bit at the top of an FP16 are 2^-14 of the value, subnormals
    // included; elements i and i + 4 lie 16 bits apart.
    const float lifted = mul(factor, 16384.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t shifted = i < 3 ? w << (9 - 4 * i) : w >> 3;
      const uint32_t pair = (shifted & 0x0E000E00u) | (w << (12 - 4 * i) & 0x80008000u);
      const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      out[i] = mul(v.x, lifted);
      out[i + 4] = mul(v.y, lifted);
    }
  }
};

// Element types of the matrix.
//   limit(max): |factor| up to which max · factor is at most the largest finite element (and small
//   enough for products)      narrow(value): one element, as decode defines it
//   store(values, target, alignment): 8 elements, none of which saturates

constexpr float kFactorLimit = 1.2676506002282294e30f;  // 2^100

// 16 bytes to an address that is a multiple of `alignment`; elements are of kBytes.
template <int kBytes>
__device__ __forceinline__ void store16(const uint32_t (&w)[4], char* target, int alignment) {
  if (alignment == 16) {
    *reinterpret_cast<uint4*>(target) = make_uint4(w[0], w[1], w[2], w[3]);
  } else if (kBytes == 4 || alignment >= 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<uint32_t*>(target)[i] = w[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      reinterpret_cast<uint16_t*>(target)[i] = static_cast<uint16_t>(w[i / 2] >> (16 * (i & 1)));
    }
  }
}

// BF16 or FP16.
template <bool kBf16>
struct Half16 {
  using Type = uint16_t;
  static constexpr int kBytes = 2;

  static __device__ constexpr float limit(float max) {
    return kBf16 ? kFactorLimit : 65504.0f / max;
  }

  static __device__ Type narrow(float value) {
    constexpr uint16_t kInf = kBf16 ? 0x7F80 : 0x7C00, kNan = kBf16 ? 0x7FC0 : 0x7E00;
    if (is_nan(value)) return kNan;
    const uint16_t bits = kBf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                : __half_as_ushort(__float2half_rn(value));
    return is_finite(value) && (bits & 0x7FFF) == kInf ? static_cast<uint16_t>(bits - 1) : bits;
  }

  static __device__ void store(const float (&v)[8], char* target, int alignment) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pair(v[2 * i], v[2 * i + 1]);
    store16<kBytes>(words, target, alignment);
  }

 private:
  static __device__ uint32_t pair(float low, float high) {
    uint32_t word;
    if (kBf16) {
      asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
    }
    return word;
  }
};

// FP32: nothing saturates, the product may be Inf.
struct Single {
  using Type = float;
  static constexpr int kBytes = 4;

  static __device__ constexpr float limit(float) { return kFactorLimit; }
  static __device__ Type narrow(float value) { return is_nan(value) ? float_of(kNanBits) : value; }

  static __device__ void store(const float (&v)[8], char* target, int alignment) {
    const uint32_t first[4] = {bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])};
    const uint32_t second[4] = {bits_of(v[4]), bits_of(v[5]), bits_of(v[6]), bits_of(v[7])};
    store16<kBytes>(first, target, alignment);
    store16<kBytes>(second, target + 16, alignment);
  }
};

}  // namespace dfg::stream
