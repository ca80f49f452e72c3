#pragma once

namespace consumer {

// A header at the same place as one of Lockstep's.
struct Batch {
  int rows = 0;
};

}  // namespace consumer
