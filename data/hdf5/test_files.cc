#include "lockstep/data/hdf5/test_files.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace lockstep::data::hdf5 {
namespace {

void Check(int64_t result, const char* what) {
  if (result < 0) throw std::runtime_error(what);
}

void WriteDataset(hid_t file, const TestDataset& dataset) {
  const hid_t space = H5Screate_simple(dataset.sizes.size(), dataset.sizes.data(), nullptr);
  const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
  if (!dataset.chunk.empty()) {
    Check(H5Pset_chunk(creation, dataset.chunk.size(), dataset.chunk.data()), "chunk");
    if (dataset.fletcher32_first) Check(H5Pset_fletcher32(creation), "fletcher32");
    if (dataset.scale_offset) {
      Check(H5Pset_scaleoffset(creation, H5Z_SO_INT, H5Z_SO_INT_MINBITS_DEFAULT), "scale-offset");
    }
    if (dataset.shuffle) Check(H5Pset_shuffle(creation), "shuffle");
    if (dataset.gzip > 0) Check(H5Pset_deflate(creation, dataset.gzip), "deflate");
    if (dataset.fletcher32) Check(H5Pset_fletcher32(creation), "fletcher32");
    if (dataset.unfiltered_edges) {
      Check(H5Pset_chunk_opts(creation, H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS), "chunk options");
    }
  }
  if (dataset.compact) Check(H5Pset_layout(creation, H5D_COMPACT), "compact");
  const hid_t id = H5Dcreate2(file, dataset.name.c_str(), dataset.type, space, H5P_DEFAULT,
                              creation, H5P_DEFAULT);
  Check(id, "dataset");
  std::vector<hsize_t> count = dataset.sizes;
  if (dataset.rows_written >= 0 && !count.empty()) count[0] = dataset.rows_written;
  int64_t row_values = 1;
  for (size_t i = 1; i < count.size(); ++i) row_values *= count[i];
  const int64_t rows = count.empty() ? 1 : count[0];
  if (rows * row_values > 0) {
    std::vector<int64_t> values;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < row_values; ++i) {
        values.push_back(Value(dataset.first_row + row, i));
      }
    }
    if (!count.empty()) {
      const std::vector<hsize_t> start(count.size(), 0);
      Check(
          H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr),
          "selection");
    }
    const hid_t memory = H5Screate_simple(count.size(), count.data(), nullptr);
    if (H5Tget_class(dataset.type) == H5T_ENUM) {
      const hid_t native = H5Tget_native_type(dataset.type, H5T_DIR_ASCEND);
      const std::vector<int8_t> bytes(values.begin(), values.end());
      const std::vector<int16_t> words(values.begin(), values.end());
      const void* data = H5Tget_size(native) == 1 ? static_cast<const void*>(bytes.data())
                                                  : static_cast<const void*>(words.data());
      Check(H5Dwrite(id, native, memory, space, H5P_DEFAULT, data), "write");
      H5Tclose(native);
    } else if (H5Tget_class(dataset.type) == H5T_INTEGER ||
               H5Tget_class(dataset.type) == H5T_FLOAT) {
      Check(H5Dwrite(id, H5T_NATIVE_INT64, memory, space, H5P_DEFAULT, values.data()), "write");
    }
    H5Sclose(memory);
  }
  H5Dclose(id);
  H5Pclose(creation);
  H5Sclose(space);
}

}  // namespace

int64_t Value(int64_t row, int64_t element) { return (31 * row + 7 * element + row / 10) % 100; }

std::string TemporaryPath(const std::string& name) {
  static int count = 0;
  const char* folder = std::getenv("TEST_TMPDIR");
  const std::string unique =
      std::string(folder == nullptr ? "/tmp" : folder) + "/hdf5_" + std::to_string(count++);
  std::filesystem::create_directories(unique);
  return unique + "/" + name;
}

std::string MakeFile(const std::string& name, const std::vector<TestDataset>& datasets,
                     bool latest) {
  const std::string path = TemporaryPath(name);
  const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (latest) Check(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "format");
  const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access);
  Check(file, "file");
  for (const TestDataset& dataset : datasets) WriteDataset(file, dataset);
  H5Pclose(access);
  Check(H5Fclose(file), "close");
  return path;
}

std::string MakeVirtualFile(const std::string& file, const std::string& name,
                            const std::vector<std::string>& parts, hsize_t rows,
                            std::vector<hsize_t> shape) {
  shape.insert(shape.begin(), rows * parts.size());
  std::vector<hsize_t> part_sizes = shape;
  part_sizes[0] = rows;
  const std::string path = TemporaryPath(file);
  const hid_t id = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  Check(id, "file");
  const hid_t space = H5Screate_simple(shape.size(), shape.data(), nullptr);
  const hid_t part_space = H5Screate_simple(part_sizes.size(), part_sizes.data(), nullptr);
  const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
  std::vector<hsize_t> start(shape.size(), 0);
  for (const std::string& part : parts) {
    Check(H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, part_sizes.data(),
                              nullptr),
          "selection");
    Check(H5Pset_virtual(creation, space, part.c_str(), name.c_str(), part_space), "virtual");
    start[0] += rows;
  }
  H5Sselect_all(space);
  const hid_t dataset =
      H5Dcreate2(id, name.c_str(), H5T_STD_U8LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
  Check(dataset, "dataset");
  H5Dclose(dataset);
  H5Pclose(creation);
  H5Sclose(part_space);
  H5Sclose(space);
  Check(H5Fclose(id), "close");
  return path;
}

std::string ReadFile(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(bytes).str();
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace lockstep::data::hdf5
