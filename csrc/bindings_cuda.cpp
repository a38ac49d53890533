// The CUDA side of the operators: the tensors' device, the current stream, no synchronisation.
#ifdef DFG_WITH_CUDA

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "bindings.h"
#include "cuda/kernels.h"

namespace dfg {
namespace {

void check(const char* name, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // this error is reported here, not by the next call
  TORCH_CHECK(error != cudaErrorNoKernelImageForDevice, "dist_finegrain::", name,
              ": no kernel was built for this GPU; dist_finegrain.build_info() names what was");
  TORCH_CHECK(false, "dist_finegrain::", name, ": ", cudaGetErrorString(error));
}

void cast(DFG_CAST_PARAMETERS) {
  const CastArgs args = cast_args(DFG_CAST_ARGUMENTS);
  const c10::cuda::CUDAGuard guard(x.device());
  check("cast", cast_cuda(args, c10::cuda::getCurrentCUDAStream()));
}

void measure(DFG_MEASURE_PARAMETERS) {
  const MeasureArgs args = measure_args(DFG_MEASURE_ARGUMENTS);
  const c10::cuda::CUDAGuard guard(x.device());
  check("measure", measure_cuda(args, c10::cuda::getCurrentCUDAStream()));
}

void decode(DFG_DECODE_PARAMETERS) {
  const DecodeArgs args = decode_args(DFG_DECODE_ARGUMENTS);
  const c10::cuda::CUDAGuard guard(out.device());
  check("decode", decode_cuda(args, c10::cuda::getCurrentCUDAStream()));
}

void update_delayed(DFG_UPDATE_PARAMETERS) {
  check_update(DFG_UPDATE_ARGUMENTS);
  const c10::cuda::CUDAGuard guard(table.device());
  check("update_delayed",
        update_delayed_cuda(static_cast<const DelayedSlot*>(table.const_data_ptr()), table.size(0),
                            c10::cuda::getCurrentCUDAStream()));
}

TORCH_LIBRARY_IMPL(dist_finegrain, CUDA, m) {
  m.impl("cast", cast);
  m.impl("measure", measure);
  m.impl("decode", decode);
  m.impl("update_delayed", update_delayed);
}

}  // namespace
}  // namespace dfg

#endif
