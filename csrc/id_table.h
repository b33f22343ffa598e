// A hash table of ids. It knows nothing of what they name: the caller brings the hash and says which id is meant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace forerun {

inline uint32_t hash_pair(uint32_t left, uint32_t right) {
  uint64_t x = (static_cast<uint64_t>(left) << 32 | right) + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(x >> 32);
}

// Open addressing with linear probing; a slot holds an id and its whole hash, so that growing and erasing need neither
// keys nor tombstones.
class IdTable {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr size_t kSlotBytes = 8;
  // Slots per id at worst: just after doubling, when 5 in 8 were taken.
  static constexpr double kMaxSlotsPerId = 3.2;

  size_t size() const { return size_; }
  size_t bytes() const { return slots_.capacity() * kSlotBytes; }

  // The id of this hash for which is_it(id) holds, or kNone.
  template <typename IsIt>
  uint32_t find(uint32_t hash, IsIt is_it) const {
    if (slots_.empty()) return kNone;
    for (size_t at = hash & mask();; at = (at + 1) & mask()) {
      const Slot& slot = slots_[at];
      if (slot.id == kNone) return kNone;
      if (slot.hash == hash && is_it(slot.id)) return slot.id;
    }
  }

  void insert(uint32_t hash, uint32_t id) {
    if ((size_ + 1) * 8 > slots_.size() * 5) grow();
    place({id, hash});
    ++size_;
  }

  // Gives two entries each other's ids. They must be there, as in erase.
  void swap(uint32_t left_hash, uint32_t left, uint32_t right_hash, uint32_t right) {
    std::swap(slots_[slot_of(left_hash, left)].id, slots_[slot_of(right_hash, right)].id);
  }

  void erase(uint32_t hash, uint32_t id) {
    size_t hole = slot_of(hash, id);
    // What follows moves up unless it would then lie before its home.
    for (size_t at = (hole + 1) & mask(); slots_[at].id != kNone; at = (at + 1) & mask()) {
      const size_t home = slots_[at].hash & mask();
      if (((at - home) & mask()) >= ((at - hole) & mask())) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole] = {};
    --size_;
  }

 private:
  struct Slot {
    uint32_t id = kNone;
    uint32_t hash = 0;
  };

  size_t mask() const { return slots_.size() - 1; }

  size_t slot_of(uint32_t hash, uint32_t id) const {
    size_t at = hash & mask();
    while (slots_[at].id != id) at = (at + 1) & mask();
    return at;
  }

  void place(Slot slot) {
    size_t at = slot.hash & mask();
    while (slots_[at].id != kNone) at = (at + 1) & mask();
    slots_[at] = slot;
  }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? 8 : 2 * slots_.size());
    std::swap(old, slots_);
    for (const Slot& slot : old) {
      if (slot.id != kNone) place(slot);
    }
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace forerun
