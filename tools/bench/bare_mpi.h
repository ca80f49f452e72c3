#pragma once

#include <cstdint>
#include <functional>

#include "lockstep/comm/operation.h"

namespace lockstep::bench {

// MPI's own collectives over f32 sums among the ranks of MPI_COMM_WORLD, which comm::mpi::Create
// has initialized: blocking calls, as a program of its own would make them.

// Whether there is one for this kind: all-reduce, all-gather and reduce-scatter.
bool HasBareMpi(comm::OperationKind kind);

// Whole buffers have `count` elements, of which each rank owns one in as many as there are ranks.
// AllReduce works in place on `whole`; AllGather gathers `part` into it, ReduceScatter scatters it.
void BareMpi(comm::OperationKind kind, float* whole, float* part, int64_t count, int ranks);

// An all-reduce that `compute` goes on beside: MPI_Iallreduce, compute, MPI_Wait.
void BareMpiAllReduceBeside(float* whole, int64_t count, const std::function<void()>& compute);

void BareMpiBarrier();

}  // namespace lockstep::bench
