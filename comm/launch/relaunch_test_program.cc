// What relaunch_test runs: relaunch_test_program --dir=DIR --mode=MODE [--ranks=N]
#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/launch/program_under_test.h"
#include "lockstep/comm/launch/relaunch.h"

namespace {

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "unset" : value;
}

int MostRanks() { return std::atoi(Variable("MOST_RANKS").c_str()); }

absl::Status CheckRanks(int ranks) {
  if (ranks == 3) return absl::OkStatus();
  return absl::InvalidArgumentError(std::to_string(ranks) + " is not three");
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::launch::RelaunchOptions options;
  if (std::getenv("MOST_RANKS") != nullptr) {
    options = {.default_ranks = 3, .most_default_ranks = MostRanks, .check_ranks = CheckRanks};
  }
  lockstep::launch::RelaunchIfAlone(argc, argv, options);
  auto world = lockstep::launch::Detect();
  if (!world.ok()) return 100;
  std::string mode;
  std::string dir;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--mode=", 0) == 0) mode = argument.substr(7);
    if (argument.rfind("--dir=", 0) == 0) dir = argument.substr(6);
  }
  if (mode != "no_mpi") MPI_Init(nullptr, nullptr);
  sigset_t terminate;
  sigemptyset(&terminate);
  sigaddset(&terminate, SIGTERM);
  if (mode == "saves") sigprocmask(SIG_BLOCK, &terminate, nullptr);
  lockstep::launch::testing::WriteScratch(dir, world->rank);

  const bool second = world->rank == 1;
  if (mode == "exit" && second) _exit(3);
  if (mode == "mpi_abort" && second) MPI_Abort(MPI_COMM_WORLD, 5);
  if (mode == "wait" || mode == "exit" || mode == "mpi_abort" || mode == "no_mpi") {
    while (true) pause();
  }
  if (mode == "stubborn") {  // takes no notice of SIGTERM, and has a child that neither does
    signal(SIGTERM, SIG_IGN);
    if (fork() == 0) setsid();
    while (true) pause();
  }
  if (mode == "saves") {  // for longer than mpirun would wait
    int signal = 0;
    sigwait(&terminate, &signal);
    sleep(2 + world->rank);
    std::fprintf(stderr, "rank %d saved\n", world->rank);
  }
  int value = world->rank + 1;
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  std::printf("rank %d of %d sum %d launcher %s args", world->rank, world->size, value,
              lockstep::launch::LauncherName(world->launcher).c_str());
  for (int i = 3; i < argc; ++i) std::printf(" %s", argv[i]);
  std::printf(" terminal %d threads %s tmpdir %s input %d\n", lockstep::launch::IsTerminal(1),
              Variable("OMP_NUM_THREADS").c_str(), Variable("TMPDIR").c_str(), std::getchar());
  MPI_Finalize();
  return 0;
}
