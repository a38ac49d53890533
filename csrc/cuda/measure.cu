// Amaxes of both planes in one read: of the tensor, of its rows or columns, after the rotation, per
// expert, or of what a column plane will be made from.
#include "cast_kernel.cuh"
#include "kernels.h"

namespace dfg {
namespace {

// Largest finite magnitude of a unit (FP32 bits), rotated first if asked (its signs are flipped).
template <class E, class Unit>
__device__ __forceinline__ uint32_t unit_amax(const Unit& u, bool rotates) {
  if (rotates) return Rotated<E, E::kDtype == Dtype::bf16>(u).amax;
  const uint32_t amax = any_max(u);
  return is_bad(amax) ? finite_max(u) : amax;
}

__device__ __forceinline__ uint32_t along_max(uint32_t m) {
#pragma unroll
  for (int d = 1; d < 8; d *= 2) m = max(m, shuffle_xor(m, d));
  return m;
}

template <class E>
__device__ __forceinline__ void measure_rows(const Measure& measure, const Place& place,
                                             unsigned char* tile) {
  const RowUnits<E> units(tile);
  uint32_t all = 0;
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = row_of_step(i);
    RowUnit<E> u = units.read(i);
    if (measure.options.rht == Rht::with_signs) flip_row(u);
    const uint32_t amax = unit_amax<E>(u, measure.options.rht != Rht::off);
    if (measure.options.row_scaled) {
      const uint32_t of_row = along_max(amax);
      if (along() == 0 && row < place.rows) raise(measure.amax + place.x_row + row, of_row);
    }
    all = max(all, amax);
  }
  if (!measure.options.row_scaled) raise_by_warp(measure.amax + place.expert, all);
}

template <class E>
__device__ __forceinline__ void measure_columns(const Measure& measure, const Place& place,
                                                int64_t columns, const unsigned char* tile) {
  uint32_t all = 0;
#pragma unroll 1
  for (int i = 0; i < kColumnSteps; ++i) {
    const int pair = pair_of_step(i);
    typename E::Pair p[16];
    read_column_pairs<E>(tile, along(), pair, p);
    const bool rotates = measure.options.rht != Rht::off;
    if (measure.options.rht == Rht::with_signs) flip_columns<E>(p);
    const uint32_t lo = unit_amax<E>(ColumnUnit<E, 0>{p}, rotates);
    const uint32_t hi = unit_amax<E>(ColumnUnit<E, 1>{p}, rotates);
    if (measure.options.row_scaled) {
      const uint32_t of_lo = along_max(lo), of_hi = along_max(hi);
      float* amax = measure.amax + place.expert * columns + place.x_column;
      if (along() == 0 && 2 * pair < place.columns) raise(amax + 2 * pair, of_lo);
      if (along() == 0 && 2 * pair + 1 < place.columns) raise(amax + 2 * pair + 1, of_hi);
    }
    all = max(all, max(lo, hi));
  }
  if (!measure.options.row_scaled) raise_by_warp(measure.amax + place.expert, all);
}

template <class E>
constexpr int kBlocksPerSm = E::kBytes == 2 ? 3 : 2;

template <class E>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<E>)
    measure_kernel(const __grid_constant__ MeasureArgs args,
                   const __grid_constant__ Layout layout) {
  extern __shared__ __align__(128) unsigned char tile[];
  __shared__ Parts parts;
  __shared__ OuterLines outer;
  __shared__ GroupSearch search;
  const Place place = find_place(layout, search);
  if (place.is_behind_experts) return;
  begin_load<E>(args.x, args.row_stride, place, tile);
  const Plane& plane = args.row_plane;
  if (args.dequantized && threadIdx.x < kTile) {
    find_outer<AnySpec, false>(plane, outer_of_rows<AnySpec>(plane, place), threadIdx.x, outer);
  }
  end_load();
  if (args.row.options.codec != Codec::none) measure_rows<E>(args.row, place, tile);
  if (args.dequantized) {
    const Target row{plane, args.rows, args.columns, outer, 0, 0};
    const PlaneOptions& o = plane.options;
    if (o.two_dimensional) measure_parts<E>(tile, is_whole_tile(o), parts);
    __syncthreads();
    RowPhase<E, AnySpec, Keep::values, false>::run(row, place, tile, parts);
    __syncthreads();
  }
  if (args.column.options.codec != Codec::none) {
    measure_columns<E>(args.column, place, args.columns, tile);
  }
}

template <class E>
cudaError_t launch(const MeasureArgs& args, cudaStream_t stream) {
  const Layout layout = layout_of(args.rows, args.columns, Plane{}, Plane{}, args.groups);
  return launch_tiles<E>(measure_kernel<E>, args, layout, stream);
}

// Whether this plane is scaled by the largest magnitude of x, or of an expert's rows of it.
bool is_of_tensor(const Measure& m) {
  return m.options.codec != Codec::none && m.options.rht == Rht::off && !m.options.row_scaled;
}

// Whether this plane, if there is one, is scaled by the largest magnitudes of lines of x.
bool is_of_lines(const Measure& m) {
  return m.options.codec == Codec::none || (m.options.rht == Rht::off && m.options.row_scaled);
}

// Zeros where the kernels raise.
cudaError_t clear(const Measure& m, int64_t lines, int64_t experts, int64_t vectors,
                  cudaStream_t stream) {
  if (m.options.codec == Codec::none) return cudaSuccess;
  const int64_t count = m.options.row_scaled ? lines * vectors : (experts > 0 ? experts : 1);
  return cudaMemsetAsync(m.amax, 0, static_cast<size_t>(count) * sizeof(float), stream);
}

}  // namespace

cudaError_t measure_cuda(const MeasureArgs& args, cudaStream_t stream) {
  const int64_t experts = args.groups.count;
  const bool row = args.row.options.codec != Codec::none;
  const bool column = args.column.options.codec != Codec::none;
  const Measure& only = row ? args.row : args.column;
  const bool is_alone = row != column && !args.dequantized;
  if (is_alone && is_of_tensor(only) && experts == 0) {
    return amax_tensor_cuda(args.x, args.dtype, args.rows, args.columns, args.row_stride, only.amax,
                            stream);
  }
  cudaError_t error = clear(args.row, args.rows, experts, 1, stream);
  if (error != cudaSuccess) return error;
  error = clear(args.column, args.columns, experts, experts > 0 ? experts : 1, stream);
  if (error != cudaSuccess) return error;
  if (is_alone && is_of_tensor(only)) {
    return amax_experts_cuda(args.x, args.dtype, args.rows, args.columns, args.row_stride,
                             args.groups, only.amax, stream);
  }
  if (is_alone && row && experts == 0 && args.row.options.row_scaled &&
      args.row.options.rht == Rht::off) {
    return amax_rows_cuda(args.x, args.dtype, args.rows, args.columns, args.row_stride,
                          args.row.amax, stream);
  }
  if (!args.dequantized && is_of_lines(args.row) && is_of_lines(args.column) &&
      has_lines(args.x, args.dtype, args.columns, args.row_stride)) {
    return amax_lines_cuda(args.x, args.dtype, args.rows, args.columns, args.row_stride,
                           args.groups, row ? args.row.amax : nullptr,
                           column ? args.column.amax : nullptr, stream);
  }
  switch (args.dtype) {
    case Dtype::f32:
      return launch<Element<Dtype::f32>>(args, stream);
    case Dtype::f16:
      return launch<Element<Dtype::f16>>(args, stream);
    case Dtype::bf16:
      return launch<Element<Dtype::bf16>>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dfg
