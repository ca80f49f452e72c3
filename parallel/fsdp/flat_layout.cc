#include "lockstep/parallel/fsdp/flat_layout.h"

#include <algorithm>

namespace lockstep::parallel::fsdp {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

FlatLayout::FlatLayout(absl::Span<const int64_t> numels, int64_t element_bytes, int world_size)
    : world_size_(world_size), numels_(numels.begin(), numels.end()) {
  const int64_t alignment = std::max<int64_t>(1, kAlignmentBytes / element_bytes);
  int64_t end = 0;
  for (int64_t numel : numels_) {
    offsets_.push_back(RoundUp(end, alignment));
    end = offsets_.back() + numel;
  }
  shard_numel_ = RoundUp((end + world_size - 1) / world_size, alignment);
}

FlatLayout::Slice FlatLayout::slice(size_t i, int rank) const {
  const int64_t shard_begin = rank * shard_numel_;
  const int64_t begin = std::max(offsets_[i], shard_begin);
  const int64_t end = std::min(offsets_[i] + numels_[i], shard_begin + shard_numel_);
  if (begin >= end) return {};
  return {begin - shard_begin, begin - offsets_[i], end - begin};
}

}  // namespace lockstep::parallel::fsdp
