#include "lockstep/parallel/fsdp/gather_order.h"

#include <algorithm>

namespace lockstep::parallel::fsdp {

void GatherOrder::Begin() {
  if (!current_.empty()) last_.swap(current_);
  current_.clear();
  position_ = 0;
}

std::optional<size_t> GatherOrder::Record(size_t unit) {
  current_.push_back(unit);
  const auto place = std::find(last_.begin() + position_, last_.end(), unit);
  if (place == last_.end()) return std::nullopt;  // another way than last time, until they meet
  position_ = place - last_.begin() + 1;
  if (position_ == last_.size()) return std::nullopt;
  return last_[position_];
}

}  // namespace lockstep::parallel::fsdp
