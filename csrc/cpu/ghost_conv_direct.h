#pragma once
// The direct way through one sample: its gradient, tile after tile.

#include <cstdint>
#include <vector>

#include "cpu/ghost_conv.h"
#include "cpu/ghost_conv_tile.h"

namespace dpkern::cpu {

// Lanes are neighbouring channels of one side, which is transposed to channels-last; numbers of the
// other side are broadcast.
struct VectorGroup {
  int count;
  std::int64_t offset[kMostVectors];  // in the transposed side
  std::int64_t target[kMostVectors];  // in the sample's gradient
  int lanes[kMostVectors];            // in use
};

template <class T>
struct ScalarGroup {
  int rows;
  int run;
  std::int64_t offset[kMostScalarRows];
  std::int64_t target[kMostTile];
  TileKernel<T> kernels[kMostVectors];  // for 1, 2, 3 vectors
};

// Output positions between two spills of the sums from registers.
struct Segment {
  std::int64_t row;
  std::int64_t rows;
  std::int64_t column;
  std::int64_t columns;
};

// T computes, In is the type of the inputs. Scratches are zero at first and stay its own.
template <class T, class In>
class DirectConv {
 public:
  // Sums are spilled after at most `longest` positions (rows are split evenly); 0: never.
  DirectConv(const Geometry& plan, ConvLayout layout, std::int64_t longest);

  const std::vector<Segment>& segments() const { return segments_; }
  std::int64_t vector_size() const { return vector_size_; }  // entries of scratch for a sample
  std::int64_t scalar_size() const { return scalar_size_; }
  std::int64_t sums_size() const { return sums_size_; }

  // Sums in float64, for the squares of one sample.
  std::int64_t additions() const { return additions_; }

  struct Squares {
    double last;  // of the gradient
    double all;   // of the sums after every spill
  };
  // `gradient` of this sample, or null.
  Squares run(const In* x, const In* g, T* vectors, T* scalars, T* gradient) const;

  // sums += the weighted gradients of `samples` samples, with scratches one behind the other and
  // without segments.
  void add(const In* x, const In* g, const T* factors, std::int64_t samples, T* vectors, T* scalars,
           T* sums) const;
  // sums += trunc(factor gradient) of each of these samples, in the same order of entries.
  void add_integers(const In* x, const In* g, const T* factors, std::int64_t samples, T* vectors,
                    T* scalars, std::int32_t* sums) const;
  // total += the sums of all threads, one tile of each group of scalars after the other.
  template <class S>
  void finish(const std::vector<S*>& sums, int threads, S* total) const;

 private:
  void plan_sides();
  void plan_vectors();
  void plan_scalars();
  void plan_segments(std::int64_t longest);
  const T* pack(const In* x, const In* g, T scale, std::int64_t group, T* vectors,
                T* scalars) const;
  bool reads_scalars_in_place() const;
  // Packs a group of these samples behind each other; returns where their scalars begin.
  const T* pack_samples(const In* x, const In* g, const T* scales, std::int64_t samples,
                        std::int64_t group, T* vectors, T* scalars) const;
  // A walk over the output of `images` samples that were packed behind each other.
  TileWalk<T> walk_of(std::int64_t images) const;
  Squares run_group(const T* vectors, const T* scalars, T* gradient) const;
  std::int64_t tile_size(const VectorGroup& vs, const ScalarGroup<T>& ss) const {
    return static_cast<std::int64_t>(vs.count) * ss.rows * ss.run * lanes_;
  }
  template <class F>
  void each_entry(const VectorGroup& vs, const ScalarGroup<T>& ss, const F& entry) const;

  const Geometry plan_;
  const Isa isa_;
  const bool inputs_last_;
  const std::int64_t in_;  // channels of a group
  const std::int64_t out_;
  const std::int64_t taps_;
  std::int64_t in_stride_ = 0;  // in the gradient
  std::int64_t out_stride_ = 0;
  std::int64_t tap_stride_ = 0;
  std::int64_t lane_stride_ = 0;
  int lanes_ = 0;
  ConvSize padded_{};
  std::int64_t pitch_ = 0;  // of a position in the transposed side
  std::int64_t vector_size_ = 0;
  std::int64_t scalar_size_ = 0;
  std::int64_t sums_size_ = 0;
  std::int64_t additions_ = 0;
  TileWalk<T> steps_{};
  std::vector<VectorGroup> vector_groups_;
  std::vector<ScalarGroup<T>> scalar_groups_;
  std::vector<Segment> segments_;
};

// conv_norm of some samples with sums in float64.
template <class In>
void conv_wide_norm(const Geometry& plan, const In* x, const In* g, double* squares,
                    const std::vector<std::int64_t>& samples, int threads);

}  // namespace dpkern::cpu
