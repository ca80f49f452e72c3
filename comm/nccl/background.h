#pragma once

#include <functional>
#include <memory>

#include "absl/time/time.h"
#include "lockstep/comm/nccl/world.h"

// The threads of this process's worlds. Private to this folder.
namespace lockstep::comm::nccl {

// Runs `body` on a thread that the end of the process waits for: until what was issued is done, or
// past its deadline, and communicators are flushed; where the world is broken, for ten seconds at
// most, as NCCL may not return.
void RunInBackground(const std::shared_ptr<World>& world, std::function<void()> body);

// Whether the process is ending: threads then leave when nothing is pending, though there are
// communicators.
bool IsExiting();

// Waits until all have ended: whether they have, by `timeout`.
bool WaitForBackground(absl::Duration timeout);

}  // namespace lockstep::comm::nccl
