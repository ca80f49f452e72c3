#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

TEST(TorchDist, EveryRankGetsTheSum) {
  for (const int ranks : {1, 3, 4}) {
    // Four is the default.
    std::vector<std::string> words = {"tutorials/00_torch_dist/torch_dist"};
    if (ranks != 4) words.push_back(absl::StrCat("--ranks=", ranks));
    const Outcome outcome = RunProgram(words);
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    std::vector<std::string> expected;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string who = absl::StrCat("rank ", rank, " of ", ranks, ": ");
      expected.push_back(absl::StrCat(who, "I have ", rank + 1));
      expected.push_back(absl::StrCat(who, "the sum is ", ranks * (ranks + 1) / 2));
    }
    std::vector<std::string> lines = absl::StrSplit(outcome.out, '\n', absl::SkipEmpty());
    std::sort(lines.begin(), lines.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(lines, expected);
  }
}

}  // namespace
}  // namespace lockstep::tutorials
