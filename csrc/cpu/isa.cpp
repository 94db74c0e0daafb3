#include "cpu/isa.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace dpkern::cpu {
namespace {

#if DPK_X86
// Whether the processor has tiles for products of bytes and of bfloat16, and the kernel lets this
// process use them: their registers are 8 KiB that it saves for each thread.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
  constexpr long kRequest = 0x1023, kTileData = 18;             // ARCH_REQ_XCOMP_PERM
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kNeeded) != kNeeded) return false;
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Isa detect() {
#if DPK_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) {
    if (!__builtin_cpu_supports("avx512vnni")) return Isa::kAvx512;
    if (!__builtin_cpu_supports("avx512vbmi")) return Isa::kAvx512Vnni;
    return has_amx() ? Isa::kAmx : Isa::kAvx512Vbmi;
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
