// Arithmetic that means the same on host and device: one IEEE binary32 operation per call.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DFG_HD __host__ __device__ __forceinline__
#define DFG_UNROLL _Pragma("unroll")
#elif defined(__clang__)
#define DFG_HD inline __attribute__((always_inline))
#define DFG_UNROLL _Pragma("unroll")
#else
#define DFG_HD inline __attribute__((always_inline))
#define DFG_UNROLL _Pragma("GCC unroll 16")
#endif

namespace dfg {

constexpr float kFltMax = 3.4028234663852886e38f;
constexpr uint32_t kExponentMask = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;

DFG_HD uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

DFG_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// The _rn intrinsics are never contracted; the host is compiled with -ffp-contract=off.
DFG_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

DFG_HD float sub(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

DFG_HD float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

DFG_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

DFG_HD float reciprocal(float a) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

// 1 / a of a power of two from 2^-126 to 2^127.
DFG_HD float power_of_two_reciprocal(float a) {
  const uint32_t exponent = 254u - (bits_of(a) >> 23);
  return float_of(exponent == 0 ? 0x00400000u : exponent << 23);
}

// a·b + c where a·b is exact: one rounding whether fused or not.
DFG_HD float add_exact_product(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// Neither argument is NaN or negative, so that they compare as their bits do: the host compiler
// makes a branch of a comparison of floats, and then does not vectorise.
DFG_HD float smaller(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return float_of(bits_of(a) < bits_of(b) ? bits_of(a) : bits_of(b));
#endif
}

DFG_HD float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return float_of(bits_of(a) > bits_of(b) ? bits_of(a) : bits_of(b));
#endif
}

// condition ? a : b with both sides computed: the host compiler would move arithmetic that only one
// side needs into a branch, and then does not vectorise.
DFG_HD uint32_t select(bool condition, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return condition ? a : b;
#else
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
#endif
}

// One instruction on a GPU. None is above 2^31.
DFG_HD uint32_t smallest(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  return __vimin3_u32(a, b, c);
#else
  // Signed ones are what every instruction set has.
  const auto x = static_cast<int32_t>(a), y = static_cast<int32_t>(b), z = static_cast<int32_t>(c);
  const int32_t least = x < y ? x : y;
  return static_cast<uint32_t>(least < z ? least : z);
#endif
}

DFG_HD float magnitude(float a) { return float_of(bits_of(a) & 0x7FFFFFFFu); }
DFG_HD bool is_finite(float a) { return (bits_of(a) & kExponentMask) != kExponentMask; }
DFG_HD bool is_nan(float a) { return (bits_of(a) & 0x7FFFFFFFu) > kExponentMask; }

DFG_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace dfg
