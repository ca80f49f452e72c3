#include "lockstep/tutorials/common/device_world.h"

#include <ATen/Parallel.h>

#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/launch/threads.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/tutorials/common/device_flag.h"
#include "lockstep/tutorials/common/world.h"

namespace lockstep::tutorials {
namespace {

int MostRanks() {
  return ChosenDevice().is_cuda() ? comm::nccl::CountDevices() : std::numeric_limits<int>::max();
}

}  // namespace

absl::StatusOr<std::unique_ptr<comm::Communicator>> CreateWorldOnDevice(absl::Duration deadline) {
  if (!ChosenDevice().is_cuda()) return CreateWorld();
  const absl::StatusOr<launch::World> world = launch::Detect();
  if (!world.ok()) return world.status();
  // What is computed on the CPU, such as an optimizer with offload, shares the node's cores.
  if (const std::optional<int> threads = launch::ThreadsOfRank(*world)) {
    at::set_num_threads(*threads);
  }
  const comm::nccl::Options options = {.deadline = deadline};
  const bool has_mpi = world->launcher == launch::Launcher::kMpirun ||
                       world->launcher == launch::Launcher::kSrunPmix;
  if (!has_mpi) return comm::nccl::Create(*world, options);
  const auto over_mpi = comm::mpi::Create(*world, {.deadline = deadline});
  if (!over_mpi.ok()) return over_mpi.status();
  return comm::nccl::Create(*world, **over_mpi, options);
}

launch::RelaunchOptions RanksOnDevice(int default_ranks) {
  return {.default_ranks = default_ranks,
          .most_default_ranks = MostRanks,
          .check_ranks = [](int ranks) { return CheckRanks(ranks, MostRanks()); }};
}

absl::Status CheckRanks(int ranks, int gpus) {
  if (ranks <= gpus) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "this host has ", gpus, gpus == 1 ? " GPU" : " GPUs", " visible and is to run ", ranks,
      " ranks: start at most ", gpus, " (--ranks=", gpus, "), or use --device=cpu"));
}

}  // namespace lockstep::tutorials
