// How fast this machine reads memory: what a step of few rows can be compared with.
#pragma once
#include <cstddef>

namespace forerun {

// Gigabytes per second that `num_threads` threads read from a buffer of `num_bytes`, best of a few passes. Each reads
// four streams side by side and fetches them ahead, as the kernels do: one stream alone gets two thirds of it from
// cache.
double stream_read_gb_per_s(int num_threads, size_t num_bytes);

}  // namespace forerun
