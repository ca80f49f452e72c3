#include "lockstep/comm/nccl/device_choice.h"

#include <algorithm>
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
  // mpirun itself gives none its own.
  const bool sees_all = world.launcher == launch::Launcher::kMpirun && chosen == nullptr;
  if (visible == 1 && !sees_all) return 0;
  const int ranks = std::max(world.local_size.value_or(0), world.local_rank + 1);
  if (ranks <= visible) return world.local_rank;
  return absl::FailedPreconditionError(
      absl::StrCat("this host has ", visible, visible == 1 ? " GPU" : " GPUs", " visible", limit,
                   " and ", ranks, " ranks: start at most ", visible, " on it, or use the CPU"));
}

}  // namespace lockstep::comm::nccl
