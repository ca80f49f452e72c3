#include "lockstep/data/hdf5/shared.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr int kMostDefaultThreads = 4;
constexpr int64_t kMostRowsAhead = 1 << 20;

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What one thread takes to decode blocks of a column, beside the decoded block.
struct DecodingBytes {
  int64_t stored = 0;
  int64_t scratch = 0;
};

DecodingBytes DecodingBytesOf(const Column& column) {
  DecodingBytes bytes;
  for (const Segment& segment : column.segments) {
    if (!segment.raw || segment.filters.empty()) continue;
    // Bytes that do not compress grow a little.
    const int64_t block = segment.block_rows * column.row_bytes;
    bytes.stored = std::max(bytes.stored, block + block / 64 + 1024);
    const auto buffers = std::min<int64_t>(2, segment.filters.size() - 1);
    bytes.scratch = std::max(bytes.scratch, buffers * (block + 64));
  }
  return bytes;
}

absl::StatusOr<Plan> MakePlan(const std::vector<std::unique_ptr<Column>>& columns, int64_t rows,
                              const Options& options, std::vector<bool>& resident) {
  const int64_t budget = options.memory_budget_bytes;
  Plan plan;
  // All but the largest column may be resident, from the smallest up.
  std::vector<size_t> by_size(columns.size());
  for (size_t i = 0; i < by_size.size(); ++i) by_size[i] = i;
  std::sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) {
    return std::pair(columns[a]->row_bytes, b) < std::pair(columns[b]->row_bytes, a);
  });
  resident.assign(columns.size(), false);
  for (size_t i = 0; i + 1 < by_size.size(); ++i) {
    const int64_t row_bytes = columns[by_size[i]]->row_bytes;
    if (row_bytes > budget / 8 / rows) break;
    if (plan.resident_bytes + rows * row_bytes > budget / 8) break;
    plan.resident_bytes += rows * row_bytes;
    resident[by_size[i]] = true;
  }
  int64_t one_of_each = 0;
  int64_t row_bytes = 0;
  DecodingBytes decoding;
  const Column* largest = columns[by_size.back()].get();
  for (size_t i = 0; i < columns.size(); ++i) {
    if (resident[i]) continue;
    one_of_each += columns[i]->max_block_bytes;
    row_bytes += columns[i]->row_bytes;
    if (columns[i]->max_block_bytes > largest->max_block_bytes) largest = columns[i].get();
    const DecodingBytes bytes = DecodingBytesOf(*columns[i]);
    decoding.stored = std::max(decoding.stored, bytes.stored);
    decoding.scratch = std::max(decoding.scratch, bytes.scratch);
  }
  plan.cache_bytes = std::max(budget / 16, one_of_each);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  plan.threads = options.decode_threads > 0 ? options.decode_threads
                                            : std::clamp(cores, 1, kMostDefaultThreads);
  const auto fixed = [&](int threads) {
    return (threads + 1) * decoding.stored + threads * decoding.scratch;
  };
  const int64_t planned_row_bytes = 8 * (1 + static_cast<int64_t>(columns.size()));
  plan.rows_ahead =
      std::clamp<int64_t>(budget / 16 / planned_row_bytes, 1, std::min(rows, kMostRowsAhead));
  const int64_t planning_bytes = plan.rows_ahead * planned_row_bytes;
  const int64_t left = budget - plan.resident_bytes - plan.cache_bytes - planning_bytes;
  while (plan.threads > 1 && fixed(plan.threads) + 2 * one_of_each > left) --plan.threads;
  plan.fixed_bytes = planning_bytes + fixed(plan.threads);
  plan.slab_bytes = left - fixed(plan.threads);
  if (plan.slab_bytes < one_of_each) {
    return absl::ResourceExhaustedError(
        absl::StrCat(largest->segments[0].file->path, ": a chunk of '", largest->field.dataset,
                     "' takes ", largest->max_block_bytes, " bytes, for which a memory budget of ",
                     budget, " bytes is too small; give memory_budget_bytes at least ",
                     // The shares of the budget above, and rounding.
                     (fixed(1) + 2 * one_of_each) / 3 * 4 + 1024));
  }
  // As much for each column as its rows take, and one block at least.
  const auto spare = static_cast<double>(plan.slab_bytes - one_of_each);
  for (size_t i = 0; i < columns.size(); ++i) {
    const double share =
        static_cast<double>(columns[i]->row_bytes) / static_cast<double>(row_bytes);
    plan.column_slab_bytes.push_back(
        resident[i] ? 0 : columns[i]->max_block_bytes + static_cast<int64_t>(spare * share));
  }
  return plan;
}

}  // namespace

Timed::Timed(std::atomic<int64_t>& counter) : counter_(counter), begin_(Now()) {}

Timed::~Timed() { counter_ += Now() - begin_; }

absl::StatusOr<std::unique_ptr<Shared>> Shared::Make(std::unique_ptr<Source> source,
                                                     const Options& options) {
  auto shared = std::make_unique<Shared>();
  std::vector<bool> resident;
  absl::StatusOr<Plan> plan = MakePlan(source->columns(), source->rows(), options, resident);
  if (!plan.ok()) return plan.status();
  shared->plan_ = *plan;
  shared->source_ = std::move(source);
  for (bool keep : resident) {
    shared->residents_.push_back(keep ? std::make_unique<Resident>() : nullptr);
  }
  return shared;
}

absl::Status Shared::Read(const Column& column, int64_t block, StoredBlock& stored,
                          uint8_t* plain) {
  int64_t bytes = 0;
  absl::Status status;
  {
    const Timed timed(counters_.reading);
    status = source_->Read(column, block, stored, plain, &bytes);
  }
  counters_.bytes_read += bytes;
  counters_.chunks_read += 1;
  return status;
}

absl::Status Shared::Load(const Column& column, int64_t block, StoredBlock& stored,
                          Decoder& decoder, uint8_t* plain) {
  absl::Status status = Read(column, block, stored, plain);
  if (!status.ok() || stored.decoded) return status;
  const Timed timed(counters_.decoding);
  return source_->Decode(column, block, stored, decoder, plain);
}

absl::Status Shared::LoadResidents() {
  for (size_t i = 0; i < residents_.size(); ++i) {
    Resident* resident = residents_[i].get();
    if (resident == nullptr || resident->loaded) continue;
    const std::lock_guard lock(resident->mutex);
    if (resident->loaded) continue;
    const Column& column = *columns()[i];
    resident->values.resize(source_->rows() * column.row_bytes);
    StoredBlock stored;
    Decoder decoder;
    std::vector<uint8_t> plain;
    for (int64_t block = 0; block < column.blocks(); ++block) {
      plain.resize(Source::PlainBytes(column, block));
      absl::Status status = Load(column, block, stored, decoder, plain.data());
      if (!status.ok()) return status;
      const RowRange rows = column.RowsOf(block);
      std::copy_n(plain.begin(), rows.size() * column.row_bytes,
                  resident->values.begin() + rows.begin * column.row_bytes);
    }
    resident->loaded = true;
  }
  return absl::OkStatus();
}

void Shared::NoteMemory(int64_t bytes) {
  bytes += plan_.resident_bytes;
  int64_t peak = counters_.peak_memory_bytes;
  while (peak < bytes && !counters_.peak_memory_bytes.compare_exchange_weak(peak, bytes)) {
  }
}

Filling::Filling(const std::vector<std::unique_ptr<Column>>& columns, int64_t rows, Batch& batch)
    : columns_(columns) {
  std::vector<int64_t> sizes;
  for (const auto& column : columns) {
    sizes.assign(1, rows);
    sizes.insert(sizes.end(), column->shape.begin(), column->shape.end());
    const at::ScalarType dtype = *column->field.dtype;
    const at::Tensor& tensor = batch.Reserve(column->field.name, sizes, dtype);
    to_.push_back({static_cast<uint8_t*>(tensor.mutable_data_ptr()),
                   column->row_values * static_cast<int64_t>(c10::elementSize(dtype))});
  }
}

absl::Status Filling::Put(size_t column, int64_t at, const uint8_t* from, int64_t row,
                          int64_t count) {
  const Column& source = *columns_[column];
  const int64_t wrong = source.conversion(from, PlaceOf(column, at), count * source.row_values);
  if (wrong < 0) return absl::OkStatus();
  const int64_t wrong_row = row + wrong / source.row_values;
  const Segment& segment = source.SegmentOf(wrong_row);
  return absl::OutOfRangeError(absl::StrCat(
      segment.file->path, ": '", source.field.dataset, "', row ", wrong_row - segment.first_row,
      ": holds ", source.conversion.Complaint(from + wrong * BytesOf(source.element))));
}

}  // namespace lockstep::data::hdf5
