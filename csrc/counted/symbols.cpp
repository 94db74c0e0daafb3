#include "core/response.h"
#include "counted/kernels.h"
#include "counted/noise.h"

namespace dpkern::counted {

template <class T>
void randomize(const Stream& stream, std::uint64_t first, const ResponseParams& response,
               const T* x, std::int64_t n, T* out) {
  using Wide = Counted<std::uint64_t>;
  constexpr std::uint64_t kPerBlock = 8;  // symbols of a cipher block
  const Operand<const T> from(x, n);
  Operand<T> to(out, n);
  const Wide last(response.categories - 2);
  Word block[16];
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t position = first + static_cast<std::uint64_t>(i);
    if (i == 0 || position % kPerBlock == 0) {
      chacha_block(stream, stream.n0, position / kPerBlock, block);
    }
    const std::uint64_t word = 2 * (position % kPerBlock);
    const Wide u = Wide(block[word + 1]) << 32 | Wide(block[word]);
    const bool kept = u < response.keep;
    Word move(kept ? 0u : 1u);
    if (response.categories > 2) {
      const Wide lie = width_quotient(response, u - response.keep);
      const Wide among = choose(lie < last, lie, last);
      move = choose(kept, Word(0u), Word(among) + 1u);
    }
    const Word moved = Word(from[i]) + move;
    const bool over = moved >= response.categories;
    to.store(i, Counted<T>(choose(over, moved - response.categories, moved)));
  }
}

template void randomize(const Stream&, std::uint64_t, const ResponseParams&, const std::uint8_t*,
                        std::int64_t, std::uint8_t*);
template void randomize(const Stream&, std::uint64_t, const ResponseParams&, const std::int32_t*,
                        std::int64_t, std::int32_t*);
template void randomize(const Stream&, std::uint64_t, const ResponseParams&, const std::int64_t*,
                        std::int64_t, std::int64_t*);

}  // namespace dpkern::counted
