#include "lockstep/parallel/checkpoint/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/file_operations.h"

namespace lockstep::parallel::checkpoint {
namespace {

// For the message that another job gets.
std::string WhoAmI() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const char* job = std::getenv("SLURM_JOB_ID");
  return absl::StrCat("process ", getpid(), " on ", host.data(),
                      job == nullptr ? "" : absl::StrCat(", Slurm job ", job));
}

std::string TextOf(int descriptor) {
  std::array<char, 512> text{};
  const ssize_t bytes = pread(descriptor, text.data(), text.size(), /*offset=*/0);
  return bytes <= 0 ? "another process" : std::string(text.data(), bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Take(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/lock");
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) return FileError(path, "create", errno);
  std::unique_ptr<FolderLock> lock(new FolderLock(descriptor));
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return absl::FailedPreconditionError(
          absl::StrCat(directory, ": ", TextOf(descriptor),
                       " saves checkpoints into this folder: end it, or take another folder"));
    }
    if (errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP) {
      return FileError(path, "lock", errno);
    }
  }
  const std::string text = WhoAmI();
  if (ftruncate(descriptor, 0) != 0 ||
      pwrite(descriptor, text.data(), text.size(), /*offset=*/0) < 0) {
    return FileError(path, "write", errno);
  }
  return lock;
}

FolderLock::~FolderLock() { close(descriptor_); }

}  // namespace lockstep::parallel::checkpoint
