#include "lockstep/tools/trace/startup.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lockstep::trace {
namespace {

TEST(StartupTest, KnowsWhenTheProcessWasMade) {
  const absl::Duration age = absl::Now() - ProcessStart();
  EXPECT_GE(age, absl::ZeroDuration());
  EXPECT_LT(age, absl::Minutes(1));
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_GE(absl::Now() - ProcessStart(), absl::Milliseconds(50));
}

TEST(StartupTest, PhasesFollowEachOtherWithoutGaps) {
  EndStartupPhase("before");
  absl::SleepFor(absl::Milliseconds(30));
  EndStartupPhase("sleep");
  EndStartupPhase("other");
  absl::SleepFor(absl::Milliseconds(30));
  EndStartupPhase("sleep");
  absl::Duration total;
  std::vector<std::string> names;
  for (const StartupPhase& phase : StartupPhases()) {
    total += phase.duration;
    names.push_back(phase.name);
    if (phase.name == "sleep") {
      EXPECT_GE(phase.duration, absl::Milliseconds(60));
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"before", "sleep", "other"}));
  const absl::Duration age = absl::Now() - ProcessStart();
  EXPECT_LE(total, age + absl::Milliseconds(11));  // a tick of the system's clock
  EXPECT_GE(total, age - absl::Milliseconds(100));
}

}  // namespace
}  // namespace lockstep::trace
