#include "lockstep/comm/counting.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "lockstep/comm/inprocess/inprocess_communicator.h"
#include "lockstep/comm/testing/run_ranks.h"

namespace lockstep::comm {
namespace {

void ExpectTraffic(const Traffic& found, int64_t operations, int64_t payload, int64_t wire) {
  EXPECT_EQ(found.operations, operations);
  EXPECT_EQ(found.payload_bytes, payload);
  EXPECT_EQ(found.wire_bytes, wire);
}

TEST(CountingCommunicatorTest, CountsWhatGoesThroughItAndItsSplits) {
  testing::RunRanks(4, [](Communicator& comm) {
    auto counters = std::make_shared<TrafficCounters>();
    auto world = comm.Split(0, comm.rank());
    ASSERT_TRUE(world.ok());
    CountingCommunicator counting(*std::move(world), counters);
    at::Tensor full = at::ones({100}), part = at::ones({25});
    ASSERT_TRUE(counting.AllReduce(full, ReduceOp::kSum).Wait().ok());
    auto pair = counting.Split(comm.rank() / 2, comm.rank());
    ASSERT_TRUE(pair.ok());
    ASSERT_TRUE((*pair)->AllReduce(full, ReduceOp::kSum).Wait().ok());
    ASSERT_TRUE(counting.AllGatherInto(full, part).Wait().ok());
    ASSERT_TRUE(counting.ReduceScatterInto(part, full, ReduceOp::kSum).Wait().ok());
    ASSERT_TRUE(counting.Broadcast(part, 2).Wait().ok());
    ExpectTraffic((*counters)[OperationKind::kAllReduce], 2, 800, 600 + 400);
    ExpectTraffic((*counters)[OperationKind::kAllGather], 1, 400, 300);
    ExpectTraffic((*counters)[OperationKind::kReduceScatter], 1, 400, 300);
    ExpectTraffic((*counters)[OperationKind::kBroadcast], 1, 100, comm.rank() == 2 ? 100 : 0);
    EXPECT_EQ(counters->total().operations, 5);
    counters->Reset();
    EXPECT_EQ(counters->total().operations, 0);
    // A refused operation moves nothing.
    EXPECT_FALSE(counting.AllReduce(full.view({10, 10}).t(), ReduceOp::kSum).Wait().ok());
    EXPECT_EQ(counters->total().operations, 0);
  });
}

}  // namespace
}  // namespace lockstep::comm
