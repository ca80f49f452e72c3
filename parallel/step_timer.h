#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/decorator.h"
#include "lockstep/comm/work.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::parallel {

// Measures a step of a strategy for StepStatistics: how long collectives were under way, and for
// how much of that this rank only waited.
//
//   timer.BeginBackward();
//   comm::Work work = timer.Track(comm->AllReduce(flat, op), bytes);
//   ... backward goes on ...
//   absl::Status status = timer.Wait(work);
//   StepStatistics step = timer.End();
class StepTimer {
 public:
  void BeginBackward();

  // Counts a collective that has just been issued; before BeginBackward() too.
  comm::Work Track(comm::Work work, int64_t payload_bytes);

  absl::Status Wait(const comm::Work& work);

  // Calls `wait`, which waits for what was tracked and does little else.
  void Waiting(const std::function<void()>& wait);

  // Ends the step; the next begins with the next call of any other method.
  StepStatistics End();

 private:
  using Interval = std::pair<absl::Duration, absl::Duration>;  // (start, end; infinite before it)

  // Filled by callbacks, which may come after this object has gone, and after who waited for the
  // work.
  struct Intervals {
    std::mutex mutex;
    std::vector<Interval> all;
  };

  absl::Duration backward_begin_;
  std::shared_ptr<Intervals> intervals_ = std::make_shared<Intervals>();
  std::vector<Interval> waits_;
  StepStatistics step_;
};

// A communicator whose operations, and those of what is split from it, a StepTimer tracks.
class TimedCommunicator : public comm::Decorator {
 public:
  TimedCommunicator(std::unique_ptr<comm::Communicator> inner, StepTimer& timer);
  comm::Work Issue(comm::Operation operation) override;
  absl::StatusOr<std::unique_ptr<comm::Communicator>> Split(std::optional<int> color,
                                                            int key) override;

 private:
  StepTimer& timer_;
};

}  // namespace lockstep::parallel
