#include "lockstep/comm/mpi/gtest_main.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace lockstep::comm::mpi {
namespace {

launch::World test_world;

// What ranks other than 0 print: failures.
class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) std::cerr << "[rank " << test_world.rank << "] " << result << std::endl;
  }
};

}  // namespace

const launch::World& TestWorld() { return test_world; }

}  // namespace lockstep::comm::mpi

// main() of tests whose ranks are processes. A rank that fails leaves the collectives that it
// should have joined to the others, so it stops at the first failure; its exit status ends all.
int main(int argc, char** argv) {
  using lockstep::comm::mpi::test_world;
  testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(fail_fast, true);
  const auto world = lockstep::launch::Detect();
  if (!world.ok()) {
    std::cerr << world.status() << std::endl;
    return 1;
  }
  test_world = *world;
  const char* expected = std::getenv("LOCKSTEP_EXPECTED_RANKS");
  if (expected != nullptr && std::to_string(test_world.size) != expected) {
    std::cerr << "expected " << expected << " ranks, found " << test_world.size << std::endl;
    return 1;
  }
  if (test_world.rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new lockstep::comm::mpi::FailurePrinter);
  }
  return RUN_ALL_TESTS();
}
