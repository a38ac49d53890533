// Cast and measure by tiles: X is read once, the row plane is made of the transposed tile, the
// column plane of the tile itself.
#pragma once

#include "encode.h"

namespace dfg {
namespace DFG_VARIANT {

// The part of X that cast and measure share.
struct Matrix {
  const void* x;
  Dtype dtype;
  int64_t rows, columns, row_stride;
};

inline int up_to_tile(int64_t left) { return left < kTile ? static_cast<int>(left) : kTile; }

template <class Args>
Matrix matrix_of(const Args& args) {
  return {args.x, args.dtype, args.rows, args.columns, args.row_stride};
}

template <class Source>
void load_rows(const Matrix& matrix, const RowTile& at, int64_t column, int width, Lanes* tile) {
  using Bits = typename Source::Bits;
  const Bits* x = static_cast<const Bits*>(matrix.x) + at.row * matrix.row_stride + column;
  for (int row = 0; row < at.rows; ++row) {
    const Bits* __restrict in = x + row * matrix.row_stride;
    float* __restrict out = tile[row];
    if (width == kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) out[lane] = Source::widen(in[lane]);
    } else {
      for (int lane = 0; lane < width; ++lane) out[lane] = Source::widen(in[lane]);
      for (int lane = width; lane < kLanes; ++lane) out[lane] = 0.0f;
    }
  }
  if (at.rows < kTile) std::memset(tile[at.rows], 0, sizeof(Lanes) * (kTile - at.rows));
}

inline void load(const Matrix& matrix, const RowTile& at, int64_t column, int width, Lanes* tile) {
  with_element(matrix.dtype,
               [&](auto source) { load_rows<decltype(source)>(matrix, at, column, width, tile); });
}

inline void sum_rows(const Lanes* __restrict tile, int width, float* out) {
  Lanes sums;
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] = 0.0f;
  for (int row = 0; row < kTile; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = add(sums[lane], tile[row][lane]);
  }
  std::memcpy(out, sums, sizeof(float) * width);
}

// Statistic of lane 0: one per matrix or expert, or one per plane row (`row` of `rows`).
inline const float* statistic_at(const float* base, const PlaneOptions& options, int expert,
                                 int64_t row, int64_t rows) {
  if (base == nullptr) return nullptr;
  return options.row_scaled ? base + expert * rows + row : base + expert;
}

inline float* amax_at(const Plane& plane, int expert) {
  return plane.amax == nullptr ? nullptr : plane.amax + expert;
}

inline NoisePlace noise_place(const Plane& plane, const int64_t* seed_step, int64_t row,
                              int64_t contraction) {
  if (!plane.options.stochastic) return {};
  return {static_cast<uint32_t>(seed_step[0]), static_cast<uint32_t>(seed_step[1]), plane.stream,
          plane.row_origin + row, plane.contraction_origin + contraction};
}

// The row plane's part of a tile. A row-scaled row plane has one statistic per row of X, whatever
// the experts.
inline Place row_place(const Plane& plane, const RowTile& at, int64_t column,
                       const int64_t* seed_step) {
  Place place;
  place.row = at.row;
  place.lanes = at.rows;
  place.contraction = column;
  place.extent = up_to_tile(plane.stored_contraction - column);
  place.statistic = plane.options.row_scaled
                        ? plane.statistic + at.row
                        : statistic_at(plane.statistic, plane.options, at.expert, 0, 0);
  place.amax = amax_at(plane, at.expert);
  place.noise = noise_place(plane, seed_step, at.row - at.first_row, column);
  return place;
}

inline Place column_place(const Plane& plane, const RowTile& at, int64_t column, int width,
                          int64_t columns, const int64_t* seed_step) {
  Place place;
  place.row = column;
  place.lanes = width;
  place.contraction = at.column;
  place.extent = at.column_end;
  place.statistic = statistic_at(plane.statistic, plane.options, at.expert, column, columns);
  place.amax = amax_at(plane, at.expert);
  place.noise = noise_place(plane, seed_step, column, at.row - at.first_row);
  return place;
}

// The padding of a decoded plane is zero, or NaN where its block is: neither is part of X.
inline void clear_edges(Lanes* tile, int rows, int width) {
  for (int row = 0; row < rows && width < kLanes; ++row) {
    std::memset(tile[row] + width, 0, sizeof(float) * (kLanes - width));
  }
  if (rows < kTile) std::memset(tile[rows], 0, sizeof(Lanes) * (kTile - rows));
}

// scratch.tile becomes the decoded row plane, and the plane is written where it has buffers.
inline void row_phase(const Plane& plane, const Place& place, int width, bool decode, Dtype dtype,
                      Scratch& scratch) {
  transpose(scratch.tile, scratch.turned);
  encode_tile(plane, place, scratch.turned, decode, dtype, scratch);
  if (!decode) return;
  transpose(scratch.turned, scratch.tile);
  clear_edges(scratch.tile, place.lanes, width);
}

// Whether the codes of both planes are the same bytes, one plane's transposed.
inline bool has_shared_codes(const CastArgs& args, const RowTile& at) {
  const Plane &row = args.row, &column = args.column;
  const PlaneOptions &r = row.options, &c = column.options;
  if (args.dequantized || r.codec != c.codec || r.e5m2 != c.e5m2) return false;
  if (row.codes == nullptr || column.codes == nullptr) return false;
  if (r.power_of_two != c.power_of_two || r.epsilon != c.epsilon) return false;
  if (r.codec == Codec::float8) {
    return !r.row_scaled && !c.row_scaled && r.scale_given == c.scale_given &&
           row.statistic[at.expert] == column.statistic[at.expert];
  }
  return r.codec == Codec::block && r.two_dimensional && c.two_dimensional &&
         row.scales != nullptr && column.scales != nullptr;
}

// The row plane's part of a tile whose codes and 128×128 scale the column plane has just got.
inline void share_codes(const CastArgs& args, const Place& row, const Place& column, uint32_t found,
                        const Scratch& scratch) {
  const int64_t stride = args.row.stored_contraction;
  uint8_t* codes = args.row.codes + row.row * stride + row.contraction;
  for (int lane = 0; lane < row.lanes; ++lane) {
    std::memcpy(codes + lane * stride, scratch.codes[lane], row.extent);
  }
  if (args.row.options.codec == Codec::block) {
    *block_scale_at(args.row, row) = *block_scale_at(args.column, column);
  }
  if (row.amax != nullptr) raise(row.amax, found);
}

inline void cast_tiles(const CastArgs& args, const RowTile* tiles, int64_t begin, int64_t end) {
  Scratch scratch;
  const int64_t across = ceil_div(args.columns, kTile);
  for (int64_t item = begin; item < end; ++item) {
    const RowTile& at = tiles[item / across];
    const int64_t column = (item + at.shift) % across * kTile;
    const int width = up_to_tile(args.columns - column);
    load(matrix_of(args), at, column, width, scratch.tile);
    if (args.bias_partials != nullptr) {
      sum_rows(scratch.tile, width, args.bias_partials + at.row / kTile * args.columns + column);
    }
    const bool has_row = args.row.options.codec != Codec::none;
    const bool has_column = args.column.options.codec != Codec::none;
    Place row_at = {}, column_at = {};
    if (has_row) row_at = row_place(args.row, at, column, args.seed_step);
    if (has_column) {
      column_at = column_place(args.column, at, column, width, args.columns, args.seed_step);
    }
    const bool is_shared = has_shared_codes(args, at);
    if (has_row && !is_shared) {
      row_phase(args.row, row_at, width, args.dequantized, args.dtype, scratch);
    }
    if (!has_column) continue;
    const uint32_t found =
        encode_tile(args.column, column_at, scratch.tile, false, args.dtype, scratch);
    if (is_shared) share_codes(args, row_at, column_at, found, scratch);
  }
}

// Raises amax by what a plane of contraction-first `v` would encode; v is overwritten.
inline void measure_plane(const Measure& measure, Lanes* v, int lanes, float* amax, Dtype dtype,
                          Scratch& scratch) {
  if (measure.options.rht != Rht::off) {
    for (int first = 0; first < kTile; first += 16) rotate(v + first, measure.options.rht, dtype);
  }
  Words32 top;
  magnitudes(v, kTile, top);
  take_out_nonfinite(v, kTile, top, scratch.input);
  if (measure.options.row_scaled) {
    for (int lane = 0; lane < lanes; ++lane) raise(amax + lane, top[lane]);
  } else {
    raise(amax, largest(top, kLanes));
  }
}

inline void measure_tiles(const MeasureArgs& args, const RowTile* tiles, int64_t begin,
                          int64_t end) {
  Scratch scratch;
  const int64_t across = ceil_div(args.columns, kTile);
  for (int64_t item = begin; item < end; ++item) {
    const RowTile& at = tiles[item / across];
    const int64_t column = (item + at.shift) % across * kTile;
    const int width = up_to_tile(args.columns - column);
    load(matrix_of(args), at, column, width, scratch.tile);
    if (args.row.options.codec != Codec::none) {
      transpose(scratch.tile, scratch.turned);
      float* amax = args.row.amax + (args.row.options.row_scaled ? at.row : at.expert);
      measure_plane(args.row, scratch.turned, at.rows, amax, args.dtype, scratch);
    }
    if (args.column.options.codec != Codec::none) {
      if (args.dequantized) {
        const Place place = row_place(args.row_plane, at, column, nullptr);
        row_phase(args.row_plane, place, width, true, args.dtype, scratch);
      }
      float* amax =
          args.column.amax +
          (args.column.options.row_scaled ? at.expert * args.columns + column : at.expert);
      measure_plane(args.column, scratch.tile, width, amax, args.dtype, scratch);
    }
  }
}

}  // namespace DFG_VARIANT
}  // namespace dfg
