// Trains under one strategy and prints the test accuracy after each epoch. README.md says what for.

#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/utils.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/data/sampler.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/check_loss.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/evaluate.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/model_flag.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/training_flags.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(std::string, strategy, "ddp", "none (for --ranks=1), manual, ddp, zero1, zero2 or fsdp");
ABSL_FLAG(lockstep::tutorials::Count, epochs, 10, "passes over the training images");
ABSL_FLAG(uint64_t, steps, 0, "end each epoch after this many batches; 0: after all of them");

namespace lockstep::bench {
namespace {

absl::Status Train(comm::Communicator& world) {
  const std::string name = absl::GetFlag(FLAGS_strategy);
  if (name == "none" && world.size() > 1) {
    return absl::InvalidArgumentError(
        "--strategy=none trains one model on one rank: add --ranks=1, and the --batch of all ranks "
        "together");
  }
  const std::string folder = absl::GetFlag(FLAGS_data);
  const std::shared_ptr<data::Dataset> train_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTrain}));
  const std::shared_ptr<data::Dataset> test_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTest}));
  const data::DistributedSampler sampler({.size = train_set->size(),
                                          .rank = world.rank(),
                                          .world = world.size(),
                                          .seed = absl::GetFlag(FLAGS_seed)});
  data::Loader loader(train_set, sampler, {.batch_size = absl::GetFlag(FLAGS_batch)});

  torch::manual_seed(absl::GetFlag(FLAGS_seed));
  const models::Classifier model = ValueOrThrow(models::Create(absl::GetFlag(FLAGS_model).value));
  model.module->to(world.device());
  const std::unique_ptr<parallel::Strategy> strategy =
      ValueOrThrow(parallel::MakeStrategy(name, model.module, &world));
  parallel::optim::FusedAdamW optimizer(strategy->named_parameters(),
                                        {.lr = absl::GetFlag(FLAGS_lr).value});

  const auto limit = static_cast<int64_t>(absl::GetFlag(FLAGS_steps));
  const int64_t steps = limit == 0 ? loader.batches_per_epoch() : limit;
  for (int64_t epoch = 1; epoch <= absl::GetFlag(FLAGS_epochs); ++epoch) {
    const absl::Time start = absl::Now();
    double loss_sum = 0;
    int64_t step = 0;
    for (const data::Batch& batch : loader) {
      if (step == steps) break;
      optimizer.zero_grad();
      const at::Tensor logits = model.forward(batch.To("images", world.device()));
      const at::Tensor loss = at::cross_entropy_loss(logits, batch.To("labels", world.device()));
      loss.backward();
      strategy->FinishBackward();
      optimizer.step();
      loss_sum += loss.item<double>();
      tutorials::CheckLoss(loss_sum, ++step, epoch);
    }
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    loader.SetEpoch(epoch);
    const tutorials::Evaluation test = ValueOrThrow(tutorials::Evaluate(model, test_set, world));
    tutorials::Print(world, "%s, epoch %d: loss %.4f, test accuracy %.2f %%, %d steps in %.1f s\n",
                     name, epoch, loss_sum / step, test.accuracy, step, seconds);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "trains under one strategy and prints the test accuracy after each epoch.",
       .example = "bazel run //tools/bench:accuracy -- --ranks=2 --strategy=fsdp"},
      lockstep::bench::Train);
}
