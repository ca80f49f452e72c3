#pragma once

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"

namespace lockstep::comm::inprocess {

struct Options {
  absl::Duration deadline = absl::Minutes(30);  // of each operation; 30 min
};

// Communicators of `size` ranks that are threads of this process; element i belongs to rank i.
//
//   auto comms = inprocess::Create(2);
//   std::thread other([&] { Train(*comms[1]); });
//   Train(*comms[0]);
//   other.join();
//
// The reference backend and test bed: it needs no launcher, checks at every collective that all
// ranks issued the same one, and adds in the order of the ranks, so that results are reproducible.
// A collective is carried out by the thread of the last rank that issues it; tensors are on the
// CPU.
//
// Abort, a mismatch or a deadline fails this world's communicators, those made by Split too.
std::vector<std::unique_ptr<Communicator>> Create(int size, Options options = {});

}  // namespace lockstep::comm::inprocess
