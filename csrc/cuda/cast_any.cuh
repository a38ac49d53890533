// The instances that take any pair of codecs, per input dtype.
#pragma once

#include "cast_kernel.cuh"

namespace dfg {

template <class E>
cudaError_t cast_any(const CastArgs& args, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 2;  // registers for the largest codec
  return args.dequantized ? launch_cast<E, AnySpec, AnySpec, true, kBlocksPerSm>(args, stream)
                          : launch_cast<E, AnySpec, AnySpec, false, kBlocksPerSm>(args, stream);
}

cudaError_t cast_any_bf16(const CastArgs& args, cudaStream_t stream);
cudaError_t cast_any_f16(const CastArgs& args, cudaStream_t stream);
cudaError_t cast_any_f32(const CastArgs& args, cudaStream_t stream);
// The pairs that training uses most, in BF16; cudaErrorNotSupported where there is no instance.
cudaError_t cast_common_bf16(const CastArgs& args, cudaStream_t stream);

}  // namespace dfg
