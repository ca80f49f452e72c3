#include "lockstep/tools/device/stream_marks.h"

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "lockstep/comm/testing/host_device.h"

namespace lockstep::device {
namespace {

using comm::testing::EventsWaitedFor;
using comm::testing::HostDevice;

int EventsOfWait(StreamMarks& marks) {
  const int before = EventsWaitedFor();
  marks.Wait();
  return EventsWaitedFor() - before;
}

TEST(StreamMarks, WaitsForEachDevice) {
  StreamMarks marks;
  marks.Record(HostDevice(1));
  marks.Record(HostDevice(2));
  EXPECT_EQ(EventsOfWait(marks), 2);
  EXPECT_EQ(EventsOfWait(marks), 0) << "forgotten";
}

TEST(StreamMarks, WaitsForEachStreamOnce) {
  StreamMarks marks;
  marks.Record(HostDevice(1));
  {
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, HostDevice(1), /*id=*/3));
    marks.Record(HostDevice(1));
    marks.Record(HostDevice(1));
  }
  marks.Record(HostDevice(1));
  EXPECT_EQ(EventsOfWait(marks), 2);
}

TEST(StreamMarks, TheCpuHasNothingToWaitFor) {
  StreamMarks marks;
  marks.Record(c10::Device(c10::kCPU));
  EXPECT_EQ(EventsOfWait(marks), 0);
}

}  // namespace
}  // namespace lockstep::device
