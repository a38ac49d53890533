// torch.ops.dist_finegrain.gemm_groups: a GEMM of every expert, one call of `gemm` for each. Their
// sizes are known on the host. Beside torch's grouped kernels, which read them on the device,
// single products of cuBLASLt take less time as soon as they fill the device.
//
//     fprop  Y_e  = X_e.row  · W_e.rowᵀ      A [M, K] codes of all experts   B [E·N, K]
//     dgrad  dX_e = dY_e.row · W_e.colᵀ      A [M, N]                        B [K, E·N]
//     wgrad  dW_e = dY_e.col · X_e.colᵀ      A [N, Ctot]                     B [K, Ctot]
//
// out: one matrix of all tokens, Y [M, N] or dX [M, K]; of a wgrad a matrix [N, K] for each expert,
// None where it is not wanted. accumulate: for each of them whether it is added to; [] for none.
// Ctot: the parts of all experts, as `cast` with `ends` writes them: each takes whole tiles or
// blocks.
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
constexpr int64_t kScalePitch = 4;      // of rows of 128×128 scales
constexpr int64_t kBlock = 128;

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

// Scales of one operand, as `cast` with `ends` writes them, cut for each expert's product.
//
// Scalars [E]; of rows [M] or [E, R]; 1×128 blocks [⌈C/128⌉, R] of all rows or contraction parts;
// 128×128 blocks [⌈R/128⌉, pad4(⌈C/128⌉)] of the matrix of all experts, whose parts are whole
// blocks.
class GroupScales {
 public:
  GroupScales(const char* name, const Tensor& scales, int64_t options, int64_t experts)
      : mode_(static_cast<ScaleMode>(options >> 4)), scales_(scales) {
    TORCH_CHECK_VALUE(mode_ >= ScaleMode::scalar && mode_ <= ScaleMode::block128, name,
                      "_options is ", options,
                      "; accepted: FP8 with scales of an expert, of rows or of 128 elements");
    const bool fits = mode_ == ScaleMode::scalar ? scales.numel() == experts
                                                 : scales.dim() == (is_blocks() ? 2 : scales.dim());
    TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.is_contiguous() && fits, name,
                      "_scales is ", scales.scalar_type(), " ", scales.sizes(),
                      "; accepted: torch.float32, contiguous, ", experts,
                      " elements, one for each row, or a matrix of blocks");
    if (mode_ != ScaleMode::scalar) return;
    scales_ = at::empty({experts, kScaleAlignment}, scales.options());
    scales_.copy_(scales.view({experts, 1}));
  }

  bool is_blocks() const { return mode_ == ScaleMode::vec128 || mode_ == ScaleMode::block128; }

  // A's rows of expert e, of which `stored` are read.
  Tensor of_rows(int64_t e, int64_t row, int64_t rows, int64_t stored) const {
    if (mode_ == ScaleMode::scalar) return of_scalar(e);
    if (mode_ == ScaleMode::row) return span(scales_, checked(row, rows), rows);
    TORCH_CHECK_VALUE(mode_ == ScaleMode::vec128 && row + rows <= scales_.size(1), "a_scales is ",
                      scales_.sizes(), "; accepted: 1x128 blocks of every expert's rows");
    // The library takes the rows of the problem for the stride.
    Tensor own = at::empty({scales_.size(0), stored}, scales_.options());
    own.narrow(1, 0, rows).copy_(window(scales_, 0, row, scales_.size(0), rows));
    return own;
  }

  // B's rows of expert e, below those of the others.
  Tensor of_expert(int64_t e, int64_t rows) const {
    if (mode_ == ScaleMode::scalar) return of_scalar(e);
    if (mode_ == ScaleMode::row) return span(scales_, checked(e * rows, rows), rows);
    TORCH_CHECK_VALUE(mode_ == ScaleMode::block128 && rows % kBlock == 0, "b has ", rows,
                      " rows for each expert; accepted: multiples of 128 with 128x128 blocks");
    const int64_t pitch = rows / kBlock * scales_.size(1);
    return span(scales_, checked(e * pitch, pitch), pitch);
  }

  // B's contraction part of expert e, beside those of the others.
  Tensor of_part(int64_t e, int64_t rows, int64_t contraction) const {
    if (mode_ != ScaleMode::block128) return of_expert(e, rows);
    const int64_t blocks = contraction / kBlock;
    TORCH_CHECK_VALUE(contraction % kBlock == 0 && (e + 1) * blocks <= scales_.size(1),
                      "b has a contraction of ", contraction,
                      " for each expert; accepted: multiples of 128 with 128x128 blocks");
    const int64_t padded = (blocks + kScalePitch - 1) / kScalePitch * kScalePitch;
    Tensor own = at::empty({scales_.size(0), padded}, scales_.options());
    own.narrow(1, 0, blocks).copy_(window(scales_, 0, e * blocks, scales_.size(0), blocks));
    return own;
  }

  // Of expert e's tokens as contraction, which start at `start` and take `width`.
  Tensor of_contraction(int64_t e, int64_t rows, int64_t start, int64_t width) const {
    if (mode_ != ScaleMode::vec128) return of_expert(e, rows);
    const int64_t pitch = scales_.size(1), blocks = (width + kBlock - 1) / kBlock;
    return span(scales_, checked(start / kBlock * pitch, blocks * pitch), blocks * pitch);
  }

  // What an expert's tokens start at a multiple of.
  int64_t group_multiple() const { return mode_ == ScaleMode::vec128 ? kBlock : kTile; }

 private:
  Tensor of_scalar(int64_t e) const { return span(scales_, e * kScaleAlignment, 1); }
  int64_t checked(int64_t start, int64_t count) const {
    TORCH_CHECK_VALUE(start + count <= scales_.numel(), "scales have ", scales_.sizes(),
                      " elements; accepted: one for each row of every expert");
    return start;
  }

  ScaleMode mode_;
  Tensor scales_;
};

// Tokens of an expert as contraction, and the room that they take.
int64_t room_for(int64_t size, int64_t multiple) {
  return std::max((size + multiple - 1) / multiple, int64_t{1}) * multiple;
}

void check_shapes(DFG_GEMM_GROUPS_PARAMETERS) {
  TORCH_CHECK_VALUE(gemm >= kFprop && gemm < kGemms, "gemm is ", gemm,
                    "; accepted: 0 (fprop), 1 (dgrad) or 2 (wgrad)");
  const bool has_blocks = a_options >> 4 == static_cast<int64_t>(ScaleMode::vec128);
  int64_t rows = 0, widths = 0;
  for (const int64_t size : sizes) {
    const int64_t room = a.dim() == 2 ? a.numel() : 0;
    TORCH_CHECK_VALUE(size >= 0 && size <= room, "sizes is ", sizes,
                      "; accepted: counts of at least 0 that a has room for");
    rows += size;
    widths += room_for(size, has_blocks ? kBlock : kTile);
  }
  const auto experts = static_cast<int64_t>(sizes.size());
  const bool is_wgrad = gemm == kWgrad;
  TORCH_CHECK_VALUE(experts > 0 && a.dim() == 2 && b.dim() == 2, "a and b have shapes ", a.sizes(),
                    " and ", b.sizes(), " for ", experts,
                    " experts; accepted: matrices of at least one expert");
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(out.size()) == (is_wgrad ? experts : 1) && (is_wgrad || out.get(0)),
      "out has ", out.size(), " entries for ", experts,
      " experts; accepted: one matrix, or one of each expert's wgrad, None where it is not wanted");
  TORCH_CHECK_VALUE(accumulate.empty() || (is_wgrad && accumulate.size() == out.size()),
                    "accumulate has ", accumulate.size(), " entries, out ", out.size(),
                    "; accepted: as many of a wgrad, or none");
  for (const OptionalTensor& each : out) {
    if (!each) continue;
    bool fits = each->dim() == 2;
    if (fits && is_wgrad) {
      fits = widths <= a.size(1) && widths <= b.size(1) && each->size(0) <= a.size(0) &&
             each->size(1) <= b.size(0);
    } else if (fits) {
      const int64_t place = gemm == kFprop ? b.size(0) : b.size(1);
      const int64_t part = gemm == kFprop ? each->size(1) : a.size(1);
      fits = rows <= a.size(0) && rows == each->size(0) && experts * part <= place &&
             (gemm == kDgrad || a.size(1) == b.size(1));
    }
    TORCH_CHECK_VALUE(fits, "a, b and out have shapes ", a.sizes(), ", ", b.sizes(), " and ",
                      each->sizes(), ", which hold no ", sizes,
                      " rows of experts; accepted: what cast with ends made of such");
  }
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
  TORCH_CHECK_VALUE(of_a.is_blocks() == of_b.is_blocks(), "a_options is ", a_options,
                    " and b_options ", b_options, "; accepted: blocks of 128 in both or in none");
  const auto multiply = [&](const Tensor& left, const Tensor& right, const Tensor& left_scales,
                            const Tensor& right_scales, const Tensor& result, bool adds) {
    op.call(left, right, a_options, b_options, left_scales, right_scales, std::nullopt,
            std::nullopt, result, adds, fast);
  };
  const Tensor all_rows = gemm == kWgrad ? Tensor() : *out.get(0);
  for (int64_t e = 0, start = 0; e < experts; ++e) {
    const int64_t size = sizes[static_cast<size_t>(e)], stored = to_tiles(size);
    if (gemm == kWgrad) {
      const auto place = static_cast<size_t>(e);
      const OptionalTensor result = out.get(place);
      const bool adds = !accumulate.empty() && accumulate[place];
      if (size == 0) {
        if (result && !adds) result->zero_();
      } else if (result) {
        multiply(window(a, 0, start, a.size(0), stored), window(b, 0, start, b.size(0), stored),
                 of_a.of_contraction(e, a.size(0), start, stored),
                 of_b.of_contraction(e, b.size(0), start, stored), *result, adds);
      }
      start += room_for(size, of_a.group_multiple());
      continue;
    }
    if (size == 0) continue;
    const int64_t rows = gemm == kFprop ? all_rows.size(1) : b.size(0), contraction = a.size(1);
    const Tensor left = window(a, start, 0, size, contraction);
    const Tensor result = window(all_rows, start, 0, size, all_rows.size(1));
    const Tensor left_scales = of_a.of_rows(e, start, size, stored);
    const Tensor right = gemm == kFprop ? window(b, e * rows, 0, rows, contraction)
                                        : window(b, 0, e * contraction, rows, contraction);
    const Tensor right_scales =
        gemm == kFprop ? of_b.of_expert(e, rows) : of_b.of_part(e, rows, contraction);
    if (of_a.is_blocks() && stored != size) {
      // 1×128 scales need whole tiles of rows.
      const Tensor own = at::empty({stored, contraction}, a.options());
      own.narrow(0, 0, size).copy_(left);
      const Tensor all = at::empty({stored, all_rows.size(1)}, all_rows.options());
      multiply(own, right, left_scales, right_scales, all, false);
      Tensor(result).copy_(all.narrow(0, 0, size));
    } else {
      multiply(left, right, left_scales, right_scales, result, false);
    }
    start += size;
  }
}

namespace {

TORCH_LIBRARY_IMPL(dist_finegrain, CompositeExplicitAutograd, m) {
  m.impl("gemm_groups", gemm_groups);
}

}  // namespace
}  // namespace dfg
