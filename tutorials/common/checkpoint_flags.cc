#include "lockstep/tutorials/common/checkpoint_flags.h"

#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "lockstep/comm/inprocess/inprocess_communicator.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/run_main.h"

namespace lockstep::tutorials {

struct TimeLimit {
  absl::Duration value = absl::InfiniteDuration();
};

bool AbslParseFlag(absl::string_view text, TimeLimit* limit, std::string* error) {
  if (text == "none") {
    *limit = {};
    return true;
  }
  if (absl::ParseDuration(text, &limit->value) && limit->value > absl::ZeroDuration()) return true;
  *error = "give a time with its unit, as in 90s, 55m or 11h30m";
  return false;
}

std::string AbslUnparseFlag(const TimeLimit& limit) {
  return limit.value == absl::InfiniteDuration() ? "none" : absl::FormatDuration(limit.value);
}

}  // namespace lockstep::tutorials

ABSL_FLAG(std::string, checkpoint_dir, "",
          "folder to save checkpoints into, and to go on from the newest of them; none: neither");
ABSL_FLAG(lockstep::tutorials::Count, checkpoint_every, 1000,
          "steps from one checkpoint to the next");
ABSL_FLAG(lockstep::tutorials::TimeLimit, time_limit, {},
          "save a checkpoint and end after this time, with exit status 75 if there is work left");

namespace lockstep::tutorials {

using parallel::checkpoint::Checkpointer;
using parallel::checkpoint::kExitToBeContinued;
using parallel::checkpoint::StopRequest;

Checkpoints::Checkpoints(comm::Communicator* world) {
  const std::string directory = absl::GetFlag(FLAGS_checkpoint_dir);
  const absl::Duration limit = absl::GetFlag(FLAGS_time_limit).value;
  if (directory.empty()) {
    if (limit == absl::InfiniteDuration()) return;
    throw StatusError(absl::InvalidArgumentError(
        "--time_limit needs a folder to save a checkpoint into: --checkpoint_dir=DIR"));
  }
  if (world == nullptr) {
    alone_ = std::move(comm::inprocess::Create(/*size=*/1)[0]);
    world = alone_.get();
  }
  is_first_rank_ = world->rank() == 0;
  stop_ = ValueOrThrow(StopRequest::Watch(*world, limit));
  checkpointer_ = ValueOrThrow(Checkpointer::Open(*world, {.directory = directory}));
}

std::optional<int64_t> Checkpoints::Resume(parallel::checkpoint::State& state) {
  if (checkpointer_ == nullptr) return std::nullopt;
  return ValueOrThrow(checkpointer_->LoadLatest(state));
}

bool Checkpoints::IsDue(int64_t step) {
  if (checkpointer_ == nullptr) return false;
  stop_requested_ = ValueOrThrow(stop_->Requested());
  return stop_requested_ || step % absl::GetFlag(FLAGS_checkpoint_every) == 0;
}

void Checkpoints::Save(int64_t step, const parallel::checkpoint::State& state) {
  ThrowIfError(checkpointer_->Save(step, state));
  if (!stop_requested_) return;
  ThrowIfError(checkpointer_->Finish());
  stopped_ = true;
  SetExitStatus(kExitToBeContinued);
  if (is_first_rank_) {
    PrintError(absl::CancelledError(
        absl::StrCat("saved step ", step, " and ended, as told: run it again to go on")));
  }
}

void Checkpoints::Finish(int64_t step, const parallel::checkpoint::State& state) {
  if (checkpointer_ == nullptr) return;
  ThrowIfError(checkpointer_->Save(step, state));
  ThrowIfError(checkpointer_->Finish());
}

}  // namespace lockstep::tutorials
