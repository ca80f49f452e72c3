#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/operation.h"
#include "lockstep/comm/store.h"

namespace lockstep::comm {

// What a rank has issued on a communicator.
struct IssuedCounts {
  uint64_t collectives = 0;
  std::map<int, uint64_t> sends;  // by destination
  std::map<int, uint64_t> recvs;  // by source

  void Add(const Operation& operation);
};

// A rank that has destroyed its communicator, or ended its process; ranks are the communicator's.
struct Departure {
  int rank = 0;
  IssuedCounts issued;
};

// Whether `operation`, which rank `rank` has issued and waits in, cannot be completed since
// `departure`: the rank that left has not issued its part. `issued` is what `rank` has issued. That
// a rank leaves while operations that it issued go on is legal.
bool IsDeserted(const Operation& operation, int rank, const IssuedCounts& issued,
                const Departure& departure);

// The error of such an operation: FailedPrecondition, naming it, the communicator, `rank`, the rank
// that left and how many operations that one had issued.
absl::Status DesertedError(const Operation& operation, const std::string& communicator, int rank,
                           int size, const Departure& departure);

// The departures from a communicator, as a log in a Store: one is written once, and costs each
// reader two requests. Names are those of communicators.
absl::Status WriteDeparture(Store& store, const std::string& communicator,
                            const Departure& departure);

// Adds those that are not in `known` yet.
absl::Status ReadDepartures(Store& store, const std::string& communicator,
                            std::vector<Departure>& known);

}  // namespace lockstep::comm
