// Allocates, measures and casts without a step in between that Python would have to make. Calls the
// operators `measure` and `cast`, so that its planes are theirs.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

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

int64_t extent(Statistic statistic, int64_t rows) {
  if (statistic == Statistic::none) return 0;
  return statistic == Statistic::row ? rows : 1;
}

Statistics measured(const at::Tensor& x, const QuantizeOptions& o) {
  const Statistic of_row = measured_statistic(o.row);
  const Statistic of_column = measured_statistic(o.column);
  const bool is_shared = of_row == Statistic::tensor && of_column == Statistic::tensor;
  const int64_t rows = extent(of_row, x.size(0));
  const int64_t columns = is_shared ? 0 : extent(of_column, x.size(1));
  Statistics result;
  if (rows + columns == 0) return result;
  const at::Tensor amaxes = at::zeros({rows + columns}, x.options().dtype(at::kFloat));
  if (rows) result.row = amaxes.narrow(0, 0, rows);
  if (columns) result.column = amaxes.narrow(0, rows, columns);
  measure(x, result.row, result.column, o.row, o.row_epsilon, o.column, false, std::nullopt,
          std::nullopt);
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
  const Statistics statistics = measured(x, o);
  Quantized result;
  if (o.row) result.row = empty_plane(o.row, x.size(0), x.size(1), x);
  if (o.column) result.column = empty_plane(o.column, x.size(1), x.size(0), x);
  if (o.bias_grad) {
    const int64_t blocks = (x.size(0) + kBiasRows - 1) / kBiasRows;
    result.bias_partials = at::empty({blocks, x.size(1)}, x.options().dtype(at::kFloat));
  }
  cast(x, result.row, result.column, o.row, o.row_epsilon, o.column, o.column_epsilon,
       o.dequantized, o.row_scale ? o.row_scale : statistics.row,
       o.column_scale ? o.column_scale : statistics.column, o.row_amax, o.column_amax, {},
       std::nullopt, result.bias_partials, std::nullopt, std::nullopt);
  return result;
}

}  // namespace dfg
