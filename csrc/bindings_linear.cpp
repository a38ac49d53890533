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

// An FP8 product written to `out`, or added to it.
void multiply_into(const LayerPlan& plan, Gemm gemm, const Operand& a, const Operand& b,
                   const OptionalTensor& bias, const Tensor& out, bool adds) {
  count(plan, gemm, 1);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dist_finegrain::gemm", "")
                             .typed<void(DFG_GEMM_PARAMETERS)>();
  op.call(a.matrix, b.matrix, gemm_options(a.options), gemm_options(b.options), a.scales, b.scales,
          std::nullopt, bias, out, adds, plan.fast[gemm]);
}

// [R, S] of x's dtype and device.
Tensor multiply(const LayerPlan& plan, Gemm gemm, const Operand& a, const Operand& b,
                const OptionalTensor& bias, const Tensor& x) {
  if (!a.options) {
    count(plan, gemm, 1);
    return at::linear(a.matrix, b.matrix, bias);
  }
  const Tensor out = at::empty({a.matrix.size(0), b.matrix.size(0)}, x.options());
  multiply_into(plan, gemm, a, b, bias, out, false);
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

Saved saved_of(const Forward& made, bool needs_dgrad, bool needs_wgrad) {
  const Operand none;
  const Operand &x_column = needs_wgrad ? made.x_column : none,
                &w_column = needs_dgrad ? made.w_column : none;
  return {in_memory_order(x_column), x_column.scales, in_memory_order(w_column), w_column.scales};
}

// The cast of dY, and what is made of it.
class Gradients {
 public:
  Gradients(const Tensor& grad, const Saved& saved, const LayerPlan& plan, bool needs_dgrad,
            bool needs_wgrad, bool needs_bias)
      : plan_(plan), dy_(grad.contiguous()) {
    of_dy_ = operands_of(dy_, plan.slots[kGradOutput], needs_dgrad, needs_wgrad, needs_bias);
    if (needs_wgrad) x_column_ = unpacked(saved[0], saved[1], plan.slots[kInput].column);
    if (needs_dgrad) w_column_ = unpacked(saved[2], saved[3], plan.slots[kWeight].column);
  }

  Tensor of_x() const { return multiply(plan_, kDgrad, of_dy_.row, w_column_, std::nullopt, dy_); }

  Tensor of_weight() const {
    return multiply(plan_, kWgrad, of_dy_.column, x_column_, std::nullopt, dy_);
  }

  void of_weight_into(const Tensor& matrix, bool adds) const {
    TORCH_CHECK_VALUE(of_dy_.column.options && x_column_.options,
                      "plan has a wgrad of Identity planes; accepted: FP8 with main_grad");
    if (takes_products(matrix)) {
      multiply_into(plan_, kWgrad, of_dy_.column, x_column_, std::nullopt, matrix, adds);
      return;
    }
    const Tensor made = at::empty(matrix.sizes(), matrix.options().dtype(at::kFloat));
    multiply_into(plan_, kWgrad, of_dy_.column, x_column_, std::nullopt, made, false);
    deliver(made, matrix, adds);
  }

  Tensor of_bias() const {
    const Tensor& rows = of_dy_.bias_partials ? *of_dy_.bias_partials : dy_;
    return rows.sum({0}, false, at::kFloat).to(dy_.scalar_type());
  }

 private:
  const LayerPlan& plan_;
  Tensor dy_;
  Operands of_dy_;
  Operand x_column_, w_column_;
};

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
    const Forward made = dfg::forward(x, weight, bias, plan, needs_dgrad, needs_wgrad);
    const Saved saved = saved_of(made, needs_dgrad, needs_wgrad);
    ctx->save_for_backward({saved.begin(), saved.end()});
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
      const Gradients gradients(grads[0], {saved[0], saved[1], saved[2], saved[3]}, plan,
                                needs_dgrad, needs_wgrad, needs_bias);
      if (needs_dgrad) result[0] = gradients.of_x();
      if (needs_wgrad) result[1] = gradients.of_weight();
      if (needs_bias) result[2] = gradients.of_bias();
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

// For an autograd node of Python's, which knows where the gradient of the weight goes: Y and what
// backward reads, and backward itself, which gives dX and db.
c10::List<OptionalTensor> linear_forward(DFG_LINEAR_PARAMETERS) {
  const Below below;
  const Forward made =
      forward(x, weight, bias, plan_of(plan, epsilons, delayed, record), needs_dgrad, needs_wgrad);
  return listed(made.y, saved_of(made, needs_dgrad, needs_wgrad));
}

c10::List<OptionalTensor> linear_backward(const Tensor& grad,
                                          const c10::List<OptionalTensor>& saved,
                                          at::IntArrayRef words, at::ArrayRef<double> epsilons,
                                          const DelayedState& delayed, bool needs_dgrad,
                                          bool needs_bias, bool record, const Tensor& main_grad,
                                          bool accumulate) {
  const Below below;
  const LayerPlan plan = plan_of(words, epsilons, delayed, record);
  const Gradients gradients(grad, saved_from(saved), plan, needs_dgrad, true, needs_bias);
  gradients.of_weight_into(main_grad, accumulate);
  c10::List<OptionalTensor> result;
  result.push_back(needs_dgrad ? OptionalTensor(gradients.of_x()) : std::nullopt);
  result.push_back(needs_bias ? OptionalTensor(gradients.of_bias()) : std::nullopt);
  return result;
}

TORCH_LIBRARY_IMPL(dist_finegrain, CompositeExplicitAutograd, m) {
  m.impl("linear_forward", linear_forward);
  m.impl("linear_backward", linear_backward);
}
TORCH_LIBRARY_IMPL(dist_finegrain, Autograd, m) { m.impl("linear", linear); }
TORCH_LIBRARY_IMPL(dist_finegrain, CPU, m) { m.impl("linear", linear_alone); }
TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) { m.impl("linear", linear_alone); }

}  // namespace
}  // namespace dfg
