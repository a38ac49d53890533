// What the kernels are told: plain structs, shared by the CPU and the CUDA side and by the
// bindings.
//
// Legend: X is [M, K], row-major with a row stride. Its rowwise plane is (R, C) = (M, K), its
// columnwise plane (K, M): R plane rows, C contraction. Rp, Cp: as stored (numerics.md, "Plane
// storage"). Every pointer is to memory of the device that runs the kernel.
#pragma once

#include <cstdint>

namespace dfg {

enum class Dtype : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

// How a plane's codes and scales are made. float8 covers per-tensor, delayed and row scaling.
enum class Codec : int32_t { none = 0, float8 = 1, block = 2, mxfp8 = 3, nvfp4 = 4 };

enum class Rht : int32_t { off = 0, plain = 1, with_signs = 2 };

// The options of one plane; uniform over a launch.
struct PlaneOptions {
  Codec codec = Codec::none;
  bool e5m2 = false;             // codes are E5M2, else E4M3 (ignored by nvfp4)
  bool two_dimensional = false;  // block 128×128, mxfp8 32×32, nvfp4 16×16
  bool power_of_two = false;     // float8, block: clear the mantissa of the encode scale
  bool row_scaled = false;       // float8, nvfp4: one statistic and one outer scale per plane row
  bool scale_given = false;      // float8: statistic is the encode scale itself (delayed scaling)
  bool stochastic = false;       // nvfp4: stochastic rounding of the codes
  bool swizzled = false;         // mxfp8, nvfp4: scale bytes in 128×4 tiles; never with groups
  Rht rht = Rht::off;            // nvfp4: rotate groups of 16 along the contraction first
  float epsilon = 0.0f;          // float8, block: least amax
};

// One plane to be written. Null where the format has no such buffer.
struct Plane {
  PlaneOptions options;
  int64_t stored_rows = 0;         // Rp: a multiple of 16
  int64_t stored_contraction = 0;  // Cp: a multiple of 16 (float8, block) or 32 (mxfp8, nvfp4)
  uint8_t* codes = nullptr;        // [Rp, Cp], nvfp4 [Rp, Cp/2] with the low nibble first
  // block 1-D: FP32 [⌈C/128⌉, Rp]; block 2-D: FP32 [⌈R/128⌉, pad4(⌈C/128⌉)]; mxfp8: bytes
  // [Rp, Cp/32]; nvfp4: bytes [Rp, Cp/16]. 2-D bytes are repeated for each row. Swizzled bytes:
  // those of [R rounded up to 128, blocks rounded up to 4], in the order of codecs/swizzle.h.
  void* scales = nullptr;
  float* outer = nullptr;  // float8: decode scale; nvfp4: g. [1], [Rp] row-scaled, [E] grouped
  const float* statistic = nullptr;  // amax over finite elements, or the scale; [1], [R] or [E]
  float* amax = nullptr;  // [1] or [E], or null: raised to the amax of what the plane encodes
  // Stochastic rounding (numerics.md): stream of the slot, global index of the plane's origin.
  uint32_t stream = 0;
  int64_t row_origin = 0;
  int64_t contraction_origin = 0;
};

// Experts: X's rows are `count` consecutive groups. The columnwise part of expert e starts at a
// multiple of the plane's block (16 float8, 32 mxfp8 and nvfp4, 128 block) and takes at least one
// block; whatever follows the last part, up to Cp, is zero. Blocks, RHT groups and the indices of
// stochastic rounding start at the expert's first row. Statistics and outer scales are per expert:
// [E], or [E, K] and [E, Rp] for a row-scaled column plane; a row-scaled row plane has [M] and
// [Rp]. 128×128 blocks are refused by the caller.
struct Groups {
  int32_t count = 0;               // 0: not grouped
  const int32_t* ends = nullptr;   // [count] cumulative row ends in X, non-decreasing, the last M
  int32_t* column_ends = nullptr;  // [count] or null: written: cumulative ends in the column plane
};

// One read of X, up to two planes.
struct CastArgs {
  const void* x = nullptr;
  Dtype dtype = Dtype::bf16;
  int64_t rows = 0, columns = 0, row_stride = 0;  // elements
  Plane row, column;                              // codec none: not wanted
  bool dequantized = false;  // the column plane encodes decode(row), rounded to dtype, saturated
  const int64_t* seed_step = nullptr;  // [2]: rounding seed, completed steps; null without SR
  // FP32 [⌈M/128⌉, K] or null: sums of X over each 128 rows, in FP32 (their sum is the bias
  // gradient); null with groups.
  float* bias_partials = nullptr;
  Groups groups;
};

// Where the amax of one plane goes: Codec::none skips it. `options` says what is measured: with RHT
// the rotated values; row_scaled: one amax per plane row.
struct Measure {
  PlaneOptions options;
  float* amax = nullptr;  // [1], [R] or [E]; on a CPU zeroed by the caller and raised in place
};

// One read of X, the amaxes that both planes need. With `dequantized`, `row_plane` (its options
// and, where it has one, its statistic; never stochastic) says what the column's amax is taken of.
struct MeasureArgs {
  const void* x = nullptr;
  Dtype dtype = Dtype::bf16;
  int64_t rows = 0, columns = 0, row_stride = 0;
  Measure row, column;
  bool dequantized = false;
  Plane row_plane;
  Groups groups;
};

// Plane → matrix [R, C] in dtype, nearest-even; finite values saturate, NaN and Inf stay.
struct DecodeArgs {
  Plane plane;              // codes, scales, outer (null: left out), options, stored extents
  int64_t rows = 0;         // R
  int64_t contraction = 0;  // C; with RHT rounded up to whole groups of 16
  void* out = nullptr;      // [R, C] contiguous
  Dtype dtype = Dtype::bf16;
};

// Delayed scaling: one fused update of many slots (delayed.py says what each field means).
struct DelayedSlot {
  float* scale;
  float* history;
  float* pending;
  int32_t history_length;
  int32_t use_max;  // window maximum, else the newest amax
  float fp8_max;
  float margin_divisor;  // 2^margin
};

}  // namespace dfg
