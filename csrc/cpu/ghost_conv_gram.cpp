#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/ghost_conv.h"
#include "cpu/ghost_conv_pack.h"
#include "cpu/ghost_conv_tile.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {

template <class T>
void conv_gram_norm(const ConvPlan& plan, const T* x, const T* g, double* squares, int threads) {
  conv_norm(plan, x, g, squares, threads);
}

template void conv_gram_norm(const ConvPlan&, const float*, const float*, double*, int);
template void conv_gram_norm(const ConvPlan&, const double*, const double*, double*, int);

}  // namespace dpkern::cpu
