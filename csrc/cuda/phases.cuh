// The two phases of a cast: the tile's rows become units of the row plane, its columns of the
// column plane. Each reads the tile in shared memory; neither knows the other's codec.
#pragma once

#include <type_traits>

#include "../codecs/swizzle.h"
#include "outer.cuh"

namespace dfg {

// What a plane's phase needs besides the tile.
struct Target {
  const Plane& plane;
  int64_t plane_rows;   // R
  int64_t contraction;  // C
  const OuterLines& outer;
  uint32_t seed, step;  // of stochastic rounding
};

// What scales the units of a line of the tile.
template <class S>
__device__ __forceinline__ OuterScale outer_of_line(const Target& target, int line) {
  if constexpr (!kHasStatistic<S>) return {};
  return target.outer.at(S::row_scaled(target.plane.options) ? line : 0);
}

// Codes of a unit, and its scale bytes.
struct Encoded {
  uint4 codes;  // nvfp4: x and y
  UnitScale scale;
};

// Whether elements are scaled two at a time, in BF16.
template <class E, class S>
constexpr bool kScalesPairs = E::kDtype == Dtype::bf16 && S::kIsPowerOfTwo;

// Encodes a unit whose block has this amax. `u` is clean of non-finite elements, and without signs
// (which are given apart) for nvfp4.
template <class E, class S, class Unit>
__device__ __forceinline__ Encoded encode(const PlaneOptions& o, const Unit& u, uint2 signs,
                                          uint32_t amax, bool block_is_bad, const OuterScale& outer,
                                          const Draw& draw) {
  Encoded e;
  e.scale = unit_scale<S>(o, float_of(amax), outer);
  if constexpr (S::kIsNvfp4) {
    const float top = mul(float_of(amax), e.scale.encode);
    const uint2 codes = nvfp4_codes(u, signs, top, e.scale.encode, S::stochastic(o), draw);
    e.codes = make_uint4(codes.x, codes.y, 0, 0);
    if (block_is_bad) e.scale.byte = kNvfp4NanScale;
  } else if constexpr (kScalesPairs<E, S> && std::is_same_v<Unit, RowUnit<E>>) {
    RowUnit<E> scaled = u;
    scale_pairs<E>(scaled.p, e.scale.encode, e.scale.encode);
    e.codes = fp8_codes(scaled, S::e5m2(o));
  } else {
    e.codes = fp8_codes(u, e.scale.encode, S::e5m2(o));
  }
  return e;
}

// As encode, of a unit that is rotated first (its signs are flipped); `recorded` is raised to its
// amax.
template <class E, class S, class Unit>
__device__ __forceinline__ Encoded encode_rotated(const PlaneOptions& o, const Unit& u,
                                                  const OuterScale& outer, const Draw& draw,
                                                  uint32_t& recorded) {
  // Beside stochastic rounding there are no registers left for the faster rotation.
  constexpr bool kIsFast = E::kDtype == Dtype::bf16 && S::kIsNearest;
  const Rotated<E, kIsFast> r(u);
  recorded = max(recorded, r.amax);
  return encode<E, S>(o, r.magnitudes, r.signs, r.amax, r.is_bad, outer, draw);
}

// Writes units of one position along the contraction, plane row by plane row.
template <class S>
struct Writer {
  static constexpr Codec kCodec = S::kCodec;
  // Codes and units that share a byte or a scale.
  static constexpr int kCodesPerByte = kCodec == Codec::nvfp4 ? 2 : 1;
  static constexpr int kScaleGroup = kCodec == Codec::nvfp4 ? 16 : 32;

  uint8_t* codes;
  uint8_t* scale;
  int64_t code_stride;   // bytes from plane row to plane row
  int64_t scale_stride;  // swizzled: from an even row to the next
  bool has_scale;        // this lane writes the scale of its block
  bool swizzled;

  __device__ __forceinline__ Writer(const Plane& plane, int64_t row, int64_t position) {
    const auto extent = static_cast<uint64_t>(plane.stored_contraction);
    const auto at = static_cast<uint64_t>(position);
    code_stride = extent / kCodesPerByte;
    codes = plane.codes + row * code_stride + at / kCodesPerByte;
    scale = static_cast<uint8_t*>(plane.scales);
    scale_stride = 0;
    has_scale = false;
    swizzled = S::swizzled(plane.options);
    if (kCodec == Codec::nvfp4 || kCodec == Codec::mxfp8) {
      scale_stride = extent / kScaleGroup;
      has_scale = kCodec == Codec::nvfp4 || (along() & 1) == 0;
      if (swizzled) {
        const int64_t block = position / kScaleGroup;
        const int64_t across = ceil_div(scale_stride, kSwizzleBlocks);
        has_scale = has_scale && block < across * kSwizzleBlocks;
        scale += swizzled_offset(row, block, across);
        scale_stride = 16;
      } else {
        scale += row * scale_stride + at / kScaleGroup;
      }
    }
    if (kCodec == Codec::block) {
      scale_stride = 4;
      scale += 4 * (at / kTile * plane.stored_rows + row);
      has_scale = !S::two_dimensional(plane.options) && along() == 0;
    }
  }

  __device__ __forceinline__ void write_codes(int ahead, const Encoded& e) const {
    uint8_t* to = codes + ahead * code_stride;
    if constexpr (kCodec == Codec::nvfp4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(e.codes.x, e.codes.y);
    } else {
      *reinterpret_cast<uint4*>(to) = e.codes;
    }
  }

  // ahead: rows past the current one. is_padding: a row behind the plane's last, whose scale is not
  // zero by itself.
  __device__ __forceinline__ void write(int ahead, const Encoded& e, bool is_padding) const {
    uint8_t* scale_to = scale + ahead * scale_stride;
    write_codes(ahead, e);
    if constexpr (kCodec == Codec::nvfp4 || kCodec == Codec::mxfp8) {
      if (has_scale) *scale_to = is_padding ? 0 : e.scale.byte;
    }
    if constexpr (kCodec == Codec::block) {
      if (has_scale) *reinterpret_cast<float*>(scale_to) = is_padding ? 0.0f : e.scale.decode;
    }
  }

  // Swizzled: zero in the place of a scale whose block is not stored.
  __device__ __forceinline__ void pad_scale(int ahead) const {
    if (has_scale) scale[ahead * scale_stride] = 0;
  }

  // rows: a multiple of 32 that does not leave the tile.
  __device__ __forceinline__ void advance(int rows) {
    codes += rows * code_stride;
    scale += swizzled ? rows / 32 * 4 : rows * scale_stride;
  }
};

// The one scale of a 128×128 tile, and the zeros that round its row of scales up to 4.
__device__ __forceinline__ void store_tile_scale(const Target& target, int64_t row,
                                                 int64_t position, float decode) {
  const int64_t blocks = ceil_div(target.contraction, kTile);
  const int64_t stored = ceil_div(blocks, 4) * 4, block = position / kTile;
  float* scales = static_cast<float*>(target.plane.scales) + row / kTile * stored;
  scales[block] = decode;
  for (int64_t i = blocks; block == blocks - 1 && i < stored; ++i) scales[i] = 0.0f;
}

// The draw of units at a contraction index; row and content are still to be set.
__device__ __forceinline__ Draw draw_at(const Target& target, int64_t position) {
  const int64_t j = position + target.plane.contraction_origin;
  return {target.seed,
          target.plane.stream,
          target.step,
          static_cast<uint32_t>(j >> 3),
          static_cast<uint32_t>(j & 7),
          0,
          0};
}

// What a row phase leaves in the tile, for the column phase: X, the decoded values, or the codes
// (each unit's in its first chunk).
enum class Keep { input, values, codes };

// Whether zeros alone do not make the scale of a padding row zero.
template <class S>
__device__ __forceinline__ bool pads_scales(const PlaneOptions& o) {
  return S::kCodec == Codec::block || S::two_dimensional(o);
}

// Rows of the tile. Returns the largest finite magnitude that this thread encoded (FP32 bits).
// kStore: the plane is written.
template <class E, class S, Keep kKeep, bool kStore>
__device__ __forceinline__ uint32_t row_phase(const Target& target, const Place& place,
                                              unsigned char* tile, const Parts& parts) {
  const Plane& plane = target.plane;
  const PlaneOptions& o = plane.options;
  const int unit = along();
  const int64_t position = place.x_column + unit * 16;
  OuterScale outer;
  const RowUnits<E> units(tile);
  Writer<S> writer(plane, place.x_row + row_of_step(0), position);
  const int stored_rows = position < plane.stored_contraction ? place.row_extent : 0;
  Draw draw = draw_at(target, position);
  const auto first_row = static_cast<uint32_t>(place.expert_row + plane.row_origin);
  uint32_t recorded = 0;

  const auto finish = [&](int step, Encoded e, bool all_finite) {
    const int row = row_of_step(step);
    if constexpr (kKeep == Keep::values && S::kIsNvfp4) {
      auto values = nvfp4_values<E>(make_uint2(e.codes.x, e.codes.y), e.scale.byte, outer.decode);
      // A block that decodes to NaN must not reach into the padding around X.
      if (e.scale.byte == kNvfp4NanScale) {
        keep_first<E>(values, row < place.rows ? place.columns - unit * 16 : 0);
      }
      units.write(step, values);
    } else if constexpr (kKeep == Keep::values) {
      units.write(step, fp8_values<E>(e.codes, e.scale.decode, S::e5m2(o), all_finite));
    } else if constexpr (kKeep == Keep::codes) {
      *reinterpret_cast<uint4*>(units.at(step, 0)) = e.codes;
    }
    if constexpr (kStore) {
      if (row < stored_rows) {
        writer.write(0, e, pads_scales<S>(o) && row >= place.rows);
        if (S::kCodec == Codec::block && S::two_dimensional(o) && row == 0 && unit == 0) {
          store_tile_scale(target, place.x_row, position, e.scale.decode);
        }
      } else if (S::swizzled(o)) {
        writer.pad_scale(0);
      }
      writer.advance(kRowsPerStep);
    }
  };
  const auto encode_unit = [&](int step, RowUnit<E> u, uint32_t amax, bool bad) {
    recorded = max(recorded, amax);
    if (S::two_dimensional(o)) {
      amax = block_amax<S::kCodec>(parts, row_of_step(step) / 16, unit);
      bad = parts.bad[row_of_step(step) / 16][unit];
    }
    uint2 signs{};
    if constexpr (S::kIsNvfp4) {
      signs = signs_of(u);
      drop_signs(u);
    }
    return encode<E, S>(o, u, signs, amax, bad, outer, draw);
  };

#pragma unroll(S::kIsNvfp4 ? 1 : 2)
  for (int step = 0; step < kRowSteps; ++step) {
    const int row = row_of_step(step);
    outer = outer_of_line<S>(target, row);
    const RowUnit<E> u = units.read(step);
    if (S::stochastic(o)) {
      draw.row = first_row + row;
      draw.content = content_of_row(u);
    }
    if (S::rotates(o)) {
      RowUnit<E> flipped = u;
      if (o.rht == Rht::with_signs) flip_row(flipped);
      finish(step, encode_rotated<E, S>(o, flipped, outer, draw, recorded), true);
      continue;
    }
    const uint32_t amax = halves_max<E>(over_block<E, S::kCodec>(pairs_abs_max<E>(u.p)));
    if (!__any_sync(kFullWarp, is_bad(amax))) {
      finish(step, encode_unit(step, u, amax, false), true);
      continue;
    }
    RowUnit<E> cleaned = u;
    clean(cleaned);
    const uint32_t finite = halves_max<E>(over_block<E, S::kCodec>(pairs_abs_max<E>(cleaned.p)));
    Encoded e = encode_unit(step, cleaned, finite, is_bad(amax));
    if constexpr (!S::kIsNvfp4) mark_nonfinite(e.codes, u, S::e5m2(o));
    finish(step, e, false);
  }
  return recorded;
}

// What the two columns of a step share.
template <class E>
struct ColumnPair {
  typename E::Pair p[16];  // nvfp4: without signs, or with those of the rotation flipped
  uint2 signs[2];          // nvfp4 that is not rotated
  uint32_t amax[2];        // of the 1-D blocks; FP32 bits
  bool bad[2];
  uint32_t content[2];
};

template <class E, class S, int kHalf>
__device__ __forceinline__ Encoded encode_column(const Target& target, const Place& place,
                                                 int column, const ColumnPair<E>& pair,
                                                 const Parts& parts, Draw draw,
                                                 uint32_t& recorded) {
  const Plane& plane = target.plane;
  const PlaneOptions& o = plane.options;
  const int64_t plane_row = place.x_column + column;
  const ColumnUnit<E, kHalf> u{pair.p};
  const OuterScale outer = outer_of_line<S>(target, column);
  if (S::stochastic(o)) {
    draw.row = static_cast<uint32_t>(plane_row + plane.row_origin);
    draw.content = pair.content[kHalf];
  }
  if (S::rotates(o)) return encode_rotated<E, S>(o, u, outer, draw, recorded);
  uint32_t amax = pair.amax[kHalf];
  bool bad = pair.bad[kHalf];
  recorded = max(recorded, amax);
  if (S::two_dimensional(o)) {
    amax = block_amax<S::kCodec>(parts, along(), column / 16);
    bad = parts.bad[along()][column / 16];
  }
  return encode<E, S>(o, u, pair.signs[kHalf], amax, bad, outer, draw);
}

// Both columns of a step whose elements are all finite, of a codec with power-of-two scales: one
// product of pairs scales an element of each.
template <class E, class S>
__device__ __forceinline__ void encode_scaled_pairs(const PlaneOptions& o, int column,
                                                    const ColumnPair<E>& pair, const Parts& parts,
                                                    uint32_t& recorded, Encoded (&e)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t amax = pair.amax[half];
    recorded = max(recorded, amax);
    if (S::two_dimensional(o)) amax = block_amax<S::kCodec>(parts, along(), (column + half) / 16);
    e[half].scale = unit_scale<S>(o, float_of(amax), {});
  }
  typename E::Pair scaled[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) scaled[k] = pair.p[k];
  scale_pairs<E>(scaled, e[0].scale.encode, e[1].scale.encode);
  e[0].codes = fp8_codes(ColumnUnit<E, 0>{scaled}, S::e5m2(o));
  e[1].codes = fp8_codes(ColumnUnit<E, 1>{scaled}, S::e5m2(o));
}

// Columns of the tile; returns the largest finite magnitude encoded (FP32 bits).
template <class E, class S>
__device__ __forceinline__ uint32_t column_phase(const Target& target, const Place& place,
                                                 const unsigned char* tile, const Parts& parts) {
  const Plane& plane = target.plane;
  const PlaneOptions& o = plane.options;
  Writer<S> writer(plane, place.x_column + 2 * pair_of_step(0), place.column_start + along() * 16);
  const int stored_columns =
      along() * 16 < place.column_extent ? clamp_to_tile(plane.stored_rows - place.x_column) : 0;
  const Draw draw = draw_at(target, place.expert_row + along() * 16);
  uint32_t recorded = 0;

  const auto finish = [&](int column, int ahead, const Encoded& e) {
    if (column >= stored_columns) {
      if (S::swizzled(o)) writer.pad_scale(ahead);
      return;
    }
    // A tile without rows is the part of an expert that has none: nothing but padding.
    writer.write(ahead, e, pads_scales<S>(o) && (column >= place.columns || place.rows == 0));
    if (S::kCodec == Codec::block && S::two_dimensional(o) && column == 0 && along() == 0) {
      store_tile_scale(target, place.x_column, place.column_start, e.scale.decode);
    }
  };
  const auto drop_pair_signs = [](ColumnPair<E>& both) {
    if constexpr (S::kIsNvfp4) {
      both.signs[0] = signs_of(ColumnUnit<E, 0>{both.p});
      both.signs[1] = signs_of(ColumnUnit<E, 1>{both.p});
#pragma unroll
      for (int k = 0; k < 16; ++k) both.p[k] = E::abs(both.p[k]);
    }
  };

#pragma unroll 1
  for (int step = 0; step < kColumnSteps; ++step) {
    const int pair = pair_of_step(step), column = 2 * pair;
    ColumnPair<E> both;
    read_column_pairs<E>(tile, along(), pair, both.p);
    if (S::stochastic(o)) {
      const uint2 content = content_of_columns<E>(both.p);
      both.content[0] = content.x;
      both.content[1] = content.y;
    }
    bool all_finite = true;
    if (S::rotates(o)) {
      if (o.rht == Rht::with_signs) flip_columns<E>(both.p);
    } else {
      const auto m = over_block<E, S::kCodec>(pairs_abs_max<E>(both.p));
      both.amax[0] = bits_of(E::lo(m));
      both.amax[1] = bits_of(E::hi(m));
      both.bad[0] = is_bad(both.amax[0]);
      both.bad[1] = is_bad(both.amax[1]);
      all_finite = !__any_sync(kFullWarp, both.bad[0] || both.bad[1]);
      if (all_finite) drop_pair_signs(both);
    }
    if (all_finite) {
      if constexpr (kScalesPairs<E, S>) {
        Encoded e[2];
        encode_scaled_pairs<E, S>(o, column, both, parts, recorded, e);
        finish(column, 0, e[0]);
        finish(column + 1, 1, e[1]);
      } else {
        finish(column, 0,
               encode_column<E, S, 0>(target, place, column, both, parts, draw, recorded));
        finish(column + 1, 1,
               encode_column<E, S, 1>(target, place, column + 1, both, parts, draw, recorded));
      }
    } else {
      clean_pairs<E>(both.p);
      const auto m = over_block<E, S::kCodec>(pairs_abs_max<E>(both.p));
      both.amax[0] = bits_of(E::lo(m));
      both.amax[1] = bits_of(E::hi(m));
      drop_pair_signs(both);
      Encoded lo = encode_column<E, S, 0>(target, place, column, both, parts, draw, recorded);
      Encoded hi = encode_column<E, S, 1>(target, place, column + 1, both, parts, draw, recorded);
      if constexpr (!S::kIsNvfp4) {
        read_column_pairs<E>(tile, along(), pair, both.p);
        mark_nonfinite(lo.codes, ColumnUnit<E, 0>{both.p}, S::e5m2(o));
        mark_nonfinite(hi.codes, ColumnUnit<E, 1>{both.p}, S::e5m2(o));
      }
      finish(column, 0, lo);
      finish(column + 1, 1, hi);
    }
    writer.advance(2 * kRowsPerStep);
  }
  return recorded;
}

}  // namespace dfg
