#pragma once

#include "absl/status/statusor.h"
#include "lockstep/comm/launch/detect.h"

namespace lockstep::comm::nccl {

// Which of the `visible` GPUs of its process a rank takes: that of its local rank, or the only one
// where the launcher gave it one of its own (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES).
// FailedPrecondition, with both numbers, where a node has fewer GPUs than ranks.
absl::StatusOr<int> ChooseDevice(const launch::World& world, int visible);

}  // namespace lockstep::comm::nccl
