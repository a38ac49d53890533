// Randomized Hadamard transform of 16 values along the contraction.
#pragma once

#include "common.h"

namespace dfg {

// Bit k set: element k is negated first.
constexpr uint32_t kHadamardSigns = 0xD7E8u;

template <int kDistance>
DFG_HD void hadamard_butterflies(float (&u)[16]) {
  DFG_UNROLL
  for (int k = 0; k < 16; ++k) {
    if ((k & kDistance) == 0) {
      const float a = u[k], b = u[k + kDistance];
      u[k] = add(a, b);
      u[k + kDistance] = sub(a, b);
    }
  }
}

// The first butterflies and the quarter at once. A quarter of a BF16 value is exact, and so are the
// quarters of sums of 16 of them; but where such a sum overflows, its quarter need not.
DFG_HD void hadamard_quartered_butterflies(float (&u)[16]) {
  DFG_UNROLL
  for (int k = 0; k < 16; k += 2) {
    const float a = u[k], b = mul(u[k + 1], 0.25f);
    u[k] = add_exact_product(a, 0.25f, b);
    u[k + 1] = add_exact_product(a, 0.25f, -b);
  }
}

// Of BF16 values, in place: as hadamard16 does where every result is below kHadamardSafe, and some
// result is above it where not.
constexpr uint32_t kHadamardSafe = 252u << 23;  // 2^125, FP32 bits
DFG_HD void hadamard16_of_bf16(float (&u)[16]) {
  hadamard_quartered_butterflies(u);
  hadamard_butterflies<2>(u);
  hadamard_butterflies<4>(u);
  hadamard_butterflies<8>(u);
}

// In place: signs, four butterflies for h = 1, 2, 4, 8, then a quarter.
DFG_HD void hadamard16(float (&u)[16], bool with_signs) {
  DFG_UNROLL
  for (int k = 0; k < 16; ++k) {
    const uint32_t flip = (with_signs && (kHadamardSigns >> k & 1u)) ? 0x80000000u : 0u;
    u[k] = float_of(bits_of(u[k]) ^ flip);
  }
  // A host compiler does not unroll a loop over distances early enough to vectorise around it.
  hadamard_butterflies<1>(u);
  hadamard_butterflies<2>(u);
  hadamard_butterflies<4>(u);
  hadamard_butterflies<8>(u);
  DFG_UNROLL
  for (int k = 0; k < 16; ++k) u[k] = mul(u[k], 0.25f);
}

}  // namespace dfg
