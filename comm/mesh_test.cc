#include "lockstep/comm/mesh.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::comm {
namespace {

using testing::RunRanks;

// The ranks in `world` of the members of a group, in its order.
std::vector<int64_t> Members(Communicator& group, const Communicator& world) {
  const at::Tensor mine = at::full({1}, world.rank(), at::kLong);
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  ThrowIfError(group.AllGatherInto(all, mine).Wait());
  const int64_t* data = all.const_data_ptr<int64_t>();
  return {data, data + all.numel()};
}

TEST(MeshTest, IsRowMajor) {
  RunRanks(8, [](Communicator& comm) {
    const Mesh mesh = ValueOrThrow(Mesh::Create(comm, {{"replicate", 2}, {"shard", 4}}));
    const int row = comm.rank() / 4, column = comm.rank() % 4;
    EXPECT_EQ(mesh.coordinate("replicate"), row);
    EXPECT_EQ(mesh.coordinate("shard"), column);
    EXPECT_EQ(mesh.size("replicate"), 2);
    EXPECT_EQ(mesh.size("shard"), 4);
    EXPECT_EQ(Members(mesh.dimension("shard"), comm),
              (std::vector<int64_t>{4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3}));
    EXPECT_EQ(Members(mesh.dimension("replicate"), comm),
              (std::vector<int64_t>{column, column + 4}));
  });
}

TEST(MeshTest, TakesAnyNumberOfDimensions) {
  RunRanks(12, [](Communicator& comm) {
    const Mesh mesh = ValueOrThrow(Mesh::Create(comm, {{"a", 2}, {"b", 3}, {"one", 1}, {"c", 2}}));
    const int a = comm.rank() / 6, b = comm.rank() / 2 % 3, c = comm.rank() % 2;
    EXPECT_EQ(Members(mesh.dimension("a"), comm), (std::vector<int64_t>{2 * b + c, 6 + 2 * b + c}));
    EXPECT_EQ(Members(mesh.dimension("b"), comm),
              (std::vector<int64_t>{6 * a + c, 6 * a + 2 + c, 6 * a + 4 + c}));
    EXPECT_EQ(Members(mesh.dimension("one"), comm), (std::vector<int64_t>{comm.rank()}));
    EXPECT_EQ(Members(mesh.dimension("c"), comm),
              (std::vector<int64_t>{6 * a + 2 * b, 6 * a + 2 * b + 1}));
    EXPECT_EQ(mesh.dimensions().size(), 4);
  });
  RunRanks(1, [](Communicator& comm) {
    EXPECT_EQ(ValueOrThrow(Mesh::Create(comm, {{"all", 1}})).size("all"), 1);
  });
}

std::string ErrorOf(Communicator& comm, std::vector<MeshDimension> dimensions) {
  return Mesh::Create(comm, std::move(dimensions)).status().ToString();
}

TEST(MeshTest, RefusesWhatIsNoMesh) {
  RunRanks(4, [](Communicator& comm) {
    const std::string invalid = "INVALID_ARGUMENT: mesh ";
    EXPECT_EQ(ErrorOf(comm, {}), invalid + "(): no dimensions");
    EXPECT_EQ(ErrorOf(comm, {{"a", 2}, {"", 2}}), invalid + "(a=2, =2): dimension 1 has no name");
    EXPECT_EQ(ErrorOf(comm, {{"a", 2}, {"a", 2}}),
              invalid + "(a=2, a=2): two dimensions have the name a");
    EXPECT_EQ(ErrorOf(comm, {{"a", -2}, {"b", -2}}),
              invalid + "(a=-2, b=-2): dimension a must have 1 rank at least");
    for (int size : {1, 3, 1 << 30}) {
      EXPECT_EQ(ErrorOf(comm, {{"a", size}, {"b", 1 << 30}}),
                invalid + "(a=" + std::to_string(size) +
                    ", b=1073741824): the product of the sizes must be the number of ranks, 4");
    }
    const Mesh mesh = ValueOrThrow(Mesh::Create(comm, {{"a", 2}, {"b", 2}}));
    try {
      mesh.dimension("shard");
      ADD_FAILURE() << "no error";
    } catch (const StatusError& error) {
      EXPECT_STREQ(error.what(), "NOT_FOUND: mesh (a=2, b=2) has no dimension shard");
    }
  });
}

TEST(MeshTest, RanksThatDisagreeAllGetAnError) {
  RunRanks(4, [](Communicator& comm) {
    const bool odd = comm.rank() == 3;
    const std::string start = "FAILED_PRECONDITION: mesh: ranks 0 and 3 gave different dimensions";
    EXPECT_EQ(ErrorOf(comm, {{"a", odd ? 4 : 2}, {"b", odd ? 1 : 2}}).find(start), 0);
    EXPECT_EQ(ErrorOf(comm, {{odd ? "a" : "b", 4}}).find(start), 0);
    EXPECT_EQ(ErrorOf(comm, {{"a", odd ? 0 : 4}}).find(start), 0);
    EXPECT_TRUE(Mesh::Create(comm, {{"a", 4}}).ok());  // nothing is spoiled
  });
}

TEST(MeshTest, OutlivesItsCommunicator) {
  RunRanks(4, [](Communicator& comm) {
    std::optional<Mesh> mesh;
    {
      auto part = ValueOrThrow(comm.Split(0, comm.rank()));
      mesh.emplace(ValueOrThrow(Mesh::Create(*part, {{"a", 2}, {"b", 2}})));
    }
    EXPECT_EQ(Members(mesh->dimension("b"), comm).size(), 2);
  });
}

}  // namespace
}  // namespace lockstep::comm
