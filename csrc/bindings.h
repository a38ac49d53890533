// What the operators of torch.ops.dist_finegrain share: tensors checked and turned into the structs
// of kernels.h. Nothing here launches anything or needs a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernels.h"

namespace dfg {

// Of the operators: raised, with that of extension.py, when a schema or the meaning of an option
// changes.
constexpr int kAbi = 6;

using OptionalTensor = std::optional<at::Tensor>;

// The operators' schemas (bindings.cpp) are these argument lists, in this order.
// Options of a plane are packed as formats/fused.py does: codec | flags << 8; 0 is no plane.
// Buffers of a plane: codes, then block scales and outer scale where its codec has them.
#define DFG_CAST_PARAMETERS                                                                      \
  const at::Tensor &x, at::TensorList row, at::TensorList column, int64_t row_options,           \
      double row_epsilon, int64_t column_options, double column_epsilon, bool dequantized,       \
      const OptionalTensor &row_statistic, const OptionalTensor &column_statistic,               \
      const OptionalTensor &row_amax, const OptionalTensor &column_amax, at::IntArrayRef places, \
      const OptionalTensor &seed_step, const OptionalTensor &bias_partials,                      \
      const OptionalTensor &ends, const OptionalTensor &column_ends
#define DFG_CAST_ARGUMENTS                                                                      \
  x, row, column, row_options, row_epsilon, column_options, column_epsilon, dequantized,        \
      row_statistic, column_statistic, row_amax, column_amax, places, seed_step, bias_partials, \
      ends, column_ends

#define DFG_MEASURE_PARAMETERS                                                            \
  const at::Tensor &x, const OptionalTensor &row_amax, const OptionalTensor &column_amax, \
      int64_t row_options, double row_epsilon, int64_t column_options, bool dequantized,  \
      const OptionalTensor &row_statistic, const OptionalTensor &ends
#define DFG_MEASURE_ARGUMENTS                                                                     \
  x, row_amax, column_amax, row_options, row_epsilon, column_options, dequantized, row_statistic, \
      ends

#define DFG_DECODE_PARAMETERS                                                         \
  const at::Tensor &codes, const OptionalTensor &scales, const OptionalTensor &outer, \
      int64_t options, const at::Tensor &out
#define DFG_DECODE_ARGUMENTS codes, scales, outer, options, out

#define DFG_UPDATE_PARAMETERS \
  at::TensorList scales, at::TensorList histories, at::TensorList pendings, const at::Tensor &table
#define DFG_UPDATE_ARGUMENTS scales, histories, pendings, table

// Options of an operand are packed as ops/lt.py does: element | scale mode << 4 (gemm/lt.h).
#define DFG_GEMM_PARAMETERS                                                                        \
  const at::Tensor &a, const at::Tensor &b, int64_t a_options, int64_t b_options,                  \
      const OptionalTensor &a_scales, const OptionalTensor &b_scales, const OptionalTensor &alpha, \
      const OptionalTensor &bias, const at::Tensor &out, bool accumulate, bool fast
#define DFG_GEMM_ARGUMENTS \
  a, b, a_options, b_options, a_scales, b_scales, alpha, bias, out, accumulate, fast

// gemm: 0 fprop, 1 dgrad, 2 wgrad. Scales FP32: [E], or of rows or blocks as `cast` with `ends`
// writes them.
#define DFG_GEMM_GROUPS_PARAMETERS                                                                 \
  const at::Tensor &a, const at::Tensor &b, int64_t a_options, int64_t b_options,                  \
      const at::Tensor &a_scales, const at::Tensor &b_scales, int64_t gemm, at::IntArrayRef sizes, \
      const c10::List<OptionalTensor>&out, at::IntArrayRef accumulate, bool fast
#define DFG_GEMM_GROUPS_ARGUMENTS \
  a, b, a_options, b_options, a_scales, b_scales, gemm, sizes, out, accumulate, fast

// Checked arguments; ValueError or TypeError names the argument, what was got and what is accepted.
CastArgs cast_args(DFG_CAST_PARAMETERS);
MeasureArgs measure_args(DFG_MEASURE_PARAMETERS);
DecodeArgs decode_args(DFG_DECODE_PARAMETERS);
// Uninitialised buffers of the plane (rows, contraction) of `x`, as `cast_args` asks for them;
// experts: 0, or how many groups the rows of `x` are. spare: FP32 elements of one more buffer.
std::vector<at::Tensor> empty_plane(int64_t options, int64_t rows, int64_t contraction,
                                    const at::Tensor& x, int64_t experts, bool is_column,
                                    int64_t spare = 0);
// A contiguous tensor that starts `byte_offset` behind the start of `buffer`, in its storage.
at::Tensor part_of(const at::Tensor& buffer, int64_t byte_offset, at::IntArrayRef sizes,
                   at::ScalarType dtype);
// One matrix of a layer as it is quantized: planes of [M, K] and of [K, M], 0 for none. Without
// stochastic rounding; `dequantized` only beside a column that is not measured.
struct QuantizeOptions {
  int64_t row = 0, column = 0;
  double row_epsilon = 0.0, column_epsilon = 0.0;
  bool dequantized = false;
  bool bias_grad = false;
  OptionalTensor row_scale, column_scale;  // of delayed scaling, with the amaxes that are raised
  OptionalTensor row_amax, column_amax;
  OptionalTensor ends;  // int32 [E]: the matrix is E groups of rows, quantized each by itself
};
// Buffers of both planes, and the partial bias gradients [⌈M/128⌉, K].
struct Quantized {
  std::vector<at::Tensor> row, column;
  OptionalTensor bias_partials;
};
// Allocates, measures and casts by the operators `measure` and `cast`.
Quantized quantize(const at::Tensor& x, const QuantizeOptions& options);

// A GEMM of every expert, by the operator `gemm`.
void gemm_groups(DFG_GEMM_GROUPS_PARAMETERS);

// GEMMs that operators of whole layers have run, by counter: fprop, dgrad, wgrad.
int64_t new_gemm_counter();
std::vector<std::vector<int64_t>> gemm_counts();
void reset_gemm_counts();

// Packed options of a plane, checked.
PlaneOptions plane_options(int64_t packed);
// What has to be measured before a plane of these options can be written: nothing, the amax of the
// matrix, of the rotated matrix, or one per row.
enum class Statistic { none, tensor, rotated_tensor, row };
Statistic measured_statistic(int64_t options);
// table int64 [slots, 5] holds a DelayedSlot per row, made from these very tensors.
void check_update(DFG_UPDATE_PARAMETERS);

}  // namespace dfg
