// Streams an HDF5 file as peers/stream.py does, and prints one JSON line. README.md says what for.

#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "lockstep/data/chunk_shuffle_sampler.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/data/sampler.h"
#include "lockstep/models/classifier.h"
#include "lockstep/parallel/optim/fused_adamw.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/run_main.h"

ABSL_FLAG(std::string, file, "", "HDF5 file of images and labels, as create_mnist_h5 writes it");
ABSL_FLAG(std::string, how, "order",
          "order: rows as they are stored; shuffle: by chunks, in windows; full: any order of all "
          "rows; bytes: the file with read(2), and no HDF5; memory: the images of --data");
ABSL_FLAG(std::string, dtype, "float32", "of images: uint8, or float32 from 0 to 1");
ABSL_FLAG(lockstep::tutorials::Count, batch, 256, "rows of a batch");
ABSL_FLAG(lockstep::tutorials::Count, epochs, 1, "passes over the file");
ABSL_FLAG(uint64_t, batches, 0, "end after this many batches; 0: after all epochs");
ABSL_FLAG(lockstep::tutorials::Count, budget_mib, 256, "memory_budget_bytes, in MiB");
ABSL_FLAG(uint64_t, decode_threads, 0, "threads that decompress; 0: one a core, at most 4");
ABSL_FLAG(uint64_t, window_chunks, 0, "of shuffle; 0: what the budget allows");
ABSL_FLAG(uint64_t, prefetch, 2, "batches that another thread reads ahead; 0: none, and no thread");
ABSL_FLAG(bool, cold, false, "first make the system forget what it has read of the file");
ABSL_FLAG(std::string, train, "", "train this model (mlp, convnet, vit) on the batches");
ABSL_FLAG(bool, losses, false, "with --train: also print the loss of each batch");

namespace lockstep::bench {
namespace {

constexpr size_t kReadBytes = 1 << 20;
constexpr size_t kMemoryPoints = 20;

absl::Status Forget(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY);
  const bool good =
      file >= 0 && fdatasync(file) == 0 && posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0;
  const int error = errno;
  if (file >= 0) close(file);
  return good ? absl::OkStatus()
              : absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(error)));
}

double ResidentMib() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return static_cast<double>(resident * sysconf(_SC_PAGESIZE)) / (1 << 20);
}

double Seconds(absl::Duration time) { return absl::ToDoubleSeconds(time); }

nlohmann::json ReadBytes(const std::string& path) {
  std::vector<char> buffer(kReadBytes);
  const int file = open(path.c_str(), O_RDONLY);
  if (file < 0) throw StatusError(absl::NotFoundError(absl::StrCat(path, ": not there")));
  const absl::Duration begin = trace::SteadyNow();
  int64_t bytes = 0;
  for (int64_t epoch = 0; epoch < absl::GetFlag(FLAGS_epochs); ++epoch) {
    lseek(file, 0, SEEK_SET);
    for (ssize_t count; (count = read(file, buffer.data(), buffer.size())) > 0; bytes += count) {
    }
  }
  const double seconds = Seconds(trace::SteadyNow() - begin);
  close(file);
  return {{"bytes", bytes}, {"seconds", seconds}, {"bytes_per_s", bytes / seconds}};
}

// Trains where asked to; else takes a batch as it is.
class Consumer {
 public:
  Consumer() {
    if (absl::GetFlag(FLAGS_train).empty()) return;
    torch::manual_seed(0);
    model_ = ValueOrThrow(models::Create(absl::GetFlag(FLAGS_train)));
    std::vector<parallel::NamedTensor> parameters;
    for (const auto& parameter : model_.module->named_parameters()) {
      parameters.push_back({parameter.key(), parameter.value()});
    }
    optimizer_ = std::make_unique<parallel::optim::FusedAdamW>(parameters);
  }

  void operator()(const data::Batch& batch) {
    if (optimizer_ == nullptr) return;
    optimizer_->zero_grad();
    const at::Tensor loss =
        at::cross_entropy_loss(model_.forward(batch["images"]), batch["labels"]);
    loss.backward();
    optimizer_->step();
    losses.push_back(loss.item<double>());
  }

  std::vector<double> losses;

 private:
  models::Classifier model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

std::shared_ptr<const data::Sampler> MakeSampler(const data::Dataset& dataset) {
  const std::string how = absl::GetFlag(FLAGS_how);
  if (how == "order") return std::make_shared<data::SequentialSampler>(dataset.size());
  if (how == "full" || how == "memory") {
    return std::make_shared<data::DistributedSampler>(
        data::DistributedSamplerOptions{.size = dataset.size()});
  }
  if (how == "shuffle") {
    const auto window = static_cast<int64_t>(absl::GetFlag(FLAGS_window_chunks));
    return std::make_shared<data::ChunkShuffleSampler>(
        data::ChunkShuffleOptions{.chunks = dataset.chunks(),
                                  .window_chunks = window > 0 ? window : dataset.window_chunks()});
  }
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("there is no --how=", how, ": take order, shuffle, full, bytes or memory")));
}

data::hdf5::Options HdfOptions() {
  data::hdf5::Field images = {.dataset = "images", .shape = {1, 28, 28}};
  if (absl::GetFlag(FLAGS_dtype) == "float32") {
    images.dtype = at::kFloat;
    images.divide_by = 255;
  } else if (absl::GetFlag(FLAGS_dtype) != "uint8") {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(
        "there is no --dtype=", absl::GetFlag(FLAGS_dtype), ": take uint8 or float32")));
  }
  return {.files = {absl::GetFlag(FLAGS_file)},
          .fields = {images, {.dataset = "labels", .classes = 10}},
          .memory_budget_bytes = absl::GetFlag(FLAGS_budget_mib) << 20,
          .decode_threads = static_cast<int>(absl::GetFlag(FLAGS_decode_threads))};
}

nlohmann::json ReadBatches() {
  std::shared_ptr<data::Dataset> dataset;
  std::shared_ptr<data::hdf5::Hdf5Dataset> streamed;
  if (absl::GetFlag(FLAGS_how) == "memory") {
    dataset = ValueOrThrow(data::mnist::Open({.directory = absl::GetFlag(FLAGS_data)}));
  } else {
    dataset = streamed = ValueOrThrow(data::hdf5::Open(HdfOptions()));
  }
  data::Loader loader(dataset, MakeSampler(*dataset),
                      {.batch_size = absl::GetFlag(FLAGS_batch),
                       .drop_last = true,
                       .prefetch_batches = static_cast<int>(absl::GetFlag(FLAGS_prefetch))});
  const auto limit = static_cast<int64_t>(absl::GetFlag(FLAGS_batches));
  const int64_t batches =
      limit > 0 ? limit : loader.batches_per_epoch() * absl::GetFlag(FLAGS_epochs);
  Consumer consume;
  std::vector<double> resident;
  int64_t done = 0;
  const absl::Duration begin = trace::SteadyNow();
  while (done < batches) {
    for (const data::Batch& batch : loader) {
      consume(batch);
      ++done;
      if (done * kMemoryPoints / batches > resident.size()) resident.push_back(ResidentMib());
      if (done == batches) break;
    }
  }
  const double seconds = Seconds(trace::SteadyNow() - begin);
  const data::LoaderStats stats = loader.stats();
  const int64_t row_bytes = absl::GetFlag(FLAGS_dtype) == "uint8" ? 784 : 4 * 784;
  nlohmann::json report = {
      {"samples", stats.rows},
      {"seconds", seconds},
      {"samples_per_s", stats.rows / seconds},
      {"bytes_per_s", stats.rows * row_bytes / seconds},
      {"loop_waited_share", Seconds(stats.waited) / seconds},
      {"resident_mib", resident},
  };
  if (streamed != nullptr) {
    const data::hdf5::Stats read = streamed->stats();
    report["window_chunks"] = streamed->window_chunks();
    report["chunks"] = streamed->chunks().size();
    report["chunks_read"] = read.chunks_read;
    report["bytes_read"] = read.bytes_read;
    report["budget_peak_mib"] = static_cast<double>(read.peak_memory_bytes) / (1 << 20);
    report["reading_s"] = Seconds(read.reading);
    report["decoding_s"] = Seconds(read.decoding);
    report["waited_for_memory_s"] = Seconds(read.waited_for_memory);
    report["waited_for_chunks_s"] = Seconds(read.waited_for_chunks);
  }
  if (absl::GetFlag(FLAGS_losses)) report["losses"] = consume.losses;
  return report;
}

absl::Status Stream() {
  at::set_num_threads(1);
  // Else activations go back to the system at each step, to be zeroed at the next, unless a larger
  // block was freed before them: reading MNIST into memory does that, and streaming does not.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const std::string path = absl::GetFlag(FLAGS_file);
  if (absl::GetFlag(FLAGS_cold)) {
    if (absl::Status status = Forget(path); !status.ok()) return status;
  }
  nlohmann::json report = absl::GetFlag(FLAGS_how) == "bytes" ? ReadBytes(path) : ReadBatches();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  report["how"] = absl::GetFlag(FLAGS_how);
  report["peak_rss_mib"] = usage.ru_maxrss / 1024;
  absl::PrintF("%s\n", report.dump());
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  return lockstep::tutorials::RunMain(
      argc, argv,
      {.summary = "streams an HDF5 file, and prints one JSON line.",
       .example = "bazel run //tools/bench:stream -- --file=/tmp/train.h5 --how=shuffle"},
      lockstep::bench::Stream);
}
