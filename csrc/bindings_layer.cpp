#include "bindings_layer.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <deque>
#include <mutex>

#include "gemm/problem.h"

namespace dfg {
namespace {

using at::Tensor;

constexpr size_t kPlanWords = 3 * kSlots + kGemms + 1;

std::mutex counters_mutex;
std::deque<std::array<int64_t, kGemms>>& counters() {
  static auto& all = *new std::deque<std::array<int64_t, kGemms>>;
  return all;
}

}  // namespace

LayerPlan::LayerPlan(at::IntArrayRef words, at::ArrayRef<double> epsilons) {
  TORCH_CHECK_VALUE(words.size() == kPlanWords && epsilons.size() == 2 * kSlots,
                    "plan and epsilons have ", words.size(), " and ", epsilons.size(),
                    " entries; accepted: ", kPlanWords, " and ", 2 * kSlots,
                    ", as dist_finegrain.modules.direct_linear packs");
  for (size_t i = 0; i < kSlots; ++i) {
    QuantizeOptions& slot = slots[i];
    slot.row = words[3 * i];
    slot.column = words[3 * i + 1];
    slot.dequantized = words[3 * i + 2] != 0;
    slot.row_epsilon = epsilons[2 * i];
    slot.column_epsilon = epsilons[2 * i + 1];
  }
  for (size_t i = 0; i < kGemms; ++i) fast[i] = words[3 * kSlots + i] != 0;
  counter = words[kPlanWords - 1];
}

Operands operands_of(const Tensor& x, QuantizeOptions options, bool rowwise, bool columnwise,
                     bool bias_grad) {
  options.dequantized = options.dequantized && columnwise;
  if (!rowwise && !options.dequantized) {
    options.row = 0;
    options.row_scale = options.row_amax = std::nullopt;
  }
  if (!columnwise) {
    options.column = 0;
    options.column_scale = options.column_amax = std::nullopt;
  }
  // One amax that serves both planes of the same values is raised once.
  if (!options.dequantized && options.row_amax && options.column_amax &&
      options.row_amax->is_same(*options.column_amax)) {
    options.column_amax = std::nullopt;
  }
  options.bias_grad = bias_grad;
  Operands result;
  if (rowwise && !options.row) result.row.matrix = x;
  if (columnwise && !options.column) result.column.matrix = x.t();
  if (!options.row && !options.column) return result;
  const Quantized quantized = quantize(x, options);
  if (options.row) result.row = {quantized.row[0], quantized.row[1], options.row};
  if (options.column) result.column = {quantized.column[0], quantized.column[1], options.column};
  result.bias_partials = quantized.bias_partials;
  return result;
}

int64_t gemm_options(int64_t options) {
  const PlaneOptions o = plane_options(options);
  TORCH_CHECK_VALUE(o.codec == Codec::float8 || o.codec == Codec::block, "a plane has options ",
                    options, "; accepted: FP8 with one buffer of FP32 scales, or 0 for Identity");
  ScaleMode mode = o.row_scaled ? ScaleMode::row : ScaleMode::scalar;
  if (o.codec == Codec::block) mode = o.two_dimensional ? ScaleMode::block128 : ScaleMode::vec128;
  const GemmElement element = o.e5m2 ? GemmElement::e5m2 : GemmElement::e4m3;
  return static_cast<int64_t>(element) | static_cast<int64_t>(mode) << 4;
}

void count(const LayerPlan& plan, Gemm gemm, int64_t times) {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  TORCH_CHECK_VALUE(plan.counter >= 0 && plan.counter < static_cast<int64_t>(counters().size()),
                    "plan has counter ", plan.counter, "; accepted: one of gemm_counter()");
  counters()[static_cast<size_t>(plan.counter)][gemm] += times;
}

Tensor aligned(const Tensor& buffer) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % kTile == 0;
  return is_aligned && buffer.is_contiguous() ? buffer : buffer.clone(at::MemoryFormat::Contiguous);
}

bool takes_products(const Tensor& matrix) {
  const auto dtype = matrix.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16) && matrix.is_contiguous() &&
         reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kTile == 0;
}

void deliver(const Tensor& made, const Tensor& matrix, bool adds) {
  adds ? matrix.add_(made) : matrix.copy_(made);
}

c10::List<OptionalTensor> listed(const Tensor& y, const Saved& saved) {
  c10::List<OptionalTensor> result;
  result.push_back(y);
  for (const Tensor& each : saved) {
    result.push_back(each.defined() ? OptionalTensor(each) : std::nullopt);
  }
  return result;
}

Saved saved_from(const c10::List<OptionalTensor>& list) {
  Saved saved;
  TORCH_CHECK_VALUE(list.size() == saved.size(), "saved has ", list.size(),
                    " entries; accepted: ", saved.size(), ", as the forward returned them");
  for (size_t i = 0; i < saved.size(); ++i) saved[i] = list.get(i).value_or(Tensor());
  return saved;
}

Tensor in_memory_order(const Operand& column) {
  return column.options || !column.matrix.defined() ? column.matrix : column.matrix.t();
}

Operand unpacked(const Tensor& matrix, const Tensor& scales, int64_t options) {
  if (!options) return {aligned(matrix).t(), {}, 0};
  return {aligned(matrix), aligned(scales), options};
}

std::vector<Tensor> refusing_another(std::vector<Tensor> outputs) {
  const size_t count = outputs.size();
  for (Tensor& output : outputs) {
    if (output.defined()) output = output.detach().set_requires_grad(true);
  }
  return torch::autograd::DelayedError(
             "the gradient of a quantized linear layer cannot be "
             "differentiated again",
             static_cast<int64_t>(count))
      .apply(std::move(outputs));
}

int64_t new_gemm_counter() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  counters().emplace_back();
  return static_cast<int64_t>(counters().size()) - 1;
}

std::vector<std::vector<int64_t>> gemm_counts() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  std::vector<std::vector<int64_t>> result;
  for (const auto& counter : counters()) result.emplace_back(counter.begin(), counter.end());
  return result;
}

void reset_gemm_counts() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  for (auto& counter : counters()) counter.fill(0);
}

}  // namespace dfg
