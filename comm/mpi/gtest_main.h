#pragma once

#include "lockstep/comm/launch/detect.h"

namespace lockstep::comm::mpi {

// The world of this test program, for tests that are linked with :gtest_main.
const launch::World& TestWorld();

}  // namespace lockstep::comm::mpi
