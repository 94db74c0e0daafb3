#include "cpu/ghost_conv_direct.h"

#include <algorithm>
#include <type_traits>

#include "cpu/ghost_conv_pack.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr int kTilesOfSquares = 4;  // 4 * 27 terms: within 2^-17 of their sum

std::int64_t pieces_of(std::int64_t n, std::int64_t most) { return (n + most - 1) / most; }

std::int64_t vector_steps(std::int64_t lanes, std::int64_t channels, std::int64_t others) {
  return pieces_of(channels, lanes) * others;
}

bool wants_inputs_last(const Geometry& plan, std::int64_t lanes) {
  const std::int64_t in = plan.in_channels / plan.groups;
  const std::int64_t out = plan.out_channels / plan.groups;
  return vector_steps(lanes, in, out) <= vector_steps(lanes, out, in);
}

std::int64_t lanes_of(Isa isa, bool wide) {
  return tile_limits(isa).bytes / static_cast<int>(wide ? sizeof(double) : sizeof(float));
}

}  // namespace

ConvLayout conv_layout(const Geometry& plan, bool wide) {
  if (wants_inputs_last(plan, lanes_of(isa(), wide))) return ConvLayout::kInputsLast;
  return plan.groups == 1 ? ConvLayout::kOutputsLast : ConvLayout::kPlain;
}

template <class T, class In>
DirectConv<T, In>::DirectConv(const Geometry& plan, ConvLayout layout, std::int64_t longest)
    : plan_(plan),
      isa_(isa()),
      inputs_last_(wants_inputs_last(plan, lanes_of(isa_, sizeof(T) == sizeof(double)))),
      in_(plan.in_channels / plan.groups),
      out_(plan.out_channels / plan.groups),
      taps_(plan.kernel.height * plan.kernel.width) {
  switch (layout) {
    case ConvLayout::kInputsLast:
      out_stride_ = taps_ * in_, tap_stride_ = in_, in_stride_ = 1;
      break;
    case ConvLayout::kOutputsLast:
      in_stride_ = taps_ * out_, tap_stride_ = out_, out_stride_ = 1;
      break;
    case ConvLayout::kPlain:
      out_stride_ = in_ * taps_, in_stride_ = taps_, tap_stride_ = 1;
      break;
  }
  lane_stride_ = inputs_last_ ? in_stride_ : out_stride_;
  plan_sides();
  plan_vectors();
  plan_scalars();
  plan_segments(longest);
  for (const ScalarGroup<T>& ss : scalar_groups_) {
    for (const VectorGroup& vs : vector_groups_) sums_size_ += tile_size(vs, ss);
  }
  sums_size_ *= plan.groups;
  const auto tiles = static_cast<std::int64_t>(scalar_groups_.size() * vector_groups_.size());
  additions_ = plan.groups * (pieces_of(tiles, kTilesOfSquares) * lanes_ + 1);
}

template <class T, class In>
void DirectConv<T, In>::plan_sides() {
  lanes_ = static_cast<int>(lanes_of(isa_, sizeof(T) == sizeof(double)));
  padded_ = {plan_.input.height + 2 * plan_.padding.height,
             plan_.input.width + 2 * plan_.padding.width};
  const std::int64_t positions = plan_.output.height * plan_.output.width;
  const std::int64_t area = padded_.height * padded_.width;
  const std::int64_t row = plan_.stride.height * padded_.width;
  const std::int64_t step = plan_.stride.width;
  pitch_ = pieces_of(inputs_last_ ? in_ : out_, lanes_) * lanes_;
  if (inputs_last_) {
    vector_size_ = area * pitch_;
    scalar_size_ = positions * out_;
    steps_.vector_row = row * pitch_;
    steps_.vector_step = step * pitch_;
    steps_.scalar_row = plan_.output.width;
    steps_.scalar_step = 1;
  } else {
    vector_size_ = positions * pitch_;
    scalar_size_ = area * in_;
    steps_.vector_row = plan_.output.width * pitch_;
    steps_.vector_step = pitch_;
    steps_.scalar_row = row;
    steps_.scalar_step = step;
  }
}

template <class T, class In>
void DirectConv<T, In>::plan_vectors() {
  struct Entry {
    std::int64_t offset;
    std::int64_t target;
    int lanes;
  };
  std::vector<Entry> entries;
  const std::int64_t channels = inputs_last_ ? in_ : out_;
  const std::int64_t kernel_rows = inputs_last_ ? plan_.kernel.height : 1;
  const std::int64_t kernel_columns = inputs_last_ ? plan_.kernel.width : 1;
  for (std::int64_t c = 0; c < channels; c += lanes_) {
    const int used = static_cast<int>(std::min<std::int64_t>(lanes_, channels - c));
    for (std::int64_t y = 0; y < kernel_rows; ++y) {
      for (std::int64_t x = 0; x < kernel_columns; ++x) {
        const std::int64_t position =
            y * plan_.dilation.height * padded_.width + x * plan_.dilation.width;
        const std::int64_t tap = y * kernel_columns + x;
        entries.push_back({position * pitch_ + c, tap * tap_stride_ + c * lane_stride_, used});
      }
    }
  }
  const auto count = static_cast<std::int64_t>(entries.size());
  // Runs of scalars leave room for one vector only.
  const bool has_runs = !inputs_last_ && plan_.kernel.width >= 3 && plan_.dilation.width == 1;
  const std::int64_t groups = pieces_of(count, has_runs ? 1 : kMostVectors);
  for (std::int64_t i = 0; i < groups; ++i) {
    VectorGroup group{};
    for (std::int64_t e = count * i / groups; e < count * (i + 1) / groups; ++e) {
      const Entry& entry = entries[static_cast<std::size_t>(e)];
      group.offset[group.count] = entry.offset;
      group.target[group.count] = entry.target;
      group.lanes[group.count++] = entry.lanes;
    }
    vector_groups_.push_back(group);
  }
}

template <class T, class In>
void DirectConv<T, In>::plan_scalars() {
  struct Entry {
    std::int64_t offset;
    std::int64_t target;
  };
  std::vector<Entry> entries[3];  // by length of run: 1, 3, 5
  if (inputs_last_) {
    const std::int64_t positions = plan_.output.height * plan_.output.width;
    for (std::int64_t o = 0; o < out_; ++o) entries[0].push_back({o * positions, o * out_stride_});
  } else {
    for (std::int64_t row = 0; row < in_ * plan_.kernel.height; ++row) {
      const std::int64_t c = row / plan_.kernel.height;
      const std::int64_t y = row % plan_.kernel.height;
      const std::int64_t start = (c * padded_.height + y * plan_.dilation.height) * padded_.width;
      for (std::int64_t x = 0; x < plan_.kernel.width;) {
        const std::int64_t left = plan_.dilation.width == 1 ? plan_.kernel.width - x : 1;
        const int kind = left == 5 || left >= 8 ? 2 : left >= 3 ? 1 : 0;
        entries[kind].push_back({start + x * plan_.dilation.width,
                                 c * in_stride_ + (y * plan_.kernel.width + x) * tap_stride_});
        x += 2 * kind + 1;
      }
    }
  }
  const TileLimits limits = tile_limits(isa_);
  int vectors = 1;
  for (const VectorGroup& group : vector_groups_) vectors = std::max(vectors, group.count);
  const int most[3] = {limits.scalar_rows[vectors], limits.rows_of_3, limits.rows_of_5};
  for (int kind = 0; kind < 3; ++kind) {
    const auto count = static_cast<std::int64_t>(entries[kind].size());
    const std::int64_t groups = pieces_of(count, most[kind]);
    for (std::int64_t i = 0; i < groups; ++i) {
      ScalarGroup<T> group{};
      group.run = 2 * kind + 1;
      int sums = 0;
      for (std::int64_t e = count * i / groups; e < count * (i + 1) / groups; ++e) {
        const Entry& entry = entries[kind][static_cast<std::size_t>(e)];
        group.offset[group.rows++] = entry.offset;
        for (int r = 0; r < group.run; ++r) group.target[sums++] = entry.target + r * tap_stride_;
      }
      for (int v = 1; v <= vectors; ++v) {
        group.kernels[v - 1] = tile_kernel<T>(isa_, v, group.rows, group.run);
      }
      scalar_groups_.push_back(group);
    }
  }
}

template <class T, class In>
void DirectConv<T, In>::plan_segments(std::int64_t longest) {
  const auto [height, width] = plan_.output;
  if (longest == 0) longest = height * width;
  const std::int64_t rows = std::clamp<std::int64_t>(longest / width, 1, height);
  const std::int64_t parts = pieces_of(height, rows);
  const std::int64_t splits = rows > 1 ? 1 : pieces_of(width, longest);
  for (std::int64_t p = 0; p < parts; ++p) {
    const std::int64_t row = height * p / parts;
    const std::int64_t next = height * (p + 1) / parts;
    for (std::int64_t s = 0; s < splits; ++s) {
      const std::int64_t column = width * s / splits;
      segments_.push_back({row, next - row, column, width * (s + 1) / splits - column});
    }
  }
}

template <class T, class In>
bool DirectConv<T, In>::reads_scalars_in_place() const {
  const bool is_padded = plan_.padding.height > 0 || plan_.padding.width > 0;
  return std::is_same_v<T, In> && (inputs_last_ || !is_padded);
}

// Copies one sample's group where it must be copied; returns where its scalars are.
template <class T, class In>
const T* DirectConv<T, In>::pack(const In* x, const In* g, T scale, std::int64_t group, T* vectors,
                                 T* scalars) const {
  const std::int64_t area = plan_.input.height * plan_.input.width;
  const std::int64_t positions = plan_.output.height * plan_.output.width;
  const Plane inside{plan_.input.height, plan_.input.width,
                     plan_.padding.height * padded_.width + plan_.padding.width, padded_.width};
  const Plane flat{1, positions, 0, positions};
  x += group * in_ * area;
  g += group * out_ * positions;
  if (inputs_last_) {
    channels_last(x, in_, scale, inside, vectors, pitch_);
  } else {
    channels_last(g, out_, scale, flat, vectors, pitch_);
  }
  if constexpr (std::is_same_v<T, In>) {
    if (reads_scalars_in_place()) return inputs_last_ ? g : x;
  }
  if (inputs_last_) {
    planes(g, out_, flat, scalars, positions);
  } else {
    planes(x, in_, inside, scalars, padded_.height * padded_.width);
  }
  return scalars;
}

template <class T, class In>
typename DirectConv<T, In>::Squares DirectConv<T, In>::run(const In* x, const In* g, T* vectors,
                                                           T* scalars, T* gradient) const {
  Squares total{};
  for (std::int64_t i = 0; i < plan_.groups; ++i) {
    const T* const from = pack(x, g, T{1}, i, vectors, scalars);
    T* const to = gradient == nullptr ? nullptr : gradient + i * in_ * out_ * taps_;
    const Squares part = run_group(vectors, from, to);
    total.last += part.last;
    total.all += part.all;
  }
  return total;
}

template <class T, class In>
typename DirectConv<T, In>::Squares DirectConv<T, In>::run_group(const T* vectors, const T* scalars,
                                                                 T* gradient) const {
  alignas(64) T sums[kMostTile * kMostLanes];
  alignas(64) T squares[2][kMostLanes] = {};  // before and at the last spill
  Squares total{};
  const auto drain = [&] {
    for (int lane = 0; lane < kMostLanes; ++lane) {
      total.all += static_cast<double>(squares[0][lane]);
      total.last += static_cast<double>(squares[1][lane]);
      squares[0][lane] = squares[1][lane] = 0;
    }
  };
  TileWalk<T> walk = steps_;
  walk.images = 1;
  walk.sums = sums;
  int tiles = 0;
  // In this order neighbouring tiles write to neighbouring memory.
  for (const ScalarGroup<T>& ss : scalar_groups_) {
    for (const VectorGroup& vs : vector_groups_) {
      const bool whole = lane_stride_ == 1 && vs.lanes[vs.count - 1] == lanes_;
      walk.gradient = whole ? gradient : nullptr;
      walk.vector_target = vs.target;
      walk.scalar_target = ss.target;
      for (std::size_t s = 0; s < segments_.size(); ++s) {
        const Segment& segment = segments_[s];
        const std::int64_t vector =
            segment.row * steps_.vector_row + segment.column * steps_.vector_step;
        const std::int64_t scalar =
            segment.row * steps_.scalar_row + segment.column * steps_.scalar_step;
        for (int v = 0; v < vs.count; ++v) walk.vectors[v] = vectors + vs.offset[v] + vector;
        for (int r = 0; r < ss.rows; ++r) walk.scalars[r] = scalars + ss.offset[r] + scalar;
        walk.rows = segment.rows;
        walk.columns = segment.columns;
        walk.fresh = s == 0;
        walk.squares = squares[s + 1 == segments_.size() ? 1 : 0];
        ss.kernels[vs.count - 1](walk);
      }
      if (++tiles % kTilesOfSquares == 0) drain();
      if (gradient != nullptr && !whole) {
        each_entry(vs, ss,
                   [&](std::int64_t target, std::int64_t i) { gradient[target] = sums[i]; });
      }
    }
  }
  drain();
  total.all += total.last;
  return total;
}

// entry(place in the gradient, index among the sums of the tile)
template <class T, class In>
template <class F>
void DirectConv<T, In>::each_entry(const VectorGroup& vs, const ScalarGroup<T>& ss,
                                   const F& entry) const {
  std::int64_t from = 0;
  for (int v = 0; v < vs.count; ++v) {
    for (int i = 0; i < ss.rows * ss.run; ++i, from += lanes_) {
      const std::int64_t to = vs.target[v] + ss.target[i];
      for (int lane = 0; lane < vs.lanes[v]; ++lane) entry(to + lane * lane_stride_, from + lane);
    }
  }
}

template <class T, class In>
TileWalk<T> DirectConv<T, In>::walk_of(std::int64_t images) const {
  const std::int64_t x_size = plan_.in_channels * plan_.input.height * plan_.input.width;
  const std::int64_t g_size = plan_.out_channels * plan_.output.height * plan_.output.width;
  TileWalk<T> walk = steps_;
  walk.images = images;
  walk.vector_image = vector_size_;
  walk.scalar_image = !reads_scalars_in_place() ? scalar_size_ : inputs_last_ ? g_size : x_size;
  walk.rows = plan_.output.height;
  walk.columns = plan_.output.width;
  return walk;
}

template <class T, class In>
const T* DirectConv<T, In>::pack_samples(const In* x, const In* g, const T* scales,
                                         std::int64_t samples, std::int64_t group, T* vectors,
                                         T* scalars) const {
  const std::int64_t x_size = plan_.in_channels * plan_.input.height * plan_.input.width;
  const std::int64_t g_size = plan_.out_channels * plan_.output.height * plan_.output.width;
  const T* first = nullptr;
  for (std::int64_t i = 0; i < samples; ++i) {
    const T scale = scales == nullptr ? T{1} : scales[i];
    const T* const from = pack(x + i * x_size, g + i * g_size, scale, group,
                               vectors + i * vector_size_, scalars + i * scalar_size_);
    if (i == 0) first = from;
  }
  return first;
}

template <class T, class In>
void DirectConv<T, In>::add(const In* x, const In* g, const T* factors, std::int64_t samples,
                            T* vectors, T* scalars, T* sums) const {
  alignas(64) T squares[kMostLanes] = {};
  TileWalk<T> walk = walk_of(samples);
  walk.squares = squares;
  for (std::int64_t group = 0; group < plan_.groups; ++group) {
    const T* const first = pack_samples(x, g, factors, samples, group, vectors, scalars);
    for (const ScalarGroup<T>& ss : scalar_groups_) {
      for (int r = 0; r < ss.rows; ++r) walk.scalars[r] = first + ss.offset[r];
      for (const VectorGroup& vs : vector_groups_) {
        for (int v = 0; v < vs.count; ++v) walk.vectors[v] = vectors + vs.offset[v];
        walk.sums = sums;
        ss.kernels[vs.count - 1](walk);
        sums += tile_size(vs, ss);
      }
    }
  }
}

template <class T, class In>
void DirectConv<T, In>::add_integers(const In* x, const In* g, const T* factors,
                                     std::int64_t samples, T* vectors, T* scalars,
                                     std::int32_t* sums) const {
  TileWalk<T> walk = walk_of(1);
  for (std::int64_t group = 0; group < plan_.groups; ++group) {
    const T* const first = pack_samples(x, g, nullptr, samples, group, vectors, scalars);
    for (const ScalarGroup<T>& ss : scalar_groups_) {
      for (const VectorGroup& vs : vector_groups_) {
        walk.integers = sums;
        for (std::int64_t i = 0; i < samples; ++i) {
          const std::int64_t scalar = i * walk.scalar_image, vector = i * walk.vector_image;
          for (int r = 0; r < ss.rows; ++r) walk.scalars[r] = first + ss.offset[r] + scalar;
          for (int v = 0; v < vs.count; ++v) walk.vectors[v] = vectors + vs.offset[v] + vector;
          walk.factor = factors[i];
          ss.kernels[vs.count - 1](walk);
        }
        sums += tile_size(vs, ss);
      }
    }
  }
}

template <class T, class In>
template <class S>
void DirectConv<T, In>::finish(const std::vector<S*>& sums, int threads, S* total) const {
  const auto parts = static_cast<std::int64_t>(scalar_groups_.size());
  std::vector<std::int64_t> starts(scalar_groups_.size() + 1);
  for (std::size_t i = 0; i < scalar_groups_.size(); ++i) {
    starts[i + 1] = starts[i];
    for (const VectorGroup& vs : vector_groups_) starts[i + 1] += tile_size(vs, scalar_groups_[i]);
  }
  parallel_for(plan_.groups * parts, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin; part < end; ++part) {
      const auto s = static_cast<std::size_t>(part % parts);
      const std::int64_t group = part / parts;
      std::int64_t start = group * starts.back() + starts[s];
      S* const to = total + group * in_ * out_ * taps_;
      for (const VectorGroup& vs : vector_groups_) {
        for (const S* own : sums) {
          each_entry(vs, scalar_groups_[s],
                     [&](std::int64_t target, std::int64_t i) { to[target] += own[start + i]; });
        }
        start += tile_size(vs, scalar_groups_[s]);
      }
    }
  });
}

template class DirectConv<float, float>;
template class DirectConv<double, double>;
template class DirectConv<double, float>;
template void DirectConv<float, float>::finish(const std::vector<float*>&, int, float*) const;
template void DirectConv<double, double>::finish(const std::vector<double*>&, int, double*) const;
template void DirectConv<float, float>::finish(const std::vector<std::int32_t*>&, int,
                                               std::int32_t*) const;
template void DirectConv<double, double>::finish(const std::vector<std::int32_t*>&, int,
                                                 std::int32_t*) const;

}  // namespace dpkern::cpu
