// What was saved on any number of ranks, under any strategy, loads on any other.
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/testing/training.h"
#include "lockstep/parallel/fsdp/fsdp_options.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

using testing::MakeNets;
using testing::Training;
using testing::WholeState;

struct Layout {
  std::string strategy;
  int size = 1;
  std::optional<FsdpOptions> fsdp = {};  // strategy is then a name for them

  std::string name() const { return absl::StrCat(strategy, size); }
};

std::vector<Layout> AllLayouts() {
  std::vector<Layout> layouts = {{"none", 1}};
  for (const char* strategy : {"ddp", "fsdp"}) {
    for (const int size : {1, 2, 3, 4, 8}) layouts.push_back({strategy, size});
  }
  return layouts;
}

// What else decides who keeps what, and in which memory.
std::vector<Layout> OptionLayouts() {
  return {
      {"zero1", 3},
      {"zero2", 4},
      {"hybrid", 4, FsdpOptions{.shard_size = 2}},
      {"hybrid_zero2", 8, FsdpOptions{.sharding = Sharding::kGradOp, .shard_size = 4}},
      {"reshard", 4, FsdpOptions{.reshard_size = 2}},
      {"mixed", 3, FsdpOptions{.mixed_precision = {.param = at::kBFloat16, .reduce = at::kFloat}}},
      {"offload", 3, FsdpOptions{.cpu_offload = true}},
      {"all", 4,
       FsdpOptions{.reshard_after_forward = false,
                   .shard_size = 2,
                   .mixed_precision = {.param = at::kBFloat16, .output = at::kFloat},
                   .cpu_offload = true}},
  };
}

void CheckPairs(const std::vector<Layout>& all_from, const std::vector<Layout>& all_to) {
  for (const Layout& from : all_from) {
    const std::string folder = absl::StrCat(::testing::TempDir(), "/reshard-", from.name());
    std::filesystem::remove_all(folder);
    const testing::TrainingOptions options = {.dtype = at::kFloat, .rows = 48, .global_batch = 24};
    WholeState saved;
    auto nets = MakeNets(from.size, /*seed=*/0);
    comm::testing::RunRanks(from.size, [&](comm::Communicator& comm) {
      testing::TrainingOptions mine = options;
      mine.strategy = from.strategy;
      mine.fsdp = from.fsdp;
      Training training(comm, nets[comm.rank()], mine);
      for (int step = 0; step < 3; ++step) training.Step();
      saved.Add(training, comm);
      auto checkpointer =
          ValueOrThrow(Checkpointer::Open(comm, {.directory = folder, .async = false}));
      ThrowIfError(checkpointer->Save(3, training.state()));
    });
    EXPECT_GT(saved.size(), 40);
    for (const Layout& to : all_to) {
      SCOPED_TRACE(absl::StrCat(from.name(), " to ", to.name()));
      WholeState loaded;
      nets = MakeNets(to.size, /*seed=*/99);
      comm::testing::RunRanks(to.size, [&](comm::Communicator& comm) {
        testing::TrainingOptions mine = options;
        mine.strategy = to.strategy;
        mine.fsdp = to.fsdp;
        Training training(comm, nets[comm.rank()], mine);
        auto checkpointer = ValueOrThrow(Checkpointer::Open(comm, {.directory = folder}));
        EXPECT_EQ(ValueOrThrow(checkpointer->LoadLatest(training.state())), 3);
        loaded.Add(training, comm);
      });
      EXPECT_EQ(loaded.DifferenceFrom(saved), "");
    }
  }
}

TEST(ReshardTest, AllPairs) { CheckPairs(AllLayouts(), AllLayouts()); }

TEST(ReshardTest, OptionsOfFsdp) {
  const std::vector<Layout> options = OptionLayouts();
  CheckPairs(options, options);
  const std::vector<Layout> plain = {{"none", 1}, {"ddp", 3}, {"fsdp", 2}};
  CheckPairs(options, plain);
  CheckPairs(plain, options);
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
