#include "lockstep/tools/trace/file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace lockstep::trace {
namespace {

absl::Status Failure(const std::string& path, int error) {
  return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(error),
                                             "; check that the folder exists, is writable and has "
                                             "space"));
}

}  // namespace

std::optional<std::string> ReplaceablePath(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path target = path;
  if (fs::is_symlink(target, error)) target = fs::weakly_canonical(target, error);
  const fs::file_status there = fs::status(target, error);
  if (fs::exists(there) && !fs::is_regular_file(there)) return std::nullopt;
  return target.string();
}

absl::StatusOr<std::string> OutputPath(const std::string& path) {
  const std::optional<std::string> target = ReplaceablePath(path);
  if (!target) {
    return absl::UnavailableError(
        absl::StrCat("cannot write ", path, ": what is there is no regular file"));
  }
  const std::string parent = std::filesystem::path(*target).parent_path();
  if (::access(parent.empty() ? "." : parent.c_str(), W_OK) != 0) return Failure(path, errno);
  return *target;
}

absl::Status WriteFileAtomically(const std::string& path,
                                 const std::function<void(std::ostream&)>& write) {
  const absl::StatusOr<std::string> target = OutputPath(path);
  if (!target.ok()) return target.status();
  const std::string temporary = absl::StrCat(*target, ".", ::getpid(), ".tmp");
  errno = 0;
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  if (!out) return Failure(path, errno);
  write(out);
  out.close();
  if (!out || std::rename(temporary.c_str(), target->c_str()) != 0) {
    const int error = errno;
    std::remove(temporary.c_str());
    return Failure(path, error);
  }
  return absl::OkStatus();
}

}  // namespace lockstep::trace
