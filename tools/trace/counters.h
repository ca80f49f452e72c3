#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace lockstep::trace {

// Named totals of a process: bytes sent, operations issued, rows read. They only grow, between one
// ResetCounters() and the next.
//
//   static trace::Counter& bytes = trace::GetCounter("comm/mpi/bytes");  // looked up once
//   bytes.Add(tensor.nbytes());                                          // one atomic addition
//   ...
//   for (const auto& [name, value] : trace::CounterValues()) { ... }
//
// Thread-safe. Ranks that are threads of one process share their counters.
class Counter {
 public:
  void Add(int64_t amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  friend void ResetCounters();

  std::atomic<int64_t> value_{0};
};

// The counter of that name, made at 0 when it is first asked for. It lives as long as the process.
// By convention a name is a path, folder first, with the unit last: "data/hdf5/bytes_read".
Counter& GetCounter(std::string_view name);

// All counters by name.
std::map<std::string, int64_t> CounterValues();

// Sets all counters to 0. Additions made by other threads in the meantime may be lost or kept.
void ResetCounters();

}  // namespace lockstep::trace
