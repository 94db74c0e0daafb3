#pragma once
// The lattice of a certified noise scale: unit u = scale / 2^20, output cell g = scale / 64.

#include "core/layouts.h"
#include "core/numeric.h"

namespace dpkern {

// 1 / u rounded down: scaled sensitivities can only shrink.
template <class T>
DPK_HD T per_unit_of(double scale) {
  const double exact = static_cast<double>(kScaleUnits) / scale;
  const T near = static_cast<T>(exact);
  constexpr T kBelow = T{1} - (sizeof(T) == 4 ? T{0x1p-24} : static_cast<T>(0x1p-53));
  return static_cast<double>(near) > exact ? near * kBelow : near;  // the number below
}

template <class T>
DPK_HD T cell_of(double scale) {
  return static_cast<T>(scale / 64);
}

}  // namespace dpkern
