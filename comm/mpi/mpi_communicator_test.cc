#include "lockstep/comm/mpi/mpi_communicator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/mpi/adopt.h"
#include "lockstep/comm/mpi/gtest_main.h"

namespace lockstep::comm::mpi {
namespace {

std::unique_ptr<Communicator> World(const Options& options = {}) {
  auto comm = Create(TestWorld(), options);
  EXPECT_TRUE(comm.ok()) << comm.status();
  return comm.ok() ? *std::move(comm) : nullptr;
}

// Integers from 0 to 10, which add exactly in all dtypes.
at::Tensor Values(int rank, int64_t count, at::ScalarType dtype) {
  return ((at::arange(count, at::kLong) + 3 * rank) % 11).to(dtype);
}

at::Tensor Sum(int ranks, int64_t count, at::ScalarType dtype) {
  at::Tensor sum = at::zeros({count}, at::kLong);
  for (int rank = 0; rank < ranks; ++rank) sum += Values(rank, count, at::kLong);
  return sum.to(dtype);
}

// Tensors of many segments, whose last block is shorter than the others.
TEST(MpiCommunicatorTest, ReducesLargeTensors) {
  const auto comm = World();
  const int n = comm->size();
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
    for (int64_t count : {int64_t{(1 << 20) + 1}, int64_t{300007}}) {
      at::Tensor x = Values(comm->rank(), count, dtype);
      ASSERT_TRUE(comm->AllReduce(x, ReduceOp::kSum).Wait().ok());
      EXPECT_TRUE(at::equal(x, Sum(n, count, dtype)));

      at::Tensor in = Values(comm->rank(), count * n, dtype);
      at::Tensor out = at::zeros({count}, dtype);
      ASSERT_TRUE(comm->ReduceScatterInto(out, in, ReduceOp::kSum).Wait().ok());
      const at::Tensor expected = Sum(n, count * n, dtype).narrow(0, comm->rank() * count, count);
      EXPECT_TRUE(at::equal(out, expected));
      EXPECT_TRUE(at::equal(in, Values(comm->rank(), count * n, dtype)));

      at::Tensor slice = in.narrow(0, comm->rank() * count, count);
      ASSERT_TRUE(comm->ReduceScatterInto(slice, in, ReduceOp::kSum).Wait().ok());
      EXPECT_TRUE(at::equal(slice, expected));
    }
  }
}

TEST(MpiCommunicatorTest, ReducesManyLargeTensorsAtOnce) {
  const auto comm = World();
  const int64_t count = 100003;
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 12; ++i) {
    tensors.push_back(Values(comm->rank() + i, count, at::kDouble));
    works.push_back(comm->AllReduce(tensors.back(), ReduceOp::kMax));
  }
  for (int i = 11; i >= 0; --i) {
    ASSERT_TRUE(works[i].Wait().ok());
    at::Tensor expected = Values(i, count, at::kDouble);
    for (int rank = 1; rank < comm->size(); ++rank) {
      expected = expected.maximum(Values(rank + i, count, at::kDouble));
    }
    EXPECT_TRUE(at::equal(tensors[i], expected));
  }
}

TEST(MpiCommunicatorTest, HalfPrecisionIsCombinedInSinglePrecision) {
  const auto comm = World({.exchange_bytes = 1});
  // In bf16, 256 + 1 is 256, but 256 + 1 + 1 + 1 is 259, which rounds to 260.
  at::Tensor x = at::full({100}, comm->rank() == 0 ? 256 : 1, at::kBFloat16);
  ASSERT_TRUE(comm->AllReduce(x, ReduceOp::kSum).Wait().ok());
  const at::Tensor exact = at::full({100}, 255 + comm->size(), at::kFloat).to(at::kBFloat16);
  EXPECT_TRUE(at::equal(x, exact)) << x[0].item<float>();
}

// Nobody waits and no call is made: the thread alone has to do it.
TEST(MpiCommunicatorTest, ProgressesInTheBackground) {
  const auto comm = World();
  for (int64_t count : {int64_t{1}, int64_t{1000003}}) {
    at::Tensor x = at::ones({count});
    const Work work = comm->AllReduce(x, ReduceOp::kSum);
    while (!work.IsDone()) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_TRUE(at::equal(x, at::full({count}, comm->size(), at::kFloat)));
  }
}

TEST(MpiCommunicatorTest, AdoptsAndLeavesTheCommunicatorAlone) {
  const auto first = World();  // initializes MPI
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -TestWorld().rank, &reversed);
  {
    auto comm = Adopt(reversed);
    ASSERT_TRUE(comm.ok()) << comm.status();
    EXPECT_EQ((*comm)->rank(), TestWorld().size - 1 - TestWorld().rank);
    at::Tensor x = at::full({5}, (*comm)->rank(), at::kInt);
    ASSERT_TRUE((*comm)->Broadcast(x, 0).Wait().ok());
    EXPECT_TRUE(at::equal(x, at::zeros({5}, at::kInt)));
  }
  int sum = 1;
  EXPECT_EQ(MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, reversed), MPI_SUCCESS);
  EXPECT_EQ(sum, TestWorld().size);
  MPI_Comm_free(&reversed);
}

TEST(MpiCommunicatorTest, WorksOutliveTheCommunicator) {
  auto comm = World();
  at::Tensor x = at::ones({100003});
  const Work work = comm->AllReduce(x, ReduceOp::kSum);
  comm.reset();
  ASSERT_TRUE(work.Wait().ok());
  EXPECT_TRUE(at::equal(x, at::full({100003}, TestWorld().size, at::kFloat)));
}

std::string ErrorOf(launch::World world, const Options& options = {}) {
  auto comm = Create(world, options);
  return comm.ok() ? "OK" : comm.status().ToString();
}

TEST(MpiCommunicatorTest, RefusesAWorldWithoutMpi) {
  launch::World world = TestWorld();
  world.launcher = launch::Launcher::kTorchrun;
  EXPECT_EQ(
      ErrorOf(world),
      "FAILED_PRECONDITION: ranks started by torchrun-style variables have no MPI, which "
      "would come up as rank 0 of 1 in each: start them with mpirun, or with srun --mpi=pmix");
}

TEST(MpiCommunicatorTest, RefusesAWorldThatDiffersFromMpis) {
  launch::World world = TestWorld();
  world.size += 3;
  EXPECT_EQ(ErrorOf(world),
            absl::StrCat("FAILED_PRECONDITION: MPI came up as rank ", TestWorld().rank, " of ",
                         TestWorld().size, ", but this is rank ", TestWorld().rank, " of ",
                         TestWorld().size + 3,
                         " by mpirun: is the mpirun or srun that started it "
                         "that of the MPI it is linked with?"));
}

TEST(MpiCommunicatorTest, RefusesImpossibleOptions) {
  EXPECT_EQ(ErrorOf(TestWorld(), {.max_elements_per_call = 0}),
            "INVALID_ARGUMENT: Options::max_elements_per_call is 0: it must be from 1 to 2^31 - 1");
}

}  // namespace
}  // namespace lockstep::comm::mpi
