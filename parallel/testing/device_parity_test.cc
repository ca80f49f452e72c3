#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/nccl/testing/run_fake_ranks.h"
#include "lockstep/comm/testing/host_device.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/ddp/half_hook.h"
#include "lockstep/parallel/ddp/join.h"
#include "lockstep/parallel/ddp/powersgd.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/model_cases.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {
namespace {

using Models = std::vector<ParityModel>;

Models MakeModels(const ParityCase& c, int size) {
  Models models;
  for (int rank = 0; rank < size; ++rank) models.push_back(MakeModel(c));
  return models;
}

Trajectory TrainRank(const ParityCase& c, const ParityModel& model, const StrategyFactory& make,
                     comm::Communicator& world) {
  model.module->to(world.device());
  auto strategy = make(model.module, world);
  return Train(c, model, *strategy, world.rank(), world.size(), &world);
}

// Trains over NCCL's fake, with tensors on a device for each rank, and compares with the same on
// the CPU between threads.
void ExpectParityOnDevices(const ParityCase& c, const std::string& name,
                           const StrategyFactory& make) {
  for (const int size : {1, 3}) {
    SCOPED_TRACE(name);
    std::mutex mutex;
    std::map<int, Trajectory> expected;
    Models models = MakeModels(c, size);
    comm::testing::RunRanks(size, [&](comm::Communicator& world) {
      Trajectory found = TrainRank(c, models[world.rank()], make, world);
      std::lock_guard<std::mutex> lock(mutex);
      expected[world.rank()] = std::move(found);
    });
    models = MakeModels(c, size);
    comm::nccl::testing::RunFakeRanks(
        size,
        [&](comm::Communicator& world) {
          ExpectSame(TrainRank(c, models[world.rank()], make, world), expected[world.rank()],
                     c.dtype, c.name + " under " + name);
        },
        comm::nccl::testing::FastOptions(absl::Minutes(2)), comm::testing::HostDevice);
  }
}

ParityCase Case() {
  ParityCase c = ModelCase("mlp", at::kDouble);
  c.micro_steps = 2;
  c.clip_norm = 1;
  return c;
}

TEST(DeviceParityTest, Strategies) {
  for (const char* name : {"manual", "ddp", "zero1", "zero2", "fsdp"}) {
    ExpectParityOnDevices(Case(), name,
                          [&](std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm) {
                            return ValueOrThrow(MakeStrategy(name, std::move(model), &comm));
                          });
  }
}

TEST(DeviceParityTest, OptionsOfDdp) {
  const auto expect = [](const std::string& name, const DdpOptions& options,
                         const std::function<std::shared_ptr<ddp::CommHook>()>& hook) {
    ExpectParityOnDevices(Case(), name,
                          [&](std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm) {
                            DdpOptions each = options;
                            if (hook) each.comm_hook = hook();
                            return std::make_unique<Ddp>(std::move(model), comm, each);
                          });
  };
  expect("ddp, unused", {.bucket_bytes = 1 << 12, .find_unused_parameters = true}, nullptr);
  expect("ddp, static", {.static_graph = true}, nullptr);
  expect("ddp, half", {}, [] { return std::make_shared<ddp::HalfHook>(at::kBFloat16); });
  expect("ddp, PowerSGD", {},
         [] { return std::make_shared<ddp::PowerSgd>(ddp::PowerSgdOptions{.start_step = 0}); });
}

TEST(DeviceParityTest, OptionsOfFsdp) {
  const std::map<std::string, FsdpOptions> options = {
      {"fsdp, offload", {.cpu_offload = true}},
      {"fsdp, mixed, offload", {.mixed_precision = {.param = at::kFloat}, .cpu_offload = true}},
      {"fsdp, hybrid", {.shard_size = 1}},
      {"fsdp, no prefetch", {.prefetch = false}},
      {"fsdp, debug", {.debug = true}},
  };
  for (const auto& [name, each] : options) {
    ParityCase c = Case();
    if (each.mixed_precision.param) c.sgd = true;
    ExpectParityOnDevices(c, name,
                          [&](std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm) {
                            return std::make_unique<Fsdp>(std::move(model), comm, each);
                          });
  }
}

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
