#include "lockstep/comm/counting.h"

#include <utility>

namespace lockstep::comm {
namespace {

int64_t WireBytes(const Operation& operation, int rank, int size) {
  const int64_t payload = operation.payload_bytes();
  switch (operation.kind) {
    case OperationKind::kAllReduce:
      return 2 * payload * (size - 1) / size;
    case OperationKind::kAllGather:
    case OperationKind::kReduceScatter:
    case OperationKind::kAllToAll:
      return payload * (size - 1) / size;
    case OperationKind::kBroadcast:
      return rank == operation.peer ? payload : 0;
    case OperationKind::kGather:
      return rank == operation.peer ? 0 : payload;
    case OperationKind::kSend:
      return payload;
    case OperationKind::kRecv:
    case OperationKind::kBarrier:
      return 0;
  }
  return 0;
}

}  // namespace

Traffic TrafficCounters::operator[](OperationKind kind) const {
  const Counter& counter = counters_[static_cast<int>(kind)];
  return {counter.operations, counter.payload_bytes, counter.wire_bytes};
}

Traffic TrafficCounters::total() const {
  Traffic total;
  for (const Counter& counter : counters_) {
    total.operations += counter.operations;
    total.payload_bytes += counter.payload_bytes;
    total.wire_bytes += counter.wire_bytes;
  }
  return total;
}

void TrafficCounters::Reset() {
  for (Counter& counter : counters_) {
    counter.operations = 0;
    counter.payload_bytes = 0;
    counter.wire_bytes = 0;
  }
}

CountingCommunicator::CountingCommunicator(std::unique_ptr<Communicator> inner,
                                           std::shared_ptr<TrafficCounters> counters)
    : Decorator(std::move(inner)), counters_(std::move(counters)) {}

absl::StatusOr<std::unique_ptr<Communicator>> CountingCommunicator::Split(std::optional<int> color,
                                                                          int key) {
  absl::StatusOr<std::unique_ptr<Communicator>> part = Decorator::Split(color, key);
  if (!part.ok() || *part == nullptr) return part;
  return std::make_unique<CountingCommunicator>(*std::move(part), counters_);
}

Work CountingCommunicator::Issue(Operation operation) {
  TrafficCounters::Counter& counter = counters_->counters_[static_cast<int>(operation.kind)];
  counter.operations += 1;
  counter.payload_bytes += operation.payload_bytes();
  counter.wire_bytes += WireBytes(operation, rank(), size());
  return Decorator::Issue(std::move(operation));
}

}  // namespace lockstep::comm
