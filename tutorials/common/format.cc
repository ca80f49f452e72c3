#include "lockstep/tutorials/common/format.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lockstep::tutorials {

std::string ThreeDigits(double value) {
  const double size = std::abs(value);
  // The limits are those at which rounding adds a digit.
  const int decimals = size < 0.9995 ? 3 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f", decimals, value);
}

std::string InMebibytes(int64_t bytes) {
  return ThreeDigits(static_cast<double>(bytes) / (1 << 20));
}

std::string InMilliseconds(absl::Duration time) {
  return ThreeDigits(absl::ToDoubleMilliseconds(time));
}

std::string WithThousands(int64_t value) {
  std::string text = absl::StrCat(value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t i = text.size(); i > first + 3;) text.insert(i -= 3, ",");
  return text;
}

}  // namespace lockstep::tutorials
