// The operators torch.ops.dist_finegrain.*: schemas, the CPU side, and the module
// dist_finegrain._C. But for whole layers they write into their arguments and return nothing. Their
// fake kernels are in extension.py.
#include "bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <cstring>
#include <stdexcept>
#include <string>

#ifdef DFG_WITH_CPU
#include <ATen/Parallel.h>

#include <vector>

#include "cpu/kernels.h"
#endif
#ifdef DFG_WITH_GEMM
#include "gemm/lt.h"
#endif

TORCH_LIBRARY(dist_finegrain, m) {
  m.def(
      "cast(Tensor x, Tensor(a!)[] row, Tensor(b!)[] column, int row_options, float row_epsilon, "
      "int column_options, float column_epsilon, bool dequantized, Tensor? row_statistic, "
      "Tensor? column_statistic, Tensor(c!)? row_amax, Tensor(d!)? column_amax, int[] places, "
      "Tensor? seed_step, Tensor(e!)? bias_partials, Tensor? ends, Tensor(f!)? column_ends) -> ()");
  m.def(
      "measure(Tensor x, Tensor(a!)? row_amax, Tensor(b!)? column_amax, int row_options, "
      "float row_epsilon, int column_options, bool dequantized, Tensor? row_statistic, "
      "Tensor? ends) -> ()");
  m.def("decode(Tensor codes, Tensor? scales, Tensor? outer, int options, Tensor(a!) out) -> ()");
  m.def(
      "update_delayed(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor(c!)[] pendings, "
      "Tensor table) -> ()");
  m.def(
      "gemm(Tensor a, Tensor b, int a_options, int b_options, Tensor? a_scales, Tensor? b_scales, "
      "Tensor? alpha, Tensor? bias, Tensor(a!) out, bool accumulate, bool fast) -> ()");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, int[] plan, float[] epsilons, "
      "Tensor?[] delayed, bool needs_dgrad, bool needs_wgrad, bool record) -> Tensor");
  m.def(
      "linear_forward(Tensor x, Tensor weight, Tensor? bias, int[] plan, float[] epsilons, "
      "Tensor?[] delayed, bool needs_dgrad, bool needs_wgrad, bool record) -> Tensor?[]");
  m.def(
      "linear_backward(Tensor grad, Tensor?[] saved, int[] plan, float[] epsilons, "
      "Tensor?[] delayed, bool needs_dgrad, bool needs_bias, bool record, Tensor(a!) main_grad, "
      "bool accumulate) -> Tensor?[]");
  m.def(
      "gemm_groups(Tensor a, Tensor b, int a_options, int b_options, Tensor a_scales, "
      "Tensor b_scales, int gemm, int[] sizes, Tensor(a!)?[] out, int[] accumulate, bool fast) "
      "-> ()");
  m.def(
      "grouped_linear(Tensor x, Tensor[] weights, int[] plan, float[] epsilons, "
      "Tensor?[] delayed, int[] sizes, Tensor ends, Tensor weight_ends, bool needs_dgrad, "
      "bool needs_wgrad, bool record) -> Tensor");
  m.def(
      "grouped_linear_forward(Tensor x, Tensor[] weights, int[] plan, float[] epsilons, "
      "Tensor?[] delayed, int[] sizes, Tensor ends, Tensor weight_ends, bool needs_dgrad, "
      "bool needs_wgrad, bool record) -> Tensor?[]");
  m.def(
      "grouped_linear_backward(Tensor grad, Tensor?[] saved, int[] plan, float[] epsilons, "
      "Tensor?[] delayed, int[] sizes, Tensor ends, bool needs_dgrad, bool record, "
      "Tensor(a!)?[] main_grads, int[] accumulate) -> Tensor?");
}

namespace dfg {
namespace {

#ifdef DFG_WITH_CPU

void on_torch_threads(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

void cast(DFG_CAST_PARAMETERS) { cast_cpu(cast_args(DFG_CAST_ARGUMENTS), on_torch_threads); }

void measure(DFG_MEASURE_PARAMETERS) {
  const MeasureArgs args = measure_args(DFG_MEASURE_ARGUMENTS);
  for (const OptionalTensor& amax : {row_amax, column_amax}) {
    if (amax) std::memset(amax->mutable_data_ptr(), 0, amax->nbytes());  // the kernels raise it
  }
  measure_cpu(args, on_torch_threads);
}

void decode(DFG_DECODE_PARAMETERS) {
  decode_cpu(decode_args(DFG_DECODE_ARGUMENTS), on_torch_threads);
}

void update_delayed(DFG_UPDATE_PARAMETERS) {
  check_update(DFG_UPDATE_ARGUMENTS);
  const auto* rows = static_cast<const DelayedSlot*>(table.const_data_ptr());
  std::vector<DelayedSlot> slots(rows, rows + scales.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    // The table's addresses are the GPU's business; these are right for functionalized copies too.
    slots[i].scale = scales[i].mutable_data_ptr<float>();
    slots[i].history = histories[i].mutable_data_ptr<float>();
    slots[i].pending = pendings[i].mutable_data_ptr<float>();
    slots[i].history_length = static_cast<int32_t>(histories[i].numel());
  }
  update_delayed_cpu(slots.data(), static_cast<int64_t>(slots.size()));
}

TORCH_LIBRARY_IMPL(dist_finegrain, CPU, m) {
  m.impl("cast", cast);
  m.impl("measure", measure);
  m.impl("decode", decode);
  m.impl("update_delayed", update_delayed);
}

#endif

// Stands in for a part that this build leaves out.
[[maybe_unused]] void not_built(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(), ": the ", keys.highestBackendKey(),
              " kernels are not built; dist_finegrain.build_info() says why");
}

[[maybe_unused]] void register_not_built(torch::Library& m) {
  for (const char* name : {"cast", "measure", "decode", "update_delayed"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&not_built>());
  }
}

#ifndef DFG_WITH_CPU
TORCH_LIBRARY_IMPL(dist_finegrain, CPU, m) { register_not_built(m); }
#endif
#ifndef DFG_WITH_CUDA
TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) { register_not_built(m); }
#endif
#ifndef DFG_WITH_GEMM
TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) {
  m.impl("gemm", torch::CppFunction::makeFromBoxedFunction<&not_built>());
}
#endif

// Why cuBLASLt cannot be used in this process; "" where it can. Asked by extension.py.
std::string why_no_gemm() {
#ifdef DFG_WITH_GEMM
  return why_no_cublaslt();
#else
  return "the cuBLASLt part is not built";
#endif
}

const char* variant() {
#ifdef DFG_WITH_CPU
  return cpu_variant();
#else
  return "";
#endif
}

void choose_variant([[maybe_unused]] const std::string& name) {
#ifdef DFG_WITH_CPU
  choose_cpu_variant(name);
#else
  throw std::runtime_error("the CPU kernels are not built; dist_finegrain.build_info() says why");
#endif
}

}  // namespace
}  // namespace dfg

PYBIND11_MODULE(_C, m) {
  m.attr("ABI") = dfg::kAbi;
  m.doc() = "Registers torch.ops.dist_finegrain; dist_finegrain.extension is its Python face.";
  m.def("why_no_gemm", &dfg::why_no_gemm, "Why cuBLASLt cannot be used here; empty if it can.");
  m.def("gemm_counter", &dfg::new_gemm_counter, "A counter for the plan of a linear layer.");
  m.def("gemm_counts", &dfg::gemm_counts, "fprop, dgrad and wgrad run, for each counter.");
  m.def("reset_gemm_counts", &dfg::reset_gemm_counts);
  m.def("cpu_variant", &dfg::variant, "Instruction set that the CPU kernels run with.");
  m.def("choose_cpu_variant", &dfg::choose_variant, pybind11::arg("name"),
        "For tests: run with this instruction set, \"\" for the best that the processor has.");
}
