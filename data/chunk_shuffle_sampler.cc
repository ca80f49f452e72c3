#include "lockstep/data/chunk_shuffle_sampler.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/data/random.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

using Options = ChunkShuffleOptions;
using Intervals = std::vector<RowRange>;  // of entries of the line, in order, disjoint, not empty

int64_t Total(const Intervals& intervals) {
  int64_t total = 0;
  for (const RowRange& interval : intervals) total += interval.size();
  return total;
}

// Entries [begin, end) of `intervals`, laid end to end.
Intervals Slice(const Intervals& intervals, int64_t begin, int64_t end) {
  Intervals slice;
  int64_t offset = 0;
  for (const RowRange& interval : intervals) {
    const int64_t first = std::max(begin - offset, int64_t{0});
    const int64_t last = std::min(end - offset, interval.size());
    if (first < last) slice.push_back({interval.begin + first, interval.begin + last});
    offset += interval.size();
  }
  return slice;
}

// How `count` entries are dealt to `world` ranks.
struct Deal {
  Deal(int64_t count, int world, bool drop_last)
      : world(world), each(count / world), longer(drop_last ? 0 : count % world) {}

  RowRange Of(int rank) const {
    const int64_t begin = rank * each + std::min<int64_t>(rank, longer);
    return {begin, begin + each + (rank < longer ? 1 : 0)};
  }
  int64_t steps() const { return each + (longer > 0 ? 1 : 0); }  // of every rank
  int64_t end() const { return Of(world - 1).end; }

  int world;
  int64_t each;
  int64_t longer;  // the first ranks, which have one entry more
};

// What is left for this rank: its entries, and after them as many repetitions of the last as make
// ranks even.
struct Share {
  Intervals entries;
  int64_t padding = 0;
};

Share ShareOf(const Options& options, int64_t size, const Position& from) {
  Intervals left = {{0, size}};
  int64_t done = 0;  // by each rank, since `left` was dealt to this many of them
  for (const Stretch& stretch : from.stretches) {
    if (stretch.world == options.world && &stretch == &from.stretches.back()) {
      done = stretch.rows / stretch.world;
      break;
    }
    const Deal deal(Total(left), stretch.world, options.drop_last);
    Intervals rest;
    for (int rank = 0; rank < stretch.world; ++rank) {
      const RowRange lane = deal.Of(rank);
      for (const RowRange& part :
           Slice(left, std::min(lane.begin + stretch.rows / stretch.world, lane.end), lane.end)) {
        rest.push_back(part);
      }
    }
    for (const RowRange& part : Slice(left, deal.end(), Total(left))) rest.push_back(part);
    left = std::move(rest);
  }
  const int64_t total = Total(left);
  const Deal deal(total, options.world, options.drop_last);
  const RowRange lane = deal.Of(options.rank);
  const int64_t steps = std::max(deal.steps() - done, int64_t{0});
  Share share;
  share.entries = Slice(left, std::min(lane.begin + done, lane.end), lane.end);
  share.padding = steps - Total(share.entries);
  // What is repeated: the last entry of the lane or, where the lane has none, of all lanes.
  const int64_t last = lane.size() > 0 ? lane.end : total;
  if (share.padding > 0 && share.entries.empty() && last > 0) {
    share.entries = Slice(left, last - 1, last);
    --share.padding;
  }
  return share;
}

// The line of rows in which (seed, epoch) puts the chunks, cut into lanes and windows.
class Line {
 public:
  Line(std::shared_ptr<const Options> options, int64_t epoch, int lanes)
      : options_(std::move(options)),
        key_(Mix(Mix(options_->seed) ^ static_cast<uint64_t>(epoch))),
        order_(Permutation(options_->chunks.size(), options_->seed, epoch)),
        begins_(order_.size() + 1),
        deal_(options_->chunks.back().end, lanes, options_->drop_last) {
    for (size_t i = 0; i < order_.size(); ++i) {
      begins_[i + 1] = begins_[i] + options_->chunks[order_[i]].size();
    }
  }

  // Sets `rows` to those of the window of which `entry` is part; returns its place in the line.
  RowRange Window(int64_t entry, std::vector<int64_t>& rows) const {
    const RowRange lane = LaneOf(entry);
    const int64_t first = ChunkOf(lane.begin);
    const int64_t chunks = ChunkOf(lane.end - 1) + 1 - first;
    const int64_t windows = (chunks + options_->window_chunks - 1) / options_->window_chunks;
    // Window w has chunks [w * chunks / windows, (w + 1) * chunks / windows) of the lane.
    const int64_t window = ((ChunkOf(entry) - first + 1) * windows - 1) / chunks;
    const int64_t begin = first + window * chunks / windows;
    const int64_t end = first + (window + 1) * chunks / windows;
    const RowRange place = {std::max(begins_[begin], lane.begin), std::min(begins_[end], lane.end)};
    rows.clear();
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t to_row = options_->chunks[order_[chunk]].begin - begins_[chunk];
      const int64_t last = std::min(begins_[chunk + 1], place.end);
      for (int64_t e = std::max(begins_[chunk], place.begin); e < last; ++e) {
        rows.push_back(e + to_row);
      }
    }
    std::mt19937_64 generator(Mix(key_ + static_cast<uint64_t>(place.begin)));
    Shuffle(absl::MakeSpan(rows), generator);
    return place;
  }

 private:
  RowRange LaneOf(int64_t entry) const {
    // What ranks leave out with drop_last is a lane of its own.
    if (entry >= deal_.end()) return {deal_.end(), begins_.back()};
    const int64_t long_end = deal_.longer * (deal_.each + 1);
    const int64_t lane = entry < long_end ? entry / (deal_.each + 1)
                                          : deal_.longer + (entry - long_end) / deal_.each;
    return deal_.Of(static_cast<int>(lane));
  }

  int64_t ChunkOf(int64_t entry) const {
    return std::upper_bound(begins_.begin(), begins_.end(), entry) - begins_.begin() - 1;
  }

  const std::shared_ptr<const Options> options_;
  const uint64_t key_;
  const std::vector<int64_t> order_;  // of the chunks
  std::vector<int64_t> begins_;       // where in the line they begin, and its end
  const Deal deal_;                   // to lanes
};

class ShuffledOrder : public RowOrder {
 public:
  ShuffledOrder(Line line, Share share)
      : line_(std::move(line)),
        share_(std::move(share)),
        left_(Total(share_.entries) + share_.padding) {}

  int64_t left() const override { return left_; }

  int64_t Take(absl::Span<int64_t> rows) override {
    const int64_t count = std::min<int64_t>(rows.size(), left_);
    int64_t taken = 0;
    while (taken < count && interval_ < share_.entries.size()) {
      RowRange& interval = share_.entries[interval_];
      if (interval.begin < place_.begin || interval.begin >= place_.end) {
        place_ = line_.Window(interval.begin, window_);
      }
      const int64_t run = std::min({count - taken, interval.size(), place_.end - interval.begin});
      std::copy_n(window_.begin() + (interval.begin - place_.begin), run, rows.begin() + taken);
      taken += run;
      last_ = rows[taken - 1];
      interval.begin += run;
      if (interval.size() == 0) ++interval_;
    }
    std::fill(rows.begin() + taken, rows.begin() + count, last_);
    left_ -= count;
    return count;
  }

 private:
  const Line line_;
  Share share_;
  int64_t left_;
  size_t interval_ = 0;  // of the share, cut at its begin as it is handed out
  RowRange place_;       // of the window
  std::vector<int64_t> window_;
  int64_t last_ = 0;
};

std::string Wrong(const Options& options) {
  if (options.chunks.empty()) {
    return "the dataset has no chunks; use DistributedSampler, which costs it no more";
  }
  int64_t end = 0;
  for (const RowRange& chunk : options.chunks) {
    if (chunk.begin != end || chunk.size() < 1) {
      return absl::StrCat("chunk [", chunk.begin, ", ", chunk.end, ") does not follow row ", end,
                          "; give it Dataset::chunks() as it is");
    }
    end = chunk.end;
  }
  if (options.window_chunks < 1) {
    return absl::StrCat("window_chunks is ", options.window_chunks, ", but must be at least 1");
  }
  if (options.rank < 0 || options.rank >= options.world) {
    return absl::StrCat("rank ", options.rank, " is not one of the ", options.world, " ranks");
  }
  if (options.drop_last && end < options.world) {
    return absl::StrCat("drop_last leaves nothing of ", end, " rows for ", options.world,
                        " ranks; use fewer ranks or drop_last = false");
  }
  return "";
}

}  // namespace

ChunkShuffleSampler::ChunkShuffleSampler(ChunkShuffleOptions options)
    : options_(std::make_shared<const Options>(std::move(options))) {
  const std::string wrong = Wrong(*options_);
  if (!wrong.empty()) throw StatusError(absl::InvalidArgumentError("sampler: " + wrong));
}

int64_t ChunkShuffleSampler::size() const {
  return Deal(options_->chunks.back().end, options_->world, options_->drop_last).steps();
}

std::unique_ptr<RowOrder> ChunkShuffleSampler::Order(Position from) const {
  ThrowIfError(Check(from));
  const int lanes = from.stretches.empty() ? options_->world : from.stretches[0].world;
  return std::make_unique<ShuffledOrder>(Line(options_, from.epoch, lanes),
                                         ShareOf(*options_, options_->chunks.back().end, from));
}

absl::Status ChunkShuffleSampler::Check(const Position& from) const {
  int64_t rows = 0;
  for (const Stretch& stretch : from.stretches) {
    if (stretch.world < 1 || stretch.rows < 0 || stretch.rows % stretch.world != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sampler: ", stretch.world, " ranks cannot have had ", stretch.rows,
          " rows, equally many each; save and restore the whole position of the loader"));
    }
    rows += stretch.rows;
  }
  if (rows != from.rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampler: the position is ", from.rows, " rows into the epoch, but says of ", rows,
        " only how many ranks had them; save and restore the whole position of the loader"));
  }
  return absl::OkStatus();
}

}  // namespace lockstep::data
