// Delayed scaling: every slot's history, scale and pending amax in one launch, a warp per slot.
#include <algorithm>

#include "kernels.h"
#include "stream_common.cuh"

namespace dfg {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / stream::kWarp;
constexpr int kRows = 8;  // entries of the history that a lane holds at once
constexpr int64_t kMaxBlocks = 65535;

struct Window {
  float maximum = -INFINITY;
  bool has_nan = false;

  __device__ void take(float value) {
    has_nan |= is_nan(value);
    maximum = fmaxf(maximum, value);
  }

  // NaN where any entry is: such a slot keeps its scale.
  __device__ float reduce() const {
    float top = maximum;
#pragma unroll
    for (int distance = stream::kWarp / 2; distance > 0; distance /= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, distance));
    }
    return __any_sync(0xFFFFFFFFu, has_nan) ? float_of(kNanBits) : top;
  }
};

// The history moves down by one, `newest` enters last; the maximum of what it then holds.
__device__ float roll(float* history, int length, float newest, int lane) {
  Window window;
  for (int64_t base = 0; base < length; base += kRows * stream::kWarp) {
    float next[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t at = base + i * stream::kWarp + lane;
      next[i] = at + 1 < length ? history[at + 1] : newest;
    }
    __syncwarp();  // another lane's entry is overwritten only after it was read
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t at = base + i * stream::kWarp + lane;
      if (at < length) {
        history[at] = next[i];
        window.take(next[i]);
      }
    }
    __syncwarp();
  }
  return window.reduce();
}

__global__ void __launch_bounds__(kThreads)
    update_kernel(const DelayedSlot* __restrict__ slots, int64_t count) {
  const int lane = threadIdx.x % stream::kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / stream::kWarp;
  for (; index < count; index += stride) {
    const DelayedSlot slot = slots[index];
    const float pending = *slot.pending;
    if (pending >= 0.0f) {
      const float top = roll(slot.history, slot.history_length, pending, lane);
      const float amax = slot.use_max ? top : pending;
      const float scale = divide(divide(slot.fp8_max, amax), slot.margin_divisor);
      if (lane == 0 && amax > 0.0f && is_finite(amax)) *slot.scale = smaller(scale, kFltMax);
    }
    __syncwarp();
    if (lane == 0) *slot.pending = -1.0f;
  }
}

}  // namespace

cudaError_t update_delayed_cuda(const DelayedSlot* slots, int64_t count, cudaStream_t stream) {
  if (count <= 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min(ceil_div(count, kWarps), kMaxBlocks));
  update_kernel<<<blocks, kThreads, 0, stream>>>(slots, count);
  return cudaGetLastError();
}

}  // namespace dfg
