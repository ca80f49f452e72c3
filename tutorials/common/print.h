#pragma once

#include <cstdio>

#include "absl/strings/str_format.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::tutorials {

// absl::PrintF on rank 0, at once also where stdout is a file; the other ranks print nothing.
//
//   tutorials::Print(world, "loss %.4f\n", loss);
template <typename... Args>
void Print(const comm::Communicator& world, const absl::FormatSpec<Args...>& format,
           const Args&... args) {
  if (world.rank() != 0) return;
  absl::PrintF(format, args...);
  std::fflush(stdout);
}

}  // namespace lockstep::tutorials
