#include "lockstep/parallel/ddp/buffer_sync.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>

#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/ddp/ddp.h"

namespace lockstep::parallel::ddp {
namespace {

using comm::testing::RunRanks;

TEST(BufferSyncTest, CopiesAnyDtypeAndStrides) {
  RunRanks(3, [](comm::Communicator& comm) {
    const int rank = comm.rank();
    std::vector<at::Tensor> buffers;
    for (at::ScalarType dtype :
         {at::kBool, at::kChar, at::kLong, at::kDouble, at::kComplexDouble, at::kHalf}) {
      buffers.push_back(at::full({5}, rank == 1 ? 1 : 0, dtype));
    }
    buffers.push_back(at::full({}, rank, at::kInt));
    buffers.push_back(at::empty({0}));
    buffers.push_back((at::arange(6) * rank).view({2, 3}).t());
    BufferSync sync(buffers, comm);
    sync.Start(/*root=*/1);
    sync.Finish();
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_TRUE(buffers[i].equal(at::full({5}, 1, buffers[i].options()))) << buffers[i];
    }
    EXPECT_EQ(buffers[6].item<int>(), 1);
    EXPECT_TRUE(buffers[8].equal(at::arange(6).view({2, 3}).t()));
  });
}

TEST(BufferSyncTest, EveryForwardBeginsWithRankZerosBuffers) {
  for (const bool broadcast : {true, false}) {
    RunRanks(2, [&](comm::Communicator& comm) {
      torch::nn::BatchNorm1d norm(2);
      Ddp ddp(norm, comm, {.broadcast_buffers = broadcast});
      for (int step = 0; step < 2; ++step) {
        // Two graphs at once: the buffers of the second must not count as modified.
        at::Tensor first = norm(at::arange(4, at::kFloat).view({2, 2}) * (comm.rank() + 1));
        at::Tensor second = norm(at::arange(4, at::kFloat).view({2, 2}));
        first.sum().backward();
        second.sum().backward();
      }
      at::Tensor other = norm->running_mean.clone();
      ASSERT_TRUE(comm.Broadcast(other, 0).Wait().ok());
      EXPECT_EQ(other.equal(norm->running_mean), broadcast || comm.rank() == 0);
      EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 4);
    });
  }
}

}  // namespace
}  // namespace lockstep::parallel::ddp
