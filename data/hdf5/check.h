#pragma once

#include <string>

#include "absl/status/status.h"
#include "lockstep/data/hdf5/hdf5.h"

namespace lockstep::data::hdf5 {

// Reads one of the files whole, with the fields and the budget of `options`, in a child process:
// this program, started anew, which does that before its main() and then ends. The child's error;
// DATA_LOSS where the child crashed, or where it took longer than a minute and a second more for
// each MiB of the file; INTERNAL where it cannot be started.
absl::Status CheckInChild(const std::string& path, const Options& options);

}  // namespace lockstep::data::hdf5
