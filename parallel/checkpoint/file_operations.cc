#include "lockstep/parallel/checkpoint/file_operations.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"

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

struct Injected {
  std::mutex mutex;
  std::shared_ptr<const FileFault> fault;
};

Injected& TheInjected() {
  static auto& injected = *new Injected;
  return injected;
}

// Whether `operation` may go on; else errno is set.
bool MayGoOn(FileOperation operation, const std::string& path) {
  std::shared_ptr<const FileFault> fault;
  {
    std::lock_guard lock(TheInjected().mutex);
    fault = TheInjected().fault;
  }
  const int error = fault == nullptr ? 0 : (*fault)(operation, path);
  if (error != 0) errno = error;
  return error == 0;
}

// A remove_all that asks before each file, as any of them may be the last one.
bool RemoveTree(const std::string& path) {
  struct stat there;
  if (lstat(path.c_str(), &there) != 0) return errno == ENOENT;
  if (S_ISDIR(there.st_mode)) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
      if (!RemoveTree(entry.path())) return false;
    }
    if (error) {
      errno = error.value();
      return false;
    }
  }
  if (!MayGoOn(FileOperation::kRemove, path)) return false;
  return (S_ISDIR(there.st_mode) ? rmdir(path.c_str()) : unlink(path.c_str())) == 0;
}

}  // namespace

void InjectFileFaults(FileFault fault) {
  std::lock_guard lock(TheInjected().mutex);
  TheInjected().fault = fault ? std::make_shared<const FileFault>(std::move(fault)) : nullptr;
}

absl::Status FileError(const std::string& path, const std::string& action, int error) {
  return absl::Status(CodeOf(error),
                      absl::StrCat(path, ": cannot ", action, " it: ", std::strerror(error)));
}

absl::Status CreateFile(const std::string& path, int& descriptor) {
  descriptor = MayGoOn(FileOperation::kCreate, path)
                   ? open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)
                   : -1;
  return descriptor < 0 ? FileError(path, "create", errno) : absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, int descriptor, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written =
        MayGoOn(FileOperation::kWrite, path) ? write(descriptor, next, bytes) : -1;
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(path, "write", errno);
    next += written;
    bytes -= written;
  }
  return absl::OkStatus();
}

absl::Status SyncFile(const std::string& path, int descriptor) {
  if (MayGoOn(FileOperation::kSync, path) && fsync(descriptor) == 0) return absl::OkStatus();
  return FileError(path, "flush", errno);
}

absl::Status SyncFolder(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return FileError(path, "flush", errno);
  absl::Status status = SyncFile(path, descriptor);
  close(descriptor);
  return status;
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (MayGoOn(FileOperation::kRename, to) && std::rename(from.c_str(), to.c_str()) == 0) {
    return absl::OkStatus();
  }
  return FileError(to, absl::StrCat("rename ", from, " to"), errno);
}

absl::Status MakeFolder(const std::string& path) {
  if (MayGoOn(FileOperation::kMakeFolder, path)) {
    if (mkdir(path.c_str(), 0777) == 0) return absl::OkStatus();
    const int error = errno;
    std::error_code ignored;
    if (error == EEXIST && std::filesystem::is_directory(path, ignored)) return absl::OkStatus();
    errno = error;
  }
  return FileError(path, "make", errno);
}

absl::Status Remove(const std::string& path) {
  return RemoveTree(path) ? absl::OkStatus() : FileError(path, "remove", errno);
}

}  // namespace lockstep::parallel::checkpoint
