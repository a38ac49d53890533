// What an instance knows of a plane's options when it is compiled; the rest is read at run time.
#pragma once

#include "../kernels.h"

namespace dfg {

// kPlain: E4M3, 1-D blocks, one statistic per tensor, power-of-two block scales, no epsilon, scales
// not swizzled.
// kStochastic, kRht: 0 or 1 where it is known for nvfp4, else kAtRunTime.
constexpr int kAtRunTime = -1;

template <Codec kCodecValue, bool kPlain = false, int kStochastic = kAtRunTime,
          int kRht = kAtRunTime>
struct Spec {
  static constexpr Codec kCodec = kCodecValue;
  static constexpr bool kIsNvfp4 = kCodec == Codec::nvfp4;
  static constexpr bool kIsNearest = kStochastic == 0;
  // What elements are multiplied by is always a power of two.
  static constexpr bool kIsPowerOfTwo =
      kCodec == Codec::mxfp8 || (kPlain && kCodec == Codec::block);

  static __device__ __forceinline__ bool e5m2(const PlaneOptions& o) { return !kPlain && o.e5m2; }
  static __device__ __forceinline__ bool two_dimensional(const PlaneOptions& o) {
    return !kPlain && kCodec != Codec::float8 && o.two_dimensional;
  }
  static __device__ __forceinline__ bool power_of_two(const PlaneOptions& o) {
    return kPlain && kCodec == Codec::block ? true : o.power_of_two;
  }
  static __device__ __forceinline__ float epsilon(const PlaneOptions& o) {
    return kPlain && kCodec == Codec::block ? 0.0f : o.epsilon;
  }
  static __device__ __forceinline__ bool row_scaled(const PlaneOptions& o) {
    constexpr bool kCanBe = kCodec == Codec::float8 || kIsNvfp4;
    return !kPlain && kCanBe && o.row_scaled;
  }
  static __device__ __forceinline__ bool swizzled(const PlaneOptions& o) {
    return !kPlain && (kCodec == Codec::mxfp8 || kIsNvfp4) && o.swizzled;
  }
  static __device__ __forceinline__ bool stochastic(const PlaneOptions& o) {
    if (!kIsNvfp4) return false;
    return kStochastic == kAtRunTime ? o.stochastic : kStochastic == 1;
  }
  static __device__ __forceinline__ bool rotates(const PlaneOptions& o) {
    if (!kIsNvfp4) return false;
    return kRht == kAtRunTime ? o.rht != Rht::off : kRht == 1;
  }

  // Whether these options are what the instance was compiled for.
  static bool matches(const PlaneOptions& o) {
    if (o.codec != kCodec) return false;
    if (kPlain && (o.e5m2 || o.two_dimensional || o.row_scaled || o.swizzled)) return false;
    if (kPlain && kCodec == Codec::block && (!o.power_of_two || o.epsilon != 0.0f)) return false;
    if (kIsNvfp4 && kStochastic != kAtRunTime && o.stochastic != (kStochastic == 1)) return false;
    if (kIsNvfp4 && kRht != kAtRunTime && (o.rht != Rht::off) != (kRht == 1)) return false;
    return true;
  }
};

// No plane.
using NoPlane = Spec<Codec::none, true>;

// The column plane of a pair that has one scale for both planes of a tile: the row plane's codes,
// transposed.
template <class Row>
struct Transposed : Row {};
template <class S>
constexpr bool kIsTransposed = false;
template <class Row>
constexpr bool kIsTransposed<Transposed<Row>> = true;

// Any codec with any options: each phase is compiled for all four.
struct AnySpec {
  static __device__ __forceinline__ bool row_scaled(const PlaneOptions& o) { return o.row_scaled; }
  static bool matches(const PlaneOptions&) { return true; }
};

}  // namespace dfg
