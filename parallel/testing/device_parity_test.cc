// Over NCCL's fake, with tensors on a device for each rank.
#include "lockstep/parallel/testing/device_parity.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <vector>

#include "lockstep/comm/nccl/testing/run_fake_ranks.h"
#include "lockstep/comm/testing/host_device.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/ddp/join.h"

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

}  // namespace
}  // namespace lockstep::parallel::testing
