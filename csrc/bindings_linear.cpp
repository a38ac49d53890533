// torch.ops.dist_finegrain.linear: a whole linear layer and its gradients, for layers that would
// wait for the host: three casts and three GEMMs, C = A · Bᵀ, with nothing of Python between them.
//
//     Y = X.row · W.rowᵀ (+ bias)    dX = dY.row · W.colᵀ    dW = dY.col · X.colᵀ
//
// Legend: X [M, K], W [N, K], dY [M, N], all multiples of 16, so that planes have no padding.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/library.h>

#include <array>
#include <deque>
#include <mutex>

#include "bindings.h"
#include "gemm/problem.h"

namespace dfg {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using DelayedState = c10::List<std::optional<Tensor>>;

enum Slot { kInput, kWeight, kGradOutput, kSlots };
enum Gemm { kFprop, kDgrad, kWgrad, kGemms };

constexpr int64_t kTile = 16;
constexpr size_t kPlanWords = 3 * kSlots + kGemms + 1;

// What modules/direct_linear.py packs. Planes of Identity have options 0: the matrix itself.
struct Plan {
  std::array<QuantizeOptions, kSlots> slots;
  std::array<bool, kGemms> fast;
  int64_t counter;

  // words: row options, column options, dequantized of each slot; fast of each GEMM; counter.
  // epsilons: of row and column of each slot. delayed: scale and amax of the same, or nothing.
  Plan(at::IntArrayRef words, at::ArrayRef<double> epsilons, const DelayedState& delayed,
       bool record) {
    TORCH_CHECK_VALUE(words.size() == kPlanWords && epsilons.size() == 2 * kSlots &&
                          (delayed.empty() || delayed.size() == 4 * kSlots),
                      "plan, epsilons and delayed have ", words.size(), ", ", epsilons.size(),
                      " and ", delayed.size(), " entries; accepted: ", kPlanWords, ", ", 2 * kSlots,
                      " and 0 or ", 4 * kSlots, ", as dist_finegrain.modules.direct_linear packs");
    for (size_t i = 0; i < kSlots; ++i) {
      QuantizeOptions& slot = slots[i];
      slot.row = words[3 * i];
      slot.column = words[3 * i + 1];
      slot.dequantized = words[3 * i + 2] != 0;
      slot.row_epsilon = epsilons[2 * i];
      slot.column_epsilon = epsilons[2 * i + 1];
      if (delayed.empty()) continue;
      slot.row_scale = delayed.get(4 * i);
      slot.column_scale = delayed.get(4 * i + 2);
      if (!record) continue;
      slot.row_amax = delayed.get(4 * i + 1);
      slot.column_amax = delayed.get(4 * i + 3);
    }
    for (size_t i = 0; i < kGemms; ++i) fast[i] = words[3 * kSlots + i] != 0;
    counter = words[kPlanWords - 1];
  }
};

// One side of a GEMM: codes and scales, or a 16-bit matrix.
struct Operand {
  Tensor matrix, scales;
  int64_t options = 0;
};

struct Operands {
  Operand row, column;
  OptionalTensor bias_partials;
};

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
  Operands result{{x, {}, 0}, {x.t(), {}, 0}, std::nullopt};
  if (!options.row && !options.column) return result;
  const Quantized quantized = quantize(x, options);
  if (options.row) result.row = {quantized.row[0], quantized.row[1], options.row};
  if (options.column) result.column = {quantized.column[0], quantized.column[1], options.column};
  result.bias_partials = quantized.bias_partials;
  return result;
}

// Element and scale mode, as `gemm` takes them, of a plane with two buffers.
int64_t gemm_options(int64_t options) {
  const PlaneOptions o = plane_options(options);
  TORCH_CHECK_VALUE(o.codec == Codec::float8 || o.codec == Codec::block, "a plane has options ",
                    options, "; accepted: FP8 with one buffer of FP32 scales, or 0 for Identity");
  ScaleMode mode = o.row_scaled ? ScaleMode::row : ScaleMode::scalar;
  if (o.codec == Codec::block) mode = o.two_dimensional ? ScaleMode::block128 : ScaleMode::vec128;
  const GemmElement element = o.e5m2 ? GemmElement::e5m2 : GemmElement::e4m3;
  return static_cast<int64_t>(element) | static_cast<int64_t>(mode) << 4;
}

std::mutex counters_mutex;
std::deque<std::array<int64_t, kGemms>>& counters() {
  static auto& all = *new std::deque<std::array<int64_t, kGemms>>;
  return all;
}

void count(const Plan& plan, Gemm gemm) {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  TORCH_CHECK_VALUE(plan.counter >= 0 && plan.counter < static_cast<int64_t>(counters().size()),
                    "plan has counter ", plan.counter, "; accepted: one of gemm_counter()");
  ++counters()[static_cast<size_t>(plan.counter)][gemm];
}

// [R, S] of x's dtype and device.
Tensor multiply(const Plan& plan, Gemm gemm, const Operand& a, const Operand& b,
                const OptionalTensor& bias, const Tensor& x) {
  count(plan, gemm);
  if (!a.options) return at::linear(a.matrix, b.matrix, bias);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dist_finegrain::gemm", "")
                             .typed<void(DFG_GEMM_PARAMETERS)>();
  const Tensor out = at::empty({a.matrix.size(0), b.matrix.size(0)}, x.options());
  op.call(a.matrix, b.matrix, gemm_options(a.options), gemm_options(b.options), a.scales, b.scales,
          std::nullopt, bias, out, false, plan.fast[gemm]);
  return out;
}

// Operators below see neither torch.autocast nor autograd.
struct Below {
  at::AutoDispatchBelowAutograd autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

void check_matrices(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) &&
                        x.numel() > 0 && x.size(0) % kTile == 0 && x.size(1) % kTile == 0 &&
                        weight.size(0) % kTile == 0,
                    "x and weight have shapes ", x.sizes(), " and ", weight.sizes(),
                    "; accepted: [M, K] and [N, K], multiples of ", kTile);
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE((dtype == at::kHalf || dtype == at::kBFloat16) &&
                       weight.scalar_type() == dtype && (!bias || bias->scalar_type() == dtype),
                   "x is ", dtype, " and weight ", weight.scalar_type(),
                   "; accepted: torch.float16 or torch.bfloat16 for both, and for the bias");
}

struct Forward {
  Tensor y;
  Operand x_column, w_column;
};

Forward forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Plan& plan,
                bool needs_dgrad, bool needs_wgrad) {
  check_matrices(x, weight, bias);
  const Operands of_x = operands_of(x, plan.slots[kInput], true, needs_wgrad, false);
  const Operands of_w = operands_of(weight, plan.slots[kWeight], true, needs_dgrad, false);
  return {multiply(plan, kFprop, of_x.row, of_w.row, bias, x), of_x.column, of_w.column};
}

// Saves the column planes; the scales and amaxes of delayed scaling are read and raised when
// backward runs.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, at::IntArrayRef words,
                        at::ArrayRef<double> epsilons, const DelayedState& delayed,
                        bool needs_dgrad, bool needs_wgrad, bool record) {
    const Below below;
    const Plan plan(words, epsilons, delayed, record);
    Forward made = dfg::forward(x, weight, bias, plan, needs_dgrad, needs_wgrad);
    Operand none;
    const Operand &x_column = needs_wgrad ? made.x_column : none,
                  &w_column = needs_dgrad ? made.w_column : none;
    ctx->save_for_backward(
        {in_memory_order(x_column), x_column.scales, in_memory_order(w_column), w_column.scales});
    ctx->saved_data["plan"] = words.vec();
    ctx->saved_data["epsilons"] = epsilons.vec();
    ctx->saved_data["delayed"] = delayed;
    ctx->saved_data["flags"] = int64_t{needs_dgrad} | int64_t{needs_wgrad} << 1 |
                               int64_t{record} << 2 | int64_t{bias.has_value()} << 3;
    return made.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(9);
    const bool is_again = at::GradMode::is_enabled() && grads[0].requires_grad();
    // Hooks of saved tensors run the user's code, which may recompute with autograd.
    const variable_list saved = ctx->get_saved_variables();
    {
      const Below below;
      const int64_t flags = ctx->saved_data["flags"].toInt();
      const bool needs_dgrad = flags & 1, needs_wgrad = flags >> 1 & 1;
      const bool needs_bias = (flags >> 3 & 1) && ctx->needs_input_grad(2);
      const auto words = ctx->saved_data["plan"].toIntVector();
      const auto epsilons = ctx->saved_data["epsilons"].toDoubleVector();
      const Plan plan(words, epsilons, ctx->saved_data["delayed"].to<DelayedState>(),
                      flags >> 2 & 1);
      const QuantizeOptions& slot = plan.slots[kGradOutput];
      const Tensor dy = grads[0].contiguous();
      const Operands of_dy = operands_of(dy, slot, needs_dgrad, needs_wgrad, needs_bias);
      if (needs_dgrad) {
        const Operand w_column = unpacked(saved[2], saved[3], plan.slots[kWeight].column);
        result[0] = multiply(plan, kDgrad, of_dy.row, w_column, std::nullopt, dy);
      }
      if (needs_wgrad) {
        const Operand x_column = unpacked(saved[0], saved[1], plan.slots[kInput].column);
        result[1] = multiply(plan, kWgrad, of_dy.column, x_column, std::nullopt, dy);
      }
      if (needs_bias) {
        const Tensor& rows = of_dy.bias_partials ? *of_dy.bias_partials : dy;
        result[2] = rows.sum({0}, false, at::kFloat).to(dy.scalar_type());
      }
    }
    return is_again ? refusing_another(std::move(result)) : result;
  }

 private:
  // What hooks of saved tensors see, and may give back in strides of their own: Identity's column
  // plane is the transpose of what is stored.
  static Tensor in_memory_order(const Operand& column) {
    return column.options || !column.matrix.defined() ? column.matrix : column.matrix.t();
  }

  static Operand unpacked(const Tensor& matrix, const Tensor& scales, int64_t options) {
    if (!options) return {matrix.t(), {}, 0};
    return {aligned(matrix), aligned(scales), options};
  }

  static Tensor aligned(const Tensor& buffer) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % kTile == 0;
    return is_aligned && buffer.is_contiguous() ? buffer
                                                : buffer.clone(at::MemoryFormat::Contiguous);
  }

  // Gradients of these raise an error instead of being left out.
  static variable_list refusing_another(variable_list outputs) {
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
};

#define DFG_LINEAR_PARAMETERS                                                              \
  const Tensor &x, const Tensor &weight, const OptionalTensor &bias, at::IntArrayRef plan, \
      at::ArrayRef<double> epsilons, const DelayedState &delayed, bool needs_dgrad,        \
      bool needs_wgrad, bool record

Tensor linear(DFG_LINEAR_PARAMETERS) {
  return LinearFunction::apply(x, weight, bias, plan, epsilons, delayed, needs_dgrad, needs_wgrad,
                               record);
}

// Where nothing is differentiated, as in inference mode.
Tensor linear_alone(DFG_LINEAR_PARAMETERS) {
  const Below below;
  return forward(x, weight, bias, Plan(plan, epsilons, delayed, record), false, false).y;
}

TORCH_LIBRARY_IMPL(dist_finegrain, Autograd, m) { m.impl("linear", linear); }
TORCH_LIBRARY_IMPL(dist_finegrain, CPU, m) { m.impl("linear", linear_alone); }
TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) { m.impl("linear", linear_alone); }

}  // namespace

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
