// The polynomial loss with the hidden layer in its coefficients. A record's H^2 coefficients of a
// class are made a few rows at a time, in the first-level cache, and used at once.

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/coef_noise.h"
#include "cpu/isa.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 16 * kTile;  // coefficients worth a thread
constexpr int kLanes = kLossLanes;

std::int64_t whole_lanes(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// `count` numbers in whole lanes, the rest zeros: terms that are +0 or -0 change no sum from +0.
template <class T>
class Padded {
 public:
  explicit Padded(std::int64_t count) : numbers_(static_cast<std::size_t>(whole_lanes(count))) {}
  T* data() { return numbers_.data(); }
  const T* data() const { return numbers_.data(); }

 private:
  std::vector<T> numbers_;
};

// Everything of one loss that does not change from record to record.
template <class T>
struct Problem {
  const CoefNoise& noise;
  std::uint64_t quadratic;  // position of the noise of the first quadratic coefficient
  std::int64_t classes;
  std::int64_t width;
  std::int64_t stride;    // of a row of `weights`: whole lanes
  const double* weights;  // wide, padded
};

template <class T, class Bits>
void add_noise(T* values, const Lattice<T>& lattice, const NoiseWindow::Part<Bits>& part,
               int count) {
  versioned([&]() DPK_INLINE {
    T* const x = values;
    const Lattice<T> grid = lattice;
    const auto from = part;
    const int n = count;
    for (int i = 0; i < n; ++i) {
      const std::uint32_t bits = static_cast<std::make_unsigned_t<Bits>>(from.rounding[i]);
      x[i] = noised_coefficient(x[i], grid.per_unit, grid.cell, bits, from.draws[i]);
    }
  });
}

// The noise of `count` coefficients from `position` on.
template <class T>
void add_noise(const CoefNoise& noise, NoiseWindow& window, const Lattice<T>& lattice,
               std::uint64_t position, std::int64_t count, T* values) {
  if (!noise.on) return;
  for_tiles(position, 0, count, [&](const TilePart& part) {
    const std::uint64_t at = position + static_cast<std::uint64_t>(part.index);
    if (noise.draws.rounding != nullptr) {
      add_noise(values + part.index, lattice, window.at<std::int16_t>(at, part.count), part.count);
    } else {
      add_noise(values + part.index, lattice, window.at<std::uint32_t>(at, part.count), part.count);
    }
  });
}

// A thread's scratch memory, and its results for one record after the other.
template <class T>
class Records {
 public:
  explicit Records(const Problem<T>& problem)
      : problem_(problem),
        linear_noise_(problem.noise),
        quadratic_noise_(problem.noise),
        rows_at_once_(std::max<std::int64_t>(1, kTile / std::max<std::int64_t>(1, problem.width))),
        hidden_(problem.width),
        eighths_(problem.width),
        linear_(problem.width),
        quadratic_(rows_at_once_ * problem.width + kLanes),
        row_sums_(problem.width),
        column_sums_(problem.width),
        by_hidden_(problem.width) {}

  // Loss and derivative by the hidden layer of record `record`; that by the weights is added to
  // `by_weights` [classes, stride].
  void evaluate(std::int64_t record, const T* hidden, const T* targets, double* loss,
                double* by_weights, T* dhidden) {
    const Problem<T>& p = problem_;
    const Lattice<T> lattice(p.noise.on ? scale_of(p.noise, record) : 1.0);
    T* const h = hidden_.data();
    T* const eighths = eighths_.data();
    for (std::int64_t e = 0; e < p.width; ++e) {
      h[e] = hidden[e];
      eighths[e] = eighth_of(hidden[e]);
    }
    std::fill_n(by_hidden_.data(), p.stride, 0.0);
    double total = 0;
    for (std::int64_t label = 0; label < p.classes; ++label) {
      const std::int64_t pair = record * p.classes + label;
      const T factor = linear_coefficient(targets[label]);
      make_linear(pair, factor, lattice);
      sum_quadratic(pair, p.weights + label * p.stride, lattice);
      total += finish(factor, p.weights + label * p.stride, by_weights + label * p.stride);
    }
    *loss = total;
    for (std::int64_t e = 0; e < p.width; ++e) dhidden[e] = static_cast<T>(by_hidden_.data()[e]);
  }

 private:
  void make_linear(std::int64_t pair, T factor, const Lattice<T>& lattice) {
    const std::int64_t width = problem_.width;
    for (std::int64_t e = 0; e < width; ++e) linear_.data()[e] = factor * hidden_.data()[e];
    const auto before = static_cast<std::uint64_t>(pair * width);
    add_noise(problem_.noise, linear_noise_, lattice, problem_.noise.linear + before, width,
              linear_.data());
  }

  // a2 W, its rows' sums, and a2^T W, its columns'.
  void sum_quadratic(std::int64_t pair, const double* weights, const Lattice<T>& lattice) {
    const std::int64_t width = problem_.width;
    std::fill_n(column_sums_.data(), problem_.stride, 0.0);
    for (std::int64_t row = 0; row < width; row += rows_at_once_) {
      const std::int64_t rows = std::min(rows_at_once_, width - row);
      make_rows(row, rows);
      const auto before = static_cast<std::uint64_t>((pair * width + row) * width);
      add_noise(problem_.noise, quadratic_noise_, lattice, problem_.quadratic + before,
                rows * width, quadratic_.data());
      use_rows(row, rows, weights);
    }
  }

  // Without noise. A row's last lanes reach into the next one, which is made after it.
  void make_rows(std::int64_t first, std::int64_t rows) {
    versioned([&]() DPK_INLINE {
      const std::int64_t width = problem_.width, stride = problem_.stride;
      const T* const eighths = eighths_.data();
      for (std::int64_t r = 0; r < rows; ++r) {
        const T h = hidden_.data()[first + r];
        T* const to = quadratic_.data() + r * width;
        for (std::int64_t g = 0; g < stride; g += kLanes) {
          for (int l = 0; l < kLanes; ++l) to[g + l] = h * eighths[g + l];
        }
      }
    });
  }

  void use_rows(std::int64_t first, std::int64_t rows, const double* weights) {
    versioned([&]() DPK_INLINE {
      const std::int64_t width = problem_.width, stride = problem_.stride;
      const double* const w = weights;
      double* const columns = column_sums_.data();
      for (std::int64_t r = 0; r < rows; ++r) {
        const T* const a2 = quadratic_.data() + r * width;
        const double of_row = w[first + r];
        alignas(64) double lanes[kLanes] = {};
        for (std::int64_t g = 0; g < stride; g += kLanes) {
          const std::int64_t left = width - g;
          for (int l = 0; l < kLanes; ++l) {
            const double a = l < left ? static_cast<double>(a2[g + l]) : 0.0;
            lanes[l] += a * w[g + l];
            columns[g + l] += a * of_row;
          }
        }
        row_sums_.data()[first + r] = sum_of_lanes(lanes);
      }
    });
  }

  // The loss of one class, from the sums; its slopes join those by the weights and the hidden
  // layer.
  double finish(T factor, const double* weights, double* by_weights) {
    double loss = 0;
    versioned([&]() DPK_INLINE {
      const std::int64_t stride = problem_.stride;
      const double* const w = weights;
      double* const sums = by_weights;
      double* const slopes = by_hidden_.data();
      const T *const a1 = linear_.data(), *const h = hidden_.data();
      const double *const rows = row_sums_.data(), *const columns = column_sums_.data();
      alignas(64) double terms[kLanes] = {}, scores[kLanes] = {};
      for (std::int64_t e = 0; e < stride; e += kLanes) {
        for (int l = 0; l < kLanes; ++l) {
          const std::int64_t i = e + l;
          const double linear = static_cast<double>(a1[i]) + rows[i];
          terms[l] += w[i] * linear;
          scores[l] += static_cast<double>(h[i]) * w[i];
          sums[i] += linear + columns[i];
        }
      }
      loss = sum_of_lanes(terms);
      const double slope = score_slope(static_cast<double>(factor), sum_of_lanes(scores));
      for (std::int64_t i = 0; i < stride; ++i) slopes[i] += w[i] * slope;
    });
    return loss;
  }

  const Problem<T>& problem_;
  NoiseWindow linear_noise_;
  NoiseWindow quadratic_noise_;
  std::int64_t rows_at_once_;
  Padded<T> hidden_;
  Padded<T> eighths_;
  Padded<T> linear_;
  Padded<T> quadratic_;
  Padded<double> row_sums_;
  Padded<double> column_sums_;
  Padded<double> by_hidden_;
};

}  // namespace

// The loss of M classes with the hidden layer in its coefficients: (1/2 - y_l) h and h h^T / 8 of
// each record and class l.
template <class T>
void expanded(const Expanded<T>& call, int threads) {
  const std::int64_t records = call.B, classes = call.M, width = call.H;
  const std::int64_t stride = whole_lanes(width), numbers = classes * stride;
  Padded<double> wide(numbers);
  for (std::int64_t label = 0; label < classes; ++label) {
    std::copy_n(call.weights + label * width, width, wide.data() + label * stride);
  }
  const std::uint64_t behind = quadratic_position(call.noise, records * classes * width);
  const Problem<T> problem{call.noise, behind, classes, width, stride, wide.data()};
  const std::int64_t runs = (records + kRecordRun - 1) / kRecordRun;
  Padded<double> of_runs(runs * numbers);
  const std::int64_t each = std::max<std::int64_t>(1, kRecordRun * classes * width * width);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / each);
  parallel_for(runs, grain, threads, [&](std::int64_t first, std::int64_t last) {
    Records<T> own(problem);
    for (std::int64_t i = first * kRecordRun; i < std::min(last * kRecordRun, records); ++i) {
      own.evaluate(i, call.hidden + i * width, call.targets + i * classes, call.loss + i,
                   of_runs.data() + i / kRecordRun * numbers, call.dhidden + i * width);
    }
  });
  Padded<double> total(numbers);
  for (std::int64_t run = 0; run < runs; ++run) {
    for (std::int64_t i = 0; i < numbers; ++i) total.data()[i] += of_runs.data()[run * numbers + i];
  }
  for (std::int64_t label = 0; label < classes; ++label) {
    for (std::int64_t e = 0; e < width; ++e) {
      call.dweights[label * width + e] = static_cast<T>(total.data()[label * stride + e]);
    }
  }
}

template void expanded(const Expanded<float>&, int);
template void expanded(const Expanded<double>&, int);

}  // namespace dpkern::cpu
