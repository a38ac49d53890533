// The cast kernel: load a tile once, row phase, column phase.
#pragma once

#include "phases.cuh"
#include "place.cuh"
#include "transpose.cuh"

namespace dfg {

// The phase of a plane, by its codec where the instance takes any.
template <class E, class S, Keep kKeep, bool kStore = true>
struct RowPhase {
  static __device__ __forceinline__ uint32_t run(const Target& target, const Place& place,
                                                 unsigned char* tile, const Parts& parts) {
    if constexpr (S::kCodec == Codec::none)
      return 0;
    else
      return row_phase<E, S, kKeep, kStore>(target, place, tile, parts);
  }
};

// Calls, so that registers are allocated codec by codec and not for all four at once.
template <class E, Codec kCodec, Keep kKeep, bool kStore>
__device__ __noinline__ uint32_t call_row_phase(const Target& target, const Place& place,
                                                unsigned char* tile, const Parts& parts) {
  return row_phase<E, Spec<kCodec>, kKeep, kStore>(target, place, tile, parts);
}

template <class E, Codec kCodec>
__device__ __noinline__ uint32_t call_column_phase(const Target& target, const Place& place,
                                                   const unsigned char* tile, const Parts& parts) {
  return column_phase<E, Spec<kCodec>>(target, place, tile, parts);
}

template <class E, Keep kKeep, bool kStore>
struct RowPhase<E, AnySpec, kKeep, kStore> {
  static __device__ __forceinline__ uint32_t run(const Target& target, const Place& place,
                                                 unsigned char* tile, const Parts& parts) {
    switch (target.plane.options.codec) {
      case Codec::float8:
        return call_row_phase<E, Codec::float8, kKeep, kStore>(target, place, tile, parts);
      case Codec::block:
        return call_row_phase<E, Codec::block, kKeep, kStore>(target, place, tile, parts);
      case Codec::mxfp8:
        return call_row_phase<E, Codec::mxfp8, kKeep, kStore>(target, place, tile, parts);
      case Codec::nvfp4:
        return call_row_phase<E, Codec::nvfp4, kKeep, kStore>(target, place, tile, parts);
      default:
        return 0;
    }
  }
};

template <class E, class S>
struct ColumnPhase {
  static __device__ __forceinline__ uint32_t run(const Target& target, const Place& place,
                                                 const unsigned char* tile, const Parts& parts) {
    if constexpr (S::kCodec == Codec::none)
      return 0;
    else
      return column_phase<E, S>(target, place, tile, parts);
  }
};

template <class E, class Row>
struct ColumnPhase<E, Transposed<Row>> {
  static __device__ __forceinline__ uint32_t run(const Target& target, const Place& place,
                                                 const unsigned char* tile, const Parts& parts) {
    transpose_phase<E, Row>(target, place, tile, parts);
    return 0;
  }
};

template <class E>
struct ColumnPhase<E, AnySpec> {
  static __device__ __forceinline__ uint32_t run(const Target& target, const Place& place,
                                                 const unsigned char* tile, const Parts& parts) {
    switch (target.plane.options.codec) {
      case Codec::float8:
        return call_column_phase<E, Codec::float8>(target, place, tile, parts);
      case Codec::block:
        return call_column_phase<E, Codec::block>(target, place, tile, parts);
      case Codec::mxfp8:
        return call_column_phase<E, Codec::mxfp8>(target, place, tile, parts);
      case Codec::nvfp4:
        return call_column_phase<E, Codec::nvfp4>(target, place, tile, parts);
      default:
        return 0;
    }
  }
};

// Sums over the rows of the tile for each of its columns, FP32, always in the same order.
template <class E>
__device__ __noinline__ void sum_columns(int columns, const unsigned char* tile, float* sums) {
  for (int i = 0; i < kColumnSteps; ++i) {
    const int pair = pair_of_step(i);
    typename E::Pair p[16];
    read_column_pairs<E>(tile, along(), pair, p);
    float lo = 0.0f, hi = 0.0f;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      lo = add(lo, E::lo(p[k]));
      hi = add(hi, E::hi(p[k]));
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      lo = add(lo, __shfl_xor_sync(kFullWarp, lo, d));
      hi = add(hi, __shfl_xor_sync(kFullWarp, hi, d));
    }
    if (along() == 0) {
      if (2 * pair < columns) sums[2 * pair] = lo;
      if (2 * pair + 1 < columns) sums[2 * pair + 1] = hi;
    }
  }
}

// Zeros plane rows row_begin … row_end − 1 from contraction index begin to end: codes and scales.
inline __device__ __noinline__ void clear_part(const Plane& p, int64_t row_begin, int64_t row_end,
                                               int64_t begin, int64_t end) {
  const Codec codec = p.options.codec;
  const int codes_per_byte = codec == Codec::nvfp4 ? 2 : 1;
  const int group = codec == Codec::mxfp8 ? 32 : codec == Codec::nvfp4 ? 16 : 128;
  const int lane = threadIdx.x % 32;
  for (int64_t row = row_begin + threadIdx.x / 32; row < row_end; row += kThreads / 32) {
    for (int64_t at = begin + lane * codes_per_byte; at < end; at += 32 * codes_per_byte) {
      p.codes[(row * p.stored_contraction + at) / codes_per_byte] = 0;
    }
    if (codec == Codec::float8) continue;
    for (int64_t at = begin / group + lane; at * group < end; at += 32) {
      if (codec == Codec::block) {
        static_cast<float*>(p.scales)[at * p.stored_rows + row] = 0.0f;
      } else {
        static_cast<uint8_t*>(p.scales)[row * (p.stored_contraction / group) + at] = 0;
      }
    }
  }
}

// Zeros what the experts leave of both planes: 128 rows or columns at a time, in turn with the
// other blocks behind the experts.
__device__ __forceinline__ void clear_rest(const CastArgs& args, const Layout& l, int64_t x_column,
                                           const GroupSearch& search) {
  const int64_t first = (tile_of_block(l).down - search.all_tiles) * kTile;
  const int64_t step = (l.tiles_down - search.all_tiles) * kTile;
  const Plane &row = args.row, &column = args.column;
  if (column.options.codec != Codec::none) {
    const int64_t row_end = min(x_column + kTile, column.stored_rows),
                  end = column.stored_contraction;
    for (int64_t at = search.all_parts + first; at < end; at += step) {
      clear_part(column, x_column, row_end, at, min(at + kTile, end));
    }
  }
  if (row.options.codec != Codec::none) {
    const int64_t column_end = min(x_column + kTile, row.stored_contraction);
    for (int64_t at = search.all_rows + first; at < row.stored_rows; at += step) {
      const int64_t end = min(at + kTile, row.stored_rows);
      clear_part(row, at, end, x_column, column_end);
      if (!row.options.row_scaled || x_column > 0) continue;
      for (int64_t i = at + threadIdx.x; i < end; i += kThreads) row.outer[i] = 0.0f;
    }
  }
}

// Whether a plane's only use of `Parts`, if any, is the amax of the whole tile.
__device__ __forceinline__ bool is_whole_tile(const PlaneOptions& o) {
  return o.codec == Codec::block || !o.two_dimensional;
}

// A uniform value in a uniform register: what follows from it costs no lane anything.
__device__ __forceinline__ uint32_t uniform(int64_t value) {
  return __reduce_or_sync(kFullWarp, static_cast<uint32_t>(value));
}

// Half of the threads for either plane.
template <class Row, class Column>
__device__ __forceinline__ void find_outers(const Target& row, const Target& column,
                                            const Place& place, OuterLines (&outer)[2]) {
  static_assert(kThreads == 2 * kTile);
  const int line = threadIdx.x % kTile;
  if (threadIdx.x < kTile) {
    find_outer<Row, true>(row.plane, outer_of_rows<Row>(row.plane, place), line, outer[0]);
  } else {
    find_outer<Column, true>(column.plane,
                             outer_of_columns<Column>(column.plane, column.plane_rows, place), line,
                             outer[1]);
  }
}

template <class E, class Row, class Column, bool kDequantized, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    cast_kernel(const __grid_constant__ CastArgs args, const __grid_constant__ Layout layout) {
  extern __shared__ __align__(128) unsigned char tile[];
  __shared__ Parts parts;
  __shared__ OuterLines outer[2];
  __shared__ GroupSearch search;
  const Place place = find_place(layout, search);
  if (place.is_behind_experts) {
    clear_rest(args, layout, place.x_column, search);
    return;
  }
  begin_load<E>(args.x, args.row_stride, place, tile);
  const PlaneOptions &r = args.row.options, &c = args.column.options;
  Target row{args.row, args.rows, args.columns, outer[0], 0, 0};
  Target column{args.column, args.columns, args.rows, outer[1], 0, 0};
  if (args.seed_step) {
    row.seed = column.seed = uniform(args.seed_step[0]);
    row.step = column.step = uniform(args.seed_step[1]);
  }
  find_outers<Row, Column>(row, column, place, outer);
  end_load();
  constexpr bool kTransposed = kIsTransposed<Column>;
  constexpr Keep kKeep = kDequantized ? Keep::values : kTransposed ? Keep::codes : Keep::input;
  if (args.bias_partials) {
    sum_columns<E>(place.columns, tile,
                   args.bias_partials + place.x_row / kTile * args.columns + place.x_column);
    if (kKeep != Keep::input) __syncthreads();  // the row phase overwrites what is summed
  }
  if (kDequantized ? r.two_dimensional : r.two_dimensional || c.two_dimensional) {
    measure_parts<E>(tile, is_whole_tile(r) && (kDequantized || is_whole_tile(c)), parts);
  }
  const uint32_t row_amax = RowPhase<E, Row, kKeep>::run(row, place, tile, parts);
  if (args.row.amax) raise_by_warp(args.row.amax + place.expert, row_amax);
  if (kKeep != Keep::input) __syncthreads();
  if (kDequantized && c.two_dimensional) measure_parts<E>(tile, is_whole_tile(c), parts);
  const uint32_t own_amax = ColumnPhase<E, Column>::run(column, place, tile, parts);
  const uint32_t column_amax = kTransposed ? row_amax : own_amax;
  if (args.column.amax) raise_by_warp(args.column.amax + place.expert, column_amax);
}

// One block per tile. kernel: of (args, layout).
template <class E, class Kernel, class Args>
cudaError_t launch_tiles(Kernel kernel, const Args& args, const Layout& layout,
                         cudaStream_t stream) {
  const int64_t tiles = tiles_of(layout);
  if (tiles > 0x7FFFFFFF) return cudaErrorInvalidConfiguration;
  // More than 48 KiB must be asked for, on each device; it costs about a microsecond.
  if constexpr (kTileBytes<E> > 40 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTileBytes<E>);
    if (status != cudaSuccess) return status;
  }
  kernel<<<static_cast<unsigned>(tiles), kThreads, kTileBytes<E>, stream>>>(args, layout);
  return cudaGetLastError();
}

template <class E, class Row, class Column, bool kDequantized, int kBlocksPerSm>
cudaError_t launch_cast(const CastArgs& args, cudaStream_t stream) {
  const Layout layout = layout_of(args.rows, args.columns, args.row, args.column, args.groups);
  return launch_tiles<E>(cast_kernel<E, Row, Column, kDequantized, kBlocksPerSm>, args, layout,
                         stream);
}

}  // namespace dfg
