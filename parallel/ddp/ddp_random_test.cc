// Random models, options and trainings under Ddp against the same arithmetic without it.
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/ddp/ddp.h"

namespace lockstep::parallel {
namespace {

using Rng = std::mt19937_64;

int Draw(Rng& rng, int low, int high) { return std::uniform_int_distribution<>(low, high)(rng); }
bool Chance(Rng& rng, double p) { return std::bernoulli_distribution(p)(rng); }

struct Shape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kDouble;
  bool transposed = false;
  bool frozen = false;
  bool ignored = false;
  bool shared = false;  // registered under a second name
};

// What all ranks do; drawn from the seed alone.
struct Plan {
  int ranks = 1;
  std::vector<Shape> shapes;
  DdpOptions options;
  struct Backward {
    bool sync = true;
    bool zero_before = false;
    std::vector<std::vector<int>> uses;  // by rank and parameter: how often forward uses it
  };
  std::vector<Backward> backwards;
};

Plan MakePlan(Rng& rng) {
  Plan plan;
  plan.ranks = Draw(rng, 1, 4);
  const int count = Draw(rng, 1, 9);
  for (int i = 0; i < count; ++i) {
    Shape shape;
    for (int d = Draw(rng, 0, 3); d > 0; --d) {
      shape.sizes.push_back(Chance(rng, 0.05) ? 0 : Draw(rng, 1, 6));
    }
    shape.dtype = Chance(rng, 0.3) ? at::kFloat : at::kDouble;
    shape.transposed = shape.sizes.size() > 1 && Chance(rng, 0.3);
    if (i > 0) {  // the first is an ordinary one, which every backward uses
      shape.frozen = Chance(rng, 0.15);
      shape.ignored = Chance(rng, 0.1);
    }
    shape.shared = Chance(rng, 0.15);
    plan.shapes.push_back(shape);
    if (shape.ignored) plan.options.ignored.push_back(absl::StrCat("p", i));
  }
  if (plan.shapes[0].sizes.empty()) plan.shapes[0].sizes = {3};
  plan.options.first_bucket_bytes = Draw(rng, 1, 200);
  plan.options.bucket_bytes = Draw(rng, 1, 1000);
  plan.options.find_unused_parameters = Chance(rng, 0.5);
  plan.options.static_graph = Chance(rng, 0.3);
  const auto draw_uses = [&] {
    const bool may_skip = plan.options.find_unused_parameters || plan.options.static_graph;
    std::vector<std::vector<int>> uses(plan.ranks);
    for (std::vector<int>& rank : uses) {
      for (int i = 0; i < count; ++i) {
        rank.push_back(i > 0 && may_skip && Chance(rng, 0.4) ? 0 : Draw(rng, 1, 2));
      }
    }
    return uses;
  };
  const auto always = draw_uses();
  for (int step = Draw(rng, 1, 5); step > 0; --step) {
    const bool zero = Chance(rng, 0.7);
    const int micro_steps = Chance(rng, 0.3) ? 2 : 1;
    for (int micro = 0; micro < micro_steps; ++micro) {
      plan.backwards.push_back({.sync = micro + 1 == micro_steps,
                                .zero_before = zero && micro == 0,
                                .uses = plan.options.static_graph ? always : draw_uses()});
    }
  }
  return plan;
}

at::Tensor Fill(const Shape& shape, uint64_t seed) {
  const at::Tensor values =
      at::randn(shape.sizes, at::detail::createCPUGenerator(seed), at::kDouble).to(shape.dtype);
  if (!shape.transposed) return values;
  return values.transpose(0, 1).contiguous().transpose(0, 1);
}

struct Model : torch::nn::Module {
  Model(const Plan& plan, int rank) {
    for (size_t i = 0; i < plan.shapes.size(); ++i) {
      const Shape& shape = plan.shapes[i];
      const std::string name = absl::StrCat("p", i);
      // Ranks begin with different values: Ddp is to copy rank 0's, but for those ignored.
      all.push_back(register_parameter(name, Fill(shape, 100 * rank + i), !shape.frozen));
      if (shape.shared) {
        auto again = std::make_shared<torch::nn::Module>();
        again->register_parameter(name, all.back(), !shape.frozen);
        register_module("again_" + name, again);
      }
    }
  }
  std::vector<at::Tensor> all;
};

// This rank's loss in backward `step`, with gradients that differ by rank, step and parameter.
at::Tensor Loss(const std::vector<at::Tensor>& parameters, const std::vector<int>& uses, int rank,
                int step) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (int use = 0; use < uses[i]; ++use) {
      const double factor = 1 + 0.1 * rank + 0.01 * step + 0.3 * static_cast<double>(i) + use;
      loss = loss + at::tanh(parameters[i].to(at::kDouble) * factor).sum();
    }
  }
  return loss;
}

// What each rank's .grad must be after each backward: plain arithmetic on all ranks' values.
class Reference {
 public:
  explicit Reference(const Plan& plan) : plan_(plan) {
    for (int rank = 0; rank < plan.ranks; ++rank) {
      gradients_.emplace_back(plan.shapes.size());
      values_.emplace_back();
      for (size_t i = 0; i < plan.shapes.size(); ++i) {
        const int source = plan.shapes[i].ignored ? rank : 0;
        values_.back().push_back(Fill(plan.shapes[i], 100 * source + i).requires_grad_());
      }
    }
  }

  void Step(int step) {
    const Plan::Backward& backward = plan_.backwards[step];
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      if (backward.zero_before) gradients_[rank].assign(plan_.shapes.size(), at::Tensor());
      const std::vector<int>& uses = backward.uses[rank];
      const auto local = torch::autograd::grad({Loss(values_[rank], uses, rank, step)},
                                               values_[rank], {}, std::nullopt, false, true);
      for (size_t i = 0; i < local.size(); ++i) {
        if (!local[i].defined() || plan_.shapes[i].frozen) continue;
        at::Tensor& gradient = gradients_[rank][i];
        gradient = gradient.defined() ? gradient + local[i] : local[i].clone();
      }
    }
    if (backward.sync) Average();
  }

  const at::Tensor& gradient(int rank, size_t i) const { return gradients_[rank][i]; }

 private:
  void Average() {
    for (size_t i = 0; i < plan_.shapes.size(); ++i) {
      if (plan_.shapes[i].ignored) continue;
      at::Tensor sum;
      for (auto& rank : gradients_) {
        if (rank[i].defined()) sum = sum.defined() ? sum + rank[i] : rank[i];
      }
      if (!sum.defined()) continue;
      for (auto& rank : gradients_) rank[i] = sum / plan_.ranks;
    }
  }

  const Plan& plan_;
  std::vector<std::vector<at::Tensor>> values_;     // by rank and parameter
  std::vector<std::vector<at::Tensor>> gradients_;  // likewise
};

void ExpectEqualGradients(const Plan& plan) {
  std::vector<std::shared_ptr<Model>> models;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    models.push_back(std::make_shared<Model>(plan, rank));
  }
  comm::testing::RunRanks(plan.ranks, [&](comm::Communicator& comm) {
    const int rank = comm.rank();
    Model& model = *models[rank];
    Reference reference(plan);
    Ddp ddp(models[rank], comm, plan.options);
    for (size_t step = 0; step < plan.backwards.size(); ++step) {
      const Plan::Backward& backward = plan.backwards[step];
      if (backward.zero_before) model.zero_grad();
      std::optional<Strategy::NoSyncScope> no_sync;
      if (!backward.sync) no_sync.emplace(ddp);
      Loss(model.all, backward.uses[rank], rank, static_cast<int>(step)).backward();
      reference.Step(static_cast<int>(step));
      for (size_t i = 0; i < model.all.size(); ++i) {
        const at::Tensor& found = model.all[i].grad();
        const at::Tensor& expected = reference.gradient(rank, i);
        EXPECT_EQ(found.defined(), expected.defined())
            << "rank " << rank << ", backward " << step << ", p" << i;
        if (!found.defined() || !expected.defined()) continue;
        const double tolerance = plan.shapes[i].dtype == at::kDouble ? 1e-12 : 1e-5;
        EXPECT_TRUE(found.allclose(expected, tolerance, tolerance))
            << "rank " << rank << ", backward " << step << ", p" << i << ": " << found
            << " and not " << expected;
      }
    }
  });
}

TEST(DdpRandomTest, EqualsPlainArithmetic) {
  const char* given = std::getenv("LOCKSTEP_SEED");
  const uint64_t first = given != nullptr ? std::stoull(given) : std::random_device()();
  const int cases = given != nullptr ? 1 : std::getenv("LOCKSTEP_SOAK") != nullptr ? 5000 : 150;
  for (int i = 0; i < cases; ++i) {
    const uint64_t seed = first + i;
    SCOPED_TRACE(absl::StrCat("repeat with LOCKSTEP_SEED=", seed));
    Rng rng(seed);
    ExpectEqualGradients(MakePlan(rng));
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

}  // namespace
}  // namespace lockstep::parallel
