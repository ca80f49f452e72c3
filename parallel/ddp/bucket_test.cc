#include "lockstep/parallel/ddp/bucket.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "lockstep/comm/testing/run_ranks.h"

namespace lockstep::parallel::ddp {
namespace {

std::vector<at::Tensor> Floats(const std::vector<int64_t>& numels) {
  std::vector<at::Tensor> tensors;
  for (int64_t numel : numels) tensors.push_back(at::empty({numel}));
  return tensors;
}

using Buckets = std::vector<BucketIndices>;

TEST(AssignBucketsTest, ClosesABucketAtItsLimit) {
  const auto parameters = Floats({10, 10, 10, 10, 10});
  EXPECT_EQ(AssignBuckets(parameters, {4, 3, 2, 1, 0}, {40, 80}), (Buckets{{4}, {3, 2}, {1, 0}}));
  EXPECT_EQ(AssignBuckets(parameters, {4, 3, 2, 1, 0}, {1, 1000}), (Buckets{{4}, {3, 2, 1, 0}}));
  EXPECT_EQ(AssignBuckets(parameters, {0, 1, 2, 3, 4}, {60}), (Buckets{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(AssignBuckets({}, {}, {60}), Buckets());
}

TEST(AssignBucketsTest, OneParameterMayExceedTheLimit) {
  EXPECT_EQ(AssignBuckets(Floats({1, 1000, 1}), {0, 1, 2}, {8}), (Buckets{{0, 1}, {2}}));
}

TEST(AssignBucketsTest, NeverMixesDtypes) {
  std::vector<at::Tensor> parameters = Floats({10, 10, 10, 10});
  parameters[1] = parameters[1].to(at::kDouble);
  parameters[2] = parameters[2].to(at::kDouble);
  EXPECT_EQ(AssignBuckets(parameters, {3, 2, 1, 0}, {1000}), (Buckets{{3, 0}, {2, 1}}));
}

TEST(BucketTest, ViewsHaveTheParametersShapes) {
  comm::testing::RunRanks(1, [](comm::Communicator& comm) {
    const std::vector<at::Tensor> parameters = {at::empty({2, 3}), at::empty({}), at::empty({4})};
    const Bucket bucket(parameters, {2, 0, 1}, comm);
    EXPECT_EQ(bucket.flat().numel(), 11);
    EXPECT_EQ(bucket.view(1).sizes(), at::IntArrayRef({2, 3}));
    EXPECT_EQ(bucket.view(1).const_data_ptr(), bucket.flat().narrow(0, 4, 6).const_data_ptr());
    EXPECT_EQ(bucket.view(2).dim(), 0);
    EXPECT_FALSE(bucket.view(1).is_view());  // to autograd
  });
}

TEST(BucketTest, ViewsHaveTheParametersStridesWhereTheseLeaveNoGaps) {
  comm::testing::RunRanks(1, [](comm::Communicator& comm) {
    const std::vector<at::Tensor> parameters = {
        at::empty({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
        at::empty({5, 4}).t(),
        at::empty({6, 4}).narrow(1, 0, 2),
    };
    const Bucket bucket(parameters, {0, 1, 2}, comm);
    EXPECT_EQ(bucket.view(0).strides(), parameters[0].strides());
    EXPECT_EQ(bucket.view(1).strides(), parameters[1].strides());
    EXPECT_TRUE(bucket.view(2).is_contiguous());
    EXPECT_EQ(bucket.view(2).const_data_ptr(), bucket.flat().narrow(0, 140, 12).const_data_ptr());
  });
}

}  // namespace
}  // namespace lockstep::parallel::ddp
