// 04 and 05: the same training, with the gradients averaged by hand and by DDP.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

namespace fs = std::filesystem;

constexpr char kByHand[] = "tutorials/04_mnist_manual_ddp/mnist_manual_ddp";
constexpr char kDdp[] = "tutorials/05_mnist_ddp/mnist_ddp";

struct Epoch {
  double loss = 0, test_loss = 0, accuracy = 0, drift = -1;
  int collectives = 0, hidden = -1;
};

Outcome Train(const char* program, const std::vector<std::string>& flags) {
  std::vector<std::string> words = {program, "--model=mlp", "--batch=16"};
  words.insert(words.end(), flags.begin(), flags.end());
  return RunProgram(words);
}

// The lines "epoch N: ...", checked to be these and no others.
std::vector<Epoch> Epochs(const Outcome& outcome) {
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  std::vector<Epoch> epochs;
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(outcome.out, '\n', absl::SkipEmpty()))) {
    Epoch epoch;
    EXPECT_EQ(
        std::sscanf(line.c_str(),
                    "epoch %*d: loss %lf, test loss %lf, test accuracy %lf %%, %*d steps in %*f s, "
                    "%*f s of them waiting for gradients; %d all-reduces a step, %d %% hidden; "
                    "weights differ by %lf %%",
                    &epoch.loss, &epoch.test_loss, &epoch.accuracy, &epoch.collectives,
                    &epoch.hidden, &epoch.drift),
        6)
        << line;
    epochs.push_back(epoch);
  }
  return epochs;
}

TEST(DdpProgramsTest, BothLearnTheSameAndStayTogether) {
  for (const std::string ranks : {"--ranks=2", "--ranks=3"}) {
    const std::vector<std::string> flags = {ranks, "--epochs=2", "--steps=30"};
    const std::vector<Epoch> by_hand = Epochs(Train(kByHand, flags));
    const std::vector<Epoch> ddp = Epochs(Train(kDdp, flags));
    ASSERT_EQ(by_hand.size(), 2);
    ASSERT_EQ(ddp.size(), 2);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(by_hand[i].drift, 0);
      EXPECT_EQ(ddp[i].drift, 0);
      EXPECT_NEAR(by_hand[i].test_loss, ddp[i].test_loss, 0.002);
      EXPECT_EQ(by_hand[i].collectives, 6) << "a parameter each";
      EXPECT_EQ(ddp[i].collectives, 2) << "a bucket each";
      EXPECT_EQ(by_hand[i].hidden, 0);
      EXPECT_GE(ddp[i].hidden, 0);
    }
    EXPECT_LT(ddp[1].test_loss, ddp[0].test_loss);
    EXPECT_GT(ddp[1].accuracy, 60);
  }
}

TEST(DdpProgramsTest, RanksLearnWhatOneProcessWouldFromAllBatches) {
  for (const char* program : {kByHand, kDdp}) {
    const auto ranks = Epochs(Train(program, {"--ranks=2", "--epochs=1", "--steps=20"}));
    const auto one =
        Epochs(Train(program, {"--ranks=1", "--batch=32", "--epochs=1", "--steps=20"}));
    ASSERT_EQ(ranks.size(), 1);
    ASSERT_EQ(one.size(), 1);
    EXPECT_NEAR(ranks[0].test_loss, one[0].test_loss, 0.002) << program;
  }
}

TEST(DdpProgramsTest, GoOnFromEachOthersCheckpoints) {
  const std::string folder = (fs::path(testing::TempDir()) / "checkpoints").string();
  fs::remove_all(folder);
  const std::vector<Epoch> whole =
      Epochs(Train(kDdp, {"--ranks=2", "--epochs=2", "--steps=0", "--batch=500"}));
  Epochs(Train(kByHand, {"--ranks=2", "--epochs=1", "--batch=500", "--checkpoint_dir=" + folder}));
  const Outcome rest =
      Train(kDdp, {"--ranks=2", "--epochs=2", "--batch=500", "--checkpoint_dir=" + folder});
  ASSERT_EQ(rest.exit_status, 0) << rest.err;
  ASSERT_TRUE(absl::StartsWith(rest.out, "going on after step 60\n")) << rest.out;
  const std::vector<Epoch> second =
      Epochs({.exit_status = 0, .out = rest.out.substr(rest.out.find('\n')), .err = ""});
  ASSERT_EQ(whole.size(), 2);
  ASSERT_EQ(second.size(), 1);
  EXPECT_NEAR(second[0].test_loss, whole[1].test_loss, 0.002);
}

// What is printed of epochs, but for what depends on time.
std::vector<std::string> WithoutTimes(const Outcome& outcome) {
  std::vector<std::string> lines;
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(outcome.out, '\n', absl::SkipEmpty()))) {
    if (absl::StartsWith(line, "epoch ")) lines.push_back(line.substr(0, line.find(" steps in ")));
  }
  return lines;
}

TEST(DdpProgramsTest, PrintAfterABreakWhatTheyWouldHaveWithoutIt) {
  for (const char* program : {kByHand, kDdp}) {
    const std::string folder = (fs::path(testing::TempDir()) / "breaks").string();
    fs::remove_all(folder);
    std::vector<std::string> flags = {"--ranks=2", "--epochs=2", "--steps=2"};
    const Outcome whole = Train(program, flags);
    ASSERT_EQ(whole.exit_status, 0) << whole.err;

    // Ended after each step: in the middle of either epoch, and at its end.
    flags.push_back("--checkpoint_dir=" + folder);
    std::vector<std::string> lines;
    for (int step = 1; step <= 4; ++step) {
      std::vector<std::string> words = flags;
      words.push_back("--time_limit=1ms");
      const Outcome part = Train(program, words);
      ASSERT_EQ(part.exit_status, 75) << part.err;
      for (const std::string& line : WithoutTimes(part)) lines.push_back(line);
    }
    const Outcome rest = Train(program, flags);
    ASSERT_EQ(rest.exit_status, 0) << rest.err;
    EXPECT_TRUE(absl::StartsWith(rest.out, "going on after step 4\n")) << rest.out;
    for (const std::string& line : WithoutTimes(rest)) lines.push_back(line);
    EXPECT_EQ(lines, WithoutTimes(whole)) << program;
  }
}

}  // namespace
}  // namespace lockstep::tutorials
