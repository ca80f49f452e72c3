// Trains as peers/train.py does, on the same models, data and seed, and prints one JSON line.
// README.md says what for.

#include <ATen/Parallel.h>
#include <sys/resource.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/comm/testing/timing_communicator.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/optim/fused_sgd.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/model_flag.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/startup.h"
#include "lockstep/tutorials/common/world.h"

ABSL_FLAG(std::string, strategy, "ddp", "none (each rank for itself), manual, ddp or fsdp");
ABSL_FLAG(std::string, optimizer, "adamw", "adamw (lr 0.001) or sgd (lr 0.01), fused");
ABSL_FLAG(lockstep::tutorials::Count, steps, 60, "steps, warm-up included");
ABSL_FLAG(uint64_t, warmup, 10, "steps that are not timed");
ABSL_FLAG(lockstep::tutorials::Count, batch, 64, "images a step, on each rank");
ABSL_FLAG(lockstep::tutorials::Count, threads, 1, "of LibTorch, on each rank");
ABSL_FLAG(uint64_t, bucket_bytes, 0, "of ddp; 0: its default");
ABSL_FLAG(std::string, comm, "mpi",
          "after warm-up: mpi; serial, where communication starts when backward has ended; or "
          "null, where there is none, and losses are wrong");
ABSL_FLAG(double, started_at, 0,
          "Unix time when the run was started, for the time to the first step; 0: now");

namespace lockstep::bench {
namespace {

using comm::testing::Timing;
using comm::testing::TimingCommunicator;

Timing TimingOf(const std::string& name) {
  if (name == "mpi") return Timing::kAsIs;
  if (name == "serial") return Timing::kDeferred;
  if (name == "null") return Timing::kNothing;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("there is no --comm=", name, ": take mpi, serial or null")));
}

std::unique_ptr<parallel::Strategy> MakeStrategy(std::shared_ptr<torch::nn::Module> model,
                                                 comm::Communicator& comm) {
  const std::string name = absl::GetFlag(FLAGS_strategy);
  const auto bucket_bytes = static_cast<int64_t>(absl::GetFlag(FLAGS_bucket_bytes));
  if (name == "ddp" && bucket_bytes > 0) {
    return std::make_unique<parallel::Ddp>(std::move(model), comm,
                                           parallel::DdpOptions{.bucket_bytes = bucket_bytes});
  }
  return ValueOrThrow(parallel::MakeStrategy(name, std::move(model), &comm));
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const parallel::Strategy& strategy) {
  using parallel::optim::FusedAdamW;
  using parallel::optim::FusedAdamWOptions;
  using parallel::optim::FusedSgd;
  using parallel::optim::FusedSgdOptions;
  const std::string name = absl::GetFlag(FLAGS_optimizer);
  const auto& parameters = strategy.named_parameters();
  if (name == "adamw") {
    return std::make_unique<FusedAdamW>(parameters, FusedAdamWOptions{.lr = 1e-3});
  }
  if (name == "sgd") return std::make_unique<FusedSgd>(parameters, FusedSgdOptions{.lr = 0.01});
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("there is no --optimizer=", name, ": take adamw or sgd")));
}

// The value below which `share` of the values lie; milliseconds.
double Quantile(std::vector<absl::Duration> values, double share) {
  const auto place = values.begin() + static_cast<int64_t>(share * (values.size() - 1) + 0.5);
  std::nth_element(values.begin(), place, values.end());
  return absl::ToDoubleMilliseconds(*place);
}

struct Step {
  absl::Duration total, forward, optimizer;
  parallel::StepStatistics statistics;
};

absl::Status Train(comm::Communicator& world) {
  const double started_at = absl::GetFlag(FLAGS_started_at);
  const absl::Time start = started_at > 0 ? absl::FromUDate(started_at * 1e3) : absl::Now();
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  const auto warmup = static_cast<int64_t>(absl::GetFlag(FLAGS_warmup));
  const int64_t batch_size = absl::GetFlag(FLAGS_batch);
  if (warmup >= steps) {
    return absl::InvalidArgumentError("--warmup must be below --steps: nothing would be timed");
  }
  at::set_num_threads(static_cast<int>(absl::GetFlag(FLAGS_threads)));
  const Timing timing = TimingOf(absl::GetFlag(FLAGS_comm));
  const auto current = std::make_shared<std::atomic<Timing>>(Timing::kAsIs);
  TimingCommunicator comm(parallel::SplitPrivate(world), current);

  const std::shared_ptr<data::Dataset> dataset =
      ValueOrThrow(data::mnist::Open({.directory = absl::GetFlag(FLAGS_data)}));
  tutorials::StartupDone("data");
  torch::manual_seed(0);
  models::Classifier model = ValueOrThrow(models::Create(absl::GetFlag(FLAGS_model).value));
  const std::unique_ptr<parallel::Strategy> strategy = MakeStrategy(model.module, comm);
  const std::unique_ptr<torch::optim::Optimizer> optimizer = MakeOptimizer(*strategy);
  tutorials::StartupDone("model");

  std::vector<Step> measured;
  std::vector<double> losses;
  double first_step_s = 0;
  data::Batch batch;
  std::vector<int64_t> rows(batch_size);
  for (int64_t step = 0; step < steps; ++step) {
    if (step == warmup) {
      ThrowIfError(world.Barrier().Wait());
      *current = timing;
    }
    std::iota(rows.begin(), rows.end(),
              (step * world.size() + world.rank()) * batch_size % (dataset->size() - batch_size));
    ThrowIfError(dataset->ReadInto(rows, batch));

    const absl::Duration begin = trace::SteadyNow();
    optimizer->zero_grad();
    const at::Tensor loss =
        torch::nn::functional::cross_entropy(model.forward(batch["images"]), batch["labels"]);
    const absl::Duration forward_end = trace::SteadyNow();
    loss.backward();
    strategy->FinishBackward();
    const absl::Duration backward_end = trace::SteadyNow();
    optimizer->step();
    const absl::Duration end = trace::SteadyNow();
    if (step >= warmup) {
      measured.push_back(
          {end - begin, forward_end - begin, end - backward_end, strategy->last_step()});
    }

    losses.push_back(loss.item<double>());
    if (step == 0) first_step_s = absl::ToDoubleSeconds(absl::Now() - start);
    tutorials::StartupDone("first step", &world);
  }
  *current = Timing::kAsIs;

  const auto quantile = [&](double share, const auto& time_of) {
    std::vector<absl::Duration> times;
    for (const Step& step : measured) times.push_back(time_of(step));
    return Quantile(std::move(times), share);
  };
  const auto total = [](const Step& step) { return step.total; };
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const nlohmann::json report = {
      {"strategy", strategy->name()},
      {"model", absl::GetFlag(FLAGS_model).value},
      {"comm", absl::GetFlag(FLAGS_comm)},
      {"ranks", world.size()},
      {"batch", batch_size},
      {"threads", at::get_num_threads()},
      {"optimizer", absl::GetFlag(FLAGS_optimizer)},
      {"step_ms", quantile(0.5, total)},
      {"step_ms_p10", quantile(0.1, total)},
      {"step_ms_p90", quantile(0.9, total)},
      {"forward_ms", quantile(0.5, [](const Step& s) { return s.forward; })},
      {"optimizer_ms", quantile(0.5, [](const Step& s) { return s.optimizer; })},
      {"backward_ms",
       quantile(0.5, [](const Step& s) { return s.total - s.forward - s.optimizer; })},
      {"communication_ms",
       quantile(0.5, [](const Step& s) { return *s.statistics.communication; })},  // CPUs know it
      {"exposed_ms", quantile(0.5, [](const Step& s) { return s.statistics.exposed; })},
      {"collectives", measured.back().statistics.collectives},
      {"payload_bytes", measured.back().statistics.payload_bytes},
      {"start_to_first_step_s", first_step_s},
      {"peak_rss_mib", usage.ru_maxrss / 1024},
      {"losses", losses},
  };
  tutorials::Print(world, "%s\n", report.dump());
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  absl::SetFlag(&FLAGS_model, {"mlp"});
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "times training under one strategy, and prints one JSON line.",
       .example = "bazel run //tools/bench:train -- --ranks=2 --model=mlp --strategy=ddp"},
      lockstep::bench::Train);
}
