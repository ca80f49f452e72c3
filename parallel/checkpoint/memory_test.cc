// A rank that loads needs its own part and a little, never the whole model.
#include "lockstep/tools/trace/memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

constexpr int64_t kMiB = 1 << 20;

parallel::testing::Linear BigModel() { return parallel::testing::Linear(2048, 2048); }  // 16 MiB

TEST(MemoryTest, ALoadTakesAChunkARankAndASaveItsSnapshot) {
  trace::InstallCountingAllocator();
  const std::string folder = absl::StrCat(::testing::TempDir(), "/memory");
  std::filesystem::remove_all(folder);
  const std::pair<std::string, int> layouts[] = {{"fsdp", 4}, {"ddp", 2}, {"fsdp", 3}};
  int64_t step = 0;
  for (const auto& [strategy, size] : layouts) {
    SCOPED_TRACE(absl::StrCat(strategy, " on ", size));
    std::vector<parallel::testing::Linear> models;
    for (int rank = 0; rank < size; ++rank) models.push_back(BigModel());
    comm::testing::RunRanks(size, [&](comm::Communicator& comm) {
      auto made = ValueOrThrow(MakeStrategy(strategy, models[comm.rank()].ptr(), &comm));
      optim::FusedAdamW optimizer(made->named_parameters());
      State state = {.strategy = made.get(), .optimizer = &optimizer};
      auto checkpointer = ValueOrThrow(Checkpointer::Open(comm, {.directory = folder}));
      // Live and peak are of all ranks, which are threads.
      const auto grown = [&](const std::function<void()>& act) {
        ThrowIfError(comm.Barrier().Wait());
        if (comm.rank() == 0) trace::ResetMemoryPeak();
        ThrowIfError(comm.Barrier().Wait());
        const int64_t before = trace::GetMemory().live;
        ThrowIfError(comm.Barrier().Wait());
        act();
        ThrowIfError(comm.Barrier().Wait());
        return trace::GetMemory().peak - before;
      };
      const int64_t loading = grown([&] { ValueOrThrow(checkpointer->LoadLatest(state)); });
      EXPECT_LE(loading, size * (kMiB + kMiB / 8));
      EXPECT_GE(loading, step > 0 ? kMiB : 0) << "what is measured here?";
      const int64_t saving = grown([&] {
        ThrowIfError(checkpointer->Save(step, state));
        ThrowIfError(checkpointer->Finish());
      });
      // Each byte once, and what aligns a snapshot to huge pages.
      EXPECT_LE(saving, 3 * 16 * kMiB + size * (kMiB + 2 * kMiB));
    });
    ++step;
  }
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
