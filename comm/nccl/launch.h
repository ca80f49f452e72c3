#pragma once

#include <vector>

#include "absl/status/status.h"
#include "lockstep/comm/nccl/handle.h"
#include "lockstep/comm/operation.h"

namespace lockstep::comm::nccl {

// Puts a collective into the handle's stream, in as few kernels as NCCL lets us. `scratch` is a
// tensor of one element for a Barrier.
//
// Averages are NCCL's, but for f16, where the sum of many ranks overflows: there the inputs are
// divided by about the root of the number of ranks on the way, and the sum by the rest of it.
absl::Status LaunchCollective(Handle& handle, const Operation& operation, int rank, int size,
                              const at::Tensor& scratch, const Handle::Stop& stop);

// Puts a Send or Recv to or from `peer` of the handle into its stream.
absl::Status LaunchTransfer(Handle& handle, const Operation& operation, int peer,
                            const Handle::Stop& stop);

}  // namespace lockstep::comm::nccl
