#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "lockstep/comm/control_plane.h"
#include "lockstep/comm/nccl/handle.h"
#include "lockstep/comm/nccl/library.h"
#include "lockstep/comm/nccl/options.h"
#include "lockstep/comm/operation.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/work.h"
#include "lockstep/tools/trace/flight_recorder.h"

// What a rank's communicators share. Private to this folder.
namespace lockstep::comm::nccl {

struct Group;
struct World;

// One operation of this rank. Its event is recorded twice: on the caller's stream when the
// operation is issued, for its inputs, and on the communicator's behind it.
class State : public WorkState {
 public:
  // Records the event on the current stream. Check prepared().
  State(std::shared_ptr<Group> group, Operation operation);
  ~State() override;

  // Makes the current stream wait; of a Barrier, the host. Where the operation is not in its
  // stream yet the host waits for that.
  absl::Status Wait() override;

  // Waits until the operation is in its stream or done, or `timeout` is over.
  void AwaitStarted(absl::Duration timeout);

  // Makes the host wait.
  absl::Status WaitOnHost();

  const absl::Status& prepared() const { return prepared_; }

  // For the lane: the operation is in the handle's stream now.
  absl::Status Started(const Handle& handle);
  bool started() const { return handle() != nullptr; }
  const Handle* handle() const { return handle_.load(); }  // null until it is started

  // Finishes the work if it has ended on the device. An error is CUDA's.
  absl::Status Poll();

  // Finishes it with an error. The tensors stay, as the device may still use them.
  void Fail(const absl::Status& reason);

  // Whether the device has let go of the tensors of a work that failed.
  bool Released();

  Operation operation();
  std::shared_ptr<Group> group();  // null when it is done
  Event event() const { return event_; }
  absl::Duration age() const;

 private:
  void DropTensors();

  // `status` with what the operation is and on which rank.
  absl::Status Named(const absl::Status& status);

  const std::shared_ptr<World> world_;
  const absl::Time issued_;
  const Stream origin_;
  Event event_ = nullptr;
  absl::Status prepared_;
  std::atomic<const Handle*> handle_{nullptr};
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  std::condition_variable started_or_done_;
  std::shared_ptr<Group> group_;
  Operation operation_;
};

// What the communicators that stem from one creation share, on one rank. Its watchdog (watchdog.h)
// lives until all of them are destroyed and what they issued is done.
struct World : std::enable_shared_from_this<World> {
  std::shared_ptr<Library> library;
  std::shared_ptr<Store> store;        // of the control plane, and for unique ids
  std::shared_ptr<Store> users_store;  // a part of it
  Options options;
  int rank = 0;
  bool detail = DetailMode();
  std::shared_ptr<trace::FlightRecorder> flight_recorder =
      std::make_shared<trace::FlightRecorder>();
  std::unique_ptr<ControlPlane> plane;  // reset by the watchdog, at its end

  // Fails everything, pending and to come, here; the watchdog then aborts NCCL's communicators.
  // Where it was broken already the first reason stays. Must not be called with a group's mutex.
  void Break(const absl::Status& reason);

  // The same on all ranks. The others may be told another reason, as they are told by whom.
  void BreakEverywhere(const absl::Status& reason) { BreakEverywhere(reason, reason); }
  void BreakEverywhere(const absl::Status& reason, const absl::Status& told);

  bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }
  absl::Status BrokenStatus();

  // OK until the world is broken, or until `deadline`, which is an error that the caller words.
  Handle::Stop StopAt(absl::Time deadline);

  // Adds what the watchdog looks after; errors where the world is broken.
  absl::Status AddPending(const std::shared_ptr<State>& state);
  absl::Status AddHandle(const std::shared_ptr<Handle>& handle);

  void RemoveHandle(const std::shared_ptr<Handle>& handle);

  bool HasPending();

  // How long the end of a communicator may take: ranks that have gone do not take what is sent.
  absl::Duration MaxFlush() const { return std::min(options.deadline, absl::Seconds(30)); }

  void AddGroup();
  void RemoveGroup();

  // For the watchdog.
  std::mutex mutex;
  std::condition_variable wake;
  absl::Status broken;
  bool must_abort = false;
  std::vector<std::shared_ptr<State>> pending;
  std::vector<std::shared_ptr<State>> failed;  // whose tensors the device may still use
  std::set<std::shared_ptr<Handle>> handles;
  int groups = 0;
  int breaking = 0;  // threads that use the plane

 private:
  // Whether it was not broken before; `to_fail` is then what was pending.
  bool MarkBroken(const absl::Status& reason, std::vector<std::shared_ptr<State>>& to_fail);

  std::atomic<bool> is_broken_{false};
};

}  // namespace lockstep::comm::nccl
