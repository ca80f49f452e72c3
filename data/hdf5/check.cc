#include "lockstep/data/hdf5/check.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "lockstep/data/batch.h"
#include "lockstep/data/hdf5/shared.h"
#include "lockstep/data/hdf5/stream.h"
#include "lockstep/data/row_order.h"

extern char** environ;

namespace lockstep::data::hdf5 {
namespace {

// In the environment of the child: what to check. Fork alone would not do, as HDF5 and others may
// hold locks in threads that a forked child does not have, and MPI forbids it.
constexpr char kVariable[] = "LOCKSTEP_DATA_HDF5_CHECK";
constexpr char kSeparator = '\x1f';
constexpr int kResult = 3;  // descriptor on which the child says what it found
constexpr int64_t kRowsAtOnce = 256;

std::string Encode(const std::string& path, const Options& options) {
  std::vector<std::string> words = {path, absl::StrCat(options.memory_budget_bytes)};
  for (const Field& field : options.fields) {
    words.push_back(field.dataset);
    words.push_back(field.dtype ? absl::StrCat(static_cast<int>(*field.dtype)) : "");
    words.push_back(field.classes ? absl::StrCat(*field.classes) : "");
  }
  return absl::StrJoin(words, std::string(1, kSeparator));
}

absl::Status CheckHere(const std::string& encoded) {
  const std::vector<std::string> words = absl::StrSplit(encoded, kSeparator);
  Options options = {.fields = {}};
  options.files = {words[0]};
  (void)absl::SimpleAtoi(words[1], &options.memory_budget_bytes);
  for (size_t i = 2; i + 2 < words.size(); i += 3) {
    Field field = {.dataset = words[i], .name = absl::StrCat(i)};
    int dtype = 0;
    if (absl::SimpleAtoi(words[i + 1], &dtype)) field.dtype = static_cast<at::ScalarType>(dtype);
    int64_t classes = 0;
    if (absl::SimpleAtoi(words[i + 2], &classes)) field.classes = classes;
    options.fields.push_back(field);
  }
  absl::StatusOr<std::unique_ptr<Source>> source = Source::Open(options);
  if (!source.ok()) return source.status();
  absl::StatusOr<std::unique_ptr<Shared>> shared = Shared::Make(*std::move(source), options);
  if (!shared.ok()) return shared.status();
  const int64_t size = (*shared)->source().rows();
  const auto reader = MakeStream(**shared, RangeOrder({0, size}));
  Batch batch;
  for (int64_t row = 0; row < size; row += kRowsAtOnce) {
    absl::Status status = reader->ReadInto(kRowsAtOnce, batch);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Before main() of every program that links this, and of no consequence but in the child.
__attribute__((constructor)) void CheckIfAsked() {
  const char* encoded = std::getenv(kVariable);
  if (encoded == nullptr) return;
  absl::Status status;
  try {
    status = CheckHere(encoded);
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  const std::string result =
      absl::StrCat(static_cast<int>(status.code()), " ", std::string{status.message()});
  const bool written =
      write(kResult, result.data(), result.size()) == static_cast<ssize_t>(result.size());
  _exit(written ? 0 : 1);
}

struct Pipe {
  ~Pipe() {
    for (int end : ends) {
      if (end >= 0) close(end);
    }
  }
  void CloseWriting() { close(std::exchange(ends[1], -1)); }
  int ends[2] = {-1, -1};
};

absl::StatusOr<pid_t> Start(const std::string& variable, int result) {
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  std::string entry = variable;
  environment.push_back(entry.data());
  environment.push_back(nullptr);
  std::string name = "lockstep_hdf5_check";
  char* words[] = {name.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, result, kResult);
  // HDF5 and malloc may have something to say of a damaged file before they abort.
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = -1;
  const int error =
      posix_spawn(&child, "/proc/self/exe", &actions, nullptr, words, environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return absl::InternalError(
        absl::StrCat("hdf5: no child process to check a file: ", std::strerror(error)));
  }
  return child;
}

// What the child writes until it ends; nothing where it takes too long.
std::string ReadUntil(int descriptor, std::chrono::steady_clock::time_point deadline,
                      bool* in_time) {
  std::string text;
  *in_time = true;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd ready = {.fd = descriptor, .events = POLLIN, .revents = 0};
    const int count = left.count() > 0 ? poll(&ready, 1, static_cast<int>(left.count())) : 0;
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      *in_time = false;
      return text;
    }
    char buffer[4096];
    const ssize_t bytes = read(descriptor, buffer, sizeof(buffer));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) return text;
    text.append(buffer, bytes);
  }
}

}  // namespace

absl::Status CheckInChild(const std::string& path, const Options& options) {
  Pipe pipe;
  if (pipe2(pipe.ends, O_CLOEXEC) != 0) {
    return absl::InternalError(absl::StrCat("hdf5: no pipe: ", std::strerror(errno)));
  }
  // dup2 onto itself would leave it to be closed in the child.
  if (pipe.ends[1] == kResult) {
    pipe.ends[1] = fcntl(kResult, F_DUPFD_CLOEXEC, kResult + 1);
    close(kResult);
  }
  const absl::StatusOr<pid_t> child =
      Start(absl::StrCat(kVariable, "=", Encode(path, options)), pipe.ends[1]);
  if (!child.ok()) return child.status();
  pipe.CloseWriting();
  std::error_code ignored;
  const uintmax_t bytes = std::filesystem::file_size(path, ignored);
  const auto limit = std::chrono::seconds(60 + (ignored ? 0 : bytes >> 20));
  bool in_time = false;
  const std::string result =
      ReadUntil(pipe.ends[0], std::chrono::steady_clock::now() + limit, &in_time);
  if (!in_time) kill(*child, SIGKILL);
  int status = 0;
  while (waitpid(*child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!in_time) {
    return absl::DataLossError(absl::StrCat(path, ": is damaged: reading it took a child process ",
                                            "more than ", limit.count(), " s"));
  }
  int code = 0;
  const size_t space = result.find(' ');
  if (space == std::string::npos || !absl::SimpleAtoi(result.substr(0, space), &code)) {
    return absl::DataLossError(
        absl::StrCat(path, ": is damaged: reading it ended a child process",
                     WIFSIGNALED(status) ? absl::StrCat(" with signal ", WTERMSIG(status)) : "",
                     "; fetch the file again"));
  }
  return absl::Status(static_cast<absl::StatusCode>(code), result.substr(space + 1));
}

}  // namespace lockstep::data::hdf5
