// torch.ops.dist_finegrain.grouped_linear: the linear layers of E experts and their gradients, as
// bindings_linear.cpp does one of them: three casts of all experts, three GEMMs of each.
//
// Legend: X [M, K], dY [M, N] with the rows of each expert behind each other, E weights [N, K];
// K and N are multiples of 16. FP8 planes: one scale per matrix or row, or 128-blocks, then with K
// and N multiples of 128 and weights in 128×128 blocks, none of which reaches over experts. Columns
// of X and dY may be Identity.
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>

#include "bindings_layer.h"

namespace dfg {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One slot's state of delayed scaling, of every expert: scales read as one vector, amaxes raised in
// one and handed on from there.
class DelayedSlotState {
 public:
  // entries: of row and of column the scales and the amaxes of each expert, None without.
  DelayedSlotState(const DelayedState& entries, size_t slot, size_t experts, bool record,
                   QuantizeOptions* options) {
    if (entries.empty()) return;
    TORCH_CHECK_VALUE(entries.size() == 4 * experts * kSlots, "delayed has ", entries.size(),
                      " entries; accepted: 0 or ", 4 * experts * kSlots,
                      ", as dist_finegrain.modules.direct_grouped packs");
    const auto side = [&](size_t place) {
      std::vector<Tensor> found;
      const size_t first = (4 * slot + place) * experts;
      for (size_t e = 0; e < experts; ++e) {
        const OptionalTensor entry = entries.get(first + e);
        if (entry) found.push_back(*entry);
      }
      return found;
    };
    const auto row = side(0), column = side(2);
    const bool is_shared = !row.empty() && !column.empty() && row.front().is_same(column.front());
    const auto fill = [&](const std::vector<Tensor>& scales, size_t amaxes, OptionalTensor* scale,
                          OptionalTensor* amax) {
      if (scales.empty()) return;
      *scale = at::cat(scales);
      if (!record) return;
      // It stays where an expert has no tokens: it did not run.
      *amax = at::full({static_cast<int64_t>(experts)}, -1.0, (*scale)->options());
      found_.emplace_back(side(amaxes), **amax);
    };
    fill(row, 1, &options->row_scale, &options->row_amax);
    if (is_shared) {
      options->column_scale = options->row_scale;
      options->column_amax = options->row_amax;
    } else {
      fill(column, 3, &options->column_scale, &options->column_amax);
    }
  }

  // After the cast.
  void hand_on() const {
    for (const auto& [pendings, amax] : found_) {
      at::_foreach_maximum_(pendings, amax.split(1));
    }
  }

 private:
  std::vector<std::pair<std::vector<Tensor>, Tensor>> found_;
};

Operands cast_groups(const Tensor& x, const Tensor& ends, const LayerPlan& plan, Slot slot,
                     const DelayedState& delayed, bool record, bool rowwise, bool columnwise) {
  QuantizeOptions options = plan.slots[slot];
  TORCH_CHECK_VALUE(options.row && (options.column || slot != kWeight),
                    "plan has a plane of Identity; accepted: columns of input and grad_output");
  const bool is_square = plane_options(options.row ? options.row : options.column).two_dimensional;
  if (!is_square) options.ends = ends;
  // Only what a plane is made for is recorded.
  const bool is_read = rowwise || columnwise;
  if (!is_read) return {};
  const auto experts = static_cast<size_t>(ends.size(0));
  const DelayedSlotState state(delayed, slot, experts, record, &options);
  const Operands made = operands_of(x, options, rowwise, columnwise, false);
  state.hand_on();
  return made;
}

void multiply(const LayerPlan& plan, Gemm gemm, const Operand& a, const Operand& b,
              at::IntArrayRef sizes, const c10::List<OptionalTensor>& out,
              at::IntArrayRef accumulate = {}) {
  count(plan, gemm, static_cast<int64_t>(sizes.size()));
  gemm_groups(a.matrix, b.matrix, gemm_options(a.options), gemm_options(b.options), a.scales,
              b.scales, gemm, sizes, out, accumulate, plan.fast[gemm]);
}

// dW of Identity: torch's grouped kernel, which reads the sizes on the device.
Tensor multiply_16_bit(const LayerPlan& plan, const Operand& dy, const Operand& x,
                       const Tensor& ends) {
  TORCH_CHECK_VALUE(!dy.options && !x.options,
                    "columns of input and grad_output are of Identity and FP8; accepted: one");
  count(plan, kWgrad, ends.size(0));
  return at::_grouped_mm(dy.matrix, x.matrix.t(), ends);
}

// [E·N, K]: a view where they follow each other in one storage, else a copy.
Tensor in_one(at::TensorList weights) {
  const Tensor& first = weights[0];
  const int64_t size = first.numel();
  bool is_joined = true;
  for (size_t e = 0; e < weights.size(); ++e) {
    is_joined =
        is_joined && weights[e].is_contiguous() && weights[e].is_alias_of(first) &&
        weights[e].storage_offset() == first.storage_offset() + static_cast<int64_t>(e) * size;
  }
  if (!is_joined) return at::cat(weights);
  const auto rows = static_cast<int64_t>(weights.size()) * first.size(0);
  return first.as_strided({rows, first.size(1)}, {first.size(1), 1});
}

void check_matrices(const Tensor& x, at::TensorList weights, at::IntArrayRef sizes,
                    const Tensor& ends, const Tensor& weight_ends) {
  const auto experts = static_cast<int64_t>(weights.size());
  TORCH_CHECK_VALUE(experts > 0 && static_cast<int64_t>(sizes.size()) == experts &&
                        ends.numel() == experts && weight_ends.numel() == experts,
                    "there are ", experts, " weights, ", sizes.size(), " sizes, ", ends.numel(),
                    " ends and ", weight_ends.numel(), " weight_ends; accepted: E of each");
  const auto dtype = x.scalar_type();
  for (const Tensor& weight : weights) {
    TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) &&
                          x.numel() > 0 && x.is_contiguous() && x.size(1) % kTile == 0 &&
                          weight.size(0) % kTile == 0 && weight.sizes() == weights[0].sizes(),
                      "x and a weight have shapes ", x.sizes(), " and ", weight.sizes(),
                      "; accepted: contiguous [M, K], and [N, K] of every expert, with K and N "
                      "multiples of ",
                      kTile);
    TORCH_CHECK_TYPE(
        (dtype == at::kHalf || dtype == at::kBFloat16) && weight.scalar_type() == dtype, "x is ",
        dtype, " and a weight ", weight.scalar_type(),
        "; accepted: torch.float16 or torch.bfloat16 for both");
  }
}

#define DFG_GROUPED_PARAMETERS                                                                  \
  const Tensor &x, at::TensorList weights, at::IntArrayRef plan, at::ArrayRef<double> epsilons, \
      const DelayedState &delayed, at::IntArrayRef sizes, const Tensor &ends,                   \
      const Tensor &weight_ends, bool needs_dgrad, bool needs_wgrad, bool record
#define DFG_GROUPED_ARGUMENTS \
  x, weights, plan, epsilons, delayed, sizes, ends, weight_ends, needs_dgrad, needs_wgrad, record

constexpr size_t kOtherArguments = 9;  // behind the weights

struct Forward {
  Tensor y;
  Operand x_column, w_column;
};

Forward forward(DFG_GROUPED_PARAMETERS) {
  check_matrices(x, weights, sizes, ends, weight_ends);
  const LayerPlan of(plan, epsilons);
  const Operands of_x = cast_groups(x, ends, of, kInput, delayed, record, true, needs_wgrad);
  const Operands of_w =
      cast_groups(in_one(weights), weight_ends, of, kWeight, delayed, record, true, needs_dgrad);
  const Tensor y = at::empty({x.size(0), weights[0].size(0)}, x.options());
  multiply(of, kFprop, of_x.row, of_w.row, sizes, {y});
  return {y, of_x.column, of_w.column};
}

Saved saved_of(const Forward& made) {
  return {in_memory_order(made.x_column), made.x_column.scales, made.w_column.matrix,
          made.w_column.scales};
}

// The cast of dY, and the GEMMs that read it.
class Gradients {
 public:
  Gradients(const Tensor& grad, const Saved& saved, const LayerPlan& plan,
            const DelayedState& delayed, at::IntArrayRef sizes, Tensor ends, bool needs_dgrad,
            bool needs_wgrad, bool record)
      : plan_(plan), sizes_(sizes), ends_(std::move(ends)), dy_(aligned(grad)) {
    of_dy_ = cast_groups(dy_, ends_, plan_, kGradOutput, delayed, record, needs_dgrad, needs_wgrad);
    if (needs_wgrad) x_column_ = unpacked(saved[0], saved[1], plan_.slots[kInput].column);
    if (needs_dgrad) w_column_ = unpacked(saved[2], saved[3], plan_.slots[kWeight].column);
  }

  Tensor of_x() const {
    Tensor dx = at::empty({dy_.size(0), w_column_.matrix.size(0)}, dy_.options());
    multiply(plan_, kDgrad, of_dy_.row, w_column_, sizes_, {dx});
    return dx;
  }

  // [E, N, K] in `dtype`, or in dY's from 16-bit planes; unwritten where it is not wanted.
  Tensor of_weights(const std::function<bool(size_t)>& is_wanted, at::ScalarType dtype) const {
    if (is_16_bit()) return multiply_16_bit(plan_, of_dy_.column, x_column_, ends_);
    const auto experts = static_cast<int64_t>(sizes_.size());
    const Tensor all =
        at::empty({experts, dy_.size(1), x_column_.matrix.size(0)}, dy_.options().dtype(dtype));
    c10::List<OptionalTensor> each;
    for (int64_t e = 0; e < experts; ++e) {
      each.push_back(is_wanted(static_cast<size_t>(e)) ? OptionalTensor(all.select(0, e))
                                                       : std::nullopt);
    }
    multiply(plan_, kWgrad, of_dy_.column, x_column_, sizes_, each);
    return all;
  }

  // Writes to matrices [N, K], or adds to them with one rounding of the sum; None is left out.
  void of_weights_into(const c10::List<OptionalTensor>& matrices,
                       at::IntArrayRef accumulate) const {
    bool is_direct = !is_16_bit();
    for (const OptionalTensor& matrix : matrices) {
      is_direct = is_direct && (!matrix || takes_products(*matrix));
    }
    if (is_direct) {
      return multiply(plan_, kWgrad, of_dy_.column, x_column_, sizes_, matrices, accumulate);
    }
    const auto is_wanted = [&](size_t e) { return matrices.get(e).has_value(); };
    const Tensor all = of_weights(is_wanted, at::kFloat);
    for (size_t e = 0; e < sizes_.size(); ++e) {
      if (is_wanted(e)) deliver(all[static_cast<int64_t>(e)], *matrices.get(e), accumulate[e]);
    }
  }

 private:
  bool is_16_bit() const { return !of_dy_.column.options || !x_column_.options; }

  const LayerPlan& plan_;
  at::IntArrayRef sizes_;
  Tensor ends_, dy_;
  Operands of_dy_;
  Operand x_column_, w_column_;
};

// Saves the column planes; the scales and amaxes of delayed scaling are read and raised when
// backward runs.
class GroupedFunction : public torch::autograd::Function<GroupedFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, DFG_GROUPED_PARAMETERS) {
    const Below below;
    const Forward made = dfg::forward(DFG_GROUPED_ARGUMENTS);
    const Saved saved = saved_of(made);
    ctx->save_for_backward({saved.begin(), saved.end()});
    ctx->saved_data["plan"] = plan.vec();
    ctx->saved_data["epsilons"] = epsilons.vec();
    ctx->saved_data["delayed"] = delayed;
    ctx->saved_data["sizes"] = sizes.vec();
    ctx->saved_data["ends"] = ends;
    ctx->saved_data["flags"] =
        int64_t{needs_dgrad} | int64_t{needs_wgrad} << 1 | int64_t{record} << 2;
    return made.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const bool is_again = at::GradMode::is_enabled() && grads[0].requires_grad();
    // Hooks of saved tensors run the user's code, which may recompute with autograd.
    const variable_list saved = ctx->get_saved_variables();
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const size_t experts = sizes.size();
    variable_list result(1 + experts + kOtherArguments);
    {
      const Below below;
      const int64_t flags = ctx->saved_data["flags"].toInt();
      const bool needs_dgrad = flags & 1, needs_wgrad = flags >> 1 & 1;
      const LayerPlan plan(ctx->saved_data["plan"].toIntVector(),
                           ctx->saved_data["epsilons"].toDoubleVector());
      const Gradients gradients(grads[0], {saved[0], saved[1], saved[2], saved[3]}, plan,
                                ctx->saved_data["delayed"].to<DelayedState>(), sizes,
                                ctx->saved_data["ends"].toTensor(), needs_dgrad, needs_wgrad,
                                flags >> 2 & 1);
      if (needs_dgrad) result[0] = gradients.of_x();
      if (needs_wgrad) {
        const auto is_wanted = [&](size_t e) { return ctx->needs_input_grad(1 + e); };
        const Tensor all = gradients.of_weights(is_wanted, grads[0].scalar_type());
        for (size_t e = 0; e < experts; ++e) {
          if (is_wanted(e)) result[1 + e] = all.select(0, static_cast<int64_t>(e));
        }
      }
    }
    return is_again ? refusing_another(std::move(result)) : result;
  }
};

// For an autograd node of Python's, which knows where the gradients of weights go: Y and what
// backward reads, and backward itself.
c10::List<OptionalTensor> grouped_linear_forward(DFG_GROUPED_PARAMETERS) {
  const Below below;
  const Forward made = forward(DFG_GROUPED_ARGUMENTS);
  return listed(made.y, saved_of(made));
}

OptionalTensor grouped_linear_backward(const Tensor& grad, const c10::List<OptionalTensor>& saved,
                                       at::IntArrayRef plan, at::ArrayRef<double> epsilons,
                                       const DelayedState& delayed, at::IntArrayRef sizes,
                                       const Tensor& ends, bool needs_dgrad, bool record,
                                       const c10::List<OptionalTensor>& main_grads,
                                       at::IntArrayRef accumulate) {
  const Below below;
  const size_t experts = sizes.size();
  TORCH_CHECK_VALUE(main_grads.size() == experts && accumulate.size() == experts,
                    "main_grads and accumulate have ", main_grads.size(), " and ",
                    accumulate.size(), " entries; accepted: ", experts, " of each");
  const Saved held = saved_from(saved);
  bool needs_wgrad = false;
  for (const OptionalTensor& each : main_grads) needs_wgrad = needs_wgrad || each.has_value();
  const LayerPlan of(plan, epsilons);
  const Gradients gradients(grad, held, of, delayed, sizes, ends, needs_dgrad, needs_wgrad, record);
  if (needs_wgrad) gradients.of_weights_into(main_grads, accumulate);
  return needs_dgrad ? OptionalTensor(gradients.of_x()) : std::nullopt;
}

Tensor grouped_linear(DFG_GROUPED_PARAMETERS) {
  return GroupedFunction::apply(DFG_GROUPED_ARGUMENTS);
}

// Where nothing is differentiated, as in inference mode.
Tensor grouped_linear_alone(DFG_GROUPED_PARAMETERS) {
  const Below below;
  return forward(x, weights, plan, epsilons, delayed, sizes, ends, weight_ends, false, false,
                 record)
      .y;
}

TORCH_LIBRARY_IMPL(dist_finegrain, CompositeExplicitAutograd, m) {
  m.impl("grouped_linear_forward", grouped_linear_forward);
  m.impl("grouped_linear_backward", grouped_linear_backward);
}
TORCH_LIBRARY_IMPL(dist_finegrain, Autograd, m) { m.impl("grouped_linear", grouped_linear); }
TORCH_LIBRARY_IMPL(dist_finegrain, CPU, m) { m.impl("grouped_linear", grouped_linear_alone); }
TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) { m.impl("grouped_linear", grouped_linear_alone); }

}  // namespace
}  // namespace dfg
