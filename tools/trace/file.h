#pragma once

#include <functional>
#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace lockstep::trace {

// Writes a file so that `path` holds either what it held before or all that `write` put out, never
// a part of it. The folder must exist. An error names the path and the reason.
absl::Status WriteFileAtomically(const std::string& path,
                                 const std::function<void(std::ostream&)>& write);

}  // namespace lockstep::trace
