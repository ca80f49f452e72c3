// What mpi_fault_test runs: mpi_fault_program --dir=DIR --mode=MODE --ranks=N
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/launch/program_under_test.h"
#include "lockstep/comm/launch/relaunch.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/comm/testing/conformance.h"

namespace lockstep::comm::mpi {
namespace {

launch::World world;

testing::Backend Process() {
  return {.name = "Process",
          .run = [](absl::Duration deadline, const std::function<void(Communicator&)>& body) {
            auto comm = Create(world, {.deadline = deadline});
            ASSERT_TRUE(comm.ok()) << comm.status();
            body(**comm);
          }};
}

}  // namespace
}  // namespace lockstep::comm::mpi

namespace lockstep::comm::testing {

INSTANTIATE_TEST_SUITE_P(Mpi, CommunicatorAbortConformance,
                         ::testing::Values(lockstep::comm::mpi::Process()));

}  // namespace lockstep::comm::testing

namespace lockstep::comm::mpi {
namespace {

// Runs the tests that break the communicator, writes how that went, and ends, when all ranks have
// done so, with status 9: a rank that ends sooner would end the others.
int RunAbortConformance(int argc, char** argv, const std::string& dir) {
  ::testing::InitGoogleTest(&argc, argv);
  const bool passed =
      RUN_ALL_TESTS() == 0 && ::testing::UnitTest::GetInstance()->successful_test_count() == 1;
  std::ofstream(absl::StrCat(dir, "/", passed ? "passed" : "failed", world.rank));
  launch::testing::Eventually([&] {
    for (int rank = 0; rank < world.size; ++rank) {
      if (!std::filesystem::exists(absl::StrCat(dir, "/passed", rank))) return false;
    }
    return true;
  });
  return 9;
}

// All ranks add until an operation fails, which each prints.
int RunUntilError(Communicator& comm, const std::string& dir, const std::string& mode) {
  const bool last = comm.rank() == comm.size() - 1;
  for (int step = 0;; ++step) {
    at::Tensor x = at::ones({2, 3});
    absl::Status status = comm.AllReduce(x, ReduceOp::kSum).Wait();
    if (step == 10) {
      launch::testing::WriteScratch(dir, comm.rank());
      if (mode == "abort" && last) comm.Abort(absl::InternalError("disk full"));
      if (mode == "other" && last) status = comm.Barrier().Wait();
      if (mode == "leave" && last) return 0;
      if (mode == "exit" && last) std::exit(0);
      if (mode == "split" && last) absl::SleepFor(absl::Minutes(10));
      if (mode == "split") status = comm.Split(0, 0).status();
    }
    if (!status.ok()) {
      std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.ToString().c_str());
      absl::SleepFor(absl::Seconds(1));  // lets the others print theirs
      return 1;
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
}

int Main(int argc, char** argv) {
  launch::RelaunchIfAlone(argc, argv);
  world = launch::Detect().value();
  std::string mode;
  std::string dir;
  for (int i = 1; i < argc; ++i) {
    if (absl::StartsWith(argv[i], "--mode=")) mode = argv[i] + 7;
    if (absl::StartsWith(argv[i], "--dir=")) dir = argv[i] + 6;
  }
  if (mode == "conformance") return RunAbortConformance(argc, argv, dir);
  const bool leaves = mode == "leave" || mode == "exit";
  auto comm = Create(world, {.deadline = leaves ? absl::Minutes(30) : absl::Seconds(2)});
  return RunUntilError(**comm, dir, mode);
}

}  // namespace
}  // namespace lockstep::comm::mpi

int main(int argc, char** argv) { return lockstep::comm::mpi::Main(argc, argv); }
