#include "lockstep/comm/launch/threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace lockstep::launch {

int ThreadsOfRank(int allowed, int cores, int ranks) {
  return std::max(1, std::min(allowed, cores / std::max(1, ranks)));
}

std::optional<int> ThreadsOfRank(const World& world) {
  const char* set = std::getenv("OMP_NUM_THREADS");
  if ((set != nullptr && *set != '\0') || world.launcher == Launcher::kAlone || !world.local_size) {
    return std::nullopt;
  }
  int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  if (const char* text = std::getenv("SLURM_CPUS_ON_NODE"); text != nullptr) {
    if (const int of_job = std::atoi(text); of_job > 0) cores = of_job;
  }
  cpu_set_t allowed;
  const bool known = sched_getaffinity(/*pid=*/0, sizeof(allowed), &allowed) == 0;
  return ThreadsOfRank(known ? CPU_COUNT(&allowed) : cores, cores, *world.local_size);
}

}  // namespace lockstep::launch
