#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace lockstep::trace {

// What one rank knows of one operation when it issues it. Texts are copied, and cut where
// FlightEntry's fields are shorter.
struct FlightOperation {
  std::string_view communicator;    // its name, e.g. "world" or "world/ddp"
  int64_t sequence = 0;             // number of the operation within its communicator
  std::string_view operation;       // e.g. "AllReduce(sum)"
  std::string_view dtype;           // e.g. "f32"
  absl::Span<const int64_t> shape;  // of the input; dimensions past the eighth are not kept
  int64_t bytes = 0;                // payload of this rank
};

enum class FlightState : uint8_t { kIssued, kStarted, kCompleted, kFailed };

// "issued", "started", "completed" or "failed".
std::string_view FlightStateName(FlightState state);

struct FlightEntry {
  static constexpr int kMaxDims = 8;

  int64_t id = 0;
  int64_t sequence = 0;
  std::array<char, 32> communicator{};  // these three end with a 0 byte
  std::array<char, 32> operation{};
  std::array<char, 8> dtype{};
  std::array<int64_t, kMaxDims> shape{};
  int dims = 0;
  int64_t bytes = 0;
  FlightState state = FlightState::kIssued;
  absl::Duration issued;  // SteadyNow() at each step; zero for a step not reached
  absl::Duration started;
  absl::Duration ended;
};

// The last operations of a rank, so that a run that hangs or fails can tell what it was doing.
//
//   trace::FlightRecorder recorder(/*capacity=*/1024);
//   const int64_t id = recorder.Record({.communicator = "world",
//                                       .sequence = 7,
//                                       .operation = "AllReduce(sum)",
//                                       .dtype = "f32",
//                                       .shape = tensor.sizes(),
//                                       .bytes = tensor.nbytes()});
//   recorder.Start(id);
//   recorder.Complete(id, /*ok=*/true);
//   std::cerr << recorder.ToText();
//
// A ring: entry `id + capacity` takes the place of entry `id`. Record() allocates nothing and takes
// well under a microsecond. Thread-safe. One recorder a rank; ranks that are threads have one each.
class FlightRecorder {
 public:
  explicit FlightRecorder(int capacity = 1024);  // entries of about 230 bytes

  // Enters an operation as issued now. Ids count from 0.
  int64_t Record(const FlightOperation& operation);

  // Moves an entry on. Does nothing where the ring no longer holds it.
  void Start(int64_t id);
  void Complete(int64_t id, bool ok);

  // What the ring holds, oldest first.
  std::vector<FlightEntry> Entries() const;

  // One line an entry, oldest first:
  //   #12 world seq 7 AllReduce(sum) f32[64, 10] 2560 B started, issued 3.2ms ago
  std::string ToText() const;

  // {"entries": [{"id": 12, "communicator": "world", ..., "issued_us": 1.5, ...}]}; times are
  // microseconds of SteadyNow(), absent for a step not reached.
  std::string ToJson() const;

  // Writes ToJson() so that readers see all of it or nothing. Unavailable: the file cannot be
  // written.
  absl::Status Write(const std::string& path) const;

 private:
  FlightEntry* Find(int64_t id);

  mutable std::mutex mutex_;
  int64_t next_id_ = 0;
  std::vector<FlightEntry> ring_;
};

}  // namespace lockstep::trace
