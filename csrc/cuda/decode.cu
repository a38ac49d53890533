// Plane → matrix [R, C] in BF16, FP16 or FP32, for every codec.
//
// One FP32 product per element: float8 and block float(code)·scale, mxfp8 float(code)·2^(byte−127),
// nvfp4 e2m1·(b·g), then nearest-even to the output type; finite values saturate, Inf stays, NaN
// becomes the canonical one. A lane takes 8 codes at a time: 16 bytes of a 16-bit matrix.
#include "../codecs/fp8.h"
#include "../codecs/mxfp8.h"
#include "../codecs/nvfp4.h"
#include "../codecs/swizzle.h"
#include "kernels.h"
#include "stream_decode.cuh"

namespace dfg {
namespace {

using stream::Half16;

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;
constexpr int kWarps = kThreads / stream::kWarp;
constexpr int kLoads = 4;  // independent loads of a lane
constexpr int kCodes = 8;  // of one load
constexpr int kStep = stream::kWarp * kCodes;
constexpr int kUnit = kLoads * kStep;  // codes of a unit: what a warp takes at once, in one row
static_assert(kUnit % 128 == 0, "a unit is whole blocks");

// Every plane has one array of scales here: float8's is its outer scale, of "blocks" that are the
// whole matrix or whole rows.
struct DecodeParams {
  const uint8_t* codes;
  const void* scales;  // null: 1
  const float* g;      // nvfp4: outer scale, null: left out
  char* out;
  int64_t rows, contraction, segments;
  int64_t code_row_bytes;
  // Distance of the scales of the next block of rows, of columns; swizzled: tiles across, unused.
  int64_t scale_row, scale_step;
  int row_shift, block_shift;  // log2 of the rows and the contraction of a block
  bool g_per_row, swizzled;
  Codec codec;
  int alignment;  // of every row of out: 16, 8, 4 or 2
};

__device__ __forceinline__ bool has_byte_scales(Codec codec) {
  return codec == Codec::mxfp8 || codec == Codec::nvfp4;
}

// What the codes of a block are multiplied by, of its scale as stored.
__device__ __forceinline__ float factor_of(const DecodeParams& p, uint32_t stored, float g) {
  if (!has_byte_scales(p.codec)) return float_of(stored);
  const auto byte = static_cast<uint8_t>(stored);
  if (p.codec == Codec::mxfp8) return e8m0_decode(byte);
  const float b = fp8_decode<false>(byte);
  return p.g == nullptr ? b : mul(b, g);
}

// The scales of a lane's vectors. at: index of the unit's first scale; lane_first, width:
// contraction indices within the unit.
__device__ __forceinline__ void load_scales(const DecodeParams& p, int64_t at, int lane_first,
                                            int width, uint32_t (&stored)[kLoads]) {
  const bool are_bytes = has_byte_scales(p.codec);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    stored[i] = bits_of(1.0f);
    const int local = lane_first + i * kStep;
    if (local >= width || p.scales == nullptr) continue;
    const int block = local >> p.block_shift;
    const int64_t index = at + (p.swizzled ? swizzled_step(block) : block * p.scale_step);
    stored[i] = are_bytes ? __ldg(static_cast<const uint8_t*>(p.scales) + index)
                          : __ldg(static_cast<const uint32_t*>(p.scales) + index);
  }
}

// The last vector of a ragged row, and those with NaN, Inf or a value beyond the output type.
template <class Source, class Out>
__device__ __noinline__ void decode_slowly(typename Source::Word word, float factor, char* out,
                                           int count) {
  for (int i = 0; i < count; ++i) {
    const auto value = Out::narrow(mul(Source::element(word, i), factor));
    reinterpret_cast<typename Out::Type*>(out)[i] = value;
  }
}

template <class Source, class Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) decode_kernel(const DecodeParams p) {
  const int lane = threadIdx.x % stream::kWarp, warp = threadIdx.x / stream::kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  stream::Walker walk(p.rows, p.segments, index, static_cast<int64_t>(gridDim.x) * kWarps);
  for (; !walk.done(); walk.next()) {
    const int64_t first = walk.segment * kUnit;  // of the unit, along the contraction
    const int64_t left = p.contraction - first;
    const int width = left < kUnit ? static_cast<int>(left) : kUnit;
    const uint8_t* codes = p.codes + walk.row * p.code_row_bytes + Source::bytes(first);
    char* out = p.out + (walk.row * p.contraction + first) * Out::kBytes;
    typename Source::Word words[kLoads];
    uint32_t stored[kLoads];
    float factors[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int local = lane * kCodes + i * kStep;
      if (local < width) words[i] = Source::load(codes + Source::bytes(local));
    }
    // A unit starts at a block. All loads are on their way before the first result is used.
    const int64_t block = first >> p.block_shift;
    const int64_t at = p.swizzled ? swizzled_offset(walk.row, block, p.scale_row)
                                  : (walk.row >> p.row_shift) * p.scale_row + block * p.scale_step;
    load_scales(p, at, lane * kCodes, width, stored);
    const float g = p.g == nullptr ? 1.0f : __ldg(p.g + (p.g_per_row ? walk.row : 0));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) factors[i] = factor_of(p, stored[i], g);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int local = lane * kCodes + i * kStep;
      if (local >= width) break;
      char* target = out + local * Out::kBytes;
      // A NaN factor fails the comparison.
      const bool plain = magnitude(factors[i]) <= Out::limit(Source::kMax) &&
                         local + kCodes <= width && !Source::has_nonfinite(words[i]);
      if (plain) {
        float values[kCodes];
        Source::products(words[i], factors[i], values);
        Out::store(values, target, p.alignment);
      } else {
        const int count = width - local < kCodes ? width - local : kCodes;
        decode_slowly<Source, Out>(words[i], factors[i], target, count);
      }
    }
  }
}

template <class Source, class Out>
cudaError_t launch_as(const DecodeParams& params, unsigned blocks, cudaStream_t stream) {
  decode_kernel<Source, Out><<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <class Source>
cudaError_t launch(const DecodeParams& params, Dtype dtype, unsigned blocks, cudaStream_t stream) {
  switch (dtype) {
    case Dtype::f32:
      return launch_as<Source, stream::Single>(params, blocks, stream);
    case Dtype::f16:
      return launch_as<Source, Half16<false>>(params, blocks, stream);
    case Dtype::bf16:
      return launch_as<Source, Half16<true>>(params, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

// Where a plane keeps the scale of an element, as numerics.md, "Plane storage", says.
void set_scales(const Plane& plane, int64_t contraction, DecodeParams* params) {
  const PlaneOptions& options = plane.options;
  params->scales = plane.scales;
  switch (options.codec) {
    case Codec::float8:
      params->scales = plane.outer;
      params->scale_row = options.row_scaled ? 1 : 0;
      break;
    case Codec::block:
      params->block_shift = 7;
      params->row_shift = options.two_dimensional ? 7 : 0;
      params->scale_row = options.two_dimensional ? ceil_div(ceil_div(contraction, 128), 4) * 4 : 1;
      params->scale_step = options.two_dimensional ? 1 : plane.stored_rows;
      break;
    case Codec::nvfp4:
      params->g = plane.outer;
      params->g_per_row = options.row_scaled;
      [[fallthrough]];
    case Codec::mxfp8:
      params->block_shift = options.codec == Codec::mxfp8 ? 5 : 4;
      params->scale_row = plane.stored_contraction >> params->block_shift;
      params->scale_step = 1;
      params->swizzled = options.swizzled;
      if (options.swizzled) params->scale_row = ceil_div(params->scale_row, kSwizzleBlocks);
      break;
    case Codec::none:
      break;
  }
}

// Largest power of two, at most 16, that divides the address of every row.
int common_alignment(const void* out, int64_t row_bytes, int64_t rows) {
  const uint64_t all =
      reinterpret_cast<uintptr_t>(out) | (rows > 1 ? static_cast<uint64_t>(row_bytes) : 0u) | 16u;
  return static_cast<int>(all & (~all + 1));
}

}  // namespace

cudaError_t decode_cuda(const DecodeArgs& args, cudaStream_t stream) {
  if (args.rows <= 0 || args.contraction <= 0) return cudaSuccess;
  const Plane& plane = args.plane;
  const bool packed = plane.options.codec == Codec::nvfp4;
  const int bytes = args.dtype == Dtype::f32 ? 4 : 2;
  DecodeParams params{};
  params.codes = plane.codes;
  params.codec = plane.options.codec;
  params.out = static_cast<char*>(args.out);
  params.rows = args.rows;
  params.contraction = args.contraction;
  params.segments = ceil_div(args.contraction, kUnit);
  params.code_row_bytes = packed ? plane.stored_contraction / 2 : plane.stored_contraction;
  params.alignment = common_alignment(args.out, args.contraction * bytes, args.rows);
  set_scales(plane, args.contraction, &params);
  unsigned blocks = 0;
  const cudaError_t error =
      stream::persistent_blocks(args.rows * params.segments, kWarps, kBlocksPerSm, &blocks);
  if (error != cudaSuccess) return error;
  switch (plane.options.codec) {
    case Codec::float8:
    case Codec::block:
    case Codec::mxfp8:
      return plane.options.e5m2
                 ? launch<stream::Fp8Codes<true>>(params, args.dtype, blocks, stream)
                 : launch<stream::Fp8Codes<false>>(params, args.dtype, blocks, stream);
    case Codec::nvfp4:
      return launch<stream::E2m1Codes>(params, args.dtype, blocks, stream);
    case Codec::none:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace dfg
