#include "lockstep/data/sampler.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/random.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

template <typename F>
absl::Status ErrorOf(F f) {
  try {
    f();
  } catch (const StatusError& error) {
    return error.status();
  }
  return absl::OkStatus();
}

std::vector<int64_t> Iota(int64_t size) {
  std::vector<int64_t> rows(size);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Entries of all ranks, put back into the order that they were dealt from.
std::vector<int64_t> Together(DistributedSamplerOptions options, Position from) {
  std::vector<std::vector<int64_t>> ranks;
  for (options.rank = 0; options.rank < options.world; ++options.rank) {
    ranks.push_back(DistributedSampler(options).Rows(from));
  }
  std::vector<int64_t> order;
  for (size_t i = 0; i < ranks[0].size(); ++i) {
    for (const auto& rank : ranks) order.push_back(rank.at(i));
  }
  return order;
}

class DealsRows : public testing::TestWithParam<std::tuple<int64_t, int>> {};

TEST_P(DealsRows, PaddedFromTheStartOfTheOrder) {
  const auto [size, world] = GetParam();
  for (bool shuffle : {false, true}) {
    const DistributedSamplerOptions options = {
        .size = size, .world = world, .seed = 7, .shuffle = shuffle};
    const int64_t each = (size + world - 1) / world;
    for (int rank = 0; rank < world; ++rank) {
      DistributedSamplerOptions mine = options;
      mine.rank = rank;
      EXPECT_EQ(DistributedSampler(mine).size(), each);
      EXPECT_EQ(DistributedSampler(mine).Rows({.epoch = 2}).size(), each);
      EXPECT_EQ(DistributedSampler(mine).world(), world);
    }
    std::vector<int64_t> together = Together(options, {.epoch = 2});
    ASSERT_EQ(together.size(), each * world);
    std::vector<int64_t> once(together.begin(), together.begin() + size);
    for (size_t i = size; i < together.size(); ++i) EXPECT_EQ(together[i], once[i % size]);
    if (!shuffle) {
      EXPECT_EQ(once, Iota(size));
    }
    std::sort(once.begin(), once.end());
    EXPECT_EQ(once, Iota(size));
  }
}

TEST_P(DealsRows, DisjointlyWhenTheRestIsDropped) {
  const auto [size, world] = GetParam();
  const DistributedSamplerOptions options = {
      .size = size, .world = world, .seed = 7, .drop_last = true};
  if (size < world) {
    EXPECT_EQ(ErrorOf([&] { DistributedSampler{options}; }).code(),
              absl::StatusCode::kInvalidArgument);
    return;
  }
  EXPECT_EQ(DistributedSampler(options).size(), size / world);
  std::vector<int64_t> together = Together(options, {.epoch = 1});
  EXPECT_EQ(together.size(), size / world * world);
  std::set<int64_t> different(together.begin(), together.end());
  EXPECT_EQ(different.size(), together.size());
  EXPECT_GE(*different.begin(), 0);
  EXPECT_LT(*different.rbegin(), size);
}

TEST_P(DealsRows, TheSameRowsRemainAtAnyWorldSize) {
  const auto [size, world] = GetParam();
  for (int64_t done : {int64_t{0}, size / 2, size - 1}) {
    const std::vector<int64_t> order = Permutation(size, 3, 5);
    const std::vector<int64_t> rest =
        Together({.size = size, .world = world, .seed = 3}, {.epoch = 5, .rows = done});
    ASSERT_GE(rest.size(), size - done);
    ASSERT_LT(rest.size(), size - done + world);
    for (size_t i = 0; i < rest.size(); ++i) EXPECT_EQ(rest[i], order[(done + i) % size]);
  }
  EXPECT_THAT(Together({.size = size, .world = world}, {.rows = size}), IsEmpty());
  EXPECT_THAT(Together({.size = size, .world = world}, {.rows = size + 99}), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(AwkwardSizes, DealsRows,
                         testing::Combine(testing::Values(1, 2, 3, 10, 257, 4097),
                                          testing::Values(1, 2, 3, 4, 7, 64)));

// What torch.utils.data.DistributedSampler(range(10), 4, rank, shuffle=False) gives.
TEST(DistributedSampler, GivesPyTorchsIndices) {
  auto rows = [](int64_t size, int rank, bool drop_last) {
    return DistributedSampler(
               {.size = size, .rank = rank, .world = 4, .shuffle = false, .drop_last = drop_last})
        .Rows({.epoch = 0});
  };
  EXPECT_THAT(rows(10, 0, false), ElementsAre(0, 4, 8));
  EXPECT_THAT(rows(10, 1, false), ElementsAre(1, 5, 9));
  EXPECT_THAT(rows(10, 2, false), ElementsAre(2, 6, 0));
  EXPECT_THAT(rows(10, 3, false), ElementsAre(3, 7, 1));
  EXPECT_THAT(rows(10, 3, true), ElementsAre(3, 7));
  EXPECT_THAT(rows(1, 3, false), ElementsAre(0));
  EXPECT_THAT(rows(3, 3, false), ElementsAre(0));
}

TEST(DistributedSampler, IsAPureFunctionOfSeedAndEpoch) {
  auto rows = [](uint64_t seed, int64_t epoch) {
    return DistributedSampler({.size = 257, .rank = 1, .world = 2, .seed = seed})
        .Rows({.epoch = epoch});
  };
  EXPECT_EQ(rows(1, 3), rows(1, 3));
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed : {0, 1, 2}) {
    for (int64_t epoch : {0, 1, 2}) orders.insert(rows(seed, epoch));
  }
  EXPECT_EQ(orders.size(), 9) << "(0, 1) and (1, 0) must differ too";
}

TEST(DistributedSampler, Refusals) {
  EXPECT_EQ(ErrorOf([] { DistributedSampler({.size = 0}); }),
            absl::InvalidArgumentError("sampler: a dataset of 0 rows has nothing to sample"));
  EXPECT_EQ(ErrorOf([] { SequentialSampler(-1); }),
            absl::InvalidArgumentError("sampler: a dataset of -1 rows has nothing to sample"));
  EXPECT_EQ(ErrorOf([] { DistributedSampler({.size = 9, .rank = 4, .world = 4}); }),
            absl::InvalidArgumentError("sampler: rank 4 is not one of the 4 ranks"));
  EXPECT_EQ(ErrorOf([] { DistributedSampler({.size = 9, .rank = -1}); }),
            absl::InvalidArgumentError("sampler: rank -1 is not one of the 1 ranks"));
  EXPECT_EQ(ErrorOf([] { DistributedSampler({.size = 9, .world = 0}); }),
            absl::InvalidArgumentError("sampler: rank 0 is not one of the 0 ranks"));
  EXPECT_EQ(ErrorOf([] { DistributedSampler({.size = 3, .world = 4, .drop_last = true}); }),
            absl::InvalidArgumentError("sampler: drop_last leaves nothing of 3 rows for 4 ranks; "
                                       "use fewer ranks or drop_last = false"));
}

TEST(SequentialSampler, GoesThroughAllRows) {
  SequentialSampler sampler(5);
  EXPECT_EQ(sampler.size(), 5);
  EXPECT_EQ(sampler.world(), 1);
  EXPECT_THAT(sampler.Rows({.epoch = 4}), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(sampler.Rows({.epoch = 0, .rows = 3}), ElementsAre(3, 4));
  EXPECT_THAT(sampler.Rows({.epoch = 0, .rows = 7}), IsEmpty());
}

// The order is part of what a checkpoint means: it must not change between releases.
TEST(Permutation, IsTheSameEverywhere) {
  EXPECT_EQ(Mix(0), 0xe220a8397b1dcdaf);  // the first number of splitmix64 with seed 0
  EXPECT_THAT(Permutation(1, 0, 0), ElementsAre(0));
  EXPECT_THAT(Permutation(8, 1, 2), ElementsAre(1, 4, 0, 2, 7, 5, 3, 6));
}

TEST(Permutation, AllOrdersAreEquallyLikely) {
  std::map<std::vector<int64_t>, int> counts;
  for (int epoch = 0; epoch < 24'000; ++epoch) ++counts[Permutation(4, 11, epoch)];
  EXPECT_EQ(counts.size(), 24);
  // 1000 expected, standard deviation 31; a pure function of fixed seeds, so never flaky.
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 1000, 125);
}

}  // namespace
}  // namespace lockstep::data
