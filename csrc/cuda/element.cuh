// Input elements two at a time: a Pair is one 32-bit word of BF16 or FP16, or two FP32 values.
//
// In a tile's row the two are neighbours along K; a column phase reads one Pair per row and so has
// two columns in its halves.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../codecs/common.h"
#include "../kernels.h"

namespace dfg {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

template <Dtype kDtype>
struct Element;

template <>
struct Element<Dtype::bf16> {
  using Pair = uint32_t;
  static constexpr Dtype kDtype = Dtype::bf16;
  static constexpr int kBytes = 2;
  static constexpr bool kRotationIsRounded = true;

  static __device__ __forceinline__ float lo(Pair w) { return float_of(w << 16); }
  static __device__ __forceinline__ float hi(Pair w) { return float_of(w & 0xFFFF0000u); }
  static __device__ __forceinline__ Pair pack(float lo, float hi) {
    Pair w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
  static __device__ __forceinline__ Pair pack_saturated(float lo, float hi) {
    Pair w;
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
  static constexpr uint32_t kNan = 0x7FC0u;
  static __device__ __forceinline__ Pair abs(Pair w) {
    Pair r;
    asm("abs.bf16x2 %0, %1;" : "=r"(r) : "r"(w));
    return r;
  }
  // Larger of both halves; NaN wins.
  static __device__ __forceinline__ Pair max(Pair a, Pair b) {
    Pair r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ Pair mul(Pair a, Pair b) {
    Pair r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
};

template <>
struct Element<Dtype::f16> {
  using Pair = uint32_t;
  static constexpr Dtype kDtype = Dtype::f16;
  static constexpr int kBytes = 2;
  static constexpr bool kRotationIsRounded = false;

  static __device__ __forceinline__ float lo(Pair w) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(w)));
  }
  static __device__ __forceinline__ float hi(Pair w) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(w >> 16)));
  }
  static __device__ __forceinline__ Pair pack(float lo, float hi) {
    Pair w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
  static __device__ __forceinline__ Pair pack_saturated(float lo, float hi) {
    Pair w;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
  static constexpr uint32_t kNan = 0x7E00u;
  static __device__ __forceinline__ Pair abs(Pair w) {
    Pair r;
    asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(w));
    return r;
  }
  // Larger of both halves; NaN wins.
  static __device__ __forceinline__ Pair max(Pair a, Pair b) {
    Pair r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
};

template <>
struct Element<Dtype::f32> {
  using Pair = uint2;
  static constexpr Dtype kDtype = Dtype::f32;
  static constexpr int kBytes = 4;
  static constexpr bool kRotationIsRounded = false;

  static __device__ __forceinline__ float lo(Pair w) { return float_of(w.x); }
  static __device__ __forceinline__ float hi(Pair w) { return float_of(w.y); }
  static __device__ __forceinline__ Pair pack(float lo, float hi) {
    return make_uint2(bits_of(lo), bits_of(hi));
  }
  static __device__ __forceinline__ float saturated(float v) {
    return is_nan(v) ? v : fminf(fmaxf(v, -kFltMax), kFltMax);
  }
  static __device__ __forceinline__ Pair pack_saturated(float lo, float hi) {
    return pack(saturated(lo), saturated(hi));
  }
  static __device__ __forceinline__ Pair abs(Pair w) {
    return make_uint2(w.x & 0x7FFFFFFFu, w.y & 0x7FFFFFFFu);
  }
  static __device__ __forceinline__ Pair max(Pair a, Pair b) {
    return make_uint2(::max(a.x, b.x), ::max(a.y, b.y));
  }
};

__device__ __forceinline__ uint32_t shuffle_xor(uint32_t w, int mask) {
  return __shfl_xor_sync(kFullWarp, w, mask);
}
__device__ __forceinline__ uint2 shuffle_xor(uint2 w, int mask) {
  return make_uint2(shuffle_xor(w.x, mask), shuffle_xor(w.y, mask));
}

// 16 consecutive elements along K, in Pairs.
template <class E>
struct RowUnit {
  typename E::Pair p[8];
  __device__ __forceinline__ float at(int k) const {
    return k & 1 ? E::hi(p[k / 2]) : E::lo(p[k / 2]);
  }
};

// 16 consecutive elements along M of one of the two columns in 16 Pairs.
template <class E, int kHalf>
struct ColumnUnit {
  const typename E::Pair (&p)[16];
  __device__ __forceinline__ float at(int k) const { return kHalf ? E::hi(p[k]) : E::lo(p[k]); }
};

// 16 FP32 values.
struct FloatUnit {
  float v[16];
  __device__ __forceinline__ float at(int k) const { return v[k]; }
};

template <class E, int kCount>
__device__ __forceinline__ typename E::Pair pairs_abs_max(const typename E::Pair (&p)[kCount]) {
  typename E::Pair m = E::abs(p[0]);
#pragma unroll
  for (int k = 1; k < kCount; ++k) m = E::max(m, E::abs(p[k]));
  return m;
}

// Of values without signs.
template <class E, int kCount>
__device__ __forceinline__ typename E::Pair pairs_max(const typename E::Pair (&p)[kCount]) {
  typename E::Pair m = p[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) m = E::max(m, p[k]);
  return m;
}

// Largest magnitude of both halves, as FP32 bits: at or above 7F800000 something is not finite.
template <class E>
__device__ __forceinline__ uint32_t halves_max(typename E::Pair m) {
  return max(bits_of(E::lo(m)), bits_of(E::hi(m)));
}

__device__ __forceinline__ bool is_bad(uint32_t magnitude_bits) {
  return magnitude_bits >= kExponentMask;
}

// Largest finite magnitude of a unit, FP32 bits.
template <class Unit>
__device__ __forceinline__ uint32_t finite_max(const Unit& unit) {
  uint32_t m = 0;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const uint32_t bits = bits_of(unit.at(k)) & 0x7FFFFFFFu;
    m = is_bad(bits) ? m : max(m, bits);
  }
  return m;
}

template <class Unit>
__device__ __forceinline__ uint32_t any_max(const Unit& unit) {
  uint32_t m = 0;
#pragma unroll
  for (int k = 0; k < 16; ++k) m = max(m, bits_of(unit.at(k)) & 0x7FFFFFFFu);
  return m;
}
template <class E>
__device__ __forceinline__ uint32_t any_max(const RowUnit<E>& unit) {
  return halves_max<E>(pairs_abs_max<E>(unit.p));
}

// As any_max, of a unit without signs.
__device__ __forceinline__ uint32_t max_of_magnitudes(const FloatUnit& unit) {
  uint32_t m = 0;
#pragma unroll
  for (int k = 0; k < 16; ++k) m = max(m, bits_of(unit.v[k]));
  return m;
}
template <class E>
__device__ __forceinline__ uint32_t max_of_magnitudes(const RowUnit<E>& unit) {
  return halves_max<E>(pairs_max<E>(unit.p));
}

}  // namespace dfg
