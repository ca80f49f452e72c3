#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>

#include "absl/time/time.h"

namespace lockstep::device {

// When a device comes to a place in what it has been asked to do:
//
//   const device::StreamTime begin(x.device());
//   ...                                           // asks for kernels; the device is behind
//   const device::StreamTime end(x.device());
//   ...
//   absl::Duration took = Elapsed(begin, end);    // now waits until it has come there
//
// An event with timing on this thread's current stream. The thread's current device may be another
// one, and stays. On the CPU, where calls return when all is done, it is the time of the host.
class StreamTime {
 public:
  // Does not wait.
  explicit StreamTime(c10::Device device);

  // From `begin` to `end`, of one device. Blocks until the device has come to both.
  friend absl::Duration Elapsed(const StreamTime& begin, const StreamTime& end);

 private:
  absl::Duration host_;
  std::shared_ptr<c10::Event> event_;  // null on the CPU
};

absl::Duration Elapsed(const StreamTime& begin, const StreamTime& end);

}  // namespace lockstep::device
