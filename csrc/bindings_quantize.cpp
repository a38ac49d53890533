// Allocates, measures and casts without a step in between that Python would have to make. Calls the
// operators `measure` and `cast`, so that its planes are theirs.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "bindings.h"

namespace dfg {
namespace {

constexpr int64_t kBiasRows = 128;  // rows whose sum is one row of partial bias gradients

template <typename Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

void measure(DFG_MEASURE_PARAMETERS) {
  static const auto op = operator_of<void(DFG_MEASURE_PARAMETERS)>("dist_finegrain::measure");
  op.call(DFG_MEASURE_ARGUMENTS);
}

void cast(DFG_CAST_PARAMETERS) {
  static const auto op = operator_of<void(DFG_CAST_PARAMETERS)>("dist_finegrain::cast");
  op.call(DFG_CAST_ARGUMENTS);
}

// What each plane is scaled from: given, or measured for both in one read.
struct Statistics {
  OptionalTensor row, column;
};

at::Tensor empty_amaxes(Statistic statistic, at::IntArrayRef by_row, int64_t experts,
                        const at::Tensor& x) {
  const auto options = x.options().dtype(at::kFloat);
  if (statistic == Statistic::row) return at::empty(by_row, options);
  return at::empty({std::max<int64_t>(experts, 1)}, options);
}

// scratch: for the amaxes of the matrix or of its experts, as many as there are of them.
Statistics measured(const at::Tensor& x, const QuantizeOptions& o, const OptionalTensor& scratch) {
  const Statistic of_row = measured_statistic(o.row);
  const Statistic of_column = measured_statistic(o.column);
  const bool is_shared = of_row == Statistic::tensor && of_column == Statistic::tensor;
  const int64_t experts = o.ends ? o.ends->size(0) : 0;
  Statistics result;
  if (of_row != Statistic::none) {
    const bool takes_scratch = scratch && of_row != Statistic::row;
    result.row = takes_scratch ? *scratch : empty_amaxes(of_row, {x.size(0)}, experts, x);
  }
  if (of_column != Statistic::none && !is_shared) {
    const int64_t columns[] = {experts, x.size(1)};
    const at::IntArrayRef by_row(columns + (experts == 0), columns + 2);
    result.column = empty_amaxes(of_column, by_row, experts, x);
  }
  if (!result.row && !result.column) return result;
  measure(x, result.row, result.column, o.row, o.row_epsilon, o.column, false, std::nullopt,
          o.ends);
  if (is_shared) result.column = result.row;
  return result;
}

}  // namespace

Quantized quantize(const at::Tensor& x, const QuantizeOptions& o) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.numel() > 0, "x has shape ", x.sizes(),
                    "; accepted: a matrix [M, K] of at least one element");
  TORCH_CHECK_VALUE(!o.dequantized || measured_statistic(o.column) == Statistic::none,
                    "dequantized is True, and the column is scaled by an amax of the row's values; "
                    "accepted: a column format without one, else measure and cast one by one");
  const int64_t experts = o.ends ? o.ends->size(0) : 0;
  Quantized result;
  OptionalTensor scratch;
  if (o.row) {
    const int64_t spare = std::max<int64_t>(experts, 1);
    result.row = empty_plane(o.row, x.size(0), x.size(1), x, experts, false, spare);
    scratch = std::move(result.row.back());
    result.row.pop_back();
  }
  if (o.column) result.column = empty_plane(o.column, x.size(1), x.size(0), x, experts, true);
  const Statistics statistics = measured(x, o, scratch);
  if (o.bias_grad) {
    const int64_t blocks = (x.size(0) + kBiasRows - 1) / kBiasRows;
    result.bias_partials = at::empty({blocks, x.size(1)}, x.options().dtype(at::kFloat));
  }
  cast(x, result.row, result.column, o.row, o.row_epsilon, o.column, o.column_epsilon,
       o.dequantized, o.row_scale ? o.row_scale : statistics.row,
       o.column_scale ? o.column_scale : statistics.column, o.row_amax, o.column_amax, {},
       std::nullopt, result.bias_partials, o.ends, std::nullopt);
  return result;
}

}  // namespace dfg
