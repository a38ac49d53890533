// torch.ops.dist_finegrain.gemm_groups: a GEMM of every expert, one call of `gemm` for each. Their
// sizes are known on the host. Beside torch's grouped kernels, which read them on the device,
// single products of cuBLASLt take less time as soon as they fill the device.
//
//     fprop  Y_e  = X_e.row  · W_e.rowᵀ      A [M, K] codes of all experts   B [E·N, K]
//     dgrad  dX_e = dY_e.row · W_e.colᵀ      A [M, N]                        B [K, E·N]
//     wgrad  dW_e = dY_e.col · X_e.colᵀ      A [N, Ctot]                     B [K, Ctot]
//
// Ctot: the parts of all experts, as `cast` with `ends` writes them: each takes whole tiles.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>

#include "bindings_layer.h"
#include "gemm/problem.h"

namespace dfg {
namespace {

using at::Tensor;

constexpr int64_t kScaleAlignment = 4;  // FP32 elements: cuBLASLt reads scales from 16 bytes on

int64_t to_tiles(int64_t size) { return (size + kTile - 1) / kTile * kTile; }

// [rows, columns] of a matrix. Cheaper than torch's views: a small layer waits for the host.
Tensor window(const Tensor& matrix, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(matrix.storage()), matrix.key_set(),
                                                   matrix.dtype());
  impl->set_sizes_and_strides({rows, columns}, matrix.strides().slice(matrix.dim() - 2));
  impl->set_storage_offset(matrix.storage_offset() + row * matrix.stride(-2) +
                           column * matrix.stride(-1));
  return Tensor(std::move(impl));
}

Tensor span(const Tensor& buffer, int64_t start, int64_t count) {
  const auto size = static_cast<int64_t>(sizeof(float));
  Tensor part = part_of(buffer, start * size, {count}, at::kFloat);
  if (start % kScaleAlignment == 0) return part;
  return at::empty({count}, part.options()).copy_(part);
}

// Scales of an operand's experts: [E], or one for each row as `cast` with `ends` writes them.
class GroupScales {
 public:
  GroupScales(const char* name, const Tensor& scales, int64_t options, int64_t experts)
      : is_scalar_(options >> 4 == static_cast<int64_t>(ScaleMode::scalar)), scales_(scales) {
    const bool is_row = options >> 4 == static_cast<int64_t>(ScaleMode::row);
    TORCH_CHECK_VALUE(is_scalar_ || is_row, name, "_options is ", options,
                      "; accepted: FP8 with one scale per expert or per row");
    TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
                          (!is_scalar_ || scales.numel() == experts),
                      name, "_scales is ", scales.scalar_type(), " ", scales.sizes(),
                      "; accepted: torch.float32, contiguous, ", experts,
                      " elements or one for each row");
    if (!is_scalar_) return;
    scales_ = at::empty({experts, kScaleAlignment}, scales.options());
    scales_.copy_(scales.view({experts, 1}));
  }

  // Of expert e, whose rows start at `row` of all experts' rows, or have `pitch` scales each.
  Tensor of_rows(int64_t e, int64_t row, int64_t rows) const {
    return is_scalar_ ? span(scales_, e * kScaleAlignment, 1) : checked(row, rows);
  }
  Tensor of_expert(int64_t e, int64_t rows) const { return of_rows(e, e * rows, rows); }

 private:
  Tensor checked(int64_t start, int64_t count) const {
    TORCH_CHECK_VALUE(start + count <= scales_.numel(), "scales have ", scales_.sizes(),
                      " elements; accepted: one for each row of every expert");
    return span(scales_, start, count);
  }

  bool is_scalar_;
  Tensor scales_;
};

void check_shapes(DFG_GEMM_GROUPS_PARAMETERS) {
  TORCH_CHECK_VALUE(gemm >= kFprop && gemm < kGemms, "gemm is ", gemm,
                    "; accepted: 0 (fprop), 1 (dgrad) or 2 (wgrad)");
  int64_t rows = 0, widths = 0;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "sizes is ", sizes, "; accepted: counts of at least 0");
    rows += size;
    widths += std::max(to_tiles(size), kTile);
  }
  const auto experts = static_cast<int64_t>(sizes.size());
  const bool is_wgrad = gemm == kWgrad;
  TORCH_CHECK_VALUE(
      experts > 0 && a.dim() == 2 && b.dim() == 2 && out.dim() == 2 + is_wgrad,
      "a, b and out have shapes ", a.sizes(), ", ", b.sizes(), " and ", out.sizes(), " for ",
      experts, " experts; accepted: matrices of at least one expert, and [E, N, K] of a wgrad");
  bool fits = false;
  if (is_wgrad) {
    fits = widths <= a.size(1) && widths <= b.size(1) && out.size(0) == experts &&
           out.size(1) <= a.size(0) && out.size(2) <= b.size(0);
  } else {
    const int64_t place = gemm == kFprop ? b.size(0) : b.size(1);
    const int64_t part = gemm == kFprop ? out.size(1) : a.size(1);
    fits = rows <= a.size(0) && rows == out.size(0) && experts * part <= place;
  }
  TORCH_CHECK_VALUE(fits, "a, b and out have shapes ", a.sizes(), ", ", b.sizes(), " and ",
                    out.sizes(), ", which hold no ", sizes,
                    " rows of experts; accepted: what cast with ends made of such");
}

}  // namespace

void gemm_groups(DFG_GEMM_GROUPS_PARAMETERS) {
  check_shapes(DFG_GEMM_GROUPS_ARGUMENTS);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dist_finegrain::gemm", "")
                             .typed<void(DFG_GEMM_PARAMETERS)>();
  const auto experts = static_cast<int64_t>(sizes.size());
  const GroupScales of_a("a", a_scales, a_options, experts);
  const GroupScales of_b("b", b_scales, b_options, experts);
  const auto multiply = [&](const Tensor& left, const Tensor& right, const Tensor& left_scales,
                            const Tensor& right_scales, const Tensor& result) {
    op.call(left, right, a_options, b_options, left_scales, right_scales, std::nullopt,
            std::nullopt, result, false, fast);
  };
  for (int64_t e = 0, start = 0; e < experts; ++e) {
    const int64_t size = sizes[static_cast<size_t>(e)];
    if (gemm == kWgrad) {
      const Tensor result = out.select(0, e);
      const int64_t width = to_tiles(size);
      if (size == 0) {
        result.zero_();
      } else {
        multiply(window(a, 0, start, a.size(0), width), window(b, 0, start, b.size(0), width),
                 of_a.of_expert(e, a.size(0)), of_b.of_expert(e, b.size(0)), result);
      }
      start += std::max(width, kTile);
      continue;
    }
    if (size == 0) continue;
    const bool is_fprop = gemm == kFprop;
    const int64_t rows = is_fprop ? out.size(1) : b.size(0), contraction = a.size(1);
    const Tensor right =
        window(b, is_fprop ? e * rows : 0, is_fprop ? 0 : e * contraction, rows, contraction);
    multiply(window(a, start, 0, size, contraction), right, of_a.of_rows(e, start, size),
             of_b.of_expert(e, rows), window(out, start, 0, size, out.size(1)));
    start += size;
  }
}

namespace {

TORCH_LIBRARY_IMPL(dist_finegrain, CompositeExplicitAutograd, m) {
  m.impl("gemm_groups", gemm_groups);
}

}  // namespace
}  // namespace dfg
