// What checkpoint_flags_test runs, on several ranks: a training of 400 steps that can be ended at
// any of them.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "absl/status/status.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/testing/test_models.h"
#include "lockstep/tutorials/common/checkpoint_flags.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/world.h"

namespace lockstep::tutorials {
namespace {

constexpr int64_t kSteps = 400;

absl::Status Train(comm::Communicator& world) {
  torch::manual_seed(1);
  parallel::testing::OddNet net;
  parallel::Fsdp fsdp(net, world);
  parallel::optim::FusedAdamW optimizer(fsdp.named_parameters());
  Checkpoints checkpoints(&world);
  parallel::checkpoint::State state = {.strategy = &fsdp, .optimizer = &optimizer};
  int64_t step = checkpoints.Resume(state).value_or(0);
  Print(world, "begins at step %d\n", step);
  const auto loss = [&] {
    return net(at::sin(at::arange(34).view({2, 17}) + step + world.rank())).square().sum();
  };
  while (step < kSteps) {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (checkpoints.IsDue(++step)) {
      checkpoints.Save(step, state);
      if (checkpoints.stopped()) return absl::OkStatus();
    }
  }
  const at::NoGradGuard no_grad;
  Print(world, "loss %.9g\n", loss().item<double>());
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv, {.summary = "trains.", .example = "checkpoint_test_program --ranks=2"},
      lockstep::tutorials::Train, {.default_ranks = 2});
}
