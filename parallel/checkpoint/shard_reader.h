#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/parallel/checkpoint/index.h"

namespace lockstep::parallel::checkpoint {

// Reads ranges of the tensors of a checkpoint, from whatever shards hold them. Memory: a chunk
// (kChunkBytes) beside the target. What is read is compared with its checksums.
//
// Errors: NOT_FOUND for a shard that is missing, DATA_LOSS for one that is not what was saved; they
// name the file.
class ShardReader {
 public:
  // `folder`: the checkpoint's; `index`: its index, which outlives this.
  ShardReader(std::string folder, const Index& index);
  ~ShardReader();

  // Fills `target`, of any device and any strides, with the elements from `begin` on of tensor
  // `name`, whose dtype it has. The tensor has them.
  absl::Status Read(const std::string& name, int64_t begin, const at::Tensor& target);

 private:
  class File;

  absl::StatusOr<File*> Open(size_t shard);
  absl::Status ReadPiece(size_t shard, const PieceInfo& piece, int64_t begin, int64_t end,
                         const at::Tensor& target);

  const std::string folder_;
  const Index& index_;
  std::map<std::string, std::vector<std::pair<size_t, const PieceInfo*>>> pieces_;  // by tensor
  std::map<size_t, std::unique_ptr<File>> files_;                                   // that are open
  at::Tensor chunk_;
};

}  // namespace lockstep::parallel::checkpoint
