// Zeroed, 64-byte aligned storage; huge pages are asked for when it is large, because a pass streams all of it and page
// walks would cost it up to a third of its time.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace forerun {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// The address sanitizer knows where allocations end, but not where ours do within their pages. It is told by these, which
// do nothing without it.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuardBytes = 64;  // between two allocations of an arena
inline void forbid_access(const void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void allow_access(const void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
#else
constexpr size_t kGuardBytes = 0;
inline void forbid_access(const void*, size_t) {}
inline void allow_access(const void*, size_t) {}
#endif

// Owns pages of the process; the kernel zeroes a page when it is first touched, so what is never used costs nothing.
class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t bytes) : num_bytes_(bytes) {
    const bool is_large = bytes >= kHugePageBytes;
    // A mapping starts at any small page; one huge page more lets its use start at a huge one.
    mapped_bytes_ = is_large ? bytes + kHugePageBytes : bytes;
    void* p = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapped_ = static_cast<uint8_t*>(p);
    begin_ = mapped_;
    if (is_large) {
      begin_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kHugePageBytes - 1) & ~(kHugePageBytes - 1));
      madvise(begin_, bytes, MADV_HUGEPAGE);  // a wish; without it everything works, more slowly
    }
    forbid_access(mapped_, mapped_bytes_);
    allow_access(begin_, bytes);
  }
  Pages(Pages&& other) noexcept { *this = std::move(other); }
  Pages& operator=(Pages&& other) noexcept {
    std::swap(mapped_, other.mapped_);
    std::swap(begin_, other.begin_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  ~Pages() {
    if (!mapped_) return;
    allow_access(mapped_, mapped_bytes_);
    munmap(mapped_, mapped_bytes_);
  }

  uint8_t* data() const { return begin_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  uint8_t* mapped_ = nullptr;
  uint8_t* begin_ = nullptr;
  size_t mapped_bytes_ = 0;
  size_t num_bytes_ = 0;
};

// An array of trivial values in pages of its own.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(size_t count) : pages_(count * sizeof(T) + 64) {}
  size_t num_bytes() const { return pages_.num_bytes(); }
  T* get() const { return reinterpret_cast<T*>(pages_.data()); }
  T& operator[](size_t i) const { return get()[i]; }
  explicit operator bool() const { return pages_.data() != nullptr; }

 private:
  Pages pages_;
};

// Many matrices side by side, so that small ones share huge pages too.
class Arena {
 public:
  // 64-byte aligned and zero; lives as long as the arena.
  uint8_t* allocate(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64 + kGuardBytes;
    if (bytes > left_) {
      const size_t chunk = bytes > kChunkBytes ? bytes : kChunkBytes;
      chunks_.emplace_back(chunk);
      next_ = chunks_.back().data();
      left_ = chunk;
    }
    uint8_t* p = next_;
    next_ += bytes;
    left_ -= bytes;
    forbid_access(next_ - kGuardBytes, kGuardBytes);
    return p;
  }

 private:
  // The last huge page of a chunk is resident whole and used in part, so chunks are few. What is never touched is free.
  static constexpr size_t kChunkBytes = size_t{256} << 20;
  std::vector<Pages> chunks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace forerun
