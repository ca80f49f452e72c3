#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/optim/fused_sgd.h"

namespace lockstep::parallel::optim {
namespace {

using torch::optim::Optimizer;

constexpr int kSteps = 40;

at::Tensor Wave(at::IntArrayRef shape, double frequency, double offset) {
  int64_t numel = 1;
  for (int64_t size : shape) numel *= size;
  return at::sin(at::arange(numel, at::kDouble) * frequency + offset).view(shape);
}

// Tensors of awkward sizes, an empty one as FSDP has them, and one with channels last.
std::vector<NamedTensor> MakeParameters(at::ScalarType dtype) {
  std::vector<NamedTensor> parameters = {
      {"conv.weight", Wave({5, 3, 3, 2}, 0.7, 0.1)}, {"conv.bias", Wave({1}, 1, 2)},
      {"fc.weight", Wave({257, 3}, 1.3, 0.4)},       {"fc.bias", Wave({257}, 0.3, 0.9)},
      {"nothing", at::empty({0}, at::kDouble)},      {"big", Wave({4097}, 0.9, 0.2)}};
  parameters[0].tensor = parameters[0].tensor.contiguous(at::MemoryFormat::ChannelsLast);
  for (NamedTensor& each : parameters) each.tensor = each.tensor.to(dtype).requires_grad_();
  return parameters;
}

std::vector<at::Tensor> Tensors(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& each : parameters) tensors.push_back(each.tensor);
  return tensors;
}

// Gradients of a step. In every third step two parameters have none; one has none before step 5.
// With `sign` -1 they point the other way.
void SetGradients(const std::vector<NamedTensor>& parameters, int step, double sign = 1) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i].tensor;
    if ((i % 3 == 1 && step % 3 == 2) || (i == 3 && step < 5)) {
      parameter.mutable_grad() = at::Tensor();
      continue;
    }
    // Not in the parameter's memory format.
    parameter.mutable_grad() =
        (sign * Wave(parameter.sizes(), 0.11 * static_cast<double>(i + 1), step))
            .to(parameter.scalar_type());
  }
}

void ExpectClose(const std::vector<NamedTensor>& found, const std::vector<NamedTensor>& expected,
                 double tolerance, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].tensor.numel() == 0) continue;
    const at::Tensor right = expected[i].tensor.detach().to(at::kDouble);
    const at::Tensor difference = (found[i].tensor.detach().to(at::kDouble) - right).abs();
    EXPECT_LE((difference / (1 + right.abs())).max().item<double>(), tolerance)
        << what << ", " << expected[i].name;
  }
}

constexpr double kLastBits = 4e-15;  // relative to parameters around 1, after kSteps

// Runs both optimizers over the same gradients; those of `theirs` point to where `sign` says.
void ExpectEqual(
    const std::string& what,
    const std::function<std::unique_ptr<Optimizer>(const std::vector<NamedTensor>&)>& ours,
    const std::function<std::unique_ptr<Optimizer>(const std::vector<at::Tensor>&)>& theirs,
    double sign = 1) {
  const std::vector<NamedTensor> found = MakeParameters(at::kDouble);
  const std::vector<NamedTensor> expected = MakeParameters(at::kDouble);
  const auto our_optimizer = ours(found);
  const auto their_optimizer = theirs(Tensors(expected));
  torch::optim::StepLR our_schedule(*our_optimizer, /*step_size=*/7, /*gamma=*/0.5);
  torch::optim::StepLR their_schedule(*their_optimizer, /*step_size=*/7, /*gamma=*/0.5);
  for (int step = 0; step < kSteps; ++step) {
    SetGradients(found, step);
    SetGradients(expected, step, sign);
    our_optimizer->step();
    their_optimizer->step();
    our_schedule.step();
    their_schedule.step();
    if (step == 0 || step == kSteps - 1) {
      ExpectClose(found, expected, kLastBits, what + ", step " + std::to_string(step));
    }
  }
}

TEST(FusedAdamWTest, EqualsLibTorchsWithEveryOption) {
  for (const FusedAdamWOptions& options : std::vector<FusedAdamWOptions>{
           {},
           {.lr = 0.01, .weight_decay = 0},
           {.lr = 0.01, .beta1 = 0.5, .beta2 = 0.7, .eps = 1e-3, .weight_decay = 0.1},
           {.lr = 0.01, .amsgrad = true},
           {.lr = 0.01, .amsgrad = true, .maximize = true},
           {.lr = 0.01, .maximize = true}}) {
    const std::string what = "amsgrad " + std::to_string(options.amsgrad) + ", maximize " +
                             std::to_string(options.maximize) + ", beta1 " +
                             std::to_string(options.beta1);
    ExpectEqual(
        what, [&](const auto& named) { return std::make_unique<FusedAdamW>(named, options); },
        [&](const auto& tensors) {
          return std::make_unique<torch::optim::AdamW>(tensors,
                                                       torch::optim::AdamWOptions(options.lr)
                                                           .betas({options.beta1, options.beta2})
                                                           .eps(options.eps)
                                                           .weight_decay(options.weight_decay)
                                                           .amsgrad(options.amsgrad));
        },
        options.maximize ? -1 : 1);
  }
}

TEST(FusedSgdTest, EqualsLibTorchsWithEveryOption) {
  for (const FusedSgdOptions& options : std::vector<FusedSgdOptions>{
           {},
           {.lr = 0.1, .weight_decay = 0.01},
           {.lr = 0.01, .momentum = 0.9},
           {.lr = 0.01, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01},
           {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
           {.lr = 0.01, .momentum = 0.9, .dampening = 0.3, .maximize = true}}) {
    const std::string what = "momentum " + std::to_string(options.momentum) + ", dampening " +
                             std::to_string(options.dampening) + ", nesterov " +
                             std::to_string(options.nesterov);
    ExpectEqual(
        what, [&](const auto& named) { return std::make_unique<FusedSgd>(named, options); },
        [&](const auto& tensors) {
          return std::make_unique<torch::optim::SGD>(tensors,
                                                     torch::optim::SGDOptions(options.lr)
                                                         .momentum(options.momentum)
                                                         .dampening(options.dampening)
                                                         .weight_decay(options.weight_decay)
                                                         .nesterov(options.nesterov));
        },
        options.maximize ? -1 : 1);
  }
}

// In lower precision LibTorch's own optimizers round after each operation: f64 is the measure.
TEST(FusedOptimizerTest, LowerPrecisionStaysAtItsRounding) {
  using Make = std::function<std::unique_ptr<Optimizer>(const std::vector<NamedTensor>&)>;
  std::vector<Make> makes;
  for (const FusedAdamWOptions& options :
       {FusedAdamWOptions{.lr = 0.01}, FusedAdamWOptions{.lr = 0.01, .amsgrad = true}}) {
    makes.push_back(
        [options](const auto& all) { return std::make_unique<FusedAdamW>(all, options); });
  }
  for (const FusedSgdOptions& options :
       std::vector<FusedSgdOptions>{{.lr = 0.05, .weight_decay = 0.1},
                                    {.lr = 0.05, .momentum = 0.5, .dampening = 0.3},
                                    {.lr = 0.05,
                                    .momentum = 0.5,
                                    .weight_decay = 0.1,
                                    .nesterov = true,
                                    .maximize = true}}) {
    makes.push_back(
        [options](const auto& all) { return std::make_unique<FusedSgd>(all, options); });
  }
  for (const auto& [dtype, tolerance] : std::vector<std::pair<at::ScalarType, double>>{
           {at::kFloat, 1e-6}, {at::kHalf, 2e-3}, {at::kBFloat16, 2e-2}}) {
    for (size_t i = 0; i < makes.size(); ++i) {
      std::vector<std::vector<NamedTensor>> both;
      for (at::ScalarType each : {dtype, at::kDouble}) {
        both.push_back(MakeParameters(each));
        const std::unique_ptr<Optimizer> optimizer = makes[i](both.back());
        for (int step = 0; step < 10; ++step) {
          SetGradients(both.back(), step);
          optimizer->step();
        }
      }
      ExpectClose(both[0], both[1], tolerance,
                  std::string(c10::toString(dtype)) + ", case " + std::to_string(i));
    }
  }
}

TEST(FusedOptimizerTest, OneModelMayMixDtypes) {
  std::vector<NamedTensor> mixed = MakeParameters(at::kFloat);
  for (const NamedTensor& each : MakeParameters(at::kDouble)) {
    mixed.push_back({each.name + ".f64", each.tensor});
  }
  const std::vector<NamedTensor> f32 = MakeParameters(at::kFloat);
  FusedAdamW of_mixed(mixed, {.lr = 0.01});
  FusedAdamW of_f32(f32, {.lr = 0.01});
  for (int step = 0; step < 3; ++step) {
    SetGradients(mixed, step);
    SetGradients(f32, step);
    of_mixed.step();
    of_f32.step();
  }
  // Indices decide which gradients are undefined: compare those of the first half.
  for (size_t i = 0; i < f32.size(); ++i) EXPECT_TRUE(mixed[i].tensor.equal(f32[i].tensor));
}

TEST(FusedOptimizerTest, GroupsGoByName) {
  const auto parameters = MakeParameters(at::kDouble);
  const auto start = MakeParameters(at::kDouble);
  const auto ends_with_bias = [](const std::string& name) {
    return name.size() > 5 && name.substr(name.size() - 5) == ".bias";
  };
  const auto is_conv = [](const std::string& name) { return name.substr(0, 5) == "conv."; };
  FusedSgd optimizer(parameters, {.lr = 0.5},
                     {{.matches = ends_with_bias, .options = {.lr = 0.25}},
                      {.matches = is_conv, .options = {.lr = 0.125}}});
  ASSERT_EQ(optimizer.param_groups().size(), 3);
  EXPECT_EQ(optimizer.param_groups()[1].params().size(), 2);
  EXPECT_EQ(optimizer.param_groups()[2].params().size(), 1);
  optimizer.options(2).lr = 1;
  for (const NamedTensor& each : parameters) {
    each.tensor.mutable_grad() = at::ones(each.tensor.sizes(), at::kDouble);
  }
  optimizer.step();
  const std::vector<double> moved = {1, 0.25, 0.5, 0.25, 0.5, 0.5};
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].tensor.equal(start[i].tensor - moved[i])) << parameters[i].name;
  }
}

TEST(FusedOptimizerTest, GradientScaleDividesAndSkips) {
  const std::vector<NamedTensor> scaled = MakeParameters(at::kFloat);
  const std::vector<NamedTensor> plain = MakeParameters(at::kFloat);
  FusedAdamW scaled_optimizer(scaled, {.lr = 0.01});
  FusedAdamW plain_optimizer(plain, {.lr = 0.01});
  const at::Tensor found_inf = at::zeros({});
  scaled_optimizer.SetGradientScale(at::full({}, 1024.0f), found_inf);
  for (int step = 0; step < 6; ++step) {
    SetGradients(scaled, step, /*sign=*/1024);
    found_inf.fill_(step == 3 ? 1 : 0);
    scaled_optimizer.step();
    if (step == 3) continue;
    SetGradients(plain, step);
    plain_optimizer.step();
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(scaled[i].tensor.equal(plain[i].tensor)) << plain[i].name;
    if (i > 0 && plain[i].tensor.grad().defined()) {  // that of conv.weight was copied
      EXPECT_TRUE(scaled[i].tensor.grad().equal(plain[i].tensor.grad()));
    }
  }
}

TEST(FusedOptimizerTest, AClosureComputesTheLoss) {
  const std::vector<NamedTensor> parameters = MakeParameters(at::kDouble);
  FusedSgd optimizer(parameters, {.lr = 0.5});
  const at::Tensor before = parameters[5].tensor.detach().clone();
  at::NoGradGuard no_grad;
  const at::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    at::Tensor sum = parameters[5].tensor.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<double>(), before.sum().item<double>());
  EXPECT_TRUE(parameters[5].tensor.equal(before - 0.5));
}

std::vector<std::string> Keys(const FusedOptimizer& optimizer) {
  std::vector<std::string> keys;
  for (const auto& each : optimizer.StateDict()) keys.push_back(each.parameter + " " + each.key);
  return keys;
}

TEST(OptimizerStateTest, HasPythonsKeys) {
  std::vector<NamedTensor> parameters = MakeParameters(at::kDouble);
  parameters.resize(2);
  const auto is_bias = [](const std::string& name) { return name == "conv.bias"; };
  FusedAdamW adamw(parameters, {}, {{.matches = is_bias, .options = {.amsgrad = true}}});
  EXPECT_EQ(Keys(adamw), (std::vector<std::string>{"conv.weight step", "conv.weight exp_avg",
                                                   "conv.weight exp_avg_sq", "conv.bias step",
                                                   "conv.bias exp_avg", "conv.bias exp_avg_sq",
                                                   "conv.bias max_exp_avg_sq"}));
  FusedSgd sgd(parameters, {.momentum = 0.9}, {{.matches = is_bias, .options = {}}});
  EXPECT_EQ(Keys(sgd), (std::vector<std::string>{"conv.weight step", "conv.weight momentum_buffer",
                                                 "conv.bias step"}));
  SetGradients(parameters, 0);
  sgd.step();
  SetGradients(parameters, 2);  // none for conv.bias
  sgd.step();
  EXPECT_EQ(sgd.StateDict()[0].value.item<float>(), 2);
  EXPECT_EQ(sgd.StateDict()[2].value.item<float>(), 1);
}

// Whole or piece by piece.
template <typename Optimizer, typename Options>
void ExpectResumes(const Options& options, bool whole_state) {
  const std::vector<NamedTensor> whole = MakeParameters(at::kDouble);
  Optimizer of_whole(whole, options);
  std::vector<NamedTensor> resumed;
  std::vector<FusedOptimizer::State> saved;
  for (int step = 0; step < 4; ++step) {  // fc.bias has not started yet
    SetGradients(whole, step);
    of_whole.step();
  }
  for (FusedOptimizer::State each : of_whole.StateDict()) {
    each.value = each.value.clone();
    saved.insert(saved.begin(), each);  // any order will do
  }
  for (const NamedTensor& each : whole) {
    resumed.push_back({each.name, each.tensor.detach().clone().requires_grad_()});
  }
  Optimizer of_resumed(resumed, options);
  if (whole_state) {
    EXPECT_EQ(of_resumed.LoadStateDict(saved), absl::OkStatus());
  } else {
    of_resumed.UpdateState([&, next = saved.rbegin()](const auto& each) mutable {
      each.value.copy_((next++)->value);
    });
  }
  for (int step = 4; step < 12; ++step) {
    SetGradients(whole, step);
    SetGradients(resumed, step);
    of_whole.step();
    of_resumed.step();
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(resumed[i].tensor.equal(whole[i].tensor)) << whole[i].name;
  }
}

TEST(OptimizerStateTest, ResumesToTheBit) {
  for (bool whole_state : {true, false}) {
    ExpectResumes<FusedAdamW>(FusedAdamWOptions{.lr = 0.01, .amsgrad = true}, whole_state);
    ExpectResumes<FusedSgd>(FusedSgdOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.3},
                            whole_state);
  }
}

TEST(OptimizerStateTest, RefusesWhatIsNotItsState) {
  const std::vector<NamedTensor> parameters = MakeParameters(at::kDouble);
  FusedSgd optimizer(parameters, {.momentum = 0.9});
  SetGradients(parameters, 0);
  optimizer.step();
  const auto copy = [&] {
    std::vector<FusedOptimizer::State> state = optimizer.StateDict();
    for (auto& each : state) each.value = at::zeros_like(each.value);
    return state;
  };
  const auto expect = [&](const std::vector<FusedOptimizer::State>& state,
                          const std::string& message) {
    const absl::Status status = optimizer.LoadStateDict(state);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string{status.message()}, "the optimizer's state to load " + message);
  };
  auto state = copy();
  state.pop_back();
  expect(state, "lacks momentum_buffer of parameter big");
  state = copy();
  state.push_back(state[1]);
  expect(state, "has momentum_buffer of parameter conv.weight twice");
  state = copy();
  state.push_back({"gone", "step", at::zeros({})});
  expect(state, "has step of parameter gone, which this optimizer does not keep");
  state = copy();
  state[5].value = at::zeros({3, 257}, at::kDouble);
  expect(state,
         "has Double [3, 257] for momentum_buffer of parameter fc.weight, which here is Double "
         "[257, 3]");
  state = copy();
  state[5].value = state[5].value.to(at::kFloat);
  expect(state,
         "has Float [257, 3] for momentum_buffer of parameter fc.weight, which here is Double "
         "[257, 3]");
  state = copy();
  state[0].value = at::Tensor();
  expect(state, "has nothing for step of parameter conv.weight, which here is Float []");
  EXPECT_EQ(optimizer.StateDict()[0].value.item<float>(), 1);  // nothing was changed
}

void ExpectError(const std::function<void()>& run, const std::string& message) {
  try {
    run();
    ADD_FAILURE() << "no error: " << message;
  } catch (const c10::Error& error) {
    EXPECT_EQ(std::string(error.what_without_backtrace()).substr(0, message.size()), message);
  }
}

TEST(FusedOptimizerTest, RefusesWhatCannotBeMeant) {
  const std::vector<NamedTensor> parameters = MakeParameters(at::kDouble);
  ExpectError([&] { FusedAdamW(parameters, {.lr = -1}); }, "lr must be 0 or more, and is -1");
  ExpectError([&] { FusedAdamW(parameters, {.beta2 = 1}); }, "beta2 must be in [0, 1), and is 1");
  ExpectError([&] { FusedSgd(parameters, {.nesterov = true}); },
              "nesterov needs a momentum above 0 and a dampening of 0");
  ExpectError(
      [&] {
        FusedSgd({{"a", at::ones({1})}, {"a", at::ones({1})}});
      },
      "two parameters have the name a");
  ExpectError([&] { FusedSgd({{"a", at::Tensor()}}); }, "parameter a is undefined");
  ExpectError(
      [&] {
        FusedSgd({{"a", at::ones({4, 4}).slice(1, 0, 2)}});
      },
      "parameter a does not fill one piece of memory: its strides leave gaps or overlap");
  ExpectError(
      [&] {
        FusedSgd(parameters, {}, {{.matches = [](const auto&) { return false; }, .options = {}}});
      },
      "the 1. of the parameter groups matches none of the 6 parameters");
  FusedAdamW adamw(parameters);
  SetGradients(parameters, 0);
  adamw.options().amsgrad = true;
  ExpectError([&] { adamw.step(); }, "amsgrad was changed after the optimizer was made");
  FusedSgd sgd(parameters);
  sgd.options().momentum = 0.5;
  ExpectError([&] { sgd.step(); },
              "momentum was changed from or to 0 after the optimizer was made");
  ExpectError([&] { sgd.SetGradientScale(at::ones({2}), at::Tensor()); },
              "scale and found_inf are scalars in f32, and one of them is Float [2]");
}

}  // namespace
}  // namespace lockstep::parallel::optim
