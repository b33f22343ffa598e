#include "stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "memory.h"
#include "pool.h"

namespace forerun {

double stream_read_gb_per_s(int num_threads, size_t num_bytes) {
  if (num_threads < 1) throw std::invalid_argument("a read needs at least one thread");
  Pool pool(num_threads);
  constexpr int kStreams = 4, kLineWords = 8, kAheadWords = 256;
  const size_t parts = static_cast<size_t>(num_threads) * kStreams, part_words = num_bytes / 64 / parts * kLineWords;
  const Array<uint64_t> data(parts * part_words);
  auto part = [&](int thread) { return data.get() + static_cast<size_t>(thread) * kStreams * part_words; };
  pool.run([&](int thread) { std::memset(part(thread), 1, kStreams * part_words * sizeof(uint64_t)); });
  double best_s = 1e9;
  std::atomic<uint64_t> sink{0};
  for (int pass = 0; pass < 8; pass++) {
    const auto begin = std::chrono::steady_clock::now();
    pool.run([&](int thread) {
      uint64_t sums[kLineWords] = {};
      for (size_t i = 0; i < part_words; i += kLineWords) {
        for (size_t stream = 0; stream < kStreams; stream++) {
          const uint64_t* line = part(thread) + stream * part_words + i;
          __builtin_prefetch(line + kAheadWords);  // past the end it does nothing
          for (int k = 0; k < kLineWords; k++) sums[k] += line[k];
        }
      }
      for (const uint64_t sum : sums) sink += sum;
    });
    best_s = std::min(best_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return static_cast<double>(parts * part_words * sizeof(uint64_t)) / best_s / 1e9;
}

}  // namespace forerun
