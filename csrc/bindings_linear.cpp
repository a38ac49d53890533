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
#include <torch/library.h>

#include "bindings_layer.h"

namespace dfg {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// delayed: scale and amax of row and column of each slot, or nothing; record: amaxes are raised.
LayerPlan plan_of(at::IntArrayRef words, at::ArrayRef<double> epsilons, const DelayedState& delayed,
                  bool record) {
  LayerPlan plan(words, epsilons);
  if (delayed.empty()) return plan;
  TORCH_CHECK_VALUE(delayed.size() == 4 * kSlots, "delayed has ", delayed.size(),
                    " entries; accepted: 0 or ", 4 * kSlots,
                    ", as dist_finegrain.modules.direct_linear packs");
  for (size_t i = 0; i < kSlots; ++i) {
    QuantizeOptions& slot = plan.slots[i];
    slot.row_scale = delayed.get(4 * i);
    slot.column_scale = delayed.get(4 * i + 2);
    if (!record) continue;
    slot.row_amax = delayed.get(4 * i + 1);
    slot.column_amax = delayed.get(4 * i + 3);
  }
  return plan;
}

// [R, S] of x's dtype and device.
Tensor multiply(const LayerPlan& plan, Gemm gemm, const Operand& a, const Operand& b,
                const OptionalTensor& bias, const Tensor& x) {
  count(plan, gemm, 1);
  if (!a.options) return at::linear(a.matrix, b.matrix, bias);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dist_finegrain::gemm", "")
                             .typed<void(DFG_GEMM_PARAMETERS)>();
  const Tensor out = at::empty({a.matrix.size(0), b.matrix.size(0)}, x.options());
  op.call(a.matrix, b.matrix, gemm_options(a.options), gemm_options(b.options), a.scales, b.scales,
          std::nullopt, bias, out, false, plan.fast[gemm]);
  return out;
}

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

Forward forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const LayerPlan& plan, bool needs_dgrad, bool needs_wgrad) {
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
    const LayerPlan plan = plan_of(words, epsilons, delayed, record);
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
      const LayerPlan plan =
          plan_of(words, epsilons, ctx->saved_data["delayed"].to<DelayedState>(), flags >> 2 & 1);
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
  return forward(x, weight, bias, plan_of(plan, epsilons, delayed, record), false, false).y;
}

TORCH_LIBRARY_IMPL(dist_finegrain, Autograd, m) { m.impl("linear", linear); }
TORCH_LIBRARY_IMPL(dist_finegrain, CPU, m) { m.impl("linear", linear_alone); }
TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) { m.impl("linear", linear_alone); }

}  // namespace
}  // namespace dfg
