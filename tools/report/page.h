#pragma once

#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace lockstep::report {

// Writes one HTML page that shows what fsdp_bench measured (its --json, the page's only source of
// numbers): where a step's time goes, memory during it, bytes, losses, and the formulas beside the
// measurements. All that the page needs is in it, plotly.js for the plots too (5 MB): it opens from
// a file:// address on a machine without a network, and asks for nothing.
//
//   absl::Status status = report::WritePage("/tmp/report/report.html", measured);
//
// Plots are drawn by page.js, which sets <html data-state="ready"> when all are there, or "failed"
// and a message in the page. The file is written whole or not at all. Unavailable: it cannot be.
absl::Status WritePage(const std::string& path, const nlohmann::json& data);

}  // namespace lockstep::report
