#include "lockstep/comm/mpi/runtime.h"

#include <mpi.h>
#include <stdlib.h>

#include <mutex>

#include "lockstep/comm/mpi/engine.h"
#include "lockstep/comm/mpi/mpi_status.h"

namespace lockstep::comm::mpi {
namespace {

bool IsInitialized() {
  int flag = 0;
  return MPI_Initialized(&flag) == MPI_SUCCESS && flag != 0;
}

bool IsFinalized() {
  int flag = 0;
  return MPI_Finalized(&flag) == MPI_SUCCESS && flag != 0;
}

// At exit, before static objects go. Finalizing waits for all ranks: after an error, of whatever
// kind, they would not come, and the launcher ends them on seeing this one's status.
void FinalizeMpi(int exit_status, void*) {
  if (exit_status != 0 || !Engine::Get().Shutdown() || IsFinalized()) return;
  MPI_Finalize();
}

}  // namespace

absl::Status CheckMpi() {
  if (IsFinalized()) {
    return absl::FailedPreconditionError(
        "MPI has been finalized already, and cannot be used again");
  }
  if (!IsInitialized()) {
    return absl::FailedPreconditionError("MPI is not initialized: call MPI_Init_thread first");
  }
  int provided = MPI_THREAD_SINGLE;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Query_thread(&provided));
  if (provided < MPI_THREAD_MULTIPLE) {
    return absl::FailedPreconditionError(
        "MPI was initialized without MPI_THREAD_MULTIPLE, which progress in the background needs: "
        "ask "
        "for it in MPI_Init_thread, or leave initializing to comm::mpi::Create");
  }
  return absl::OkStatus();
}

absl::Status InitializeMpi() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!IsInitialized() && !IsFinalized()) {
    int provided = 0;
    LOCKSTEP_MPI_RETURN_IF_ERROR(
        MPI_Init_thread(/*argc=*/nullptr, /*argv=*/nullptr, MPI_THREAD_MULTIPLE, &provided));
    // Open MPI raises the errors of nonblocking collectives there, whatever their communicator.
    LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    on_exit(FinalizeMpi, /*arg=*/nullptr);
  }
  return CheckMpi();
}

}  // namespace lockstep::comm::mpi
