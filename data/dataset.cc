#include "lockstep/data/dataset.h"

#include "absl/strings/str_cat.h"

namespace lockstep::data {

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
