// A few ranks and an all-reduce, with a mistake of your choice. README.md explains what each looks
// like.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/world.h"

namespace lockstep::tutorials {

struct Mistake {
  std::string name = "none";
};

bool AbslParseFlag(absl::string_view text, Mistake* mistake, std::string* error) {
  mistake->name = std::string(text);
  for (const char* name : {"none", "late", "early", "order", "shape", "buffered"}) {
    if (mistake->name == name) return true;
  }
  *error = "choose one of none, late, early, order, shape, buffered";
  return false;
}

std::string AbslUnparseFlag(const Mistake& mistake) { return mistake.name; }

}  // namespace lockstep::tutorials

ABSL_FLAG(
    lockstep::tutorials::Mistake, mistake, {},
    "of the last rank: late (comes to the all-reduce after a minute), early (returns before it), "
    "order (issues a broadcast in its place), shape (has a tensor of another size), buffered "
    "(prints without a flush, and dies), or none");

namespace lockstep::tutorials {
namespace {

absl::Status AllReduce(comm::Communicator& world) {
  const std::string mistake =
      world.rank() == world.size() - 1 ? absl::GetFlag(FLAGS_mistake).name : "none";
  const at::Tensor x = at::full({mistake == "shape" ? 4 : 3}, world.rank() + 1.0);

  if (mistake == "late") absl::SleepFor(absl::Minutes(1));
  if (mistake == "early") return absl::OkStatus();
  if (mistake == "order") ThrowIfError(world.Broadcast(x, /*root=*/0).Wait());
  if (mistake == "buffered") {
    std::printf("the last line before the crash\n");  // and no std::fflush(stdout)
    std::_Exit(5);
  }
  ThrowIfError(world.AllReduce(x, comm::ReduceOp::kSum).Wait());
  Print(world, "the sum over %d ranks is %g\n", world.size(), x[0].item<double>());
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "adds a tensor over several processes, with a mistake in it.",
       .example = "bazel run //tutorials:debugging -- --mistake=late --deadline=5s"},
      lockstep::tutorials::AllReduce, {.default_ranks = 2});
}
