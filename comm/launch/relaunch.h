#pragma once

#include <string>

#include "absl/status/status.h"

// Makes a program parallel by itself: started alone, it starts local ranks of itself under mpirun.
//
//   int main(int argc, char** argv) {
//     lockstep::launch::RelaunchIfAlone(argc, argv);  // first: before threads, MPI, CUDA and flags
//     absl::StatusOr<lockstep::launch::World> world = lockstep::launch::Detect();
//     ...
//   }
//
// `./program` then runs on as many ranks as there are cores, at most 4; `./program --ranks=3` on 3;
// `mpirun -n 8 ./program` and `srun --mpi=pmix -n 8 ./program` on the 8 ranks that these start.
namespace lockstep::launch {

struct RelaunchOptions {
  int default_ranks = 0;  // where --ranks does not say; 0: the cores, at most 4 (default 0)
  int (*most_default_ranks)() = nullptr;  // limits the default: as many GPUs as there are, say
  absl::Status (*check_ranks)(int ranks) = nullptr;  // of --ranks: an error is printed, and ends
                                                     // all with status 2 (default: no check)
  std::string mpirun;  // path of mpirun of Open MPI; empty: searched for, see below (default "")
};

// Returns in every rank, and where no ranks are to be started: with --ranks=1, with --help, and
// under another launcher. Elsewhere it starts the ranks, waits for them and exits; it never returns
// then.
//
// --ranks=N (or --ranks N) is taken out of argv, and argc reduced; no other argument is touched.
// One line on stderr and exit status 2 follow an N of more than 32 ranks a core, one that
// options.check_ranks refuses, one that differs from the number of ranks of another launcher, and
// variables that contradict each other (see Detect).
//
// mpirun is options.mpirun, else $LOCKSTEP_MPIRUN, else that of the Open MPI with which this was
// built, else the first on PATH. Ranks share this host's cores unpinned; OMP_NUM_THREADS, unless
// set, is their share of the cores; OMPI_MCA_* variables of yours win over ours.
//
// However the run ends, all ranks end with it, and no process and no file stays:
//  - all ranks return 0: exit status 0;
//  - a rank returns N: the others are ended, status N, "rank 1 exited with status N" on stderr;
//  - a rank dies by signal S: likewise with 128 + S and "rank 1 was killed by signal 9 (Killed)";
//  - SIGINT, SIGTERM, SIGHUP or SIGQUIT to this process: the ranks get SIGTERM, and have ten
//    seconds to save what they want before they get SIGKILL, which a second signal to this process
//    gives them at once; status 128 + signal. To end this process by SIGKILL ends them too.
//
// In ranks, stdout is line buffered, and stdin is empty.
void RelaunchIfAlone(int& argc, char** argv, const RelaunchOptions& options = {});

// isatty(fd) for stdout (1) and stderr (2) as the user sees them: mpirun puts a terminal of its own
// between, so that isatty(1) holds in every rank, even where output goes to a file.
bool IsTerminal(int fd);

}  // namespace lockstep::launch
