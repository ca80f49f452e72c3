// The all-reduce of 00 on GPUs, over NCCL. README.md explains it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/device_world.h"
#include "lockstep/tutorials/common/world.h"

namespace lockstep::tutorials {
namespace {

absl::Status AllReduce(comm::Communicator& world) {
  // STEP 1: where am I? Each rank has a GPU of its own, and a CPU run has none.
  const int rank = world.rank();
  const int ranks = world.size();
  const at::Device device = world.device();
  if (device.is_cpu() && rank == 0) {
    const absl::Status gpus = comm::nccl::CheckDevices();
    absl::PrintF("on the CPU, over MPI: %s\n",
                 gpus.ok() ? "--device=cpu was given" : std::string{gpus.message()});
  }

  // STEP 2: a tensor on this rank's device: communicators take no other.
  const at::Tensor x = at::full({3}, rank + 1.0, at::TensorOptions(at::kDouble).device(device));

  // STEP 3: the sum over all ranks. The call puts it into a stream of the GPU and returns.
  comm::Work work = world.AllReduce(x, comm::ReduceOp::kSum);

  // STEP 4: on a GPU, Wait() does not block this thread: it makes the kernels that come after it
  // wait, such as this multiplication.
  ThrowIfError(work.Wait());
  x.mul_(10);

  // STEP 5: item() copies the number to the CPU, and for that waits for all kernels before it.
  absl::PrintF("rank %d of %d on %s: ten times the sum is %g\n", rank, ranks, device.str(),
               x[0].item<double>());
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  const int gpus = lockstep::comm::nccl::CountDevices();
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "adds a tensor over several GPUs.",
       .example = "bazel run --config=gpu //tutorials:torch_dist_gpu -- --device=cuda"},
      lockstep::tutorials::AllReduce, lockstep::tutorials::RanksOnDevice(gpus > 0 ? gpus : 2),
      lockstep::tutorials::CreateWorldOnDevice);
}
