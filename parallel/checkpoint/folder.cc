#include "lockstep/parallel/checkpoint/folder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lockstep/parallel/checkpoint/atomic_file.h"
#include "lockstep/parallel/checkpoint/file_operations.h"

namespace lockstep::parallel::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kStepPrefix[] = "step-";
constexpr char kPartial[] = ".partial";
constexpr char kRemoved[] = ".removed";

std::string StepName(int64_t step, int again) {
  const std::string name = absl::StrFormat("%s%012d", kStepPrefix, step);
  return again == 0 ? name : absl::StrCat(name, "-", again);
}

std::string PartialPath(const std::string& directory, int64_t step) {
  return absl::StrCat(directory, "/", StepName(step, /*again=*/0), kPartial);
}

// Step and repetition of a checkpoint's name; nothing for any other.
std::optional<std::pair<int64_t, int>> ParseName(const std::string& name) {
  if (!absl::StartsWith(name, kStepPrefix)) return std::nullopt;
  const std::string numbers = name.substr(std::strlen(kStepPrefix));
  const size_t dash = numbers.find('-');
  int64_t step = 0;
  int again = 0;
  if (!absl::SimpleAtoi(numbers.substr(0, dash), &step)) return std::nullopt;
  if (dash != std::string::npos && !absl::SimpleAtoi(numbers.substr(dash + 1), &again)) {
    return std::nullopt;
  }
  if (StepName(step, again) != name) return std::nullopt;
  return std::make_pair(step, again);
}

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    names.push_back(entry.path().filename());
  }
  if (error) return FileError(directory, "list", error.value());
  return names;
}

absl::Status RemoveLeftovers(const std::string& directory) {
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(directory);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const bool is_left = absl::StartsWith(name, kStepPrefix) &&
                         (absl::EndsWith(name, kPartial) || absl::EndsWith(name, kRemoved));
    if (!is_left) continue;
    const absl::Status status = Remove(absl::StrCat(directory, "/", name));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<CheckpointFolder>> ListCheckpoints(const std::string& directory) {
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(directory);
  if (!names.ok()) return names.status();
  std::vector<CheckpointFolder> found;
  for (const std::string& name : *names) {
    const auto parsed = ParseName(name);
    const std::string path = absl::StrCat(directory, "/", name);
    std::error_code error;
    if (parsed && fs::exists(absl::StrCat(path, "/", kIndexFile), error)) {
      found.push_back({parsed->first, parsed->second, path});
    }
  }
  std::sort(found.begin(), found.end(), [](const CheckpointFolder& a, const CheckpointFolder& b) {
    return std::pair(a.step, a.again) < std::pair(b.step, b.again);
  });
  return found;
}

absl::StatusOr<std::string> BeginCheckpoint(const std::string& directory, int64_t step) {
  const std::string path = PartialPath(directory, step);
  absl::Status status = RemoveLeftovers(directory);
  if (status.ok()) status = MakeFolder(path);
  if (!status.ok()) return status;
  return path;
}

absl::StatusOr<std::string> CommitCheckpoint(const std::string& directory, const Index& index) {
  const std::string partial = PartialPath(directory, index.step);
  const absl::StatusOr<std::string> text = FormatIndex(index);
  if (!text.ok()) return text.status();
  {
    AtomicFile file(absl::StrCat(partial, "/", kIndexFile));
    absl::Status status = file.Write(text->data(), text->size());
    if (status.ok()) status = file.Commit();  // flushes the folder too, and so the shards' names
    if (!status.ok()) return status;
  }
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(directory);
  if (!names.ok()) return names.status();
  int again = 0;
  for (const std::string& name : *names) {
    const auto parsed = ParseName(name);
    if (parsed && parsed->first == index.step) again = std::max(again, parsed->second + 1);
  }
  const std::string path = absl::StrCat(directory, "/", StepName(index.step, again));
  absl::Status status = Rename(partial, path);
  if (status.ok()) status = SyncFolder(directory);
  if (!status.ok()) return status;
  return path;
}

absl::Status RemoveOldCheckpoints(const std::string& directory, int keep_last, int64_t keep_every) {
  const absl::StatusOr<std::vector<CheckpointFolder>> found = ListCheckpoints(directory);
  if (!found.ok()) return found.status();
  int kept = 0;
  std::optional<int64_t> newer_step;
  for (auto each = found->rbegin(); each != found->rend(); ++each) {
    const bool is_superseded = newer_step == each->step;
    newer_step = each->step;
    if (!is_superseded && kept < keep_last) {
      ++kept;
      continue;
    }
    if (!is_superseded && keep_every > 0 && each->step % keep_every == 0) continue;
    // A name that no reader takes for a checkpoint comes first.
    const std::string removed = absl::StrCat(each->path, kRemoved);
    absl::Status status = Rename(each->path, removed);
    if (status.ok()) status = Remove(removed);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string ShardName(int rank) { return absl::StrFormat("shard-%05d.safetensors", rank); }

absl::StatusOr<Index> ReadIndex(const std::string& path) {
  const std::string file = absl::StrCat(path, "/", kIndexFile);
  errno = 0;
  std::ifstream stream(file, std::ios::binary);
  if (!stream) {
    const int error = errno == 0 ? EIO : errno;
    if (error != ENOENT) return FileError(file, "read", error);
    return absl::NotFoundError(absl::StrCat(path, ": is no checkpoint: it has no ", kIndexFile));
  }
  std::ostringstream text;
  text << stream.rdbuf();
  absl::StatusOr<Index> index = ParseIndex(text.str());
  if (index.ok()) return index;
  return absl::Status(index.status().code(),
                      absl::StrCat(file, ": ", std::string{index.status().message()}));
}

}  // namespace lockstep::parallel::checkpoint
