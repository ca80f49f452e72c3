#pragma once

#include <cstdint>
#include <limits>

#include "absl/time/time.h"

namespace lockstep::comm::mpi {

struct Options {
  // How long an operation may take, from the call on, until it fails and names who is missing;
  // 30 min.
  absl::Duration deadline = absl::Minutes(30);

  // Ranks that share a node read and write each other's memory, where the system lets them, instead
  // of sending messages. Equal on all ranks; true.
  bool shared_memory = true;

  // Larger operations are cut into several MPI calls, where MPI carries them out. Equal on all
  // ranks; 2^31 - 1 elements.
  int64_t max_elements_per_call = std::numeric_limits<int32_t>::max();

  // Without shared memory, AllReduce and ReduceScatter of tensors from this size on, among at most
  // 32 ranks, are carried out by messages between each two ranks, which is faster here than Open
  // MPI's own. Equal on all ranks; 128 KiB.
  int64_t exchange_bytes = 128 << 10;
};

}  // namespace lockstep::comm::mpi
