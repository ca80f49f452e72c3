#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/data/dataset.h"
#include "lockstep/tools/trace/memory.h"
#include "lockstep/tutorials/09_fsdp_bench/gpu_memory.h"

namespace lockstep::tutorials {

// What all strategies train, in the same way.
struct Job {
  std::string model;  // of models::Create
  at::ScalarType dtype = at::kFloat;
  std::optional<at::ScalarType> autocast;  // what forward computes in; none: `dtype`
  std::shared_ptr<data::Dataset> dataset;
  int64_t batch = 64;  // a rank
  int64_t steps = 20;
  double learning_rate = 1e-3;
  uint64_t seed = 1;
  std::string timeline_folder;  // where each rank writes its timelines; "": none are recorded
};

// Facts about the model that the formulas need.
struct ModelSize {
  int64_t parameters = 0;         // Ψ
  int64_t root_parameters = 0;    // those that no inner Unit owns, Ψ_root
  int64_t two_largest_units = 0;  // of the inner ones
  int64_t element_bytes = 4;
};

// The last step of rank 0. Times are since the step's start, and on a GPU the GPU's.
struct StepTimeline {
  struct Phase {
    std::string name;
    absl::Duration begin;
    absl::Duration end;
  };
  std::vector<Phase> phases;
  std::vector<trace::MemorySample> memory;
};

// One strategy's run, measured. Bytes and times are of the rank that had most.
struct Measurement {
  std::string strategy;
  int ranks = 1;  // that trained
  ModelSize size;
  std::vector<double> losses;  // of each step, over the global batch
  absl::Duration step;         // median, warm-up apart; so are the next three
  absl::Duration backward;     // without waiting; ddp and fsdp measure it
  std::optional<absl::Duration> communication = absl::ZeroDuration();  // none: only `exposed` known
  absl::Duration exposed;  // communication that nothing hid
  double samples_per_second = 0;
  trace::MemoryBytes peak{};  // by category
  int64_t total_peak = 0;
  trace::MemoryBytes peak_make_up{};  // of total_peak, on the rank that had it
  GpuMemory gpu;                      // peak of measured steps
  int64_t kept = 0;                   // parameters, gradients and optimizer state between steps
  int64_t sent_bytes = 0;             // a step and rank, on a ring
  int64_t payload_bytes = 0;          // a step and rank
  int64_t collectives = 0;            // a step
  StepTimeline timeline;              // where timelines are recorded, on rank 0
  std::vector<std::string> timeline_files;
};

// Trains job.steps steps under `strategy`; collective. "none" trains the global batch on rank 0
// while the others wait. Throws StatusError.
Measurement Measure(const Job& job, const std::string& strategy, comm::Communicator& world);

}  // namespace lockstep::tutorials
