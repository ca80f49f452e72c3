#pragma once

#include <cstdint>
#include <random>
#include <utility>

#include "absl/types/span.h"

namespace lockstep::data {

// A number that looks random and is a pure function of `value` (the finaliser of splitmix64,
// Steele, Lea and Flood 2014: every bit of the input changes about half of the output's).
constexpr uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// Uniform in [0, bound), without bias, and the same on every machine, which
// std::uniform_int_distribution does not promise. (Lemire 2019, "Fast random integer generation
// in an interval".)
inline uint64_t Bounded(std::mt19937_64& generator, uint64_t bound) {
  using Wide = unsigned __int128;
  Wide product = Wide{generator()} * bound;
  if (static_cast<uint64_t>(product) < bound) {
    const uint64_t threshold = -bound % bound;
    while (static_cast<uint64_t>(product) < threshold) product = Wide{generator()} * bound;
  }
  return static_cast<uint64_t>(product >> 64);
}

// Fisher and Yates's shuffle: all orders are equally likely.
inline void Shuffle(absl::Span<int64_t> values, std::mt19937_64& generator) {
  for (int64_t last = static_cast<int64_t>(values.size()) - 1; last > 0; --last) {
    std::swap(values[last], values[Bounded(generator, last + 1)]);
  }
}

}  // namespace lockstep::data
