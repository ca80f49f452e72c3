#include "lockstep/tools/device/stream_time.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "lockstep/comm/testing/host_device.h"

namespace lockstep::device {
namespace {

using comm::testing::EventsOnOtherDevices;
using comm::testing::EventsWaitedFor;
using comm::testing::HostDevice;
using comm::testing::QueuedEvents;

constexpr absl::Duration kDelay = absl::Milliseconds(20);

TEST(StreamTime, OnTheCpuIsTheHosts) {
  const int waits = EventsWaitedFor();
  const StreamTime begin(at::kCPU);
  absl::SleepFor(kDelay);
  const StreamTime end(at::kCPU);
  EXPECT_GE(Elapsed(begin, end), kDelay);
  EXPECT_EQ(EventsWaitedFor(), waits);
}

TEST(StreamTime, IsWhenTheDeviceComesThere) {
  std::vector<std::function<void()>> stream;
  const QueuedEvents events([&](std::function<void()> reach) { stream.push_back(reach); });
  const int waits = EventsWaitedFor();
  const StreamTime begin(HostDevice(1));
  const StreamTime end(HostDevice(1));
  EXPECT_EQ(EventsWaitedFor(), waits);
  ASSERT_EQ(stream.size(), 2);
  std::thread device([&] {
    stream[0]();
    absl::SleepFor(kDelay);
    stream[1]();
  });
  EXPECT_GE(Elapsed(begin, end), kDelay);
  EXPECT_GT(EventsWaitedFor(), waits);
  device.join();
}

// This thread's current device is 0 throughout.
TEST(StreamTime, TouchesNoOtherDevice) {
  {
    const StreamTime begin(HostDevice(3));
    std::optional<StreamTime> end;
    end.emplace(HostDevice(2));
    end = StreamTime(HostDevice(3));
    EXPECT_GE(Elapsed(begin, *end), absl::ZeroDuration());
  }
  EXPECT_EQ(EventsOnOtherDevices(), 0);
}

}  // namespace
}  // namespace lockstep::device
