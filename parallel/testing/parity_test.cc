#include "lockstep/parallel/testing/parity.h"

#include <gtest/gtest.h>

#include "lockstep/parallel/testing/model_cases.h"

namespace lockstep::parallel::testing {
namespace {

const std::vector<std::string> kStrategies = {"manual", "ddp", "zero1", "zero2", "fsdp"};

class ParityTest : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(ParityTest, EqualsOneProcessInF64) {
  const auto& [model, size] = GetParam();
  ExpectParityOnThreads(ModelCase(model, at::kDouble), kStrategies, {size});
}

TEST_P(ParityTest, EqualsOneProcessInF32) {
  const auto& [model, size] = GetParam();
  ExpectParityOnThreads(ModelCase(model, at::kFloat), kStrategies, {size});
}

INSTANTIATE_TEST_SUITE_P(Models, ParityTest,
                         ::testing::Combine(::testing::Values("mlp", "convnet", "vit"),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
                         });

TEST(ParityOptionsTest, AccumulatesAndClips) {
  for (const char* model : {"mlp", "vit"}) {
    ParityCase c = ModelCase(model, at::kDouble);
    c.micro_steps = 3;
    c.clip_norm = 0.5;
    c.sgd = true;
    ExpectParityOnThreads(c, kStrategies, {1, 3});
  }
}

}  // namespace
}  // namespace lockstep::parallel::testing
