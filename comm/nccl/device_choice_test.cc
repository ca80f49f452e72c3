#include "lockstep/comm/nccl/device_choice.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <optional>
#include <string>

#include "lockstep/comm/nccl/create.h"

namespace lockstep::comm::nccl {
namespace {

TEST(DeviceChoiceTest, TakesTheGpuOfTheLocalRank) {
  EXPECT_EQ(*ChooseDevice({.rank = 5, .size = 8, .local_rank = 1, .local_size = 4}, 4), 1);
}

TEST(DeviceChoiceTest, TakesTheOnlyGpuThatItSees) {
  EXPECT_EQ(*ChooseDevice({.rank = 3, .size = 4, .local_rank = 3}, 1), 0);
}

TEST(DeviceChoiceTest, RefusesMoreRanksThanGpus) {
  setenv("CUDA_VISIBLE_DEVICES", "0,1", /*overwrite=*/1);
  const absl::Status refused = absl::FailedPreconditionError(
      "this host has 2 GPUs visible (CUDA_VISIBLE_DEVICES is \"0,1\") and 4 ranks: start at most 2 "
      "on it, or use the CPU");
  for (const int local : {0, 3}) {
    const auto chosen =
        ChooseDevice({.rank = 4 + local, .size = 8, .local_rank = local, .local_size = 4}, 2);
    EXPECT_EQ(chosen.status(), refused);
  }
  const auto unknown =
      ChooseDevice({.rank = 3, .size = 8, .local_rank = 3, .local_size = std::nullopt}, 2);
  EXPECT_EQ(unknown.status(), refused);
}

TEST(DeviceChoiceTest, RefusesTheOnlyGpuOfAllRanks) {
  unsetenv("CUDA_VISIBLE_DEVICES");
  launch::World world = {
      .size = 4, .local_size = 4, .launcher = launch::Launcher::kMpirun, .store = std::nullopt};
  EXPECT_EQ(ChooseDevice(world, 1).status(),
            absl::FailedPreconditionError("this host has 1 GPU visible and 4 ranks: start at most "
                                          "1 on it, or use the CPU"));
  setenv("CUDA_VISIBLE_DEVICES", "3", /*overwrite=*/1);
  EXPECT_EQ(*ChooseDevice(world, 1), 0) << "perhaps its own";
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
