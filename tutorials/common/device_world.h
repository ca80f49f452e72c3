#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/launch/relaunch.h"

namespace lockstep::tutorials {

// For RunRanks: the communicator of all ranks that the launcher started, on the devices that
// --device says. On GPUs it is one over NCCL; each rank has the GPU of its local rank, or the only
// one that it sees. They meet over MPI where the launcher gives it, else at MASTER_ADDR. On the CPU
// it is CreateWorld's. Collective.
//
//   return RunRanks(argc, argv, usage, Body, RanksOnDevice(), CreateWorldOnDevice);
absl::StatusOr<std::unique_ptr<comm::Communicator>> CreateWorldOnDevice(absl::Duration deadline);

// For RunRanks: where --device says to use GPUs, no more ranks than this process sees of them; by
// default fewer are started then, and more in --ranks are refused. `default_ranks` is
// launch::RelaunchOptions'.
launch::RelaunchOptions RanksOnDevice(int default_ranks = 0);

// What it says to --ranks: FailedPrecondition where `ranks` are more than the `gpus`.
absl::Status CheckRanks(int ranks, int gpus);

}  // namespace lockstep::tutorials
