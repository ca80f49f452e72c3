#include "lockstep/data/loader.h"

#include <ATen/Context.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::data {
namespace {

void CheckOptions(const Sampler& sampler, const LoaderOptions& options) {
  std::string wrong;
  if (options.batch_size < 1) {
    wrong = absl::StrCat("batch_size is ", options.batch_size, ", but must be at least 1");
  } else if (options.prefetch_batches < 0) {
    wrong = absl::StrCat("prefetch_batches is ", options.prefetch_batches,
                         ", but must be 0 (read when asked) or more");
  } else if (options.pin_memory && !at::globalContext().hasCUDA()) {
    wrong = "pin_memory is for copies to a GPU, and LibTorch finds none here";
  } else if (options.drop_last && sampler.size() < options.batch_size) {
    wrong =
        absl::StrCat("drop_last leaves no batch of ", options.batch_size, " rows: this rank has ",
                     sampler.size(), " in an epoch; use smaller batches or fewer ranks");
  }
  if (!wrong.empty()) throw StatusError(absl::InvalidArgumentError("loader: " + wrong));
}

}  // namespace

// Mutex and condition variables are std's, not Abseil's: ThreadSanitizer cannot see into the ones
// of a prebuilt Abseil.
class Loader::Pass {
 public:
  Pass(Loader& loader, Position start) : options_(loader.options_), start_(std::move(start)) {
    std::unique_ptr<RowOrder> order = loader.sampler_->Order(start_);
    batches_ = CountBatches(order->left(), options_);
    reader_ = loader.dataset_->ReadInOrder(std::move(order));
    for (Batch& buffer : loader.buffers_) free_.push_back(&buffer);
    if (options_.prefetch_batches > 0 && batches_ > 0) thread_ = std::thread([this] { Run(); });
  }

  ~Pass() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    may_read_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  static int64_t CountBatches(int64_t rows, const LoaderOptions& options) {
    return (rows + (options.drop_last ? 0 : options.batch_size - 1)) / options.batch_size;
  }

  // Null at the end. Takes back the batch handed out before.
  absl::StatusOr<const Batch*> Next() {
    if (!error_.ok()) return error_;
    std::unique_lock lock(mutex_);
    if (lent_ != nullptr) {
      free_.push_back(std::exchange(lent_, nullptr));
      may_read_.notify_one();
    }
    if (taken_ == batches_) return nullptr;
    if (!thread_.joinable()) {
      ready_.push_back(Read(taken_, free_.front()));
      free_.pop_front();
    }
    may_take_.wait(lock, [this] { return !ready_.empty(); });
    absl::StatusOr<Batch*> batch = std::move(ready_.front());
    ready_.pop_front();
    if (!batch.ok()) return error_ = batch.status();
    ++taken_;
    return lent_ = *batch;
  }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    for (int64_t index = 0; index < batches_; ++index) {
      may_read_.wait(lock, [this] { return stop_ || !free_.empty(); });
      if (stop_) return;
      Batch* buffer = free_.front();
      free_.pop_front();
      lock.unlock();
      absl::StatusOr<Batch*> batch = Read(index, buffer);
      lock.lock();
      ready_.push_back(batch);
      may_take_.notify_one();
      if (!batch.ok()) return;
    }
  }

  absl::StatusOr<Batch*> Read(int64_t index, Batch* buffer) {
    absl::Status status;
    try {
      status = reader_->ReadInto(options_.batch_size, *buffer);
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    if (status.ok()) return buffer;
    return absl::Status(status.code(),
                        absl::StrCat("epoch ", start_.epoch, ", batch ", index, " from row ",
                                     start_.rows, " of its order: ", status.message()));
  }

  const LoaderOptions& options_;
  const Position start_;
  int64_t batches_ = 0;
  std::unique_ptr<OrderedReader> reader_;

  // Of the thread that calls Next.
  int64_t taken_ = 0;
  Batch* lent_ = nullptr;
  absl::Status error_;

  std::mutex mutex_;  // guards the rest
  std::condition_variable may_read_;
  std::condition_variable may_take_;
  std::deque<Batch*> free_;
  std::deque<absl::StatusOr<Batch*>> ready_;
  bool stop_ = false;
  std::thread thread_;  // last, as it uses all others
};

Loader::Loader(std::shared_ptr<Dataset> dataset, std::shared_ptr<const Sampler> sampler,
               LoaderOptions options)
    : dataset_(std::move(dataset)), sampler_(std::move(sampler)), options_(options) {
  CheckOptions(*sampler_, options_);
  for (int i = 0; i <= options_.prefetch_batches; ++i) buffers_.emplace_back(options_.pin_memory);
}

Loader::~Loader() = default;

absl::StatusOr<const Batch*> Loader::Next() {
  const trace::Span span("WAIT_FOR_DATA", "data");
  const absl::Time begin = absl::Now();
  if (pass_ == nullptr) pass_ = std::make_unique<Pass>(*this, position_);
  absl::StatusOr<const Batch*> batch = pass_->Next();
  stats_.waited += absl::Now() - begin;
  if (!batch.ok()) return batch;
  if (*batch == nullptr) {
    SetEpoch(position_.epoch + 1);
    return batch;
  }
  stats_.batches += 1;
  stats_.rows += (*batch)->rows();
  position_.Advance(sampler_->world(), (*batch)->rows() * sampler_->world());
  return batch;
}

absl::Status Loader::Seek(Position position) {
  if (position.epoch < 0 || position.rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("loader: cannot go to epoch ", position.epoch,
                                                   ", row ", position.rows,
                                                   ": neither may be negative"));
  }
  if (absl::Status status = sampler_->Check(position); !status.ok()) return status;
  pass_ = nullptr;
  position_ = std::move(position);
  return absl::OkStatus();
}

void Loader::SetEpoch(int64_t epoch) { ThrowIfError(Seek({.epoch = epoch, .rows = 0})); }

int64_t Loader::batches_per_epoch() const { return Pass::CountBatches(sampler_->size(), options_); }

Loader::Iterator& Loader::Iterator::operator++() {
  batch_ = ValueOrThrow(loader_->Next());
  return *this;
}

}  // namespace lockstep::data
