// Kernels that need no tile: plain amaxes (per matrix, row or column), decoding of a plane.
#pragma once

#include "../codecs/mxfp8.h"
#include "../codecs/nvfp4.h"
#include "../codecs/swizzle.h"
#include "lanes.h"

namespace dfg {
namespace DFG_VARIANT {

// Bits of a magnitude as FP32's.
template <class Source>
uint32_t widened(typename Source::Bits bits) {
  return bits_of(Source::widen(bits));
}

// Largest magnitude of one row; `by_column` is raised too where wanted. Maxima are taken of the bit
// patterns; with kFinite false, those of NaN and ±Inf count as zero.
template <class Source, bool kFinite>
typename Source::Bits row_maxima(const typename Source::Bits* __restrict in, int width,
                                 typename Source::Bits* __restrict by_column) {
  using Bits = typename Source::Bits;
  using Signed = std::conditional_t<sizeof(Bits) == 2, int16_t, int32_t>;
  Signed top = 0;
  for (int k = 0; k < width; ++k) {
    Signed bits = static_cast<Signed>(in[k] & Source::kMagnitude);
    if (!kFinite) bits = bits >= static_cast<Signed>(Source::kInfinity) ? Signed{0} : bits;
    top = bits > top ? bits : top;
    const Signed held = static_cast<Signed>(by_column[k]);
    by_column[k] = static_cast<Bits>(bits > held ? bits : held);
  }
  return static_cast<Bits>(top);
}

template <class Source, bool kFinite>
bool piece_maxima(const MeasureArgs& args, const RowTile& at, int64_t column, int width) {
  using Bits = typename Source::Bits;
  const Bits* x = static_cast<const Bits*>(args.x) + at.row * args.row_stride + column;
  alignas(64) Bits by_column[kSpan] = {};
  Bits by_row[kTile];
  Bits top = 0;
  for (int row = 0; row < at.rows; ++row) {
    by_row[row] = row_maxima<Source, kFinite>(x + row * args.row_stride, width, by_column);
    top = by_row[row] > top ? by_row[row] : top;
  }
  if (kFinite && top >= Source::kInfinity) return false;
  for (const Measure* measure : {&args.row, &args.column}) {
    if (measure->options.codec == Codec::none) continue;
    if (!measure->options.row_scaled) {
      raise(measure->amax + at.expert, widened<Source>(top));
    } else if (measure == &args.row) {
      for (int row = 0; row < at.rows; ++row) {
        raise(args.row.amax + at.row + row, widened<Source>(by_row[row]));
      }
    } else {
      float* amax = args.column.amax + at.expert * args.columns + column;
      for (int k = 0; k < width; ++k) raise(amax + k, widened<Source>(by_column[k]));
    }
  }
  return true;
}

inline void amax_pieces(const MeasureArgs& args, const RowTile* tiles, int64_t begin, int64_t end) {
  const int64_t across = ceil_div(args.columns, kSpan);
  for (int64_t item = begin; item < end; ++item) {
    const RowTile& at = tiles[item / across];
    const int64_t column = (item + at.shift) % across * kSpan;
    const int64_t left = args.columns - column;
    const int width = left < kSpan ? static_cast<int>(left) : kSpan;
    with_element(args.dtype, [&](auto source) {
      using Source = decltype(source);
      if (!piece_maxima<Source, true>(args, at, column, width)) {
        piece_maxima<Source, false>(args, at, column, width);
      }
    });
  }
}

// ---- Decoding ----

// Up to 128 elements of one plane row.
struct Piece {
  Bytes codes;
  Lanes factor;
};

inline float outer_of(const Plane& plane, int64_t row) {
  return plane.outer == nullptr ? 1.0f : plane.outer[plane.options.row_scaled ? row : 0];
}

inline float block_scale(const Plane& plane, int64_t row, int64_t block) {
  const float* scales = static_cast<const float*>(plane.scales);
  if (!plane.options.two_dimensional) return scales[block * plane.stored_rows + row];
  const int64_t stride = ceil_div(ceil_div(plane.stored_contraction, kTile), 4) * 4;
  return scales[row / kTile * stride + block];
}

// One factor for each kBlock elements, of those blocks that hold the first `count` ≤ kLanes.
template <int kBlock, class Function>
void fill_factors(int count, const Function& factor_of, Lanes& factor) {
  static_assert(kLanes % kBlock == 0, "blocks do not fill the lanes");
  for (int block = 0; block < kLanes / kBlock && block * kBlock < count; ++block) {
    const float value = factor_of(block);
    for (int k = 0; k < kBlock; ++k) factor[block * kBlock + k] = value;
  }
}

// The scale bytes of a row, of blocks of `group`, from the one that holds element `first`, which is
// a multiple of 128.
struct ScaleBytes {
  const uint8_t* bytes;
  bool swizzled;

  ScaleBytes(const Plane& plane, int64_t row, int64_t first, int group)
      : bytes(static_cast<const uint8_t*>(plane.scales)), swizzled(plane.options.swizzled) {
    const int64_t blocks = plane.stored_contraction / group, block = first / group;
    bytes += swizzled ? swizzled_offset(row, block, ceil_div(blocks, kSwizzleBlocks))
                      : row * blocks + block;
  }
  uint8_t operator[](int i) const { return bytes[swizzled ? swizzled_step(i) : i]; }
};

// Codes and factors of elements [first, first + count) of a row; first is a multiple of 128.
inline void fetch(const Plane& plane, int64_t row, int64_t first, int count, Piece& piece) {
  const int64_t stride = plane.stored_contraction;
  switch (plane.options.codec) {
    case Codec::mxfp8: {
      const ScaleBytes scales(plane, row, first, 32);
      fill_factors<32>(count, [&](int i) { return e8m0_decode(scales[i]); }, piece.factor);
      break;
    }
    case Codec::nvfp4: {
      const ScaleBytes scales(plane, row, first, 16);
      const bool has_outer = plane.outer != nullptr;
      const float outer = outer_of(plane, row);
      fill_factors<16>(
          count,
          [&](int i) {
            const float factor = fp8_decode<false>(scales[i]);
            return has_outer ? mul(factor, outer) : factor;
          },
          piece.factor);
      uint8_t packed[kLanes / 2];
      std::memcpy(packed, plane.codes + row * (stride / 2) + first / 2, (count + 1) / 2);
      for (int pair = 0; pair < kLanes / 2; ++pair) {
        piece.codes[2 * pair] = packed[pair] & 15u;
        piece.codes[2 * pair + 1] = packed[pair] >> 4;
      }
      return;
    }
    default: {
      const float factor = plane.options.codec == Codec::float8
                               ? outer_of(plane, row)
                               : block_scale(plane, row, first / kTile);
      fill_factors<kLanes>(count, [&](int) { return factor; }, piece.factor);
    }
  }
  std::memcpy(piece.codes, plane.codes + row * stride + first, count);
}

inline void decode_piece(const PlaneOptions& options, const Piece& piece, Lanes& values) {
  if (options.codec == Codec::nvfp4) {
    for (int k = 0; k < kLanes; ++k) {
      values[k] = mul(e2m1_decode(piece.codes[k]), piece.factor[k]);
    }
  } else if (options.e5m2) {
    for (int k = 0; k < kLanes; ++k) {
      values[k] = mul(fp8_decode<true>(piece.codes[k]), piece.factor[k]);
    }
  } else {
    for (int k = 0; k < kLanes; ++k) {
      values[k] = mul(fp8_decode<false>(piece.codes[k]), piece.factor[k]);
    }
  }
}

// Nearest-even; finite values saturate, infinities stay, every NaN is the canonical one.
template <class Source>
void narrow(const Lanes& values, int count, typename Source::Bits* out) {
  typename Source::Bits bits[kLanes];
  for (int k = 0; k < kLanes; ++k) {
    const bool is_infinite = magnitude(values[k]) > kFltMax;
    const float finite = Source::saturated(values[k]);
    bits[k] = Source::narrow(is_infinite ? values[k] : finite);
  }
  std::memcpy(out, bits, sizeof(bits[0]) * count);
}

inline void decode_rows(const DecodeArgs& args, int64_t begin, int64_t end) {
  Piece piece = {};
  Lanes values;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t first = 0; first < args.contraction; first += kLanes) {
      const int64_t left = args.contraction - first;
      const int count = left < kLanes ? static_cast<int>(left) : kLanes;
      fetch(args.plane, row, first, count, piece);
      decode_piece(args.plane.options, piece, values);
      with_element(args.dtype, [&](auto source) {
        using Source = decltype(source);
        auto* out = static_cast<typename Source::Bits*>(args.out);
        narrow<Source>(values, count, out + row * args.contraction + first);
      });
    }
  }
}

}  // namespace DFG_VARIANT
}  // namespace dfg
