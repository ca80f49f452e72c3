#include "lockstep/tutorials/common/device_world.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "lockstep/comm/launch/relaunch.h"

namespace lockstep::tutorials {
namespace {

TEST(DeviceWorldTest, ThereAreNoMoreRanksThanGpus) {
  EXPECT_TRUE(CheckRanks(/*ranks=*/4, /*gpus=*/4).ok());
  EXPECT_EQ(
      CheckRanks(/*ranks=*/4, /*gpus=*/1),
      absl::FailedPreconditionError("this host has 1 GPU visible and is to run 4 ranks: start "
                                    "at most 1 (--ranks=1), or use --device=cpu"));
  EXPECT_EQ(
      CheckRanks(/*ranks=*/3, /*gpus=*/2),
      absl::FailedPreconditionError("this host has 2 GPUs visible and is to run 3 ranks: start "
                                    "at most 2 (--ranks=2), or use --device=cpu"));
}

// There are no GPUs for tests that do not ask for them.
TEST(DeviceWorldTest, TheCpuHasNoLimit) {
  const launch::RelaunchOptions options = RanksOnDevice(/*default_ranks=*/4);
  EXPECT_EQ(options.default_ranks, 4);
  EXPECT_GT(options.most_default_ranks(), 1000);
  EXPECT_TRUE(options.check_ranks(1000).ok());
}

}  // namespace
}  // namespace lockstep::tutorials
