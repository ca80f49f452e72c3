#pragma once

#include <hdf5.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::data::hdf5 {

// For tests: HDF5 files of every layout, written with HDF5's own C API.

// What a dataset of a test file holds: Value(row, element), as any type, as it is below 100.
int64_t Value(int64_t row, int64_t element);

struct TestDataset {
  std::string name = "images";
  hid_t type = H5T_STD_U8LE;             // in the file
  std::vector<hsize_t> sizes = {23, 5};  // rows, and the shape of one
  std::vector<hsize_t> chunk = {};       // none: contiguous
  int gzip = 0;
  bool shuffle = false;
  bool fletcher32 = false;
  bool fletcher32_first = false;  // before shuffle and gzip, not after
  bool scale_offset = false;      // HDF5's scale-offset filter, which only HDF5 undoes
  bool unfiltered_edges = false;  // H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
  bool compact = false;           // in the object header
  int64_t rows_written = -1;      // fewer than sizes[0]: the others hold the fill value 0
  int64_t first_row = 0;          // row r holds Value(first_row + r, ...)
};

// A new path in the folder for temporary files.
std::string TemporaryPath(const std::string& name);

// Writes the datasets to a new file, and returns its path. `latest`: with HDF5 1.10's format, whose
// metadata have checksums.
std::string MakeFile(const std::string& name, const std::vector<TestDataset>& datasets,
                     bool latest = false);

// A file whose dataset `name` is put together from datasets of the same name in `parts`, of
// `rows` rows of `shape` each.
std::string MakeVirtualFile(const std::string& file, const std::string& name,
                            const std::vector<std::string>& parts, hsize_t rows,
                            std::vector<hsize_t> shape);

std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::string& bytes);

}  // namespace lockstep::data::hdf5
