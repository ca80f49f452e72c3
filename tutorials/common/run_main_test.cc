#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

Outcome RunOne(std::vector<std::string> flags, const RunOptions& options = {}) {
  flags.insert(flags.begin(), "tutorials/common/run_main_test_program");
  return RunProgram(flags, options);
}

void ExpectRefused(const std::vector<std::string>& flags, const std::string& message) {
  const Outcome outcome = RunOne(flags);
  EXPECT_EQ(outcome.exit_status, 2) << message;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "run_main_test_program: " + message + "\n");
}

TEST(RunMainTest, DefaultsAndEveryWayToSetAFlag) {
  const Outcome plain = RunOne({});
  EXPECT_EQ(plain.exit_status, 0);
  EXPECT_EQ(plain.out, "epochs 3 batch 64 lr 0.001 seed 1 device cpu\n");
  EXPECT_EQ(plain.err, "");

  const Outcome set =
      RunOne({"--epochs=5", "--batch", "7", "-lr=2e-2", "--shout", "--seed=18446744073709551615"});
  EXPECT_EQ(set.exit_status, 0);
  EXPECT_EQ(set.out, "EPOCHS 5 batch 7 lr 0.02 seed 18446744073709551615 device cpu\n");

  EXPECT_EQ(RunOne({"--shout", "--noshout", "--device=cpu"}).out, plain.out);
  EXPECT_EQ(RunOne({"--shout=true", "--shout=false"}).out, plain.out);
}

TEST(RunMainTest, HelpShowsThisProgramsFlagsOnly) {
  const Outcome help = RunOne({"--batch=0", "--help"});
  EXPECT_EQ(help.exit_status, 0);
  EXPECT_EQ(help.err, "");
  EXPECT_EQ(help.out,
            "run_main_test_program: fails as it is told.\n"
            "\n"
            "Example:\n"
            "  run_main_test_program --batch=2\n"
            "\n"
            "Flags of run_main_test_program:\n"
            "  --epochs=3              passes over the training images, of which there are more "
            "than a line of\n"
            "                          text has room for\n"
            "  --fail=                 how to fail: status, throw, torch, exception or memory\n"
            "  --[no]shout             print in capitals\n"
            "\n"
            "Common flags:\n"
            "  --batch=64              images a step, on each rank\n"
            "  --device=auto           where to compute: auto, cpu or cuda; auto is cuda where "
            "there is a "
            "GPU\n"
            "  --lr=0.001              learning rate\n"
            "  --seed=1                decides the first weights and the order of the images\n");
  EXPECT_EQ(RunOne({"-h"}).out, help.out);
}

TEST(RunMainTest, RefusesWhatIsNoFlag) {
  ExpectRefused({"--epoch=3"},
                "there is no flag --epoch; did you mean --epochs? (--help lists the flags)");
  ExpectRefused({"--nobatch"},
                "there is no flag --nobatch; did you mean --batch? (--help lists "
                "the flags)");
  ExpectRefused({"--ranks=2"}, "there is no flag --ranks (--help lists the flags)");
  ExpectRefused({"--=2"}, "there is no flag -- (--help lists the flags)");
  ExpectRefused({"--batch=2", "mlp"},
                "the argument 'mlp' is no flag (--help lists the flags and an example)");
  ExpectRefused({"--"}, "the argument '--' is no flag (--help lists the flags and an example)");
}

TEST(RunMainTest, RefusesSenselessValues) {
  for (const std::string text : {"0", "-1", "x", "1.5", "", "9223372036854775808"}) {
    ExpectRefused({"--batch=" + text}, "Illegal value '" + text +
                                           "' specified for flag 'batch'; give a whole number "
                                           "from 1 up");
  }
  for (const std::string text : {"0", "-0.1", "fast", "inf", "nan"}) {
    ExpectRefused({"--lr=" + text},
                  "Illegal value '" + text + "' specified for flag 'lr'; give a number above 0");
  }
  ExpectRefused({"--seed=-1"}, "Illegal value '-1' specified for flag 'seed'");
  ExpectRefused({"--batch"}, "--batch needs a value, as in --batch=64");
  ExpectRefused({"--device=cuda"},
                "Illegal value 'cuda' specified for flag 'device'; this program was built without "
                "CUDA: build it with --config=gpu (docs/gpu.md); or use --device=cpu");
  ExpectRefused({"--device=gpu"},
                "Illegal value 'gpu' specified for flag 'device'; choose auto, cpu or cuda");
}

TEST(RunMainTest, FailsWithOneLine) {
  const std::pair<std::string, std::string> cases[] = {
      {"status", "no file x: make one"}, {"throw", "file x is cut off"},
      {"torch", "shapes differ:"},       {"exception", "first line"},
      {"memory", "out of memory"},
  };
  for (const auto& [how, message] : cases) {
    const Outcome outcome = RunOne({"--fail=" + how});
    EXPECT_EQ(outcome.exit_status, 1) << how;
    EXPECT_EQ(outcome.err, "run_main_test_program: " + message + "\n");
    EXPECT_EQ(outcome.out, "epochs 3 batch 64 lr 0.001 seed 1 device cpu\n");
  }
}

TEST(RunMainTest, NamesTheRankThatALauncherGave) {
  const Outcome outcome = RunOne({"--fail=status"}, {.environment = {{"RANK", "2"},
                                                                     {"WORLD_SIZE", "4"},
                                                                     {"LOCAL_RANK", "2"},
                                                                     {"MASTER_ADDR", "localhost"},
                                                                     {"MASTER_PORT", "29500"}}});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_EQ(outcome.err, "run_main_test_program: rank 2: no file x: make one\n");
}

Outcome RunMany(std::vector<std::string> flags, const RunOptions& options = {}) {
  flags.insert(flags.begin(), "tutorials/common/world_test_program");
  return RunProgram(flags, options);
}

TEST(RunRanksTest, StartsRanksOrRunsInPlace) {
  EXPECT_EQ(RunMany({}).out, "3 ranks, sum 6\n");
  const Outcome two = RunMany({"--ranks=2", "--deadline=1m"});
  EXPECT_EQ(two.exit_status, 0);
  EXPECT_EQ(two.out, "2 ranks, sum 3\n");
  EXPECT_EQ(two.err, "");
  EXPECT_EQ(RunMany({"--ranks=1"}).out, "1 ranks, sum 1\n");
  // What finds no mpirun runs on one rank all the same.
  EXPECT_EQ(RunMany({"--ranks=1"}, {.environment = {{"LOCKSTEP_MPIRUN", "/nowhere"}}}).out,
            "1 ranks, sum 1\n");
}

TEST(RunRanksTest, HelpHasItsFlags) {
  const Outcome help = RunMany({"--help"});
  EXPECT_EQ(help.exit_status, 0);
  EXPECT_TRUE(absl::StrContains(help.out, "\n  --deadline=30m ")) << help.out;
  EXPECT_TRUE(absl::StrContains(help.out, "\n  --ranks=3 ")) << help.out;
  EXPECT_FALSE(absl::StrContains(help.out, "--batch")) << help.out;
}

TEST(RunRanksTest, ChecksFlagsBeforeItStartsRanks) {
  const std::pair<std::string, std::string> cases[] = {
      {"--ranks=0",
       "Illegal value '0' specified for flag 'ranks'; give a number of ranks from 1 "
       "up"},
      {"--deadline=5",
       "Illegal value '5' specified for flag 'deadline'; give a time with its "
       "unit, as in 90s, 30m or 1h30m"},
      {"--deadline=0s",
       "Illegal value '0s' specified for flag 'deadline'; give a time with its "
       "unit, as in 90s, 30m or 1h30m"},
      {"--model=mlp", "there is no flag --model (--help lists the flags)"},
  };
  for (const auto& [flag, message] : cases) {
    const Outcome outcome = RunMany({flag});
    EXPECT_EQ(outcome.exit_status, 2);
    EXPECT_EQ(outcome.err, "world_test_program: " + message + "\n");
  }
}

TEST(RunRanksTest, ProfilesTheStartUpOfAllRanks) {
  const Outcome outcome =
      RunMany({"--profile_startup"}, {.environment = {{"OMP_NUM_THREADS", "1"}}});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  const std::vector<std::string> lines = absl::StrSplit(outcome.out, '\n');
  ASSERT_EQ(lines.size(), 8U) << outcome.out;
  EXPECT_EQ(lines[0], "3 ranks, sum 6");
  EXPECT_EQ(lines[1], "start-up, in ms; ranks by what they did without waiting for others");
  const auto words = [](const std::string& line) {
    return std::vector<std::string>(absl::StrSplit(line, ' ', absl::SkipEmpty()));
  };
  EXPECT_EQ(words(lines[2]), (std::vector<std::string>{"rank", "host", "launch", "libraries", "MPI",
                                                       "body", "total", "threads", "cores"}));
  std::set<std::string> ranks;
  int slowest = 1'000'000;
  for (int row = 4; row < 7; ++row) {
    const std::vector<std::string> cells = words(lines[row]);
    ASSERT_EQ(cells.size(), 9U) << lines[row];
    ranks.insert(cells[0]);
    int sum = 0;
    for (int column = 2; column < 6; ++column) sum += std::stoi(cells[column]);
    EXPECT_NEAR(sum, std::stoi(cells[6]), 4) << lines[row];  // rounded
    const int own = std::stoi(cells[2]) + std::stoi(cells[3]);
    EXPECT_LE(own, slowest + 2) << outcome.out;
    slowest = own;
    EXPECT_EQ(cells[7], "1");
  }
  EXPECT_EQ(ranks, (std::set<std::string>{"0", "1", "2"}));
  EXPECT_TRUE(absl::StrContains(RunMany({"--profile_startup", "--ranks=1"}).out, "libraries"));
}

TEST(RunRanksTest, FailingRankEndsAllAndAloneSaysWhy) {
  for (const std::string how : {"status", "throw"}) {
    const Outcome outcome = RunMany({"--fail=" + how});
    EXPECT_EQ(outcome.exit_status, 1) << how;
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(absl::StrContains(outcome.err, "world_test_program: rank 1: file x is cut off\n"))
        << outcome.err;
    EXPECT_FALSE(absl::StrContains(outcome.err, "aborted by")) << outcome.err;
    EXPECT_FALSE(absl::StrContains(outcome.err, "rank 0:")) << outcome.err;
    EXPECT_FALSE(absl::StrContains(outcome.err, "rank 2:")) << outcome.err;
  }
}

TEST(RunRanksTest, FailingRankLeavesItsLastOperations) {
  const std::string folder = ::testing::TempDir();
  const Outcome outcome = RunMany({"--fail=absent", "--deadline=2s", "--ranks=2"},
                                  {.environment = {{"LOCKSTEP_FLIGHT_DIR", folder}}});
  EXPECT_EQ(outcome.exit_status, 1);
  std::ifstream file(folder + "/rank0.flight.json");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(absl::StrContains(text.str(), "\"operation\": \"AllReduce\"")) << text.str();
  EXPECT_TRUE(absl::StrContains(text.str(), "\"state\": \"failed\"")) << text.str();
  // A folder that is not there takes nothing from the message.
  const Outcome lost =
      RunMany({"--fail=status"}, {.environment = {{"LOCKSTEP_FLIGHT_DIR", "/no"}}});
  EXPECT_EQ(lost.exit_status, 1);
  EXPECT_TRUE(absl::StrContains(lost.err, "rank 1: file x is cut off\n")) << lost.err;
  EXPECT_TRUE(absl::StrContains(lost.err, "/no")) << lost.err;
}

TEST(RunRanksTest, MissingRankIsNamedAtTheDeadline) {
  const Outcome outcome = RunMany({"--fail=absent", "--deadline=2s"});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_TRUE(absl::StrContains(outcome.err, "is not done after 2")) << outcome.err;
  EXPECT_TRUE(absl::StrContains(outcome.err, "waiting for rank 1 ")) << outcome.err;
}

TEST(RunRanksTest, RankThatLeavesEndsAll) {
  const Outcome outcome = RunMany({"--fail=exit"});
  EXPECT_EQ(outcome.exit_status, 5);
  EXPECT_TRUE(absl::StrContains(outcome.err, "rank 1 exited with status 5\n")) << outcome.err;
}

}  // namespace
}  // namespace lockstep::tutorials
