#pragma once
// CUDA kernels on the CPU, for tests: the sources of csrc/cuda compile with a C++ compiler that
// finds this header instead of CUDA's. Each CUDA thread is a fiber. Blocks run one after another;
// the fibers of a block run in turn between barriers, in forward, reverse or random order, so that
// a missing barrier changes results. Threads that wait at different barriers are an error. Blocks
// run in random order with the threads; shared memory, which is static here and would keep what the
// last block left, can be filled with ones before every block, where floats are NaN. Not modelled:
// races between blocks, the memory model, occupancy, the order of streams.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fiber.h"

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned int x, y, z;
  dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;

namespace emulator {

constexpr int kWarp = 32;

enum class State { kReady, kBlockBarrier, kWarpBarrier, kDone };

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  State state;
  dim3 index;
  int thread;
  int exchanges;  // how many this thread has taken part in
};

// What the lanes of a warp hand to each other; two sets, because a lane may be one exchange ahead.
struct Warp {
  std::uint64_t slots[2][kWarp];
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Context scheduler;
  Fiber* running = nullptr;
  dim3 grid, block, block_index;
  void (*call)(void*) = nullptr;
  void* kernel = nullptr;
  bool reverse = false;
  std::uint64_t random = 0;  // state of the generator; 0: nothing is random
  std::vector<std::pair<char*, std::size_t>> shared;  // memory to fill before every block
  std::int64_t launches = 0;
  cudaError_t next_error = cudaSuccess;  // what the next launch reports instead of running
  cudaError_t last_error = cudaSuccess;
};

inline Machine& machine() {
  static Machine m;
  return m;
}

// The numbers [0, n) in the order in which threads or blocks run.
inline std::vector<std::size_t> order_of(Machine& m, std::size_t n) {
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = m.reverse ? n - 1 - i : i;
  for (std::size_t i = n; m.random != 0 && i > 1; --i) {
    m.random ^= m.random << 13;  // xorshift64
    m.random ^= m.random >> 7;
    m.random ^= m.random << 17;
    std::swap(order[i - 1], order[m.random % i]);
  }
  return order;
}

inline const dim3& thread_index() { return machine().running->index; }

inline void enter() {
  Machine& m = machine();
  m.call(m.kernel);
  m.running->state = State::kDone;
  switch_to(m.running->context, m.scheduler);
}

inline void wait_in(State state) {
  Machine& m = machine();
  m.running->state = state;
  switch_to(m.running->context, m.scheduler);
}

// All lanes of the warp meet and see each other's values.
template <class T>
T exchange(T value, int from) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  Machine& m = machine();
  Fiber& self = *m.running;
  std::uint64_t* const slots =
      m.warps[static_cast<std::size_t>(self.thread / kWarp)].slots[self.exchanges++ & 1];
  std::memcpy(slots + self.thread % kWarp, &value, sizeof(T));
  wait_in(State::kWarpBarrier);
  T other;
  std::memcpy(&other, slots + (from & (kWarp - 1)), sizeof(T));
  return other;
}

inline void resume(Fiber& fiber) {
  Machine& m = machine();
  m.running = &fiber;
  fiber.state = State::kReady;
  switch_to(m.scheduler, fiber.context);
  m.running = nullptr;
}

// Whether all fibers of [begin, end) wait at `barrier`; then they may go on.
inline bool release(Machine& m, std::size_t begin, std::size_t end, State barrier) {
  for (std::size_t i = begin; i < end; ++i) {
    if (m.fibers[i].state != barrier) return false;
  }
  for (std::size_t i = begin; i < end; ++i) m.fibers[i].state = State::kReady;
  return true;
}

inline void run_block(Machine& m) {
  constexpr std::size_t kStack = 64 * 1024;
  const std::size_t threads = m.block.x * m.block.y * m.block.z;
  if (m.fibers.size() != threads) m.fibers = std::vector<Fiber>(threads);
  m.warps.resize((threads + kWarp - 1) / kWarp);
  for (std::size_t i = 0; i < threads; ++i) {
    Fiber& fiber = m.fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    prepare(fiber.context, fiber.stack.get(), kStack, enter);
    const unsigned int t = static_cast<unsigned int>(i);
    fiber.index = dim3(t % m.block.x, t / m.block.x % m.block.y, t / (m.block.x * m.block.y));
    fiber.thread = static_cast<int>(i);
    fiber.exchanges = 0;
    fiber.state = State::kReady;
  }
  for (const auto& [begin, size] : m.shared) std::memset(begin, 0xff, size);
  for (;;) {
    for (const std::size_t i : order_of(m, threads)) {
      Fiber& fiber = m.fibers[i];
      if (fiber.state == State::kReady) resume(fiber);
    }
    bool moved = release(m, 0, threads, State::kBlockBarrier);
    for (std::size_t first = 0; first < threads; first += kWarp) {
      const std::size_t end = first + kWarp < threads ? first + kWarp : threads;
      moved |= release(m, first, end, State::kWarpBarrier);
    }
    if (moved) continue;
    for (const Fiber& fiber : m.fibers) {
      if (fiber.state == State::kDone) continue;
      throw std::logic_error("thread " + std::to_string(fiber.thread) +
                             " waits at a barrier that others of its block never reach");
    }
    return;
  }
}

template <class Body>
void call_body(void* body) {
  (*static_cast<Body*>(body))();
}

template <class Body>
cudaError_t launch(dim3 grid, dim3 block, Body body) {
  constexpr unsigned int kMostThreads = 1024, kMostBlocks = 0x7fffffff;
  Machine& m = machine();
  m.launches += 1;
  m.last_error = std::exchange(m.next_error, cudaSuccess);
  if (m.last_error != cudaSuccess) return m.last_error;
  const unsigned int threads = block.x * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || grid.x == 0 || grid.x > kMostBlocks) {
    return m.last_error = 9;  // cudaErrorInvalidConfiguration
  }
  m.grid = grid;
  m.block = block;
  m.call = &call_body<Body>;
  m.kernel = &body;
  const auto run = [&](std::size_t i) {
    const unsigned int place = static_cast<unsigned int>(i);
    m.block_index = dim3(place % grid.x, place / grid.x % grid.y, place / grid.x / grid.y);
    run_block(m);
  };
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  if (m.random == 0) {
    for (std::size_t i = 0; i < blocks; ++i) run(i);
  } else {
    for (const std::size_t i : order_of(m, blocks)) run(i);
  }
  return cudaSuccess;
}

// Arguments by their addresses, as CUDA takes them.
template <class... Parameters, std::size_t... i>
std::tuple<Parameters...> arguments_of(void** addresses, std::index_sequence<i...>) {
  std::tuple<Parameters...> values;
  (std::memcpy(static_cast<void*>(&std::get<i>(values)), addresses[i], sizeof(Parameters)), ...);
  return values;
}

// Later launches run the threads of a block from the last to the first.
inline void order(bool reverse) { machine().reverse = reverse; }
// Later launches run blocks, and the threads of a block, in random order; 0: they no longer do.
inline void shuffle(std::uint64_t seed) { machine().random = seed; }
// Later launches fill this memory before every block.
inline void poison(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& regions) {
  machine().shared.clear();
  for (const auto& [begin, size] : regions) {
    machine().shared.emplace_back(reinterpret_cast<char*>(begin), static_cast<std::size_t>(size));
  }
}
// The next launch fails with this error.
inline void fail_next(cudaError_t error) { machine().next_error = error; }

}  // namespace emulator

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::machine().block_index)
#define blockDim (::emulator::machine().block)
#define gridDim (::emulator::machine().grid)

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** addresses,
                             std::size_t, cudaStream_t) {
  const auto arguments =
      ::emulator::arguments_of<Parameters...>(addresses, std::index_sequence_for<Parameters...>());
  return ::emulator::launch(grid, block, [&] { std::apply(kernel, arguments); });
}

inline void __syncthreads() { ::emulator::wait_in(::emulator::State::kBlockBarrier); }
inline void __syncwarp(unsigned int = ~0u) { ::emulator::exchange(0, 0); }

inline int lane_of_this_thread() { return ::emulator::machine().running->thread % 32; }
template <class T>
T __shfl_sync(unsigned int, T value, int from) {
  return ::emulator::exchange(value, from);
}
template <class T>
T __shfl_xor_sync(unsigned int, T value, int mask) {
  return ::emulator::exchange(value, lane_of_this_thread() ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned int, T value, int delta) {
  const int lane = lane_of_this_thread();
  return ::emulator::exchange(value, lane + delta < 32 ? lane + delta : lane);
}

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline float __uint_as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline std::uint32_t __float_as_uint(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline std::uint64_t bits_of_double(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline int __double2loint(double x) { return static_cast<int>(bits_of_double(x) & 0xffffffffu); }
inline int __double2hiint(double x) { return static_cast<int>(bits_of_double(x) >> 32); }
inline double __hiloint2double(int high, int low) {
  const std::uint64_t bits = static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
                             static_cast<std::uint32_t>(low);
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T>
T atomicAdd(T* to, T x) {
  T before;
  std::memcpy(&before, to, sizeof(T));
  const T after = static_cast<T>(before + x);
  std::memcpy(static_cast<void*>(to), &after, sizeof(T));
  return before;
}

inline cudaError_t cudaGetLastError() {
  return std::exchange(::emulator::machine().last_error, cudaSuccess);
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "emulated error";
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int numRegs;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
