#include "lockstep/parallel/autocast.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

namespace lockstep::parallel {
namespace {

at::ScalarType TypeOfProduct() {
  const at::Tensor x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

TEST(AutocastTest, ComputesInItsDtypeWhileItLives) {
  at::Tensor weight = at::ones({2, 2}).set_requires_grad(true);
  {
    Autocast outer(at::kCPU, at::kBFloat16);
    EXPECT_EQ(TypeOfProduct(), at::kBFloat16);
    {
      Autocast inner(at::kCPU, at::kHalf);
      EXPECT_EQ(TypeOfProduct(), at::kHalf);
    }
    EXPECT_EQ(TypeOfProduct(), at::kBFloat16);
    at::mm(weight, weight).sum().backward();
  }
  EXPECT_EQ(TypeOfProduct(), at::kFloat);
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
}

TEST(AutocastTest, UsesWeightsAsTheyAreNow) {
  at::Tensor weight = at::ones({1, 1}).set_requires_grad(true);
  for (const double value : {1.0, 3.0}) {
    weight.detach().fill_(value);
    Autocast autocast(at::kCPU, at::kBFloat16);
    EXPECT_EQ(at::mm(at::ones({1, 1}), weight).item<double>(), value);
  }
}

TEST(AutocastTest, RefusesOtherDtypes) {
  EXPECT_THROW(Autocast(at::kCPU, at::kDouble), c10::Error);
  EXPECT_EQ(TypeOfProduct(), at::kFloat);
}

}  // namespace
}  // namespace lockstep::parallel
