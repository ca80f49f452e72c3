#include "lockstep/comm/mpi/transfer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/mpi/datatype.h"
#include "lockstep/comm/mpi/mpi_status.h"

namespace lockstep::comm::mpi {
namespace {

// `count` elements, of which the next follow `stride` elements later. Freed with this object, which
// MPI allows while calls use it.
class StridedType {
 public:
  StridedType(int count, int64_t stride_bytes, MPI_Datatype element) {
    MPI_Datatype packed = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(count, element, &packed);
    MPI_Type_create_resized(packed, /*lb=*/0, static_cast<MPI_Aint>(stride_bytes), &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&packed);
  }
  ~StridedType() { MPI_Type_free(&type_); }
  StridedType(const StridedType&) = delete;
  StridedType& operator=(const StridedType&) = delete;

  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

}  // namespace

Transfer::Transfer(Operation operation, MPI_Comm comm, MPI_Comm internal, SharedGroup* shared,
                   int rank, int size, const Options& options)
    : operation_(std::move(operation)),
      comm_(comm),
      internal_(internal),
      shared_group_(shared),
      rank_(rank),
      size_(size),
      max_elements_(options.max_elements_per_call),
      exchange_bytes_(options.exchange_bytes) {
  if (const at::Tensor& subject = operation_.subject(); subject.defined()) {
    type_ = DatatypeOf(subject.scalar_type());
    element_bytes_ = static_cast<int64_t>(subject.element_size());
  }
}

char* Transfer::input(int64_t element) const {
  // MPI takes const buffers; its own buffers are written to through output().
  return static_cast<char*>(const_cast<void*>(operation_.input.const_data_ptr())) +
         element * element_bytes_;
}

char* Transfer::output(int64_t element) const {
  return static_cast<char*>(operation_.output.mutable_data_ptr()) + element * element_bytes_;
}

bool Transfer::InputIsOutputSlice() const {
  return input() == output(rank_ * operation_.input.numel());
}

template <typename Function>
absl::Status Transfer::ForPieces(int64_t count, int64_t limit, Function f) {
  int64_t first = 0;
  do {
    const int64_t piece = std::min(limit, count - first);
    if (absl::Status status = f(first, static_cast<int>(piece)); !status.ok()) return status;
    first += piece;
  } while (first < count);
  return absl::OkStatus();
}

absl::Status Transfer::Start(Requests& requests) {
  if (shared_group_ != nullptr && SharedTransfer::Suits(operation_)) {
    shared_ = std::make_unique<SharedTransfer>(operation_, *shared_group_);
    return absl::OkStatus();
  }
  if (operation_.payload_bytes() >= exchange_bytes_ && Exchange::Suits(operation_, size_)) {
    exchange_ = std::make_unique<Exchange>(operation_, internal_, rank_, size_);
    return exchange_->Start(requests);
  }
  switch (operation_.kind) {
    case OperationKind::kAllReduce: {
      const MPI_Op op = OpOf(operation_.op, operation_.output.scalar_type());
      return ForPieces(operation_.output.numel(), max_elements_, [&](int64_t first, int count) {
        return LOCKSTEP_MPI_STATUS(
            MPI_Iallreduce(MPI_IN_PLACE, output(first), count, type_, op, comm_, requests.New()));
      });
    }
    case OperationKind::kBroadcast:
      return ForPieces(operation_.output.numel(), max_elements_, [&](int64_t first, int count) {
        return LOCKSTEP_MPI_STATUS(
            MPI_Ibcast(output(first), count, type_, operation_.peer, comm_, requests.New()));
      });
    case OperationKind::kSend:
      return ForPieces(operation_.input.numel(), max_elements_, [&](int64_t first, int count) {
        return LOCKSTEP_MPI_STATUS(MPI_Isend(input(first), count, type_, operation_.peer,
                                             operation_.tag, comm_, requests.New()));
      });
    case OperationKind::kRecv:
      return ForPieces(operation_.output.numel(), max_elements_, [&](int64_t first, int count) {
        return LOCKSTEP_MPI_STATUS(MPI_Irecv(output(first), count, type_, operation_.peer,
                                             operation_.tag, comm_, requests.New()));
      });
    case OperationKind::kBarrier:
      return LOCKSTEP_MPI_STATUS(MPI_Ibarrier(comm_, requests.New()));
    case OperationKind::kReduceScatter:
      return StartReduceScatter(requests);
    case OperationKind::kAllGather:
    case OperationKind::kGather:
    case OperationKind::kAllToAll:
      return StartByBlocks(requests);
  }
  return absl::InternalError("unknown kind of operation");
}

absl::Status Transfer::StartReduceScatter(Requests& requests) {
  const int64_t block = operation_.output.numel();
  const MPI_Op op = OpOf(operation_.op, operation_.output.scalar_type());
  const bool in_place = output() == input(rank_ * block);
  if (block * size_ <= max_elements_) {
    result_is_first_block_ = in_place;
    return LOCKSTEP_MPI_STATUS(
        MPI_Ireduce_scatter_block(in_place ? MPI_IN_PLACE : input(), in_place ? input() : output(),
                                  static_cast<int>(block), type_, op, comm_, requests.New()));
  }
  // MPI's operations take no strided types, so that pieces of blocks must be reduced one by one.
  return ForPieces(block, max_elements_, [&](int64_t first, int count) {
    for (int root = 0; root < size_; ++root) {
      const bool here_in_place = in_place && root == rank_;
      LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Ireduce(
          here_in_place ? MPI_IN_PLACE : input(root * block + first),
          root == rank_ ? output(first) : nullptr, count, type_, op, root, comm_, requests.New()));
    }
    return absl::OkStatus();
  });
}

absl::Status Transfer::StartByBlocks(Requests& requests) {
  const bool exchanges = operation_.kind == OperationKind::kAllToAll;
  const bool receives = operation_.output.defined();
  const int64_t block = operation_.input.numel() / (exchanges ? size_ : 1);
  const bool in_place = !exchanges && receives && InputIsOutputSlice();
  // A block is cut earlier than need be, as Open MPI multiplies counts by ranks in an int.
  const bool whole = block * size_ <= max_elements_;
  const int64_t limit =
      whole ? std::max<int64_t>(block, 1) : std::max<int64_t>(max_elements_ / size_, 1);
  return ForPieces(block, limit, [&](int64_t first, int count) {
    const StridedType strided(count, block * element_bytes_, type_);
    const int strided_count = whole ? count : 1;
    const MPI_Datatype strided_type = whole ? type_ : strided.get();
    const void* from = in_place ? MPI_IN_PLACE : input(first);
    void* to = receives ? output(first) : nullptr;
    switch (operation_.kind) {
      case OperationKind::kAllGather:
        return LOCKSTEP_MPI_STATUS(MPI_Iallgather(from, count, type_, to, strided_count,
                                                  strided_type, comm_, requests.New()));
      case OperationKind::kGather:
        return LOCKSTEP_MPI_STATUS(MPI_Igather(from, count, type_, to, strided_count, strided_type,
                                               operation_.peer, comm_, requests.New()));
      default:
        return LOCKSTEP_MPI_STATUS(MPI_Ialltoall(from, strided_count, strided_type, to,
                                                 strided_count, strided_type, comm_,
                                                 requests.New()));
    }
  });
}

absl::Status Transfer::Completed(int slot, const MPI_Status& status, Requests& requests) {
  if (exchange_ != nullptr) return exchange_->Completed(slot, requests);
  return operation_.kind == OperationKind::kRecv ? CheckReceived(status) : absl::OkStatus();
}

absl::Status Transfer::CheckReceived(const MPI_Status& status) const {
  if (operation_.output.numel() > max_elements_) return absl::OkStatus();  // a piece of it
  int count = 0;
  MPI_Get_count(&status, type_, &count);
  if (count == operation_.output.numel()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      operation_.ToString(), " on rank ", rank_, ": the Send that matches has ",
      count == MPI_UNDEFINED ? std::string("another dtype") : absl::StrCat(count, " elements")));
}

void Transfer::Finish() {
  if (exchange_ != nullptr || shared_ != nullptr) return;
  if (result_is_first_block_ && rank_ != 0) {
    std::memcpy(output(), input(), operation_.output.nbytes());
  }
  const bool reduces = operation_.kind == OperationKind::kAllReduce ||
                       operation_.kind == OperationKind::kReduceScatter;
  if (reduces && operation_.op == ReduceOp::kAverage && size_ > 1) {
    Divide(output(), operation_.output.numel(), operation_.output.scalar_type(), size_);
  }
}

}  // namespace lockstep::comm::mpi
