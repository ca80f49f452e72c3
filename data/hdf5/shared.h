#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/data/batch.h"
#include "lockstep/data/hdf5/slabs.h"
#include "lockstep/data/hdf5/source.h"

namespace lockstep::data::hdf5 {

// Stats as they are counted, by any thread. Times in nanoseconds.
struct Counters {
  std::atomic<int64_t> bytes_read{0};
  std::atomic<int64_t> chunks_read{0};
  std::atomic<int64_t> peak_memory_bytes{0};
  std::atomic<int64_t> reading{0};
  std::atomic<int64_t> decoding{0};
  std::atomic<int64_t> waited_for_memory{0};
  std::atomic<int64_t> waited_for_chunks{0};
};

// Adds the time until it goes to a counter.
class Timed {
 public:
  explicit Timed(std::atomic<int64_t>& counter);
  ~Timed();
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  std::atomic<int64_t>& counter_;
  const int64_t begin_;
};

// A column that is small beside the memory budget, and stays in memory.
struct Resident {
  std::mutex mutex;  // guards loading
  std::atomic<bool> loaded{false};
  std::vector<uint8_t> values;
};

// How the memory budget is spent.
struct Plan {
  int64_t resident_bytes = 0;  // by resident columns
  int64_t cache_bytes = 0;     // by the chunks that reads of single rows keep
  int64_t fixed_bytes = 0;     // by a reader: chunks as stored, and what decoding them takes
  int64_t slab_bytes = 0;      // by a reader: decoded chunks
  std::vector<int64_t> column_slab_bytes;  // of which by each column
  int64_t rows_ahead = 0;                  // that a reader plans, at most, before they are taken
  int threads = 1;                         // that decode
};

// What a dataset and its readers have in common.
class Shared {
 public:
  // RESOURCE_EXHAUSTED where the budget is too small for the chunks.
  static absl::StatusOr<std::unique_ptr<Shared>> Make(std::unique_ptr<Source> source,
                                                      const Options& options);

  Source& source() { return *source_; }
  const std::vector<std::unique_ptr<Column>>& columns() const { return source_->columns(); }
  const Plan& plan() const { return plan_; }
  Counters& counters() { return counters_; }
  SlabPool& slabs() { return slabs_; }

  // Null where the column is streamed.
  Resident* resident(size_t column) { return residents_[column].get(); }

  // Loads resident columns that are not yet.
  absl::Status LoadResidents();

  // Reads and decodes a block in this thread.
  absl::Status Load(const Column& column, int64_t block, StoredBlock& stored, Decoder& decoder,
                    uint8_t* plain);

  // Source::Read, counted.
  absl::Status Read(const Column& column, int64_t block, StoredBlock& stored, uint8_t* plain);

  // `bytes` are in use by one reader, beside what all have in common.
  void NoteMemory(int64_t bytes);

 private:
  std::unique_ptr<Source> source_;
  std::vector<std::unique_ptr<Resident>> residents_;
  Plan plan_;
  Counters counters_;
  SlabPool slabs_;
};

// A batch being filled with the rows of a source.
class Filling {
 public:
  // Reserves `rows` rows of each field.
  Filling(const std::vector<std::unique_ptr<Column>>& columns, int64_t rows, Batch& batch);

  // Converts `count` rows that begin at `from`, the first of which is row `row` of the column, to
  // the place of rows `at` and following. OUT_OF_RANGE for a value that is not allowed.
  absl::Status Put(size_t column, int64_t at, const uint8_t* from, int64_t row, int64_t count);

  // Where row `at` goes, for rows that are copied as they are.
  uint8_t* PlaceOf(size_t column, int64_t at) const {
    return to_[column].data + at * to_[column].row_bytes;
  }

 private:
  const std::vector<std::unique_ptr<Column>>& columns_;
  struct To {
    uint8_t* data;
    int64_t row_bytes;
  };
  std::vector<To> to_;
};

}  // namespace lockstep::data::hdf5
