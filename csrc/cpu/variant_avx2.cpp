// The kernels for AVX2 (x86-64-v3).
// Standard headers come first: nothing of theirs may be compiled for an instruction set that the
// linker could then use everywhere.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi2")
#endif

#define DFG_VARIANT avx2
#include "stream_kernels.h"
#include "tile_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dfg {

const Variant& avx2_variant() {
  static const Variant variant = {"avx2", avx2::cast_tiles, avx2::measure_tiles, avx2::amax_pieces,
                                  avx2::decode_rows};
  return variant;
}

}  // namespace dfg

#endif
