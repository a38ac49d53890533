#include "variant.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace dfg {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

// "": the best that this processor has.
const Variant& find(const std::string& name) {
#if defined(__x86_64__)
  if (has_avx512() && (name.empty() || name == "avx512")) return avx512_variant();
  if (has_avx2() && (name.empty() || name == "avx2")) return avx2_variant();
#endif
  if (name.empty() || name == "generic") return generic_variant();
  throw std::runtime_error("name is \"" + name + "\"; accepted on this processor: generic" +
                           (has_avx2() ? ", avx2" : "") + (has_avx512() ? ", avx512" : "") +
                           ", or \"\" for the best of these, e.g. choose_cpu_variant(\"generic\")");
}

std::atomic<const Variant*> chosen{nullptr};

}  // namespace

const Variant& variant() {
  const Variant* held = chosen.load(std::memory_order_relaxed);
  if (held == nullptr) {
    held = &find("");
    chosen.store(held, std::memory_order_relaxed);
  }
  return *held;
}

void choose_cpu_variant(const std::string& name) {
  chosen.store(&find(name), std::memory_order_relaxed);
}

const char* cpu_variant() { return variant().name; }

}  // namespace dfg
