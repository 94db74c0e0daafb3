#pragma once
// What the tests of emulated CUDA kernels share.

#include <string>

#include "check.h"
#include "cuda/launch.h"
#include "cuda_runtime.h"

namespace dpkern::test {

std::int64_t test_emulator();
std::int64_t test_cuda_coef();
std::int64_t test_cuda_noise();
std::int64_t test_cuda_update();
std::int64_t test_cuda_rows();
std::int64_t test_cuda_symbols();

inline void check_launch(cuda::Error error, const std::string& what) {
  check(error == 0, what + ": " + cuda::error_text(error));
}

// body(name) with the threads of a block run forward and in reverse.
template <class F>
void in_both_orders(const F& body) {
  for (const bool reverse : {false, true}) {
    emulator::order(reverse);
    body(reverse ? std::string(" [reverse]") : std::string(" [forward]"));
  }
  emulator::order(false);
}

}  // namespace dpkern::test
