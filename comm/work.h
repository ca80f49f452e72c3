#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace lockstep::comm {

class Communicator;

// What a backend completes and a Work looks at. Thread-safe.
class WorkState {
 public:
  virtual ~WorkState() = default;

  // Marks the work done, wakes who waits, then runs the callbacks. Only the first call counts.
  void Finish(absl::Status status);

  bool IsDone() const;

  // Runs `callback` with the work's status when it is done: now, if it is. It must not block.
  void OnDone(std::function<void(const absl::Status&)> callback);

  // Returns when the work is done. Backends whose progress needs a thread override it.
  virtual absl::Status Wait();

  // Whether a Wait() has returned this work's status.
  bool observed() const;

 protected:
  // Blocks until the work is done or `deadline` has passed; whether it is done.
  bool BlockUntil(std::chrono::steady_clock::time_point deadline);

  // The status, which from now on counts as observed. Needs IsDone().
  absl::Status Observe();

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool observed_ = false;
  absl::Status status_;
  std::vector<std::function<void(const absl::Status&)>> callbacks_;
};

// A handle to an operation that a Communicator has been asked for.
//
//   Work work = comm->AllReduce(gradient, ReduceOp::kSum);
//   ...                                  // other work, which must leave the gradient alone
//   absl::Status status = work.Wait();   // now it holds the sum
//
// Copies share one operation. Dropping a Work is legal: the operation goes on, the backend keeps
// its tensors alive until then, and an error nobody waited for is returned by the communicator's
// next call. On the CPU Wait() blocks until the operation is done. On a GPU it makes the current
// stream wait and returns; the host does not block.
class Work {
 public:
  // A work that is done, with `status`.
  explicit Work(absl::Status status = absl::OkStatus());

  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  // Idempotent, and callable from any thread.
  [[nodiscard]] absl::Status Wait() const { return state_->Wait(); }

  bool IsDone() const { return state_->IsDone(); }

  // Issues operations on `next` that start only when this work is done, without a host wait. Their
  // place in the order of `next` is taken now, so all ranks order them alike. Hybrid sharding:
  //
  //   Work work = shard.ReduceScatterInto(mine, gradients, ReduceOp::kSum)
  //                   .Then(replicas, [&](Communicator& replicas) {
  //                     return replicas.AllReduce(mine, ReduceOp::kSum);
  //                   });
  //
  // If this work fails, then so do they.
  Work Then(Communicator& next, const std::function<Work(Communicator&)>& issue) const;

  // For backends.
  const std::shared_ptr<WorkState>& state() const { return state_; }

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace lockstep::comm
