#include "lockstep/comm/work.h"

#include <chrono>

#include "lockstep/comm/communicator.h"

namespace lockstep::comm {

void WorkState::Finish(absl::Status status) {
  std::vector<std::function<void(const absl::Status&)>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_) return;
    done_ = true;
    status_ = std::move(status);
    callbacks.swap(callbacks_);
    changed_.notify_all();
  }
  // status_ never changes again.
  for (const auto& callback : callbacks) callback(status_);
}

bool WorkState::IsDone() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void WorkState::OnDone(std::function<void(const absl::Status&)> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(status_);
}

absl::Status WorkState::Wait() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  return Observe();
}

bool WorkState::observed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return observed_;
}

bool WorkState::BlockUntil(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return done_; });
}

absl::Status WorkState::Observe() {
  std::lock_guard<std::mutex> lock(mutex_);
  observed_ = true;
  return status_;
}

Work::Work(absl::Status status) : state_(std::make_shared<WorkState>()) {
  state_->Finish(std::move(status));
}

Work Work::Then(Communicator& next, const std::function<Work(Communicator&)>& issue) const {
  next.StartAfter(*this);
  return issue(next);
}

}  // namespace lockstep::comm
