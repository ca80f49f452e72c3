#include "lockstep/comm/mpi/mpi_communicator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
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
#include "lockstep/tools/trace/memory.h"

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
TEST(MpiCommunicatorTest, ReducesLargeTensorsByMessages) {
  const auto comm = World({.shared_memory = false});
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

// Which ranks have their tensors from Communicator::Empty: tensors of several rounds where some do
// not.
class SharedMemoryTest : public ::testing::TestWithParam<std::string> {
 protected:
  // A tensor of `values`.
  at::Tensor Place(const at::Tensor& values) {
    const bool shared = GetParam() == "All" || (GetParam() == "Even" && comm_->rank() % 2 == 0);
    at::Tensor tensor = shared ? comm_->Empty(values.sizes(), values.scalar_type())
                               : at::empty(values.sizes(), values.options());
    return tensor.copy_(values);
  }

  void ExpectDone(const Work& work, const at::Tensor& found, const at::Tensor& expected) {
    const absl::Status status = work.Wait();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(at::equal(found, expected));
  }

  const std::unique_ptr<Communicator> comm_ = World();
};

TEST_P(SharedMemoryTest, CarriesOutEveryCollective) {
  const int n = comm_->size();
  const int rank = comm_->rank();
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte}) {
    for (int64_t count : {4097, 600007}) {
      SCOPED_TRACE(absl::StrCat(count, " of ", c10::toString(dtype)));
      at::Tensor x = Place(Values(rank, count, dtype));
      ExpectDone(comm_->AllReduce(x, ReduceOp::kSum), x, Sum(n, count, dtype));

      at::Tensor blocks = Place(Values(rank, count * n, dtype));
      at::Tensor block = Place(at::zeros({count}, dtype));
      const at::Tensor mine = Sum(n, count * n, dtype).narrow(0, rank * count, count);
      ExpectDone(comm_->ReduceScatterInto(block, blocks, ReduceOp::kSum), block, mine);
      EXPECT_TRUE(at::equal(blocks, Values(rank, count * n, dtype)));
      at::Tensor slice = blocks.narrow(0, rank * count, count);
      ExpectDone(comm_->ReduceScatterInto(slice, blocks, ReduceOp::kSum), slice, mine);

      std::vector<at::Tensor> all;
      for (int i = 0; i < n; ++i) all.push_back(Values(i, count, dtype));
      block.copy_(Values(rank, count, dtype));
      ExpectDone(comm_->AllGatherInto(blocks, block), blocks, at::cat(all));
      blocks.zero_();
      slice.copy_(Values(rank, count, dtype));
      ExpectDone(comm_->AllGatherInto(blocks, slice), blocks, at::cat(all));

      blocks.zero_();
      ExpectDone(comm_->GatherInto(blocks, block, n - 1), blocks,
                 rank == n - 1 ? at::cat(all) : at::zeros({count * n}, dtype));

      at::Tensor in = Place(Values(rank, count * n, dtype));
      for (int i = 0; i < n; ++i) {
        all[i] = Values(i, count * n, dtype).narrow(0, rank * count, count);
      }
      ExpectDone(comm_->AllToAll(blocks, in), blocks, at::cat(all));

      ExpectDone(comm_->Broadcast(block, n - 1), block, Values(n - 1, count, dtype));
      ExpectDone(comm_->Barrier(), block, Values(n - 1, count, dtype));
    }
  }
}

TEST_P(SharedMemoryTest, CarriesOutManyAtOnceOnTwoCommunicators) {
  auto split = comm_->Split(0, -comm_->rank());
  ASSERT_TRUE(split.ok()) << split.status();
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 24; ++i) {
    const int64_t count = i % 3 == 0 ? 700001 : 1 + i;
    tensors.push_back(Place(Values(comm_->rank() + i, count, at::kDouble)));
    Communicator& comm = i % 2 == 0 ? *comm_ : **split;
    works.push_back(comm.AllReduce(tensors.back(), ReduceOp::kMax));
  }
  for (int i = 23; i >= 0; --i) {
    at::Tensor expected = Values(i, tensors[i].numel(), at::kDouble);
    for (int rank = 1; rank < comm_->size(); ++rank) {
      expected = expected.maximum(Values(rank + i, tensors[i].numel(), at::kDouble));
    }
    ExpectDone(works[i], tensors[i], expected);
  }
}

INSTANTIATE_TEST_SUITE_P(MpiCommunicatorTest, SharedMemoryTest,
                         ::testing::Values("None", "Even", "All"),
                         [](const auto& info) { return info.param; });

// Blocks of memory are reused by other tensors once theirs are gone, and counted while they live.
TEST(MpiCommunicatorTest, MemoryOfEmptyIsCountedAndFreed) {
  trace::InstallCountingAllocator();
  const auto comm = World();
  const auto gradients = [] {
    return trace::GetMemory().live_by_category[trace::Index(trace::MemoryCategory::kGradients)];
  };
  const int64_t before = gradients();
  trace::MemoryScope scope(trace::MemoryCategory::kGradients);
  at::Tensor x = comm->Empty({100003}, at::kFloat);
  const void* data = x.data_ptr();
  EXPECT_EQ(gradients() - before, 100003 * 4);
  EXPECT_TRUE(trace::Recategorize(x.storage().data(), trace::MemoryCategory::kBuckets));
  EXPECT_EQ(gradients(), before);
  x = at::Tensor();
  if (comm->size() > 1) {
    x = comm->Empty({100001}, at::kFloat);
    EXPECT_EQ(x.data_ptr(), data);
  }
}

TEST(MpiCommunicatorTest, ReducesManyLargeTensorsAtOnce) {
  const auto comm = World({.shared_memory = false});
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
  for (bool shared : {true, false}) {
    const auto comm = World({.shared_memory = shared, .exchange_bytes = 1});
    for (int64_t count : {100, 100003}) {
      // In bf16, 256 + 1 is 256, but 256 + 1 + 1 + 1 is 259, which rounds to 260.
      at::Tensor x = at::full({count}, comm->rank() == 0 ? 256 : 1, at::kBFloat16);
      ASSERT_TRUE(comm->AllReduce(x, ReduceOp::kSum).Wait().ok());
      const at::Tensor exact = at::full({count}, 255 + comm->size(), at::kFloat).to(at::kBFloat16);
      EXPECT_TRUE(at::equal(x, exact)) << x[0].item<float>();
    }
  }
}

// Nobody waits and no call is made: the thread alone has to do it.
TEST(MpiCommunicatorTest, ProgressesInTheBackground) {
  for (bool shared : {true, false}) {
    const auto comm = World({.shared_memory = shared});
    for (int64_t count : {int64_t{1}, int64_t{1000003}}) {
      at::Tensor x = at::ones({count});
      const Work work = comm->AllReduce(x, ReduceOp::kSum);
      while (!work.IsDone()) absl::SleepFor(absl::Milliseconds(1));
      EXPECT_TRUE(at::equal(x, at::full({count}, comm->size(), at::kFloat)));
    }
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
