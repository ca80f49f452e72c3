#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/checkpoint/index.h"
#include "lockstep/parallel/checkpoint/shard_writer.h"
#include "lockstep/parallel/checkpoint/state.h"

namespace lockstep::parallel::checkpoint {

// One rank's part of a checkpoint, and what rank 0 is to write into the index.
struct ShardToSave {
  std::vector<ShardPiece> pieces;
  std::map<std::string, TensorInfo> tensors;  // that this rank vouches for
  Index index;                                // without tensors and shards
};

// What this rank is to write of `state`: views of it, not copies. INVALID_ARGUMENT where the state
// cannot be saved.
absl::StatusOr<ShardToSave> PrepareShard(const comm::Communicator& comm, int64_t step,
                                         const State& state);

struct Retention {
  int keep_last = 3;
  int64_t keep_every = 0;
};

// Writes a checkpoint into `directory`. Collective; all ranks get the same status. After an error
// the checkpoints that were there are there still.
absl::Status SaveShards(comm::Communicator& comm, const std::string& directory,
                        const ShardToSave& shard, const Retention& retention);

}  // namespace lockstep::parallel::checkpoint
