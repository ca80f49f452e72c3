#include "lockstep/data/chunk_shuffle_sampler.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/synthetic/synthetic.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<RowRange> Chunks(int64_t size, int64_t rows_per_chunk) {
  std::vector<RowRange> chunks;
  for (int64_t begin = 0; begin < size; begin += rows_per_chunk) {
    chunks.push_back({begin, std::min(begin + rows_per_chunk, size)});
  }
  return chunks;
}

std::vector<std::vector<int64_t>> AllRanks(ChunkShuffleOptions options, const Position& from) {
  std::vector<std::vector<int64_t>> ranks;
  for (options.rank = 0; options.rank < options.world; ++options.rank) {
    ranks.push_back(ChunkShuffleSampler(options).Rows(from));
  }
  return ranks;
}

std::vector<int> TimesSeen(const std::vector<std::vector<int64_t>>& ranks, int64_t size) {
  std::vector<int> times(size, 0);
  for (const auto& rows : ranks) {
    for (int64_t row : rows) ++times.at(row);
  }
  return times;
}

class ChunkShuffle : public testing::TestWithParam<std::tuple<int64_t, int64_t, int, int64_t>> {
 protected:
  int64_t size_ = std::get<0>(GetParam());
  int64_t rows_per_chunk_ = std::get<1>(GetParam());
  int world_ = std::get<2>(GetParam());
  ChunkShuffleOptions options_ = {.chunks = Chunks(size_, rows_per_chunk_),
                                  .window_chunks = std::get<3>(GetParam()),
                                  .world = world_,
                                  .seed = 7};
};

TEST_P(ChunkShuffle, EveryRankHasEquallyManyRowsAndEveryRowIsSeen) {
  const auto ranks = AllRanks(options_, {.epoch = 2});
  const int64_t each = (size_ + world_ - 1) / world_;
  for (const auto& rows : ranks) EXPECT_EQ(rows.size(), each);
  EXPECT_EQ(ChunkShuffleSampler(options_).size(), each);
  const std::vector<int> times = TimesSeen(ranks, size_);
  EXPECT_THAT(times, Each(testing::Ge(1)));
  EXPECT_EQ(std::accumulate(times.begin(), times.end(), 0), each * world_);
  // A padded rank repeats its last row.
  for (const auto& rows : ranks) {
    std::set<int64_t> different(rows.begin(), rows.end());
    if (static_cast<int64_t>(different.size()) == each) continue;
    EXPECT_EQ(static_cast<int64_t>(different.size()), each - 1);
    EXPECT_EQ(rows[each - 1], rows[each - 2]);
  }
}

TEST_P(ChunkShuffle, DropsTheTailWhenTold) {
  options_.drop_last = true;
  if (size_ < world_) return;
  const auto ranks = AllRanks(options_, {.epoch = 2});
  for (const auto& rows : ranks) EXPECT_EQ(rows.size(), size_ / world_);
  const std::vector<int> times = TimesSeen(ranks, size_);
  EXPECT_THAT(times, Each(testing::Le(1)));
  EXPECT_EQ(std::accumulate(times.begin(), times.end(), int64_t{0}), size_ / world_ * world_);
}

// A chunk is read again if it comes back after as many others as fit in memory; here: when a row
// of it comes after a window without it.
TEST_P(ChunkShuffle, OnlyChunksAcrossLanesAreReadTwice) {
  std::map<int64_t, int> readers;
  for (const auto& rows : AllRanks(options_, {.epoch = 5})) {
    std::map<int64_t, std::pair<int64_t, int64_t>> span;  // first and last use of each chunk
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t chunk = rows[i] / rows_per_chunk_;
      span.try_emplace(chunk, i, i).first->second.second = i;
    }
    // At no point are more than window_chunks chunks between their first and last use.
    std::map<int64_t, int64_t> change;
    for (const auto& [chunk, use] : span) {
      ++readers[chunk];
      ++change[use.first];
      --change[use.second + 1];
    }
    int64_t open = 0;
    for (const auto& [at, delta] : change) {
      open += delta;
      EXPECT_LE(open, options_.window_chunks);
    }
  }
  int64_t twice = 0;
  for (const auto& [chunk, count] : readers) twice += count - 1;
  if (size_ >= world_) {
    EXPECT_LE(twice, world_ - 1);
  }
}

TEST_P(ChunkShuffle, ResumesExactlyFromEveryStep) {
  for (bool drop_last : {false, true}) {
    options_.drop_last = drop_last;
    if (drop_last && size_ < world_) return;
    options_.rank = world_ - 1;
    const ChunkShuffleSampler sampler(options_);
    const std::vector<int64_t> whole = sampler.Rows({.epoch = 3});
    for (int64_t done = 0; done <= sampler.size(); done += 1 + sampler.size() / 7) {
      Position from = {.epoch = 3};
      from.Advance(world_, done * world_);
      EXPECT_EQ(sampler.Rows(from), std::vector<int64_t>(whole.begin() + done, whole.end()));
    }
    Position past = {.epoch = 3};
    past.Advance(world_, (sampler.size() + 5) * world_);
    EXPECT_THAT(sampler.Rows(past), IsEmpty());
  }
}

TEST_P(ChunkShuffle, EveryRowOnceAcrossChangesOfTheWorldSize) {
  Position position = {.epoch = 1};
  std::vector<int> times(size_, 0);
  int64_t padding = 0;
  for (int world : {world_, 3, 1, 5, 2}) {
    options_.world = world;
    const auto ranks = AllRanks(options_, position);
    const auto left = static_cast<int64_t>(ranks[0].size());
    const int64_t steps = world == 2 ? left : left / 3;
    for (const auto& rows : ranks) {
      ASSERT_EQ(static_cast<int64_t>(rows.size()), left);
      for (int64_t i = 0; i < steps; ++i) ++times.at(rows[i]);
    }
    if (steps == left) {
      padding = std::accumulate(times.begin(), times.end(), int64_t{0}) - size_;
    }
    position.Advance(world, steps * world);
  }
  EXPECT_THAT(times, Each(testing::Ge(1)));
  EXPECT_LE(padding, 1) << "the last two ranks were padded by a row at most";
}

INSTANTIATE_TEST_SUITE_P(AwkwardSizes, ChunkShuffle,
                         testing::Combine(testing::Values(1, 2, 3, 10, 257, 4097),
                                          testing::Values(1, 7, 64, 5000),
                                          testing::Values(1, 2, 3, 4, 7),
                                          testing::Values(1, 3, 16)));

TEST(ChunkShuffleSampler, IsAPureFunctionOfSeedAndEpoch) {
  const auto rows = [](uint64_t seed, int64_t epoch) {
    return ChunkShuffleSampler({.chunks = Chunks(257, 10), .rank = 1, .world = 2, .seed = seed})
        .Rows({.epoch = epoch});
  };
  EXPECT_EQ(rows(1, 3), rows(1, 3));
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed : {0, 1, 2}) {
    for (int64_t epoch : {0, 1, 2}) orders.insert(rows(seed, epoch));
  }
  EXPECT_EQ(orders.size(), 9);
}

// The order is part of what a checkpoint means: it must not change between releases.
TEST(ChunkShuffleSampler, IsTheSameEverywhere) {
  EXPECT_THAT(ChunkShuffleSampler(
                  {.chunks = Chunks(10, 3), .window_chunks = 2, .rank = 0, .world = 2, .seed = 1})
                  .Rows({.epoch = 2}),
              ElementsAre(6, 7, 2, 0, 1));
}

TEST(ChunkShuffleSampler, TakesPiecesOfAnySize) {
  const ChunkShuffleSampler sampler({.chunks = Chunks(1000, 7), .window_chunks = 5, .seed = 3});
  const std::vector<int64_t> whole = sampler.Rows({});
  for (int64_t piece : {1, 3, 64, 4096}) {
    const std::unique_ptr<RowOrder> order = sampler.Order({});
    std::vector<int64_t> rows(piece), all;
    while (int64_t count = order->Take(absl::MakeSpan(rows))) {
      all.insert(all.end(), rows.begin(), rows.begin() + count);
      EXPECT_EQ(order->left(), 1000 - static_cast<int64_t>(all.size()));
    }
    EXPECT_EQ(all, whole);
  }
}

// How well it shuffles rows that are stored sorted by their label, the worst of storage orders:
// labels of a batch against those of a full shuffle.
TEST(ChunkShuffleSampler, MixesSortedRowsNearlyAsWellAsAFullShuffle) {
  constexpr int64_t kSize = 60'000, kBatch = 100, kClasses = 10;
  // The mean over batches of chi squared: 9, the degrees of freedom, for a perfect shuffle.
  const auto chi_squared = [](const std::vector<int64_t>& rows) {
    double sum = 0;
    for (size_t first = 0; first < rows.size(); first += kBatch) {
      std::vector<double> count(kClasses, 0);
      for (int64_t i = 0; i < kBatch; ++i) ++count[rows[first + i] * kClasses / kSize];
      for (double c : count) sum += (c - 10) * (c - 10) / 10;
    }
    return sum / (kSize / kBatch);
  };
  const auto windows_of = [](int64_t chunks) {
    return ChunkShuffleSampler({.chunks = Chunks(kSize, 100), .window_chunks = chunks, .seed = 1})
        .Rows({});
  };
  EXPECT_EQ(chi_squared(SequentialSampler(kSize).Rows({})), 900);
  const double full = chi_squared(DistributedSampler({.size = kSize, .seed = 1}).Rows({}));
  EXPECT_NEAR(full, 9, 0.5);
  EXPECT_NEAR(chi_squared(windows_of(1)), 900, 1) << "batches of one chunk each";
  // A window of W chunks adds the spread of W draws of a class: (9 + 900 / W) about.
  EXPECT_NEAR(chi_squared(windows_of(10)), 9 + 90, 15);
  EXPECT_NEAR(chi_squared(windows_of(100)), 9 + 9, 3);
  EXPECT_NEAR(chi_squared(windows_of(600)), full, 0.7) << "one window is a full shuffle";
  // Neighbours in the order are no neighbours in storage.
  const std::vector<int64_t> rows = windows_of(100);
  int64_t neighbours = 0;
  for (size_t i = 1; i < rows.size(); ++i) neighbours += std::abs(rows[i] - rows[i - 1]) < 100;
  EXPECT_LT(neighbours, 1.3 * kSize / 100) << "one in a hundred shares a chunk with the one before";
}

TEST(ChunkShuffleSampler, ALoaderResumesAtAnotherWorldSize) {
  const std::shared_ptr<Dataset> dataset =
      ValueOrThrow(synthetic::Create({.size = 1001, .shape = {1}, .rows_per_chunk = 10}));
  const auto loader = [&](int rank, int world) {
    return std::make_unique<Loader>(
        dataset, ChunkShuffleSampler({.chunks = dataset->chunks(), .rank = rank, .world = world}),
        LoaderOptions{.batch_size = 16});
  };
  std::multiset<float> seen, all;
  const auto take = [&](Loader& loader, int batches) {
    for (int i = 0; i < batches; ++i) {
      const Batch* batch = ValueOrThrow(loader.Next());
      if (batch == nullptr) return;
      const float* pixel = (*batch)["images"].const_data_ptr<float>();
      seen.insert(pixel, pixel + batch->rows());
    }
  };
  std::string saved;
  for (int rank = 0; rank < 4; ++rank) {
    auto mine = loader(rank, 4);
    ThrowIfError(mine->Seek({.epoch = 2}));
    take(*mine, 5);
    saved = ToString(mine->position());
    EXPECT_EQ(saved, "2:320/4");
  }
  for (int rank = 0; rank < 3; ++rank) {
    auto mine = loader(rank, 3);
    ThrowIfError(mine->Seek(ValueOrThrow(ParsePosition("2:320/4"))));
    take(*mine, 2);
    saved = ToString(mine->position());
    EXPECT_EQ(saved, "2:320/4+96/3");
  }
  auto last = loader(0, 1);
  ThrowIfError(last->Seek(ValueOrThrow(ParsePosition(saved))));
  take(*last, 1000);
  for (int64_t row = 0; row < 1001; ++row) all.insert(synthetic::Pixel(0, row, 0));
  EXPECT_EQ(seen, all);
}

std::string ErrorOf(const ChunkShuffleOptions& options) {
  try {
    ChunkShuffleSampler{options};
  } catch (const StatusError& error) {
    EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string{error.status().message()};
  }
  return "none";
}

TEST(ChunkShuffleSampler, Refusals) {
  EXPECT_EQ(ErrorOf({}),
            "sampler: the dataset has no chunks; use DistributedSampler, which costs it no more");
  EXPECT_EQ(ErrorOf({.chunks = {{0, 3}, {4, 5}}}),
            "sampler: chunk [4, 5) does not follow row 3; give it Dataset::chunks() as it is");
  EXPECT_EQ(ErrorOf({.chunks = {{0, 3}}, .window_chunks = 0}),
            "sampler: window_chunks is 0, but must be at least 1");
  EXPECT_EQ(ErrorOf({.chunks = {{0, 3}}, .rank = 2, .world = 2}),
            "sampler: rank 2 is not one of the 2 ranks");
  EXPECT_EQ(ErrorOf({.chunks = {{0, 3}}, .world = 4, .drop_last = true}),
            "sampler: drop_last leaves nothing of 3 rows for 4 ranks; use fewer ranks or drop_last "
            "= false");
  const ChunkShuffleSampler sampler({.chunks = Chunks(100, 7), .world = 2});
  EXPECT_EQ(sampler.Check({.rows = 10}),
            absl::InvalidArgumentError(
                "sampler: the position is 10 rows into the epoch, but says of 0 only how many "
                "ranks had them; save and restore the whole position of the loader"));
  EXPECT_EQ(sampler.Check({.rows = 10, .stretches = {{.world = 3, .rows = 10}}}),
            absl::InvalidArgumentError(
                "sampler: 3 ranks cannot have had 10 rows, equally many each; save and restore "
                "the whole position of the loader"));
}

TEST(Position, IsOneWord) {
  Position position = {.epoch = 3};
  EXPECT_EQ(ToString(position), "3:");
  position.Advance(4, 1000);
  position.Advance(4, 400);
  position.Advance(3, 600);
  EXPECT_EQ(ToString(position), "3:1400/4+600/3");
  Position unknown = {.epoch = 1, .rows = 5};
  unknown.Advance(2, 8);
  EXPECT_EQ(ToString(unknown), "1:13") << "who had the first 5 rows stays unknown";
  for (const std::string text : {"3:1400/4+600/3", "3:", "0:", "7:5/1", "3:17"}) {
    EXPECT_EQ(ToString(ValueOrThrow(ParsePosition(text))), text);
  }
  EXPECT_EQ(ValueOrThrow(ParsePosition("3:1400/4+600/3")), position);
  EXPECT_EQ(ParsePosition("3").status(),
            absl::InvalidArgumentError(
                "'3' is no position of a loader, which looks like 3:1000/4+600/3"));
  for (const char* text : {"", ":", "-1:", "3:4/0", "3:-4/1", "3:0", "3:1/2+", "3:1/2/3", "3:x"}) {
    EXPECT_EQ(ParsePosition(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace lockstep::data
