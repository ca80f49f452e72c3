#include "lockstep/parallel/ddp/comm_hook.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/counting.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/ddp/half_hook.h"
#include "lockstep/parallel/ddp/powersgd.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::ddp {
namespace {

using comm::testing::RunRanks;

// Parameters whose gradients are whatever the test says: loss = sum(parameter * gradient).
struct ParametersImpl : torch::nn::Module {
  explicit ParametersImpl(const std::vector<std::vector<int64_t>>& shapes,
                          at::ScalarType dtype = at::kDouble) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      all.push_back(register_parameter("p" + std::to_string(i), at::ones(shapes[i], dtype)));
    }
  }
  void Backward(const std::vector<at::Tensor>& gradients) {
    zero_grad();
    at::Tensor loss = at::zeros({}, all[0].options());
    for (size_t i = 0; i < all.size(); ++i) loss = loss + (all[i] * gradients[i]).sum();
    loss.backward();
  }
  std::vector<at::Tensor> all;
};
TORCH_MODULE(Parameters);

at::Tensor Random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::kDouble);
}

// Records what it is asked, and averages.
class RecordingHook : public AllReduceHook {
 public:
  void SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) override {
    AllReduceHook::SetBuckets(buckets, comm);
    layouts.emplace_back();
    for (const Bucket& bucket : buckets) layouts.back().push_back(bucket.indices());
  }
  void Start(size_t bucket) override {
    AllReduceHook::Start(bucket);
    started.push_back(bucket);
  }

  std::vector<std::vector<BucketIndices>> layouts;
  std::vector<size_t> started;
};

TEST(CommHookTest, BucketsFollowTheOrderInWhichRankZeroSawGradients) {
  RunRanks(2, [](comm::Communicator& comm) {
    Parameters model(std::vector<std::vector<int64_t>>{{2}, {2}, {2}});
    auto hook = std::make_shared<RecordingHook>();
    Ddp ddp(model, comm, {.first_bucket_bytes = 1, .bucket_bytes = 1, .comm_hook = hook});
    // A chain: gradients arrive in the order 1, 0, 2 on rank 0 and 0, 1, 2 on rank 1.
    const std::vector<size_t> order =
        comm.rank() == 0 ? std::vector<size_t>{1, 0, 2} : std::vector<size_t>{0, 1, 2};
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      at::Tensor x = at::ones({2}, at::kDouble);
      for (size_t i = order.size(); i-- > 0;) x = x * model->all[order[i]];
      x.sum().backward();
      EXPECT_TRUE(model->all[2].grad().equal(at::ones({2}, at::kDouble)));
    }
    const std::vector<BucketIndices> first = {{2}, {1}, {0}};
    const std::vector<BucketIndices> later = {{1}, {0}, {2}};
    EXPECT_THAT(hook->layouts, ::testing::ElementsAre(first, later));
    EXPECT_THAT(hook->started, ::testing::ElementsAre(0, 1, 2, 0, 1, 2, 0, 1, 2));
  });
}

class HalfHookTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(HalfHookTest, SendsHalfTheBytesAndAveragesTheCastGradients) {
  RunRanks(2, [](comm::Communicator& world) {
    auto counters = std::make_shared<comm::TrafficCounters>();
    comm::CountingCommunicator counting(SplitPrivate(world), counters);
    Parameters model(std::vector<std::vector<int64_t>>{{3, 5}, {7}}, at::kFloat);
    Ddp ddp(model, counting, {.comm_hook = std::make_shared<HalfHook>(GetParam())});
    const auto gradients = [](int rank) {
      return std::vector<at::Tensor>{Random({3, 5}, 2 * rank).to(at::kFloat),
                                     Random({7}, 2 * rank + 1).to(at::kFloat)};
    };
    for (int step = 0; step < 2; ++step) {
      counters->Reset();
      model->Backward(gradients(world.rank()));
      EXPECT_EQ((*counters)[comm::OperationKind::kAllReduce].payload_bytes, 2 * (15 + 7));
      for (size_t i = 0; i < 2; ++i) {
        const auto sent = [&](int rank) {
          return gradients(rank)[i].to(GetParam()).to(at::kFloat);
        };
        const at::Tensor expected = ((sent(0) + sent(1)) / 2).to(GetParam()).to(at::kFloat);
        EXPECT_TRUE(model->all[i].grad().equal(expected));
      }
    }
  });
}

TEST_P(HalfHookTest, DoesNotOverflowWhereTheAverageDoesNot) {
  RunRanks(2, [](comm::Communicator& comm) {
    Parameters model(std::vector<std::vector<int64_t>>{{1}}, at::kFloat);
    Ddp ddp(model, comm, {.comm_hook = std::make_shared<HalfHook>(GetParam())});
    model->Backward({at::full({1}, 60000.0f)});
    EXPECT_NEAR(model->all[0].grad().item<float>(), 60000, 500);
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, HalfHookTest, ::testing::Values(at::kHalf, at::kBFloat16),
                         [](const auto& info) { return c10::toString(info.param); });

TEST(HalfHookTest, RefusesOtherDtypes) { EXPECT_THROW(HalfHook hook(at::kFloat), StatusError); }

// Gradients of two ranks whose mean is a matrix of rank 2.
at::Tensor LowRank(at::IntArrayRef shape, int rank) {
  const int64_t rows = shape[0];
  const int64_t columns = c10::multiply_integers(shape) / rows;
  const at::Tensor mean = Random({rows, 2}, 1).mm(Random({2, columns}, 2));
  const at::Tensor noise = Random({rows, columns}, 3);
  return (rank == 0 ? mean + noise : mean - noise).view(shape);
}

TEST(PowerSgdTest, AMeanOfThatRankIsExact) {
  RunRanks(2, [](comm::Communicator& world) {
    auto counters = std::make_shared<comm::TrafficCounters>();
    comm::CountingCommunicator counting(SplitPrivate(world), counters);
    Parameters model(std::vector<std::vector<int64_t>>{{40, 30}, {50}, {20, 3, 10}, {2, 2}});
    Ddp ddp(model, counting,
            {.comm_hook = std::make_shared<PowerSgd>(
                 PowerSgdOptions{.rank = 2, .start_step = 0, .error_feedback = false})});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor vector = Random({50}, 10 + world.rank());
      const at::Tensor small = Random({2, 2}, 20 + world.rank());
      counters->Reset();
      model->Backward(
          {LowRank({40, 30}, world.rank()), vector, LowRank({20, 3, 10}, world.rank()), small});
      for (const auto& [i, shape] :
           std::vector<std::pair<int, std::vector<int64_t>>>{{0, {40, 30}}, {2, {20, 3, 10}}}) {
        const at::Tensor mean = (LowRank(shape, 0) + LowRank(shape, 1)) / 2;
        EXPECT_TRUE(model->all[i].grad().allclose(mean, /*rtol=*/1e-9, /*atol=*/1e-9))
            << "step " << step << ", parameter " << i;
      }
      EXPECT_TRUE(model->all[1].grad().allclose((Random({50}, 10) + Random({50}, 11)) / 2));
      EXPECT_TRUE(model->all[3].grad().allclose((Random({2, 2}, 20) + Random({2, 2}, 21)) / 2));
      const comm::Traffic sent = (*counters)[comm::OperationKind::kAllReduce];
      EXPECT_EQ(sent.operations, 2);
      EXPECT_EQ(sent.payload_bytes, 8 * (2 * (40 + 30) + 50 + 2 * (20 + 30) + 4));
    }
  });
}

TEST(PowerSgdTest, AMeanOfALowerRankIsExactToo) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    RunRanks(2, [&](comm::Communicator& comm) {
      Parameters model(std::vector<std::vector<int64_t>>{{1, 40, 30}}, dtype);
      Ddp ddp(
          model, comm,
          {.comm_hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 3, .start_step = 0})});
      for (int step = 0; step < 5; ++step) {
        const at::Tensor gradient =
            Random({40, 1}, 2 * step).mm(Random({1, 30}, 2 * step + 1)).view({1, 40, 30}).to(dtype);
        model->Backward({gradient});
        const double tolerance = dtype == at::kFloat ? 1e-4 : 1e-9;
        EXPECT_TRUE(model->all[0].grad().allclose(gradient, tolerance, tolerance))
            << dtype << ", step " << step;
      }
    });
  }
}

// One rank, rank 1: the algorithm by hand.
TEST(PowerSgdTest, FollowsThePaper) {
  RunRanks(1, [](comm::Communicator& comm) {
    Parameters model(std::vector<std::vector<int64_t>>{{30, 20}});
    Ddp ddp(model, comm,
            {.comm_hook = std::make_shared<PowerSgd>(
                 PowerSgdOptions{.rank = 1, .start_step = 0, .seed = 9})});
    at::Tensor q = at::empty({20, 1}, at::kDouble);
    q.normal_(0, 1, at::detail::createCPUGenerator(9));
    at::Tensor error = at::zeros({30, 20}, at::kDouble);
    for (int step = 0; step < 5; ++step) {
      const at::Tensor gradient = Random({30, 20}, step);
      model->Backward({gradient});
      const at::Tensor m = gradient + error;
      at::Tensor p = m.mm(q);
      p = p / p.norm();
      q = m.t().mm(p);
      const at::Tensor approximation = p.mm(q.t());
      error = m - approximation;
      EXPECT_TRUE(model->all[0].grad().allclose(approximation, 1e-10, 1e-10)) << "step " << step;
    }
  });
}

TEST(PowerSgdTest, ErrorFeedbackLosesNothingInTheLongRun) {
  RunRanks(3, [](comm::Communicator& comm) {
    Parameters model(std::vector<std::vector<int64_t>>{{24, 16}});
    Ddp ddp(model, comm,
            {.comm_hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_step = 0})});
    // What has been applied differs from what was meant by the errors kept, which stay bounded.
    const auto gradient = [](int rank) { return Random({24, 16}, 100 + rank); };
    const at::Tensor mean = (gradient(0) + gradient(1) + gradient(2)) / 3;
    at::Tensor applied = at::zeros_like(mean);
    const int steps = 200;
    for (int step = 0; step < steps; ++step) {
      model->Backward({gradient(comm.rank())});
      applied += model->all[0].grad();
    }
    EXPECT_LT((applied / steps - mean).norm().item<double>(), 0.1 * mean.norm().item<double>());
    at::Tensor other = model->all[0].grad().clone();
    ThrowIfError(comm.Broadcast(other, 0).Wait());
    EXPECT_TRUE(other.equal(model->all[0].grad()));
  });
}

TEST(PowerSgdTest, AveragesInFullUntilItStartsAndRecoversFromZeros) {
  RunRanks(2, [](comm::Communicator& comm) {
    Parameters model(std::vector<std::vector<int64_t>>{{40, 30}});
    Ddp ddp(model, comm,
            {.comm_hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_step = 2})});
    const at::Tensor full = (Random({40, 30}, 0) + Random({40, 30}, 1)) / 2;
    for (int step = 0; step < 3; ++step) {
      model->Backward({Random({40, 30}, comm.rank())});
      EXPECT_EQ(model->all[0].grad().allclose(full), step < 2) << step;
    }
  });
  RunRanks(1, [](comm::Communicator& comm) {
    Parameters model(std::vector<std::vector<int64_t>>{{40, 30}});
    Ddp ddp(model, comm,
            {.comm_hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_step = 0})});
    const at::Tensor gradient = Random({40, 2}, 1).mm(Random({2, 30}, 2));
    model->Backward({at::zeros({40, 30}, at::kDouble)});
    EXPECT_EQ(model->all[0].grad().norm().item<double>(), 0);
    model->Backward({gradient});
    EXPECT_TRUE(model->all[0].grad().allclose(gradient, 1e-9, 1e-9));
  });
}

TEST(PowerSgdTest, RefusesNonsense) {
  EXPECT_THROW(PowerSgd hook({.rank = 0}), StatusError);
  EXPECT_THROW(PowerSgd hook({.start_step = -1}), StatusError);
  EXPECT_THROW(PowerSgd hook({.min_compression = 0}), StatusError);
}

TEST(CommHookTest, RanksMustAgreeOnTheHook) {
  RunRanks(2, [](comm::Communicator& comm) {
    Parameters model(std::vector<std::vector<int64_t>>{{2}});
    try {
      Ddp ddp(
          model, comm,
          {.comm_hook = std::make_shared<HalfHook>(comm.rank() == 0 ? at::kHalf : at::kBFloat16)});
      ADD_FAILURE() << "did not throw";
    } catch (const StatusError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 0 has option comm_hook=to Half; rank 1 "
                                                     "has option comm_hook=to BFloat16"));
    }
  });
}

}  // namespace
}  // namespace lockstep::parallel::ddp
