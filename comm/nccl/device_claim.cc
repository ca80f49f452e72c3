#include "lockstep/comm/nccl/device_claim.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace lockstep::comm::nccl {

absl::Status ClaimDevice(Library& library, Store& store, int rank) {
  absl::StatusOr<std::string> uuid = library.DeviceUuid();
  if (!uuid.ok()) return uuid.status();
  const std::string owner = absl::StrCat("device/", *uuid, "/owner");
  absl::StatusOr<int64_t> claims = store.Add(absl::StrCat("device/", *uuid, "/claims"), 1);
  if (!claims.ok()) return claims.status();
  if (*claims == 1) return store.Set(owner, absl::StrCat(rank));
  absl::StatusOr<std::string> other = store.Get(owner, absl::Seconds(10));
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", rank, " was given the GPU of rank ", other.ok() ? *other : "?", " (",
      library.device().str(), ", ", *uuid,
      "): NCCL needs one for each. Start as many ranks on each node as it has GPUs, and let each "
      "choose by its local rank, or give each one GPU (srun --gpus-per-task=1)"));
}

}  // namespace lockstep::comm::nccl
