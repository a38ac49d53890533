// The thin cuBLASLt call: D = alpha · A · Bᵀ (+ bias) (+ D) of row-major matrices, on one stream.
// No torch here. The library is the libcublasLt that the process has already loaded (torch's).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "problem.h"

namespace dfg {

struct GemmPlan;  // an algorithm

// Why there is no usable libcublasLt in this process; "" where there is. Loads it.
const std::string& why_no_cublaslt();

// The algorithm for this problem, from the cache where it was asked for before, and the bytes of
// workspace that it wants. exact: for its very sizes, else for similar ones. Throws
// std::runtime_error naming the problem where there is none.
std::shared_ptr<const GemmPlan> plan_gemm(const GemmArgs& args, bool exact);
size_t workspace_bytes(const GemmPlan& plan);

// Launches it; false where the algorithm is for similar sizes and not for these: nothing was
// launched then. `workspace`: 256-byte aligned, may be null where no bytes are wanted. Neither call
// waits for the device, except that a device's first call makes its constants; both may run under
// stream capture and from several threads at once.
bool run_gemm(const GemmArgs& args, const GemmPlan& plan, bool exact, void* workspace,
              cudaStream_t stream);

}  // namespace dfg
