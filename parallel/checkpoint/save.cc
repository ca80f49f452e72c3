#include "lockstep/parallel/checkpoint/save.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/exchange.h"
#include "lockstep/parallel/checkpoint/folder.h"
#include "lockstep/parallel/checkpoint/safetensors_header.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

// Joins the ranks' reports to an index.
absl::StatusOr<Index> MakeIndex(const Index& base, const std::vector<std::string>& reports) {
  Index index = base;
  for (const std::string& text : reports) {
    absl::StatusOr<ShardReport> report = ParseReport(text);
    if (!report.ok()) return report.status();
    index.tensors.merge(report->tensors);
    for (const auto& [name, info] : report->tensors) {  // those that were there
      if (!(index.tensors.at(name) == info)) {
        return absl::InternalError(absl::StrCat(
            "tensor '", name, "' is ", info.ToString(), " in ", report->shard.file, ", but ",
            index.tensors.at(name).ToString(), " before: the ranks' models differ"));
      }
    }
    index.shards.push_back(std::move(report->shard));
  }
  const absl::Status status = CheckPieces(index);
  if (!status.ok()) return status;
  return index;
}

absl::Status Commit(const std::string& directory, const Index& base,
                    const std::vector<std::string>& reports, const Retention& retention) {
  const absl::StatusOr<Index> index = MakeIndex(base, reports);
  if (!index.ok()) return index.status();
  const absl::StatusOr<std::string> path = CommitCheckpoint(directory, *index);
  if (!path.ok()) return path.status();
  return RemoveOldCheckpoints(directory, retention.keep_last, retention.keep_every);
}

}  // namespace

absl::StatusOr<ShardToSave> PrepareShard(const comm::Communicator& comm, int64_t step,
                                         const State& state) {
  if (state.strategy == nullptr) {
    return absl::InvalidArgumentError("checkpoint: the state to save has no strategy");
  }
  if (comm.size() > 1 && state.strategy->name() == "none") {
    return absl::InvalidArgumentError(absl::StrCat(
        "checkpoint: under the strategy none the models of ", comm.size(),
        " ranks have nothing to do with each other: save one of them with a communicator of its "
        "own"));
  }
  ShardToSave shard;
  shard.index = {.step = step,
                 .world = comm.size(),
                 .strategy = state.strategy->name(),
                 .generators = static_cast<int>(state.generators.size()),
                 .notes = state.notes};
  if (state.optimizer != nullptr) {
    for (const auto& group : state.optimizer->param_groups()) {
      shard.index.learning_rates.push_back(group.options().get_lr());
    }
  }
  for (torch::optim::LRScheduler* scheduler : state.schedulers) {
    shard.index.schedules.push_back(StepsOf(*scheduler));
  }
  try {
    const std::vector<StateRange> ranges = RangesToSave(state, comm.rank());
    for (const StateRange& range : ranges) {
      if (!TypeOrder(range.whole.dtype).has_value()) {
        return absl::InvalidArgumentError(absl::StrCat("checkpoint: tensor '", range.name,
                                                       "' has a type that safetensors files "
                                                       "cannot hold: ",
                                                       c10::toString(range.whole.dtype)));
      }
      // Each rank knows all of the model: one is enough for what nobody has a part of.
      if (comm.rank() == 0 || range.part.count > 0) shard.tensors[range.name] = range.whole;
    }
    shard.pieces = PiecesOf(ranges);
  } catch (const StatusError& error) {
    return error.status();
  }
  return shard;
}

absl::Status SaveShards(comm::Communicator& comm, const std::string& directory,
                        const ShardToSave& shard, const Retention& retention) {
  absl::StatusOr<std::string> begun = std::string();
  if (comm.rank() == 0) begun = BeginCheckpoint(directory, shard.index.step);
  absl::Status status = Agree(comm, begun.status());
  if (!status.ok()) return status;
  const absl::StatusOr<std::string> folder = BroadcastText(comm, *begun);
  if (!folder.ok()) return folder.status();

  absl::StatusOr<std::string> report = std::string();
  absl::StatusOr<ShardInfo> written = WriteShard(*folder, ShardName(comm.rank()), shard.pieces);
  if (written.ok()) report = FormatReport({*std::move(written), shard.tensors});
  status = Agree(comm, written.ok() ? report.status() : written.status());
  if (!status.ok()) return status;
  const absl::StatusOr<std::vector<std::string>> reports = GatherTexts(comm, *report);
  if (!reports.ok()) return reports.status();

  if (comm.rank() == 0) status = Commit(directory, shard.index, *reports, retention);
  return Agree(comm, status);
}

}  // namespace lockstep::parallel::checkpoint
