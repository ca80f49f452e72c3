#include "lockstep/tools/bench/bare_mpi.h"

#include <mpi.h>

namespace lockstep::bench {
namespace {

// Apart from the product's messages.
MPI_Comm Comm() {
  static const MPI_Comm comm = [] {
    MPI_Comm copy = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    MPI_Comm_set_errhandler(copy, MPI_ERRORS_ARE_FATAL);
    return copy;
  }();
  return comm;
}

}  // namespace

bool HasBareMpi(comm::OperationKind kind) {
  return kind == comm::OperationKind::kAllReduce || kind == comm::OperationKind::kAllGather ||
         kind == comm::OperationKind::kReduceScatter;
}

void BareMpi(comm::OperationKind kind, float* whole, float* part, int64_t count, int ranks) {
  const int all = static_cast<int>(count);
  const int each = all / ranks;
  if (kind == comm::OperationKind::kAllReduce) {
    MPI_Allreduce(MPI_IN_PLACE, whole, all, MPI_FLOAT, MPI_SUM, Comm());
  } else if (kind == comm::OperationKind::kAllGather) {
    MPI_Allgather(part, each, MPI_FLOAT, whole, each, MPI_FLOAT, Comm());
  } else {
    MPI_Reduce_scatter_block(whole, part, each, MPI_FLOAT, MPI_SUM, Comm());
  }
}

void BareMpiAllReduceBeside(float* whole, int64_t count, const std::function<void()>& compute) {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(MPI_IN_PLACE, whole, static_cast<int>(count), MPI_FLOAT, MPI_SUM, Comm(),
                 &request);
  compute();
  MPI_Wait(&request, MPI_STATUS_IGNORE);
}

void BareMpiBarrier() { MPI_Barrier(Comm()); }

}  // namespace lockstep::bench
