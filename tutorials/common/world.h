#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/launch/relaunch.h"
#include "lockstep/tutorials/common/run_main.h"

namespace lockstep::tutorials {

// The main of a program that runs on several ranks:
//
//   absl::Status Train(comm::Communicator& world) { ... }  // or throws
//
//   int main(int argc, char** argv) {
//     return lockstep::tutorials::RunRanks(argc, argv, {.summary = ..., .example = ...}, Train);
//   }
//
// Like RunMain, and: adds the flags --ranks, --deadline and --profile_startup (startup.h); gives
// each rank its share of the node's cores (launch::ThreadsOfRank); started by hand, starts ranks of
// itself under mpirun (see launch::RelaunchIfAlone); a rank that fails aborts `world`, so that the
// others end. A rank that fails for no other reason than this (ABORTED) prints nothing.
//
// Where LOCKSTEP_FLIGHT_DIR names a folder, each rank that fails writes its last operations into
// it, as rank3.flight.json (see trace::FlightRecorder): where a rank stands that the others wait
// for, and what it did instead.
//
// Flags are checked before ranks are started. In a rank the flag --ranks has its default: ask
// world.size().
//
// `create`, where one is given, makes `world` in the place of CreateWorld, with --deadline as its
// deadline: see device_world.h.
using WorldFactory =
    std::function<absl::StatusOr<std::unique_ptr<comm::Communicator>>(absl::Duration deadline)>;
int RunRanks(int argc, char** argv, const Usage& usage,
             const std::function<absl::Status(comm::Communicator& world)>& body,
             const launch::RelaunchOptions& options = {}, const WorldFactory& create = {});

// What RunRanks gives to body: the communicator of all ranks that the launcher started, over MPI,
// with --deadline; where nothing did, that of one rank in this process, which needs no MPI.
// Collective.
absl::StatusOr<std::unique_ptr<comm::Communicator>> CreateWorld();

}  // namespace lockstep::tutorials
