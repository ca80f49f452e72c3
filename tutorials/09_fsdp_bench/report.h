#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/tutorials/09_fsdp_bench/measure.h"

namespace lockstep::tutorials {

// The table of all strategies, below each what the formulas say, and what the columns mean.
std::string TableOf(const Job& job, const std::vector<Measurement>& measurements);

// A few lines for a newcomer: who uses how much memory, who sends how much, and that the losses
// agree.
std::string SummaryOf(const std::vector<Measurement>& measurements);

// Largest relative difference between the strategies' losses at any step; not finite where a loss
// is not.
double LossDifference(const std::vector<Measurement>& measurements);

// Everything measured, as JSON, whole or not at all; null for what is not known. Unavailable: the
// file cannot be written.
absl::Status WriteJson(const std::string& path, const Job& job,
                       const std::vector<Measurement>& measurements);

// Makes the folder, where it is not there, on each rank that is to write into it. Unavailable: it
// cannot be made, or nothing can be written there. Ask before the work whose result it is for.
absl::Status PrepareReport(const std::string& folder);

// The same JSON as report.json, and report.html, a page that shows it (see tools/report/page.h).
absl::Status WriteReport(const std::string& folder, const Job& job,
                         const std::vector<Measurement>& measurements);

}  // namespace lockstep::tutorials
