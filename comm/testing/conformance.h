#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::comm::testing {

// A backend as the conformance suites see it.
struct Backend {
  std::string name;  // of the instantiation: letters and digits

  // Runs `body` on every rank, each with its communicator, whose operations have `deadline`, and
  // returns when all ranks known to this process have ended.
  std::function<void(absl::Duration deadline, const std::function<void(Communicator&)>& body)> run;
};

// What every backend must do. Register one in its own test:
//
//   INSTANTIATE_TEST_SUITE_P(InProcess, CommunicatorConformance, ::testing::Values(Backend{...}));
//
// Expected values are exact: integers that every dtype holds (bf16: up to 256).
class CommunicatorConformance : public ::testing::TestWithParam<Backend> {
 protected:
  // Runs `body` on every rank with a deadline that no operation should reach.
  void Run(const std::function<void(Communicator&)>& body);
};

// What breaks a communicator: abort, errors that nobody waited for. Each test leaves the backend
// unusable, so a backend of processes runs each in processes of its own.
class CommunicatorAbortConformance : public CommunicatorConformance {};

}  // namespace lockstep::comm::testing
