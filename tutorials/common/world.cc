#include "lockstep/tutorials/common/world.h"

#include <ATen/Parallel.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/inprocess/inprocess_communicator.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/launch/threads.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/tools/malloc/keep_freed_memory.h"
#include "lockstep/tools/trace/flight_recorder.h"
#include "lockstep/tools/trace/startup.h"
#include "lockstep/tutorials/common/startup.h"

namespace lockstep::tutorials {

struct RankCount {
  int value = 0;  // 0: launch::RelaunchIfAlone decides
};

bool AbslParseFlag(absl::string_view text, RankCount* ranks, std::string* error) {
  if (absl::SimpleAtoi(text, &ranks->value) && ranks->value >= 1) return true;
  *error = "give a number of ranks from 1 up";
  return false;
}

std::string AbslUnparseFlag(RankCount ranks) {
  return ranks.value == 0 ? "CORES" : absl::StrCat(ranks.value);
}

struct Deadline {
  absl::Duration value;
};

bool AbslParseFlag(absl::string_view text, Deadline* deadline, std::string* error) {
  if (absl::ParseDuration(text, &deadline->value) && deadline->value > absl::ZeroDuration()) {
    return true;
  }
  *error = "give a time with its unit, as in 90s, 30m or 1h30m";
  return false;
}

std::string AbslUnparseFlag(const Deadline& deadline) {
  return absl::FormatDuration(deadline.value);
}

}  // namespace lockstep::tutorials

ABSL_FLAG(lockstep::tutorials::RankCount, ranks, {},
          "processes to start where no launcher did; CORES: as many as cores, at most 4");
ABSL_FLAG(lockstep::tutorials::Deadline, deadline, {absl::Minutes(30)},
          "how long one communication may take before it fails and names the ranks that are "
          "missing");

namespace lockstep::tutorials {
namespace {

constexpr absl::Duration kTimeToLearn = absl::Seconds(1);

// Whether another rank failed, aborted its communicator, and so says itself why.
bool IsOfAnotherRank(const absl::Status& status, const comm::Communicator* world) {
  return world != nullptr && absl::IsAborted(status) &&
         !absl::StartsWith(status.message(), absl::StrCat("aborted by rank ", world->rank(), ":"));
}

// Leaves what this rank did last to whoever looks for the cause of a failure.
void WriteFlightRecord(const comm::Communicator& world) {
  const char* folder = std::getenv("LOCKSTEP_FLIGHT_DIR");
  if (folder == nullptr || *folder == '\0') return;
  const std::string path = absl::StrCat(folder, "/rank", world.rank(), ".flight.json");
  if (absl::Status status = world.flight_recorder()->Write(path); !status.ok()) PrintError(status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<comm::Communicator>> CreateWorld() {
  const absl::StatusOr<launch::World> world = launch::Detect();
  if (!world.ok()) return world.status();
  if (const std::optional<int> threads = launch::ThreadsOfRank(*world)) {
    at::set_num_threads(*threads);
  }
  const absl::Duration deadline = absl::GetFlag(FLAGS_deadline).value;
  if (world->launcher == launch::Launcher::kAlone) {
    return std::move(comm::inprocess::Create(/*size=*/1, {.deadline = deadline})[0]);
  }
  return comm::mpi::Create(*world, {.deadline = deadline});
}

int RunRanks(int argc, char** argv, const Usage& usage,
             const std::function<absl::Status(comm::Communicator& world)>& body,
             const launch::RelaunchOptions& options, const WorldFactory& create) {
  trace::EndStartupPhase("libraries");
  KeepFreedMemory();
  if (options.default_ranks > 0) absl::SetFlag(&FLAGS_ranks, RankCount{options.default_ranks});
  SetFlagsOrExit(argc, argv, usage);
  launch::RelaunchIfAlone(argc, argv, options);
  EnterUsersFolder();
  std::unique_ptr<comm::Communicator> world;
  const absl::Status status = StatusOf([&]() -> absl::Status {
    absl::StatusOr<std::unique_ptr<comm::Communicator>> created =
        create ? create(absl::GetFlag(FLAGS_deadline).value) : CreateWorld();
    if (!created.ok()) return created.status();
    world = *std::move(created);
    StartupDone(world->device().is_cuda() ? "NCCL" : "MPI");
    if (absl::Status ran = body(*world); !ran.ok()) return ran;
    FinishStartup("body", world.get());
    return absl::OkStatus();
  });
  if (status.ok()) return ExitStatus();
  if (world != nullptr) WriteFlightRecord(*world);
  if (!IsOfAnotherRank(status, world.get())) {
    PrintError(status);
    if (world != nullptr) world->Abort(status);
  }
  // Rank 0 serves the store, from which the others learn who failed.
  if (world != nullptr && world->rank() == 0 && world->size() > 1) absl::SleepFor(kTimeToLearn);
  ExitAtOnce(1);
}

}  // namespace lockstep::tutorials
