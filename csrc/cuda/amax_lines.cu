// max |x| over finite elements of each row and of each column, of each expert's part of a column,
// in one read of an aligned matrix at memory speed.
#include "kernels.h"
#include "magnitude.cuh"

namespace dfg {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 2;  // at least: without spilling on any architecture
constexpr int kWarps = kThreads / stream::kWarp;
constexpr int kLoads = 8;                    // rows that a warp reads at once
constexpr int kAcross = 16 * stream::kWarp;  // bytes of a row that a warp, and a block, reads
constexpr int kRows = 2 * kWarps * kLoads;   // of a block

struct LinesParams {
  const char* x;
  int64_t rows, columns, row_bytes;
  float* of_rows;     // [rows] or null
  float* of_columns;  // [columns] or [experts, columns], or null
  uint32_t chunks;    // blocks beside each other
  Groups groups;
};

// One warp: kLoads rows from `row` on, `left` of which count. lane_part: this lane's vector of the
// first row, null behind the last column.
template <Dtype kDtype>
__device__ __forceinline__ void take_rows(const LinesParams& p, const char* lane_part, int64_t row,
                                          int64_t left, uint32_t (&columns)[4]) {
  using M = stream::Magnitude<kDtype>;
  const int rows = !lane_part ? 0 : left < kLoads ? static_cast<int>(left) : kLoads;
  const int lane = threadIdx.x % stream::kWarp;
  const char* from = lane_part + row * p.row_bytes;
  uint4 v[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    v[i] = i < rows ? stream::load16(from) : make_uint4(0, 0, 0, 0);
    from += p.row_bytes;
  }
  uint32_t of_row = 0;  // lane i keeps row i's
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t w[4] = {M::lifted(v[i].x), M::lifted(v[i].y), M::lifted(v[i].z),
                           M::lifted(v[i].w)};
#pragma unroll
    for (int k = 0; k < 4; ++k) columns[k] = M::larger(columns[k], w[k]);
    const uint32_t both = M::larger(M::larger(w[0], w[1]), M::larger(w[2], w[3]));
    const uint32_t top = M::reduced(M::larger(both, M::kLift));
    if (lane == i) of_row = top;
  }
  if (p.of_rows && lane < kLoads && lane < left) {
    stream::raise(p.of_rows + row + lane, M::widened(of_row));
  }
}

template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) lines_kernel(const LinesParams p) {
  using M = stream::Magnitude<kDtype>;
  using Element = typename M::Element;
  constexpr int kColumns = kAcross / sizeof(Element);
  constexpr int kPerVector = 16 / sizeof(Element);
  __shared__ __align__(16) Element of_warp[kWarps][kColumns];
  const int lane = threadIdx.x % stream::kWarp, warp = threadIdx.x / stream::kWarp;
  // From the last to the first, as Walker does.
  const uint32_t index = gridDim.x - 1 - blockIdx.x, strip = index / p.chunks;
  const int64_t first_column = static_cast<int64_t>(index - strip * p.chunks) * kColumns;
  const int64_t column = first_column + lane * kPerVector;
  const char* lane_part = column < p.columns ? p.x + column * sizeof(Element) : nullptr;
  const int64_t end = min((strip + int64_t{1}) * kRows, p.rows);
  const stream::Ends ends(p.groups);
  for (int64_t row = static_cast<int64_t>(strip) * kRows, stop; row < end; row = stop) {
    const int expert = p.groups.count == 0 ? 0 : ends.expert_of(row);
    if (expert < 0) return;  // nobody's rows
    stop = p.groups.count == 0 ? end : min(static_cast<int64_t>(p.groups.ends[expert]), end);
    uint32_t columns[4] = {M::kLift, M::kLift, M::kLift, M::kLift};
    for (int64_t at = row + warp * kLoads; at < stop; at += kWarps * kLoads) {
      take_rows<kDtype>(p, lane_part, at, stop - at, columns);
    }
    if (!p.of_columns) continue;
#pragma unroll
    for (int k = 0; k < 4; ++k) columns[k] -= M::kLift;
    *reinterpret_cast<uint4*>(of_warp[warp] + lane * kPerVector) =
        make_uint4(columns[0], columns[1], columns[2], columns[3]);
    __syncthreads();
    if (threadIdx.x < kColumns && first_column + threadIdx.x < p.columns) {
      uint32_t top = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = max(top, uint32_t{of_warp[w][threadIdx.x]});
      float* amax = p.of_columns + expert * p.columns + first_column;
      stream::raise(amax + threadIdx.x, M::widened(top));
    }
    __syncthreads();
  }
}

}  // namespace

bool has_lines(const void* x, Dtype dtype, int64_t columns, int64_t row_stride) {
  const int bytes = dtype == Dtype::f32 ? 4 : 2;
  const auto all = static_cast<uint64_t>(columns * bytes | row_stride * bytes);
  return ((reinterpret_cast<uintptr_t>(x) | all) & 15u) == 0;
}

cudaError_t amax_lines_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                            int64_t row_stride, const Groups& groups, float* of_rows,
                            float* of_columns, cudaStream_t stream) {
  if (rows <= 0 || columns <= 0) return cudaSuccess;
  const int bytes = dtype == Dtype::f32 ? 4 : 2;
  const int64_t chunks = ceil_div(columns * bytes, kAcross);
  const int64_t blocks = ceil_div(rows, kRows) * chunks;
  if (blocks > 0x7FFFFFFF) return cudaErrorInvalidConfiguration;
  const LinesParams p{
      static_cast<const char*>(x),   rows,  columns, row_stride * bytes, of_rows, of_columns,
      static_cast<uint32_t>(chunks), groups};
  const auto grid = static_cast<unsigned>(blocks);
  switch (dtype) {
    case Dtype::f32:
      lines_kernel<Dtype::f32><<<grid, kThreads, 0, stream>>>(p);
      break;
    case Dtype::f16:
      lines_kernel<Dtype::f16><<<grid, kThreads, 0, stream>>>(p);
      break;
    case Dtype::bf16:
      lines_kernel<Dtype::bf16><<<grid, kThreads, 0, stream>>>(p);
      break;
  }
  return cudaGetLastError();
}

}  // namespace dfg
