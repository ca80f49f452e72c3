#include "lockstep/parallel/testing/device_parity.h"

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/ddp/half_hook.h"
#include "lockstep/parallel/ddp/powersgd.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/recompute.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/testing/model_cases.h"
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

ParityCase Case() {
  ParityCase c = ModelCase("mlp", at::kDouble);
  c.micro_steps = 2;
  c.clip_norm = 1;
  return c;
}

StrategyFactory FactoryOf(const std::string& name) {
  return [name](std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm) {
    return ValueOrThrow(MakeStrategy(name, std::move(model), &comm));
  };
}

}  // namespace

std::map<int, Trajectory> DeviceParity::TrainOnDevices(const ParityCase& c, int size,
                                                       const StrategyFactory& make) {
  const Models models = MakeModels(c, size);
  std::mutex mutex;
  std::map<int, Trajectory> found;
  GetParam().run(size, [&](comm::Communicator& world) {
    Trajectory trained = TrainRank(c, models[world.rank()], make, world);
    std::lock_guard<std::mutex> lock(mutex);
    found[world.rank()] = std::move(trained);
  });
  return found;
}

void DeviceParity::ExpectParity(const ParityCase& c, const std::string& name,
                                const StrategyFactory& make, at::ScalarType computed_in) {
  for (const int size : GetParam().sizes) {
    std::mutex mutex;
    std::map<int, Trajectory> expected;
    const Models models = MakeModels(c, size);
    comm::testing::RunRanks(size, [&](comm::Communicator& world) {
      Trajectory found = TrainRank(c, models[world.rank()], make, world);
      std::lock_guard<std::mutex> lock(mutex);
      expected[world.rank()] = std::move(found);
    });
    const at::ScalarType tolerance = GetParam().kernels_of_cpu ? c.dtype : computed_in;
    for (const auto& [rank, trajectory] : TrainOnDevices(c, size, make)) {
      ExpectSame(trajectory, expected[rank], tolerance, c.name + " under " + name);
    }
  }
}

TEST_P(DeviceParity, Strategies) {
  for (const char* name : {"manual", "ddp", "zero1", "zero2", "fsdp"}) {
    ExpectParity(Case(), name, FactoryOf(name));
  }
}

TEST_P(DeviceParity, OptionsOfDdp) {
  const auto expect = [this](const std::string& name, const DdpOptions& options,
                             const std::function<std::shared_ptr<ddp::CommHook>()>& hook) {
    ExpectParity(Case(), name,
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

TEST_P(DeviceParity, OptionsOfFsdp) {
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
    ExpectParity(
        c, name,
        [&](std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm) {
          return std::make_unique<Fsdp>(std::move(model), comm, each);
        },
        each.mixed_precision.param.value_or(c.dtype));
  }
}

// Recomputation gives the gradients of a run without it.
TEST_P(DeviceParity, Recompute) {
  ParityCase c = Case();
  c.make = [make = c.make] {
    ParityModel model = make();
    Recompute(*model.module, [](const NamedUnit&) { return true; });
    return model;
  };
  for (const char* name : {"ddp", "fsdp"}) ExpectParity(c, name, FactoryOf(name));
}

// Products are bf16 there, so each rank count is compared with an all-reduce a gradient on the same
// device.
TEST_P(DeviceParity, Autocast) {
  if (GetParam().kernels_of_cpu) GTEST_SKIP() << "LibTorch has no autocast for it";
  ParityCase c = ModelCase("mlp", at::kFloat);
  c.make = [make = c.make] {
    ParityModel model = make();
    model.forward = [forward = model.forward](at::Tensor x) {
      const Autocast autocast(x.device().type(), at::kBFloat16);
      return forward(x);
    };
    return model;
  };
  for (const int size : GetParam().sizes) {
    const std::map<int, Trajectory> expected = TrainOnDevices(c, size, FactoryOf("manual"));
    for (const char* name : {"ddp", "fsdp"}) {
      const std::map<int, Trajectory> found = TrainOnDevices(c, size, FactoryOf(name));
      for (const auto& [rank, trajectory] : found) {
        ExpectSame(trajectory, expected.at(rank), c.dtype, std::string("autocast under ") + name);
      }
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceParity);

}  // namespace lockstep::parallel::testing
