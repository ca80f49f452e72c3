#include "lockstep/tools/trace/counters.h"

#include <memory>
#include <mutex>

namespace lockstep::trace {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Counter>, std::less<>> counters;
};

Registry& GetRegistry() {
  static Registry& registry = *new Registry;  // never destroyed: static destructors still count
  return registry;
}

}  // namespace

Counter& GetCounter(std::string_view name) {
  Registry& registry = GetRegistry();
  std::lock_guard lock(registry.mutex);
  auto found = registry.counters.find(name);
  if (found == registry.counters.end()) {
    found = registry.counters.emplace(name, std::make_unique<Counter>()).first;
  }
  return *found->second;
}

std::map<std::string, int64_t> CounterValues() {
  Registry& registry = GetRegistry();
  std::lock_guard lock(registry.mutex);
  std::map<std::string, int64_t> values;
  for (const auto& [name, counter] : registry.counters) values.emplace(name, counter->value());
  return values;
}

void ResetCounters() {
  Registry& registry = GetRegistry();
  std::lock_guard lock(registry.mutex);
  for (const auto& [name, counter] : registry.counters) counter->value_ = 0;
}

}  // namespace lockstep::trace
