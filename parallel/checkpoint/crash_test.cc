// Whatever a save was doing when its ranks died, a whole checkpoint is there: the one before, or
// the new one.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/testing/training.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kProgram[] = "parallel/checkpoint/crash_test_program";
constexpr int kNever = 1 << 20;

// Exit status, or minus the signal.
int RunProgram(const std::string& folder, int die_at, const std::string& how) {
  const pid_t pid = fork();
  if (pid == 0) {
    execl(kProgram, kProgram, folder.c_str(), std::to_string(die_at).c_str(), how.c_str(),
          static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

struct Loaded {
  int64_t step = 0;
  testing::WholeState state;
};

void Load(const std::string& folder, Loaded& loaded) {
  const auto nets = testing::MakeNets(/*size=*/1, /*seed=*/9);
  comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
    testing::Training training(comm, nets[0], {.strategy = "none"});
    training.state().generators.clear();  // of three ranks
    auto checkpointer = ValueOrThrow(Checkpointer::Open(comm, {.directory = folder}));
    loaded.step = ValueOrThrow(checkpointer->LoadLatest(training.state())).value_or(0);
    loaded.state.Add(training, comm);
  });
}

std::string Fresh(const std::string& name) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  fs::remove_all(path);
  return path;
}

class CrashTest : public ::testing::TestWithParam<std::string> {};

TEST_P(CrashTest, AtEveryOperationOfASave) {
  const std::string base = Fresh(GetParam() + "-base");
  for (int step = 1; step <= 2; ++step) ASSERT_EQ(RunProgram(base, kNever, "sync"), 0);
  const std::string whole = Fresh(GetParam() + "-whole");
  fs::copy(base, whole, fs::copy_options::recursive);
  ASSERT_EQ(RunProgram(whole, kNever, GetParam()), 0);
  Loaded before;
  Loaded after;
  Load(base, before);
  Load(whole, after);
  ASSERT_EQ(before.step, 2);
  ASSERT_EQ(after.step, 3);
  ASSERT_NE(before.state.DifferenceFrom(after.state), "");
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(whole)) names.insert(entry.path().filename());

  const bool soak = std::getenv("LOCKSTEP_SOAK") != nullptr;
  const char* given = std::getenv("LOCKSTEP_SEED");
  const unsigned seed = given != nullptr ? std::atoi(given) : std::random_device()();
  SCOPED_TRACE(absl::StrCat("repeat with LOCKSTEP_SEED=", seed));
  const int stride = soak ? 1 : 3;
  int crashes = 0;
  for (int die_at = soak ? 0 : static_cast<int>(seed % stride);; die_at += stride) {
    SCOPED_TRACE(absl::StrCat("at operation ", die_at));
    const std::string folder = Fresh(GetParam() + "-crash");
    fs::copy(base, folder, fs::copy_options::recursive);
    const int exit_status = RunProgram(folder, die_at, GetParam());
    if (exit_status == 0) break;  // past the last operation
    ASSERT_EQ(exit_status, -SIGKILL);
    ++crashes;
    Loaded left;
    Load(folder, left);
    ASSERT_TRUE(left.step == 2 || left.step == 3) << left.step;
    EXPECT_EQ(left.state.DifferenceFrom(left.step == 2 ? before.state : after.state), "");
    // The next save goes on from there and cleans up.
    ASSERT_EQ(RunProgram(folder, kNever, GetParam()), 0);
    for (const auto& entry : fs::directory_iterator(folder)) {
      EXPECT_FALSE(absl::StrContains(entry.path().filename().string(), '.')) << entry.path();
    }
    if (left.step == 2) {
      std::set<std::string> later;
      for (const auto& entry : fs::directory_iterator(folder)) {
        later.insert(entry.path().filename());
      }
      EXPECT_EQ(later, names);
      Load(folder, left);
      EXPECT_EQ(left.step, 3);
      EXPECT_EQ(left.state.DifferenceFrom(after.state), "");
    }
  }
  EXPECT_GT(crashes, soak ? 20 : 6);
}

INSTANTIATE_TEST_SUITE_P(Save, CrashTest, ::testing::Values("sync", "async"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep::parallel::checkpoint
