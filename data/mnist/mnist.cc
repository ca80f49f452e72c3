#include "lockstep/data/mnist/mnist.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lockstep/data/mnist/idx.h"

namespace lockstep::data::mnist {
namespace {

constexpr int64_t kSide = 28;
constexpr int64_t kPixels = kSide * kSide;
constexpr int kClasses = 10;

// torch's uint8.float() / 255 for each byte, bit for bit.
constexpr std::array<float, 256> kBrightness = [] {
  std::array<float, 256> table = {};
  for (int byte = 0; byte < 256; ++byte) table[byte] = static_cast<float>(byte) / 255;
  return table;
}();

class Mnist : public Dataset {
 public:
  Mnist(std::string name, std::string images, std::string labels, bool as_bytes)
      : name_(std::move(name)),
        images_(std::move(images)),
        labels_(std::move(labels)),
        as_bytes_(as_bytes) {}

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }

  absl::Status ReadInto(absl::Span<const int64_t> rows, Batch& batch) override {
    if (absl::Status status = CheckRows(rows, size(), name_); !status.ok()) return status;
    const auto count = static_cast<int64_t>(rows.size());
    if (as_bytes_) {
      CopyImages(rows, batch.Reserve("images", {count, kSide, kSide}, at::kByte));
    } else {
      ConvertImages(rows, batch.Reserve("images", {count, 1, kSide, kSide}, at::kFloat));
    }
    int64_t* label = batch.Reserve("labels", {count}, at::kLong).mutable_data_ptr<int64_t>();
    for (int64_t row : rows) *label++ = labels_[row];
    return absl::OkStatus();
  }

 private:
  void CopyImages(absl::Span<const int64_t> rows, const at::Tensor& images) const {
    uint8_t* pixel = images.mutable_data_ptr<uint8_t>();
    for (int64_t row : rows) {
      pixel = std::copy_n(images_.begin() + row * kPixels, kPixels, pixel);
    }
  }

  void ConvertImages(absl::Span<const int64_t> rows, const at::Tensor& images) const {
    float* pixel = images.mutable_data_ptr<float>();
    for (int64_t row : rows) {
      const char* image = images_.data() + row * kPixels;
      for (int64_t i = 0; i < kPixels; ++i) *pixel++ = kBrightness[static_cast<uint8_t>(image[i])];
    }
  }

  const std::string name_;
  const std::string images_;
  const std::string labels_;
  const bool as_bytes_;
};

absl::StatusOr<std::string> FindFile(const Options& options, const std::string& stem,
                                     const std::string& kind) {
  std::vector<std::string> names;
  for (const char* suffix : {"", ".gz"}) {
    for (const char* separator : {"-", "."}) {
      names.push_back(absl::StrCat(stem, separator, kind, suffix));
      std::string path = absl::StrCat(options.directory, "/", names.back());
      std::error_code ignored;
      if (std::filesystem::exists(path, ignored)) return path;
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "mnist: no ", stem, "-", kind, ", with or without .gz, in '", options.directory, "'. ",
      options.directory == kDefaultDirectory
          ? "Install the Debian package dataset-fashion-mnist (tools/bazel does), or name the "
            "directory that holds the IDX files of MNIST or Fashion-MNIST (--data=DIR)."
          : "Name the directory that holds the IDX files of MNIST or Fashion-MNIST (--data=DIR)."));
}

absl::Status Check(const std::string& images_path, const IdxArray& images,
                   const std::string& labels_path, const IdxArray& labels) {
  if (images.sizes[1] != kSide || images.sizes[2] != kSide) {
    return absl::DataLossError(absl::StrCat(images_path, ": images are ", images.sizes[1], " x ",
                                            images.sizes[2], ", but those of MNIST are 28 x 28"));
  }
  if (images.sizes[0] != labels.sizes[0]) {
    return absl::DataLossError(absl::StrCat(
        "mnist: ", images_path, " holds ", images.sizes[0], " images, but ", labels_path, " holds ",
        labels.sizes[0], " labels: these files do not belong together"));
  }
  if (labels.sizes[0] == 0) {
    return absl::DataLossError(absl::StrCat(images_path, ": holds no image"));
  }
  for (size_t row = 0; row < labels.values.size(); ++row) {
    const int label = static_cast<uint8_t>(labels.values[row]);
    if (label >= kClasses) {
      return absl::DataLossError(absl::StrCat(labels_path, ": label ", row, " is ", label,
                                              ", but there are classes 0 to 9 only"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Dataset>> Open(const Options& options) {
  const std::string split = options.split == Split::kTrain ? "train" : "t10k";
  absl::StatusOr<std::string> images_path = FindFile(options, split + "-images", "idx3-ubyte");
  if (!images_path.ok()) return images_path.status();
  absl::StatusOr<std::string> labels_path = FindFile(options, split + "-labels", "idx1-ubyte");
  if (!labels_path.ok()) return labels_path.status();

  absl::StatusOr<IdxArray> images = ReadIdx(*images_path, /*dimensions=*/3);
  if (!images.ok()) return images.status();
  absl::StatusOr<IdxArray> labels = ReadIdx(*labels_path, /*dimensions=*/1);
  if (!labels.ok()) return labels.status();
  absl::Status status = Check(*images_path, *images, *labels_path, *labels);
  if (!status.ok()) return status;
  return std::make_unique<Mnist>(absl::StrCat("mnist ", split), std::move(images->values),
                                 std::move(labels->values), options.as_bytes);
}

}  // namespace lockstep::data::mnist
