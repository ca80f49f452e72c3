#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/comm/operation.h"

namespace lockstep::comm::inprocess {

// Carries out what its ranks have issued together: a collective of all ranks, in their order, or a
// Send and the Recv that matches it, in this order. FailedPrecondition, naming the ranks and what
// each issued, where that does not fit together.
absl::Status Execute(const std::string& communicator, const std::vector<Operation>& operations);

}  // namespace lockstep::comm::inprocess
