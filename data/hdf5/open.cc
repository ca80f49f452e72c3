// Source::Open: what the files are, and whether they fit together and the fields that were asked
// for.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/data/hdf5/source.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr int64_t kUnchunkedBlockBytes = 1 << 20;
constexpr int64_t kMostBlocks = int64_t{1} << 28;  // of a column: above that, a file is damaged
constexpr size_t kChunkCacheBytes = 16 << 20;      // where HDF5 decodes: at least one chunk

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

Handle AccessList(bool lock_file, bool* finds_chunks) {
  Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  *finds_chunks = !lock_file && UseReadDriver(access.get());
  if (!*finds_chunks) {
    H5Pset_file_locking(access.get(), lock_file, /*ignore_when_disabled=*/true);
  }
  return access;
}

absl::StatusOr<std::unique_ptr<File>> OpenFile(const std::string& path, bool lock_file) {
  auto file = std::make_unique<File>();
  file->path = path;
  file->descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status = {};
  if (file->descriptor < 0 || fstat(file->descriptor, &status) != 0) {
    const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::DataLossError(message);
  }
  if (!S_ISREG(status.st_mode)) {
    return Invalid(absl::StrCat(path, ": is no file, but a folder or a device"));
  }
  file->bytes = status.st_size;
  if (file->bytes == 0) return absl::DataLossError(absl::StrCat(path, ": is empty"));
  const Hdf5Lock lock;
  const Handle access = AccessList(lock_file, &file->finds_chunks);
  file->handle = Handle(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  if (!file->handle.ok()) {
    return Hdf5Error(absl::StatusCode::kDataLoss,
                     absl::StrCat(path, ": is no HDF5 file, or a damaged one"));
  }
  return file;
}

#if H5_VERSION_GE(1, 12, 0)
using ObjectInfo = H5O_info2_t;
constexpr auto kVisit = H5Ovisit3;
#else
using ObjectInfo = H5O_info_t;
constexpr auto kVisit = H5Ovisit2;
#endif

// Names of the datasets of a file, the first few of them.
std::vector<std::string> DatasetsOf(const File& file) {
  const auto take = [](hid_t, const char* name, const ObjectInfo* info, void* out) -> herr_t {
    auto& names = *static_cast<std::vector<std::string>*>(out);
    if (info->type == H5O_TYPE_DATASET) names.push_back(name);
    return names.size() < 20 ? 0 : 1;
  };
  std::vector<std::string> names;
  kVisit(file.handle.get(), H5_INDEX_NAME, H5_ITER_INC, take, &names, H5O_INFO_BASIC);
  return names;
}

absl::StatusOr<Element> IntegerOf(size_t bytes, bool is_signed) {
  if (bytes <= 1) return is_signed ? Element::kInt8 : Element::kUint8;
  if (bytes <= 2) return is_signed ? Element::kInt16 : Element::kUint16;
  if (bytes <= 4) return is_signed ? Element::kInt32 : Element::kUint32;
  if (bytes <= 8) return is_signed ? Element::kInt64 : Element::kUint64;
  return Invalid(absl::StrCat("holds integers of ", bytes, " bytes"));
}

absl::StatusOr<Element> ElementOf(hid_t type) {
  static constexpr std::pair<H5T_class_t, const char*> kOthers[] = {
      {H5T_TIME, "times"},          {H5T_STRING, "strings"},   {H5T_BITFIELD, "bit fields"},
      {H5T_OPAQUE, "opaque bytes"}, {H5T_COMPOUND, "records"}, {H5T_REFERENCE, "references"},
      {H5T_ENUM, "enumerations"},   {H5T_VLEN, "lists"},       {H5T_ARRAY, "arrays"}};
  const H5T_class_t kind = H5Tget_class(type);
  const size_t bytes = H5Tget_size(type);
  if (kind == H5T_INTEGER) return IntegerOf(bytes, H5Tget_sign(type) == H5T_SGN_2);
  if (kind == H5T_ENUM) {  // the booleans of h5py: FALSE = 0, TRUE = 1
    const Handle base(H5Tget_super(type), H5Tclose);
    if (H5Tget_class(base.get()) == H5T_INTEGER) {
      return IntegerOf(H5Tget_size(base.get()), H5Tget_sign(base.get()) == H5T_SGN_2);
    }
  }
  if (kind == H5T_FLOAT) {
    if (bytes == 2) return Element::kFloat16;
    return bytes <= 4 ? Element::kFloat32 : Element::kFloat64;
  }
  for (const auto& [other, name] : kOthers) {
    if (kind == other) {
      return Invalid(absl::StrCat("holds ", name, ", not numbers of a simple type"));
    }
  }
  return Invalid("holds values of a type that is not known");
}

Handle MemoryType(Element element, hid_t file_type) {
  const auto copy = [](hid_t type) { return Handle(H5Tcopy(type), H5Tclose); };
  if (H5Tget_class(file_type) == H5T_ENUM) {  // to HDF5 no integers
    return Handle(H5Tget_native_type(file_type, H5T_DIR_ASCEND), H5Tclose);
  }
  switch (element) {
    case Element::kUint8:
      return copy(H5T_NATIVE_UINT8);
    case Element::kInt8:
      return copy(H5T_NATIVE_INT8);
    case Element::kUint16:
      return copy(H5T_NATIVE_UINT16);
    case Element::kInt16:
      return copy(H5T_NATIVE_INT16);
    case Element::kUint32:
      return copy(H5T_NATIVE_UINT32);
    case Element::kInt32:
      return copy(H5T_NATIVE_INT32);
    case Element::kUint64:
      return copy(H5T_NATIVE_UINT64);
    case Element::kInt64:
      return copy(H5T_NATIVE_INT64);
    case Element::kFloat32:
      return copy(H5T_NATIVE_FLOAT);
    case Element::kFloat64:
      return copy(H5T_NATIVE_DOUBLE);
    case Element::kFloat16: {
      // IEEE 754's binary16; the order of the calls keeps each step a valid type.
      Handle half = copy(H5T_NATIVE_FLOAT);
      H5Tset_fields(half.get(), /*spos=*/15, /*epos=*/10, /*esize=*/5, /*mpos=*/0, /*msize=*/10);
      H5Tset_size(half.get(), /*size=*/2);
      H5Tset_ebias(half.get(), /*ebias=*/15);
      return half;
    }
  }
  return Handle();
}

// Opens one dataset of one file after the other and checks it; `where` begins its messages.
class SegmentOpener {
 public:
  SegmentOpener(const File& file, Column& column, std::vector<std::string>& notes)
      : file_(file),
        column_(column),
        notes_(notes),
        where_(absl::StrCat(file.path, ": '", column.field.dataset, "'")) {}

  absl::Status Open() {
    segment_.file = &file_;
    if (absl::Status status = OpenDataset(); !status.ok()) return status;
    if (absl::Status status = CheckType(); !status.ok()) return status;
    if (absl::Status status = CheckShape(); !status.ok()) return status;
    const Handle creation(H5Dget_create_plist(segment_.dataset.get()), H5Pclose);
    if (absl::Status status = CheckFilters(creation.get()); !status.ok()) return status;
    if (absl::Status status = OpenVirtualSources(creation.get()); !status.ok()) return status;
    if (absl::Status status = ChooseBlocks(creation.get()); !status.ok()) return status;
    Place();
    return absl::OkStatus();
  }

 private:
  absl::Status OpenDataset() {
    const std::string& name = column_.field.dataset;
    // Big enough for the chunk that is being read: the default of 1 MiB decodes a larger one at
    // each touch.
    const Handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose);
    H5Pset_chunk_cache(access.get(), H5D_CHUNK_CACHE_NSLOTS_DEFAULT, kChunkCacheBytes,
                       H5D_CHUNK_CACHE_W0_DEFAULT);
    segment_.dataset = Handle(H5Dopen2(file_.handle.get(), name.c_str(), access.get()), H5Dclose);
    if (segment_.dataset.ok()) return absl::OkStatus();
    const std::string reason = Hdf5Reason();
    const std::vector<std::string> names = DatasetsOf(file_);
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return absl::DataLossError(
          absl::StrCat(where_, ": is damaged, or of a newer HDF5 than this one (", reason, ")"));
    }
    return absl::NotFoundError(absl::StrCat(file_.path, ": there is no dataset '", name, "'",
                                            names.empty() ? ", and no other" : "; there is ",
                                            absl::StrJoin(names, ", ")));
  }

  absl::Status CheckType() {
    const Handle type(H5Dget_type(segment_.dataset.get()), H5Tclose);
    const absl::StatusOr<Element> element = ElementOf(type.get());
    if (!element.ok()) {
      return Invalid(absl::StrCat(where_, ": ", std::string{element.status().message()}));
    }
    segment_.type = MemoryType(*element, type.get());
    if (!segment_.type.ok()) {
      return Hdf5Error(absl::StatusCode::kDataLoss, absl::StrCat(where_, ": has no usable type"));
    }
    native_ = H5Tequal(type.get(), segment_.type.get()) > 0;
    if (column_.segments.empty()) {
      column_.element = *element;
    } else if (column_.element != *element) {
      return Invalid(absl::StrCat(where_, ": holds ", NameOf(*element), ", but in ",
                                  column_.segments[0].file->path, " ", NameOf(column_.element)));
    }
    return absl::OkStatus();
  }

  absl::Status CheckShape() {
    const Handle space(H5Dget_space(segment_.dataset.get()), H5Sclose);
    const int dimensions = H5Sget_simple_extent_ndims(space.get());
    if (dimensions < 1) {
      return Invalid(absl::StrCat(where_, ": has no rows: it is a single value or nothing"));
    }
    segment_.sizes.resize(dimensions);
    H5Sget_simple_extent_dims(space.get(), segment_.sizes.data(), nullptr);
    __int128 bytes = BytesOf(column_.element);
    for (size_t i = 0; i < segment_.sizes.size(); ++i) {
      if (segment_.sizes[i] == 0 && i > 0) {
        return Invalid(absl::StrCat(where_, ": rows of shape ", RowShape(), " hold nothing"));
      }
      if (i > 0) bytes *= segment_.sizes[i];
      if (bytes > INT64_MAX / 4 || segment_.sizes[i] > INT64_MAX / 4) {
        return absl::DataLossError(absl::StrCat(where_, ": is damaged: it cannot be as large as ",
                                                absl::StrJoin(segment_.sizes, " x ")));
      }
    }
    segment_.rows = static_cast<int64_t>(segment_.sizes[0]);
    if (column_.segments.empty()) {
      column_.row_bytes = static_cast<int64_t>(bytes);
      column_.row_values = column_.row_bytes / BytesOf(column_.element);
    } else if (!std::equal(segment_.sizes.begin() + 1, segment_.sizes.end(),
                           column_.segments[0].sizes.begin() + 1,
                           column_.segments[0].sizes.end())) {
      return Invalid(absl::StrCat(where_, ": rows have shape ", RowShape(), ", but in ",
                                  column_.segments[0].file->path, " another"));
    }
    return absl::OkStatus();
  }

  std::string RowShape() const {
    return absl::StrCat("(", absl::StrJoin(segment_.sizes.begin() + 1, segment_.sizes.end(), ", "),
                        ")");
  }

  absl::Status CheckFilters(hid_t creation) {
    const int count = H5Pget_nfilters(creation);
    for (int i = 0; i < count; ++i) {
      unsigned flags = 0, config = 0;
      unsigned values[8] = {};
      size_t value_count = std::size(values);
      char name[64] = "";
      const H5Z_filter_t id =
          H5Pget_filter2(creation, i, &flags, &value_count, values, sizeof(name), name, &config);
      if (id == H5Z_FILTER_DEFLATE) {
        segment_.filters.push_back({Filter::kDeflate});
      } else if (id == H5Z_FILTER_SHUFFLE) {
        segment_.filters.push_back({Filter::kShuffle, value_count > 0 ? values[0] : 0});
      } else if (id == H5Z_FILTER_FLETCHER32) {
        segment_.filters.push_back({Filter::kFletcher32});
      } else {
        const std::string which =
            absl::StrCat("filter ", id, name[0] != '\0' ? absl::StrCat(" (", name, ")") : "");
        if (id < 0 || H5Zfilter_avail(id) <= 0) {
          return absl::FailedPreconditionError(absl::StrCat(
              where_, ": is stored with ", which, ", which this HDF5 does not have; name the ",
              "folder of its plugin in HDF5_PLUGIN_PATH, or store the file anew: h5repack -f ",
              "GZIP=4 ", file_.path, " NEW_FILE"));
        }
        notes_.push_back(
            absl::StrCat(where_, " is stored with ", which, ", which HDF5 undoes, in one thread"));
        own_filters_ = true;
      }
    }
    return absl::OkStatus();
  }

  // HDF5 reads rows of source files that it cannot open as if they held zeros. So they are opened
  // here, as HDF5 does it, and stay open.
  absl::Status OpenVirtualSources(hid_t creation) {
    if (H5Pget_layout(creation) != H5D_VIRTUAL) return absl::OkStatus();
    size_t count = 0;
    H5Pget_virtual_count(creation, &count);
    std::map<std::string, hid_t> opened;
    for (size_t i = 0; i < count; ++i) {
      const std::string file = VirtualName(H5Pget_virtual_filename, creation, i);
      const std::string dataset = VirtualName(H5Pget_virtual_dsetname, creation, i);
      // A pattern of names, or this file itself.
      if (file.find('%') != std::string::npos || dataset.find('%') != std::string::npos) continue;
      if (file == ".") continue;
      const auto folder = std::filesystem::path(file_.path).parent_path();
      const std::string beside = (folder / file).string();  // where HDF5 looks first
      const std::string path = access(beside.c_str(), F_OK) == 0 ? beside : file;
      const std::string what =
          absl::StrCat(where_, ": is put together from other files, of which ", path);
      if (opened.find(path) == opened.end()) {
        if (access(path.c_str(), R_OK) != 0) {
          return absl::NotFoundError(absl::StrCat(what, ": ", std::strerror(errno)));
        }
        const Handle access(H5Fget_access_plist(file_.handle.get()), H5Pclose);
        segment_.sources.emplace_back(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()),
                                      H5Fclose);
        if (!segment_.sources.back().ok()) {
          return Hdf5Error(
              absl::StatusCode::kDataLoss,
              absl::StrCat(what, " cannot be opened; where it is locks that fail, set ",
                           "HDF5_USE_FILE_LOCKING=FALSE"));
        }
        opened[path] = segment_.sources.back().get();
      }
      if (!Handle(H5Dopen2(opened[path], dataset.c_str(), H5P_DEFAULT), H5Dclose).ok()) {
        return absl::NotFoundError(absl::StrCat(what, " has no dataset '", dataset, "'"));
      }
    }
    return absl::OkStatus();
  }

  static std::string VirtualName(ssize_t (*get)(hid_t, size_t, char*, size_t), hid_t creation,
                                 size_t index) {
    const ssize_t length = get(creation, index, nullptr, 0);
    if (length <= 0) return "";
    std::string name(length + 1, '\0');  // HDF5 ends it with a zero
    get(creation, index, name.data(), name.size());
    name.resize(length);
    return name;
  }

  absl::Status ChooseBlocks(hid_t creation) {
    segment_.block_rows = std::clamp<int64_t>(kUnchunkedBlockBytes / column_.row_bytes, 1,
                                              std::max<int64_t>(1, segment_.rows));
    const bool chunked = H5Pget_layout(creation) == H5D_CHUNKED;
    if (!chunked) {
      segment_.offset = ContiguousOffset(creation);
      notes_.push_back(absl::StrCat(where_, " is not chunked: it is read ", segment_.block_rows,
                                    " rows at a time"));
    } else {
      std::vector<hsize_t> chunk(segment_.sizes.size());
      if (H5Pget_chunk(creation, chunk.size(), chunk.data()) != static_cast<int>(chunk.size())) {
        return Hdf5Error(absl::StatusCode::kDataLoss, absl::StrCat(where_, ": has no chunk sizes"));
      }
      const bool whole_rows =
          std::equal(chunk.begin() + 1, chunk.end(), segment_.sizes.begin() + 1);
      if (static_cast<__int128>(chunk[0]) * column_.row_bytes <= INT64_MAX / 4) {
        segment_.block_rows = static_cast<int64_t>(chunk[0]);
      }
      segment_.raw = whole_rows && native_ && !own_filters_;
      unsigned options = 0;
      H5Pget_chunk_opts(creation, &options);
      segment_.raw_last = (options & H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS) == 0;
      if (!whole_rows) {
        notes_.push_back(absl::StrCat(where_, " has chunks of ", absl::StrJoin(chunk, " x "),
                                      ", which do not hold whole rows: HDF5 reads it"));
      } else if (!native_) {
        notes_.push_back(absl::StrCat(
            where_, " holds numbers as other machines write them: HDF5 converts them"));
      }
    }
    if (segment_.rows / segment_.block_rows > kMostBlocks) {
      return absl::DataLossError(absl::StrCat(where_, ": is damaged: ", segment_.rows,
                                              " rows in chunks of ", segment_.block_rows));
    }
    return absl::OkStatus();
  }

  // Where rows begin that lie in the file one after the other, as they are in memory.
  std::optional<int64_t> ContiguousOffset(hid_t creation) const {
    hsize_t before_hdf5 = 0;
    const Handle file_creation(H5Fget_create_plist(file_.handle.get()), H5Pclose);
    H5Pget_userblock(file_creation.get(), &before_hdf5);
    const haddr_t offset = H5Dget_offset(segment_.dataset.get());
    if (H5Pget_layout(creation) != H5D_CONTIGUOUS || !native_ || before_hdf5 != 0 ||
        H5Pget_external_count(creation) != 0 || offset == HADDR_UNDEF) {
      return std::nullopt;
    }
    return static_cast<int64_t>(offset);
  }

  void Place() {
    if (!column_.segments.empty()) {
      segment_.first_block = column_.blocks();
      segment_.first_row = column_.segments.back().first_row + column_.segments.back().rows;
    }
    column_.max_block_bytes =
        std::max(column_.max_block_bytes, segment_.block_rows * column_.row_bytes);
    column_.segments.push_back(std::move(segment_));
  }

  const File& file_;
  Column& column_;
  std::vector<std::string>& notes_;
  const std::string where_;
  Segment segment_;
  bool native_ = false;
  bool own_filters_ = false;
};

// What needs all files: the type and shape of a field in batches.
absl::Status FinishColumn(Column& column) {
  Field& field = column.field;
  const Segment& first = column.segments[0];
  const std::string where = absl::StrCat(first.file->path, ": '", field.dataset, "'");
  if (!field.dtype) field.dtype = field.classes ? at::kLong : NaturalType(column.element);
  absl::StatusOr<Conversion> conversion =
      Conversion::Make(column.element, *field.dtype, field.divide_by, field.classes);
  if (!conversion.ok()) {
    return Invalid(absl::StrCat(where, ": ", std::string{conversion.status().message()}));
  }
  column.conversion = *conversion;
  column.shape.assign(first.sizes.begin() + 1, first.sizes.end());
  if (!field.shape.empty()) {
    __int128 values = 1;
    for (int64_t size : field.shape) values = size < 1 || values > INT64_MAX ? 0 : values * size;
    if (values != column.row_values) {
      return Invalid(absl::StrCat(where, ": rows have shape (", absl::StrJoin(column.shape, ", "),
                                  "), which is not ", absl::StrJoin(field.shape, " x "),
                                  " values"));
    }
    column.shape = field.shape;
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const Options& options) {
  if (options.files.empty()) return Invalid("hdf5: no file is named");
  if (options.fields.empty()) return Invalid("hdf5: no field is named");
  if (options.decode_threads < 0) {
    return Invalid(absl::StrCat("hdf5: decode_threads is ", options.decode_threads,
                                ", but must be 0 (one a core) or more"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Source>> Source::Open(const Options& options) {
  if (absl::Status status = CheckFields(options); !status.ok()) return status;
  const Hdf5Lock lock;
  auto source = std::make_unique<Source>();
  source->name_ = options.files[0];
  if (options.files.size() > 1) absl::StrAppend(&source->name_, " and others");
  for (const Field& field : options.fields) {
    auto& column = *source->columns_.emplace_back(std::make_unique<Column>());
    column.field = field;
    if (field.name.empty()) {
      column.field.name = field.dataset.substr(field.dataset.rfind('/') + 1);
    }
    for (const auto& other : source->columns_) {
      if (other.get() != &column && other->field.name == column.field.name) {
        return Invalid(
            absl::StrCat("hdf5: two fields are called '", column.field.name, "'; set Field::name"));
      }
    }
  }
  for (const std::string& path : options.files) {
    absl::StatusOr<std::unique_ptr<File>> file = OpenFile(path, options.lock_files);
    if (!file.ok()) return file.status();
    const Column& first = *source->columns_[0];
    for (auto& column : source->columns_) {
      absl::Status status = SegmentOpener(**file, *column, source->notes_).Open();
      if (!status.ok()) return status;
      if (column->segments.back().rows != first.segments.back().rows) {
        return Invalid(absl::StrCat(path, ": '", first.field.dataset, "' has ",
                                    first.segments.back().rows, " rows, but '",
                                    column->field.dataset, "' has ", column->segments.back().rows,
                                    ": they do not belong together"));
      }
    }
    source->rows_ += first.segments.back().rows;
    source->files_.push_back(*std::move(file));
  }
  for (auto& column : source->columns_) {
    if (absl::Status status = FinishColumn(*column); !status.ok()) return status;
    std::erase_if(column->segments, [](const Segment& segment) { return segment.rows == 0; });
  }
  if (source->rows_ == 0) return Invalid(absl::StrCat(source->name_, ": there are no rows"));
  return source;
}

}  // namespace lockstep::data::hdf5
