#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lockstep::data::mnist {

// An array of bytes in row-major order, as an IDX file holds it.
struct IdxArray {
  std::vector<int64_t> sizes;
  std::string values;
};

// Reads an IDX file of unsigned bytes with `dimensions` dimensions; one whose name ends in .gz is
// decompressed. NOT_FOUND where there is no such file; else DATA_LOSS, naming the file.
absl::StatusOr<IdxArray> ReadIdx(const std::string& path, int dimensions);

}  // namespace lockstep::data::mnist
