#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/nccl/library.h"

namespace lockstep::comm::nccl {

// A communicator of NCCL's and the stream that it works on. It is closed by TryClose or Abort, not
// by its destructor: closing may take NCCL a while, which is its lane's affair (lane.h).
//
// Thread-safe. Abort may come in the middle of a call of another thread, which then returns.
class Handle {
 public:
  // Why a call that does not end should be given up; OK while it should not. Asked again and again.
  using Stop = std::function<absl::Status()>;

  static absl::StatusOr<std::shared_ptr<Handle>> Make(std::shared_ptr<Library> library);
  ~Handle();

  // Joins `size` ranks, which all call it with one id. Blocks until they have, or `stop` says why
  // not.
  absl::Status Init(const UniqueId& id, int size, int rank, const Stop& stop);

  // Joins those of this handle's ranks that give the same color, from 0 up, into `part`; with
  // color -1 only takes part. Blocks likewise.
  absl::Status Split(int color, int key, Handle* part, const Stop& stop);

  // Runs calls of NCCL on comm(), which in non-blocking mode are over only when NCCL says so, and
  // waits for that. The error ends with NCCL's last one.
  absl::Status Call(const std::function<Result(Comm)>& call, const Stop& stop);

  // What went wrong in the background; OK where nothing did, and where it is being closed.
  absl::Status AsyncError();

  // Takes a step in closing a communicator on which nothing is pending: flush, then destroy.
  // Whether it is closed. Where flushing takes longer than `max_flush` it is aborted: other ranks
  // may have gone.
  bool TryClose(absl::Duration max_flush);

  // Makes its kernels end and frees it. Idempotent.
  void Abort();

  bool aborted() const { return aborted_.load(); }
  Library& library() const { return *library_; }
  Stream stream() const { return stream_; }

 private:
  Handle(std::shared_ptr<Library> library, Stream stream);

  // Needs use_.
  absl::Status Finish(Result result, Comm comm, const Stop& stop);
  absl::Status Error(Result result, Comm comm);

  // Frees a communicator that an Abort came too early for, if it has not done so.
  absl::Status AbortLate();

  const std::shared_ptr<Library> library_;
  const Stream stream_;
  std::mutex use_;            // held during calls, but for an Abort that waited long enough
  std::atomic<Comm> comm_{};  // null before Init, and when it is closed
  std::atomic<bool> aborted_{false};
  Comm joining_ = nullptr;  // where NCCL writes it during Init, which may not return
  Comm made_ = nullptr;     // where NCCL writes a part, perhaps after the call was given up
  absl::Time closing_since_ = absl::InfiniteFuture();
};

}  // namespace lockstep::comm::nccl
