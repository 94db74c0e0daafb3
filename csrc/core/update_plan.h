#pragma once
// What the update is asked for, on the host and on devices.

#include "core/abi.h"

namespace dpkern {

enum class RuleKind : int { kSgd = 0, kAdam = 1 };
enum class SumType : int { kInt32 = 0, kInt64 = 1, kFloat = 2 };  // kFloat: the parameters' type
enum class NoisedType : int { kInt32 = 0, kInt64 = 1, kFloat = 2, kDouble = 3 };

// The optimizer, as torch.optim defines it; numbers that depend on the step count are ready-made.
struct Rule {
  RuleKind kind;
  double lr;
  double weight_decay;
  bool decoupled;  // AdamW: the decay multiplies the parameter instead of joining the gradient
  // SGD
  double momentum;
  double dampening;
  bool nesterov;
  bool first_step;  // the momentum buffer starts as the gradient itself
  // Adam
  double beta1;
  double beta2;
  double eps;
  double bias1;  // 1 - beta1^t
  double bias2;  // 1 - beta2^t
};

enum class RuleForm : std::int32_t { kPlain = 0, kMomentum = 1, kNesterov = 2, kAdam = 3 };

// The rule as one element needs it (core/optimizer.h), in float64.
struct RuleNumbers {
  RuleForm form;
  std::int32_t first_step;  // the momentum buffer starts as the gradient itself
  double lr;
  double decay;     // joins the gradient
  double momentum;  // SGD
  double fresh;     // 1 - dampening
  double shrink;    // Adam: the decoupled decay
  double fresh1;    // 1 - beta1
  double keep2;     // beta2
  double fresh2;    // 1 - beta2
  double eps;
  double root2;  // sqrt(1 - beta2^t)
  double step;   // lr / (1 - beta1^t)
};

// Devices read lists of tensors from a table in their own memory: one parameter tensor.
struct UpdateTask {
  void* param;
  const void* sum;
  void* state1;  // momentum buffer or first moment, or null
  void* state2;  // second moment, or null
  std::int64_t size;
  std::uint64_t first_position;  // of its noise; element i stands at first_position + i
  std::int64_t first_piece;      // of all tasks before this one
  std::int64_t draws_at;         // where its first draw stands; only with draws made ahead
  double per_unit;               // 1 / u, float sums with noise only
  double step;  // what takes a sum, or a released count, to the gradient: with noise, the cell too
  std::int64_t aligned16;  // whether every array that this task touches begins at 16 bytes
};

enum class NoiseSource : std::int32_t { kNone = 0, kStream = 1, kDraws = 2 };

// A piece is a noise tile that the tensor touches (kStream), or kUpdatePiece elements (else).
constexpr std::int64_t kUpdatePiece = 2048;

// The step count in device memory, so that a recorded graph of launches makes fresh noise.
struct UpdateClock {
  std::uint64_t step;  // joins n1 of both streams; Adam's t is step + 1
  double beta1_power;  // beta1^t
  double beta2_power;
};

struct UpdatePlan {
  RuleNumbers rule;
  Stream stream;
  Stream rounding;                     // only read for float sums
  const std::int32_t* draws;           // made ahead (kDraws)
  const std::uint16_t* rounding_bits;  // made ahead, float sums only
  const UpdateClock* clock;            // or null
  std::int64_t tasks;
  std::int64_t pieces;
  NoiseSource noise;
  Distribution law;
  SumType sum_type;
  std::int32_t wide;  // parameters, states and float sums are double
};

}  // namespace dpkern
