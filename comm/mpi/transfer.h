#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/comm/operation.h"

namespace lockstep::comm::mpi {

// One operation as MPI calls: nonblocking ones of MPI 3.1. The calls of this class need the
// progress token (see Engine), but for Finish().
class Transfer {
 public:
  // No MPI call moves more than `max_elements` elements, or that many a rank where a rank has a
  // block.
  Transfer(Operation operation, MPI_Comm comm, int rank, int size, int64_t max_elements);

  // Starts the calls; `requests` receives those to complete.
  absl::Status Start(std::vector<MPI_Request>& requests);

  // Looks at what a completed request says; the error where a Recv got another number of elements.
  absl::Status Check(const MPI_Status& status) const;

  // The rest of the work, when all requests are complete: on this thread, without the token.
  void Finish();

  const Operation& operation() const { return operation_; }

 private:
  absl::Status StartReduceScatter();
  absl::Status StartByBlocks();

  char* input(int64_t element = 0) const;
  char* output(int64_t element = 0) const;
  bool InputIsOutputSlice() const;
  MPI_Request* NewRequest();

  // Calls f(first element, number of elements) for pieces of [0, count), at least once.
  template <typename Function>
  absl::Status ForPieces(int64_t count, int64_t limit, Function f);

  const Operation operation_;
  const MPI_Comm comm_;
  const int rank_;
  const int size_;
  const int64_t max_elements_;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  int64_t element_bytes_ = 0;
  bool result_is_first_block_ = false;  // of the input, to be copied to the output
  std::vector<MPI_Request>* requests_ = nullptr;
};

}  // namespace lockstep::comm::mpi
