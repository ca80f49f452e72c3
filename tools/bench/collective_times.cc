// Times collectives and prints them as one line of JSON. What collectives.py runs.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "lockstep/tools/bench/collective_measure.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/world.h"

using lockstep::tutorials::Count;

ABSL_FLAG(Count, min_bytes, 1 << 10, "the smallest whole buffer");
ABSL_FLAG(Count, max_bytes, 32 << 20,
          "the largest; sizes grow by factors of 8, the last one by less");
ABSL_FLAG(Count, samples, 10, "times that each call is timed");
ABSL_FLAG(bool, busy, false, "measure beside computing ranks, in the place of calls alone");
ABSL_FLAG(Count, busy_bytes, 25 << 20, "bytes of the all-reduce beside computing");
ABSL_FLAG(lockstep::tutorials::Rate, compute_ms, 40, "computing beside it");

namespace lockstep::bench {
namespace {

std::vector<int64_t> Sizes() {
  std::vector<int64_t> sizes;
  for (int64_t size = absl::GetFlag(FLAGS_min_bytes); size < absl::GetFlag(FLAGS_max_bytes);
       size *= 8) {
    sizes.push_back(size);
  }
  sizes.push_back(absl::GetFlag(FLAGS_max_bytes));
  return sizes;
}

absl::Status MeasureCalls(comm::Communicator& comm, nlohmann::json& report) {
  Times times;
  absl::Status status =
      MeasureRound(comm, Sizes(), static_cast<int>(absl::GetFlag(FLAGS_samples)), times);
  for (const auto& [subject, seconds] : times) {
    report["times"].push_back({{"who", subject.contender},
                               {"what", comm::Name(subject.kind)},
                               {"bytes", subject.bytes},
                               {"seconds", seconds}});
  }
  return status;
}

absl::Status MeasureBusy(comm::Communicator& comm, nlohmann::json& report) {
  const int samples = static_cast<int>(absl::GetFlag(FLAGS_samples));
  const double compute_seconds = absl::GetFlag(FLAGS_compute_ms) / 1e3;
  for (const char* who : {"lockstep", "mpi"}) {
    const auto overlap =
        MeasureOverlap(comm, who, absl::GetFlag(FLAGS_busy_bytes), compute_seconds, samples);
    if (!overlap.ok()) return overlap.status();
    report["overlap"].push_back({{"who", who},
                                 {"bytes", int64_t{absl::GetFlag(FLAGS_busy_bytes)}},
                                 {"compute", overlap->compute},
                                 {"transfer", overlap->transfer},
                                 {"both", overlap->both}});
    const auto late = MeasureLate(comm, who, compute_seconds, samples);
    if (!late.ok()) return late.status();
    report["late"].push_back(
        {{"who", who}, {"alone", late->alone}, {"waited_for", late->waited_for}});
  }
  return absl::OkStatus();
}

absl::Status Run(comm::Communicator& comm) {
  if (comm.size() == 1) {
    return absl::InvalidArgumentError("one rank has nobody to talk to: --ranks=2 or more");
  }
  nlohmann::json report = {{"ranks", comm.size()}};
  absl::Status status =
      absl::GetFlag(FLAGS_busy) ? MeasureBusy(comm, report) : MeasureCalls(comm, report);
  if (status.ok() && comm.rank() == 0) std::cout << report << std::endl;
  return status;
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary = "times collectives of comm/mpi, MPI's own and memcpy; prints JSON.",
       .example = "bazel run //tools/bench:collectives"},
      lockstep::bench::Run, {.default_ranks = 2});
}
