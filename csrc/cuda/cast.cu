// Which instance casts: the specialised one where there is one, else the one for any pair.
#include "cast_any.cuh"
#include "kernels.h"

namespace dfg {

cudaError_t cast_cuda(const CastArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case Dtype::f32:
      return cast_any_f32(args, stream);
    case Dtype::f16:
      return cast_any_f16(args, stream);
    case Dtype::bf16:
      break;
  }
  const cudaError_t status = cast_common_bf16(args, stream);
  return status == cudaErrorNotSupported ? cast_any_bf16(args, stream) : status;
}

}  // namespace dfg
