#include "lockstep/parallel/checkpoint/testing/training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <torch/utils.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint::testing {
namespace {

constexpr int64_t kInputs = 17;
constexpr int64_t kClasses = 5;

// Rows that say which they are.
class Rows : public data::Dataset {
 public:
  explicit Rows(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  absl::Status ReadInto(absl::Span<const int64_t> rows, data::Batch& batch) override {
    if (absl::Status s = data::CheckRows(rows, size(), "rows"); !s.ok()) return s;
    const auto count = static_cast<int64_t>(rows.size());
    int64_t* out = batch.Reserve("row", {count}, at::kLong).mutable_data_ptr<int64_t>();
    for (int64_t row : rows) *out++ = row;
    return absl::OkStatus();
  }

 private:
  const int64_t size_;
};

}  // namespace

std::vector<parallel::testing::OddNet> MakeNets(int size, uint64_t seed) {
  std::vector<parallel::testing::OddNet> nets;
  for (int rank = 0; rank < size; ++rank) {
    torch::manual_seed(seed + rank);
    nets.emplace_back(/*blocks=*/2);
  }
  return nets;
}

Training::Training(comm::Communicator& comm, const parallel::testing::OddNet& net,
                   TrainingOptions options)
    : options_(std::move(options)),
      comm_(comm),
      net_(net),
      generator_(at::detail::createCPUGenerator(/*seed_val=*/1000 + comm.rank())),
      loader_(std::make_shared<Rows>(options_.rows),
              data::DistributedSampler(
                  {.size = options_.rows, .rank = comm.rank(), .world = comm.size(), .seed = 5}),
              {.batch_size = options_.global_batch / comm.size()}) {
  net_->to(options_.dtype);
  strategy_ = options_.fsdp ? std::make_unique<Fsdp>(net_, comm, *options_.fsdp)
                            : ValueOrThrow(MakeStrategy(options_.strategy, net_.ptr(), &comm));
  optimizer_.emplace(strategy_->named_parameters(), optim::FusedAdamWOptions{.lr = 0.01});
  schedule_.emplace(*optimizer_, /*step_size=*/2, /*gamma=*/0.7);
  state_ = {.strategy = strategy_.get(),
            .optimizer = &*optimizer_,
            .schedulers = {&*schedule_},
            .generators = {generator_}};
}

double Training::Step() {
  const data::Batch* batch = ValueOrThrow(loader_.Next());
  if (batch == nullptr) {
    seen_.clear();
    batch = ValueOrThrow(loader_.Next());
  }
  const at::Tensor rows = (*batch)["row"];
  for (int64_t i = 0; i < rows.numel(); ++i) seen_.push_back(rows[i].item<int64_t>());
  const at::Tensor index = rows.unsqueeze(1) * kInputs + at::arange(kInputs);
  at::Tensor inputs = at::sin(index.to(at::kDouble) * 1.7).to(options_.dtype);
  if (options_.dropout > 0) {
    const at::Tensor kept =
        at::empty(inputs.sizes(), options_.dtype).bernoulli_(1 - options_.dropout, generator_);
    inputs = inputs * kept / (1 - options_.dropout);
  }
  optimizer_->zero_grad();
  at::Tensor loss = at::cross_entropy_loss(net_(inputs), (rows * 7 + 3).remainder(kClasses));
  loss.backward();
  strategy_->FinishBackward();
  optimizer_->step();
  schedule_->step();
  loss = loss.detach().to(at::kDouble);
  ThrowIfError(comm_.AllReduce(loss, comm::ReduceOp::kAverage).Wait());
  return loss.item<double>();
}

State& Training::state() {
  state_.notes["position"] = data::ToString(loader_.position());
  return state_;
}

void Training::Seek() {
  seen_.clear();
  ThrowIfError(loader_.Seek(ValueOrThrow(data::ParsePosition(state_.notes.at("position")))));
}

void WholeState::Add(Training& training, comm::Communicator& comm) {
  State& state = training.state();
  state.strategy->VisitState([&](const std::string& name, const at::Tensor& full) {
    std::lock_guard lock(mutex_);
    tensors_[absl::StrCat(kModelPrefix, name)] = full.clone();
  });
  {
    std::lock_guard lock(mutex_);
    const ShardsByName shards = TrainableShards(*state.strategy);
    for (const optim::FusedOptimizer::State& each : state.optimizer->StateDict()) {
      const StateRange range = OptimizerRange(each, shards, comm.rank());
      // A rank without a part of a parameter may not have counted its steps.
      if (range.whole.sizes.empty() && shards.at(each.parameter).local.numel() == 0) continue;
      const auto place =
          tensors_.try_emplace(range.name, at::zeros({range.whole.numel()}, range.whole.dtype));
      place.first->second.slice(/*dim=*/0, range.begin, range.begin + range.values.numel())
          .copy_(range.values.reshape({-1}));
    }
    tensors_["learning rate"] =
        at::full({1}, state.optimizer->param_groups()[0].options().get_lr(), at::kDouble);
  }
  ThrowIfError(comm.Barrier().Wait());
}

std::string WholeState::DifferenceFrom(const WholeState& other) const {
  for (const auto& [name, tensor] : tensors_) {
    const auto place = other.tensors_.find(name);
    if (place == other.tensors_.end() || !at::equal(place->second, tensor)) return name;
  }
  return other.tensors_.size() == tensors_.size() ? "" : "their numbers";
}

}  // namespace lockstep::parallel::checkpoint::testing
