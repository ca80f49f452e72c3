// How the engine's threads wait: for operations, and for each other.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/mpi/engine.h"
#include "lockstep/comm/mpi/mpi_status.h"

namespace lockstep::comm::mpi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr nanoseconds kSpin = microseconds(3);   // waiting: first, without giving up the core
constexpr nanoseconds kYield = milliseconds(1);  // then, until here, with sched_yield
constexpr nanoseconds kMinSleep = microseconds(20);
constexpr nanoseconds kMaxSleep = milliseconds(1);

// The thread: between two looks while somebody waits, or nothing is pending but something was of
// late. It looks for that only briefly: each look interrupts a rank that computes on this core.
constexpr nanoseconds kNap = microseconds(100);
constexpr nanoseconds kLinger = microseconds(200);
constexpr milliseconds kExpiryInterval(100);

nanoseconds SleepAfter(nanoseconds waited) {
  return std::clamp<nanoseconds>(waited / 100, kMinSleep, kMaxSleep);
}

void Relax() { __builtin_ia32_pause(); }

}  // namespace

// How a waiting thread spends the time between two steps.
class Engine::Pause {
 public:
  explicit Pause(bool spin) : spin_(spin ? kSpin : nanoseconds(0)) {}

  // How long to sleep before the next step; zero: not at all.
  nanoseconds Next(bool busy) {
    const Clock::time_point now = Clock::now();
    if (std::exchange(slept_, false)) return nanoseconds(0);  // with cold caches all steps are long
    if (busy) {
      // To take turns with who computes would cost both their caches.
      idle_since_ = now;
      return nanoseconds(0);
    }
    const nanoseconds idle = now - idle_since_;
    if (idle < spin_) {
      Relax();
    } else if (idle < kYield) {
      sched_yield();
    } else {
      slept_ = true;
      return SleepAfter(idle);
    }
    return nanoseconds(0);
  }

 private:
  nanoseconds spin_;
  bool slept_ = false;
  Clock::time_point idle_since_ = Clock::now();
};

absl::Status Engine::Complete(World& world, MPI_Request request, absl::Duration deadline) {
  const Clock::time_point end = Clock::now() + absl::ToChronoMicroseconds(deadline);
  Pause pause(!oversubscribed_);
  for (int done = 0;;) {
    absl::Status status = WithToken(
        [&] { return LOCKSTEP_MPI_STATUS(MPI_Test(&request, &done, MPI_STATUS_IGNORE)); });
    if (!status.ok() || done != 0) return status;
    if (absl::Status broken = BrokenStatus(world); !broken.ok()) return broken;
    if (Clock::now() > end) return absl::DeadlineExceededError("");
    const bool busy = TryStep();
    if (const nanoseconds sleep = pause.Next(busy); sleep != nanoseconds(0)) {
      std::this_thread::sleep_for(sleep);
    }
  }
}

void Engine::Drive(State& state) {
  waiting_.fetch_add(1);
  Pause pause(!oversubscribed_);
  while (!state.IsDone()) {
    const bool busy = TryStep();
    if (state.IsDone()) break;
    if (Clock::now() > state.deadline_) {
      waiting_.fetch_sub(1);  // asking who is missing takes a while: the thread makes progress then
      Expire(state);
      waiting_.fetch_add(1);
    }
    const nanoseconds sleep = pause.Next(busy);
    if (sleep != nanoseconds(0)) state.Sleep(sleep);
  }
  waiting_.fetch_sub(1);
}

void Engine::Expire(State& state) {
  const std::lock_guard<std::mutex> lock(expiry_);
  AskWhoIsMissing(state);
}

void Engine::AskWhoIsMissing(State& state) {
  const std::shared_ptr<Group> group = state.group_.lock();
  if (group == nullptr || state.IsDone()) return;
  Operation operation;
  {
    std::lock_guard<std::mutex> queues_lock(queues_);
    operation = state.operation_;
  }
  const absl::Status late =
      group->control->Deadline(operation, absl::FromChrono(Clock::now() - state.issued_));
  if (!state.IsDone()) BreakEverywhere(*group->world, late);
}

void Engine::ExpireOverdue() {
  // Who waits may be at it, which takes a while: MPI must go on meanwhile.
  const std::unique_lock<std::mutex> expiry(expiry_, std::try_to_lock);
  if (!expiry.owns_lock()) return;
  std::vector<std::shared_ptr<State>> late;
  {
    std::lock_guard<std::mutex> lock(queues_);
    const Clock::time_point now = Clock::now();
    for (const auto& weak : worlds_) {
      const std::shared_ptr<World> world = weak.lock();
      if (world == nullptr) continue;
      for (const auto& state : world->pending) {
        if (now > state->deadline_) late.push_back(state);
      }
    }
  }
  std::sort(late.begin(), late.end(),
            [](const auto& a, const auto& b) { return a->issued_ < b->issued_; });
  for (const auto& state : late) AskWhoIsMissing(*state);
}

// Fails the worlds in which an operation waits for a rank that has left without issuing it.
void Engine::FailDeserted() {
  struct Waiting {
    std::shared_ptr<Group> group;
    Operation operation;
  };
  std::vector<Waiting> waiting;
  {
    std::lock_guard<std::mutex> lock(queues_);
    for (const auto& weak : worlds_) {
      const std::shared_ptr<World> world = weak.lock();
      if (world == nullptr) continue;
      for (const auto& state : world->pending) {
        std::shared_ptr<Group> group = state->group_.lock();
        if (group == nullptr || !group->control->SomeLeft()) continue;
        waiting.push_back({std::move(group), state->operation_});
      }
    }
  }
  std::sort(waiting.begin(), waiting.end(), [](const auto& a, const auto& b) {
    return a.operation.sequence < b.operation.sequence;
  });
  for (const auto& [group, operation] : waiting) {
    const absl::Status status = group->control->Deserted(operation);
    if (!status.ok()) BreakEverywhere(*group->world, status);
  }
}

void Engine::WakeThread(bool now) {
  if (!now && !asleep_.load()) return;
  std::lock_guard<std::mutex> lock(thread_mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { RunThread(); });
  asleep_ = false;
  kicked_ = true;
  wake_.notify_one();
}

void Engine::RunThread() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, /*oldset=*/nullptr);  // handlers run on the program's threads
  prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; the default of 50 us makes naps twice as long
  Clock::time_point last_pending = Clock::now();
  Clock::time_point last_drive = Clock::now();
  Clock::time_point last_check = Clock::now();
  Pause pause(/*spin=*/false);
  std::unique_lock<std::mutex> lock(thread_mutex_);
  while (!stop_) {
    const Clock::time_point now = Clock::now();
    const bool pending = pending_.load() > 0;
    if (pending) last_pending = now;
    if (now - last_pending > kLinger) {
      asleep_ = true;
      // What was issued before it could see that we sleep.
      if (pending_.load() > 0) asleep_ = false;
      wake_.wait(lock, [this] { return stop_ || !asleep_.load(); });
      last_pending = Clock::now();
    }
    if (std::exchange(kicked_, false)) {
      last_drive = Clock::now();
      pause = Pause(/*spin=*/false);
    }
    lock.unlock();
    nanoseconds nap;
    if (pending && waiting_.load() == 0) {
      nap = pause.Next(TryStep());
      last_drive = Clock::now();
    } else {
      nap = std::clamp<nanoseconds>((now - last_drive) / 20, kNap, kMaxSleep);
    }
    if (pending && now - last_check > kExpiryInterval) {
      FailDeserted();
      ExpireOverdue();
      last_check = Clock::now();
    }
    lock.lock();
    if (nap != nanoseconds(0)) wake_.wait_for(lock, nap, [this] { return stop_ || kicked_; });
  }
}

// Others may still wait for operations of communicators that this process has not destroyed.
void Engine::LeaveWorlds() {
  std::vector<std::shared_ptr<World>> worlds;
  {
    std::lock_guard<std::mutex> lock(queues_);
    for (const auto& weak : worlds_) worlds.push_back(weak.lock());
  }
  for (const auto& world : worlds) {
    if (world != nullptr) world->plane->Leave();
  }
}

bool Engine::Shutdown() {
  Pause pause(/*spin=*/false);
  while (pending_.load() > 0 && !broken_.load()) {
    const nanoseconds sleep = pause.Next(TryStep());
    FailDeserted();
    ExpireOverdue();
    if (sleep != nanoseconds(0)) std::this_thread::sleep_for(sleep);
  }
  LeaveWorlds();
  {
    std::lock_guard<std::mutex> lock(thread_mutex_);
    stop_ = true;
    asleep_ = false;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  return !broken_.load();
}

}  // namespace lockstep::comm::mpi
