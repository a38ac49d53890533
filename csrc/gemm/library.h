// The functions of libcublasLt that the GEMM needs, found in the process instead of linked.
#pragma once

#include <cublasLt.h>

#include <string>

namespace dfg {

// One pointer per function. Built by cublaslt(); a constructor that fails says why in `reason`.
struct CublasLt {
  std::string reason;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetStatusName) get_status_name = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;

  std::string version() const;  // e.g. "13.1.0"
  std::string status_name(cublasStatus_t status) const;
};

// The library, loaded at the first use. Throws std::runtime_error with its reason if it is missing.
const CublasLt& cublaslt();

}  // namespace dfg
