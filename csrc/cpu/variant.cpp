#include "variant.h"

#include <cstdlib>
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

const Variant& choose() {
  const char* wanted = std::getenv("DIST_FINEGRAIN_CPU");
  const std::string name = wanted == nullptr ? "" : wanted;
#if defined(__x86_64__)
  if (has_avx512() && (name.empty() || name == "avx512")) return avx512_variant();
  if (has_avx2() && (name.empty() || name == "avx2")) return avx2_variant();
#endif
  if (name.empty() || name == "generic") return generic_variant();
  throw std::runtime_error("DIST_FINEGRAIN_CPU is \"" + name +
                           "\"; accepted on this processor: " + "generic" +
                           (has_avx2() ? ", avx2" : "") + (has_avx512() ? ", avx512" : "") +
                           ", e.g. DIST_FINEGRAIN_CPU=generic, or leave it unset");
}

}  // namespace

const Variant& variant() {
  static const Variant& chosen = choose();
  return chosen;
}

const char* cpu_variant() { return variant().name; }

}  // namespace dfg
