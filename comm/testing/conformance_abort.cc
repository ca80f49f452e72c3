// What breaks a communicator: CommunicatorAbortConformance.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <string>

#include "absl/time/clock.h"
#include "lockstep/comm/testing/conformance.h"

namespace lockstep::comm::testing {
namespace {

void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

// What became of an operation: off the CPU, Wait() may return before that is known.
absl::Status StatusOf(const Work& work) {
  absl::Status status = work.Wait();
  if (!status.ok()) return status;
  while (!work.IsDone()) absl::SleepFor(absl::Milliseconds(1));
  return work.Wait();
}

// The error of an operation that rank `comm.size() - 1` left without, on the others.
void ExpectDeserted(const Communicator& comm, const absl::Status& status, const std::string& what,
                    const std::string& why) {
  const std::string message{status.message()};
  // Ranks tell each other: the first that notices is quoted by the rest.
  EXPECT_TRUE(absl::IsFailedPrecondition(status) || absl::IsAborted(status)) << status;
  EXPECT_NE(message.find(what + " of communicator world/1 on rank "), std::string::npos) << status;
  EXPECT_NE(message.find(" cannot be completed: rank " + std::to_string(comm.size() - 1) +
                         " has left the communicator " + why),
            std::string::npos)
      << status;
}

}  // namespace

TEST_P(CommunicatorAbortConformance, AbortFailsPendingAndLater) {
  GetParam().run(absl::Seconds(120), [](Communicator& comm) {
    auto other = comm.Split(0, comm.rank());
    ASSERT_TRUE(other.ok()) << other.status();
    ExpectOk(comm.Barrier().Wait());
    const int last = comm.size() - 1;
    absl::Status status;
    // The Barrier must have returned everywhere.
    ExpectOk(comm.store().Set("passed/" + std::to_string(comm.rank()), "so"));
    if (comm.rank() == last) {
      for (int rank = 0; rank < last; ++rank) {
        ExpectOk(comm.store().Get("passed/" + std::to_string(rank), absl::Seconds(60)).status());
      }
      comm.Abort(absl::InternalError("the roof is on fire"));
      status = comm.Barrier().Wait();
    } else {
      at::Tensor x = at::ones({3}, comm.device());
      status = StatusOf(comm.AllReduce(x, ReduceOp::kSum));
    }
    EXPECT_FALSE(status.ok());
    EXPECT_NE(std::string{status.message()}.find("the roof is on fire"), std::string::npos)
        << status;
    EXPECT_NE(std::string{status.message()}.find("rank " + std::to_string(last)), std::string::npos)
        << status;
    EXPECT_EQ(comm.Barrier().Wait(), status);
    EXPECT_FALSE((*other)->Barrier().Wait().ok());
    EXPECT_FALSE(comm.Split(0, 0).ok());
  });
}

TEST_P(CommunicatorAbortConformance, DeadlineNamesWhoDidNotArrive) {
  GetParam().run(absl::Seconds(2), [](Communicator& comm) {
    ExpectOk(comm.Barrier().Wait());
    if (comm.size() == 1) return;
    if (comm.rank() == comm.size() - 1) {
      // Who leaves is another case.
      for (int rank = 0; rank < comm.rank(); ++rank) {
        ExpectOk(comm.store().Get("failed/" + std::to_string(rank), absl::Seconds(60)).status());
      }
      return;
    }
    at::Tensor x = at::ones({2, 3}, comm.device());
    const absl::Status status = StatusOf(comm.AllReduce(x, ReduceOp::kSum));
    const std::string message{status.message()};
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsAborted(status)) << status;
    EXPECT_NE(message.find("AllReduce #2 (sum, Float [2, 3])"), std::string::npos) << status;
    EXPECT_NE(message.find("waiting for rank " + std::to_string(comm.size() - 1) +
                           " (last issued Barrier #1"),
              std::string::npos)
        << status;
    EXPECT_FALSE(comm.Barrier().Wait().ok());
    ExpectOk(comm.store().Set("failed/" + std::to_string(comm.rank()), "so"));
  });
}

TEST_P(CommunicatorAbortConformance, CollectiveFailsWhereARankHasLeft) {
  GetParam().run(absl::Minutes(30), [](Communicator& comm) {
    auto part = comm.Split(0, comm.rank());
    ASSERT_TRUE(part.ok()) << part.status();
    at::Tensor x = at::ones({2, 3}, comm.device());
    for (int i = 0; i < 17; ++i) ExpectOk((*part)->AllReduce(x, ReduceOp::kMax).Wait());
    if (comm.size() == 1) return;
    if (comm.rank() == comm.size() - 1) {
      part->reset();
      return;
    }
    ExpectDeserted(comm, StatusOf((*part)->AllReduce(x, ReduceOp::kSum)),
                   "AllReduce #18 (sum, Float [2, 3])",
                   "after 17 operations; all ranks must issue the same ones (uneven data? see join "
                   "in parallel/ddp)");
    EXPECT_FALSE((*part)->Barrier().Wait().ok());
  });
}

TEST_P(CommunicatorAbortConformance, RecvFailsWhereItsRankHasLeft) {
  GetParam().run(absl::Minutes(30), [](Communicator& comm) {
    auto part = comm.Split(0, comm.rank());
    ASSERT_TRUE(part.ok()) << part.status();
    const int last = comm.size() - 1;
    if (last == 0) return;
    at::Tensor x = at::full({3}, comm.rank(), comm.device());
    if (comm.rank() == last) {
      for (int to = 0; to < last; ++to) ExpectOk((*part)->Send(x, to).Wait());
      part->reset();
      return;
    }
    ExpectOk((*part)->Recv(x, last).Wait());
    EXPECT_TRUE(x.cpu().equal(at::full({3}, last)));
    ExpectDeserted(comm, StatusOf((*part)->Recv(x, last)),
                   "Recv #2 (from rank " + std::to_string(last) + ", tag 0, Long [3])",
                   "without the Send that matches it");
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorAbortConformance);

}  // namespace lockstep::comm::testing
