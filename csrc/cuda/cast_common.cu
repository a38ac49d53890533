// Specialised instances, BF16 input: the pairs of anchors.md and of the zoo.
#include <type_traits>

#include "cast_any.cuh"

namespace dfg {
namespace {

using E = Element<Dtype::bf16>;

using Float8 = Spec<Codec::float8, true>;
using AnyFloat8 = Spec<Codec::float8>;
using Block = Spec<Codec::block, true>;
using AnyBlock = Spec<Codec::block>;
using Mxfp8 = Spec<Codec::mxfp8, true>;
using AnyMxfp8 = Spec<Codec::mxfp8>;
using Nearest = Spec<Codec::nvfp4, true, 0, 0>;
using Rotated = Spec<Codec::nvfp4, true, 0, 1>;
using Stochastic = Spec<Codec::nvfp4, true, 1, 0>;
using RotatedStochastic = Spec<Codec::nvfp4, true, 1, 1>;
using AnyNvfp4 = Spec<Codec::nvfp4>;

// Blocks per multiprocessor: as many as registers without spilling allow.
template <class Row>
constexpr int kBlocksPerSm = std::is_same_v<Row, AnyNvfp4> ? 3 : 4;

struct Instance {
  bool (*matches)(const CastArgs&);
  cudaError_t (*launch)(const CastArgs&, cudaStream_t);
};

template <class Row, class Column, bool kDequantized = false>
constexpr Instance instance() {
  return {[](const CastArgs& a) {
            return a.dequantized == kDequantized && Row::matches(a.row.options) &&
                   Column::matches(a.column.options);
          },
          launch_cast<E, Row, Column, kDequantized, kBlocksPerSm<Row>>};
}

// Whether one scale per tile, or tensor, serves both planes, so that their codes are the same.
bool has_same_codes(const CastArgs& a) {
  const PlaneOptions &r = a.row.options, &c = a.column.options;
  if (a.dequantized || r.codec != c.codec || r.e5m2 != c.e5m2) return false;
  if (r.power_of_two != c.power_of_two || r.epsilon != c.epsilon) return false;
  if (r.codec == Codec::block) return r.two_dimensional && c.two_dimensional;
  return r.codec == Codec::float8 && !r.row_scaled && !c.row_scaled &&
         r.scale_given == c.scale_given && a.row.statistic == a.column.statistic;
}

template <class Row>
constexpr Instance transposed() {
  return {[](const CastArgs& a) { return has_same_codes(a) && Row::matches(a.row.options); },
          launch_cast<E, Row, Transposed<Row>, false, kBlocksPerSm<Row>>};
}

// The first that matches is taken.
const Instance kInstances[] = {
    transposed<Float8>(),
    transposed<AnyFloat8>(),
    transposed<AnyBlock>(),
    instance<Float8, Float8>(),
    instance<Float8, NoPlane>(),
    instance<NoPlane, Float8>(),
    instance<AnyFloat8, AnyFloat8>(),
    instance<AnyFloat8, NoPlane>(),
    instance<NoPlane, AnyFloat8>(),
    instance<Block, Block>(),
    instance<Block, Block, true>(),
    instance<Block, Float8>(),
    instance<Block, NoPlane>(),
    instance<NoPlane, Block>(),
    instance<AnyBlock, AnyBlock>(),
    instance<Mxfp8, Mxfp8>(),
    instance<Mxfp8, NoPlane>(),
    instance<NoPlane, Mxfp8>(),
    instance<AnyMxfp8, AnyMxfp8>(),
    instance<Mxfp8, Nearest>(),
    instance<Mxfp8, Rotated>(),
    instance<Mxfp8, RotatedStochastic>(),
    instance<Nearest, Nearest>(),
    instance<Nearest, Rotated>(),
    instance<Nearest, NoPlane>(),
    instance<Nearest, Mxfp8>(),
    instance<Stochastic, Stochastic>(),
    instance<Stochastic, RotatedStochastic>(),
    instance<AnyNvfp4, AnyNvfp4>(),
};

}  // namespace

cudaError_t cast_common_bf16(const CastArgs& args, cudaStream_t stream) {
  for (const Instance& instance : kInstances) {
    if (instance.matches(args)) return instance.launch(args, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace dfg
