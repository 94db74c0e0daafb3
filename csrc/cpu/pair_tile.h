#pragma once
// Tiles of exact products of 16-bit integers, two in a lane: each instruction multiplies and adds
// two of them, twice as many as a float product of the same width.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/isa.h"
#include "cpu/panels.h"

namespace dpkern::cpu {

// Entry by entry, sum += the products of the low and of the high halves of x and y.
template <int kBytes, bool kVnni, class V>
DPK_INLINE inline void add_pairs(V& sum, V x, V y) {
  // The compiler would keep the sums in memory.
#if DPK_X86
  [[maybe_unused]] V product;
  if constexpr (kVnni) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  } else if constexpr (kBytes == 64) {
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(x), "v"(y));
  } else if constexpr (kBytes == 32) {
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(x), "x"(y));
  } else {
    asm("movdqa %2, %1\n\tpmaddwd %3, %1\n\tpaddd %1, %0"
        : "+x"(sum), "=&x"(product)
        : "x"(x), "x"(y));
  }
#else
  sum += (x >> 16) * (y >> 16) + ((x << 16) >> 16) * ((y << 16) >> 16);
#endif
}

// A tile of sums over pairs of products.
template <int kBytes, bool kVnni, int kHeight = kBytes == 64 ? 12 : 6>
struct PairTile {
  static constexpr int kLanes = kBytes / 4;
  static constexpr int kRows = kHeight;
  static constexpr int kVectors = 2;
  static constexpr int kColumns = kVectors * kLanes;
  using V = Vector<std::int32_t, kLanes>;

  V at[kRows][kVectors];

  // Of kRows pairs from `g` on and kColumns from `a` on; those of the next row are `tall`, `wide`
  // further on.
  DPK_INLINE void multiply(const std::int32_t* g, std::int64_t tall, const std::int32_t* a,
                           std::int64_t wide, std::int64_t rows) {
    multiply(g, tall, a, wide, rows, std::make_integer_sequence<int, kRows * kVectors>{});
  }

 private:
  // Written out for the compiler, which keeps sums in memory that it finds in loops.
  template <int... i>
  DPK_INLINE void multiply(const std::int32_t* g, std::int64_t tall, const std::int32_t* a,
                           std::int64_t wide, std::int64_t rows, std::integer_sequence<int, i...>) {
    V sums[] = {(static_cast<void>(i), V{})...};
    for (std::int64_t k = 0; k < rows; ++k, g += tall, a += wide) {
      const V x[kVectors] = {ghost::load<V>(a), ghost::load<V>(a + kLanes)};
      (add_pairs<kBytes, kVnni>(sums[i], V{} + g[i / kVectors], x[i % kVectors]), ...);
    }
    ((at[i / kVectors][i % kVectors] = sums[i]), ...);
  }
};

// Two rows of 16-bit integers, filled up with zeros -> side by side, as one row of each panel.
template <int kWidth>
DPK_INLINE inline void pack_pair(const std::int16_t* low, const std::int16_t* high,
                                 std::int64_t count, std::int64_t size, std::int32_t* to) {
  for (std::int64_t c = 0; c < count; c += kWidth) {
    for (int i = 0; i < kWidth; ++i) {
      const auto x = static_cast<std::uint16_t>(low[c + i]);
      const auto y = static_cast<std::uint32_t>(static_cast<std::uint16_t>(high[c + i]));
      to[i] = static_cast<std::int32_t>(y << 16 | x);
    }
    to += size;
  }
}

#if DPK_X86
template <class Body>
DPK_VNNI void call_vnni(const Body& body) {
  body();
}
#endif

// body(width, vnni), both integral constants, for the instruction set in use.
template <class Body>
void versioned_by_pairs(const Body& body) {
#if DPK_X86
  if (isa() >= Isa::kAvx512Vnni) {
    return call_vnni([&]() DPK_INLINE { body(Width<64>{}, std::true_type{}); });
  }
#endif
  versioned_by_width([&](auto width) DPK_INLINE { body(width, std::false_type{}); });
}

}  // namespace dpkern::cpu
