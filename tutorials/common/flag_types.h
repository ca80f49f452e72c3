#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace lockstep::tutorials {

// Types of flags that refuse senseless values when the command line is read.
//
//   ABSL_FLAG(lockstep::tutorials::Count, epochs, 3, "passes over the training images");
//   for (int64_t epoch = 0; epoch < absl::GetFlag(FLAGS_epochs); ++epoch) ...

// A whole number from 1 up.
struct Count {
  Count(int64_t count) : value(count) {}  // implicit: for a flag's default
  operator int64_t() const { return value; }
  int64_t value;
};
bool AbslParseFlag(absl::string_view text, Count* count, std::string* error);
std::string AbslUnparseFlag(Count count);

// A finite number above 0.
struct Rate {
  Rate(double rate) : value(rate) {}  // implicit: for a flag's default
  operator double() const { return value; }
  double value;
};
bool AbslParseFlag(absl::string_view text, Rate* rate, std::string* error);
std::string AbslUnparseFlag(Rate rate);

}  // namespace lockstep::tutorials
