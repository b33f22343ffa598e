// A small number made a constant for what is called with it.
#pragma once

namespace forerun {
namespace {

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls f(Count<num>{}), 1 <= num <= N.
template <int N, class F>
inline void with_count(int num, F f) {
  if constexpr (N > 1) {
    if (num < N) return with_count<N - 1>(num, f);
  }
  f(Count<N>{});
}

}  // namespace
}  // namespace forerun
