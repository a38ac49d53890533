// The CPU side of kernels.h. No torch header: the bindings lend torch's threads.
#pragma once

#include <functional>
#include <string>

#include "../kernels.h"

namespace dfg {

// run(count, body): body(begin, end) over pieces that cover [0, count), on several threads.
using ParallelFor = std::function<void(int64_t, const std::function<void(int64_t, int64_t)>&)>;

void cast_cpu(const CastArgs& args, const ParallelFor& run);
void measure_cpu(const MeasureArgs& args, const ParallelFor& run);
void decode_cpu(const DecodeArgs& args, const ParallelFor& run);
void update_delayed_cpu(const DelayedSlot* slots, int64_t count);

// The instruction set that the kernels run with: "avx512", "avx2" or "generic".
const char* cpu_variant();

// Makes later calls run with another one, "" with the best; for tests. Throws std::runtime_error
// where the processor lacks it or the name is unknown.
void choose_cpu_variant(const std::string& name);

}  // namespace dfg
