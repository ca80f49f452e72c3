// How Units may be used under Fsdp, and what errors say where they are not used so.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/comm/counting.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/fsdp/fsdp_build_scope.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/parallel/recompute.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

using comm::OperationKind;
using testing::Linear;
using testing::MakeNets;
using testing::OddBlock;
using testing::OddNet;

// What `run` throws, or "" where it does not.
std::string ErrorOf(const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_ERROR(statement, text)                                    \
  do {                                                                   \
    const std::string error = ErrorOf([&] { statement; });               \
    EXPECT_NE(error.find(text), std::string::npos) << "says: " << error; \
  } while (false)

template <typename Net>
testing::ParityCase CaseOf(const std::string& name, std::function<Net()> make) {
  testing::ParityCase c = {.name = name, .sample_shape = {17}, .classes = 5};
  c.make = [make = std::move(make)] {
    Net net = make();
    return testing::ParityModel{net.ptr(), [net](at::Tensor x) mutable { return net(x); }};
  };
  return c;
}

// What a Unit may return: a tuple, a struct, and something without gradient beside it.
struct Pair {
  at::Tensor sum;
  std::vector<at::Tensor> parts;
};
void ForEachTensor(Pair& pair, const std::function<void(at::Tensor&)>& visit) {
  visit(pair.sum);
  for (at::Tensor& part : pair.parts) visit(part);
}

class TupleBlockImpl : public torch::nn::Module {
 public:
  TupleBlockImpl() { linear = register_module("linear", torch::nn::Linear(15, 15)); }
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x) {
    const at::Tensor y = linear(x);
    return {at::tanh(y), y.detach().argmax(1)};
  }
  torch::nn::Linear linear = nullptr;
};

class StructBlockImpl : public torch::nn::Module {
 public:
  StructBlockImpl() {
    first = register_module("first", torch::nn::Linear(15, 15));
    second = register_module("second", torch::nn::Linear(15, 3));
  }
  Pair forward(const at::Tensor& x, bool twice) {
    const at::Tensor y = at::tanh(first(x));
    return {twice ? y * 2 : y, {second(y), y.detach()}};
  }
  torch::nn::Linear first = nullptr;
  torch::nn::Linear second = nullptr;
};

// A Unit that works without gradients: an embedding that is kept as it is, say.
class ConstantBlockImpl : public torch::nn::Module {
 public:
  ConstantBlockImpl() { weight = register_parameter("weight", at::full({15}, 0.5), false); }
  at::Tensor forward(at::Tensor x) { return x.detach() * weight; }
  at::Tensor weight;
};

class OutputsNetImpl : public torch::nn::Module {
 public:
  OutputsNetImpl() {
    in = register_module("in", Linear(17, 15));
    tuple = register_module("tuple", Unit<TupleBlockImpl>());
    structure = register_module("structure", Unit<StructBlockImpl>());
    constant = register_module("constant", Unit<ConstantBlockImpl>());
    out = register_module("out", Linear(15, 5));
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    const auto [y, which] = tuple(x);
    const Pair pair = structure(y, true);
    return out(pair.sum + constant(x) + which.unsqueeze(1)) + pair.parts[0].sum(1, true);
  }
  Linear in = nullptr;
  Unit<TupleBlockImpl> tuple = nullptr;
  Unit<StructBlockImpl> structure = nullptr;
  Unit<ConstantBlockImpl> constant = nullptr;
  Linear out = nullptr;
};

const std::vector<std::string> kStrategies = {"fsdp", "zero2", "zero1"};

TEST(FsdpUsesTest, UnitsMayReturnWhatTheyLike) {
  using Net = Unit<OutputsNetImpl>;
  testing::ExpectParityOnThreads(CaseOf<Net>("outputs", [] { return Net(); }), kStrategies, {1, 3});
}

// Trains a step on a loss of several forwards; whole gradients by name.
testing::NamedState GradientsOfTwoForwards(OddNet& net, Strategy& strategy, bool two_backwards) {
  const at::Tensor first = net(at::ones({2, 17})).square().sum();
  const at::Tensor second = net(at::full({3, 17}, 0.3)).square().sum();
  if (two_backwards) {
    second.backward();
    first.backward();
  } else {
    (first + second).backward();
  }
  std::vector<NamedTensor> gradients;
  for (const NamedTensor& each : strategy.named_parameters()) {
    gradients.push_back({each.name, each.tensor.grad()});
  }
  testing::NamedState whole;
  strategy.UpdateFull(gradients, [&](const std::string& name, const at::Tensor& full) {
    whole[name] = full.clone();
  });
  return whole;
}

// Models with the same parameters.
std::vector<OddNet> SameNets(int count) {
  std::vector<OddNet> nets;
  for (int i = 0; i < count; ++i) {
    torch::manual_seed(3);
    nets.emplace_back(/*blocks=*/2);
  }
  return nets;
}

TEST(FsdpUsesTest, SeveralForwardsMayComeBeforeABackward) {
  for (bool two_backwards : {false, true}) {
    OddNet alone = SameNets(1)[0];
    None none(alone);
    const auto expected = GradientsOfTwoForwards(alone, none, two_backwards);
    for (FsdpOptions options : {FsdpOptions{}, FsdpOptions{.reshard_after_forward = false},
                                FsdpOptions{.sharding = Sharding::kGradOp}}) {
      std::vector<OddNet> nets = SameNets(2);
      comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
        Fsdp fsdp(nets[comm.rank()], comm, options);
        for (int step = 0; step < 2; ++step) {
          for (const at::Tensor& slice : fsdp.parameters()) slice.mutable_grad().reset();
          const auto found = GradientsOfTwoForwards(nets[comm.rank()], fsdp, two_backwards);
          for (const auto& [name, gradient] : expected) {
            EXPECT_TRUE(found.at(name).allclose(gradient, 1e-4, 1e-5)) << name;
          }
        }
      });
    }
  }
}

TEST(FsdpUsesTest, PrefetchFollowsTheLastStepAndDropsWrongGuesses) {
  for (bool prefetch : {true, false}) {
    std::vector<OddNet> nets = MakeNets(2);
    comm::testing::RunRanks(2, [&](comm::Communicator& world) {
      auto counters = std::make_shared<comm::TrafficCounters>();
      comm::CountingCommunicator counting(SplitPrivate(world), counters);
      OddNet& net = nets[world.rank()];
      Fsdp fsdp(net, counting, {.prefetch = prefetch});
      const auto step = [&] {
        counters->Reset();
        const at::Tensor y = net(at::ones({2, 17}));
        y.sum().backward();
        return (*counters)[OperationKind::kAllGather].operations;
      };
      EXPECT_EQ(step(), 9);
      EXPECT_EQ(step(), 9);
      const OddBlock last = net->blocks.back();
      net->blocks.pop_back();  // forward now leaves out two Units: one is gathered for nothing
      EXPECT_EQ(step(), prefetch ? 5 + 1 : 5);
      EXPECT_EQ(step(), 5);
      net->blocks.push_back(last);
      EXPECT_EQ(step(), 9);
      EXPECT_EQ(step(), 9);
      for (const at::Tensor& parameter : net->parameters()) {
        EXPECT_ERROR(parameter.sum(), "while an Fsdp has it sharded");
      }
    });
  }
}

// Each rank's error where `skip` uses other Units than the others do.
std::vector<std::string> ErrorsWhereOneRankSkips(FsdpOptions options,
                                                 const std::function<void(OddNet&)>& skip) {
  std::vector<OddNet> nets = MakeNets(3);
  std::vector<std::string> errors(3);
  comm::testing::RunRanks(3, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Fsdp fsdp(net, comm, options);
    net(at::ones({2, 17})).sum().backward();
    if (comm.rank() == 1) skip(net);
    errors[comm.rank()] = ErrorOf([&] {
      net(at::ones({2, 17})).sum().backward();
      net(at::ones({2, 17})).sum().backward();
    });
  });
  return errors;
}

TEST(FsdpUsesTest, AUnitThatOneRankSkipsIsAnErrorThatNamesIt) {
  for (bool prefetch : {true, false}) {
    for (Sharding sharding : {Sharding::kFull, Sharding::kGradOp, Sharding::kOptimizer}) {
      const FsdpOptions options = {.sharding = sharding, .prefetch = prefetch};
      for (const std::string& error : ErrorsWhereOneRankSkips(
               options, [](OddNet& net) { net->blocks.erase(net->blocks.begin()); })) {
        EXPECT_NE(error.find("block0"), std::string::npos) << error;
      }
      for (const std::string& error :
           ErrorsWhereOneRankSkips(options, [](OddNet& net) { net->blocks.pop_back(); })) {
        EXPECT_NE(error.find("block1"), std::string::npos) << error;
      }
    }
  }
}

TEST(FsdpUsesTest, UnshardGathersUntilReshard) {
  std::vector<OddNet> nets = MakeNets(2);
  const at::Tensor expected = nets[0]->blocks[1]->up->weight.detach().clone();
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Fsdp fsdp(net, comm);
    const at::Tensor& weight = net->blocks[1]->up->weight;
    fsdp.Unshard("block1.up");
    EXPECT_TRUE(weight.equal(expected));
    {
      at::NoGradGuard no_grad;
      net(at::ones({2, 17}));
    }
    EXPECT_TRUE(weight.equal(expected));
    fsdp.Reshard("block1.up");
    EXPECT_ERROR(weight.sum(), "Unit \"block1.up\"");
    fsdp.Unshard("block1.up", /*wait=*/false);
    net(at::ones({2, 17})).sum().backward();
    EXPECT_ERROR(weight.sum(), "Unit \"block1.up\"");
    EXPECT_ERROR(fsdp.Unshard("block7"), "no Unit \"block7\", but \"\", \"block0\"");
  });
}

const std::vector<FsdpOptions>& Kinds() {
  static const auto& kinds = *new std::vector<FsdpOptions>{
      {},
      {.reshard_after_forward = false},
      {.reshard_size = 1},
      {.sharding = Sharding::kGradOp},
      {.sharding = Sharding::kOptimizer},
      {.shard_size = 1},
      {.cpu_offload = true},
  };
  return kinds;
}

TEST(FsdpUsesTest, AForwardAroundTheUnitSaysSo) {
  for (const FsdpOptions& options : Kinds()) {
    std::vector<OddNet> nets = MakeNets(2);
    comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      Fsdp fsdp(net, comm, options);
      const auto around = [&] { net->as<testing::OddNetImpl>()->forward(at::ones({2, 17})); };
      EXPECT_ERROR(around(), "not block->as<Impl>()->forward(x)");
      net(at::ones({2, 17})).sum().backward();
      EXPECT_ERROR(around(), "not block->as<Impl>()->forward(x)");
      EXPECT_ERROR(Fsdp again(net, comm), "while an Fsdp has it sharded");
    });
  }
}

TEST(FsdpUsesTest, NoForwardSeesStaleWeights) {
  const at::Tensor x = at::ones({2, 17});
  const at::Tensor zero = at::full({2, 5}, 3.0);  // of weights that are 0: the buffer's sum
  for (const FsdpOptions& options : Kinds()) {
    std::vector<OddNet> nets = MakeNets(2);
    comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      Fsdp fsdp(net, comm, options);
      const auto set = [&](double factor) {
        at::NoGradGuard no_grad;
        for (const at::Tensor& slice : fsdp.parameters()) slice.mul_(factor).add_(factor);
      };
      // After a forward without a backward, and after one whose backward reaches a part alone.
      net(x);
      set(0);
      EXPECT_TRUE(net(x).equal(zero));
      set(1);
      EXPECT_FALSE(net(x).equal(zero));
      at::Tensor middle;
      auto hook = net->blocks[0]->AddPostForwardHook(
          [&](const std::vector<at::Tensor*>& outputs) { middle = *outputs[0]; });
      net(x);
      hook.Remove();
      middle.sum().backward();
      middle.reset();
      set(0);
      EXPECT_TRUE(net(x).equal(zero));
      // After evaluations, and after state that was written.
      {
        c10::InferenceMode inference;
        EXPECT_TRUE(net(x).equal(zero));
      }
      set(1);
      const at::Tensor ones = net(x).detach();
      net(x).sum().backward();
      set(0);
      net(x);
      fsdp.UpdateState([&](const std::string& name, at::Tensor full) {
        if (name != "offset") full.fill_(1);
      });
      EXPECT_TRUE(net(x).equal(ones));
      // By a Unit of the model, without the model.
      const at::Tensor y = at::ones({2, 15});
      const at::Tensor before = net->blocks[1](y).detach();
      set(0);
      EXPECT_FALSE(net->blocks[1](y).equal(before));
    });
  }
}

TEST(FsdpUsesTest, TrainsOnAfterAnEvaluationInInferenceMode) {
  for (FsdpOptions options : Kinds()) {
    options.mixed_precision.param = at::kBFloat16;
    std::vector<OddNet> nets = MakeNets(2);
    comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      Fsdp fsdp(net, comm, options);
      for (int step = 0; step < 2; ++step) {
        {
          c10::InferenceMode inference;
          net(at::ones({2, 17}));
        }
        net(at::ones({2, 17})).sum().backward();
      }
    });
  }
}

TEST(FsdpUsesTest, GradientsOfNoSyncCanBeDropped) {
  const at::Tensor x = at::ones({2, 17});
  for (const FsdpOptions& options : Kinds()) {
    std::vector<OddNet> nets = MakeNets(2);
    comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      Fsdp fsdp(net, comm, options);
      net(x).square().sum().backward();
      std::vector<at::Tensor> expected;
      for (const at::Tensor& slice : fsdp.parameters()) {
        expected.push_back(slice.grad().clone());
        slice.mutable_grad().reset();
      }
      {
        const auto no_sync = fsdp.NoSync();
        net(x * 2).square().sum().backward();
      }
      fsdp.DropGradients();
      net(x).square().sum().backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(fsdp.parameters()[i].grad().equal(expected[i]));
      }
    });
  }
}

// Each rank's loss uses the parameters of a model's own Unit that `uses` says.
class ChoiceImpl : public torch::nn::Module {
 public:
  explicit ChoiceImpl(std::vector<bool> uses) : uses(std::move(uses)) {
    for (size_t i = 0; i < this->uses.size(); ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), at::ones({3})));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (uses[i]) x = x * weights[i];
    }
    return x;
  }
  std::vector<bool> uses;
  std::vector<at::Tensor> weights;
};

TEST(FsdpUsesTest, RanksThatGiveGradientsToOtherParametersGetAnError) {
  for (int shard_size : {1, 2}) {
    std::vector<Unit<ChoiceImpl>> nets;
    for (const std::vector<bool>& uses : {std::vector<bool>{true, false, false, true},
                                          std::vector<bool>{true, false, true, false}}) {
      for (int rank = 0; rank < shard_size; ++rank) nets.emplace_back(uses);
    }
    std::vector<std::string> errors(nets.size());
    comm::testing::RunRanks(static_cast<int>(nets.size()), [&](comm::Communicator& comm) {
      Fsdp fsdp(nets[comm.rank()], comm, {.shard_size = shard_size});
      errors[comm.rank()] = ErrorOf([&] { nets[comm.rank()](at::ones({3})).sum().backward(); });
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("without w1 (2 missing"), std::string::npos) << error;
    }
  }
}

TEST(FsdpUsesTest, RanksWithOtherOptionsGetAnError) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    EXPECT_ERROR(Fsdp(nets[comm.rank()], comm, {.reshard_size = comm.rank()}),
                 "option reshard_size=0; rank 1 has option reshard_size=1");
    EXPECT_ERROR(FsdpBuildScope(comm, {.sync_module_states = comm.rank() == 0}),
                 "option sync_module_states=1");
    EXPECT_ERROR(Fsdp(nets[comm.rank()], comm, {.mixed_precision = {.reduce = at::kInt}}),
                 "mixed_precision has Int");
  });
}

TEST(FsdpUsesTest, FreezingAfterShardingIsAnError) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Fsdp fsdp(net, comm);
    net->blocks[0]->scale.set_requires_grad(false);
    EXPECT_ERROR(net(at::ones({2, 17})), "requires_grad of parameter block0.scale has changed");
  });
}

// A Unit that hands its input through is not gathered again when that gets its gradient.
class ThroughImpl : public torch::nn::Module {
 public:
  ThroughImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x) { return {linear(x), x}; }
  torch::nn::Linear linear = nullptr;
};

class ThroughNetImpl : public torch::nn::Module {
 public:
  ThroughNetImpl() {
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Unit<ThroughImpl>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) {
      const auto [y, same] = block(x);
      x = y + same;
    }
    return x;
  }
  std::vector<Unit<ThroughImpl>> blocks;
};

TEST(FsdpUsesTest, AnInputHandedThroughCostsNoGather) {
  std::vector<Unit<ThroughNetImpl>> nets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& world) {
    auto counters = std::make_shared<comm::TrafficCounters>();
    comm::CountingCommunicator counting(SplitPrivate(world), counters);
    Fsdp fsdp(nets[world.rank()], counting);
    for (int step = 0; step < 2; ++step) {
      counters->Reset();
      nets[world.rank()](at::ones({2, 4})).sum().backward();
      EXPECT_EQ((*counters)[OperationKind::kAllGather].operations, 6);
    }
  });
}

// A block that keeps its output from the last call, whose backward then needs freed parameters.
TEST(FsdpUsesTest, BackwardThroughAFreedParameterSaysSo) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Fsdp fsdp(net, comm, {.debug = true});
    fsdp.Unshard("block0.up");
    const at::Tensor x = at::ones({2, 7}).requires_grad_();
    const at::Tensor y = at::linear(x, net->blocks[0]->up->weight);  // not by its forward
    fsdp.Reshard("block0.up");
    EXPECT_ERROR(y.sum().backward(), "Unit \"block0.up\"");
  });
}

TEST(FsdpUsesTest, AnOptimizerOfTheModelItselfSaysSo) {
  std::vector<OddNet> nets = MakeNets(2);
  for (Sharding sharding : {Sharding::kFull, Sharding::kGradOp, Sharding::kOptimizer}) {
    nets = MakeNets(2);
    comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      torch::optim::SGD early(net->parameters(), 0.1);
      Fsdp fsdp(net, comm, {.sharding = sharding});
      for (int step = 0; step < 2; ++step) {
        early.zero_grad();
        net(at::ones({2, 17})).sum().backward();
        EXPECT_ERROR(early.step(), "ake the optimizer after sharding");
        EXPECT_ERROR(torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0),
                     "fsdp.ClipGradNorm()");
      }
    });
  }
}

TEST(FsdpUsesTest, GradientsAreClippedByValue) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    Fsdp fsdp(nets[comm.rank()], comm);
    nets[comm.rank()](at::ones({2, 17})).square().sum().backward();
    bool clipped = false;
    for (const at::Tensor& slice : fsdp.parameters()) {
      clipped = clipped || (slice.numel() > 0 && slice.grad().abs().max().item<float>() > 0.1);
    }
    EXPECT_TRUE(clipped);
    fsdp.ClipGradValue(0.1);
    for (const at::Tensor& slice : fsdp.parameters()) {
      if (slice.numel() == 0) continue;
      EXPECT_LE(slice.grad().abs().max().item<float>(), 0.1f);
    }
  });
}

TEST(FsdpUsesTest, RecomputedUnitsEqualOneProcess) {
  // Blocks with a Unit inside; some parameters frozen.
  const auto make = [] {
    OddNet net(/*blocks=*/3);
    Recompute(*net, [](const NamedUnit& unit) { return unit.name.size() == 6; });
    for (const at::Tensor& each : net->blocks[1]->down->parameters()) each.set_requires_grad(false);
    return net;
  };
  testing::ParityCase c = CaseOf<OddNet>("recomputed", make);
  c.micro_steps = 2;
  testing::ExpectParityOnThreads(c, kStrategies, {1, 3});
}

// The whole state by name.
testing::NamedState StateOf(Strategy& strategy) {
  testing::NamedState state;
  strategy.VisitState(
      [&](const std::string& name, const at::Tensor& full) { state[name] = full.clone(); });
  return state;
}

// Two Units with a weight in common, and one that is dropped by the constructor.
class TiedScopeNetImpl : public torch::nn::Module {
 public:
  TiedScopeNetImpl() {
    first = register_module("first", Linear(torch::nn::LinearOptions(17, 17).bias(false)));
    Linear dropped(3, 3);
    block = register_module("block", OddBlock());
    second = register_module("second", Linear(torch::nn::LinearOptions(17, 17).bias(false)));
    second->weight = second->register_parameter("tied", first->weight);
    own = register_parameter("own", at::ones({3}));
    register_parameter("own_again", own);  // tied inside a Unit
    out = register_module("out", torch::nn::Linear(17, 15));
  }
  at::Tensor forward(at::Tensor x) { return block(out(at::tanh(first(x)))) * own.sum(); }
  Linear first = nullptr;
  OddBlock block = nullptr;
  Linear second = nullptr;
  torch::nn::Linear out = nullptr;
  at::Tensor own;
};

TEST(FsdpUsesTest, ABuildScopeGivesTheWeightsOfOneProcess) {
  using Net = Unit<TiedScopeNetImpl>;
  torch::manual_seed(5);
  Net alone;
  None none(alone);
  const auto expected = StateOf(none);
  const at::Tensor x = at::ones({2, 17});
  const at::Tensor y = alone(x);
  for (Sharding sharding : {Sharding::kFull, Sharding::kGradOp}) {
    // One rank, as ranks that are threads share the generator.
    comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
      FsdpBuildScope scope(comm, {.sharding = sharding});
      torch::manual_seed(5);
      Net net;
      EXPECT_ERROR(net->block->up->weight.sum(), "while an Fsdp has it sharded");
      Fsdp fsdp(net, scope);
      const auto found = StateOf(fsdp);
      ASSERT_EQ(found.size(), expected.size());
      for (const auto& [name, value] : expected) EXPECT_TRUE(found.at(name).equal(value)) << name;
      EXPECT_TRUE(net(x).equal(y));
      net(x).sum().backward();
      EXPECT_ERROR(Fsdp again(net, scope), "a scope builds one model");
      EXPECT_ERROR(Linear late(2, 2), "make another scope");
    });
    // Rank 0's weights on all, whatever the others drew.
    comm::testing::RunRanks(3, [&](comm::Communicator& comm) {
      FsdpBuildScope scope(comm, {.sharding = sharding});
      Net net;
      Fsdp fsdp(net, scope);
      const auto found = StateOf(fsdp);
      for (const auto& [name, value] : found) {
        at::Tensor sum = value.to(at::kDouble).sum();
        const at::Tensor mine = sum.clone();
        ThrowIfError(comm.Broadcast(sum, 0).Wait());
        EXPECT_TRUE(sum.equal(mine)) << name;
      }
      net(x).sum().backward();
    });
  }
}

// Mixed precision by hand: a copy of the model in the low precision, gradients in the high one.
TEST(FsdpUsesTest, MixedPrecisionComputesInOneDtypeAndUpdatesInAnother) {
  for (at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    std::vector<OddNet> nets = SameNets(2);
    OddNet master = SameNets(1)[0];
    comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      Fsdp fsdp(net, comm,
                {.mixed_precision = {.param = low, .reduce = at::kFloat, .output = at::kFloat}});
      for (const NamedTensor& slice : fsdp.named_parameters()) {
        EXPECT_EQ(slice.tensor.scalar_type(), at::kFloat);
      }
      for (int step = 0; step < 3; ++step) {
        OddNet reference(/*blocks=*/2);
        const std::vector<at::Tensor> values = master->parameters();
        for (size_t i = 0; i < values.size(); ++i) {
          reference->parameters()[i].set_data(values[i].detach().to(low));
        }
        const at::Tensor x = at::full({2, 17}, 0.1 * (step + 1));  // of all ranks alike
        const at::Tensor y = net(x);
        EXPECT_EQ(y.scalar_type(), at::kFloat);
        const at::Tensor expected = reference(x.to(low)).to(at::kFloat);
        EXPECT_TRUE(y.equal(expected));
        for (const at::Tensor& slice : fsdp.parameters()) slice.mutable_grad().reset();
        y.square().sum().backward();
        expected.square().sum().backward();
        std::map<std::string, at::Tensor> gradients;
        for (const auto& each : reference->named_parameters()) {
          gradients[each.key()] = each.value().grad().to(at::kFloat);
        }
        std::vector<NamedTensor> found;
        for (const NamedTensor& slice : fsdp.named_parameters()) {
          EXPECT_EQ(slice.tensor.grad().scalar_type(), at::kFloat);
          found.push_back({slice.name, slice.tensor.grad()});
        }
        fsdp.UpdateFull(found, [&](const std::string& name, const at::Tensor& full) {
          EXPECT_TRUE(full.equal(gradients.at(name))) << name;
        });
        at::NoGradGuard no_grad;
        for (const at::Tensor& slice : fsdp.parameters()) slice.sub_(slice.grad() * 0.01);
        ThrowIfError(comm.Barrier().Wait());
        if (comm.rank() == 0) {
          for (const auto& each : master->named_parameters()) {
            each.value().sub_(gradients.at(each.key()) * 0.01);
          }
        }
        ThrowIfError(comm.Barrier().Wait());
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::parallel
