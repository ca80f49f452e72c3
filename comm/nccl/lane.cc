#include "lockstep/comm/nccl/lane.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <utility>

#include "absl/time/clock.h"
#include "lockstep/comm/nccl/background.h"

namespace lockstep::comm::nccl {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);  // whether the world is broken or ends
constexpr absl::Duration kMinPause = absl::Microseconds(100);
constexpr absl::Duration kMaxPause = absl::Milliseconds(5);

absl::Status RunSafely(const Lane::Job& job) {
  try {
    return job();
  } catch (const std::exception& error) {  // of LibTorch
    return absl::InternalError(error.what());
  }
}

}  // namespace

Lane::Lane(std::shared_ptr<World> world, std::shared_ptr<Handle> handle)
    : world_(std::move(world)), handle_(std::move(handle)) {}

absl::StatusOr<std::shared_ptr<Lane>> Lane::Open(std::shared_ptr<World> world) {
  absl::StatusOr<std::shared_ptr<Handle>> handle = Handle::Make(world->library);
  if (!handle.ok()) return handle.status();
  if (absl::Status status = world->AddHandle(*handle); !status.ok()) return status;
  std::shared_ptr<Lane> lane(new Lane(world, *std::move(handle)));
  RunInBackground(world, [lane] { lane->Work(); });
  return lane;
}

void Lane::Push(Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ended_) return;
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

absl::Status Lane::Run(Job job) {
  auto promise = std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> result = promise->get_future();
  Push([promise = std::move(promise), job = std::move(job)] {
    promise->set_value(RunSafely(job));
    return absl::OkStatus();
  });
  try {
    return result.get();
  } catch (const std::future_error&) {  // the job was dropped
    absl::Status status = world_->BrokenStatus();
    return status.ok() ? absl::AbortedError("the process is ending") : status;
  }
}

void Lane::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closing_ = true;
  changed_.notify_all();
}

bool Lane::Take(Job& job) {
  for (;;) {
    std::deque<Job> dropped;  // go without the mutex
    std::unique_lock<std::mutex> lock(mutex_);
    if (world_->is_broken()) dropped.swap(jobs_);
    if (!jobs_.empty()) {
      job = std::move(jobs_.front());
      jobs_.pop_front();
      return true;
    }
    if (closing_ || (IsExiting() && !world_->HasPending())) {
      ended_ = true;
      return false;
    }
    if (dropped.empty()) changed_.wait_for(lock, kLook);
  }
}

void Lane::Work() {
  for (Job job; Take(job); job = nullptr) {
    const absl::Status status = RunSafely(job);
    if (!status.ok()) world_->BreakEverywhere(status);
  }
  CloseHandle();
}

void Lane::CloseHandle() {
  absl::Duration pause = kMinPause;
  while (!world_->is_broken() && !handle_->TryClose(world_->MaxFlush())) {
    absl::SleepFor(pause);
    pause = std::min(pause * 2, kMaxPause);
  }
  if (world_->is_broken()) handle_->Abort();
  world_->RemoveHandle(handle_);
}

}  // namespace lockstep::comm::nccl
