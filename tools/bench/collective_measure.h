#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::bench {

// One measured kind of call: who carries it out, what, and the bytes of the whole buffer.
struct Subject {
  std::string contender;
  comm::OperationKind kind = comm::OperationKind::kAllReduce;
  int64_t bytes = 0;

  auto Key() const { return std::tie(contender, kind, bytes); }
  bool operator<(const Subject& other) const { return Key() < other.Key(); }
};

// Seconds of each call, that of the slowest rank.
using Times = std::map<Subject, std::vector<double>>;

// The contenders of this process:
//   "lockstep"   tensors made by Communicator::Empty
//   "any tensor" Lockstep, tensors of LibTorch's allocator
//   "mpi"        MPI's own blocking calls
//   "memcpy"     every rank copies the whole buffer, at once with the others
inline constexpr const char* kContenders[] = {"lockstep", "any tensor", "mpi", "memcpy"};

inline constexpr comm::OperationKind kKinds[] = {comm::OperationKind::kAllReduce,
                                                 comm::OperationKind::kReduceScatter,
                                                 comm::OperationKind::kAllGather};

// Calls of at most this many bytes are timed 20 at a time.
inline constexpr int64_t kBatchedBytes = 64 << 10;
inline constexpr int kBatch = 20;

// Adds `samples` times of each contender, kind and number of bytes; alternates the contenders.
absl::Status MeasureRound(comm::Communicator& comm, const std::vector<int64_t>& sizes, int samples,
                          Times& times);

// What a transfer costs ranks that compute meanwhile: seconds on the slowest rank.
struct Overlap {
  std::vector<double> compute;   // alone
  std::vector<double> transfer;  // an all-reduce alone
  std::vector<double> both;      // the all-reduce started, computing, waiting for it
};

// An all-reduce of `bytes` by the contender "lockstep" or "mpi", computing for about
// `compute_seconds`.
absl::StatusOr<Overlap> MeasureOverlap(comm::Communicator& comm, const std::string& contender,
                                       int64_t bytes, double compute_seconds, int samples);

// Seconds that the last rank computes while the others sleep, and while they wait for it in an
// all-reduce.
struct Late {
  std::vector<double> alone;
  std::vector<double> waited_for;
};

absl::StatusOr<Late> MeasureLate(comm::Communicator& comm, const std::string& contender,
                                 double compute_seconds, int samples);

}  // namespace lockstep::bench
