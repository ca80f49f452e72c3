#pragma once

#include <mpi.h>

#include <memory>

#include "absl/status/statusor.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm::mpi {

// A Store of the ranks of `comm`: rank 0 serves it, for as long as its process lives, and tells the
// others by a broadcast where. Collective.
absl::StatusOr<std::shared_ptr<Store>> MeetAtStore(MPI_Comm comm);

}  // namespace lockstep::comm::mpi
