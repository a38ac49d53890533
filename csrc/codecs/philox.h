// Philox4x32-10 and the content hash that stochastic rounding draws its bits from.
//
//   key = (seed, stream)    counter = (j >> 3, i, step, h)    i plane row, j contraction index
//   r of element j = 16 bits: word (j >> 1) & 3, its half j & 1
#pragma once

#include "common.h"

namespace dfg {

struct Words {
  uint32_t word[4];
};

// Both halves of a 64-bit product. (ptxas adds zeros to those of the plain expression.)
DFG_HD void multiply(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
#if defined(__CUDA_ARCH__)
  asm("{ .reg .b64 p; mul.wide.u32 p, %2, %3; mov.b64 {%1, %0}, p; }"
      : "=r"(high), "=r"(low)
      : "r"(a), "r"(b));
#else
  const uint64_t product = static_cast<uint64_t>(a) * b;
  high = static_cast<uint32_t>(product >> 32);
  low = static_cast<uint32_t>(product);
#endif
}

DFG_HD Words philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                        uint32_t k1) {
  DFG_UNROLL
  for (int round = 0; round < 10; ++round) {
    uint32_t high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// 9E3779B1^(k+1) mod 2^32: what element k of a group of 16 is multiplied by in the content hash.
DFG_HD uint32_t hash_factor(int k) {
  constexpr uint32_t kFactors[16] = {
      0x9E3779B1u, 0xFFE6CC61u, 0xCC042811u, 0x1F76BCC1u, 0x8BC6BA71u, 0x5ECD5121u,
      0x6364B0D1u, 0x4B180981u, 0xF0D38B31u, 0xA49465E1u, 0xB018C991u, 0x448FE641u,
      0x0149EBF1u, 0x43680AA1u, 0x6E8C7251u, 0x5E8A5301u,
  };
  return kFactors[k];
}

}  // namespace dfg
