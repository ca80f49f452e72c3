#include "lockstep/tools/trace/flight_recorder.h"

#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace lockstep::trace {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

FlightOperation AllReduce(int64_t sequence, absl::Span<const int64_t> shape) {
  return {.communicator = "world",
          .sequence = sequence,
          .operation = "AllReduce(sum)",
          .dtype = "f32",
          .shape = shape,
          .bytes = 2560};
}

TEST(FlightRecorderTest, FollowsAnOperationThroughItsStates) {
  FlightRecorder recorder;
  const std::vector<int64_t> shape = {64, 10};
  const int64_t id = recorder.Record(AllReduce(/*sequence=*/7, shape));
  FlightEntry entry = recorder.Entries().at(0);
  EXPECT_EQ(entry.id, 0);
  EXPECT_EQ(entry.sequence, 7);
  EXPECT_STREQ(entry.communicator.data(), "world");
  EXPECT_STREQ(entry.operation.data(), "AllReduce(sum)");
  EXPECT_STREQ(entry.dtype.data(), "f32");
  EXPECT_EQ(entry.dims, 2);
  EXPECT_EQ(entry.shape[1], 10);
  EXPECT_EQ(entry.bytes, 2560);
  EXPECT_EQ(entry.state, FlightState::kIssued);
  EXPECT_GT(entry.issued, absl::ZeroDuration());
  EXPECT_EQ(entry.started, absl::ZeroDuration());

  recorder.Start(id);
  EXPECT_EQ(recorder.Entries()[0].state, FlightState::kStarted);
  EXPECT_GE(recorder.Entries()[0].started, entry.issued);

  recorder.Complete(id, /*ok=*/true);
  EXPECT_EQ(recorder.Entries()[0].state, FlightState::kCompleted);
  recorder.Complete(id, /*ok=*/false);
  EXPECT_EQ(recorder.Entries()[0].state, FlightState::kFailed);
  EXPECT_GE(recorder.Entries()[0].ended, recorder.Entries()[0].started);
}

TEST(FlightRecorderTest, KeepsTheLastAndIgnoresIdsThatAreGone) {
  FlightRecorder recorder(/*capacity=*/3);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(recorder.Record(AllReduce(i, {})), i);
  recorder.Complete(/*id=*/4, /*ok=*/false);  // its place is taken by 7
  recorder.Complete(/*id=*/8, /*ok=*/false);  // not issued yet
  recorder.Complete(/*id=*/-1, /*ok=*/false);
  const std::vector<FlightEntry> entries = recorder.Entries();
  ASSERT_EQ(entries.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(entries[i].id, 5 + i);
    EXPECT_EQ(entries[i].state, FlightState::kIssued);
  }
}

TEST(FlightRecorderTest, CutsLongTextsAndShapes) {
  FlightRecorder recorder(/*capacity=*/1);
  const std::string name(100, 'n');
  const std::vector<int64_t> shape = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  recorder.Record({.communicator = name, .operation = name, .dtype = name, .shape = shape});
  FlightEntry entry = recorder.Entries()[0];
  EXPECT_EQ(entry.communicator.data(), std::string(31, 'n'));
  EXPECT_EQ(entry.operation.data(), std::string(31, 'n'));
  EXPECT_EQ(entry.dtype.data(), std::string(7, 'n'));
  EXPECT_EQ(entry.dims, 8);
  EXPECT_EQ(entry.shape[7], 8);

  recorder.Record(AllReduce(/*sequence=*/1, {}));  // nothing of the longer text stays
  EXPECT_STREQ(recorder.Entries()[0].communicator.data(), "world");
  EXPECT_EQ(recorder.Entries()[0].dims, 0);
}

TEST(FlightRecorderTest, TextHasALineForEachEntry) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.ToText(), "");
  const std::vector<int64_t> shape = {64, 10};
  recorder.Complete(recorder.Record(AllReduce(/*sequence=*/7, shape)), /*ok=*/true);
  recorder.Record(AllReduce(/*sequence=*/8, {}));
  std::istringstream text(recorder.ToText());
  std::string line;
  ASSERT_TRUE(std::getline(text, line));
  EXPECT_THAT(line, MatchesRegex("#0 world seq 7 AllReduce.sum. f32.64, 10. 2560 B completed, "
                                 "issued .* ago"));
  ASSERT_TRUE(std::getline(text, line));
  EXPECT_THAT(line, HasSubstr("#1 world seq 8 AllReduce(sum) f32[] 2560 B issued, issued "));
  EXPECT_FALSE(std::getline(text, line));
}

TEST(FlightRecorderTest, WritesJson) {
  FlightRecorder recorder;
  const std::vector<int64_t> shape = {3, 257};
  recorder.Record(AllReduce(/*sequence=*/1, shape));
  FlightOperation odd = AllReduce(/*sequence=*/2, {});
  odd.operation = "not \xff UTF-8";
  recorder.Start(recorder.Record(odd));
  const std::string path = ::testing::TempDir() + "/flight.json";
  ASSERT_TRUE(recorder.Write(path).ok());
  const nlohmann::json entries = nlohmann::json::parse(std::ifstream(path)).at("entries");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].at("communicator"), "world");
  EXPECT_EQ(entries[0].at("shape"), nlohmann::json({3, 257}));
  EXPECT_EQ(entries[0].at("state"), "issued");
  EXPECT_FALSE(entries[0].contains("started_us"));
  EXPECT_GE(entries[1].at("started_us"), entries[1].at("issued_us"));
  EXPECT_FALSE(entries[1].contains("ended_us"));

  const absl::Status status = recorder.Write("/nonexistent/flight.json");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("cannot write /nonexistent/flight.json: No such file or directory"));
}

TEST(FlightRecorderTest, ThreadsGetTheirOwnIds) {
  FlightRecorder recorder(/*capacity=*/64);
  std::vector<std::vector<int64_t>> ids(4);
  std::vector<std::thread> threads;
  for (std::vector<int64_t>& mine : ids) {
    threads.emplace_back([&recorder, &mine] {
      for (int i = 0; i < 1000; ++i) {
        mine.push_back(recorder.Record(AllReduce(i, {})));
        recorder.Complete(mine.back(), /*ok=*/true);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<int64_t> all;
  for (const std::vector<int64_t>& mine : ids) all.insert(mine.begin(), mine.end());
  EXPECT_EQ(all.size(), 4000u);
  EXPECT_EQ(*all.rbegin(), 3999);
  ASSERT_EQ(recorder.Entries().size(), 64u);
  for (const FlightEntry& entry : recorder.Entries()) {
    EXPECT_EQ(entry.state, FlightState::kCompleted);
  }
}

}  // namespace
}  // namespace lockstep::trace
