#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/models/classifier.h"
#include "lockstep/models/convnet/convnet.h"
#include "lockstep/models/mlp/mlp.h"
#include "lockstep/models/testing/uniform.h"
#include "lockstep/models/vit/vit.h"
#include "lockstep/parallel/checkpoint/safetensors.h"
#include "lockstep/parallel/unit.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::models {
namespace {

using parallel::checkpoint::LoadInto;
using parallel::checkpoint::SaveModule;
using parallel::checkpoint::StateDict;
using ::testing::ElementsAre;

constexpr char kSmallVitFile[] = "models/testdata/vit_small.safetensors";
const VitOptions kSmallVit = {.dim = 8, .depth = 2, .heads = 2};

nlohmann::json Golden(const std::string& model) {
  std::ifstream file("models/testdata/golden.json");
  return nlohmann::json::parse(file)[model];
}

// fill() of testdata/generate.py.
void Fill(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> sorted;
  for (const auto& [name, tensor] : StateDict(module)) sorted[name] = tensor;
  uint32_t stream = 0;
  for (const auto& [name, tensor] : sorted) {
    const at::Tensor noise = testing::Uniform(stream++, tensor.sizes()) - 0.5;
    if (tensor.dim() > 1) {
      tensor.copy_(noise * (2 / std::sqrt(tensor.numel() / tensor.size(0))));
    } else {
      const bool is_norm = name.find("norm") != std::string::npos && name.ends_with("weight");
      tensor.copy_(noise * 0.2 + (is_norm ? 1 : 0));
    }
  }
}

at::Tensor Images() { return testing::Uniform(/*stream=*/1000, {3, 1, 28, 28}); }

void ExpectNear(double actual, double expected, double tolerance, const std::string& what) {
  EXPECT_NEAR(actual, expected, tolerance * std::max(1.0, std::abs(expected))) << what;
}

// Logits, loss and gradients of a model against Python's, to a relative tolerance.
template <typename Forward>
void ExpectGolden(torch::nn::Module& module, Forward forward, const nlohmann::json& golden,
                  at::ScalarType dtype, double tolerance) {
  module.to(dtype);
  const at::Tensor logits = forward(Images().to(dtype));
  ASSERT_EQ(logits.sizes(), at::IntArrayRef({3, 10}));
  ASSERT_EQ(logits.scalar_type(), dtype);
  const at::Tensor logits_f64 = logits.detach().to(at::kDouble);
  for (int64_t i = 0; i < 30; ++i) {
    ExpectNear(logits_f64.const_data_ptr<double>()[i], golden["logits"][i], tolerance,
               "logit " + std::to_string(i));
  }
  const at::Tensor labels = at::tensor({3, 0, 9}, at::kLong);
  const at::Tensor loss = at::cross_entropy_loss(logits, labels);
  ExpectNear(loss.item<double>(), golden["loss"], tolerance, "loss");
  module.zero_grad();
  loss.backward();
  size_t parameters = 0;
  for (const auto& parameter : module.named_parameters()) {
    ASSERT_TRUE(golden["gradient_norms"].contains(parameter.key())) << parameter.key();
    ExpectNear(parameter.value().grad().norm().template item<double>(),
               golden["gradient_norms"][parameter.key()], tolerance, parameter.key());
    ++parameters;
  }
  EXPECT_EQ(parameters, golden["gradient_norms"].size());
}

class GoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, HasPythonsStateDict) {
  Classifier model = ValueOrThrow(Create(GetParam()));
  const nlohmann::json shapes = Golden(GetParam())["shapes"];
  std::map<std::string, std::vector<int64_t>> expected = shapes, actual;
  for (const auto& [name, tensor] : StateDict(*model.module)) actual[name] = tensor.sizes().vec();
  EXPECT_EQ(actual, expected);
}

TEST_P(GoldenTest, ComputesWhatPythonComputes) {
  Classifier model = ValueOrThrow(Create(GetParam()));
  model.module->to(at::kDouble);
  Fill(*model.module);
  const nlohmann::json golden = Golden(GetParam());
  ExpectGolden(*model.module, model.forward, golden, at::kDouble, /*tolerance=*/1e-11);
  ExpectGolden(*model.module, model.forward, golden, at::kFloat, /*tolerance=*/2e-5);
}

TEST_P(GoldenTest, DrawsPythonsWeightsFromASeed) {
  torch::manual_seed(0);
  Classifier model = ValueOrThrow(Create(GetParam()));
  const nlohmann::json sums = Golden(GetParam())["seeded_sums"];
  for (const auto& [name, tensor] : StateDict(*model.module)) {
    EXPECT_NEAR(tensor.to(at::kDouble).sum().item<double>(), sums[name].get<double>(), 1e-9)
        << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest, ::testing::Values("mlp", "convnet", "vit"),
                         [](const auto& info) { return info.param; });

TEST(SafetensorsOfPython, LoadIntoAModelThatThenComputesTheSame) {
  Vit model(kSmallVit);
  model->to(at::kDouble);
  ASSERT_EQ(LoadInto(*model, kSmallVitFile), absl::OkStatus());
  ExpectGolden(*model, model, Golden("vit_small"), at::kDouble, /*tolerance=*/1e-11);
}

TEST(SafetensorsOfPython, AreTheBytesThatAreSavedHere) {
  Vit model(kSmallVit);
  model->to(at::kDouble);
  Fill(*model);
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/vit_small.safetensors";
  ASSERT_EQ(SaveModule(*model, path), absl::OkStatus());
  std::ostringstream saved, python;
  saved << std::ifstream(path, std::ios::binary).rdbuf();
  python << std::ifstream(kSmallVitFile, std::ios::binary).rdbuf();
  EXPECT_FALSE(python.str().empty());
  EXPECT_TRUE(saved.str() == python.str());
}

TEST(Create, KnowsItsModels) {
  EXPECT_THAT(Names(), ElementsAre("mlp", "convnet", "vit", "vit25m"));
  std::vector<int64_t> sizes;
  for (const std::string& name : Names()) {
    int64_t size = 0;
    for (const at::Tensor& parameter : ValueOrThrow(Create(name)).module->parameters()) {
      size += parameter.numel();
    }
    sizes.push_back(size);
  }
  EXPECT_THAT(sizes, ElementsAre(1'863'690, 1'199'882, 4'758'538, 25'259'018));
  EXPECT_EQ(Create("resnet").status(),
            absl::InvalidArgumentError(
                "there is no model 'resnet': choose one of mlp, convnet, vit, vit25m"));
}

TEST(Create, GivesAForwardOfTheSameModule) {
  Classifier model = ValueOrThrow(Create("mlp"));
  const at::Tensor images = Images().to(at::kFloat);
  const at::Tensor before = model.forward(images);
  {
    torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model.module->parameters()) parameter.zero_();
  }
  EXPECT_FALSE(at::equal(before, model.forward(images)));
  EXPECT_EQ(model.forward(images).abs().sum().item<float>(), 0);
}

TEST(Models, TakeOtherSizes) {
  Mlp mlp(MlpOptions{.inputs = 12, .width = 5, .classes = 3});
  EXPECT_EQ(mlp(testing::Uniform(0, {2, 3, 4}).to(at::kFloat)).sizes(), at::IntArrayRef({2, 3}));
  EXPECT_THROW(Vit(VitOptions{.dim = 10, .heads = 4}), c10::Error);
}

TEST(Models, AreMadeOfUnits) {
  auto units = [](torch::nn::Module& module) {
    std::vector<std::string> names;
    for (const parallel::NamedUnit& unit : parallel::FindUnits(module)) names.push_back(unit.name);
    return names;
  };
  EXPECT_THAT(units(*Mlp()), ElementsAre("", "1", "3", "5"));
  EXPECT_THAT(units(*ConvNet()), ElementsAre("", "conv1", "conv2", "fc1", "fc2"));
  EXPECT_THAT(units(*Vit(kSmallVit)), ElementsAre("", "blocks.0", "blocks.1"));
}

TEST(Models, RunTheHooksOfAllUnits) {
  for (const std::string& name : Names()) {
    Classifier model = ValueOrThrow(Create(name));
    std::vector<std::string> ran, expected;
    std::vector<parallel::HookHandle> handles;
    for (const parallel::NamedUnit& unit : parallel::FindUnits(*model.module)) {
      expected.push_back(unit.name);
      handles.push_back(unit.unit->AddPreForwardHook(
          [&ran, name = unit.name](const std::vector<at::Tensor*>&) { ran.push_back(name); }));
    }
    model.forward(Images().to(at::kFloat));
    EXPECT_EQ(ran, expected) << name;
  }
}

}  // namespace
}  // namespace lockstep::models
