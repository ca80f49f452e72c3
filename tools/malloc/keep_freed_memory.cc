#include "lockstep/tools/malloc/keep_freed_memory.h"

#include <malloc.h>

namespace lockstep {

bool KeepFreedMemory() {
#ifdef M_TRIM_THRESHOLD
  // Larger blocks come from the system, each by itself, and go back to it. glibc before 2.35 takes
  // 32 MiB at most.
  const bool mapped =
      mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 || mallopt(M_MMAP_THRESHOLD, 32 << 20) == 1;
  return mapped && mallopt(M_TRIM_THRESHOLD, -1) == 1;  // -1: never
#else
  return false;
#endif
}

}  // namespace lockstep
