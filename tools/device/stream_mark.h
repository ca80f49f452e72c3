#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <optional>

namespace lockstep::device {

// A place in what a device has been asked to do, which the host can wait for:
//
//   host.copy_(gradient, /*non_blocking=*/true);  // host is page-locked
//   device::StreamMark landed;
//   landed.Record(gradient.device());
//   ...                                           // the host goes on meanwhile
//   landed.Wait();                                // now host holds it
//
// An event on this thread's current stream of whatever device LibTorch knows; CUDA's headers are
// not needed. The thread's current device may be another one, and stays. On the CPU, where calls
// return when all is done, it does nothing.
class StreamMark {
 public:
  StreamMark() = default;
  ~StreamMark();
  StreamMark(StreamMark&& other) noexcept;
  StreamMark& operator=(StreamMark&& other) noexcept;

  // Marks what was asked for before, in the place of an earlier mark.
  void Record(c10::Device device);

  // Blocks until the device has done all up to the mark; returns at once where there is none.
  void Wait();

 private:
  void Reset();

  std::optional<c10::Event> event_;
};

}  // namespace lockstep::device
