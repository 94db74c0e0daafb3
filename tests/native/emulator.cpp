// The emulator itself: that kernels see their indices and each other, and that it finds mistakes.

#include <stdexcept>

#include "cuda.h"

namespace dpkern::test {
namespace {

constexpr int kThreads = 64;

__global__ void index_kernel(std::vector<int>* seen) {
  seen->push_back(static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
}

// out[i] = the value of the neighbour, through shared memory, with or without the barrier.
__global__ void shift_kernel(int* out, bool barrier) {
  __shared__ int room[kThreads];
  const unsigned int i = threadIdx.x;
  room[i] = static_cast<int>(100 + i);
  if (barrier) __syncthreads();
  out[i] = room[(i + 1) % kThreads];
  if (barrier) __syncthreads();
  room[i] = -1;
}

__global__ void shuffle_kernel(std::int64_t* out) {
  const int i = static_cast<int>(threadIdx.x);
  std::int64_t sum = i;
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  out[i] = 1000 * __shfl_sync(0xffffffffu, sum, 3) + __shfl_down_sync(0xffffffffu, sum * 0 + i, 5);
}

__global__ void divergent_kernel(unsigned int waiting) {
  if (threadIdx.x < waiting) __syncthreads();
}

}  // namespace

std::int64_t test_emulator() {
  std::vector<int> forward, backward;
  DPK_LAUNCH(index_kernel, 2, 3, nullptr, &forward);
  emulator::order(true);
  DPK_LAUNCH_FLAT(index_kernel, 2, 3, nullptr, &backward);
  emulator::order(false);
  check_same(forward, {0, 1, 2, 3, 4, 5}, "indices forward");
  check_same(backward, {2, 1, 0, 5, 4, 3}, "indices in reverse");

  std::vector<int> want;
  for (int i = 0; i < kThreads; ++i) want.push_back(100 + (i + 1) % kThreads);
  int wrong_orders = 0;
  in_both_orders([&](const std::string& order) {
    std::vector<int> out(kThreads);
    DPK_LAUNCH(shift_kernel, 1, kThreads, nullptr, out.data(), true);
    check_same(out, want, "shared memory" + order);
    DPK_LAUNCH(shift_kernel, 1, kThreads, nullptr, out.data(), false);
    wrong_orders += out == want ? 0 : 1;

    std::vector<std::int64_t> sums(kThreads);
    DPK_LAUNCH(shuffle_kernel, 1, kThreads, nullptr, sums.data());
    for (int i = 0; i < kThreads; ++i) {
      const int lane = i % 32, first = i - lane;
      const std::int64_t sum = 31 * 16 + 32 * first;
      const int below = lane + 5 < 32 ? i + 5 : i;
      check(sums[static_cast<std::size_t>(i)] == 1000 * sum + below, "exchanges" + order);
    }
  });
  check(wrong_orders > 0, "a missing barrier shows in one of the orders");

  bool thrown = false;
  try {
    DPK_LAUNCH(divergent_kernel, 1, kThreads, nullptr, 5u);
  } catch (const std::logic_error&) {
    thrown = true;
  }
  check(thrown, "a barrier that some threads never reach");

  emulator::fail_next(2);
  DPK_LAUNCH_FLAT(index_kernel, 1, 1, nullptr, &forward);
  check(forward.size() == 6 && cudaGetLastError() == 2, "a launch that fails runs nothing");
  DPK_LAUNCH_FLAT(index_kernel, 1, 2000, nullptr, &forward);
  check(forward.size() == 6 && cudaGetLastError() != 0, "a block of too many threads");
  check(cudaGetLastError() == 0, "an error is told once");
  return 8;
}

}  // namespace dpkern::test
