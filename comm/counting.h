#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "lockstep/comm/decorator.h"

namespace lockstep::comm {

// What this rank's operations of one kind moved.
struct Traffic {
  int64_t operations = 0;
  int64_t payload_bytes = 0;  // the larger of input and output of each
  int64_t wire_bytes =
      0;  // what a ring sends a rank: (n-1)/n of the payload, twice that for AllReduce
};

// Counts of all kinds, shared by a CountingCommunicator and those split from it. Thread-safe.
class TrafficCounters {
 public:
  Traffic operator[](OperationKind kind) const;
  Traffic total() const;
  void Reset();

 private:
  friend class CountingCommunicator;
  static constexpr int kKinds = static_cast<int>(OperationKind::kBarrier) + 1;
  struct Counter {
    std::atomic<int64_t> operations{0};
    std::atomic<int64_t> payload_bytes{0};
    std::atomic<int64_t> wire_bytes{0};
  };
  std::array<Counter, kKinds> counters_;
};

// A communicator that counts what goes through it, and through all that is split from it:
//
//   auto counters = std::make_shared<TrafficCounters>();
//   CountingCommunicator counting(std::move(comm), counters);
//   parallel::Ddp ddp(model, counting);                     // works on a Split of it
//   ... (*counters)[OperationKind::kAllReduce].payload_bytes ...
//
// wire_bytes follows the ring convention of nccl-tests: for a payload of S bytes and n ranks
// (n-1)/n * S, AllReduce 2 * (n-1)/n * S, Broadcast and Send S on the root or sender, Gather the
// input on all but the root.
class CountingCommunicator : public Decorator {
 public:
  CountingCommunicator(std::unique_ptr<Communicator> inner,
                       std::shared_ptr<TrafficCounters> counters);

  absl::StatusOr<std::unique_ptr<Communicator>> Split(std::optional<int> color, int key) override;
  Work Issue(Operation operation) override;

 private:
  const std::shared_ptr<TrafficCounters> counters_;
};

}  // namespace lockstep::comm
