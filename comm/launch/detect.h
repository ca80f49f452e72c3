#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

// Who am I? Reads the variables that a launcher leaves in a process's environment.
//
//   absl::StatusOr<lockstep::launch::World> world = lockstep::launch::Detect();
//   if (!world.ok()) return world.status();
//   auto comm = lockstep::comm::mpi::Create(*world);
//   std::cout << "rank " << world->rank << " of " << world->size << "\n";
//
// Call it before MPI_Init: Open MPI writes variables of its own there.
namespace lockstep::launch {

enum class Launcher {
  kAlone,       // nothing started us: rank 0 of 1
  kMpirun,      // mpirun of Open MPI, on one host or inside an allocation of a batch system
  kSrunPmix,    // srun --mpi=pmix: MPI works
  kSrunNoPmix,  // srun without PMIx: MPI would come up as rank 0 of 1, NCCL works
  kTorchrun,    // RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, from torchrun or set by
                // hand: as above
};

// "mpirun", "srun with PMIx", ... for messages.
std::string LauncherName(Launcher launcher);

// Where the ranks can meet: rank 0 serves it.
struct StoreAddress {
  std::string host;
  int port = 0;
};

struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;                 // among the ranks of this node; chooses the GPU
  std::optional<int> local_size = 1;  // nullopt: torchrun-style variables without LOCAL_WORLD_SIZE
  std::optional<int> node_count = 1;  // nullopt: the launcher does not tell
  Launcher launcher = Launcher::kAlone;
  std::optional<StoreAddress> store;  // see Detect; nullopt: under mpirun, and alone
};

// Looks a variable up; nullopt where it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

std::optional<std::string> ProcessEnvironment(const std::string& name);

// The first of these that applies decides:
//  1. OMPI_COMM_WORLD_RANK: mpirun. SLURM_* then describes Open MPI's daemons and is not looked at.
//  2. TORCHELASTIC_RUN_ID: torchrun, perhaps one on each node by srun.
//  3. SLURM_STEP_ID with SLURM_PROCID: a task of srun, with PMIx if PMIX_RANK is there. The shell
//  of
//     salloc or sbatch has most SLURM_* variables but no step, and that of `srun --pty` is a step
//     of one task: programs that are typed there are alone.
//  4. RANK or WORLD_SIZE: torchrun-style variables.
//  5. None: alone.
//
// The store is at MASTER_ADDR and MASTER_PORT where these are set, whatever the launcher. Else,
// under srun, on the step's first host (where rank 0 runs unless srun was told otherwise) at port
// 20000 + (job id + 97 * step id) % 10000.
//
// InvalidArgument, naming the variables and their values, where a variable is missing, is no
// number, or contradicts another: RANK, WORLD_SIZE and LOCAL_RANK must agree with srun's and
// mpirun's where both are set. Likewise in a rank of another MPI than Open MPI (PMI_RANK, ...): it
// is not alone.
absl::StatusOr<World> Detect(const Environment& environment = ProcessEnvironment);

}  // namespace lockstep::launch
