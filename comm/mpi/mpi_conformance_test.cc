#include <gtest/gtest.h>

#include "lockstep/comm/mpi/gtest_main.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/comm/testing/conformance.h"

namespace lockstep::comm::testing {
namespace {

// This process is one rank; the others run the same body in theirs.
Backend Processes(const std::string& name, int64_t max_elements_per_call) {
  return {.name = name,
          .run = [=](absl::Duration deadline, const std::function<void(Communicator&)>& body) {
            auto comm =
                mpi::Create(mpi::TestWorld(),
                            {.deadline = deadline, .max_elements_per_call = max_elements_per_call});
            ASSERT_TRUE(comm.ok()) << comm.status();
            body(**comm);
          }};
}

std::string NameOf(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Mpi, CommunicatorConformance,
                         ::testing::Values(Processes("Whole", mpi::Options().max_elements_per_call),
                                           Processes("Cut", 1000), Processes("CutFine", 100)),
                         NameOf);

}  // namespace
}  // namespace lockstep::comm::testing
