#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep::parallel::fsdp {

// Guesses which Unit will be needed next from the order of the last pass, forward or backward. The
// guess depends on nothing but what was recorded, so ranks that run alike guess alike.
class GatherOrder {
 public:
  // A new pass begins. One in which nothing was needed is forgotten.
  void Begin();

  // Records that `unit` had to be gathered; returns what came after it in the last pass.
  std::optional<size_t> Record(size_t unit);

 private:
  std::vector<size_t> last_;
  std::vector<size_t> current_;
  size_t position_ = 0;  // in last_, after what was needed last
};

}  // namespace lockstep::parallel::fsdp
