// The kernels for AVX-512 F, BW, DQ, VL (Skylake-SP and later, Zen 4 and later).
// Standard headers come first: nothing of theirs may be compiled for an instruction set that the
// linker could then use everywhere.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,prefer-vector-width=512")
#endif

#define DFG_VARIANT avx512
#include "stream_kernels.h"
#include "tile_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dfg {

const Variant& avx512_variant() {
  static const Variant variant = {"avx512", avx512::cast_tiles, avx512::measure_tiles,
                                  avx512::amax_pieces, avx512::decode_rows};
  return variant;
}

}  // namespace dfg

#endif
