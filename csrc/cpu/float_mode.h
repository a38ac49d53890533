// IEEE arithmetic for the life of an object: subnormals kept, nearest-even; restored afterwards.
// torch.set_flush_denormal(True) and other libraries change both per thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dfg {

class SubnormalsKept {
 public:
  SubnormalsKept() : saved_(read()) { write(saved_ & ~kMask); }
  ~SubnormalsKept() { write(saved_); }
  SubnormalsKept(const SubnormalsKept&) = delete;
  SubnormalsKept& operator=(const SubnormalsKept&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kMask = 0xE040u;  // flush to zero, rounding control, DAZ
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kMask = 0x01C00000u;  // flush to zero, rounding mode
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = uint32_t;
  static constexpr Register kMask = 0;
  static Register read() { return 0; }
  static void write(Register) {}
#endif

  Register saved_;
};

}  // namespace dfg
