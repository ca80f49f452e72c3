#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/time/time.h"

namespace lockstep::trace {

// Counts the bytes of all CPU tensors of a process, by what they are for.
//
//   trace::InstallCountingAllocator();  // first line of main: older blocks are not seen
//   Model model;
//   for (const at::Tensor& p : model->parameters()) {
//     trace::Recategorize(p.storage().data(), trace::MemoryCategory::kParameters);
//   }
//   {
//     trace::MemoryScope scope(trace::MemoryCategory::kActivations);
//     loss = Loss(model->forward(images));
//   }
//   const trace::MemorySnapshot memory = trace::GetMemory();
//   // memory.peak bytes, of which memory.at_peak[Index(MemoryCategory::kActivations)] activations
//
// Bytes are those that the tensor's storage asked for, without the heap's own overhead. A block is
// subtracted from the category that it is in when it is freed, on whichever thread that is. Tensors
// over foreign memory (at::from_blob) are counted where that is made known by AddBlock; tensors of
// other devices are not. Ranks that are
// threads of one process are counted together. Everything is thread-safe, and does nothing, or
// gives zeros, until InstallCountingAllocator() was called.
enum class MemoryCategory : uint8_t {
  kOther,        // whatever was made outside of any scope
  kParameters,   // whole or sharded
  kGradients,    // whole or sharded
  kOptimizer,    // e.g. the moments of Adam
  kUnsharded,    // parameters gathered for use
  kActivations,  // what forward keeps for backward, and its temporaries
  kBuckets,      // staging memory of communication
  kData,         // batches
};

inline constexpr int kNumMemoryCategories = 8;

constexpr size_t Index(MemoryCategory category) { return static_cast<size_t>(category); }

// "other", "parameters", ...
std::string_view MemoryCategoryName(MemoryCategory category);

// Bytes by Index(category).
using MemoryBytes = std::array<int64_t, kNumMemoryCategories>;

struct MemorySnapshot {
  MemoryBytes live_by_category{};
  MemoryBytes peak_by_category{};  // each at its own moment: their sum may be more than `peak`
  int64_t live = 0;
  int64_t peak = 0;
  MemoryBytes at_peak{};  // what `peak` was made of: adds up to it
};

// Makes the counting allocator LibTorch's CPU allocator, over the one that was there. Calling it
// again does nothing. Call it while no other thread allocates tensors: LibTorch's switch of
// allocators takes no lock. Each allocation and each free then costs about 0.1 us more.
void InstallCountingAllocator();

// Charges what this thread allocates while the scope lives to `category`. Scopes nest; the
// innermost counts. Backward runs on the thread that calls it for CPU tensors, so a scope around it
// counts too.
class MemoryScope {
 public:
  explicit MemoryScope(MemoryCategory category);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  MemoryCategory outer_;
};

// Moves a live block to another category. `data` is where its storage starts
// (tensor.storage().data(), which is not tensor.data_ptr() for every view). False, and no change,
// for memory that is not counted. Peaks already seen stay as they are.
bool Recategorize(const void* data, MemoryCategory category);

// For tensors over memory that is not of LibTorch's CPU allocator, shared memory for instance:
// counts `bytes` from `data` on as the allocator counts its blocks, until RemoveBlock, which comes
// before the memory is given back. Nothing is counted before InstallCountingAllocator().
void AddBlock(const void* data, int64_t bytes);
void RemoveBlock(const void* data);

MemorySnapshot GetMemory();

// Forgets the peaks: they begin again at what is live now.
void ResetMemoryPeak();

struct MemorySample {
  absl::Duration time;  // SteadyNow()
  MemoryBytes live_by_category{};
};

// Records live bytes over time, from now on. At most `max_samples` (of 72 bytes) are kept, at least
// 2: when they are full, each two neighbours become one, the one with more live bytes, so that the
// whole run stays in view and its peak in it. Starting again begins afresh.
void StartMemoryTimeline(size_t max_samples = 16384);

// Ends the recording and returns it in order of time. Empty where none was started.
std::vector<MemorySample> StopMemoryTimeline();

}  // namespace lockstep::trace
