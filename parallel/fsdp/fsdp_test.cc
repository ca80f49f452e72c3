#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/counting.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/fsdp/flat_layout.h"
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

template <typename Net>
testing::ParityCase CaseOf(const std::string& name, std::function<Net()> make) {
  testing::ParityCase c = {.name = name, .sample_shape = {17}, .classes = 5};
  c.make = [make = std::move(make)] {
    Net net = make();
    return testing::ParityModel{net.ptr(), [net](at::Tensor x) mutable { return net(x); }};
  };
  return c;
}

TEST(FsdpTest, EqualsOneProcessWithOddShapes) {
  testing::ExpectParityOnThreads(CaseOf<OddNet>("odd", [] { return OddNet(2); }), {"fsdp"},
                                 {1, 2, 3, 4, 8});
}

TEST(FsdpTest, EqualsOneProcessWithFrozenParameters) {
  const auto make = [] {
    OddNet net(2);
    net->in->weight.set_requires_grad(false);
    // Backward needs the frozen `down` after the last trainable gradient of its Unit.
    for (const at::Tensor& parameter : net->blocks[1]->down->parameters()) {
      parameter.set_requires_grad(false);
    }
    for (const at::Tensor& parameter : net->blocks[0]->parameters()) {
      parameter.set_requires_grad(false);
    }
    return net;
  };
  testing::ExpectParityOnThreads(CaseOf<OddNet>("frozen", make), {"manual", "ddp", "fsdp"}, {2, 3});
}

// A Unit that is used twice in one forward.
class TwiceImpl : public torch::nn::Module {
 public:
  TwiceImpl() {
    in = register_module("in", Linear(17, 15));
    block = register_module("block", OddBlock());
    out = register_module("out", Linear(15, 5));
  }
  at::Tensor forward(at::Tensor x) { return out(block(block(in(x)))); }
  Linear in = nullptr;
  OddBlock block = nullptr;
  Linear out = nullptr;
};

TEST(FsdpTest, EqualsOneProcessWithAUnitUsedTwice) {
  using Twice = Unit<TwiceImpl>;
  testing::ExpectParityOnThreads(CaseOf<Twice>("twice", [] { return Twice(); }), {"ddp", "fsdp"},
                                 {1, 3});
}

// Two Units that share a weight, as the first and last layers of language models do.
class TiedLinearImpl : public torch::nn::Module {
 public:
  explicit TiedLinearImpl(at::Tensor shared) { weight = register_parameter("weight", shared); }
  at::Tensor forward(at::Tensor x) { return at::linear(x, weight); }
  at::Tensor weight;
};

class TiedNetImpl : public torch::nn::Module {
 public:
  TiedNetImpl() {
    first = register_module("first", Linear(torch::nn::LinearOptions(17, 17).bias(false)));
    second = register_module("second", Unit<TiedLinearImpl>(first->weight));
    out = register_module("out", Linear(17, 5));
  }
  at::Tensor forward(at::Tensor x) { return out(second(at::tanh(first(x)))); }
  Linear first = nullptr;
  Unit<TiedLinearImpl> second = nullptr;
  Linear out = nullptr;
};

TEST(FsdpTest, EqualsOneProcessWithTiedParameters) {
  using TiedNet = Unit<TiedNetImpl>;
  testing::ExpectParityOnThreads(CaseOf<TiedNet>("tied", [] { return TiedNet(); }),
                                 {"manual", "ddp", "fsdp"}, {1, 3});
}

// A model of two dtypes: what is f32 is sharded apart.
class MixedNetImpl : public torch::nn::Module {
 public:
  MixedNetImpl() {
    in = register_module("in", Linear(17, 15));
    out = register_module("out", Linear(15, 5));
    in->to(at::kFloat);
    scale = register_parameter("scale", at::ones({1, 5}, at::kFloat));
  }
  at::Tensor forward(at::Tensor x) {
    return out(in(x.to(at::kFloat)).to(out->weight.scalar_type())) * scale;
  }
  Linear in = nullptr;
  Linear out = nullptr;
  at::Tensor scale;
};

// Elements of the flat buffer that parameters of these sizes share.
int64_t Padded(const std::vector<int64_t>& numels, int world) {
  return fsdp::FlatLayout(numels, /*element_bytes=*/4, world).padded_numel();
}

TEST(FsdpTest, PayloadIsThatOfTheFormula) {
  for (int size : {1, 3, 4}) {
    std::vector<OddNet> nets = MakeNets(size);
    comm::testing::RunRanks(size, [&](comm::Communicator& world) {
      auto counters = std::make_shared<comm::TrafficCounters>();
      comm::CountingCommunicator counting(SplitPrivate(world), counters);
      Fsdp fsdp(nets[world.rank()], counting);
      // Three kinds of Units: the model's own, a block's and that of its inner Linear.
      const int64_t root = Padded({17 * 15, 15, 15 * 5, 5}, size);
      const int64_t block = Padded({1, 15 * 7, 7, 7, 7}, size);
      const int64_t up = Padded({7 * 15}, size);
      const int64_t all = root + 2 * (block + up);
      for (int step = 0; step < 2; ++step) {
        counters->Reset();
        nets[world.rank()](at::ones({2, 17})).sum().backward();
        const comm::Traffic gathered = (*counters)[OperationKind::kAllGather];
        const comm::Traffic reduced = (*counters)[OperationKind::kReduceScatter];
        EXPECT_EQ(gathered.payload_bytes, 4 * (2 * all - root));
        EXPECT_EQ(gathered.operations, 2 * 5 - 1);
        EXPECT_EQ(reduced.payload_bytes, 4 * all);
        EXPECT_EQ(reduced.operations, 5);
        EXPECT_EQ(counters->total().operations, 14);
        EXPECT_EQ(fsdp.last_step().payload_bytes, counters->total().payload_bytes);
      }
    });
  }
}

TEST(FsdpTest, GivesTheOptimizerSlicesThatCoverEachParameterOnce) {
  std::vector<OddNet> nets = MakeNets(4);
  std::map<std::string, int64_t> expected;
  for (const auto& parameter : nets[0]->named_parameters()) {
    expected[parameter.key()] = parameter.value().numel();
  }
  std::mutex mutex;
  std::map<std::string, int64_t> found;
  comm::testing::RunRanks(4, [&](comm::Communicator& comm) {
    Fsdp fsdp(nets[comm.rank()], comm);
    std::lock_guard<std::mutex> lock(mutex);
    for (const NamedTensor& slice : fsdp.named_parameters()) {
      EXPECT_EQ(slice.tensor.dim(), 1);
      EXPECT_TRUE(slice.tensor.is_leaf() && slice.tensor.requires_grad());
      found[slice.name] += slice.tensor.numel();
    }
  });
  EXPECT_EQ(found, expected);
}

TEST(FsdpTest, StateIsVisitedAndUpdatedInFull) {
  std::vector<OddNet> nets = MakeNets(3);
  std::map<std::string, at::Tensor> expected;  // rank 0's
  for (const auto& each : nets[0]->named_parameters()) {
    expected[each.key()] = each.value().detach().clone();
  }
  for (const auto& each : nets[0]->named_buffers()) expected[each.key()] = each.value().clone();
  comm::testing::RunRanks(3, [&](comm::Communicator& comm) {
    Fsdp fsdp(nets[comm.rank()], comm);
    size_t visited = 0;
    fsdp.VisitState([&](const std::string& name, const at::Tensor& full) {
      ++visited;
      EXPECT_TRUE(full.equal(expected.at(name))) << name;
    });
    EXPECT_EQ(visited, expected.size());
    fsdp.UpdateState(
        [&](const std::string& name, at::Tensor full) { full.copy_(expected.at(name) * 2); });
    fsdp.VisitState([&](const std::string& name, const at::Tensor& full) {
      EXPECT_TRUE(full.equal(expected.at(name) * 2)) << name;
    });
  });
}

TEST(FsdpTest, EvaluatesBetweenStepsWithTheNewWeights) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Fsdp fsdp(net, comm);
    at::Tensor before;
    {
      at::NoGradGuard no_grad;
      before = net(at::ones({2, 17}));
    }
    net(at::ones({2, 17})).sum().backward();
    {
      at::NoGradGuard no_grad;
      for (const at::Tensor& slice : fsdp.parameters()) slice.sub_(slice.grad() * 0.1);
      EXPECT_LT(net(at::ones({2, 17})).sum().item<float>(), before.sum().item<float>());
    }
  });
}

// What `run` throws, or "" where it does not.
std::string ErrorOf(const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(FsdpTest, RefusesToGoOnAfterABackwardThatThrew) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Fsdp fsdp(net, comm);
    auto hook = net->blocks[0]->AddPreForwardHook([](const std::vector<at::Tensor*>& inputs) {
      inputs[0]->register_hook([](const at::Tensor&) { throw std::runtime_error("mine"); });
    });
    EXPECT_NE(ErrorOf([&] {
                net(at::ones({2, 17})).sum().backward();
              }).find("mine"),
              std::string::npos);
    hook.Remove();
    const std::string error = ErrorOf([&] { net(at::ones({2, 17})); });
    EXPECT_TRUE(error.find("ended with an exception") != std::string::npos ||
                error.find("aborted by rank") != std::string::npos)
        << error;
  });
}

TEST(FsdpTest, ABackwardAfterTheStrategyIsAnError) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    at::Tensor loss;
    {
      Fsdp fsdp(nets[comm.rank()], comm);
      loss = nets[comm.rank()](at::ones({2, 17})).sum();
    }
    EXPECT_NE(ErrorOf([&] { loss.backward(); }).find("has been destroyed"), std::string::npos);
    for (const at::Tensor& parameter : nets[comm.rank()]->parameters()) {
      EXPECT_NE(ErrorOf([&] { parameter.sum(); }).find("while an Fsdp has it sharded"),
                std::string::npos);
    }
  });
}

TEST(FsdpTest, TheModelIsUselessAfterItAndSaysSo) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    { Fsdp fsdp(net, comm); }
    EXPECT_NE(ErrorOf([&] {
                net(at::ones({2, 17}));
              }).find("has been destroyed"),
              std::string::npos);
    EXPECT_NE(ErrorOf([&] { Fsdp again(net, comm); }).find("while an Fsdp has it sharded"),
              std::string::npos);
  });
}

TEST(FsdpTest, RefusesNoModelAtAll) {
  comm::testing::RunRanks(1, [](comm::Communicator& comm) {
    EXPECT_NE(ErrorOf([&] { Fsdp fsdp(std::shared_ptr<torch::nn::Module>(), comm); }).find("null"),
              std::string::npos);
  });
}

struct Opaque {
  at::Tensor hidden;
};

class OpaqueImpl : public torch::nn::Module {
 public:
  OpaqueImpl() { linear = register_module("linear", torch::nn::Linear(3, 3)); }
  Opaque forward(at::Tensor x) { return {linear(x)}; }
  torch::nn::Linear linear = nullptr;
};

TEST(FsdpTest, RefusesAnOutputThatHooksCannotSee) {
  Unit<OpaqueImpl> unit;
  comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
    Fsdp fsdp(unit, comm);
    EXPECT_NE(ErrorOf([&] {
                unit(at::ones({1, 3}));
              }).find("returns no tensor"),
              std::string::npos);
  });
}

TEST(FsdpTest, DropsGradientsFromBefore) {
  std::vector<OddNet> nets = MakeNets(1);
  const at::Tensor x = at::ones({2, 17});
  nets[0](x).sum().backward();
  const at::Tensor expected = nets[0]->out->weight.grad().clone();
  comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
    Fsdp fsdp(nets[0], comm);
    nets[0](x).sum().backward();
    for (const NamedTensor& slice : fsdp.named_parameters()) {
      if (slice.name != "out.weight") continue;
      EXPECT_TRUE(slice.tensor.grad().allclose(expected.flatten()));
    }
  });
}

TEST(FsdpTest, AnUnusedUnitKeepsNoGradient) {
  std::vector<OddNet> nets = MakeNets(2);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    OddNet& net = nets[comm.rank()];
    Fsdp fsdp(net, comm);
    net->blocks.pop_back();
    net(at::ones({2, 17})).sum().backward();
    for (const NamedTensor& slice : fsdp.named_parameters()) {
      EXPECT_EQ(slice.tensor.grad().defined(), slice.name.rfind("block1", 0) != 0) << slice.name;
    }
  });
}

TEST(FsdpTest, ParametersHaveNoMemoryBetweenSteps) {
  for (Sharding sharding : {Sharding::kFull, Sharding::kGradOp, Sharding::kOptimizer}) {
    std::vector<OddNet> nets = MakeNets(2);
    comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
      OddNet& net = nets[comm.rank()];
      Fsdp fsdp(net, comm, {.sharding = sharding});
      net(at::ones({2, 17})).sum().backward();
      for (const at::Tensor& parameter : net->parameters()) {
        EXPECT_NE(ErrorOf([&] { parameter.sum(); }).find("while an Fsdp has it sharded"),
                  std::string::npos);
        EXPECT_NE(ErrorOf([&] { parameter.grad().sum(); }).find("gradients are those of"),
                  std::string::npos);
      }
    });
  }
}

TEST(FsdpTest, RefusesAModelThatIsNoUnit) {
  comm::testing::RunRanks(2, [](comm::Communicator& comm) {
    torch::nn::Linear linear(3, 4);
    try {
      Fsdp fsdp(linear, comm);
      ADD_FAILURE() << "did not throw";
    } catch (const StatusError& error) {
      EXPECT_NE(std::string(error.what()).find("is no parallel::Unit"), std::string::npos)
          << error.what();
    }
  });
}

TEST(FsdpTest, ShardsDtypesApart) {
  std::vector<Unit<MixedNetImpl>> nets;
  for (int rank = 0; rank < 3; ++rank) {
    torch::manual_seed(3);
    nets.emplace_back();
    nets.back()->out->to(at::kDouble);
  }
  const at::Tensor x = at::ones({2, 17});
  nets[0](x).sum().backward();
  std::map<std::string, at::Tensor> expected;
  for (const auto& each : nets[0]->named_parameters()) {
    expected[each.key()] = each.value().grad().clone();
  }
  comm::testing::RunRanks(3, [&](comm::Communicator& comm) {
    Fsdp fsdp(nets[comm.rank()], comm);
    nets[comm.rank()](x).sum().backward();
    for (const NamedTensor& slice : fsdp.named_parameters()) {
      EXPECT_EQ(slice.tensor.scalar_type(), expected.at(slice.name).scalar_type()) << slice.name;
      // Their sum over ranks is that of the whole gradient.
      at::Tensor sum = slice.tensor.grad().sum().to(at::kDouble);
      ThrowIfError(comm.AllReduce(sum, comm::ReduceOp::kSum).Wait());
      EXPECT_TRUE(sum.allclose(expected.at(slice.name).sum().to(at::kDouble), 1e-5, 1e-5))
          << slice.name;
    }
  });
}

TEST(FlatLayoutTest, SlicesCoverEveryParameterOnce) {
  const std::vector<int64_t> numels = {105, 7, 1, 0, 272, 3};
  for (int world : {1, 2, 3, 8, 50}) {
    const fsdp::FlatLayout layout(numels, /*element_bytes=*/4, world);
    EXPECT_EQ(layout.padded_numel(), layout.shard_numel() * world);
    EXPECT_EQ(layout.shard_numel() % 16, 0);
    for (size_t i = 0; i < numels.size(); ++i) {
      EXPECT_EQ(layout.offset(i) % 16, 0);
      int64_t next = 0;
      for (int rank = 0; rank < world; ++rank) {
        const fsdp::FlatLayout::Slice slice = layout.slice(i, rank);
        if (slice.numel == 0) continue;
        EXPECT_EQ(slice.in_parameter, next);
        EXPECT_EQ(rank * layout.shard_numel() + slice.in_shard,
                  layout.offset(i) + slice.in_parameter);
        EXPECT_LE(slice.in_shard + slice.numel, layout.shard_numel());
        next += slice.numel;
      }
      EXPECT_EQ(next, numels[i]);
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel
