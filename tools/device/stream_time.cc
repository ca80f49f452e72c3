#include "lockstep/tools/device/stream_time.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/tools/trace/clock.h"

namespace lockstep::device {

// The current device is the event's in all that is done with it: see stream_mark.cc.

StreamTime::StreamTime(c10::Device device) {
  if (device.is_cpu()) {
    host_ = trace::SteadyNow();
    return;
  }
  const c10::DeviceGuard guard(device);
  event_ = std::shared_ptr<c10::Event>(
      new c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT), [device](c10::Event* event) {
        const c10::DeviceGuard guard(device);
        delete event;
      });
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

absl::Duration Elapsed(const StreamTime& begin, const StreamTime& end) {
  if (end.event_ == nullptr) return end.host_ - begin.host_;
  const c10::DeviceGuard guard(end.event_->device());
  end.event_->synchronize();
  begin.event_->synchronize();
  return absl::Milliseconds(begin.event_->elapsedTime(*end.event_));
}

}  // namespace lockstep::device
