#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"

namespace lockstep::data {

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

// Rows in the order in which they are to be read, handed out piece by piece: the order of an epoch
// of 10^9 rows need not be in memory at once. A Sampler makes it, a Dataset reads along it.
//
//   std::unique_ptr<data::RowOrder> order = sampler.Order({.epoch = 3});
//   std::vector<int64_t> rows(1000);
//   while (int64_t count = order->Take(absl::MakeSpan(rows))) Use(rows.data(), count);
//
// Not thread-safe.
class RowOrder {
 public:
  virtual ~RowOrder() = default;

  // Rows that are left.
  virtual int64_t left() const = 0;

  // Writes the next rows to the start of `rows`: as many as it has room for, or all that are left.
  // Returns how many.
  virtual int64_t Take(absl::Span<int64_t> rows) = 0;
};

// The order that is `rows`.
std::unique_ptr<RowOrder> ListedOrder(std::vector<int64_t> rows);

// The order begin, begin + 1, ..., end - 1.
std::unique_ptr<RowOrder> RangeOrder(RowRange range);

}  // namespace lockstep::data
