#pragma once

#include <functional>

#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/nccl/options.h"
#include "lockstep/comm/nccl/testing/fake_library.h"

namespace lockstep::comm::nccl::testing {

// Options for tests: the ranks look often, and fail soon.
Options FastOptions(absl::Duration deadline);

// Runs `body` on `size` threads, each with its NCCL communicator over the fake. Afterwards nothing
// may be left: communicators, streams, events and threads are counted, and a difference, like an
// exception of body, is a test failure.
void RunFakeRanks(int size, const std::function<void(Communicator&)>& body,
                  const Options& options = FastOptions(absl::Minutes(2)),
                  const std::function<at::Device(int rank)>& device_of = OnCpu);

// The same on ranks of `fabric`, which the test has made, and of which it may make streams.
void RunFakeRanksOn(FakeFabric& fabric, int size, const std::function<void(Communicator&)>& body,
                    const Options& options = FastOptions(absl::Minutes(2)));

// The end of a test on `fabric`, whose communicators are destroyed: waits until all threads have
// ended, and reports what is left.
void ExpectNothingLeft(const FakeFabric& fabric);

}  // namespace lockstep::comm::nccl::testing
