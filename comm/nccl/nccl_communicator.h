#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/nccl/library.h"
#include "lockstep/comm/nccl/options.h"
#include "lockstep/comm/store.h"

// Ranks have a GPU each; tensors are on it. create.h makes communicators of what a launcher
// started; this header is what they do, and how to make them of a table of functions (library.h).
//
//   auto comm = lockstep::comm::nccl::Create(*world, {});  // create.h
//   at::Tensor gradient = at::ones({1000}, (*comm)->device());
//   Work work = (*comm)->AllReduce(gradient, ReduceOp::kSum);
//   ...                                                    // kernels go on meanwhile
//   absl::Status status = work.Wait();  // the current stream waits, not the host
//   gradient.mul_(2);                   // a kernel of that stream: sees the sum
//
// STREAMS. Each communicator has a stream of its own, of the highest priority. An operation waits
// on the device for what was in the caller's current stream when it was issued, and Wait() makes
// the current stream wait for it. A thread of each communicator puts operations into its stream:
// NCCL may need the other ranks for that, where it has something to connect. The host blocks in
// Wait() of a Barrier, in Split, and in Wait() where the operation is not in its stream yet: at the
// first ones of a communicator or of a pair, and after another backend's work (see StartAfter).
//
// MEMORY. An operation holds its tensors until it is done, or until Wait() on the stream that it
// was issued from: whatever takes their place there comes later on the device. Nothing is
// recorded with CUDA's allocator (recordStream), which would hold memory for longer.
//
// AVERAGES are NCCL's own. In f16, where a sum of many ranks overflows, inputs are divided by about
// the root of the number of ranks on the way, and the sum by the rest.
//
// SEND AND RECV of one (source, destination, tag) go through a communicator of NCCL's own, made in
// the background at the first use, as NCCL carries out what shares one in order and knows no tags.
// That costs some MB of each of the two GPUs.
//
// FAILURE. A watchdog thread (watchdog.h) notices errors of NCCL and CUDA, operations past their
// deadline and ranks that left, and aborts. Wait() on a GPU returns before the operation is done,
// so an error shows in the next call, on all ranks. Errors carry NCCL's last error text:
//
//   rank 1: AllReduce #12 (sum, Float [1024]) of communicator world: in the background: NCCL:
//   remote process exited or there was a network error: ncclSocketTryRecv: connection closed by ...
//
// After one the process should end. Destroying communicators, in any order, before or after an
// error, never waits for other ranks.
//
// ENVIRONMENT. LOCKSTEP_COMM_DEBUG=detail compares what the ranks issue before each collective, on
// the host. NCCL_DEBUG=INFO is NCCL's own log, NCCL_SOCKET_IFNAME the interface that it uses.
// Leave CUDA_DEVICE_MAX_CONNECTIONS unset: with 1, all streams share one queue of the GPU, and
// communication starts only after all that was asked for before it.
namespace lockstep::comm::nccl {

// The communicator of `size` ranks that share `store`, which holds nothing of another creation:
// use WithPrefix. Collective; every rank brings a device of its own.
//
// FailedPrecondition: two ranks were given one device. DeadlineExceeded: not all ranks came.
// Unavailable and Internal: NCCL's errors and CUDA's.
absl::StatusOr<std::unique_ptr<Communicator>> CreateOn(std::shared_ptr<Library> library,
                                                       const Store& store, int rank, int size,
                                                       const Options& options = {});

// The same for the ranks of another communicator, such as one over MPI, in their order.
absl::StatusOr<std::unique_ptr<Communicator>> CreateOn(std::shared_ptr<Library> library,
                                                       Communicator& other,
                                                       const Options& options = {});

}  // namespace lockstep::comm::nccl
