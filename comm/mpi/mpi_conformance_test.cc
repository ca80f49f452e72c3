#include <gtest/gtest.h>

#include "lockstep/comm/mpi/gtest_main.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/comm/testing/conformance.h"

namespace lockstep::comm::testing {
namespace {

// This process is one rank; the others run the same body in theirs.
Backend Processes(const std::string& name, mpi::Options options) {
  return {.name = name,
          .run = [options](absl::Duration deadline,
                           const std::function<void(Communicator&)>& body) mutable {
            options.deadline = deadline;
            auto comm = mpi::Create(mpi::TestWorld(), options);
            ASSERT_TRUE(comm.ok()) << comm.status();
            body(**comm);
          }};
}

std::string NameOf(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(
    Mpi, CommunicatorConformance,
    ::testing::Values(Processes("Default", {}), Processes("Messages", {.shared_memory = false}),
                      Processes("Cut", {.shared_memory = false, .max_elements_per_call = 1000}),
                      Processes("CutFine", {.shared_memory = false, .max_elements_per_call = 100}),
                      Processes("Exchanged", {.shared_memory = false, .exchange_bytes = 1})),
    NameOf);

}  // namespace
}  // namespace lockstep::comm::testing
