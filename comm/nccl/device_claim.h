#pragma once

#include "absl/status/status.h"
#include "lockstep/comm/nccl/library.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm::nccl {

// Says in the store, which the ranks of one communicator share, that `rank` has the library's
// device. FailedPrecondition where another rank does, naming it: NCCL would refuse that, or hang.
absl::Status ClaimDevice(Library& library, Store& store, int rank);

}  // namespace lockstep::comm::nccl
