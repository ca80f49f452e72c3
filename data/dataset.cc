#include "lockstep/data/dataset.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lockstep::data {
namespace {

class PlainReader : public OrderedReader {
 public:
  PlainReader(Dataset& dataset, std::unique_ptr<RowOrder> order)
      : dataset_(dataset), order_(std::move(order)) {}

  absl::Status ReadInto(int64_t count, Batch& batch) override {
    rows_.resize(count);
    rows_.resize(order_->Take(absl::MakeSpan(rows_)));
    return dataset_.ReadInto(rows_, batch);
  }

 private:
  Dataset& dataset_;
  const std::unique_ptr<RowOrder> order_;
  std::vector<int64_t> rows_;
};

}  // namespace

std::unique_ptr<OrderedReader> Dataset::ReadInOrder(std::unique_ptr<RowOrder> order) {
  return std::make_unique<PlainReader>(*this, std::move(order));
}

absl::Status CheckRows(absl::Span<const int64_t> rows, int64_t size, const std::string& dataset) {
  for (int64_t row : rows) {
    if (row < 0 || row >= size) {
      return absl::OutOfRangeError(
          absl::StrCat(dataset, ": row ", row, " was asked for, but there are rows 0 to ", size - 1,
                       " only. Was the sampler made for another dataset?"));
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep::data
