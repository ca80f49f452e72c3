// An all-reduce across nodes, and what it costs beside one inside a node. README.md explains it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(lockstep::tutorials::Count, kib, 4096, "KiB of the tensor that is timed");
ABSL_FLAG(lockstep::tutorials::Count, times, 20, "how often");

namespace lockstep::tutorials {
namespace {

std::string HostName() {
  std::array<char, 256> name = {};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

// Milliseconds of an all-reduce, the least of several: what it takes when nothing is in its way.
double Milliseconds(comm::Communicator& group, const at::Tensor& tensor) {
  absl::Duration least = absl::InfiniteDuration();
  for (int64_t i = 0; i < absl::GetFlag(FLAGS_times); ++i) {
    ThrowIfError(group.Barrier().Wait());
    const absl::Time start = absl::Now();
    ThrowIfError(group.AllReduce(tensor, comm::ReduceOp::kMax).Wait());
    least = std::min(least, absl::Now() - start);
  }
  return absl::ToDoubleMilliseconds(least);
}

absl::Status AcrossNodes(comm::Communicator& world) {
  // STEP 1: who is where? Names are small and rare: they go through the store, not through tensors.
  const std::string here = HostName();
  ThrowIfError(world.store().Set(absl::StrCat("host/", world.rank()), here));
  std::vector<std::string> hosts;
  for (int rank = 0; rank < world.size(); ++rank) {
    hosts.push_back(ValueOrThrow(world.store().Get(absl::StrCat("host/", rank), absl::Minutes(1))));
    Print(world, "rank %d of %d is on %s\n", rank, world.size(), hosts.back());
  }

  // STEP 2: the all-reduce knows no nodes: it is that of tutorial 00, to the letter.
  const at::Tensor x = at::full({3}, world.rank() + 1.0);
  ThrowIfError(world.AllReduce(x, comm::ReduceOp::kSum).Wait());
  Print(world, "sum over all ranks: %g\n", x[0].item<double>());

  // STEP 3: a communicator for each node: ranks that give the same color find each other.
  const auto first = std::find(hosts.begin(), hosts.end(), here);
  const int color = static_cast<int>(first - hosts.begin());
  const std::unique_ptr<comm::Communicator> node =
      ValueOrThrow(world.Split(color, /*key=*/world.rank()));
  const at::Tensor y = at::full({1}, world.rank() + 1.0);
  ThrowIfError(node->AllReduce(y, comm::ReduceOp::kSum).Wait());
  Print(world, "sum over the ranks on %s: %g\n", here, y[0].item<double>());

  // STEP 4: inside a node ranks share memory; between nodes there is a network.
  const at::Tensor large = at::full({absl::GetFlag(FLAGS_kib) * 256}, 1.0F, at::kFloat);
  const double inside = Milliseconds(*node, large);
  const double across = Milliseconds(world, large);
  const size_t nodes = std::set<std::string>(hosts.begin(), hosts.end()).size();
  Print(world, "all-reduce of %d KiB: %.3f ms inside a node, %.3f ms across %d node%s\n",
        static_cast<int64_t>(absl::GetFlag(FLAGS_kib)), inside, across, nodes,
        nodes == 1 ? "" : "s");
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "adds a tensor over the ranks of several nodes, and times it.",
       .example = "bazel run //tutorials:torch_dist_multi_node -- --submit"},
      lockstep::tutorials::AcrossNodes);
}
