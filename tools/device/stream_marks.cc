#include "lockstep/tools/device/stream_marks.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace lockstep::device {

void StreamMarks::Record(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto found = std::find_if(marks_.begin(), marks_.end(),
                            [stream](const auto& mark) { return mark.first == stream; });
  if (found == marks_.end()) found = marks_.emplace(found, stream, StreamMark());
  found->second.Record(stream.device());
}

void StreamMarks::Wait() {
  for (auto& [stream, mark] : marks_) mark.Wait();
  marks_.clear();
}

}  // namespace lockstep::device
