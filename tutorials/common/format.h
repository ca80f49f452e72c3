#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

// Numbers as people read them. Units are the caller's to write: beside the number or in a header.
namespace lockstep::tutorials {

// Three significant digits, but no more than three decimals: 0.012, 4.58, 12.3, 1293.
std::string ThreeDigits(double value);

// Of 2^20 bytes: InMebibytes(4800000) is "4.58".
std::string InMebibytes(int64_t bytes);

std::string InMilliseconds(absl::Duration time);

// WithThousands(1199882) is "1,199,882".
std::string WithThousands(int64_t value);

}  // namespace lockstep::tutorials
