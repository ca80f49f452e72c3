#include <gtest/gtest.h>

#include <sstream>
#include <stdexcept>

#include "absl/time/time.h"
#include "lockstep/tutorials/common/format.h"
#include "lockstep/tutorials/common/progress.h"
#include "lockstep/tutorials/common/table.h"

namespace lockstep::tutorials {
namespace {

TEST(FormatTest, ThreeDigits) {
  EXPECT_EQ(ThreeDigits(0), "0.000");
  EXPECT_EQ(ThreeDigits(0.0123), "0.012");
  EXPECT_EQ(ThreeDigits(0.9994), "0.999");
  EXPECT_EQ(ThreeDigits(0.9996), "1.00");
  EXPECT_EQ(ThreeDigits(9.994), "9.99");
  EXPECT_EQ(ThreeDigits(9.996), "10.0");
  EXPECT_EQ(ThreeDigits(99.96), "100");
  EXPECT_EQ(ThreeDigits(1293.4), "1293");
  EXPECT_EQ(ThreeDigits(-4.584), "-4.58");
}

TEST(FormatTest, Units) {
  EXPECT_EQ(InMebibytes(4800000), "4.58");
  EXPECT_EQ(InMebibytes(int64_t{3} << 40), "3145728");
  EXPECT_EQ(InMilliseconds(absl::Microseconds(12345)), "12.3");
  EXPECT_EQ(InMilliseconds(absl::Seconds(2)), "2000");
}

TEST(FormatTest, WithThousands) {
  EXPECT_EQ(WithThousands(0), "0");
  EXPECT_EQ(WithThousands(999), "999");
  EXPECT_EQ(WithThousands(1000), "1,000");
  EXPECT_EQ(WithThousands(1199882), "1,199,882");
  EXPECT_EQ(WithThousands(-999), "-999");
  EXPECT_EQ(WithThousands(-1000), "-1,000");
}

TEST(ProgressTest, DrawsEachStepAndClearsItsLine) {
  std::ostringstream out;
  {
    Progress progress("epoch 1", /*total=*/3,
                      {.enabled = true, .interval = absl::ZeroDuration(), .out = &out});
    progress.Advance("loss 2.1");
    progress.Advance();
    progress.Advance("loss 1.0");
  }
  EXPECT_EQ(out.str(),
            "\r\033[Kepoch 1 [..............................] 0/3"
            "\r\033[Kepoch 1 [##########....................] 1/3  loss 2.1"
            "\r\033[Kepoch 1 [####################..........] 2/3"
            "\r\033[Kepoch 1 [##############################] 3/3  loss 1.0"
            "\r\033[K");
}

TEST(ProgressTest, DrawsNoMoreOftenThanItIsTold) {
  std::ostringstream out;
  {
    Progress progress("p", /*total=*/1000,
                      {.enabled = true, .interval = absl::Hours(1), .out = &out});
    for (int i = 0; i < 1000; ++i) progress.Advance("note");
  }
  EXPECT_EQ(out.str(), "\r\033[Kp [..............................] 0/1000\r\033[K");
}

TEST(ProgressTest, MoreStepsThanAnnouncedFillTheBar) {
  std::ostringstream out;
  {
    Progress progress("p", /*total=*/0,
                      {.enabled = true, .interval = absl::ZeroDuration(), .out = &out});
    progress.Advance();
    progress.Advance();
  }
  EXPECT_EQ(out.str(),
            "\r\033[Kp [..............................] 0/1"
            "\r\033[Kp [##############################] 1/1"
            "\r\033[Kp [##############################] 2/1"
            "\r\033[K");
}

TEST(ProgressTest, DisabledPrintsNothing) {
  std::ostringstream out;
  {
    Progress progress("p", /*total=*/2, {.enabled = false, .out = &out});
    progress.Advance("note");
  }
  EXPECT_EQ(out.str(), "");
}

TEST(TableTest, AlignsNumbersOnTheRight) {
  Table table({"strategy", "step\nms", "memory\nMiB"});
  table.AddRow({"ddp", "12.3", "1293"});
  table.AddRow({"fsdp, sharded", "7", ""});
  EXPECT_EQ(table.ToString(),
            "strategy       step  memory\n"
            "                 ms     MiB\n"
            "-------------  ----  ------\n"
            "ddp            12.3    1293\n"
            "fsdp, sharded     7\n");
}

TEST(TableTest, CountsCharactersNotBytes) {
  Table table({"who", "formula"});
  table.AddRow({"ddp", "16 Ψ"});
  table.AddRow({"fsdp", "16 Ψ / N"});
  EXPECT_EQ(table.ToString(),
            "who    formula\n"
            "----  --------\n"
            "ddp       16 Ψ\n"
            "fsdp  16 Ψ / N\n");
}

TEST(TableTest, RefusesRowsOfAnotherLength) {
  Table table({"a", "b"});
  try {
    table.AddRow({"1"});
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "a row of 1 cells in a table of 2 columns");
  }
}

}  // namespace
}  // namespace lockstep::tutorials
