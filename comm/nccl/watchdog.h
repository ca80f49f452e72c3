#pragma once

#include <memory>

#include "lockstep/comm/nccl/world.h"

namespace lockstep::comm::nccl {

// Starts the thread that looks after a world, where NCCL would be silent:
//
//  - finishes works whose operations are done on the device, so that their tensors are freed;
//  - asks NCCL for errors that came up in the background, and CUDA by the way;
//  - fails what is past its deadline, naming the ranks that are missing, and what waits for a rank
//    that has left;
//  - when the world is broken, writes the flight recorder into the folder LOCKSTEP_FLIGHT_DIR, as
//    rank3.flight.json, and aborts NCCL's communicators.
//
// It ends when the world's communicators are destroyed and closed and nothing is pending, or five
// seconds after that where the device does not let go of what was aborted; that is then leaked.
void StartWatchdog(const std::shared_ptr<World>& world);

}  // namespace lockstep::comm::nccl
