#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/data/row_order.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

struct ChunkShuffleOptions {
  std::vector<RowRange> chunks;  // Dataset::chunks() of the dataset. Required.
  int64_t window_chunks = 16;  // Chunks whose rows are mixed; of Dataset::window_chunks() no chunk
                               // is read twice. At least 1. Default: 16.
  int rank = 0;                // This rank, in [0, world). Default: 0.
  int world = 1;               // Ranks that share an epoch. Default: 1.
  uint64_t seed = 0;           // Order, with the epoch. The same on all ranks. Default: 0.
  bool drop_last = false;  // True: leave out what is left when all ranks have equally many rows.
                           // False: a rank with one row less repeats its last. Default: false.
};

// An order that is nearly as good as a full shuffle, and reads each chunk once: for datasets that
// are stored in chunks, which are read whole or not at all.
//
//   data::ChunkShuffleSampler sampler({.chunks = dataset->chunks(),
//                                      .window_chunks = dataset->window_chunks(),
//                                      .rank = comm->rank(),
//                                      .world = comm->size(),
//                                      .seed = 1});
//   data::Loader loader(dataset, sampler, {.batch_size = 64});
//
// (seed, epoch) decides an order of the chunks, which stand in a line, row after row. The line is
// cut into one lane a rank, of equally many rows (or one more). A lane is cut into windows of
// window_chunks chunks or a few less, and the rows of each window are shuffled. So a batch mixes
// rows of window_chunks chunks from anywhere in the dataset, and only the chunks across the
// world - 1 borders of lanes are read by two ranks.
//
// Chunks and seed decide the order, and how many ranks began the epoch. Resumed with as many ranks
// it goes on, bit for bit; with another number of them, what is left of the lanes is laid end to
// end and cut anew, so that still every row of the epoch is seen once. From the next epoch on it
// is as if those ranks had begun. window_chunks and drop_last stay as they were.
class ChunkShuffleSampler : public Sampler {
 public:
  // Throws StatusError (INVALID_ARGUMENT) for chunks that are none or not those of a dataset, a
  // window below 1, a rank outside [0, world), and drop_last with fewer rows than ranks.
  explicit ChunkShuffleSampler(ChunkShuffleOptions options);

  int64_t size() const override;
  int world() const override { return options_->world; }
  std::unique_ptr<RowOrder> Order(Position from) const override;

  // INVALID_ARGUMENT for a position that does not say how many ranks came there, or where they
  // cannot have had equally many rows.
  absl::Status Check(const Position& from) const override;

 private:
  const std::shared_ptr<const ChunkShuffleOptions> options_;  // shared with the orders
};

}  // namespace lockstep::data
