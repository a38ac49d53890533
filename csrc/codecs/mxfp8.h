// MXFP8: one E8M0 byte per 32 elements (or 32×32).
//
//   byte = E8M0 of amax · (1 / fp8_max), rounded up      code = cast(x · 2^(127 − byte))
#pragma once

#include "common.h"

namespace dfg {

// 1/448 and 1/57344, rounded to FP32.
DFG_HD float fp8_max_reciprocal(bool e5m2) { return float_of(e5m2 ? 0x37924925u : 0x3B124925u); }

// E8M0 byte of a finite block amax, at most 254.
DFG_HD uint8_t mxfp8_scale_byte(float amax, bool e5m2) {
  const uint32_t bits = bits_of(mul(amax, fp8_max_reciprocal(e5m2)));
  const uint32_t rounded_up = (bits + 0x007FFFFFu) >> 23;  // carries unless the mantissa is zero
  return static_cast<uint8_t>(bits <= 0x00400000u ? 0u : rounded_up);
}

// 2^(byte − 127); 0 is 2^-127, 255 is NaN.
DFG_HD float e8m0_decode(uint8_t byte) {
  const uint32_t bits = static_cast<uint32_t>(byte) << 23;
  return float_of(byte == 0 ? 0x00400000u : byte == 255 ? kNanBits : bits);
}

// 2^(127 − byte): what a block is multiplied by.
DFG_HD float mxfp8_multiplier(uint8_t byte) {
  return e8m0_decode(static_cast<uint8_t>(254u - byte));
}

}  // namespace dfg
