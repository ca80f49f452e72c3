#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/mpi/arena.h"

namespace lockstep::comm::mpi {

// An uninitialised tensor in `arena`, whose memory goes when the tensor does, and which
// tools/trace counts like any other. Undefined where the tensor is too small to be worth its pages,
// or memory is short.
at::Tensor SharedEmpty(Arena& arena, at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace lockstep::comm::mpi
