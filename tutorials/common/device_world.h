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

}  // namespace lockstep::tutorials
