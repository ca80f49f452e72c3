// Trains a classifier on several ranks that do not talk to each other. README.md explains it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/utils.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/data/sampler.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/check_loss.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/device_world.h"
#include "lockstep/tutorials/common/drift.h"
#include "lockstep/tutorials/common/evaluate.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/model_flag.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/startup.h"
#include "lockstep/tutorials/common/tensorboard_flag.h"
#include "lockstep/tutorials/common/training_flags.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(uint64_t, epochs, 1, "passes of each rank over the training images; 0: only test");
ABSL_FLAG(uint64_t, steps, 0, "end each epoch after this many batches; 0: after all of them");
ABSL_FLAG(lockstep::tutorials::Count, drift_every, 200,
          "steps from one look at how far the ranks have come apart to the next");

namespace lockstep::tutorials {
namespace {

absl::Status Train(comm::Communicator& world) {
  // STEP 1: the data. Every rank learns from all images, in an order of its own.
  const std::string folder = absl::GetFlag(FLAGS_data);
  const std::shared_ptr<data::Dataset> train_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTrain}));
  const std::shared_ptr<data::Dataset> test_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTest}));
  const data::DistributedSampler sampler(
      {.size = train_set->size(), .seed = absl::GetFlag(FLAGS_seed) + world.rank()});
  data::Loader loader(
      train_set, sampler,
      {.batch_size = absl::GetFlag(FLAGS_batch), .pin_memory = world.device().is_cuda()});
  StartupDone("data");

  // STEP 2: the model. The seed is the same, so all ranks begin with the same weights.
  torch::manual_seed(absl::GetFlag(FLAGS_seed));
  models::Classifier model = ValueOrThrow(models::Create(absl::GetFlag(FLAGS_model).value));
  model.module->to(world.device());
  parallel::None none(model.module);  // nothing is parallel: each rank is alone with its copy
  parallel::optim::FusedAdamW optimizer(none.named_parameters(),
                                        {.lr = absl::GetFlag(FLAGS_lr).value});
  TensorBoard board = TensorBoard::OfEachRank(world.rank());  // curves, where --tensorboard asks
  StartupDone("model");
  Print(world, "step 0: weights differ by %.3g %%\n", Drift(none.parameters(), world));

  const auto limit = static_cast<int64_t>(absl::GetFlag(FLAGS_steps));
  const int64_t steps = limit == 0 ? loader.batches_per_epoch() : limit;
  const auto epochs = static_cast<int64_t>(absl::GetFlag(FLAGS_epochs));
  int64_t steps_made = 0;
  for (int64_t epoch = 1; epoch <= epochs; ++epoch) {
    const absl::Time start = absl::Now();
    int64_t step = 0;
    double loss_sum = 0;
    for (const data::Batch& batch : loader) {
      if (step == steps) break;
      // STEP 3: the step of tutorial 02, to the letter. Nobody hears of the others' gradients.
      optimizer.zero_grad();
      const at::Tensor logits = model.forward(batch.To("images", world.device()));
      const at::Tensor loss = at::cross_entropy_loss(logits, batch.To("labels", world.device()));
      loss.backward();
      optimizer.step();

      loss_sum += loss.item<double>();
      StartupDone("first step", &world);
      CheckLoss(loss_sum, ++step, epoch);
      board.Step(++steps_made, loss.item<double>(), batch.rows());

      // STEP 4: how far apart are the copies? Only this line communicates, and it changes nothing.
      if (steps_made % absl::GetFlag(FLAGS_drift_every) == 0) {
        Print(world, "step %d: weights differ by %.3g %%\n", steps_made,
              Drift(none.parameters(), world));
      }
    }
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    loader.SetEpoch(epoch);

    // STEP 5: each rank tests a model of its own, on all test images, in a world of its own.
    const std::unique_ptr<comm::Communicator> alone =
        ValueOrThrow(world.Split(/*color=*/world.rank(), /*key=*/0));
    const Evaluation test = ValueOrThrow(Evaluate(model, test_set, *alone));
    board.Test(steps_made, test.loss, test.accuracy);
    absl::PrintF(
        "rank %d of %d: epoch %d: loss %.4f, test loss %.4f, test accuracy %.2f %%, %d steps in "
        "%.1f s\n",
        world.rank(), world.size(), epoch, loss_sum / step, test.loss, test.accuracy, step,
        seconds);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "trains a classifier on several ranks that do not talk to each other.",
       .example = "bazel run //tutorials:mnist_distributed -- --model=mlp --steps=200"},
      lockstep::tutorials::Train, lockstep::tutorials::RanksOnDevice(/*default_ranks=*/4),
      lockstep::tutorials::CreateWorldOnDevice);
}
