// Writes MNIST or Fashion-MNIST as a chunked HDF5 file, for data/hdf5 and h5py to stream.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lockstep/data/hdf5/writer.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/data/sampler.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/file.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/format.h"
#include "lockstep/tutorials/common/progress.h"
#include "lockstep/tutorials/common/run_main.h"

ABSL_FLAG(std::string, output, "", "HDF5 file to write");
ABSL_FLAG(bool, test_split, false, "take the 10,000 test images, not the training images");
ABSL_FLAG(lockstep::tutorials::Count, chunk_rows, 256, "images of a chunk");
ABSL_FLAG(uint32_t, gzip, 0, "compression, from 1 (fast) to 9 (small); 0: none");
ABSL_FLAG(bool, shuffle_filter, false, "lay together bytes of equal weight before compression");
ABSL_FLAG(bool, fletcher32, false, "store a checksum with each chunk");
ABSL_FLAG(lockstep::tutorials::Count, copies, 1, "write all images this many times");

namespace lockstep::tutorials {
namespace {

// The unfinished file, for the signal handler.
std::array<char, 4096> unfinished = {};

void RemoveUnfinished(int signal) {
  unlink(unfinished.data());
  // The disposition is the default again: the program ends as from the signal alone.
  raise(signal);
}

// After ^C and the like, nothing is left. After kill -9 the file is left under its temporary name.
void RemoveWhenInterrupted(const std::string& path) {
  if (path.size() >= unfinished.size()) return;
  std::copy(path.begin(), path.end(), unfinished.begin());
  struct sigaction action = {};
  action.sa_handler = RemoveUnfinished;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
}

absl::Status Create() {
  const std::string output = absl::GetFlag(FLAGS_output);
  if (output.empty()) return absl::InvalidArgumentError("name the file to write: --output=FILE.h5");
  const std::string path = ValueOrThrow(trace::OutputPath(output));
  const std::shared_ptr<data::Dataset> images = ValueOrThrow(
      data::mnist::Open({.directory = absl::GetFlag(FLAGS_data),
                         .split = absl::GetFlag(FLAGS_test_split) ? data::mnist::Split::kTest
                                                                  : data::mnist::Split::kTrain,
                         .as_bytes = true}));

  // STEP 1: an empty file. Labels are small, and lie in fewer chunks: whole groups of the images'.
  const int64_t copies = absl::GetFlag(FLAGS_copies);
  const int64_t chunk_rows = absl::GetFlag(FLAGS_chunk_rows);
  const int64_t groups = std::max<int64_t>(1, 4096 / chunk_rows);
  auto writer = ValueOrThrow(data::hdf5::Writer::Create(
      path, {.fields = {{.dataset = "images", .shape = {28, 28}, .chunk_rows = chunk_rows},
                        {.dataset = "labels", .chunk_rows = groups * chunk_rows}},
             .rows = images->size() * copies,
             .gzip = static_cast<int>(std::min<uint32_t>(absl::GetFlag(FLAGS_gzip), 10)),
             .shuffle = absl::GetFlag(FLAGS_shuffle_filter),
             .fletcher32 = absl::GetFlag(FLAGS_fletcher32),
             .attributes = {
                 {"title", "images of MNIST or Fashion-MNIST and their labels"},
                 {"images", "(rows, 28, 28) uint8, brightness from 0 to 255"},
                 {"labels", "(rows,) uint8, classes from 0 to 9"},
                 {"source", absl::GetFlag(FLAGS_data)},
                 {"split", absl::GetFlag(FLAGS_test_split) ? "test" : "train"},
                 {"copies", absl::StrCat(copies)},
             }}));
  RemoveWhenInterrupted(writer->temporary_path());

  // STEP 2: all images and labels, in order, as often as asked.
  data::Loader loader(images, data::SequentialSampler(images->size()), {.batch_size = 1000});
  {
    Progress progress("writing", loader.batches_per_epoch() * copies);
    for (int64_t copy = 0; copy < copies; ++copy) {
      for (const data::Batch& batch : loader) {
        ThrowIfError(writer->Append({batch["images"], batch["labels"].to(at::kByte)}));
        progress.Advance();
      }
    }
  }

  // STEP 3: only now does the file have its name.
  ThrowIfError(writer->Commit());
  absl::PrintF("%s: %s images, %s MiB\n", output, WithThousands(images->size() * copies),
               InMebibytes(static_cast<int64_t>(std::filesystem::file_size(path))));
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunMain(
      argc, argv,
      {.summary = "writes MNIST or Fashion-MNIST as a chunked HDF5 file.",
       .example = "bazel run //tutorials:create_mnist_h5 -- --output=train.h5 --gzip=4"},
      lockstep::tutorials::Create);
}
