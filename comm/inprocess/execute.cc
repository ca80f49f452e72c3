#include "lockstep/comm/inprocess/execute.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/reduce.h"

namespace lockstep::comm::inprocess {
namespace {

const char* InputOf(const Operation& operation) {
  return static_cast<const char*>(operation.input.const_data_ptr());
}

char* OutputOf(const Operation& operation) {
  return static_cast<char*>(operation.output.mutable_data_ptr());
}

void Copy(char* to, const char* from, size_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

void ExecuteCollective(const std::vector<Operation>& operations) {
  const Operation& first = operations[0];
  const int n = static_cast<int>(operations.size());
  switch (first.kind) {
    case OperationKind::kAllReduce: {
      std::vector<const void*> inputs;
      for (const Operation& operation : operations) inputs.push_back(OutputOf(operation));
      Reduce(OutputOf(operations[0]), inputs, first.output.numel(), first.output.scalar_type(),
             first.op);
      for (const Operation& operation : operations) {
        Copy(OutputOf(operation), OutputOf(operations[0]), first.output.nbytes());
      }
      break;
    }
    case OperationKind::kReduceScatter: {
      const size_t block = first.output.nbytes();
      for (int to = 0; to < n; ++to) {
        std::vector<const void*> inputs;
        for (const Operation& operation : operations)
          inputs.push_back(InputOf(operation) + to * block);
        Reduce(OutputOf(operations[to]), inputs, first.output.numel(), first.output.scalar_type(),
               first.op);
      }
      break;
    }
    case OperationKind::kAllGather:
    case OperationKind::kGather: {
      const size_t block = first.input.nbytes();
      for (const Operation& to : operations) {
        if (!to.output.defined()) continue;
        for (int from = 0; from < n; ++from) {
          Copy(OutputOf(to) + from * block, InputOf(operations[from]), block);
        }
      }
      break;
    }
    case OperationKind::kAllToAll: {
      const size_t block = first.input.nbytes() / n;
      for (int to = 0; to < n; ++to) {
        for (int from = 0; from < n; ++from) {
          Copy(OutputOf(operations[to]) + from * block, InputOf(operations[from]) + to * block,
               block);
        }
      }
      break;
    }
    case OperationKind::kBroadcast:
      for (const Operation& to : operations) {
        Copy(OutputOf(to), OutputOf(operations[first.peer]), first.output.nbytes());
      }
      break;
    case OperationKind::kSend:
    case OperationKind::kRecv:
    case OperationKind::kBarrier:
      break;
  }
}

absl::Status CheckSame(const std::string& communicator, const std::vector<Operation>& operations) {
  const std::string expected = operations[0].Signature();
  for (size_t rank = 1; rank < operations.size(); ++rank) {
    const std::string found = operations[rank].Signature();
    if (found != expected) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the ranks of communicator ", communicator, " issued different operations as #",
          operations[rank].sequence, ": rank 0: ", expected, "; rank ", rank, ": ", found));
    }
  }
  return absl::OkStatus();
}

absl::Status ExecuteTransfer(const std::string& communicator, const Operation& send,
                             const Operation& recv) {
  if (send.input.scalar_type() != recv.output.scalar_type() ||
      send.input.numel() != recv.output.numel()) {
    return absl::FailedPreconditionError(
        absl::StrCat("in communicator ", communicator, " rank ", recv.peer, " issued ",
                     send.ToString(), ", but rank ", send.peer, " issued ", recv.ToString()));
  }
  Copy(OutputOf(recv), InputOf(send), send.input.nbytes());
  return absl::OkStatus();
}

}  // namespace

absl::Status Execute(const std::string& communicator, const std::vector<Operation>& operations) {
  if (operations[0].kind == OperationKind::kSend) {
    return ExecuteTransfer(communicator, operations[0], operations[1]);
  }
  if (absl::Status status = CheckSame(communicator, operations); !status.ok()) return status;
  ExecuteCollective(operations);
  return absl::OkStatus();
}

}  // namespace lockstep::comm::inprocess
