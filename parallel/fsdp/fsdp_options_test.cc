#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/counting.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/fsdp/flat_layout.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

using comm::OperationKind;
using testing::MakeNets;
using testing::OddNet;

testing::StrategyFactory With(FsdpOptions options) {
  return [options](std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm) {
    return std::make_unique<Fsdp>(std::move(model), comm, options);
  };
}

testing::ParityCase OddCase() {
  testing::ParityCase c = {.name = "odd", .sample_shape = {17}, .classes = 5};
  c.make = [] {
    OddNet net(/*blocks=*/2);
    // Backward needs the frozen `down` after the last trainable gradient of its Unit.
    for (const at::Tensor& parameter : net->blocks[1]->down->parameters()) {
      parameter.set_requires_grad(false);
    }
    return testing::ParityModel{net.ptr(), [net](at::Tensor x) mutable { return net(x); }};
  };
  return c;
}

const std::map<std::string, FsdpOptions>& Variants() {
  static const auto& variants = *new std::map<std::string, FsdpOptions>{
      {"defaults", {}},
      {"whole until backward", {.reshard_after_forward = false}},
      {"zero2", {.sharding = Sharding::kGradOp}},
      {"zero1", {.sharding = Sharding::kOptimizer}},
      {"offload", {.cpu_offload = true}},
      {"zero2 with offload", {.sharding = Sharding::kGradOp, .cpu_offload = true}},
      {"zero1 with offload", {.sharding = Sharding::kOptimizer, .cpu_offload = true}},
      {"no prefetch", {.prefetch = false}},
      {"reducing under NoSync", {.no_sync = NoSyncGradients::kReduced}},
      {"zero1 reducing under NoSync",
       {.sharding = Sharding::kOptimizer, .no_sync = NoSyncGradients::kReduced}},
      {"debug", {.debug = true}},
  };
  return variants;
}

TEST(FsdpOptionsTest, EveryOptionEqualsOneProcess) {
  std::map<std::string, testing::StrategyFactory> factories;
  for (const auto& [name, options] : Variants()) factories[name] = With(options);
  testing::ParityCase c = OddCase();
  testing::ExpectParityOnThreadsOf(c, factories, {1, 2, 3});
  c.micro_steps = 3;
  c.clip_norm = 0.5;
  testing::ExpectParityOnThreadsOf(c, factories, {2, 3});
}

TEST(FsdpOptionsTest, SmallerGroupsEqualOneProcess) {
  std::map<std::string, testing::StrategyFactory> factories = {
      {"resharded over 2", With({.reshard_size = 2})},
      {"hybrid", With({.shard_size = 2})},
      {"hybrid zero2", With({.sharding = Sharding::kGradOp, .shard_size = 2})},
      {"hybrid zero1", With({.sharding = Sharding::kOptimizer, .shard_size = 2})},
      {"hybrid, kept whole on each rank", With({.reshard_size = 1, .shard_size = 2})},
      {"replicas alone", With({.shard_size = 1})},
  };
  testing::ParityCase c = OddCase();
  testing::ExpectParityOnThreadsOf(c, factories, {4, 8});
  c.micro_steps = 2;
  c.clip_norm = 0.5;
  testing::ExpectParityOnThreadsOf(c, factories, {4});
}

TEST(FsdpOptionsTest, RefusesSizesThatDoNotDivide) {
  std::vector<OddNet> nets = MakeNets(4);
  comm::testing::RunRanks(4, [&](comm::Communicator& comm) {
    const std::vector<std::pair<FsdpOptions, std::string>> wrong = {
        {{.shard_size = 3}, "shard_size is 3, which does not divide the number of ranks, 4"},
        {{.shard_size = -1}, "shard_size is -1"},
        {{.reshard_size = 4, .shard_size = 2}, "reshard_size is 4"},
        {{.reshard_after_forward = false, .reshard_size = 2}, "needs reshard_after_forward"},
    };
    for (const auto& [options, message] : wrong) {
      try {
        Fsdp fsdp(nets[comm.rank()], comm, options);
        ADD_FAILURE() << message;
      } catch (const StatusError& error) {
        EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
      }
    }
  });
}

// Elements of the flat buffers of OddNet's three kinds of Units: its own, a block's, `up`'s.
struct Sizes {
  explicit Sizes(int world) {
    const auto padded = [world](const std::vector<int64_t>& numels) {
      return fsdp::FlatLayout(numels, /*element_bytes=*/4, world).padded_numel();
    };
    root = padded({17 * 15, 15, 15 * 5, 5});
    all = root + 2 * (padded({1, 15 * 7, 7, 7, 7}) + padded({7 * 15}));
  }
  int64_t root, all;
};

// What a step of `micro_steps` backwards, all but the last under NoSync, communicates in its second
// round.
std::pair<comm::Traffic, comm::Traffic> TrafficOf(FsdpOptions options, int size, int micro_steps) {
  std::vector<OddNet> nets = MakeNets(size);
  std::pair<comm::Traffic, comm::Traffic> traffic;
  comm::testing::RunRanks(size, [&](comm::Communicator& world) {
    auto counters = std::make_shared<comm::TrafficCounters>();
    comm::CountingCommunicator counting(SplitPrivate(world), counters);
    Fsdp fsdp(nets[world.rank()], counting, options);
    for (int step = 0; step < 2; ++step) {
      counters->Reset();
      for (int micro = 0; micro < micro_steps; ++micro) {
        std::optional<Strategy::NoSyncScope> no_sync;
        if (micro + 1 < micro_steps) no_sync.emplace(fsdp);
        nets[world.rank()](at::ones({2, 17})).sum().backward();
      }
    }
    if (world.rank() != 0) return;
    traffic = {(*counters)[OperationKind::kAllGather], (*counters)[OperationKind::kReduceScatter]};
  });
  return traffic;
}

TEST(FsdpOptionsTest, PayloadsAreThoseOfTheFormulas) {
  for (int size : {1, 2, 3}) {
    const auto [root, all] = Sizes(size);
    const FsdpOptions kept = {.reshard_after_forward = false};
    const FsdpOptions zero2 = {.sharding = Sharding::kGradOp};
    const FsdpOptions zero1 = {.sharding = Sharding::kOptimizer};
    const FsdpOptions reduced = {.no_sync = NoSyncGradients::kReduced};
    for (bool prefetch : {true, false}) {
      for (int micro_steps : {1, 3}) {
        const auto expect = [&](FsdpOptions options, int64_t gathered, int64_t reduced) {
          options.prefetch = prefetch;
          const auto [gathers, reduces] = TrafficOf(options, size, micro_steps);
          EXPECT_EQ(gathers.payload_bytes, 4 * gathered);
          EXPECT_EQ(reduces.payload_bytes, 4 * reduced);
        };
        expect({}, micro_steps * (2 * all - root), all);
        expect(reduced, micro_steps * (2 * all - root), micro_steps * all);
        for (const FsdpOptions& options : {kept, zero2, zero1}) expect(options, all, all);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel
