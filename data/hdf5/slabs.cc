#include "lockstep/data/hdf5/slabs.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace lockstep::data::hdf5 {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kArenaBytes = 8 << 20;

}  // namespace

SlabPool::~SlabPool() {
  for (const Arena& arena : arenas_) munmap(arena.memory, arena.bytes);
}

uint8_t* SlabPool::Take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  std::vector<uint8_t*>& free = free_[bytes];
  if (free.empty()) {
    const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const int64_t count = std::max<int64_t>(1, kArenaBytes / rounded);
    const auto size = static_cast<size_t>(count * rounded);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        /*fd=*/-1, /*offset=*/0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    arenas_.push_back({memory, size});
    madvise(memory, size, MADV_HUGEPAGE);  // where the system has them
    // The first comes last, to be taken first.
    for (int64_t i = count; i-- > 0;) free.push_back(static_cast<uint8_t*>(memory) + i * rounded);
  }
  uint8_t* slab = free.back();
  free.pop_back();
  return slab;
}

void SlabPool::GiveBack(uint8_t* slab, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  free_[bytes].push_back(slab);
}

}  // namespace lockstep::data::hdf5
