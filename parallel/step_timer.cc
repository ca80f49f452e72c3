#include "lockstep/parallel/step_timer.h"

#include <algorithm>

#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel {

void StepTimer::BeginBackward() { backward_begin_ = trace::SteadyNow(); }

comm::Work StepTimer::Track(comm::Work work, int64_t payload_bytes) {
  ++step_.collectives;
  step_.payload_bytes += payload_bytes;
  work.state()->OnDone([intervals = intervals_, start = trace::SteadyNow()](const absl::Status&) {
    std::lock_guard<std::mutex> lock(intervals->mutex);
    intervals->done.emplace_back(start, trace::SteadyNow());
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
  step_.backward = trace::SteadyNow() - backward_begin_;
  {
    std::lock_guard<std::mutex> lock(intervals_->mutex);
    std::sort(intervals_->done.begin(), intervals_->done.end());
    absl::Duration covered = -absl::InfiniteDuration();
    for (const auto& [start, end] : intervals_->done) {
      if (end > covered) step_.communication += end - std::max(start, covered);
      covered = std::max(covered, end);
    }
  }
  intervals_ = std::make_shared<Intervals>();
  return std::exchange(step_, StepStatistics());
}

}  // namespace lockstep::parallel
