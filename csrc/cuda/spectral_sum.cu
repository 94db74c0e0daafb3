// Weighted sums over samples, from the retained bins of both operands.

#include "cuda/block.cuh"

namespace dpkern::cuda {

// partial[split, pair, tap] = what a split's bins add to the taps of the weighted sum over samples.
// A thread has 2 x 2 channel pairs, and kSpectralTogether bins of them at a time.
template <class T>
__global__ void __launch_bounds__(kPairThreads)
    spectral_bins_sum_kernel(SpectralTaps call, const T* x_bins, const T* g_bins, const T* factors,
                             T* partial) {
  const std::int64_t ins = call.ins / call.groups, outs = call.outs / call.groups;
  const std::int64_t across = (ins + 1) / 2, units = across * ((outs + 1) / 2);
  const std::int64_t blocks = (units + kPairThreads - 1) / kPairThreads;
  const std::int64_t group = blockIdx.x / blocks, split = blockIdx.y;
  const std::int64_t unit = blockIdx.x % blocks * kPairThreads + static_cast<int>(threadIdx.x);
  if (unit >= units) return;
  const std::int64_t in = unit % across * 2, out = unit / across * 2;
  const bool has_in[2] = {true, in + 1 < ins}, has_out[2] = {true, out + 1 < outs};
  const T* const turns = static_cast<const T*>(call.turns);
  const std::int64_t begin = call.bins * split / gridDim.y,
                     end = call.bins * (split + 1) / gridDim.y;
  T* const to = partial + split * outs * call.groups * ins * call.taps;
  for (std::int64_t first = begin; first < end; first += kSpectralTogether) {
    T re[kSpectralTogether][2][2] = {}, im[kSpectralTogether][2][2] = {};
    for (std::int64_t b = 0; b < call.batch; ++b) {
      const T factor = factors[b];
      if (factor == 0) continue;  // 0 * inf would not vanish
      DPK_UNROLL
      for (int j = 0; j < kSpectralTogether; ++j) {
        const std::int64_t k = first + j;
        if (k >= end) continue;
        const T* const x = x_bins + 2 * (k * call.batch + b) * call.ins + group * ins + in;
        const T* const g = g_bins + 2 * (k * call.batch + b) * call.outs + group * outs + out;
        T xr[2], xi[2], gr[2], gi[2];
        DPK_UNROLL
        for (int i = 0; i < 2; ++i) {
          xr[i] = has_in[i] ? factor * x[i] : T{0};
          xi[i] = has_in[i] ? factor * x[call.ins + i] : T{0};
          gr[i] = has_out[i] ? g[i] : T{0};
          gi[i] = has_out[i] ? g[call.outs + i] : T{0};
        }
        DPK_UNROLL
        for (int o = 0; o < 2; ++o) {
          DPK_UNROLL
          for (int i = 0; i < 2; ++i) {
            re[j][o][i] = fused(gr[o], xr[i], fused(gi[o], xi[i], re[j][o][i]));
            im[j][o][i] = fused(gr[o], xi[i], fused(-gi[o], xr[i], im[j][o][i]));
          }
        }
      }
    }
    DPK_UNROLL
    for (int o = 0; o < 2; ++o) {
      DPK_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (!has_out[o] || !has_in[i]) continue;
        T* const taps = to + ((group * outs + out + o) * ins + in + i) * call.taps;
        for (std::int64_t t = 0; t < call.taps; ++t) {
          T sum = first == begin ? T{0} : taps[t];
          DPK_UNROLL
          for (int j = 0; j < kSpectralTogether; ++j) {
            if (first + j >= end) continue;
            const T* const turn = turns + 2 * ((first + j) * call.taps + t);
            sum = fused(turn[0], re[j][o][i], fused(turn[1], im[j][o][i], sum));
          }
          taps[t] = sum;
        }
      }
    }
  }
}

// out += the sum of the splits.
template <class T>
__global__ void __launch_bounds__(kFlatThreads)
    spectral_add_kernel(std::int64_t splits, std::int64_t numbers, const T* partial, T* out) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kFlatThreads) + threadIdx.x;
  if (i >= numbers) return;
  T sum = 0;
  for (std::int64_t split = 0; split < splits; ++split) sum += partial[split * numbers + i];
  out[i] += sum;
}

}  // namespace dpkern::cuda
