#include "lockstep/comm/mpi/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/mpi/mpi_status.h"

namespace lockstep::comm::mpi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

// A step that takes longer than this moved data: it is worth to make another at once.
constexpr nanoseconds kBusyStep = microseconds(4);

// Operations from this size on end a nap of the thread. To wake it for smaller ones costs more than
// they do, and where a rank waits for them itself, the core that it waits on.
constexpr int64_t kKickBytes = 1 << 20;

}  // namespace

State::State(std::weak_ptr<Group> group, Operation operation, absl::Duration deadline)
    : group_(std::move(group)),
      issued_(Clock::now()),
      deadline_(issued_ + absl::ToChronoMicroseconds(deadline)),
      operation_(std::move(operation)) {}

absl::Status State::Wait() {
  if (!IsDone()) Engine::Get().Drive(*this);
  return Observe();
}

Engine& Engine::Get() {
  static Engine* engine = new Engine;
  return *engine;
}

Work Engine::Issue(const std::shared_ptr<Group>& group, Operation operation) {
  World& world = *group->world;
  const int64_t bytes = operation.payload_bytes();
  std::shared_ptr<State> state;
  {
    std::lock_guard<std::mutex> lock(queues_);
    if (!world.broken.ok()) return Work(world.broken);
    if (IsCollective(operation.kind)) {
      operation.sequence = ++group->collectives;
      if (world.detail) QueueDetailCheck(group, operation);
    } else {
      operation.sequence = ++group->transfers;
    }
    group->control->Issued(operation);
    state = std::make_shared<State>(group, operation, world.options.deadline);
    group->queue.push_back({.operation = std::move(operation), .state = state});
    world.pending.insert(state);
    pending_.fetch_add(1);
    ready_.push_back(group);
    has_ready_ = true;
  }
  TryStep();
  if (!state->IsDone()) WakeThread(/*now=*/bytes >= kKickBytes);
  return Work(std::move(state));
}

// Has a thread compare what the ranks issue, which the group's queue then waits for. Needs queues_.
void Engine::QueueDetailCheck(const std::shared_ptr<Group>& group, const Operation& operation) {
  auto checked = std::make_shared<WorkState>();
  group->queue.push_back({.after = Work(checked)});
  group->checks.push_back([this, group, operation, checked] {
    absl::Status status = group->control->CheckSame(operation, group->world->options.deadline);
    if (!status.ok()) BreakEverywhere(*group->world, status);
    checked->Finish(status);
    MarkReady(group);
  });
  if (group->checks.size() > 1) return;  // a thread is at it
  std::thread([this, group] {
    std::unique_lock<std::mutex> lock(queues_);
    while (!group->checks.empty()) {
      const std::function<void()> check = group->checks.front();
      lock.unlock();
      check();
      lock.lock();
      group->checks.pop_front();
    }
  }).detach();
}

void Engine::MarkReady(const std::shared_ptr<Group>& group) {
  {
    std::lock_guard<std::mutex> lock(queues_);
    ready_.push_back(group);
    has_ready_ = true;
  }
  TryStep();
}

void Engine::StartAfter(const std::shared_ptr<Group>& group, const Work& work) {
  {
    std::lock_guard<std::mutex> lock(queues_);
    group->queue.push_back({.after = work});
  }
  // Holds the group: what follows goes on where its communicator has been destroyed meanwhile.
  work.state()->OnDone([this, group](const absl::Status& status) {
    if (!status.ok()) BreakEverywhere(*group->world, status);
    MarkReady(group);
  });
}

bool Engine::TryStep() {
  std::unique_lock<std::mutex> lock(token_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  std::vector<std::unique_ptr<Active>> done;
  const bool busy = Step(done);
  lock.unlock();
  FinishAll(std::move(done));
  return busy;
}

bool Engine::Step(std::vector<std::unique_ptr<Active>>& done) {
  const Clock::time_point start = Clock::now();
  if (has_ready_.load()) StartQueued(done);
  if (!shared_.empty()) AdvanceShared(done);
  if (!requests_.empty()) TestRequests(done);
  return !done.empty() || Clock::now() - start > kBusyStep;
}

void Engine::StartQueued(std::vector<std::unique_ptr<Active>>& done) {
  while (true) {
    std::shared_ptr<Group> group;
    Queued queued;
    {
      std::lock_guard<std::mutex> lock(queues_);
      if (ready_.empty()) {
        has_ready_ = false;
        return;
      }
      group = std::move(ready_.front());
      ready_.pop_front();
      std::deque<Queued>& queue = group->queue;
      while (!queue.empty() && queue.front().after && queue.front().after->IsDone())
        queue.pop_front();
      if (queue.empty() || queue.front().after) continue;
      queued = std::move(queue.front());
      queue.pop_front();
      if (!queue.empty())
        ready_.push_back(group);  // it has lost its turn if something held it back
    }
    StartOne(group, std::move(queued), done);
  }
}

void Engine::StartOne(const std::shared_ptr<Group>& group, Queued queued,
                      std::vector<std::unique_ptr<Active>>& done) {
  auto active = std::make_unique<Active>();
  active->transfer = std::make_unique<Transfer>(*std::move(queued.operation), group->comm,
                                                group->internal, group->shared.get(), group->rank,
                                                group->size, group->world->options);
  active->state = std::move(queued.state);
  active->group = group;
  Requests requests;
  active->status = active->transfer->Start(requests);
  if (active->transfer->advances()) {
    shared_.push_back(std::move(active));
    return;
  }
  if (!active->status.ok() || requests.requests.empty()) {
    done.push_back(std::move(active));
    return;
  }
  AddRequests(*active, requests);
  active_.push_back(std::move(active));
}

void Engine::AddRequests(Active& active, const Requests& requests) {
  active.outstanding += static_cast<int>(requests.requests.size());
  for (size_t i = 0; i < requests.requests.size(); ++i) {
    requests_.push_back(requests.requests[i]);
    owners_.push_back({&active, requests.slots[i]});
  }
}

void Engine::AdvanceShared(std::vector<std::unique_ptr<Active>>& done) {
  for (auto it = shared_.begin(); it != shared_.end();) {
    Active& active = **it;
    absl::StatusOr<bool> complete = false;
    // After an error of its world other ranks may still touch the tensors: it stays as it is.
    if (!active.state->IsDone()) complete = active.transfer->Advance();
    active.status = complete.status();
    if (complete.ok() && !*complete) {
      ++it;
      continue;
    }
    done.push_back(std::move(*it));
    it = shared_.erase(it);
  }
}

void Engine::TestRequests(std::vector<std::unique_ptr<Active>>& done) {
  const int count = static_cast<int>(requests_.size());
  indices_.resize(count);
  statuses_.resize(count);
  int completed = 0;
  const int code =
      MPI_Testsome(count, requests_.data(), &completed, indices_.data(), statuses_.data());
  if (completed == MPI_UNDEFINED || completed == 0) return;
  for (int i = 0; i < completed; ++i) {
    const Owner owner = std::exchange(owners_[indices_[i]], Owner{nullptr, 0});
    Active& active = *owner.active;
    --active.outstanding;
    if (!active.status.ok()) continue;
    const int error = code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
    if (error != MPI_SUCCESS) {
      active.status = ToStatus(error, Name(active.transfer->operation().kind));
      continue;
    }
    Requests more;
    active.status = active.transfer->Completed(owner.slot, statuses_[i], more);
    AddRequests(active, more);
  }
  size_t kept = 0;
  for (size_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i].active == nullptr || !owners_[i].active->status.ok()) continue;
    owners_[kept] = owners_[i];
    requests_[kept++] = requests_[i];
  }
  owners_.resize(kept);
  requests_.resize(kept);
  for (auto it = active_.begin(); it != active_.end();) {
    if ((*it)->outstanding == 0 || !(*it)->status.ok()) {
      done.push_back(std::move(*it));
      it = active_.erase(it);
    } else {
      ++it;
    }
  }
}

void Engine::FinishAll(std::vector<std::unique_ptr<Active>> done) {
  for (std::unique_ptr<Active>& active : done) {
    const Operation& operation = active->transfer->operation();
    if (active->status.ok()) {
      if (active->state->IsDone()) continue;  // its world broke while MPI was still at it
      active->transfer->Finish();
      active->group->control->Completed();
    } else {
      active->status = absl::Status(
          active->status.code(),
          absl::StrCat(operation.ToString(), " of communicator ", active->group->name, " on rank ",
                       active->group->rank, " failed: ", std::string{active->status.message()},
                       "; have the ranks issued the same? LOCKSTEP_COMM_DEBUG=detail checks that"));
      BreakEverywhere(*active->group->world, active->status);
    }
    if (Forget(active->state)) active->state->Finish(active->status);
    // After an error MPI may still write to the tensors.
    if (!active->status.ok()) static_cast<void>(active.release());
  }
}

// Takes a state off its world's list; false where that has been done.
bool Engine::Forget(const std::shared_ptr<State>& state) {
  const std::shared_ptr<Group> group = state->group_.lock();
  std::lock_guard<std::mutex> lock(queues_);
  if (group == nullptr || group->world->pending.erase(state) == 0) return false;
  state->operation_ = Operation();
  pending_.fetch_sub(1);
  return true;
}

absl::Status Engine::BrokenStatus(World& world) {
  std::lock_guard<std::mutex> lock(queues_);
  return world.broken;
}

uint64_t Engine::NextSplit(Group& group) {
  std::lock_guard<std::mutex> lock(queues_);
  return ++group.splits;
}

bool Engine::Break(World& world, const absl::Status& reason) {
  std::set<std::shared_ptr<State>> failed;
  {
    std::lock_guard<std::mutex> lock(queues_);
    if (!world.broken.ok()) return false;
    world.broken = reason;
    broken_ = true;
    failed.swap(world.pending);
    pending_.fetch_sub(static_cast<int>(failed.size()));
    for (const auto& state : failed) {
      if (std::shared_ptr<Group> group = state->group_.lock()) group->queue.clear();
      state->operation_ = Operation();
    }
  }
  // What MPI has started stays in active_, tensors and all: MPI cannot be told to stop.
  for (const auto& state : failed) state->Finish(reason);
  return true;
}

void Engine::BreakEverywhere(World& world, const absl::Status& reason) {
  if (Break(world, reason)) world.plane->Abort(reason);
}

absl::Status Engine::WithToken(const std::function<absl::Status()>& call) {
  std::lock_guard<std::mutex> lock(token_);
  return call();
}

void Engine::AddWorld(const std::shared_ptr<World>& world) {
  std::lock_guard<std::mutex> lock(queues_);
  worlds_.push_back(world);
}

}  // namespace lockstep::comm::mpi
