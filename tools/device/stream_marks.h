#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <utility>
#include <vector>

#include "lockstep/tools/device/stream_mark.h"

namespace lockstep::device {

// A mark on each of several streams: what is to be waited for before memory is used again that any
// number of devices, or of streams of one, copy from.
class StreamMarks {
 public:
  // Marks what this thread's current stream of `device` was asked for before, in the place of an
  // earlier mark on that stream. On the CPU it does nothing.
  void Record(c10::Device device);

  // Blocks until all streams have come to their marks, and forgets these.
  void Wait();

 private:
  std::vector<std::pair<c10::Stream, StreamMark>> marks_;
};

}  // namespace lockstep::device
