#include "lockstep/parallel/unit.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

namespace lockstep::parallel {

struct Pair {
  at::Tensor first;
  at::Tensor second;
  int count = 0;
};

void ForEachTensor(Pair& pair, const std::function<void(at::Tensor&)>& visit) {
  visit(pair.first);
  visit(pair.second);
}

namespace {

using Linear = Unit<torch::nn::LinearImpl>;

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int64_t dim) { linear = register_module("linear", Linear(dim, dim)); }
  at::Tensor forward(at::Tensor x) { return x + linear(x); }
  Linear linear = nullptr;
};
using Block = Unit<BlockImpl>;

class ManyImpl : public torch::nn::Module {
 public:
  std::tuple<at::Tensor, int, std::vector<at::Tensor>> forward(const at::Tensor& a, at::Tensor& b,
                                                               int n, std::optional<at::Tensor> c) {
    b = b + n;
    return {a + b, n, {a, c.value_or(a)}};
  }
};

class StructImpl : public torch::nn::Module {
 public:
  Pair forward(Pair pair) const { return {pair.second, pair.first, pair.count + 1}; }
};

TEST(UnitTest, RunsHooksHoweverForwardIsCalled) {
  Block block(3);
  std::vector<std::string> calls;
  HookHandle pre = block->AddPreForwardHook([&](const auto&) { calls.push_back("pre"); });
  HookHandle post = block->AddPostForwardHook([&](const auto&) { calls.push_back("post"); });
  const at::Tensor x = at::ones({2, 3});
  const std::vector<std::string> once = {"pre", "post"};

  block(x);
  EXPECT_EQ(calls, once);
  calls.clear();
  block->forward(x);
  EXPECT_EQ(calls, once);
  calls.clear();
  torch::nn::Sequential sequential(block, torch::nn::Linear(3, 3));
  sequential->forward(x);
  EXPECT_EQ(calls, once);
  calls.clear();
  Block copy = block;
  copy(x);
  EXPECT_EQ(calls, once);
  calls.clear();
  pre.Remove();
  post = HookHandle();
  block(x);
  EXPECT_TRUE(calls.empty());
}

TEST(UnitTest, OrdersHooks) {
  Block block(3);
  std::vector<int> calls;
  std::vector<HookHandle> handles;
  for (int i : {1, 2}) {
    handles.push_back(block->AddPreForwardHook([&calls, i](const auto&) { calls.push_back(i); }));
    handles.push_back(block->AddPostForwardHook([&calls, i](const auto&) { calls.push_back(-i); }));
  }
  block(at::ones({1, 3}));
  EXPECT_EQ(calls, (std::vector<int>{1, 2, -2, -1}));
}

TEST(UnitTest, HooksReplaceInputsAndOutputs) {
  Block block(3);
  const at::Tensor x = at::ones({1, 3});
  const at::Tensor expected = block(x * 2) * 3;
  auto pre = block->AddPreForwardHook(
      [](const std::vector<at::Tensor*>& inputs) { *inputs[0] = *inputs[0] * 2; });
  auto post = block->AddPostForwardHook(
      [](const std::vector<at::Tensor*>& outputs) { *outputs[0] = *outputs[0] * 3; });
  EXPECT_TRUE(block(x).equal(expected));
  EXPECT_TRUE(x.equal(at::ones({1, 3})));
}

TEST(UnitTest, FindsTensorsInArgumentsAndResults) {
  Unit<ManyImpl> many;
  size_t inputs = 0, outputs = 0;
  auto pre = many->AddPreForwardHook([&](const auto& tensors) { inputs = tensors.size(); });
  auto post = many->AddPostForwardHook([&](const auto& tensors) { outputs = tensors.size(); });
  at::Tensor b = at::ones({2});
  auto [sum, n, list] = many->forward(at::ones({2}), b, 5, std::nullopt);
  EXPECT_EQ(inputs, 2);
  EXPECT_EQ(outputs, 3);
  EXPECT_EQ(n, 5);
  EXPECT_TRUE(b.equal(at::ones({2}) * 6));  // an out-parameter reaches the caller
  EXPECT_TRUE(sum.equal(at::ones({2}) * 7));
}

TEST(UnitTest, TakesStructsThatSayHow) {
  Unit<StructImpl> unit;
  size_t inputs = 0;
  auto pre = unit->AddPreForwardHook([&](const auto& tensors) { inputs = tensors.size(); });
  const Pair result = unit->forward({at::ones({1}), at::ones({2}), 1});
  EXPECT_EQ(inputs, 2);
  EXPECT_EQ(result.count, 2);
  EXPECT_EQ(result.first.numel(), 2);
}

TEST(UnitTest, NamesInTheStateDictAreThoseOfImpl) {
  Block block(3);
  std::vector<std::string> names;
  for (const auto& parameter : block->named_parameters()) names.push_back(parameter.key());
  EXPECT_EQ(names, (std::vector<std::string>{"linear.weight", "linear.bias"}));
}

TEST(UnitTest, FindsUnitsOuterFirstAndOnce) {
  torch::nn::ModuleList blocks;
  Block shared(3);
  blocks->push_back(shared);
  blocks->push_back(Block(3));
  blocks->push_back(shared);
  std::vector<std::string> names;
  for (const NamedUnit& unit : FindUnits(*blocks)) names.push_back(unit.name);
  EXPECT_EQ(names, (std::vector<std::string>{"0", "0.linear", "1", "1.linear"}));
  EXPECT_EQ(FindUnits(*shared)[0].name, "");
  EXPECT_EQ(&FindUnits(*shared)[0].unit->module(), shared.get());
}

TEST(UnitTest, AHookMayRemoveItself) {
  Block block(3);
  int calls = 0;
  HookHandle once;
  once = block->AddPreForwardHook([&](const auto&) {
    ++calls;
    once.Remove();
  });
  block(at::ones({1, 3}));
  block(at::ones({1, 3}));
  EXPECT_EQ(calls, 1);
}

TEST(UnitTest, AHandleMayOutliveItsModule) {
  HookHandle handle;
  {
    Block block(3);
    handle = block->AddPreForwardHook([](const auto&) {});
  }
  handle.Remove();
}

}  // namespace
}  // namespace lockstep::parallel
