#include "lockstep/comm/launch/threads.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace lockstep::launch {
namespace {

TEST(ThreadsTest, RanksShareTheCoresOfTheirNode) {
  EXPECT_EQ(ThreadsOfRank(/*allowed=*/64, /*cores=*/64, /*ranks=*/4), 16);
  EXPECT_EQ(ThreadsOfRank(/*allowed=*/64, /*cores=*/64, /*ranks=*/1), 64);
  EXPECT_EQ(ThreadsOfRank(/*allowed=*/32, /*cores=*/128, /*ranks=*/4), 32);  // srun --cpu-bind
  EXPECT_EQ(ThreadsOfRank(/*allowed=*/1, /*cores=*/64, /*ranks=*/2), 1);     // mpirun's default
  EXPECT_EQ(ThreadsOfRank(/*allowed=*/2, /*cores=*/2, /*ranks=*/8), 1);
}

TEST(ThreadsTest, TheUsersWordIsTheLast) {
  World world = {.size = 4, .local_size = 4, .launcher = Launcher::kMpirun};
  unsetenv("OMP_NUM_THREADS");
  ASSERT_TRUE(ThreadsOfRank(world).has_value());
  EXPECT_GE(*ThreadsOfRank(world), 1);
  setenv("OMP_NUM_THREADS", "3", /*overwrite=*/1);
  EXPECT_EQ(ThreadsOfRank(world), std::nullopt);
  unsetenv("OMP_NUM_THREADS");
  world.local_size = std::nullopt;
  EXPECT_EQ(ThreadsOfRank(world), std::nullopt);
  EXPECT_EQ(ThreadsOfRank(World{}), std::nullopt);  // alone
}

}  // namespace
}  // namespace lockstep::launch
