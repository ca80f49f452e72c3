#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep::trace {

// What a file that is renamed to `path` replaces: `path`, or what it links to. Nullopt where a
// folder, a device or the like is there.
std::optional<std::string> ReplaceablePath(const std::string& path);

// Where a file named `path` may be put by renaming: `path` itself, or what it links to. Unavailable
// where a folder, a device or the like is in its place, or its folder is missing or read-only: ask
// before the work whose result is to be written.
absl::StatusOr<std::string> OutputPath(const std::string& path);

// Writes a file so that `path` holds either what it held before or all that `write` put out, never
// a part of it. The folder must exist. An error names the path and the reason.
absl::Status WriteFileAtomically(const std::string& path,
                                 const std::function<void(std::ostream&)>& write);

}  // namespace lockstep::trace
