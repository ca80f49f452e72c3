#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/operation.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/work.h"
#include "lockstep/tools/trace/flight_recorder.h"

namespace lockstep::comm {

// A group of ranks that move tensors among themselves. One object is one rank's end of it; ranks
// are processes (comm/mpi, comm/nccl) or threads (comm/inprocess).
//
//   absl::StatusOr<std::unique_ptr<Communicator>> comm = mpi::Create(world);
//   at::Tensor x = at::full({1000}, (*comm)->rank());
//   absl::Status status = (*comm)->AllReduce(x, ReduceOp::kSum).Wait();
//
// ORDER. All ranks must issue the same collectives in the same order. Operations start in the order
// they were issued in and complete on their own: a Send does not hold back the Recv after it.
// Across communicators nothing is ordered, so code that shares ranks with other code works on a
// communicator of its own, made by Split; all ranks must then issue in one consistent order across
// the communicators that they wait on.
//
// TENSORS must be contiguous, on device(), of dtype f32, f64, f16, bf16, i32, i64 or u8. Any number
// of elements goes, 0 too. Shapes do not matter, only numel() does. Inputs may be reused, and
// outputs read, when the Work is done. Autograd is not involved: data is read and written behind
// its back.
//
// ERRORS. A refused operation (InvalidArgument, see Validate) has not started and spoils nothing.
// Any other error breaks the communicator: what is pending and what is issued later fails with it.
// Past its deadline (an option of each backend) an operation fails with DeadlineExceeded, which
// names the operation, its sequence number, dtype and shape, this rank, and the ranks that had not
// arrived. An error that nobody waited for is returned by the next call.
//
// LIFETIME. Destruction runs no collective and does not wait; what was issued goes on. Who has
// issued all that the others have may leave. Where a rank has left, or ended its process, without
// issuing its part of an operation, that fails on the others within seconds: FailedPrecondition,
// naming the rank and how many it had issued. Communicators made by Split may outlive the one that
// they were split from.
//
// THREADS. Calls may come from several threads; their order must be the same on all ranks.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  at::Device device() const { return device_; }

  // For messages: "world", "world/1" for its first Split, ...; equal on all ranks.
  const std::string& name() const { return name_; }

  // Combines the ranks' tensors, in place: all get the same result, bit for bit.
  // A `label` says, here and in the next two, what the operation is for. It appears in errors, and
  // where ranks issue operations of different labels, that is an error rather than a mixture: named
  // by the in-process backend, by MPI inside a node, and by LOCKSTEP_COMM_DEBUG=detail anywhere.
  Work AllReduce(at::Tensor tensor, ReduceOp op, std::string label = "");

  // Rank i's input lands at i * input.numel() of every rank's output. The input may be that slice.
  Work AllGatherInto(at::Tensor output, at::Tensor input, std::string label = "");

  // Combines the ranks' inputs; rank i gets block i of size() equal blocks. The output may be that
  // block of the input; the rest of the input is then left unspecified.
  Work ReduceScatterInto(at::Tensor output, at::Tensor input, ReduceOp op, std::string label = "");

  // Copies rank root's tensor to all.
  Work Broadcast(at::Tensor tensor, int root);

  // AllGatherInto for rank root alone. The others' output is ignored and may be undefined.
  Work GatherInto(at::Tensor output, at::Tensor input, int root);

  // Block j of rank i's input becomes block i of rank j's output; size() equal blocks each.
  Work AllToAll(at::Tensor output, at::Tensor input);

  // Point to point. The n-th Recv from a rank with a tag matches its n-th Send to this one with it;
  // dtype and number of elements must agree. Done when the tensor may be reused; this may be before
  // or after the Recv has been issued.
  Work Send(at::Tensor tensor, int destination, int tag = 0);
  Work Recv(at::Tensor tensor, int source, int tag = 0);

  // Done when all ranks have issued it.
  Work Barrier();

  // An uninitialised tensor in the memory that this backend moves best (pinned, registered,
  // shared).
  virtual at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype);

  // Collective, and blocking: ranks that give the same color form a communicator, ordered by key,
  // then by rank here. Null on ranks that give none.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(std::optional<int> color,
                                                              int key) = 0;

  // The operations issued next here start only when `work`, of any communicator, is done: on a GPU
  // the stream waits, never the host. See Work::Then.
  virtual void StartAfter(const Work& work) = 0;

  // Fails what is pending and what is issued later, here and on the other ranks, with `reason`;
  // from any thread. For MPI and NCCL the process must then exit: memory that the library may still
  // touch is leaked.
  virtual void Abort(absl::Status reason) = 0;

  // Key-value store common to the ranks, for what is small and rare (addresses, names).
  virtual Store& store() = 0;

  // What this rank's communicators of this world did last: every operation is entered here, in the
  // counters of tools/trace, and on its timeline while that records.
  const std::shared_ptr<trace::FlightRecorder>& flight_recorder() const { return flight_recorder_; }

  // For backends and decorators: takes an operation that was validated. Decorators forward it.
  virtual Work Issue(Operation operation) = 0;

 protected:
  Communicator(int rank, int size, at::Device device, std::string name,
               std::shared_ptr<trace::FlightRecorder> flight_recorder);

 private:
  Work Submit(Operation operation);
  Work Record(Operation operation);

  const int rank_;
  const int size_;
  const at::Device device_;
  const std::string name_;
  const std::shared_ptr<trace::FlightRecorder> flight_recorder_;
  std::atomic<uint64_t> issued_{0};
  std::mutex mutex_;
  std::optional<Work> refused_;  // the last refusal, until somebody has seen it
};

}  // namespace lockstep::comm
