// One product D = alpha · A · Bᵀ (+ bias) (+ D) of row-major matrices: plain structs, as the
// bindings check them and cuBLASLt is told them. Nothing here needs CUDA's headers.
//
// Legend: A [m, k], B [n, k], D [m, n]; every pointer is to memory of the device of the call.
#pragma once

#include <cstdint>

namespace dfg {

enum class GemmElement : int32_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4, e2m1 = 5 };

// How an operand's decode scales are laid out; R: rows of the operand, as stored.
enum class ScaleMode : int32_t {
  none = 0,        // 16-bit operands
  scalar = 1,      // FP32 [1]
  row = 2,         // FP32 [R]
  vec128 = 3,      // FP32 [⌈k/128⌉, R]: R must be the problem's m or n
  block128 = 4,    // FP32 [⌈R/128⌉, pad4(⌈k/128⌉)]
  vec32_e8m0 = 5,  // bytes of [R, k/32] in tiles of 128×4 (sm_100; not run on hardware)
  vec16_e4m3 = 6,  // bytes of [R, k/16] in tiles of 128×4 (sm_100; not run on hardware)
};

struct GemmOperand {
  const void* data = nullptr;
  GemmElement element = GemmElement::bf16;
  int64_t stride = 0;       // elements from one row to the next, or column to column if transposed
  bool transposed = false;  // 16-bit operands only: the rows are the fastest dimension
  ScaleMode mode = ScaleMode::none;
  const void* scales = nullptr;
};

struct GemmArgs {
  int device = 0;
  int64_t m = 0, n = 0, k = 0;
  GemmOperand a, b;
  void* out = nullptr;
  GemmElement out_element = GemmElement::f32;  // f32, f16 or bf16
  int64_t out_stride = 0;                      // elements from row to row
  const float* alpha = nullptr;                // [1] on the device; null: 1
  bool accumulate = false;                     // beta is 1, else 0 and what `out` held is not read
  const void* bias = nullptr;                  // [n] of out_element (f16 or bf16), or null
  bool fast = false;                           // FP8 operands: fast accumulation
};

}  // namespace dfg
