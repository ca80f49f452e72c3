#include "lockstep/tools/trace/recorder.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/file.h"
#include "nlohmann/json.hpp"

namespace lockstep::trace {
namespace {

struct Event {
  enum class Kind : uint8_t { kSpan, kInterval, kCounter };

  Kind kind = Kind::kSpan;
  std::string name;
  std::string group;  // a span's category, an interval's track
  absl::Duration start;
  absl::Duration end;
  double value = 0;
  std::array<Arg, kMaxArgs> args{};
};

std::array<Arg, kMaxArgs> KeepArgs(std::initializer_list<Arg> args) {
  std::array<Arg, kMaxArgs> kept{};
  std::copy_n(args.begin(), std::min(args.size(), kMaxArgs), kept.begin());
  return kept;
}

struct ThreadEvents {
  std::string thread_name;
  std::vector<Event> events;
  int64_t dropped = 0;
};

// The events of one thread. The lock is contended only while they are counted or copied.
struct Buffer : ThreadEvents {
  std::mutex mutex;
};

class Recorder {
 public:
  static Recorder& Get() {
    static Recorder& recorder = *new Recorder;  // never destroyed: threads may outlive main
    return recorder;
  }

  Buffer& ThisThread() {
    thread_local const std::shared_ptr<Buffer> buffer = Register();
    return *buffer;
  }

  void Start(size_t max_events_per_thread) {
    std::lock_guard lock(mutex_);
    std::erase_if(buffers_, [](const auto& buffer) { return buffer.use_count() == 1; });
    for (const auto& buffer : buffers_) {
      std::lock_guard buffer_lock(buffer->mutex);
      buffer->events.clear();
      buffer->dropped = 0;
    }
    max_events_ = max_events_per_thread;
    internal::recording = true;
  }

  void Add(Event event) {
    Buffer& buffer = ThisThread();
    std::lock_guard lock(buffer.mutex);
    if (buffer.events.size() >= max_events_.load(std::memory_order_relaxed)) {
      ++buffer.dropped;
    } else {
      buffer.events.push_back(std::move(event));
    }
  }

  std::vector<std::shared_ptr<Buffer>> Buffers() {
    std::lock_guard lock(mutex_);
    return buffers_;
  }

 private:
  std::shared_ptr<Buffer> Register() {
    auto buffer = std::make_shared<Buffer>();
    std::lock_guard lock(mutex_);
    buffer->thread_name = "thread " + std::to_string(threads_++);
    buffers_.push_back(buffer);
    return buffer;
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
  int64_t threads_ = 0;
  std::atomic<size_t> max_events_ = 0;
};

// The viewer draws events of one track properly only if they nest. So intervals that overlap go to
// further lanes of their track: each takes the first that is free when it starts.
class Lanes {
 public:
  size_t Take(absl::Duration start, absl::Duration end) {
    size_t lane = 0;
    while (lane < free_from_.size() && free_from_[lane] > start) ++lane;
    if (lane == free_from_.size()) free_from_.push_back(end);
    free_from_[lane] = end;
    return lane;
  }

 private:
  std::vector<absl::Duration> free_from_;
};

class Writer {
 public:
  Writer(std::ostream& out, int rank) : out_(out), rank_(rank) {
    out_ << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
    Metadata("process_name", /*track=*/0, "rank " + std::to_string(rank));
  }

  void Add(const ThreadEvents& thread) {
    const int64_t track = NewTrack(thread.thread_name);
    for (const Event& event : thread.events) {
      if (event.kind == Event::Kind::kInterval) {
        intervals_.push_back(event);
      } else {
        Put(event, track);
      }
    }
    dropped_ += thread.dropped;
  }

  void Finish() {
    std::ranges::stable_sort(intervals_, {}, &Event::start);
    std::map<std::string, Lanes> lanes;
    std::map<std::pair<std::string, size_t>, int64_t> tracks;
    for (const Event& event : intervals_) {
      const size_t lane = lanes[event.group].Take(event.start, event.end);
      const auto [track, is_new] = tracks.try_emplace({event.group, lane}, 0);
      if (is_new) track->second = NewTrack(event.group);
      Put(event, track->second);
    }
    const absl::Duration to_wall_clock = absl::Now() - absl::UnixEpoch() - SteadyNow();
    const nlohmann::json other = {
        {"rank", rank_},
        {"dropped_events", dropped_},
        {"add_to_get_unix_time_us", absl::ToInt64Microseconds(to_wall_clock)},
    };
    out_ << "\n], \"otherData\": " << other << "}\n";
  }

 private:
  int64_t NewTrack(const std::string& name) {
    const int64_t track = num_tracks_++;
    Metadata("thread_name", track, name);
    return track;
  }

  void Metadata(const char* what, int64_t track, const std::string& name) {
    Put({{"ph", "M"}, {"name", what}, {"pid", rank_}, {"tid", track}, {"args", {{"name", name}}}});
  }

  void Put(const Event& event, int64_t track) {
    nlohmann::json json = {{"name", event.name},
                           {"pid", rank_},
                           {"tid", track},
                           {"ts", absl::ToDoubleMicroseconds(event.start)}};
    if (event.kind == Event::Kind::kCounter) {
      json["ph"] = "C";
      json["args"] = {{"value", event.value}};
    } else {
      json["ph"] = "X";
      json["dur"] = absl::ToDoubleMicroseconds(event.end - event.start);
      if (!event.group.empty()) json["cat"] = event.group;
      for (const Arg& arg : event.args) {
        if (arg.name != nullptr) json["args"][arg.name] = arg.value;
      }
    }
    Put(json);
  }

  void Put(const nlohmann::json& json) {
    if (!first_) out_ << ",\n";
    first_ = false;
    out_ << json.dump(/*indent=*/-1, /*indent_char=*/' ', /*ensure_ascii=*/false,
                      nlohmann::json::error_handler_t::replace);
  }

  std::ostream& out_;
  const int rank_;
  bool first_ = true;
  int64_t num_tracks_ = 0;
  int64_t dropped_ = 0;
  std::vector<Event> intervals_;
};

Annotator the_annotator;

// Copied under the lock and written after it, so that the thread is not held up by the disk.
ThreadEvents Copy(Buffer& buffer) {
  std::lock_guard lock(buffer.mutex);
  return buffer;
}

}  // namespace

void StartRecording(size_t max_events_per_thread) { Recorder::Get().Start(max_events_per_thread); }

void StopRecording() { internal::recording = false; }

void StartAnnotating(const Annotator& annotator) {
  if (internal::annotating) return;  // Spans may be open
  the_annotator = annotator;
  internal::annotating = true;
}

RecordedEvents CountRecordedEvents() {
  RecordedEvents count;
  for (const auto& buffer : Recorder::Get().Buffers()) {
    std::lock_guard lock(buffer->mutex);
    count.recorded += static_cast<int64_t>(buffer->events.size());
    count.dropped += buffer->dropped;
  }
  return count;
}

void Span::Begin(std::string_view name, std::string_view category,
                 std::initializer_list<Arg> args) {
  name_ = name;
  category_ = category;
  args_ = KeepArgs(args);
  recorded_ = true;
  start_ = SteadyNow();
}

void Span::Push(std::string_view name) {
  the_annotator.push(std::string(name).c_str());
  annotated_ = true;
}

void Span::Pop() { the_annotator.pop(); }

void Span::End() {
  const absl::Duration end = SteadyNow();
  if (!IsRecording()) return;
  Recorder::Get().Add({.kind = Event::Kind::kSpan,
                       .name = std::move(name_),
                       .group = std::move(category_),
                       .start = start_,
                       .end = end,
                       .args = args_});
}

void RecordInterval(std::string_view track, std::string_view name, absl::Duration start,
                    absl::Duration end, std::initializer_list<Arg> args) {
  if (!IsRecording()) return;
  Recorder::Get().Add({.kind = Event::Kind::kInterval,
                       .name = std::string(name),
                       .group = std::string(track),
                       .start = start,
                       .end = end,
                       .args = KeepArgs(args)});
}

void RecordSpan(std::string_view name, std::string_view category, absl::Duration start,
                absl::Duration end, std::initializer_list<Arg> args) {
  if (!IsRecording()) return;
  Recorder::Get().Add({.kind = Event::Kind::kSpan,
                       .name = std::string(name),
                       .group = std::string(category),
                       .start = start,
                       .end = end,
                       .args = KeepArgs(args)});
}

void RecordCounter(std::string_view name, double value) {
  if (IsRecording()) RecordCounterAt(SteadyNow(), name, value);
}

void RecordCounterAt(absl::Duration time, std::string_view name, double value) {
  Recorder::Get().Add({.kind = Event::Kind::kCounter,
                       .name = std::string(name),
                       .group = {},
                       .start = time,
                       .end = time,
                       .value = value});
}

void SetThreadName(std::string_view name) {
  Buffer& buffer = Recorder::Get().ThisThread();
  std::lock_guard lock(buffer.mutex);
  buffer.thread_name = name;
}

absl::Status WriteChromeTrace(const std::string& path, int rank) {
  return WriteFileAtomically(path, [rank](std::ostream& out) {
    Writer writer(out, rank);
    for (const auto& buffer : Recorder::Get().Buffers()) {
      writer.Add(Copy(*buffer));
    }
    writer.Finish();
  });
}

}  // namespace lockstep::trace
