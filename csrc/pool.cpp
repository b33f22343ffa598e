#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forerun {
namespace {

// A barrier is usually met within microseconds, and where somebody needed the core for a moment, such as a server's loop,
// within a few hundred; sleeping then makes that longer. Past this another process has the core.
constexpr int64_t kBarrierSpinNs = 500'000;
// Between two steps the caller works, and so may others, who need the core. Waking a thread costs about fifty.
constexpr int64_t kIdleSpinNs = 30'000;

int64_t now_ns() {
  using std::chrono::nanoseconds;
  return std::chrono::duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Flush-to-zero and denormals-are-zero while a run lasts; the caller's own mode comes back after it.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0u); }  // all exceptions masked, round to nearest, FTZ, DAZ
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

}  // namespace

int num_available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

void Pool::Gate::wait_while(uint32_t value, int64_t spin_ns) {
  if (spin_ns > 0) {
    const int64_t deadline = now_ns() + spin_ns;
    do {
      for (int i = 0; i < 32; i++) {
        if (word.load(std::memory_order_acquire) != value) return;
        relax();
      }
    } while (now_ns() < deadline);
  }
  num_sleepers.fetch_add(1);
  while (word.load() == value) syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  num_sleepers.fetch_sub(1);
}

void Pool::Gate::open(uint32_t value) {
  word.store(value);
  // Sequentially consistent with the sleeper's count: either it is seen here, or the sleeper sees the new word.
  if (num_sleepers.load() > 0) syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

Pool::Pool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
  const bool is_oversubscribed = num_threads_ > num_available_cpus();
  barrier_spin_ns_ = is_oversubscribed ? 0 : kBarrierSpinNs;
  idle_spin_ns_ = is_oversubscribed ? 0 : kIdleSpinNs;
  for (int t = 1; t < num_threads_; t++) threads_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
  is_stopping_.store(true);
  start_.open(start_.word.load() + 1);
  for (std::thread& thread : threads_) thread.join();
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    start_.wait_while(seen, idle_spin_ns_);
    seen = start_.word.load();
    if (is_stopping_.load()) return;
    call(thread);
  }
}

void Pool::call(int thread) {
  FloatMode mode;
  (*fn_)(thread);
  barrier();
}

void Pool::run(const std::function<void(int)>& fn) {
  fn_ = &fn;
  start_.open(start_.word.load() + 1);
  call(0);
}

void Pool::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t phase = phase_.word.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    phase_.open(phase + 1);
  } else {
    phase_.wait_while(phase, barrier_spin_ns_);
  }
}

}  // namespace forerun
