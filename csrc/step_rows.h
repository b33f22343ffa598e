// The rows of a pass, filled in piece by piece, one piece per sequence. `batch.py` says what a row sees, and spells out
// the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "program.h"

namespace forerun {

class StepRows {
 public:
  void clear();
  // A sequence's last token, in slot `root`, and a draft's nodes behind it; logits are wanted after all of them. Throws
  // std::invalid_argument where a parent doesn't precede its node, there are more nodes than bits in a word or a slot is
  // outside the page table, and then adds nothing; add_prompt likewise, also for a piece that is empty or wants more
  // logits than it has rows.
  void add_draft(int32_t last_id, const std::vector<int32_t>& node_ids, const std::vector<int32_t>& parents,
                 int32_t root, const int32_t* page_table, size_t num_pages);
  // Consecutive tokens of a sequence from slot `start` on.
  void add_prompt(const std::vector<int32_t>& token_ids, int32_t start, const int32_t* page_table, size_t num_pages,
                  int num_logits);
  // Valid until the next change.
  StepArgs args();

 private:
  static constexpr int kMaxNodes = 64;
  void add_row(int32_t token_id, int32_t position, int32_t slot, int32_t visible_len, uint64_t tail_mask);
  void end_piece(const int32_t* page_table, size_t num_pages, int num_logits);

  std::vector<int32_t> token_ids_, positions_, slots_, visible_len_, seq_ids_, logit_rows_;
  std::vector<uint64_t> tail_mask_;
  std::vector<int32_t> pages_;     // of all tables, one behind the other
  std::vector<size_t> num_pages_;  // of each
  std::vector<int32_t> tables_;    // the same, all as long as the longest
};

}  // namespace forerun
