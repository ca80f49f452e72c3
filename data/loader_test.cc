#include "lockstep/data/loader.h"

#include <ATen/Context.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Row r is the number 10 r. Fails or throws at a row when told to, and counts.
class Tens : public Dataset {
 public:
  explicit Tens(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }

  absl::Status ReadInto(absl::Span<const int64_t> rows, Batch& batch) override {
    if (absl::Status s = CheckRows(rows, size_, "tens"); !s.ok()) return s;
    int64_t* out = batch.Reserve("x", {static_cast<int64_t>(rows.size())}, at::kLong)
                       .mutable_data_ptr<int64_t>();
    for (int64_t row : rows) {
      if (row == fail_at) return absl::DataLossError("tens: row is damaged");
      if (row == throw_at) throw std::runtime_error("tens: thrown");
      *out++ = 10 * row;
    }
    {
      std::lock_guard lock(mutex_);
      memory_.insert(batch["x"].data_ptr());
      ++reads_;
    }
    read_.notify_all();
    return absl::OkStatus();
  }

  void WaitForReads(int count) {
    std::unique_lock lock(mutex_);
    read_.wait(lock, [&] { return reads_ >= count; });
  }
  int reads() {
    std::lock_guard lock(mutex_);
    return reads_;
  }
  size_t buffers() {
    std::lock_guard lock(mutex_);
    return memory_.size();
  }

  std::atomic<int64_t> fail_at{-1};
  std::atomic<int64_t> throw_at{-1};

 private:
  const int64_t size_;
  std::mutex mutex_;
  std::condition_variable read_;
  std::set<const void*> memory_;
  int reads_ = 0;
};

std::vector<int64_t> Values(const Batch& batch) {
  const int64_t* x = batch["x"].const_data_ptr<int64_t>();
  return {x, x + batch.rows()};
}

// All batches from here to the end of the epoch.
std::vector<std::vector<int64_t>> Rest(Loader& loader) {
  std::vector<std::vector<int64_t>> batches;
  for (const Batch& batch : loader) batches.push_back(Values(batch));
  return batches;
}

std::vector<int64_t> Flat(const std::vector<std::vector<int64_t>>& batches) {
  std::vector<int64_t> flat;
  for (const auto& batch : batches) flat.insert(flat.end(), batch.begin(), batch.end());
  return flat;
}

std::shared_ptr<Sampler> Sequential(int64_t size) {
  return std::make_shared<SequentialSampler>(size);
}

class LoaderTest : public testing::TestWithParam<int> {  // prefetch_batches
 protected:
  LoaderOptions Options(int64_t batch_size, bool drop_last = false) {
    return {.batch_size = batch_size, .drop_last = drop_last, .prefetch_batches = GetParam()};
  }
  std::shared_ptr<Tens> tens_ = std::make_shared<Tens>(7);
};

TEST_P(LoaderTest, HandsOutAllRowsInOrderWithASmallerLastBatch) {
  Loader loader(tens_, Sequential(7), Options(3));
  EXPECT_EQ(loader.batches_per_epoch(), 3);
  for (int epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(loader.position(), (Position{.epoch = epoch}));
    EXPECT_THAT(Rest(loader),
                ElementsAre(ElementsAre(0, 10, 20), ElementsAre(30, 40, 50), ElementsAre(60)));
  }
  EXPECT_EQ(loader.stats().batches, 9);
  EXPECT_EQ(loader.stats().rows, 21);
  EXPECT_GT(loader.stats().waited, absl::ZeroDuration());
  loader.ResetStats();
  EXPECT_EQ(loader.stats().batches, 0);
  EXPECT_EQ(loader.stats().waited, absl::ZeroDuration());
}

TEST_P(LoaderTest, DropsASmallerLastBatchWhenTold) {
  Loader loader(tens_, Sequential(7), Options(3, /*drop_last=*/true));
  EXPECT_EQ(loader.batches_per_epoch(), 2);
  EXPECT_THAT(Rest(loader), ElementsAre(ElementsAre(0, 10, 20), ElementsAre(30, 40, 50)));
  EXPECT_EQ(loader.position(), (Position{.epoch = 1}));
  ASSERT_TRUE(loader.Seek({.epoch = 1, .rows = 5}).ok());
  EXPECT_THAT(Rest(loader), IsEmpty()) << "two rows are left, no batch of three";
  EXPECT_EQ(loader.position(), (Position{.epoch = 2}));
}

TEST_P(LoaderTest, ABatchLargerThanTheDatasetIsOneBatch) {
  Loader loader(tens_, Sequential(7), Options(100));
  EXPECT_THAT(Rest(loader), ElementsAre(ElementsAre(0, 10, 20, 30, 40, 50, 60)));
}

TEST_P(LoaderTest, ALoopLeftEarlyGoesOnAfterTheLastBatchHandedOut) {
  Loader loader(tens_, Sequential(7), Options(2));
  for (const Batch& batch : loader) {
    if (Values(batch)[0] == 20) break;
  }
  EXPECT_EQ(loader.position(), (Position{.rows = 4, .stretches = {{.world = 1, .rows = 4}}}));
  EXPECT_THAT(Rest(loader), ElementsAre(ElementsAre(40, 50), ElementsAre(60)));
}

TEST_P(LoaderTest, SetEpochStartsAnew) {
  auto sampler = std::make_shared<DistributedSampler>(DistributedSamplerOptions{.size = 7});
  Loader loader(tens_, sampler, Options(2));
  const auto first = Rest(loader);
  const auto second = Rest(loader);
  EXPECT_NE(first, second);
  loader.SetEpoch(1);
  ASSERT_TRUE(loader.Next().ok());
  loader.SetEpoch(1);
  EXPECT_EQ(Rest(loader), second);
  loader.SetEpoch(0);
  EXPECT_EQ(Rest(loader), first);
}

TEST_P(LoaderTest, ResumesAtTheExactRowFromEveryPosition) {
  const int64_t size = 23;
  auto tens = std::make_shared<Tens>(size);
  auto sampler = std::make_shared<DistributedSampler>(
      DistributedSamplerOptions{.size = size, .rank = 1, .world = 2, .seed = 5});
  Loader whole(tens, sampler, Options(5));
  whole.SetEpoch(3);
  std::vector<std::vector<int64_t>> rest = Rest(whole);
  ASSERT_EQ(rest.size(), 3);
  whole.SetEpoch(3);
  while (!rest.empty()) {
    Loader resumed(tens, sampler, Options(5));
    ASSERT_TRUE(resumed.Seek(whole.position()).ok());
    EXPECT_EQ(resumed.position(), whole.position());
    EXPECT_EQ(Rest(resumed), rest);
    ASSERT_TRUE(whole.Next().ok());
    rest.erase(rest.begin());
  }
}

TEST_P(LoaderTest, ResumesAtAnotherWorldSize) {
  const int64_t size = 24;
  auto tens = std::make_shared<Tens>(size);
  auto loader = [&](int rank, int world) {
    return std::make_unique<Loader>(tens,
                                    std::make_shared<DistributedSampler>(DistributedSamplerOptions{
                                        .size = size, .rank = rank, .world = world}),
                                    Options(3));
  };
  std::multiset<int64_t> seen;
  Position position;
  for (int rank = 0; rank < 4; ++rank) {
    auto mine = loader(rank, 4);
    for (int64_t value : Values(**mine->Next())) seen.insert(value);
    position = mine->position();
    EXPECT_EQ(position, (Position{.rows = 12, .stretches = {{.world = 4, .rows = 12}}}));
  }
  for (int rank = 0; rank < 3; ++rank) {
    auto mine = loader(rank, 3);
    ASSERT_TRUE(mine->Seek(position).ok());
    for (int64_t value : Flat(Rest(*mine))) seen.insert(value);
  }
  std::multiset<int64_t> all;
  for (int64_t row = 0; row < size; ++row) all.insert(10 * row);
  EXPECT_EQ(seen, all);
}

TEST_P(LoaderTest, AnErrorComesInItsTurnAndStaysUntilSeek) {
  tens_->fail_at = 4;
  Loader loader(tens_, Sequential(7), Options(2));
  ASSERT_TRUE(loader.Seek({.epoch = 6, .rows = 1}).ok());
  EXPECT_THAT(Values(**loader.Next()), ElementsAre(10, 20));
  const absl::Status expected =
      absl::DataLossError("epoch 6, batch 1 from row 1 of its order: tens: row is damaged");
  EXPECT_EQ(loader.Next().status(), expected);
  EXPECT_EQ(loader.Next().status(), expected);
  EXPECT_EQ(loader.position(), (Position{.epoch = 6, .rows = 3}));
  try {
    Rest(loader);
    FAIL() << "did not throw";
  } catch (const StatusError& error) {
    EXPECT_EQ(error.status(), expected);
  }
  tens_->fail_at = -1;
  ASSERT_TRUE(loader.Seek(loader.position()).ok());
  EXPECT_THAT(Rest(loader), ElementsAre(ElementsAre(30, 40), ElementsAre(50, 60)));
}

TEST_P(LoaderTest, WhatADatasetThrowsIsAnError) {
  tens_->throw_at = 0;
  Loader loader(tens_, Sequential(7), Options(2));
  EXPECT_EQ(loader.Next().status(),
            absl::InternalError("epoch 0, batch 0 from row 0 of its order: tens: thrown"));
}

TEST_P(LoaderTest, ASamplerForAnotherDatasetIsAnError) {
  Loader loader(tens_, Sequential(9), Options(9));
  EXPECT_EQ(loader.Next().status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string{loader.Next().status().message()},
              HasSubstr("tens: row 7 was asked for, but there are rows 0 to 6 only"));
}

// Notes the orders that it is given, and reads along them.
class Noting : public Tens {
 public:
  using Tens::Tens;
  std::unique_ptr<OrderedReader> ReadInOrder(std::unique_ptr<RowOrder> order) override {
    std::vector<int64_t> rows(order->left());
    order->Take(absl::MakeSpan(rows));
    orders.push_back(rows);
    return Tens::ReadInOrder(ListedOrder(rows));
  }
  std::vector<std::vector<int64_t>> orders;
};

TEST_P(LoaderTest, TellsTheDatasetTheRestOfTheEpoch) {
  auto noting = std::make_shared<Noting>(7);
  Loader loader(noting, Sequential(7), Options(3));
  Rest(loader);
  ASSERT_TRUE(loader.Seek({.epoch = 1, .rows = 4}).ok());
  Rest(loader);
  EXPECT_THAT(noting->orders, ElementsAre(ElementsAre(0, 1, 2, 3, 4, 5, 6), ElementsAre(4, 5, 6)));
}

TEST_P(LoaderTest, UsesAFixedNumberOfBuffers) {
  auto tens = std::make_shared<Tens>(300);
  Loader loader(tens, Sequential(300), Options(7));
  for (int epoch = 0; epoch < 5; ++epoch) EXPECT_EQ(Rest(loader).size(), 43);
  EXPECT_EQ(tens->buffers(), GetParam() + 1);
}

TEST_P(LoaderTest, ATensorThatIsHeldKeepsItsValues) {
  Loader loader(tens_, Sequential(7), Options(1));
  std::vector<at::Tensor> held;
  for (const Batch& batch : loader) held.push_back(batch["x"]);
  for (size_t i = 0; i < held.size(); ++i) {
    EXPECT_EQ(held[i].const_data_ptr<int64_t>()[0], 10 * i);
  }
}

TEST_P(LoaderTest, CanBeDestroyedAtAnyPoint) {
  { Loader never_used(tens_, Sequential(7), Options(2)); }
  for (int taken = 1; taken <= 5; ++taken) {
    for (int64_t fail_at : {-1, 3}) {
      tens_->fail_at = fail_at;
      Loader loader(tens_, Sequential(7), Options(2));
      for (int i = 0; i < taken; ++i) (void)loader.Next();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Prefetch, LoaderTest, testing::Values(0, 1, 2, 5));

TEST(Loader, TakesASamplerAndADatasetAsTheyAreMade) {
  Loader loader(std::make_unique<Tens>(5), DistributedSampler({.size = 5, .shuffle = false}),
                {.batch_size = 3});
  EXPECT_THAT(Rest(loader), ElementsAre(ElementsAre(0, 10, 20), ElementsAre(30, 40)));
}

TEST(Loader, ReadsAheadAsFarAsToldAndDoesNotCountIt) {
  auto tens = std::make_shared<Tens>(100);
  Loader loader(tens, Sequential(100), {.batch_size = 1, .prefetch_batches = 4});
  EXPECT_EQ(tens->reads(), 0) << "nothing is read before the first batch is asked for";
  ASSERT_TRUE(loader.Next().ok());
  tens->WaitForReads(5);
  ASSERT_TRUE(loader.Next().ok());
  tens->WaitForReads(6);
  EXPECT_EQ(loader.position(), (Position{.rows = 2, .stretches = {{.world = 1, .rows = 2}}}));
  EXPECT_EQ(tens->buffers(), 5);
}

TEST(Loader, Refusals) {
  auto error = [](LoaderOptions options) {
    try {
      Loader(std::make_shared<Tens>(7), Sequential(7), options);
    } catch (const StatusError& error) {
      return error.status();
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(error({.batch_size = 0}),
            absl::InvalidArgumentError("loader: batch_size is 0, but must be at least 1"));
  EXPECT_EQ(error({.prefetch_batches = -1}),
            absl::InvalidArgumentError(
                "loader: prefetch_batches is -1, but must be 0 (read when asked) or more"));
  if (!at::globalContext().hasCUDA()) {
    EXPECT_EQ(error({.pin_memory = true}),
              absl::InvalidArgumentError(
                  "loader: pin_memory is for copies to a GPU, and LibTorch finds none here"));
  }
  EXPECT_EQ(error({.batch_size = 8, .drop_last = true}),
            absl::InvalidArgumentError("loader: drop_last leaves no batch of 8 rows: this rank has "
                                       "7 in an epoch; use smaller batches or fewer ranks"));
  EXPECT_EQ(error({.batch_size = 7, .drop_last = true}), absl::OkStatus());
  Loader loader(std::make_shared<Tens>(7), Sequential(7), {});
  EXPECT_EQ(
      loader.Seek({.epoch = 0, .rows = -1}),
      absl::InvalidArgumentError("loader: cannot go to epoch 0, row -1: neither may be negative"));
  EXPECT_THROW(loader.SetEpoch(-1), StatusError);
}

}  // namespace
}  // namespace lockstep::data
