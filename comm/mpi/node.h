#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "lockstep/comm/mpi/arena.h"
#include "lockstep/comm/mpi/shared_group.h"

// Which ranks share a node, and its memory. Private to this folder; needs the progress token.
namespace lockstep::comm::mpi {

// This process's arena; null until ShareArenas() has made it.
Arena* ProcessArena();

// Collective. Where each rank's arena is mapped here: null for ranks of other nodes, and for all of
// a node whose ranks cannot all see each other's memory.
absl::StatusOr<std::vector<char*>> ShareArenas(MPI_Comm comm);

// Collective over `comm`, whose ranks' arenas are mapped at `bases`. Null on all ranks where some
// do not share memory.
absl::StatusOr<std::unique_ptr<SharedGroup>> MakeSharedGroup(MPI_Comm comm,
                                                             const std::vector<char*>& bases);

}  // namespace lockstep::comm::mpi
