#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "lockstep/comm/reduce_op.h"

namespace lockstep::comm {

enum class OperationKind {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kGather,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
};

// "AllReduce", "AllGather", ...
const char* Name(OperationKind kind);

// Whether all ranks of the communicator take part (all kinds but kSend and kRecv).
bool IsCollective(OperationKind kind);

// One operation as this rank issues it: what Communicator's methods build and hand to its backend.
// Decorators (counting, fault injection) look at it on the way.
//
// Tensors by kind; n is the number of ranks:
//   kAllReduce      output: in place
//   kAllGather      input: k elements; output: n * k, rank i's at i * k
//   kReduceScatter  input: n * k elements; output: k, the sum of the ranks' i-th blocks on rank i
//   kBroadcast      output: read on rank `peer`, written on the others
//   kGather         input: k elements; output: n * k on rank `peer`, undefined on the others
//   kAllToAll       input, output: n * k elements; block j of rank i becomes block i of rank j
//   kSend           input: to rank `peer`
//   kRecv           output: from rank `peer`
//   kBarrier        none
struct Operation {
  OperationKind kind;
  at::Tensor input;
  at::Tensor output;
  ReduceOp op = ReduceOp::kSum;
  int peer = -1;          // root, destination or source
  int tag = 0;            // matches a Recv to its Send
  std::string label;      // what it is for: part of the signature, so ranks must agree on it
  uint64_t sequence = 0;  // counts the communicator's collectives from 1, the same on all ranks,
                          // and this rank's Sends and Recvs apart; set when it is issued

  // The tensor that defines dtype and shape in messages: the input if there is one.
  const at::Tensor& subject() const { return input.defined() ? input : output; }

  // Bytes of this rank's payload: those of the larger of input and output.
  int64_t payload_bytes() const;

  // "AllReduce #17 (sum, float32 [1024])", with a label "AllGather #2 (float32 [64], blocks.3)".
  std::string ToString() const;

  // "AllReduce (sum, float32, 1024 elements)": equal on all ranks that issue the same collective.
  std::string Signature() const;
};

// f32, f64, f16, bf16, i32, i64 and u8.
bool IsSupported(at::ScalarType dtype);

// What every backend refuses: undefined, non-contiguous or sparse tensors, a dtype other than f32,
// f64, f16, bf16, i32, i64, u8, tensors of different dtypes or on another device than `device`,
// sizes that do not fit, a root or peer that is no rank, a tag that is not from 0 to 32767, an
// average of integers, and an input that overlaps the output other than as this rank's slice of it.
// InvalidArgument, naming the operation.
absl::Status Validate(const Operation& operation, int rank, int size, at::Device device);

}  // namespace lockstep::comm
