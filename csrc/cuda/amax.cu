// max |x| over finite elements, of a matrix, of each of its rows or of each expert's rows, in one
// read at memory speed.
#include "kernels.h"
#include "magnitude.cuh"

namespace dfg {
namespace {

using stream::raise;

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kWarps = kThreads / stream::kWarp;
constexpr int kLoads = 8;                         // independent 16-byte loads of a lane
constexpr int kVectors = kLoads * stream::kWarp;  // of a unit: what a warp reads at once
constexpr int kSharedExperts = 1024;              // whose maxima a block keeps to itself

// A running maximum of a lane.
template <Dtype kDtype>
struct Maximum {
  using M = stream::Magnitude<kDtype>;
  static constexpr int kBytes = sizeof(typename M::Element);

  uint32_t value = M::kLift;

  __device__ void take(uint32_t word) { value = M::larger(M::lifted(word), value); }
  __device__ void take_element(const char* p) {
    take(*reinterpret_cast<const typename M::Element*>(p));
  }
  // The largest of the warp, as FP32 bits, in every lane.
  __device__ uint32_t reduce() const { return M::widened(M::reduced(value)); }
};

struct AmaxParams {
  const char* x;
  float* amax;
  int64_t rows, columns, row_bytes, segments;
  Groups groups;
};

// What shares one amax.
enum class Of { matrix, row, expert };

// Elements in front of the first 16-byte boundary, at most `columns`.
template <int kBytes>
__device__ __forceinline__ int64_t head_of(const char* row, int64_t columns) {
  const int64_t head = (-reinterpret_cast<intptr_t>(row) & 15) / kBytes;
  return head < columns ? head : columns;
}

// One unit of a row: kVectors aligned vectors. The last unit also takes the elements in front of
// and behind all vectors: where there are any, its own vectors are fewer than kVectors.
template <Dtype kDtype>
__device__ __forceinline__ void take_unit(const AmaxParams& p, const char* row, int64_t segment,
                                          int lane, Maximum<kDtype>& maximum) {
  constexpr int kBytes = Maximum<kDtype>::kBytes;
  constexpr int kPerVector = 16 / kBytes;
  const int64_t head = head_of<kBytes>(row, p.columns);
  const int64_t vectors = (p.columns - head) / kPerVector;
  const char* body = row + head * kBytes;
  const int64_t first = segment * kVectors + lane;
  uint4 v[kLoads];
  if (segment * kVectors + kVectors <= vectors) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = stream::load16(body + (first + i * stream::kWarp) * 16);
  } else {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = first + i * stream::kWarp;
      v[i] = at < vectors ? stream::load16(body + at * 16) : make_uint4(0, 0, 0, 0);
    }
    if (segment == p.segments - 1) {
      const int64_t behind = head + vectors * kPerVector + lane;
      if (lane < head) maximum.take_element(row + lane * kBytes);
      if (behind < p.columns) maximum.take_element(row + behind * kBytes);
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    maximum.take(v[i].x);
    maximum.take(v[i].y);
    maximum.take(v[i].z);
    maximum.take(v[i].w);
  }
}

// Each block's maxima of the first kSharedExperts: thousands of units of one expert would otherwise
// queue at its amax. −1: no unit.
struct SharedMaxima {
  int of_expert[kSharedExperts];

  __device__ void clear(int experts) {
    for (int e = threadIdx.x; e < experts && e < kSharedExperts; e += kThreads) of_expert[e] = -1;
    __syncthreads();
  }
  __device__ void take(float* amax, int expert, uint32_t bits) {
    if (expert < kSharedExperts) {
      atomicMax(of_expert + expert, static_cast<int>(bits));
    } else {
      raise(amax + expert, bits);
    }
  }
  __device__ void flush(float* amax, int experts) {
    __syncthreads();
    for (int e = threadIdx.x; e < experts && e < kSharedExperts; e += kThreads) {
      if (of_expert[e] >= 0) raise(amax + e, static_cast<uint32_t>(of_expert[e]));
    }
  }
};

template <Dtype kDtype>
__device__ __forceinline__ void amax_of_experts(const AmaxParams& p, stream::Walker& walk, int lane,
                                                SharedMaxima& shared) {
  const stream::Ends ends(p.groups);
  shared.clear(p.groups.count);
  for (; !walk.done(); walk.next()) {
    Maximum<kDtype> maximum;
    take_unit<kDtype>(p, p.x + walk.row * p.row_bytes, walk.segment, lane, maximum);
    const uint32_t bits = maximum.reduce();
    const int expert = ends.expert_of(walk.row);
    if (lane == 0 && expert >= 0) shared.take(p.amax, expert, bits);
  }
  shared.flush(p.amax, p.groups.count);
}

template <Dtype kDtype, Of kOf>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) amax_kernel(const AmaxParams p) {
  const int lane = threadIdx.x % stream::kWarp, warp = threadIdx.x / stream::kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  stream::Walker walk(p.rows, p.segments, index, static_cast<int64_t>(gridDim.x) * kWarps);
  if constexpr (kOf == Of::expert) {
    __shared__ SharedMaxima shared;
    amax_of_experts<kDtype>(p, walk, lane, shared);
    return;
  }
  Maximum<kDtype> maximum;
  for (; !walk.done(); walk.next()) {
    if (kOf == Of::row) maximum = Maximum<kDtype>();
    take_unit<kDtype>(p, p.x + walk.row * p.row_bytes, walk.segment, lane, maximum);
    if (kOf == Of::row) {
      const uint32_t bits = maximum.reduce();
      if (lane == 0) raise(p.amax + walk.row, bits);
    }
  }
  if (kOf == Of::matrix) {
    __shared__ uint32_t of_warp[kWarps];
    const uint32_t bits = maximum.reduce();
    if (lane == 0) of_warp[warp] = bits;
    __syncthreads();
    if (warp == 0) {
      const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, lane < kWarps ? of_warp[lane] : 0u);
      if (lane != 0) return;
      if (gridDim.x == 1) {
        *p.amax = __uint_as_float(top);
      } else {
        raise(p.amax, top);
      }
    }
  }
}

template <Of kOf>
cudaError_t launch(const void* x, Dtype dtype, int64_t rows, int64_t columns, int64_t row_stride,
                   float* amax, cudaStream_t stream, const Groups& groups = {}) {
  if (rows <= 0 || columns <= 0) {
    return kOf == Of::matrix ? cudaMemsetAsync(amax, 0, sizeof *amax, stream) : cudaSuccess;
  }
  const int bytes = dtype == Dtype::f32 ? 4 : 2;
  if (kOf == Of::matrix && row_stride == columns) {
    columns *= rows;  // without gaps the matrix is one long row
    rows = 1;
  }
  const int64_t segments = ceil_div(columns * bytes, kVectors * 16);
  const AmaxParams params{static_cast<const char*>(x), amax,     rows,  columns,
                          row_stride * bytes,          segments, groups};
  unsigned blocks = 0;
  const cudaError_t error =
      stream::persistent_blocks(rows * segments, kWarps, kBlocksPerSm, &blocks);
  if (error != cudaSuccess) return error;
  if (kOf == Of::matrix && blocks > 1) {  // one block, as for a small layer, need not
    const cudaError_t cleared = cudaMemsetAsync(amax, 0, sizeof *amax, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  switch (dtype) {
    case Dtype::f32:
      amax_kernel<Dtype::f32, kOf><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case Dtype::f16:
      amax_kernel<Dtype::f16, kOf><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case Dtype::bf16:
      amax_kernel<Dtype::bf16, kOf><<<blocks, kThreads, 0, stream>>>(params);
      break;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t amax_tensor_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                             int64_t row_stride, float* amax, cudaStream_t stream) {
  return launch<Of::matrix>(x, dtype, rows, columns, row_stride, amax, stream);
}

cudaError_t amax_rows_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                           int64_t row_stride, float* amax, cudaStream_t stream) {
  return launch<Of::row>(x, dtype, rows, columns, row_stride, amax, stream);
}

cudaError_t amax_experts_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                              int64_t row_stride, const Groups& groups, float* amax,
                              cudaStream_t stream) {
  return launch<Of::expert>(x, dtype, rows, columns, row_stride, amax, stream, groups);
}

}  // namespace dfg
