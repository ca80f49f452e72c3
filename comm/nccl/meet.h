#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm::nccl {

// A store for the ranks of `world` that is theirs and this call's alone: the n-th call of one rank
// meets the n-th of the others, whatever was left by earlier ones. Rank 0 serves at world.store,
// once a process; where torchrun serves there itself (TORCHELASTIC_USE_AGENT_STORE=True), all
// ranks connect. Ranks may be threads of one process.
//
// InvalidArgument where the launcher gives no store; else Store's errors.
absl::StatusOr<std::shared_ptr<Store>> Meet(
    const launch::World& world, absl::Duration timeout,
    const launch::Environment& environment = launch::ProcessEnvironment);

}  // namespace lockstep::comm::nccl
