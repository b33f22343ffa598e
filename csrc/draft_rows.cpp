#include "draft_rows.h"

#include <cstddef>
#include <stdexcept>

namespace forerun {

DraftRows::DraftRows(int32_t last_id, const std::vector<int32_t>& node_ids, const std::vector<int32_t>& parents,
                     int32_t root)
    : num_rows_(1 + static_cast<int>(node_ids.size())) {
  if (node_ids.size() != parents.size()) throw std::invalid_argument("the arrays of a draft differ in length");
  if (node_ids.size() > static_cast<size_t>(kMaxNodes)) throw std::invalid_argument("a draft has more than 64 nodes");
  if (root < 0 || root > INT32_MAX - kMaxNodes - 1) throw std::invalid_argument("a position is outside the cache");
  bool is_chain = true;
  for (int node = 0; node < num_rows_ - 1; node++) {
    const int32_t parent = parents[static_cast<size_t>(node)];
    if (parent < -1 || parent >= node) throw std::invalid_argument("a draft node precedes its parent");
    is_chain &= parent == node - 1;
  }
  for (int row = 0; row < num_rows_; row++) {
    const int node = row - 1, parent_row = node < 0 ? 0 : 1 + parents[static_cast<size_t>(node)];
    token_ids_[row] = node < 0 ? last_id : node_ids[static_cast<size_t>(node)];
    positions_[row] = node < 0 ? root : positions_[parent_row] + 1;
    slots_[row] = root + row;
    visible_len_[row] = tail_base_[row] = is_chain ? root + row + 1 : root + 1;
    tail_mask_[row] = is_chain || node < 0 ? 0 : tail_mask_[parent_row] | uint64_t{1} << node;
    seq_ids_[row] = 0;
    logit_rows_[row] = row;
  }
}

StepArgs DraftRows::args() const {
  StepArgs step{};
  step.num_rows = step.num_logit_rows = num_rows_;
  step.token_ids = token_ids_;
  step.positions = positions_;
  step.slots = slots_;
  step.visible_len = visible_len_;
  step.tail_base = tail_base_;
  step.tail_mask = tail_mask_;
  step.seq_ids = seq_ids_;
  step.logit_rows = logit_rows_;
  return step;
}

}  // namespace forerun
