#include "lockstep/parallel/recompute.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/grad_hook.h"
#include "lockstep/tools/trace/memory.h"

namespace lockstep::parallel {

// What BranchImpl returns.
struct Outputs {
  std::vector<at::Tensor> list;
  at::Tensor count;
  int calls = 0;
};

void ForEachTensor(Outputs& outputs, const std::function<void(at::Tensor&)>& visit) {
  for (at::Tensor& tensor : outputs.list) visit(tensor);
  visit(outputs.count);
}

namespace {

constexpr int64_t kDim = 5;

class InnerImpl : public torch::nn::Module {
 public:
  InnerImpl() { linear = register_module("linear", torch::nn::Linear(kDim, kDim)); }
  at::Tensor forward(at::Tensor x) {
    ++runs;
    return at::dropout(at::tanh(linear(x)), dropout, is_training());
  }
  torch::nn::Linear linear = nullptr;
  double dropout = 0;
  int runs = 0;
};
using Inner = Unit<InnerImpl>;

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(kDim));
    inner = register_module("inner", Inner());
    up = register_module("up", torch::nn::Linear(kDim, 3 * kDim));
    down = register_module("down", torch::nn::Linear(3 * kDim, kDim));
    frozen = register_parameter("frozen", at::full({kDim}, 0.5), /*requires_grad=*/false);
    unused = register_parameter("unused", at::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x, double scale) {
    ++runs;
    return x * frozen + scale * down(at::gelu(up(inner(norm(x)))));
  }
  torch::nn::BatchNorm1d norm = nullptr;
  Inner inner = nullptr;
  torch::nn::Linear up = nullptr;
  torch::nn::Linear down = nullptr;
  at::Tensor frozen, unused;
  int runs = 0;
};
using Block = Unit<BlockImpl>;

class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(int n) {
    register_module("blocks", blocks);
    for (int i = 0; i < n; ++i) blocks->push_back(Block());
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x, 0.7);
    return x;
  }
  torch::nn::ModuleList blocks;
};
using Net = Unit<NetImpl>;

at::Tensor Input(int seed = 0) {
  return at::sin(at::arange(4 * kDim, at::kDouble) * (1.3 + seed)).view({4, kDim});
}

Net MakeNet(double dropout = 0) {
  torch::manual_seed(3);
  Net net(3);
  net->to(at::kDouble);
  for (const auto& block : *net->blocks) block->as<Block>()->inner->dropout = dropout;
  return net;
}

bool AllBlocks(const NamedUnit& unit) {
  return unit.name.find("blocks.") == 0 && unit.name.find("inner") == std::string::npos;
}

void ExpectClose(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  if (!found.defined()) return;
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  if (found.numel() == 0) return;
  EXPECT_LE((found - expected).abs().max().item<double>(), 1e-12) << what;
}

// Gradients and buffers of two models that did the same.
void ExpectSameState(torch::nn::Module& found, torch::nn::Module& expected) {
  for (const auto& parameter : expected.named_parameters()) {
    ExpectClose(found.named_parameters()[parameter.key()].grad(), parameter.value().grad(),
                parameter.key());
  }
  for (const auto& buffer : expected.named_buffers()) {
    ExpectClose(found.named_buffers()[buffer.key()], buffer.value(), buffer.key());
  }
}

// The next random number, which shows the generator's state.
double NextRandom() { return at::rand({1}, at::kDouble).item<double>(); }

// Two steps of `net`; the input's gradient.
at::Tensor Train(Net& net, double* random = nullptr) {
  torch::manual_seed(11);
  at::Tensor x = Input().requires_grad_();
  for (int step = 0; step < 2; ++step) {
    (net(x).square().sum() + NextRandom() * net(x * 2).sum()).backward();
  }
  if (random != nullptr) *random = NextRandom();
  return x.grad();
}

class RecomputeTest : public ::testing::TestWithParam<double> {};

TEST_P(RecomputeTest, GivesTheGradientsBuffersAndRandomNumbersOfOneForward) {
  Net expected = MakeNet(GetParam());
  double expected_random = 0, random = 0;
  const at::Tensor expected_gradient = Train(expected, &expected_random);
  using Choice = std::function<bool(const NamedUnit&)>;
  for (const Choice& which :
       {Choice(AllBlocks), Choice([](const NamedUnit&) { return true; }),
        Choice([](const NamedUnit& unit) { return unit.name.empty(); }),
        Choice([](const NamedUnit& unit) { return unit.name == "blocks.1.inner"; })}) {
    Net net = MakeNet(GetParam());
    Recompute(*net, which);
    ExpectClose(Train(net, &random), expected_gradient, "input");
    ExpectSameState(*net, *expected);
    EXPECT_EQ(random, expected_random);
  }
}

INSTANTIATE_TEST_SUITE_P(Dropout, RecomputeTest, ::testing::Values(0.0, 0.4));

TEST(RecomputeTest, RunsForwardAgainInBackward) {
  Net net = MakeNet();
  Recompute(*net, AllBlocks);
  auto& block = *net->blocks[0]->as<Block>();
  int hooks = 0, inner_hooks = 0;
  auto pre = block.AddPreForwardHook([&](const auto&) { ++hooks; });
  auto post = block.AddPostForwardHook([&](const auto& outputs) {
    ++hooks;
    EXPECT_EQ(outputs[0]->requires_grad(), at::GradMode::is_enabled());
  });
  auto inner = block.inner->AddPreForwardHook([&](const auto&) { ++inner_hooks; });
  at::Tensor y = net(Input());
  EXPECT_EQ(std::make_tuple(block.runs, hooks, inner_hooks), std::make_tuple(1, 2, 1));
  y.sum().backward();
  EXPECT_EQ(std::make_tuple(block.runs, hooks, inner_hooks), std::make_tuple(2, 2, 2));
  {
    at::NoGradGuard no_grad;
    net(Input());
  }
  EXPECT_EQ(block.runs, 3);
  SetRecompute(block, false);
  net(Input()).sum().backward();
  EXPECT_EQ(block.runs, 4);
}

TEST(RecomputeTest, HooksOnParametersFireOnce) {
  Block block;
  block->to(at::kDouble);
  SetRecompute(*block, true);
  std::map<std::string, int> accumulated, arrived;
  std::vector<GradHook> hooks;
  for (auto& parameter : block->named_parameters()) {
    if (!parameter.value().requires_grad()) continue;
    hooks.emplace_back(parameter.value(),
                       [&accumulated, name = parameter.key()] { ++accumulated[name]; });
    parameter.value().register_hook([&arrived, name = parameter.key()](const at::Tensor& grad) {
      ++arrived[name];
      return grad.defined() ? grad * 2 : grad;
    });
  }
  (block->forward(Input(), 1).sum()).backward();
  for (auto& parameter : block->named_parameters()) {
    const int expected_fires = parameter.key() == "frozen" || parameter.key() == "unused" ? 0 : 1;
    EXPECT_EQ(accumulated[parameter.key()], expected_fires) << parameter.key();
    if (parameter.key() != "unused") {
      EXPECT_EQ(arrived[parameter.key()], expected_fires) << parameter.key();
    }
  }
  ExpectClose(block->down->bias.grad(), at::full({kDim}, 8.0, at::kDouble), "doubled once");
  EXPECT_FALSE(block->unused.grad().defined());
}

// Takes and returns all kinds of things.
class BranchImpl : public torch::nn::Module {
 public:
  BranchImpl() { weight = register_parameter("weight", at::full({3}, 2.0, at::kDouble)); }
  Outputs forward(std::vector<at::Tensor> xs, std::optional<at::Tensor> y,
                  const std::string& mode) {
    Outputs outputs;
    outputs.list = {xs[0] * weight, xs[1], (xs[0] * 3).detach(), at::Tensor(), xs[0].view({3, 1})};
    if (y) outputs.list.push_back(y->sin() * xs[1]);
    if (mode == "some twice") outputs.list.insert(outputs.list.end(), {outputs.list[0], xs[0]});
    outputs.count = at::arange(3);
    outputs.calls = ++calls;
    return outputs;
  }
  at::Tensor weight;
  int calls = 0;
};

TEST(RecomputeTest, TakesAndReturnsAnything) {
  std::vector<at::Tensor> gradients[2];
  for (bool recompute : {false, true}) {
    Unit<BranchImpl> branch;
    SetRecompute(*branch, recompute);
    at::Tensor a = at::full({3}, 0.5, at::kDouble).requires_grad_();
    at::Tensor b = at::full({3}, 0.7, at::kDouble);
    at::Tensor c = at::full({3}, 0.9, at::kDouble).requires_grad_();
    const Outputs outputs = branch->forward({a, b}, c, "some twice");
    EXPECT_EQ(outputs.calls, 1);
    EXPECT_TRUE(outputs.count.equal(at::arange(3)));
    EXPECT_FALSE(outputs.count.requires_grad());
    EXPECT_FALSE(outputs.list[3].defined());
    ASSERT_EQ(outputs.list.size(), 8);
    EXPECT_TRUE(a.is_leaf());  // though it is returned
    EXPECT_FALSE(b.requires_grad());
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (size_t i : {0, 1, 2, 4, 5, 6, 7})
      sum = sum + (outputs.list[i].view({3}) * (1.0 + i)).sum();
    sum.backward();
    gradients[recompute] = {a.grad(), b.grad(), c.grad(), branch->weight.grad()};
    EXPECT_EQ(branch->calls, recompute ? 2 : 1);
  }
  for (size_t i = 0; i < 4; ++i) {
    ExpectClose(gradients[1][i], gradients[0][i], std::to_string(i));
  }
}

class ReturnsLeavesImpl : public torch::nn::Module {
 public:
  ReturnsLeavesImpl() { weight = register_parameter("weight", at::full({3}, 2.0, at::kDouble)); }
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x) { return {x, weight}; }
  at::Tensor weight;
};

TEST(RecomputeTest, ReturnsLeavesThatNothingElseUses) {
  Unit<ReturnsLeavesImpl> unit;
  SetRecompute(*unit, true);
  at::Tensor x = at::full({3}, 0.5, at::kDouble).requires_grad_();
  const auto [y, weight] = unit->forward(x);
  (y * 3 + weight * 4).sum().backward();
  ExpectClose(x.grad(), at::full({3}, 3.0, at::kDouble), "x");
  ExpectClose(unit->weight.grad(), at::full({3}, 4.0, at::kDouble), "weight");
}

TEST(RecomputeTest, GradientsGoToInputsOrToParametersAlone) {
  Inner inner;
  inner->to(at::kDouble);
  SetRecompute(*inner, true);
  inner(Input()).sum().backward();  // no input requires one
  EXPECT_TRUE(inner->linear->weight.grad().defined());

  inner->zero_grad();
  for (at::Tensor& parameter : inner->parameters()) parameter.requires_grad_(false);
  at::Tensor x = Input().requires_grad_();
  inner(x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(inner->linear->weight.grad().defined());

  EXPECT_FALSE(inner(Input()).requires_grad());
}

TEST(RecomputeTest, ServesAutogradGradAndRetainedGraphs) {
  Inner inner;
  inner->to(at::kDouble);
  at::Tensor x = Input().requires_grad_();
  const at::Tensor expected = torch::autograd::grad({inner(x).sum()}, {x, inner->linear->bias})[1];
  SetRecompute(*inner, true);
  at::Tensor y = inner(x).sum();
  for (int i = 0; i < 2; ++i) {
    ExpectClose(torch::autograd::grad({y}, {inner->linear->bias}, {}, /*retain_graph=*/true)[0],
                expected, "bias");
  }
  EXPECT_FALSE(x.grad().defined());
  y.backward();
  ExpectClose(inner->linear->bias.grad(), expected, "bias");
  EXPECT_THROW(y.backward(), c10::Error);
  EXPECT_THROW(torch::autograd::grad({inner(x).sum()}, {x}, {}, true, /*create_graph=*/true),
               c10::Error);
}

TEST(RecomputeTest, RunsInTheAutocastStateOfTheFirstForward) {
  std::vector<at::Tensor> gradients[2];
  for (bool recompute : {false, true}) {
    torch::manual_seed(1);
    Inner inner;
    SetRecompute(*inner, recompute);
    const at::Tensor x = Input().to(at::kFloat);
    at::Tensor y;
    {
      const Autocast autocast(at::kCPU, at::kBFloat16);
      y = inner(x) + inner(x);
    }
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    gradients[recompute] = {inner->linear->weight.grad(), inner->linear->bias.grad()};
  }
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(gradients[1][i].defined());
    // The bias' gradient is summed in bf16, once or twice.
    EXPECT_LE((gradients[1][i] - gradients[0][i]).abs().max().item<double>(),
              0.02 * gradients[0][i].abs().max().item<double>());
  }
}

TEST(RecomputeTest, OutlivesItsModelAndItsParametersMemory) {
  at::Tensor y, weight, expected;
  {
    Inner inner;
    inner->to(at::kDouble);
    weight = inner->linear->weight;
    inner(Input()).sum().backward();
    expected = weight.grad();
    weight.mutable_grad() = at::Tensor();
    SetRecompute(*inner, true);
    y = inner(Input());
  }
  // As FSDP does: the memory goes between forward and backward, and comes back.
  at::Tensor& data = weight;
  const at::Tensor kept = data.detach().clone();
  c10::StorageImpl* storage = data.storage().unsafeGetStorageImpl();
  at::DataPtr memory = storage->set_data_ptr(at::DataPtr());
  EXPECT_EQ(data.const_data_ptr(), nullptr);
  storage->set_data_ptr(std::move(memory));
  y.sum().backward();
  ExpectClose(weight.grad(), expected, "weight");
}

class SecondRunThrowsImpl : public InnerImpl {
 public:
  at::Tensor forward(at::Tensor x) {
    x = at::dropout(InnerImpl::forward(x), 0.5, true);
    if (throw_at == runs) throw std::runtime_error("out of luck");
    return x;
  }
  int throw_at = 0;
};

TEST(RecomputeTest, AnExceptionLeavesAllAsItWas) {
  Unit<SecondRunThrowsImpl> unit;
  unit->to(at::kDouble);
  SetRecompute(*unit, true);
  for (int run : {1, 2}) {
    torch::manual_seed(5);
    unit->runs = 0;
    unit->throw_at = run;
    try {
      at::Tensor y = unit(Input()).sum();
      EXPECT_EQ(run, 2);
      const double random = NextRandom();
      torch::manual_seed(5);
      at::dropout(at::ones({4, kDim}), 0.5, true);
      EXPECT_EQ(NextRandom(), random);
      y.backward();
      ADD_FAILURE() << "no exception";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("out of luck"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(at::GradMode::is_enabled());
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  }
  const double after = NextRandom();
  torch::manual_seed(5);
  at::dropout(at::ones({4, kDim}), 0.5, true);
  NextRandom();
  EXPECT_EQ(NextRandom(), after);
  unit->throw_at = 0;
  unit(Input()).sum().backward();
  EXPECT_TRUE(unit->linear->weight.grad().defined());
}

class BadImpl : public InnerImpl {
 public:
  at::Tensor forward(at::Tensor x, const std::string& how) {
    if (how == "in place") x.mul_(2);
    at::Tensor y = InnerImpl::forward(x);
    if (how == "other tensor") y = y * other;
    if (how == "other result") y = y * result;
    if (how == "other shape" && runs == 2) y = y.view({-1});
    return y;
  }
  at::Tensor other = at::full({kDim}, 1.5, at::kDouble).requires_grad_();
  at::Tensor result = linear->bias.to(at::kDouble).sin();
};

std::string MessageOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(RecomputeTest, SaysWhatCannotBeRecomputed) {
  const std::map<std::string, std::string> expected = {
      {"in place", "changes tensor 0 of its arguments in place"},
      {"other tensor", "uses a tensor of shape [5] that requires a gradient and is neither"},
      {"other result", "uses the result of SinBackward0, computed outside of it"},
      {"other shape", "was of shape [4, 5] and double, and run again in backward of shape [20]"}};
  for (const auto& [how, message] : expected) {
    Unit<BadImpl> bad;
    bad->to(at::kDouble);
    SetRecompute(*bad, true);
    const std::string found =
        MessageOf([&, &how = how] { bad->forward(Input(), how).sum().backward(); });
    EXPECT_NE(found.find(message), std::string::npos) << found;
  }
  Net net = MakeNet();
  EXPECT_NE(MessageOf([&] {
              Recompute(*net, [](const NamedUnit&) { return false; });
            }).find("no Unit of"),
            std::string::npos);
}

// Bytes that forward leaves for backward, and the peak of a step, above what was there before it.
std::pair<int64_t, int64_t> ActivationBytes(bool recompute) {
  torch::manual_seed(3);
  Net net(8);
  if (recompute) Recompute(*net, AllBlocks);
  const at::Tensor x = at::rand({1024, kDim});
  net(x).sum().backward();  // gradients are there from now on
  const int64_t before = trace::GetMemory().live;
  trace::ResetMemoryPeak();
  const at::Tensor loss = net(x).sum();
  const int64_t kept = trace::GetMemory().live - before;
  loss.backward();
  return {kept, trace::GetMemory().peak - before};
}

TEST(RecomputeTest, KeepsInputsAlone) {
  trace::InstallCountingAllocator();
  const auto [kept, peak] = ActivationBytes(/*recompute=*/false);
  const auto [less_kept, lower_peak] = ActivationBytes(/*recompute=*/true);
  // A block keeps its input, of kDim columns; without recomputation also the norm's, the tanh's,
  // the dropout's and products' operands, and twice 3 * kDim for the gelu between the linears.
  const int64_t inputs = 8 * 1024 * kDim * int64_t{sizeof(float)};
  EXPECT_GT(kept, 8 * inputs);
  EXPECT_LT(less_kept, inputs * 5 / 4);
  EXPECT_LT(lower_peak, peak / 3);
}

TEST(RecomputeTest, AnInputChangedAfterwardsIsNoticed) {
  Inner inner;
  inner->to(at::kDouble);
  SetRecompute(*inner, true);
  at::Tensor x = Input();
  at::Tensor y = inner(x).sum();
  x.add_(1);
  EXPECT_THROW(y.backward(), c10::Error);
}

}  // namespace
}  // namespace lockstep::parallel
