#include "lockstep/data/hdf5/stream.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "lockstep/data/hdf5/direct.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr int64_t kPieceRows = 1024;

// A decoded block in memory, or one on its way there.
struct Slot {
  size_t column = 0;
  int64_t block = 0;
  RowRange rows;
  uint8_t* slab = nullptr;
  absl::Status error;              // written before `ready`
  std::atomic<bool> ready{false};  // set by who decoded it, under the mutex
  // Rows of the order that are in this block: found by the reader thread, and taken by ReadInto.
  // Where they are equal, the slot is free. Each is written by one thread.
  int64_t planned = 0;
  std::atomic<int64_t> taken{0};

  bool idle() const {
    return ready.load(std::memory_order_acquire) &&
           taken.load(std::memory_order_acquire) == planned;
  }
};

// Rows that are planned, and for each streamed column the slots that they are in: null for rows
// that are read from the file only when they are taken, as they need no decoding and come in a row.
struct Piece {
  std::vector<int64_t> rows;
  std::vector<std::vector<Slot*>> slots;
  std::vector<std::vector<DirectPlace>> places;  // of the blocks of such rows
  size_t next = 0;                               // row to be taken
};

// A block to decode.
struct Job {
  Slot* slot = nullptr;
  StoredBlock stored;
};

class Stream : public OrderedReader {
 public:
  Stream(Shared& shared, std::unique_ptr<RowOrder> order)
      : shared_(shared), order_(std::move(order)), left_(order_->left()) {
    bool decodes = false;
    for (size_t i = 0; i < shared_.columns().size(); ++i) {
      if (shared_.resident(i) != nullptr) continue;
      streamed_.push_back(i);
      direct_readers_.emplace_back(shared_, i);
      direct_runs_.emplace_back(*shared_.columns()[i]);
      for (const Segment& segment : shared_.columns()[i]->segments) {
        decodes |= segment.raw && !segment.filters.empty();
      }
    }
    live_.resize(streamed_.size());
    last_.resize(streamed_.size());
    slab_bytes_.resize(streamed_.size());
    const int threads = decodes ? shared_.plan().threads : 1;
    for (int i = 0; i < threads + 1; ++i) spare_.emplace_back();
    if (left_ == 0) return;
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { DecodeJobs(); });
    threads_.emplace_back([this] { Plan(); });
  }

  ~Stream() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    may_plan_.notify_all();
    may_decode_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    for (const Slot& slot : slots_) {
      shared_.slabs().GiveBack(slot.slab, SlabBytes(slot.column));
    }
  }

  absl::Status ReadInto(int64_t count, Batch& batch) override {
    count = std::min(count, left_);
    left_ -= count;
    Filling filling(shared_.columns(), count, batch);
    for (int64_t done = 0; done < count;) {
      if (piece_.next == piece_.rows.size()) {
        absl::Status status = NextPiece();
        if (!status.ok()) return status;
      }
      const auto run = std::min<int64_t>(count - done, piece_.rows.size() - piece_.next);
      absl::Status status = Take(run, done, filling);
      if (!status.ok()) return status;
      done += run;
    }
    return absl::OkStatus();
  }

 private:
  // --- of the thread that calls ReadInto ---

  absl::Status NextPiece() {
    std::unique_lock lock(mutex_);
    if (pieces_.empty() && !ended_) {
      const Timed timed(shared_.counters().waited_for_chunks);
      may_take_.wait(lock, [this] { return !pieces_.empty() || ended_; });
    }
    if (pieces_.empty()) return error_;
    piece_ = std::move(pieces_.front());
    pieces_.pop_front();
    rows_ahead_ -= static_cast<int64_t>(piece_.rows.size());
    for (size_t i = 0; i < streamed_.size(); ++i) direct_readers_[i].Expect(piece_.places[i]);
    return absl::OkStatus();
  }

  absl::Status WaitFor(const Slot& slot) {
    if (!slot.ready.load(std::memory_order_acquire)) {
      const Timed timed(shared_.counters().waited_for_chunks);
      std::unique_lock lock(mutex_);
      may_take_.wait(lock, [&] { return slot.ready.load(std::memory_order_relaxed); });
    }
    return slot.error;
  }

  // Puts the next `count` rows of the piece to rows `at` and following of the batch.
  absl::Status Take(int64_t count, int64_t at, Filling& filling) {
    const int64_t* rows = piece_.rows.data() + piece_.next;
    for (size_t column = 0, streamed = 0; column < shared_.columns().size(); ++column) {
      const Resident* resident = shared_.resident(column);
      absl::Status status;
      if (resident != nullptr) {
        status = TakeResident(column, *resident, rows, count, at, filling);
      } else {
        status = TakeStreamed(streamed++, rows, count, at, filling);
      }
      if (!status.ok()) return status;
    }
    piece_.next += count;
    const std::lock_guard lock(mutex_);
    finished_.insert(finished_.end(), emptied_.begin(), emptied_.end());
    emptied_.clear();
    if (reader_waits_) may_plan_.notify_one();
    return absl::OkStatus();
  }

  absl::Status TakeResident(size_t column, const Resident& resident, const int64_t* rows,
                            int64_t count, int64_t at, Filling& filling) {
    const int64_t row_bytes = shared_.columns()[column]->row_bytes;
    for (int64_t begin = 0, end; begin < count; begin = end) {
      for (end = begin + 1; end < count && rows[end] == rows[end - 1] + 1; ++end) {
      }
      absl::Status status =
          filling.Put(column, at + begin, resident.values.data() + rows[begin] * row_bytes,
                      rows[begin], end - begin);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status TakeStreamed(size_t i, const int64_t* rows, int64_t count, int64_t at,
                            Filling& filling) {
    const int64_t row_bytes = shared_.columns()[streamed_[i]]->row_bytes;
    Slot* const* slots = piece_.slots[i].data() + piece_.next;
    for (int64_t begin = 0, end; begin < count; begin = end) {
      Slot* const slot = slots[begin];
      for (end = begin + 1; end < count && rows[end] == rows[end - 1] + 1; ++end) {
        if (slots[end] != slot) break;
      }
      absl::Status status;
      if (slot == nullptr) {
        status =
            direct_readers_[i].Read({rows[begin], rows[begin] + end - begin}, at + begin, filling);
      } else {
        status = WaitFor(*slot);
        if (!status.ok()) return status;
        if (end < count && slots[end] != nullptr) PrefetchRow(*slots[end], rows[end], row_bytes);
        status = filling.Put(streamed_[i], at + begin,
                             slot->slab + (rows[begin] - slot->rows.begin) * row_bytes, rows[begin],
                             end - begin);
        GiveBack(*slot, end - begin);
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Shuffled rows are where no hardware expects them.
  static void PrefetchRow(const Slot& slot, int64_t row, int64_t row_bytes) {
    if (!slot.ready.load(std::memory_order_acquire)) return;
    const uint8_t* memory = slot.slab + (row - slot.rows.begin) * row_bytes;
    for (int64_t i = 0; i < std::min<int64_t>(row_bytes, 1024); i += 64) {
      __builtin_prefetch(memory + i);
    }
  }

  void GiveBack(Slot& slot, int64_t rows) {
    const int64_t taken = slot.taken.load(std::memory_order_relaxed) + rows;
    slot.taken.store(taken, std::memory_order_release);
    if (taken == slot.rows.size()) emptied_.push_back(&slot);
  }

  // --- of the reader thread ---

  void Plan() {
    absl::Status status;
    try {
      status = shared_.LoadResidents();
      std::vector<int64_t> rows(kPieceRows);
      while (status.ok()) {
        const int64_t count = order_->Take(absl::MakeSpan(rows));
        if (count == 0) break;
        status = PlanRows(absl::MakeConstSpan(rows).first(count));
      }
      Publish();
    } catch (const std::exception& error) {
      status = absl::InternalError(absl::StrCat("hdf5: ", error.what()));
    }
    const std::lock_guard lock(mutex_);
    ended_ = true;
    error_ = status.ok() ? absl::InternalError("hdf5: the order of rows ended early") : status;
    may_take_.notify_one();
  }

  absl::Status PlanRows(absl::Span<const int64_t> rows) {
    draft_.slots.resize(streamed_.size());
    draft_.places.resize(streamed_.size());
    for (size_t at = 0; at < rows.size(); ++at) {
      const int64_t row = rows[at];
      if (row < 0 || row >= shared_.source().rows()) {
        return CheckRows(absl::MakeConstSpan(&row, 1), shared_.source().rows(),
                         shared_.source().name());
      }
      bool failed = false;
      for (size_t i = 0; i < streamed_.size(); ++i) {
        if (direct_runs_[i].Has(rows.subspan(at), draft_.places[i])) {
          draft_.slots[i].push_back(nullptr);
          continue;
        }
        Slot* slot = last_[i];
        if (slot == nullptr || row < slot->rows.begin || row >= slot->rows.end) {
          const int64_t block = shared_.columns()[streamed_[i]]->BlockOf(row);
          const auto found = live_[i].find(block);
          slot = found != live_[i].end() ? found->second : Fetch(i, block);
          if (slot == nullptr) return absl::CancelledError("hdf5: the reader was destroyed");
          last_[i] = slot;
        }
        ++slot->planned;
        draft_.slots[i].push_back(slot);
        failed |= slot->ready.load(std::memory_order_acquire) && !slot->error.ok();
      }
      draft_.rows.push_back(row);
      if (failed) return absl::CancelledError("hdf5: an earlier error comes first");
    }
    return Publish() ? absl::OkStatus() : absl::CancelledError("hdf5: the reader was destroyed");
  }

  // Hands the rows planned so far to ReadInto. False when the stream is to stop.
  bool Publish() {
    std::unique_lock lock(mutex_);
    if (!draft_.rows.empty()) {
      // A row of which not all columns are planned yet stays.
      Piece piece;
      piece.slots.resize(streamed_.size());
      const size_t count = draft_.rows.size();
      piece.rows.swap(draft_.rows);
      for (size_t i = 0; i < streamed_.size(); ++i) {
        piece.slots[i].assign(draft_.slots[i].begin(), draft_.slots[i].begin() + count);
        draft_.slots[i].erase(draft_.slots[i].begin(), draft_.slots[i].begin() + count);
      }
      piece.places.swap(draft_.places);
      draft_.places.resize(streamed_.size());
      rows_ahead_ += static_cast<int64_t>(count);
      pieces_.push_back(std::move(piece));
      may_take_.notify_one();
    }
    return WaitToPlan(lock, [this] { return rows_ahead_ < shared_.plan().rows_ahead; });
  }

  template <typename Condition>
  bool WaitToPlan(std::unique_lock<std::mutex>& lock, Condition condition) {
    if (stop_ || condition()) return !stop_;
    const Timed timed(shared_.counters().waited_for_memory);
    reader_waits_ = true;
    may_plan_.wait(lock, [&] { return stop_ || condition(); });
    reader_waits_ = false;
    return !stop_;
  }

  // A slot in which the block is, or soon will be. Null when the stream is to stop.
  Slot* Fetch(size_t i, int64_t block) {
    Slot* slot = TakeSlot(i);
    if (slot == nullptr) return nullptr;
    const Column& column = *shared_.columns()[streamed_[i]];
    slot->column = i;
    slot->block = block;
    slot->rows = column.RowsOf(block);
    slot->planned = 0;
    slot->taken.store(0, std::memory_order_relaxed);
    slot->error = absl::OkStatus();
    slot->ready.store(false, std::memory_order_relaxed);
    live_[i][block] = slot;
    by_age_.push_back(slot);

    Job job = {slot, {}};
    {
      std::unique_lock lock(mutex_);
      if (spare_.empty()) PublishUnlocked(lock);
      if (!WaitToPlan(lock, [this] { return !spare_.empty(); })) return nullptr;
      job.stored = std::move(spare_.back());
      spare_.pop_back();
    }
    const absl::Status status = shared_.Read(column, block, job.stored, slot->slab);
    const std::lock_guard lock(mutex_);
    if (status.ok() && !job.stored.decoded) {
      jobs_.push_back(std::move(job));
      may_decode_.notify_one();
    } else {
      slot->error = status;
      spare_.push_back(std::move(job.stored));
      slot->ready.store(true, std::memory_order_release);
      may_take_.notify_one();
    }
    return slot;
  }

  void PublishUnlocked(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    Publish();
    lock.lock();
  }

  int64_t SlabBytes(size_t i) const { return shared_.columns()[streamed_[i]]->max_block_bytes; }

  // A slot with memory for a block of streamed column `i`: one whose rows are all taken, new
  // memory, or one that nothing is planned for. Null when the stream is to stop.
  Slot* TakeSlot(size_t i) {
    while (true) {
      if (Slot* slot = TakeFinished(i)) return slot;
      if (slab_bytes_[i] + SlabBytes(i) <= shared_.plan().column_slab_bytes[streamed_[i]]) {
        return NewSlot(i);
      }
      if (Slot* slot = TakeIdle(i)) return slot;
      if (!Publish()) return nullptr;
      std::unique_lock lock(mutex_);
      if (!WaitToPlan(lock, [&] { return AnyIdle(i); })) return nullptr;
    }
  }

  // The memory that was used last is the most likely to be in a processor's cache.
  Slot* TakeFinished(size_t i) {
    const std::lock_guard lock(mutex_);
    while (!finished_.empty()) {
      Slot* slot = finished_.back();
      finished_.pop_back();
      if (!slot->idle() || slot->column != i) continue;  // TakeIdle finds it
      Forget(*slot);
      return slot;
    }
    return nullptr;
  }

  Slot* NewSlot(size_t i) {
    Slot* slot = &slots_.emplace_back();
    slot->column = i;
    slot->slab = shared_.slabs().Take(SlabBytes(i));
    slab_bytes_[i] += SlabBytes(i);
    shared_.NoteMemory(
        std::accumulate(slab_bytes_.begin(), slab_bytes_.end(), shared_.plan().fixed_bytes));
    return slot;
  }

  // The longest in memory first.
  Slot* TakeIdle(size_t i) {
    for (Slot* slot : by_age_) {
      if (slot->column == i && slot->idle()) {
        Forget(*slot);
        return slot;
      }
    }
    return nullptr;
  }

  bool AnyIdle(size_t i) const {
    return std::any_of(by_age_.begin(), by_age_.end(),
                       [i](const Slot* slot) { return slot->column == i && slot->idle(); });
  }

  void Forget(Slot& slot) {
    live_[slot.column].erase(slot.block);
    if (last_[slot.column] == &slot) last_[slot.column] = nullptr;
    by_age_.erase(std::find(by_age_.begin(), by_age_.end(), &slot));
  }

  // --- of the decoding threads ---

  void DecodeJobs() {
    Decoder decoder;
    std::unique_lock lock(mutex_);
    while (true) {
      may_decode_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      absl::Status status;
      {
        const Timed timed(shared_.counters().decoding);
        status = shared_.source().Decode(*shared_.columns()[streamed_[job.slot->column]],
                                         job.slot->block, job.stored, decoder, job.slot->slab);
      }
      lock.lock();
      job.slot->error = status;
      job.slot->ready.store(true, std::memory_order_release);
      spare_.push_back(std::move(job.stored));
      may_take_.notify_one();
      if (reader_waits_) may_plan_.notify_one();
    }
  }

  Shared& shared_;
  const std::unique_ptr<RowOrder> order_;  // of the reader thread
  std::vector<size_t> streamed_;           // columns; below, `i` counts these

  // Of the thread that calls ReadInto.
  int64_t left_;
  Piece piece_;
  std::vector<Slot*> emptied_;
  std::vector<DirectReader> direct_readers_;

  // Of the reader thread.
  Piece draft_;
  std::deque<Slot> slots_;
  std::vector<std::unordered_map<int64_t, Slot*>> live_;  // by block
  std::vector<Slot*> last_;                               // that was planned
  std::vector<DirectRuns> direct_runs_;
  std::deque<Slot*> by_age_;
  std::vector<int64_t> slab_bytes_;  // by streamed column

  std::mutex mutex_;  // guards the rest
  std::condition_variable may_take_;
  std::condition_variable may_plan_;
  std::condition_variable may_decode_;
  std::deque<Piece> pieces_;
  std::deque<Job> jobs_;
  std::vector<StoredBlock> spare_;  // memory for chunks as stored
  std::vector<Slot*> finished_;     // all of whose rows were taken
  int64_t rows_ahead_ = 0;
  bool reader_waits_ = false;
  bool ended_ = false;  // nothing comes after pieces_ but error_
  absl::Status error_;
  bool stop_ = false;
  std::vector<std::thread> threads_;  // last, as they use all others
};

}  // namespace

std::unique_ptr<OrderedReader> MakeStream(Shared& shared, std::unique_ptr<RowOrder> order) {
  return std::make_unique<Stream>(shared, std::move(order));
}

}  // namespace lockstep::data::hdf5
