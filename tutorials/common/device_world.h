#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::tutorials {

// For RunRanks: the communicator of all ranks that the launcher started, on the devices that
// --device says. On GPUs it is one over NCCL; each rank has the GPU of its local rank, or the only
// one that it sees. They meet over MPI where the launcher gives it, else at MASTER_ADDR. On the CPU
// it is CreateWorld's. Collective.
//
//   return RunRanks(argc, argv, usage, Body, {}, CreateWorldOnDevice);
absl::StatusOr<std::unique_ptr<comm::Communicator>> CreateWorldOnDevice(absl::Duration deadline);

// For RunRanks, as launch::RelaunchOptions::most_default_ranks: the GPUs that this process sees
// where --device says to use them, else without a limit. An explicit --ranks above it stays an
// error.
int MostRanksOnDevice();

}  // namespace lockstep::tutorials
