#include "lockstep/data/synthetic/synthetic.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lockstep/data/random.h"

namespace lockstep::data::synthetic {
namespace {

class Synthetic : public Dataset {
 public:
  explicit Synthetic(const Options& options) : options_(options) {
    for (int64_t size : options_.shape) elements_ *= size;
  }

  int64_t size() const override { return options_.size; }

  std::vector<RowRange> chunks() const override {
    std::vector<RowRange> chunks;
    if (options_.rows_per_chunk == 0) return chunks;
    for (int64_t begin = 0; begin < options_.size; begin += options_.rows_per_chunk) {
      chunks.push_back({begin, std::min(begin + options_.rows_per_chunk, options_.size)});
    }
    return chunks;
  }

  absl::Status ReadInto(absl::Span<const int64_t> rows, Batch& batch) override {
    if (absl::Status status = CheckRows(rows, size(), "synthetic"); !status.ok()) return status;
    std::vector<int64_t> sizes = {static_cast<int64_t>(rows.size())};
    int64_t* label = batch.Reserve("labels", sizes, at::kLong).mutable_data_ptr<int64_t>();
    sizes.insert(sizes.end(), options_.shape.begin(), options_.shape.end());
    float* pixel = batch.Reserve("images", sizes, at::kFloat).mutable_data_ptr<float>();
    for (int64_t row : rows) {
      for (int64_t i = 0; i < elements_; ++i) *pixel++ = Pixel(options_.seed, row, i);
      *label++ = Label(options_.seed, row, options_.classes);
    }
    return absl::OkStatus();
  }

 private:
  const Options options_;
  int64_t elements_ = 1;
};

uint64_t MixRow(uint64_t seed, int64_t row) { return Mix(Mix(seed) ^ static_cast<uint64_t>(row)); }

}  // namespace

float Pixel(uint64_t seed, int64_t row, int64_t element) {
  const uint64_t bits = Mix(MixRow(seed, row) + static_cast<uint64_t>(element));
  constexpr float kUnit = 1.0f / (1 << 24);  // a float32 has 24 bits of precision
  return static_cast<float>(bits >> 40) * kUnit;
}

int64_t Label(uint64_t seed, int64_t row, int64_t classes) {
  const uint64_t bits = Mix(~MixRow(seed, row));
  return static_cast<int64_t>(static_cast<unsigned __int128>(bits) * classes >> 64);
}

absl::StatusOr<std::unique_ptr<Dataset>> Create(const Options& options) {
  if (options.size < 1 || options.classes < 1 || options.rows_per_chunk < 0 ||
      std::any_of(options.shape.begin(), options.shape.end(), [](int64_t s) { return s < 1; })) {
    return absl::InvalidArgumentError(
        absl::StrCat("synthetic: size (", options.size, "), classes (", options.classes,
                     ") and each dimension of shape must be at least 1, and rows_per_chunk (",
                     options.rows_per_chunk, ") at least 0"));
  }
  return std::make_unique<Synthetic>(options);
}

}  // namespace lockstep::data::synthetic
