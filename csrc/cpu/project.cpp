// Parameters, read as one vector, moved to the nearest point of a ball or a simplex, in place.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kPiece = 1 << 14;  // entries of a partial sum: threads change no bit
constexpr std::int64_t kGrain = 4;        // pieces worth a thread

template <class F>
struct Part {
  F* values;
  std::int64_t size;
};

template <class F>
std::vector<Part<F>> parts_of(const std::vector<F*>& values,
                              const std::vector<std::int64_t>& sizes) {
  std::vector<Part<F>> parts;
  for (std::size_t i = 0; i < values.size(); ++i) parts.push_back({values[i], sizes[i]});
  return parts;
}

template <class F>
double square_of(const Part<F>& part, int threads) {
  const std::int64_t pieces = (part.size + kPiece - 1) / kPiece;
  std::vector<double> sums(static_cast<std::size_t>(pieces));
  parallel_for(pieces, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t first = piece * kPiece;
      sums[static_cast<std::size_t>(piece)] =
          power_sum(part.values + first, std::min(kPiece, part.size - first), 2);
    }
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// values = body(values), in float64 between.
template <class F, class Body>
void each(const std::vector<Part<F>>& parts, int threads, const Body& body) {
  for (const Part<F>& part : parts) {
    parallel_for(part.size, kGrain * kPiece, threads, [&](std::int64_t begin, std::int64_t end) {
      versioned([&]() DPK_INLINE {
        F* const values = part.values;
        const std::int64_t last = end;
        const Body apply = body;
        for (std::int64_t i = begin; i < last; ++i) {
          values[i] = static_cast<F>(apply(static_cast<double>(values[i])));
        }
      });
    });
  }
}

// The largest entry; NaN if any is.
template <class F>
double most_of(const std::vector<Part<F>>& parts) {
  double most = -std::numeric_limits<double>::infinity();
  for (const Part<F>& part : parts) {
    versioned([&]() DPK_INLINE {
      const F* const values = part.values;
      const std::int64_t size = part.size;
      F largest = -std::numeric_limits<F>::infinity();
      int bad = 0;
      for (std::int64_t i = 0; i < size; ++i) {
        largest = values[i] > largest ? values[i] : largest;
        bad |= values[i] != values[i];
      }
      most = bad != 0 || static_cast<double>(largest) > most ? static_cast<double>(largest) : most;
      if (bad != 0) most = std::numeric_limits<double>::quiet_NaN();
    });
    if (std::isnan(most)) return most;
  }
  return most;
}

// Entries above t, moved to the front; returns how many.
template <class F>
std::int64_t keep_above(const F* from, std::int64_t size, double t, double* to) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const double x = static_cast<double>(from[i]);
    to[count] = x;
    count += x > t ? 1 : 0;
  }
  return count;
}

// Newton's method from below on sum max(x - t, 0) = total, which is convex: t only rises, and every
// round but the last drops an entry. Michelot 1986.
template <class F>
double threshold_of(const std::vector<Part<F>>& parts, double total) {
  // With t = max - total the largest alone gives the total.
  double t = most_of(parts) - total;
  if (!std::isfinite(t)) return t;
  std::int64_t size = 0;
  for (const Part<F>& part : parts) size += part.size;
  std::vector<double> above(static_cast<std::size_t>(size) + 1);
  std::int64_t count = 0;
  for (const Part<F>& part : parts) {
    count += keep_above(part.values, part.size, t, above.data() + count);
  }
  for (;;) {
    double excess = 0;
    for (std::int64_t i = 0; i < count; ++i) excess += above[static_cast<std::size_t>(i)] - t;
    if (count > 0) t += (excess - total) / static_cast<double>(count);
    const std::int64_t left = keep_above(above.data(), count, t, above.data());
    if (left == count || left == 0) return t;
    count = left;
  }
}

}  // namespace

// x min(1, radius / ||x||), the norm and the product in float64; inside, nothing is written.
template <class F>
void project_ball(const ProjectBall<F>& call, int threads) {
  const std::vector<Part<F>> parts = parts_of<F>(call.params, call.S);
  double square = 0;
  for (const Part<F>& part : parts) square += square_of(part, threads);
  const double norm = std::sqrt(square);
  if (norm <= call.radius) return;
  const double factor = call.radius / norm;
  each(parts, threads, [=](double x) DPK_INLINE { return x * factor; });
}

// max(x - t, 0) with the t for which they add to `total`.
template <class F>
void project_simplex(const ProjectSimplex<F>& call, int threads) {
  const std::vector<Part<F>> parts = parts_of<F>(call.params, call.S);
  const double t = threshold_of(parts, call.total);
  // In this order NaN stays.
  each(parts, threads, [=](double x) DPK_INLINE { return x - t < 0 ? 0.0 : x - t; });
}

template void project_ball<float>(const ProjectBall<float>&, int);
template void project_ball<double>(const ProjectBall<double>&, int);
template void project_simplex<float>(const ProjectSimplex<float>&, int);
template void project_simplex<double>(const ProjectSimplex<double>&, int);

}  // namespace dpkern::cpu
