#pragma once

#include <mpi.h>

#include <memory>

#include "absl/status/statusor.h"
#include "lockstep/comm/mpi/mpi_communicator.h"

namespace lockstep::comm::mpi {

// For programs that use MPI themselves: a communicator of the ranks of `comm`.
//
//   int provided = 0;
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
//   {
//     auto comm = lockstep::comm::mpi::Adopt(my_comm);
//     ...
//   }
//   MPI_Finalize();
//
// Collective over `comm`, which is duplicated and stays the caller's. The caller initializes MPI,
// with MPI_THREAD_MULTIPLE, and finalizes it, when all works are done. Errors are those of
// Create().
absl::StatusOr<std::unique_ptr<Communicator>> Adopt(MPI_Comm comm, const Options& options = {});

}  // namespace lockstep::comm::mpi
