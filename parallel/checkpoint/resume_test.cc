// A training that was stopped and resumed goes on as if nothing had happened.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
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
using testing::TrainingOptions;
using testing::WholeState;

constexpr int kSteps = 8;  // of 3 in an epoch

std::string NewFolder() {
  static int count = 0;
  const std::string path = absl::StrCat(::testing::TempDir(), "/resume", ++count);
  std::filesystem::remove_all(path);
  return path;
}

struct Run {
  int size = 1;
  uint64_t seed = 0;
  TrainingOptions options;
  std::string folder;  // to load from and save to; none: neither
  bool async = false;
  int until = kSteps;  // total steps
  bool save = false;   // after the last one
};

struct Result {
  std::vector<double> losses;
  std::vector<int64_t> seen;  // by all ranks in the last epoch, sorted
  WholeState state;
};

void Train(const Run& run, Result& result) {
  const auto nets = MakeNets(run.size, run.seed);
  std::mutex mutex;
  comm::testing::RunRanks(run.size, [&](comm::Communicator& comm) {
    Training training(comm, nets[comm.rank()], run.options);
    std::unique_ptr<Checkpointer> checkpointer;
    int64_t step = 0;
    if (!run.folder.empty()) {
      checkpointer =
          ValueOrThrow(Checkpointer::Open(comm, {.directory = run.folder, .async = run.async}));
      const auto loaded = ValueOrThrow(checkpointer->LoadLatest(training.state()));
      if (loaded) training.Seek();
      step = loaded.value_or(0);
    }
    for (; step < run.until; ++step) {
      const double loss = training.Step();
      if (comm.rank() == 0) result.losses.push_back(loss);
    }
    if (run.save) {
      ThrowIfError(checkpointer->Save(step, training.state()));
      ThrowIfError(checkpointer->Finish());
    }
    result.state.Add(training, comm);
    std::lock_guard lock(mutex);
    result.seen.insert(result.seen.end(), training.seen().begin(), training.seen().end());
    std::sort(result.seen.begin(), result.seen.end());
  });
}

std::vector<int> StepsToStopAt() {
  if (std::getenv("LOCKSTEP_SOAK") == nullptr) return {1, 3, 5};
  std::vector<int> steps;
  for (int step = 0; step < kSteps; ++step) steps.push_back(step);
  return steps;
}

TEST(ResumeTest, GoesOnBitForBit) {
  const FsdpOptions mesh = {.shard_size = 2,
                            .mixed_precision = {.param = at::kBFloat16, .output = at::kFloat},
                            .cpu_offload = true};
  const std::tuple<std::string, int, std::optional<FsdpOptions>> cases[] = {
      {"none", 1, {}},  {"ddp", 2, {}},  {"manual", 3, {}}, {"zero1", 2, {}},
      {"zero2", 3, {}}, {"fsdp", 4, {}}, {"mesh", 4, mesh}};
  for (const auto& [strategy, size, fsdp] : cases) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      const TrainingOptions options = {
          .strategy = strategy, .fsdp = fsdp, .dtype = dtype, .dropout = 0.3};
      Result whole;
      Train({.size = size, .options = options}, whole);
      for (const int stop : StepsToStopAt()) {
        for (const bool async : {false, true}) {
          SCOPED_TRACE(absl::StrCat(strategy, " on ", size, " stopped at ", stop));
          const std::string folder = NewFolder();
          Result first;
          Result second;
          Train({.size = size,
                 .options = options,
                 .folder = folder,
                 .async = async,
                 .until = stop,
                 .save = true},
                first);
          Train({.size = size, .seed = 77, .options = options, .folder = folder}, second);
          first.losses.insert(first.losses.end(), second.losses.begin(), second.losses.end());
          EXPECT_EQ(first.losses, whole.losses);
          EXPECT_EQ(second.state.DifferenceFrom(whole.state), "");
        }
      }
    }
  }
}

TEST(ResumeTest, GoesOnAtAnotherWorldSize) {
  const std::pair<std::string, int> runs[] = {{"fsdp", 4}, {"ddp", 2}, {"none", 1}, {"fsdp", 3}};
  Result whole;
  Train({.size = 1, .options = {.strategy = "none"}}, whole);
  for (const auto& [from, from_size] : runs) {
    for (const auto& [to, to_size] : runs) {
      SCOPED_TRACE(absl::StrCat(from, " on ", from_size, " to ", to, " on ", to_size));
      const std::string folder = NewFolder();
      Result first;
      Result second;
      Train({.size = from_size,
             .options = {.strategy = from},
             .folder = folder,
             .until = 4,
             .save = true},
            first);
      Train(
          {.size = to_size, .seed = 77, .options = {.strategy = to}, .folder = folder, .until = 6},
          second);
      first.losses.insert(first.losses.end(), second.losses.begin(), second.losses.end());
      ASSERT_EQ(first.losses.size(), 6);
      for (size_t step = 0; step < first.losses.size(); ++step) {
        EXPECT_NEAR(first.losses[step], whole.losses[step], 1e-9) << step;
      }
      // The fourth step began the second epoch: with the rows after it, all are seen once.
      std::vector<int64_t> seen = first.seen;
      seen.insert(seen.end(), second.seen.begin(), second.seen.end());
      std::sort(seen.begin(), seen.end());
      ASSERT_EQ(seen.size(), 36);
      for (int64_t row = 0; row < 36; ++row) EXPECT_EQ(seen[row], row);
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
