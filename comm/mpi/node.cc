#include "lockstep/comm/mpi/node.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/comm/mpi/mpi_status.h"

namespace lockstep::comm::mpi {
namespace {

constexpr int64_t kMinArenaBytes = int64_t{1} << 30;

std::unique_ptr<Arena>& TheArena() {
  static auto* arena = new std::unique_ptr<Arena>;
  return *arena;
}

// Addresses are plentiful, but not without end: together, a node's arenas are as large as its
// memory.
int64_t ArenaBytes(int ranks) {
  return std::max(sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE) / ranks, kMinArenaBytes);
}

// Mappings last as long as the process, so each is made once.
absl::StatusOr<char*> MapOnce(const Arena::Handle& handle) {
  static auto* mapped = new std::map<uint64_t, char*>;
  char*& base = (*mapped)[handle.token[0]];
  if (base != nullptr) return base;
  absl::StatusOr<char*> found = Arena::Map(handle);
  if (found.ok()) base = *found;
  return found;
}

// The arenas of the ranks of `node`, in their order; empty where not all see each other's.
absl::StatusOr<std::vector<char*>> ShareOnNode(MPI_Comm node) {
  int rank = 0;
  int size = 1;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_rank(node, &rank));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(node, &size));
  if (TheArena() == nullptr && size > 1) {
    absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(ArenaBytes(size));
    if (arena.ok()) TheArena() = *std::move(arena);
  }
  std::vector<Arena::Handle> handles(size);
  if (TheArena() != nullptr) handles[rank] = TheArena()->handle();
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, handles.data(),
                                             sizeof(Arena::Handle), MPI_BYTE, node));
  int see_all = size > 1 ? 1 : 0;
  std::vector<char*> bases;
  for (int i = 0; i < size && see_all != 0; ++i) {
    if (i == rank && TheArena() != nullptr) {
      bases.push_back(TheArena()->base());
      continue;
    }
    absl::StatusOr<char*> base = MapOnce(handles[i]);
    bases.push_back(base.ok() ? *base : nullptr);
    if (!base.ok()) see_all = 0;
  }
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Allreduce(MPI_IN_PLACE, &see_all, 1, MPI_INT, MPI_MIN, node));
  if (see_all == 0) bases.clear();
  return bases;
}

}  // namespace

Arena* ProcessArena() { return TheArena().get(); }

absl::StatusOr<std::vector<char*>> ShareArenas(MPI_Comm comm) {
  int rank = 0;
  int size = 1;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_rank(comm, &rank));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(comm, &size));
  MPI_Comm node = MPI_COMM_NULL;
  LOCKSTEP_MPI_RETURN_IF_ERROR(
      MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, /*key=*/0, MPI_INFO_NULL, &node));
  absl::StatusOr<std::vector<char*>> on_node = ShareOnNode(node);
  int on_node_size = 1;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(node, &on_node_size));
  std::vector<int> ranks(on_node_size);
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Allgather(&rank, 1, MPI_INT, ranks.data(), 1, MPI_INT, node));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_free(&node));
  if (!on_node.ok()) return on_node.status();
  std::vector<char*> bases(size, nullptr);
  for (size_t i = 0; i < on_node->size(); ++i) bases[ranks[i]] = (*on_node)[i];
  return bases;
}

absl::StatusOr<std::unique_ptr<SharedGroup>> MakeSharedGroup(MPI_Comm comm,
                                                             const std::vector<char*>& bases) {
  if (bases.size() < 2 || std::count(bases.begin(), bases.end(), nullptr) != 0) return nullptr;
  int rank = 0;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_rank(comm, &rank));
  Arena& arena = *ProcessArena();
  std::vector<int64_t> boards(bases.size());
  const void* board = SharedGroup::MakeBoard(arena);
  boards[rank] = board == nullptr ? 0 : arena.OffsetOf(board);
  LOCKSTEP_MPI_RETURN_IF_ERROR(
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_INT64_T, boards.data(), 1, MPI_INT64_T, comm));
  if (std::count(boards.begin(), boards.end(), 0) != 0) return nullptr;
  return std::make_unique<SharedGroup>(arena, rank, bases, boards);
}

}  // namespace lockstep::comm::mpi
