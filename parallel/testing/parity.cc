#include "lockstep/parallel/testing/parity.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <cmath>
#include <numeric>
#include <optional>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/optim/fused_sgd.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {
namespace {

struct Samples {
  at::Tensor inputs;
  at::Tensor labels;
};

// Samples [begin, begin + count): functions of their index, in no way alike.
Samples MakeSamples(const ParityCase& c, int64_t begin, int64_t count) {
  const int64_t numel = std::accumulate(c.sample_shape.begin(), c.sample_shape.end(), int64_t{1},
                                        std::multiplies<>());
  const at::Tensor index = at::arange(begin * numel, (begin + count) * numel, at::kDouble);
  std::vector<int64_t> shape = {count};
  shape.insert(shape.end(), c.sample_shape.begin(), c.sample_shape.end());
  const at::Tensor row = at::arange(begin, begin + count, at::kLong);
  return {at::sin(index * 1.7 + 0.3).view(shape).to(c.dtype), (row * 7 + 3).remainder(c.classes)};
}

std::unique_ptr<optim::FusedOptimizer> MakeOptimizer(const ParityCase& c,
                                                     const Strategy& strategy) {
  if (c.sgd) {
    return std::make_unique<optim::FusedSgd>(strategy.named_parameters(),
                                             optim::FusedSgdOptions{.lr = 0.1, .momentum = 0.9});
  }
  return std::make_unique<optim::FusedAdamW>(strategy.named_parameters(),
                                             optim::FusedAdamWOptions{.lr = 1e-3});
}

at::Tensor CpuCopy(const at::Tensor& tensor) {
  return tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

// Whole gradients of parameters() that have one.
NamedState GradientsOf(Strategy& strategy) {
  std::vector<NamedTensor> gradients;
  for (const NamedTensor& parameter : strategy.named_parameters()) {
    if (!parameter.tensor.grad().defined()) continue;
    gradients.push_back({parameter.name, parameter.tensor.grad()});
  }
  NamedState whole;
  strategy.UpdateFull(gradients, [&](const std::string& name, const at::Tensor& full) {
    whole[name] = CpuCopy(full);
  });
  return whole;
}

void ExpectSameState(const NamedState& found, const NamedState& expected, double tolerance,
                     const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (const auto& [name, tensor] : expected) {
    const auto place = found.find(name);
    ASSERT_NE(place, found.end()) << what << ": no " << name;
    EXPECT_TRUE(at::allclose(place->second, tensor, /*rtol=*/tolerance, /*atol=*/tolerance))
        << what << ": " << name << " differs by "
        << (place->second - tensor).abs().max().item<double>();
  }
}

}  // namespace

ParityModel MakeModel(const ParityCase& c) {
  torch::manual_seed(7);
  ParityModel model = c.make();
  model.module->to(c.dtype);
  return model;
}

Trajectory Train(const ParityCase& c, const ParityModel& model, Strategy& strategy, int rank,
                 int size, comm::Communicator* comm) {
  const at::Device device = comm == nullptr ? at::kCPU : comm->device();
  Trajectory trajectory;
  auto optimizer = MakeOptimizer(c, strategy);
  for (int step = 0; step < c.steps; ++step) {
    optimizer->zero_grad();
    at::Tensor loss = at::full({}, 0.0, at::TensorOptions(at::kDouble).device(device));
    for (int micro = 0; micro < c.micro_steps; ++micro) {
      const int64_t global = (step * c.micro_steps + micro) * size + rank;
      const Samples samples = MakeSamples(c, global * c.batch, c.batch);
      std::optional<Strategy::NoSyncScope> no_sync;
      if (micro + 1 < c.micro_steps) no_sync.emplace(strategy);
      const at::Tensor part =
          torch::nn::functional::cross_entropy(model.forward(samples.inputs.to(device)),
                                               samples.labels.to(device)) /
          c.micro_steps;
      part.backward();
      loss += part.detach().to(at::kDouble);
    }
    strategy.FinishBackward();
    if (c.clip_norm > 0) trajectory.norms.push_back(strategy.ClipGradNorm(c.clip_norm));
    // Not in each step: looking brings what a strategy has gathered up to date.
    if (step % 2 == 0) trajectory.gradients.push_back(GradientsOf(strategy));
    optimizer->step();
    if (comm != nullptr) ThrowIfError(comm->AllReduce(loss, comm::ReduceOp::kAverage).Wait());
    trajectory.losses.push_back(loss.item<double>());
  }
  strategy.VisitState([&](const std::string& name, const at::Tensor& full) {
    trajectory.state[name] = CpuCopy(full);
  });
  optimizer->UpdateFullState(strategy, [&](const optim::FusedOptimizer::State& state) {
    trajectory.optimizer[state.parameter + "/" + state.key] = CpuCopy(state.value);
  });
  return trajectory;
}

Trajectory TrainAlone(const ParityCase& c, int size) {
  ParityCase global = c;
  global.batch = c.batch * size;
  const ParityModel model = MakeModel(global);
  None none(model.module);
  return Train(global, model, none, /*rank=*/0, /*size=*/1, /*comm=*/nullptr);
}

void ExpectSame(const Trajectory& found, const Trajectory& expected, at::ScalarType dtype,
                const std::string& what) {
  const double tolerance = dtype == at::kDouble ? 1e-9 : 1e-4;
  ASSERT_EQ(found.losses.size(), expected.losses.size()) << what;
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(found.losses[step], expected.losses[step],
                tolerance * std::max(1.0, std::abs(expected.losses[step])))
        << what << ", loss of step " << step;
  }
  ASSERT_EQ(found.norms.size(), expected.norms.size()) << what;
  for (size_t step = 0; step < expected.norms.size(); ++step) {
    EXPECT_NEAR(found.norms[step], expected.norms[step], tolerance * (1 + expected.norms[step]))
        << what << ", gradient norm of step " << step;
  }
  ASSERT_EQ(found.gradients.size(), expected.gradients.size()) << what;
  for (size_t step = 0; step < expected.gradients.size(); ++step) {
    ExpectSameState(found.gradients[step], expected.gradients[step], tolerance,
                    what + ", gradients of step " + std::to_string(2 * step));
  }
  ExpectSameState(found.state, expected.state, tolerance, what);
  ExpectSameState(found.optimizer, expected.optimizer, tolerance, what + ", optimizer");
}

void ExpectParityOnThreads(const ParityCase& c, const std::vector<std::string>& strategies,
                           const std::vector<int>& sizes) {
  std::map<std::string, StrategyFactory> factories;
  for (const std::string& name : strategies) {
    factories[name] = [name](std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm) {
      return ValueOrThrow(MakeStrategy(name, std::move(model), &comm));
    };
  }
  ExpectParityOnThreadsOf(c, factories, sizes);
}

void ExpectParityOnThreadsOf(const ParityCase& c,
                             const std::map<std::string, StrategyFactory>& strategies,
                             const std::vector<int>& sizes) {
  for (int size : sizes) {
    const Trajectory expected = TrainAlone(c, size);
    for (const auto& [name, make] : strategies) {
      std::vector<ParityModel> models;
      for (int rank = 0; rank < size; ++rank) models.push_back(MakeModel(c));
      comm::testing::RunRanks(size, [&](comm::Communicator& comm) {
        const ParityModel& model = models[comm.rank()];
        auto strategy = make(model.module, comm);
        const Trajectory found = Train(c, model, *strategy, comm.rank(), size, &comm);
        ExpectSame(found, expected, c.dtype,
                   c.name + " under " + name + ", rank " + std::to_string(comm.rank()) + " of " +
                       std::to_string(size));
      });
    }
  }
}

}  // namespace lockstep::parallel::testing
