#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "lockstep/parallel/checkpoint/index.h"
#include "lockstep/parallel/checkpoint/state.h"

namespace lockstep::parallel::checkpoint {

// A piece of a shard that is to be written: `values` is a range of a tensor, 1-D.
struct ShardPiece {
  std::string name;
  TensorInfo whole;
  int64_t begin = 0;
  at::Tensor values;
};

// The parts of `ranges` that this rank is to write, as views of them, in the order of a file. A
// tensor that is not contiguous is copied.
std::vector<ShardPiece> PiecesOf(const std::vector<StateRange>& ranges);

// Copies pieces into memory of this object, for somebody else to write while the tensors change.
// The memory, which is as large as the shard, is kept for the next snapshot.
class Snapshot {
 public:
  // The pieces with values in this memory; good until the next Take.
  std::vector<ShardPiece> Take(std::vector<ShardPiece> pieces);

 private:
  at::Tensor memory_;
};

// Writes pieces as a safetensors file, whose metadata tells their ranges, flushes it to disk and
// says what a reader has to know; `name` is its name in the folder `folder`. A value that is on a
// GPU comes over in chunks. There is no rename: the folder is what appears at once.
absl::StatusOr<ShardInfo> WriteShard(const std::string& folder, const std::string& name,
                                     const std::vector<ShardPiece>& pieces);

}  // namespace lockstep::parallel::checkpoint
