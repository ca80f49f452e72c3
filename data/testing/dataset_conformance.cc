#include "lockstep/data/testing/dataset_conformance.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"

namespace lockstep::data {
namespace {

using testing::HasSubstr;

std::vector<int64_t> AllRows(const Dataset& dataset) {
  std::vector<int64_t> rows(dataset.size());
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Whether `part` has the fields of `whole`, at `rows` of it.
void ExpectRows(const Batch& part, const Batch& whole, const std::vector<int64_t>& rows) {
  ASSERT_EQ(part.names(), whole.names());
  ASSERT_EQ(part.rows(), static_cast<int64_t>(rows.size()));
  for (const std::string& name : whole.names()) {
    ASSERT_EQ(part[name].scalar_type(), whole[name].scalar_type()) << name;
    ASSERT_EQ(part[name].sizes().slice(1), whole[name].sizes().slice(1)) << name;
    ASSERT_EQ(part[name].size(0), part.rows()) << name;
    ASSERT_TRUE(part[name].is_contiguous()) << name;
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_TRUE(at::equal(part[name].select(0, i), whole[name].select(0, rows[i])))
          << name << ": entry " << i << " is not row " << rows[i];
    }
  }
}

std::vector<int64_t> SomeRows(const Dataset& dataset, int count, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<int64_t> rows(count);
  for (int64_t& row : rows) row = generator() % dataset.size();
  return rows;
}

TEST_P(DatasetConformanceTest, HasRowsAndFieldsOfAsManyRows) {
  ASSERT_GE(dataset_->size(), 1);
  Batch batch;
  ASSERT_EQ(dataset_->ReadInto(AllRows(*dataset_), batch), absl::OkStatus());
  ASSERT_FALSE(batch.names().empty());
  EXPECT_EQ(batch.rows(), dataset_->size());
  ExpectRows(batch, batch, AllRows(*dataset_));
}

TEST_P(DatasetConformanceTest, GivesTheSameRowsInAnyOrderAndRepeated) {
  Batch whole, batch;
  ASSERT_EQ(dataset_->ReadInto(AllRows(*dataset_), whole), absl::OkStatus());
  std::vector<int64_t> backwards = AllRows(*dataset_);
  std::reverse(backwards.begin(), backwards.end());
  ASSERT_EQ(dataset_->ReadInto(backwards, batch), absl::OkStatus());
  ExpectRows(batch, whole, backwards);
  const int64_t last = dataset_->size() - 1;
  const std::vector<int64_t> repeated = {last, 0, last, last, 0};
  ASSERT_EQ(dataset_->ReadInto(repeated, batch), absl::OkStatus());
  ExpectRows(batch, whole, repeated);
  for (int count : {1, 3, 257}) {
    const std::vector<int64_t> rows = SomeRows(*dataset_, count, /*seed=*/count);
    ASSERT_EQ(dataset_->ReadInto(rows, batch), absl::OkStatus());
    ExpectRows(batch, whole, rows);
  }
}

TEST_P(DatasetConformanceTest, GivesTheSameRowsWhenOpenedAgain) {
  Batch first, second;
  ASSERT_EQ(dataset_->ReadInto(AllRows(*dataset_), first), absl::OkStatus());
  dataset_ = GetParam().make();
  ASSERT_EQ(dataset_->ReadInto(AllRows(*dataset_), second), absl::OkStatus());
  ExpectRows(second, first, AllRows(*dataset_));
}

TEST_P(DatasetConformanceTest, GivesNoRowsWhenAskedForNone) {
  Batch one, none;
  ASSERT_EQ(dataset_->ReadInto({0}, one), absl::OkStatus());
  ASSERT_EQ(dataset_->ReadInto({}, none), absl::OkStatus());
  ExpectRows(none, one, {});
}

TEST_P(DatasetConformanceTest, RefusesRowsThatAreNotThere) {
  const int64_t size = dataset_->size();
  Batch batch;
  for (int64_t row : {int64_t{-1}, size, size + 4096, int64_t{1} << 62}) {
    const absl::Status status = dataset_->ReadInto({0, row}, batch);
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << row;
    EXPECT_THAT(std::string{status.message()}, HasSubstr("row " + std::to_string(row)));
  }
  Batch good;
  ASSERT_EQ(dataset_->ReadInto({0}, batch), absl::OkStatus()) << "a batch is good after an error";
  ASSERT_EQ(dataset_->ReadInto({0}, good), absl::OkStatus());
  ExpectRows(batch, good, {0});
}

TEST_P(DatasetConformanceTest, ChunksCoverAllRowsOnce) {
  const std::vector<RowRange> chunks = dataset_->chunks();
  if (chunks.empty()) return;
  int64_t end = 0;
  for (const RowRange& chunk : chunks) {
    EXPECT_EQ(chunk.begin, end);
    EXPECT_GT(chunk.size(), 0);
    end = chunk.end;
  }
  EXPECT_EQ(end, dataset_->size());
}

TEST_P(DatasetConformanceTest, UsesTheMemoryOfABatchAgain) {
  Batch batch;
  const std::vector<int64_t> rows(5, 0);
  ASSERT_EQ(dataset_->ReadInto(rows, batch), absl::OkStatus());
  std::vector<const void*> memory;
  for (const std::string& name : batch.names()) memory.push_back(batch[name].data_ptr());
  for (int count : {5, 2, 5}) {
    ASSERT_EQ(dataset_->ReadInto(absl::MakeConstSpan(rows).first(count), batch), absl::OkStatus());
    for (size_t i = 0; i < memory.size(); ++i) {
      EXPECT_EQ(batch[batch.names()[i]].data_ptr(), memory[i]) << batch.names()[i];
    }
  }
}

TEST_P(DatasetConformanceTest, LeavesTensorsAloneThatAreHeld) {
  Batch batch, expected;
  ASSERT_EQ(dataset_->ReadInto({0}, batch), absl::OkStatus());
  ASSERT_EQ(dataset_->ReadInto({0}, expected), absl::OkStatus());
  std::vector<at::Tensor> held;
  for (const std::string& name : batch.names()) held.push_back(batch[name]);
  ASSERT_EQ(dataset_->ReadInto({dataset_->size() - 1}, batch), absl::OkStatus());
  for (size_t i = 0; i < held.size(); ++i) {
    EXPECT_TRUE(at::equal(held[i], expected[expected.names()[i]])) << expected.names()[i];
  }
}

TEST_P(DatasetConformanceTest, ReadsAlongAnOrder) {
  Batch whole, batch;
  ASSERT_EQ(dataset_->ReadInto(AllRows(*dataset_), whole), absl::OkStatus());
  std::vector<int64_t> backwards = AllRows(*dataset_);
  std::reverse(backwards.begin(), backwards.end());
  for (const std::vector<int64_t>& rows :
       {AllRows(*dataset_), backwards, SomeRows(*dataset_, /*count=*/1000, /*seed=*/1),
        std::vector<int64_t>{}}) {
    for (int64_t batch_size : {1, 3, 64, 4097}) {
      auto reader = dataset_->ReadInOrder(ListedOrder(rows));
      for (size_t first = 0; first < rows.size(); first += batch_size) {
        ASSERT_EQ(reader->ReadInto(batch_size, batch), absl::OkStatus());
        const size_t last = std::min(first + batch_size, rows.size());
        ExpectRows(batch, whole, {rows.begin() + first, rows.begin() + last});
      }
      ASSERT_EQ(reader->ReadInto(batch_size, batch), absl::OkStatus());
      ExpectRows(batch, whole, {});
    }
  }
}

TEST_P(DatasetConformanceTest, AReaderCanBeLeftAnywhere) {
  Batch whole, batch;
  ASSERT_EQ(dataset_->ReadInto(AllRows(*dataset_), whole), absl::OkStatus());
  for (int count : {0, 1, 3, 257}) {
    const std::vector<int64_t> rows = SomeRows(*dataset_, /*count=*/1000, /*seed=*/count);
    auto reader = dataset_->ReadInOrder(ListedOrder(rows));
    if (count == 0) continue;
    ASSERT_EQ(reader->ReadInto(count, batch), absl::OkStatus());
    ExpectRows(batch, whole, {rows.begin(), rows.begin() + count});
  }
}

TEST_P(DatasetConformanceTest, AReaderRefusesRowsThatAreNotThere) {
  for (int64_t row : {int64_t{-1}, dataset_->size(), int64_t{1} << 62}) {
    Batch batch;
    auto reader = dataset_->ReadInOrder(ListedOrder({0, row, 0}));
    ASSERT_EQ(reader->ReadInto(1, batch), absl::OkStatus()) << "the rows before it are good";
    const absl::Status status = reader->ReadInto(1, batch);
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << row;
    EXPECT_THAT(std::string{status.message()}, HasSubstr("row " + std::to_string(row)));
  }
}

TEST_P(DatasetConformanceTest, ServesSeveralThreadsAtOnceIfItSaysSo) {
  if (!dataset_->thread_safe()) return;
  Batch whole;
  ASSERT_EQ(dataset_->ReadInto(AllRows(*dataset_), whole), absl::OkStatus());
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread, &whole] {
      Batch batch;
      for (int round = 0; round < 8; ++round) {
        const auto rows =
            SomeRows(*dataset_, /*count=*/1 + 5 * round, /*seed=*/100 * thread + round);
        ASSERT_EQ(dataset_->ReadInto(rows, batch), absl::OkStatus());
        ExpectRows(batch, whole, rows);
        auto reader = dataset_->ReadInOrder(ListedOrder(rows));
        ASSERT_EQ(reader->ReadInto(rows.size(), batch), absl::OkStatus());
        ExpectRows(batch, whole, rows);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace lockstep::data
