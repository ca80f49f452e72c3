#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

constexpr char kProgram[] = "tutorials/01_torch_dist_gpu/torch_dist_gpu";

TEST(TorchDistGpu, RunsOnTheCpu) {
  for (const int ranks : {1, 3}) {
    const Outcome outcome = RunProgram({kProgram, "--device=cpu", absl::StrCat("--ranks=", ranks)});
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    EXPECT_NE(outcome.out.find("on the CPU, over MPI: "), std::string::npos) << outcome.out;
    std::vector<std::string> expected;
    for (int rank = 0; rank < ranks; ++rank) {
      expected.push_back(absl::StrCat("rank ", rank, " of ", ranks,
                                      " on cpu: ten times the sum is ",
                                      10 * ranks * (ranks + 1) / 2));
    }
    std::vector<std::string> lines;
    for (const std::string& line :
         std::vector<std::string>(absl::StrSplit(outcome.out, '\n', absl::SkipEmpty()))) {
      if (line.find("on the CPU") == std::string::npos) lines.push_back(line);
    }
    std::sort(lines.begin(), lines.end());
    EXPECT_EQ(lines, expected);
  }
}

TEST(TorchDistGpu, SaysWhatItNeeds) {
  const Outcome outcome = RunProgram({kProgram, "--device=cuda", "--ranks=1"});
  if (outcome.exit_status == 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_NE(outcome.err.find("or use --device=cpu"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace lockstep::tutorials
