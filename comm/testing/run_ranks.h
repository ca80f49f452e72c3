#pragma once

#include <functional>

#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::comm::testing {

// Runs `body` on `size` ranks that are threads, and returns when all have ended:
//
//   RunRanks(4, [](Communicator& comm) {
//     at::Tensor x = at::ones({3});
//     ASSERT_TRUE(comm.AllReduce(x, ReduceOp::kSum).Wait().ok());
//   });
//
// A body that throws fails the test with what it threw, and aborts the communicator, so that the
// other ranks do not wait for it. After `deadline` a rank that waits gets an error.
void RunRanks(int size, const std::function<void(Communicator&)>& body,
              absl::Duration deadline = absl::Seconds(60));

}  // namespace lockstep::comm::testing
