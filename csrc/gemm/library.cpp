#include "library.h"

#include <dlfcn.h>

#include <stdexcept>

#include "lt.h"

namespace dfg {
namespace {

template <typename Function>
void find(void* library, const char* name, Function* function, std::string* reason) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && reason->empty()) *reason = std::string("it has no ") + name;
}

CublasLt load() {
  CublasLt lt;
  // The major version of the header: enums and structs are those of one major version.
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  // Already loaded is torch's own, whatever LD_LIBRARY_PATH holds; two in one process would differ.
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(name.c_str(), RTLD_NOW);
  if (library == nullptr) {
    const char* error = dlerror();
    lt.reason = name + " cannot be loaded (" + (error ? error : "unknown error") + ")";
    return lt;
  }
  std::string missing;
  find(library, "cublasLtCreate", &lt.create, &missing);
  find(library, "cublasLtGetVersion", &lt.get_version, &missing);
  find(library, "cublasLtGetStatusName", &lt.get_status_name, &missing);
  find(library, "cublasLtMatmulDescCreate", &lt.desc_create, &missing);
  find(library, "cublasLtMatmulDescDestroy", &lt.desc_destroy, &missing);
  find(library, "cublasLtMatmulDescSetAttribute", &lt.desc_set, &missing);
  find(library, "cublasLtMatrixLayoutCreate", &lt.layout_create, &missing);
  find(library, "cublasLtMatrixLayoutDestroy", &lt.layout_destroy, &missing);
  find(library, "cublasLtMatmulPreferenceCreate", &lt.preference_create, &missing);
  find(library, "cublasLtMatmulPreferenceDestroy", &lt.preference_destroy, &missing);
  find(library, "cublasLtMatmulPreferenceSetAttribute", &lt.preference_set, &missing);
  find(library, "cublasLtMatmulAlgoGetHeuristic", &lt.get_heuristic, &missing);
  find(library, "cublasLtMatmul", &lt.matmul, &missing);
  if (!missing.empty()) lt.reason = name + " cannot be used: " + missing;
  return lt;
}

const CublasLt& loaded() {
  static const CublasLt lt = load();
  return lt;
}

}  // namespace

const std::string& why_no_cublaslt() { return loaded().reason; }

const CublasLt& cublaslt() {
  const CublasLt& lt = loaded();
  if (!lt.reason.empty()) throw std::runtime_error("dist_finegrain::gemm: " + lt.reason);
  return lt;
}

std::string CublasLt::version() const {
  // 13.1.0 is 130100.
  const size_t v = get_version();
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
         std::to_string(v % 100);
}

std::string CublasLt::status_name(cublasStatus_t status) const { return get_status_name(status); }

}  // namespace dfg
