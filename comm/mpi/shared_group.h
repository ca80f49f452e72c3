#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "lockstep/comm/mpi/arena.h"

namespace lockstep::comm::mpi {

// What a rank says of a round when it arrives: where its data is, and what it is about.
struct Notice {
  uint64_t signature[3] = {0, 0, 0};  // of the operation, the same on all ranks
  char label[64] = {};                // the end of its label, for messages
  int64_t place = 0;                  // offset in the rank's arena
  int64_t stride = 0;                 // elements from block to block, where the round has blocks
  int64_t direct = 0;                 // whether `place` is in the rank's tensor, and not a copy
};

// How the ranks of a communicator that share a node meet in shared memory. What they do together is
// a sequence of rounds, counted alike on all ranks. A rank arrives at a round with a notice, reads
// the others' notices and data when all have arrived, and, in rounds that have an end, says when it
// has done its part. Nothing blocks: one posts, and looks.
//
// What a rank has posted for a round is read by others until they arrive at the next; it is kept
// for two rounds.
//
// Private to this folder; needs the progress token.
class SharedGroup {
 public:
  static constexpr int64_t kSlotBytes = 16 << 10;

  // Makes this rank's board, by which it meets the others; null where memory is short.
  static void* MakeBoard(Arena& arena);

  // `bases` and `boards` by rank: where their arenas are mapped here, and the boards' offsets.
  SharedGroup(Arena& arena, int rank, std::vector<char*> bases, const std::vector<int64_t>& boards);

  Arena& arena() const { return arena_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(bases_.size()); }

  // Operations take turns, in the order in which they were issued.
  void Enter(const void* operation) { turns_.push_back(operation); }
  bool IsTurnOf(const void* operation) const { return turns_.front() == operation; }
  void Leave() { turns_.pop_front(); }

  // kSlotBytes for the data of the next round, which others may read until the round after it.
  char* slot() const;

  void Arrive(const Notice& notice);
  bool AllArrived();
  void Done();
  bool AllDone();

  // When all have arrived.
  const Notice& notice(int rank) const;
  char* data(int rank) const { return bases_[rank] + notice(rank).place; }

 private:
  struct Board;

  bool AllReached(std::atomic<uint64_t> Board::*counter, int& next) const;

  Arena& arena_;
  const int rank_;
  const std::vector<char*> bases_;
  std::vector<Board*> boards_;
  uint64_t round_ = 0;
  int arrived_ = 0;  // ranks before this one have been seen to arrive, or to be done
  int done_ = 0;
  std::deque<const void*> turns_;
};

}  // namespace lockstep::comm::mpi
