#include "lockstep/parallel/checkpoint/state.h"

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/checksum.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

// Below it one of the holders writes a range whole: parts of a few bytes cost more than they share.
constexpr int64_t kBytesToShare = 64 << 10;

// Likewise of what is not trained, where it is always the first holder: ranks may have buffers that
// differ, running statistics for instance, which then come from one rank, whole.
constexpr int64_t kUntrainedBytesToShare = 16 << 20;

StateRange::Part PartOf(const StateRange& range, bool trainable) {
  const int64_t count = range.values.numel();
  const int64_t bytes = count * static_cast<int64_t>(range.values.element_size());
  if (bytes < (trainable ? kBytesToShare : kUntrainedBytesToShare)) {
    // By name, so that all agree and each gets some.
    const auto replicas = static_cast<uint32_t>(range.replicas);
    const uint32_t writer = trainable ? Checksum(range.name) % replicas : 0;
    return {.from = 0, .count = writer == static_cast<uint32_t>(range.replica) ? count : 0};
  }
  const int64_t from = count * range.replica / range.replicas;
  return {.from = from, .count = count * (range.replica + 1) / range.replicas - from};
}

// LibTorch has no other way to read or set it.
struct SchedulerAccess : torch::optim::LRScheduler {
  static unsigned& Steps(torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&SchedulerAccess::step_count_);
  }
};

}  // namespace

std::vector<StateRange> ModelRanges(Strategy& strategy) {
  std::vector<StateRange> ranges;
  for (const StateShard& shard : strategy.StateShards()) {
    StateRange range = {.name = absl::StrCat(kModelPrefix, shard.name),
                        .whole = {shard.local.scalar_type(), shard.sizes},
                        .begin = shard.offset,
                        .values = shard.local,
                        .replica = shard.replica,
                        .replicas = shard.replicas};
    range.part = PartOf(range, shard.trainable);
    ranges.push_back(std::move(range));
  }
  return ranges;
}

ShardsByName TrainableShards(Strategy& strategy) {
  ShardsByName shards;
  for (StateShard& shard : strategy.StateShards()) {
    if (shard.trainable) shards.emplace(shard.name, std::move(shard));
  }
  return shards;
}

StateRange OptimizerRange(const optim::FusedOptimizer::State& state, const ShardsByName& shards,
                          int rank) {
  const auto place = shards.find(state.parameter);
  if (place == shards.end()) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("the optimizer has a parameter '", state.parameter,
                     "', which is none of the strategy's: give it strategy.named_parameters()")));
  }
  const StateShard& shard = place->second;
  StateRange range = {.name = absl::StrCat("optimizer/", state.key, "/", state.parameter),
                      .whole = {state.value.scalar_type(), shard.sizes},
                      .begin = shard.offset,
                      .values = state.value,
                      .replica = shard.replica,
                      .replicas = shard.replicas};
  if (state.value.dim() != 0) {
    range.part = PartOf(range, /*trainable=*/true);
    return range;
  }
  // One number for the whole parameter: kept by all ranks, but where a rank has no part of the
  // parameter it may not have been counted. Who has the first element writes it.
  range.whole.sizes = {};
  range.begin = 0;
  const bool is_first = shard.offset == 0 && shard.local.numel() > 0;
  int64_t numel = TensorInfo{.sizes = shard.sizes}.numel();
  if (is_first) {
    range.part = PartOf(range, /*trainable=*/true);
  } else if (numel == 0 && rank == 0) {
    range.part = {.from = 0, .count = 1};
  }
  return range;
}

std::string GeneratorName(int rank, size_t index) {
  return absl::StrCat("random/", rank, "/", index);
}

unsigned& StepsOf(torch::optim::LRScheduler& scheduler) {
  return SchedulerAccess::Steps(scheduler);
}

std::vector<StateRange> RangesToSave(const State& state, int rank) {
  std::vector<StateRange> ranges = ModelRanges(*state.strategy);
  if (state.optimizer != nullptr) {
    const ShardsByName shards = TrainableShards(*state.strategy);
    for (const optim::FusedOptimizer::State& each : state.optimizer->StateDict()) {
      ranges.push_back(OptimizerRange(each, shards, rank));
    }
  }
  for (size_t i = 0; i < state.generators.size(); ++i) {
    at::Generator generator = state.generators[i];
    std::lock_guard lock(generator.mutex());
    const at::Tensor values = generator.get_state();
    ranges.push_back({.name = GeneratorName(rank, i),
                      .whole = {values.scalar_type(), values.sizes().vec()},
                      .values = values,
                      .part = {.from = 0, .count = values.numel()}});
  }
  return ranges;
}

}  // namespace lockstep::parallel::checkpoint
