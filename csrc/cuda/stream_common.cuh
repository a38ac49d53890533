// What the streaming kernels share: a persistent grid of warps that walks a matrix backwards, and
// loads that leave L1 alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../codecs/common.h"

namespace dfg::stream {

constexpr int kWarp = 32;

// Walks units (row, segment) from the last to the first, `stride` at a time: a kernel that follows
// and starts at the beginning of the matrix finds there what L2 still holds.
struct Walker {
  int64_t row, segment, row_step, segment_step, segments;

  // index: this warp of the grid; stride: warps in the grid.
  __device__ Walker(int64_t rows, int64_t segments_per_row, int64_t index, int64_t stride)
      : segments(segments_per_row) {
    const int64_t unit = rows * segments - 1 - index;
    row = unit < 0 ? -1 : unit / segments;
    segment = unit - row * segments;
    row_step = stride / segments;
    segment_step = stride - row_step * segments;
  }

  __device__ bool done() const { return row < 0; }

  __device__ void next() {
    row -= row_step;
    segment -= segment_step;
    if (segment < 0) {
      segment += segments;
      --row;
    }
  }
};

__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint2 load8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t load4(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// Blocks of a grid that is all resident at once, or fewer where `units` warps have nothing to do.
inline cudaError_t persistent_blocks(int64_t units, int warps_per_block, int blocks_per_sm,
                                     unsigned* blocks) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  const int64_t resident = static_cast<int64_t>(sms) * blocks_per_sm;
  const int64_t needed = ceil_div(units, warps_per_block);
  *blocks = static_cast<unsigned>(needed < resident ? needed : resident);
  return error;
}

}  // namespace dfg::stream
