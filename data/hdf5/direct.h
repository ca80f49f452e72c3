#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "lockstep/data/hdf5/shared.h"

namespace lockstep::data::hdf5 {

// Neighbouring rows that are stored as they are in memory need no chunk in between: they are read
// from the file into the batch when they are taken. The two sides of that, for one column.

// Finds them in an order of rows, and where they are.
class DirectRuns {
 public:
  explicit DirectRuns(const Column& column);

  // Whether the first of `rows`, the next of the order, is one of many neighbours in a block that
  // can be read so. Once one is, all that follow it in the block are. Adds to `places` where the
  // block is when it is the first of them.
  bool Has(absl::Span<const int64_t> rows, std::vector<DirectPlace>& places);

 private:
  const Column& column_;
  const int64_t least_;  // rows of a run that is worth it
  RowRange run_;         // what is left of the last one, to the end of its block
};

// Reads them.
class DirectReader {
 public:
  DirectReader(Shared& shared, size_t column) : shared_(shared), column_(column) {}

  // What DirectRuns found, in that order: then HDF5 need not be asked again.
  void Expect(const std::vector<DirectPlace>& places);

  // Reads neighbouring rows, which may lie in several blocks, to rows `at` and following.
  absl::Status Read(RowRange rows, int64_t at, Filling& filling);

 private:
  Shared& shared_;
  const size_t column_;
  std::deque<DirectPlace> expected_;
  DirectPlace place_;
  std::vector<uint8_t> scratch_;  // where rows are converted
};

}  // namespace lockstep::data::hdf5
