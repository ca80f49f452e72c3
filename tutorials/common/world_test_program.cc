// What run_main_test runs, on several ranks.
#include <ATen/ops/full.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(std::string, fail, "", "how rank 1 fails: status, throw, absent or exit");

namespace lockstep::tutorials {
namespace {

absl::Status Body(comm::Communicator& world) {
  const std::string fail = absl::GetFlag(FLAGS_fail);
  if (world.rank() == 1) {
    if (fail == "status") return absl::DataLossError("file x is cut off");
    if (fail == "throw") throw StatusError(absl::DataLossError("file x is cut off"));
    if (fail == "exit") _Exit(5);
    if (fail == "absent") pause();
  }
  const at::Tensor sum = at::full({3}, world.rank() + 1.0);
  if (absl::Status s = world.AllReduce(sum, comm::ReduceOp::kSum).Wait(); !s.ok()) return s;
  Print(world, "%d ranks, sum %g\n", world.size(), sum[0].item<double>());
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv, {.summary = "adds the ranks.", .example = "world_test_program --ranks=2"},
      lockstep::tutorials::Body, {.default_ranks = 3});
}
