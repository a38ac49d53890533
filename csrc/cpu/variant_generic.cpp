// The kernels for any processor.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#define DFG_VARIANT generic
#include "stream_kernels.h"
#include "tile_kernels.h"

namespace dfg {

const Variant& generic_variant() {
  static const Variant variant = {"generic", generic::cast_tiles, generic::measure_tiles,
                                  generic::amax_pieces, generic::decode_rows};
  return variant;
}

}  // namespace dfg
