// The counted kernels: the same bits as the kernels, and the cipher's operations.

#include "core/counted.h"

#include "check.h"
#include "counted/kernels.h"
#include "counted/noise.h"
#include "cpu/noise.h"

namespace dpkern::test {
namespace {

// What one execution took.
template <class F>
Tally tally_of(const F& run) {
  Tally exact{}, chance{};
  by_chance = &chance;
  {
    const Counting counting(&exact);
    run();
  }
  by_chance = nullptr;
  return exact;
}

std::int64_t cipher_is_counted(int rounds) {
  const Stream stream = counting_key(0, 7, rounds);
  Word block[16];
  const auto run = [&] { chacha_block(stream, stream.n0, 5, block); };
  const Tally closed = tally_of(run);
  cipher_is_open = true;
  const Tally open = tally_of(run);
  cipher_is_open = false;
  std::uint32_t want[16];
  chacha_block(stream, stream.n0, 5, want);
  for (int i = 0; i < 16; ++i) check(block[i].value == want[i], "a counted block");
  check(closed.counts[kRng] == 16 && closed.counts[kAdd] == 0, "a closed cipher");
  check(open.counts[kRng] == 16 && open.counts[kAdd] == 16 * rounds + 16 &&
            open.counts[kXor] == 16 * rounds && open.counts[kShift] == 32 * rounds &&
            open.counts[kOr] == 16 * rounds && open.counts[kAnd] == 0,
        "an open cipher");
  return 1;
}

std::int64_t draws_are_the_same(Distribution law) {
  const Stream stream = counting_key(0, 3, 12);
  std::int64_t cases = 0;
  for (const std::int64_t n : {0, 1, 511, 513, 2500}) {
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{777}}) {
      std::vector<std::int32_t> want(static_cast<std::size_t>(n));
      Shifted<std::int32_t> got(want, 1);
      lattice_draws(stream, law, first, n, want.data(), 1);
      const Tally tally =
          tally_of([&] { counted::lattice_draws(stream, law, first, n, got.data()); });
      check_same(got.values(), want, "counted draws");
      check(tally.counts[kStore] == n && tally.bytes_written == 4 * n, "stores of draws");
      ++cases;
    }
  }
  return cases;
}

}  // namespace

std::int64_t test_counted() {
  std::int64_t cases = 0;
  for (const int rounds : {20, 12, 8}) cases += cipher_is_counted(rounds);
  for (const auto law : {Distribution::kGaussian, Distribution::kLaplace}) {
    cases += draws_are_the_same(law);
  }
  return cases;
}

}  // namespace dpkern::test
