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
      "ranks ", other.ok() ? *other : "?", " and ", rank, " have the same GPU (",
      library.device().str(), ", ", *uuid,
      "), and each needs its own: start no more ranks on a host than it has GPUs, or use the CPU; "
      "where there are enough, give each rank another (srun --gpus-per-task=1), or all to all"));
}

}  // namespace lockstep::comm::nccl
