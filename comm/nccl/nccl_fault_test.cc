// What goes wrong: every fault that the fake knows, one by one and at random.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/nccl/nccl_communicator.h"
#include "lockstep/comm/nccl/testing/run_fake_ranks.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm::nccl {
namespace {

using testing::ExpectNothingLeft;
using testing::FakeFabric;
using testing::FastOptions;
using testing::Fault;
using testing::QueuedStream;
using testing::What;
using testing::Where;

using Body = std::function<absl::Status(Communicator&)>;

// Runs `body` on a thread for each rank of `fabric`; what each came to, creation included.
std::vector<absl::Status> RunOn(FakeFabric& fabric, int size, absl::Duration deadline,
                                const Body& body) {
  const auto store = Store::InProcess();
  std::vector<absl::Status> statuses(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto comm = CreateOn(fabric.library(rank), *store, rank, size, FastOptions(deadline));
      statuses[rank] = comm.ok() ? body(**comm) : comm.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

absl::Status ReduceThrice(Communicator& comm) {
  const at::Tensor x = at::ones({4});
  for (int i = 0; i < 3; ++i) {
    if (absl::Status s = comm.AllReduce(x, ReduceOp::kSum).Wait(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

void ExpectContains(const absl::Status& status, const std::string& part) {
  EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
}

TEST(NcclFaultTest, ErrorOfACallCarriesNcclsLastError) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 1, .where = Where::kLaunch, .call = 1, .what = What::kFails});
  const auto statuses = RunOn(fabric, 2, absl::Minutes(1), ReduceThrice);
  EXPECT_EQ(statuses[1],
            absl::UnavailableError("AllReduce #2 (sum, Float [4]) of communicator world on rank 1 "
                                   "of 2: NCCL: unhandled system error of fake: "
                                   "ncclSocketTryRecv: Connection reset by fake"));
  EXPECT_EQ(statuses[0], absl::AbortedError(absl::StrCat("aborted by rank 1: ",
                                                         std::string{statuses[1].message()})));
  ExpectNothingLeft(fabric);
}

TEST(NcclFaultTest, ErrorInTheBackgroundIsNoticed) {
  FakeFabric fabric(3);
  fabric.Inject({.rank = 2, .where = Where::kLaunch, .call = 1, .what = What::kFailsLater});
  const auto statuses = RunOn(fabric, 3, absl::Minutes(1), ReduceThrice);
  EXPECT_EQ(statuses[2].code(), absl::StatusCode::kUnavailable);
  for (const absl::Status& status : statuses) {
    ExpectContains(status,
                   "rank 2: AllReduce #2 (sum, Float [4]) of communicator world: in the "
                   "background: NCCL: remote process exited or there was a network error of fake: "
                   "ncclSocketTryRecv: Connection reset by fake");
  }
  ExpectNothingLeft(fabric);
}

TEST(NcclFaultTest, HangEndsAtTheDeadlineAndLeavesAFlightRecord) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "flight";
  std::filesystem::create_directories(folder);
  setenv("LOCKSTEP_FLIGHT_DIR", folder.c_str(), /*overwrite=*/1);
  FakeFabric fabric(2);
  fabric.Inject({.rank = 0, .where = Where::kLaunch, .call = 1, .what = What::kHangs});
  const absl::Time start = absl::Now();
  const auto statuses = RunOn(fabric, 2, absl::Seconds(1), ReduceThrice);
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsAborted(status)) << status;
    ExpectContains(status,
                   "all ranks have arrived, so the transfer itself does not end; have they issued "
                   "the same?");
  }
  ExpectNothingLeft(fabric);
  unsetenv("LOCKSTEP_FLIGHT_DIR");
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(std::filesystem::exists(folder / absl::StrCat("rank", rank, ".flight.json")));
  }
}

TEST(NcclFaultTest, CallThatDoesNotReturnIsAborted) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 1, .where = Where::kLaunch, .call = 0, .what = What::kCallHangs});
  for (const absl::Status& status : RunOn(fabric, 2, absl::Seconds(1), ReduceThrice)) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsAborted(status)) << status;
  }
  ExpectNothingLeft(fabric);
}

// The first call joins the world, the second connects two ranks.
TEST(NcclFaultTest, JoiningThatDoesNotReturnIsAborted) {
  for (const int call : {0, 1}) {
    FakeFabric fabric(2);
    fabric.Inject({.rank = 0, .where = Where::kInit, .call = call, .what = What::kCallHangs});
    const auto statuses = RunOn(fabric, 2, absl::Seconds(1), [](Communicator& comm) {
      const at::Tensor x = at::ones({4});
      return (comm.rank() == 0 ? comm.Send(x, 1) : comm.Recv(x, 0)).Wait();
    });
    for (const absl::Status& status : statuses) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsAborted(status)) << status;
    }
    ExpectNothingLeft(fabric);
  }
}

TEST(NcclFaultTest, AbortThatTakesLongHoldsBackNobody) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 0, .where = Where::kLaunch, .call = 0, .what = What::kFails});
  fabric.Inject({.rank = 0, .where = Where::kAbort, .delay = absl::Seconds(3)});
  const absl::Time start = absl::Now();
  for (const absl::Status& status : RunOn(fabric, 2, absl::Minutes(1), ReduceThrice)) {
    ExpectContains(status, testing::kFakeLastError);
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  ExpectNothingLeft(fabric);
}

TEST(NcclFaultTest, ClosingThatTakesLongHoldsBackNobody) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 0, .where = Where::kDestroy, .delay = absl::Seconds(3)});
  fabric.Inject({.rank = 1, .where = Where::kLaunch, .call = 2, .what = What::kFailsLater});
  const absl::Time start = absl::Now();
  const auto statuses = RunOn(fabric, 2, absl::Minutes(1), [](Communicator& comm) {
    auto part = comm.Split(0, comm.rank());
    if (!part.ok()) return part.status();
    part->reset();  // rank 0 is at this for three seconds
    return ReduceThrice(comm);
  });
  for (const absl::Status& status : statuses) ExpectContains(status, testing::kFakeLastError);
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  ExpectNothingLeft(fabric);
}

// Freeing one waits for what the other has on the device, so that they must be aborted at once.
TEST(NcclFaultTest, CommunicatorsThatHangTogetherAreAborted) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 0, .where = Where::kLaunch, .call = 1, .what = What::kHangs});
  fabric.Inject({.rank = 0, .where = Where::kLaunch, .call = 2, .what = What::kHangs});
  const auto statuses = RunOn(fabric, 2, absl::Seconds(1), [](Communicator& comm) {
    auto part = comm.Split(0, comm.rank());
    if (!part.ok()) return part.status();
    const at::Tensor x = at::ones({4});
    const at::Tensor y = at::ones({4});
    const Work first = comm.AllReduce(x, ReduceOp::kSum);
    const Work second = (*part)->AllReduce(y, ReduceOp::kSum);
    absl::Status status = first.Wait();
    return status.ok() ? second.Wait() : status;
  });
  for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
  ExpectNothingLeft(fabric);
}

TEST(NcclFaultTest, RankThatDoesNotComeIsNamed) {
  FakeFabric fabric(3);
  const auto store = Store::InProcess();
  std::vector<std::thread> threads;
  for (int rank : {0, 2}) {
    threads.emplace_back([&, rank] {
      const auto comm =
          CreateOn(fabric.library(rank), *store, rank, 3, FastOptions(absl::Milliseconds(500)));
      ExpectContains(comm.status(), "NCCL communicator of 3 ranks, on rank ");
      ExpectContains(comm.status(), ": not made after 500ms: waiting for rank 1");
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectNothingLeft(fabric);
}

TEST(NcclFaultTest, TwoRanksOnOneGpuAreRefused) {
  FakeFabric fabric(2);
  fabric.ShareDevice(1, /*with=*/0);
  const auto statuses = RunOn(fabric, 2, absl::Minutes(1), ReduceThrice);
  for (int rank : {0, 1}) {
    ExpectContains(statuses[rank], " have the same GPU (");
    ExpectContains(statuses[rank], "GPU-fake-0), and each needs its own: start no more ranks on a");
  }
  ExpectNothingLeft(fabric);
}

TEST(NcclFaultTest, FlushThatDoesNotEndIsAborted) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 0, .where = Where::kFinalize, .what = What::kHangs});
  for (const absl::Status& status : RunOn(fabric, 2, absl::Seconds(3), ReduceThrice)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  ExpectNothingLeft(fabric);
  EXPECT_EQ(fabric.calls(0, Where::kAbort), 1);
  EXPECT_EQ(fabric.calls(1, Where::kAbort), 0);
}

TEST(NcclStreamTest, WaitDoesNotBlockTheHost) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 0, .what = What::kIsDelayed, .delay = absl::Milliseconds(800)});
  const auto statuses = RunOn(fabric, 2, absl::Minutes(1), [&](Communicator& comm) {
    QueuedStream stream(fabric, comm.rank());
    const at::Tensor x = at::ones({1000});
    stream.Run([x] { x.add_(1); });
    const absl::Time start = absl::Now();
    const Work work = comm.AllReduce(x, ReduceOp::kSum);
    absl::Status status = work.Wait();
    EXPECT_LT(absl::Now() - start, absl::Milliseconds(700));
    EXPECT_FALSE(work.IsDone());
    // The communicator has let go of it; the kernels have not.
    stream.Run([x] { x.mul_(10); });
    stream.Synchronize();
    EXPECT_TRUE(x.equal(at::full({1000}, 40.0f))) << x;
    return status;
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  ExpectNothingLeft(fabric);
}

TEST(NcclStreamTest, HoldsTensorsUntilTheStreamHasWaited) {
  FakeFabric fabric(2);
  fabric.Inject({.rank = 0, .what = What::kIsDelayed, .delay = absl::Milliseconds(300)});
  const auto statuses = RunOn(fabric, 2, absl::Minutes(1), [&](Communicator& comm) {
    QueuedStream stream(fabric, comm.rank());
    const at::Tensor x = at::ones({10});
    const Work work = comm.AllReduce(x, ReduceOp::kSum);
    EXPECT_GT(x.use_count(), 1u);
    absl::Status status = work.Wait();
    EXPECT_EQ(x.use_count(), 1u);
    stream.Synchronize();
    return status;
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  ExpectNothingLeft(fabric);
}

// The averages of f16 would overflow as a sum: 4 * 20000 > 65504.
TEST(NcclStreamTest, AveragesOfHalfPrecisionDoNotOverflow) {
  testing::RunFakeRanks(4, [](Communicator& comm) {
    const at::Tensor x = at::full({5}, 20000, at::kHalf);
    EXPECT_TRUE(comm.AllReduce(x, ReduceOp::kAverage).Wait().ok());
    EXPECT_TRUE(x.equal(at::full({5}, 20000, at::kHalf))) << x;
    const at::Tensor in = at::full({8}, 20000, at::kHalf);
    const at::Tensor out = at::full({2}, 0, at::kHalf);
    EXPECT_TRUE(comm.ReduceScatterInto(out, in, ReduceOp::kAverage).Wait().ok());
    EXPECT_TRUE(out.equal(at::full({2}, 20000, at::kHalf))) << out;
    EXPECT_TRUE(in.equal(at::full({8}, 20000, at::kHalf))) << in;  // inputs stay as they are
  });
}

// A few operations of every kind, the same on all ranks.
absl::Status DoSomething(Communicator& comm, uint32_t seed) {
  std::mt19937 random(seed);
  const int n = comm.size();
  const int next = (comm.rank() + 1) % n;
  const int previous = (comm.rank() + n - 1) % n;
  std::unique_ptr<Communicator> part;
  for (int step = 0; step < 6; ++step) {
    Communicator& on = part != nullptr && random() % 2 == 0 ? *part : comm;
    const at::Tensor x = at::ones({12});
    const at::Tensor all = at::ones({12 * n});
    std::vector<Work> works;
    switch (random() % 7) {
      case 0:
        works.push_back(on.AllReduce(x, ReduceOp::kSum));
        works.push_back(on.AllReduce(all, ReduceOp::kMax));
        break;
      case 1:
        works.push_back(on.AllReduce(x.to(at::kHalf), ReduceOp::kAverage));
        break;
      case 2:
        works.push_back(on.AllGatherInto(all, x));
        break;
      case 3:
        works.push_back(on.ReduceScatterInto(x, all, ReduceOp::kAverage));
        break;
      case 4:
        works.push_back(comm.Send(x, next));
        works.push_back(comm.Recv(x.clone(), previous));
        break;
      case 5:
        works.push_back(on.Barrier());
        break;
      case 6: {
        auto made = comm.Split(0, -comm.rank());
        if (!made.ok()) return made.status();
        part = *std::move(made);
        break;
      }
    }
    for (const Work& work : works) {
      if (absl::Status status = work.Wait(); !status.ok()) return status;
    }
  }
  // Only now has everybody seen that all is well.
  return comm.Barrier().Wait();
}

Fault RandomFault(std::mt19937& random, int size) {
  constexpr Where kWhere[] = {Where::kInit,       Where::kSplit,        Where::kLaunch,
                              Where::kLaunch,     Where::kLaunch,       Where::kFinalize,
                              Where::kDestroy,    Where::kCreateStream, Where::kCreateEvent,
                              Where::kWaitEvent,  Where::kQueryEvent,   Where::kRecordEvent,
                              Where::kGetUniqueId};
  constexpr What kWhat[] = {What::kFails, What::kFailsLater, What::kHangs, What::kCallHangs,
                            What::kIsDelayed};
  Fault fault;
  fault.rank = static_cast<int>(random() % size);
  fault.where = kWhere[random() % std::size(kWhere)];
  fault.call = static_cast<int>(random() % (fault.where == Where::kLaunch ? 6 : 2));
  fault.what = kWhat[random() % std::size(kWhat)];
  fault.delay = absl::Milliseconds(random() % 30);
  if (fault.where == Where::kFinalize) {
    fault.what = random() % 2 == 0 ? What::kFails : What::kIsDelayed;
  }
  if (fault.where == Where::kDestroy) fault.what = What::kIsDelayed;
  for (const Where only_fails : {Where::kCreateStream, Where::kCreateEvent, Where::kWaitEvent,
                                 Where::kQueryEvent, Where::kRecordEvent, Where::kGetUniqueId}) {
    if (fault.where == only_fails) fault.what = What::kFails;
  }
  return fault;
}

// Whether the error is the right one for whoever was struck, or was told by it.
bool IsRight(const absl::Status& status, const Fault& fault) {
  const auto says = [&](const char* text) { return absl::StrContains(status.message(), text); };
  switch (fault.what) {
    case What::kFails:
    case What::kFailsLater:
      return says(testing::kFakeLastError) || says("out of memory of fake") ||
             says("illegal memory access of fake");
    case What::kHangs:
    case What::kCallHangs:
      return says(" is not done after ") || says(": not made after ") || says(" does not end");
    case What::kIsDelayed:
      return false;
  }
  return false;
}

TEST(NcclRandomFaultTest, EveryRankEndsInTimeWithTheRightError) {
  const char* given = std::getenv("LOCKSTEP_SEED");
  const uint32_t first =
      given != nullptr ? static_cast<uint32_t>(std::stoul(given)) : std::random_device()();
  const int runs = std::getenv("LOCKSTEP_SOAK") != nullptr ? 1000 : 50;
  std::cout << "LOCKSTEP_SEED=" << first << "\n";
  int struck_runs = 0;
  for (int run = 0; run < runs; ++run) {
    const uint32_t seed = first + run;
    std::mt19937 random(seed);
    const int size = 2 + static_cast<int>(random() % 3);
    const Fault fault = RandomFault(random, size);
    const bool hangs = fault.what == What::kHangs || fault.what == What::kCallHangs;
    const absl::Duration deadline = hangs ? absl::Milliseconds(400) : absl::Minutes(1);
    const uint32_t program = random();
    FakeFabric fabric(size);
    fabric.Inject(fault);
    const absl::Time start = absl::Now();
    const auto statuses = RunOn(fabric, size, deadline,
                                [&](Communicator& comm) { return DoSomething(comm, program); });
    const absl::Duration took = absl::Now() - start;
    const bool struck = fabric.calls(fault.rank, fault.where) > fault.call;
    const bool fatal = struck && fault.what != What::kIsDelayed && fault.where != Where::kFinalize;
    struck_runs += struck ? 1 : 0;
    SCOPED_TRACE(absl::StrCat("LOCKSTEP_SEED=", seed, ": ", size, " ranks, rank ", fault.rank,
                              ", call ", fault.call, " of kind ", static_cast<int>(fault.where),
                              ", fault ", static_cast<int>(fault.what)));
    // Beyond the deadline: asking who is missing, and for a hanging call half a second.
    EXPECT_LT(took, hangs ? absl::Seconds(10) : absl::Seconds(30));
    for (int rank = 0; rank < size; ++rank) {
      if (fatal) {
        EXPECT_FALSE(statuses[rank].ok()) << "rank " << rank;
        const bool saw_it_leave =
            rank != fault.rank &&
            absl::StrContains(statuses[rank].message(), " has left the communicator ");
        EXPECT_TRUE(saw_it_leave || IsRight(statuses[rank], fault))
            << "rank " << rank << ": " << statuses[rank];
      } else if (!hangs) {
        EXPECT_TRUE(statuses[rank].ok()) << "rank " << rank << ": " << statuses[rank];
      }
    }
    ExpectNothingLeft(fabric);
    if (::testing::Test::HasFailure()) return;
  }
  std::cout << struck_runs << " of " << runs << " faults struck\n";
  EXPECT_GT(struck_runs, runs / 3);
}

}  // namespace
}  // namespace lockstep::comm::nccl
