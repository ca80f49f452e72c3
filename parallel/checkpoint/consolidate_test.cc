#include "lockstep/parallel/checkpoint/consolidate.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/safetensors.h"
#include "lockstep/parallel/checkpoint/testing/training.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string Temporary(const std::string& name) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  fs::remove_all(path);
  return path;
}

std::string Content(const std::string& path) {
  std::ostringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return content.str();
}

// Trains two steps on `size` ranks and saves after each.
void Train(const std::string& folder, const std::string& strategy, int size) {
  const auto nets = testing::MakeNets(size, /*seed=*/3);
  comm::testing::RunRanks(size, [&](comm::Communicator& comm) {
    testing::Training training(comm, nets[comm.rank()],
                               {.strategy = strategy, .dtype = at::kFloat});
    auto checkpointer = ValueOrThrow(Checkpointer::Open(comm, {.directory = folder}));
    for (int step = 1; step <= 2; ++step) {
      training.Step();
      ThrowIfError(checkpointer->Save(step, training.state()));
    }
    ThrowIfError(checkpointer->Finish());
  });
}

TEST(ConsolidateTest, WritesTheFileThatSaveModuleWrites) {
  for (const auto& [strategy, size] : {std::pair("none", 1), {"ddp", 3}, {"fsdp", 4}}) {
    SCOPED_TRACE(strategy);
    const std::string folder = Temporary(strategy);
    Train(folder, strategy, size);
    const std::string output = Temporary("whole.safetensors");
    ASSERT_EQ(Consolidate(folder, output), absl::OkStatus());

    auto net = testing::MakeNets(1, /*seed=*/8)[0];
    ASSERT_EQ(LoadInto(*net, output), absl::OkStatus());
    const std::string expected = Temporary("expected.safetensors");
    ASSERT_EQ(SaveModule(*net, expected), absl::OkStatus());
    EXPECT_EQ(Content(output), Content(expected));

    // One that is named, in the place of the newest.
    ASSERT_EQ(Consolidate(folder + "/step-000000000001", output), absl::OkStatus());
    EXPECT_NE(Content(output), Content(expected));
  }
}

TEST(ConsolidateTest, ErrorsLeaveTheOutputAlone) {
  const std::string folder = Temporary("errors");
  Train(folder, "fsdp", 2);
  const std::string output = Temporary("output");
  std::ofstream(output) << "before";
  const auto told = [&](const std::string& checkpoint) {
    const absl::Status status = Consolidate(checkpoint, output);
    EXPECT_EQ(Content(output), "before");
    return std::string{status.message()};
  };
  EXPECT_EQ(told("/no/such"), "/no/such: cannot list it: No such file or directory");
  EXPECT_EQ(told(::testing::TempDir() + "/errors/.."),
            ::testing::TempDir() + "/errors/..: is no checkpoint: it has no index.json");
  const std::string shard = folder + "/step-000000000002/shard-00001.safetensors";
  fs::resize_file(shard, 4000);
  EXPECT_TRUE(absl::StartsWith(told(folder), shard + ": has 4000 bytes, but "));
  fs::remove(shard);
  EXPECT_EQ(told(folder), shard + ": this shard of the checkpoint is missing");
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
