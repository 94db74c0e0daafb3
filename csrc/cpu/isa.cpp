#include "cpu/isa.h"

#include <atomic>

namespace dpkern::cpu {
namespace {

Isa detect() {
#if DPK_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) {
    if (!__builtin_cpu_supports("avx512vnni")) return Isa::kAvx512;
    return __builtin_cpu_supports("avx512vbmi") ? Isa::kAvx512Vbmi : Isa::kAvx512Vnni;
  }
  if (__builtin_cpu_supports("x86-64-v3")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{detect()};
  return isa;
}

}  // namespace

Isa detected_isa() {
  static const Isa best = detect();
  return best;
}

Isa isa() { return current().load(std::memory_order_relaxed); }

bool use_isa(Isa wanted) {
  if (wanted < Isa::kBaseline || wanted > detected_isa()) return false;
  current().store(wanted, std::memory_order_relaxed);
  return true;
}

bool is_intel() {
#if DPK_X86
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace dpkern::cpu
