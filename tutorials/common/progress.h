#pragma once

#include <cstdint>
#include <iostream>
#include <ostream>
#include <string>

#include "absl/time/time.h"
#include "lockstep/comm/launch/relaunch.h"

namespace lockstep::tutorials {

struct ProgressOptions {
  // Whether to draw at all. Default: whether stderr is a terminal. Where there are ranks, only 0
  // should: {.enabled = world.rank() == 0 && launch::IsTerminal(2)}.
  bool enabled = launch::IsTerminal(/*fd=*/2);
  absl::Duration interval = absl::Milliseconds(100);  // Least time between drawings. 100 ms.
  std::ostream* out = &std::cerr;                     // Outlives the bar. Default: std::cerr.
};

// A progress bar, gone when it is destroyed, so that what is printed afterwards stands alone:
//
//   epoch 1 [##########..........] 469/938  loss 0.412
//
//   {
//     tutorials::Progress progress("epoch 1", loader.batches_per_epoch());
//     for (const data::Batch& batch : loader) progress.Advance("loss " + ...);
//   }
//   std::cout << "epoch 1: ...\n";
class Progress {
 public:
  Progress(std::string label, int64_t total, const ProgressOptions& options = {});
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // One more is done. `note` is shown behind the bar.
  void Advance(const std::string& note = "");

 private:
  void Draw(const std::string& note);

  const std::string label_;
  const int64_t total_;
  const ProgressOptions options_;
  int64_t done_ = 0;
  absl::Time drawn_ = absl::InfinitePast();
};

}  // namespace lockstep::tutorials
