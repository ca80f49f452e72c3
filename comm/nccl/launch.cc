#include "lockstep/comm/nccl/launch.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace lockstep::comm::nccl {
namespace {

const char* InputOf(const Operation& operation) {
  return static_cast<const char*>(operation.input.const_data_ptr());
}

char* OutputOf(const Operation& operation) {
  return static_cast<char*>(operation.output.mutable_data_ptr());
}

Reduction ReductionOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return kSum;
    case ReduceOp::kAverage:
      return kAverage;
    case ReduceOp::kMin:
      return kMin;
    case ReduceOp::kMax:
      return kMax;
    case ReduceOp::kProduct:
      return kProduct;
  }
  return kSum;
}

// The power of two next below the root of `size`: exact in f16.
int RootDivisor(int size) {
  int divisor = 1;
  while (4 * divisor * divisor <= size) divisor *= 2;
  return divisor;
}

class Launcher {
 public:
  Launcher(Handle& handle, const Operation& operation, int rank, int size, const Handle::Stop& stop)
      : handle_(handle),
        library_(handle.library()),
        operation_(operation),
        rank_(rank),
        size_(size),
        stop_(stop) {}

  absl::Status Reduce(const at::Tensor& input, const at::Tensor& output) {
    if (output.numel() == 0) return absl::OkStatus();
    const bool divides =
        operation_.op == ReduceOp::kAverage && output.scalar_type() == at::kHalf && size_ > 1;
    if (!divides) return Reduce(input, output, ReductionOf(operation_.op));
    const int divisor = RootDivisor(size_);
    Reduction scaled = kSum;
    absl::Status status = Call([&](Comm comm) {
      return library_.CreatePreMulSum(&scaled, 1.0 / divisor, output.scalar_type(), comm);
    });
    if (!status.ok()) return status;
    status = Reduce(input, output, scaled);
    const absl::Status destroyed =
        Call([&](Comm comm) { return library_.DestroyReduction(scaled, comm); });
    if (status.ok()) status = destroyed;
    if (!status.ok()) return status;
    return library_.Scale(output, static_cast<double>(divisor) / size_, handle_.stream());
  }

  absl::Status Gather() {
    const size_t count = operation_.input.numel();
    if (count == 0) return absl::OkStatus();
    const int root = operation_.peer;
    if (rank_ != root)
      return Call([&](Comm comm) { return Send(InputOf(operation_), root, comm); });
    const size_t bytes = operation_.input.nbytes();
    char* mine = OutputOf(operation_) + root * bytes;
    if (mine != InputOf(operation_)) {
      absl::Status status = library_.Copy(mine, InputOf(operation_), bytes, handle_.stream());
      if (!status.ok()) return status;
    }
    return Grouped([&](Comm comm) {
      for (int from = 0; from < size_; ++from) {
        if (from == root) continue;
        const Result result = library_.Recv(OutputOf(operation_) + from * bytes, count, Dtype(),
                                            from, comm, handle_.stream());
        if (result != Result::kSuccess) return result;
      }
      return Result::kSuccess;
    });
  }

  absl::Status AllToAll() {
    const size_t count = operation_.input.numel() / size_;
    if (count == 0) return absl::OkStatus();
    const size_t bytes = operation_.input.nbytes() / size_;
    return Grouped([&](Comm comm) {
      for (int peer = 0; peer < size_; ++peer) {
        Result result = library_.Send(InputOf(operation_) + peer * bytes, count, Dtype(), peer,
                                      comm, handle_.stream());
        if (result != Result::kSuccess) return result;
        result = library_.Recv(OutputOf(operation_) + peer * bytes, count, Dtype(), peer, comm,
                               handle_.stream());
        if (result != Result::kSuccess) return result;
      }
      return Result::kSuccess;
    });
  }

  absl::Status AllGather() {
    if (operation_.input.numel() == 0) return absl::OkStatus();
    return Call([&](Comm comm) {
      return library_.AllGather(InputOf(operation_), OutputOf(operation_), operation_.input.numel(),
                                Dtype(), comm, handle_.stream());
    });
  }

  absl::Status Broadcast() {
    if (operation_.output.numel() == 0) return absl::OkStatus();
    return Call([&](Comm comm) {
      return library_.Broadcast(OutputOf(operation_), OutputOf(operation_),
                                operation_.output.numel(), Dtype(), operation_.peer, comm,
                                handle_.stream());
    });
  }

  // Whoever waits for the result has seen all ranks.
  absl::Status Barrier(const at::Tensor& scratch) { return Reduce(scratch, scratch, kMax); }

 private:
  at::ScalarType Dtype() const { return operation_.subject().scalar_type(); }

  absl::Status Call(const std::function<Result(Comm)>& call) { return handle_.Call(call, stop_); }

  // Several transfers that go on together. A group that was begun must be ended, come what may.
  absl::Status Grouped(const std::function<Result(Comm)>& calls) {
    return Call([&](Comm comm) {
      const Result begun = library_.GroupStart();
      if (begun != Result::kSuccess) return begun;
      const Result inside = calls(comm);
      const Result ended = library_.GroupEnd();
      return inside == Result::kSuccess ? ended : inside;
    });
  }

  Result Send(const char* from, int to, Comm comm) {
    return library_.Send(from, operation_.input.numel(), Dtype(), to, comm, handle_.stream());
  }

  absl::Status Reduce(const at::Tensor& input, const at::Tensor& output, Reduction reduction) {
    return Call([&](Comm comm) {
      const at::ScalarType dtype = output.scalar_type();
      if (operation_.kind == OperationKind::kReduceScatter) {
        return library_.ReduceScatter(input.const_data_ptr(), output.mutable_data_ptr(),
                                      output.numel(), dtype, reduction, comm, handle_.stream());
      }
      return library_.AllReduce(input.const_data_ptr(), output.mutable_data_ptr(), output.numel(),
                                dtype, reduction, comm, handle_.stream());
    });
  }

  Handle& handle_;
  Library& library_;
  const Operation& operation_;
  const int rank_;
  const int size_;
  const Handle::Stop& stop_;
};

}  // namespace

absl::Status LaunchCollective(Handle& handle, const Operation& operation, int rank, int size,
                              const at::Tensor& scratch, const Handle::Stop& stop) {
  Launcher launcher(handle, operation, rank, size, stop);
  switch (operation.kind) {
    case OperationKind::kAllReduce:
      return launcher.Reduce(operation.output, operation.output);
    case OperationKind::kReduceScatter:
      return launcher.Reduce(operation.input, operation.output);
    case OperationKind::kAllGather:
      return launcher.AllGather();
    case OperationKind::kBroadcast:
      return launcher.Broadcast();
    case OperationKind::kGather:
      return launcher.Gather();
    case OperationKind::kAllToAll:
      return launcher.AllToAll();
    case OperationKind::kBarrier:
      return launcher.Barrier(scratch);
    case OperationKind::kSend:
    case OperationKind::kRecv:
      break;
  }
  return absl::InternalError(absl::StrCat(operation.ToString(), " is no collective"));
}

absl::Status LaunchTransfer(Handle& handle, const Operation& operation, int peer,
                            const Handle::Stop& stop) {
  if (operation.subject().numel() == 0) return absl::OkStatus();
  return handle.Call(
      [&](Comm comm) {
        Library& library = handle.library();
        const at::ScalarType dtype = operation.subject().scalar_type();
        if (operation.kind == OperationKind::kSend) {
          return library.Send(InputOf(operation), operation.input.numel(), dtype, peer, comm,
                              handle.stream());
        }
        return library.Recv(OutputOf(operation), operation.output.numel(), dtype, peer, comm,
                            handle.stream());
      },
      stop);
}

}  // namespace lockstep::comm::nccl
