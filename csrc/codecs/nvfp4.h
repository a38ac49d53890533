// NVFP4: E2M1 codes, an E4M3 byte b per 16 elements (or 16×16), an outer FP32 scale g.
//
// clang-format off
//   S = min(2688 / amax, FLT_MAX), 1 for amax 0     b = E4M3(min(amax_blk · (S · (1/6)), FLT_MAX))
//   m = min(1 / (float(b) · (1/S)), FLT_MAX)        code = E2M1(x · m)
//   g = amax · (1/2688)                             decoded = e2m1 · (b · g)
// clang-format on
#pragma once

#include "fp8.h"

namespace dfg {

constexpr uint8_t kNvfp4NanScale = 0x7F;

// What follows from the amax of the matrix or of a plane row.
struct Nvfp4Global {
  float sixth;    // S · (1/6)
  float inverse;  // 1/S
};

DFG_HD Nvfp4Global nvfp4_global(float amax) {
  const float finite = smaller(divide(2688.0f, amax), kFltMax);
  const float scale = float_of(select(amax == 0.0f, 0x3F800000u, bits_of(finite)));
  return {mul(scale, float_of(0x3E2AAAABu)), reciprocal(scale)};
}

DFG_HD float nvfp4_outer(float amax) { return mul(amax, float_of(0x39C30C31u)); }

DFG_HD uint8_t nvfp4_scale_byte(float block_amax, Nvfp4Global global) {
  return fp8_encode<false>(smaller(mul(block_amax, global.sixth), kFltMax));
}

DFG_HD float nvfp4_multiplier(uint8_t byte, Nvfp4Global global) {
  return smaller(reciprocal(mul(fp8_decode<false>(byte), global.inverse)), kFltMax);
}

// Nearest-even E2M1 of a magnitude below 7 (so that 6 is the nearest above 5): the code in the low
// 21 bits; what lies above them is of no use.
//
// Codes are 0.5 apart below 2, 1 apart below 4, 2 apart above: the code is the least of 2v, v + 2
// and v/2 + 4, each rounded to an integer, and ties to an even one. Half of each is rounded where
// 2^22 is added, whose last mantissa bit is 0.5.
DFG_HD uint32_t e2m1_nearest_low(float v) {
  return smallest(bits_of(add(v, 4194304.0f)), bits_of(add_exact_product(v, 0.5f, 4194305.0f)),
                  bits_of(add_exact_product(v, 0.25f, 4194306.0f)));
}

// Stochastic E2M1 of a magnitude below 8: the code in the top byte, 8 where it rounds up from 6;
// what lies below is of no use. noise: 256·r + kStochasticNoise, r of 16 bits.
//
// Below 1 codes are 0.5 apart: (v + 1)/2 has that spacing in its top mantissa bit, as v has above.
// The top ten bits of either are the code plus 252; the others, the distance to the next code.
constexpr uint32_t kStochasticNoise = 0x04000080u;  // half a step of r, and minus 252 (mod 256)
DFG_HD uint32_t e2m1_stochastic_top(float v, uint32_t noise) {
  return bits_of(larger(v, add_exact_product(v, 0.5f, 0.5f))) * 4u + noise;
}

// Magnitude code 0…7 of |scaled|, which is not NaN.
DFG_HD uint32_t e2m1_nearest(float scaled) {
  return e2m1_nearest_low(smaller(magnitude(scaled), 6.0f)) & 7u;
}

DFG_HD uint32_t e2m1_stochastic(float scaled, uint32_t r) {
  return e2m1_stochastic_top(smaller(magnitude(scaled), 6.0f), 256u * r + kStochasticNoise) >> 24;
}

// Value of a code 0…15.
DFG_HD float e2m1_decode(uint32_t code) {
  // Above 1 the code is a float's exponent and top mantissa bit; 0 and 0.5 are what is left.
  const uint32_t low = code & 7u;
  const uint32_t bits = low < 2u ? low * 0x3F000000u : (low << 22) + (126u << 23);
  return float_of(bits | (code & 8u) << 28);
}

}  // namespace dfg
