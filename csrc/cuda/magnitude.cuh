// Running maxima of |x| over finite elements, a 32-bit word at a time.
//
// |bits| of a finite element plus one unit of the exponent's last place, its lifted form, stays
// below the sign bit; of NaN and Inf it reaches it. So a signed integer maximum skips non-finite
// elements by itself, and a maximum has no order: two runs give the same bits.
#pragma once

#include <cuda_fp16.h>

#include "../codecs/common.h"
#include "../kernels.h"
#include "stream_common.cuh"

namespace dfg::stream {

// 16-bit types: two elements in the signed halves of a word.
template <Dtype kDtype>
struct Magnitude {
  using Element = uint16_t;
  static constexpr uint32_t kMask = 0x7FFF7FFFu;
  static constexpr uint32_t kLift = kDtype == Dtype::bf16 ? 0x00800080u : 0x04000400u;

  static __device__ uint32_t lifted(uint32_t word) { return (word & kMask) + kLift; }
  static __device__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxs2(a, b); }

  // Of |bits| of an element, as FP32 bits.
  static __device__ uint32_t widened(uint32_t bits) {
    if (kDtype == Dtype::bf16) return bits << 16;
    return bits_of(__half2float(__ushort_as_half(static_cast<unsigned short>(bits))));
  }
  // |bits| of the largest of the warp, in every lane.
  static __device__ uint32_t reduced(uint32_t maximum) {
    const uint32_t bits = maximum - kLift, low = bits & 0xFFFFu, high = bits >> 16;
    return __reduce_max_sync(0xFFFFFFFFu, low > high ? low : high);
  }
};

template <>
struct Magnitude<Dtype::f32> {
  using Element = uint32_t;
  static constexpr uint32_t kMask = 0x7FFFFFFFu;
  static constexpr uint32_t kLift = 0x00800000u;

  static __device__ uint32_t lifted(uint32_t word) { return (word & kMask) + kLift; }
  static __device__ uint32_t larger(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>(max(static_cast<int32_t>(a), static_cast<int32_t>(b)));
  }
  static __device__ uint32_t widened(uint32_t bits) { return bits; }
  static __device__ uint32_t reduced(uint32_t maximum) {
    return __reduce_max_sync(0xFFFFFFFFu, maximum - kLift);
  }
};

// Non-negative floats, and the -1 of a slot that did not run, order like their signed bits.
__device__ __forceinline__ void raise(float* amax, uint32_t bits) {
  atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(bits));
}

// Experts, whose rows end at ends[0 … count − 1]; ends that decrease are taken as in order.
struct Ends {
  const int32_t* ends;
  int32_t count;
  int32_t own;  // this lane's of the first 32

  __device__ explicit Ends(const Groups& groups) : ends(groups.ends), count(groups.count) {
    const int lane = threadIdx.x % kWarp;
    own = lane < count ? ends[lane] : INT32_MIN;
  }

  // One warp. The first expert that ends behind `row`, −1 behind all.
  __device__ __forceinline__ int expert_of(int64_t row) const {
    unsigned found = __ballot_sync(0xFFFFFFFFu, own > row);
    if (found) return __ffs(found) - 1;
    const int lane = threadIdx.x % kWarp;
    for (int base = kWarp; base < count; base += kWarp) {
      const bool is_behind = base + lane < count && ends[base + lane] > row;
      found = __ballot_sync(0xFFFFFFFFu, is_behind);
      if (found) return base + __ffs(found) - 1;
    }
    return -1;
  }
};

}  // namespace dfg::stream
