#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace lockstep::data::hdf5 {

// Memory for decoded chunks, kept from one epoch to the next: pages that were touched once cost
// nothing more, and large ones are found faster when rows are picked in any order. Thread-safe.
class SlabPool {
 public:
  SlabPool() = default;
  ~SlabPool();
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  // Memory of that many bytes, aligned to 64. Throws std::bad_alloc where there is none.
  uint8_t* Take(int64_t bytes);
  void GiveBack(uint8_t* slab, int64_t bytes);

 private:
  std::mutex mutex_;
  std::map<int64_t, std::vector<uint8_t*>> free_;  // by bytes
  struct Arena {
    void* memory;
    size_t bytes;
  };
  std::vector<Arena> arenas_;
};

}  // namespace lockstep::data::hdf5
