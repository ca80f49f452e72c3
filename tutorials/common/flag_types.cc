#include "lockstep/tutorials/common/flag_types.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lockstep::tutorials {

bool AbslParseFlag(absl::string_view text, Count* count, std::string* error) {
  if (absl::SimpleAtoi(text, &count->value) && count->value >= 1) return true;
  *error = "give a whole number from 1 up";
  return false;
}

std::string AbslUnparseFlag(Count count) { return absl::StrCat(count.value); }

bool AbslParseFlag(absl::string_view text, Rate* rate, std::string* error) {
  if (absl::SimpleAtod(text, &rate->value) && std::isfinite(rate->value) && rate->value > 0) {
    return true;
  }
  *error = "give a number above 0";
  return false;
}

std::string AbslUnparseFlag(Rate rate) { return absl::StrCat(rate.value); }

}  // namespace lockstep::tutorials
