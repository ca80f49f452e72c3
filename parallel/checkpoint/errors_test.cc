// What goes wrong is named, on every rank, and the last good checkpoint stays whole.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/checkpoint/file_operations.h"
#include "lockstep/parallel/checkpoint/load.h"
#include "lockstep/parallel/checkpoint/testing/training.h"
#include "lockstep/parallel/none/none.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::MakeNets;
using testing::Training;
using testing::WholeState;

constexpr int kRanks = 3;

std::string NewFolder() {
  static int count = 0;
  const std::string path = absl::StrCat(::testing::TempDir(), "/errors", ++count);
  fs::remove_all(path);
  return path;
}

// Names in a folder but for that of the lock.
std::set<std::string> NamesIn(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  names.erase("lock");
  return names;
}

// Runs `body` on ranks that train under FSDP and save into `folder`.
void RunTraining(const std::string& folder, bool async,
                 const std::function<void(comm::Communicator&, Training&, Checkpointer&)>& body,
                 int ranks = kRanks, CheckpointerOptions options = {}) {
  const auto nets = MakeNets(ranks, /*seed=*/0);
  options.directory = folder;
  options.async = async;
  comm::testing::RunRanks(ranks, [&](comm::Communicator& comm) {
    Training training(comm, nets[comm.rank()], {.strategy = "fsdp"});
    auto checkpointer = ValueOrThrow(Checkpointer::Open(comm, options));
    body(comm, training, *checkpointer);
  });
}

absl::Status SaveAndFinish(Checkpointer& checkpointer, int64_t step, Training& training) {
  const absl::Status status = checkpointer.Save(step, training.state());
  const absl::Status finished = checkpointer.Finish();
  return status.ok() ? finished : status;
}

// Makes a folder with one checkpoint, of step 1.
std::string FolderWithCheckpoint() {
  const std::string folder = NewFolder();
  RunTraining(folder, /*async=*/false, [](auto&, Training& training, Checkpointer& checkpointer) {
    training.Step();
    ThrowIfError(checkpointer.Save(1, training.state()));
  });
  return folder;
}

// What all ranks get when they load the newest checkpoint in `folder`.
absl::Status LoadStatus(const std::string& folder) {
  absl::Status result;
  RunTraining(folder, /*async=*/false,
              [&](comm::Communicator& comm, Training& training, Checkpointer& checkpointer) {
                const auto loaded = checkpointer.LoadLatest(training.state());
                if (comm.rank() == 0) result = loaded.status();
                EXPECT_EQ(loaded.ok(), false);
              });
  return result;
}

void ExpectTold(const absl::Status& status, absl::StatusCode code,
                const std::vector<std::string>& told) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& text : told) {
    EXPECT_TRUE(absl::StrContains(std::string{status.message()}, text)) << text << " in " << status;
  }
}

void ChangeByte(const std::string& path, int64_t position) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(position);
  const char byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(position);
  file.put(byte);
}

TEST(LoadErrorsTest, NamesAMissingShard) {
  const std::string folder = FolderWithCheckpoint();
  const std::string shard = folder + "/step-000000000001/shard-00001.safetensors";
  fs::remove(shard);
  ExpectTold(LoadStatus(folder), absl::StatusCode::kNotFound, {shard, "is missing"});
}

TEST(LoadErrorsTest, NamesAShardThatIsCutOff) {
  const std::string folder = FolderWithCheckpoint();
  const std::string shard = folder + "/step-000000000001/shard-00002.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 1);
  ExpectTold(LoadStatus(folder), absl::StatusCode::kDataLoss, {shard, "were saved"});
}

TEST(LoadErrorsTest, NamesAChangedByteWhereverItIs) {
  const std::string folder = FolderWithCheckpoint();
  const std::string shard = folder + "/step-000000000001/shard-00001.safetensors";
  const auto bytes = static_cast<int64_t>(fs::file_size(shard));
  for (int64_t position = 0; position < bytes; position += 997) {
    ChangeByte(shard, position);
    ExpectTold(LoadStatus(folder), absl::StatusCode::kDataLoss, {shard, "checksum"});
    ChangeByte(shard, position);
  }
}

TEST(LoadErrorsTest, NamesAnIndexThatIsNotWhatWasSaved) {
  const std::string folder = FolderWithCheckpoint();
  const std::string index = folder + "/step-000000000001/index.json";
  const auto bytes = static_cast<int64_t>(fs::file_size(index));
  for (int64_t position = 0; position < bytes - 1; position += 499) {
    ChangeByte(index, position);
    ExpectTold(LoadStatus(folder), absl::StatusCode::kDataLoss, {index});
    ChangeByte(index, position);
  }
  fs::resize_file(index, bytes / 2);
  ExpectTold(LoadStatus(folder), absl::StatusCode::kDataLoss, {index});
}

// Loads the checkpoint into a state of one rank and says what went wrong.
absl::Status LoadInto(const std::string& folder, const std::shared_ptr<torch::nn::Module>& module,
                      bool with_optimizer = false, int generators = 0) {
  absl::Status status;
  comm::testing::RunRanks(1, [&](comm::Communicator& comm) {
    None none(module);
    std::optional<optim::FusedAdamW> optimizer;
    State state = {.strategy = &none};
    if (with_optimizer) {
      optimizer.emplace(none.named_parameters(), optim::FusedAdamWOptions{.amsgrad = true});
      state.optimizer = &*optimizer;
    }
    for (int i = 0; i < generators; ++i) {
      state.generators.push_back(at::detail::createCPUGenerator());
    }
    status = LoadCheckpoint(comm, folder + "/step-000000000001", state).status();
  });
  return status;
}

TEST(LoadErrorsTest, NamesWhatDiffersInAnotherModel) {
  const std::string folder = FolderWithCheckpoint();
  const auto invalid = absl::StatusCode::kInvalidArgument;
  parallel::testing::OddNet net(/*blocks=*/2);
  net->to(at::kDouble);
  EXPECT_TRUE(LoadInto(folder, net.ptr()).ok());

  ExpectTold(LoadInto(folder, net.ptr(), /*with_optimizer=*/true), invalid,
             {folder, "no tensor 'optimizer/max_exp_avg_sq/"});
  ExpectTold(LoadInto(folder, net.ptr(), /*with_optimizer=*/false, /*generators=*/2), invalid,
             {folder, "has 1 generators a rank, but 2"});
  net->to(at::kFloat);
  ExpectTold(LoadInto(folder, net.ptr()), invalid,
             {folder, "'model/in.weight' is Double [15, 17], but Float [15, 17]"});
  parallel::testing::OddNet more(/*blocks=*/3);
  more->to(at::kDouble);
  ExpectTold(LoadInto(folder, more.ptr()), invalid, {folder, "no tensor 'model/block2."});
  parallel::testing::OddNet less(/*blocks=*/1);
  less->to(at::kDouble);
  const at::Tensor before = less->in->weight.detach().clone();
  ExpectTold(LoadInto(folder, less.ptr()), invalid, {folder, "has a tensor 'model/block1."});
  EXPECT_TRUE(at::equal(before, less->in->weight)) << "changed by a load that failed";
  parallel::testing::OddNet wide(/*blocks=*/2);
  wide->to(at::kDouble);
  wide->offset.resize_({4});
  ExpectTold(LoadInto(folder, wide.ptr()), invalid,
             {folder, "'model/offset' is Double [3], but Double [4]"});
}

TEST(SaveErrorsTest, TwoJobsInOneFolder) {
  const std::string folder = NewFolder();
  RunTraining(folder, /*async=*/true, [&](comm::Communicator& comm, Training&, Checkpointer&) {
    const auto second = Checkpointer::Open(comm, {.directory = folder});
    ExpectTold(second.status(), absl::StatusCode::kFailedPrecondition,
               {folder, absl::StrCat("process ", getpid(), " on ")});
  });
  // The first has ended.
  RunTraining(folder, /*async=*/true, [](comm::Communicator&, Training&, Checkpointer&) {});
}

TEST(SaveErrorsTest, OptionsAndStates) {
  comm::testing::RunRanks(2, [](comm::Communicator& comm) {
    const auto told = [&](const CheckpointerOptions& options) {
      return std::string{Checkpointer::Open(comm, options).status().message()};
    };
    EXPECT_EQ(told({}), "rank 0: checkpoint: directory is empty");
    EXPECT_EQ(told({.directory = "x", .keep_last = 0}),
              "rank 0: checkpoint: keep_last is 0, below 1");
    EXPECT_EQ(told({.directory = "x", .keep_every = -1}),
              "rank 0: checkpoint: keep_every is -1, below 0");
    const auto nowhere = Checkpointer::Open(comm, {.directory = "/no/such/folder"});
    ExpectTold(nowhere.status(), absl::StatusCode::kNotFound, {"rank 0: /no/such/folder: "});
  });
  const std::string folder = NewFolder();
  RunTraining(folder, /*async=*/false, [](auto&, Training& training, Checkpointer& checkpointer) {
    ExpectTold(checkpointer.Save(-1, training.state()), absl::StatusCode::kInvalidArgument,
               {"step is -1"});
    State none;
    ExpectTold(checkpointer.Save(1, none), absl::StatusCode::kInvalidArgument, {"no strategy"});
    ThrowIfError(checkpointer.Save(1, training.state()));
    ExpectTold(checkpointer.LoadLatest(none).status(), absl::StatusCode::kInvalidArgument,
               {"no strategy"});
    State latin1 = training.state();
    latin1.notes["name"] = "\xe4";
    ExpectTold(checkpointer.Save(1, latin1), absl::StatusCode::kInvalidArgument, {"UTF-8"});
    EXPECT_EQ(ValueOrThrow(checkpointer.LoadLatest(training.state())), 1);
  });
}

// While it lives, permissions hold for this thread and those that it starts, also where root runs
// the test.
class BoundByPermissions {
 public:
  BoundByPermissions() {
    syscall(SYS_capget, &header_, before_);
    __user_cap_data_struct without[2] = {before_[0], before_[1]};
    without[0].effective &= ~(1U << CAP_DAC_OVERRIDE);
    EXPECT_EQ(syscall(SYS_capset, &header_, without), 0);
  }
  ~BoundByPermissions() { EXPECT_EQ(syscall(SYS_capset, &header_, before_), 0); }

 private:
  __user_cap_header_struct header_ = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct before_[2] = {};
};

constexpr fs::perms kReadOnly = fs::perms::owner_read | fs::perms::owner_exec;

TEST(SaveErrorsTest, ReadOnlyFolders) {
  const std::string parent = NewFolder();
  fs::create_directories(parent + "/made");
  for (const char* name : {"/made", ""}) fs::permissions(parent + name, kReadOnly);
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    const BoundByPermissions bound;
    for (const std::string& folder : {parent + "/made", parent + "/new"}) {
      ExpectTold(Checkpointer::Open(comm, {.directory = folder}).status(),
                 absl::StatusCode::kPermissionDenied, {"rank 0: " + folder, "Permission denied"});
    }
  });
  // It was writable when the training began.
  const std::string folder = FolderWithCheckpoint();
  for (const bool async : {false, true}) {
    RunTraining(folder, async,
                [&](comm::Communicator& comm, Training& training, Checkpointer& checkpointer) {
                  const auto set = [&](fs::perms perms) {
                    ThrowIfError(comm.Barrier().Wait());
                    if (comm.rank() == 0) fs::permissions(folder, perms);
                    ThrowIfError(comm.Barrier().Wait());
                  };
                  set(kReadOnly);
                  {
                    const BoundByPermissions bound;
                    ExpectTold(SaveAndFinish(checkpointer, 2, training),
                               absl::StatusCode::kPermissionDenied, {folder, "Permission denied"});
                  }
                  set(fs::perms::owner_all);
                  EXPECT_EQ(ValueOrThrow(checkpointer.LoadLatest(training.state())), 1);
                });
  }
}

// Every operation of a save on disk fails once, with the errors that disks have.
TEST(SaveErrorsTest, EveryOperationMayFail) {
  const std::vector<std::pair<int, absl::StatusCode>> errors = {
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EROFS, absl::StatusCode::kPermissionDenied},
      {EIO, absl::StatusCode::kUnavailable}};
  for (const bool async : {false, true}) {
    const std::string folder = FolderWithCheckpoint();
    WholeState before;
    WholeState after;
    WholeState loaded;
    std::mutex mutex;
    int next = 0;
    int operations = 0;
    const auto fail_at = [&](int which, int error) {
      next = 0;
      InjectFileFaults([&, which, error](FileOperation, const std::string&) {
        std::lock_guard lock(mutex);
        return next++ == which ? error : 0;
      });
    };
    RunTraining(folder, async,
                [&](comm::Communicator& comm, Training& training, Checkpointer& checkpointer) {
                  EXPECT_EQ(ValueOrThrow(checkpointer.LoadLatest(training.state())), 1);
                  for (int which = 0;; ++which) {
                    const auto& [error, code] = errors[which % errors.size()];
                    ThrowIfError(comm.Barrier().Wait());
                    if (comm.rank() == 0) fail_at(which, error);
                    ThrowIfError(comm.Barrier().Wait());
                    absl::Status status = checkpointer.Save(2, training.state());
                    if (async) {
                      EXPECT_TRUE(status.ok()) << "before anything was written: " << status;
                      status = checkpointer.Finish();
                    }
                    ThrowIfError(comm.Barrier().Wait());
                    if (comm.rank() == 0) operations = next;
                    ThrowIfError(comm.Barrier().Wait());
                    if (which >= operations) {
                      EXPECT_TRUE(status.ok()) << status;
                      break;
                    }
                    ExpectTold(status, code, {folder, std::strerror(error)});
                    EXPECT_TRUE(checkpointer.Finish().ok()) << "the same error twice";
                    const auto found = ValueOrThrow(checkpointer.LoadLatest(training.state()));
                    EXPECT_TRUE(found == 1 || found == 2) << which;
                  }
                },
                kRanks, {.keep_last = 1});
    InjectFileFaults(nullptr);
    EXPECT_GT(operations, 15);
    EXPECT_EQ(NamesIn(folder).size(), 1) << "leftovers";
  }
}

TEST(SaveTest, KeepsTheLastAndEveryNthForGood) {
  const std::string folder = NewFolder();
  RunTraining(folder, /*async=*/true,
              [&](comm::Communicator& comm, Training& training, Checkpointer& checkpointer) {
                for (const int step : {0, 5, 10, 15, 20, 25, 30, 35}) {
                  ThrowIfError(checkpointer.Save(step, training.state()));
                }
                ThrowIfError(checkpointer.Finish());
                ThrowIfError(comm.Barrier().Wait());
                const std::set<std::string> kept = {"step-000000000000", "step-000000000020",
                                                    "step-000000000030", "step-000000000035"};
                EXPECT_EQ(NamesIn(folder), kept);
                ThrowIfError(comm.Barrier().Wait());
                // A step saved again replaces what it was.
                ThrowIfError(SaveAndFinish(checkpointer, 35, training));
                ThrowIfError(comm.Barrier().Wait());
                const std::set<std::string> later = {"step-000000000000", "step-000000000020",
                                                     "step-000000000030", "step-000000000035-1"};
                EXPECT_EQ(NamesIn(folder), later);
                EXPECT_EQ(ValueOrThrow(checkpointer.LoadLatest(training.state())), 35);
              },
              kRanks, {.keep_last = 2, .keep_every = 20});
}

TEST(SaveTest, EachByteIsWrittenOnce) {
  const std::string folder = NewFolder();
  const auto nets = MakeNets(4, /*seed=*/0);
  comm::testing::RunRanks(4, [&](comm::Communicator& comm) {
    Training training(comm, nets[comm.rank()], {.strategy = "ddp"});
    auto checkpointer = ValueOrThrow(Checkpointer::Open(comm, {.directory = folder}));
    ThrowIfError(SaveAndFinish(*checkpointer, 1, training));
  });
  int64_t values = 0;
  for (const at::Tensor& parameter : nets[0]->parameters()) values += 3 * parameter.nbytes();
  int64_t bytes = 0;
  for (int rank = 0; rank < 4; ++rank) {
    bytes += static_cast<int64_t>(
        fs::file_size(absl::StrCat(folder, "/step-000000000001/shard-0000", rank, ".safetensors")));
  }
  const int64_t generators = 4 * 5056;
  EXPECT_GT(bytes, values + generators);
  EXPECT_LT(bytes, values + generators + 16'000) << "headers take more, or values are there twice";
}

// Running statistics differ on ranks that do not exchange them: those saved are rank 0's.
TEST(SaveTest, BuffersAreRankZeros) {
  const std::string folder = NewFolder();
  RunTraining(folder, /*async=*/false,
              [&](comm::Communicator& comm, Training& training, Checkpointer& checkpointer) {
                State& state = training.state();
                const auto buffer = [&] {
                  for (const StateShard& shard : state.strategy->StateShards()) {
                    if (shard.name == "offset") return shard.local;
                  }
                  return at::Tensor();
                };
                buffer().fill_(comm.rank() + 5);
                ThrowIfError(checkpointer.Save(1, state));
                ValueOrThrow(checkpointer.LoadLatest(state));
                EXPECT_EQ(buffer().min().item<double>(), 5);
                EXPECT_EQ(buffer().max().item<double>(), 5);
              });
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
