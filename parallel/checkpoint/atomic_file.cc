#include "lockstep/parallel/checkpoint/atomic_file.h"

#include <unistd.h>

#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "lockstep/parallel/checkpoint/file_operations.h"
#include "lockstep/tools/trace/file.h"

namespace lockstep::parallel::checkpoint {

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  const std::optional<std::string> target = trace::ReplaceablePath(path_);
  if (!target) {
    status_ = absl::FailedPreconditionError(
        absl::StrCat(path_, ": cannot replace it: it is no regular file"));
    return;
  }
  path_ = *target;
  temporary_ = absl::StrCat(path_, ".tmp.", getpid());
  status_ = Named(CreateFile(temporary_, descriptor_));
}

// With the name that the caller knows in the place of the temporary one.
absl::Status AtomicFile::Named(const absl::Status& status) const {
  return absl::Status(status.code(),
                      absl::StrReplaceAll(std::string{status.message()}, {{temporary_, path_}}));
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

absl::Status AtomicFile::Write(const void* data, size_t bytes) {
  if (status_.ok()) status_ = Named(WriteFile(temporary_, descriptor_, data, bytes));
  return status_;
}

absl::Status AtomicFile::Commit() {
  if (status_.ok()) status_ = Named(SyncFile(temporary_, descriptor_));
  if (status_.ok()) status_ = Rename(temporary_, path_);
  if (!status_.ok()) return status_;
  close(std::exchange(descriptor_, -1));
  // The new name is on disk only when the folder is.
  const std::string folder = std::filesystem::path(path_).parent_path();
  return status_ = SyncFolder(folder.empty() ? "." : folder);
}

}  // namespace lockstep::parallel::checkpoint
