// Training here follows what PyTorch's own DDP and FSDP2 did: generate.py recorded it.

#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/models/classifier.h"
#include "lockstep/models/testing/uniform.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/optim/fused_sgd.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {
namespace {

constexpr double kTolerance = 1e-9;

using MakeStrategyOf = std::function<std::unique_ptr<Strategy>(std::shared_ptr<torch::nn::Module>,
                                                               comm::Communicator*)>;

nlohmann::json Golden(const std::string& file, const std::string& model) {
  std::ifstream stream("parallel/testing/golden/" + file + ".json");
  return nlohmann::json::parse(stream).at(model);
}

models::Classifier MakeModel(const std::string& name) {
  torch::manual_seed(0);
  models::Classifier model = ValueOrThrow(models::Create(name));
  model.module->to(at::kDouble);
  return model;
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const nlohmann::json& golden,
                                                       const Strategy& strategy) {
  const double lr = golden["lr"];
  const double weight_decay = golden["weight_decay"];
  if (golden["optimizer"] == "sgd") {
    return std::make_unique<optim::FusedSgd>(
        strategy.named_parameters(),
        optim::FusedSgdOptions{
            .lr = lr, .momentum = golden["momentum"], .weight_decay = weight_decay});
  }
  return std::make_unique<optim::FusedAdamW>(
      strategy.named_parameters(),
      optim::FusedAdamWOptions{.lr = lr, .weight_decay = weight_decay});
}

void ExpectNear(double found, double expected, double scale, const std::string& what) {
  EXPECT_NEAR(found, expected, kTolerance * scale) << what;
}

// Trains as rank `rank`, or, where `all` says so, on the batches of all ranks as one, and follows
// the recorded losses; at the end the parameters are the recorded ones.
void Follow(const nlohmann::json& golden, models::Classifier& model, Strategy& strategy, int rank,
            bool all, const std::string& what) {
  const auto optimizer = MakeOptimizer(golden, strategy);
  const int ranks = golden["ranks"];
  const int64_t batch = golden["batch"];
  const auto& losses = golden["losses"];
  for (size_t step = 0; step < losses.size(); ++step) {
    std::vector<at::Tensor> images;
    std::vector<at::Tensor> labels;
    double expected = 0;
    for (int each = all ? 0 : rank; each < (all ? ranks : rank + 1); ++each) {
      const auto stream = 2 * (static_cast<uint32_t>(step) * ranks + each);
      images.push_back(models::testing::Uniform(stream, {batch, 1, 28, 28}));
      labels.push_back((models::testing::Uniform(stream + 1, {batch}) * 10).to(at::kLong));
      expected += losses[step][each].get<double>() / (all ? ranks : 1);
    }
    optimizer->zero_grad();
    const at::Tensor loss = at::cross_entropy_loss(model.forward(at::cat(images)), at::cat(labels));
    loss.backward();
    strategy.FinishBackward();
    optimizer->step();
    ExpectNear(loss.item<double>(), expected, std::abs(expected),
               what + ", loss of step " + std::to_string(step));
  }
  size_t count = 0;
  strategy.VisitState([&](const std::string& name, const at::Tensor& full) {
    ++count;
    ASSERT_TRUE(golden["parameters"].contains(name)) << what << ": " << name;
    const auto& recorded = golden["parameters"][name];
    const double norm = recorded[1];
    ExpectNear(at::linalg_vector_norm(full, 2).item<double>(), norm, norm, what + ", " + name);
    // A sum of n elements of this norm is up to sqrt(n) times as large.
    ExpectNear(full.sum().item<double>(), recorded[0],
               norm * std::sqrt(static_cast<double>(full.numel())), what + ", sum of " + name);
  });
  EXPECT_EQ(count, golden["parameters"].size()) << what;
}

class GoldenTest : public ::testing::TestWithParam<const char*> {
 protected:
  // Follows the file with ranks that are threads.
  void FollowOnThreads(const std::string& file, const std::string& what,
                       const MakeStrategyOf& make) const {
    const nlohmann::json golden = Golden(file, GetParam());
    const int ranks = golden["ranks"];
    std::vector<models::Classifier> models;
    for (int rank = 0; rank < ranks; ++rank) models.push_back(MakeModel(GetParam()));
    comm::testing::RunRanks(ranks, [&](comm::Communicator& comm) {
      models::Classifier& model = models[comm.rank()];
      const auto strategy = make(model.module, &comm);
      Follow(golden, model, *strategy, comm.rank(), /*all=*/false,
             what + " on rank " + std::to_string(comm.rank()));
    });
  }
};

TEST_P(GoldenTest, OneProcessFollowsPyTorchsDdp) {
  const nlohmann::json golden = Golden("ddp", GetParam());
  models::Classifier model = MakeModel(GetParam());
  None none(model.module);
  Follow(golden, model, none, /*rank=*/0, /*all=*/true, "none");
}

TEST_P(GoldenTest, StrategiesFollowPyTorchsDdp) {
  for (const char* name : {"manual", "ddp"}) {
    FollowOnThreads("ddp", name, [&](std::shared_ptr<torch::nn::Module> model, auto* comm) {
      return ValueOrThrow(MakeStrategy(name, std::move(model), comm));
    });
  }
  FollowOnThreads(
      "ddp", "ddp in small buckets", [](std::shared_ptr<torch::nn::Module> model, auto* comm) {
        return std::make_unique<Ddp>(std::move(model), *comm,
                                     DdpOptions{.first_bucket_bytes = 1, .bucket_bytes = 100'000});
      });
}

TEST_P(GoldenTest, FsdpFollowsPyTorchsFsdp2) {
  for (const char* name : {"fsdp", "zero2", "zero1"}) {
    FollowOnThreads("fsdp2", name, [&](std::shared_ptr<torch::nn::Module> model, auto* comm) {
      return ValueOrThrow(MakeStrategy(name, std::move(model), comm));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest, ::testing::Values("mlp", "convnet", "vit"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace lockstep::parallel::testing
