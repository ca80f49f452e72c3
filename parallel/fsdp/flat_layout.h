#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace lockstep::parallel::fsdp {

// Where parameters lie in a flat buffer that is cut into one equal shard a rank.
//
// Each parameter begins at a multiple of 64 bytes (a cache line, what vector loads like), and so
// does each shard; the rest is padding. A parameter may lie across shards.
class FlatLayout {
 public:
  static constexpr int64_t kAlignmentBytes = 64;

  // `numels` are the parameters' numbers of elements of `element_bytes` each.
  FlatLayout(absl::Span<const int64_t> numels, int64_t element_bytes, int world_size);

  int64_t padded_numel() const { return shard_numel_ * world_size_; }
  int64_t shard_numel() const { return shard_numel_; }

  // Of parameter i, in the flat buffer.
  int64_t offset(size_t i) const { return offsets_[i]; }

  // What of parameter i lies in rank's shard; numel may be 0, and then so are the others.
  struct Slice {
    int64_t in_shard = 0;      // where it begins in the shard
    int64_t in_parameter = 0;  // where it begins in the flattened parameter
    int64_t numel = 0;
  };
  Slice slice(size_t i, int rank) const;

 private:
  const int world_size_;
  std::vector<int64_t> numels_;
  std::vector<int64_t> offsets_;
  int64_t shard_numel_ = 0;
};

}  // namespace lockstep::parallel::fsdp
