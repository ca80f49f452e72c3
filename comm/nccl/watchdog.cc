#include "lockstep/comm/nccl/watchdog.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/background.h"
#include "lockstep/comm/nccl/group.h"

namespace lockstep::comm::nccl {
namespace {

constexpr absl::Duration kCheckInterval = absl::Milliseconds(50);  // of errors, ranks that left
constexpr absl::Duration kMaxRelease = absl::Seconds(5);

class Watchdog {
 public:
  explicit Watchdog(std::shared_ptr<World> world) : world_(std::move(world)) {}

  void Run() {
    while (!Ended()) {
      if (TakeAbort()) {
        WriteFlightRecord();
        AbortHandles();
      }
      Poll();
      Release();
      const absl::Time now = absl::Now();
      if (now - last_check_ < kCheckInterval) continue;
      last_check_ = now;
      CheckAsyncErrors();
      CheckDeserted();
      CheckDeadlines();
    }
    // Its destruction waits for a thread that may be breaking the world.
    std::unique_ptr<ControlPlane> plane;
    {
      std::lock_guard<std::mutex> lock(world_->mutex);
      plane.swap(world_->plane);
    }
    // Others may still wait for operations of communicators that this process did not destroy.
    if (IsExiting()) plane->Leave();
    plane.reset();
  }

 private:
  // Sleeps until there is something to look at; whether there never will be again.
  bool Ended() {
    std::unique_lock<std::mutex> lock(world_->mutex);
    const auto nothing_left = [&] {
      const bool unused = world_->groups == 0 || IsExiting();
      return unused && world_->pending.empty() && world_->handles.empty() &&
             world_->failed.empty() && world_->breaking == 0 && !world_->must_abort;
    };
    if (nothing_left()) return true;
    const bool busy = IsBusy();
    const absl::Duration nap = busy ? world_->options.poll_interval : kCheckInterval;
    world_->wake.wait_for(lock, absl::ToChronoMicroseconds(nap),
                          [&] { return nothing_left() || world_->must_abort || IsBusy() != busy; });
    return nothing_left();
  }

  // Needs the world's mutex.
  bool IsBusy() const { return !world_->pending.empty() || !world_->failed.empty(); }

  bool TakeAbort() {
    std::lock_guard<std::mutex> lock(world_->mutex);
    return std::exchange(world_->must_abort, false);
  }

  void AbortHandles() {
    std::set<std::shared_ptr<Handle>> handles;
    {
      std::lock_guard<std::mutex> lock(world_->mutex);
      handles = world_->handles;
    }
    // At once: an abort may wait for what another communicator has on the device.
    for (const auto& handle : handles) RunInBackground(world_, [handle] { handle->Abort(); });
    release_until_ = absl::Now() + kMaxRelease;
  }

  void WriteFlightRecord() {
    const char* folder = std::getenv("LOCKSTEP_FLIGHT_DIR");
    if (folder == nullptr || *folder == '\0') return;
    const std::string path = absl::StrCat(folder, "/rank", world_->rank, ".flight.json");
    const absl::Status status = world_->flight_recorder->Write(path);
    if (!status.ok()) std::cerr << std::string{status.message()} + "\n";
  }

  std::vector<std::shared_ptr<State>> Pending() {
    std::lock_guard<std::mutex> lock(world_->mutex);
    return world_->pending;
  }

  void Poll() {
    for (const auto& state : Pending()) {
      if (absl::Status status = state->Poll(); !status.ok()) world_->BreakEverywhere(status);
    }
    std::vector<std::shared_ptr<State>> done;  // go without the mutex
    std::lock_guard<std::mutex> lock(world_->mutex);
    auto& pending = world_->pending;
    const auto first_done = std::stable_partition(
        pending.begin(), pending.end(), [](const auto& state) { return !state->IsDone(); });
    done.assign(first_done, pending.end());
    pending.erase(first_done, pending.end());
  }

  void Release() {
    std::vector<std::shared_ptr<State>> failed;
    {
      std::lock_guard<std::mutex> lock(world_->mutex);
      if (world_->must_abort) return;
      failed.swap(world_->failed);
    }
    if (failed.empty()) return;
    std::vector<std::shared_ptr<State>> held;
    for (auto& state : failed) {
      if (!state->Released()) held.push_back(std::move(state));
    }
    if (!held.empty() && absl::Now() > release_until_) {
      static auto* left_to_device = new std::vector<std::shared_ptr<State>>;
      static std::mutex mutex;
      std::lock_guard<std::mutex> lock(mutex);
      left_to_device->insert(left_to_device->end(), held.begin(), held.end());
      held.clear();
    }
    std::lock_guard<std::mutex> lock(world_->mutex);
    world_->failed.insert(world_->failed.end(), held.begin(), held.end());
  }

  void CheckAsyncErrors() {
    if (world_->is_broken()) return;
    std::set<std::shared_ptr<Handle>> handles;
    {
      std::lock_guard<std::mutex> lock(world_->mutex);
      handles = world_->handles;
    }
    for (const auto& handle : handles) {
      absl::Status status = handle->AsyncError();
      if (status.ok()) continue;
      world_->BreakEverywhere(absl::Status(
          status.code(), absl::StrCat("rank ", world_->rank, ": ", DescribeOldest(*handle),
                                      "in the background: ", std::string{status.message()})));
      return;
    }
  }

  // What NCCL was probably at.
  std::string DescribeOldest(const Handle& handle) {
    for (const auto& state : Pending()) {
      std::shared_ptr<Group> group = state->group();
      if (group == nullptr) continue;
      const Handle* used = state->started() ? state->handle() : &group->lane->handle();
      if (used != &handle) continue;
      return absl::StrCat(state->operation().ToString(), " of communicator ", group->name, ": ");
    }
    return "";
  }

  void CheckDeserted() {
    for (const auto& state : Pending()) {
      const std::shared_ptr<Group> group = state->group();
      if (group == nullptr || state->IsDone() || !group->control->SomeLeft()) continue;
      const absl::Status status = group->control->Deserted(state->operation());
      if (!status.ok()) world_->BreakEverywhere(status);
    }
  }

  void CheckDeadlines() {
    for (const auto& state : Pending()) {
      if (state->IsDone() || state->age() < world_->options.deadline) continue;
      const std::shared_ptr<Group> group = state->group();
      if (group == nullptr) continue;
      const absl::Status late = group->control->Deadline(state->operation(), state->age());
      // It took a while to ask.
      if (absl::Status status = state->Poll(); !status.ok()) world_->BreakEverywhere(status);
      if (!state->IsDone()) world_->BreakEverywhere(late);
      return;
    }
  }

  const std::shared_ptr<World> world_;
  absl::Time last_check_ = absl::Now();
  absl::Time release_until_ = absl::InfiniteFuture();
};

}  // namespace

void StartWatchdog(const std::shared_ptr<World>& world) {
  RunInBackground(world, [world] { Watchdog(world).Run(); });
}

}  // namespace lockstep::comm::nccl
