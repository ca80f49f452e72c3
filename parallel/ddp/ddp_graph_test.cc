// Which parameters a backward reaches, and how often.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/options/embedding.h>
#include <torch/utils.h>

#include <string>
#include <vector>

#include "lockstep/comm/counting.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

using comm::testing::RunRanks;
using ::testing::HasSubstr;

// Three layers side by side: (B, 3) -> (B, 2) each.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    for (const char* name : {"a", "b", "c"}) {
      layers.push_back(register_module(name, torch::nn::Linear(3, 2)));
      layers.back()->to(at::kDouble);
    }
  }
  at::Tensor forward(const std::vector<int>& use, const at::Tensor& x) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int i : use) sum = sum + layers[i](x).sum();
    return sum;
  }
  at::Tensor grad(int layer) const { return layers[layer]->weight.grad(); }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Branches);

// A batch of one that differs by rank.
at::Tensor Input(int rank) { return at::ones({1, 3}, at::kDouble) * (rank + 1); }

std::string ErrorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const StatusError& error) {
    return error.what();
  }
  return "no error";
}

// One after the other: ranks that are threads share the default generator.
std::vector<Branches> MakeBranches(int size) {
  std::vector<Branches> models;
  for (int rank = 0; rank < size; ++rank) models.emplace_back();
  return models;
}

TEST(DdpGraphTest, AParameterThatSomeRanksDoNotUseCountsAsZeroThere) {
  std::vector<Branches> models = MakeBranches(3);
  RunRanks(3, [&](comm::Communicator& comm) {
    Branches& model = models[comm.rank()];
    Ddp ddp(model, comm, {.first_bucket_bytes = 1, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      // "b" on rank 1 alone, "c" nowhere.
      const std::vector<int> use = comm.rank() == 1 ? std::vector<int>{0, 1} : std::vector<int>{0};
      model->forward(use, Input(comm.rank())).backward();
      EXPECT_TRUE(model->grad(0).equal(at::full({2, 3}, 2.0, at::kDouble)));
      EXPECT_TRUE(model->grad(1).allclose(at::full({2, 3}, 2.0 / 3, at::kDouble)));
      EXPECT_FALSE(model->grad(2).defined());
    }
    // An earlier gradient of a parameter that is now unused stays what it was.
    const at::Tensor before = model->grad(1).clone();
    model->layers[0]->zero_grad();
    model->forward({0}, Input(comm.rank())).backward();
    EXPECT_TRUE(model->grad(1).allclose(before));
  });
}

TEST(DdpGraphTest, AccumulatedGradientsOfAnUnusedParameterAreAveraged) {
  std::vector<Branches> models = MakeBranches(2);
  RunRanks(2, [&](comm::Communicator& comm) {
    Branches& model = models[comm.rank()];
    Ddp ddp(model, comm, {.find_unused_parameters = true});
    {
      auto no_sync = ddp.NoSync();
      model->forward(comm.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{0}, Input(5))
          .backward();
    }
    model->forward({0}, Input(comm.rank())).backward();
    EXPECT_TRUE(model->grad(0).equal(at::full({2, 3}, 6 + 1.5, at::kDouble)));
    EXPECT_TRUE(model->grad(1).equal(at::full({2, 3}, 3.0, at::kDouble)));
  });
}

TEST(DdpGraphTest, UnusedParametersCostOneByteEach) {
  std::vector<Branches> models = MakeBranches(2);
  RunRanks(2, [&](comm::Communicator& world) {
    auto counters = std::make_shared<comm::TrafficCounters>();
    comm::CountingCommunicator counting(SplitPrivate(world), counters);
    Branches& model = models[world.rank()];
    Ddp ddp(model, counting, {.find_unused_parameters = true});
    model->forward({0}, Input(0)).backward();
    counters->Reset();
    model->forward({0}, Input(0)).backward();
    EXPECT_EQ(counters->total().operations, 2);
    EXPECT_EQ(counters->total().payload_bytes, 8 * 3 * (6 + 2) + 6);
  });
}

TEST(DdpGraphTest, StaticGraphLearnsWhatIsUnused) {
  std::vector<Branches> models = MakeBranches(2);
  RunRanks(2, [&](comm::Communicator& world) {
    auto counters = std::make_shared<comm::TrafficCounters>();
    comm::CountingCommunicator counting(SplitPrivate(world), counters);
    Branches& model = models[world.rank()];
    Ddp ddp(model, counting, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      counters->Reset();
      model
          ->forward(world.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{0},
                    Input(world.rank()))
          .backward();
      EXPECT_TRUE(model->grad(0).equal(at::full({2, 3}, 1.5, at::kDouble)));
      EXPECT_TRUE(model->grad(1).equal(at::full({2, 3}, 0.5, at::kDouble)));
      EXPECT_FALSE(model->grad(2).defined());
      if (step > 0) {
        EXPECT_EQ(counters->total().operations, 1);
      }
    }
    EXPECT_THAT(
        ErrorOf([&] {
          model->forward({0, 2}, Input(0)).backward();
        }),
        ::testing::AnyOf(HasSubstr("static_graph: parameter c.weight got more gradients "
                                   "than the 0 of the first backward"),
                         HasSubstr("static_graph: parameter c.bias"), HasSubstr("aborted")));
  });
}

TEST(DdpGraphTest, StaticGraphNamesAParameterThatIsNoLongerUsed) {
  std::vector<Branches> models = MakeBranches(2);
  RunRanks(2, [&](comm::Communicator& comm) {
    Branches& model = models[comm.rank()];
    Ddp ddp(model, comm, {.static_graph = true});
    model->forward({0, 1}, Input(0)).backward();
    const std::string error = ErrorOf([&] { model->forward({0}, Input(0)).backward(); });
    EXPECT_THAT(error, HasSubstr("parameter b.weight got no gradient in this backward but did in "
                                 "the first, and static_graph was promised"));
  });
}

// Runs `layer` and, in backward, runs it again with a nested backward(), as reentrant activation
// checkpointing does.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            torch::nn::Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.ptr().get());
    return layer(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    at::AutoGradMode enable(true);
    at::Tensor x = context->get_saved_variables()[0].detach();
    x.requires_grad_();
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    layer->forward(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(DdpGraphTest, ABackwardInsideBackwardIsAnError) {
  std::vector<torch::nn::Linear> models;
  for (int rank = 0; rank < 2; ++rank) models.emplace_back(torch::nn::LinearOptions(3, 3));
  RunRanks(2, [&](comm::Communicator& comm) {
    torch::nn::Linear& layer = models[comm.rank()];
    Ddp ddp(layer, comm);
    const std::string error = ErrorOf([&] {
      const at::Tensor x = at::ones({1, 3}).requires_grad_();
      Reentrant::apply(x, layer).sum().backward();
    });
    EXPECT_THAT(error, ::testing::AnyOf(HasSubstr("backward() was called inside backward()"),
                                        HasSubstr("backward ended with an exception")));
  });
}

TEST(DdpGraphTest, SeveralForwardsAndSharedParameters) {
  std::vector<Branches> models;
  for (int rank = 0; rank < 2; ++rank) {
    models.emplace_back();
    Branches& model = models.back();
    model->register_module("again", model->layers[0]);  // the same weights by another name
  }
  RunRanks(2, [&](comm::Communicator& comm) {
    Branches& model = models[comm.rank()];
    Ddp ddp(model, comm, {.first_bucket_bytes = 1, .bucket_bytes = 1});
    EXPECT_EQ(ddp.parameters().size(), 6);
    const at::Tensor first = model->forward({0, 1, 2}, Input(comm.rank()));
    const at::Tensor second = model->forward({0, 0}, Input(comm.rank()));
    (first + second).backward();
    EXPECT_TRUE(model->grad(0).equal(at::full({2, 3}, 4.5, at::kDouble)));
    EXPECT_TRUE(model->grad(1).equal(at::full({2, 3}, 1.5, at::kDouble)));
  });
}

TEST(DdpGraphTest, IgnoredParametersAndBuffersStayTheRanksOwn) {
  std::vector<Branches> models;
  for (int rank = 0; rank < 2; ++rank) {
    torch::manual_seed(rank);
    models.emplace_back();
    models.back()->register_buffer("mine", at::ones({rank + 1}) * rank);
  }
  RunRanks(2, [&](comm::Communicator& comm) {
    Branches& model = models[comm.rank()];
    const at::Tensor own = model->layers[1]->weight.detach().clone();
    Ddp ddp(model, comm, {.ignored = {"b.weight", "mine"}});
    EXPECT_TRUE(model->layers[1]->weight.detach().equal(own));
    EXPECT_EQ(ddp.parameters().size(), 6);  // the optimizer's all the same
    model->forward({0, 1, 2}, Input(comm.rank())).backward();
    EXPECT_TRUE(model->grad(0).equal(at::full({2, 3}, 1.5, at::kDouble)));
    EXPECT_TRUE(model->grad(1).equal(at::full({2, 3}, comm.rank() + 1.0, at::kDouble)));
    EXPECT_EQ(model->named_buffers()["mine"].numel(), comm.rank() + 1);
    EXPECT_THAT(ErrorOf([&] { Ddp typo(model, comm, {.ignored = {"b.weigth"}}); }),
                HasSubstr("DdpOptions::ignored: the model has no parameter or buffer "
                          "\"b.weigth\""));
  });
}

TEST(DdpGraphTest, NamesAChangeOfRequiresGrad) {
  for (const bool frozen_first : {false, true}) {
    std::vector<Branches> models;
    for (int rank = 0; rank < 2; ++rank) {
      models.emplace_back();
      models.back()->layers[1]->weight.set_requires_grad(!frozen_first);
    }
    RunRanks(2, [&](comm::Communicator& comm) {
      Branches& model = models[comm.rank()];
      Ddp ddp(model, comm);
      model->layers[1]->weight.set_requires_grad(frozen_first);
      const std::string error = ErrorOf([&] { model->forward({0, 1, 2}, Input(0)).backward(); });
      EXPECT_THAT(error, HasSubstr(frozen_first ? "parameter b.weight was frozen when Ddp was made "
                                                  "and is trainable now"
                                                : "parameter b.weight was trainable when Ddp was "
                                                  "made and is frozen now"));
    });
  }
}

TEST(DdpGraphTest, RefusesAModelWithoutTrainableParameters) {
  RunRanks(2, [](comm::Communicator& comm) {
    torch::nn::Linear layer(2, 2);
    for (at::Tensor& parameter : layer->parameters()) parameter.set_requires_grad(false);
    EXPECT_THAT(ErrorOf([&] { Ddp ddp(layer, comm); }),
                HasSubstr("the model has no trainable parameter"));
  });
}

TEST(DdpGraphTest, NamesASparseGradient) {
  std::vector<torch::nn::Embedding> models;
  for (int rank = 0; rank < 2; ++rank) {
    models.emplace_back(torch::nn::EmbeddingOptions(4, 3).sparse(true));
  }
  RunRanks(2, [&](comm::Communicator& comm) {
    torch::nn::Embedding& model = models[comm.rank()];
    Ddp ddp(model, comm);
    EXPECT_THAT(ErrorOf([&] { model(at::ones({2}, at::kLong)).sum().backward(); }),
                HasSubstr("the gradient of parameter weight is sparse"));
  });
}

TEST(DdpGraphTest, AnExceptionInBackwardEndsTheOtherRanksToo) {
  std::vector<Branches> models = MakeBranches(2);
  RunRanks(2, [&](comm::Communicator& comm) {
    Branches& model = models[comm.rank()];
    Ddp ddp(model, comm, {.first_bucket_bytes = 1});
    at::Tensor x = Input(0).requires_grad_();
    const bool fails = comm.rank() == 1;
    if (fails) {
      x = x * 1;  // a hook of it comes after the layers
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("out of luck"); });
    }
    const at::Tensor loss = model->forward({0, 1, 2}, x);
    if (fails) {
      EXPECT_THROW(loss.backward(), std::runtime_error);
    } else {
      EXPECT_THAT(ErrorOf([&] { loss.backward(); }), HasSubstr("backward ended with an exception"));
    }
    EXPECT_THAT(ErrorOf([&] {
                  model->forward({0, 1, 2}, Input(0)).backward();
                }),
                HasSubstr("backward ended with an exception"));
  });
}

TEST(DdpGraphTest, NamesAnOptionThatDiffers) {
  RunRanks(2, [](comm::Communicator& comm) {
    torch::nn::Linear layer(2, 2);
    EXPECT_EQ(ErrorOf([&] { Ddp ddp(layer, comm, {.bucket_bytes = 1000 + comm.rank()}); }),
              "FAILED_PRECONDITION: the ranks' models differ: rank 0 has option bucket_bytes=1000; "
              "rank 1 has option bucket_bytes=1001");
  });
}

}  // namespace
}  // namespace lockstep::parallel
