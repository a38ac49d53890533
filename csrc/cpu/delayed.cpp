// The update that ends a step of delayed scaling (dist_finegrain/delayed.py).
#include <cstring>

#include "../codecs/common.h"
#include "float_mode.h"
#include "kernels.h"

namespace dfg {
namespace {

constexpr float kNotRun = -1.0f;

// A NaN stays, so that the scale is kept.
float window_maximum(const float* history, int32_t length) {
  float amax = history[0];
  for (int32_t i = 1; i < length; ++i) {
    if (is_nan(amax)) break;
    if (is_nan(history[i]) || history[i] > amax) amax = history[i];
  }
  return amax;
}

void update(const DelayedSlot& slot) {
  const float pending = *slot.pending;
  *slot.pending = kNotRun;
  if (!(pending >= 0.0f)) return;
  const int32_t last = slot.history_length - 1;
  std::memmove(slot.history, slot.history + 1, sizeof(float) * last);
  slot.history[last] = pending;
  const float amax = slot.use_max ? window_maximum(slot.history, slot.history_length) : pending;
  if (!(amax > 0.0f) || !is_finite(amax)) return;
  const float scale = divide(divide(slot.fp8_max, amax), slot.margin_divisor);
  *slot.scale = smaller(scale, kFltMax);
}

}  // namespace

void update_delayed_cpu(const DelayedSlot* slots, int64_t count) {
  const SubnormalsKept mode;
  for (int64_t i = 0; i < count; ++i) update(slots[i]);
}

}  // namespace dfg
