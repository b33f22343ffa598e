// The rows of a pass over a sequence's last token and a draft after it. `DraftBatch` in types.py spells out the same.
#pragma once

#include <cstdint>
#include <vector>

#include "program.h"

namespace forerun {

class DraftRows {
 public:
  // Throws std::invalid_argument where a parent doesn't precede its node, or there are more nodes than bits in a word.
  DraftRows(int32_t last_id, const std::vector<int32_t>& node_ids, const std::vector<int32_t>& parents, int32_t root);
  // Everything but the page table; valid while this lives.
  StepArgs args() const;

 private:
  static constexpr int kMaxNodes = 64;
  int num_rows_;
  int32_t token_ids_[kMaxNodes + 1], positions_[kMaxNodes + 1], slots_[kMaxNodes + 1], visible_len_[kMaxNodes + 1];
  int32_t tail_base_[kMaxNodes + 1], seq_ids_[kMaxNodes + 1], logit_rows_[kMaxNodes + 1];
  uint64_t tail_mask_[kMaxNodes + 1];
};

}  // namespace forerun
