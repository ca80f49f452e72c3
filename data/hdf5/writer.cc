#include "lockstep/data/hdf5/writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/data/hdf5/handle.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr size_t kLeastChunkCacheBytes = 1 << 20;

hid_t TypeOf(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return H5T_NATIVE_UINT8;
    case at::kChar:
      return H5T_NATIVE_INT8;
    case at::kShort:
      return H5T_NATIVE_INT16;
    case at::kInt:
      return H5T_NATIVE_INT32;
    case at::kLong:
      return H5T_NATIVE_INT64;
    case at::kFloat:
      return H5T_NATIVE_FLOAT;
    case at::kDouble:
      return H5T_NATIVE_DOUBLE;
    default:
      return H5I_INVALID_HID;
  }
}

std::string Wrong(const WriterOptions& options) {
  if (options.fields.empty()) return "no field is named";
  if (options.rows < 1) return absl::StrCat("rows is ", options.rows, ", but must be at least 1");
  if (options.gzip < 0 || options.gzip > 9) {
    return absl::StrCat("gzip is ", options.gzip, ", but must be from 0 to 9");
  }
  for (const WriterField& field : options.fields) {
    if (TypeOf(field.dtype) < 0) {
      return absl::StrCat("'", field.dataset, "' cannot be of type ", c10::toString(field.dtype));
    }
    if (field.chunk_rows < 1) {
      return absl::StrCat("'", field.dataset, "' has chunk_rows ", field.chunk_rows,
                          ", but must have at least 1");
    }
    if (std::any_of(field.shape.begin(), field.shape.end(), [](int64_t s) { return s < 1; })) {
      return absl::StrCat("'", field.dataset, "' has rows of shape ",
                          absl::StrJoin(field.shape, " x "), ", which hold nothing");
    }
  }
  return "";
}

class FileWriter : public Writer {
 public:
  FileWriter(std::string path, WriterOptions options)
      : path_(std::move(path)),
        temporary_(absl::StrCat(path_, ".tmp.", getpid())),
        options_(std::move(options)) {}

  ~FileWriter() override {
    const Hdf5Lock lock;
    Close();
    if (!committed_) unlink(temporary_.c_str());
  }

  absl::Status Start() {
    const Hdf5Lock lock;
    const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
    H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_file_locking(access.get(), /*use_file_locking=*/false, /*ignore_when_disabled=*/true);
    file_ =
        Handle(H5Fcreate(temporary_.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), H5Fclose);
    if (!file_.ok()) {
      return Hdf5Error(absl::StatusCode::kUnavailable, absl::StrCat(path_, ": cannot be written"));
    }
    for (const WriterField& field : options_.fields) {
      if (!CreateDataset(field)) return Failed(absl::StrCat("no dataset '", field.dataset, "'"));
    }
    for (const auto& [name, text] : options_.attributes) {
      if (!WriteAttribute(name, text)) return Failed(absl::StrCat("no attribute '", name, "'"));
    }
    return absl::OkStatus();
  }

  absl::Status Append(const std::vector<at::Tensor>& fields) override {
    if (absl::Status status = Check(fields); !status.ok()) return status;
    const Hdf5Lock lock;
    for (size_t i = 0; i < fields.size(); ++i) {
      std::vector<hsize_t> start(fields[i].dim(), 0);
      std::vector<hsize_t> count(fields[i].sizes().begin(), fields[i].sizes().end());
      start[0] = written_;
      const Handle file_space(H5Dget_space(datasets_[i].get()), H5Sclose);
      const Handle space(H5Screate_simple(count.size(), count.data(), nullptr), H5Sclose);
      if (H5Sselect_hyperslab(file_space.get(), H5S_SELECT_SET, start.data(), nullptr, count.data(),
                              nullptr) < 0 ||
          H5Dwrite(datasets_[i].get(), TypeOf(options_.fields[i].dtype), space.get(),
                   file_space.get(), H5P_DEFAULT, fields[i].const_data_ptr()) < 0) {
        return Failed(absl::StrCat("rows from ", written_, " of '", options_.fields[i].dataset,
                                   "' could not be written"));
      }
    }
    written_ += fields[0].size(0);
    return absl::OkStatus();
  }

  absl::Status Commit() override {
    if (written_ != options_.rows) {
      return absl::InvalidArgumentError(absl::StrCat(
          path_, ": ", written_, " rows were written of ", options_.rows, " that were promised"));
    }
    {
      const Hdf5Lock lock;
      if (!Close()) return Failed("it could not be completed");
    }
    // A crash of the machine must not leave the name and lose the content.
    if (!Sync(temporary_) || std::rename(temporary_.c_str(), path_.c_str()) != 0 ||
        !Sync(std::filesystem::absolute(path_).parent_path().string())) {
      return absl::UnavailableError(absl::StrCat(path_, ": ", std::strerror(errno)));
    }
    committed_ = true;
    return absl::OkStatus();
  }

  const std::string& temporary_path() const override { return temporary_; }

 private:
  absl::Status Failed(const std::string& what) const {
    return Hdf5Error(absl::StatusCode::kUnavailable, absl::StrCat(path_, ": ", what));
  }

  bool CreateDataset(const WriterField& field) {
    std::vector<hsize_t> sizes = {static_cast<hsize_t>(options_.rows)};
    sizes.insert(sizes.end(), field.shape.begin(), field.shape.end());
    std::vector<hsize_t> chunk = sizes;
    chunk[0] = std::min(field.chunk_rows, options_.rows);
    const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    bool good = H5Pset_chunk(creation.get(), chunk.size(), chunk.data()) >= 0;
    if (options_.shuffle) good = good && H5Pset_shuffle(creation.get()) >= 0;
    if (options_.gzip > 0) good = good && H5Pset_deflate(creation.get(), options_.gzip) >= 0;
    if (options_.fletcher32) good = good && H5Pset_fletcher32(creation.get()) >= 0;
    // Each chunk is written piece by piece, and compressed when it leaves the cache.
    size_t bytes = c10::elementSize(field.dtype);
    for (hsize_t size : chunk) bytes *= size;
    const Handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose);
    H5Pset_chunk_cache(access.get(), H5D_CHUNK_CACHE_NSLOTS_DEFAULT,
                       std::max(2 * bytes, kLeastChunkCacheBytes), H5D_CHUNK_CACHE_W0_DEFAULT);
    const Handle space(H5Screate_simple(sizes.size(), sizes.data(), nullptr), H5Sclose);
    datasets_.emplace_back(H5Dcreate2(file_.get(), field.dataset.c_str(), TypeOf(field.dtype),
                                      space.get(), H5P_DEFAULT, creation.get(), access.get()),
                           H5Dclose);
    return good && datasets_.back().ok();
  }

  bool WriteAttribute(const std::string& name, const std::string& text) {
    const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(type.get(), text.size() + 1);
    H5Tset_cset(type.get(), H5T_CSET_UTF8);
    const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    const Handle attribute(
        H5Acreate2(file_.get(), name.c_str(), type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT),
        H5Aclose);
    return attribute.ok() && H5Awrite(attribute.get(), type.get(), text.c_str()) >= 0;
  }

  absl::Status Check(const std::vector<at::Tensor>& fields) const {
    std::string wrong;
    if (fields.size() != options_.fields.size()) {
      wrong = absl::StrCat(fields.size(), " tensors for ", options_.fields.size(), " datasets");
    }
    for (size_t i = 0; i < fields.size() && wrong.empty(); ++i) {
      const WriterField& field = options_.fields[i];
      const at::Tensor& tensor = fields[i];
      const bool fits = tensor.dim() == static_cast<int64_t>(field.shape.size()) + 1 &&
                        tensor.sizes().slice(1) == at::IntArrayRef(field.shape) &&
                        tensor.size(0) == fields[0].size(0);
      if (!fits || tensor.scalar_type() != field.dtype || !tensor.is_contiguous() ||
          !tensor.is_cpu()) {
        wrong = absl::StrCat(
            "'", field.dataset, "' takes contiguous tensors of ", c10::toString(field.dtype),
            " on the CPU, equally many rows of shape (", absl::StrJoin(field.shape, ", "), ")");
      } else if (written_ + tensor.size(0) > options_.rows) {
        wrong = absl::StrCat(written_ + tensor.size(0), " rows are more than the ", options_.rows,
                             " that were promised");
      }
    }
    return wrong.empty() ? absl::OkStatus()
                         : absl::InvalidArgumentError(absl::StrCat(path_, ": ", wrong));
  }

  // What is closed is on its way to the disk.
  bool Close() {
    datasets_.clear();
    if (!file_.ok()) return true;
    const bool flushed = H5Fflush(file_.get(), H5F_SCOPE_GLOBAL) >= 0;
    file_ = Handle();
    return flushed;
  }

  static bool Sync(const std::string& path) {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return false;
    const bool good = fsync(descriptor) == 0;
    close(descriptor);
    return good;
  }

  const std::string path_;
  const std::string temporary_;
  const WriterOptions options_;
  Handle file_;
  std::vector<Handle> datasets_;
  int64_t written_ = 0;
  bool committed_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Writer>> Writer::Create(std::string path, WriterOptions options) {
  const std::string wrong = Wrong(options);
  if (!wrong.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", wrong));
  auto writer = std::make_unique<FileWriter>(std::move(path), std::move(options));
  absl::Status status = writer->Start();
  if (!status.ok()) return status;
  return writer;
}

}  // namespace lockstep::data::hdf5
