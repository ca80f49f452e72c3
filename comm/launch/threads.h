#pragma once

#include <optional>

#include "lockstep/comm/launch/detect.h"

namespace lockstep::launch {

// Threads with which this rank should compute, so that the ranks of a node share its cores:
//
//   if (std::optional<int> threads = launch::ThreadsOfRank(*world)) at::set_num_threads(*threads);
//
// The cores that this process may use (taskset, srun --cpu-bind, mpirun --bind-to), but no more
// than those of the node (SLURM_CPUS_ON_NODE of them, where that is set) divided by its ranks, as
// launchers often let each rank use all; at least 1.
// nullopt: OMP_NUM_THREADS has said it, or nothing started this rank, or not how many there are on
// this node.
std::optional<int> ThreadsOfRank(const World& world);

// The rule by itself, for a node of `cores` cores and `ranks` ranks of which one may use `allowed`.
int ThreadsOfRank(int allowed, int cores, int ranks);

}  // namespace lockstep::launch
