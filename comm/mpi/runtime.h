#pragma once

#include "absl/status/status.h"

// The life of MPI in this process. Private to this folder.
namespace lockstep::comm::mpi {

// Initializes MPI where nobody has, in which case it is finalized when the process exits with
// status 0 after no error. FailedPrecondition where MPI has been finalized, or allows fewer threads
// than MPI_THREAD_MULTIPLE.
absl::Status InitializeMpi();

// FailedPrecondition unless MPI is initialized, not finalized, and allows MPI_THREAD_MULTIPLE.
absl::Status CheckMpi();

}  // namespace lockstep::comm::mpi
