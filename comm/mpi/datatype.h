#pragma once

#include <c10/core/ScalarType.h>
#include <mpi.h>

#include <cstdint>

#include "lockstep/comm/reduce_op.h"

namespace lockstep::comm::mpi {

// MPI's type for the elements of a tensor. f16 and bf16 are types of our own.
MPI_Datatype DatatypeOf(at::ScalarType dtype);

// MPI's operation; kAverage is the sum. On f16 and bf16 it is one of our own, which computes in
// f32.
MPI_Op OpOf(ReduceOp op, at::ScalarType dtype);

// data[0, count) /= divisor, for the second half of an average.
void Divide(void* data, int64_t count, at::ScalarType dtype, int divisor);

}  // namespace lockstep::comm::mpi
