// The emulator itself: that kernels see their indices and each other, and that it finds mistakes.

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "cuda_runtime.h"

namespace dpkern::test {

namespace {

// body(name) with the threads of a block run forward and in reverse.
template <class F>
void in_both_orders(const F& body) {
  for (const bool reverse : {false, true}) {
    emulator::order(reverse);
    body(reverse ? std::string(" [reverse]") : std::string(" [forward]"));
  }
  emulator::order(false);
}

// Arguments in the types of the kernel's parameters.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), unsigned int grid, unsigned int block,
                   Parameters... arguments) {
  void* addresses[] = {static_cast<void*>(&arguments)...};
  return cudaLaunchKernel(kernel, dim3(grid), dim3(block), addresses, 0, nullptr);
}

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

// out[block] = what the last block has left in shared memory, which lies at `place`.
__global__ void stale_kernel(int* out, std::pair<std::uint64_t, std::uint64_t>* place) {
  __shared__ int left;
  *place = {reinterpret_cast<std::uint64_t>(&left), sizeof(left)};
  out[blockIdx.x] = left;
  left = 7;
}

__global__ void divergent_kernel(unsigned int waiting) {
  if (threadIdx.x < waiting) __syncthreads();
}

}  // namespace

std::int64_t test_emulator() {
  std::vector<int> forward, backward;
  launch(index_kernel, 2, 3, &forward);
  emulator::order(true);
  launch(index_kernel, 2, 3, &backward);
  emulator::order(false);
  check_same(forward, {0, 1, 2, 3, 4, 5}, "indices forward");
  check_same(backward, {2, 1, 0, 5, 4, 3}, "indices in reverse");

  std::vector<int> want;
  for (int i = 0; i < kThreads; ++i) want.push_back(100 + (i + 1) % kThreads);
  int wrong_orders = 0;
  in_both_orders([&](const std::string& order) {
    std::vector<int> out(kThreads);
    launch(shift_kernel, 1, kThreads, out.data(), true);
    check_same(out, want, "shared memory" + order);
    launch(shift_kernel, 1, kThreads, out.data(), false);
    wrong_orders += out == want ? 0 : 1;

    std::vector<std::int64_t> sums(kThreads);
    launch(shuffle_kernel, 1, kThreads, sums.data());
    for (int i = 0; i < kThreads; ++i) {
      const int lane = i % 32, first = i - lane;
      const std::int64_t sum = 31 * 16 + 32 * first;
      const int below = lane + 5 < 32 ? i + 5 : i;
      check(sums[static_cast<std::size_t>(i)] == 1000 * sum + below, "exchanges" + order);
    }
  });
  check(wrong_orders > 0, "a missing barrier shows in one of the orders");

  std::vector<int> first, second;
  emulator::shuffle(3);
  launch(index_kernel, 2, 3, &first);
  launch(index_kernel, 2, 3, &second);
  std::vector<int> out(kThreads);
  launch(shift_kernel, 1, kThreads, out.data(), true);
  check_same(out, want, "shared memory in random order");
  launch(shift_kernel, 1, kThreads, out.data(), false);
  check(out != want, "a missing barrier shows in random order");
  emulator::shuffle(0);
  check(first != second, "every random order is another one");
  std::sort(first.begin(), first.end());
  check_same(first, forward, "random order leaves no thread out");

  std::pair<std::uint64_t, std::uint64_t> place;
  std::vector<int> seen(2);
  launch(stale_kernel, 2, 1, seen.data(), &place);
  check(seen[1] == 7, "shared memory is kept");
  emulator::poison({place});
  launch(stale_kernel, 2, 1, seen.data(), &place);
  check(seen[0] == -1 && seen[1] == -1, "shared memory is filled before every block");
  emulator::poison({});

  bool thrown = false;
  try {
    launch(divergent_kernel, 1, kThreads, 5u);
  } catch (const std::logic_error&) {
    thrown = true;
  }
  check(thrown, "a barrier that some threads never reach");

  emulator::fail_next(2);
  launch(index_kernel, 1, 1, &forward);
  check(forward.size() == 6 && cudaGetLastError() == 2, "a launch that fails runs nothing");
  launch(index_kernel, 1, 2000, &forward);
  check(forward.size() == 6 && cudaGetLastError() != 0, "a block of too many threads");
  check(cudaGetLastError() == 0, "an error is told once");
  return 13;
}

}  // namespace dpkern::test
