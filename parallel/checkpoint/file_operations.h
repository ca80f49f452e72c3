#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/status.h"

namespace lockstep::parallel::checkpoint {

// The calls that change what is on disk, so that tests can make each of them fail or be the last
// thing that a process does. Errors name the path, what was tried and why it failed: NOT_FOUND,
// PERMISSION_DENIED (also for a read-only disk), RESOURCE_EXHAUSTED (disk full, quota) or
// UNAVAILABLE.
enum class FileOperation { kCreate, kWrite, kSync, kRename, kRemove, kMakeFolder };

// Asked before each operation, with the path that it changes: 0 to go on, or the errno with which
// it is to fail. From any thread. For tests; an empty function takes it out.
using FileFault = std::function<int(FileOperation operation, const std::string& path)>;
void InjectFileFaults(FileFault fault);

// Makes a file to be written, empty; what was there is lost. A descriptor goes to `descriptor`.
absl::Status CreateFile(const std::string& path, int& descriptor);

// Writes all bytes at the file's end.
absl::Status WriteFile(const std::string& path, int descriptor, const void* data, size_t bytes);

// Returns when the file's bytes are on disk.
absl::Status SyncFile(const std::string& path, int descriptor);

// Returns when the names in a folder are on disk: those of files in it that were made, renamed or
// removed.
absl::Status SyncFolder(const std::string& path);

absl::Status Rename(const std::string& from, const std::string& to);

// A folder that is already there is no error.
absl::Status MakeFolder(const std::string& path);

// Removes a file, or a folder with all that is in it. Nothing there is no error.
absl::Status Remove(const std::string& path);

// "PATH: cannot ACTION it: REASON" for an errno.
absl::Status FileError(const std::string& path, const std::string& action, int error);

}  // namespace lockstep::parallel::checkpoint
