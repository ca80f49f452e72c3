#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"

// How long a process took until it did what it is for.
//
//   int main(int argc, char** argv) {
//     trace::EndStartupPhase("libraries");    // all that was before main
//     Connect();
//     trace::EndStartupPhase("connect");
//     ...
//     for (const trace::StartupPhase& phase : trace::StartupPhases()) {
//       std::cout << phase.name << ": " << phase.duration << "\n";
//     }
//   }
//
// Phases follow each other without gaps: one begins where that before it ended, the first when the
// process was made. What a launcher took before that is a phase "launch", where
// LOCKSTEP_STARTED_AT, the Unix time in seconds at which a launcher began, is in the environment;
// from host to host it is as good as their clocks agree.
//
// From one thread at a time.
namespace lockstep::trace {

struct StartupPhase {
  std::string name;
  absl::Duration duration;
};

// When the system made this process, to a hundredth of a second: what exec, the dynamic linker and
// initialisers of globals take is after it. Now, where /proc does not tell.
absl::Time ProcessStart();

// Names what this process has done since the last call. A name that was there already has its
// duration added to.
void EndStartupPhase(std::string_view name);

// What was named so far, in order.
std::vector<StartupPhase> StartupPhases();

}  // namespace lockstep::trace
