// The CUDA side of kernels.h: asynchronous on `stream`, no allocation, no synchronisation, current
// device. No torch header here or below.
#pragma once

#include <cuda_runtime_api.h>

#include "../kernels.h"

namespace dfg {

cudaError_t cast_cuda(const CastArgs& args, cudaStream_t stream);
// Sets the amaxes, whatever they held.
cudaError_t measure_cuda(const MeasureArgs& args, cudaStream_t stream);
cudaError_t decode_cuda(const DecodeArgs& args, cudaStream_t stream);
// slots: in device memory.
cudaError_t update_delayed_cuda(const DelayedSlot* slots, int64_t count, cudaStream_t stream);

// Parts of measure_cuda that need no tile: max |x| over finite elements. That of a matrix is set,
// those of rows, columns and experts are raised.
cudaError_t amax_tensor_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                             int64_t row_stride, float* amax, cudaStream_t stream);
cudaError_t amax_rows_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                           int64_t row_stride, float* amax, cudaStream_t stream);
cudaError_t amax_experts_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                              int64_t row_stride, const Groups& groups, float* amax,
                              cudaStream_t stream);
// Of each row and of each column, either null where it is not wanted; groups as in Measure. x must
// satisfy has_lines: rows that begin and end at multiples of 16 bytes.
bool has_lines(const void* x, Dtype dtype, int64_t columns, int64_t row_stride);
cudaError_t amax_lines_cuda(const void* x, Dtype dtype, int64_t rows, int64_t columns,
                            int64_t row_stride, const Groups& groups, float* of_rows,
                            float* of_columns, cudaStream_t stream);

}  // namespace dfg
