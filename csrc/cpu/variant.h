// Which instruction set the kernels run with.
#pragma once

#include "tiles.h"

namespace dfg {

// The best that this processor has, or what choose_cpu_variant (kernels.h) named.
const Variant& variant();

}  // namespace dfg
