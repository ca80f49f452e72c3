#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/flags/declare.h"
#include "absl/time/time.h"
#include "lockstep/tools/trace/event_file.h"

// --tensorboard=DIR, for programs that train: link this and they have it. "": nothing is written.
ABSL_DECLARE_FLAG(std::string, tensorboard);

namespace lockstep::tutorials {

// Curves of a training for TensorBoard, where --tensorboard names a folder; else every call does
// nothing.
//
//   TensorBoard board(world.rank());   // rank 0 writes
//   ...
//   board.Step(steps_made, loss.item<double>(), batch.rows() * world.size());
//   ...
//   board.Test(steps_made, test.loss, test.accuracy);
//
// Throws StatusError (UNAVAILABLE) where the file cannot be made or written.
class TensorBoard {
 public:
  explicit TensorBoard(int rank = 0);

  // For ranks that train a model of their own each: all of them write, each to DIR/rank0, ...
  static TensorBoard OfEachRank(int rank);

  // After step number `step` on `samples` of all ranks: "train/loss", "train/samples_per_second"
  // since the call before, and "memory/resident_mib" of this process.
  void Step(int64_t step, double loss, int64_t samples);

  // "test/loss" and "test/accuracy", in percent. What testing took counts for no step.
  void Test(int64_t step, double loss, double accuracy);

 private:
  explicit TensorBoard(const std::string& folder);

  void Add(const char* tag, int64_t step, double value);

  std::unique_ptr<trace::EventFile> file_;
  absl::Duration last_;  // SteadyNow() of the call before
};

}  // namespace lockstep::tutorials
