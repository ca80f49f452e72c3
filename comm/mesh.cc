#include "lockstep/comm/mesh.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::comm {
namespace {

// "replicate=2, shard=4"
std::string Describe(const std::vector<MeshDimension>& dimensions) {
  return absl::StrJoin(dimensions, ", ", [](std::string* out, const MeshDimension& dimension) {
    absl::StrAppend(out, dimension.name, "=", dimension.size);
  });
}

absl::Status Check(const std::vector<MeshDimension>& dimensions, int world) {
  const std::string mesh = absl::StrCat("mesh (", Describe(dimensions), "): ");
  if (dimensions.empty()) return absl::InvalidArgumentError(absl::StrCat(mesh, "no dimensions"));
  int64_t ranks = 1;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    const auto& [name, size] = dimensions[i];
    if (name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(mesh, "dimension ", i, " has no name"));
    }
    if (size < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(mesh, "dimension ", name, " must have 1 rank at least"));
    }
    for (size_t before = 0; before < i; ++before) {
      if (dimensions[before].name == name) {
        return absl::InvalidArgumentError(
            absl::StrCat(mesh, "two dimensions have the name ", name));
      }
    }
    ranks = std::min<int64_t>(ranks * size, int64_t{world} + 1);  // cannot overflow
  }
  if (ranks != world) {
    return absl::InvalidArgumentError(
        absl::StrCat(mesh, "the product of the sizes must be the number of ranks, ", world));
  }
  return absl::OkStatus();
}

// Also says so where one rank's dimensions are wrong and another's are not, which would wait.
absl::Status CheckSame(Communicator& comm, const std::vector<MeshDimension>& dimensions) {
  std::string text;
  for (const auto& [name, size] : dimensions) absl::StrAppend(&text, name.size(), name, " ", size);
  const auto options = at::TensorOptions().dtype(at::kLong).device(comm.device());
  const at::Tensor mine =
      at::full({1}, static_cast<int64_t>(std::hash<std::string>()(text)), options);
  const at::Tensor all = at::empty({comm.size()}, options);
  if (absl::Status status = comm.AllGatherInto(all, mine).Wait(); !status.ok()) return status;
  const at::Tensor hashes = all.cpu();
  const int64_t* hash = hashes.const_data_ptr<int64_t>();
  for (int rank = 1; rank < comm.size(); ++rank) {
    if (hash[rank] == hash[0]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("mesh: ranks 0 and ", rank, " gave different dimensions; this rank, ",
                     comm.rank(), ", gave (", Describe(dimensions), ")"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Mesh> Mesh::Create(Communicator& comm, std::vector<MeshDimension> dimensions) {
  if (absl::Status status = CheckSame(comm, dimensions); !status.ok()) return status;
  if (absl::Status status = Check(dimensions, comm.size()); !status.ok()) return status;
  Mesh mesh;
  int stride = comm.size();  // between neighbours along the dimension
  for (const MeshDimension& dimension : dimensions) {
    const int outer_stride = stride;
    stride /= dimension.size;
    const int coordinate = comm.rank() / stride % dimension.size;
    // The rank of the group's first member names the group.
    const int first = comm.rank() / outer_stride * outer_stride + comm.rank() % stride;
    absl::StatusOr<std::unique_ptr<Communicator>> group = comm.Split(first, coordinate);
    if (!group.ok()) {
      return absl::Status(group.status().code(),
                          absl::StrCat("mesh dimension ", dimension.name, ": ",
                                       std::string{group.status().message()}));
    }
    mesh.groups_.push_back(*std::move(group));
  }
  mesh.dimensions_ = std::move(dimensions);
  return mesh;
}

Communicator& Mesh::dimension(const std::string& name) const { return *groups_[Find(name)]; }

int Mesh::size(const std::string& name) const { return groups_[Find(name)]->size(); }

int Mesh::coordinate(const std::string& name) const { return groups_[Find(name)]->rank(); }

size_t Mesh::Find(const std::string& name) const {
  for (size_t i = 0; i < dimensions_.size(); ++i) {
    if (dimensions_[i].name == name) return i;
  }
  throw StatusError(absl::NotFoundError(
      absl::StrCat("mesh (", Describe(dimensions_), ") has no dimension ", name)));
}

}  // namespace lockstep::comm
