#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/stop.h"

namespace lockstep::tutorials {

// --checkpoint_dir, --checkpoint_every and --time_limit, for programs that train:
//
//   Checkpoints checkpoints(&world);
//   parallel::checkpoint::State state = {.strategy = &ddp, .optimizer = &optimizer};
//   int64_t step = checkpoints.Resume(state).value_or(0);  // then goes where state.notes say
//   ... each step ...
//   if (checkpoints.IsDue(++step)) {
//     state.notes["position"] = data::ToString(loader.position());
//     checkpoints.Save(step, state);
//     if (checkpoints.stopped()) return absl::OkStatus();
//   }
//   ... after the last one, with the position after it in the notes ...
//   checkpoints.Finish(step, state);
//
// Without --checkpoint_dir nothing is ever due, and signals end the program as always. With it, a
// checkpoint is due every so many steps, and when the program is to end early, as it got SIGTERM or
// SIGUSR1 or its time is up: then stopped() holds after Save, and RunMain or RunRanks returns
// kExitToBeContinued.
//
// All of it is collective, and throws StatusError.
class Checkpoints {
 public:
  // `world`: null for a program of one process.
  explicit Checkpoints(comm::Communicator* world = nullptr);

  // Loads the newest checkpoint, if there is one, and returns its step.
  std::optional<int64_t> Resume(parallel::checkpoint::State& state);

  bool IsDue(int64_t step);
  void Save(int64_t step, const parallel::checkpoint::State& state);
  bool stopped() const { return stopped_; }

  // Saves the end of training, and waits until that is on disk.
  void Finish(int64_t step, const parallel::checkpoint::State& state);

 private:
  std::unique_ptr<comm::Communicator> alone_;
  bool is_first_rank_ = true;
  std::unique_ptr<parallel::checkpoint::Checkpointer> checkpointer_;  // null without the flag
  std::unique_ptr<parallel::checkpoint::StopRequest> stop_;
  bool stop_requested_ = false;
  bool stopped_ = false;
};

}  // namespace lockstep::tutorials
