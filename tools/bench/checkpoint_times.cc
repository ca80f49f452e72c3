// Times checkpoints beside bare files of the same bytes, and prints one line of JSON. What
// checkpoints.py runs.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <fcntl.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "lockstep/parallel/checkpoint/checkpointer.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/parallel/unit.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/world.h"

using lockstep::tutorials::Count;

ABSL_FLAG(std::string, folder, "", "where to write; what is there of an earlier run is removed");
ABSL_FLAG(Count, layers, 32, "of the model: 1024 x 1024 weights each, 12 MiB with AdamW's state");
ABSL_FLAG(Count, samples, 3, "times that each is timed");

namespace lockstep::bench {
namespace {

using parallel::checkpoint::Checkpointer;
using parallel::checkpoint::State;

constexpr int64_t kWidth = 1024;
constexpr size_t kPieceBytes = 1 << 20;  // of a write or read

class ModelImpl : public torch::nn::Module {
 public:
  explicit ModelImpl(int64_t layers) {
    for (int64_t i = 0; i < layers; ++i) {
      layers_.push_back(register_module(absl::StrCat("layer", i),
                                        parallel::Unit<torch::nn::LinearImpl>(
                                            torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers_) x = layer(x);
    return x;
  }

 private:
  std::vector<parallel::Unit<torch::nn::LinearImpl>> layers_;
};
using Model = parallel::Unit<ModelImpl>;

void Expect(bool good, const std::string& what) {
  if (!good) throw StatusError(absl::UnavailableError(absl::StrCat(what, std::strerror(errno))));
}

void WritePlainly(const std::string& path, const at::Tensor& bytes) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  Expect(file >= 0, path + ": ");
  const char* data = static_cast<const char*>(bytes.const_data_ptr());
  for (size_t done = 0; done < bytes.nbytes(); done += kPieceBytes) {
    const size_t count = std::min(kPieceBytes, bytes.nbytes() - done);
    Expect(write(file, data + done, count) == static_cast<ssize_t>(count), path + ": ");
  }
  Expect(fsync(file) == 0, path + ": ");
  close(file);
}

void ReadPlainly(const std::string& path, const at::Tensor& bytes) {
  const int file = open(path.c_str(), O_RDONLY);
  Expect(file >= 0, path + ": ");
  char* data = static_cast<char*>(bytes.mutable_data_ptr());
  for (size_t done = 0; done < bytes.nbytes(); done += kPieceBytes) {
    const size_t count = std::min(kPieceBytes, bytes.nbytes() - done);
    Expect(read(file, data + done, count) == static_cast<ssize_t>(count), path + ": ");
  }
  close(file);
}

// What this rank keeps of the state, tensor by tensor.
void CopyPlainly(const std::vector<at::Tensor>& kept, const at::Tensor& copy) {
  char* to = static_cast<char*>(copy.mutable_data_ptr());
  for (const at::Tensor& tensor : kept) {
    std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
    to += tensor.nbytes();
  }
}

// Files below `folder` are read from the disk the next time.
void ForgetFiles(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int file = open(entry.path().c_str(), O_RDONLY);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
  }
}

// Seconds of each call, on the slowest rank.
class Stopwatch {
 public:
  explicit Stopwatch(comm::Communicator& comm) : comm_(comm) {}

  void Time(const std::string& what, const std::function<void()>& act) {
    ThrowIfError(comm_.Barrier().Wait());
    const absl::Duration start = trace::SteadyNow();
    act();
    const at::Tensor seconds =
        at::full({1}, absl::ToDoubleSeconds(trace::SteadyNow() - start), at::kDouble);
    ThrowIfError(comm_.AllReduce(seconds, comm::ReduceOp::kMax).Wait());
    times_[what].push_back(seconds.item<double>());
  }

  const std::map<std::string, std::vector<double>>& times() const { return times_; }

 private:
  comm::Communicator& comm_;
  std::map<std::string, std::vector<double>> times_;
};

absl::Status Run(comm::Communicator& comm) {
  const std::string folder = absl::GetFlag(FLAGS_folder);
  if (folder.empty()) return absl::InvalidArgumentError("give a folder: --folder=DIR");
  if (comm.rank() == 0) {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
  }
  ThrowIfError(comm.Barrier().Wait());
  Model model(absl::GetFlag(FLAGS_layers));
  auto strategy = ValueOrThrow(parallel::MakeStrategy("fsdp", model.ptr(), &comm));
  parallel::optim::FusedAdamW optimizer(strategy->named_parameters());
  State state = {.strategy = strategy.get(), .optimizer = &optimizer};
  const int64_t shard_bytes = 3 * 4 * absl::GetFlag(FLAGS_layers) * kWidth * kWidth / comm.size();
  const at::Tensor bytes = at::ones({shard_bytes}, at::kByte);
  const at::Tensor copy = at::ones({shard_bytes}, at::kByte);
  std::vector<at::Tensor> kept;
  for (const auto& shard : strategy->StateShards()) kept.push_back(shard.local);
  for (const auto& each : optimizer.StateDict()) {
    if (each.value.dim() > 0) kept.push_back(each.value);  // not the counts of steps
  }
  const std::string plain = absl::StrCat(folder, "/plain", comm.rank());
  auto sync = ValueOrThrow(
      Checkpointer::Open(comm, {.directory = folder + "/sync", .keep_last = 1, .async = false}));
  auto async =
      ValueOrThrow(Checkpointer::Open(comm, {.directory = folder + "/async", .keep_last = 1}));

  Stopwatch stopwatch(comm);
  const auto forget = [&] {
    ThrowIfError(comm.Barrier().Wait());
    ForgetFiles(folder);
    ThrowIfError(comm.Barrier().Wait());
  };
  for (int64_t sample = 0; sample < absl::GetFlag(FLAGS_samples); ++sample) {
    stopwatch.Time("write", [&] { WritePlainly(plain, bytes); });
    stopwatch.Time("save", [&] { ThrowIfError(sync->Save(sample, state)); });
    stopwatch.Time("stall", [&] { ThrowIfError(async->Save(sample, state)); });
    ThrowIfError(async->Finish());
    stopwatch.Time("copy", [&] { CopyPlainly(kept, copy); });
    for (const char* how : {"", ", cold"}) {
      const bool cold = how[0] != '\0';
      if (cold) forget();
      stopwatch.Time(absl::StrCat("read", how), [&] { ReadPlainly(plain, copy); });
      if (cold) forget();
      stopwatch.Time(absl::StrCat("load", how), [&] { ValueOrThrow(sync->LoadLatest(state)); });
    }
  }
  if (comm.rank() == 0) {
    const nlohmann::json report = {
        {"ranks", comm.size()}, {"bytes", shard_bytes * comm.size()}, {"times", stopwatch.times()}};
    std::cout << report << std::endl;
    std::filesystem::remove_all(folder);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "times saving and loading checkpoints, and bare files; prints JSON.",
       .example = "bazel run //tools/bench:checkpoints"},
      lockstep::bench::Run, {.default_ranks = 2});
}
