#include "step_rows.h"

#include <algorithm>
#include <stdexcept>

namespace forerun {

namespace {

// A table may be shorter than others of the pass, behind which there is room that is not its own.
void check_slots(int32_t start, size_t num_rows, size_t num_pages) {
  if (start < 0) throw std::invalid_argument("a position is outside the cache");
  if (static_cast<size_t>(start) + num_rows > num_pages * kPageTokens)
    throw std::invalid_argument("a slot is outside the page table");
}

}  // namespace

void StepRows::clear() {
  for (std::vector<int32_t>* v : {&token_ids_, &positions_, &slots_, &visible_len_, &seq_ids_, &logit_rows_, &pages_})
    v->clear();
  tail_mask_.clear();
  num_pages_.clear();
}

void StepRows::add_row(int32_t token_id, int32_t position, int32_t slot, int32_t visible_len, uint64_t tail_mask) {
  token_ids_.push_back(token_id);
  positions_.push_back(position);
  slots_.push_back(slot);
  visible_len_.push_back(visible_len);
  tail_mask_.push_back(tail_mask);
  seq_ids_.push_back(static_cast<int32_t>(num_pages_.size()));
}

void StepRows::end_piece(const int32_t* page_table, size_t num_pages, int num_logits) {
  const int num_rows = static_cast<int>(token_ids_.size());
  for (int row = num_rows - num_logits; row < num_rows; row++) logit_rows_.push_back(row);
  pages_.insert(pages_.end(), page_table, page_table + num_pages);
  num_pages_.push_back(num_pages);
}

void StepRows::add_draft(int32_t last_id, const std::vector<int32_t>& node_ids, const std::vector<int32_t>& parents,
                         int32_t root, const int32_t* page_table, size_t num_pages) {
  const int num_nodes = static_cast<int>(node_ids.size());
  if (node_ids.size() != parents.size()) throw std::invalid_argument("the arrays of a draft differ in length");
  if (node_ids.size() > static_cast<size_t>(kMaxNodes)) throw std::invalid_argument("a draft has more than 64 nodes");
  check_slots(root, 1 + node_ids.size(), num_pages);
  bool is_chain = true;
  for (int node = 0; node < num_nodes; node++) {
    const int32_t parent = parents[static_cast<size_t>(node)];
    if (parent < -1 || parent >= node) throw std::invalid_argument("a draft node precedes its parent");
    is_chain &= parent == node - 1;
  }
  const size_t first = token_ids_.size();
  add_row(last_id, root, root, root + 1, 0);
  for (int node = 0; node < num_nodes; node++) {
    const size_t parent_row = first + static_cast<size_t>(1 + parents[static_cast<size_t>(node)]);
    const int32_t slot = root + 1 + node;
    if (is_chain)
      add_row(node_ids[static_cast<size_t>(node)], slot, slot, slot + 1, 0);
    else
      add_row(node_ids[static_cast<size_t>(node)], positions_[parent_row] + 1, slot, root + 1,
              tail_mask_[parent_row] | uint64_t{1} << node);
  }
  end_piece(page_table, num_pages, 1 + num_nodes);
}

void StepRows::add_prompt(const std::vector<int32_t>& token_ids, int32_t start, const int32_t* page_table,
                          size_t num_pages, int num_logits) {
  if (token_ids.empty()) throw std::invalid_argument("a piece of a prompt is empty");
  if (num_logits < 0 || static_cast<size_t>(num_logits) > token_ids.size())
    throw std::invalid_argument("a piece of a prompt has fewer rows than logits are wanted of it");
  check_slots(start, token_ids.size(), num_pages);
  for (size_t i = 0; i < token_ids.size(); i++) {
    const int32_t slot = start + static_cast<int32_t>(i);
    add_row(token_ids[i], slot, slot, slot + 1, 0);
  }
  end_piece(page_table, num_pages, num_logits);
}

StepArgs StepRows::args() {
  const size_t num_seqs = num_pages_.size();
  const size_t longest = num_seqs ? *std::max_element(num_pages_.begin(), num_pages_.end()) : 0;
  tables_.assign(num_seqs * longest, 0);
  auto from = pages_.begin();
  for (size_t i = 0; i < num_seqs; i++) {
    std::copy_n(from, num_pages_[i], tables_.begin() + static_cast<std::ptrdiff_t>(i * longest));
    from += static_cast<std::ptrdiff_t>(num_pages_[i]);
  }
  StepArgs step{};
  step.num_rows = static_cast<int>(token_ids_.size());
  step.token_ids = token_ids_.data();
  step.positions = positions_.data();
  step.slots = slots_.data();
  step.visible_len = visible_len_.data();
  step.tail_base = visible_len_.data();  // where a tree's nodes begin; nobody asks for that of other rows
  step.tail_mask = tail_mask_.data();
  step.seq_ids = seq_ids_.data();
  step.page_tables = tables_.data();
  step.num_seqs = static_cast<int>(num_seqs);
  step.num_table_pages = static_cast<int>(longest);
  step.logit_rows = logit_rows_.data();
  step.num_logit_rows = static_cast<int>(logit_rows_.size());
  return step;
}

}  // namespace forerun
