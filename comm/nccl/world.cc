#include "lockstep/comm/nccl/world.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/group.h"

namespace lockstep::comm::nccl {
namespace {

constexpr std::chrono::microseconds kMinPause(20);
constexpr std::chrono::microseconds kMaxPause(1000);

}  // namespace

State::State(std::shared_ptr<Group> group, Operation operation)
    : world_(group->world),
      issued_(absl::Now()),
      origin_(world_->library->CurrentStream()),
      group_(std::move(group)),
      operation_(std::move(operation)) {
  absl::StatusOr<Event> event = world_->library->CreateEvent();
  if (event.ok()) event_ = *event;
  prepared_ = Named(event.ok() ? world_->library->RecordEvent(event_, origin_) : event.status());
}

State::~State() {
  if (event_ != nullptr) world_->library->DestroyEvent(event_);
}

absl::Status State::Named(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("rank ", world_->rank, ": ", operation().ToString(), ": ",
                                   std::string{status.message()}));
}

void State::AwaitStarted(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  started_or_done_.wait_for(lock, absl::ToChronoMicroseconds(timeout),
                            [this] { return started() || IsDone(); });
}

absl::Status State::Wait() {
  if (operation().kind == OperationKind::kBarrier) return WaitOnHost();
  while (!started() && !IsDone()) AwaitStarted(absl::Seconds(1));
  if (IsDone()) return Observe();
  const Stream current = world_->library->CurrentStream();
  absl::Status status = world_->library->WaitEvent(current, event_);
  if (status.ok()) status = Poll();
  if (!status.ok()) world_->BreakEverywhere(Named(status));
  if (IsDone() || world_->is_broken()) return WorkState::Wait();
  // The allocator hands their memory out again in the order of the stream that they were made for.
  if (current == origin_) DropTensors();
  return absl::OkStatus();
}

absl::Status State::WaitOnHost() {
  auto pause = kMinPause;
  while (!IsDone() && !BlockUntil(std::chrono::steady_clock::now() + pause)) {
    pause = std::min(pause * 2, kMaxPause);
    if (!started() || world_->is_broken()) continue;
    if (absl::Status status = Poll(); !status.ok()) world_->BreakEverywhere(status);
  }
  return Observe();
}

absl::Status State::Started(const Handle& handle) {
  absl::Status status = world_->library->RecordEvent(event_, handle.stream());
  if (!status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  handle_ = &handle;
  started_or_done_.notify_all();
  return status;
}

absl::Status State::Poll() {
  if (IsDone() || !started()) return absl::OkStatus();
  absl::StatusOr<bool> done = world_->library->QueryEvent(event_);
  if (!done.ok()) return done.status();
  // What an abort has ended is not done: who breaks the world says so first.
  if (!*done || world_->is_broken() || ended_.exchange(true)) return absl::OkStatus();
  std::shared_ptr<Group> group;  // goes without the mutex
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group.swap(group_);
  }
  if (group != nullptr) group->control->Completed();
  DropTensors();
  Finish(absl::OkStatus());
  return absl::OkStatus();
}

void State::Fail(const absl::Status& reason) {
  Finish(reason);
  std::shared_ptr<Group> group;  // goes without the mutex
  std::lock_guard<std::mutex> lock(mutex_);
  group.swap(group_);
  started_or_done_.notify_all();
}

bool State::Released() {
  if (!started()) return true;
  absl::StatusOr<bool> done = world_->library->QueryEvent(event_);
  return done.ok() && *done;
}

Operation State::operation() {
  std::lock_guard<std::mutex> lock(mutex_);
  return operation_;
}

std::shared_ptr<Group> State::group() {
  std::lock_guard<std::mutex> lock(mutex_);
  return group_;
}

absl::Duration State::age() const { return absl::Now() - issued_; }

// Leaves what messages need: dtype and shape.
void State::DropTensors() {
  at::Tensor input, output;  // freed without the mutex
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(input, operation_.input);
  std::swap(output, operation_.output);
  const at::Tensor& subject = input.defined() ? input : output;
  if (!subject.defined()) return;
  operation_.input = at::empty(subject.sizes(), subject.options().device(at::kMeta));
}

bool World::MarkBroken(const absl::Status& reason, std::vector<std::shared_ptr<State>>& to_fail) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!broken.ok()) return false;
  broken = reason;
  is_broken_.store(true, std::memory_order_release);
  must_abort = true;
  to_fail.swap(pending);
  failed.insert(failed.end(), to_fail.begin(), to_fail.end());
  wake.notify_all();
  return true;
}

void World::Break(const absl::Status& reason) {
  std::vector<std::shared_ptr<State>> to_fail;
  MarkBroken(reason, to_fail);
  for (const auto& state : to_fail) state->Fail(reason);
}

void World::BreakEverywhere(const absl::Status& reason, const absl::Status& told) {
  std::vector<std::shared_ptr<State>> to_fail;
  if (!MarkBroken(reason, to_fail)) return;
  ControlPlane* plane_now = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    plane_now = plane.get();
    ++breaking;  // the watchdog, which ends the plane, stays
  }
  // First, so that the others hear why before they see that this rank leaves.
  if (plane_now != nullptr) plane_now->Abort(told);
  for (const auto& state : to_fail) state->Fail(reason);
  std::lock_guard<std::mutex> lock(mutex);
  --breaking;
  wake.notify_all();
}

absl::Status World::BrokenStatus() {
  std::lock_guard<std::mutex> lock(mutex);
  return broken;
}

Handle::Stop World::StopAt(absl::Time deadline) {
  return [this, deadline]() -> absl::Status {
    if (is_broken()) return BrokenStatus();
    return absl::Now() > deadline ? absl::DeadlineExceededError("") : absl::OkStatus();
  };
}

absl::Status World::AddPending(const std::shared_ptr<State>& state) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!broken.ok()) return broken;
  if (pending.empty()) wake.notify_all();
  pending.push_back(state);
  return absl::OkStatus();
}

absl::Status World::AddHandle(const std::shared_ptr<Handle>& handle) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!broken.ok()) return broken;
  handles.insert(handle);
  return absl::OkStatus();
}

void World::RemoveHandle(const std::shared_ptr<Handle>& handle) {
  std::lock_guard<std::mutex> lock(mutex);
  handles.erase(handle);
  wake.notify_all();
}

bool World::HasPending() {
  std::lock_guard<std::mutex> lock(mutex);
  return !pending.empty();
}

void World::AddGroup() {
  std::lock_guard<std::mutex> lock(mutex);
  ++groups;
}

void World::RemoveGroup() {
  std::lock_guard<std::mutex> lock(mutex);
  --groups;
  wake.notify_all();
}

}  // namespace lockstep::comm::nccl
