#include "lockstep/parallel/checkpoint/shard_reader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/checksum.h"
#include "lockstep/parallel/checkpoint/file_operations.h"

namespace lockstep::parallel::checkpoint {
namespace {

constexpr size_t kOpenFiles = 256;        // at most: a process may have about a thousand
constexpr size_t kStepBytes = 128 << 10;  // of a read: its checksum finds it in the core's cache

}  // namespace

class ShardReader::File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  absl::Status Open(const ShardInfo& info) {
    descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor_ < 0 && errno == ENOENT) {
      return absl::NotFoundError(absl::StrCat(path_, ": this shard of the checkpoint is missing"));
    }
    struct stat there;
    if (descriptor_ < 0 || fstat(descriptor_, &there) != 0) return FileError(path_, "open", errno);
    if (static_cast<uint64_t>(there.st_size) != info.bytes) {
      return absl::DataLossError(
          absl::StrCat(path_, ": has ", there.st_size, " bytes, but ", info.bytes, " were saved"));
    }
    // The disk works ahead of the reader, by as much as it does for anybody. Asked to fetch ranges
    // before they are read (WILLNEED), Linux takes twice the time.
    posix_fadvise(descriptor_, /*offset=*/0, /*len=*/0, POSIX_FADV_SEQUENTIAL);
    std::string header(info.header_bytes, '\0');
    return Read(0, header.data(), header.size(), info.header_checksum, "the header");
  }

  absl::Status Read(uint64_t position, char* data, size_t bytes, uint32_t checksum,
                    const std::string& what) {
    uint32_t sum = 0;
    for (size_t done = 0; done < bytes;) {
      const ssize_t count = pread(descriptor_, data + done, std::min(kStepBytes, bytes - done),
                                  static_cast<off_t>(position + done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return FileError(path_, "read", errno);
      if (count == 0) return absl::DataLossError(absl::StrCat(path_, ": is cut off"));
      sum = Checksum(data + done, count, sum);
      done += count;
    }
    if (sum == checksum) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(path_, ": bytes ", position, " to ", position + bytes,
                                            " (", what,
                                            ") are not what was saved: their "
                                            "checksum differs"));
  }

 private:
  const std::string path_;
  int descriptor_ = -1;
};

ShardReader::ShardReader(std::string folder, const Index& index)
    : folder_(std::move(folder)), index_(index), chunk_(at::empty({kChunkBytes}, at::kByte)) {
  for (size_t shard = 0; shard < index.shards.size(); ++shard) {
    for (const PieceInfo& piece : index.shards[shard].pieces) {
      pieces_[piece.tensor].emplace_back(shard, &piece);
    }
  }
}

ShardReader::~ShardReader() = default;

absl::StatusOr<ShardReader::File*> ShardReader::Open(size_t shard) {
  const auto place = files_.find(shard);
  if (place != files_.end()) return place->second.get();
  if (files_.size() == kOpenFiles) files_.clear();
  const ShardInfo& info = index_.shards[shard];
  auto file = std::make_unique<File>(absl::StrCat(folder_, "/", info.file));
  const absl::Status status = file->Open(info);
  if (!status.ok()) return status;
  return (files_[shard] = std::move(file)).get();
}

// Elements [begin, end) of the piece's tensor, which the piece has, into `target`.
absl::Status ShardReader::ReadPiece(size_t shard, const PieceInfo& piece, int64_t begin,
                                    int64_t end, const at::Tensor& target) {
  const auto width = static_cast<int64_t>(target.element_size());
  const int64_t chunk = kChunkBytes / width;
  const std::string what = absl::StrCat("tensor '", piece.tensor, "'");
  const bool in_place = target.is_cpu() && target.is_contiguous();
  for (int64_t first = (begin - piece.begin) / chunk; piece.begin + first * chunk < end; ++first) {
    const int64_t chunk_begin = piece.begin + first * chunk;
    const int64_t chunk_end = std::min(chunk_begin + chunk, piece.begin + piece.count);
    const int64_t from = std::max(begin, chunk_begin);
    const int64_t to = std::min(end, chunk_end);
    const at::Tensor part = target.slice(/*dim=*/0, from - begin, to - begin);
    const bool direct = in_place && from == chunk_begin && to == chunk_end;
    char* data = static_cast<char*>(direct ? part.mutable_data_ptr() : chunk_.mutable_data_ptr());
    const absl::StatusOr<File*> file = Open(shard);
    if (!file.ok()) return file.status();
    const absl::Status status =
        (*file)->Read(piece.position + (chunk_begin - piece.begin) * width, data,
                      (chunk_end - chunk_begin) * width, piece.checksums.at(first), what);
    if (!status.ok()) return status;
    if (!direct) {
      const at::Tensor values =
          chunk_.slice(/*dim=*/0, (from - chunk_begin) * width, (to - chunk_begin) * width);
      part.copy_(values.view(target.scalar_type()));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardReader::Read(const std::string& name, int64_t begin, const at::Tensor& target) {
  const at::NoGradGuard no_grad;
  // Elements of a tensor that is not contiguous are in another order than the file's.
  const bool is_flat = target.dim() == 1 || target.is_contiguous();
  const at::Tensor flat =
      is_flat ? target.view({-1}) : at::empty({target.numel()}, target.options());
  const int64_t end = begin + flat.numel();
  for (const auto& [shard, piece] : pieces_[name]) {
    const int64_t from = std::max(begin, piece->begin);
    const int64_t to = std::min(end, piece->begin + piece->count);
    if (from >= to) continue;
    const absl::Status status =
        ReadPiece(shard, *piece, from, to, flat.slice(/*dim=*/0, from - begin, to - begin));
    if (!status.ok()) return status;
  }
  if (!is_flat) target.copy_(flat.view(target.sizes()));
  return absl::OkStatus();
}

}  // namespace lockstep::parallel::checkpoint
