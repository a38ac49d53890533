// The scales that statistics give to the plane rows of a tile, in shared memory: found once for the
// tile, while it is loaded, and stored for the plane's readers.
#pragma once

#include <type_traits>

#include "scale.cuh"

namespace dfg {

template <class S>
constexpr bool kHasStatistic = S::kCodec == Codec::float8 || S::kCodec == Codec::nvfp4;

// One OuterScale for each plane row (line) of the tile; that of the tensor or the expert is line
// 0's. Array by array, so that what a codec has no use for is not read.
struct OuterLines {
  float first[kTile];  // float8: encode; nvfp4: global.sixth
  float decode[kTile];
  float inverse[kTile];  // nvfp4: global.inverse

  __device__ __forceinline__ OuterScale at(int line) const {
    return {first[line], decode[line], {first[line], inverse[line]}};
  }
};

// Where the statistics and the outer scales of a tile's lines lie.
struct OuterPlace {
  int64_t statistic, outer;  // indices of line 0's
  int lines;                 // how many are found
  int measured;              // lines that have a statistic; those behind them have an outer of 0
  int stored;                // lines whose outer this tile stores
};

// The tensor's, or the expert's: stored by its first tile.
__device__ __forceinline__ OuterPlace outer_of_expert(const Place& place) {
  const bool is_first = place.x_column == 0 && place.is_first_row_tile;
  return {place.expert, place.expert, 1, 1, is_first ? 1 : 0};
}

template <class S>
__device__ __forceinline__ OuterPlace outer_of_rows(const Plane& plane, const Place& place) {
  if (!S::row_scaled(plane.options)) return outer_of_expert(place);
  return {place.x_row, place.x_row, kTile, place.rows, place.x_column == 0 ? place.row_extent : 0};
}

// plane_rows: R.
template <class S>
__device__ __forceinline__ OuterPlace outer_of_columns(const Plane& plane, int64_t plane_rows,
                                                       const Place& place) {
  if (!S::row_scaled(plane.options)) return outer_of_expert(place);
  const int stored = clamp_to_tile(plane.stored_rows - place.x_column);
  return {place.expert * plane_rows + place.x_column,
          place.expert * plane.stored_rows + place.x_column, kTile, place.columns,
          place.is_first_row_tile ? stored : 0};
}

// One line of the tile; a barrier must follow. kStore: the plane is written.
template <class S, bool kStore>
__device__ __forceinline__ void find_outer(const Plane& plane, const OuterPlace& at, int line,
                                           OuterLines& lines) {
  if constexpr (std::is_same_v<S, AnySpec>) {
    if (plane.options.codec == Codec::float8) {
      find_outer<Spec<Codec::float8>, kStore>(plane, at, line, lines);
    } else if (plane.options.codec == Codec::nvfp4) {
      find_outer<Spec<Codec::nvfp4>, kStore>(plane, at, line, lines);
    }
  } else if constexpr (kHasStatistic<S>) {
    if (line >= at.lines) return;
    const bool is_measured = line < at.measured;
    const float statistic = is_measured ? plane.statistic[at.statistic + line] : 0.0f;
    const OuterScale scale = outer_scale<S>(plane.options, statistic);
    lines.first[line] = S::kIsNvfp4 ? scale.global.sixth : scale.encode;
    lines.decode[line] = scale.decode;
    if (S::kIsNvfp4) lines.inverse[line] = scale.global.inverse;
    if (kStore && line < at.stored) {
      plane.outer[at.outer + line] = is_measured ? scale.decode : 0.0f;
    }
  }
}

}  // namespace dfg
