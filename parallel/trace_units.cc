#include "lockstep/parallel/trace_units.h"

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "lockstep/tools/trace/clock.h"
#include "lockstep/tools/trace/recorder.h"

namespace lockstep::parallel {
namespace {

std::string PhaseOf(const char* phase, const std::string& unit) {
  return unit.empty() ? phase : absl::StrCat(phase, " ", unit);
}

// What has begun of the backward that this thread runs.
struct Backward {
  std::string phase;  // of the innermost Unit; none has begun: empty
  absl::Duration start;
  std::optional<absl::Duration> whole;
};
thread_local Backward backward;

void EndUnit(absl::Duration now) {
  if (backward.phase.empty()) return;
  trace::RecordSpan(backward.phase, "train", backward.start, now);
  backward.phase.clear();
}

// For the engine's end of backward.
void EndBackward() {
  const absl::Duration now = trace::SteadyNow();
  EndUnit(now);
  if (backward.whole) trace::RecordSpan("BACKWARD", "train", *backward.whole, now);
  backward.whole.reset();
}

void BeginUnit(const std::string& unit) {
  if (!trace::IsRecording()) return;
  const absl::Duration now = trace::SteadyNow();
  if (backward.phase.empty() && !backward.whole) {
    // Twice, to come after the callbacks that strategies queue in the meantime.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [] { torch::autograd::Engine::get_default_engine().queue_callback(EndBackward); });
  }
  if (unit.empty()) {
    // After a Unit whose output is the model's.
    backward.whole = backward.phase.empty() ? now : backward.start;
    return;
  }
  EndUnit(now);
  backward.phase = PhaseOf("BACKWARD", unit);
  backward.start = now;
}

}  // namespace

std::vector<HookHandle> TraceUnits(torch::nn::Module& model) {
  std::vector<HookHandle> handles;
  for (const NamedUnit& unit : FindUnits(model)) {
    // A stack, as a Unit may be called from within itself.
    const auto starts = std::make_shared<std::vector<absl::Duration>>();
    handles.push_back(unit.unit->AddPreForwardHook([starts](const std::vector<at::Tensor*>&) {
      if (trace::IsRecording()) starts->push_back(trace::SteadyNow());
    }));
    handles.push_back(unit.unit->AddPostForwardHook([starts, name = unit.name](
                                                        const std::vector<at::Tensor*>& outputs) {
      if (!starts->empty()) {
        trace::RecordSpan(PhaseOf("FORWARD", name), "train", starts->back(), trace::SteadyNow());
        starts->pop_back();
      }
      for (const at::Tensor* output : outputs) {
        if (!output->requires_grad() || output->is_leaf()) continue;
        output->register_hook([name](const at::Tensor&) { BeginUnit(name); });
        break;  // its gradients come together, or nearly
      }
    }));
  }
  return handles;
}

}  // namespace lockstep::parallel
