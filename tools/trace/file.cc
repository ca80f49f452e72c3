#include "lockstep/tools/trace/file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
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

absl::Status WriteFileAtomically(const std::string& path,
                                 const std::function<void(std::ostream&)>& write) {
  const std::string temporary = absl::StrCat(path, ".", ::getpid(), ".tmp");
  errno = 0;
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  if (!out) return Failure(path, errno);
  write(out);
  out.close();
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    std::remove(temporary.c_str());
    return Failure(path, error);
  }
  return absl::OkStatus();
}

}  // namespace lockstep::trace
