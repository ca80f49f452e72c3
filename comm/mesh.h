#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::comm {

// A dimension of a Mesh.
struct MeshDimension {
  std::string name;
  int size = 1;
};

// Ranks laid out in a grid, for parallelism of several kinds at once: each rank gets a communicator
// along each dimension, over the ranks that differ from it in that coordinate alone.
//
//   // 8 ranks: parameters sharded over 4, each shard held by 2.
//   absl::StatusOr<Mesh> mesh = Mesh::Create(comm, {{"replicate", 2}, {"shard", 4}});
//   mesh->dimension("shard")        // ranks 0..3 on ranks 0 to 3, ranks 4..7 on the others
//   mesh->dimension("replicate")    // ranks {0, 4}, {1, 5}, {2, 6}, {3, 7}
//
// LAYOUT is row-major, as that of torch.distributed.device_mesh: the last dimension's ranks are
// neighbours. Launchers number the ranks of a node in sequence, so the dimension that communicates
// most comes last, with at most a node's ranks. A communicator's ranks are the coordinates along
// its dimension.
//
// ORDER. The communicators are made by Split from the given one, which Mesh does not keep: all
// ranks must issue in one consistent order across those that they share, see communicator.h.
class Mesh {
 public:
  // Collective. All ranks get the same error: InvalidArgument for no dimensions, a name that is
  // empty or given twice, a size below 1, or sizes whose product is not comm.size();
  // FailedPrecondition where ranks give different dimensions; what the communicator returned.
  static absl::StatusOr<Mesh> Create(Communicator& comm, std::vector<MeshDimension> dimensions);

  const std::vector<MeshDimension>& dimensions() const { return dimensions_; }

  // This rank's group along the dimension, its size, and this rank's place in it. StatusError
  // (NotFound), naming those that there are, where there is no such dimension.
  Communicator& dimension(const std::string& name) const;
  int size(const std::string& name) const;
  int coordinate(const std::string& name) const;

 private:
  size_t Find(const std::string& name) const;

  std::vector<MeshDimension> dimensions_;
  std::vector<std::unique_ptr<Communicator>> groups_;  // by dimension
};

}  // namespace lockstep::comm
