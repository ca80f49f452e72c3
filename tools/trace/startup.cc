#include "lockstep/tools/trace/startup.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"

namespace lockstep::trace {
namespace {

struct Profile {
  std::vector<StartupPhase> phases;
  absl::Time last;
};

Profile MakeProfile() {
  Profile profile = {.last = ProcessStart()};
  const char* text = std::getenv("LOCKSTEP_STARTED_AT");
  double seconds = 0;
  if (text != nullptr && absl::SimpleAtod(text, &seconds)) {
    const absl::Duration launch = profile.last - absl::FromUDate(seconds * 1e3);
    profile.phases.push_back({"launch", std::max(launch, absl::ZeroDuration())});
  }
  return profile;
}

Profile& TheProfile() {
  static auto* profile = new Profile(MakeProfile());
  return *profile;
}

}  // namespace

absl::Time ProcessStart() {
  const absl::Time now = absl::Now();
  timespec boot = {};
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos || clock_gettime(CLOCK_BOOTTIME, &boot) != 0) return now;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int i = 3; i < 22; ++i) fields >> skipped;  // starttime is field 22 of proc(5)
  int64_t ticks = 0;
  if (!(fields >> ticks)) return now;
  const absl::Duration since_boot = absl::Seconds(1) * ticks / sysconf(_SC_CLK_TCK);
  return std::min(now, now - (absl::DurationFromTimespec(boot) - since_boot));
}

void EndStartupPhase(std::string_view name) {
  Profile& profile = TheProfile();
  const absl::Time now = absl::Now();
  const absl::Duration duration = std::max(now - profile.last, absl::ZeroDuration());
  profile.last = now;
  const auto found = std::find_if(profile.phases.begin(), profile.phases.end(),
                                  [&](const StartupPhase& phase) { return phase.name == name; });
  if (found != profile.phases.end()) {
    found->duration += duration;
  } else {
    profile.phases.push_back({std::string(name), duration});
  }
}

std::vector<StartupPhase> StartupPhases() { return TheProfile().phases; }

}  // namespace lockstep::trace
