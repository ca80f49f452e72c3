#include "lockstep/tools/trace/memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace lockstep::trace {
namespace {

at::Tensor Bytes(int64_t bytes) { return at::empty({bytes}, at::kByte); }

int64_t Live(MemoryCategory category) { return GetMemory().live_by_category[Index(category)]; }

int64_t Sum(const MemoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

// All cases are differences to what is live at their start: LibTorch may keep tensors of its own.
class MemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    InstallCountingAllocator();
    ResetMemoryPeak();
    before_ = GetMemory();
  }

  MemorySnapshot before_;
};

TEST_F(MemoryTest, CountsWhatStorageAskedFor) {
  at::Tensor a = at::empty({3, 257}, at::kFloat);
  EXPECT_EQ(GetMemory().live - before_.live, 3 * 257 * 4);
  at::Tensor view = a.view({257, 3});
  at::Tensor shared = a;
  EXPECT_EQ(GetMemory().live - before_.live, 3 * 257 * 4);
  a = view = shared = at::Tensor();
  EXPECT_EQ(GetMemory().live, before_.live);
  EXPECT_EQ(GetMemory().peak - before_.live, 3 * 257 * 4);
}

TEST_F(MemoryTest, CountsForeignMemoryThatIsMadeKnown) {
  const int64_t buckets = Live(MemoryCategory::kBuckets);
  int memory[4];
  {
    MemoryScope scope(MemoryCategory::kBuckets);
    AddBlock(memory, sizeof(memory));
  }
  EXPECT_EQ(Live(MemoryCategory::kBuckets) - buckets, 16);
  EXPECT_TRUE(Recategorize(memory, MemoryCategory::kData));
  EXPECT_EQ(Live(MemoryCategory::kBuckets), buckets);
  RemoveBlock(memory);
  EXPECT_EQ(GetMemory().live, before_.live);
  EXPECT_FALSE(Recategorize(memory, MemoryCategory::kData));
}

TEST_F(MemoryTest, InstallingAgainDoesNotCountTwice) {
  InstallCountingAllocator();
  at::Tensor a = Bytes(4097);
  EXPECT_EQ(GetMemory().live - before_.live, 4097);
}

TEST_F(MemoryTest, EmptyTensorsCostNothing) {
  at::Tensor a = Bytes(0);
  EXPECT_EQ(GetMemory().live, before_.live);
  EXPECT_FALSE(Recategorize(a.storage().data(), MemoryCategory::kData));
}

TEST_F(MemoryTest, ResizingMovesTheCount) {
  at::Tensor a = Bytes(100);
  std::memset(a.data_ptr(), 7, 100);
  {
    MemoryScope scope(MemoryCategory::kUnsharded);
    at::native::resize_bytes_cpu(a.storage().unsafeGetStorageImpl(), 4097);
  }
  EXPECT_EQ(static_cast<const uint8_t*>(a.storage().data())[99], 7);
  EXPECT_EQ(Live(MemoryCategory::kUnsharded), 4097);
  EXPECT_EQ(GetMemory().live - before_.live, 4097);
  at::native::resize_bytes_cpu(a.storage().unsafeGetStorageImpl(), 0);
  EXPECT_EQ(GetMemory().live, before_.live);
  at::native::resize_bytes_cpu(a.storage().unsafeGetStorageImpl(), 1);
  EXPECT_EQ(GetMemory().live - before_.live, 1);
}

TEST_F(MemoryTest, ScopesNestAndTheInnermostCounts) {
  at::Tensor inner, outer, none;
  {
    MemoryScope activations(MemoryCategory::kActivations);
    {
      MemoryScope buckets(MemoryCategory::kBuckets);
      inner = Bytes(1);
    }
    outer = Bytes(20);
  }
  none = Bytes(300);
  EXPECT_EQ(Live(MemoryCategory::kBuckets), 1);
  EXPECT_EQ(Live(MemoryCategory::kActivations), 20);
  EXPECT_EQ(Live(MemoryCategory::kOther) - before_.live, 300);
}

TEST_F(MemoryTest, ScopesAreOfTheirThread) {
  MemoryScope scope(MemoryCategory::kGradients);
  at::Tensor other;
  std::thread([&other] { other = Bytes(257); }).join();
  EXPECT_EQ(Live(MemoryCategory::kGradients), 0);
  EXPECT_EQ(Live(MemoryCategory::kOther) - before_.live, 257);
}

TEST_F(MemoryTest, FreesOnAnotherThreadAreSubtracted) {
  at::Tensor a;
  {
    MemoryScope scope(MemoryCategory::kData);
    a = Bytes(4097);
  }
  EXPECT_EQ(Live(MemoryCategory::kData), 4097);
  std::thread([moved = std::move(a)]() mutable {
    MemoryScope scope(MemoryCategory::kOptimizer);  // frees do not look at it
    moved.reset();
  }).join();
  EXPECT_EQ(Live(MemoryCategory::kData), 0);
  EXPECT_EQ(Live(MemoryCategory::kOptimizer), 0);
  EXPECT_EQ(GetMemory().live, before_.live);
}

TEST_F(MemoryTest, RecategorizeMovesABlock) {
  at::Tensor a = Bytes(257);
  EXPECT_TRUE(Recategorize(a.storage().data(), MemoryCategory::kParameters));
  EXPECT_EQ(Live(MemoryCategory::kParameters), 257);
  EXPECT_EQ(Live(MemoryCategory::kOther), before_.live_by_category[0]);
  EXPECT_EQ(GetMemory().live - before_.live, 257);
  a.reset();
  EXPECT_EQ(Live(MemoryCategory::kParameters), 0);
  EXPECT_EQ(GetMemory().peak - before_.live, 257);
}

TEST_F(MemoryTest, PeakTellsWhatItWasMadeOf) {
  MemoryScope scope(MemoryCategory::kActivations);
  at::Tensor activations = Bytes(1000);
  at::Tensor buckets;
  {
    MemoryScope inner(MemoryCategory::kBuckets);
    buckets = Bytes(500);
  }
  activations.reset();
  {
    MemoryScope inner(MemoryCategory::kBuckets);
    buckets = Bytes(600);  // 1100 for a moment, before the 500 are freed
  }
  const MemorySnapshot memory = GetMemory();
  EXPECT_EQ(memory.live - before_.live, 600);
  EXPECT_EQ(memory.peak - before_.live, 1500);
  EXPECT_EQ(memory.at_peak[Index(MemoryCategory::kActivations)], 1000);
  EXPECT_EQ(memory.at_peak[Index(MemoryCategory::kBuckets)], 500);
  EXPECT_EQ(Sum(memory.at_peak), memory.peak);
  EXPECT_EQ(memory.peak_by_category[Index(MemoryCategory::kActivations)], 1000);
  EXPECT_EQ(memory.peak_by_category[Index(MemoryCategory::kBuckets)], 1100);

  ResetMemoryPeak();
  EXPECT_EQ(GetMemory().peak, memory.live);
  EXPECT_EQ(GetMemory().at_peak, memory.live_by_category);
  EXPECT_EQ(GetMemory().peak_by_category[Index(MemoryCategory::kActivations)], 0);
}

TEST_F(MemoryTest, RawInterfaceAndCloneWork) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  void* raw = allocator->raw_allocate(257);
  std::memset(raw, 3, 257);
  EXPECT_EQ(GetMemory().live - before_.live, 257);
  {
    const c10::DataPtr copy = allocator->clone(raw, 257);
    EXPECT_TRUE(allocator->is_simple_data_ptr(copy));
    EXPECT_EQ(std::memcmp(copy.get(), raw, 257), 0);
    EXPECT_EQ(GetMemory().live - before_.live, 514);
  }
  allocator->raw_deallocate(raw);
  EXPECT_EQ(GetMemory().live, before_.live);
  EXPECT_EQ(allocator->raw_allocate(0), nullptr);
}

TEST_F(MemoryTest, ForeignMemoryIsLeftAlone) {
  std::vector<uint8_t> foreign(4097);
  int frees = 0;
  {
    at::Tensor a = at::from_blob(
        foreign.data(), {4097}, [&frees](void*) { ++frees; }, at::kByte);
    EXPECT_EQ(GetMemory().live, before_.live);
    EXPECT_FALSE(Recategorize(a.storage().data(), MemoryCategory::kData));
  }
  EXPECT_EQ(frees, 1);
  EXPECT_EQ(GetMemory().live, before_.live);
}

TEST_F(MemoryTest, SwappedDataPointersStayWithTheirBlock) {
  at::Tensor a = Bytes(100);
  at::Tensor b = Bytes(200);
  c10::DataPtr of_a = a.storage().set_data_ptr(std::move(b.storage().mutable_data_ptr()));
  EXPECT_EQ(GetMemory().live - before_.live, 300);
  a.reset();
  EXPECT_EQ(GetMemory().live - before_.live, 100);
  of_a.clear();
  EXPECT_EQ(GetMemory().live, before_.live);
}

TEST_F(MemoryTest, ManyThreadsExchangingTensorsBalance) {
  // Each thread fills its row of slots, and frees what the others left in theirs.
  constexpr int kThreads = 8;
  std::mutex mutex;
  std::vector<at::Tensor> slots(kThreads * 4);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      MemoryScope scope(static_cast<MemoryCategory>(t));
      for (int i = 0; i < 2000; ++i) {
        at::Tensor tensor = Bytes(1 + random() % 4097);
        std::lock_guard lock(mutex);
        std::swap(slots[random() % slots.size()], tensor);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t expected = before_.live;
  for (const at::Tensor& tensor : slots) {
    if (tensor.defined()) expected += static_cast<int64_t>(tensor.nbytes());
  }
  const MemorySnapshot memory = GetMemory();
  EXPECT_EQ(memory.live, expected);
  EXPECT_EQ(Sum(memory.live_by_category), memory.live);
  EXPECT_EQ(Sum(memory.at_peak), memory.peak);
  EXPECT_GE(memory.peak, memory.live);
  slots.clear();
  EXPECT_EQ(GetMemory().live_by_category, before_.live_by_category);
}

TEST_F(MemoryTest, TimelineFollowsEveryChange) {
  StartMemoryTimeline();
  at::Tensor a = Bytes(257);
  Recategorize(a.storage().data(), MemoryCategory::kData);
  a.reset();
  const std::vector<MemorySample> samples = StopMemoryTimeline();
  at::Tensor later = Bytes(1);
  ASSERT_EQ(samples.size(), 4u);
  std::vector<int64_t> live, data;
  for (const MemorySample& sample : samples) {
    live.push_back(Sum(sample.live_by_category) - before_.live);
    data.push_back(sample.live_by_category[Index(MemoryCategory::kData)]);
  }
  EXPECT_EQ(live, std::vector<int64_t>({0, 257, 257, 0}));
  EXPECT_EQ(data, std::vector<int64_t>({0, 0, 257, 0}));
  EXPECT_LE(samples[0].time, samples[3].time);
  EXPECT_TRUE(StopMemoryTimeline().empty());
}

TEST_F(MemoryTest, FullTimelineKeepsTheWholeRunAndItsPeak) {
  for (const int peak_at : {0, 1, 500, 998, 999}) {
    StartMemoryTimeline(/*max_samples=*/7);
    at::Tensor last;
    for (int i = 0; i < 1000; ++i) last = Bytes(i == peak_at ? 100'000 : 1 + i % 3);
    last.reset();
    const std::vector<MemorySample> samples = StopMemoryTimeline();
    ASSERT_GE(samples.size(), 3u);
    ASSERT_LE(samples.size(), 7u);
    int64_t peak = 0;
    for (size_t i = 0; i < samples.size(); ++i) {
      peak = std::max(peak, Sum(samples[i].live_by_category) - before_.live);
      if (i > 0) {
        EXPECT_LE(samples[i - 1].time, samples[i].time);
      }
    }
    EXPECT_GE(peak, 100'000) << "peak at " << peak_at;
    EXPECT_LE(peak, 100'003) << "peak at " << peak_at;
  }
}

TEST_F(MemoryTest, CategoriesHaveNames) {
  EXPECT_EQ(MemoryCategoryName(MemoryCategory::kOther), "other");
  EXPECT_EQ(MemoryCategoryName(MemoryCategory::kOptimizer), "optimizer");
  EXPECT_EQ(MemoryCategoryName(MemoryCategory::kData), "data");
}

}  // namespace
}  // namespace lockstep::trace
