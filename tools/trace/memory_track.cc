#include "lockstep/tools/trace/memory_track.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::trace {
namespace {

// One curve: points that repeat the one before are left out.
class Curve {
 public:
  explicit Curve(std::string_view name) : name_(absl::StrCat("memory: ", std::string(name))) {}

  void Add(absl::Duration time, int64_t bytes) {
    if (bytes == last_) return;
    last_ = bytes;
    RecordCounterAt(time, name_, static_cast<double>(bytes));
  }

 private:
  const std::string name_;
  int64_t last_ = 0;
};

}  // namespace

void RecordMemory(const std::vector<MemorySample>& samples) {
  Curve all("all");
  std::vector<Curve> curves;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    curves.emplace_back(MemoryCategoryName(static_cast<MemoryCategory>(i)));
  }
  for (const MemorySample& sample : samples) {
    int64_t sum = 0;
    for (size_t i = 0; i < curves.size(); ++i) {
      curves[i].Add(sample.time, sample.live_by_category[i]);
      sum += sample.live_by_category[i];
    }
    all.Add(sample.time, sum);
  }
}

}  // namespace lockstep::trace
