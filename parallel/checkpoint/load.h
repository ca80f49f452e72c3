#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/checkpoint/state.h"

namespace lockstep::parallel::checkpoint {

// Loads the checkpoint in folder `path` ("runs/a/step-000000000120") into `state` and returns its
// step. The number of ranks and the strategy may be others than those that saved it: each rank
// reads the parts that it keeps, straight into its tensors, and needs a megabyte of memory beside
// them. A state without an optimizer, schedulers or generators leaves those of the checkpoint
// unread. Collective; all ranks get the same result.
//
// Errors:
//   NOT_FOUND            no checkpoint there, or one of its shards is missing
//   INVALID_ARGUMENT     it is of another model or another optimizer: names the first tensor that
//                        one of them lacks or that differs in shape or dtype; or it has other
//                        numbers of generators, schedulers or parameter groups; nothing was changed
//   DATA_LOSS            a file is not what was saved, by its size or checksum; some of the state
//                        may have been loaded: do not train on with it
absl::StatusOr<int64_t> LoadCheckpoint(comm::Communicator& comm, const std::string& path,
                                       State& state);

}  // namespace lockstep::parallel::checkpoint
