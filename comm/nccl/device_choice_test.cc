#include "lockstep/comm/nccl/device_choice.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "lockstep/comm/nccl/create.h"

namespace lockstep::comm::nccl {
namespace {

TEST(DeviceChoiceTest, TakesTheGpuOfTheLocalRank) {
  EXPECT_EQ(*ChooseDevice({.rank = 5, .size = 8, .local_rank = 1}, 4), 1);
}

TEST(DeviceChoiceTest, TakesTheOnlyGpuThatItSees) {
  EXPECT_EQ(*ChooseDevice({.rank = 3, .size = 4, .local_rank = 3}, 1), 0);
}

TEST(DeviceChoiceTest, RefusesMoreRanksThanGpus) {
  setenv("CUDA_VISIBLE_DEVICES", "0,1", /*overwrite=*/1);
  const auto chosen = ChooseDevice({.rank = 6, .size = 8, .local_rank = 2}, 2);
  EXPECT_EQ(chosen.status(),
            absl::FailedPreconditionError(
                "rank 6 is number 2 of its node, counted from 0, but sees 2 GPUs "
                "(CUDA_VISIBLE_DEVICES is \"0,1\"): start no more ranks on a node than it has "
                "GPUs"));
}

TEST(DeviceChoiceTest, RefusesNoGpu) {
  setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  EXPECT_EQ(
      ChooseDevice({}, 0).status(),
      absl::FailedPreconditionError("this process sees no GPU (CUDA_VISIBLE_DEVICES is \"\")"));
}

// Of a program with or without CUDA.
TEST(DeviceChoiceTest, SaysWhatIsMissingWhereThereIsNoGpu) {
  if (CountDevices() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(CheckDevices().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(Create(launch::World()).ok());
}

}  // namespace
}  // namespace lockstep::comm::nccl
