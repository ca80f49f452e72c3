#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lockstep/data/row_order.h"

namespace lockstep::data {

// `rows` rows, handed out by `world` ranks together, equally many by each.
struct Stretch {
  int world = 1;
  int64_t rows = 0;
  friend bool operator==(const Stretch&, const Stretch&) = default;
};

// A point in training: `rows` rows of the order of epoch `epoch` have been handed out, counted
// over all ranks together.
struct Position {
  int64_t epoch = 0;
  int64_t rows = 0;
  // How many ranks handed them out, where a sampler must know: one stretch, or several where the
  // epoch was resumed at another world size. Their rows add up to `rows`. A Loader fills it in, if
  // it did not start from a position without it.
  std::vector<Stretch> stretches = {};

  // `more` rows of all ranks together have been handed out by `world` ranks.
  void Advance(int world, int64_t more);
  friend bool operator==(const Position&, const Position&) = default;
};

// A position as one word to keep beside the weights, and back: "3:1000/4+600/3" is 1000 rows of
// epoch 3 by 4 ranks and then 600 by 3 ranks. INVALID_ARGUMENT for any other text.
std::string ToString(const Position& position);
absl::StatusOr<Position> ParsePosition(std::string_view text);

// Says which rows of a dataset this rank reads in an epoch, and in which order.
//
// Behind every sampler is one order of an epoch's rows, the same on all ranks and a pure function
// of (seed, epoch): ranks need not talk, and a run can be resumed anywhere. `rank` and `world` are
// plain numbers here; take them from communicator.rank() and communicator.size().
class Sampler {
 public:
  virtual ~Sampler() = default;

  // Rows of this rank in a whole epoch: equal on all ranks, so that all make equally many steps.
  virtual int64_t size() const = 0;

  // Number of ranks that share an epoch.
  virtual int world() const = 0;

  // This rank's rows from `from` to the end of that epoch: `Order({.epoch = 3})` is all of epoch
  // 3. Nothing when nothing is left; equally many on all ranks. Thread-safe.
  virtual std::unique_ptr<RowOrder> Order(Position from) const = 0;

  // The same, all at once.
  std::vector<int64_t> Rows(Position from) const;

  // INVALID_ARGUMENT where Order cannot go on from `from`. Default: it can, from anywhere.
  virtual absl::Status Check(const Position& /*from*/) const { return absl::OkStatus(); }
};

// Rows 0, 1, ..., size - 1, all on this rank: for evaluation and one process.
class SequentialSampler : public Sampler {
 public:
  // `size`: rows of the dataset. Throws StatusError (INVALID_ARGUMENT) where it is below 1.
  explicit SequentialSampler(int64_t size);

  int64_t size() const override { return size_; }
  int world() const override { return 1; }
  std::unique_ptr<RowOrder> Order(Position from) const override;

 private:
  const int64_t size_;
};

struct DistributedSamplerOptions {
  int64_t size = 0;        // Rows of the dataset, at least 1. Required.
  int rank = 0;            // This rank, in [0, world). Default: 0.
  int world = 1;           // Ranks that share an epoch. Default: 1.
  uint64_t seed = 0;       // Order of the rows, with the epoch. The same on all ranks. Default: 0.
  bool shuffle = true;     // False: the order is 0, 1, 2, ... in every epoch. Default: true.
  bool drop_last = false;  // True: leave out the last size % world rows of an epoch's order.
                           // False: repeat its first rows until ranks are even. Default: false.
};

// Deals the rows of an epoch to the ranks like torch.utils.data.DistributedSampler: rank r takes
// entries r, r + world, r + 2 world, ... of the epoch's order, which is padded from its own start
// (as often as needed when there are fewer rows than ranks) or cut to a multiple of world.
//
//   data::DistributedSampler sampler(
//       {.size = dataset->size(), .rank = comm->rank(), .world = comm->size(), .seed = 1});
//   std::vector<int64_t> rows = sampler.Rows({.epoch = 0});
//
// The shuffled order is Fisher and Yates's, drawn with std::mt19937_64: the same on every machine
// and compiler, but not the numbers of torch.randperm. Unlike in PyTorch, (seed, epoch) = (0, 1)
// and (1, 0) are two different orders.
class DistributedSampler : public Sampler {
 public:
  // Throws StatusError (INVALID_ARGUMENT) for a size below 1, a rank outside [0, world), and
  // drop_last with fewer rows than ranks, which would leave nothing.
  explicit DistributedSampler(DistributedSamplerOptions options);

  int64_t size() const override;
  int world() const override { return options_.world; }
  std::unique_ptr<RowOrder> Order(Position from) const override;

 private:
  const DistributedSamplerOptions options_;
};

// A permutation of 0, ..., size - 1: a pure function of its arguments, on every machine.
std::vector<int64_t> Permutation(int64_t size, uint64_t seed, int64_t epoch);

}  // namespace lockstep::data
