#include "lockstep/comm/nccl/handle.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lockstep::comm::nccl {
namespace {

constexpr absl::Duration kMinPause = absl::Microseconds(20);
constexpr absl::Duration kMaxPause = absl::Milliseconds(2);

// How long Abort waits for a call of another thread to notice it. One that does not is inside NCCL,
// and then only the abort itself ends it.
constexpr absl::Duration kNotice = absl::Milliseconds(500);

absl::StatusCode CodeOf(Result result) {
  switch (result) {
    case Result::kRemoteError:
    case Result::kSystemError:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<Handle>> Handle::Make(std::shared_ptr<Library> library) {
  absl::StatusOr<Stream> stream = library->CreateStream();
  if (!stream.ok()) return stream.status();
  return std::shared_ptr<Handle>(new Handle(std::move(library), *stream));
}

Handle::Handle(std::shared_ptr<Library> library, Stream stream)
    : library_(std::move(library)), stream_(stream) {}

Handle::~Handle() { library_->DestroyStream(stream_); }

absl::Status Handle::Error(Result result, Comm comm) {
  std::string message = absl::StrCat("NCCL: ", library_->ErrorString(result));
  const std::string last = library_->LastError(comm);
  if (!last.empty()) absl::StrAppend(&message, ": ", last);
  return absl::Status(CodeOf(result), message);
}

absl::Status Handle::Finish(Result result, Comm comm, const Stop& stop) {
  absl::Duration pause = kMinPause;
  while (result == Result::kInProgress) {
    if (aborted_.load()) return absl::AbortedError("aborted");
    if (absl::Status status = stop(); !status.ok()) return status;
    const Result asked = library_->GetAsyncError(comm, &result);
    if (asked != Result::kSuccess) return Error(asked, comm);
    if (result != Result::kInProgress) break;
    absl::SleepFor(pause);
    pause = std::min(pause * 2, kMaxPause);
  }
  if (result == Result::kSuccess) return absl::OkStatus();
  // Then it is freed, and what the call returns is how it was ended.
  if (aborted_.load()) return absl::AbortedError("aborted");
  return Error(result, comm);
}

absl::Status Handle::Init(const UniqueId& id, int size, int rank, const Stop& stop) {
  std::lock_guard<std::mutex> lock(use_);
  if (aborted_.load()) return absl::AbortedError("aborted");
  const Result result = library_->CommInitRank(&joining_, size, id, rank);
  const Comm comm = std::atomic_ref(joining_).exchange(nullptr);
  comm_ = comm;
  return aborted_.load() ? AbortLate() : Finish(result, comm, stop);
}

absl::Status Handle::AbortLate() {
  const Comm late = comm_.exchange(nullptr);
  if (late != nullptr) library_->CommAbort(late);
  return absl::AbortedError("aborted");
}

absl::Status Handle::Split(int color, int key, Handle* part, const Stop& stop) {
  std::lock_guard<std::mutex> lock(use_);
  const Comm comm = comm_.load();
  if (aborted_.load() || comm == nullptr) return absl::AbortedError("aborted");
  made_ = nullptr;
  const Result result = library_->CommSplit(comm, color, key, &made_);
  absl::Status status = Finish(result, comm, stop);
  if (!status.ok() || part == nullptr) return status;
  std::lock_guard<std::mutex> part_lock(part->use_);
  const Comm made = std::atomic_ref(made_).exchange(nullptr);
  if (made == nullptr) return absl::AbortedError("aborted");
  part->comm_ = made;
  return part->aborted_.load() ? part->AbortLate() : part->Finish(Result::kInProgress, made, stop);
}

absl::Status Handle::Call(const std::function<Result(Comm)>& call, const Stop& stop) {
  std::lock_guard<std::mutex> lock(use_);
  const Comm comm = comm_.load();
  if (aborted_.load() || comm == nullptr) return absl::AbortedError("aborted");
  return Finish(call(comm), comm, stop);
}

absl::Status Handle::AsyncError() {
  // Who holds the lock looks himself.
  std::unique_lock<std::mutex> lock(use_, std::try_to_lock);
  if (!lock.owns_lock()) return absl::OkStatus();
  const Comm comm = comm_.load();
  const bool closing = closing_since_ != absl::InfiniteFuture();  // others may have gone already
  if (aborted_.load() || closing || comm == nullptr) return absl::OkStatus();
  Result error = Result::kSuccess;
  const Result asked = library_->GetAsyncError(comm, &error);
  if (asked != Result::kSuccess) return Error(asked, comm);
  if (error == Result::kSuccess || error == Result::kInProgress) return absl::OkStatus();
  return Error(error, comm);
}

bool Handle::TryClose(absl::Duration max_flush) {
  std::unique_lock<std::mutex> lock(use_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  const Comm comm = comm_.load();
  if (aborted_.load() || comm == nullptr) return true;
  Result state = Result::kSuccess;
  if (closing_since_ == absl::InfiniteFuture()) {
    closing_since_ = absl::Now();
    state = library_->CommFinalize(comm);
  } else if (library_->GetAsyncError(comm, &state) != Result::kSuccess) {
    state = Result::kInternalError;
  }
  if (state == Result::kInProgress && absl::Now() - closing_since_ < max_flush) return false;
  if (state == Result::kSuccess) {
    comm_ = nullptr;
    library_->CommDestroy(comm);
    return true;
  }
  lock.unlock();
  Abort();  // destroying a communicator that is not flushed may never return
  return true;
}

void Handle::Abort() {
  if (aborted_.exchange(true)) return;
  // Not a std::timed_mutex: the thread sanitizer of GCC 12 does not see its try_lock_for.
  std::unique_lock<std::mutex> lock(use_, std::try_to_lock);
  for (const absl::Time end = absl::Now() + kNotice; !lock.owns_lock() && absl::Now() < end;) {
    absl::SleepFor(kMinPause);
    lock.try_lock();
  }
  Comm comm = comm_.exchange(nullptr);
  if (comm == nullptr) comm = std::atomic_ref(joining_).exchange(nullptr);
  if (comm != nullptr) library_->CommAbort(comm);
  const Comm part = std::atomic_ref(made_).exchange(nullptr);  // of a Split that was given up
  if (part != nullptr) library_->CommAbort(part);
}

}  // namespace lockstep::comm::nccl
