#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "lockstep/data/batch.h"

namespace lockstep::data {

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

// Rows that can be read by index: in memory, in files, or made up. It knows nothing of epochs,
// order or ranks, which are the Sampler's affair. To make one, implement size() and ReadInto():
//
//   class Squares : public data::Dataset {
//    public:
//     int64_t size() const override { return 1000; }
//     absl::Status ReadInto(absl::Span<const int64_t> rows, data::Batch& batch) override {
//       if (absl::Status s = data::CheckRows(rows, size(), "squares"); !s.ok()) return s;
//       auto count = static_cast<int64_t>(rows.size());
//       int64_t* out = batch.Reserve("values", {count}, at::kLong).mutable_data_ptr<int64_t>();
//       for (int64_t row : rows) *out++ = row * row;
//       return absl::OkStatus();
//     }
//   };
//
// data/testing/dataset_conformance.h checks what is promised here.
class Dataset {
 public:
  virtual ~Dataset() = default;

  // Number of rows; does not change.
  virtual int64_t size() const = 0;

  // Which rows are stored together, so that a sampler can keep reads of one chunk close in time:
  // ascending, not empty, without gap from row 0 to size(). No element means that any order of
  // rows costs the same. Default: none.
  virtual std::vector<RowRange> chunks() const { return {}; }

  // Reads `rows` into `batch`, in their order; a row may occur more than once, and no row at all
  // gives fields of 0 rows. Sets every field with Batch::Reserve, the same names, row shapes and
  // types at each call. A row outside [0, size()) is OUT_OF_RANGE; what the storage does is
  // another error, whose message names the dataset, file and row. After an error the contents of
  // `batch` are unspecified, and it can be used again.
  virtual absl::Status ReadInto(absl::Span<const int64_t> rows, Batch& batch) = 0;

  // A hint: the rows that will be asked for next, in order, as far as the caller knows them (a
  // Loader gives the whole rest of the epoch). A dataset looks as far ahead as its memory budget
  // allows, and copies what it needs: the span lives for this call only. Reads stay correct
  // whatever was hinted. Default: does nothing.
  virtual void Prefetch(absl::Span<const int64_t> /*upcoming*/) {}

  // True: ReadInto (with a Batch of its own for each caller) and Prefetch may be called from
  // several threads at once. Otherwise one thread at a time, and a Loader's counts as one from
  // its first batch until it is destroyed. Default: true.
  virtual bool thread_safe() const { return true; }
};

// OUT_OF_RANGE for the first of `rows` outside [0, size), naming it and `dataset`.
absl::Status CheckRows(absl::Span<const int64_t> rows, int64_t size, const std::string& dataset);

}  // namespace lockstep::data
