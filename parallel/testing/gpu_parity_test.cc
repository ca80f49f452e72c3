// On real GPUs, with as many ranks as a test's name says.
#include <gtest/gtest.h>

#include <string>

#include "lockstep/comm/nccl/testing/run_gpu_ranks.h"
#include "lockstep/parallel/testing/device_parity.h"

namespace lockstep::parallel::testing {
namespace {

Devices Gpus(int size) {
  return {.name = "Gpus" + std::to_string(size),
          .sizes = {size},
          .kernels_of_cpu = false,
          .run = [](int ranks, const std::function<void(comm::Communicator&)>& body) {
            comm::nccl::testing::RunGpuRanks(ranks, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Nccl, DeviceParity, ::testing::Values(Gpus(1), Gpus(2)),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep::parallel::testing
