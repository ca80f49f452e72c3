#include "lockstep/parallel/checkpoint/checkpointer.h"

#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/exchange.h"
#include "lockstep/parallel/checkpoint/file_operations.h"
#include "lockstep/parallel/checkpoint/folder.h"
#include "lockstep/parallel/checkpoint/load.h"
#include "lockstep/parallel/checkpoint/save.h"

namespace lockstep::parallel::checkpoint {
namespace {

absl::Status Check(const CheckpointerOptions& options) {
  std::string wrong;
  if (options.directory.empty()) wrong = "directory is empty";
  if (options.keep_last < 1) wrong = absl::StrCat("keep_last is ", options.keep_last, ", below 1");
  if (options.keep_every < 0) {
    wrong = absl::StrCat("keep_every is ", options.keep_every, ", below 0");
  }
  return wrong.empty() ? absl::OkStatus() : absl::InvalidArgumentError("checkpoint: " + wrong);
}

absl::StatusOr<std::unique_ptr<FolderLock>> TakeFolder(const std::string& directory) {
  std::error_code ignored;
  const bool is_new = !std::filesystem::exists(directory, ignored);
  absl::Status status = MakeFolder(directory);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<FolderLock>> lock = FolderLock::Take(directory);
  if (!lock.ok() || !is_new) return lock;
  // A power failure must not take the folder with all that will be in it.
  const std::filesystem::path parent =
      std::filesystem::absolute(directory / std::filesystem::path(".")).parent_path().parent_path();
  status = SyncFolder(parent);
  if (!status.ok()) return status;
  return lock;
}

// What threads must not let out.
absl::Status SaveNoThrow(comm::Communicator& comm, const CheckpointerOptions& options,
                         const ShardToSave& shard) {
  try {
    return SaveShards(comm, options.directory, shard, {options.keep_last, options.keep_every});
  } catch (const std::exception& error) {
    const absl::Status status =
        absl::InternalError(absl::StrCat("checkpoint: ", std::string(error.what())));
    comm.Abort(status);  // or the other ranks would wait for this one
    return status;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Open(comm::Communicator& comm,
                                                                 CheckpointerOptions options) {
  auto own = comm.Split(/*color=*/0, /*key=*/comm.rank());
  if (!own.ok()) return own.status();
  absl::StatusOr<std::unique_ptr<FolderLock>> lock = std::unique_ptr<FolderLock>();
  absl::Status status = Check(options);
  if (status.ok() && comm.rank() == 0) {
    lock = TakeFolder(options.directory);
    status = lock.status();
  }
  status = Agree(**own, status);
  if (!status.ok()) return status;
  return std::unique_ptr<Checkpointer>(
      new Checkpointer(std::move(options), *std::move(own), *std::move(lock)));
}

Checkpointer::Checkpointer(CheckpointerOptions options, std::unique_ptr<comm::Communicator> comm,
                           std::unique_ptr<FolderLock> lock)
    : options_(std::move(options)), comm_(std::move(comm)), lock_(std::move(lock)) {}

Checkpointer::~Checkpointer() {
  if (writer_.joinable()) writer_.join();
}

absl::Status Checkpointer::Finish() {
  if (writer_.joinable()) writer_.join();
  return std::exchange(pending_, absl::OkStatus());
}

absl::StatusOr<std::optional<int64_t>> Checkpointer::LoadLatest(State& state) {
  absl::Status status = Finish();
  if (!status.ok()) return status;
  std::string path;
  if (comm_->rank() == 0) {
    const absl::StatusOr<std::vector<CheckpointFolder>> found = ListCheckpoints(options_.directory);
    status = found.status();
    if (found.ok() && !found->empty()) path = found->back().path;
  }
  status = Agree(*comm_, status);
  if (!status.ok()) return status;
  const absl::StatusOr<std::string> latest = BroadcastText(*comm_, path);
  if (!latest.ok()) return latest.status();
  if (latest->empty()) return std::nullopt;
  const absl::StatusOr<int64_t> step = LoadCheckpoint(*comm_, *latest, state);
  if (!step.ok()) return step.status();
  return *step;
}

absl::Status Checkpointer::Save(int64_t step, const State& state) {
  absl::Status status = Finish();
  if (!status.ok()) return status;
  if (step < 0) {
    return absl::InvalidArgumentError(absl::StrCat("checkpoint: step is ", step, ", below 0"));
  }
  absl::StatusOr<ShardToSave> shard = PrepareShard(*comm_, step, state);
  if (status = Agree(*comm_, shard.status()); !status.ok()) return status;
  if (!options_.async) return SaveNoThrow(*comm_, options_, *shard);
  shard->pieces = snapshot_.Take(std::move(shard->pieces));
  writer_ = std::thread(
      [this, shard = *std::move(shard)] { pending_ = SaveNoThrow(*comm_, options_, shard); });
  return absl::OkStatus();
}

}  // namespace lockstep::parallel::checkpoint
