#include "lockstep/tools/trace/memory_track.h"

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/tools/trace/recorder.h"
#include "nlohmann/json.hpp"

namespace lockstep::trace {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(MemoryTrackTest, EachCategoryIsACurveOfItsChanges) {
  std::vector<MemorySample> samples(3);
  for (int i = 0; i < 3; ++i) samples[i].time = absl::Microseconds(10 + i);
  samples[0].live_by_category[Index(MemoryCategory::kParameters)] = 100;
  samples[1].live_by_category[Index(MemoryCategory::kParameters)] = 100;
  samples[2].live_by_category[Index(MemoryCategory::kParameters)] = 100;
  samples[1].live_by_category[Index(MemoryCategory::kActivations)] = 7;

  StartRecording();
  StopRecording();
  RecordMemory(samples);
  const std::string path = ::testing::TempDir() + "/memory_track.json";
  ASSERT_TRUE(WriteChromeTrace(path, /*rank=*/0).ok());

  std::map<std::string, std::map<double, double>> curves;
  const nlohmann::json trace = nlohmann::json::parse(std::ifstream(path));
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "C") continue;
    curves[event.at("name")][event.at("ts")] = event.at("args").at("value");
  }
  EXPECT_THAT(
      curves,
      ElementsAre(Pair("memory: activations", ElementsAre(Pair(11, 7), Pair(12, 0))),
                  Pair("memory: all", ElementsAre(Pair(10, 100), Pair(11, 107), Pair(12, 100))),
                  Pair("memory: parameters", ElementsAre(Pair(10, 100)))));
}

}  // namespace
}  // namespace lockstep::trace
