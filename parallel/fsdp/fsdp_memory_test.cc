// Memory of a rank, counted, against the formulas of fsdp.h and of the ZeRO paper. Ranks are
// processes, so that each counts its own.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/mpi/gtest_main.h"
#include "lockstep/comm/mpi/mpi_communicator.h"
#include "lockstep/parallel/fsdp/flat_layout.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/fsdp/fsdp_build_scope.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/memory.h"

namespace lockstep::parallel {
namespace {

using testing::Linear;
using trace::Index;
using trace::MemoryCategory;

constexpr int64_t kWidth = 128;
constexpr int kBlocks = 5;

// Wide enough for blocks to outweigh what else there is.
class WideBlockImpl : public torch::nn::Module {
 public:
  WideBlockImpl() {
    first = register_module("first", torch::nn::Linear(kWidth, 2 * kWidth));
    second = register_module("second", torch::nn::Linear(2 * kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) { return x + second(at::tanh(first(x))); }
  torch::nn::Linear first = nullptr;
  torch::nn::Linear second = nullptr;
};

class WideNetImpl : public torch::nn::Module {
 public:
  WideNetImpl() {
    in = register_module("in", torch::nn::Linear(kWidth, kWidth));
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Unit<WideBlockImpl>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    for (auto& block : blocks) x = block(x);
    return x;
  }
  torch::nn::Linear in = nullptr;
  std::vector<Unit<WideBlockImpl>> blocks;
};
using WideNet = Unit<WideNetImpl>;

// Bytes in f32 of the model's flat buffers over `ranks`.
struct Bytes {
  explicit Bytes(int ranks) {
    const auto padded = [ranks](const std::vector<int64_t>& numels) {
      return 4 * fsdp::FlatLayout(numels, /*element_bytes=*/4, ranks).padded_numel();
    };
    root = padded({kWidth * kWidth, kWidth});
    block = padded({2 * kWidth * kWidth, 2 * kWidth, 2 * kWidth * kWidth, kWidth});
    all = root + kBlocks * block;
  }
  int64_t root, block, all;
};

comm::Communicator& World() {
  static auto& world = *ValueOrThrow(comm::mpi::Create(comm::mpi::TestWorld())).release();
  return world;
}

int64_t Live(MemoryCategory category) {
  return trace::GetMemory().live_by_category[Index(category)];
}

// A communicator lets go of its tensors a moment after the Work is done.
void ExpectSettles(MemoryCategory category, int64_t bytes) {
  for (int i = 0; i < 2000 && Live(category) != bytes; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(Live(category), bytes) << trace::MemoryCategoryName(category);
}

void Step(WideNet& net, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  at::Tensor loss;
  {
    trace::MemoryScope scope(MemoryCategory::kActivations);
    loss = net(at::ones({2, kWidth})).square().mean();
  }
  loss.backward();
  optimizer.step();
}

class FsdpMemoryTest : public ::testing::TestWithParam<Sharding> {
 protected:
  static void SetUpTestSuite() { trace::InstallCountingAllocator(); }
};

TEST_P(FsdpMemoryTest, PersistentBytesAreThoseOfTheFormula) {
  const Sharding sharding = GetParam();
  const int ranks = World().size();
  const Bytes bytes(ranks);
  const int64_t parameters_before = Live(MemoryCategory::kParameters);
  const int64_t gradients_before = Live(MemoryCategory::kGradients);
  const int64_t unsharded_before = Live(MemoryCategory::kUnsharded);
  WideNet net;
  Fsdp fsdp(net, World(), {.sharding = sharding});
  const int64_t optimizer_before = trace::GetMemory().live;
  optim::FusedAdamW optimizer(fsdp.named_parameters());
  const int64_t optimizer_bytes = trace::GetMemory().live - optimizer_before;
  for (int step = 0; step < 3; ++step) Step(net, optimizer);

  const bool whole_parameters = sharding != Sharding::kFull;
  const bool whole_gradients = sharding == Sharding::kOptimizer;
  ExpectSettles(MemoryCategory::kParameters,
                parameters_before + (whole_parameters ? bytes.all : bytes.all / ranks));
  ExpectSettles(MemoryCategory::kGradients,
                gradients_before + (whole_gradients ? bytes.all : bytes.all / ranks));
  ExpectSettles(MemoryCategory::kUnsharded, unsharded_before);
  // Two moments of what the rank has, without padding, and a step count a parameter.
  int64_t mine = 0;
  for (const at::Tensor& slice : fsdp.parameters()) mine += static_cast<int64_t>(slice.nbytes());
  EXPECT_GE(optimizer_bytes, 2 * mine);
  EXPECT_LE(optimizer_bytes, 2 * mine + 64 * static_cast<int64_t>(fsdp.parameters().size()));
  EXPECT_LE(mine, bytes.all / ranks);
}

TEST_P(FsdpMemoryTest, PeaksAreBounded) {
  const Sharding sharding = GetParam();
  const int ranks = World().size();
  const Bytes bytes(ranks);
  WideNet net;
  Fsdp fsdp(net, World(), {.sharding = sharding});
  optim::FusedAdamW optimizer(fsdp.named_parameters());
  for (int step = 0; step < 3; ++step) {  // the second and third prefetch
    const int64_t unsharded_before = Live(MemoryCategory::kUnsharded);
    const int64_t gradients_before = Live(MemoryCategory::kGradients);
    trace::ResetMemoryPeak();
    Step(net, optimizer);
    const trace::MemorySnapshot memory = trace::GetMemory();
    const int64_t unsharded =
        memory.peak_by_category[Index(MemoryCategory::kUnsharded)] - unsharded_before;
    EXPECT_LE(unsharded, sharding == Sharding::kFull ? bytes.root + 2 * bytes.block : 0);
    if (sharding == Sharding::kFull && step > 0) {
      EXPECT_GT(unsharded, bytes.root + bytes.block);
    }
    const int64_t gradients = memory.peak_by_category[Index(MemoryCategory::kGradients)] -
                              (sharding == Sharding::kOptimizer && step > 0 ? 0 : gradients_before);
    EXPECT_LE(gradients, sharding == Sharding::kOptimizer ? bytes.all + gradients_before
                                                          : bytes.all / ranks + 2 * bytes.block);
  }
}

TEST_P(FsdpMemoryTest, BuildingNeverHoldsTheModel) {
  const int ranks = World().size();
  const Bytes bytes(ranks);
  const int64_t before = trace::GetMemory().live;
  trace::ResetMemoryPeak();
  FsdpBuildScope scope(World(), {.sharding = GetParam()});
  WideNet net;
  Fsdp fsdp(net, scope);
  const int64_t kept = GetParam() == Sharding::kFull ? bytes.all / ranks : bytes.all;
  EXPECT_LE(trace::GetMemory().live - before, kept + 4096);
  // What was kept when the last block was there in full, that block, and the model's own.
  EXPECT_LE(trace::GetMemory().peak - before, kept + bytes.block + bytes.root);
}

INSTANTIATE_TEST_SUITE_P(Shardings, FsdpMemoryTest,
                         ::testing::Values(Sharding::kFull, Sharding::kGradOp,
                                           Sharding::kOptimizer),
                         [](const auto& info) {
                           return info.param == Sharding::kFull     ? "Full"
                                  : info.param == Sharding::kGradOp ? "GradOp"
                                                                    : "Optimizer";
                         });

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident * 4096;
}

TEST(FsdpSoakTest, ManySteps) {
  const int steps = std::getenv("LOCKSTEP_SOAK") != nullptr ? 100'000 : 2'000;
  testing::OddNet net(/*blocks=*/2);
  Fsdp fsdp(net, World());
  optim::FusedAdamW optimizer(fsdp.named_parameters());
  int64_t early = 0;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    net(at::ones({2, 17})).square().mean().backward();
    fsdp.ClipGradNorm(1.0);
    optimizer.step();
    if (step == steps / 4) early = ResidentBytes();
  }
  EXPECT_LT(ResidentBytes() - early, 2 << 20);
}

}  // namespace
}  // namespace lockstep::parallel
