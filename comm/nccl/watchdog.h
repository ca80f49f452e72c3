#pragma once

#include <functional>
#include <memory>

#include "absl/time/time.h"
#include "lockstep/comm/nccl/world.h"

namespace lockstep::comm::nccl {

// Starts the thread that looks after a world, where NCCL would be silent:
//
//  - finishes works whose operations are done on the device, so that their tensors are freed;
//  - asks NCCL for errors that came up in the background, and CUDA by the way;
//  - fails what is past its deadline, naming the ranks that are missing, and what waits for a rank
//    that has left;
//  - when the world is broken, writes the flight recorder into the folder LOCKSTEP_FLIGHT_DIR, as
//    rank3.flight.json, and aborts NCCL's communicators;
//  - closes communicators that nobody uses any more.
//
// It ends when the world's communicators are destroyed and nothing is pending, or five seconds
// after that where the device does not let go of what was aborted; that is then leaked. The end of
// the process waits for it, so that what was issued is done; after an error for ten seconds at
// most.
void StartWatchdog(std::shared_ptr<World> world);

// Runs `body` on a thread that the end of the process waits for.
void RunInBackground(std::function<void()> body);

// Waits until the threads of all worlds have ended: whether they have, by `timeout`.
bool WaitForBackground(absl::Duration timeout);

}  // namespace lockstep::comm::nccl
