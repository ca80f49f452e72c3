#include "lockstep/comm/control_plane.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>

namespace lockstep::comm {
namespace {

constexpr ControlPlane::Options kQuick = {.interval = absl::Milliseconds(50)};

Operation AllReduceOf(int64_t count, uint64_t sequence) {
  return {.kind = OperationKind::kAllReduce, .output = at::ones({count}), .sequence = sequence};
}

// Three ranks' planes over one store.
class ControlPlaneTest : public ::testing::Test {
 protected:
  ControlPlaneTest() {
    for (int rank = 0; rank < 3; ++rank) {
      planes_[rank] = std::make_unique<ControlPlane>(store_, rank, kQuick);
      groups_[rank] = planes_[rank]->Join(
          "world", {0, 1, 2},
          [this, rank](const absl::Status& why) { aborted_[rank].set_value(why); });
    }
  }

  std::shared_ptr<Store> store_ = Store::InProcess();
  std::promise<absl::Status> aborted_[3];
  std::unique_ptr<ControlPlane> planes_[3];
  std::shared_ptr<ControlGroup> groups_[3];
};

TEST_F(ControlPlaneTest, DeadlineNamesWhoDidNotArrive) {
  for (int rank : {0, 1, 2})
    groups_[rank]->Issued({.kind = OperationKind::kBarrier, .sequence = 1});
  groups_[0]->Issued(AllReduceOf(4, 2));
  groups_[2]->Issued(AllReduceOf(4, 2));
  const absl::Status status = groups_[0]->Deadline(AllReduceOf(4, 2), absl::Seconds(7));
  EXPECT_EQ(status,
            absl::DeadlineExceededError(
                "AllReduce #2 (sum, Float [4]) of communicator world on rank 0 of 3 is not done "
                "after 7s: waiting for rank 1 (last issued Barrier #1; alive)"));
}

TEST_F(ControlPlaneTest, DeadlineTellsWhoGivesNoSignOfLife) {
  for (int rank : {0, 1, 2}) groups_[rank]->Issued(AllReduceOf(4, 1));
  ASSERT_TRUE(store_->Set("rank/3", "7;world\t1\t1\tAllReduce").ok());  // as killed
  const auto group = planes_[1]->Join("world", {0, 1, 2, 3}, [](const absl::Status&) {});
  group->Issued(AllReduceOf(4, 2));
  const absl::Status status = group->Deadline(AllReduceOf(4, 1), absl::Seconds(7));
  EXPECT_EQ(status, absl::DeadlineExceededError(
                        "AllReduce #1 (sum, Float [4]) of communicator world on rank 1 of 4 is not "
                        "done after 7s: waiting for rank 3 (last issued AllReduce #1; gives no "
                        "sign of life: stopped, killed or cut off)"));
}

TEST_F(ControlPlaneTest, DeadlineTellsWhoHasLeft) {
  for (int rank : {0, 1}) groups_[rank]->Issued(AllReduceOf(4, 2));
  groups_[2]->Issued(AllReduceOf(4, 1));
  groups_[2].reset();
  planes_[2].reset();
  const absl::Status status = groups_[1]->Deadline(AllReduceOf(4, 2), absl::Seconds(7));
  EXPECT_EQ(status,
            absl::DeadlineExceededError(
                "AllReduce #2 (sum, Float [4]) of communicator world on rank 1 of 3 is not done "
                "after 7s: waiting for rank 2 (last issued AllReduce #1; has left: its "
                "communicator is destroyed)"));
}

TEST_F(ControlPlaneTest, DeadlineOfARecvNamesItsPeer) {
  const Operation recv = {
      .kind = OperationKind::kRecv, .output = at::ones({4}), .peer = 2, .sequence = 1};
  const absl::Status status = groups_[0]->Deadline(recv, absl::Seconds(7));
  EXPECT_NE(
      std::string{status.message()}.find("waiting for rank 2 (has issued nothing here; alive)"),
      std::string::npos)
      << status;
}

TEST_F(ControlPlaneTest, AbortReachesAllWithTheFirstReason) {
  planes_[1]->Abort(absl::InternalError("no more paper"));
  EXPECT_EQ(aborted_[1].get_future().get(), absl::InternalError("no more paper"));
  for (int rank : {0, 2}) {
    EXPECT_EQ(aborted_[rank].get_future().get(),
              absl::AbortedError("aborted by rank 1: no more paper"));
  }
}

// As a rank that starts late does, when its plane has heard of it before.
TEST_F(ControlPlaneTest, AbortReachesGroupsThatJoinLater) {
  planes_[1]->Abort(absl::InternalError("no more paper"));
  aborted_[0].get_future().wait();
  std::promise<absl::Status> later;
  const auto group =
      planes_[0]->Join("part", {0, 2}, [&](const absl::Status& why) { later.set_value(why); });
  std::future<absl::Status> told = later.get_future();
  ASSERT_EQ(told.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(told.get(), absl::AbortedError("aborted by rank 1: no more paper"));
}

TEST_F(ControlPlaneTest, DetailModeNamesDifferentOperations) {
  const auto check = [this](int rank, Operation operation) {
    return std::async(std::launch::async, [this, rank, operation] {
      return groups_[rank]->CheckSame(operation, absl::Seconds(10));
    });
  };
  for (uint64_t sequence : {1, 2, 3, 4}) {
    auto a = check(0, AllReduceOf(4, sequence));
    auto b = check(1, AllReduceOf(4, sequence));
    EXPECT_TRUE(check(2, AllReduceOf(4, sequence)).get().ok());
    EXPECT_TRUE(a.get().ok());
    EXPECT_TRUE(b.get().ok());
  }
  auto a = check(0, AllReduceOf(4, 5));
  auto b = check(1, {.kind = OperationKind::kBarrier, .sequence = 5});
  const absl::Status expected = absl::FailedPreconditionError(
      "the ranks of communicator world issued different operations as #5: ranks 0, 2: AllReduce "
      "(sum, Float, 4 elements); rank 1: Barrier");
  EXPECT_EQ(check(2, AllReduceOf(4, 5)).get(), expected);
  EXPECT_EQ(a.get(), expected);
  EXPECT_EQ(b.get(), expected);
}

TEST(ControlPlaneStoreTest, TellsThatTheStoreHasGone) {
  auto server = Store::Serve(/*port=*/0);
  ASSERT_TRUE(server.ok()) << server.status();
  auto client = Store::Connect("localhost", (*server)->port(), absl::Seconds(10));
  ASSERT_TRUE(client.ok()) << client.status();
  std::promise<absl::Status> aborted;
  ControlPlane plane(*client, 1, kQuick);
  auto group =
      plane.Join("world", {0, 1}, [&](const absl::Status& why) { aborted.set_value(why); });
  client->reset();
  server->reset();
  const absl::Status status = aborted.get_future().get();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(std::string{status.message()}.find("rank 0 has ended or cannot be reached"), 0)
      << status;
}

}  // namespace
}  // namespace lockstep::comm
