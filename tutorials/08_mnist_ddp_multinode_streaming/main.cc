// Trains a classifier under DDP, on many nodes, from images that are streamed out of HDF5 files.
// README.md explains it.
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
#include "lockstep/data/chunk_shuffle_sampler.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/loader.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/check_loss.h"
#include "lockstep/tutorials/common/checkpoint_flags.h"
#include "lockstep/tutorials/common/device_world.h"
#include "lockstep/tutorials/common/evaluate.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/format.h"
#include "lockstep/tutorials/common/model_flag.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/progress.h"
#include "lockstep/tutorials/common/startup.h"
#include "lockstep/tutorials/common/tensorboard_flag.h"
#include "lockstep/tutorials/common/training_flags.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(std::string, train_file, "", "HDF5 file of images and labels to learn from");
ABSL_FLAG(std::string, test_file, "", "HDF5 file to be tested with");
ABSL_FLAG(lockstep::tutorials::Count, budget_mib, 64, "memory of a rank for chunks, in MiB");
ABSL_FLAG(uint64_t, epochs, 3, "passes over the training images; 0: only test");
ABSL_FLAG(uint64_t, steps, 0, "end each epoch after this many batches; 0: after all of them");

namespace lockstep::tutorials {
namespace {

std::shared_ptr<data::hdf5::Hdf5Dataset> OpenFile(const std::string& path) {
  return ValueOrThrow(data::hdf5::Open(
      {.files = {path},
       .fields =
           {{.dataset = "images", .dtype = at::kFloat, .divide_by = 255, .shape = {1, 28, 28}},
            {.dataset = "labels", .classes = 10}},
       .memory_budget_bytes = absl::GetFlag(FLAGS_budget_mib) << 20}));
}

absl::Status Train(comm::Communicator& world) {
  // STEP 1: the data, which may be larger than any memory. Each rank opens the files and reads the
  // chunks of its own lane, each once an epoch, mixing the rows of as many as its budget holds.
  const std::string train_file = absl::GetFlag(FLAGS_train_file);
  const std::string test_file = absl::GetFlag(FLAGS_test_file);
  if (train_file.empty() || test_file.empty()) {
    return absl::InvalidArgumentError(
        "name the files to learn from and to be tested with: --train_file=FILE.h5 "
        "--test_file=FILE.h5; //tutorials:create_mnist_h5 makes them");
  }
  const std::shared_ptr<data::hdf5::Hdf5Dataset> train_set = OpenFile(train_file);
  const std::shared_ptr<data::Dataset> test_set = OpenFile(test_file);
  const data::ChunkShuffleSampler sampler({.chunks = train_set->chunks(),
                                           .window_chunks = train_set->window_chunks(),
                                           .rank = world.rank(),
                                           .world = world.size(),
                                           .seed = absl::GetFlag(FLAGS_seed)});
  data::Loader loader(
      train_set, sampler,
      {.batch_size = absl::GetFlag(FLAGS_batch), .pin_memory = world.device().is_cuda()});
  StartupDone("data");

  // STEP 2: the model. DDP copies rank 0's weights to all ranks, on all nodes.
  torch::manual_seed(absl::GetFlag(FLAGS_seed));
  models::Classifier model = ValueOrThrow(models::Create(absl::GetFlag(FLAGS_model).value));
  model.module->to(world.device());
  parallel::Ddp ddp(model.module, world);
  parallel::optim::FusedAdamW optimizer(ddp.named_parameters(),
                                        {.lr = absl::GetFlag(FLAGS_lr).value});

  // STEP 3: a job on many nodes will end early one day: go on where the last one saved.
  Checkpoints checkpoints(&world);
  parallel::checkpoint::State state = {
      .strategy = &ddp,
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
        // STEP 4: the step of tutorial 02, to the letter. The gradients are averaged over all ranks
        // of all nodes when backward() returns.
        optimizer.zero_grad();
        const at::Tensor logits = model.forward(batch.To("images", world.device()));
        const at::Tensor loss = at::cross_entropy_loss(logits, batch.To("labels", world.device()));
        loss.backward();
        optimizer.step();

        loss_sum += loss.item<double>();
        StartupDone("first step", &world);
        waited += ddp.last_step().exposed;
        ++step;
        CheckLoss(loss_sum, step, epoch);
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
    const absl::Duration waited_for_data = loader.stats().waited;
    loader.ResetStats();
    loader.SetEpoch(epoch);

    // STEP 5: the test images are shared out, too. What is printed is rank 0's, where it is no sum.
    const Evaluation test = ValueOrThrow(Evaluate(model, test_set, world));
    board.Test(steps_made, test.loss, test.accuracy);
    Print(world,
          "epoch %d: loss %.4f, test loss %.4f, test accuracy %.2f %%, %d steps in %.1f s, "
          "%.1f s of them waiting for gradients, %.1f s for data\n",
          epoch, loss_sum / std::max<int64_t>(step, 1), test.loss, test.accuracy, step, seconds,
          absl::ToDoubleSeconds(waited), absl::ToDoubleSeconds(waited_for_data));
    step = 0;
    loss_sum = 0;
  }
  const data::hdf5::Stats stats = train_set->stats();
  Print(world, "read on rank 0: %s MiB of chunks, never more than %s MiB of them in memory\n",
        InMebibytes(stats.bytes_read), InMebibytes(stats.peak_memory_bytes));
  state.notes = {{"position", data::ToString(loader.position())}, {"step", "0"}, {"loss_sum", "0"}};
  checkpoints.Finish(steps_made, state);
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "trains a classifier under DDP, on any number of nodes, from HDF5 files.",
       .example = "bazel run //tutorials:mnist_ddp_multinode_streaming -- --submit "
                  "--train_file=train.h5 --test_file=test.h5"},
      lockstep::tutorials::Train, lockstep::tutorials::RanksOnDevice(),
      lockstep::tutorials::CreateWorldOnDevice);
}
