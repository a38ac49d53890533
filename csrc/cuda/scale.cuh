// From amaxes to scales, and the encoding of one unit, for each codec.
#pragma once

#include "spec.cuh"
#include "tile.cuh"
#include "unit.cuh"

namespace dfg {

// Amaxes that 2-D blocks are made of, as FP32 bits, over finite elements.
struct Parts {
  uint32_t whole;       // of the tile
  uint32_t amax[8][8];  // of its parts of 16×16: [row / 16][column / 16]
  uint32_t bad[8][8];   // whether any element of a part is not finite
};

// All threads; begins and ends with a barrier. is_whole: the parts are not wanted.
template <class E>
__device__ __noinline__ void measure_parts(unsigned char* tile, bool is_whole, Parts& parts) {
  __syncthreads();
  if (threadIdx.x == 0) parts.whole = 0;
  if (threadIdx.x < 64) {
    (&parts.amax[0][0])[threadIdx.x] = 0;
    (&parts.bad[0][0])[threadIdx.x] = 0;
  }
  __syncthreads();
  const RowUnits<E> units(tile);
  uint32_t whole = 0;
#pragma unroll
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = row_of_step(i);
    const RowUnit<E> u = units.read(i);
    uint32_t m = any_max(u);
    const bool bad = is_bad(m);
    if (bad) m = finite_max(u);
    whole = max(whole, m);
    if (is_whole) continue;
    // Lanes 8 and 16 apart hold the same columns of the next rows.
    m = max(m, shuffle_xor(m, 8));
    m = max(m, shuffle_xor(m, 16));
    if (threadIdx.x % 32 < 8) atomicMax(&parts.amax[row / 16][along()], m);
    if (bad) parts.bad[row / 16][along()] = 1;
  }
  whole = __reduce_max_sync(kFullWarp, whole);
  if (threadIdx.x % 32 == 0) atomicMax(&parts.whole, whole);
  __syncthreads();
}

// Amax of the 2-D block that a part belongs to.
template <Codec kCodec>
__device__ __forceinline__ uint32_t block_amax(const Parts& parts, int row_part, int column_part) {
  if constexpr (kCodec == Codec::nvfp4) return parts.amax[row_part][column_part];
  if constexpr (kCodec == Codec::mxfp8) {
    const int r = row_part & ~1, c = column_part & ~1;
    return max(max(parts.amax[r][c], parts.amax[r][c + 1]),
               max(parts.amax[r + 1][c], parts.amax[r + 1][c + 1]));
  }
  return parts.whole;
}

// log2 of how many neighbouring lanes share a 1-D block.
template <Codec kCodec>
constexpr int kLaneLevels = kCodec == Codec::block   ? 3
                            : kCodec == Codec::mxfp8 ? 1
                                                     : 0;

template <class E, Codec kCodec>
__device__ __forceinline__ typename E::Pair over_block(typename E::Pair m) {
#pragma unroll
  for (int level = 0; level < kLaneLevels<kCodec>; ++level) {
    m = E::max(m, shuffle_xor(m, 1 << level));
  }
  return m;
}

// The scale that a statistic gives: float8's encode scale, nvfp4's global constants.
struct OuterScale {
  float encode = 1.0f;  // float8
  float decode = 1.0f;  // float8: 1/encode; nvfp4: g
  Nvfp4Global global = {1.0f, 1.0f};
};

template <class S>
__device__ __forceinline__ float fp8_limit(const PlaneOptions& o) {
  return S::e5m2(o) ? Fp8<true>::kMax : Fp8<false>::kMax;
}

template <class S>
__device__ __forceinline__ OuterScale outer_scale(const PlaneOptions& o, float statistic) {
  OuterScale s;
  if constexpr (S::kCodec == Codec::float8) {
    s.encode = o.scale_given
                   ? statistic
                   : fp8_encode_scale(statistic, fp8_limit<S>(o), o.epsilon, o.power_of_two);
    s.decode = reciprocal(s.encode);
  }
  if constexpr (S::kIsNvfp4) {
    s.global = nvfp4_global(statistic);
    s.decode = nvfp4_outer(statistic);
  }
  return s;
}

// What one unit is encoded and decoded with.
struct UnitScale {
  float encode;  // what the input is multiplied by
  float decode;  // what a code is multiplied by (nvfp4: not used)
  uint8_t byte;  // mxfp8, nvfp4
};

template <class S>
__device__ __forceinline__ UnitScale unit_scale(const PlaneOptions& o, float amax,
                                                const OuterScale& outer) {
  UnitScale s{outer.encode, outer.decode, 0};
  if constexpr (S::kCodec == Codec::block) {
    const bool power_of_two = S::power_of_two(o);
    s.encode = fp8_encode_scale(amax, fp8_limit<S>(o), S::epsilon(o), power_of_two);
    s.decode = power_of_two ? power_of_two_reciprocal(s.encode) : reciprocal(s.encode);
  }
  if constexpr (S::kCodec == Codec::mxfp8) {
    s.byte = mxfp8_scale_byte(amax, S::e5m2(o));
    s.encode = mxfp8_multiplier(s.byte);
    s.decode = e8m0_decode(s.byte);
  }
  if constexpr (S::kIsNvfp4) {
    s.byte = nvfp4_scale_byte(amax, outer.global);
    s.encode = nvfp4_multiplier_fast(s.byte, outer.global);
  }
  return s;
}

// Raises a non-negative float in memory (or a -1 that marks it unset) to FP32 bits.
__device__ __forceinline__ void raise(float* target, uint32_t bits) {
  auto* as_int = reinterpret_cast<int*>(target);
  if (*reinterpret_cast<volatile int*>(as_int) < static_cast<int>(bits)) {
    atomicMax(as_int, static_cast<int>(bits));
  }
}

// One atomic per warp that has something larger.
__device__ __forceinline__ void raise_by_warp(float* target, uint32_t bits) {
  bits = __reduce_max_sync(kFullWarp, bits);
  if (threadIdx.x % 32 == 0) raise(target, bits);
}

}  // namespace dfg
