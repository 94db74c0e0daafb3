#pragma once
// The inner loop of every convolution kernel: a tile of sums of products held in registers.

#include <cstdint>

#include "cpu/isa.h"

namespace dpkern::cpu {

constexpr int kMostVectors = 3;
constexpr int kMostScalarRows = 9;
constexpr int kMostTile = 27;   // vectors of sums in a tile
constexpr int kMostLanes = 16;  // lanes of a vector

// Walks images x rows x columns positions. At each one the vectors are multiplied by scalar_rows x
// run scalars (`run` neighbours from each row) and added to vectors * scalar_rows * run vectors of
// sums; sum (v, r, c) has index (v scalar_rows + r) run + c.
template <class T>
struct TileWalk {
  const T* vectors[kMostVectors];
  const T* scalars[kMostScalarRows];
  std::int64_t images;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t vector_image;  // steps in entries
  std::int64_t vector_row;
  std::int64_t vector_step;
  std::int64_t scalar_image;
  std::int64_t scalar_row;
  std::int64_t scalar_step;
  bool fresh;                         // the sums start from zero
  T* sums;                            // [index][lane]
  T* squares;                         // [lane], += the squares of the new sums
  T* gradient;                        // null, or where the sums go instead: sum (v, i) to
  const std::int64_t* vector_target;  // gradient + vector_target[v] + scalar_target[i]
  const std::int64_t* scalar_target;
  std::int32_t*
      integers;  // null, or [index][lane], += trunc(factor sum): then nothing else is left
  T factor;
};

template <class T>
using TileKernel = void (*)(const TileWalk<T>&);

// The tile that fits the registers of an instruction set.
struct TileLimits {
  int bytes;           // of a vector
  int scalar_rows[4];  // most of them for 1, 2 and 3 vectors (run 1)
  int rows_of_3;       // most rows with runs of 3 or 5, one vector
  int rows_of_5;
};

TileLimits tile_limits(Isa isa);

// `run` is 1, 3 or 5; more than one vector only with run 1.
template <class T>
TileKernel<T> tile_kernel(Isa isa, int vectors, int scalar_rows, int run);

}  // namespace dpkern::cpu
