#include "cast_any.cuh"

namespace dfg {

cudaError_t cast_any_f32(const CastArgs& args, cudaStream_t stream) {
  return cast_any<Element<Dtype::f32>>(args, stream);
}

}  // namespace dfg
