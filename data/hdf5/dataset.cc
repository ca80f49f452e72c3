#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/data/hdf5/check.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/hdf5/shared.h"
#include "lockstep/data/hdf5/stream.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr int64_t kWindowChunks = 64;
constexpr int64_t kWindowBytes = 32 << 20;

class Streamed : public Hdf5Dataset {
 public:
  explicit Streamed(std::unique_ptr<Shared> shared) : shared_(std::move(shared)) { FindChunks(); }

  int64_t size() const override { return shared_->source().rows(); }

  std::vector<RowRange> chunks() const override {
    std::vector<RowRange> chunks;
    for (int64_t block = 0; block < main_->blocks(); ++block) {
      const RowRange rows = main_->RowsOf(block);
      if (!chunks.empty() && !IsBorder(rows.begin)) {
        chunks.back().end = rows.end;
      } else {
        chunks.push_back(rows);
      }
    }
    return chunks;
  }

  // One window is read while rows are taken from the one before. Larger ones than that mix no
  // better, but leave the processor's caches.
  int64_t window_chunks() const override {
    const int64_t enough = std::max(kWindowChunks, kWindowBytes / group_bytes_);
    const int64_t fit = shared_->plan().slab_bytes / 2 / group_bytes_ - 1;
    return std::max<int64_t>(1, std::min(enough, fit));
  }

  absl::Status ReadInto(absl::Span<const int64_t> rows, Batch& batch) override {
    absl::Status status = CheckRows(rows, size(), shared_->source().name());
    if (status.ok()) status = shared_->LoadResidents();
    if (!status.ok()) return status;
    Filling filling(shared_->columns(), static_cast<int64_t>(rows.size()), batch);
    // Places in `rows`, those of the same chunk together.
    std::vector<int64_t> places(rows.size());
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int64_t>(i);
    std::stable_sort(places.begin(), places.end(),
                     [&](int64_t a, int64_t b) { return rows[a] < rows[b]; });
    for (size_t i = 0; i < shared_->columns().size() && status.ok(); ++i) {
      status = ReadColumn(i, rows, places, filling);
    }
    return status;
  }

  std::unique_ptr<OrderedReader> ReadInOrder(std::unique_ptr<RowOrder> order) override {
    return MakeStream(*shared_, std::move(order));
  }

  Stats stats() const override {
    const Counters& counters = shared_->counters();
    return {.bytes_read = counters.bytes_read,
            .chunks_read = counters.chunks_read,
            .peak_memory_bytes = counters.peak_memory_bytes,
            .reading = absl::Nanoseconds(counters.reading.load()),
            .decoding = absl::Nanoseconds(counters.decoding.load()),
            .waited_for_memory = absl::Nanoseconds(counters.waited_for_memory.load()),
            .waited_for_chunks = absl::Nanoseconds(counters.waited_for_chunks.load())};
  }

  const std::vector<std::string>& notes() const override { return shared_->source().notes(); }

 private:
  using Block = std::vector<uint8_t>;
  struct Cached {
    size_t column;
    int64_t block;
    std::shared_ptr<const Block> plain;
  };

  // Chooses the column whose blocks are the dataset's chunks, and whether to put them together.
  void FindChunks() {
    std::vector<const Column*> streamed;
    for (size_t i = 0; i < shared_->columns().size(); ++i) {
      if (shared_->resident(i) == nullptr) streamed.push_back(shared_->columns()[i].get());
    }
    main_ = *std::max_element(
        streamed.begin(), streamed.end(),
        [](const Column* a, const Column* b) { return a->row_bytes < b->row_bytes; });
    int64_t row_bytes = 0;
    for (const Column* column : streamed) row_bytes += column->row_bytes;
    for (const Column* column : streamed) {
      if (column != main_) borders_.push_back(column);
    }
    group_bytes_ = LargestGroup() * row_bytes;
    // Groups that are too large to be shuffled: then chunks of the others are read more than once.
    if (!borders_.empty() && group_bytes_ > shared_->plan().slab_bytes / 8) {
      borders_.clear();
      group_bytes_ = main_->max_block_bytes / main_->row_bytes * row_bytes;
    }
  }

  // Whether all datasets have chunks that begin at this row.
  bool IsBorder(int64_t row) const {
    return std::all_of(borders_.begin(), borders_.end(), [row](const Column* column) {
      const Segment& segment = column->SegmentOf(row);
      return (row - segment.first_row) % segment.block_rows == 0;
    });
  }

  int64_t LargestGroup() const {
    int64_t largest = 0;
    int64_t begin = 0;
    for (int64_t block = 0; block < main_->blocks(); ++block) {
      const RowRange rows = main_->RowsOf(block);
      if (IsBorder(rows.begin)) begin = rows.begin;
      largest = std::max(largest, rows.end - begin);
    }
    return largest;
  }

  absl::Status ReadColumn(size_t index, absl::Span<const int64_t> rows,
                          const std::vector<int64_t>& places, Filling& filling) {
    const Column& column = *shared_->columns()[index];
    const Resident* resident = shared_->resident(index);
    std::shared_ptr<const Block> plain;
    RowRange in_memory = {0, resident != nullptr ? size() : 0};
    for (int64_t place : places) {
      const int64_t row = rows[place];
      if (row < in_memory.begin || row >= in_memory.end) {
        absl::StatusOr<std::shared_ptr<const Block>> loaded = LoadBlock(index, column.BlockOf(row));
        if (!loaded.ok()) return loaded.status();
        plain = *loaded;
        in_memory = column.RowsOf(column.BlockOf(row));
      }
      const uint8_t* memory = resident != nullptr ? resident->values.data() : plain->data();
      const uint8_t* from = memory + (row - in_memory.begin) * column.row_bytes;
      absl::Status status = filling.Put(index, place, from, row, /*count=*/1);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const Block>> LoadBlock(size_t index, int64_t block) {
    {
      const std::lock_guard lock(mutex_);
      for (auto cached = cache_.begin(); cached != cache_.end(); ++cached) {
        if (cached->column == index && cached->block == block) {
          cache_.splice(cache_.begin(), cache_, cached);
          return cached->plain;
        }
      }
    }
    const Column& column = *shared_->columns()[index];
    auto plain = std::make_shared<Block>(Source::PlainBytes(column, block));
    StoredBlock stored;
    Decoder decoder;
    absl::Status status = shared_->Load(column, block, stored, decoder, plain->data());
    if (!status.ok()) return status;
    const std::lock_guard lock(mutex_);
    cache_.push_front({index, block, plain});
    cache_bytes_ += static_cast<int64_t>(plain->size());
    shared_->NoteMemory(cache_bytes_);
    while (cache_bytes_ > shared_->plan().cache_bytes) {
      cache_bytes_ -= static_cast<int64_t>(cache_.back().plain->size());
      cache_.pop_back();
    }
    return plain;
  }

  const std::unique_ptr<Shared> shared_;
  const Column* main_ = nullptr;
  std::vector<const Column*> borders_;  // whose chunks end where the dataset's do
  int64_t group_bytes_ = 0;             // of the largest of chunks()

  std::mutex mutex_;  // guards what ReadInto keeps, the last used first
  std::list<Cached> cache_;
  int64_t cache_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Hdf5Dataset>> Open(const Options& options) {
  if (options.check_in_child) {
    for (const std::string& path : options.files) {
      absl::Status status = CheckInChild(path, options);
      if (!status.ok()) return status;
    }
  }
  absl::StatusOr<std::unique_ptr<Source>> source = Source::Open(options);
  if (!source.ok()) return source.status();
  absl::StatusOr<std::unique_ptr<Shared>> shared = Shared::Make(*std::move(source), options);
  if (!shared.ok()) return shared.status();
  return std::make_unique<Streamed>(*std::move(shared));
}

}  // namespace lockstep::data::hdf5
