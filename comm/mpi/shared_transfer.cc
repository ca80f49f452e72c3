#include "lockstep/comm/mpi/shared_transfer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/reduce.h"

namespace lockstep::comm::mpi {
namespace {

constexpr int64_t kSmallBytes = 64 << 10;   // of all ranks together
constexpr int64_t kStagingBytes = 2 << 20;  // a round's copy
constexpr int64_t kAdvanceBytes = 512 << 10;
constexpr int64_t kPieceBytes = 128 << 10;
constexpr int64_t kTileBytes = 16 << 10;  // is written to all places while it is in the cache
constexpr int64_t kPartElements = 64;     // parts are multiples of it: ranks share no cache line

// Staging memory of operations that are over, for the next ones. Guarded by the progress token.
std::vector<char*>& FreeStaging() {
  static auto* free = new std::vector<char*>;
  return *free;
}

char* TakeStaging(Arena& arena) {
  if (FreeStaging().empty()) return static_cast<char*>(arena.Allocate(kStagingBytes));
  char* staging = FreeStaging().back();
  FreeStaging().pop_back();
  return staging;
}

char* Data(const at::Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
}

}  // namespace

bool SharedTransfer::Suits(const Operation& operation) { return IsCollective(operation.kind); }

SharedTransfer::SharedTransfer(const Operation& operation, SharedGroup& group)
    : operation_(operation), group_(group), rank_(group.rank()), size_(group.size()) {
  const at::Tensor& output = operation.output;
  if (output.defined()) output_ = Data(output);
  if (operation.kind == OperationKind::kAllReduce || operation.kind == OperationKind::kBroadcast) {
    source_ = output_;
    count_ = output.numel();
  } else if (operation.input.defined()) {
    source_ = Data(operation.input);
    count_ = operation.input.numel();
  }
  if (operation.kind == OperationKind::kReduceScatter ||
      operation.kind == OperationKind::kAllToAll) {
    blocks_ = size_;
    count_ /= size_;
  }
  const at::Tensor& subject = operation.subject();
  if (subject.defined()) element_bytes_ = static_cast<int64_t>(subject.element_size());
  const int64_t bytes = count_ * blocks_ * element_bytes_;
  small_ = bytes <= SharedGroup::kSlotBytes && bytes * size_ <= kSmallBytes;
  has_place_ = operation.kind != OperationKind::kBroadcast || operation.peer == rank_;
  direct_ = !has_place_ || (!small_ && group.arena().Contains(source_, bytes));
  notice_.signature[0] = static_cast<uint64_t>(operation.kind) |
                         static_cast<uint64_t>(operation.op) << 8 |
                         static_cast<uint64_t>(operation.peer + 1) << 32;
  if (subject.defined()) {
    notice_.signature[0] |= static_cast<uint64_t>(subject.scalar_type()) << 16;
  }
  notice_.signature[1] = static_cast<uint64_t>(count_ * blocks_);
  notice_.signature[2] = std::hash<std::string>()(operation.label);  // one program, so one hash
  const size_t label = std::min(operation.label.size(), sizeof(notice_.label) - 1);
  operation.label.copy(notice_.label, label, operation.label.size() - label);
  notice_.direct = direct_ ? 1 : 0;
  inputs_.resize(size_);
  group_.Enter(this);
}

absl::StatusOr<bool> SharedTransfer::Advance() {
  if (!group_.IsTurnOf(this)) return false;
  int64_t budget = kAdvanceBytes / element_bytes_;
  const auto move = [&](int64_t all, int64_t (SharedTransfer::*piece)(int64_t, int64_t)) {
    while (moved_ < all && budget > 0) {
      const int64_t count = (this->*piece)(
          moved_, std::min(std::max(kPieceBytes / element_bytes_, int64_t{1}), all - moved_));
      moved_ += count;
      budget -= count;
    }
    return moved_ == all;
  };
  while (true) {
    switch (phase_) {
      case Phase::kStage:
        if (moved_ == 0) {
          if (absl::Status status = BeginRound(); !status.ok()) return status;
        }
        if (!move(ToStage(), &SharedTransfer::Stage)) return false;
        group_.Arrive(notice_);
        phase_ = Phase::kArrive;
        break;
      case Phase::kArrive:
        if (!group_.AllArrived()) return false;
        if (absl::Status status = CheckNotices(); !status.ok()) return status;
        phase_ = Phase::kWork;
        moved_ = 0;
        break;
      case Phase::kWork:
        if (!move(ToWorkOn(), &SharedTransfer::Work)) return false;
        if (small_) return EndRound();
        group_.Done();
        phase_ = Phase::kEnd;
        break;
      case Phase::kEnd:
        if (!group_.AllDone()) return false;
        phase_ = Phase::kTake;
        moved_ = 0;
        break;
      case Phase::kTake:
        if (!move(ToTake(), &SharedTransfer::Take)) return false;
        if (EndRound()) return true;
        break;
    }
  }
}

absl::Status SharedTransfer::BeginRound() {
  const int64_t most = small_ ? count_ : kStagingBytes / (element_bytes_ * blocks_);
  length_ = std::min(most, count_ - start_);
  char* place = source_ + start_ * element_bytes_;
  if (!direct_) {
    if (staging_ == nullptr) staging_ = small_ ? group_.slot() : TakeStaging(group_.arena());
    if (staging_ == nullptr) return absl::ResourceExhaustedError("no memory to share");
    place = staging_;
  }
  notice_.place = has_place_ ? group_.arena().OffsetOf(place) : 0;
  notice_.stride = direct_ ? count_ : length_;
  return absl::OkStatus();
}

absl::Status SharedTransfer::CheckNotices() {
  bool all_direct = true;
  for (int rank = 0; rank < size_; ++rank) {
    const Notice& notice = group_.notice(rank);
    if (std::memcmp(notice.signature, notice_.signature, sizeof(notice.signature)) != 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, " has issued another one, ",
          Name(static_cast<OperationKind>(notice.signature[0] & 0xff)), " of ", notice.signature[1],
          " elements", notice.label[0] == '\0' ? "" : " for ", notice.label));
    }
    all_direct = all_direct && notice.direct != 0;
  }
  if (all_direct) length_ = count_;
  part_ = (length_ + size_ - 1) / size_;
  part_ = (part_ + kPartElements - 1) / kPartElements * kPartElements;
  return absl::OkStatus();
}

bool SharedTransfer::EndRound() {
  start_ += length_;
  moved_ = 0;
  phase_ = Phase::kStage;
  if (start_ < count_) return false;
  if (staging_ != nullptr && !small_) FreeStaging().push_back(staging_);
  group_.Leave();
  return true;
}

char* SharedTransfer::Source(int block, int64_t element) const {
  return source_ + (block * count_ + start_ + element) * element_bytes_;
}

char* SharedTransfer::Output(int block, int64_t element) const {
  return output_ + (block * count_ + start_ + element) * element_bytes_;
}

char* SharedTransfer::Place(int rank, int block, int64_t element) const {
  if (rank == rank_) return Source(block, element);
  return group_.data(rank) + (block * group_.notice(rank).stride + element) * element_bytes_;
}

void SharedTransfer::Copy(char* to, const char* from, int64_t count) const {
  if (to != from) std::memcpy(to, from, static_cast<size_t>(count * element_bytes_));
}

int64_t SharedTransfer::ToStage() const { return direct_ ? 0 : blocks_ * length_; }

int64_t SharedTransfer::Stage(int64_t first, int64_t count) {
  const int block = static_cast<int>(first / length_);
  const int64_t element = first % length_;
  count = std::min(count, length_ - element);
  // Its own block nobody else reads.
  if (blocks_ == 1 || block != rank_) {
    Copy(staging_ + first * element_bytes_, Source(block, element), count);
  }
  return count;
}

int64_t SharedTransfer::ToWorkOn() const {
  switch (operation_.kind) {
    case OperationKind::kAllReduce:
      return small_ ? length_ : std::clamp<int64_t>(length_ - rank_ * part_, 0, part_);
    case OperationKind::kReduceScatter:
      return length_;
    case OperationKind::kAllGather:
    case OperationKind::kAllToAll:
      return size_ * length_;
    case OperationKind::kGather:
      return operation_.peer == rank_ ? size_ * length_ : 0;
    case OperationKind::kBroadcast:
      return operation_.peer == rank_ ? 0 : length_;
    default:
      return 0;
  }
}

int64_t SharedTransfer::Work(int64_t first, int64_t count) {
  switch (operation_.kind) {
    case OperationKind::kAllReduce:
      if (small_) {
        Reduce(Output(0, first), /*block=*/0, first, count);
      } else {
        ReduceIntoPlaces(rank_ * part_ + first, count);
      }
      return count;
    case OperationKind::kReduceScatter:
      Reduce(Output(0, first), /*block=*/rank_, first, count);
      return count;
    case OperationKind::kBroadcast:
      Copy(Output(0, first), Place(operation_.peer, 0, first), count);
      return count;
    default: {
      const int from = static_cast<int>(first / length_);
      const int64_t element = first % length_;
      count = std::min(count, length_ - element);
      Copy(Output(from, element), Place(from, blocks_ == 1 ? 0 : rank_, element), count);
      return count;
    }
  }
}

void SharedTransfer::Reduce(char* output, int block, int64_t first, int64_t count) {
  for (int rank = 0; rank < size_; ++rank) inputs_[rank] = Place(rank, block, first);
  comm::Reduce(output, inputs_, count, operation_.output.scalar_type(), operation_.op);
}

void SharedTransfer::ReduceIntoPlaces(int64_t first, int64_t count) {
  const int64_t end = first + count;
  for (; first < end; first += count) {
    count = std::min(kTileBytes / element_bytes_, end - first);
    Reduce(Source(0, first), /*block=*/0, first, count);
    for (int rank = 0; rank < size_; ++rank) {
      Copy(Place(rank, 0, first), Source(0, first), count);
    }
  }
}

int64_t SharedTransfer::ToTake() const {
  return operation_.kind == OperationKind::kAllReduce && !direct_ ? length_ : 0;
}

int64_t SharedTransfer::Take(int64_t first, int64_t count) {
  // What this rank has combined is in the tensor already.
  const int64_t mine = rank_ * part_;
  if (first >= mine && first < mine + part_) return std::min(count, mine + part_ - first);
  if (first < mine) count = std::min(count, mine - first);
  Copy(Source(0, first), staging_ + first * element_bytes_, count);
  return count;
}

}  // namespace lockstep::comm::mpi
