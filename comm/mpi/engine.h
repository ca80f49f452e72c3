#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "lockstep/comm/control_plane.h"
#include "lockstep/comm/mpi/options.h"
#include "lockstep/comm/mpi/shared_group.h"
#include "lockstep/comm/mpi/transfer.h"
#include "lockstep/comm/operation.h"
#include "lockstep/comm/work.h"
#include "lockstep/tools/trace/flight_recorder.h"

// How operations are carried out. Private to this folder.
namespace lockstep::comm::mpi {

struct Group;
struct World;

// One operation's completion. Waiting drives the engine.
class State : public WorkState {
 public:
  State(std::weak_ptr<Group> group, Operation operation, absl::Duration deadline);

  absl::Status Wait() override;

  // Sleeps until the work is done, and at most for `duration`.
  void Sleep(std::chrono::nanoseconds duration) {
    BlockUntil(std::chrono::steady_clock::now() + duration);
  }

 private:
  friend class Engine;
  const std::weak_ptr<Group> group_;
  const std::chrono::steady_clock::time_point issued_;
  const std::chrono::steady_clock::time_point deadline_;
  Operation operation_;  // for messages; empty when done; guarded by Engine::queues_
};

// What waits for its turn in a group: an operation, or an earlier work to be done.
struct Queued {
  std::optional<Work> after;
  std::optional<Operation> operation;
  std::shared_ptr<State> state;
};

// What the communicators that stem from one Create() or Adopt() share.
struct World {
  Options options;
  std::shared_ptr<Store> store;        // of the control plane
  std::shared_ptr<Store> users_store;  // a part of it
  int rank = 0;
  std::vector<char*> arenas;  // by rank; see ShareArenas
  bool detail = DetailMode();
  std::shared_ptr<trace::FlightRecorder> flight_recorder =
      std::make_shared<trace::FlightRecorder>();
  std::unique_ptr<ControlPlane> plane;

  // Guarded by Engine::queues_.
  absl::Status broken;
  std::set<std::shared_ptr<State>> pending;
};

// A communicator as the engine sees it. Its MPI communicators are never freed: that is a collective
// call, and destruction must not be one.
struct Group {
  std::shared_ptr<World> world;
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm internal = MPI_COMM_NULL;  // for what no user asked for
  std::string name;
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;
  std::unique_ptr<SharedGroup> shared;  // null where the ranks share no memory
  std::shared_ptr<ControlGroup> control;

  // Guarded by Engine::queues_.
  uint64_t collectives = 0;
  uint64_t transfers = 0;
  uint64_t splits = 0;
  std::deque<Queued> queue;
  std::deque<std::function<void()>> checks;  // of the detail mode; the first is at work
};

// Starts operations in the order they were issued in and completes them: one for the process, as
// MPI is. Open MPI makes no progress by itself, so that somebody has to call it. A mutex is the
// token that allows to; all MPI calls of this folder are made with it:
//
//  - whoever issues an operation takes the token, if it is free, and starts it;
//  - whoever waits takes it again and again until his operation is done;
//  - a thread does likewise while operations are pending and nobody waits; else it sleeps.
//
// A small operation that is waited for at once thus never changes threads. Who waits gives way to
// those who compute: it spins for some microseconds, then yields, then sleeps for 1 % of the time
// that it has waited.
class Engine {
 public:
  // Lives as long as the process.
  static Engine& Get();

  Work Issue(const std::shared_ptr<Group>& group, Operation operation);
  void StartAfter(const std::shared_ptr<Group>& group, const Work& work);

  // Returns when the work is done or past its deadline, which breaks its world.
  void Drive(State& state);

  // Fails everything of `world`, pending and to come, here. False where it was broken already: the
  // first reason stays.
  bool Break(World& world, const absl::Status& reason);

  // The same on all ranks.
  void BreakEverywhere(World& world, const absl::Status& reason);

  absl::Status BrokenStatus(World& world);

  uint64_t NextSplit(Group& group);

  void AddWorld(const std::shared_ptr<World>& world);

  // Runs MPI calls with the token.
  absl::Status WithToken(const std::function<absl::Status()>& call);

  // Completes a request that the engine does not know, for a Split. Fails where `world` breaks
  // first, DeadlineExceeded with no message past `deadline`.
  absl::Status Complete(World& world, MPI_Request request, absl::Duration deadline);

  // Whether ranks outnumber cores: waiting then does not spin.
  void set_oversubscribed(bool value) { oversubscribed_ = value; }

  // At the end of the process: completes what is pending, and ends the thread. False where
  // something was broken, after which MPI must not be finalized.
  bool Shutdown();

 private:
  struct Active {
    std::unique_ptr<Transfer> transfer;
    std::shared_ptr<State> state;
    std::shared_ptr<Group> group;
    int outstanding = 0;  // requests
    absl::Status status;
  };
  struct Owner {
    Active* active;
    int slot;
  };
  class Pause;

  Engine() = default;

  // Starts and completes what can be, if the token is free. Whether it was, and MPI had work to do.
  bool TryStep();
  bool Step(std::vector<std::unique_ptr<Active>>& done);  // with the token
  void StartQueued(std::vector<std::unique_ptr<Active>>& done);
  void StartOne(const std::shared_ptr<Group>& group, Queued queued,
                std::vector<std::unique_ptr<Active>>& done);
  void AdvanceShared(std::vector<std::unique_ptr<Active>>& done);
  void TestRequests(std::vector<std::unique_ptr<Active>>& done);
  void AddRequests(Active& active, const Requests& requests);
  void FinishAll(std::vector<std::unique_ptr<Active>> done);
  bool Forget(const std::shared_ptr<State>& state);

  void QueueDetailCheck(const std::shared_ptr<Group>& group, const Operation& operation);
  void MarkReady(const std::shared_ptr<Group>& group);
  void Expire(State& state);
  void AskWhoIsMissing(State& state);  // needs expiry_
  void ExpireOverdue();
  void FailDeserted();

  void LeaveWorlds();

  void RunThread();
  void WakeThread(bool now);  // `now`: even from a short nap

  std::mutex token_;
  // Guarded by token_. requests_[i] belongs to owners_[i].
  std::vector<MPI_Request> requests_;
  std::vector<Owner> owners_;
  std::list<std::unique_ptr<Active>> active_;
  std::list<std::unique_ptr<Active>> shared_;  // those that go through shared memory
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;

  std::mutex queues_;                         // taken after token_
  std::deque<std::shared_ptr<Group>> ready_;  // each time that a group may have something to start
  std::vector<std::weak_ptr<World>> worlds_;

  std::atomic<int> pending_{0};  // states that are not done
  std::atomic<int> waiting_{0};  // threads in Drive()
  std::atomic<bool> has_ready_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> oversubscribed_{false};

  std::mutex thread_mutex_;
  std::condition_variable wake_;
  std::thread thread_;
  std::atomic<bool> asleep_{true};  // or not started yet
  bool kicked_ = false;
  bool stop_ = false;

  std::mutex expiry_;  // one thread at a time asks who is missing
};

}  // namespace lockstep::comm::mpi
