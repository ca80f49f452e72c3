#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

TEST(MnistDistributed, CopiesComeApart) {
  const Outcome outcome =
      RunProgram({"tutorials/03_mnist_distributed/mnist_distributed", "--ranks=2", "--model=mlp",
                  "--steps=20", "--drift_every=5", "--epochs=2", "--batch=16"});
  ASSERT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  std::vector<double> drifts;
  int tested = 0;
  std::vector<double> losses;
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(outcome.out, '\n', absl::SkipEmpty()))) {
    int step = -1;
    int rank = -1;
    int epoch = -1;
    double drift = -1;
    double loss = -1;
    if (std::sscanf(line.c_str(), "step %d: weights differ by %lf %%", &step, &drift) == 2) {
      EXPECT_EQ(step, 5 * drifts.size());
      drifts.push_back(drift);
    } else if (std::sscanf(line.c_str(), "rank %d of 2: epoch %d: loss %lf,", &rank, &epoch,
                           &loss) == 3) {
      ++tested;
      losses.push_back(loss);
    } else {
      ADD_FAILURE() << line;
    }
  }
  EXPECT_EQ(tested, 4) << "both ranks, after each epoch";
  ASSERT_EQ(drifts.size(), 9) << outcome.out;
  EXPECT_EQ(drifts[0], 0) << "not the same weights to begin with";
  for (size_t i = 1; i < drifts.size(); ++i) EXPECT_GT(drifts[i], drifts[i - 1]) << outcome.out;
  EXPECT_NE(losses[0], losses[1]) << "the same images in the same order";
}

TEST(MnistDistributed, OneRankIsLikeItself) {
  const Outcome outcome = RunProgram({"tutorials/03_mnist_distributed/mnist_distributed",
                                      "--ranks=1", "--model=mlp", "--steps=4", "--drift_every=4"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_TRUE(absl::StrContains(outcome.out, "step 4: weights differ by 0 %\n")) << outcome.out;
}

}  // namespace
}  // namespace lockstep::tutorials
