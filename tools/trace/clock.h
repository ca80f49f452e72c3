#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace lockstep::trace {

// The time of every event, sample and flight record: a clock that never jumps, since an arbitrary
// moment that all processes of one machine share. Differences are durations.
inline absl::Duration SteadyNow() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace lockstep::trace
