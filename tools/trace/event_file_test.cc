#include "lockstep/tools/trace/event_file.h"

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep::trace {
namespace {

using ::testing::HasSubstr;

std::string Read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// RFC 3720 B.4, and the check value of the catalogue of CRCs.
TEST(Crc32cTest, KnownValues) {
  EXPECT_EQ(Crc32c(""), 0U);
  EXPECT_EQ(Crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62A8AB43U);
}

TEST(EventFileTest, RecordsFollowEachOtherWithTheirLengths) {
  const std::string folder = ::testing::TempDir() + "/events/below";
  auto events = EventFile::Create(folder);
  ASSERT_TRUE(events.ok()) << events.status();
  ASSERT_TRUE((*events)->Add("train/loss", /*step=*/300, 0.25).ok());
  EXPECT_THAT((*events)->path(), HasSubstr(folder + "/events.out.tfevents."));

  const std::string file = Read((*events)->path());  // there at once
  size_t records = 0;
  std::string last;
  for (size_t at = 0; at < file.size(); ++records) {
    uint64_t length = 0;
    std::memcpy(&length, &file[at], sizeof(length));
    last = file.substr(at + 12, length);
    at += 12 + length + 4;
    ASSERT_LE(at, file.size());
  }
  EXPECT_EQ(records, 2U);
  // wall_time is 9 bytes; then step 300, and summary { value { tag, simple_value } }.
  EXPECT_EQ(last.substr(9),
            std::string("\x10\xac\x02\x2a\x13\x0a\x11\x0a\x0atrain/loss\x15\0\0\x80\x3e", 24));
}

TEST(EventFileTest, SaysWhyItCannot) {
  const auto nowhere = EventFile::Create("/dev/null/runs");
  EXPECT_EQ(nowhere.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(nowhere.status().message()), HasSubstr("/dev/null/runs"));
}

}  // namespace
}  // namespace lockstep::trace
