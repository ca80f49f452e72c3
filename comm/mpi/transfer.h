#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/mpi/exchange.h"
#include "lockstep/comm/mpi/options.h"
#include "lockstep/comm/mpi/shared_transfer.h"
#include "lockstep/comm/operation.h"

namespace lockstep::comm::mpi {

// One operation, through shared memory or as MPI calls: nonblocking ones of MPI 3.1. The calls of
// this class need the progress token (see Engine), but for Finish().
class Transfer {
 public:
  // `internal` connects the same ranks as `comm`, and so does `shared` unless it is null.
  Transfer(Operation operation, MPI_Comm comm, MPI_Comm internal, SharedGroup* shared, int rank,
           int size, const Options& options);

  // Starts the calls; `requests` receives those to complete.
  absl::Status Start(Requests& requests);

  // Whether it goes through shared memory: there are no requests then, but calls of Advance() until
  // that returns true.
  bool advances() const { return shared_ != nullptr; }
  absl::StatusOr<bool> Advance() { return shared_->Advance(); }

  // One of the requests is complete; may start further ones.
  absl::Status Completed(int slot, const MPI_Status& status, Requests& requests);

  // The rest of the work, when all requests are complete: on this thread, without the token.
  void Finish();

  const Operation& operation() const { return operation_; }

 private:
  absl::Status StartReduceScatter(Requests& requests);
  absl::Status StartByBlocks(Requests& requests);
  absl::Status CheckReceived(const MPI_Status& status) const;

  char* input(int64_t element = 0) const;
  char* output(int64_t element = 0) const;
  bool InputIsOutputSlice() const;

  // Calls f(first element, number of elements) for pieces of [0, count), at least once.
  template <typename Function>
  absl::Status ForPieces(int64_t count, int64_t limit, Function f);

  const Operation operation_;
  const MPI_Comm comm_;
  const MPI_Comm internal_;
  SharedGroup* const shared_group_;
  const int rank_;
  const int size_;
  const int64_t max_elements_;
  const int64_t exchange_bytes_;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  int64_t element_bytes_ = 0;
  bool result_is_first_block_ = false;  // of the input, to be copied to the output
  // What carries the operation out, where it is not MPI's own.
  std::unique_ptr<Exchange> exchange_;
  std::unique_ptr<SharedTransfer> shared_;
};

}  // namespace lockstep::comm::mpi
