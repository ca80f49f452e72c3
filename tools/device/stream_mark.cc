#include "lockstep/tools/device/stream_mark.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::device {

void StreamMark::Record(c10::Device device) {
  event_.reset();
  if (device.is_cpu()) return;
  event_.emplace(device.type());
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void StreamMark::Wait() {
  if (event_) event_->synchronize();
  event_.reset();
}

}  // namespace lockstep::device
