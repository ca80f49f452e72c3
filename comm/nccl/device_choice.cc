#include "lockstep/comm/nccl/device_choice.h"

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"

namespace lockstep::comm::nccl {

absl::StatusOr<int> ChooseDevice(const launch::World& world, int visible) {
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string limit =
      chosen == nullptr ? "" : absl::StrCat(" (CUDA_VISIBLE_DEVICES is \"", chosen, "\")");
  if (visible <= 0) {
    return absl::FailedPreconditionError(absl::StrCat("this process sees no GPU", limit));
  }
  // Whether it is the rank's own shows when the ranks compare what they have (device_claim.h).
  if (visible == 1) return 0;
  if (world.local_rank < visible) return world.local_rank;
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", world.rank, " is number ", world.local_rank,
                   " of its node, counted from 0, but sees ", visible, " GPUs", limit,
                   ": start no more ranks on a node than it has GPUs"));
}

}  // namespace lockstep::comm::nccl
