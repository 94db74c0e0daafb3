// The kernels over odd sizes, offsets, chunkings, thread counts and instruction sets, meant to run
// under -fsanitize=address,undefined (`make sanitize`). Plain scalar code here is the oracle.

#include <cstdio>

#include "check.h"

int main() {
  using namespace dpkern;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int best = static_cast<int>(cpu::detected_isa());
  test::check(!cpu::use_isa(static_cast<cpu::Isa>(best + 1)), "an absent instruction set");
  test::check(!cpu::use_isa(static_cast<cpu::Isa>(-1)), "a negative instruction set");
  std::printf("instruction sets 0..%d\n", best);
  std::printf("noise  %lld cases\n", static_cast<long long>(test::test_noise()));
  std::printf("clip   %lld cases\n", static_cast<long long>(test::test_clip()));
  std::printf("coef   %lld cases\n", static_cast<long long>(test::test_coef()));
  std::printf("update %lld cases\n", static_cast<long long>(test::test_update()));
  std::printf("project %lld cases\n", static_cast<long long>(test::test_project()));
  std::printf("symbols %lld cases\n", static_cast<long long>(test::test_symbols()));
  std::printf("recurrent %lld cases\n", static_cast<long long>(test::test_recurrent()));
  std::printf("counted %lld cases\n", static_cast<long long>(test::test_counted()));
  std::printf("ghost  %lld cases (dense)\n", static_cast<long long>(test::test_ghost_dense()));
  std::printf("ghost  %lld cases (convolutions)\n",
              static_cast<long long>(test::test_ghost_conv()));
  std::printf("spectral %lld cases\n", static_cast<long long>(test::test_spectral()));
  std::printf("emulated CUDA %lld cases (the emulator)\n",
              static_cast<long long>(test::test_emulator()));
  return 0;
}
