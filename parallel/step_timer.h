#pragma once

#include <c10/core/Device.h>

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
#include "lockstep/tools/device/stream_time.h"

namespace lockstep::parallel {

// Measures a step of a strategy for StepStatistics: how long collectives were under way, and for
// how much of that this rank only waited.
//
//   StepTimer timer(comm->device());
//   timer.BeginBackward();
//   comm::Work work = timer.Track(comm->AllReduce(flat, op), bytes);
//   ... backward goes on ...
//   absl::Status status = timer.Wait(work);
//   StepReader read = timer.End();
//   ...
//   StepStatistics step = read();
//
// On the CPU times are the host's. On another device the host is ahead, and a wait only makes the
// current stream wait; so they are between marks in that stream, before and after each wait, which
// are read when the device has come there. What other streams do it does not show:
// StepStatistics::communication is none.
class StepTimer {
 public:
  // `device`: where the tensors are.
  explicit StepTimer(c10::Device device) : device_(device) {}

  void BeginBackward();

  // Counts a collective that has just been issued; before BeginBackward() too.
  comm::Work Track(comm::Work work, int64_t payload_bytes);

  absl::Status Wait(const comm::Work& work);

  // Calls `wait`, which waits for what was tracked and does little else.
  void Waiting(const std::function<void()>& wait);

  // Ends the step; the next begins with the next call of any other method. What it returns does not
  // need this object, and a call of it waits for the device.
  StepReader End();

 private:
  // Of the host, for the CPU.
  using Interval = std::pair<absl::Duration, absl::Duration>;  // (start, end; infinite before it)

  // Filled by callbacks, which may come after this object has gone, and after who waited for the
  // work.
  struct Intervals {
    std::mutex mutex;
    std::vector<Interval> all;
  };

  void AddCommunication(absl::Duration now);

  const c10::Device device_;
  std::optional<device::StreamTime> backward_begin_;
  std::shared_ptr<Intervals> intervals_ = std::make_shared<Intervals>();
  std::vector<Interval> waits_;
  std::vector<std::pair<device::StreamTime, device::StreamTime>> stream_waits_;  // not for the CPU
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
