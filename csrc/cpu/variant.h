// Which instruction set the kernels run with.
#pragma once

#include "tiles.h"

namespace dfg {

// The best that this processor has; DIST_FINEGRAIN_CPU (generic, avx2, avx512), read once, picks
// another. Throws std::runtime_error where the processor lacks it or the name is unknown.
const Variant& variant();

}  // namespace dfg
