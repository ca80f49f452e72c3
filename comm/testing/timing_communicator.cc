#include "lockstep/comm/testing/timing_communicator.h"

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace lockstep::comm::testing {

// A work that starts when it, or another of its queue, is waited for.
class TimingCommunicator::DeferredState : public WorkState {
 public:
  explicit DeferredState(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}

  absl::Status Wait() override;

  std::optional<Work> started;  // set by the queue

 private:
  const std::shared_ptr<Queue> queue_;
};

// What is held back. Outlives the communicator, which starts all of it when it goes.
class TimingCommunicator::Queue {
 public:
  explicit Queue(std::function<Work(Operation)> issue) : issue_(std::move(issue)) {}

  void Add(Operation operation, std::shared_ptr<DeferredState> state) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_.emplace_back(std::move(operation), std::move(state));
  }

  void Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [operation, state] : held_) {
      state->started = issue_(std::move(operation));
      state->started->state()->OnDone(
          [state = state](const absl::Status& status) { state->Finish(status); });
    }
    held_.clear();
  }

 private:
  const std::function<Work(Operation)> issue_;
  std::mutex mutex_;
  std::vector<std::pair<Operation, std::shared_ptr<DeferredState>>> held_;
};

absl::Status TimingCommunicator::DeferredState::Wait() {
  queue_->Start();
  Finish(started->Wait());
  return WorkState::Wait();
}

TimingCommunicator::TimingCommunicator(std::unique_ptr<Communicator> inner,
                                       std::shared_ptr<std::atomic<Timing>> timing)
    : Decorator(std::move(inner)),
      queue_(std::make_shared<Queue>(
          [this](Operation operation) { return Decorator::Issue(std::move(operation)); })),
      timing_(std::move(timing)) {}

TimingCommunicator::~TimingCommunicator() { queue_->Start(); }

absl::StatusOr<std::unique_ptr<Communicator>> TimingCommunicator::Split(std::optional<int> color,
                                                                        int key) {
  queue_->Start();
  absl::StatusOr<std::unique_ptr<Communicator>> part = Decorator::Split(color, key);
  if (!part.ok() || *part == nullptr) return part;
  return std::make_unique<TimingCommunicator>(*std::move(part), timing_);
}

void TimingCommunicator::StartAfter(const Work& work) {
  queue_->Start();
  Decorator::StartAfter(work);
}

Work TimingCommunicator::Issue(Operation operation) {
  switch (timing_->load()) {
    case Timing::kNothing:
      return Work(absl::OkStatus());
    case Timing::kDeferred: {
      auto state = std::make_shared<DeferredState>(queue_);
      queue_->Add(std::move(operation), state);
      return Work(std::move(state));
    }
    case Timing::kAsIs:
      break;
  }
  queue_->Start();
  return Decorator::Issue(std::move(operation));
}

}  // namespace lockstep::comm::testing
