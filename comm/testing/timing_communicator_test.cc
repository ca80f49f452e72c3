#include "lockstep/comm/testing/timing_communicator.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::comm::testing {
namespace {

// Runs `body` on a communicator that is a Split of one that wraps this rank's.
void OnSplit(const std::function<void(Communicator&, std::atomic<Timing>&)>& body) {
  RunRanks(3, [&](Communicator& world) {
    auto timing = std::make_shared<std::atomic<Timing>>(Timing::kAsIs);
    TimingCommunicator whole(ValueOrThrow(world.Split(0, world.rank())), timing);
    auto part = ValueOrThrow(whole.Split(0, world.rank()));
    body(*part, *timing);
  });
}

TEST(TimingCommunicatorTest, LeavesOutWhatIsToBeLeftOut) {
  OnSplit([](Communicator& comm, std::atomic<Timing>& timing) {
    at::Tensor x = at::full({257}, comm.rank() + 1.0f);
    ThrowIfError(comm.AllReduce(x, ReduceOp::kSum).Wait());
    EXPECT_TRUE(x.eq(6).all().item<bool>());
    timing = Timing::kNothing;
    const Work work = comm.AllReduce(x, ReduceOp::kSum);
    EXPECT_TRUE(work.IsDone());
    ThrowIfError(work.Wait());
    EXPECT_TRUE(x.eq(6).all().item<bool>());
    // Sizes are still checked.
    EXPECT_EQ(comm.AllGatherInto(x, x).Wait().code(), absl::StatusCode::kInvalidArgument);
    timing = Timing::kAsIs;
    ThrowIfError(comm.AllReduce(x, ReduceOp::kSum).Wait());
    EXPECT_TRUE(x.eq(18).all().item<bool>());
  });
}

TEST(TimingCommunicatorTest, HoldsBackUntilSomebodyWaits) {
  OnSplit([](Communicator& comm, std::atomic<Timing>& timing) {
    timing = Timing::kDeferred;
    at::Tensor x = at::full({1}, comm.rank() + 1.0f);
    at::Tensor y = at::full({257}, 10.0f);
    const Work first = comm.AllReduce(x, ReduceOp::kSum);
    const Work second = comm.AllReduce(y, ReduceOp::kSum);
    EXPECT_FALSE(first.IsDone());
    EXPECT_FALSE(second.IsDone());
    EXPECT_EQ(x.item<float>(), comm.rank() + 1.0f);
    ThrowIfError(second.Wait());  // starts both
    EXPECT_TRUE(y.eq(30).all().item<bool>());
    ThrowIfError(first.Wait());
    EXPECT_EQ(x.item<float>(), 6);
    // What was dropped starts with the next.
    (void)comm.AllReduce(x, ReduceOp::kSum);
    timing = Timing::kAsIs;
    ThrowIfError(comm.Barrier().Wait());
    EXPECT_EQ(x.item<float>(), 18);
  });
}

TEST(TimingCommunicatorTest, AWorkOutlivesItsCommunicator) {
  RunRanks(2, [](Communicator& world) {
    at::Tensor x = at::full({3}, 1.0f);
    std::optional<Work> work;
    {
      TimingCommunicator comm(ValueOrThrow(world.Split(0, world.rank())),
                              std::make_shared<std::atomic<Timing>>(Timing::kDeferred));
      work = comm.AllReduce(x, ReduceOp::kSum);
      ThrowIfError(world.Barrier().Wait());
    }
    // It was started; whether it can end without its communicator is the backend's affair.
    (void)work->Wait();
    EXPECT_TRUE(work->IsDone());
  });
}

}  // namespace
}  // namespace lockstep::comm::testing
