#include "lockstep/parallel/ddp/join.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

using comm::testing::RunRanks;

std::vector<torch::nn::Linear> MakeLayers(int size) {
  std::vector<torch::nn::Linear> layers;
  for (int rank = 0; rank < size; ++rank) layers.emplace_back(torch::nn::LinearOptions(1, 1));
  return layers;
}

// Ranks run 3, 1, 2 batches; gradients of the weight are rank + 1.
TEST(JoinTest, RanksWithoutBatchesCountAsZeroOrNotAtAll) {
  const std::vector<int> batches = {3, 1, 2};
  for (const bool divide_by_active : {false, true}) {
    std::vector<torch::nn::Linear> layers = MakeLayers(3);
    RunRanks(3, [&](comm::Communicator& comm) {
      torch::nn::Linear& layer = layers[comm.rank()];
      Ddp ddp(layer, comm);
      auto join =
          std::make_unique<Join>(ddp, JoinOptions{.divide_by_active_ranks = divide_by_active});
      const std::vector<double> sums = {1 + 2 + 3, 1 + 3, 1};
      for (int step = 0; step < batches[comm.rank()]; ++step) {
        layer->zero_grad();
        layer(at::full({1, 1}, comm.rank() + 1.0f)).backward();
        EXPECT_FLOAT_EQ(layer->weight.grad().item<float>(),
                        sums[step] / (divide_by_active ? 3 - step : 3));
      }
      join->Finish();
      join.reset();
      layer(at::ones({1, 1})).backward();  // of all ranks, and by itself
      EXPECT_EQ(ddp.last_step().collectives, 1);
    });
  }
}

TEST(JoinTest, AllEndWithTheModelOfARankThatTookTheLastStep) {
  const std::vector<int> batches = {1, 4, 0, 4};
  std::vector<torch::nn::Sequential> models;
  for (int rank = 0; rank < 4; ++rank) {
    models.emplace_back(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  }
  std::vector<at::Tensor> weights(4), means(4);
  RunRanks(4, [&](comm::Communicator& comm) {
    torch::nn::Sequential& model = models[comm.rank()];
    Ddp ddp(model, comm, {.bucket_bytes = 1});
    at::NoGradGuard no_grad;
    Join join(ddp);
    for (int step = 0; step < batches[comm.rank()]; ++step) {
      model->zero_grad();
      {
        at::AutoGradMode enable(true);
        model->forward(at::ones({2, 2}) * (comm.rank() + step)).square().sum().backward();
      }
      for (at::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.1);
      if (comm.rank() == 1) {
        weights[1] = model->named_parameters()["0.weight"].clone();
        means[1] = model->named_buffers()["1.running_mean"].clone();
      }
    }
    join.Finish();
    weights[comm.rank()] = model->named_parameters()["0.weight"].clone();
    means[comm.rank()] = model->named_buffers()["1.running_mean"].clone();
  });
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(weights[rank].equal(weights[1])) << rank;
    EXPECT_TRUE(means[rank].equal(means[1])) << rank;
  }
  EXPECT_GT(means[1].abs().sum().item<float>(), 0);
}

TEST(JoinTest, WorksWithEveryOption) {
  for (const DdpOptions& options :
       {DdpOptions{.find_unused_parameters = true}, DdpOptions{.static_graph = true},
        DdpOptions{.first_bucket_bytes = 1}}) {
    std::vector<torch::nn::Linear> layers = MakeLayers(2);
    RunRanks(2, [&](comm::Communicator& comm) {
      torch::nn::Linear& layer = layers[comm.rank()];
      Ddp ddp(layer, comm, options);
      layer(at::ones({1, 1})).backward();        // static_graph learns from it
      for (int epoch = 0; epoch < 2; ++epoch) {  // one Join after the other
        Join join(ddp);
        for (int step = 0; step < (comm.rank() == epoch ? 0 : 3); ++step) {
          layer->zero_grad();
          {
            auto no_sync = ddp.NoSync();
            layer(at::ones({1, 1})).backward();
          }
          layer(at::ones({1, 1})).backward();
          EXPECT_FLOAT_EQ(layer->weight.grad().item<float>(), 1);  // (2 + 0) / 2
        }
        join.Finish();
      }
    });
  }
}

TEST(JoinTest, WithoutItARankThatRunsOutOfBatchesIsAnError) {
  std::vector<torch::nn::Linear> layers = MakeLayers(2);
  RunRanks(2, [&](comm::Communicator& comm) {
    Ddp ddp(layers[comm.rank()], comm);
    try {
      for (int step = 0; step < 3 - comm.rank(); ++step) {
        layers[comm.rank()](at::ones({1, 1})).backward();
      }
      EXPECT_EQ(comm.rank(), 1);
    } catch (const StatusError& error) {
      EXPECT_EQ(comm.rank(), 0);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1 has left the communicator"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("see join in parallel/ddp"));
    }
  });
}

TEST(JoinTest, StaticGraphNeedsAFirstBackwardOfAllRanks) {
  std::vector<torch::nn::Linear> layers = MakeLayers(2);
  RunRanks(2, [&](comm::Communicator& comm) {
    Ddp ddp(layers[comm.rank()], comm, {.static_graph = true});
    Join join(ddp);
    try {
      if (comm.rank() == 0) layers[0](at::ones({1, 1})).backward();
      join.Finish();
      ADD_FAILURE() << "did not throw";
    } catch (const StatusError& error) {
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("with static_graph the first backward must be one of all"));
    }
  });
}

TEST(JoinTest, OneAtATime) {
  RunRanks(1, [](comm::Communicator& comm) {
    torch::nn::Linear layer(1, 1);
    Ddp ddp(layer, comm);
    Join join(ddp);
    EXPECT_THROW(Join second(ddp), StatusError);
  });
}

}  // namespace
}  // namespace lockstep::parallel
