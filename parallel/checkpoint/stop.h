#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::parallel::checkpoint {

// Exit status of a program that saved a checkpoint and ended because it was told to, before its
// work was done: started again, it goes on. It is EX_TEMPFAIL of sysexits.h. A restarter starts
// such a program again and does not count it as a failure: multinode_run does, with --max_restarts,
// and puts a batch job whose time is up back into Slurm's queue. A batch script of your own:
//
//   #SBATCH --requeue --open-mode=append --signal=TERM@120
//   srun ./train --checkpoint_dir=runs/a
//   if [[ $? == 75 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
inline constexpr int kExitToBeContinued = 75;

// Whether a training is to save and end now: when one of its ranks got SIGTERM or SIGUSR1 (which
// mpirun, other than SIGTERM, passes on to ranks and lets them live), or when its time is up.
//
//   auto stop = ValueOrThrow(StopRequest::Watch(comm, absl::Minutes(55)));
//   for (...) {
//     ... one step ...
//     if (ValueOrThrow(stop->Requested())) { ... save, return kExitToBeContinued ... }
//   }
//
// One at a time in a process. A second signal of the kind ends the process as usual.
class StopRequest {
 public:
  // From now on the first SIGTERM or SIGUSR1 does not end this process. `limit` counts from now.
  // Collective.
  static absl::StatusOr<std::unique_ptr<StopRequest>> Watch(
      comm::Communicator& comm, absl::Duration limit = absl::InfiniteDuration());

  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  // The same answer on all ranks, whichever of them was told. Collective: one byte is reduced.
  absl::StatusOr<bool> Requested();

 private:
  StopRequest(std::unique_ptr<comm::Communicator> comm, absl::Duration limit);

  const std::unique_ptr<comm::Communicator> comm_;
  const absl::Time end_;
};

}  // namespace lockstep::parallel::checkpoint
