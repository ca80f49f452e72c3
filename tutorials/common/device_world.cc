#include "lockstep/tutorials/common/device_world.h"

#include <ATen/Parallel.h>

#include <limits>
#include <optional>

#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/launch/threads.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/tutorials/common/device_flag.h"
#include "lockstep/tutorials/common/world.h"

namespace lockstep::tutorials {

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

int MostRanksOnDevice() {
  return ChosenDevice().is_cuda() ? comm::nccl::CountDevices() : std::numeric_limits<int>::max();
}

}  // namespace lockstep::tutorials
