#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/launch/program_under_test.h"

namespace lockstep::launch::testing {
namespace {

namespace fs = std::filesystem;

class Program : public ProgramUnderTest {
 public:
  Program(const std::string& mode, std::vector<std::string> flags,
          const std::map<std::string, std::string>& variables = {})
      : ProgramUnderTest("comm/launch/relaunch_test_program", WithMode(mode, std::move(flags)),
                         variables) {}

 private:
  static std::vector<std::string> WithMode(const std::string& mode,
                                           std::vector<std::string> flags) {
    flags.insert(flags.begin(), "--mode=" + mode);
    return flags;
  }
};

std::string Cores(int ranks) {
  cpu_set_t cores;
  sched_getaffinity(0, sizeof(cores), &cores);
  return absl::StrCat(std::max(1, CPU_COUNT(&cores) / ranks));
}

TEST(RelaunchTest, StartsRanksAndPassesOtherArguments) {
  unsetenv("OMP_NUM_THREADS");
  Program run("ok", {"--steps=7", "--ranks=3", "--", "--ranks=5"}, {{"TMPDIR", "/elsewhere"}});
  EXPECT_EQ(run.Wait(), 0);
  std::vector<std::string> expected;
  for (int rank = 0; rank < 3; ++rank) {
    expected.push_back(absl::StrCat("rank ", rank, " of 3 sum 6 launcher mpirun args --steps=7 -- ",
                                    "--ranks=5 terminal 0 threads ", Cores(3),
                                    " tmpdir /elsewhere input -1"));
  }
  EXPECT_EQ(run.SortedLines(), expected);
  EXPECT_EQ(run.Err(), "");
  run.ExpectNothingLeft();
}

TEST(RelaunchTest, KeepsTheUsersThreadCount) {
  Program run("ok", {"--ranks", "2"}, {{"OMP_NUM_THREADS", "5"}});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_EQ(run.SortedLines().size(), 2);
  EXPECT_TRUE(
      absl::StrContains(run.Out(), "rank 1 of 2 sum 3 launcher mpirun args terminal 0 threads 5"))
      << run.Out();
}

TEST(RelaunchTest, OneRankRunsInPlace) {
  Program run("ok", {"--ranks=1"});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_TRUE(absl::StartsWith(run.Out(), "rank 0 of 1 sum 1 launcher no launcher args"))
      << run.Out();
}

TEST(RelaunchTest, LimitsTheDefaultAlone) {
  Program limited("ok", {}, {{"MOST_RANKS", "2"}});
  EXPECT_EQ(limited.Wait(), 0);
  EXPECT_EQ(limited.SortedLines().size(), 2);
  Program explicit_ranks("ok", {"--ranks=3"}, {{"MOST_RANKS", "2"}});
  EXPECT_EQ(explicit_ranks.Wait(), 0);
  EXPECT_EQ(explicit_ranks.SortedLines().size(), 3);
  Program refused("ok", {"--ranks=4"}, {{"MOST_RANKS", "2"}});
  EXPECT_EQ(refused.Wait(), 2);
  EXPECT_TRUE(absl::StrContains(refused.Err(), "4 is not three")) << refused.Err();
}

TEST(RelaunchTest, HelpRunsInPlace) {
  Program run("ok", {"--help"});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_TRUE(absl::StartsWith(run.Out(), "rank 0 of 1 sum 1 launcher no launcher args --help"))
      << run.Out();
}

TEST(RelaunchTest, RefusesBadRankCounts) {
  for (const std::string flag : {"--ranks=0", "--ranks=two", "--ranks=", "--ranks=-1"}) {
    Program run("ok", {flag});
    EXPECT_EQ(run.Wait(), 2);
    EXPECT_EQ(run.Err(), absl::StrCat("relaunch_test_program: ", flag,
                                      ": give a number of ranks from 1 up, as in --ranks=2\n"));
  }
}

TEST(RelaunchTest, RefusesRanksThatWouldDrownTheHost) {
  Program run("ok", {"--ranks=1000000"});
  EXPECT_EQ(run.Wait(), 2);
  EXPECT_TRUE(absl::StartsWith(run.Err(), "relaunch_test_program: --ranks=1000000: at most "))
      << run.Err();
}

TEST(RelaunchTest, RefusesRankCountThatLauncherContradicts) {
  Program run("ok", {"--ranks=2"},
              {{"RANK", "0"},
               {"WORLD_SIZE", "4"},
               {"LOCAL_RANK", "0"},
               {"MASTER_ADDR", "localhost"},
               {"MASTER_PORT", "29500"}});
  EXPECT_EQ(run.Wait(), 2);
  EXPECT_EQ(run.Err(),
            "relaunch_test_program: --ranks=2, but torchrun-style variables started 4 ranks: leave "
            "--ranks out\n");
}

TEST(RelaunchTest, NamesWhatIsMissing) {
  Program run("ok", {"--ranks=2"}, {{"LOCKSTEP_MPIRUN", "/nowhere/mpirun"}});
  EXPECT_EQ(run.Wait(), 2);
  EXPECT_EQ(
      run.Err(),
      "relaunch_test_program: no program /nowhere/mpirun to start ranks with: LOCKSTEP_MPIRUN "
      "must be the path of mpirun\n");
}

TEST(RelaunchTest, RefusesAnMpirunThatIsNotOpenMpi) {
  const fs::path fake = fs::path(::testing::TempDir()) / "mpirun";
  std::ofstream(fake) << "#!/bin/sh\nshift 6\nexec \"$@\"\n";
  chmod(fake.c_str(), 0700);
  Program run("ok", {"--ranks=2"}, {{"LOCKSTEP_MPIRUN", fake.string()}});
  EXPECT_EQ(run.Wait(), 2);
  EXPECT_EQ(
      run.Err(),
      "relaunch_test_program: mpirun started this rank without OMPI_COMM_WORLD_RANK: it is not "
      "that of Open MPI; set LOCKSTEP_MPIRUN to the path of one that is\n");
}

TEST(RelaunchTest, FailingRankEndsAll) {
  Program run("exit", {"--ranks=3"});
  EXPECT_EQ(run.Wait(), 3);
  EXPECT_EQ(run.Err(), "rank 1 exited with status 3\n");
  run.ExpectNothingLeft();
}

TEST(RelaunchTest, AbortingRankEndsAll) {
  Program run("mpi_abort", {"--ranks=3"});
  EXPECT_EQ(run.Wait(), 5);
  run.ExpectNothingLeft();
}

class KilledRankTest : public ::testing::TestWithParam<const char*> {};

TEST_P(KilledRankTest, EndsAllAndIsNamed) {
  Program run(GetParam(), {"--ranks=3"});
  ASSERT_TRUE(run.Started(3)) << run.Err();
  run.KillRank(2, SIGKILL);
  EXPECT_EQ(run.Wait(), 137);
  EXPECT_EQ(run.Err(), "rank 2 was killed by signal 9 (Killed)\n");
  run.ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(RelaunchTest, KilledRankTest,
                         ::testing::Values("wait", "no_mpi", "stubborn"),
                         [](const auto& info) { return std::string(info.param); });

class EndingSignalTest : public ::testing::TestWithParam<int> {};

TEST_P(EndingSignalTest, EndsAll) {
  for (const std::string mode : {"wait", "stubborn"}) {
    Program run(mode, {"--ranks=2"});
    ASSERT_TRUE(run.Started(2)) << run.Err();
    run.Kill(GetParam());
    EXPECT_EQ(run.Wait(), 128 + GetParam()) << mode;
    run.ExpectNothingLeft();
  }
}

INSTANTIATE_TEST_SUITE_P(RelaunchTest, EndingSignalTest, ::testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& info) { return absl::StrCat("Signal", info.param); });

TEST(RelaunchTest, RanksHaveTimeToSaveAtASignal) {
  Program run("saves", {"--ranks=2"});
  ASSERT_TRUE(run.Started(2)) << run.Err();
  run.Kill(SIGTERM);
  EXPECT_EQ(run.Wait(), 128 + SIGTERM);
  EXPECT_EQ(run.Err(), "rank 0 saved\nrank 1 saved\n");
  run.ExpectNothingLeft();
}

TEST(RelaunchTest, SecondSignalEndsAllAtOnce) {
  Program run("saves", {"--ranks=2"});
  ASSERT_TRUE(run.Started(2)) << run.Err();
  run.Kill(SIGTERM);
  absl::SleepFor(absl::Milliseconds(500));
  run.Kill(SIGINT);
  EXPECT_EQ(run.Wait(), 128 + SIGTERM);
  EXPECT_FALSE(absl::StrContains(run.Err(), "saved")) << run.Err();
  run.ExpectNothingLeft();
}

TEST(RelaunchTest, KilledParentEndsAll) {
  for (const std::string mode : {"wait", "stubborn"}) {
    Program run(mode, {"--ranks=2"});
    ASSERT_TRUE(run.Started(2)) << run.Err();
    run.Kill(SIGKILL);
    EXPECT_EQ(run.Wait(), -SIGKILL) << mode;
    run.ExpectNothingLeft();
  }
}

TEST(RelaunchTest, KilledMpirunEndsAll) {
  for (const std::string mode : {"wait", "stubborn"}) {
    Program run(mode, {"--ranks=2"});
    ASSERT_TRUE(run.Started(2)) << run.Err();
    kill(run.mpirun(), SIGKILL);
    EXPECT_EQ(run.Wait(), 137) << mode;
    EXPECT_TRUE(absl::EndsWith(run.Err(), "mpirun was killed by signal 9 (Killed)\n")) << run.Err();
    run.ExpectNothingLeft();
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
