#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/parallel/checkpoint/index.h"

namespace lockstep::parallel::checkpoint {

// The folder that a training saves its checkpoints into:
//
//   step-000000000120/             a checkpoint: it got this name when it was whole
//     index.json                   what it holds; see index.h
//     shard-00000.safetensors      what rank 0 wrote, ...
//   step-000000000120-1/           one that was saved again at the same step: the later counts
//   step-000000000140.partial/     being written, or left by a save that ended half way
//   step-000000000080.removed/     being removed, or likewise
//   lock                           see lock.h
//
// One process uses this at a time: rank 0.
struct CheckpointFolder {
  int64_t step = 0;
  int again = 0;  // 0: the first one of this step
  std::string path;
};

// All that are whole, oldest first. Whatever else is in `directory` is left out, and so are folders
// without an index. NOT_FOUND and the like where `directory` cannot be read.
absl::StatusOr<std::vector<CheckpointFolder>> ListCheckpoints(const std::string& directory);

// Removes what earlier saves left half way, makes a folder for a new one and returns its path, to
// be given to CommitCheckpoint when all is in it.
absl::StatusOr<std::string> BeginCheckpoint(const std::string& directory, int64_t step);

// Writes the index into the folder that BeginCheckpoint made, and gives it its name. It is on disk
// when this returns. Returns its path.
absl::StatusOr<std::string> CommitCheckpoint(const std::string& directory, const Index& index);

// Removes all but the newest `keep_last` checkpoints and those whose step is a multiple of
// `keep_every` (0: none).
absl::Status RemoveOldCheckpoints(const std::string& directory, int keep_last, int64_t keep_every);

// "shard-00003.safetensors".
std::string ShardName(int rank);

// Reads and checks the index of the checkpoint in folder `path`. NOT_FOUND where there is none.
absl::StatusOr<Index> ReadIndex(const std::string& path);

}  // namespace lockstep::parallel::checkpoint
