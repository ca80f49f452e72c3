#include "lockstep/data/hdf5/driver.h"

#include "lockstep/data/hdf5/handle.h"

#if !H5_VERSION_GE(1, 13, 0)
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

namespace lockstep::data::hdf5 {
namespace {

// Set while FindChunk asks HDF5 for a chunk; guarded by Hdf5Lock.
ChunkPlace* wanted = nullptr;
int times_read = 0;

struct OpenFile {
  H5FD_t common;  // first: HDF5 knows a file by it
  int descriptor = -1;
  haddr_t end_of_addresses = 0;
  haddr_t end_of_file = 0;
  dev_t device = 0;
  ino_t inode = 0;
};

OpenFile* Of(H5FD_t* file) { return reinterpret_cast<OpenFile*>(file); }
const OpenFile* Of(const H5FD_t* file) { return reinterpret_cast<const OpenFile*>(file); }

H5FD_t* Open(const char* name, unsigned flags, hid_t, haddr_t) {
  if ((flags & H5F_ACC_RDWR) != 0) return nullptr;
  auto file = std::make_unique<OpenFile>();
  file->descriptor = open(name, O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (file->descriptor < 0) return nullptr;
  if (fstat(file->descriptor, &status) != 0) {
    close(file->descriptor);
    return nullptr;
  }
  file->end_of_file = static_cast<haddr_t>(status.st_size);
  file->device = status.st_dev;
  file->inode = status.st_ino;
  return &file.release()->common;
}

herr_t Close(H5FD_t* file) {
  close(Of(file)->descriptor);
  delete Of(file);
  return 0;
}

int Compare(const H5FD_t* left, const H5FD_t* right) {
  const OpenFile &a = *Of(left), &b = *Of(right);
  if (a.device != b.device) return a.device < b.device ? -1 : 1;
  if (a.inode != b.inode) return a.inode < b.inode ? -1 : 1;
  return 0;
}

herr_t Query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr) {
    *flags = H5FD_FEAT_ACCUMULATE_METADATA_READ | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  }
  return 0;
}

haddr_t EndOfAddresses(const H5FD_t* file, H5FD_mem_t) { return Of(file)->end_of_addresses; }

herr_t SetEndOfAddresses(H5FD_t* file, H5FD_mem_t, haddr_t end) {
  Of(file)->end_of_addresses = end;
  return 0;
}

haddr_t EndOfFile(const H5FD_t* file, H5FD_mem_t) { return Of(file)->end_of_file; }

herr_t Read(H5FD_t* file, H5FD_mem_t type, hid_t, haddr_t offset, size_t bytes, void* buffer) {
  if (wanted != nullptr && type == H5FD_MEM_DRAW) {
    wanted->offset = static_cast<int64_t>(offset);
    wanted->bytes = static_cast<int64_t>(bytes);
    ++times_read;
    return 0;
  }
  auto* to = static_cast<char*>(buffer);
  while (bytes > 0) {
    const ssize_t count = pread(Of(file)->descriptor, to, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return -1;
    to += count;
    offset += count;
    bytes -= count;
  }
  return 0;
}

herr_t RefuseToWrite(H5FD_t*, H5FD_mem_t, hid_t, haddr_t, size_t, const void*) { return -1; }

const H5FD_class_t kDriver = {
    .name = "lockstep_read",
    .maxaddr = HADDR_MAX,
    .fc_degree = H5F_CLOSE_WEAK,
    .open = Open,
    .close = Close,
    .cmp = Compare,
    .query = Query,
    .get_eoa = EndOfAddresses,
    .set_eoa = SetEndOfAddresses,
    .get_eof = EndOfFile,
    .read = Read,
    .write = RefuseToWrite,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

}  // namespace

bool UseReadDriver(hid_t access) {
  const Hdf5Lock lock;
  static const hid_t driver = H5FDregister(&kDriver);
  return driver >= 0 && H5Pset_driver(access, driver, /*driver_info=*/nullptr) >= 0;
}

std::optional<ChunkPlace> FindChunk(hid_t dataset, const hsize_t* start) {
  const Hdf5Lock lock;
  ChunkPlace place;
  wanted = &place;
  times_read = 0;
  char nothing = 0;  // nothing is written to it
  const herr_t result =
      H5Dread_chunk(dataset, H5P_DEFAULT, start, &place.skipped_filters, &nothing);
  wanted = nullptr;
  if (result < 0 || times_read != 1) return std::nullopt;
  return place;
}

}  // namespace lockstep::data::hdf5

#else

namespace lockstep::data::hdf5 {

bool UseReadDriver(hid_t) { return false; }

std::optional<ChunkPlace> FindChunk(hid_t, const hsize_t*) { return std::nullopt; }

}  // namespace lockstep::data::hdf5

#endif
