#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/mpi/options.h"

// Ranks are processes that Open MPI connects; tensors are on the CPU.
//
//   int main(int argc, char** argv) {
//     lockstep::launch::RelaunchIfAlone(argc, argv);
//     auto world = lockstep::launch::Detect();
//     auto comm = lockstep::comm::mpi::Create(*world);
//     if (!comm.ok()) { std::cerr << comm.status() << "\n"; return 1; }
//     at::Tensor x = at::ones({1000});
//     absl::Status status = (*comm)->AllReduce(x, lockstep::comm::ReduceOp::kSum).Wait();
//     return status.ok() ? 0 : 1;
//   }
//
// PROGRESS. Operations go on in the background while the caller computes: a thread drives MPI while
// something is pending and nobody waits. It takes turns with the caller's threads for the cores.
//
// MEMORY. Ranks of one node read and write each other's memory instead of sending messages, in
// communicators whose ranks all share it, where the system lets them (it does not from container to
// container). Tensors made by Empty are shared themselves; others are copied through 2 MiB on the
// way. Of what Empty's tensors leave, 32 MiB are kept for the next ones; nothing stays of a killed
// process.
//
// REDUCTIONS. The order of additions depends on the numbers of ranks and elements, not on the run.
// f16 and bf16 are combined in f32 and rounded at the end; in MPI's own reductions, of tensors
// below Options::exchange_bytes where memory is not shared, after every two ranks.
//
// FAILURE. One rank serves a Store beside MPI, by which the ranks learn of each other's Abort and
// say who is missing (see ControlPlane). After an error other than a refusal the process should
// exit with a status that is not 0: mpirun then ends the other ranks, which fail on their own too.
// MPI is finalized by a process that exits with status 0 and had no error, if it was initialized
// here.
//
// ENVIRONMENT. LOCKSTEP_COMM_DEBUG=detail compares what the ranks issue before each collective.
// LOCKSTEP_STORE_HOST is the name or address by which the other nodes reach rank 0's;
// default: its host name, or 127.0.0.1 where all ranks share a node. OMPI_MCA_* variables are Open
// MPI's.
namespace lockstep::comm::mpi {

// The communicator of all ranks. Collective; initializes MPI (thread level MULTIPLE) where nobody
// has.
//
// FailedPrecondition: the launcher gives no MPI (torchrun-style variables, srun without PMIx), MPI
// came up with another rank or size than `world` (both are named), was initialized for fewer
// threads, or is finalized already. Unavailable: the Store cannot be served or reached. Internal:
// MPI's errors.
absl::StatusOr<std::unique_ptr<Communicator>> Create(const launch::World& world,
                                                     const Options& options = {});

}  // namespace lockstep::comm::mpi
