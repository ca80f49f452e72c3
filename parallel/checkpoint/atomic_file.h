#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace lockstep::parallel::checkpoint {

// A file that appears under its name whole or not at all: written as PATH.tmp.PID, flushed to disk
// and renamed by Commit(). A link stays, and what it leads to is replaced; a folder or a device is
// refused. Destroyed without Commit(), it leaves nothing. After an error, all
// calls return it. Errors name the path.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  [[nodiscard]] absl::Status Write(const void* data, size_t bytes);
  [[nodiscard]] absl::Status Commit();

 private:
  absl::Status Named(const absl::Status& status) const;

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
  absl::Status status_;
};

}  // namespace lockstep::parallel::checkpoint
