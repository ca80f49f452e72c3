#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

// Across nodes: //tutorials:multinode_test.
TEST(TorchDistMultiNode, RunsOnOneNodeToo) {
  for (const int ranks : {1, 3}) {
    const Outcome outcome = RunProgram({"tutorials/06_torch_dist_multi_node/torch_dist",
                                        absl::StrCat("--ranks=", ranks), "--kib=3", "--times=2"});
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    const int sum = ranks * (ranks + 1) / 2;
    EXPECT_TRUE(absl::StrContains(outcome.out, absl::StrCat("sum over all ranks: ", sum, "\n")))
        << outcome.out;
    EXPECT_TRUE(absl::StrContains(outcome.out, absl::StrCat(": ", sum, "\nall-reduce of 3 KiB: ")))
        << outcome.out;
    EXPECT_TRUE(absl::StrContains(outcome.out, " ms across 1 node\n")) << outcome.out;
  }
}

}  // namespace
}  // namespace lockstep::tutorials
