#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "lockstep/comm/nccl/library.h"

namespace lockstep::comm::nccl {

// How many GPUs this process sees (CUDA_VISIBLE_DEVICES). Unavailable where there is no driver, in
// CUDA's words.
absl::StatusOr<int> CountCudaDevices();

// The table of NCCL's and CUDA's own functions for GPU `index` of those that this process sees.
std::shared_ptr<Library> CudaLibrary(int index);

}  // namespace lockstep::comm::nccl
