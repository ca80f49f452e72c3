// create.h, built without --config=gpu.
#include "lockstep/comm/nccl/create.h"

namespace lockstep::comm::nccl {

int CountDevices() { return 0; }

absl::Status CheckDevices() {
  return absl::FailedPreconditionError(
      "this program was built without CUDA: build it with --config=gpu (docs/gpu.md)");
}

absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World&, const Options&) {
  return CheckDevices();
}

absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World&, Communicator&,
                                                     const Options&) {
  return CheckDevices();
}

}  // namespace lockstep::comm::nccl
