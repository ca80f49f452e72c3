// On real GPUs: this process is one rank, with the first that it sees; in the conformance suite its
// threads are up to 4 ranks.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "lockstep/comm/nccl/create.h"
#include "lockstep/comm/nccl/testing/run_gpu_ranks.h"
#include "lockstep/comm/testing/conformance.h"

namespace lockstep::comm::nccl {
namespace {

class NcclGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CountDevices() == 0) GTEST_SKIP() << CheckDevices();
    auto made = Create(launch::World(), Options{.deadline = absl::Minutes(1)});
    ASSERT_TRUE(made.ok()) << made.status();
    comm_ = *std::move(made);
  }

  at::Tensor Full(int64_t count, double value, at::ScalarType dtype = at::kFloat) {
    return at::full({count}, value, at::TensorOptions(dtype).device(comm_->device()));
  }

  static void ExpectAll(const at::Tensor& found, double value) {
    EXPECT_TRUE(found.cpu().to(at::kDouble).equal(at::full(found.sizes(), value, at::kDouble)));
  }

  std::unique_ptr<Communicator> comm_;
};

TEST_F(NcclGpuTest, CarriesOutEveryCollective) {
  for (at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte}) {
    const at::Tensor x = Full(4097, 3, dtype);
    const at::Tensor y = Full(4097, 0, dtype);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      EXPECT_TRUE(comm_->AllReduce(x, op).Wait().ok());
      ExpectAll(x, 3);
    }
    if (c10::isFloatingType(dtype)) {
      EXPECT_TRUE(comm_->AllReduce(x, ReduceOp::kAverage).Wait().ok());
      ExpectAll(x, 3);
    }
    EXPECT_TRUE(comm_->AllGatherInto(y, x).Wait().ok());
    ExpectAll(y, 3);
    EXPECT_TRUE(comm_->ReduceScatterInto(x, Full(4097, 5, dtype), ReduceOp::kSum).Wait().ok());
    ExpectAll(x, 5);
    EXPECT_TRUE(comm_->Broadcast(x, 0).Wait().ok());
    EXPECT_TRUE(comm_->AllToAll(y, x).Wait().ok());
    ExpectAll(y, 5);
    EXPECT_TRUE(comm_->GatherInto(y, Full(4097, 6, dtype), 0).Wait().ok());
    ExpectAll(y, 6);
  }
  EXPECT_TRUE(comm_->Barrier().Wait().ok());
}

TEST_F(NcclGpuTest, OrdersKernelsBeforeAndAfter) {
  const at::Tensor x = Full(1 << 22, 0);
  for (int step = 0; step < 100; ++step) {
    x.add_(1);
    ASSERT_TRUE(comm_->AllReduce(x, ReduceOp::kSum).Wait().ok());
    x.add_(1);
  }
  ExpectAll(x, 200);
}

TEST_F(NcclGpuTest, SplitsSendsAndOutlives) {
  auto part = comm_->Split(3, 0);
  ASSERT_TRUE(part.ok()) << part.status();
  comm_.reset();
  const at::Tensor y = Full(257, 0);
  const Work received = (*part)->Recv(y, 0);
  EXPECT_TRUE((*part)->Send(Full(257, 7), 0).Wait().ok());
  EXPECT_TRUE(received.Wait().ok());
  ExpectAll(y, 7);
}

TEST_F(NcclGpuTest, AbortFailsWhatFollows) {
  comm_->Abort(absl::InternalError("enough"));
  EXPECT_EQ(comm_->Barrier().Wait(), absl::AbortedError("aborted by rank 0: enough"));
}

}  // namespace
}  // namespace lockstep::comm::nccl

namespace lockstep::comm::testing {
namespace {

Backend Gpus(int size) {
  return {.name = "Gpus" + std::to_string(size),
          .run = [size](absl::Duration deadline, const std::function<void(Communicator&)>& body) {
            nccl::testing::RunGpuRanks(size, body, {.deadline = deadline});
          }};
}

std::string NameOf(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

const auto kWorlds = ::testing::Values(Gpus(1), Gpus(2), Gpus(4));

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorConformance, kWorlds, NameOf);
INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorAbortConformance, kWorlds, NameOf);

}  // namespace
}  // namespace lockstep::comm::testing
