#include "lockstep/tutorials/common/startup.h"

#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/startup.h"
#include "lockstep/tutorials/common/table.h"

ABSL_FLAG(bool, profile_startup, false,
          "after the first step, print what each rank's start-up took");

namespace lockstep::tutorials {
namespace {

constexpr size_t kMaxRows = 20;  // of thousands of ranks nobody reads more

bool finished = false;

// As taskset writes it: 0-3,8.
std::string Cores() {
  cpu_set_t set;
  if (sched_getaffinity(/*pid=*/0, sizeof(set), &set) != 0) return "?";
  std::string text;
  for (int first = 0; first < CPU_SETSIZE; ++first) {
    if (!CPU_ISSET(first, &set)) continue;
    int last = first;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &set)) ++last;
    absl::StrAppend(&text, text.empty() ? "" : ",", first,
                    last > first ? absl::StrCat("-", last) : "");
    first = last;
  }
  return text;
}

bool WaitsForOthers(const std::string& phase) {
  return phase == "MPI" || phase == "model" || phase == "first step" || phase == "body";
}

nlohmann::json ThisRank(int rank) {
  std::array<char, 256> host = {};
  gethostname(host.data(), host.size() - 1);
  nlohmann::json report = {{"rank", rank},
                           {"host", host.data()},
                           {"threads", at::get_num_threads()},
                           {"cores", Cores()},
                           {"phases", nlohmann::json::array()}};
  for (const trace::StartupPhase& phase : trace::StartupPhases()) {
    report["phases"].push_back({phase.name, absl::ToDoubleMilliseconds(phase.duration)});
  }
  return report;
}

double Milliseconds(const nlohmann::json& report, bool all) {
  double sum = 0;
  for (const auto& phase : report["phases"]) {
    if (all || !WaitsForOthers(phase[0])) sum += phase[1].get<double>();
  }
  return sum;
}

// Null where a rank has no such phase.
const double* Find(const nlohmann::json& report, const std::string& name) {
  for (const auto& phase : report["phases"]) {
    if (phase[0] == name) return phase[1].get_ptr<const nlohmann::json::number_float_t*>();
  }
  return nullptr;
}

void PrintTable(std::vector<nlohmann::json> reports) {
  std::stable_sort(reports.begin(), reports.end(), [](const auto& a, const auto& b) {
    return Milliseconds(a, /*all=*/false) > Milliseconds(b, /*all=*/false);
  });
  std::vector<std::string> headers = {"rank", "host"};
  for (const auto& phase : reports[0]["phases"]) headers.push_back(phase[0]);
  for (const char* name : {"total", "threads", "cores"}) headers.emplace_back(name);
  Table table(headers);
  for (size_t i = 0; i < std::min(reports.size(), kMaxRows); ++i) {
    const nlohmann::json& report = reports[i];
    std::vector<std::string> cells = {absl::StrCat(report["rank"].get<int>()), report["host"]};
    for (const auto& phase : reports[0]["phases"]) {
      const double* milliseconds = Find(report, phase[0]);
      cells.push_back(milliseconds == nullptr ? "-" : absl::StrFormat("%.0f", *milliseconds));
    }
    cells.push_back(absl::StrFormat("%.0f", Milliseconds(report, /*all=*/true)));
    cells.push_back(absl::StrCat(report["threads"].get<int>()));
    cells.push_back(report["cores"]);
    table.AddRow(std::move(cells));
  }
  absl::PrintF("start-up, in ms; ranks by what they did without waiting for others\n%s",
               table.ToString());
  if (reports.size() > kMaxRows) {
    absl::PrintF("and %d ranks that were faster\n", reports.size() - kMaxRows);
  }
  std::fflush(stdout);
}

std::string Key(int rank) { return absl::StrCat("lockstep/startup/", rank); }

}  // namespace

void FinishStartup(std::string_view phase, comm::Communicator* world) {
  if (finished) return;
  finished = true;
  trace::EndStartupPhase(phase);
  if (!absl::GetFlag(FLAGS_profile_startup)) return;
  const int rank = world == nullptr ? 0 : world->rank();
  std::vector<nlohmann::json> reports = {ThisRank(rank)};
  if (rank != 0) {
    ThrowIfError(world->store().Set(Key(rank), reports[0].dump()));
    return;
  }
  for (int other = 1; world != nullptr && other < world->size(); ++other) {
    const std::string text = ValueOrThrow(world->store().Get(Key(other), absl::Minutes(1)));
    reports.push_back(nlohmann::json::parse(text));
    ThrowIfError(world->store().Delete(Key(other)));
  }
  PrintTable(std::move(reports));
}

void StartupDone(std::string_view phase, comm::Communicator* world) {
  if (phase == "first step") {
    FinishStartup(phase, world);
  } else if (!finished) {
    trace::EndStartupPhase(phase);
  }
}

}  // namespace lockstep::tutorials
