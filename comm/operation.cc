#include "lockstep/comm/operation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lockstep::comm {

const char* Name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return "unknown";
}

const char* Name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAllReduce:
      return "AllReduce";
    case OperationKind::kAllGather:
      return "AllGather";
    case OperationKind::kReduceScatter:
      return "ReduceScatter";
    case OperationKind::kBroadcast:
      return "Broadcast";
    case OperationKind::kGather:
      return "Gather";
    case OperationKind::kAllToAll:
      return "AllToAll";
    case OperationKind::kSend:
      return "Send";
    case OperationKind::kRecv:
      return "Recv";
    case OperationKind::kBarrier:
      return "Barrier";
  }
  return "unknown";
}

bool IsCollective(OperationKind kind) {
  return kind != OperationKind::kSend && kind != OperationKind::kRecv;
}

int64_t Operation::payload_bytes() const {
  const int64_t in = input.defined() ? static_cast<int64_t>(input.nbytes()) : 0;
  const int64_t out = output.defined() ? static_cast<int64_t>(output.nbytes()) : 0;
  return std::max(in, out);
}

namespace {

constexpr int kMaxTag = 32767;  // what MPI promises

bool Reduces(OperationKind kind) {
  return kind == OperationKind::kAllReduce || kind == OperationKind::kReduceScatter;
}

// "root 0, float32 [2, 3]"; `shape` false gives the number of elements in the place of the shape.
std::string Details(const Operation& operation, bool shape = true) {
  std::string text;
  if (Reduces(operation.kind)) absl::StrAppend(&text, Name(operation.op), ", ");
  if (operation.kind == OperationKind::kBroadcast || operation.kind == OperationKind::kGather) {
    absl::StrAppend(&text, "root ", operation.peer, ", ");
  }
  if (operation.kind == OperationKind::kSend) {
    absl::StrAppend(&text, "to rank ", operation.peer, ", tag ", operation.tag, ", ");
  }
  if (operation.kind == OperationKind::kRecv) {
    absl::StrAppend(&text, "from rank ", operation.peer, ", tag ", operation.tag, ", ");
  }
  const at::Tensor& subject = operation.subject();
  if (subject.defined()) {
    absl::StrAppend(&text, c10::toString(subject.scalar_type()));
    if (shape) {
      absl::StrAppend(&text, " [", absl::StrJoin(subject.sizes(), ", "), "]");
    } else {
      absl::StrAppend(&text, ", ", subject.numel(), " elements");
    }
  }
  if (!operation.label.empty()) absl::StrAppend(&text, ", ", operation.label);
  return text;
}

std::string Parenthesized(const std::string& details) {
  return details.empty() ? "" : absl::StrCat(" (", details, ")");
}

// Checks one run of conditions and words the first that fails.
class Validator {
 public:
  Validator(const Operation& operation, int rank, int size, at::Device device)
      : operation_(operation), rank_(rank), size_(size), device_(device) {}

  absl::Status Run() {
    const OperationKind kind = operation_.kind;
    const at::Tensor& in = operation_.input;
    const at::Tensor& out = operation_.output;
    const bool reads = kind != OperationKind::kAllReduce && kind != OperationKind::kBroadcast &&
                       kind != OperationKind::kRecv && kind != OperationKind::kBarrier;
    const bool writes = kind != OperationKind::kSend && kind != OperationKind::kBarrier &&
                        !(kind == OperationKind::kGather && rank_ != operation_.peer);
    if (reads) Tensor("input", in);
    if (writes) Tensor("output", out);
    if (!status_.ok()) return status_;
    if (reads && writes) {
      if (in.scalar_type() != out.scalar_type()) {
        Refuse(absl::StrCat("the input is ", c10::toString(in.scalar_type()), ", the output ",
                            c10::toString(out.scalar_type())));
        return status_;
      }
      Sizes(in.numel(), out.numel());
      Overlap(in, out);
    }
    if (Reduces(kind) && operation_.op == ReduceOp::kAverage &&
        !c10::isFloatingType(operation_.subject().scalar_type())) {
      Refuse("an average needs a floating-point dtype");
    }
    const bool has_peer =
        kind == OperationKind::kBroadcast || kind == OperationKind::kGather || !IsCollective(kind);
    if (has_peer && (operation_.peer < 0 || operation_.peer >= size_)) {
      Refuse(absl::StrCat("rank ", operation_.peer, " is none of the ", size_, " ranks"));
    }
    if (!IsCollective(kind) && (operation_.tag < 0 || operation_.tag > kMaxTag)) {
      Refuse(absl::StrCat("the tag must be from 0 to ", kMaxTag));
    }
    return status_;
  }

 private:
  void Refuse(const std::string& why) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(Name(operation_.kind),
                                                        Parenthesized(Details(operation_)),
                                                        " on rank ", rank_, ": ", why));
    }
  }

  void Tensor(const char* which, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      Refuse(absl::StrCat("the ", which, " is an undefined tensor"));
    } else if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
      Refuse(
          absl::StrCat("the ", which,
                       " is not contiguous; nothing is copied silently: pass tensor.contiguous()"));
    } else if (!IsSupported(tensor.scalar_type())) {
      Refuse(absl::StrCat(c10::toString(tensor.scalar_type()),
                          " is not supported; f32, f64, f16, bf16, i32, i64 and u8 are"));
    } else if (tensor.device() != device_) {
      Refuse(absl::StrCat("the ", which, " is on ", tensor.device().str(),
                          ", this communicator moves tensors on ", device_.str()));
    }
  }

  void Sizes(int64_t in, int64_t out) {
    switch (operation_.kind) {
      case OperationKind::kAllGather:
      case OperationKind::kGather:
        if (out != in * size_) {
          Refuse(absl::StrCat("the output has ", out, " elements, not ", size_, " ranks x ", in));
        }
        break;
      case OperationKind::kReduceScatter:
        if (in != out * size_) {
          Refuse(absl::StrCat("the input has ", in, " elements, not ", size_, " ranks x ", out));
        }
        break;
      case OperationKind::kAllToAll:
        if (in != out || in % size_ != 0) {
          Refuse(absl::StrCat("input and output have ", in, " and ", out,
                              " elements: they must be equal and a multiple of ", size_));
        }
        break;
      default:
        break;
    }
  }

  void Overlap(const at::Tensor& in, const at::Tensor& out) {
    const char* in_begin = static_cast<const char*>(in.const_data_ptr());
    const char* out_begin = static_cast<const char*>(out.const_data_ptr());
    const char* in_end = in_begin + in.nbytes();
    const char* out_end = out_begin + out.nbytes();
    if (in_end <= out_begin || out_end <= in_begin) return;
    const bool gathers =
        operation_.kind == OperationKind::kAllGather || operation_.kind == OperationKind::kGather;
    const bool own_slice = (gathers && in_begin == out_begin + rank_ * in.nbytes()) ||
                           (operation_.kind == OperationKind::kReduceScatter &&
                            out_begin == in_begin + rank_ * out.nbytes());
    if (!own_slice) Refuse("input and output overlap other than as this rank's slice");
  }

  const Operation& operation_;
  const int rank_;
  const int size_;
  const at::Device device_;
  absl::Status status_;
};

}  // namespace

bool IsSupported(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kInt:
    case at::kLong:
    case at::kByte:
      return true;
    default:
      return false;
  }
}

std::string Operation::ToString() const {
  return absl::StrCat(Name(kind), " #", sequence, Parenthesized(Details(*this)));
}

std::string Operation::Signature() const {
  return absl::StrCat(Name(kind), Parenthesized(Details(*this, /*shape=*/false)));
}

absl::Status Validate(const Operation& operation, int rank, int size, at::Device device) {
  return Validator(operation, rank, size, device).Run();
}

}  // namespace lockstep::comm
