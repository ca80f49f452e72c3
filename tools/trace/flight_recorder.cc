#include "lockstep/tools/trace/flight_recorder.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/file.h"
#include "nlohmann/json.hpp"

namespace lockstep::trace {
namespace {

template <size_t N>
void CopyText(std::string_view from, std::array<char, N>& to) {
  const size_t size = std::min(from.size(), N - 1);
  std::copy_n(from.data(), size, to.data());
  std::fill(to.begin() + size, to.end(), '\0');
}

absl::Span<const int64_t> Shape(const FlightEntry& entry) {
  return absl::MakeConstSpan(entry.shape.data(), entry.dims);
}

std::string Line(const FlightEntry& entry, absl::Duration now) {
  return absl::StrCat(
      "#", entry.id, " ", entry.communicator.data(), " seq ", entry.sequence, " ",
      entry.operation.data(), " ", entry.dtype.data(), "[", absl::StrJoin(Shape(entry), ", "), "] ",
      entry.bytes, " B ", std::string(FlightStateName(entry.state)), ", issued ",
      absl::FormatDuration(absl::Trunc(now - entry.issued, absl::Microseconds(1))), " ago");
}

nlohmann::json Json(const FlightEntry& entry) {
  nlohmann::json json = {
      {"id", entry.id},
      {"communicator", entry.communicator.data()},
      {"sequence", entry.sequence},
      {"operation", entry.operation.data()},
      {"dtype", entry.dtype.data()},
      {"shape", std::vector<int64_t>(Shape(entry).begin(), Shape(entry).end())},
      {"bytes", entry.bytes},
      {"state", std::string(FlightStateName(entry.state))},
      {"issued_us", absl::ToDoubleMicroseconds(entry.issued)},
  };
  if (entry.started != absl::ZeroDuration()) {
    json["started_us"] = absl::ToDoubleMicroseconds(entry.started);
  }
  if (entry.ended != absl::ZeroDuration()) {
    json["ended_us"] = absl::ToDoubleMicroseconds(entry.ended);
  }
  return json;
}

}  // namespace

std::string_view FlightStateName(FlightState state) {
  switch (state) {
    case FlightState::kIssued:
      return "issued";
    case FlightState::kStarted:
      return "started";
    case FlightState::kCompleted:
      return "completed";
    case FlightState::kFailed:
      return "failed";
  }
  return "unknown";
}

FlightRecorder::FlightRecorder(int capacity) : ring_(std::max(capacity, 1)) {}

int64_t FlightRecorder::Record(const FlightOperation& operation) {
  const absl::Duration now = SteadyNow();
  std::lock_guard lock(mutex_);
  const int64_t id = next_id_++;
  FlightEntry& entry = ring_[id % ring_.size()];
  entry.id = id;
  entry.sequence = operation.sequence;
  CopyText(operation.communicator, entry.communicator);
  CopyText(operation.operation, entry.operation);
  CopyText(operation.dtype, entry.dtype);
  entry.dims = std::min<int>(operation.shape.size(), FlightEntry::kMaxDims);
  std::copy_n(operation.shape.begin(), entry.dims, entry.shape.begin());
  entry.bytes = operation.bytes;
  entry.state = FlightState::kIssued;
  entry.issued = now;
  entry.started = entry.ended = absl::ZeroDuration();
  return id;
}

FlightEntry* FlightRecorder::Find(int64_t id) {
  if (id < 0 || id >= next_id_) return nullptr;
  FlightEntry& entry = ring_[id % ring_.size()];
  return entry.id == id ? &entry : nullptr;
}

void FlightRecorder::Start(int64_t id) {
  const absl::Duration now = SteadyNow();
  std::lock_guard lock(mutex_);
  if (FlightEntry* entry = Find(id)) {
    entry->state = FlightState::kStarted;
    entry->started = now;
  }
}

void FlightRecorder::Complete(int64_t id, bool ok) {
  const absl::Duration now = SteadyNow();
  std::lock_guard lock(mutex_);
  if (FlightEntry* entry = Find(id)) {
    entry->state = ok ? FlightState::kCompleted : FlightState::kFailed;
    entry->ended = now;
  }
}

std::vector<FlightEntry> FlightRecorder::Entries() const {
  std::lock_guard lock(mutex_);
  const int64_t capacity = ring_.size();
  std::vector<FlightEntry> entries;
  for (int64_t id = std::max<int64_t>(0, next_id_ - capacity); id < next_id_; ++id) {
    entries.push_back(ring_[id % capacity]);
  }
  return entries;
}

std::string FlightRecorder::ToText() const {
  const absl::Duration now = SteadyNow();
  std::string text;
  for (const FlightEntry& entry : Entries()) absl::StrAppend(&text, Line(entry, now), "\n");
  return text;
}

std::string FlightRecorder::ToJson() const {
  nlohmann::json entries = nlohmann::json::array();
  for (const FlightEntry& entry : Entries()) entries.push_back(Json(entry));
  return nlohmann::json{{"entries", entries}}.dump(
      /*indent=*/1, /*indent_char=*/' ', /*ensure_ascii=*/false,
      nlohmann::json::error_handler_t::replace);
}

absl::Status FlightRecorder::Write(const std::string& path) const {
  return WriteFileAtomically(path, [this](std::ostream& out) { out << ToJson() << "\n"; });
}

}  // namespace lockstep::trace
