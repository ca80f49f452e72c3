// Resumes a training in FOLDER, makes one step and saves it; dies at the Nth operation on disk.
//
//   crash_test_program FOLDER N sync|async
//
// It dies as in a power failure: of files that were not flushed, nothing is left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/file_operations.h"
#include "lockstep/parallel/checkpoint/testing/training.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

constexpr int kRanks = 3;

void DieAt(int last) {
  static std::mutex mutex;
  static int count = 0;
  static auto& unflushed = *new std::map<std::string, int>;  // descriptors, which renames leave be
  InjectFileFaults([last](FileOperation operation, const std::string& path) {
    std::lock_guard lock(mutex);
    if (count++ == last) {
      for (const auto& [name, descriptor] : unflushed) {
        if (ftruncate(descriptor, 0) != 0) _exit(3);
      }
      raise(SIGKILL);
    }
    if (operation == FileOperation::kWrite && unflushed.count(path) == 0) {
      unflushed[path] = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    }
    if (operation == FileOperation::kSync) unflushed.erase(path);
    return 0;
  });
}

int Run(const std::string& folder, int last, bool async) {
  const auto nets = testing::MakeNets(kRanks, /*seed=*/0);
  comm::testing::RunRanks(kRanks, [&](comm::Communicator& comm) {
    testing::Training training(comm, nets[comm.rank()], {.strategy = "fsdp"});
    auto checkpointer = ValueOrThrow(
        Checkpointer::Open(comm, {.directory = folder, .keep_last = 2, .async = async}));
    const int64_t step = ValueOrThrow(checkpointer->LoadLatest(training.state())).value_or(0);
    if (step > 0) training.Seek();
    ThrowIfError(comm.Barrier().Wait());
    if (comm.rank() == 0) DieAt(last);
    ThrowIfError(comm.Barrier().Wait());
    training.Step();
    ThrowIfError(checkpointer->Save(step + 1, training.state()));
    ThrowIfError(checkpointer->Finish());
  });
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return lockstep::parallel::checkpoint::Run(argv[1], std::atoi(argv[2]),
                                             std::string(argv[3]) == "async");
}
