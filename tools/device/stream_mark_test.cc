#include "lockstep/tools/device/stream_mark.h"

#include <gtest/gtest.h>

#include <utility>

#include "lockstep/comm/testing/host_device.h"

namespace lockstep::device {
namespace {

using comm::testing::EventsOnOtherDevices;
using comm::testing::HostDevice;

// This thread's current device is 0 throughout.
TEST(StreamMark, TouchesNoOtherDevice) {
  {
    StreamMark mark;
    mark.Record(HostDevice(3));
    mark.Record(HostDevice(2));
    mark.Wait();
    mark.Record(HostDevice(3));
    StreamMark moved = std::move(mark);
    moved = StreamMark();
    mark.Record(HostDevice(1));
  }
  EXPECT_EQ(EventsOnOtherDevices(), 0);
}

TEST(StreamMark, PlainEventsTouchAnotherDevice) {
  const int before = EventsOnOtherDevices();
  {
    c10::Event event(HostDevice(3).type());
    event.record(c10::Stream(c10::Stream::DEFAULT, HostDevice(3)));
  }
  EXPECT_EQ(EventsOnOtherDevices(), before + 2);
}

}  // namespace
}  // namespace lockstep::device
