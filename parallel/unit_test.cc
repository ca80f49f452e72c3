#include "lockstep/parallel/unit.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
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

// Collects what it is told.
class Recorder : public UnitObserver {
 public:
  void Built(UnitModule& unit) override {
    units.push_back(&unit);
    std::string names;
    for (const auto& parameter : unit.module().named_parameters()) names += parameter.key() + " ";
    parameters.push_back(names);
    found.push_back(FindUnits(unit.module()).size());
  }
  std::vector<UnitModule*> units;
  std::vector<std::string> parameters;
  std::vector<size_t> found;
};

TEST(UnitObserverTest, IsToldOfCompleteUnitsInnerFirst) {
  Recorder recorder;
  {
    UnitObserverScope scope(&recorder);
    Block block(3);
    EXPECT_EQ(recorder.units, (std::vector<UnitModule*>{block->linear.get(), block.get()}));
    const Block same = block;  // no construction
  }
  EXPECT_EQ(recorder.parameters,
            (std::vector<std::string>{"weight bias ", "linear.weight linear.bias "}));
  EXPECT_EQ(recorder.found, (std::vector<size_t>{1, 2}));
  Block unseen(3);
  EXPECT_EQ(recorder.units.size(), 2);
}

TEST(UnitObserverTest, ScopesNest) {
  Recorder outer, inner;
  UnitObserverScope outer_scope(&outer);
  {
    UnitObserverScope inner_scope(&inner);
    Linear linear(1, 1);
    UnitObserverScope silence(nullptr);
    Linear unseen(1, 1);
  }
  EXPECT_EQ(inner.units.size(), 1);
  EXPECT_TRUE(outer.units.empty());
  Linear linear(1, 1);
  EXPECT_EQ(outer.units.size(), 1);
}

class ManyWaysImpl : public torch::nn::Module {
 public:
  ManyWaysImpl() = default;
  explicit ManyWaysImpl(std::string name, int n = 2) : made(name + std::to_string(n)) {}
  ManyWaysImpl(std::unique_ptr<int> n, int& counter) : made(std::to_string(*n)) { ++counter; }
  int forward(int n) { return n; }
  std::string made = "default";
};
using ManyWays = Unit<ManyWaysImpl>;

TEST(UnitObserverTest, SeesEveryWayToConstruct) {
  Recorder recorder;
  UnitObserverScope scope(&recorder);
  std::vector<ManyWays> units;
  units.emplace_back();
  units.emplace_back("a");
  units.emplace_back("b", 3);
  int counter = 0;
  units.emplace_back(std::make_unique<int>(4), counter);
  units.emplace_back(std::make_shared<Hooked<ManyWaysImpl>>("c"));
  units.emplace_back(std::make_shared<Hooked<ManyWaysImpl>>(*units[2]));
  ManyWays none = nullptr;
  std::vector<std::string> made;
  std::vector<UnitModule*> expected;
  for (ManyWays& unit : units) {
    made.push_back(unit->made);
    expected.push_back(unit.get());
  }
  EXPECT_EQ(made, (std::vector<std::string>{"default", "a2", "b3", "4", "c2", "b3"}));
  EXPECT_EQ(recorder.units, expected);
  EXPECT_EQ(counter, 1);
  static_assert(!std::is_convertible_v<std::string, Hooked<ManyWaysImpl>>);
}

TEST(UnitObserverTest, WhatItThrowsTheConstructorThrows) {
  class Refuse : public UnitObserver {
   public:
    void Built(UnitModule&) override { throw std::runtime_error("no more"); }
  } refuse;
  UnitObserverScope scope(&refuse);
  EXPECT_THROW(Block(3), std::runtime_error);
}

class CloneableImpl : public torch::nn::Cloneable<CloneableImpl> {
 public:
  CloneableImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", Linear(3, 3));
    scale = register_parameter("scale", at::ones({3}));
  }
  at::Tensor forward(at::Tensor x) { return linear(x) * scale; }
  Linear linear = nullptr;
  at::Tensor scale;
};

TEST(UnitTest, ClonesAreUnitsWithoutHooks) {
  Unit<CloneableImpl> unit;
  int calls = 0;
  auto outer = unit->AddPreForwardHook([&](const auto&) { ++calls; });
  auto inner = unit->linear->AddPreForwardHook([&](const auto&) { ++calls; });
  Recorder recorder;
  std::shared_ptr<torch::nn::Module> cloned;
  {
    UnitObserverScope scope(&recorder);
    cloned = unit->clone();
  }
  auto* clone = cloned->as<Unit<CloneableImpl>>();
  ASSERT_NE(clone, nullptr);
  EXPECT_EQ(recorder.units, (std::vector<UnitModule*>{clone->linear.get(), clone}));
  const at::Tensor x = at::ones({2, 3});
  const at::Tensor expected = clone->forward(x);
  EXPECT_EQ(calls, 0);
  EXPECT_TRUE(unit->forward(x).equal(expected));
  EXPECT_EQ(calls, 2);
  {
    torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : unit->parameters()) parameter.zero_();
  }
  EXPECT_TRUE(clone->forward(x).equal(expected));
  EXPECT_THROW(Block(3)->clone(), c10::Error);  // Impl cannot
}

// Runs forward twice, as recomputation does, and doubles what comes out.
class Twice : public ForwardRunner {
 public:
  std::vector<at::Tensor> Run(UnitModule& unit, const std::vector<at::Tensor>& inputs,
                              const Body& body) const override {
    EXPECT_NE(unit.module().name(), "");
    std::vector<at::Tensor> outputs = body(inputs);
    const std::vector<at::Tensor> again = body(inputs);
    EXPECT_EQ(again.size(), outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(outputs[i].equal(again[i]));
      outputs[i] = outputs[i] * 2;
    }
    later = body;
    return outputs;
  }
  mutable Body later;
};

TEST(ForwardRunnerTest, RunsInsideTheHooks) {
  Block block(3);
  const at::Tensor x = at::ones({2, 3});
  const at::Tensor expected = block(x) * 2;
  int outer = 0, inner = 0;
  auto pre = block->AddPreForwardHook([&](const auto&) { ++outer; });
  auto post = block->AddPostForwardHook([&](const auto&) { ++outer; });
  auto below = block->linear->AddPreForwardHook([&](const auto&) { ++inner; });
  block->SetForwardRunner(std::make_shared<Twice>());
  EXPECT_TRUE(block(x).equal(expected));
  EXPECT_EQ(outer, 2);
  EXPECT_EQ(inner, 2);
  block->SetForwardRunner(nullptr);
  EXPECT_TRUE((block(x) * 2).equal(expected));
}

TEST(ForwardRunnerTest, KeepsArgumentsButNoTensors) {
  Unit<StructImpl> unit;
  auto twice = std::make_shared<Twice>();
  unit->SetForwardRunner(twice);
  at::Tensor first = at::ones({1}), second = at::ones({2});
  const Pair result = unit->forward({first, second, 5});
  EXPECT_EQ(result.count, 6);
  EXPECT_EQ(result.first.numel(), 2);
  EXPECT_EQ(result.first[0].item<float>(), 2);
  EXPECT_EQ(first.use_count(), 1);
  EXPECT_EQ(second.use_count(), 1);
  EXPECT_EQ(twice->later({at::ones({4}), at::ones({7})})[0].numel(), 7);
}

class ListImpl : public torch::nn::Module {
 public:
  std::tuple<std::vector<at::Tensor>, int> forward(std::vector<at::Tensor> xs,
                                                   const std::optional<at::Tensor>& y,
                                                   at::Tensor&& z) {
    xs.push_back(y.value_or(z));
    return {xs, static_cast<int>(xs.size())};
  }
};

TEST(ForwardRunnerTest, TakesListsOptionalsAndUndefinedTensors) {
  Unit<ListImpl> unit;
  unit->SetForwardRunner(std::make_shared<Twice>());
  auto [list, n] = unit->forward({at::ones({1}), at::Tensor()}, std::nullopt, at::ones({3}));
  EXPECT_EQ(n, 3);
  ASSERT_EQ(list.size(), 3);
  EXPECT_FALSE(list[1].defined());
  EXPECT_EQ(list[2].numel(), 3);
}

TEST(ForwardRunnerTest, RefusesForwardsThatCannotBeRepeated) {
  Unit<ManyImpl> many;
  many->SetForwardRunner(std::make_shared<Twice>());
  at::Tensor b = at::ones({2});
  EXPECT_THROW(many->forward(at::ones({2}), b, 5, std::nullopt), c10::Error);
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
