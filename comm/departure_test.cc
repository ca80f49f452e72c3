#include "lockstep/comm/departure.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace lockstep::comm {
namespace {

Operation Transfer(OperationKind kind, int peer) {
  Operation operation = {.kind = kind, .peer = peer, .sequence = 1};
  (kind == OperationKind::kSend ? operation.input : operation.output) = at::ones({4});
  return operation;
}

TEST(DepartureTest, ACollectiveIsDesertedWhereTheRankHasIssuedFewer) {
  const Departure departure = {.rank = 1, .issued = {.collectives = 1}};
  Operation barrier = {.kind = OperationKind::kBarrier, .sequence = 1};
  EXPECT_FALSE(IsDeserted(barrier, /*rank=*/0, {}, departure));
  barrier.sequence = 2;
  EXPECT_TRUE(IsDeserted(barrier, /*rank=*/0, {}, departure));
  EXPECT_EQ(DesertedError(barrier, "world/1", /*rank=*/0, /*size=*/2, departure),
            absl::FailedPreconditionError(
                "Barrier #2 of communicator world/1 on rank 0 of 2 cannot be completed: rank 1 has "
                "left the communicator after 1 operation; all ranks must issue the same ones "
                "(uneven data? see join in parallel/ddp)"));
}

TEST(DepartureTest, ATransferIsDesertedWhereItsCounterpartsAreFewer) {
  for (OperationKind kind : {OperationKind::kSend, OperationKind::kRecv}) {
    const bool sends = kind == OperationKind::kSend;
    Departure departure = {.rank = 1};
    IssuedCounts mine;
    mine.Add(Transfer(kind, 1));
    mine.Add(Transfer(kind, 2));
    departure.issued.Add(Transfer(sends ? OperationKind::kRecv : OperationKind::kSend, 0));
    EXPECT_FALSE(IsDeserted(Transfer(kind, 1), /*rank=*/0, mine, departure));
    mine.Add(Transfer(kind, 1));
    EXPECT_TRUE(IsDeserted(Transfer(kind, 1), /*rank=*/0, mine, departure));
    EXPECT_FALSE(IsDeserted(Transfer(kind, 2), /*rank=*/0, mine, departure));
    EXPECT_EQ(
        DesertedError(Transfer(kind, 1), "world", /*rank=*/0, /*size=*/3, departure),
        absl::FailedPreconditionError(
            sends ? "Send #1 (to rank 1, tag 0, Float [4]) of communicator world on rank 0 of "
                    "3 cannot be completed: rank 1 has left the communicator without the Recv "
                    "that matches it"
                  : "Recv #1 (from rank 1, tag 0, Float [4]) of communicator world on rank 0 "
                    "of 3 cannot be completed: rank 1 has left the communicator without the "
                    "Send that matches it"));
  }
}

TEST(DepartureTest, TheLogHoldsAllThatTheyHaveIssued) {
  const auto store = Store::InProcess();
  std::vector<Departure> known;
  EXPECT_TRUE(ReadDepartures(*store, "world", known).ok());
  EXPECT_TRUE(known.empty());
  const Departure first = {
      .rank = 2, .issued = {.collectives = 17, .sends = {{0, 3}, {1, 1}}, .recvs = {{1, 5}}}};
  ASSERT_TRUE(WriteDeparture(*store, "world", first).ok());
  ASSERT_TRUE(ReadDepartures(*store, "world", known).ok());
  ASSERT_TRUE(WriteDeparture(*store, "world", {.rank = 0}).ok());
  // "world/1" is another communicator, not the first departure from "world".
  ASSERT_TRUE(WriteDeparture(*store, "world/1", {.rank = 5}).ok());
  std::vector<Departure> of_another;
  ASSERT_TRUE(ReadDepartures(*store, "world/1", of_another).ok());
  ASSERT_EQ(of_another.size(), 1);
  EXPECT_EQ(of_another[0].rank, 5);
  ASSERT_TRUE(ReadDepartures(*store, "world", known).ok());
  ASSERT_EQ(known.size(), 2);
  EXPECT_EQ(known[0].rank, 2);
  EXPECT_EQ(known[0].issued.collectives, 17);
  EXPECT_EQ(known[0].issued.sends, first.issued.sends);
  EXPECT_EQ(known[0].issued.recvs, first.issued.recvs);
  EXPECT_EQ(known[1].rank, 0);
}

TEST(DepartureTest, AnEntryThatIsBeingWrittenIsReadLater) {
  const auto store = Store::InProcess();
  ASSERT_TRUE(store->Add("departures/world", 1).ok());
  std::vector<Departure> known;
  EXPECT_TRUE(ReadDepartures(*store, "world", known).ok());
  EXPECT_TRUE(known.empty());
  ASSERT_TRUE(store->Set("departure/1/world", "1;4").ok());
  EXPECT_TRUE(ReadDepartures(*store, "world", known).ok());
  EXPECT_EQ(known.size(), 1);
  ASSERT_TRUE(store->Add("departures/world", 1).ok());
  ASSERT_TRUE(store->Set("departure/2/world", "1;x").ok());
  EXPECT_EQ(ReadDepartures(*store, "world", known),
            absl::InternalError("the store says of a rank that left: \"1;x\""));
}

}  // namespace
}  // namespace lockstep::comm
