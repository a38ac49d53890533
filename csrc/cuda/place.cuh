// Which part of X and of both planes a block of threads works on, experts included.
#pragma once

#include "tile.cuh"

namespace dfg {

// What placing needs to know of a launch; a plane that is not written has extent 0.
struct Layout {
  int64_t rows, columns;  // of X
  int64_t row_stored;     // Rp of the row plane
  int64_t column_stored;  // Cp of the column plane
  int column_block;       // where an expert's part of the column plane may start
  uint32_t tiles_across;  // along K
  uint32_t tiles_down;    // along M: with experts, an upper bound
  Groups groups;
};

inline int64_t tiles_of(const Layout& l) {
  return static_cast<int64_t>(l.tiles_across) * l.tiles_down;
}

inline Layout layout_of(int64_t rows, int64_t columns, const Plane& row, const Plane& column,
                        const Groups& groups) {
  Layout l{};
  l.rows = rows;
  l.columns = columns;
  l.row_stored = row.options.codec == Codec::none ? 0 : row.stored_rows;
  l.column_stored = column.options.codec == Codec::none ? 0 : column.stored_contraction;
  switch (column.options.codec) {
    case Codec::block:
      l.column_block = 128;
      break;
    case Codec::mxfp8:
    case Codec::nvfp4:
      l.column_block = 32;
      break;
    default:
      l.column_block = 16;
  }
  l.tiles_across = static_cast<uint32_t>(ceil_div(columns, kTile));
  // Each expert may begin a tile of its own; one more, at least, clears what follows the last.
  const int64_t more = groups.count > 0 ? groups.count + 1 : 0;
  l.tiles_down = static_cast<uint32_t>(ceil_div(rows, kTile) + more);
  l.groups = groups;
  return l;
}

// This block's tile: along K first. (In bands of eight along M, which would let neighbours share
// the sectors of MXFP8's column scales, every pair is a microsecond slower.)
struct TileIndex {
  uint32_t down, across;
};
__device__ __forceinline__ TileIndex tile_of_block(const Layout& l) {
  const uint32_t down = blockIdx.x / l.tiles_across;
  return {down, blockIdx.x - down * l.tiles_across};
}

// Where the experts end, in tiles, in X and in the column plane.
struct GroupSearch {
  bool found;
  int expert;
  int64_t first_row, end_row;  // of the expert, in X
  int64_t first_tile;          // of the expert
  int64_t part, part_extent;   // of the expert, in the column plane
  int64_t all_tiles, all_rows, all_parts;
};

// Over the lanes up to this one, which is one of the first `lanes`: the sum, or the maximum.
template <bool kIsMaximum>
__device__ __forceinline__ uint32_t scanned(uint32_t value, int lanes) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    if (d >= lanes) break;
    const uint32_t other = __shfl_up_sync(kFullWarp, value, d);
    if (static_cast<int>(threadIdx.x % 32) < d) continue;
    value = kIsMaximum ? max(value, other) : value + other;
  }
  return value;
}

// One warp. Finds the expert that tile `tile` belongs to. Ends that decrease, or lie outside X,
// cannot be refused without a synchronisation; they are taken as the nearest that are in order.
// 32 bits: an end has 31, and padding adds at most 128 per expert.
__device__ __forceinline__ void search_groups(const Layout& l, uint32_t tile, bool writes_ends,
                                              GroupSearch& result) {
  const int lane = threadIdx.x % 32;
  const auto block = static_cast<uint32_t>(l.column_block);
  const auto limit = static_cast<int32_t>(min(l.rows, int64_t{INT32_MAX}));
  uint32_t tiles_before = 0, rows_before = 0, parts_before = 0;
  if (lane == 0) result.found = false;
  __syncwarp();
  for (int base = 0; base < l.groups.count; base += 32) {
    const int e = base + lane, lanes = min(l.groups.count - base, 32);
    const bool is_valid = lane < lanes;
    const auto given = static_cast<uint32_t>(is_valid ? max(min(l.groups.ends[e], limit), 0) : 0);
    const uint32_t end = scanned<true>(max(rows_before, given), lanes);
    const uint32_t before = __shfl_up_sync(kFullWarp, end, 1);
    const uint32_t first = lane == 0 ? rows_before : before;
    const uint32_t rows = end - first;
    const uint32_t tiles = rows > 0 ? (rows + kTile - 1) / kTile : 1;
    const uint32_t part = rows > 0 ? (rows + block - 1) & (0u - block) : block;
    const uint32_t tile_end = tiles_before + scanned<false>(tiles, lanes);
    const uint32_t part_end = parts_before + scanned<false>(part, lanes);
    if (is_valid && tile < tile_end && tile >= tile_end - tiles) {
      result.found = true;
      result.expert = e;
      result.first_row = first;
      result.end_row = end;
      result.first_tile = tile_end - tiles;
      result.part = part_end - part;
      result.part_extent = part;
    }
    if (is_valid && writes_ends) l.groups.column_ends[e] = static_cast<int32_t>(part_end);
    tiles_before = __shfl_sync(kFullWarp, tile_end, lanes - 1);
    rows_before = __shfl_sync(kFullWarp, end, lanes - 1);
    parts_before = __shfl_sync(kFullWarp, part_end, lanes - 1);
  }
  if (lane == 0) {
    result.all_tiles = tiles_before;
    result.all_rows = rows_before;
    result.all_parts = parts_before;
  }
}

// All threads. Places this block's tile; one behind all experts has no rows and no extents
// (`search` then says where the experts end).
__device__ __forceinline__ Place find_place(const Layout& l, GroupSearch& search) {
  const TileIndex index = tile_of_block(l);
  const int64_t down = index.down;
  Place p{};
  p.x_column = static_cast<int64_t>(index.across) * kTile;
  p.columns = clamp_to_tile(l.columns - p.x_column);
  if (l.groups.count == 0) {
    p.x_row = down * kTile;
    p.rows = clamp_to_tile(l.rows - p.x_row);
    p.row_extent = clamp_to_tile(l.row_stored - p.x_row);
    p.column_start = p.x_row;
    p.column_extent = clamp_to_tile(l.column_stored - p.x_row);
    p.expert_row = p.x_row;
    p.is_first_row_tile = down == 0;
    return p;
  }
  if (threadIdx.x < 32) {
    const bool writes_ends = blockIdx.x == 0 && l.groups.column_ends != nullptr;
    search_groups(l, index.down, writes_ends, search);
  }
  __syncthreads();
  p.is_behind_experts = !search.found;
  if (p.is_behind_experts) return p;
  const int64_t offset = (down - search.first_tile) * kTile;
  p.x_row = search.first_row + offset;
  p.rows = clamp_to_tile(search.end_row - p.x_row);
  p.row_extent = l.row_stored > 0 ? p.rows : 0;
  p.column_start = search.part + offset;
  p.column_extent = l.column_stored > 0 ? clamp_to_tile(search.part_extent - offset) : 0;
  p.expert = search.expert;
  p.expert_row = offset;
  p.is_first_row_tile = offset == 0;
  return p;
}

}  // namespace dfg
