#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep::data::hdf5 {

// One dataset of a new file.
struct WriterField {
  std::string dataset;               // Name: "images". Required.
  at::ScalarType dtype = at::kByte;  // Default: uint8.
  std::vector<int64_t> shape = {};   // Of a row. Default: one value.
  int64_t chunk_rows = 256;          // Rows of a chunk, at least 1. Default: 256.
};

struct WriterOptions {
  std::vector<WriterField> fields;  // Required.
  int64_t rows = 0;                 // Of each dataset, at least 1. Required.
  int gzip = 0;                     // Compression, from 1 (fast) to 9 (small); 0: none. Default: 0.
  bool shuffle = false;     // Before compression, lay together the first bytes of all values, the
                            // second, ...: helps values of several bytes. Default: false.
  bool fletcher32 = false;  // Store a checksum with each chunk. Default: false.
  std::map<std::string, std::string> attributes = {};  // Of the file, as text. Default: none.
};

// Writes an HDF5 file of chunked datasets, row after row, which appears under its name when all
// rows are in it and on disk, and not before: until then it is PATH.tmp.PID.
//
//   auto writer = lockstep::ValueOrThrow(data::hdf5::Writer::Create(
//       "train.h5", {.fields = {{.dataset = "images", .shape = {28, 28}}, {.dataset = "labels"}},
//                    .rows = 60'000, .gzip = 4}));
//   for (...) lockstep::ThrowIfError(writer->Append({images, labels}));  // some rows of both
//   lockstep::ThrowIfError(writer->Commit());
//
// Destroyed without Commit(), it leaves nothing. HDF5 1.10 and later read the file; its own data
// carry checksums in that format. Types: uint8, int8, int16, int32, int64, float32 and float64.
// Errors name the path. Not thread-safe.
class Writer {
 public:
  // INVALID_ARGUMENT for options that make no sense, UNAVAILABLE where no file can be made.
  static absl::StatusOr<std::unique_ptr<Writer>> Create(std::string path, WriterOptions options);
  virtual ~Writer() = default;

  // The next rows: a tensor for each field, in their order, contiguous, on the CPU, of type and
  // shape (rows, shape...). INVALID_ARGUMENT for others, and for more rows than were promised.
  virtual absl::Status Append(const std::vector<at::Tensor>& fields) = 0;

  // Ends the file and gives it its name. INVALID_ARGUMENT where rows are missing.
  virtual absl::Status Commit() = 0;

  // The name until then: for a signal handler to remove it.
  virtual const std::string& temporary_path() const = 0;
};

}  // namespace lockstep::data::hdf5
