#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep::parallel::checkpoint {

// One tensor of a header: values are bytes [begin, end) after the header.
struct TensorEntry {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct Header {
  std::vector<TensorEntry> entries;  // in the order of their values
  std::map<std::string, std::string> metadata;
};

// Place of a type in the order that Python's writer puts tensors in (large elements first);
// nothing for a type that the format does not have.
std::optional<int> TypeOrder(at::ScalarType dtype);

// "F32" for kFloat, which must be a type that the format has; and back.
std::string TypeName(at::ScalarType dtype);
std::optional<at::ScalarType> TypeNamed(const std::string& name);

// The JSON text, padded with spaces to a multiple of 8 bytes. INVALID_ARGUMENT where a name is no
// UTF-8.
absl::StatusOr<std::string> FormatHeader(const Header& header);

// Reads and checks JSON text for a file with `value_bytes` bytes after it. DATA_LOSS where
// anything is wrong: the message names the tensor, but not the file.
absl::StatusOr<Header> ParseHeader(const std::string& text, uint64_t value_bytes);

}  // namespace lockstep::parallel::checkpoint
