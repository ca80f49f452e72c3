#include "lockstep/parallel/checkpoint/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/tools/trace/file.h"

namespace lockstep::parallel::checkpoint {
namespace {

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::StatusCode::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::StatusCode::kResourceExhausted;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

// The new name is on disk only when the folder is.
bool SyncFolderOf(const std::string& path) {
  std::string folder = std::filesystem::path(path).parent_path();
  const int descriptor = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) return false;
  const bool good = fsync(descriptor) == 0;
  close(descriptor);
  return good;
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  const std::optional<std::string> target = trace::ReplaceablePath(path_);
  if (!target) {
    status_ = absl::FailedPreconditionError(
        absl::StrCat(path_, ": cannot replace it: it is no regular file"));
    return;
  }
  path_ = *target;
  temporary_ = absl::StrCat(path_, ".tmp.", getpid());
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) status_ = Fail("create");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

absl::Status AtomicFile::Write(const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (status_.ok() && bytes > 0) {
    const ssize_t written = write(descriptor_, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return status_ = Fail("write");
    next += written;
    bytes -= written;
  }
  return status_;
}

absl::Status AtomicFile::Commit() {
  if (!status_.ok()) return status_;
  if (fsync(descriptor_) != 0) return status_ = Fail("flush");
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return status_ = Fail("rename");
  close(std::exchange(descriptor_, -1));
  if (!SyncFolderOf(path_)) return status_ = Fail("flush the folder of");
  return absl::OkStatus();
}

absl::Status AtomicFile::Fail(const std::string& action) {
  const int error = errno;
  return absl::Status(CodeOf(error),
                      absl::StrCat(path_, ": cannot ", action, " it: ", std::strerror(error)));
}

}  // namespace lockstep::parallel::checkpoint
