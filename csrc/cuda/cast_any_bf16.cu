#include "cast_any.cuh"

namespace dfg {

cudaError_t cast_any_bf16(const CastArgs& args, cudaStream_t stream) {
  return cast_any<Element<Dtype::bf16>>(args, stream);
}

}  // namespace dfg
