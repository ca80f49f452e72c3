#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/comm/inprocess/inprocess_communicator.h"
#include "lockstep/comm/testing/conformance.h"
#include "lockstep/comm/testing/run_ranks.h"

namespace lockstep::comm::testing {
namespace {

Backend Threads(int size) {
  return {.name = "Ranks" + std::to_string(size),
          .run = [size](absl::Duration deadline, const std::function<void(Communicator&)>& body) {
            RunRanks(size, body, deadline);
          }};
}

std::string NameOf(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

const auto kWorlds = ::testing::Values(Threads(1), Threads(2), Threads(3), Threads(4));

INSTANTIATE_TEST_SUITE_P(InProcess, CommunicatorConformance, kWorlds, NameOf);
INSTANTIATE_TEST_SUITE_P(InProcess, CommunicatorAbortConformance, kWorlds, NameOf);

TEST(InProcessTest, NamesRanksThatIssuedSomethingElse) {
  RunRanks(3, [](Communicator& comm) {
    at::Tensor x = at::ones({4 + comm.rank() / 2});
    const absl::Status status = comm.AllReduce(x, ReduceOp::kSum).Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(
        std::string{status.message()},
        "the ranks of communicator world issued different operations as #1: rank 0: AllReduce "
        "(sum, Float, 4 elements); rank 2: AllReduce (sum, Float, 5 elements)");
  });
}

TEST(InProcessTest, RefusesARecvOfAnotherSize) {
  RunRanks(2, [](Communicator& comm) {
    at::Tensor x = at::ones({4 + comm.rank()});
    const Work work = comm.rank() == 0 ? comm.Send(x, 1) : comm.Recv(x, 0);
    EXPECT_EQ(work.Wait().code(), absl::StatusCode::kFailedPrecondition);
  });
}

TEST(InProcessTest, FailsWhatFollowsAFailedWork) {
  RunRanks(2, [](Communicator& comm) {
    const Work failed(absl::InternalError("no good"));
    const Work after = failed.Then(comm, [](Communicator& c) { return c.Barrier(); });
    EXPECT_EQ(after.Wait(), absl::InternalError("no good"));
  });
}

TEST(InProcessTest, DestructionLeavesNothingWaiting) {
  Work pending;
  {
    auto comms = inprocess::Create(2);
    pending = comms[0]->Barrier();
    EXPECT_FALSE(pending.IsDone());
  }
  EXPECT_EQ(pending.Wait(),
            absl::FailedPreconditionError(
                "Barrier #1 of communicator world on rank 0 of 2 cannot be completed: rank 1 has "
                "left the communicator after 0 operations; all ranks must issue the same ones "
                "(uneven data? see join in parallel/ddp)"));
}

}  // namespace
}  // namespace lockstep::comm::testing
