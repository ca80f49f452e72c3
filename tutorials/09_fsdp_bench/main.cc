// Trains the same model on the same data without parallelism, with an all-reduce by hand, with DDP
// and with FSDP, and lays time, memory and communication side by side.

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/parallel/strategies.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/file.h"
#include "lockstep/tools/trace/memory.h"
#include "lockstep/tools/trace/nvtx.h"
#include "lockstep/tutorials/09_fsdp_bench/measure.h"
#include "lockstep/tutorials/09_fsdp_bench/report.h"
#include "lockstep/tutorials/common/data_flag.h"
#include "lockstep/tutorials/common/device_world.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/model_flag.h"
#include "lockstep/tutorials/common/print.h"
#include "lockstep/tutorials/common/startup.h"
#include "lockstep/tutorials/common/training_flags.h"
#include "lockstep/tutorials/common/world.h"

namespace lockstep::tutorials {

// "none,manual,ddp,fsdp": of StrategyNames().
struct Strategies {
  std::vector<std::string> names = {"none", "manual", "ddp", "fsdp"};
};

bool AbslParseFlag(absl::string_view text, Strategies* strategies, std::string* error) {
  strategies->names = absl::StrSplit(text, ',');
  const std::vector<std::string>& known = parallel::StrategyNames();
  for (const std::string& name : strategies->names) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      *error = absl::StrCat("there is no strategy \"", name, "\"; there are ",
                            absl::StrJoin(known, ", "));
      return false;
    }
  }
  return true;
}

std::string AbslUnparseFlag(const Strategies& strategies) {
  return absl::StrJoin(strategies.names, ",");
}

struct Dtype {
  at::ScalarType type = at::kFloat;
};

bool AbslParseFlag(absl::string_view text, Dtype* dtype, std::string* error) {
  dtype->type = text == "f64" ? at::kDouble : at::kFloat;
  if (text == "f32" || text == "f64") return true;
  *error = "f32 and f64 are possible";
  return false;
}

std::string AbslUnparseFlag(Dtype dtype) { return dtype.type == at::kDouble ? "f64" : "f32"; }

struct AutocastDtype {
  std::optional<at::ScalarType> type;
};

bool AbslParseFlag(absl::string_view text, AutocastDtype* dtype, std::string* error) {
  dtype->type.reset();
  if (text == "bf16") dtype->type = at::kBFloat16;
  if (text == "bf16" || text == "none") return true;
  *error = "bf16 and none are possible";
  return false;
}

std::string AbslUnparseFlag(AutocastDtype dtype) { return dtype.type ? "bf16" : "none"; }

}  // namespace lockstep::tutorials

ABSL_FLAG(lockstep::tutorials::Strategies, strategies, {},
          "which to compare, separated by commas; there are zero1 and zero2 besides");
ABSL_FLAG(lockstep::tutorials::Count, steps, 20, "steps under each strategy, two of them warm-up");
ABSL_FLAG(lockstep::tutorials::Dtype, dtype, {},
          "of the model: f32, or f64, where losses agree to 1e-9");
ABSL_FLAG(lockstep::tutorials::AutocastDtype, autocast, {},
          "what forward's matrix products are computed in: bf16, or none for --dtype");
ABSL_FLAG(bool, nvtx, false, "mark phases and communication as NVTX ranges, for Nsight Systems");
ABSL_FLAG(std::string, json, "", "file to write all that was measured to");
ABSL_FLAG(std::string, report, "",
          "folder to write a page that shows it to, report.html, with each rank's timelines");

namespace lockstep::tutorials {
namespace {

absl::Status Bench(comm::Communicator& world) {
  // STEP 1: one job for all: model, data, seed.
  Job job = {.model = absl::GetFlag(FLAGS_model).value,
             .dtype = absl::GetFlag(FLAGS_dtype).type,
             .autocast = absl::GetFlag(FLAGS_autocast).type,
             .batch = absl::GetFlag(FLAGS_batch),
             .steps = absl::GetFlag(FLAGS_steps),
             .learning_rate = absl::GetFlag(FLAGS_lr),
             .seed = absl::GetFlag(FLAGS_seed),
             .timeline_folder = absl::GetFlag(FLAGS_report)};
  job.dataset = ValueOrThrow(data::mnist::Open({.directory = absl::GetFlag(FLAGS_data)}));
  StartupDone("data");
  if (absl::GetFlag(FLAGS_nvtx)) ThrowIfError(trace::StartNvtx());
  if (job.batch * world.size() > job.dataset->size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--batch=%d on %d ranks is more than the %d images that there are",
                        job.batch, world.size(), job.dataset->size()));
  }
  const std::string json = absl::GetFlag(FLAGS_json);
  if (!json.empty()) ValueOrThrow(trace::OutputPath(json));  // before the work, not after it
  if (!job.timeline_folder.empty()) ThrowIfError(PrepareReport(job.timeline_folder));
  Print(world, "%s, %d steps under each strategy; ranks: %d ...\n", job.model, job.steps,
        world.size());

  // STEP 2: train under each strategy, one after the other.
  std::vector<Measurement> measurements;
  for (const std::string& strategy : absl::GetFlag(FLAGS_strategies).names) {
    measurements.push_back(Measure(job, strategy, world));
  }

  // STEP 3: show what was measured, beside what theory says.
  Print(world, "\n%s\n%s", TableOf(job, measurements), SummaryOf(measurements));
  if (world.rank() == 0 && !json.empty()) {
    if (absl::Status status = WriteJson(json, job, measurements); !status.ok()) return status;
  }
  if (world.rank() == 0 && !job.timeline_folder.empty()) {
    ThrowIfError(WriteReport(job.timeline_folder, job, measurements));
    Print(world, "\nReport: %s/report.html\n", job.timeline_folder);
  }

  // STEP 4: strategies change how a model is trained, never what comes out.
  double tolerance = job.dtype == at::kDouble ? 1e-9 : 1e-4;
  if (job.autocast) tolerance = 1e-2;  // which sums of bf16 products differ by
  const double difference = LossDifference(measurements);
  if (!std::isfinite(difference)) {
    return absl::OutOfRangeError(absl::StrFormat(
        "a loss is no number any more: try a smaller --lr than %g", job.learning_rate));
  }
  if (difference > tolerance) {
    return absl::InternalError(
        absl::StrFormat("the strategies' losses differ by more than a relative %.0e", tolerance));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  lockstep::trace::InstallCountingAllocator();  // before the first tensor
  absl::SetFlag(&FLAGS_model, {"vit"});         // has blocks, and so more to show
  return lockstep::tutorials::RunRanks(
      argc, argv,
      {.summary =
           "compares strategies: time, memory and communication of the same training without "
           "parallelism, with an all-reduce by hand, with DDP and with FSDP.",
       .example = "bazel run //tutorials:fsdp_bench -- --ranks=2 --model=vit"},
      lockstep::tutorials::Bench, lockstep::tutorials::RanksOnDevice(),
      lockstep::tutorials::CreateWorldOnDevice);
}
