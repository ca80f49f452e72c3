#include "lockstep/tutorials/common/run_main.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <errno.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lockstep/comm/launch/detect.h"
#include "lockstep/tools/malloc/keep_freed_memory.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/startup.h"

namespace lockstep::tutorials {
namespace {

// Taken before MPI_Init, which changes the variables that say it.
std::string RankPrefix() {
  static const auto* prefix = [] {
    const absl::StatusOr<launch::World> world = launch::Detect();
    return new std::string(world.ok() && world->size > 1 ? absl::StrCat("rank ", world->rank, ": ")
                                                         : "");
  }();
  return *prefix;
}

// c10d logs, with stack traces, the failures of sockets that comm returns as a Status: the error
// line says them better. TORCH_CPP_LOG_LEVEL brings LibTorch's log back.
void QuietLog() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
}

int exit_status_of_success = 0;

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

void SetExitStatus(int exit_status) { exit_status_of_success = exit_status; }

int ExitStatus() { return exit_status_of_success; }

void SetFlagsOrExit(int argc, char** argv, const Usage& usage) {
  QuietLog();
  RankPrefix();
  if (WantsHelp(argc, argv)) {
    std::cout << HelpText(program_invocation_short_name, usage) << std::flush;
    std::exit(0);
  }
  if (absl::Status status = SetFlags(argc, argv); !status.ok()) {
    PrintError(status);
    ExitAtOnce(2);
  }
}

void EnterUsersFolder() {
  // If that fails the program does what it would have done by itself.
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (folder != nullptr && chdir(folder) != 0) return;
}

absl::Status StatusOf(const std::function<absl::Status()>& body) {
  try {
    return body();
  } catch (const StatusError& error) {
    return error.status();
  } catch (const c10::Error& error) {
    return absl::InternalError(FirstLine(error.what_without_backtrace()));
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::exception& error) {
    return absl::InternalError(FirstLine(error.what()));
  }
}

void PrintError(const absl::Status& error) {
  std::cout.flush();
  std::fflush(stdout);
  const std::string message =
      error.message().empty() ? error.ToString() : std::string{error.message()};
  // One write, so that the lines of several ranks do not mix.
  const std::string line =
      absl::StrCat(program_invocation_short_name, ": ", RankPrefix(), message, "\n");
  std::fwrite(line.data(), /*size=*/1, line.size(), stderr);
}

void ExitAtOnce(int exit_status) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(exit_status);
}

int RunMain(int argc, char** argv, const Usage& usage, const std::function<absl::Status()>& body) {
  trace::EndStartupPhase("libraries");
  KeepFreedMemory();
  SetFlagsOrExit(argc, argv, usage);
  EnterUsersFolder();
  if (absl::Status status = StatusOf(body); !status.ok()) {
    PrintError(status);
    ExitAtOnce(1);
  }
  return ExitStatus();
}

}  // namespace lockstep::tutorials
