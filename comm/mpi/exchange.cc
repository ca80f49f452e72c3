#include "lockstep/comm/mpi/exchange.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "lockstep/comm/mpi/datatype.h"
#include "lockstep/comm/mpi/mpi_status.h"
#include "lockstep/comm/reduce.h"

namespace lockstep::comm::mpi {
namespace {

constexpr int kMaxRanks = 32;
constexpr int64_t kSegmentBytes = 256 << 10;    // of all other ranks together
constexpr int64_t kMinSegmentBytes = 32 << 10;  // of one
constexpr int kSlots = 4;                       // segments in flight
constexpr int kResults = kSlots;                // the slot of messages that nothing follows

// A tag is made of 10 bits of the operation's number, 19 of the segment's, and one.
constexpr int kSegmentBits = 19;
constexpr int kOperationBits = 10;
constexpr int kTagLimit = 1 << (kSegmentBits + kOperationBits + 1);

bool TagsSuffice() {
  static const bool suffice = [] {
    int* upper_bound = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &upper_bound, &found);
    return found != 0 && *upper_bound >= kTagLimit;
  }();
  return suffice;
}

int64_t SegmentBytes(int size) { return std::max(kSegmentBytes / (size - 1), kMinSegmentBytes); }

// Scratch memory of operations that are over, for the next ones: new memory costs page faults.
// Operations end on any thread, without the token.
class ScratchPool {
 public:
  static ScratchPool& Get() {
    static auto* pool = new ScratchPool;
    return *pool;
  }

  std::unique_ptr<char[]> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      return std::unique_ptr<char[]>(new char[kSlots * SegmentBytes(kMaxRanks) * (kMaxRanks - 1)]);
    }
    std::unique_ptr<char[]> scratch = std::move(free_.back());
    free_.pop_back();
    return scratch;
  }

  void Give(std::unique_ptr<char[]> scratch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < kMaxFree) free_.push_back(std::move(scratch));
  }

 private:
  static constexpr size_t kMaxFree = 4;
  std::mutex mutex_;
  std::vector<std::unique_ptr<char[]>> free_;
};

}  // namespace

bool Exchange::Suits(const Operation& operation, int size) {
  if (operation.kind != OperationKind::kAllReduce &&
      operation.kind != OperationKind::kReduceScatter) {
    return false;
  }
  const int64_t bytes = operation.payload_bytes();
  return size > 1 && size <= kMaxRanks && TagsSuffice() &&
         bytes / size / SegmentBytes(size) + 1 < (1 << kSegmentBits);
}

Exchange::Exchange(const Operation& operation, MPI_Comm comm, int rank, int size)
    : all_reduce_(operation.kind == OperationKind::kAllReduce),
      op_(operation.op),
      dtype_(operation.output.scalar_type()),
      type_(DatatypeOf(dtype_)),
      element_bytes_(static_cast<int64_t>(operation.output.element_size())),
      sequence_(operation.sequence),
      comm_(comm),
      rank_(rank),
      size_(size) {
  output_ = static_cast<char*>(operation.output.mutable_data_ptr());
  if (all_reduce_) {
    count_ = operation.output.numel();
    block_ = (count_ + size_ - 1) / size_;
    input_ = output_;
    output_ += rank_ * block_ * element_bytes_;
  } else {
    count_ = operation.input.numel();
    block_ = operation.output.numel();
    input_ = static_cast<char*>(const_cast<void*>(operation.input.const_data_ptr()));
  }
  segment_ = SegmentBytes(size_) / element_bytes_;
  segments_ = (block_ + segment_ - 1) / segment_;
  slots_.resize(static_cast<size_t>(std::min<int64_t>(kSlots, segments_)));
  const int64_t slot_bytes = SegmentBytes(size_) * (size_ - 1);
  scratch_ = ScratchPool::Get().Take();
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].scratch = scratch_.get() + i * slot_bytes;
}

Exchange::~Exchange() { ScratchPool::Get().Give(std::move(scratch_)); }

int64_t Exchange::Offset(int owner, int64_t segment) const {
  return owner * block_ + segment * segment_;
}

int Exchange::Length(int owner, int64_t segment) const {
  const int64_t end = std::min({(owner + 1) * block_, count_, Offset(owner, segment) + segment_});
  return static_cast<int>(std::max<int64_t>(end - Offset(owner, segment), 0));
}

int Exchange::Tag(int64_t segment, bool result) const {
  const int operation = static_cast<int>(sequence_ % (1 << kOperationBits));
  return (operation << (kSegmentBits + 1)) | static_cast<int>(segment << 1) | (result ? 1 : 0);
}

absl::Status Exchange::Start(Requests& requests) {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (absl::Status status = Post(static_cast<int>(slot), requests); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Exchange::Post(int index, Requests& requests) {
  Slot& slot = slots_[index];
  slot.segment = next_++;
  const int tag = Tag(slot.segment, /*result=*/false);
  const int mine = Length(rank_, slot.segment);
  for (int distance = 1; distance < size_; ++distance) {
    const int from = (rank_ + size_ - distance) % size_;
    const int to = (rank_ + distance) % size_;
    if (mine > 0) {
      char* where = slot.scratch + (distance - 1) * segment_ * element_bytes_;
      LOCKSTEP_MPI_RETURN_IF_ERROR(
          MPI_Irecv(where, mine, type_, from, tag, comm_, requests.New(index)));
      ++slot.outstanding;
    }
    if (const int theirs = Length(to, slot.segment); theirs > 0) {
      LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Isend(input_ + Offset(to, slot.segment) * element_bytes_,
                                             theirs, type_, to, tag, comm_, requests.New(index)));
      ++slot.outstanding;
    }
  }
  return absl::OkStatus();
}

void Exchange::Combine(const Slot& slot) {
  std::vector<const void*> parts(size_);
  for (int distance = 1; distance < size_; ++distance) {
    parts[(rank_ + size_ - distance) % size_] =
        slot.scratch + (distance - 1) * segment_ * element_bytes_;
  }
  parts[rank_] = input_ + Offset(rank_, slot.segment) * element_bytes_;
  Reduce(output_ + slot.segment * segment_ * element_bytes_, parts, Length(rank_, slot.segment),
         dtype_, op_);
}

absl::Status Exchange::PostResults(int64_t segment, Requests& requests) {
  const int tag = Tag(segment, /*result=*/true);
  const int mine = Length(rank_, segment);
  for (int distance = 1; distance < size_; ++distance) {
    const int from = (rank_ + size_ - distance) % size_;
    const int to = (rank_ + distance) % size_;
    if (const int theirs = Length(from, segment); theirs > 0) {
      LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Irecv(input_ + Offset(from, segment) * element_bytes_,
                                             theirs, type_, from, tag, comm_,
                                             requests.New(kResults)));
    }
    if (mine > 0) {
      LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Isend(input_ + Offset(rank_, segment) * element_bytes_, mine,
                                             type_, to, tag, comm_, requests.New(kResults)));
    }
  }
  return absl::OkStatus();
}

absl::Status Exchange::Completed(int index, Requests& requests) {
  if (index == kResults) return absl::OkStatus();
  Slot& slot = slots_[index];
  if (--slot.outstanding > 0) return absl::OkStatus();
  Combine(slot);
  if (all_reduce_) {
    if (absl::Status status = PostResults(slot.segment, requests); !status.ok()) return status;
  }
  return next_ < segments_ ? Post(index, requests) : absl::OkStatus();
}

}  // namespace lockstep::comm::mpi
