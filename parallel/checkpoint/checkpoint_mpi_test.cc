// Checkpoints over MPI: written by a thread while the ranks' collectives go on.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/mpi/gtest_main.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/stop.h"
#include "lockstep/parallel/checkpoint/testing/training.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

constexpr int kSteps = 9;

// One folder for all ranks, whose temporary folders differ.
std::string SharedFolder(comm::Communicator& comm, const std::string& name) {
  const std::filesystem::path own = ::testing::TempDir();
  const std::string path = own.parent_path().string() + "/../shared-" + name;
  if (comm.rank() == 0) std::filesystem::remove_all(path);
  ThrowIfError(comm.Barrier().Wait());
  return path;
}

std::vector<at::Tensor> LocalState(testing::Training& training) {
  std::vector<at::Tensor> values;
  for (const StateShard& shard : training.state().strategy->StateShards()) {
    values.push_back(shard.local.clone());
  }
  for (const auto& each : training.state().optimizer->StateDict()) {
    values.push_back(each.value.clone());
  }
  return values;
}

TEST(CheckpointMpiTest, SavesWhileTrainingGoesOnAndResumesBitForBit) {
  auto world = ValueOrThrow(comm::mpi::Create(comm::mpi::TestWorld()));
  for (const char* strategy : {"ddp", "fsdp"}) {
    const std::string folder = SharedFolder(*world, strategy);
    const testing::TrainingOptions options = {.strategy = strategy, .dropout = 0.2};
    std::vector<double> losses;
    std::vector<at::Tensor> whole;
    {
      testing::Training training(*world, testing::MakeNets(1, 0)[0], options);
      auto checkpointer =
          ValueOrThrow(Checkpointer::Open(*world, {.directory = folder, .keep_last = 2}));
      for (int step = 0; step < kSteps; ++step) {
        losses.push_back(training.Step());
        if (step < 5) ThrowIfError(checkpointer->Save(step + 1, training.state()));
      }
      ThrowIfError(checkpointer->Finish());
      whole = LocalState(training);
    }
    testing::Training training(*world, testing::MakeNets(1, 50)[0], options);
    auto checkpointer = ValueOrThrow(Checkpointer::Open(*world, {.directory = folder}));
    ASSERT_EQ(ValueOrThrow(checkpointer->LoadLatest(training.state())), 5);
    training.Seek();
    for (int step = 5; step < kSteps; ++step) EXPECT_EQ(training.Step(), losses[step]) << step;
    const std::vector<at::Tensor> resumed = LocalState(training);
    ASSERT_EQ(resumed.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(resumed[i], whole[i])) << i;
  }
}

TEST(StopRequestTest, AllRanksStopWhenOneIsTold) {
  auto world = ValueOrThrow(comm::mpi::Create(comm::mpi::TestWorld()));
  for (const int signal : {SIGTERM, SIGUSR1}) {
    auto stop = ValueOrThrow(StopRequest::Watch(*world));
    int steps = 0;
    while (!ValueOrThrow(stop->Requested())) {
      if (++steps == 3 && world->rank() == world->size() - 1) raise(signal);
    }
    EXPECT_EQ(steps, 3);
  }
  auto stop = ValueOrThrow(StopRequest::Watch(*world, absl::Milliseconds(20)));
  const absl::Time start = absl::Now();
  while (!ValueOrThrow(stop->Requested())) {
    ASSERT_LT(absl::Now() - start, absl::Seconds(30));
  }
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(5));
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
