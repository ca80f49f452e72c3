#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data::mnist {

// Where Debian's package dataset-fashion-mnist puts its files.
inline constexpr char kDefaultDirectory[] = "/usr/share/datasets/fashion-mnist";

enum class Split {
  kTrain,  // 60,000 images in MNIST and Fashion-MNIST
  kTest,   // 10,000
};

struct Options {
  std::string directory = kDefaultDirectory;  // Holds the IDX files. Default: kDefaultDirectory.
  Split split = Split::kTrain;                // Default: kTrain.
  bool as_bytes = false;  // Images as the files hold them: (rows, 28, 28) uint8. Default: false.
};

// MNIST or Fashion-MNIST, in memory (one byte a pixel: 47 MB for the training images).
//
//   auto dataset = lockstep::ValueOrThrow(data::mnist::Open({.split = data::mnist::Split::kTest}));
//   data::Batch batch;
//   lockstep::ThrowIfError(dataset->ReadInto({0, 1, 2}, batch));
//   batch["images"];  // (3, 1, 28, 28) float32 in [0, 1]: the byte divided by 255
//   batch["labels"];  // (3,) int64 in [0, 10)
//
// Reads {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, or the same names with
// ".idx" in the place of "-idx", plain or as .gz; plain ones are preferred. The format is that of
// http://yann.lecun.com/exdb/mnist/. Reads are thread-safe.
//
// NOT_FOUND where a file is missing; DATA_LOSS, with the file's name, for one that cannot be read,
// is cut off, goes on after its end, is no IDX file of bytes or no gzip file, for images that are
// not 28 x 28, a label above 9, and counts of images and labels that disagree.
absl::StatusOr<std::unique_ptr<Dataset>> Open(const Options& options);

}  // namespace lockstep::data::mnist
