#include "lockstep/tools/trace/recorder.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/tools/trace/clock.h"
#include "nlohmann/json.hpp"

namespace lockstep::trace {
namespace {

using ::testing::HasSubstr;

nlohmann::json WriteAndRead(int rank) {
  const std::string path = ::testing::TempDir() + "/trace.json";
  EXPECT_TRUE(WriteChromeTrace(path, rank).ok());
  return nlohmann::json::parse(std::ifstream(path));
}

// The one event of that name.
nlohmann::json Find(const nlohmann::json& trace, const std::string& name) {
  nlohmann::json found;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("name") != name) continue;
    EXPECT_TRUE(found.is_null()) << "two events " << name;
    found = event;
  }
  EXPECT_FALSE(found.is_null()) << "no event " << name;
  return found;
}

// Track (thread id) -> its name.
std::map<int, std::string> Tracks(const nlohmann::json& trace) {
  std::map<int, std::string> names;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("name") == "thread_name") names[event.at("tid")] = event.at("args").at("name");
  }
  return names;
}

TEST(RecorderTest, RecordsNothingWhileOff) {
  StartRecording();
  StopRecording();
  EXPECT_FALSE(IsRecording());
  { Span span("off"); }
  RecordInterval("track", "off", absl::ZeroDuration(), absl::Seconds(1));
  RecordCounter("off", 1.0);
  EXPECT_EQ(CountRecordedEvents().recorded, 0);
  EXPECT_EQ(CountRecordedEvents().dropped, 0);
}

TEST(RecorderTest, SpansThatStraddleTheSwitchAreLeftOut) {
  StopRecording();
  {
    Span early("early");
    StartRecording();
  }
  {
    Span late("late");
    StopRecording();
  }
  EXPECT_EQ(CountRecordedEvents().recorded, 0);
}

TEST(RecorderTest, SpansNestAndCarryArgs) {
  StartRecording();
  {
    Span outer("outer", "train", {{"batch", 64}, {"step", -3}});
    Span inner("inner");
  }
  StopRecording();
  const nlohmann::json trace = WriteAndRead(/*rank=*/3);
  const nlohmann::json outer = Find(trace, "outer");
  const nlohmann::json inner = Find(trace, "inner");
  EXPECT_EQ(outer.at("ph"), "X");
  EXPECT_EQ(outer.at("pid"), 3);
  EXPECT_EQ(outer.at("cat"), "train");
  EXPECT_EQ(outer.at("args"), nlohmann::json({{"batch", 64}, {"step", -3}}));
  EXPECT_FALSE(inner.contains("args"));
  EXPECT_EQ(inner.at("tid"), outer.at("tid"));
  EXPECT_LE(outer.at("ts"), inner.at("ts"));
  EXPECT_GE(outer.at("dur").get<double>(), inner.at("dur").get<double>());
  EXPECT_EQ(Find(trace, "process_name").at("args").at("name"), "rank 3");
  EXPECT_EQ(trace.at("otherData").at("rank"), 3);
}

TEST(RecorderTest, ArgsPastTheFourthAreNotKept) {
  StartRecording();
  { Span span("args", {}, {{"a", 1}, {"b", 2}, {"c", 3}, {"d", 4}, {"e", 5}}); }
  StopRecording();
  EXPECT_EQ(Find(WriteAndRead(/*rank=*/0), "args").at("args"),
            nlohmann::json({{"a", 1}, {"b", 2}, {"c", 3}, {"d", 4}}));
}

TEST(RecorderTest, OverlappingIntervalsGetLanesOfTheirTrack) {
  StartRecording();
  const auto at = [](int ms) { return absl::Milliseconds(ms); };
  // From another thread, and not in order of time.
  std::thread([&] {
    RecordInterval("comm", "third", at(20), at(30), {{"bytes", 4097}});
    RecordInterval("comm", "first", at(0), at(20));
    RecordInterval("comm", "second", at(10), at(40));
    RecordInterval("disk", "other", at(0), at(5));
  }).join();
  StopRecording();
  const nlohmann::json trace = WriteAndRead(/*rank=*/0);
  const nlohmann::json first = Find(trace, "first");
  EXPECT_EQ(first.at("ts"), 0.0);
  EXPECT_EQ(first.at("dur"), 20000.0);
  EXPECT_EQ(Find(trace, "third").at("args").at("bytes"), 4097);
  const int lane = first.at("tid");
  EXPECT_EQ(Find(trace, "third").at("tid"), lane);  // begins where first ends
  EXPECT_NE(Find(trace, "second").at("tid"), lane);
  std::map<int, std::string> tracks = Tracks(trace);
  EXPECT_EQ(tracks.at(lane), "comm");
  EXPECT_EQ(tracks.at(Find(trace, "second").at("tid")), "comm");
  EXPECT_EQ(tracks.at(Find(trace, "other").at("tid")), "disk");
}

TEST(RecorderTest, CountersAreCurves) {
  StartRecording();
  RecordCounter("loss", 2.5);
  StopRecording();
  const nlohmann::json loss = Find(WriteAndRead(/*rank=*/0), "loss");
  EXPECT_EQ(loss.at("ph"), "C");
  EXPECT_EQ(loss.at("args").at("value"), 2.5);
}

TEST(RecorderTest, CountersOfThePastAreTakenAfterTheEnd) {
  StartRecording();
  StopRecording();
  RecordCounterAt(absl::Microseconds(17), "bytes", 4097);
  const nlohmann::json bytes = Find(WriteAndRead(/*rank=*/0), "bytes");
  EXPECT_EQ(bytes.at("ts"), 17.0);
  EXPECT_EQ(bytes.at("args").at("value"), 4097);
}

TEST(RecorderTest, SpansOfThePastAreOnTheTrackOfTheirThread) {
  StartRecording();
  RecordSpan("earlier", "train", absl::Microseconds(5), absl::Microseconds(9), {{"unit", 1}});
  { Span span("now"); }
  StopRecording();
  RecordSpan("too late", "train", absl::Microseconds(5), absl::Microseconds(9));
  const nlohmann::json trace = WriteAndRead(/*rank=*/0);
  const nlohmann::json earlier = Find(trace, "earlier");
  EXPECT_EQ(earlier.at("ts"), 5.0);
  EXPECT_EQ(earlier.at("dur"), 4.0);
  EXPECT_EQ(earlier.at("cat"), "train");
  EXPECT_EQ(earlier.at("args").at("unit"), 1);
  EXPECT_EQ(earlier.at("tid"), Find(trace, "now").at("tid"));
  EXPECT_EQ(CountRecordedEvents().recorded, 2);
}

TEST(RecorderTest, ThreadsHaveTracksOfTheirOwnAndNames) {
  StartRecording();
  { Span span("main"); }
  std::thread([] {
    SetThreadName("progress");
    Span span("worker");
  }).join();
  StopRecording();
  const nlohmann::json trace = WriteAndRead(/*rank=*/0);
  const int worker = Find(trace, "worker").at("tid");
  EXPECT_NE(Find(trace, "main").at("tid"), worker);
  EXPECT_EQ(Tracks(trace).at(worker), "progress");

  StartRecording();  // the buffer of the thread that ended is gone with its events
  StopRecording();
  for (const auto& [track, name] : Tracks(WriteAndRead(/*rank=*/0))) EXPECT_NE(name, "progress");
}

TEST(RecorderTest, BoundsEachThreadAndCountsWhatItDrops) {
  StartRecording(/*max_events_per_thread=*/10);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 257; ++i) Span span("event");
    });
  }
  for (std::thread& thread : threads) thread.join();
  StopRecording();
  EXPECT_EQ(CountRecordedEvents().recorded, 40);
  EXPECT_EQ(CountRecordedEvents().dropped, 4 * 247);
  EXPECT_EQ(WriteAndRead(/*rank=*/0).at("otherData").at("dropped_events"), 4 * 247);
}

TEST(RecorderTest, CanBeWrittenWhileThreadsRecord) {
  StartRecording(/*max_events_per_thread=*/257);
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&stop] {
      while (!stop) {
        { Span span("busy", "test", {{"x", 1}}); }
        std::this_thread::yield();
      }
    });
  }
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(WriteAndRead(/*rank=*/0).contains("traceEvents"));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  StopRecording();
}

TEST(RecorderTest, WritesNamesThatNeedEscapes) {
  StartRecording();
  { Span span("a \"quoted\" \\ name\n\xff"); }
  StopRecording();
  EXPECT_NE(Find(WriteAndRead(/*rank=*/0), "a \"quoted\" \\ name\n\xef\xbf\xbd"), nullptr);
}

TEST(RecorderTest, FailedWriteNamesTheFileAndLeavesNone) {
  const std::string folder = ::testing::TempDir() + "/taken";
  std::filesystem::create_directories(folder + "/trace.json/x");  // a folder where the file goes
  const absl::Status status = WriteChromeTrace(folder + "/trace.json", /*rank=*/0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot write " + folder + "/trace.json: "));
  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    left.insert(entry.path().filename());
  }
  EXPECT_EQ(left, std::set<std::string>({"trace.json"}));
}

}  // namespace
}  // namespace lockstep::trace
