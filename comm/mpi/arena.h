#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/statusor.h"

namespace lockstep::comm::mpi {

// Memory that the processes of a node see in each other: each process has one arena, maps those of
// the others, and allocates in its own.
//
//   absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(int64_t{1} << 30);
//   void* block = (*arena)->Allocate(4096);           // null where memory is short
//   ... tell another process (*arena)->handle() and (*arena)->OffsetOf(block) ...
//   absl::StatusOr<char*> theirs = Arena::Map(handle);  // there: *theirs + offset is the block
//
// It is an anonymous file: it has no name that a killed process could leave behind, counts against
// no limit of /dev/shm, and takes memory only for what is allocated. That memory is there when
// Allocate() returns, as touching a page that the system cannot provide would be a bus error.
class Arena {
 public:
  // Enough for another process to find it.
  struct Handle {
    int64_t process = 0;
    int64_t descriptor = -1;
    int64_t bytes = 0;
    uint64_t token[2] = {0, 0};  // what its first bytes are
  };

  // Reserves addresses for `bytes`, for as long as the process lives. Unavailable where the system
  // refuses.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes);

  // The start of another process's arena, mapped for as long as this process lives. Unavailable
  // where the system refuses, also because that process is in another container.
  static absl::StatusOr<char*> Map(const Handle& handle);

  // `bytes` from a page's start on, uninitialised; null where there is no room or memory.
  void* Allocate(int64_t bytes);

  // Keeps the memory of a block for the next one of its size, as new pages cost more than copying
  // does. Blocks and what is kept never take more than the most that blocks took at once, or 32 MiB
  // more than they take now, where that is more: what was freed first goes back to the system.
  void Free(void* block);

  // Whether [data, data + bytes) lies in the arena.
  bool Contains(const void* data, int64_t bytes) const;

  int64_t OffsetOf(const void* data) const { return static_cast<const char*>(data) - base_; }
  char* base() const { return base_; }
  const Handle& handle() const { return handle_; }

 private:
  Arena(char* base, const Handle& handle);

  char* const base_;
  const Handle handle_;
  // All of these need mutex_.
  void* Take(int64_t offset, int64_t size);
  // Give a block back to the system, and make it part of what is free.
  void Return(int64_t offset, int64_t size);
  void ReturnAllBut(int64_t bytes);
  // How much may be kept besides blocks of so many bytes.
  int64_t KeptBeside(int64_t allocated_bytes) const;

  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;               // bytes by offset; no two touch
  std::map<int64_t, int64_t> allocated_;          // likewise
  std::deque<std::pair<int64_t, int64_t>> kept_;  // freed ones with their memory, the oldest first
  int64_t kept_bytes_ = 0;
  int64_t allocated_bytes_ = 0;
  int64_t peak_bytes_ = 0;  // of allocated_bytes_
};

}  // namespace lockstep::comm::mpi
