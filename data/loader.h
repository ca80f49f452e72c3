#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/data/batch.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

struct LoaderOptions {
  int64_t batch_size = 64;   // Rows of a batch, on this rank. Default: 64.
  bool drop_last = false;    // Leave out an epoch's last batch where it is smaller. Default: false.
  int prefetch_batches = 2;  // Batches read ahead by a thread of the loader; this many and one more
                             // are in memory. 0: no thread, read when asked. Default: 2.
  bool pin_memory = false;   // Batches in page-locked memory, from which batch.To("x", device)
                             // copies on the current stream while the host goes on. Needs a GPU.
                             // Default: false.
};

struct LoaderStats {
  int64_t batches = 0;                           // Handed out.
  int64_t rows = 0;                              // Handed out, on this rank.
  absl::Duration waited = absl::ZeroDuration();  // Time the training loop waited for batches.
};

// Batches of a dataset in a sampler's order, read ahead while the model trains.
//
//   data::Loader loader(dataset, data::DistributedSampler({.size = dataset->size()}),
//                       {.batch_size = 64});
//   for (int epoch = 0; epoch < 3; ++epoch) {
//     loader.SetEpoch(epoch);
//     for (const data::Batch& batch : loader) Train(batch["images"], batch["labels"]);
//   }
//
// A loop starts at position() and ends with the epoch; after it, position() is the start of the
// next epoch. Left with break, it goes on after the last batch handed out. To resume, save
// ToString(position()) beside the weights and Seek() there, on as many ranks as you like: the
// remaining rows are the same. All ranks get equally many batches of equal size, as all samplers
// give equally many rows.
//
// A batch is valid until the next one is asked for, except for tensors that you still hold then:
// those keep their values (see batch.h). One thread at a time uses a Loader. A dataset that is not
// thread_safe() belongs to the loader from the first batch on.
class Loader {
 public:
  // Throws StatusError (INVALID_ARGUMENT) for a batch size below 1, a negative prefetch_batches,
  // pin_memory without a GPU, and drop_last where an epoch has less than one batch.
  Loader(std::shared_ptr<Dataset> dataset, std::shared_ptr<const Sampler> sampler,
         LoaderOptions options);
  // The same with a sampler of the loader's own.
  template <std::derived_from<Sampler> S>
  Loader(std::shared_ptr<Dataset> dataset, S sampler, LoaderOptions options)
      : Loader(std::move(dataset), std::make_shared<const S>(std::move(sampler)), options) {}
  ~Loader();  // Waits for the read that is going on, at most one batch.
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next batch, or null at the end of the epoch; the call after that begins the next epoch.
  // An error of the dataset comes in its turn, after the batches read before it, naming epoch and
  // rows; it is returned again until Seek or SetEpoch.
  absl::StatusOr<const Batch*> Next();

  // Where the next batch handed out begins. Rows that are merely read ahead do not count.
  const Position& position() const { return position_; }

  // Goes on from `position` and forgets what was read ahead. INVALID_ARGUMENT for negative values,
  // and for what the sampler cannot go on from.
  [[nodiscard]] absl::Status Seek(Position position);

  // Goes to the start of an epoch, 0 or more.
  void SetEpoch(int64_t epoch);

  // Batches of a whole epoch: for progress bars and learning-rate schedules.
  int64_t batches_per_epoch() const;

  // Since construction or ResetStats().
  const LoaderStats& stats() const { return stats_; }
  void ResetStats() { stats_ = {}; }

  // For range-for: Next(), with errors thrown as StatusError.
  class Iterator {
   public:
    explicit Iterator(Loader* loader) : loader_(loader) { ++*this; }
    const Batch& operator*() const { return *batch_; }
    const Batch* operator->() const { return batch_; }
    Iterator& operator++();
    bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

   private:
    Loader* loader_;
    const Batch* batch_ = nullptr;
  };
  Iterator begin() { return Iterator(this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  class Pass;  // reads from one position to the end of its epoch

  const std::shared_ptr<Dataset> dataset_;
  const std::shared_ptr<const Sampler> sampler_;
  const LoaderOptions options_;
  std::vector<Batch> buffers_;  // lent to the pass
  Position position_;
  LoaderStats stats_;
  std::unique_ptr<Pass> pass_;
};

}  // namespace lockstep::data
