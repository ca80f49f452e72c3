#pragma once

#include <string_view>

#include "lockstep/comm/communicator.h"

namespace lockstep::tutorials {

// --profile_startup, for programs that link this: what start-up took, a line a rank.
//
//   StartupDone("data");                       // the data are open
//   ...
//   for (...) { ...; StartupDone("first step", &world); }
//
// With the flag, the first call for "first step" gathers the times of all ranks and prints them on
// rank 0, the slowest rank first:
//
//   start-up, in ms; ranks by what they did without waiting for others
//   rank  host  launch  libraries  MPI  data  model  first step  total  threads  cores
//   ----  ----  ------  ---------  ---  ----  -----  ----------  -----  -------  -----
//   1     n1        62        188  240    91     20          31    632        1    0-1
//
// Of MPI, the model (whose weights rank 0 sends) and the first step a part is waiting for slower
// ranks; so the order is that of the other phases' sum. RunRanks names what is before body, and
// prints at the end of body where there was no first step. Later calls, and those without the flag,
// cost nothing worth mentioning. `world` is null in programs of one process. Collective.
//
// Throws StatusError where ranks cannot be asked.
void StartupDone(std::string_view phase, comm::Communicator* world = nullptr);

// For world.h: as StartupDone("first step", world), but with what the program has done otherwise
// named `phase`.
void FinishStartup(std::string_view phase, comm::Communicator* world);

}  // namespace lockstep::tutorials
