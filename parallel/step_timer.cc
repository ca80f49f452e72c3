#include "lockstep/parallel/step_timer.h"

#include <algorithm>

#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel {

void StepTimer::BeginBackward() { backward_begin_.emplace(device_); }

comm::Work StepTimer::Track(comm::Work work, int64_t payload_bytes) {
  ++step_.collectives;
  step_.payload_bytes += payload_bytes;
  if (!device_.is_cpu()) return work;
  size_t index = 0;
  {
    std::lock_guard<std::mutex> lock(intervals_->mutex);
    index = intervals_->all.size();
    intervals_->all.emplace_back(trace::SteadyNow(), absl::InfiniteDuration());
  }
  work.state()->OnDone([intervals = intervals_, index](const absl::Status&) {
    std::lock_guard<std::mutex> lock(intervals->mutex);
    intervals->all[index].second = trace::SteadyNow();
  });
  return work;
}

void StepTimer::Waiting(const std::function<void()>& wait) {
  const trace::Span span("WAIT_FOR_COMMUNICATION", "communication");
  if (device_.is_cpu()) {
    waits_.emplace_back(trace::SteadyNow(), absl::InfiniteDuration());
    wait();
    waits_.back().second = trace::SteadyNow();
    return;
  }
  const device::StreamTime begin(device_);
  wait();
  stream_waits_.emplace_back(begin, device::StreamTime(device_));
}

absl::Status StepTimer::Wait(const comm::Work& work) {
  absl::Status status;
  Waiting([&] { status = work.Wait(); });
  return status;
}

void StepTimer::AddCommunication(absl::Duration now) {
  absl::Duration communication;
  std::lock_guard<std::mutex> lock(intervals_->mutex);
  std::sort(intervals_->all.begin(), intervals_->all.end());
  absl::Duration covered = -absl::InfiniteDuration();
  for (auto [start, end] : intervals_->all) {
    start = std::max(start, covered);
    end = std::min(end, now);
    if (end <= start) continue;
    covered = end;
    communication += end - start;
    for (const auto& [wait_start, wait_end] : waits_) {
      const absl::Duration overlap = std::min(end, wait_end) - std::max(start, wait_start);
      step_.exposed += std::max(overlap, absl::ZeroDuration());
    }
  }
  step_.communication = communication;
}

StepReader StepTimer::End() {
  const device::StreamTime end(device_);
  const auto begin = std::exchange(backward_begin_, std::nullopt);
  if (device_.is_cpu()) {
    AddCommunication(trace::SteadyNow());
  } else {
    step_.communication.reset();
  }
  intervals_ = std::make_shared<Intervals>();
  waits_.clear();
  return [step = std::exchange(step_, StepStatistics()), begin, end,
          waits = std::exchange(stream_waits_, {})] {
    StepStatistics read = step;
    if (begin) read.backward = Elapsed(*begin, end);
    for (const auto& [before, after] : waits) read.exposed += Elapsed(before, after);
    return read;
  };
}

TimedCommunicator::TimedCommunicator(std::unique_ptr<comm::Communicator> inner, StepTimer& timer)
    : Decorator(std::move(inner)), timer_(timer) {}

comm::Work TimedCommunicator::Issue(comm::Operation operation) {
  const int64_t bytes = operation.payload_bytes();
  return timer_.Track(Decorator::Issue(std::move(operation)), bytes);
}

absl::StatusOr<std::unique_ptr<comm::Communicator>> TimedCommunicator::Split(
    std::optional<int> color, int key) {
  auto part = Decorator::Split(color, key);
  if (!part.ok() || *part == nullptr) return part;
  return std::make_unique<TimedCommunicator>(*std::move(part), timer_);
}

}  // namespace lockstep::parallel
