#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/communicator.h"

namespace lockstep::tutorials {

// How far the ranks' copies of a model have come apart, in % of the size of its weights: 0 where
// all ranks hold the same numbers, to the last bit.
//
//   Print(world, "weights differ by %.3g %%\n", Drift(none.parameters(), world));
//
// For each weight it takes the largest value that a rank has less the smallest; it returns the norm
// of these differences over the norm of the values in their middles. The ranks give tensors of the
// same shapes and dtype, which stay as they are. Collective; throws StatusError.
double Drift(const std::vector<at::Tensor>& weights, comm::Communicator& world);

}  // namespace lockstep::tutorials
