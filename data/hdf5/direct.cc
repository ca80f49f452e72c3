#include "lockstep/data/hdf5/direct.h"

#include <algorithm>

namespace lockstep::data::hdf5 {
namespace {

constexpr int64_t kLeastRows = 8;
constexpr int64_t kLeastBytes = 16 << 10;
constexpr int64_t kScratchBytes = 64 << 10;  // stays in the processor's caches

}  // namespace

DirectRuns::DirectRuns(const Column& column)
    : column_(column), least_(std::max(kLeastRows, kLeastBytes / column.row_bytes + 1)) {}

bool DirectRuns::Has(absl::Span<const int64_t> rows, std::vector<DirectPlace>& places) {
  const int64_t row = rows[0];
  if (row == run_.begin && row < run_.end) {
    ++run_.begin;
    return true;
  }
  const auto left = static_cast<int64_t>(rows.size());
  if (left < least_ || rows[least_ - 1] != row + least_ - 1) return false;
  for (int64_t i = 1; i < least_; ++i) {
    if (rows[i] != row + i) return false;
  }
  if (!column_.SegmentOf(row).direct()) return false;
  const int64_t block = column_.BlockOf(row);
  const RowRange block_rows = column_.RowsOf(block);
  if (block_rows.end - row < least_) return false;
  run_ = {row + 1, block_rows.end};
  places.push_back({block, Source::Find(column_, block)});
  return true;
}

void DirectReader::Expect(const std::vector<DirectPlace>& places) {
  expected_.insert(expected_.end(), places.begin(), places.end());
}

absl::Status DirectReader::Read(RowRange rows, int64_t at, Filling& filling) {
  const Column& column = *shared_.columns()[column_];
  const bool copies = column.conversion.copies();
  const int64_t most = std::max<int64_t>(1, kScratchBytes / column.row_bytes);
  while (rows.begin < rows.end) {
    const int64_t block = column.BlockOf(rows.begin);
    RowRange part = {rows.begin, std::min(rows.end, column.RowsOf(block).end)};
    if (!copies) {
      part.end = std::min(part.end, part.begin + most);
      scratch_.resize(most * column.row_bytes);
    }
    uint8_t* to = copies ? filling.PlaceOf(column_, at) : scratch_.data();
    if (block != place_.block) {
      while (place_.block != block && !expected_.empty()) {
        place_ = expected_.front();
        expected_.pop_front();
      }
      if (place_.block != block) place_ = {block, Source::Find(column, block)};
      shared_.counters().chunks_read += 1;
    }
    shared_.counters().bytes_read += part.size() * column.row_bytes;
    absl::Status status;
    {
      const Timed timed(shared_.counters().reading);
      status = shared_.source().ReadDirect(column, part, place_, to);
    }
    if (status.ok() && !copies) status = filling.Put(column_, at, to, part.begin, part.size());
    if (!status.ok()) return status;
    at += part.size();
    rows.begin = part.end;
  }
  return absl::OkStatus();
}

}  // namespace lockstep::data::hdf5
