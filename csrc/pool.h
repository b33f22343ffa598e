// A persistent pool: every thread, the caller's included, runs the same function; barriers inside it are cheap.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace forerun {

struct Range {
  int begin;
  int end;
};

// A thread's part of `total` things, parts as equal as can be.
inline Range share(int total, int thread, int num_threads) {
  return {static_cast<int>(static_cast<int64_t>(total) * thread / num_threads),
          static_cast<int>(static_cast<int64_t>(total) * (thread + 1) / num_threads)};
}

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  // Runs fn(thread) on every thread with denormals flushed to zero, and returns when all are done. Not reentrant.
  void run(const std::function<void(int)>& fn);
  // Waits until every thread of the current run is here. What was written before it is visible after it.
  void barrier();

 private:
  // A word that threads wait on: spin for a while, then sleep in the kernel.
  struct alignas(64) Gate {
    std::atomic<uint32_t> word{0};
    std::atomic<uint32_t> num_sleepers{0};
    void wait_while(uint32_t value, int64_t spin_ns);
    void open(uint32_t value);
  };

  void work(int thread);
  void call(int thread);

  int num_threads_;
  int64_t barrier_spin_ns_;
  int64_t idle_spin_ns_;
  Gate start_;
  Gate phase_;
  alignas(64) std::atomic<int> num_arrived_{0};
  std::atomic<bool> is_stopping_{false};
  const std::function<void(int)>* fn_ = nullptr;
  std::vector<std::thread> threads_;
};

// CPUs this process may run on.
int num_available_cpus();

}  // namespace forerun
