#include "lockstep/parallel/checkpoint/shard_writer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/checksum.h"
#include "lockstep/parallel/checkpoint/file_operations.h"
#include "lockstep/parallel/checkpoint/safetensors_header.h"

namespace lockstep::parallel::checkpoint {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr size_t kFlushBytes = 8 << 20;     // between calls on the disk to begin
constexpr size_t kGatherBytes = 256 << 10;  // pieces below it share a call of write()

// A file to which small pieces go together.
class GatheringFile {
 public:
  explicit GatheringFile(std::string path) : path_(std::move(path)) {}
  ~GatheringFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  GatheringFile(const GatheringFile&) = delete;
  GatheringFile& operator=(const GatheringFile&) = delete;

  absl::Status Open() { return CreateFile(path_, descriptor_); }

  absl::Status Write(const void* data, size_t bytes) {
    if (bytes < kGatherBytes) {
      gathered_.append(static_cast<const char*>(data), bytes);
      return gathered_.size() < kGatherBytes ? absl::OkStatus() : Flush();
    }
    const absl::Status status = Flush();
    return status.ok() ? WriteThrough(data, bytes) : status;
  }

  absl::Status Finish() {
    const absl::Status status = Flush();
    return status.ok() ? SyncFile(path_, descriptor_) : status;
  }

 private:
  absl::Status Flush() {
    if (gathered_.empty()) return absl::OkStatus();
    const absl::Status status = WriteThrough(gathered_.data(), gathered_.size());
    gathered_.clear();
    return status;
  }

  // The disk works while the next bytes are summed up and copied to the system's cache.
  absl::Status WriteThrough(const void* data, size_t bytes) {
    const absl::Status status = WriteFile(path_, descriptor_, data, bytes);
    not_begun_ += bytes;
    if (not_begun_ < kFlushBytes) return status;
    not_begun_ = 0;
    sync_file_range(descriptor_, /*offset=*/0, /*nbytes=*/0, SYNC_FILE_RANGE_WRITE);  // only a hint
    return status;
  }

  const std::string path_;
  int descriptor_ = -1;
  std::string gathered_;
  size_t not_begun_ = 0;  // bytes that the disk was not asked for
};

// The header, and in `info` what it says.
absl::StatusOr<std::string> MakeHeader(const std::vector<ShardPiece>& pieces, ShardInfo& info) {
  Header header;
  nlohmann::ordered_json ranges = nlohmann::ordered_json::object();
  uint64_t end = 0;
  for (const ShardPiece& piece : pieces) {
    const uint64_t begin = std::exchange(end, end + piece.values.nbytes());
    const bool is_whole = piece.values.numel() == piece.whole.numel();
    header.entries.push_back(
        {piece.name, piece.whole.dtype,
         is_whole ? piece.whole.sizes : std::vector<int64_t>{piece.values.numel()}, begin, end});
    if (!is_whole) ranges[piece.name] = {{"begin", piece.begin}, {"shape", piece.whole.sizes}};
    info.pieces.push_back({.tensor = piece.name,
                           .begin = piece.begin,
                           .count = piece.values.numel(),
                           .position = begin});
  }
  try {
    if (!ranges.empty()) header.metadata["ranges"] = ranges.dump();
  } catch (const nlohmann::json::type_error& error) {
    return absl::InvalidArgumentError(absl::StrCat("names must be UTF-8: ", error.what()));
  }
  absl::StatusOr<std::string> text = FormatHeader(header);
  if (!text.ok()) return text.status();
  const uint64_t length = text->size();
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, kLengthBytes);
  bytes += *text;
  info.header_bytes = bytes.size();
  info.header_checksum = Checksum(bytes);
  info.bytes = bytes.size() + end;
  for (PieceInfo& piece : info.pieces) piece.position += info.header_bytes;
  return bytes;
}

absl::Status WriteValues(GatheringFile& file, const at::Tensor& values, PieceInfo& info) {
  const int64_t chunk = kChunkBytes / static_cast<int64_t>(values.element_size());
  for (int64_t begin = 0; begin < values.numel(); begin += chunk) {
    const at::Tensor part =
        values.slice(/*dim=*/0, begin, std::min(begin + chunk, values.numel())).cpu();
    info.checksums.push_back(Checksum(part.const_data_ptr(), part.nbytes()));
    const absl::Status status = file.Write(part.const_data_ptr(), part.nbytes());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<ShardPiece> PiecesOf(const std::vector<StateRange>& ranges) {
  const at::NoGradGuard no_grad;
  std::vector<ShardPiece> pieces;
  for (const StateRange& range : ranges) {
    if (range.part.count == 0) continue;
    const at::Tensor values = range.values.detach().reshape({-1}).slice(
        /*dim=*/0, range.part.from, range.part.from + range.part.count);
    pieces.push_back({range.name, range.whole, range.begin + range.part.from, values});
  }
  // Large elements first, so that all are aligned: as Python's writer does.
  std::sort(pieces.begin(), pieces.end(), [](const ShardPiece& a, const ShardPiece& b) {
    return std::make_tuple(TypeOrder(a.whole.dtype), a.name) <
           std::make_tuple(TypeOrder(b.whole.dtype), b.name);
  });
  return pieces;
}

namespace {

// Memory whose first touch, which the first snapshot waits for, takes the system a step each 2 MiB
// in the place of each 4 KiB.
at::Tensor EmptyInHugePages(int64_t bytes) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  at::Tensor memory = at::empty({bytes + kHugePage}, at::kByte);
  const auto address = reinterpret_cast<int64_t>(memory.const_data_ptr());
  const int64_t skipped = (kHugePage - address % kHugePage) % kHugePage;
  memory = memory.slice(/*dim=*/0, skipped, skipped + bytes);
  madvise(memory.mutable_data_ptr(), static_cast<size_t>(bytes), MADV_HUGEPAGE);  // only a hint
  return memory;
}

}  // namespace

std::vector<ShardPiece> Snapshot::Take(std::vector<ShardPiece> pieces) {
  const at::NoGradGuard no_grad;
  int64_t bytes = 0;
  for (const ShardPiece& piece : pieces) bytes += static_cast<int64_t>(piece.values.nbytes());
  if (!memory_.defined() || memory_.numel() != bytes) memory_ = EmptyInHugePages(bytes);
  int64_t begin = 0;
  for (ShardPiece& piece : pieces) {
    const auto size = static_cast<int64_t>(piece.values.nbytes());
    const at::Tensor copy =
        memory_.slice(/*dim=*/0, begin, begin + size).view(piece.values.scalar_type());
    copy.copy_(piece.values);
    piece.values = copy;
    begin += size;
  }
  return pieces;
}

absl::StatusOr<ShardInfo> WriteShard(const std::string& folder, const std::string& name,
                                     const std::vector<ShardPiece>& pieces) {
  ShardInfo info = {.file = name};
  const std::string path = absl::StrCat(folder, "/", name);
  const absl::StatusOr<std::string> header = MakeHeader(pieces, info);
  if (!header.ok()) {
    return absl::Status(header.status().code(),
                        absl::StrCat(path, ": ", std::string{header.status().message()}));
  }
  GatheringFile file(path);
  absl::Status status = file.Open();
  if (status.ok()) status = file.Write(header->data(), header->size());
  for (size_t i = 0; i < pieces.size() && status.ok(); ++i) {
    status = WriteValues(file, pieces[i].values, info.pieces[i]);
  }
  if (status.ok()) status = file.Finish();
  if (!status.ok()) return status;
  return info;
}

}  // namespace lockstep::parallel::checkpoint
