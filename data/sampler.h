#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::data {

// A point in training: `rows` rows of the order of epoch `epoch` have been handed out, counted
// over all ranks together. The same point means the same rows done at any world size.
struct Position {
  int64_t epoch = 0;
  int64_t rows = 0;
  friend bool operator==(const Position&, const Position&) = default;
};

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

  // This rank's rows from `from` to the end of that epoch: `Rows({.epoch = 3})` is all of epoch 3.
  // Empty when nothing is left; equally many on all ranks. Thread-safe.
  virtual std::vector<int64_t> Rows(Position from) const = 0;
};

// Rows 0, 1, ..., size - 1, all on this rank: for evaluation and one process.
class SequentialSampler : public Sampler {
 public:
  // `size`: rows of the dataset. Throws StatusError (INVALID_ARGUMENT) where it is below 1.
  explicit SequentialSampler(int64_t size);

  int64_t size() const override { return size_; }
  int world() const override { return 1; }
  std::vector<int64_t> Rows(Position from) const override;

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
  std::vector<int64_t> Rows(Position from) const override;

 private:
  const DistributedSamplerOptions options_;
};

// A permutation of 0, ..., size - 1: a pure function of its arguments, on every machine.
std::vector<int64_t> Permutation(int64_t size, uint64_t seed, int64_t epoch);

}  // namespace lockstep::data
