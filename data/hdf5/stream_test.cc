#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/chunk_shuffle_sampler.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/hdf5/test_files.h"
#include "lockstep/data/loader.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr int64_t kRows = 4097;
constexpr int64_t kValues = 64;  // of a row
constexpr int64_t kChunkRows = 16;
constexpr int64_t kBudget = 128 << 10;  // the rows take 256 KiB

std::string Path(int gzip) {
  static std::map<int, std::string> paths;
  std::string& path = paths[gzip];
  if (path.empty()) {
    path =
        MakeFile("a.h5", {{.sizes = {kRows, kValues}, .chunk = {kChunkRows, kValues}, .gzip = gzip},
                          {.name = "labels", .sizes = {kRows}, .chunk = {1000}, .gzip = gzip}});
  }
  return path;
}

std::shared_ptr<Hdf5Dataset> OpenIt(int gzip, int threads = 2, int64_t budget = kBudget) {
  return ValueOrThrow(
      Open({.files = {Path(gzip)}, .memory_budget_bytes = budget, .decode_threads = threads}));
}

ChunkShuffleSampler Sampler(const Dataset& dataset, int rank = 0, int world = 1,
                            bool drop_last = false) {
  return ChunkShuffleSampler({.chunks = dataset.chunks(),
                              .window_chunks = dataset.window_chunks(),
                              .rank = rank,
                              .world = world,
                              .seed = 3,
                              .drop_last = drop_last});
}

// The bytes of a batch.
std::string Content(const Batch& batch) {
  std::string content;
  for (const std::string& name : batch.names()) {
    content.append(static_cast<const char*>(batch[name].const_data_ptr()), batch[name].nbytes());
  }
  return content;
}

std::vector<std::string> Rest(Loader& loader) {
  std::vector<std::string> batches;
  for (const Batch& batch : loader) batches.push_back(Content(batch));
  return batches;
}

void ExpectRowsOf(const Batch& batch, const std::vector<int64_t>& rows, size_t first) {
  const uint8_t* value = batch["images"].const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < batch.rows(); ++i) {
    const int64_t row = rows.at(first + i);
    ASSERT_EQ(batch["labels"].const_data_ptr<int64_t>()[i], Value(row, 0));
    for (int64_t e = 0; e < kValues; ++e) ASSERT_EQ(*value++, Value(row, e)) << row;
  }
}

class Streams : public testing::TestWithParam<int> {};  // gzip

TEST_P(Streams, EachChunkIsReadOnceAnEpochInBoundedMemory) {
  auto dataset = OpenIt(GetParam());
  EXPECT_GT(dataset->window_chunks(), 16) << "else this tests little";
  const int64_t images = (kRows + kChunkRows - 1) / kChunkRows;
  const int64_t labels = (kRows + 999) / 1000;
  const ChunkShuffleSampler sampler = Sampler(*dataset);
  Loader loader(dataset, sampler, {.batch_size = 50});
  for (int epoch = 0; epoch < 3; ++epoch) {
    const std::vector<int64_t> rows = sampler.Rows({.epoch = epoch});
    size_t first = 0;
    for (const Batch& batch : loader) {
      ExpectRowsOf(batch, rows, first);
      first += batch.rows();
    }
    EXPECT_EQ(first, kRows);
    EXPECT_EQ(dataset->stats().chunks_read, (epoch + 1) * images + labels);
  }
  const Stats stats = dataset->stats();
  EXPECT_LE(stats.peak_memory_bytes, kBudget);
  EXPECT_GT(stats.reading, absl::ZeroDuration());
  EXPECT_EQ(stats.decoding > absl::ZeroDuration(), GetParam() > 0);
  if (GetParam() == 0) {
    EXPECT_EQ(stats.bytes_read, 3 * images * kChunkRows * kValues + labels * 1000);
  } else {
    EXPECT_LT(stats.bytes_read, 3 * images * kChunkRows * kValues / 2);
  }
}

// Which of the two is ahead in an epoch is for the scheduler to say.
TEST_P(Streams, ReaderAndBatchesWaitForEachOther) {
  auto dataset = OpenIt(GetParam());
  Loader loader(dataset, Sampler(*dataset), {.batch_size = 50});
  const auto both_waited = [&] {
    const Stats stats = dataset->stats();
    return stats.waited_for_memory > absl::ZeroDuration() &&
           stats.waited_for_chunks > absl::ZeroDuration();
  };
  for (int epoch = 0; epoch < 200 && !both_waited(); ++epoch) Rest(loader);
  EXPECT_TRUE(both_waited());
  EXPECT_GT(dataset->stats().peak_memory_bytes, kBudget / 4);
}

TEST_P(Streams, ChunksAcrossRanksAreReadByTwo) {
  for (int world : {2, 3, 7}) {
    int64_t chunks = 0;
    for (int rank = 0; rank < world; ++rank) {
      auto dataset = OpenIt(GetParam());
      Loader loader(dataset, Sampler(*dataset, rank, world), {.batch_size = 50});
      Rest(loader);
      chunks += dataset->stats().chunks_read - (kRows + 999) / 1000;
    }
    EXPECT_GE(chunks, (kRows + kChunkRows - 1) / kChunkRows);
    EXPECT_LE(chunks, (kRows + kChunkRows - 1) / kChunkRows + world - 1);
  }
}

TEST_P(Streams, ResumesBitForBitWithAnyNumberOfThreads) {
  auto dataset = OpenIt(GetParam());
  const ChunkShuffleSampler sampler = Sampler(*dataset, /*rank=*/1, /*world=*/2);
  Loader whole(dataset, sampler, {.batch_size = 100});
  whole.SetEpoch(5);
  std::vector<std::string> rest = Rest(whole);
  ASSERT_EQ(rest.size(), 21);
  whole.SetEpoch(5);
  for (int threads = 1; !rest.empty(); ++threads) {
    auto other = OpenIt(GetParam(), /*threads=*/1 + threads % 4);
    Loader resumed(other, sampler, {.batch_size = 100, .prefetch_batches = threads % 3});
    ThrowIfError(resumed.Seek(ValueOrThrow(ParsePosition(ToString(whole.position())))));
    EXPECT_EQ(Rest(resumed), rest);
    ThrowIfError(whole.Next().status());
    rest.erase(rest.begin());
  }
}

TEST_P(Streams, EveryRowOnceAcrossWorldSizes) {
  std::vector<int> times(kRows, 0);
  Position position = {.epoch = 2};
  for (int world : {4, 3, 2}) {
    Position next;
    for (int rank = 0; rank < world; ++rank) {
      auto dataset = OpenIt(GetParam());
      const ChunkShuffleSampler sampler = Sampler(*dataset, rank, world, /*drop_last=*/false);
      const std::vector<int64_t> rows = sampler.Rows(position);
      Loader loader(dataset, sampler, {.batch_size = 37});
      ThrowIfError(loader.Seek(position));
      size_t first = 0;
      for (const Batch& batch : loader) {
        ExpectRowsOf(batch, rows, first);
        for (int64_t i = 0; i < batch.rows(); ++i) ++times.at(rows[first + i]);
        first += batch.rows();
        next = loader.position();
        if (world != 2 && loader.stats().batches == 10) break;
      }
    }
    position = next;
  }
  EXPECT_THAT(times, testing::Each(testing::Ge(1)));
  EXPECT_LE(std::count(times.begin(), times.end(), 2), 1) << "the padding of two ranks";
}

TEST_P(Streams, AnOrderThatDoesNotFitMemoryIsReadAllTheSame) {
  auto dataset = OpenIt(GetParam(), /*threads=*/3, /*budget=*/24 << 10);
  const DistributedSampler sampler({.size = kRows, .seed = 1});
  Loader loader(dataset, sampler, {.batch_size = 100});
  const std::vector<int64_t> rows = sampler.Rows({});
  size_t first = 0;
  for (const Batch& batch : loader) {
    ExpectRowsOf(batch, rows, first);
    first += batch.rows();
  }
  EXPECT_EQ(first, kRows);
  EXPECT_LE(dataset->stats().peak_memory_bytes, 24 << 10);
  EXPECT_GT(dataset->stats().chunks_read, 1000) << "chunks are read again and again";
}

TEST_P(Streams, SeveralReadersAtOnce) {
  auto dataset = OpenIt(GetParam());
  std::vector<std::thread> threads;
  std::vector<std::vector<std::string>> read(4);
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      Loader loader(dataset, Sampler(*dataset, rank % 2, 2), {.batch_size = 10});
      read[rank] = Rest(loader);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(read[0], read[2]);
  EXPECT_EQ(read[1], read[3]);
  EXPECT_NE(read[0], read[1]);
}

TEST_P(Streams, AReaderThatIsSlowHoldsTheOthersBack) {
  auto dataset = OpenIt(GetParam());
  auto reader = dataset->ReadInOrder(RangeOrder({0, kRows}));
  Batch batch;
  ThrowIfError(reader->ReadInto(1, batch));
  // The reader thread stops when memory is full, and so reads no more of it, however long one
  // waits.
  int64_t chunks = -1;
  for (int same = 0; same < 5;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const int64_t now = dataset->stats().chunks_read;
    same = now == chunks ? same + 1 : 0;
    chunks = now;
  }
  EXPECT_LT(chunks, kRows / kChunkRows / 2);
  EXPECT_LE(dataset->stats().peak_memory_bytes, kBudget);
  ThrowIfError(reader->ReadInto(kRows, batch));
  EXPECT_EQ(batch.rows(), kRows - 1);
}

INSTANTIATE_TEST_SUITE_P(Gzip, Streams, testing::Values(0, 6));

}  // namespace
}  // namespace lockstep::data::hdf5
