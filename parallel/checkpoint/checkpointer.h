#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/checkpoint/lock.h"
#include "lockstep/parallel/checkpoint/shard_writer.h"
#include "lockstep/parallel/checkpoint/state.h"

namespace lockstep::parallel::checkpoint {

// The same on all ranks.
struct CheckpointerOptions {
  std::string directory;   // seen by all ranks; made if its parent is there; required
  int keep_last = 3;       // of the newest checkpoints, the others are removed; at least 1; 3
  int64_t keep_every = 0;  // checkpoints whose step is a multiple of it are kept for good; 0: none
  bool async = true;       // write while training goes on; true
};

// Saves a training now and then, and finds the last checkpoint when it is started again:
//
//   parallel::Fsdp fsdp(model, comm);
//   parallel::optim::FusedAdamW optimizer(fsdp.named_parameters());
//   auto checkpointer =
//       ValueOrThrow(checkpoint::Checkpointer::Open(comm, {.directory = "runs/a"}));
//   checkpoint::State state = {.strategy = &fsdp, .optimizer = &optimizer};
//   int64_t step = 0;
//   if (auto loaded = ValueOrThrow(checkpointer->LoadLatest(state))) {
//     step = *loaded;
//     ThrowIfError(loader.Seek(ValueOrThrow(data::ParsePosition(state.notes["position"]))));
//   }
//   for (; step < steps; ) {
//     ... one step ...
//     if (++step % 1000 == 0) {
//       state.notes["position"] = data::ToString(loader.position());
//       ThrowIfError(checkpointer->Save(step, state));
//     }
//   }
//   ThrowIfError(checkpointer->Finish());
//
// WHAT IS WRITTEN. Each rank writes what it keeps as a safetensors file, and of what several ranks
// keep alike its share; rank 0 writes an index with the sizes and checksums. All of that goes into
// a folder that gets its name when everything is on disk: a checkpoint is whole or not there,
// whenever a rank, a node or the power fails. What such a save leaves, the next one removes. Python
// reads the shards with `safetensors`; tools:consolidate makes one file of them.
//
// WHILE TRAINING GOES ON (async): Save copies this rank's part to memory, which it keeps for the
// next time, and returns; a thread writes it, on a communicator of its own. The next Save waits for
// it. An error is returned by the call after it, Save or Finish.
//
// RANKS. Everything here but the destructor is collective, and all ranks get the same answer;
// messages name the rank that has the trouble. After an error in saving, training may go on, and so
// may saving: the checkpoints that were there are there still. Ranks wait for each other's disks
// too: one that takes longer than the others by more than the communicator's deadline counts as
// hung.
//
// Errors of Save: RESOURCE_EXHAUSTED (no space), PERMISSION_DENIED (a read-only folder), NOT_FOUND
// (the folder is gone), UNAVAILABLE; INVALID_ARGUMENT for a state that cannot be saved; those of
// the communicator.
class Checkpointer {
 public:
  // Takes hold of the folder until it is destroyed. FAILED_PRECONDITION, naming the process, where
  // another job saves into the folder; INVALID_ARGUMENT for options out of their range.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Open(comm::Communicator& comm,
                                                            CheckpointerOptions options);

  // Waits for the write that is going on, if any, whose error is then lost: see Finish.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Loads the newest checkpoint, the one of the highest step, and returns its step; nothing where
  // there is none. Folders of a save that ended half way do not count. Errors: see load.h; older
  // checkpoints are then not tried: remove the folder named in the message to go on from them.
  absl::StatusOr<std::optional<int64_t>> LoadLatest(State& state);

  // Saves the state after `step` steps, which must not be negative. Between steps, not between
  // forward and backward. Saved again, a step's earlier checkpoint is replaced.
  absl::Status Save(int64_t step, const State& state);

  // Waits until the last Save is on disk, and returns its error if nobody has got it yet.
  absl::Status Finish();

 private:
  Checkpointer(CheckpointerOptions options, std::unique_ptr<comm::Communicator> comm,
               std::unique_ptr<FolderLock> lock);

  const CheckpointerOptions options_;
  const std::unique_ptr<comm::Communicator> comm_;
  const std::unique_ptr<FolderLock> lock_;  // rank 0's
  Snapshot snapshot_;
  absl::Status pending_;  // of the last write, once the thread has ended
  std::thread writer_;
};

}  // namespace lockstep::parallel::checkpoint
