#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/nccl/options.h"

// Communicators over NCCL for the ranks that a launcher started, each with the GPU that
// ChooseDevice (device_choice.h) gives it. nccl_communicator.h says what they do.
// That GPU is made the current device of the thread that calls Create, where at::kCUDA without an
// index then is; other threads start on GPU 0.
//
//   auto world = lockstep::launch::Detect();
//   auto comm = lockstep::comm::nccl::Create(*world);
//   at::Tensor x = at::ones({1000}, (*comm)->device());
//   absl::Status status = (*comm)->AllReduce(x, lockstep::comm::ReduceOp::kSum).Wait();
//
// Programs link this with and without CUDA: built without --config=gpu, CountDevices() is 0 and the
// rest is FailedPrecondition, saying so. Nothing of CUDA is then fetched or linked.
namespace lockstep::comm::nccl {

// How many GPUs this process sees; 0 where it was built without CUDA, or there is no driver.
int CountDevices();

// FailedPrecondition, saying what is missing, where Create could not work: no CUDA in this
// program, no driver, no GPU.
absl::Status CheckDevices();

// For torchrun and its variables, and srun, where no MPI is needed: the ranks meet at world.store.
// May be called more than once, in the same order by all ranks.
// InvalidArgument where the launcher gives no store (mpirun): use the other one. Errors else are
// CreateOn's.
absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World& world,
                                                     const Options& options = {});

// For ranks that have a communicator already, such as one over MPI; `world` chooses the GPU.
absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World& world,
                                                     Communicator& other,
                                                     const Options& options = {});

}  // namespace lockstep::comm::nccl
