#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/tools/trace/memory.h"

namespace lockstep::parallel::fsdp {

// Flat buffers that Units take in turns. Taking one that was used before costs no page faults,
// which for large Units cost more than the copy; and there are never more buffers than were in use
// at once.
class BufferPool {
 public:
  // `poison`: fills what is given back with NaN.
  BufferPool(comm::Communicator& comm, trace::MemoryCategory category, bool poison)
      : comm_(comm), category_(category), poison_(poison) {}

  // A flat tensor of `numel` elements, uninitialised.
  at::Tensor Take(int64_t numel, at::ScalarType dtype);

  // Gives back what Take() gave.
  void Give(at::Tensor buffer);

  // Frees what is not taken.
  void Clear() { free_.clear(); }

 private:
  comm::Communicator& comm_;
  const trace::MemoryCategory category_;
  const bool poison_;
  std::vector<at::Tensor> free_;  // whole buffers
};

}  // namespace lockstep::parallel::fsdp
