#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace lockstep::trace {

// A timeline of what a rank does, to look at in https://ui.perfetto.dev.
//
//   trace::StartRecording();
//   {
//     trace::Span span("forward", "train", {{"batch", images.size(0)}});
//     loss = Loss(model->forward(images));
//   }
//   trace::RecordCounter("loss", loss.item<double>());
//   trace::StopRecording();
//   absl::Status status = trace::WriteChromeTrace("/tmp/trace.0.json", comm.rank());
//
// While nothing is recorded an event costs one relaxed load of an atomic and allocates nothing.
// Everything is thread-safe. The recorder belongs to the process; ranks that are threads share it.

// A small named integer of an event. The name is a string literal: it is not copied.
struct Arg {
  const char* name = nullptr;
  int64_t value = 0;
};

inline constexpr size_t kMaxArgs = 4;  // further ones are not kept

namespace internal {
inline std::atomic<bool> recording = false;
inline std::atomic<bool> annotating = false;
}  // namespace internal

inline bool IsRecording() { return internal::recording.load(std::memory_order_relaxed); }

// Forgets all events and records from now on. Each thread keeps its first `max_events_per_thread`
// (of about 200 bytes); further ones are counted as dropped.
void StartRecording(size_t max_events_per_thread = 65536);

// Ends the recording; what was recorded stays, to be written.
void StopRecording();

// Tells another profiler of each Span of this process from now on, recorded or not: push(name)
// where it begins, pop() where it ends, on the same thread, nested. See nvtx.h.
struct Annotator {
  void (*push)(const char* name);
  void (*pop)();
};
void StartAnnotating(const Annotator& annotator);

struct RecordedEvents {
  int64_t recorded = 0;
  int64_t dropped = 0;
};
RecordedEvents CountRecordedEvents();

// An event from here to the end of the scope, on this thread's track. A span that begins before
// StartRecording() is not recorded.
class Span {
 public:
  explicit Span(std::string_view name, std::string_view category = {},
                std::initializer_list<Arg> args = {}) {
    if (IsRecording()) Begin(name, category, args);
    if (internal::annotating.load(std::memory_order_relaxed)) Push(name);
  }
  ~Span() {
    if (annotated_) Pop();
    if (recorded_) End();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void Begin(std::string_view name, std::string_view category, std::initializer_list<Arg> args);
  void End();
  void Push(std::string_view name);
  static void Pop();

  bool recorded_ = false;
  bool annotated_ = false;
  std::string name_;
  std::string category_;
  std::array<Arg, kMaxArgs> args_{};
  absl::Duration start_;
};

// An event that began and ended elsewhere, such as an asynchronous collective: any thread may enter
// it, on a track by name ("comm: world"). Times are SteadyNow()'s. Events of one track may overlap.
void RecordInterval(std::string_view track, std::string_view name, absl::Duration start,
                    absl::Duration end, std::initializer_list<Arg> args = {});

// A Span of this thread that began and ended in the past. Spans of a thread must nest, or follow
// one another. Times are SteadyNow()'s.
void RecordSpan(std::string_view name, std::string_view category, absl::Duration start,
                absl::Duration end, std::initializer_list<Arg> args = {});

// A value at this moment, drawn as a curve by its name.
void RecordCounter(std::string_view name, double value);

// The same for a moment in the past, a SteadyNow(). Unlike all other events it is also taken after
// StopRecording(): what is known only then, like a memory timeline, goes into the same file.
void RecordCounterAt(absl::Duration time, std::string_view name, double value);

// Names this thread's track, which is "thread N" else. Works before StartRecording() too.
void SetThreadName(std::string_view name);

// Writes what was recorded as Chrome trace JSON, whole or not at all. `rank` becomes the process of
// all events, so that the files of several ranks can be opened together; those of one machine share
// their clock. Recording may go on meanwhile. Unavailable: the file cannot be written.
absl::Status WriteChromeTrace(const std::string& path, int rank);

}  // namespace lockstep::trace
