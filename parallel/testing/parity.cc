#include "lockstep/parallel/testing/parity.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "absl/strings/str_cat.h"
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

bool IsNear(double found, double expected, double tolerance) {
  return std::abs(found - expected) <= tolerance * std::max(1.0, std::abs(expected));
}

void CompareNumbers(const std::vector<double>& found, const std::vector<double>& expected,
                    double tolerance, const std::string& what, std::vector<std::string>& out) {
  if (found.size() != expected.size()) {
    out.push_back(absl::StrCat(found.size(), " and not ", expected.size(), " of ", what));
    return;
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (IsNear(found[i], expected[i], tolerance)) continue;
    out.push_back(absl::StrCat(what, " ", i, " is ", found[i], ", not ", expected[i],
                               "; they differ by ", found[i] - expected[i]));
  }
}

void CompareState(const NamedState& found, const NamedState& expected, double tolerance,
                  const std::string& what, std::vector<std::string>& out) {
  for (const auto& [name, tensor] : found) {
    if (expected.count(name) == 0) out.push_back(absl::StrCat(what, " have ", name));
  }
  for (const auto& [name, tensor] : expected) {
    const auto place = found.find(name);
    if (place == found.end()) {
      out.push_back(absl::StrCat(what, " lack ", name));
    } else if (!at::allclose(place->second, tensor, /*rtol=*/tolerance, /*atol=*/tolerance)) {
      out.push_back(absl::StrCat(what, ": ", name, " differs by ",
                                 (place->second - tensor).abs().max().item<double>()));
    }
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
    if (c.clip_norm > 0) {
      trajectory.norms.push_back(strategy.ClipGradNorm(c.clip_norm).item<double>());
    }
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

std::vector<std::string> Differences(const Trajectory& found, const Trajectory& expected,
                                     at::ScalarType dtype) {
  const double tolerance = dtype == at::kDouble ? 1e-9 : 1e-4;
  std::vector<std::string> out;
  CompareNumbers(found.losses, expected.losses, tolerance, "loss", out);
  CompareNumbers(found.norms, expected.norms, tolerance, "norm", out);
  if (found.gradients.size() != expected.gradients.size()) {
    out.push_back("the number of gradients compared");
  }
  for (size_t i = 0; i < std::min(found.gradients.size(), expected.gradients.size()); ++i) {
    CompareState(found.gradients[i], expected.gradients[i], tolerance,
                 absl::StrCat("gradients ", i), out);
  }
  CompareState(found.state, expected.state, tolerance, "parameters and buffers", out);
  CompareState(found.optimizer, expected.optimizer, tolerance, "the optimizer's state", out);
  return out;
}

void ExpectSame(const Trajectory& found, const Trajectory& expected, at::ScalarType dtype,
                const std::string& what) {
  for (const std::string& difference : Differences(found, expected, dtype)) {
    ADD_FAILURE() << what << ": " << difference;
  }
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
