#pragma once
// What the calls of a replayed step (replay.cpp) are to the uses that feed them (uses.cpp).

#include <cstddef>
#include <cstdint>

namespace dpkern::bindings {

class Taker {
 public:
  // Operands of a layer have arrived, both contiguous.
  virtual void take(std::size_t index, std::uintptr_t input, std::uintptr_t gradient) = 0;

 protected:
  ~Taker() = default;
};

}  // namespace dpkern::bindings
