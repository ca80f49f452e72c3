#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lockstep/parallel/fsdp/fsdp_options.h"

// What fsdp_random_test builds and does on all ranks: drawn from a seed alone, and printed where
// it fails.
namespace lockstep::parallel::testing {

constexpr int64_t kWidth = 5;  // of all activations, (B, 5) in f64

struct ParameterSpec {
  int id = 0;  // a parameter that is registered in several modules has one
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kDouble;
  bool transposed = false;
  bool frozen = false;
  bool toggled = false;  // requires_grad is changed after building
  bool is_new = true;    // else it was built in a module before
};

// What a module's forward does with a parameter, or with a module below it.
struct UseSpec {
  int id = 0;  // by which a forward leaves it out; -1: always there
  bool is_parameter = false;
  size_t target = 0;
  bool chained = false;  // x = f(x) and not x + f(x)
  bool detach_input = false;
  bool detach_output = false;
  bool in_place = false;  // changes the result
  bool parts = false;     // uses what else a tuple holds
};

struct ModuleSpec {
  enum Kind { kUnit, kTupleUnit, kPlain };
  int id = 0;
  Kind kind = kUnit;
  bool is_new = true;      // else it was built as part of a module before
  bool recompute = false;  // in Units
  bool dropped = false;    // constructed twice, and the first one dropped
  bool fresh = false;      // the result is no tensor that somebody else has
  bool buffers = false;
  std::vector<ParameterSpec> parameters;
  std::vector<ModuleSpec> children;
  std::vector<UseSpec> uses;
};

using Skips = std::set<int>;  // ids of uses that a forward leaves out

// Something beside training that must not disturb it.
struct Aside {
  enum Kind { kNothing, kEvaluate, kForwardAlone, kUnshard, kReadAll };
  Kind kind = kNothing;
  Skips skips;
  std::set<int> units;  // to unshard, counted modulo the Units there are
  bool wait = true;
  bool reshard = true;
};

struct MicroStep {
  std::vector<Skips> forwards;  // before the first backward
  bool one_backward = true;     // of the sum of losses; else one each, the last forward's first
  bool input_gradient = false;
  Aside between;  // forward and backward
};

struct Step {
  enum Zero { kToNone, kToZero, kNot };
  Zero zero = kToNone;
  Aside before;
  std::vector<MicroStep> micro_steps;  // all but the last under NoSync
  Aside after;                         // backward
  double clip_norm = 0;
  double clip_value = 0;
  bool compare_gradients = true;
  bool optimizer = true;
  bool update_state = false;
};

struct Plan {
  int ranks = 1;
  int batch = 1;  // a rank
  bool build_scope = false;
  bool recompute_first = false;  // before Fsdp, else after it
  bool sgd = false;
  FsdpOptions options;
  ModuleSpec model;
  std::vector<Step> steps;
  bool has_f32 = false;
};

Plan DrawPlan(uint64_t seed);

std::string ToString(const Plan& plan);

}  // namespace lockstep::parallel::testing
