// The two phases of a cast: the tile's rows become units of the row plane, its columns of the
// column plane. Each reads the tile in shared memory; neither knows the other's codec.
#pragma once

#include "scale.cuh"

namespace dfg {

// What a plane's phase needs besides the tile.
struct Target {
  const Plane& plane;
  int64_t plane_rows;   // R
  int64_t contraction;  // C
  const int64_t* seed_step;
};

// Codes of a unit, and its scale bytes.
struct Encoded {
  uint4 codes;  // nvfp4: x and y
  UnitScale scale;
};

// Encodes a unit whose block has this amax. `u` is clean of non-finite elements, and without signs
// (which are given apart) for nvfp4.
template <class S, class Unit>
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
  } else {
    e.codes = fp8_codes(u, e.scale.encode, S::e5m2(o));
  }
  return e;
}

// As encode, of a unit that is rotated first; `recorded` is raised to its amax.
template <class E, class S, class Unit>
__device__ __forceinline__ Encoded encode_rotated(const PlaneOptions& o, const Unit& u,
                                                  const OuterScale& outer, const Draw& draw,
                                                  uint32_t& recorded) {
  auto rotated = rotate<E>(u, o.rht == Rht::with_signs);
  uint32_t amax = any_max(rotated);
  const bool bad = is_bad(amax);
  if (bad) {
    clean(rotated);
    amax = any_max(rotated);
  }
  recorded = max(recorded, amax);
  const uint2 signs = signs_of(rotated);
  drop_signs(rotated);
  return encode<S>(o, rotated, signs, amax, bad, outer, draw);
}

// Writes units of one position along the contraction, plane row by plane row.
template <class S>
struct Writer {
  static constexpr Codec kCodec = S::kCodec;

  uint8_t* codes;
  uint8_t* scale;        // of this lane's unit; null where another lane or nobody writes it
  int64_t code_stride;   // bytes from plane row to plane row
  int64_t scale_stride;

  __device__ __forceinline__ Writer(const Plane& plane, int64_t row, int64_t position) {
    const auto extent = static_cast<uint64_t>(plane.stored_contraction);
    const auto at = static_cast<uint64_t>(position);
    auto* scales = static_cast<uint8_t*>(plane.scales);
    code_stride = kCodec == Codec::nvfp4 ? extent / 2 : extent;
    codes = plane.codes + row * code_stride + (kCodec == Codec::nvfp4 ? at / 2 : at);
    scale = nullptr;
    scale_stride = 0;
    if (kCodec == Codec::nvfp4) {
      scale_stride = extent / 16;
      scale = scales + row * scale_stride + at / 16;
    }
    if (kCodec == Codec::mxfp8) {
      scale_stride = extent / 32;
      if ((along() & 1) == 0) scale = scales + row * scale_stride + at / 32;
    }
    if (kCodec == Codec::block) {
      scale_stride = 4;
      if (!S::two_dimensional(plane.options) && along() == 0) {
        scale = scales + 4 * (at / kTile * plane.stored_rows + row);
      }
    }
  }

  // ahead: rows past the current one. is_padding: a 2-D block's scale is not repeated for this row.
  __device__ __forceinline__ void write(int ahead, const Encoded& e, bool is_padding) const {
    uint8_t* target = codes + ahead * code_stride;
    if constexpr (kCodec == Codec::nvfp4) {
      *reinterpret_cast<uint2*>(target) = make_uint2(e.codes.x, e.codes.y);
    } else {
      *reinterpret_cast<uint4*>(target) = e.codes;
    }
    if constexpr (kCodec == Codec::nvfp4) scale[ahead * scale_stride] = is_padding ? 0 : e.scale.byte;
    if constexpr (kCodec == Codec::mxfp8) {
      if (scale) scale[ahead * scale_stride] = is_padding ? 0 : e.scale.byte;
    }
    if constexpr (kCodec == Codec::block) {
      if (scale) {
        *reinterpret_cast<float*>(scale + ahead * scale_stride) =
            is_padding ? 0.0f : e.scale.decode;
      }
    }
  }

  __device__ __forceinline__ void advance(int rows) {
    codes += rows * code_stride;
    if (kCodec != Codec::float8 && scale) scale += rows * scale_stride;
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

__device__ __forceinline__ Draw draw_of(const Target& target, int64_t row, int64_t position,
                                        uint32_t content) {
  const Plane& plane = target.plane;
  return {static_cast<uint32_t>(target.seed_step[0]), plane.stream,
          static_cast<uint32_t>(target.seed_step[1]), static_cast<uint32_t>(row + plane.row_origin),
          position + plane.contraction_origin, content};
}

// Rows of the tile. Returns the largest finite magnitude that this thread encoded (FP32 bits).
// kKeep: the tile is overwritten by the decoded values. kStore: the plane is written.
template <class E, class S, bool kKeep, bool kStore>
__device__ __forceinline__ uint32_t row_phase(const Target& target, const Place& place,
                                              unsigned char* tile, const Parts& parts) {
  const Plane& plane = target.plane;
  const PlaneOptions& o = plane.options;
  const int unit = along();
  const int64_t position = place.x_column + unit * 16;
  OuterScale outer;
  if (!S::row_scaled(o) && plane.statistic) {
    outer = outer_scale<S>(o, plane.statistic[place.expert]);
  }
  Writer<S> writer(plane, place.x_row + row_of_step(0), position);
  const bool is_stored = position < plane.stored_contraction;
  uint32_t recorded = 0;
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = row_of_step(i);
    const int64_t plane_row = place.x_row + row;
    if (S::row_scaled(o)) {
      outer = outer_scale<S>(o, row < place.rows ? plane.statistic[plane_row] : 0.0f);
    }
    RowUnit<E> u = read_row_unit<E>(tile, row, unit);
    Encoded e;
    bool all_finite = true;
    Draw draw{};
    if (S::stochastic(o)) {
      draw = draw_of(target, place.expert_row + row, position, content_of_row(u));
    }
    if (S::rotates(o)) {
      e = encode_rotated<E, S>(o, u, outer, draw, recorded);
    } else {
      uint32_t amax = halves_max<E>(over_block<E, S::kCodec>(pairs_abs_max<E>(u.p)));
      bool bad = is_bad(amax);
      all_finite = !__any_sync(kFullWarp, bad);
      if (!all_finite) {
        clean(u);
        amax = halves_max<E>(over_block<E, S::kCodec>(pairs_abs_max<E>(u.p)));
      }
      recorded = max(recorded, amax);
      if (S::two_dimensional(o)) {
        amax = block_amax<S::kCodec>(parts, row / 16, unit);
        bad = parts.bad[row / 16][unit];
      }
      uint2 signs{};
      if constexpr (S::kIsNvfp4) {
        signs = signs_of(u);
        drop_signs(u);
      }
      e = encode<S>(o, u, signs, amax, bad, outer, draw);
      if (!S::kIsNvfp4 && !all_finite) {
        mark_nonfinite(e.codes, read_row_unit<E>(tile, row, unit), S::e5m2(o));
      }
    }
    if constexpr (kKeep) {
      if constexpr (S::kIsNvfp4) {
        auto values =
            nvfp4_values<E>(make_uint2(e.codes.x, e.codes.y), e.scale.byte, outer.decode);
        // A block that decodes to NaN must not reach into the padding around X.
        if (e.scale.byte == kNvfp4NanScale) {
          keep_first<E>(values, row < place.rows ? place.columns - unit * 16 : 0);
        }
        write_row_unit<E>(tile, row, unit, values);
      } else {
        write_row_unit<E>(tile, row, unit, fp8_values<E>(e.codes, e.scale.decode, S::e5m2(o), all_finite));
      }
    }
    if constexpr (kStore) {
      if (row < place.row_extent && is_stored) {
        writer.write(0, e, row >= place.rows);
        if (S::row_scaled(o) && place.x_column == 0 && unit == 0) {
          plane.outer[plane_row] = row < place.rows ? outer.decode : 0.0f;
        }
        if (S::kCodec == Codec::block && S::two_dimensional(o) && row == 0 && unit == 0) {
          store_tile_scale(target, plane_row, position, e.scale.decode);
        }
      }
      writer.advance(kThreads / 8);
    }
  }
  if (kStore && plane.outer && !S::row_scaled(o) && threadIdx.x == 0 && place.x_column == 0 &&
      place.is_first_row_tile) {
    plane.outer[place.expert] = outer.decode;
  }
  return recorded;
}

// What the two columns of a step share.
template <class E>
struct ColumnPair {
  typename E::Pair p[16];  // without signs for nvfp4 that is not rotated
  uint2 signs[2];          // of those
  uint32_t amax[2];        // of the 1-D blocks; FP32 bits
  bool bad[2];
  uint32_t content[2];
  bool all_finite;
};

template <class E, class S, int kHalf>
__device__ __forceinline__ void column_half(const Target& target, const Place& place, int column,
                                            const ColumnPair<E>& pair, const Parts& parts,
                                            const unsigned char* tile, OuterScale outer,
                                            const Writer<S>& writer, uint32_t& recorded) {
  const Plane& plane = target.plane;
  const PlaneOptions& o = plane.options;
  const int64_t plane_row = place.x_column + column;
  const ColumnUnit<E, kHalf> u{pair.p};
  if (S::row_scaled(o)) {
    const bool is_inside = plane_row < target.plane_rows;
    outer = outer_scale<S>(
        o, is_inside ? plane.statistic[place.expert * target.plane_rows + plane_row] : 0.0f);
    if (place.is_first_row_tile && along() == 0 && plane_row < plane.stored_rows) {
      plane.outer[place.expert * plane.stored_rows + plane_row] = is_inside ? outer.decode : 0.0f;
    }
  }
  const int stored_columns = clamp_to_tile(plane.stored_rows - place.x_column);
  Draw draw{};
  if (S::stochastic(o)) {
    draw = draw_of(target, plane_row, place.expert_row + along() * 16, pair.content[kHalf]);
  }
  Encoded e;
  if (S::rotates(o)) {
    e = encode_rotated<E, S>(o, u, outer, draw, recorded);
  } else {
    uint32_t amax = pair.amax[kHalf];
    bool bad = pair.bad[kHalf];
    recorded = max(recorded, amax);
    if (S::two_dimensional(o)) {
      amax = block_amax<S::kCodec>(parts, along(), column / 16);
      bad = parts.bad[along()][column / 16];
    }
    e = encode<S>(o, u, pair.signs[kHalf], amax, bad, outer, draw);
    if (!S::kIsNvfp4 && !pair.all_finite) {
      typename E::Pair original[16];
      read_column_pairs<E>(tile, along(), column / 2, original);
      mark_nonfinite(e.codes, ColumnUnit<E, kHalf>{original}, S::e5m2(o));
    }
  }
  if (column < stored_columns && along() * 16 < place.column_extent) {
    // A whole tile without rows is the part of an expert that has none.
    writer.write(kHalf, e, column >= place.columns || place.rows == 0);
    if (S::kCodec == Codec::block && S::two_dimensional(o) && column == 0 && along() == 0) {
      store_tile_scale(target, plane_row, place.column_start, e.scale.decode);
    }
  }
}

// Columns of the tile; returns the largest finite magnitude encoded (FP32 bits).
template <class E, class S>
__device__ __forceinline__ uint32_t column_phase(const Target& target, const Place& place,
                                                 const unsigned char* tile, const Parts& parts) {
  const Plane& plane = target.plane;
  const PlaneOptions& o = plane.options;
  OuterScale outer;
  if (!S::row_scaled(o) && plane.statistic) {
    outer = outer_scale<S>(o, plane.statistic[place.expert]);
  }
  Writer<S> writer(plane, place.x_column + 2 * pair_of_step(0),
                        place.column_start + along() * 16);
  uint32_t recorded = 0;
#pragma unroll 1
  for (int i = 0; i < kColumnSteps; ++i) {
    const int pair = pair_of_step(i);
    ColumnPair<E> both;
    read_column_pairs<E>(tile, along(), pair, both.p);
    if (S::stochastic(o)) {
      const uint2 content = content_of_columns<E>(both.p);
      both.content[0] = content.x;
      both.content[1] = content.y;
    }
    if (!S::rotates(o)) {
      auto m = over_block<E, S::kCodec>(pairs_abs_max<E>(both.p));
      both.bad[0] = is_bad(bits_of(E::lo(m)));
      both.bad[1] = is_bad(bits_of(E::hi(m)));
      both.all_finite = !__any_sync(kFullWarp, both.bad[0] || both.bad[1]);
      if (!both.all_finite) {
        clean_pairs<E>(both.p);
        m = over_block<E, S::kCodec>(pairs_abs_max<E>(both.p));
      }
      both.amax[0] = bits_of(E::lo(m));
      both.amax[1] = bits_of(E::hi(m));
      if constexpr (S::kIsNvfp4) {
        both.signs[0] = signs_of(ColumnUnit<E, 0>{both.p});
        both.signs[1] = signs_of(ColumnUnit<E, 1>{both.p});
#pragma unroll
        for (int k = 0; k < 16; ++k) both.p[k] = E::abs(both.p[k]);
      }
    }
    column_half<E, S, 0>(target, place, 2 * pair, both, parts, tile, outer, writer, recorded);
    column_half<E, S, 1>(target, place, 2 * pair + 1, both, parts, tile, outer, writer,
                              recorded);
    writer.advance(kThreads / 4);
  }
  if (plane.outer && !S::row_scaled(o) && threadIdx.x == 0 && place.x_column == 0 &&
      place.is_first_row_tile) {
    plane.outer[place.expert] = outer.decode;
  }
  return recorded;
}

}  // namespace dfg
