#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/testing/parity.h"

namespace lockstep::parallel::testing {

// Ranks whose tensors are not on the CPU, as the suite below sees them.
struct Devices {
  std::string name;        // of the instantiation: letters and digits
  std::vector<int> sizes;  // numbers of ranks to train on
  bool kernels_of_cpu;  // Results are those of the CPU to the bit; else they are rounded otherwise.

  // Runs `body` on that many ranks, which are threads, each with its communicator.
  std::function<void(int size, const std::function<void(comm::Communicator&)>& body)> run;
};

// Strategies and their options train there as between threads on the CPU. Register devices in a
// test of their own, with INSTANTIATE_TEST_SUITE_P.
class DeviceParity : public ::testing::TestWithParam<Devices> {
 protected:
  // By rank; nothing where the test is skipped.
  std::map<int, Trajectory> TrainOnDevices(const ParityCase& c, int size,
                                           const StrategyFactory& make);

  // `computed_in`: the least precise dtype that `make` lets the model compute in.
  void ExpectParity(const ParityCase& c, const std::string& name, const StrategyFactory& make,
                    at::ScalarType computed_in = at::kDouble);
};

}  // namespace lockstep::parallel::testing
