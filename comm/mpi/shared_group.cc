#include "lockstep/comm/mpi/shared_group.h"

#include <new>
#include <utility>

namespace lockstep::comm::mpi {

// Counters lie apart, as each is written by its rank alone and read by all others.
struct SharedGroup::Board {
  alignas(64) std::atomic<uint64_t> arrived{0};  // the last round that this rank has arrived at
  Notice notices[2];                             // of even and odd rounds, in the same cache lines
  alignas(64) std::atomic<uint64_t> done{0};
  alignas(64) char slots[2][kSlotBytes];

  static_assert(std::atomic<uint64_t>::is_always_lock_free);
};

void* SharedGroup::MakeBoard(Arena& arena) {
  void* memory = arena.Allocate(sizeof(Board));
  return memory == nullptr ? nullptr : new (memory) Board;
}

SharedGroup::SharedGroup(Arena& arena, int rank, std::vector<char*> bases,
                         const std::vector<int64_t>& boards)
    : arena_(arena), rank_(rank), bases_(std::move(bases)) {
  for (int i = 0; i < size(); ++i) {
    boards_.push_back(std::launder(reinterpret_cast<Board*>(bases_[i] + boards[i])));
  }
}

char* SharedGroup::slot() const { return boards_[rank_]->slots[(round_ + 1) % 2]; }

void SharedGroup::Arrive(const Notice& notice) {
  ++round_;
  arrived_ = done_ = 0;
  boards_[rank_]->notices[round_ % 2] = notice;
  boards_[rank_]->arrived.store(round_, std::memory_order_release);
}

void SharedGroup::Done() { boards_[rank_]->done.store(round_, std::memory_order_release); }

bool SharedGroup::AllReached(std::atomic<uint64_t> Board::*counter, int& next) const {
  while (next < size()) {
    if ((boards_[next]->*counter).load(std::memory_order_acquire) < round_) return false;
    ++next;
  }
  return true;
}

bool SharedGroup::AllArrived() { return AllReached(&Board::arrived, arrived_); }

bool SharedGroup::AllDone() { return AllReached(&Board::done, done_); }

const Notice& SharedGroup::notice(int rank) const { return boards_[rank]->notices[round_ % 2]; }

}  // namespace lockstep::comm::mpi
