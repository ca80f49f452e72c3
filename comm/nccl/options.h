#pragma once

#include "absl/time/time.h"

namespace lockstep::comm::nccl {

struct Options {
  // How long an operation may take, from the call on, until it fails and names who is missing, and
  // how long creation and Split may; 10 min.
  absl::Duration deadline = absl::Minutes(10);

  // How often the watchdog looks whether pending operations are done; 2 ms.
  absl::Duration poll_interval = absl::Milliseconds(2);

  // How often the ranks tell each other that they live, see ControlPlane::Options; 500 ms.
  absl::Duration control_interval = absl::Milliseconds(500);
};

}  // namespace lockstep::comm::nccl
