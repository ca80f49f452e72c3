#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/comm/mpi/shared_group.h"
#include "lockstep/comm/operation.h"

namespace lockstep::comm::mpi {

// A collective among the ranks of one node, which read each other's memory instead of sending
// messages.
//
// Each rank has its data in a place that all see: in the tensor itself where that was made by
// Communicator::Empty, else in a copy. When all have arrived, each takes what it needs from the
// others' places. AllReduce: each rank combines its block of all places, in the order of the ranks
// and rounding once, and writes the result into all places; without copies that reads and writes
// every tensor once. Copies are made of parts of a tensor that stay in the cache, one round each;
// where all tensors are shared a single round does.
//
// Small tensors are copied into the ranks' boards, and each rank combines all: such a round needs
// no end.
//
// Private to this folder; needs the progress token.
class SharedTransfer {
 public:
  // Whether it can carry out an operation that was validated.
  static bool Suits(const Operation& operation);

  // `operation` and `group` must outlive this.
  SharedTransfer(const Operation& operation, SharedGroup& group);

  // Goes on as far as the other ranks allow, and at most about 0.1 ms; whether the operation is
  // complete here.
  absl::StatusOr<bool> Advance();

 private:
  enum class Phase {
    kStage,   // copying to the place
    kArrive,  // waiting for the others to have done so
    kWork,    // reading from the others' places
    kEnd,     // waiting for the others to have done so
    kTake,    // copying from the place
  };

  absl::Status BeginRound();
  absl::Status CheckNotices();
  bool EndRound();

  // What is to be moved in a phase, in elements, and moving the part [first, first + count) of it.
  int64_t ToStage() const;
  int64_t ToWorkOn() const;
  int64_t ToTake() const;
  int64_t Stage(int64_t first, int64_t count);
  int64_t Work(int64_t first, int64_t count);
  int64_t Take(int64_t first, int64_t count);

  void Reduce(char* output, int block, int64_t first, int64_t count);
  void ReduceIntoPlaces(int64_t first, int64_t count);

  // Element `element` of this round, of block `block`, in the place of `rank`; for this rank in its
  // tensor, which its place may be a copy of.
  char* Place(int rank, int block, int64_t element) const;
  char* Source(int block, int64_t element) const;
  char* Output(int block, int64_t element) const;
  void Copy(char* to, const char* from, int64_t count) const;

  const Operation& operation_;
  SharedGroup& group_;
  const int rank_;
  const int size_;
  int64_t element_bytes_ = 1;
  int64_t count_ = 0;      // elements of the operation; of each block, where it has blocks
  int blocks_ = 1;         // in what the others read from
  bool has_place_ = true;  // whether others read from this rank
  bool small_ = false;
  bool direct_ = false;
  char* source_ = nullptr;
  char* output_ = nullptr;
  char* staging_ = nullptr;
  Notice notice_;

  Phase phase_ = Phase::kStage;
  int64_t start_ = 0;   // of the round, in elements
  int64_t length_ = 0;  // of the round
  int64_t part_ = 0;    // AllReduce: elements that each rank combines, the last ones maybe fewer
  int64_t moved_ = 0;   // of the phase
  std::vector<const void*> inputs_;
};

}  // namespace lockstep::comm::mpi
