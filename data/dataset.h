#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "lockstep/data/batch.h"
#include "lockstep/data/row_order.h"

namespace lockstep::data {

// Reads the rows of one order, from its start to its end. See Dataset::ReadInOrder.
class OrderedReader {
 public:
  virtual ~OrderedReader() = default;

  // Reads the next `count` rows of the order, or those that are left, into `batch`, as
  // Dataset::ReadInto does. After an error there is nothing more to read. One thread at a time.
  virtual absl::Status ReadInto(int64_t count, Batch& batch) = 0;
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

  // A reader of the rows that `order` gives. This is how a Loader reads: a dataset that streams
  // from files takes rows from the order as far ahead as its memory budget allows, and has them in
  // memory before they are asked for. The dataset outlives the reader. Default: calls ReadInto.
  virtual std::unique_ptr<OrderedReader> ReadInOrder(std::unique_ptr<RowOrder> order);

  // Of how many neighbours among chunks() in an order a reader can mix the rows, and still read no
  // chunk twice: ChunkShuffleOptions::window_chunks. Default: 16.
  virtual int64_t window_chunks() const { return 16; }

  // True: ReadInto (with a Batch of its own for each caller) and ReadInOrder may be called, and
  // several readers used, by several threads at once. Otherwise one thread at a time, and a
  // Loader's counts as one from its first batch until it is destroyed. Default: true.
  virtual bool thread_safe() const { return true; }
};

// OUT_OF_RANGE for the first of `rows` outside [0, size), naming it and `dataset`.
absl::Status CheckRows(absl::Span<const int64_t> rows, int64_t size, const std::string& dataset);

}  // namespace lockstep::data
