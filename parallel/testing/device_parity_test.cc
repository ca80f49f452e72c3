// Over NCCL's fake, with tensors on a device for each rank.
#include "lockstep/parallel/testing/device_parity.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

#include "lockstep/comm/nccl/testing/run_fake_ranks.h"
#include "lockstep/comm/testing/host_device.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/ddp/join.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/model_cases.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Fake, DeviceParity,
    ::testing::Values(Devices{
        .name = "Fake",
        .sizes = {1, 3},
        .kernels_of_cpu = true,
        .run =
            [](int size, const std::function<void(comm::Communicator&)>& body) {
              comm::nccl::testing::RunFakeRanks(size, body,
                                                comm::nccl::testing::FastOptions(absl::Minutes(2)),
                                                comm::testing::HostDevice);
            }}),
    [](const auto& info) { return info.param.name; });

// Ranks run 3, 2 and 1 batches; gradients of the weight are rank + 1.
TEST(DeviceParityTest, JoinOfDdp) {
  for (const bool find_unused : {false, true}) {
    std::vector<torch::nn::Linear> layers;
    for (int rank = 0; rank < 3; ++rank) layers.emplace_back(torch::nn::LinearOptions(1, 1));
    std::vector<double> weights(3);
    comm::nccl::testing::RunFakeRanks(
        3,
        [&](comm::Communicator& world) {
          torch::nn::Linear& layer = layers[world.rank()];
          layer->to(world.device());
          Ddp ddp(layer, world, {.find_unused_parameters = find_unused});
          Join join(ddp, {.divide_by_active_ranks = true});
          const std::vector<double> means = {2, 1.5, 1};
          for (int step = 0; step < 3 - world.rank(); ++step) {
            layer->zero_grad();
            const auto options = at::TensorOptions(world.device());
            layer(at::full({1, 1}, world.rank() + 1.0f, options)).backward();
            EXPECT_FLOAT_EQ(layer->weight.grad().item<float>(), means[step]);
            at::NoGradGuard no_grad;
            layer->weight.sub_(layer->weight.grad());
          }
          join.Finish();
          weights[world.rank()] = layer->weight.item<float>();
        },
        comm::nccl::testing::FastOptions(absl::Minutes(2)), comm::testing::HostDevice);
    EXPECT_EQ(weights, std::vector<double>(3, weights[0]));
  }
}

// Training does not wait for what last_step() tells; that does, once a step.
TEST(DeviceParityTest, OnlyLastStepWaitsForTheDevice) {
  for (const std::string name : {"manual", "ddp", "zero1", "zero2", "fsdp"}) {
    const ParityCase c = ModelCase("mlp", at::kFloat);
    const ParityModel model = MakeModel(c);
    comm::nccl::testing::RunFakeRanks(
        1,
        [&](comm::Communicator& world) {
          model.module->to(world.device());
          const auto strategy = ValueOrThrow(MakeStrategy(name, model.module, &world));
          const int before = comm::testing::EventsWaitedFor();
          Train(c, model, *strategy, /*rank=*/0, /*size=*/1, &world);
          EXPECT_EQ(comm::testing::EventsWaitedFor(), before) << name;
          const StepStatistics step = strategy->last_step();
          const int after = comm::testing::EventsWaitedFor();
          EXPECT_GT(after, before) << name;
          EXPECT_GT(step.exposed, absl::ZeroDuration()) << name;
          EXPECT_EQ(step.communication.has_value(), name == "manual") << name;
          EXPECT_EQ(step.backward > absl::ZeroDuration(), name != "manual") << name;
          EXPECT_EQ(strategy->last_step().exposed, step.exposed) << name;
          EXPECT_EQ(comm::testing::EventsWaitedFor(), after) << name;
        },
        comm::nccl::testing::FastOptions(absl::Minutes(2)), comm::testing::HostDevice);
  }
}

}  // namespace
}  // namespace lockstep::parallel::testing
