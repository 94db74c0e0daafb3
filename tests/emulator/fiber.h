#pragma once
// Switching between stacks: ucontext, or on x86-64 a few instructions, because ucontext asks the
// kernel for the signal mask at every switch.

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if defined(__x86_64__)

namespace emulator {

struct Context {
  void* stack;  // where the registers that a function must preserve were pushed
};

// Goes on in `to`; returns when something switches to `from`.
__attribute__((naked, noinline)) inline void switch_to(Context& /*from*/, Context& /*to*/) {
  asm("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
      "movq %rsp, (%rdi)\n\tmovq (%rsi), %rsp\n\t"
      "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}

// The first switch to the context calls `entry`, which never returns.
inline void prepare(Context& context, char* stack, std::size_t size, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, size);  // what the last user of this stack has left
#endif
  constexpr int kRegisters = 6;
  const std::uintptr_t top = reinterpret_cast<std::uintptr_t>(stack + size) / 16 * 16;
  void** at = reinterpret_cast<void**>(top) - 1;  // as if called: 8 below a multiple of 16
  *at = nullptr;
  *--at = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kRegisters; ++i) *--at = nullptr;
  context.stack = at;
}

}  // namespace emulator

#else

#include <ucontext.h>

namespace emulator {

typedef ucontext_t Context;

inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }

inline void prepare(Context& context, char* stack, std::size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

}  // namespace emulator

#endif
