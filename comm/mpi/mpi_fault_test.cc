// Ranks that are killed, stopped, or do something else than the others.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/comm/launch/program_under_test.h"

namespace lockstep::comm::mpi {
namespace {

class Program : public launch::testing::ProgramUnderTest {
 public:
  Program(const std::string& mode, int ranks, const std::vector<std::string>& flags = {},
          const std::map<std::string, std::string>& variables = {})
      : ProgramUnderTest("comm/mpi/mpi_fault_program", Flags(mode, ranks, flags), variables) {}

 private:
  static std::vector<std::string> Flags(const std::string& mode, int ranks,
                                        std::vector<std::string> flags) {
    flags.push_back("--mode=" + mode);
    flags.push_back(absl::StrCat("--ranks=", ranks));
    return flags;
  }
};

void ExpectContains(const std::string& text, const std::string& part) {
  EXPECT_TRUE(absl::StrContains(text, part)) << "no \"" << part << "\" in:\n" << text;
}

TEST(MpiFaultTest, KilledRankEndsTheRunAndIsNamed) {
  Program program("run", 3);
  ASSERT_TRUE(program.Started(3)) << program.Err();
  program.KillRank(1, SIGKILL);
  EXPECT_EQ(program.Wait(), 137);
  ExpectContains(program.Err(), "rank 1 was killed by signal 9 (Killed)\n");
  program.ExpectNothingLeft();
}

TEST(MpiFaultTest, StoppedRankIsNamedAfterTheDeadline) {
  Program program("run", 3);
  ASSERT_TRUE(program.Started(3)) << program.Err();
  program.KillRank(2, SIGSTOP);
  EXPECT_EQ(program.Wait(), 1);
  ExpectContains(program.Err(), "DEADLINE_EXCEEDED: AllReduce #");
  ExpectContains(program.Err(), "(sum, Float [2, 3]) of communicator world on rank ");
  ExpectContains(program.Err(), "waiting for rank 2 (");
  ExpectContains(program.Err(), "; gives no sign of life: stopped, killed or cut off)");
  program.ExpectNothingLeft();
}

TEST(MpiFaultTest, StoppedRankThatServesTheStoreIsNamed) {
  Program program("run", 3);
  ASSERT_TRUE(program.Started(3)) << program.Err();
  program.KillRank(0, SIGSTOP);
  EXPECT_EQ(program.Wait(), 1);
  ExpectContains(program.Err(), "rank 1: DEADLINE_EXCEEDED: AllReduce #");
  ExpectContains(program.Err(),
                 "world rank 0, which serves the store, gives no sign of life: stopped, killed or "
                 "cut off");
  program.ExpectNothingLeft();
}

// It has destroyed its communicator, or ended without doing so: the deadline is far off.
TEST(MpiFaultTest, RankThatLeavesIsNamedAtOnce) {
  for (const char* mode : {"leave", "exit"}) {
    Program program(mode, 3);
    EXPECT_EQ(program.Wait(), 1);
    ExpectContains(program.Err(),
                   "AllReduce #12 (sum, Float [2, 3]) of communicator world on rank ");
    ExpectContains(
        program.Err(),
        "of 3 cannot be completed: rank 2 has left the communicator after 11 operations; "
        "all ranks must issue the same ones (uneven data? see join in parallel/ddp)\n");
    program.ExpectNothingLeft();
  }
}

TEST(MpiFaultTest, RankThatDoesNotSplitIsNamed) {
  Program program("split", 3);
  EXPECT_EQ(program.Wait(), 1);
  ExpectContains(program.Err(),
                 "DEADLINE_EXCEEDED: Split of communicator world into world/1 on rank ");
  ExpectContains(program.Err(), "of 3 is not done after 2s: waiting for rank 2\n");
  program.ExpectNothingLeft();
}

TEST(MpiFaultTest, AbortEndsTheOthers) {
  Program program("abort", 3);
  EXPECT_EQ(program.Wait(), 1);
  for (int rank = 0; rank < 3; ++rank) {
    ExpectContains(program.Err(),
                   absl::StrCat("rank ", rank, ": ABORTED: aborted by rank 2: disk full\n"));
  }
  program.ExpectNothingLeft();
}

TEST(MpiFaultTest, DetailModeNamesTheRankThatIssuesSomethingElse) {
  Program program("other", 3, {}, {{"LOCKSTEP_COMM_DEBUG", "detail"}});
  EXPECT_EQ(program.Wait(), 1);
  ExpectContains(program.Err(),
                 "the ranks of communicator world issued different operations as #12: ranks 0, 1: "
                 "AllReduce (sum, Float, 6 elements); rank 2: Barrier");
  program.ExpectNothingLeft();
}

class MpiAbortConformance : public ::testing::TestWithParam<std::string> {};

TEST_P(MpiAbortConformance, PassesOnEveryRank) {
  for (int ranks : {1, 2, 3, 4}) {
    Program program("conformance", ranks, {"--gtest_filter=*." + GetParam() + "*"});
    EXPECT_EQ(program.Wait(), 9);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(std::filesystem::exists(absl::StrCat(program.dir(), "/passed", rank)))
          << "rank " << rank << " of " << ranks << ":\n"
          << program.Out() << program.Err();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(MpiFaultTest, MpiAbortConformance,
                         ::testing::Values("AbortFailsPendingAndLater",
                                           "DeadlineNamesWhoDidNotArrive",
                                           "CollectiveFailsWhereARankHasLeft",
                                           "RecvFailsWhereItsRankHasLeft"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep::comm::mpi
