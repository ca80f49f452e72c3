#pragma once

#include <functional>

#include "lockstep/comm/communicator.h"
#include "lockstep/comm/nccl/options.h"

namespace lockstep::comm::nccl::testing {

// Runs `body` on `size` threads, each with its NCCL communicator and the GPU of its rank. Skips the
// test, saying how many GPUs it needs, where this process sees fewer. An exception of body is a
// test failure. Only with --config=gpu.
void RunGpuRanks(int size, const std::function<void(Communicator&)>& body,
                 const Options& options = {.deadline = absl::Minutes(1)});

}  // namespace lockstep::comm::nccl::testing
