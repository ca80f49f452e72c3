// Trains a classifier of Fashion-MNIST in one process, on one device. README.md explains it.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/data/sampler.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/checkpoint/safetensors.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/file.h"
#include "lockstep/tutorials/common/check_loss.h"
#include "lockstep/tutorials/common/checkpoint_flags.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/device_flag.h"
#include "lockstep/tutorials/common/model_flag.h"
#include "lockstep/tutorials/common/progress.h"
#include "lockstep/tutorials/common/run_main.h"
#include "lockstep/tutorials/common/startup.h"
#include "lockstep/tutorials/common/tensorboard_flag.h"
#include "lockstep/tutorials/common/training_flags.h"

ABSL_FLAG(uint64_t, epochs, 3, "passes over the training images; 0: only test");
ABSL_FLAG(uint64_t, steps, 0, "end each epoch after this many batches; 0: after all of them");
ABSL_FLAG(std::string, load_weights, "", "safetensors file to start from; none: random weights");
ABSL_FLAG(std::string, save_weights, "", "safetensors file to write after each epoch");

namespace lockstep::tutorials {
namespace {

// The loss and the share of right answers over a whole data set, which the model does not learn.
std::string Test(models::Classifier& model, const std::shared_ptr<data::Dataset>& dataset,
                 int64_t steps_made, TensorBoard& board) {
  const at::NoGradGuard no_grad;
  data::Loader loader(dataset, data::SequentialSampler(dataset->size()), {.batch_size = 100});
  double loss = 0;
  double right = 0;
  for (const data::Batch& batch : loader) {
    const at::Tensor labels = batch.To("labels", ChosenDevice());
    const at::Tensor logits = model.forward(batch.To("images", ChosenDevice()));
    loss += at::cross_entropy_loss(logits, labels).item<double>() * batch.rows();
    right += logits.argmax(/*dim=*/1).eq(labels).sum().item<double>();
  }
  loss /= dataset->size();
  const double accuracy = 100 * right / dataset->size();
  board.Test(steps_made, loss, accuracy);
  return absl::StrFormat("test loss %.4f, test accuracy %.2f %%", loss, accuracy);
}

absl::Status Train() {
  // STEP 1: the data. The loader hands out the training images in an order of its own each epoch.
  const std::string path = absl::GetFlag(FLAGS_save_weights);
  if (!path.empty()) ValueOrThrow(trace::OutputPath(path));  // before an epoch, not after it
  const std::string folder = absl::GetFlag(FLAGS_data);
  const std::shared_ptr<data::Dataset> train_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTrain}));
  const std::shared_ptr<data::Dataset> test_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTest}));
  const data::DistributedSampler sampler(
      {.size = train_set->size(), .seed = absl::GetFlag(FLAGS_seed)});
  data::Loader loader(
      train_set, sampler,
      {.batch_size = absl::GetFlag(FLAGS_batch), .pin_memory = ChosenDevice().is_cuda()});
  StartupDone("data");

  // STEP 2: the model, with random weights that the seed decides or with those of a file.
  at::manual_seed(absl::GetFlag(FLAGS_seed));
  models::Classifier model = ValueOrThrow(models::Create(absl::GetFlag(FLAGS_model).value));
  const std::string weights = absl::GetFlag(FLAGS_load_weights);
  if (!weights.empty()) ThrowIfError(parallel::checkpoint::LoadInto(*model.module, weights));
  model.module->to(ChosenDevice());

  // STEP 3: the optimizer, which is to change the weights.
  parallel::None none(model.module);  // one process: nothing is parallel
  parallel::optim::FusedAdamW optimizer(none.named_parameters(),
                                        {.lr = absl::GetFlag(FLAGS_lr).value});

  // STEP 4: where an earlier run ended early, go on as if it had not.
  Checkpoints checkpoints;
  parallel::checkpoint::State state = {
      .strategy = &none,
      .optimizer = &optimizer,
      .generators = {at::globalContext().defaultGenerator(ChosenDevice())}};
  int64_t step = 0;     // of the epoch
  double loss_sum = 0;  // of these
  int64_t steps_made = 0;
  TensorBoard board;  // curves, where --tensorboard asks for them
  StartupDone("model");
  if (const auto resumed = checkpoints.Resume(state)) {
    steps_made = *resumed;
    ThrowIfError(loader.Seek(ValueOrThrow(data::ParsePosition(state.notes["position"]))));
    step = std::stoll(state.notes["step"]);
    loss_sum = std::stod(state.notes["loss_sum"]);
    absl::PrintF("going on after step %d\n", steps_made);
  } else {
    absl::PrintF("before training: %s\n", Test(model, test_set, steps_made, board));
  }
  std::fflush(stdout);

  const auto limit = static_cast<int64_t>(absl::GetFlag(FLAGS_steps));
  const int64_t steps = limit == 0 ? loader.batches_per_epoch() : limit;
  const int64_t epochs = absl::GetFlag(FLAGS_epochs);
  for (int64_t epoch = loader.position().epoch + 1; epoch <= epochs; ++epoch) {
    const absl::Time start = absl::Now();
    {
      Progress progress(absl::StrFormat("epoch %d", epoch), steps - step);
      for (const data::Batch& batch : loader) {
        if (limit > 0 && step >= limit) break;
        // STEP 5: forward to the loss of one batch, backward to the gradients, and a step of the
        // weights against them.
        optimizer.zero_grad();
        const at::Tensor logits = model.forward(batch.To("images", ChosenDevice()));
        const at::Tensor loss = at::cross_entropy_loss(logits, batch.To("labels", ChosenDevice()));
        loss.backward();
        optimizer.step();

        loss_sum += loss.item<double>();
        StartupDone("first step");
        CheckLoss(loss_sum, ++step, epoch);
        progress.Advance(absl::StrFormat("loss %.4f", loss_sum / step));
        board.Step(steps_made + 1, loss.item<double>(), batch.rows());
        if (checkpoints.IsDue(++steps_made)) {
          state.notes = {{"position", data::ToString(loader.position())},
                         {"step", absl::StrCat(step)},
                         {"loss_sum", absl::StrFormat("%.17g", loss_sum)}};
          checkpoints.Save(steps_made, state);
          if (checkpoints.stopped()) return absl::OkStatus();
        }
      }
    }
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);

    // STEP 6: how well does the model do on images that it has never seen?
    absl::PrintF("epoch %d: loss %.4f, %s, %d steps in %.1f s\n", epoch, loss_sum / step,
                 Test(model, test_set, steps_made, board), step, seconds);
    std::fflush(stdout);
    step = 0;
    loss_sum = 0;
    loader.SetEpoch(epoch);

    // STEP 7: the weights, in a file that Python reads too.
    if (!path.empty()) ThrowIfError(parallel::checkpoint::SaveModule(*model.module, path));
  }
  state.notes = {{"position", data::ToString(loader.position())}, {"step", "0"}, {"loss_sum", "0"}};
  checkpoints.Finish(steps_made, state);
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunMain(
      argc, argv,
      {.summary = "trains a classifier of Fashion-MNIST in one process, on one device.",
       .example = "bazel run //tutorials:mnist_training -- --model=mlp --epochs=1"},
      lockstep::tutorials::Train);
}
