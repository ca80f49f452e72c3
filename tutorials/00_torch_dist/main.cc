// Several processes, one all-reduce. README.md explains it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdio>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/world.h"

namespace lockstep::tutorials {
namespace {

absl::Status AllReduce(comm::Communicator& world) {
  // STEP 1: who am I? This function runs in every process; only `rank` differs.
  const int rank = world.rank();
  const int ranks = world.size();

  // STEP 2: a tensor of this rank's own.
  const at::Tensor x = at::full({3}, rank + 1.0);
  absl::PrintF("rank %d of %d: I have %g\n", rank, ranks, x[0].item<double>());
  std::fflush(stdout);

  // STEP 3: nobody goes on before all have come here. Lines of different processes may still change
  // places on their way to the terminal.
  ThrowIfError(world.Barrier().Wait());

  // STEP 4: the sum over all ranks, in the place of what was there. The call only begins it: what
  // is between it and Wait() runs meanwhile.
  comm::Work work = world.AllReduce(x, comm::ReduceOp::kSum);
  ThrowIfError(work.Wait());
  absl::PrintF("rank %d of %d: the sum is %g\n", rank, ranks, x[0].item<double>());
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(argc, argv,
                                       {.summary = "adds a tensor over several processes.",
                                        .example = "bazel run //tutorials:torch_dist -- --ranks=3"},
                                       lockstep::tutorials::AllReduce, {.default_ranks = 4});
}
