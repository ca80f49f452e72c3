#include "lockstep/tools/device/stream_mark.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace lockstep::device {

// LibTorch records and frees events on their device, and then makes the thread's device current
// again by a call that makes a context on it: some 0.5 GB on GPU 0, by every rank. So the current
// device is the event's already, and DeviceGuard goes back without a context.

StreamMark::~StreamMark() { Reset(); }

StreamMark::StreamMark(StreamMark&& other) noexcept
    : event_(std::exchange(other.event_, std::nullopt)) {}

StreamMark& StreamMark::operator=(StreamMark&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  event_ = std::exchange(other.event_, std::nullopt);
  return *this;
}

void StreamMark::Reset() {
  if (!event_) return;
  const c10::DeviceGuard guard(event_->device());
  event_.reset();
}

void StreamMark::Record(c10::Device device) {
  Reset();
  if (device.is_cpu()) return;
  const c10::DeviceGuard guard(device);
  event_.emplace(device.type());
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void StreamMark::Wait() {
  if (event_) event_->synchronize();
  Reset();
}

}  // namespace lockstep::device
