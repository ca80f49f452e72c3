#include "lockstep/parallel/checkpoint/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lockstep::parallel::checkpoint {
namespace {

// One number of every rank, on all ranks.
absl::StatusOr<std::vector<int64_t>> GatherNumbers(comm::Communicator& comm, int64_t number) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kLong).device(comm.device());
  const at::Tensor all = at::empty({comm.size()}, options);
  const absl::Status status = comm.AllGatherInto(all, at::full({1}, number, options)).Wait();
  if (!status.ok()) return status;
  const at::Tensor here = all.cpu();
  const int64_t* data = here.const_data_ptr<int64_t>();
  return std::vector<int64_t>(data, data + comm.size());
}

// The text's bytes, padded with zeros to `bytes`.
at::Tensor Encode(comm::Communicator& comm, const std::string& text, int64_t bytes) {
  const at::Tensor tensor = at::zeros({bytes}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), text.data(), text.size());
  return tensor.to(comm.device());
}

std::string Decode(const at::Tensor& tensor, int64_t begin, int64_t bytes) {
  const at::Tensor here = tensor.cpu();
  return {static_cast<const char*>(here.const_data_ptr()) + begin, static_cast<size_t>(bytes)};
}

absl::StatusOr<std::string> BroadcastFrom(comm::Communicator& comm, const std::string& text,
                                          int root, int64_t bytes) {
  const at::Tensor tensor =
      comm.rank() == root ? Encode(comm, text, bytes) : Encode(comm, "", bytes);
  const absl::Status status = comm.Broadcast(tensor, root).Wait();
  if (!status.ok()) return status;
  return Decode(tensor, 0, bytes);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> GatherTexts(comm::Communicator& comm,
                                                     const std::string& text) {
  const absl::StatusOr<std::vector<int64_t>> sizes =
      GatherNumbers(comm, static_cast<int64_t>(text.size()));
  if (!sizes.ok()) return sizes.status();
  const int64_t block = *std::max_element(sizes->begin(), sizes->end());
  at::Tensor all;
  if (comm.rank() == 0) {
    all = at::empty({block * comm.size()},
                    at::TensorOptions().dtype(at::kByte).device(comm.device()));
  }
  const absl::Status status = comm.GatherInto(all, Encode(comm, text, block), /*root=*/0).Wait();
  if (!status.ok()) return status;
  std::vector<std::string> texts;
  if (comm.rank() != 0) return texts;
  all = all.cpu();
  for (int rank = 0; rank < comm.size(); ++rank) {
    texts.push_back(Decode(all, rank * block, (*sizes)[rank]));
  }
  return texts;
}

absl::StatusOr<std::string> BroadcastText(comm::Communicator& comm, const std::string& text) {
  const absl::StatusOr<std::vector<int64_t>> sizes =
      GatherNumbers(comm, static_cast<int64_t>(text.size()));
  if (!sizes.ok()) return sizes.status();
  return BroadcastFrom(comm, text, /*root=*/0, (*sizes)[0]);
}

absl::Status Agree(comm::Communicator& comm, const absl::Status& status) {
  const std::string message{status.message()};
  // Codes and lengths in one number: an error without a message has a length of 0.
  const int64_t mine =
      (static_cast<int64_t>(message.size()) << 8) | static_cast<int64_t>(status.code());
  const absl::StatusOr<std::vector<int64_t>> all = GatherNumbers(comm, mine);
  if (!all.ok()) return all.status();
  for (int rank = 0; rank < comm.size(); ++rank) {
    const int64_t theirs = (*all)[rank];
    const auto code = static_cast<absl::StatusCode>(theirs & 0xff);
    if (code == absl::StatusCode::kOk) continue;
    const absl::StatusOr<std::string> text = BroadcastFrom(comm, message, rank, theirs >> 8);
    if (!text.ok()) return text.status();
    return absl::Status(code, comm.size() == 1 ? *text : absl::StrCat("rank ", rank, ": ", *text));
  }
  return absl::OkStatus();
}

}  // namespace lockstep::parallel::checkpoint
