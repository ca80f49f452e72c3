#include "lockstep/data/hdf5/handle.h"

#include "absl/strings/str_cat.h"

namespace lockstep::data::hdf5 {
namespace {

std::recursive_mutex& Mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

int depth = 0;  // of Hdf5Locks, one inside the other; guarded by the mutex

herr_t TakeFirst(unsigned depth, const H5E_error2_t* error, void* reason) {
  if (depth == 0 && error->desc != nullptr) *static_cast<std::string*>(reason) = error->desc;
  return 0;
}

}  // namespace

Hdf5Lock::Hdf5Lock() : lock_(Mutex()) {
  ++depth;
  // Each thread has an error stack of its own, and each stack prints until told not to.
  thread_local const herr_t quiet = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  (void)quiet;
}

Hdf5Lock::~Hdf5Lock() {
  // What a thread leaves on its error stack when it ends is never freed.
  if (--depth == 0) H5Eclear2(H5E_DEFAULT);
}

void Handle::Reset() {
  if (!ok()) return;
  const Hdf5Lock lock;
  close_(id_);
  id_ = H5I_INVALID_HID;
}

std::string Hdf5Reason() {
  const Hdf5Lock lock;
  std::string reason;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, TakeFirst, &reason);
  return reason;
}

absl::Status Hdf5Error(absl::StatusCode code, const std::string& message) {
  const std::string reason = Hdf5Reason();
  return absl::Status(code, reason.empty() ? message : absl::StrCat(message, " (", reason, ")"));
}

}  // namespace lockstep::data::hdf5
