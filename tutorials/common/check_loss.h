#pragma once

#include <cstdint>

namespace lockstep::tutorials {

// Throws StatusError (OUT_OF_RANGE), saying to try a smaller --lr, where the loss of a step is
// infinite or no number: no further step mends that. Steps count from 1.
void CheckLoss(double loss, int64_t step, int64_t epoch);

}  // namespace lockstep::tutorials
