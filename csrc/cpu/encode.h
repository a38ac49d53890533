// One plane of one tile. The tile lies contraction-first, v[contraction][plane row], so that a
// block's amax, scale and codes are operations between rows of lanes; its bytes are transposed on
// the way to the plane.
#pragma once

#include "../codecs/hadamard.h"
#include "../codecs/mxfp8.h"
#include "../codecs/nvfp4.h"
#include "../codecs/swizzle.h"
#include "noise.h"

namespace dfg {
namespace DFG_VARIANT {

// Working memory of one thread: lies in its second-level cache.
struct alignas(64) Scratch {
  Lanes tile[kTile];    // X, zero beyond its edges
  Lanes turned[kTile];  // Xᵀ
  Lanes input[kTile];   // a block as it was before its non-finite values were taken out
  Bytes codes[kTile];   // contraction-first, one code per byte
  Bytes packed[kTile / 2];
  Bytes scale_bytes[16];  // by block, 8 at most
  Bytes stored[kLanes];   // transposed
  Noise noise;
};

// Where a tile lies in its plane.
struct Place {
  int64_t row;             // stored row of lane 0
  int lanes;               // plane rows that exist, 1…128
  int64_t contraction;     // stored index of the tile's first contraction element
  int extent;              // stored contraction elements, a multiple of 16, or 32 (mxfp8, nvfp4)
  const float* statistic;  // of lane 0
  float* amax;             // of the matrix or expert, or null
  NoisePlace noise;
};

// Scales of one block for each lane.
struct BlockScales {
  alignas(64) Lanes multiplier;
  alignas(64) Lanes decode;
};

// Takes NaN and ±Inf out of a block if there are any: zero in v, kept in `input`, `top` without.
inline bool take_out_nonfinite(Lanes* __restrict v, int rows, Words32& top,
                               Lanes* __restrict input) {
  if (largest(top, kLanes) < kExponentMask) return false;
  std::memcpy(input, v, sizeof(Lanes) * rows);
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t bits = bits_of(v[row][lane]);
      v[row][lane] = float_of((bits & kExponentMask) == kExponentMask ? 0u : bits);
    }
  }
  magnitudes(v, rows, top);
  return true;
}

// One scale for `count` plane rows at a time.
inline void share(Words32& top, int count) {
  for (int first = 0; first < kLanes; first += count) {
    const uint32_t shared = largest(top + first, count);
    for (int lane = first; lane < first + count; ++lane) top[lane] = shared;
  }
}

// ---- FP8 codes: float8, block, mxfp8 ----

template <bool kE5M2>
void fp8_codes(const Lanes* __restrict v, int rows, const Lanes& __restrict multiplier,
               Bytes* __restrict codes) {
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      codes[row][lane] = fp8_encode<kE5M2>(mul(v[row][lane], multiplier[lane]));
    }
  }
}

template <bool kE5M2>
void fp8_nonfinite_codes(const Lanes* input, int rows, Bytes* codes) {
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      codes[row][lane] = fp8_nonfinite<kE5M2>(input[row][lane], codes[row][lane]);
    }
  }
}

template <bool kE5M2, class Source>
void fp8_values(const Bytes* __restrict codes, int rows, const Lanes& __restrict scale,
                Lanes* __restrict v) {
  for (int row = 0; row < rows; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      v[row][lane] = Source::saturated(mul(fp8_decode<kE5M2>(codes[row][lane]), scale[lane]));
    }
  }
}

inline void float8_scales(const Plane& plane, const Place& place, BlockScales& scales) {
  const PlaneOptions& o = plane.options;
  const float fp8_max = o.e5m2 ? Fp8<true>::kMax : Fp8<false>::kMax;
  Lanes statistic;
  for (int lane = 0; lane < kLanes; ++lane) statistic[lane] = 0.0f;
  if (o.row_scaled) {
    std::memcpy(statistic, place.statistic, sizeof(float) * place.lanes);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) statistic[lane] = *place.statistic;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const float scale = fp8_encode_scale(statistic[lane], fp8_max, o.epsilon, o.power_of_two);
    scales.multiplier[lane] = o.scale_given ? statistic[lane] : scale;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    scales.decode[lane] = reciprocal(scales.multiplier[lane]);
  }
}

// Scale of a 128×128 block, or of the first of a tile's 1×128 blocks, which lie side by side.
inline float* block_scale_at(const Plane& plane, const Place& place) {
  float* scales = static_cast<float*>(plane.scales);
  const int64_t block = place.contraction / kTile;
  if (!plane.options.two_dimensional) return scales + block * plane.stored_rows + place.row;
  const int64_t stride = ceil_div(ceil_div(plane.stored_contraction, kTile), 4) * 4;
  return scales + place.row / kTile * stride + block;
}

inline void block_scales(const Plane& plane, const Place& place, const Words32& top,
                         BlockScales& scales) {
  const PlaneOptions& o = plane.options;
  const float fp8_max = o.e5m2 ? Fp8<true>::kMax : Fp8<false>::kMax;
  const float epsilon = o.epsilon;
  const bool power_of_two = o.power_of_two;
  for (int lane = 0; lane < kLanes; ++lane) {
    scales.multiplier[lane] = fp8_encode_scale(float_of(top[lane]), fp8_max, epsilon, power_of_two);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    scales.decode[lane] = reciprocal(scales.multiplier[lane]);
  }
  if (plane.scales == nullptr) return;
  float* stored = block_scale_at(plane, place);
  if (o.two_dimensional) {
    *stored = scales.decode[0];
  } else {
    std::memcpy(stored, scales.decode, sizeof(float) * place.lanes);
  }
}

inline void mxfp8_scales(bool e5m2, const Words32& __restrict top, Bytes& __restrict bytes,
                         BlockScales& __restrict scales) {
  for (int lane = 0; lane < kLanes; ++lane) {
    bytes[lane] = mxfp8_scale_byte(float_of(top[lane]), e5m2);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    scales.multiplier[lane] = mxfp8_multiplier(bytes[lane]);
    scales.decode[lane] = e8m0_decode(bytes[lane]);
  }
}

// ---- NVFP4 ----

// Per lane; all lanes the same unless row-scaled.
struct Nvfp4Lanes {
  alignas(64) Lanes sixth, inverse, outer;
};

inline void nvfp4_lanes(const Plane& plane, const Place& place, Nvfp4Lanes& out) {
  Lanes amax;
  for (int lane = 0; lane < kLanes; ++lane) amax[lane] = 0.0f;
  if (plane.options.row_scaled) {
    std::memcpy(amax, place.statistic, sizeof(float) * place.lanes);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) amax[lane] = *place.statistic;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const Nvfp4Global global = nvfp4_global(amax[lane]);
    out.sixth[lane] = global.sixth;
    out.inverse[lane] = global.inverse;
    out.outer[lane] = nvfp4_outer(amax[lane]);
  }
}

// Nvfp4 bytes of a block; where a lane's input had a non-finite value (`is_bad`, else null) 7F.
inline void nvfp4_scales(const Words32& __restrict top, const Nvfp4Lanes& __restrict global,
                         const Bytes* is_bad, Bytes& __restrict bytes,
                         BlockScales& __restrict scales) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Nvfp4Global g = {global.sixth[lane], global.inverse[lane]};
    bytes[lane] = nvfp4_scale_byte(float_of(top[lane]), g);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const Nvfp4Global g = {global.sixth[lane], global.inverse[lane]};
    scales.multiplier[lane] = nvfp4_multiplier(bytes[lane], g);
  }
  if (is_bad != nullptr) {
    for (int lane = 0; lane < kLanes; ++lane) {
      bytes[lane] = (*is_bad)[lane] ? kNvfp4NanScale : bytes[lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    scales.decode[lane] = mul(fp8_decode<false>(bytes[lane]), global.outer[lane]);
  }
}

template <bool kSigns, bool kRoundBf16>
void rotate(Lanes* v) {
  for (int lane = 0; lane < kLanes; ++lane) {
    float u[16];
    DFG_UNROLL
    for (int k = 0; k < 16; ++k) u[k] = v[k][lane];
    hadamard16(u, kSigns);
    DFG_UNROLL
    for (int k = 0; k < 16; ++k) {
      v[k][lane] = kRoundBf16 ? Element<Dtype::bf16>::rounded(u[k]) : u[k];
    }
  }
}

inline void rotate(Lanes* v, Rht rht, Dtype dtype) {
  if (dtype == Dtype::bf16) {
    rht == Rht::with_signs ? rotate<true, true>(v) : rotate<false, true>(v);
  } else {
    rht == Rht::with_signs ? rotate<true, false>(v) : rotate<false, false>(v);
  }
}

inline void nvfp4_nearest_codes(const Lanes* __restrict v, const Lanes& __restrict multiplier,
                                Bytes* __restrict codes) {
  for (int k = 0; k < 16; ++k) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float scaled = mul(v[k][lane], multiplier[lane]);
      codes[k][lane] = static_cast<uint8_t>(e2m1_nearest(scaled) | (bits_of(scaled) >> 28 & 8u));
    }
  }
}

inline void nvfp4_stochastic_codes(const Lanes* __restrict v, const Lanes& __restrict multiplier,
                                   const Noise& __restrict noise, Bytes* __restrict codes) {
  for (int k = 0; k < 16; ++k) {
    // Word (j >> 1) & 3 of counter j >> 3, half j & 1.
    const int j = noise.first + k;
    const Words32& word = noise.words[j >> 3][j >> 1 & 3];
    const int shift = 16 * (j & 1);
    for (int lane = 0; lane < kLanes; ++lane) {
      const float scaled = mul(v[k][lane], multiplier[lane]);
      const uint32_t r = word[lane] >> shift & 0xFFFFu;
      codes[k][lane] =
          static_cast<uint8_t>(e2m1_stochastic(scaled, r) | (bits_of(scaled) >> 28 & 8u));
    }
  }
}

template <class Source>
void nvfp4_values(const Bytes* __restrict codes, const Lanes& __restrict scale,
                  Lanes* __restrict v) {
  for (int k = 0; k < 16; ++k) {
    for (int lane = 0; lane < kLanes; ++lane) {
      v[k][lane] = Source::saturated(mul(e2m1_decode(codes[k][lane]), scale[lane]));
    }
  }
}

// ---- A tile ----

// Rows of `width` bytes, a multiple of 16, to plane rows `stride` bytes apart.
inline void store_bytes(const Bytes* rows, int width, int stored_width, int lanes, uint8_t* out,
                        int64_t stride, Scratch& scratch) {
  transpose(rows, width, scratch.stored);
  for (int lane = 0; lane < lanes; ++lane) {
    std::memcpy(out + lane * stride, scratch.stored[lane], stored_width);
  }
}

// The tile's scale bytes, of blocks of `group`. Swizzled ones are written for all 128 rows and
// whole tiles of 4 blocks, zero where there is no plane row or block.
inline void store_scale_bytes(const Plane& plane, const Place& place, int group, Scratch& scratch) {
  const int count = place.extent / group;
  const int64_t blocks = plane.stored_contraction / group, first = place.contraction / group;
  uint8_t* out = static_cast<uint8_t*>(plane.scales);
  if (!plane.options.swizzled) {
    store_bytes(scratch.scale_bytes, 16, count, place.lanes, out + place.row * blocks + first,
                blocks, scratch);
    return;
  }
  transpose(scratch.scale_bytes, 16, scratch.stored);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint8_t* row = scratch.stored[lane];
    const int used = lane < place.lanes ? count : 0;
    std::memset(row + used, 0, 16 - used);
    uint8_t* to = out + swizzled_offset(place.row + lane, first, ceil_div(blocks, kSwizzleBlocks));
    for (int block = 0; block < count; block += kSwizzleBlocks) {
      std::memcpy(to + swizzled_step(block), row + block, kSwizzleBlocks);
    }
  }
}

template <bool kE5M2>
void encode_fp8_tile(const Plane& plane, const Place& place, Lanes* v, bool decode, Dtype dtype,
                     uint32_t& found, Scratch& s) {
  const PlaneOptions& o = plane.options;
  const int block = o.codec == Codec::mxfp8 ? 32 : kTile;
  BlockScales scales;
  if (o.codec == Codec::float8) float8_scales(plane, place, scales);
  for (int first = 0; first < place.extent; first += block) {
    const int rows = place.extent - first < block ? place.extent - first : block;
    Words32 top;
    magnitudes(v + first, rows, top);
    const bool is_bad = take_out_nonfinite(v + first, rows, top, s.input);
    found = larger_bits(found, largest(top, kLanes));
    if (o.two_dimensional) share(top, block);
    if (o.codec == Codec::block) {
      block_scales(plane, place, top, scales);
    } else if (o.codec == Codec::mxfp8) {
      mxfp8_scales(kE5M2, top, s.scale_bytes[first / 32], scales);
    }
    fp8_codes<kE5M2>(v + first, rows, scales.multiplier, s.codes + first);
    if (is_bad) fp8_nonfinite_codes<kE5M2>(s.input, rows, s.codes + first);
    if (decode) {
      with_element(dtype, [&](auto source) {
        fp8_values<kE5M2, decltype(source)>(s.codes + first, rows, scales.decode, v + first);
      });
    }
  }
  if (plane.codes != nullptr) {
    store_bytes(s.codes, place.extent, place.extent, place.lanes,
                plane.codes + place.row * plane.stored_contraction + place.contraction,
                plane.stored_contraction, s);
  }
  if (o.codec == Codec::mxfp8 && plane.scales != nullptr) store_scale_bytes(plane, place, 32, s);
}

inline void encode_nvfp4_tile(const Plane& plane, const Place& place, Lanes* v, bool decode,
                              Dtype dtype, uint32_t& found, Scratch& s) {
  const PlaneOptions& o = plane.options;
  Nvfp4Lanes global;
  nvfp4_lanes(plane, place, global);
  for (int first = 0; first < place.extent; first += 16) {
    Lanes* block = v + first;
    if (o.stochastic) draw(place.noise, dtype, block, first, s.noise);
    if (o.rht != Rht::off) rotate(block, o.rht, dtype);
    Words32 top;
    magnitudes(block, 16, top);
    Bytes is_bad;
    for (int lane = 0; lane < kLanes; ++lane) is_bad[lane] = top[lane] >= kExponentMask;
    const bool any_bad = take_out_nonfinite(block, 16, top, s.input);
    found = larger_bits(found, largest(top, kLanes));
    if (o.two_dimensional) {
      share(top, 16);
      for (int tile = 0; any_bad && tile < kLanes; tile += 16) {
        uint8_t shared = 0;
        for (int lane = tile; lane < tile + 16; ++lane) shared |= is_bad[lane];
        std::memset(is_bad + tile, shared, 16);
      }
    }
    BlockScales scales;
    nvfp4_scales(top, global, any_bad ? &is_bad : nullptr, s.scale_bytes[first / 16], scales);
    if (o.stochastic) {
      nvfp4_stochastic_codes(block, scales.multiplier, s.noise, s.codes + first);
    } else {
      nvfp4_nearest_codes(block, scales.multiplier, s.codes + first);
    }
    if (decode) {
      with_element(dtype, [&](auto source) {
        nvfp4_values<decltype(source)>(s.codes + first, scales.decode, block);
      });
    }
  }
  if (plane.codes != nullptr) {
    const int width = place.extent / 2;
    for (int pair = 0; pair < width; ++pair) {
      for (int lane = 0; lane < kLanes; ++lane) {
        s.packed[pair][lane] =
            static_cast<uint8_t>(s.codes[2 * pair][lane] | s.codes[2 * pair + 1][lane] << 4);
      }
    }
    const int64_t stride = plane.stored_contraction / 2;
    store_bytes(s.packed, width, width, place.lanes,
                plane.codes + place.row * stride + place.contraction / 2, stride, s);
  }
  if (plane.scales != nullptr) store_scale_bytes(plane, place, 16, s);
}

// Writes the plane's part that the tile `v` covers (buffers that are null are left out) and raises
// its amax; returns the bits of the tile's. v is overwritten: with `decode` by the values that the
// plane holds, rounded to dtype.
inline uint32_t encode_tile(const Plane& plane, const Place& place, Lanes* v, bool decode,
                            Dtype dtype, Scratch& scratch) {
  uint32_t found = 0;
  if (plane.options.codec == Codec::nvfp4) {
    encode_nvfp4_tile(plane, place, v, decode, dtype, found, scratch);
  } else if (plane.options.e5m2) {
    encode_fp8_tile<true>(plane, place, v, decode, dtype, found, scratch);
  } else {
    encode_fp8_tile<false>(plane, place, v, decode, dtype, found, scratch);
  }
  if (place.amax != nullptr) raise(place.amax, found);
  return found;
}

}  // namespace DFG_VARIANT
}  // namespace dfg
