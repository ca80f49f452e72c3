// What faults_test runs: adds a tensor step by step until one rank does as it is told.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(
    std::string, fault, "",
    "kill, stop, throw, memory (run out of it), mismatch (another collective) or network (ask "
    "the test to cut it)");
ABSL_FLAG(uint64_t, fault_rank, 0, "which rank");
ABSL_FLAG(uint64_t, fault_step, 0, "in which step");
ABSL_FLAG(lockstep::tutorials::Count, steps, 100000, "steps");

namespace lockstep::tutorials {
namespace {

constexpr int64_t kElements = 4097;

// Real memory, until the system's limit, set a little above what is taken, refuses more.
void TakeAllMemory() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  const rlim_t limit = pages * sysconf(_SC_PAGESIZE) + (256 << 20);
  const rlimit limits = {limit, limit};
  setrlimit(RLIMIT_AS, &limits);
  std::vector<at::Tensor> taken;
  while (true) taken.push_back(at::ones({4 << 20}));
}

void Fail(comm::Communicator& world, const std::string& fault, int64_t step) {
  if (fault == "kill") raise(SIGKILL);
  if (fault == "stop") raise(SIGSTOP);
  if (fault == "throw") throw std::runtime_error(absl::StrCat("injected at step ", step));
  if (fault == "memory") TakeAllMemory();
  if (fault == "mismatch") ThrowIfError(world.Broadcast(at::ones({3}), /*root=*/0).Wait());
  if (fault == "network") std::ofstream(absl::StrCat(std::getenv("LOCKSTEP_RUN"), "/cut"));
}

absl::Status Body(comm::Communicator& world) {
  const std::string fault = absl::GetFlag(FLAGS_fault);
  const auto fault_rank = static_cast<int64_t>(absl::GetFlag(FLAGS_fault_rank));
  const auto fault_step = static_cast<int64_t>(absl::GetFlag(FLAGS_fault_step));
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  for (int64_t step = 0; step < steps; ++step) {
    if (world.rank() == fault_rank && step == fault_step) Fail(world, fault, step);
    const at::Tensor x = at::ones({kElements});
    if (absl::Status s = world.AllReduce(x, comm::ReduceOp::kSum).Wait(); !s.ok()) return s;
    if (x[kElements - 1].item<double>() != world.size()) {
      return absl::InternalError(absl::StrCat("the sum of step ", step, " is wrong"));
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
  Print(world, "%d steps\n", steps);
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "adds ones until a rank fails.",
       .example = "fault_program --fault=stop --fault_rank=1 --deadline=4s"},
      lockstep::tutorials::Body);
}
