// Trains a classifier on several ranks that average their gradients by hand. README.md explains it.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/data/sampler.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/manual/manual.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/tools/device/stream_time.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/check_loss.h"
#include "lockstep/tutorials/common/checkpoint_flags.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/device_world.h"
#include "lockstep/tutorials/common/drift.h"
#include "lockstep/tutorials/common/evaluate.h"
#include "lockstep/tutorials/common/model_flag.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/progress.h"
#include "lockstep/tutorials/common/startup.h"
#include "lockstep/tutorials/common/tensorboard_flag.h"
#include "lockstep/tutorials/common/training_flags.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(uint64_t, epochs, 3, "passes over the training images; 0: only test");
ABSL_FLAG(uint64_t, steps, 0, "end each epoch after this many batches; 0: after all of them");

namespace lockstep::tutorials {
namespace {

absl::Status Train(comm::Communicator& world) {
  // STEP 1: the data. All ranks see all images, and each one learns from a share of its own.
  const std::string folder = absl::GetFlag(FLAGS_data);
  const std::shared_ptr<data::Dataset> train_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTrain}));
  const std::shared_ptr<data::Dataset> test_set =
      ValueOrThrow(data::mnist::Open({.directory = folder, .split = data::mnist::Split::kTest}));
  const data::DistributedSampler sampler({.size = train_set->size(),
                                          .rank = world.rank(),
                                          .world = world.size(),
                                          .seed = absl::GetFlag(FLAGS_seed)});
  data::Loader loader(
      train_set, sampler,
      {.batch_size = absl::GetFlag(FLAGS_batch), .pin_memory = world.device().is_cuda()});
  StartupDone("data");

  // STEP 2: the model. Manual copies rank 0's weights to all ranks, and does no more here: the rest
  // is STEP 4.
  torch::manual_seed(absl::GetFlag(FLAGS_seed));
  models::Classifier model = ValueOrThrow(models::Create(absl::GetFlag(FLAGS_model).value));
  model.module->to(world.device());
  parallel::Manual manual(model.module, world);
  parallel::optim::FusedAdamW optimizer(manual.named_parameters(),
                                        {.lr = absl::GetFlag(FLAGS_lr).value});

  // Where an earlier run ended early, go on as if it had not: see 02.
  Checkpoints checkpoints(&world);
  parallel::checkpoint::State state = {
      .strategy = &manual,
      .optimizer = &optimizer,
      .generators = {at::globalContext().defaultGenerator(world.device())}};
  int64_t step = 0;     // of the epoch
  double loss_sum = 0;  // of these
  int64_t steps_made = 0;
  TensorBoard board(world.rank());  // curves, where --tensorboard asks for them
  StartupDone("model");
  if (const auto resumed = checkpoints.Resume(state)) {
    steps_made = *resumed;
    ThrowIfError(loader.Seek(ValueOrThrow(data::ParsePosition(state.notes["position"]))));
    step = std::stoll(state.notes["step"]);
    loss_sum = std::stod(state.notes["loss_sum"]);
    Print(world, "going on after step %d\n", steps_made);
  }

  const auto limit = static_cast<int64_t>(absl::GetFlag(FLAGS_steps));
  const int64_t steps = limit == 0 ? loader.batches_per_epoch() : limit;
  const auto epochs = static_cast<int64_t>(absl::GetFlag(FLAGS_epochs));
  for (int64_t epoch = loader.position().epoch + 1; epoch <= epochs; ++epoch) {
    const absl::Time start = absl::Now();
    absl::Duration waited;  // for gradients of other ranks
    {
      Progress progress(absl::StrFormat("epoch %d", epoch), steps - step,
                        {.enabled = world.rank() == 0 && launch::IsTerminal(2)});
      for (const data::Batch& batch : loader) {
        if (limit > 0 && step >= limit) break;
        // STEP 3: up to the gradients, the step of tutorial 02.
        optimizer.zero_grad();
        const at::Tensor logits = model.forward(batch.To("images", world.device()));
        const at::Tensor loss = at::cross_entropy_loss(logits, batch.To("labels", world.device()));
        loss.backward();

        // STEP 4: every gradient becomes its average over the ranks, one after the other, and
        // nobody computes meanwhile. Equal gradients change equal weights equally.
        const device::StreamTime backward_end(world.device());
        for (const at::Tensor& parameter : manual.parameters()) {
          ThrowIfError(world.AllReduce(parameter.mutable_grad(), comm::ReduceOp::kAverage).Wait());
        }
        const device::StreamTime averaged(world.device());
        optimizer.step();
        waited += Elapsed(backward_end, averaged);  // on a GPU: of the GPU, which is behind

        loss_sum += loss.item<double>();
        StartupDone("first step", &world);
        CheckLoss(loss_sum, ++step, epoch);
        progress.Advance(absl::StrFormat("loss %.4f", loss_sum / step));
        board.Step(steps_made + 1, loss.item<double>(), batch.rows() * world.size());
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
    loader.SetEpoch(epoch);

    // STEP 5: the test images are shared out, too. The loss is that of rank 0's share.
    const Evaluation test = ValueOrThrow(Evaluate(model, test_set, world));
    board.Test(steps_made, test.loss, test.accuracy);
    Print(
        world,
        "epoch %d: loss %.4f, test loss %.4f, test accuracy %.2f %%, %d steps in %.1f s, "
        "%.2f s of them waiting for gradients; %d all-reduces a step, 0 %% hidden; weights differ "
        "by %.3g %%\n",
        epoch, loss_sum / std::max<int64_t>(step, 1), test.loss, test.accuracy, step, seconds,
        absl::ToDoubleSeconds(waited), manual.parameters().size(),
        Drift(manual.parameters(), world));
    step = 0;
    loss_sum = 0;
  }
  state.notes = {{"position", data::ToString(loader.position())}, {"step", "0"}, {"loss_sum", "0"}};
  checkpoints.Finish(steps_made, state);
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "trains a classifier on several ranks that average their gradients by hand.",
       .example = "bazel run //tutorials:mnist_manual_ddp -- --model=mlp --epochs=1"},
      lockstep::tutorials::Train, lockstep::tutorials::RanksOnDevice(/*default_ranks=*/4),
      lockstep::tutorials::CreateWorldOnDevice);
}
