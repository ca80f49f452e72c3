#include "lockstep/tools/trace/counters.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace lockstep::trace {
namespace {

TEST(CountersTest, SameNameIsTheSameCounter) {
  ResetCounters();
  GetCounter("test/a").Add(3);
  GetCounter("test/a").Add(4);
  EXPECT_EQ(GetCounter("test/a").value(), 7);
  EXPECT_EQ(&GetCounter("test/a"), &GetCounter("test/a"));
  EXPECT_NE(&GetCounter("test/a"), &GetCounter("test/b"));
}

TEST(CountersTest, SnapshotNamesAllAndResetZeroesThem) {
  ResetCounters();
  GetCounter("test/x").Add(257);
  GetCounter("test/y").Add(0);
  std::map<std::string, int64_t> values = CounterValues();
  EXPECT_EQ(values.at("test/x"), 257);
  EXPECT_EQ(values.at("test/y"), 0);
  ResetCounters();
  EXPECT_EQ(CounterValues().at("test/x"), 0);
}

TEST(CountersTest, ManyThreadsLoseNothing) {
  ResetCounters();
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 4097; ++i) GetCounter(t % 2 ? "test/odd" : "test/even").Add(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  constexpr int64_t kSum = int64_t{4096} * 4097 / 2;
  EXPECT_EQ(GetCounter("test/odd").value(), 4 * kSum);
  EXPECT_EQ(GetCounter("test/even").value(), 4 * kSum);
}

}  // namespace
}  // namespace lockstep::trace
