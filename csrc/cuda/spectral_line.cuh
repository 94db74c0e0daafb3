#pragma once
// Transforms of lines of n = n1 n2 values, in two levels of small products: with j = n2 a + b and
// k = k1 + n1 m,
//
//   X(k) = sum_b exp(-2 pi i m b / n2) exp(-2 pi i k1 b / n) Y_b(k1)
//   Y_b(k1) = sum_a exp(-2 pi i k1 a / n1) x(n2 a + b)
//
// A thread has a tile of sums, of one line and several frequencies or of several lines and one. All
// of them take their products in parts, as rounding grows with the longest sum (docs/spectral.md).

#include "cuda/block.cuh"

namespace dpkern::cuda {

// p - i q.
template <class T>
struct alignas(2 * sizeof(T)) Phasor {
  T p, q;
  __device__ __forceinline__ void add(Phasor x) { p += x.p, q += x.q; }
  // Add x, turned by the angle whose cosine and sine `turn` has.
  __device__ __forceinline__ void add_turned(Phasor turn, Phasor x) {
    p = fused(turn.p, x.p, fused(-turn.q, x.q, p));
    q = fused(turn.p, x.q, fused(turn.q, x.p, q));
  }
  __device__ __forceinline__ void add_turned(Phasor turn, T x) {
    p = fused(turn.p, x, p);
    q = fused(turn.q, x, q);
  }
  __device__ __forceinline__ Phasor turned(Phasor turn) const {
    return {fused(turn.p, p, -turn.q * q), fused(turn.p, q, turn.q * p)};
  }
};

template <class T>
struct SpectralTile {
  static constexpr int kCount = sizeof(T) == 4 ? kSpectralTile : kSpectralTileWide;
  static constexpr int kRoom = kCount * kSpectralLongThreads;  // sums of a block
  typedef Phasor<T> Sums[kCount];

  // add(t, part) for all terms t < terms, of two products each in either part of a sum.
  template <class Add>
  __device__ __forceinline__ static void add_terms(int terms, Sums& sums, const Add& add) {
    constexpr int kEach = kSpectralPart / 2;
    DPK_NO_UNROLL
    for (int first = 0; first < terms; first += kEach) {
      Sums part = {};
      const int end = first + kEach < terms ? first + kEach : terms;
      DPK_NO_UNROLL
      for (int t = first; t < end; ++t) add(t, part);
      DPK_UNROLL
      for (int i = 0; i < kCount; ++i) sums[i].add(part[i]);
    }
  }
};

// The tables of a line.
template <class T>
struct SpectralLevels {
  const Phasor<T>*first, *phases, *second;
  int n1, n2, count;
  int pitch;  // of `first`
  int step;   // numbers between two k1 behind the first level

  __device__ __forceinline__ explicit SpectralLevels(const SpectralLine& line)
      : first(static_cast<const Phasor<T>*>(line.first)),
        phases(static_cast<const Phasor<T>*>(line.phases)),
        second(static_cast<const Phasor<T>*>(line.second)),
        n1(line.n1),
        n2(line.n2),
        count(line.count),
        pitch((line.n1 + kSpectralTile - 1) / kSpectralTile * kSpectralTile),
        step(line.n2 + (line.n2 % 4 == 0)) {}  // or lanes would meet in banks of shared memory
  // Values of the sequence b of the first level.
  __device__ __forceinline__ int terms(int b) const { return (count - b + n2 - 1) / n2; }
  __device__ __forceinline__ Phasor<T> phase(int k1, int b) const { return phases[k1 * n2 + b]; }
};

}  // namespace dpkern::cuda
