#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/departure.h"
#include "lockstep/comm/operation.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm {

// How far a rank has got, as far as another knows.
struct RankProgress {
  int rank = 0;             // in the communicator asked about
  uint64_t issued = 0;      // sequence number of its last collective, 0 for none
  std::string last_issued;  // its kind, "" for none
  bool silent = false;      // no sign of life: stopped, killed or cut off
  bool left = false;        // has destroyed its communicators
};

// The error of an operation that is past its deadline: DeadlineExceeded, naming the operation,
// `rank` and the ranks that it waits for with what is known of them.
absl::Status DeadlineError(const Operation& operation, const std::string& communicator, int rank,
                           int size, absl::Duration waited,
                           const std::vector<RankProgress>& missing);

class ControlGroup;

// What MPI and NCCL cannot tell: who has not arrived, and that somebody gave up. Each rank has one
// thread that tells the Store, twice a second, that it lives and which operations it issued and
// completed last, and that looks whether another rank has aborted, and, where operations have gone
// on for an interval, left. Two or three small requests an interval and rank; collectives
// themselves only touch atomics.
//
//   ControlPlane plane(store, world_rank);
//   auto group = plane.Join("world", {0, 1, 2, 3}, [&](absl::Status reason) { FailAll(reason); });
//   group->Issued(operation); ... group->Completed();
//   if (late) return group->Deadline(operation, waited);
//
// Destruction waits for nobody, not even for a Store that hangs.
class ControlPlane {
 public:
  struct Options {
    absl::Duration interval = absl::Milliseconds(500);  // between signs of life; 500 ms
  };

  ControlPlane(std::shared_ptr<Store> store, int world_rank, Options options);
  ControlPlane(std::shared_ptr<Store> store, int world_rank);
  ~ControlPlane();

  // Adds a communicator: its name (the same on its ranks, and of no other communicator), its ranks
  // as world ranks, and what to do when any rank aborts; `on_abort` runs once, on another thread.
  std::shared_ptr<ControlGroup> Join(const std::string& name, std::vector<int> world_ranks,
                                     std::function<void(const absl::Status&)> on_abort);

  // For the end of the process: leaves all communicators, like destroying them. Returns as Abort()
  // does.
  void Leave();

  // Tells all ranks, and on_abort of this rank's groups, that this one gave up. The first reason of
  // all ranks stays. Returns when the Store has it, so that the process may exit then, or after two
  // intervals where the Store does not answer.
  void Abort(const absl::Status& reason);

 private:
  friend class ControlGroup;
  struct Shared;
  const std::shared_ptr<Shared> shared_;  // outlives this object where the Store hangs
  std::thread thread_;
};

// A communicator's part of the control plane.
class ControlGroup {
 public:
  ~ControlGroup();

  // Notes that this rank issued, or completed, an operation. Lock-free for collectives.
  void Issued(const Operation& operation);
  void Completed();

  // Whether ranks are known to have left the communicator: known within two intervals while an
  // operation is pending.
  bool SomeLeft() const { return some_left_.load(std::memory_order_acquire); }

  // The error of a pending operation that a rank which left has not issued; OK where there is none.
  absl::Status Deserted(const Operation& operation);

  // The error of `operation`, which has waited for `waited`, after asking who has not arrived;
  // takes a few intervals. Also where the Store does not answer, which is then part of the error.
  absl::Status Deadline(const Operation& operation, absl::Duration waited);

  // The detail mode: blocks until all ranks have issued operation.sequence; FailedPrecondition
  // naming the ranks and operations where they differ, DeadlineExceeded after `timeout`.
  absl::Status CheckSame(const Operation& operation, absl::Duration timeout);

 private:
  friend class ControlPlane;
  ControlGroup(std::shared_ptr<ControlPlane::Shared> shared, std::string name,
               std::vector<int> world_ranks, std::function<void(const absl::Status&)> on_abort);

  // What the group's ranks last said of themselves; nullopt where the Store does not answer in
  // time.
  std::optional<std::vector<std::string>> AskPeers();

  // What this rank has issued.
  IssuedCounts Counts();

  // Asks who has left, if what is pending was so at the last beat.
  absl::Status LookWhoLeft();

  // Has the thread write that this rank leaves, once. Needs Shared::mutex.
  void Leave();

  const std::shared_ptr<ControlPlane::Shared> shared_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const int rank_;
  const std::function<void(const absl::Status&)> on_abort_;
  std::atomic<uint64_t> issued_{0};     // the sequence number of the last collective
  std::atomic<uint64_t> started_{0};    // operations of all kinds
  std::atomic<uint64_t> completed_{0};  // likewise
  std::atomic<bool> some_left_{false};
  std::mutex mutex_;
  IssuedCounts transfers_;             // but for collectives
  std::vector<Departure> departures_;  // of other ranks
  bool left_ = false;
  std::atomic<OperationKind> last_kind_{OperationKind::kBarrier};
};

// Whether LOCKSTEP_COMM_DEBUG=detail is set: backends then call CheckSame() before each collective.
bool DetailMode();

}  // namespace lockstep::comm
