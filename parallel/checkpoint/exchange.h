#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::parallel::checkpoint {

// Texts and errors between ranks; all collective. An error of the communicator is returned as it
// is; the ranks may then have got different answers.

// Rank 0 gets every rank's text, in the ranks' order; the others nothing.
absl::StatusOr<std::vector<std::string>> GatherTexts(comm::Communicator& comm,
                                                     const std::string& text);

// Every rank gets rank 0's text.
absl::StatusOr<std::string> BroadcastText(comm::Communicator& comm, const std::string& text);

// OK where all ranks' statuses are; else, on all ranks, the error of the first rank that has one,
// which "rank 2: " precedes where there are several ranks.
absl::Status Agree(comm::Communicator& comm, const absl::Status& status);

}  // namespace lockstep::parallel::checkpoint
