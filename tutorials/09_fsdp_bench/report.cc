#include "lockstep/tutorials/09_fsdp_bench/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <ostream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lockstep/tools/report/page.h"
#include "lockstep/tools/trace/file.h"
#include "lockstep/tutorials/common/format.h"
#include "lockstep/tutorials/common/table.h"

namespace lockstep::tutorials {
namespace {

using trace::Index;
using trace::MemoryCategory;

// What the formulas give for one strategy, in bytes.
struct Expected {
  double parameters = 0;
  double gradients = 0;  // with shards of them at most this: some are whole while backward runs
  double optimizer = 0;
  double kept = 0;
  double sent = 0;
};

Expected ExpectedOf(const Measurement& m) {
  const double e = static_cast<double>(m.size.element_bytes);
  const double psi = static_cast<double>(m.size.parameters);
  const double root = static_cast<double>(m.size.root_parameters);
  const double n = m.ranks;
  const double ring = (n - 1) / n;
  // Each shards what those before it do, and something more.
  const bool parameters = m.strategy == "fsdp";
  const bool gradients = parameters || m.strategy == "zero2";
  const bool optimizer = gradients || m.strategy == "zero1";
  Expected expected = {.parameters = e * (parameters ? psi / n : psi),
                       .gradients = e * (gradients ? psi / n : psi),
                       .optimizer = 2 * e * (optimizer ? psi / n : psi),
                       .sent = ring * e * (parameters ? 3 * psi - root : 2 * psi)};
  expected.kept = expected.parameters + expected.gradients + expected.optimizer;
  if (gradients) expected.gradients += e * (root + static_cast<double>(m.size.two_largest_units));
  return expected;
}

bool ShardsGradients(const Measurement& m) { return m.strategy == "fsdp" || m.strategy == "zero2"; }

int64_t Peak(const Measurement& m, MemoryCategory category) { return m.peak[Index(category)]; }

const Measurement* Find(const std::vector<Measurement>& measurements, const std::string& strategy) {
  for (const Measurement& m : measurements) {
    if (m.strategy == strategy) return &m;
  }
  return nullptr;
}

std::string Mebibytes(double bytes) { return InMebibytes(static_cast<int64_t>(bytes)); }

}  // namespace

std::string TableOf(const Job& job, const std::vector<Measurement>& measurements) {
  Table table({"strategy", "step\nms", "backw.\nms", "comm.\nms", "hidden\n%", "samples\n/s",
               "params\nMiB", "grads\nMiB", "optim.\nMiB", "activ.\nMiB", "kept\nMiB", "peak\nMiB",
               "sent\nMiB/step", "coll.\n/step", "loss"});
  for (const Measurement& m : measurements) {
    const absl::Duration communication = m.communication.value_or(absl::ZeroDuration());
    const double hidden =
        communication > absl::ZeroDuration()
            ? std::max(0.0, 100 * (1 - absl::FDivDuration(m.exposed, communication)))
            : 0;
    const bool known = m.collectives > 0 && m.communication;
    table.AddRow({m.strategy, InMilliseconds(m.step),
                  m.backward > absl::ZeroDuration() ? InMilliseconds(m.backward) : "-",
                  known ? InMilliseconds(communication) : "-",
                  known ? absl::StrFormat("%.0f", hidden) : "-",
                  absl::StrFormat("%.0f", m.samples_per_second),
                  InMebibytes(Peak(m, MemoryCategory::kParameters)),
                  InMebibytes(Peak(m, MemoryCategory::kGradients)),
                  InMebibytes(Peak(m, MemoryCategory::kOptimizer)),
                  InMebibytes(Peak(m, MemoryCategory::kActivations)), InMebibytes(m.kept),
                  InMebibytes(m.total_peak), InMebibytes(m.sent_bytes), absl::StrCat(m.collectives),
                  absl::StrFormat("%.6f", m.losses.back())});
    const Expected expected = ExpectedOf(m);
    table.AddRow({"  formula", "", "", "", "", "", Mebibytes(expected.parameters),
                  (ShardsGradients(m) ? "<= " : "") + Mebibytes(expected.gradients),
                  Mebibytes(expected.optimizer), "", Mebibytes(expected.kept), "",
                  Mebibytes(expected.sent), "", ""});
  }
  const ModelSize& size = measurements[0].size;
  return absl::StrCat(
      table.ToString(), "\n",
      absl::StrFormat(
          "%s, %s parameters (Ψ) of %d bytes (e); AdamW; a batch of %d a rank; medians of "
          "the slowest rank; bytes a rank, measured.\n",
          job.model, WithThousands(size.parameters), size.element_bytes, job.batch),
      "params to peak: the most during a step. kept: parameters, gradients and optimizer state "
      "between steps. backw.: backward, waiting apart. hidden: communication while computing. "
      "coll.: "
      "collectives.\n"
      "formula: eΨ parameters, eΨ gradients, 2eΨ optimizer state, 4eΨ kept, 2(N-1)/N eΨ sent on a "
      "ring "
      "of N ranks. zero1 keeps 1/N of the\n"
      "         optimizer state, zero2 of the gradients too, besides two Units' and the model's "
      "own "
      "during backward; fsdp of the parameters\n"
      "         too, and sends (N-1)/N e(3Ψ - Ψ_root). Padding comes on top.\n");
}

std::string SummaryOf(const std::vector<Measurement>& measurements) {
  std::string text;
  const Measurement* ddp = Find(measurements, "ddp");
  if (ddp == nullptr) ddp = Find(measurements, "manual");
  const Measurement* fsdp = Find(measurements, "fsdp");
  if (ddp != nullptr && fsdp != nullptr && fsdp->ranks > 1) {
    absl::StrAppend(
        &text,
        absl::StrFormat("Memory: between steps fsdp keeps %s MiB a rank, %s %s MiB: each of its %d "
                        "ranks has its share, not a copy.\n",
                        InMebibytes(fsdp->kept), ddp->strategy, InMebibytes(ddp->kept),
                        fsdp->ranks),
        absl::StrFormat("Communication: for that fsdp sends %s MiB a step and rank, %s %s MiB.\n",
                        InMebibytes(fsdp->sent_bytes), ddp->strategy,
                        InMebibytes(ddp->sent_bytes)));
  }
  for (const Measurement& each : measurements) {
    if (each.gpu.reserved == 0) continue;
    absl::StrAppend(
        &text, absl::StrFormat("GPU memory of %s: at most %s MiB in tensors, %s MiB reserved.\n",
                               each.strategy, InMebibytes(each.gpu.allocated),
                               InMebibytes(each.gpu.reserved)));
  }
  if (measurements.size() > 1) {
    absl::StrAppend(&text,
                    absl::StrFormat("Losses: at every step within a relative %.1e of each other.\n",
                                    LossDifference(measurements)));
  }
  return text;
}

double LossDifference(const std::vector<Measurement>& measurements) {
  double difference = 0;
  for (size_t step = 0; step < measurements[0].losses.size(); ++step) {
    for (const Measurement& m : measurements) {
      const double reference = measurements[0].losses[step];
      const double here = std::abs(m.losses[step] - reference) / std::abs(reference);
      if (!std::isfinite(here)) return here;
      difference = std::max(difference, here);
    }
  }
  return difference;
}

namespace {

std::string NameOf(int category) {
  return std::string(trace::MemoryCategoryName(static_cast<MemoryCategory>(category)));
}

nlohmann::json JsonOf(const trace::MemoryBytes& bytes) {
  nlohmann::json json;
  for (int i = 0; i < trace::kNumMemoryCategories; ++i) json[NameOf(i)] = bytes[i];
  return json;
}

nlohmann::json JsonOf(const StepTimeline& timeline) {
  nlohmann::json phases = nlohmann::json::object();
  for (const StepTimeline::Phase& phase : timeline.phases) {
    phases[phase.name] = {absl::ToDoubleMilliseconds(phase.begin),
                          absl::ToDoubleMilliseconds(phase.end)};
  }
  nlohmann::json times = nlohmann::json::array();
  nlohmann::json bytes;
  for (int i = 0; i < trace::kNumMemoryCategories; ++i) bytes[NameOf(i)] = nlohmann::json::array();
  for (const trace::MemorySample& sample : timeline.memory) {
    times.push_back(absl::ToDoubleMilliseconds(sample.time));
    for (int i = 0; i < trace::kNumMemoryCategories; ++i) {
      bytes[NameOf(i)].push_back(sample.live_by_category[i]);
    }
  }
  return {{"phases_ms", phases}, {"time_ms", times}, {"bytes", bytes}};
}

// A step's time: computing alone, computing while communicating, waiting. The three medians are of
// ranks and steps of their own, so that noise may take one past the whole. Where it is not known
// how long communication was under way, the first has the second in it.
nlohmann::json SplitOf(const Measurement& m) {
  const absl::Duration communication = std::min(m.communication.value_or(m.exposed), m.step);
  const absl::Duration exposed = std::min(m.exposed, communication);
  return {{"compute", absl::ToDoubleMilliseconds(m.step - communication)},
          {"hidden", m.communication
                         ? nlohmann::json(absl::ToDoubleMilliseconds(communication - exposed))
                         : nlohmann::json()},
          {"exposed", absl::ToDoubleMilliseconds(exposed)}};
}

nlohmann::json JsonOf(const Job& job, const std::vector<Measurement>& measurements) {
  nlohmann::json strategies = nlohmann::json::array();
  int ranks = 1;
  for (const Measurement& m : measurements) {
    ranks = std::max(ranks, m.ranks);
    const Expected expected = ExpectedOf(m);
    strategies.push_back({
        {"strategy", m.strategy},
        {"ranks", m.ranks},
        {"step_ms", absl::ToDoubleMilliseconds(m.step)},
        {"backward_ms", absl::ToDoubleMilliseconds(m.backward)},
        {"communication_ms", m.communication
                                 ? nlohmann::json(absl::ToDoubleMilliseconds(*m.communication))
                                 : nlohmann::json()},
        {"exposed_ms", absl::ToDoubleMilliseconds(m.exposed)},
        {"split_ms", SplitOf(m)},
        {"samples_per_s", m.samples_per_second},
        {"peak_bytes", JsonOf(m.peak)},
        {"peak_make_up_bytes", JsonOf(m.peak_make_up)},
        {"total_peak_bytes", m.total_peak},
        {"gpu_allocated_bytes", m.gpu.allocated},
        {"gpu_reserved_bytes", m.gpu.reserved},
        {"kept_bytes", m.kept},
        {"sent_bytes_per_step", m.sent_bytes},
        {"payload_bytes_per_step", m.payload_bytes},
        {"collectives_per_step", m.collectives},
        {"formula_bytes",
         {{"parameters", expected.parameters},
          {"gradients", expected.gradients},
          {"optimizer", expected.optimizer},
          {"kept", expected.kept},
          {"sent_per_step", expected.sent}}},
        {"losses", m.losses},
        {"timeline", JsonOf(m.timeline)},
        {"timeline_files", m.timeline_files},
    });
  }
  const ModelSize& size = measurements[0].size;
  return {
      {"model", job.model},
      {"ranks", ranks},
      {"dtype", job.dtype == at::kDouble ? "f64" : "f32"},
      {"parameters", size.parameters},
      {"root_parameters", size.root_parameters},
      {"batch", job.batch},
      {"steps", job.steps},
      {"seed", job.seed},
      {"loss_difference", LossDifference(measurements)},
      {"strategies", strategies},
  };
}

absl::Status Write(const std::string& path, const nlohmann::json& report) {
  return trace::WriteFileAtomically(path,
                                    [&](std::ostream& out) { out << report.dump(2) << "\n"; });
}

}  // namespace

absl::Status WriteJson(const std::string& path, const Job& job,
                       const std::vector<Measurement>& measurements) {
  return Write(path, JsonOf(job, measurements));
}

absl::Status PrepareReport(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot make the folder ", folder, " for the report: ", error.message()));
  }
  return trace::OutputPath(folder + "/report.html").status();
}

absl::Status WriteReport(const std::string& folder, const Job& job,
                         const std::vector<Measurement>& measurements) {
  const nlohmann::json report = JsonOf(job, measurements);
  if (absl::Status status = Write(folder + "/report.json", report); !status.ok()) return status;
  return report::WritePage(folder + "/report.html", report);
}

}  // namespace lockstep::tutorials
