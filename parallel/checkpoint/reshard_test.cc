// What was saved on any number of ranks, under any strategy, loads on any other.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/testing/training.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

using testing::MakeNets;
using testing::Training;
using testing::WholeState;

struct Layout {
  std::string strategy;
  int size = 1;

  std::string name() const { return absl::StrCat(strategy, size); }
};

std::vector<Layout> AllLayouts() {
  std::vector<Layout> layouts = {{"none", 1}};
  for (const char* strategy : {"ddp", "fsdp"}) {
    for (const int size : {1, 2, 3, 4, 8}) layouts.push_back({strategy, size});
  }
  return layouts;
}

TEST(ReshardTest, AllPairs) {
  for (const Layout& from : AllLayouts()) {
    const std::string folder = absl::StrCat(::testing::TempDir(), "/reshard-", from.name());
    std::filesystem::remove_all(folder);
    const testing::TrainingOptions options = {.dtype = at::kFloat, .rows = 48, .global_batch = 24};
    WholeState saved;
    auto nets = MakeNets(from.size, /*seed=*/0);
    comm::testing::RunRanks(from.size, [&](comm::Communicator& comm) {
      testing::TrainingOptions mine = options;
      mine.strategy = from.strategy;
      Training training(comm, nets[comm.rank()], mine);
      for (int step = 0; step < 3; ++step) training.Step();
      saved.Add(training, comm);
      auto checkpointer =
          ValueOrThrow(Checkpointer::Open(comm, {.directory = folder, .async = false}));
      ThrowIfError(checkpointer->Save(3, training.state()));
    });
    EXPECT_GT(saved.size(), 40);
    for (const Layout& to : AllLayouts()) {
      SCOPED_TRACE(absl::StrCat(from.name(), " to ", to.name()));
      WholeState loaded;
      nets = MakeNets(to.size, /*seed=*/99);
      comm::testing::RunRanks(to.size, [&](comm::Communicator& comm) {
        testing::TrainingOptions mine = options;
        mine.strategy = to.strategy;
        Training training(comm, nets[comm.rank()], mine);
        auto checkpointer = ValueOrThrow(Checkpointer::Open(comm, {.directory = folder}));
        EXPECT_EQ(ValueOrThrow(checkpointer->LoadLatest(training.state())), 3);
        loaded.Add(training, comm);
      });
      EXPECT_EQ(loaded.DifferenceFrom(saved), "");
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
