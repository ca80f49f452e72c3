#include "lockstep/tutorials/09_fsdp_bench/report.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "lockstep/tutorials/09_fsdp_bench/measure.h"

namespace lockstep::tutorials {
namespace {

Measurement Ddp(std::optional<absl::Duration> communication) {
  return {.strategy = "ddp",
          .ranks = 2,
          .losses = {1},
          .step = absl::Milliseconds(10),
          .backward = absl::Milliseconds(6),
          .communication = communication,
          .exposed = absl::Milliseconds(1),
          .collectives = 3};
}

// The words of the table's row of ddp.
std::vector<std::string> RowOf(const Measurement& m) {
  const std::vector<std::string> lines = absl::StrSplit(TableOf(Job(), {m}), '\n');
  for (const std::string& line : lines) {
    std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (!words.empty() && words[0] == "ddp") return words;
  }
  return {};
}

nlohmann::json JsonOf(const Measurement& m) {
  const char* folder = std::getenv("TEST_TMPDIR");
  const std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/report_test.json";
  EXPECT_TRUE(WriteJson(path, Job(), {m}).ok());
  std::ifstream file(path);
  return nlohmann::json::parse(file)["strategies"][0];
}

TEST(Report, SplitsAStep) {
  const Measurement m = Ddp(absl::Milliseconds(4));
  const std::vector<std::string> row = RowOf(m);
  ASSERT_GT(row.size(), 5);
  EXPECT_EQ(row[3], "4.00");
  EXPECT_EQ(row[4], "75");
  const nlohmann::json json = JsonOf(m);
  EXPECT_EQ(json["communication_ms"], 4);
  EXPECT_EQ(json["split_ms"],
            nlohmann::json({{"compute", 6.0}, {"hidden", 3.0}, {"exposed", 1.0}}));
}

TEST(Report, SaysWhereCommunicationIsNotKnown) {
  const Measurement m = Ddp(std::nullopt);
  const std::vector<std::string> row = RowOf(m);
  ASSERT_GT(row.size(), 5);
  EXPECT_EQ(row[2], "6.00");
  EXPECT_EQ(row[3], "-");
  EXPECT_EQ(row[4], "-");
  const nlohmann::json json = JsonOf(m);
  EXPECT_TRUE(json["communication_ms"].is_null());
  EXPECT_EQ(json["exposed_ms"], 1);
  EXPECT_EQ(json["split_ms"],
            nlohmann::json({{"compute", 9.0}, {"hidden", nullptr}, {"exposed", 1.0}}));
}

}  // namespace
}  // namespace lockstep::tutorials
