#include <gtest/gtest.h>

#include <string>

#include "lockstep/comm/nccl/testing/run_fake_ranks.h"
#include "lockstep/comm/testing/conformance.h"
#include "lockstep/comm/testing/host_device.h"

namespace lockstep::comm::testing {
namespace {

Backend FakeGpus(int size) {
  return {.name = "Ranks" + std::to_string(size),
          .run = [size](absl::Duration deadline, const std::function<void(Communicator&)>& body) {
            nccl::testing::RunFakeRanks(size, body, nccl::testing::FastOptions(deadline));
          }};
}

// Where Wait() lets the host go on, and tensors are not on the CPU.
Backend FakeGpusWithDevices(int size) {
  return {.name = "Ranks" + std::to_string(size),
          .run = [size](absl::Duration deadline, const std::function<void(Communicator&)>& body) {
            nccl::testing::RunFakeRanks(size, body, nccl::testing::FastOptions(deadline),
                                        HostDevice);
          }};
}

std::string NameOf(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

const auto kWorlds = ::testing::Values(FakeGpus(1), FakeGpus(2), FakeGpus(3), FakeGpus(4));

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorConformance, kWorlds, NameOf);
INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorAbortConformance, kWorlds, NameOf);

const auto kWorldsWithDevices = ::testing::Values(FakeGpusWithDevices(1), FakeGpusWithDevices(3));

INSTANTIATE_TEST_SUITE_P(NcclDevices, CommunicatorConformance, kWorldsWithDevices, NameOf);
INSTANTIATE_TEST_SUITE_P(NcclDevices, CommunicatorAbortConformance, kWorldsWithDevices, NameOf);

}  // namespace
}  // namespace lockstep::comm::testing
