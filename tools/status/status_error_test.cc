#include "lockstep/tools/status/status_error.h"

#include <memory>
#include <string>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(StatusError, CarriesTheStatusAndPrintsCodeAndMessage) {
  try {
    ThrowIfError(absl::NotFoundError("no file x"));
    FAIL() << "did not throw";
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "NOT_FOUND: no file x");
    const auto* status_error = dynamic_cast<const StatusError*>(&error);
    ASSERT_NE(status_error, nullptr);
    EXPECT_EQ(status_error->status(), absl::NotFoundError("no file x"));
  }
}

TEST(StatusError, OkDoesNotThrowAndIsNoError) {
  EXPECT_NO_THROW(ThrowIfError(absl::OkStatus()));
  EXPECT_EQ(StatusError(absl::OkStatus()).status(),
            absl::InternalError("StatusError made from an OK status"));
}

TEST(ValueOrThrow, GivesTheValueOrThrowsTheStatus) {
  absl::StatusOr<std::unique_ptr<int>> good = std::make_unique<int>(7);
  EXPECT_EQ(*ValueOrThrow(std::move(good)), 7);
  absl::StatusOr<std::string> bad = absl::DataLossError("cut off");
  EXPECT_THROW(ValueOrThrow(bad), StatusError);
}

}  // namespace
}  // namespace lockstep
