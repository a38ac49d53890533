// max |x| over finite elements, of a matrix, of each of its rows or of each expert's rows, in one
// read at memory speed.
//
// |bits| of a finite element plus one unit of the exponent's last place stays below the sign bit;
// of NaN and Inf it reaches it. So a signed integer maximum skips non-finite elements by itself,
// and a maximum has no order: two runs give the same bits.
#include <cuda_fp16.h>

#include "kernels.h"
#include "stream_common.cuh"

namespace dfg {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kWarps = kThreads / stream::kWarp;
constexpr int kLoads = 8;                         // independent 16-byte loads of a lane
constexpr int kVectors = kLoads * stream::kWarp;  // of a unit: what a warp reads at once

// A running maximum of a lane: 16-bit types as two signed halves of a word.
template <Dtype kDtype>
struct Maximum {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kMagnitude = 0x7FFF7FFFu;
  static constexpr uint32_t kLift = kDtype == Dtype::bf16 ? 0x00800080u : 0x04000400u;

  uint32_t value = kLift;

  __device__ void take(uint32_t word) { value = __vmaxs2((word & kMagnitude) + kLift, value); }
  __device__ void take_element(const char* p) { take(*reinterpret_cast<const uint16_t*>(p)); }

  // |bits| of the largest of the warp, as FP32 bits, in every lane.
  __device__ uint32_t reduce() const {
    const uint32_t bits = value - kLift;
    const uint32_t low = bits & 0xFFFFu, high = bits >> 16;
    const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, low > high ? low : high);
    if (kDtype == Dtype::bf16) return top << 16;
    return bits_of(__half2float(__ushort_as_half(static_cast<unsigned short>(top))));
  }
};

template <>
struct Maximum<Dtype::f32> {
  static constexpr int kBytes = 4;
  static constexpr int32_t kLift = 0x00800000;

  int32_t value = kLift;

  __device__ void take(uint32_t word) {
    value = max(static_cast<int32_t>((word & 0x7FFFFFFFu) + kLift), value);
  }
  __device__ void take_element(const char* p) { take(*reinterpret_cast<const uint32_t*>(p)); }
  __device__ uint32_t reduce() const {
    return __reduce_max_sync(0xFFFFFFFFu, static_cast<uint32_t>(value - kLift));
  }
};

struct AmaxParams {
  const char* x;
  float* amax;
  int64_t rows, columns, row_bytes, segments;
  const int32_t* ends;  // of the experts' rows
  int32_t experts;
};

// What shares one amax.
enum class Of { matrix, row, expert };

// One warp. The first expert that ends behind `row`, as ends in order would have it; −1 behind all.
__device__ __forceinline__ int expert_of(const AmaxParams& p, int64_t row, int lane) {
  for (int base = 0; base < p.experts; base += stream::kWarp) {
    const bool is_behind = base + lane < p.experts && p.ends[base + lane] > row;
    const unsigned found = __ballot_sync(0xFFFFFFFFu, is_behind);
    if (found) return base + __ffs(found) - 1;
  }
  return -1;
}

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

// Non-negative floats, and the -1 of a slot that did not run, order like their signed bits.
__device__ __forceinline__ void raise(float* amax, uint32_t bits) {
  atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(bits));
}

template <Dtype kDtype, Of kOf>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) amax_kernel(const AmaxParams p) {
  const int lane = threadIdx.x % stream::kWarp, warp = threadIdx.x / stream::kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  stream::Walker walk(p.rows, p.segments, index, static_cast<int64_t>(gridDim.x) * kWarps);
  Maximum<kDtype> maximum;
  for (; !walk.done(); walk.next()) {
    if (kOf != Of::matrix) maximum = Maximum<kDtype>();
    take_unit<kDtype>(p, p.x + walk.row * p.row_bytes, walk.segment, lane, maximum);
    if (kOf != Of::matrix) {
      const uint32_t bits = maximum.reduce();
      const int64_t at = kOf == Of::row ? walk.row : expert_of(p, walk.row, lane);
      if (lane == 0 && at >= 0) raise(p.amax + at, bits);
    }
  }
  if (kOf == Of::matrix) {
    __shared__ uint32_t of_warp[kWarps];
    const uint32_t bits = maximum.reduce();
    if (lane == 0) of_warp[warp] = bits;
    __syncthreads();
    if (warp == 0) {
      const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, lane < kWarps ? of_warp[lane] : 0u);
      if (lane == 0) raise(p.amax, top);
    }
  }
}

template <Of kOf>
cudaError_t launch(const void* x, Dtype dtype, int64_t rows, int64_t columns, int64_t row_stride,
                   float* amax, cudaStream_t stream, const Groups& groups = {}) {
  if (rows <= 0 || columns <= 0) return cudaSuccess;
  const int bytes = dtype == Dtype::f32 ? 4 : 2;
  if (kOf == Of::matrix && row_stride == columns) {
    columns *= rows;  // without gaps the matrix is one long row
    rows = 1;
  }
  const int64_t segments = ceil_div(columns * bytes, kVectors * 16);
  const AmaxParams params{static_cast<const char*>(x), amax,     rows,        columns,
                          row_stride * bytes,          segments, groups.ends, groups.count};
  unsigned blocks = 0;
  const cudaError_t error =
      stream::persistent_blocks(rows * segments, kWarps, kBlocksPerSm, &blocks);
  if (error != cudaSuccess) return error;
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
