#include "lockstep/parallel/step_timer.h"

#include <algorithm>

#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel {

void StepTimer::BeginBackward() { backward_begin_ = trace::SteadyNow(); }

comm::Work StepTimer::Track(comm::Work work, int64_t payload_bytes) {
  ++step_.collectives;
  step_.payload_bytes += payload_bytes;
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

absl::Status StepTimer::Wait(const comm::Work& work) {
  const trace::Span span("wait", "communication");
  const absl::Duration start = trace::SteadyNow();
  absl::Status status = work.Wait();
  step_.exposed += trace::SteadyNow() - start;
  return status;
}

StepStatistics StepTimer::End() {
  const absl::Duration now = trace::SteadyNow();
  step_.backward = now - backward_begin_;
  {
    std::lock_guard<std::mutex> lock(intervals_->mutex);
    std::sort(intervals_->all.begin(), intervals_->all.end());
    absl::Duration covered = -absl::InfiniteDuration();
    for (auto [start, end] : intervals_->all) {
      end = std::min(end, now);
      if (end > covered) step_.communication += end - std::max(start, covered);
      covered = std::max(covered, end);
    }
  }
  intervals_ = std::make_shared<Intervals>();
  return std::exchange(step_, StepStatistics());
}

}  // namespace lockstep::parallel
