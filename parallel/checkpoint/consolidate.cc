#include "lockstep/parallel/checkpoint/consolidate.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/atomic_file.h"
#include "lockstep/parallel/checkpoint/folder.h"
#include "lockstep/parallel/checkpoint/safetensors_header.h"
#include "lockstep/parallel/checkpoint/shard_reader.h"
#include "lockstep/parallel/checkpoint/state.h"

namespace lockstep::parallel::checkpoint {
namespace {

// The folder of the checkpoint that is meant.
absl::StatusOr<std::string> FolderOf(const std::string& path) {
  const absl::StatusOr<std::vector<CheckpointFolder>> found = ListCheckpoints(path);
  if (!found.ok()) return found.status();
  return found->empty() ? path : found->back().path;
}

// Header entries of the model's tensors, in the order of a file.
std::vector<TensorEntry> EntriesOf(const Index& index) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, info] : index.tensors) {
    if (!absl::StartsWith(name, kModelPrefix)) continue;
    entries.push_back({name.substr(std::strlen(kModelPrefix)), info.dtype, info.sizes});
  }
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::make_tuple(TypeOrder(a.dtype), a.name) <
           std::make_tuple(TypeOrder(b.dtype), b.name);
  });
  uint64_t end = 0;
  for (TensorEntry& entry : entries) {
    const TensorInfo info = {entry.dtype, entry.shape};
    entry.begin = end;
    end += static_cast<uint64_t>(info.numel()) * c10::elementSize(entry.dtype);
    entry.end = end;
  }
  return entries;
}

absl::Status CopyValues(ShardReader& reader, const TensorEntry& entry, AtomicFile& file) {
  const std::string name = absl::StrCat(kModelPrefix, entry.name);
  const int64_t numel = TensorInfo{entry.dtype, entry.shape}.numel();
  const int64_t chunk = kChunkBytes / static_cast<int64_t>(c10::elementSize(entry.dtype));
  const at::Tensor buffer = at::empty({std::min(chunk, numel)}, entry.dtype);
  for (int64_t begin = 0; begin < numel; begin += chunk) {
    const at::Tensor part = buffer.slice(/*dim=*/0, 0, std::min(chunk, numel - begin));
    absl::Status status = reader.Read(name, begin, part);
    if (status.ok()) status = file.Write(part.const_data_ptr(), part.nbytes());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Consolidate(const std::string& checkpoint, const std::string& output) {
  const absl::StatusOr<std::string> folder = FolderOf(checkpoint);
  if (!folder.ok()) return folder.status();
  const absl::StatusOr<Index> index = ReadIndex(*folder);
  if (!index.ok()) return index.status();
  const std::vector<TensorEntry> entries = EntriesOf(*index);
  const absl::StatusOr<std::string> header = FormatHeader({.entries = entries, .metadata = {}});
  if (!header.ok()) return header.status();

  AtomicFile file(output);
  const uint64_t length = header->size();
  absl::Status status = file.Write(&length, sizeof(length));
  if (status.ok()) status = file.Write(header->data(), header->size());
  ShardReader reader(*folder, *index);
  for (const TensorEntry& entry : entries) {
    if (status.ok()) status = CopyValues(reader, entry, file);
  }
  return status.ok() ? file.Commit() : status;
}

}  // namespace lockstep::parallel::checkpoint
