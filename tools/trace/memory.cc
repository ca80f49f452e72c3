#include "lockstep/tools/trace/memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "lockstep/tools/trace/clock.h"

namespace lockstep::trace {
namespace {

thread_local MemoryCategory current_category = MemoryCategory::kOther;

int64_t Sum(const MemoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

// A bounded series that halves its resolution when it is full.
class Timeline {
 public:
  explicit Timeline(size_t max_samples) : max_samples_(std::max<size_t>(max_samples, 2)) {}

  void Add(const MemoryBytes& live) {
    // The samples that one stride stands for share the last place: the largest stays.
    const MemorySample sample{SteadyNow(), live};
    if (pending_ == 0) {
      if (samples_.size() == max_samples_) Halve();
      samples_.push_back(sample);
    } else if (Sum(live) >= Sum(samples_.back().live_by_category)) {
      samples_.back() = sample;
    }
    pending_ = (pending_ + 1) % stride_;
  }

  std::vector<MemorySample> Take() { return std::move(samples_); }

 private:
  void Halve() {
    size_t kept = 0;
    for (size_t i = 0; i < samples_.size(); i += 2, ++kept) {
      const size_t next = std::min(i + 1, samples_.size() - 1);
      const bool first = Sum(samples_[i].live_by_category) > Sum(samples_[next].live_by_category);
      samples_[kept] = samples_[first ? i : next];
    }
    samples_.resize(kept);
    stride_ *= 2;
  }

  const size_t max_samples_;
  size_t stride_ = 1;   // calls of Add() that become one sample
  size_t pending_ = 0;  // of those, how many the last sample stands for; 0: all of them
  std::vector<MemorySample> samples_;
};

// The table of owners and the totals, under one lock: peaks and what they are made of are exact.
class Ledger {
 public:
  void Add(const void* data, int64_t bytes) {
    std::lock_guard lock(mutex_);
    Block& block = blocks_[data];  // not new where someone freed it past its deleter
    Change(block.category, -block.bytes);
    block = {bytes, current_category};
    Change(block.category, block.bytes);
    Sample();
  }

  void Remove(const void* data) {
    std::lock_guard lock(mutex_);
    const auto block = blocks_.find(data);
    if (block == blocks_.end()) return;
    Change(block->second.category, -block->second.bytes);
    blocks_.erase(block);
    Sample();
  }

  bool Recategorize(const void* data, MemoryCategory category) {
    std::lock_guard lock(mutex_);
    const auto block = blocks_.find(data);
    if (block == blocks_.end()) return false;
    Change(block->second.category, -block->second.bytes);
    block->second.category = category;
    Change(category, block->second.bytes);
    Sample();
    return true;
  }

  MemorySnapshot Get() {
    std::lock_guard lock(mutex_);
    return memory_;
  }

  void ResetPeak() {
    std::lock_guard lock(mutex_);
    memory_.peak_by_category = memory_.at_peak = memory_.live_by_category;
    memory_.peak = memory_.live;
  }

  void StartTimeline(size_t max_samples) {
    std::lock_guard lock(mutex_);
    timeline_ = std::make_unique<Timeline>(max_samples);
    Sample();
  }

  std::vector<MemorySample> StopTimeline() {
    std::lock_guard lock(mutex_);
    const std::unique_ptr<Timeline> timeline = std::move(timeline_);
    return timeline ? timeline->Take() : std::vector<MemorySample>();
  }

 private:
  struct Block {
    int64_t bytes = 0;
    MemoryCategory category = MemoryCategory::kOther;
  };

  void Change(MemoryCategory category, int64_t bytes) {
    int64_t& live = memory_.live_by_category[Index(category)];
    int64_t& peak = memory_.peak_by_category[Index(category)];
    live += bytes;
    peak = std::max(peak, live);
    memory_.live += bytes;
    if (memory_.live > memory_.peak) {
      memory_.peak = memory_.live;
      memory_.at_peak = memory_.live_by_category;
    }
  }

  void Sample() {
    if (timeline_) timeline_->Add(memory_.live_by_category);
  }

  std::mutex mutex_;
  absl::flat_hash_map<const void*, Block> blocks_;
  MemorySnapshot memory_;
  std::unique_ptr<Timeline> timeline_;
};

// Blocks stay those of the allocator below; only their deleter is exchanged. The context of such a
// block is its data pointer, and it is all that a deleter gets: the rest is in statics that are
// never destroyed, as tensors may be freed by static destructors.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) {
    base_deleter_ = base->raw_deleter();
    TORCH_CHECK(base_deleter_ != nullptr,
                "InstallCountingAllocator: the CPU allocator in use has no raw_deleter(), so its "
                "blocks cannot be followed; install before replacing LibTorch's own allocator");
  }

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr block = base_->allocate(bytes);
    if (block.get() != nullptr && block.compare_exchange_deleter(base_deleter_, &Delete)) {
      ledger().Add(block.get(), static_cast<int64_t>(bytes));
    }
    return block;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    base_->copy_data(to, from, bytes);
  }

  static Ledger& ledger() {
    static Ledger& ledger = *new Ledger;
    return ledger;
  }

 private:
  static void Delete(void* data) {
    // Before the block is freed: afterwards another thread may be given the same address.
    ledger().Remove(data);
    base_deleter_(data);
  }

  static inline c10::DeleterFnPtr base_deleter_ = nullptr;
  c10::Allocator* const base_;
};

std::atomic<bool> installed = false;

}  // namespace

std::string_view MemoryCategoryName(MemoryCategory category) {
  static constexpr std::array<std::string_view, kNumMemoryCategories> kNames = {
      "other",     "parameters",  "gradients", "optimizer",
      "unsharded", "activations", "buckets",   "data"};
  return kNames[Index(category)];
}

void InstallCountingAllocator() {
  static std::mutex& mutex = *new std::mutex;
  std::lock_guard lock(mutex);
  if (installed) return;
  auto* allocator = new CountingAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(allocator, /*priority=*/std::numeric_limits<uint8_t>::max());
  installed = true;
}

MemoryScope::MemoryScope(MemoryCategory category)
    : outer_(std::exchange(current_category, category)) {}

MemoryScope::~MemoryScope() { current_category = outer_; }

bool Recategorize(const void* data, MemoryCategory category) {
  return installed && CountingAllocator::ledger().Recategorize(data, category);
}

void AddBlock(const void* data, int64_t bytes) {
  if (installed) CountingAllocator::ledger().Add(data, bytes);
}

void RemoveBlock(const void* data) {
  if (installed) CountingAllocator::ledger().Remove(data);
}

MemorySnapshot GetMemory() {
  return installed ? CountingAllocator::ledger().Get() : MemorySnapshot();
}

void ResetMemoryPeak() {
  if (installed) CountingAllocator::ledger().ResetPeak();
}

void StartMemoryTimeline(size_t max_samples) {
  if (installed) CountingAllocator::ledger().StartTimeline(max_samples);
}

std::vector<MemorySample> StopMemoryTimeline() {
  return installed ? CountingAllocator::ledger().StopTimeline() : std::vector<MemorySample>();
}

}  // namespace lockstep::trace
