#include "lockstep/comm/mpi/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"

namespace lockstep::comm::mpi {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLeastKeptBytes = 32 << 20;

absl::Status SystemError(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

absl::StatusOr<char*> MapDescriptor(int descriptor, int64_t bytes) {
  void* base = mmap(/*addr=*/nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE, descriptor, /*offset=*/0);
  if (base == MAP_FAILED) return SystemError("mapping shared memory");
  madvise(base, static_cast<size_t>(bytes), MADV_DONTDUMP);  // else cores have all of it
  madvise(base, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // where the system allows it
  return static_cast<char*>(base);
}

// Files above this limit would raise a signal.
int64_t FileSizeLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return INT64_MAX;
  return static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace

Arena::Arena(char* base, const Handle& handle) : base_(base), handle_(handle) {
  free_[kPage] = handle.bytes - kPage;  // after the token
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(int64_t bytes) {
  Handle handle;
  handle.process = getpid();
  handle.bytes = std::min(bytes, FileSizeLimit()) / kPage * kPage;
  if (handle.bytes < 2 * kPage) return absl::UnavailableError("files must not be this large");
  if (getrandom(handle.token, sizeof(handle.token), /*flags=*/0) != sizeof(handle.token)) {
    return SystemError("drawing a random number");
  }
  const int descriptor = memfd_create("lockstep", MFD_CLOEXEC);
  if (descriptor < 0) return SystemError("making shared memory");
  handle.descriptor = descriptor;
  absl::Status status;
  if (ftruncate(descriptor, handle.bytes) != 0 ||
      fallocate(descriptor, /*mode=*/0, /*offset=*/0, kPage) != 0) {
    status = SystemError("sizing shared memory");
  }
  absl::StatusOr<char*> base = status.ok() ? MapDescriptor(descriptor, handle.bytes) : status;
  if (!base.ok()) {
    close(descriptor);
    return base.status();
  }
  std::memcpy(*base, handle.token, sizeof(handle.token));
  return std::unique_ptr<Arena>(new Arena(*base, handle));
}

absl::StatusOr<char*> Arena::Map(const Handle& handle) {
  const std::string path = absl::StrCat("/proc/", handle.process, "/fd/", handle.descriptor);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return SystemError(absl::StrCat("opening ", path));
  // In another container the number may be that of any process.
  uint64_t token[2] = {0, 0};
  if (pread(descriptor, token, sizeof(token), /*offset=*/0) != sizeof(token) ||
      std::memcmp(token, handle.token, sizeof(token)) != 0) {
    close(descriptor);
    return absl::UnavailableError(absl::StrCat(path, " is not that of the other rank"));
  }
  absl::StatusOr<char*> base = MapDescriptor(descriptor, handle.bytes);
  close(descriptor);
  return base;
}

void* Arena::Allocate(int64_t bytes) {
  const int64_t size = std::max<int64_t>((bytes + kPage - 1) / kPage, 1) * kPage;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto kept = std::find_if(kept_.begin(), kept_.end(),
                                 [size](const auto& block) { return block.second == size; });
  if (kept != kept_.end()) {
    const int64_t offset = kept->first;
    kept_.erase(kept);
    kept_bytes_ -= size;
    return Take(offset, size);
  }
  ReturnAllBut(KeptBeside(allocated_bytes_ + size));
  const auto find = [&] {
    return std::find_if(free_.begin(), free_.end(),
                        [size](const auto& hole) { return hole.second >= size; });
  };
  auto hole = find();
  if (hole == free_.end()) {
    ReturnAllBut(0);
    hole = find();
  }
  if (hole == free_.end()) return nullptr;
  const auto [offset, room] = *hole;
  int failed = 0;
  do {
    failed = fallocate(static_cast<int>(handle_.descriptor), /*mode=*/0, offset, size);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) return nullptr;
  free_.erase(hole);
  if (room > size) free_[offset + size] = room - size;
  return Take(offset, size);
}

void* Arena::Take(int64_t offset, int64_t size) {
  allocated_[offset] = size;
  allocated_bytes_ += size;
  peak_bytes_ = std::max(peak_bytes_, allocated_bytes_);
  return base_ + offset;
}

int64_t Arena::KeptBeside(int64_t allocated_bytes) const {
  return std::max(kLeastKeptBytes, peak_bytes_ - allocated_bytes);
}

void Arena::Free(void* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = allocated_.find(OffsetOf(block));
  kept_.push_back(*found);
  kept_bytes_ += found->second;
  allocated_bytes_ -= found->second;
  allocated_.erase(found);
  ReturnAllBut(KeptBeside(allocated_bytes_));
}

void Arena::ReturnAllBut(int64_t bytes) {
  while (kept_bytes_ > bytes) {
    const auto [offset, size] = kept_.front();
    kept_.pop_front();
    kept_bytes_ -= size;
    Return(offset, size);
  }
}

void Arena::Return(int64_t offset, int64_t size) {
  fallocate(static_cast<int>(handle_.descriptor), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            offset, size);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += size;
      return;
    }
  }
  free_[offset] = size;
}

bool Arena::Contains(const void* data, int64_t bytes) const {
  const char* start = static_cast<const char*>(data);
  return start >= base_ && start + bytes <= base_ + handle_.bytes;
}

}  // namespace lockstep::comm::mpi
