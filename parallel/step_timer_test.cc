#include "lockstep/parallel/step_timer.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "lockstep/comm/nccl/testing/run_fake_ranks.h"
#include "lockstep/comm/testing/host_device.h"

namespace lockstep::parallel {
namespace {

using comm::testing::EventsWaitedFor;

constexpr absl::Duration kDelay = absl::Milliseconds(20);

TEST(StepTimer, OnTheCpuKnowsWhatWasUnderWayAndWhatWaited) {
  StepTimer timer(at::kCPU);
  timer.BeginBackward();
  const auto state = std::make_shared<comm::WorkState>();
  timer.Track(comm::Work(state), 16);
  absl::SleepFor(kDelay);
  timer.Waiting([&] {
    absl::SleepFor(kDelay);
    state->Finish(absl::OkStatus());
  });
  const StepReader read = timer.End();
  const StepStatistics step = read();
  EXPECT_GE(step.exposed, kDelay);
  ASSERT_TRUE(step.communication);
  EXPECT_GE(*step.communication, step.exposed + kDelay);
  EXPECT_GE(step.backward, *step.communication);
  EXPECT_EQ(step.collectives, 1);
  EXPECT_EQ(step.payload_bytes, 16);

  const StepStatistics next = timer.End()();
  EXPECT_EQ(next.exposed, absl::ZeroDuration());
  EXPECT_EQ(next.communication, absl::ZeroDuration());
  EXPECT_EQ(next.collectives, 0);
}

// Rank 1 is late. The host of rank 0 ends its step before that, while its stream stands.
void RunRank0(comm::nccl::testing::FakeFabric& fabric, comm::Communicator& comm,
              const at::Tensor& x, std::latch& waits) {
  comm::nccl::testing::QueuedStream stream(fabric, 0);
  const comm::testing::QueuedEvents events(
      [&](std::function<void()> reach) { stream.Run(std::move(reach)); });
  const int host_waits = EventsWaitedFor();
  std::optional<StepTimer> timer(comm.device());
  timer->BeginBackward();
  const comm::Work work = timer->Track(comm.AllReduce(x, comm::ReduceOp::kSum), 16);
  timer->Waiting([&] {
    stream.Run([&] { waits.count_down(); });
    EXPECT_TRUE(work.Wait().ok());
  });
  const StepReader read = timer->End();
  timer.reset();
  EXPECT_EQ(EventsWaitedFor(), host_waits);
  waits.count_down();

  const StepStatistics step = read();
  EXPECT_GT(EventsWaitedFor(), host_waits);
  EXPECT_GE(step.exposed, kDelay);
  EXPECT_GE(step.backward, step.exposed);
  EXPECT_FALSE(step.communication) << "the stream of kernels does not show it";
  EXPECT_EQ(step.collectives, 1);
  EXPECT_EQ(step.payload_bytes, 16);
}

TEST(StepTimer, OnADeviceTheStreamWaits) {
  comm::nccl::testing::FakeFabric fabric(2, comm::testing::HostDevice);
  std::latch waits(2);  // rank 0: its stream, and its host, which is past the step
  comm::nccl::testing::RunFakeRanksOn(fabric, 2, [&](comm::Communicator& comm) {
    const at::Tensor x = at::ones({4}, comm.device());
    EXPECT_TRUE(comm.AllReduce(x, comm::ReduceOp::kSum).Wait().ok());  // connects them
    if (comm.rank() == 0) {
      RunRank0(fabric, comm, x, waits);
      return;
    }
    waits.wait();
    absl::SleepFor(kDelay);
    EXPECT_TRUE(comm.AllReduce(x, comm::ReduceOp::kSum).Wait().ok());
  });
}

}  // namespace
}  // namespace lockstep::parallel
