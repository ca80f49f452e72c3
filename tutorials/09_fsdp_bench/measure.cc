#include "lockstep/tutorials/09_fsdp_bench/measure.h"

#include <ATen/ops/empty.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/counting.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/sampler.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"
#include "lockstep/parallel/grad_hook.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/trace_units.h"
#include "lockstep/tools/device/stream_time.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/memory_track.h"
#include "lockstep/tools/trace/recorder.h"
#include "lockstep/tutorials/common/startup.h"

namespace lockstep::tutorials {
namespace {

using trace::Index;
using trace::MemoryCategory;
using trace::MemoryScope;

constexpr int64_t kWarmUpSteps = 2;      // warm caches and memory; not timed
constexpr int64_t kRecordedSteps = 3;    // the last ones, of which a timeline is written
constexpr size_t kMemorySamples = 1500;  // of these steps

ModelSize SizeOf(torch::nn::Module& model) {
  ModelSize size;
  std::vector<int64_t> units;
  const auto owned =
      ValueOrThrow(parallel::fsdp::AssignParameters(model, parallel::FindUnits(model)));
  for (const auto& parameters : owned) {
    units.push_back(0);
    for (const parallel::NamedTensor& parameter : parameters) {
      units.back() += parameter.tensor.numel();
      size.element_bytes = static_cast<int64_t>(parameter.tensor.element_size());
    }
    size.parameters += units.back();
  }
  size.root_parameters = units[0];
  units.erase(units.begin());
  std::sort(units.rbegin(), units.rend());
  for (size_t i = 0; i < std::min<size_t>(2, units.size()); ++i) size.two_largest_units += units[i];
  return size;
}

// Autograd makes gradients among its own temporaries: tells them apart when they have arrived.
std::vector<parallel::GradHook> MarkGradients(torch::nn::Module& model) {
  std::vector<parallel::GradHook> hooks;
  for (const at::Tensor& parameter : model.parameters()) {
    hooks.emplace_back(parameter, [parameter] {
      const at::Tensor& gradient = parameter.grad();
      if (gradient.defined()) {
        trace::Recategorize(gradient.storage().data(), MemoryCategory::kGradients);
      }
    });
  }
  return hooks;
}

absl::Duration Median(std::vector<absl::Duration> times) {
  if (times.empty()) return absl::ZeroDuration();
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// The largest of the ranks' values, each by itself.
void TakeMaxima(comm::Communicator& world, const std::vector<int64_t*>& values) {
  at::Tensor all = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  int64_t* data = all.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < values.size(); ++i) data[i] = *values[i];
  const at::Tensor shared = all.to(world.device());
  ThrowIfError(world.AllReduce(shared, comm::ReduceOp::kMax).Wait());
  all.copy_(shared);
  for (size_t i = 0; i < values.size(); ++i) *values[i] = data[i];
}

// Of the rank whose bytes have the largest sum, the first such one.
trace::MemoryBytes OfLargest(comm::Communicator& world, const trace::MemoryBytes& bytes) {
  constexpr int64_t kCount = trace::kNumMemoryCategories;
  at::Tensor own = at::empty({kCount}, at::kLong);
  std::copy(bytes.begin(), bytes.end(), own.mutable_data_ptr<int64_t>());
  at::Tensor all =
      at::empty({world.size() * kCount}, at::TensorOptions(at::kLong).device(world.device()));
  ThrowIfError(world.AllGatherInto(all, own.to(world.device())).Wait());
  all = all.cpu();
  const int64_t* data = all.const_data_ptr<int64_t>();
  trace::MemoryBytes largest{};
  int64_t largest_sum = -1;
  for (int rank = 0; rank < world.size(); ++rank, data += kCount) {
    const int64_t sum = std::accumulate(data, data + kCount, int64_t{0});
    if (sum <= largest_sum) continue;
    largest_sum = sum;
    std::copy(data, data + kCount, largest.begin());
  }
  return largest;
}

absl::Duration Maximum(comm::Communicator& world, absl::Duration time) {
  int64_t nanoseconds = absl::ToInt64Nanoseconds(time);
  TakeMaxima(world, {&nanoseconds});
  return absl::Nanoseconds(nanoseconds);
}

// One rank's training under one strategy.
class Trainer {
 public:
  Trainer(const Job& job, const std::string& strategy, int rank, int size,
          std::unique_ptr<comm::Communicator> comm)
      : comm_(std::move(comm), counters_),
        loader_(job.dataset,
                data::DistributedSampler({.size = job.dataset->size(),
                                          .rank = rank,
                                          .world = size,
                                          .seed = job.seed,
                                          .drop_last = true}),
                {.batch_size = job.batch,
                 .drop_last = true,
                 .prefetch_batches = 0,
                 .pin_memory = comm_.device().is_cuda()}) {
    torch::manual_seed(job.seed);
    {
      MemoryScope scope(MemoryCategory::kParameters);
      model_ = ValueOrThrow(models::Create(job.model));
      model_.module->to(comm_.device(), job.dtype);
    }
    size_ = SizeOf(*model_.module);
    dtype_ = job.dtype;
    autocast_ = job.autocast;
    strategy_ = ValueOrThrow(parallel::MakeStrategy(strategy, model_.module, &comm_));
    mark_gradients_ = MarkGradients(*model_.module);
    {
      MemoryScope scope(MemoryCategory::kOptimizer);
      optimizer_.emplace(strategy_->named_parameters(),
                         parallel::optim::FusedAdamWOptions{.lr = job.learning_rate});
    }
    counters_->Reset();
  }

  // One step on the next batch; returns its loss.
  at::Tensor Step() {
    const data::Batch& batch = Next();
    started_ = trace::SteadyNow();
    const device::StreamTime begin(comm_.device());
    phase_ends_.clear();
    optimizer_->zero_grad();
    at::Tensor loss;
    {
      MemoryScope scope(MemoryCategory::kActivations);
      loss = Loss(batch);
      EndPhase("forward");
      loss.backward();
      EndPhase("backward");
    }
    strategy_->FinishBackward();
    EndPhase("averaging");
    optimizer_->step();
    EndPhase("optimizer");
    WaitForPhases(begin);
    times_.push_back(phases_.back().end);
    const parallel::StepStatistics& step = strategy_->last_step();
    backward_.push_back(std::max(step.backward - step.exposed, absl::ZeroDuration()));
    communication_.push_back(step.communication.value_or(absl::ZeroDuration()));
    knows_communication_ = step.communication.has_value();
    exposed_.push_back(step.exposed);
    return loss.detach().to(at::kDouble);
  }

  // Forgets what warm-up took.
  void BeginMeasuring() {
    trace::ResetMemoryPeak();
    ResetGpuPeak(comm_.device());
    counters_->Reset();
    for (auto* times : {&times_, &backward_, &communication_, &exposed_}) {
      if (times->size() > 1) times->erase(times->begin(), times->end() - 1);
    }
    measured_from_ = times_.size();
  }

  // Records timelines from now on.
  void StartRecording() {
    trace_units_ = parallel::TraceUnits(*model_.module);
    trace::StartRecording();
    trace::StartMemoryTimeline(kMemorySamples);
  }

  // Ends that, and writes them to `path`. Returns that of the last step.
  StepTimeline StopRecording(const std::string& path, int rank) {
    trace::StopRecording();
    trace_units_.clear();
    const std::vector<trace::MemorySample> samples = trace::StopMemoryTimeline();
    trace::RecordMemory(samples);
    ThrowIfError(trace::WriteChromeTrace(path, rank));
    StepTimeline timeline = {.phases = phases_};
    const absl::Duration length = phases_.back().end;
    for (trace::MemorySample sample : samples) {
      sample.time -= started_;
      if (sample.time > length) break;
      // What there was before stays until the first change.
      if (sample.time <= absl::ZeroDuration()) {
        sample.time = absl::ZeroDuration();
        timeline.memory.clear();
      }
      timeline.memory.push_back(sample);
    }
    if (!timeline.memory.empty()) {
      timeline.memory.push_back({length, timeline.memory.back().live_by_category});
    }
    return timeline;
  }

  void Report(Measurement& result) const {
    const auto measured = [this](const std::vector<absl::Duration>& times) {
      return std::vector<absl::Duration>(times.begin() + measured_from_, times.end());
    };
    const auto steps = static_cast<int64_t>(measured(times_).size());
    result.size = size_;
    result.step = Median(measured(times_));
    result.backward = Median(measured(backward_));
    result.communication =
        knows_communication_ ? std::optional(Median(measured(communication_))) : std::nullopt;
    result.exposed = Median(measured(exposed_));
    const trace::MemorySnapshot memory = trace::GetMemory();
    result.peak = memory.peak_by_category;
    result.total_peak = memory.peak;
    result.peak_make_up = memory.at_peak;
    result.gpu = GpuPeak(comm_.device());
    for (MemoryCategory category :
         {MemoryCategory::kParameters, MemoryCategory::kGradients, MemoryCategory::kOptimizer}) {
      result.kept += memory.live_by_category[Index(category)];
    }
    const comm::Traffic traffic = counters_->total();
    result.sent_bytes = traffic.wire_bytes / steps;
    result.payload_bytes = traffic.payload_bytes / steps;
    result.collectives = traffic.operations / steps;
  }

 private:
  at::Tensor Loss(const data::Batch& batch) {
    const at::Tensor images = batch.To("images", comm_.device()).to(dtype_);
    const at::Tensor labels = batch.To("labels", comm_.device());
    std::optional<parallel::Autocast> autocast;
    if (autocast_) autocast.emplace(comm_.device().type(), *autocast_);
    return torch::nn::functional::cross_entropy(model_.forward(images), labels);
  }

  const data::Batch& Next() {
    MemoryScope scope(MemoryCategory::kData);
    const data::Batch* batch = ValueOrThrow(loader_.Next());
    if (batch == nullptr) batch = ValueOrThrow(loader_.Next());  // the next epoch
    return *batch;
  }

  // What there was since the phase before, or since the step began. Does not wait for a GPU.
  void EndPhase(const std::string& name) {
    phase_ends_.emplace_back(name, device::StreamTime(comm_.device()));
  }

  // The step that began at `begin` is done on the device, too.
  void WaitForPhases(const device::StreamTime& begin) {
    phases_.clear();
    absl::Duration last;
    for (const auto& [name, time] : phase_ends_) {
      const absl::Duration end = Elapsed(begin, time);
      phases_.push_back({name, std::exchange(last, end), end});
    }
  }

  const std::shared_ptr<comm::TrafficCounters> counters_ =
      std::make_shared<comm::TrafficCounters>();
  comm::CountingCommunicator comm_;
  data::Loader loader_;
  models::Classifier model_;
  ModelSize size_;
  at::ScalarType dtype_ = at::kFloat;
  std::optional<at::ScalarType> autocast_;
  std::unique_ptr<parallel::Strategy> strategy_;
  std::vector<parallel::GradHook> mark_gradients_;
  std::optional<parallel::optim::FusedAdamW> optimizer_;
  std::vector<absl::Duration> times_, backward_, communication_, exposed_;
  bool knows_communication_ = true;
  size_t measured_from_ = 0;
  absl::Duration started_;  // the last step
  std::vector<std::pair<std::string, device::StreamTime>> phase_ends_;
  std::vector<StepTimeline::Phase> phases_;
  std::vector<parallel::HookHandle> trace_units_;
};

}  // namespace

Measurement Measure(const Job& job, const std::string& strategy, comm::Communicator& world) {
  const bool alone = strategy == "none";
  Measurement result = {.strategy = strategy, .ranks = alone ? 1 : world.size()};
  auto comm = parallel::SplitPrivate(world);
  std::optional<Trainer> trainer;
  if (!alone) {
    trainer.emplace(job, strategy, world.rank(), world.size(), std::move(comm));
  } else if (world.rank() == 0) {
    Job global = job;
    global.batch *= world.size();
    trainer.emplace(global, strategy, /*rank=*/0, /*size=*/1, std::move(comm));
  }
  for (int64_t step = 0; step < job.steps; ++step) {
    if (step == std::min(kWarmUpSteps, job.steps - 1) && trainer) trainer->BeginMeasuring();
    const bool record = trainer && !job.timeline_folder.empty();
    if (record && step == std::max<int64_t>(job.steps - kRecordedSteps, 0)) {
      trainer->StartRecording();
    }
    at::Tensor loss = at::empty({}, at::TensorOptions(at::kDouble).device(world.device()));
    if (trainer) loss = trainer->Step();
    // Those who do not train wait here, step by step, as all do for the slowest.
    ThrowIfError((alone ? world.Broadcast(loss, /*root=*/0)
                        : world.AllReduce(loss, comm::ReduceOp::kAverage))
                     .Wait());
    result.losses.push_back(loss.item<double>());
    StartupDone("first step", &world);
  }
  if (trainer) trainer->Report(result);
  if (!job.timeline_folder.empty()) {
    for (int rank = 0; rank < result.ranks; ++rank) {
      result.timeline_files.push_back(absl::StrCat("timeline.", strategy, ".rank", rank, ".json"));
    }
    if (trainer) {
      result.timeline = trainer->StopRecording(
          absl::StrCat(job.timeline_folder, "/", result.timeline_files[world.rank()]),
          world.rank());
    }
  }
  std::vector<int64_t*> bytes = {&result.total_peak,    &result.kept,        &result.sent_bytes,
                                 &result.payload_bytes, &result.collectives, &result.gpu.allocated,
                                 &result.gpu.reserved};
  for (int64_t& peak : result.peak) bytes.push_back(&peak);
  TakeMaxima(world, bytes);
  result.peak_make_up = OfLargest(world, result.peak_make_up);
  result.step = Maximum(world, result.step);
  result.backward = Maximum(world, result.backward);
  if (result.communication) {  // ranks alike
    result.communication = Maximum(world, *result.communication);
  }
  result.exposed = Maximum(world, result.exposed);
  result.samples_per_second =
      static_cast<double>(job.batch * world.size()) / absl::ToDoubleSeconds(result.step);
  return result;
}

}  // namespace lockstep::tutorials
