#include "lockstep/parallel/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/optim/fused_sgd.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

using comm::testing::RunRanks;
using testing::MakeNets;
using testing::OddNet;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How a training is done.
struct Way {
  bool scaled = true;
  bool fused = false;
  double clip_norm = 0;  // 0: no clipping
  // Called before the step, with its number and whatever there is to spoil.
  std::function<void(int step, Strategy& strategy)> spoil = [](int, Strategy&) {};
  std::function<bool(int step)> left_out = [](int) { return false; };  // without scaling
  GradScalerOptions options = {.growth_interval = 2};
};

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const Way& way, Strategy& strategy) {
  if (way.fused) {
    return std::make_unique<optim::FusedAdamW>(strategy.named_parameters(),
                                               optim::FusedAdamWOptions{.lr = 1e-2});
  }
  return std::make_unique<torch::optim::AdamW>(strategy.parameters(),
                                               torch::optim::AdamWOptions(1e-2));
}

// Six steps; the state at the end, the losses and the scale after each.
struct Result {
  std::map<std::string, at::Tensor> state;
  std::vector<double> losses, scales;
};

Result Train(const Way& way, OddNet net, Strategy& strategy, int rank) {
  const auto optimizer = MakeOptimizer(way, strategy);
  GradScaler scaler(strategy, way.options);
  Result result;
  for (int step = 0; step < 6; ++step) {
    optimizer->zero_grad();
    const at::Tensor x = at::sin(at::arange(3 * 17, at::kDouble) * (1.1 + step + 0.3 * rank));
    const at::Tensor loss = net(x.view({3, 17})).square().mean();
    (way.scaled ? scaler.Scale(loss) : loss).backward();
    strategy.FinishBackward();
    way.spoil(step, strategy);
    if (way.scaled) {
      if (way.clip_norm > 0) scaler.Unscale(*optimizer);
      if (way.clip_norm > 0) strategy.ClipGradNorm(way.clip_norm);
      EXPECT_NE(scaler.Step(*optimizer), way.left_out(step));
      scaler.Update();
    } else if (!way.left_out(step)) {
      if (way.clip_norm > 0) strategy.ClipGradNorm(way.clip_norm);
      optimizer->step();
    }
    result.losses.push_back(loss.item<double>());
    result.scales.push_back(scaler.scale());
  }
  strategy.VisitState([&](const std::string& name, const at::Tensor& full) {
    result.state[name] = full.detach().clone();
  });
  return result;
}

void ExpectSame(const Result& found, const Result& expected, const std::string& what) {
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-12) << what << ", loss " << i;
  }
  for (const auto& [name, value] : expected.state) {
    EXPECT_LE((found.state.at(name) - value).abs().max().item<double>(), 1e-12) << what << name;
  }
}

// Trains with and without scaling, the same on `size` ranks of each strategy.
void ExpectEqualToUnscaled(const Way& way, int size, const std::vector<double>& scales) {
  for (const std::string name : {"none", "manual", "ddp", "fsdp"}) {
    const int ranks = name == "none" ? 1 : size;
    std::vector<OddNet> nets[2] = {MakeNets(ranks), MakeNets(ranks)};
    for (auto& some : nets) {
      for (OddNet& net : some) net->to(at::kDouble);
    }
    RunRanks(ranks, [&](comm::Communicator& comm) {
      Result results[2];
      for (bool scaled : {false, true}) {
        const OddNet& net = nets[scaled][comm.rank()];
        auto strategy = ValueOrThrow(MakeStrategy(name, net.ptr(), &comm));
        Way this_way = way;
        this_way.scaled = scaled;
        results[scaled] = Train(this_way, net, *strategy, comm.rank());
      }
      const std::string what = name + ", rank " + std::to_string(comm.rank()) + ": ";
      ExpectSame(results[1], results[0], what);
      EXPECT_EQ(results[1].scales, scales) << what;
    });
  }
}

const std::vector<double> kGrowing = {65536, 131072, 131072, 262144, 262144, 524288};

TEST(GradScalerTest, EqualsTrainingWithoutWhereNothingOverflows) {
  for (bool fused : {false, true}) {
    for (double clip_norm : {0.0, 0.3}) {
      ExpectEqualToUnscaled({.fused = fused, .clip_norm = clip_norm}, /*size=*/3, kGrowing);
    }
  }
}

TEST(GradScalerTest, AnOverflowLeavesOutTheStep) {
  for (bool fused : {false, true}) {
    Way way = {.fused = fused};
    way.left_out = [](int step) { return step == 1 || step == 2; };
    way.spoil = [&](int step, Strategy& strategy) {
      if (!way.left_out(step)) return;
      for (const at::Tensor& parameter : strategy.parameters()) {
        if (parameter.numel() == 0) continue;
        parameter.grad().view({-1})[0].fill_(step == 1 ? kInfinity : std::nan(""));
        break;
      }
    };
    ExpectEqualToUnscaled(way, /*size=*/2, {65536, 32768, 16384, 16384, 32768, 32768});
  }
}

TEST(GradScalerTest, RanksOfFsdpAgreeOnWhatOneOfThemSees) {
  for (int culprit : {0, 1, 2}) {
    std::vector<OddNet> nets = MakeNets(3);
    RunRanks(3, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      auto fsdp = ValueOrThrow(MakeStrategy("fsdp", net.ptr(), &comm));
      optim::FusedSgd optimizer(fsdp->named_parameters(), {.lr = 0.1});
      GradScaler scaler(*fsdp);
      std::vector<at::Tensor> before;
      for (const at::Tensor& slice : fsdp->parameters()) before.push_back(slice.detach().clone());
      scaler.Scale(net(at::full({2, 17}, 0.3)).square().sum()).backward();
      if (comm.rank() == culprit) {
        for (const at::Tensor& slice : fsdp->parameters()) {
          if (slice.numel() > 0) slice.grad()[0].fill_(-kInfinity);
        }
      }
      EXPECT_FALSE(scaler.Step(optimizer));
      scaler.Update();
      EXPECT_EQ(scaler.scale(), 32768);
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(fsdp->parameters()[i].equal(before[i]));
      }
    });
  }
}

TEST(GradScalerTest, AnOverflowInOneRanksLossReachesAll) {
  for (const std::string name : {"manual", "ddp", "fsdp"}) {
    std::vector<OddNet> nets = MakeNets(2);
    RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      auto strategy = ValueOrThrow(MakeStrategy(name, net.ptr(), &comm));
      optim::FusedSgd optimizer(strategy->named_parameters(), {.lr = 0.1});
      GradScaler scaler(*strategy);
      const at::Tensor loss = net(at::full({2, 17}, 0.3)).square().sum();
      (scaler.Scale(loss) * (comm.rank() == 1 ? kInfinity : 1)).backward();
      strategy->FinishBackward();
      scaler.Unscale(optimizer);
      EXPECT_FALSE(scaler.Step(optimizer));
      scaler.Update();
      EXPECT_EQ(scaler.scale(), 32768);
    });
  }
}

// One parameter, whose gradient is the loss' factor.
struct Single {
  explicit Single(at::ScalarType dtype) : module(std::make_shared<torch::nn::Module>()) {
    parameter = module->register_parameter("weight", at::zeros({1}, dtype));
  }
  std::shared_ptr<torch::nn::Module> module;
  at::Tensor parameter;
};

TEST(GradScalerTest, KeepsGradientsThatF16CannotHold) {
  for (bool scaled : {false, true}) {
    Single single(at::kHalf);
    None none(single.module);
    optim::FusedSgd optimizer(none.named_parameters(), {.lr = 1e6});
    GradScaler scaler(none);
    const at::Tensor loss = single.parameter.to(at::kFloat).sum() * 1e-8;
    (scaled ? scaler.Scale(loss) : loss).backward();
    if (scaled) {
      EXPECT_THROW(scaler.Unscale(optimizer), c10::Error);
      EXPECT_TRUE(scaler.Step(optimizer));
    } else {
      optimizer.step();
    }
    EXPECT_NEAR(single.parameter.item<float>(), scaled ? -0.01 : 0, 1e-4);
    // Later steps that go around the scaler are not divided.
    single.parameter.mutable_grad().fill_(1e-6);
    optimizer.step();
    EXPECT_NEAR(single.parameter.item<float>(), scaled ? -1.01 : -1, 0.07);
  }
}

TEST(GradScalerTest, BacksOffAndGrowsAsTorchDoes) {
  Single single(at::kFloat);
  None none(single.module);
  optim::FusedSgd optimizer(none.named_parameters(), {.lr = 0.1});
  GradScaler scaler(
      none, {.init_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  std::vector<double> scales;
  for (const bool finite : {true, true, false, true, true, true, true, false, false}) {
    optimizer.zero_grad();
    scaler.Scale(single.parameter.sum() * (finite ? 1 : kInfinity)).backward();
    EXPECT_EQ(scaler.Step(optimizer), finite);
    scaler.Update();
    scales.push_back(scaler.scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 8, 2, 2, 2, 8, 8, 2, 0.5}));
}

TEST(GradScalerTest, TheScaleStaysInF32) {
  Single single(at::kFloat);
  None none(single.module);
  optim::FusedSgd optimizer(none.named_parameters(), {.lr = 0.1});
  GradScaler scaler(none, {.init_scale = std::ldexp(1, 126), .growth_interval = 1});
  for (int step = 0; step < 3; ++step) {
    single.parameter.mutable_grad() = at::zeros({1});
    EXPECT_TRUE(scaler.Step(optimizer));
    scaler.Update();
  }
  EXPECT_EQ(scaler.scale(), std::ldexp(1, 127));
  int left_out = 0;
  try {
    for (; left_out < 400; ++left_out) {
      single.parameter.mutable_grad() = at::full({1}, std::nan(""));
      EXPECT_FALSE(scaler.Step(optimizer));
      scaler.Update();
    }
    ADD_FAILURE() << "goes on for ever";
  } catch (const StatusError& error) {
    EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(left_out, 127 + 126);
  }
}

TEST(GradScalerTest, OptimizersAreLeftOutEachForItself) {
  auto module = std::make_shared<torch::nn::Module>();
  module->register_parameter("a", at::zeros({1}));
  module->register_parameter("b", at::zeros({1}));
  None none(module);
  const auto parameters = none.named_parameters();
  optim::FusedSgd a({parameters[0]}, {.lr = 1}), b({parameters[1]}, {.lr = 1});
  GradScaler scaler(none);
  scaler.Scale(parameters[0].tensor.sum() + kInfinity * parameters[1].tensor.sum()).backward();
  scaler.Unscale(b);
  EXPECT_TRUE(scaler.Step(a));
  EXPECT_FALSE(scaler.Step(b));
  scaler.Update();
  EXPECT_EQ(parameters[0].tensor.item<float>(), -1);
  EXPECT_EQ(parameters[1].tensor.item<float>(), 0);
  EXPECT_EQ(scaler.scale(), 32768);
}

TEST(GradScalerTest, StateGoesOnWhereItWas) {
  Single single(at::kFloat);
  None none(single.module);
  optim::FusedSgd optimizer(none.named_parameters(), {.lr = 0.1});
  const auto step = [&](GradScaler& scaler, double gradient) {
    single.parameter.mutable_grad() = at::full({1}, gradient);
    scaler.Step(optimizer);
    scaler.Update();
  };
  GradScaler scaler(none, {.growth_interval = 3});
  step(scaler, kInfinity);
  step(scaler, 1);
  step(scaler, 1);
  GradScaler loaded(none, {.init_scale = 1, .growth_interval = 3});
  ASSERT_TRUE(loaded.LoadState(scaler.SaveState()).ok());
  EXPECT_EQ(loaded.scale(), 32768);
  step(loaded, 1);
  EXPECT_EQ(loaded.scale(), 65536);
  for (const char* bad :
       {"", "12", "{}", R"({"scale": 0, "growth": 0})", R"({"scale": 1})",
        R"({"scale": 1, "growth": -1})", R"({"scale": 1, "growth": 9223372036854775808})",
        R"({"scale": 1e99, "growth": 0})", R"({"scale": 1, "growth": 0, "more": 1})"}) {
    EXPECT_EQ(loaded.LoadState(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(loaded.scale(), 65536);
}

TEST(GradScalerTest, RefusesMisuse) {
  Single single(at::kFloat);
  None none(single.module);
  optim::FusedSgd optimizer(none.named_parameters(), {.lr = 0.1});
  GradScaler scaler(none);
  EXPECT_THROW(scaler.Update(), c10::Error);
  scaler.Unscale(optimizer);
  EXPECT_THROW(scaler.Unscale(optimizer), c10::Error);
  EXPECT_THROW(scaler.Update(), c10::Error);
  scaler.Step(optimizer);
  EXPECT_THROW(scaler.Step(optimizer), c10::Error);
  EXPECT_THROW(scaler.Unscale(optimizer), c10::Error);
  scaler.Update();
  for (const GradScalerOptions& options :
       {GradScalerOptions{.init_scale = 0}, GradScalerOptions{.init_scale = 1e39},
        GradScalerOptions{.growth_factor = 1}, GradScalerOptions{.backoff_factor = 1},
        GradScalerOptions{.backoff_factor = 0}, GradScalerOptions{.growth_interval = 0}}) {
    EXPECT_THROW(GradScaler(none, options), c10::Error);
  }
}

}  // namespace
}  // namespace lockstep::parallel
