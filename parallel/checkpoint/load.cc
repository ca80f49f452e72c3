#include "lockstep/parallel/checkpoint/load.h"

#include <ATen/ops/empty.h>

#include <mutex>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/checksum.h"
#include "lockstep/parallel/checkpoint/exchange.h"
#include "lockstep/parallel/checkpoint/folder.h"
#include "lockstep/parallel/checkpoint/shard_reader.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

// All that is wanted of model and optimizer.
std::vector<StateRange> WantedRanges(const State& state, int rank) {
  std::vector<StateRange> wanted = ModelRanges(*state.strategy);
  if (state.optimizer == nullptr) return wanted;
  const ShardsByName shards = TrainableShards(*state.strategy);
  for (const optim::FusedOptimizer::State& each : state.optimizer->StateDict()) {
    wanted.push_back(OptimizerRange(each, shards, rank));
  }
  return wanted;
}

absl::Status CheckSame(const Index& index, const State& state, int rank) {
  std::set<std::string> names;
  for (const StateRange& range : WantedRanges(state, rank)) {
    names.insert(range.name);
    const auto saved = index.tensors.find(range.name);
    if (saved == index.tensors.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("has no tensor '", range.name, "', which is wanted"));
    }
    if (!(saved->second == range.whole)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", range.name, "' is ",
                                                     saved->second.ToString(), ", but ",
                                                     range.whole.ToString(), " is wanted"));
    }
  }
  for (const auto& [name, info] : index.tensors) {
    const bool is_wanted = absl::StartsWith(name, kModelPrefix) ||
                           (absl::StartsWith(name, "optimizer/") && state.optimizer != nullptr);
    if (is_wanted && names.count(name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("has a tensor '", name, "', for which there is no place"));
    }
  }
  const auto check_count = [](const std::string& what, size_t saved, size_t wanted) {
    if (wanted == 0 || saved == wanted) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("has ", saved, " ", what, ", but ", wanted, " are wanted"));
  };
  absl::Status status =
      check_count("parameter groups", index.learning_rates.size(),
                  state.optimizer == nullptr ? 0 : state.optimizer->param_groups().size());
  if (status.ok()) {
    status = check_count("schedulers", index.schedules.size(), state.schedulers.size());
  }
  if (status.ok()) {
    status = check_count("generators a rank", index.generators, state.generators.size());
  }
  return status;
}

// A seed that is another one on each rank, and the same whenever this checkpoint is loaded.
uint64_t SeedFrom(const at::Tensor& saved, int rank) {
  const uint32_t sum = Checksum(saved.const_data_ptr(), saved.nbytes());
  std::seed_seq sequence{sum, static_cast<uint32_t>(rank)};
  uint32_t words[2];
  sequence.generate(words, words + 2);
  return (static_cast<uint64_t>(words[0]) << 32) | words[1];
}

absl::Status LoadGenerators(ShardReader& reader, const Index& index, State& state,
                            const comm::Communicator& comm) {
  const bool same_world = index.world == comm.size();
  for (size_t i = 0; i < state.generators.size(); ++i) {
    at::Generator& generator = state.generators[i];
    const std::string name = GeneratorName(same_world ? comm.rank() : 0, i);
    const auto saved = index.tensors.find(name);
    if (saved == index.tensors.end() || saved->second.dtype != at::kByte) {
      return absl::DataLossError(absl::StrCat("has no tensor '", name, "'"));
    }
    const at::Tensor values = at::empty(saved->second.sizes, at::kByte);
    const absl::Status status = reader.Read(name, /*begin=*/0, values);
    if (!status.ok()) return status;
    std::lock_guard lock(generator.mutex());
    if (!same_world) {
      generator.set_current_seed(SeedFrom(values, comm.rank()));
    } else if (values.numel() == generator.get_state().numel()) {
      generator.set_state(values);
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", name, "' is the state of another kind of generator"));
    }
  }
  return absl::OkStatus();
}

absl::Status Read(const std::string& path, const Index& index, State& state,
                  const comm::Communicator& comm) {
  ShardReader reader(path, index);
  for (const StateRange& range : ModelRanges(*state.strategy)) {
    const absl::Status status = reader.Read(range.name, range.begin, range.values);
    if (!status.ok()) return status;
  }
  absl::Status status;
  if (state.optimizer != nullptr) {
    const ShardsByName shards = TrainableShards(*state.strategy);
    state.optimizer->UpdateState([&](const optim::FusedOptimizer::State& each) {
      const StateRange range = OptimizerRange(each, shards, comm.rank());
      if (status.ok()) status = reader.Read(range.name, range.begin, range.values);
    });
    std::vector<torch::optim::OptimizerParamGroup>& groups = state.optimizer->param_groups();
    for (size_t i = 0; i < groups.size(); ++i) {
      groups[i].options().set_lr(index.learning_rates[i]);
    }
  }
  for (size_t i = 0; i < state.schedulers.size(); ++i) {
    StepsOf(*state.schedulers[i]) = static_cast<unsigned>(index.schedules[i]);
  }
  if (status.ok()) status = LoadGenerators(reader, index, state, comm);
  if (status.ok()) state.notes = index.notes;
  return status;
}

absl::Status At(const std::string& path, const absl::Status& status) {
  if (status.ok() || absl::StrContains(std::string{status.message()}, path)) return status;
  return absl::Status(status.code(), absl::StrCat(path, ": ", std::string{status.message()}));
}

}  // namespace

absl::StatusOr<int64_t> LoadCheckpoint(comm::Communicator& comm, const std::string& path,
                                       State& state) {
  // One rank reads the index, so that all work from the same.
  absl::StatusOr<Index> index = Index();
  std::string text;
  if (comm.rank() == 0) {
    index = ReadIndex(path);
    if (index.ok()) text = *FormatIndex(*index);
  }
  if (index.ok() && state.strategy == nullptr) {
    index = absl::InvalidArgumentError("checkpoint: the state to load into has no strategy");
  }
  absl::Status status = Agree(comm, index.status());
  if (!status.ok()) return status;
  absl::StatusOr<std::string> received = BroadcastText(comm, text);
  if (!received.ok()) return received.status();
  if (comm.rank() != 0) index = ParseIndex(*received);
  if (index.ok()) {
    try {
      status = At(path, CheckSame(*index, state, comm.rank()));
    } catch (const StatusError& error) {
      status = error.status();
    }
  }
  status = Agree(comm, index.ok() ? status : index.status());
  if (!status.ok()) return status;
  status = Agree(comm, At(path, Read(path, *index, state, comm)));
  if (!status.ok()) return status;
  return index->step;
}

}  // namespace lockstep::parallel::checkpoint
