#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace lockstep::parallel::checkpoint {

// Keeps a second job from saving into the same folder: a lock on the file "lock" in it, which the
// system gives back when the process ends, however it ends. It works across the nodes of a file
// system that has locks (NFS, Lustre mounted with flock, GPFS); on one that has none, nothing is
// locked.
class FolderLock {
 public:
  // FAILED_PRECONDITION, naming the process and host, where another one holds it. The folder must
  // exist.
  static absl::StatusOr<std::unique_ptr<FolderLock>> Take(const std::string& directory);

  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  explicit FolderLock(int descriptor) : descriptor_(descriptor) {}
  const int descriptor_;
};

}  // namespace lockstep::parallel::checkpoint
