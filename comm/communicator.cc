#include "lockstep/comm/communicator.h"

#include <ATen/ops/empty.h>

#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/counters.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::comm {
namespace {

// "ALLGATHER Unit "blocks.0"": Horovod Timeline's name of the phase, and what it is for.
std::string TimelinePhase(const Operation& operation) {
  std::string phase = absl::AsciiStrToUpper(Name(operation.kind));
  if (!operation.label.empty()) absl::StrAppend(&phase, " ", operation.label);
  return phase;
}

}  // namespace

Communicator::Communicator(int rank, int size, at::Device device, std::string name,
                           std::shared_ptr<trace::FlightRecorder> flight_recorder)
    : rank_(rank),
      size_(size),
      device_(device),
      name_(std::move(name)),
      flight_recorder_(std::move(flight_recorder)) {}

Work Communicator::AllReduce(at::Tensor tensor, ReduceOp op, std::string label) {
  return Submit({.kind = OperationKind::kAllReduce,
                 .output = std::move(tensor),
                 .op = op,
                 .label = std::move(label)});
}

Work Communicator::AllGatherInto(at::Tensor output, at::Tensor input, std::string label) {
  return Submit({.kind = OperationKind::kAllGather,
                 .input = std::move(input),
                 .output = std::move(output),
                 .label = std::move(label)});
}

Work Communicator::ReduceScatterInto(at::Tensor output, at::Tensor input, ReduceOp op,
                                     std::string label) {
  return Submit({.kind = OperationKind::kReduceScatter,
                 .input = std::move(input),
                 .output = std::move(output),
                 .op = op,
                 .label = std::move(label)});
}

Work Communicator::Broadcast(at::Tensor tensor, int root) {
  return Submit({.kind = OperationKind::kBroadcast, .output = std::move(tensor), .peer = root});
}

Work Communicator::GatherInto(at::Tensor output, at::Tensor input, int root) {
  return Submit({.kind = OperationKind::kGather,
                 .input = std::move(input),
                 .output = rank_ == root ? std::move(output) : at::Tensor(),
                 .peer = root});
}

Work Communicator::AllToAll(at::Tensor output, at::Tensor input) {
  return Submit(
      {.kind = OperationKind::kAllToAll, .input = std::move(input), .output = std::move(output)});
}

Work Communicator::Send(at::Tensor tensor, int destination, int tag) {
  return Submit(
      {.kind = OperationKind::kSend, .input = std::move(tensor), .peer = destination, .tag = tag});
}

Work Communicator::Recv(at::Tensor tensor, int source, int tag) {
  return Submit(
      {.kind = OperationKind::kRecv, .output = std::move(tensor), .peer = source, .tag = tag});
}

Work Communicator::Barrier() { return Submit({.kind = OperationKind::kBarrier}); }

at::Tensor Communicator::Empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device_));
}

Work Communicator::Submit(Operation operation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refused_) {
      Work refused = *std::exchange(refused_, std::nullopt);
      if (!refused.state()->observed()) return refused;
    }
  }
  if (absl::Status status = Validate(operation, rank_, size_, device_); !status.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    refused_ = Work(std::move(status));
    return *refused_;
  }
  return Record(std::move(operation));
}

Work Communicator::Record(Operation operation) {
  static trace::Counter& operations = trace::GetCounter("comm/operations");
  static trace::Counter& payload_bytes = trace::GetCounter("comm/payload_bytes");
  const at::Tensor& subject = operation.subject();
  const OperationKind kind = operation.kind;
  const int64_t bytes = operation.payload_bytes();
  operations.Add(1);
  payload_bytes.Add(bytes);
  const int64_t sequence = static_cast<int64_t>(++issued_);
  const int64_t id = flight_recorder_->Record({
      .communicator = name_,
      .sequence = sequence,
      .operation = Name(kind),
      .dtype = subject.defined() ? c10::toString(subject.scalar_type()) : "",
      .shape = subject.defined() ? absl::MakeConstSpan(subject.sizes().data(), subject.dim())
                                 : absl::Span<const int64_t>(),
      .bytes = bytes,
  });
  std::string phase = trace::IsRecording() ? TimelinePhase(operation) : "";
  const absl::Duration start = trace::SteadyNow();
  Work work = Issue(std::move(operation));
  work.state()->OnDone([recorder = flight_recorder_, name = name_, id, bytes, sequence, start,
                        phase = std::move(phase)](const absl::Status& status) {
    recorder->Complete(id, status.ok());
    if (!phase.empty()) {
      trace::RecordInterval("comm: " + name, phase, start, trace::SteadyNow(),
                            {{"bytes", bytes}, {"number", sequence}});
    }
  });
  return work;
}

}  // namespace lockstep::comm
